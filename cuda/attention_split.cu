/* attention_split.cu: attention of few queries to many keys, as in decoding (Dao et al., "Flash-Decoding for
 * long-context inference").
 *
 * One query cannot fill a GPU, but its keys can. The keys are divided into splits. A block processes the queries of all
 * heads of a group over one split, so that keys and values are read once, and writes its partial softmax to the
 * workspace. A second kernel merges the splits of a head. The division of a span depends on the span as read on the
 * device and on the number of queries of the launch, never on the host's list, which only bounds the grid. Therefore a
 * graph captured with the longest spans gives the same bits for shorter ones. */
#include "attention.cuh"
#include "vector.cuh"

enum {
    WARPS = 4,
    JOINING_WARPS = 8,
    MAX_QUERIES = 8,
    MAX_SPLITS = 64,
    LEAST_KEYS = 64,
    MAX_CHANNELS = MT_CUDA_HEAD_CHANNELS
};

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
        float max = fmaxf(part.max[m], __shfl_xor_sync(0xffffffff, part.max[m], bit));
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
        for (int u = 0; u < U; u++) max = fmaxf(max, scores[u][m]);
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

/* Merges the warps of a block and writes the result to the workspace. */
template <int W, int M, int P, int N>
__device__ static inline void leave(const split_task &task, const block_task &t, const partial_softmax<M, P, N> &sums) {
    __shared__ float of_warp[WARPS][M][W * P * N], max_of_warp[WARPS][M], sum_of_warp[WARPS][M];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, Dv = (int)task.shape.value_size;
    if (lane < W)
#pragma unroll
        for (int m = 0; m < M; m++) {
            max_of_warp[warp][m] = sums.max[m], sum_of_warp[warp][m] = sums.sum[m];
#pragma unroll
            for (int i = 0; i < P * N; i++)
                of_warp[warp][m][(i / N * W + lane) * N + i % N] = sums.values[m][i / N][i % N];
        }
    __syncthreads();
    for (int m = 0; m < M && t.first_row + m < t.rows; m++) {
        int row = t.first_row + m, head = t.group * t.per_group + row % t.per_group;
        int64_t to = row_of(task, blockIdx.z, row / t.per_group, head) + blockIdx.x;
        float max = -INFINITY, total = 0, weights[WARPS];
        for (int w = 0; w < WARPS; w++) max = fmaxf(max, max_of_warp[w][m]);
        for (int w = 0; w < WARPS; w++) weights[w] = weight_of(max_of_warp[w][m], max);
        for (int channel = threadIdx.x; channel < Dv; channel += 32 * WARPS) {
            float sum = 0;
            for (int w = 0; w < WARPS; w++) sum += weights[w] * of_warp[w][m][channel];
            task.sums[to * Dv + channel] = sum;
        }
        for (int w = 0; w < WARPS; w++) total += weights[w] * sum_of_warp[w][m];
        if (threadIdx.x == 0) task.maxima[to] = make_float2(max, total);
    }
}

/* W lanes share a key, P packs each. Grid: (split, group and tile of its queries, span). Reads each key and value of
 * the split once. */
template <class E, int W, int P, int M> __global__ void __launch_bounds__(32 * WARPS) split_keys(split_task task) {
    constexpr int N = 16 / sizeof(E), together = WARPS * 32 / W, U = M * P > 4 ? 2 : 4;
    const mt_attention &s = task.shape;
    const block_task t = find_block(task, M);
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
    leave<W>(task, t, sums);
}

/* out and lse of a query and head, merged from its splits. Grid: (query and head, span). */
template <class E> __global__ void __launch_bounds__(32 * JOINING_WARPS) join_splits(split_task task) {
    const mt_attention &s = task.shape;
    const mt_span span = task.spans[blockIdx.y];
    const band b = band_of(span, s.window);
    const cut c = cut_of(b, task.max_splits);
    mt_begin_next();
    int heads = (int)s.num_heads, Dv = (int)s.value_size, i = blockIdx.x / heads, head = blockIdx.x % heads;
    if (i >= b.q_len) return;
    int splits = (max(c.end - c.first, 0) + c.keys - 1) / c.keys, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t from = row_of(task, blockIdx.y, i, head), query = span.q_start + i;
    const float2 *maxima = task.maxima + from;
    float max = -INFINITY, total = 0;
    for (int p = lane; p < splits; p += 32) max = fmaxf(max, maxima[p].x);
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
    if (channel < Dv) {
        float sum = 0;
        for (int w = 0; w < JOINING_WARPS; w++) sum += of_warp[w][channel];
        ((E *)task.out)[query * s.out_stride + head * Dv + channel] = mt_from_float<E>(total > 0 ? sum / total : 0);
    }
    if (threadIdx.x == 0) task.lse[query * heads + head] = total > 0 ? 0.693147181f * max + logf(total) : -INFINITY;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <class E, int W, int P> static void launch_split(const split_task &task, dim3 grid, cudaStream_t stream) {
    int64_t rows = task.max_queries * (task.shape.num_heads / task.shape.num_groups);
    int M = rows == 1 ? 1 : rows <= 4 ? 4 : 8;
    auto kernel = M == 1 ? split_keys<E, W, P, 1> : M == 4 ? split_keys<E, W, P, 4> : split_keys<E, W, P, 8>;
    grid.y = (unsigned)(task.shape.num_groups * mt_divide_up(rows, M));
    kernel<<<grid, 32 * WARPS, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
}

template <class E> static void launch(const split_task &task, dim3 grid, cudaStream_t stream) {
    int64_t wider = task.shape.head_size > task.shape.value_size ? task.shape.head_size : task.shape.value_size;
    int64_t packs = wider * (int64_t)sizeof(E) / 16;
    auto split = packs <= 8    ? launch_split<E, 8, 1>
                 : packs <= 16 ? launch_split<E, 16, 1>
                 : packs <= 32 ? launch_split<E, 32, 1>
                               : launch_split<E, 32, MAX_CHANNELS * sizeof(E) / 16 / 32>;
    split(task, grid, stream);
    dim3 joins((unsigned)(task.max_queries * task.shape.num_heads), grid.z);
    join_splits<E><<<joins, 32 * JOINING_WARPS, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
}

/* Requires rows that allow 16-byte loads, and no dropout. */
static bool operands_serve(const mt_attention *a, mt_dtype dtype) {
    for (int64_t size : {a->head_size, a->value_size})
        if (size <= 0 || size > MAX_CHANNELS || size % 8 != 0) return false;
    return a->dropout.p <= 0 && mt_wide(dtype, {a->q, a->k, a->v}, {a->q_stride, a->k_stride, a->v_stride});
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
