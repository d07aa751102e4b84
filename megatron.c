/* megatron.c: trains and runs GPT-family transformers.
 *
 * Contents
 *   §1   checks, arenas, random numbers
 *   §2   options and their only validator
 *   §3   kernels in plain C
 *   §4   the rank grid and its groups
 *   §5   collectives
 *   §8   the parameter table
 *   §9   attention, MLP, layer
 *   §10  the model
 *   §11  schedules
 *   §12  gradient buckets
 *   §13  optimizer
 *   §14  checkpoints and Hugging Face
 *   §15  generation
 *   §16  the training step
 */
#include "megatron.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>
#ifdef MT_HAVE_BLAS
#include <cblas.h>
#endif
#ifdef MT_HAVE_MPI
#include <mpi.h>
#endif
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

/* ==== §1 checks, arenas, random numbers ========================================================================== */
/* What everything else stands on. Invariants: library code never exits on the user's input, memory is asked for here
 * and nowhere else, and a random number is a pure function of what it is for. */

int mt_error_set(mt_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return -1;
}

void mt_die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fprintf(stderr, "error: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
#ifdef MT_HAVE_MPI
    int started = 0;
    MPI_Initialized(&started);
    if (started) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
    exit(1);
}

void *mt_malloc(int64_t bytes) {
    void *memory = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: %lld bytes were asked for", (long long)bytes);
    return memory;
}

void *mt_calloc(int64_t bytes) {
    void *memory = calloc(1, bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: %lld bytes were asked for", (long long)bytes);
    return memory;
}

void *mt_realloc(void *memory, int64_t bytes) {
    memory = realloc(memory, bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: %lld bytes were asked for", (long long)bytes);
    return memory;
}

char *mt_strdup(const char *text) {
    return strcpy(mt_malloc((int64_t)strlen(text) + 1), text);
}

double mt_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const struct {
    const char *name;
    int64_t size;
} mt_dtypes[MT_NUM_DTYPES] = {
    [MT_F32] = {"F32", 4},   [MT_BF16] = {"BF16", 2},       [MT_F16] = {"F16", 2},         [MT_F64] = {"F64", 8},
    [MT_I8] = {"I8", 1},     [MT_U8] = {"U8", 1},           [MT_I16] = {"I16", 2},         [MT_U16] = {"U16", 2},
    [MT_I32] = {"I32", 4},   [MT_U32] = {"U32", 4},         [MT_I64] = {"I64", 8},         [MT_U64] = {"U64", 8},
    [MT_BOOL] = {"BOOL", 1}, [MT_F8_E4M3] = {"F8_E4M3", 1}, [MT_F8_E5M2] = {"F8_E5M2", 1},
};

int64_t mt_dtype_size(mt_dtype dtype) {
    return mt_dtypes[dtype].size;
}

const char *mt_dtype_name(mt_dtype dtype) {
    return mt_dtypes[dtype].name;
}

int mt_dtype_parse(const char *name) {
    for (int dtype = 0; dtype < MT_NUM_DTYPES; dtype++)
        if (strcmp(name, mt_dtypes[dtype].name) == 0) return dtype;
    return -1;
}

float mt_bf16_to_f32(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

uint16_t mt_f32_to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16 | 0x40); // NaN stays NaN when its low bits go
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

float mt_f16_to_f32(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                      : exponent == 0 ? ldexpf((float)mantissa, -24)
                                      : ldexpf((float)(mantissa + 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

uint16_t mt_f32_to_f16(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float magnitude = fabsf(value);
    if (isnan(value)) return sign | 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00; // rounds to more than the largest half, 65504
    int exponent;
    frexpf(magnitude, &exponent);                         // magnitude in [2^(exponent-1), 2^exponent)
    if (magnitude == 0 || exponent < -13) exponent = -13; // subnormals share the smallest step, 2^-24
    int32_t mantissa = (int32_t)nearbyintf(ldexpf(magnitude, 11 - exponent)); // ties to even
    return sign | (uint16_t)(mantissa + ((exponent + 13) << 10)); // a carry moves into the exponent by itself
}

void *mt_arena_alloc(mt_arena *arena, int64_t bytes) {
    int64_t start = arena->used;
    arena->used += (bytes + 255) / 256 * 256;
    if (!arena->base) return NULL;
    MT_CHECK(arena->used <= arena->capacity);
    return arena->base + start;
}

void mt_philox(uint32_t out[4], uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter_low, c1 = (uint32_t)(counter_low >> 32);
    uint32_t c2 = (uint32_t)counter_high, c3 = (uint32_t)(counter_high >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53 * c0, product1 = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

uint64_t mt_random_key(uint64_t seed, uint64_t purpose, uint64_t index) {
    uint32_t words[4];
    mt_philox(words, seed, purpose, index);
    return (uint64_t)words[0] << 32 | words[1];
}

/* ==== §2 options and their only validator ======================================================================== */

/* ==== §3 kernels in plain C ====================================================================================== */
/* The definition of what each operation computes, forward and backward side by side. Elements are stored as fp32 or
 * bf16 and all arithmetic is fp32, with long sums in blocks or in fp64. Invariants: every output element has exactly
 * one task that writes it, and every sum a fixed order, so that results do not depend on the number of threads; an
 * activation's gradient is written (=), a parameter's gradient accumulates (+=). The only state is a scratch buffer per
 * calling thread. */
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // without OpenMP its pragmas mean nothing, which is right
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wpass-failed" // a loop that did not become vector code is right, only slower
#endif

/* One prototype an operation, from the list that the table at the end is made of. */
#define MT_CPU_PROTOTYPE(operation) static mt_##operation##_fn mt_cpu_##operation;
MT_OPERATIONS(MT_CPU_PROTOTYPE)
#undef MT_CPU_PROTOTYPE

/* ==== §3a threads, elements, memory ============================================================================== */
/* Rows are computed as floats. For fp32 a row is used where it lies; for bf16 it passes through scratch, so that one
 * body serves both: load what is read, open what is written, compute, close. */

enum {
    MT_BLOCK = 1024,      // elements of one task of an elementwise operation, and of one partial sum
    MT_COLUMNS = 64,      // columns of one task of a reduction over rows
    MT_PARALLEL = 1 << 14 // elements from which waking the other threads pays
};

static int64_t mt_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t mt_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t mt_blocks(int64_t n, int64_t block) {
    return (n + block - 1) / block;
}

/* Scratch of the calling thread: it grows to the largest that was asked for and stays, so that a training step in its
 * stride allocates nothing. The next call may move it. */
static float *mt_scratch_grow(int64_t floats) {
    static _Thread_local float *memory;
    static _Thread_local int64_t capacity;
    if (floats > capacity || !memory) {
        free(memory);
        capacity = floats;
        memory = mt_malloc(capacity * (int64_t)sizeof(float));
    }
    return memory;
}

/* The same shared out to the threads of a parallel region, `floats` for each. */
typedef struct mt_scratch {
    float *memory;
    int64_t floats;
} mt_scratch;

static mt_scratch mt_scratch_reserve(int64_t floats) {
    int64_t threads = 1;
#ifdef MT_HAVE_OPENMP
    threads = omp_get_max_threads();
#endif
    floats = mt_blocks(floats, 16) * 16; // whole cache lines: threads do not share one
    return (mt_scratch){mt_scratch_grow(threads * floats), floats};
}

/* The slice of the thread that asks. */
static float *mt_scratch_slice(mt_scratch scratch) {
#ifdef MT_HAVE_OPENMP
    return scratch.memory + omp_get_thread_num() * scratch.floats;
#else
    return scratch.memory;
#endif
}

/* The n elements of x from `offset` on, as floats to read. */
static inline const float *mt_row_load(float *scratch, const void *x, int64_t offset, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) return (const float *)x + offset;
    const uint16_t *bits = (const uint16_t *)x + offset;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) scratch[i] = mt_bf16_to_f32(bits[i]);
    return scratch;
}

/* Where the row of y at `offset` is computed as floats; mt_row_close then puts it in place. */
static inline float *mt_row_open(float *scratch, void *y, int64_t offset, mt_dtype dtype) {
    return dtype == MT_F32 ? (float *)y + offset : scratch;
}

static inline void mt_row_close(void *y, int64_t offset, const float *row, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) return; // it was computed in place
    uint16_t *bits = (uint16_t *)y + offset;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) bits[i] = mt_f32_to_bf16(row[i]);
}

/* The greatest of x[n], -inf when n == 0; in lanes, since compilers do not reorder a maximum that could meet a NaN. */
static inline float mt_row_max(const float *x, int64_t n) {
    enum { LANES = 16 };
    float lanes[LANES], max = -INFINITY;
    int64_t i = 0;
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = -INFINITY;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int64_t lane = 0; lane < LANES; lane++)
            lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    }
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t lane = 0; lane < LANES; lane++) max = lanes[lane] > max ? lanes[lane] : max;
    return max;
}

/* exp(x) to about one unit in the last place, without a branch, so that loops over it become vector code:
 * 2^n e^r with |r| <= ln(2) / 2 and Cephes' polynomial for e^r. Right at both infinities, at NaN and under 2^-126. */
static inline float mt_exp(float x) {
    const float shift = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer that the low bits then hold
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + shift, n = shifted - shift;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        float value;
        uint32_t bits;
    } whole = {shifted}, low, high;
    uint32_t power = whole.bits - 0x4b400000 + 256; // n + 256, in two halves: 2^n itself may overflow or be subnormal
    low.bits = (power / 2 - 1) << 23;
    high.bits = (power - power / 2 - 1) << 23;
    return p * low.value * high.value;
}

/* Factors of dropout, 0 or 1 / (1 - p), for the coordinates (low, high + first ... first + n - 1): four neighbours
 * share one Philox counter, (low, high | index / 4), and take a word each. */
static void mt_dropout_factors(float *factors, int64_t n, const mt_dropout *dropout, uint64_t low, uint64_t high,
                               int64_t first) {
    enum { COUNTERS = 16 }; // drawn at once, as vector code
    uint32_t words[4 * COUNTERS];
    uint32_t threshold = dropout->p < 1 ? (uint32_t)(dropout->p * 4294967296.0) : UINT32_MAX;
    float kept = dropout->p < 1 ? (float)(1.0 / (1.0 - dropout->p)) : 0.0f;
    for (int64_t start = first / 4 * 4; start < first + n; start += 4 * COUNTERS) {
#pragma omp simd
        for (int64_t c = 0; c < COUNTERS; c++)
            mt_philox(words + 4 * c, dropout->key, low, high | (uint64_t)(start / 4 + c));
        int64_t begin = mt_max(start, first), end = mt_min(start + 4 * COUNTERS, first + n);
        for (int64_t i = begin; i < end; i++) factors[i - first] = words[i - start] >= threshold ? kept : 0.0f;
    }
}

static void *mt_cpu_memory_alloc(int64_t bytes) {
    const int64_t page = 1 << 21; // huge pages spare the address translation that streaming through weights costs
    if (bytes < page) return mt_malloc(bytes);
    void *memory;
    if (posix_memalign(&memory, (size_t)page, (size_t)bytes) != 0) return mt_malloc(bytes); // which says so
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
    return memory;
}

static void mt_cpu_memory_free(void *memory) {
    free(memory);
}

static void mt_cpu_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    (void)stream;
    const int64_t piece = 1 << 18;
#pragma omp parallel for if (bytes > 4 * piece)
    for (int64_t i = 0; i < mt_blocks(bytes, piece); i++)
        memcpy((char *)to + i * piece, (const char *)from + i * piece, (size_t)mt_min(piece, bytes - i * piece));
}

static void mt_cpu_memory_zero(void *memory, int64_t bytes, mt_stream *stream) {
    (void)stream;
    const int64_t piece = 1 << 18;
#pragma omp parallel for if (bytes > 4 * piece)
    for (int64_t i = 0; i < mt_blocks(bytes, piece); i++)
        memset((char *)memory + i * piece, 0, (size_t)mt_min(piece, bytes - i * piece));
}

static mt_stream *mt_cpu_stream_create(void) {
    return NULL;
}

static void mt_cpu_stream_destroy(mt_stream *stream) {
    (void)stream;
}

static void mt_cpu_stream_wait(mt_stream *stream) {
    (void)stream;
}

/* ==== §3b linear layers ========================================================================================== */
/* Three matrix products: y = x w^T, dx = dy w and dw += dy^T x. */

enum { MT_PLAIN = 0, MT_TRANSPOSED = 1 };

#ifdef MT_HAVE_BLAS
static int64_t mt_halve(int64_t n) {
    return mt_blocks(n, 128) * 64;
}

/* The library's product, cut into tiles that depend on the shape alone, each computed by one thread: left to itself the
 * library cuts by the number of threads, and its edges round differently from its middle. Under 2^18 products OpenBLAS
 * keeps to one thread anyway. */
static void mt_matmul_large(float *c, const float *a, const float *b, int64_t M, int64_t N, int64_t K, int64_t ldc,
                            int64_t lda, int64_t ldb, bool a_transposed, bool b_transposed, bool accumulate) {
    int64_t rows = M, columns = N;
    while (rows > 512) rows = mt_halve(rows);
    while (columns > 768 || (columns > 192 && mt_blocks(M, rows) * mt_blocks(N, columns) < 4))
        columns = mt_halve(columns);
#ifdef OPENBLAS_THREAD
    if (openblas_get_parallel() == OPENBLAS_THREAD && openblas_get_num_threads() > 1) openblas_set_num_threads(1);
#endif
#pragma omp parallel for collapse(2) schedule(dynamic) if (M * N * K > 1 << 18)
    for (int64_t n = 0; n < N; n += columns)
        for (int64_t m = 0; m < M; m += rows)
            cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans,
                        b_transposed ? CblasTrans : CblasNoTrans, (int)mt_min(rows, M - m), (int)mt_min(columns, N - n),
                        (int)K, 1.0f, a + (a_transposed ? m : m * lda), (int)lda, b + (b_transposed ? n * ldb : n),
                        (int)ldb, accumulate ? 1.0f : 0.0f, c + m * ldc + n, (int)ldc);
}
#else
enum { MT_PANEL = 32, MT_DEPTH = 256, MT_TILE = 4 };

/* Copies b[k0 + k][n0 + n] for one depth of k and one panel of n into consecutive memory, padded with zeros. */
static void mt_matmul_pack(float panel[MT_DEPTH][MT_PANEL], const float *b, int64_t ldb, bool transposed, int64_t k0,
                           int64_t n0, int64_t depth, int64_t width) {
    for (int64_t k = 0; k < depth; k++) {
        for (int64_t n = 0; n < width; n++)
            panel[k][n] = transposed ? b[(n0 + n) * ldb + k0 + k] : b[(k0 + k) * ldb + n0 + n];
        for (int64_t n = width; n < MT_PANEL; n++) panel[k][n] = 0.0f;
    }
}

/* Sums products for MT_TILE rows of c and one panel of its columns, which fit in registers; a's rows lie a_row apart,
 * its columns a_column. Rows past `rows` repeat the last one. */
static void mt_matmul_tile(float sums[MT_TILE][MT_PANEL], const float *a, int64_t a_row, int64_t a_column, int64_t rows,
                           float panel[MT_DEPTH][MT_PANEL], int64_t depth) {
    const float *a0 = a, *a1 = a + mt_min(1, rows - 1) * a_row, *a2 = a + mt_min(2, rows - 1) * a_row,
                *a3 = a + mt_min(3, rows - 1) * a_row;
    float s0[MT_PANEL] = {0}, s1[MT_PANEL] = {0}, s2[MT_PANEL] = {0}, s3[MT_PANEL] = {0};
    for (int64_t k = 0; k < depth; k++) {
        float f0 = a0[k * a_column], f1 = a1[k * a_column], f2 = a2[k * a_column], f3 = a3[k * a_column];
#pragma omp simd
        for (int64_t n = 0; n < MT_PANEL; n++) {
            s0[n] += f0 * panel[k][n];
            s1[n] += f1 * panel[k][n];
            s2[n] += f2 * panel[k][n];
            s3[n] += f3 * panel[k][n];
        }
    }
    memcpy(sums[0], s0, sizeof s0);
    memcpy(sums[1], s1, sizeof s1);
    memcpy(sums[2], s2, sizeof s2);
    memcpy(sums[3], s3, sizeof s3);
}

/* The product without a library: panels of b's columns by depths of K that stay in the first-level cache. */
static void mt_matmul_large(float *c, const float *a, const float *b, int64_t M, int64_t N, int64_t K, int64_t ldc,
                            int64_t lda, int64_t ldb, bool a_transposed, bool b_transposed, bool accumulate) {
    int64_t a_row = a_transposed ? 1 : lda, a_column = a_transposed ? lda : 1;
#pragma omp parallel for if (M * N * K > MT_PARALLEL * 16)
    for (int64_t n0 = 0; n0 < N; n0 += MT_PANEL) {
        float panel[MT_DEPTH][MT_PANEL], sums[MT_TILE][MT_PANEL];
        int64_t width = mt_min(MT_PANEL, N - n0);
        for (int64_t m = 0; m < M && !accumulate; m++) memset(c + m * ldc + n0, 0, (size_t)width * sizeof *c);
        for (int64_t k0 = 0; k0 < K; k0 += MT_DEPTH) {
            int64_t depth = mt_min(MT_DEPTH, K - k0);
            mt_matmul_pack(panel, b, ldb, b_transposed, k0, n0, depth, width);
            for (int64_t m0 = 0; m0 < M; m0 += MT_TILE) {
                int64_t rows = mt_min(MT_TILE, M - m0);
                mt_matmul_tile(sums, a + m0 * a_row + k0 * a_column, a_row, a_column, rows, panel, depth);
                for (int64_t m = 0; m < rows; m++)
                    for (int64_t n = 0; n < width; n++) c[(m0 + m) * ldc + n0 + n] += sums[m][n];
            }
        }
    }
}
#endif

/* The products of one row x[K] with four rows of weights, fp32 or bf16 as they are stored: four sums at a time keep the
 * adders busy while memory streams. */
static inline void mt_dot_four(float sums[4], const float *x, const void *const w[4], int64_t K, mt_dtype dtype) {
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    if (dtype == MT_F32) {
        const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t k = 0; k < K; k++) {
            s0 += x[k] * w0[k];
            s1 += x[k] * w1[k];
            s2 += x[k] * w2[k];
            s3 += x[k] * w3[k];
        }
    } else {
        const uint16_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t k = 0; k < K; k++) {
            s0 += x[k] * mt_bf16_to_f32(w0[k]);
            s1 += x[k] * mt_bf16_to_f32(w1[k]);
            s2 += x[k] * mt_bf16_to_f32(w2[k]);
            s3 += x[k] * mt_bf16_to_f32(w3[k]);
        }
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

/* The product for a few rows, where reading b once is all the work: a gemm would pack it first. */
static void mt_matmul_small(float *c, const float *a, const float *b, int64_t M, int64_t N, int64_t K, int64_t ldc,
                            int64_t lda, int64_t ldb, bool b_transposed, bool accumulate) {
    for (int64_t m = 0; m < M && !accumulate; m++) memset(c + m * ldc, 0, (size_t)N * sizeof *c);
    for (int64_t n = 0; n < N && b_transposed; n += 4) {
        const void *rows[4];
        for (int64_t i = 0; i < 4; i++) rows[i] = b + mt_min(n + i, N - 1) * ldb;
        for (int64_t m = 0; m < M; m++) {
            float sums[4];
            mt_dot_four(sums, a + m * lda, rows, K, MT_F32);
            for (int64_t i = 0; i < mt_min(4, N - n); i++) c[m * ldc + n + i] += sums[i];
        }
    }
    for (int64_t k = 0; k < K && !b_transposed; k++)
        for (int64_t m = 0; m < M; m++) {
            float factor = a[m * lda + k];
#pragma omp simd
            for (int64_t n = 0; n < N; n++) c[m * ldc + n] += factor * b[k * ldb + n];
        }
}

/* c[M, N] = a b, or += when accumulate, with a [M, K] ([K, M] when transposed) and b [K, N] ([N, K] when transposed);
 * ld* are the distances between rows as stored. */
static void mt_matmul(float *c, const float *a, const float *b, int64_t M, int64_t N, int64_t K, int64_t ldc,
                      int64_t lda, int64_t ldb, bool a_transposed, bool b_transposed, bool accumulate) {
    if (M <= 4 && !a_transposed)
        mt_matmul_small(c, a, b, M, N, K, ldc, lda, ldb, b_transposed, accumulate);
    else
        mt_matmul_large(c, a, b, M, N, K, ldc, lda, ldb, a_transposed, b_transposed, accumulate);
}

/* A block of a matrix as floats: where it lies for fp32, converted into scratch for bf16. */
typedef struct mt_matrix {
    const float *data;
    int64_t stride;
} mt_matrix;

static mt_matrix mt_matrix_load(float *scratch, const void *x, int64_t offset, int64_t rows, int64_t columns,
                                int64_t stride, mt_dtype dtype) {
    if (dtype == MT_F32) return (mt_matrix){(const float *)x + offset, stride};
#pragma omp parallel for if (rows * columns > MT_PARALLEL)
    for (int64_t r = 0; r < rows; r++) mt_row_load(scratch + r * columns, x, offset + r * stride, columns, dtype);
    return (mt_matrix){scratch, columns};
}

/* Few rows, as in decoding: every weight is read once, by the thread that needs it. */
static void mt_linear_forward_small(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N,
                                    int64_t K, mt_dtype dtype) {
    int64_t size = mt_dtype_size(dtype);
    mt_matrix tokens = mt_matrix_load(mt_scratch_grow(T * K), x, 0, T, K, K, dtype);
#pragma omp parallel for if (N * K > MT_PARALLEL)
    for (int64_t n = 0; n < N; n += 4) {
        const void *rows[4];
        int64_t count = mt_min(4, N - n);
        for (int64_t i = 0; i < 4; i++) rows[i] = (const char *)w + mt_min(n + i, N - 1) * K * size;
        for (int64_t t = 0; t < T; t++) {
            float sums[4], scratch[4];
            mt_dot_four(sums, tokens.data + t * K, rows, K, dtype);
            const float *add = bias ? mt_row_load(scratch, bias, n, count, dtype) : NULL;
            float *out = mt_row_open(scratch, y, t * N + n, dtype);
            for (int64_t i = 0; i < count; i++) out[i] = sums[i] + (add ? add[i] : 0.0f);
            mt_row_close(y, t * N + n, out, count, dtype);
        }
    }
}

/* How many of n tokens or features go into one matrix product: all in fp32; in bf16 what is worth converting at once.
 */
static int64_t mt_linear_block(int64_t n, int64_t block, mt_dtype dtype) {
    return mt_max(1, dtype == MT_F32 ? n : mt_min(n, block));
}

/* Floats of scratch that a block of a matrix takes. */
static int64_t mt_matrix_scratch(int64_t rows, int64_t columns, mt_dtype dtype) {
    return dtype == MT_F32 ? 0 : rows * columns;
}

/* Rows that were computed in scratch, put in place at the stride of y. */
static void mt_matrix_store(void *y, int64_t offset, const float *block, int64_t rows, int64_t columns, int64_t stride,
                            mt_dtype dtype) {
    if (dtype == MT_F32) return; // they were computed in place
#pragma omp parallel for if (rows * columns > MT_PARALLEL)
    for (int64_t r = 0; r < rows; r++) mt_row_close(y, offset + r * stride, block + r * columns, columns, dtype);
}

static void mt_cpu_linear_forward(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N,
                                  int64_t K, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    if (T <= 8) {
        mt_linear_forward_small(y, x, w, bias, T, N, K, dtype);
        return;
    }
    int64_t T_block = mt_linear_block(T, 512, dtype), N_block = mt_linear_block(N, 1024, dtype);
    int64_t x_floats = mt_matrix_scratch(T_block, K, dtype), w_floats = mt_matrix_scratch(N_block, K, dtype);
    int64_t y_floats = mt_matrix_scratch(T_block, N_block, dtype);
    float *x_scratch = mt_scratch_grow(x_floats + w_floats + y_floats + N_block), *w_scratch = x_scratch + x_floats;
    float *y_scratch = w_scratch + w_floats, *bias_scratch = y_scratch + y_floats;
    for (int64_t t = 0; t < T; t += T_block) {
        int64_t rows = mt_min(T_block, T - t);
        mt_matrix x_block = mt_matrix_load(x_scratch, x, t * K, rows, K, K, dtype);
        for (int64_t n = 0; n < N; n += N_block) {
            int64_t columns = mt_min(N_block, N - n), y_stride = dtype == MT_F32 ? N : columns;
            mt_matrix w_block = mt_matrix_load(w_scratch, w, n * K, columns, K, K, dtype);
            const float *b = bias ? mt_row_load(bias_scratch, bias, n, columns, dtype) : NULL;
            float *y_block = mt_row_open(y_scratch, y, t * N + n, dtype);
#pragma omp parallel for if (rows * columns > MT_PARALLEL)
            for (int64_t r = 0; r < (b ? rows : 0); r++) memcpy(y_block + r * y_stride, b, (size_t)columns * sizeof *b);
            mt_matmul(y_block, x_block.data, w_block.data, rows, columns, K, y_stride, K, K, MT_PLAIN, MT_TRANSPOSED,
                      b != NULL);
            mt_matrix_store(y, t * N + n, y_block, rows, columns, N, dtype);
        }
    }
}

static void mt_cpu_linear_backward_input(void *dx, const void *dy, const void *w, int64_t T, int64_t N, int64_t K,
                                         mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    int64_t T_block = mt_linear_block(T, 512, dtype), N_block = mt_linear_block(N, 1024, dtype);
    int64_t dy_floats = mt_matrix_scratch(T_block, N_block, dtype), w_floats = mt_matrix_scratch(N_block, K, dtype);
    float *dy_scratch = mt_scratch_grow(dy_floats + w_floats + mt_matrix_scratch(T_block, K, dtype));
    float *w_scratch = dy_scratch + dy_floats, *dx_scratch = w_scratch + w_floats;
    for (int64_t t = 0; t < T; t += T_block) {
        int64_t rows = mt_min(T_block, T - t);
        float *dx_block = mt_row_open(dx_scratch, dx, t * K, dtype);
        for (int64_t n = 0; n < N; n += N_block) {
            int64_t columns = mt_min(N_block, N - n);
            mt_matrix dy_block = mt_matrix_load(dy_scratch, dy, t * N + n, rows, columns, N, dtype);
            mt_matrix w_block = mt_matrix_load(w_scratch, w, n * K, columns, K, K, dtype);
            mt_matmul(dx_block, dy_block.data, w_block.data, rows, K, columns, K, dy_block.stride, K, MT_PLAIN,
                      MT_PLAIN, n > 0);
        }
        mt_matrix_store(dx, t * K, dx_block, rows, K, K, dtype);
    }
}

/* out[C] += column sums of x[T, C], each in token order. */
static void mt_column_sums(float *out, const void *x, int64_t T, int64_t C, mt_dtype dtype) {
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t c = 0; c < C; c += MT_COLUMNS) {
        float scratch[MT_COLUMNS], sums[MT_COLUMNS] = {0};
        int64_t width = mt_min(MT_COLUMNS, C - c);
        for (int64_t t = 0; t < T; t++) {
            const float *row = mt_row_load(scratch, x, t * C + c, width, dtype);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sums[i] += row[i];
        }
        for (int64_t i = 0; i < width; i++) out[c + i] += sums[i];
    }
}

static void mt_cpu_linear_backward_weight(float *dw, float *dbias, const void *dy, const void *x, int64_t T, int64_t N,
                                          int64_t K, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    int64_t T_block = mt_linear_block(T, 512, dtype), N_block = mt_linear_block(N, 1024, dtype);
    int64_t dy_floats = mt_matrix_scratch(T_block, N_block, dtype);
    float *dy_scratch = mt_scratch_grow(dy_floats + mt_matrix_scratch(T_block, K, dtype));
    float *x_scratch = dy_scratch + dy_floats;
    for (int64_t t = 0; t < T; t += T_block) {
        int64_t rows = mt_min(T_block, T - t);
        mt_matrix x_block = mt_matrix_load(x_scratch, x, t * K, rows, K, K, dtype);
        for (int64_t n = 0; n < N; n += N_block) {
            int64_t columns = mt_min(N_block, N - n);
            mt_matrix dy_block = mt_matrix_load(dy_scratch, dy, t * N + n, rows, columns, N, dtype);
            mt_matmul(dw + n * K, dy_block.data, x_block.data, columns, K, rows, K, dy_block.stride, K, MT_TRANSPOSED,
                      MT_PLAIN, true);
        }
    }
    if (dbias) mt_column_sums(dbias, dy, T, N, dtype);
}

double mt_cpu_matmul_rate(int64_t n) {
    float *memory = mt_cpu_memory_alloc(3 * n * n * (int64_t)sizeof(float)), *a = memory, *b = a + n * n,
          *c = b + n * n;
    for (int64_t i = 0; i < 2 * n * n; i++) memory[i] = (float)(i % 7) - 3.0f;
    double best = 1e30, begin = mt_time();
    for (int64_t run = 0; run < 4 || (run < 20 && mt_time() - begin < 0.5); run++) {
        double start = mt_time();
        mt_matmul(c, a, b, n, n, n, n, n, n, MT_PLAIN, MT_PLAIN, false);
        best = fmin(best, mt_time() - start);
    }
    mt_cpu_memory_free(memory);
    return 2.0 * (double)n * (double)n * (double)n / best;
}

/* ==== §3c embedding and norms ==================================================================================== */

static void mt_cpu_embedding_forward(void *out, const int32_t *ids, const void *w, int64_t T, int64_t C, int64_t first,
                                     int64_t count, bool accumulate, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(2 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        int64_t id = ids[t] - first;
        bool held = id >= 0 && id < count;
        if (accumulate && !held) continue;
        float *row = mt_row_open(slice, out, t * C, dtype);
        const float *before = accumulate ? mt_row_load(slice, out, t * C, C, dtype) : NULL;
        const float *from = held ? mt_row_load(slice + C, w, id * C, C, dtype) : NULL;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) row[c] = (before ? before[c] : 0.0f) + (from ? from[c] : 0.0f);
        mt_row_close(out, t * C, row, C, dtype);
    }
}

static void mt_cpu_embedding_backward(float *dw, const void *dout, const int32_t *ids, int64_t T, int64_t C,
                                      int64_t first, int64_t count, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t c = 0; c < C; c += MT_COLUMNS) { // by columns, so that one thread sees all tokens, in their order
        float scratch[MT_COLUMNS];
        int64_t width = mt_min(MT_COLUMNS, C - c);
        for (int64_t t = 0; t < T; t++) {
            int64_t id = ids[t] - first;
            if (id < 0 || id >= count) continue;
            const float *row = mt_row_load(scratch, dout, t * C + c, width, dtype);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) dw[id * C + c + i] += row[i];
        }
    }
}

static void mt_cpu_rmsnorm_forward(void *y, float *rstd, const void *x, const void *w, int64_t T, int64_t H, int64_t C,
                                   int64_t y_stride, int64_t x_stride, float eps, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(3 * C);
#pragma omp parallel for if (T * H * C > MT_PARALLEL)
    for (int64_t r = 0; r < T * H; r++) {
        int64_t t = r / H, h = r % H;
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, x, t * x_stride + h * C, C, dtype);
        const float *weight = mt_row_load(slice + C, w, 0, C, dtype);
        float *out = mt_row_open(slice + 2 * C, y, t * y_stride + h * C, dtype);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += in[c] * in[c];
        float factor = 1.0f / sqrtf(sum / (float)C + eps);
        rstd[r] = factor;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out[c] = in[c] * factor * weight[c];
        mt_row_close(y, t * y_stride + h * C, out, C, dtype);
    }
}

/* dw[C] += sum over rows of dy normalized, and db[C] += that of dy (db may be NULL), where normalized is
 * (x - mean) rstd; mean may be NULL. By columns, so that each sum has one order. */
static void mt_norm_backward_weight(float *dw, float *db, const void *dy, const void *x, const float *mean,
                                    const float *rstd, int64_t T, int64_t H, int64_t C, int64_t dy_stride,
                                    int64_t x_stride, mt_dtype dtype) {
#pragma omp parallel for if (T * H * C > MT_PARALLEL)
    for (int64_t c = 0; c < C; c += MT_COLUMNS) {
        float dy_scratch[MT_COLUMNS], x_scratch[MT_COLUMNS], w_sums[MT_COLUMNS] = {0}, b_sums[MT_COLUMNS] = {0};
        int64_t width = mt_min(MT_COLUMNS, C - c);
        for (int64_t r = 0; r < T * H; r++) {
            int64_t t = r / H, h = r % H;
            const float *d = mt_row_load(dy_scratch, dy, t * dy_stride + h * C + c, width, dtype);
            const float *in = mt_row_load(x_scratch, x, t * x_stride + h * C + c, width, dtype);
            float center = mean ? mean[r] : 0.0f, factor = rstd[r];
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                w_sums[i] += d[i] * (in[i] - center) * factor;
                b_sums[i] += d[i];
            }
        }
        for (int64_t i = 0; i < width; i++) dw[c + i] += w_sums[i];
        for (int64_t i = 0; i < width && db; i++) db[c + i] += b_sums[i];
    }
}

/* With n = x rstd and g = dy w, dx = rstd (g - n mean(g n)). */
static void mt_cpu_rmsnorm_backward(void *dx, float *dw, const void *dy, const void *dresidual, const void *x,
                                    const void *w, const float *rstd, int64_t T, int64_t H, int64_t C,
                                    int64_t dx_stride, int64_t dy_stride, int64_t x_stride, mt_dtype dtype,
                                    mt_stream *stream) {
    (void)stream;
    mt_norm_backward_weight(dw, NULL, dy, x, NULL, rstd, T, H, C, dy_stride, x_stride, dtype);
    mt_scratch scratch = mt_scratch_reserve(5 * C);
#pragma omp parallel for if (T * H * C > MT_PARALLEL)
    for (int64_t r = 0; r < T * H; r++) {
        int64_t t = r / H, h = r % H;
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, x, t * x_stride + h * C, C, dtype);
        const float *weight = mt_row_load(slice + C, w, 0, C, dtype);
        const float *d = mt_row_load(slice + 2 * C, dy, t * dy_stride + h * C, C, dtype);
        const float *residual = NULL;
        if (dresidual) residual = mt_row_load(slice + 3 * C, dresidual, t * dx_stride + h * C, C, dtype);
        float *out = mt_row_open(slice + 4 * C, dx, t * dx_stride + h * C, dtype);
        float sum = 0, factor = rstd[r];
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += d[c] * weight[c] * in[c];
        float projection = sum * factor * factor / (float)C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            out[c] = (residual ? residual[c] : 0.0f) + factor * (d[c] * weight[c] - in[c] * projection);
        mt_row_close(dx, t * dx_stride + h * C, out, C, dtype);
    }
}

static void mt_cpu_layernorm_forward(void *y, float *mean, float *rstd, const void *x, const void *w, const void *b,
                                     int64_t T, int64_t C, float eps, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(4 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, x, t * C, C, dtype);
        const float *weight = mt_row_load(slice + C, w, 0, C, dtype);
        const float *bias = mt_row_load(slice + 2 * C, b, 0, C, dtype);
        float *out = mt_row_open(slice + 3 * C, y, t * C, dtype);
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += in[c];
        float center = sum / (float)C;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < C; c++) squares += (in[c] - center) * (in[c] - center);
        float factor = 1.0f / sqrtf(squares / (float)C + eps);
        mean[t] = center;
        rstd[t] = factor;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out[c] = (in[c] - center) * factor * weight[c] + bias[c];
        mt_row_close(y, t * C, out, C, dtype);
    }
}

/* With n = (x - mean) rstd and g = dy w, dx = rstd (g - mean(g) - n mean(g n)). */
static void mt_cpu_layernorm_backward(void *dx, float *dw, float *db, const void *dy, const void *dresidual,
                                      const void *x, const void *w, const float *mean, const float *rstd, int64_t T,
                                      int64_t C, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_norm_backward_weight(dw, db, dy, x, mean, rstd, T, 1, C, C, C, dtype);
    mt_scratch scratch = mt_scratch_reserve(5 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, x, t * C, C, dtype);
        const float *weight = mt_row_load(slice + C, w, 0, C, dtype);
        const float *d = mt_row_load(slice + 2 * C, dy, t * C, C, dtype);
        const float *residual = dresidual ? mt_row_load(slice + 3 * C, dresidual, t * C, C, dtype) : NULL;
        float *out = mt_row_open(slice + 4 * C, dx, t * C, dtype);
        float center = mean[t], factor = rstd[t], sum = 0, projection = 0;
#pragma omp simd reduction(+ : sum, projection)
        for (int64_t c = 0; c < C; c++) {
            sum += d[c] * weight[c];
            projection += d[c] * weight[c] * (in[c] - center);
        }
        sum /= (float)C;
        projection *= factor * factor / (float)C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            out[c] =
                (residual ? residual[c] : 0.0f) + factor * (d[c] * weight[c] - sum - (in[c] - center) * projection);
        mt_row_close(dx, t * C, out, C, dtype);
    }
}

/* ==== §3d rotary positions ======================================================================================= */

/* Turns by the angle, or back when direction is -1. */
static void mt_rope_turn(void *y, const void *x, const float *cos, const float *sin, const int32_t *positions,
                         float direction, int64_t T, int64_t H, int64_t D, int64_t R, int64_t y_stride,
                         int64_t x_stride, bool interleaved, mt_dtype dtype) {
    int64_t half = R / 2, step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
    mt_scratch scratch = mt_scratch_reserve(2 * D);
#pragma omp parallel for if (T * H * D > MT_PARALLEL)
    for (int64_t r = 0; r < T * H; r++) {
        int64_t t = r / H, h = r % H;
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, x, t * x_stride + h * D, D, dtype);
        float *out = mt_row_open(slice + D, y, t * y_stride + h * D, dtype);
        const float *token_cos = cos + positions[t] * half, *token_sin = sin + positions[t] * half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float a = in[i * step], b = in[i * step + partner], s = direction * token_sin[i];
            out[i * step] = a * token_cos[i] - b * s;
            out[i * step + partner] = b * token_cos[i] + a * s;
        }
        for (int64_t i = R; i < D; i++) out[i] = in[i];
        mt_row_close(y, t * y_stride + h * D, out, D, dtype);
    }
}

static void mt_cpu_rope_forward(void *y, const void *x, const float *cos, const float *sin, const int32_t *positions,
                                int64_t T, int64_t H, int64_t D, int64_t R, int64_t y_stride, int64_t x_stride,
                                bool interleaved, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_rope_turn(y, x, cos, sin, positions, 1.0f, T, H, D, R, y_stride, x_stride, interleaved, dtype);
}

static void mt_cpu_rope_backward(void *dx, const void *dy, const float *cos, const float *sin, const int32_t *positions,
                                 int64_t T, int64_t H, int64_t D, int64_t R, int64_t dx_stride, int64_t dy_stride,
                                 bool interleaved, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_rope_turn(dx, dy, cos, sin, positions, -1.0f, T, H, D, R, dx_stride, dy_stride, interleaved, dtype);
}

/* ==== §3e attention ============================================================================================== */
/* Blocks of queries by blocks of keys, so that the scores of a long sequence are never held whole. The forward keeps a
 * running maximum and sum a query; the backward recomputes the probabilities from the saved lse. It runs in two halves,
 * so that each output has one owner: a task of the first owns rows of dq, a task of the second rows of dk and dv. */

enum { MT_QUERIES = 64, MT_KEYS = 128 };

/* What every function below works on: the operands, and of them one head of one span. */
typedef struct mt_attention_task {
    const void *q, *k, *v, *out, *dout;
    float *lse, *row_dot; // [Tq, H]
    const mt_attention *shape;
    const mt_span *span;
    int64_t head;
    mt_dtype dtype;
} mt_attention_task;

/* Multiplies the probabilities p[rows, columns] of queries i0... and keys j0... by their dropout: query q_index at
 * (q_index, head << 48 | k_index / 4), word k_index % 4. */
static void mt_attention_dropout(float *p, const mt_attention_task *task, int64_t i0, int64_t j0, int64_t rows,
                                 int64_t columns) {
    const mt_attention *shape = task->shape;
    const int64_t *q_index = shape->q_index + task->span->q_start + i0;
    const int64_t *k_index = shape->k_index + task->span->k_start + j0;
    uint64_t high = (uint64_t)(shape->first_head + task->head) << 48;
    for (int64_t j = 0, run; j < columns; j += run) {
        float factors[MT_KEYS];
        for (run = 1; j + run < columns && k_index[j + run] == k_index[j] + run;) run++; // neighbours share counters
        for (int64_t i = 0; i < rows; i++) {
            mt_dropout_factors(factors, run, &shape->dropout, (uint64_t)q_index[i], high, k_index[j]);
            for (int64_t r = 0; r < run; r++) p[i * columns + j + r] *= factors[r];
        }
    }
}

/* The keys [*begin, *end) of the span that query i sees. */
static void mt_span_keys(const mt_span *span, int64_t i, int64_t *begin, int64_t *end) {
    int64_t last = i + span->k_len - span->q_len;
    *begin = span->window > 0 ? mt_max(0, last - span->window + 1) : 0;
    *end = span->causal ? mt_max(0, mt_min(span->k_len, last + 1)) : span->k_len;
    if (*begin > *end) *begin = *end;
}

/* The queries [*begin, *end) of the span of which any may see a key in [j0, j1). */
static void mt_span_queries(const mt_span *span, int64_t j0, int64_t j1, int64_t *begin, int64_t *end) {
    int64_t shift = span->k_len - span->q_len;
    *begin = span->causal ? mt_max(0, j0 - shift) : 0;
    *end = span->window > 0 ? mt_min(span->q_len, j1 - 1 - shift + span->window) : span->q_len;
}

/* Most queries and most key rows of any span, the end of all key rows, and the products of queries and keys. */
typedef struct mt_spans_extent {
    int64_t max_queries, key_rows, products;
} mt_spans_extent;

static mt_spans_extent mt_spans_measure(const mt_spans *spans) {
    mt_spans_extent extent = {0};
    for (int64_t s = 0; s < spans->count; s++) {
        const mt_span *span = &spans->host[s];
        extent.max_queries = mt_max(extent.max_queries, span->q_len);
        extent.key_rows = mt_max(extent.key_rows, span->k_start + span->k_len);
        extent.products += span->q_len * span->k_len;
    }
    return extent;
}

/* The blocks of q, k, v of a task's head as floats. */
static mt_matrix mt_attention_load_q(float *scratch, const mt_attention_task *task, int64_t i0, int64_t rows) {
    const mt_attention *shape = task->shape;
    int64_t offset = (task->span->q_start + i0) * shape->q_stride + task->head * shape->head_size;
    return mt_matrix_load(scratch, task->q, offset, rows, shape->head_size, shape->q_stride, task->dtype);
}

static mt_matrix mt_attention_load_dout(float *scratch, const mt_attention_task *task, int64_t i0, int64_t rows) {
    const mt_attention *shape = task->shape;
    int64_t offset = (task->span->q_start + i0) * shape->out_stride + task->head * shape->value_size;
    return mt_matrix_load(scratch, task->dout, offset, rows, shape->value_size, shape->out_stride, task->dtype);
}

static mt_matrix mt_attention_load_k(float *scratch, const mt_attention_task *task, int64_t j0, int64_t columns) {
    const mt_attention *shape = task->shape;
    int64_t group = task->head / (shape->num_heads / shape->num_groups);
    int64_t offset = (task->span->k_start + j0) * shape->k_stride + group * shape->head_size;
    return mt_matrix_load(scratch, task->k, offset, columns, shape->head_size, shape->k_stride, task->dtype);
}

static mt_matrix mt_attention_load_v(float *scratch, const mt_attention_task *task, int64_t j0, int64_t columns) {
    const mt_attention *shape = task->shape;
    int64_t group = task->head / (shape->num_heads / shape->num_groups);
    int64_t offset = (task->span->k_start + j0) * shape->v_stride + group * shape->value_size;
    return mt_matrix_load(scratch, task->v, offset, columns, shape->value_size, shape->v_stride, task->dtype);
}

/* Turns a query's scores p[columns], of which it sees [begin, end), into exp(scale score - max) for the greater of the
 * running max and theirs, and adds them to the running sum. Returns what to multiply by all that was summed before. */
static float mt_softmax_running(float *p, int64_t columns, int64_t begin, int64_t end, float scale, float *max,
                                float *sum) {
    float before = *max, top, total = 0;
    begin = mt_max(0, mt_min(begin, columns));
    end = mt_max(begin, mt_min(end, columns));
#pragma omp simd
    for (int64_t j = begin; j < end; j++) p[j] *= scale;
    top = mt_row_max(p + begin, end - begin);
    top = top > before ? top : before;
    for (int64_t j = 0; j < begin; j++) p[j] = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = begin; j < end; j++) {
        p[j] = mt_exp(p[j] - top);
        total += p[j];
    }
    for (int64_t j = end; j < columns; j++) p[j] = 0;
    float factor = before == -INFINITY ? 0.0f : mt_exp(before - top);
    *max = top;
    *sum = *sum * factor + total;
    return factor;
}

/* One block of queries of one head: all of its keys, block by block. */
static void mt_attention_forward_block(void *out, const mt_attention_task *task, int64_t i0, float *scratch) {
    const mt_attention *shape = task->shape;
    const mt_span *span = task->span;
    int64_t D = shape->head_size, Dv = shape->value_size, rows = mt_min(MT_QUERIES, span->q_len - i0);
    float max[MT_QUERIES], sum[MT_QUERIES];
    float *sums = scratch, *p = sums + MT_QUERIES * Dv, *q_scratch = p + MT_QUERIES * MT_KEYS;
    float *k_scratch = q_scratch + MT_QUERIES * D, *v_scratch = k_scratch + MT_KEYS * D;
    for (int64_t i = 0; i < rows; i++) max[i] = -INFINITY, sum[i] = 0;
    memset(sums, 0, (size_t)(rows * Dv) * sizeof *sums);
    mt_matrix q = mt_attention_load_q(q_scratch, task, i0, rows);
    int64_t first, last, begin, end;
    mt_span_keys(span, i0, &first, &end);
    mt_span_keys(span, i0 + rows - 1, &begin, &last);
    for (int64_t j0 = first; j0 < last; j0 += MT_KEYS) {
        int64_t columns = mt_min(MT_KEYS, last - j0);
        mt_matrix k = mt_attention_load_k(k_scratch, task, j0, columns);
        mt_matrix v = mt_attention_load_v(v_scratch, task, j0, columns);
        mt_matmul(p, q.data, k.data, rows, columns, D, columns, q.stride, k.stride, MT_PLAIN, MT_TRANSPOSED, false);
        for (int64_t i = 0; i < rows; i++) {
            mt_span_keys(span, i0 + i, &begin, &end);
            float factor =
                mt_softmax_running(p + i * columns, columns, begin - j0, end - j0, shape->scale, &max[i], &sum[i]);
            for (int64_t c = 0; c < Dv && factor != 1.0f; c++) sums[i * Dv + c] *= factor;
        }
        if (shape->dropout.p > 0) mt_attention_dropout(p, task, i0, j0, rows, columns);
        mt_matmul(sums, p, v.data, rows, Dv, columns, Dv, columns, v.stride, MT_PLAIN, MT_PLAIN, true);
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t row = span->q_start + i0 + i, offset = row * shape->out_stride + task->head * Dv;
        float *target = mt_row_open(p, out, offset, task->dtype);
        for (int64_t c = 0; c < Dv; c++) target[c] = sum[i] > 0 ? sums[i * Dv + c] / sum[i] : 0.0f;
        mt_row_close(out, offset, target, Dv, task->dtype);
        task->lse[row * shape->num_heads + task->head] = max[i] + logf(sum[i]);
    }
}

static void mt_cpu_attention_forward(void *out, float *lse, const void *q, const void *k, const void *v,
                                     const mt_spans *spans, const mt_attention *shape, mt_dtype dtype,
                                     mt_stream *stream) {
    (void)stream;
    int64_t D = shape->head_size, Dv = shape->value_size, heads = shape->num_heads;
    mt_spans_extent extent = mt_spans_measure(spans);
    int64_t blocks = mt_blocks(extent.max_queries, MT_QUERIES);
    mt_scratch scratch =
        mt_scratch_reserve(MT_QUERIES * (D + Dv) + MT_KEYS * (D + Dv) + MT_QUERIES * mt_max(MT_KEYS, Dv));
#pragma omp parallel for collapse(3) schedule(dynamic) if (extent.products * heads * D > MT_PARALLEL)
    for (int64_t s = 0; s < spans->count; s++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t block = 0; block < blocks; block++) {
                const mt_span *span = &spans->host[s];
                if (block * MT_QUERIES >= span->q_len) continue;
                mt_attention_task task = {
                    .q = q, .k = k, .v = v, .lse = lse, .shape = shape, .span = span, .head = head, .dtype = dtype};
                mt_attention_forward_block(out, &task, block * MT_QUERIES, mt_scratch_slice(scratch));
            }
}

/* For queries i0... and keys j0... of a task's head: ds[rows, columns], the gradient of scale q k^T, times scale, and
 * p[rows, columns], the probabilities after dropout, with which v was multiplied. */
static void mt_attention_backward_scores(float *p, float *ds, const mt_attention_task *task, mt_matrix q, mt_matrix k,
                                         mt_matrix v, mt_matrix dout, int64_t i0, int64_t j0, int64_t rows,
                                         int64_t columns) {
    const mt_attention *shape = task->shape;
    const mt_span *span = task->span;
    mt_matmul(p, q.data, k.data, rows, columns, shape->head_size, columns, q.stride, k.stride, MT_PLAIN, MT_TRANSPOSED,
              false);
    mt_matmul(ds, dout.data, v.data, rows, columns, shape->value_size, columns, dout.stride, v.stride, MT_PLAIN,
              MT_TRANSPOSED, false);
    if (shape->dropout.p > 0) mt_attention_dropout(ds, task, i0, j0, rows, columns);
    for (int64_t i = 0; i < rows; i++) {
        int64_t begin, end, row = (span->q_start + i0 + i) * shape->num_heads + task->head;
        float *p_row = p + i * columns, *ds_row = ds + i * columns, lse = task->lse[row], dot = task->row_dot[row];
        mt_span_keys(span, i0 + i, &begin, &end);
        begin = mt_max(0, mt_min(begin - j0, columns));
        end = mt_max(begin, mt_min(end - j0, columns));
        for (int64_t j = 0; j < begin; j++) p_row[j] = ds_row[j] = 0;
#pragma omp simd
        for (int64_t j = begin; j < end; j++) {
            p_row[j] = mt_exp(p_row[j] * shape->scale - lse);
            ds_row[j] = p_row[j] * (ds_row[j] - dot) * shape->scale;
        }
        for (int64_t j = end; j < columns; j++) p_row[j] = ds_row[j] = 0;
    }
    if (shape->dropout.p > 0) mt_attention_dropout(p, task, i0, j0, rows, columns);
}

/* row_dot = sum(out dout) of a block of queries: what the softmax's gradient subtracts. */
static void mt_attention_row_dot(const mt_attention_task *task, mt_matrix dout, int64_t i0, int64_t rows,
                                 float *scratch) {
    const mt_attention *shape = task->shape;
    for (int64_t i = 0; i < rows; i++) {
        int64_t row = task->span->q_start + i0 + i, offset = row * shape->out_stride + task->head * shape->value_size;
        const float *out = mt_row_load(scratch, task->out, offset, shape->value_size, task->dtype);
        const float *d = dout.data + i * dout.stride;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < shape->value_size; c++) sum += out[c] * d[c];
        task->row_dot[row * shape->num_heads + task->head] = sum;
    }
}

/* First half: dq of one block of queries of one head, and their row_dot. */
static void mt_attention_backward_queries(void *dq, const mt_attention_task *task, int64_t i0, float *scratch) {
    const mt_attention *shape = task->shape;
    const mt_span *span = task->span;
    int64_t D = shape->head_size, Dv = shape->value_size, rows = mt_min(MT_QUERIES, span->q_len - i0);
    float *sums = scratch, *p = sums + MT_QUERIES * D, *ds = p + MT_QUERIES * MT_KEYS;
    float *q_scratch = ds + MT_QUERIES * MT_KEYS, *dout_scratch = q_scratch + MT_QUERIES * D;
    float *k_scratch = dout_scratch + MT_QUERIES * Dv, *v_scratch = k_scratch + MT_KEYS * D;
    mt_matrix q = mt_attention_load_q(q_scratch, task, i0, rows);
    mt_matrix dout = mt_attention_load_dout(dout_scratch, task, i0, rows);
    mt_attention_row_dot(task, dout, i0, rows, v_scratch);
    memset(sums, 0, (size_t)(rows * D) * sizeof *sums);
    int64_t first, last, ignored;
    mt_span_keys(span, i0, &first, &ignored);
    mt_span_keys(span, i0 + rows - 1, &ignored, &last);
    for (int64_t j0 = first; j0 < last; j0 += MT_KEYS) {
        int64_t columns = mt_min(MT_KEYS, last - j0);
        mt_matrix k = mt_attention_load_k(k_scratch, task, j0, columns);
        mt_matrix v = mt_attention_load_v(v_scratch, task, j0, columns);
        mt_attention_backward_scores(p, ds, task, q, k, v, dout, i0, j0, rows, columns);
        mt_matmul(sums, ds, k.data, rows, D, columns, D, columns, k.stride, MT_PLAIN, MT_PLAIN, true);
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t offset = (span->q_start + i0 + i) * shape->q_stride + task->head * D;
        float *row = mt_row_open(sums + i * D, dq, offset, task->dtype);
        if (task->dtype == MT_F32) memcpy(row, sums + i * D, (size_t)D * sizeof *row);
        mt_row_close(dq, offset, row, D, task->dtype);
    }
}

/* Adds to dk_sums[columns, D] and dv_sums[columns, Dv] what the queries of one span and head give its keys j0... */
static void mt_attention_backward_keys(float *dk_sums, float *dv_sums, const mt_attention_task *task, int64_t j0,
                                       int64_t columns, float *scratch) {
    const mt_attention *shape = task->shape;
    int64_t D = shape->head_size, Dv = shape->value_size, begin, end;
    float *p = scratch, *ds = p + MT_QUERIES * MT_KEYS, *q_scratch = ds + MT_QUERIES * MT_KEYS;
    float *dout_scratch = q_scratch + MT_QUERIES * D, *k_scratch = dout_scratch + MT_QUERIES * Dv;
    mt_matrix k = mt_attention_load_k(k_scratch, task, j0, columns);
    mt_matrix v = mt_attention_load_v(k_scratch + MT_KEYS * D, task, j0, columns);
    mt_span_queries(task->span, j0, j0 + columns, &begin, &end);
    for (int64_t i0 = begin; i0 < end; i0 += MT_QUERIES) {
        int64_t rows = mt_min(MT_QUERIES, end - i0);
        mt_matrix q = mt_attention_load_q(q_scratch, task, i0, rows);
        mt_matrix dout = mt_attention_load_dout(dout_scratch, task, i0, rows);
        mt_attention_backward_scores(p, ds, task, q, k, v, dout, i0, j0, rows, columns);
        mt_matmul(dv_sums, p, dout.data, columns, Dv, rows, Dv, columns, dout.stride, MT_TRANSPOSED, MT_PLAIN, true);
        mt_matmul(dk_sums, ds, q.data, columns, D, rows, D, columns, q.stride, MT_TRANSPOSED, MT_PLAIN, true);
    }
}

/* Second half: dk and dv of the key rows [k0, k0 + MT_KEYS) of one group, over every span that has some of them and
 * every head of the group, in order. Rows in no span stay as they are. */
static void mt_attention_backward_group(void *dk, void *dv, mt_attention_task *task, const mt_spans *spans,
                                        int64_t group, int64_t k0, float *scratch) {
    const mt_attention *shape = task->shape;
    int64_t D = shape->head_size, Dv = shape->value_size, heads = shape->num_heads / shape->num_groups;
    float *dk_sums = scratch, *dv_sums = dk_sums + MT_KEYS * D;
    bool covered[MT_KEYS] = {false};
    memset(scratch, 0, (size_t)(MT_KEYS * (D + Dv)) * sizeof *scratch);
    for (int64_t s = 0; s < spans->count; s++) {
        const mt_span *span = task->span = &spans->host[s];
        int64_t begin = mt_max(k0, span->k_start), end = mt_min(k0 + MT_KEYS, span->k_start + span->k_len);
        if (begin >= end) continue;
        for (int64_t j = begin; j < end; j++) covered[j - k0] = true;
        for (task->head = group * heads; task->head < (group + 1) * heads; task->head++)
            mt_attention_backward_keys(dk_sums + (begin - k0) * D, dv_sums + (begin - k0) * Dv, task,
                                       begin - span->k_start, end - begin, dv_sums + MT_KEYS * Dv);
    }
    for (int64_t j = 0; j < MT_KEYS; j++) {
        if (!covered[j]) continue;
        int64_t k_offset = (k0 + j) * shape->k_stride + group * D, v_offset = (k0 + j) * shape->v_stride + group * Dv;
        if (task->dtype == MT_F32) {
            memcpy((float *)dk + k_offset, dk_sums + j * D, (size_t)D * sizeof(float));
            memcpy((float *)dv + v_offset, dv_sums + j * Dv, (size_t)Dv * sizeof(float));
        }
        mt_row_close(dk, k_offset, dk_sums + j * D, D, task->dtype);
        mt_row_close(dv, v_offset, dv_sums + j * Dv, Dv, task->dtype);
    }
}

static void mt_cpu_attention_backward(void *dq, void *dk, void *dv, float *row_dot, const void *dout, const void *q,
                                      const void *k, const void *v, const void *out, const float *lse,
                                      const mt_spans *spans, const mt_attention *shape, mt_dtype dtype,
                                      mt_stream *stream) {
    (void)stream;
    int64_t D = shape->head_size, Dv = shape->value_size, heads = shape->num_heads;
    mt_spans_extent extent = mt_spans_measure(spans);
    int64_t blocks = mt_blocks(extent.max_queries, MT_QUERIES);
    mt_attention_task all = {.q = q,
                             .k = k,
                             .v = v,
                             .out = out,
                             .dout = dout,
                             .lse = (float *)lse,
                             .row_dot = row_dot,
                             .shape = shape,
                             .dtype = dtype};
    mt_scratch scratch = mt_scratch_reserve((2 * MT_QUERIES + 2 * MT_KEYS) * (D + Dv) + 2 * MT_QUERIES * MT_KEYS);
#pragma omp parallel for collapse(3) schedule(dynamic) if (extent.products * heads * D > MT_PARALLEL)
    for (int64_t s = 0; s < spans->count; s++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t block = 0; block < blocks; block++) {
                mt_attention_task task = all;
                task.span = &spans->host[s];
                task.head = head;
                if (block * MT_QUERIES >= task.span->q_len) continue;
                mt_attention_backward_queries(dq, &task, block * MT_QUERIES, mt_scratch_slice(scratch));
            }
#pragma omp parallel for collapse(2) schedule(dynamic) if (extent.products * heads * D > MT_PARALLEL)
    for (int64_t k0 = 0; k0 < extent.key_rows; k0 += MT_KEYS)
        for (int64_t group = 0; group < shape->num_groups; group++) {
            mt_attention_task task = all;
            mt_attention_backward_group(dk, dv, &task, spans, group, k0, mt_scratch_slice(scratch));
        }
}

/* ==== §3f activations, residual stream, rows ===================================================================== */

/* 1 / (1 + exp(-x)) */
static inline float mt_sigmoid(float x) {
    return 1.0f / (1.0f + mt_exp(-x));
}

/* The normal distribution function, erfc(-x / sqrt(2)) / 2, by the Chebyshev fit of Press et al., "Numerical recipes"
 * (erfcc), of relative error under 1.2e-7. */
static inline float mt_normal_cdf(float x) {
    float z = fabsf(x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    float tail = 0.5f * t * mt_exp(-z * z - 1.26551223f + t * p);
    return x < 0 ? tail : 1.0f - tail;
}

/* gelu(x) = x cdf(x). The approximation (1 + tanh(u)) / 2 of cdf is sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
 */
static inline float mt_gelu_u2(float x) {
    return 1.59576912f * (x + 0.044715f * x * x * x);
}

static void mt_cpu_gelu_forward(void *y, const void *x, int64_t n, bool tanh_approximation, mt_dtype dtype,
                                mt_stream *stream) {
    (void)stream;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float x_scratch[MT_BLOCK], y_scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        const float *in = mt_row_load(x_scratch, x, block, count, dtype);
        float *out = mt_row_open(y_scratch, y, block, dtype);
        if (tanh_approximation) {
#pragma omp simd
            for (int64_t i = 0; i < count; i++) out[i] = in[i] * mt_sigmoid(mt_gelu_u2(in[i]));
        } else {
#pragma omp simd
            for (int64_t i = 0; i < count; i++) out[i] = in[i] * mt_normal_cdf(in[i]);
        }
        mt_row_close(y, block, out, count, dtype);
    }
}

/* d(x cdf(x)) = cdf(x) + x density(x); for the approximation, with s = sigmoid(2 u), s + x s (1 - s) 2 u'. */
static void mt_cpu_gelu_backward(void *dx, const void *dy, const void *x, int64_t n, bool tanh_approximation,
                                 mt_dtype dtype, mt_stream *stream) {
    (void)stream;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float x_scratch[MT_BLOCK], dy_scratch[MT_BLOCK], dx_scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        const float *in = mt_row_load(x_scratch, x, block, count, dtype);
        const float *d = mt_row_load(dy_scratch, dy, block, count, dtype);
        float *out = mt_row_open(dx_scratch, dx, block, dtype);
        if (tanh_approximation) {
#pragma omp simd
            for (int64_t i = 0; i < count; i++) {
                float s = mt_sigmoid(mt_gelu_u2(in[i]));
                float slope = 1.59576912f * (1.0f + 3.0f * 0.044715f * in[i] * in[i]);
                out[i] = d[i] * (s + in[i] * s * (1.0f - s) * slope);
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < count; i++) {
                float density = 0.39894228f * mt_exp(-0.5f * in[i] * in[i]);
                out[i] = d[i] * (mt_normal_cdf(in[i]) + in[i] * density);
            }
        }
        mt_row_close(dx, block, out, count, dtype);
    }
}

static void mt_cpu_swiglu_forward(void *y, const void *gate_up, int64_t T, int64_t F, mt_dtype dtype,
                                  mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(3 * F);
#pragma omp parallel for if (T * F > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *gate = mt_row_load(slice, gate_up, t * 2 * F, F, dtype);
        const float *up = mt_row_load(slice + F, gate_up, t * 2 * F + F, F, dtype);
        float *out = mt_row_open(slice + 2 * F, y, t * F, dtype);
#pragma omp simd
        for (int64_t f = 0; f < F; f++) out[f] = gate[f] * mt_sigmoid(gate[f]) * up[f];
        mt_row_close(y, t * F, out, F, dtype);
    }
}

/* With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)). */
static void mt_cpu_swiglu_backward(void *dgate_up, const void *dy, const void *gate_up, int64_t T, int64_t F,
                                   mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(5 * F);
#pragma omp parallel for if (T * F > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *gate = mt_row_load(slice, gate_up, t * 2 * F, F, dtype);
        const float *up = mt_row_load(slice + F, gate_up, t * 2 * F + F, F, dtype);
        const float *d = mt_row_load(slice + 2 * F, dy, t * F, F, dtype);
        float *dgate = mt_row_open(slice + 3 * F, dgate_up, t * 2 * F, dtype);
        float *dup = mt_row_open(slice + 4 * F, dgate_up, t * 2 * F + F, dtype);
#pragma omp simd
        for (int64_t f = 0; f < F; f++) {
            float g = gate[f], u = up[f], s = mt_sigmoid(g);
            dgate[f] = d[f] * u * s * (1.0f + g * (1.0f - s));
            dup[f] = d[f] * g * s;
        }
        mt_row_close(dgate_up, t * 2 * F, dgate, F, dtype);
        mt_row_close(dgate_up, t * 2 * F + F, dup, F, dtype);
    }
}

static void mt_cpu_dropout_add_forward(void *out, const void *x, const void *residual, const int64_t *token_index,
                                       int64_t T, int64_t C, int64_t first_channel, const mt_dropout *dropout,
                                       mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(4 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch), *factors = slice + 3 * C;
        const float *in = mt_row_load(slice, x, t * C, C, dtype);
        const float *add = residual ? mt_row_load(slice + C, residual, t * C, C, dtype) : NULL;
        float *row = mt_row_open(slice + 2 * C, out, t * C, dtype);
        bool drop = dropout->p > 0;
        if (drop) mt_dropout_factors(factors, C, dropout, (uint64_t)token_index[t], 0, first_channel);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) row[c] = (add ? add[c] : 0.0f) + (drop ? in[c] * factors[c] : in[c]);
        mt_row_close(out, t * C, row, C, dtype);
    }
}

static void mt_cpu_dropout_add_backward(void *dx, const void *dout, const int64_t *token_index, int64_t T, int64_t C,
                                        int64_t first_channel, const mt_dropout *dropout, mt_dtype dtype,
                                        mt_stream *stream) {
    mt_cpu_dropout_add_forward(dx, dout, NULL, token_index, T, C, first_channel, dropout, dtype, stream);
}

static void mt_cpu_scatter_rows(void *to, const void *from, const int32_t *rows, int64_t T, int64_t width,
                                int64_t to_stride, int64_t from_stride, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    int64_t size = mt_dtype_size(dtype);
#pragma omp parallel for if (T * width > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++)
        memcpy((char *)to + rows[t] * to_stride * size, (const char *)from + t * from_stride * size,
               (size_t)(width * size));
}

static void mt_cpu_gather_rows(void *to, const void *from, const int32_t *rows, int64_t T, int64_t width,
                               int64_t to_stride, int64_t from_stride, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    int64_t size = mt_dtype_size(dtype);
#pragma omp parallel for if (T * width > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++)
        memcpy((char *)to + t * to_stride * size, (const char *)from + rows[t] * from_stride * size,
               (size_t)(width * size));
}

/* ==== §3g cross-entropy ========================================================================================== */

static void mt_cpu_cross_entropy_forward(float *row_max, float *row_sum, float *row_target, float *row_weighted,
                                         const void *logits, const int32_t *labels, int64_t T, int64_t stride,
                                         int64_t first, int64_t count, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(count);
#pragma omp parallel for if (T * count > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        const float *x = mt_row_load(mt_scratch_slice(scratch), logits, t * stride, count, dtype);
        float max = mt_row_max(x, count);
        double sum = 0, weighted = 0;
        for (int64_t block = 0; block < count; block += MT_BLOCK) {
            float block_sum = 0, block_weighted = 0;
#pragma omp simd reduction(+ : block_sum, block_weighted)
            for (int64_t i = block; i < mt_min(block + MT_BLOCK, count); i++) {
                float e = mt_exp(x[i] - max);
                block_sum += e;
                block_weighted += e > 0 ? e * x[i] : 0.0f; // a logit of -inf weighs nothing
            }
            sum += block_sum;
            weighted += block_weighted;
        }
        int64_t label = labels[t] - first;
        row_max[t] = max;
        row_sum[t] = (float)sum;
        row_target[t] = label >= 0 && label < count ? x[label] : 0.0f;
        if (row_weighted) row_weighted[t] = (float)weighted;
    }
}

static void mt_cpu_cross_entropy_loss(float *loss, float *entropy, float *lse, const float *row_max,
                                      const float *row_sum, const float *row_target, const float *row_weighted,
                                      int64_t T, mt_stream *stream) {
    (void)stream;
    for (int64_t t = 0; t < T; t++) {
        double log_sum = (double)row_max[t] + log((double)row_sum[t]);
        lse[t] = (float)log_sum;
        loss[t] = (float)(log_sum - (double)row_target[t]);
        if (entropy) entropy[t] = (float)(log_sum - (double)row_weighted[t] / (double)row_sum[t]);
    }
}

static void mt_cpu_cross_entropy_backward(void *dlogits, const void *logits, const int32_t *labels, const float *lse,
                                          const float *dloss, int64_t T, int64_t stride, int64_t first, int64_t count,
                                          mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    mt_scratch scratch = mt_scratch_reserve(count + stride);
#pragma omp parallel for if (T * count > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *x = mt_row_load(slice, logits, t * stride, count, dtype);
        float *d = mt_row_open(slice + count, dlogits, t * stride, dtype), log_sum = lse[t], scale = dloss[t];
        int64_t label = labels[t] - first;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) d[i] = mt_exp(x[i] - log_sum) * scale;
        if (label >= 0 && label < count) d[label] -= scale;
        for (int64_t i = count; i < stride; i++) d[i] = 0.0f;
        mt_row_close(dlogits, t * stride, d, stride, dtype);
    }
}

static void mt_cpu_loss_accumulate(double *sums, const float *loss, const float *mask, int64_t T, mt_stream *stream) {
    (void)stream;
    for (int64_t t = 0; t < T; t++) {
        sums[0] += (double)loss[t] * (double)mask[t];
        sums[1] += (double)mask[t];
    }
}

/* ==== §3h optimizer and conversions ============================================================================== */

static void mt_cpu_squared_norm(double *sum, const float *x, int64_t n, mt_stream *stream) {
    (void)stream;
    enum { PARTS = 256 }; // however many threads there are
    double parts[PARTS] = {0};
    int64_t length = mt_blocks(n, (int64_t)PARTS * MT_BLOCK) * MT_BLOCK;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t block = part * length; block < mt_min((part + 1) * length, n); block += MT_BLOCK) {
            double squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = block; i < mt_min(block + MT_BLOCK, n); i++) squares += (double)x[i] * (double)x[i];
            parts[part] += squares;
        }
    double total = 0;
    for (int64_t part = 0; part < PARTS; part++) total += parts[part];
    sum[0] += total;
}

static void mt_cpu_gradient_scale(float *scale, float *norm, const double *sum_of_squares, const double *denominator,
                                  float clip, mt_stream *stream) {
    (void)stream;
    double tokens = denominator[0] > 0 ? denominator[0] : 1.0; // a batch without unmasked tokens has no gradient
    double size = sqrt(sum_of_squares[0]) / tokens, factor = clip > 0 ? (double)clip / (size + 1e-6) : 1.0;
    norm[0] = (float)size;
    scale[0] = (float)((factor < 1.0 ? factor : 1.0) / tokens);
}

static void mt_cpu_adamw_step(void *param, float *master, float *m, float *v, const float *grad, const float *scale,
                              int64_t n, const mt_adamw *adamw, mt_dtype dtype, mt_stream *stream) {
    (void)stream;
    float beta1 = adamw->beta1, beta2 = adamw->beta2, eps = adamw->eps, grad_scale = scale[0];
    float step = adamw->lr / adamw->bias_correction1, shrink = 1.0f - adamw->lr * adamw->weight_decay;
    float root = 1.0f / sqrtf(adamw->bias_correction2);
    float *weights = dtype == MT_F32 ? param : master;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        int64_t end = mt_min(block + MT_BLOCK, n);
#pragma omp simd
        for (int64_t i = block; i < end; i++) {
            float g = grad[i] * grad_scale;
            m[i] = beta1 * m[i] + (1.0f - beta1) * g;
            v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
            weights[i] = weights[i] * shrink - step * m[i] / (sqrtf(v[i]) * root + eps);
        }
        mt_row_close(param, block, weights + block, end - block, dtype);
    }
}

/* Two uniform words give two normal numbers (Box & Muller, "A note on the generation of random normal deviates"). */
static void mt_box_muller(float normal[2], uint32_t word0, uint32_t word1) {
    double uniform0 = ((double)word0 + 0.5) * 0x1p-32, uniform1 = ((double)word1 + 0.5) * 0x1p-32;
    float radius = sqrtf(-2.0f * logf((float)uniform0)), angle = (float)(uniform1 * 6.283185307179586);
    normal[0] = radius * cosf(angle);
    normal[1] = radius * sinf(angle);
}

/* The normal numbers first ... first + n - 1 of a key: number i is the (i % 4)th of counter i / 4. */
static void mt_cpu_random_normal(void *param, int64_t n, uint64_t key, int64_t first, float mean, float std,
                                 mt_dtype dtype, mt_stream *stream) {
    (void)stream;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float scratch[MT_BLOCK], normal[4];
        int64_t count = mt_min(MT_BLOCK, n - block);
        float *out = mt_row_open(scratch, param, block, dtype);
        for (int64_t i = 0; i < count; i++) {
            int64_t index = first + block + i;
            if (i == 0 || index % 4 == 0) {
                uint32_t words[4];
                mt_philox(words, key, (uint64_t)(index / 4), 0);
                mt_box_muller(normal, words[0], words[1]);
                mt_box_muller(normal + 2, words[2], words[3]);
            }
            out[i] = mean + std * normal[index % 4];
        }
        mt_row_close(param, block, out, count, dtype);
    }
}

static void mt_cpu_convert(void *to, mt_dtype to_dtype, const void *from, mt_dtype from_dtype, int64_t n,
                           mt_stream *stream) {
    (void)stream;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        const float *row = mt_row_load(scratch, from, block, count, from_dtype);
        if (to_dtype == MT_F32) memcpy((float *)to + block, row, (size_t)count * sizeof *row);
        mt_row_close(to, block, row, count, to_dtype);
    }
}

#define MT_CPU_ENTRY(operation) .operation = mt_cpu_##operation,
const mt_ops mt_cpu_ops = {.name = "cpu", MT_OPERATIONS(MT_CPU_ENTRY)};
#undef MT_CPU_ENTRY
#pragma GCC diagnostic pop

/* ==== §4 the rank grid and its groups ============================================================================ */

/* ==== §5 collectives ============================================================================================= */

/* ==== §8 the parameter table ===================================================================================== */

/* ==== §9 attention, MLP, layer =================================================================================== */

/* ==== §10 the model ============================================================================================== */

/* ==== §11 schedules ============================================================================================== */

/* ==== §12 gradient buckets ======================================================================================= */

/* ==== §13 optimizer ============================================================================================== */

/* ==== §14 checkpoints and Hugging Face =========================================================================== */

/* ==== §15 generation ============================================================================================= */

/* ==== §16 the training step ====================================================================================== */
