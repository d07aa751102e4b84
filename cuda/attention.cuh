/* attention.cuh: what the flash rungs of attention share: how spans become tiles, which tile a block gets, and which
 * keys a query sees. */
#ifndef MT_ATTENTION_CUH
#define MT_ATTENTION_CUH

#include "attention.h"
#include "cuda.h"

typedef __nv_bfloat16 bf16;

/* The rungs above the definition, fields of mt_attention_rungs. */
extern "C" bool mt_attention_mma_forward(const mt_attention_call *call);
extern "C" bool mt_attention_mma_backward(const mt_attention_call *call);

/* Runs the call on cuDNN where its shape's backend says so, under `auto` where cuDNN was faster than `ours`, and by
 * `ours` otherwise (attention_cudnn.cu). */
bool mt_attention_run(const mt_attention_call *call, bool backward, mt_attention_direction *ours);

/* What a kernel gets, by value. */
struct flash_task {
    const bf16 *q, *k, *v, *dout;
    bf16 *out, *dq, *dk, *dv;
    float *lse, *row_dot;
    const mt_span *spans;
    int num_spans, num_tiles, heads_together;
    bool accumulate; // add to dk and dv what is there
    mt_attention shape;
};

/* ---- which keys a query sees ------------------------------------------------------------------------------------- */

/* Query i of a span sees key j when i - behind <= j <= i + ahead and 0 <= j < k_len. */
struct band {
    int ahead, behind, q_len, k_len;
};

__device__ __forceinline__ band band_of(const mt_span &span, int64_t window) {
    const int everything = 1 << 30;
    int shift = (int)(span.k_len - span.q_len);
    int behind = window > 0 && window < everything ? (int)window - 1 - shift : everything;
    return {span.causal ? shift : everything, behind, (int)span.q_len, (int)span.k_len};
}

/* Whether `queries` queries from i all see `keys` keys from j: then no element has to be masked. */
__device__ __forceinline__ bool all_see(const band &b, int i, int queries, int j, int keys) {
    return j + keys <= b.k_len && j + keys - 1 <= i + b.ahead && j >= i + queries - 1 - b.behind;
}

/* [first, end): the keys that queries [i, i + queries) see between them, and the queries that see keys [j, j + keys).*/
struct range {
    int first, end;
};
__device__ __forceinline__ range keys_of(const band &b, int i, int queries) {
    int last = min(i + queries, b.q_len) - 1;
    return {max(0, i - b.behind), min(b.k_len, last + b.ahead + 1)};
}
__device__ __forceinline__ range queries_of(const band &b, int j, int keys) {
    int last = min(j + keys, b.k_len) - 1;
    return {max(0, j - b.ahead), min(b.q_len, last + b.behind + 1)};
}

/* ---- which tile a block gets ------------------------------------------------------------------------------------- */

/* Rows [first, first + size) of a span's queries or keys, cut at its end, and the head. */
struct tile {
    mt_span span;
    int first, head;
};

/* Tile number `index` of all that cover the spans. Every warp finds it for itself: each lane counts the tiles of a
 * span, a scan gives where they end, and the first that ends past `index` owns it. */
template <bool OF_KEYS> __device__ __forceinline__ tile tile_find(const flash_task &task, int index, int size) {
    const unsigned all = 0xffffffff;
    int lane = threadIdx.x % 32;
    for (int base = 0;; base += 32) {
        int count = 0;
        if (base + lane < task.num_spans) {
            const mt_span *span = &task.spans[base + lane];
            count = ((int)(OF_KEYS ? span->k_len : span->q_len) + size - 1) / size;
        }
        int end = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(all, end, step);
            if (lane >= step) end += before;
        }
        unsigned past = __ballot_sync(all, index < end);
        if (past) {
            int owner = __ffs((int)past) - 1;
            return {task.spans[base + owner], (index - __shfl_sync(all, end - count, owner)) * size, 0};
        }
        index -= __shfl_sync(all, end, 31);
    }
}

/* The tile of block `index` of tiles x heads. Blocks start in this order, so heads come in sections whose keys and
 * values fit in L2 together, and in a section tiles with the most work under a causal mask come first: late queries,
 * early keys. Then the last blocks are short ones, and no multiprocessor waits long for another. */
template <bool OF_KEYS> __device__ __forceinline__ tile tile_of_block(const flash_task &task, int index, int size) {
    int section = index / (task.num_tiles * task.heads_together);
    index %= task.num_tiles * task.heads_together;
    int number = index / task.heads_together;
    tile t = tile_find<OF_KEYS>(task, OF_KEYS ? number : task.num_tiles - 1 - number, size);
    t.head = section * task.heads_together + index % task.heads_together;
    return t;
}

static inline int tile_count(const mt_spans *spans, bool of_keys, int size) {
    int64_t count = 0;
    for (int64_t i = 0; i < spans->count; i++)
        count += mt_divide_up(of_keys ? spans->host[i].k_len : spans->host[i].q_len, size);
    return (int)count;
}

/* The most heads (a divisor of `heads`, of which `per_group` share keys) whose keys and values of the longest span fill
 * no more than half of L2. */
static inline int heads_in_section(const mt_attention_call *call, int64_t heads, int64_t per_group) {
    int64_t longest = 1, best = per_group;
    for (int64_t i = 0; i < call->spans->count; i++)
        if (call->spans->host[i].k_len > longest) longest = call->spans->host[i].k_len;
    int64_t group_bytes = 2 * longest * call->shape->head_size * (int64_t)sizeof(bf16);
    for (int64_t together = per_group; together <= heads; together += per_group)
        if (heads % together == 0 && together / per_group * group_bytes <= mt_cuda_device()->l2CacheSize / 2)
            best = together;
    return (int)best;
}

static inline flash_task flash_task_of(const mt_attention_call *call) {
    flash_task task = {};
    task.q = (const bf16 *)call->q, task.k = (const bf16 *)call->k, task.v = (const bf16 *)call->v;
    task.dout = (const bf16 *)call->dout, task.out = (bf16 *)call->out;
    task.dq = (bf16 *)call->dq, task.dk = (bf16 *)call->dk, task.dv = (bf16 *)call->dv;
    task.lse = call->lse, task.row_dot = call->row_dot;
    task.spans = call->spans->device, task.num_spans = (int)call->spans->count;
    task.shape = *call->shape;
    return task;
}

/* True when some key row belongs to two spans: their gradients then have to be added one span after another. */
static inline bool spans_share_keys(const mt_spans *spans) {
    for (int64_t i = 1; i < spans->count; i++) { // lists are in order but for context parallelism's
        const mt_span *a = &spans->host[i - 1], *b = &spans->host[i];
        if (b->k_start < a->k_start + a->k_len) return true;
    }
    return false;
}

/* Zeroes dk and dv of all keys of the spans, for gradients that are added. */
void mt_attention_clear_keys(const mt_attention_call *call);

/* What the flash rungs take: bf16 in rows that sixteen-byte loads can read, no dropout, as many value channels as
 * channels, up to 256. */
static inline bool flash_serves(const mt_attention_call *call) {
    const mt_attention *s = call->shape;
    const void *operands[] = {call->out, call->dq, call->dk, call->dv, call->dout, call->q, call->k, call->v};
    for (const void *operand : operands)
        if ((uintptr_t)operand % 16 != 0) return false;
    int64_t sizes[] = {s->head_size, s->q_stride, s->k_stride, s->v_stride, s->out_stride};
    for (int64_t size : sizes)
        if (size % 8 != 0) return false;
    return call->dtype == MT_BF16 && s->head_size == s->value_size && s->head_size > 0 && s->head_size <= 256 &&
           s->dropout.p <= 0 && s->scale > 0;
}

#endif
