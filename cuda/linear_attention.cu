/* linear_attention.cu: what stands around the recurrences of linear attention: short convolutions, the gated norm,
 * gates and products. All are memory-bound. The delta rule is in delta_rule.cu. */
#include "linear_attention.cuh"

/* ---- chunks ------------------------------------------------------------------------------------------------------ */

int64_t mt_cuda_chunk_count(const mt_spans *spans, int64_t begin, int64_t end) {
    int64_t chunks = 0, longest = 0;
    for (int64_t s = begin; s < end; s++) {
        chunks += mt_divide_up(spans->host[s].q_len, MT_CHUNK_TOKENS);
        if (spans->host[s].q_len > longest) longest = spans->host[s].q_len;
    }
    return longest <= MT_CHUNK_TOKENS ? end - begin : chunks;
}

int64_t mt_cuda_chunk_bytes(int64_t chunks, int64_t spans) {
    return mt_divide_up(chunks * (int64_t)sizeof(int2) + spans * (int64_t)sizeof(int), 256) * 256;
}

/* A thread per span. All of a warp read the same spans before their own at a time. */
static __global__ void list_chunks(const mt_span *spans, int count, int2 *table, int *first) {
    int s = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    mt_wait_for_previous();
    if (s >= count) return;
    int64_t begin = 0;
    for (int i = 0; i < s; i++) begin += (spans[i].q_len + MT_CHUNK_TOKENS - 1) / MT_CHUNK_TOKENS;
    int64_t chunks = (spans[s].q_len + MT_CHUNK_TOKENS - 1) / MT_CHUNK_TOKENS;
    first[s] = (int)begin;
    for (int64_t n = 0; n < chunks; n++) table[begin + n] = make_int2(s, (int)n);
}

mt_chunks mt_cuda_chunks(const mt_spans *spans, int64_t begin, int64_t end, void *memory, mt_stream *stream) {
    mt_chunks chunks = {spans->device + begin, NULL, NULL, mt_cuda_chunk_count(spans, begin, end)};
    bool one_each = true;
    for (int64_t s = begin; s < end; s++) one_each &= spans->host[s].q_len <= MT_CHUNK_TOKENS;
    if (one_each) return chunks;
    int2 *table = (int2 *)memory;
    int *first = (int *)(table + chunks.count);
    mt_launch_early(list_chunks, dim3(mt_grid_size(end - begin, 128)), dim3(128), 0, mt_cuda_stream(stream),
                    chunks.spans, (int)(end - begin), table, first);
    chunks.table = table, chunks.first = first;
    return chunks;
}

/* ---- short convolution ------------------------------------------------------------------------------------------- */

/* A thread computes N channels of 16 neighbouring tokens, with a window of the tokens before in registers. With lag
 * l = K - 1 - j, y[t] = f(bias + sum over l of w[l] x[t - l]); taps from K on are zeros. */
enum { CONV_TOKENS = 16, CONV_LANES = 64, CONV_GROUPS = MT_CHUNK_TOKENS / CONV_TOKENS, CONV_AT_ONCE = 4 };

template <class T> struct conv_task {
    const T *x, *w, *bias, *dy;
    T *y, *dx;
    int64_t x_stride, y_stride, dx_stride, dy_stride;
    int C, K, channel_blocks;
    bool silu, keeps; // keeps: a thread has all tokens of a span, and leaves its state
    mt_chunks chunks;
    mt_device_states states;
    float *partial; // of the backward: [blocks, C, K], then [blocks, C] of the bias; NULL: frozen
};

template <class T> static conv_task<T> conv_task_of(const mt_conv_args *a) {
    conv_task<T> task = {};
    task.x = (const T *)a->x, task.w = (const T *)a->w, task.bias = (const T *)a->bias, task.dy = (const T *)a->dy;
    task.y = (T *)a->y, task.dx = (T *)a->dx, task.C = (int)a->C, task.K = (int)a->K, task.silu = a->silu;
    task.x_stride = a->x_stride, task.y_stride = a->y_stride;
    task.dx_stride = a->dx_stride, task.dy_stride = a->dy_stride;
    task.states = mt_states_on_device(&a->states, a->dstates, (a->K - 1) * a->C, 0);
    return task;
}

template <int N, int TAPS> struct conv_taps {
    float w[TAPS][N], bias[N];
    template <class T> __device__ void load(const conv_task<T> &task, int c) {
        for (int i = 0; i < N; i++) {
            bias[i] = task.bias ? mt_to_float(task.bias[c + i]) : 0;
#pragma unroll
            for (int l = 0; l < TAPS; l++)
                w[l][i] = l < task.K ? mt_to_float(task.w[(int64_t)(c + i) * task.K + task.K - 1 - l]) : 0;
        }
    }
    __device__ void sum(float (&sums)[N], const float (&window)[TAPS][N]) const {
        for (int i = 0; i < N; i++) {
            sums[i] = bias[i];
#pragma unroll
            for (int l = TAPS - 1; l >= 0; l--) sums[i] += w[l][i] * window[l][i];
        }
    }
};

/* Moves a window on by a token. */
template <int N, int TAPS> __device__ static inline void conv_push(float (&window)[TAPS][N], const float (&newest)[N]) {
    for (int i = 0; i < N; i++) {
#pragma unroll
        for (int l = TAPS - 1; l > 0; l--) window[l][i] = window[l - 1][i];
        window[0][i] = newest[i];
    }
}

/* window[l - 1] = row begin - l of a span, of x or of the state before it, for the lags 1 to K - 1; else zeros. */
template <int N, int TAPS, class T>
__device__ static inline void conv_open(float (&window)[TAPS][N], const conv_task<T> &task, const mt_span &span,
                                        const float *before, int64_t begin, int c) {
#pragma unroll
    for (int l = 1; l <= TAPS; l++) {
        int64_t row = begin - l;
        bool counts = l < task.K;
        mt_pack<float, N> pack =
            mt_to_float(mt_load<N>(task.x + (span.q_start + row) * task.x_stride + c, counts && row >= 0));
        for (int i = 0; i < N; i++)
            window[l - 1][i] =
                counts && row < 0 && before ? before[(task.K - 1 + row) * task.C + c + i] : pack.value[i];
    }
}

template <class T, int N, int TAPS>
__global__ void __launch_bounds__(CONV_LANES *CONV_GROUPS) conv_forward(const conv_task<T> task) {
    int c = (int)(blockIdx.x % task.channel_blocks * CONV_LANES + threadIdx.x) * N;
    mt_wait_for_previous();
    mt_chunk chunk = mt_chunk_of(task.chunks, blockIdx.x / task.channel_blocks);
    int64_t begin = chunk.row + (int64_t)threadIdx.y * CONV_TOKENS, last = chunk.row + chunk.L;
    int64_t end = begin + CONV_TOKENS < last ? begin + CONV_TOKENS : last;
    if (c >= task.C || begin >= end) return;
    const float *before = task.states.before(chunk.span, chunk.s);
    float window[TAPS][N];
    conv_taps<N, TAPS> taps;
    taps.load(task, c);
    conv_open(window, task, chunk.span, before, begin, c);
    for (int64_t first = begin; first < end; first += CONV_AT_ONCE) {
        mt_pack<T, N> packs[CONV_AT_ONCE];
#pragma unroll
        for (int n = 0; n < CONV_AT_ONCE; n++)
            packs[n] = mt_load<N>(task.x + (chunk.span.q_start + first + n) * task.x_stride + c, first + n < end);
#pragma unroll
        for (int n = 0; n < CONV_AT_ONCE; n++) {
            if (first + n >= end) break;
            mt_pack<float, N> x = mt_to_float(packs[n]), y;
            conv_push(window, x.value);
            taps.sum(y.value, window);
            for (int i = 0; i < N && task.silu; i++) y.value[i] = silu::value(y.value[i]);
            mt_store(task.y + (chunk.span.q_start + first + n) * task.y_stride + c, mt_from_float<T>(y));
        }
    }
    float *kept = task.keeps ? task.states.kept(chunk.span) : NULL;
    if (!kept) return;
#pragma unroll
    for (int l = 0; l < TAPS; l++)
        for (int i = 0; i < N && l < task.K - 1; i++) kept[(int64_t)(task.K - 2 - l) * task.C + c + i] = window[l][i];
}

/* The state after a span of one slot: the last rows of the state before it and of x. The two states may be one. */
template <class T>
__device__ static inline void conv_keep_channel(float *after, const conv_task<T> &task, const mt_span &span,
                                                const float *before, int c) {
    for (int j = 0; j < task.K - 1; j++) { // ascending: a row of the state moves towards the first
        int64_t row = span.q_len - (task.K - 1 - j);
        float x = row >= 0 ? mt_to_float(task.x[(span.q_start + row) * task.x_stride + c])
                  : before ? before[(task.K - 1 + row) * task.C + c]
                           : 0;
        after[(int64_t)j * task.C + c] = x;
    }
}

/* States after all spans, behind conv_forward. */
template <class T> __global__ void conv_keep(const conv_task<T> task) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    mt_wait_for_previous();
    mt_span span = task.chunks.spans[blockIdx.y];
    float *kept = task.states.kept(span);
    if (c < task.C && kept) conv_keep_channel(kept, task, span, task.states.before(span, blockIdx.y), c);
}

/* Calls body(T(), mt_width<N>(), mt_width<TAPS>()). */
template <class Body> static void by_taps(const mt_conv_args *a, mt_dtype dtype, bool wide, Body body) {
    MT_CHECK(a->K >= 1 && a->K <= MT_MAX_TAPS);
    auto of_type = [&](auto type) {
        if (a->K <= 4 && wide)
            body(type, mt_width<4>(), mt_width<4>());
        else if (a->K <= 4)
            body(type, mt_width<1>(), mt_width<4>());
        else
            body(type, mt_width<1>(), mt_width<8>());
    };
    mt_by_type(dtype, of_type);
}

/* True if packs of 4 elements can be loaded everywhere. */
static bool has_packs(mt_dtype dtype, std::initializer_list<const void *> addresses,
                      std::initializer_list<int64_t> lengths) {
    for (const void *address : addresses)
        if ((uintptr_t)address % (4 * mt_dtype_size(dtype)) != 0) return false;
    for (int64_t length : lengths)
        if (length % 4 != 0) return false;
    return true;
}

extern "C" void mt_cuda_short_conv_forward(const mt_conv_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t longest = mt_longest_span(a->spans), spans = a->spans->count;
    if (spans == 0 || longest == 0) return;
    bool has_states = a->states.memory && !a->states.first;
    int64_t bytes = mt_cuda_chunk_bytes(mt_cuda_chunk_count(a->spans, 0, spans), spans);
    mt_chunks chunks = mt_cuda_chunks(a->spans, 0, spans, mt_cuda_workspace(stream, bytes), stream);
    bool wide = has_packs(dtype, {a->x, a->y}, {a->C, a->x_stride, a->y_stride});
    by_taps(a, dtype, wide, [&](auto type, auto width, auto taps) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        conv_task<E> task = conv_task_of<E>(a);
        task.chunks = chunks, task.keeps = has_states && longest <= CONV_TOKENS;
        task.channel_blocks = (int)mt_divide_up(a->C, N * CONV_LANES);
        mt_launch_early(conv_forward<E, N, decltype(taps)::value>, dim3((unsigned)(task.channel_blocks * chunks.count)),
                        dim3(CONV_LANES, longest <= CONV_TOKENS ? 1 : CONV_GROUPS), 0, mt_cuda_stream(stream), task);
        if (has_states && !task.keeps)
            mt_launch_early(conv_keep<E>, dim3(mt_grid_size(a->C, 128), (unsigned)spans), dim3(128), 0,
                            mt_cuda_stream(stream), task);
    });
}

/* A block takes every gridDim.y-th chunk. A thread computes d, the gradients of the sums, of its tokens and of those
 * just behind, which read its tokens too. */
template <class T, int N, int TAPS>
__global__ void __launch_bounds__(CONV_LANES *CONV_GROUPS) conv_backward(const conv_task<T> task) {
    __shared__ float sums[CONV_GROUPS - 1][(TAPS + 1) * N][CONV_LANES];
    int c = (int)(blockIdx.x * CONV_LANES + threadIdx.x) * N;
    float dw[TAPS][N] = {}, dbias[N] = {};
    conv_taps<N, TAPS> taps;
    mt_wait_for_previous();
    if (c < task.C) taps.load(task, c);
    for (int64_t at = blockIdx.y; at < task.chunks.count && c < task.C; at += gridDim.y) {
        mt_chunk chunk = mt_chunk_of(task.chunks, at);
        const mt_span &span = chunk.span;
        int64_t begin = chunk.row + (int64_t)threadIdx.y * CONV_TOKENS, last = chunk.row + chunk.L;
        int64_t end = begin + CONV_TOKENS < last ? begin + CONV_TOKENS : last;
        if (begin >= end) continue;
        const float *before = task.states.before(span, chunk.s), *after = task.states.gradient_after(chunk.s);
        float window[TAPS][N], later[TAPS][N] = {}; // of x, and of d
        conv_open(window, task, span, before, begin, c);
        for (int64_t first = begin; first < end + TAPS - 1; first += CONV_AT_ONCE) {
            mt_pack<T, N> xs[CONV_AT_ONCE], dys[CONV_AT_ONCE];
#pragma unroll
            for (int n = 0; n < CONV_AT_ONCE; n++) {
                int64_t t = first + n;
                bool exists = t < end + TAPS - 1 && t < span.q_len;
                xs[n] = mt_load<N>(task.x + (span.q_start + t) * task.x_stride + c, exists);
                dys[n] = mt_load<N>(task.dy + (span.q_start + t) * task.dy_stride + c, exists);
            }
#pragma unroll
            for (int n = 0; n < CONV_AT_ONCE; n++) {
                int64_t t = first + n, row = t - (TAPS - 1);
                if (t >= end + TAPS - 1) break;
                mt_pack<float, N> x = mt_to_float(xs[n]), d = mt_to_float(dys[n]), dx;
                conv_push(window, x.value);
                if (task.silu) {
                    taps.sum(dx.value, window);
                    for (int i = 0; i < N; i++) d.value[i] *= t < span.q_len ? silu::slope(dx.value[i]) : 1;
                }
                if (t < end)
                    for (int i = 0; i < N; i++) {
                        dbias[i] += d.value[i];
#pragma unroll
                        for (int l = 0; l < TAPS; l++) dw[l][i] += d.value[i] * window[l][i];
                    }
                conv_push(later, d.value);
                if (row < begin) continue;
                int64_t kept = row - span.q_len + task.K - 1; // its row in the state after the span
                for (int i = 0; i < N; i++) {
                    dx.value[i] = after && kept >= 0 ? after[kept * task.C + c + i] : 0;
#pragma unroll
                    for (int l = 0; l < TAPS; l++) dx.value[i] += taps.w[l][i] * later[TAPS - 1 - l][i];
                }
                mt_store(task.dx + (span.q_start + row) * task.dx_stride + c, mt_from_float<T>(dx));
            }
        }
    }
    if (!task.partial) return;
    for (int i = 0; i < N && threadIdx.y > 0; i++) {
#pragma unroll
        for (int l = 0; l < TAPS; l++) sums[threadIdx.y - 1][l * N + i][threadIdx.x] = dw[l][i];
        sums[threadIdx.y - 1][TAPS * N + i][threadIdx.x] = dbias[i];
    }
    __syncthreads();
    if (threadIdx.y > 0 || c >= task.C) return;
    float *of_bias = task.partial + (int64_t)gridDim.y * task.C * task.K;
    for (int i = 0; i < N; i++) {
        for (int y = 0; y < (int)blockDim.y - 1; y++) {
#pragma unroll
            for (int l = 0; l < TAPS; l++) dw[l][i] += sums[y][l * N + i][threadIdx.x];
            dbias[i] += sums[y][TAPS * N + i][threadIdx.x];
        }
        of_bias[(int64_t)blockIdx.y * task.C + c + i] = dbias[i];
#pragma unroll
        for (int l = 0; l < TAPS; l++)
            if (l < task.K) task.partial[((int64_t)blockIdx.y * task.C + c + i) * task.K + task.K - 1 - l] = dw[l][i];
    }
}

extern "C" void mt_cuda_short_conv_backward(const mt_conv_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t longest = mt_longest_span(a->spans), spans = a->spans->count;
    if (spans == 0 || longest == 0) return;
    int64_t bytes = mt_cuda_chunk_bytes(mt_cuda_chunk_count(a->spans, 0, spans), spans);
    char *workspace = (char *)mt_cuda_workspace(stream, bytes);
    mt_chunks chunks = mt_cuda_chunks(a->spans, 0, spans, workspace, stream);
    bool wide = has_packs(dtype, {a->x, a->dy, a->dx}, {a->C, a->x_stride, a->dy_stride, a->dx_stride});
    by_taps(a, dtype, wide, [&](auto type, auto width, auto taps) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        conv_task<E> task = conv_task_of<E>(a);
        int64_t channel_blocks = mt_divide_up(a->C, N * CONV_LANES);
        int64_t blocks = mt_divide_up(8ll * mt_cuda_device()->multiProcessorCount, channel_blocks);
        int64_t room = (stream->workspace_bytes - bytes) / (a->C * (a->K + 1) * (int64_t)sizeof(float));
        if (blocks > room) blocks = room;
        if (blocks > chunks.count) blocks = chunks.count;
        MT_CHECK(blocks > 0);
        task.chunks = chunks;
        if (a->dw || a->dbias) task.partial = (float *)(workspace + bytes);
        mt_launch_early(conv_backward<E, N, decltype(taps)::value>, dim3((unsigned)channel_blocks, (unsigned)blocks),
                        dim3(CONV_LANES, longest <= CONV_TOKENS ? 1 : CONV_GROUPS), 0, mt_cuda_stream(stream), task);
        mt_cuda_add_partials(a->dw, blocks, NULL, 0, task.partial, a->C * a->K, stream);
        mt_cuda_add_partials(a->dbias, blocks, NULL, 0, task.partial + blocks * a->C * a->K, a->C, stream);
    });
}

/* States of context parallelism: a thread per channel. */

template <class T>
__global__ void conv_carry_forward(const conv_task<T> task, const mt_span span, const float *before, float *after) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    mt_wait_for_previous();
    if (c < task.C) conv_keep_channel(after, task, span, before, c);
}

template <class T>
__global__ void conv_carry_backward(const conv_task<T> task, const mt_span span, int64_t s, const float *dafter,
                                    float *dbefore) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x), K = task.K;
    mt_wait_for_previous();
    if (c >= task.C) return;
    const float *before = task.states.before(span, s);
    conv_taps<1, MT_MAX_TAPS> taps;
    float window[MT_MAX_TAPS][1], d[MT_MAX_TAPS - 1]; // d: of the first tokens
    taps.load(task, c);
    conv_open(window, task, span, before, 0, c);
#pragma unroll
    for (int t = 0; t < MT_MAX_TAPS - 1; t++) {
        bool exists = t < K - 1 && t < span.q_len;
        d[t] = exists ? mt_to_float(task.dy[(span.q_start + t) * task.dy_stride + c]) : 0;
        float x[1] = {exists ? mt_to_float(task.x[(span.q_start + t) * task.x_stride + c]) : 0}, sum[1];
        conv_push(window, x);
        taps.sum(sum, window);
        if (exists && task.silu) d[t] *= silu::slope(sum[0]);
    }
    for (int row = 1 - K; row < 0; row++) {
        int64_t later = row - span.q_len + K - 1;
        float dx = dafter && later >= 0 ? dafter[later * task.C + c] : 0;
#pragma unroll
        for (int l = 1; l < MT_MAX_TAPS; l++)
#pragma unroll
            for (int t = 0; t < MT_MAX_TAPS - 1; t++) dx += t - l == row ? taps.w[l][0] * d[t] : 0;
        dbefore[(int64_t)(K - 1 + row) * task.C + c] = dx;
    }
}

template <class T>
static void launch_carry(const mt_conv_args *a, const mt_carried_state *state, bool backward, mt_stream *stream) {
    bool crosses = mt_slot_crosses(&a->states, state->slot);
    int64_t s = (backward ? a->states.first : a->states.last)[state->slot];
    dim3 grid(mt_grid_size(a->C, 128)), block(128);
    conv_task<T> task = conv_task_of<T>(a);
    MT_CHECK(a->K <= MT_MAX_TAPS);
    if (backward)
        mt_launch_early(conv_carry_backward<T>, grid, block, 0, mt_cuda_stream(stream), task, a->spans->host[s], s,
                        crosses ? state->in : NULL, state->out);
    else
        mt_launch_early(conv_carry_forward<T>, grid, block, 0, mt_cuda_stream(stream), task, a->spans->host[s],
                        crosses ? state->in : NULL, state->out);
}

extern "C" void mt_cuda_short_conv_carry_forward(const mt_conv_args *a, const mt_carried_state *state, mt_dtype dtype,
                                                 mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, launch_carry, a, state, false, stream);
}

extern "C" void mt_cuda_short_conv_carry_backward(const mt_conv_args *a, const mt_carried_state *state, mt_dtype dtype,
                                                  mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, launch_carry, a, state, true, stream);
}

/* ---- gated norm -------------------------------------------------------------------------------------------------- */

/* blockDim.x threads, a power of two up to 32, share a row of D channels; a thread keeps PACKS packs of it. */
enum { NORM_PACKS = 8, NORM_THREADS = 256 };

template <class T> struct gated_norm_task {
    int64_t rows;
    int H, D;
    int64_t z_stride, dz_stride;
    float eps;
    bool sigmoid; // the gate; else SiLU
    const T *x, *z, *w, *dy;
    T *y, *dx, *dz;
    float *rstd, *partial; // partial: [blocks, D], or [blocks, H, D], of the backward; NULL: frozen
    const float *means;    // see mt_gated_norm_args

    __device__ float gate(float value) const {
        return sigmoid ? ::sigmoid(value) : silu::value(value);
    }
    __device__ float slope(float value) const {
        float s = ::sigmoid(value);
        return sigmoid ? s * (1 - s) : silu::slope(value);
    }
};

__device__ static inline float sum_of_row(float sum) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        float other = __shfl_xor_sync(0xffffffff, sum, lane);
        sum += lane < blockDim.x ? other : 0; // otherwise `other` belongs to another row
    }
    return sum;
}

template <class T, int N> __global__ void __launch_bounds__(NORM_THREADS) gated_norm_forward(gated_norm_task<T> task) {
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    bool valid = row < task.rows;
    mt_wait_for_previous();
    const T *x = task.x + row * task.D, *z = task.z + row / task.H * task.z_stride + row % task.H * task.D;
    mt_pack<T, N> packs[NORM_PACKS], gates[NORM_PACKS];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < NORM_PACKS; k++) {
        int c = (int)(k * blockDim.x + threadIdx.x) * N;
        packs[k] = mt_load<N>(x + c, valid && c < task.D), gates[k] = mt_load<N>(z + c, valid && c < task.D);
    }
#pragma unroll
    for (int k = 0; k < NORM_PACKS; k++)
        for (int i = 0; i < N; i++) sum += mt_element(packs[k], i) * mt_element(packs[k], i);
    float rstd = 1 / sqrtf(sum_of_row(sum) / (float)task.D + task.eps);
    if (!valid) return;
    if (threadIdx.x == 0) task.rstd[row] = rstd;
#pragma unroll
    for (int k = 0; k < NORM_PACKS; k++) {
        int c = (int)(k * blockDim.x + threadIdx.x) * N;
        if (c >= task.D) break;
        mt_pack<float, N> w = mt_to_float(mt_load<N>(task.w + c)), y;
        for (int i = 0; i < N; i++)
            y.value[i] = mt_element(packs[k], i) * rstd * w.value[i] * task.gate(mt_element(gates[k], i));
        mt_store(task.y + row * task.D + c, mt_from_float<T>(y));
    }
}

/* With n = x rstd and g = dy w gate(z), dx = rstd (g - n mean(g n)). A block takes neighbouring rows, and leaves the
 * sum of dy n gate(z) over them. */
template <class T, int N>
__global__ void __launch_bounds__(NORM_THREADS) gated_norm_backward(gated_norm_task<T> task, int64_t rows_per_block) {
    extern __shared__ float of_rows[]; // [blockDim.y, D]
    int64_t begin = blockIdx.x * rows_per_block;
    int64_t end = begin + rows_per_block < task.rows ? begin + rows_per_block : task.rows;
    float dw[NORM_PACKS][N] = {};
    mt_wait_for_previous();
    for (int64_t first = begin; first < end; first += blockDim.y) {
        int64_t row = first + threadIdx.y;
        bool valid = row < end;
        int64_t head = row % task.H * task.D, z_row = row / task.H * task.z_stride + head;
        float rstd = valid ? task.rstd[row] : 0, dot = 0;
        mt_pack<T, N> xs[NORM_PACKS], zs[NORM_PACKS], dys[NORM_PACKS];
#pragma unroll
        for (int k = 0; k < NORM_PACKS; k++) {
            int c = (int)(k * blockDim.x + threadIdx.x) * N;
            bool exists = valid && c < task.D;
            xs[k] = mt_load<N>(task.x + row * task.D + c, exists), zs[k] = mt_load<N>(task.z + z_row + c, exists);
            dys[k] = mt_load<N>(task.dy + row * task.D + c, exists);
        }
#pragma unroll
        for (int k = 0; k < NORM_PACKS; k++) {
            int c = (int)(k * blockDim.x + threadIdx.x) * N;
            if (c >= task.D) break;
            mt_pack<float, N> w = mt_to_float(mt_load<N>(task.w + c));
            for (int i = 0; i < N; i++) {
                float open = mt_element(dys[k], i) * task.gate(mt_element(zs[k], i)), x = mt_element(xs[k], i);
                dot += open * w.value[i] * x;
                dw[k][i] += valid ? open * x * rstd : 0;
            }
        }
        float projection = sum_of_row(dot) * rstd * rstd / (float)task.D;
        if (!valid) continue;
        int64_t dz_row = row / task.H * task.dz_stride + head;
#pragma unroll
        for (int k = 0; k < NORM_PACKS; k++) {
            int c = (int)(k * blockDim.x + threadIdx.x) * N;
            if (c >= task.D) break;
            mt_pack<float, N> w = mt_to_float(mt_load<N>(task.w + c)), dx, dz;
            for (int i = 0; i < N; i++) {
                float x = mt_element(xs[k], i), z = mt_element(zs[k], i), d = mt_element(dys[k], i) * w.value[i];
                dx.value[i] = rstd * (d * task.gate(z) - x * projection);
                dz.value[i] = d * x * rstd * task.slope(z);
            }
            mt_store(task.dx + row * task.D + c, mt_from_float<T>(dx));
            mt_store(task.dz + dz_row + c, mt_from_float<T>(dz));
        }
    }
    if (!task.partial) return;
#pragma unroll
    for (int k = 0; k < NORM_PACKS; k++) {
        int c = (int)(k * blockDim.x + threadIdx.x) * N;
        for (int i = 0; i < N && c < task.D; i++) of_rows[threadIdx.y * task.D + c + i] = dw[k][i];
    }
    __syncthreads();
    for (int c = (int)(threadIdx.y * blockDim.x + threadIdx.x); c < task.D; c += (int)(blockDim.x * blockDim.y)) {
        float sum = 0;
        for (int y = 0; y < (int)blockDim.y; y++) sum += of_rows[y * task.D + c];
        task.partial[(int64_t)blockIdx.x * task.D + c] = sum;
    }
}

/* The mean of u^2 over a group of heads, or with dy of dy w u, where u = x silu(z). All threads of a block call it; for
 * `buffer` see mt_row_sum. */
template <class T, int N>
__device__ static inline float mean_of_group(const gated_norm_task<T> &task, const T *dy, int64_t row, int buffer) {
    int64_t head = row % task.H * task.D;
    const T *z = task.z + row / task.H * task.z_stride + head;
    float sum[1] = {0};
    for (int c = (int)threadIdx.x * N; c < task.D; c += (int)blockDim.x * N) {
        mt_pack<T, N> xs = mt_load<N>(task.x + row * task.D + c), zs = mt_load<N>(z + c), dys, ws;
        if (dy) dys = mt_load<N>(dy + row * task.D + c), ws = mt_load<N>(task.w + head + c);
        for (int i = 0; i < N; i++) {
            float u = mt_element(xs, i) * silu::value(mt_element(zs, i));
            sum[0] += dy ? mt_element(dys, i) * mt_element(ws, i) * u : u * u;
        }
    }
    mt_row_sum(sum, buffer);
    return sum[0] / (float)task.D;
}

template <class T, int N>
__global__ void __launch_bounds__(NORM_THREADS) group_norm_means(gated_norm_task<T> task, float *means) {
    mt_wait_for_previous();
    float mean = mean_of_group<T, N>(task, task.dy, blockIdx.x, 0);
    if (threadIdx.x == 0) means[blockIdx.x] = mean;
}

/* The norm of a group of heads, behind the gate: a block per row. */
template <class T, int N> __global__ void __launch_bounds__(NORM_THREADS) group_norm_forward(gated_norm_task<T> task) {
    int64_t row = blockIdx.x, head = row % task.H * task.D;
    mt_wait_for_previous();
    const T *x = task.x + row * task.D, *z = task.z + row / task.H * task.z_stride + head, *w = task.w + head;
    float mean = task.means ? task.means[row] : mean_of_group<T, N>(task, nullptr, row, 0);
    float rstd = 1 / sqrtf(mean + task.eps);
    if (threadIdx.x == 0) task.rstd[row] = rstd;
    for (int c = (int)threadIdx.x * N; c < task.D; c += (int)blockDim.x * N) {
        mt_pack<T, N> values = mt_load<N>(x + c), gates = mt_load<N>(z + c);
        mt_pack<float, N> y = mt_to_float(mt_load<N>(w + c));
        for (int i = 0; i < N; i++) y.value[i] *= mt_element(values, i) * silu::value(mt_element(gates, i)) * rstd;
        mt_store(task.y + row * task.D + c, mt_from_float<T>(y));
    }
}

/* With u = x silu(z) and g = dy w, du = rstd (g - u rstd^2 mean(g u)), dx = du silu(z), dz = du x silu'(z). A block
 * takes one group of neighbouring tokens, and leaves the sum of dy u rstd over them. */
template <class T, int N>
__global__ void __launch_bounds__(NORM_THREADS) group_norm_backward(gated_norm_task<T> task, int64_t tokens_per_block) {
    extern __shared__ float of_rows[]; // [D]; a thread has channels of its own
    int64_t tokens = task.rows / task.H, begin = blockIdx.x * tokens_per_block, head = (int64_t)blockIdx.y * task.D;
    int64_t end = begin + tokens_per_block < tokens ? begin + tokens_per_block : tokens;
    mt_wait_for_previous();
    const T *w = task.w + head;
    for (int c = (int)threadIdx.x * N; c < task.D; c += (int)blockDim.x * N)
        for (int i = 0; i < N; i++) of_rows[c + i] = 0;
    for (int64_t token = begin; token < end; token++) {
        int64_t row = token * task.H + blockIdx.y, z_row = token * task.z_stride + head;
        int64_t dz_row = token * task.dz_stride + head;
        float rstd = task.rstd[row];
        float mean = task.means ? task.means[row] : mean_of_group<T, N>(task, task.dy, row, (int)(token % 2));
        float projection = mean * rstd * rstd;
        for (int c = (int)threadIdx.x * N; c < task.D; c += (int)blockDim.x * N) {
            mt_pack<T, N> xs = mt_load<N>(task.x + row * task.D + c), zs = mt_load<N>(task.z + z_row + c);
            mt_pack<T, N> dys = mt_load<N>(task.dy + row * task.D + c), scales = mt_load<N>(w + c);
            mt_pack<float, N> dx, dz;
            for (int i = 0; i < N; i++) {
                float x = mt_element(xs, i), z = mt_element(zs, i), dy = mt_element(dys, i), open = silu::value(z);
                float du = rstd * (dy * mt_element(scales, i) - x * open * projection);
                dx.value[i] = du * open, dz.value[i] = du * x * silu::slope(z);
                of_rows[c + i] += dy * x * open * rstd;
            }
            mt_store(task.dx + row * task.D + c, mt_from_float<T>(dx));
            mt_store(task.dz + dz_row + c, mt_from_float<T>(dz));
        }
    }
    if (!task.partial) return;
    for (int c = (int)threadIdx.x * N; c < task.D; c += (int)blockDim.x * N)
        for (int i = 0; i < N; i++) task.partial[(blockIdx.x * task.H + blockIdx.y) * task.D + c + i] = of_rows[c + i];
}

template <class T> static gated_norm_task<T> gated_norm_task_of(const mt_gated_norm_args *a) {
    gated_norm_task<T> task = {a->T * a->H, (int)a->H, (int)a->D, a->z_stride, a->dz_stride, a->eps, a->sigmoid};
    task.x = (const T *)a->x, task.z = (const T *)a->z, task.w = (const T *)a->w, task.dy = (const T *)a->dy;
    task.y = (T *)a->y, task.dx = (T *)a->dx, task.dz = (T *)a->dz, task.rstd = a->rstd, task.means = a->means;
    return task;
}

static dim3 gated_norm_block(int64_t packs) {
    MT_CHECK(packs <= 32 * NORM_PACKS);
    return mt_reduction_block(packs, 1, NORM_THREADS, 32);
}

/* Calls body(T(), mt_width<N>()). */
template <class Body> static void by_packs(mt_dtype dtype, bool wide, Body body) {
    mt_by_type(dtype, [&](auto type) {
        if (wide)
            body(type, mt_width<4>());
        else
            body(type, mt_width<1>());
    });
}

static dim3 group_norm_block(int64_t packs) {
    int64_t threads = mt_divide_up(packs, 32) * 32;
    return dim3((unsigned)(threads < NORM_THREADS ? threads : NORM_THREADS));
}

static void run_group_norm_forward(const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_by_type(dtype, mt_wide(dtype, {a->x, a->z, a->w, a->y}, {a->D, a->z_stride}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_launch_early(group_norm_forward<E, N>, dim3((unsigned)(a->T * a->H)),
                        group_norm_block(mt_divide_up(a->D, N)), 0, mt_cuda_stream(stream), gated_norm_task_of<E>(a));
    });
}

static void run_group_norm_backward(const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    bool wide = mt_wide(dtype, {a->x, a->z, a->w, a->dy, a->dx, a->dz}, {a->D, a->z_stride, a->dz_stride});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        gated_norm_task<E> task = gated_norm_task_of<E>(a);
        int64_t blocks = mt_divide_up(16ll * mt_cuda_device()->multiProcessorCount, a->H), bytes = a->D * 4;
        int64_t room = stream->workspace_bytes / (a->H * bytes);
        if (blocks > room) blocks = room;
        MT_CHECK(blocks > 0 && bytes <= (int64_t)mt_cuda_device()->sharedMemPerBlockOptin);
        int64_t tokens_per_block = mt_divide_up(a->T, blocks);
        blocks = mt_divide_up(a->T, tokens_per_block);
        if (a->dw) task.partial = (float *)mt_cuda_workspace(stream, blocks * a->H * bytes);
        auto kernel = group_norm_backward<E, N>;
        mt_cuda_take_shared(kernel, bytes);
        mt_launch_early(kernel, dim3((unsigned)blocks, (unsigned)a->H), group_norm_block(mt_divide_up(a->D, N)), bytes,
                        mt_cuda_stream(stream), task, tokens_per_block);
        mt_cuda_add_partials(a->dw, blocks, NULL, 0, task.partial, a->H * a->D, stream);
    });
}

extern "C" void mt_cuda_gated_norm_means(const mt_gated_norm_args *a, float *means, mt_dtype dtype, mt_stream *stream) {
    MT_CHECK(a->gate_first && a->weight_per_head);
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->x, a->z, a->w, a->dy}, {a->D, a->z_stride});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_launch_early(group_norm_means<E, N>, dim3((unsigned)(a->T * a->H)), group_norm_block(mt_divide_up(a->D, N)),
                        0, mt_cuda_stream(stream), gated_norm_task_of<E>(a), means);
    });
}

extern "C" void mt_cuda_gated_norm_forward(const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CHECK(a->gate_first == a->weight_per_head && !(a->gate_first && a->sigmoid) && (a->gate_first || !a->means));
    if (a->T == 0) return;
    if (a->gate_first) return run_group_norm_forward(a, dtype, stream);
    bool wide = has_packs(dtype, {a->x, a->z, a->w, a->y}, {a->D, a->z_stride});
    by_packs(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        dim3 block = gated_norm_block(mt_divide_up(a->D, N));
        mt_launch_early(gated_norm_forward<E, N>, dim3(mt_grid_size(a->T * a->H, block.y)), block, 0,
                        mt_cuda_stream(stream), gated_norm_task_of<E>(a));
    });
}

extern "C" void mt_cuda_gated_norm_backward(const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CHECK(a->gate_first == a->weight_per_head && !(a->gate_first && a->sigmoid) && (a->gate_first || !a->means));
    if (a->T == 0) return;
    if (a->gate_first) return run_group_norm_backward(a, dtype, stream);
    bool wide = has_packs(dtype, {a->x, a->z, a->w, a->dy, a->dx, a->dz}, {a->D, a->z_stride, a->dz_stride});
    by_packs(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        dim3 block = gated_norm_block(mt_divide_up(a->D, N));
        gated_norm_task<E> task = gated_norm_task_of<E>(a);
        int64_t blocks = mt_divide_up(task.rows, block.y), most = 8ll * mt_cuda_device()->multiProcessorCount;
        int64_t rows_per_block = mt_divide_up(task.rows, (blocks < most ? blocks : most) * block.y) * block.y;
        blocks = mt_divide_up(task.rows, rows_per_block);
        if (a->dw) task.partial = (float *)mt_cuda_workspace(stream, blocks * a->D * (int64_t)sizeof(float));
        mt_launch_early(gated_norm_backward<E, N>, dim3((unsigned)blocks), block,
                        block.y * a->D * (int64_t)sizeof(float), mt_cuda_stream(stream), task, rows_per_block);
        mt_cuda_add_partials(a->dw, blocks, NULL, 0, task.partial, a->D, stream);
    });
}

/* ---- products and gates ------------------------------------------------------------------------------------------ */

/* Rows of C channels: a thread has a pack of each operand. */
template <class T> struct multiply_task {
    int64_t packs_per_row, packs; // of all rows
    const T *x, *z, *dy;
    T *y, *dx, *dz;
    int64_t x_stride, z_stride, y_stride, dx_stride, dz_stride, dy_stride;
};

template <class T, int N> __global__ void multiply_forward(multiply_task<T> task) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    mt_wait_for_previous();
    if (i >= task.packs) return;
    int64_t t = i / task.packs_per_row, c = i % task.packs_per_row * N;
    mt_pack<T, N> left = mt_load<N>(task.x + t * task.x_stride + c), right = mt_load<N>(task.z + t * task.z_stride + c);
    mt_pack<float, N> x = mt_to_float(left), z = mt_to_float(right);
    for (int n = 0; n < N; n++) x.value[n] *= z.value[n];
    mt_store(task.y + t * task.y_stride + c, mt_from_float<T>(x));
}

template <class T, int N> __global__ void multiply_backward(multiply_task<T> task) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    mt_wait_for_previous();
    if (i >= task.packs) return;
    int64_t t = i / task.packs_per_row, c = i % task.packs_per_row * N;
    mt_pack<T, N> left = mt_load<N>(task.x + t * task.x_stride + c), right = mt_load<N>(task.z + t * task.z_stride + c);
    mt_pack<float, N> dy = mt_to_float(mt_load<N>(task.dy + t * task.dy_stride + c));
    mt_pack<float, N> x = mt_to_float(left), z = mt_to_float(right);
    for (int n = 0; n < N; n++) x.value[n] *= dy.value[n], z.value[n] *= dy.value[n];
    mt_store(task.dx + t * task.dx_stride + c, mt_from_float<T>(z));
    mt_store(task.dz + t * task.dz_stride + c, mt_from_float<T>(x));
}

template <class T> static multiply_task<T> multiply_task_of(const mt_multiply_args *a, int N) {
    multiply_task<T> task = {a->C / N, a->T * (a->C / N)};
    task.x = (const T *)a->x, task.z = (const T *)a->z, task.dy = (const T *)a->dy;
    task.y = (T *)a->y, task.dx = (T *)a->dx, task.dz = (T *)a->dz;
    task.x_stride = a->x_stride, task.z_stride = a->z_stride, task.y_stride = a->y_stride;
    task.dx_stride = a->dx_stride, task.dz_stride = a->dz_stride, task.dy_stride = a->dy_stride;
    return task;
}

extern "C" void mt_cuda_multiply_forward(const mt_multiply_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->x, a->z, a->y}, {a->C, a->x_stride, a->z_stride, a->y_stride});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        multiply_task<E> task = multiply_task_of<E>(a, N);
        mt_launch_early(multiply_forward<E, N>, dim3(mt_grid_size(task.packs, 256)), dim3(256), 0,
                        mt_cuda_stream(stream), task);
    });
}

extern "C" void mt_cuda_multiply_backward(const mt_multiply_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    bool wide = mt_wide(dtype, {a->x, a->z, a->dy, a->dx, a->dz},
                        {a->C, a->x_stride, a->z_stride, a->dy_stride, a->dx_stride, a->dz_stride});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        multiply_task<E> task = multiply_task_of<E>(a, N);
        mt_launch_early(multiply_backward<E, N>, dim3(mt_grid_size(task.packs, 256)), dim3(256), 0,
                        mt_cuda_stream(stream), task);
    });
}

template <class T, int N>
__global__ void scale_rows(T *x, float factor, int64_t packs_per_row, int64_t packs, int64_t stride) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    mt_wait_for_previous();
    if (i >= packs) return;
    T *at = x + i / packs_per_row * stride + i % packs_per_row * N;
    mt_pack<float, N> pack = mt_to_float(mt_load<N>(at));
    for (int n = 0; n < N; n++) pack.value[n] *= factor;
    mt_store(at, mt_from_float<T>(pack));
}

extern "C" void mt_cuda_scale_rows(void *x, float factor, int64_t T, int64_t C, int64_t stride, mt_dtype dtype,
                                   mt_stream *stream) {
    if (T == 0) return;
    mt_by_type(dtype, mt_wide(dtype, {x}, {C, stride}), [&](auto type, auto width) {
        using E = decltype(type);
        constexpr int N = decltype(width)::value;
        mt_launch_early(scale_rows<E, N>, dim3(mt_grid_size(T * (C / N), 256)), dim3(256), 0, mt_cuda_stream(stream),
                        (E *)x, factor, C / N, T * (C / N), stride);
    });
}

template <class T, int N> __global__ void gate_forward(T *y, const T *x, const T *z, int64_t begin, int64_t end) {
    int64_t i = begin + ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    mt_wait_for_previous();
    if (i >= end) return;
    mt_pack<T, N> inner = mt_load<N>(x + i), gate = mt_load<N>(z + i);
    mt_pack<float, N> pack = mt_to_float(inner);
    for (int n = 0; n < N; n++) pack.value[n] *= sigmoid(mt_element(gate, n));
    mt_store(y + i, mt_from_float<T>(pack));
}

template <class T, int N>
__global__ void gate_backward(T *dx, T *dz, const T *dy, const T *x, const T *z, int64_t begin, int64_t end) {
    int64_t i = begin + ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    mt_wait_for_previous();
    if (i >= end) return;
    mt_pack<T, N> outer = mt_load<N>(dy + i), inner = mt_load<N>(x + i), gate = mt_load<N>(z + i);
    mt_pack<float, N> of_x, of_z;
    for (int n = 0; n < N; n++) {
        float open = sigmoid(mt_element(gate, n)), d = mt_element(outer, n);
        of_z.value[n] = d * mt_element(inner, n) * open * (1 - open), of_x.value[n] = d * open;
    }
    mt_store(dz + i, mt_from_float<T>(of_z));
    mt_store(dx + i, mt_from_float<T>(of_x));
}

extern "C" void mt_cuda_gate_forward(const mt_gate_args *a, mt_dtype dtype, mt_stream *stream) {
    bool wide = mt_wide(dtype, {a->x, a->z, a->y}, {});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        mt_split<decltype(width)::value>(a->n, wide, [&](int64_t begin, int64_t end, auto pack) {
            constexpr int N = decltype(pack)::value;
            mt_launch_early(gate_forward<E, N>, dim3(mt_grid_size((end - begin) / N, 256)), dim3(256), 0,
                            mt_cuda_stream(stream), (E *)a->y, (const E *)a->x, (const E *)a->z, begin, end);
        });
    });
}

extern "C" void mt_cuda_gate_backward(const mt_gate_args *a, mt_dtype dtype, mt_stream *stream) {
    bool wide = mt_wide(dtype, {a->x, a->z, a->dy, a->dx, a->dz}, {});
    mt_by_type(dtype, wide, [&](auto type, auto width) {
        using E = decltype(type);
        mt_split<decltype(width)::value>(a->n, wide, [&](int64_t begin, int64_t end, auto pack) {
            constexpr int N = decltype(pack)::value;
            mt_launch_early(gate_backward<E, N>, dim3(mt_grid_size((end - begin) / N, 256)), dim3(256), 0,
                            mt_cuda_stream(stream), (E *)a->dx, (E *)a->dz, (const E *)a->dy, (const E *)a->x,
                            (const E *)a->z, begin, end);
        });
    });
}
