/* grouped_hopper.cuh: what the grouped products of sm_90a share (grouped_hopper.cu in bf16, fp8_grouped_hopper.cu in
 * fp8): the mapping of persistent blocks to tiles, and the epilogue. A block has a producer warpgroup and two consumer
 * warpgroups, and computes tiles of ROWS x COLS of the result. */
#ifndef MT_GROUPED_HOPPER_CUH
#define MT_GROUPED_HOPPER_CUH

#include "hopper.cuh"

typedef __nv_bfloat16 bf16;

/* A block has one producer warpgroup and CONSUMERS warpgroups that multiply. ROWS of a tile. */
enum { WARPGROUP = 128, CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS), ROWS = 64 * CONSUMERS };
/* Bytes of a slab; lag of the second warpgroup, in stages; tile rows per raster group. */
enum { SLAB = 16 * 128, SKEW = 2, RASTER_ROWS = 16 };
enum { MAX_EXPERTS = 512 }; // limited by the prefix sums in shared memory

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

/* The extent of a grouped product with E experts. The result of an expert has as many rows as the expert, and sums over
 * `inner`; or it has `rows` rows, and sums over the expert's rows. */
struct product_extent {
    const int32_t *offsets;
    int E, rows, cols, inner;
};

/* A tile: its corner (row, col) in the product of rows [first, first + count), which belong to `expert`, and its number
 * of stages. */
struct product_tile {
    int expert, first, count, row, col, steps;
};

/* tile_offsets[e] = the number of row tiles of the experts before e. Computed by one warp. */
__device__ static inline void compute_tile_offsets(int *tile_offsets, const int32_t *offsets, int E) {
    const int lane = threadIdx.x;
    int sum = 0;
    for (int e = 0; e < E; e += 32) {
        const int count = e + lane < E ? offsets[e + lane + 1] - offsets[e + lane] : 0;
        int up_to = (count + ROWS - 1) / ROWS;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffff, up_to, d);
            if (lane >= d) up_to += other;
        }
        if (e + lane < E) tile_offsets[e + lane + 1] = sum + up_to;
        sum += __shfl_sync(0xffffffff, up_to, 31);
    }
    if (lane == 0) tile_offsets[0] = 0;
}

/* The order of tiles keeps concurrent ones within a few tile rows and columns of an expert, for reuse in L2: it takes
 * RASTER_ROWS tile rows at a time, and runs through them one tile column after another. DEPTH: summed dimension of a
 * stage. */
template <bool SUMS_ROWS, int COLS, int DEPTH> struct tile_list {
    const product_extent extent;
    const int *tile_offsets; // not SUMS_ROWS
    const int *order;        // SUMS_ROWS: of experts; NULL: that of their numbers
    int expert;

    __device__ __forceinline__ tile_list(const product_extent &extent, const int *tile_offsets, const int *order)
        : extent(extent), tile_offsets(tile_offsets), order(order), expert(0) {
    }
    /* Finds the tile of this number, which is greater than that of the call before; false past the last. */
    __device__ __forceinline__ bool find(unsigned index, product_tile &t) {
        const unsigned cols = (unsigned)(extent.cols + COLS - 1) / COLS;
        unsigned row_tiles, in;
        if (SUMS_ROWS) {
            row_tiles = (unsigned)(extent.rows + ROWS - 1) / ROWS;
            expert = (int)(index / (row_tiles * cols)), in = index % (row_tiles * cols);
            if (expert < extent.E && order) expert = order[expert];
        } else {
            while (expert < extent.E && index >= (unsigned)tile_offsets[expert + 1] * cols) expert++;
            if (expert >= extent.E) return false;
            row_tiles = (unsigned)(tile_offsets[expert + 1] - tile_offsets[expert]),
            in = index - (unsigned)tile_offsets[expert] * cols;
        }
        if (expert >= extent.E) return false;
        const unsigned raster = in / (RASTER_ROWS * cols), rest = in % (RASTER_ROWS * cols);
        const unsigned raster_rows = min((unsigned)RASTER_ROWS, row_tiles - raster * RASTER_ROWS);
        t.expert = expert, t.first = extent.offsets[expert], t.count = extent.offsets[expert + 1] - t.first;
        t.row = (int)(raster * RASTER_ROWS + rest % raster_rows) * ROWS, t.col = (int)(rest / raster_rows) * COLS;
        t.steps = ((SUMS_ROWS ? t.count : extent.inner) + DEPTH - 1) / DEPTH;
        return true;
    }
};

/* The most tiles of a product; M: rows of all experts. Blocks: at most one per multiprocessor, and one per tile. */
template <bool SUMS_ROWS, int COLS> static int64_t count_tiles(const product_extent &extent, int64_t M) {
    const int64_t row_tiles = SUMS_ROWS ? extent.E * mt_divide_up(extent.rows, ROWS) : mt_divide_up(M, ROWS) + extent.E;
    return row_tiles * mt_divide_up(extent.cols, COLS);
}
static unsigned count_blocks(int64_t tiles) {
    const int64_t multiprocessors = mt_cuda_device()->multiProcessorCount;
    return (unsigned)(tiles < multiprocessors ? tiles : multiprocessors);
}

/* ---- gradients of weights ---------------------------------------------------------------------------------------- */

/* Prefetches the tile of gradients that will be accumulated into L2, `rows` rows with each stage. */
template <int COLS>
__device__ __forceinline__ void prefetch_gradients(const float *gradients, const product_extent &extent,
                                                   const product_tile &t, int step, int rows) {
    const int first = step * rows;
    const int end = min(step + 1 == t.steps ? ROWS : min(first + rows, (int)ROWS), extent.rows - t.row);
    const float *to = gradients + ((int64_t)t.expert * extent.rows + t.row) * extent.cols + t.col;
    for (int row = first; row < end; row++)
        mt_prefetch_bytes(to + (int64_t)row * extent.cols, min(COLS, extent.cols - t.col) * (int)sizeof(float));
}

/* ---- epilogue ---------------------------------------------------------------------------------------------------- */

/* A warp's slabs and its 16 rows of the result; the first `valid` of them belong to the expert (or lie inside the
 * matrix). */
template <int SLABS> struct slab_writer {
    uint32_t slabs;
    int slice, row, valid;

    /* This warp's writer in a tile. */
    template <bool SUMS_ROWS>
    __device__ static __forceinline__ slab_writer of(uint32_t block_slabs, const product_extent &extent,
                                                     const product_tile &t) {
        const int warp = threadIdx.x / 32 - 4, row = t.row + warp * 16;
        const uint32_t slabs = block_slabs + warp * SLABS * SLAB;
        if (SUMS_ROWS) return {slabs, t.expert, row, extent.rows - row};
        return {slabs, 0, t.first + row, t.count - row};
    }
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
    /* Copies the valid rows of a slab, where rows of another expert follow. */
    template <class T> __device__ __forceinline__ void copy(uint32_t slab, T *out, int col, int cols) const {
        constexpr int WIDTH = 16 / (int)sizeof(T);
        __syncwarp();
        for (int i = threadIdx.x % 32; i < valid * 8; i += 32) {
            const int r = i / 8, c = col + i % 8 * WIDTH;
            if (c < cols)
                *(uint4 *)(out + (int64_t)(row + r) * cols + c) = mt_load_shared16(slab + mt_tile_chunk<16>(r, i % 8));
        }
        __syncwarp();
    }
};

/* Stores bf16 results: 64 columns per slab. */
template <int COLS, class Writer>
__device__ __forceinline__ void store_rows(const Writer &writer, const CUtensorMap &map, bf16 *out, int col, int cols,
                                           const float (&c)[COLS / 8][4]) {
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
            writer.send(slab, map, col + i * 64, false);
        else
            writer.copy(slab, out, col + i * 64, cols);
    }
}

/* Stores fp32 results: 32 columns per slab. A lane holds two neighbouring elements of each 8 columns in the rows g and
 * g + 8, g = lane / 4. Odd rows take the blocks of 8 columns in another order, so that the rows of one store fall into
 * different banks. `rows`: the result, if rows of another expert may follow in it; NULL: the map ends after the valid
 * rows. */
template <int COLS, class Writer>
__device__ __forceinline__ void store_floats(const Writer &writer, const CUtensorMap &map, float *rows, int col,
                                             int cols, bool accumulate, const float (&c)[COLS / 8][4]) {
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
        if (rows && writer.valid < 16)
            writer.copy(slab, rows, col + i * 32, cols);
        else
            writer.send(slab, map, col + i * 32, accumulate);
    }
}

/* Stores the gradient of an expert without rows. */
template <int COLS, class Writer>
__device__ __forceinline__ void store_zeros(const Writer &writer, const CUtensorMap &map, int col, int cols) {
    if (writer.valid <= 0) return;
    for (int i = 0; i < COLS / 32 && col + i * 32 < cols; i++) {
        const uint32_t slab = writer.take(i);
        for (int word = threadIdx.x % 32; word < SLAB / 4; word += 32) mt_store_shared(slab + word * 4, 0);
        writer.send(slab, map, col + i * 32, false);
    }
}

/* The first warpgroup signals the second when it has started SKEW stages of a tile. Not used if a tile has fewer stages
 * than the ring: the first could then be two tiles ahead, and the second would miss a signal. */
template <int STAGES> __device__ __forceinline__ void stagger_warpgroups(int group, int step, int steps) {
    if (steps < STAGES) return;
    if (group == 0 && step == SKEW) mt_named_barrier_arrive(3, CONSUMERS * WARPGROUP);
    if (group == 1 && step == 0) mt_named_barrier_wait(3, CONSUMERS * WARPGROUP);
}

/* The tensor map of x[slices, rows, cols] with boxes of `box` rows and 128 bytes. */
static CUtensorMap tensor_map(const void *x, mt_dtype dtype, int64_t slices, int64_t rows, int64_t cols, int box) {
    const mt_boxes whole = {x, dtype, slices, rows, cols, rows * cols, cols, 1, box};
    return mt_tensor_map(&whole);
}

#endif
