/* gemv_hopper.cu: linear layers of few rows and large weights on Hopper GPUs, as in decoding: y[T, N] = x[T, K] w^T.
 *
 * The time of such a product is the time to read w. One thread copies boxes of 64 x 128 elements of w with TMA, another
 * those of x, and two warpgroups multiply 64 rows of w by all rows of x (wgmma), which gives 64 columns of y,
 * transposed. The boxes of all tiles of 64 rows, one tile after another, are cut into equal ranges, one for each block
 * ("stream-K", Osama et al., 2023), so that all multiprocessors read equally much. The block with the first box of a
 * tile owns it: it adds the fp32 sums that the blocks after it have of this tile, in their order, so that results
 * repeat bit for bit. The blocks after it leave these sums before they wait for others, so a launch also ends where
 * some multiprocessors are occupied.
 *
 * Short kernels between the products of a decode step use little of the memory's bandwidth. In a CUDA graph
 * (programmatic dependent launch) a block therefore fills its ring with boxes of w before it waits for the kernel that
 * writes x. No kernel of the graph writes w. At most IN_FLIGHT boxes are on their way at once: more would only wait in
 * a queue, and the loads of short kernels behind them. The two warpgroups take turns with the boxes: together they
 * multiply a full ring in less time than memory takes to fill it. */
#include "cuda.h"

#ifdef MT_HAVE_SM90A
#include "hopper.cuh"
#include "vector.cuh"

typedef __nv_bfloat16 bf16;

enum { ROWS = 64, SLICES = 2, WARPGROUP = 128, WARPGROUPS = 2, THREADS = WARPGROUPS * WARPGROUP + 64 };
enum { MOST_COLS = 32 };

/* y is [T, N]. Box i of the product is box i % boxes of tile i / boxes. */
struct few_rows_task {
    bf16 *y;
    const bf16 *bias;     // [N] or NULL
    float4 *partial;      // [blocks, COLS / 8, WARPGROUP]: sums of a tile that another block owns
    unsigned *is_partial; // [blocks] 1 while the block's sums wait in `partial`; 0 before and after the kernel
    int T, N, tiles, boxes;
};

/* A block's shared memory for COLS >= T rows of x. A stage has a box of w and one of x, each with its own barriers,
 * because the first boxes of w are copied before x exists. SUMS: bytes for the second warpgroup's sums. */
template <int COLS> struct few_rows_size {
    static constexpr int IN_FLIGHT = COLS <= 8 ? 3 : 4; // measured: notes/lab.md, Short kernels between products
    static constexpr int W = SLICES * ROWS * 128, X = SLICES * COLS * 128, SUMS = COLS * ROWS * 4;
    static constexpr int STRIDE = ROWS + 8, STAGES = ((224 << 10) - SUMS - COLS * STRIDE * 2 - 1024) / (W + X);
    static constexpr int SUMS_AT = STAGES * (W + X), OUT = SUMS_AT + SUMS, W_RING = OUT + COLS * STRIDE * 2;
    static constexpr int X_RING = W_RING + mt_ring<STAGES>::BYTES, BYTES = X_RING + mt_ring<STAGES>::BYTES;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int COLS> struct few_rows_block {
    using size = few_rows_size<COLS>;
    typedef float tile_sums[COLS / 8][4]; // of a thread
    const few_rows_task &task;
    uint32_t memory;
    float4 *second; // sums of the second warpgroup
    bf16 *out;      // [COLS, STRIDE]
    mt_ring<size::STAGES> of_w, of_x;
    int begin, end; // its boxes

    __device__ __forceinline__ few_rows_block(const few_rows_task &task_, char *shared)
        : task(task_), memory(mt_shared_address(shared)), second((float4 *)(shared + size::SUMS_AT)),
          out((bf16 *)(shared + size::OUT)), of_w{memory + size::W_RING}, of_x{memory + size::X_RING} {
        begin = first(blockIdx.x), end = first(blockIdx.x + 1);
    }
    __device__ __forceinline__ int first(int block) const {
        return (int)((int64_t)block * task.tiles * task.boxes / gridDim.x);
    }
    __device__ __forceinline__ uint32_t stage(int n) const {
        return memory + n % size::STAGES * (size::W + size::X);
    }

    /* One thread calls this. */
    __device__ __forceinline__ void copy_w(const CUtensorMap &w) const {
        for (int n = 0; n < end - begin; n++) {
            of_w.wait_free(n);
            if (n >= size::IN_FLIGHT) of_w.wait_filled(n - size::IN_FLIGHT);
            mt_barrier_arrive_expect(of_w.filled(n), size::W);
            const int i = begin + n;
            mt_copy_box(stage(n), w, i % task.boxes * SLICES, i / task.boxes * ROWS, 0, of_w.filled(n));
        }
    }

    /* One thread calls this. */
    __device__ __forceinline__ void copy_x(const CUtensorMap &x) const {
        mt_prefetch_map(x);
        mt_wait_for_previous();
        for (int n = 0; n < end - begin; n++) {
            of_x.wait_free(n);
            mt_barrier_arrive_expect(of_x.filled(n), size::X);
            mt_copy_box(stage(n) + size::W, x, (begin + n) % task.boxes * SLICES, 0, 0, of_x.filled(n));
        }
    }

    __device__ __forceinline__ float4 *partial(int block) const {
        return task.partial + (int64_t)block * (COLS / 8 * WARPGROUP) + threadIdx.x;
    }

    /* Leaves the sums of a tile to the block that owns it. */
    __device__ __forceinline__ void leave(const tile_sums &sums) const {
#pragma unroll
        for (int i = 0; i < COLS / 8; i++)
            partial(blockIdx.x)[i * WARPGROUP] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        mt_named_barrier_wait(1, WARPGROUP);
        if (threadIdx.x == 0) // after the barrier its release covers the stores of all
            asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(task.is_partial + blockIdx.x) : "memory");
    }

    static __device__ __forceinline__ void add(float (&sum)[4], const float4 &more) {
        sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }

    /* Adds the sums that later blocks left for the tile that ends before box `tile_end`. */
    __device__ __forceinline__ void gather(tile_sums &sums, int tile_end) const {
        for (int block = blockIdx.x + 1; block < gridDim.x && first(block) < tile_end; block++) {
            for (unsigned there = 0; !there;)
                asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(there) : "l"(task.is_partial + block) : "memory");
#pragma unroll
            for (int i = 0; i < COLS / 8; i++) add(sums[i], __ldcg(partial(block) + i * WARPGROUP));
            mt_named_barrier_wait(1, WARPGROUP);
            if (threadIdx.x == 0) task.is_partial[block] = 0;
        }
    }

    /* Stores the columns of y from `column` on. */
    __device__ __forceinline__ void store(const tile_sums &sums, int column) const {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
        float bias[2] = {};
        for (int half = 0; half < 2; half++)
            if (task.bias && column + row + half * 8 < task.N)
                bias[half] = mt_to_float(task.bias[column + row + half * 8]);
#pragma unroll
        for (int i = 0; i < COLS / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[(i * 8 + lane % 4 * 2 + e % 2) * size::STRIDE + row + e / 2 * 8] =
                    mt_from_float<bf16>(sums[i][e] + bias[e / 2]);
        mt_named_barrier_wait(1, WARPGROUP);
        for (int i = threadIdx.x; i < task.T * (ROWS / 8); i += WARPGROUP) {
            const int t = i / (ROWS / 8), pack = i % (ROWS / 8) * 8;
            if (column + pack < task.N)
                mt_store(task.y + (int64_t)t * task.N + column + pack,
                         *(const mt_pack<bf16, 8> *)(out + t * size::STRIDE + pack));
        }
        mt_named_barrier_wait(1, WARPGROUP);
    }

    /* sums = the products of those boxes first <= i < last whose number in the block, i - begin, is even for the first
     * warpgroup, odd for the second. */
    __device__ __forceinline__ void multiply_boxes(tile_sums &sums, int first, int last) const {
        const int group = threadIdx.x / WARPGROUP;
        int n = first - begin, before = -1;
        n += (n + group) % WARPGROUPS;
        if (n >= last - begin)
            for (int i = 0; i < COLS / 8; i++)
                for (int e = 0; e < 4; e++) sums[i][e] = 0;
        for (; n < last - begin; before = n, n += WARPGROUPS) {
            const uint64_t a = mt_wgmma_operand(stage(n), 16), b = mt_wgmma_operand(stage(n) + size::W, 16);
            of_w.wait_filled(n), of_x.wait_filled(n);
            mt_wgmma_fence();
#pragma unroll
            for (int k = 0; k < SLICES * 4; k++)
                mt_wgmma(sums, mt_wgmma_moved(a, k / 4 * (ROWS * 128) + k % 4 * 32),
                         mt_wgmma_moved(b, k / 4 * (COLS * 128) + k % 4 * 32), before >= 0 || k > 0);
            mt_wgmma_commit();
            mt_wgmma_wait<1>();
            if (before >= 0) of_w.release(before), of_x.release(before);
        }
        mt_wgmma_wait<0>();
        mt_wgmma_hold(sums);
        if (before >= 0) of_w.release(before), of_x.release(before);
    }

    /* For the warpgroups. The second one leaves its sums to the first in shared memory. */
    __device__ __forceinline__ void multiply() const {
        const int thread = threadIdx.x % WARPGROUP;
        mt_wait_for_previous();
        for (int i = begin; i < end;) {
            const int first = i, tile = i / task.boxes, tile_end = (tile + 1) * task.boxes;
            tile_sums sums;
            i = min(end, tile_end);
            multiply_boxes(sums, first, i);
            if (threadIdx.x >= WARPGROUP) {
                if (first > begin) mt_named_barrier_wait(3, 2 * WARPGROUP); // until the previous tile's are read
#pragma unroll
                for (int j = 0; j < COLS / 8; j++)
                    second[j * WARPGROUP + thread] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
                mt_named_barrier_arrive(2, 2 * WARPGROUP);
                continue;
            }
            mt_named_barrier_wait(2, 2 * WARPGROUP);
#pragma unroll
            for (int j = 0; j < COLS / 8; j++) add(sums[j], second[j * WARPGROUP + thread]);
            if (i < end) mt_named_barrier_arrive(3, 2 * WARPGROUP);
            if (first % task.boxes != 0) {
                leave(sums);
            } else {
                gather(sums, tile_end);
                store(sums, tile * ROWS);
            }
        }
    }
};

#endif

template <int COLS>
static __global__ void __launch_bounds__(THREADS, 1)
    few_rows(const few_rows_task task, const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    const few_rows_block<COLS> block(task, memory);
    if (threadIdx.x == 0) {
        block.of_w.init(1, WARPGROUP / 32), block.of_x.init(1, WARPGROUP / 32);
        mt_barriers_ready();
    }
    __syncthreads();
    mt_begin_next();
    if (threadIdx.x < WARPGROUPS * WARPGROUP)
        block.multiply();
    else if (threadIdx.x == WARPGROUPS * WARPGROUP)
        block.copy_w(w);
    else if (threadIdx.x == WARPGROUPS * WARPGROUP + 32)
        block.copy_x(x);
#endif
}

/* The tensor map of a matrix as [K / 64, rows, 64]; a box has SLICES slices. */
static CUtensorMap map_of(const void *matrix, int64_t rows, int64_t K, int box_rows) {
    const mt_boxes slices = {matrix, MT_BF16, K / 64, rows, 64, 64, K, SLICES, box_rows};
    return mt_tensor_map(&slices);
}

template <int COLS> static void launch(const mt_linear_args *a, mt_stream *stream) {
    const int64_t T = a->T, N = a->N, K = a->K;
    auto kernel = few_rows<COLS>;
    constexpr int BYTES = few_rows_size<COLS>::BYTES;
    few_rows_task task = {(bf16 *)a->y, (const bf16 *)a->bias};
    task.T = (int)T, task.N = (int)N;
    task.tiles = (int)mt_divide_up(N, ROWS), task.boxes = (int)mt_divide_up(K, SLICES * 64);
    const int64_t blocks = mt_min(mt_cuda_device()->multiProcessorCount, (int64_t)task.tiles * task.boxes);
    task.partial = (float4 *)mt_cuda_workspace(stream, blocks * COLS * ROWS * (int64_t)sizeof(float));
    task.is_partial = (unsigned *)stream->zeros;
    MT_CHECK(blocks * (int64_t)sizeof *task.is_partial <= mt_zeros_bytes);
    mt_cuda_take_shared(kernel, BYTES);
    cudaLaunchAttribute early;
    cudaLaunchConfig_t config = {};
    config.gridDim = (unsigned)blocks, config.blockDim = THREADS, config.dynamicSmemBytes = BYTES;
    config.stream = stream->stream;
    if (stream->capturing) mt_cuda_launch_early(&config, &early);
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, task, map_of(a->w, N, K, ROWS), map_of(a->x, T, K, COLS)));
}

/* Code for sm_90a runs on Hopper only. A box has whole slices of 64 columns of a row of w or x. */
bool mt_gemv_hopper_serves(int64_t T, int64_t N, int64_t K) {
    if (mt_cuda_device()->major != 9 || mt_cuda_kernel_arch() != 90) return false;
    return T >= 1 && T <= MOST_COLS && N % 8 == 0 && K % 64 == 0 && mt_gemv_is_large(N, K) && N * K <= INT32_MAX;
}

bool mt_cuda_gemv_hopper(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    if (!mt_gemv_hopper_serves(a->T, a->N, a->K) || dtype != MT_BF16 || !stream) return false;
    if (!mt_wide(dtype, {a->y, a->x, a->w}, {})) return false;
    if (stream->workspace_bytes < mt_cuda_device()->multiProcessorCount * (int64_t)(MOST_COLS * ROWS * 4)) return false;
    auto launcher = a->T <= 8 ? launch<8> : a->T <= 16 ? launch<16> : launch<32>;
    launcher(a, stream);
    return true;
}

#else

bool mt_gemv_hopper_serves(int64_t T, int64_t N, int64_t K) {
    (void)T, (void)N, (void)K;
    return false;
}

bool mt_cuda_gemv_hopper(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)dtype, (void)stream;
    return false;
}

#endif
