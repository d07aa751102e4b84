/* grouped.cu: linear layers grouped by expert: the implementations that run on any GPU.
 *
 * The router decides the number of rows of each expert, and only the device knows it: reading it on the host would wait
 * for all preceding work. Therefore the host launches the largest possible number of tiles (M rows in E experts need at
 * most M / ROWS + E tiles of rows). Each block reads `offsets` to find its expert and its rows; blocks beyond the last
 * tile end at once.
 *
 * The rows of a tile may extend past the last row of its expert. Those rows belong to another expert, or to nobody and
 * hold arbitrary memory. Every element that does not belong to the expert is read as 0. The gradient of the weights
 * needs this for both operands, because 0 times NaN is NaN. */
#include "cuda.h"
#include "experts.cuh"
#include "grouped.h"
#include "mma.cuh"
#include "vector.cuh"

typedef __nv_bfloat16 bf16;

enum { ROWS = 128, COLS = 128, THREADS = 256 }; // tile of the result per block; threads of a block

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

struct group_task {
    const int32_t *offsets;
    int N, K, E;
    int rows, cols; // of the result; rows 0: the rows of each expert
    bool accumulate;
    int a_stride, b_stride, out_stride; // elements between rows
    float scale;
};

/* A tile: its corner (row, col) in the product of rows [first, first + count), which belong to `expert`. */
struct group_tile {
    int expert, first, count, row, col;
};

/* The tile of this block; false if there is none. */
template <mt_grouped_kind KIND> __device__ static bool find_tile(const group_task &task, group_tile &t) {
    const int col_tiles = (task.cols + COLS - 1) / COLS, index = blockIdx.x / col_tiles;
    t.col = (int)(blockIdx.x % col_tiles) * COLS;
    if (KIND != MT_GROUPED_BACKWARD_WEIGHT)
        return mt_find_expert_rows<ROWS>(task.offsets, task.E, index, t.expert, t.first, t.count, t.row);
    const int row_tiles = (task.rows + ROWS - 1) / ROWS;
    t.expert = index / row_tiles, t.row = index % row_tiles * ROWS;
    t.first = task.offsets[t.expert], t.count = task.offsets[t.expert + 1] - t.first;
    return true;
}

/* A row-major matrix [rows, cols] in memory. */
template <class T> struct view {
    const T *data;
    int rows, cols, stride;

    __device__ __forceinline__ bool has(int row, int col) const {
        return row < rows && col < cols;
    }
    __device__ __forceinline__ const T *at(int row, int col) const {
        return data + (int64_t)row * stride + col;
    }
};
template <class T, mt_grouped_kind KIND>
__device__ __forceinline__ view<T> view_of_a(const group_task &task, const group_tile &t, const T *a) {
    const int width = KIND == MT_GROUPED_FORWARD ? task.K : task.N;
    return {a + (int64_t)t.first * task.a_stride, t.count, width, task.a_stride};
}
template <class T, mt_grouped_kind KIND>
__device__ __forceinline__ view<T> view_of_b(const group_task &task, const group_tile &t, const T *b) {
    if (KIND == MT_GROUPED_BACKWARD_WEIGHT)
        return {b + (int64_t)t.first * task.b_stride, t.count, task.K, task.b_stride};
    return {b + (int64_t)t.expert * task.N * task.K, task.N, task.K, task.K};
}

/* For this tile's expert: the length of the summed dimension, the first row of the result, and the number of its
 * rows. */
template <mt_grouped_kind KIND> __device__ __forceinline__ int inner_of(const group_task &task, const group_tile &t) {
    return KIND == MT_GROUPED_FORWARD ? task.K : KIND == MT_GROUPED_BACKWARD_INPUT ? task.N : t.count;
}
template <mt_grouped_kind KIND>
__device__ __forceinline__ int64_t first_row_of_result(const group_task &task, const group_tile &t) {
    return KIND == MT_GROUPED_BACKWARD_WEIGHT ? (int64_t)t.expert * task.N : t.first;
}
template <mt_grouped_kind KIND>
__device__ __forceinline__ int rows_of_result(const group_task &task, const group_tile &t) {
    return KIND == MT_GROUPED_BACKWARD_WEIGHT ? task.N : t.count;
}

/* ---- reference implementation: fp32 in registers ----------------------------------------------------------------- */

enum { INNER = 16, SIDE = 8 }; // a thread holds SIDE x SIDE elements of the result

/* Copies a tile to shared[inner][128]. The summed dimension runs along the rows of the matrix (transposed: along its
 * columns). */
template <class T, bool TRANSPOSED>
__device__ __forceinline__ void load_floats(float (&shared)[INNER][128 + 4], const view<T> &from, int row, int inner) {
    for (int i = threadIdx.x; i < 128 * INNER; i += THREADS) {
        const int r = TRANSPOSED ? i % 128 : i / INNER, k = TRANSPOSED ? i / 128 : i % INNER;
        const int y = TRANSPOSED ? inner + k : row + r, x = TRANSPOSED ? row + r : inner + k;
        shared[k][r] = from.has(y, x) ? mt_to_float(*from.at(y, x)) : 0;
    }
}

template <class T, class Out, mt_grouped_kind KIND>
__global__ void __launch_bounds__(THREADS) grouped_ffma(Out *out, const T *a, const T *b, const group_task task) {
    __shared__ float as[INNER][ROWS + 4], bs[INNER][COLS + 4];
    group_tile t;
    if (!find_tile<KIND>(task, t)) return;
    const view<T> from_a = view_of_a<T, KIND>(task, t, a), from_b = view_of_b<T, KIND>(task, t, b);
    const int inner = inner_of<KIND>(task, t), my_row = threadIdx.x / 16 * SIDE, my_col = threadIdx.x % 16 * SIDE;
    float c[SIDE][SIDE] = {};
    for (int k0 = 0; k0 < inner; k0 += INNER) {
        load_floats<T, KIND == MT_GROUPED_BACKWARD_WEIGHT>(as, from_a, t.row, k0);
        load_floats<T, KIND != MT_GROUPED_FORWARD>(bs, from_b, t.col, k0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < INNER; k++) {
            float x[SIDE], y[SIDE];
#pragma unroll
            for (int i = 0; i < SIDE; i++) x[i] = as[k][my_row + i], y[i] = bs[k][my_col + i];
#pragma unroll
            for (int i = 0; i < SIDE; i++)
#pragma unroll
                for (int j = 0; j < SIDE; j++) c[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
    const int rows = rows_of_result<KIND>(task, t);
#pragma unroll
    for (int i = 0; i < SIDE; i++)
#pragma unroll
        for (int j = 0; j < SIDE; j++) {
            const int row = t.row + my_row + i, col = t.col + my_col + j;
            if (row >= rows || col >= task.cols) continue;
            Out *to = out + (first_row_of_result<KIND>(task, t) + row) * task.out_stride + col;
            const float sum = task.scale * c[i][j];
            *to = mt_from_float<Out>(task.accumulate ? mt_to_float(*to) + sum : sum);
        }
}

/* ---- tensor cores: bf16 and fp16 --------------------------------------------------------------------------------- */

/* Two stages, each a tile of `a` and a tile of `b` with 64 elements of the summed dimension. A warp computes 64 x 32 of
 * the result. */
enum { DEPTH = 64, TILE = 128 * DEPTH * 2, MMA_BYTES = 4 * TILE };

/* Starts the copy of the tile [HEIGHT, WIDTH] at (row, col). WIDE is false if rows are not aligned to 16 bytes;
 * elements are copied one by one then. */
template <int HEIGHT, int WIDTH, bool WIDE, class T>
__device__ __forceinline__ void load_tile(uint32_t to, const view<T> &from, int row, int col) {
#pragma unroll 4
    for (int i = threadIdx.x; i < HEIGHT * WIDTH / 8; i += THREADS) {
        const int r = row + i / (WIDTH / 8), c = col + i % (WIDTH / 8) * 8;
        const uint32_t place = to + mt_tile_chunk<HEIGHT>(i / (WIDTH / 8), i % (WIDTH / 8));
        if (WIDE) {
            const bool exists = from.has(r, c);
            mt_copy16_async(place, exists ? from.at(r, c) : from.data, exists);
        } else {
            for (int j = 0; j < 8; j += 2) {
                const uint32_t low = from.has(r, c + j) ? *(const uint16_t *)from.at(r, c + j) : 0;
                const uint32_t high = from.has(r, c + j + 1) ? *(const uint16_t *)from.at(r, c + j + 1) : 0;
                mt_store_shared(place + j * 2, low | high << 16);
            }
        }
    }
}

/* The tile of operand `a` (or `b`) for the part of the sum that begins at `inner`. */
template <bool TRANSPOSED, bool WIDE, class T>
__device__ __forceinline__ void load_operand(uint32_t to, const view<T> &from, int row, int inner) {
    if (TRANSPOSED)
        load_tile<DEPTH, 128, WIDE>(to, from, inner, row);
    else
        load_tile<128, DEPTH, WIDE>(to, from, row, inner);
}

/* c += a b over 64 elements of the summed dimension, for this warp's corner (row, col). */
template <class T, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ __forceinline__ void multiply_tiles(float (&c)[4][4][4], uint32_t a_tile, uint32_t b_tile, int row,
                                               int col) {
    const uint32_t down = mt_lane_down(), across = mt_lane_across();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (A_TRANSPOSED)
                mt_ldmatrix_transposed(a[i], mt_tile_block<DEPTH>(a_tile, across, k, row + 16 * i));
            else
                mt_ldmatrix(a[i], mt_tile_block<128>(a_tile, down, row + 16 * i, k));
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (B_TRANSPOSED)
                mt_ldmatrix_transposed(b[j], mt_tile_block<DEPTH>(b_tile, down, k, col + 16 * j));
            else
                mt_ldmatrix(b[j], mt_tile_block<128>(b_tile, across, col + 16 * j, k));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) mt_mma_of<T>(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

/* Stores the first `exist` of two neighbouring elements: the ones inside the matrix. If rows are a multiple of 16
 * bytes, `exist` is 0 or 2. */
template <class Out, bool WIDE>
__device__ __forceinline__ void store_pair(Out *to, float x, float y, int exist, bool accumulate) {
    if (exist > 0 && accumulate) x += mt_to_float(to[0]);
    if (exist > 1 && accumulate) y += mt_to_float(to[1]);
    if (WIDE && exist > 1) {
        if constexpr (sizeof(Out) == 4)
            *(float2 *)to = make_float2(x, y);
        else
            *(uint32_t *)to = mt_pair_from_float(Out(), x, y);
        return;
    }
    if (exist > 0) to[0] = mt_from_float<Out>(x);
    if (exist > 1) to[1] = mt_from_float<Out>(y);
}

template <class T, class Out, mt_grouped_kind KIND, bool WIDE>
__global__ void __launch_bounds__(THREADS) grouped_mma(Out *out, const T *a, const T *b, const group_task task) {
    constexpr bool A_TRANSPOSED = KIND == MT_GROUPED_BACKWARD_WEIGHT, B_TRANSPOSED = KIND != MT_GROUPED_FORWARD;
    extern __shared__ __align__(1024) char memory[];
    group_tile t;
    if (!find_tile<KIND>(task, t)) return;
    const view<T> from_a = view_of_a<T, KIND>(task, t, a), from_b = view_of_b<T, KIND>(task, t, b);
    const uint32_t at = mt_shared_address(memory);
    const int inner = inner_of<KIND>(task, t), warp = threadIdx.x / 32, my_row = warp / 4 * 64, my_col = warp % 4 * 32;
    float c[4][4][4] = {};
    auto load = [&](int k) {
        const uint32_t to = at + k / DEPTH % 2 * 2 * TILE;
        load_operand<A_TRANSPOSED, WIDE>(to, from_a, t.row, k);
        load_operand<B_TRANSPOSED, WIDE>(to + TILE, from_b, t.col, k);
    };
    if (inner > 0) load(0);
    for (int k = 0; k < inner; k += DEPTH) {
        const uint32_t tile = at + k / DEPTH % 2 * 2 * TILE;
        mt_copies_wait();
        __syncthreads();
        if (k + DEPTH < inner) load(k + DEPTH);
        multiply_tiles<T, A_TRANSPOSED, B_TRANSPOSED>(c, tile, tile + TILE, my_row, my_col);
    }
    const int rows = rows_of_result<KIND>(task, t), lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = t.row + my_row + i * 8 + lane / 4;
        if (row >= rows) continue;
        Out *to = out + (first_row_of_result<KIND>(task, t) + row) * task.out_stride;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int col = t.col + my_col + j * 8 + lane % 4 * 2;
            store_pair<Out, WIDE>(to + col, task.scale * c[i / 2][j][i % 2 * 2],
                                  task.scale * c[i / 2][j][i % 2 * 2 + 1], task.cols - col, task.accumulate);
        }
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static group_task task_of(const mt_grouped_call *call) {
    bool of_weight = call->kind == MT_GROUPED_BACKWARD_WEIGHT;
    int cols = call->kind == MT_GROUPED_FORWARD ? (int)call->N : (int)call->K;
    int width = call->kind == MT_GROUPED_FORWARD ? (int)call->K : (int)call->N; // of a
    group_task task = {call->offsets, (int)call->N,    (int)call->K, (int)call->E, of_weight ? (int)call->N : 0,
                       cols,          call->accumulate};
    task.a_stride = call->a_stride ? (int)call->a_stride : width;
    task.b_stride = call->b_stride ? (int)call->b_stride : (int)call->K;
    task.out_stride = call->out_stride ? (int)call->out_stride : cols;
    task.scale = call->scale != 0 ? call->scale : 1;
    return task;
}

/* The largest possible number of tiles. */
static unsigned blocks_of(const mt_grouped_call *call, const group_task &task) {
    int64_t tiles = task.rows ? call->E * mt_divide_up(task.rows, ROWS) : mt_divide_up(call->M, ROWS) + call->E;
    return (unsigned)(tiles * mt_divide_up(task.cols, COLS));
}

template <class T, class Out, mt_grouped_kind KIND> static void launch_ffma(const mt_grouped_call *call) {
    group_task task = task_of(call);
    grouped_ffma<T, Out, KIND><<<blocks_of(call, task), THREADS, 0, mt_cuda_stream(call->stream)>>>(
        (Out *)call->out, (const T *)call->a, (const T *)call->b, task);
    MT_CUDA_LAUNCHED();
}

template <class T, class Out, mt_grouped_kind KIND, bool WIDE> static void launch_mma(const mt_grouped_call *call) {
    group_task task = task_of(call);
    auto kernel = grouped_mma<T, Out, KIND, WIDE>;
    mt_cuda_take_shared(kernel, MMA_BYTES);
    kernel<<<blocks_of(call, task), THREADS, MMA_BYTES, mt_cuda_stream(call->stream)>>>(
        (Out *)call->out, (const T *)call->a, (const T *)call->b, task);
    MT_CUDA_LAUNCHED();
}

template <class T> static bool definition_of(const mt_grouped_call *call) {
    if (call->kind == MT_GROUPED_FORWARD) launch_ffma<T, T, MT_GROUPED_FORWARD>(call);
    if (call->kind == MT_GROUPED_BACKWARD_INPUT) launch_ffma<T, T, MT_GROUPED_BACKWARD_INPUT>(call);
    if (call->kind == MT_GROUPED_BACKWARD_WEIGHT) launch_ffma<T, float, MT_GROUPED_BACKWARD_WEIGHT>(call);
    return true;
}
extern "C" bool mt_grouped_definition(const mt_grouped_call *call) {
    return MT_CUDA_DISPATCH(call->dtype, definition_of, call);
}

template <class T, bool WIDE> static bool mma(const mt_grouped_call *call) {
    if (call->kind == MT_GROUPED_FORWARD) launch_mma<T, T, MT_GROUPED_FORWARD, WIDE>(call);
    if (call->kind == MT_GROUPED_BACKWARD_INPUT) launch_mma<T, T, MT_GROUPED_BACKWARD_INPUT, WIDE>(call);
    if (call->kind == MT_GROUPED_BACKWARD_WEIGHT) launch_mma<T, float, MT_GROUPED_BACKWARD_WEIGHT, WIDE>(call);
    return true;
}
extern "C" bool mt_grouped_mma(const mt_grouped_call *call) {
    if (call->dtype == MT_F32) return false;
    uintptr_t addresses = (uintptr_t)call->out | (uintptr_t)call->a | (uintptr_t)call->b;
    int64_t strides = call->a_stride | call->b_stride | call->out_stride;
    bool wide = call->N % 8 == 0 && call->K % 8 == 0 && strides % 8 == 0 && addresses % 16 == 0;
    if (call->dtype == MT_F16) return wide ? mma<__half, true>(call) : mma<__half, false>(call);
    return wide ? mma<bf16, true>(call) : mma<bf16, false>(call);
}

extern "C" bool mt_grouped_hopper(const mt_grouped_call *call); // defined in grouped_hopper.cu

extern "C" const mt_grouped_rung mt_grouped_rungs[MT_NUM_GROUPED_RUNGS] = {
    {"definition", mt_grouped_definition}, {"mma", mt_grouped_mma}, {"hopper", mt_grouped_hopper}};

static void run(const mt_grouped_call &call) {
    if (blocks_of(&call, task_of(&call)) == 0 || (call.M == 0 && call.kind != MT_GROUPED_BACKWARD_WEIGHT)) return;
    int rung = MT_NUM_GROUPED_RUNGS - 1;
    while (!mt_grouped_rungs[rung].product(&call)) rung--;
}

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

/* One product per expert, whose rows the host knows. */
template <class Product> static void each_expert(const mt_grouped_args *a, mt_dtype dtype, Product product) {
    const int64_t size = mt_dtype_size(dtype), weight = a->N * a->K;
    auto at = [&](const void *base, int64_t elements) { return base ? (char *)base + elements * size : NULL; };
    for (int64_t e = 0; e < a->E; e++) {
        const int64_t first = a->host_offsets[e];
        mt_linear_args own = {};
        own.T = a->host_offsets[e + 1] - first, own.N = a->N, own.K = a->K, own.accumulate = a->accumulate;
        own.x = at(a->x, first * a->K), own.dx = at(a->dx, first * a->K), own.w = at(a->w, e * weight);
        own.y = at(a->y, first * a->N), own.dy = at(a->dy, first * a->N), own.dw = a->dw ? a->dw + e * weight : NULL;
        product(own);
    }
}

extern "C" void mt_cuda_grouped_linear_forward(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    if (!a->offsets) return mt_cuda_strided_forward(a, dtype, stream);
    if (a->host_offsets)
        return each_expert(a, dtype, [&](const mt_linear_args &own) {
            if (own.T > 0) mt_cuda_linear_forward(&own, dtype, stream);
        });
    run({MT_GROUPED_FORWARD, a->y, a->x, a->w, a->offsets, a->M, a->N, a->K, a->E, a->accumulate, dtype, stream,
         a->x_stride, 0, a->y_stride, a->scale});
}

extern "C" void mt_cuda_grouped_linear_backward_input(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    if (!a->offsets) return mt_cuda_strided_backward_input(a, dtype, stream);
    if (a->host_offsets)
        return each_expert(a, dtype, [&](const mt_linear_args &own) {
            if (own.T > 0) mt_cuda_linear_backward_input(&own, dtype, stream);
        });
    run({MT_GROUPED_BACKWARD_INPUT, a->dx, a->dy, a->w, a->offsets, a->M, a->N, a->K, a->E, a->accumulate, dtype,
         stream, a->y_stride, 0, a->x_stride, a->scale});
}

extern "C" void mt_cuda_grouped_linear_backward_weight(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    if (!a->offsets) return mt_cuda_strided_backward_weight(a, dtype, stream);
    if (a->host_offsets)
        return each_expert(a, dtype, [&](const mt_linear_args &own) {
            if (own.T > 0)
                mt_cuda_linear_backward_weight(&own, dtype, stream);
            else if (!own.accumulate)
                mt_cuda_memory_zero(own.dw, own.N * own.K * (int64_t)sizeof *own.dw, stream);
        });
    run({MT_GROUPED_BACKWARD_WEIGHT, a->dw, a->dy, a->x, a->offsets, a->M, a->N, a->K, a->E, a->accumulate, dtype,
         stream, a->y_stride, a->x_stride, 0, a->scale});
}
