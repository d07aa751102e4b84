/* attention_hopper.cuh: what the kernels of attention for sm_90a share: buffers, the queue of tiles, products, and the
 * layout of results. attention_hopper.cu explains the design. */
#ifndef MT_ATTENTION_HOPPER_CUH
#define MT_ATTENTION_HOPPER_CUH

#include "attention.cuh"

#ifdef MT_HAVE_SM90A
#include "hopper.cuh"

enum { WARPGROUP = 128, WORKERS = 2, THREADS = WARPGROUP * (1 + WORKERS) }; // per block; WORKERS warpgroups compute

/* ---- buffers ----------------------------------------------------------------------------------------------------- */

/* Tensor maps: [panels of 64 channels, rows, 64], in boxes of all panels of a head and the rows of a tile. */
struct tensor_maps {
    CUtensorMap q, dout, k, v;
};

/* Starts the copy of a tile's rows, beginning at `row`, of the head whose first panel is `panel`. */
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap &map, int row, int panel, uint32_t barrier) {
    mt_copy_box(to, map, panel, row, 0, barrier);
}

/* Sets rows [count, ROWS) of a tile to 0; after tail_cleared() the products of the warpgroup may read it. Rows past the
 * end of a span belong to another span or to nobody, and a weight of 0 times NaN is NaN. */
template <int ROWS, int D> __device__ __forceinline__ void clear_tail(uint32_t tile, int count) {
    for (int panel = 0; panel < D / 64; panel++)
        for (int at = count * 128 + threadIdx.x % WARPGROUP * 16; at < ROWS * 128; at += WARPGROUP * 16)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + panel * ROWS * 128 + at), "r"(0)
                         : "memory");
}
__device__ __forceinline__ void tail_cleared() {
    mt_fence_async();
    mt_named_barrier_wait(1 + threadIdx.x / WARPGROUP, WARPGROUP);
}
/* For two adjacent tiles, of D and DV channels. */
template <int ROWS, int D, int DV> __device__ __forceinline__ void clear_tails(uint32_t tiles, int count) {
    clear_tail<ROWS, D>(tiles, count);
    clear_tail<ROWS, DV>(tiles + ROWS * D * 2, count);
    tail_cleared();
}

/* ---- mapping of blocks to tiles ---------------------------------------------------------------------------------- */

/* A persistent block processes one tile after another. A scheduler warp finds the next tile once all loads of the
 * current one have been issued. */
enum { NO_MORE = -1 }; // head of the tile after the last
template <class TILE> struct queue_of {
    TILE *slot;
    mt_ring<1> turns;
    static constexpr int BYTES = (int)sizeof(TILE) + mt_ring<1>::BYTES;

    __device__ __forceinline__ explicit queue_of(char *memory) {
        slot = (TILE *)memory;
        turns.barriers = mt_shared_address(memory + sizeof(TILE));
    }
    __device__ __forceinline__ void init(int readers = 4 * WORKERS + 1) const {
        turns.init(1, readers);
    }
    __device__ __forceinline__ void put(int round, const TILE &t) const {
        if (threadIdx.x % 32 == 0) {
            *slot = t;
            mt_barrier_arrive(turns.filled(round));
        }
        __syncwarp();
    }
    /* Readers release the scheduler's buffer: consumers and reducers when they have read the tile, a producer that is
     * not the scheduler when it has issued the last load of the tile. */
    __device__ __forceinline__ TILE get(int round) const {
        turns.wait_filled(round);
        return *slot;
    }
};
using tile_queue = queue_of<tile>;

/* The first tile that no block has taken. Without a counter there is one block per tile. */
__device__ __forceinline__ int next_tile(const flash_task<bf16> &task) {
    if (!task.counter) return 1 << 30;
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(task.counter, 1);
    return (int)gridDim.x + __shfl_sync(0xffffffff, taken, 0);
}

/* Tiles with the most work come first, so that the last ones are short. A block starts with the tile of its own number,
 * and takes another when it is about to finish. The assignment of tiles to blocks varies from run to run; the results
 * do not. */
template <bool OF_KEYS>
__device__ __forceinline__ void hand_out_tiles(const flash_task<bf16> &task, const tile_queue &queue, int64_t heads,
                                               int size) {
    const int tiles = task.num_tiles * (int)heads;
    for (int round = 0, index = (int)blockIdx.x;; round++) {
        queue.turns.wait_free(round);
        if (round > 0) index = next_tile(task);
        tile t = {};
        t.head = NO_MORE;
        if (index < tiles) t = tile_of_block<OF_KEYS>(task, index, size);
        queue.put(round, t);
        if (index >= tiles) break;
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Starts c[64, N] = a[64, D] b[N, D]^T, with a in a tile of A_ROWS rows. */
template <int D, int A_ROWS, int N>
__device__ __forceinline__ void multiply_rows(float (&c)[1][N / 8][4], uint32_t a, uint32_t b) {
    const uint64_t a_rows = mt_wgmma_operand(a, 16), b_rows = mt_wgmma_operand(b, 16);
#pragma unroll
    for (int k = 0; k < D; k += 16)
        mt_wgmma(c[0], mt_wgmma_moved(a_rows, k / 64 * A_ROWS * 128 + k % 64 * 2),
                 mt_wgmma_moved(b_rows, k / 64 * N * 128 + k % 64 * 2), k > 0);
    mt_wgmma_commit();
}

/* Starts c[64, D] += p[64, ROWS] x[ROWS, D], with the weights p in registers. */
template <int D, int ROWS>
__device__ __forceinline__ void multiply_weights(float (&c)[1][D / 8][4], const uint32_t (&p)[1][ROWS / 16][4],
                                                 uint32_t x) {
    const uint64_t rows = mt_wgmma_operand(x, ROWS * 128);
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) mt_wgmma(c[0], p[0][k / 16], mt_wgmma_moved(rows, k * 128), true);
    mt_wgmma_commit();
}

/* The warpgroups alternate in starting products, so that one computes its softmax during the products of the other. The
 * first warpgroup begins. */
__device__ __forceinline__ void turns_begin(int group) {
    if (group == 1) mt_named_barrier_arrive(8, WORKERS * WARPGROUP);
}
__device__ __forceinline__ void turn_take(int group) {
    mt_named_barrier_wait(8 + group, WORKERS * WARPGROUP);
}
__device__ __forceinline__ void turn_pass(int group) {
    mt_named_barrier_arrive(8 + (group ^ 1), WORKERS * WARPGROUP);
}

/* Transposes within a quad: x[j] of lane i and x[i] of lane j are exchanged. */
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j & bit) continue;
            bool upper = threadIdx.x & bit;
            uint32_t got = __shfl_xor_sync(0xffffffff, upper ? x[j] : x[j + bit], bit);
            if (upper)
                x[j] = got;
            else
                x[j + bit] = got;
        }
}

/* Stores the warp's 16 rows of c, limited to `count` rows, to rows at `to`. A lane holds two channels of every block of
 * 8; four blocks are exchanged in a quad so that it stores 16 bytes at a time. */
template <int D>
__device__ __forceinline__ void store_rows(bf16 *to, int64_t stride, int count, const float (&c)[1][D / 8][4],
                                           bool accumulate) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < D / 8; n += 4) {
            uint32_t x[4];
            int row = row_of(0, 2 * h);
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] = mt_pack_bf16(c[0][n + j][2 * h], c[0][n + j][2 * h + 1]);
            transpose_quad(x);
            if (row >= count) continue;
            uint4 *at = (uint4 *)(to + row * stride + (n + threadIdx.x % 4) * 8);
            if (accumulate) {
                uint4 old = *at;
                x[0] = add_pair<bf16>(x[0], old.x), x[1] = add_pair<bf16>(x[1], old.y);
                x[2] = add_pair<bf16>(x[2], old.z), x[3] = add_pair<bf16>(x[3], old.w);
            }
            *at = make_uint4(x[0], x[1], x[2], x[3]);
        }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* The tensor map of `rows` rows of `heads` heads of D channels, with tiles of `box` rows of a head. */
static inline CUtensorMap tensor_map(const void *x, int64_t rows, int64_t stride, int64_t heads, int64_t D, int box) {
    const mt_boxes panels = {x, MT_BF16, heads * D / 64, rows, 64, 64, stride, (int)(D / 64), box};
    return mt_tensor_map(&panels);
}

/* Tensor maps of the rows that the spans cover, for the tile sizes of queries and keys. */
static inline tensor_maps maps_of(const mt_attention *a, int queries, int keys) {
    int64_t H = a->num_heads, G = a->num_groups, D = a->head_size, DV = a->value_size, q_rows = 1, k_rows = 1;
    for (int64_t i = 0; i < a->spans.count; i++) {
        const mt_span *span = &a->spans.host[i];
        if (span->q_len > 0 && span->q_start + span->q_len > q_rows) q_rows = span->q_start + span->q_len;
        if (span->k_len > 0 && span->k_start + span->k_len > k_rows) k_rows = span->k_start + span->k_len;
    }
    if (a->pages.table) k_rows = a->pages.rows * a->pages.count;
    tensor_maps maps = {};
    maps.q = tensor_map(a->q, q_rows, a->q_stride, H, D, queries);
    if (a->dout) maps.dout = tensor_map(a->dout, q_rows, a->out_stride, H, DV, queries);
    maps.k = tensor_map(a->k, k_rows, a->k_stride, G, D, keys);
    maps.v = tensor_map(a->v, k_rows, a->v_stride, G, DV, keys);
    return maps;
}

/* The backward in one kernel (attention_hopper_backward.cu). `ordered`: repeats bit for bit. Returns false and enqueues
 * nothing for other heads than those of 128 channels, and where the stream's workspace does not hold its sums. */
bool mt_attention_hopper_one_kernel(const mt_attention *a, mt_stream *stream, bool ordered);

#endif
#endif
