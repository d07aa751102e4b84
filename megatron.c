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
