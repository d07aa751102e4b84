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
#include "grouped_hopper.cuh"

/* DEPTH: summed dimension of a stage; PANEL: bytes of 64 columns of a stage; slabs of a warp. */
enum { DEPTH = 64, PANEL = DEPTH * 128, SLABS = 2 };

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* order[i] = the expert with the i-th most rows. Computed by the whole block. */
__device__ static inline void compute_expert_order(int *order, const int32_t *offsets, int E) {
    for (int e = threadIdx.x; e < E; e += THREADS) {
        const int count = offsets[e + 1] - offsets[e];
        int before = 0;
        for (int other = 0; other < E; other++) {
            const int rows = offsets[other + 1] - offsets[other];
            before += rows > count || (rows == count && other < e);
        }
        order[before] = e;
    }
}
#endif

/* A persistent block takes one tile after another. With a fixed share of the tiles, a block whose multiprocessor is
 * still occupied by the kernel of a collective would start when the others are done, and the product take twice as
 * long; and sums over experts' rows differ in length. The assignment of tiles to blocks varies from run to run; the
 * results do not. The tiles are taken by a warp of its own, the scheduler: the counter is in L2, where its addition
 * waits behind those to gradients, and the producer must not wait. */
struct tile_queue {
    unsigned *slots; // [2] numbers of tiles
    mt_ring<2> turns;
    static constexpr int BYTES = 2 * (int)sizeof(unsigned) + mt_ring<2>::BYTES;

    __device__ __forceinline__ explicit tile_queue(char *memory)
        : slots((unsigned *)memory), turns{mt_shared_address(memory) + 2 * (uint32_t)sizeof(unsigned)} {
    }
    __device__ __forceinline__ void init() const {
        turns.init(1, 4 * CONSUMERS + 1);
    }
    /* For one thread, the scheduler: puts numbers until one is past the last tile. */
    template <class Tiles> __device__ __forceinline__ void schedule(Tiles tiles, unsigned *counter) const {
        product_tile t;
        unsigned index = blockIdx.x;
        for (int round = 0;; round++) {
            turns.wait_free(round);
            if (counter || round > 0) index = counter ? atomicAdd(counter, 1) : INT_MAX;
            slots[round % 2] = index;
            mt_barrier_arrive(turns.filled(round));
            if (!tiles.find(index, t)) break;
        }
    }
    /* For the producer, one thread. */
    __device__ __forceinline__ unsigned produce(int round) const {
        turns.wait_filled(round);
        const unsigned index = slots[round % 2];
        mt_barrier_arrive(turns.free(round));
        return index;
    }
    /* For all threads of the consumers. */
    __device__ __forceinline__ unsigned consume(int round) const {
        turns.wait_filled(round);
        const unsigned index = slots[round % 2];
        turns.release(round);
        return index;
    }
};

/* ---- layout ------------------------------------------------------------------------------------------------------ */

/* Which operands are transposed, and the layout of a block's shared memory for tiles of COLS columns. EXPERTS: their
 * order, or the tiles before them. */
template <mt_grouped_kind KIND, int COLS> struct tile_size {
    static constexpr bool OF_WEIGHT = KIND == MT_GROUPED_BACKWARD_WEIGHT;
    static constexpr bool A_TRANSPOSED = OF_WEIGHT, B_TRANSPOSED = KIND != MT_GROUPED_FORWARD;
    static constexpr int A = ROWS * DEPTH * 2, B = COLS * DEPTH * 2, STAGE = A + B, STAGES = COLS > 128 ? 4 : 6;
    static constexpr int OUT = STAGES * STAGE, RING = OUT + CONSUMERS * 4 * SLABS * SLAB,
                         QUEUE = RING + mt_ring<STAGES>::BYTES, EXPERTS = QUEUE + tile_queue::BYTES;
    static constexpr int BYTES = EXPERTS + (MAX_EXPERTS + 1) * (int)sizeof(int);
};

struct product_task {
    product_extent extent;
    unsigned *counter; // of tiles taken; NULL: each block has the tile of its number
    void *out;
    bool accumulate;
};

/* Tensor maps of matrices [slices, rows, columns]. */
struct product_maps {
    CUtensorMap a, b, out;
};

/* Forward and backward_input: the rows of the result are those of the experts. */
template <mt_grouped_kind KIND> static product_extent extent_of(const mt_grouped_call *call) {
    const bool is_forward = KIND == MT_GROUPED_FORWARD;
    const int N = (int)call->N, K = (int)call->K;
    return {call->offsets, (int)call->E, N, is_forward ? N : K, is_forward ? K : N};
}

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ tile_list<tile_size<KIND, COLS>::OF_WEIGHT, COLS, DEPTH> tiles_of(const product_task &task,
                                                                                             char *memory) {
    const int *experts = (const int *)(memory + tile_size<KIND, COLS>::EXPERTS);
    return {task.extent, experts, experts};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void produce_tiles(const product_task &task, const product_maps &maps, char *memory) {
    using size = tile_size<KIND, COLS>;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<size::STAGES> ring{at + size::RING};
    const tile_queue queue(memory + size::QUEUE);
    auto tiles = tiles_of<KIND, COLS>(task, memory);
    product_tile t;
    int n = 0;
    for (int round = 0; tiles.find(queue.produce(round), t); round++)
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t to = at + n % size::STAGES * size::STAGE, barrier = ring.filled(n);
            const int inner = step * DEPTH;
            ring.wait_free(n);
            mt_barrier_arrive_expect(barrier, size::STAGE);
            load_operand<size::A_TRANSPOSED, ROWS / 64>(to, maps.a, 0, t.first, t.row, inner, barrier);
            load_operand<size::B_TRANSPOSED, COLS / 64>(to + size::A, maps.b, size::OF_WEIGHT ? 0 : t.expert,
                                                        size::OF_WEIGHT ? t.first : 0, t.col, inner, barrier);
            if (size::OF_WEIGHT && task.accumulate)
                prefetch_gradients<COLS>((const float *)task.out, task.extent, t, step, 8);
        }
}

/* ---- consumers --------------------------------------------------------------------------------------------------- */

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

template <mt_grouped_kind KIND, int COLS>
__device__ __forceinline__ void consume_tiles(const product_task &task, const product_maps &maps, char *memory) {
    using size = tile_size<KIND, COLS>;
    using writer_type = slab_writer<SLABS>;
    const int group = threadIdx.x / WARPGROUP - 1;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<size::STAGES> ring{at + size::RING};
    const tile_queue queue(memory + size::QUEUE);
    auto tiles = tiles_of<KIND, COLS>(task, memory);
    product_tile t, next;
    float c[COLS / 8][4];
    int n = 0, round = 0;
    for (bool more = tiles.find(queue.consume(round++), t); more; t = next) {
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t stage = at + n % size::STAGES * size::STAGE;
            const int remaining = t.count - step * DEPTH;
            stagger_warpgroups<size::STAGES>(group, step, t.steps);
            ring.wait_filled(n);
            if (size::OF_WEIGHT && remaining < DEPTH) clear_tail<size>(stage, group, remaining);
            mt_wgmma_hold(c);
            mt_wgmma_fence();
            multiply<KIND, COLS>(c, stage, group, step == 0);
            mt_wgmma_wait<1>();
            if (step > 0) ring.release(n - 1);
        }
        more = tiles.find(queue.consume(round++), next); // overlaps with the last products
        mt_wgmma_wait<0>();
        const writer_type writer = writer_type::of<size::OF_WEIGHT>(at + size::OUT, task.extent, t);
        const int cols = task.extent.cols;
        if (size::OF_WEIGHT && t.steps == 0) {
            if (!task.accumulate) store_zeros<COLS>(writer, maps.out, t.col, cols);
            continue;
        }
        mt_wgmma_hold(c);
        ring.release(n - 1);
        if constexpr (size::OF_WEIGHT)
            store_floats<COLS>(writer, maps.out, NULL, t.col, cols, task.accumulate, c);
        else
            store_rows<COLS>(writer, maps.out, (bf16 *)task.out, t.col, cols, c);
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
    int *experts = (int *)(memory + size::EXPERTS);
    if (size::OF_WEIGHT)
        compute_expert_order(experts, task.extent.offsets, task.extent.E);
    else if (threadIdx.x < 32)
        compute_tile_offsets(experts, task.extent.offsets, task.extent.E);
    if (threadIdx.x == WARPGROUP) {
        mt_ring<size::STAGES>{mt_shared_address(memory) + size::RING}.init(1, 4 * CONSUMERS);
        tile_queue(memory + size::QUEUE).init();
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<40>();
        if (threadIdx.x == 0) produce_tiles<KIND, COLS>(task, maps, memory);
        if (threadIdx.x == 32)
            tile_queue(memory + size::QUEUE).schedule(tiles_of<KIND, COLS>(task, memory), task.counter);
    } else {
        mt_registers_grow<232>();
        consume_tiles<KIND, COLS>(task, maps, memory);
    }
#endif
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <mt_grouped_kind KIND, int COLS> static product_maps maps_of(const mt_grouped_call *call) {
    using size = tile_size<KIND, COLS>;
    const int64_t M = call->M, N = call->N, K = call->K, E = call->E;
    const int64_t a_cols = KIND == MT_GROUPED_FORWARD ? K : N, out_cols = KIND == MT_GROUPED_FORWARD ? N : K;
    const int a_box = size::A_TRANSPOSED ? (int)DEPTH : (int)ROWS, b_box = size::B_TRANSPOSED ? (int)DEPTH : COLS;
    return {tensor_map(call->a, MT_BF16, 1, M, a_cols, a_box),
            size::OF_WEIGHT ? tensor_map(call->b, MT_BF16, 1, M, K, b_box)
                            : tensor_map(call->b, MT_BF16, E, N, K, b_box),
            size::OF_WEIGHT ? tensor_map(call->out, MT_F32, E, N, K, 16)
                            : tensor_map(call->out, MT_BF16, 1, M, out_cols, 16)};
}

template <mt_grouped_kind KIND, int COLS> static void launch(const mt_grouped_call *call) {
    auto kernel = grouped_hopper<KIND, COLS>;
    constexpr int BYTES = tile_size<KIND, COLS>::BYTES;
    product_task task = {extent_of<KIND>(call), NULL, call->out, call->accumulate};
    mt_cuda_take_shared(kernel, BYTES);
    const int64_t tiles = count_tiles<tile_size<KIND, COLS>::OF_WEIGHT, COLS>(task.extent, call->M);
    unsigned blocks = count_blocks(tiles);
    const bool has_workspace = call->stream && call->stream->workspace_bytes >= (int64_t)sizeof *task.counter;
    if (tiles > blocks && !has_workspace) blocks = (unsigned)tiles;
    if (tiles > blocks) {
        task.counter = (unsigned *)mt_cuda_workspace(call->stream, sizeof *task.counter);
        MT_CUDA(cudaMemsetAsync(task.counter, 0, sizeof *task.counter, mt_cuda_stream(call->stream)));
    }
    kernel<<<blocks, THREADS, BYTES, mt_cuda_stream(call->stream)>>>(task, maps_of<KIND, COLS>(call));
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
    bool adds = call->accumulate && call->kind != MT_GROUPED_BACKWARD_WEIGHT;
    if (adds || call->scale != 0 || call->a_stride || call->b_stride || call->out_stride) return false;
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
