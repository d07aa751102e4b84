/* delta_rule.cu: the gated delta rule in chunks of 64 tokens, as §17a of megatron.c has it, whose names are used here.
 *
 * The columns of a state do not depend on each other, so that a block takes a few columns of one head along a span. The
 * matrices that all columns share are made before, for all chunks at once. With A = (I + beta R)^-1 diag(beta), a chunk
 * is
 *
 *   U = A (V - K' S),   O = Q' S + P U,   S' = e^G_L S + K"^T U
 *   beta dB = dV = A^T (P^T dO + K" dS'),   dS = e^G_L dS' + Q'^T dO - K'^T dV
 *
 * Forward: `prepare` (A and P of each chunk and head), then `advance` along the spans. Backward: `prepare`, `advance`
 * (S before each chunk, and U), `retreat` (dS after each chunk, and dV), then for all chunks at once `score_backward`
 * (the gradients of P and R, and db), `key_backward` (those of q, k and G) and `finish_backward` (lengths of q and k,
 * da). Spans of a few tokens take the recurrence token by token, which reads and writes a state once.
 *
 * q and k stay as they are in memory: their lengths, decays and beta scale rows of results in fp32, or rows of the
 * other operand. Products of bf16 and fp16 operands run on tensor cores and accumulate in fp32; those of fp32 operands
 * are exact. Sums have one order. */
#include "linear_attention.cuh"

#include <mma.h>

enum { TOKENS = MT_CHUNK_TOKENS, THREADS = 256, WARPS = THREADS / 32, SQUARE = TOKENS * TOKENS };

/* Elements between rows of a matrix in shared memory: 16 bytes more than its columns, against bank conflicts. */
template <class T> __host__ __device__ static constexpr int padded(int columns) {
    return columns + 16 / (int)sizeof(T);
}

template <class T> struct delta_task {
    const T *q, *k, *v, *b, *a, *A_log, *dt_bias, *dout;
    T *out, *dq, *dk, *dv, *db, *da;
    int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride, b_stride, a_stride, db_stride, da_stride;
    int Hv, heads, Dk, Dv;           // heads: value heads of a key head
    int KP, VP;                      // Dk and Dv rounded up to whole tiles
    int first_key_head, key_heads;   // of this launch, for the arrays below
    int column_blocks, parts, width; // width: channels of a key in a part
    float q_scale;                   // 1 / sqrt(Dk)
    bool wide_keys, wide_values;     // rows can be read and written in packs of 16 bytes
    mt_chunks chunks;
    mt_device_states states;
    float *maps;        // [Hv, Dk, Dv + Dk] of one slot, or [Hv, Dk, Dv]
    bool crosses;       // that slot's span begins with a state
    T *A, *P;           // [chunk, head, 64, 64]; in the backward J and H later: see score_backward
    float *gates;       // [chunk, head, 2, 64] G, beta
    float *factors;     // [chunk, key head, 2, 64] 1 / length of q and of k
    T *before, *dafter; // [chunk, head, KP, VP] S before a chunk, dS after it
    T *U;               // [chunk, head, 64, VP]
    float *score_dg;    // [chunk, head, 64] gradients of g from P and R
    float *state_dg;    // [chunk, head, parts, 2, 64] from the states: see key_backward
    float *dots;        // [chunk, key head, parts, 2, 64] q . dq and k . dk
    float *partial;     // [2, chunk, head] of dA_log and ddt_bias
};

/* A chunk and head of a launch. */
struct delta_place {
    int64_t chunk;                // number
    int head, key_head;           // of the launch
    int all, all_keys;            // the same, counted from the first of all
    int64_t by_head, by_key_head; // rows of the launch's arrays
};

template <class T> __device__ static inline delta_place place_of(const delta_task<T> &task, int64_t chunk, int head) {
    delta_place p = {chunk, head, head / task.heads};
    p.all = head + task.first_key_head * task.heads, p.all_keys = p.key_head + task.first_key_head;
    p.by_head = chunk * task.key_heads * task.heads + head, p.by_key_head = chunk * task.key_heads + p.key_head;
    return p;
}

/* ---- matrices in shared memory ----------------------------------------------------------------------------------- */

/* c[M, N] = op(a)[M, K] op(b)[K, N] + scale c, the latter if `adds`; all threads of the block. A transposed operand has
 * rows of its other index. M, N and K are multiples of 16. Does not wait for other warps, but two calls with equal M
 * and N give each element to the same warp. */
template <int TILES, bool a_transposed, bool b_transposed, class E>
__device__ static inline void product_in_strips(float *c, int c_row, const E *a, int a_row, const E *b, int b_row,
                                                int M, int N, int K, bool adds, float scale) {
    using namespace nvcuda::wmma;
    constexpr bool exists = std::is_same_v<E, __half> || MT_CUDA_KERNELS >= 80; // else limits.no_bf16: bf16 is refused
    using F = std::conditional_t<exists, E, __half>;
    using a_order = std::conditional_t<a_transposed, col_major, row_major>;
    using b_order = std::conditional_t<b_transposed, col_major, row_major>;
    int strips = N / (16 * TILES);
    for (int strip = (int)threadIdx.x / 32; strip < M / 16 * strips; strip += WARPS) {
        int m = strip / strips * 16, n = strip % strips * 16 * TILES;
        fragment<accumulator, 16, 16, 16, float> sums[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (adds) {
                load_matrix_sync(sums[i], c + m * c_row + n + 16 * i, (unsigned)c_row, mem_row_major);
                for (int e = 0; e < sums[i].num_elements; e++) sums[i].x[e] *= scale;
            } else {
                fill_fragment(sums[i], 0.0f);
            }
        }
#pragma unroll 2
        for (int k = 0; k < K; k += 16) {
            fragment<matrix_a, 16, 16, 16, F, a_order> left;
            load_matrix_sync(left, (const F *)(a_transposed ? a + k * a_row + m : a + m * a_row + k), (unsigned)a_row);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                fragment<matrix_b, 16, 16, 16, F, b_order> right;
                int column = n + 16 * i;
                load_matrix_sync(right, (const F *)(b_transposed ? b + column * b_row + k : b + k * b_row + column),
                                 (unsigned)b_row);
                mma_sync(sums[i], left, right, sums[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++)
            store_matrix_sync(c + m * c_row + n + 16 * i, sums[i], (unsigned)c_row, mem_row_major);
    }
    __syncwarp();
}

template <bool a_transposed, bool b_transposed, class E>
__device__ static inline void product(float *c, int c_row, const E *a, int a_row, const E *b, int b_row, int M, int N,
                                      int K, bool adds = false, float scale = 1) {
    if (N % 32 == 0 && M / 16 * (N / 32) >= WARPS)
        product_in_strips<2, a_transposed, b_transposed>(c, c_row, a, a_row, b, b_row, M, N, K, adds, scale);
    else
        product_in_strips<1, a_transposed, b_transposed>(c, c_row, a, a_row, b, b_row, M, N, K, adds, scale);
}

template <bool a_transposed, bool b_transposed>
__device__ static inline void product(float *c, int c_row, const float *a, int a_row, const float *b, int b_row, int M,
                                      int N, int K, bool adds = false, float scale = 1) {
    for (int tile = (int)threadIdx.x; tile < M / 4 * (N / 4); tile += THREADS) {
        int m = tile / (N / 4) * 4, n = tile % (N / 4) * 4;
        float sums[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = adds ? scale * c[(m + i) * c_row + n + j] : 0;
        for (int k = 0; k < K; k++) {
            float left[4], right[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                left[i] = a_transposed ? a[k * a_row + m + i] : a[(m + i) * a_row + k];
                right[i] = b_transposed ? b[(n + i) * b_row + k] : b[k * b_row + n + i];
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sums[i][j] += left[i] * right[j];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) c[(m + i) * c_row + n + j] = sums[i][j];
    }
}

/* to[rows, columns] = factors[row] from in the first exist_rows rows and exist_columns columns; zeros elsewhere. `from`
 * NULL: zeros. columns is a multiple of 16; packs: exist_columns, and rows of `from`, are whole packs of 16 bytes. */
template <class T>
__device__ static inline void load_rows(T *to, const T *from, int64_t stride, int rows, int columns, int exist_rows,
                                        int exist_columns, bool packs, const float *factors = NULL) {
    constexpr int N = 16 / sizeof(T);
    int to_row = padded<T>(columns), packs_per_row = columns / N;
    if (!from) exist_rows = 0;
    for (int i = (int)threadIdx.x; i < rows * packs_per_row; i += THREADS) {
        int row = i / packs_per_row, column = i % packs_per_row * N;
        const T *at = from + row * stride + column;
        mt_pack<T, N> pack;
        if (packs) {
            pack = mt_load<N>(at, row < exist_rows && column < exist_columns);
        } else {
            mt_pack<float, N> wide;
            for (int e = 0; e < N; e++)
                wide.value[e] = row < exist_rows && column + e < exist_columns ? mt_to_float(at[e]) : 0;
            pack = mt_from_float<T>(wide);
        }
        if (factors) {
            mt_pack<float, N> wide = mt_to_float(pack);
            for (int e = 0; e < N; e++) wide.value[e] *= row < exist_rows ? factors[row] : 0;
            pack = mt_from_float<T>(wide);
        }
        *(mt_pack<T, N> *)(to + row * to_row + column) = pack;
    }
}

/* Rows of fp32 in shared memory, rounded to T, to rows in global memory. */
template <class T>
__device__ static inline void store_rows(T *to, int64_t stride, const float *from, int columns, int exist_rows,
                                         int exist_columns, bool packs) {
    constexpr int N = 16 / sizeof(T);
    int from_row = padded<float>(columns), packs_per_row = columns / N;
    for (int i = (int)threadIdx.x; i < exist_rows * packs_per_row; i += THREADS) {
        int row = i / packs_per_row, column = i % packs_per_row * N;
        T *at = to + row * stride + column;
        mt_pack<float, N> wide;
        for (int e = 0; e < N; e++) wide.value[e] = from[row * from_row + column + e];
        if (packs) {
            if (column < exist_columns) mt_store(at, mt_from_float<T>(wide));
        } else {
            for (int e = 0; e < N; e++)
                if (column + e < exist_columns) at[e] = mt_from_float<T>(wide.value[e]);
        }
    }
}

/* to[rows, columns] = factors[row] from, rounded; both in shared memory. factors NULL: 1. */
template <class T>
__device__ static inline void round_rows(T *to, const float *from, int rows, int columns, const float *factors = NULL) {
    int to_row = padded<T>(columns), from_row = padded<float>(columns);
    for (int i = (int)threadIdx.x; i < rows * columns; i += THREADS) {
        int row = i / columns, column = i % columns;
        to[row * to_row + column] = mt_from_float<T>(from[row * from_row + column] * (factors ? factors[row] : 1.0f));
    }
}

/* Takes arrays out of a block's shared memory, one behind the other. With base NULL only counts. */
struct shared_room {
    char *base;
    int used;
    template <class T> __host__ __device__ T *take(int count) {
        T *array = base ? (T *)(base + used) : NULL;
        used += (count * (int)sizeof(T) + 127) / 128 * 128;
        return array;
    }
    template <class T> __host__ __device__ T *rows(int rows, int columns) {
        return take<T>(rows * padded<T>(columns));
    }
};

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

/* The rows' scales of a chunk of a head; of tokens beyond the chunk 0. */
struct chunk_scales {
    float *q, *k, *q_grown, *k_grown, *k_rest; // [64] 1 / length, e^G / length, e^(G_L - G) / length
    float *G, *beta;                           // [64]
    __host__ __device__ void place(shared_room &room) {
        float **const all[] = {&q, &k, &q_grown, &k_grown, &k_rest, &G, &beta};
        for (int i = 0; i < 7; i++) *all[i] = room.take<float>(TOKENS);
    }
    template <class T> __device__ void load(const delta_task<T> &task, const delta_place &p, int L) const {
        int t = (int)threadIdx.x;
        if (t >= TOKENS) return;
        const float *gates = task.gates + p.by_head * 2 * TOKENS, *factors = task.factors + p.by_key_head * 2 * TOKENS;
        float grown = gates[t], last = gates[L - 1];
        G[t] = grown, beta[t] = gates[TOKENS + t];
        q[t] = factors[t] * task.q_scale, k[t] = factors[TOKENS + t];
        q_grown[t] = expf(grown) * q[t], k_grown[t] = expf(grown) * k[t];
        k_rest[t] = t < L ? expf(last - grown) * k[t] : 0;
    }
};

template <class T> struct chunk_tokens {
    mt_chunk chunk;
    int64_t row; // of the micro-batch
    __device__ chunk_tokens(const delta_task<T> &task, int64_t number) : chunk(mt_chunk_of(task.chunks, number)) {
        row = chunk.span.q_start + chunk.row;
    }
};

template <class T>
__device__ static inline void load_keys(T *to, const delta_task<T> &task, const T *x, int64_t stride, int64_t row,
                                        int L, int key_head) {
    load_rows(to, x + row * stride + (int64_t)key_head * task.Dk, stride, TOKENS, task.KP, L, task.Dk, task.wide_keys);
}

template <class T> __device__ static inline void load_square(T *to, const T *from) {
    load_rows(to, from, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, true);
}

/* ---- A and P ----------------------------------------------------------------------------------------------------- */

enum { SQUARE_ROW = TOKENS + 4 };

template <class T> struct prepare_room {
    T *q, *k;
    float *kk, *qk, *M, *X, *g;
    chunk_scales scales;
    int bytes;
    __host__ __device__ prepare_room(char *base, int KP) {
        shared_room room = {base, 0};
        kk = room.take<float>(TOKENS * SQUARE_ROW), qk = room.take<float>(TOKENS * SQUARE_ROW);
        g = room.take<float>(TOKENS), scales.place(room);
        shared_room keys = room; // M and X lie where q and k were
        q = keys.rows<T>(TOKENS, KP), k = keys.rows<T>(TOKENS, KP);
        M = room.take<float>(TOKENS * SQUARE_ROW), X = room.take<float>(TOKENS * SQUARE_ROW);
        bytes = keys.used > room.used ? keys.used : room.used;
    }
};

/* factors[64] = 1 / length of each row; 0 beyond the chunk. */
template <class T> __device__ static inline void row_lengths(float *factors, const T *rows, int KP, int L) {
    int lane = (int)threadIdx.x % 32;
    for (int t = (int)threadIdx.x / 32; t < TOKENS; t += WARPS) {
        float sum = 0;
        for (int i = lane; i < KP; i += 32) {
            float x = mt_to_float(rows[t * padded<T>(KP) + i]);
            sum += x * x;
        }
        sum = mt_warp_sum(sum);
        if (lane == 0) factors[t] = t < L ? 1 / sqrtf(sum + 1e-6f) : 0;
    }
}

/* X = (I + M)^-1 for M with zeros on and above the diagonal: blocks of 16 by substitution, then of 32 and of 64 by
 * [[T1, 0], [-T2 M21 T1, T2]]. Above its diagonal X has anything. Ends before the last writes are visible. */
__device__ static inline void invert(float *X, const float *M) {
    int thread = (int)threadIdx.x;
    if (thread < TOKENS) {
        int block = thread / 16 * 16, j = thread % 16;
        float x[16];
#pragma unroll
        for (int t = 0; t < 16; t++) {
            x[t] = t == j ? 1 : 0;
#pragma unroll
            for (int i = 0; i < t; i++) x[t] -= M[(block + t) * SQUARE_ROW + block + i] * x[i];
        }
#pragma unroll
        for (int t = 0; t < 16; t++) X[(block + t) * SQUARE_ROW + block + j] = x[t];
    }
#pragma unroll
    for (int half = 16; half < TOKENS; half *= 2) {
        int pairs = TOKENS / (2 * half), outputs = pairs * half * half;
        __syncthreads();
        for (int n = thread; n < outputs; n += THREADS) { // M21 T1, above the diagonal
            int first = n / (half * half) * 2 * half, r = n / half % half, c = n % half;
            float sum = 0;
            for (int i = c; i < half; i++)
                sum += M[(first + half + r) * SQUARE_ROW + first + i] * X[(first + i) * SQUARE_ROW + first + c];
            X[(first + r) * SQUARE_ROW + first + half + c] = sum;
        }
        __syncthreads();
        for (int n = thread; n < outputs; n += THREADS) {
            int first = n / (half * half) * 2 * half, r = n / half % half, c = n % half;
            float sum = 0;
            for (int i = 0; i <= r; i++)
                sum += X[(first + half + r) * SQUARE_ROW + first + half + i] *
                       X[(first + i) * SQUARE_ROW + first + half + c];
            X[(first + half + r) * SQUARE_ROW + first + c] = -sum;
        }
    }
}

/* g, G and beta of a chunk of a head. */
template <class T>
__device__ static inline void make_gates(const delta_task<T> &task, const delta_place &p, int64_t row, int L, float *g,
                                         float *G, float *beta) {
    int t = (int)threadIdx.x;
    if (t < TOKENS) {
        float rate = expf(mt_to_float(task.A_log[p.all])), bias = mt_to_float(task.dt_bias[p.all]);
        g[t] = t < L ? -rate * softplus(mt_to_float(task.a[(row + t) * task.a_stride + p.all]) + bias) : 0;
        beta[t] = t < L ? 1 / (1 + expf(-mt_to_float(task.b[(row + t) * task.b_stride + p.all]))) : 0;
    }
    __syncthreads();
    if (t >= TOKENS) return;
    float sum = 0;
    for (int i = 0; i <= t; i++) sum += g[i];
    G[t] = sum;
    float *gates = task.gates + p.by_head * 2 * TOKENS;
    gates[t] = sum, gates[TOKENS + t] = beta[t];
}

/* Element (t, i): A, with zeros above the diagonal, or P. */
template <class T> __device__ static inline void store_square(T *to, const float *from, const float *column_factors) {
    constexpr int N = 16 / sizeof(T);
    for (int n = (int)threadIdx.x * N; n < SQUARE; n += THREADS * N) {
        int t = n / TOKENS, i = n % TOKENS;
        mt_pack<float, N> pack;
        for (int e = 0; e < N; e++)
            pack.value[e] =
                i + e <= t ? from[t * SQUARE_ROW + i + e] * (column_factors ? column_factors[i + e] : 1.0f) : 0;
        mt_store(to + n, mt_from_float<T>(pack));
    }
}

extern __shared__ __align__(128) char delta_shared[];

/* A block per chunk and key head. */
template <class T> __global__ void __launch_bounds__(THREADS, 2) prepare(const delta_task<T> task) {
    prepare_room<T> room(delta_shared, task.KP);
    const chunk_scales &s = room.scales;
    mt_wait_for_previous();
    int64_t number = blockIdx.x / task.key_heads;
    int key_head = (int)(blockIdx.x % task.key_heads);
    chunk_tokens<T> tokens(task, number);
    int L = tokens.chunk.L;
    if (L <= 0) return;
    delta_place p = place_of(task, number, key_head * task.heads);
    load_keys(room.q, task, task.q, task.q_stride, tokens.row, L, p.all_keys);
    load_keys(room.k, task, task.k, task.k_stride, tokens.row, L, p.all_keys);
    __syncthreads();
    row_lengths(s.q, room.q, task.KP, L), row_lengths(s.k, room.k, task.KP, L);
    int row = padded<T>(task.KP);
    product<false, true>(room.kk, SQUARE_ROW, room.k, row, room.k, row, TOKENS, TOKENS, task.KP);
    product<false, true>(room.qk, SQUARE_ROW, room.q, row, room.k, row, TOKENS, TOKENS, task.KP);
    __syncthreads();
    if (threadIdx.x < TOKENS) {
        float *factors = task.factors + p.by_key_head * 2 * TOKENS;
        factors[threadIdx.x] = s.q[threadIdx.x], factors[TOKENS + threadIdx.x] = s.k[threadIdx.x];
    }
    for (int h = 0; h < task.heads; h++) {
        p = place_of(task, number, key_head * task.heads + h);
        __syncthreads();
        make_gates(task, p, tokens.row, L, room.g, s.G, s.beta);
        __syncthreads();
        for (int n = (int)threadIdx.x; n < SQUARE; n += THREADS) {
            int t = n / TOKENS, i = n % TOKENS, at = t * SQUARE_ROW + i;
            float decay = i <= t ? expf(s.G[t] - s.G[i]) * s.k[i] : 0;
            room.M[at] = i < t ? s.beta[t] * decay * s.k[t] * room.kk[at] : 0;
            room.X[at] = i <= t ? decay * s.q[t] * task.q_scale * room.qk[at] : 0;
        }
        __syncthreads();
        store_square<T>(task.P + p.by_head * SQUARE, room.X, NULL);
        __syncthreads();
        invert(room.X, room.M);
        __syncthreads();
        store_square(task.A + p.by_head * SQUARE, room.X, s.beta);
    }
}

/* ---- along the spans --------------------------------------------------------------------------------------------- */

/* The purpose of `advance`: out; S before each chunk and U, for the backward; or the map of context parallelism. */
enum delta_purpose { FORWARD, KEEP, MAP };

template <class T, int W> struct advance_room {
    float *S, *ks, *out;
    T *q, *k, *A, *P, *v, *U, *rounded; // rounded: S as an operand
    chunk_scales scales;
    int bytes;
    __host__ __device__ advance_room(char *base, int KP, delta_purpose purpose) {
        shared_room room = {base, 0};
        S = room.rows<float>(KP, W), ks = room.rows<float>(TOKENS, W);
        k = room.rows<T>(TOKENS, KP), A = room.rows<T>(TOKENS, TOKENS);
        v = room.rows<T>(TOKENS, W), U = room.rows<T>(TOKENS, W);
        rounded = std::is_same_v<T, float> ? (T *)S : room.rows<T>(KP, W);
        out = NULL, q = P = NULL;
        if (purpose == FORWARD)
            out = room.rows<float>(TOKENS, W), q = room.rows<T>(TOKENS, KP), P = room.rows<T>(TOKENS, TOKENS);
        scales.place(room);
        bytes = room.used;
    }
};

/* S[KP, W] = columns [column, column + W) of a state [Dk, width] of fp32, with zeros behind its last row and column;
 * NULL: zeros. */
template <int W>
__device__ static inline void load_state(float *S, const float *from, int KP, int Dk, int width, int column) {
    for (int n = (int)threadIdx.x; n < KP * W; n += THREADS) {
        int i = n / W, j = n % W;
        bool exists = from && i < Dk && column + j < width;
        S[i * padded<float>(W) + j] = exists ? from[(int64_t)i * width + column + j] : 0;
    }
}

template <int W> __device__ static inline void store_state(float *to, const float *S, int Dk, int width, int column) {
    for (int n = (int)threadIdx.x; n < Dk * W; n += THREADS) {
        int i = n / W, j = n % W;
        if (column + j < width) to[(int64_t)i * width + column + j] = S[i * padded<float>(W) + j];
    }
}

/* A state as an operand, to [KP, VP] in memory. */
template <int W, class T>
__device__ static inline void keep_state(T *to, const T *rounded, int KP, int VP, int column) {
    constexpr int N = 16 / sizeof(T);
    for (int n = (int)threadIdx.x; n < KP * (W / N); n += THREADS) {
        int i = n / (W / N), j = n % (W / N) * N;
        mt_pack<T, N> pack = *(const mt_pack<T, N> *)(rounded + i * padded<T>(W) + j);
        mt_store(to + (int64_t)i * VP + column + j, pack);
    }
}

/* A block per W columns of a head of a span; MAP: of the span that task.chunks begins with. */
template <class T, int W, delta_purpose purpose>
__global__ void __launch_bounds__(THREADS, 2) advance(const delta_task<T> task) {
    constexpr bool same = std::is_same_v<T, float>;
    constexpr int WIDE = padded<float>(W), NARROW = padded<T>(W);
    advance_room<T, W> room(delta_shared, task.KP, purpose);
    const chunk_scales &s = room.scales;
    mt_wait_for_previous();
    int column = (int)(blockIdx.x % task.column_blocks) * W, head = (int)blockIdx.y;
    int64_t number = blockIdx.x / task.column_blocks, first = task.chunks.table ? task.chunks.first[number] : number;
    int64_t by_state = (int64_t)(head + task.first_key_head * task.heads) * task.Dk;
    mt_span span = task.chunks.spans[number];
    const float *before = purpose == MAP ? NULL : task.states.before(span, number);
    load_state<W>(room.S, before ? before + by_state * task.Dv : NULL, task.KP, task.Dk, task.Dv, column);
    __syncthreads();
    for (int j = (int)threadIdx.x; purpose == MAP && task.crosses && j < W; j += THREADS) {
        int i = column + j - task.Dv; // of I
        if (i >= 0 && i < task.Dk) room.S[i * WIDE + j] = 1;
    }
    int KEYS = padded<T>(task.KP), columns = task.Dv - column < W ? task.Dv - column : W;
    for (int64_t n = 0; n * TOKENS < span.q_len; n++) {
        delta_place p = place_of(task, first + n, head);
        int64_t row = span.q_start + n * TOKENS, left = span.q_len - n * TOKENS;
        int L = (int)(left < TOKENS ? left : TOKENS);
        __syncthreads();
        s.load(task, p, L);
        if (!same) round_rows(room.rounded, room.S, task.KP, W);
        load_keys(room.k, task, task.k, task.k_stride, row, L, p.all_keys);
        load_square(room.A, task.A + p.by_head * SQUARE);
        load_rows(room.v, columns > 0 ? task.v + row * task.v_stride + (int64_t)p.all * task.Dv + column : NULL,
                  task.v_stride, TOKENS, W, L, columns, task.wide_values);
        if (purpose == FORWARD) {
            load_keys(room.q, task, task.q, task.q_stride, row, L, p.all_keys);
            load_square(room.P, task.P + p.by_head * SQUARE);
        }
        __syncthreads();
        if (purpose == KEEP)
            keep_state<W>(task.before + p.by_head * task.KP * task.VP, room.rounded, task.KP, task.VP, column);
        product<false, false>(room.ks, WIDE, room.k, KEYS, room.rounded, NARROW, TOKENS, W, task.KP);
        if (purpose == FORWARD)
            product<false, false>(room.out, WIDE, room.q, KEYS, room.rounded, NARROW, TOKENS, W, task.KP);
        __syncthreads();
        for (int i = (int)threadIdx.x; i < TOKENS * W; i += THREADS) {
            int t = i / W, j = i % W;
            T *v = &room.v[t * NARROW + j];
            *v = mt_from_float<T>(mt_to_float(*v) - s.k_grown[t] * room.ks[t * WIDE + j]);
            if (purpose == FORWARD) room.out[t * WIDE + j] *= s.q_grown[t];
        }
        __syncthreads();
        product<false, false>(room.ks, WIDE, room.A, padded<T>(TOKENS), room.v, NARROW, TOKENS, W, TOKENS); // U
        __syncthreads();
        if (purpose == FORWARD) round_rows(room.U, room.ks, TOKENS, W);
        round_rows(room.v, room.ks, TOKENS, W, s.k_rest);
        if (purpose == KEEP)
            store_rows(task.U + p.by_head * TOKENS * task.VP + column, task.VP, room.ks, W, TOKENS, W, true);
        __syncthreads();
        if (purpose == FORWARD)
            product<false, false>(room.out, WIDE, room.P, padded<T>(TOKENS), room.U, NARROW, TOKENS, W, TOKENS, true);
        product<true, false>(room.S, WIDE, room.k, KEYS, room.v, NARROW, task.KP, W, TOKENS, true, expf(s.G[L - 1]));
        __syncthreads();
        if (purpose == FORWARD)
            store_rows(task.out + (row * task.Hv + p.all) * task.Dv + column, (int64_t)task.Hv * task.Dv, room.out, W,
                       L, columns, task.wide_values);
    }
    __syncthreads();
    if (purpose == MAP) {
        int width = task.Dv + task.Dk;
        store_state<W>(task.maps + by_state * width, room.S, task.Dk, width, column);
    }
    float *kept = purpose == FORWARD ? task.states.kept(span) : NULL;
    if (kept) store_state<W>(kept + by_state * task.Dv, room.S, task.Dk, task.Dv, column);
}

template <class T, int W> struct retreat_room {
    float *dS, *sum;
    T *q, *k, *A, *P, *dO, *rows, *rounded; // rounded: dS as an operand
    chunk_scales scales;
    int bytes;
    __host__ __device__ retreat_room(char *base, int KP) {
        shared_room room = {base, 0};
        dS = room.rows<float>(KP, W), sum = room.rows<float>(TOKENS, W);
        q = room.rows<T>(TOKENS, KP), k = room.rows<T>(TOKENS, KP);
        A = room.rows<T>(TOKENS, TOKENS), P = room.rows<T>(TOKENS, TOKENS);
        dO = room.rows<T>(TOKENS, W), rows = room.rows<T>(TOKENS, W);
        rounded = std::is_same_v<T, float> ? (T *)dS : room.rows<T>(KP, W);
        scales.place(room);
        bytes = room.used;
    }
};

/* The same in reverse: dV, and dS after each chunk; of_map: the gradient of the state before the span instead, from its
 * own outputs. */
template <class T, int W, bool of_map> __global__ void __launch_bounds__(THREADS, 2) retreat(const delta_task<T> task) {
    constexpr bool same = std::is_same_v<T, float>;
    constexpr int WIDE = padded<float>(W), NARROW = padded<T>(W);
    retreat_room<T, W> room(delta_shared, task.KP);
    const chunk_scales &s = room.scales;
    mt_wait_for_previous();
    int column = (int)(blockIdx.x % task.column_blocks) * W, head = (int)blockIdx.y;
    int64_t number = blockIdx.x / task.column_blocks, first = task.chunks.table ? task.chunks.first[number] : number;
    int64_t by_state = (int64_t)(head + task.first_key_head * task.heads) * task.Dk * task.Dv;
    mt_span span = task.chunks.spans[number];
    const float *after = of_map ? NULL : task.states.gradient_after(number);
    load_state<W>(room.dS, after ? after + by_state : NULL, task.KP, task.Dk, task.Dv, column);
    int KEYS = padded<T>(task.KP), columns = task.Dv - column < W ? task.Dv - column : W;
    for (int64_t n = (span.q_len + TOKENS - 1) / TOKENS - 1; n >= 0; n--) {
        delta_place p = place_of(task, first + n, head);
        int64_t row = span.q_start + n * TOKENS, left = span.q_len - n * TOKENS;
        int L = (int)(left < TOKENS ? left : TOKENS);
        __syncthreads();
        s.load(task, p, L);
        if (!same) round_rows(room.rounded, room.dS, task.KP, W);
        load_keys(room.q, task, task.q, task.q_stride, row, L, p.all_keys);
        load_keys(room.k, task, task.k, task.k_stride, row, L, p.all_keys);
        load_square(room.A, task.A + p.by_head * SQUARE), load_square(room.P, task.P + p.by_head * SQUARE);
        load_rows(room.dO, task.dout + (row * task.Hv + p.all) * task.Dv + column, (int64_t)task.Hv * task.Dv, TOKENS,
                  W, L, columns, task.wide_values);
        __syncthreads();
        if (!of_map) keep_state<W>(task.dafter + p.by_head * task.KP * task.VP, room.rounded, task.KP, task.VP, column);
        product<false, false>(room.sum, WIDE, room.k, KEYS, room.rounded, NARROW, TOKENS, W, task.KP);
        __syncthreads();
        for (int i = (int)threadIdx.x; i < TOKENS * W; i += THREADS) room.sum[i / W * WIDE + i % W] *= s.k_rest[i / W];
        __syncthreads();
        product<true, false>(room.sum, WIDE, room.P, padded<T>(TOKENS), room.dO, NARROW, TOKENS, W, TOKENS, true);
        __syncthreads();
        round_rows(room.rows, room.sum, TOKENS, W); // dU
        __syncthreads();
        product<true, false>(room.sum, WIDE, room.A, padded<T>(TOKENS), room.rows, NARROW, TOKENS, W, TOKENS); // dV
        __syncthreads();
        if (!of_map)
            store_rows(task.dv + row * task.dv_stride + (int64_t)p.all * task.Dv + column, task.dv_stride, room.sum, W,
                       L, columns, task.wide_values);
        for (int i = (int)threadIdx.x; i < TOKENS * W; i += THREADS) {
            int t = i / W, at = t * NARROW + i % W;
            room.rows[at] = mt_from_float<T>(-s.k_grown[t] * room.sum[t * WIDE + i % W]);
            room.dO[at] = mt_from_float<T>(s.q_grown[t] * mt_to_float(room.dO[at]));
        }
        __syncthreads();
        product<true, false>(room.dS, WIDE, room.q, KEYS, room.dO, NARROW, task.KP, W, TOKENS, true, expf(s.G[L - 1]));
        product<true, false>(room.dS, WIDE, room.k, KEYS, room.rows, NARROW, task.KP, W, TOKENS, true);
    }
    __syncthreads();
    if (of_map) store_state<W>(task.maps + by_state, room.dS, task.Dk, task.Dv, column);
}

/* ---- the rest of the backward, for all chunks at once ------------------------------------------------------------ */

enum { COLUMNS = 64 }; // of U, V, O or S at a time

/* x[64] of four neighbouring threads each, summed over the four; all of them receive the sum. */
__device__ static inline float sum_of_four(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <class T> struct score_room {
    float *dP, *dR, *kk;
    T *dO, *dV, *U;
    chunk_scales scales;
    int bytes;
    __host__ __device__ score_room(char *base) {
        shared_room room = {base, 0};
        dP = room.take<float>(TOKENS * SQUARE_ROW), dR = room.take<float>(TOKENS * SQUARE_ROW);
        kk = room.take<float>(TOKENS * SQUARE_ROW);
        dO = room.rows<T>(TOKENS, COLUMNS), dV = room.rows<T>(TOKENS, COLUMNS), U = room.rows<T>(TOKENS, COLUMNS);
        scales.place(room);
        bytes = room.used;
    }
};

/* db, and the gradients of P and R times what P and R have of the lengths and decays, in place of P and A:
 *   H_ti = dP_ti e^(G_t - G_i) / (|q_t| |k_i|),   J_ti = dR_ti e^(G_t - G_i) / (|k_t| |k_i|)
 * g of a token j is in the factors of all t >= j and i < j: dg_j is the sum of their dP_ti P_ti + dR_ti R_ti. The sums
 * of dG, in which other pairs cancel, would lose digits. */
template <class T> __global__ void __launch_bounds__(THREADS, 2) score_backward(const delta_task<T> task) {
    score_room<T> room(delta_shared);
    const chunk_scales &s = room.scales;
    mt_wait_for_previous();
    int value_heads = task.key_heads * task.heads, row = padded<T>(COLUMNS);
    delta_place p = place_of(task, blockIdx.x / value_heads, (int)(blockIdx.x % value_heads));
    chunk_tokens<T> tokens(task, p.chunk);
    int L = tokens.chunk.L, t = (int)threadIdx.x / 4, quarter = (int)threadIdx.x % 4;
    if (L <= 0) return;
    float dot = 0;
    s.load(task, p, L);
    for (int column = 0; column < task.VP; column += COLUMNS) {
        int columns = task.Dv - column < COLUMNS ? task.Dv - column : COLUMNS;
        int kept = task.VP - column < COLUMNS ? task.VP - column : COLUMNS;
        __syncthreads();
        load_rows(room.dO, task.dout + (tokens.row * task.Hv + p.all) * task.Dv + column, (int64_t)task.Hv * task.Dv,
                  TOKENS, COLUMNS, L, columns, task.wide_values);
        load_rows(room.dV, task.dv + tokens.row * task.dv_stride + (int64_t)p.all * task.Dv + column, task.dv_stride,
                  TOKENS, COLUMNS, L, columns, task.wide_values);
        load_rows(room.U, task.U + p.by_head * TOKENS * task.VP + column, task.VP, TOKENS, COLUMNS, TOKENS, kept, true);
        __syncthreads();
        product<false, true>(room.dP, SQUARE_ROW, room.dO, row, room.U, row, TOKENS, TOKENS, COLUMNS, column > 0);
        product<false, true>(room.dR, SQUARE_ROW, room.dV, row, room.U, row, TOKENS, TOKENS, COLUMNS, column > 0);
        for (int j = quarter; j < COLUMNS; j += 4)
            dot += mt_to_float(room.dV[t * row + j]) * mt_to_float(room.U[t * row + j]);
    }
    for (int column = 0; column < task.KP; column += COLUMNS) {
        int channels = task.Dk - column < COLUMNS ? task.Dk - column : COLUMNS;
        T *k = room.dO;
        __syncthreads();
        load_rows(k, task.k + tokens.row * task.k_stride + (int64_t)p.all_keys * task.Dk + column, task.k_stride,
                  TOKENS, COLUMNS, L, channels, task.wide_keys);
        __syncthreads();
        product<false, true>(room.kk, SQUARE_ROW, k, row, k, row, TOKENS, TOKENS, COLUMNS, column > 0);
    }
    dot = sum_of_four(dot);
    if (quarter == 0 && t < L) { // dV . U = dB . U beta
        float beta = s.beta[t], db = dot / fmaxf(beta, 1e-30f) * (1 - beta);
        task.db[(tokens.row + t) * task.db_stride + p.all] = mt_from_float<T>(db);
    }
    __syncthreads();
    for (int n = (int)threadIdx.x; n < SQUARE; n += THREADS) {
        int later = n / TOKENS, i = n % TOKENS, at = later * SQUARE_ROW + i;
        float decay = i <= later ? expf(s.G[later] - s.G[i]) * s.k[i] : 0, dP = room.dP[at], dR = -room.dR[at];
        float P = mt_to_float(task.P[p.by_head * SQUARE + n]), R = decay * s.k[later] * room.kk[at];
        room.kk[at] = i < later ? dP * P + dR * R : 0;
        room.dP[at] = i <= later ? decay * s.q[later] * dP : 0;
        room.dR[at] = i < later ? decay * s.k[later] * dR : 0;
    }
    __syncthreads();
    store_square<T>(task.P + p.by_head * SQUARE, room.dP, NULL);
    store_square<T>(task.A + p.by_head * SQUARE, room.dR, NULL);
    if (threadIdx.x < TOKENS) {
        float sum = 0;
        for (int later = TOKENS - 1; later >= 0; later--)
            room.kk[later * SQUARE_ROW + threadIdx.x] = sum += room.kk[later * SQUARE_ROW + threadIdx.x];
    }
    __syncthreads();
    float sum = 0;
    for (int i = quarter; i < t; i += 4) sum += room.kk[t * SQUARE_ROW + i];
    sum = sum_of_four(sum);
    if (quarter == 0) task.score_dg[p.by_head * TOKENS + t] = sum;
}

template <class T> struct key_room {
    float *sum, *dq, *dk;
    T *q, *k, *H, *J, *left, *right;
    float *products; // [WARPS] of S and dS
    chunk_scales scales;
    int bytes;
    __host__ __device__ key_room(char *base, int width) {
        shared_room room = {base, 0};
        sum = room.rows<float>(TOKENS, width), dq = room.rows<float>(TOKENS, width);
        dk = room.rows<float>(TOKENS, width), q = room.rows<T>(TOKENS, width), k = room.rows<T>(TOKENS, width);
        H = room.rows<T>(TOKENS, TOKENS), J = room.rows<T>(TOKENS, TOKENS);
        left = room.rows<T>(TOKENS, COLUMNS), right = room.rows<T>(width, COLUMNS);
        products = room.take<float>(WARPS);
        scales.place(room);
        bytes = room.used;
    }
};

/* sum[64, width] = factors x state^T, x[64, Dv] with L rows that exist, and state[width, VP]. `state` is the part's. */
template <class T>
__device__ static inline void multiply_state(const key_room<T> &room, const delta_task<T> &task, const T *x,
                                             int64_t stride, int L, int Dv, bool packs, const float *factors,
                                             const T *state) {
    int row = padded<T>(COLUMNS);
    for (int column = 0; column < task.VP; column += COLUMNS) {
        int columns = Dv - column < COLUMNS ? Dv - column : COLUMNS;
        int kept = task.VP - column < COLUMNS ? task.VP - column : COLUMNS;
        __syncthreads();
        load_rows(room.left, x + column, stride, TOKENS, COLUMNS, L, columns, packs, factors);
        load_rows(room.right, state + column, task.VP, task.width, COLUMNS, task.width, kept, true);
        __syncthreads();
        product<false, true>(room.sum, padded<float>(task.width), room.left, row, room.right, row, TOKENS, task.width,
                             COLUMNS, column > 0);
    }
    __syncthreads();
}

/* The dot product of row t of x and of sum; sums to += sum, if given. Each thread gets that of its row. */
template <class T>
__device__ static inline float add_and_dot(const key_room<T> &room, int width, const T *x, float *to) {
    int t = (int)threadIdx.x / 4;
    float dot = 0;
    for (int d = (int)threadIdx.x % 4; d < width; d += 4) {
        float sum = room.sum[t * padded<float>(width) + d];
        dot += mt_to_float(x[t * padded<T>(width) + d]) * sum;
        if (to) to[t * padded<float>(width) + d] += sum;
    }
    return sum_of_four(dot);
}

/* A block per chunk, key head and part of the key's channels: gradients of q / |q| and k / |k| over the lengths, summed
 * over the value heads, and what the states give to g. g of a token j is in the e^G_t of all t >= j (Q' and K'), in the
 * e^(G_L - G_i) of all i < j (K"), and in e^G_L: state_dg has, of each token, its part in the first, then in the
 * second, and in place of the last token's, which has none, the part of e^G_L. */
template <class T>
__global__ void __launch_bounds__(THREADS, sizeof(T) > 2 ? 1 : 2) key_backward(const delta_task<T> task) {
    const int width = task.width, part = (int)blockIdx.y, WIDE = padded<float>(width), NARROW = padded<T>(width);
    const int SIDE = padded<T>(TOKENS);
    key_room<T> room(delta_shared, width);
    const chunk_scales &s = room.scales;
    mt_wait_for_previous();
    int64_t number = blockIdx.x / task.key_heads;
    int key_head = (int)(blockIdx.x % task.key_heads), thread = (int)threadIdx.x;
    chunk_tokens<T> tokens(task, number);
    int L = tokens.chunk.L, t = thread / 4, channel = part * width;
    if (L <= 0) return;
    int channels = task.Dk - channel < width ? task.Dk - channel : width;
    int64_t at_keys = (int64_t)(task.first_key_head + key_head) * task.Dk + channel;
    load_rows(room.q, task.q + tokens.row * task.q_stride + at_keys, task.q_stride, TOKENS, width, L, channels,
              task.wide_keys);
    load_rows(room.k, task.k + tokens.row * task.k_stride + at_keys, task.k_stride, TOKENS, width, L, channels,
              task.wide_keys);
    for (int i = thread; i < TOKENS * WIDE; i += THREADS) room.dq[i] = room.dk[i] = 0;
    float q_dot = 0, k_dot = 0;
    for (int h = 0; h < task.heads; h++) {
        delta_place p = place_of(task, number, key_head * task.heads + h);
        const T *S = task.before + (p.by_head * task.KP + channel) * task.VP;
        const T *dS = task.dafter + (p.by_head * task.KP + channel) * task.VP;
        const T *dO = task.dout + (tokens.row * task.Hv + p.all) * task.Dv;
        const T *dV = task.dv + tokens.row * task.dv_stride + (int64_t)p.all * task.Dv;
        __syncthreads();
        s.load(task, p, L);
        load_square(room.H, task.P + p.by_head * SQUARE), load_square(room.J, task.A + p.by_head * SQUARE);
        float product_of_states = 0;
        constexpr int N = 16 / sizeof(T);
        for (int n = thread * N; n < width * task.VP; n += THREADS * N) {
            mt_pack<T, N> state = mt_load<N>(S + n), gradient = mt_load<N>(dS + n);
            for (int e = 0; e < N; e++) product_of_states += mt_element(state, e) * mt_element(gradient, e);
        }
        product_of_states = mt_warp_sum(product_of_states);
        if (thread % 32 == 0) room.products[thread / 32] = product_of_states;
        __syncthreads();

        multiply_state(room, task, dO, (int64_t)task.Hv * task.Dv, L, task.Dv, task.wide_values, s.q_grown, S);
        float grown = add_and_dot(room, width, room.q, (float *)NULL);
        __syncthreads();
        product<false, false>(room.sum, WIDE, room.H, SIDE, room.k, NARROW, TOKENS, width, TOKENS, true);
        __syncthreads();
        q_dot += add_and_dot(room, width, room.q, room.dq);

        multiply_state(room, task, dV, task.dv_stride, L, task.Dv, task.wide_values, s.k_grown, S);
        grown -= add_and_dot(room, width, room.k, (float *)NULL);
        __syncthreads();
        product<false, false>(room.sum, WIDE, room.J, SIDE, room.k, NARROW, TOKENS, width, TOKENS, true, -1.0f);
        __syncthreads();
        k_dot += add_and_dot(room, width, room.k, room.dk);

        multiply_state(room, task, task.U + p.by_head * TOKENS * task.VP, task.VP, L, task.VP, true, s.k_rest, dS);
        float rest = add_and_dot(room, width, room.k, (float *)NULL);
        __syncthreads();
        product<true, false>(room.sum, WIDE, room.H, SIDE, room.q, NARROW, TOKENS, width, TOKENS, true);
        product<true, false>(room.sum, WIDE, room.J, SIDE, room.k, NARROW, TOKENS, width, TOKENS, true);
        __syncthreads();
        k_dot += add_and_dot(room, width, room.k, room.dk);

        float *dg = task.state_dg + (p.by_head * task.parts + part) * 2 * TOKENS;
        if (thread % 4 == 0 && t < L) {
            float products = 0;
            for (int warp = 0; warp < WARPS; warp++) products += room.products[warp];
            dg[t] = grown, dg[TOKENS + t] = t < L - 1 ? rest : expf(s.G[L - 1]) * products;
        }
    }
    __syncthreads();
    store_rows(task.dq + tokens.row * task.dq_stride + at_keys, task.dq_stride, room.dq, width, L, channels,
               task.wide_keys);
    store_rows(task.dk + tokens.row * task.dk_stride + at_keys, task.dk_stride, room.dk, width, L, channels,
               task.wide_keys);
    float *dots = task.dots + ((number * task.key_heads + key_head) * task.parts + part) * 2 * TOKENS;
    if (thread % 4 == 0) dots[t] = q_dot, dots[TOKENS + t] = k_dot;
}

/* A block per chunk and key head: with d the gradient of x / |x| over |x|, dx = d - x (x . d) / |x|^2; and da, with the
 * sums over the chunk for dA_log and ddt_bias. */
template <class T> __global__ void __launch_bounds__(THREADS, 2) finish_backward(const delta_task<T> task) {
    __shared__ float scales[2][TOKENS], of_rate[THREADS], of_bias[THREADS];
    mt_wait_for_previous();
    int64_t number = blockIdx.x / task.key_heads;
    int key_head = (int)(blockIdx.x % task.key_heads), thread = (int)threadIdx.x;
    chunk_tokens<T> tokens(task, number);
    int L = tokens.chunk.L;
    int64_t by_key_head = number * task.key_heads + key_head, value_heads = task.key_heads * task.heads;
    if (L > 0 && thread < 2 * TOKENS) {
        float factor = task.factors[by_key_head * 2 * TOKENS + thread], dot = 0;
        for (int part = 0; part < task.parts; part++)
            dot += task.dots[(by_key_head * task.parts + part) * 2 * TOKENS + thread];
        scales[thread / TOKENS][thread % TOKENS] = factor * factor * dot;
    }
    __syncthreads();
    for (int n = thread; n < L * task.Dk; n += THREADS) {
        int t = n / task.Dk;
        int64_t at = (int64_t)(task.first_key_head + key_head) * task.Dk + n % task.Dk, row = tokens.row + t;
        T *dq = task.dq + row * task.dq_stride + at, *dk = task.dk + row * task.dk_stride + at;
        float q = mt_to_float(task.q[row * task.q_stride + at]), k = mt_to_float(task.k[row * task.k_stride + at]);
        *dq = mt_from_float<T>(mt_to_float(*dq) - q * scales[0][t]);
        *dk = mt_from_float<T>(mt_to_float(*dk) - k * scales[1][t]);
    }
    for (int first = 0; first < task.heads; first += THREADS / TOKENS) {
        int h = first + thread / TOKENS, t = thread % TOKENS;
        delta_place p = place_of(task, number, key_head * task.heads + (h < task.heads ? h : 0));
        float dg = 0, rate_sum = 0, bias_sum = 0;
        if (h < task.heads && t < L) {
            dg = task.score_dg[p.by_head * TOKENS + t];
            for (int part = 0; part < task.parts; part++) {
                const float *grown = task.state_dg + (p.by_head * task.parts + part) * 2 * TOKENS;
                const float *rest = grown + TOKENS;
                for (int i = t; i < L; i++) dg += grown[i];
                for (int i = 0; i < t; i++) dg += rest[i];
                dg += rest[L - 1];
            }
            float rate = expf(mt_to_float(task.A_log[p.all])), bias = mt_to_float(task.dt_bias[p.all]);
            float x = mt_to_float(task.a[(tokens.row + t) * task.a_stride + p.all]) + bias;
            float da = -rate / (1 + expf(-x)) * dg;
            task.da[(tokens.row + t) * task.da_stride + p.all] = mt_from_float<T>(da);
            rate_sum = dg * -rate * softplus(x), bias_sum = da;
        }
        of_rate[thread] = rate_sum, of_bias[thread] = bias_sum;
        __syncthreads();
        if (h < task.heads && t == 0) {
            float sums[2] = {0, 0};
            for (int i = 0; i < L; i++) sums[0] += of_rate[thread + i], sums[1] += of_bias[thread + i];
            task.partial[p.by_head] = sums[0];
            task.partial[task.chunks.count * value_heads + p.by_head] = sums[1];
        }
        __syncthreads();
    }
}

/* ---- token by token ---------------------------------------------------------------------------------------------- */

enum { STEP_LANES = MT_STEP_LANES, STEP_ROWS = THREADS / STEP_LANES, STEP_TOKENS = 8 };

/* A block per 8 N columns of a head of a span. A thread has N columns of every 32nd row of the state, ROWS in all. */
template <class T, int N, int ROWS> __global__ void __launch_bounds__(THREADS, 2) step(const delta_task<T> task) {
    __shared__ float q[STEP_ROWS * ROWS], k[STEP_ROWS * ROWS], sums[WARPS][STEP_LANES * N], lengths[2];
    mt_wait_for_previous();
    int thread = (int)threadIdx.x, lane = thread % STEP_LANES, line = thread / STEP_LANES, warp = thread / 32;
    int column = ((int)(blockIdx.x % task.column_blocks) * STEP_LANES + lane) * N, head = (int)blockIdx.y;
    int64_t number = blockIdx.x / task.column_blocks, by_state = (int64_t)head * task.Dk * task.Dv;
    int key_head = head / task.heads;
    mt_span span = task.chunks.spans[number];
    const float *before = task.states.before(span, number);
    float *kept = task.states.kept(span);
    mt_pack<float, N> S[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = line + r * STEP_ROWS;
        bool exists = before && i < task.Dk && column < task.Dv;
        S[r] = mt_load<N>(before + by_state + (int64_t)i * task.Dv + column, exists);
    }
    float rate = expf(mt_to_float(task.A_log[head])), bias = mt_to_float(task.dt_bias[head]);
    for (int64_t token = span.q_start; token < span.q_start + span.q_len; token++) {
        for (int i = thread; i < STEP_ROWS * ROWS; i += THREADS) {
            int64_t at = (int64_t)key_head * task.Dk + i;
            q[i] = i < task.Dk ? mt_to_float(task.q[token * task.q_stride + at]) : 0;
            k[i] = i < task.Dk ? mt_to_float(task.k[token * task.k_stride + at]) : 0;
        }
        __syncthreads();
        if (warp < 2) {
            const float *x = warp == 0 ? q : k;
            float sum = 0;
            for (int i = thread % 32; i < STEP_ROWS * ROWS; i += 32) sum += x[i] * x[i];
            sum = mt_warp_sum(sum);
            if (thread % 32 == 0) lengths[warp] = 1 / sqrtf(sum + 1e-6f);
        }
        float decay = expf(-rate * softplus(mt_to_float(task.a[token * task.a_stride + head]) + bias));
        float beta = 1 / (1 + expf(-mt_to_float(task.b[token * task.b_stride + head])));
        mt_pack<T, N> v =
            mt_load<N>(task.v + token * task.v_stride + (int64_t)head * task.Dv + column, column < task.Dv);
        __syncthreads();
        float q_scale = lengths[0] * task.q_scale, k_scale = lengths[1], out[N], read[N] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < N; j++) {
                S[r].value[j] *= decay;
                read[j] += S[r].value[j] * (k[line + r * STEP_ROWS] * k_scale);
            }
        mt_sum_of_lines(read, sums);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float u = beta * (mt_element(v, j) - read[j]);
            out[j] = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int i = line + r * STEP_ROWS;
                S[r].value[j] += k[i] * k_scale * u;
                out[j] += S[r].value[j] * (q[i] * q_scale);
            }
        }
        mt_sum_of_lines(out, sums);
        if (line == 0 && column < task.Dv) {
            mt_pack<float, N> result;
            for (int j = 0; j < N; j++) result.value[j] = out[j];
            mt_store(task.out + (token * task.Hv + head) * task.Dv + column, mt_from_float<T>(result));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = line + r * STEP_ROWS;
        if (kept && i < task.Dk && column < task.Dv) mt_store(kept + by_state + (int64_t)i * task.Dv + column, S[r]);
    }
}

/* ---- states of context parallelism ------------------------------------------------------------------------------- */

/* out[Dk, Dv] of each head = base + op(M) in, M = map[Dk, Dk]; in NULL: the base alone. A thread per element. */
static __global__ void carry(float *out, const float *base, int base_row, const float *map, const float *in, int Dk,
                             int Dv, bool transposed) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x), width = Dv + Dk;
    mt_wait_for_previous();
    if (n >= Dk * Dv) return;
    int64_t head = blockIdx.y;
    int i = n / Dv, j = n % Dv;
    float sum = base[(head * Dk + i) * base_row + j];
    const float *M = map + head * Dk * width + Dv, *state = in + head * Dk * Dv + j;
    for (int m = 0; m < Dk && in; m++) sum += M[transposed ? m * width + i : i * width + m] * state[(int64_t)m * Dv];
    out[(head * Dk + i) * Dv + j] = sum;
}

extern "C" void mt_cuda_delta_rule_carry_forward(const mt_delta_args *a, const mt_carried_state *state, mt_dtype dtype,
                                                 mt_stream *stream) {
    int64_t width = a->Dv + a->Dk;
    const float *map = a->maps + state->slot * a->Hv * a->Dk * width;
    const float *in = mt_slot_crosses(&a->states, state->slot) ? state->in : NULL;
    (void)dtype;
    mt_launch_early(carry, dim3(mt_grid_size(a->Dk * a->Dv, 256), (unsigned)a->Hv), dim3(256), 0,
                    mt_cuda_stream(stream), state->out, map, (int)width, map, in, (int)a->Dk, (int)a->Dv, false);
}

extern "C" void mt_cuda_delta_rule_carry_backward(const mt_delta_args *a, const mt_carried_state *state, mt_dtype dtype,
                                                  mt_stream *stream) {
    const float *map = a->maps + state->slot * a->Hv * a->Dk * (a->Dv + a->Dk);
    const float *base = a->dmaps + state->slot * a->Hv * a->Dk * a->Dv;
    const float *in = mt_slot_crosses(&a->states, state->slot) ? state->in : NULL;
    (void)dtype;
    mt_launch_early(carry, dim3(mt_grid_size(a->Dk * a->Dv, 256), (unsigned)a->Hv), dim3(256), 0,
                    mt_cuda_stream(stream), state->out, base, (int)a->Dv, map, in, (int)a->Dk, (int)a->Dv, true);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

enum { PART = 64 }; // most channels of a key in a part of key_backward

/* The arrays of a launch over some chunks and key heads, one behind the other; memory NULL: only counts the bytes. */
template <class T> static int64_t place_arrays(delta_task<T> *task, int64_t chunks, bool backward, char *memory) {
    int64_t used = 0, key_heads = chunks * task->key_heads, heads = key_heads * task->heads;
    auto take = [&](auto **array, int64_t count) {
        if (memory) *array = (std::remove_reference_t<decltype(*array)>)(memory + used);
        used += mt_divide_up(count * (int64_t)sizeof **array, 256) * 256;
    };
    take(&task->A, heads * SQUARE), take(&task->P, heads * SQUARE), take(&task->gates, heads * 2 * TOKENS);
    take(&task->factors, key_heads * 2 * TOKENS);
    if (!backward) return used;
    take(&task->before, heads * task->KP * task->VP), take(&task->dafter, heads * task->KP * task->VP);
    take(&task->U, heads * TOKENS * task->VP), take(&task->score_dg, heads * TOKENS);
    take(&task->state_dg, heads * task->parts * 2 * TOKENS);
    take(&task->dots, key_heads * task->parts * 2 * TOKENS), take(&task->partial, 2 * heads);
    return used;
}

template <class T> static delta_task<T> delta_task_of(const mt_delta_args *a, mt_dtype dtype) {
    delta_task<T> task = {};
    mt_take_delta_operands<T>(task, a);
    task.wide_keys =
        mt_wide(dtype, {a->q, a->k, a->dq, a->dk}, {a->Dk, a->q_stride, a->k_stride, a->dq_stride, a->dk_stride});
    task.wide_values = mt_wide(dtype, {a->v, a->out, a->dout, a->dv}, {a->Dv, a->v_stride, a->dv_stride});
    MT_CHECK(a->decays == 1);
    MT_CHECK(a->Dk <= MT_CUDA_DELTA_CHANNELS && a->Dv <= MT_CUDA_DELTA_CHANNELS);
    return task;
}

static int most_shared(void) {
    return (int)mt_cuda_device()->sharedMemPerBlockOptin;
}

template <class T>
static void launch(void (*kernel)(delta_task<T>), dim3 grid, int bytes, const delta_task<T> &task, mt_stream *stream) {
    MT_CHECK(bytes <= most_shared());
    mt_cuda_take_shared(kernel, bytes);
    mt_launch_early(kernel, grid, dim3(THREADS), bytes, mt_cuda_stream(stream), task);
}

/* Columns of a state that a block takes along a span. */
template <class T> static int columns_of(const delta_task<T> &task, int64_t columns) {
    int shared = advance_room<T, 32>(NULL, task.KP, FORWARD).bytes;
    int other = retreat_room<T, 32>(NULL, task.KP).bytes;
    return columns > 16 && (shared > other ? shared : other) <= most_shared() ? 32 : 16;
}

/* The sizes that do not depend on chunks. */
template <class T> static void set_sizes(delta_task<T> *task) {
    task->KP = (int)mt_divide_up(task->Dk, 16) * 16;
    int W = columns_of(*task, task->Dv);
    task->VP = (int)mt_divide_up(task->Dv, W) * W;
    task->width = task->KP % PART == 0 ? PART : task->KP % 32 == 0 ? 32 : 16;
    while (task->width > 16 && key_room<T>(NULL, task->width).bytes > most_shared()) task->width /= 2;
    task->parts = task->KP / task->width;
}

template <class T, int W, delta_purpose purpose>
static void launch_advance(delta_task<T> task, int64_t columns, int64_t spans, mt_stream *stream) {
    task.column_blocks = (int)mt_divide_up(columns, W);
    dim3 grid((unsigned)(spans * task.column_blocks), (unsigned)(task.key_heads * task.heads));
    launch(advance<T, W, purpose>, grid, advance_room<T, W>(NULL, task.KP, purpose).bytes, task, stream);
}

template <class T, int W, bool of_map>
static void launch_retreat(delta_task<T> task, int64_t spans, mt_stream *stream) {
    task.column_blocks = (int)mt_divide_up(task.Dv, W);
    dim3 grid((unsigned)(spans * task.column_blocks), (unsigned)(task.key_heads * task.heads));
    launch(retreat<T, W, of_map>, grid, retreat_room<T, W>(NULL, task.KP).bytes, task, stream);
}

template <class T, delta_purpose purpose>
static void run_advance(const delta_task<T> &task, int64_t columns, int64_t spans, mt_stream *stream) {
    if (columns_of(task, task.Dv) == 32)
        launch_advance<T, 32, purpose>(task, columns, spans, stream);
    else
        launch_advance<T, 16, purpose>(task, columns, spans, stream);
}

template <class T, bool of_map> static void run_retreat(const delta_task<T> &task, int64_t spans, mt_stream *stream) {
    if (columns_of(task, task.Dv) == 32)
        launch_retreat<T, 32, of_map>(task, spans, stream);
    else
        launch_retreat<T, 16, of_map>(task, spans, stream);
}

template <class T> static void run_prepare(const delta_task<T> &task, mt_stream *stream) {
    launch(prepare<T>, dim3((unsigned)(task.chunks.count * task.key_heads)), prepare_room<T>(NULL, task.KP).bytes, task,
           stream);
}

/* Calls body(task, spans) for groups of spans and key heads whose arrays fit the workspace. */
template <class T, class Body>
static void by_groups(const mt_delta_args *a, delta_task<T> task, int64_t begin, int64_t end, bool backward,
                      mt_stream *stream, Body body) {
    auto bytes_of = [&](int64_t from, int64_t to, int64_t key_heads) {
        int64_t chunks = mt_cuda_chunk_count(a->spans, from, to);
        task.key_heads = (int)key_heads;
        return mt_cuda_chunk_bytes(chunks, to - from) + place_arrays(&task, chunks, backward, NULL);
    };
    set_sizes(&task);
    while (begin < end) {
        int64_t until = end, key_heads = a->Hk;
        while (key_heads > 1 && bytes_of(begin, until, key_heads) > stream->workspace_bytes)
            key_heads = mt_divide_up(key_heads, 2);
        while (until > begin + 1 && bytes_of(begin, until, key_heads) > stream->workspace_bytes)
            until = begin + (until - begin) / 2;
        char *memory = (char *)mt_cuda_workspace(stream, bytes_of(begin, until, key_heads));
        task.chunks = mt_cuda_chunks(a->spans, begin, until, memory, stream);
        memory += mt_cuda_chunk_bytes(task.chunks.count, until - begin);
        task.states = mt_states_on_device(&a->states, a->dstates, a->Hv * a->Dk * a->Dv, begin);
        for (int64_t first = 0; first < a->Hk; first += key_heads) {
            task.first_key_head = (int)first;
            task.key_heads = (int)(a->Hk - first < key_heads ? a->Hk - first : key_heads);
            place_arrays(&task, task.chunks.count, backward, memory);
            body(task, until - begin);
        }
        begin = until;
    }
}

template <class T, int N> static void launch_step(delta_task<T> task, int64_t spans, mt_stream *stream) {
    task.column_blocks = (int)mt_divide_up(task.Dv, N * STEP_LANES);
    dim3 grid((unsigned)(spans * task.column_blocks), (unsigned)task.Hv);
    auto kernel = task.Dk <= STEP_ROWS       ? step<T, N, 1>
                  : task.Dk <= 2 * STEP_ROWS ? step<T, N, 2>
                                             : step<T, N, MT_CUDA_DELTA_CHANNELS / STEP_ROWS>;
    mt_launch_early(kernel, grid, dim3(THREADS), 0, mt_cuda_stream(stream), task);
}

template <class T> static void forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    delta_task<T> task = delta_task_of<T>(a, dtype);
    if (mt_longest_span(a->spans) <= STEP_TOKENS) {
        task.chunks.spans = a->spans->device;
        task.states = mt_states_on_device(&a->states, NULL, a->Hv * a->Dk * a->Dv, 0);
        bool wide = (uintptr_t)a->v % (4 * sizeof(T)) == 0 && (uintptr_t)a->out % (4 * sizeof(T)) == 0 &&
                    (uintptr_t)a->states.memory % 16 == 0 && a->Dv % 4 == 0 && a->v_stride % 4 == 0;
        wide ? launch_step<T, 4>(task, a->spans->count, stream) : launch_step<T, 1>(task, a->spans->count, stream);
        return;
    }
    by_groups(a, task, 0, a->spans->count, false, stream, [&](const delta_task<T> &group, int64_t spans) {
        run_prepare(group, stream);
        run_advance<T, FORWARD>(group, a->Dv, spans, stream);
    });
}

template <class T> static void backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    delta_task<T> task = delta_task_of<T>(a, dtype);
    by_groups(a, task, 0, a->spans->count, true, stream, [&](const delta_task<T> &group, int64_t spans) {
        int64_t chunks = group.chunks.count, heads = group.key_heads * group.heads;
        int64_t first = group.first_key_head * group.heads;
        run_prepare(group, stream);
        run_advance<T, KEEP>(group, a->Dv, spans, stream);
        run_retreat<T, false>(group, spans, stream);
        launch(score_backward<T>, dim3((unsigned)(chunks * heads)), score_room<T>(NULL).bytes, group, stream);
        launch(key_backward<T>, dim3((unsigned)(chunks * group.key_heads), (unsigned)group.parts),
               key_room<T>(NULL, group.width).bytes, group, stream);
        launch(finish_backward<T>, dim3((unsigned)(chunks * group.key_heads)), 0, group, stream);
        if (a->dA_log) mt_cuda_add_partials(a->dA_log + first, chunks, NULL, 0, group.partial, heads, stream);
        if (a->ddt_bias)
            mt_cuda_add_partials(a->ddt_bias + first, chunks, NULL, 0, group.partial + chunks * heads, heads, stream);
    });
}

template <class T> static void make_maps(const mt_delta_args *a, bool backward, mt_dtype dtype, mt_stream *stream) {
    int64_t width = a->Hv * a->Dk * (backward ? a->Dv : a->Dv + a->Dk);
    for (int64_t slot = 0; slot < a->states.slots; slot++) {
        int64_t s = (backward ? a->states.first : a->states.last)[slot];
        if (s < 0) continue;
        delta_task<T> task = delta_task_of<T>(a, dtype);
        task.maps = (backward ? a->dmaps : a->maps) + slot * width, task.crosses = mt_slot_crosses(&a->states, slot);
        by_groups(a, task, s, s + 1, false, stream, [&](const delta_task<T> &group, int64_t spans) {
            run_prepare(group, stream);
            if (backward)
                run_retreat<T, true>(group, spans, stream);
            else
                run_advance<T, MAP>(group, a->Dv + a->Dk, spans, stream);
        });
    }
}

extern "C" void mt_cuda_delta_rule_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count == 0) return;
    if (mt_cuda_delta_chunks_serve(a, dtype, false)) return mt_cuda_delta_chunks_forward(a, dtype, stream);
    if (a->decays > 1) return mt_cuda_kda_forward(a, dtype, stream);
    MT_CUDA_DISPATCH(dtype, forward, a, dtype, stream);
}

extern "C" void mt_cuda_delta_rule_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count == 0) return;
    if (mt_cuda_delta_chunks_serve(a, dtype, true)) return mt_cuda_delta_chunks_backward(a, dtype, stream);
    if (a->decays > 1) return mt_cuda_kda_backward(a, dtype, stream);
    MT_CUDA_DISPATCH(dtype, backward, a, dtype, stream);
}

extern "C" void mt_cuda_delta_rule_map_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    if (mt_cuda_delta_chunks_serve(a, dtype, false)) return mt_cuda_delta_chunks_maps(a, false, dtype, stream);
    if (a->decays > 1) return mt_cuda_kda_maps(a, false, dtype, stream);
    MT_CUDA_DISPATCH(dtype, make_maps, a, false, dtype, stream);
}

extern "C" void mt_cuda_delta_rule_map_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    if (mt_cuda_delta_chunks_serve(a, dtype, false)) return mt_cuda_delta_chunks_maps(a, true, dtype, stream);
    if (a->decays > 1) return mt_cuda_kda_maps(a, true, dtype, stream);
    MT_CUDA_DISPATCH(dtype, make_maps, a, true, dtype, stream);
}
