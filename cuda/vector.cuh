/* vector.cuh: memory access of the memory-bound kernels.
 *
 * These kernels reach memory bandwidth only if each thread loads 16 bytes at a time and issues several such loads
 * before it uses the first. A kernel is written once for packs of N elements. If an address or a length is not a
 * multiple of 16 bytes, the same kernel is launched with N = 1. */
#ifndef MT_CUDA_VECTOR_CUH
#define MT_CUDA_VECTOR_CUH

#include "cuda.h"

#include <cstring>
#include <initializer_list>
#include <type_traits>

/* N elements that are read or written by one instruction. bf16 and fp16 stay in 32-bit words, two per word: packing and
 * unpacking 2-byte elements takes so many instructions that they, not the bytes moved, would determine the kernel's
 * time. Kernels compute on mt_to_float(pack) and store mt_from_float<T>(pack). */
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) mt_pack { T value[N]; };
template <int N> struct alignas(2 * N < 16 ? 2 * N : 16) mt_pack<__nv_bfloat16, N> { uint32_t pairs[N / 2]; };
template <> struct mt_pack<__nv_bfloat16, 1> { uint16_t bits; };
template <int N> struct alignas(2 * N < 16 ? 2 * N : 16) mt_pack<__half, N> { uint32_t pairs[N / 2]; };
template <> struct mt_pack<__half, 1> { uint16_t bits; };

/* The machine word used to load and store a pack. Without it the compiler may access the elements one by one. */
template <int bytes> struct mt_word {
    using type = std::conditional_t<bytes % 16 == 0, uint4, std::conditional_t<bytes == 8, uint2, uint32_t>>;
};
template <> struct mt_word<2> { using type = uint16_t; };

/* Loads the pack at `from`, or returns zeros if `valid` is false. */
template <int N, class T> __device__ static inline mt_pack<T, N> mt_load(const T *from, bool valid = true) {
    using word = typename mt_word<sizeof(mt_pack<T, N>)>::type;
    constexpr int count = sizeof(mt_pack<T, N>) / sizeof(word);
    word words[count] = {};
    if (valid)
        for (int i = 0; i < count; i++) words[i] = ((const word *)from)[i];
    mt_pack<T, N> pack;
    memcpy(&pack, words, sizeof pack);
    return pack;
}

/* Stores one word with one instruction; the compiler may split a plain assignment. */
__device__ static inline void mt_store_word(uint4 *to, uint4 word) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z),
                 "r"(word.w)
                 : "memory");
}
__device__ static inline void mt_store_word(uint2 *to, uint2 word) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");
}
__device__ static inline void mt_store_word(uint32_t *to, uint32_t word) {
    *to = word;
}
__device__ static inline void mt_store_word(uint16_t *to, uint16_t word) {
    *to = word;
}

template <class T, int N> __device__ static inline void mt_store(T *to, const mt_pack<T, N> &pack) {
    using word = typename mt_word<sizeof(mt_pack<T, N>)>::type;
    constexpr int count = sizeof(mt_pack<T, N>) / sizeof(word);
    word words[count];
    memcpy(words, &pack, sizeof pack);
    for (int i = 0; i < count; i++) mt_store_word((word *)to + i, words[i]);
}

/* Starts an asynchronous copy (cp.async) of the pack at `from` to shared memory, or of zeros if `valid` is false. The
 * data does not pass through registers. cp.async needs at least 4 bytes and compute capability 8.0; else the copy is
 * synchronous. */
template <class T, int N>
__device__ static inline void mt_load_async(mt_pack<T, N> *shared, const T *from, bool valid) {
    constexpr int bytes = sizeof(mt_pack<T, N>);
    if constexpr (bytes < 4 || MT_CUDA_KERNELS < 80)
        *shared = mt_load<N>(from, valid);
    else if constexpr (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                     "l"(from), "r"(valid ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                     "l"(from), "n"(bytes), "r"(valid ? bytes : 0)
                     : "memory");
}

/* commit closes a group of copies; wait<pending> waits until at most the last `pending` groups of this thread are
 * incomplete. */
__device__ static inline void mt_load_async_commit(void) {
    if constexpr (MT_CUDA_KERNELS >= 80) asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending> __device__ static inline void mt_load_async_wait(void) {
    if constexpr (MT_CUDA_KERNELS >= 80) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* mt_element: element i of a pack in fp32; i must be a compile-time constant after unrolling. mt_to_float: all
 * elements. */
template <int N> __device__ static inline float mt_element(const mt_pack<float, N> &pack, int i) {
    return pack.value[i];
}
template <int N> __device__ static inline float mt_element(const mt_pack<__nv_bfloat16, N> &pack, int i) {
    if constexpr (N == 1)
        return __uint_as_float((uint32_t)pack.bits << 16);
    else
        return __uint_as_float(i % 2 == 0 ? pack.pairs[i / 2] << 16 : pack.pairs[i / 2] & 0xffff0000);
}
template <int N> __device__ static inline float mt_element(const mt_pack<__half, N> &pack, int i) {
    if constexpr (N == 1)
        return __half2float(__ushort_as_half(pack.bits));
    else
        return __half2float(__ushort_as_half((unsigned short)(pack.pairs[i / 2] >> i % 2 * 16)));
}
template <int N> __device__ static inline mt_pack<float, N> mt_to_float(const mt_pack<float, N> &pack) {
    return pack;
}
template <class T, int N> __device__ static inline mt_pack<float, N> mt_to_float(const mt_pack<T, N> &pack) {
    mt_pack<float, N> wide;
    for (int i = 0; i < N; i++) wide.value[i] = mt_element(pack, i);
    return wide;
}

__device__ static inline uint32_t mt_pair_from_float(__nv_bfloat16, float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}
__device__ static inline uint32_t mt_pair_from_float(__half, float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}

/* Rounds to nearest even. */
template <class T, int N> __device__ static inline mt_pack<T, N> mt_from_float(const mt_pack<float, N> &wide) {
    if constexpr (std::is_same_v<T, float>) {
        return wide;
    } else if constexpr (N == 1) {
        T narrow = mt_from_float<T>(wide.value[0]);
        mt_pack<T, N> pack;
        memcpy(&pack, &narrow, sizeof pack);
        return pack;
    } else {
        mt_pack<T, N> pack;
        for (int i = 0; i < N; i += 2) pack.pairs[i / 2] = mt_pair_from_float(T(), wide.value[i], wide.value[i + 1]);
        return pack;
    }
}

/* Keeps a pack of 16-bit elements packed between two uses. Otherwise the compiler keeps its fp32 values, in twice the
 * registers. */
template <class T, int N> __device__ static inline void mt_keep_packed(mt_pack<T, N> &pack) {
    if constexpr (!std::is_same_v<T, float> && N > 1)
        for (int i = 0; i < N / 2; i++) asm volatile("" : "+r"(pack.pairs[i]));
}

/* True if every address and every length (in elements) is a multiple of 16 bytes. */
static inline bool mt_wide(mt_dtype dtype, std::initializer_list<const void *> addresses,
                           std::initializer_list<int64_t> lengths) {
    for (const void *address : addresses)
        if ((uintptr_t)address % 16 != 0) return false;
    for (int64_t length : lengths)
        if (length * mt_dtype_size(dtype) % 16 != 0) return false;
    return true;
}

template <int N> using mt_width = std::integral_constant<int, N>;

/* Calls body(T()) with T the type of `dtype`. */
template <class Body> static void mt_by_type(mt_dtype dtype, Body body) {
    MT_CHECK(dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16);
    if (dtype == MT_F32)
        body(float());
    else if (dtype == MT_BF16)
        body(__nv_bfloat16());
    else
        body(__half());
}

/* Calls body(T(), mt_width<N>()) with N = 16 / sizeof(T) if `wide`, else N = 1. */
template <class Body> static void mt_by_type(mt_dtype dtype, bool wide, Body body) {
    mt_by_type(dtype, [&](auto type) {
        if (wide)
            body(type, mt_width<16 / sizeof type>());
        else
            body(type, mt_width<1>());
    });
}

/* Calls body(begin, end, mt_width<N>()) for the whole packs of N elements in [0, n), then with N = 1 for the remainder.
 * If the addresses are not `wide`, N = 1 serves all elements. */
template <int N, class Body> static void mt_split(int64_t n, bool wide, Body body) {
    int64_t whole = wide ? n / N * N : 0;
    if (whole > 0) body((int64_t)0, whole, mt_width<N>());
    if (whole < n) body(whole, n, mt_width<1>());
}

/* The number of blocks of size `block` that hold `threads` threads. */
static inline unsigned mt_grid_size(int64_t threads, int64_t block) {
    return (unsigned)mt_divide_up(threads, block);
}

/* A grid over rows of `packs` packs with `k` packs per thread. A block never spans two rows, so a thread finds its row
 * with one division. `rows` is the number of rows per block (blockDim.y) for kernels that support it: more than 1 where
 * a block of one row would be so small that a multiprocessor reaches its limit of blocks before its limit of
 * threads. */
struct mt_row_grid {
    unsigned blocks_per_row, threads, rows;
};

static inline mt_row_grid mt_rows(int64_t packs, int64_t k) {
    int64_t blocks = mt_divide_up(packs, 256 * k);
    int64_t threads = mt_divide_up(mt_divide_up(packs, blocks * k), 32) * 32;
    return {(unsigned)blocks, (unsigned)threads, blocks == 1 && threads < 128 ? 128 / (unsigned)threads : 1};
}

/* The same for many, possibly short rows: a block holds block.y rows; block.x threads share the packs of a row. */
struct mt_many_row_grid {
    unsigned blocks, blocks_per_row;
    dim3 block;
};

static inline mt_many_row_grid mt_many_rows(int64_t rows, int64_t packs, int64_t k) {
    mt_row_grid grid = mt_rows(packs, k);
    if (grid.blocks_per_row > 1) return {(unsigned)rows * grid.blocks_per_row, grid.blocks_per_row, grid.threads};
    unsigned threads = (unsigned)mt_divide_up(packs, k), rows_per_block = 256 / threads;
    return {(unsigned)mt_divide_up(rows, rows_per_block), 1, dim3(threads, rows_per_block)};
}

/* Block shape of a row reduction. blockDim.x threads share a row of `packs` packs, `k` packs each: a power of two up to
 * 32, or whole warps up to `largest` threads. Several short rows share a block of about `smallest` threads. */
static inline dim3 mt_reduction_block(int64_t packs, int64_t k, int64_t smallest, int64_t largest) {
    int64_t threads = mt_divide_up(packs, k), width = 1;
    while (width < threads && width < 32) width *= 2;
    if (width < threads) width = mt_divide_up(threads, 32) * 32;
    if (width > largest) width = largest;
    return dim3((unsigned)width, (unsigned)(width < smallest ? smallest / width : 1));
}

/* x[m] = the sum of x[m] over the blockDim.x threads that share a row; all of them receive the same bits. Every thread
 * of the block must call it. `buffer` must alternate between 0 and 1: it selects the shared-memory buffer, so that the
 * next sum does not overwrite one that is still being read. */
template <int M> __device__ static inline void mt_row_sum(float (&x)[M], int buffer) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        for (int m = 0; m < M; m++) {
            float other = __shfl_xor_sync(0xffffffff, x[m], lane);
            x[m] += lane < blockDim.x ? other : 0; // otherwise `other` belongs to another row
        }
    if (blockDim.x <= 32) return;
    __shared__ float of_warp[2][M][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, first = threadIdx.y * warps;
    if (lane == 0)
        for (int m = 0; m < M; m++) of_warp[buffer][m][first + warp] = x[m];
    __syncthreads();
    for (int m = 0; m < M; m++) x[m] = mt_warp_sum(lane < warps ? of_warp[buffer][m][first + lane] : 0);
}

/* Sums n values (a power of two) over the lanes of a warp. Value i ends in sums[0] of the lanes from i * 32 / n to (i +
 * 1) * 32 / n - 1. In each step a lane passes on half of its values; this takes n shuffles instead of 5 n. */
template <int n> __device__ static inline void mt_sum_over_lanes(float (&sums)[n], int lane) {
    int bit = 16;
#pragma unroll
    for (int half = n / 2; half > 0; half /= 2, bit /= 2) {
        bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float kept = upper ? sums[i + half] : sums[i], given = upper ? sums[i] : sums[i + half];
            sums[i] = kept + __shfl_xor_sync(0xffffffff, given, bit);
        }
    }
    for (; bit > 0; bit /= 2) sums[0] += __shfl_xor_sync(0xffffffff, sums[0], bit);
}

/* Launches a kernel with programmatic dependent launch. A thread must call mt_wait_for_previous before it reads results
 * or writes, and at least one thread in every case: else the kernel may end before the one before it. */
template <class... P, class... A>
static void mt_launch_early(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared, cudaStream_t stream,
                            const A &...arguments) {
    cudaLaunchAttribute early;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = (size_t)shared, config.stream = stream;
    mt_cuda_launch_early(&config, &early);
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

/* mt_dropout in the form that kernels use. An element is kept if its Philox word is at least `threshold`. p = 1 would
 * need the threshold 2^32, which does not fit in 32 bits; the factor `kept` is 0 then. */
struct mt_masks {
    uint64_t key;
    uint32_t threshold;
    float kept;
};

__host__ __device__ static inline mt_masks mt_dropout_masks(const mt_dropout *dropout) {
    double p = dropout->p > 0 ? dropout->p : 0;
    return {dropout->key, p < 1 ? (uint32_t)(p * 4294967296.0) : UINT32_MAX, p < 1 ? (float)(1 / (1 - p)) : 0};
}

/* residual + dropout(x) for the pack at (token, channel). If N > 1, `channel` is a multiple of 4: four neighbouring
 * channels share one Philox counter. */
template <int N>
__device__ static inline mt_pack<float, N> mt_add_dropped(const mt_pack<float, N> &x, mt_pack<float, N> residual,
                                                          const mt_masks &masks, uint64_t token, int64_t channel) {
    uint4 words = make_uint4(0, 0, 0, 0);
    for (int i = 0; i < N; i++) {
        if (i % 4 == 0 && masks.threshold > 0) words = mt_cuda_philox(masks.key, token, (uint64_t)(channel + i) / 4);
        int word_index = N == 1 ? channel % 4 : i % 4;
        uint32_t word = word_index == 0 ? words.x : word_index == 1 ? words.y : word_index == 2 ? words.z : words.w;
        residual.value[i] += x.value[i] * (word >= masks.threshold ? masks.kept : 0);
    }
    return residual;
}

/* 2^x and e^x by the special-function unit (ex2.approx), accurate to a few ulp for the arguments of a softmax or a
 * sigmoid. */
__device__ static inline float mt_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float mt_exp(float x) {
    return mt_exp2(x * 1.44269504f);
}

#endif
