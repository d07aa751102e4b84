/* attention_split.cu: attention of few queries to many keys, as in decoding (Dao et al., "Flash-Decoding for
 * long-context inference").
 *
 * One query cannot fill a GPU, but its keys can. The keys are divided into splits. A block processes the queries of all
 * heads of a group over one split, so that keys and values are read once, and writes its partial softmax to the
 * workspace. A second kernel merges the splits of a head. Where the longest span has few splits, these are a cluster of
 * blocks, which merge their results with the same bits (on Hopper GPUs, in bf16).
 * The division of a span depends on the span as read on the device and on the numbers of queries and spans of the
 * launch, never on the lengths in the host's list, which bound the grid and so decide where splits are merged.
 * Therefore a graph captured with the longest spans gives the same bits for shorter ones. */
#include "attention.cuh"
#include "mma.cuh"
#include "vector.cuh"

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

enum {
    WARPS = 4,
    JOINING_WARPS = 8,
    MAX_QUERIES = 8,
    MAX_SPLITS = 64,
    LEAST_KEYS = 64,
    ENOUGH_BLOCKS = 4 * 132, // fill a GPU; with more, the beginnings and ends of splits cost more than they spread
    MAX_CLUSTER = 8,
    MAX_CHANNELS = MT_CUDA_HEAD_CHANNELS
};

/* join_cluster adds in the order of join_splits, where each warp then has at most one split. */
static_assert(MAX_CLUSTER <= JOINING_WARPS && (MAX_CLUSTER & (MAX_CLUSTER - 1)) == 0, "the same order of sums");

/* Kernel arguments, passed by value. The partial result of query i of span s, head h and split p is in row ((s
 * max_queries + i) H + h) max_splits + p. */
struct split_task {
    const void *q, *k, *v;
    void *out;
    float *lse;
    const mt_span *spans;
    float *sums;     // [rows, Dv] sum exp(x - max) v
    float2 *maxima;  // [rows] max, and sum of 2^(x - max)
    int max_queries; // maximum over the spans
    int max_splits;
    mt_attention shape;
};

/* The keys [first, end) of a span, in splits of `keys` keys. */
struct cut {
    int first, end, keys;
};

__device__ static cut cut_of(const band &b, int max_splits) {
    range seen = keys_of(b, 0, b.q_len);
    int keys = (max(seen.end - seen.first, 0) + max_splits - 1) / max_splits;
    return {seen.first, seen.end, max(LEAST_KEYS, (keys + 15) / 16 * 16)};
}

__device__ static inline int64_t row_of(const split_task &task, int span, int query, int head) {
    return (((int64_t)span * task.max_queries + query) * task.shape.num_heads + head) * task.max_splits;
}

/* 2^(x - base); a maximum over no keys is -inf. */
__device__ static inline float weight_of(float x, float base) {
    return x == -INFINITY ? 0 : mt_exp2(x - base);
}

/* The softmax over some keys for M queries, P packs of N channels: this thread's part. */
template <int M, int P, int N> struct partial_softmax { float max[M], sum[M], values[M][P][N]; };

/* Merges two parts over different keys: this lane's and that of lane ^ bit; both lanes receive the result. */
template <int M, int P, int N> __device__ static inline void join_lanes(partial_softmax<M, P, N> &part, int bit) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        float max = mt_maximum(part.max[m], __shfl_xor_sync(0xffffffff, part.max[m], bit));
        float weight = weight_of(part.max[m], max);
        part.max[m] = max;
        part.sum[m] *= weight;
        part.sum[m] += __shfl_xor_sync(0xffffffff, part.sum[m], bit);
#pragma unroll
        for (int i = 0; i < P * N; i++) {
            float value = part.values[m][i / N][i % N] * weight;
            part.values[m][i / N][i % N] = value + __shfl_xor_sync(0xffffffff, value, bit);
        }
    }
}

/* Adds U keys to the softmax, given their scores (-inf: masked) and values. */
template <class E, int U, int M, int P, int N>
__device__ static inline void add_keys(partial_softmax<M, P, N> &part, const float (&scores)[U][M],
                                       const mt_pack<E, N> (&v)[U][P]) {
    float weights[U][M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        float max = part.max[m];
#pragma unroll
        for (int u = 0; u < U; u++) max = mt_maximum(max, scores[u][m]);
        float shrink = weight_of(part.max[m], max);
        part.max[m] = max;
        part.sum[m] *= shrink;
#pragma unroll
        for (int i = 0; i < P * N; i++) part.values[m][i / N][i % N] *= shrink;
#pragma unroll
        for (int u = 0; u < U; u++) {
            weights[u][m] = weight_of(scores[u][m], max);
            part.sum[m] += weights[u][m];
        }
    }
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
        for (int p = 0; p < P; p++) {
            mt_pack<float, N> value = mt_to_float(v[u][p]);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < N; i++) part.values[m][p][i] += weights[u][m] * value.value[i];
        }
}

/* The work of a block: keys [begin, end) of a span, and M of its `rows` queries times the heads of the group. */
struct block_task {
    mt_span span;
    band seen;
    int begin, end, group, per_group, first_row, rows;
};

__device__ static inline block_task find_block(const split_task &task, int M) {
    const mt_attention &s = task.shape;
    block_task t = {task.spans[blockIdx.z]};
    t.seen = band_of(t.span, s.window);
    cut c = cut_of(t.seen, task.max_splits);
    t.begin = c.first + blockIdx.x * c.keys;
    t.end = min(t.begin + c.keys, c.end);
    int tiles = gridDim.y / (int)s.num_groups;
    t.group = blockIdx.y / tiles;
    t.per_group = (int)(s.num_heads / s.num_groups);
    t.first_row = blockIdx.y % tiles * M;
    t.rows = t.seen.q_len * t.per_group;
    return t;
}

/* The queries of a block; indices past the last query repeat it. */
template <int M, int P, int N> struct block_queries {
    float q[M][P][N]; // multiplied by the scale and log2 e
    int first_key[M], end_key[M];
};

template <class E, int W, int M, int P, int N>
__device__ static inline void load_queries(block_queries<M, P, N> &queries, const split_task &task,
                                           const block_task &t) {
    const mt_attention &s = task.shape;
#pragma unroll
    for (int m = 0; m < M; m++) {
        int row = min(t.first_row + m, t.rows - 1), i = row / t.per_group;
        int head = t.group * t.per_group + row % t.per_group;
        const E *q = (const E *)task.q + (t.span.q_start + i) * s.q_stride + head * s.head_size;
        queries.first_key[m] = i - t.seen.behind;
        queries.end_key[m] = min(t.end, i + t.seen.ahead + 1);
#pragma unroll
        for (int p = 0; p < P; p++) {
            int channel = (p * W + threadIdx.x % W) * N;
            mt_pack<float, N> pack = mt_to_float(mt_load<N>(q + channel, channel < s.head_size));
#pragma unroll
            for (int j = 0; j < N; j++) queries.q[m][p][j] = pack.value[j] * s.scale * 1.44269504f;
        }
    }
}

/* scores[u][m] of keys first + u * step. The W lanes that share a key all receive them. */
template <class E, int W, int U, int M, int P, int N>
__device__ static inline void score_keys(float (&scores)[U][M], const block_queries<M, P, N> &queries,
                                         const mt_pack<E, N> (&keys)[U][P], int first, int step) {
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int m = 0; m < M; m++) scores[u][m] = 0;
#pragma unroll
        for (int p = 0; p < P; p++) {
            mt_pack<float, N> values = mt_to_float(keys[u][p]);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < N; i++) scores[u][m] += queries.q[m][p][i] * values.value[i];
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int bit = W / 2; bit > 0; bit /= 2) scores[u][m] += __shfl_xor_sync(0xffffffff, scores[u][m], bit);
            int key = first + u * step;
            if (key < queries.first_key[m] || key >= queries.end_key[m]) scores[u][m] = -INFINITY;
        }
    }
}

/* The partial softmax of M queries by each warp of a block, over C channels. The padding spreads the warps' writes over
 * the banks. `block`: max and sum of all warps. */
template <int M, int C> struct warp_parts {
    float values[WARPS][M][C + 1], max[WARPS][M], sum[WARPS][M];
    float2 block[M];
};

/* Merges the warps of a block, into `block` and the values of warp 0. Calls then(m, channel, value) for each. */
template <int M, int C, class Then>
__device__ static inline void merge_warps(warp_parts<M, C> &parts, int rows, int Dv, Then then) {
    __syncthreads();
    for (int i = threadIdx.x; i < rows * Dv; i += 32 * WARPS) {
        const int m = i / Dv, channel = i % Dv;
        float max = -INFINITY, total = 0, sum = 0;
        for (int w = 0; w < WARPS; w++) max = mt_maximum(max, parts.max[w][m]);
        for (int w = 0; w < WARPS; w++) {
            const float weight = weight_of(parts.max[w][m], max);
            total += weight * parts.sum[w][m], sum += weight * parts.values[w][m][channel];
        }
        parts.values[0][m][channel] = sum;
        if (channel == 0) parts.block[m] = make_float2(max, total);
        then(m, channel, sum);
    }
}

/* Writes the sums of a block to the workspace, for join_splits. */
template <int M, int C>
__device__ static inline void leave(const split_task &task, const block_task &t, warp_parts<M, C> &parts) {
    const int Dv = (int)task.shape.value_size;
    merge_warps(parts, min(M, t.rows - t.first_row), Dv, [&](int m, int channel, float sum) {
        const int row = t.first_row + m, head = t.group * t.per_group + row % t.per_group;
        const int64_t to = row_of(task, blockIdx.z, row / t.per_group, head) + blockIdx.x;
        task.sums[to * Dv + channel] = sum;
        if (channel == 0) task.maxima[to] = parts.block[m];
    });
}

/* Writes out and lse of a query and head from its weighted sum over all keys. */
template <class E>
__device__ static inline void finish(const split_task &task, int64_t query, int head, int channel, float sum, float max,
                                     float total) {
    const mt_attention &s = task.shape;
    int64_t at = query * s.out_stride + head * s.value_size + channel;
    ((E *)task.out)[at] = mt_from_float<E>(total == 0 ? 0 : sum / total);
    if (channel == 0) task.lse[query * s.num_heads + head] = total == 0 ? -INFINITY : 0.693147181f * max + logf(total);
}

/* Merges the blocks of a cluster, which are the splits of a span, from their shared memory. Rounds as join_splits: each
 * product by itself, and sums in its order. */
template <class E, int M, int C>
__device__ static inline void join_cluster(const split_task &task, const block_task &t, warp_parts<M, C> &own) {
#if __CUDA_ARCH__ >= 900
    cg::cluster_group cluster = cg::this_cluster();
    int splits = gridDim.x, Dv = (int)task.shape.value_size, rows = min(M, t.rows - t.first_row);
    merge_warps(own, rows, Dv, [](int, int, float) {});
    if (splits > 1)
        cluster.sync();
    else
        __syncthreads();
    for (int i = (int)blockIdx.x * 32 * WARPS + threadIdx.x; i < rows * Dv; i += splits * 32 * WARPS) {
        int m = i / Dv, channel = i % Dv, row = t.first_row + m;
        float max = -INFINITY, sum = 0, values[MAX_CLUSTER], totals[MAX_CLUSTER];
        float2 blocks[MAX_CLUSTER];
#pragma unroll
        for (int p = 0; p < MAX_CLUSTER; p++) {
            const warp_parts<M, C> *parts = p < splits && splits > 1 ? cluster.map_shared_rank(&own, p) : &own;
            blocks[p] = p < splits ? parts->block[m] : make_float2(-INFINITY, 0);
            values[p] = p < splits ? parts->values[0][m][channel] : 0;
        }
#pragma unroll
        for (int p = 0; p < MAX_CLUSTER; p++) max = mt_maximum(max, blocks[p].x);
#pragma unroll
        for (int p = 0; p < MAX_CLUSTER; p++) {
            const float weight = weight_of(blocks[p].x, max);
            totals[p] = __fmul_rn(weight, blocks[p].y), sum = __fadd_rn(sum, __fmul_rn(weight, values[p]));
        }
#pragma unroll
        for (int half = MAX_CLUSTER / 2; half > 0; half /= 2)
            for (int p = 0; p < half; p++) totals[p] += totals[p + half];
        finish<E>(task, t.span.q_start + row / t.per_group, t.group * t.per_group + row % t.per_group, channel, sum,
                  max, totals[0]);
    }
    if (splits > 1) cluster.sync(); // others still read this block's parts
#endif
}

/* W lanes share a key, P packs each. Grid: (split, group and tile of its queries, span). Reads each key and value of
 * the split once. */
template <class E, int W, int P, int M> __global__ void __launch_bounds__(32 * WARPS) split_keys(split_task task) {
    constexpr int N = 16 / sizeof(E), together = WARPS * 32 / W, U = M * P > 4 ? 2 : 4;
    const mt_attention &s = task.shape;
    mt_begin_next();
    const block_task t = find_block(task, M);
    mt_wait_for_previous();
    if (t.begin >= t.end || t.first_row >= t.rows) return;
    block_queries<M, P, N> queries;
    load_queries<E, W>(queries, task, t);
    partial_softmax<M, P, N> sums;
#pragma unroll
    for (int m = 0; m < M; m++) {
        sums.max[m] = -INFINITY, sums.sum[m] = 0;
#pragma unroll
        for (int i = 0; i < P * N; i++) sums.values[m][i / N][i % N] = 0;
    }
    int place = threadIdx.x / W, channel = threadIdx.x % W * N;
    const E *k = (const E *)task.k + t.group * s.head_size + channel;
    const E *v = (const E *)task.v + t.group * s.value_size + channel;
    for (int base = t.begin; base < t.end; base += U * together) {
        mt_pack<E, N> keys[U][P], values[U][P];
#pragma unroll
        for (int u = 0; u < U; u++) {
            int key = base + place + u * together;
            int64_t row = key < t.end ? mt_key_row(s.pages, t.span.k_start + key) : 0;
#pragma unroll
            for (int p = 0; p < P; p++) {
                int at = channel + p * W * N;
                keys[u][p] = mt_load<N>(k + row * s.k_stride + p * W * N, key < t.end && at < s.head_size);
                values[u][p] = mt_load<N>(v + row * s.v_stride + p * W * N, key < t.end && at < s.value_size);
            }
        }
        float scores[U][M];
        score_keys<E, W>(scores, queries, keys, base + place, together);
        add_keys<E>(sums, scores, values);
    }
#pragma unroll
    for (int bit = W; bit < 32; bit *= 2) join_lanes(sums, bit);
    __shared__ warp_parts<M, W * P * N> parts;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < W)
#pragma unroll
        for (int m = 0; m < M; m++) {
            parts.max[warp][m] = sums.max[m], parts.sum[warp][m] = sums.sum[m];
#pragma unroll
            for (int i = 0; i < P * N; i++)
                parts.values[warp][m][(i / N * W + lane) * N + i % N] = sums.values[m][i / N][i % N];
        }
    leave(task, t, parts);
}

/* ---- keys on tensor cores, in bf16 and fp16 ---------------------------------------------------------------------- */

/* The tensor core multiplies up to ROWS queries (of the heads of a group) by TILE keys. Keys and values go straight
 * from global memory to the registers that are its operands, with loads of 16 bytes: a sum over channels may be taken
 * in any order, and output channels may be numbered in any order. With lane (g, s) = (lane / 4, lane % 4):
 *   scores[query, key] = q k^T: the lane has channels 32 i + 8 s to + 7 of query g, and of keys g and g + 8;
 *   out^T[channel, query] = v^T p^T: the lane has channels 64 i + 8 g to + 7 of keys 2 s, 2 s + 1, 2 s + 8, 2 s + 9,
 *   and pairs up the elements of two keys. The scores that a lane computes are the weights that it needs then. */
enum { TILE = 16, ROWS = 8 };

/* Loads 16 bytes, bypassing L1: no key is read twice by a multiprocessor. */
__device__ static inline uint4 load_once(const void *from, bool there) {
    uint4 word = {};
    if (there)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                     : "l"(from));
    return word;
}

/* The lane's parts of the keys and values of a tile; `from` is its place in row 0 of the tile. Zeros where fewer than
 * `count` keys are left. */
template <int KS, class E>
__device__ static inline void load_keys(uint4 (&k)[2][KS], const E *from, int stride, int count) {
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < KS; i++) k[j][i] = load_once(from + 8 * j * stride + 32 * i, g + 8 * j < count);
}
template <int VS, class E>
__device__ static inline void load_values(uint4 (&v)[4][VS], const E *from, int stride, int count) {
    int s = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int key = j % 2 + j / 2 * 8;
#pragma unroll
        for (int i = 0; i < VS; i++) v[j][i] = load_once(from + key * stride + 64 * i, 2 * s + key < count);
    }
}

/* weights[8 j + e] of query g: of keys 8 j + 2 s + e of the tile. The softmax so far, `max` and this lane's part of
 * `sum`, is updated; returns the factor for the sums of earlier keys. */
template <class E, int KS>
__device__ static inline float weigh_keys(float (&weights)[2][2], float &max, float &sum, const uint4 (&q)[KS][32],
                                          const uint4 (&k)[2][KS], float scale, int first, int end) {
    float scores[2][4] = {}, largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < KS; i++) {
        const uint4 part = q[i][threadIdx.x % 32];
        const uint32_t front[4] = {part.x, 0, part.y, 0}, back[4] = {part.z, 0, part.w, 0};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            mt_mma_of<E>(scores[j], front, k[j][i].x, k[j][i].y);
            mt_mma_of<E>(scores[j], back, k[j][i].z, k[j][i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int key = i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2;
        float &score = scores[i / 2][i % 2];
        score = key < first || key >= end ? -INFINITY : score * scale;
        largest = mt_maximum(largest, score);
    }
    for (int bit = 1; bit < 4; bit *= 2) largest = mt_maximum(largest, __shfl_xor_sync(0xffffffff, largest, bit));
    largest = mt_maximum(max, largest);
    float shrink = weight_of(max, largest);
    max = largest, sum *= shrink;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += weights[i / 2][i % 2] = weight_of(scores[i / 2][i % 2], max);
    return shrink;
}

/* out[i][j][e + 2 c]: channel 64 i + 8 g + 2 j + c of query 2 s + e. */
template <class E, int VS>
__device__ static inline void add_values(float (&out)[VS][4][4], const float (&weights)[2][2], float shrink,
                                         const uint4 (&v)[4][VS]) {
    if (__any_sync(0xffffffff, shrink != 1)) {
        float shrinks[2];
        for (int e = 0; e < 2; e++) shrinks[e] = __shfl_sync(0xffffffff, shrink, (2 * (threadIdx.x % 4) + e) * 4);
#pragma unroll
        for (int i = 0; i < VS * 16; i++) out[i / 16][i / 4 % 4][i % 4] *= shrinks[i % 2];
    }
    uint32_t low = mt_pair_from_float(E(), weights[0][0], weights[0][1]);
    uint32_t high = mt_pair_from_float(E(), weights[1][0], weights[1][1]);
#pragma unroll
    for (int i = 0; i < VS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t pairs[4], keys[4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                keys[n] = j == 0 ? v[n][i].x : j == 1 ? v[n][i].y : j == 2 ? v[n][i].z : v[n][i].w;
#pragma unroll
            for (int n = 0; n < 4; n++) // the even channel of keys 0 and 1, the odd one, and the same of keys 2 and 3
                pairs[n] = __byte_perm(keys[n / 2 * 2], keys[n / 2 * 2 + 1], n % 2 ? 0x7632 : 0x5410);
            mt_mma_of<E>(out[i][j], pairs, low, high);
        }
}

/* As split_keys, with M = ROWS. KS: channels of a key / 32; VS: of a value / 64. `joins`: the splits of a span are a
 * cluster, which writes the results. A warp has one tile on its way; the multiprocessor's others hide the latency. */
template <class E, int KS, int VS, bool joins>
__global__ void __launch_bounds__(32 * WARPS, KS > 4 ? 3 : 4) split_keys_mma(split_task task) {
    const mt_attention &a = task.shape;
    __shared__ uint4 q[KS][32];
    __shared__ warp_parts<ROWS, VS * 64> parts;
    __shared__ block_task task_of_block;
    mt_begin_next();
    const block_task t = find_block(task, ROWS);
    if (t.first_row >= t.rows || (!joins && t.begin >= t.end)) { // all blocks of a cluster, or none
        mt_wait_for_previous();
        return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, s = lane % 4;
    int row = min(t.first_row + g, t.rows - 1), query = row / t.per_group,
        head = t.group * t.per_group + row % t.per_group;
    int first = max(t.begin, query - t.seen.behind), end = min(t.end, query + t.seen.ahead + 1);
    const E *q_row = (const E *)a.q + (t.span.q_start + query) * a.q_stride + head * a.head_size + 8 * s;
    int k_stride = (int)a.k_stride, v_stride = (int)a.v_stride;
    const E *keys = (const E *)a.k + t.group * a.head_size + g * k_stride + 8 * s;
    const E *values = (const E *)a.v + t.group * a.value_size + 2 * s * v_stride + 8 * g;
    float out[VS][4][4] = {}, max = -INFINITY, sum = 0;
    int tile = t.begin < t.end ? t.begin / TILE * TILE + warp * TILE : t.end;
    mt_wait_for_previous();
    for (int i = warp; i < KS; i += WARPS) q[i][lane] = *(const uint4 *)(q_row + 32 * i);
    if (threadIdx.x == 0) task_of_block = t; // for the end, where registers are free again
    __syncthreads();

#pragma unroll 1
    for (; tile < t.end; tile += WARPS * TILE) {
        uint4 k[2][KS], v[4][VS];
        float weights[2][2];
        int at = (int)mt_key_row(a.pages, t.span.k_start + tile);
        load_keys(k, keys + (int64_t)at * k_stride, k_stride, t.end - tile);
        load_values(v, values + (int64_t)at * v_stride, v_stride, t.end - tile);
        float shrink = weigh_keys<E>(weights, max, sum, q, k, a.scale * 1.44269504f, first - tile, end - tile);
        add_values<E>(out, weights, shrink, v);
    }
    for (int bit = 1; bit < 4; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    if (s == 0) parts.max[warp][g] = max, parts.sum[warp][g] = sum;
#pragma unroll
    for (int i = 0; i < VS * 16; i++)
        parts.values[warp][2 * s + i % 2][i / 16 * 64 + 8 * g + i / 4 % 4 * 2 + i % 4 / 2] =
            out[i / 16][i / 4 % 4][i % 4];
    if (joins)
        join_cluster<E>(task, task_of_block, parts);
    else
        leave(task, task_of_block, parts);
}

/* out and lse of a query and head, merged from its splits. Grid: (query and head, span). */
template <class E> __global__ void __launch_bounds__(32 * JOINING_WARPS) join_splits(split_task task) {
    const mt_attention &s = task.shape;
    mt_begin_next();
    const mt_span span = task.spans[blockIdx.y];
    const band b = band_of(span, s.window);
    const cut c = cut_of(b, task.max_splits);
    mt_wait_for_previous();
    int heads = (int)s.num_heads, Dv = (int)s.value_size, i = blockIdx.x / heads, head = blockIdx.x % heads;
    if (i >= b.q_len) return;
    int splits = (max(c.end - c.first, 0) + c.keys - 1) / c.keys, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t from = row_of(task, blockIdx.y, i, head), query = span.q_start + i;
    const float2 *maxima = task.maxima + from;
    float max = -INFINITY, total = 0;
    for (int p = lane; p < splits; p += 32) max = mt_maximum(max, maxima[p].x);
    max = mt_warp_max(max);
    for (int p = lane; p < splits; p += 32) total += weight_of(maxima[p].x, max) * maxima[p].y;
    total = mt_warp_sum(total);

    __shared__ float of_warp[JOINING_WARPS][MAX_CHANNELS];
    for (int channel = lane * 4; channel < Dv; channel += 128) {
        mt_pack<float, 4> sum = {};
#pragma unroll 4
        for (int p = warp; p < splits; p += JOINING_WARPS) {
            mt_pack<float, 4> values = mt_load<4>(task.sums + (from + p) * Dv + channel);
            float weight = weight_of(maxima[p].x, max);
            for (int j = 0; j < 4; j++) sum.value[j] += weight * values.value[j];
        }
        for (int j = 0; j < 4; j++) of_warp[warp][channel + j] = sum.value[j];
    }
    __syncthreads();
    int channel = threadIdx.x;
    if (channel >= Dv) return;
    float sum = 0;
    for (int w = 0; w < JOINING_WARPS; w++) sum += of_warp[w][channel];
    finish<E>(task, query, head, channel, sum, max, total);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <class E, int W, int P> static void launch_split(const split_task &task, dim3 grid, cudaStream_t stream) {
    int64_t rows = task.max_queries * (task.shape.num_heads / task.shape.num_groups);
    int M = rows == 1 ? 1 : rows <= 4 ? 4 : 8;
    auto kernel = M == 1 ? split_keys<E, W, P, 1> : M == 4 ? split_keys<E, W, P, 4> : split_keys<E, W, P, 8>;
    grid.y = (unsigned)(task.shape.num_groups * mt_divide_up(rows, M));
    mt_launch_early(kernel, grid, 32 * WARPS, 0, stream, task);
}

template <class E> static void launch_join(const split_task &task, dim3 grid, cudaStream_t stream) {
    dim3 joins((unsigned)(task.max_queries * task.shape.num_heads), grid.z);
    mt_launch_early(join_splits<E>, joins, 32 * JOINING_WARPS, 0, stream, task);
}

typedef void split_kernel(split_task);

/* The kernel on tensor cores for this shape; NULL: there is none. */
template <class E> static split_kernel *kernel_mma(const mt_attention *a, bool joins) {
    if (!pages_serve(a, TILE)) return NULL;
    int64_t D = a->head_size, Dv = a->value_size;
    if (D == 64 && Dv == 64) return joins ? split_keys_mma<E, 2, 1, true> : split_keys_mma<E, 2, 1, false>;
    if (D == 128 && Dv == 128) return joins ? split_keys_mma<E, 4, 2, true> : split_keys_mma<E, 4, 2, false>;
    if (D == 192 && Dv == 128) return joins ? split_keys_mma<E, 6, 2, true> : split_keys_mma<E, 6, 2, false>;
    return NULL;
}

/* Enqueues the kernel on tensor cores; false: another one must do it. */
template <class E> static bool launch_mma(const split_task &task, dim3 grid, cudaStream_t stream, bool joins) {
    split_kernel *kernel = kernel_mma<E>(&task.shape, joins);
    if (!kernel) return false;
    int64_t rows = task.max_queries * (task.shape.num_heads / task.shape.num_groups);
    grid.y = (unsigned)(task.shape.num_groups * mt_divide_up(rows, ROWS));
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = 32 * WARPS, config.stream = stream;
    mt_cuda_launch_early(&config, attributes);
    config.attrs = attributes;
    if (joins) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {grid.x, 1, 1};
    }
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, task));
    return true;
}

template <class E> static void launch(const split_task &task, dim3 grid, cudaStream_t stream) {
    if constexpr (sizeof(E) == 2) {
        bool joins = grid.x <= MAX_CLUSTER && mt_cuda_kernel_arch() >= 90;
        if (launch_mma<E>(task, grid, stream, joins)) {
            if (!joins) launch_join<E>(task, grid, stream);
            return;
        }
    }
    int64_t wider = task.shape.head_size > task.shape.value_size ? task.shape.head_size : task.shape.value_size;
    int64_t packs = wider * (int64_t)sizeof(E) / 16;
    auto split = packs <= 8    ? launch_split<E, 8, 1>
                 : packs <= 16 ? launch_split<E, 16, 1>
                 : packs <= 32 ? launch_split<E, 32, 1>
                               : launch_split<E, 32, MAX_CHANNELS * sizeof(E) / 16 / 32>;
    split(task, grid, stream);
    launch_join<E>(task, grid, stream);
}

/* Requires rows that allow 16-byte loads, no dropout and no biases. */
static bool operands_serve(const mt_attention *a, mt_dtype dtype) {
    for (int64_t size : {a->head_size, a->value_size})
        if (size <= 0 || size > MAX_CHANNELS || size % 8 != 0) return false;
    return a->dropout.p <= 0 && !a->bias.w &&
           mt_wide(dtype, {a->q, a->k, a->v}, {a->q_stride, a->k_stride, a->v_stride});
}

extern "C" bool mt_attention_split_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    const mt_spans *spans = &a->spans;
    int64_t queries = 0, keys = 0;
    for (int64_t i = 0; i < spans->count; i++) {
        if (spans->host[i].q_len > queries) queries = spans->host[i].q_len;
        if (spans->host[i].k_len > keys) keys = spans->host[i].k_len;
    }
    if (queries < 1 || queries > MAX_QUERIES || spans->count > 65535 || !stream || !operands_serve(a, dtype))
        return false;
    int64_t rows = spans->count * queries * a->num_heads, row_bytes = (a->value_size + 2) * (int64_t)sizeof(float);
    int64_t splits = stream->workspace_bytes / (rows * row_bytes);
    if (splits > MAX_SPLITS) splits = MAX_SPLITS;
    if (splits < 1) return false;
    int64_t enough = mt_divide_up(ENOUGH_BLOCKS, spans->count * a->num_groups);
    if (splits > enough) splits = enough;
    split_task task = {a->q, a->k, a->v, a->out, a->lse, spans->device};
    task.sums = (float *)mt_cuda_workspace(stream, splits * rows * row_bytes);
    task.maxima = (float2 *)(task.sums + splits * rows * a->value_size);
    task.max_queries = (int)queries, task.max_splits = (int)splits, task.shape = *a;
    int64_t used = mt_divide_up(keys, LEAST_KEYS);
    dim3 grid((unsigned)(used < 1 ? 1 : used < splits ? used : splits), 1, (unsigned)spans->count);
    MT_CUDA_DISPATCH(dtype, launch, task, grid, stream->stream);
    return true;
}

extern "C" bool mt_attention_split_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)dtype, (void)stream; // decoding has no backward
    return false;
}
