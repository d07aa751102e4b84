/* ssd.cu: the scan of Mamba-2, as §18a of megatron.c has it, whose names are used here.
 *
 * Rows and columns of a head's state are scaled and added to alone, so that its blocks need nothing from each other.
 * In bf16, with states of up to 128 x 64, products run on tensor cores and accumulate in fp32, in chunks of 64 tokens.
 * `make_gates` computes the steps and decays of all chunks. `keep_states` goes along the spans with the state in
 * registers, and leaves the state before each chunk, rounded: all chunks follow at once, a block for a chunk and a
 * group, which takes the group's heads in turn, so that B, C and their product are read and computed once. The backward
 * has `keep_states` along the spans and in reverse, for S before and dS' after each chunk, then `chunk_backward`, which
 * sums dB and dC over the group's heads in registers.
 *
 * Other types, shapes and GPUs, and spans of a few tokens, take the recurrence token by token in fp32. Sums have one
 * order. */
#include "linear_attention.cuh"
#include "mma.cuh"

enum { TOKENS = MT_CHUNK_TOKENS, THREADS = 256, WARPS = THREADS / 32, GATES = 4 * TOKENS };
enum { ROWS = MT_CUDA_SSD_TILE_ROWS, COLUMNS = MT_CUDA_SSD_TILE_COLUMNS, STATE = ROWS * COLUMNS };

template <class T> struct ssd_task {
    const T *x, *B, *C, *dt, *A_log, *D, *dt_bias, *dout;
    T *out, *dx, *dB, *dC, *ddt;
    int64_t stride, dstride, dt_stride, ddt_stride;
    int H, heads, N, P; // heads: of a group
    float dt_min, dt_max;
    int first_group, groups; // of this launch, for the arrays below
    int column_blocks;
    mt_chunks chunks;
    mt_device_states states;
    float *maps;            // of one slot: [H, N P + 1], or [H, N, P]
    float *gates;           // [chunk, head, 4, 64]: see make_gates
    __nv_bfloat16 *S, *dS;  // [chunk, head, ROWS, COLUMNS]: S before a chunk, dS' after it
    float *before, *dafter; // [chunk, head, N, P]: the same, of the recurrence
    float *sums;            // [chunk, group, 2, 64, N]: dB and dC, of the recurrence
    float *partial;         // [3, chunk, head] of dA_log, dD, ddt_bias

    __device__ int launch_heads() const {
        return groups * heads;
    }
    __device__ int first_head() const {
        return first_group * heads;
    }
};

struct ssd_parameters {
    float A, D, bias;
    template <class T> __device__ ssd_parameters(const ssd_task<T> &task, int head) {
        A = -expf(mt_to_float(task.A_log[head])), D = mt_to_float(task.D[head]);
        bias = mt_to_float(task.dt_bias[head]);
    }
};

/* A step within its range; NaN stays NaN. */
template <class T> __device__ static inline float cut_step(const ssd_task<T> &task, float step) {
    return step < task.dt_min ? task.dt_min : step > task.dt_max ? task.dt_max : step;
}

template <class T> __device__ static inline float load_dt(const ssd_task<T> &task, int64_t row, int head) {
    return mt_to_float(task.dt[row * task.dt_stride + head]);
}

/* The gradient of dt + bias from that of the step. */
template <class T> __device__ static inline float dt_gradient(const ssd_task<T> &task, float raw, float dstep) {
    float step = softplus(raw);
    return step < task.dt_min || step > task.dt_max ? 0 : dstep / (1 + expf(-raw));
}

/* ---- token by token ---------------------------------------------------------------------------------------------- */

enum { STEP_LANES = MT_STEP_LANES, STEP_ROWS = THREADS / STEP_LANES, STEP_TOKENS = 8 };

/* The purpose of `step`: out; the states before all chunks, for the backward; or the map of context parallelism. */
enum ssd_purpose { FORWARD, KEEP, MAP };

/* A block per 8 V columns of a head of a span. A thread has V columns of every 32nd row of the state, LINES in all. */
template <int V, int LINES> struct step_place {
    int line, column, head, local; // local: of the launch
    int64_t number;                // of the span
    template <class T> __device__ explicit step_place(const ssd_task<T> &task) {
        line = (int)threadIdx.x / STEP_LANES;
        column = ((int)(blockIdx.x % task.column_blocks) * STEP_LANES + (int)threadIdx.x % STEP_LANES) * V;
        local = (int)blockIdx.y, head = local + task.first_head(), number = blockIdx.x / task.column_blocks;
    }
    template <class T>
    __device__ void load(mt_pack<float, V> (&S)[LINES], const ssd_task<T> &task, const float *from) const {
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = line + r * STEP_ROWS;
            S[r] = mt_load<V>(from + (int64_t)i * task.P + column, from && i < task.N && column < task.P);
        }
    }
    template <class T>
    __device__ void store(float *to, const ssd_task<T> &task, const mt_pack<float, V> (&S)[LINES]) const {
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = line + r * STEP_ROWS;
            if (i < task.N && column < task.P) mt_store(to + (int64_t)i * task.P + column, S[r]);
        }
    }
};

/* rows[STEP_ROWS LINES] = B or C of a token's group; zeros behind. */
template <int LINES, class T>
__device__ static inline void load_row(float *rows, const ssd_task<T> &task, const T *from, int64_t token, int head) {
    for (int i = (int)threadIdx.x; i < STEP_ROWS * LINES; i += THREADS)
        rows[i] = i < task.N ? mt_to_float(from[token * task.stride + (int64_t)(head / task.heads) * task.N + i]) : 0;
}

template <class T, int V, int LINES, ssd_purpose purpose>
__global__ void __launch_bounds__(THREADS, 2) step(const ssd_task<T> task) {
    __shared__ float B[STEP_ROWS * LINES], C[STEP_ROWS * LINES], sums[WARPS][STEP_LANES * V];
    mt_wait_for_previous();
    step_place<V, LINES> p(task);
    const ssd_parameters w(task, p.head);
    mt_span span = task.chunks.spans[p.number];
    int64_t size = (int64_t)task.N * task.P, by_state = p.head * size;
    const float *before = purpose == MAP ? NULL : task.states.before(span, p.number);
    float *kept = purpose == FORWARD ? task.states.kept(span) : NULL, factor = 1;
    int64_t first = task.chunks.table ? task.chunks.first[p.number] : p.number;
    mt_pack<float, V> S[LINES];
    p.load(S, task, before ? before + by_state : NULL);
    for (int64_t n = 0; n < span.q_len; n++) {
        int64_t token = span.q_start + n;
        if (purpose == KEEP && n % TOKENS == 0)
            p.store(task.before + ((first + n / TOKENS) * task.launch_heads() + p.local) * size, task, S);
        __syncthreads();
        load_row<LINES>(B, task, task.B, token, p.head);
        if (purpose == FORWARD) load_row<LINES>(C, task, task.C, token, p.head);
        float step = cut_step(task, softplus(load_dt(task, token, p.head) + w.bias)), decay = expf(step * w.A);
        mt_pack<float, V> x = mt_to_float(
            mt_load<V>(task.x + token * task.stride + (int64_t)p.head * task.P + p.column, p.column < task.P));
        float out[V] = {};
        factor *= decay;
        __syncthreads();
#pragma unroll
        for (int r = 0; r < LINES; r++) {
            int i = p.line + r * STEP_ROWS;
            for (int j = 0; j < V; j++) {
                S[r].value[j] = S[r].value[j] * decay + step * x.value[j] * B[i];
                if (purpose == FORWARD) out[j] += S[r].value[j] * C[i];
            }
        }
        if (purpose != FORWARD) continue;
        mt_sum_of_lines(out, sums);
        if (p.line == 0 && p.column < task.P) {
            mt_pack<float, V> y;
            for (int j = 0; j < V; j++) y.value[j] = out[j] + w.D * x.value[j];
            mt_store(task.out + (token * task.H + p.head) * task.P + p.column, mt_from_float<T>(y));
        }
    }
    if (kept) p.store(kept + by_state, task, S);
    if (purpose != MAP) return;
    float *map = task.maps + p.head * (size + 1);
#pragma unroll
    for (int r = 0; r < LINES; r++) {
        int i = p.line + r * STEP_ROWS;
        for (int j = 0; j < V; j++)
            if (i < task.N && p.column < task.P) map[(int64_t)i * task.P + p.column + j] = S[r].value[j];
    }
    if (threadIdx.x == 0 && p.column == 0) map[size] = factor;
}

/* The same in reverse: dS' after each chunk; of_map: the gradient of the state before the span instead, from its own
 * outputs. */
template <class T, int V, int LINES, bool of_map>
__global__ void __launch_bounds__(THREADS, 2) step_back(const ssd_task<T> task) {
    __shared__ float C[STEP_ROWS * LINES];
    mt_wait_for_previous();
    step_place<V, LINES> p(task);
    const ssd_parameters w(task, p.head);
    mt_span span = task.chunks.spans[p.number];
    int64_t size = (int64_t)task.N * task.P, by_state = p.head * size;
    const float *after = of_map ? NULL : task.states.gradient_after(p.number);
    int64_t first = task.chunks.table ? task.chunks.first[p.number] : p.number;
    mt_pack<float, V> dS[LINES];
    p.load(dS, task, after ? after + by_state : NULL);
    for (int64_t n = span.q_len - 1; n >= 0; n--) {
        int64_t token = span.q_start + n;
        if (!of_map && (n % TOKENS == TOKENS - 1 || n == span.q_len - 1))
            p.store(task.dafter + ((first + n / TOKENS) * task.launch_heads() + p.local) * size, task, dS);
        __syncthreads();
        load_row<LINES>(C, task, task.C, token, p.head);
        float decay = expf(cut_step(task, softplus(load_dt(task, token, p.head) + w.bias)) * w.A);
        mt_pack<float, V> dy =
            mt_to_float(mt_load<V>(task.dout + (token * task.H + p.head) * task.P + p.column, p.column < task.P));
        __syncthreads();
#pragma unroll
        for (int r = 0; r < LINES; r++)
            for (int j = 0; j < V; j++)
                dS[r].value[j] = (dS[r].value[j] + C[p.line + r * STEP_ROWS] * dy.value[j]) * decay;
    }
    if (of_map) p.store(task.maps + by_state, task, dS);
}

extern __shared__ __align__(1024) char ssd_shared[];

/* The gradients of a chunk from S before it and dS' after it: a block per chunk and group. Those of x, B, C and
 * b_t = B_t.(dS_t x_t) come from the recurrence, dG from pairs of tokens, so that what cancels does so exactly. */
template <class T> __global__ void __launch_bounds__(THREADS) recur_backward(const ssd_task<T> task) {
    float *S = (float *)ssd_shared; // [N, P + 1]
    __shared__ float step[TOKENS], b[TOKENS], of_D[TOKENS], of_read[TOKENS], of_rest[TOKENS], of_warp[WARPS];
    __shared__ float pairs[TOKENS][TOKENS + 1];
    __shared__ double G[TOKENS], dG[TOKENS], terms[3][TOKENS];
    mt_wait_for_previous();
    int thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32, N = task.N, P = task.P, line = P + 1;
    int64_t number = blockIdx.x / task.groups, size = (int64_t)N * P;
    int local_group = (int)(blockIdx.x % task.groups), group = local_group + task.first_group;
    mt_chunk chunk = mt_chunk_of(task.chunks, number);
    int64_t row = chunk.span.q_start + chunk.row, heads = (int64_t)task.chunks.count * task.launch_heads();
    float *dB = task.sums + (number * task.groups + local_group) * 2 * TOKENS * N, *dC = dB + TOKENS * N;
    int L = chunk.L;
    for (int h = 0; h < task.heads; h++) {
        int head = group * task.heads + h;
        int64_t at = number * task.launch_heads() + local_group * task.heads + h;
        const ssd_parameters w(task, head);
        const float *before = task.before + at * size, *after = task.dafter + at * size;
        const T *x = task.x + row * task.stride + (int64_t)head * P, *dY = task.dout + (row * task.H + head) * P;
        const T *B = task.B + row * task.stride + (int64_t)group * N,
                *C = task.C + row * task.stride + (int64_t)group * N;
        int64_t dY_row = (int64_t)task.H * P;
        /* to[t] = u_t.(S v_t) of each token */
        auto read_tokens = [&](float *to, const T *u, const T *v, int64_t v_row) {
            for (int t = warp; t < L; t += WARPS) {
                float dot = 0;
                for (int p = lane; p < P; p += 32) {
                    float sum = 0;
                    for (int n = 0; n < N; n++) sum += S[n * line + p] * mt_to_float(u[t * task.stride + n]);
                    dot += sum * mt_to_float(v[t * v_row + p]);
                }
                dot = mt_warp_sum(dot);
                if (lane == 0) to[t] = dot;
            }
        };
        for (int i = thread; i < size; i += THREADS) S[i / P * line + i % P] = L > 0 ? before[i] : 0;
        if (thread < L) step[thread] = cut_step(task, softplus(load_dt(task, row + thread, head) + w.bias));
        __syncthreads();
        if (thread < L) {
            double sum = 0;
            for (int t = 0; t <= thread; t++) sum += (double)(step[t] * w.A);
            G[thread] = sum;
        }
        __syncthreads();
        for (int n = thread; n < L * L; n += THREADS) {
            int t = n / L, i = n % L;
            float of_CB = 0, dM = 0;
            for (int c = 0; c < N && i < t; c++)
                of_CB += mt_to_float(C[t * task.stride + c]) * mt_to_float(B[i * task.stride + c]);
            for (int p = 0; p < P && i < t; p++)
                dM += mt_to_float(dY[t * dY_row + p]) * mt_to_float(x[i * task.stride + p]);
            pairs[t][i] = i < t ? of_CB * dM * step[i] * expf((float)(G[t] - G[i])) : 0;
        }
        read_tokens(of_read, C, dY, dY_row);
        __syncthreads();
        for (int t = 0; t < L; t++) {
            float decay = expf(step[t] * w.A);
            for (int n = warp; n < N; n += WARPS) { // a warp keeps its rows
                float sum = 0, factor = step[t] * mt_to_float(B[t * task.stride + n]);
                for (int p = lane; p < P; p += 32) {
                    float *s = &S[n * line + p];
                    *s = *s * decay + factor * mt_to_float(x[t * task.stride + p]);
                    sum += *s * mt_to_float(dY[t * dY_row + p]);
                }
                sum = mt_warp_sum(sum);
                if (lane == 0) dC[t * N + n] = sum + (h > 0 ? dC[t * N + n] : 0);
            }
        }
        __syncthreads();
        float both = 0; // <S before the chunk, dS'>
        for (int i = thread; i < size; i += THREADS) {
            float d = L > 0 ? after[i] : 0;
            both += L > 0 ? before[i] * d : 0;
            S[i / P * line + i % P] = d;
        }
        both = mt_warp_sum(both);
        if (lane == 0) of_warp[warp] = both;
        __syncthreads();
        both = 0;
        for (int i = 0; i < WARPS; i++) both += of_warp[i];
        read_tokens(of_rest, B, x, task.stride);
        __syncthreads();
        for (int t = L - 1; t >= 0; t--) {
            float decay = t < L - 1 ? expf(step[t + 1] * w.A) : 1, dot = 0;
            for (int n = warp; n < N; n += WARPS) {
                float sum = 0, c = mt_to_float(C[t * task.stride + n]);
                for (int p = lane; p < P; p += 32) {
                    float *s = &S[n * line + p];
                    *s = *s * decay + c * mt_to_float(dY[t * dY_row + p]);
                    sum += *s * mt_to_float(x[t * task.stride + p]);
                }
                sum = mt_warp_sum(sum);
                if (lane == 0) dB[t * N + n] = step[t] * sum + (h > 0 ? dB[t * N + n] : 0);
                dot += sum * mt_to_float(B[t * task.stride + n]);
            }
            if (lane == 0) of_warp[warp] = dot;
            __syncthreads();
            if (thread == 0) {
                b[t] = of_D[t] = 0;
                for (int i = 0; i < WARPS; i++) b[t] += of_warp[i];
                for (int p = 0; p < P; p++)
                    of_D[t] += mt_to_float(dY[t * dY_row + p]) * mt_to_float(x[t * task.stride + p]);
            }
            for (int p = warp; p < P; p += WARPS) {
                float sum = 0;
                for (int n = lane; n < N; n += 32) sum += S[n * line + p] * mt_to_float(B[t * task.stride + n]);
                sum = mt_warp_sum(sum);
                if (lane == 0)
                    task.dx[(row + t) * task.dstride + (int64_t)head * P + p] =
                        mt_from_float<T>(step[t] * sum + w.D * mt_to_float(dY[t * dY_row + p]));
            }
            __syncthreads();
        }
        if (thread < L) {
            double rest = (double)(expf((float)(G[L - 1] - G[thread])) * step[thread] * of_rest[thread]);
            dG[thread] = (double)(expf((float)G[thread]) * of_read[thread]) - rest;
            for (int i = 0; i < L; i++) dG[thread] += (double)pairs[thread][i] - (double)pairs[i][thread];
            terms[0][thread] = rest;
        }
        __syncthreads();
        if (thread < L) {
            double dg = (double)(expf((float)G[L - 1]) * both);
            for (int i = 0; i < L; i++) dg += terms[0][i];
            for (int i = L - 1; i >= thread; i--) dg += dG[i];
            float ddt = dt_gradient(task, load_dt(task, row + thread, head) + w.bias, w.A * (float)dg + b[thread]);
            task.ddt[(row + thread) * task.ddt_stride + head] = mt_from_float<T>(ddt);
            terms[1][thread] = of_D[thread], terms[2][thread] = ddt, G[thread] = dg * (double)(step[thread] * w.A);
        }
        __syncthreads();
        if (thread < 3) {
            double sum = 0;
            for (int t = 0; t < L; t++) sum += thread == 0 ? G[t] : terms[thread][t];
            task.partial[thread * heads + at] = (float)sum;
        }
        __syncthreads();
    }
    for (int i = thread; i < L * N; i += THREADS) {
        int64_t to = (row + i / N) * task.dstride + (int64_t)group * N + i % N;
        task.dB[to] = mt_from_float<T>(dB[i]), task.dC[to] = mt_from_float<T>(dC[i]);
    }
}

/* ---- steps and decays of a chunk --------------------------------------------------------------------------------- */

/* A warp per head of a chunk. Of each token step, G, e^(G_L - G) step, e^G; tokens behind the chunk have the step 0. */
static __global__ void make_gates(const ssd_task<__nv_bfloat16> task) {
    mt_wait_for_previous();
    int64_t number = blockIdx.x;
    int local = (int)(blockIdx.y * blockDim.y + threadIdx.y), lane = (int)threadIdx.x, head = local + task.first_head();
    if (local >= task.launch_heads()) return;
    mt_chunk chunk = mt_chunk_of(task.chunks, number);
    int64_t row = chunk.span.q_start + chunk.row;
    const ssd_parameters w(task, head);
    float steps[2], G[2], last = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = half * 32 + lane;
        bool exists = t < chunk.L;
        steps[half] = exists ? cut_step(task, softplus(load_dt(task, row + t, head) + w.bias)) : 0;
        float sum = steps[half] * w.A;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            float other = __shfl_up_sync(0xffffffff, sum, distance);
            if (lane >= distance) sum += other;
        }
        G[half] = sum + last, last = __shfl_sync(0xffffffff, G[half], 31);
    }
    float *gates = task.gates + (number * task.launch_heads() + local) * GATES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = half * 32 + lane;
        gates[t] = steps[half], gates[TOKENS + t] = G[half];
        gates[2 * TOKENS + t] = expf(last - G[half]) * steps[half], gates[3 * TOKENS + t] = expf(G[half]);
    }
}

/* ---- products on tensor cores ------------------------------------------------------------------------------------ */

typedef __nv_bfloat16 bf16;
typedef ssd_task<bf16> tile_task;

/* Starts to copy rows of `from` to a tile of R rows and 64 PANELS columns; zeros behind `rows` and `columns`. */
template <int R, int PANELS, int BLOCK>
__device__ static inline void copy_tile(uint32_t tile, const bf16 *from, int64_t stride, int rows, int columns) {
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < R * 8 * PANELS; i += BLOCK) {
        int row = i / (8 * PANELS), pack = i % (8 * PANELS);
        bool exists = row < rows && pack * 8 < columns;
        mt_copy16_async(tile + mt_tile_chunk<R>(row, pack), exists ? from + row * stride + pack * 8 : from, exists);
    }
}

/* The gates of a chunk of a head. */
template <int BLOCK> __device__ static inline void copy_gates(uint32_t to, const float *gates) {
    for (int i = (int)threadIdx.x; i < GATES / 4; i += BLOCK) mt_copy16_async(to + i * 16, gates + i * 4, true);
}

__device__ static inline float low_half(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ static inline float high_half(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000);
}

/* The pair of columns that begins at an even column of a tile. */
template <int R> __device__ static inline uint32_t tile_pair(uint32_t tile, int row, int column) {
    return tile + mt_tile_chunk<R>(row, column / 8) + column % 8 * 2;
}
__device__ static inline uint32_t load_pair(uint32_t from) {
    uint32_t pair;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(from) : "memory");
    return pair;
}

/* The words of the four lanes of a row as a matrix, transposed: lane t receives word t of each lane. */
__device__ static inline uint4 transposed_in_row(uint4 w, int t) {
    uint32_t other = __shfl_xor_sync(0xffffffff, t & 1 ? w.x : w.y, 1);
    if (t & 1)
        w.x = other;
    else
        w.y = other;
    other = __shfl_xor_sync(0xffffffff, t & 1 ? w.z : w.w, 1);
    if (t & 1)
        w.z = other;
    else
        w.w = other;
    other = __shfl_xor_sync(0xffffffff, t & 2 ? w.x : w.z, 2);
    if (t & 2)
        w.x = other;
    else
        w.z = other;
    other = __shfl_xor_sync(0xffffffff, t & 2 ? w.y : w.w, 2);
    if (t & 2)
        w.y = other;
    else
        w.w = other;
    return w;
}

enum { KEEP_THREADS = 128, KEEP_STAGES = 4, KEEP_ROWS = ROWS / 2 };

struct keep_stage {
    char rows[TOKENS * KEEP_ROWS * 2], columns[TOKENS * COLUMNS * 2];
    float gates[GATES];
};

/* Along a span, a block per half of the rows of a head's state: S before each chunk, from B and x; in reverse dS' after
 * each chunk, from C and dY. of_map: instead what one span leaves of no state. A warp has 16 rows in registers. */
template <bool reverse, bool of_map> __global__ void __launch_bounds__(KEEP_THREADS) keep_states(const tile_task task) {
    keep_stage *stages = (keep_stage *)ssd_shared;
    mt_wait_for_previous();
    int thread = (int)threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    int half = (int)(blockIdx.x % 2), local = (int)blockIdx.y, head = local + task.first_head();
    int64_t number = blockIdx.x / 2, first = task.chunks.table ? task.chunks.first[number] : number;
    mt_span span = task.chunks.spans[number];
    int64_t count = (span.q_len + TOKENS - 1) / TOKENS, size = (int64_t)task.N * task.P;
    int top = half * KEEP_ROWS + warp * 16 + g; // and top + 8: the rows of this lane
    const float *begin = of_map    ? NULL
                         : reverse ? task.states.gradient_after(number)
                                   : task.states.before(span, number);
    float S[COLUMNS / 8][4], factor = 1;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = top + e / 2 * 8, column = j * 8 + 2 * t + e % 2;
            bool exists = begin && row < task.N && column < task.P;
            S[j][e] = exists ? begin[head * size + (int64_t)row * task.P + column] : 0;
        }
    auto load = [&](int64_t n) {
        if (n < count) {
            keep_stage *stage = &stages[n % KEEP_STAGES];
            int64_t chunk = reverse ? count - 1 - n : n, row = span.q_start + chunk * TOKENS;
            int64_t left = span.q_len - chunk * TOKENS;
            int L = (int)(left < TOKENS ? left : TOKENS);
            const bf16 *rows = (reverse ? task.C : task.B) + row * task.stride + (int64_t)(head / task.heads) * task.N;
            const bf16 *columns = reverse ? task.dout + (row * task.H + head) * task.P
                                          : task.x + row * task.stride + (int64_t)head * task.P;
            copy_tile<TOKENS, 1, KEEP_THREADS>(mt_shared_address(stage->rows), rows + half * KEEP_ROWS, task.stride, L,
                                               task.N - half * KEEP_ROWS);
            copy_tile<TOKENS, 1, KEEP_THREADS>(mt_shared_address(stage->columns), columns,
                                               reverse ? (int64_t)task.H * task.P : task.stride, L, task.P);
            copy_gates<KEEP_THREADS>(mt_shared_address(stage->gates),
                                     task.gates + ((first + chunk) * task.launch_heads() + local) * GATES);
        }
        mt_load_async_commit();
    };
    for (int n = 0; n < KEEP_STAGES - 1; n++) load(n);
    for (int64_t n = 0; n < count; n++) {
        mt_load_async_wait<KEEP_STAGES - 2>();
        __syncthreads();
        load(n + KEEP_STAGES - 1);
        const keep_stage *stage = &stages[n % KEEP_STAGES];
        int64_t chunk = reverse ? count - 1 - n : n;
        if (!of_map) {
            bf16 *to = (reverse ? task.dS : task.S) + ((first + chunk) * task.launch_heads() + local) * STATE;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j += 4)
#pragma unroll
                for (int low = 0; low < 2; low++) {
                    uint4 pack = make_uint4(mt_pack_bf16(S[j][2 * low], S[j][2 * low + 1]),
                                            mt_pack_bf16(S[j + 1][2 * low], S[j + 1][2 * low + 1]),
                                            mt_pack_bf16(S[j + 2][2 * low], S[j + 2][2 * low + 1]),
                                            mt_pack_bf16(S[j + 3][2 * low], S[j + 3][2 * low + 1]));
                    mt_store_word((uint4 *)(to + (top + 8 * low) * COLUMNS + (j + t) * 8), transposed_in_row(pack, t));
                }
        }
        const float *factors = stage->gates + (reverse ? 3 : 2) * TOKENS;
        float decay = stage->gates[3 * TOKENS + TOKENS - 1];
        factor *= decay;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[j][e] *= decay;
        uint32_t rows = mt_shared_address(stage->rows), columns = mt_shared_address(stage->columns);
        uint32_t across = mt_lane_across(), down = mt_lane_down();
#pragma unroll
        for (int k = 0; k < TOKENS; k += 16) {
            uint32_t a[4], b[4];
            mt_ldmatrix_transposed(a, mt_tile_block<TOKENS>(rows, across, k, warp * 16));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 f = *(const float2 *)(factors + k + 2 * t + i / 2 * 8);
                a[i] = mt_pack_bf16(low_half(a[i]) * f.x, high_half(a[i]) * f.y);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; j++) {
                mt_ldmatrix_transposed(b, mt_tile_block<TOKENS>(columns, down, k, j * 16));
                mt_mma(S[2 * j], a, b[0], b[1]), mt_mma(S[2 * j + 1], a, b[2], b[3]);
            }
        }
    }
    mt_load_async_wait<0>();
    float *end = of_map ? task.maps + head * (reverse ? size : size + 1) : reverse ? NULL : task.states.kept(span);
    if (end && !of_map) end += head * size;
    if (of_map && !reverse && thread == 0 && half == 0) end[size] = factor;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = top + e / 2 * 8, column = j * 8 + 2 * t + e % 2;
            if (end && row < task.N && column < task.P) end[(int64_t)row * task.P + column] = S[j][e];
        }
}

enum { READ_THREADS = 128 };

struct read_stage {
    char S[STATE * 2], x[TOKENS * COLUMNS * 2];
    float gates[GATES];
};
struct read_room {
    char B[TOKENS * ROWS * 2], C[TOKENS * ROWS * 2], y[TOKENS * COLUMNS * 2];
    read_stage stages[2];
};

/* out of a chunk: a block per chunk and group. A warp has 16 tokens: their rows of C and of C B^T stay in registers. */
static __global__ void __launch_bounds__(READ_THREADS) read_states(const tile_task task) {
    read_room *room = (read_room *)ssd_shared;
    mt_wait_for_previous();
    int thread = (int)threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    int64_t number = blockIdx.x / task.groups;
    int local_group = (int)(blockIdx.x % task.groups), group = local_group + task.first_group;
    mt_chunk chunk = mt_chunk_of(task.chunks, number);
    int64_t row = chunk.span.q_start + chunk.row;
    int L = chunk.L;
    if (L <= 0) return;
    uint32_t across = mt_lane_across(), down = mt_lane_down();
    uint32_t B = mt_shared_address(room->B), C = mt_shared_address(room->C), y = mt_shared_address(room->y);
    auto load = [&](int h) {
        if (h < task.heads) {
            read_stage *stage = &room->stages[h % 2];
            int64_t at = number * task.launch_heads() + local_group * task.heads + h, head = group * task.heads + h;
            copy_tile<ROWS, 1, READ_THREADS>(mt_shared_address(stage->S), task.S + at * STATE, COLUMNS, ROWS, COLUMNS);
            copy_tile<TOKENS, 1, READ_THREADS>(mt_shared_address(stage->x), task.x + row * task.stride + head * task.P,
                                               task.stride, L, task.P);
            copy_gates<READ_THREADS>(mt_shared_address(stage->gates), task.gates + at * GATES);
        }
        mt_load_async_commit();
    };
    int64_t of_group = row * task.stride + (int64_t)group * task.N;
    copy_tile<TOKENS, 2, READ_THREADS>(B, task.B + of_group, task.stride, L, task.N);
    copy_tile<TOKENS, 2, READ_THREADS>(C, task.C + of_group, task.stride, L, task.N);
    mt_load_async_commit();
    load(0);
    mt_load_async_wait<1>();
    __syncthreads();
    uint32_t queries[ROWS / 16][4], b[4];
    float CB[TOKENS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        mt_ldmatrix(queries[k], mt_tile_block<TOKENS>(C, down, warp * 16, k * 16));
#pragma unroll
        for (int j = 0; j < TOKENS / 16; j++) {
            if (j > warp) continue; // later tokens
            mt_ldmatrix(b, mt_tile_block<TOKENS>(B, across, j * 16, k * 16));
            mt_mma(CB[2 * j], queries[k], b[0], b[1]), mt_mma(CB[2 * j + 1], queries[k], b[2], b[3]);
        }
    }
    int top = warp * 16 + g;
    for (int h = 0; h < task.heads; h++) {
        mt_load_async_wait<0>();
        __syncthreads();
        load(h + 1);
        const read_stage *stage = &room->stages[h % 2];
        const float *steps = stage->gates, *G = steps + TOKENS, *grown = steps + 3 * TOKENS;
        int head = group * task.heads + h;
        uint32_t S = mt_shared_address(stage->S), x = mt_shared_address(stage->x);
        float out[COLUMNS / 8][4] = {}, D = mt_to_float(task.D[head]);
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++)
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; j++) {
                mt_ldmatrix_transposed(b, mt_tile_block<ROWS>(S, down, k * 16, j * 16));
                mt_mma(out[2 * j], queries[k], b[0], b[1]), mt_mma(out[2 * j + 1], queries[k], b[2], b[3]);
            }
        float G_top = G[top], G_low = G[top + 8], grown_top = grown[top], grown_low = grown[top + 8];
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            uint32_t of_top = load_pair(tile_pair<TOKENS>(x, top, j * 8 + 2 * t));
            uint32_t of_low = load_pair(tile_pair<TOKENS>(x, top + 8, j * 8 + 2 * t));
            out[j][0] = out[j][0] * grown_top + D * low_half(of_top);
            out[j][1] = out[j][1] * grown_top + D * high_half(of_top);
            out[j][2] = out[j][2] * grown_low + D * low_half(of_low);
            out[j][3] = out[j][3] * grown_low + D * high_half(of_low);
        }
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) {
            if (k > warp) continue;
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 2; i++) { // columns k * 16 + 8 i + 2 t and the next
                int c = k * 16 + i * 8 + 2 * t;
                float2 of_G = *(const float2 *)(G + c), step = *(const float2 *)(steps + c);
                const float(&m)[4] = CB[2 * k + i];
                float top0 = c <= top ? m[0] * mt_exp(G_top - of_G.x) * step.x : 0;
                float top1 = c + 1 <= top ? m[1] * mt_exp(G_top - of_G.y) * step.y : 0;
                float low0 = c <= top + 8 ? m[2] * mt_exp(G_low - of_G.x) * step.x : 0;
                float low1 = c + 1 <= top + 8 ? m[3] * mt_exp(G_low - of_G.y) * step.y : 0;
                a[2 * i] = mt_pack_bf16(top0, top1), a[2 * i + 1] = mt_pack_bf16(low0, low1);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; j++) {
                mt_ldmatrix_transposed(b, mt_tile_block<TOKENS>(x, down, k * 16, j * 16));
                mt_mma(out[2 * j], a, b[0], b[1]), mt_mma(out[2 * j + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            mt_store_shared(tile_pair<TOKENS>(y, top, j * 8 + 2 * t), mt_pack_bf16(out[j][0], out[j][1]));
            mt_store_shared(tile_pair<TOKENS>(y, top + 8, j * 8 + 2 * t), mt_pack_bf16(out[j][2], out[j][3]));
        }
        __syncwarp();
        for (int i = thread % 32; i < 16 * 8; i += 32) {
            int token = warp * 16 + i / 8, pack = i % 8;
            if (token < L && pack * 8 < task.P)
                mt_store_word((uint4 *)(task.out + ((row + token) * task.H + head) * task.P + pack * 8),
                              mt_load_shared16(y + mt_tile_chunk<TOKENS>(token, pack)));
        }
        __syncwarp();
    }
}

struct backward_stage {
    char S[STATE * 2], dS[STATE * 2], x[TOKENS * COLUMNS * 2], dY[TOKENS * COLUMNS * 2];
    float gates[GATES];
};
struct backward_room {
    char B[TOKENS * ROWS * 2], C[TOKENS * ROWS * 2], M[TOKENS * TOKENS * 2], dx[TOKENS * COLUMNS * 2];
    backward_stage stages[2];
    /* Parts of sums over columns (half a row each) and over rows (a quarter of a column each), of all tokens. */
    float of_row[2][TOKENS], of_column[4][TOKENS]; // of dM M step, over i and over t
    float of_read[2][TOKENS], of_rest[2][TOKENS];  // C.dC and B'.dB' of the states
    float of_D[TOKENS];                            // dY.x
    float of_states[WARPS];                        // <S, dS'>
};

/* x summed over the four lanes of a row. */
__device__ static inline float sum_of_row(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/* to += factors (rows of a) b^T for 16 of b's rows, and dots += its products with `with`. */
__device__ static inline void add_state_rows(float (*to)[4], float (&dots)[2], const uint32_t (&a)[COLUMNS / 16][4],
                                             uint32_t state, uint32_t with, int top, int column,
                                             const float (&factors)[2]) {
    uint32_t across = mt_lane_across(), b[4];
    float sums[2][4] = {};
    int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
        mt_ldmatrix(b, mt_tile_block<ROWS>(state, across, column, k * 16));
        mt_mma(sums[0], a[k], b[0], b[1]), mt_mma(sums[1], a[k], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int low = 0; low < 2; low++) {
            uint32_t pair = load_pair(tile_pair<TOKENS>(with, top + 8 * low, column + 8 * i + 2 * t));
            float first = sums[i][2 * low] * factors[low], second = sums[i][2 * low + 1] * factors[low];
            dots[low] += first * low_half(pair) + second * high_half(pair);
            to[i][2 * low] += first, to[i][2 * low + 1] += second;
        }
    }
}

/* dG and the gradients of dt and of the parameters, by one warp: a lane has two neighbouring tokens. */
__device__ static inline void finish_head(const tile_task &task, const backward_room *room, const float *gates,
                                          int head, int64_t at, int64_t row, int L) {
    int lane = (int)threadIdx.x % 32;
    const float *steps = gates, *grown = gates + 3 * TOKENS;
    const ssd_parameters w(task, head);
    float states = 0, rest = 0, dG[2], of_X[2], sums[3] = {}; // of_X: dX.X
    for (int i = 0; i < WARPS; i++) states += room->of_states[i];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int t = 2 * lane + e;
        float of_rest = room->of_rest[0][t] + room->of_rest[1][t], of_column = 0;
        for (int i = 0; i < 4; i++) of_column += room->of_column[i][t];
        dG[e] =
            room->of_row[0][t] + room->of_row[1][t] - of_column + room->of_read[0][t] + room->of_read[1][t] - of_rest;
        of_X[e] = of_rest + of_column, rest += of_rest;
    }
    float last = grown[TOKENS - 1] * states + mt_warp_sum(rest),
          later = dG[0] + dG[1]; // later: of this lane and those behind
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float other = __shfl_down_sync(0xffffffff, later, distance);
        if (lane + distance < 32) later += other;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int t = 2 * lane + e;
        if (t >= L) continue;
        float dg = (e == 0 ? later : later - dG[0]) + last;
        float raw = load_dt(task, row + t, head) + w.bias;
        float ddt = dt_gradient(task, raw, w.A * dg + (steps[t] > 0 ? of_X[e] / steps[t] : 0));
        task.ddt[(row + t) * task.ddt_stride + head] = __float2bfloat16_rn(ddt);
        sums[0] += dg * steps[t] * w.A, sums[1] += room->of_D[t], sums[2] += ddt;
    }
    int64_t heads = task.chunks.count * task.launch_heads();
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float sum = mt_warp_sum(sums[i]);
        if (lane == 0) task.partial[i * heads + at] = sum;
    }
}

/* The gradients of a chunk: a block per chunk and group. Warp w has tokens of the quarter w % 4, and of their columns
 * the half w / 4. */
static __global__ void __launch_bounds__(THREADS, 1) chunk_backward(const tile_task task) {
    backward_room *room = (backward_room *)ssd_shared;
    mt_wait_for_previous();
    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, quarter = warp % 4, half = warp / 4;
    int g = lane / 4, t = lane % 4, top = quarter * 16 + g;
    int64_t number = blockIdx.x / task.groups;
    int local_group = (int)(blockIdx.x % task.groups), group = local_group + task.first_group;
    mt_chunk chunk = mt_chunk_of(task.chunks, number);
    int64_t row = chunk.span.q_start + chunk.row, first = number * task.launch_heads() + local_group * task.heads;
    int L = chunk.L;
    if (L <= 0) {
        for (int i = thread; i < 3 * task.heads; i += THREADS)
            task.partial[i / task.heads * task.chunks.count * task.launch_heads() + first + i % task.heads] = 0;
        return;
    }
    uint32_t across = mt_lane_across(), down = mt_lane_down(), a[4], b[4];
    uint32_t B = mt_shared_address(room->B), C = mt_shared_address(room->C);
    uint32_t M = mt_shared_address(room->M), out = mt_shared_address(room->dx);
    auto load = [&](int h) {
        if (h < task.heads) {
            backward_stage *stage = &room->stages[h % 2];
            int64_t at = first + h, head = group * task.heads + h;
            copy_tile<TOKENS, 1, THREADS>(mt_shared_address(stage->x), task.x + row * task.stride + head * task.P,
                                          task.stride, L, task.P);
            copy_tile<TOKENS, 1, THREADS>(mt_shared_address(stage->dY), task.dout + (row * task.H + head) * task.P,
                                          (int64_t)task.H * task.P, L, task.P);
            copy_tile<ROWS, 1, THREADS>(mt_shared_address(stage->S), task.S + at * STATE, COLUMNS, ROWS, COLUMNS);
            copy_tile<ROWS, 1, THREADS>(mt_shared_address(stage->dS), task.dS + at * STATE, COLUMNS, ROWS, COLUMNS);
            copy_gates<THREADS>(mt_shared_address(stage->gates), task.gates + at * GATES);
        }
        mt_load_async_commit();
    };
    int64_t of_group = row * task.stride + (int64_t)group * task.N;
    copy_tile<TOKENS, 2, THREADS>(B, task.B + of_group, task.stride, L, task.N);
    copy_tile<TOKENS, 2, THREADS>(C, task.C + of_group, task.stride, L, task.N);
    mt_load_async_commit();
    load(0);
    mt_load_async_wait<1>();
    __syncthreads();
    float CB[4][4] = {}, dCB[4][4] = {}, dB[8][4] = {}, dC[8][4] = {};
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        mt_ldmatrix(a, mt_tile_block<TOKENS>(C, down, quarter * 16, k * 16));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            mt_ldmatrix(b, mt_tile_block<TOKENS>(B, across, half * 32 + j * 16, k * 16));
            mt_mma(CB[2 * j], a, b[0], b[1]), mt_mma(CB[2 * j + 1], a, b[2], b[3]);
        }
    }
    for (int h = 0; h < task.heads; h++) {
        mt_load_async_wait<0>();
        __syncthreads();
        load(h + 1);
        const backward_stage *stage = &room->stages[h % 2];
        const float *steps = stage->gates, *G = steps + TOKENS, *rest = G + TOKENS, *grown = rest + TOKENS;
        int head = group * task.heads + h;
        uint32_t S = mt_shared_address(stage->S), dS = mt_shared_address(stage->dS);
        uint32_t x = mt_shared_address(stage->x), dY = mt_shared_address(stage->dY);
        const float G_of[2] = {G[top], G[top + 8]};
        uint32_t rows[COLUMNS / 16][4]; // of dY, then of x
        /* dM, d(C B^T) and M */
        float dM[4][4] = {}, of_row[2] = {};
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            mt_ldmatrix(rows[k], mt_tile_block<TOKENS>(dY, down, quarter * 16, k * 16));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                mt_ldmatrix(b, mt_tile_block<TOKENS>(x, across, half * 32 + j * 16, k * 16));
                mt_mma(dM[2 * j], rows[k], b[0], b[1]), mt_mma(dM[2 * j + 1], rows[k], b[2], b[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int c = half * 32 + j * 8 + 2 * t;
            float of_column[2] = {};
#pragma unroll
            for (int low = 0; low < 2; low++) {
                float m[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int i = c + e, token = top + 8 * low, n = 2 * low + e;
                    float decay = i <= token ? mt_exp(G_of[low] - G[i]) : 0, d = dM[j][n] * decay * steps[i];
                    dCB[j][n] += d, m[e] = CB[j][n] * decay;
                    of_row[low] += d * CB[j][n], of_column[e] += d * CB[j][n];
                    if (i == token) room->of_D[token] = dM[j][n];
                }
                mt_store_shared(tile_pair<TOKENS>(M, top + 8 * low, c), mt_pack_bf16(m[0], m[1]));
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                for (int distance = 4; distance < 32; distance *= 2)
                    of_column[e] += __shfl_xor_sync(0xffffffff, of_column[e], distance);
                if (g == 0) room->of_column[quarter][c + e] = of_column[e];
            }
        }
        /* dC and dB from the states */
        const float grown_of[2] = {grown[top], grown[top + 8]}, rest_of[2] = {rest[top], rest[top + 8]};
        float of_read[2] = {}, of_rest[2] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) add_state_rows(&dC[2 * j], of_read, rows, S, C, top, half * 64 + j * 16, grown_of);
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++)
            mt_ldmatrix(rows[k], mt_tile_block<TOKENS>(x, down, quarter * 16, k * 16));
#pragma unroll
        for (int j = 0; j < 4; j++) add_state_rows(&dB[2 * j], of_rest, rows, dS, B, top, half * 64 + j * 16, rest_of);
        /* dX from the states, and <S, dS'> */
        float dX[4][4] = {}, states = 0;
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++) {
            mt_ldmatrix(a, mt_tile_block<TOKENS>(B, down, quarter * 16, k * 16));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                mt_ldmatrix_transposed(b, mt_tile_block<ROWS>(dS, down, k * 16, half * 32 + j * 16));
                mt_mma(dX[2 * j], a, b[0], b[1]), mt_mma(dX[2 * j + 1], a, b[2], b[3]);
            }
        }
        const float to_end[2] = {mt_exp(G[TOKENS - 1] - G_of[0]), mt_exp(G[TOKENS - 1] - G_of[1])};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dX[j][e] *= to_end[e / 2];
#pragma unroll
        for (int i = 0; i < STATE / 8 / THREADS; i++) {
            int at = (i * THREADS + thread) * 16;
            uint4 left = mt_load_shared16(S + at), right = mt_load_shared16(dS + at);
            states += low_half(left.x) * low_half(right.x) + high_half(left.x) * high_half(right.x);
            states += low_half(left.y) * low_half(right.y) + high_half(left.y) * high_half(right.y);
            states += low_half(left.z) * low_half(right.z) + high_half(left.z) * high_half(right.z);
            states += low_half(left.w) * low_half(right.w) + high_half(left.w) * high_half(right.w);
        }
        states = mt_warp_sum(states);
        if (lane == 0) room->of_states[warp] = states;
        __syncthreads(); // M is complete
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) {
            if (k < quarter) continue; // earlier tokens
            mt_ldmatrix_transposed(a, mt_tile_block<TOKENS>(M, across, k * 16, quarter * 16));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                mt_ldmatrix_transposed(b, mt_tile_block<TOKENS>(dY, down, k * 16, half * 32 + j * 16));
                mt_mma(dX[2 * j], a, b[0], b[1]), mt_mma(dX[2 * j + 1], a, b[2], b[3]);
            }
        }
        const float D = mt_to_float(task.D[head]), step_of[2] = {steps[top], steps[top + 8]};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int low = 0; low < 2; low++) {
                int c = half * 32 + j * 8 + 2 * t, token = top + 8 * low;
                uint32_t dy = load_pair(tile_pair<TOKENS>(dY, token, c));
                float d0 = dX[j][2 * low], d1 = dX[j][2 * low + 1];
                mt_store_shared(tile_pair<TOKENS>(out, token, c), mt_pack_bf16(step_of[low] * d0 + D * low_half(dy),
                                                                               step_of[low] * d1 + D * high_half(dy)));
            }
#pragma unroll
        for (int low = 0; low < 2; low++) {
            of_row[low] = sum_of_row(of_row[low]), of_read[low] = sum_of_row(of_read[low]);
            of_rest[low] = sum_of_row(of_rest[low]);
            if (t > 0) continue;
            int token = top + 8 * low;
            room->of_row[half][token] = of_row[low], room->of_read[half][token] = of_read[low];
            room->of_rest[half][token] = of_rest[low];
        }
        __syncwarp();
        for (int i = lane; i < 16 * 4; i += 32) {
            int token = quarter * 16 + i / 4, pack = half * 4 + i % 4;
            if (token < L && pack * 8 < task.P)
                mt_store_word((uint4 *)(task.dx + (row + token) * task.dstride + (int64_t)head * task.P + pack * 8),
                              mt_load_shared16(out + mt_tile_chunk<TOKENS>(token, pack)));
        }
        __syncthreads(); // the sums are complete
        if (warp == 0) finish_head(task, room, stage->gates, head, first + h, row, L);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int low = 0; low < 2; low++)
            mt_store_shared(tile_pair<TOKENS>(M, top + 8 * low, half * 32 + j * 8 + 2 * t),
                            mt_pack_bf16(dCB[j][2 * low], dCB[j][2 * low + 1]));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        uint32_t earlier[4];
        mt_ldmatrix(earlier, mt_tile_block<TOKENS>(M, down, quarter * 16, k * 16));
        mt_ldmatrix_transposed(a, mt_tile_block<TOKENS>(M, across, k * 16, quarter * 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (k <= quarter) {
                mt_ldmatrix_transposed(b, mt_tile_block<TOKENS>(B, down, k * 16, half * 64 + j * 16));
                mt_mma(dC[2 * j], earlier, b[0], b[1]), mt_mma(dC[2 * j + 1], earlier, b[2], b[3]);
            }
            if (k >= quarter) {
                mt_ldmatrix_transposed(b, mt_tile_block<TOKENS>(C, down, k * 16, half * 64 + j * 16));
                mt_mma(dB[2 * j], a, b[0], b[1]), mt_mma(dB[2 * j + 1], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int low = 0; low < 2; low++) {
            int token = top + 8 * low, c = half * 64 + j * 8 + 2 * t;
            if (token >= L || c >= task.N) continue;
            int64_t to = (row + token) * task.dstride + (int64_t)group * task.N + c;
            *(uint32_t *)(task.dB + to) = mt_pack_bf16(dB[j][2 * low], dB[j][2 * low + 1]);
            *(uint32_t *)(task.dC + to) = mt_pack_bf16(dC[j][2 * low], dC[j][2 * low + 1]);
        }
}

/* ---- states of context parallelism ------------------------------------------------------------------------------- */

/* out of each head = base + factor in; in NULL: the base alone. A thread per element. */
static __global__ void carry(float *out, const float *base, int64_t base_stride, const float *maps, const float *in,
                             int64_t size) {
    int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y;
    mt_wait_for_previous();
    if (n >= size) return;
    float own = base[head * base_stride + n];
    out[head * size + n] = in ? own + maps[head * (size + 1) + size] * in[head * size + n] : own;
}

static void launch_carry(const mt_ssd_args *a, const mt_carried_state *state, const float *base, int64_t base_stride,
                         mt_stream *stream) {
    int64_t size = a->N * a->P;
    const float *maps = a->maps + state->slot * a->H * (size + 1);
    const float *in = mt_slot_crosses(&a->states, state->slot) ? state->in : NULL;
    mt_launch_early(carry, dim3(mt_grid_size(size, 256), (unsigned)a->H), dim3(256), 0, mt_cuda_stream(stream),
                    state->out, base, base_stride, maps, in, size);
}

extern "C" void mt_cuda_ssd_carry_forward(const mt_ssd_args *a, const mt_carried_state *state, mt_dtype dtype,
                                          mt_stream *stream) {
    int64_t size = a->N * a->P;
    (void)dtype;
    launch_carry(a, state, a->maps + state->slot * a->H * (size + 1), size + 1, stream);
}

extern "C" void mt_cuda_ssd_carry_backward(const mt_ssd_args *a, const mt_carried_state *state, mt_dtype dtype,
                                           mt_stream *stream) {
    int64_t size = a->N * a->P;
    (void)dtype;
    launch_carry(a, state, a->dmaps + state->slot * a->H * size, size, stream);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static int64_t most_shared(void) {
    return (int64_t)mt_cuda_device()->sharedMemPerBlockOptin;
}

/* True if the kernels on tensor cores serve: bf16, rows in packs of 16 bytes, and states and blocks that fit. */
static bool uses_tiles(const mt_ssd_args *a, mt_dtype dtype) {
    return dtype == MT_BF16 && a->N <= ROWS && a->P <= COLUMNS && (int64_t)sizeof(backward_room) <= most_shared() &&
           mt_wide(dtype, {a->x, a->B, a->C, a->out, a->dout, a->dx, a->dB, a->dC},
                   {a->stride, a->dstride, a->N, a->P});
}

template <class T> static ssd_task<T> ssd_task_of(const mt_ssd_args *a) {
    ssd_task<T> task = {};
    MT_CHECK(a->N <= MT_CUDA_SSD_ROWS && a->P <= MT_CUDA_SSD_COLUMNS);
    task.x = (const T *)a->x, task.B = (const T *)a->B, task.C = (const T *)a->C, task.dt = (const T *)a->dt;
    task.A_log = (const T *)a->A_log, task.D = (const T *)a->D, task.dt_bias = (const T *)a->dt_bias;
    task.dout = (const T *)a->dout, task.out = (T *)a->out, task.dx = (T *)a->dx, task.dB = (T *)a->dB;
    task.dC = (T *)a->dC, task.ddt = (T *)a->ddt, task.stride = a->stride, task.dstride = a->dstride;
    task.dt_stride = a->dt_stride, task.ddt_stride = a->ddt_stride, task.dt_min = a->dt_min, task.dt_max = a->dt_max;
    task.H = (int)a->H, task.heads = (int)(a->H / a->G), task.N = (int)a->N, task.P = (int)a->P;
    task.groups = (int)a->G;
    return task;
}

/* The arrays of a launch over some chunks and groups, one behind the other; memory NULL: only counts the bytes. */
template <class T>
static int64_t place_arrays(ssd_task<T> *task, int64_t chunks, bool tiles, bool backward, char *memory) {
    int64_t used = 0, heads = chunks * task->groups * task->heads, size = (int64_t)task->N * task->P;
    auto take = [&](auto **array, int64_t count) {
        if (memory) *array = (std::remove_reference_t<decltype(*array)>)(memory + used);
        used += mt_divide_up(count * (int64_t)sizeof **array, 256) * 256;
    };
    if (tiles) take(&task->gates, heads * GATES), take(&task->S, heads * STATE);
    if (backward && tiles) take(&task->dS, heads * STATE);
    if (backward && !tiles) {
        take(&task->before, heads * size), take(&task->dafter, heads * size);
        take(&task->sums, chunks * task->groups * 2 * TOKENS * task->N);
    }
    if (backward) take(&task->partial, 3 * heads);
    return used;
}

/* Calls body(task, spans) for parts of the spans and groups whose arrays fit the workspace. */
template <class T, class Body>
static void by_parts(const mt_ssd_args *a, ssd_task<T> task, int64_t begin, int64_t end, bool tiles, bool backward,
                     mt_stream *stream, Body body) {
    auto bytes_of = [&](int64_t from, int64_t to, int64_t groups) {
        int64_t chunks = mt_cuda_chunk_count(a->spans, from, to);
        task.groups = (int)groups;
        return mt_cuda_chunk_bytes(chunks, to - from) + place_arrays(&task, chunks, tiles, backward, NULL);
    };
    while (begin < end) {
        int64_t until = end, groups = a->G;
        while (groups > 1 && bytes_of(begin, until, groups) > stream->workspace_bytes) groups = mt_divide_up(groups, 2);
        while (until > begin + 1 && bytes_of(begin, until, groups) > stream->workspace_bytes)
            until = begin + (until - begin) / 2;
        char *memory = (char *)mt_cuda_workspace(stream, bytes_of(begin, until, groups));
        task.chunks = mt_cuda_chunks(a->spans, begin, until, memory, stream);
        memory += mt_cuda_chunk_bytes(task.chunks.count, until - begin);
        task.states = mt_states_on_device(&a->states, a->dstates, a->H * a->N * a->P, begin);
        for (int64_t first = 0; first < a->G; first += groups) {
            task.first_group = (int)first, task.groups = (int)(a->G - first < groups ? a->G - first : groups);
            place_arrays(&task, task.chunks.count, tiles, backward, memory);
            body(task, until - begin);
        }
        begin = until;
    }
}

template <class T>
static void launch(void (*kernel)(ssd_task<T>), dim3 grid, dim3 block, int64_t bytes, const ssd_task<T> &task,
                   mt_stream *stream) {
    if (bytes > 0) mt_cuda_take_shared(kernel, bytes);
    mt_launch_early(kernel, grid, block, bytes, mt_cuda_stream(stream), task);
}

/* Calls body(mt_width<V>(), mt_width<LINES>()). */
template <class T, class Body> static void by_lines(const mt_ssd_args *a, Body body) {
    bool wide = a->P % 4 == 0 && a->stride % 4 == 0;
    for (const void *address : {a->x, (const void *)a->out, a->dout}) wide &= (uintptr_t)address % (4 * sizeof(T)) == 0;
    for (const void *address : {(const void *)a->states.memory, (const void *)a->dstates, (const void *)a->dmaps})
        wide &= (uintptr_t)address % 16 == 0;
    auto of_width = [&](auto width) {
        if (a->N <= 4 * STEP_ROWS)
            body(width, mt_width<4>());
        else
            body(width, mt_width<MT_CUDA_SSD_ROWS / STEP_ROWS>());
    };
    if (wide)
        of_width(mt_width<4>());
    else
        of_width(mt_width<1>());
}

/* Calls launch for a recurrence over spans. */
template <class T, class Width>
static void launch_steps(void (*kernel)(ssd_task<T>), Width, ssd_task<T> task, int64_t spans, mt_stream *stream) {
    task.column_blocks = (int)mt_divide_up(task.P, Width::value * STEP_LANES);
    dim3 grid((unsigned)(spans * task.column_blocks), (unsigned)(task.groups * task.heads));
    launch(kernel, grid, dim3(THREADS), 0, task, stream);
}

template <class T, ssd_purpose purpose>
static void run_steps(const mt_ssd_args *a, const ssd_task<T> &task, int64_t spans, mt_stream *stream) {
    by_lines<T>(a, [&](auto width, auto lines) {
        launch_steps(step<T, decltype(width)::value, decltype(lines)::value, purpose>, width, task, spans, stream);
    });
}

template <class T, bool of_map>
static void run_steps_back(const mt_ssd_args *a, const ssd_task<T> &task, int64_t spans, mt_stream *stream) {
    by_lines<T>(a, [&](auto width, auto lines) {
        launch_steps(step_back<T, decltype(width)::value, decltype(lines)::value, of_map>, width, task, spans, stream);
    });
}

static void run_gates(const tile_task &task, mt_stream *stream) {
    dim3 grid((unsigned)task.chunks.count, (unsigned)mt_divide_up(task.groups * task.heads, WARPS));
    launch(make_gates, grid, dim3(32, WARPS), 0, task, stream);
}

template <bool reverse, bool of_map> static void run_keep(const tile_task &task, int64_t spans, mt_stream *stream) {
    dim3 grid((unsigned)(2 * spans), (unsigned)(task.groups * task.heads));
    launch(keep_states<reverse, of_map>, grid, dim3(KEEP_THREADS), KEEP_STAGES * (int64_t)sizeof(keep_stage), task,
           stream);
}

template <class T> static void forward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    ssd_task<T> task = ssd_task_of<T>(a);
    if (mt_longest_span(a->spans) <= STEP_TOKENS || !uses_tiles(a, dtype)) {
        task.chunks.spans = a->spans->device;
        task.states = mt_states_on_device(&a->states, NULL, a->H * a->N * a->P, 0);
        run_steps<T, FORWARD>(a, task, a->spans->count, stream);
        return;
    }
    if constexpr (std::is_same_v<T, bf16>)
        by_parts(a, task, 0, a->spans->count, true, false, stream, [&](const tile_task &part, int64_t spans) {
            run_gates(part, stream);
            run_keep<false, false>(part, spans, stream);
            launch(read_states, dim3((unsigned)(part.chunks.count * part.groups)), dim3(READ_THREADS),
                   (int64_t)sizeof(read_room), part, stream);
        });
}

template <class T> static void backward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    bool tiles = uses_tiles(a, dtype);
    by_parts(
        a, ssd_task_of<T>(a), 0, a->spans->count, tiles, true, stream, [&](const ssd_task<T> &part, int64_t spans) {
            int64_t chunks = part.chunks.count, heads = part.groups * part.heads, first = part.first_group * part.heads;
            dim3 grid((unsigned)(chunks * part.groups));
            if (!tiles) {
                run_steps<T, KEEP>(a, part, spans, stream);
                run_steps_back<T, false>(a, part, spans, stream);
                launch(recur_backward<T>, grid, dim3(THREADS), a->N * (a->P + 1) * (int64_t)sizeof(float), part,
                       stream);
            } else if constexpr (std::is_same_v<T, bf16>) {
                run_gates(part, stream);
                run_keep<false, false>(part, spans, stream);
                run_keep<true, false>(part, spans, stream);
                launch(chunk_backward, grid, dim3(THREADS), (int64_t)sizeof(backward_room), part, stream);
            }
            float *sums[] = {a->dA_log, a->dD, a->ddt_bias};
            for (int i = 0; i < 3; i++)
                if (sums[i])
                    mt_cuda_add_partials(sums[i] + first, chunks, NULL, 0, part.partial + i * chunks * heads, heads,
                                         stream);
        });
}

template <class T> static void make_maps(const mt_ssd_args *a, bool backward, mt_dtype dtype, mt_stream *stream) {
    int64_t size = a->N * a->P;
    bool tiles = uses_tiles(a, dtype);
    for (int64_t slot = 0; slot < a->states.slots; slot++) {
        int64_t s = (backward ? a->states.first : a->states.last)[slot];
        if (s < 0) continue;
        ssd_task<T> task = ssd_task_of<T>(a);
        task.maps = backward ? a->dmaps + slot * a->H * size : a->maps + slot * a->H * (size + 1);
        by_parts(a, task, s, s + 1, tiles, false, stream, [&](const ssd_task<T> &part, int64_t spans) {
            if (!tiles) {
                if (backward)
                    run_steps_back<T, true>(a, part, spans, stream);
                else
                    run_steps<T, MAP>(a, part, spans, stream);
            } else if constexpr (std::is_same_v<T, bf16>) {
                run_gates(part, stream);
                if (backward)
                    run_keep<true, true>(part, spans, stream);
                else
                    run_keep<false, true>(part, spans, stream);
            }
        });
    }
}

extern "C" void mt_cuda_ssd_forward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count > 0) MT_CUDA_DISPATCH(dtype, forward, a, dtype, stream);
}

extern "C" void mt_cuda_ssd_backward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count > 0) MT_CUDA_DISPATCH(dtype, backward, a, dtype, stream);
}

extern "C" void mt_cuda_ssd_map_forward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, make_maps, a, false, dtype, stream);
}

extern "C" void mt_cuda_ssd_map_backward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_CUDA_DISPATCH(dtype, make_maps, a, true, dtype, stream);
}
