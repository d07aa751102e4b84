/* hopper.cuh: what sm_90a adds, a function each: products that a warpgroup starts and waits for later (wgmma), copies
 * of tiles by the memory engine (TMA), and the barriers in shared memory that they meet at (mbarrier).
 *
 * A tile is a matrix of bf16 in shared memory as mma.cuh lays it out, panels of 64 channels with the chunks of 16 bytes
 * of row r at c ^ (r % 8): it is what TMA writes and wgmma reads as the "128-byte swizzle". Tiles begin at multiples of
 * 1024 bytes, and have a multiple of 8 rows.
 *
 * See the PTX ISA: "Asynchronous warpgroup level matrix instructions", "Tensor copy", "mbarrier". */
#ifndef MT_HOPPER_CUH
#define MT_HOPPER_CUH

#include "cuda.h"
#include "mma.cuh"

#include <cuda.h>

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

/* A barrier completes a phase when `count` threads arrived and all bytes that they announced are there. A wait names
 * the parity of the phase (0, 1, 0, ...) that has to be complete; of a fresh barrier, "the one before" (1) is. */
__device__ __forceinline__ void mt_barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/* After the last init, before the __syncthreads that everyone's first use follows: TMA sees the barriers too. */
__device__ __forceinline__ void mt_barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mt_barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mt_barrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Arrives when the copies (mt_copy4_async) that this thread started are done. The count includes it. */
__device__ __forceinline__ void mt_barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mt_barrier_wait(uint32_t barrier, int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* STAGES buffers that are filled and emptied in turn, with a pair of barriers each; use number n is of buffer
 * n % STAGES. */
template <int STAGES> struct mt_ring {
    uint32_t barriers;
    static constexpr int BYTES = STAGES * 16;

    __device__ __forceinline__ uint32_t filled(int n) const {
        return barriers + n % STAGES * 16;
    }
    __device__ __forceinline__ uint32_t free(int n) const {
        return barriers + n % STAGES * 16 + 8;
    }
    /* `fillers` arrivals (and the announced bytes) fill a buffer, one of each of `warps` frees it. */
    __device__ __forceinline__ void init(int fillers, int warps) const {
        for (int n = 0; n < STAGES; n++) mt_barrier_init(filled(n), fillers), mt_barrier_init(free(n), warps);
    }
    __device__ __forceinline__ void wait_filled(int n) const {
        mt_barrier_wait(filled(n), n / STAGES % 2);
    }
    __device__ __forceinline__ void wait_free(int n) const {
        mt_barrier_wait(free(n), n / STAGES % 2 ^ 1);
    }
    __device__ __forceinline__ void release(int n) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mt_barrier_arrive(free(n));
    }
};

/* Hardware barrier `id` (1..15) among `threads` threads: those that wait, and those that only say they were there. */
__device__ __forceinline__ void mt_named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void mt_named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* What this thread stored to shared memory is visible to wgmma and TMA, of all who pass a barrier after it. */
__device__ __forceinline__ void mt_fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Registers that this warpgroup gives back to the others of its block, or takes from what they gave. */
template <int COUNT> __device__ __forceinline__ void mt_registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void mt_registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Starts the copy of a box of a tensor [slices, rows, columns] whose corner is (slice, row, col); the barrier gets its
 * bytes. What lies outside of the tensor becomes zeros. */
__device__ __forceinline__ void mt_copy_box(uint32_t to, const CUtensorMap &map, int slice, int row, int col,
                                            uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(to),
                 "l"(&map), "r"(col), "r"(row), "r"(slice), "r"(barrier)
                 : "memory");
}
/* Brings bytes, a multiple of 16, to the L2 cache. */
__device__ __forceinline__ void mt_prefetch_bytes(const void *from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/* Starts the way back of a box: what lies outside of the tensor is not written. Before, whoever stored to `from` called
 * mt_fence_async. `add` adds to what is there, in fp32. The thread's stores since its last commit are a group. */
__device__ __forceinline__ void mt_store_box(const CUtensorMap &map, int slice, int row, int col, uint32_t from,
                                             bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], "
                     "[%4];" ::"l"(&map),
                     "r"(col), "r"(row), "r"(slice), "r"(from)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                     "r"(col), "r"(row), "r"(slice), "r"(from)
                     : "memory");
}
__device__ __forceinline__ void mt_stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until shared memory was read by all but the `PENDING` youngest groups of this thread. */
template <int PENDING> __device__ __forceinline__ void mt_stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
/* The opposite of mt_ldmatrix. */
__device__ __forceinline__ void mt_stmatrix(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void mt_prefetch_map(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Between writing registers that a product reads and starting it. */
__device__ __forceinline__ void mt_wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/* The products started since the last commit are a group; groups finish in order. */
__device__ __forceinline__ void mt_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until all but the `PENDING` youngest groups are done. */
template <int PENDING> __device__ __forceinline__ void mt_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/* The compiler thinks that a result is there when a product starts: this keeps it from reading before the wait. */
template <int N> __device__ __forceinline__ void mt_wgmma_hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[n][e])::"memory");
}

/* Where a product finds an operand. Rows that hold what is summed over (K-major): 16 of these channels are 32 bytes,
 * and 8 rows of a panel 1024. Rows that are summed over (the operand is transposed): 16 of them are 2048 bytes, and
 * `panel_bytes` lead to the next 64 columns. */
__device__ __forceinline__ uint64_t mt_wgmma_operand(uint32_t address, int panel_bytes) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}
/* The operand `bytes` further on. */
__device__ __forceinline__ uint64_t mt_wgmma_moved(uint64_t operand, int bytes) {
    return operand + (uint64_t)(bytes >> 4);
}

/* How the instruction names c[..][4], its first operands: 32 registers are 8 blocks of columns. */
#define MT_WGMMA_NAMES_32                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MT_WGMMA_NAMES_64                                                                                              \
    MT_WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
                      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MT_WGMMA_NAMES_96                                                                                              \
    MT_WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
                      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MT_WGMMA_NAMES_128                                                                                             \
    MT_WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MT_WGMMA_BLOCK(n)     "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define MT_WGMMA_BLOCKS_2(n)  MT_WGMMA_BLOCK(n), MT_WGMMA_BLOCK(n + 1)
#define MT_WGMMA_BLOCKS_4(n)  MT_WGMMA_BLOCKS_2(n), MT_WGMMA_BLOCKS_2(n + 2)
#define MT_WGMMA_BLOCKS_8(n)  MT_WGMMA_BLOCKS_4(n), MT_WGMMA_BLOCKS_4(n + 4)
#define MT_WGMMA_BLOCKS_16(n) MT_WGMMA_BLOCKS_8(n), MT_WGMMA_BLOCKS_8(n + 8)

/* Start c[64, N] = a[64, 16] b[N, 16]^T, or += with `add`, of operands in shared memory, transposed ones as
 * mt_wgmma_operand says. A warp has 16 of the rows, its lanes the elements that mt_mma names: c[n] is the block of
 * columns 8 n. */
template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void mt_wgmma(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_32
                 "}, %32, %33, add, 1, 1, %35, %36;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_8(0)
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED));
}
template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void mt_wgmma(float (&c)[16][4], uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_64
                 "}, %64, %65, add, 1, 1, %67, %68;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_16(0)
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED));
}
template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void mt_wgmma(float (&c)[32][4], uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_128
                 "}, %128, %129, add, 1, 1, %131, %132;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_16(0), MT_WGMMA_BLOCKS_16(16)
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED));
}

/* The same with a in registers, as mt_mma has it, and b[16, N] as it is stored: the sum is over its rows. */
__device__ __forceinline__ void mt_wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_32
                 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_8(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
__device__ __forceinline__ void mt_wgmma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_64
                 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_16(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
__device__ __forceinline__ void mt_wgmma(float (&c)[24][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %101, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_96
                 "}, {%96, %97, %98, %99}, %100, add, 1, 1, 1;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_16(0), MT_WGMMA_BLOCKS_8(16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

typedef CUresult mt_encode_map_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                  const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function that makes tensor maps, found at run time so that programs need not link to the driver. */
static inline mt_encode_map_fn *mt_tensor_map_encoder(void) {
    static void *encode;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        MT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
        MT_CHECK(found == cudaDriverEntryPointSuccess && encode);
    }
    return (mt_encode_map_fn *)encode;
}

/* x[slices, rows, cols] of bf16 or fp32, its slices and rows so many elements apart, in boxes of `box_slices` slices,
 * `box_rows` rows and 128 bytes. */
static inline CUtensorMap mt_tensor_map(const void *x, mt_dtype dtype, int64_t slices, int64_t rows, int64_t cols,
                                        int64_t slice_stride, int64_t row_stride, int box_slices, int box_rows) {
    CUtensorMap map;
    const cuuint64_t size = (cuuint64_t)mt_dtype_size(dtype);
    const cuuint64_t sizes[] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)slices};
    const cuuint64_t bytes[] = {(cuuint64_t)row_stride * size, (cuuint64_t)slice_stride * size};
    const cuuint32_t box[] = {(cuuint32_t)(128 / size), (cuuint32_t)box_rows, (cuuint32_t)box_slices};
    const cuuint32_t ones[] = {1, 1, 1};
    CUresult result = mt_tensor_map_encoder()(
        &map, dtype == MT_F32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)x, sizes,
        bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    MT_CHECK(result == CUDA_SUCCESS);
    return map;
}

#endif
