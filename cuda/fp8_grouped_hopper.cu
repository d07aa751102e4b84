/* fp8_grouped_hopper.cu: fp8 products grouped by expert on the tensor cores of sm_90a.
 *
 * The kernel of grouped_hopper.cu in fp8: persistent blocks with a fixed share of the tiles, one producer thread that
 * loads with TMA, two consumer warpgroups with 64 rows of a tile of 128 x 256 each. A stage holds 128 elements of the
 * summed dimension, which fp8 operands store contiguously (K-major), so a row of a stage is 128 bytes. If the sum is
 * over rows, the operands are transposed copies in which an expert begins at a multiple of 128 and ends with zeros: a
 * stage never holds two experts.
 *
 * Hopper's tensor cores add products of fp8 with 14 bits of fraction. Three ways to sum:
 *   PLAIN   everything in the tensor cores; the result is multiplied by the scales of the tensors
 *   EXACT   128 elements in the tensor cores; these partial sums are added in fp32
 *   SCALED  the same; partial sums are first multiplied by the scales of their blocks (DeepSeek-AI, "DeepSeek-V3")
 * With partial sums a warpgroup computes the two halves of its 256 columns in turn, because the registers hold the sums
 * of 256 columns and partial sums of 128. One warpgroup adds partial sums while the other multiplies. */
#include "cuda.h"
#include "fp8.h"

#ifdef MT_HAVE_SM90A
#include "grouped_hopper.cuh"

enum fp8_sums { PLAIN, EXACT, SCALED };

/* DEPTH: summed dimension of a stage; columns of a tile, and of its half. */
enum { DEPTH = 128, COLS = 256, HALF = COLS / 2, STAGES = 4 };
static_assert((int)DEPTH == (int)MT_FP8_EXPERT_ROWS && (int)ROWS == (int)MT_FP8_EXPERT_ROWS,
              "the number of tiles before an expert is that of its stages, too");

/* The layout of a block's shared memory. If the sum is over rows, a stage with scales includes those of the rows of a
 * and b (VECTOR). Else consumers load the scales themselves: the first row of an expert may be any. */
template <bool SUMS_ROWS, fp8_sums SUMS> struct tile_size {
    static constexpr bool HAS_VECTOR = SUMS_ROWS && SUMS == SCALED;
    static constexpr int A = ROWS * DEPTH, B = COLS * DEPTH, STAGE = A + B, SLABS = HAS_VECTOR ? 1 : 2;
    static constexpr int VECTOR = HAS_VECTOR ? (ROWS + COLS) * (int)sizeof(float) : 0;
    static constexpr int VECTORS = STAGES * STAGE, OUT = VECTORS + STAGES * VECTOR,
                         RING = OUT + CONSUMERS * 4 * SLABS * SLAB, TILE_OFFSETS = RING + mt_ring<STAGES>::BYTES;
    static constexpr int BYTES = TILE_OFFSETS + (MAX_EXPERTS + 1) * (int)sizeof(int);
    static_assert(BYTES <= 227 * 1024, "the shared memory of a block");
};

struct fp8_task {
    product_extent extent;
    void *out;
    const float *a_scales, *b_scales;
    int M; // rows of a
    int a_scales_width, b_scales_width, b_scales_height;
    bool accumulate, is_float; // type of the result
};

/* Tensor maps of matrices [slices, rows, columns]. */
struct fp8_maps {
    CUtensorMap a, b, out, a_scales, b_scales; // of scales: SUMS_ROWS, SCALED
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- producer ---------------------------------------------------------------------------------------------------- */

template <bool SUMS_ROWS, fp8_sums SUMS>
__device__ __forceinline__ void produce_tiles(const fp8_task &task, const fp8_maps &maps, char *memory) {
    using size = tile_size<SUMS_ROWS, SUMS>;
    const uint32_t at = mt_shared_address(memory);
    const int *tile_offsets = (const int *)(memory + size::TILE_OFFSETS);
    const mt_ring<STAGES> ring{at + size::RING};
    tile_list<SUMS_ROWS, COLS, DEPTH> tiles(task.extent, tile_offsets, NULL);
    product_tile t;
    int n = 0;
    for (int round = 0; tiles.find(blockIdx.x + round * gridDim.x, t); round++) {
        const int first = SUMS_ROWS ? tile_offsets[t.expert] : 0; // stage
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t to = at + n % STAGES * size::STAGE, barrier = ring.filled(n);
            const int inner = (first + step) * DEPTH;
            ring.wait_free(n);
            mt_barrier_arrive_expect(barrier, size::STAGE + size::VECTOR);
            mt_copy_box(to, maps.a, 0, SUMS_ROWS ? t.row : t.first + t.row, inner, barrier);
            mt_copy_box(to + size::A, maps.b, SUMS_ROWS ? 0 : t.expert, t.col, inner, barrier);
            if (size::HAS_VECTOR) {
                const uint32_t vector = at + size::VECTORS + n % STAGES * size::VECTOR;
                mt_copy_box(vector, maps.a_scales, 0, first + step, t.row, barrier);
                mt_copy_box(vector + ROWS * 4, maps.b_scales, 0, first + step, t.col, barrier);
            }
            if (SUMS_ROWS && task.accumulate && step + 1 == t.steps) // earlier, it delays operands
                prefetch_gradients<COLS>((const float *)task.out, task.extent, t, 0, ROWS);
        }
    }
}

/* ---- consumers --------------------------------------------------------------------------------------------------- */

/* The scales of a stage that a thread holds if rows are grouped: of its rows g and g + 8, g = lane / 4, and of 128 x
 * 128 blocks of b, one for each half of the columns. */
struct stage_scales {
    float row[2], block[2];
};

__device__ __forceinline__ stage_scales load_scales(const fp8_task &task, const product_tile &t, int stage) {
    const int row = t.first + t.row + (threadIdx.x - WARPGROUP) / 32 * 16 + threadIdx.x % 32 / 4;
    const float *rows = task.a_scales + (int64_t)stage * task.a_scales_width;
    stage_scales s;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int block = min(t.col / HALF + h, task.b_scales_height - 1);
        const int64_t line = (int64_t)t.expert * task.b_scales_height + block;
        s.row[h] = __ldg(rows + min(row + h * 8, task.M - 1));
        s.block[h] = __ldg(task.b_scales + line * task.b_scales_width + stage);
    }
    return s;
}

__device__ __forceinline__ float2 load_pair(uint32_t from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ float load_float(uint32_t from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

/* sums += part of a half of the columns, with the scales of its rows, and of its columns if `column_scales` is an
 * address in shared memory. */
template <bool HAS_SCALES, bool HAS_COLUMN_SCALES>
__device__ __forceinline__ void add_part(float (&sums)[COLS / 8][4], const float (&part)[HALF / 8][4], int half,
                                         float scale, float scale_8, uint32_t column_scales) {
#pragma unroll
    for (int n = 0; n < HALF / 8; n++) {
        float(&to)[4] = sums[half * (HALF / 8) + n];
        float2 column = {1, 1};
        if (HAS_COLUMN_SCALES) column = load_pair(column_scales + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = HAS_COLUMN_SCALES ? part[n][e] * (e % 2 ? column.y : column.x) : part[n][e];
            to[e] += HAS_SCALES ? x * (e / 2 ? scale_8 : scale) : x;
        }
    }
}

/* Starts c (+)= a b for one stage. */
template <bool A_E5M2, int N>
__device__ __forceinline__ void multiply(float (&c)[N][4], uint32_t a_at, uint32_t b_at, bool fresh) {
    const uint64_t a = mt_wgmma_operand(a_at, 16), b = mt_wgmma_operand(b_at, 16);
    mt_wgmma_hold(c);
    mt_wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 32; k++)
        mt_wgmma_fp8<A_E5M2>(c, mt_wgmma_moved(a, k * 32), mt_wgmma_moved(b, k * 32), k > 0 || !fresh);
    mt_wgmma_commit();
}

/* Stores a tile, times `scale`. */
template <bool SUMS_ROWS, fp8_sums SUMS>
__device__ __forceinline__ void store_tile(const fp8_task &task, const fp8_maps &maps, uint32_t slabs,
                                           const product_tile &t, float scale, float (&sums)[COLS / 8][4]) {
    using writer_type = slab_writer<tile_size<SUMS_ROWS, SUMS>::SLABS>;
    const writer_type writer = writer_type::template of<SUMS_ROWS>(slabs, task.extent, t);
    const int cols = task.extent.cols;
    if (SUMS_ROWS && t.steps == 0) {
        if (!task.accumulate) store_zeros<COLS>(writer, maps.out, t.col, cols);
        return;
    }
    if (SUMS != SCALED)
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[n][e] *= scale;
    if constexpr (SUMS_ROWS)
        store_floats<COLS>(writer, maps.out, NULL, t.col, cols, task.accumulate, sums);
    else if (task.is_float)
        store_floats<COLS>(writer, maps.out, (float *)task.out, t.col, cols, false, sums);
    else
        store_rows<COLS>(writer, maps.out, (bf16 *)task.out, t.col, cols, sums);
}

/* Adds stage n to the sums, half of the columns after the other, and frees it. `vector`: address of its scales. */
template <bool SUMS_ROWS, fp8_sums SUMS, bool A_E5M2>
__device__ __forceinline__ void add_stage(float (&sums)[COLS / 8][4], const mt_ring<STAGES> &ring, int n, uint32_t a,
                                          uint32_t b, const stage_scales &scales, uint32_t vector) {
    using size = tile_size<SUMS_ROWS, SUMS>;
    const int row = (threadIdx.x - WARPGROUP) / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part[HALF / 8][4], row_scale = scales.row[0], row_scale_8 = scales.row[1];
        multiply<A_E5M2>(part, a, b + half * (size::B / 2), true);
        mt_wgmma_wait<0>();
        mt_wgmma_hold(part);
        if (size::HAS_VECTOR)
            row_scale = load_float(vector + row * 4), row_scale_8 = load_float(vector + (row + 8) * 4);
        if (half == 1 && !size::HAS_VECTOR) ring.release(n);
        add_part<SUMS == SCALED, size::HAS_VECTOR>(sums, part, half, row_scale * scales.block[half],
                                                   row_scale_8 * scales.block[half], vector + (ROWS + half * HALF) * 4);
    }
    if (size::HAS_VECTOR) ring.release(n);
}

template <bool SUMS_ROWS, fp8_sums SUMS, bool A_E5M2>
__device__ __forceinline__ void consume_tiles(const fp8_task &task, const fp8_maps &maps, char *memory) {
    using size = tile_size<SUMS_ROWS, SUMS>;
    constexpr bool LOADS_SCALES = SUMS == SCALED && !SUMS_ROWS;
    const int group = threadIdx.x / WARPGROUP - 1;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<STAGES> ring{at + size::RING};
    const float scale = SUMS == SCALED ? 1 : *task.a_scales * *task.b_scales;
    tile_list<SUMS_ROWS, COLS, DEPTH> tiles(task.extent, (const int *)(memory + size::TILE_OFFSETS), NULL);
    product_tile t, next;
    float sums[COLS / 8][4];
    stage_scales scales = {{1, 1}, {1, 1}}, next_scales = scales;
    unsigned index = blockIdx.x;
    int n = 0;
    bool more = tiles.find(index, t);
    if (LOADS_SCALES && more) next_scales = load_scales(task, t, 0);
    for (; more; t = next) {
        if (SUMS != PLAIN)
#pragma unroll
            for (int i = 0; i < COLS / 2; i++) sums[i / 4][i % 4] = 0;
        for (int step = 0; step < t.steps; step++, n++) {
            const uint32_t a = at + n % STAGES * size::STAGE + group * (size::A / CONSUMERS);
            const uint32_t b = at + n % STAGES * size::STAGE + size::A;
            const uint32_t vector = at + size::VECTORS + n % STAGES * size::VECTOR;
            if (LOADS_SCALES) scales = next_scales;
            if (LOADS_SCALES && step + 1 < t.steps) next_scales = load_scales(task, t, step + 1);
            stagger_warpgroups<STAGES>(group, step, t.steps);
            ring.wait_filled(n);
            if constexpr (SUMS == PLAIN) {
                multiply<A_E5M2>(sums, a, b, step == 0);
                mt_wgmma_wait<1>();
                if (step > 0) ring.release(n - 1);
            } else {
                add_stage<SUMS_ROWS, SUMS, A_E5M2>(sums, ring, n, a, b, scales, vector);
            }
        }
        more = tiles.find(index += gridDim.x, next); // overlaps with the last products
        if (LOADS_SCALES && more) next_scales = load_scales(task, next, 0);
        if constexpr (SUMS == PLAIN) {
            mt_wgmma_wait<0>();
            mt_wgmma_hold(sums);
            ring.release(n - 1);
        }
        store_tile<SUMS_ROWS, SUMS>(task, maps, at + size::OUT, t, scale, sums);
    }
    if (threadIdx.x % 32 == 0) mt_stores_wait_read<0>();
}
#endif

template <bool SUMS_ROWS, fp8_sums SUMS, bool A_E5M2>
__global__ void __launch_bounds__(THREADS, 1)
    fp8_grouped_hopper(const fp8_task task, const __grid_constant__ fp8_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = tile_size<SUMS_ROWS, SUMS>;
    extern __shared__ __align__(1024) char memory[];
    if (threadIdx.x < 32)
        compute_tile_offsets((int *)(memory + size::TILE_OFFSETS), task.extent.offsets, task.extent.E);
    if (threadIdx.x == WARPGROUP) {
        mt_ring<STAGES>{mt_shared_address(memory) + size::RING}.init(1, 4 * CONSUMERS);
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<24>();
        if (threadIdx.x == 0) produce_tiles<SUMS_ROWS, SUMS>(task, maps, memory);
    } else {
        mt_registers_grow<240>();
        consume_tiles<SUMS_ROWS, SUMS, A_E5M2>(task, maps, memory);
    }
#endif
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <bool SUMS_ROWS, fp8_sums SUMS> static fp8_maps maps_of(const mt_fp8_product_args *p) {
    const int64_t matrices = SUMS_ROWS ? 1 : p->num_experts, results = SUMS_ROWS ? p->num_experts : 1;
    fp8_maps maps = {tensor_map(p->a.data, p->a.format, 1, p->M, p->a.stride, ROWS),
                     tensor_map(p->b.data, p->b.format, matrices, p->N, p->b.stride, COLS),
                     tensor_map(p->out, p->out_dtype, results, p->M, p->N, 16)};
    if (tile_size<SUMS_ROWS, SUMS>::HAS_VECTOR)
        maps.a_scales = mt_scales_map(p->a.inverse_scales, p->a.stride / DEPTH, mt_divide_up(p->M, 4) * 4, ROWS),
        maps.b_scales = mt_scales_map(p->b.inverse_scales, p->b.stride / DEPTH, mt_divide_up(p->N, 4) * 4, COLS);
    return maps;
}

template <bool SUMS_ROWS, fp8_sums SUMS, bool A_E5M2>
static void launch(const mt_fp8_product_args *p, mt_stream *stream) {
    constexpr int BYTES = tile_size<SUMS_ROWS, SUMS>::BYTES;
    auto kernel = fp8_grouped_hopper<SUMS_ROWS, SUMS, A_E5M2>;
    fp8_task task = {{p->offsets, (int)p->num_experts, (int)p->M, (int)p->N, (int)p->K}};
    task.out = p->out, task.a_scales = p->a.inverse_scales, task.b_scales = p->b.inverse_scales, task.M = (int)p->M;
    task.a_scales_width = (int)mt_divide_up(p->M, 4) * 4, task.b_scales_width = (int)mt_divide_up(p->b.stride, 512) * 4;
    task.b_scales_height = (int)mt_divide_up(p->N, 128);
    task.accumulate = p->accumulate, task.is_float = p->out_dtype == MT_F32;
    mt_cuda_take_shared(kernel, BYTES);
    kernel<<<count_blocks(count_tiles<SUMS_ROWS, COLS>(task.extent, p->M)), THREADS, BYTES, mt_cuda_stream(stream)>>>(
        task, maps_of<SUMS_ROWS, SUMS>(p));
    MT_CUDA_LAUNCHED();
}

template <bool SUMS_ROWS, fp8_sums SUMS> static void launch(const mt_fp8_product_args *p, mt_stream *stream) {
    if (p->a.format == MT_F8_E5M2)
        launch<SUMS_ROWS, SUMS, true>(p, stream);
    else
        launch<SUMS_ROWS, SUMS, false>(p, stream);
}

/* Gradients of weights are summed exactly, whether required or not. Code for sm_90a runs on Hopper only. */
extern "C" bool mt_fp8_hopper(const mt_fp8_product_args *p, mt_stream *stream) {
    const bool scaled = p->a.blocks == MT_FP8_VECTOR_128;
    const mt_fp8_blocks b_blocks = !scaled ? MT_FP8_TENSOR : p->sums_rows ? MT_FP8_VECTOR_128 : MT_FP8_BLOCK_128;
    const uintptr_t addresses =
        (uintptr_t)p->out | (uintptr_t)p->a.data | (uintptr_t)p->b.data |
        (p->sums_rows && scaled ? (uintptr_t)p->a.inverse_scales | (uintptr_t)p->b.inverse_scales : 0);
    if (mt_cuda_device()->major != 9 || !p->offsets || p->bias || addresses % 16 != 0) return false;
    if ((!scaled && p->a.blocks != MT_FP8_TENSOR) || p->b.blocks != b_blocks || p->b.format != MT_F8_E4M3) return false;
    if (p->sums_rows ? p->out_dtype != MT_F32 : p->accumulate) return false;
    if (p->M == 0 || p->N == 0 || p->K == 0 || p->N % 8 != 0) return false;
    if (p->num_experts == 0 || p->num_experts > MAX_EXPERTS) return false;
    if (p->sums_rows && scaled)
        launch<true, SCALED>(p, stream);
    else if (p->sums_rows)
        launch<true, EXACT>(p, stream);
    else if (scaled)
        launch<false, SCALED>(p, stream);
    else if (p->exact_sums)
        launch<false, EXACT>(p, stream);
    else
        launch<false, PLAIN>(p, stream);
    return true;
}

#else

extern "C" bool mt_fp8_hopper(const mt_fp8_product_args *p, mt_stream *stream) {
    (void)p, (void)stream;
    return false;
}

#endif
