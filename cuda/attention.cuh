/* attention.cuh: shared code of the flash kernels: tiles of spans, assignment of tiles to blocks, and the mask of a
 * query. */
#ifndef MT_ATTENTION_CUH
#define MT_ATTENTION_CUH

#include "attention.h"
#include "cuda.h"
#include "mma.cuh"
#include "vector.cuh"

#include <climits>

typedef __nv_bfloat16 bf16;

/* The rungs above the definition, fields of mt_attention_rungs. */
extern "C" mt_attention_direction mt_attention_mma_forward;
extern "C" mt_attention_direction mt_attention_mma_backward;
extern "C" mt_attention_direction mt_attention_hopper_forward;
extern "C" mt_attention_direction mt_attention_hopper_backward;
extern "C" mt_attention_direction mt_attention_split_forward;
extern "C" mt_attention_direction mt_attention_split_backward;

/* Runs the call on cuDNN if the backend is cuDNN, or on the fastest implementation if it is `auto`; otherwise runs
 * `ours` (attention_cudnn.cu). */
bool mt_attention_run(const mt_attention *a, mt_dtype dtype, mt_stream *stream, bool backward,
                      mt_attention_direction *ours);

/* The keys that the queries of sparse attention attend to: see mt_indexer_args. Bit j % 64 of bits[t, j / 64] is set if
 * query row t attends to key j of its span. */
struct mt_selection {
    const int32_t *selected; // [Tq, topk]
    int64_t topk;
    const uint64_t *bits; // [Tq, words]
    int64_t words;
    int *counter; // of tiles, memory for persistent blocks
};

/* Attention over selected keys by the definition, whose forward reads the lists, and by the rungs above it, which read
 * bits and have no dropout. */
void mt_selected_naive_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream);
void mt_selected_naive_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream);
bool mt_selected_mma_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream);
bool mt_selected_mma_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream);
bool mt_selected_hopper_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream);
bool mt_selected_hopper_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream);

/* ---- biases by distance ------------------------------------------------------------------------------------------ */

/* The buckets of mt_relative_bucket as limits between them, which the host computes: on the device a logarithm may be
 * rounded to another bucket. A distance below `exact` has a bucket of its own; begin[i] is the first one in bucket
 * exact + 1 + i of `count`. If bidirectional, those of later keys follow. */
enum { BUCKETS = MT_CUDA_BIAS_BUCKETS, LIMITS = 32 };
struct distance_buckets {
    int begin[LIMITS]; // INT_MAX: no further bucket
    int exact, count, total;
    bool bidirectional;
};
static_assert(BUCKETS - 1 - BUCKETS / 2 <= LIMITS, "a lane has a limit");

/* The bucket of a distance. */
__device__ __forceinline__ int bucket_of(const distance_buckets &b, int distance) {
    int from = b.bidirectional ? abs(distance) : max(-distance, 0), bucket = min(from, b.exact);
    for (int i = 0; i < LIMITS; i++) bucket += from >= b.begin[i];
    return bucket + (b.bidirectional && distance > 0 ? b.count : 0);
}

/* The same of a distance that all lanes of the warp have in common. */
__device__ __forceinline__ int bucket_of_warp(const distance_buckets &b, int distance) {
    int from = b.bidirectional ? abs(distance) : max(-distance, 0);
    int passed = __popc(__ballot_sync(0xffffffff, from >= b.begin[threadIdx.x % 32]));
    return (from < b.exact ? from : b.exact + passed) + (b.bidirectional && distance > 0 ? b.count : 0);
}

static inline distance_buckets buckets_of(const mt_attention *a) {
    const mt_relative_bias *bias = &a->bias;
    distance_buckets b = {.total = (int)bias->buckets, .bidirectional = bias->bidirectional};
    b.count = bias->bidirectional ? b.total / 2 : b.total, b.exact = b.count / 2;
    for (int i = 0; i < LIMITS; i++) {
        int64_t low = b.exact, high = bias->max_distance; // (low, high] has the first distance of the bucket
        b.begin[i] = INT_MAX;
        if (b.exact + 1 + i >= b.count) continue;
        while (high - low > 1) {
            int64_t middle = low + (high - low) / 2;
            if (mt_relative_bucket(bias, -middle) > b.exact + i)
                high = middle;
            else
                low = middle;
        }
        b.begin[i] = (int)(high < INT_MAX ? high : INT_MAX);
    }
    return b;
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

/* Kernel arguments, passed by value. */
struct flash_tiles {
    float *lse, *row_dot;
    mt_selection selection;
    const mt_span *spans;
    int num_spans, num_tiles, heads_together;
    bool accumulate; // add to dk and dv instead of writing them
    int *counter;    // of tiles taken, for persistent blocks
    mt_attention shape;
};

/* The same with operands of E, bf16 or fp16. */
template <class E> struct flash_task : flash_tiles {
    const E *q, *k, *v, *dout;
    E *out, *dq, *dk, *dv;
    distance_buckets buckets; // with biases by distance
    float *dbias;             // [tiles of queries, H, BUCKETS] parts of their gradient; NULL: not wanted
};

/* ---- masks ------------------------------------------------------------------------------------------------------- */

/* Query i of a span attends to key j if i - behind <= j <= i + ahead and 0 <= j < k_len. */
struct band {
    int ahead, behind, q_len, k_len;
};

__device__ __forceinline__ band band_of(const mt_span &span, int64_t window) {
    const int everything = 1 << 30;
    int shift = (int)(span.k_len - span.q_len);
    int behind = window > 0 && window < everything ? (int)window - 1 - shift : everything;
    return {span.causal ? shift : everything, behind, (int)span.q_len, (int)span.k_len};
}

/* True if all of `queries` queries from i attend to all of `keys` keys from j; then no element needs masking. */
__device__ __forceinline__ bool all_see(const band &b, int i, int queries, int j, int keys) {
    return j + keys <= b.k_len && j + keys - 1 <= i + b.ahead && j >= i + queries - 1 - b.behind;
}

/* Ranges [first, end): all keys that queries [i, i + queries) attend to; all queries that attend to keys [j, j + keys).
 */
struct range {
    int first, end;
};
__device__ __forceinline__ range keys_of(const band &b, int i, int queries) {
    int last = min(i + queries, b.q_len) - 1;
    return {max(0, i - b.behind), min(b.k_len, last + b.ahead + 1)};
}
__device__ __forceinline__ range queries_of(const band &b, int j, int keys) {
    int last = min(j + keys, b.k_len) - 1;
    return {max(0, j - b.ahead), min(b.q_len, last + b.behind + 1)};
}

/* ---- keys in pages ----------------------------------------------------------------------------------------------- */

/* Row of k and v that holds key row j: see mt_pages. Keys of one page lie in consecutive rows. */
__device__ static inline int64_t mt_key_row(const mt_pages &pages, int64_t j) {
    if (!pages.table) return j;
    int shift = 31 - __clz((int)pages.rows);
    return ((int64_t)pages.table[j >> shift] << shift) + (j & (pages.rows - 1));
}

/* True if tiles of `keys` keys that begin at a multiple of `keys` in their span lie in one page each. */
static inline bool pages_serve(const mt_attention *a, int64_t keys) {
    return !a->pages.table || a->pages.rows % keys == 0;
}

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

/* Rows [first, first + size) of a span's queries or keys, clipped to the span, and the head. */
struct tile {
    mt_span span;
    int first, head;
};

/* Finds tile number `index` among the tiles of all spans. Every warp does this itself: each lane counts the tiles of a
 * span, a scan gives their ends, and the first span that ends past `index` contains it. */
template <bool OF_KEYS> __device__ __forceinline__ tile tile_find(const flash_tiles &task, int index, int size) {
    const unsigned all = 0xffffffff;
    int lane = threadIdx.x % 32;
    for (int base = 0;; base += 32) {
        int count = 0;
        if (base + lane < task.num_spans) {
            const mt_span *span = &task.spans[base + lane];
            count = ((int)(OF_KEYS ? span->k_len : span->q_len) + size - 1) / size;
        }
        int end = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(all, end, step);
            if (lane >= step) end += before;
        }
        unsigned past = __ballot_sync(all, index < end);
        if (past) {
            int owner = __ffs((int)past) - 1;
            return {task.spans[base + owner], (index - __shfl_sync(all, end - count, owner)) * size, 0};
        }
        index -= __shfl_sync(all, end, 31);
    }
}

/* The tile of block `index` of tiles x heads. Blocks start in this order. Heads come in sections whose keys and values
 * fit in L2 together. Within a section, tiles with the most work under a causal mask come first: late queries, early
 * keys. The last blocks are therefore short, and no multiprocessor waits long for another. */
template <bool OF_KEYS> __device__ __forceinline__ tile tile_of_block(const flash_tiles &task, int index, int size) {
    int section = index / (task.num_tiles * task.heads_together);
    index %= task.num_tiles * task.heads_together;
    int number = index / task.heads_together;
    tile t = tile_find<OF_KEYS>(task, OF_KEYS ? number : task.num_tiles - 1 - number, size);
    t.head = section * task.heads_together + index % task.heads_together;
    return t;
}

/* ---- accumulators of tensor cores in registers ------------------------------------------------------------------- */

/* mma.sync and wgmma distribute a result in the same way: a warp holds 16 rows per tile, and a lane holds of each block
 * of 8 columns the four elements c[tile][block] described at mt_mma. The following functions work on such results, warp
 * by warp. */

static constexpr float LOG2_E = 1.44269504f;

/* Converts an fp32 result to operand a of the next product: two 8-column blocks form one 16-column block, and every
 * lane already holds its elements. */
template <class E, int TILES, int N>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[TILES][N][4], const float (&c)[TILES][2 * N][4]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            p[t][n / 2][n % 2 * 2] = mt_pair_from_float(E(), c[t][n][0], c[t][n][1]);
            p[t][n / 2][n % 2 * 2 + 1] = mt_pair_from_float(E(), c[t][n][2], c[t][n][3]);
        }
}

template <int TILES, int N> __device__ __forceinline__ void clear(float (&c)[TILES][N][4]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[t][n][e] = 0;
}

template <int TILES, int N> __device__ __forceinline__ void scale_all(float (&c)[TILES][N][4], float scale) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[t][n][e] *= scale;
}

template <int TILES, int N>
__device__ __forceinline__ void scale_rows(float (&c)[TILES][N][4], const float (&scale)[TILES][2]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[t][n][e] *= scale[t][e / 2];
}

/* The row and column, within the warp's part of a result, of element e of c[t][n]. */
__device__ __forceinline__ int row_of(int t, int e) {
    return 16 * t + threadIdx.x % 32 / 4 + e / 2 * 8;
}
__device__ __forceinline__ int col_of(int n, int e) {
    return 8 * n + threadIdx.x % 4 * 2 + e % 2;
}

template <class E> __device__ __forceinline__ uint32_t add_pair(uint32_t a, uint32_t b) {
    mt_pack<float, 2> x = mt_to_float(mt_pack<E, 2>{{a}}), y = mt_to_float(mt_pack<E, 2>{{b}});
    return mt_pair_from_float(E(), x.value[0] + y.value[0], x.value[1] + y.value[1]);
}

/* Sets the masked scores to -inf. Rows are queries, or keys if TRANSPOSED. */
template <bool TRANSPOSED, int TILES, int N>
__device__ __forceinline__ void hide(float (&score)[TILES][N][4], const band &b, int first_query, int first_key) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row_of(t, 2 * h), col = col_of(0, 0);
            range visible = TRANSPOSED ? queries_of(b, first_key + row, 1) : keys_of(b, first_query + row, 1);
            int first = visible.first - (TRANSPOSED ? first_query : first_key) - col;
            int end = visible.end - (TRANSPOSED ? first_query : first_key) - col;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e < first || 8 * n + e >= end) score[t][n][2 * h + e] = -INFINITY;
        }
}

/* Which columns of the two rows of a lane, row_of(0, 2 h) of a result, belong to a selection: bit 8 (n % 4) + e of
 * word n / 4 is that of column col_of(n, e). */
template <int COLUMNS> struct selected_columns { uint32_t words[2][COLUMNS / 32]; };

/* Reads the bits of KEYS keys from `key` on, a multiple of 64, of the warp's 16 queries from row `query` on; `rows` of
 * these belong to the span. The bits of other rows are those of its last query. */
template <int KEYS>
__device__ __forceinline__ void select_keys_of_rows(selected_columns<KEYS> &to, const mt_selection &from, int64_t query,
                                                    int rows, int key) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint64_t *bits = from.bits + (query + min(row_of(0, 2 * h), rows - 1)) * from.words + key / 64;
#pragma unroll
        for (int w = 0; w < KEYS / 64; w++) {
            uint64_t word = key / 64 + w < from.words ? bits[w] : 0;
            to.words[h][2 * w] = (uint32_t)word >> threadIdx.x % 4 * 2;
            to.words[h][2 * w + 1] = (uint32_t)(word >> 32) >> threadIdx.x % 4 * 2;
        }
    }
}

/* The bits of the warp's 16 keys from `key` on, a multiple of 16: those of queries 32 i + lane from row `query` on, of
 * which `rows` belong to the span. */
template <int QUERIES>
__device__ __forceinline__ void read_selected(uint32_t (&bits)[QUERIES / 32], const mt_selection &from, int64_t query,
                                              int rows, int key) {
#pragma unroll
    for (int i = 0; i < QUERIES / 32; i++) {
        const int row = 32 * i + (int)threadIdx.x % 32;
        const uint16_t *words = (const uint16_t *)(from.bits + (query + row) * from.words) + key / 16;
        bits[i] = row < rows && key / 64 < from.words ? *words : 0;
    }
}

/* Transposes them: columns are queries. */
template <int QUERIES>
__device__ __forceinline__ void select_queries_of_rows(selected_columns<QUERIES> &to,
                                                       const uint32_t (&bits)[QUERIES / 32]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < QUERIES / 32; i++)
#pragma unroll
        for (int key = 0; key < 16; key++) {
            uint32_t queries = __ballot_sync(0xffffffff, bits[i] >> key & 1);
            if (key % 8 == lane / 4) to.words[key / 8][i] = queries >> lane % 4 * 2;
        }
}

/* Sets the scores of other columns to -inf. */
template <int N>
__device__ __forceinline__ void hide_others(float (&score)[1][N][4], const selected_columns<8 * N> &selected) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (!(selected.words[h][n / 4] & 1u << (n % 4 * 8 + e))) score[0][n][2 * h + e] = -INFINITY;
}

/* ---- softmax and its gradient ------------------------------------------------------------------------------------ */

/* The maximum score so far and this lane's part of the sum of weights, for rows row_of(t, 2 h). */
template <int TILES> struct softmax { float largest[TILES][2], total[TILES][2]; };

template <int TILES> __device__ __forceinline__ void softmax_begin(softmax<TILES> &s) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) s.largest[t][h] = -INFINITY, s.total[t][h] = 0;
}

/* Converts scores to weights relative to the maximum so far. Sums and outputs relative to an older maximum are scaled
 * down (scale_rows). exp(x) is 2^(x log2 e), with log2 e included in `scale`: one multiply-add and one special-function
 * instruction per score. */
template <int TILES, int N>
__device__ __forceinline__ void softmax_step(softmax<TILES> &s, float (&score)[TILES][N][4], float (&shrink)[TILES][2],
                                             float scale) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = s.largest[t][h], other = -INFINITY, sum[2] = {0, 0}; // two shorter dependency chains
#pragma unroll
            for (int n = 0; n < N; n++) {
                largest = mt_maximum(largest, score[t][n][2 * h]);
                other = mt_maximum(other, score[t][n][2 * h + 1]);
            }
            largest = mt_maximum(largest, other);
            largest = mt_maximum(largest, __shfl_xor_sync(0xffffffff, largest, 1)); // four lanes share a row
            largest = mt_maximum(largest, __shfl_xor_sync(0xffffffff, largest, 2));
            float base = largest == -INFINITY ? 0 : largest * scale; // no key so far: avoid -inf - -inf
            shrink[t][h] = mt_exp2(s.largest[t][h] * scale - base);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    score[t][n][e] = mt_exp2(score[t][n][e] * scale - base);
                    sum[e % 2] += score[t][n][e];
                }
            s.largest[t][h] = largest;
            s.total[t][h] = s.total[t][h] * shrink[t][h] + (sum[0] + sum[1]);
        }
}

/* Divides the outputs by the sums and stores lse; `to` is the row of the warp's first query. */
template <int TILES, int M>
__device__ __forceinline__ void softmax_finish(softmax<TILES> &s, float (&out)[TILES][M][4], float *to, int64_t heads,
                                               int count, float scale) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = s.total[t][h];
            total += __shfl_xor_sync(0xffffffff, total, 1);
            total += __shfl_xor_sync(0xffffffff, total, 2);
            float inverse = total == 0 ? 0 : 1 / total; // 0: no key
#pragma unroll
            for (int n = 0; n < M; n++) out[t][n][2 * h] *= inverse, out[t][n][2 * h + 1] *= inverse;
            int row = row_of(t, 2 * h);
            if (threadIdx.x % 4 == 0 && row < count)
                to[row * heads] = total == 0 ? -INFINITY : s.largest[t][h] * scale + logf(total);
        }
}

/* For rows row_of(t, 2 h): lse times log2 e, which recomputes a query's weights, or +inf if the query has no key. */
template <int TILES> struct row_stats { float lse[TILES][2], dot[TILES][2]; };

template <int TILES>
__device__ __forceinline__ void load_row_stats(row_stats<TILES> &s, const float *lse, const float *row_dot,
                                               int64_t heads, int count) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row_of(t, 2 * h);
            float at = row < count ? lse[row * heads] : -INFINITY;
            s.lse[t][h] = at == -INFINITY ? INFINITY : at * LOG2_E;
            s.dot[t][h] = row < count ? row_dot[row * heads] : 0;
        }
}

/* Converts scores to weights. */
template <int TILES, int N>
__device__ __forceinline__ void weights_by_row(float (&score)[TILES][N][4], const row_stats<TILES> &stats,
                                               float scale) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) score[t][n][e] = mt_exp2(score[t][n][e] * scale - stats.lse[t][e / 2]);
}

/* weight = weight (factor dp - row_dot). */
template <int TILES, int N>
__device__ __forceinline__ void gradients_by_row(float (&weight)[TILES][N][4], const float (&dp)[TILES][N][4],
                                                 const row_stats<TILES> &stats, float factor = 1) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) weight[t][n][e] *= factor * dp[t][n][e] - stats.dot[t][e / 2];
}

/* Converts transposed scores to weights. A query without keys has lse = -inf and only masked scores: -inf - -1e30. Rows
 * of queries past the end are zero, so their weight of 1 adds nothing. */
template <int TILES, int N>
__device__ __forceinline__ void weights_by_column(float (&score)[TILES][N][4], const float *lse, float scale) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float base = mt_maximum(lse[col_of(n, e)], -1e30f) * LOG2_E;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                score[t][n][e] = mt_exp2(score[t][n][e] * scale - base);
                score[t][n][e + 2] = mt_exp2(score[t][n][e + 2] * scale - base);
            }
        }
}

/* weight = weight (factor dp - row_dot). */
template <int TILES, int N>
__device__ __forceinline__ void gradients_by_column(float (&weight)[TILES][N][4], const float (&dp)[TILES][N][4],
                                                    const float *row_dot, float factor = 1) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float dot = row_dot[col_of(n, e)];
#pragma unroll
            for (int t = 0; t < TILES; t++) weight[t][n][e] *= factor * dp[t][n][e] - dot;
        }
}

/* The same in place of dp, with weights that were packed to bf16 and unpacked; the gradients have the same rounding. */
template <int TILES, int N>
__device__ __forceinline__ void gradients_of_packed(float (&dp)[TILES][2 * N][4], const uint32_t (&p)[TILES][N][4],
                                                    const float *row_dot) {
#pragma unroll
    for (int n = 0; n < 2 * N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float dot = row_dot[col_of(n, e)];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                uint32_t pair = p[t][n / 2][n % 2 * 2 + e / 2];
                dp[t][n][e] = __uint_as_float(e % 2 ? pair & 0xffff0000 : pair << 16) * (dp[t][n][e] - dot);
            }
        }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static inline int tile_count(const mt_spans *spans, bool of_keys, int size) {
    int64_t count = 0;
    for (int64_t i = 0; i < spans->count; i++)
        count += mt_divide_up(of_keys ? spans->host[i].k_len : spans->host[i].q_len, size);
    return (int)count;
}

/* The largest number of heads (a divisor of `heads`; `per_group` of them share keys) whose keys and values of the
 * longest span fill at most half of L2. */
static inline int heads_in_section(const mt_attention *a, int64_t heads, int64_t per_group) {
    int64_t longest = 1, best = per_group;
    for (int64_t i = 0; i < a->spans.count; i++)
        if (a->spans.host[i].k_len > longest) longest = a->spans.host[i].k_len;
    int64_t group_bytes = longest * (a->head_size + a->value_size) * (int64_t)sizeof(bf16);
    for (int64_t together = per_group; together <= heads; together += per_group)
        if (heads % together == 0 && together / per_group * group_bytes <= mt_cuda_device()->l2CacheSize / 2)
            best = together;
    return (int)best;
}

template <class E> static inline flash_task<E> flash_task_of(const mt_attention *a) {
    flash_task<E> task = {};
    task.q = (const E *)a->q, task.k = (const E *)a->k, task.v = (const E *)a->v;
    task.dout = (const E *)a->dout, task.out = (E *)a->out;
    task.dq = (E *)a->dq, task.dk = (E *)a->dk, task.dv = (E *)a->dv;
    task.lse = a->lse, task.row_dot = a->row_dot;
    task.spans = a->spans.device, task.num_spans = (int)a->spans.count;
    task.shape = *a;
    if (a->bias.w) task.buckets = buckets_of(a);
    return task;
}

/* True if a key row belongs to two spans; then their gradients must be added one span after another. */
static inline bool spans_share_keys(const mt_spans *spans) {
    for (int64_t i = 1; i < spans->count; i++) { // lists are sorted except those of context parallelism
        const mt_span *a = &spans->host[i - 1], *b = &spans->host[i];
        if (b->k_start < a->k_start + a->k_len) return true;
    }
    return false;
}

/* Adds `count` parts [H, BUCKETS] of the gradients of biases to those of the call, in order. */
void mt_attention_add_dbias(const mt_attention *a, const float *parts, int64_t count, mt_stream *stream);

/* Zeroes dk and dv of all keys of the spans; later kernels add to them. */
void mt_attention_clear_keys(const mt_attention *a, mt_dtype dtype, mt_stream *stream);

/* Computes dk and dv for all spans at once, or, if spans share keys, one span after another with accumulation. */
template <class E>
static inline void over_disjoint_keys(const mt_attention *a, mt_stream *stream,
                                      void (*launch)(const flash_task<E> &task, const mt_attention *a,
                                                     mt_stream *stream),
                                      const mt_selection &selection = {}) {
    if (!spans_share_keys(&a->spans)) {
        flash_task<E> task = flash_task_of<E>(a);
        task.selection = selection;
        return launch(task, a, stream);
    }
    mt_attention_clear_keys(a, std::is_same_v<E, __half> ? MT_F16 : MT_BF16, stream);
    for (int64_t i = 0; i < a->spans.count; i++) {
        mt_attention part = *a;
        part.spans = {a->spans.host + i, a->spans.device + i, 1};
        flash_task<E> task = flash_task_of<E>(&part);
        task.selection = selection;
        task.accumulate = true;
        launch(task, &part, stream);
    }
}

/* row_dot = sum(out dout) for every query and head; both kernels of a backward need it. */
void mt_attention_row_dots(const mt_attention *a, mt_dtype dtype, mt_stream *stream);

/* True if the flash kernels take these operands: 16-bit elements in rows that allow 16-byte loads, without biases. Each
 * kernel checks its head sizes itself, and dropout if it has none. */
static inline bool flash_serves(const mt_attention *a, mt_dtype dtype, bool has_biases = false) {
    const void *operands[] = {a->out, a->dq, a->dk, a->dv, a->dout, a->q, a->k, a->v};
    for (const void *operand : operands)
        if ((uintptr_t)operand % 16 != 0) return false;
    int64_t sizes[] = {a->head_size, a->value_size, a->q_stride, a->k_stride, a->v_stride, a->out_stride};
    for (int64_t size : sizes)
        if (size <= 0 || size % 8 != 0) return false;
    return dtype != MT_F32 && a->scale > 0 && (!a->bias.w || has_biases);
}

#endif
