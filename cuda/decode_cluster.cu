/* decode_cluster.cu: the layers of a decode step of one text in one kernel, for narrow models and GPUs with clusters.
 *
 * The weights of a layer of GPT-2 124M are read in 3.4 us, and each of the five phases of decode.cu ends with a barrier
 * of the whole grid, which takes 1.6. Here a layer has two such phases. Within a phase the 8 blocks of a cluster send
 * their results to each other's shared memory:
 *   1. A cluster has a head: the norm, q, k and v, attention, and the product of its channels with attention's output
 *      matrix, which is one part of a sum over all heads.
 *   2. A cluster has a slice of the MLP: the norm, rows of the first product with the activation, and the product of
 *      these channels with the second matrix, which is one part of a sum over all slices.
 * After the barrier each block of a cluster adds all parts of an eighth of the channels, in a fixed order, and sends
 * the sums to the others. Results are rounded to bf16 at the same places as by separate kernels.
 *
 * Weights of the next phase are copied to shared memory while a phase computes: copies that start before a barrier make
 * it twice as long.
 *
 * Latency limits the rest: an instruction needs the result of the one before, which takes 5 to 8 clocks. So addresses
 * are computed before the first layer, a warp has one unit of each product, and products are by mma with the one row of
 * x in all rows of an operand. */
#include "activation.cuh"
#include "decode.cuh"
#include "hopper.cuh"

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

enum {
    COUNTING = 0,      // thread of the grid's barrier
    BLOCKS = 8,        // of a cluster
    STEP = 32,         // terms of a sum that mma adds after one 16-byte load of a lane; columns of a box of weights
    STEPS = 4,         // loaded at once
    KEYS = 8,          // of a warp at once
    MOST_PARTS = 16,   // of a sum over clusters
    MOST_K_PARTS = 5,  // of a sum over the warps of a block
    CACHED_PAGES = 64, // page numbers of a block's keys
    MOST_WARPS = 16
};

/* Exchanges within a cluster: a head's q, k and v; the slice of the MLP; sums of parts. */
enum { QKV, ACTIVE, ADDED, EXCHANGES };

/* Softmax sums over some keys of a head of D channels. */
template <int D> struct alignas(16) head_part {
    float values[D], max, total; // the greatest score; the sum of 2^(score - it)
};

/* The state of a block; other blocks of its cluster write to it. */
template <int D, int WARPS> struct alignas(16) block_state {
    static constexpr int THREADS = 32 * WARPS;
    bf16 qkv[3 * D];                // of the cluster's head
    bf16 active[THREADS];           // the cluster's slice of the MLP
    head_part<D> of_blocks[BLOCKS]; // attention to parts of the keys
    head_part<D> of_warps[WARPS];
    bf16 added[2 * THREADS];               // sums of parts
    bf16 attended[D], normed[2 * THREADS]; // inputs of products
    float2 moments[WARPS];                 // sums of a warp's channels and of their squares
    float maxima[WARPS];                   // of scores
    float rotation[MT_DECODE_CHANNELS];
    int64_t new_row; // of the cache, for the new key
    bool pages_here; // `pages` has the numbers of all pages of the block's keys, from first_page on
    int first_page, pages[CACHED_PAGES];
    float sums[WARPS * 8];                                // of a product, for the parts of K
    uint64_t filled[MT_DECODE_PRODUCTS], sent[EXCHANGES]; // barriers of copies of weights, and of exchanges
};

/* A block's rows of a product's matrix: `boxes` boxes of `rows` rows and K columns, in shared memory [boxes, K / 32,
 * rows, 32] from element `begin` on. Eight lanes that read two rows then read different banks. A warp has 8 rows,
 * `group`, and `steps` steps of 32 columns, `part`. */
struct block_matrix {
    int boxes, rows, K, begin, groups, parts, steps;
    signed char group[MOST_WARPS], part[MOST_WARPS]; // of the warps; -1: none
    __host__ __device__ int box_elements(void) const {
        return rows * K;
    }
    __host__ __device__ int bytes(void) const {
        return 2 * boxes * box_elements();
    }
};

/* The matrices of a block, with `clusters` clusters, and their bytes. A cluster's slice of the MLP has `width`
 * channels; those beyond F are zeros. */
struct cluster_plan {
    block_matrix of[MT_DECODE_PRODUCTS];
    int width, bytes;
    bool fits; // `active` holds the slice, a warp has at most one unit of a product, a thread sends at most two rows
};

static cluster_plan plan_of(const mt_decode_task &t, int clusters, int warps) {
    cluster_plan p = {};
    int gates = mt_is_gated(t.activation) ? 2 : 1;
    p.width = (int)mt_divide_up(t.F / STEP, clusters) * STEP;
    p.fits = p.width <= 32 * warps && 3 * t.D / 2 <= 32 * warps;
    p.of[MT_DECODE_QKV] = {3, t.D / BLOCKS, t.C}, p.of[MT_DECODE_OUT] = {1, t.C / BLOCKS, t.D};
    p.of[MT_DECODE_FC1] = {gates, p.width / BLOCKS, t.C}, p.of[MT_DECODE_FC2] = {1, t.C / BLOCKS, p.width};
    for (int j = 0; j < MT_DECODE_PRODUCTS; j++) {
        block_matrix *m = &p.of[j];
        m->begin = p.bytes / 2, p.bytes += m->bytes();
        m->groups = (int)mt_divide_up(m->boxes * m->rows, 8);
        p.fits &= m->groups <= warps;
        int steps = m->K / STEP, most = j == MT_DECODE_QKV || j == MT_DECODE_FC1 ? MOST_K_PARTS : 1;
        int parts = m->groups < warps ? warps / m->groups : 1;
        m->steps = (int)mt_divide_up(steps, parts < most ? parts : most), m->parts = (int)mt_divide_up(steps, m->steps);
        for (int w = 0; w < MOST_WARPS; w++) {
            bool has = w < m->groups * m->parts;
            m->group[w] = (signed char)(has ? w % m->groups : -1), m->part[w] = (signed char)(has ? w / m->groups : -1);
        }
    }
    return p;
}

/* A lane's part of a product: its row of 8 of the warp, and the steps of K that the warp adds. */
struct lane_product {
    uint32_t w, x; // first operands, in shared memory
    int steps;     // 0: none
    int to;        // where lanes below 4 write their two results, among sums or a part
};

/* The keys that a block attends to, as positions. A warp has 8 at once; those before `begin` are not seen. */
struct key_range {
    int begin, end, last; // last: the new key
    bool divided;         // among the blocks of the cluster
};

/* A block has `WARPS` warps. The last one's first thread copies weights; a fence by the counting thread would wait for
 * copies of its own warp. */
template <int W, int WARPS> struct cluster_step {
    static constexpr int D = W * P, V = D / 32; // V: channels of a lane
    static constexpr int THREADS = 32 * WARPS, COPYING = THREADS - 32;
    typedef block_state<D, WARPS> memory;
    typedef mt_pack<bf16, V> value_pack;

    const mt_decode_task &task;
    memory &state;
    bf16 *shared; // weights
    const cluster_plan &plan;
    const mt_decode_layer *layers;
    int cluster, rank, warp, lane;
    bool gated;
    int rows, count; // this block's parts of C results and of the slice of the MLP
    int head, group; // head >= H: none
    lane_product qkv, out, fc1, fc2;
    uint32_t qkv_to, active_to;       // in block threadIdx.x % BLOCKS: where this thread sends two rows
    uint32_t qkv_there, active_there; // and the barriers of these copies
    grid_barrier<COUNTING> barrier;
    mt_pack<float, 2> stream; // this thread's channels of the residual stream
    key_range keys;
    int first_key, first_row; // of this warp; its row of the cache

    __device__ cluster_step(const mt_decode_task &task_, const cluster_plan &plan_, memory &state_, bf16 *shared_,
                            const mt_decode_layer *layers_)
        : task(task_), state(state_), shared(shared_), plan(plan_), layers(layers_), barrier(task_.arrived) {
        cluster = (int)blockIdx.x / BLOCKS, rank = (int)blockIdx.x % BLOCKS;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, gated = mt_is_gated(task.activation);
        rows = task.C / BLOCKS, count = plan.width / BLOCKS;
        head = min(cluster, task.H - 1), group = head / (task.H / task.G);
    }

    __device__ bool has_head(void) const {
        return cluster < task.H;
    }
    __device__ static uint32_t address(const void *shared) {
        return (uint32_t)__cvta_generic_to_shared(shared);
    }
    __device__ uint32_t filled(int j) const {
        return address(&state.filled[j]);
    }
    __device__ static int shared_row(void) { // of q, k and v or of the slice: this thread sends it and the next
        return (int)threadIdx.x / BLOCKS * 2;
    }

    /* ---- copies of weights, by one thread */

    /* Box `box` of product j; the corner is in units of a row and of 32 columns. */
    __device__ void copy_box(int layer, int j, int box, int row, int columns) const {
        const block_matrix &m = plan.of[j];
        mt_copy_box(address(shared + m.begin + box * m.box_elements()), ((const CUtensorMap *)task.maps)[4 * layer + j],
                    columns, row, 0, filled(j));
    }
    /* True in the thread that copies, after it has announced the copies. */
    __device__ bool copies(int layer, int j) const {
        if (threadIdx.x != COPYING || layer >= task.num_layers) return false;
        mt_barrier_arrive_expect(filled(j), plan.of[j].bytes());
        return true;
    }

    __device__ void copy_qkv(int layer) const {
        if (!has_head() || !copies(layer, MT_DECODE_QKV)) return;
        copy_box(layer, MT_DECODE_QKV, 0, head * D + rank * W, 0);
        copy_box(layer, MT_DECODE_QKV, 1, (task.H + group) * D + rank * W, 0);
        copy_box(layer, MT_DECODE_QKV, 2, (task.H + task.G + group) * D + rank * W, 0);
    }
    __device__ void copy_out(int layer) const {
        if (has_head() && copies(layer, MT_DECODE_OUT))
            copy_box(layer, MT_DECODE_OUT, 0, rank * rows, head * (D / STEP));
    }
    __device__ void copy_fc1(int layer) const {
        if (!copies(layer, MT_DECODE_FC1)) return;
        copy_box(layer, MT_DECODE_FC1, 0, first_channel(), 0);
        if (gated) copy_box(layer, MT_DECODE_FC1, 1, task.F + first_channel(), 0);
    }
    __device__ void copy_fc2(int layer) const {
        if (copies(layer, MT_DECODE_FC2)) copy_box(layer, MT_DECODE_FC2, 0, rank * rows, cluster * (plan.width / STEP));
    }
    /* The first channel of the MLP that this block computes. */
    __device__ int first_channel(void) const {
        return cluster * plan.width + rank * count;
    }

    /* ---- inputs of products */

    /* Small operands of a phase's input, loaded before a barrier: the bias at the four channels of add_parts, the
     * norm's weights and biases at this thread's two channels. */
    struct input_operands {
        mt_pack<bf16, 4> bias;
        mt_pack<bf16, 2> w, b;
    };
    __device__ int own_channel(void) const { // the first of four that this thread and three others add
        return rank * rows + (int)threadIdx.x / 4 * 4;
    }
    __device__ input_operands open(const bf16 *bias, const bf16 *w, const bf16 *b) const {
        int c = 2 * threadIdx.x;
        return {mt_load<4>(bias + own_channel(), bias && threadIdx.x < rows), mt_load<2>(w + c, w && c < task.C),
                mt_load<2>(b + c, b && c < task.C)};
    }

    /* The sums of `number` parts [number, C] and a bias, to all blocks of the cluster. A block adds an eighth of the
     * channels: if each added all, reading them would take longer than this exchange. Four lanes share four channels.
     */
    __device__ void add_parts(const float *parts, int number, mt_pack<bf16, 4> bias) const {
        constexpr int each = MOST_PARTS / 4;
        int c = own_channel(), first = lane % 4;
        if (warp * 32 >= rows) return;
        float4 x[each];
#pragma unroll
        for (int i = 0; i < each; i++) {
            int part = 4 * i + first;
            x[i] = threadIdx.x < rows && part < number ? __ldcg((const float4 *)(parts + part * task.C + c)) : float4{};
        }
        mt_pack<float, 4> sum = {}, b = mt_to_float(bias);
#pragma unroll
        for (int i = 0; i < each; i++)
            sum.value[0] += x[i].x, sum.value[1] += x[i].y, sum.value[2] += x[i].z, sum.value[3] += x[i].w;
        for (int bit = 1; bit < 4; bit *= 2)
            for (int e = 0; e < 4; e++) sum.value[e] += __shfl_xor_sync(0xffffffff, sum.value[e], bit);
        for (int e = 0; e < 4; e++) sum.value[e] += b.value[e];
        mt_pack<bf16, 4> rounded_sum = mt_from_float<bf16>(sum);
        if (threadIdx.x >= rows) return;
#pragma unroll
        for (int i = 0; i < BLOCKS / 4; i++)
            send(address_in(state.added + c, first + 4 * i), address_in(&state.sent[ADDED], first + 4 * i),
                 (uint64_t)rounded_sum.pairs[1] << 32 | rounded_sum.pairs[0]);
    }

    /* Waits for the results of the cluster's blocks; `use`: the number of earlier uses of the exchange, or its parity.
     * st.async writes data before it updates the barrier in the same shared memory, so that the wait needs no
     * .acquire.cluster, which would also empty L1: 4% of a step. */
    __device__ void receive(int exchange, int use) const {
        mt_barrier_wait(address(&state.sent[exchange]), use % 2);
    }
    /* Adds the sums of parts to the residual stream. */
    __device__ void receive_sums(int use) {
        int c = 2 * threadIdx.x;
        receive(ADDED, use);
        mt_pack<float, 2> more = mt_to_float(mt_load<2>(state.added + c, c < task.C));
        for (int e = 0; e < 2; e++) stream.value[e] = rounded(stream.value[e] + more.value[e]);
    }

    /* The norm of the residual stream, to state.normed. The stream is bf16, so that a variance in one pass is exact
     * enough: where the mean is 256 deviations, rounding has left no variance. */
    __device__ void normalise(const input_operands &o) const {
        int c = 2 * threadIdx.x;
        mt_pack<float, 2> x = stream, w = mt_to_float(o.w), b = mt_to_float(o.b);
        float sum = x.value[0] + x.value[1], squares = x.value[0] * x.value[0] + x.value[1] * x.value[1];
        float inverse_C = __frcp_rn(task.C);
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, bit);
            squares += __shfl_xor_sync(0xffffffff, squares, bit);
        }
        if (lane == 0) state.moments[warp] = {sum, squares};
        __syncthreads();
        sum = squares = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i += 2) {
            float4 two = *(const float4 *)&state.moments[i];
            sum += two.x + two.z, squares += two.y + two.w;
        }
        float mean = task.layernorm ? sum * inverse_C : 0;
        float scale = rsqrtf(mt_maximum(squares * inverse_C - mean * mean, 0) + task.eps), shift = -mean * scale;
        for (int e = 0; e < 2; e++) x.value[e] = (x.value[e] * scale + shift) * w.value[e] + b.value[e];
        if (c < task.C) *(mt_pack<bf16, 2> *)(state.normed + c) = mt_from_float<bf16>(x);
        __syncthreads();
    }

    /* ---- products */

    /* Two rows of a product, in lanes below 4. The weights are operand b of mma; all rows of operand a are x. The order
     * of K within a step is the one that 16-byte loads give. */
    __device__ float2 multiply(const lane_product &p, int j, int of_rows, int layer) const {
        int stride = of_rows * STEP * 2; // bytes of a step's weights
        float sums[4][4] = {};
        mt_barrier_wait(filled(j), layer % 2);
#pragma unroll 1
        for (int first = 0; first < p.steps; first += STEPS) {
            uint4 a[STEPS], b[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; i++)
                if (first + i < p.steps) {
                    a[i] = mt_load_shared16(p.x + (first + i) * STEP * 2);
                    b[i] = mt_load_shared16(p.w + (first + i) * stride);
                }
#pragma unroll
            for (int i = 0; i < STEPS; i++)
                if (first + i < p.steps) {
                    uint32_t low[] = {a[i].x, a[i].x, a[i].y, a[i].y}, high[] = {a[i].z, a[i].z, a[i].w, a[i].w};
                    mt_mma(sums[i % 2 * 2], low, b[i].x, b[i].y), mt_mma(sums[i % 2 * 2 + 1], high, b[i].z, b[i].w);
                }
        }
        for (int i = 1; i < 4; i++) sums[0][0] += sums[i][0], sums[0][1] += sums[i][1];
        return {sums[0][0], sums[0][1]};
    }

    /* A product whose K is divided, to state.sums. All threads call it. */
    __device__ void multiply_parts(const lane_product &p, int j, int of_rows, int layer) const {
        if (p.steps > 0) {
            float2 sums = multiply(p, j, of_rows, layer);
            if (lane < 4) *(float2 *)(state.sums + p.to) = sums;
        }
        __syncthreads();
    }
    /* The sums of the parts of K for a row and the next one. */
    __device__ float2 sums_of(int row, const block_matrix &m) const {
        float2 sums = {};
#pragma unroll
        for (int part = 0; part < MOST_K_PARTS; part++)
            if (part < m.parts) {
                float2 more = *(const float2 *)(state.sums + part * m.groups * 8 + row);
                sums.x += more.x, sums.y += more.y;
            }
        return sums;
    }

    /* Two results to shared memory of a block of the cluster, which count towards its barrier. */
    __device__ static void send(uint32_t to, uint32_t barrier, float first, float second) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                     "r"(mt_pack_bf16(first, second)), "r"(barrier)
                     : "memory");
    }
    __device__ static void send(uint32_t to, uint32_t barrier, uint64_t four) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to), "l"(four),
                     "r"(barrier)
                     : "memory");
    }
    __device__ static uint32_t address_in(const void *shared, int block) {
        uint32_t there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(shared)), "r"(block));
        return there;
    }

    __device__ static float2 load_pair(const bf16 *from, bool there) {
        mt_pack<float, 2> pair = mt_to_float(mt_load<2>(from, there));
        return {pair.value[0], pair.value[1]};
    }
    __device__ float2 qkv_bias(const bf16 *bias) const {
        int row = shared_row(), first = row < W ? head : row < 2 * W ? task.H + group : task.H + task.G + group;
        return load_pair(bias + first * D + rank * W + row % W, bias && row < 3 * W);
    }
    __device__ void run_qkv(int layer, float2 bias) const {
        multiply_parts(qkv, MT_DECODE_QKV, W, layer);
        if (shared_row() >= 3 * W) return;
        float2 sums = sums_of(shared_row(), plan.of[MT_DECODE_QKV]);
        send(qkv_to, qkv_there, sums.x + bias.x, sums.y + bias.y);
    }

    __device__ float2 fc1_bias(const bf16 *bias, int gate) const {
        int channel = first_channel() + shared_row();
        return load_pair(bias + gate * task.F + channel,
                         bias && shared_row() < count && channel < task.F && gate <= gated);
    }
    __device__ float activate(float x) const {
        return mt_activate(task.activation, x);
    }
    __device__ void run_fc1(int layer, float2 bias, float2 other_bias) const {
        int row = shared_row();
        multiply_parts(fc1, MT_DECODE_FC1, count, layer);
        if (row >= count) return;
        float2 x = sums_of(row, plan.of[MT_DECODE_FC1]);
        x.x = activate(rounded(x.x + bias.x)), x.y = activate(rounded(x.y + bias.y));
        if (gated) {
            float2 other = sums_of(count + row, plan.of[MT_DECODE_FC1]);
            x.x *= rounded(other.x + other_bias.x), x.y *= rounded(other.y + other_bias.y);
        }
        bool there = first_channel() + row < task.F;
        send(active_to, active_there, there ? x.x : 0, there ? x.y : 0);
    }

    /* This block's rows of parts [H, C] or [clusters, C]. */
    __device__ void run_part(const lane_product &p, int j, int layer, float *parts) const {
        if (p.steps == 0) return;
        float2 sums = multiply(p, j, rows, layer);
        if (lane < 4) *(float2 *)(parts + p.to) = sums;
    }

    /* ---- attention */

    struct key_packs {
        uint4 k[D / STEP];
        value_pack v[KEYS];
    };

    /* The cache's row of a position. */
    __device__ int64_t cache_row(int64_t position) const {
        if (!task.pages.table) return position;
        int shift = 31 - __clz((int)task.pages.rows), page = (int)(position >> shift) - state.first_page;
        return ((int64_t)(state.pages_here ? state.pages[page] : task.pages.table[page]) << shift) +
               (position & (task.pages.rows - 1));
    }

    /* Reads 8 keys and values from `row` of the cache on, whose first has the position `first`; not the new ones. */
    __device__ void load_keys(key_packs &packs, const mt_decode_layer &l, int first, int64_t row) const {
        int key = first + lane / 4, last = min(keys.end, keys.last);
        const bf16 *k = l.k_cache + ((row + lane / 4) * task.G + group) * D + lane % 4 * P;
        const bf16 *v = l.v_cache + (row * task.G + group) * D + lane * V;
        bool there = key >= keys.begin && key < last;
#pragma unroll
        for (int i = 0; i < D / STEP; i++) packs.k[i] = there ? *(const uint4 *)(k + i * STEP) : uint4{};
#pragma unroll
        for (int i = 0; i < KEYS; i++, v += task.G * D)
            packs.v[i] = mt_load<V>(v, first + i >= keys.begin && first + i < last);
    }

    /* Norm and rotation of q and k. */
    __device__ void rotate(const mt_decode_layer &l) const {
        if (warp < 2) {
            bf16 *x = state.qkv + warp * D;
            mt_pack<float, P> pack = mt_to_float(mt_load<P>(x + lane * P, lane < W));
            mt_pack<bf16, P> rotated =
                prepare_head(task, pack, state.of_warps[warp].values, warp ? l.k_norm : l.q_norm, state.rotation);
            if (lane < W) *((mt_pack<bf16, P> *)x + lane) = rotated;
        }
        __syncthreads();
    }

    /* The new key and value to the cache, by one block of the group's first head. */
    __device__ void store_keys(const mt_decode_layer &l) const {
        if (rank > 0 || head % (task.H / task.G) > 0 || warp > 1 || lane >= W) return;
        mt_store((warp ? l.v_cache : l.k_cache) + (state.new_row * task.G + group) * D + lane * P,
                 mt_load<P>(state.qkv + (warp + 1) * D + lane * P));
    }

    struct warp_part {
        float max, total, values[V]; // the greatest score; sums of 2^(score - it), and of the values with these weights
    };
    /* This warp's part of attention, given its first keys. */
    __device__ warp_part attend(const mt_decode_layer &l, key_packs &packs) const {
        warp_part part = {-INFINITY};
#pragma unroll 1
        for (int first = first_key; first < keys.end; first += KEYS * WARPS) {
            if (first > first_key) load_keys(packs, l, first, cache_row(first + task.spans[0].k_start));
            if (first + KEYS > keys.last && keys.last < keys.end) { // the new key
                int i = keys.last - first;
#pragma unroll
                for (int e = 0; e < D / STEP; e++)
                    if (lane / 4 == i) packs.k[e] = *(const uint4 *)(state.qkv + D + e * STEP + lane % 4 * P);
#pragma unroll
                for (int e = 0; e < KEYS; e++)
                    if (e == i) packs.v[e] = mt_load<V>(state.qkv + 2 * D + lane * V);
            }
            float scores[2][4] = {};
#pragma unroll
            for (int e = 0; e < D / STEP; e++) {
                uint4 a = *(const uint4 *)(state.qkv + e * STEP + lane % 4 * P), b = packs.k[e];
                uint32_t low[] = {a.x, a.x, a.y, a.y}, high[] = {a.z, a.z, a.w, a.w};
                mt_mma(scores[0], low, b.x, b.y), mt_mma(scores[1], high, b.z, b.w);
            }
            float weights[2], top = part.max; // of keys 2 (lane % 4) and the next
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int key = first + lane % 4 * 2 + e;
                bool seen = key >= keys.begin && key < keys.end;
                weights[e] = seen ? (scores[0][e] + scores[1][e]) * (task.scale * 1.44269504f) : -INFINITY;
                top = mt_maximum(top, weights[e]);
            }
            for (int bit = 1; bit < 4; bit *= 2) top = mt_maximum(top, __shfl_xor_sync(0xffffffff, top, bit));
            float shrink = weight_of(part.max, top);
            for (int e = 0; e < 2; e++) weights[e] = mt_exp2(weights[e] - top);
            part.max = top, part.total = part.total * shrink + weights[0] + weights[1];
            for (int e = 0; e < V; e++) part.values[e] *= shrink;
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                float weight = __shfl_sync(0xffffffff, weights[i % 2], i / 2);
                mt_pack<float, V> v = mt_to_float(packs.v[i]);
                for (int e = 0; e < V; e++) part.values[e] += weight * v.value[e];
            }
        }
        for (int bit = 1; bit < 4; bit *= 2) part.total += __shfl_xor_sync(0xffffffff, part.total, bit);
        return part;
    }

    /* Attention of the cluster's head, to state.attended. */
    __device__ void run_attention(const mt_decode_layer &l, key_packs &packs) const {
        int c = threadIdx.x;
        if (task.rotation.R > 0 || l.q_norm) rotate(l);
        warp_part part = {-INFINITY};
        if (first_key < keys.end) part = attend(l, packs);
        if (lane == 0) state.maxima[warp] = part.max;
        __syncthreads();
        float max = -INFINITY, weight, total = 0, value = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) max = mt_maximum(max, state.maxima[w]);
        weight = weight_of(part.max, max);
        for (int e = 0; e < V; e++) state.of_warps[warp].values[lane * V + e] = weight * part.values[e];
        if (lane == 0) state.of_warps[warp].total = weight * part.total;
        __syncthreads();
        if (c < D)
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += state.of_warps[w].total, value += state.of_warps[w].values[c];
        if (keys.divided) merge_blocks(max, total, value);
        if (c < D)
            mt_store(state.attended + c,
                     mt_from_float<bf16>(mt_pack<float, 1>{total == 0 ? 0 : __fdividef(value, total)}));
        __syncthreads();
    }

    /* Thread c has a block's part of channel c of the head, and gets the whole. */
    __device__ void merge_blocks(float max, float &total, float &value) const {
#if __CUDA_ARCH__ >= 900
        cg::cluster_group blocks = cg::this_cluster();
        int c = threadIdx.x;
        for (int block = 0; block < BLOCKS && c < D; block++) {
            head_part<D> *to = blocks.map_shared_rank(&state.of_blocks[rank], block);
            to->values[c] = value;
            if (c == 0) to->total = total, to->max = max;
        }
        blocks.sync();
        for (int block = 0; block < BLOCKS; block++) max = mt_maximum(max, state.of_blocks[block].max);
        total = value = 0;
        for (int block = 0; block < BLOCKS && c < D; block++) {
            const head_part<D> &part = state.of_blocks[block];
            float weight = weight_of(part.max, max);
            total += weight * part.total, value += weight * part.values[c];
        }
#endif
    }

    /* ---- set-up */

    /* This warp's part of product j. `first`: of the block's results. */
    __device__ lane_product part_of(int j, const bf16 *x, int first) const {
        const block_matrix &m = plan.of[j];
        int group = m.group[warp], part = m.part[warp], row = min(8 * group + lane / 4, m.boxes * m.rows - 1), box = 0;
        if (group < 0) return {};
        for (; row >= m.rows; box++) row -= m.rows;
        const bf16 *w = shared + m.begin + box * m.box_elements() + part * m.steps * m.rows * STEP;
        return {address(w + row * STEP + lane % 4 * P), address(x + part * m.steps * STEP + lane % 4 * P),
                min(m.steps, m.K / STEP - part * m.steps), (part * m.groups + group) * 8 + lane % 4 * 2 + first};
    }

    __device__ void open_products(void) {
        int block = threadIdx.x % BLOCKS, first = cluster * task.C + rank * rows;
        qkv = part_of(MT_DECODE_QKV, state.normed, 0), out = part_of(MT_DECODE_OUT, state.attended, first);
        fc1 = part_of(MT_DECODE_FC1, state.normed, 0), fc2 = part_of(MT_DECODE_FC2, state.active, first);
        int row = min(shared_row(), 3 * W - 2);
        qkv_to = address_in(state.qkv + row / W * D + rank * W + row % W, block);
        active_to = address_in(state.active + rank * count + min(shared_row(), count - 2), block);
        qkv_there = address_in(&state.sent[QKV], block), active_there = address_in(&state.sent[ACTIVE], block);
    }

    /* The barriers, and the copies of the first layer. */
    __device__ void open_copies(void) const {
        if (threadIdx.x == COPYING) {
            for (int j = 0; j < MT_DECODE_PRODUCTS; j++) mt_barrier_init(filled(j), 1);
            for (uint64_t &sent : state.sent) mt_barrier_init(address(&sent), 1);
            mt_barriers_ready();
        }
        copy_qkv(0), copy_out(0), copy_fc1(0), copy_fc2(0);
    }
    /* Announces results of the cluster's blocks. */
    __device__ void expect(int exchange, int elements) const {
        if (threadIdx.x == 0) mt_barrier_arrive_expect(address(&state.sent[exchange]), 2 * elements);
    }

    /* Warps have 8 rows of the cache each, which begin at a multiple of 8 and so are in one page. */
    __device__ void open_keys(void) {
        const mt_span s = task.spans[0];
        int end = (int)s.k_len, window = task.window > 0 && task.window < end ? end - (int)task.window : 0;
        int first = window - (int)((s.k_start + window) % KEYS), packs = (end - first + KEYS - 1) / KEYS;
        keys.divided = packs > WARPS;
        int each = (keys.divided ? (packs + BLOCKS - 1) / BLOCKS : packs) * KEYS;
        if (keys.divided) first += rank * each;
        keys.begin = max(first, window), keys.end = min(first + each, end), keys.last = end - 1;
        if (keys.begin >= keys.end) first = keys.begin = keys.end = end + KEYS * WARPS; // none
        first_key = first + warp * KEYS;
        int page = 0, number = 0;
        if (task.pages.table && keys.begin < keys.end) {
            int shift = 31 - __clz((int)task.pages.rows);
            page = (int)((s.k_start + keys.begin) >> shift);
            number = (int)((s.k_start + keys.end - 1) >> shift) - page + 1;
        }
        bool here = number <= CACHED_PAGES;
        for (int i = threadIdx.x; here && i < number; i += THREADS) state.pages[i] = task.pages.table[page + i];
        if (threadIdx.x == 0)
            state.pages_here = here, state.first_page = here ? page : 0, state.new_row = task.cache_rows[s.q_start];
        __syncthreads();
        int seen = max(first_key, keys.begin);
        first_row = first_key < keys.end ? cache_row(seen + s.k_start) - (seen - first_key) : 0;
    }

    __device__ void open_rotation(void) const {
        int half = (int)task.rotation.R / 2;
        for (int i = threadIdx.x; i < half; i += THREADS) {
            int64_t at = (int64_t)task.rotation.positions[task.spans[0].q_start] * half + i;
            state.rotation[i] = task.rotation.cos[at], state.rotation[half + i] = task.rotation.sin[at];
        }
    }

    /* ---- the two phases of a layer */

    /* `parts` of the last layer's MLP, [number, C], and its bias; none before layer 0. Writes parts [H, C]. */
    __device__ void run_head(int layer, const bf16 *last_bias, const float *parts, int number, float *out_parts) {
        const mt_decode_layer &l = layers[layer];
        key_packs packs;
        input_operands input = open(last_bias, l.norm_w[0], l.norm_b[0]);
        float2 bias = qkv_bias(l.bias[MT_DECODE_QKV]);
        if (has_head()) load_keys(packs, l, first_key, first_row), expect(QKV, 3 * D);
        if (layer > 0) {
            expect(ADDED, task.C);
            barrier.wait();
            add_parts(parts, number, input.bias);
            copy_fc1(layer), copy_fc2(layer);
            receive_sums(1);
        }
        normalise(input);
        if (has_head()) {
            run_qkv(layer, bias);
            receive(QKV, layer);
            run_attention(l, packs);
            run_part(out, MT_DECODE_OUT, layer, out_parts);
        }
        barrier.arrive();
        if (has_head()) store_keys(l);
    }

    /* `parts` of attention, [H, C]. Writes parts [clusters, C]. */
    __device__ void run_slice(int layer, const float *parts, float *mlp_parts) {
        const mt_decode_layer &l = layers[layer];
        input_operands input = open(l.bias[MT_DECODE_OUT], l.norm_w[1], l.norm_b[1]);
        float2 bias = fc1_bias(l.bias[MT_DECODE_FC1], 0), other_bias = fc1_bias(l.bias[MT_DECODE_FC1], 1);
        expect(ACTIVE, plan.width), expect(ADDED, task.C);
        barrier.wait();
        add_parts(parts, task.H, input.bias);
        copy_qkv(layer + 1), copy_out(layer + 1);
        receive_sums(0);
        normalise(input);
        run_fc1(layer, bias, other_bias);
        receive(ACTIVE, layer);
        run_part(fc2, MT_DECODE_FC2, layer, mlp_parts);
        barrier.arrive();
    }
};

template <int W, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 1)
    decode_clusters(const __grid_constant__ mt_decode_task task, const __grid_constant__ cluster_plan plan) {
#if __CUDA_ARCH__ >= 900
    typedef cluster_step<W, WARPS> step;
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ typename step::memory state;
    int clusters = (int)gridDim.x / BLOCKS, c = 2 * threadIdx.x;
    mt_decode_layer *layers = (mt_decode_layer *)((char *)memory + plan.bytes);
    step s(task, plan, state, (bf16 *)memory, layers);
    s.open_copies();
    for (int i = threadIdx.x; i < task.layer_bytes / 8; i += 32 * WARPS)
        ((uint64_t *)layers)[i] = ((const uint64_t *)task.layers)[i];
    s.open_products(), s.open_rotation(), s.open_keys();
    s.stream = mt_to_float(mt_load<2>(layers[0].input + c, c < task.C));
    float *out_parts = task.sums, *mlp_parts = task.sums + task.H * task.C;
    cg::this_cluster().sync(); // the barriers of all blocks exist
    const bf16 *last_bias = NULL;
    for (int layer = 0; layer < task.num_layers; layer++) {
        const mt_decode_layer &l = layers[layer];
        s.run_head(layer, last_bias, mlp_parts, clusters, out_parts);
        s.run_slice(layer, out_parts, mlp_parts);
        last_bias = l.bias[MT_DECODE_FC2];
    }
    if (s.cluster > 0) return;
    typename step::input_operands input = s.open(last_bias, NULL, NULL);
    s.expect(ADDED, task.C);
    s.barrier.wait();
    s.add_parts(mlp_parts, clusters, input.bias);
    s.receive_sums(1);
    if (blockIdx.x == 0 && c < task.C) mt_store(layers[task.num_layers - 1].output + c, mt_from_float<bf16>(s.stream));
#endif
}

/* The boxes of a layer's four matrices. */
static void open_maps(const mt_decode_task &t, const mt_decode_layer &l, const cluster_plan &plan, CUtensorMap *maps) {
    int gates = mt_is_gated(t.activation) ? 2 : 1;
    int64_t N[] = {(t.H + 2 * t.G) * t.D, t.C, gates * t.F, t.C}, K[] = {t.C, t.H * t.D, t.C, t.F};
    for (int j = 0; j < MT_DECODE_PRODUCTS; j++) {
        const mt_boxes steps = {l.w[j], MT_BF16, K[j] / STEP,         N[j],           STEP,
                                STEP,   K[j],    plan.of[j].K / STEP, plan.of[j].rows};
        maps[j] = mt_tensor_map_of(&steps, STEP, CU_TENSOR_MAP_SWIZZLE_NONE);
    }
}

template <int W, int WARPS>
static bool launch(mt_decode_task *t, const mt_decode_layer *layers, CUtensorMap *maps, mt_stream *stream) {
    const cudaDeviceProp *device = mt_cuda_device();
    auto *kernel = decode_clusters<W, WARPS>;
    cudaFuncAttributes function;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension, attributes[0].val.clusterDim = {BLOCKS, 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative, attributes[1].val.cooperative = 1;
    config.blockDim = 32 * WARPS, config.stream = stream->stream, config.attrs = attributes, config.numAttrs = 2;
    MT_CUDA(cudaFuncGetAttributes(&function, kernel));
    const int64_t most = (int64_t)device->sharedMemPerBlockOptin;
    if (!device->cooperativeLaunch) return false;
    // With fewer clusters a slice of the MLP is wider and takes more memory, so the most clusters are tried first.
    cluster_plan plan;
    int clusters = device->multiProcessorCount / BLOCKS, fit = 0;
    if (clusters > MOST_PARTS) clusters = MOST_PARTS;
    for (;; clusters = fit) {
        if (clusters < t->H) return false;
        plan = plan_of(*t, clusters, WARPS);
        int64_t bytes = plan.bytes + t->layer_bytes;
        if (!plan.fits || bytes + (int64_t)function.sharedSizeBytes > most) return false;
        config.gridDim = (unsigned)(clusters * BLOCKS), config.dynamicSmemBytes = (size_t)bytes;
        mt_cuda_take_shared(kernel, bytes);
        MT_CUDA(cudaOccupancyMaxActiveClusters(&fit, kernel, &config));
        if (fit >= clusters) break;
    }
    int64_t parts = (int64_t)(t->H + clusters) * t->C * 4;
    if (parts > stream->workspace_bytes) return false;
    t->sums = (float *)mt_cuda_workspace(stream, parts);
    for (int i = 0; i < t->num_layers; i++) open_maps(*t, layers[i], plan, maps + i * MT_DECODE_PRODUCTS);
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, *t, plan));
    return true;
}

bool mt_decode_launch_clusters(mt_decode_task *t, const mt_decode_layer *layers, void *maps, mt_stream *stream) {
    static_assert(sizeof(CUtensorMap) == MT_DECODE_MAP_BYTES, "the memory of the graph has room for the maps");
    if (t->T != 1 || t->C > 1024 || t->C % 64 != 0 || t->F % STEP != 0 || mt_cuda_kernel_arch() < 90) return false;
    if ((t->D != 64 && t->D != 128) || (t->pages.table && t->pages.rows % KEYS != 0)) return false;
    auto *launcher = t->C <= 768  ? (t->D == 64 ? launch<8, 12> : launch<16, 12>)
                     : t->D == 64 ? launch<8, 16>
                                  : launch<16, 16>;
    return launcher(t, layers, (CUtensorMap *)maps, stream);
}
