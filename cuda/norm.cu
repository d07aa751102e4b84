/* norm.cu: RMSNorm and LayerNorm, forward and backward.
 *
 * RMSNorm is LayerNorm without the mean and the bias, so one kernel does both. blockDim.x threads share a row and keep
 * it in registers between its reduction and its use. A row that is longer than what they hold (a chunk) is read again,
 * chunk by chunk; walking the chunks to and fro leaves the last one where the next walk begins.
 */
#include "vector.cuh"

/* The packs of a row that are this thread's in the chunk at `base`; zeros past the row's end. */
template <int K, int N, class T>
__device__ static inline void load_chunk(mt_pack<T, N> (&packs)[K], const T *row, int base, int length) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        int c = base + (k * blockDim.x + threadIdx.x) * N;
        packs[k] = mt_load<N>(row + c, c < length);
    }
}

/* ---- forward: y = (x - mean) rstd w + b -------------------------------------------------------------------------- */

static constexpr int forward_packs = 4;

/* Reads x, writes y: 4 bytes an element in bf16, 8 in fp32. `whole`: a chunk holds the row, which spares the registers
 * that walking takes. */
template <class T, int N, bool layernorm, bool whole>
__global__ void __launch_bounds__(512)
    norm_forward(T *y, float *mean, float *rstd, const T *x, const T *w, const T *b, unsigned rows, unsigned H, int C,
                 int64_t y_stride, int64_t x_stride, float eps) {
    constexpr int K = forward_packs;
    unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
    int64_t t = layernorm ? row : row / H, h = layernorm ? 0 : row % H;
    int chunk = K * N * blockDim.x, last = whole ? 0 : (C - 1) / chunk * chunk, length = row < rows ? C : 0;
    const T *x_row = x + t * x_stride + h * C;
    T *y_row = y + t * y_stride + h * C;
    mt_pack<T, N> packs[K];
    float sum[1] = {0}, squares[1] = {0}, mu = 0, inverse_C = __frcp_rn(C);
    if (layernorm) {
        for (int base = 0; base <= last; base += chunk) {
            load_chunk(packs, x_row, base, length);
#pragma unroll
            for (int k = 0; k < K; k++) {
                mt_pack<float, N> in = mt_to_float(packs[k]);
                for (int i = 0; i < N; i++) sum[0] += in.value[i];
            }
        }
        mt_row_sum(sum, 0);
        mu = sum[0] * inverse_C;
    }
    for (int base = last; base >= 0; base -= chunk) {
        if (!layernorm || base < last) load_chunk(packs, x_row, base, length);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (base + (k * blockDim.x + threadIdx.x) * N >= length) continue;
            mt_keep_packed(packs[k]);
            mt_pack<float, N> in = mt_to_float(packs[k]);
            for (int i = 0; i < N; i++) squares[0] += (in.value[i] - mu) * (in.value[i] - mu);
        }
    }
    mt_pack<T, N> weights[K], biases[K];
    load_chunk(weights, w, 0, length);
    if (layernorm) load_chunk(biases, b, 0, length);
    mt_row_sum(squares, 1);
    float scale = rsqrtf(squares[0] * inverse_C + eps);
    if (threadIdx.x == 0 && row < rows) {
        rstd[row] = scale;
        if (layernorm) mean[row] = mu;
    }
    for (int base = 0; base <= last; base += chunk) {
        if (base > 0) {
            load_chunk(packs, x_row, base, length);
            load_chunk(weights, w, base, length);
            if (layernorm) load_chunk(biases, b, base, length);
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = base + (k * blockDim.x + threadIdx.x) * N;
            if (c >= length) continue;
            mt_keep_packed(packs[k]);
            mt_pack<float, N> out = mt_to_float(packs[k]), weight = mt_to_float(weights[k]);
            mt_pack<float, N> bias = {};
            if (layernorm) bias = mt_to_float(biases[k]);
            for (int i = 0; i < N; i++) out.value[i] = (out.value[i] - mu) * scale * weight.value[i] + bias.value[i];
            mt_store(y_row + c, mt_from_float<T>(out));
        }
    }
}

template <bool layernorm>
static void launch_forward(void *y, float *mean, float *rstd, const void *x, const void *w, const void *b, int64_t T,
                           int64_t H, int64_t C, int64_t y_stride, int64_t x_stride, float eps, mt_dtype dtype,
                           mt_stream *stream) {
    if (T == 0) return;
    bool wide = mt_wide(dtype, {y, x, w, b}, {C, y_stride, x_stride});
    mt_dispatch(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        dim3 block = mt_reduction_block(mt_divide_up(C, N), forward_packs, 128, 512);
        bool whole = C <= forward_packs * N * (int64_t)block.x;
        auto kernel = whole ? norm_forward<E, N, layernorm, true> : norm_forward<E, N, layernorm, false>;
        kernel<<<mt_blocks(T * H, block.y), block, 0, mt_cuda_stream(stream)>>>(
            (E *)y, mean, rstd, (const E *)x, (const E *)w, (const E *)b, (unsigned)(T * H), (unsigned)H, (int)C,
            y_stride, x_stride, eps);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_rmsnorm_forward(void *y, float *rstd, const void *x, const void *w, int64_t T, int64_t H,
                                        int64_t C, int64_t y_stride, int64_t x_stride, float eps, mt_dtype dtype,
                                        mt_stream *stream) {
    launch_forward<false>(y, NULL, rstd, x, w, NULL, T, H, C, y_stride, x_stride, eps, dtype, stream);
}

extern "C" void mt_cuda_layernorm_forward(void *y, float *mean, float *rstd, const void *x, const void *w,
                                          const void *b, int64_t T, int64_t C, float eps, mt_dtype dtype,
                                          mt_stream *stream) {
    launch_forward<true>(y, mean, rstd, x, w, b, T, 1, C, C, C, eps, dtype, stream);
}

/* ---- backward ----------------------------------------------------------------------------------------------------
 * With n = (x - mean) rstd and g = dy w: dx = dresidual + rstd (g - mean(g) - n mean(g n)), where RMSNorm has no
 * mean(g); dw = sum over rows of dy n, db = sum over rows of dy. A fixed number of blocks walks the rows; each keeps
 * its sums for dw and db in registers, and add_partials adds the blocks' sums in a fixed order. */

/* Threads of a multiprocessor, which sets the registers that each may use. */
__host__ __device__ static constexpr int backward_threads(bool layernorm) {
    return layernorm ? 768 : 1024;
}
static constexpr int shared_block = 512; // threads of the largest block in which rows share columns

/* partial[0 ... C - 1] = this block's sums; its rows add theirs through shared memory. */
template <int N> __device__ static inline void store_block_sums(float *partial, const mt_pack<float, N> &sums, int C) {
    __shared__ float shared[shared_block * N];
    int chunk = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
    if (blockDim.y == 1) {
        if (thread * N < C) mt_store(partial + thread * N, sums);
        return;
    }
    __syncthreads();
    for (int i = 0; i < N; i++) shared[thread * N + i] = sums.value[i];
    __syncthreads();
    for (int c = thread; c < C; c += blockDim.x * blockDim.y) {
        float sum = 0;
        for (int y = 0; y < blockDim.y; y++) sum += shared[y * chunk + c];
        partial[c] = sum;
    }
}

/* What a thread has of a row: a pack of each input. */
template <class T, int N> struct row_part {
    mt_pack<T, N> x, dy, residual;
    float mean, rstd;
};

/* A row has a pack for each thread. The next row is on its way while this one is reduced: that keeps the memory busy.
 * Reads dy, x and dresidual, writes dx: 8 bytes an element in bf16, 16 in fp32 (6 and 12 without dresidual). */
template <class T, int N, bool layernorm>
__global__ void __launch_bounds__(backward_threads(layernorm))
    norm_backward(T *dx, float *partial, const T *dy, const T *dresidual, const T *x, const T *w, const float *mean,
                  const float *rstd, unsigned rows, unsigned H, int C, int64_t dx_stride, int64_t dy_stride,
                  int64_t x_stride) {
    int c = threadIdx.x * N;
    float inverse_C = __frcp_rn(C);
    auto load = [&](unsigned row) { // zeros past the last row and past the row's end add nothing
        bool there = row < rows && c < C;
        int64_t t = layernorm ? row : row / H, column = layernorm ? c : row % H * C + c;
        row_part<T, N> part;
        part.x = mt_load<N>(x + t * x_stride + column, there);
        part.dy = mt_load<N>(dy + t * dy_stride + column, there);
        part.residual = mt_load<N>(dresidual + t * dx_stride + column, there && dresidual);
        part.mean = layernorm && row < rows ? mean[row] : 0;
        part.rstd = row < rows ? rstd[row] : 0;
        return part;
    };
    mt_pack<float, N> dw = {}, db = {};
    mt_pack<T, N> weights = mt_load<N>(w + c, c < C);
    unsigned step = gridDim.x * blockDim.y, row = blockIdx.x * blockDim.y + threadIdx.y;
    row_part<T, N> next = load(row);
    for (int turn = 0; row - threadIdx.y < rows; row += step, turn ^= 1) {
        row_part<T, N> part = next;
        next = load(row + step);
        float sums[layernorm ? 2 : 1] = {};
        auto widen = [&](mt_pack<float, N> &n, mt_pack<float, N> &d, mt_pack<float, N> &g) {
            mt_keep_packed(part.x), mt_keep_packed(part.dy), mt_keep_packed(weights);
            n = mt_to_float(part.x), d = mt_to_float(part.dy), g = mt_to_float(weights);
            for (int i = 0; i < N; i++) {
                n.value[i] = (n.value[i] - part.mean) * part.rstd;
                g.value[i] *= d.value[i];
            }
        };
        mt_pack<float, N> n, d, g;
        widen(n, d, g);
        for (int i = 0; i < N; i++) {
            dw.value[i] += d.value[i] * n.value[i];
            if (layernorm) db.value[i] += d.value[i];
            sums[0] += g.value[i] * n.value[i];
            if constexpr (layernorm) sums[1] += g.value[i];
        }
        mt_row_sum(sums, turn);
        float mean_gn = sums[0] * inverse_C, mean_g = 0;
        if constexpr (layernorm) mean_g = sums[1] * inverse_C;
        if (row >= rows || c >= C) continue;
        widen(n, d, g);
        mt_pack<float, N> out = mt_to_float(part.residual);
        for (int i = 0; i < N; i++) out.value[i] += part.rstd * (g.value[i] - mean_g - n.value[i] * mean_gn);
        int64_t t = layernorm ? row : row / H, column = layernorm ? c : row % H * C + c;
        mt_store(dx + t * dx_stride + column, mt_from_float<T>(out));
    }
    store_block_sums(partial + (int64_t)blockIdx.x * C, dw, C);
    if (layernorm) store_block_sums(partial + (int64_t)(gridDim.x + blockIdx.x) * C, db, C);
}

/* The same for rows that are longer than a block has packs, a block a row. They are read twice, and dw and db are
 * summed in `partial` itself. */
template <class T, int N, bool layernorm>
__global__ void __launch_bounds__(512)
    norm_backward_long(T *dx, float *partial, const T *dy, const T *dresidual, const T *x, const T *w,
                       const float *mean, const float *rstd, unsigned rows, unsigned H, int C, int64_t dx_stride,
                       int64_t dy_stride, int64_t x_stride) {
    int chunk = blockDim.x * N, first = threadIdx.x * N;
    float *dw = partial + (int64_t)blockIdx.x * C, *db = dw + (int64_t)gridDim.x * C;
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
                float g = d.value[i] * weight.value[i];
                sums[0] += g * (n.value[i] - mu) * scale;
                sums[1] += g;
            }
        }
        mt_row_sum(sums, turn);
        float mean_gn = sums[0] * inverse_C, mean_g = layernorm ? sums[1] * inverse_C : 0;
        for (int c = first; c < C; c += chunk) {
            mt_pack<float, N> n = mt_to_float(mt_load<N>(x_row + c)), d = mt_to_float(mt_load<N>(dy_row + c));
            mt_pack<float, N> weight = mt_to_float(mt_load<N>(w + c)), out = {};
            mt_pack<float, N> dw_sum = mt_load<N>(dw + c), db_sum = {};
            if (layernorm) db_sum = mt_load<N>(db + c);
            if (dresidual) out = mt_to_float(mt_load<N>(dresidual + dx_row + c));
            for (int i = 0; i < N; i++) {
                n.value[i] = (n.value[i] - mu) * scale;
                out.value[i] += scale * (d.value[i] * weight.value[i] - mean_g - n.value[i] * mean_gn);
                dw_sum.value[i] += d.value[i] * n.value[i];
                db_sum.value[i] += d.value[i];
            }
            mt_store(dx + dx_row + c, mt_from_float<T>(out));
            mt_store(dw + c, dw_sum);
            if (layernorm) mt_store(db + c, db_sum);
        }
    }
}

/* dw[C] += the sums of the blocks, and for a second row of the grid db. */
__global__ void __launch_bounds__(1024) add_partials(float *dw, float *db, const float *partial, int blocks, int C) {
    __shared__ float sums[32][32];
    float *to = blockIdx.y == 0 ? dw : db, sum = 0;
    int c = blockIdx.x * 32 + threadIdx.x;
    partial += (int64_t)blockIdx.y * blocks * C;
    if (c < C)
#pragma unroll 4
        for (int block = threadIdx.y; block < blocks; block += 32) sum += partial[(int64_t)block * C + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= C) return;
    for (int y = 1; y < 32; y++) sum += sums[y][threadIdx.x];
    to[c] += sum;
}

template <bool layernorm>
static void launch_backward(void *dx, float *dw, float *db, const void *dy, const void *dresidual, const void *x,
                            const void *w, const float *mean, const float *rstd, int64_t T, int64_t H, int64_t C,
                            int64_t dx_stride, int64_t dy_stride, int64_t x_stride, mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    bool wide = mt_wide(dtype, {dx, dy, dresidual, x, w}, {C, dx_stride, dy_stride, x_stride});
    mt_dispatch(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        constexpr int threads = backward_threads(layernorm); // of a multiprocessor
        int64_t packs = mt_divide_up(C, N);
        bool whole = packs <= threads;
        dim3 block = whole ? mt_reduction_block(packs, 1, threads / 2, threads) : dim3(512);
        int64_t blocks = mt_cuda_device()->multiProcessorCount * (whole ? threads / (block.x * block.y) : 2);
        if (blocks > mt_divide_up(T * H, block.y)) blocks = mt_divide_up(T * H, block.y);
        float *partial = (float *)mt_cuda_workspace(stream, blocks * C * (layernorm ? 2 : 1) * (int64_t)sizeof(float));
        auto kernel = whole ? norm_backward<E, N, layernorm> : norm_backward_long<E, N, layernorm>;
        kernel<<<(unsigned)blocks, block, 0, mt_cuda_stream(stream)>>>(
            (E *)dx, partial, (const E *)dy, (const E *)dresidual, (const E *)x, (const E *)w, mean, rstd,
            (unsigned)(T * H), (unsigned)H, (int)C, dx_stride, dy_stride, x_stride);
        MT_CUDA_LAUNCHED();
        dim3 grid(mt_blocks(C, 32), layernorm ? 2 : 1);
        add_partials<<<grid, dim3(32, 32), 0, mt_cuda_stream(stream)>>>(dw, db, partial, (int)blocks, (int)C);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_rmsnorm_backward(void *dx, float *dw, const void *dy, const void *dresidual, const void *x,
                                         const void *w, const float *rstd, int64_t T, int64_t H, int64_t C,
                                         int64_t dx_stride, int64_t dy_stride, int64_t x_stride, mt_dtype dtype,
                                         mt_stream *stream) {
    launch_backward<false>(dx, dw, NULL, dy, dresidual, x, w, NULL, rstd, T, H, C, dx_stride, dy_stride, x_stride,
                           dtype, stream);
}

extern "C" void mt_cuda_layernorm_backward(void *dx, float *dw, float *db, const void *dy, const void *dresidual,
                                           const void *x, const void *w, const float *mean, const float *rstd,
                                           int64_t T, int64_t C, mt_dtype dtype, mt_stream *stream) {
    launch_backward<true>(dx, dw, db, dy, dresidual, x, w, mean, rstd, T, 1, C, C, C, C, dtype, stream);
}
