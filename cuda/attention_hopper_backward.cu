/* attention_hopper_backward.cu: the backward of attention for sm_90a in one kernel of five products, for heads of 128
 * channels, after the backward of FlashAttention-3 (Shah et al.). attention_hopper.cu has the one in two kernels of
 * seven products, which serves other heads, and calls without a workspace.
 *
 * A block owns 128 keys of a head of keys, holds dk and dv of them in registers, and visits the queries that attend to
 * them, 64 at a time. Each of the two consumer warpgroups has 64 keys. It computes transposed scores and transposed dp;
 * the weights and the gradients of scores made from them are operands of the products for dv and dk without leaving the
 * registers. The product for dq sums over the keys of both warpgroups: they exchange gradients of scores in shared
 * memory, and each computes dq for half of the channels. dq of a tile of queries is the sum over the blocks of all its
 * keys, in fp32 in memory. The consumers leave their part in shared memory, in the order of their registers, and a
 * reducing warp has the TMA unit add it; so no consumer issues or waits for atomic additions. A last kernel rounds the
 * sums and undoes the order.
 *
 * The additions of TMA come in no fixed order. ORDERED gives those to a query tile the order of the keys: a counter per
 * tile says whose turn it is, and the first one stores instead of adding. Blocks take tiles in the order of their keys,
 * so that a block waits only for blocks that are running or have ended. Then the results repeat bit for bit. */
#include "attention_hopper.cuh"

#ifdef MT_HAVE_SM90A

enum { QUERIES = 64, KEYS = 64 * WORKERS, PANELS = 2, D = 64 * PANELS };
enum { Q_STAGES = 3, DOUT_STAGES = 2, REDUCERS = 3 };

/* Sums of dq and statistics of queries, by tiles of QUERIES queries of a span and heads: [tiles, H]. */
enum { HALF_ELEMENTS = QUERIES * 64, DQ_ELEMENTS = WORKERS * HALF_ELEMENTS, STAT_ELEMENTS = 2 * QUERIES };
struct query_sums {
    float *dq;    // [DQ_ELEMENTS]: per half of the channels, per block of 8 of them, the 4 elements of each thread
    float *stats; // [2, QUERIES]: lse times log2 e; row_dot
    int *turns;   // additions made
    int *taken;   // one number: tiles of keys that blocks have taken
};

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

/* A tile of keys, and the query tiles of the spans before its own. */
struct key_tile : tile {
    int query_tiles_before;
};

/* The number of query tiles of the spans before the one that key tile `number` is in; found as in tile_find. */
__device__ __forceinline__ int query_tiles_before(const flash_task<bf16> &task, int number) {
    const unsigned all = 0xffffffff;
    const int lane = threadIdx.x % 32;
    int key_tiles = 0, query_tiles = 0;
    for (int base = 0;; base += 32) {
        int keys = 0, queries = 0;
        if (base + lane < task.num_spans) {
            keys = ((int)task.spans[base + lane].k_len + KEYS - 1) / KEYS;
            queries = ((int)task.spans[base + lane].q_len + QUERIES - 1) / QUERIES;
        }
        int keys_end = keys, queries_end = queries;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int keys_below = __shfl_up_sync(all, keys_end, step);
            int queries_below = __shfl_up_sync(all, queries_end, step);
            if (lane >= step) keys_end += keys_below, queries_end += queries_below;
        }
        unsigned past = __ballot_sync(all, number < key_tiles + keys_end);
        if (past) return query_tiles + __shfl_sync(all, queries_end - queries, __ffs((int)past) - 1);
        key_tiles += __shfl_sync(all, keys_end, 31), query_tiles += __shfl_sync(all, queries_end, 31);
    }
}

/* The tile that is number `index` in the order in which blocks take tiles; head NO_MORE after the last. */
__device__ __forceinline__ key_tile take_tile(const flash_task<bf16> &task, int index) {
    key_tile t = {};
    t.head = NO_MORE;
    if (index >= task.num_tiles * (int)task.shape.num_groups) return t;
    (tile &)t = tile_of_block<true>(task, index, KEYS);
    t.query_tiles_before =
        query_tiles_before(task, index % (task.num_tiles * task.heads_together) / task.heads_together);
    return t;
}

/* The query tiles that visit a tile of keys, [first, end); they are visited once for each head of the group. */
__device__ __forceinline__ range visitors_of(const band &seen, int first_key) {
    const range queries = queries_of(seen, first_key, KEYS);
    const int first = queries.first / QUERIES;
    return {first, max(first, (queries.end + QUERIES - 1) / QUERIES)};
}

/* The tiles of keys that query tile `number` visits, [first, end): the inverse of visitors_of. */
__device__ __forceinline__ range visited_by(const band &seen, int number) {
    const int query = number * QUERIES, last = query + QUERIES - 1 + seen.ahead, oldest = query - seen.behind;
    const int tiles = (seen.k_len + KEYS - 1) / KEYS;
    const int first = oldest >= seen.k_len ? tiles : max(oldest, 0) / KEYS;
    return {first, last < 0 ? first : max(first, min(tiles, last / KEYS + 1))};
}

/* The steps of a tile of keys in their order. ORDERED: from the last queries to the first, all heads of the group for
 * each query tile. Under a causal mask all tiles of keys then begin with the same query tile, and blocks that run
 * together meet every query tile in the order of their keys: one waits for the other at its start only. Otherwise from
 * the first queries to the last, head by head, so that blocks meet different query tiles. */
template <bool ORDERED> struct visit {
    int first, end, first_head, end_head, number, head;

    __device__ __forceinline__ visit(const key_tile &t, const mt_attention &shape) {
        const range visitors = visitors_of(band_of(t.span, shape.window), t.first);
        const int heads = (int)(shape.num_heads / shape.num_groups);
        first = visitors.first, end = visitors.end, number = ORDERED ? end - 1 : first;
        head = first_head = t.head * heads, end_head = first_head + heads;
    }
    __device__ __forceinline__ int count() const {
        return (end - first) * (end_head - first_head);
    }
    __device__ __forceinline__ void advance() {
        if (ORDERED) {
            if (++head == end_head) head = first_head, number--;
        } else {
            if (++number == end) number = first, head++;
        }
    }
};

/* ---- before and after the kernel --------------------------------------------------------------------------------- */

enum { SIDE_THREADS = 256 }; // of a block for a query tile and head

/* Statistics of a query tile. A query without keys gets lse = inf, and so do rows past the end: weights of 0. */
template <bool ORDERED>
__global__ void __launch_bounds__(SIDE_THREADS) prepare_queries(const flash_task<bf16> task, const query_sums sums) {
    const int heads = (int)task.shape.num_heads, head = blockIdx.x % heads, thread = threadIdx.x;
    const tile t = tile_find<false>(task, blockIdx.x / heads, QUERIES);
    float *stats = sums.stats + (int64_t)blockIdx.x * STAT_ELEMENTS;
    const int left = (int)t.span.q_len - t.first, chunk = thread % 16 * 8;
#pragma unroll
    for (int row = thread / 16; row < QUERIES; row += SIDE_THREADS / 16) {
        const int64_t query = t.span.q_start + t.first + row;
        float dot = 0, lse = -INFINITY;
        if (row < left) {
            const int64_t at = query * task.shape.out_stride + head * D + chunk;
            const uint4 x = *(const uint4 *)(task.out + at), y = *(const uint4 *)(task.dout + at);
            const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dot += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16);
                dot += __uint_as_float(a[i] & 0xffff0000) * __uint_as_float(b[i] & 0xffff0000);
            }
            lse = task.lse[query * heads + head];
        }
#pragma unroll
        for (int step = 8; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffff, dot, step);
        if (chunk > 0) continue;
        stats[row] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
        stats[QUERIES + row] = dot;
    }
    if (ORDERED) {
        if (thread == 0) sums.turns[blockIdx.x] = 0;
    } else {
        float4 *dq = (float4 *)(sums.dq + (int64_t)blockIdx.x * DQ_ELEMENTS);
        for (int i = thread; i < DQ_ELEMENTS / 4; i += SIDE_THREADS) dq[i] = make_float4(0, 0, 0, 0);
    }
    if (blockIdx.x == 0 && thread == 0) *sums.taken = 0;
}

/* dq in bf16 from its sums. A warp holds 16 rows and 64 channels, as after a product. */
__global__ void __launch_bounds__(SIDE_THREADS) finish_queries(const flash_task<bf16> task, const query_sums sums) {
    const int heads = (int)task.shape.num_heads, head = blockIdx.x % heads;
    const int half = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP, warp_row = thread / 32 * 16;
    const tile t = tile_find<false>(task, blockIdx.x / heads, QUERIES);
    const range visited = visited_by(band_of(t.span, task.shape.window), t.first / QUERIES);
    const float4 *from = (const float4 *)(sums.dq + (int64_t)blockIdx.x * DQ_ELEMENTS + half * HALF_ELEMENTS);
    float dq[1][8][4];
    clear(dq); // nobody has written the sums of queries that see no key
    if (visited.first < visited.end) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 x = from[n * WARPGROUP + thread];
            dq[0][n][0] = x.x, dq[0][n][1] = x.y, dq[0][n][2] = x.z, dq[0][n][3] = x.w;
        }
    }
    scale_all(dq, task.shape.scale);
    const int64_t query = t.span.q_start + t.first + warp_row, stride = task.shape.q_stride;
    store_rows<64>(task.dq + query * stride + head * D + half * 64, stride, (int)t.span.q_len - t.first - warp_row, dq,
                   false);
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* State of a consumer's warp for tiles of queries that it has to mask or to clear; in shared memory, because the loop
 * has no registers for it. `row` is the position of the warp's keys in the span. */
struct __align__(16) mask_state {
    band seen;
    int row;
};

/* Shared memory: tiles of keys and values; stages of queries and of their dout; gradients of scores of two steps; dq of
 * one; statistics and barriers. */
struct layout {
    static constexpr int KEY_BYTES = KEYS * D * 2, QUERY_BYTES = QUERIES * D * 2, STAT_BYTES = QUERIES * 4;
    static constexpr int GRADIENT_BYTES = KEYS * QUERIES * 2, DQ_BYTES = DQ_ELEMENTS * 4;
    static constexpr int K = 0, V = K + KEY_BYTES, Q = V + KEY_BYTES, DOUT = Q + Q_STAGES * QUERY_BYTES;
    static constexpr int GRADIENTS = DOUT + DOUT_STAGES * QUERY_BYTES, DQ = GRADIENTS + 2 * GRADIENT_BYTES;
    static constexpr int LSE = DQ + DQ_BYTES, DOT = LSE + Q_STAGES * STAT_BYTES;
    static constexpr int KV_RING = DOT + DOUT_STAGES * STAT_BYTES, Q_RING = KV_RING + mt_ring<1>::BYTES;
    static constexpr int DOUT_RING = Q_RING + mt_ring<Q_STAGES>::BYTES;
    static constexpr int DQ_RING = DOUT_RING + mt_ring<DOUT_STAGES>::BYTES;
    static constexpr int MASKS = DQ_RING + mt_ring<REDUCERS>::BYTES;
    static constexpr int TILES = MASKS + 4 * WORKERS * (int)sizeof(mask_state);
    static constexpr int BYTES = TILES + queue_of<key_tile>::BYTES;

    uint32_t at; // the block's shared memory

    __device__ __forceinline__ uint32_t q_tile(int n) const {
        return at + Q + n % Q_STAGES * QUERY_BYTES;
    }
    __device__ __forceinline__ uint32_t dout_tile(int n) const {
        return at + DOUT + n % DOUT_STAGES * QUERY_BYTES;
    }
    __device__ __forceinline__ uint32_t gradients(int n) const {
        return at + GRADIENTS + n % 2 * GRADIENT_BYTES;
    }
    __device__ __forceinline__ mt_ring<1> kv_ring() const {
        return {at + KV_RING};
    }
    __device__ __forceinline__ mt_ring<Q_STAGES> q_ring() const {
        return {at + Q_RING};
    }
    __device__ __forceinline__ mt_ring<DOUT_STAGES> dout_ring() const {
        return {at + DOUT_RING};
    }
    /* dq has one buffer, but a stage of barriers for each reducer: a wait names only the parity of a phase, so a
     * reducer must not wait two phases ahead. The buffer is free for use n when use n - 1 is. */
    __device__ __forceinline__ mt_ring<REDUCERS> dq_ring() const {
        return {at + DQ_RING};
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* The producer, one warp, also finds the tiles. All blocks count tiles from the start on, so that no tile is taken
 * before one of a lower number. */
template <bool ORDERED>
__device__ __forceinline__ void load(const flash_task<bf16> &task, const tensor_maps &maps, const query_sums &sums,
                                     const layout &place, char *memory) {
    const queue_of<key_tile> queue(memory + layout::TILES);
    const int heads = (int)task.shape.num_heads;
    const bool leader = threadIdx.x % 32 == 0;
    int n = 0;
    for (int round = 0;; round++) {
        int index = 0;
        if (leader) index = atomicAdd(sums.taken, 1);
        index = __shfl_sync(0xffffffff, index, 0);
        const key_tile t = take_tile(task, index);
        queue.turns.wait_free(round);
        queue.put(round, t);
        if (t.head == NO_MORE) break;
        if (leader) {
            const uint32_t kv_filled = place.kv_ring().filled(round);
            place.kv_ring().wait_free(round);
            mt_barrier_arrive_expect(kv_filled, 2 * layout::KEY_BYTES);
            copy_tile(place.at + layout::K, maps.k, (int)t.span.k_start + t.first, t.head * PANELS, kv_filled);
            copy_tile(place.at + layout::V, maps.v, (int)t.span.k_start + t.first, t.head * PANELS, kv_filled);
            visit<ORDERED> v(t, task.shape);
            for (int left = v.count(); left > 0; left--, v.advance(), n++) {
                const int row = (int)t.span.q_start + v.number * QUERIES;
                const float *stats =
                    sums.stats + ((int64_t)(t.query_tiles_before + v.number) * heads + v.head) * STAT_ELEMENTS;
                const uint32_t q_filled = place.q_ring().filled(n), dout_filled = place.dout_ring().filled(n);
                place.q_ring().wait_free(n);
                mt_barrier_arrive_expect(q_filled, layout::QUERY_BYTES + layout::STAT_BYTES);
                copy_tile(place.q_tile(n), maps.q, row, v.head * PANELS, q_filled);
                mt_copy_bytes(place.at + layout::LSE + n % Q_STAGES * layout::STAT_BYTES, stats, layout::STAT_BYTES,
                              q_filled);
                place.dout_ring().wait_free(n);
                mt_barrier_arrive_expect(dout_filled, layout::QUERY_BYTES + layout::STAT_BYTES);
                copy_tile(place.dout_tile(n), maps.dout, row, v.head * PANELS, dout_filled);
                mt_copy_bytes(place.at + layout::DOT + n % DOUT_STAGES * layout::STAT_BYTES, stats + QUERIES,
                              layout::STAT_BYTES, dout_filled);
            }
        }
        __syncwarp();
    }
}

/* Waits until `turns` additions have been made and are visible. */
__device__ __forceinline__ void wait_for_turn(const int *turns, int turn) {
    int made;
    do asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(made) : "l"(turns) : "memory");
    while (made != turn);
    asm volatile("fence.acq_rel.gpu;\n"
                 "fence.proxy.async.global;" ::
                     : "memory");
}
__device__ __forceinline__ void pass_turn(int *turns, int turn) {
    asm volatile("fence.proxy.async.global;\n"
                 "st.release.gpu.global.b32 [%0], %1;" ::"l"(turns),
                 "r"(turn + 1)
                 : "memory");
}

/* Adds what the consumers leave in shared memory, dq of a tile of queries, to the sum in memory. REDUCERS warps do so
 * in turn, one thread each, because an ordered addition takes longer than a step until it is complete and announced. */
template <bool ORDERED>
__device__ __forceinline__ void reduce(const flash_task<bf16> &task, const query_sums &sums, const layout &place,
                                       char *memory, int reducer) {
    const queue_of<key_tile> queue(memory + layout::TILES);
    const int heads = (int)task.shape.num_heads;
    int n = 0;
    for (int round = 0;; round++) {
        const key_tile t = queue.get(round);
        mt_barrier_arrive(queue.turns.free(round));
        if (t.head == NO_MORE) break;
        visit<ORDERED> v(t, task.shape);
        for (int left = v.count(); left > 0; left--, v.advance(), n++) {
            if (n % REDUCERS != reducer) continue;
            const int64_t at = (int64_t)(t.query_tiles_before + v.number) * heads + v.head;
            const int turn =
                ORDERED ? t.first / KEYS - visited_by(band_of(t.span, task.shape.window), v.number).first : 1;
            if (ORDERED && turn > 0) wait_for_turn(sums.turns + at, turn);
            place.dq_ring().wait_filled(n);
            mt_fence_async(); // for the consumers, which it would delay
            mt_store_bytes(sums.dq + at * DQ_ELEMENTS, place.at + layout::DQ, layout::DQ_BYTES, turn > 0);
            mt_stores_commit();
            mt_stores_wait_read<0>();
            mt_barrier_arrive(place.dq_ring().free(n));
            if (!ORDERED) continue;
            mt_stores_wait();
            pass_turn(sums.turns + at, turn);
        }
    }
    mt_stores_wait();
}

/* State of a consumer warpgroup. Tiles of queries that begin in [plain_first, plain_end) are full and need no mask.
 * `pending` holds dp, and then dq until it is in shared memory. */
struct worker {
    char *memory;
    layout place;
    int group, plain_first, plain_end;
    float scale;
    float dk[1][D / 8][4], dv[1][D / 8][4], score[1][QUERIES / 8][4], pending[1][QUERIES / 8][4];
    uint32_t weights[1][QUERIES / 16][4], gradients[1][QUERIES / 16][4];

    __device__ __forceinline__ mask_state *masks() const {
        return (mask_state *)(memory + layout::MASKS) + (threadIdx.x / 32 - 4);
    }
    __device__ __forceinline__ bool is_plain(int query) const {
        return query >= plain_first && query < plain_end;
    }
    __device__ __forceinline__ void begin(const band &seen, int row) {
        plain_first = row + 15 - seen.ahead, plain_end = min(row - 62 + seen.behind, seen.q_len - 63);
        if (row + 16 > seen.k_len) plain_end = plain_first;
        if (threadIdx.x % 32 == 0) *masks() = {seen, row};
        __syncwarp();
    }
    /* Clears the rows past the end of the queries. */
    __device__ __forceinline__ void clear_queries(uint32_t tile, int query) {
        if (is_plain(query)) return;
        const int left = masks()->seen.q_len - query;
        if (left >= QUERIES) return;
        clear_tail<QUERIES, D>(tile, left);
        tail_cleared();
    }

    __device__ __forceinline__ void start_scores(int n, int query) {
        const uint32_t q_tile = place.q_tile(n);
        place.q_ring().wait_filled(n);
        clear_queries(q_tile, query);
        mt_wgmma_hold(score[0]);
        mt_wgmma_fence();
        multiply_rows<D, KEYS, QUERIES>(score, place.at + layout::K + group * 64 * 128, q_tile);
    }
    __device__ __forceinline__ void start_dp(int n, int query) {
        const uint32_t dout_tile = place.dout_tile(n);
        place.dout_ring().wait_filled(n);
        clear_queries(dout_tile, query);
        mt_wgmma_hold(pending[0]);
        mt_wgmma_fence();
        multiply_rows<D, KEYS, QUERIES>(pending, place.at + layout::V + group * 64 * 128, dout_tile);
    }

    /* Keys past the end have weight 0: their rows of K are 0, but dq sums over them. */
    __device__ __forceinline__ void mask(int query) {
        if (is_plain(query)) return;
        const mask_state m = *masks();
        hide<true>(score, m.seen, query, m.row);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    if (m.row + row_of(0, 2 * h) >= m.seen.k_len) score[0][n][e] = -INFINITY;
    }

    __device__ __forceinline__ void weigh_scores(int n) {
        const float2 *lse =
            (const float2 *)(memory + layout::LSE + n % Q_STAGES * layout::STAT_BYTES) + threadIdx.x % 4;
        const float factor = scale * LOG2_E;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; i++) {
            const float2 base = lse[4 * i];
            score[0][i][0] = mt_exp2(score[0][i][0] * factor - base.x);
            score[0][i][1] = mt_exp2(score[0][i][1] * factor - base.y);
            score[0][i][2] = mt_exp2(score[0][i][2] * factor - base.x);
            score[0][i][3] = mt_exp2(score[0][i][3] * factor - base.y);
        }
        pack_weights<bf16>(weights, score);
    }
    /* From the weights as pairs of bf16, so that the scores need no registers any more. */
    __device__ __forceinline__ void find_gradients(int n) {
        const float2 *dots =
            (const float2 *)(memory + layout::DOT + n % DOUT_STAGES * layout::STAT_BYTES) + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; i++) {
            const float2 dot = dots[4 * i];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t pair = weights[0][i / 2][i % 2 * 2 + h];
                const float first = __uint_as_float(pair << 16) * (pending[0][i][2 * h] - dot.x);
                const float second = __uint_as_float(pair & 0xffff0000) * (pending[0][i][2 * h + 1] - dot.y);
                gradients[0][i / 2][i % 2 * 2 + h] = mt_pack_bf16(first, second);
            }
        }
    }

    /* Gradients of scores go to a tile [KEYS, QUERIES] for both warpgroups. Each announces its half early and waits for
     * the other half late. A barrier is for announcements of one warpgroup and parity. A warpgroup that writes a tile
     * has seen the other's announcement of the step before, by which the other has read this tile two steps before. */
    __device__ __forceinline__ void announce_gradients(int n) {
        const uint32_t tile = place.gradients(n) + (threadIdx.x / 32 - 4) * 16 * 128, lane = mt_lane_down();
#pragma unroll
        for (int i = 0; i < QUERIES / 16; i++) mt_stmatrix(mt_tile_block<KEYS>(tile, lane, 0, 16 * i), gradients[0][i]);
        mt_fence_async();
        mt_named_barrier_arrive(4 + group * 2 + n % 2, WORKERS * WARPGROUP);
    }
    __device__ __forceinline__ void await_gradients(int n) {
        mt_named_barrier_wait(4 + (group ^ 1) * 2 + n % 2, WORKERS * WARPGROUP);
    }
    /* Starts pending[64 queries, 64 channels] = gradients^T K. */
    __device__ __forceinline__ void start_dq(int n) {
        const uint64_t a = mt_wgmma_operand(place.gradients(n), 0);
        const uint64_t b = mt_wgmma_operand(place.at + layout::K + group * KEYS * 128, 0);
        mt_wgmma_hold(pending[0]);
        mt_wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS; k += 16)
            mt_wgmma<true, true>(pending[0], mt_wgmma_moved(a, k * 128), mt_wgmma_moved(b, k * 128), k > 0);
        mt_wgmma_commit();
    }
    __device__ __forceinline__ void pass_dq(int n) {
        const uint32_t to = place.at + layout::DQ + group * HALF_ELEMENTS * 4 + threadIdx.x % WARPGROUP * 16;
        place.dq_ring().wait_free(n + REDUCERS - 1);
#pragma unroll
        for (int i = 0; i < QUERIES / 8; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * WARPGROUP * 16),
                         "f"(pending[0][i][0]), "f"(pending[0][i][1]), "f"(pending[0][i][2]), "f"(pending[0][i][3])
                         : "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) mt_barrier_arrive(place.dq_ring().filled(n));
    }

    __device__ __forceinline__ void start_dv(int n) {
        mt_wgmma_hold(dv[0]);
        mt_wgmma_fence();
        multiply_weights<D, QUERIES>(dv, weights, place.dout_tile(n));
    }
    __device__ __forceinline__ void start_dk(int n) {
        mt_wgmma_hold(dk[0]);
        mt_wgmma_fence();
        multiply_weights<D, QUERIES>(dk, gradients, place.q_tile(n));
    }

    /* Step n, which visits the queries at `query`; its scores are in registers. Ends step n - 1 unless FIRST: its
     * gradients of scores are in registers and announced. Computes the scores of step n + 1 at `next` unless LAST.
     *
     * dk runs during the exponentials, and the scores of the next step while dq is written to shared memory. No product
     * is running on return. The order is one for which the compiler finds registers: an operand in registers keeps them
     * until a wait for all products, and dp takes those of dq. Where dv or dk started earlier or ended later, or a
     * score were read in another iteration than its product is waited for, it would serialise all products (C7512,
     * C7514). */
    template <bool FIRST, bool LAST> __device__ __forceinline__ void step(int n, int query, int next) {
        if (!FIRST) start_dk(n - 1);
        mask(query);
        weigh_scores(n);
        if (!FIRST) {
            await_gradients(n - 1);
            start_dq(n - 1);
            mt_wgmma_wait<0>(); // for dk and dq
            mt_wgmma_hold(dk[0]);
            mt_wgmma_hold(pending[0]);
            place.q_ring().release(n - 1);
        }
        if (!LAST) start_scores(n + 1, next);
        if (!FIRST) pass_dq(n - 1);
        start_dp(n, query);
        start_dv(n);
        mt_wgmma_wait<0>();
        mt_wgmma_hold(dv[0]);
        mt_wgmma_hold(pending[0]);
        if (!LAST) mt_wgmma_hold(score[0]);
        find_gradients(n);
        place.dout_ring().release(n);
        announce_gradients(n);
    }

    /* All steps of a tile of keys, from number n on; returns the next number. */
    template <bool ORDERED> __device__ __forceinline__ int walk(int n, visit<ORDERED> v) {
        const int count = v.count();
        int query = v.number * QUERIES;
        if (count == 0) return n;
        start_scores(n, query);
        mt_wgmma_wait<0>();
        mt_wgmma_hold(score[0]);
        if (count == 1) {
            step<true, true>(n, query, query);
        } else {
            v.advance();
            step<true, false>(n, query, v.number * QUERIES);
            for (int left = count - 2; left > 0; left--) {
                asm volatile("" : "+r"(place.at)); // addresses need not stay in registers
                query = v.number * QUERIES, n++;
                v.advance();
                step<false, false>(n, query, v.number * QUERIES);
            }
            n++;
            step<false, true>(n, v.number * QUERIES, 0);
        }
        start_dk(n);
        await_gradients(n);
        start_dq(n);
        mt_wgmma_wait<0>();
        mt_wgmma_hold(dk[0]);
        mt_wgmma_hold(pending[0]);
        place.q_ring().release(n);
        pass_dq(n);
        return n + 1;
    }
};

template <bool ORDERED>
__device__ __forceinline__ void work(const flash_task<bf16> &task, const layout &place, char *memory) {
    const queue_of<key_tile> queue(memory + layout::TILES);
    const mt_attention &shape = task.shape;
    const int warp_row = (threadIdx.x / 32 - 4) * 16;
    worker w;
    w.memory = memory, w.place = place, w.scale = shape.scale, w.group = threadIdx.x / WARPGROUP - 1;
    int n = 0;
    for (int round = 0;; round++) {
        const key_tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        queue.turns.release(round);
        const band seen = band_of(t.span, shape.window);
        w.begin(seen, t.first + warp_row);
        clear(w.dk);
        clear(w.dv);
        place.kv_ring().wait_filled(round);
        if (t.first + KEYS > seen.k_len) clear_tails<KEYS, D, D>(place.at, seen.k_len - t.first);
        n = w.walk(n, visit<ORDERED>(t, shape));
        place.kv_ring().release(round);
        const int64_t key = t.span.k_start + t.first + warp_row;
        const int rows = (int)t.span.k_len - t.first - warp_row;
        scale_all(w.dk, shape.scale);
        store_rows<D>(task.dk + key * shape.k_stride + t.head * D, shape.k_stride, rows, w.dk, task.accumulate);
        store_rows<D>(task.dv + key * shape.v_stride + t.head * D, shape.v_stride, rows, w.dv, task.accumulate);
    }
}
#endif

template <bool ORDERED>
__global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const flash_task<bf16> task, const query_sums sums, const __grid_constant__ tensor_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    const layout place = {mt_shared_address(memory)};
    const queue_of<key_tile> queue(memory + layout::TILES);
    if (threadIdx.x == 0) {
        place.kv_ring().init(1, 4 * WORKERS);
        place.q_ring().init(1, 4 * WORKERS);
        place.dout_ring().init(1, 4 * WORKERS);
        place.dq_ring().init(4 * WORKERS, 1);
        queue.init(4 * WORKERS + REDUCERS);
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<24>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) load<ORDERED>(task, maps, sums, place, memory);
        if (warp > 0 && threadIdx.x % 32 == 0) reduce<ORDERED>(task, sums, place, memory, warp - 1);
    } else {
        mt_registers_grow<240>();
        work<ORDERED>(task, place, memory);
    }
#endif
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static int64_t align256(int64_t bytes) {
    return mt_divide_up(bytes, 256) * 256;
}

/* The sums in the stream's workspace, or false where they do not fit. */
static bool sums_of(query_sums *sums, const mt_attention *a, mt_stream *stream) {
    const int64_t tiles = tile_count(&a->spans, false, QUERIES) * a->num_heads;
    const int64_t dq = align256(tiles * DQ_ELEMENTS * 4), stats = align256(tiles * STAT_ELEMENTS * 4);
    const int64_t turns = align256(tiles * 4), bytes = dq + stats + turns + 256;
    if (!stream || stream->workspace_bytes < bytes) return false;
    char *at = (char *)mt_cuda_workspace(stream, bytes);
    sums->dq = (float *)at, sums->stats = (float *)(at + dq), sums->turns = (int *)(at + dq + stats);
    sums->taken = (int *)(at + dq + stats + turns);
    return true;
}

template <bool ORDERED> static void launch(const flash_task<bf16> &given, const mt_attention *a, mt_stream *stream) {
    flash_task<bf16> task = given;
    query_sums sums;
    const int processors = mt_cuda_device()->multiProcessorCount;
    const int64_t query_tiles = tile_count(&a->spans, false, QUERIES) * a->num_heads;
    MT_CHECK(sums_of(&sums, a, stream));
    task.num_tiles = tile_count(&a->spans, true, KEYS);
    task.heads_together = heads_in_section(a, a->num_groups, 1);
    if (query_tiles > 0)
        prepare_queries<ORDERED><<<(unsigned)query_tiles, SIDE_THREADS, 0, stream->stream>>>(task, sums);
    else
        MT_CUDA(cudaMemsetAsync(sums.taken, 0, sizeof *sums.taken, stream->stream));
    const int64_t key_tiles = task.num_tiles * a->num_groups;
    if (key_tiles > 0) {
        const int64_t blocks = key_tiles < processors ? key_tiles : processors;
        auto kernel = hopper_backward<ORDERED>;
        mt_cuda_take_shared(kernel, layout::BYTES);
        kernel<<<(unsigned)blocks, THREADS, layout::BYTES, stream->stream>>>(task, sums, maps_of(a, QUERIES, KEYS));
    }
    if (query_tiles > 0) finish_queries<<<(unsigned)query_tiles, SIDE_THREADS, 0, stream->stream>>>(task, sums);
    MT_CUDA_LAUNCHED();
}

bool mt_attention_hopper_one_kernel(const mt_attention *a, mt_stream *stream, bool ordered) {
    query_sums sums;
    if (a->head_size != D || a->value_size != D || !sums_of(&sums, a, stream)) return false;
    over_disjoint_keys<bf16>(a, stream, ordered ? launch<true> : launch<false>);
    return true;
}
#endif
