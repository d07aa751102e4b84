/* attention_mma.cu: the second rung of attention: FlashAttention on the tensor cores of sm_80 and later.
 *
 * The definition reads every key and value from memory once per query: 4 D bytes for 4 D flops. Here a block of four
 * warps takes a tile of queries and loops over tiles of keys shared by all of its queries (Dao, "FlashAttention-2"). A
 * key is read once per tile of 128 queries: 128 flops per byte, from L2. Scores are never stored: they are the result
 * of one product in registers, become weights there, and are the operand of the next product.
 *
 * Each warp owns 16 or 32 rows of the tile. The mma instruction distributes its result over the lanes as its operand a
 * requires (see mt_mma), so weights pass from one product to the next without shared memory. Warps synchronise only to
 * exchange tiles of keys. While one tile is processed, cp.async copies the next one into a second buffer.
 *
 * The forward needs at least 4 Tq Tk D H flops, half of that with a causal mask. The backward recomputes the scores and
 * needs five products instead of two, 2.5 times as many flops. As in the definition it runs as two kernels: one owns
 * rows of dq, the other rows of dk and dv. These are seven products, but no atomics: runs repeat bit for bit. mma
 * reaches about two thirds of the rate of Hopper's wgmma, which the next rung uses (attention_hopper.cu).
 *
 * Dropout is a variant of each kernel (DROPS), which draws the masks of a tile before its products
 * (attention_dropout.cuh). It changes the weights that meet values, not their sum. Another variant (SELECTS) is sparse
 * attention: it reads the bits of the keys that each query attends to, and a warp passes over a tile without such
 * keys. A third one (BIASED) adds biases by distance to the scaled scores, from a table of the block's head, and the
 * kernel that owns queries also sums their gradients. */
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "mma.cuh"
#include "vector.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS, ROW_DOT_QUERIES = 16 };

/* ---- tiles in shared memory -------------------------------------------------------------------------------------- */

/* Starts the copy of `count` rows (up to ROWS) of `channels` channels (up to D); the rest of the tile is set to 0. */
template <int ROWS, int D, class E>
__device__ __forceinline__ void load_tile(uint32_t tile, const E *from, int64_t stride, int count, int channels) {
    // CHUNKS is a power of 2, so that rows divide the threads evenly.
    constexpr int CHUNKS = (D == 192 ? 64 : D) / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    from += first * stride + chunk * 8;
#pragma unroll
    for (int c = 0; c < D / 8; c += CHUNKS)
#pragma unroll
        for (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
            int row = first + i;
            mt_copy16_async(tile + mt_tile_chunk<ROWS>(row, c + chunk), from + i * stride + c * 8,
                            row < count && (c + chunk) * 8 < channels);
        }
}

/* Starts the copy of `count` keys (up to ROWS) from row `key`, followed by their values. */
template <int ROWS, int D, int DV, class E>
__device__ __forceinline__ void load_keys(uint32_t to, const flash_task<E> &task, int64_t key, int group, int count) {
    const mt_attention &s = task.shape;
    const int channels = (int)s.head_size, values = (int)s.value_size;
    load_tile<ROWS, D>(to, task.k + key * s.k_stride + group * channels, s.k_stride, count, channels);
    load_tile<ROWS, DV>(to + ROWS * D * 2, task.v + key * s.v_stride + group * values, s.v_stride, count, values);
}

/* The same for queries and their dout. */
template <int ROWS, int D, int DV, class E>
__device__ __forceinline__ void load_queries(uint32_t to, const flash_task<E> &task, int64_t query, int head,
                                             int count) {
    const mt_attention &s = task.shape;
    const int channels = (int)s.head_size, values = (int)s.value_size;
    load_tile<ROWS, D>(to, task.q + query * s.q_stride + head * channels, s.q_stride, count, channels);
    load_tile<ROWS, DV>(to + ROWS * D * 2, task.dout + query * s.out_stride + head * values, s.out_stride, count,
                        values);
}

/* Starts the copy of the token numbers of `count` rows, up to ROWS. */
template <int ROWS> __device__ __forceinline__ void load_indices(int64_t (&to)[ROWS], const int64_t *from, int count) {
    static_assert(ROWS <= THREADS, "a thread a number");
    int row = threadIdx.x;
    if (row < ROWS) mt_copy8_async(mt_shared_address(to + row), from + row, row < count);
}

/* c[16 TILES, N] += a[16 TILES, D] b[N, D]^T: the warp's rows of tile a times all rows of tile b. */
template <class E, int TILES, int N, int D>
__device__ __forceinline__ void multiply_rows(float (&c)[TILES][N / 8][4], uint32_t a, uint32_t b) {
    constexpr int A_ROWS = 16 * TILES * WARPS;
    int row = threadIdx.x / 32 * 16 * TILES;
    uint32_t down = mt_lane_down(), across = mt_lane_across();
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t x[TILES][4], y[4];
#pragma unroll
        for (int t = 0; t < TILES; t++) mt_ldmatrix(x[t], mt_tile_block<A_ROWS>(a, down, row + 16 * t, k));
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            mt_ldmatrix(y, mt_tile_block<N>(b, across, n, k));
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mt_mma_of<E>(c[t][n / 8], x[t], y[0], y[1]);
                mt_mma_of<E>(c[t][n / 8 + 1], x[t], y[2], y[3]);
            }
        }
    }
}

/* c[16 TILES, D] += p[16 TILES, N] x[N, D]: weights in registers times all rows of tile x. */
template <class E, int TILES, int N, int D>
__device__ __forceinline__ void multiply_weights(float (&c)[TILES][D / 8][4], const uint32_t (&p)[TILES][N / 16][4],
                                                 uint32_t x) {
    uint32_t down = mt_lane_down();
#pragma unroll
    for (int k = 0; k < N; k += 16)
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            uint32_t y[4];
            mt_ldmatrix_transposed(y, mt_tile_block<N>(x, down, k, n));
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mt_mma_of<E>(c[t][n / 8], p[t][k / 16], y[0], y[1]);
                mt_mma_of<E>(c[t][n / 8 + 1], p[t][k / 16], y[2], y[3]);
            }
        }
}

/* Stores the warp's rows of c, limited to the `count` rows of the tile, to rows at `to`. They pass through the warp's
 * rows of a tile that no other warp reads, so that stores are 16 bytes wide. */
template <int TILES, int D, class E>
__device__ __forceinline__ void store_rows(E *to, int64_t stride, int count, int channels,
                                           const float (&c)[TILES][D / 8][4], uint32_t tile, bool accumulate) {
    constexpr int ROWS = 16 * TILES * WARPS, CHUNKS = D / 8;
    int warp_row = threadIdx.x / 32 * 16 * TILES, lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                mt_store_shared(tile + mt_tile_chunk<ROWS>(warp_row + row_of(t, e), n) + col_of(0, 0) * 2,
                                mt_pair_from_float(E(), c[t][n][e], c[t][n][e + 1]));
    __syncwarp();
    for (int i = lane; i < 16 * TILES * CHUNKS; i += 32) {
        int row = warp_row + i / CHUNKS, chunk = i % CHUNKS;
        if (row >= count || chunk * 8 >= channels) continue;
        uint4 *at = (uint4 *)(to + row * stride + chunk * 8),
              x = mt_load_shared16(tile + mt_tile_chunk<ROWS>(row, chunk));
        if (accumulate) {
            uint4 old = *at;
            x = make_uint4(add_pair<E>(x.x, old.x), add_pair<E>(x.y, old.y), add_pair<E>(x.z, old.z),
                           add_pair<E>(x.w, old.w));
        }
        *at = x;
    }
}

/* Shared memory of dropout in kernels that own queries, after their other tiles: the indices of the block's queries and
 * of the keys of each stage, and the bits of the queries. */
template <int QUERIES, int KEYS> struct row_masks {
    int64_t q_index[QUERIES], k_index[2][KEYS];
    kept_keys<KEYS> kept[QUERIES];
};

/* Draws the masks of the warp's 16 TILES queries, which begin at row `warp_row` of the block, and of the keys of a
 * stage. `query` and `key` are their positions in the span. */
template <int TILES, int QUERIES, int KEYS>
__device__ __forceinline__ void draw_by_row(row_masks<QUERIES, KEYS> &to, const mt_masks &masks, uint64_t head,
                                            const band &seen, int query, int warp_row, int key) {
    range keys = keys_of(seen, query, 16 * TILES);
    draw_masks<16 * TILES>(to.kept + warp_row, masks, head, to.q_index + warp_row, to.k_index[key / KEYS % 2],
                           {keys.first - key, keys.end - key});
}

/* Reads the bits of the selected keys in place of masks that are drawn. `query` is the row of the block's first query,
 * `rows` the number of its queries in the span. Returns false if the warp's queries attend to no key of the stage. */
template <int TILES, int QUERIES, int KEYS>
__device__ __forceinline__ bool select_by_row(row_masks<QUERIES, KEYS> &to, const mt_selection &from, int64_t query,
                                              int rows, int warp_row, int key) {
    const int row = warp_row + (int)threadIdx.x % (16 * TILES);
    const uint32_t *bits = (const uint32_t *)(from.bits + (query + row) * from.words) + key / 32;
    kept_keys<KEYS> kept;
#pragma unroll
    for (int word = 0; word < KEYS / 32; word++) kept.words[word] = row < rows ? bits[word] : 0;
    __syncwarp(); // the bits of the stage before are no longer read
    to.kept[row] = kept;
    __syncwarp();
    return __any_sync(0xffffffff, kept.words[0] != 0 || kept.words[KEYS / 32 - 1] != 0);
}

/* Bytes of shared memory of a kernel that owns queries, with masks or without; biases follow. */
template <class SIZE, bool MASKS> static constexpr __host__ __device__ int bytes_by_row() {
    return SIZE::BYTES + (MASKS ? (int)sizeof(row_masks<SIZE::QUERIES, SIZE::KEYS>) : 0);
}

/* ---- biases by distance ------------------------------------------------------------------------------------------ */

/* Beyond this distance all are in one bucket on either side; other tables are left to the definition. */
enum { RADIUS = 128, DISTANCES = 2 * RADIUS + 1 };

/* A head's biases, and the buckets, of distances -RADIUS to RADIUS. */
struct bias_table {
    float bias[DISTANCES];
    unsigned char bucket[DISTANCES];
};

template <class E> __device__ __forceinline__ void fill_biases(bias_table &to, const flash_task<E> &task, int head) {
    for (int i = threadIdx.x; i < DISTANCES; i += THREADS) {
        int bucket = bucket_of(task.buckets, i - RADIUS);
        to.bucket[i] = (unsigned char)bucket;
        to.bias[i] = mt_to_float(((const E *)task.shape.bias.w)[bucket * task.shape.num_heads + head]);
    }
}

/* score = scale score + bias. `distance` is that of the first key of the warp's part from its first query. Along a
 * diagonal of blocks of 8 x 8 scores a lane's elements have the same two distances. Rows are queries, or keys if
 * TRANSPOSED. */
template <bool TRANSPOSED, int TILES, int N>
__device__ __forceinline__ void add_biases(float (&score)[TILES][N][4], const bias_table &table, int distance,
                                           float scale) {
#pragma unroll
    for (int diagonal = 1 - 2 * TILES; diagonal < N; diagonal++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int further = 8 * diagonal + col_of(0, e) - row_of(0, 0);
            int from_query = distance + (TRANSPOSED ? -further : further);
            float bias = table.bias[min(max(from_query, -RADIUS), +RADIUS) + RADIUS];
#pragma unroll
            for (int row = 0; row < 2 * TILES; row++) {
                const int n = diagonal + row;
                if (n >= 0 && n < N) {
                    float &at = score[row / 2][n][row % 2 * 2 + e];
                    at = at * scale + bias;
                }
            }
        }
}

/* Sums of the gradients of scores by distance, in shared memory of each warp: those of a tile by row within blocks of 8
 * and by position, 8 diagonal + column; and those of all tiles so far. */
template <int KEYS, int TILES> struct distance_sums {
    static constexpr int POSITIONS = KEYS + 16 * TILES - 8;
    float rows[WARPS][8][POSITIONS], so_far[WARPS][DISTANCES];
};

template <int KEYS, int TILES> __device__ __forceinline__ void sums_begin(distance_sums<KEYS, TILES> &sums) {
    for (int i = threadIdx.x; i < WARPS * DISTANCES; i += THREADS) sums.so_far[i / DISTANCES][i % DISTANCES] = 0;
}

/* Adds the warp's gradients of a tile, in a fixed order; `distance` as in add_biases. */
template <int KEYS, int TILES>
__device__ __forceinline__ void sums_add(distance_sums<KEYS, TILES> &sums, const float (&ds)[TILES][KEYS / 8][4],
                                         int distance) {
    constexpr int N = KEYS / 8, POSITIONS = distance_sums<KEYS, TILES>::POSITIONS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *so_far = sums.so_far[warp], ends[2] = {0, 0}; // of distances up to -RADIUS, and from RADIUS on
    __syncwarp();                                        // the rows and sums of the tile before are complete
#pragma unroll
    for (int diagonal = 1 - 2 * TILES; diagonal < N; diagonal++) {
        float2 sum = {0, 0};
#pragma unroll
        for (int row = 0; row < 2 * TILES; row++) {
            const int n = diagonal + row;
            if (n >= 0 && n < N) sum.x += ds[row / 2][n][row % 2 * 2], sum.y += ds[row / 2][n][row % 2 * 2 + 1];
        }
        *(float2 *)&sums.rows[warp][lane / 4][8 * (diagonal + 2 * TILES - 1) + lane % 4 * 2] = sum;
    }
    __syncwarp();
    for (int i = lane; i < POSITIONS + 7; i += 32) { // a distance each: positions i - 7 + row
        float sum = 0;
#pragma unroll
        for (int row = 0; row < 8; row++) {
            int position = i - 7 + row;
            if (position >= 0 && position < POSITIONS) sum += sums.rows[warp][row][position];
        }
        int from_query = distance - 8 * (2 * TILES - 1) + i - 7;
        if (abs(from_query) < RADIUS)
            so_far[from_query + RADIUS] += sum;
        else
            ends[from_query > 0] += sum;
    }
    float before = mt_warp_sum(ends[0]), behind = mt_warp_sum(ends[1]);
    if (lane == 0) so_far[0] += before, so_far[2 * RADIUS] += behind;
}

/* Writes the block's sums by bucket; all threads of the block. */
template <int KEYS, int TILES>
__device__ __forceinline__ void sums_store(float *to, distance_sums<KEYS, TILES> &sums, const bias_table &table) {
    __syncthreads();
    for (int i = threadIdx.x; i < DISTANCES; i += THREADS)
        for (int warp = 1; warp < WARPS; warp++) sums.so_far[0][i] += sums.so_far[warp][i];
    __syncthreads();
    if (threadIdx.x >= BUCKETS) return;
    float sum = 0;
    for (int i = 0; i < DISTANCES; i++) sum += table.bucket[i] == threadIdx.x ? sums.so_far[0][i] : 0;
    to[threadIdx.x] = sum;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Registers per lane for 16 TILES rows of c: DV / 2 fp32 for each 16 rows of outputs, KEYS / 2 for scores. With two row
 * tiles per warp each ldmatrix of keys and values is used twice; mma on Hopper needs this because shared memory
 * delivers 128 bytes per clock. D 192 uses half as many keys per tile, for the 99 KiB of shared memory of sm_86 and
 * sm_89. */
template <int D, int DV> struct forward_size {
    static constexpr int TILES = DV > 128 ? 1 : 2, QUERIES = 16 * TILES * WARPS, KEYS = D == 192 ? 32 : 64;
    static constexpr int STAGE = KEYS * (D + DV) * 2, BYTES = QUERIES * D * 2 + 2 * STAGE; // a stage: keys and values
};

template <class E, int D, int DV, bool DROPS, bool SELECTS, bool BIASED>
__global__ void __launch_bounds__(THREADS, DV > 128 ? 1 : 2)
    mma_forward(const flash_task<E> task, const mt_masks masks) {
    using size = forward_size<D, DV>;
    constexpr int TILES = size::TILES, QUERIES = size::QUERIES, KEYS = size::KEYS;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t q_tile = mt_shared_address(memory), stages = q_tile + QUERIES * D * 2;
    auto &drawn = *(row_masks<QUERIES, KEYS> *)(memory + size::BYTES);
    auto &biases = *(bias_table *)(memory + bytes_by_row<size, (DROPS || SELECTS)>());
    const mt_attention &shape = task.shape;
    const int channels = (int)shape.head_size, values = (int)shape.value_size;
    const int warp_row = threadIdx.x / 32 * 16 * TILES;
    const tile t = tile_of_block<false>(task, blockIdx.x, QUERIES);
    const int group = t.head / (int)(shape.num_heads / shape.num_groups), rows = (int)t.span.q_len - t.first;
    const band seen = band_of(t.span, shape.window);
    const range keys = keys_of(seen, t.first, QUERIES);
    const int64_t query = t.span.q_start + t.first;
    auto load_stage = [&](int key) {
        const int64_t row = mt_key_row(shape.pages, t.span.k_start + key);
        load_keys<KEYS, D, DV>(stages + key / KEYS % 2 * size::STAGE, task, row, group, seen.k_len - key);
        if constexpr (DROPS)
            load_indices(drawn.k_index[key / KEYS % 2], shape.k_index + t.span.k_start + key, seen.k_len - key);
    };

    const int shift = (int)(t.span.k_len - t.span.q_len);
    const float scale = BIASED ? 1 : shape.scale; // of scores, which with biases are scaled
    float out[TILES][DV / 8][4];
    softmax<TILES> state;
    clear(out);
    softmax_begin(state);
    if constexpr (BIASED) fill_biases(biases, task, t.head);
    load_tile<QUERIES, D>(q_tile, task.q + query * shape.q_stride + t.head * channels, shape.q_stride, rows, channels);
    if constexpr (DROPS) load_indices(drawn.q_index, shape.q_index + query, rows);
    int key = keys.first / KEYS * KEYS;
    if (key < keys.end) load_stage(key);
    for (; key < keys.end; key += KEYS) {
        mt_copies_wait();
        __syncthreads(); // this stage has arrived, and the other one is no longer read
        if (key + KEYS < keys.end) load_stage(key + KEYS);
        const uint32_t k_tile = stages + key / KEYS % 2 * size::STAGE, v_tile = k_tile + KEYS * D * 2;
        float score[TILES][KEYS / 8][4], shrink[TILES][2];
        if constexpr (DROPS)
            draw_by_row<TILES>(drawn, masks, shape.first_head + t.head, seen, t.first + warp_row, warp_row, key);
        if constexpr (SELECTS)
            if (!select_by_row<TILES>(drawn, task.selection, query, rows, warp_row, key)) continue;
        uint32_t weights[TILES][KEYS / 16][4];
        clear(score);
        multiply_rows<E, TILES, KEYS, D>(score, q_tile, k_tile);
        if constexpr (BIASED) add_biases<false>(score, biases, key - (t.first + warp_row + shift), shape.scale);
        if constexpr (SELECTS)
            drop_by_row(score, drawn.kept + warp_row, -INFINITY);
        else if (!all_see(seen, t.first + warp_row, 16 * TILES, key, KEYS))
            hide<false>(score, seen, t.first + warp_row, key);
        softmax_step(state, score, shrink, scale * LOG2_E);
        scale_rows(out, shrink);
        if constexpr (DROPS) drop_by_row(score, drawn.kept + warp_row);
        pack_weights<E>(weights, score);
        multiply_weights<E, TILES, KEYS, DV>(out, weights, v_tile);
    }
    mt_copies_wait(); // copies may still be pending if the queries attend to no key
    __syncthreads();
    if constexpr (DROPS) scale_all(out, masks.kept);
    softmax_finish(state, out, task.lse + (query + warp_row) * shape.num_heads + t.head, shape.num_heads,
                   rows - warp_row, scale);
    store_rows<TILES, DV>(task.out + query * shape.out_stride + t.head * values, shape.out_stride, rows, values, out,
                          q_tile, false);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* With weights p and dp = dout v^T, the gradient of the scaled scores is ds = p (dp - row_dot), and dq = scale ds k, dk
 * = scale ds^T q, dv = p^T dout. p follows directly from lse, without a running maximum. */

/* row_dot = sum(out dout) for every query and head. Reads 4 DV bytes for each, once. DV / 8 lanes share a row. */
template <class E, int DV> __global__ void __launch_bounds__(THREADS) mma_row_dots(const flash_task<E> task) {
    constexpr int LANES = DV / 8, AT_ONCE = THREADS / LANES;
    const mt_attention &shape = task.shape;
    const tile t = tile_find<false>(task, blockIdx.x, ROW_DOT_QUERIES);
    int heads = (int)shape.num_heads, rows = min(ROW_DOT_QUERIES, (int)t.span.q_len - t.first);
    int channel = threadIdx.x % LANES * 8;
    for (int base = 0; base < rows * heads; base += AT_ONCE) {
        int pair = base + threadIdx.x / LANES, row = pair / heads, head = pair % heads;
        bool mine = row < rows;
        int64_t query = t.span.q_start + t.first + row;
        float sum = 0;
        if (mine && channel < shape.value_size) {
            int64_t at = query * shape.out_stride + head * shape.value_size + channel;
            mt_pack<float, 8> out = mt_to_float(mt_load<8>(task.out + at));
            mt_pack<float, 8> dout = mt_to_float(mt_load<8>(task.dout + at));
#pragma unroll
            for (int i = 0; i < 8; i++) sum += out.value[i] * dout.value[i];
        }
#pragma unroll
        for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
        if (mine && channel == 0) task.row_dot[query * heads + head] = sum;
    }
}

/* dq: a block owns queries and loops over keys, as in the forward. Registers hold dq, scores and dp. */
template <int D, int DV> struct backward_q_size {
    static constexpr int TILES = D > 128 ? 1 : 2, QUERIES = 16 * TILES * WARPS, KEYS = D > 64 ? 32 : 64;
    static constexpr int OWN = QUERIES * (D + DV) * 2, STAGE = KEYS * (D + DV) * 2, BYTES = OWN + 2 * STAGE;
};

template <class E, int D, int DV, bool DROPS, bool SELECTS, bool BIASED>
__global__ void __launch_bounds__(THREADS, D > 128 ? 1 : 2)
    mma_backward_q(const flash_task<E> task, const mt_masks masks) {
    using size = backward_q_size<D, DV>;
    constexpr int TILES = size::TILES, QUERIES = size::QUERIES, KEYS = size::KEYS;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t q_tile = mt_shared_address(memory), dout_tile = q_tile + QUERIES * D * 2;
    const uint32_t stages = q_tile + size::OWN;
    auto &drawn = *(row_masks<QUERIES, KEYS> *)(memory + size::BYTES);
    auto &sums = *(distance_sums<KEYS, TILES> *)(memory + bytes_by_row<size, (DROPS || SELECTS)>());
    auto &biases = *(bias_table *)(&sums + 1);
    const mt_attention &shape = task.shape;
    const tile t = tile_of_block<false>(task, blockIdx.x, QUERIES);
    const int group = t.head / (int)(shape.num_heads / shape.num_groups), rows = (int)t.span.q_len - t.first;
    const int warp_row = threadIdx.x / 32 * 16 * TILES;
    const band seen = band_of(t.span, shape.window);
    const range keys = keys_of(seen, t.first, QUERIES);
    const int64_t query = t.span.q_start + t.first, stat = (query + warp_row) * shape.num_heads + t.head;
    auto load_stage = [&](int key) {
        load_keys<KEYS, D, DV>(stages + key / KEYS % 2 * size::STAGE, task, t.span.k_start + key, group,
                               seen.k_len - key);
        if constexpr (DROPS)
            load_indices(drawn.k_index[key / KEYS % 2], shape.k_index + t.span.k_start + key, seen.k_len - key);
    };

    const int shift = (int)(t.span.k_len - t.span.q_len);
    float dq[TILES][D / 8][4];
    row_stats<TILES> stats;
    clear(dq);
    if constexpr (BIASED) fill_biases(biases, task, t.head), sums_begin(sums);
    load_row_stats(stats, task.lse + stat, task.row_dot + stat, shape.num_heads, rows - warp_row);
    load_queries<QUERIES, D, DV>(q_tile, task, query, t.head, rows);
    if constexpr (DROPS) load_indices(drawn.q_index, shape.q_index + query, rows);
    int key = keys.first / KEYS * KEYS;
    if (key < keys.end) load_stage(key);
    for (; key < keys.end; key += KEYS) {
        mt_copies_wait();
        __syncthreads();
        if (key + KEYS < keys.end) load_stage(key + KEYS);
        const uint32_t k_tile = stages + key / KEYS % 2 * size::STAGE, v_tile = k_tile + KEYS * D * 2;
        float score[TILES][KEYS / 8][4], dp[TILES][KEYS / 8][4];
        if constexpr (DROPS)
            draw_by_row<TILES>(drawn, masks, shape.first_head + t.head, seen, t.first + warp_row, warp_row, key);
        if constexpr (SELECTS)
            if (!select_by_row<TILES>(drawn, task.selection, query, rows, warp_row, key)) continue;
        uint32_t weights[TILES][KEYS / 16][4];
        clear(score);
        clear(dp);
        multiply_rows<E, TILES, KEYS, D>(score, q_tile, k_tile);
        const int distance = key - (t.first + warp_row + shift);
        if constexpr (BIASED) add_biases<false>(score, biases, distance, shape.scale);
        multiply_rows<E, TILES, KEYS, DV>(dp, dout_tile, v_tile);
        if constexpr (SELECTS)
            drop_by_row(score, drawn.kept + warp_row, -INFINITY);
        else if (!all_see(seen, t.first + warp_row, 16 * TILES, key, KEYS))
            hide<false>(score, seen, t.first + warp_row, key);
        weights_by_row(score, stats, (BIASED ? 1 : shape.scale) * LOG2_E);
        if constexpr (DROPS) drop_by_row(dp, drawn.kept + warp_row);
        gradients_by_row(score, dp, stats, DROPS ? masks.kept : 1);
        if constexpr (BIASED) sums_add(sums, score, distance);
        pack_weights<E>(weights, score);
        multiply_weights<E, TILES, KEYS, D>(dq, weights, k_tile);
    }
    mt_copies_wait();
    __syncthreads();
    scale_all(dq, shape.scale);
    store_rows<TILES, D>(task.dq + query * shape.q_stride + t.head * (int)shape.head_size, shape.q_stride, rows,
                         (int)shape.head_size, dq, q_tile, false);
    if constexpr (BIASED)
        if (task.dbias) {
            const int64_t part = blockIdx.x % (task.num_tiles * task.heads_together) / task.heads_together;
            sums_store(task.dbias + (part * shape.num_heads + t.head) * BUCKETS, sums, biases);
        }
}

/* dk and dv: a block owns keys and loops over the queries that attend to them, of all heads of the group. It computes
 * the transposed scores k q^T, whose rows it owns. Registers hold dk, dv, scores and dp. Above 128 value channels they
 * do not fit, and dk and dv use separate kernels. */
template <int D, int DV> struct backward_kv_size {
    static constexpr int TILES = D > 64 ? 1 : 2, KEYS = 16 * TILES * WARPS, QUERIES = D == 128 ? 64 : 32;
    static constexpr int OWN = KEYS * (D + DV) * 2, STAGE = QUERIES * (D + DV) * 2; // keys, values; queries, their dout
    static constexpr int STATS = OWN + 2 * STAGE, BYTES = STATS + 4 * QUERIES * 4;  // STATS: offset of lse and row_dot
};

/* Starts the copy of lse and row_dot of `count` queries, beginning at `at` with stride `heads`, to QUERIES floats
 * each. */
template <int QUERIES>
__device__ __forceinline__ void load_stats(uint32_t to, const flash_tiles &task, int64_t at, int64_t heads, int count) {
    static_assert(2 * QUERIES <= THREADS, "a thread a number");
    int row = threadIdx.x % QUERIES;
    const float *from = threadIdx.x < QUERIES ? task.lse : task.row_dot;
    if (threadIdx.x < 2 * QUERIES) mt_copy4_async(to + threadIdx.x * 4, from + at + row * heads, row < count);
}

/* The same in kernels that own keys: the indices of the block's keys and of the queries of each stage, and the bits of
 * the stage's queries for each warp's keys. */
template <int TILES, int QUERIES> struct column_masks {
    int64_t k_index[16 * TILES * WARPS], q_index[2][QUERIES];
    kept_keys<16 * TILES> kept[WARPS][QUERIES];
};

/* Bytes of shared memory of such a kernel, with masks or without; biases follow. */
template <class SIZE, bool MASKS> static constexpr __host__ __device__ int bytes_by_column() {
    return SIZE::BYTES + (MASKS ? (int)sizeof(column_masks<SIZE::TILES, SIZE::QUERIES>) : 0);
}

/* As select_by_row, for `rows` queries from row `query` and the warp's keys, which begin at `key` in the span. */
template <int TILES, int QUERIES>
__device__ __forceinline__ bool select_by_column(column_masks<TILES, QUERIES> &to, const mt_selection &from,
                                                 int64_t query, int rows, int key) {
    bool any = false;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < QUERIES; i += 32) {
        const int row = i + (int)threadIdx.x % 32;
        const uint32_t *bits = (const uint32_t *)(from.bits + (query + row) * from.words) + key / 32;
        uint32_t word = row < rows && key < 64 * from.words ? bits[0] >> key % 32 : 0;
        if constexpr (TILES == 1) word &= 0xffff;
        to.kept[threadIdx.x / 32][row].words[0] = (typename kept_keys<16 * TILES>::word) word;
        any |= word != 0;
    }
    __syncwarp();
    return __any_sync(0xffffffff, any);
}

/* Draws the masks of a stage's queries and the warp's 16 TILES keys. `query` and `first_key` are the positions in the
 * span of the stage and of the block's keys. */
template <int TILES, int QUERIES>
__device__ __forceinline__ void draw_by_column(column_masks<TILES, QUERIES> &to, const mt_masks &masks, uint64_t head,
                                               const band &seen, int query, int first_key, int stage) {
    const int warp = threadIdx.x / 32, row = warp * 16 * TILES;
    range keys = keys_of(seen, query, QUERIES);
    draw_masks<QUERIES>(to.kept[warp], masks, head, to.q_index[stage], to.k_index + row,
                        {keys.first - first_key - row, keys.end - first_key - row});
}

/* Packs the weights of probabilities that are kept. */
template <class E, int TILES, int N, int KEYS>
__device__ __forceinline__ void pack_kept(uint32_t (&p)[TILES][N][4], const float (&weight)[TILES][2 * N][4],
                                          const kept_keys<KEYS> *kept) {
    float c[TILES][2 * N][4];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[t][n][e] = weight[t][n][e];
    drop_by_column(c, kept);
    pack_weights<E>(p, c);
}

/* Adds the part of one tile of queries to dk and dv. The queries are at `q_tile`, followed by their dout; lse and
 * row_dot are at `stats`; the keys are at `k_tile`, followed by their values. `query` and `key` are the positions in
 * the span of the tile and of the warp's keys. With dropout `kept` are the bits of the queries, and a weight that is
 * kept has the factor `factor`; dv receives it at the end. In sparse attention `kept` are the selected keys. `distance`
 * is that of the warp's first key from the tile's first query. */
template <class E, int D, int DV, bool MAKE_DK, bool MAKE_DV, bool DROPS, bool SELECTS, bool BIASED, int TILES, int MK,
          int MV>
__device__ __forceinline__ void backward_kv_step(float (&dk)[TILES][MK][4], float (&dv)[TILES][MV][4], uint32_t k_tile,
                                                 uint32_t q_tile, const float *stats, const band &seen, int query,
                                                 int key, float scale, const kept_keys<16 * TILES> *kept, float factor,
                                                 const bias_table &biases, int distance) {
    using size = backward_kv_size<D, DV>;
    constexpr int QUERIES = size::QUERIES;
    const uint32_t v_tile = k_tile + size::KEYS * D * 2, dout_tile = q_tile + QUERIES * D * 2;
    float score[TILES][QUERIES / 8][4];
    uint32_t weights[TILES][QUERIES / 16][4];
    clear(score);
    multiply_rows<E, TILES, QUERIES, D>(score, k_tile, q_tile);
    if constexpr (BIASED) add_biases<true>(score, biases, distance, scale);
    const bool past_end = BIASED && query + QUERIES > seen.q_len; // zeros have biases too
    if constexpr (SELECTS)
        drop_by_column(score, kept, -INFINITY);
    else if (past_end || !all_see(seen, query, QUERIES, key, 16 * TILES))
        hide<true>(score, seen, query, key);
    weights_by_column(score, stats, (BIASED ? 1 : scale) * LOG2_E);
    if constexpr (MAKE_DV) {
        if constexpr (DROPS)
            pack_kept<E>(weights, score, kept);
        else
            pack_weights<E>(weights, score);
        multiply_weights<E, TILES, QUERIES, DV>(dv, weights, dout_tile);
    }
    if constexpr (MAKE_DK) {
        float dp[TILES][QUERIES / 8][4];
        clear(dp);
        multiply_rows<E, TILES, QUERIES, DV>(dp, v_tile, dout_tile);
        if constexpr (DROPS) drop_by_column(dp, kept);
        gradients_by_column(score, dp, stats + QUERIES, DROPS ? factor : 1);
        pack_weights<E>(weights, score);
        multiply_weights<E, TILES, QUERIES, D>(dk, weights, q_tile);
    }
}

template <class E, int D, int DV, bool MAKE_DK, bool MAKE_DV, bool DROPS, bool SELECTS, bool BIASED>
__global__ void __launch_bounds__(THREADS, D > 128 ? 1 : 2)
    mma_backward_kv(const flash_task<E> task, const mt_masks masks) {
    using size = backward_kv_size<D, DV>;
    constexpr int TILES = size::TILES, QUERIES = size::QUERIES, KEYS = size::KEYS;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t k_tile = mt_shared_address(memory), stages = k_tile + size::OWN;
    auto &drawn = *(column_masks<TILES, QUERIES> *)(memory + size::BYTES);
    auto &biases = *(bias_table *)(memory + bytes_by_column<size, (DROPS || SELECTS)>());
    const mt_attention &shape = task.shape;
    const int channels = (int)shape.head_size, values = (int)shape.value_size;
    const int heads = (int)(shape.num_heads / shape.num_groups);
    const tile t = tile_of_block<true>(task, blockIdx.x, KEYS); // t.head is a group of heads
    const band seen = band_of(t.span, shape.window);
    const range queries = queries_of(seen, t.first, KEYS);
    const int first_query = queries.first / QUERIES * QUERIES, rows = seen.k_len - t.first;
    const int tiles = max(0, queries.end - first_query + QUERIES - 1) / QUERIES, steps = tiles * heads;
    const int64_t key = t.span.k_start + t.first;
    auto load_stage = [&](int step) {
        int head = t.head * heads + step / tiles, first = first_query + step % tiles * QUERIES;
        int64_t query = t.span.q_start + first;
        uint32_t stats = k_tile + size::STATS + step % 2 * 2 * QUERIES * 4;
        load_queries<QUERIES, D, DV>(stages + step % 2 * size::STAGE, task, query, head, seen.q_len - first);
        load_stats<QUERIES>(stats, task, query * shape.num_heads + head, shape.num_heads, seen.q_len - first);
        if constexpr (DROPS) load_indices(drawn.q_index[step % 2], shape.q_index + query, seen.q_len - first);
    };

    float dk[TILES][MAKE_DK ? D / 8 : 1][4], dv[TILES][MAKE_DV ? DV / 8 : 1][4];
    int head = -1; // of the table of biases
    clear(dk);
    clear(dv);
    load_keys<KEYS, D, DV>(k_tile, task, key, t.head, rows);
    if constexpr (DROPS) load_indices(drawn.k_index, shape.k_index + key, rows);
    if (steps > 0) load_stage(0);
    for (int step = 0; step < steps; step++) {
        mt_copies_wait();
        __syncthreads();
        if (step + 1 < steps) load_stage(step + 1);
        const float *stats = (const float *)(memory + size::STATS) + step % 2 * 2 * QUERIES;
        const int query = first_query + step % tiles * QUERIES, warp_key = t.first + threadIdx.x / 32 * 16 * TILES;
        if constexpr (BIASED)
            if (t.head * heads + step / tiles != head) {
                head = t.head * heads + step / tiles;
                fill_biases(biases, task, head); // no thread reads the table of the head before
                __syncthreads();
            }
        if constexpr (DROPS)
            draw_by_column(drawn, masks, shape.first_head + t.head * heads + step / tiles, seen, query, t.first,
                           step % 2);
        if constexpr (SELECTS)
            if (!select_by_column<TILES, QUERIES>(drawn, task.selection, t.span.q_start + query, seen.q_len - query,
                                                  warp_key))
                continue;
        backward_kv_step<E, D, DV, MAKE_DK, MAKE_DV, DROPS, SELECTS, BIASED>(
            dk, dv, k_tile, stages + step % 2 * size::STAGE, stats, seen, query, warp_key, shape.scale,
            drawn.kept[threadIdx.x / 32], masks.kept, biases, warp_key - (query + (int)(t.span.k_len - t.span.q_len)));
    }
    mt_copies_wait();
    __syncthreads();
    if constexpr (MAKE_DK) {
        scale_all(dk, shape.scale);
        store_rows<TILES, D>(task.dk + key * shape.k_stride + t.head * channels, shape.k_stride, rows, channels, dk,
                             k_tile, task.accumulate);
    }
    if constexpr (MAKE_DV && DROPS) scale_all(dv, masks.kept);
    if constexpr (MAKE_DV)
        store_rows<TILES, DV>(task.dv + key * shape.v_stride + t.head * values, shape.v_stride, rows, values, dv,
                              k_tile + KEYS * D * 2, task.accumulate);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* Launches one block for every tile of `rows` queries or keys and each of `heads` heads (groups, for keys). */
template <class E>
static void launch(void (*kernel)(flash_task<E>, mt_masks), flash_task<E> task, const mt_attention *a, bool of_keys,
                   int rows, int bytes, mt_stream *stream) {
    int64_t heads = of_keys ? a->num_groups : a->num_heads;
    task.num_tiles = tile_count(&a->spans, of_keys, rows);
    task.heads_together = heads_in_section(a, heads, heads / a->num_groups);
    if (task.num_tiles == 0) return;
    mt_cuda_take_shared(kernel, bytes);
    kernel<<<(unsigned)(task.num_tiles * heads), THREADS, bytes, mt_cuda_stream(stream)>>>(
        task, mt_dropout_masks(&a->dropout));
    MT_CUDA_LAUNCHED();
}

template <class E, int D, int DV, bool DROPS, bool SELECTS, bool BIASED>
static bool forward(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    using size = forward_size<D, DV>;
    const int bytes = bytes_by_row<size, (DROPS || SELECTS)>() + (BIASED ? (int)sizeof(bias_table) : 0);
    if (bytes > (int)mt_cuda_device()->sharedMemPerBlockOptin) return false;
    flash_task<E> task = flash_task_of<E>(a);
    task.selection = selection;
    launch(mma_forward<E, D, DV, DROPS, SELECTS, BIASED>, task, a, false, size::QUERIES, bytes, stream);
    return true;
}

template <class E, int D, int DV, bool DROPS, bool SELECTS, bool BIASED>
static void launch_backward_kv(const flash_task<E> &task, const mt_attention *a, mt_stream *stream) {
    using size = backward_kv_size<D, DV>;
    const int bytes = bytes_by_column<size, (DROPS || SELECTS)>() + (BIASED ? (int)sizeof(bias_table) : 0);
    if constexpr (DV <= 128) {
        launch(mma_backward_kv<E, D, DV, true, true, DROPS, SELECTS, BIASED>, task, a, true, size::KEYS, bytes, stream);
    } else {
        launch(mma_backward_kv<E, D, DV, true, false, DROPS, SELECTS, BIASED>, task, a, true, size::KEYS, bytes,
               stream);
        launch(mma_backward_kv<E, D, DV, false, true, DROPS, SELECTS, BIASED>, task, a, true, size::KEYS, bytes,
               stream);
    }
}

template <class E, int DV> static void row_dots_of_size(const mt_attention *a, mt_stream *stream) {
    int blocks = tile_count(&a->spans, false, ROW_DOT_QUERIES);
    if (blocks == 0) return;
    mma_row_dots<E, DV><<<(unsigned)blocks, THREADS, 0, mt_cuda_stream(stream)>>>(flash_task_of<E>(a));
    MT_CUDA_LAUNCHED();
}

template <class E> static void row_dots(const mt_attention *a, mt_stream *stream) {
    int64_t DV = a->value_size;
    if (DV <= 64) return row_dots_of_size<E, 64>(a, stream);
    return DV <= 128 ? row_dots_of_size<E, 128>(a, stream) : row_dots_of_size<E, 256>(a, stream);
}

void mt_attention_row_dots(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    return dtype == MT_F16 ? row_dots<__half>(a, stream) : row_dots<bf16>(a, stream);
}

template <class E, int D, int DV, bool DROPS, bool SELECTS, bool BIASED>
static bool backward(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    using size = backward_q_size<D, DV>;
    constexpr bool MASKS = DROPS || SELECTS;
    const int of_table = BIASED ? (int)sizeof(bias_table) : 0;
    const int of_sums = BIASED ? (int)sizeof(distance_sums<size::KEYS, size::TILES>) : 0;
    const int bytes = bytes_by_row<size, MASKS>() + of_sums + of_table;
    const int kv_bytes = bytes_by_column<backward_kv_size<D, DV>, MASKS>() + of_table;
    if ((bytes > kv_bytes ? bytes : kv_bytes) > (int)mt_cuda_device()->sharedMemPerBlockOptin) return false;
    flash_task<E> task = flash_task_of<E>(a);
    task.selection = selection;
    const int64_t parts = tile_count(&a->spans, false, size::QUERIES);
    if (BIASED && a->bias.dw) {
        int64_t part_bytes = parts * a->num_heads * BUCKETS * (int64_t)sizeof(float);
        if (part_bytes > stream->workspace_bytes) return false;
        task.dbias = (float *)mt_cuda_workspace(stream, part_bytes);
    }
    row_dots<E>(a, stream);
    launch(mma_backward_q<E, D, DV, DROPS, SELECTS, BIASED>, task, a, false, size::QUERIES, bytes, stream);
    if (task.dbias) mt_attention_add_dbias(a, task.dbias, parts, stream);
    over_disjoint_keys<E>(a, stream, launch_backward_kv<E, D, DV, DROPS, SELECTS, BIASED>, selection);
    return true;
}

/* A tile has the smallest of these channel counts that holds a head; channels past the head's are 0. */
template <class E, bool DROPS, bool SELECTS>
static bool forward_of_size(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    int64_t D = a->head_size, DV = a->value_size;
    if (D <= 64 && DV <= 64) return forward<E, 64, 64, DROPS, SELECTS, false>(a, selection, stream);
    if (D <= 128 && DV <= 128) return forward<E, 128, 128, DROPS, SELECTS, false>(a, selection, stream);
    if (D <= 192 && DV <= 128) return forward<E, 192, 128, DROPS, SELECTS, false>(a, selection, stream);
    return forward<E, 256, 256, DROPS, SELECTS, false>(a, selection, stream);
}

template <class E, bool DROPS, bool SELECTS>
static bool backward_of_size(const mt_attention *a, const mt_selection &selection, mt_stream *stream) {
    int64_t D = a->head_size, DV = a->value_size;
    if (D <= 64 && DV <= 64) return backward<E, 64, 64, DROPS, SELECTS, false>(a, selection, stream);
    if (D <= 128 && DV <= 128) return backward<E, 128, 128, DROPS, SELECTS, false>(a, selection, stream);
    if (D <= 192 && DV <= 128) return backward<E, 192, 128, DROPS, SELECTS, false>(a, selection, stream);
    return backward<E, 256, 256, DROPS, SELECTS, false>(a, selection, stream);
}

/* With biases by distance; heads of T5 have 64 or 128 channels. */
template <class E, bool DROPS> static bool biased_forward_of_size(const mt_attention *a, mt_stream *stream) {
    int64_t D = a->head_size, DV = a->value_size;
    if (D <= 64 && DV <= 64) return forward<E, 64, 64, DROPS, false, true>(a, {}, stream);
    return D <= 128 && DV <= 128 && forward<E, 128, 128, DROPS, false, true>(a, {}, stream);
}

template <class E, bool DROPS> static bool biased_backward_of_size(const mt_attention *a, mt_stream *stream) {
    int64_t D = a->head_size, DV = a->value_size;
    if (D <= 64 && DV <= 64) return backward<E, 64, 64, DROPS, false, true>(a, {}, stream);
    return D <= 128 && DV <= 128 && backward<E, 128, 128, DROPS, false, true>(a, {}, stream);
}

template <class E> static bool forward_of_type(const mt_attention *a, mt_stream *stream) {
    bool drops = a->dropout.p > 0;
    if (a->bias.w)
        return drops ? biased_forward_of_size<E, true>(a, stream) : biased_forward_of_size<E, false>(a, stream);
    return drops ? forward_of_size<E, true, false>(a, {}, stream) : forward_of_size<E, false, false>(a, {}, stream);
}

template <class E> static bool backward_of_type(const mt_attention *a, mt_stream *stream) {
    bool drops = a->dropout.p > 0;
    if (a->bias.w)
        return drops ? biased_backward_of_size<E, true>(a, stream) : biased_backward_of_size<E, false>(a, stream);
    return drops ? backward_of_size<E, true, false>(a, {}, stream) : backward_of_size<E, false, false>(a, {}, stream);
}

/* True if the table of a block has all distances with a bias of their own. */
static bool biases_serve(const mt_attention *a) {
    if (!a->bias.w) return true;
    if (a->bias.buckets > BUCKETS) return false;
    return mt_relative_bucket(&a->bias, -RADIUS) == mt_relative_bucket(&a->bias, -INT_MAX) &&
           mt_relative_bucket(&a->bias, RADIUS) == mt_relative_bucket(&a->bias, INT_MAX);
}

static bool mma_serves(const mt_attention *a, mt_dtype dtype) {
    return flash_serves(a, dtype, true) && a->head_size <= 256 && a->value_size <= 256 && biases_serve(a);
}

/* Keys in pages, which decoding has, are without dropout. */
extern "C" bool mt_attention_mma_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    bool drops = a->dropout.p > 0;
    if (!mma_serves(a, dtype) || !pages_serve(a, forward_size<64, 64>::KEYS) || (drops && a->pages.table)) return false;
    return dtype == MT_F16 ? forward_of_type<__half>(a, stream) : forward_of_type<bf16>(a, stream);
}

extern "C" bool mt_attention_mma_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (!mma_serves(a, dtype)) return false;
    return dtype == MT_F16 ? backward_of_type<__half>(a, stream) : backward_of_type<bf16>(a, stream);
}

bool mt_selected_mma_forward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    if (!mma_serves(a, dtype) || !pages_serve(a, forward_size<64, 64>::KEYS) || a->dropout.p > 0) return false;
    return dtype == MT_F16 ? forward_of_size<__half, false, true>(a, *s, stream)
                           : forward_of_size<bf16, false, true>(a, *s, stream);
}

bool mt_selected_mma_backward(const mt_attention *a, const mt_selection *s, mt_dtype dtype, mt_stream *stream) {
    if (!mma_serves(a, dtype) || a->dropout.p > 0) return false;
    return dtype == MT_F16 ? backward_of_size<__half, false, true>(a, *s, stream)
                           : backward_of_size<bf16, false, true>(a, *s, stream);
}
