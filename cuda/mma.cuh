/* mma.cuh: wrappers of the sm_80 tensor-core instructions, and the layout of the tiles that they read.
 *
 * A tile is a bf16 matrix in shared memory, stored in panels of 64 channels. A row of a panel is 128 bytes: all 32
 * banks once. ldmatrix reads 8 rows of 16 bytes at a time; without a swizzle all eight would fall into the same four
 * banks. Therefore the 16-byte chunk c of row r is stored at chunk c ^ (r % 8), which gives eight rows eight different
 * positions. This is also the 128-byte swizzle of Hopper's TMA and wgmma. */
#ifndef MT_MMA_CUH
#define MT_MMA_CUH

#include "cuda.h"

#include <type_traits>

__device__ __forceinline__ uint32_t mt_shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void mt_store_shared(uint32_t to, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void mt_copy_now(uint32_t to, uint4 words) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
}
__device__ __forceinline__ void mt_copy_now(uint32_t to, uint2 words) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(words.x), "r"(words.y) : "memory");
}

/* Starts an asynchronous copy of 16 (or 8, or 4) bytes from global to shared memory; writes zeros if `exists` is false.
 * Before compute capability 8.0 there is no cp.async, and the copy is done at once. */
__device__ __forceinline__ void mt_copy16_async(uint32_t to, const void *from, bool exists) {
    if constexpr (MT_CUDA_KERNELS < 80) return mt_copy_now(to, exists ? *(const uint4 *)from : make_uint4(0, 0, 0, 0));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
__device__ __forceinline__ void mt_copy8_async(uint32_t to, const void *from, bool exists) {
    if constexpr (MT_CUDA_KERNELS < 80) return mt_copy_now(to, exists ? *(const uint2 *)from : make_uint2(0, 0));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(exists ? 8 : 0) : "memory");
}
__device__ __forceinline__ void mt_copy4_async(uint32_t to, const void *from, bool exists) {
    if constexpr (MT_CUDA_KERNELS < 80) return mt_store_shared(to, exists ? *(const uint32_t *)from : 0);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
}
/* Waits for the copies that this thread started. Copies of other threads also need a __syncthreads. */
__device__ __forceinline__ void mt_copies_wait() {
    if constexpr (MT_CUDA_KERNELS >= 80) asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Loads four 8 x 8 matrices. Lane l passes the address of row l % 8 of matrix l / 8. It receives from each matrix the
 * elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1), in one register. */
__device__ __forceinline__ void mt_ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
/* The same for the transposed matrices. */
__device__ __forceinline__ void mt_ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* c[16, 8] += a[16, 16] b[16, 8] by one warp. With g = lane / 4 and t = lane % 4, a lane holds
 *   of c the elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1);
 *   of a the pairs that begin at (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8);
 *   of b the pairs along the first index that begin at (2t, g) and (2t + 8, g). */
__device__ __forceinline__ void mt_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (MT_CUDA_KERNELS < 80) __trap(); // limits.no_bf16: bf16 is refused there
    if constexpr (MT_CUDA_KERNELS >= 80)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c[16, 8] += a[16, 8] b[8, 8] in fp16: half of the sum, as compute capability 7.5 has it. */
__device__ __forceinline__ void mt_mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* The same for operands of E, bf16 or fp16. */
template <class E>
__device__ __forceinline__ void mt_mma_of(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<E, __half> && MT_CUDA_KERNELS < 80) {
        mt_mma8(c, a[0], a[1], b0);
        mt_mma8(c, a[2], a[3], b1);
    } else if constexpr (std::is_same_v<E, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        mt_mma(c, a, b0, b1);
}

/* Converts two floats to a pair of bf16; the first is in the low half. */
__device__ __forceinline__ uint32_t mt_pack_bf16(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    uint32_t pair;
    memcpy(&pair, &both, sizeof pair);
    return pair;
}

__device__ __forceinline__ uint4 mt_load_shared16(uint32_t from) {
    uint4 w;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "r"(from)
                 : "memory");
    return w;
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Byte offset of chunk `chunk` (8 channels) of a row in a tile of ROWS rows. */
template <int ROWS> __device__ __forceinline__ uint32_t mt_tile_chunk(int row, int chunk) {
    return (uint32_t)(chunk / 8 * ROWS * 128 + row * 128 + ((chunk ^ row) % 8) * 16);
}

/* A 16 x 16 block consists of four 8 x 8 matrices. ldmatrix loads them in the order top left, bottom left, top right,
 * bottom right (`down`), or top left, top right, bottom left, bottom right (`across`). The operands need:
 *   a from a[m, k]   down                  b from b[n, k] (two n-blocks of 8)   across
 *   a from a[k, m]   across, transposed    b from b[k, n]                       down, transposed
 * These functions return the lane's offset in the block at the corner of a tile; mt_tile_block moves it to another
 * block. */
__device__ __forceinline__ uint32_t mt_lane_down() {
    int lane = threadIdx.x % 32;
    return mt_tile_chunk<16>(lane % 16, lane / 16);
}
__device__ __forceinline__ uint32_t mt_lane_across() {
    int lane = threadIdx.x % 32;
    return mt_tile_chunk<16>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/* `row` and `col` are multiples of 16, so rows row + i have the same swizzle as rows i. */
template <int ROWS>
__device__ __forceinline__ uint32_t mt_tile_block(uint32_t tile, uint32_t lane_place, int row, int col) {
    return tile + (uint32_t)(col / 64 * ROWS * 128 + row * 128) + (lane_place ^ (uint32_t)(col % 64 * 2));
}

#endif
