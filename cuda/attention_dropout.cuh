/* attention_dropout.cuh: dropout in the flash kernels: which probabilities of a tile are kept.
 *
 * One call of Philox decides four keys of a query (see mt_attention). The result of a product has these four keys in
 * two lanes, and only if the first key's index is a multiple of 4. Therefore a lane does not decide the elements that
 * it holds. Instead each lane takes a query, all lanes of a warp take the same keys, and a lane writes one bit per key
 * to shared memory. The lanes that hold the weights of a query read its bits. This needs one call per four keys for
 * every layout of a result, one more per word if the first index is no multiple of 4, and no registers while products
 * run.
 *
 * A call takes 20 multiplications and 20 xors of 32 bits. Each of the three kernels of a step repeats it: a bit per
 * probability in memory would be T^2 / 8 bytes per head and layer. */
#ifndef MT_ATTENTION_DROPOUT_CUH
#define MT_ATTENTION_DROPOUT_CUH

#include "attention.cuh"

/* ---- bits -------------------------------------------------------------------------------------------------------- */

/* The bits of KEYS keys of one query: words of up to 32 keys. */
template <int KEYS> struct kept_keys {
    using word = std::conditional_t<KEYS == 16, uint16_t, uint32_t>;
    static constexpr int WORDS = KEYS == 64 ? 2 : 1, IN_WORD = KEYS / WORDS;
    word words[WORDS];
};

/* Bit i: word i of this counter keeps its probability. */
__device__ __forceinline__ uint32_t keep_four(const mt_masks &masks, uint64_t query, uint64_t counter) {
    uint4 words = mt_cuda_philox(masks.key, query, counter);
    uint32_t kept = words.x >= masks.threshold;
    if (words.y >= masks.threshold) kept += 2; // fewer instructions than shifted results of comparisons
    if (words.z >= masks.threshold) kept += 4;
    if (words.w >= masks.threshold) kept += 8;
    return kept;
}

/* Bits [first, end) of the keys whose indices are `index`, `index` + 1, ... The low half of no counter overflows. Four
 * calls at a time are independent: the 10 rounds of one depend on each other. */
__device__ __forceinline__ uint32_t keep_consecutive(const mt_masks &masks, uint64_t query, uint64_t head,
                                                     int64_t index, int first, int end) {
    const uint64_t counter = head << 48 | (uint64_t)index >> 2, high = counter >> 32 << 32;
    const int before = first / 16 * 16, after = (end + 15) / 16 * 16, skipped = (int)(index & 3);
    const uint32_t low = (uint32_t)counter, first_counter = low + (uint32_t)before / 4;
    uint32_t kept = 0, next = low + (uint32_t)after / 4;
#pragma unroll 1
    for (; next != first_counter; next -= 4)
#pragma unroll
        for (uint32_t i = 1; i <= 4; i++) kept = kept << 4 | keep_four(masks, query, high | (next - i));
    kept <<= before;
    if (skipped == 0) return kept;
    uint64_t rest = keep_four(masks, query, high | (low + (uint32_t)after / 4));
    return (uint32_t)((kept | rest << after) >> skipped);
}

/* The same for any indices. Equal counters of neighbours are drawn once. */
__device__ __forceinline__ uint32_t keep_scattered(const mt_masks &masks, uint64_t query, uint64_t head,
                                                   const int64_t *k_index, int first, int end) {
    uint32_t kept = 0, four = 0;
    uint64_t drawn = UINT64_MAX; // no key's counter
#pragma unroll 1
    for (int j = first; j < end; j++) {
        uint64_t counter = (uint64_t)k_index[j] >> 2;
        if (counter != drawn) four = keep_four(masks, query, head << 48 | counter);
        drawn = counter;
        kept |= (four >> (k_index[j] & 3) & 1) << j;
    }
    return kept;
}

/* Fills the bits of ROWS queries and KEYS keys, by one warp; `needed` are the keys that one of the queries sees.
 * Indices and bits are in shared memory; no lane still reads older bits. */
template <int ROWS, int KEYS>
__device__ __forceinline__ void draw_masks(kept_keys<KEYS> *kept, const mt_masks &masks, uint64_t head,
                                           const int64_t *q_index, const int64_t *k_index, range needed) {
    constexpr int WORDS = kept_keys<KEYS>::WORDS, IN_WORD = kept_keys<KEYS>::IN_WORD;
    const int64_t index = k_index[0];
    bool follow = (uint32_t)((uint64_t)index >> 2) < UINT32_MAX - KEYS;
    for (int j = threadIdx.x % 32; j < min(needed.end, KEYS); j += 32) follow = follow && k_index[j] == index + j;
    follow = __all_sync(0xffffffff, follow);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < ROWS * WORDS; i += 32) {
        int row = i % ROWS, word = i / ROWS, key = word * IN_WORD;
        int first = max(needed.first - key, 0), end = min(needed.end - key, IN_WORD);
        uint64_t query = (uint64_t)q_index[row];
        uint32_t bits = end <= first ? 0
                        : follow     ? keep_consecutive(masks, query, head, index + key, first, end)
                                     : keep_scattered(masks, query, head, k_index + key, first, end);
        kept[row].words[word] = (typename kept_keys<KEYS>::word)bits;
    }
    __syncwarp();
}

/* ---- their use --------------------------------------------------------------------------------------------------- */

/* Sets the elements of dropped probabilities to 0, or to `dropped`. `kept` begins at the warp's first query; rows are
 * queries. */
template <int TILES, int N>
__device__ __forceinline__ void drop_by_row(float (&c)[TILES][N][4], const kept_keys<8 * N> *kept, float dropped = 0) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            kept_keys<8 *N> bits = kept[row_of(t, 2 * h)];
#pragma unroll
            for (int word = 0; word < N / 4; word++) {
                uint32_t mine = bits.words[word] >> col_of(0, 0);
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (!(mine >> (8 * n + e) & 1)) c[t][4 * word + n][2 * h + e] = dropped;
            }
        }
}

/* The same for a transposed result: `kept` begins at the tile's first query; columns are queries. */
template <int TILES, int N>
__device__ __forceinline__ void drop_by_column(float (&c)[TILES][N][4], const kept_keys<16 * TILES> *kept,
                                               float dropped = 0) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t mine = (uint32_t)kept[col_of(n, e)].words[0] >> row_of(0, 0);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (!(mine >> (16 * t + 8 * h) & 1)) c[t][n][2 * h + e] = dropped;
        }
}

#endif
