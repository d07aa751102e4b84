/* kda.cu: Kimi delta attention, the delta rule with a decay for each channel of a key, token by token in fp32 as the
 * table of operations states it. The columns of a state do not depend on each other: a block takes some of one head
 * along a span. Backward: `step` leaves the states before all chunks of 64 tokens; `step_back` takes the chunks in
 * reverse, computes the states of a chunk's tokens again and keeps them in memory, and leaves each block's part of the
 * gradients that all columns share, which `finish` sums. With S' = e^g S, u = beta (v - S'^T k), S" = S' + k u^T:
 *
 *   dS" += q dO^T;  dq = S" dO;  du = dS"^T k;  dS' = dS" - beta k du^T;  dk = dS" u - beta S' du
 *   dv = beta du;  dbeta = du.(v - S'^T k);  dg = rows of dS'.S';  dS = e^g dS'
 *
 * Sums have one order. */
#include "linear_attention.cuh"

enum { TOKENS = MT_CHUNK_TOKENS, THREADS = 256, WARPS = THREADS / 32 };
enum { STEP_LANES = MT_STEP_LANES, STEP_ROWS = THREADS / STEP_LANES, MOST_LINES = MT_CUDA_DELTA_CHANNELS / STEP_ROWS };

template <class T> struct kda_task {
    const T *q, *k, *v, *b, *a, *A_log, *dt_bias, *dout;
    T *out, *dq, *dk, *dv, *db, *da;
    int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride, b_stride, a_stride, db_stride, da_stride;
    int Hv, heads, Dk, Dv;         // heads: value heads of a key head
    int first_key_head, key_heads; // of this launch, for the arrays below
    int column_blocks;
    float q_scale; // 1 / sqrt(Dk)
    mt_chunks chunks;
    mt_device_states states;
    float *maps;                        // of one slot: [Hv, Dk, Dv + Dk], or [Hv, Dk, Dv]
    bool crosses;                       // that slot's span begins with a state
    float *before;                      // [chunk, head, Dk, Dv]
    float *tokens;                      // [block of step_back, 64, lines, threads, V]: S' of a chunk's tokens
    float *parts;                       // [chunk, head, 64, column block, 3, Dk]: dq, dk, dg
    float *dbeta;                       // [chunk, head, 64, column block]
    float *partial_rate, *partial_bias; // [chunk, head], [chunk, head, Dk]: of dA_log and ddt_bias

    __device__ int launch_heads() const {
        return key_heads * heads;
    }
};

/* The purpose of `step`: out; the states before all chunks, for the backward; or the map of context parallelism. */
enum kda_purpose { FORWARD, KEEP, MAP };

/* Some tokens of a head in shared memory: q and k divided by their lengths, q by sqrt(Dk) too, and the decays. */
enum { KDA_TOKENS = 16 };

template <int LINES> struct kda_tokens {
    enum { CHANNELS = STEP_ROWS * LINES };
    float q[KDA_TOKENS][CHANNELS], k[KDA_TOKENS][CHANNELS], decay[KDA_TOKENS][CHANNELS];

    /* All threads of the block call it; the values are there when it returns. */
    template <class T> __device__ void load(const kda_task<T> &task, int64_t first, int count, int head, float rate) {
        int thread = (int)threadIdx.x, lane = thread % 32;
        int64_t of_key = (int64_t)(head / task.heads) * task.Dk, of_head = (int64_t)head * task.Dk;
        __syncthreads(); // the tokens before are no longer read
        for (int n = thread; n < count * CHANNELS; n += THREADS) {
            int t = n / CHANNELS, i = n % CHANNELS;
            bool exists = i < task.Dk;
            q[t][i] = exists ? mt_to_float(task.q[(first + t) * task.q_stride + of_key + i]) : 0;
            k[t][i] = exists ? mt_to_float(task.k[(first + t) * task.k_stride + of_key + i]) : 0;
            float x = exists ? mt_to_float(task.a[(first + t) * task.a_stride + of_head + i]) +
                                   mt_to_float(task.dt_bias[of_head + i])
                             : 0;
            decay[t][i] = exists ? expf(-rate * softplus(x)) : 0;
        }
        __syncthreads();
        for (int t = thread / 32; t < count; t += WARPS) {
            float of_q = 0, of_k = 0;
            for (int i = lane; i < CHANNELS; i += 32) of_q += q[t][i] * q[t][i], of_k += k[t][i] * k[t][i];
            of_q = task.q_scale / sqrtf(mt_warp_sum(of_q) + 1e-6f), of_k = 1 / sqrtf(mt_warp_sum(of_k) + 1e-6f);
            for (int i = lane; i < CHANNELS; i += 32) q[t][i] *= of_q, k[t][i] *= of_k;
        }
        __syncthreads();
    }
};

/* A thread has V columns of every 32nd row of a state [Dk, width], LINES in all. */
template <int V, int LINES> struct kda_place {
    int line, column, head, local, width; // local: of the launch
    int64_t number;                       // of the span
    template <class T> __device__ kda_place(const kda_task<T> &task, int columns) {
        line = (int)threadIdx.x / STEP_LANES, width = columns;
        column = ((int)(blockIdx.x % task.column_blocks) * STEP_LANES + (int)threadIdx.x % STEP_LANES) * V;
        local = (int)blockIdx.y, head = local + task.first_key_head * task.heads;
        number = blockIdx.x / task.column_blocks;
    }
    __device__ void load(mt_pack<float, V> (&S)[LINES], const float *from, int Dk) const {
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = line + r * STEP_ROWS;
            S[r] = mt_load<V>(from + (int64_t)i * width + column, from && i < Dk && column < width);
        }
    }
    __device__ void store(float *to, const mt_pack<float, V> (&S)[LINES], int Dk) const {
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = line + r * STEP_ROWS;
            if (i < Dk && column < width) mt_store(to + (int64_t)i * width + column, S[r]);
        }
    }
};

template <class T> __device__ static inline float load_beta(const kda_task<T> &task, int64_t token, int head) {
    return 1 / (1 + expf(-mt_to_float(task.b[token * task.b_stride + head])));
}

template <int V, class T>
__device__ static inline mt_pack<float, V> load_columns(const T *row, int column, int columns) {
    return mt_to_float(mt_load<V>(row + column, column < columns));
}

/* A block per 8 V columns of a head of a span; MAP: columns of [S, M]. */
template <class T, int V, int LINES, kda_purpose purpose>
__global__ void __launch_bounds__(THREADS, 2) step(const kda_task<T> task) {
    __shared__ kda_tokens<LINES> x;
    __shared__ float sums[WARPS][STEP_LANES * V];
    mt_wait_for_previous();
    kda_place<V, LINES> p(task, purpose == MAP ? task.Dv + task.Dk : task.Dv);
    mt_span span = task.chunks.spans[p.number];
    int64_t by_state = (int64_t)p.head * task.Dk * p.width,
            first = task.chunks.table ? task.chunks.first[p.number] : p.number;
    const float *before = purpose == MAP ? NULL : task.states.before(span, p.number);
    float *kept = purpose == MAP ? task.maps : purpose == FORWARD ? task.states.kept(span) : NULL;
    float rate = expf(mt_to_float(task.A_log[p.head]));
    mt_pack<float, V> S[LINES];
    p.load(S, before ? before + by_state : NULL, task.Dk);
    if (purpose == MAP && task.crosses) {
#pragma unroll
        for (int r = 0; r < LINES; r++)
            for (int j = 0; j < V; j++) S[r].value[j] = p.column + j - task.Dv == p.line + r * STEP_ROWS ? 1 : 0;
    }
    for (int64_t n = 0; n < span.q_len; n++) {
        int64_t token = span.q_start + n;
        if (purpose == KEEP && n % TOKENS == 0)
            p.store(task.before + ((first + n / TOKENS) * task.launch_heads() + p.local) * task.Dk * task.Dv, S,
                    task.Dk);
        int t = (int)(n % KDA_TOKENS);
        if (t == 0) {
            int64_t left = span.q_len - n;
            x.load(task, token, left < KDA_TOKENS ? (int)left : (int)KDA_TOKENS, p.head, rate);
        }
        float beta = load_beta(task, token, p.head), read[V] = {}, out[V] = {};
        mt_pack<float, V> v =
            load_columns<V>(task.v + token * task.v_stride + (int64_t)p.head * task.Dv, p.column, task.Dv);
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = p.line + r * STEP_ROWS;
            for (int j = 0; j < V; j++) S[r].value[j] *= x.decay[t][i], read[j] += S[r].value[j] * x.k[t][i];
        }
        mt_sum_of_lines(read, sums);
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = p.line + r * STEP_ROWS;
            for (int j = 0; j < V; j++) {
                S[r].value[j] += x.k[t][i] * beta * (v.value[j] - read[j]);
                out[j] += S[r].value[j] * x.q[t][i];
            }
        }
        if (purpose != FORWARD) continue;
        mt_sum_of_lines(out, sums);
        if (p.line == 0 && p.column < task.Dv) {
            mt_pack<float, V> result;
            for (int j = 0; j < V; j++) result.value[j] = out[j];
            mt_store(task.out + (token * task.Hv + p.head) * task.Dv + p.column, mt_from_float<T>(result));
        }
    }
    if (kept) p.store(kept + by_state, S, task.Dk);
}

/* ---- long spans -------------------------------------------------------------------------------------------------- */

/* The same for long spans, without a barrier between tokens: a warp has 8 columns of a head, and a lane 32 rows of one
 * of them. A block prepares 16 tokens at a time, whose values it has loaded while it computed those before. */
enum { STREAM_THREADS = 128, STREAM_TOKENS = 16, STREAM_COLUMNS = 32, STREAM_ROWS = MT_CUDA_DELTA_CHANNELS };

struct stream_room {
    float q[STREAM_TOKENS][STREAM_ROWS], k[STREAM_TOKENS][STREAM_ROWS], decay[STREAM_TOKENS][STREAM_ROWS];
    float v[STREAM_TOKENS][STREAM_COLUMNS], out[STREAM_TOKENS][STREAM_COLUMNS], beta[STREAM_TOKENS];
};

/* The loads of a thread for 16 tokens: 8 channels of two of them, and 4 columns of one. */
template <class T> struct stream_loads {
    mt_pack<T, 8> q[2], k[2], a[2];
    mt_pack<T, 4> v;
    float b;
    __device__ void load(const kda_task<T> &task, int64_t first, int64_t end, int head, int columns) {
        int thread = (int)threadIdx.x, channel = thread % 16 * 8;
        int64_t of_key = (int64_t)(head / task.heads) * task.Dk + channel, of_head = (int64_t)head * task.Dk + channel;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int64_t token = first + thread / 16 + i * 8;
            bool exists = token < end && channel < task.Dk;
            q[i] = mt_load<8>(task.q + token * task.q_stride + of_key, exists);
            k[i] = mt_load<8>(task.k + token * task.k_stride + of_key, exists);
            a[i] = mt_load<8>(task.a + token * task.a_stride + of_head, exists);
        }
        int64_t token = first + thread / 8;
        int column = columns + thread % 8 * 4;
        v = mt_load<4>(task.v + token * task.v_stride + (int64_t)head * task.Dv + column,
                       token < end && column < task.Dv);
        token = first + thread;
        b = thread < STREAM_TOKENS && token < end ? mt_to_float(task.b[token * task.b_stride + head]) : 0;
    }
    __device__ void prepare(stream_room &room, const kda_task<T> &task, const float (&bias)[8], float rate) const {
        int thread = (int)threadIdx.x, channel = thread % 16 * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int t = thread / 16 + i * 8;
            float of_q = 0, of_k = 0;
            for (int e = 0; e < 8; e++) {
                of_q += mt_element(q[i], e) * mt_element(q[i], e);
                of_k += mt_element(k[i], e) * mt_element(k[i], e);
            }
#pragma unroll
            for (int lane = 8; lane > 0; lane /= 2) {
                of_q += __shfl_xor_sync(0xffffffff, of_q, lane);
                of_k += __shfl_xor_sync(0xffffffff, of_k, lane);
            }
            of_q = task.q_scale / sqrtf(of_q + 1e-6f), of_k = 1 / sqrtf(of_k + 1e-6f);
            for (int e = 0; e < 8; e++) {
                float x = mt_element(a[i], e) + bias[e];
                room.q[t][channel + e] = mt_element(q[i], e) * of_q;
                room.k[t][channel + e] = mt_element(k[i], e) * of_k;
                if constexpr (std::is_same_v<T, float>)
                    room.decay[t][channel + e] = expf(-rate * softplus(x));
                else
                    room.decay[t][channel + e] = mt_exp(-rate * (x > 20 ? x : __logf(1 + mt_exp(x))));
            }
        }
        for (int e = 0; e < 4; e++) room.v[thread / 8][thread % 8 * 4 + e] = mt_element(v, e);
        if (thread < STREAM_TOKENS) room.beta[thread] = 1 / (1 + expf(-b));
    }
};

template <class T, kda_purpose purpose>
__global__ void __launch_bounds__(STREAM_THREADS, 4) stream_states(const kda_task<T> task) {
    __shared__ __align__(16) stream_room room;
    mt_wait_for_previous();
    int thread = (int)threadIdx.x, line = thread % 32 / 8, own = thread / 32 * 8 + thread % 8; // own: of 32 columns
    int columns = (int)(blockIdx.x % task.column_blocks) * STREAM_COLUMNS, column = columns + own;
    int local = (int)blockIdx.y, head = local + task.first_key_head * task.heads;
    int64_t number = blockIdx.x / task.column_blocks, by_state = (int64_t)head * task.Dk * task.Dv;
    int64_t first = task.chunks.table ? task.chunks.first[number] : number;
    mt_span span = task.chunks.spans[number];
    const float *before = task.states.before(span, number);
    float *kept = purpose == FORWARD ? task.states.kept(span) : NULL;
    float rate = expf(mt_to_float(task.A_log[head])), bias[8], S[STREAM_ROWS / 4];
    for (int e = 0; e < 8; e++) {
        int channel = thread % 16 * 8 + e;
        bias[e] = channel < task.Dk ? mt_to_float(task.dt_bias[(int64_t)head * task.Dk + channel]) : 0;
    }
    /* S[4 i + e] is row 16 i + 4 line + e. */
#pragma unroll
    for (int n = 0; n < STREAM_ROWS / 4; n++) {
        int row = n / 4 * 16 + line * 4 + n % 4;
        bool exists = before && row < task.Dk && column < task.Dv;
        S[n] = exists ? before[by_state + (int64_t)row * task.Dv + column] : 0;
    }
    auto store = [&](float *to) {
#pragma unroll
        for (int n = 0; n < STREAM_ROWS / 4; n++) {
            int row = n / 4 * 16 + line * 4 + n % 4;
            if (row < task.Dk && column < task.Dv) to[(int64_t)row * task.Dv + column] = S[n];
        }
    };
    stream_loads<T> loads;
    int64_t end = span.q_start + span.q_len;
    loads.load(task, span.q_start, end, head, columns);
    for (int64_t token = span.q_start; token < end; token += STREAM_TOKENS) {
        int64_t n = token - span.q_start;
        int count = end - token < STREAM_TOKENS ? (int)(end - token) : (int)STREAM_TOKENS;
        if (purpose == KEEP && n % TOKENS == 0)
            store(task.before + ((first + n / TOKENS) * task.launch_heads() + local) * task.Dk * task.Dv);
        loads.prepare(room, task, bias, rate);
        __syncthreads();
        loads.load(task, token + STREAM_TOKENS, end, head, columns);
        for (int t = 0; t < count; t++) {
            float read[4] = {}, out[4] = {}, k[STREAM_ROWS / 4];
#pragma unroll
            for (int i = 0; i < STREAM_ROWS / 16; i++) {
                float4 decay = *(const float4 *)&room.decay[t][i * 16 + line * 4];
                float4 key = *(const float4 *)&room.k[t][i * 16 + line * 4];
                k[4 * i] = key.x, k[4 * i + 1] = key.y, k[4 * i + 2] = key.z, k[4 * i + 3] = key.w;
                S[4 * i] *= decay.x, S[4 * i + 1] *= decay.y, S[4 * i + 2] *= decay.z, S[4 * i + 3] *= decay.w;
#pragma unroll
                for (int e = 0; e < 4; e++) read[e] += S[4 * i + e] * k[4 * i + e];
            }
            float sum = (read[0] + read[1]) + (read[2] + read[3]);
            sum += __shfl_xor_sync(0xffffffff, sum, 8);
            sum += __shfl_xor_sync(0xffffffff, sum, 16);
            float u = room.beta[t] * (room.v[t][own] - sum);
#pragma unroll
            for (int i = 0; i < STREAM_ROWS / 16; i++) {
                float4 q =
                    purpose == FORWARD ? *(const float4 *)&room.q[t][i * 16 + line * 4] : make_float4(0, 0, 0, 0);
                const float query[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    S[4 * i + e] += k[4 * i + e] * u;
                    if (purpose == FORWARD) out[e] += S[4 * i + e] * query[e];
                }
            }
            if (purpose != FORWARD) continue;
            sum = (out[0] + out[1]) + (out[2] + out[3]);
            sum += __shfl_xor_sync(0xffffffff, sum, 8);
            sum += __shfl_xor_sync(0xffffffff, sum, 16);
            if (line == 0) room.out[t][own] = sum;
        }
        __syncthreads();
        int t = thread / 8, at = thread % 8 * 4;
        if (purpose == FORWARD && t < count && columns + at < task.Dv) {
            mt_pack<float, 4> out = *(const mt_pack<float, 4> *)&room.out[t][at];
            mt_store(task.out + ((token + t) * task.Hv + head) * task.Dv + columns + at, mt_from_float<T>(out));
        }
    }
    if (kept) store(kept + by_state);
}

/* ---- the backward ------------------------------------------------------------------------------------------------ */

/* x summed over the lanes of a row; all of them receive it. */
__device__ static inline float sum_of_lanes(float x) {
#pragma unroll
    for (int lane = STEP_LANES / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}

/* The same in reverse; of_map: only the gradient of the state before the span, from its own outputs. */
template <class T, int V, int LINES, bool of_map>
__global__ void __launch_bounds__(THREADS) step_back(const kda_task<T> task) {
    __shared__ kda_tokens<LINES> x;
    __shared__ float sums[WARPS][STEP_LANES * 2 * V];
    mt_wait_for_previous();
    kda_place<V, LINES> p(task, task.Dv);
    mt_span span = task.chunks.spans[p.number];
    int thread = (int)threadIdx.x, lane = thread % STEP_LANES, block = (int)(blockIdx.x % task.column_blocks);
    int64_t by_state = (int64_t)p.head * task.Dk * task.Dv,
            first = task.chunks.table ? task.chunks.first[p.number] : p.number;
    const float *after = of_map ? NULL : task.states.gradient_after(p.number);
    float *kept =
        of_map ? NULL : task.tokens + ((int64_t)blockIdx.x * gridDim.y + blockIdx.y) * TOKENS * LINES * THREADS * V;
    float rate = expf(mt_to_float(task.A_log[p.head]));
    mt_pack<float, V> S[LINES], dS[LINES];
    p.load(dS, after ? after + by_state : NULL, task.Dk);
    for (int64_t chunk = (span.q_len + TOKENS - 1) / TOKENS - 1; chunk >= 0; chunk--) {
        int64_t row = span.q_start + chunk * TOKENS, left = span.q_len - chunk * TOKENS;
        int64_t at = (first + chunk) * task.launch_heads() + p.local;
        int L = (int)(left < TOKENS ? left : TOKENS);
        if (!of_map) {
            p.load(S, task.before + at * task.Dk * task.Dv, task.Dk);
            for (int t = 0; t < L; t++) {
                int m = t % KDA_TOKENS;
                if (m == 0) x.load(task, row + t, L - t < KDA_TOKENS ? L - t : (int)KDA_TOKENS, p.head, rate);
                float beta = load_beta(task, row + t, p.head), both[2 * V] = {};
                mt_pack<float, V> v =
                    load_columns<V>(task.v + (row + t) * task.v_stride + (int64_t)p.head * task.Dv, p.column, task.Dv);
#pragma unroll
                for (int r = 0; r < LINES; r++) {
                    int i = p.line + r * STEP_ROWS;
                    for (int j = 0; j < V; j++) S[r].value[j] *= x.decay[m][i], both[j] += S[r].value[j] * x.k[m][i];
                    mt_store(kept + ((int64_t)(t * LINES + r) * THREADS + thread) * V, S[r]);
                }
                mt_sum_of_lines(both, sums);
#pragma unroll
                for (int r = 0; r < LINES; r++)
                    for (int j = 0; j < V; j++)
                        S[r].value[j] += x.k[m][p.line + r * STEP_ROWS] * beta * (v.value[j] - both[j]);
            }
        }
        mt_pack<float, V> next_v, next_dO, next_S[LINES]; // loaded a token ahead
        float next_beta;
        auto fetch = [&](int t) {
            next_beta = load_beta(task, row + t, p.head);
            next_v = load_columns<V>(task.v + (row + t) * task.v_stride + (int64_t)p.head * task.Dv, p.column, task.Dv);
            next_dO = load_columns<V>(task.dout + ((row + t) * task.Hv + p.head) * task.Dv, p.column, task.Dv);
#pragma unroll
            for (int r = 0; r < LINES && !of_map; r++)
                next_S[r] = mt_load<V>(kept + ((int64_t)(t * LINES + r) * THREADS + thread) * V);
        };
        fetch(L - 1);
        for (int t = L - 1; t >= 0; t--) {
            int m = t % KDA_TOKENS;
            if (t == L - 1 || m == KDA_TOKENS - 1) x.load(task, row + t - m, m + 1, p.head, rate);
            mt_pack<float, V> v = next_v, dO = next_dO;
            float beta = next_beta, both[2 * V] = {}; // S'^T k and du
#pragma unroll
            for (int r = 0; r < LINES && !of_map; r++) S[r] = next_S[r];
            if (t > 0) fetch(t - 1);
#pragma unroll
            for (int r = 0; r < LINES; r++) {
                int i = p.line + r * STEP_ROWS;
                for (int j = 0; j < V; j++) {
                    dS[r].value[j] += x.q[m][i] * dO.value[j];
                    both[V + j] += dS[r].value[j] * x.k[m][i];
                    if (!of_map) both[j] += S[r].value[j] * x.k[m][i];
                }
            }
            mt_sum_of_lines(both, sums);
            float dbeta = 0;
            float *parts = of_map ? NULL : task.parts + ((at * TOKENS + t) * task.column_blocks + block) * 3 * task.Dk;
#pragma unroll
            for (int r = 0; r < LINES; r++) {
                int i = p.line + r * STEP_ROWS;
                float dq = 0, dk = 0, dg = 0;
                for (int j = 0; j < V; j++) {
                    float dr = -beta * both[V + j];
                    if (!of_map) {
                        float u = beta * (v.value[j] - both[j]);
                        dq += (S[r].value[j] + x.k[m][i] * u) * dO.value[j];
                        dk += dS[r].value[j] * u + S[r].value[j] * dr;
                    }
                    dS[r].value[j] += x.k[m][i] * dr;
                    if (!of_map) dg += dS[r].value[j] * S[r].value[j];
                    dS[r].value[j] *= x.decay[m][i];
                }
                if constexpr (!of_map) {
                    dq = sum_of_lanes(dq), dk = sum_of_lanes(dk), dg = sum_of_lanes(dg);
                    if (lane == 0 && i < task.Dk) parts[i] = dq, parts[task.Dk + i] = dk, parts[2 * task.Dk + i] = dg;
                }
            }
            if constexpr (!of_map) {
                mt_pack<float, V> dv;
                for (int j = 0; j < V; j++) {
                    dv.value[j] = beta * both[V + j];
                    dbeta += p.column + j < task.Dv ? both[V + j] * (v.value[j] - both[j]) : 0;
                }
                dbeta = sum_of_lanes(dbeta);
                if (thread == 0) task.dbeta[(at * TOKENS + t) * task.column_blocks + block] = dbeta;
                if (p.line == 0 && p.column < task.Dv)
                    mt_store(task.dv + (row + t) * task.dv_stride + (int64_t)p.head * task.Dv + p.column,
                             mt_from_float<T>(dv));
            }
        }
    }
    if (of_map) p.store(task.maps + by_state, dS, task.Dk);
}

/* The gradients that all columns of a head share: a block per chunk and key head, a thread per channel of a key. */
template <class T> __global__ void __launch_bounds__(MT_CUDA_DELTA_CHANNELS) finish(const kda_task<T> task) {
    __shared__ double rates[MT_CUDA_DELTA_CHANNELS];
    mt_wait_for_previous();
    int i = (int)threadIdx.x, Dk = task.Dk, blocks = task.column_blocks, buffer = 0;
    bool exists = i < Dk;
    int64_t number = blockIdx.x / task.key_heads;
    int local_key = (int)(blockIdx.x % task.key_heads), key_head = local_key + task.first_key_head;
    mt_chunk chunk = mt_chunk_of(task.chunks, number);
    int64_t row = chunk.span.q_start + chunk.row, at_key = (int64_t)key_head * Dk + i;
    for (int t = 0; t < chunk.L; t++) {
        float q = exists ? mt_to_float(task.q[(row + t) * task.q_stride + at_key]) : 0, dq = 0, dk = 0;
        float k = exists ? mt_to_float(task.k[(row + t) * task.k_stride + at_key]) : 0, sums[2] = {q * q, k * k};
        mt_row_sum(sums, buffer++ % 2);
        float of_q = 1 / sqrtf(sums[0] + 1e-6f), of_k = 1 / sqrtf(sums[1] + 1e-6f);
        for (int h = 0; h < task.heads; h++) {
            int64_t at = (number * task.launch_heads() + local_key * task.heads + h) * TOKENS + t;
            for (int block = 0; block < blocks && exists; block++) {
                const float *parts = task.parts + (at * blocks + block) * 3 * Dk + i;
                dq += parts[0], dk += parts[Dk];
            }
        }
        dq *= task.q_scale, q *= of_q, k *= of_k;
        float dots[2] = {q * dq, k * dk};
        mt_row_sum(dots, buffer++ % 2);
        if (!exists) continue;
        task.dq[(row + t) * task.dq_stride + at_key] = mt_from_float<T>(of_q * (dq - q * dots[0]));
        task.dk[(row + t) * task.dk_stride + at_key] = mt_from_float<T>(of_k * (dk - k * dots[1]));
    }
    for (int h = 0; h < task.heads; h++) {
        int head = key_head * task.heads + h;
        int64_t at = number * task.launch_heads() + local_key * task.heads + h, at_head = (int64_t)head * Dk + i;
        float rate = expf(mt_to_float(task.A_log[head])), bias = exists ? mt_to_float(task.dt_bias[at_head]) : 0;
        double of_rate = 0, of_bias = 0;
        for (int t = 0; t < chunk.L; t++) {
            float dg = 0, x = exists ? mt_to_float(task.a[(row + t) * task.a_stride + at_head]) + bias : 0;
            for (int block = 0; block < blocks && exists; block++)
                dg += task.parts[((at * TOKENS + t) * blocks + block) * 3 * Dk + 2 * Dk + i];
            float da = -rate / (1 + expf(-x)) * dg;
            of_rate += exists ? (double)(dg * -rate * softplus(x)) : 0, of_bias += (double)da;
            if (exists) task.da[(row + t) * task.da_stride + at_head] = mt_from_float<T>(da);
            if (i > 0) continue;
            float dbeta = 0, beta = load_beta(task, row + t, head);
            for (int block = 0; block < blocks; block++) dbeta += task.dbeta[(at * TOKENS + t) * blocks + block];
            task.db[(row + t) * task.db_stride + head] = mt_from_float<T>(dbeta * beta * (1 - beta));
        }
        rates[i] = of_rate;
        __syncthreads();
        for (int c = 1; c < Dk && i == 0; c++) of_rate += rates[c];
        if (i == 0) task.partial_rate[at] = (float)of_rate;
        if (exists) task.partial_bias[at * Dk + i] = (float)of_bias;
        __syncthreads();
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <class T> static kda_task<T> kda_task_of(const mt_delta_args *a) {
    kda_task<T> task = {};
    MT_CHECK(a->decays == a->Dk && a->Dk <= MT_CUDA_DELTA_CHANNELS && a->Dv <= MT_CUDA_DELTA_CHANNELS);
    mt_take_delta_operands<T>(task, a);
    task.key_heads = (int)a->Hk;
    return task;
}

/* Calls body(mt_width<V>(), mt_width<LINES>()). */
template <class T, class Body> static void by_lines(const mt_delta_args *a, Body body) {
    bool wide = a->Dv % 4 == 0 && a->Dk % 4 == 0 && a->v_stride % 4 == 0 && a->dv_stride % 4 == 0;
    for (const void *address : {a->v, (const void *)a->out, a->dout, (const void *)a->dv})
        wide &= (uintptr_t)address % (4 * sizeof(T)) == 0;
    for (const void *address : {a->states.memory, (float *)a->dstates, a->maps, a->dmaps})
        wide &= (uintptr_t)address % 16 == 0;
    auto of_width = [&](auto width) {
        if (a->Dk <= STEP_ROWS)
            body(width, mt_width<1>());
        else if (a->Dk <= 2 * STEP_ROWS)
            body(width, mt_width<2>());
        else
            body(width, mt_width<MOST_LINES>());
    };
    if (wide)
        of_width(mt_width<4>());
    else
        of_width(mt_width<1>());
}

template <class T>
static void launch(void (*kernel)(kda_task<T>), const kda_task<T> &task, int64_t spans, mt_stream *stream) {
    dim3 grid((unsigned)(spans * task.column_blocks), (unsigned)(task.key_heads * task.heads));
    mt_launch_early(kernel, grid, dim3(THREADS), 0, mt_cuda_stream(stream), task);
}

/* True if stream_states serves: spans of many tokens, and rows in packs. */
template <class T> static bool streams(const mt_delta_args *a) {
    const mt_dtype dtype = std::is_same_v<T, float> ? MT_F32 : MT_BF16; // or another of its size
    return mt_longest_span(a->spans) > STREAM_TOKENS && a->Dk % 8 == 0 && a->Dv % 4 == 0 && a->v_stride % 4 == 0 &&
           mt_wide(dtype, {a->q, a->k, a->a}, {a->q_stride, a->k_stride, a->a_stride}) &&
           (uintptr_t)a->v % (4 * sizeof(T)) == 0 && (uintptr_t)a->out % (4 * sizeof(T)) == 0;
}

template <class T, kda_purpose purpose>
static void run_stream(const mt_delta_args *a, kda_task<T> task, int64_t spans, mt_stream *stream) {
    task.column_blocks = (int)mt_divide_up(a->Dv, STREAM_COLUMNS);
    dim3 grid((unsigned)(spans * task.column_blocks), (unsigned)(task.key_heads * task.heads));
    mt_launch_early(stream_states<T, purpose>, grid, dim3(STREAM_THREADS), 0, mt_cuda_stream(stream), task);
}

template <class T> static void forward(const mt_delta_args *a, mt_stream *stream) {
    kda_task<T> task = kda_task_of<T>(a);
    task.chunks.spans = a->spans->device;
    task.states = mt_states_on_device(&a->states, NULL, a->Hv * a->Dk * a->Dv, 0);
    if (streams<T>(a)) return run_stream<T, FORWARD>(a, task, a->spans->count, stream);
    by_lines<T>(a, [&](auto width, auto lines) {
        constexpr int V = decltype(width)::value;
        task.column_blocks = (int)mt_divide_up(a->Dv, V * STEP_LANES);
        launch(step<T, V, decltype(lines)::value, FORWARD>, task, a->spans->count, stream);
    });
}

/* The arrays of a launch over some spans, chunks and key heads, one behind the other; memory NULL: only counts the
 * bytes. */
template <class T>
static int64_t place_arrays(kda_task<T> *task, int64_t spans, int64_t chunks, int64_t lines, int64_t V, char *memory) {
    int64_t used = 0, heads = task->key_heads * task->heads, blocks = task->column_blocks;
    auto take = [&](float **array, int64_t count) {
        if (memory) *array = (float *)(memory + used);
        used += mt_divide_up(count * (int64_t)sizeof **array, 256) * 256;
    };
    take(&task->before, chunks * heads * task->Dk * task->Dv);
    take(&task->tokens, spans * blocks * heads * TOKENS * lines * THREADS * V);
    take(&task->parts, chunks * heads * TOKENS * blocks * 3 * task->Dk);
    take(&task->dbeta, chunks * heads * TOKENS * blocks);
    take(&task->partial_rate, chunks * heads), take(&task->partial_bias, chunks * heads * task->Dk);
    return used;
}

template <class T, int V, int LINES>
static void run_backward(const mt_delta_args *a, kda_task<T> task, mt_stream *stream) {
    task.column_blocks = (int)mt_divide_up(a->Dv, V * STEP_LANES);
    auto bytes_of = [&](int64_t from, int64_t to, int64_t key_heads) {
        int64_t chunks = mt_cuda_chunk_count(a->spans, from, to);
        task.key_heads = (int)key_heads;
        return mt_cuda_chunk_bytes(chunks, to - from) + place_arrays(&task, to - from, chunks, LINES, V, NULL);
    };
    for (int64_t begin = 0, until, end = a->spans->count; begin < end; begin = until) {
        int64_t key_heads = a->Hk;
        until = end;
        while (key_heads > 1 && bytes_of(begin, until, key_heads) > stream->workspace_bytes)
            key_heads = mt_divide_up(key_heads, 2);
        while (until > begin + 1 && bytes_of(begin, until, key_heads) > stream->workspace_bytes)
            until = begin + (until - begin) / 2;
        char *memory = (char *)mt_cuda_workspace(stream, bytes_of(begin, until, key_heads));
        task.chunks = mt_cuda_chunks(a->spans, begin, until, memory, stream);
        memory += mt_cuda_chunk_bytes(task.chunks.count, until - begin);
        task.states = mt_states_on_device(&a->states, a->dstates, a->Hv * a->Dk * a->Dv, begin);
        for (int64_t first = 0; first < a->Hk; first += key_heads) {
            task.first_key_head = (int)first,
            task.key_heads = (int)(a->Hk - first < key_heads ? a->Hk - first : key_heads);
            place_arrays(&task, until - begin, task.chunks.count, LINES, V, memory);
            int64_t chunks = task.chunks.count, heads = task.key_heads * task.heads, at = first * task.heads;
            if (streams<T>(a))
                run_stream<T, KEEP>(a, task, until - begin, stream);
            else
                launch(step<T, V, LINES, KEEP>, task, until - begin, stream);
            launch(step_back<T, V, LINES, false>, task, until - begin, stream);
            mt_launch_early(finish<T>, dim3((unsigned)(chunks * task.key_heads)), dim3(MT_CUDA_DELTA_CHANNELS), 0,
                            mt_cuda_stream(stream), task);
            if (a->dA_log) mt_cuda_add_partials(a->dA_log + at, chunks, NULL, 0, task.partial_rate, heads, stream);
            if (a->ddt_bias)
                mt_cuda_add_partials(a->ddt_bias + at * a->Dk, chunks, NULL, 0, task.partial_bias, heads * a->Dk,
                                     stream);
        }
    }
}

template <class T> static void backward(const mt_delta_args *a, mt_stream *stream) {
    by_lines<T>(a, [&](auto width, auto lines) {
        run_backward<T, decltype(width)::value, decltype(lines)::value>(a, kda_task_of<T>(a), stream);
    });
}

template <class T> static void make_maps(const mt_delta_args *a, bool of_gradients, mt_stream *stream) {
    int64_t width = a->Hv * a->Dk * (of_gradients ? a->Dv : a->Dv + a->Dk);
    for (int64_t slot = 0; slot < a->states.slots; slot++) {
        int64_t s = (of_gradients ? a->states.first : a->states.last)[slot];
        if (s < 0) continue;
        kda_task<T> task = kda_task_of<T>(a);
        task.maps = (of_gradients ? a->dmaps : a->maps) + slot * width,
        task.crosses = mt_slot_crosses(&a->states, slot);
        task.chunks.spans = a->spans->device + s;
        by_lines<T>(a, [&](auto columns, auto lines) {
            constexpr int V = decltype(columns)::value, LINES = decltype(lines)::value;
            task.column_blocks = (int)mt_divide_up(of_gradients ? a->Dv : a->Dv + a->Dk, V * STEP_LANES);
            if (of_gradients)
                launch(step_back<T, V, LINES, true>, task, 1, stream);
            else
                launch(step<T, V, LINES, MAP>, task, 1, stream);
        });
    }
}

void mt_cuda_kda_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, forward, a, stream);
}

void mt_cuda_kda_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, backward, a, stream);
}

void mt_cuda_kda_maps(const mt_delta_args *a, bool of_gradients, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, make_maps, a, of_gradients, stream);
}
