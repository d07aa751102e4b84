/* attention_merge.cu: merging of partial attention. Context parallelism attends to one block of keys after another.
 * These two kernels combine the results of the blocks in fp32: outputs by their log-sum-exp, gradients by addition. */
#include "vector.cuh"

enum { MERGE_WARPS = 8, MERGE_THREADS = 32 * MERGE_WARPS, MERGE_BLOCKS = 512 }; // MERGE_BLOCKS: maximum for one span

/* One warp per query and head. Reads part, reads and writes out: 10 bytes per element in bf16, 12 in fp32. */
template <class T, int N>
__global__ void __launch_bounds__(MERGE_THREADS) merge(float *out, float *lse, const T *part, const float *part_lse,
                                                       const mt_span *spans, int H, int Dv, bool first) {
    const mt_span span = spans[blockIdx.x];
    int lane = threadIdx.x % 32;
    int64_t step = (int64_t)gridDim.y * MERGE_WARPS, end = (span.q_start + span.q_len) * H;
    for (int64_t i = span.q_start * H + blockIdx.y * MERGE_WARPS + threadIdx.x / 32; i < end; i += step) {
        float before = first ? -INFINITY : lse[i], more = part_lse[i], top = mt_maximum(before, more);
        float total = first || top == -INFINITY ? more : top + log1pf(expf(mt_minimum(before, more) - top));
        float keep = total == -INFINITY ? 0 : expf(before - total);
        float add = first ? 1 : total == -INFINITY ? 0 : expf(more - total);
        for (int c = lane * N; c < Dv; c += 32 * N) {
            mt_pack<float, N> x = mt_to_float(mt_load<N>(part + i * Dv + c));
            mt_pack<float, N> sum = mt_load<N>((const float *)out + i * Dv + c, !first);
#pragma unroll
            for (int e = 0; e < N; e++) sum.value[e] = first ? x.value[e] : keep * sum.value[e] + add * x.value[e];
            mt_store(out + i * Dv + c, sum);
        }
        __syncwarp(); // all lanes have read lse
        if (lane == 0) lse[i] = total;
    }
}

/* The blocks divide the packs of a span's rows. Reads x, reads and writes sum: 10 bytes per element in bf16. */
template <class T, int N>
__global__ void __launch_bounds__(MERGE_THREADS)
    accumulate(float *sum, const T *x, const mt_span *spans, bool of_keys, int width, int64_t x_stride, bool first) {
    const mt_span span = spans[blockIdx.x];
    int64_t start = of_keys ? span.k_start : span.q_start, rows = of_keys ? span.k_len : span.q_len;
    int packs = width / N;
    int64_t step = (int64_t)gridDim.y * MERGE_THREADS;
    for (int64_t i = (int64_t)blockIdx.y * MERGE_THREADS + threadIdx.x; i < rows * packs; i += step) {
        int64_t row = start + i / packs;
        int c = (int)(i % packs) * N;
        float *to = sum + row * width + c;
        mt_pack<float, N> more = mt_to_float(mt_load<N>(x + row * x_stride + c));
        mt_pack<float, N> value = mt_load<N>((const float *)to, !first);
#pragma unroll
        for (int e = 0; e < N; e++) value.value[e] = (first ? 0 : value.value[e]) + more.value[e];
        mt_store(to, value);
    }
}

/* One warp per query and head. Reads and writes out: 4 bytes per element in bf16, 8 in fp32. */
template <class T, int N>
__global__ void __launch_bounds__(MERGE_THREADS) add_sink(const mt_sink_args a, const mt_span *spans) {
    const mt_span span = spans[blockIdx.x];
    int lane = threadIdx.x % 32;
    int64_t step = (int64_t)gridDim.y * MERGE_WARPS, end = (span.q_start + span.q_len) * a.H;
    for (int64_t i = span.q_start * a.H + blockIdx.y * MERGE_WARPS + threadIdx.x / 32; i < end; i += step) {
        int64_t h = i % a.H;
        float sink = a.sinks ? mt_to_float(mt_load<1>((const T *)a.sinks + h)).value[0] : 0, lse = a.lse[i];
        float top = mt_maximum(lse, sink), both = top + log1pf(expf(mt_minimum(lse, sink) - top));
        float factor = expf(lse - both);
        T *out = (T *)a.out + i / a.H * a.out_stride + h * a.Dv;
        for (int c = lane * N; c < a.Dv; c += 32 * N) {
            mt_pack<float, N> x = mt_to_float(mt_load<N>((const T *)out + c));
#pragma unroll
            for (int e = 0; e < N; e++) x.value[e] *= factor;
            mt_store(out + c, mt_from_float<T>(x));
        }
        __syncwarp(); // all lanes have read lse
        if (lane == 0) a.lse[i] = both;
    }
}

/* A block adds the queries of a head, in a fixed order. Reads out and dout: 4 bytes per element in bf16. */
template <class T, int N>
__global__ void __launch_bounds__(MERGE_THREADS) sum_sinks(const mt_sink_args a, const mt_span *spans, int64_t count) {
    __shared__ float sums[MERGE_WARPS];
    int64_t h = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sink = a.sinks ? mt_to_float(mt_load<1>((const T *)a.sinks + h)).value[0] : 0, sum = 0;
    for (int64_t s = 0; s < count; s++) {
        const mt_span span = spans[s];
        for (int64_t t = span.q_start + warp; t < span.q_start + span.q_len; t += MERGE_WARPS) {
            const T *out = (const T *)a.out + t * a.out_stride + h * a.Dv;
            const T *dout = (const T *)a.dout + t * a.out_stride + h * a.Dv;
            float dot = 0;
            for (int c = lane * N; c < a.Dv; c += 32 * N) {
                mt_pack<float, N> x = mt_to_float(mt_load<N>(out + c)), d = mt_to_float(mt_load<N>(dout + c));
#pragma unroll
                for (int e = 0; e < N; e++) dot += x.value[e] * d.value[e];
            }
            sum += expf(sink - a.lse[t * a.H + h]) * dot;
        }
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < MERGE_WARPS; w++) sum += sums[w];
    a.dsinks[h] -= sum;
}

/* The number of blocks for the span with the most work; a block processes `each` items at once. */
static dim3 grid_of(const mt_spans *spans, bool of_keys, int64_t work_a_row, int64_t each) {
    int64_t longest = 1;
    for (int64_t i = 0; i < spans->count; i++) {
        int64_t length = of_keys ? spans->host[i].k_len : spans->host[i].q_len;
        if (length > longest) longest = length;
    }
    int64_t blocks = mt_divide_up(longest * work_a_row, each);
    return dim3((unsigned)spans->count, (unsigned)(blocks < MERGE_BLOCKS ? blocks : MERGE_BLOCKS));
}

extern "C" void mt_cuda_attention_merge(const mt_merge_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count == 0) return;
    bool wide = mt_wide(dtype, {a->out, a->part}, {a->Dv});
    mt_by_type(dtype, wide, [&](auto type, auto pack) {
        using E = decltype(type);
        constexpr int N = decltype(pack)::value;
        merge<E, N><<<grid_of(a->spans, false, a->H, MERGE_WARPS), MERGE_THREADS, 0, mt_cuda_stream(stream)>>>(
            a->out, a->lse, (const E *)a->part, a->part_lse, a->spans->device, (int)a->H, (int)a->Dv, a->first);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_sink_forward(const mt_sink_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->out}, {a->Dv, a->out_stride}), [&](auto type, auto pack) {
        add_sink<decltype(type), decltype(pack)::value>
            <<<grid_of(a->spans, false, a->H, MERGE_WARPS), MERGE_THREADS, 0, mt_cuda_stream(stream)>>>(
                *a, a->spans->device);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_sink_backward(const mt_sink_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count == 0 || !a->dsinks) return;
    mt_by_type(dtype, mt_wide(dtype, {a->out, a->dout}, {a->Dv, a->out_stride}), [&](auto type, auto pack) {
        sum_sinks<decltype(type), decltype(pack)::value>
            <<<(unsigned)a->H, MERGE_THREADS, 0, mt_cuda_stream(stream)>>>(*a, a->spans->device, a->spans->count);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_accumulate_rows(const mt_accumulate_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count == 0) return;
    bool wide = mt_wide(dtype, {a->sum, a->x}, {a->width, a->x_stride});
    mt_by_type(dtype, wide, [&](auto type, auto pack) {
        using E = decltype(type);
        constexpr int N = decltype(pack)::value;
        dim3 grid = grid_of(a->spans, a->of_keys, mt_divide_up(a->width, N), 4 * MERGE_THREADS);
        accumulate<E, N><<<grid, MERGE_THREADS, 0, mt_cuda_stream(stream)>>>(
            a->sum, (const E *)a->x, a->spans->device, a->of_keys, (int)a->width, a->x_stride, a->first);
        MT_CUDA_LAUNCHED();
    });
}
