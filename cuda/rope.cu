/* rope.cu: rotary positions, alone or together with the norm of q and k before it: one pass over the heads of a token;
 * and the heads of latent attention.
 *
 * A lane has one unit of a head: two packs that rotate as pairs, R / 2 channels apart, or adjacent when interleaved.
 * Past the rotary channels a unit is two adjacent packs, which are only normalised or copied. The lanes of a head are
 * neighbours in a warp, so the norm's sum needs no barrier. A lane has the same unit of several heads: it issues their
 * loads at once, and they share its angles.
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
    float direction, eps, offset; // direction -1 rotates back; offset: added to the weights
    unsigned tokens, H, heads, groups, lanes;
    int D, R;
    int64_t y_stride, x_stride;
};

/* Where k and v of the tokens go, in generation. */
template <class T> struct heads_cache {
    T *of[2];            // of k and of v: [rows, heads, D]
    const int32_t *rows; // [tokens]; NULL: no cache
};

/* A lane's unit: where its packs begin in a head, and whether they are there. */
struct unit_place {
    int low, high, angle; // angle: the first of its cos and sin, -1 if it does not rotate
    bool has_low, has_high;
};

template <int N, bool interleaved> __device__ static inline unit_place place_unit(int unit, int D, int R) {
    int rotates = R / 2 / N, rest = unit - rotates;
    if (unit < rotates) {
        int low = interleaved ? 2 * unit * N : unit * N;
        return {low, interleaved ? low + N : low + R / 2, unit * N, true, true};
    }
    int low = R + 2 * rest * N;
    return {low, low + N, -1, low < D, low + N < D};
}

/* Rotates a unit's pairs by their angles. */
template <int N, bool interleaved>
__device__ static inline void rotate(mt_pack<float, N> &low, mt_pack<float, N> &high, const mt_pack<float, N> &c,
                                     const mt_pack<float, N> &s, float direction) {
    float both[2 * N];
    for (int i = 0; i < N; i++) both[i] = low.value[i], both[N + i] = high.value[i];
    for (int i = 0; i < N; i++) {
        float &a = both[interleaved ? 2 * i : i], &b = both[interleaved ? 2 * i + 1 : N + i];
        float from_a = a, from_b = b, signed_sin = direction * s.value[i];
        a = from_a * c.value[i] - from_b * signed_sin;
        b = from_b * c.value[i] + from_a * signed_sin;
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
__device__ static inline void scale(mt_pack<float, N> &x, const mt_pack<T, N> &w, float offset, float rstd) {
    for (int i = 0; i < N; i++) x.value[i] *= rstd * (mt_element(w, i) + offset);
}

/* y = rotate(norm(x)) or rotate(x). Reads x, writes y: 4 bytes per element in bf16, 8 in fp32. */
template <class T, int N, bool interleaved, bool norm>
__global__ void __launch_bounds__(512, 2) rotate_heads(const heads_task<T> task) {
    constexpr int K = heads_per_lane;
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % task.lanes, group = thread / task.lanes;
    unsigned token = group / task.groups, first = group % task.groups;
    const unit_place unit = place_unit<N, interleaved>(lane, task.D, task.R);
    const bool there = token < task.tokens, rotates = unit.angle >= 0, in_place = !norm && task.y == task.x;
    const bool has_low = there && unit.has_low && (rotates || !in_place);
    const bool has_high = there && unit.has_high && (rotates || !in_place);
    const T *x = task.x + token * task.x_stride;
    mt_pack<T, N> lows[K], highs[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned head = first + k * task.groups;
        lows[k] = mt_load<N>(x + head * task.D + unit.low, has_low && head < task.heads);
        highs[k] = mt_load<N>(x + head * task.D + unit.high, has_high && head < task.heads);
    }
    int64_t angle = there && rotates ? (int64_t)task.positions[token] * (task.R / 2) + unit.angle : 0;
    mt_pack<float, N> c = mt_load<N>(task.cos + angle, there && rotates),
                      s = mt_load<N>(task.sin + angle, there && rotates);
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
            for (int i = 0; i < N; i++) {
                low.value[i] *= rstd * (w_low.value[i] + task.offset);
                high.value[i] *= rstd * (w_high.value[i] + task.offset);
            }
        }
        if (head >= task.heads) continue;
        if (rotates) rotate<N, interleaved>(low, high, c, s, task.direction);
        T *y = task.y + token * task.y_stride + head * task.D;
        if (has_low) mt_store(y + unit.low, mt_from_float<T>(low));
        if (has_high) mt_store(y + unit.high, mt_from_float<T>(high));
    }
}

/* The same for heads of D channels that all rotate; the number of heads is a multiple of K. Constant lengths and
 * offsets, and adjacent heads in a lane, halve the instructions and take so few registers that all threads' loads are
 * in flight. `caches`: k goes to the cache after the rotation; v, whose heads follow, goes there unchanged. */
static constexpr int whole_heads = 2, whole_threads = 128;
template <class T, int N, int D, bool interleaved, bool norm, bool caches>
__global__ void __launch_bounds__(whole_threads, norm ? 6 : 8)
    rotate_whole_heads(const heads_task<T> task, const heads_cache<T> cache) {
    constexpr int K = whole_heads, lanes = D / 2 / N, apart = interleaved ? N : D / 2;
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % lanes;
    const unsigned head = thread / lanes % task.groups * K, token = thread / lanes / task.groups;
    const bool there = token < task.tokens, is_q = head < task.H, is_v = caches && head >= task.heads;
    const int low = lane * N * (interleaved ? 2 : 1), column = head * D + low;
    const T *x = task.x + (there ? token : 0) * task.x_stride + column, *w = (is_q ? task.q_w : task.k_w) + low;
    mt_pack<T, N> lows[K], highs[K], w_low, w_high;
    mt_begin_next();
    const int64_t row = caches && !is_q ? cache.rows[there ? token : 0] : 0;
    const int64_t angle = (int64_t)task.positions[there ? token : 0] * (D / 2) + lane * N;
    mt_pack<float, N> c = mt_load<N>(task.cos + angle), s = mt_load<N>(task.sin + angle), low_of[K], high_of[K];
    mt_wait_for_previous();
#pragma unroll
    for (int k = 0; k < K; k++) lows[k] = mt_load<N>(x + k * D), highs[k] = mt_load<N>(x + k * D + apart);
    if (norm) w_low = mt_load<N>(w), w_high = mt_load<N>(w + apart);
    float rstd[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        low_of[k] = mt_to_float(lows[k]), high_of[k] = mt_to_float(highs[k]);
        rstd[k] = norm ? squares_of(low_of[k]) + squares_of(high_of[k]) : 0;
    }
    if (norm) sum_over_lanes<lanes>(rstd);
    T *y = task.y + token * task.y_stride + column;
    if (caches && !is_q)
        y = (is_v ? cache.of[1] : cache.of[0]) +
            (row * (task.heads - task.H) + head - (is_v ? task.heads : task.H)) * D + low;
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (norm && !is_v) {
            rstd[k] = rsqrtf(rstd[k] / D + task.eps);
            scale(low_of[k], w_low, task.offset, rstd[k]), scale(high_of[k], w_high, task.offset, rstd[k]);
        }
        if (!is_v) rotate<N, interleaved>(low_of[k], high_of[k], c, s, task.direction);
        if (!there) continue;
        mt_store(y + k * D, mt_from_float<T>(low_of[k]));
        mt_store(y + k * D + apart, mt_from_float<T>(high_of[k]));
        if (!norm || is_v || lane > 0) continue;
        if (is_q) task.q_rstd[(int64_t)token * task.H + head + k] = rstd[k];
        if (!is_q) task.k_rstd[(int64_t)token * (task.heads - task.H) + head - task.H + k] = rstd[k];
    }
}

/* Lanes for a head of D channels, R of them rotated; `all`: the other channels have lanes too. */
static int64_t lanes_of_head(int64_t D, int64_t R, int64_t N, bool all) {
    int64_t units = R / 2 / N + (all ? mt_divide_up(D - R, 2 * N) : 0), lanes = 1;
    while (lanes < units) lanes *= 2;
    return lanes;
}

template <class T, int N, int D, bool interleaved>
static void launch_whole_heads(heads_task<T> task, const heads_cache<T> &cache, cudaStream_t stream) {
    bool norm = task.q_w || task.k_w;
    unsigned of_v = cache.rows ? task.heads - task.H : 0;
    task.groups = (task.heads + of_v) / whole_heads;
    int64_t threads = (int64_t)task.tokens * task.groups * (D / 2 / N);
    auto kernel = of_v   ? norm ? rotate_whole_heads<T, N, D, interleaved, true, true>
                                : rotate_whole_heads<T, N, D, interleaved, false, true>
                    : norm ? rotate_whole_heads<T, N, D, interleaved, true, false>
                         : rotate_whole_heads<T, N, D, interleaved, false, false>;
    mt_launch_early(kernel, mt_grid_size(threads, whole_threads), whole_threads, 0, stream, task, cache);
}

/* True if a kernel for whole heads serves these. */
template <class T, int N, int D>
static bool launched_whole_heads(const heads_task<T> &task, const heads_cache<T> &cache, bool interleaved,
                                 cudaStream_t stream) {
    if (task.D != D || task.R != D || task.heads % whole_heads != 0) return false;
    if ((task.q_w || cache.rows) && task.H % whole_heads != 0) return false; // q and k differ
    if (interleaved)
        launch_whole_heads<T, N, D, true>(task, cache, stream);
    else
        launch_whole_heads<T, N, D, false>(task, cache, stream);
    return true;
}

/* Returns true if k and v went to the cache. */
template <class T, int N>
static bool launch_rotation(heads_task<T> task, const heads_cache<T> &cache, bool interleaved, cudaStream_t stream) {
    if constexpr (N > 1)
        if (launched_whole_heads<T, N, 128>(task, cache, interleaved, stream) ||
            launched_whole_heads<T, N, 64>(task, cache, interleaved, stream))
            return cache.rows;
    bool norm = task.q_w || task.k_w;
    task.lanes = (unsigned)lanes_of_head(task.D, task.R, N, norm || task.y != task.x);
    task.groups = (unsigned)mt_divide_up(task.heads, heads_per_lane);
    MT_CHECK(task.lanes <= 512); // heads of 1024 channels, or of 4096 and more where they are aligned
    unsigned threads = task.lanes > block_threads ? task.lanes : block_threads;
    auto kernel = interleaved ? norm ? rotate_heads<T, N, true, true> : rotate_heads<T, N, true, false>
                  : norm ? rotate_heads<T, N, false, true>
                              : rotate_heads<T, N, false, false>;
    int64_t all = (int64_t)task.tokens * task.groups * task.lanes;
    kernel<<<mt_grid_size(all, threads), threads, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
    return false;
}

static void launch_rope(const mt_rope_args *a, float direction, mt_dtype dtype, mt_stream *stream) {
    const mt_rotation *r = &a->rotation;
    if (a->T == 0 || (r->R == 0 && a->y == a->x)) return;
    bool wide = mt_wide(dtype, {a->y, a->x, r->cos, r->sin}, {a->y_stride, a->x_stride, a->D, r->R / 2});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        heads_task<E> task = {};
        task.y = (E *)a->y, task.x = (const E *)a->x;
        task.cos = r->cos, task.sin = r->sin, task.positions = r->positions;
        task.direction = direction, task.tokens = (unsigned)a->T, task.H = task.heads = (unsigned)a->H;
        task.D = (int)a->D, task.R = (int)r->R, task.y_stride = a->y_stride, task.x_stride = a->x_stride;
        launch_rotation<E, decltype(width)::value>(task, {}, r->interleaved, mt_cuda_stream(stream));
    });
}

extern "C" void mt_cuda_rope_forward(const mt_rope_args *a, mt_dtype dtype, mt_stream *stream) {
    launch_rope(a, 1, dtype, stream);
}

extern "C" void mt_cuda_rope_backward(const mt_rope_args *a, mt_dtype dtype, mt_stream *stream) {
    launch_rope(a, -1, dtype, stream);
}

/* ---- norm and rotation of q and k -------------------------------------------------------------------------------- */

/* True if a head's units fit in a warp, as its norm needs. */
static bool warp_holds_head(mt_dtype dtype, bool wide, int64_t D, int64_t R) {
    return lanes_of_head(D, R, wide ? 16 / mt_dtype_size(dtype) : 1, true) <= 32;
}

/* `elements` into a row of this type. */
static void *at(const void *row, int64_t elements, mt_dtype dtype) {
    return (char *)row + elements * mt_dtype_size(dtype);
}

/* All heads of q and k as one rope call, from x to y. */
static mt_rope_args rope_of(const mt_qk_args *a, void *y, int64_t y_stride, const void *x, int64_t x_stride) {
    return {a->T, a->H + a->G, a->D, x, y, x_stride, y_stride, a->rotation};
}

/* The norm of the heads of q, or of those of k, which begin after H heads of each row. */
static mt_norm_args norm_of(const mt_qk_args *a, bool k, mt_dtype dtype) {
    int64_t first = k ? a->H * a->D : 0;
    mt_norm_args norm = {};
    norm.T = a->T, norm.H = k ? a->G : a->H, norm.C = a->D;
    norm.x = at(a->qkv, first, dtype), norm.x_stride = a->qkv_stride;
    norm.w = k ? a->k_w : a->q_w, norm.rstd = k ? a->k_rstd : a->q_rstd, norm.eps = a->eps;
    norm.w_offset = a->w_offset;
    norm.y = at(a->qk, first, dtype), norm.y_stride = a->qk_stride;
    norm.dy = at(a->dqk, first, dtype), norm.dy_stride = a->dqk_stride;
    norm.dx = at(a->dqkv, first, dtype), norm.dx_stride = a->dqkv_stride;
    norm.dw = k ? a->dk_w : a->dq_w;
    return norm;
}

/* Writes k of qk, and v after it in qkv, to the cache. */
static void cache_keys(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t width = a->G * a->D, k = a->H * a->D;
    mt_row_args keys = {a->T, width, a->cache_rows, at(a->qk, k, dtype), a->k_cache, a->qk_stride, width, 0};
    mt_row_args values = {a->T,       width,         a->cache_rows, at(a->qkv, k + width, dtype),
                          a->v_cache, a->qkv_stride, width,         0};
    mt_cuda_scatter_rows(&keys, dtype, stream);
    mt_cuda_scatter_rows(&values, dtype, stream);
}

extern "C" void mt_cuda_qk_forward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    const mt_rotation *r = &a->rotation;
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->qk, a->qkv, a->q_w, a->k_w, r->cos, r->sin, a->k_cache, a->v_cache},
                        {a->qk_stride, a->qkv_stride, a->D, r->R / 2});
    bool cached = !a->cache_rows;
    if (a->q_w && !warp_holds_head(dtype, wide, a->D, r->R)) {
        for (int k = 0; k < 2; k++) {
            mt_norm_args norm = norm_of(a, k, dtype);
            mt_cuda_rmsnorm_forward(&norm, dtype, stream);
        }
        mt_rope_args rope = rope_of(a, a->qk, a->qk_stride, a->qk, a->qk_stride);
        launch_rope(&rope, 1, dtype, stream);
    } else if (a->q_w || r->R > 0) {
        mt_by_type(dtype, wide, [&](auto type, auto width) {
            using E = decltype(type);
            heads_task<E> task = {};
            task.y = (E *)a->qk, task.x = (const E *)a->qkv, task.q_rstd = a->q_rstd, task.k_rstd = a->k_rstd;
            task.q_w = (const E *)a->q_w, task.k_w = (const E *)a->k_w;
            task.cos = r->cos, task.sin = r->sin, task.positions = r->positions, task.direction = 1, task.eps = a->eps;
            task.offset = a->w_offset;
            task.tokens = (unsigned)a->T, task.H = (unsigned)a->H, task.heads = (unsigned)(a->H + a->G);
            task.D = (int)a->D, task.R = (int)r->R, task.y_stride = a->qk_stride, task.x_stride = a->qkv_stride;
            heads_cache<E> cache = {{(E *)a->k_cache, (E *)a->v_cache}, a->cache_rows};
            cached |= launch_rotation<E, decltype(width)::value>(task, cache, r->interleaved, mt_cuda_stream(stream));
        });
    }
    if (!cached) cache_keys(a, dtype, stream);
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
    float offset; // added to the weights
};

/* A pack of the norm's backward: with n = x rstd and g = dy (w + offset), dw += dy n, and returns sum g n. Then d is g,
 * x is n. */
template <int N>
__device__ static inline float norm_products(mt_pack<float, N> &d, mt_pack<float, N> &x, mt_pack<float, N> &dw,
                                             const mt_pack<float, N> &w, float offset, float rstd) {
    float sum = 0;
    for (int i = 0; i < N; i++) {
        x.value[i] *= rstd;
        dw.value[i] += d.value[i] * x.value[i];
        d.value[i] *= w.value[i] + offset;
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

/* dx = the norm's gradient of dy, rotated back. Reads dy and x, writes dx: 6 bytes per element in bf16, 12 in fp32. */
template <class T, int N, bool interleaved>
__global__ void __launch_bounds__(block_threads, 2) rotate_norm_backward(const heads_backward_task<T> task) {
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
        bool there = token < task.tokens, rotates = there && unit.angle >= 0;
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
        int64_t angle = rotates ? (int64_t)task.positions[token] * (task.R / 2) + unit.angle : 0;
        mt_pack<float, N> c = mt_load<N>(task.cos + angle, rotates), s = mt_load<N>(task.sin + angle, rotates);
#pragma unroll
        for (int k = 0; k < K; k++) {
            unsigned head = first + k * groups;
            mt_pack<float, N> d_low = mt_to_float(dy_low[k]), d_high = mt_to_float(dy_high[k]);
            mt_pack<float, N> n_low = mt_to_float(x_low[k]), n_high = mt_to_float(x_high[k]);
            if (rotates) rotate<N, interleaved>(d_low, d_high, c, s, -1);
            float sum = norm_products(d_low, n_low, dw_low, mt_to_float(w_low), task.offset, rstd[k]);
            sum += norm_products(d_high, n_high, dw_high, mt_to_float(w_high), task.offset, rstd[k]);
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

/* d, dy rotated back, becomes h = d rstd (w + offset), dw += d rstd x, and returns sum h x. */
template <class T, int N>
__device__ static inline float add_products(mt_pack<float, N> &d, mt_pack<float, N> &dw, const mt_pack<T, N> &x,
                                            const mt_pack<T, N> &w, float offset, float rstd) {
    float sum = 0;
    for (int i = 0; i < N; i++) {
        float in_x = mt_element(x, i);
        d.value[i] *= rstd;
        dw.value[i] += d.value[i] * in_x;
        d.value[i] *= mt_element(w, i) + offset;
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

/* The same for whole heads, as in rotate_whole_heads: a thread keeps its heads and walks along the tokens. With d =
 * rstd times dy rotated back, and h = d w: dw sums d x, and dx = h - x rstd^2 mean(h x). A token's position is loaded
 * one iteration ahead: the load of its angles depends on it. */
template <class T, int N, int D, bool interleaved, bool rotates>
__global__ void __launch_bounds__(whole_threads) rotate_whole_backward(const heads_backward_task<T> task) {
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
    int position = rotates && place < end ? task.positions[place] : 0;
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
        if (rotates) {
            c = mt_load<N>(cos + (int64_t)position * (D / 2)), s = mt_load<N>(sin + (int64_t)position * (D / 2));
            position = next < end ? task.positions[next] : 0;
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            low[k] = mt_to_float(dy_low[k]), high[k] = mt_to_float(dy_high[k]);
            if (rotates) rotate<N, interleaved>(low[k], high[k], c, s, -1);
            sums[k] = add_products(low[k], dw_low, x_low[k], w_low, task.offset, rstd[k]);
            sums[k] += add_products(high[k], dw_high, x_high[k], w_high, task.offset, rstd[k]);
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

/* True if a kernel for whole heads, rotated or only normalised, serves these. */
template <class T, int N, int D>
static bool launched_whole_backward(heads_backward_task<T> task, float *dq_w, float *dk_w, bool interleaved,
                                    mt_stream *stream) {
    if (task.D != D || (task.R != D && task.R != 0) || task.H % whole_heads != 0 || task.G % whole_heads != 0)
        return false;
    auto kernel = task.R == 0   ? rotate_whole_backward<T, N, D, false, false>
                  : interleaved ? rotate_whole_backward<T, N, D, true, true>
                                : rotate_whole_backward<T, N, D, false, true>;
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

/* The heads of q and of k get blocks in proportion to their number, so that both end together. */
template <class T, int N>
static void launch_norm_backward(heads_backward_task<T> task, float *dq_w, float *dk_w, bool interleaved,
                                 mt_stream *stream) {
    if constexpr (N > 1)
        if (launched_whole_backward<T, N, 128>(task, dq_w, dk_w, interleaved, stream) ||
            launched_whole_backward<T, N, 64>(task, dq_w, dk_w, interleaved, stream))
            return;
    int64_t heads = task.H + task.G, blocks = mt_cuda_device()->multiProcessorCount * 2ll;
    int64_t k_blocks = mt_divide_up(blocks * task.G, heads);
    task.lanes = (unsigned)lanes_of_head(task.D, task.R, N, true);
    task.q_blocks = (unsigned)(blocks - k_blocks);
    task.partial = (float *)mt_cuda_workspace(stream, blocks * task.D * (int64_t)sizeof(float));
    auto kernel = interleaved ? rotate_norm_backward<T, N, true> : rotate_norm_backward<T, N, false>;
    kernel<<<(unsigned)blocks, block_threads, 0, mt_cuda_stream(stream)>>>(task);
    MT_CUDA_LAUNCHED();
    mt_cuda_add_partials(dq_w, task.q_blocks, dk_w, k_blocks, task.partial, task.D, stream);
}

/* Rotates back, then the norm's backward, by their own kernels; only the rotation where there is no norm. */
static void qk_backward_apart(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_rope_args rope =
        rope_of(a, a->q_w ? a->dqk : a->dqkv, a->q_w ? a->dqk_stride : a->dqkv_stride, a->dqk, a->dqk_stride);
    launch_rope(&rope, -1, dtype, stream);
    for (int k = 0; k < 2 && a->q_w; k++) {
        mt_norm_args norm = norm_of(a, k, dtype);
        mt_cuda_rmsnorm_backward(&norm, dtype, stream);
    }
}

extern "C" void mt_cuda_qk_backward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    const mt_rotation *r = &a->rotation;
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->dqkv, a->dqk, a->qkv, a->q_w, a->k_w, r->cos, r->sin},
                        {a->dqkv_stride, a->dqk_stride, a->qkv_stride, a->D, r->R / 2});
    if (!a->q_w || !warp_holds_head(dtype, wide, a->D, r->R)) {
        qk_backward_apart(a, dtype, stream);
        return;
    }
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        heads_backward_task<E> task = {};
        task.dx = (E *)a->dqkv, task.dy = (const E *)a->dqk, task.x = (const E *)a->qkv;
        task.q_w = (const E *)a->q_w, task.k_w = (const E *)a->k_w, task.q_rstd = a->q_rstd, task.k_rstd = a->k_rstd;
        task.cos = r->cos, task.sin = r->sin, task.positions = r->positions, task.tokens = (unsigned)a->T;
        task.H = (unsigned)a->H, task.G = (unsigned)a->G, task.D = (int)a->D, task.R = (int)r->R;
        task.dx_stride = a->dqkv_stride, task.dy_stride = a->dqk_stride, task.x_stride = a->qkv_stride;
        task.offset = a->w_offset;
        launch_norm_backward<E, decltype(width)::value>(task, a->dq_w, a->dk_w, r->interleaved, stream);
    });
}

bool mt_cuda_heads_norm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    bool done = false;
    if (a->T == 0 || !mt_wide(dtype, {a->dx, a->dy, a->x, a->w}, {a->dx_stride, a->dy_stride, a->x_stride, a->C}))
        return false;
    mt_by_type(dtype, true, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        heads_backward_task<E> task = {};
        task.dx = (E *)a->dx, task.dy = (const E *)a->dy, task.x = (const E *)a->x;
        task.q_w = (const E *)a->w, task.q_rstd = a->rstd;
        task.tokens = (unsigned)a->T, task.H = (unsigned)a->H, task.D = (int)a->C;
        task.dx_stride = a->dx_stride, task.dy_stride = a->dy_stride, task.x_stride = a->x_stride;
        task.offset = a->w_offset;
        if constexpr (N > 1)
            done = launched_whole_backward<E, N, 128>(task, a->dw, NULL, false, stream) ||
                   launched_whole_backward<E, N, 64>(task, a->dw, NULL, false, stream);
    });
    return done;
}

/* ---- heads of latent attention ----------------------------------------------------------------------------------- */

/* A head is walked in packs of N elements; no pack spans two of the nope channels, the rope channels and the value. A
 * unit of a rotation is two packs, as above. */
template <class T> struct latent_task {
    T *q, *k, *v, *kv; // or their gradients
    const T *k_rope;
    T *dk_rope;
    const float *cos, *sin;
    const int32_t *positions;
    float direction;
    int64_t tokens, H;
    int nope, R, Dv; // channels
};

/* Rotates one unit of a query head's rope channels in place. */
template <class T, int N, bool interleaved>
__device__ static inline void rotate_latent_unit(const latent_task<T> &task, int64_t token, int64_t head, int unit) {
    const unit_place place = place_unit<N, interleaved>(unit, task.R, task.R);
    int64_t angle = (int64_t)task.positions[token] * (task.R / 2) + place.angle;
    T *q = task.q + (token * task.H + head) * (task.nope + task.R) + task.nope;
    mt_pack<float, N> low = mt_to_float(mt_load<N>(q + place.low)), high = mt_to_float(mt_load<N>(q + place.high));
    rotate<N, interleaved>(low, high, mt_load<N>(task.cos + angle), mt_load<N>(task.sin + angle), task.direction);
    mt_store(q + place.low, mt_from_float<T>(low));
    mt_store(q + place.high, mt_from_float<T>(high));
}

/* A thread has a pack of a head: first those of k and v, then the rope units of q. */
template <class T, int N, bool interleaved> __global__ void latent_heads(const latent_task<T> task) {
    const int nope = task.nope / N, rope = task.R / N, values = task.Dv / N, units = task.R / 2 / N;
    const int64_t each = nope + rope + values + units, count = task.tokens * task.H * each;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / each, token = row / task.H;
        int pack = (int)(i % each);
        T *k = task.k + row * (task.nope + task.R);
        const T *kv = task.kv + row * (task.nope + task.Dv);
        if (pack < nope)
            mt_store(k + pack * N, mt_load<N>(kv + pack * N));
        else if (pack < nope + rope)
            mt_store(k + pack * N, mt_load<N>(task.k_rope + token * task.R + (pack - nope) * N));
        else if (pack < nope + rope + values)
            mt_store(task.v + row * task.Dv + (pack - nope - rope) * N, mt_load<N>(kv + (pack - rope) * N));
        else
            rotate_latent_unit<T, N, interleaved>(task, token, row % task.H, pack - nope - rope - values);
    }
}

template <class T, int N, bool interleaved> __global__ void latent_heads_backward(const latent_task<T> task) {
    const int nope = task.nope / N, rope = task.R / N, values = task.Dv / N, units = task.R / 2 / N;
    const int64_t each = nope + values + units, heads = task.tokens * task.H * each, count = heads + task.tokens * rope;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        if (i >= heads) { // a pack of the key that all heads share: their sum, in their order
            int64_t token = (i - heads) / rope, channel = (i - heads) % rope * N;
            const T *dk = task.k + token * task.H * (task.nope + task.R) + task.nope + channel;
            mt_pack<float, N> sum = {};
            for (int64_t head = 0; head < task.H; head++, dk += task.nope + task.R) {
                mt_pack<float, N> part = mt_to_float(mt_load<N>(dk));
                for (int c = 0; c < N; c++) sum.value[c] += part.value[c];
            }
            mt_store(task.dk_rope + token * task.R + channel, mt_from_float<T>(sum));
            continue;
        }
        int64_t row = i / each;
        int pack = (int)(i % each);
        T *dkv = task.kv + row * (task.nope + task.Dv);
        if (pack < nope)
            mt_store(dkv + pack * N, mt_load<N>(task.k + row * (task.nope + task.R) + pack * N));
        else if (pack < nope + values)
            mt_store(dkv + pack * N, mt_load<N>(task.v + row * task.Dv + (pack - nope) * N));
        else
            rotate_latent_unit<T, N, interleaved>(task, row / task.H, row % task.H, pack - nope - values);
    }
}

template <class T, int N> static void launch_latent(latent_task<T> task, bool interleaved, cudaStream_t stream) {
    bool backward = task.direction < 0;
    auto kernel = interleaved ? backward ? latent_heads_backward<T, N, true> : latent_heads<T, N, true>
                  : backward ? latent_heads_backward<T, N, false>
                              : latent_heads<T, N, false>;
    int64_t packs = task.tokens * task.H * ((task.nope + 2 * task.R + task.Dv) / N + 1);
    kernel<<<mt_grid_size(packs, block_threads), block_threads, 0, stream>>>(task);
    MT_CUDA_LAUNCHED();
}

/* The values, or the gradients, of the operation's tensors. */
struct latent_tensors {
    void *q, *kv, *k_rope, *k, *v;
};

/* Both directions: the backward has gradients, and writes kv and k_rope. */
static void launch_latent_heads(const mt_latent_heads_args *a, const latent_tensors *x, float direction, mt_dtype dtype,
                                mt_stream *stream) {
    const mt_rotation *r = &a->rotation;
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {x->q, x->kv, x->k_rope, x->k, x->v, r->cos, r->sin}, {a->N, a->Dv, r->R / 2});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        latent_task<E> task = {};
        task.q = (E *)x->q, task.k = (E *)x->k, task.v = (E *)x->v, task.kv = (E *)x->kv;
        task.k_rope = task.dk_rope = (E *)x->k_rope;
        task.cos = r->cos, task.sin = r->sin, task.positions = r->positions, task.direction = direction;
        task.tokens = a->T, task.H = a->H, task.nope = (int)a->N, task.R = (int)r->R, task.Dv = (int)a->Dv;
        launch_latent<E, decltype(width)::value>(task, r->interleaved, mt_cuda_stream(stream));
    });
}

extern "C" void mt_cuda_latent_heads_forward(const mt_latent_heads_args *a, mt_dtype dtype, mt_stream *stream) {
    latent_tensors x = {a->q, (void *)a->kv, (void *)a->k_rope, a->k, a->v};
    launch_latent_heads(a, &x, 1, dtype, stream);
}

extern "C" void mt_cuda_latent_heads_backward(const mt_latent_heads_args *a, mt_dtype dtype, mt_stream *stream) {
    latent_tensors x = {a->dq, a->dkv, a->dk_rope, (void *)a->dk, (void *)a->dv};
    launch_latent_heads(a, &x, -1, dtype, stream);
}

/* ---- queries scaled by their position ---------------------------------------------------------------------------- */

/* x *= 1 + beta log(1 + position / context). Reads and writes x: 4 bytes per element in bf16, 8 in fp32. */
template <class T, int N>
__global__ void position_scale(T *x, const int32_t *positions, int64_t tokens, int width, int64_t stride, float beta,
                               int32_t context, int blocks_per_row) {
    int64_t row = (int64_t)(blockIdx.x / blocks_per_row) * blockDim.y + threadIdx.y;
    int c = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * N;
    if (row >= tokens || c >= width) return;
    float scale = 1 + beta * logf((float)(1 + positions[row] / context));
    mt_pack<float, N> pack = mt_to_float(mt_load<N>(x + row * stride + c));
    for (int i = 0; i < N; i++) pack.value[i] *= scale;
    mt_store(x + row * stride + c, mt_from_float<T>(pack));
}

extern "C" void mt_cuda_position_scale(const mt_position_scale_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {a->x}, {a->width, a->x_stride}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_many_row_grid grid = mt_many_rows(a->T, mt_divide_up(a->width, N), 1);
        position_scale<E, N><<<grid.blocks, grid.block, 0, mt_cuda_stream(stream)>>>(
            (E *)a->x, a->positions, a->T, (int)a->width, a->x_stride, (float)a->beta, (int32_t)a->context,
            grid.blocks_per_row);
        MT_CUDA_LAUNCHED();
    });
}
