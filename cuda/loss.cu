/* loss.cu: cross-entropy. The forward reads the logits once; the backward reads them and writes the gradient once.
 * Logits are never stored in fp32. */
#include "vector.cuh"

#include <cfloat>

/* ---- forward: online softmax (Milakov & Gimelshein, "Online normalizer calculation for softmax") ----------------- */

static constexpr int forward_threads = 256, forward_packs = 4;

/* Over the logits seen so far: sum = sum exp(x - max), weighted = sum exp(x - max) x. */
struct softmax_sums {
    float max, sum, weighted;
};

__device__ static inline void raise_maximum(softmax_sums &sums, float max) {
    float factor = mt_exp(sums.max - max);
    sums = {max, sums.sum * factor, sums.weighted * factor};
}

template <bool entropy, class T, int N>
__device__ static inline void add_logits(softmax_sums &sums, const mt_pack<T, N> &logits, float scale) {
    mt_pack<float, N> x = mt_to_float(logits);
    float max = sums.max;
    for (int i = 0; i < N; i++) max = mt_maximum(max, x.value[i] *= scale);
    raise_maximum(sums, max);
    for (int i = 0; i < N; i++) {
        float e = mt_exp(x.value[i] - max);
        sums.sum += e;
        if (entropy) sums.weighted += e * fmaxf(x.value[i], -FLT_MAX); // avoids 0 * -inf = NaN
    }
}

/* One block per row. Reads each logit once: 2 bytes in bf16, 4 in fp32. */
template <class T, int N, bool entropy>
__global__ void __launch_bounds__(forward_threads) cross_entropy_forward(const mt_cross_entropy_args a) {
    constexpr int K = forward_packs;
    const T *row = (const T *)a.logits + blockIdx.x * a.stride;
    int count = (int)a.count, whole = count / N * N, step = blockDim.x * N;
    float scale = a.logit_scale > 0 ? a.logit_scale : 1;
    softmax_sums sums = {-FLT_MAX, 0, 0};
    for (int base = threadIdx.x * N; base < whole; base += K * step) {
        mt_pack<T, N> packs[K];
#pragma unroll
        for (int k = 0; k < K; k++)
            if (base + k * step < whole) packs[k] = mt_load<N>(row + base + k * step);
#pragma unroll
        for (int k = 0; k < K; k++)
            if (base + k * step < whole) add_logits<entropy>(sums, packs[k], scale);
    }
    if (whole + (int)threadIdx.x < count) add_logits<entropy>(sums, mt_load<1>(row + whole + threadIdx.x), scale);

    __shared__ float max_of_warp[32];
    float max = mt_warp_max(sums.max);
    if (threadIdx.x % 32 == 0) max_of_warp[threadIdx.x / 32] = max;
    __syncthreads();
    max = mt_warp_max(max_of_warp[threadIdx.x % 32 % (blockDim.x / 32)]);
    raise_maximum(sums, max);
    float totals[2] = {sums.sum, sums.weighted};
    mt_row_sum(totals, 0);
    if (threadIdx.x != 0) return;
    int64_t label = a.labels[blockIdx.x] - a.first;
    float *stats = a.stats + blockIdx.x;
    stats[0] = max;
    stats[a.T] = totals[0];
    stats[2 * a.T] = label >= 0 && label < count ? scale * mt_to_float(row[label]) : 0;
    if (entropy) stats[3 * a.T] = totals[1];
}

extern "C" void mt_cuda_cross_entropy_forward(const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->logits}, {a->stride}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        dim3 block = mt_reduction_block(mt_divide_up(a->count, N), forward_packs, 32, forward_threads);
        if (block.x < 32) block = dim3(32);
        auto kernel = a->entropy ? cross_entropy_forward<E, N, true> : cross_entropy_forward<E, N, false>;
        kernel<<<(unsigned)a->T, block.x, 0, mt_cuda_stream(stream)>>>(*a);
        MT_CUDA_LAUNCHED();
    });
}

/* Merges the results of n shares of the vocabulary. Reads three or four numbers per token and share, writes as many per
 * token. */
__global__ void cross_entropy_combine(const mt_cross_entropy_args a, const float *parts, int64_t n) {
    int64_t T = a.T, t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, part = (a.entropy ? 4 : 3) * T;
    if (t >= T) return;
    float max = -INFINITY, *stats = a.stats + t;
    double sum = 0, target = 0, weighted = 0;
    for (int64_t i = 0; i < n; i++) max = mt_maximum(max, parts[i * part + t]);
    for (int64_t i = 0; i < n; i++) {
        const float *share = parts + i * part + t;
        double scale = exp((double)share[0] - (double)max); // 0 for a share that holds no part of the vocabulary
        sum += scale * share[T];
        target += share[2 * T];
        if (a.entropy) weighted += scale * share[3 * T];
    }
    stats[0] = max;
    stats[T] = (float)sum;
    stats[2 * T] = (float)target;
    if (a.entropy) stats[3 * T] = (float)weighted;
}

extern "C" void mt_cuda_cross_entropy_combine(const mt_cross_entropy_args *a, const float *parts, int64_t n,
                                              mt_stream *stream) {
    if (a->T == 0) return;
    cross_entropy_combine<<<mt_grid_size(a->T, 128), 128, 0, mt_cuda_stream(stream)>>>(*a, parts, n);
    MT_CUDA_LAUNCHED();
}

/* Reads four numbers per token, writes three. */
__global__ void cross_entropy_loss(const mt_cross_entropy_args a) {
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= a.T) return;
    const float *stats = a.stats + t;
    double log_sum = (double)stats[0] + log((double)stats[a.T]);
    a.lse[t] = (float)log_sum;
    a.logp[t] = (float)(stats[2 * a.T] - log_sum);
    if (a.entropy) a.entropy[t] = (float)(log_sum - (double)stats[3 * a.T] / stats[a.T]);
}

extern "C" void mt_cuda_cross_entropy_loss(const mt_cross_entropy_args *a, mt_stream *stream) {
    if (a->T == 0) return;
    cross_entropy_loss<<<mt_grid_size(a->T, 128), 128, 0, mt_cuda_stream(stream)>>>(*a);
    MT_CUDA_LAUNCHED();
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static constexpr int backward_packs = 4;

/* With x = logit_scale * logits and p = exp(x - lse): dx = (onehot(label) - p) dlogp - p (x - lse + entropy) dentropy.
 * Reads and writes each logit: 4 bytes in bf16, 8 in fp32. */
template <class T, int N, bool ENTROPY>
__global__ void cross_entropy_backward(const mt_cross_entropy_args a, int blocks_per_row) {
    constexpr int K = backward_packs;
    int stride = (int)a.stride, count = (int)a.count;
    int64_t row = blockIdx.x / blocks_per_row, label = a.labels[row] - a.first;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    int target = label >= 0 && label < count ? (int)label : -1;
    const T *logits = (const T *)a.logits + row * stride;
    T *dlogits = (T *)a.dlogits + row * stride;
    mt_pack<T, N> packs[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        if (first + k * step < stride) packs[k] = mt_load<N>(logits + first + k * step);
    float logit_scale = a.logit_scale > 0 ? a.logit_scale : 1, loss_scale = a.loss_scale > 0 ? a.loss_scale : 1;
    float log_sum = a.lse[row], scale = -logit_scale * (a.dlogp[row] * loss_scale);
    float dh = ENTROPY ? logit_scale * (a.dentropy[row] * loss_scale) : 0, h = ENTROPY ? a.entropy[row] : 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        int c = first + k * step;
        if (c >= stride) break;
        mt_pack<float, N> out = mt_to_float(packs[k]);
        for (int i = 0; i < N; i++) {
            float log_p = logit_scale * out.value[i] - log_sum, p = mt_exp(log_p), d = p * scale;
            if (c + i == target) d -= scale;
            if (ENTROPY && p > 0) d -= dh * p * (log_p + h);
            out.value[i] = c + i < count ? d : 0;
        }
        mt_store(dlogits + c, mt_from_float<T>(out));
    }
}

extern "C" void mt_cuda_cross_entropy_backward(const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->dlogits, a->logits}, {a->stride}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_row_grid grid = mt_rows(mt_divide_up(a->stride, N), backward_packs);
        auto kernel = a->dentropy ? cross_entropy_backward<E, N, true> : cross_entropy_backward<E, N, false>;
        kernel<<<(unsigned)a->T * grid.blocks_per_row, grid.threads, 0, mt_cuda_stream(stream)>>>(*a,
                                                                                                  grid.blocks_per_row);
        MT_CUDA_LAUNCHED();
    });
}

/* ---- loss sums of the step --------------------------------------------------------------------------------------- */

/* One block. Thread i sums tokens i, i + blockDim.x, ...; each warp reduces its threads, then thread 0 adds the warps
 * in order. Reads two numbers per token, writes one. */
__global__ void __launch_bounds__(1024)
    nll_loss(double *sums, float *dlogp, const float *logp, const float *weights, int64_t T) {
    __shared__ double losses[32], totals[32];
    double loss_sum = 0, weight_sum = 0;
    for (int64_t t = threadIdx.x; t < T; t += blockDim.x) {
        loss_sum -= (double)logp[t] * weights[t];
        weight_sum += weights[t];
        dlogp[t] = -weights[t];
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        loss_sum += __shfl_xor_sync(0xffffffff, loss_sum, lane);
        weight_sum += __shfl_xor_sync(0xffffffff, weight_sum, lane);
    }
    if (threadIdx.x % 32 == 0) losses[threadIdx.x / 32] = loss_sum, totals[threadIdx.x / 32] = weight_sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < 32; warp++) loss_sum += losses[warp], weight_sum += totals[warp];
    sums[0] += loss_sum;
    sums[1] += weight_sum;
}

extern "C" void mt_cuda_nll_loss(double *sums, float *dlogp, const float *logp, const float *weights, int64_t T,
                                 mt_stream *stream) {
    nll_loss<<<1, 1024, 0, mt_cuda_stream(stream)>>>(sums, dlogp, logp, weights, T);
    MT_CUDA_LAUNCHED();
}
