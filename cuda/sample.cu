/* sample.cu: samples a token from each row of logits by the rules of mt_token_draw (megatron.c). They order tokens by
 * (logit, lower id first), and cut and draw where a running sum of weights exp((x - best) / temperature) reaches a
 * limit.
 *
 * A block has a row. Weights are computed in double and rounded to fixed point: a sum of integers does not depend on
 * the order of threads, and differs from the sum of doubles by less than 2^-29 of it. Nothing is sorted; two searches
 * find the token at a limit:
 *   - in the order of ids: each warp sums a part of the columns; the part that reaches the limit is divided again;
 *   - in the order of logits: the same over a histogram of the logits' bits. In bf16 a bucket holds one value, so that
 *     counts give the sums; in fp32 a histogram of narrower buckets follows. Among equal logits the search by ids
 *     decides. */
#include "vector.cuh"

#include <cfloat>
#include <climits>
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

static constexpr int sample_threads = 384, sample_warps = sample_threads / 32, sample_packs = 2;

/* A number of tokens and the sum of their weights in fixed point. */
struct amount {
    uint64_t count, mass;
};

__device__ static inline amount operator+(const amount &a, const amount &b) {
    return {a.count + b.count, a.mass + b.mass};
}

/* The greatest logit so far and its column; the lowest column among equals. */
struct candidate {
    float value;
    int column;
    __device__ candidate first(const candidate &other) const {
        return other.value > value || (other.value == value && other.column < column) ? other : *this;
    }
};

/* The first element whose running sum reaches a limit, and the sum before it. index -1: the sum of all is less. */
struct found {
    int index;
    amount before;
};

/* Token `number` (from 1) among those with the logit `value`, and the amount of the tokens up to it. */
struct rank {
    float value;
    uint64_t number;
    amount through;
};

/* Unsigned integers in the order of logits; 0 and -0 are equal. */
__device__ static inline uint32_t key_of(float x) {
    uint32_t bits = x == 0 ? 0 : __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ static inline float value_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

template <class X> __device__ static inline X warp_total(X x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}

/* A histogram of keys without their lowest `shift` bits, downwards from the bucket of `top`. */
struct window {
    uint32_t top;
    int shift, buckets;
};

/* A row of logits and what its block knows of it, in shared memory. All threads of the block call each function, and
 * get the same result. */
template <class T, int N> struct sample_row {
    // A bucket of the first histogram holds several values.
    static constexpr bool narrows = !std::is_same_v<T, __nv_bfloat16>;
    static constexpr int shift = 16;                            // of the first histogram: bf16's bits
    static constexpr int buckets = narrows ? 1 << 11 : 1 << 13; // octaves of 128 values: 16, or 64
    const T *logits;
    int count;
    float best;           // the greatest logit
    double inverse, unit; // 1 / temperature; weight 1 in fixed point: `count` of them are less than 2^62
    window held;          // the histogram
    uint32_t below;       // the greatest key below it
    uint32_t counts[buckets];
    unsigned long long masses[narrows ? buckets : 1];
    amount parts[sample_warps];
    double sums[sample_warps];
    candidate greatest[sample_warps];

    __device__ double weight_of(float x) const {
        return exp(((double)x - (double)best) * inverse);
    }
    __device__ uint64_t mass_of(float x) const {
        return __double2ull_rn(weight_of(x) * unit);
    }

    /* Calls body(x, column) for the columns [first, last), which the lanes of a warp share. */
    template <class Body> __device__ void each(int first, int last, Body body) const {
        constexpr int K = sample_packs, step = 32 * N;
        int lane = threadIdx.x % 32;
        for (int base = first / N * N + lane * N; base < last; base += K * step) {
            mt_pack<T, N> packs[K];
#pragma unroll
            for (int k = 0; k < K; k++)
                if (base + k * step < last) packs[k] = mt_load<N>(logits + base + k * step);
#pragma unroll
            for (int k = 0; k < K; k++) {
                if (base + k * step >= last) break;
                mt_pack<float, N> x = mt_to_float(packs[k]);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    int column = base + k * step + i;
                    if (column >= first && column < last) body(x.value[i], column);
                }
            }
        }
    }
    /* The same for all columns, which the warps share. */
    template <class Body> __device__ void each(Body body) const {
        int part = (count / (sample_warps * N) + 1) * N, warp = threadIdx.x / 32;
        each(min(warp * part, count), min(warp * part + part, count), body);
    }

    /* The sum over the threads of the block. */
    __device__ amount total_of(amount mine) {
        mine = {warp_total(mine.count), warp_total(mine.mass)};
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
        __syncthreads();
        amount total = {0, 0};
        for (int w = 0; w < sample_warps; w++) total = total + parts[w];
        __syncthreads();
        return total;
    }

    /* The greatest logit, at the lowest column among equals; false if one is NaN. */
    __device__ bool find_candidate(candidate *found) {
        candidate mine = {-INFINITY, INT_MAX};
        bool numbers = true;
        each([&](float x, int column) {
            numbers &= !isnan(x);
            if (x > mine.value) mine = {x, column}; // a thread's columns ascend
        });
        for (int other = 16; other > 0; other /= 2) {
            float value = __shfl_xor_sync(0xffffffff, mine.value, other);
            mine = mine.first({value, __shfl_xor_sync(0xffffffff, mine.column, other)});
        }
        if (threadIdx.x % 32 == 0) greatest[threadIdx.x / 32] = mine;
        numbers = __syncthreads_and(numbers);
        for (int w = 0; w < sample_warps; w++) mine = mine.first(greatest[w]);
        *found = mine;
        return numbers;
    }

    /* Sets `best`. Returns its column; -1 if a logit is NaN or `best` is not finite. */
    __device__ int find_greatest() {
        candidate found;
        bool numbers = find_candidate(&found);
        if (threadIdx.x == 0) best = found.value;
        __syncthreads();
        return numbers && isfinite(found.value) ? found.column : -1;
    }

    /* log softmax(scale logits)[token] */
    __device__ float logp_of(int token, float scale) {
        float sum = 0;
        each([&](float x, int) { sum += mt_exp(scale * (x - best)); });
        double total = warp_total((double)sum);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = total;
        __syncthreads();
        total = 0;
        for (int w = 0; w < sample_warps; w++) total += sums[w];
        return (float)((double)scale * ((double)mt_to_float(logits[token]) - (double)best) - log(total));
    }

    /* The first of n elements at which the running sum of masses (or else of tokens) reaches limit(sum of all).
     * sum(first, last) is the amount of the elements [first, last), divided among the lanes of a warp. */
    template <class Sum, class Limit> __device__ found find(int n, bool by_mass, Sum sum, Limit limit_of) {
        amount before = {0, 0};
        uint64_t limit = 0;
        int first = 0, last = n;
        for (bool all = true;; all = false) {
            int part = (last - first + sample_warps - 1) / sample_warps;
            int begin = min(first + (int)threadIdx.x / 32 * part, last);
            amount mine = sum(begin, min(begin + part, last)), next;
            mine = {warp_total(mine.count), warp_total(mine.mass)};
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
            __syncthreads();
            if (all) {
                amount total = {0, 0};
                for (int w = 0; w < sample_warps; w++) total = total + parts[w];
                limit = limit_of(total);
            }
            int w = 0;
            for (; w < sample_warps; w++, before = next) {
                next = before + parts[w];
                if ((by_mass ? next.mass : next.count) >= limit) break;
            }
            __syncthreads();
            if (w == sample_warps) return {-1, before};
            first = min(first + w * part, last), last = min(first + part, last);
            if (part == 1) return {first, before};
        }
    }

    /* Counts the logits of each bucket; sums their masses where a bucket holds several values. */
    __device__ void fill(const window &w) {
        if (w.top == held.top && w.shift == held.shift && w.buckets == held.buckets) return;
        __syncthreads();
        bool several = narrows && w.shift > 0;
        if (threadIdx.x == 0) held = w, below = 0;
        for (int i = threadIdx.x; i < w.buckets; i += sample_threads) {
            counts[i] = 0;
            if (several) masses[i] = 0;
        }
        __syncthreads();
        uint32_t next = 0;
        each([&](float x, int) {
            uint32_t key = key_of(x), bucket = (w.top >> w.shift) - (key >> w.shift);
            if (bucket < (uint32_t)w.buckets) {
                atomicAdd(&counts[bucket], 1u);
                if (several) atomicAdd(&masses[bucket], (unsigned long long)mass_of(x));
            } else if (key < w.top) {
                next = max(next, key);
            }
        });
        atomicMax(&below, mt_warp_max(0xffffffff, next));
        __syncthreads();
    }

    /* The greatest key of a bucket of the histogram, and its logit if it holds one value: bf16's lowest bits are 0. */
    __device__ uint32_t last_key(int bucket) const {
        return ((held.top >> held.shift) - bucket) << held.shift | ((1u << held.shift) - 1);
    }
    __device__ float bucket_value(int bucket) const {
        uint32_t key = last_key(bucket);
        return value_of(key >> 31 ? key >> held.shift << held.shift : key);
    }
    __device__ amount bucket_amount(int bucket) const {
        uint64_t tokens = counts[bucket];
        if (tokens == 0) return {0, 0};
        if (narrows && held.shift > 0) return {tokens, masses[bucket]};
        return {tokens, tokens * mass_of(bucket_value(bucket))};
    }

    /* The first token, in the order of logits, whose running sum reaches `limit`; the sum of all reaches it. */
    __device__ rank find_rank(bool by_mass, uint64_t limit) {
        amount before = {0, 0};
        auto sum = [&](int first, int last) {
            amount mine = {0, 0};
            for (int i = first + (int)threadIdx.x % 32; i < last; i += 32) mine = mine + bucket_amount(i);
            return mine;
        };
        for (window w = {key_of(best), shift, buckets};;) {
            fill(w);
            uint64_t rest = limit - (by_mass ? before.mass : before.count);
            found at = find(w.buckets, by_mass, sum, [&](const amount &) { return rest; });
            before = before + at.before;
            if (at.index < 0) {
                w.top = below;
            } else if (narrows && w.shift > 0) {
                w.shift = w.shift > 11 ? w.shift - 11 : 0;
                w.top = last_key(at.index), w.buckets = 1 << (held.shift - w.shift);
            } else {
                float value = bucket_value(at.index);
                uint64_t mass = mass_of(value), step = by_mass ? mass : 1;
                rest = limit - (by_mass ? before.mass : before.count);
                uint64_t number = (rest + step - 1) / step;
                return {value, number, before + amount{number, number * mass}};
            }
        }
    }

    /* The tokens that top-k, top-p and min-p keep: the first ones in the order of logits. */
    __device__ amount keep(const mt_sampling &s) {
        amount kept = {(uint64_t)count, 0}, probable = {0, 0};
        bool cut = s.top_k > 0 && s.top_k < count;
        if (!cut || s.min_p > 0) {
            uint64_t mass = 0, probable_mass = 0;
            uint32_t tokens = 0;
            each([&](float x, int) {
                double weight = weight_of(x);
                uint64_t rounded = __double2ull_rn(weight * unit);
                mass += rounded;
                if (weight >= s.min_p) tokens++, probable_mass += rounded;
            });
            probable = total_of({tokens, probable_mass}), kept.mass = total_of({0, mass}).mass;
        }
        if (cut) kept = find_rank(false, (uint64_t)s.top_k).through;
        if (s.top_p < 1) {
            uint64_t limit = (uint64_t)fmax(1.0, ceil(s.top_p * (double)kept.mass));
            kept = find_rank(true, min(limit, kept.mass)).through;
        }
        if (s.min_p > 0 && probable.count == 0) probable = {1, (uint64_t)unit}; // the first token is always kept
        return s.min_p > 0 && probable.count < kept.count ? probable : kept;
    }

    /* Draws a token, by ids downwards if nothing is cut. */
    __device__ mt_sampled draw(const mt_sampling &s, double uniform) {
        uint64_t all = 0;
        int token;
        auto limit_of = [&](const amount &total) {
            all = total.mass;
            return min((uint64_t)(uniform * (double)all) + 1, all);
        };
        if (s.top_k > 0 || s.top_p < 1 || s.min_p > 0) {
            rank drawn = find_rank(true, limit_of(keep(s)));
            auto equal = [&](int first, int last) {
                uint32_t tokens = 0;
                each(first, last, [&](float x, int) { tokens += x == drawn.value; });
                return amount{tokens, 0};
            };
            token = find(count, false, equal, [&](const amount &) { return drawn.number; }).index;
        } else {
            auto sum = [&](int first, int last) {
                uint64_t mass = 0;
                each(count - last, count - first, [&](float x, int) { mass += mass_of(x); });
                return amount{0, mass};
            };
            token = count - 1 - find(count, true, sum, limit_of).index;
        }
        double weight = weight_of(mt_to_float(logits[token]));
        return {token, 0, (float)log(weight * unit / (double)all)};
    }
};

/* One block per row. Reads a row once for the argmax, twice to draw from all tokens, three times with cuts; once more
 * for top-p without top-k or for min-p, and once more for a log-probability: 2 bytes per logit in bf16, 4 in fp32. */
template <class T, int N>
__global__ void __launch_bounds__(sample_threads, 2) sample(const mt_sample_args a, const mt_sampling s) {
    __shared__ sample_row<T, N> row;
    if (threadIdx.x == 0) {
        row.logits = (const T *)a.logits + blockIdx.x * a.stride, row.count = (int)a.count, row.held.buckets = 0;
        row.inverse = fmin(fmax(1 / s.temperature, DBL_MIN), DBL_MAX); // no weight is NaN
        row.unit = (double)(1ull << (30 + __clz(row.count)));
    }
    __syncthreads();
    mt_sampled sampled = {row.find_greatest(), 0, 0};
    if (sampled.token >= 0 && s.temperature > 0) sampled = row.draw(s, a.uniforms[blockIdx.x]);
    if (sampled.token >= 0 && s.logprobs)
        sampled.logp = row.logp_of(sampled.token, s.logp_scale > 0 ? s.logp_scale : 1);
    if (threadIdx.x == 0) a.sampled[blockIdx.x] = sampled;
}

/* The argmax of a row by a cluster of blocks, an equal part of the columns each: few rows leave most multiprocessors
 * idle, and one block reads 50,000 logits in 12 us. */
enum { ARGMAX_BLOCKS = 8 };
template <class T, int N> __global__ void __launch_bounds__(sample_threads) argmax(const mt_sample_args a) {
#if __CUDA_ARCH__ >= 900
    __shared__ sample_row<T, N> row;
    __shared__ candidate parts[ARGMAX_BLOCKS]; // of the cluster's blocks, in its first block
    __shared__ bool numbers[ARGMAX_BLOCKS];
    cg::cluster_group cluster = cg::this_cluster();
    int rank = blockIdx.x, part = ((int)a.count / (ARGMAX_BLOCKS * N) + 1) * N, first = min(rank * part, (int)a.count);
    if (threadIdx.x == 0)
        row.logits = (const T *)a.logits + blockIdx.y * a.stride + first, row.count = min(part, (int)a.count - first);
    mt_wait_for_previous();
    cluster.sync(); // all blocks have begun
    candidate found;
    bool whole = row.find_candidate(&found);
    if (threadIdx.x == 0) {
        if (found.column < INT_MAX) found.column += first;
        cluster.map_shared_rank(parts, 0)[rank] = found, cluster.map_shared_rank(numbers, 0)[rank] = whole;
    }
    cluster.sync();
    if (rank > 0 || threadIdx.x > 0) return;
    for (int i = 1; i < ARGMAX_BLOCKS; i++) found = found.first(parts[i]), whole &= numbers[i];
    a.sampled[blockIdx.y] = {whole && isfinite(found.value) ? found.column : -1, 0, 0};
#endif
}

template <class T, int N> static void launch_argmax(const mt_sample_args &a, cudaStream_t stream) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ARGMAX_BLOCKS, (unsigned)a.T), config.blockDim = sample_threads, config.stream = stream;
    mt_cuda_launch_early(&config, attributes);
    config.attrs = attributes;
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {ARGMAX_BLOCKS, 1, 1};
    MT_CUDA(cudaLaunchKernelEx(&config, argmax<T, N>, a));
}

extern "C" void mt_cuda_sample(const mt_sample_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    bool few = a->T * ARGMAX_BLOCKS <= mt_cuda_device()->multiProcessorCount && mt_cuda_kernel_arch() >= 90;
    mt_by_type(dtype, mt_wide(dtype, {a->logits}, {a->stride}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        if (few && !(a->sampling->temperature > 0) && !a->sampling->logprobs)
            return launch_argmax<E, N>(*a, mt_cuda_stream(stream));
        sample<E, N><<<(unsigned)a->T, sample_threads, 0, mt_cuda_stream(stream)>>>(*a, *a->sampling);
        MT_CUDA_LAUNCHED();
    });
}
