/* sparse_attention.cu: sparse attention: the indexer's scores, its choice of keys, and its loss; attention over keys
 * that are selected.
 *
 * The indexer scores some rows of queries at a time, in the stream's workspace, and a second kernel selects from them:
 * memory is [rows, T] whatever T is. On tensor cores a warp has a query: its heads are the rows of a product, whose
 * operand stays in registers while keys pass by, and the sum over heads ends in the registers as well
 * (indexer_hopper.cu: on wgmma, with keys as rows). The choice is
 * exact: three histograms of parts of a score's bits find the k-th greatest. Of scores that equal it the first are
 * taken, or else the choice of torch (megatron.c, section 19a): then a block splits the row as torch does.
 *
 * Attention of many queries multiplies whole tiles of keys, on the rungs of dense attention, and reads from a bit for
 * each pair whether a query attends to a key: heads share these bits, and no head reads its keys once for each query. A
 * query of a step of generation reads the keys of its list. */
#include "sparse_attention.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, PLAIN = 128 };

/* ---- sums over a block ------------------------------------------------------------------------------------------- */

/* Of several threads, all of a block, the sum or the maximum, for all of them. `parts`: memory of a number a warp. */
template <class X, class Combine> __device__ static X over_block(X x, X *parts, Combine combine) {
    int lane = (int)threadIdx.x % LANES, warps = (int)blockDim.x / LANES;
    for (int step = LANES / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(all_lanes, x, step));
    __syncthreads(); // parts of a call before are no longer read
    if (lane == 0) parts[threadIdx.x / LANES] = x;
    __syncthreads();
    x = parts[0];
    for (int i = 1; i < warps; i++) x = combine(x, parts[i]);
    return x;
}
template <class X> __device__ static X sum_over_block(X x, X *parts) {
    return over_block(x, parts, [](X a, X b) { return a + b; });
}
__device__ static float max_over_block(float x, float *parts) {
    return over_block(x, parts, [](float a, float b) { return mt_maximum(a, b); });
}

/* x[D] . row[D], x in shared memory; wide: the row allows 16-byte loads. */
template <class E> __device__ __forceinline__ float dot_row(const float *x, const E *row, int D, bool wide) {
    constexpr int N = mt_vector<E>::size;
    float sum = 0;
    if (!wide) {
        for (int c = 0; c < D; c++) sum += x[c] * mt_to_float(row[c]);
        return sum;
    }
    for (int c = 0; c < D; c += N) {
        mt_pack<float, N> pack = mt_to_float(mt_load<N>(row + c));
#pragma unroll
        for (int i = 0; i < N; i++) sum += x[c + i] * pack.value[i];
    }
    return sum;
}

template <class E> static bool rows_are_wide(const void *x, int64_t stride, int64_t D) {
    int64_t N = 16 / (int64_t)sizeof(E);
    return (uintptr_t)x % 16 == 0 && stride % N == 0 && D % N == 0;
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

template <class E> static indexer_task<E> task_of(const mt_indexer_args *a) {
    indexer_task<E> task = {};
    task.q = (const E *)a->q, task.k = (const E *)a->k, task.weights = (const E *)a->weights;
    task.spans = a->spans->device, task.num_spans = a->spans->count, task.pages = a->pages;
    task.first_row = a->first_row, task.topk = a->topk, task.H = (int)a->H, task.D = (int)a->D;
    task.attention_q = (E *)a->attention_q, task.attention_q_stride = a->attention_q_stride;
    task.lengths = a->lengths, task.scale = a->scale, task.wide = rows_are_wide<E>(a->k, a->D, a->D);
    return task;
}

/* Any operands: a thread for each key of a query. Heads take turns, so that a key is read once for each. */
template <class E> __global__ void __launch_bounds__(PLAIN) plain_scores(const indexer_task<E> task) {
    extern __shared__ float q[]; // [D]
    int64_t t = task.query(blockIdx.y), row = t - task.first_row, j = (int64_t)blockIdx.x * PLAIN + threadIdx.x;
    query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    int64_t count = task.count(keys);
    if (count <= task.least || (int64_t)blockIdx.x * PLAIN >= count) return;
    const E *k = task.k + (j < count ? task.key_row(keys, t, j) : 0) * task.D;
    float score = 0;
    for (int h = 0; h < task.H; h++) {
        __syncthreads();
        for (int c = (int)threadIdx.x; c < task.D; c += PLAIN)
            q[c] = mt_to_float(task.q[(row * task.H + h) * task.D + c]);
        __syncthreads();
        float weight = task.scale * mt_to_float(task.weights[row * task.H + h]);
        if (j < count) score += weight * positive(dot_row(q, k, task.D, task.wide));
    }
    if (j < count) task.scores[(int64_t)blockIdx.y * task.columns + j] = task.checked(score, t);
}

/* Tensor cores: 16 HEADS heads of up to D channels, keys without pages and lists. A warp has a query; a block of 8
 * queries shares tiles of keys, [first, end) of the rows that one of them sees. */
enum { TILE_KEYS = 64 };

template <class E, int HEADS, int D> __global__ void __launch_bounds__(THREADS, 1) mma_scores(indexer_task<E> task) {
    constexpr int STEPS = D / 16, TILE = TILE_KEYS * D * 2, BLOCKS = TILE_KEYS / 8;
    extern __shared__ __align__(1024) char memory[];
    __shared__ int64_t ranges[2][WARPS];
    const uint32_t tiles = mt_shared_address(memory);
    const int lane = (int)threadIdx.x % LANES, warp = (int)threadIdx.x / LANES, g = lane / 4;
    const uint32_t place = mt_tile_chunk<8>(lane % 8, lane / 8); // of a lane's 16 bytes: see mt_tile_block
    const int64_t i = (int64_t)blockIdx.x * WARPS + warp, t = task.query(i), row = t - task.first_row;
    query_keys keys = {};
    if (i < task.rows) keys = keys_of_query(task.spans, task.num_spans, t);
    const bool needed = keys.count > task.least;
    if (lane == 0) {
        ranges[0][warp] = needed ? keys.span.k_start : INT64_MAX;
        ranges[1][warp] = needed ? keys.span.k_start + keys.count : 0;
    }
    __syncthreads();
    int64_t first = ranges[0][0], end = ranges[1][0];
    for (int w = 1; w < WARPS; w++) first = min(first, ranges[0][w]), end = max(end, ranges[1][w]);
    if (first >= end) return;

    uint32_t q[HEADS][STEPS][4];
    float weights[HEADS][2];
#pragma unroll
    for (int m = 0; m < HEADS; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int head = 16 * m + g + 8 * r;
            bool exists = needed && head < task.H;
            weights[m][r] = exists ? task.scale * mt_to_float(task.weights[row * task.H + head]) : 0;
            const E *from = task.q + (row * task.H + head) * task.D;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int c = 16 * s + 8 * half + lane % 4 * 2;
                    q[m][s][2 * half + r] = exists && c < task.D ? *(const uint32_t *)(from + c) : 0;
                }
        }
    }
    // From here on rows of keys count from the first one, in 32 bits: registers are scarce.
    const int length = (int)(end - first), own = (int)(keys.span.k_start - first), count = needed ? (int)keys.count : 0;
    const int row_of_thread = (int)threadIdx.x / (D / 8), chunk = (int)threadIdx.x % (D / 8);
    const bool exists = chunk * 8 < task.D;
    const E *from = task.k + (first + row_of_thread) * task.D + chunk * 8;
    auto load = [&](int at) {
        uint32_t to = tiles + (uint32_t)(at / TILE_KEYS % 2) * TILE;
#pragma unroll
        for (int r = 0; r < TILE_KEYS; r += THREADS / (D / 8))
            mt_copy16_async(to + mt_tile_chunk<TILE_KEYS>(row_of_thread + r, chunk), from + (int64_t)(at + r) * task.D,
                            exists && at + r + row_of_thread < length);
    };
    float *scores = task.scores + i * task.columns;
    load(0);
#pragma unroll 1
    for (int at = 0; at < length; at += TILE_KEYS) {
        mt_copies_wait();
        __syncthreads();
        if (at + TILE_KEYS < length) load(at + TILE_KEYS);
        const int begin = at - own; // in the query's span
        if (begin >= count || begin + TILE_KEYS <= 0) continue;
        const uint32_t tile = tiles + (uint32_t)(at / TILE_KEYS % 2) * TILE;
        float sums[BLOCKS][2];
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) {
            float c[HEADS][1][4];
            clear(c);
#pragma unroll
            for (int s = 0; s < STEPS; s += 2) { // a load has 8 keys of 32 channels
                uint32_t k[4];
                mt_ldmatrix(k, mt_tile_block<TILE_KEYS>(tile, place, 8 * n, 16 * s));
#pragma unroll
                for (int m = 0; m < HEADS; m++) {
                    mt_mma_of<E>(c[m][0], q[m][s], k[0], k[1]);
                    mt_mma_of<E>(c[m][0], q[m][s + 1], k[2], k[3]);
                }
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                sums[n][e] = 0;
#pragma unroll
                for (int m = 0; m < HEADS; m++) {
                    sums[n][e] += weights[m][0] * positive(c[m][0][e]);
                    sums[n][e] += weights[m][1] * positive(c[m][0][2 + e]);
                }
            }
        }
        // The eight lanes of a column share its sum: each step halves the columns that a lane has. g's are block g.
#pragma unroll
        for (int step = 4; step > 0; step /= 2) {
            bool upper = g & step;
#pragma unroll
            for (int n = 0; n < step; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float sent = upper ? sums[n][e] : sums[n + step][e];
                    float kept = upper ? sums[n + step][e] : sums[n][e];
                    sums[n][e] = kept + __shfl_xor_sync(all_lanes, sent, step * 4);
                }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int j = begin + col_of(g, e);
            if (j >= 0 && j < count) scores[j] = task.checked(sums[0][e], t);
        }
    }
    mt_copies_wait();
}

static int64_t longest_keys(const mt_indexer_args *a) {
    int64_t longest = a->longest > 1 ? a->longest : 1;
    for (int64_t s = 0; s < a->spans->count; s++)
        if (a->spans->host[s].k_len > longest) longest = a->spans->host[s].k_len;
    return longest;
}

/* True if queries of a span have successors in it: a step of generation has none, and its keys are far apart. */
static bool has_rows(const mt_spans *spans) {
    for (int64_t s = 0; s < spans->count; s++)
        if (spans->host[s].q_len > 1) return true;
    return false;
}

template <class E, int HEADS> static void launch_mma_scores(const indexer_task<E> &task, mt_stream *stream) {
    unsigned blocks = (unsigned)mt_divide_up(task.rows, WARPS);
    auto kernel = task.D <= 64 ? mma_scores<E, HEADS, 64> : mma_scores<E, HEADS, 128>;
    int bytes = 2 * TILE_KEYS * (task.D <= 64 ? 64 : 128) * 2;
    mt_cuda_take_shared(kernel, bytes);
    kernel<<<blocks, THREADS, bytes, mt_cuda_stream(stream)>>>(task);
    MT_CUDA_LAUNCHED();
}

static bool on_hopper = true, loss_in_tiles = true;

extern "C" void mt_cuda_select_on_hopper(bool on) {
    on_hopper = on;
}

extern "C" void mt_cuda_loss_on_tensor_cores(bool on) {
    loss_in_tiles = on;
}

/* The rows of keys that the spans cover. */
static int64_t key_rows_of(const mt_spans *spans) {
    int64_t rows = 0;
    for (int64_t s = 0; s < spans->count; s++) {
        int64_t end = spans->host[s].k_start + spans->host[s].k_len;
        if (end > rows) rows = end;
    }
    return rows;
}

/* Enqueues the scores of the task's rows. `most`: of keys of a row. */
template <class E>
static void launch_scores(const indexer_task<E> &task, const mt_spans *spans, bool on_tensor_cores, int64_t most,
                          mt_stream *stream) {
    if constexpr (std::is_same_v<E, bf16>)
        if (on_tensor_cores && on_hopper && mt_indexer_hopper_scores(task, key_rows_of(spans), stream)) return;
    if constexpr (!std::is_same_v<E, float>)
        if (on_tensor_cores) {
            if (task.H <= 16) return launch_mma_scores<E, 1>(task, stream);
            if (task.H <= 32) return launch_mma_scores<E, 2>(task, stream);
            return launch_mma_scores<E, 4>(task, stream);
        }
    dim3 grid((unsigned)mt_divide_up(most, PLAIN), (unsigned)task.rows);
    int64_t bytes = task.D * (int64_t)sizeof(float);
    mt_cuda_take_shared(plain_scores<E>, bytes);
    plain_scores<E><<<grid, PLAIN, (size_t)bytes, mt_cuda_stream(stream)>>>(task);
    MT_CUDA_LAUNCHED();
}

/* ---- the choice of keys ------------------------------------------------------------------------------------------ */

/* A score as a number with the same order; -0 is 0. */
__device__ static uint32_t order_of(float score) {
    uint32_t bits = __float_as_uint(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

enum { BINS = 2048, BINS_OF_THREAD = BINS / THREADS };

struct select_memory {
    int bins[BINS];
    int parts[WARPS];
    int bin, above, equal; // of the last search: the bin, the scores in higher ones, and those in it
};

/* The inclusive sum over this thread and those before it. All threads of the block call it. */
__device__ static int scan_block(int x, select_memory &memory) {
    int lane = (int)threadIdx.x % LANES, warp = (int)threadIdx.x / LANES;
    for (int step = 1; step < LANES; step *= 2) {
        int before = __shfl_up_sync(all_lanes, x, step);
        if (lane >= step) x += before;
    }
    __syncthreads();
    if (lane == LANES - 1) memory.parts[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; w++) x += memory.parts[w];
    return x;
}

/* Finds the bin of the `places`-th greatest of the scores that agree with `prefix` above the bits of `shift` and bins.
 */
__device__ static void find_bin(const float *scores, int64_t n, uint32_t prefix, int shift, int bits, int places,
                                select_memory &memory) {
    const uint32_t mask = (1u << bits) - 1, above = shift + bits == 32 ? 0 : ~0u << (shift + bits);
    for (int b = (int)threadIdx.x; b < BINS; b += THREADS) memory.bins[b] = 0;
    __syncthreads();
    enum { EACH = 8 }; // loads in flight
    for (int64_t base = threadIdx.x; base < n; base += THREADS * EACH) {
        float loaded[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) loaded[i] = base + i * THREADS < n ? scores[base + i * THREADS] : 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            uint32_t x = order_of(loaded[i]);
            if (base + i * THREADS < n && (x & above) == prefix) atomicAdd(&memory.bins[x >> shift & mask], 1);
        }
    }
    __syncthreads();
    int last = BINS - 1 - BINS_OF_THREAD * (int)threadIdx.x, mine = 0; // a thread's bins, from the greatest
    for (int b = 0; b < BINS_OF_THREAD; b++) mine += memory.bins[last - b];
    int before = scan_block(mine, memory) - mine;
    if (before < places && places <= before + mine)
        for (int b = last;; b--) {
            int in_bin = memory.bins[b];
            if (before + in_bin >= places) {
                memory.bin = b, memory.above = before, memory.equal = in_bin;
                break;
            }
            before += in_bin;
        }
    __syncthreads();
}

/* selected[k] = ascending numbers of the scores above `bound` and of the first `places` equal to it. */
__device__ static void write_selected(int32_t *selected, const float *scores, int64_t n, uint32_t bound, int places,
                                      select_memory &memory) {
    enum { EACH = 4 };
    int above = 0, equal = 0; // before the tile
    for (int64_t base = 0; base < n; base += THREADS * EACH) {
        int64_t first = base + (int64_t)threadIdx.x * EACH;
        uint32_t x[EACH];
        int counts = 0; // above in the high half, equal in the low one
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            x[i] = first + i < n ? order_of(scores[first + i]) : 0;
            counts += (x[i] > bound) << 16 | (first + i < n && x[i] == bound);
        }
        int end = scan_block(counts, memory), before = end - counts;
        int a = above + (before >> 16), e = equal + (before & 0xffff);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            bool is_above = x[i] > bound, is_equal = first + i < n && x[i] == bound;
            if (is_above || (is_equal && e < places)) selected[a + min(e, places)] = (int32_t)(first + i);
            a += is_above, e += is_equal;
        }
        __syncthreads(); // parts[] is complete until all threads have read it
        if (threadIdx.x == THREADS - 1) memory.above = a, memory.equal = e;
        __syncthreads();
        above = memory.above, equal = memory.equal;
    }
}

/* A score and its key. */
struct scored_key {
    float score;
    int32_t key;
};

__device__ static void swap_keys(scored_key *x, int64_t i, int64_t j) {
    scored_key other = x[i];
    x[i] = x[j], x[j] = other;
}

/* Moves the k greatest of x[n] to the front as torch.topk does: see mt_select_as_torch of megatron.c. Its split goes
 * from both ends at once: for each m it exchanges the m-th score from the left that is not above the pivot with the
 * m-th from the right that is not below it, as long as the first is left of the second. The block finds all of them, in
 * left[n] and right[n], both ascending, and exchanges all pairs. */
__device__ static void move_greatest_as_torch(scored_key *x, int *left, int *right, int n, int64_t k,
                                              select_memory &memory) {
    enum { EACH = 4 };
    int first = 0, last = n;
    while (last - first > 3) {
        if (threadIdx.x == 0) {
            int a = first + 1, b = first + (last - first) / 2, c = last - 1;
            float of_a = x[a].score, of_b = x[b].score, of_c = x[c].score;
            swap_keys(x, first,
                      of_a > of_b   ? (of_b > of_c   ? b
                                       : of_a > of_c ? c
                                                     : a)
                      : of_a > of_c ? a
                      : of_b > of_c ? c
                                    : b);
        }
        __syncthreads();
        const float pivot = x[first].score;
        int lefts = 0, rights = 0;
        for (int base = first + 1; base < last; base += THREADS * EACH) {
            const int at = base + (int)threadIdx.x * EACH;
            bool is_left[EACH], is_right[EACH];
            int counts = 0; // of left in the high half, of right in the low one
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float score = at + i < last ? x[at + i].score : 0;
                is_left[i] = at + i < last && score <= pivot, is_right[i] = at + i < last && score >= pivot;
                counts += is_left[i] << 16 | is_right[i];
            }
            int before = scan_block(counts, memory) - counts;
            int l = lefts + (before >> 16), r = rights + (before & 0xffff);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (is_left[i]) left[l++] = at + i;
                if (is_right[i]) right[r++] = at + i;
            }
            __syncthreads(); // parts[] is complete until all threads have read it
            if (threadIdx.x == THREADS - 1) memory.above = l, memory.equal = r;
            __syncthreads();
            lefts = memory.above, rights = memory.equal;
        }
        // The pairs to exchange are the first ones: a search in steps of `stride`, then within a step.
        const int pairs = min(lefts, rights), stride = (pairs + THREADS - 1) / THREADS;
        auto apart = [&](int m) { return m < pairs && left[m] < right[rights - 1 - m]; };
        const int begin = max(__syncthreads_count(apart((int)threadIdx.x * stride)) - 1, 0) * stride;
        int swaps = begin;
        for (int i = (int)threadIdx.x; i - (int)threadIdx.x < stride; i += THREADS)
            swaps += __syncthreads_count(i < stride && apart(begin + i));
        int cut = swaps < lefts ? left[swaps] : last;
        if (swaps > 0) cut = min(cut, right[rights - swaps]);
        for (int m = (int)threadIdx.x; m < swaps; m += THREADS) swap_keys(x, left[m], right[rights - 1 - m]);
        __syncthreads();
        if (cut <= k - 1)
            first = cut;
        else
            last = cut;
    }
    if (threadIdx.x == 0)
        for (int i = first + 1; i < last; i++)
            for (int j = i; j > first && x[j].score > x[j - 1].score; j--) swap_keys(x, j, j - 1);
    __syncthreads();
}

enum { TIED = -2 }; // selected[0] of a row that select_ties selects

/* A block selects the keys of a row. Of equal scores the first are selected, or with as_torch select_ties does it. */
template <class E>
__global__ void __launch_bounds__(THREADS)
    select_keys(const indexer_task<E> task, int32_t *selected_rows, bool as_torch) {
    __shared__ select_memory memory;
    const int64_t k = task.topk, i = blockIdx.x, t = task.query(i);
    query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    int32_t *selected = selected_rows + (t - task.first_row) * k;
    const float *scores = task.scores + i * task.columns;
    if (keys.count <= k) { // all
        for (int64_t j = threadIdx.x; j < k; j += THREADS) selected[j] = j < keys.count ? (int32_t)j : -1;
        return;
    }
    int places = (int)k;
    uint32_t bound = 0;
    const int shifts[3] = {21, 10, 0}, bits[3] = {11, 11, 10};
    for (int pass = 0; pass < 3; pass++) {
        find_bin(scores, keys.count, bound, shifts[pass], bits[pass], places, memory);
        bound |= (uint32_t)memory.bin << shifts[pass], places -= memory.above;
        __syncthreads();
    }
    if (as_torch && memory.equal > places && task.length(keys) < 64 * k) {
        if (threadIdx.x == 0) selected[0] = TIED;
        return;
    }
    write_selected(selected, scores, keys.count, bound, places, memory);
}

/* A block selects the keys of some rows, one after another, as torch does. ties: memory of [blocks, 2 columns], for
 * scores with their keys, then for positions. */
template <class E>
__global__ void __launch_bounds__(THREADS)
    select_ties(const indexer_task<E> task, int32_t *selected_rows, scored_key *ties) {
    __shared__ select_memory memory;
    const int64_t k = task.topk;
    scored_key *x = ties + (int64_t)blockIdx.x * 2 * task.columns;
    int *left = (int *)(x + task.columns), *right = left + task.columns;
    for (int64_t i = blockIdx.x; i < task.rows; i += gridDim.x) {
        int64_t t = task.query(i);
        int32_t *selected = selected_rows + (t - task.first_row) * k;
        float *scores = task.scores + i * task.columns;
        if (selected[0] != TIED) continue;
        query_keys keys = keys_of_query(task.spans, task.num_spans, t);
        const int64_t n = task.length(keys);
        for (int64_t j = threadIdx.x; j < n; j += THREADS) x[j] = {j < keys.count ? scores[j] : -INFINITY, (int32_t)j};
        __syncthreads(); // all threads have read selected[0]
        move_greatest_as_torch(x, left, right, (int)n, k, memory);
        for (int64_t j = threadIdx.x; j < n; j += THREADS) scores[j] = 0;
        __syncthreads();
        for (int64_t j = threadIdx.x; j < k; j += THREADS) scores[x[j].key] = 1;
        __syncthreads();
        write_selected(selected, scores, n, order_of(0.5f), 0, memory);
        __syncthreads();
    }
}

template <class E> static void indexer_forward(const mt_indexer_args *a, mt_stream *stream) {
    int64_t longest = longest_keys(a), columns = mt_cuda_score_columns(longest), of_row = columns * 4;
    bool torch = a->ties == MT_TIES_TORCH;
    int64_t rows = a->rows < MT_CUDA_INDEXER_ROWS ? a->rows : MT_CUDA_INDEXER_ROWS, blocks = rows;
    if (blocks > MT_CUDA_INDEXER_BLOCKS) blocks = MT_CUDA_INDEXER_BLOCKS;
    while (rows > 1 && (rows + 4 * blocks) * of_row > stream->workspace_bytes) {
        rows = mt_divide_up(rows, 2);
        if (blocks > rows) blocks = rows;
    }
    float *scores = (float *)mt_cuda_workspace(stream, (rows + (torch ? 4 * blocks : 0)) * of_row);
    scored_key *ties = torch ? (scored_key *)(scores + rows * columns) : NULL;
    indexer_task<E> task = task_of<E>(a);
    task.scores = scores, task.columns = columns, task.least = a->topk;
    bool on_tensor_cores = has_rows(a->spans) && !a->pages.table && a->H <= 64 && a->D <= 128 && a->D % 8 == 0 &&
                           task.wide && (uintptr_t)a->q % 4 == 0;
    for (int64_t row = 0; row < a->rows; row += rows) {
        task.first = a->first_row + row, task.rows = a->rows - row < rows ? a->rows - row : rows;
        if (longest > a->topk) launch_scores(task, a->spans, on_tensor_cores, longest, stream);
        select_keys<E><<<(unsigned)task.rows, THREADS, 0, mt_cuda_stream(stream)>>>(task, a->selected, torch);
        MT_CUDA_LAUNCHED();
        if (!torch || longest <= a->topk) continue;
        unsigned grid = (unsigned)(task.rows < blocks ? task.rows : blocks);
        select_ties<E><<<grid, THREADS, 0, mt_cuda_stream(stream)>>>(task, a->selected, ties);
        MT_CUDA_LAUNCHED();
    }
}

extern "C" void mt_cuda_indexer_forward(const mt_indexer_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->rows > 0) MT_CUDA_DISPATCH(dtype, indexer_forward, a, stream);
}

/* ---- tiles of 64 rows, for 4 warps ---------------------------------------------------------------------------------
 */

enum { TILE_THREADS = 128, TILE_ROWS = 64 };
static_assert((int)TILE_ROWS == (int)MT_CUDA_LOSS_ROWS, "a tile has the queries of a block of the loss");

/* Starts the copy of `count` rows, up to TILE_ROWS, to a tile; the others become zeros. */
template <int D, class E>
__device__ __forceinline__ void load_rows(uint32_t tile, const E *from, int64_t stride, int64_t count) {
    for (int n = (int)threadIdx.x; n < TILE_ROWS * (D / 8); n += TILE_THREADS) {
        const int row = n / (D / 8), chunk = n % (D / 8);
        mt_copy16_async(tile + mt_tile_chunk<TILE_ROWS>(row, chunk), from + row * stride + chunk * 8, row < count);
    }
}

/* c[16, 64] = the warp's rows of tile a times all rows of tile b. */
template <class E, int D>
__device__ __forceinline__ void multiply_tiles(float (&c)[1][TILE_ROWS / 8][4], uint32_t a, uint32_t b) {
    const uint32_t down = mt_lane_down(), across = mt_lane_across();
    clear(c);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t x[4], y[4];
        mt_ldmatrix(x, mt_tile_block<TILE_ROWS>(a, down, (int)threadIdx.x / LANES * 16, k));
#pragma unroll
        for (int n = 0; n < TILE_ROWS; n += 16) {
            mt_ldmatrix(y, mt_tile_block<TILE_ROWS>(b, across, n, k));
            mt_mma_of<E>(c[0][n / 8], x, y[0], y[1]);
            mt_mma_of<E>(c[0][n / 8 + 1], x, y[2], y[3]);
        }
    }
}

/* c[16, D] += p[16, 64] times the rows of a tile, after p is rounded to E. */
template <class E, int D>
__device__ __forceinline__ void add_weighted_rows(float (&c)[1][D / 8][4], const float (&p)[1][TILE_ROWS / 8][4],
                                                  uint32_t tile) {
    const uint32_t down = mt_lane_down();
    uint32_t pairs[1][TILE_ROWS / 16][4];
    pack_weights<E>(pairs, p);
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k += 16)
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            uint32_t y[4];
            mt_ldmatrix_transposed(y, mt_tile_block<TILE_ROWS>(tile, down, k, n));
            mt_mma_of<E>(c[0][n / 8], pairs[0][k / 16], y[0], y[1]);
            mt_mma_of<E>(c[0][n / 8 + 1], pairs[0][k / 16], y[2], y[3]);
        }
}

/* ---- the loss ---------------------------------------------------------------------------------------------------- */

/* The loss of a query and whether it counts. */
struct query_loss {
    double loss;
    double count;
};

/* slopes = coeff (softmax of scores - target) and the loss of a query, a block each; the scores are in task.scores. */
template <class E>
__global__ void __launch_bounds__(THREADS)
    divergences(const indexer_task<E> task, const float *shares, float *slopes, query_loss *losses,
                const int64_t *token_index, int64_t width, float coeff) {
    __shared__ float float_parts[WARPS];
    __shared__ double parts[WARPS];
    int64_t t = task.query(blockIdx.x);
    query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    int64_t count = task.count(keys);
    const float *scores = task.scores + (int64_t)blockIdx.x * task.columns;
    shares += (int64_t)blockIdx.x * width, slopes += (int64_t)blockIdx.x * width;
    if (mt_is_padding(token_index, t)) count = 0;
    for (int64_t j = count + threadIdx.x; j < width; j += THREADS) slopes[j] = 0;
    if (threadIdx.x == 0) losses[blockIdx.x] = {0, count > 0 ? 1.0 : 0.0};
    if (count == 0) return;
    float largest = -INFINITY;
    for (int64_t j = threadIdx.x; j < count; j += THREADS) largest = fmaxf(largest, scores[j]);
    largest = max_over_block(largest, float_parts);
    double total = 0, sum = 0, loss = 0;
    for (int64_t j = threadIdx.x; j < count; j += THREADS)
        total += (double)shares[j], sum += (double)expf(scores[j] - largest);
    total = sum_over_block(total, parts), sum = sum_over_block(sum, parts);
    float log_sum = logf((float)sum), inverse = total > 0 ? (float)(1 / total) : 0;
    for (int64_t j = threadIdx.x; j < count; j += THREADS) {
        float target = shares[j] * inverse, log_share = scores[j] - largest - log_sum;
        if (target > 0) loss += (double)(target * (logf(target) - log_share));
        slopes[j] = coeff * (expf(log_share) - target);
    }
    loss = sum_over_block(loss, parts);
    if (threadIdx.x == 0) losses[blockIdx.x].loss = loss;
}

/* sums[2] += the losses of the block, in order. */
__global__ void add_losses(double *sums, const query_loss *losses, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) sums[0] += losses[i].loss, sums[1] += losses[i].count;
}

/* dq and dweights of a head of a query: a block. */
template <class E>
__global__ void __launch_bounds__(PLAIN)
    loss_of_queries(const indexer_task<E> task, const float *slopes, int64_t width, E *dq, E *dweights) {
    extern __shared__ float q[]; // [2, D]
    __shared__ float factors[PLAIN], parts[PLAIN / LANES];
    __shared__ int64_t rows[PLAIN];
    const int D = task.D, h = (int)blockIdx.x;
    float *sums = q + D;
    int64_t t = task.query(blockIdx.y), row = t - task.first_row;
    query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    int64_t count = task.count(keys);
    const E *from = task.q + (row * task.H + h) * D;
    for (int c = (int)threadIdx.x; c < D; c += PLAIN) q[c] = mt_to_float(from[c]), sums[c] = 0;
    float dweight = 0, weight = task.scale * mt_to_float(task.weights[row * task.H + h]);
    slopes += (int64_t)blockIdx.y * width;
    for (int64_t base = 0; base < count; base += PLAIN) {
        int64_t j = base + threadIdx.x, left = count - base;
        __syncthreads();
        factors[threadIdx.x] = 0, rows[threadIdx.x] = 0;
        if (j < count && slopes[j] != 0) {
            int64_t key = task.key_row(keys, t, j);
            float product = dot_row(q, task.k + key * D, D, task.wide);
            rows[threadIdx.x] = key;
            if (!(product <= 0)) factors[threadIdx.x] = weight * slopes[j], dweight += task.scale * slopes[j] * product;
        }
        __syncthreads();
        int end = left < PLAIN ? (int)left : (int)PLAIN;
        for (int c = (int)threadIdx.x; c < D; c += PLAIN) {
            float sum = sums[c];
            for (int n = 0; n < end; n++) sum += factors[n] * mt_to_float(task.k[rows[n] * D + c]);
            sums[c] = sum;
        }
    }
    dweight = sum_over_block(dweight, parts);
    for (int c = (int)threadIdx.x; c < D; c += PLAIN) dq[(row * task.H + h) * D + c] = mt_from_float<E>(sums[c]);
    if (threadIdx.x == 0) dweights[row * task.H + h] = mt_from_float<E>(dweight);
}

/* Number of the list's entry `key`; -1: none. */
__device__ static int64_t find_key(const int32_t *listed, int64_t count, int64_t key) {
    int64_t first = 0, end = count;
    while (first < end) {
        int64_t middle = (first + end) / 2;
        if (listed[middle] < key)
            first = middle + 1;
        else
            end = middle;
    }
    return first < count && listed[first] == key ? first : -1;
}

/* dk of a key row += that of the queries of a block of the loss: a block of threads for each key row. */
template <class E>
__global__ void __launch_bounds__(PLAIN)
    loss_of_keys(const indexer_task<E> task, const float *slopes, int64_t width, float *dk) {
    extern __shared__ float q[]; // [2, D]: the key, and sums
    __shared__ float of_query[MT_CUDA_LOSS_ROWS], factors[PLAIN];
    const int D = task.D, H = task.H, warp = (int)threadIdx.x / LANES;
    float *k = q, *sums = q + D;
    const int64_t key = blockIdx.x;
    for (int64_t i = warp; i < task.rows; i += PLAIN / LANES) {
        int64_t t = task.query(i);
        query_keys keys = keys_of_query(task.spans, task.num_spans, t);
        int64_t j = key - keys.span.k_start;
        if (j < 0 || j >= keys.count)
            j = -1;
        else if (task.listed)
            j = find_key(task.listed + (t - task.first_row) * task.topk, task.count(keys), j);
        if (threadIdx.x % LANES == 0) of_query[i] = j < 0 ? 0 : slopes[i * width + j];
    }
    for (int c = (int)threadIdx.x; c < D; c += PLAIN) k[c] = mt_to_float(task.k[key * D + c]), sums[c] = 0;
    __syncthreads();
    bool any = false;
    for (int64_t i = 0; i < task.rows; i++) {
        float slope = of_query[i];
        if (slope == 0) continue;
        any = true;
        const E *heads = task.q + (task.query(i) - task.first_row) * H * D;
        const E *weights = task.weights + (task.query(i) - task.first_row) * H;
        for (int base = 0; base < H; base += PLAIN) {
            int h = base + (int)threadIdx.x, end = min(H - base, (int)PLAIN);
            __syncthreads();
            if (h < H)
                factors[threadIdx.x] = dot_row(k, heads + (int64_t)h * D, D, task.wide) <= 0
                                           ? 0
                                           : task.scale * mt_to_float(weights[h]) * slope;
            __syncthreads();
            for (int c = (int)threadIdx.x; c < D; c += PLAIN) {
                float sum = sums[c];
                for (int n = 0; n < end; n++) sum += factors[n] * mt_to_float(heads[(int64_t)(base + n) * D + c]);
                sums[c] = sum;
            }
        }
    }
    if (any)
        for (int c = (int)threadIdx.x; c < D; c += PLAIN) dk[key * D + c] += sums[c];
}

/* ---- the gradients over all keys, on tensor cores -----------------------------------------------------------------
 */

/* With scores s of a head and slope the gradient of their weighted sum, g = scale w slope where s > 0, else 0; then dq
 * = g k, dk = g^T q, and dw = scale sum(slope max(s, 0)). g is rounded to bf16: fp16 has no room for slopes. A stage is
 * a tile with 64 numbers behind it. */
template <int D> struct loss_size {
    static constexpr int TILE = TILE_ROWS * D * 2, STAGE = TILE + TILE_ROWS * 4, BYTES = TILE + 2 * STAGE;
};

/* dq and dweights of a query: a block, whose warps have 16 heads each. */
template <class E, int D>
__global__ void __launch_bounds__(TILE_THREADS)
    tile_loss_of_queries(const indexer_task<E> task, const float *slopes, int64_t width, E *dq, E *dweights) {
    using size = loss_size<D>;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t q_tile = mt_shared_address(memory), stages = q_tile + size::TILE;
    const int first_head = (int)threadIdx.x / LANES * 16, lane = (int)threadIdx.x % LANES;
    const int64_t t = task.query(blockIdx.x), row = t - task.first_row;
    const query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    const E *k = task.k + keys.span.k_start * D;
    const int count = (int)keys.count;
    slopes += (int64_t)blockIdx.x * width;
    auto load = [&](int j) { // keys from j on
        const uint32_t to = stages + (uint32_t)(j / TILE_ROWS % 2) * size::STAGE;
        load_rows<D>(to, k + (int64_t)j * D, D, count - j);
        if (threadIdx.x < TILE_ROWS)
            mt_copy4_async(to + size::TILE + threadIdx.x * 4, slopes + j + threadIdx.x, j + (int)threadIdx.x < count);
    };
    float weights[2], dweight[2] = {0, 0}, sums[1][D / 8][4], score[1][TILE_ROWS / 8][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = first_head + row_of(0, 2 * h);
        weights[h] = head < task.H ? task.scale * mt_to_float(task.weights[row * task.H + head]) : 0;
    }
    clear(sums);
    load_rows<D>(q_tile, task.q + row * task.H * D, D, task.H);
    if (count > 0) load(0);
#pragma unroll 1
    for (int j = 0; j < count; j += TILE_ROWS) {
        mt_copies_wait();
        __syncthreads(); // this stage has arrived, and the other one is no longer read
        if (j + TILE_ROWS < count) load(j + TILE_ROWS);
        const int stage = size::TILE + j / TILE_ROWS % 2 * size::STAGE;
        const float *slope = (const float *)(memory + stage + size::TILE);
        multiply_tiles<E, D>(score, q_tile, q_tile + stage);
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float of_key = slope[col_of(n, e)], s = score[0][n][e];
                if (!(s <= 0)) dweight[e / 2] += task.scale * of_key * s;
                score[0][n][e] = s <= 0 ? 0 : weights[e / 2] * of_key;
            }
        add_weighted_rows<E, D>(sums, score, q_tile + stage);
    }
    mt_copies_wait();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = first_head + row_of(0, 2 * h);
        dweight[h] += __shfl_xor_sync(all_lanes, dweight[h], 1);
        dweight[h] += __shfl_xor_sync(all_lanes, dweight[h], 2);
        if (head >= task.H) continue;
        if (lane % 4 == 0) dweights[row * task.H + head] = mt_from_float<E>(dweight[h]);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(uint32_t *)(dq + (row * task.H + head) * D + col_of(n, 0)) =
                mt_pair_from_float(E(), sums[0][n][2 * h], sums[0][n][2 * h + 1]);
    }
}

/* dk of a tile of keys += that of the queries of a block of the loss: a block, whose warps have 16 keys each. */
template <class E, int D>
__global__ void __launch_bounds__(TILE_THREADS)
    tile_loss_of_keys(const indexer_task<E> task, const float *slopes, int64_t width, float *dk, int64_t key_rows) {
    using size = loss_size<D>;
    extern __shared__ __align__(1024) char memory[];
    __shared__ int64_t begins[TILE_ROWS], ends[TILE_ROWS]; // the rows of keys that a query sees
    const uint32_t k_tile = mt_shared_address(memory);
    const int warp = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES, rows = (int)task.rows;
    const int64_t key = (int64_t)blockIdx.x * TILE_ROWS;
    for (int r = warp; r < rows; r += TILE_THREADS / LANES) {
        query_keys keys = keys_of_query(task.spans, task.num_spans, task.query(r));
        if (lane == 0) begins[r] = keys.span.k_start, ends[r] = keys.span.k_start + keys.count;
    }
    __syncthreads();
    auto next = [&](int r) { // the next query that sees a key of the tile
        while (r < rows && (begins[r] >= key + TILE_ROWS || ends[r] <= key)) r++;
        return r;
    };
    auto load = [&](int r, int n) {
        const int64_t row = task.query(r) - task.first_row;
        const int stage = size::TILE + n % 2 * size::STAGE, h = (int)threadIdx.x;
        load_rows<D>(k_tile + stage, task.q + row * task.H * D, D, task.H);
        if (h < TILE_ROWS)
            ((float *)(memory + stage + size::TILE))[h] =
                h < task.H ? task.scale * mt_to_float(task.weights[row * task.H + h]) : 0;
    };
    int r = next(0);
    if (r >= rows) return;
    float sums[1][D / 8][4], score[1][TILE_ROWS / 8][4];
    clear(sums);
    load_rows<D>(k_tile, task.k + key * D, D, key_rows - key);
    load(r, 0);
#pragma unroll 1
    for (int n = 0; r < rows; n++) {
        const int after = next(r + 1), stage = size::TILE + n % 2 * size::STAGE;
        const float *weights = (const float *)(memory + stage + size::TILE);
        mt_copies_wait();
        __syncthreads(); // this stage has arrived, and the other one is no longer read
        if (after < rows) load(after, n + 1);
        multiply_tiles<E, D>(score, k_tile, k_tile + stage);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t at = key + 16 * warp + row_of(0, 2 * h);
            const float slope = at >= begins[r] && at < ends[r] ? slopes[r * width + (at - begins[r])] : 0;
#pragma unroll
            for (int m = 0; m < TILE_ROWS / 8; m++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    score[0][m][e] = score[0][m][e] <= 0 ? 0 : weights[col_of(m, e)] * slope;
        }
        add_weighted_rows<E, D>(sums, score, k_tile + stage);
        r = after;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t at = key + 16 * warp + row_of(0, 2 * h);
        if (at >= key_rows) continue;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float2 *to = (float2 *)(dk + at * D + col_of(n, 0)), sum = *to;
            sum.x += sums[0][n][2 * h], sum.y += sums[0][n][2 * h + 1];
            *to = sum;
        }
    }
}

template <class E, int D>
static void launch_tile_loss(const indexer_task<E> &task, const float *slopes, const mt_indexer_args *a,
                             int64_t key_rows, cudaStream_t stream) {
    const int bytes = loss_size<D>::BYTES;
    mt_cuda_take_shared(tile_loss_of_queries<E, D>, bytes);
    mt_cuda_take_shared(tile_loss_of_keys<E, D>, bytes);
    tile_loss_of_queries<E, D>
        <<<(unsigned)task.rows, TILE_THREADS, bytes, stream>>>(task, slopes, a->width, (E *)a->dq, (E *)a->dweights);
    MT_CUDA_LAUNCHED();
    tile_loss_of_keys<E, D><<<(unsigned)mt_divide_up(key_rows, TILE_ROWS), TILE_THREADS, bytes, stream>>>(
        task, slopes, a->width, a->dk, key_rows);
    MT_CUDA_LAUNCHED();
}

/* False, and nothing is enqueued, for operands that tiles do not take. */
template <class E>
static bool tile_loss(const indexer_task<E> &task, const float *slopes, const mt_indexer_args *a, int64_t key_rows,
                      cudaStream_t stream) {
    if constexpr (std::is_same_v<E, bf16>) {
        bool serves = loss_in_tiles && a->all_keys && task.wide && task.H <= TILE_ROWS && !task.pages.table;
        if (serves && (uintptr_t)a->dq % 4 == 0 && task.D == 64)
            return launch_tile_loss<E, 64>(task, slopes, a, key_rows, stream), true;
        if (serves && (uintptr_t)a->dq % 4 == 0 && task.D == 128)
            return launch_tile_loss<E, 128>(task, slopes, a, key_rows, stream), true;
    }
    return false;
}

template <class E> static void indexer_backward(const mt_indexer_args *a, mt_stream *stream) {
    cudaStream_t s = mt_cuda_stream(stream);
    int64_t begin = a->block > a->first_row ? a->block : a->first_row, end = a->block + a->block_rows;
    int64_t key_rows = key_rows_of(a->spans);
    if (end > a->first_row + a->rows) end = a->first_row + a->rows;
    MT_CHECK(a->block_rows <= MT_CUDA_LOSS_ROWS);
    if (begin >= end) return;
    indexer_task<E> task = task_of<E>(a);
    task.wide = task.wide && rows_are_wide<E>(a->q, a->D, a->D);
    task.first = begin, task.rows = end - begin, task.least = 0, task.columns = mt_cuda_score_columns(a->width);
    task.listed = a->all_keys ? NULL : a->selected, task.is_loss = true;
    char *memory = (char *)mt_cuda_workspace(stream, MT_CUDA_LOSS_ROWS * (task.columns * 4 + 16));
    query_loss *losses = (query_loss *)memory;
    task.scores = (float *)(memory + MT_CUDA_LOSS_ROWS * 16);
    const float *shares = a->shares + (begin - a->block) * a->width;
    float *slopes = a->slopes + (begin - a->block) * a->width;
    bool on_tensor_cores = a->all_keys && has_rows(a->spans) && a->H <= 64 && a->D <= 128 && task.wide;
    launch_scores(task, a->spans, on_tensor_cores, a->width, stream);
    divergences<E>
        <<<(unsigned)task.rows, THREADS, 0, s>>>(task, shares, slopes, losses, a->token_index, a->width, a->coeff);
    MT_CUDA_LAUNCHED();
    add_losses<<<1, 1, 0, s>>>(a->sums, losses, task.rows);
    MT_CUDA_LAUNCHED();
    if (tile_loss(task, slopes, a, key_rows, s)) return;
    int64_t bytes = 2 * a->D * (int64_t)sizeof(float);
    mt_cuda_take_shared(loss_of_queries<E>, bytes);
    mt_cuda_take_shared(loss_of_keys<E>, bytes);
    loss_of_queries<E><<<dim3((unsigned)a->H, (unsigned)task.rows), PLAIN, (size_t)bytes, s>>>(
        task, slopes, a->width, (E *)a->dq, (E *)a->dweights);
    MT_CUDA_LAUNCHED();
    loss_of_keys<E><<<(unsigned)key_rows, PLAIN, (size_t)bytes, s>>>(task, slopes, a->width, a->dk);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_indexer_backward(const mt_indexer_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->spans->count > 0) MT_CUDA_DISPATCH(dtype, indexer_backward, a, stream);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* The bits of a query row, a block each; see mt_selection. */
__global__ void __launch_bounds__(THREADS) selection_bits(uint32_t *bits, int64_t words, const int32_t *selected,
                                                          int64_t topk, const mt_span *spans, int64_t num_spans) {
    int64_t t = blockIdx.x;
    query_keys keys = keys_of_query(spans, num_spans, t);
    uint32_t *row = bits + t * 2 * words;
    for (int64_t w = threadIdx.x; w < 2 * words; w += THREADS) row[w] = 0;
    __syncthreads();
    int64_t count = min(keys.count, topk);
    for (int64_t n = threadIdx.x; n < count; n += THREADS) {
        int32_t j = selected[t * topk + n];
        atomicOr(row + j / 32, 1u << j % 32);
    }
}

/* Enqueues the bits of all query rows. */
static mt_selection make_selection(const mt_sparse_attention *a, mt_stream *stream) {
    const mt_spans *spans = &a->attention.spans;
    mt_selection selection = {a->selected, a->topk};
    int64_t rows = 0, longest = 1;
    for (int64_t s = 0; s < spans->count; s++) {
        if (spans->host[s].q_start + spans->host[s].q_len > rows) rows = spans->host[s].q_start + spans->host[s].q_len;
        if (spans->host[s].k_len > longest) longest = spans->host[s].k_len;
    }
    selection.words = mt_cuda_selection_words(longest);
    int64_t words = rows * selection.words;
    uint32_t *bits = (uint32_t *)mt_cuda_workspace(stream, words * 8 + (int64_t)sizeof *selection.counter);
    selection.bits = (const uint64_t *)bits, selection.counter = (int *)(selection.bits + words);
    selection_bits<<<(unsigned)rows, THREADS, 0, mt_cuda_stream(stream)>>>(bits, selection.words, a->selected, a->topk,
                                                                           spans->device, spans->count);
    MT_CUDA_LAUNCHED();
    return selection;
}

extern "C" void mt_cuda_sparse_attention_forward(const mt_sparse_attention *a, mt_dtype dtype, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    if (call->spans.count == 0) return;
    mt_selection selection = {a->selected, a->topk};
    if (dtype != MT_F32 && has_rows(&call->spans) && call->dropout.p <= 0) {
        selection = make_selection(a, stream);
        if (on_hopper && mt_selected_hopper_forward(call, &selection, dtype, stream)) return;
        if (mt_selected_mma_forward(call, &selection, dtype, stream)) return;
    }
    mt_selected_naive_forward(call, &selection, dtype, stream);
}

extern "C" void mt_cuda_sparse_attention_backward(const mt_sparse_attention *a, mt_dtype dtype, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    if (call->spans.count == 0) return;
    mt_selection selection = make_selection(a, stream);
    if (on_hopper && mt_selected_hopper_backward(call, &selection, dtype, stream)) return;
    if (mt_selected_mma_backward(call, &selection, dtype, stream)) return;
    mt_selected_naive_backward(call, &selection, dtype, stream);
}

/* ---- the target of the loss -------------------------------------------------------------------------------------- */

template <class E> struct shares_task {
    const E *q, *k;
    const mt_span *spans;
    int64_t num_spans, q_stride, k_stride;
    const int32_t *listed; // [Tq, topk] or NULL
    int64_t topk, first, width;
    int H, heads, D; // heads: of a group
    float scale;
    bool wide;
    float *lse; // [block_rows, H]
    float *shares;

    __device__ int64_t count(const query_keys &keys) const {
        return listed ? min(keys.count, topk) : keys.count;
    }
    __device__ const E *key(const query_keys &keys, int64_t t, int64_t j, int h) const {
        int64_t row = keys.span.k_start + (listed ? listed[t * topk + j] : j);
        return k + row * k_stride + (int64_t)(h / heads) * D;
    }
    __device__ void load_query(float *to, int64_t t, int h) const {
        const E *from = q + t * q_stride + (int64_t)h * D;
        for (int c = (int)threadIdx.x; c < D; c += (int)blockDim.x) to[c] = mt_to_float(from[c]);
    }
};

/* The log of the sum of exponentials of a head of a query: a block. */
template <class E> __global__ void __launch_bounds__(PLAIN) shares_lse(const shares_task<E> task) {
    extern __shared__ float q[];
    __shared__ float parts[PLAIN / LANES];
    int h = (int)blockIdx.x;
    int64_t t = task.first + blockIdx.y;
    query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    int64_t count = task.count(keys);
    task.load_query(q, t, h);
    __syncthreads();
    float largest = -INFINITY, sum = 0;
    for (int64_t j = threadIdx.x; j < count; j += PLAIN) {
        float logit = task.scale * dot_row(q, task.key(keys, t, j, h), task.D, task.wide);
        float higher = mt_maximum(largest, logit);
        sum = (largest == -INFINITY ? 0 : sum * expf(largest - higher)) + expf(logit - higher), largest = higher;
    }
    float all = max_over_block(largest, parts);
    sum = sum_over_block(largest == -INFINITY ? 0 : sum * expf(largest - all), parts);
    if (threadIdx.x == 0) task.lse[(int64_t)blockIdx.y * task.H + h] = count > 0 ? all + logf(sum) : -INFINITY;
}

/* The sums over heads: a thread for each key of a query. */
template <class E> __global__ void __launch_bounds__(PLAIN) shares_sum(const shares_task<E> task) {
    extern __shared__ float q[];
    int64_t t = task.first + blockIdx.y, j = (int64_t)blockIdx.x * PLAIN + threadIdx.x;
    query_keys keys = keys_of_query(task.spans, task.num_spans, t);
    int64_t count = task.count(keys);
    float sum = 0;
    if ((int64_t)blockIdx.x * PLAIN < count)
        for (int h = 0; h < task.H; h++) {
            __syncthreads();
            task.load_query(q, t, h);
            __syncthreads();
            if (j >= count) continue;
            float logit = task.scale * dot_row(q, task.key(keys, t, j, h), task.D, task.wide);
            sum += expf(logit - task.lse[(int64_t)blockIdx.y * task.H + h]);
        }
    if (j < task.width) task.shares[(int64_t)blockIdx.y * task.width + j] = sum;
}

template <class E> static void shares(const mt_sparse_attention *a, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    cudaStream_t s = mt_cuda_stream(stream);
    shares_task<E> task = {};
    task.q = (const E *)call->q, task.k = (const E *)call->k;
    task.spans = call->spans.device, task.num_spans = call->spans.count;
    task.q_stride = call->q_stride, task.k_stride = call->k_stride;
    task.listed = a->all_keys ? NULL : a->selected;
    task.topk = a->topk, task.first = a->block, task.width = a->width;
    task.H = (int)call->num_heads, task.heads = (int)(call->num_heads / call->num_groups);
    task.D = (int)call->head_size, task.scale = call->scale, task.shares = a->shares;
    task.wide = rows_are_wide<E>(call->k, call->k_stride, call->head_size);
    task.lse = (float *)mt_cuda_workspace(stream, a->block_rows * call->num_heads * (int64_t)sizeof(float));
    int64_t bytes = call->head_size * (int64_t)sizeof(float);
    shares_lse<E><<<dim3((unsigned)task.H, (unsigned)a->block_rows), PLAIN, (size_t)bytes, s>>>(task);
    MT_CUDA_LAUNCHED();
    dim3 grid((unsigned)mt_divide_up(a->width, PLAIN), (unsigned)a->block_rows);
    shares_sum<E><<<grid, PLAIN, (size_t)bytes, s>>>(task);
    MT_CUDA_LAUNCHED();
}

/* ---- the target over all keys, on tensor cores --------------------------------------------------------------------
 */

/* The probabilities of a block of queries and all their keys take two passes over tiles of 64 keys: the first has the
 * logs of the sums of exponentials, a block of threads for each head and some tiles; in the second a block has a tile
 * and adds up the heads. Each tile of keys is read once a pass. */
enum { SHARE_PARTS = 32 };

template <class E> struct tile_task {
    const E *q, *k;
    const mt_span *spans;
    int64_t num_spans, q_stride, k_stride;
    int64_t first, first_key, end_key, width; // query row 0; rows of k that some query sees
    int rows, H, heads;                       // heads: of a group
    int tiles, part_tiles, parts; // tiles of keys; those of a block of the first pass; its blocks for a head
    float scale;
    float *lse;         // [rows, H]
    float *lse_of_part; // [rows, H, parts]
    float *shares;      // [rows, width]
};

template <class E, int D, bool SUMS>
__global__ void __launch_bounds__(TILE_THREADS, 2) tile_shares(const tile_task<E> task) {
    constexpr int TILE = TILE_ROWS * D * 2;
    extern __shared__ __align__(1024) char memory[];
    __shared__ int64_t begins[TILE_ROWS], ends[TILE_ROWS]; // the rows of keys that a query sees
    const uint32_t stages = mt_shared_address(memory);
    const int warp = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
    for (int r = warp; r < TILE_ROWS; r += TILE_THREADS / LANES) {
        query_keys keys = {};
        if (r < task.rows) keys = keys_of_query(task.spans, task.num_spans, task.first + r);
        if (lane == 0) begins[r] = keys.span.k_start, ends[r] = keys.span.k_start + keys.count;
    }
    const int first_tile = SUMS ? (int)blockIdx.x : (int)blockIdx.x * task.part_tiles;
    const int steps = SUMS ? task.H : min(task.part_tiles, task.tiles - first_tile);
    auto key_of = [&](int i) { return task.first_key + (int64_t)(SUMS ? first_tile : first_tile + i) * TILE_ROWS; };
    auto head_of = [&](int i) { return SUMS ? i : (int)blockIdx.y; };
    auto load = [&](int i) {
        const int64_t key = key_of(i);
        const E *q = task.q + task.first * task.q_stride + head_of(i) * D;
        const E *k = task.k + key * task.k_stride + head_of(i) / task.heads * D;
        const uint32_t to = stages + (uint32_t)(i % 2 * 2 * TILE);
        load_rows<D>(to, q, task.q_stride, task.rows);
        load_rows<D>(to + TILE, k, task.k_stride, task.end_key - key);
    };

    const float scale = task.scale * LOG2_E;
    float sums[1][8][4];
    softmax<1> state;
    clear(sums);
    softmax_begin(state);
    load(0);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        mt_copies_wait();
        __syncthreads(); // this stage has arrived, and the other one is no longer read
        if (i + 1 < steps) load(i + 1);
        const uint32_t q_tile = stages + (uint32_t)(i % 2 * 2 * TILE), k_tile = q_tile + TILE;
        float score[1][8][4];
        multiply_tiles<E, D>(score, q_tile, k_tile);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * warp + row_of(0, 2 * h);
            if constexpr (SUMS) {
                const float lse = task.lse[min(row, task.rows - 1) * task.H + i] * LOG2_E;
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) sums[0][n][e] += mt_exp2(score[0][n][e] * scale - lse);
            } else {
                const int begin = (int)(begins[row] - key_of(i)), end = (int)(ends[row] - key_of(i));
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++)
                        if (col_of(n, e) < begin || col_of(n, e) >= end) score[0][n][e] = -INFINITY;
            }
        }
        if constexpr (!SUMS) {
            float shrink[1][2];
            softmax_step(state, score, shrink, scale);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 16 * warp + row_of(0, 2 * h);
        if constexpr (SUMS) {
            const int64_t key = key_of(0);
            const int begin = (int)(begins[row] - key), end = (int)(ends[row] - key);
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    const int col = col_of(n, e);
                    if (row < task.rows && col >= begin && col < end)
                        task.shares[row * task.width + (col - begin)] = sums[0][n][e];
                }
        } else {
            float total = state.total[0][h];
            total += __shfl_xor_sync(all_lanes, total, 1);
            total += __shfl_xor_sync(all_lanes, total, 2);
            if (lane % 4 == 0 && row < task.rows)
                task.lse_of_part[(row * task.H + (int)blockIdx.y) * task.parts + (int)blockIdx.x] =
                    total == 0 ? -INFINITY : state.largest[0][h] * task.scale + logf(total);
        }
    }
}

/* lse of `count` queries and heads, a thread each, from those of their parts. */
__global__ void join_parts(float *lse, const float *lse_of_part, int count, int parts) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    float largest = -INFINITY, sum = 0;
    for (int p = 0; p < parts; p++) largest = mt_maximum(largest, lse_of_part[i * parts + p]);
    for (int p = 0; p < parts && largest != -INFINITY; p++) sum += expf(lse_of_part[i * parts + p] - largest);
    lse[i] = largest == -INFINITY ? -INFINITY : largest + logf(sum);
}

/* False if the sizes are others. */
template <class E, int D> static bool launch_tile_shares(tile_task<E> task, mt_stream *stream) {
    cudaStream_t s = mt_cuda_stream(stream);
    const int bytes = 2 * 2 * TILE_ROWS * D * 2, fixed = 2 * TILE_ROWS * 8;
    if (bytes + fixed > (int)mt_cuda_device()->sharedMemPerBlockOptin) return false;
    task.tiles = (int)mt_divide_up(task.end_key - task.first_key, TILE_ROWS);
    task.part_tiles = (int)mt_divide_up(task.tiles, SHARE_PARTS);
    task.parts = (int)mt_divide_up(task.tiles, task.part_tiles);
    int64_t count = (int64_t)task.rows * task.H;
    task.lse = (float *)mt_cuda_workspace(stream, count * (1 + task.parts) * (int64_t)sizeof(float));
    task.lse_of_part = task.lse + count;
    mt_cuda_take_shared(tile_shares<E, D, false>, bytes);
    mt_cuda_take_shared(tile_shares<E, D, true>, bytes);
    tile_shares<E, D, false><<<dim3((unsigned)task.parts, (unsigned)task.H), TILE_THREADS, bytes, s>>>(task);
    MT_CUDA_LAUNCHED();
    join_parts<<<(unsigned)mt_divide_up(count, PLAIN), PLAIN, 0, s>>>(task.lse, task.lse_of_part, (int)count,
                                                                      task.parts);
    MT_CUDA_LAUNCHED();
    tile_shares<E, D, true><<<(unsigned)task.tiles, TILE_THREADS, bytes, s>>>(task);
    MT_CUDA_LAUNCHED();
    return true;
}

/* Enqueues the shares over all keys; false, and nothing is enqueued, for operands that tiles do not take. */
template <class E> static bool shares_of_tiles(const mt_sparse_attention *a, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    const int64_t D = call->head_size, block_end = a->block + a->block_rows;
    bool wide = rows_are_wide<E>(call->q, call->q_stride, D) && rows_are_wide<E>(call->k, call->k_stride, D);
    if (!a->all_keys || !wide || call->pages.table || a->block_rows > TILE_ROWS) return false;
    if (D != 64 && D != 128 && D != 192) return false;
    tile_task<E> task = {};
    task.first_key = INT64_MAX;
    for (int64_t n = 0; n < call->spans.count; n++) {
        const mt_span *span = &call->spans.host[n];
        int64_t last = span->q_start + span->q_len < block_end ? span->q_start + span->q_len : block_end;
        if (last <= a->block || span->q_start >= block_end) continue;
        int64_t begin, end; // keys that its last query of the block sees
        mt_span_keys(span, 0, last - 1 - span->q_start, &begin, &end);
        if (end <= 0) continue;
        if (span->k_start < task.first_key) task.first_key = span->k_start;
        if (span->k_start + end > task.end_key) task.end_key = span->k_start + end;
    }
    MT_CUDA(cudaMemsetAsync(a->shares, 0, (size_t)(a->block_rows * a->width) * sizeof(float), mt_cuda_stream(stream)));
    if (task.first_key >= task.end_key) return true;
    task.q = (const E *)call->q, task.k = (const E *)call->k;
    task.spans = call->spans.device, task.num_spans = call->spans.count;
    task.q_stride = call->q_stride, task.k_stride = call->k_stride;
    task.first = a->block, task.width = a->width, task.rows = (int)a->block_rows;
    task.H = (int)call->num_heads, task.heads = (int)(call->num_heads / call->num_groups);
    task.scale = call->scale, task.shares = a->shares;
    if (D == 64) return launch_tile_shares<E, 64>(task, stream);
    return D == 128 ? launch_tile_shares<E, 128>(task, stream) : launch_tile_shares<E, 192>(task, stream);
}

extern "C" void mt_cuda_sparse_attention_shares(const mt_sparse_attention *a, mt_dtype dtype, mt_stream *stream) {
    if (a->block_rows == 0) return;
    if (dtype == MT_BF16 && loss_in_tiles && shares_of_tiles<bf16>(a, stream)) return;
    if (dtype == MT_F16 && loss_in_tiles && shares_of_tiles<__half>(a, stream)) return;
    MT_CUDA_DISPATCH(dtype, shares, a, stream);
}
