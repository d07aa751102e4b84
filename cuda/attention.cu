/* attention.cu: attention over spans: the definition, and the choice of an implementation.
 *
 * The implementations form a ladder. The first rung is the definition: one warp per query and head loops over the keys
 * with an online softmax (Milakov & Gimelshein, "Online normalizer calculation for softmax"). It serves every type,
 * head size and span, and the other rungs are tested against it: attention_mma.cu is the next, which has dropout too,
 * attention_hopper.cu the one after. */
#include "attention.cuh"

/* ---- definition -------------------------------------------------------------------------------------------------- */

/* CHANNELS: channels of a head per lane. */
enum { WARPS = 4, MAX_CHANNELS = MT_CUDA_HEAD_CHANNELS, CHANNELS = MAX_CHANNELS / 32 };

/* The channels of a head, distributed over the lanes of a warp: lane l holds channels l, l + 32, ... */
template <class E> __device__ static void load_head(float x[CHANNELS], const E *row, int64_t size, int lane) {
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) x[i] = lane + 32 * i < size ? mt_to_float(row[lane + 32 * i]) : 0;
}

template <class E> __device__ static void store_head(E *row, const float x[CHANNELS], int64_t size, int lane) {
#pragma unroll
    for (int i = 0; i < CHANNELS; i++)
        if (lane + 32 * i < size) row[lane + 32 * i] = mt_from_float<E>(x[i]);
}

__device__ static float dot(const float a[CHANNELS], const float b[CHANNELS]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) sum += a[i] * b[i];
    return mt_warp_sum(sum);
}

/* The range [first, end) of keys that row i of a span's queries attends to. */
struct key_range {
    int64_t first, end;
};

__device__ static key_range visible_keys(const mt_span &span, int64_t i, int64_t window) {
    int64_t last = i + span.k_len - span.q_len;
    key_range range = {0, span.causal ? min(last + 1, span.k_len) : span.k_len};
    if (window > 0) range.first = max(range.first, last - window + 1);
    return range;
}

/* The distance of key j from query i, by which biases are chosen. */
__device__ static int distance(const mt_span &span, int64_t i, int64_t j) {
    return (int)(j - (i + span.k_len - span.q_len));
}

/* The dropout factor of the probability of (query, key): 0 or 1 / (1 - p). The same random numbers as on the CPU. */
__device__ static float dropout_factor(const mt_attention &shape, int64_t head, int64_t query, int64_t key) {
    if (shape.dropout.p <= 0) return 1;
    int64_t k = shape.k_index[key];
    uint4 words = mt_cuda_philox(shape.dropout.key, shape.q_index[query],
                                 (uint64_t)(shape.first_head + head) << 48 | (uint64_t)k >> 2);
    uint32_t word = (k & 3) == 0 ? words.x : (k & 3) == 1 ? words.y : (k & 3) == 2 ? words.z : words.w;
    mt_masks masks = mt_dropout_masks(&shape.dropout);
    return word >= masks.threshold ? masks.kept : 0;
}

/* Variants of the kernels: over all visible keys, over the selected ones, or over all with biases by distance. */
enum variant { PLAIN, SELECTS, BIASED };

/* Operands of the variants; zero for others. */
struct variant_operands {
    mt_selection selection;
    distance_buckets buckets;
    float *dbias; // [blocks, WARPS, H, BUCKETS] parts of the gradient of the biases; NULL: not wanted
};

/* The bias of a distance from its bucket; 0 without biases. */
template <class E, variant V> __device__ static float bias_of(const mt_attention &shape, int64_t head, int bucket) {
    if constexpr (V == BIASED) return mt_to_float(((const E *)shape.bias.w)[bucket * shape.num_heads + head]);
    return 0;
}

template <class E, variant V> __global__ void naive_forward(mt_attention shape, const variant_operands of) {
    const E *q = (const E *)shape.q, *k = (const E *)shape.k, *v = (const E *)shape.v;
    const mt_span span = shape.spans.device[blockIdx.x];
    int lane = threadIdx.x;
    int64_t head = blockIdx.y, group = head / (shape.num_heads / shape.num_groups);
    for (int64_t i = blockIdx.z * WARPS + threadIdx.y; i < span.q_len; i += gridDim.z * WARPS) {
        int64_t query = span.q_start + i;
        float q_row[CHANNELS], sum[CHANNELS] = {0}, largest = -INFINITY, total = 0;
        load_head(q_row, q + query * shape.q_stride + head * shape.head_size, shape.head_size, lane);
        key_range keys = visible_keys(span, i, shape.window);
        const int32_t *selected = of.selection.selected + query * of.selection.topk;
        if constexpr (V == SELECTS) keys.end = max(min(keys.end, of.selection.topk), (int64_t)0);
        for (int64_t n = keys.first; n < keys.end; n++) {
            int64_t j = V == SELECTS ? selected[n] : n, key = mt_key_row(shape.pages, span.k_start + j);
            float row[CHANNELS];
            load_head(row, k + key * shape.k_stride + group * shape.head_size, shape.head_size, lane);
            int bucket = V == BIASED ? bucket_of_warp(of.buckets, distance(span, i, j)) : 0;
            float score = shape.scale * dot(q_row, row) + bias_of<E, V>(shape, head, bucket);
            float higher = mt_maximum(largest, score);
            float shrink = expf(largest - higher), weight = expf(score - higher);
            total = total * shrink + weight;
            weight *= dropout_factor(shape, head, query, key);
            load_head(row, v + key * shape.v_stride + group * shape.value_size, shape.value_size, lane);
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) sum[c] = sum[c] * shrink + weight * row[c];
            largest = higher;
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) sum[c] = total == 0 ? 0 : sum[c] / total; // 0: no key
        store_head((E *)shape.out + query * shape.out_stride + head * shape.value_size, sum, shape.value_size, lane);
        if (lane == 0) shape.lse[query * shape.num_heads + head] = total == 0 ? -INFINITY : largest + logf(total);
    }
}

/* The values of a pair of query and key; all gradients are computed from them. */
struct pair {
    float weight;     // the probability, after dropout
    float score_grad; // the gradient of the scaled score
};

__device__ static pair revisit(const float q[CHANNELS], const float k[CHANNELS], const float v[CHANNELS],
                               const float dout[CHANNELS], float bias, float lse, float row_dot,
                               const mt_attention &shape, int64_t head, int64_t query, int64_t key) {
    float probability = expf(shape.scale * dot(q, k) + bias - lse), factor = dropout_factor(shape, head, query, key);
    return {probability * factor, probability * (factor * dot(dout, v) - row_dot)};
}

/* row_dot = sum(out dout) and dq, for every query. A lane sums the gradients of the biases of buckets lane and lane +
 * 32 over all pairs of its warp. */
template <class E, variant V> __global__ void naive_backward_q(mt_attention shape, const variant_operands of) {
    const E *q = (const E *)shape.q, *k = (const E *)shape.k, *v = (const E *)shape.v;
    int lane = threadIdx.x;
    int64_t head = blockIdx.y, group = head / (shape.num_heads / shape.num_groups);
    float dbias[BUCKETS / 32] = {0};
    for (int64_t s = blockIdx.x; s < shape.spans.count; s += gridDim.x) {
        const mt_span span = shape.spans.device[s];
        for (int64_t i = blockIdx.z * WARPS + threadIdx.y; i < span.q_len; i += gridDim.z * WARPS) {
            int64_t query = span.q_start + i, row = query * shape.num_heads + head;
            int64_t out_at = query * shape.out_stride + head * shape.value_size;
            float q_row[CHANNELS], dout_row[CHANNELS], other[CHANNELS], value[CHANNELS], sum[CHANNELS] = {0};
            load_head(q_row, q + query * shape.q_stride + head * shape.head_size, shape.head_size, lane);
            load_head(dout_row, (const E *)shape.dout + out_at, shape.value_size, lane);
            load_head(other, (const E *)shape.out + out_at, shape.value_size, lane);
            float out_dot = dot(other, dout_row);
            if (lane == 0) shape.row_dot[row] = out_dot;
            key_range keys = visible_keys(span, i, shape.window);
            const int32_t *selected = of.selection.selected + query * of.selection.topk;
            if constexpr (V == SELECTS) keys.end = max(min(keys.end, of.selection.topk), (int64_t)0);
            for (int64_t n = keys.first; n < keys.end; n++) {
                int64_t j = V == SELECTS ? selected[n] : n, key = span.k_start + j;
                load_head(other, k + key * shape.k_stride + group * shape.head_size, shape.head_size, lane);
                load_head(value, v + key * shape.v_stride + group * shape.value_size, shape.value_size, lane);
                int bucket = V == BIASED ? bucket_of_warp(of.buckets, distance(span, i, j)) : 0;
                pair p = revisit(q_row, other, value, dout_row, bias_of<E, V>(shape, head, bucket), shape.lse[row],
                                 out_dot, shape, head, query, key);
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) sum[c] += shape.scale * p.score_grad * other[c];
                if constexpr (V == BIASED)
#pragma unroll
                    for (int b = 0; b < BUCKETS / 32; b++) dbias[b] += bucket == lane + 32 * b ? p.score_grad : 0;
            }
            store_head((E *)shape.dq + query * shape.q_stride + head * shape.head_size, sum, shape.head_size, lane);
        }
    }
    if (V != BIASED || !of.dbias) return;
    int64_t part = ((int64_t)blockIdx.x * gridDim.z + blockIdx.z) * WARPS + threadIdx.y;
#pragma unroll
    for (int b = 0; b < BUCKETS / 32; b++)
        of.dbias[(part * shape.num_heads + head) * BUCKETS + lane + 32 * b] = dbias[b];
}

/* dw[buckets, H] += the sums of `count` parts [H, BUCKETS]; a block has a head, and adds in a fixed order. */
enum { SUM_ROWS = 16 };
__global__ void add_dbias(float *dw, const float *parts, int64_t count, int buckets) {
    __shared__ float sums[SUM_ROWS][BUCKETS];
    int64_t head = blockIdx.x, heads = gridDim.x;
    int bucket = threadIdx.x, y = threadIdx.y;
    float sum = 0;
    for (int64_t part = y; part < count; part += SUM_ROWS) sum += parts[(part * heads + head) * BUCKETS + bucket];
    sums[y][bucket] = sum;
    __syncthreads();
    if (y > 0 || bucket >= buckets) return;
    for (int i = 1; i < SUM_ROWS; i++) sum += sums[i][bucket];
    dw[bucket * heads + head] += sum;
}

/* Adds to dk and dv of every key of spans [first, first + gridDim.x) the parts of all queries that attend to it. */
template <class E, variant V>
__global__ void naive_backward_kv(int64_t first, mt_attention shape, const variant_operands of) {
    const E *q = (const E *)shape.q, *k = (const E *)shape.k, *v = (const E *)shape.v, *dout = (const E *)shape.dout;
    const mt_span span = shape.spans.device[first + blockIdx.x];
    int lane = threadIdx.x;
    int64_t group = blockIdx.y, heads = shape.num_heads / shape.num_groups;
    for (int64_t j = blockIdx.z * WARPS + threadIdx.y; j < span.k_len; j += gridDim.z * WARPS) {
        int64_t key = span.k_start + j;
        float k_row[CHANNELS], v_row[CHANNELS], q_row[CHANNELS], dout_row[CHANNELS], dk_row[CHANNELS], dv_row[CHANNELS];
        E *dk_at = (E *)shape.dk + key * shape.k_stride + group * shape.head_size;
        E *dv_at = (E *)shape.dv + key * shape.v_stride + group * shape.value_size;
        load_head(k_row, k + key * shape.k_stride + group * shape.head_size, shape.head_size, lane);
        load_head(v_row, v + key * shape.v_stride + group * shape.value_size, shape.value_size, lane);
        load_head(dk_row, dk_at, shape.head_size, lane);
        load_head(dv_row, dv_at, shape.value_size, lane);
        for (int64_t i = 0; i < span.q_len; i++) {
            key_range keys = visible_keys(span, i, shape.window);
            if (j < keys.first || j >= keys.end) continue;
            int64_t query = span.q_start + i;
            if (V == SELECTS && !(of.selection.bits[query * of.selection.words + j / 64] >> j % 64 & 1)) continue;
            int bucket = V == BIASED ? bucket_of_warp(of.buckets, distance(span, i, j)) : 0;
            for (int64_t head = group * heads; head < (group + 1) * heads; head++) {
                int64_t row = query * shape.num_heads + head;
                load_head(q_row, q + query * shape.q_stride + head * shape.head_size, shape.head_size, lane);
                load_head(dout_row, dout + query * shape.out_stride + head * shape.value_size, shape.value_size, lane);
                pair p = revisit(q_row, k_row, v_row, dout_row, bias_of<E, V>(shape, head, bucket), shape.lse[row],
                                 shape.row_dot[row], shape, head, query, key);
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) {
                    dk_row[c] += shape.scale * p.score_grad * q_row[c];
                    dv_row[c] += p.weight * dout_row[c];
                }
            }
        }
        store_head(dk_at, dk_row, shape.head_size, lane);
        store_head(dv_at, dv_row, shape.value_size, lane);
    }
}

/* Zeroes the rows of the gradients of keys and values; later kernels add to them. */
template <class E> __global__ void zero_rows(E *x, const mt_span *spans, int64_t stride, int64_t width) {
    const mt_span span = spans[blockIdx.x];
    for (int64_t j = blockIdx.y; j < span.k_len; j += gridDim.y)
        for (int64_t c = threadIdx.x; c < width; c += blockDim.x)
            x[(span.k_start + j) * stride + c] = mt_from_float<E>(0);
}

template <class E> static void clear_keys(const mt_attention *a, cudaStream_t stream) {
    dim3 rows((unsigned)a->spans.count, 256);
    zero_rows<E><<<rows, 128, 0, stream>>>((E *)a->dk, a->spans.device, a->k_stride, a->num_groups * a->head_size);
    zero_rows<E><<<rows, 128, 0, stream>>>((E *)a->dv, a->spans.device, a->v_stride, a->num_groups * a->value_size);
    MT_CUDA_LAUNCHED();
}

void mt_attention_clear_keys(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, clear_keys, a, mt_cuda_stream(stream));
}

static dim3 naive_grid(const mt_spans *spans, int64_t count, int64_t heads, bool over_keys) {
    int64_t longest = 1;
    for (int64_t i = 0; i < spans->count; i++) {
        int64_t length = over_keys ? spans->host[i].k_len : spans->host[i].q_len;
        if (length > longest) longest = length;
    }
    int64_t blocks = mt_divide_up(longest, WARPS);
    return dim3((unsigned)count, (unsigned)heads, (unsigned)(blocks < 1024 ? blocks : 1024));
}

template <class E, variant V>
static void forward(const mt_attention *a, const variant_operands &of, cudaStream_t stream) {
    dim3 grid = naive_grid(&a->spans, a->spans.count, a->num_heads, false), block(32, WARPS);
    naive_forward<E, V><<<grid, block, 0, stream>>>(*a, of);
    MT_CUDA_LAUNCHED();
}

void mt_attention_add_dbias(const mt_attention *a, const float *parts, int64_t count, mt_stream *stream) {
    add_dbias<<<(unsigned)a->num_heads, dim3(BUCKETS, SUM_ROWS), 0, mt_cuda_stream(stream)>>>(a->bias.dw, parts, count,
                                                                                              (int)a->bias.buckets);
    MT_CUDA_LAUNCHED();
}

/* Blocks of a head that sum gradients of biases. */
enum { MAX_PARTS = 1024 };

template <class E, variant V> static void backward(const mt_attention *a, variant_operands of, mt_stream *on) {
    const mt_spans *spans = &a->spans;
    cudaStream_t stream = mt_cuda_stream(on);
    dim3 grid = naive_grid(spans, spans->count, a->num_heads, false), block(32, WARPS);
    bool learns = V == BIASED && a->bias.dw;
    if (learns) {
        int64_t bytes = a->num_heads * WARPS * BUCKETS * (int64_t)sizeof(float);
        int64_t room = on->workspace_bytes / bytes < MAX_PARTS ? on->workspace_bytes / bytes : MAX_PARTS;
        grid.x = (unsigned)(grid.x < room ? grid.x : room);
        grid.z = (unsigned)(grid.z < room / grid.x ? grid.z : room / grid.x);
        of.dbias = (float *)mt_cuda_workspace(on, (int64_t)grid.x * grid.z * bytes);
    }
    naive_backward_q<E, V><<<grid, block, 0, stream>>>(*a, of);
    MT_CUDA_LAUNCHED();
    if (learns) mt_attention_add_dbias(a, of.dbias, (int64_t)grid.x * grid.z * WARPS, on);
    clear_keys<E>(a, stream);
    int64_t together = spans_share_keys(spans) ? 1 : spans->count;
    for (int64_t first = 0; first < spans->count; first += together) {
        dim3 kv_grid = naive_grid(spans, together, a->num_groups, true);
        naive_backward_kv<E, V><<<kv_grid, block, 0, stream>>>(first, *a, of);
        MT_CUDA_LAUNCHED();
    }
}

template <class E> static void forward_all(const mt_attention *a, mt_stream *stream) {
    if (a->bias.w)
        forward<E, BIASED>(a, {.buckets = buckets_of(a)}, mt_cuda_stream(stream));
    else
        forward<E, PLAIN>(a, {}, mt_cuda_stream(stream));
}
template <class E> static void backward_all(const mt_attention *a, mt_stream *stream) {
    if (a->bias.w)
        backward<E, BIASED>(a, {.buckets = buckets_of(a)}, stream);
    else
        backward<E, PLAIN>(a, {}, stream);
}
template <class E> static void forward_selected(const mt_attention *a, const mt_selection *s, mt_stream *stream) {
    forward<E, SELECTS>(a, {.selection = *s}, mt_cuda_stream(stream));
}
template <class E> static void backward_selected(const mt_attention *a, const mt_selection *s, mt_stream *stream) {
    backward<E, SELECTS>(a, {.selection = *s}, stream);
}

static bool naive_serves(const mt_attention *a) {
    return a->head_size <= MAX_CHANNELS && a->value_size <= MAX_CHANNELS && (!a->bias.w || a->bias.buckets <= BUCKETS);
}

extern "C" bool mt_attention_naive_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (!naive_serves(a)) return false;
    MT_CUDA_DISPATCH(dtype, forward_all, a, stream);
    return true;
}

extern "C" bool mt_attention_naive_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (!naive_serves(a)) return false;
    MT_CUDA_DISPATCH(dtype, backward_all, a, stream);
    return true;
}

void mt_selected_naive_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    MT_CHECK(naive_serves(a));
    MT_CUDA_DISPATCH(dtype, forward_selected, a, s, stream);
}

void mt_selected_naive_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    MT_CHECK(naive_serves(a));
    MT_CUDA_DISPATCH(dtype, backward_selected, a, s, stream);
}

/* ---- the ladder and the operations ------------------------------------------------------------------------------- */

extern "C" const mt_attention_rung mt_attention_rungs[MT_NUM_ATTENTION_RUNGS] = {
    {"naive", mt_attention_naive_forward, mt_attention_naive_backward},
    {"mma", mt_attention_mma_forward, mt_attention_mma_backward},
    {"hopper", mt_attention_hopper_forward, mt_attention_hopper_backward},
    {"split", mt_attention_split_forward, mt_attention_split_backward},
};

/* The first rung to try: `unfused` selects the definition. */
static int top_rung(const mt_attention *a) {
    return a->backend == MT_ATTENTION_UNFUSED ? 0 : MT_NUM_ATTENTION_RUNGS - 1;
}

static bool climb_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    int rung = top_rung(a);
    while (rung >= 0 && !mt_attention_rungs[rung].forward(a, dtype, stream)) rung--;
    return rung >= 0;
}

static bool climb_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    int rung = top_rung(a);
    while (rung >= 0 && !mt_attention_rungs[rung].backward(a, dtype, stream)) rung--;
    return rung >= 0;
}

extern "C" void mt_cuda_attention_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans.count == 0) return;
    MT_CHECK(mt_attention_run(a, dtype, stream, false, climb_forward));
}

extern "C" void mt_cuda_attention_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans.count == 0) return;
    MT_CHECK(mt_attention_run(a, dtype, stream, true, climb_backward));
}
