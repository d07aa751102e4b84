/* moe.cu: mixture of experts except its matrix products: routing, auxiliary losses, dispatch order, combination of
 * rows, and activation. The host never waits for the router's decisions. Every sum has a fixed order, or is a sum of
 * integers, whose order does not matter; runs therefore repeat bit for bit. */
#include "activation.cuh"
#include "counting_sort.cuh"

#include <climits>
#include <cub/device/device_radix_sort.cuh>

/* ---- per-expert values of a token in a warp ---------------------------------------------------------------------- */

static_assert(MT_CUDA_EXPERTS * 4 <= max_shared_bytes && MT_CUDA_AUX_LOSS_EXPERTS * 16 <= max_shared_bytes);

/* mt_router in the form that kernels use. */
struct routing {
    int E, k;
    mt_score_function score;
    bool pre_softmax;
    int groups, group_topk, group_best;
    float scaling;
    bool bias_of_logits;
};

static routing routing_of(const mt_router *router) {
    MT_CHECK(router->topk <= MT_CUDA_ROUTER_TOPK && router->topk <= router->num_experts);
    int64_t best = router->group_best;
    if (router->num_groups > 0) {
        if (best == 0) best = router->topk / router->group_topk;
        best = min(best, router->num_experts / router->num_groups);
    }
    return {(int)router->num_experts, (int)router->topk,       router->score, router->pre_softmax,
            (int)router->num_groups,  (int)router->group_topk, (int)best,     router->scaling,
            router->bias_of_logits};
}

/* One value for each of a token's E experts, distributed over a warp. V > 0: V registers per lane, index v of lane l is
 * expert V l + v; V = 0: shared memory, for any E, and index v of lane l is expert 32 v + l. */
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
        bool full = E == 32 * V; // usual: no lane checks its experts
#pragma unroll
        for (int v = 0; v < V && full; v++) body(v, V * lane + v);
#pragma unroll
        for (int v = 0; v < V && !full; v++)
            if (V * lane + v < E) body(v, V * lane + v);
    } else {
        for (int v = 0; lane + 32 * v < E; v++) body(v, lane + 32 * v);
    }
}

/* Reads or writes a token's row of E values, by 16 bytes if its address and the number of registers allow. */
template <int V> __device__ static inline void read_row(per_expert<float, V> &x, const float *row, int E) {
    if constexpr (V > 0 && V % 4 == 0)
        if (E % 4 == 0 && (uintptr_t)row % 16 == 0) {
#pragma unroll
            for (int v = 0; v < V; v += 4) {
                int e = V * (threadIdx.x % 32) + v;
                mt_pack<float, 4> pack = mt_load<4>(row + e, e < E);
                for (int i = 0; i < 4; i++) x[v + i] = pack.value[i];
            }
            return;
        }
    each_expert<V>(E, [&](int v, int e) { x[v] = row[e]; });
}

template <int V> __device__ static inline void write_row(float *row, per_expert<float, V> &x, int E) {
    if constexpr (V > 0 && V % 4 == 0)
        if (E % 4 == 0 && (uintptr_t)row % 16 == 0) {
#pragma unroll
            for (int v = 0; v < V; v += 4) {
                int e = V * (threadIdx.x % 32) + v;
                if (e < E) mt_store(row + e, mt_pack<float, 4>{x[v], x[v + 1], x[v + 2], x[v + 3]});
            }
            return;
        }
    each_expert<V>(E, [&](int v, int e) { row[e] = x[v]; });
}

/* sortable_key maps finite floats to non-zero unsigned integers of the same order (-0 and 0 map to one key);
 * float_of_key is its inverse. */
__device__ static inline uint32_t sortable_key(float x) {
    int bits = __float_as_int(x + 0.0f);
    return (uint32_t)(bits ^ (bits >> 31 | INT_MIN));
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
    uint32_t max_key = mt_warp_max(all_lanes, best);
    return {max_key, mt_warp_min(all_lanes, best == max_key ? number : INT_MAX)};
}

/* Lane j receives the number of the j-th of a token's first k keys. Every lane first sorts its own keys, equal ones by
 * ascending index, so that each round compares one key per lane. Of equal keys of several lanes the lowest lane's has
 * the lowest index. */
template <int V, class Key> __device__ static inline int first_keys(int k, int n, Key key) {
    int lane = threadIdx.x % 32, mine = 0;
    if constexpr (V == 0) {
        ranked last = before_all();
        for (int j = 0; j < k; j++) {
            last = next_after<V>(last, n, key);
            if (lane == j) mine = last.number < n ? last.number : 0;
        }
    } else {
        __shared__ int of_warps[16][32]; // a lane's choice in each round
        int *chosen = of_warps[threadIdx.x / 32];
        uint32_t keys[V] = {}, lower = (1u << lane) - 1;
        int numbers[V] = {};
        each_expert<V>(n, [&](int v, int i) { keys[v] = key(v, i), numbers[v] = i; });
#pragma unroll
        for (int v = 1; v < V; v++)
#pragma unroll
            for (int i = v; i > 0; i--) {
                uint32_t left = keys[i - 1], right = keys[i];
                int number = numbers[i];
                bool swap = right > left;
                keys[i] = swap ? left : right, keys[i - 1] = swap ? right : left;
                numbers[i] = swap ? numbers[i - 1] : number, numbers[i - 1] = swap ? number : numbers[i - 1];
            }
        for (int j = 0; j < k; j++) {
            uint32_t max_key = mt_warp_max(all_lanes, keys[0]);
            uint32_t lanes = __ballot_sync(all_lanes, keys[0] == max_key);
            if (keys[0] != max_key || (lanes & lower) != 0) continue;
            chosen[j] = max_key > 0 ? numbers[0] : 0;
            for (int v = 0; v + 1 < V; v++) keys[v] = keys[v + 1], numbers[v] = numbers[v + 1];
            keys[V - 1] = 0;
        }
        __syncwarp();
        mine = chosen[lane];
        __syncwarp(); // before the next call writes
    }
    return mine;
}

/* As sigmoid, with a division that rounds correctly. */
__device__ static inline float logistic(float x) {
    return 1 / (1 + expf(-x));
}

/* The score of a logit by itself, and its derivative divided by it, as in megatron.c. */
__device__ static inline float own_score(mt_score_function score, float x) {
    return score == MT_SCORE_SIGMOID ? logistic(x) : sqrtf(softplus(x));
}

__device__ static inline float slope_of_score(mt_score_function score, float x) {
    if (score == MT_SCORE_SIGMOID) return logistic(-x);
    float sum = softplus(x);
    return sum > 0 ? 0.5f * logistic(x) / sum : 0.5f;
}

/* The maximum and the denominator of a softmax over a token's logits. */
struct softmax_of {
    float max, sum;
    __device__ float operator()(float logit) const {
        return mt_exp(logit - max) / sum;
    }
};

template <int V> __device__ static inline float max_of(per_expert<float, V> &x, int E) {
    float most = -INFINITY;
    each_expert<V>(E, [&](int v, int) { most = fmaxf(most, x[v]); }); // not a NaN
    return float_of_key(mt_warp_max(all_lanes, sortable_key(most)));
}

template <int V> __device__ static inline bool all_finite(per_expert<float, V> &x, int E) {
    bool finite = true;
    each_expert<V>(E, [&](int v, int) { finite &= isfinite(x[v]) != 0; });
    return __all_sync(all_lanes, finite);
}

template <int V> __device__ static inline softmax_of softmax_over(per_expert<float, V> &x, int E) {
    softmax_of softmax = {max_of<V>(x, E), 0};
    each_expert<V>(E, [&](int v, int) { softmax.sum += mt_exp(x[v] - softmax.max); });
    softmax.sum = mt_warp_sum(softmax.sum);
    return softmax;
}

/* Calls body(V, warps per block, bytes of shared memory). If E exceeds the registers, a block is one warp and has
 * `arrays` arrays of E values in shared memory; a warp always gets `more` bytes. */
template <class Body> static void with_slots(int64_t E, int64_t arrays, int64_t more, unsigned warps, Body body) {
    int64_t bytes = mt_divide_up(E, 32) * 32 * 4 * arrays + more;
    if (E <= 32)
        body(mt_width<1>(), warps, (size_t)(warps * more));
    else if (E <= 64)
        body(mt_width<2>(), warps, (size_t)(warps * more));
    else if (E <= 128)
        body(mt_width<4>(), warps, (size_t)(warps * more));
    else if (E <= 256)
        body(mt_width<8>(), warps, (size_t)(warps * more));
    else if (E <= 512)
        body(mt_width<16>(), warps, (size_t)(warps * more));
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
    int lane = threadIdx.x % 32;
    auto score = [&](float value) {
        return r.bias_of_logits ? value : r.score ? own_score(r.score, value) : softmax(value);
    };
    each_expert<V>(r.E,
                   [&](int v, int e) { x[v] = __uint_as_float(sortable_key(bias ? score(x[v]) + bias[e] : x[v])); });
    if (r.groups > 0)
        limit_groups<V>(x, group_keys, r, [&](float value) {
            if (bias) return value;
            if (r.score) return own_score(r.score, value);
            return r.pre_softmax ? softmax(value) : value;
        });
    int mine = first_keys<V>(r.k, r.E, [&](int v, int) { return __float_as_uint(x[v]); });
    float logit = lane < r.k ? logits[mine] : -INFINITY;
    if (r.score) {
        float score = lane < r.k ? own_score(r.score, logit) : 0, sum = mt_warp_sum(score);
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
    mt_wait_for_previous();
    mt_begin_next();
    if (t >= T) return;
    if (mt_is_padding(token_index, t)) {
        if (lane < r.k) probs[t * r.k + lane] = 0, experts[t * r.k + lane] = -1;
        return;
    }
    per_expert<float, V> x(warp_memory + r.groups * 4);
    logits += t * r.E;
    read_row<V>(x, logits, r.E);
    softmax_of softmax = {0, 1};
    if ((r.pre_softmax || (bias && !r.bias_of_logits)) && !r.score) softmax = softmax_over<V>(x, r.E);
    float prob = NAN;
    int expert = lane;
    bool finite = true; // of this lane's biases
    each_expert<V>(bias ? r.E : 0, [&](int, int e) { finite &= isfinite(bias[e]) != 0; });
    if (all_finite<V>(x, r.E) && __all_sync(all_lanes, finite))
        expert = choose<V>(&prob, x, softmax, logits, bias, (uint32_t *)warp_memory, r);
    else if (lane == 0)
        atomicAdd(invalid, 1);
    if (lane >= r.k) return;
    probs[t * r.k + lane] = prob * r.scaling;
    experts[t * r.k + lane] = expert;
}

/* A thread draws the four numbers of one counter. */
__global__ void random_logits(float *logits, const int64_t *token_index, int64_t T, int64_t E, uint64_t key) {
    int64_t counters = (E + 3) / 4, i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= T * counters) return;
    int64_t t = i / counters, counter = i % counters;
    uint4 words = mt_cuda_philox(key, (uint64_t)token_index[t], (uint64_t)counter);
    float2 low = mt_cuda_box_muller(words.x, words.y), high = mt_cuda_box_muller(words.z, words.w);
    float normal[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (counter * 4 + n < E) logits[t * E + counter * 4 + n] = normal[n];
}

extern "C" void mt_cuda_random_logits(float *logits, const int64_t *token_index, int64_t T, int64_t E, uint64_t key,
                                      mt_stream *stream) {
    if (T == 0) return;
    random_logits<<<mt_grid_size(T * ((E + 3) / 4), 256), 256, 0, mt_cuda_stream(stream)>>>(logits, token_index, T, E,
                                                                                            key);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_route_forward(const mt_route_args *a, mt_stream *stream) {
    if (a->T == 0) return;
    routing r = routing_of(a->router);
    with_slots(r.E, 1, mt_divide_up(r.groups, 32) * 128, 8, [&](auto slots, unsigned warps, size_t bytes) {
        mt_launch_early(route_forward<decltype(slots)::value>, mt_grid_size(a->T, warps), warps * 32, (int64_t)bytes,
                        mt_cuda_stream(stream), a->probs, a->experts, a->invalid, a->logits, a->bias, a->token_index,
                        a->T, r, (int)(bytes / warps));
    });
}

/* For probabilities q with gradients g, the gradient of the logits is q (g - sum(g q)) for a softmax, the same times
 * s' / s for scores s of their own divided by their sum, and g s' for a single one. This kernel is for a softmax over
 * all experts. One warp per token. Reads 4 (E + 2 k) bytes per token, writes 4 E. */
template <int V>
__global__ void route_backward_all(float *dlogits, const float *dprobs, const int32_t *experts, const float *logits,
                                   int64_t T, routing r, int shared_per_warp) {
    extern __shared__ __align__(16) char shared[];
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    mt_wait_for_previous();
    mt_begin_next();
    if (t >= T) return;
    per_expert<float, V> x(shared + threadIdx.x / 32 * shared_per_warp);
    logits += t * r.E, dlogits += t * r.E;
    int expert = lane < r.k ? experts[t * r.k + lane] : -1;
    bool chosen = expert >= 0, padding = __shfl_sync(all_lanes, expert, 0) < 0;
    float logit = chosen ? logits[expert] : -INFINITY, g = chosen ? dprobs[t * r.k + lane] : 0;
    read_row<V>(x, logits, r.E);
    softmax_of softmax = softmax_over<V>(x, r.E);
    float q = chosen ? softmax(logit) : 0, mean = mt_warp_sum(g * q);
    each_expert<V>(r.E, [&](int v, int) { x[v] = padding ? 0 : -r.scaling * softmax(x[v]) * mean; });
    write_row<V>(dlogits, x, r.E);
    __syncwarp(); // the chosen experts are overwritten below
    if (chosen) dlogits[expert] = r.scaling * q * (g - mean);
}

/* The same for a softmax over the chosen experts, or scores of their own: the others' gradients are 0. `width` lanes, a
 * power of two, share a token, and a warp zeroes the rows of its tokens together. Reads 12 k bytes per token, writes 4
 * E. */
__global__ void route_backward_chosen(float *dlogits, const float *dprobs, const int32_t *experts, const float *logits,
                                      int64_t T, routing r, int width) {
    int lane = threadIdx.x % 32, j = lane % width, tokens = 32 / width;
    int64_t first = ((int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * tokens, t = first + lane / width;
    auto over_lanes = [&](float x, auto combine) {
        for (int step = width / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(all_lanes, x, step));
        return x;
    };
    auto sum_of = [&](float x) { return over_lanes(x, [](float a, float b) { return a + b; }); };
    mt_wait_for_previous();
    mt_begin_next();
    if (first >= T) return;
    int expert = j < r.k && t < T ? experts[t * r.k + j] : -1;
    bool chosen = expert >= 0, single = r.score && r.k == 1;
    float logit = chosen ? logits[t * r.E + expert] : -INFINITY, g = chosen ? dprobs[t * r.k + j] : 0;
    float *rows = dlogits + first * r.E;
    int count = (int)min((int64_t)tokens, T - first) * r.E;
    if (r.E % 4 == 0 && (uintptr_t)dlogits % 16 == 0)
        for (int i = lane * 4; i < count; i += 128) mt_store(rows + i, mt_pack<float, 4>{});
    else
        for (int i = lane; i < count; i += 32) rows[i] = 0;
    float max_logit = over_lanes(logit, [](float a, float b) { return mt_maximum(a, b); });
    float q = !chosen ? 0 : r.score ? own_score(r.score, logit) : expf(logit - max_logit);
    float total = sum_of(q);
    if (!single) q /= total + (r.score ? 1e-20f : 0);
    float mean = single ? 0 : sum_of(g * q);
    __syncwarp(); // the rows are zeroed
    if (chosen)
        dlogits[t * r.E + expert] = r.scaling * q * (g - mean) * (r.score ? slope_of_score(r.score, logit) : 1.0f);
}

extern "C" void mt_cuda_route_backward(const mt_route_args *a, mt_stream *stream) {
    if (a->T == 0) return;
    routing r = routing_of(a->router);
    int width = 1;
    while (width < r.k) width *= 2;
    if (r.score || !r.pre_softmax) {
        mt_launch_early(route_backward_chosen, mt_grid_size(a->T, 256 / width), 256, 0, mt_cuda_stream(stream),
                        a->dlogits, a->dprobs, a->experts, a->logits, a->T, r, width);
        return;
    }
    with_slots(r.E, 1, 0, 8, [&](auto slots, unsigned warps, size_t bytes) {
        mt_launch_early(route_backward_all<decltype(slots)::value>, mt_grid_size(a->T, warps), warps * 32,
                        (int64_t)bytes, mt_cuda_stream(stream), a->dlogits, a->dprobs, a->experts, a->logits, a->T, r,
                        (int)(bytes / warps));
    });
}

/* ---- auxiliary losses -------------------------------------------------------------------------------------------- */

/* Replaces a token's logits by its scores, normalised to sum 1. Returns the softmax over the logits. */
template <int V> __device__ static inline softmax_of normalise_scores(per_expert<float, V> &x, const routing &r) {
    softmax_of softmax = {max_of<V>(x, r.E), 0};
    float sum = 0;
    each_expert<V>(r.E, [&](int v, int) {
        float weight = mt_exp(x[v] - softmax.max);
        softmax.sum += weight;
        x[v] = r.score ? own_score(r.score, x[v]) : weight;
        sum += x[v];
    });
    softmax.sum = mt_warp_sum(softmax.sum);
    sum = 1 / (r.score ? mt_warp_sum(sum) + 1e-20f : softmax.sum);
    each_expert<V>(r.E, [&](int v, int) { x[v] *= sum; });
    return softmax;
}

__device__ static inline double warp_sum(double x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(all_lanes, x, lane);
    return x;
}

/* Scores are summed as integer multiples of 2^-40: exact for scores down to 2^-16, and independent of the order. In
 * shared memory, where additions of 64 bits are slow, a sum has two words of multiples of 2^-40 and of 2^-20. */
static constexpr float score_unit = 0x1p40f;
static constexpr int low_bits = 20;

/* Accumulators of the forward, which are zero at its start: sums of scores and counts [S, E], a flag per sequence that
 * a score was NaN, the number of blocks that are done; and the z-loss sum of each block, which need not be zero. */
struct aux_loss_sums {
    unsigned long long *scores;
    int32_t *counts, *has_nan, *blocks_done;
    double *z;
};

static constexpr int tokens_per_warp = 4, aux_loss_warps = 16;

/* Adds a warp's sums of scores of one sequence to `to`, or to the block's in shared memory, and resets them. */
template <int V>
__device__ static inline void aux_loss_flush(const aux_loss_sums &to, uint32_t *block_sums,
                                             per_expert<unsigned long long, V> &scores, int64_t sequence, int E) {
    each_expert<V>(E, [&](int v, int e) {
        if (block_sums) {
            atomicAdd(&block_sums[e], (uint32_t)scores[v] & ((1u << low_bits) - 1));
            atomicAdd(&block_sums[E + e], (uint32_t)(scores[v] >> low_bits));
        } else if (scores[v] > 0) {
            atomicAdd(&to.scores[sequence * E + e], scores[v]);
        }
        scores[v] = 0;
    });
}

/* Adds the scores of one token (logits x) to a warp's sums, and counts its choices. Returns the softmax over the
 * logits. */
template <int V>
__device__ static inline softmax_of aux_loss_add(per_expert<unsigned long long, V> &scores, int32_t *counts,
                                                 int32_t *has_nan, per_expert<float, V> &x, const routing &r) {
    bool finite = all_finite<V>(x, r.E);
    int lane = threadIdx.x % 32, mine = lane;
    if (finite) mine = first_keys<V>(r.k, r.E, [&](int v, int) { return sortable_key(x[v]); });
    if (lane < r.k) atomicAdd(&counts[mine], 1);
    softmax_of softmax = normalise_scores<V>(x, r);
    each_expert<V>(r.E, [&](int v, int) {
        if (x[v] > 0) scores[v] += __float2ull_rn(x[v] * score_unit);
        if (!finite && isnan(x[v])) *has_nan = 1;
    });
    return softmax;
}

/* The last block writes the results [2, S, E] in fp32, adds up the z-loss of the blocks in a fixed order, and resets
 * the accumulators. */
__device__ static inline void aux_loss_results(const mt_aux_loss_args &a, const aux_loss_sums &from, int E) {
    int64_t n = a.S * E;
    double z = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        float score = (float)((double)__ldcg(&from.scores[i]) / (double)score_unit);
        a.sums[i] = __ldcg(&from.has_nan[i / E]) ? NAN : score;
        a.sums[n + i] = (float)__ldcg(&from.counts[i]);
        from.scores[i] = 0, from.counts[i] = 0;
    }
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) z += __ldcg(&from.z[i]);
    __shared__ double of_warp[32];
    z = warp_sum(z);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = z;
    __syncthreads();
    for (int64_t s = threadIdx.x; s < a.S; s += blockDim.x) from.has_nan[s] = 0;
    if (threadIdx.x > 0) return;
    for (int w = 1; w < blockDim.x / 32; w++) z += of_warp[w];
    a.z_sum[0] += z;
    *from.blocks_done = 0;
}

/* Adds a block's sums to those of all blocks. Returns true in the last block that does so, which sees those of all. */
__device__ static inline bool aux_loss_block_done(const aux_loss_sums &to, const uint32_t *block_sums, double z,
                                                  int E) {
    __shared__ double of_warp[aux_loss_warps];
    __shared__ bool last;
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = z;
    __syncthreads();
    for (int e = threadIdx.x; block_sums && e < E; e += blockDim.x) {
        unsigned long long score = ((unsigned long long)block_sums[E + e] << low_bits) + block_sums[e];
        if (score > 0) atomicAdd(&to.scores[e], score);
        if (block_sums[2 * E + e] > 0) atomicAdd(&to.counts[e], (int32_t)block_sums[2 * E + e]);
    }
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; w++) z += of_warp[w];
        to.z[blockIdx.x] = z;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(to.blocks_done, 1) == (int)gridDim.x - 1;
    __syncthreads();
    return last;
}

/* A warp processes up to tokens_per_warp consecutive tokens. If there is only one sequence, the warps of a block first
 * add up in shared memory (`in_block`). The last block writes the results. Reads 4 E bytes per token. */
template <int V>
__global__ void __launch_bounds__(32 * aux_loss_warps)
    aux_loss_forward(aux_loss_sums to, mt_aux_loss_args a, routing r, int shared_per_warp, bool in_block) {
    extern __shared__ __align__(16) char shared[];
    char *warp_memory = shared + threadIdx.x / 32 * shared_per_warp;
    uint32_t *block_sums = in_block ? (uint32_t *)(shared + blockDim.x / 32 * shared_per_warp) : NULL;
    int64_t first = ((int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * tokens_per_warp;
    int64_t slots = (r.E + 31) / 32 * 32, current = 0;
    per_expert<unsigned long long, V> scores(warp_memory);
    per_expert<float, V> x(warp_memory + slots * 8);
    for (int i = threadIdx.x; block_sums && i < 3 * r.E; i += blockDim.x) block_sums[i] = 0;
    __syncthreads();
    each_expert<V>(r.E, [&](int v, int) { scores[v] = 0; });
    mt_wait_for_previous();
    mt_begin_next();
    softmax_of mine = {0, 1}; // of the token whose z-loss this lane computes
    for (int64_t t = first; t < min(first + tokens_per_warp, a.T); t++) {
        if (mt_is_padding(a.token_index, t)) continue;
        int64_t s = a.sequence ? a.sequence[t] : 0;
        if (s != current) aux_loss_flush<V>(to, block_sums, scores, current, r.E);
        current = s;
        read_row<V>(x, a.logits + t * r.E, r.E);
        int32_t *counts = block_sums ? (int32_t *)block_sums + 2 * r.E : to.counts + s * r.E;
        softmax_of softmax = aux_loss_add<V>(scores, counts, &to.has_nan[s], x, r);
        if (threadIdx.x % 32 == t - first) mine = softmax;
    }
    aux_loss_flush<V>(to, block_sums, scores, current, r.E);
    double lse = (double)mine.max + log((double)mine.sum); // 0 in lanes without a token
    if (aux_loss_block_done(to, block_sums, warp_sum(lse * lse), r.E)) aux_loss_results(a, to, r.E);
}

extern "C" void mt_cuda_aux_loss_forward(const mt_aux_loss_args *a, mt_stream *stream) {
    routing r = routing_of(a->router);
    int64_t accumulated = a->S * r.E, zeroed = accumulated * 12 + a->S * 4 + 4;
    int64_t most_blocks = mt_divide_up(a->T, tokens_per_warp) + 1;
    aux_loss_sums to;
    to.z = (double *)mt_cuda_workspace(stream, most_blocks * 8 + zeroed);
    to.scores = (unsigned long long *)(zeroed <= mt_zeros_bytes ? stream->zeros : to.z + most_blocks);
    to.counts = (int32_t *)(to.scores + accumulated);
    to.has_nan = to.counts + accumulated;
    to.blocks_done = to.has_nan + a->S;
    if (zeroed > mt_zeros_bytes) mt_cuda_memory_zero(to.scores, zeroed, stream);
    with_slots(r.E, 3, 0, aux_loss_warps, [&](auto slots, unsigned warps, size_t bytes) {
        size_t room = (size_t)r.E * 12;
        bool in_block = !a->sequence && bytes + room <= (size_t)(max_shared_bytes - max_static_bytes);
        mt_launch_early(aux_loss_forward<decltype(slots)::value>,
                        mt_grid_size(a->T > 0 ? a->T : 1, warps * tokens_per_warp), warps * 32,
                        (int64_t)(in_block ? bytes + room : bytes), mt_cuda_stream(stream), to, *a, r,
                        (int)(bytes / warps), in_block);
    });
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

/* One warp per token. Reads 8 E bytes per token and writes 4 E; the counts come from the caches. Since the scores sum
 * to 1, the counts may be taken relative to their mean, which needs fewer digits. */
template <int V> __global__ void aux_loss_backward(mt_aux_loss_args a, routing r, int shared_per_warp) {
    extern __shared__ __align__(16) char shared[];
    char *warp_memory = shared + threadIdx.x / 32 * shared_per_warp;
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, slots = (r.E + 31) / 32 * 32;
    mt_wait_for_previous();
    mt_begin_next();
    if (t >= a.T || mt_is_padding(a.token_index, t)) return;
    per_expert<float, V> x(warp_memory), d(warp_memory + slots * 4), counts(warp_memory + slots * 8);
    const float *logits = a.logits + t * r.E;
    read_row<V>(x, logits, r.E);
    read_row<V>(d, a.dlogits + t * r.E, r.E);
    read_row<V>(counts, a.counts + (a.sequence ? a.sequence[t] : 0) * r.E, r.E);
    softmax_of softmax = normalise_scores<V>(x, r);
    float total = 0, mean = 0, lse = softmax.max + logf(softmax.sum);
    each_expert<V>(r.E, [&](int v, int) { total += counts[v]; });
    total = mt_warp_sum(total);
    float factor = total > 0 ? a.aux_scale * (float)r.E / total : 0, average = total / (float)r.E;
    each_expert<V>(r.E, [&](int v, int) {
        counts[v] -= average;
        mean += counts[v] * x[v];
    });
    mean = mt_warp_sum(mean);
    each_expert<V>(r.E, [&](int v, int e) {
        float aux = factor * (counts[v] - mean) * x[v], probability = x[v];
        if (r.score) aux *= slope_of_score(r.score, logits[e]), probability = expf(logits[e] - lse);
        d[v] += aux + 2 * a.z_scale * lse * probability;
    });
    write_row<V>(a.dlogits + t * r.E, d, r.E);
}

extern "C" void mt_cuda_aux_loss_backward(const mt_aux_loss_args *a, mt_stream *stream) {
    if (a->T == 0) return;
    routing r = routing_of(a->router);
    with_slots(r.E, 3, 0, 8, [&](auto slots, unsigned warps, size_t bytes) {
        mt_launch_early(aux_loss_backward<decltype(slots)::value>, mt_grid_size(a->T, warps), warps * 32,
                        (int64_t)bytes, mt_cuda_stream(stream), *a, r, (int)(bytes / warps));
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

/* ---- quantile balancing ------------------------------------------------------------------------------------------ */

/* alpha[t] = the (k + 1)-th greatest of a token's logits + bias; NaN for a token that does not count. A warp per token.
 */
template <int V>
__global__ void quantile_thresholds(float *alpha, const float *logits, const float *bias, const int64_t *token_index,
                                    int64_t T, int E, int k, int shared_per_warp) {
    extern __shared__ __align__(16) char shared[];
    int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (t >= T) return;
    per_expert<float, V> x(shared + threadIdx.x / 32 * shared_per_warp);
    read_row<V>(x, logits + t * E, E);
    if (mt_is_padding(token_index, t) || !all_finite<V>(x, E)) {
        if (lane == 0) alpha[t] = NAN;
        return;
    }
    each_expert<V>(E, [&](int v, int e) { x[v] = __uint_as_float(sortable_key(x[v] + bias[e])); });
    ranked last = before_all();
    for (int j = 0; j <= k; j++) last = next_after<V>(last, E, [&](int v, int) { return __float_as_uint(x[v]); });
    if (lane == 0) alpha[t] = float_of_key(last.key);
}

enum { QUANTILE_EXPERTS = 8, QUANTILE_THREADS = 1024, DIGITS = 256 };

/* sums[e] += the (n k / E + 1)-th greatest of logits[e] - alpha over the n tokens that count; sums[E] += 1. A block has
 * some experts, whose keys it reads four times, each time with one more byte of the result known. Counts are integers,
 * so their order does not matter. */
__global__ void __launch_bounds__(QUANTILE_THREADS)
    quantile_sums(float *sums, const float *logits, const float *alpha, int64_t T, int E, int k) {
    __shared__ uint32_t counts[DIGITS][QUANTILE_EXPERTS], known[QUANTILE_EXPERTS]; // known: the first bytes of the key
    __shared__ int64_t rank[QUANTILE_EXPERTS]; // of the result among the keys that begin so; -1: there is none
    const int own = threadIdx.x % QUANTILE_EXPERTS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int expert = blockIdx.x * QUANTILE_EXPERTS + own;
    if (threadIdx.x < QUANTILE_EXPERTS) known[threadIdx.x] = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS * QUANTILE_EXPERTS; i += QUANTILE_THREADS) counts[0][i] = 0;
        __syncthreads();
        const uint32_t begins = known[own];
        for (int64_t t = threadIdx.x / QUANTILE_EXPERTS; t < T && expert < E;
             t += QUANTILE_THREADS / QUANTILE_EXPERTS) {
            float threshold = alpha[t], logit = logits[t * E + expert];
            uint32_t key = sortable_key(logit - threshold);
            if (isnan(threshold) || (shift < 24 && key >> (shift + 8) != begins)) continue;
            atomicAdd(&counts[key >> shift & (DIGITS - 1)][own], 1u);
        }
        __syncthreads();
        if (warp < QUANTILE_EXPERTS) { // of an expert: a lane has 8 digits, the greatest in the first one
            uint32_t mine = 0;
            for (int i = 0; i < DIGITS / 32; i++) mine += counts[DIGITS - 1 - (DIGITS / 32 * lane + i)][warp];
            uint32_t before = mine;
            for (int step = 1; step < 32; step *= 2) {
                uint32_t other = __shfl_up_sync(all_lanes, before, step);
                if (lane >= step) before += other;
            }
            int64_t tokens = __shfl_sync(all_lanes, before, 31), wanted = shift == 24 ? tokens * k / E : rank[warp];
            if (shift == 24 && wanted >= tokens) wanted = -1;
            before -= mine;
            __syncwarp();
            if (lane == 0) rank[warp] = wanted;
            __syncwarp();
            if (wanted >= before && wanted < (int64_t)before + mine) { // one lane
                int64_t left = wanted - before;
                int digit = DIGITS - 1 - DIGITS / 32 * lane;
                for (; left >= counts[digit][warp]; digit--) left -= counts[digit][warp];
                rank[warp] = left, known[warp] = known[warp] << 8 | (uint32_t)digit;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x >= QUANTILE_EXPERTS || expert >= E || rank[own] < 0) return;
    sums[expert] += float_of_key(known[own]);
    if (expert == 0) sums[E] += 1;
}

extern "C" void mt_cuda_quantile_sums(const mt_quantile_args *a, mt_stream *stream) {
    if (a->T == 0) return;
    MT_CHECK(a->k < a->E && a->T < UINT32_MAX);
    float *alpha = (float *)mt_cuda_workspace(stream, a->T * (int64_t)sizeof(float));
    with_slots(a->E, 1, 0, 8, [&](auto slots, unsigned warps, size_t bytes) {
        quantile_thresholds<decltype(slots)::value>
            <<<mt_grid_size(a->T, warps), warps * 32, bytes, mt_cuda_stream(stream)>>>(
                alpha, a->logits, a->bias, a->token_index, a->T, (int)a->E, (int)a->k, (int)(bytes / warps));
    });
    MT_CUDA_LAUNCHED();
    quantile_sums<<<(unsigned)mt_divide_up(a->E, QUANTILE_EXPERTS), QUANTILE_THREADS, 0, mt_cuda_stream(stream)>>>(
        a->sums, a->logits, alpha, a->T, (int)a->E, (int)a->k);
    MT_CUDA_LAUNCHED();
}

/* One block. */
__global__ void quantile_bias_step(float *bias, const float *sums, const float *scale, int64_t E, double ema) {
    __shared__ double of_warp[32];
    if (scale[0] < 0 || sums[E] == 0) return;
    double mean = 0;
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
        float moved = (float)(ema * (double)bias[e] - (1 - ema) * (double)sums[e] / (double)sums[E]);
        bias[e] = moved, mean += (double)moved / (double)E;
    }
    mean = warp_sum(mean);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mean;
    __syncthreads();
    mean = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0);
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x) bias[e] = (float)((double)bias[e] - mean);
}

extern "C" void mt_cuda_quantile_bias_step(float *bias, const float *sums, const float *scale, int64_t E, double ema,
                                           mt_stream *stream) {
    quantile_bias_step<<<1, 512, 0, mt_cuda_stream(stream)>>>(bias, sums, scale, E, ema);
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
    uint32_t order = ~sortable_key(isnan(prob) ? INFINITY : prob);
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

/* mt_dispatch in the form that kernels use, for a sort into `sort.bins` bins, the experts of the range that is
 * dispatched. sort.n: number of choices. */
struct dispatch_info {
    mt_counting sort;
    int topk, first, local, copies, capacity;
};

/* The bins of this thread's choices, -1 for choices of other experts. */
template <int items>
__device__ static inline void read_bins(int (&bins)[items], const int32_t *experts, const dispatch_info &s) {
    int64_t first = mt_first_item(s.sort);
#pragma unroll
    for (int j = 0; j < items; j++) {
        int expert = first + 32 * j < s.sort.n ? experts[first + 32 * j] : -1;
        int64_t bin = (int64_t)expert - s.first;
        bins[j] = expert >= 0 && bin >= 0 && bin < s.sort.bins ? (int)bin : -1;
    }
}

/* The first row of a bin's first copy, and the distance from there to the next copy. first[bins + 1]: the number of
 * choices of lower bins. */
struct bin_rows {
    int32_t start, to_next;
    __device__ bin_rows(const int32_t *first, unsigned bin, const dispatch_info &s) {
        unsigned place = bin / (unsigned)s.local, lowest = place * s.local;
        to_next = s.capacity > 0 ? s.local * s.capacity : first[lowest + s.local] - first[lowest];
        start = s.capacity > 0 ? (place * s.copies * s.local + bin - lowest) * s.capacity
                               : first[lowest] * s.copies + first[bin] - first[lowest];
    }
};

/* -1 in the rows without a choice: after the last packed row, or in the free rows of each destination. */
__device__ static inline void clear_free_rows(int32_t *choice, int32_t *token, const int32_t *first, int64_t M,
                                              const dispatch_info &s) {
    int64_t begin = s.capacity > 0 ? 0 : (int64_t)first[s.sort.bins] * s.copies;
    for (int64_t m = begin + blockIdx.x * blockDim.x + threadIdx.x; m < M; m += gridDim.x * blockDim.x) {
        if (s.capacity > 0) {
            int v = (int)m / s.capacity, bin = v / s.local / s.copies * s.local + v % s.local;
            if (bin < s.sort.bins && (int)m - v * s.capacity < first[bin + 1] - first[bin]) continue;
        }
        choice[m] = -1, token[m] = -1;
    }
}

template <int items> __global__ void plan_count(int32_t *counts, const int32_t *experts, dispatch_info s) {
    int bins[items];
    mt_wait_for_previous();
    mt_begin_next();
    read_bins(bins, experts, s);
    mt_count_bins(counts, bins, s.sort);
}

/* Reads 4 bytes per choice (as does plan_count), writes 4 for each copy of a choice and 8 for each row. Launch latency
 * dominates the time. */
template <int items>
__global__ void plan_place(int32_t *offsets, int32_t *position, int32_t *choice, int32_t *token, const int32_t *counts,
                           const int32_t *experts, int64_t M, dispatch_info s) {
    int bins[items];
    int32_t rank[items];
    mt_wait_for_previous();
    mt_begin_next();
    read_bins(bins, experts, s);
    const int32_t *first = mt_rank_items(rank, bins, counts, s.sort);
    int destinations = s.sort.bins * s.copies;
    for (int v = threadIdx.x; blockIdx.x == 0 && v <= destinations; v += blockDim.x) {
        int place = v / s.local / s.copies, copy = v / s.local % s.copies;
        if (v < destinations) {
            bin_rows rows(first, place * s.local + v % s.local, s);
            offsets[v] = rows.start + rows.to_next * copy;
        } else {
            offsets[v] = s.capacity > 0 ? destinations * s.capacity : first[s.sort.bins] * s.copies;
        }
    }
    int64_t begin = mt_first_item(s.sort);
#pragma unroll
    for (int j = 0; j < items; j++) {
        int64_t i = begin + 32 * j;
        if (i >= s.sort.n) break;
        bool valid = bins[j] >= 0 && (s.capacity == 0 || rank[j] < s.capacity);
        bin_rows rows(first, valid ? bins[j] : 0, s);
        uint32_t of_token = (uint32_t)i / (uint32_t)s.topk;
        for (int copy = 0; copy < s.copies; copy++) {
            int32_t row = valid ? rows.start + rows.to_next * copy + rank[j] : -1;
            position[i * s.copies + copy] = row;
            if (valid) choice[row] = (int32_t)i, token[row] = (int32_t)of_token;
        }
    }
    clear_free_rows(choice, token, first, M, s);
}

extern "C" void mt_cuda_dispatch_plan(const mt_dispatch_args *a, mt_stream *stream) {
    const mt_dispatch *dispatch = a->dispatch;
    int64_t n = a->T * dispatch->topk;
    MT_CHECK(n < INT_MAX && a->M < INT_MAX && dispatch->capacity < INT_MAX);
    dispatch_info s = {mt_counting_of(n, dispatch->count), (int)dispatch->topk,   (int)dispatch->first,
                       (int)dispatch->num_local,           (int)dispatch->copies, (int)dispatch->capacity};
    int32_t *counts = (int32_t *)mt_cuda_workspace(stream, mt_counting_bytes(s.sort));
    cudaStream_t on = mt_cuda_stream(stream);
    mt_by_items(s.sort, [&](auto items) {
        if (n > 0)
            mt_launch_early(plan_count<decltype(items)::value>, (unsigned)s.sort.blocks, s.sort.threads,
                            s.sort.stride * 4, on, counts, a->experts, s);
        mt_launch_ranks(plan_place<decltype(items)::value>, s.sort, on, a->offsets, a->position, a->row_choice,
                        a->row_token, counts, a->experts, a->M, s);
    });
}

/* arrived[sources, local] + total: the first row of each (source, expert) in order of arrival; sorted[local, sources]:
 * its first row in order of experts; offsets: the first row of each expert. One block. */
__global__ void __launch_bounds__(1024) exchange_offsets(int32_t *arrived, int32_t *sorted, int32_t *offsets,
                                                         const int32_t *counts, int sources, int local) {
    int64_t n = (int64_t)sources * local;
    mt_prefix_sums(
        n, [&](int64_t i) { return counts[i]; }, [&](int64_t i, int32_t before) { arrived[i] = before; });
    mt_prefix_sums(
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

extern "C" void mt_cuda_combine_rows(const mt_combine_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->out, a->in, a->base}, {a->C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_many_row_grid grid = mt_many_rows(a->T, mt_divide_up(a->C, N), 1);
        combine_rows<E, N><<<grid.blocks, grid.block, 0, mt_cuda_stream(stream)>>>(
            (E *)a->out, (const E *)a->in, a->position, (const E *)a->base, a->T, (int)a->n, (int)a->C,
            grid.blocks_per_row);
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

extern "C" void mt_cuda_scale_rows_forward(const mt_scale_rows_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->M == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->y, a->x}, {a->C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_many_row_grid grid = mt_many_rows(a->M, mt_divide_up(a->C, N), 1);
        scale_rows_forward<E, N><<<grid.blocks, grid.block, 0, mt_cuda_stream(stream)>>>(
            (E *)a->y, (const E *)a->x, a->weights, a->M, (int)a->C, grid.blocks_per_row);
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

extern "C" void mt_cuda_scale_rows_backward(const mt_scale_rows_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->M == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->dx, a->dy, a->x}, {a->C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        dim3 block = mt_reduction_block(mt_divide_up(a->C, N), 3, 256, 512);
        scale_rows_backward<E, N><<<mt_grid_size(a->M, block.y), block, 0, mt_cuda_stream(stream)>>>(
            (E *)a->dx, a->dweights, (const E *)a->dy, (const E *)a->x, a->weights, a->M, (int)a->C);
        MT_CUDA_LAUNCHED();
    });
}
