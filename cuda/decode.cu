/* decode.cu: the layers of a decode step in one kernel, for few rows in bf16.
 *
 * A step of one row reads every weight once, but with a layer of ten kernels it also waits ten times for a launch and
 * for the slowest block. Here one block on each multiprocessor runs all layers. A layer has five phases, and a barrier
 * of the whole grid after each:
 *   1. the norm of the row, which every block computes for itself, and the product qkv
 *   2. the norm and rotation of q and k, the new row of the cache, attention of some heads to a part of the keys
 *   3. attention's output: the product with the merged heads, plus the residual stream
 *   4. the norm and the MLP's first product with its activation
 *   5. the MLP's second product, plus the residual stream
 * If merging the parts of the keys needs many reads, the blocks divide it in a phase before 3. Results are rounded to
 * bf16 at the same places as by separate kernels.
 *
 * Weights do not depend on other blocks. Each warp copies its own to a ring in shared memory, in the order of their
 * use, several KiB ahead and beyond the end of a phase; so memory stays busy during a barrier. A block reads results of
 * other blocks with __ldcg, past L1. All sums have a fixed order. */
#include "activation.cuh"
#include "decode.cuh"

enum {
    WARPS = MT_DECODE_WARPS,
    THREADS = 32 * WARPS,
    LOADERS = MT_DECODE_LOADERS, // warps with weights
    COUNTING = 32 * LOADERS,     // thread of the grid's barrier
    NO_UNIT = 1 << 29,
    CHUNK = 32 * P,
    HEADS = MT_DECODE_HEADS,
    NORM_PACKS = MT_DECODE_WIDTH / (P * THREADS),
    LEAST_KEYS = 64,       // of a split
    PREFETCHED_KEYS = 256, // of a split
    CACHED_PAGES = 64,
    MERGED_BYTES = 32768 // that each block reads for itself at most
};

/* The keys [first, end) that the query of a span sees, in `used` splits of `keys` keys. The query's own is the last. */
struct key_cut {
    int row, first, end, keys, used; // row: of the query in the step
    int cache_row;                   // of the new key
    int64_t k_start;
};

/* Small operands of all phases. They are read once, because a barrier empties L1. */
struct block_tables {
    key_cut cuts[MT_DECODE_ROWS];                       // of the spans
    float rotation[MT_DECODE_ROWS][MT_DECODE_CHANNELS]; // cosines, then sines of each row
    int32_t pages[CACHED_PAGES];                        // of the block's first work
};

/* A block's shared memory. */
struct block_memory {
    block_tables *tables;
    uint4 *ring; // of weights
    const mt_decode_layer *layers;
    char *phase; // rows of a product's input, or heads and partial sums of attention
};

/* 8 elements that another block may have written in this launch. */
__device__ static inline mt_pack<float, P> load_shared_row(const bf16 *from) {
    uint4 word = __ldcg((const uint4 *)from);
    mt_pack<bf16, P> pack;
    memcpy(&pack, &word, sizeof pack);
    return mt_to_float(pack);
}

/* ---- weights and products ---------------------------------------------------------------------------------------- */

/* A warp's part of a product. */
struct warp_share {
    int first, stride; // units of its team
    int rank, team;    // in its team, and the number of warps in it
    __device__ explicit warp_share(const mt_decode_product &p) {
        int warp = threadIdx.x / 32;
        team = 1 << p.team_bits, rank = warp & (team - 1);
        int teams = LOADERS >> p.team_bits, index = warp >> p.team_bits;
        first = index < teams ? index * (int)gridDim.x + (int)blockIdx.x : NO_UNIT;
        stride = teams * (int)gridDim.x;
    }
};

/* The ring of a warp's weights. A slot has a chunk of the two rows of a unit; a lane copies what it reads itself, so
 * the copies need no barrier. The next copy takes the slot of the chunk that was used last. */
template <int slots> struct weight_ring {
    int layer, product, unit, chunk; // of the next copy
    int slot;                        // of the next use
    const bf16 *from;                // the unit's first row
    uint4 *place;                    // of this lane in slot 0

    __device__ weight_ring(const mt_decode_task &task, const block_memory &memory) : layer(0), product(0), slot(0) {
        place = memory.ring + threadIdx.x / 32 * (slots * 64) + threadIdx.x % 32;
        unit = warp_share(task.products[0]).first;
        seek(task, memory);
        for (int i = 0; i < slots; i++) copy_next(task, memory);
    }

    /* Moves from the end of a product to the next in which the warp has a unit. */
    __device__ void seek(const mt_decode_task &task, const block_memory &memory) {
        while (layer < task.num_layers && unit >= task.products[product].units) {
            product = (product + 1) % MT_DECODE_PRODUCTS;
            layer += product == 0;
            unit = warp_share(task.products[product]).first;
        }
        if (layer == task.num_layers) return;
        const mt_decode_product &p = task.products[product];
        chunk = warp_share(p).rank;
        from = memory.layers[layer].w[product] + (int64_t)unit * p.step * p.K;
    }

    /* Starts the next copy, if any. Every call is a group of copies, so that groups can be counted. */
    __device__ void copy_next(const mt_decode_task &task, const block_memory &memory) {
        if (layer < task.num_layers) {
            const mt_decode_product &p = task.products[product];
            int k = chunk * CHUNK + (int)threadIdx.x % 32 * P;
            bool there = k < p.K;
            const bf16 *first = from + (there ? k : 0), *second = first + (int64_t)p.apart * p.K;
            mt_load_async((mt_pack<bf16, P> *)(place + slot * 64), first, there);
            mt_load_async((mt_pack<bf16, P> *)(place + slot * 64 + 32), second, there);
            chunk += 1 << p.team_bits;
            if (chunk >= p.chunks) {
                unit += warp_share(p).stride;
                seek(task, memory);
            }
        }
        mt_load_async_commit();
        slot = slot + 1 == slots ? 0 : slot + 1;
    }

    /* Waits for the oldest copy. */
    __device__ void wait(mt_pack<bf16, P> (&rows)[2]) {
        mt_load_async_wait<slots - 1>();
        for (int r = 0; r < 2; r++) rows[r] = mt_load<P>((const bf16 *)(place + slot * 64 + r * 32));
    }
};

template <int rows> static constexpr int slots_for = rows > 2 ? 6 : 9;

/* sums[r * rows + t] += this lane's part of row r of the unit times row t of x. */
template <int rows>
__device__ static inline void multiply(float (&sums)[2 * rows], const mt_decode_task &task, const block_memory &memory,
                                       const mt_decode_product &p, weight_ring<slots_for<rows>> &ring) {
    const warp_share share(p);
    const bf16 *x = (const bf16 *)memory.phase;
    for (int chunk = share.rank; chunk < p.chunks; chunk += share.team) {
        mt_pack<bf16, P> packs[2];
        int k = chunk * CHUNK + (int)threadIdx.x % 32 * P;
        ring.wait(packs);
        mt_pack<float, P> w[2] = {mt_to_float(packs[0]), mt_to_float(packs[1])};
#pragma unroll
        for (int t = 0; t < rows; t++) {
            mt_pack<float, P> in = mt_to_float(mt_load<P>(x + t * p.K + k, t < task.T && k < p.K));
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int i = 0; i < P; i++) sums[r * rows + t] = fmaf(w[r].value[i], in.value[i], sums[r * rows + t]);
        }
        ring.copy_next(task, memory);
    }
}

/* A result of a unit, which one lane of the team's first warp finishes: row t of the step, column of the product. */
struct unit_result {
    int t, column;
    bool exists;
    bf16 bias, residual; // loaded before the product, and before the barrier where they do not depend on it

    template <int rows> __device__ void open(const mt_decode_task &task, const mt_decode_layer &l, int j, int unit) {
        constexpr int lanes = 16 / rows;
        const mt_decode_product &p = task.products[j];
        int lane = threadIdx.x % 32, i = lane / lanes;
        t = i % rows, column = unit * p.step + i / rows * p.apart;
        exists = lane % lanes == 0 && t < task.T && unit < p.units && warp_share(p).rank == 0;
        const bf16 *stream = j == MT_DECODE_OUT ? l.input : j == MT_DECODE_FC2 ? l.middle : NULL;
        bias = exists && l.bias[j] ? l.bias[j][column] : mt_from_float<bf16>(0);
        residual = exists && stream ? __ldcg(stream + t * task.C + column) : mt_from_float<bf16>(0);
    }

    /* `other`: the second row's result, in lanes of the first. */
    __device__ void store(const mt_decode_task &task, const mt_decode_layer &l, int j, float value, float other) const {
        if (!exists) return;
        bf16 *to = task.qkv + t * (task.H + 2 * task.G) * task.D + column;
        if (j == MT_DECODE_OUT) to = l.middle + t * task.C + column;
        if (j == MT_DECODE_FC2) to = l.output + t * task.C + column;
        if (j == MT_DECODE_OUT || j == MT_DECODE_FC2) value += mt_to_float(residual);
        if (j == MT_DECODE_FC1) {
            bool gated = mt_is_gated(task.activation);
            if (gated && column >= task.F) return;
            to = task.active + t * task.F + column;
            value = mt_activate(task.activation, value) * (gated ? other : 1);
        }
        mt_store(to, mt_from_float<bf16>(mt_pack<float, 1>{value}));
    }
};

/* Product j of a layer, whose input is in shared memory; `result` is that of the warp's first unit. */
template <int rows>
__device__ static inline void run_product(const mt_decode_task &task, const block_memory &memory,
                                          const mt_decode_layer &l, int j, unit_result result,
                                          weight_ring<slots_for<rows>> &ring) {
    constexpr int n = 2 * rows;
    __shared__ float of_warp[WARPS][n];
    const mt_decode_product &p = task.products[j];
    const warp_share share(p);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = share.first;
    do {
        float sums[n] = {};
        if (unit < p.units) multiply<rows>(sums, task, memory, p, ring);
        mt_sum_over_lanes(sums, lane);
        if (share.team > 1) { // one unit, so all warps pass here once
            if (lane % (32 / n) == 0) of_warp[warp][lane / (32 / n)] = sums[0];
            __syncthreads();
            sums[0] = 0;
            for (int i = 0; i < share.team; i++) sums[0] += of_warp[warp - share.rank + i][lane / (32 / n)];
        }
        float value = rounded(sums[0] + mt_to_float(result.bias)), other = 0;
        if (p.apart > 1) other = __shfl_down_sync(0xffffffff, value, 16);
        result.store(task, l, j, value, other);
        unit += share.stride;
        result.open<rows>(task, l, j, unit);
    } while (unit < p.units);
}

/* ---- inputs of products ------------------------------------------------------------------------------------------ */

/* x[t] = the sum of x[t] over the first `warps` warps of the block. `buffer` alternates between 0 and 1. */
template <int rows> __device__ static inline void sum_over_block(float (&x)[rows], int warps, int buffer) {
    __shared__ float of_warp[2][rows][WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int t = 0; t < rows; t++) {
        x[t] = mt_warp_sum(x[t]);
        if (lane == 0) of_warp[buffer][t][warp] = x[t];
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < rows; t++) {
        x[t] = of_warp[buffer][t][0];
        for (int i = 1; i < warps; i++) x[t] += of_warp[buffer][t][i];
    }
}

/* The weights and biases of a norm at this thread's channels, loaded before a barrier. */
struct norm_weights {
    mt_pack<bf16, P> w[NORM_PACKS], b[NORM_PACKS];
    __device__ void open(const mt_decode_task &task, const bf16 *from_w, const bf16 *from_b) {
#pragma unroll
        for (int i = 0; i < NORM_PACKS; i++) {
            int c = (i * THREADS + (int)threadIdx.x) * P;
            w[i] = mt_load<P>(from_w + c, c < task.C);
            b[i] = mt_load<P>(from_b + c, from_b && c < task.C);
        }
    }
};

/* The norms of the rows of `from`, to shared memory. The mean is 0 in RMSNorm. */
template <int rows>
__device__ static inline void load_normed(const mt_decode_task &task, const block_memory &memory, const bf16 *from,
                                          const norm_weights &weights) {
    mt_pack<float, P> x[rows][NORM_PACKS];
    float mean[rows] = {}, squares[rows] = {}, inverse_C = __frcp_rn(task.C);
    int warps = min(WARPS, (task.C + CHUNK - 1) / CHUNK); // that have channels
#pragma unroll
    for (int t = 0; t < rows; t++)
#pragma unroll
        for (int i = 0; i < NORM_PACKS; i++) {
            int c = (i * THREADS + (int)threadIdx.x) * P;
            x[t][i] = t < task.T && c < task.C ? load_shared_row(from + t * task.C + c) : mt_pack<float, P>{};
            for (int e = 0; e < P; e++) mean[t] += x[t][i].value[e];
        }
    if (task.layernorm) sum_over_block(mean, warps, 0);
#pragma unroll
    for (int t = 0; t < rows; t++) {
        mean[t] = task.layernorm ? mean[t] * inverse_C : 0;
#pragma unroll
        for (int i = 0; i < NORM_PACKS; i++) {
            if ((i * THREADS + (int)threadIdx.x) * P >= task.C) continue;
            for (int e = 0; e < P; e++) squares[t] += (x[t][i].value[e] - mean[t]) * (x[t][i].value[e] - mean[t]);
        }
    }
    sum_over_block(squares, warps, 1);
#pragma unroll
    for (int t = 0; t < rows; t++) {
        float scale = rsqrtf(squares[t] * inverse_C + task.eps), shift = -mean[t] * scale;
#pragma unroll
        for (int i = 0; i < NORM_PACKS; i++) {
            int c = (i * THREADS + (int)threadIdx.x) * P;
            if (t >= task.T || c >= task.C) continue;
            mt_pack<float, P> w = mt_to_float(weights.w[i]), b = mt_to_float(weights.b[i]);
            for (int e = 0; e < P; e++) x[t][i].value[e] = (x[t][i].value[e] * scale + shift) * w.value[e] + b.value[e];
            *((mt_pack<bf16, P> *)memory.phase + (t * task.C + c) / P) = mt_from_float<bf16>(x[t][i]);
        }
    }
    __syncthreads();
}

/* The T rows of K elements of `from`, to shared memory. */
__device__ static inline void load_rows(const mt_decode_task &task, const block_memory &memory, const bf16 *from,
                                        int K) {
#pragma unroll 4
    for (int i = threadIdx.x; i < task.T * K / P; i += THREADS)
        ((uint4 *)memory.phase)[i] = __ldcg((const uint4 *)from + i);
    __syncthreads();
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

__device__ static inline key_cut cut_of(const mt_decode_task &task, int span) {
    const mt_span s = task.spans[span];
    int end = (int)s.k_len, first = 0;
    if (task.window > 0 && task.window < end) first = end - (int)task.window;
    int keys = (end - first + task.splits - 1) / task.splits;
    keys = max(LEAST_KEYS, (keys + 15) / 16 * 16);
    return {(int)s.q_start, first, end, keys, (end - first + keys - 1) / keys, task.cache_rows[s.q_start], s.k_start};
}

/* Work of a block: `heads` heads of a group, from `head` on, over the keys [begin, end) of a span. */
struct key_work {
    int span, row, split, group, head, heads, begin, end, last; // last: the query's own key
    int cache_row;                                              // of the new key
    bool stores;                                                // writes it
    int64_t k_start;
    const int32_t *pages; // from page first_page on
    int first_page;

    __device__ key_work(const mt_decode_task &task, const block_memory &memory, int item) {
        int per_group = task.H / task.G, tiles = (per_group + HEADS - 1) / HEADS;
        split = item % task.splits, item /= task.splits;
        int tile = item % tiles;
        item /= tiles;
        group = item % task.G, span = item / task.G;
        head = group * per_group + tile * HEADS, heads = min(HEADS, per_group - tile * HEADS);
        begin = end = last = row = cache_row = 0, stores = false, k_start = 0, pages = task.pages.table, first_page = 0;
        if (span >= task.T) return;
        const key_cut cut = memory.tables->cuts[span];
        row = cut.row, cache_row = cut.cache_row, k_start = cut.k_start, last = cut.end - 1;
        begin = cut.first + split * cut.keys, end = min(begin + cut.keys, cut.end);
        stores = tile == 0 && begin <= last && last < end;
    }
};

__device__ static inline int64_t key_row(const mt_decode_task &task, const key_work &work, int key) {
    int64_t j = work.k_start + key;
    if (!work.pages) return j;
    int shift = 31 - __clz((int)task.pages.rows);
    return ((int64_t)work.pages[(j >> shift) - work.first_page] << shift) + (j & (task.pages.rows - 1));
}

/* Copies the page numbers of a block's first work, if they are few. */
__device__ static inline void cache_pages(const mt_decode_task &task, const block_memory &memory, key_work &work) {
    if (!work.pages || work.begin >= work.end) return;
    int shift = 31 - __clz((int)task.pages.rows), first = (int)((work.k_start + work.begin) >> shift);
    int count = (int)((work.k_start + work.end - 1) >> shift) - first + 1;
    if (count > CACHED_PAGES) return;
    for (int i = threadIdx.x; i < count; i += THREADS) memory.tables->pages[i] = task.pages.table[first + i];
    work.pages = memory.tables->pages, work.first_page = first;
}

/* Brings the first keys and values of a block's work to L2, except the new ones. */
__device__ static inline void prefetch_keys(const mt_decode_task &task, const mt_decode_layer &l,
                                            const key_work &work) {
    int count = min(min(work.end, work.last) - work.begin, (int)PREFETCHED_KEYS);
    for (int i = threadIdx.x; i < 2 * count; i += THREADS) {
        int64_t row = key_row(task, work, work.begin + i / 2);
        const bf16 *from = (i % 2 ? l.v_cache : l.k_cache) + (row * task.G + work.group) * task.D;
        for (int c = 0; c < task.D; c += 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c));
    }
}

/* Shared memory of attention: heads of q, the new key and value, and the warps' partial softmax. */
struct attention_memory {
    float *q;                        // [HEADS, D]
    mt_pack<bf16, P> *new_k, *new_v; // [D]
    float *values, *max, *sum;       // [WARPS, heads, D], [WARPS, heads] twice
    __device__ attention_memory(const mt_decode_task &task, const block_memory &memory, int heads) {
        q = (float *)memory.phase;
        new_k = (mt_pack<bf16, P> *)(q + HEADS * task.D), new_v = new_k + task.D / P;
        values = (float *)(new_v + task.D / P), max = values + WARPS * heads * task.D, sum = max + WARPS * heads;
    }
};

/* This lane's 8 channels of a head. */
__device__ static inline mt_pack<float, P> own_channels(const bf16 *head, int D) {
    int lane = threadIdx.x % 32;
    return lane < D / P ? load_shared_row(head + lane * P) : mt_pack<float, P>{};
}

/* q of the block's heads to shared memory, multiplied by the scale and log2 e; if its keys end with the new one, the
 * new key and value to shared memory and the cache. A warp has a head. */
__device__ static inline void prepare_heads(const mt_decode_task &task, const block_memory &memory,
                                            const mt_decode_layer &l, const key_work &work, const attention_memory &m) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = task.D;
    const bf16 *qkv = task.qkv + (int64_t)work.row * (task.H + 2 * task.G) * D;
    const float *rotation = memory.tables->rotation[work.row];
    float *scratch = m.values + warp * D;
    if (warp < work.heads) {
        mt_pack<float, P> q =
            mt_to_float(prepare_head(task, own_channels(qkv + (work.head + warp) * D, D), scratch, l.q_norm, rotation));
        for (int e = 0; e < P && lane < D / P; e++)
            m.q[warp * D + lane * P + e] = q.value[e] * task.scale * 1.44269504f;
    }
    if (warp >= HEADS && warp < HEADS + 2 && work.last < work.end) {
        bool is_v = warp > HEADS;
        const bf16 *from = qkv + (task.H + (is_v ? task.G : 0) + work.group) * D;
        bf16 *to = (is_v ? l.v_cache : l.k_cache) + ((int64_t)work.cache_row * task.G + work.group) * D;
        mt_pack<bf16, P> pack;
        if (is_v)
            pack = mt_from_float<bf16>(own_channels(from, D));
        else
            pack = prepare_head(task, own_channels(from, D), scratch, l.k_norm, rotation);
        if (lane < D / P) (is_v ? m.new_v : m.new_k)[lane] = pack;
        if (lane < D / P && work.stores) mt_store(to + lane * P, pack);
    }
    __syncthreads();
}

/* The partial softmax of a block's work. W lanes share a key. Reads each key and value once. */
template <int W, int M>
__device__ __forceinline__ void attend(const mt_decode_task &task, const mt_decode_layer &l, const key_work &work,
                                       const attention_memory &m) {
    constexpr int U = 2, together = THREADS / W;
    int place = threadIdx.x / W, channel = threadIdx.x % W * P, warp = threadIdx.x / 32, D = task.D;
    float q[M][P];
    head_sums<M> part;
#pragma unroll
    for (int h = 0; h < M; h++) {
        part.max[h] = -INFINITY, part.sum[h] = 0;
        for (int e = 0; e < P; e++) {
            q[h][e] = h < work.heads && channel < D ? m.q[h * D + channel + e] : 0;
            part.values[h][e] = 0;
        }
    }
    for (int base = work.begin; base < work.end; base += U * together) {
        mt_pack<bf16, P> keys[U], values[U];
        float scores[U][M];
#pragma unroll
        for (int u = 0; u < U; u++) {
            int key = base + place + u * together;
            bool there = key < work.end && channel < D, is_new = key == work.last;
            int64_t row = there && !is_new ? key_row(task, work, key) : 0;
            int64_t at = (row * task.G + work.group) * D + channel;
            keys[u] = mt_load<P>(is_new ? (const bf16 *)m.new_k + channel : l.k_cache + at, there);
            values[u] = mt_load<P>(is_new ? (const bf16 *)m.new_v + channel : l.v_cache + at, there);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            mt_pack<float, P> key = mt_to_float(keys[u]);
#pragma unroll
            for (int h = 0; h < M; h++) {
                scores[u][h] = 0;
                for (int e = 0; e < P; e++) scores[u][h] += q[h][e] * key.value[e];
                for (int bit = W / 2; bit > 0; bit /= 2) scores[u][h] += __shfl_xor_sync(0xffffffff, scores[u][h], bit);
                if (base + place + u * together >= work.end) scores[u][h] = -INFINITY;
            }
        }
        part.add(scores, values);
    }
    for (int bit = W; bit < 32; bit *= 2) part.join(bit);
    if (threadIdx.x % 32 >= W) return;
#pragma unroll
    for (int h = 0; h < M; h++) {
        if (h >= work.heads) continue;
        if (threadIdx.x % 32 == 0)
            m.max[warp * work.heads + h] = part.max[h], m.sum[warp * work.heads + h] = part.sum[h];
        for (int e = 0; e < P && channel < D; e++)
            m.values[(warp * work.heads + h) * D + channel + e] = part.values[h][e];
    }
}

template <int W>
__device__ static inline void attend_heads(const mt_decode_task &task, const mt_decode_layer &l, const key_work &work,
                                           const attention_memory &m) {
    if (work.heads == 1)
        attend<W, 1>(task, l, work, m);
    else
        attend<W, HEADS>(task, l, work, m);
}

/* Merges the warps' sums of the block's work, for merge_splits. */
__device__ static inline void leave(const mt_decode_task &task, const key_work &work, const attention_memory &m) {
    for (int i = threadIdx.x; i < work.heads * task.D; i += THREADS) {
        int h = i / task.D, c = i % task.D;
        int64_t to = ((int64_t)work.span * task.H + work.head + h) * task.splits + work.split;
        float max = -INFINITY, sum = 0, total = 0;
        for (int w = 0; w < WARPS; w++) max = mt_maximum(max, m.max[w * work.heads + h]);
        for (int w = 0; w < WARPS; w++) {
            float weight = weight_of(m.max[w * work.heads + h], max);
            total += weight * m.sum[w * work.heads + h];
            sum += weight * m.values[(w * work.heads + h) * task.D + c];
        }
        mt_store(task.sums + to * task.D + c, mt_pack<float, 1>{sum});
        if (c == 0) mt_store((float *)(task.maxima + to), mt_pack<float, 2>{{max, total}});
    }
}

__device__ static inline void run_attention(const mt_decode_task &task, const block_memory &memory,
                                            const mt_decode_layer &l, key_work work) {
    int per_group = task.H / task.G, tiles = (per_group + HEADS - 1) / HEADS;
    int items = task.T * task.G * tiles * task.splits;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        if (item != blockIdx.x) work = key_work(task, memory, item);
        if (work.begin >= work.end) continue;
        attention_memory m(task, memory, work.heads);
        prepare_heads(task, memory, l, work, m);
        if (task.D <= 64)
            attend_heads<8>(task, l, work, m);
        else if (task.D <= 128)
            attend_heads<16>(task, l, work, m);
        else
            attend_heads<32>(task, l, work, m);
        __syncthreads();
        leave(task, work, m);
        __syncthreads(); // the next item overwrites m
    }
}

/* Channels c to c + 3 of a head of a span's query, merged from its splits. */
__device__ static inline mt_pack<bf16, 4> merge_splits(const mt_decode_task &task, int span, int head, int c,
                                                       int used) {
    int64_t from = ((int64_t)span * task.H + head) * task.splits;
    float max = -INFINITY, total = 0;
    mt_pack<float, 4> sum = {};
#pragma unroll 4
    for (int p = 0; p < used; p++) {
        float2 part = __ldcg(task.maxima + from + p);
        float4 x = __ldcg((const float4 *)(task.sums + (from + p) * task.D + c));
        float top = mt_maximum(max, part.x), shrink = weight_of(max, top), weight = weight_of(part.x, top);
        const float values[4] = {x.x, x.y, x.z, x.w};
        max = top, total = total * shrink + weight * part.y;
        for (int e = 0; e < 4; e++) sum.value[e] = sum.value[e] * shrink + weight * values[e];
    }
    for (int e = 0; e < 4; e++) sum.value[e] = total == 0 ? 0 : sum.value[e] / total;
    return mt_from_float<bf16>(sum);
}

/* All heads of the step to memory of the phase: [T, H, D]. */
__device__ static inline void merge_heads(const mt_decode_task &task, const block_memory &memory) {
    int packs = task.H * task.D / 4;
    mt_pack<bf16, 4> *to = (mt_pack<bf16, 4> *)memory.phase;
    for (int span = 0; span < task.T; span++) {
        const key_cut &cut = memory.tables->cuts[span];
        for (int i = threadIdx.x; i < packs; i += THREADS)
            to[cut.row * packs + i] = merge_splits(task, span, 4 * i / task.D, 4 * i % task.D, cut.used);
    }
    __syncthreads();
}

/* This block's part of the heads to task.attended. The blocks take turns of 32 packs. */
__device__ static inline void merge_own_heads(const mt_decode_task &task, const block_memory &memory) {
    int packs = task.H * task.D / 4, first = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
    for (int span = 0; span < task.T; span++) {
        const key_cut &cut = memory.tables->cuts[span];
        for (int i = first; i < packs; i += gridDim.x * THREADS)
            mt_store(task.attended + (cut.row * packs + i) * 4,
                     merge_splits(task, span, 4 * i / task.D, 4 * i % task.D, cut.used));
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* True if the merge of the splits is a phase of its own. Every block reads the same lengths. */
__device__ static inline bool merges_apart(const mt_decode_task &task, const block_memory &memory) {
    int64_t parts = 0;
    for (int span = 0; span < task.T; span++) parts += memory.tables->cuts[span].used;
    return parts * task.H * task.D * (int64_t)sizeof(float) > MERGED_BYTES;
}

/* Fills what is read once. */
__device__ static inline block_memory open_memory(const mt_decode_task &task, uint4 *shared, block_tables *tables) {
    char *layers = (char *)shared + task.ring_bytes;
    int thread = threadIdx.x, half = (int)task.rotation.R / 2;
    for (int i = thread; i < task.layer_bytes / 8; i += THREADS)
        ((uint64_t *)layers)[i] = ((const uint64_t *)task.layers)[i];
    if (thread < task.T) tables->cuts[thread] = cut_of(task, thread);
    for (int i = thread; i < task.T * half; i += THREADS) {
        int64_t at = (int64_t)task.rotation.positions[i / half] * half + i % half;
        tables->rotation[i / half][i % half] = task.rotation.cos[at];
        tables->rotation[i / half][half + i % half] = task.rotation.sin[at];
    }
    __syncthreads();
    return {tables, shared, (const mt_decode_layer *)layers, layers + task.layer_bytes};
}

template <int rows>
__global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ mt_decode_task task) {
    extern __shared__ uint4 shared[];
    __shared__ block_tables tables;
    const block_memory memory = open_memory(task, shared, &tables);
    grid_barrier<COUNTING> barrier(task.arrived);
    weight_ring<slots_for<rows>> ring(task, memory);
    key_work work(task, memory, blockIdx.x);
    cache_pages(task, memory, work);
    __syncthreads();
    const bool apart = merges_apart(task, memory);
    norm_weights norm;
    unit_result result;
    for (int layer = 0; layer < task.num_layers; layer++) {
        const mt_decode_layer &l = memory.layers[layer];
        auto open = [&](int j) { result.open<rows>(task, l, j, warp_share(task.products[j]).first); };
        auto run = [&](int j) {
            run_product<rows>(task, memory, l, j, result, ring);
            if (j < MT_DECODE_FC2 || layer + 1 < task.num_layers) barrier.arrive();
        };
        norm.open(task, l.norm_w[0], l.norm_b[0]), open(MT_DECODE_QKV), prefetch_keys(task, l, work);
        if (layer > 0) barrier.wait();
        load_normed<rows>(task, memory, l.input, norm);
        run(MT_DECODE_QKV);
        barrier.wait();
        run_attention(task, memory, l, work);
        barrier.arrive();
        open(MT_DECODE_OUT);
        barrier.wait();
        if (apart) {
            merge_own_heads(task, memory);
            barrier.arrive();
            barrier.wait();
            load_rows(task, memory, task.attended, task.H * task.D);
        } else {
            merge_heads(task, memory);
        }
        run(MT_DECODE_OUT);
        norm.open(task, l.norm_w[1], l.norm_b[1]), open(MT_DECODE_FC1);
        barrier.wait();
        load_normed<rows>(task, memory, l.middle, norm);
        run(MT_DECODE_FC1);
        open(MT_DECODE_FC2);
        barrier.wait();
        load_rows(task, memory, task.active, task.F);
        run(MT_DECODE_FC2);
    }
    mt_load_async_wait<0>();
}

mt_decode_kernel *mt_decode_kernel_of(int64_t T, int *slots) {
    *slots = T > 2 ? slots_for<4> : slots_for<1>;
    return T == 1 ? decode_step<1> : T == 2 ? decode_step<2> : decode_step<4>;
}
