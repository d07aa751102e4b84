/* Softmax and a matrix product on a GPU, each in four steps from naive to fast. notes/gpus.md explains them.
 *
 *   make kernels && build/default/notes/examples/kernels
 *
 * or, as the program needs nothing but this file and CUDA,
 *
 *   nvcc -std=c++17 -O3 -arch=sm_90a -o kernels notes/examples/kernels.cu
 *
 * It compares each result with float64 on the host and measures it beside the card's limit: a copy of as many bytes for
 * the softmax, matrix products without any memory for the product.
 */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <vector>

using bf16 = __nv_bfloat16;

static constexpr int ROWS = 16384, COLUMNS = 4096; // of the softmax
static constexpr int M = 8192, N = 4096, K = 4096; // c[M, N] = a[M, K] b[N, K]^T
static constexpr unsigned ALL_LANES = 0xffffffff;

/* wgmma exists in code for sm_90a alone, mma of bf16 from compute capability 8.0 on. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static constexpr bool HAS_WGMMA = true;
#else
static constexpr bool HAS_WGMMA = false;
#endif
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ < 800
static constexpr bool HAS_MMA = false;
#else
static constexpr bool HAS_MMA = true;
#endif

/* ==== Softmax: y = exp(x - top) / sum of exp(x - top), for each row of x[ROWS, COLUMNS] =============================
 */

/* Step 1: a thread for each row. */
__global__ void softmax_thread(float *y, const float *x) {
    int64_t row = blockIdx.x * blockDim.x + threadIdx.x;
    x += row * COLUMNS, y += row * COLUMNS;
    float top = -INFINITY, sum = 0;
    for (int c = 0; c < COLUMNS; c++) top = fmaxf(top, x[c]);
    for (int c = 0; c < COLUMNS; c++) sum += __expf(x[c] - top);
    for (int c = 0; c < COLUMNS; c++) y[c] = __expf(x[c] - top) * (1 / sum);
}

/* The maximum and the sum of a value over the lanes of a warp; each lane gets it. */
__device__ float warp_max(float value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}
__device__ float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

/* Step 2: a warp for each row; neighbouring lanes read neighbouring columns. */
__global__ void softmax_warp(float *y, const float *x) {
    int64_t row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    x += row * COLUMNS, y += row * COLUMNS;
    float top = -INFINITY, sum = 0;
    for (int c = lane; c < COLUMNS; c += 32) top = fmaxf(top, x[c]);
    top = warp_max(top);
    for (int c = lane; c < COLUMNS; c += 32) sum += __expf(x[c] - top);
    sum = warp_sum(sum);
    for (int c = lane; c < COLUMNS; c += 32) y[c] = __expf(x[c] - top) * (1 / sum);
}

/* Step 3: maximum and sum in one pass, the online softmax of chapter 22. */
__global__ void softmax_online(float *y, const float *x) {
    int64_t row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    x += row * COLUMNS, y += row * COLUMNS;
    float top = -INFINITY, sum = 0;
    for (int c = lane; c < COLUMNS; c += 32) {
        float higher = fmaxf(top, x[c]);
        sum = sum * __expf(top - higher) + __expf(x[c] - higher);
        top = higher;
    }
    float highest = warp_max(top);
    sum = warp_sum(sum * __expf(top - highest));
    for (int c = lane; c < COLUMNS; c += 32) y[c] = __expf(x[c] - highest) * (1 / sum);
}

/* Step 4: a block for each row, which its threads keep in registers: the row is read once. */
static constexpr int THREADS = 256, PACKS = COLUMNS / (4 * THREADS);

__global__ void softmax_registers(float *y, const float *x) {
    __shared__ float tops[THREADS / 32], sums[THREADS / 32]; // of the warps
    const float4 *in = (const float4 *)(x + (int64_t)blockIdx.x * COLUMNS);
    float4 *out = (float4 *)(y + (int64_t)blockIdx.x * COLUMNS), v[PACKS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++) v[p] = in[p * THREADS + threadIdx.x];
#pragma unroll
    for (int p = 0; p < PACKS; p++) top = fmaxf(top, fmaxf(fmaxf(v[p].x, v[p].y), fmaxf(v[p].z, v[p].w)));
    top = warp_max(top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) top = fmaxf(top, tops[w]);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        v[p] = {__expf(v[p].x - top), __expf(v[p].y - top), __expf(v[p].z - top), __expf(v[p].w - top)};
        sum += (v[p].x + v[p].y) + (v[p].z + v[p].w);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < THREADS / 32; w++) sum += sums[w];
    float scale = 1 / sum;
#pragma unroll
    for (int p = 0; p < PACKS; p++)
        out[p * THREADS + threadIdx.x] = {v[p].x * scale, v[p].y * scale, v[p].z * scale, v[p].w * scale};
}

/* ==== A matrix product: c[M, N] = a[M, K] b[N, K]^T in bf16, with sums in fp32 ======================================
 */

/* Step 1: a thread for each element of c. */
__global__ void product_thread(bf16 *c, const bf16 *a, const bf16 *b) {
    int64_t n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y * blockDim.y + threadIdx.y;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += __bfloat162float(a[m * K + k]) * __bfloat162float(b[n * K + k]);
    c[m * N + n] = __float2bfloat16(sum);
}

/* The first row and column of a block's tile of c. Blocks run in the order of their numbers; those of a band of 16 tile
 * rows that run at the same time read the same rows of a and b, which are then in the L2 cache. */
struct corner {
    int64_t row, col;
};
__device__ corner tile_of_block(int rows, int cols) {
    constexpr int BAND = 16;
    int in_band = BAND * (N / cols), band = blockIdx.x / in_band, place = blockIdx.x % in_band;
    return {(int64_t)(band * BAND + place % BAND) * rows, (int64_t)(place / BAND) * cols};
}

/* Step 2: a block computes a tile of 128 x 128 from slabs of a and b in shared memory, a thread 8 x 8 of it. */
static constexpr int TILE = 128, SLAB = 16, PADDED = TILE + 4, EACH = 8;

/* Copies 128 rows of 16 elements to shared memory, transposed and as fp32: eight elements of a row by each thread. */
__device__ void load_slab(float (&slab)[SLAB][PADDED], const bf16 *from) {
    int row = threadIdx.x / 2, k = threadIdx.x % 2 * 8;
    uint4 eight = *(const uint4 *)(from + (int64_t)row * K + k);
    const bf16 *element = (const bf16 *)&eight;
#pragma unroll
    for (int i = 0; i < 8; i++) slab[k + i][row] = __bfloat162float(element[i]);
}

/* Elements 4 i .. 4 i + 3 and 64 + 4 i .. of a row of a slab. */
__device__ void load_eight(float (&to)[EACH], const float (&row)[PADDED], int i) {
    *(float4 *)to = *(const float4 *)&row[4 * i];
    *(float4 *)(to + 4) = *(const float4 *)&row[64 + 4 * i];
}

__global__ __launch_bounds__(THREADS, 2) void product_shared(bf16 *c, const bf16 *a, const bf16 *b) {
    __shared__ __align__(16) float a_slab[SLAB][PADDED], b_slab[SLAB][PADDED];
    corner tile = tile_of_block(TILE, TILE);
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    float sum[EACH][EACH] = {}, a_part[EACH], b_part[EACH];
    for (int k = 0; k < K; k += SLAB) {
        load_slab(a_slab, a + tile.row * K + k);
        load_slab(b_slab, b + tile.col * K + k);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SLAB; i++) {
            load_eight(a_part, a_slab[i], y);
            load_eight(b_part, b_slab[i], x);
            for (int m = 0; m < EACH; m++)
                for (int n = 0; n < EACH; n++) sum[m][n] += a_part[m] * b_part[n];
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < EACH; m++)
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            int64_t row = tile.row + m / 4 * 64 + 4 * y + m % 4, col = tile.col + n / 4 * 64 + 4 * x + n % 4;
            c[row * N + col] = __float2bfloat16(sum[m][n]);
        }
}

/* ---- Step 3: tensor cores by mma.sync ---------------------------------------------------------------------------- */

/* A stage holds 64 channels of 128 rows of a and of 128 rows of b. A row of it is 128 bytes, eight chunks of 16, and
 * chunk i of row r is stored at i ^ (r % 8): eight rows of one chunk then lie in different banks. */
static constexpr int DEPTH = 64, CHUNKS = DEPTH / 8, STEPS = K / DEPTH;
static constexpr int MMA_STAGES = 3, MMA_HALF = TILE * DEPTH * 2, MMA_SHARED = MMA_STAGES * 2 * MMA_HALF;

__device__ uint32_t chunk_at(int row, int chunk) {
    return row * 128 + (chunk ^ row) % CHUNKS * 16;
}

__device__ uint32_t shared_address(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* Starts copies of 16 bytes: a thread does not wait for its own. */
__device__ void copy_rows_async(uint32_t to, const bf16 *from) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + chunk_at(row, chunk)),
                     "l"(from + (int64_t)row * K + chunk * 8)
                     : "memory");
    }
}

/* Four 8 x 8 matrices, a register of each lane for one; lane l passes the address of row l % 8 of matrix l / 8. */
__device__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* c[16, 8] += a[16, 16] b[8, 16]^T by a warp. */
__device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Stores 16 x 8 of c: a lane has two neighbours of row lane / 4, and two of the row 8 below. */
__device__ void store_block(bf16 *c, const float (&sum)[4], int lane) {
    c += (int64_t)(lane / 4) * N + lane % 4 * 2;
    *(__nv_bfloat162 *)c = __floats2bfloat162_rn(sum[0], sum[1]);
    *(__nv_bfloat162 *)(c + 8 * N) = __floats2bfloat162_rn(sum[2], sum[3]);
}

/* Eight warps, each with 64 x 32 of the tile. */
__global__ __launch_bounds__(THREADS, 2) void product_mma(bf16 *c, const bf16 *a, const bf16 *b) {
    if constexpr (HAS_MMA) {
        extern __shared__ __align__(1024) char shared[];
        const uint32_t stages = shared_address(shared);
        const corner tile = tile_of_block(TILE, TILE);
        const int lane = threadIdx.x % 32, row = threadIdx.x / 128 * 64, col = threadIdx.x / 32 % 4 * 32;
        float sum[4][4][4] = {};
        auto start_copies = [&](int step) {
            uint32_t to = stages + step % MMA_STAGES * 2 * MMA_HALF;
            if (step < STEPS) copy_rows_async(to, a + tile.row * K + step * DEPTH);
            if (step < STEPS) copy_rows_async(to + MMA_HALF, b + tile.col * K + step * DEPTH);
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        for (int step = 0; step < MMA_STAGES - 1; step++) start_copies(step);
        for (int step = 0; step < STEPS; step++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(MMA_STAGES - 2) : "memory");
            __syncthreads(); // all threads' copies of this stage are there, and none reads the stage before
            start_copies(step + MMA_STAGES - 1);
            const uint32_t a_tile = stages + step % MMA_STAGES * 2 * MMA_HALF, b_tile = a_tile + MMA_HALF;
#pragma unroll
            for (int k = 0; k < CHUNKS; k += 2) {
                uint32_t a_part[4][4], b_part[2][4];
                for (int m = 0; m < 4; m++)
                    load_matrices(a_part[m], a_tile + chunk_at(row + 16 * m + lane % 16, k + lane / 16));
                for (int n = 0; n < 2; n++)
                    load_matrices(b_part[n],
                                  b_tile + chunk_at(col + 16 * n + lane / 16 * 8 + lane % 8, k + lane / 8 % 2));
                for (int m = 0; m < 4; m++)
                    for (int n = 0; n < 4; n++)
                        mma(sum[m][n], a_part[m], b_part[n / 2][n % 2 * 2], b_part[n / 2][n % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                store_block(c + (tile.row + row + 16 * m) * N + tile.col + col + 8 * n, sum[m][n], lane);
    }
}

/* ---- Step 4: Hopper, wgmma and TMA ------------------------------------------------------------------------------- */

/* A block computes 128 x 256: two warpgroups of four warps multiply, each 64 rows, and one thread copies. */
static constexpr int WIDE = 256, WORKERS = 256, STAGES = 4, A_BYTES = TILE * DEPTH * 2, B_BYTES = WIDE * DEPTH * 2;
static constexpr int STAGE_BYTES = A_BYTES + B_BYTES, HOPPER_SHARED = STAGES * STAGE_BYTES + 1024; // and alignment

/* A barrier in shared memory completes a phase when `count` threads have arrived and the announced bytes are there. A
 * wait names the parity of the phase; on a fresh barrier a wait for parity 1 returns at once. */
__device__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Starts the copy of a box of a matrix, from (row, k) on; its bytes count for the barrier. TMA knows the matrix and the
 * box from the map, and stores chunk i of a row at i ^ (row % 8), as in step 3. */
__device__ void copy_box(uint32_t to, const CUtensorMap &map, int row, int k, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(to),
                 "l"(&map), "r"(k), "r"(row), "r"(barrier)
                 : "memory");
}

/* The operand at an address in shared memory, as wgmma takes it: rows of 128 bytes in that order of chunks, and 1024
 * bytes from eight rows to the next eight. */
__device__ uint64_t operand_at(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define NAMES_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31, "
#define NAMES_64                                                                                                       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "   \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
#define NAMES_96                                                                                                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "   \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
#define NAMES_128                                                                                                      \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, "   \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR(n)  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define BLOCK(n) FOUR(n), FOUR(n + 1), FOUR(n + 2), FOUR(n + 3), FOUR(n + 4), FOUR(n + 5), FOUR(n + 6), FOUR(n + 7)

/* Starts c[64, 256] += a[64, 16] b[256, 16]^T by a warpgroup. A warp has 16 rows of c, and c[n] are their columns 8 n
 * .. 8 n + 7, in the order of mma. */
__device__ void wgmma(float (&c)[32][4], uint64_t a, uint64_t b) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_32 NAMES_64 NAMES_96 NAMES_128
                 "}, %128, %129, add, 1, 1, 0, 0;\n"
                 "}"
                 : BLOCK(0), BLOCK(8), BLOCK(16), BLOCK(24)
                 : "l"(a), "l"(b), "r"(1));
}
__device__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most `pending` of this warpgroup's groups are at work. */
template <int pending> __device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* The results, after a wait: the compiler, which takes them to be there when wgmma is issued, must not read them
 * before. */
__device__ void wgmma_results(float (&c)[32][4]) {
#pragma unroll
    for (int n = 0; n < 32; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}

/* Starts the products of a stage: four of 16 channels, 32 bytes each. */
__device__ void start_products(float (&sum)[32][4], uint32_t a_tile, uint32_t b_tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) wgmma(sum, operand_at(a_tile + 32 * k), operand_at(b_tile + 32 * k));
    wgmma_commit();
}

/* The base of the dynamic shared memory, at a multiple of 1024 bytes, as the order of chunks needs it. */
__device__ uint32_t aligned_base(const char *shared) {
    return (shared_address(shared) + 1023) / 1024 * 1024;
}

/* Barriers of a stage: its data are there; its data have been used. */
struct ring {
    uint32_t stages, barriers;
    __device__ uint32_t stage(int step) const {
        return stages + step % STAGES * STAGE_BYTES;
    }
    __device__ uint32_t filled(int step) const {
        return barriers + step % STAGES * 16;
    }
    __device__ uint32_t used(int step) const {
        return barriers + step % STAGES * 16 + 8;
    }
};

/* One thread: waits until a stage has been used, and starts the copies of the next step to it. */
__device__ void copy_steps(const ring &ring, const CUtensorMap &a, const CUtensorMap &b, corner tile) {
    for (int step = 0; step < STEPS; step++) {
        barrier_wait(ring.used(step), step / STAGES % 2 ^ 1);
        barrier_expect(ring.filled(step), STAGE_BYTES);
        copy_box(ring.stage(step), a, (int)tile.row, step * DEPTH, ring.filled(step));
        copy_box(ring.stage(step) + A_BYTES, b, (int)tile.col, step * DEPTH, ring.filled(step));
    }
}

/* A warpgroup: its 64 rows of the tile. While the products of a step run, it waits for those of the step before, whose
 * stage is then free. */
__device__ void multiply_steps(float (&sum)[32][4], const ring &ring, int group) {
    for (int step = 0; step < STEPS; step++) {
        barrier_wait(ring.filled(step), step / STAGES % 2);
        start_products(sum, ring.stage(step) + group * (A_BYTES / 2), ring.stage(step) + A_BYTES);
        wgmma_wait<1>();
        if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.used(step - 1));
    }
    wgmma_wait<0>();
    wgmma_results(sum);
}

__global__ __launch_bounds__(WORKERS + 32, 1) void product_wgmma(bf16 *c, const __grid_constant__ CUtensorMap a,
                                                                 const __grid_constant__ CUtensorMap b) {
    if constexpr (HAS_WGMMA) {
        extern __shared__ __align__(1024) char shared[];
        __shared__ uint64_t barriers[2 * STAGES];
        const ring ring = {aligned_base(shared), shared_address(barriers)};
        const corner tile = tile_of_block(TILE, WIDE);
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; s++) barrier_init(ring.filled(s), 1), barrier_init(ring.used(s), WORKERS / 32);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); // TMA sees them
        }
        __syncthreads();
        if (threadIdx.x >= WORKERS) {
            if (threadIdx.x == WORKERS) copy_steps(ring, a, b, tile);
            return;
        }
        float sum[32][4] = {};
        multiply_steps(sum, ring, threadIdx.x / 128);
        c += (tile.row + threadIdx.x / 32 * 16) * N + tile.col;
#pragma unroll
        for (int n = 0; n < 32; n++) store_block(c + 8 * n, sum[n], threadIdx.x % 32);
    }
}

/* ==== The limits of tensor cores: products of the same operands again and again, without memory =====================
 */

static constexpr int ALONE_STEPS = 1024;

__global__ __launch_bounds__(THREADS, 2) void mma_alone(bf16 *c, const bf16 *a, const bf16 *b) {
    if constexpr (HAS_MMA) {
        float sum[4][4][4] = {}, total = 0;
        uint32_t a_part[4][4], b_part[4][2];
        for (int m = 0; m < 4; m++)
            for (int i = 0; i < 4; i++) a_part[m][i] = ((const uint32_t *)a)[(m * 4 + i) * THREADS + threadIdx.x];
        for (int n = 0; n < 4; n++)
            for (int i = 0; i < 2; i++) b_part[n][i] = ((const uint32_t *)b)[(n * 2 + i) * THREADS + threadIdx.x];
        for (int step = 0; step < 4 * ALONE_STEPS; step++)
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) mma(sum[m][n], a_part[m], b_part[n][0], b_part[n][1]);
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) total += sum[m][n][0] + sum[m][n][1] + sum[m][n][2] + sum[m][n][3];
        if (total == 0.123f) c[0] = __float2bfloat16(total);
    }
}
static constexpr double MMA_OPERATIONS = 2.0 * TILE * TILE * DEPTH * ALONE_STEPS; // of a block

__global__ __launch_bounds__(WORKERS, 1) void wgmma_alone(bf16 *c, const bf16 *a, const bf16 *b) {
    if constexpr (HAS_WGMMA) {
        extern __shared__ __align__(1024) char shared[];
        const uint32_t base = aligned_base(shared), group = threadIdx.x / 128;
        char *stage = shared + (base - shared_address(shared));
        for (int i = threadIdx.x; i < A_BYTES / 16; i += WORKERS) ((uint4 *)stage)[i] = ((const uint4 *)a)[i];
        for (int i = threadIdx.x; i < B_BYTES / 16; i += WORKERS)
            ((uint4 *)(stage + A_BYTES))[i] = ((const uint4 *)b)[i];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // wgmma sees them
        __syncthreads();
        float sum[32][4] = {}, total = 0;
        for (int step = 0; step < ALONE_STEPS; step++) {
            start_products(sum, base + group * (A_BYTES / 2), base + A_BYTES);
            wgmma_wait<1>();
        }
        wgmma_wait<0>();
        wgmma_results(sum);
#pragma unroll
        for (int n = 0; n < 32; n++) total += sum[n][0] + sum[n][1] + sum[n][2] + sum[n][3];
        if (total == 0.123f) c[0] = __float2bfloat16(total);
    }
}
static constexpr double WGMMA_OPERATIONS = 2.0 * TILE * WIDE * DEPTH * ALONE_STEPS;

/* ==== Host ==========================================================================================================
 */

#define CUDA(call) check_cuda(call, #call)
static void check_cuda(cudaError_t status, const char *call) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "error: %s: %s\n", call, cudaGetErrorString(status));
    exit(1);
}

/* Numbers that look random in [-1, 1), by their index. */
__device__ __host__ float noise(uint32_t i, uint32_t seed) {
    uint32_t bits = (i ^ seed) * 0x9e3779b1u;
    bits = (bits ^ bits >> 15) * 0x85ebca77u;
    bits = (bits ^ bits >> 13) * 0xc2b2ae3du;
    return (float)((bits ^ bits >> 16) >> 8) * 0x1p-23f - 1;
}
__global__ void fill_scores(float *x, int64_t count) {
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        x[i] = 8 * noise((uint32_t)i, 1);
}
__global__ void fill_matrix(bf16 *x, int64_t count, uint32_t seed) {
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        x[i] = __float2bfloat16(noise((uint32_t)i, seed));
}

/* A kernel, how it is launched, and its arguments. */
struct step {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    int shared; // dynamic bytes
    void **arguments;
};

static void launch(const step &step) {
    CUDA(cudaLaunchKernel(step.kernel, step.grid, step.block, step.arguments, step.shared, 0));
}

/* Median seconds of run(), over batches of about 20 ms. A call before each batch keeps the GPU at work while the host
 * enqueues. */
template <class Run> static double measure(Run run) {
    enum { BATCHES = 7 };
    cudaEvent_t from, to;
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    std::vector<double> seconds;
    int calls = 1;
    for (int batch = -1; batch < BATCHES; batch++) {
        run();
        CUDA(cudaEventRecord(from));
        for (int i = 0; i < calls; i++) run();
        CUDA(cudaEventRecord(to));
        CUDA(cudaEventSynchronize(to));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, from, to));
        if (batch >= 0) seconds.push_back(ms * 1e-3 / calls);
        if (batch < 0) calls = (int)std::min(100.0, std::max(1.0, 20.0 / ms)); // the first warms up
    }
    CUDA(cudaEventDestroy(from));
    CUDA(cudaEventDestroy(to));
    std::sort(seconds.begin(), seconds.end());
    return seconds[BATCHES / 2];
}

/* Rows of the softmax are compared in float64. Each of the sum's COLUMNS additions rounds to 2^-24, and __expf has an
 * error of 2 + 1.2 |x| units of 2^-23 for |x| < 16, where x - top has one of 8 such units. */
static bool softmax_is_right(const float *y, const float *x) {
    enum { EVERY = 31 };
    std::vector<float> in(COLUMNS), out(COLUMNS);
    for (int64_t row = 0; row < ROWS; row += EVERY) {
        CUDA(cudaMemcpy(in.data(), x + row * COLUMNS, COLUMNS * sizeof *x, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(out.data(), y + row * COLUMNS, COLUMNS * sizeof *y, cudaMemcpyDeviceToHost));
        double top = *std::max_element(in.begin(), in.end()), sum = 0;
        for (float score : in) sum += exp(score - top);
        for (int c = 0; c < COLUMNS; c++) {
            double expected = exp(in[c] - top) / sum, bound = (COLUMNS * 0x1p-24 + 2 * 30 * 0x1p-23) * expected;
            if (!(fabs(out[c] - expected) <= bound)) return false; // or is NaN
        }
    }
    return true;
}

/* No element is NaN, and 65,536 elements, 64 in each tile of 128 x 256, are the sums in float64: rounded to bf16, and
 * with a rounding of the partial sum for each of the K products. */
static bool product_is_right(const bf16 *c, const std::vector<bf16> &a, const std::vector<bf16> &b) {
    std::vector<bf16> out((int64_t)M * N);
    CUDA(cudaMemcpy(out.data(), c, out.size() * sizeof *c, cudaMemcpyDeviceToHost));
    for (bf16 element : out)
        if (std::isnan(__bfloat162float(element))) return false;
    for (int64_t m = 0; m < M; m += 16)
        for (int64_t n = 0; n < N; n += 32) {
            int64_t row = m + (m / 16 + 3 * n / 32) % 16, col = n + (5 * m / 16 + n / 32) % 32;
            double sum = 0, largest = 0;
            for (int k = 0; k < K; k++) {
                sum += (double)__bfloat162float(a[row * K + k]) * __bfloat162float(b[col * K + k]);
                largest = std::max(largest, fabs(sum));
            }
            if (!(fabs(__bfloat162float(out[row * N + col]) - sum) <= 0x1p-8 * fabs(sum) + K * 0x1p-23 * largest))
                return false;
        }
    return true;
}

/* Registers of a thread, and warps that a multiprocessor holds at a time. */
static void print_step(const step &step, double seconds, double rate, double limit, bool right) {
    cudaFuncAttributes is;
    int blocks, threads = step.block.x * step.block.y;
    CUDA(cudaFuncGetAttributes(&is, step.kernel));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, step.kernel, threads, step.shared));
    printf("%-36s %9.3f %8.3f %6.1f%% %9d %6d%s\n", step.name, seconds * 1e3, rate * 1e-12, 100 * rate / limit,
           is.numRegs, blocks * threads / 32, right ? "" : "  WRONG");
}

static void print_head(const char *name, const char *unit) {
    printf("\n%-36s %9s %8s %7s %9s %6s\n", name, "ms", unit, "share", "registers", "warps");
}

/* The map of a matrix [rows, K] for TMA, which copies boxes of [box_rows, DEPTH]. */
static CUtensorMap map_of(bf16 *matrix, int rows, int box_rows) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    cuuint64_t size[2] = {K, (cuuint64_t)rows}, stride[1] = {K * sizeof(bf16)};
    cuuint32_t box[2] = {DEPTH, (cuuint32_t)box_rows}, every[2] = {1, 1};
    CUtensorMap map;
    CUresult status = ((decltype(&cuTensorMapEncodeTiled))function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix, size, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        fprintf(stderr, "error: cuTensorMapEncodeTiled: %d\n", (int)status);
        exit(1);
    }
    return map;
}

static bool run_softmax() {
    const int64_t bytes = (int64_t)ROWS * COLUMNS * sizeof(float);
    float *x, *y;
    CUDA(cudaMalloc(&x, bytes));
    CUDA(cudaMalloc(&y, bytes));
    fill_scores<<<1024, 256>>>(x, (int64_t)ROWS * COLUMNS);
    double copy = measure([&] { CUDA(cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice)); });
    void *arguments[] = {&y, &x};
    const step steps[] = {
        {"1 a thread for each row", (const void *)softmax_thread, ROWS / 64, 64, 0, arguments},
        {"2 a warp for each row", (const void *)softmax_warp, ROWS / 8, 256, 0, arguments},
        {"3 maximum and sum in one pass", (const void *)softmax_online, ROWS / 8, 256, 0, arguments},
        {"4 the row in registers", (const void *)softmax_registers, ROWS, THREADS, 0, arguments},
    };
    printf("\nA copy of as many bytes moves %.2f TB/s.\n", 2 * bytes / copy * 1e-12);
    print_head("softmax of 16384 x 4096 in fp32", "TB/s");
    bool all_right = true;
    for (const step &step : steps) {
        CUDA(cudaMemset(y, 0xff, bytes)); // NaN
        launch(step);
        bool right = softmax_is_right(y, x);
        all_right = all_right && right;
        double seconds = measure([&] { launch(step); });
        print_step(step, seconds, 2 * bytes / seconds, 2 * bytes / copy, right);
    }
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    return all_right;
}

/* Operations per second of a kernel that only multiplies; `operations` are those of a block. */
static double rate_alone(const step &step, double operations) {
    CUDA(cudaFuncSetAttribute(step.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, step.shared));
    return step.grid.x * operations / measure([&] { launch(step); });
}

/* `hopper`: the card and this program have wgmma. */
static bool run_product(const cudaDeviceProp &card, bool hopper) {
    bf16 *a, *b, *c;
    CUDA(cudaMalloc(&a, (int64_t)M * K * sizeof *a));
    CUDA(cudaMalloc(&b, (int64_t)N * K * sizeof *b));
    CUDA(cudaMalloc(&c, (int64_t)M * N * sizeof *c));
    fill_matrix<<<1024, 256>>>(a, (int64_t)M * K, 2);
    fill_matrix<<<1024, 256>>>(b, (int64_t)N * K, 3);
    std::vector<bf16> host_a((int64_t)M * K), host_b((int64_t)N * K);
    CUDA(cudaMemcpy(host_a.data(), a, host_a.size() * sizeof *a, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(host_b.data(), b, host_b.size() * sizeof *b, cudaMemcpyDeviceToHost));
    void *arguments[] = {&c, &a, &b};
    CUtensorMap a_map, b_map;
    if (hopper) a_map = map_of(a, M, TILE), b_map = map_of(b, N, WIDE);
    void *with_maps[] = {&c, &a_map, &b_map};
    const unsigned processors = card.multiProcessorCount, tiles = M / TILE * (N / TILE);
    const step alone[] = {
        {"", (const void *)mma_alone, 2 * processors, THREADS, 0, arguments},
        {"", (const void *)wgmma_alone, processors, WORKERS, STAGE_BYTES + 1024, arguments},
    };
    double limit = rate_alone(alone[0], MMA_OPERATIONS);
    printf("\nProducts without memory: %.0f TFLOP/s by mma", limit * 1e-12);
    if (hopper) {
        limit = rate_alone(alone[1], WGMMA_OPERATIONS);
        printf(", %.0f by wgmma", limit * 1e-12);
    }
    printf(".\n");
    print_head("product of 8192 x 4096 x 4096 in bf16", "TFLOP/s");
    const step steps[] = {
        {"1 a thread for each element", (const void *)product_thread, dim3(N / 32, M / 8), dim3(32, 8), 0, arguments},
        {"2 tiles in shared memory", (const void *)product_shared, tiles, THREADS, 0, arguments},
        {"3 tensor cores: mma.sync", (const void *)product_mma, tiles, THREADS, MMA_SHARED, arguments},
        {"4 TMA and wgmma", (const void *)product_wgmma, tiles / (WIDE / TILE), WORKERS + 32, HOPPER_SHARED, with_maps},
    };
    bool all_right = true;
    for (const step &step : steps) {
        if (step.arguments == with_maps && !hopper) {
            printf(
                "%s: skipped: needs a card of compute capability 9.0 (Hopper) and code for sm_90a; this is %d.%d, and "
                "step 3 is its last\n",
                step.name, card.major, card.minor);
            continue;
        }
        CUDA(cudaFuncSetAttribute(step.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, step.shared));
        CUDA(cudaMemset(c, 0xff, (int64_t)M * N * sizeof *c)); // NaN
        launch(step);
        bool right = product_is_right(c, host_a, host_b);
        all_right = all_right && right;
        double seconds = measure([&] { launch(step); });
        print_step(step, seconds, 2.0 * M * N * K / seconds, limit, right);
    }
    CUDA(cudaFree(a));
    CUDA(cudaFree(b));
    CUDA(cudaFree(c));
    return all_right;
}

int main() {
    int cards = 0;
    cudaError_t status = cudaGetDeviceCount(&cards);
    if (status != cudaSuccess || cards == 0) {
        printf("kernels: skipped: no GPU answers (%s)\n", cudaGetErrorString(status));
        return 0;
    }
    cudaDeviceProp card;
    CUDA(cudaGetDeviceProperties(&card, 0));
    if (card.major < 8) {
        printf("kernels: skipped: needs a card of compute capability 8.0; this is %d.%d\n", card.major, card.minor);
        return 0;
    }
    cudaFuncAttributes is;
    CUDA(cudaFuncGetAttributes(&is, (const void *)product_wgmma));
    printf("%s: %d multiprocessors, %.0f KB of shared memory each, %.0f MB of L2 cache\n", card.name,
           card.multiProcessorCount, card.sharedMemPerMultiprocessor / 1024.0, card.l2CacheSize / 1048576.0);
    bool softmax = run_softmax(), product = run_product(card, card.major == 9 && is.ptxVersion == 90);
    return softmax && product ? 0 : 1;
}
