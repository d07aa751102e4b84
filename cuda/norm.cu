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
        packs[k] = c < length ? mt_load<N>(row + c) : mt_pack<T, N>{};
    }
}

/* ---- forward: y = (x - mean) rstd w + b -------------------------------------------------------------------------- */

static constexpr int forward_packs = 2;

/* Reads x, writes y: 4 bytes an element in bf16, 8 in fp32. */
template <class T, int N, bool layernorm>
__global__ void __launch_bounds__(512)
    norm_forward(T *y, float *mean, float *rstd, const T *x, const T *w, const T *b, int rows, int H, int C,
                 int64_t y_stride, int64_t x_stride, float eps) {
    constexpr int K = forward_packs;
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    int64_t t = layernorm ? row : row / H, h = layernorm ? 0 : row % H;
    int chunk = K * N * blockDim.x, last = (C - 1) / chunk * chunk, length = row < rows ? C : 0;
    const T *x_row = x + t * x_stride + h * C;
    T *y_row = y + t * y_stride + h * C;
    mt_pack<T, N> packs[K];
    float sum[1] = {0}, squares[1] = {0}, mu = 0;
    if (layernorm) {
        for (int base = 0; base <= last; base += chunk) {
            load_chunk(packs, x_row, base, length);
#pragma unroll
            for (int k = 0; k < K; k++)
                for (int i = 0; i < N; i++) sum[0] += mt_to_float(packs[k].value[i]);
        }
        mt_row_sum(sum);
        mu = sum[0] / C;
    }
    for (int base = last; base >= 0; base -= chunk) {
        if (!layernorm || base < last) load_chunk(packs, x_row, base, length);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (base + (k * blockDim.x + threadIdx.x) * N >= length) continue;
            for (int i = 0; i < N; i++) {
                float centred = mt_to_float(packs[k].value[i]) - mu;
                squares[0] += centred * centred;
            }
        }
    }
    mt_pack<T, N> weights[K], biases[K];
    load_chunk(weights, w, 0, length);
    if (layernorm) load_chunk(biases, b, 0, length);
    mt_row_sum(squares);
    float scale = 1 / sqrtf(squares[0] / C + eps);
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
            for (int i = 0; i < N; i++) {
                float normed = (mt_to_float(packs[k].value[i]) - mu) * scale * mt_to_float(weights[k].value[i]);
                if (layernorm) normed += mt_to_float(biases[k].value[i]);
                packs[k].value[i] = mt_from_float<T>(normed);
            }
            mt_store(y_row + c, packs[k]);
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
        norm_forward<E, N, layernorm><<<mt_blocks(T * H, block.y), block, 0, mt_cuda_stream(stream)>>>(
            (E *)y, mean, rstd, (const E *)x, (const E *)w, (const E *)b, (int)(T * H), (int)H, (int)C, y_stride,
            x_stride, eps);
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

static constexpr int backward_threads = 1024; // of a multiprocessor

/* partial[0 ... columns - 1] = this block's sums of the last chunk; threads that share columns add theirs through
 * shared memory. */
template <int N>
__device__ static inline void store_block_sums(float *partial, const float (&sums)[N], float *shared, int columns) {
    int chunk = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
    for (int i = 0; i < N; i++) shared[thread * N + i] = sums[i];
    __syncthreads();
    for (int c = thread; c < columns; c += blockDim.x * blockDim.y) {
        float sum = 0;
        for (int y = 0; y < blockDim.y; y++) sum += shared[y * chunk + c];
        partial[c] = sum;
    }
}

/* Reads dy, x and dresidual, writes dx: 8 bytes an element in bf16, 16 in fp32 (6 and 12 without dresidual). `whole`: a
 * chunk holds the row, which spares the registers that walking takes. */
template <class T, int N, bool layernorm, bool whole>
__global__ void __launch_bounds__(whole ? backward_threads : backward_threads / 2)
    norm_backward(T *dx, float *partial, const T *dy, const T *dresidual, const T *x, const T *w, const float *mean,
                  const float *rstd, int rows, int H, int C, int64_t dx_stride, int64_t dy_stride, int64_t x_stride) {
    __shared__ float shared[backward_threads * N];
    int chunk = N * blockDim.x, last = whole ? 0 : (C - 1) / chunk * chunk;
    float dw[N] = {}, db[N] = {}; // of the last chunk; earlier ones are summed in memory
    float *dw_block = partial + (int64_t)blockIdx.x * C, *db_block = dw_block + (int64_t)gridDim.x * C;
    for (int c = threadIdx.x; c < last; c += blockDim.x) {
        dw_block[c] = 0;
        if (layernorm) db_block[c] = 0;
    }
    mt_pack<T, N> xs[1], dys[1], residuals[1], weights[1];
    if (whole) load_chunk(weights, w, 0, C); // the same for all rows
    for (int row0 = blockIdx.x * blockDim.y; row0 < rows; row0 += gridDim.x * blockDim.y) {
        int row = row0 + threadIdx.y;
        int64_t t = layernorm ? row : row / H, h = layernorm ? 0 : row % H;
        int length = row < rows ? C : 0;
        const T *x_row = x + t * x_stride + h * C, *dy_row = dy + t * dy_stride + h * C;
        const T *residual_row = dresidual + t * dx_stride + h * C;
        T *dx_row = dx + t * dx_stride + h * C;
        float mu = layernorm && row < rows ? mean[row] : 0, scale = row < rows ? rstd[row] : 0, sums[2] = {0, 0};
        auto load = [&](int base) {
            load_chunk(xs, x_row, base, length);
            load_chunk(dys, dy_row, base, length);
            load_chunk(residuals, residual_row, base, dresidual ? length : 0);
            if (!whole) load_chunk(weights, w, base, C);
        };
        for (int base = 0; base <= last; base += chunk) { // past the row's end dy is 0 and adds nothing
            load(base);
            for (int i = 0; i < N; i++) {
                float g = mt_to_float(dys[0].value[i]) * mt_to_float(weights[0].value[i]);
                sums[0] += g;
                sums[1] += g * (mt_to_float(xs[0].value[i]) - mu) * scale;
            }
        }
        mt_row_sum(sums);
        float mean_g = layernorm ? sums[0] * (1.0f / C) : 0, mean_gn = sums[1] * (1.0f / C);
        for (int base = last; base >= 0; base -= chunk) {
            if (!whole && base < last) load(base);
            int c = base + threadIdx.x * N;
            if (c >= length) continue;
            for (int i = 0; i < N; i++) {
                float d = mt_to_float(dys[0].value[i]), n = (mt_to_float(xs[0].value[i]) - mu) * scale;
                float through = scale * (d * mt_to_float(weights[0].value[i]) - mean_g - n * mean_gn);
                residuals[0].value[i] = mt_from_float<T>(mt_to_float(residuals[0].value[i]) + through);
                if (whole || base == last) {
                    dw[i] += d * n;
                    db[i] += d;
                } else {
                    dw_block[c + i] += d * n;
                    if (layernorm) db_block[c + i] += d;
                }
            }
            mt_store(dx_row + c, residuals[0]);
        }
    }
    store_block_sums(dw_block + last, dw, shared, C - last);
    if (layernorm) store_block_sums(db_block + last, db, shared, C - last);
}

/* dw[C] += the sums of the blocks, and for a second row of the grid db. */
__global__ void __launch_bounds__(512) add_partials(float *dw, float *db, const float *partial, int blocks, int C) {
    __shared__ float sums[16][32];
    float *to = blockIdx.y == 0 ? dw : db, sum = 0;
    int c = blockIdx.x * 32 + threadIdx.x;
    partial += (int64_t)blockIdx.y * blocks * C;
    if (c < C)
        for (int block = threadIdx.y; block < blocks; block += 16) sum += partial[(int64_t)block * C + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= C) return;
    for (int y = 1; y < 16; y++) sum += sums[y][threadIdx.x];
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
        bool whole = C <= backward_threads * N;
        int64_t packs = mt_divide_up(C, N), threads = whole ? backward_threads : backward_threads / 2;
        dim3 block = mt_reduction_block(packs, 1, backward_threads / 2, (unsigned)threads);
        int64_t blocks = mt_cuda_device()->multiProcessorCount * (backward_threads / (block.x * block.y));
        if (blocks > mt_divide_up(T * H, block.y)) blocks = mt_divide_up(T * H, block.y);
        float *partial = (float *)mt_cuda_workspace(stream, blocks * C * (layernorm ? 2 : 1) * (int64_t)sizeof(float));
        auto kernel = whole ? norm_backward<E, N, layernorm, true> : norm_backward<E, N, layernorm, false>;
        kernel<<<(unsigned)blocks, block, 0, mt_cuda_stream(stream)>>>(
            (E *)dx, partial, (const E *)dy, (const E *)dresidual, (const E *)x, (const E *)w, mean, rstd, (int)(T * H),
            (int)H, (int)C, dx_stride, dy_stride, x_stride);
        MT_CUDA_LAUNCHED();
        dim3 grid(mt_blocks(C, 32), layernorm ? 2 : 1);
        add_partials<<<grid, dim3(32, 16), 0, mt_cuda_stream(stream)>>>(dw, db, partial, (int)blocks, (int)C);
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
