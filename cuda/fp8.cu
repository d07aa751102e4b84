/* fp8.cu: quantization to fp8, the scales of delayed scaling, and fp8 products on any GPU.
 *
 * quantize reads x once and writes both copies. A block quantizes a tile of 128 rows and 128 columns, which is also the
 * unit of scales: a row of the tile is a vector of the row-wise copy, a column one of the transposed copy. A thread
 * holds 8 x 8 elements in registers; 16 threads hold 8 rows. Row maxima are exchanged within these 16 threads, column
 * maxima through shared memory, and the transposed bytes go through shared memory, so that every store to device memory
 * is 16 bytes wide. */
#include "experts.cuh"
#include "fp8.cuh"
#include "fp8.h"

/* ---- quantize ---------------------------------------------------------------------------------------------------- */

/* Rows and columns of a tile; of a thread's part of it. */
enum { TILE = 128, SIDE = 8, THREADS = TILE * TILE / (SIDE * SIDE), WARPS = THREADS / 32 };
static_assert((int)TILE == (int)MT_FP8_EXPERT_ROWS, "the segment of an expert is whole tiles");

/* The operands, named as in megatron.h. */
template <class T> struct quantize_task {
    const T *x;
    mt_fp8_matrix rows, columns;
    const float *scale;
    float *amax;
    const int32_t *offsets;
    int64_t R, C;
    int num_experts;
    unsigned row_tiles, column_tiles;  // of one matrix, padding included
    int64_t row_scales, column_scales; // of one matrix
};

/* 8 elements, or 8 magnitudes. */
template <class T> using chunk = mt_pack<T, SIDE>;

/* to[i] = max(to[i], |x[i]|) */
__device__ static inline void raise(chunk<float> &to, const chunk<float> &x) {
#pragma unroll
    for (int i = 0; i < SIDE; i++)
        to.value[i] = __uint_as_float(max(__float_as_uint(to.value[i]), __float_as_uint(x.value[i]) & 0x7fffffff));
}
template <class T> __device__ static inline void raise(chunk<T> &to, const chunk<T> &x) {
#pragma unroll
    for (int i = 0; i < SIDE / 2; i++) to.pairs[i] = __vmaxu2(to.pairs[i], x.pairs[i] & 0x7fff7fff);
}

/* The chunk of the lane whose number differs in the bits of `mask`. */
template <class T> __device__ static inline chunk<T> exchanged(const chunk<T> &x, int mask) {
    uint32_t words[sizeof x / 4];
    chunk<T> other;
    memcpy(words, &x, sizeof x);
#pragma unroll
    for (uint32_t &word : words) word = __shfl_xor_sync(0xffffffff, word, mask);
    memcpy(&other, words, sizeof x);
    return other;
}

/* result[i] = the largest magnitude of rows[i]. */
__device__ static inline chunk<float> largest_of_each(const chunk<float> (&rows)[SIDE]) {
    chunk<float> result;
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        uint32_t bits = 0;
        for (int j = 0; j < SIDE; j++) bits = max(bits, __float_as_uint(rows[i].value[j]) & 0x7fffffff);
        result.value[i] = __uint_as_float(bits);
    }
    return result;
}
template <class T> __device__ static inline chunk<T> largest_of_each(const chunk<T> (&rows)[SIDE]) {
    chunk<T> result;
    uint32_t pairs[SIDE]; // maxima over even and over odd columns
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        pairs[i] = 0;
        for (int j = 0; j < SIDE / 2; j++) pairs[i] = __vmaxu2(pairs[i], rows[i].pairs[j] & 0x7fff7fff);
    }
#pragma unroll
    for (int i = 0; i < SIDE; i += 2)
        result.pairs[i / 2] =
            __vmaxu2(__byte_perm(pairs[i], pairs[i + 1], 0x5410), __byte_perm(pairs[i], pairs[i + 1], 0x7632));
    return result;
}

/* The largest of 8 magnitudes. */
template <class T> __device__ static inline uint32_t largest_bits(const chunk<T> &x) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < SIDE; i++) bits = max(bits, __float_as_uint(mt_element(x, i)));
    return bits;
}

/* The largest magnitude of the block, for all threads. Contains a barrier. */
__device__ static inline float block_largest(uint32_t bits, uint32_t (&of_warp)[WARPS]) {
    bits = mt_warp_max(0xffffffff, bits);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) bits = max(bits, of_warp[w]);
    return __uint_as_float(bits);
}

/* The scale of a matrix or of a block whose largest magnitude is `amax`. */
template <mt_dtype FORMAT> __device__ static inline float tensor_scale(float amax) {
    const float scale = (FORMAT == MT_F8_E4M3 ? 448.0f : 57344.0f) / amax;
    if (amax == 0 || !isfinite(amax)) return 1;
    return isinf(scale) ? 3.40282347e38f : scale;
}
/* The same, rounded down to a power of two, at most 2^127. The largest number of either format is 1.75 times a power of
 * two, so the exponent decreases by one more where the mantissa of amax exceeds 1.75. */
template <mt_dtype FORMAT> __device__ static inline float block_scale(float amax) {
    const uint32_t bits = __float_as_uint(amax);
    const int exponent = (FORMAT == MT_F8_E4M3 ? 8 : 15) + 127 - (int)(bits >> 23) - ((bits & 0x7fffff) > 0x600000);
    if (bits == 0 || bits >= 0x7f800000) return 1;
    return __uint_as_float((uint32_t)(min(exponent, 127) + 127) << 23);
}

/* The tile of a block. Its rows [begin, end) exist, and begin + first is the number of the first in x. */
struct quantize_tile {
    int64_t matrix, first;
    int begin, end;
    unsigned row, column; // number of the tile in the transposed and in the row-wise copy
};

template <class T> __device__ static inline quantize_tile find_tile(const quantize_task<T> &task, unsigned index) {
    quantize_tile t;
    t.column = index % task.column_tiles, t.row = index / task.column_tiles % task.row_tiles;
    t.matrix = index / task.column_tiles / task.row_tiles;
    t.first = (int64_t)t.row * TILE, t.begin = 0, t.end = (int)max((int64_t)0, min((int64_t)TILE, task.R - t.first));
    if (!task.offsets) return t;
    if (task.columns.data) { // a tile of the segments
        int expert, first, count = 0, row = 0;
        if (mt_find_expert_rows<TILE>(task.offsets, task.num_experts, (int)t.row, expert, first, count, row))
            t.first = first + row;
        t.end = min(TILE, count - row);
    } else { // rows of no expert are not read
        t.begin = (int)max((int64_t)0, task.offsets[0] - t.first);
        t.end = (int)min((int64_t)t.end, task.offsets[task.num_experts] - t.first);
    }
    return t;
}

/* Stores the row-wise copy. Two neighbouring threads hold 16 columns of 8 rows; of each two rows, the one stores the
 * first and the other the second. */
template <mt_dtype FORMAT, class T>
__device__ static inline void store_rows(const quantize_task<T> &task, const quantize_tile &t,
                                         const chunk<T> (&x)[SIDE], const float (&scale)[SIDE]) {
    const int place = threadIdx.x % (TILE / SIDE), row = threadIdx.x / (TILE / SIDE) * SIDE;
    const bool second = place % 2;
    const int64_t column = (int64_t)t.column * TILE + (place - second) * SIDE, stride = task.rows.stride;
    uint8_t *to = task.rows.data + (t.matrix * task.R + t.first) * stride + column;
#pragma unroll
    for (int i = 0; i < SIDE; i += 2) {
        uint32_t bits[2][2];
#pragma unroll
        for (int k = 0; k < 2; k++)
            for (int j = 0; j < 2; j++) {
                const float s = scale[i + k];
                const chunk<T> &from = x[i + k];
                bits[k][j] = mt_to_fp8<FORMAT>(mt_element(from, 4 * j) * s, mt_element(from, 4 * j + 1) * s,
                                               mt_element(from, 4 * j + 2) * s, mt_element(from, 4 * j + 3) * s);
            }
        const uint32_t low = __shfl_xor_sync(0xffffffff, second ? bits[0][0] : bits[1][0], 1);
        const uint32_t high = __shfl_xor_sync(0xffffffff, second ? bits[0][1] : bits[1][1], 1);
        const uint4 word =
            second ? make_uint4(low, high, bits[1][0], bits[1][1]) : make_uint4(bits[0][0], bits[0][1], low, high);
        const int r = row + i + second;
        if (r >= t.begin && r < t.end && column < stride) mt_store_word((uint4 *)(to + r * stride), word);
    }
}

/* Stores the transposed copy. The 8 bytes of rows 8 g .. 8 g + 7 of a column of the tile are stored in shared memory
 * at g ^ (column / 8), so that the stores of 16 threads and the loads of 8 fall into different banks. */
template <mt_dtype FORMAT, class T>
__device__ static inline void store_columns(const quantize_task<T> &task, const quantize_tile &t,
                                            const chunk<T> (&x)[SIDE], const float (&scale)[SIDE],
                                            uint2 (&shared)[TILE][TILE / SIDE]) {
    const int place = threadIdx.x % (TILE / SIDE), group = threadIdx.x / (TILE / SIDE);
#pragma unroll
    for (int j = 0; j < SIDE; j++) {
        uint32_t bits[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            bits[i] = mt_to_fp8<FORMAT>(mt_element(x[4 * i], j) * scale[j], mt_element(x[4 * i + 1], j) * scale[j],
                                        mt_element(x[4 * i + 2], j) * scale[j], mt_element(x[4 * i + 3], j) * scale[j]);
        shared[place * SIDE + j][group ^ place] = make_uint2(bits[0], bits[1]);
    }
    __syncthreads();
    const int64_t stride = task.columns.stride, row = (int64_t)t.row * TILE + threadIdx.x % 8 * 16;
#pragma unroll
    for (int k = 0; k < TILE * TILE / 16 / THREADS; k++) {
        const int line = k * (THREADS / 8) + threadIdx.x / 8, swizzle = line / SIDE;
        const uint4 word = ((const uint4 *)shared[line])[threadIdx.x % 8 ^ swizzle / 2];
        const int64_t column = (int64_t)t.column * TILE + line;
        if (column < task.C && row < stride)
            mt_store_word((uint4 *)(task.columns.data + (t.matrix * task.C + column) * stride + row),
                          swizzle % 2 ? make_uint4(word.z, word.w, word.x, word.y) : word);
    }
}

/* Stores the inverse scales of the vectors of this tile: of 8 rows each by 8 threads, of 8 columns by one thread. */
template <class T>
__device__ static inline void store_row_scales(const quantize_task<T> &task, const quantize_tile &t,
                                               const float (&scale)[SIDE]) {
    const int place = threadIdx.x % (TILE / SIDE), row = threadIdx.x / (TILE / SIDE) * SIDE + place;
    float mine = 1;
#pragma unroll
    for (int i = 0; i < SIDE; i++) mine = place == i ? scale[i] : mine;
    float *to = task.rows.inverse_scales + t.matrix * task.row_scales + t.column * ((task.R + 3) / 4 * 4) + t.first;
    if (place < SIDE && row >= t.begin && row < t.end) to[row] = 1 / mine;
}
template <class T>
__device__ static inline void store_column_scales(const quantize_task<T> &task, const quantize_tile &t,
                                                  const float (&scale)[SIDE]) {
    const int64_t column = (int64_t)t.column * TILE + threadIdx.x * SIDE; // C is a multiple of 16
    if (threadIdx.x >= TILE / SIDE || column >= task.C) return;
    float *to = task.columns.inverse_scales + t.matrix * task.column_scales + t.row * task.C + column;
#pragma unroll
    for (int j = 0; j < SIDE; j += 4)
        *(float4 *)(to + j) = make_float4(1 / scale[j], 1 / scale[j + 1], 1 / scale[j + 2], 1 / scale[j + 3]);
}

/* Stores the inverse scale of a 128 x 128 block, which is also a block of the transpose. */
template <class T>
__device__ static inline void store_block_scale(const quantize_task<T> &task, const quantize_tile &t, float scale) {
    const int64_t row_width = (task.rows.stride + 511) / 512 * 4, column_width = (task.columns.stride + 511) / 512 * 4;
    if (threadIdx.x > 0) return;
    if (task.rows.data && t.end > 0 && (int64_t)t.column * TILE < task.C)
        task.rows.inverse_scales[t.matrix * task.row_scales + t.row * row_width + t.column] = 1 / scale;
    if (task.columns.data && (int64_t)t.column * TILE < task.C && (int64_t)t.row * TILE < task.columns.stride)
        task.columns.inverse_scales[t.matrix * task.column_scales + t.column * column_width + t.row] = 1 / scale;
}

/* A block per tile. A scale that was computed from x is known after a first pass over x; the second pass takes the
 * tiles in the opposite order, because the last ones are still in L2. */
template <class T, mt_fp8_blocks BLOCKS, mt_dtype FORMAT>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 2 ? 3 : 2) quantize_tiles(const quantize_task<T> task) {
    __shared__ chunk<T> column_maxima[WARPS][TILE / SIDE];
    __shared__ uint2 transposed[TILE][TILE / SIDE];
    __shared__ uint32_t warp_maxima[WARPS];
    mt_begin_next();
    mt_wait_for_previous();
    const bool second_pass = BLOCKS == MT_FP8_TENSOR && !task.scale;
    const quantize_tile t = find_tile(task, second_pass ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const int place = threadIdx.x % (TILE / SIDE), row = threadIdx.x / (TILE / SIDE) * SIDE;
    const int64_t column = (int64_t)t.column * TILE + place * SIDE;
    const T *from = task.x + (t.matrix * task.R + t.first) * task.C + column;
    chunk<T> x[SIDE], of_columns = {};
    float row_scale[SIDE], column_scale[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; i++)
        x[i] = mt_load<SIDE>(from + (row + i) * task.C, column < task.C && row + i >= t.begin && row + i < t.end);
    if (BLOCKS != MT_FP8_TENSOR || (task.scale && task.amax))
#pragma unroll
        for (int i = 0; i < SIDE; i++) raise(of_columns, x[i]);

    if constexpr (BLOCKS == MT_FP8_VECTOR_128) {
        if (task.rows.data) {
            chunk<T> of_rows = largest_of_each(x);
#pragma unroll
            for (int mask = 1; mask < TILE / SIDE; mask *= 2) raise(of_rows, exchanged(of_rows, mask));
#pragma unroll
            for (int i = 0; i < SIDE; i++) row_scale[i] = block_scale<FORMAT>(mt_element(of_rows, i));
            store_row_scales(task, t, row_scale);
        }
        if (task.columns.data) {
            raise(of_columns, exchanged(of_columns, TILE / SIDE));
            if (threadIdx.x % 32 < TILE / SIDE) column_maxima[threadIdx.x / 32][place] = of_columns;
            __syncthreads();
#pragma unroll
            for (int w = 0; w < WARPS; w++) raise(of_columns, column_maxima[w][place]);
#pragma unroll
            for (int j = 0; j < SIDE; j++) column_scale[j] = block_scale<FORMAT>(mt_element(of_columns, j));
            store_column_scales(task, t, column_scale);
        }
    } else {
        float scale;
        if constexpr (BLOCKS == MT_FP8_BLOCK_128) {
            scale = block_scale<FORMAT>(block_largest(largest_bits(of_columns), warp_maxima));
            store_block_scale(task, t, scale);
        } else {
            scale = task.scale ? *task.scale : tensor_scale<FORMAT>(*task.amax);
            if (task.scale && task.amax) {
                const float largest = block_largest(largest_bits(of_columns), warp_maxima);
                if (threadIdx.x == 0 && largest != 0) atomicMax((uint32_t *)task.amax, __float_as_uint(largest));
            }
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                if (task.rows.data) *task.rows.inverse_scales = 1 / scale;
                if (task.columns.data) *task.columns.inverse_scales = 1 / scale;
            }
        }
#pragma unroll
        for (int i = 0; i < SIDE; i++) row_scale[i] = column_scale[i] = scale;
    }
    if (task.rows.data) store_rows<FORMAT>(task, t, x, row_scale);
    if (task.columns.data) store_columns<FORMAT>(task, t, x, column_scale, transposed);
}

/* amax = the largest magnitude of x[n], or of the experts' rows. *amax was 0. */
enum { LOADS = 4 }; // in flight per thread

template <class T> __global__ void largest_magnitude(const quantize_task<T> task, int64_t n) {
    __shared__ uint32_t warp_maxima[WARPS];
    const int64_t begin = task.offsets ? task.offsets[0] * task.C : 0;
    const int64_t end = task.offsets ? task.offsets[task.num_experts] * task.C : n;
    const int64_t step = (int64_t)THREADS * SIDE;
    chunk<T> largest = {};
    for (int64_t at = begin + blockIdx.x * LOADS * step + threadIdx.x * SIDE; at < end;
         at += gridDim.x * LOADS * step) {
        chunk<T> x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) x[i] = mt_load<SIDE>(task.x + at + i * step, at + i * step < end);
#pragma unroll
        for (int i = 0; i < LOADS; i++) raise(largest, x[i]);
    }
    const float amax = block_largest(largest_bits(largest), warp_maxima);
    if (threadIdx.x == 0 && amax != 0) atomicMax((uint32_t *)task.amax, __float_as_uint(amax));
}

template <class T, mt_fp8_blocks BLOCKS>
static void launch_tiles(const quantize_task<T> &task, int64_t count, mt_dtype format, mt_stream *stream) {
    const unsigned blocks = (unsigned)(count * task.row_tiles * task.column_tiles);
    mt_launch_early(format == MT_F8_E4M3 ? quantize_tiles<T, BLOCKS, MT_F8_E4M3>
                                         : quantize_tiles<T, BLOCKS, MT_F8_E5M2>,
                    blocks, THREADS, 0, mt_cuda_stream(stream), task);
}

template <class T> static void quantize(const mt_quantize_args *a, mt_stream *stream) {
    const mt_fp8_matrix one = a->rows.data ? a->rows : a->columns;
    quantize_task<T> task = {(const T *)a->x, a->rows, a->columns, a->scale, a->amax, a->offsets, a->R, a->C};
    const int64_t width = a->rows.data ? mt_max(a->C, a->rows.stride) : a->C;
    const int64_t height = a->columns.data && a->offsets ? a->columns.stride
                           : a->columns.data             ? mt_max(a->R, a->columns.stride)
                                                         : a->R;
    task.num_experts = (int)a->num_experts;
    task.row_tiles = mt_grid_size(mt_max(height, 1), TILE), task.column_tiles = mt_grid_size(width, TILE);
    if (a->rows.data) task.row_scales = mt_fp8_num_scales(1, a->R, a->rows.stride, one.blocks);
    if (a->columns.data) task.column_scales = mt_fp8_num_scales(1, a->C, a->columns.stride, one.blocks);
    if (one.blocks == MT_FP8_TENSOR && !a->scale) {
        const int64_t n = a->count * a->R * a->C, most = mt_cuda_device()->multiProcessorCount * (2048 / THREADS);
        MT_CUDA(cudaMemsetAsync(a->amax, 0, sizeof *a->amax, mt_cuda_stream(stream)));
        largest_magnitude<<<(unsigned)mt_max(1, mt_min(most, mt_divide_up(n, THREADS * SIDE * LOADS))), THREADS, 0,
                            mt_cuda_stream(stream)>>>(task, n);
        MT_CUDA_LAUNCHED();
    }
    if (one.blocks == MT_FP8_TENSOR) launch_tiles<T, MT_FP8_TENSOR>(task, a->count, one.format, stream);
    if (one.blocks == MT_FP8_VECTOR_128) launch_tiles<T, MT_FP8_VECTOR_128>(task, a->count, one.format, stream);
    if (one.blocks == MT_FP8_BLOCK_128) launch_tiles<T, MT_FP8_BLOCK_128>(task, a->count, one.format, stream);
}

/* quantize with positions. A thread quantizes 16 elements of a row and stores them at all places of the row. Reads 2
 * bytes per element in bf16, writes `copies`. */
template <class T, mt_dtype FORMAT>
static __global__ void __launch_bounds__(THREADS)
    quantize_positions(const quantize_task<T> task, const int32_t *position, int copies, int64_t compact,
                       unsigned width) {
    const unsigned index = blockIdx.x * THREADS + threadIdx.x, r = index / width, column = index % width * 16;
    const float scale = *task.scale;
    uint32_t largest = 0;
    if (index == 0) *task.rows.inverse_scales = 1 / scale;
    if (r < task.R) {
        const mt_pack<T, 16> x = mt_load<16>(task.x + r * task.C + column);
        uint32_t bits[4], of_row = mt_magnitude(x);
        mt_pack_to_fp8<FORMAT>(bits, x, scale);
        const uint4 word = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        position += (int64_t)r * copies;
#pragma unroll 8
        for (int i = 0; i < copies; i++) {
            const int32_t place = position[i];
            if (place < 0) continue;
            largest = of_row;
            mt_store_word((uint4 *)(task.rows.data + place * task.rows.stride + column), word);
        }
        if (compact > 0) mt_store_word((uint4 *)(task.rows.data + (compact + r) * task.rows.stride + column), word);
    }
    if (task.amax) mt_raise_amax(task.amax, largest);
}

template <class T> static void launch_positions(const mt_quantize_args *a, mt_stream *stream) {
    const quantize_task<T> task = {(const T *)a->x, a->rows, {}, a->scale, a->amax, NULL, a->R, a->C};
    const int64_t width = a->C / 16, blocks = mt_divide_up(a->R * width, THREADS);
    const auto kernel =
        a->rows.format == MT_F8_E4M3 ? quantize_positions<T, MT_F8_E4M3> : quantize_positions<T, MT_F8_E5M2>;
    MT_CHECK(blocks * THREADS <= UINT32_MAX);
    kernel<<<(unsigned)blocks, THREADS, 0, mt_cuda_stream(stream)>>>(task, a->position, (int)a->copies, a->compact,
                                                                     (unsigned)width);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_quantize(const mt_quantize_args *a, mt_dtype dtype, mt_stream *stream) {
    const mt_fp8_matrix *rows = &a->rows, *columns = &a->columns, *one = rows->data ? rows : columns;
    if (a->count * a->C == 0) return;
    if (a->position) {
        MT_CHECK(a->scale && !columns->data && rows->blocks == MT_FP8_TENSOR && a->count == 1);
        MT_CHECK(a->C % 16 == 0 && rows->stride % 16 == 0 && mt_wide(dtype, {a->x, rows->data}, {}));
        if (a->R > 0) MT_CUDA_DISPATCH(dtype, launch_positions, a, stream);
        return;
    }
    MT_CHECK(!rows->data || !columns->data || (rows->blocks == columns->blocks && rows->format == columns->format));
    MT_CHECK(one->blocks != MT_FP8_VECTOR_32 && !(one->blocks == MT_FP8_BLOCK_128 && a->offsets));
    MT_CHECK(!a->offsets || a->count == 1);
    MT_CHECK(one->blocks == MT_FP8_TENSOR ? a->scale || a->amax : !a->scale);
    MT_CHECK(a->C % MT_CUDA_FP8_MULTIPLE == 0 && mt_wide(dtype, {a->x, rows->data, columns->data}, {}));
    MT_CHECK(one->blocks == MT_FP8_TENSOR || mt_wide(MT_F32, {rows->inverse_scales, columns->inverse_scales}, {}));
    MT_CHECK((!rows->data || rows->stride % 16 == 0) && (!columns->data || columns->stride % 16 == 0));
    MT_CUDA_DISPATCH(dtype, quantize, a, stream);
}

/* ---- scales ------------------------------------------------------------------------------------------------------ */

/* Index of the scale of element (r, c) of a matrix with R rows. */
__device__ static inline int64_t scale_index(const mt_fp8_matrix &matrix, int64_t R, int64_t r, int64_t c) {
    if (matrix.blocks == MT_FP8_TENSOR) return 0;
    if (matrix.blocks == MT_FP8_BLOCK_128) return r / 128 * ((matrix.stride + 511) / 512 * 4) + c / 128;
    return c / 128 * ((R + 3) / 4 * 4) + r;
}

/* Matrix `i` of several with R rows. */
__device__ static inline mt_fp8_matrix matrix_at(mt_fp8_matrix matrix, int64_t R, int64_t i) {
    const int64_t blocks = (matrix.stride + 127) / 128;
    matrix.data += i * R * matrix.stride;
    if (matrix.blocks == MT_FP8_BLOCK_128) matrix.inverse_scales += i * ((R + 127) / 128) * ((blocks + 3) / 4 * 4);
    if (matrix.blocks == MT_FP8_VECTOR_128) matrix.inverse_scales += i * blocks * ((R + 3) / 4 * 4);
    return matrix;
}

/* ---- transpose --------------------------------------------------------------------------------------------------- */

/* columns[C, R] = rows[R, C], bytes; offsets and source: of experts' rows, or NULL. A block takes 128 rows, 128 columns
 * at a time, and loads the next while it stores. A word of shared memory holds 4 columns of a row. The words of row r
 * are stored at w ^ 4 (r / 16), so that 8 threads, which read 16 rows each, meet different banks. With a source, which
 * has each row of the copies once, all rows of some columns are transposed before the next columns: these columns of
 * the source stay in L2. */
enum { GROUP = 4 }; // tiles of 128 columns per block
static __global__ void __launch_bounds__(THREADS, 4)
    transpose_tiles(const mt_fp8_matrix all_rows, const mt_fp8_matrix all_columns, int64_t R, int64_t C,
                    const int32_t *offsets, int num_experts, const int32_t *source) {
    constexpr int WORDS = TILE * TILE / 16 / THREADS;
    __shared__ uint32_t tiles[2][TILE][TILE / 4];
    mt_begin_next();
    mt_wait_for_previous();
    const mt_fp8_matrix rows = matrix_at(all_rows, R, blockIdx.z), columns = matrix_at(all_columns, C, blockIdx.z);
    const unsigned index = source ? blockIdx.x : blockIdx.y, group_of_columns = source ? blockIdx.y : blockIdx.x;
    const int64_t row = (int64_t)index * TILE, end = min(C, (int64_t)(group_of_columns + 1) * GROUP * TILE);
    int64_t column = (int64_t)group_of_columns * GROUP * TILE, first = row, count = R - row; // rows of this block
    if (offsets) {
        int expert, begin = 0, of_expert = 0, before = 0;
        mt_find_expert_rows<TILE>(offsets, num_experts, (int)index, expert, begin, of_expert, before);
        first = begin + before, count = of_expert - before;
    }
    const int line = threadIdx.x / 8, place = threadIdx.x % 8, group = threadIdx.x % 8, word = threadIdx.x / 8;
    const uint8_t *from[WORDS];
#pragma unroll
    for (int k = 0, r = line; k < WORDS; k++, r += THREADS / 8)
        from[k] = rows.data + (source && r < count ? source[first + r] : first + r) * rows.stride + place * 16;
    uint8_t *to = columns.data + word * 4 * columns.stride + row + group * 16;
    const bool stores = row + group * 16 < columns.stride;
    uint4 words[WORDS];
    const auto load = [&](int64_t column) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const bool exists = k * (THREADS / 8) + line < count && column + place * 16 < C;
            words[k] = exists ? *(const uint4 *)(from[k] + column) : make_uint4(0, 0, 0, 0);
        }
    };
    load(column);
    for (int buffer = 0; column < end; column += TILE, buffer ^= 1) {
        uint32_t(&tile)[TILE][TILE / 4] = tiles[buffer];
        if ((row < R || offsets) && threadIdx.x == 0)
            columns.inverse_scales[scale_index(columns, C, column, row)] =
                rows.inverse_scales[scale_index(rows, R, row, column)];
#pragma unroll
        for (int k = 0, r = line; k < WORDS; k++, r += THREADS / 8) *(uint4 *)&tile[r][(place ^ r / 16) * 4] = words[k];
        __syncthreads(); // the buffer that is written next was read before this barrier
        if (column + TILE < end) load(column + TILE);
        uint32_t x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = tile[group * 16 + i][word ^ group * 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t bytes[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t low = __byte_perm(x[4 * i], x[4 * i + 1], j | (4 + j) << 4);
                bytes[i] = __byte_perm(low, __byte_perm(x[4 * i + 2], x[4 * i + 3], j | (4 + j) << 4), 0x5410);
            }
            if (stores && column + word * 4 + j < C)
                __stcs((uint4 *)(to + (column + j) * columns.stride),
                       make_uint4(bytes[0], bytes[1], bytes[2], bytes[3])); // keeps the rows in L2
        }
    }
}

extern "C" void mt_cuda_fp8_transpose(const mt_quantize_args *a, mt_stream *stream) {
    const unsigned groups = mt_grid_size(a->C, GROUP * TILE);
    const unsigned row_tiles = mt_grid_size(mt_max(a->R, a->columns.stride), TILE);
    const dim3 blocks(a->source ? row_tiles : groups, a->source ? groups : row_tiles, (unsigned)a->count);
    MT_CHECK(a->C % MT_CUDA_FP8_MULTIPLE == 0 && mt_wide(MT_U8, {a->rows.data, a->columns.data}, {}));
    MT_CHECK(a->rows.blocks == MT_FP8_TENSOR || (a->rows.blocks == MT_FP8_BLOCK_128 && !a->offsets));
    mt_fp8_matrix rows = a->rows;
    if (a->source) rows.data += a->compact * rows.stride;
    mt_launch_early(transpose_tiles, blocks, THREADS, 0, mt_cuda_stream(stream), rows, a->columns, a->R, a->C,
                    a->offsets, (int)a->num_experts, a->source);
    MT_CUDA_LAUNCHED();
}

/* ---- a rank's part of weights ------------------------------------------------------------------------------------ */

/* The operands, named as in megatron.h. */
template <class T> struct shard_task {
    const T *x;
    mt_fp8_matrix w;
    int64_t R, C, first, n;
    float *amax;
    const float *scale;
};

template <class T, mt_fp8_blocks BLOCKS>
__device__ static inline float shard_scale(const shard_task<T> &task, int64_t block) {
    if (task.scale) return *task.scale;
    return BLOCKS == MT_FP8_TENSOR ? tensor_scale<MT_F8_E4M3>(task.amax[block])
                                   : block_scale<MT_F8_E4M3>(task.amax[block]);
}

/* The inverse scales of all blocks. */
template <class T, mt_fp8_blocks BLOCKS> static __global__ void shard_scales(const shard_task<T> task, int64_t scales) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < scales) task.w.inverse_scales[i] = 1 / shard_scale<T, BLOCKS>(task, i);
}

/* A thread takes 8 elements, 16 threads 128 that begin at a multiple of 128 in w: of one row and block, because rows of
 * a w with blocks are multiples of 128 wide. A maximum is written only where it exceeds what another thread wrote. */
template <class T, mt_fp8_blocks BLOCKS> static __global__ void shard_parts(const shard_task<T> task) {
    __shared__ uint32_t warp_maxima[WARPS];
    const int64_t begin = task.first / TILE * TILE, end = task.first + task.n;
    const int64_t warp = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, step = (int64_t)gridDim.x * THREADS * SIDE;
    chunk<T> largest = {};
    for (int64_t base = begin + warp * 32 * SIDE; base < end; base += step) {
        const int64_t i = base + threadIdx.x % 32 * SIDE, row = i / task.C, matrix = row / task.R;
        const bool exists = i >= task.first && i < end;
        const chunk<T> x = mt_load<SIDE>(task.x + (i - task.first), exists);
        int64_t block = 0;
        if (BLOCKS != MT_FP8_TENSOR)
            block = matrix * ((task.R + 127) / 128) * ((task.C + 511) / 512 * 4) +
                    scale_index(task.w, task.R, row - matrix * task.R, i - row * task.C);
        if (task.w.data && exists) {
            const float s = shard_scale<T, BLOCKS>(task, block);
            uint32_t bits[2];
#pragma unroll
            for (int k = 0; k < 2; k++)
                bits[k] = mt_to_fp8<MT_F8_E4M3>(mt_element(x, 4 * k) * s, mt_element(x, 4 * k + 1) * s,
                                                mt_element(x, 4 * k + 2) * s, mt_element(x, 4 * k + 3) * s);
            *(uint2 *)(task.w.data + i) = make_uint2(bits[0], bits[1]);
        }
        if (BLOCKS == MT_FP8_TENSOR) {
            raise(largest, x);
        } else if (!task.w.data) {
            chunk<T> magnitudes = {};
            raise(magnitudes, x);
            uint32_t bits = largest_bits(magnitudes);
#pragma unroll
            for (int mask = 1; mask < TILE / SIDE; mask *= 2) bits = max(bits, __shfl_xor_sync(0xffffffff, bits, mask));
            if (threadIdx.x % (TILE / SIDE) == 0 && bits > 0 && bits > __float_as_uint(__ldcg(task.amax + block)))
                atomicMax((uint32_t *)task.amax + block, bits);
        }
    }
    if (BLOCKS != MT_FP8_TENSOR || (task.w.data && !task.scale)) return;
    const float amax = block_largest(largest_bits(largest), warp_maxima);
    if (threadIdx.x == 0 && amax != 0) atomicMax((uint32_t *)task.amax, __float_as_uint(amax));
}

template <class T, mt_fp8_blocks BLOCKS> static void launch_shard(const mt_fp8_shard_args *a, cudaStream_t stream) {
    const shard_task<T> task = {(const T *)a->x, a->w, a->R, a->C, a->first, a->n, a->amax, a->scale};
    const int64_t scales = mt_fp8_num_scales(a->count, a->R, a->C, BLOCKS);
    const int64_t most = mt_cuda_device()->multiProcessorCount * (2048 / THREADS);
    if (a->w.data)
        shard_scales<T, BLOCKS><<<mt_grid_size(scales, THREADS), THREADS, 0, stream>>>(task, scales);
    else
        MT_CUDA(cudaMemsetAsync(a->amax, 0, (size_t)scales * sizeof *a->amax, stream));
    if (a->n > 0)
        shard_parts<T, BLOCKS>
            <<<(unsigned)mt_min(most, mt_divide_up(a->n + TILE, THREADS * SIDE)), THREADS, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
}

template <class T> static void quantize_shard(const mt_fp8_shard_args *a, mt_stream *stream) {
    if (a->w.blocks == MT_FP8_TENSOR)
        launch_shard<T, MT_FP8_TENSOR>(a, mt_cuda_stream(stream));
    else
        launch_shard<T, MT_FP8_BLOCK_128>(a, mt_cuda_stream(stream));
}

extern "C" void mt_cuda_fp8_shard_quantize(const mt_fp8_shard_args *a, mt_dtype dtype, mt_stream *stream) {
    const bool in_blocks = a->w.blocks == MT_FP8_BLOCK_128;
    MT_CHECK(a->w.format == MT_F8_E4M3 && (in_blocks ? !a->scale : a->w.blocks == MT_FP8_TENSOR));
    MT_CHECK(a->C % (in_blocks ? (int)TILE : (int)MT_FP8_WIDTH) == 0 && a->first % MT_FP8_WIDTH == 0 &&
             a->n % MT_FP8_WIDTH == 0);
    MT_CHECK(mt_wide(dtype, {a->x, a->w.data}, {}));
    MT_CUDA_DISPATCH(dtype, quantize_shard, a, stream);
}

/* ---- values of codes --------------------------------------------------------------------------------------------- */

/* A block takes rows, a thread WIDTH elements of a row at a time, which are of one block of 128. */
template <class T, int WIDTH> static __global__ void __launch_bounds__(THREADS) dequantize(const mt_dequantize_args a) {
    const int64_t blocks = (a.C + 511) / 512 * 4;
    for (int64_t row = blockIdx.x; row < a.R; row += gridDim.x)
        for (int64_t col = threadIdx.x * WIDTH; col < a.C; col += THREADS * WIDTH) {
            const float scale = __ldg(a.inverse_scales + row / 128 * blocks + col / 128);
            const uint8_t *codes = a.codes + row * a.C + col;
            T *out = (T *)a.out + row * a.C + col;
            if (WIDTH == 1) {
                const __half_raw value = __nv_cvt_fp8_to_halfraw(*codes, __NV_E4M3);
                *out = mt_from_float<T>(__half2float(__half(value)) * scale);
                continue;
            }
            const uint2 bytes = *(const uint2 *)codes;
            __align__(16) T values[8];
#pragma unroll
            for (int k = 0; k < 8; k += 2) {
                const uint32_t word = k < 4 ? bytes.x : bytes.y;
                const __half2_raw pair =
                    __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(word >> k % 4 * 8), __NV_E4M3);
                const float2 two = __half22float2(__half2(pair));
                values[k] = mt_from_float<T>(two.x * scale), values[k + 1] = mt_from_float<T>(two.y * scale);
            }
#pragma unroll
            for (int k = 0; k < (int)(8 * sizeof(T) / 16); k++) ((uint4 *)out)[k] = ((const uint4 *)values)[k];
        }
}

template <class T> static void launch_dequantize(const mt_dequantize_args *a, mt_stream *stream) {
    const bool wide = a->C % 8 == 0 && (uintptr_t)a->codes % 8 == 0 && (uintptr_t)a->out % 16 == 0;
    const int64_t most = mt_cuda_device()->multiProcessorCount * 8 * (2048 / THREADS);
    if (a->R * a->C == 0) return;
    if (wide)
        dequantize<T, 8><<<(unsigned)mt_min(most, a->R), THREADS, 0, mt_cuda_stream(stream)>>>(*a);
    else
        dequantize<T, 1><<<(unsigned)mt_min(most, a->R), THREADS, 0, mt_cuda_stream(stream)>>>(*a);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_dequantize(const mt_dequantize_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, launch_dequantize, a, stream);
}

/* ---- products on any GPU ----------------------------------------------------------------------------------------- */

/* The definition. Operands are converted to fp32 in shared memory, scaled, and multiplied in fp32. A block computes
 * ROWS x COLS of the result, a thread 8 x 4; INNER: summed dimension in shared memory. */
enum { ROWS = 128, COLS = 64, INNER = 32, THREAD_ROWS = 8, THREAD_COLS = 4 };
static_assert(ROWS * INNER == THREADS * 16, "a thread loads 16 bytes of a");

struct fp8_task {
    mt_fp8_matrix a, b;
    int64_t M, N, K;
    void *out;
    const void *bias;
    const int32_t *offsets;
    int num_experts;
    bool accumulate, sums_rows;
};

/* The part of a product that a block computes: rows [row, row_end) of a and out, summed over [inner, inner_end). */
struct fp8_part {
    int64_t row, row_end, col, inner, inner_end, expert;
};

__device__ static inline bool find_part(const fp8_task &task, fp8_part &p) {
    const unsigned col_tiles = (unsigned)((task.N + COLS - 1) / COLS), index = blockIdx.x / col_tiles;
    const unsigned row_tiles = (unsigned)((task.M + ROWS - 1) / ROWS);
    p = {(int64_t)index * ROWS, task.M, (int64_t)(blockIdx.x % col_tiles) * COLS, 0, task.K, 0};
    if (!task.offsets) return true;
    if (task.sums_rows) {
        p.expert = index / row_tiles, p.row = (int64_t)(index % row_tiles) * ROWS;
        p.inner = (int64_t)mt_expert_tiles_before<MT_FP8_EXPERT_ROWS>(task.offsets, (int)p.expert) * MT_FP8_EXPERT_ROWS;
        p.inner_end = p.inner + task.offsets[p.expert + 1] - task.offsets[p.expert];
        return true;
    }
    int expert, first, count, row;
    if (!mt_find_expert_rows<ROWS>(task.offsets, task.num_experts, (int)index, expert, first, count, row)) return false;
    p.expert = expert, p.row = first + row, p.row_end = first + count;
    return true;
}

/* shared[k][r] = the values of 16 elements of row `row` that begin at `inner`, or zeros. */
template <int WIDTH>
__device__ static inline void load_values(float (&shared)[INNER][WIDTH], const mt_fp8_matrix &from, int64_t R,
                                          int64_t row, int64_t inner, bool exists, int r, int k) {
    const __nv_fp8_interpretation_t format = from.format == MT_F8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    const float scale = exists ? from.inverse_scales[scale_index(from, R, row, inner)] : 0;
    const uint4 bytes = exists ? *(const uint4 *)(from.data + row * from.stride + inner) : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(words[i / 4] >> i % 4 * 8), format);
        const float2 values = __half22float2(__half2(pair));
        shared[k + i][r] = values.x * scale, shared[k + i + 1][r] = values.y * scale;
    }
}

template <class Out> __global__ void __launch_bounds__(THREADS) product_definition(const fp8_task task) {
    __shared__ float a[INNER][ROWS + 4], b[INNER][COLS + 4];
    fp8_part p;
    if (!find_part(task, p)) return;
    const mt_fp8_matrix weights = matrix_at(task.b, task.N, task.sums_rows ? 0 : p.expert);
    const int load_row = threadIdx.x / 2, load_inner = threadIdx.x % 2 * 16;
    const int row = threadIdx.x / (COLS / THREAD_COLS) * THREAD_ROWS;
    const int col = threadIdx.x % (COLS / THREAD_COLS) * THREAD_COLS;
    float sums[THREAD_ROWS][THREAD_COLS] = {};
    for (int64_t inner = p.inner; inner < p.inner_end; inner += INNER) {
        const bool exists = inner + load_inner < p.inner_end; // if K is no multiple of 16, zeros follow
        load_values(a, task.a, task.M, p.row + load_row, inner + load_inner, exists && p.row + load_row < p.row_end,
                    load_row, load_inner);
        if (load_row < COLS)
            load_values(b, weights, task.N, p.col + load_row, inner + load_inner, exists && p.col + load_row < task.N,
                        load_row, load_inner);
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < INNER; k++)
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; i++)
#pragma unroll
                for (int j = 0; j < THREAD_COLS; j++) sums[i][j] += a[k][row + i] * b[k][col + j];
        __syncthreads();
    }
    const int64_t first = task.sums_rows ? p.expert * task.M : 0;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++)
#pragma unroll
        for (int j = 0; j < THREAD_COLS; j++) {
            const int64_t n = p.col + col + j, m = p.row + row + i;
            if (m >= p.row_end || n >= task.N) continue;
            Out *to = (Out *)task.out + (first + m) * task.N + n;
            float sum = sums[i][j];
            if (task.bias) sum += mt_to_float(((const Out *)task.bias)[n]);
            if (task.accumulate) sum += mt_to_float(*to);
            *to = mt_from_float<Out>(sum);
        }
}

template <class Out> static void define_product(const mt_fp8_product_args *p, mt_stream *stream) {
    fp8_task task = {p->a,          p->b,        p->M, p->N, p->K, p->out, p->bias, p->offsets, (int)p->num_experts,
                     p->accumulate, p->sums_rows};
    int64_t row_tiles = mt_divide_up(p->M, ROWS), E = p->num_experts;
    if (p->offsets) row_tiles = p->sums_rows ? E * row_tiles : row_tiles + E; // the largest possible number
    product_definition<Out>
        <<<(unsigned)(row_tiles * mt_divide_up(p->N, COLS)), THREADS, 0, mt_cuda_stream(stream)>>>(task);
    MT_CUDA_LAUNCHED();
}

extern "C" bool mt_fp8_definition(const mt_fp8_product_args *p, mt_stream *stream) {
    MT_CUDA_DISPATCH(p->out_dtype, define_product, p, stream);
    return true;
}

extern "C" const mt_fp8_rung mt_fp8_rungs[MT_NUM_FP8_RUNGS] = {
    {"definition", mt_fp8_definition}, {"cublaslt", mt_fp8_cublaslt}, {"hopper", mt_fp8_hopper}};

extern "C" void mt_cuda_fp8_product(const mt_fp8_product_args *p, mt_stream *stream) {
    MT_CHECK(p->a.blocks != MT_FP8_VECTOR_32 && p->b.blocks != MT_FP8_VECTOR_32);
    MT_CHECK(!p->accumulate || (p->out_dtype == MT_F32 && !p->bias));
    int rung = MT_NUM_FP8_RUNGS - 1;
    if (p->M * p->N == 0) return;
    while (!mt_fp8_rungs[rung].product(p, stream)) rung--;
}

/* ---- delayed scaling --------------------------------------------------------------------------------------------- */

/* A thread per tensor. */
static __global__ void scale_step(const mt_fp8_scale_args a) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    const float current = a.history[i];
    uint32_t amax = __float_as_uint(current);
    a.history[i] = 0;
    if (*a.guard < 0) return; // a bad step
    for (int64_t t = 1; t < a.length && !a.most_recent; t++) amax = max(amax, __float_as_uint(a.history[t * a.n + i]));
    if (amax > 0 && amax < 0x7f800000) {
        const float scale = a.largest[i] / __uint_as_float(amax) / ldexpf(1, (int)a.margin);
        a.scale[i] = isinf(scale) ? 3.40282347e38f : scale;
    }
    for (int64_t t = 1; t + 1 < a.length; t++) a.history[t * a.n + i] = a.history[(t + 1) * a.n + i];
    if (a.length > 1) a.history[(a.length - 1) * a.n + i] = current;
}

extern "C" void mt_cuda_fp8_scale_step(const mt_fp8_scale_args *a, mt_stream *stream) {
    if (a->n == 0) return;
    scale_step<<<mt_grid_size(a->n, 128), 128, 0, mt_cuda_stream(stream)>>>(*a);
    MT_CUDA_LAUNCHED();
}
