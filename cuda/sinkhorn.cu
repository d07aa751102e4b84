/* sinkhorn.cu: Sinkhorn routing. The iteration balances all tokens and experts at once. One block computes the factors
 * of the experts, so that the device decides the number of rounds. Each round reads the logits twice, from the L2
 * cache. */
#include "cuda.h"

static constexpr int threads = 1024, warps = threads / 32;
static_assert((MT_CUDA_SINKHORN_EXPERTS + threads) * 8 <= 40 * 1024);
static constexpr uint32_t all_lanes = 0xffffffff;

__device__ static inline double warp_sum(double x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(all_lanes, x, lane);
    return x;
}

/* The maximum of a token's logits, or NaN if one of them is not finite; every lane receives it. */
__device__ static inline float row_maximum(const float *x, int E) {
    float max = -INFINITY;
    bool finite = true;
    for (int e = threadIdx.x % 32; e < E; e += 32) {
        max = fmaxf(max, x[e]);
        finite &= isfinite(x[e]) != 0;
    }
    max = mt_warp_max(max);
    return __all_sync(all_lanes, finite) ? max : NAN;
}

/* weight[t] = the factor that makes the sum of token t's row 1 / tokens. One warp per row. */
__device__ static inline void scale_rows(double *weight, const double *scale, const float *row_max, int tokens,
                                         const float *logits, int64_t T, int E) {
    for (int64_t t = threadIdx.x / 32; t < T; t += warps) {
        float max = row_max[t];
        double sum = 0;
        for (int e = threadIdx.x % 32; e < E && !isnan(max); e += 32)
            sum += scale[e] * (double)expf(logits[t * E + e] - max);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) weight[t] = isnan(max) ? 0 : 1 / (tokens * (sum + 1e-8 * exp(-(double)max)));
    }
    __syncthreads();
}

/* scale[e] = the factor that makes the sum of expert e's column 1 / E. A thread sums a slice of a column; `parts` holds
 * one number per thread. Returns the sum of |change| over the columns of this thread. */
__device__ static inline double scale_columns(double *scale, double *parts, const double *weight, const float *row_max,
                                              const float *logits, int64_t T, int E) {
    int width = min((E + 31) / 32 * 32, threads), slices = threads / width, slice = threadIdx.x / width;
    double change = 0;
    for (int first = 0; first < E; first += width) {
        int e = first + threadIdx.x % width;
        double sum = 0;
        for (int64_t t = slice; t < T && slice < slices && e < E; t += slices)
            if (!isnan(row_max[t])) sum += weight[t] * (double)expf(logits[t * E + e] - row_max[t]);
        parts[threadIdx.x] = sum;
        __syncthreads();
        if (slice == 0 && e < E) {
            for (int s = 1; s < slices; s++) sum += parts[s * width + threadIdx.x];
            double next = 1 / (E * (sum + 1e-8));
            change += fabs(next - scale[e]);
            scale[e] = next;
        }
        __syncthreads();
    }
    return change;
}

/* One block. Writes scale[E]. weight[T] is scratch; row_max[T] is used again by `choose`. */
__global__ void __launch_bounds__(threads) sinkhorn(double *scale, double *weight, float *row_max, const float *logits,
                                                    const int64_t *token_index, int64_t T, int E) {
    extern __shared__ double factors[]; // [E]
    __shared__ double parts[threads], mean;
    __shared__ int tokens;
    if (threadIdx.x == 0) tokens = 0;
    for (int e = threadIdx.x; e < E; e += threads) factors[e] = 1;
    __syncthreads();
    for (int64_t t = threadIdx.x / 32; t < T; t += warps) {
        float max = mt_is_padding(token_index, t) ? NAN : row_maximum(logits + t * E, E);
        if (threadIdx.x % 32 == 0) row_max[t] = max;
        if (threadIdx.x % 32 == 0 && !isnan(max)) atomicAdd(&tokens, 1);
    }
    __syncthreads();
    for (int round = 0; round < MT_SINKHORN_ROUNDS && tokens > 0; round++) {
        scale_rows(weight, factors, row_max, tokens, logits, T, E);
        parts[threadIdx.x] = scale_columns(factors, parts, weight, row_max, logits, T, E);
        __syncthreads();
        if (threadIdx.x < 32) {
            double sum = 0;
            for (int i = threadIdx.x; i < threads; i += 32) sum += parts[i];
            sum = warp_sum(sum);
            if (threadIdx.x == 0) mean = sum / E;
        }
        __syncthreads();
        if (mean <= 1e-4) break;
    }
    for (int e = threadIdx.x; e < E; e += threads) scale[e] = factors[e];
}

/* Finds the expert that follows (value, expert) in the order by descending scaled exponential, then ascending
 * index. */
__device__ static inline void next_after(double *value, int *expert, const float *x, const double *scale, float max,
                                         int E) {
    double best = -1;
    int index = E;
    for (int e = threadIdx.x % 32; e < E; e += 32) {
        double key = scale[e] * (double)expf(x[e] - max);
        bool after = key < *value || (key == *value && e > *expert);
        if (after && key > best) best = key, index = e;
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        double other = __shfl_xor_sync(all_lanes, best, lane);
        int other_index = __shfl_xor_sync(all_lanes, index, lane);
        if (other > best || (other == best && other_index < index)) best = other, index = other_index;
    }
    *value = best, *expert = index;
}

/* One warp per token; the arrays begin at the first token. */
__global__ void choose(float *probs, int32_t *experts, int32_t *invalid, const float *logits, const double *scale,
                       const float *row_max, const int64_t *token_index, int64_t count, int E, int k, bool sigmoid,
                       float scaling) {
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32, expert = -1;
    if (t >= count) return;
    if (mt_is_padding(token_index, t)) {
        if (lane < k) probs[t * k + lane] = 0, experts[t * k + lane] = -1;
        return;
    }
    const float *x = logits + t * E;
    float max = row_max[t], sum = 0;
    double value = INFINITY;
    for (int e = lane; e < E; e += 32) sum += expf(x[e] - max);
    sum = mt_warp_sum(sum);
    if (isnan(max) && lane == 0) atomicAdd(invalid, 1);
    for (int j = 0; j < k; j++) {
        if (isnan(max))
            expert = j;
        else
            next_after(&value, &expert, x, scale, max, E);
        if (lane != 0) continue;
        float prob = sigmoid ? 1 / (1 + expf(-x[expert])) : expf(x[expert] - max) / sum;
        experts[t * k + j] = expert;
        probs[t * k + j] = isnan(max) ? NAN : prob * scaling;
    }
}

extern "C" void mt_cuda_route_sinkhorn(const mt_route_args *a, mt_stream *stream) {
    const mt_router *router = a->router;
    int64_t T = a->T, E = router->num_experts;
    MT_CHECK(router->score ? router->topk == 1 : router->pre_softmax);
    if (T == 0 || a->count == 0) return;
    // `factors` and `parts` fit in the default 48 KiB of shared memory, with a margin for the rest.
    MT_CHECK(E <= MT_CUDA_SINKHORN_EXPERTS);
    double *scale = (double *)mt_cuda_workspace(stream, (E + T) * 8 + T * 4), *weight = scale + E;
    float *row_max = (float *)(weight + T);
    cudaStream_t on = mt_cuda_stream(stream);
    sinkhorn<<<1, threads, (size_t)(E * 8), on>>>(scale, weight, row_max, a->logits, a->token_index, T, (int)E);
    MT_CUDA_LAUNCHED();
    choose<<<(unsigned)mt_divide_up(a->count, 8), 256, 0, on>>>(
        a->probs, a->experts, a->invalid, a->logits + a->first * E, scale, row_max + a->first,
        a->token_index ? a->token_index + a->first : NULL, a->count, (int)E, (int)router->topk,
        router->score == MT_SCORE_SIGMOID, router->scaling);
    MT_CUDA_LAUNCHED();
}
