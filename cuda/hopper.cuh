/* hopper.cuh: wrappers of the sm_90a instructions: asynchronous warpgroup products (wgmma), bulk tensor copies (TMA),
 * and the shared-memory barriers that synchronise them (mbarrier).
 *
 * A tile is a bf16 matrix in shared memory with the layout of mma.cuh: panels of 64 channels, in which the 16-byte
 * chunk c of row r is stored at c ^ (r % 8). TMA writes and wgmma reads this layout as the "128-byte swizzle". A tile
 * begins at a multiple of 1024 bytes and has a multiple of 8 rows.
 *
 * See the PTX ISA: "Asynchronous warpgroup level matrix instructions", "Tensor copy", "mbarrier". */
#ifndef MT_HOPPER_CUH
#define MT_HOPPER_CUH

#include "cuda.h"
#include "mma.cuh"

#include <cuda.h>

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

/* A barrier completes a phase when `count` threads have arrived and all announced bytes have been written. A wait names
 * the parity of the phase (0, 1, 0, ...) that must be complete. On a fresh barrier a wait for parity 1 returns at
 * once. */
__device__ __forceinline__ void mt_barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/* Makes the initialised barriers visible to TMA. Call it after the last init, before the __syncthreads that precedes
 * the first use. */
__device__ __forceinline__ void mt_barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mt_barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mt_barrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Arrives when the copies that this thread started with mt_copy4_async are complete. `count` of the barrier includes
 * this arrival. */
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

/* A circular buffer of STAGES stages with two barriers per stage: filled (data present) and free (data consumed). Use
 * number n is stage n % STAGES. */
template <int STAGES> struct mt_ring {
    uint32_t barriers;
    static constexpr int BYTES = STAGES * 16;

    __device__ __forceinline__ uint32_t filled(int n) const {
        return barriers + n % STAGES * 16;
    }
    __device__ __forceinline__ uint32_t free(int n) const {
        return barriers + n % STAGES * 16 + 8;
    }
    /* `fillers` arrivals and the announced bytes fill a stage; one arrival of each of `warps` warps frees it. */
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

/* Hardware barrier `id` (1..15) for `threads` threads in total: threads that wait, and threads that only arrive. */
__device__ __forceinline__ void mt_named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void mt_named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Makes this thread's stores to shared memory visible to wgmma and TMA instructions issued by any thread after a later
 * barrier. */
__device__ __forceinline__ void mt_fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* setmaxnreg: this warpgroup returns registers to the block's pool (shrink) or takes registers from it (grow). */
template <int COUNT> __device__ __forceinline__ void mt_registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void mt_registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Starts the TMA copy of a box of a tensor [slices, rows, columns] with its corner at (slice, row, col) to shared
 * memory. Its bytes count towards `barrier`. Elements outside the tensor become zeros. */
__device__ __forceinline__ void mt_copy_box(uint32_t to, const CUtensorMap &map, int slice, int row, int col,
                                            uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(to),
                 "l"(&map), "r"(col), "r"(row), "r"(slice), "r"(barrier)
                 : "memory");
}
/* Prefetches `bytes`, a multiple of 16, into the L2 cache. */
__device__ __forceinline__ void mt_prefetch_bytes(const void *from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/* Starts the copy of `bytes`, a multiple of 16, to shared memory. They count towards `barrier`. */
__device__ __forceinline__ void mt_copy_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* Starts a store of `bytes`, a multiple of 16, from shared memory, or the addition of as many bytes of fp32 to `to`. As
 * for mt_store_box, the writers of `from` must have called mt_fence_async. */
__device__ __forceinline__ void mt_store_bytes(float *to, uint32_t from, int bytes, bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                     "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                     : "memory");
}
/* Starts the TMA store of a box from shared memory. Elements outside the tensor are not written. Every thread that
 * wrote to `from` must have called mt_fence_async before. `add` adds to the destination in fp32. The stores of this
 * thread since its last commit form a group. */
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
/* Waits until at most the `PENDING` youngest groups of this thread still have to read shared memory. */
template <int PENDING> __device__ __forceinline__ void mt_stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
/* Waits until all stores of this thread are complete: visible to other threads that synchronise with it. */
__device__ __forceinline__ void mt_stores_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* The inverse of mt_ldmatrix. */
__device__ __forceinline__ void mt_stmatrix(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void mt_prefetch_map(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Call it between writing registers that a wgmma reads and starting that wgmma. */
__device__ __forceinline__ void mt_wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/* The products started since the last commit form a group; groups complete in order. */
__device__ __forceinline__ void mt_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most the `PENDING` youngest groups are incomplete. */
template <int PENDING> __device__ __forceinline__ void mt_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/* The compiler assumes that wgmma results are present as soon as the instruction is issued. This prevents it from
 * moving reads of c ahead of the wait. */
template <int N> __device__ __forceinline__ void mt_wgmma_hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[n][e])::"memory");
}

/* The wgmma descriptor of an operand in shared memory. K-major operand (rows contain the summed dimension): 16 channels
 * are 32 bytes, 8 rows of a panel are 1024 bytes. Transposed operand (the sum is over the rows): 16 rows are 2048
 * bytes, and the next 64 columns are `panel_bytes` further. */
__device__ __forceinline__ uint64_t mt_wgmma_operand(uint32_t address, int panel_bytes) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}
/* The same descriptor, advanced by `bytes`. */
__device__ __forceinline__ uint64_t mt_wgmma_moved(uint64_t operand, int bytes) {
    return operand + (uint64_t)(bytes >> 4);
}

/* Operand names of c[..][4], the first operands of the instruction: 32 registers hold 8 blocks of 8 columns. */
#define MT_WGMMA_NAMES_4  "%0, %1, %2, %3"
#define MT_WGMMA_NAMES_8  MT_WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define MT_WGMMA_NAMES_16 MT_WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MT_WGMMA_NAMES_32                                                                                              \
    MT_WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
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

/* Starts c[64, N] = a[64, 16] b[N, 16]^T, or c += with `add`. Both operands are descriptors of shared memory
 * (mt_wgmma_operand). Each warp holds 16 rows of c; c[n] is its block of columns 8 n .. 8 n + 7, distributed over the
 * lanes as in mt_mma. */
template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void mt_wgmma(float (&c)[1][4], uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_4
                 "}, %4, %5, add, 1, 1, %7, %8;\n"
                 "}"
                 : MT_WGMMA_BLOCK(0)
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED));
}
template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void mt_wgmma(float (&c)[2][4], uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_8
                 "}, %8, %9, add, 1, 1, %11, %12;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_2(0)
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED));
}
template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void mt_wgmma(float (&c)[4][4], uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_16
                 "}, %16, %17, add, 1, 1, %19, %20;\n"
                 "}"
                 : MT_WGMMA_BLOCKS_4(0)
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED));
}
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

/* The same in fp8: c[64, N] = a[64, 32] b[N, 32]^T. Both operands are K-major, and 32 channels are 32 bytes; b is e4m3.
 * The sums keep 14 bits of fraction. */
template <bool A_E5M2>
__device__ __forceinline__ void mt_wgmma_fp8(float (&c)[16][4], uint64_t a, uint64_t b, bool add) {
    if constexpr (A_E5M2)
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 {" MT_WGMMA_NAMES_64
                     "}, %64, %65, add, 1, 1;\n"
                     "}"
                     : MT_WGMMA_BLOCKS_16(0)
                     : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MT_WGMMA_NAMES_64
                     "}, %64, %65, add, 1, 1;\n"
                     "}"
                     : MT_WGMMA_BLOCKS_16(0)
                     : "l"(a), "l"(b), "r"((int)add));
}
template <bool A_E5M2>
__device__ __forceinline__ void mt_wgmma_fp8(float (&c)[32][4], uint64_t a, uint64_t b, bool add) {
    if constexpr (A_E5M2)
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e5m2.e4m3 {" MT_WGMMA_NAMES_128
                     "}, %128, %129, add, 1, 1;\n"
                     "}"
                     : MT_WGMMA_BLOCKS_16(0), MT_WGMMA_BLOCKS_16(16)
                     : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" MT_WGMMA_NAMES_128
                     "}, %128, %129, add, 1, 1;\n"
                     "}"
                     : MT_WGMMA_BLOCKS_16(0), MT_WGMMA_BLOCKS_16(16)
                     : "l"(a), "l"(b), "r"((int)add));
}

/* The same with a in registers, distributed as in mt_mma, and b[16, N] transposed: the sum is over its rows. */
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

/* ---- tensor maps ------------------------------------------------------------------------------------------------- */

typedef CUresult mt_encode_map_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                  const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver function that creates tensor maps. It is looked up at run time, so that programs need not link to the
 * driver. */
static inline mt_encode_map_fn *mt_tensor_map_encoder(void) {
    static void *encode;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        MT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
        MT_CHECK(found == cudaDriverEntryPointSuccess && encode);
    }
    return (mt_encode_map_fn *)encode;
}

/* A tensor x[slices, rows, cols] in memory, and the part of it that a copy moves. Strides are in elements. */
struct mt_boxes {
    const void *x;
    mt_dtype dtype; // fp32, bf16, or fp8
    int64_t slices, rows, cols, slice_stride, row_stride;
    int box_slices, box_rows;
};

/* Its tensor map; a box has `box_cols` columns. */
static inline CUtensorMap mt_tensor_map_of(const mt_boxes *t, int box_cols, CUtensorMapSwizzle swizzle) {
    CUtensorMap map;
    const int64_t size = mt_dtype_size(t->dtype);
    const CUtensorMapDataType type = t->dtype == MT_F32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : t->dtype == MT_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const cuuint64_t sizes[] = {(cuuint64_t)t->cols, (cuuint64_t)t->rows, (cuuint64_t)t->slices};
    const cuuint64_t bytes[] = {(cuuint64_t)(t->row_stride * size), (cuuint64_t)(t->slice_stride * size)};
    const cuuint32_t box[] = {(cuuint32_t)box_cols, (cuuint32_t)t->box_rows, (cuuint32_t)t->box_slices};
    const cuuint32_t ones[] = {1, 1, 1};
    CUresult result =
        mt_tensor_map_encoder()(&map, type, 3, (void *)t->x, sizes, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    MT_CHECK(result == CUDA_SUCCESS);
    return map;
}

/* The same with the 128-byte swizzle; a box has 128 bytes of columns. */
static inline CUtensorMap mt_tensor_map(const mt_boxes *t) {
    return mt_tensor_map_of(t, (int)(128 / mt_dtype_size(t->dtype)), CU_TENSOR_MAP_SWIZZLE_128B);
}

/* The tensor map of a matrix of scales [rows, cols]. A box is `box` scales of a row, without swizzle. */
static inline CUtensorMap mt_scales_map(const float *scales, int64_t rows, int64_t cols, int box) {
    const mt_boxes whole = {scales, MT_F32, 1, rows, cols, rows * cols, cols, 1, 1};
    return mt_tensor_map_of(&whole, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

#endif
