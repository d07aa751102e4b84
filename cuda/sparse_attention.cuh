/* sparse_attention.cuh: the keys of a query and the operands of the indexer's scores, for sparse_attention.cu and
 * indexer_hopper.cu. */
#ifndef MT_SPARSE_ATTENTION_CUH
#define MT_SPARSE_ATTENTION_CUH

#include "attention.cuh"
#include "mma.cuh"
#include "vector.cuh"

enum { LANES = 32 };
static const unsigned all_lanes = 0xffffffff;

/* ---- queries and their keys -------------------------------------------------------------------------------------- */

/* The span of a query row, and the number of its keys that the row sees; 0 if it is in no span. */
struct query_keys {
    mt_span span;
    int64_t count, number; // number: of the span
};

/* All lanes of a warp call it with the same row. */
__device__ static inline query_keys keys_of_query(const mt_span *spans, int64_t num_spans, int64_t t) {
    int lane = (int)threadIdx.x % LANES;
    for (int64_t base = 0; base < num_spans; base += LANES) {
        bool mine = false;
        if (base + lane < num_spans) {
            int64_t i = t - spans[base + lane].q_start;
            mine = i >= 0 && i < spans[base + lane].q_len;
        }
        unsigned owner = __ballot_sync(all_lanes, mine);
        if (!owner) continue;
        query_keys keys = {spans[base + __ffs((int)owner) - 1], 0, base + __ffs((int)owner) - 1};
        int64_t end = t - keys.span.q_start + keys.span.k_len - keys.span.q_len + 1;
        keys.count = keys.span.causal ? max(min(end, keys.span.k_len), (int64_t)0) : keys.span.k_len;
        return keys;
    }
    return {};
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

template <class E> struct indexer_task {
    const E *q, *k, *weights;
    const mt_span *spans;
    int64_t num_spans;
    mt_pages pages;
    int64_t first_row;   // of queries: row 0 of q, weights and listed
    int64_t first, rows; // of this launch
    int64_t topk;
    const int64_t *lengths; // see mt_indexer_args
    const int32_t *listed;  // [rows, topk] or NULL: column j is key j
    int64_t least;          // rows that see no more keys than this need no scores
    float *scores;          // [rows of this launch, columns]
    int64_t columns;
    int H, D;
    float scale;
    bool wide; // keys allow 16-byte loads
    bool is_loss;
    E *attention_q; // see mt_indexer_args
    int64_t attention_q_stride;

    /* Row `i` of the launch is query row query(i). */
    __device__ int64_t query(int64_t i) const {
        return first + i;
    }
    __device__ int64_t count(const query_keys &keys) const {
        return listed ? min(keys.count, topk) : keys.count;
    }
    __device__ int64_t length(const query_keys &keys) const {
        return lengths ? lengths[keys.number] : keys.span.k_len;
    }
    /* The score of query row t and a key, to store. For the choice of keys the least if it is not a number. */
    __device__ float checked(float score, int64_t t) const {
        if (!isnan(score) || is_loss) return score;
        if (attention_q) attention_q[t * attention_q_stride] = mt_from_float<E>(NAN);
        return -INFINITY;
    }
    __device__ int64_t key_row(const query_keys &keys, int64_t t, int64_t j) const {
        return mt_key_row(pages, keys.span.k_start + (listed ? listed[(t - first_row) * topk + j] : j));
    }
};

/* The term of a head in the score of a query and a key. NaN stays. */
__device__ static inline float positive(float product) {
    return mt_maximum(product, 0.0f);
}

/* The scores of the task's rows on wgmma, in the stream: false, and nothing is enqueued, for operands that it does not
 * take. key_rows: the rows of k that spans cover. */
bool mt_indexer_hopper_scores(const indexer_task<bf16> &task, int64_t key_rows, mt_stream *stream);

#endif
