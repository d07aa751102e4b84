/* norm.cu: RMSNorm and LayerNorm, forward and backward.
 *
 * RMSNorm is LayerNorm without the mean and the bias, so one kernel does both. blockDim.x threads share a row and keep
 * it in registers between its reduction and its use: `forward_packs` or `backward_packs` packs each. A row that is
 * longer than that (a chunk) is read again, chunk by chunk; walking the chunks to and fro leaves the last one where the
 * next walk begins.
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

static constexpr int forward_packs = 4;

/* Reads x, writes y: 4 bytes an element in bf16, 8 in fp32. */
template <class T, int N, bool layernorm>
__global__ void __launch_bounds__(512)
    norm_forward(T *y, float *mean, float *rstd, const T *x, const T *w, const T *b, int64_t rows, int H, int C,
                 int64_t y_stride, int64_t x_stride, float eps) {
    constexpr int K = forward_packs;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    int chunk = K * N * blockDim.x, last = (C - 1) / chunk * chunk, length = row < rows ? C : 0;
    const T *x_row = x + row / H * x_stride + row % H * C;
    T *y_row = y + row / H * y_stride + row % H * C;
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
    mt_row_sum(squares);
    float scale = 1 / sqrtf(squares[0] / C + eps);
    if (threadIdx.x == 0 && row < rows) {
        rstd[row] = scale;
        if (layernorm) mean[row] = mu;
    }
    for (int base = 0; base <= last; base += chunk) {
        if (base > 0) load_chunk(packs, x_row, base, length);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = base + (k * blockDim.x + threadIdx.x) * N;
            if (c >= length) continue;
            mt_pack<T, N> weights = mt_load<N>(w + c), biases = layernorm ? mt_load<N>(b + c) : weights;
            for (int i = 0; i < N; i++) {
                float normed = (mt_to_float(packs[k].value[i]) - mu) * scale * mt_to_float(weights.value[i]);
                if (layernorm) normed += mt_to_float(biases.value[i]);
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
            (E *)y, mean, rstd, (const E *)x, (const E *)w, (const E *)b, T * H, (int)H, (int)C, y_stride, x_stride,
            eps);
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

static constexpr int backward_packs = 2;
static constexpr int backward_threads = 512; // of a multiprocessor

/* partial[0] and, for LayerNorm, partial[1] are this block's [C] sums; threads that share columns add theirs through
 * shared memory. */
template <int M>
__device__ static inline void store_block_sums(float *partial, const float (&sums)[M], float *shared, int chunk,
                                               int columns) {
    int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    constexpr int N = M / backward_packs;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < M; j++) shared[threadIdx.y * chunk + (j / N * blockDim.x + threadIdx.x) * N + j % N] = sums[j];
    __syncthreads();
    for (int c = thread; c < columns; c += threads) {
        float sum = 0;
        for (int y = 0; y < blockDim.y; y++) sum += shared[y * chunk + c];
        partial[c] = sum;
    }
}

/* Reads dy, x and dresidual, writes dx: 8 bytes an element in bf16, 16 in fp32 (6 and 12 without dresidual). */
template <class T, int N, bool layernorm>
__global__ void __launch_bounds__(backward_threads)
    norm_backward(T *dx, float *partial, const T *dy, const T *dresidual, const T *x, const T *w, const float *mean,
                  const float *rstd, int64_t rows, int H, int C, int64_t dx_stride, int64_t dy_stride,
                  int64_t x_stride) {
    constexpr int K = backward_packs;
    __shared__ float shared[backward_threads * K * N];
    int chunk = K * N * blockDim.x, last = (C - 1) / chunk * chunk;
    float dw[K * N] = {}, db[K * N] = {}; // of the last chunk; earlier ones are summed in memory
    float *dw_block = partial + (int64_t)blockIdx.x * C, *db_block = dw_block + (int64_t)gridDim.x * C;
    for (int c = threadIdx.x; c < last; c += blockDim.x) {
        dw_block[c] = 0;
        if (layernorm) db_block[c] = 0;
    }
    for (int64_t row0 = (int64_t)blockIdx.x * blockDim.y; row0 < rows; row0 += (int64_t)gridDim.x * blockDim.y) {
        int64_t row = row0 + threadIdx.y, t = row / H, h = row % H;
        int length = row < rows ? C : 0;
        float mu = layernorm && row < rows ? mean[row] : 0, scale = row < rows ? rstd[row] : 0, sums[2] = {0, 0};
        mt_pack<T, N> dys[K], xs[K], residuals[K];
        auto load = [&](int base) {
            load_chunk(xs, x + t * x_stride + h * C, base, length);
            load_chunk(dys, dy + t * dy_stride + h * C, base, length);
            load_chunk(residuals, dresidual ? dresidual + t * dx_stride + h * C : dresidual, base,
                       dresidual ? length : 0);
        };
        for (int base = 0; base <= last; base += chunk) {
            load(base);
#pragma unroll
            for (int k = 0; k < K; k++) {
                int c = base + (k * blockDim.x + threadIdx.x) * N;
                if (c >= length) continue;
                mt_pack<T, N> weights = mt_load<N>(w + c);
                for (int i = 0; i < N; i++) {
                    float g = mt_to_float(dys[k].value[i]) * mt_to_float(weights.value[i]);
                    sums[0] += g;
                    sums[1] += g * (mt_to_float(xs[k].value[i]) - mu) * scale;
                }
            }
        }
        mt_row_sum(sums);
        float mean_g = layernorm ? sums[0] / C : 0, mean_gn = sums[1] / C;
        for (int base = last; base >= 0; base -= chunk) {
            if (base < last) load(base);
#pragma unroll
            for (int k = 0; k < K; k++) {
                int c = base + (k * blockDim.x + threadIdx.x) * N;
                if (c >= length) continue;
                mt_pack<T, N> weights = mt_load<N>(w + c), out;
                for (int i = 0; i < N; i++) {
                    float d = mt_to_float(dys[k].value[i]), n = (mt_to_float(xs[k].value[i]) - mu) * scale;
                    float through = scale * (d * mt_to_float(weights.value[i]) - mean_g - n * mean_gn);
                    out.value[i] = mt_from_float<T>(mt_to_float(residuals[k].value[i]) + through);
                    if (base == last) {
                        dw[k * N + i] += d * n;
                        db[k * N + i] += d;
                    } else {
                        dw_block[c + i] += d * n;
                        if (layernorm) db_block[c + i] += d;
                    }
                }
                mt_store(dx + t * dx_stride + h * C + c, out);
            }
        }
    }
    store_block_sums(dw_block + last, dw, shared, chunk, C - last);
    if (layernorm) store_block_sums(db_block + last, db, shared, chunk, C - last);
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
        dim3 block = mt_reduction_block(mt_divide_up(C, N), backward_packs, 256, backward_threads);
        int64_t blocks = mt_cuda_device()->multiProcessorCount * (backward_threads / (block.x * block.y));
        if (blocks > mt_divide_up(T * H, block.y)) blocks = mt_divide_up(T * H, block.y);
        float *partial = (float *)mt_cuda_workspace(stream, blocks * C * (layernorm ? 2 : 1) * (int64_t)sizeof(float));
        norm_backward<E, N, layernorm><<<(unsigned)blocks, block, 0, mt_cuda_stream(stream)>>>(
            (E *)dx, partial, (const E *)dy, (const E *)dresidual, (const E *)x, (const E *)w, mean, rstd, T * H,
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
