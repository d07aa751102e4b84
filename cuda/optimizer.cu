/* optimizer.cu: accumulation and norm of gradients, AdamW over any range of a bucket, initial parameters. */
#include "vector.cuh"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

/* ---- gradient norm ----------------------------------------------------------------------------------------------- */

static constexpr int norm_blocks_per_sm = 4, norm_threads = 256;

/* Sum over the 256 threads of a block; only thread 0 receives it. */
__device__ static double block_sum(double sum) {
    __shared__ double of_warp[norm_threads / 32];
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return 0;
    for (int warp = 1; warp < norm_threads / 32; warp++) sum += of_warp[warp];
    return sum;
}

/* partial[block] = the sum of squares of every gridDim.x-th chunk. A pack is summed in fp32, packs in fp64. The grid
 * has as many blocks as can be resident at once, so that no block starts late. Reads x only. */
template <class T, int N>
__global__ void __launch_bounds__(norm_threads, norm_blocks_per_sm)
    squared_norm(double *partial, const T *x, int64_t begin, int64_t end) {
    constexpr int K = 8;
    int64_t step = blockDim.x * N, chunk = K * step;
    double sum = 0;
    for (int64_t i = begin + blockIdx.x * chunk + threadIdx.x * N; i < end; i += gridDim.x * chunk) {
        mt_pack<T, N> packs[K];
#pragma unroll
        for (int k = 0; k < K; k++) packs[k] = mt_load<N>(x + i + k * step, i + k * step < end);
#pragma unroll
        for (int k = 0; k < K; k++) {
            float squares = 0;
            for (int j = 0; j < N; j++) squares += mt_element(packs[k], j) * mt_element(packs[k], j);
            sum += squares;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(norm_threads) add_squared_norms(double *sum, const double *partial, int count) {
    double total = 0;
    for (int i = threadIdx.x; i < count; i += norm_threads) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) sum[0] += total;
}

/* Calls body(T()) with T the type of `dtype`, which is not fp16. */
template <class Body> static void by_type(mt_dtype dtype, Body body) {
    if (dtype == MT_F32)
        body(float());
    else
        body(__nv_bfloat16());
}

extern "C" void mt_cuda_squared_norm(double *sum, const void *x, int64_t n, mt_dtype dtype, mt_stream *stream) {
    mt_by_type(dtype, [&](auto type) {
        using T = decltype(type);
        mt_split<16 / sizeof(T)>(n, mt_wide(dtype, {x}, {}), [&](int64_t begin, int64_t end, auto width) {
            constexpr int N = decltype(width)::value;
            int64_t blocks = mt_divide_up(end - begin, norm_threads * N);
            int64_t resident = norm_blocks_per_sm * mt_cuda_device()->multiProcessorCount;
            if (blocks > resident) blocks = resident;
            double *partial = (double *)mt_cuda_workspace(stream, blocks * (int64_t)sizeof *partial);
            squared_norm<T, N>
                <<<(unsigned)blocks, norm_threads, 0, mt_cuda_stream(stream)>>>(partial, (const T *)x, begin, end);
            MT_CUDA_LAUNCHED();
            add_squared_norms<<<1, norm_threads, 0, mt_cuda_stream(stream)>>>(sum, partial, (int)blocks);
            MT_CUDA_LAUNCHED();
        });
    });
}

/* sum[i] += x[i]. Reads both, writes the sum: 12 bytes per element in fp32, 8 in bf16. */
template <class T, int N>
__global__ void __launch_bounds__(256) accumulate(T *sum, const float *x, int64_t begin, int64_t end) {
    constexpr int K = 4;
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    mt_pack<T, N> sums[K];
    mt_pack<float, N> xs[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        sums[k] = mt_load<N>(sum + first + k * step);
        xs[k] = mt_load<N>(x + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        for (int i = 0; i < N; i++) xs[k].value[i] += mt_element(sums[k], i);
        mt_store(sum + first + k * step, mt_from_float<T>(xs[k]));
    }
}

extern "C" void mt_cuda_accumulate(void *sum, const float *x, int64_t n, mt_dtype dtype, mt_stream *stream) {
    mt_by_type(dtype, [&](auto type) {
        using T = decltype(type);
        mt_split<4>(n, mt_wide(MT_F32, {sum, x}, {}), [&](int64_t begin, int64_t end, auto width) {
            constexpr int N = decltype(width)::value;
            accumulate<T, N>
                <<<mt_grid_size(end - begin, 256 * 4 * N), 256, 0, mt_cuda_stream(stream)>>>((T *)sum, x, begin, end);
            MT_CUDA_LAUNCHED();
        });
    });
}

__global__ void gradient_scale(float *scale, float *norm, const double *sum_of_squares, const double *replicas,
                               const double *denominator, double loss_scale, float clip) {
    double tokens = (denominator[0] > 0 ? denominator[0] : 1) * loss_scale; // all tokens masked: no gradient
    double size = sqrt(sum_of_squares[0] + 0 * replicas[0]) / tokens, factor = clip > 0 ? clip / (size + 1e-6) : 1;
    norm[0] = (float)size;
    scale[0] = (float)((factor < 1 ? factor : 1) / tokens);
}

extern "C" void mt_cuda_gradient_scale(float *scale, float *norm, const double *sum_of_squares, const double *replicas,
                                       const double *denominator, double loss_scale, float clip, mt_stream *stream) {
    gradient_scale<<<1, 1, 0, mt_cuda_stream(stream)>>>(scale, norm, sum_of_squares, replicas, denominator, loss_scale,
                                                        clip);
    MT_CUDA_LAUNCHED();
}

__global__ void step_guard(double *guard, float *scale, const double *loss_sum, const double *tokens, const float *norm,
                           mt_guard_rules rules) {
    double loss = loss_sum[0] / ((tokens[0] > 0 ? tokens[0] : 1) * (double)rules.copies);
    double average = guard[MT_GUARD_AVERAGE], steps = guard[MT_GUARD_STEPS], window = (double)rules.window;
    mt_guard_check check = MT_STEP_PASSED;
    if (tokens[0] == 0)
        check = MT_NO_TOKENS;
    else if (rules.finite && !isfinite(loss))
        check = MT_LOSS_NOT_FINITE;
    else if (rules.finite && !isfinite(norm[0]))
        check = MT_NORM_NOT_FINITE;
    else if (rules.spike_factor > 0 && steps >= window && loss > rules.spike_factor * average)
        check = MT_LOSS_SPIKES;
    guard[MT_GUARD_CHECK] = check;
    if (check != MT_STEP_PASSED) {
        scale[0] = -1;
        return;
    }
    guard[MT_GUARD_UPDATES]++;
    guard[MT_GUARD_CORRECTIONS] = 1 - pow(rules.beta1, guard[MT_GUARD_UPDATES]);
    guard[MT_GUARD_CORRECTIONS + 1] = 1 - pow(rules.beta2, guard[MT_GUARD_UPDATES]);
    if (isfinite(loss)) {
        guard[MT_GUARD_AVERAGE] = average + (loss - average) / (steps + 1 < window ? steps + 1 : window);
        guard[MT_GUARD_STEPS] = steps + 1;
    }
}

extern "C" void mt_cuda_step_guard(double *guard, float *scale, const double *loss_sum, const double *tokens,
                                   const float *norm, const mt_guard_rules *rules, mt_stream *stream) {
    step_guard<<<1, 1, 0, mt_cuda_stream(stream)>>>(guard, scale, loss_sum, tokens, norm, *rules);
    MT_CUDA_LAUNCHED();
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

/* The arithmetic of a step on one element: weight, states. Every sum is an explicit fma, as in megatron.c, so a step on
 * the host has the same bits. */
struct adamw_rule {
    static constexpr bool two_states = true;
    float beta1, beta2, eps, rate, decay, root;
    __device__ explicit adamw_rule(const mt_update &u) {
        beta1 = u.beta1, beta2 = u.beta2, eps = u.eps, rate = u.lr / u.bias_correction1;
        decay = __fmaf_rn(-u.lr, u.weight_decay, 1), root = 1 / sqrtf(u.bias_correction2);
    }
    __device__ void operator()(float g, float &w, float &m, float &v) const {
        m = __fmaf_rn(beta1, m, (1 - beta1) * g);
        v = __fmaf_rn(beta2, v, (1 - beta2) * g * g);
        w = __fmaf_rn(w, decay, -(rate * m / __fmaf_rn(sqrtf(v), root, eps)));
    }
};

struct sgd_rule {
    static constexpr bool two_states = false;
    float momentum, weight_decay, lr;
    __device__ explicit sgd_rule(const mt_update &u) {
        momentum = u.beta1, weight_decay = u.weight_decay, lr = u.lr;
    }
    __device__ void operator()(float g, float &w, float &m, float &) const {
        m = __fmaf_rn(momentum, m, __fmaf_rn(weight_decay, w, g));
        w = __fmaf_rn(-lr, m, w);
    }
};

struct lion_rule {
    static constexpr bool two_states = false;
    float beta1, beta2, lr, decay;
    __device__ explicit lion_rule(const mt_update &u) {
        beta1 = u.beta1, beta2 = u.beta2, lr = u.lr, decay = __fmaf_rn(-u.lr, u.weight_decay, 1);
    }
    __device__ void operator()(float g, float &w, float &m, float &) const {
        float c = __fmaf_rn(beta1, m, (1 - beta1) * g), sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c; // 0 and NaN stay
        w = __fmaf_rn(w, decay, -(lr * sign));
        m = __fmaf_rn(beta2, m, (1 - beta2) * g);
    }
};

/* With the bias corrections that the device has; NULL: as they are. */
__device__ static inline mt_update with_corrections(mt_update update, const double *corrections) {
    if (corrections) update.bias_correction1 = (float)corrections[0], update.bias_correction2 = (float)corrections[1];
    return update;
}

/* The copy of the weights in bf16 or fp16; to NULL: parameters are fp32. */
struct half_copy {
    void *to;
    bool is_fp16;
};

static half_copy copy_of(const mt_update_args *a) {
    return {a->dtype == MT_F32 ? NULL : a->param, a->dtype == MT_F16};
}

template <int N>
__device__ static inline void store_copy(half_copy copy, int64_t at, const mt_pack<float, N> &weights) {
    if (!copy.to) return;
    if (copy.is_fp16)
        mt_store((__half *)copy.to + at, mt_from_float<__half>(weights));
    else
        mt_store((__nv_bfloat16 *)copy.to + at, mt_from_float<__nv_bfloat16>(weights));
}

/* Reads grad, m, v and the fp32 weights; writes m, v, the weights and their copy: with two states 30 bytes per element
 * for bf16 parameters with fp32 gradients and moments, 28 for fp32 parameters. */
template <class Rule, class G, class M, class V, int N>
__global__ void __launch_bounds__(256)
    update_step(float *weights, half_copy copy, M *m, V *v, const G *grad, const float *scale,
                const double *corrections, int64_t begin, int64_t end, mt_update update) {
    constexpr int K = 2;
    int64_t first = begin + ((int64_t)blockIdx.x * K * blockDim.x + threadIdx.x) * N, step = blockDim.x * N;
    mt_pack<G, N> grads[K];
    mt_pack<M, N> ms[K];
    mt_pack<V, N> vs[K];
    mt_pack<float, N> ws[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        grads[k] = mt_load<N>(grad + first + k * step);
        ms[k] = mt_load<N>(m + first + k * step);
        if (Rule::two_states) vs[k] = mt_load<N>(v + first + k * step);
        ws[k] = mt_load<N>(weights + first + k * step);
    }
    float grad_scale = scale[0];
    if (grad_scale < 0) return; // the step is skipped; tested after all loads have been issued
    const Rule rule(with_corrections(update, corrections));
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + k * step >= end) break;
        mt_pack<float, N> gs = mt_to_float(grads[k]), new_m = mt_to_float(ms[k]), new_v = {};
        if (Rule::two_states) new_v = mt_to_float(vs[k]);
        for (int i = 0; i < N; i++) rule(gs.value[i] * grad_scale, ws[k].value[i], new_m.value[i], new_v.value[i]);
        mt_store(m + first + k * step, mt_from_float<M>(new_m));
        if (Rule::two_states) mt_store(v + first + k * step, mt_from_float<V>(new_v));
        mt_store(weights + first + k * step, ws[k]);
        store_copy(copy, first + k * step, ws[k]);
    }
}

template <class Rule, class G, class M, class V>
static void launch_update(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    float *weights = (float *)(a->dtype == MT_F32 ? a->param : a->master);
    half_copy copy = copy_of(a);
    bool wide = mt_wide(MT_F32, {weights, a->m, a->v, a->grad}, {}) && (uintptr_t)copy.to % 8 == 0;
    mt_split<4>(a->n, wide, [&](int64_t begin, int64_t end, auto width) {
        constexpr int N = decltype(width)::value;
        update_step<Rule, G, M, V, N><<<mt_grid_size(end - begin, 256 * 2 * N), 256, 0, mt_cuda_stream(stream)>>>(
            weights, copy, (M *)a->m, (V *)a->v, (const G *)a->grad, a->scale, a->corrections, begin, end, *update);
        MT_CUDA_LAUNCHED();
    });
}

/* ---- states with scales, as mt_state_scale, mt_state_load and mt_state_store of megatron.c */

__device__ static float state_scale(float amax, mt_dtype dtype) {
    float scale = amax / (dtype == MT_F16_SCALED ? 32752.0f : 448.0f);
    if (!isfinite(scale)) return __uint_as_float(0x7fc00000);
    return __uint_as_float((__float_as_uint(scale) + 0x7ff) & ~0x7ffu);
}

__device__ static bool has_scale(mt_dtype dtype) {
    return dtype == MT_F16_SCALED || dtype == MT_F8_E4M3;
}

__device__ static float load_state(const void *x, int64_t i, mt_dtype dtype, float scale) {
    if (dtype == MT_F32) return ((const float *)x)[i];
    if (dtype == MT_BF16) return __bfloat162float(((const __nv_bfloat16 *)x)[i]);
    if (dtype == MT_F16) return __half2float(((const __half *)x)[i]);
    if (dtype == MT_F16_SCALED) return __half2float(((const __half *)x)[i]) * scale;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(((const uint8_t *)x)[i], __NV_E4M3))) * scale;
}

__device__ static void store_state(void *x, int64_t i, mt_dtype dtype, float scale, float value) {
    float code = scale == 0 ? 0 : value / scale;
    if (dtype == MT_F32) ((float *)x)[i] = value;
    if (dtype == MT_BF16) ((__nv_bfloat16 *)x)[i] = __float2bfloat16_rn(value);
    if (dtype == MT_F16) ((__half *)x)[i] = __float2half_rn(value);
    if (dtype == MT_F16_SCALED) ((__half *)x)[i] = __float2half_rn(code);
    if (dtype == MT_F8_E4M3) ((uint8_t *)x)[i] = __nv_cvt_float_to_fp8(code, __NV_SATFINITE, __NV_E4M3);
}

/* One step on one parameter. The types are those of a run, so their branches do not diverge; neighbouring threads have
 * neighbouring elements. STORES: writes the states; else only their largest absolute values. */
template <bool STORES> __global__ void __launch_bounds__(256) adamw_scaled(mt_update_args a, mt_update update) {
    const mt_dtype dtypes[3] = {a.master ? a.master_dtype : a.dtype, a.m_dtype, a.v_dtype};
    void *states[3] = {a.master ? a.master : a.param, a.m, a.v};
    float grad_scale = a.scale[0], scales[3], new_scales[3], largest[3] = {};
    const adamw_rule rule(with_corrections(update, a.corrections));
    bool changes = grad_scale >= 0;
    for (int k = 0; k < 3; k++) {
        scales[k] = state_scale(a.amax[k], dtypes[k]), new_scales[k] = state_scale(a.new_amax[k], dtypes[k]);
        if (!changes) largest[k] = a.amax[k];
    }
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; changes && i < a.n; i += (int64_t)gridDim.x * 256) {
        float g = load_state(a.grad, i, a.grad_dtype, 1) * grad_scale, x[3];
        for (int k = 0; k < 3; k++) x[k] = load_state(states[k], i, dtypes[k], scales[k]);
        rule(g, x[0], x[1], x[2]);
        for (int k = 0; k < 3; k++) {
            if (STORES) store_state(states[k], i, dtypes[k], new_scales[k], x[k]);
            if (!(fabsf(x[k]) <= largest[k])) largest[k] = fabsf(x[k]); // NaN too
        }
        if (STORES && a.master) store_state(a.param, i, a.dtype, 1, x[0]);
    }
    for (int k = 0; k < 3 && !STORES; k++) { // positive floats, and then NaN, are ordered as their bits
        unsigned bits = mt_warp_max(0xffffffff, __float_as_uint(largest[k]) & 0x7fffffff);
        if (threadIdx.x % 32 == 0 && has_scale(dtypes[k])) atomicMax((unsigned *)a.new_amax + k, bits);
    }
}

template <bool STORES>
static void launch_adamw_scaled(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    int64_t blocks = mt_divide_up(a->n, 4 * 256), resident = 8 * mt_cuda_device()->multiProcessorCount;
    if (a->n == 0) return;
    adamw_scaled<STORES>
        <<<(unsigned)(blocks < resident ? blocks : resident), 256, 0, mt_cuda_stream(stream)>>>(*a, *update);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_adamw_amax(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    launch_adamw_scaled<false>(a, update, stream);
}

extern "C" void mt_cuda_adamw_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    if (a->amax) {
        launch_adamw_scaled<true>(a, update, stream);
        return;
    }
    mt_by_type(a->grad_dtype, [&](auto grad) {
        by_type(a->m_dtype, [&](auto m) {
            by_type(a->v_dtype, [&](auto v) {
                launch_update<adamw_rule, decltype(grad), decltype(m), decltype(v)>(a, update, stream);
            });
        });
    });
}

/* The moment of these is fp32. */
extern "C" void mt_cuda_sgd_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    by_type(a->grad_dtype, [&](auto g) { launch_update<sgd_rule, decltype(g), float, float>(a, update, stream); });
}

extern "C" void mt_cuda_lion_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    by_type(a->grad_dtype, [&](auto g) { launch_update<lion_rule, decltype(g), float, float>(a, update, stream); });
}

/* ---- steps on matrices ------------------------------------------------------------------------------------------ */

/* The values of mt_muon_value of megatron.c. */
__device__ static inline float muon_value(const mt_update &u, bool nesterov, float m, float g) {
    return nesterov ? __fmaf_rn(u.beta1, m, (1 - u.beta1) * g) : m;
}

/* partial[matrix, block] = the sum of squares of every gridDim.x-th chunk of a matrix. Reads the gradient, reads and
 * writes the momentum. */
template <class G, int N>
__global__ void __launch_bounds__(norm_threads)
    muon_momentum(double *partial, float *m, const G *grad, const float *scale, int64_t n, int64_t stride, mt_update u,
                  bool nesterov) {
    float grad_scale = scale[0];
    double sum = 0;
    if (grad_scale < 0) return;
    m += blockIdx.y * stride, grad += blockIdx.y * stride;
    for (int64_t i = ((int64_t)blockIdx.x * norm_threads + threadIdx.x) * N; i < n;
         i += (int64_t)gridDim.x * norm_threads * N) {
        mt_pack<float, N> ms = mt_load<N>(m + i), gs = mt_to_float(mt_load<N>(grad + i));
        float squares = 0;
        for (int k = 0; k < N; k++) {
            float g = gs.value[k] * grad_scale;
            ms.value[k] = __fmaf_rn(u.beta1, ms.value[k], (1 - u.beta1) * g);
            float value = muon_value(u, nesterov, ms.value[k], g);
            squares += value * value;
        }
        mt_store(m + i, ms);
        sum += squares;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(norm_threads)
    add_matrix_norms(double *sums, const double *partial, int count, const float *scale) {
    double total = 0;
    if (scale[0] < 0) return;
    for (int i = threadIdx.x; i < count; i += norm_threads) total += partial[(int64_t)blockIdx.x * count + i];
    total = block_sum(total);
    if (threadIdx.x == 0) sums[blockIdx.x] += total;
}

/* Calls body(width) with the vectors' width: 4 if every row begins at a multiple of 4 elements. */
template <class Body> static void by_width(const mt_update_args *a, bool values, Body body) {
    const mt_matrices *x = a->matrices;
    uintptr_t all = (uintptr_t)a->m | (uintptr_t)(a->master ? a->master : a->param);
    if (a->grad_dtype == MT_F32) all |= (uintptr_t)a->grad;
    int64_t strides = x->cols | x->stride * (x->count > 1);
    if (values) strides |= x->row_stride | x->x_stride * (x->count > 1);
    bool halves = (a->grad_dtype == MT_BF16 && (uintptr_t)a->grad % 8) || (a->master && (uintptr_t)a->param % 8) ||
                  (values && (uintptr_t)x->x % (4 * (size_t)mt_dtype_size(x->dtype)));
    if (all % 16 == 0 && strides % 4 == 0 && !halves)
        body(std::integral_constant<int, 4>());
    else
        body(std::integral_constant<int, 1>());
}

extern "C" void mt_cuda_muon_momentum(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    const mt_matrices *x = a->matrices;
    int64_t n = x->rows * x->cols, resident = 8 * mt_cuda_device()->multiProcessorCount;
    by_width(a, false, [&](auto width) {
        by_type(a->grad_dtype, [&](auto grad) {
            using G = decltype(grad);
            constexpr int N = decltype(width)::value;
            enum { MATRICES = 4096 }; // of one launch
            for (int64_t first = 0; first < x->count; first += MATRICES) {
                int64_t count = x->count - first < MATRICES ? x->count - first : MATRICES, blocks = resident / count;
                if (blocks > mt_divide_up(n, norm_threads * N)) blocks = mt_divide_up(n, norm_threads * N);
                if (blocks < 1) blocks = 1;
                double *partial = (double *)mt_cuda_workspace(stream, count * blocks * (int64_t)sizeof *partial);
                dim3 grid((unsigned)blocks, (unsigned)count);
                muon_momentum<G, N><<<grid, norm_threads, 0, mt_cuda_stream(stream)>>>(
                    partial, (float *)a->m + first * x->stride, (const G *)a->grad + first * x->stride, a->scale, n,
                    x->stride, *update, x->nesterov);
                MT_CUDA_LAUNCHED();
                if (!x->counted) continue;
                add_matrix_norms<<<(unsigned)count, norm_threads, 0, mt_cuda_stream(stream)>>>(x->sums + first, partial,
                                                                                               (int)blocks, a->scale);
                MT_CUDA_LAUNCHED();
            }
        });
    });
}

/* Positions of element i of the matrices of a step: in the parameters, and among the values. */
__device__ static inline int64_t muon_positions(const mt_matrices &x, uint32_t i, int64_t *value) {
    uint32_t row = i / (uint32_t)x.cols, col = i - row * (uint32_t)x.cols;
    *value = blockIdx.y * x.x_stride + row * x.row_stride + col;
    return blockIdx.y * x.stride + i;
}

/* Reads the momentum, with Nesterov's rule the gradient too; writes the values. */
template <class G, class X, int N>
__global__ void __launch_bounds__(256)
    muon_normalize(const float *m, const G *grad, const float *scale, mt_matrices x, mt_update u) {
    uint32_t i = (blockIdx.x * 256 + threadIdx.x) * N;
    if (i >= x.rows * x.cols) return;
    int64_t to, from = muon_positions(x, i, &to);
    float norm = (float)sqrt(x.sums[blockIdx.y]), divisor = norm < 1e-7f ? 1e-7f : norm;
    mt_pack<float, N> ms = mt_load<N>(m + from), gs = {};
    if (x.nesterov) gs = mt_to_float(mt_load<N>(grad + from));
    for (int k = 0; k < N; k++) ms.value[k] = muon_value(u, x.nesterov, ms.value[k], gs.value[k] * scale[0]) / divisor;
    mt_store((X *)x.x + to, mt_from_float<X>(ms));
}

/* Reads the values, reads and writes the fp32 weights, and writes their copy. */
template <class X, int N>
__global__ void __launch_bounds__(256)
    muon_step(float *weights, half_copy copy, const float *scale, mt_matrices x, mt_update u) {
    uint32_t i = (blockIdx.x * 256 + threadIdx.x) * N;
    if (i >= x.rows * x.cols || scale[0] < 0) return;
    int64_t from, to = muon_positions(x, i, &from);
    float decay = __fmaf_rn(-u.lr, u.weight_decay, 1), rate = u.lr * x.factor;
    mt_pack<float, N> xs = mt_to_float(mt_load<N>((const X *)x.x + from)), ws = mt_load<N>(weights + to);
    for (int k = 0; k < N; k++) ws.value[k] = __fmaf_rn(ws.value[k], decay, -(rate * xs.value[k]));
    mt_store(weights + to, ws);
    store_copy(copy, to, ws);
}

/* Calls body(grid, width). */
template <class Body> static void launch_matrices(const mt_update_args *a, Body body) {
    const mt_matrices *x = a->matrices;
    MT_CHECK(x->rows * x->cols < INT64_C(1) << 31);
    by_width(a, true, [&](auto width) {
        constexpr int N = decltype(width)::value;
        MT_CHECK(x->count < 65536);
        body(dim3(mt_grid_size(x->rows * x->cols, 256 * N), (unsigned)x->count), width);
        MT_CUDA_LAUNCHED();
    });
}

extern "C" void mt_cuda_muon_normalize(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    launch_matrices(a, [&](dim3 grid, auto width) {
        by_type(a->grad_dtype, [&](auto grad) {
            by_type(a->matrices->dtype, [&](auto value) {
                using G = decltype(grad);
                muon_normalize<G, decltype(value), decltype(width)::value><<<grid, 256, 0, mt_cuda_stream(stream)>>>(
                    (const float *)a->m, (const G *)a->grad, a->scale, *a->matrices, *update);
            });
        });
    });
}

extern "C" void mt_cuda_muon_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    float *weights = (float *)(a->master ? a->master : a->param);
    half_copy copy = copy_of(a);
    launch_matrices(a, [&](dim3 grid, auto width) {
        by_type(a->matrices->dtype, [&](auto value) {
            muon_step<decltype(value), decltype(width)::value>
                <<<grid, 256, 0, mt_cuda_stream(stream)>>>(weights, copy, a->scale, *a->matrices, *update);
        });
    });
}

/* ---- initial parameters ------------------------------------------------------------------------------------------ */

/* A thread draws the four numbers of one counter; the range may contain only some of them. Writes 2 bytes per element
 * in bf16, 4 in fp32. Runs once, so the stores are not vectorised. */
template <class T>
__global__ void random_normal(T *param, int64_t n, uint64_t key, int64_t first, float mean, float std) {
    int64_t counter = first / 4 + (int64_t)blockIdx.x * blockDim.x + threadIdx.x, start = counter * 4 - first;
    if (start >= n) return;
    uint4 words = mt_cuda_philox(key, (uint64_t)counter, 0);
    float2 low = mt_cuda_box_muller(words.x, words.y), high = mt_cuda_box_muller(words.z, words.w);
    float normal[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (start + i >= 0 && start + i < n) param[start + i] = mt_from_float<T>(mean + std * normal[i]);
}

/* For host memory that is not pinned, as of an optimizer on the host: parts are drawn on the device and copied. */
static void draw_and_copy(void *param, int64_t n, uint64_t key, int64_t first, float mean, float std, mt_dtype dtype,
                          mt_stream *stream) {
    const int64_t size = mt_dtype_size(dtype), most = n < 1 << 22 ? n : 1 << 22;
    void *part = mt_cuda_memory_alloc_ordered(most * size, stream);
    for (int64_t at = 0; at < n; at += most) {
        int64_t count = n - at < most ? n - at : most;
        mt_cuda_random_normal(part, count, key, first + at, mean, std, dtype, stream);
        mt_cuda_memory_copy((char *)param + at * size, part, count * size, stream);
    }
    mt_cuda_memory_free_ordered(part, stream);
}

extern "C" void mt_cuda_random_normal(void *param, int64_t n, uint64_t key, int64_t first, float mean, float std,
                                      mt_dtype dtype, mt_stream *stream) {
    if (n == 0) return;
    if (mt_cuda_is_pageable(param)) {
        draw_and_copy(param, n, key, first, mean, std, dtype, stream);
        return;
    }
    mt_by_type(dtype, false, [&](auto type, auto) {
        using E = decltype(type);
        int64_t counters = (first + n - 1) / 4 - first / 4 + 1;
        random_normal<<<mt_grid_size(counters, 256), 256, 0, mt_cuda_stream(stream)>>>((E *)param, n, key, first, mean,
                                                                                       std);
        MT_CUDA_LAUNCHED();
    });
}
