/* grouped_hopper.cu: linear layers grouped by expert on the tensor cores of sm_90a.
 *
 * A persistent, warp-specialised kernel: a block computes one 128 x 256 tile of the result after another. A producer
 * thread loads the operands with TMA, 64 elements of the summed dimension per stage. It runs several stages ahead, also
 * into the next tile. Two consumer warpgroups of 128 threads each multiply 64 rows (wgmma) and store them. Each stage
 * has two barriers in shared memory, "filled" and "free".
 *
 * Operands keep their layout in memory: wgmma transposes an operand whose summed dimension runs along the columns (see
 * mt_wgmma_operand). TMA reads zeros outside of a matrix, so N and K need not be multiples of a tile. Rows past the
 * last row of an expert, however, lie inside the matrix. Rows of the result there are not stored. If the sum is over
 * the rows (backward_weight), they are set to 0 in shared memory, in both operands, because they may be NaN.
 *
 * The epilogue goes through shared memory too, in slabs of 16 rows and 128 bytes per warp. Whole slabs are stored by
 * TMA, which also adds to accumulated gradients. Each element is added to once, so runs repeat bit for bit. The second
 * warpgroup starts a tile a few stages after the first, so that one stores while the other multiplies.
 *
 * Measured on an H200 with 1024 rows per expert on average, for 8 and for 128 experts: 650 to 730 TFLOP/s for the
 * forward and the input's gradient (cuBLAS: 690 to 820 for one dense product of the same size); 600 to 625 for the
 * weights' gradient, and 490 to 540 if it accumulates, which moves twice the bytes. These products alternated with
 * slower ones; back-to-back fast products run up to 15% slower. On average an expert wastes half a tile of rows, 6% of
 * 1024. The number of stages matters: with three stages and more slabs, or with smaller stages, the weights' gradient
 * is 8 to 20% slower. */
#include "cuda.h"
#include "grouped.h"

#ifdef MT_HAVE_SM90A
#include "hopper.cuh"

typedef __nv_bfloat16 bf16;

/* A block has one producer warpgroup and CONSUMERS warpgroups that multiply. */
enum { WARPGROUP = 128, CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS) };
/* ROWS of a tile; DEPTH: summed dimension of a stage; PANEL: bytes of 64 columns of a stage. */
enum { ROWS = 64 * CONSUMERS, DEPTH = 64, PANEL = DEPTH * 128 };
/* Bytes of a slab; slabs of a warp; stages by which the second warpgroup lags; tile rows per raster group. */
enum { SLAB = 16 * 128, SLABS = 2, SKEW = 2, RASTER_ROWS = 16 };
enum { MAX_EXPERTS = 512 }; // limited by the prefix sums in shared memory

/* Which operands are transposed, and the layout of a block's shared memory for tiles of COLS columns. */
template <mt_grouped_kind KIND, int COLS> struct tile_size {
    static constexpr bool OF_WEIGHT = KIND == MT_GROUPED_BACKWARD_WEIGHT;
    static constexpr bool A_TRANSPOSED = OF_WEIGHT, B_TRANSPOSED = KIND != MT_GROUPED_FORWARD;
    static constexpr int A = ROWS * DEPTH * 2, B = COLS * DEPTH * 2, STAGE = A + B, STAGES = COLS > 128 ? 4 : 6;
    static constexpr int OUT = STAGES * STAGE, RING = OUT + CONSUMERS * 4 * SLABS * SLAB,
                         TILE_OFFSETS = RING + mt_ring<STAGES>::BYTES;
    static constexpr int BYTES = TILE_OFFSETS + (MAX_EXPERTS + 1) * (int)sizeof(int);
};

struct product_task {
    const int32_t *offsets;
    void *out;
    int N, K, E;
    bool accumulate;
};

/* Tensor maps of matrices [slices, rows, columns]. */
struct product_maps {
    CUtensorMap a, b, out;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

/* A tile: its corner (row, col) in the product of rows [first, first + count), which belong to `expert`, and its number
 * of stages. */
struct product_tile {
    int expert, first, count, row, col, steps;
};

/* tile_offsets[e] = the number of row tiles of the experts before e. Computed by one warp. */
__device__ static void compute_tile_offsets(int *tile_offsets, const product_task &task) {
    const int lane = threadIdx.x;
    int sum = 0;
    for (int e = 0; e < task.E; e += 32) {
        const int count = e + lane < task.E ? task.offsets[e + lane + 1] - task.offsets[e + lane] : 0;
        int up_to = (count + ROWS - 1) / ROWS;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffff, up_to, d);
            if (lane >= d) up_to += other;
        }
        if (e + lane < task.E) tile_offsets[e + lane + 1] = sum + up_to;
        sum += __shfl_sync(0xffffffff, up_to, 31);
    }
    if (lane == 0) tile_offsets[0] = 0;
}

/* A block computes the tiles blockIdx.x, blockIdx.x + gridDim.x, ... The order keeps concurrent tiles within a few tile
 * rows and columns of an expert, for reuse in L2: it takes RASTER_ROWS tile rows at a time, and runs through them one
 * tile column after another. */
template <mt_grouped_kind KIND, int COLS> struct tile_list {
    const product_task &task;
    const int *tile_offsets;
    unsigned index;
    int expert;

    __device__ __forceinline__ tile_list(const product_task &task, const int *tile_offsets)
        : task(task), tile_offsets(tile_offsets), index(blockIdx.x), expert(0) {
    }
    /* Advances to the next tile; false beyond the last. */
    __device__ __forceinline__ bool next(product_tile &t) {
        const unsigned cols = (unsigned)((KIND == MT_GROUPED_FORWARD ? task.N : task.K) + COLS - 1) / COLS;
        unsigned row_tiles, in;
        if (KIND == MT_GROUPED_BACKWARD_WEIGHT) {
            row_tiles = (unsigned)(task.N + ROWS - 1) / ROWS;
            expert = (int)(index / (row_tiles * cols)), in = index % (row_tiles * cols);
        } else {
            while (expert < task.E && index >= (unsigned)tile_offsets[expert + 1] * cols) expert++;
            if (expert >= task.E) return false;
            row_tiles = (unsigned)(tile_offsets[expert + 1] - tile_offsets[expert]),
            in = index - (unsigned)tile_offsets[expert] * cols;
        }
        if (expert >= task.E) return false;
        const unsigned raster = in / (RASTER_ROWS * cols), rest = in % (RASTER_ROWS * cols);
        const unsigned raster_rows = min((unsigned)RASTER_ROWS, row_tiles - raster * RASTER_ROWS);
        t.expert = expert, t.first = task.offsets[expert], t.count = task.offsets[expert + 1] - t.first;
        t.row = (int)(raster * RASTER_ROWS + rest % raster_rows) * ROWS, t.col = (int)(rest / raster_rows) * COLS;
        const int inner = KIND == MT_GROUPED_FORWARD ? task.K : KIND == MT_GROUPED_BACKWARD_INPUT ? task.N : t.count;
        t.steps = (inner + DEPTH - 1) / DEPTH;
        index += gridDim.x;
        return true;
    }
};

/* ---- producer ---------------------------------------------------------------------------------------------------- */

/* Loads an operand for the part of the sum that begins at `inner`: one box if K-major, one panel of 64 columns at a
 * time if transposed. */
template <bool TRANSPOSED, int PANELS>
__device__ __forceinline__ void load_operand(uint32_t to, const CUtensorMap &map, int slice, int first, int row,
                                             int inner, uint32_t barrier) {
    if constexpr (TRANSPOSED) {
#pragma unroll
        for (int i = 0; i < PANELS; i++) mt_copy_box(to + i * PANEL, map, slice, first + inner, row + 64 * i, barrier);
    } else {
        mt_copy_box(to, map, slice, first + row, inner, barrier);
    }
}

/* Prefetches the tile of gradients that will be accumulated into L2, a few rows with each stage. */
template <int COLS>
__device__ __forceinline__ void prefetch_gradients(const product_task &task, const product_tile &t, int step) {
    const int first = step * 8, end = min(step + 1 == t.steps ? ROWS : min(first + 8, (int)ROWS), task.N - t.row);
    const float *to = (const float *)task.out + ((int64_t)t.expert * task.N + t.row) * task.K + t.col;
    for (int row = first; row < end; row++)
        mt_prefetch_bytes(to + (int64_t)row * task.K, min(COLS, task.K - t.col) * (int)sizeof(float));
}

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void produce_tiles(const product_task &task, const product_maps &maps, char *memory) {
    using size = tile_size<KIND, COLS>;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<size::STAGES> ring{at + size::RING};
    tile_list<KIND, COLS> tiles(task, (const int *)(memory + size::TILE_OFFSETS));
    product_tile t;
    int n = 0;
    while (tiles.next(t))
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t to = at + n % size::STAGES * size::STAGE, barrier = ring.filled(n);
            const int inner = step * DEPTH;
            ring.wait_free(n);
            mt_barrier_arrive_expect(barrier, size::STAGE);
            load_operand<size::A_TRANSPOSED, ROWS / 64>(to, maps.a, 0, t.first, t.row, inner, barrier);
            load_operand<size::B_TRANSPOSED, COLS / 64>(to + size::A, maps.b, size::OF_WEIGHT ? 0 : t.expert,
                                                        size::OF_WEIGHT ? t.first : 0, t.col, inner, barrier);
            if (size::OF_WEIGHT && task.accumulate) prefetch_gradients<COLS>(task, t, step);
        }
}

/* ---- consumers: products ----------------------------------------------------------------------------------------- */

/* Starts c += a b for one stage; `fresh` starts from c = 0. */
template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void multiply(float (&c)[COLS / 8][4], uint32_t stage, int group, bool fresh) {
    using size = tile_size<KIND, COLS>;
    constexpr bool A_TRANSPOSED = size::A_TRANSPOSED, B_TRANSPOSED = size::B_TRANSPOSED;
    const uint64_t a = mt_wgmma_operand(stage + group * (size::A / CONSUMERS), A_TRANSPOSED ? PANEL : 16);
    const uint64_t b = mt_wgmma_operand(stage + size::A, B_TRANSPOSED ? PANEL : 16);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        mt_wgmma<A_TRANSPOSED, B_TRANSPOSED>(c, mt_wgmma_moved(a, k * (A_TRANSPOSED ? 2048 : 32)),
                                             mt_wgmma_moved(b, k * (B_TRANSPOSED ? 2048 : 32)), k > 0 || !fresh);
    mt_wgmma_commit();
}

/* Sets rows [count, DEPTH) of a stage, over whose rows the sum runs, to 0: in b, and in this warpgroup's panel of a.
 * Both warpgroups clear b without synchronising: they store the same value. */
template <class Size> __device__ __forceinline__ void clear_tail(uint32_t stage, int group, int count) {
    const int bytes = PANEL - count * 128;
    for (int panel = -1; panel < Size::B / PANEL; panel++) {
        const uint32_t to = stage + (panel < 0 ? group * PANEL : Size::A + panel * PANEL) + count * 128;
        for (int i = threadIdx.x % WARPGROUP * 16; i < bytes; i += WARPGROUP * 16)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + i), "r"(0) : "memory");
    }
    mt_fence_async();
    mt_named_barrier_wait(1 + group, WARPGROUP);
}

/* ---- consumers: epilogue ----------------------------------------------------------------------------------------- */

/* A warp's slabs and its 16 rows of the result; the first `valid` of them belong to the expert (or lie inside the
 * matrix). */
struct slab_writer {
    uint32_t slabs;
    int slice, row, valid;

    /* Returns slab number i of a tile, after the last store that reads its memory has completed. */
    __device__ __forceinline__ uint32_t take(int i) const {
        if (threadIdx.x % 32 == 0) {
            if (i == 0)
                mt_stores_wait_read<0>(); // the number of slabs of the previous tile is unknown
            else
                mt_stores_wait_read<SLABS - 1>();
        }
        __syncwarp();
        return slabs + i % SLABS * SLAB;
    }
    __device__ __forceinline__ void send(uint32_t slab, const CUtensorMap &map, int col, bool add) const {
        mt_fence_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            mt_store_box(map, slice, row, col, slab, add);
            mt_stores_commit();
        }
    }
    /* Copies the valid rows of a bf16 slab, where rows of another expert follow. */
    __device__ __forceinline__ void copy(uint32_t slab, bf16 *out, int col, int cols) const {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < valid * 8; i += 32) {
            const int r = i / 8, c = col + i % 8 * 8;
            if (c < cols)
                *(uint4 *)(out + (int64_t)(row + r) * cols + c) = mt_load_shared16(slab + mt_tile_chunk<16>(r, i % 8));
        }
        __syncwarp();
    }
};

/* Stores bf16 results: 64 columns per slab. */
template <int COLS>
__device__ __forceinline__ void store_rows(const slab_writer &writer, const product_maps &maps, bf16 *out, int col,
                                           int cols, const float (&c)[COLS / 8][4]) {
    const uint32_t place = mt_lane_down();
    if (writer.valid <= 0) return;
#pragma unroll
    for (int i = 0; i < COLS / 64; i++) {
        if (col + i * 64 >= cols) break;
        const uint32_t slab = writer.take(i);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const float(&x)[4] = c[i * 8 + n], (&y)[4] = c[i * 8 + n + 1];
            const uint32_t r[4] = {mt_pack_bf16(x[0], x[1]), mt_pack_bf16(x[2], x[3]), mt_pack_bf16(y[0], y[1]),
                                   mt_pack_bf16(y[2], y[3])};
            mt_stmatrix(mt_tile_block<16>(slab, place, 0, n * 8), r);
        }
        if (writer.valid >= 16)
            writer.send(slab, maps.out, col + i * 64, false);
        else
            writer.copy(slab, out, col + i * 64, cols);
    }
}

/* Stores fp32 results: 32 columns per slab. A lane holds two neighbouring elements of each 8 columns in the rows g and
 * g + 8, g = lane / 4. Odd rows take the blocks of 8 columns in another order, so that the rows of one store fall into
 * different banks. */
template <int COLS>
__device__ __forceinline__ void store_gradients(const slab_writer &writer, const product_maps &maps, int col, int cols,
                                                bool accumulate, const float (&c)[COLS / 8][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool odd = g % 2;
    if (writer.valid <= 0) return;
#pragma unroll
    for (int i = 0; i < COLS / 32; i++) {
        if (col + i * 32 >= cols) break;
        const uint32_t slab = writer.take(i);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float(&even_block)[4] = c[i * 4 + n], (&odd_block)[4] = c[i * 4 + (n ^ 2)];
            const int chunk = 2 * (odd ? n ^ 2 : n) + t / 2;
            const uint32_t to = slab + g * 128 + (chunk ^ g) * 16 + t % 2 * 8;
#pragma unroll
            for (int h = 0; h < 2; h++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + h * 8 * 128),
                             "f"(odd ? odd_block[2 * h] : even_block[2 * h]),
                             "f"(odd ? odd_block[2 * h + 1] : even_block[2 * h + 1])
                             : "memory");
        }
        writer.send(slab, maps.out, col + i * 32, accumulate);
    }
}

/* Stores the gradient of an expert without rows. */
template <int COLS>
__device__ __forceinline__ void store_zeros(const slab_writer &writer, const product_maps &maps, int col, int cols) {
    if (writer.valid <= 0) return;
    for (int i = 0; i < COLS / 32 && col + i * 32 < cols; i++) {
        const uint32_t slab = writer.take(i);
        for (int word = threadIdx.x % 32; word < SLAB / 4; word += 32) mt_store_shared(slab + word * 4, 0);
        writer.send(slab, maps.out, col + i * 32, false);
    }
}

template <class Size>
__device__ __forceinline__ slab_writer writer_of(const product_task &task, char *memory, const product_tile &t) {
    const int warp = threadIdx.x / 32 - 4, row = t.row + warp * 16;
    const uint32_t slabs = mt_shared_address(memory) + Size::OUT + warp * SLABS * SLAB;
    if (Size::OF_WEIGHT) return {slabs, t.expert, row, task.N - row};
    return {slabs, 0, t.first + row, t.count - row};
}

/* The first warpgroup signals the second when it has started SKEW stages of a tile. Not used if a tile has fewer stages
 * than the ring: the first could then be two tiles ahead, and the second would miss a signal. */
template <class Size> __device__ __forceinline__ void stagger_warpgroups(int group, int step, int steps) {
    if (steps < Size::STAGES) return;
    if (group == 0 && step == SKEW) mt_named_barrier_arrive(3, CONSUMERS * WARPGROUP);
    if (group == 1 && step == 0) mt_named_barrier_wait(3, CONSUMERS * WARPGROUP);
}

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void consume_tiles(const product_task &task, const product_maps &maps, char *memory) {
    using size = tile_size<KIND, COLS>;
    const int group = threadIdx.x / WARPGROUP - 1;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<size::STAGES> ring{at + size::RING};
    tile_list<KIND, COLS> tiles(task, (const int *)(memory + size::TILE_OFFSETS));
    product_tile t, next;
    float c[COLS / 8][4];
    int n = 0;
    for (bool more = tiles.next(t); more; t = next) {
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t stage = at + n % size::STAGES * size::STAGE;
            const int remaining = t.count - step * DEPTH;
            stagger_warpgroups<size>(group, step, t.steps);
            ring.wait_filled(n);
            if (size::OF_WEIGHT && remaining < DEPTH) clear_tail<size>(stage, group, remaining);
            mt_wgmma_hold(c);
            mt_wgmma_fence();
            multiply<KIND, COLS>(c, stage, group, step == 0);
            mt_wgmma_wait<1>();
            if (step > 0) ring.release(n - 1);
        }
        more = tiles.next(next); // overlaps with the last products
        mt_wgmma_wait<0>();
        const slab_writer writer = writer_of<size>(task, memory, t);
        if (size::OF_WEIGHT && t.steps == 0) {
            if (!task.accumulate) store_zeros<COLS>(writer, maps, t.col, task.K);
            continue;
        }
        mt_wgmma_hold(c);
        ring.release(n - 1);
        if constexpr (size::OF_WEIGHT)
            store_gradients<COLS>(writer, maps, t.col, task.K, task.accumulate, c);
        else
            store_rows<COLS>(writer, maps, (bf16 *)task.out, t.col, KIND == MT_GROUPED_FORWARD ? task.N : task.K, c);
    }
    if (threadIdx.x % 32 == 0) mt_stores_wait_read<0>();
}
#endif

template <mt_grouped_kind KIND, int COLS>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_hopper(const product_task task, const __grid_constant__ product_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = tile_size<KIND, COLS>;
    extern __shared__ __align__(1024) char memory[];
    if (threadIdx.x < 32) compute_tile_offsets((int *)(memory + size::TILE_OFFSETS), task);
    if (threadIdx.x == WARPGROUP) {
        mt_ring<size::STAGES>{mt_shared_address(memory) + size::RING}.init(1, 4 * CONSUMERS);
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<40>();
        if (threadIdx.x == 0) produce_tiles<KIND, COLS>(task, maps, memory);
    } else {
        mt_registers_grow<232>();
        consume_tiles<KIND, COLS>(task, maps, memory);
    }
#endif
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* The tensor map of x[slices, rows, cols] with boxes of `box` rows and 128 bytes. */
static CUtensorMap tensor_map(const void *x, mt_dtype dtype, int64_t slices, int64_t rows, int64_t cols, int box) {
    return mt_tensor_map(x, dtype, slices, rows, cols, rows * cols, cols, 1, box);
}

template <mt_grouped_kind KIND, int COLS> static product_maps maps_of(const mt_grouped_call *call) {
    using size = tile_size<KIND, COLS>;
    const int64_t M = call->M, N = call->N, K = call->K, E = call->E;
    const int64_t a_cols = KIND == MT_GROUPED_FORWARD ? K : N, out_cols = KIND == MT_GROUPED_FORWARD ? N : K;
    const int a_box = size::A_TRANSPOSED ? DEPTH : ROWS, b_box = size::B_TRANSPOSED ? DEPTH : COLS;
    return {tensor_map(call->a, MT_BF16, 1, M, a_cols, a_box),
            size::OF_WEIGHT ? tensor_map(call->b, MT_BF16, 1, M, K, b_box)
                            : tensor_map(call->b, MT_BF16, E, N, K, b_box),
            size::OF_WEIGHT ? tensor_map(call->out, MT_F32, E, N, K, 16)
                            : tensor_map(call->out, MT_BF16, 1, M, out_cols, 16)};
}

template <mt_grouped_kind KIND, int COLS> static void launch(const mt_grouped_call *call) {
    const int64_t N = call->N, K = call->K;
    int64_t row_tiles =
        KIND == MT_GROUPED_BACKWARD_WEIGHT ? call->E * mt_divide_up(N, ROWS) : mt_divide_up(call->M, ROWS) + call->E;
    int64_t blocks = row_tiles * mt_divide_up(KIND == MT_GROUPED_FORWARD ? N : K, COLS);
    int64_t multiprocessors = mt_cuda_device()->multiProcessorCount;
    auto kernel = grouped_hopper<KIND, COLS>;
    constexpr int BYTES = tile_size<KIND, COLS>::BYTES;
    product_task task = {call->offsets, call->out, (int)N, (int)K, (int)call->E, call->accumulate};
    MT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    kernel<<<(unsigned)(blocks < multiprocessors ? blocks : multiprocessors), THREADS, BYTES,
             mt_cuda_stream(call->stream)>>>(task, maps_of<KIND, COLS>(call));
    MT_CUDA_LAUNCHED();
}

/* Tiles of 256 columns load fewer bytes per product. Narrower tiles are used where 256 columns would be mostly
 * padding. */
template <mt_grouped_kind KIND> static void launch(const mt_grouped_call *call) {
    const int64_t cols = KIND == MT_GROUPED_FORWARD ? call->N : call->K;
    if (mt_divide_up(cols, 256) * 256 * 5 > mt_divide_up(cols, 128) * 128 * 6)
        launch<KIND, 128>(call);
    else
        launch<KIND, 256>(call);
}

/* Code for sm_90a runs on Hopper only, not on later GPUs. A tensor map needs a non-empty tensor with rows of a multiple
 * of 16 bytes. */
extern "C" bool mt_grouped_hopper(const mt_grouped_call *call) {
    uintptr_t addresses = (uintptr_t)call->out | (uintptr_t)call->a | (uintptr_t)call->b;
    if (mt_cuda_device()->major != 9 || call->dtype != MT_BF16 || addresses % 16 != 0) return false;
    if (!call->out || !call->a || !call->b || call->M == 0 || call->N == 0 || call->K == 0) return false;
    if (call->N % 8 != 0 || call->K % 8 != 0 || call->E == 0 || call->E > MAX_EXPERTS) return false;
    if (call->kind == MT_GROUPED_FORWARD) launch<MT_GROUPED_FORWARD>(call);
    if (call->kind == MT_GROUPED_BACKWARD_INPUT) launch<MT_GROUPED_BACKWARD_INPUT>(call);
    if (call->kind == MT_GROUPED_BACKWARD_WEIGHT) launch<MT_GROUPED_BACKWARD_WEIGHT>(call);
    return true;
}

#else

extern "C" bool mt_grouped_hopper(const mt_grouped_call *call) {
    (void)call;
    return false;
}

#endif
