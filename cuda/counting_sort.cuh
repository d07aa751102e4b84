/* counting_sort.cuh: a stable counting sort by small numbers, called bins, in two kernels.
 *
 * The first kernel counts each bin's items in each block (mt_count_bins). In the second (mt_rank_items) every block
 * finds from the counts of all blocks where each bin begins, and how many of its items precede the block's own. That
 * reads all counts once per block, so that no third kernel has to add them up; they come from L2, and large sorts take
 * more items per block. Nothing depends on the order in which blocks or threads arrive. */
#ifndef MT_CUDA_COUNTING_SORT_CUH
#define MT_CUDA_COUNTING_SORT_CUH

#include "vector.cuh"

static constexpr uint32_t all_lanes = 0xffffffff;
static constexpr int64_t max_shared_bytes = 48 * 1024; // shared memory of a block without an opt-in
static constexpr int64_t max_static_bytes = 512;       // its part that arrays of a fixed size take

/* A warp sorts 32 * items consecutive items. Lane l has the items l, l + 32, l + 64, ... of these. The counts are
 * [blocks, stride]. */
struct mt_counting {
    int64_t n;
    int bins, blocks, stride, items;
    unsigned threads;
    int64_t shared_bytes; // of the second kernel
};

static inline mt_counting mt_counting_of(int64_t n, int64_t bins) {
    mt_counting s = {n, (int)bins, 0, (int)mt_divide_up(bins, 32) * 32, 2, 512, 0};
    auto shared = [&] { return mt_divide_up((2 + s.threads / 32) * bins + 1, 4) * 16; };
    while (s.threads > 32 && shared() > max_shared_bytes) s.threads /= 2;
    if (n > 256 * s.threads * s.items) s.items = 16;
    s.blocks = (int)mt_divide_up(n, s.threads * s.items);
    s.shared_bytes = shared();
    return s;
}

/* Bytes of the counts. */
static inline int64_t mt_counting_bytes(const mt_counting &s) {
    return (int64_t)s.blocks * s.stride * 4;
}

/* Calls body(mt_width<items>()). */
template <class Body> static void mt_by_items(const mt_counting &s, Body body) {
    if (s.items == 2)
        body(mt_width<2>());
    else
        body(mt_width<16>());
}

/* Enqueues the second kernel. Thousands of bins need more shared memory than a kernel may use unasked. */
template <class... P, class... A>
static void mt_launch_ranks(void (*kernel)(P...), const mt_counting &s, cudaStream_t stream, const A &...arguments) {
    if (s.shared_bytes > max_shared_bytes - max_static_bytes) mt_cuda_take_shared(kernel, s.shared_bytes);
    mt_launch_early(kernel, (unsigned)(s.blocks > 0 ? s.blocks : 1), s.threads, s.shared_bytes, stream, arguments...);
}

/* The number of this thread's first item; each further one is 32 later. */
__device__ static inline int64_t mt_first_item(const mt_counting &s) {
    return ((int64_t)blockIdx.x * s.threads + threadIdx.x / 32 * 32) * s.items + threadIdx.x % 32;
}

/* Calls to(i, of(0) + ... + of(i - 1)) for i <= n, in one block. */
template <class Of, class To> __device__ static inline void mt_prefix_sums(int64_t n, Of of, To to) {
    __shared__ int32_t of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t before = 0;
    for (int64_t first = 0; first < n; first += blockDim.x) {
        int64_t i = first + threadIdx.x;
        int32_t x = i < n ? of(i) : 0, sum = x;
        for (int step = 1; step < 32; step *= 2) {
            int32_t left = __shfl_up_sync(all_lanes, sum, step);
            if (lane >= step) sum += left;
        }
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        int32_t warps = lane < blockDim.x / 32 ? of_warp[lane] : 0;
        for (int step = 1; step < 32; step *= 2) {
            int32_t left = __shfl_up_sync(all_lanes, warps, step);
            if (lane >= step) warps += left;
        }
        int32_t of_others = __shfl_sync(all_lanes, warps, warp > 0 ? warp - 1 : 0);
        if (i < n) to(i, before + (warp > 0 ? of_others : 0) + sum - x);
        before += __shfl_sync(all_lanes, warps, 31);
        __syncthreads();
    }
    if (threadIdx.x == 0) to(n, before);
    __syncthreads();
}

/* First kernel: this block's row of the counts. A bin of -1 is not counted. Needs 4 bytes of shared memory per bin. */
template <int items>
__device__ static inline void mt_count_bins(int32_t *counts, const int (&bins)[items], const mt_counting &s) {
    extern __shared__ __align__(16) int32_t mt_sort_memory[];
    for (int bin = threadIdx.x; bin < s.stride; bin += blockDim.x) mt_sort_memory[bin] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < items; j++)
        if (bins[j] >= 0) atomicAdd(&mt_sort_memory[bins[j]], 1);
    __syncthreads();
    for (int bin = threadIdx.x; bin < s.stride; bin += blockDim.x)
        counts[(int64_t)blockIdx.x * s.stride + bin] = mt_sort_memory[bin];
}

/* first[bin] += the bin's items in all blocks, before[bin] += those in the preceding blocks. Where there are few bins,
 * several threads share one. */
__device__ static inline void mt_add_counts(int32_t *first, int32_t *before, const int32_t *counts,
                                            const mt_counting &s) {
    unsigned parts = s.threads > s.stride ? s.threads / s.stride : 1;
    for (unsigned i = threadIdx.x; i < parts * s.stride; i += s.threads) {
        unsigned part = i / s.stride, bin = i - part * s.stride;
        int32_t all = 0, preceding = 0;
        for (unsigned begin = part; begin < s.blocks; begin += 16 * parts) {
            int32_t some[16]; // all loads in flight
#pragma unroll
            for (int j = 0; j < 16; j++) {
                unsigned block = begin + j * parts;
                some[j] = block < s.blocks ? counts[block * s.stride + bin] : 0;
            }
#pragma unroll
            for (int j = 0; j < 16; j++) all += some[j], preceding += begin + j * parts < blockIdx.x ? some[j] : 0;
        }
        if (bin >= s.bins) continue;
        atomicAdd(&first[bin], all);
        atomicAdd(&before[bin], preceding);
    }
}

/* Second kernel: rank[j] = the number of items of bin[j] before item j, for bins other than -1. Returns first[bins + 1]
 * in shared memory: the number of items of lower bins. Items of a warp with the same bin are found with
 * __match_any_sync; next[warps, bins] counts those of a warp, then those before it. */
template <int items>
__device__ static inline const int32_t *mt_rank_items(int32_t (&rank)[items], const int (&bin)[items],
                                                      const int32_t *counts, const mt_counting &s) {
    extern __shared__ __align__(16) int32_t mt_sort_memory[];
    int32_t *first = mt_sort_memory, *before = first + s.bins + 1, *next = before + s.bins;
    int lane = threadIdx.x % 32;
    int32_t *mine = next + threadIdx.x / 32 * s.bins;
    for (int i = threadIdx.x; i < s.shared_bytes / 16; i += blockDim.x) ((int4 *)mt_sort_memory)[i] = {};
    __syncthreads();
    mt_add_counts(first, before, counts, s);
#pragma unroll
    for (int j = 0; j < items; j++) {
        uint32_t same = __match_any_sync(all_lanes, bin[j]), lower = same & ((1u << lane) - 1);
        rank[j] = bin[j] >= 0 ? mine[bin[j]] + __popc(lower) : 0;
        __syncwarp();
        if (bin[j] >= 0 && lower == 0) mine[bin[j]] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < s.bins; i += blockDim.x) {
        int32_t sum = before[i], of_warps[16]; // all loads in flight
#pragma unroll
        for (int w = 0; w < 16; w++) of_warps[w] = w < s.threads / 32 ? next[w * s.bins + i] : 0;
#pragma unroll
        for (int w = 0; w < 16; w++) {
            if (w < s.threads / 32) next[w * s.bins + i] = sum;
            sum += of_warps[w];
        }
    }
    mt_prefix_sums(
        s.bins, [&](int64_t i) { return first[i]; }, [&](int64_t i, int32_t sum) { first[i] = sum; });
#pragma unroll
    for (int j = 0; j < items; j++)
        if (bin[j] >= 0) rank[j] += mine[bin[j]];
    return first;
}

#endif
