/* norm.cu: RMSNorm and LayerNorm, forward and backward, and the forward fused with the preceding residual addition.
 *
 * RMSNorm is LayerNorm without mean and bias, so one kernel serves both. blockDim.x threads share a row and keep it in
 * registers between the reduction and its use. The number of bytes in flight determines the speed: a thread issues all
 * loads of its part of a row before it uses the first. Up to 256 packs (2048 channels in bf16) one warp holds a row and
 * needs no barrier. A row that exceeds the registers of its threads (one chunk) is read again, chunk by chunk, in
 * alternating direction, so that the last chunk of one pass is the first of the next. */
#include "fp8.cuh"

/* Loads this thread's packs of the chunk at `base`; zeros past the end of the row. */
template <int K, int N, class T>
__device__ static inline void load_chunk(mt_pack<T, N> (&packs)[K], const T *row, int base, int length) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        int c = base + (k * blockDim.x + threadIdx.x) * N;
        packs[k] = mt_load<N>(row + c, c < length);
    }
}

/* Prefetches this thread's packs of the first chunk. */
template <int K, int N, class T> __device__ static inline void prefetch_chunk(const T *row, int length) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        int c = (k * blockDim.x + threadIdx.x) * N;
        if (c < length) mt_prefetch(row + c);
    }
}

/* The token of a row and the row's first channel; a token has H rows, 1 except for norms of heads. H 1 is a case of its
 * own: it avoids a division before every load. */
template <bool layernorm> struct row_place {
    int64_t token, column;
    __device__ row_place(unsigned row, unsigned H, int C) : token(row), column(0) {
        if (layernorm || H == 1) return;
        token = row / H;
        column = (int64_t)(row % H) * C;
    }
};

/* ---- forward: y = (x - mean) rstd w + b -------------------------------------------------------------------------- */

/* Weights are best loaded together with the row, because loads complete in order in L1. RMSNorm has registers for them.
 * LayerNorm, which also has biases, shares them among the rows of a block in shared memory, up to this many bytes. For
 * longer rows, and with a residual, they are loaded at their use. With a residual and few rows most registers of a
 * multiprocessor are free, and weights and biases are loaded with the row, unless y is in fp8. */
enum weights_location { at_use, in_registers, in_shared };
static constexpr int shared_weights_bytes = 40 << 10, few_rows = 64;

/* Launch bounds: a block has at most `block` threads, each with up to `most` packs of a row, and a multiprocessor holds
 * `residents` times 256 threads. A kernel that reads a row in several chunks, or adds a residual, needs registers for
 * twice as many packs. */
static constexpr int most_forward_packs = 8;
template <bool layernorm, bool adds, bool whole> struct forward_shape {
    static constexpr bool lean = layernorm && !adds && whole;
    static constexpr int block = lean ? 256 : 512, most = lean ? most_forward_packs : 4;
    __host__ __device__ static constexpr int blocks(weights_location weights, int K, int element_bytes, bool in_fp8) {
        constexpr int table[2][most_forward_packs] = {{8, 6, 4, 4}, {8, 6, 5, 5, 4, 4, 4, 4}};
        int residents = element_bytes > 2 && K > 3 ? 3 : table[lean][K - 1];
        if (in_fp8 && weights == in_registers) residents--;
        if (weights == in_registers && adds) return 1; // few rows
        if (weights == at_use) residents = lean ? (K > 6 || element_bytes > 2 ? 3 : 4) : 2;
        return residents * 256 / block;
    }
};

/* The operands, named as in megatron.h. */
template <class T> struct forward_task {
    T *y;
    float *mean, *rstd;
    const T *x, *w, *b;
    unsigned rows, H;
    int C;
    int64_t y_stride, x_stride;
    float eps, offset;  // offset: added to the weights
    const float *means; // of x^2, or NULL
    T *sum;             // residual + dropout(x), which is normalised; [rows, C]
    const T *residual;
    const int64_t *token_index;
    mt_masks masks;
};

/* The same with y in e4m3, rounded to T first. */
template <class T> struct forward_task_fp8 : forward_task<T> {
    mt_fp8_matrix rows_in_fp8;
    const float *scale;
    float *amax;
};
template <class Task> static constexpr bool stored_in_fp8 = false;
template <class T> static constexpr bool stored_in_fp8<forward_task_fp8<T>> = true;

/* packs = sum = residual + dropout(packs), in the chunk at `base` of a row; rounded to T, as readers of `sum` see
 * it. */
template <int K, int N, class T>
__device__ static inline void add_residual(mt_pack<T, N> (&packs)[K], const forward_task<T> &task, int64_t row,
                                           int base, int length) {
    mt_pack<T, N> residuals[K];
    load_chunk(residuals, task.residual + row * task.C, base, length);
    uint64_t token = length > 0 && task.masks.threshold > 0 ? (uint64_t)task.token_index[row] : 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        int c = base + (k * blockDim.x + threadIdx.x) * N;
        if (c >= length) continue;
        packs[k] =
            mt_from_float<T>(mt_add_dropped(mt_to_float(packs[k]), mt_to_float(residuals[k]), task.masks, token, c));
        mt_store(task.sum + row * task.C + c, packs[k]);
    }
}

/* Starts the copy of the weights and biases of all columns to shared memory. */
template <int N, class T>
__device__ static inline void share_weights(T *shared_w, T *shared_b, const T *w, const T *b, int C) {
    int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int c = thread * N; c < C; c += threads * N) {
        mt_load_async((mt_pack<T, N> *)(shared_w + c), w + c, true);
        mt_load_async((mt_pack<T, N> *)(shared_b + c), b + c, true);
    }
    mt_load_async_commit();
}

/* sum + the elements of a thread's packs; packs past the end of the row are zeros. */
template <int K, int N, class T> __device__ static inline float add_up(float sum, const mt_pack<T, N> (&packs)[K]) {
#pragma unroll
    for (int k = 0; k < K; k++)
        for (int i = 0; i < N; i++) sum += mt_element(packs[k], i);
    return sum;
}

/* The sum of (x - mu)^2 over a thread's packs of the chunk at `base`. */
template <int K, int N, class T>
__device__ static inline float squares_of(mt_pack<T, N> (&packs)[K], float mu, int base, int length) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (base + (k * blockDim.x + threadIdx.x) * N >= length) continue;
        mt_keep_packed(packs[k]);
        mt_pack<float, N> in = mt_to_float(packs[k]);
        for (int i = 0; i < N; i++) squares += (in.value[i] - mu) * (in.value[i] - mu);
    }
    return squares;
}

/* The normalised element. In fp32 with the definition's rounding; otherwise with one instruction less, which is
 * measurable for rows of 1600. */
template <class T> __device__ static inline float normalised(float x, float mu, float scale, float shift) {
    return sizeof(T) > 2 ? (x - mu) * scale : x * scale + shift;
}

/* Stores a pack of y in fp8, and raises `largest` to its magnitude. */
template <int N, class T>
__device__ static inline void store_in_fp8(const forward_task_fp8<T> &task, unsigned row, int c, const mt_pack<T, N> &y,
                                           uint32_t &largest) {
    uint32_t bits[N / 4];
    mt_pack_to_fp8<MT_F8_E4M3>(bits, y, *task.scale);
    largest = max(largest, mt_magnitude(y));
    mt_store_word((uint2 *)(task.rows_in_fp8.data + row * task.rows_in_fp8.stride + c), make_uint2(bits[0], bits[1]));
}

/* All threads of a block call it with the largest magnitude that they stored. */
template <class T> __device__ static inline void finish_fp8(const forward_task_fp8<T> &task, uint32_t largest) {
    if (task.amax) mt_raise_amax(task.amax, largest);
    if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *task.rows_in_fp8.inverse_scales = 1 / *task.scale;
}

/* Reads x, writes y: 4 bytes per element in bf16, 8 in fp32. With `adds` it reads x and residual and writes sum and y:
 * 8 and 16. One byte less where y is in fp8. `whole`: one chunk holds the row, which saves the registers of the loop
 * over chunks. */
template <class Task, class T, int N, int K, bool layernorm, bool adds, bool whole, weights_location weights>
__global__ void __launch_bounds__(
    forward_shape<layernorm, adds, whole>::block,
    mt_resident_blocks(forward_shape<layernorm, adds, whole>::block,
                       forward_shape<layernorm, adds, whole>::blocks(weights, K, sizeof(T), stored_in_fp8<Task>)))
    norm_forward(const Task task) {
    constexpr bool keeps = weights == in_registers;
    extern __shared__ uint4 shared_weights[];
    unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
    const row_place<layernorm> place(row, task.H, task.C);
    int C = task.C, chunk = K * N * blockDim.x, last = whole ? 0 : (C - 1) / chunk * chunk;
    const int length = row < task.rows ? C : 0;
    const T *x_row = task.x + place.token * task.x_stride + place.column;
    const T *again = adds ? task.sum + (int64_t)row * C : x_row;
    T *y_row = task.y + place.token * task.y_stride + place.column;
    mt_pack<T, N> packs[K], w[K], b[K];
    T *shared_w = (T *)shared_weights, *shared_b = shared_w + C;
    float sum[1] = {0}, squares[1] = {0}, mu = 0, inverse_C = __frcp_rn(C);
    mt_begin_next();
    if (keeps && adds) prefetch_chunk<K, N>(task.w, C), prefetch_chunk<K, N>(task.b, layernorm ? C : 0);
    mt_wait_for_previous();
    if (weights == in_shared) share_weights<N>(shared_w, shared_b, task.w, task.b, C);
    if (keeps && !adds) load_chunk(packs, x_row, 0, length);
    if (keeps) load_chunk(w, task.w, 0, C), load_chunk(b, task.b, 0, layernorm ? C : 0);
    for (int base = 0; base <= last && (layernorm || adds); base += chunk) {
        load_chunk(packs, x_row, base, length);
        if (adds) add_residual(packs, task, row, base, length);
        sum[0] = add_up(sum[0], packs);
    }
    if (layernorm) mt_row_sum(sum, 0);
    if (layernorm) mu = sum[0] * inverse_C;
    for (int base = last; base >= 0; base -= chunk) {
        if (!keeps && ((!layernorm && !adds) || base < last)) load_chunk(packs, again, base, length);
        squares[0] += squares_of(packs, mu, base, length);
    }
    mt_row_sum(squares, 1);
    float mean_square = squares[0] * inverse_C;
    if (!layernorm && task.means && length > 0) mean_square = task.means[row];
    const float scale = rsqrtf(mean_square + task.eps), shift = -mu * scale;
    if (threadIdx.x == 0 && length > 0) {
        task.rstd[row] = scale;
        if (layernorm) task.mean[row] = mu;
    }
    if (weights == in_shared) mt_load_async_wait<0>();
    if (weights == in_shared) __syncthreads();
    [[maybe_unused]] uint32_t largest = 0;
    for (int base = 0; base <= last; base += chunk) {
        if (base > 0) load_chunk(packs, again, base, length);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = base + (k * blockDim.x + threadIdx.x) * N;
            if (c >= length) continue;
            mt_keep_packed(packs[k]);
            if (!keeps) w[k] = mt_load<N>((weights == in_shared ? shared_w : task.w) + c);
            mt_pack<float, N> out = mt_to_float(packs[k]), weight = mt_to_float(w[k]), bias = {};
            if (layernorm && !keeps) b[k] = mt_load<N>((weights == in_shared ? shared_b : task.b) + c);
            if (layernorm) bias = mt_to_float(b[k]);
            for (int i = 0; i < N; i++)
                out.value[i] =
                    normalised<T>(out.value[i], mu, scale, shift) * (weight.value[i] + task.offset) + bias.value[i];
            if constexpr (stored_in_fp8<Task>)
                store_in_fp8(task, row, c, mt_from_float<T>(out), largest);
            else
                mt_store(y_row + c, mt_from_float<T>(out));
        }
    }
    if constexpr (stored_in_fp8<Task>) finish_fp8(task, largest);
}

/* Packs per thread for rows of `packs` packs. A row has as few warps as can hold it. Rows shorter than a warp are read
 * in pieces of at least 128 bytes. */
static inline int64_t packs_of_a_thread(int64_t packs, int64_t most) {
    if (packs <= 64) return packs < 16 ? 1 : 2;
    int64_t warps = mt_divide_up(packs, 32 * most), each = mt_divide_up(packs, 32 * warps);
    return each < most ? each : most;
}

/* Calls body(mt_width<K>()) with K = k, 1 <= k <= most. */
template <int most, class Body> static void with_packs(int64_t k, Body body) {
    if constexpr (most > 1)
        if (k < most) return with_packs<most - 1>(k, body);
    body(mt_width<most>());
}

/* A long LayerNorm row uses as many threads as a block may have: with more packs per thread fewer rows would be
 * resident. */
template <bool layernorm, bool adds, bool whole, weights_location weights, class T, int N, class Task>
static void launch_forward_rows(const Task &task, cudaStream_t stream) {
    using shape = forward_shape<layernorm, adds, whole>;
    constexpr bool is_long = shape::lean && weights == at_use;
    constexpr int most = shape::most, least = !whole ? most : is_long ? most / 2 + 1 : 1;
    int64_t packs = mt_divide_up(task.C, N), each = whole ? packs_of_a_thread(packs, most) : most;
    int64_t shared = weights == in_shared ? 2 * task.C * (int64_t)sizeof(T) : 0;
    if (is_long) each = mt_divide_up(packs, shape::block);
    with_packs<most>(each > least ? each : least, [&](auto count) {
        constexpr int K = decltype(count)::value;
        if constexpr (K >= least) {
            dim3 block = mt_reduction_block(packs, K, packs <= 32 * K ? 128 : 64, shape::block);
            mt_launch_early(norm_forward<Task, T, N, K, layernorm, adds, whole, weights>,
                            mt_grid_size(task.rows, block.y), block, shared, stream, task);
        }
    });
}

/* Rows that do not fit in a block are read in chunks. */
template <bool layernorm, bool adds, class T, int N, class Task>
static void launch_forward_as(const Task &task, cudaStream_t stream) {
    using shape = forward_shape<layernorm, adds, true>;
    constexpr weights_location weights = adds ? at_use : layernorm ? in_shared : in_registers;
    if constexpr (N > 1)
        if (task.C / N <= shape::most * shape::block) {
            if constexpr (weights == in_shared)
                if (2 * task.C * (int64_t)sizeof(T) > shared_weights_bytes)
                    return launch_forward_rows<layernorm, adds, true, at_use, T, N>(task, stream);
            if constexpr (adds && !stored_in_fp8<Task>)
                if (task.rows <= few_rows)
                    return launch_forward_rows<layernorm, adds, true, in_registers, T, N>(task, stream);
            return launch_forward_rows<layernorm, adds, true, weights, T, N>(task, stream);
        }
    launch_forward_rows<layernorm, adds, false, at_use, T, N>(task, stream);
}

template <bool layernorm, bool adds, class T, int N>
static void launch_forward(const forward_task<T> &task, const mt_quantize_args *quantize, cudaStream_t stream) {
    const mt_fp8_matrix *rows = &quantize->rows;
    if (!rows->data) return launch_forward_as<layernorm, adds, T, N>(task, stream);
    MT_CHECK((N == 8 && task.H == 1 && quantize->scale && rows->blocks == MT_FP8_TENSOR && rows->format == MT_F8_E4M3));
    if constexpr (N == 8)
        launch_forward_as<layernorm, adds, T, N>(forward_task_fp8<T>{task, *rows, quantize->scale, quantize->amax},
                                                 stream);
}

/* x_stride and y_stride: elements between rows. */
template <class E>
static forward_task<E> forward_task_of(const mt_norm_args *a, int64_t H, int64_t x_stride, int64_t y_stride) {
    return {(E *)a->y,   a->mean,   a->rstd,  (const E *)a->x, (const E *)a->w, (const E *)a->b, (unsigned)(a->T * H),
            (unsigned)H, (int)a->C, y_stride, x_stride,        a->eps,          a->w_offset,     a->means};
}

extern "C" void mt_cuda_rmsnorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->y, a->x, a->w, a->quantize.rows.data}, {a->C, a->y_stride, a->x_stride}),
               [&](auto type, auto width) {
                   using E = decltype(type);
                   forward_task<E> task = forward_task_of<E>(a, a->H, a->x_stride, a->y_stride);
                   launch_forward<false, false, E, decltype(width)::value>(task, &a->quantize, mt_cuda_stream(stream));
               });
}

extern "C" void mt_cuda_layernorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    int64_t y_stride = mt_layernorm_stride(a->y_stride, a->C);
    mt_by_type(dtype, mt_wide(dtype, {a->y, a->x, a->w, a->b, a->quantize.rows.data}, {a->C, y_stride}),
               [&](auto type, auto width) {
                   using E = decltype(type);
                   launch_forward<true, false, E, decltype(width)::value>(forward_task_of<E>(a, 1, a->C, y_stride),
                                                                          &a->quantize, mt_cuda_stream(stream));
               });
}

extern "C" void mt_cuda_residual_norm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->y, a->sum, a->x, a->residual, a->w, a->b, a->quantize.rows.data}, {a->C});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        forward_task<E> task = forward_task_of<E>(a, 1, a->C, a->C);
        task.sum = (E *)a->sum, task.residual = (const E *)a->residual, task.token_index = a->token_index;
        task.masks = mt_dropout_masks(&a->dropout);
        if (a->mean)
            launch_forward<true, true, E, decltype(width)::value>(task, &a->quantize, mt_cuda_stream(stream));
        else
            launch_forward<false, true, E, decltype(width)::value>(task, &a->quantize, mt_cuda_stream(stream));
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* With n = (x - mean) rstd and g = dy w: dx = dresidual + rstd (g - mean(g) - n mean(g n)), where RMSNorm has no
 * mean(g); dw = sum over rows of dy n, db = sum over rows of dy. A fixed number of blocks processes the rows; each
 * keeps its sums for dw and db in registers, and add_partials adds the sums of the blocks in a fixed order. */

/* The maximum of packs that a thread holds of a row, and the resident threads of a multiprocessor with K packs each.
 * The latter sets the registers per thread: the packs of the next row and of this one, and the sums for dw and db. */
static constexpr int backward_packs = 2;
__host__ __device__ static constexpr int backward_threads(bool layernorm, int K) {
    constexpr int table[2][backward_packs] = {{1024, 512}, {768, 512}};
    return table[layernorm][K - 1];
}

/* partial[0 ... C - 1] = the sums of this block. Its rows, which share columns, are added in shared memory. */
template <int N, int K, int threads>
__device__ static inline void store_block_sums(float *partial, const mt_pack<float, N> (&sums)[K], int C) {
    __shared__ float shared[threads * N];
    int chunk = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int k = 0; k < K; k++, partial += chunk, C -= chunk) {
        if (blockDim.y == 1) {
            if (thread * N < C) mt_store(partial + thread * N, sums[k]);
            continue;
        }
        __syncthreads();
        for (int i = 0; i < N; i++) shared[thread * N + i] = sums[k].value[i];
        __syncthreads();
        for (int c = thread; c < chunk && c < C; c += blockDim.x * blockDim.y) {
            float sum = 0;
            for (int y = 0; y < blockDim.y; y++) sum += shared[y * chunk + c];
            partial[c] = sum;
        }
    }
}

/* The operands, named as in megatron.h, and the sums of the blocks: [blocks, C] of dw, then of db. */
template <class T> struct backward_task {
    T *dx;
    float *partial;
    const T *dy, *dresidual, *x, *w;
    const float *mean, *rstd;
    unsigned rows, H;
    int C;
    int64_t dx_stride, dy_stride, x_stride;
    /* in norm_backward_long alone: */
    float offset;       // added to the weights
    const float *means; // of dy (w + offset) x, or NULL
};

/* A thread's packs of a row of each input. Past the last row and past the end of a row they are zeros, which add
 * nothing. */
template <class T, int N, int K, bool layernorm> struct row_part {
    mt_pack<T, N> x[K], dy[K];
    float mean, rstd;

    __device__ void load(const backward_task<T> &task, unsigned row) {
        row_place<layernorm> place(row, task.H, task.C);
        const T *x_row = task.x + place.token * task.x_stride + place.column;
        const T *dy_row = task.dy + place.token * task.dy_stride + place.column;
        int length = row < task.rows ? task.C : 0;
        load_chunk(x, x_row, 0, length);
        load_chunk(dy, dy_row, 0, length);
        mean = layernorm && length > 0 ? task.mean[row] : 0;
        rstd = length > 0 ? task.rstd[row] : 0;
    }
};

/* Computes g and n of a pack from the loaded packs: n = x rstd + shift, where shift = -mean rstd. */
template <class T, int N>
__device__ static inline void widen_part(mt_pack<float, N> &n, mt_pack<float, N> &d, mt_pack<float, N> &g,
                                         const mt_pack<T, N> &x, const mt_pack<T, N> &dy, const mt_pack<T, N> &w,
                                         float rstd, float shift) {
    n = mt_to_float(x), d = mt_to_float(dy), g = mt_to_float(w);
    for (int i = 0; i < N; i++) {
        n.value[i] = n.value[i] * rstd + shift;
        g.value[i] *= d.value[i];
    }
}

/* In the form dx = dresidual + rstd g + slope x + offset the gradient takes three instructions per element.
 * Instructions, not bytes, limit this kernel. */
struct gradient_line {
    float slope, offset;
    __device__ gradient_line(float rstd, float shift, float mean_g, float mean_gn)
        : slope(-rstd * rstd * mean_gn), offset(-rstd * (mean_g + shift * mean_gn)) {
    }
};

/* Loads the next row into registers while this one is reduced, which keeps the memory busy. Reads dy, x and dresidual,
 * writes dx: 8 bytes per element in bf16, 16 in fp32 (6 and 12 without dresidual). */
template <class T, int N, int K, bool layernorm>
__global__ void __launch_bounds__(backward_threads(layernorm, K)) norm_backward(const backward_task<T> task) {
    const int C = task.C;
    const float inverse_C = __frcp_rn(C);
    mt_pack<float, N> dw[K] = {}, db[layernorm ? K : 1] = {};
    mt_pack<T, N> weights[K];
    unsigned step = gridDim.x * blockDim.y, row = blockIdx.x * blockDim.y + threadIdx.y;
    row_part<T, N, K, layernorm> next;
    mt_wait_for_previous();
    next.load(task, row);
    load_chunk(weights, task.w, 0, C);
    mt_begin_next(); // add_partials; it finds no free multiprocessor before blocks end
    for (int turn = 0; row - threadIdx.y < task.rows; row += step, turn ^= 1) {
        row_part<T, N, K, layernorm> part = next;
        row_place<layernorm> place(row, task.H, C);
        const int64_t dx_row = place.token * task.dx_stride + place.column;
        mt_pack<T, N> residual[K];
        load_chunk(residual, task.dresidual + dx_row, 0, task.dresidual && row < task.rows ? C : 0);
        next.load(task, row + step);
        float sums[layernorm ? 2 : 1] = {}, shift = -part.mean * part.rstd;
#pragma unroll
        for (int k = 0; k < K; k++)
            for (int i = 0; i < N; i++) {
                float d = mt_element(part.dy[k], i), n = mt_element(part.x[k], i) * part.rstd + shift;
                float g = mt_element(weights[k], i) * d;
                dw[k].value[i] += d * n;
                if constexpr (layernorm) db[k].value[i] += d;
                sums[0] += g * n;
                if constexpr (layernorm) sums[1] += g;
            }
        mt_row_sum(sums, turn);
        float mean_g = 0;
        if constexpr (layernorm) mean_g = sums[1] * inverse_C;
        const gradient_line line(part.rstd, shift, mean_g, sums[0] * inverse_C);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = (k * blockDim.x + threadIdx.x) * N;
            if (row >= task.rows || c >= C) continue;
            mt_keep_packed(part.x[k]);
            if (K > 1) mt_keep_packed(part.dy[k]), mt_keep_packed(weights[k]);
            mt_pack<float, N> out = mt_to_float(residual[k]);
            for (int i = 0; i < N; i++) {
                float g = mt_element(weights[k], i) * mt_element(part.dy[k], i);
                out.value[i] += g * part.rstd + (mt_element(part.x[k], i) * line.slope + line.offset);
            }
            mt_store(task.dx + dx_row + c, mt_from_float<T>(out));
        }
    }
    constexpr int threads = backward_threads(layernorm, K);
    store_block_sums<N, K, threads>(task.partial + (int64_t)blockIdx.x * C, dw, C);
    if constexpr (layernorm)
        store_block_sums<N, K, threads>(task.partial + (int64_t)(gridDim.x + blockIdx.x) * C, db, C);
}

/* A block's ring buffer of rows in shared memory. A thread copies exactly the data that it reads itself, so the copies
 * need neither registers nor a barrier; only mean and rstd are copied by one thread for its warp. */
template <class T, int N, int K, bool layernorm> struct row_ring {
    static constexpr int stages = 2;
    mt_pack<T, N> *packs;
    float *statistics;

    __device__ row_ring(void *memory) {
        packs = (mt_pack<T, N> *)memory;
        statistics = (float *)(packs + stages * 3 * K * blockDim.x);
    }
    static int64_t bytes(dim3 block) {
        return stages * ((int64_t)sizeof(mt_pack<T, N>) * 3 * K * block.x + 8 * (block.x / 32));
    }
    __device__ mt_pack<T, N> *pack(int stage, int input, int k) const {
        return packs + ((stage * 3 + input) * K + k) * blockDim.x + threadIdx.x;
    }
    __device__ float *statistic(int stage) const {
        return statistics + (stage * (blockDim.x / 32) + threadIdx.x / 32) * 2;
    }
    /* Starts the copy of a row. Zeros past the last row and past the end of a row add nothing. */
    __device__ void load(const backward_task<T> &task, unsigned row, int stage) const {
        row_place<layernorm> place(row, task.H, task.C);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = (k * blockDim.x + threadIdx.x) * N;
            bool there = row < task.rows && c < task.C;
            int64_t t = there ? place.token : 0, column = there ? place.column + c : 0;
            mt_load_async(pack(stage, 0, k), task.x + t * task.x_stride + column, there);
            mt_load_async(pack(stage, 1, k), task.dy + t * task.dy_stride + column, there);
            if (task.dresidual) mt_load_async(pack(stage, 2, k), task.dresidual + t * task.dx_stride + column, there);
        }
        if (threadIdx.x % 32 == 0) {
            mt_load_async((mt_pack<float, 1> *)statistic(stage), task.rstd + (row < task.rows ? row : 0),
                          row < task.rows);
            if (layernorm)
                mt_load_async((mt_pack<float, 1> *)statistic(stage) + 1, task.mean + (row < task.rows ? row : 0),
                              row < task.rows);
        }
        mt_load_async_commit();
    }
};

/* The same for rows of up to K packs per thread, one row per block. There are no registers for the packs of the next
 * row, so they are prefetched to shared memory. */
static constexpr int wide_block = 512;
template <class T, int N, int K, bool layernorm>
__global__ void __launch_bounds__(wide_block) norm_backward_wide(const backward_task<T> task) {
    extern __shared__ uint4 shared_rows[];
    const row_ring<T, N, K, layernorm> ring(shared_rows);
    constexpr int stages = decltype(ring)::stages;
    const int C = task.C;
    const float inverse_C = __frcp_rn(C);
    mt_pack<float, N> dw[K] = {}, db[layernorm ? K : 1] = {}, n, d, g;
    mt_pack<T, N> weights[K], x, dy;
    unsigned row = blockIdx.x;
    mt_wait_for_previous();
    for (int stage = 0; stage < stages - 1; stage++) ring.load(task, row + stage * gridDim.x, stage);
    load_chunk(weights, task.w, 0, C);
    mt_begin_next(); // add_partials
    for (int turn = 0, stage = 0; row < task.rows; row += gridDim.x, turn ^= 1) {
        ring.load(task, row + (stages - 1) * gridDim.x, stage == 0 ? stages - 1 : stage - 1);
        mt_load_async_wait<stages - 1>();
        __syncwarp();
        float scale = ring.statistic(stage)[0], mu = layernorm ? ring.statistic(stage)[1] : 0;
        float sums[layernorm ? 2 : 1] = {}, shift = -mu * scale;
#pragma unroll
        for (int k = 0; k < K; k++) {
            x = *ring.pack(stage, 0, k), dy = *ring.pack(stage, 1, k);
            widen_part(n, d, g, x, dy, weights[k], scale, shift);
            for (int i = 0; i < N; i++) {
                dw[k].value[i] += d.value[i] * n.value[i];
                if constexpr (layernorm) db[k].value[i] += d.value[i];
                sums[0] += g.value[i] * n.value[i];
                if constexpr (layernorm) sums[1] += g.value[i];
            }
        }
        mt_row_sum(sums, turn);
        const float mean_g = layernorm ? sums[layernorm] * inverse_C : 0;
        const gradient_line line(scale, shift, mean_g, sums[0] * inverse_C);
        row_place<layernorm> place(row, task.H, C);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = (k * blockDim.x + threadIdx.x) * N;
            if (c >= C) continue;
            x = *ring.pack(stage, 0, k), dy = *ring.pack(stage, 1, k); // reloaded: too many to keep in registers
            mt_keep_packed(weights[k]);
            widen_part(n, d, g, x, dy, weights[k], scale, shift);
            mt_pack<float, N> wide_x = mt_to_float(x), out = {};
            if (task.dresidual) out = mt_to_float(*ring.pack(stage, 2, k));
            for (int i = 0; i < N; i++)
                out.value[i] += g.value[i] * scale + (wide_x.value[i] * line.slope + line.offset);
            mt_store(task.dx + place.token * task.dx_stride + place.column + c, mt_from_float<T>(out));
        }
        stage = stage == stages - 1 ? 0 : stage + 1;
    }
    mt_load_async_wait<0>();
    float *partial = task.partial + (int64_t)blockIdx.x * C;
#pragma unroll
    for (int k = 0; k < K; k++) {
        int c = (k * blockDim.x + threadIdx.x) * N;
        if (c >= C) continue;
        mt_store(partial + c, dw[k]);
        if constexpr (layernorm) mt_store(partial + (int64_t)gridDim.x * C + c, db[k]);
    }
}

/* The same for rows with more packs than a block holds, one row per block. Rows are read twice, and dw and db are
 * summed in `partial` itself. */
template <class T, int N, bool layernorm>
__global__ void __launch_bounds__(512) norm_backward_long(const backward_task<T> task) {
    const T *dy = task.dy, *dresidual = task.dresidual, *x = task.x, *w = task.w;
    const float *mean = task.mean, *rstd = task.rstd;
    T *dx = task.dx;
    unsigned rows = task.rows, H = task.H;
    int64_t dx_stride = task.dx_stride, dy_stride = task.dy_stride, x_stride = task.x_stride;
    int C = task.C, chunk = blockDim.x * N, first = threadIdx.x * N;
    float *dw = task.partial + (int64_t)blockIdx.x * C, *db = dw + (int64_t)gridDim.x * C;
    for (int c = first; c < C; c += chunk) {
        mt_store(dw + c, mt_pack<float, N>{});
        if (layernorm) mt_store(db + c, mt_pack<float, N>{});
    }
    float inverse_C = __frcp_rn(C);
    int turn = 0;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        int64_t t = layernorm ? row : row / H, column = layernorm ? 0 : row % H * C;
        const T *x_row = x + t * x_stride + column, *dy_row = dy + t * dy_stride + column;
        int64_t dx_row = t * dx_stride + column;
        float mu = layernorm ? mean[row] : 0, scale = rstd[row], sums[2] = {0, 0};
        for (int c = first; c < C; c += chunk) {
            mt_pack<float, N> n = mt_to_float(mt_load<N>(x_row + c)), d = mt_to_float(mt_load<N>(dy_row + c));
            mt_pack<float, N> weight = mt_to_float(mt_load<N>(w + c));
            for (int i = 0; i < N; i++) {
                float g = d.value[i] * (weight.value[i] + task.offset);
                sums[0] += g * (n.value[i] - mu) * scale;
                sums[1] += g;
            }
        }
        mt_row_sum(sums, turn);
        float mean_gn = task.means ? task.means[row] * scale : sums[0] * inverse_C,
              mean_g = layernorm ? sums[1] * inverse_C : 0;
        for (int c = first; c < C; c += chunk) {
            mt_pack<float, N> n = mt_to_float(mt_load<N>(x_row + c)), d = mt_to_float(mt_load<N>(dy_row + c));
            mt_pack<float, N> weight = mt_to_float(mt_load<N>(w + c)), out = {};
            mt_pack<float, N> dw_sum = mt_load<N>(dw + c), db_sum = {};
            if (layernorm) db_sum = mt_load<N>(db + c);
            if (dresidual) out = mt_to_float(mt_load<N>(dresidual + dx_row + c));
            for (int i = 0; i < N; i++) {
                n.value[i] = (n.value[i] - mu) * scale;
                out.value[i] += scale * (d.value[i] * (weight.value[i] + task.offset) - mean_g - n.value[i] * mean_gn);
                dw_sum.value[i] += d.value[i] * n.value[i];
                db_sum.value[i] += d.value[i];
            }
            mt_store(dx + dx_row + c, mt_from_float<T>(out));
            mt_store(dw + c, dw_sum);
            if (layernorm) mt_store(db + c, db_sum);
        }
    }
}

/* `rows` threads share the rows of a column. A second row of the grid, if any, adds the rows after the first `blocks`
 * to `more`. A thread issues all its loads, up to `at_once`, before it adds the first: their latency dominates the
 * time. */
template <int rows>
__global__ void __launch_bounds__(32 * rows)
    add_partials(float *to, float *more, const float *partial, int blocks, int more_blocks, int C) {
    constexpr int at_once = 16;
    __shared__ float sums[rows][32];
    const int c = blockIdx.x * 32 + threadIdx.x;
    float sum = 0, before = 0;
    mt_begin_next();
    mt_wait_for_previous();
    if (blockIdx.y == 1) partial += (int64_t)blocks * C, blocks = more_blocks, to = more;
    if (threadIdx.y == 0 && c < C) before = to[c];
    for (int first = threadIdx.y; first < blocks; first += at_once * rows) {
        float parts[at_once];
#pragma unroll
        for (int i = 0; i < at_once; i++) {
            int block = first + i * rows;
            parts[i] = c < C && block < blocks ? partial[(int64_t)block * C + c] : 0;
        }
#pragma unroll
        for (int i = 0; i < at_once; i++) sum += parts[i];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= C) return;
#pragma unroll
    for (int y = 1; y < rows; y++) sum += sums[y][threadIdx.x];
    to[c] = before + sum;
}

/* With many columns, blocks with few threads per column fill the GPU. */
void mt_cuda_add_partials(float *to, int64_t blocks, float *more, int64_t more_blocks, const float *partial, int64_t C,
                          mt_stream *stream) {
    if (!to) return; // a frozen weight
    const bool many = C > 4096;
    auto kernel = many ? add_partials<8> : add_partials<32>;
    mt_launch_early(kernel, dim3(mt_grid_size(C, 32), more ? 2 : 1), dim3(32, many ? 8 : 32), 0, mt_cuda_stream(stream),
                    to, more, partial, (int)blocks, (int)more_blocks, (int)C);
}

/* The maximum number of blocks that leave partial sums; fewer if the sums are long. */
static int64_t most_backward_blocks(int64_t C) {
    return mt_cuda_device()->multiProcessorCount * (C <= 2048 ? 8ll : 4ll);
}

/* Launch shape of the backward: blockDim.x threads share a row with `packs` packs each, blockDim.y rows per block,
 * `blocks` blocks per multiprocessor. packs is 0 if no block holds a row. */
struct backward_walk {
    int packs, blocks;
    dim3 block;
};

/* Chooses the packs per thread that keep the most bytes in flight. A row has whole warps unless it is shorter than one:
 * with two packs per thread it would be read in too short pieces. More than one block per multiprocessor, so that one
 * computes while another waits for its slowest warp; but few, because the sums of each must be added. */
static backward_walk backward_walk_of(bool layernorm, int64_t packs, int most) {
    backward_walk best = {};
    int64_t most_held = 0;
    for (int k = 1; k <= most; k++) {
        dim3 block = mt_reduction_block(packs, k, 1, 1024);
        int64_t rows = backward_threads(layernorm, k) / block.x;
        if (block.x * k < packs || (k > 1 && block.x < 32) || rows * packs <= most_held) continue;
        most_held = rows * packs;
        block.y = block.x <= 32 ? rows : rows == 3 ? 1 : rows % 2 == 0 ? rows / 2 : rows;
        best = {k, (int)(rows / block.y), block};
    }
    return best;
}

/* The launchers return the number of blocks that left sums in task.partial, which has room for every case. */
template <class T, int N, int K, bool layernorm>
static int64_t launch_walk(const backward_task<T> &task, const backward_walk &walk, cudaStream_t stream) {
    int64_t blocks = mt_cuda_device()->multiProcessorCount * (int64_t)walk.blocks;
    if (blocks > mt_divide_up(task.rows, walk.block.y)) blocks = mt_divide_up(task.rows, walk.block.y);
    mt_launch_early(norm_backward<T, N, K, layernorm>, (unsigned)blocks, walk.block, 0, stream, task);
    return blocks;
}

/* Launches as many blocks as are resident and may leave sums. Returns 0 if a row does not fit in a block. */
template <class T, int N, int K, bool layernorm>
static int64_t launch_wide(const backward_task<T> &task, cudaStream_t stream) {
    dim3 block = mt_reduction_block(mt_divide_up(task.C, N), K, 1, wide_block);
    int64_t bytes = row_ring<T, N, K, layernorm>::bytes(block);
    int resident = 0;
    if ((int64_t)K * N * block.x < task.C || bytes > (int64_t)mt_cuda_device()->sharedMemPerBlockOptin) return 0;
    auto kernel = norm_backward_wide<T, N, K, layernorm>;
    mt_cuda_take_shared(kernel, bytes);
    MT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, (int)block.x, (size_t)bytes));
    int64_t blocks = mt_cuda_device()->multiProcessorCount * (int64_t)resident;
    if (blocks > task.rows) blocks = task.rows;
    if (blocks > most_backward_blocks(task.C)) blocks = most_backward_blocks(task.C);
    mt_launch_early(kernel, (unsigned)blocks, block, bytes, stream, task);
    return blocks;
}

/* LayerNorm rows of two packs per thread and several warps also use the ring buffer: their sums take so many registers
 * that prefetching the next row to shared memory is faster. 1600 channels take 57 us with the ring, 58.4 with
 * registers; 1024 channels (two warps) 74 and 69. */
static constexpr int many_threads = 128;
template <class T, int N, bool layernorm>
static int64_t launch_rows(const backward_task<T> &task, cudaStream_t stream) {
    constexpr int most = N > 1 ? backward_packs : 1;
    const backward_walk walk = backward_walk_of(layernorm, mt_divide_up(task.C, N), most);
    int64_t blocks = 0;
    bool is_short = task.offset == 0 && !task.means; // norm_backward has no instructions to spare
    if constexpr (N > 1 && layernorm)
        if (is_short && walk.packs == 2 && walk.block.x >= many_threads)
            blocks = launch_wide<T, N, 2, layernorm>(task, stream);
    if (blocks > 0) return blocks;
    if (is_short && walk.packs > 0)
        with_packs<most>(
            walk.packs, [&](auto k) { blocks = launch_walk<T, N, decltype(k)::value, layernorm>(task, walk, stream); });
    else if constexpr (N > 1)
        if (is_short) blocks = launch_wide<T, N, 4 - layernorm, layernorm>(task, stream);
    if (blocks > 0) return blocks;
    blocks = mt_cuda_device()->multiProcessorCount * 2;
    if (blocks > task.rows) blocks = task.rows;
    norm_backward_long<T, N, layernorm><<<(unsigned)blocks, 512, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
    return blocks;
}

/* Strides: elements between rows. */
template <bool layernorm>
static void launch_backward(const mt_norm_args *a, int64_t H, int64_t dx_stride, int64_t dy_stride, int64_t x_stride,
                            mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->dx, a->dy, a->dresidual, a->x, a->w}, {a->C, dx_stride, dy_stride, x_stride});
    int64_t C = a->C, sums = most_backward_blocks(C) * C * (layernorm ? 2 : 1);
    float *partial = (float *)mt_cuda_workspace(stream, sums * (int64_t)sizeof(float));
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        backward_task<E> task = {(E *)a->dx,
                                 partial,
                                 (const E *)a->dy,
                                 (const E *)a->dresidual,
                                 (const E *)a->x,
                                 (const E *)a->w,
                                 a->mean,
                                 a->rstd,
                                 (unsigned)(a->T * H),
                                 (unsigned)H,
                                 (int)C,
                                 dx_stride,
                                 dy_stride,
                                 x_stride,
                                 a->w_offset,
                                 a->means};
        int64_t blocks = launch_rows<E, decltype(width)::value, layernorm>(task, mt_cuda_stream(stream));
        mt_cuda_add_partials(a->dw, blocks, layernorm ? a->db : NULL, blocks, partial, C, stream);
    });
}

/* A warp takes a row. Reads a and b, or one of them where they are the same: 2 or 4 bytes per element in bf16. */
template <class T, int N> __global__ void row_means(const mt_row_means_args args) {
    const int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const T *a = (const T *)args.a + row * args.a_stride, *b = (const T *)args.b + row * args.b_stride;
    float sum = 0;
    if (row >= args.T) return;
    for (int64_t c = threadIdx.x * N; c < args.C; c += 32 * N) {
        mt_pack<float, N> x = mt_to_float(mt_load<N>(a + c)), y = mt_to_float(mt_load<N>(b + c)), w = {};
        if (args.w) w = mt_to_float(mt_load<N>((const T *)args.w + c));
        for (int i = 0; i < N; i++) sum += x.value[i] * y.value[i] * (args.w ? w.value[i] + args.w_offset : 1);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x == 0) args.means[row] = sum / (float)args.C;
}

extern "C" void mt_cuda_row_means(const mt_row_means_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->a, a->b, a->w}, {a->C, a->a_stride, a->b_stride}), [&](auto type, auto width) {
        row_means<decltype(type), decltype(width)::value>
            <<<mt_grid_size(a->T, 8), dim3(32, 8), 0, mt_cuda_stream(stream)>>>(*a);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_rmsnorm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->H > 1 && !a->dresidual && mt_cuda_heads_norm_backward(a, dtype, stream)) return;
    launch_backward<false>(a, a->H, a->dx_stride, a->dy_stride, a->x_stride, dtype, stream);
}

extern "C" void mt_cuda_layernorm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    launch_backward<true>(a, 1, a->C, mt_layernorm_stride(a->dy_stride, a->C), a->C, dtype, stream);
}
