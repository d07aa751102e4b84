/* linear_attention.cuh: the spans of a micro-batch in chunks of tokens, and the states that recurrences keep, for the
 * kernels of linear attention. */
#ifndef MT_CUDA_LINEAR_ATTENTION_CUH
#define MT_CUDA_LINEAR_ATTENTION_CUH

#include "activation.cuh"

enum { MT_CHUNK_TOKENS = 64 };

/* The chunks of all spans, one span after another. Chunk c has the tokens from 64 number on of a span. */
struct mt_chunks {
    const mt_span *spans;
    const int2 *table; // (span, number) of a chunk; NULL: no span has more than one, and chunk c is that of span c
    const int *first;  // first chunk of a span, if there is a table
    int64_t count;
};

struct mt_chunk {
    mt_span span;
    int64_t s, row; // its span, its first token in the span
    int L;          // its tokens
};

__device__ static inline mt_chunk mt_chunk_of(const mt_chunks &chunks, int64_t c) {
    int2 at = chunks.table ? chunks.table[c] : make_int2((int)c, 0);
    mt_chunk chunk = {chunks.spans[at.x], at.x, (int64_t)at.y * MT_CHUNK_TOKENS, 0};
    int64_t left = chunk.span.q_len - chunk.row;
    chunk.L = (int)(left < MT_CHUNK_TOKENS ? left : MT_CHUNK_TOKENS);
    return chunk;
}

/* Chunks of the spans [begin, end) of the list. */
int64_t mt_cuda_chunk_count(const mt_spans *spans, int64_t begin, int64_t end);

/* Enqueues the kernel that writes the table of the spans [begin, end) to `memory` of mt_cuda_chunk_bytes. The numbers
 * of spans in the table count from `begin`. */
int64_t mt_cuda_chunk_bytes(int64_t chunks, int64_t spans);
mt_chunks mt_cuda_chunks(const mt_spans *spans, int64_t begin, int64_t end, void *memory, mt_stream *stream);

/* Takes the operands of a delta rule over into the arguments of its kernels, which have their names; T is their type.
 */
template <class T, class Task> static inline void mt_take_delta_operands(Task &task, const mt_delta_args *a) {
    task.q = (const T *)a->q, task.k = (const T *)a->k, task.v = (const T *)a->v, task.b = (const T *)a->b;
    task.a = (const T *)a->a, task.A_log = (const T *)a->A_log, task.dt_bias = (const T *)a->dt_bias;
    task.dout = (const T *)a->dout, task.out = (T *)a->out, task.dq = (T *)a->dq, task.dk = (T *)a->dk;
    task.dv = (T *)a->dv, task.db = (T *)a->db, task.da = (T *)a->da;
    task.q_stride = a->q_stride, task.k_stride = a->k_stride, task.v_stride = a->v_stride;
    task.dq_stride = a->dq_stride, task.dk_stride = a->dk_stride, task.dv_stride = a->dv_stride;
    task.b_stride = a->b_stride, task.a_stride = a->a_stride, task.db_stride = a->db_stride;
    task.da_stride = a->da_stride, task.Hv = (int)a->Hv, task.heads = (int)(a->Hv / a->Hk);
    task.Dk = (int)a->Dk, task.Dv = (int)a->Dv, task.q_scale = 1 / sqrtf((float)a->Dk);
}

/* mt_states in the form that kernels use. The lists, which are the host's, have few slots. */
struct mt_device_states {
    enum { SLOTS = 8 };
    float *memory;
    const float *dstates;
    int64_t slot_rows, elements;
    int slots; // of the lists; 0: generation
    int first[SLOTS], last[SLOTS];

    /* The state before span s; NULL: zeros. */
    __device__ const float *before(const mt_span &span, int64_t s) const {
        if (!memory) return NULL;
        if (slots == 0) return span.k_len > span.q_len ? memory + span.k_start / slot_rows * elements : NULL;
        for (int slot = 0; slot < slots; slot++)
            if (first[slot] == s) return memory + slot * elements;
        return NULL;
    }
    /* Where a span leaves its last state; NULL: nowhere. */
    __device__ float *kept(const mt_span &span) const {
        return memory && slots == 0 ? memory + span.k_start / slot_rows * elements : NULL;
    }
    /* The gradient of the state after span s; NULL: zeros. */
    __device__ const float *gradient_after(int64_t s) const {
        for (int slot = 0; slot < slots && dstates; slot++)
            if (last[slot] == s) return dstates + slot * elements;
        return NULL;
    }
};

/* Spans are numbered from `begin` on. */
static inline mt_device_states mt_states_on_device(const mt_states *states, const float *dstates, int64_t elements,
                                                   int64_t begin) {
    mt_device_states device = {states->memory, dstates, states->slot_rows, elements, 0, {0}, {0}};
    if (!states->first) return device;
    MT_CHECK(states->slots <= mt_device_states::SLOTS);
    device.slots = (int)states->slots;
    for (int slot = 0; slot < device.slots; slot++) {
        device.first[slot] = states->first[slot] < begin ? -1 : (int)(states->first[slot] - begin);
        device.last[slot] = states->last[slot] < begin ? -1 : (int)(states->last[slot] - begin);
    }
    return device;
}

/* True if one span is both the first and the last of a slot: the state before it reaches the one after it. */
static inline bool mt_slot_crosses(const mt_states *states, int64_t slot) {
    return states->first[slot] >= 0 && states->first[slot] == states->last[slot];
}

static inline int64_t mt_longest_span(const mt_spans *spans) {
    int64_t longest = 0;
    for (int64_t s = 0; s < spans->count; s++)
        if (spans->host[s].q_len > longest) longest = spans->host[s].q_len;
    return longest;
}

enum { MT_STEP_LANES = 8 }; // of a recurrence token by token: threads that share a row of the state

/* x[N] summed over the threads of the same columns, in one order; all of them receive the sums. */
template <int N, int WARPS>
__device__ static inline void mt_sum_of_lines(float (&x)[N], float (&sums)[WARPS][MT_STEP_LANES * N]) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % MT_STEP_LANES;
#pragma unroll
    for (int j = 0; j < N; j++) {
        x[j] += __shfl_xor_sync(0xffffffff, x[j], 8);
        x[j] += __shfl_xor_sync(0xffffffff, x[j], 16);
        if (threadIdx.x % 32 < MT_STEP_LANES) sums[warp][lane * N + j] = x[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) {
        x[j] = 0;
        for (int w = 0; w < WARPS; w++) x[j] += sums[w][lane * N + j];
    }
    __syncthreads();
}

/* The delta rule with a decay per channel, in kda.cu. of_gradients: the map of the backward. */
void mt_cuda_kda_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream);
void mt_cuda_kda_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream);
void mt_cuda_kda_maps(const mt_delta_args *a, bool of_gradients, mt_dtype dtype, mt_stream *stream);

/* The delta rule of either kind of decays, in delta_chunks.cu. serve: true if its kernels take these operands. */
bool mt_cuda_delta_chunks_serve(const mt_delta_args *a, mt_dtype dtype, bool backward);
void mt_cuda_delta_chunks_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream);
void mt_cuda_delta_chunks_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream);
void mt_cuda_delta_chunks_maps(const mt_delta_args *a, bool of_gradients, mt_dtype dtype, mt_stream *stream);

#endif
