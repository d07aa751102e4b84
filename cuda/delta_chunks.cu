/* delta_chunks.cu: the delta rule in chunks of 64 tokens on tensor cores, for heads of 128 channels in bf16 or fp16;
 * the decays are one for each channel of a key (Kimi delta attention) or one for a head. Names are those of §17a of
 * megatron.c. With G the sums of decays in a chunk, G_L the last, q and k over their lengths, q over sqrt(Dk) too:
 *
 *   Q' = q e^G,  K' = k e^G,  K" = k e^(G_L - G),  A = (I + beta R)^-1 diag(beta),  W = A K'
 *   P_ti = sum over channels of q_t k_i e^(G_t - G_i), i <= t;  R_ti the same of k_t, i < t
 *   U = A V - W S,   O = Q' S + P U,   S' = e^G_L S + K"^T U
 *   dU = P^T dO + K" dS',   dV = A^T dU,   dS = e^G_L dS' + Q'^T dO - W^T dU
 *   dP = dO U^T,   dR = -dV U^T,   dQ' = dO S^T,   dK' = -dV S^T,   dK" = U dS'^T
 *
 * Only S and dS go from chunk to chunk: `advance` and `retreat` take two products for each, a block for 64 columns of a
 * head along a span. All else is done for all chunks at once: `prepare`, `outputs`, `gradients`.
 *
 * Decays can be so strong that e^-G overflows. So no exponent is above 0: a chunk has four blocks of 16 tokens. For
 * tokens t of one and i of an earlier block, e^(G_t - G_i) is a product of two factors that meet at the last token
 * before the block of t; within a block it is computed for each pair and channel. G is in units of log 2.
 *
 * A matrix in memory is an image of a tile in shared memory (mma.cuh). Sums have one order. */
#include "linear_attention.cuh"
#include "mma.cuh"

enum {
    TOKENS = MT_CHUNK_TOKENS,
    BLOCK = 16, // tokens that share exponents' meeting point
    BLOCKS = TOKENS / BLOCK,
    CHANNELS = 128,
    PANEL = 64, // columns of a state that a block takes along a span
    THREADS = 256,
    WARPS = THREADS / 32,
    ROWS_TILE = TOKENS * CHANNELS * 2,  // bytes of tiles: of tokens and channels,
    SQUARE_TILE = TOKENS * TOKENS * 2,  // of two tokens,
    STATE_PANEL = CHANNELS * PANEL * 2, // of channels and columns
    ROWS_PANEL = TOKENS * PANEL * 2,
    G_ROW = CHANNELS + 8, // floats between rows of G, against bank conflicts
    M_ROW = TOKENS + 4
};

template <class T> struct chunk_task {
    const T *q, *k, *v, *b, *a, *A_log, *dt_bias, *dout;
    T *out, *dq, *dk, *dv, *db, *da;
    int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride, b_stride, a_stride, db_stride, da_stride;
    int Hv, heads, Dk, Dv;         // heads: value heads of a key head
    int first_key_head, key_heads; // of this launch, for the arrays below
    int panels;                    // of columns along a span
    float q_scale;                 // 1 / sqrt(Dk)
    mt_chunks chunks;
    mt_device_states states;
    float *maps;                  // of one slot: [Hv, Dk, Dv + Dk], or [Hv, Dk, Dv]
    bool crosses;                 // that slot's span begins with a state
    T *W, *U, *Q, *K, *dU;        // [chunk, head, 64, 128]: W, A V and then U, Q', K", P^T dO and then dU
    T *P, *A;                     // [chunk, head, 64, 64]
    T *before, *dafter;           // [chunk, head, 2 panels, 128, 64]: S before a chunk, dS after it
    float *decay;                 // [chunk, head, 128]: e^G_L
    T *dq_heads, *dk_heads;       // [chunk, head, 64, 128] of several heads of a key head
    float *rate_sums, *bias_sums; // [chunk, head], [chunk, head, decays]: of dA_log and ddt_bias

    __device__ int launch_heads() const {
        return key_heads * heads;
    }
};

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

extern __shared__ __align__(1024) char chunk_shared[];

/* Byte offset of an element. */
template <int ROWS> __device__ __forceinline__ uint32_t at_tile(int row, int column) {
    return mt_tile_chunk<ROWS>(row, column / 8) + (uint32_t)column % 8 * 2;
}

/* Loads op(a)[16, 16 N] as operands of products: rows from m on, k from `from` on. A transposed tile has rows of k. */
template <int ROWS, bool transposed, int N>
__device__ __forceinline__ void load_left(uint32_t (&x)[N][4], uint32_t a, int m, int from) {
    uint32_t down = mt_lane_down(), across = mt_lane_across();
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (transposed)
            mt_ldmatrix_transposed(x[k], mt_tile_block<ROWS>(a, across, from + 16 * k, m));
        else
            mt_ldmatrix(x[k], mt_tile_block<ROWS>(a, down, m, from + 16 * k));
    }
}

/* c[16, 16 N] += x[16, 16] op(b)[16, 16 N]: columns from n on. A transposed tile b has rows of n, else of k. */
template <class T, int ROWS, bool transposed, int N>
__device__ __forceinline__ void multiply_by(float (&c)[2 * N][4], const uint32_t (&x)[4], uint32_t b, int n, int k) {
    uint32_t down = mt_lane_down(), across = mt_lane_across(), y[N][4];
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (transposed)
            mt_ldmatrix(y[j], mt_tile_block<ROWS>(b, across, n + 16 * j, k));
        else
            mt_ldmatrix_transposed(y[j], mt_tile_block<ROWS>(b, down, k, n + 16 * j));
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        mt_mma_of<T>(c[2 * j], x, y[j][0], y[j][1]);
        mt_mma_of<T>(c[2 * j + 1], x, y[j][2], y[j][3]);
    }
}

/* c[16, 16 N] += op(a)[16, K] op(b)[K, 16 N] by one warp: k of [from, to). sign 0x80008000: - op(a). */
template <class T, int A_ROWS, int B_ROWS, bool a_transposed, bool b_transposed, int N>
__device__ __forceinline__ void multiply(float (&c)[2 * N][4], uint32_t a, int m, uint32_t b, int n, int from, int to,
                                         uint32_t sign = 0) {
#pragma unroll 4
    for (int k = from; k < to; k += 16) {
        uint32_t x[1][4];
        load_left<A_ROWS, a_transposed>(x, a, m, k);
        for (int i = 0; i < 4; i++) x[0][i] ^= sign;
        multiply_by<T, B_ROWS, b_transposed, N>(c, x[0], b, n, k);
    }
}

template <int N> __device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        for (int e = 0; e < 4; e++) c[i][e] = 0;
}

template <class T> __device__ __forceinline__ float2 unpack(uint32_t pair) {
    mt_pack<T, 2> pack = {{pair}};
    return make_float2(mt_element(pack, 0), mt_element(pack, 1));
}

/* Stores c[16, 8 N], rounded, to rows from m and columns from n on of a tile. */
template <class T, int ROWS, int N>
__device__ __forceinline__ void to_tile(char *tile, int m, int n, const float (&c)[N][4]) {
    int row = m + (int)threadIdx.x % 32 / 4, column = n + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        *(uint32_t *)(tile + at_tile<ROWS>(row, column + 8 * i)) = mt_pair_from_float(T(), c[i][0], c[i][1]);
        *(uint32_t *)(tile + at_tile<ROWS>(row + 8, column + 8 * i)) = mt_pair_from_float(T(), c[i][2], c[i][3]);
    }
}

/* Starts to copy an image of a tile; all threads of the block. */
template <int bytes, int threads = THREADS> __device__ __forceinline__ void fetch_image(uint32_t to, const void *from) {
    uint32_t first = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < bytes; i += threads * 16)
        if (bytes % (threads * 16) == 0 || i + first < bytes)
            mt_copy16_async(to + first + (uint32_t)i, (const char *)from + first + i, true);
}
template <int bytes, int threads = THREADS> __device__ __forceinline__ void store_image(void *to, const char *from) {
    uint32_t first = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < bytes; i += threads * 16)
        mt_store_word((uint4 *)((char *)to + first + i), *(const uint4 *)(from + first + i));
}

/* The same between a tile of 64 rows and rows of `columns` channels in memory; only the first L rows exist. A thread
 * has every STEPth row. STEP is a multiple of 8, so that these rows have the same swizzle. */
template <int columns, int threads> struct row_walk {
    static constexpr int STEP = threads / (columns / 8), COUNT = TOKENS / STEP;
    static_assert(STEP % 8 == 0, "rows of a thread have the same swizzle");
    int row, column;
    uint32_t offset;
    __device__ row_walk() {
        row = (int)threadIdx.x / (columns / 8), column = (int)threadIdx.x % (columns / 8) * 8;
        offset = mt_tile_chunk<TOKENS>(row, column / 8);
    }
};
template <int columns, int threads = THREADS, class T>
__device__ __forceinline__ void fetch_rows(uint32_t to, const T *from, int64_t stride, int L) {
    row_walk<columns, threads> walk;
    const T *at = from + walk.row * stride + walk.column;
#pragma unroll
    for (int i = 0; i < walk.COUNT; i++) {
        bool exists = walk.row + i * walk.STEP < L;
        mt_copy16_async(to + walk.offset + (uint32_t)(i * walk.STEP * 128), exists ? at : from, exists);
        at += walk.STEP * stride;
    }
}
template <int columns, int threads = THREADS, class T>
__device__ __forceinline__ void store_rows(T *to, int64_t stride, const char *from, int L) {
    row_walk<columns, threads> walk;
    T *at = to + walk.row * stride + walk.column;
#pragma unroll
    for (int i = 0; i < walk.COUNT; i++) {
        if (walk.row + i * walk.STEP < L)
            mt_store_word((uint4 *)at, *(const uint4 *)(from + walk.offset + i * walk.STEP * 128));
        at += walk.STEP * stride;
    }
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

/* A chunk of a head of the launch. */
template <class T> struct chunk_place {
    mt_chunk chunk;
    int64_t row, at; // first token in the micro-batch; of the arrays
    int head, key_head, L;
    __device__ chunk_place(const chunk_task<T> &task, int64_t number, int local) {
        chunk = mt_chunk_of(task.chunks, number);
        row = chunk.span.q_start + chunk.row, at = number * task.launch_heads() + local, L = chunk.L;
        head = local + task.first_key_head * task.heads, key_head = head / task.heads;
    }
};

/* a + bias of COUNT tokens from `first` on, of a thread's channel. */
template <class T, int COUNT>
__device__ __forceinline__ void load_steps(float (&x)[COUNT], const chunk_task<T> &task, const chunk_place<T> &p,
                                           int first, int channel) {
    int64_t column = (int64_t)p.head * CHANNELS + channel;
    float bias = mt_to_float(task.dt_bias[column]);
    const T *a = task.a + (p.row + first) * task.a_stride + column;
    T values[COUNT];
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        values[t] = first + t < p.L ? *a : mt_from_float<T>(0);
        a += task.a_stride;
    }
#pragma unroll
    for (int t = 0; t < COUNT; t++) x[t] = mt_to_float(values[t]) + bias;
}

__device__ __forceinline__ float softplus_fast(float x) {
    return x > 20 ? x : __logf(1 + mt_exp(x));
}

static constexpr float log2_e = 1.44269504f;

/* G[64][G_ROW] in units of log 2. A thread has a channel of a part of the tokens; totals[parts, 128] is scratch.
 * Returns true, for all threads, if a block of tokens decays so much that factors e^(G_t - meeting) and e^(meeting -
 * G_t) of its pairs leave the range of T, with a meeting point half way. Ends with a barrier. */
template <class T, int threads>
__device__ __forceinline__ bool make_sums(float *G, float *totals, const chunk_task<T> &task, const chunk_place<T> &p) {
    constexpr int PARTS = threads / CHANNELS, COUNT = TOKENS / PARTS;
    int channel = (int)threadIdx.x % CHANNELS, part = (int)threadIdx.x / CHANNELS, first = part * COUNT;
    float rate = expf(mt_to_float(task.A_log[p.head])) * log2_e, x[COUNT], sum = 0, before = 0, fall = 0;
    load_steps<T>(x, task, p, first, channel);
#pragma unroll
    for (int t = 0; t < COUNT; t++) x[t] = sum -= first + t < p.L ? rate * softplus_fast(x[t]) : 0;
    totals[part * CHANNELS + channel] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PARTS - 1; i++) before += i < part ? totals[i * CHANNELS + channel] : 0;
#pragma unroll
    for (int t = 0; t < COUNT; t++) G[(first + t) * G_ROW + channel] = x[t] + before;
#pragma unroll
    for (int t = BLOCK - 1; t < COUNT; t += BLOCK) fall = fmaxf(fall, (t >= BLOCK ? x[t - BLOCK] : 0) - x[t]);
    return __syncthreads_or(std::is_same_v<T, __half> || !(fall <= 120));
}

/* The same of one decay a head: G[64]. */
template <class T>
__device__ __forceinline__ void make_head_sums(float *G, const chunk_task<T> &task, const chunk_place<T> &p) {
    int lane = (int)threadIdx.x;
    if (lane < 32) { // a lane has two tokens
        float rate = expf(mt_to_float(task.A_log[p.head])) * log2_e, bias = mt_to_float(task.dt_bias[p.head]), x[2];
        for (int i = 0; i < 2; i++) {
            int t = 2 * lane + i;
            x[i] = t < p.L ? -rate * softplus(mt_to_float(task.a[(p.row + t) * task.a_stride + p.head]) + bias) : 0;
        }
        float sum = x[0] + x[1], all = sum;
#pragma unroll
        for (int from = 1; from < 32; from *= 2) {
            float other = __shfl_up_sync(0xffffffff, all, from);
            if (lane >= from) all += other;
        }
        G[2 * lane] = all - sum + x[0], G[2 * lane + 1] = all;
    }
    __syncthreads();
}

/* Where the decays of the pairs of two blocks meet: the last token before the later one, or half way in a block. */
struct meeting_point {
    const float *start, *end; // rows of G
    float of_start, of_end;
    __device__ meeting_point(const float *G, int later, int earlier) {
        start = G + (later > 0 ? later * BLOCK - 1 : 0) * G_ROW, end = G + (later * BLOCK + BLOCK - 1) * G_ROW;
        of_end = later > earlier ? 0 : 0.5f, of_start = later > earlier ? 1 : later > 0 ? 0.5f : 0;
    }
    __device__ float operator[](int column) const {
        return of_start * start[column] + of_end * end[column];
    }
    __device__ float2 pair(int column) const {
        float2 a = *(const float2 *)(start + column), b = *(const float2 *)(end + column);
        return make_float2(of_start * a.x + of_end * b.x, of_start * a.y + of_end * b.y);
    }
};

/* factors[64] = scale / length of each row of a tile [64, 128]; 0 beyond the chunk. */
template <class T, int warps = WARPS>
__device__ __forceinline__ void row_lengths(float *factors, const char *tile, int L, float scale = 1) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t first = at_tile<TOKENS>(warp, 4 * lane); // of rows warp + 8 n, which have the same swizzle
    float sums[TOKENS / warps];
#pragma unroll
    for (int n = 0; n < TOKENS / warps; n++) {
        uint2 words = *(const uint2 *)(tile + first + n * warps * 128);
        float2 x = unpack<T>(words.x), y = unpack<T>(words.y);
        sums[n] = x.x * x.x + x.y * x.y + y.x * y.x + y.y * y.y;
    }
#pragma unroll
    for (int n = 0; n < TOKENS / warps; n++) {
        float sum = mt_warp_sum(sums[n]);
        if (lane == n) factors[warp + n * warps] = warp + n * warps < L ? scale * rsqrtf(sum + 1e-6f) : 0;
    }
}

template <class T>
__device__ __forceinline__ void load_betas(float *beta, const chunk_task<T> &task, const chunk_place<T> &p) {
    int t = (int)threadIdx.x;
    if (t >= TOKENS) return;
    beta[t] = t < p.L ? 1 / (1 + expf(-mt_to_float(task.b[(p.row + t) * task.b_stride + p.head]))) : 0;
}

/* A pair of channels, rounded, times 2^(to - from). */
template <class T> __device__ __forceinline__ uint32_t decayed(uint32_t pair, float2 to, float2 from) {
    float2 x = unpack<T>(pair);
    return mt_pair_from_float(T(), x.x * exp2_of(to.x - from.x), x.y * exp2_of(to.y - from.y));
}

/* ---- A, P, W, Q' and K" ------------------------------------------------------------------------------------------ */

struct prepare_room {
    enum {
        G = 0, // floats; behind them X and W
        X = G,
        W = G + TOKENS * M_ROW * 4,
        Q = G + TOKENS * G_ROW * 4, // q, then K'
        K = Q + ROWS_TILE,          // k, then A
        V = K + ROWS_TILE,          // v, then A V
        P = V + ROWS_TILE,
        M = P + SQUARE_TILE,
        SCALES = M + TOKENS * M_ROW * 4, // of q and k, beta
        TOTALS = SCALES + 3 * TOKENS * 4,
        BYTES = TOTALS + 2 * CHANNELS * 4
    };
};
static_assert(prepare_room::W + ROWS_TILE <= prepare_room::Q, "W lies behind X");

/* X = (I + M)^-1 for M with zeros on and above the diagonal: blocks of 16 by substitution, then of 32 and of 64 by
 * [[T1, 0], [-T2 M21 T1, T2]], whose M21 T1 is in Y meanwhile. Ends before the last writes are visible. */
__device__ static inline void invert(float *X, float *Y, const float *M) {
    int thread = (int)threadIdx.x, block = thread / 16 % BLOCKS * BLOCK, j = thread % 16;
    if (thread < TOKENS) {
        float x[16];
#pragma unroll
        for (int t = 0; t < 16; t++) {
            x[t] = t == j ? 1 : 0;
#pragma unroll
            for (int i = 0; i < t; i++) x[t] -= M[(block + t) * M_ROW + block + i] * x[i];
        }
#pragma unroll
        for (int t = 0; t < 16; t++) X[(block + t) * M_ROW + block + j] = x[t];
    } else if (thread < 2 * TOKENS) { // zeros above the blocks of 16
        for (int t = 0; t < block; t++) X[t * M_ROW + block + j] = 0;
    }
#pragma unroll
    for (int half = 16; half < TOKENS; half *= 2) { // a thread has four columns of a row
        int pairs = TOKENS / (2 * half), outputs = pairs * half * half / 4;
        int first = thread / (half * half / 4) * 2 * half, r = thread / (half / 4) % half, c = thread % (half / 4) * 4;
        const float *M21 = M + (first + half + r) * M_ROW + first, *T1 = X + first * M_ROW + first + c;
        const float *T2 = X + (first + half + r) * M_ROW + first + half;
        float4 sum = {};
        __syncthreads();
        if (thread < outputs) {
            for (int i = c; i < half; i++) {
                float4 x = *(const float4 *)(T1 + i * M_ROW);
                sum.x += M21[i] * x.x, sum.y += M21[i] * x.y, sum.z += M21[i] * x.z, sum.w += M21[i] * x.w;
            }
            *(float4 *)(Y + (first / 2 + r) * M_ROW + c) = sum;
        }
        __syncthreads();
        if (thread < outputs) {
            const float *product = Y + first / 2 * M_ROW + c;
            sum = {};
            for (int i = 0; i <= r; i++) {
                float4 x = *(const float4 *)(product + i * M_ROW);
                sum.x -= T2[i] * x.x, sum.y -= T2[i] * x.y, sum.z -= T2[i] * x.z, sum.w -= T2[i] * x.w;
            }
            *(float4 *)(X + (first + half + r) * M_ROW + first + c) = sum;
        }
    }
}

/* P and M = beta R of the pairs of tokens of two blocks, or of one; one warp. */
template <class T>
__device__ __forceinline__ void scores_of_blocks(char *room, const float *q_factor, const float *k_factor,
                                                 const float *beta, float q_scale, int later, int earlier) {
    int row = (int)threadIdx.x % 32 / 4, pair = (int)threadIdx.x % 4 * 2;
    const float *G = (const float *)(room + prepare_room::G);
    meeting_point meeting(G, later, earlier);
    const char *q = room + prepare_room::Q, *k = room + prepare_room::K;
    float of_q[2][4], of_k[2][4];
    clear(of_q), clear(of_k);
#pragma unroll 2
    for (int channel = 0; channel < CHANNELS; channel += 16) {
        uint32_t xq[4], xk[4], y[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = later * BLOCK + row + i % 2 * 8, column = channel + pair + i / 2 * 8;
            uint32_t offset = at_tile<TOKENS>(t, column);
            float2 at_meeting = meeting.pair(column), sums = *(const float2 *)(G + t * G_ROW + column);
            float2 factor = make_float2(exp2_of(sums.x - at_meeting.x), exp2_of(sums.y - at_meeting.y));
            float2 x = unpack<T>(*(const uint32_t *)(q + offset));
            xq[i] = mt_pair_from_float(T(), x.x * factor.x, x.y * factor.y);
            x = unpack<T>(*(const uint32_t *)(k + offset));
            xk[i] = mt_pair_from_float(T(), x.x * factor.x, x.y * factor.y);
            t = earlier * BLOCK + row + i % 2 * 8;
            y[i % 2][i / 2] = decayed<T>(*(const uint32_t *)(k + at_tile<TOKENS>(t, column)), at_meeting,
                                         *(const float2 *)(G + t * G_ROW + column));
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            mt_mma_of<T>(of_q[n], xq, y[n][0], y[n][1]);
            mt_mma_of<T>(of_k[n], xk, y[n][0], y[n][1]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
        for (int e = 0; e < 4; e += 2) {
            int t = later * BLOCK + row + e / 2 * 8, i = earlier * BLOCK + n * 8 + pair;
            float of_t = q_scale * q_factor[t], P[2], *M = (float *)(room + prepare_room::M) + t * M_ROW + i;
            for (int c = 0; c < 2; c++) {
                P[c] = i + c <= t ? of_t * k_factor[i + c] * of_q[n][e + c] : 0;
                M[c] = i + c < t ? beta[t] * k_factor[t] * k_factor[i + c] * of_k[n][e + c] : 0;
            }
            *(uint32_t *)(room + prepare_room::P + at_tile<TOKENS>(t, i)) = mt_pair_from_float(T(), P[0], P[1]);
        }
}

/* All of P and M where a head has one decay: products of q and k, times the decays. */
template <class T>
__device__ __forceinline__ void scores_of_head(char *room, const float *q_factor, const float *k_factor,
                                               const float *beta, float q_scale) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, m = warp % BLOCKS * BLOCK,
        first = warp / BLOCKS * 32;
    const float *G = (const float *)(room + prepare_room::G);
    uint32_t q = mt_shared_address(room + prepare_room::Q), k = mt_shared_address(room + prepare_room::K);
    float of_q[4][4], of_k[4][4];
    if (first > m) return;
    clear(of_q), clear(of_k);
    multiply<T, TOKENS, TOKENS, false, true, 2>(of_q, q, m, k, first, 0, CHANNELS);
    multiply<T, TOKENS, TOKENS, false, true, 2>(of_k, k, m, k, first, 0, CHANNELS);
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 4; e += 2) {
            int t = m + lane / 4 + e / 2 * 8, i = first + 8 * n + lane % 4 * 2;
            float P[2], *M = (float *)(room + prepare_room::M) + t * M_ROW + i;
            for (int c = 0; c < 2; c++) {
                float factor = i + c <= t ? exp2_of(G[t] - G[i + c]) * k_factor[i + c] : 0;
                P[c] = i + c <= t ? q_scale * q_factor[t] * factor * of_q[n][e + c] : 0;
                M[c] = i + c < t ? beta[t] * k_factor[t] * factor * of_k[n][e + c] : 0;
            }
            *(uint32_t *)(room + prepare_room::P + at_tile<TOKENS>(t, i)) = mt_pair_from_float(T(), P[0], P[1]);
        }
}

/* Halves the sums that a lane has parts of, and the lanes that have parts of a sum. */
template <int half, int N> __device__ __forceinline__ void exchange(float (&sums)[N], int lane) {
#pragma unroll
    for (int i = 0; i < half; i++) {
        float keep = lane & half ? sums[i + half] : sums[i], send = lane & half ? sums[i] : sums[i + half];
        sums[i] = keep + __shfl_xor_sync(0xffffffff, send, half);
    }
}

/* sums[8] of a lane's columns, each over the eight rows that lanes have: the lane of row i receives sum i, in sums[0].
 */
__device__ __forceinline__ void exchange_rows(float (&sums)[8], int lane) {
    int row = lane / 4;
#pragma unroll
    for (int half = 4; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) {
            float keep = row & half ? sums[i + half] : sums[i], send = row & half ? sums[i] : sums[i + half];
            sums[i] = keep + __shfl_xor_sync(0xffffffff, send, 4 * half);
        }
}

/* The same of the pairs within all blocks, each pair and channel with a decay of its own, where decays are steep. A
 * warp takes two tokens t of each block, a lane four channels. */
template <class T>
__device__ __forceinline__ void scores_within(char *room, const float *q_factor, const float *k_factor,
                                              const float *beta, float q_scale) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const float *G = (const float *)(room + prepare_room::G) + 4 * lane;
    const char *q = room + prepare_room::Q, *k = room + prepare_room::K;
    for (int n = 0; n < 2 * BLOCKS; n++) {
        int first = n / 2 * BLOCK, own = n % 2 ? BLOCK - 1 - warp : warp, t = first + own;
        float4 now = *(const float4 *)(G + t * G_ROW);
        uint2 words = *(const uint2 *)(q + at_tile<TOKENS>(t, 4 * lane));
        float2 q0 = unpack<T>(words.x), q1 = unpack<T>(words.y);
        words = *(const uint2 *)(k + at_tile<TOKENS>(t, 4 * lane));
        float2 k0 = unpack<T>(words.x), k1 = unpack<T>(words.y);
        float sums[2 * BLOCK]; // of P, then of R
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            sums[i] = sums[BLOCK + i] = 0;
            if (i > own) continue;
            float4 then = *(const float4 *)(G + (first + i) * G_ROW);
            words = *(const uint2 *)(k + at_tile<TOKENS>(first + i, 4 * lane));
            float2 x0 = unpack<T>(words.x), x1 = unpack<T>(words.y);
            x0.x *= exp2_of(now.x - then.x), x0.y *= exp2_of(now.y - then.y);
            x1.x *= exp2_of(now.z - then.z), x1.y *= exp2_of(now.w - then.w);
            sums[i] = q0.x * x0.x + q0.y * x0.y + q1.x * x1.x + q1.y * x1.y;
            sums[BLOCK + i] = k0.x * x0.x + k0.y * x0.y + k1.x * x1.x + k1.y * x1.y;
        }
        exchange<16>(sums, lane), exchange<8>(sums, lane), exchange<4>(sums, lane), exchange<2>(sums, lane);
        exchange<1>(sums, lane); // lane l has sum l
        int i = first + lane % BLOCK;
        if (lane < BLOCK)
            *(T *)(room + prepare_room::P + at_tile<TOKENS>(t, i)) =
                mt_from_float<T>(i <= t ? q_scale * q_factor[t] * k_factor[i] * sums[0] : 0);
        else
            ((float *)(room + prepare_room::M))[t * M_ROW + i] =
                i < t ? beta[t] * k_factor[t] * k_factor[i] * sums[0] : 0;
    }
}

/* A block per chunk and head. */
template <class T, bool by_channel, bool backward>
__global__ void __launch_bounds__(THREADS, 2) prepare(const chunk_task<T> task) {
    using at = prepare_room;
    char *room = chunk_shared;
    uint32_t shared = mt_shared_address(room);
    float *G = (float *)(room + at::G), *q_factor = (float *)(room + at::SCALES), *k_factor = q_factor + TOKENS;
    float *beta = k_factor + TOKENS;
    mt_wait_for_previous();
    int heads = task.launch_heads(), thread = (int)threadIdx.x;
    chunk_place<T> p(task, blockIdx.x / heads, (int)(blockIdx.x % heads));
    if (p.L <= 0) return;
    int64_t of_key = (int64_t)p.key_head * CHANNELS, of_head = (int64_t)p.head * CHANNELS;
    fetch_rows<CHANNELS>(shared + at::Q, task.q + p.row * task.q_stride + of_key, task.q_stride, p.L);
    fetch_rows<CHANNELS>(shared + at::K, task.k + p.row * task.k_stride + of_key, task.k_stride, p.L);
    fetch_rows<CHANNELS>(shared + at::V, task.v + p.row * task.v_stride + of_head, task.v_stride, p.L);
    load_betas(beta, task, p);
    bool steep = false;
    if constexpr (by_channel)
        steep = make_sums<T, THREADS>(G, (float *)(room + at::TOTALS), task, p);
    else
        make_head_sums(G, task, p);
    mt_copies_wait();
    __syncthreads();
    row_lengths<T>(q_factor, room + at::Q, p.L), row_lengths<T>(k_factor, room + at::K, p.L);
    __syncthreads();
    if constexpr (by_channel) {
        for (int pair = thread / 32; pair < BLOCKS * (BLOCKS + 1) / 2; pair += WARPS) { // (0, 0), (1, 0), (1, 1), ...
            int later = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3, earlier = pair - later * (later + 1) / 2;
            if (later > earlier || !steep)
                scores_of_blocks<T>(room, q_factor, k_factor, beta, task.q_scale, later, earlier);
        }
        if (steep) scores_within<T>(room, q_factor, k_factor, beta, task.q_scale);
    } else {
        scores_of_head<T>(room, q_factor, k_factor, beta, task.q_scale);
    }
    __syncthreads();

    /* Q' and K" to memory, K' in place of q. */
    const float *last = G + (by_channel ? (TOKENS - 1) * G_ROW : TOKENS - 1);
    row_walk<CHANNELS, THREADS> walk;
#pragma unroll
    for (int n = 0; n < walk.COUNT; n++) {
        int t = walk.row + n * walk.STEP, column = walk.column;
        uint32_t offset = walk.offset + (uint32_t)(n * walk.STEP * 128);
        uint4 q = *(const uint4 *)(room + at::Q + offset), k = *(const uint4 *)(room + at::K + offset), of_q, now, rest;
        float q_scale = q_factor[t] * task.q_scale, k_scale = k_factor[t], k_rest = k_scale;
        if constexpr (!by_channel) {
            float grown = exp2_of(G[t]);
            q_scale *= grown, k_rest *= exp2_of(*last - G[t]), k_scale *= grown;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 x = unpack<T>(((uint32_t *)&q)[i]), y = unpack<T>(((uint32_t *)&k)[i]), grown = {1, 1},
                   left = {1, 1};
            if constexpr (by_channel) {
                float2 sums = *(const float2 *)(G + t * G_ROW + column + 2 * i);
                float2 all = *(const float2 *)(last + column + 2 * i);
                grown = make_float2(exp2_of(sums.x), exp2_of(sums.y));
                left = make_float2(exp2_of(all.x - sums.x), exp2_of(all.y - sums.y));
            }
            ((uint32_t *)&of_q)[i] = mt_pair_from_float(T(), x.x * q_scale * grown.x, x.y * q_scale * grown.y);
            ((uint32_t *)&now)[i] = mt_pair_from_float(T(), y.x * k_scale * grown.x, y.y * k_scale * grown.y);
            ((uint32_t *)&rest)[i] = mt_pair_from_float(T(), y.x * k_rest * left.x, y.y * k_rest * left.y);
        }
        mt_store_word((uint4 *)((char *)task.Q + p.at * ROWS_TILE + offset), of_q);
        mt_store_word((uint4 *)((char *)task.K + p.at * ROWS_TILE + offset), rest);
        *(uint4 *)(room + at::Q + offset) = now;
    }
    if (thread < CHANNELS) task.decay[p.at * CHANNELS + thread] = exp2_of(by_channel ? last[thread] : *last);
    if (!backward) store_image<SQUARE_TILE>((char *)task.P + p.at * SQUARE_TILE, room + at::P);
    __syncthreads();

    float *X = (float *)(room + at::X);
    invert(X, (float *)(room + at::W), (const float *)(room + at::M));
    __syncthreads();
    for (int n = thread; n < TOKENS * TOKENS / 2; n += THREADS) {
        int t = n / (TOKENS / 2), i = n % (TOKENS / 2) * 2;
        float x = i <= t ? X[t * M_ROW + i] * beta[i] : 0, y = i + 1 <= t ? X[t * M_ROW + i + 1] * beta[i + 1] : 0;
        *(uint32_t *)(room + at::K + at_tile<TOKENS>(t, i)) = mt_pair_from_float(T(), x, y);
    }
    __syncthreads();
    if (backward) store_image<SQUARE_TILE>((char *)task.A + p.at * SQUARE_TILE, room + at::K);
    int m = thread / 32 % BLOCKS * BLOCK, n = thread / 32 / BLOCKS * PANEL;
    float of_keys[8][4], of_values[8][4];
    clear(of_keys), clear(of_values);
    multiply<T, TOKENS, TOKENS, false, false, 4>(of_keys, shared + at::K, m, shared + at::Q, n, 0, m + BLOCK);
    multiply<T, TOKENS, TOKENS, false, false, 4>(of_values, shared + at::K, m, shared + at::V, n, 0, m + BLOCK);
    __syncthreads();
    if (backward)
        fetch_rows<CHANNELS>(shared + at::Q, task.dout + p.row * task.Hv * CHANNELS + of_head,
                             (int64_t)task.Hv * CHANNELS, p.L);
    to_tile<T, TOKENS>(room + at::W, m, n, of_keys), to_tile<T, TOKENS>(room + at::V, m, n, of_values);
    __syncthreads();
    store_image<ROWS_TILE>((char *)task.W + p.at * ROWS_TILE, room + at::W);
    store_image<ROWS_TILE>((char *)task.U + p.at * ROWS_TILE, room + at::V);
    if (!backward) return;
    mt_copies_wait();
    __syncthreads();
    clear(of_values);
    multiply<T, TOKENS, TOKENS, true, false, 4>(of_values, shared + at::P, m, shared + at::Q, n, m, TOKENS);
    to_tile<T, TOKENS>(room + at::V, m, n, of_values); // each warp its own part; the last reader was before the barrier
    __syncthreads();
    store_image<ROWS_TILE>((char *)task.dU + p.at * ROWS_TILE, room + at::V);
}

/* ---- along the spans --------------------------------------------------------------------------------------------- */

enum { LINE_THREADS = 512 };

/* 32 of 64 columns of a panel of a state in registers of a warp, 16 rows of them. */
struct state_part {
    float x[4][4];
    int first_row, first_column, row, column; // row, column: of x[0][0], in the panel

    __device__ state_part() {
        int warp = (int)threadIdx.x / 32;
        first_row = warp % (CHANNELS / 16) * 16, first_column = warp / (CHANNELS / 16) * (PANEL / 2);
        row = first_row + (int)threadIdx.x % 32 / 4, column = first_column + (int)threadIdx.x % 4 * 2;
    }
    __device__ void load(const float *from, int width, int first) {
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++)
                x[n][e] = from ? from[(int64_t)(row + e / 2 * 8) * width + first + column + 8 * n + e % 2] : 0;
    }
    __device__ void store(float *to, int width, int first) const {
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++)
                to[(int64_t)(row + e / 2 * 8) * width + first + column + 8 * n + e % 2] = x[n][e];
    }
    __device__ void unit(int diagonal) { // column j has its 1 in row j + diagonal
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) x[n][e] = row + e / 2 * 8 == column + 8 * n + e % 2 + diagonal ? 1 : 0;
    }
    __device__ void scale(const float *decay) {
        float upper = decay[row], lower = decay[row + 8];
#pragma unroll
        for (int n = 0; n < 4; n++) x[n][0] *= upper, x[n][1] *= upper, x[n][2] *= lower, x[n][3] *= lower;
    }
};

/* sums[16 tokens, 16 columns] of a warp = x[16, 128] S, of a panel of S in shared memory; two chains of sums. */
template <class T>
__device__ __forceinline__ void multiply_panel(float (&sums)[2][4], const uint32_t (&x)[CHANNELS / 16][4],
                                               uint32_t panel, int column) {
    float more[2][4];
    clear(sums), clear(more);
#pragma unroll
    for (int k = 0; k < CHANNELS / 16; k += 2) {
        multiply_by<T, CHANNELS, false, 1>(sums, x[k], panel, column, 16 * k);
        multiply_by<T, CHANNELS, false, 1>(more, x[k + 1], panel, column, 16 * k + 16);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
        for (int e = 0; e < 4; e++) sums[n][e] += more[n][e];
}

struct advance_room {
    enum {
        S = 0,
        STAGES = S + STATE_PANEL, // DEPTH of:
        W = 0,
        K = W + ROWS_TILE,
        U = K + ROWS_TILE,
        DECAY = U + ROWS_PANEL,
        STAGE = DECAY + 1024,
        DEPTH = 4,
        BYTES = STAGES + DEPTH * STAGE
    };
};

/* A block per panel of a head of a span; of_map: of the span that task.chunks begins with, whose panels behind the
 * columns of v begin with those of I. Otherwise S before each chunk and U go to memory. */
template <class T, bool of_map> __global__ void __launch_bounds__(LINE_THREADS) advance(const chunk_task<T> task) {
    using at = advance_room;
    char *room = chunk_shared;
    uint32_t shared = mt_shared_address(room);
    mt_wait_for_previous();
    int panel = (int)(blockIdx.x % task.panels), local = (int)blockIdx.y, warp = (int)threadIdx.x / 32;
    int head = local + task.first_key_head * task.heads;
    int64_t number = blockIdx.x / task.panels, first = task.chunks.table ? task.chunks.first[number] : number;
    mt_span span = task.chunks.spans[number];
    bool of_values = panel < CHANNELS / PANEL;
    int64_t by_state = (int64_t)head * CHANNELS;
    int chunks = (int)((span.q_len + TOKENS - 1) / TOKENS);
    state_part S;
    const float *before = of_map ? NULL : task.states.before(span, number);
    S.load(before ? before + by_state * CHANNELS : NULL, CHANNELS, panel * PANEL);
    if (of_map && !of_values && task.crosses) S.unit(panel * PANEL - CHANNELS);
    auto array_of = [&](int n) { return (first + n) * task.launch_heads() + local; };
    auto fetch = [&](int n) {
        uint32_t stage = shared + at::STAGES + (uint32_t)(n % at::DEPTH) * at::STAGE;
        if (n < chunks) {
            int64_t array = array_of(n);
            fetch_image<ROWS_TILE, LINE_THREADS>(stage + at::W, (const char *)task.W + array * ROWS_TILE);
            fetch_image<ROWS_TILE, LINE_THREADS>(stage + at::K, (const char *)task.K + array * ROWS_TILE);
            if (of_values)
                fetch_image<ROWS_PANEL, LINE_THREADS>(stage + at::U,
                                                      (const char *)task.U + array * ROWS_TILE + panel * ROWS_PANEL);
            fetch_image<CHANNELS * 4, LINE_THREADS>(stage + at::DECAY, task.decay + array * CHANNELS);
        }
        mt_load_async_commit();
    };
    for (int n = 0; n < at::DEPTH - 1; n++) fetch(n);
    int m = warp % BLOCKS * BLOCK, quarter = warp / BLOCKS * 16;
    int row = m + (int)threadIdx.x % 32 / 4, column = quarter + (int)threadIdx.x % 4 * 2;
    for (int n = 0; n < chunks; n++) {
        char *stage = room + at::STAGES + n % at::DEPTH * at::STAGE;
        uint32_t staged = mt_shared_address(stage), of_w[CHANNELS / 16][4], of_k[TOKENS / 16][4];
        to_tile<T, CHANNELS>(room + at::S, S.first_row, S.first_column, S.x);
        mt_load_async_wait<at::DEPTH - 2>();
        __syncthreads(); // S and this stage are there; the stage before is free
        fetch(n + at::DEPTH - 1);
        load_left<TOKENS, false>(of_w, staged + at::W, m, 0);
        float u[2][4];
        multiply_panel<T>(u, of_w, shared + at::S, quarter);
        if (!of_map)
            store_image<STATE_PANEL, LINE_THREADS>((char *)task.before + (array_of(n) * 2 + panel) * STATE_PANEL,
                                                   room + at::S);
        load_left<TOKENS, true>(of_k, staged + at::K, S.first_row, 0);
        S.scale((const float *)(stage + at::DECAY));
#pragma unroll
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < 4; e += 2) {
                uint32_t *to = (uint32_t *)(stage + at::U + at_tile<TOKENS>(row + e / 2 * 8, column + 8 * i));
                float2 v = of_values ? unpack<T>(*to) : make_float2(0, 0);
                *to = mt_pair_from_float(T(), v.x - u[i][e], v.y - u[i][e + 1]);
            }
        __syncthreads(); // U is there; S in shared memory is no longer read
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            multiply_by<T, TOKENS, false, 2>(S.x, of_k[k], staged + at::U, S.first_column, 16 * k);
        if (!of_map)
            store_image<ROWS_PANEL, LINE_THREADS>((char *)task.U + array_of(n) * ROWS_TILE + panel * ROWS_PANEL,
                                                  stage + at::U);
    }
    mt_load_async_wait<0>();
    if (of_map) {
        S.store(task.maps + by_state * 2 * CHANNELS, 2 * CHANNELS, panel * PANEL);
    } else {
        float *kept = task.dout ? NULL : task.states.kept(span);
        if (kept) S.store(kept + by_state * CHANNELS, CHANNELS, panel * PANEL);
    }
}

struct retreat_room {
    enum {
        S = 0,
        STAGES = S + STATE_PANEL, // DEPTH of:
        W = 0,
        K = W + ROWS_TILE,
        Q = K + ROWS_TILE,
        DU = Q + ROWS_TILE,
        DO = DU + ROWS_PANEL,
        DECAY = DO + ROWS_PANEL,
        STAGE = DECAY + 1024,
        DEPTH = 3,
        BYTES = STAGES + DEPTH * STAGE
    };
};

/* The same in reverse: dU, and dS after each chunk; of_map: the gradient of the state before the span instead, from its
 * own outputs. */
template <class T, bool of_map> __global__ void __launch_bounds__(LINE_THREADS) retreat(const chunk_task<T> task) {
    using at = retreat_room;
    char *room = chunk_shared;
    uint32_t shared = mt_shared_address(room);
    mt_wait_for_previous();
    int panel = (int)(blockIdx.x % task.panels), local = (int)blockIdx.y, warp = (int)threadIdx.x / 32;
    int head = local + task.first_key_head * task.heads;
    int64_t number = blockIdx.x / task.panels, first = task.chunks.table ? task.chunks.first[number] : number;
    mt_span span = task.chunks.spans[number];
    int64_t by_state = (int64_t)head * CHANNELS * CHANNELS;
    int chunks = (int)((span.q_len + TOKENS - 1) / TOKENS);
    state_part dS;
    const float *after = of_map ? NULL : task.states.gradient_after(number);
    dS.load(after ? after + by_state : NULL, CHANNELS, panel * PANEL);
    auto array_of = [&](int n) { return (first + chunks - 1 - n) * task.launch_heads() + local; };
    auto fetch = [&](int n) {
        uint32_t stage = shared + at::STAGES + (uint32_t)(n % at::DEPTH) * at::STAGE;
        if (n < chunks) {
            int64_t array = array_of(n), row = (int64_t)(chunks - 1 - n) * TOKENS;
            int L = (int)(span.q_len - row < TOKENS ? span.q_len - row : TOKENS);
            fetch_image<ROWS_TILE, LINE_THREADS>(stage + at::W, (const char *)task.W + array * ROWS_TILE);
            fetch_image<ROWS_TILE, LINE_THREADS>(stage + at::K, (const char *)task.K + array * ROWS_TILE);
            fetch_image<ROWS_TILE, LINE_THREADS>(stage + at::Q, (const char *)task.Q + array * ROWS_TILE);
            fetch_image<ROWS_PANEL, LINE_THREADS>(stage + at::DU,
                                                  (const char *)task.dU + array * ROWS_TILE + panel * ROWS_PANEL);
            fetch_rows<PANEL, LINE_THREADS>(
                stage + at::DO, task.dout + ((span.q_start + row) * task.Hv + head) * CHANNELS + panel * PANEL,
                (int64_t)task.Hv * CHANNELS, L);
            fetch_image<CHANNELS * 4, LINE_THREADS>(stage + at::DECAY, task.decay + array * CHANNELS);
        }
        mt_load_async_commit();
    };
    for (int n = 0; n < at::DEPTH - 1; n++) fetch(n);
    int m = warp % BLOCKS * BLOCK, quarter = warp / BLOCKS * 16;
    int row = m + (int)threadIdx.x % 32 / 4, column = quarter + (int)threadIdx.x % 4 * 2;
    for (int n = 0; n < chunks; n++) {
        char *stage = room + at::STAGES + n % at::DEPTH * at::STAGE;
        uint32_t staged = mt_shared_address(stage), of_k[CHANNELS / 16][4], of_q[TOKENS / 16][4];
        to_tile<T, CHANNELS>(room + at::S, dS.first_row, dS.first_column, dS.x);
        mt_load_async_wait<at::DEPTH - 2>();
        __syncthreads();
        fetch(n + at::DEPTH - 1);
        load_left<TOKENS, false>(of_k, staged + at::K, m, 0);
        float du[2][4];
        multiply_panel<T>(du, of_k, shared + at::S, quarter);
        if (!of_map)
            store_image<STATE_PANEL, LINE_THREADS>((char *)task.dafter + (array_of(n) * 2 + panel) * STATE_PANEL,
                                                   room + at::S);
        dS.scale((const float *)(stage + at::DECAY));
        load_left<TOKENS, true>(of_q, staged + at::Q, dS.first_row, 0);
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            multiply_by<T, TOKENS, false, 2>(dS.x, of_q[k], staged + at::DO, dS.first_column, 16 * k);
        load_left<TOKENS, true>(of_q, staged + at::W, dS.first_row, 0);
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            for (int i = 0; i < 4; i++) of_q[k][i] ^= 0x80008000; // - W^T
#pragma unroll
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < 4; e += 2) {
                uint32_t *to = (uint32_t *)(stage + at::DU + at_tile<TOKENS>(row + e / 2 * 8, column + 8 * i));
                float2 v = unpack<T>(*to);
                *to = mt_pair_from_float(T(), v.x + du[i][e], v.y + du[i][e + 1]);
            }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            multiply_by<T, TOKENS, false, 2>(dS.x, of_q[k], staged + at::DU, dS.first_column, 16 * k);
        if (!of_map)
            store_image<ROWS_PANEL, LINE_THREADS>((char *)task.dU + array_of(n) * ROWS_TILE + panel * ROWS_PANEL,
                                                  stage + at::DU);
    }
    mt_load_async_wait<0>();
    if (of_map) dS.store(task.maps + by_state, CHANNELS, panel * PANEL);
}

/* ---- for all chunks at once -------------------------------------------------------------------------------------- */

struct outputs_room {
    enum { Q = 0, U = Q + ROWS_TILE, P = U + ROWS_TILE, S = P + SQUARE_TILE, BYTES = S + 2 * STATE_PANEL };
};

/* O = Q' S + P U. A block per chunk and head. */
template <class T> __global__ void __launch_bounds__(THREADS, 3) outputs(const chunk_task<T> task) {
    using at = outputs_room;
    char *room = chunk_shared;
    uint32_t shared = mt_shared_address(room);
    mt_wait_for_previous();
    int heads = task.launch_heads(), warp = (int)threadIdx.x / 32;
    chunk_place<T> p(task, blockIdx.x / heads, (int)(blockIdx.x % heads));
    if (p.L <= 0) return;
    fetch_image<ROWS_TILE>(shared + at::Q, (const char *)task.Q + p.at * ROWS_TILE);
    fetch_image<2 * STATE_PANEL>(shared + at::S, (const char *)task.before + p.at * 2 * STATE_PANEL);
    fetch_image<ROWS_TILE>(shared + at::U, (const char *)task.U + p.at * ROWS_TILE);
    fetch_image<SQUARE_TILE>(shared + at::P, (const char *)task.P + p.at * SQUARE_TILE);
    mt_copies_wait();
    __syncthreads();
    int m = warp % BLOCKS * BLOCK, panel = warp / BLOCKS;
    float out[8][4];
    clear(out);
    multiply<T, TOKENS, CHANNELS, false, false, 4>(out, shared + at::Q, m, shared + at::S + panel * STATE_PANEL, 0, 0,
                                                   CHANNELS);
    multiply<T, TOKENS, TOKENS, false, false, 4>(out, shared + at::P, m, shared + at::U, panel * PANEL, 0, m + BLOCK);
    __syncthreads();
    to_tile<T, TOKENS>(room + at::Q, m, panel * PANEL, out);
    __syncthreads();
    store_rows<CHANNELS>(task.out + (p.row * task.Hv + p.head) * CHANNELS, (int64_t)task.Hv * CHANNELS, room + at::Q,
                         p.L);
}

enum { GRADIENT_THREADS = 512, GRADIENT_WARPS = GRADIENT_THREADS / 32, PARTS = GRADIENT_THREADS / CHANNELS };

struct gradients_room {
    enum {
        G = 0,
        Q = G + TOKENS * G_ROW * 4,
        K = Q + ROWS_TILE,
        DP = K + ROWS_TILE,
        DR = DP + SQUARE_TILE,
        SCALES = DR + SQUARE_TILE,              // of q and k, beta
        STATES = SCALES + 3 * TOKENS * 4,       // [128] e^G_L S . dS' of each channel
        RESTS = STATES + CHANNELS * 4,          // [4 blocks, 128] K" . dK"
        TOTALS = RESTS + BLOCKS * CHANNELS * 4, // [PARTS, 128]
        SUMS = TOTALS + PARTS * CHANNELS * 4,   // [warps]
        ALL = (SUMS + GRADIENT_WARPS * 4 + 1023) / 1024 * 1024,
        DO = ALL,
        U = DO + ROWS_TILE,
        DV = U + ROWS_TILE, // dU, then dV
        S = DV + ROWS_TILE,
        DS = S + 2 * STATE_PANEL,
        A = DS + 2 * STATE_PANEL,
        BYTES = A + SQUARE_TILE,
        DP_COLUMNS = G + 1024, // of one decay a head: dP and dR times factors of their rows
        DR_COLUMNS = DP_COLUMNS + SQUARE_TILE,
        PAIRS = DR_COLUMNS + SQUARE_TILE,        // [2, 4 blocks, 64]: sums of its rows and of its columns
        LATER = PAIRS + 2 * BLOCKS * TOKENS * 4, // [4 quarters of channels, 64], of the states: Q' . dQ' + K' . dK',
        REST = LATER + BLOCKS * TOKENS * 4,      // and K" . dK"
        OF_Q = ALL,                              // [64][G_ROW] floats each, in place of the matrices
        ROWS = OF_Q + TOKENS * G_ROW * 4,
        COLUMNS = ROWS + TOKENS * G_ROW * 4
    };
};
static_assert(gradients_room::COLUMNS + TOKENS * G_ROW * 4 <= gradients_room::BYTES, "results fit the matrices' place");
static_assert((int)PARTS == (int)BLOCKS, "a thread has a channel of a block of tokens");

/* c += x y of fp32 numbers y, each as a sum of two numbers of T. So what a pair gives to the gradient of G_t and takes
 * from that of G_i cancels, as it must: rounded y, which differ in the two, would leave 2^-9 of it. */
template <class T>
__device__ __forceinline__ void multiply_exact(float (&c)[4], const uint32_t (&x)[4], const float (&y)[4]) {
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        high[i] = mt_pair_from_float(T(), y[2 * i], y[2 * i + 1]);
        float2 rounded = unpack<T>(high[i]);
        low[i] = mt_pair_from_float(T(), y[2 * i] - rounded.x, y[2 * i + 1] - rounded.y);
    }
    mt_mma_of<T>(c, x, high[0], high[1]);
    mt_mma_of<T>(c, x, low[0], low[1]);
}

/* Adds the gradients by pairs of tokens (t, i) of two blocks: of q_t and k_t (rows), times e^-(G_t - meeting), or of
 * k_i (columns), times e^-(meeting - G_i). A warp has 16 tokens and 32 channels. */
template <class T, bool of_rows>
__device__ __forceinline__ void pairs_of_blocks(float (&first)[4][4], float (&second)[4][4], const char *room,
                                                const float *q_scale, const float *k_scale, int later, int earlier,
                                                int channel) {
    using at = gradients_room;
    int row = (int)threadIdx.x % 32 / 4, pair = (int)threadIdx.x % 4 * 2;
    const float *G = (const float *)(room + at::G);
    meeting_point meeting(G, later, earlier);
    uint32_t shared = mt_shared_address(room), xp[1][4], xr[1][4];
    load_left<TOKENS, !of_rows>(xp, shared + at::DP, (of_rows ? later : earlier) * BLOCK,
                                (of_rows ? earlier : later) * BLOCK);
    load_left<TOKENS, !of_rows>(xr, shared + at::DR, (of_rows ? later : earlier) * BLOCK,
                                (of_rows ? earlier : later) * BLOCK);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int column = channel + 8 * n + row;
        float of_k[4], of_q[4], at_meeting = meeting[column];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = (of_rows ? earlier : later) * BLOCK + pair + i % 2 + i / 2 * 8;
            float sums = G[t * G_ROW + column], decay = exp2_of(of_rows ? at_meeting - sums : sums - at_meeting);
            of_k[i] = mt_to_float(*(const T *)(room + at::K + at_tile<TOKENS>(t, column))) * k_scale[t] * decay;
            if (!of_rows)
                of_q[i] = mt_to_float(*(const T *)(room + at::Q + at_tile<TOKENS>(t, column))) * q_scale[t] * decay;
        }
        multiply_exact<T>(first[n], of_rows ? xp[0] : xr[0], of_k);
        if (of_rows)
            multiply_exact<T>(second[n], xr[0], of_k);
        else
            multiply_exact<T>(first[n], xp[0], of_q);
    }
}

/* The same of the pairs within a block, each with a decay of its own, where decays are steep. A thread has a channel.
 */
template <class T>
__device__ __noinline__ void pairs_within(char *room, const float *q_scale, const float *k_scale, int first,
                                          int column) {
    using at = gradients_room;
    const float *G = (const float *)(room + at::G) + first * G_ROW + column;
    float *of_q = (float *)(room + at::OF_Q), *rows = (float *)(room + at::ROWS),
          *columns = (float *)(room + at::COLUMNS);
    float sums[BLOCK], q[BLOCK], k[BLOCK], dq[BLOCK], late[BLOCK], dk[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        sums[i] = G[i * G_ROW], dq[i] = late[i] = dk[i] = 0;
        q[i] = mt_to_float(*(const T *)(room + at::Q + at_tile<TOKENS>(first + i, column))) * q_scale[first + i];
        k[i] = mt_to_float(*(const T *)(room + at::K + at_tile<TOKENS>(first + i, column))) * k_scale[first + i];
    }
#pragma unroll
    for (int l = 0; l < BLOCK; l++)
#pragma unroll
        for (int i = 0; i <= l; i++) {
            float dP = mt_to_float(*(const T *)(room + at::DP + at_tile<TOKENS>(first + l, first + i)));
            float dR = mt_to_float(*(const T *)(room + at::DR + at_tile<TOKENS>(first + l, first + i)));
            float decay = exp2_of(sums[l] - sums[i]), decayed = decay * k[i];
            dq[l] += dP * decayed, late[l] += dR * decayed, dk[i] += decay * (dP * q[l] + dR * k[l]);
        }
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        int place = (first + i) * G_ROW + column;
        of_q[place] += dq[i], rows[place] += late[i], columns[place] += dk[i];
    }
}

/* x and y times the factors of the columns, by a function of them; and times e^(G_t - from). */
template <class Factor>
__device__ __forceinline__ void scale_columns(float (&x)[4][4], float (&y)[4][4], int channel, Factor factor) {
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 2; e++) {
            float f = exp2_of(factor(channel + 8 * n + e));
            x[n][e] *= f, x[n][e + 2] *= f, y[n][e] *= f, y[n][e + 2] *= f;
        }
}
template <class Factor> __device__ __forceinline__ void scale_columns(float (&x)[4][4], int channel, Factor factor) {
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 2; e++) {
            float f = exp2_of(factor(channel + 8 * n + e));
            x[n][e] *= f, x[n][e + 2] *= f;
        }
}

__device__ __forceinline__ void to_floats(float *to, const float (&x)[4][4], int t, int channel) {
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 4; e += 2)
            *(float2 *)(to + (t + e / 2 * 8) * G_ROW + channel + 8 * n) = make_float2(x[n][e], x[n][e + 1]);
}

/* Gradients of g by pairs of tokens: the sums of the rows and of the columns of x[16, 16], which begins at row m and
 * column `first`, to sums[0, first / 16] and sums[1, m / 16] of [2, 4, 64]. One warp. */
__device__ __forceinline__ void sum_pairs(float *sums, const float (&x)[2][4], int m, int first) {
    int lane = (int)threadIdx.x % 32;
    for (int half = 0; half < 2; half++) {
        float sum = x[0][2 * half] + x[0][2 * half + 1] + x[1][2 * half] + x[1][2 * half + 1];
        sum += __shfl_xor_sync(0xffffffff, sum, 1), sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (lane % 4 == 0) sums[first / BLOCK * TOKENS + m + lane / 4 + 8 * half] = sum;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float sum = x[n / 2][n % 2] + x[n / 2][n % 2 + 2];
        for (int from = 4; from < 32; from *= 2) sum += __shfl_xor_sync(0xffffffff, sum, from);
        if (lane < 4) sums[(BLOCKS + m / BLOCK) * TOKENS + first + n / 2 * 8 + lane * 2 + n % 2] = sum;
    }
}

/* All gradients of a chunk and head but those of its states. */
template <class T, bool by_channel>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1) gradients(const chunk_task<T> task) {
    using at = gradients_room;
    constexpr int ALL = GRADIENT_THREADS;
    char *room = chunk_shared;
    uint32_t shared = mt_shared_address(room);
    float *G = (float *)(room + at::G), *q_scale = (float *)(room + at::SCALES), *k_scale = q_scale + TOKENS;
    float *beta = k_scale + TOKENS, *totals = (float *)(room + at::TOTALS);
    mt_wait_for_previous();
    int heads = task.launch_heads(), thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32;
    chunk_place<T> p(task, blockIdx.x / heads, (int)(blockIdx.x % heads));
    int64_t of_bias = by_channel ? p.at * CHANNELS : p.at;
    if (p.L <= 0) { // of an empty span
        for (int i = thread; i < (by_channel ? CHANNELS : 1); i += ALL) task.bias_sums[of_bias + i] = 0;
        if (thread == 0) task.rate_sums[p.at] = 0;
        return;
    }
    int64_t of_key = (int64_t)p.key_head * CHANNELS, of_head = (int64_t)p.head * CHANNELS;
    fetch_image<ROWS_TILE, ALL>(shared + at::DV, (const char *)task.dU + p.at * ROWS_TILE);
    fetch_image<SQUARE_TILE, ALL>(shared + at::A, (const char *)task.A + p.at * SQUARE_TILE);
    fetch_rows<CHANNELS, ALL>(shared + at::Q, task.q + p.row * task.q_stride + of_key, task.q_stride, p.L);
    fetch_rows<CHANNELS, ALL>(shared + at::K, task.k + p.row * task.k_stride + of_key, task.k_stride, p.L);
    mt_load_async_commit();
    fetch_image<ROWS_TILE, ALL>(shared + at::U, (const char *)task.U + p.at * ROWS_TILE);
    fetch_rows<CHANNELS, ALL>(shared + at::DO, task.dout + p.row * task.Hv * CHANNELS + of_head,
                              (int64_t)task.Hv * CHANNELS, p.L);
    mt_load_async_commit();
    fetch_image<2 * STATE_PANEL, ALL>(shared + at::S, (const char *)task.before + p.at * 2 * STATE_PANEL);
    fetch_image<2 * STATE_PANEL, ALL>(shared + at::DS, (const char *)task.dafter + p.at * 2 * STATE_PANEL);
    mt_load_async_commit();
    load_betas(beta, task, p);
    bool steep = false;
    if constexpr (by_channel)
        steep = make_sums<T, ALL>(G, totals, task, p);
    else
        make_head_sums(G, task, p);
    mt_load_async_wait<2>();
    __syncthreads();
    row_lengths<T, GRADIENT_WARPS>(q_scale, room + at::Q, p.L, task.q_scale);
    row_lengths<T, GRADIENT_WARPS>(k_scale, room + at::K, p.L);

    /* dV, which is the gradient of v. */
    int block = warp % BLOCKS, m = block * BLOCK, channel = warp / BLOCKS * 32, row = lane / 4, pair = lane % 4 * 2;
    float x[4][4], y[4][4], z[4][4];
    clear(x);
    multiply<T, TOKENS, TOKENS, true, false, 2>(x, shared + at::A, m, shared + at::DV, channel, m, TOKENS);
    mt_load_async_wait<1>();
    __syncthreads();
    to_tile<T, TOKENS>(room + at::DV, m, channel, x);
    __syncthreads();
    store_rows<CHANNELS, ALL>(task.dv + p.row * task.dv_stride + of_head, task.dv_stride, room + at::DV, p.L);

    /* dP and dR; on the diagonal of the latter dV . U = beta dB . U, for the gradient of b. */
    {
        int columns = warp / BLOCKS * BLOCK;
        float dP[2][4], dR[2][4];
        clear(dP), clear(dR);
        if (columns <= m) {
            multiply<T, TOKENS, TOKENS, false, true, 1>(dP, shared + at::DO, m, shared + at::U, columns, 0, CHANNELS);
            multiply<T, TOKENS, TOKENS, false, true, 1>(dR, shared + at::DV, m, shared + at::U, columns, 0, CHANNELS);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
            for (int e = 0; e < 4; e++) {
                int t = m + row + e / 2 * 8, i = columns + 8 * n + pair + e % 2;
                if (t == i && t < p.L)
                    task.db[(p.row + t) * task.db_stride + p.head] =
                        mt_from_float<T>(dR[n][e] / mt_maximum(beta[t], 1e-30f) * (1 - beta[t]));
                float decay = !by_channel && i <= t ? exp2_of(G[t] - G[i]) : 1;
                dP[n][e] = i <= t ? decay * dP[n][e] : 0;
                dR[n][e] = i < t ? -decay * dR[n][e] : 0;
            }
        if constexpr (!by_channel) { // k_i of the rows' products and q_t and k_t of the columns' are without factors
            float of_p[2][4], of_r[2][4], of_q[2][4], of_k[2][4];
            clear(of_q), clear(of_k);
            if (columns <= m) {
                uint32_t q = shared + at::Q, k = shared + at::K;
                multiply<T, TOKENS, TOKENS, false, true, 1>(of_q, q, m, k, columns, 0, CHANNELS);
                multiply<T, TOKENS, TOKENS, false, true, 1>(of_k, k, m, k, columns, 0, CHANNELS);
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
                for (int e = 0; e < 4; e++) {
                    int t = m + row + e / 2 * 8, i = columns + 8 * n + pair + e % 2;
                    of_p[n][e] = dP[n][e] * q_scale[t], of_r[n][e] = dR[n][e] * k_scale[t];
                    of_q[n][e] = i < t ? k_scale[i] * (of_p[n][e] * of_q[n][e] + of_r[n][e] * of_k[n][e]) : 0;
                    dP[n][e] *= k_scale[i], dR[n][e] *= k_scale[i];
                }
            sum_pairs((float *)(room + at::PAIRS), of_q, m, columns);
            to_tile<T, TOKENS>(room + at::DP_COLUMNS, m, columns, of_p);
            to_tile<T, TOKENS>(room + at::DR_COLUMNS, m, columns, of_r);
        }
        to_tile<T, TOKENS>(room + at::DP, m, columns, dP), to_tile<T, TOKENS>(room + at::DR, m, columns, dR);
    }
    mt_load_async_wait<0>();
    __syncthreads();

    /* S . dS' of each channel, four threads each. */
    {
        int of_state = thread / 4, half = thread % 2 * PANEL / 16;
        uint32_t panel = (uint32_t)(thread % 4 / 2) * STATE_PANEL;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < PANEL / 16; n++) {
            uint32_t offset = panel + mt_tile_chunk<CHANNELS>(of_state, half + n);
            uint4 s = *(const uint4 *)(room + at::S + offset), d = *(const uint4 *)(room + at::DS + offset);
            for (int i = 0; i < 4; i++) {
                float2 a = unpack<T>(((uint32_t *)&s)[i]), b = unpack<T>(((uint32_t *)&d)[i]);
                sum += a.x * b.x + a.y * b.y;
            }
        }
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (thread % 4 == 0)
            ((float *)(room + at::STATES))[of_state] =
                exp2_of(G[by_channel ? (TOKENS - 1) * G_ROW + of_state : TOKENS - 1]) * sum;
    }

    /* Of the states, then of pairs of tokens. x, y and z are of q, of k as the later and as the earlier token. */
    int t = m + row, pairs = channel + pair;
    const float *last = G + (by_channel ? (TOKENS - 1) * G_ROW : TOKENS - 1);
    clear(x), clear(y), clear(z);
#pragma unroll
    for (int panel = 0; panel < 2; panel++) {
        uint32_t S = shared + at::S + panel * STATE_PANEL, dS = shared + at::DS + panel * STATE_PANEL;
        uint32_t own = (uint32_t)panel * ROWS_PANEL;
        multiply<T, TOKENS, CHANNELS, false, true, 2>(x, shared + at::DO + own, m, S, channel, 0, PANEL);
        multiply<T, TOKENS, CHANNELS, false, true, 2>(y, shared + at::DV + own, m, S, channel, 0, PANEL, 0x80008000);
        multiply<T, TOKENS, CHANNELS, false, true, 2>(z, shared + at::U + own, m, dS, channel, 0, PANEL);
    }
    if constexpr (by_channel) {
        meeting_point before(G, block, block - 1), within(G, block, block); // before the block, and half way in it
        if (block == 0) before.of_start = 0;
        if (block > 0) scale_columns(x, y, pairs, [&](int c) { return before[c]; });
        for (int earlier = 0; earlier < block; earlier++)
            pairs_of_blocks<T, true>(x, y, room, q_scale, k_scale, block, earlier, channel);
        if (!steep) {
            scale_columns(x, y, pairs, [&](int c) { return within[c] - before[c]; });
            pairs_of_blocks<T, true>(x, y, room, q_scale, k_scale, block, block, channel);
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) {
                int c = pairs + 8 * n + e % 2;
                float decay = exp2_of(G[(t + e / 2 * 8) * G_ROW + c] - (steep ? before[c] : within[c]));
                x[n][e] *= decay, y[n][e] *= decay;
            }
        {
            float sums[8];
#pragma unroll
            for (int n = 0; n < 4; n++)
                for (int e = 0; e < 2; e++) {
                    int c = pairs + 8 * n + e;
                    sums[2 * n + e] = 0;
                    for (int half = 0; half < 2; half++) {
                        float k = mt_to_float(*(const T *)(room + at::K + at_tile<TOKENS>(t + 8 * half, c)));
                        sums[2 * n + e] += z[n][e + 2 * half] * k * k_scale[t + 8 * half] *
                                           exp2_of(last[c] - G[(t + 8 * half) * G_ROW + c]);
                    }
                }
            exchange_rows(sums, lane); // the lane of row i has sum i
            ((float *)(room + at::RESTS))[block * CHANNELS + pairs + row / 2 * 8 + row % 2] = sums[0];
        }
        const float *reached = last; // z is times e^-(reached - G_i)
        for (int later = BLOCKS - 1; later > block; later--) {
            const float *next = G + (later * BLOCK - 1) * G_ROW;
            scale_columns(z, pairs, [&](int c) { return reached[c] - next[c]; });
            pairs_of_blocks<T, false>(z, x, room, q_scale, k_scale, later, block, channel);
            reached = next;
        }
        if (!steep) {
            scale_columns(z, pairs, [&](int c) { return reached[c] - within[c]; });
            pairs_of_blocks<T, false>(z, x, room, q_scale, k_scale, block, block, channel);
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) {
                int c = pairs + 8 * n + e % 2;
                z[n][e] *= exp2_of((steep ? reached[c] : within[c]) - G[(t + e / 2 * 8) * G_ROW + c]);
            }
    } else {
        float grown[2] = {exp2_of(G[t]), exp2_of(G[t + 8])},
              rest[2] = {exp2_of(*last - G[t]), exp2_of(*last - G[t + 8])};
        float of_later[2] = {}, of_rest[2] = {};
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) {
                uint32_t offset = at_tile<TOKENS>(t + e / 2 * 8, pairs + 8 * n + e % 2);
                float q = mt_to_float(*(const T *)(room + at::Q + offset)) * q_scale[t + e / 2 * 8];
                float k = mt_to_float(*(const T *)(room + at::K + offset)) * k_scale[t + e / 2 * 8];
                x[n][e] *= grown[e / 2], y[n][e] *= grown[e / 2], z[n][e] *= rest[e / 2];
                of_later[e / 2] += q * x[n][e] + k * y[n][e], of_rest[e / 2] += k * z[n][e];
            }
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int from = 1; from < 4; from *= 2) {
                of_later[half] += __shfl_xor_sync(0xffffffff, of_later[half], from);
                of_rest[half] += __shfl_xor_sync(0xffffffff, of_rest[half], from);
            }
            int at_token = warp / BLOCKS * TOKENS + t + 8 * half;
            if (lane % 4 == 0) ((float *)(room + at::LATER))[at_token] = of_later[half];
            if (lane % 4 == 0) ((float *)(room + at::REST))[at_token] = of_rest[half];
        }
        uint32_t q = shared + at::Q, k = shared + at::K;
        multiply<T, TOKENS, TOKENS, false, false, 2>(x, shared + at::DP, m, k, channel, 0, m + BLOCK);
        multiply<T, TOKENS, TOKENS, false, false, 2>(y, shared + at::DR, m, k, channel, 0, m + BLOCK);
        multiply<T, TOKENS, TOKENS, true, false, 2>(z, shared + at::DP_COLUMNS, m, q, channel, m, TOKENS);
        multiply<T, TOKENS, TOKENS, true, false, 2>(z, shared + at::DR_COLUMNS, m, k, channel, m, TOKENS);
#pragma unroll
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) z[n][e] += y[n][e];
    }
    __syncthreads(); // the matrices are no longer read
    float *of_q = (float *)(room + at::OF_Q), *rows = (float *)(room + at::ROWS),
          *columns = (float *)(room + at::COLUMNS);
    to_floats(of_q, x, t, pairs), to_floats(columns, z, t, pairs);
    if (by_channel) to_floats(rows, y, t, pairs);
    __syncthreads();

    if constexpr (by_channel) {
        /* Of g, which is in G of all later tokens. A thread has a channel of a block. */
        int column = thread % CHANNELS, first = thread / CHANNELS * BLOCK;
        if (steep) pairs_within<T>(room, q_scale, k_scale, first, column);
        float steps[BLOCK], dg[BLOCK], suffix = 0;
        load_steps<T>(steps, task, p, first, column);
#pragma unroll
        for (int i = BLOCK - 1; i >= 0; i--) {
            int token = first + i, place = token * G_ROW + column;
            float q = mt_to_float(*(const T *)(room + at::Q + at_tile<TOKENS>(token, column))) * q_scale[token];
            float k = mt_to_float(*(const T *)(room + at::K + at_tile<TOKENS>(token, column))) * k_scale[token];
            float late = rows[place], early = columns[place];
            dg[i] = suffix += q * of_q[place] + k * (late - early);
            columns[place] = late + early;
        }
        totals[first / BLOCK * CHANNELS + column] = suffix;
        __syncthreads();
        float ahead = ((const float *)(room + at::STATES))[column];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            ahead += ((const float *)(room + at::RESTS))[i * CHANNELS + column];
            ahead += i > first / BLOCK ? totals[i * CHANNELS + column] : 0;
        }
        float rate = expf(mt_to_float(task.A_log[p.head])), of_rate = 0, of_steps = 0;
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            int token = first + i;
            dg[i] = token < p.L ? dg[i] + ahead : 0;
            of_rate -= dg[i] * rate * softplus_fast(steps[i]);
            dg[i] *= -rate * sigmoid(steps[i]);
            of_steps += dg[i];
            if (token < p.L) task.da[(p.row + token) * task.da_stride + of_head + column] = mt_from_float<T>(dg[i]);
        }
        float *sums = (float *)(room + at::SUMS);
        of_rate = mt_warp_sum(of_rate);
        if (lane == 0) sums[warp] = of_rate;
        __syncthreads(); // totals were read
        totals[first / BLOCK * CHANNELS + column] = of_steps;
        __syncthreads();
        if (thread < CHANNELS) {
            float sum = 0;
            for (int i = 0; i < BLOCKS; i++) sum += totals[i * CHANNELS + thread];
            task.bias_sums[of_bias + thread] = sum;
        }
        if (thread == 0) {
            float sum = 0;
            for (int i = 0; i < GRADIENT_WARPS; i++) sum += sums[i];
            task.rate_sums[p.at] = sum;
        }
    }

    /* Through the lengths: with n = x / |x| and d its gradient, dx = (d - n (n . d)) / |x|. A warp per token. */
    bool alone = task.heads == 1;
#pragma unroll
    for (int n = 0; n < TOKENS / GRADIENT_WARPS; n++) {
        int token = warp + n * GRADIENT_WARPS;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            float factor = which ? 1 : task.q_scale;
            float scale = which ? k_scale[token] : q_scale[token] / task.q_scale; // 1 / |x|
            float4 d = *(const float4 *)((which ? columns : of_q) + token * G_ROW + 4 * lane);
            d.x *= factor, d.y *= factor, d.z *= factor, d.w *= factor;
            uint2 words = *(const uint2 *)(room + (which ? at::K : at::Q) + at_tile<TOKENS>(token, 4 * lane));
            float2 a = unpack<T>(words.x), b = unpack<T>(words.y);
            a.x *= scale, a.y *= scale, b.x *= scale, b.y *= scale;
            float dot = mt_warp_sum(a.x * d.x + a.y * d.y + b.x * d.z + b.y * d.w);
            words.x = mt_pair_from_float(T(), scale * (d.x - a.x * dot), scale * (d.y - a.y * dot));
            words.y = mt_pair_from_float(T(), scale * (d.z - b.x * dot), scale * (d.w - b.y * dot));
            T *to = which ? task.dk + (p.row + token) * task.dk_stride + of_key
                          : task.dq + (p.row + token) * task.dq_stride + of_key;
            if (!alone) to = (which ? task.dk_heads : task.dq_heads) + (p.at * TOKENS + token) * CHANNELS;
            if (token < p.L) mt_store_word((uint2 *)(to + 4 * lane), words);
        }
    }
    if constexpr (!by_channel) { // g of a token is in G of all later ones; a lane has two tokens
        if (warp > 0) return;
        const float *of_pairs = (const float *)(room + at::PAIRS), *of_later = (const float *)(room + at::LATER);
        float later[2] = {}, earlier[2] = {}, all = 0, of_rate = 0, of_steps = 0;
        for (int n = 0; n < BLOCKS; n++)
            for (int i = 0; i < 2; i++) {
                int token = n * TOKENS + 2 * lane + i;
                later[i] += of_later[token];
                earlier[i] += of_later[BLOCKS * TOKENS + token] + of_pairs[BLOCKS * TOKENS + token] - of_pairs[token];
            }
        for (int i = lane; i < CHANNELS; i += 32) all += ((const float *)(room + at::STATES))[i];
        all = mt_warp_sum(all);
        float suffix = later[0] + later[1], prefix = earlier[0] + earlier[1];
#pragma unroll
        for (int from = 1; from < 32; from *= 2) {
            float below = __shfl_down_sync(0xffffffff, suffix, from), above = __shfl_up_sync(0xffffffff, prefix, from);
            if (lane + from < 32) suffix += below;
            if (lane >= from) prefix += above;
        }
        prefix -= earlier[0] + earlier[1];
        float rate = expf(mt_to_float(task.A_log[p.head])), bias = mt_to_float(task.dt_bias[p.head]);
        for (int i = 0; i < 2; i++) {
            int token = 2 * lane + i;
            if (token >= p.L) continue;
            float step = mt_to_float(task.a[(p.row + token) * task.a_stride + p.head]) + bias;
            float dg = all + suffix - (i ? later[0] : 0) + prefix + (i ? earlier[0] : 0);
            float da = -dg * rate * sigmoid(step);
            of_rate -= dg * rate * softplus(step), of_steps += da;
            task.da[(p.row + token) * task.da_stride + p.head] = mt_from_float<T>(da);
        }
        of_rate = mt_warp_sum(of_rate), of_steps = mt_warp_sum(of_steps);
        if (lane == 0) task.rate_sums[p.at] = of_rate, task.bias_sums[of_bias] = of_steps;
    }
}

/* dq and dk of a key head, summed over its value heads. A block per chunk and key head. */
template <class T> __global__ void __launch_bounds__(THREADS) add_heads(const chunk_task<T> task) {
    mt_wait_for_previous();
    int64_t number = blockIdx.x / task.key_heads;
    int local = (int)(blockIdx.x % task.key_heads) * task.heads;
    chunk_place<T> p(task, number, local);
    for (int n = (int)threadIdx.x; n < p.L * CHANNELS / 8; n += THREADS) {
        int row = n / (CHANNELS / 8), column = n % (CHANNELS / 8) * 8;
        for (int which = 0; which < 2; which++) {
            mt_pack<float, 8> sum = {};
            for (int h = 0; h < task.heads; h++) {
                const T *from =
                    (which ? task.dk_heads : task.dq_heads) + ((p.at + h) * TOKENS + row) * CHANNELS + column;
                mt_pack<T, 8> part = mt_load<8>(from);
                for (int e = 0; e < 8; e++) sum.value[e] += mt_element(part, e);
            }
            T *to = which ? task.dk + (p.row + row) * task.dk_stride : task.dq + (p.row + row) * task.dq_stride;
            mt_store(to + (int64_t)p.key_head * CHANNELS + column, mt_from_float<T>(sum));
        }
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* The arrays of a launch over some chunks and key heads, one behind the other; memory NULL: only counts the bytes. */
template <class T> static int64_t place_arrays(chunk_task<T> *task, int64_t chunks, bool backward, char *memory) {
    int64_t used = 0, heads = chunks * task->key_heads * task->heads;
    auto take = [&](auto **array, int64_t bytes) {
        if (memory) *array = (std::remove_reference_t<decltype(*array)>)(memory + used);
        used += mt_divide_up(heads * bytes, 256) * 256;
    };
    take(&task->W, ROWS_TILE), take(&task->U, ROWS_TILE), take(&task->Q, ROWS_TILE), take(&task->K, ROWS_TILE);
    take(&task->before, 2 * STATE_PANEL), take(&task->decay, CHANNELS * 4);
    if (!backward) {
        take(&task->P, SQUARE_TILE);
        return used;
    }
    take(&task->A, SQUARE_TILE), take(&task->dU, ROWS_TILE), take(&task->dafter, 2 * STATE_PANEL);
    take(&task->rate_sums, 4), take(&task->bias_sums, CHANNELS * 4);
    task->dq_heads = task->W, task->dk_heads = task->K; // `gradients` no longer reads these
    return used;
}

template <class T>
static void launch(void (*kernel)(chunk_task<T>), dim3 grid, int threads, int bytes, const chunk_task<T> &task,
                   mt_stream *stream) {
    mt_cuda_take_shared(kernel, bytes);
    mt_launch_early(kernel, grid, dim3((unsigned)threads), bytes, mt_cuda_stream(stream), task);
}

/* Calls body(task, spans) for groups of spans and key heads whose arrays fit the workspace. */
template <class T, class Body>
static void by_groups(const mt_delta_args *a, chunk_task<T> task, int64_t begin, int64_t end, bool backward,
                      mt_stream *stream, Body body) {
    auto bytes_of = [&](int64_t from, int64_t to, int64_t key_heads) {
        int64_t chunks = mt_cuda_chunk_count(a->spans, from, to);
        task.key_heads = (int)key_heads;
        return mt_cuda_chunk_bytes(chunks, to - from) + place_arrays(&task, chunks, backward, NULL);
    };
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

template <class T, bool by_channel, bool backward>
static void run_prepare(const chunk_task<T> &task, mt_stream *stream) {
    launch(prepare<T, by_channel, backward>, dim3((unsigned)(task.chunks.count * task.key_heads * task.heads)), THREADS,
           prepare_room::BYTES, task, stream);
}

template <class T, bool of_map>
static void run_advance(chunk_task<T> task, int columns, int64_t spans, mt_stream *stream) {
    task.panels = columns / PANEL;
    launch(advance<T, of_map>, dim3((unsigned)(spans * task.panels), (unsigned)(task.key_heads * task.heads)),
           LINE_THREADS, advance_room::BYTES, task, stream);
}

template <class T, bool of_map> static void run_retreat(chunk_task<T> task, int64_t spans, mt_stream *stream) {
    task.panels = CHANNELS / PANEL;
    launch(retreat<T, of_map>, dim3((unsigned)(spans * task.panels), (unsigned)(task.key_heads * task.heads)),
           LINE_THREADS, retreat_room::BYTES, task, stream);
}

template <class T, bool by_channel> static void forward(const mt_delta_args *a, mt_stream *stream) {
    chunk_task<T> all = {};
    mt_take_delta_operands<T>(all, a);
    all.dout = NULL;
    by_groups(a, all, 0, a->spans->count, false, stream, [&](const chunk_task<T> &task, int64_t spans) {
        run_prepare<T, by_channel, false>(task, stream);
        run_advance<T, false>(task, CHANNELS, spans, stream);
        launch(outputs<T>, dim3((unsigned)(task.chunks.count * task.key_heads * task.heads)), THREADS,
               outputs_room::BYTES, task, stream);
    });
}

template <class T, bool by_channel> static void backward(const mt_delta_args *a, mt_stream *stream) {
    chunk_task<T> all = {};
    mt_take_delta_operands<T>(all, a);
    by_groups(a, all, 0, a->spans->count, true, stream, [&](const chunk_task<T> &task, int64_t spans) {
        int64_t chunks = task.chunks.count, heads = task.key_heads * task.heads;
        int64_t first = task.first_key_head * task.heads, decays = by_channel ? CHANNELS : 1;
        run_prepare<T, by_channel, true>(task, stream);
        run_advance<T, false>(task, CHANNELS, spans, stream);
        run_retreat<T, false>(task, spans, stream);
        launch(gradients<T, by_channel>, dim3((unsigned)(chunks * heads)), GRADIENT_THREADS, gradients_room::BYTES,
               task, stream);
        if (task.heads > 1) launch(add_heads<T>, dim3((unsigned)(chunks * task.key_heads)), THREADS, 0, task, stream);
        if (a->dA_log) mt_cuda_add_partials(a->dA_log + first, chunks, NULL, 0, task.rate_sums, heads, stream);
        if (a->ddt_bias)
            mt_cuda_add_partials(a->ddt_bias + first * decays, chunks, NULL, 0, task.bias_sums, heads * decays, stream);
    });
}

template <class T, bool by_channel>
static void make_maps(const mt_delta_args *a, bool of_gradients, mt_stream *stream) {
    int64_t width = a->Hv * CHANNELS * (of_gradients ? CHANNELS : 2 * CHANNELS);
    for (int64_t slot = 0; slot < a->states.slots; slot++) {
        int64_t s = (of_gradients ? a->states.first : a->states.last)[slot];
        if (s < 0) continue;
        chunk_task<T> all = {};
        mt_take_delta_operands<T>(all, a);
        all.maps = (of_gradients ? a->dmaps : a->maps) + slot * width, all.crosses = mt_slot_crosses(&a->states, slot);
        by_groups(a, all, s, s + 1, of_gradients, stream, [&](const chunk_task<T> &task, int64_t spans) {
            if (of_gradients) {
                run_prepare<T, by_channel, true>(task, stream);
                run_retreat<T, true>(task, spans, stream);
            } else {
                run_prepare<T, by_channel, false>(task, stream);
                run_advance<T, true>(task, 2 * CHANNELS, spans, stream);
            }
        });
    }
}

bool mt_cuda_delta_chunks_serve(const mt_delta_args *a, mt_dtype dtype, bool backward) {
    if (dtype == MT_F32 || mt_cuda_kernel_arch() < 80 || a->Dk != CHANNELS || a->Dv != CHANNELS) return false;
    if (mt_longest_span(a->spans) <= BLOCK) return false;
    if (!mt_wide(dtype, {a->q, a->k, a->v, a->out, a->dout}, {a->q_stride, a->k_stride, a->v_stride})) return false;
    int bytes = backward ? (int)gradients_room::BYTES : (int)prepare_room::BYTES;
    if (bytes > (int64_t)mt_cuda_device()->sharedMemPerBlockOptin) return false;
    return !backward || mt_wide(dtype, {a->dq, a->dk, a->dv}, {a->dq_stride, a->dk_stride, a->dv_stride});
}

#define DISPATCH(function, ...)                                                                                        \
    (dtype == MT_BF16                                                                                                  \
         ? a->decays > 1 ? function<__nv_bfloat16, true>(__VA_ARGS__) : function<__nv_bfloat16, false>(__VA_ARGS__)    \
     : a->decays > 1 ? function<__half, true>(__VA_ARGS__)                                                             \
                     : function<__half, false>(__VA_ARGS__))

void mt_cuda_delta_chunks_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    DISPATCH(forward, a, stream);
}

void mt_cuda_delta_chunks_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    DISPATCH(backward, a, stream);
}

void mt_cuda_delta_chunks_maps(const mt_delta_args *a, bool of_gradients, mt_dtype dtype, mt_stream *stream) {
    DISPATCH(make_maps, a, of_gradients, stream);
}
