/* indexer_hopper.cu: the scores of sparse attention's indexer on the tensor cores of sm_90a.
 *
 * A product has 64 keys as rows, for each of two warpgroups, and 128 heads of some queries as columns, so that the sum
 * over a query's heads is one over columns: a lane adds its own columns, and four lanes share a row. A block keeps
 * the heads of its queries in shared memory while tiles of keys pass by. The heads of four products take 128 KiB; a
 * warpgroup sums one product during the next. */
#include "sparse_attention.cuh"

#ifdef MT_HAVE_SM90A
#include "attention_hopper.cuh"

template <int HEADS> struct scores_size {
    static constexpr int D = 128, COLUMNS = 128, PRODUCTS = 4, EACH = COLUMNS / HEADS; // EACH: queries of a product
    static constexpr int QUERIES = EACH * PRODUCTS, KEYS = 64 * WORKERS, STAGES = 2;
    static constexpr int Q_TILE = COLUMNS * D * 2, K_TILE = KEYS * D * 2, K = PRODUCTS * Q_TILE;
    static constexpr int WEIGHTS = K + STAGES * K_TILE, RING = WEIGHTS + QUERIES * HEADS * 4;
    static constexpr int Q_FILLED = RING + mt_ring<STAGES>::BYTES, BYTES = Q_FILLED + 8;
};

enum { SCORE_WARPS = 4 * WORKERS + 1, SCORE_THREADS = 32 * SCORE_WARPS }; // the last warp copies

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* From a product's results, columns (query, head): lane l of the four that share rows g and g + 8 receives the values
 * (query, h) with number 2 query + h = EACH / 2 l + i in sums[i]; h: of the row. */
template <int HEADS>
__device__ __forceinline__ void sum_heads(float (&sums)[scores_size<HEADS>::EACH / 2], const float (&c)[1][16][4],
                                          const float *weights) {
    constexpr int EACH = scores_size<HEADS>::EACH;
    const int lane = threadIdx.x % 4;
    float all[2 * EACH];
#pragma unroll
    for (int q = 0; q < EACH; q++) {
        all[2 * q] = all[2 * q + 1] = 0;
#pragma unroll
        for (int n = 0; n < HEADS / 8; n++) {
            const float2 w = *(const float2 *)(weights + q * HEADS + 8 * n + 2 * lane);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                all[2 * q + h] += w.x * positive(c[0][q * HEADS / 8 + n][2 * h]);
                all[2 * q + h] += w.y * positive(c[0][q * HEADS / 8 + n][2 * h + 1]);
            }
        }
    }
#pragma unroll
    for (int step = 2, half = EACH; step > 0; step /= 2, half /= 2) { // a lane passes on half of its values
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float sent = upper ? all[i] : all[i + half], kept = upper ? all[i + half] : all[i];
            all[i] = kept + __shfl_xor_sync(all_lanes, sent, step);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) sums[i] = all[i];
}
#endif

template <int HEADS>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    hopper_scores(const indexer_task<bf16> task, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = scores_size<HEADS>;
    constexpr int KEYS = size::KEYS, EACH = size::EACH;
    extern __shared__ __align__(1024) char memory[];
    __shared__ int64_t starts[size::QUERIES];                    // row of the first key
    __shared__ int counts[size::QUERIES], behind[size::QUERIES]; // keys, 0: not needed; number of the block's first one
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t at = mt_shared_address(memory), q_filled = at + size::Q_FILLED;
    const mt_ring<size::STAGES> ring{at + size::RING};
    float *weights = (float *)(memory + size::WEIGHTS);
    const int64_t first_query = (int64_t)blockIdx.x * size::QUERIES;
    for (int q = warp; q < size::QUERIES; q += SCORE_WARPS) {
        const int64_t i = first_query + q, t = task.query(i);
        query_keys keys = {};
        if (i < task.rows) keys = keys_of_query(task.spans, task.num_spans, t);
        const bool needed = keys.count > task.least;
        if (lane == 0) starts[q] = keys.span.k_start, counts[q] = needed ? (int)keys.count : 0;
        for (int h = lane; h < HEADS; h += 32)
            weights[q * HEADS + h] =
                needed ? task.scale * mt_to_float(task.weights[(t - task.first_row) * HEADS + h]) : 0;
    }
    if (threadIdx.x == 0) {
        ring.init(1, 4 * WORKERS);
        mt_barrier_init(q_filled, 1);
        mt_barriers_ready();
    }
    __syncthreads();
    int64_t first = INT64_MAX, end = 0;
    for (int q = 0; q < size::QUERIES; q++)
        if (counts[q] > 0) first = min(first, starts[q]), end = max(end, starts[q] + counts[q]);
    if (first >= end) return;
    if (threadIdx.x < size::QUERIES) behind[threadIdx.x] = (int)(first - starts[threadIdx.x]);
    __syncthreads();
    const int tiles = (int)((end - first + KEYS - 1) / KEYS);

    if (warp == 4 * WORKERS) {
        if (lane > 0) return;
        mt_barrier_arrive_expect(q_filled, size::K);
        const int row = (int)((task.query(first_query) - task.first_row) * HEADS);
        for (int p = 0; p < size::PRODUCTS; p++)
            mt_copy_box(at + p * size::Q_TILE, q_map, 0, row + p * size::COLUMNS, 0, q_filled);
        for (int n = 0; n < tiles; n++) {
            ring.wait_free(n);
            mt_barrier_arrive_expect(ring.filled(n), size::K_TILE);
            mt_copy_box(at + size::K + n % size::STAGES * size::K_TILE, k_map, 0, (int)first + n * KEYS, 0,
                        ring.filled(n));
        }
        return;
    }

    const int group = warp / 4, key_row = 16 * warp + lane / 4; // of the tile: this lane's and the one 8 rows further
    float even[1][16][4], odd[1][16][4];                        // results of products in turn
    uint32_t wrong = 0;                                         // bit q: a score of query q is not a number
    auto start = [&](float(&c)[1][16][4], int n, int p) {
        const uint32_t k_tile = at + size::K + n % size::STAGES * size::K_TILE + group * 64 * 128;
        mt_wgmma_hold(c[0]);
        mt_wgmma_fence();
        multiply_rows<size::D, KEYS, size::COLUMNS>(c, k_tile, at + p * size::Q_TILE);
    };
    auto store = [&](float(&c)[1][16][4], int n, int p) {
        mt_wgmma_hold(c[0]);
        float sums[EACH / 2];
        sum_heads<HEADS>(sums, c, weights + p * size::COLUMNS);
#pragma unroll
        for (int i = 0; i < EACH / 2; i++) {
            const int number = EACH / 2 * (lane % 4) + i, q = EACH * p + number / 2;
            const int j = behind[q] + n * KEYS + key_row + number % 2 * 8;
            const bool is_key = j >= 0 && j < counts[q], hidden = isnan(sums[i]) && !task.is_loss;
            wrong |= (uint32_t)(is_key && hidden) << q;
            if (is_key) task.scores[(first_query + q) * task.columns + j] = hidden ? -INFINITY : sums[i];
        }
    };
    mt_barrier_wait(q_filled, 0);
    for (int n = 0; n < tiles; n++) {
        ring.wait_filled(n);
        start(even, n, 0);
        start(odd, n, 1);
        mt_wgmma_wait<1>();
        store(even, n, 0);
        start(even, n, 2);
        mt_wgmma_wait<1>();
        store(odd, n, 1);
        start(odd, n, 3);
        mt_wgmma_wait<1>();
        store(even, n, 2);
        mt_wgmma_wait<0>();
        ring.release(n);
        store(odd, n, 3);
    }
    for (int q = 0; q < size::QUERIES; q++)
        if (wrong >> q & 1) task.checked(NAN, task.query(first_query + q));
#endif
}

template <int HEADS>
static void launch_hopper_scores(const indexer_task<bf16> &task, int64_t key_rows, mt_stream *stream) {
    using size = scores_size<HEADS>;
    const int64_t rows = (task.first - task.first_row + task.rows) * HEADS, panels = size::D / 64;
    const mt_boxes queries = {task.q, MT_BF16, panels, rows, 64, 64, size::D, (int)panels, size::COLUMNS};
    const mt_boxes keys = {task.k, MT_BF16, panels, key_rows, 64, 64, size::D, (int)panels, size::KEYS};
    CUtensorMap q = mt_tensor_map(&queries), k = mt_tensor_map(&keys);
    auto kernel = hopper_scores<HEADS>;
    mt_cuda_take_shared(kernel, size::BYTES);
    kernel<<<(unsigned)mt_divide_up(task.rows, size::QUERIES), SCORE_THREADS, size::BYTES, mt_cuda_stream(stream)>>>(
        task, q, k);
    MT_CUDA_LAUNCHED();
}

bool mt_indexer_hopper_scores(const indexer_task<bf16> &task, int64_t key_rows, mt_stream *stream) {
    if (mt_cuda_device()->major != 9 || mt_cuda_kernel_arch() != 90) return false;
    if ((task.H != 32 && task.H != 64) || task.D != 128 || task.listed || task.pages.table || key_rows == 0)
        return false;
    if ((uintptr_t)task.q % 16 != 0 || (uintptr_t)task.k % 16 != 0) return false;
    task.H == 32 ? launch_hopper_scores<32>(task, key_rows, stream) : launch_hopper_scores<64>(task, key_rows, stream);
    return true;
}

#else

bool mt_indexer_hopper_scores(const indexer_task<bf16> &task, int64_t key_rows, mt_stream *stream) {
    (void)task, (void)key_rows, (void)stream;
    return false;
}

#endif
