/* sinkhorn.cu: the choice of experts by Sinkhorn's iteration, which is about all tokens at once. The factors of the
 * experts are found by one block, so that the number of rounds is decided on the device; a round reads the logits
 * twice, from the second level's cache. */
#include "cuda.h"

static constexpr int threads = 1024, warps = threads / 32;
static constexpr uint32_t all_lanes = 0xffffffff;

__device__ static inline double warp_sum(double x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(all_lanes, x, lane);
    return x;
}

/* A token's greatest logit, or NaN where they are not all finite; every lane gets it. */
__device__ static inline float greatest_of(const float *x, int E) {
    float max = -INFINITY;
    bool finite = true;
    for (int e = threadIdx.x % 32; e < E; e += 32) {
        max = fmaxf(max, x[e]);
        finite &= isfinite(x[e]) != 0;
    }
    max = mt_warp_max(max);
    return __all_sync(all_lanes, finite) ? max : NAN;
}

/* Factors that give every token's row the sum 1 / tokens: weight[T], one warp after another. */
__device__ static inline void scale_rows(double *weight, const double *scale, const float *greatest, int tokens,
                                         const float *logits, int64_t T, int E) {
    for (int64_t t = threadIdx.x / 32; t < T; t += warps) {
        float max = greatest[t];
        double sum = 0;
        for (int e = threadIdx.x % 32; e < E && !isnan(max); e += 32)
            sum += scale[e] * (double)expf(logits[t * E + e] - max);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) weight[t] = isnan(max) ? 0 : 1 / (tokens * (sum + 1e-8 * exp(-(double)max)));
    }
    __syncthreads();
}

/* Factors that give every expert's column the sum 1 / E: a thread adds up a slice of a column. Gives the sum of the
 * changes of this thread's. `parts` is of a number for each thread. */
__device__ static inline double scale_columns(double *scale, double *parts, const double *weight, const float *greatest,
                                              const float *logits, int64_t T, int E) {
    int width = min((E + 31) / 32 * 32, threads), slices = threads / width, slice = threadIdx.x / width;
    double change = 0;
    for (int first = 0; first < E; first += width) {
        int e = first + threadIdx.x % width;
        double sum = 0;
        for (int64_t t = slice; t < T && slice < slices && e < E; t += slices)
            if (!isnan(greatest[t])) sum += weight[t] * (double)expf(logits[t * E + e] - greatest[t]);
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

/* One block. scale[E] of all tokens; weight[T] and greatest[T] are scratch, the latter is used again. */
__global__ void __launch_bounds__(threads)
    sinkhorn(double *scale, double *weight, float *greatest, const float *logits, int64_t T, int E) {
    extern __shared__ double own[]; // [E]
    __shared__ double parts[threads], mean;
    __shared__ int tokens;
    if (threadIdx.x == 0) tokens = 0;
    for (int e = threadIdx.x; e < E; e += threads) own[e] = 1;
    __syncthreads();
    for (int64_t t = threadIdx.x / 32; t < T; t += warps) {
        float max = greatest_of(logits + t * E, E);
        if (threadIdx.x % 32 == 0) greatest[t] = max;
        if (threadIdx.x % 32 == 0 && !isnan(max)) atomicAdd(&tokens, 1);
    }
    __syncthreads();
    for (int round = 0; round < MT_SINKHORN_ROUNDS && tokens > 0; round++) {
        scale_rows(weight, own, greatest, tokens, logits, T, E);
        parts[threadIdx.x] = scale_columns(own, parts, weight, greatest, logits, T, E);
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
    for (int e = threadIdx.x; e < E; e += threads) scale[e] = own[e];
}

/* The expert of the greatest scaled exponential after the one of (value, expert), the lowest number among equals. */
__device__ static inline void next_after(double *value, int *expert, const float *x, const double *scale, float max,
                                         int E) {
    double best = -1;
    int number = E;
    for (int e = threadIdx.x % 32; e < E; e += 32) {
        double key = scale[e] * (double)expf(x[e] - max);
        bool after = key < *value || (key == *value && e > *expert);
        if (after && key > best) best = key, number = e;
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        double other = __shfl_xor_sync(all_lanes, best, lane);
        int other_number = __shfl_xor_sync(all_lanes, number, lane);
        if (other > best || (other == best && other_number < number)) best = other, number = other_number;
    }
    *value = best, *expert = number;
}

/* A warp has a token; the arrays are those of the first. */
__global__ void choose(float *probs, int32_t *experts, int32_t *invalid, const float *logits, const double *scale,
                       const float *greatest, int64_t count, int E, int k, bool sigmoid, float scaling) {
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32, expert = -1;
    if (t >= count) return;
    const float *x = logits + t * E;
    float max = greatest[t], sum = 0;
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

extern "C" void mt_cuda_route_sinkhorn(float *probs, int32_t *experts, int32_t *invalid, const float *logits, int64_t T,
                                       int64_t first, int64_t count, const mt_router *router, mt_stream *stream) {
    int64_t E = router->num_experts;
    MT_CHECK(router->sigmoid ? router->topk == 1 : router->pre_softmax);
    if (T == 0 || count == 0) return;
    MT_CHECK(E * 8 + threads * 8 <= 40 * 1024); // what a block has without asking, less the rest
    double *scale = (double *)mt_cuda_workspace(stream, (E + T) * 8 + T * 4), *weight = scale + E;
    float *greatest = (float *)(weight + T);
    cudaStream_t on = mt_cuda_stream(stream);
    sinkhorn<<<1, threads, (size_t)(E * 8), on>>>(scale, weight, greatest, logits, T, (int)E);
    MT_CUDA_LAUNCHED();
    choose<<<(unsigned)mt_divide_up(count, 8), 256, 0, on>>>(probs, experts, invalid, logits + first * E, scale,
                                                             greatest + first, count, (int)E, (int)router->topk,
                                                             router->sigmoid, router->scaling);
    MT_CUDA_LAUNCHED();
}
