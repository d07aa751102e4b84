/* activation.cu: element-wise kernels: activations, dropout with residual, row gather and scatter, embedding,
 * conversion. */
#include "activation.cuh"
#include "counting_sort.cuh"
#include "fp8.cuh"

/* Packs that a thread loads before it uses the first. */
static constexpr int packs_per_thread = 4;

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Calls body(f, gated, glu) with the types of an activation's row and its operands. */
template <class F, bool gated, class Body> static void with_glu(const mt_glu *glu, Body body) {
    std::integral_constant<bool, gated> is_gated;
    if constexpr (gated)
        if (mt_glu_bounds(glu)) {
            body(F{}, is_gated, bounded_glu{glu->clamp > 0 ? glu->clamp : INFINITY, glu->offset});
            return;
        }
    body(F{}, is_gated, plain_glu{});
}

template <class Body> static void with_activation(const mt_activation_args *a, Body body) {
    MT_CHECK(mt_activation_rows[a->activation].gated || !mt_glu_bounds(&a->glu));
#define MT_CUDA_ACTIVATION(name, f, gated, ...)                                                                        \
    if (a->activation == MT_ACTIVATION_##name) with_glu<f, gated>(&a->glu, body);
    MT_ACTIVATIONS(MT_CUDA_ACTIVATION)
}

/* Not gated, no weights: y = f(x). Reads x, writes y: 4 bytes per element in bf16, 8 in fp32. */
template <class F, class T, int N> __global__ void activation_forward(T *y, const T *x, int64_t begin, int64_t end) {
    constexpr int K = packs_per_thread;
    mt_begin_next();
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    mt_pack<T, N> packs[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        if (first + k * step < end) packs[k] = mt_load<N>(x + first + k * step);
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        mt_pack<float, N> out = mt_to_float(packs[k]);
        for (int i = 0; i < N; i++) out.value[i] = F::value(out.value[i]);
        mt_store(y + first + k * step, mt_from_float<T>(out));
    }
}

/* dx = dy f'(x). Reads dy and x, writes dx: 6 bytes per element in bf16, 12 in fp32. */
template <class F, class T, int N>
__global__ void activation_backward(T *dx, const T *dy, const T *x, int64_t begin, int64_t end) {
    constexpr int K = packs_per_thread / 2;
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    mt_pack<T, N> xs[K], dys[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        xs[k] = mt_load<N>(x + first + k * step);
        dys[k] = mt_load<N>(dy + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        mt_pack<float, N> in = mt_to_float(xs[k]), d = mt_to_float(dys[k]);
        for (int i = 0; i < N; i++) d.value[i] *= F::slope(in.value[i]);
        mt_store(dx + first + k * step, mt_from_float<T>(d));
    }
}

/* Gated, no weights: y = f(gate) up. Reads gate and up, writes y: 6 bytes per element of y in bf16, 12 in fp32. */
template <class F, class Glu, class T, int N>
__global__ void gated_forward(T *y, const T *x, int width, int blocks_per_row, Glu glu) {
    constexpr int K = packs_per_thread / 2;
    mt_begin_next();
    mt_wait_for_previous();
    int64_t row = blockIdx.x / blocks_per_row;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    const T *gate_row = x + row * 2 * width, *up_row = gate_row + width;
    mt_pack<T, N> gates[K], ups[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        gates[k] = mt_load<N>(gate_row + first + k * step);
        ups[k] = mt_load<N>(up_row + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        mt_pack<float, N> gate = mt_to_float(gates[k]), up = mt_to_float(ups[k]);
        for (int i = 0; i < N; i++) gate.value[i] = F::value(glu.gate(gate.value[i])) * glu.up(up.value[i]);
        mt_store(y + row * width + first + k * step, mt_from_float<T>(gate));
    }
}

/* dup = dy f(gate), dgate = dy up f'(gate). Reads dy, gate and up, writes dgate and dup: 10 bytes per element of y in
 * bf16, 20 in fp32. */
template <class F, class Glu, class T, int N>
__global__ void gated_backward(T *dx, const T *dy, const T *x, int width, int blocks_per_row, Glu glu) {
    constexpr int K = packs_per_thread / 2;
    int64_t row = blockIdx.x / blocks_per_row;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    const T *gate_row = x + row * 2 * width, *up_row = gate_row + width, *dy_row = dy + row * width;
    T *dgate_row = dx + row * 2 * width, *dup_row = dgate_row + width;
    mt_pack<T, N> gates[K], ups[K], dys[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        gates[k] = mt_load<N>(gate_row + first + k * step);
        ups[k] = mt_load<N>(up_row + first + k * step);
        dys[k] = mt_load<N>(dy_row + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        mt_pack<float, N> gate = mt_to_float(gates[k]), up = mt_to_float(ups[k]), d = mt_to_float(dys[k]);
        for (int i = 0; i < N; i++) {
            float g = gate.value[i], u = up.value[i], bounded = glu.gate(g);
            gate.value[i] = d.value[i] * glu.up(u) * F::slope(bounded) * glu.gate_slope(g);
            up.value[i] = d.value[i] * F::value(bounded) * glu.up_slope(u);
        }
        mt_store(dgate_row + first + k * step, mt_from_float<T>(gate));
        mt_store(dup_row + first + k * step, mt_from_float<T>(up));
    }
}

/* Stores a row of a result of `width` elements as it is. All threads of a block call finish(). */
template <class T> struct plain_rows {
    T *to;
    int width;
    __device__ void open(int64_t row) {
        to += row * width;
    }
    template <int N> __device__ void store(int c, const mt_pack<float, N> &x) {
        mt_store(to + c, mt_from_float<T>(x));
    }
    __device__ void finish(void) {
    }
};

/* Stores a row in fp8, rounded to T first; with offsets a row of no expert is not stored. */
template <class T, mt_dtype FORMAT> struct fp8_rows {
    mt_fp8_matrix to;
    const float *scale;
    float *amax;
    const int32_t *offsets;
    int num_experts;
    uint32_t largest;
    float factor;
    bool exists;
    __device__ void open(int64_t row) {
        factor = *scale, to.data += row * to.stride;
        exists = !offsets || (row >= offsets[0] && row < offsets[num_experts]);
    }
    template <int N> __device__ void store(int c, const mt_pack<float, N> &x) {
        static_assert(N == 8, "a word of 8 bytes");
        uint32_t bits[N / 4];
        if (!exists) return;
        const mt_pack<T, N> rounded = mt_from_float<T>(x);
        mt_pack_to_fp8<FORMAT>(bits, rounded, factor);
        largest = max(largest, mt_magnitude(rounded));
        mt_store_word((uint2 *)(to.data + c), make_uint2(bits[0], bits[1]));
    }
    __device__ void finish(void) {
        if (amax) mt_raise_amax(amax, largest);
        if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *to.inverse_scales = 1 / factor;
    }
};

/* Calls body(rows) with the rows in which an operation stores its result. */
template <class T, int N, class Body>
static void with_rows(const mt_quantize_args *quantize, void *to, int64_t width, Body body) {
    const mt_quantize_args *q = quantize;
    if (!q->rows.data) {
        body(plain_rows<T>{(T *)to, (int)width});
        return;
    }
    MT_CHECK((N == 8 && q->scale && q->rows.blocks == MT_FP8_TENSOR && q->rows.stride % 16 == 0));
    if constexpr (N == 8) {
        if (q->rows.format == MT_F8_E4M3)
            body(fp8_rows<T, MT_F8_E4M3>{q->rows, q->scale, q->amax, q->offsets, (int)q->num_experts});
        else
            body(fp8_rows<T, MT_F8_E5M2>{q->rows, q->scale, q->amax, q->offsets, (int)q->num_experts});
    }
}

/* y = weight f(x), or weight f(gate) up; the weight is 1 unless `weighted`. Reads x, writes y: 6 bytes per element of y
 * in bf16, 12 in fp32 (4 and 8 if not gated), and 4 per row; one byte less per element where y is in fp8. */
template <class F, class Glu, bool gated, bool weighted, class T, int N, class Rows>
__global__ void weighted_forward(Rows y, const T *x, const float *weights, int64_t M, int width, int blocks_per_row,
                                 Glu glu) {
    constexpr int K = 2;
    int64_t row = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    if (row >= M) row = M - 1, first = width; // takes part in finish(), writes nothing
    const T *in_row = x + row * (gated ? 2 : 1) * width, *up_row = in_row + width;
    float weight = weighted ? weights[row] : 1;
    y.open(row);
    mt_pack<T, N> ins[K], ups[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        ins[k] = mt_load<N>(in_row + first + k * step);
        if (gated) ups[k] = mt_load<N>(up_row + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        mt_pack<float, N> in = mt_to_float(ins[k]), up = {};
        if (gated) up = mt_to_float(ups[k]);
        for (int i = 0; i < N; i++)
            in.value[i] = F::value(glu.gate(in.value[i])) * (gated ? glu.up(up.value[i]) : 1) * weight;
        y.store(first + k * step, in);
    }
    y.finish();
}

/* The gradients for weight dy, and if `weighted` dweight = sum(dy f(gate) up). blockDim.x threads share a row. Reads dy
 * and x, writes dx: 10 bytes per element of y in bf16, 20 in fp32 (6 and 12 if not gated), and 8 per row; less where dx
 * is in fp8. */
template <class F, class Glu, bool gated, bool weighted, class T, int N, class Rows>
__global__ void weighted_backward(Rows dx, float *dweights, const T *dy, const T *x, const float *weights, int64_t M,
                                  int width, Glu glu) {
    constexpr int K = std::is_same_v<Rows, plain_rows<T>> ? 2 : 1; // in fp8 fewer registers are faster
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    bool valid = row < M;
    if (!valid) row = M - 1; // takes part in the reduction, writes nothing
    const T *in_row = x + row * (gated ? 2 : 1) * width, *up_row = in_row + width, *dy_row = dy + row * width;
    int step = blockDim.x * N;
    float weight = weighted ? weights[row] : 1, dweight[1] = {0};
    dx.open(row);
    for (int first = threadIdx.x * N; valid && first < width; first += K * step) {
        mt_pack<T, N> ins[K], ups[K], dys[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (first + k * step >= width) break;
            ins[k] = mt_load<N>(in_row + first + k * step);
            if (gated) ups[k] = mt_load<N>(up_row + first + k * step);
            dys[k] = mt_load<N>(dy_row + first + k * step);
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (first + k * step >= width) break;
            mt_pack<float, N> in = mt_to_float(ins[k]), d = mt_to_float(dys[k]), up = {};
            if (gated) up = mt_to_float(ups[k]);
            for (int i = 0; i < N; i++) {
                float bounded = glu.gate(in.value[i]), u = gated ? glu.up(up.value[i]) : 1;
                float value = d.value[i] * F::value(bounded);
                dweight[0] += value * u;
                in.value[i] = weight * d.value[i] * u * F::slope(bounded) * glu.gate_slope(in.value[i]);
                up.value[i] = weight * value * glu.up_slope(up.value[i]);
            }
            dx.store(first + k * step, in);
            if (gated) dx.store(width + first + k * step, up);
        }
    }
    if (weighted) mt_row_sum(dweight, 0);
    if (weighted && valid && threadIdx.x == 0) dweights[row] = dweight[0];
    dx.finish();
}

/* Calls launch(f, type, begin, end, width) for packs of a flat array of n elements. */
template <class Launch>
static void flat_activation(const mt_activation_args *a, mt_dtype dtype, int64_t n, bool wide, Launch launch) {
    with_activation(a, [&](auto f, auto gated, auto) {
        if constexpr (!decltype(gated)::value)
            mt_by_type(dtype, true, [&](auto type, auto width) {
                mt_split<decltype(width)::value>(
                    n, wide, [&](int64_t begin, int64_t end, auto pack) { launch(f, type, begin, end, pack); });
            });
    });
}

extern "C" void mt_cuda_activation_forward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, F = a->F;
    cudaStream_t s = mt_cuda_stream(stream);
    const bool by_rows = a->weights || a->quantize.rows.data;
    if (T == 0) return;
    if (!by_rows && !mt_activation_rows[a->activation].gated) {
        bool wide = mt_wide(dtype, {a->y, a->x}, {});
        flat_activation(a, dtype, T * F, wide, [&](auto f, auto type, int64_t begin, int64_t end, auto pack) {
            using E = decltype(type);
            constexpr int N = decltype(pack)::value;
            unsigned blocks = mt_grid_size(end - begin, 256 * packs_per_thread * N);
            activation_forward<decltype(f), E, N><<<blocks, 256, 0, s>>>((E *)a->y, (const E *)a->x, begin, end);
            MT_CUDA_LAUNCHED();
        });
        return;
    }
    with_activation(a, [&](auto f, auto gate, auto glu) {
        using Glu = decltype(glu);
        mt_by_type(dtype, mt_wide(dtype, {a->y, a->x, a->quantize.rows.data}, {F}), [&](auto type, auto width) {
            using E = decltype(type);
            constexpr int N = decltype(width)::value;
            constexpr bool gated = decltype(gate)::value;
            mt_many_row_grid many = mt_many_rows(T, mt_divide_up(F, N), 2);
            mt_row_grid grid = mt_rows(mt_divide_up(F, N), packs_per_thread / 2);
            if (by_rows)
                with_rows<E, N>(&a->quantize, a->y, F, [&](auto y) {
                    using rows = decltype(y);
                    constexpr bool in_fp8 = !std::is_same_v<rows, plain_rows<E>>;
                    auto kernel = weighted_forward<decltype(f), Glu, gated, true, E, N, rows>;
                    if constexpr (in_fp8)
                        if (!a->weights) kernel = weighted_forward<decltype(f), Glu, gated, false, E, N, rows>;
                    kernel<<<many.blocks, many.block, 0, s>>>(y, (const E *)a->x, a->weights, T, (int)F,
                                                              many.blocks_per_row, glu);
                });
            else if constexpr (gated)
                mt_launch_early(gated_forward<decltype(f), Glu, E, N>, (unsigned)T * grid.blocks_per_row, grid.threads,
                                0, s, (E *)a->y, (const E *)a->x, (int)F, grid.blocks_per_row, glu);
            MT_CUDA_LAUNCHED();
        });
    });
}

extern "C" void mt_cuda_activation_backward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, F = a->F;
    cudaStream_t s = mt_cuda_stream(stream);
    const bool by_rows = a->weights || a->quantize.rows.data;
    if (T == 0) return;
    if (!by_rows && !mt_activation_rows[a->activation].gated) {
        bool wide = mt_wide(dtype, {a->dx, a->dy, a->x}, {});
        flat_activation(a, dtype, T * F, wide, [&](auto f, auto type, int64_t begin, int64_t end, auto pack) {
            using E = decltype(type);
            constexpr int N = decltype(pack)::value;
            unsigned blocks = mt_grid_size(end - begin, 256 * packs_per_thread / 2 * N);
            activation_backward<decltype(f), E, N>
                <<<blocks, 256, 0, s>>>((E *)a->dx, (const E *)a->dy, (const E *)a->x, begin, end);
            MT_CUDA_LAUNCHED();
        });
        return;
    }
    with_activation(a, [&](auto f, auto gate, auto glu) {
        using Glu = decltype(glu);
        mt_by_type(dtype, mt_wide(dtype, {a->dx, a->dy, a->x, a->quantize.rows.data}, {F}), [&](auto type, auto width) {
            using E = decltype(type);
            constexpr int N = decltype(width)::value;
            constexpr bool gated = decltype(gate)::value;
            dim3 block = mt_reduction_block(mt_divide_up(F, N), 3, 256, 512);
            mt_row_grid grid = mt_rows(mt_divide_up(F, N), packs_per_thread / 2);
            if (by_rows)
                with_rows<E, N>(&a->quantize, a->dx, (gated ? 2 : 1) * F, [&](auto dx) {
                    using rows = decltype(dx);
                    constexpr bool in_fp8 = !std::is_same_v<rows, plain_rows<E>>;
                    auto kernel = weighted_backward<decltype(f), Glu, gated, true, E, N, rows>;
                    if constexpr (in_fp8)
                        if (!a->weights) kernel = weighted_backward<decltype(f), Glu, gated, false, E, N, rows>;
                    kernel<<<mt_grid_size(T, block.y), block, 0, s>>>(dx, a->dweights, (const E *)a->dy,
                                                                      (const E *)a->x, a->weights, T, (int)F, glu);
                });
            else if constexpr (gated)
                gated_backward<decltype(f), Glu, E, N><<<(unsigned)T * grid.blocks_per_row, grid.threads, 0, s>>>(
                    (E *)a->dx, (const E *)a->dy, (const E *)a->x, (int)F, grid.blocks_per_row, glu);
            MT_CUDA_LAUNCHED();
        });
    });
}

/* ---- dropout and residual ---------------------------------------------------------------------------------------- */

/* out = residual + dropout(x). Reads x and residual, writes out: 6 bytes per element in bf16, 12 in fp32 (4 and 8
 * without residual). */
template <class T, int N>
__global__ void dropout_add(T *out, const T *x, const T *residual, const int64_t *token_index, int64_t rows, int C,
                            int blocks_per_row, int64_t first_channel, mt_masks masks) {
    constexpr int K = packs_per_thread / 2;
    int64_t row = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y, offset = row * C;
    if (row >= rows) return;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    uint64_t token = masks.threshold > 0 ? (uint64_t)token_index[row] : 0;
    mt_pack<T, N> xs[K], residuals[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= C) break;
        xs[k] = mt_load<N>(x + offset + first + k * step);
        residuals[k] = mt_load<N>(residual + offset + first + k * step, residual != NULL);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= C) break;
        mt_pack<float, N> sum = mt_add_dropped(mt_to_float(xs[k]), mt_to_float(residuals[k]), masks, token,
                                               first_channel + first + k * step);
        mt_store(out + offset + first + k * step, mt_from_float<T>(sum));
    }
}

extern "C" void mt_cuda_dropout_add_forward(const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C;
    if (T == 0) return;
    bool wide = mt_wide(dtype, {a->out, a->x, a->residual}, {C}) && a->first_channel % 4 == 0;
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_row_grid grid = mt_rows(mt_divide_up(C, N), packs_per_thread / 2);
        unsigned blocks = mt_grid_size(T, grid.rows) * grid.blocks_per_row;
        dropout_add<E, N><<<blocks, dim3(grid.threads, grid.rows), 0, mt_cuda_stream(stream)>>>(
            (E *)a->out, (const E *)a->x, (const E *)a->residual, a->token_index, T, (int)C, grid.blocks_per_row,
            a->first_channel, mt_dropout_masks(&a->dropout));
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_dropout_add_backward(const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cuda_dropout_add_forward(a, dtype, stream);
}

/* y = a + b. Reads both, writes y: 6 bytes per element in bf16, 12 in fp32. */
template <class T, int N> __global__ void add(T *y, const T *a, const T *b, int64_t begin, int64_t end) {
    constexpr int K = packs_per_thread / 2;
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    mt_pack<T, N> as[K], bs[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        as[k] = mt_load<N>(a + first + k * step);
        bs[k] = mt_load<N>(b + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        mt_pack<float, N> sum = mt_to_float(as[k]), more = mt_to_float(bs[k]);
        for (int i = 0; i < N; i++) sum.value[i] += more.value[i];
        mt_store(y + first + k * step, mt_from_float<T>(sum));
    }
}

extern "C" void mt_cuda_add(void *y, const void *a, const void *b, int64_t n, mt_dtype dtype, mt_stream *stream) {
    mt_by_type(dtype, true, [&](auto type, auto width) {
        using E = decltype(type);
        mt_split<decltype(width)::value>(n, mt_wide(dtype, {y, a, b}, {}), [&](int64_t begin, int64_t end, auto pack) {
            constexpr int N = decltype(pack)::value;
            unsigned blocks = mt_grid_size(end - begin, 256 * packs_per_thread / 2 * N);
            add<E, N><<<blocks, 256, 0, mt_cuda_stream(stream)>>>((E *)y, (const E *)a, (const E *)b, begin, end);
            MT_CUDA_LAUNCHED();
        });
    });
}

/* x *= factor. Reads and writes x: 4 bytes per element in bf16, 8 in fp32. */
template <class T, int N> __global__ void scale(T *x, float factor, int64_t begin, int64_t end) {
    constexpr int K = packs_per_thread;
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        mt_pack<float, N> in = mt_to_float(mt_load<N>(x + first + k * step));
        for (int i = 0; i < N; i++) in.value[i] *= factor;
        mt_store(x + first + k * step, mt_from_float<T>(in));
    }
}

extern "C" void mt_cuda_scale(void *x, float factor, int64_t n, mt_dtype dtype, mt_stream *stream) {
    mt_by_type(dtype, true, [&](auto type, auto width) {
        using E = decltype(type);
        mt_split<decltype(width)::value>(n, mt_wide(dtype, {x}, {}), [&](int64_t begin, int64_t end, auto pack) {
            constexpr int N = decltype(pack)::value;
            unsigned blocks = mt_grid_size(end - begin, 256 * packs_per_thread * N);
            scale<E, N><<<blocks, 256, 0, mt_cuda_stream(stream)>>>((E *)x, factor, begin, end);
            MT_CUDA_LAUNCHED();
        });
    });
}

/* ---- gather and scatter of rows ---------------------------------------------------------------------------------- */

/* Many wide rows are copied in an interleaved order: row i of each of `stripes` stripes, then row i + 1 of each. The
 * rows that a mixture of experts gathers are sorted by expert, then by token. Copies of one token therefore fall into
 * different stripes, and the interleaving copies them close in time, while the token is in the cache. */
static constexpr int64_t stripes = 128, striped_rows = 4096, striped_bytes = 1024;

/* As mt_store, with a streaming hint: the data will not be read soon. */
template <class T, int N> __device__ static inline void store_streaming(T *to, const mt_pack<T, N> &pack) {
    if constexpr (sizeof pack == 16) {
        uint4 word;
        memcpy(&word, &pack, sizeof word);
        __stcs((uint4 *)to, word);
    } else {
        mt_store(to, pack);
    }
}

/* to[to_rows[t]] = from[from_rows[t]]. NULL means row t itself; a negative row of `from` is zeros. Reads and writes
 * each element: 4 bytes in bf16, 8 in fp32. `stripe`: rows per stripe, or 0 for plain order. */
template <class T, int N>
__global__ void __launch_bounds__(256, mt_resident_blocks(256, 8))
    copy_rows(T *to, const T *from, const int32_t *to_rows, const int32_t *from_rows, int64_t num_rows, int64_t stripe,
              int width, int64_t to_stride, int64_t from_stride, int blocks_per_row) {
    constexpr int K = packs_per_thread;
    mt_begin_next();
    mt_wait_for_previous();
    int64_t row = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    if (stripe > 0) row = row % stripes * stripe + row / stripes;
    if (row >= num_rows) return;
    int64_t source = from_rows ? from_rows[row] : row;
    bool valid = source >= 0;
    to += (to_rows ? to_rows[row] : row) * to_stride;
    from += (valid ? source : 0) * from_stride;
    mt_pack<T, N> packs[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        if (first + k * step < width) packs[k] = mt_load<N>(from + first + k * step, valid);
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= width) break;
        if (stripe > 0)
            store_streaming(to + first + k * step, packs[k]);
        else
            mt_store(to + first + k * step, packs[k]);
    }
}

static void launch_copy_rows(const mt_row_args *a, const int32_t *to_rows, const int32_t *from_rows, mt_dtype dtype,
                             mt_stream *stream) {
    if (a->T == 0) return;
    int64_t T = a->T, width = a->width;
    int64_t to_stride = a->to_stride ? a->to_stride : width, from_stride = a->from_stride ? a->from_stride : width;
    bool striped = from_rows && T >= striped_rows && width * mt_dtype_size(dtype) >= striped_bytes;
    int64_t stripe = striped ? mt_divide_up(T, stripes) : 0;
    mt_by_type(dtype, mt_wide(dtype, {a->to, a->from}, {width, to_stride, from_stride}), [&](auto type, auto pack) {
        using E = decltype(type);
        constexpr int N = decltype(pack)::value;
        int64_t packs = mt_divide_up(width, N);
        mt_many_row_grid grid = mt_many_rows(striped ? stripe * stripes : T, packs, packs_per_thread);
        mt_launch_early(copy_rows<E, N>, grid.blocks, grid.block, 0, mt_cuda_stream(stream), (E *)a->to,
                        (const E *)a->from, to_rows, from_rows, T, stripe, (int)width, to_stride, from_stride,
                        grid.blocks_per_row);
    });
}

extern "C" void mt_cuda_scatter_rows(const mt_row_args *a, mt_dtype dtype, mt_stream *stream) {
    launch_copy_rows(a, a->index, NULL, dtype, stream);
}

extern "C" void mt_cuda_gather_rows(const mt_row_args *a, mt_dtype dtype, mt_stream *stream) {
    launch_copy_rows(a, NULL, a->index, dtype, stream);
}

/* ---- embedding --------------------------------------------------------------------------------------------------- */

/* out[t] (+)= w[ids[t] - first]; ids outside [first, first + count) contribute 0. Reads the row of w, writes out: 4
 * bytes per element in bf16, 8 in fp32; 6 and 12 when accumulating. */
template <class T, int N>
__global__ void embedding_forward(T *out, const int32_t *ids, const T *w, int C, int64_t first_id, int64_t count,
                                  bool accumulate, int blocks_per_row) {
    constexpr int K = packs_per_thread / 2;
    int64_t row = blockIdx.x / blocks_per_row, id = ids[row] - first_id;
    bool held = id >= 0 && id < count;
    int first = (blockIdx.x % blocks_per_row * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    out += row * C;
    w += held ? id * C : 0;
    if (accumulate && !held) return;
    mt_pack<T, N> packs[K], before[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= C) break;
        packs[k] = mt_load<N>(w + first + k * step, held);
        if (accumulate) before[k] = mt_load<N>(out + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= C) break;
        mt_pack<float, N> sum = mt_to_float(packs[k]), was = mt_to_float(before[k]);
        for (int i = 0; accumulate && i < N; i++) sum.value[i] += was.value[i];
        mt_store(out + first + k * step, mt_from_float<T>(sum));
    }
}

extern "C" void mt_cuda_embedding_forward(const mt_embedding_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C;
    if (T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->out, a->w}, {C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_row_grid grid = mt_rows(mt_divide_up(C, N), packs_per_thread / 2);
        embedding_forward<E, N><<<(unsigned)T * grid.blocks_per_row, grid.threads, 0, mt_cuda_stream(stream)>>>(
            (E *)a->out, a->ids, (const E *)a->w, (int)C, a->first, a->count, a->accumulate, grid.blocks_per_row);
        MT_CUDA_LAUNCHED();
    });
}

/* The tokens are sorted by key: the row of dw, or `count` if this rank does not hold the id. A pass of the sort takes
 * `bits` bits of the key from bit `shift` on. Without keys, as in the first pass, they are those of the ids, and the
 * tokens are in order. */
struct embedding_pass {
    mt_counting sort;
    const int32_t *ids;
    int64_t first;
    uint32_t count;
    const uint32_t *keys, *tokens;
    int shift, bits;
    __device__ uint32_t key(int64_t i) const {
        if (keys) return keys[i];
        int64_t row = ids[i] - first;
        return row >= 0 && row < count ? (uint32_t)row : count;
    }
    __device__ int bin(uint32_t key) const {
        return (int)(key >> shift & ((1u << bits) - 1));
    }
};

template <int items> __global__ void embedding_count(int32_t *counts, embedding_pass p) {
    int bins[items];
    mt_wait_for_previous();
    mt_begin_next();
    int64_t begin = mt_first_item(p.sort);
#pragma unroll
    for (int j = 0; j < items; j++) bins[j] = begin + 32 * j < p.sort.n ? p.bin(p.key(begin + 32 * j)) : -1;
    mt_count_bins(counts, bins, p.sort);
}

template <int items>
__global__ void embedding_place(uint32_t *keys, uint32_t *tokens, const int32_t *counts, embedding_pass p) {
    uint32_t key[items], token[items];
    int bins[items];
    int32_t rank[items];
    mt_wait_for_previous();
    mt_begin_next();
    int64_t begin = mt_first_item(p.sort);
#pragma unroll
    for (int j = 0; j < items; j++) {
        int64_t i = begin + 32 * j;
        bool valid = i < p.sort.n;
        key[j] = valid ? p.key(i) : 0, token[j] = valid && p.tokens ? p.tokens[i] : (uint32_t)i;
        bins[j] = valid ? p.bin(key[j]) : -1;
    }
    const int32_t *first = mt_rank_items(rank, bins, counts, p.sort);
#pragma unroll
    for (int j = 0; j < items; j++)
        if (bins[j] >= 0) keys[first[bins[j]] + rank[j]] = key[j], tokens[first[bins[j]] + rank[j]] = token[j];
}

/* The sorted keys and their tokens. */
struct embedding_order {
    const uint32_t *keys, *tokens;
};

/* Sorts from the lowest bits on, alternating between two pairs of arrays in `memory`; the counts follow them. */
static embedding_order sort_embedding(embedding_pass p, int passes, uint32_t *memory, cudaStream_t on) {
    int64_t array = mt_divide_up(p.sort.n, 64) * 64;
    int32_t *counts = (int32_t *)(memory + 4 * array);
    for (int i = 0; i < passes; i++, p.shift += p.bits) {
        uint32_t *keys = memory + i % 2 * 2 * array, *tokens = keys + array;
        mt_by_items(p.sort, [&](auto items) {
            mt_launch_early(embedding_count<decltype(items)::value>, (unsigned)p.sort.blocks, p.sort.threads,
                            p.sort.stride * 4, on, counts, p);
            mt_launch_ranks(embedding_place<decltype(items)::value>, p.sort, on, keys, tokens, counts, p);
        });
        p.keys = keys, p.tokens = tokens;
    }
    return {p.keys, p.tokens};
}

/* The sorted tokens are cut into pieces, one token per lane, so that several blocks share a frequent id. A block adds
 * the tokens of each key of its piece, in order. The result goes to the row of dw if the key lies in one piece only,
 * else to `partial`: row 2 p of piece p if the key began in an earlier piece, row 2 p + 1 if it begins in piece p. */
static constexpr uint32_t piece = 32;

/* The tokens of a piece, one per lane, and which of them are the first or last of their key in the piece (`starts`,
 * `stops`), the first of all tokens of their key (`begins`), and the first of a key that lies in this piece only
 * (`whole`): a bit per token. The held ones are the first n. */
struct embedding_piece {
    uint32_t key, token, n, starts, stops, begins, whole;
    __device__ embedding_piece(const embedding_order &order, uint32_t first, uint32_t num_tokens, uint32_t count) {
        uint32_t lane = threadIdx.x % 32, i = first + lane;
        bool valid = i < num_tokens;
        key = valid ? order.keys[i] : count, token = valid ? order.tokens[i] : 0;
        uint32_t left = valid && i > 0 ? order.keys[i - 1] : ~0u;
        uint32_t right = i + 1 < num_tokens ? order.keys[i + 1] : ~0u;
        uint32_t ends = __ballot_sync(0xffffffff, right != key);
        n = __popc(__ballot_sync(0xffffffff, key != count));
        begins = __ballot_sync(0xffffffff, left != key);
        starts = begins | 1, stops = ends | 1u << 31;
        uint32_t stop = lane + __ffs((int)(stops >> lane)) - 1;
        whole = __ballot_sync(0xffffffff, left != key && (ends >> stop & 1));
    }
};

/* Reads dout once, and reads and writes the rows of dw that occur: 2 bytes per element of dout in bf16 (4 in fp32) and
 * 8 per element of those rows. */
template <class T, int N>
__global__ void __launch_bounds__(256, 4)
    embedding_backward(float *dw, float *partial, const T *dout, embedding_order order, uint32_t num_tokens,
                       uint32_t count, int C, int blocks_per_row) {
    constexpr int in_flight = 4;
    mt_wait_for_previous();
    mt_begin_next();
    uint32_t p = (gridDim.x - 1 - blockIdx.x) / blocks_per_row; // rare ids, usually the greater ones, take longest
    int c = ((gridDim.x - 1 - blockIdx.x) % blocks_per_row * blockDim.x + threadIdx.x) * N;
    embedding_piece of(order, p * piece, num_tokens, count);
    mt_pack<float, N> sums = {};
    float *to = NULL;
    auto bit = [](uint32_t bits, uint32_t i) { return (bits >> i & 1) != 0; };
    auto row_of_dw = [&](uint32_t i) { return dw + (int64_t)__shfl_sync(0xffffffff, of.key, i) * C + c; };
    for (uint32_t first = 0; first < of.n; first += in_flight) {
        mt_pack<T, N> rows[in_flight];
        mt_pack<float, N> was[in_flight];
#pragma unroll
        for (uint32_t r = 0; r < in_flight; r++) {
            uint32_t i = first + r;
            bool valid = i < of.n && c < C;
            rows[r] = mt_load<N>(dout + (int64_t)__shfl_sync(0xffffffff, of.token, i) * C + c, valid);
            was[r] = mt_load<N>(row_of_dw(i), valid && bit(of.whole, i));
        }
#pragma unroll
        for (uint32_t r = 0; r < in_flight; r++) {
            uint32_t i = first + r;
            float *row = row_of_dw(i);
            if (i >= of.n || c >= C) continue;
            if (bit(of.starts, i)) {
                sums = was[r]; // 0 for a partial sum
                to = bit(of.whole, i) ? row : partial + (int64_t)(p * 2 + bit(of.begins, i)) * C + c;
            }
            mt_pack<float, N> more = mt_to_float(rows[r]);
            for (int k = 0; k < N; k++) sums.value[k] += more.value[k];
            if (bit(of.stops, i)) mt_store(to, sums);
        }
    }
}

/* A key may span several pieces: the blocks of its first piece add the partial sums of all its pieces, in order, with
 * several loads in flight. The keys at the beginnings of the following 32 pieces are read at once. */
template <int N>
__global__ void __launch_bounds__(256, 4)
    embedding_add_pieces(float *dw, const float *partial, embedding_order order, uint32_t num_tokens, uint32_t count,
                         int C, int blocks_per_row) {
    constexpr uint32_t in_flight = 16;
    mt_wait_for_previous();
    mt_begin_next();
    const uint32_t *keys = order.keys;
    uint32_t first = blockIdx.x / blocks_per_row, start = first * piece, next = start + piece, lane = threadIdx.x % 32;
    int c = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * N;
    uint32_t last = keys[next - 1], earlier = first > 0 ? keys[start - 1] : ~0u, num = 1;
    for (uint32_t equal = 32; equal == 32; num += equal) {
        uint32_t i = next + (num - 1 + lane) * piece;
        equal = __popc(__ballot_sync(0xffffffff, i < num_tokens && keys[i] == last));
    }
    if (num == 1 || last == count || earlier == last || c >= C) return;
    float *to = dw + (int64_t)last * C + c;
    mt_pack<float, N> sums = mt_load<N>(to);
    for (uint32_t i = 0; i < num; i += in_flight) {
        mt_pack<float, N> packs[in_flight];
#pragma unroll
        for (uint32_t r = 0; r < in_flight; r++)
            packs[r] = mt_load<N>(partial + (int64_t)((first + i + r) * 2 + (i + r == 0)) * C + c, i + r < num);
#pragma unroll
        for (uint32_t r = 0; r < in_flight; r++)
            for (int k = 0; k < N; k++) sums.value[k] += packs[r].value[k];
    }
    mt_store(to, sums);
}

extern "C" void mt_cuda_embedding_backward(const mt_embedding_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C, count = a->count;
    if (T == 0) return;
    int bits = 1, passes = 1;
    while (count >> bits) bits++;
    while (passes * 9 < bits) passes++; // 512 bins: with more, their number takes longer than another pass
    embedding_pass pass = {};
    pass.bits = (int)mt_divide_up(bits, passes);
    pass.sort = mt_counting_of(T, (int64_t)1 << pass.bits);
    pass.ids = a->ids, pass.first = a->first, pass.count = (uint32_t)count;
    int64_t array = mt_divide_up(T, 64) * 64, pieces = mt_divide_up(T, piece);
    int64_t partial_room = mt_divide_up(pieces * 2 * C * 4, 256) * 256;
    int64_t sort_room = 4 * array * 4 + mt_counting_bytes(pass.sort);
    char *workspace = (char *)mt_cuda_workspace(stream, partial_room + sort_room);
    float *partial = (float *)workspace;
    cudaStream_t on = mt_cuda_stream(stream);
    embedding_order order = sort_embedding(pass, passes, (uint32_t *)(workspace + partial_room), on);
    mt_by_type(dtype, mt_wide(dtype, {a->dw, a->dout}, {C}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value > 4 ? 4 : decltype(width)::value; // 16 bytes of dw
        mt_row_grid grid = mt_rows(mt_divide_up(C, N), 1);
        mt_launch_early(embedding_backward<E, N>, (unsigned)pieces * grid.blocks_per_row, grid.threads, 0, on, a->dw,
                        partial, (const E *)a->dout, order, (uint32_t)T, (uint32_t)count, (int)C,
                        (int)grid.blocks_per_row);
        if (pieces == 1) return;
        constexpr int K = N > 2 ? 2 : N; // more threads for the many pieces of a frequent id
        grid = mt_rows(mt_divide_up(C, K), 1);
        mt_launch_early(embedding_add_pieces<K>, (unsigned)(pieces - 1) * grid.blocks_per_row, grid.threads, 0, on,
                        a->dw, (const float *)partial, order, (uint32_t)T, (uint32_t)count, (int)C,
                        (int)grid.blocks_per_row);
    });
}

extern "C" void mt_cuda_scatter_add_rows(const mt_row_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_embedding_args sums = {};
    sums.T = a->T, sums.C = a->width, sums.count = a->count, sums.ids = a->index, sums.dout = a->from;
    sums.dw = (float *)a->to;
    mt_cuda_embedding_backward(&sums, dtype, stream);
}

/* ---- conversions ------------------------------------------------------------------------------------------------- */

/* Reads and writes each element: 6 bytes between fp32 and bf16. */
template <class To, class From, int N> __global__ void convert(To *to, const From *from, int64_t begin, int64_t end) {
    constexpr int K = packs_per_thread / 2;
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    mt_pack<From, N> packs[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        if (first + k * step < end) packs[k] = mt_load<N>(from + first + k * step);
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        mt_store(to + first + k * step, mt_from_float<To>(mt_to_float(packs[k])));
    }
}

template <class To, class From>
static void launch_convert(void *to, const void *from, int64_t n, bool wide, cudaStream_t stream) {
    mt_split<8>(n, wide, [&](int64_t begin, int64_t end, auto width) {
        constexpr int N = decltype(width)::value;
        unsigned blocks = mt_grid_size(end - begin, 256 * packs_per_thread / 2 * N);
        convert<To, From, N><<<blocks, 256, 0, stream>>>((To *)to, (const From *)from, begin, end);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_convert(void *to, mt_dtype to_dtype, const void *from, mt_dtype from_dtype, int64_t n,
                                mt_stream *stream) {
    bool wide = mt_wide(MT_F32, {to, from}, {});
    if (to_dtype == from_dtype)
        mt_cuda_memory_copy(to, from, n * mt_dtype_size(to_dtype), stream);
    else if (to_dtype == MT_F32)
        mt_by_type(from_dtype, [&](auto type) {
            launch_convert<float, decltype(type)>(to, from, n, wide, mt_cuda_stream(stream));
        });
    else
        mt_by_type(to_dtype, [&](auto type) {
            launch_convert<decltype(type), float>(to, from, n, wide, mt_cuda_stream(stream));
        });
}
