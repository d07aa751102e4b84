/* gemv.cu: linear layers with few rows, as in decoding: y[T, N] = x[T, K] w^T with T <= 8.
 *
 * The time of such a product is the time to read w. A warp computes one or a few output columns (rows of w): it reads
 * them once with 16-byte loads and multiplies them by every row of x. The order of summation does not depend on T or R,
 * so the result of a row does not depend on the other rows of the batch. Inside a CUDA graph (programmatic dependent
 * launch) the first loads of w do not wait for the kernel that writes x, because no kernel of the graph writes w. */
#include "vector.cuh"

enum { WARPS = 4 };

/* Loads 16 bytes of w, bypassing L1: w is read once and should not evict x. */
template <class E> __device__ static inline mt_pack<E, 16 / sizeof(E)> load_once(const E *from, bool there) {
    uint4 word = {};
    if (there)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                     : "l"(from));
    mt_pack<E, 16 / sizeof(E)> pack;
    memcpy(&pack, &word, sizeof pack);
    return pack;
}

/* A warp computes R columns of up to `rows` rows of y and keeps U packs of each row of w in flight. Reads w once: 2
 * bytes per element in bf16, 4 in fp32. */
template <class E, int rows, int R, int U>
__global__ void __launch_bounds__(32 * WARPS)
    gemv(E *y, const E *x, const E *w, const E *bias, int T, int64_t N, int64_t K) {
    constexpr int P = 16 / sizeof(E), n = rows * R, step = 32 * P;
    int lane = threadIdx.x % 32;
    int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * R;
    if (first >= N) return;
    const E *columns[R]; // beyond column N - 1: that column again, and the result is not stored
#pragma unroll
    for (int r = 0; r < R; r++) columns[r] = w + min(first + r, N - 1) * K;
    float sums[n] = {};
    for (int64_t base = lane * P; base < K; base += U * step) {
        mt_pack<E, P> packs[U][R];
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int r = 0; r < R; r++) packs[u][r] = load_once(columns[r] + base + u * step, base + u * step < K);
        if (base == lane * P) mt_wait_for_previous();
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (base + u * step >= K) break;
            mt_pack<float, P> weights[R];
#pragma unroll
            for (int r = 0; r < R; r++) weights[r] = mt_to_float(packs[u][r]);
#pragma unroll
            for (int t = 0; t < rows; t++) {
                mt_pack<float, P> in = mt_to_float(mt_load<P>(x + t * K + base + u * step, t < T));
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int i = 0; i < P; i++)
                        sums[r * rows + t] = fmaf(weights[r].value[i], in.value[i], sums[r * rows + t]);
            }
        }
    }
    mt_sum_over_lanes(sums, lane);
    int mine = lane / (32 / n), t = mine % rows;
    int64_t column = first + mine / rows;
    if (lane % (32 / n) != 0 || t >= T || column >= N) return;
    y[t * N + column] = mt_from_float<E>(sums[0] + (bias ? mt_to_float(bias[column]) : 0));
}

/* With more columns per warp, x is read less often. Used if N is large enough to keep every multiprocessor busy. */
template <class E, int rows> static void launch(const mt_linear_args *a, mt_stream *stream) {
    const int64_t N = a->N;
    constexpr int few = rows <= 2 ? 1 : 2, many = 2 * few, enough = 16384;
    auto kernel = N < enough ? gemv<E, rows, few, 4> : gemv<E, rows, many, 8 / many>;
    cudaLaunchAttribute early;
    cudaLaunchConfig_t config = {};
    config.gridDim = mt_grid_size(N, WARPS * (N < enough ? few : many));
    config.blockDim = 32 * WARPS;
    config.stream = mt_cuda_stream(stream);
    if (stream && stream->capturing) mt_cuda_launch_early(&config, &early);
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, (E *)a->y, (const E *)a->x, (const E *)a->w, (const E *)a->bias,
                               (int)a->T, N, a->K));
}

template <class E> static void launch_rows(const mt_linear_args *a, mt_stream *stream) {
    auto launcher = a->T == 1 ? launch<E, 1> : a->T == 2 ? launch<E, 2> : a->T <= 4 ? launch<E, 4> : launch<E, 8>;
    launcher(a, stream);
}

bool mt_cuda_gemv(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T < 1 || a->T > mt_gemv_rows(a->N, a->K, dtype) || !mt_wide(dtype, {a->x, a->w}, {a->K})) return false;
    MT_CUDA_DISPATCH(dtype, launch_rows, a, stream);
    return true;
}
