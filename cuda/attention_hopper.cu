/* attention_hopper.cu: the third rung of attention: FlashAttention on the tensor cores of sm_90a (Shah et al.,
 * "FlashAttention-3").
 *
 * mma.sync requires a warp to load its operands into registers and to wait for every product; it reaches two thirds of
 * the tensor cores' rate. wgmma reads operands from shared memory, for 64 rows at once, asynchronously. Therefore the
 * kernels are warp-specialised. In a block one warp schedules tiles, one producer warp only issues TMA loads, and two
 * consumer warpgroups of 128 threads, each with 64 rows, only compute; they get most of the registers. They synchronise
 * through barriers in shared memory, a pair "filled" and "free" per buffer (mt_ring). As in the mma rung, weights stay
 * in registers: wgmma leaves its result in the layout that the next product's operand a needs.
 *
 * Scores take two products and an exponential each: for D 128, 128 by 128 scores take 2048 clocks of the tensor cores
 * and 1024 of the special-function units, so both must run at the same time. A warpgroup starts the scores of a tile
 * together with the outputs of the preceding tile, and computes the softmax of one during the product of the other. The
 * warpgroups of a block also alternate.
 *
 * The backward is one kernel for heads of 128 channels: attention_hopper_backward.cu. For others it is two kernels as
 * in the mma rung, without atomics, so that runs repeat bit for bit: one owns queries, the other keys. Both keep
 * weights and their gradients in registers, because the second uses transposed scores. This takes seven products
 * instead of five: tensor cores at 630 TFLOP/s, near the rate of a large GEMM, deliver 450 that count. */
#include "attention_hopper.cuh"

#ifdef MT_HAVE_SM90A

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* A lane holds DV / 2 outputs, 64 scores and 32 weights as pairs. */
template <int D, int DV> struct forward_size {
    static constexpr int QUERIES = 64 * WORKERS, KEYS = 128, STAGES = 2;
    static constexpr int K_TILE = KEYS * D * 2, V_TILE = KEYS * DV * 2, K = QUERIES * D * 2, V = K + STAGES * K_TILE;
    static constexpr int Q_RING = V + STAGES * V_TILE, K_RING = Q_RING + mt_ring<1>::BYTES;
    static constexpr int V_RING = K_RING + mt_ring<STAGES>::BYTES, TILES = V_RING + mt_ring<STAGES>::BYTES;
    static constexpr int BYTES = TILES + tile_queue::BYTES;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int D, int DV>
__device__ __forceinline__ void forward_load(const flash_task<bf16> &task, const tensor_maps &maps, char *memory) {
    using size = forward_size<D, DV>;
    constexpr int KEYS = size::KEYS, PANELS = D / 64, V_PANELS = DV / 64;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<1> q_ring{at + size::Q_RING};
    const mt_ring<size::STAGES> k_ring{at + size::K_RING}, v_ring{at + size::V_RING};
    const tile_queue queue(memory + size::TILES);
    int n = 0;
    for (int round = 0;; round++) {
        const tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        const int group = t.head / (int)(task.shape.num_heads / task.shape.num_groups);
        const range keys = keys_of(band_of(t.span, task.shape.window), t.first, size::QUERIES);
        q_ring.wait_free(round);
        mt_barrier_arrive_expect(q_ring.filled(round), size::K);
        copy_tile(at, maps.q, (int)t.span.q_start + t.first, t.head * PANELS, q_ring.filled(round));
        for (int key = keys.first / KEYS * KEYS; key < keys.end; key += KEYS, n++) {
            const int row = (int)mt_key_row(task.shape.pages, t.span.k_start + key), stage = n % size::STAGES;
            k_ring.wait_free(n);
            mt_barrier_arrive_expect(k_ring.filled(n), size::K_TILE);
            copy_tile(at + size::K + stage * size::K_TILE, maps.k, row, group * PANELS, k_ring.filled(n));
            v_ring.wait_free(n);
            mt_barrier_arrive_expect(v_ring.filled(n), size::V_TILE);
            copy_tile(at + size::V + stage * size::V_TILE, maps.v, row, group * V_PANELS, v_ring.filled(n));
        }
        mt_barrier_arrive(queue.turns.free(round));
    }
}

/* State of a consumer warpgroup of the forward; `row` is the position of its warp's rows in the span. SELECTS: of
 * sparse attention, which multiplies all and hides pairs. */
template <int D, int DV, bool SELECTS> struct forward_worker {
    using size = forward_size<D, DV>;
    static constexpr int KEYS = size::KEYS, STAGES = size::STAGES;
    static constexpr bool TURNS = D > 64; // with fewer channels products are shorter than a softmax
    uint32_t at, q_tile;
    int group, row;
    float scale;
    band seen;
    float out[1][DV / 8][4], score[1][KEYS / 8][4], shrink[1][2];
    uint32_t weights[1][KEYS / 16][4];
    softmax<1> state;
    int64_t span_query; // row of the span's first query
    const mt_selection *selection;

    __device__ __forceinline__ mt_ring<1> q_ring() const {
        return {at + size::Q_RING};
    }
    __device__ __forceinline__ mt_ring<STAGES> k_ring() const {
        return {at + size::K_RING};
    }
    __device__ __forceinline__ mt_ring<STAGES> v_ring() const {
        return {at + size::V_RING};
    }

    __device__ __forceinline__ void start_scores(int n) {
        k_ring().wait_filled(n);
        mt_wgmma_hold(score[0]);
        mt_wgmma_fence();
        multiply_rows<D, size::QUERIES, KEYS>(score, q_tile, at + size::K + n % STAGES * size::K_TILE);
    }
    __device__ __forceinline__ void start_outputs(int n) {
        v_ring().wait_filled(n);
        mt_wgmma_hold(out[0]);
        mt_wgmma_fence();
        multiply_weights<DV, KEYS>(out, weights, at + size::V + n % STAGES * size::V_TILE);
    }
    template <int PENDING> __device__ __forceinline__ void weigh_scores(int n, int key) {
        selected_columns<KEYS> selected;
        if constexpr (SELECTS) select_keys_of_rows(selected, *selection, span_query + row, seen.q_len - row, key);
        mt_wgmma_wait<PENDING>();
        mt_wgmma_hold(score[0]);
        k_ring().release(n);
        if (!all_see(seen, row, 16, key, KEYS)) hide<false>(score, seen, row, key);
        if constexpr (SELECTS) hide_others(score, selected);
        softmax_step(state, score, shrink, scale);
    }
    __device__ __forceinline__ void finish_outputs(int n) {
        mt_wgmma_wait<0>();
        mt_wgmma_hold(out[0]);
        v_ring().release(n);
    }

    /* Processes a non-empty range of keys, whose tiles are ring uses n, n + 1, ... Returns the next use number. */
    __device__ __forceinline__ int walk(const range &keys, int n, int round) {
        int key = keys.first / KEYS * KEYS;
        start_scores(n);
        weigh_scores<0>(n, key);
        pack_weights<bf16>(weights, score);
        for (key += KEYS; key < keys.end; key += KEYS) {
            n++;
            if (TURNS) turn_take(group);
            start_scores(n);
            start_outputs(n - 1);
            if (TURNS) turn_pass(group);
            weigh_scores<1>(n, key);
            finish_outputs(n - 1);
            scale_rows(out, shrink);
            pack_weights<bf16>(weights, score);
        }
        q_ring().release(round);
        if (key > seen.k_len) {
            v_ring().wait_filled(n);
            clear_tail<KEYS, DV>(at + size::V + n % STAGES * size::V_TILE, seen.k_len - (key - KEYS));
            tail_cleared();
        }
        start_outputs(n);
        finish_outputs(n);
        return n + 1;
    }
};

template <int D, int DV, bool SELECTS>
__device__ __forceinline__ void forward_work(const flash_task<bf16> &task, char *memory) {
    using size = forward_size<D, DV>;
    const tile_queue queue(memory + size::TILES);
    const mt_attention &shape = task.shape;
    const int warp_row = (threadIdx.x / 32 - 4) * 16, heads = (int)shape.num_heads;
    forward_worker<D, DV, SELECTS> worker;
    worker.at = mt_shared_address(memory), worker.group = threadIdx.x / WARPGROUP - 1;
    worker.q_tile = worker.at + worker.group * 64 * 128;
    worker.scale = shape.scale * LOG2_E, worker.selection = &task.selection;
    int n = 0;
    if (worker.TURNS) turns_begin(worker.group);
    for (int round = 0;; round++) {
        const tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        queue.turns.release(round);
        worker.seen = band_of(t.span, shape.window), worker.row = t.first + warp_row;
        worker.span_query = t.span.q_start;
        const range keys = keys_of(worker.seen, t.first, size::QUERIES);
        clear(worker.out);
        softmax_begin(worker.state);
        worker.q_ring().wait_filled(round);
        if (keys.first < keys.end)
            n = worker.walk(keys, n, round);
        else
            worker.q_ring().release(round);
        const int64_t query = t.span.q_start + worker.row;
        const int rows = worker.seen.q_len - worker.row;
        softmax_finish(worker.state, worker.out, task.lse + query * heads + t.head, heads, rows, shape.scale);
        store_rows<DV>(task.out + query * shape.out_stride + t.head * DV, shape.out_stride, rows, worker.out, false);
    }
}
#endif

template <int D, int DV, bool SELECTS>
__global__ void __launch_bounds__(THREADS, 1)
    hopper_forward(const flash_task<bf16> task, const __grid_constant__ tensor_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = forward_size<D, DV>;
    extern __shared__ __align__(1024) char memory[];
    if (threadIdx.x == 0) {
        const uint32_t at = mt_shared_address(memory);
        mt_ring<1>{at + size::Q_RING}.init(1, 4 * WORKERS);
        mt_ring<size::STAGES>{at + size::K_RING}.init(1, 4 * WORKERS);
        mt_ring<size::STAGES>{at + size::V_RING}.init(1, 4 * WORKERS);
        tile_queue(memory + size::TILES).init();
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<40>();
        if (threadIdx.x == 0) forward_load<D, DV>(task, maps, memory);
        if (threadIdx.x / 32 == 1)
            hand_out_tiles<false>(task, tile_queue(memory + size::TILES), task.shape.num_heads, size::QUERIES);
    } else {
        mt_registers_grow<232>();
        forward_work<D, DV, SELECTS>(task, memory);
    }
#endif
}

/* ---- backward: dq ------------------------------------------------------------------------------------------------ */

/* A lane holds D / 2 of dq, KEYS / 2 scores, as many dp, and half as many pairs. */
template <int D, int DV> struct backward_q_size {
    static constexpr int QUERIES = 64 * WORKERS, KEYS = D > 64 ? 64 : 128, STAGES = D > 64 ? 3 : 2;
    static constexpr int DOUT = QUERIES * D * 2, KV = DOUT + QUERIES * DV * 2;
    static constexpr int K_TILE = KEYS * D * 2, STAGE = K_TILE + KEYS * DV * 2; // keys and their values
    static constexpr int Q_RING = KV + STAGES * STAGE, KV_RING = Q_RING + mt_ring<1>::BYTES;
    static constexpr int TILES = KV_RING + mt_ring<STAGES>::BYTES, BYTES = TILES + tile_queue::BYTES;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int D, int DV>
__device__ __forceinline__ void backward_q_load(const flash_task<bf16> &task, const tensor_maps &maps, char *memory) {
    using size = backward_q_size<D, DV>;
    constexpr int KEYS = size::KEYS, PANELS = D / 64, V_PANELS = DV / 64;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<1> q_ring{at + size::Q_RING};
    const mt_ring<size::STAGES> kv_ring{at + size::KV_RING};
    const tile_queue queue(memory + size::TILES);
    int n = 0;
    for (int round = 0;; round++) {
        const tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        const int group = t.head / (int)(task.shape.num_heads / task.shape.num_groups);
        const range keys = keys_of(band_of(t.span, task.shape.window), t.first, size::QUERIES);
        const int query = (int)t.span.q_start + t.first;
        q_ring.wait_free(round);
        mt_barrier_arrive_expect(q_ring.filled(round), size::KV);
        copy_tile(at, maps.q, query, t.head * PANELS, q_ring.filled(round));
        copy_tile(at + size::DOUT, maps.dout, query, t.head * V_PANELS, q_ring.filled(round));
        for (int key = keys.first / KEYS * KEYS; key < keys.end; key += KEYS, n++) {
            const int row = (int)t.span.k_start + key;
            const uint32_t to = at + size::KV + n % size::STAGES * size::STAGE;
            kv_ring.wait_free(n);
            mt_barrier_arrive_expect(kv_ring.filled(n), size::STAGE);
            copy_tile(to, maps.k, row, group * PANELS, kv_ring.filled(n));
            copy_tile(to + size::K_TILE, maps.v, row, group * V_PANELS, kv_ring.filled(n));
        }
        mt_barrier_arrive(queue.turns.free(round));
    }
}

template <int D, int DV, bool SELECTS>
__device__ __forceinline__ void backward_q_work(const flash_task<bf16> &task, char *memory) {
    using size = backward_q_size<D, DV>;
    constexpr int KEYS = size::KEYS, QUERIES = size::QUERIES;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<1> q_ring{at + size::Q_RING};
    const mt_ring<size::STAGES> kv_ring{at + size::KV_RING};
    const tile_queue queue(memory + size::TILES);
    const mt_attention &shape = task.shape;
    const int group = threadIdx.x / WARPGROUP - 1, warp_row = (threadIdx.x / 32 - 4) * 16;
    const uint32_t q_tile = at + group * 64 * 128, dout_tile = q_tile + size::DOUT;
    float dq[1][D / 8][4], score[1][KEYS / 8][4], dp[1][KEYS / 8][4];
    uint32_t weights[1][KEYS / 16][4];
    row_stats<1> stats;
    int n = 0;
    turns_begin(group);
    for (int round = 0;; round++) {
        const tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        queue.turns.release(round);
        const band seen = band_of(t.span, shape.window);
        const range keys = keys_of(seen, t.first, QUERIES);
        const int64_t query = t.span.q_start + t.first + warp_row, stat = query * shape.num_heads + t.head;
        const int rows = seen.q_len - t.first - warp_row, first = n;
        load_row_stats(stats, task.lse + stat, task.row_dot + stat, shape.num_heads, rows);
        clear(dq);
        q_ring.wait_filled(round);
        for (int key = keys.first / KEYS * KEYS; key < keys.end; key += KEYS, n++) {
            const uint32_t k_tile = at + size::KV + n % size::STAGES * size::STAGE, v_tile = k_tile + size::K_TILE;
            kv_ring.wait_filled(n);
            if (key + KEYS > seen.k_len) clear_tails<KEYS, D, DV>(k_tile, seen.k_len - key);
            mt_wgmma_hold(score[0]);
            mt_wgmma_hold(dp[0]);
            turn_take(group);
            mt_wgmma_fence();
            multiply_rows<D, QUERIES, KEYS>(score, q_tile, k_tile);
            multiply_rows<DV, QUERIES, KEYS>(dp, dout_tile, v_tile);
            turn_pass(group);
            selected_columns<KEYS> selected;
            if constexpr (SELECTS) select_keys_of_rows(selected, task.selection, query, rows, key);
            mt_wgmma_wait<1>(); // waits for the scores and for dq of the preceding tile
            mt_wgmma_hold(score[0]);
            if (n > first) kv_ring.release(n - 1);
            if (!all_see(seen, t.first + warp_row, 16, key, KEYS)) hide<false>(score, seen, t.first + warp_row, key);
            if constexpr (SELECTS) hide_others(score, selected);
            weights_by_row(score, stats, shape.scale * LOG2_E);
            mt_wgmma_wait<0>();
            mt_wgmma_hold(dp[0]);
            gradients_by_row(score, dp, stats);
            pack_weights<bf16>(weights, score);
            mt_wgmma_hold(dq[0]);
            mt_wgmma_fence();
            multiply_weights<D, KEYS>(dq, weights, k_tile);
        }
        q_ring.release(round);
        mt_wgmma_wait<0>();
        mt_wgmma_hold(dq[0]);
        if (n > first) kv_ring.release(n - 1);
        scale_all(dq, shape.scale);
        store_rows<D>(task.dq + query * shape.q_stride + t.head * D, shape.q_stride, rows, dq, false);
    }
}
#endif

template <int D, int DV, bool SELECTS>
__global__ void __launch_bounds__(THREADS, 1)
    hopper_backward_q(const flash_task<bf16> task, const __grid_constant__ tensor_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = backward_q_size<D, DV>;
    extern __shared__ __align__(1024) char memory[];
    const tile_queue queue(memory + size::TILES);
    if (threadIdx.x == 0) {
        const uint32_t at = mt_shared_address(memory);
        mt_ring<1>{at + size::Q_RING}.init(1, 4 * WORKERS);
        mt_ring<size::STAGES>{at + size::KV_RING}.init(1, 4 * WORKERS);
        queue.init();
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<40>();
        if (threadIdx.x == 0) backward_q_load<D, DV>(task, maps, memory);
        if (threadIdx.x / 32 == 1) hand_out_tiles<false>(task, queue, task.shape.num_heads, size::QUERIES);
    } else {
        mt_registers_grow<232>();
        backward_q_work<D, DV, SELECTS>(task, memory);
    }
#endif
}

/* ---- backward: dk and dv ----------------------------------------------------------------------------------------- */

/* A lane holds D / 2 of dk, DV / 2 of dv, 32 transposed scores, as many dp, and 16 pairs. A stage is a tile of queries,
 * their dout, lse and row_dot; the heads of the group follow one another.
 *
 * For D 192 there are not enough registers: dp reuses the registers of the scores, whose weights are kept as pairs, and
 * the pairs of the gradients reuse those of dp. Therefore dk's product must end with the step. */
template <int D, int DV> struct backward_kv_size {
    static constexpr bool REUSE = D == 192;
    static constexpr int LOADER_REGISTERS = REUSE ? 24 : 40, WORKER_REGISTERS = REUSE ? 240 : 232;
    static constexpr int KEYS = 64 * WORKERS, QUERIES = 64, STAGES = D > 128 ? 3 : 4;
    static constexpr int Q_TILE = QUERIES * D * 2, STAGE = Q_TILE + QUERIES * DV * 2;
    static constexpr int V = KEYS * D * 2, Q = V + KEYS * DV * 2, STATS = Q + STAGES * STAGE;
    static constexpr int KV_RING = STATS + STAGES * 2 * QUERIES * 4, Q_RING = KV_RING + mt_ring<1>::BYTES;
    static constexpr int TILES = Q_RING + mt_ring<STAGES>::BYTES, BYTES = TILES + tile_queue::BYTES;
};

/* The queries that attend to a tile of keys, of all heads of the group: `tiles` tiles per head, beginning at
 * `first`. */
struct query_steps {
    int first, tiles, count;
};
template <class Size>
__device__ __forceinline__ query_steps steps_of(const flash_task<bf16> &task, const tile &t, const band &seen) {
    constexpr int QUERIES = Size::QUERIES;
    const range queries = queries_of(seen, t.first, Size::KEYS);
    int first = queries.first / QUERIES * QUERIES, tiles = max(0, queries.end - first + QUERIES - 1) / QUERIES;
    return {first, tiles, tiles * (int)(task.shape.num_heads / task.shape.num_groups)};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int D, int DV>
__device__ __forceinline__ void backward_kv_load(const flash_task<bf16> &task, const tensor_maps &maps, char *memory) {
    using size = backward_kv_size<D, DV>;
    constexpr int QUERIES = size::QUERIES, PANELS = D / 64, V_PANELS = DV / 64;
    const uint32_t at = mt_shared_address(memory);
    const mt_ring<1> kv_ring{at + size::KV_RING};
    const mt_ring<size::STAGES> q_ring{at + size::Q_RING};
    const tile_queue queue(memory + size::TILES);
    const int heads = (int)task.shape.num_heads, lane = threadIdx.x % 32;
    int n = 0;
    for (int round = 0;; round++) {
        const tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        const query_steps steps = steps_of<size>(task, t, band_of(t.span, task.shape.window));
        kv_ring.wait_free(round);
        if (lane == 0) {
            mt_barrier_arrive_expect(kv_ring.filled(round), size::Q);
            copy_tile(at, maps.k, (int)t.span.k_start + t.first, t.head * PANELS, kv_ring.filled(round));
            copy_tile(at + size::V, maps.v, (int)t.span.k_start + t.first, t.head * V_PANELS, kv_ring.filled(round));
        }
        int head = t.head * heads / (int)task.shape.num_groups, first = steps.first;
        for (int step = 0; step < steps.count; step++, n++) {
            const int query = (int)t.span.q_start + first, left = (int)t.span.q_len - first;
            const uint32_t to = at + size::Q + n % size::STAGES * size::STAGE;
            const uint32_t stats = at + size::STATS + n % size::STAGES * 2 * QUERIES * 4;
            q_ring.wait_free(n);
            if (lane == 0) {
                mt_barrier_arrive_expect(q_ring.filled(n), size::STAGE);
                copy_tile(to, maps.q, query, head * PANELS, q_ring.filled(n));
                copy_tile(to + size::Q_TILE, maps.dout, query, head * V_PANELS, q_ring.filled(n));
            }
            for (int row = lane; row < QUERIES; row += 32) {
                const int64_t from = (int64_t)(query + row) * heads + head;
                mt_copy4_async(stats + row * 4, task.lse + from, row < left);
                mt_copy4_async(stats + (QUERIES + row) * 4, task.row_dot + from, row < left);
            }
            mt_barrier_arrive_after_copies(q_ring.filled(n));
            first += QUERIES;
            if (first >= steps.first + steps.tiles * QUERIES) first = steps.first, head++;
        }
        queue.turns.release(round);
    }
}

/* State of a consumer warpgroup of this kernel; `row` is the position of its warp's keys in the span. */
template <int D, int DV, bool SELECTS> struct backward_kv_worker {
    using size = backward_kv_size<D, DV>;
    static constexpr int KEYS = size::KEYS, QUERIES = size::QUERIES;
    static constexpr bool REUSE = size::REUSE, EARLY = D == 64; // EARLY: registers suffice for scores and dp at once
    char *memory;
    uint32_t at, k_tile, v_tile;
    int row;
    int64_t span_query; // row of the span's first query
    float scale;
    band seen;
    float dk[1][D / 8][4], dv[1][DV / 8][4], score[1][QUERIES / 8][4], other[1][QUERIES / 8][4];
    uint32_t pairs[1][QUERIES / 16][4]; // weights, then gradients of scores

    __device__ __forceinline__ mt_ring<1> kv_ring() const {
        return {at + size::KV_RING};
    }
    __device__ __forceinline__ mt_ring<size::STAGES> q_ring() const {
        return {at + size::Q_RING};
    }

    __device__ __forceinline__ void finish() {
        mt_wgmma_wait<0>();
        mt_wgmma_hold(dk[0]);
        mt_wgmma_hold(dv[0]);
    }

    /* Adds the part of the tile of queries at `query`, ring use n, to dk and dv. The product for dk is still running on
     * return, unless registers are reused. */
    __device__ __forceinline__ void step(const mt_selection &selection, int n, int query, bool is_first) {
        const uint32_t q_tile = at + size::Q + n % size::STAGES * size::STAGE, dout_tile = q_tile + size::Q_TILE;
        const float *stats = (const float *)(memory + size::STATS) + n % size::STAGES * 2 * QUERIES;
        float(&dp)[1][QUERIES / 8][4] = REUSE ? score : other;
        uint32_t bits[QUERIES / 32];
        if constexpr (SELECTS) read_selected<QUERIES>(bits, selection, span_query + query, seen.q_len - query, row);
        q_ring().wait_filled(n);
        if (query + QUERIES > seen.q_len) clear_tails<QUERIES, D, DV>(q_tile, seen.q_len - query);
        mt_wgmma_hold(score[0]);
        mt_wgmma_hold(dp[0]);
        mt_wgmma_fence();
        multiply_rows<D, KEYS, QUERIES>(score, k_tile, q_tile);
        if (EARLY) multiply_rows<DV, KEYS, QUERIES>(dp, v_tile, dout_tile);
        selected_columns<QUERIES> selected;
        if constexpr (SELECTS) select_queries_of_rows(selected, bits);
        mt_wgmma_wait<EARLY ? 1 : 0>(); // waits for the scores and for dk of the preceding step
        mt_wgmma_hold(score[0]);
        if (!REUSE && !is_first) q_ring().release(n - 1);
        if (!all_see(seen, query, QUERIES, row, 16)) hide<true>(score, seen, query, row);
        if constexpr (SELECTS) hide_others(score, selected);
        weights_by_column(score, stats, scale * LOG2_E);
        pack_weights<bf16>(pairs, score);
        mt_wgmma_hold(dv[0]);
        mt_wgmma_hold(dp[0]);
        mt_wgmma_fence();
        if (!EARLY) multiply_rows<DV, KEYS, QUERIES>(dp, v_tile, dout_tile);
        multiply_weights<DV, QUERIES>(dv, pairs, dout_tile);
        mt_wgmma_wait<1>();
        mt_wgmma_hold(dp[0]);
        if constexpr (REUSE)
            gradients_of_packed(dp, pairs, stats + QUERIES);
        else
            gradients_by_column(score, dp, stats + QUERIES);
        mt_wgmma_wait<0>(); // the weights are no longer read
        mt_wgmma_hold(dv[0]);
        pack_weights<bf16>(pairs, score);
        mt_wgmma_hold(dk[0]);
        mt_wgmma_fence();
        multiply_weights<D, QUERIES>(dk, pairs, q_tile);
        if (!REUSE) return;
        finish();
        q_ring().release(n);
    }
};

template <int D, int DV, bool SELECTS>
__device__ __forceinline__ void backward_kv_work(const flash_task<bf16> &task, char *memory) {
    using size = backward_kv_size<D, DV>;
    const tile_queue queue(memory + size::TILES);
    const mt_attention &shape = task.shape;
    const int group = threadIdx.x / WARPGROUP - 1, warp_row = (threadIdx.x / 32 - 4) * 16;
    backward_kv_worker<D, DV, SELECTS> worker;
    worker.memory = memory, worker.at = mt_shared_address(memory), worker.scale = shape.scale;
    worker.k_tile = worker.at + group * 64 * 128, worker.v_tile = worker.k_tile + size::V;
    int n = 0;
    for (int round = 0;; round++) {
        const tile t = queue.get(round);
        if (t.head == NO_MORE) break;
        queue.turns.release(round);
        worker.seen = band_of(t.span, shape.window), worker.row = t.first + warp_row;
        worker.span_query = t.span.q_start;
        const query_steps steps = steps_of<size>(task, t, worker.seen);
        int query = steps.first;
        clear(worker.dk);
        clear(worker.dv);
        worker.kv_ring().wait_filled(round);
        for (int step = 0; step < steps.count; step++, n++) {
            worker.step(task.selection, n, query, step == 0);
            query += size::QUERIES;
            if (query >= steps.first + steps.tiles * size::QUERIES) query = steps.first; // the next head
        }
        worker.kv_ring().release(round);
        worker.finish();
        if (!worker.REUSE && steps.count > 0) worker.q_ring().release(n - 1);
        const int64_t key = t.span.k_start + worker.row;
        const int rows = worker.seen.k_len - worker.row;
        scale_all(worker.dk, shape.scale);
        store_rows<D>(task.dk + key * shape.k_stride + t.head * D, shape.k_stride, rows, worker.dk, task.accumulate);
        store_rows<DV>(task.dv + key * shape.v_stride + t.head * DV, shape.v_stride, rows, worker.dv, task.accumulate);
    }
}
#endif

template <int D, int DV, bool SELECTS>
__global__ void __launch_bounds__(THREADS, 1)
    hopper_backward_kv(const flash_task<bf16> task, const __grid_constant__ tensor_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = backward_kv_size<D, DV>;
    extern __shared__ __align__(1024) char memory[];
    const tile_queue queue(memory + size::TILES);
    if (threadIdx.x == 0) {
        const uint32_t at = mt_shared_address(memory);
        mt_ring<1>{at + size::KV_RING}.init(1, 4 * WORKERS);
        mt_ring<size::STAGES>{at + size::Q_RING}.init(1 + 32, 4 * WORKERS); // 32 lanes copy lse and row_dot
        queue.init();
        mt_barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        mt_registers_shrink<size::LOADER_REGISTERS>();
        if (threadIdx.x < 32) backward_kv_load<D, DV>(task, maps, memory);
        if (threadIdx.x / 32 == 1) hand_out_tiles<true>(task, queue, task.shape.num_groups, size::KEYS);
    } else {
        mt_registers_grow<size::WORKER_REGISTERS>();
        backward_kv_work<D, DV, SELECTS>(task, memory);
    }
#endif
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* Launches blocks for every tile of queries, or of keys, and each of `heads` heads (groups, for keys). The blocks are
 * persistent and take tiles from a counter in the stream's workspace; without a counter there are as many blocks as
 * tiles. */
template <class Size>
static void launch(void (*kernel)(flash_task<bf16>, tensor_maps), flash_task<bf16> task, const mt_attention *a,
                   bool of_keys, mt_stream *stream) {
    int64_t heads = of_keys ? a->num_groups : a->num_heads;
    task.num_tiles = tile_count(&a->spans, of_keys, of_keys ? Size::KEYS : Size::QUERIES);
    task.heads_together = heads_in_section(a, heads, heads / a->num_groups);
    if (task.num_tiles == 0) return;
    int64_t blocks = task.num_tiles * heads, processors = mt_cuda_device()->multiProcessorCount;
    if (stream && blocks > processors) {
        blocks = processors;
        task.counter = task.selection.counter; // bits are in the workspace
        if (!task.counter) task.counter = (int *)mt_cuda_workspace(stream, sizeof *task.counter);
        MT_CUDA(cudaMemsetAsync(task.counter, 0, sizeof *task.counter, stream->stream));
    }
    mt_cuda_take_shared(kernel, Size::BYTES);
    tensor_maps maps = maps_of(a, Size::QUERIES, Size::KEYS);
    kernel<<<(unsigned)blocks, THREADS, Size::BYTES, mt_cuda_stream(stream)>>>(task, maps);
    MT_CUDA_LAUNCHED();
}

template <int D, int DV, bool SELECTS>
static void forward(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    flash_task<bf16> task = flash_task_of<bf16>(a);
    task.selection = selection;
    launch<forward_size<D, DV>>(hopper_forward<D, DV, SELECTS>, task, a, false, stream);
}

template <int D, int DV, bool SELECTS>
static void launch_backward_kv(const flash_task<bf16> &task, const mt_attention *a, mt_stream *stream) {
    launch<backward_kv_size<D, DV>>(hopper_backward_kv<D, DV, SELECTS>, task, a, true, stream);
}

template <int D, int DV, bool SELECTS>
static void backward(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    flash_task<bf16> task = flash_task_of<bf16>(a);
    task.selection = selection;
    mt_attention_row_dots(a, MT_BF16, stream);
    launch<backward_q_size<D, DV>>(hopper_backward_q<D, DV, SELECTS>, task, a, false, stream);
    over_disjoint_keys<bf16>(a, stream, launch_backward_kv<D, DV, SELECTS>, selection);
}

template <bool SELECTS>
static void forward_of_size(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    if (a->head_size == 64) return forward<64, 64, SELECTS>(a, selection, stream);
    if (a->head_size == 128) return forward<128, 128, SELECTS>(a, selection, stream);
    forward<192, 128, SELECTS>(a, selection, stream);
}

template <bool SELECTS>
static void backward_of_size(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    if (a->head_size == 64) return backward<64, 64, SELECTS>(a, selection, stream);
    if (a->head_size == 128) return backward<128, 128, SELECTS>(a, selection, stream);
    backward<192, 128, SELECTS>(a, selection, stream);
}

/* Serves the usual head sizes and those of DeepSeek's latent attention, without dropout. Code for sm_90a runs on Hopper
 * only, not on later GPUs. A tensor map needs a non-empty tensor, even if no row is read. */
static bool hopper_serves(const mt_attention *a, mt_dtype dtype) {
    int64_t D = a->head_size, DV = a->value_size;
    if (mt_cuda_device()->major != 9 || mt_cuda_kernel_arch() != 90) return false;
    bool sizes = (D == 64 && DV == 64) || (D == 128 && DV == 128) || (D == 192 && DV == 128);
    return dtype == MT_BF16 && flash_serves(a, dtype) && sizes && a->dropout.p <= 0 && a->q && a->k && a->v;
}

extern "C" bool mt_attention_hopper_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (!hopper_serves(a, dtype) || !pages_serve(a, forward_size<64, 64>::KEYS)) return false;
    forward_of_size<false>(a, {}, stream);
    return true;
}

extern "C" bool mt_attention_hopper_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (!hopper_serves(a, dtype)) return false;
    if (!mt_attention_hopper_one_kernel(a, stream, true)) backward_of_size<false>(a, {}, stream);
    return true;
}

bool mt_selected_hopper_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    if (!hopper_serves(a, dtype) || !pages_serve(a, forward_size<64, 64>::KEYS)) return false;
    forward_of_size<true>(a, *s, stream);
    return true;
}

bool mt_selected_hopper_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    if (!hopper_serves(a, dtype)) return false;
    backward_of_size<true>(a, *s, stream);
    return true;
}

static bool unordered_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    return hopper_serves(a, dtype) && mt_attention_hopper_one_kernel(a, stream, false);
}

#else

extern "C" bool mt_attention_hopper_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)dtype, (void)stream;
    return false;
}

extern "C" bool mt_attention_hopper_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)dtype, (void)stream;
    return false;
}

bool mt_selected_hopper_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)s, (void)dtype, (void)stream;
    return false;
}

bool mt_selected_hopper_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)s, (void)dtype, (void)stream;
    return false;
}

static bool unordered_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    (void)a, (void)dtype, (void)stream;
    return false;
}

#endif

extern "C" const mt_attention_rung mt_attention_unordered = {"unordered", mt_attention_hopper_forward,
                                                             unordered_backward};
