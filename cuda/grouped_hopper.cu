/* grouped_hopper.cu: linear layers grouped by expert on the tensor cores of sm_90a.
 *
 * A block stays on its multiprocessor and makes one tile of the result, 128 x 256, after another. One thread asks the
 * memory engine (TMA) for operands, 64 elements of what is summed over at a time, and runs ahead by a few stages, into
 * the next tile too; two warpgroups of 128 threads multiply (wgmma), each 64 rows, and store. They meet at barriers in
 * shared memory, a pair for every stage: "filled" and "free" again.
 *
 * Operands are read as they lie in memory: wgmma transposes what is summed over along its columns (see
 * mt_wgmma_operand). TMA reads zeros outside of a matrix, so N and K need not be multiples of a tile. Rows past an
 * expert's last are there, though: in the rows of a result they are not stored, and where rows are summed over
 * (backward_weight) they become 0 in shared memory, in both operands: they may be NaN.
 *
 * Results leave by way of shared memory as well, a slab of 16 rows and 128 bytes a warp: whole slabs by TMA, which also
 * adds where gradients accumulate. Each element is added to once, so runs repeat bit for bit. The second warpgroup
 * starts a tile a few stages after the first, so that one stores while the other multiplies.
 *
 * On an H200, 128 experts with 1024 rows each on average and 8 with as many do 650 to 730 TFLOP/s forward and for the
 * input's gradient, where cuBLAS does 690 to 820 on one dense product of as many operations; 600 to 625 for the
 * weights' gradient, and 490 to 540 where it is added, which moves twice the bytes. That is between slower products;
 * one fast product after another gets 0 to 15% less. An expert has half a tile of rows too many on average, 6% of 1024.
 * Every stage counts: with three and room for more slabs, or with smaller ones, the weights' gradient is 8 to 20%
 * slower. */
#include "cuda.h"
#include "grouped.h"

#ifdef MT_HAVE_SM90A
#include "hopper.cuh"

typedef __nv_bfloat16 bf16;

enum { WARPGROUP = 128, WORKERS = 2, THREADS = WARPGROUP * (1 + WORKERS) }; // of a block, WORKERS warpgroups multiply
enum { ROWS = 64 * WORKERS, DEPTH = 64, PANEL = DEPTH * 128 }; // of a tile; of a stage's sum; 64 columns of a stage
enum { SLAB = 16 * 128, SLABS = 2, SKEW = 2, SECTION = 16 };
enum { MAX_EXPERTS = 512 }; // that shared memory has room to count

/* Which operands are transposed, and a block's shared memory for tiles of COLS columns. */
template <mt_grouped_kind KIND, int COLS> struct tile_size {
    static constexpr bool OF_WEIGHT = KIND == MT_GROUPED_BACKWARD_WEIGHT;
    static constexpr bool A_TRANSPOSED = OF_WEIGHT, B_TRANSPOSED = KIND != MT_GROUPED_FORWARD;
    static constexpr int A = ROWS * DEPTH * 2, B = COLS * DEPTH * 2, STAGE = A + B, STAGES = COLS > 128 ? 4 : 6;
    static constexpr int OUT = STAGES * STAGE, RING = OUT + WORKERS * 4 * SLABS * SLAB,
                         BEFORE = RING + mt_ring<STAGES>::BYTES;
    static constexpr int BYTES = BEFORE + (MAX_EXPERTS + 1) * (int)sizeof(int);
};

struct product_task {
    const int32_t *offsets;
    void *out;
    int N, K, E;
    bool accumulate;
};

/* Matrices [slices, rows, columns]. */
struct product_maps {
    CUtensorMap a, b, out;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- who works on which tile ------------------------------------------------------------------------------------- */

/* The corner (row, col) of a tile in the product of the rows [first, first + count) of `expert`, and the stages it
 * takes. */
struct product_tile {
    int expert, first, count, row, col, steps;
};

/* before[e] = the tiles of rows that experts ahead of e have. By one warp. */
__device__ static void count_tiles(int *before, const product_task &task) {
    const int lane = threadIdx.x;
    int sum = 0;
    for (int e = 0; e < task.E; e += 32) {
        const int count = e + lane < task.E ? task.offsets[e + lane + 1] - task.offsets[e + lane] : 0;
        int up_to = (count + ROWS - 1) / ROWS;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffff, up_to, d);
            if (lane >= d) up_to += other;
        }
        if (e + lane < task.E) before[e + lane + 1] = sum + up_to;
        sum += __shfl_sync(0xffffffff, up_to, 31);
    }
    if (lane == 0) before[0] = 0;
}

/* A block's tiles are those of its number and every gridDim.x-th after it. Tiles in flight together are of the same
 * few rows and columns: of an expert's, SECTION tiles of rows are taken at a time, with one tile of columns after
 * another. */
template <mt_grouped_kind KIND, int COLS> struct tile_list {
    const product_task &task;
    const int *before;
    unsigned index;
    int expert;

    __device__ __forceinline__ tile_list(const product_task &task, const int *before)
        : task(task), before(before), index(blockIdx.x), expert(0) {
    }
    /* The next tile; false behind the last. */
    __device__ __forceinline__ bool next(product_tile &t) {
        const unsigned cols = (unsigned)((KIND == MT_GROUPED_FORWARD ? task.N : task.K) + COLS - 1) / COLS;
        unsigned heights, in;
        if (KIND == MT_GROUPED_BACKWARD_WEIGHT) {
            heights = (unsigned)(task.N + ROWS - 1) / ROWS;
            expert = (int)(index / (heights * cols)), in = index % (heights * cols);
        } else {
            while (expert < task.E && index >= (unsigned)before[expert + 1] * cols) expert++;
            if (expert >= task.E) return false;
            heights = (unsigned)(before[expert + 1] - before[expert]), in = index - (unsigned)before[expert] * cols;
        }
        if (expert >= task.E) return false;
        const unsigned section = in / (SECTION * cols), rest = in % (SECTION * cols);
        const unsigned height = min((unsigned)SECTION, heights - section * SECTION);
        t.expert = expert, t.first = task.offsets[expert], t.count = task.offsets[expert + 1] - t.first;
        t.row = (int)(section * SECTION + rest % height) * ROWS, t.col = (int)(rest / height) * COLS;
        const int inner = KIND == MT_GROUPED_FORWARD ? task.K : KIND == MT_GROUPED_BACKWARD_INPUT ? task.N : t.count;
        t.steps = (inner + DEPTH - 1) / DEPTH;
        index += gridDim.x;
        return true;
    }
};

/* ---- loading ----------------------------------------------------------------------------------------------------- */

/* An operand whose sum begins at `inner`: K-major one box, transposed a panel of 64 columns at a time. */
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

/* A tile of gradients that will be added to comes to the L2 cache meanwhile, some of its rows with each stage. */
template <int COLS>
__device__ __forceinline__ void prefetch_gradients(const product_task &task, const product_tile &t, int step) {
    const int first = step * 8, end = min(step + 1 == t.steps ? ROWS : min(first + 8, (int)ROWS), task.N - t.row);
    const float *to = (const float *)task.out + ((int64_t)t.expert * task.N + t.row) * task.K + t.col;
    for (int row = first; row < end; row++)
        mt_prefetch_bytes(to + (int64_t)row * task.K, min(COLS, task.K - t.col) * (int)sizeof(float));
}

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void load_tiles(const product_task &task, const product_maps &maps, char *memory) {
    using size = tile_size<KIND, COLS>;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<size::STAGES> ring{at + size::RING};
    tile_list<KIND, COLS> tiles(task, (const int *)(memory + size::BEFORE));
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

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Starts c += a b for a stage; `fresh` begins with c = 0. */
template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void multiply(float (&c)[COLS / 8][4], uint32_t stage, int group, bool fresh) {
    using size = tile_size<KIND, COLS>;
    constexpr bool A_TRANSPOSED = size::A_TRANSPOSED, B_TRANSPOSED = size::B_TRANSPOSED;
    const uint64_t a = mt_wgmma_operand(stage + group * (size::A / WORKERS), A_TRANSPOSED ? PANEL : 16);
    const uint64_t b = mt_wgmma_operand(stage + size::A, B_TRANSPOSED ? PANEL : 16);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        mt_wgmma<A_TRANSPOSED, B_TRANSPOSED>(c, mt_wgmma_moved(a, k * (A_TRANSPOSED ? 2048 : 32)),
                                             mt_wgmma_moved(b, k * (B_TRANSPOSED ? 2048 : 32)), k > 0 || !fresh);
    mt_wgmma_commit();
}

/* Rows [count, DEPTH) of a stage that is summed over become 0: of b, and of this warpgroup's panel of a. Both
 * warpgroups do so for b, and neither waits for the other: they store the same. */
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

/* ---- storing ----------------------------------------------------------------------------------------------------- */

/* A warp's slabs, and where its 16 rows are: `left` of them are the expert's (or the matrix's). */
struct slab_writer {
    uint32_t slabs;
    int slice, row, left;

    /* Before slab number i of a tile is written: the store that read its memory last has done so. */
    __device__ __forceinline__ uint32_t take(int i) const {
        if (threadIdx.x % 32 == 0) {
            if (i == 0)
                mt_stores_wait_read<0>(); // the tile before may have had any number of slabs
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
    /* The rows of a slab of bf16 that are the expert's, where others follow them. */
    __device__ __forceinline__ void copy(uint32_t slab, bf16 *out, int col, int cols) const {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < left * 8; i += 32) {
            const int r = i / 8, c = col + i % 8 * 8;
            if (c < cols)
                *(uint4 *)(out + (int64_t)(row + r) * cols + c) = mt_load_shared16(slab + mt_tile_chunk<16>(r, i % 8));
        }
        __syncwarp();
    }
};

/* bf16: 64 columns a slab. */
template <int COLS>
__device__ __forceinline__ void store_rows(const slab_writer &writer, const product_maps &maps, bf16 *out, int col,
                                           int cols, const float (&c)[COLS / 8][4]) {
    const uint32_t place = mt_lane_down();
    if (writer.left <= 0) return;
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
        if (writer.left >= 16)
            writer.send(slab, maps.out, col + i * 64, false);
        else
            writer.copy(slab, out, col + i * 64, cols);
    }
}

/* fp32: 32 columns a slab. A lane has two neighbours of every 8 columns in rows g = lane / 4 and g + 8; odd rows take
 * the blocks of 8 in another order, so that the rows of a store meet different banks. */
template <int COLS>
__device__ __forceinline__ void store_gradients(const slab_writer &writer, const product_maps &maps, int col, int cols,
                                                bool accumulate, const float (&c)[COLS / 8][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool odd = g % 2;
    if (writer.left <= 0) return;
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

/* The gradient of an expert without rows. */
template <int COLS>
__device__ __forceinline__ void store_zeros(const slab_writer &writer, const product_maps &maps, int col, int cols) {
    if (writer.left <= 0) return;
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

/* The first warpgroup tells the second when it has started SKEW stages of a tile. Not for tiles that are shorter than
 * the ring: of those it could be two ahead, and the second would miss a word. */
template <class Size> __device__ __forceinline__ void keep_apart(int group, int step, int steps) {
    if (steps < Size::STAGES) return;
    if (group == 0 && step == SKEW) mt_named_barrier_arrive(3, WORKERS * WARPGROUP);
    if (group == 1 && step == 0) mt_named_barrier_wait(3, WORKERS * WARPGROUP);
}

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void work_on_tiles(const product_task &task, const product_maps &maps, char *memory) {
    using size = tile_size<KIND, COLS>;
    const int group = threadIdx.x / WARPGROUP - 1;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<size::STAGES> ring{at + size::RING};
    tile_list<KIND, COLS> tiles(task, (const int *)(memory + size::BEFORE));
    product_tile t, next;
    float c[COLS / 8][4];
    int n = 0;
    for (bool more = tiles.next(t); more; t = next) {
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t stage = at + n % size::STAGES * size::STAGE;
            const int left = t.count - step * DEPTH;
            keep_apart<size>(group, step, t.steps);
            ring.wait_filled(n);
            if (size::OF_WEIGHT && left < DEPTH) clear_tail<size>(stage, group, left);
            mt_wgmma_hold(c);
            mt_wgmma_fence();
            multiply<KIND, COLS>(c, stage, group, step == 0);
            mt_wgmma_wait<1>();
            if (step > 0) ring.release(n - 1);
        }
        more = tiles.next(next); // while the last products run
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
    if (threadIdx.x < 32) count_tiles((int *)(memory + size::BEFORE), task);
    if (threadIdx.x == WARPGROUP) {
        mt_ring<size::STAGES>{mt_shared_address(memory) + size::RING}.init(1, 4 * WORKERS);
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<40>();
        if (threadIdx.x == 0) load_tiles<KIND, COLS>(task, maps, memory);
    } else {
        mt_registers_grow<232>();
        work_on_tiles<KIND, COLS>(task, maps, memory);
    }
#endif
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* x[slices, rows, cols], in boxes of `box` rows and 128 bytes. */
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
    int64_t heights =
        KIND == MT_GROUPED_BACKWARD_WEIGHT ? call->E * mt_divide_up(N, ROWS) : mt_divide_up(call->M, ROWS) + call->E;
    int64_t blocks = heights * mt_divide_up(KIND == MT_GROUPED_FORWARD ? N : K, COLS);
    int64_t processors = mt_cuda_device()->multiProcessorCount;
    auto kernel = grouped_hopper<KIND, COLS>;
    constexpr int BYTES = tile_size<KIND, COLS>::BYTES;
    product_task task = {call->offsets, call->out, (int)N, (int)K, (int)call->E, call->accumulate};
    MT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    kernel<<<(unsigned)(blocks < processors ? blocks : processors), THREADS, BYTES, mt_cuda_stream(call->stream)>>>(
        task, maps_of<KIND, COLS>(call));
    MT_CUDA_LAUNCHED();
}

/* Tiles of 256 columns read less for each product; narrower ones, where those would be mostly empty. */
template <mt_grouped_kind KIND> static void launch(const mt_grouped_call *call) {
    const int64_t cols = KIND == MT_GROUPED_FORWARD ? call->N : call->K;
    if (mt_divide_up(cols, 256) * 256 * 5 > mt_divide_up(cols, 128) * 128 * 6)
        launch<KIND, 128>(call);
    else
        launch<KIND, 256>(call);
}

/* sm_90a is Hopper's alone: its code runs on no later GPU. A tensor map needs a tensor, and rows of whole 16 bytes. */
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
