/* moe.cu: mixture of experts except its matrix products: routing, auxiliary losses, dispatch order, combination of
 * rows, and activation. The host never waits for the router's decisions. Every sum has a fixed order, or is a sum of
 * integers, whose order does not matter; runs therefore repeat bit for bit. */
#include "vector.cuh"

#include <climits>
#include <cub/device/device_radix_sort.cuh>

/* ---- per-expert values of a token in a warp ---------------------------------------------------------------------- */

static constexpr uint32_t all_lanes = 0xffffffff;
static constexpr int64_t max_shared_bytes = 48 * 1024; // shared memory of a block without an opt-in
static_assert(MT_CUDA_EXPERTS * 4 <= max_shared_bytes && MT_CUDA_AUX_LOSS_EXPERTS * 16 <= max_shared_bytes);

/* mt_router in the form that kernels use. */
struct routing {
    int E, k;
    bool sigmoid, pre_softmax;
    int groups, group_topk, group_best;
    float scaling;
};

static routing routing_of(const mt_router *router) {
    MT_CHECK(router->topk <= MT_CUDA_ROUTER_TOPK && router->topk <= router->num_experts);
    int64_t best = router->group_best;
    if (router->num_groups > 0) {
        if (best == 0) best = router->topk / router->group_topk;
        best = min(best, router->num_experts / router->num_groups);
    }
    return {(int)router->num_experts, (int)router->topk,       router->sigmoid, router->pre_softmax,
            (int)router->num_groups,  (int)router->group_topk, (int)best,       router->scaling};
}

/* One value for each of a token's E experts, distributed over a warp: index v of lane l is expert 32 v + l. V > 0: V
 * registers per lane; V = 0: shared memory, for any E. */
template <class X, int V> struct per_expert {
    X value[V];
    __device__ per_expert(void *) {
    }
    __device__ X &operator[](int v) {
        return value[v];
    }
};
template <class X> struct per_expert<X, 0> {
    X *value;
    __device__ per_expert(void *shared) : value((X *)shared + threadIdx.x % 32) {
    }
    __device__ X &operator[](int v) {
        return value[32 * v];
    }
};

/* Calls body(v, expert) for every expert of this lane. */
template <int V, class Body> __device__ static inline void each_expert(int E, Body body) {
    int lane = threadIdx.x % 32;
    if constexpr (V > 0) {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (lane + 32 * v < E) body(v, lane + 32 * v);
    } else {
        for (int v = 0; lane + 32 * v < E; v++) body(v, lane + 32 * v);
    }
}

/* sortable_key maps finite floats to non-zero unsigned integers of the same order (-0 and 0 map to one key);
 * float_of_key is its inverse. */
__device__ static inline uint32_t sortable_key(float x) {
    uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
__device__ static inline float float_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

/* A position in the order by descending key, then ascending index. */
struct ranked {
    uint32_t key;
    int number;
    __device__ bool before(uint32_t other_key, int other) const {
        return other_key < key || (other_key == key && other > number);
    }
};
__device__ static inline ranked before_all(void) {
    return {0xffffffff, -1};
}

/* The first of n entries after `last`. key(v, index) returns the keys; 0 excludes an entry. Every lane receives the
 * result. */
template <int V, class Key> __device__ static inline ranked next_after(ranked last, int n, Key key) {
    uint32_t best = 0;
    int number = INT_MAX;
    each_expert<V>(n, [&](int v, int i) {
        uint32_t candidate = key(v, i);
        if (last.before(candidate, i) && candidate > best) best = candidate, number = i;
    });
    uint32_t max_key = __reduce_max_sync(all_lanes, best);
    return {max_key, __reduce_min_sync(all_lanes, best == max_key ? number : INT_MAX)};
}

__device__ static inline float logistic(float x) {
    return 1 / (1 + expf(-x));
}

/* The maximum and the denominator of a softmax over a token's logits, and whether all of them are finite. */
struct softmax_of {
    float max, sum;
    bool finite;
    __device__ float operator()(float logit) const {
        return expf(logit - max) / sum;
    }
};

template <int V> __device__ static inline softmax_of read_logits(per_expert<float, V> &x, const float *logits, int E) {
    softmax_of softmax = {-INFINITY, 0, true};
    each_expert<V>(E, [&](int v, int e) {
        x[v] = logits[e];
        softmax.max = fmaxf(softmax.max, x[v]);
        softmax.finite &= isfinite(x[v]) != 0;
    });
    softmax.max = mt_warp_max(softmax.max);
    each_expert<V>(E, [&](int v, int e) { softmax.sum += expf(x[v] - softmax.max); });
    softmax.sum = mt_warp_sum(softmax.sum);
    softmax.finite = __all_sync(all_lanes, softmax.finite);
    return softmax;
}

/* Calls body(V, warps per block, bytes of shared memory). If E exceeds the registers, a warp gets `arrays` arrays of E
 * values in shared memory; it always gets `more` bytes. */
template <class Body> static void with_slots(int64_t E, int64_t arrays, int64_t more, Body body) {
    int64_t bytes = mt_divide_up(E, 32) * 32 * 4 * arrays + more;
    if (E <= 32)
        body(mt_width<1>(), 8u, (size_t)(8 * more));
    else if (E <= 64)
        body(mt_width<2>(), 8u, (size_t)(8 * more));
    else if (E <= 128)
        body(mt_width<4>(), 8u, (size_t)(8 * more));
    else if (E <= 256)
        body(mt_width<8>(), 8u, (size_t)(8 * more));
    else if (E <= 512)
        body(mt_width<16>(), 8u, (size_t)(8 * more));
    else {
        MT_CHECK(bytes <= max_shared_bytes);
        body(mt_width<0>(), 1u, (size_t)bytes);
    }
}

/* ---- routing ----------------------------------------------------------------------------------------------------- */

/* Group-limited routing: sets the keys of all experts outside the best groups to 0. The score of a group is the sum of
 * the scores of its best experts. `group_keys` is in shared memory, one key per group. */
template <int V, class Score>
__device__ static inline void limit_groups(per_expert<float, V> &keys, uint32_t *group_keys, const routing &r,
                                           Score score) {
    int size = r.E / r.groups, best = r.group_best, lane = threadIdx.x % 32;
    auto key = [&](int v, int) { return __float_as_uint(keys[v]); };
    for (int g = 0; g < r.groups; g++) {
        float sum = 0;
        ranked last = before_all();
        for (int i = 0; i < best; i++) {
            last = next_after<V>(last, r.E, [&](int v, int e) { return e / size == g ? key(v, e) : 0; });
            sum += score(float_of_key(last.key));
        }
        if (lane == 0) group_keys[g] = sortable_key(sum);
    }
    __syncwarp();
    ranked last = before_all();
    for (int i = 0; i < r.group_topk; i++)
        last = next_after<0>(last, r.groups, [&](int, int g) { return group_keys[g]; });
    each_expert<V>(r.E, [&](int v, int e) {
        int g = e / size;
        if (last.before(group_keys[g], g)) keys[v] = 0;
    });
}

/* Chooses the experts of one token. Lane j returns the expert of choice j and its probability, before the scaling
 * factor. */
template <int V>
__device__ static inline int choose(float *prob, per_expert<float, V> &x, const softmax_of &softmax,
                                    const float *logits, const float *bias, uint32_t *group_keys, const routing &r) {
    int lane = threadIdx.x % 32, mine = 0;
    bool biased = r.sigmoid && bias;
    each_expert<V>(
        r.E, [&](int v, int e) { x[v] = __uint_as_float(sortable_key(biased ? logistic(x[v]) + bias[e] : x[v])); });
    if (r.groups > 0)
        limit_groups<V>(x, group_keys, r, [&](float value) {
            if (r.sigmoid) return biased ? value : logistic(value);
            return r.pre_softmax ? softmax(value) : value;
        });
    ranked last = before_all();
    for (int j = 0; j < r.k; j++) {
        last = next_after<V>(last, r.E, [&](int v, int) { return __float_as_uint(x[v]); });
        if (lane == j) mine = last.number < r.E ? last.number : 0;
    }
    float logit = lane < r.k ? logits[mine] : -INFINITY;
    if (r.sigmoid) {
        float score = lane < r.k ? logistic(logit) : 0, sum = mt_warp_sum(score);
        *prob = r.k > 1 ? score / (sum + 1e-20f) : score;
    } else if (r.pre_softmax) {
        *prob = softmax(logit);
    } else {
        float weight = expf(logit - mt_warp_max(logit)), sum = mt_warp_sum(weight);
        *prob = weight / sum;
    }
    return mine;
}

/* One warp per token. Reads 4 E bytes per token, writes 8 k. */
template <int V>
__global__ void route_forward(float *probs, int32_t *experts, int32_t *invalid, const float *logits, const float *bias,
                              const int64_t *token_index, int64_t T, routing r, int shared_per_warp) {
    extern __shared__ __align__(16) char shared[];
    char *warp_memory = shared + threadIdx.x / 32 * shared_per_warp;
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (t >= T) return;
    if (mt_is_padding(token_index, t)) {
        if (lane < r.k) probs[t * r.k + lane] = 0, experts[t * r.k + lane] = -1;
        return;
    }
    per_expert<float, V> x(warp_memory + r.groups * 4);
    logits += t * r.E;
    softmax_of softmax = read_logits<V>(x, logits, r.E);
    float prob = NAN;
    int expert = lane;
    if (softmax.finite)
        expert = choose<V>(&prob, x, softmax, logits, bias, (uint32_t *)warp_memory, r);
    else if (lane == 0)
        atomicAdd(invalid, 1);
    if (lane >= r.k) return;
    probs[t * r.k + lane] = prob * r.scaling;
    experts[t * r.k + lane] = expert;
}

extern "C" void mt_cuda_route_forward(float *probs, int32_t *experts, int32_t *invalid, const float *logits,
                                      const float *bias, const int64_t *token_index, int64_t T, const mt_router *router,
                                      mt_stream *stream) {
    if (T == 0) return;
    routing r = routing_of(router);
    with_slots(r.E, 1, mt_divide_up(r.groups, 32) * 128, [&](auto slots, unsigned warps, size_t bytes) {
        route_forward<decltype(slots)::value><<<mt_grid_size(T, warps), warps * 32, bytes, mt_cuda_stream(stream)>>>(
            probs, experts, invalid, logits, bias, token_index, T, r, (int)(bytes / warps));
        MT_CUDA_LAUNCHED();
    });
}

/* For probabilities q with gradients g, the gradient of the logits is q (g - sum(g q)) for a softmax, the same times 1
 * - s for sigmoids s divided by their sum, and g s (1 - s) for a single sigmoid. Reads 4 (E + 2 k) bytes per token,
 * writes 4 E. */
template <int V>
__global__ void route_backward(float *dlogits, const float *dprobs, const int32_t *experts, const float *logits,
                               int64_t T, routing r, int shared_per_warp) {
    extern __shared__ __align__(16) char shared[];
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (t >= T) return;
    per_expert<float, V> x(shared + threadIdx.x / 32 * shared_per_warp);
    logits += t * r.E, dlogits += t * r.E;
    int expert = lane < r.k ? experts[t * r.k + lane] : -1;
    if (__shfl_sync(all_lanes, expert, 0) < 0) { // padding
        each_expert<V>(r.E, [&](int, int e) { dlogits[e] = 0; });
        return;
    }
    bool chosen = expert >= 0;
    float logit = chosen ? logits[expert] : -INFINITY, g = chosen ? dprobs[t * r.k + lane] : 0, q;
    bool all = !r.sigmoid && r.pre_softmax;
    softmax_of softmax = {0, 1, true};
    if (all) {
        softmax = read_logits<V>(x, logits, r.E);
        q = chosen ? softmax(logit) : 0;
    } else {
        float max_logit = mt_warp_max(logit);
        q = !chosen ? 0 : r.sigmoid ? logistic(logit) : expf(logit - max_logit);
    }
    float total = mt_warp_sum(q);
    if (!all && !(r.sigmoid && r.k == 1)) q /= total + (r.sigmoid ? 1e-20f : 0);
    float mean = mt_warp_sum(g * q);
    if (r.sigmoid && r.k == 1) mean = 0;
    each_expert<V>(r.E, [&](int v, int e) { dlogits[e] = all ? -r.scaling * softmax(x[v]) * mean : 0.0f; });
    __syncwarp(); // the chosen experts are overwritten below
    if (chosen) dlogits[expert] = r.scaling * q * (g - mean) * (r.sigmoid ? logistic(-logit) : 1.0f);
}

extern "C" void mt_cuda_route_backward(float *dlogits, const float *dprobs, const int32_t *experts, const float *logits,
                                       int64_t T, const mt_router *router, mt_stream *stream) {
    if (T == 0) return;
    routing r = routing_of(router);
    with_slots(r.E, 1, 0, [&](auto slots, unsigned warps, size_t bytes) {
        route_backward<decltype(slots)::value><<<mt_grid_size(T, warps), warps * 32, bytes, mt_cuda_stream(stream)>>>(
            dlogits, dprobs, experts, logits, T, r, (int)(bytes / warps));
        MT_CUDA_LAUNCHED();
    });
}

/* ---- auxiliary losses -------------------------------------------------------------------------------------------- */

/* Replaces a token's logits by its scores, normalised to sum 1. Returns log(sum(exp(logits))). */
template <int V>
__device__ static inline double normalise_scores(per_expert<float, V> &x, const softmax_of &softmax, const routing &r) {
    float sum = 0;
    each_expert<V>(r.E, [&](int v, int) {
        x[v] = r.sigmoid ? logistic(x[v]) : softmax(x[v]);
        sum += x[v];
    });
    sum = mt_warp_sum(sum) + 1e-20f;
    if (r.sigmoid) each_expert<V>(r.E, [&](int v, int) { x[v] /= sum; });
    return (double)softmax.max + log((double)softmax.sum);
}

/* Scores are summed as integer multiples of 2^-40: exact for scores down to 2^-16, and independent of the order. */
static constexpr float score_unit = 0x1p40f;

/* Accumulators of the forward: sums of scores and counts [S, E], a flag per sequence that a score was NaN, and the
 * z-loss sum of each warp. */
struct aux_loss_sums {
    unsigned long long *scores;
    double *z;
    int32_t *counts, *has_nan;
};

static constexpr int tokens_per_warp = 4;

/* Adds a warp's sums of one sequence to `to` and resets them. */
template <int V>
__device__ static inline void aux_loss_flush(const aux_loss_sums &to, per_expert<unsigned long long, V> &scores,
                                             per_expert<int32_t, V> &counts, int64_t sequence, int E) {
    each_expert<V>(E, [&](int v, int e) {
        if (scores[v] > 0) atomicAdd(&to.scores[sequence * E + e], scores[v]);
        if (counts[v] > 0) atomicAdd(&to.counts[sequence * E + e], counts[v]);
        scores[v] = 0, counts[v] = 0;
    });
}

/* Adds the scores of one token (logits x) to a warp's sums. Returns log(sum(exp(x))). */
template <int V>
__device__ static inline double aux_loss_add(per_expert<unsigned long long, V> &scores, per_expert<int32_t, V> &counts,
                                             int32_t *has_nan, per_expert<float, V> &x, const softmax_of &softmax,
                                             const routing &r) {
    ranked last = before_all();
    for (int j = 0; softmax.finite && j < r.k; j++)
        last = next_after<V>(last, r.E, [&](int v, int) { return sortable_key(x[v]); });
    each_expert<V>(r.E,
                   [&](int v, int e) { counts[v] += softmax.finite ? !last.before(sortable_key(x[v]), e) : e < r.k; });
    double lse = normalise_scores<V>(x, softmax, r);
    bool number = true;
    each_expert<V>(r.E, [&](int v, int) {
        number &= !isnan(x[v]);
        if (x[v] > 0) scores[v] += __float2ull_rn(x[v] * score_unit);
    });
    if (!number) *has_nan = 1;
    return lse;
}

/* A warp processes up to tokens_per_warp consecutive tokens. If there is only one sequence, the warps of a block first
 * add up in shared memory (`block_sums`). Reads 4 E bytes per token. */
template <int V>
__global__ void aux_loss_forward(aux_loss_sums sums, const float *logits, const int32_t *sequence,
                                 const int64_t *token_index, int64_t T, routing r, int shared_per_warp,
                                 bool block_sums) {
    extern __shared__ __align__(16) char shared[];
    char *warp_memory = shared + threadIdx.x / 32 * shared_per_warp,
         *block_memory = shared + blockDim.x / 32 * shared_per_warp;
    int64_t warp = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = warp * tokens_per_warp;
    int64_t slots = (r.E + 31) / 32 * 32, current = 0;
    per_expert<unsigned long long, V> scores(warp_memory);
    per_expert<int32_t, V> counts(warp_memory + slots * 8);
    per_expert<float, V> x(warp_memory + slots * 12);
    aux_loss_sums to = sums;
    if (block_sums)
        to.scores = (unsigned long long *)block_memory, to.counts = (int32_t *)(block_memory + (int64_t)r.E * 8);
    for (int e = threadIdx.x; block_sums && e < r.E; e += blockDim.x) to.scores[e] = 0, to.counts[e] = 0;
    __syncthreads();
    each_expert<V>(r.E, [&](int v, int) { scores[v] = 0, counts[v] = 0; });
    double z = 0;
    for (int64_t t = first; t < min(first + tokens_per_warp, T); t++) {
        if (mt_is_padding(token_index, t)) continue;
        int64_t s = sequence ? sequence[t] : 0;
        if (s != current) aux_loss_flush<V>(to, scores, counts, current, r.E);
        current = s;
        softmax_of softmax = read_logits<V>(x, logits + t * r.E, r.E);
        double lse = aux_loss_add<V>(scores, counts, &sums.has_nan[s], x, softmax, r);
        z += lse * lse;
    }
    aux_loss_flush<V>(to, scores, counts, current, r.E);
    if (first < T && threadIdx.x % 32 == 0) sums.z[warp] = z;
    __syncthreads();
    for (int e = threadIdx.x; block_sums && e < r.E; e += blockDim.x) {
        if (to.scores[e] > 0) atomicAdd(&sums.scores[e], to.scores[e]);
        if (to.counts[e] > 0) atomicAdd(&sums.counts[e], to.counts[e]);
    }
}

/* Second stage: writes sums[2, S, E] in fp32; one block adds up the z-loss of the warps in a fixed order. */
__global__ void aux_loss_finish(float *sums, double *z_sum, aux_loss_sums from, int64_t S, int64_t E, int64_t warps) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < S * E; i += (int64_t)gridDim.x * blockDim.x) {
        sums[i] = from.has_nan[i / E] ? NAN : (float)((double)from.scores[i] / (double)score_unit);
        sums[S * E + i] = (float)from.counts[i];
    }
    if (blockIdx.x > 0) return;
    __shared__ double parts[256];
    double z = 0;
    for (int64_t i = threadIdx.x; i < warps; i += 256) z += from.z[i];
    parts[threadIdx.x] = z;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) z_sum[0] += parts[0];
}

extern "C" void mt_cuda_aux_loss_forward(const mt_aux_loss_args *a, mt_stream *stream) {
    int64_t S = a->S, T = a->T;
    routing r = routing_of(a->router);
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t warps = mt_divide_up(T, tokens_per_warp), zeroed = S * r.E * 12 + S * 4;
    char *workspace = (char *)mt_cuda_workspace(stream, warps * 8 + zeroed);
    aux_loss_sums to;
    to.z = (double *)workspace;
    to.scores = (unsigned long long *)(workspace + warps * 8);
    to.counts = (int32_t *)(to.scores + S * r.E);
    to.has_nan = to.counts + S * r.E;
    MT_CUDA(cudaMemsetAsync(to.scores, 0, (size_t)zeroed, on));
    if (T > 0)
        with_slots(r.E, 4, 0, [&](auto slots, unsigned in_block, size_t bytes) {
            size_t room = (size_t)r.E * 12;
            bool block_sums = !a->sequence && bytes + room <= (size_t)max_shared_bytes;
            aux_loss_forward<decltype(slots)::value>
                <<<mt_grid_size(warps, in_block), in_block * 32, block_sums ? bytes + room : bytes, on>>>(
                    to, a->logits, a->sequence, a->token_index, T, r, (int)(bytes / in_block), block_sums);
            MT_CUDA_LAUNCHED();
        });
    aux_loss_finish<<<mt_grid_size(S * r.E, 1024), 256, 0, on>>>(a->sums, a->z_sum, to, S, r.E, warps);
    MT_CUDA_LAUNCHED();
}

__device__ static inline double warp_sum(double x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(all_lanes, x, lane);
    return x;
}

/* One block; its warps take the sequences in turn. */
__global__ void aux_loss_value(double *loss, const float *sums, int64_t S, int64_t E) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    __shared__ double of_warp[32];
    double mine = 0;
    for (int64_t s = warp; s < S; s += warps) {
        const float *scores = sums + s * E, *counts = scores + S * E;
        double products = 0, total = 0;
        for (int64_t e = lane; e < E; e += 32) {
            products += (double)scores[e] * (double)counts[e];
            total += (double)counts[e];
        }
        products = warp_sum(products), total = warp_sum(total);
        if (total > 0) mine += (double)E * products / total;
    }
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < warps; w++) mine += of_warp[w];
    loss[0] += mine;
}

extern "C" void mt_cuda_aux_loss_value(double *loss, const float *sums, int64_t S, int64_t E, mt_stream *stream) {
    aux_loss_value<<<1, 1024, 0, mt_cuda_stream(stream)>>>(loss, sums, S, E);
    MT_CUDA_LAUNCHED();
}

/* One warp per token. Reads 8 E bytes per token and writes 4 E; the counts come from the caches. */
template <int V>
__global__ void aux_loss_backward(float *dlogits, const float *logits, const float *counts, const int32_t *sequence,
                                  const int64_t *token_index, int64_t T, float aux_scale, float z_scale, routing r,
                                  int shared_per_warp) {
    extern __shared__ __align__(16) char shared[];
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (t >= T || mt_is_padding(token_index, t)) return;
    per_expert<float, V> x(shared + threadIdx.x / 32 * shared_per_warp);
    counts += (sequence ? sequence[t] : 0) * r.E, logits += t * r.E, dlogits += t * r.E;
    softmax_of softmax = read_logits<V>(x, logits, r.E);
    float lse = (float)normalise_scores<V>(x, softmax, r);
    double total = 0, mean = 0;
    each_expert<V>(r.E, [&](int v, int e) {
        total += (double)counts[e];
        mean += (double)counts[e] * (double)x[v];
    });
    total = warp_sum(total), mean = warp_sum(mean);
    double factor = total > 0 ? (double)aux_scale * (double)r.E / total : 0;
    each_expert<V>(r.E, [&](int v, int e) {
        float logit = logits[e], slope = r.sigmoid ? logistic(-logit) : 1.0f;
        float aux = (float)(factor * ((double)counts[e] - mean)) * x[v] * slope;
        dlogits[e] += aux + 2 * z_scale * lse * expf(logit - lse);
    });
}

extern "C" void mt_cuda_aux_loss_backward(const mt_aux_loss_args *a, mt_stream *stream) {
    int64_t T = a->T;
    if (T == 0) return;
    routing r = routing_of(a->router);
    with_slots(r.E, 1, 0, [&](auto slots, unsigned warps, size_t bytes) {
        aux_loss_backward<decltype(slots)::value>
            <<<mt_grid_size(T, warps), warps * 32, bytes, mt_cuda_stream(stream)>>>(
                a->dlogits, a->logits, a->counts, a->sequence, a->token_index, T, a->aux_scale, a->z_scale, r,
                (int)(bytes / warps));
        MT_CUDA_LAUNCHED();
    });
}

/* ---- loads of experts -------------------------------------------------------------------------------------------- */

/* counts[E] += the number of occurrences of each expert in experts[n]. Counts in shared memory first if E fits. */
__global__ void count_experts(int32_t *counts, const int32_t *experts, int64_t n, int E, bool fits) {
    extern __shared__ int32_t block_memory[];
    int32_t *to = fits ? block_memory : counts;
    for (int e = threadIdx.x; fits && e < E; e += blockDim.x) block_memory[e] = 0;
    __syncthreads();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        if (experts[i] >= 0) atomicAdd(&to[experts[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; fits && e < E; e += blockDim.x)
        if (block_memory[e] > 0) atomicAdd(&counts[e], block_memory[e]);
}

__global__ void add_counts(float *loads, const int32_t *counts, int64_t E) {
    int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (e < E) loads[e] += (float)counts[e];
}

extern "C" void mt_cuda_count_experts(float *loads, const int32_t *experts, int64_t n, int64_t E, mt_stream *stream) {
    if (n == 0) return;
    cudaStream_t on = mt_cuda_stream(stream);
    int32_t *counts = (int32_t *)mt_cuda_workspace(stream, E * 4);
    bool fits = E * 4 <= max_shared_bytes;
    unsigned blocks = mt_grid_size(n, 1024), most = (unsigned)mt_cuda_device()->multiProcessorCount;
    if (blocks > most) blocks = most;
    MT_CUDA(cudaMemsetAsync(counts, 0, (size_t)E * 4, on));
    count_experts<<<blocks, 256, fits ? (size_t)E * 4 : 0, on>>>(counts, experts, n, (int)E, fits);
    MT_CUDA_LAUNCHED();
    add_counts<<<mt_grid_size(E, 256), 256, 0, on>>>(loads, counts, E);
    MT_CUDA_LAUNCHED();
}

/* One block. Loads are integers, so their sum is exact in any order. */
__global__ void expert_bias_step(float *bias, const float *loads, const float *scale, int64_t E, float rate) {
    __shared__ double of_warp[32];
    if (scale[0] < 0) return;
    double sum = 0;
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x) sum += (double)loads[e];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0);
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
        double missing = sum - (double)E * (double)loads[e];
        bias[e] += missing > 0 ? rate : missing < 0 ? -rate : 0.0f;
    }
}

extern "C" void mt_cuda_expert_bias_step(float *bias, const float *loads, const float *scale, int64_t E, float rate,
                                         mt_stream *stream) {
    expert_bias_step<<<1, 512, 0, mt_cuda_stream(stream)>>>(bias, loads, scale, E, rate);
    MT_CUDA_LAUNCHED();
}

/* ---- capacity ---------------------------------------------------------------------------------------------------- */

/* Sort keys of the tokens. */
__global__ void token_keys(uint64_t *keys, int32_t *tokens, const int64_t *token_index, int64_t T) {
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= T) return;
    keys[t] = (uint64_t)token_index[t] ^ (uint64_t)1 << 63; // order of signed integers
    tokens[t] = (int32_t)t;
}

/* Sort keys of the choices, which are given in token order: by expert, then by descending probability. Choices without
 * an expert come last. */
__global__ void choice_keys(uint64_t *keys, int32_t *choices, const int32_t *tokens, const int32_t *experts,
                            const float *probs, int64_t n, int k, bool by_position) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int64_t choice = (int64_t)tokens[i / k] * k + i % k;
    float prob = by_position ? 0 : probs[choice];
    uint32_t order = ~sortable_key(isnan(prob) ? -INFINITY : prob);
    keys[i] = (uint64_t)(uint32_t)experts[choice] << 32 | order;
    choices[i] = (int32_t)choice;
}

/* Keeps the first `capacity` sorted choices of each expert. */
__global__ void keep_first(int32_t *kept, const uint64_t *keys, const int32_t *choices, int64_t n, int64_t begin,
                           int64_t end, int64_t capacity) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || choices[i] < begin || choices[i] >= end) return;
    int32_t expert = (int32_t)(keys[i] >> 32);
    // True if `capacity` choices of this expert precede this one.
    bool full = i >= capacity && (int32_t)(keys[i - capacity] >> 32) == expert;
    kept[choices[i] - begin] = full ? -1 : expert;
}

/* Sorts the tokens by index, then the choices in that order by expert and probability; both sorts are stable. Each
 * radix pass (8 bits of the key) moves 12 bytes per choice twice. */
extern "C" void mt_cuda_drop_tokens(const mt_drop_args *a, mt_stream *stream) {
    int64_t T = a->T, k = a->k, n = T * k, room = mt_divide_up(n, 64) * 64;
    bool by_position = !a->probs;
    if (n == 0 || a->count == 0) return;
    cudaStream_t on = mt_cuda_stream(stream);
    size_t sort_bytes = 0;
    uint64_t *no_keys = NULL;
    int32_t *no_values = NULL;
    MT_CUDA(cub::DeviceRadixSort::SortPairs(NULL, sort_bytes, no_keys, no_keys, no_values, no_values, (int)n, 0, 64));
    char *workspace = (char *)mt_cuda_workspace(stream, room * 28 + (int64_t)sort_bytes);
    uint64_t *keys = (uint64_t *)workspace, *sorted_keys = keys + room;
    int32_t *values = (int32_t *)(sorted_keys + room), *sorted_values = values + room, *tokens = sorted_values + room;
    void *spare = tokens + room;
    token_keys<<<mt_grid_size(T, 256), 256, 0, on>>>(keys, values, a->token_index, T);
    MT_CUDA_LAUNCHED();
    MT_CUDA(cub::DeviceRadixSort::SortPairs(spare, sort_bytes, keys, sorted_keys, values, tokens, (int)T, 0, 64, on));
    choice_keys<<<mt_grid_size(n, 256), 256, 0, on>>>(keys, values, tokens, a->experts, a->probs, n, (int)k,
                                                      by_position);
    MT_CUDA_LAUNCHED();
    MT_CUDA(cub::DeviceRadixSort::SortPairs(spare, sort_bytes, keys, sorted_keys, values, sorted_values, (int)n,
                                            by_position ? 32 : 0, 64, on));
    keep_first<<<mt_grid_size(n, 256), 256, 0, on>>>(a->kept, sorted_keys, sorted_values, n, a->first * k,
                                                     (a->first + a->count) * k, a->capacity);
    MT_CUDA_LAUNCHED();
}

/* ---- order of dispatched tokens ---------------------------------------------------------------------------------- */

/* Calls to(i, of(0) + ... + of(i - 1)) for i <= n. One block of 1024 threads. */
template <class Of, class To> __device__ static inline void prefix_sums(int64_t n, Of of, To to) {
    __shared__ int32_t of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t before = 0;
    for (int64_t first = 0; first <= n; first += 1024) {
        int64_t i = first + threadIdx.x;
        int32_t x = i < n ? of(i) : 0, sum = x;
        for (int step = 1; step < 32; step *= 2) {
            int32_t left = __shfl_up_sync(all_lanes, sum, step);
            if (lane >= step) sum += left;
        }
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        int32_t warps = of_warp[lane];
        for (int step = 1; step < 32; step *= 2) {
            int32_t left = __shfl_up_sync(all_lanes, warps, step);
            if (lane >= step) warps += left;
        }
        int32_t of_others = __shfl_sync(all_lanes, warps, warp > 0 ? warp - 1 : 0);
        if (i <= n) to(i, before + (warp > 0 ? of_others : 0) + sum - x);
        before += __shfl_sync(all_lanes, warps, 31);
        __syncthreads();
    }
}

/* mt_dispatch in the form that kernels use. A bin is an expert of the range that is dispatched. */
struct dispatch_info {
    int64_t n, capacity; // n: number of choices
    int topk, first, bins, local, copies;
    int64_t blocks; // each has per_warp choices for each warp
};
static constexpr int per_warp = 128;

/* The bin of choice i, or -1. */
__device__ static inline int bin_of(const int32_t *experts, int64_t i, const dispatch_info &s) {
    int64_t expert = i < s.n ? experts[i] : -1, bin = expert - s.first;
    return expert >= 0 && bin >= 0 && bin < s.bins ? (int)bin : -1;
}

/* before[bins, blocks] = the number of choices of each bin in each block. First step of a counting sort:
 * histogram, prefix sums of each bin over the blocks, offsets of the bins, scatter. The sort reads 4 bytes per choice
 * twice, writes 4 for each copy of a choice and 8 for each row. Launch latency dominates its time. */
__global__ void plan_histogram(int32_t *before, const int32_t *experts, dispatch_info s) {
    extern __shared__ int32_t block_memory[];
    for (int bin = threadIdx.x; bin < s.bins; bin += blockDim.x) block_memory[bin] = 0;
    __syncthreads();
    int64_t first = (int64_t)blockIdx.x * (blockDim.x / 32) * per_warp;
    for (int i = threadIdx.x; i < blockDim.x / 32 * per_warp; i += blockDim.x) {
        int bin = bin_of(experts, first + i, s);
        if (bin >= 0) atomicAdd(&block_memory[bin], 1);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < s.bins; bin += blockDim.x)
        before[bin * s.blocks + blockIdx.x] = block_memory[bin];
}

/* before[bins, blocks] = exclusive prefix sums over the blocks; totals[bins]. One warp per bin. */
__global__ void plan_scan(int32_t *before, int32_t *totals, dispatch_info s) {
    int64_t bin = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    int32_t total = 0;
    if (bin >= s.bins) return;
    before += bin * s.blocks;
    for (int64_t block = lane; block - lane < s.blocks; block += 32) {
        int32_t x = block < s.blocks ? before[block] : 0, sum = x;
        for (int step = 1; step < 32; step *= 2) {
            int32_t left = __shfl_up_sync(all_lanes, sum, step);
            if (lane >= step) sum += left;
        }
        if (block < s.blocks) before[block] = total + sum - x;
        total += __shfl_sync(all_lanes, sum, 31);
    }
    if (lane == 0) totals[bin] = total;
}

/* offsets[bins copies + 1]: the first row of each bin. */
__global__ void __launch_bounds__(1024) plan_offsets(int32_t *offsets, const int32_t *totals, dispatch_info s) {
    prefix_sums((int64_t)s.bins * s.copies,
                [&](int64_t v) {
                    if (s.capacity > 0) return (int32_t)s.capacity;
                    int64_t place = v / s.local / s.copies;
                    return s.n > 0 ? totals[place * s.local + v % s.local] : 0;
                },
                [&](int64_t v, int32_t before) { offsets[v] = before; });
}

/* Writes the rows of one choice; `rank` choices of its bin precede it. */
__device__ static inline void write_choice(int32_t *position, int32_t *choice, int32_t *token, const int32_t *offsets,
                                           int64_t i, int bin, int32_t rank, const dispatch_info &s) {
    bool valid = bin >= 0 && (s.capacity == 0 || rank < s.capacity);
    for (int copy = 0; copy < s.copies; copy++) {
        int32_t row = valid ? offsets[(bin / s.local * s.copies + copy) * s.local + bin % s.local] + rank : -1;
        position[i * s.copies + copy] = row;
        if (valid) choice[row] = (int32_t)i, token[row] = (int32_t)(i / s.topk);
    }
}

/* A warp processes its choices in order, 32 at a time; choices of the same bin are found with __match_any_sync. */
__global__ void plan_scatter(int32_t *position, int32_t *choice, int32_t *token, const int32_t *offsets,
                             const int32_t *before, const int32_t *experts, dispatch_info s) {
    extern __shared__ int32_t next[]; // [warps, bins]: choices of the bin before the warp's current ones
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int64_t first = ((int64_t)blockIdx.x * warps + warp) * per_warp + lane;
    int32_t *mine = next + warp * s.bins;
    for (int i = threadIdx.x; i < warps * s.bins; i += blockDim.x) next[i] = 0;
    __syncthreads();
    for (int i = 0; i < per_warp; i += 32) {
        int bin = bin_of(experts, first + i, s);
        uint32_t same = __match_any_sync(all_lanes, bin);
        if (bin >= 0 && (same & ((1u << lane) - 1)) == 0) mine[bin] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < s.bins; bin += blockDim.x) {
        int32_t sum = before[bin * s.blocks + blockIdx.x];
        for (int w = 0; w < warps; w++) {
            int32_t count = next[w * s.bins + bin];
            next[w * s.bins + bin] = sum;
            sum += count;
        }
    }
    __syncthreads();
    for (int i = 0; i < per_warp; i += 32) {
        int bin = bin_of(experts, first + i, s);
        uint32_t same = __match_any_sync(all_lanes, bin), lower = same & ((1u << lane) - 1);
        int32_t rank = bin >= 0 ? mine[bin] + __popc(lower) : 0;
        __syncwarp();
        if (bin >= 0 && lower == 0) mine[bin] += __popc(same);
        __syncwarp();
        if (first + i < s.n) write_choice(position, choice, token, offsets, first + i, bin, rank, s);
    }
}

extern "C" void mt_cuda_dispatch_plan(int32_t *offsets, int32_t *position, int32_t *choice, int32_t *token,
                                      const int32_t *experts, int64_t T, int64_t M, const mt_dispatch *dispatch,
                                      mt_stream *stream) {
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t n = T * dispatch->topk, bins = dispatch->count;
    unsigned warps = 8;
    while (warps > 1 && warps * bins * 4 > max_shared_bytes) warps /= 2;
    MT_CHECK(bins * 4 <= max_shared_bytes && n < INT_MAX && M < INT_MAX);
    int64_t blocks = mt_divide_up(n, warps * per_warp);
    dispatch_info s = {n,         dispatch->capacity,       (int)dispatch->topk,   (int)dispatch->first,
                       (int)bins, (int)dispatch->num_local, (int)dispatch->copies, blocks};
    int32_t *before = (int32_t *)mt_cuda_workspace(stream, (blocks + 1) * bins * 4), *totals = before + blocks * bins;
    if (M > 0) {
        MT_CUDA(cudaMemsetAsync(choice, 0xff, (size_t)M * 4, on));
        MT_CUDA(cudaMemsetAsync(token, 0xff, (size_t)M * 4, on));
    }
    if (n > 0) {
        plan_histogram<<<(unsigned)blocks, warps * 32, (size_t)bins * 4, on>>>(before, experts, s);
        MT_CUDA_LAUNCHED();
        plan_scan<<<mt_grid_size(bins, 8), 256, 0, on>>>(before, totals, s);
        MT_CUDA_LAUNCHED();
    }
    plan_offsets<<<1, 1024, 0, on>>>(offsets, totals, s);
    MT_CUDA_LAUNCHED();
    if (n == 0) return;
    plan_scatter<<<(unsigned)blocks, warps * 32, (size_t)(warps * bins) * 4, on>>>(position, choice, token, offsets,
                                                                                   before, experts, s);
    MT_CUDA_LAUNCHED();
}

/* arrived[sources, local] + total: the first row of each (source, expert) in order of arrival; sorted[local, sources]:
 * its first row in order of experts; offsets: the first row of each expert. One block. */
__global__ void __launch_bounds__(1024) exchange_offsets(int32_t *arrived, int32_t *sorted, int32_t *offsets,
                                                         const int32_t *counts, int sources, int local) {
    int64_t n = (int64_t)sources * local;
    prefix_sums(
        n, [&](int64_t i) { return counts[i]; }, [&](int64_t i, int32_t before) { arrived[i] = before; });
    prefix_sums(
        n, [&](int64_t i) { return counts[i % sources * local + i / sources]; },
        [&](int64_t i, int32_t before) {
            sorted[i] = before;
            if (i % sources == 0) offsets[i / sources] = before;
        });
}

/* One thread per row; it finds the source and expert by binary search. Writes 8 bytes per row. */
__global__ void exchange_scatter(int32_t *to_expert, int32_t *from_expert, const int32_t *arrived,
                                 const int32_t *sorted, int sources, int local, int64_t M) {
    int64_t m = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int low = 0, high = sources * local;
    if (m >= M || m >= arrived[high]) return;
    while (high - low > 1) { // arrived[low] <= m < arrived[high]
        int middle = (low + high) / 2;
        if (arrived[middle] <= m)
            low = middle;
        else
            high = middle;
    }
    int32_t row = sorted[low % local * sources + low / local] + (int32_t)m - arrived[low];
    to_expert[row] = (int32_t)m;
    from_expert[m] = row;
}

extern "C" void mt_cuda_exchange_order(int32_t *to_expert, int32_t *from_expert, int32_t *offsets,
                                       const int32_t *counts, int64_t sources, int64_t local, int64_t M,
                                       mt_stream *stream) {
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t n = sources * local + 1;
    int32_t *arrived = (int32_t *)mt_cuda_workspace(stream, 2 * n * 4), *sorted = arrived + n;
    exchange_offsets<<<1, 1024, 0, on>>>(arrived, sorted, offsets, counts, (int)sources, (int)local);
    MT_CUDA_LAUNCHED();
    if (M == 0) return;
    exchange_scatter<<<mt_grid_size(M, 256), 256, 0, on>>>(to_expert, from_expert, arrived, sorted, (int)sources,
                                                           (int)local, M);
    MT_CUDA_LAUNCHED();
}

/* ---- combination of rows ----------------------------------------------------------------------------------------- */

/* A thread adds up one pack of a token's n rows, with eight loads in flight. Reads n rows and writes one: 2 (n + 1)
 * bytes per element of a token in bf16, 4 (n + 1) in fp32; a base is one more row to read. */
template <class T, int N>
__global__ void __launch_bounds__(256, 4) combine_rows(T *out, const T *in, const int32_t *position, const T *base,
                                                       int64_t num_tokens, int n, int C, int blocks_per_row) {
    constexpr int in_flight = 8;
    int64_t t = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y;
    int c = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * N;
    if (t >= num_tokens || c >= C) return;
    position += t * n;
    mt_pack<float, N> sum = mt_to_float(mt_load<N>(base + t * C + c, base != NULL));
    for (int first = 0; first < n; first += in_flight) {
        int32_t rows[in_flight];
        mt_pack<T, N> packs[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; i++) rows[i] = first + i < n ? position[first + i] : -1;
#pragma unroll
        for (int i = 0; i < in_flight; i++) packs[i] = mt_load<N>(in + (int64_t)max(rows[i], 0) * C + c, rows[i] >= 0);
#pragma unroll
        for (int i = 0; i < in_flight; i++) {
            mt_pack<float, N> row = mt_to_float(packs[i]);
            for (int j = 0; j < N; j++) sum.value[j] += row.value[j];
        }
    }
    mt_store(out + t * C + c, mt_from_float<T>(sum));
}

extern "C" void mt_cuda_combine_rows(void *out, const void *in, const int32_t *position, const void *base, int64_t T,
                                     int64_t n, int64_t C, mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {out, in, base}, {C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_many_row_grid grid = mt_many_rows(T, mt_divide_up(C, N), 1);
        combine_rows<E, N><<<grid.blocks, grid.block, 0, mt_cuda_stream(stream)>>>(
            (E *)out, (const E *)in, position, (const E *)base, T, (int)n, (int)C, grid.blocks_per_row);
        MT_CUDA_LAUNCHED();
    });
}

/* ---- biases of grouped linear layers ----------------------------------------------------------------------------- */

/* y += bias of the row's expert. Reads and writes y: 4 bytes per element in bf16, 8 in fp32; biases are cached. */
template <class T, int N>
__global__ void grouped_bias_forward(T *y, const T *bias, const int32_t *offsets, int64_t M, int E, int width,
                                     int blocks_per_row) {
    int64_t row = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y;
    int c = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * N;
    if (row >= M || row >= offsets[E] || c >= width) return;
    int expert = 0;
    for (int last = E - 1; expert < last;) { // the last expert that begins at or before the row
        int middle = (expert + last + 1) / 2;
        if (offsets[middle] <= row)
            expert = middle;
        else
            last = middle - 1;
    }
    mt_pack<float, N> pack = mt_to_float(mt_load<N>(y + row * width + c));
    mt_pack<float, N> more = mt_to_float(mt_load<N>(bias + (int64_t)expert * width + c));
    for (int i = 0; i < N; i++) pack.value[i] += more.value[i];
    mt_store(y + row * width + c, mt_from_float<T>(pack));
}

extern "C" void mt_cuda_grouped_bias_forward(void *y, const void *bias, const int32_t *offsets, int64_t M, int64_t N,
                                             int64_t E, mt_dtype dtype, mt_stream *stream) {
    if (M == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {y, bias}, {N}), [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int K = decltype(pack)::value;
        mt_many_row_grid grid = mt_many_rows(M, mt_divide_up(N, K), 1);
        grouped_bias_forward<T, K><<<grid.blocks, grid.block, 0, mt_cuda_stream(stream)>>>(
            (T *)y, (const T *)bias, offsets, M, (int)E, (int)N, grid.blocks_per_row);
        MT_CUDA_LAUNCHED();
    });
}

static constexpr int bias_rows = 16; // rows that a block reads at once

/* dbias += column sums of an expert's rows (blockIdx.y), for 32 N columns. Every bias_rows-th row is summed by one
 * warp, then the warps' sums in order. Reads dy: 2 bytes per element in bf16, 4 in fp32. */
template <class T, int N>
__global__ void grouped_bias_backward(float *dbias, const T *dy, const int32_t *offsets, int width) {
    __shared__ float sums[bias_rows][32 * N];
    int c = (blockIdx.x * 32 + threadIdx.x) * N, end = offsets[blockIdx.y + 1];
    mt_pack<float, N> sum = {};
#pragma unroll 4
    for (int64_t row = offsets[blockIdx.y] + (int)threadIdx.y; row < end; row += bias_rows) {
        mt_pack<float, N> d = mt_to_float(mt_load<N>(dy + row * width + c, c < width));
        for (int i = 0; i < N; i++) sum.value[i] += d.value[i];
    }
    for (int i = 0; i < N; i++) sums[threadIdx.y][threadIdx.x * N + i] = sum.value[i];
    __syncthreads();
    for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * N; i += 32 * bias_rows) {
        int column = blockIdx.x * 32 * N + i;
        float total = 0;
        for (int k = 0; k < bias_rows; k++) total += sums[k][i];
        if (column < width) dbias[(int64_t)blockIdx.y * width + column] += total;
    }
}

extern "C" void mt_cuda_grouped_bias_backward(float *dbias, const void *dy, const int32_t *offsets, int64_t M,
                                              int64_t N, int64_t E, mt_dtype dtype, mt_stream *stream) {
    if (M == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {dy}, {N}), [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int K = decltype(pack)::value;
        dim3 grid(mt_grid_size(N, 32 * K), (unsigned)E), block(32, bias_rows);
        grouped_bias_backward<T, K><<<grid, block, 0, mt_cuda_stream(stream)>>>(dbias, (const T *)dy, offsets, (int)N);
        MT_CUDA_LAUNCHED();
    });
}

/* ---- scaling of rows --------------------------------------------------------------------------------------------- */

/* y = weight x. Reads x, writes y: 4 bytes per element in bf16, 8 in fp32, and 4 per row. */
template <class T, int N>
__global__ void scale_rows_forward(T *y, const T *x, const float *weights, int64_t M, int C, int blocks_per_row) {
    int64_t row = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y;
    int c = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * N;
    if (row >= M || c >= C) return;
    mt_pack<float, N> pack = mt_to_float(mt_load<N>(x + row * C + c));
    for (int i = 0; i < N; i++) pack.value[i] *= weights[row];
    mt_store(y + row * C + c, mt_from_float<T>(pack));
}

extern "C" void mt_cuda_scale_rows_forward(void *y, const void *x, const float *weights, int64_t M, int64_t C,
                                           mt_dtype dtype, mt_stream *stream) {
    if (M == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {y, x}, {C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_many_row_grid grid = mt_many_rows(M, mt_divide_up(C, N), 1);
        scale_rows_forward<E, N><<<grid.blocks, grid.block, 0, mt_cuda_stream(stream)>>>(
            (E *)y, (const E *)x, weights, M, (int)C, grid.blocks_per_row);
        MT_CUDA_LAUNCHED();
    });
}

/* dx = weight dy, dweight = sum(dy x). blockDim.x threads share a row. Reads dy and x, writes dx: 6 bytes per element
 * in bf16, 12 in fp32, and 8 per row. */
template <class T, int N>
__global__ void scale_rows_backward(T *dx, float *dweights, const T *dy, const T *x, const float *weights, int64_t M,
                                    int C) {
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    bool valid = row < M;
    if (!valid) row = M - 1; // takes part in the reduction, writes nothing
    float weight = weights[row], dweight[1] = {0};
    for (int c = threadIdx.x * N; valid && c < C; c += blockDim.x * N) {
        mt_pack<float, N> d = mt_to_float(mt_load<N>(dy + row * C + c)), in = mt_to_float(mt_load<N>(x + row * C + c));
        for (int i = 0; i < N; i++) {
            dweight[0] += d.value[i] * in.value[i];
            d.value[i] *= weight;
        }
        mt_store(dx + row * C + c, mt_from_float<T>(d));
    }
    mt_row_sum(dweight, 0);
    if (valid && threadIdx.x == 0) dweights[row] = dweight[0];
}

extern "C" void mt_cuda_scale_rows_backward(void *dx, float *dweights, const void *dy, const void *x,
                                            const float *weights, int64_t M, int64_t C, mt_dtype dtype,
                                            mt_stream *stream) {
    if (M == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {dx, dy, x}, {C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        dim3 block = mt_reduction_block(mt_divide_up(C, N), 3, 256, 512);
        scale_rows_backward<E, N><<<mt_grid_size(M, block.y), block, 0, mt_cuda_stream(stream)>>>(
            (E *)dx, dweights, (const E *)dy, (const E *)x, weights, M, (int)C);
        MT_CUDA_LAUNCHED();
    });
}
