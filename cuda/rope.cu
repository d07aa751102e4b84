/* rope.cu: rotary positions, alone or together with the norm of q and k before it: one pass over the heads of a token;
 * and the heads of latent attention.
 *
 * A lane has one unit of a head, which is two packs that turn together: half a rotation apart, or next to one another
 * when interleaved. Past the rotary channels a unit is two neighbouring packs, which are only normalised or copied. The
 * lanes of a head are neighbours in a warp, so that the norm's sum needs no barrier, and a lane has the same unit of
 * several heads, for which it asks at once and which share its angles.
 */
#include "vector.cuh"

/* Two heads, whose packs and angles leave registers for 32 warps a multiprocessor; with four there are 24. */
static constexpr int heads_per_lane = 2, block_threads = 256;

/* [T, heads, D]: H heads of q, then heads - H of k. `lanes` is the power of two that share a head and `groups` how many
 * such groups share a token, each with every groups-th head. */
template <class T> struct heads_task {
    T *y;
    const T *x;
    float *q_rstd, *k_rstd;
    const T *q_w, *k_w;
    const float *cos, *sin;
    const int32_t *positions;
    float direction, eps; // direction -1 turns back
    unsigned tokens, H, heads, groups, lanes;
    int D, R;
    int64_t y_stride, x_stride;
};

/* A lane's unit: where its packs begin in a head, and whether they are there. */
struct unit_place {
    int low, high, angle; // angle: the first of its cos and sin, -1 if it does not turn
    bool has_low, has_high;
};

template <int N, bool interleaved> __device__ static inline unit_place place_unit(int unit, int D, int R) {
    int turns = R / 2 / N, rest = unit - turns;
    if (unit < turns) {
        int low = interleaved ? 2 * unit * N : unit * N;
        return {low, interleaved ? low + N : low + R / 2, unit * N, true, true};
    }
    int low = R + 2 * rest * N;
    return {low, low + N, -1, low < D, low + N < D};
}

/* Turns a unit's pairs by their angles. */
template <int N, bool interleaved>
__device__ static inline void turn(mt_pack<float, N> &low, mt_pack<float, N> &high, const mt_pack<float, N> &c,
                                   const mt_pack<float, N> &s, float direction) {
    float both[2 * N];
    for (int i = 0; i < N; i++) both[i] = low.value[i], both[N + i] = high.value[i];
    for (int i = 0; i < N; i++) {
        float &a = both[interleaved ? 2 * i : i], &b = both[interleaved ? 2 * i + 1 : N + i];
        float from_a = a, from_b = b, turned_sin = direction * s.value[i];
        a = from_a * c.value[i] - from_b * turned_sin;
        b = from_b * c.value[i] + from_a * turned_sin;
    }
    for (int i = 0; i < N; i++) low.value[i] = both[i], high.value[i] = both[N + i];
}

/* The sum over the `lanes` neighbours, at most a warp, that share a head. */
__device__ static inline float sum_over_lanes(float x, unsigned lanes) {
    for (unsigned lane = lanes / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}

/* x[k] = its sum over the `lanes` neighbours that share a head. */
template <int lanes, int K> __device__ static inline void sum_over_lanes(float (&x)[K]) {
#pragma unroll
    for (int lane = lanes / 2; lane > 0; lane /= 2)
        for (int k = 0; k < K; k++) x[k] += __shfl_xor_sync(0xffffffff, x[k], lane);
}

template <int N> __device__ static inline float squares_of(const mt_pack<float, N> &x) {
    float sum = 0;
    for (int i = 0; i < N; i++) sum += x.value[i] * x.value[i];
    return sum;
}

/* x becomes x w rstd. */
template <class T, int N>
__device__ static inline void scale(mt_pack<float, N> &x, const mt_pack<T, N> &w, float rstd) {
    for (int i = 0; i < N; i++) x.value[i] *= rstd * mt_element(w, i);
}

/* y = turn(norm(x)) or turn(x). Reads x, writes y: 4 bytes an element in bf16, 8 in fp32. */
template <class T, int N, bool interleaved, bool norm>
__global__ void __launch_bounds__(512, 2) turn_heads(const heads_task<T> task) {
    constexpr int K = heads_per_lane;
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % task.lanes, group = thread / task.lanes;
    unsigned token = group / task.groups, first = group % task.groups;
    const unit_place unit = place_unit<N, interleaved>(lane, task.D, task.R);
    const bool there = token < task.tokens, turns = unit.angle >= 0, in_place = !norm && task.y == task.x;
    const bool has_low = there && unit.has_low && (turns || !in_place);
    const bool has_high = there && unit.has_high && (turns || !in_place);
    const T *x = task.x + token * task.x_stride;
    mt_pack<T, N> lows[K], highs[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned head = first + k * task.groups;
        lows[k] = mt_load<N>(x + head * task.D + unit.low, has_low && head < task.heads);
        highs[k] = mt_load<N>(x + head * task.D + unit.high, has_high && head < task.heads);
    }
    int64_t angle = there && turns ? (int64_t)task.positions[token] * (task.R / 2) + unit.angle : 0;
    mt_pack<float, N> c = mt_load<N>(task.cos + angle, there && turns),
                      s = mt_load<N>(task.sin + angle, there && turns);
#pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned head = first + k * task.groups;
        mt_pack<float, N> low = mt_to_float(lows[k]), high = mt_to_float(highs[k]);
        if (norm) {
            float squares = 0;
            for (int i = 0; i < N; i++) squares += low.value[i] * low.value[i] + high.value[i] * high.value[i];
            float rstd = rsqrtf(sum_over_lanes(squares, task.lanes) / task.D + task.eps);
            bool is_q = head < task.H;
            const T *w = is_q ? task.q_w : task.k_w;
            if (lane == 0 && there && head < task.heads) {
                float *to = is_q ? task.q_rstd + (int64_t)token * task.H + head
                                 : task.k_rstd + (int64_t)token * (task.heads - task.H) + (head - task.H);
                *to = rstd;
            }
            mt_pack<float, N> w_low = mt_to_float(mt_load<N>(w + unit.low, has_low));
            mt_pack<float, N> w_high = mt_to_float(mt_load<N>(w + unit.high, has_high));
            for (int i = 0; i < N; i++) low.value[i] *= rstd * w_low.value[i], high.value[i] *= rstd * w_high.value[i];
        }
        if (head >= task.heads) continue;
        if (turns) turn<N, interleaved>(low, high, c, s, task.direction);
        T *y = task.y + token * task.y_stride + head * task.D;
        if (has_low) mt_store(y + unit.low, mt_from_float<T>(low));
        if (has_high) mt_store(y + unit.high, mt_from_float<T>(high));
    }
}

/* The same for heads of D channels that all turn, whose number is a multiple of K: with lengths and places that are
 * constants, and a lane's heads next to one another, half of the instructions go, and so few registers are taken that
 * all threads' loads are on their way. */
static constexpr int whole_heads = 2, whole_threads = 128;
template <class T, int N, int D, bool interleaved, bool norm>
__global__ void __launch_bounds__(whole_threads, norm ? 6 : 8) turn_whole_heads(const heads_task<T> task) {
    constexpr int K = whole_heads, lanes = D / 2 / N, apart = interleaved ? N : D / 2;
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % lanes;
    const unsigned head = thread / lanes % task.groups * K, token = thread / lanes / task.groups;
    const bool there = token < task.tokens, is_q = head < task.H;
    const int low = lane * N * (interleaved ? 2 : 1), column = head * D + low;
    const T *x = task.x + (there ? token : 0) * task.x_stride + column, *w = (is_q ? task.q_w : task.k_w) + low;
    mt_pack<T, N> lows[K], highs[K], w_low, w_high;
    mt_begin_next();
    mt_wait_for_previous();
    const int position = task.positions[there ? token : 0];
#pragma unroll
    for (int k = 0; k < K; k++) lows[k] = mt_load<N>(x + k * D), highs[k] = mt_load<N>(x + k * D + apart);
    if (norm) w_low = mt_load<N>(w), w_high = mt_load<N>(w + apart);
    const int64_t angle = (int64_t)position * (D / 2) + lane * N;
    mt_pack<float, N> c = mt_load<N>(task.cos + angle), s = mt_load<N>(task.sin + angle), low_of[K], high_of[K];
    float rstd[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        low_of[k] = mt_to_float(lows[k]), high_of[k] = mt_to_float(highs[k]);
        rstd[k] = norm ? squares_of(low_of[k]) + squares_of(high_of[k]) : 0;
    }
    if (norm) sum_over_lanes<lanes>(rstd);
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (norm) {
            rstd[k] = rsqrtf(rstd[k] / D + task.eps);
            scale(low_of[k], w_low, rstd[k]), scale(high_of[k], w_high, rstd[k]);
        }
        turn<N, interleaved>(low_of[k], high_of[k], c, s, task.direction);
        if (!there) continue;
        T *y = task.y + token * task.y_stride + column + k * D;
        mt_store(y, mt_from_float<T>(low_of[k]));
        mt_store(y + apart, mt_from_float<T>(high_of[k]));
        if (!norm || lane > 0) continue;
        if (is_q) task.q_rstd[(int64_t)token * task.H + head + k] = rstd[k];
        if (!is_q) task.k_rstd[(int64_t)token * (task.heads - task.H) + head - task.H + k] = rstd[k];
    }
}

/* Lanes for a head of D channels, R of which turn; `all`: the others are at work too. */
static int64_t lanes_of_head(int64_t D, int64_t R, int64_t N, bool all) {
    int64_t units = R / 2 / N + (all ? mt_divide_up(D - R, 2 * N) : 0), lanes = 1;
    while (lanes < units) lanes *= 2;
    return lanes;
}

template <class T, int N, int D, bool interleaved>
static void launch_whole_heads(heads_task<T> task, cudaStream_t stream) {
    bool norm = task.q_w || task.k_w;
    task.groups = task.heads / whole_heads;
    int64_t threads = (int64_t)task.tokens * task.groups * (D / 2 / N);
    auto kernel = norm ? turn_whole_heads<T, N, D, interleaved, true> : turn_whole_heads<T, N, D, interleaved, false>;
    mt_launch_early(kernel, mt_blocks(threads, whole_threads), whole_threads, 0, stream, task);
}

/* Whether there was a kernel for whole heads like these. */
template <class T, int N, int D>
static bool turned_whole_heads(const heads_task<T> &task, bool interleaved, cudaStream_t stream) {
    if (task.D != D || task.R != D || task.H % whole_heads != 0 || task.heads % whole_heads != 0) return false;
    if (interleaved)
        launch_whole_heads<T, N, D, true>(task, stream);
    else
        launch_whole_heads<T, N, D, false>(task, stream);
    return true;
}

template <class T, int N> static void launch_turn(heads_task<T> task, bool interleaved, cudaStream_t stream) {
    if constexpr (N > 1)
        if (turned_whole_heads<T, N, 128>(task, interleaved, stream) ||
            turned_whole_heads<T, N, 64>(task, interleaved, stream))
            return;
    bool norm = task.q_w || task.k_w;
    task.lanes = (unsigned)lanes_of_head(task.D, task.R, N, norm || task.y != task.x);
    task.groups = (unsigned)mt_divide_up(task.heads, heads_per_lane);
    MT_CHECK(task.lanes <= 512); // heads of 1024 channels, or of 4096 and more where they are aligned
    unsigned threads = task.lanes > block_threads ? task.lanes : block_threads;
    auto kernel = interleaved ? norm ? turn_heads<T, N, true, true> : turn_heads<T, N, true, false>
                  : norm ? turn_heads<T, N, false, true>
                              : turn_heads<T, N, false, false>;
    int64_t all = (int64_t)task.tokens * task.groups * task.lanes;
    kernel<<<mt_blocks(all, threads), threads, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
}

static void launch_rope(void *y, const void *x, const float *cos, const float *sin, const int32_t *positions,
                        float direction, int64_t T, int64_t H, int64_t D, int64_t R, int64_t y_stride, int64_t x_stride,
                        bool interleaved, mt_dtype dtype, mt_stream *stream) {
    if (T == 0 || (R == 0 && y == x)) return;
    bool wide = mt_wide(dtype, {y, x, cos, sin}, {y_stride, x_stride, D, R / 2});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        heads_task<E> task = {};
        task.y = (E *)y, task.x = (const E *)x, task.cos = cos, task.sin = sin, task.positions = positions;
        task.direction = direction, task.tokens = (unsigned)T, task.H = task.heads = (unsigned)H;
        task.D = (int)D, task.R = (int)R, task.y_stride = y_stride, task.x_stride = x_stride;
        launch_turn<E, decltype(width)::value>(task, interleaved, mt_cuda_stream(stream));
    });
}

extern "C" void mt_cuda_rope_forward(void *y, const void *x, const float *cos, const float *sin,
                                     const int32_t *positions, int64_t T, int64_t H, int64_t D, int64_t R,
                                     int64_t y_stride, int64_t x_stride, bool interleaved, mt_dtype dtype,
                                     mt_stream *stream) {
    launch_rope(y, x, cos, sin, positions, 1, T, H, D, R, y_stride, x_stride, interleaved, dtype, stream);
}

extern "C" void mt_cuda_rope_backward(void *dx, const void *dy, const float *cos, const float *sin,
                                      const int32_t *positions, int64_t T, int64_t H, int64_t D, int64_t R,
                                      int64_t dx_stride, int64_t dy_stride, bool interleaved, mt_dtype dtype,
                                      mt_stream *stream) {
    launch_rope(dx, dy, cos, sin, positions, -1, T, H, D, R, dx_stride, dy_stride, interleaved, dtype, stream);
}

/* ---- norm and rotation of q and k -------------------------------------------------------------------------------- */

/* Whether a head's units fit in a warp, as its norm needs. */
static bool warp_holds_head(mt_dtype dtype, bool wide, int64_t D, int64_t R) {
    return lanes_of_head(D, R, wide ? 16 / mt_dtype_size(dtype) : 1, true) <= 32;
}

/* `elements` into a row of this type. */
static void *at(const void *row, int64_t elements, mt_dtype dtype) {
    return (char *)row + elements * mt_dtype_size(dtype);
}

extern "C" void mt_cuda_qk_forward(void *qk, float *q_rstd, float *k_rstd, const void *qkv, const void *q_w,
                                   const void *k_w, const float *cos, const float *sin, const int32_t *positions,
                                   int64_t T, int64_t H, int64_t G, int64_t D, int64_t R, int64_t qk_stride,
                                   int64_t qkv_stride, bool interleaved, float eps, mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    bool wide = mt_wide(dtype, {qk, qkv, q_w, k_w, cos, sin}, {qk_stride, qkv_stride, D, R / 2});
    if (!q_w) {
        launch_rope(qk, qkv, cos, sin, positions, 1, T, H + G, D, R, qk_stride, qkv_stride, interleaved, dtype, stream);
        return;
    }
    if (!warp_holds_head(dtype, wide, D, R)) {
        void *k = at(qk, H * D, dtype);
        mt_cuda_rmsnorm_forward(qk, q_rstd, qkv, q_w, T, H, D, qk_stride, qkv_stride, eps, dtype, stream);
        mt_cuda_rmsnorm_forward(k, k_rstd, at(qkv, H * D, dtype), k_w, T, G, D, qk_stride, qkv_stride, eps, dtype,
                                stream);
        launch_rope(qk, qk, cos, sin, positions, 1, T, H + G, D, R, qk_stride, qk_stride, interleaved, dtype, stream);
        return;
    }
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        heads_task<E> task = {};
        task.y = (E *)qk, task.x = (const E *)qkv, task.q_rstd = q_rstd, task.k_rstd = k_rstd;
        task.q_w = (const E *)q_w, task.k_w = (const E *)k_w, task.cos = cos, task.sin = sin;
        task.positions = positions, task.direction = 1, task.eps = eps, task.tokens = (unsigned)T;
        task.H = (unsigned)H, task.heads = (unsigned)(H + G), task.D = (int)D, task.R = (int)R;
        task.y_stride = qk_stride, task.x_stride = qkv_stride;
        launch_turn<E, decltype(width)::value>(task, interleaved, mt_cuda_stream(stream));
    });
}

/* The first q_blocks blocks walk the heads of q, the others those of k, and each leaves its sums for the weights'
 * gradient in its row of partial[blocks, D]. */
template <class T> struct heads_backward_task {
    T *dx;
    float *partial;
    const T *dy, *x, *q_w, *k_w;
    const float *q_rstd, *k_rstd, *cos, *sin;
    const int32_t *positions;
    unsigned tokens, H, G, lanes, q_blocks;
    int D, R;
    int64_t dx_stride, dy_stride, x_stride;
};

/* A pack of the norm's backward: with n = x rstd and g = dy w, dw += dy n, and returns sum g n. Then d is g, x is n. */
template <int N>
__device__ static inline float norm_products(mt_pack<float, N> &d, mt_pack<float, N> &x, mt_pack<float, N> &dw,
                                             const mt_pack<float, N> &w, float rstd) {
    float sum = 0;
    for (int i = 0; i < N; i++) {
        x.value[i] *= rstd;
        dw.value[i] += d.value[i] * x.value[i];
        d.value[i] *= w.value[i];
        sum += d.value[i] * x.value[i];
    }
    return sum;
}

/* Adds up dw over the block's groups of lanes, in their order. */
template <int N>
__device__ static inline void store_head_sums(float *to, const mt_pack<float, N> &low, const mt_pack<float, N> &high,
                                              const unit_place &unit, unsigned lanes, int D) {
    __shared__ float shared[block_threads * 2 * N];
    unsigned groups = blockDim.x / lanes;
    float *mine = shared + threadIdx.x / lanes * D;
    for (int i = 0; i < N; i++) {
        if (unit.has_low) mine[unit.low + i] = low.value[i];
        if (unit.has_high) mine[unit.high + i] = high.value[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < D; c += blockDim.x) {
        float sum = 0;
        for (unsigned group = 0; group < groups; group++) sum += shared[group * D + c];
        to[c] = sum;
    }
}

/* dx = the norm's gradient of dy turned back. Reads dy and x, writes dx: 6 bytes an element in bf16, 12 in fp32. */
template <class T, int N, bool interleaved>
__global__ void __launch_bounds__(block_threads, 2) turn_norm_backward(const heads_backward_task<T> task) {
    constexpr int K = heads_per_lane;
    const bool is_q = blockIdx.x < task.q_blocks;
    const unsigned heads = is_q ? task.H : task.G, groups = (heads + K - 1) / K, lanes = task.lanes;
    const unsigned block = is_q ? blockIdx.x : blockIdx.x - task.q_blocks;
    const unsigned blocks = is_q ? task.q_blocks : gridDim.x - task.q_blocks, at_once = blockDim.x / lanes;
    const int column = is_q ? 0 : task.H * task.D;
    const float *rstds = is_q ? task.q_rstd : task.k_rstd;
    const T *w = is_q ? task.q_w : task.k_w;
    const unit_place unit = place_unit<N, interleaved>(threadIdx.x % lanes, task.D, task.R);
    const mt_pack<T, N> w_low = mt_load<N>(w + unit.low, unit.has_low),
                        w_high = mt_load<N>(w + unit.high, unit.has_high);
    mt_pack<float, N> dw_low = {}, dw_high = {};
    for (unsigned base = block * at_once; base < task.tokens * groups; base += blocks * at_once) {
        unsigned group = base + threadIdx.x / lanes, token = group / groups, first = group % groups;
        bool there = token < task.tokens, turns = there && unit.angle >= 0;
        mt_pack<T, N> dy_low[K], dy_high[K], x_low[K], x_high[K];
        float rstd[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            unsigned head = first + k * groups;
            bool has = there && head < heads;
            const T *dy = task.dy + token * task.dy_stride + column + head * task.D;
            const T *x = task.x + token * task.x_stride + column + head * task.D;
            dy_low[k] = mt_load<N>(dy + unit.low, has && unit.has_low);
            dy_high[k] = mt_load<N>(dy + unit.high, has && unit.has_high);
            x_low[k] = mt_load<N>(x + unit.low, has && unit.has_low);
            x_high[k] = mt_load<N>(x + unit.high, has && unit.has_high);
            rstd[k] = has ? rstds[(int64_t)token * heads + head] : 0;
        }
        int64_t angle = turns ? (int64_t)task.positions[token] * (task.R / 2) + unit.angle : 0;
        mt_pack<float, N> c = mt_load<N>(task.cos + angle, turns), s = mt_load<N>(task.sin + angle, turns);
#pragma unroll
        for (int k = 0; k < K; k++) {
            unsigned head = first + k * groups;
            mt_pack<float, N> d_low = mt_to_float(dy_low[k]), d_high = mt_to_float(dy_high[k]);
            mt_pack<float, N> n_low = mt_to_float(x_low[k]), n_high = mt_to_float(x_high[k]);
            if (turns) turn<N, interleaved>(d_low, d_high, c, s, -1);
            float sum = norm_products(d_low, n_low, dw_low, mt_to_float(w_low), rstd[k]);
            sum += norm_products(d_high, n_high, dw_high, mt_to_float(w_high), rstd[k]);
            float mean = sum_over_lanes(sum, lanes) / task.D;
            if (!there || head >= heads) continue;
            for (int i = 0; i < N; i++) {
                d_low.value[i] = rstd[k] * (d_low.value[i] - n_low.value[i] * mean);
                d_high.value[i] = rstd[k] * (d_high.value[i] - n_high.value[i] * mean);
            }
            T *dx = task.dx + token * task.dx_stride + column + head * task.D;
            if (unit.has_low) mt_store(dx + unit.low, mt_from_float<T>(d_low));
            if (unit.has_high) mt_store(dx + unit.high, mt_from_float<T>(d_high));
        }
    }
    store_head_sums(task.partial + (int64_t)blockIdx.x * task.D, dw_low, dw_high, unit, lanes, task.D);
}

/* d = dy turned back becomes h = d rstd w, dw += d rstd x, and returns sum h x. */
template <class T, int N>
__device__ static inline float add_products(mt_pack<float, N> &d, mt_pack<float, N> &dw, const mt_pack<T, N> &x,
                                            const mt_pack<T, N> &w, float rstd) {
    float sum = 0;
    for (int i = 0; i < N; i++) {
        float in_x = mt_element(x, i);
        d.value[i] *= rstd;
        dw.value[i] += d.value[i] * in_x;
        d.value[i] *= mt_element(w, i);
        sum += d.value[i] * in_x;
    }
    return sum;
}

/* dx = h + x slope. */
template <class T, int N>
__device__ static inline void store_gradient(T *dx, mt_pack<float, N> h, const mt_pack<T, N> &x, float slope) {
    for (int i = 0; i < N; i++) h.value[i] += mt_element(x, i) * slope;
    mt_store(dx, mt_from_float<T>(h));
}

/* The same for whole heads, as turn_whole_heads has them: a thread keeps its heads and walks along the tokens. With
 * d = dy turned back times rstd and h = d w: dw sums d x, and dx = h - x rstd^2 mean(h x). A token's position is read
 * with the token before: its angles would wait for it, and then once more for all others' loads. */
template <class T, int N, int D, bool interleaved, bool turns>
__global__ void __launch_bounds__(whole_threads) turn_whole_backward(const heads_backward_task<T> task) {
    constexpr int K = whole_heads, lanes = D / 2 / N, apart = interleaved ? N : D / 2, groups = whole_threads / lanes;
    const bool is_q = blockIdx.x < task.q_blocks;
    const unsigned heads = is_q ? task.H : task.G, lane = threadIdx.x % lanes;
    const unsigned block = is_q ? blockIdx.x : blockIdx.x - task.q_blocks;
    const unsigned all = (is_q ? task.q_blocks : gridDim.x - task.q_blocks) * groups, at_once = all / (heads / K);
    const unsigned group = block * groups + threadIdx.x / lanes, place = group / (heads / K);
    const unsigned head = group % (heads / K) * K, end = place < at_once ? task.tokens : 0;
    const unit_place unit = place_unit<N, interleaved>(lane, D, D);
    const int column = (is_q ? head : task.H + head) * D + unit.low;
    const float *cos = task.cos + lane * N, *sin = task.sin + lane * N;
    const float *rstds = (is_q ? task.q_rstd : task.k_rstd) + head;
    const T *w = (is_q ? task.q_w : task.k_w) + unit.low;
    mt_wait_for_previous();
    const mt_pack<T, N> w_low = mt_load<N>(w), w_high = mt_load<N>(w + apart);
    mt_pack<float, N> dw_low = {}, dw_high = {}, c, s;
    int position = turns && place < end ? task.positions[place] : 0;
    mt_begin_next(); // add_partials
    for (unsigned base = 0; base < task.tokens; base += at_once) {
        const unsigned token = base + place, next = token + at_once, from = token < end ? token : 0;
        const T *dy = task.dy + from * task.dy_stride + column, *x = task.x + from * task.x_stride + column;
        mt_pack<T, N> dy_low[K], dy_high[K], x_low[K], x_high[K];
        mt_pack<float, N> low[K], high[K];
        float rstd[K], sums[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            dy_low[k] = mt_load<N>(dy + k * D), dy_high[k] = mt_load<N>(dy + k * D + apart);
            x_low[k] = mt_load<N>(x + k * D), x_high[k] = mt_load<N>(x + k * D + apart);
            rstd[k] = token < end ? rstds[(int64_t)from * heads + k] : 0;
        }
        if (turns) {
            c = mt_load<N>(cos + (int64_t)position * (D / 2)), s = mt_load<N>(sin + (int64_t)position * (D / 2));
            position = next < end ? task.positions[next] : 0;
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            low[k] = mt_to_float(dy_low[k]), high[k] = mt_to_float(dy_high[k]);
            if (turns) turn<N, interleaved>(low[k], high[k], c, s, -1);
            sums[k] = add_products(low[k], dw_low, x_low[k], w_low, rstd[k]);
            sums[k] += add_products(high[k], dw_high, x_high[k], w_high, rstd[k]);
        }
        sum_over_lanes<lanes>(sums);
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (token >= end) continue;
            T *dx = task.dx + token * task.dx_stride + column + k * D;
            float slope = -rstd[k] * rstd[k] * (sums[k] / D);
            store_gradient(dx, low[k], x_low[k], slope);
            store_gradient(dx + apart, high[k], x_high[k], slope);
        }
    }
    store_head_sums(task.partial + (int64_t)blockIdx.x * D, dw_low, dw_high, unit, lanes, D);
}

/* Whether there was a kernel for whole heads like these, which turn or only are normalised. */
template <class T, int N, int D>
static bool turned_whole_backward(heads_backward_task<T> task, float *dq_w, float *dk_w, bool interleaved,
                                  mt_stream *stream) {
    if (task.D != D || (task.R != D && task.R != 0) || task.H % whole_heads != 0 || task.G % whole_heads != 0)
        return false;
    auto kernel = task.R == 0   ? turn_whole_backward<T, N, D, false, false>
                  : interleaved ? turn_whole_backward<T, N, D, true, true>
                                : turn_whole_backward<T, N, D, false, true>;
    int per = 0;
    MT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, kernel, whole_threads, 0));
    int64_t heads = task.H + task.G, blocks = mt_cuda_device()->multiProcessorCount * (int64_t)per;
    int64_t k_blocks = mt_divide_up(blocks * task.G, heads), groups = whole_threads / (D / 2 / N) * whole_heads;
    if ((blocks - k_blocks) * groups < task.H || k_blocks * groups < task.G) return false; // not a token at once
    task.q_blocks = (unsigned)(blocks - k_blocks);
    task.partial = (float *)mt_cuda_workspace(stream, blocks * D * (int64_t)sizeof(float));
    mt_launch_early(kernel, (unsigned)blocks, whole_threads, 0, mt_cuda_stream(stream), task);
    mt_cuda_add_partials(dq_w, task.q_blocks, task.G > 0 ? dk_w : NULL, k_blocks, task.partial, D, stream);
    return true;
}

/* Blocks are shared out as the heads are, so that q's and k's end together. */
template <class T, int N>
static void launch_turn_norm_backward(heads_backward_task<T> task, float *dq_w, float *dk_w, bool interleaved,
                                      mt_stream *stream) {
    if constexpr (N > 1)
        if (turned_whole_backward<T, N, 128>(task, dq_w, dk_w, interleaved, stream) ||
            turned_whole_backward<T, N, 64>(task, dq_w, dk_w, interleaved, stream))
            return;
    int64_t heads = task.H + task.G, blocks = mt_cuda_device()->multiProcessorCount * 2ll;
    int64_t k_blocks = mt_divide_up(blocks * task.G, heads);
    task.lanes = (unsigned)lanes_of_head(task.D, task.R, N, true);
    task.q_blocks = (unsigned)(blocks - k_blocks);
    task.partial = (float *)mt_cuda_workspace(stream, blocks * task.D * (int64_t)sizeof(float));
    auto kernel = interleaved ? turn_norm_backward<T, N, true> : turn_norm_backward<T, N, false>;
    kernel<<<(unsigned)blocks, block_threads, 0, mt_cuda_stream(stream)>>>(task);
    MT_CUDA_LAUNCHED();
    mt_cuda_add_partials(dq_w, task.q_blocks, dk_w, k_blocks, task.partial, task.D, stream);
}

extern "C" void mt_cuda_qk_backward(void *dqkv, float *dq_w, float *dk_w, void *dqk, const void *qkv, const void *q_w,
                                    const void *k_w, const float *q_rstd, const float *k_rstd, const float *cos,
                                    const float *sin, const int32_t *positions, int64_t T, int64_t H, int64_t G,
                                    int64_t D, int64_t R, int64_t dqkv_stride, int64_t dqk_stride, int64_t qkv_stride,
                                    bool interleaved, mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    bool wide = mt_wide(dtype, {dqkv, dqk, qkv, q_w, k_w, cos, sin}, {dqkv_stride, dqk_stride, qkv_stride, D, R / 2});
    if (!q_w || !warp_holds_head(dtype, wide, D, R)) {
        void *turned = q_w ? dqk : dqkv;
        launch_rope(turned, dqk, cos, sin, positions, -1, T, H + G, D, R, q_w ? dqk_stride : dqkv_stride, dqk_stride,
                    interleaved, dtype, stream);
        if (!q_w) return;
        mt_cuda_rmsnorm_backward(dqkv, dq_w, turned, NULL, qkv, q_w, q_rstd, T, H, D, dqkv_stride, dqk_stride,
                                 qkv_stride, dtype, stream);
        mt_cuda_rmsnorm_backward(at(dqkv, H * D, dtype), dk_w, at(turned, H * D, dtype), NULL, at(qkv, H * D, dtype),
                                 k_w, k_rstd, T, G, D, dqkv_stride, dqk_stride, qkv_stride, dtype, stream);
        return;
    }
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        heads_backward_task<E> task = {};
        task.dx = (E *)dqkv, task.dy = (const E *)dqk, task.x = (const E *)qkv;
        task.q_w = (const E *)q_w, task.k_w = (const E *)k_w, task.q_rstd = q_rstd, task.k_rstd = k_rstd;
        task.cos = cos, task.sin = sin, task.positions = positions, task.tokens = (unsigned)T;
        task.H = (unsigned)H, task.G = (unsigned)G, task.D = (int)D, task.R = (int)R;
        task.dx_stride = dqkv_stride, task.dy_stride = dqk_stride, task.x_stride = qkv_stride;
        launch_turn_norm_backward<E, decltype(width)::value>(task, dq_w, dk_w, interleaved, stream);
    });
}

bool mt_cuda_heads_norm_backward(void *dx, float *dw, const void *dy, const void *x, const void *w, const float *rstd,
                                 int64_t T, int64_t H, int64_t D, int64_t dx_stride, int64_t dy_stride,
                                 int64_t x_stride, mt_dtype dtype, mt_stream *stream) {
    bool done = false;
    if (T == 0 || !mt_wide(dtype, {dx, dy, x, w}, {dx_stride, dy_stride, x_stride, D})) return false;
    mt_by_type(dtype, true, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        heads_backward_task<E> task = {};
        task.dx = (E *)dx, task.dy = (const E *)dy, task.x = (const E *)x, task.q_w = (const E *)w, task.q_rstd = rstd;
        task.tokens = (unsigned)T, task.H = (unsigned)H, task.D = (int)D;
        task.dx_stride = dx_stride, task.dy_stride = dy_stride, task.x_stride = x_stride;
        if constexpr (N > 1)
            done = turned_whole_backward<E, N, 128>(task, dw, NULL, false, stream) ||
                   turned_whole_backward<E, N, 64>(task, dw, NULL, false, stream);
    });
    return done;
}

/* ---- heads of latent attention ----------------------------------------------------------------------------------- */

/* A head is walked in packs of N elements, which never lie across the channels that stand still, those that turn and
 * those of the value; a unit of a turn is two packs, as above. */
template <class T> struct latent_task {
    T *q, *k, *v, *kv; // or their gradients
    const T *k_rope;
    T *dk_rope;
    const float *cos, *sin;
    const int32_t *positions;
    float direction;
    int64_t tokens, H;
    int still, R, Dv; // channels
};

/* Turns one unit of the end of a query head in place. */
template <class T, int N, bool interleaved>
__device__ static inline void turn_latent_unit(const latent_task<T> &task, int64_t token, int64_t head, int unit) {
    const unit_place place = place_unit<N, interleaved>(unit, task.R, task.R);
    int64_t angle = (int64_t)task.positions[token] * (task.R / 2) + place.angle;
    T *q = task.q + (token * task.H + head) * (task.still + task.R) + task.still;
    mt_pack<float, N> low = mt_to_float(mt_load<N>(q + place.low)), high = mt_to_float(mt_load<N>(q + place.high));
    turn<N, interleaved>(low, high, mt_load<N>(task.cos + angle), mt_load<N>(task.sin + angle), task.direction);
    mt_store(q + place.low, mt_from_float<T>(low));
    mt_store(q + place.high, mt_from_float<T>(high));
}

/* A thread has a pack of a head: first those of k and v, then the units of q that turn. */
template <class T, int N, bool interleaved> __global__ void latent_heads(const latent_task<T> task) {
    const int still = task.still / N, rope = task.R / N, values = task.Dv / N, units = task.R / 2 / N;
    const int64_t each = still + rope + values + units, count = task.tokens * task.H * each;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / each, token = row / task.H;
        int pack = (int)(i % each);
        T *k = task.k + row * (task.still + task.R);
        const T *kv = task.kv + row * (task.still + task.Dv);
        if (pack < still)
            mt_store(k + pack * N, mt_load<N>(kv + pack * N));
        else if (pack < still + rope)
            mt_store(k + pack * N, mt_load<N>(task.k_rope + token * task.R + (pack - still) * N));
        else if (pack < still + rope + values)
            mt_store(task.v + row * task.Dv + (pack - still - rope) * N, mt_load<N>(kv + (pack - rope) * N));
        else
            turn_latent_unit<T, N, interleaved>(task, token, row % task.H, pack - still - rope - values);
    }
}

template <class T, int N, bool interleaved> __global__ void latent_heads_backward(const latent_task<T> task) {
    const int still = task.still / N, rope = task.R / N, values = task.Dv / N, units = task.R / 2 / N;
    const int64_t each = still + values + units, heads = task.tokens * task.H * each,
                  count = heads + task.tokens * rope;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        if (i >= heads) { // a pack of the key that all heads share: their sum, in their order
            int64_t token = (i - heads) / rope, channel = (i - heads) % rope * N;
            const T *dk = task.k + token * task.H * (task.still + task.R) + task.still + channel;
            mt_pack<float, N> sum = {};
            for (int64_t head = 0; head < task.H; head++, dk += task.still + task.R) {
                mt_pack<float, N> part = mt_to_float(mt_load<N>(dk));
                for (int c = 0; c < N; c++) sum.value[c] += part.value[c];
            }
            mt_store(task.dk_rope + token * task.R + channel, mt_from_float<T>(sum));
            continue;
        }
        int64_t row = i / each;
        int pack = (int)(i % each);
        T *dkv = task.kv + row * (task.still + task.Dv);
        if (pack < still)
            mt_store(dkv + pack * N, mt_load<N>(task.k + row * (task.still + task.R) + pack * N));
        else if (pack < still + values)
            mt_store(dkv + pack * N, mt_load<N>(task.v + row * task.Dv + (pack - still) * N));
        else
            turn_latent_unit<T, N, interleaved>(task, row / task.H, row % task.H, pack - still - values);
    }
}

template <class T, int N> static void launch_latent(latent_task<T> task, bool interleaved, cudaStream_t stream) {
    bool backward = task.direction < 0;
    auto kernel = interleaved ? backward ? latent_heads_backward<T, N, true> : latent_heads<T, N, true>
                  : backward ? latent_heads_backward<T, N, false>
                              : latent_heads<T, N, false>;
    int64_t packs = task.tokens * task.H * ((task.still + 2 * task.R + task.Dv) / N + 1);
    kernel<<<mt_blocks(packs, block_threads), block_threads, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
}

/* Both directions; `k_rope` is the gradient to write when it turns back. */
static void launch_latent_heads(void *q, void *kv, void *k_rope, void *k, void *v, const float *cos, const float *sin,
                                const int32_t *positions, float direction, int64_t T, int64_t H, int64_t N, int64_t R,
                                int64_t Dv, bool interleaved, mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    bool wide = mt_wide(dtype, {q, kv, k_rope, k, v, cos, sin}, {N, Dv, R / 2});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        latent_task<E> task = {};
        task.q = (E *)q, task.k = (E *)k, task.v = (E *)v, task.kv = (E *)kv;
        task.k_rope = task.dk_rope = (E *)k_rope;
        task.cos = cos, task.sin = sin, task.positions = positions, task.direction = direction;
        task.tokens = T, task.H = H, task.still = (int)N, task.R = (int)R, task.Dv = (int)Dv;
        launch_latent<E, decltype(width)::value>(task, interleaved, mt_cuda_stream(stream));
    });
}

extern "C" void mt_cuda_latent_heads_forward(void *q, void *k, void *v, const void *kv, const void *k_rope,
                                             const float *cos, const float *sin, const int32_t *positions, int64_t T,
                                             int64_t H, int64_t N, int64_t R, int64_t Dv, bool interleaved,
                                             mt_dtype dtype, mt_stream *stream) {
    launch_latent_heads(q, (void *)kv, (void *)k_rope, k, v, cos, sin, positions, 1, T, H, N, R, Dv, interleaved, dtype,
                        stream);
}

extern "C" void mt_cuda_latent_heads_backward(void *dq, void *dkv, void *dk_rope, const void *dk, const void *dv,
                                              const float *cos, const float *sin, const int32_t *positions, int64_t T,
                                              int64_t H, int64_t N, int64_t R, int64_t Dv, bool interleaved,
                                              mt_dtype dtype, mt_stream *stream) {
    launch_latent_heads(dq, dkv, dk_rope, (void *)dk, (void *)dv, cos, sin, positions, -1, T, H, N, R, Dv, interleaved,
                        dtype, stream);
}
