/* profile.c: where the time of a training step goes, as a table and as a timeline. */
#include "profile.h"

#include "file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== profile ================================================================================================= */
/* Where a step's time goes: a table of operations that times the real ones. A call becomes a record: a moment before,
 * a moment after, and the work that its arguments ask for; records are read when the step is over. On the CPU a moment
 * is the clock's, on a GPU an event in the stream, so that the host waits for nothing within a step. Operations get no
 * context, so the profile is a static object, for one thread and one run at a time. Invariants: results do not change;
 * nothing is recorded outside of a step. Where a GPU waits for the host, a call's time includes its launch. */

typedef struct mt_moment {
    double seconds;
    mt_event *event; // on a GPU; made once, then used again in every step
} mt_moment;

/* What a call must at least do: floating-point operations of products, or else bytes read and written, or sent. */
typedef struct mt_work {
    double flops, bytes;
    mt_traffic traffic;
} mt_work;

/* A forward, a backward, the optimizer: what calls belong to. */
typedef struct mt_phase {
    const char *name;
    int64_t micro_batch, chunk; // -1: of none
    mt_moment begin, end;
} mt_phase;

typedef struct mt_call {
    mt_operation operation;
    mt_work work;
    int64_t phase;           // -1: none
    const mt_stream *stream; // where it ended
    int64_t message;         // of a channel: a number that both ends know; else -1
    bool sends;
    mt_moment begin, end;
    double from, to; // of mt_time(), once the step is over
} mt_call;

/* A box of the timeline. Its lane is a thread of the trace. */
typedef struct mt_trace_event {
    const char *name;
    int lane;
    double from, to;
    int64_t micro_batch, chunk, message, iteration; // -1: none
    bool sends;
    double flops, bytes;
} mt_trace_event;

typedef struct mt_trace_lane {
    mt_traffic traffic;
    bool sends;
    const mt_stream *stream;
    double until; // the end of its last box
} mt_trace_lane;

enum { MT_TRACE_LANES = 64 };

typedef struct mt_trace {
    const char *path; // NULL: there is none, or it is written
    const mt_grid *grid;
    bool alone;                          // nothing else asks for times, so other steps have none
    int64_t iteration;                   // of the job, before this run
    int64_t step, first, last;           // steps of this run, from 1
    double clock_offset;                 // to rank 0's clock
    mt_trace_lane lanes[MT_TRACE_LANES]; // lane 0 has the phases
    int num_lanes;
    mt_trace_event *events;
    int64_t num_events, max_events;
} mt_trace;

static struct {
    const mt_ops *ops; // the real operations
    mt_ops timed;      // the table given out
    bool on_gpu, recording, warm;
    double step_begin;
    mt_moment base; // the same moment on a GPU
    mt_call *calls; // of this step; their room stays for the next
    int64_t num_calls, max_calls;
    mt_phase *phases;
    int64_t num_phases, max_phases, phase; // the last is the one at hand, -1 between two
    mt_profile sums;
    mt_trace trace;
} mt_profiler;

static void mt_moment_mark(mt_moment *moment, mt_stream *stream) {
#ifdef MT_HAVE_CUDA
    if (mt_profiler.on_gpu) {
        if (!moment->event) moment->event = mt_cuda_event_create();
        mt_cuda_event_record(moment->event, stream);
        return;
    }
#endif
    (void)stream;
    moment->seconds = mt_time();
}

/* On a GPU waits for the second moment. */
static double mt_moment_seconds(const mt_moment *from, const mt_moment *to) {
#ifdef MT_HAVE_CUDA
    if (mt_profiler.on_gpu) return mt_cuda_event_seconds(from->event, to->event);
#endif
    return to->seconds - from->seconds;
}

/* The clock at a moment of this step. */
static double mt_moment_time(const mt_moment *moment) {
    return mt_profiler.on_gpu ? mt_profiler.step_begin + mt_moment_seconds(&mt_profiler.base, moment) : moment->seconds;
}

static void mt_moment_free(mt_moment *moment) {
#ifdef MT_HAVE_CUDA
    if (moment->event) mt_cuda_event_destroy(moment->event);
#endif
    *moment = (mt_moment){0};
}

/* Room for one more record of `size` bytes, zeroed; records keep theirs, with their events, from step to step. It grows
 * in the first step, which is not counted. */
static void *mt_records_grow(void *records, int64_t count, int64_t *room, size_t size) {
    if (count < *room) return records;
    int64_t old = *room;
    *room = old > 0 ? 2 * old : 1024;
    records = mt_realloc(records, *room * (int64_t)size);
    memset((char *)records + (size_t)old * size, 0, (size_t)(*room - old) * size);
    return records;
}

static void mt_call_begin(mt_operation operation, mt_work work, mt_stream *stream) {
    if (!mt_profiler.recording) return;
    mt_profiler.calls =
        mt_records_grow(mt_profiler.calls, mt_profiler.num_calls, &mt_profiler.max_calls, sizeof(mt_call));
    mt_call *call = &mt_profiler.calls[mt_profiler.num_calls];
    call->operation = operation;
    call->work = work;
    call->phase = mt_profiler.phase;
    call->message = -1, call->sends = false;
    mt_moment_mark(&call->begin, stream);
}

static void mt_call_end(mt_stream *stream) {
    if (!mt_profiler.recording) return;
    mt_call *call = &mt_profiler.calls[mt_profiler.num_calls++];
    call->stream = stream;
    mt_moment_mark(&call->end, stream);
}

static void mt_profile_phase_begin(const char *name, int64_t micro_batch, int64_t chunk, mt_stream *stream) {
    if (!mt_profiler.recording) return;
    mt_profiler.phases =
        mt_records_grow(mt_profiler.phases, mt_profiler.num_phases, &mt_profiler.max_phases, sizeof(mt_phase));
    mt_profiler.phase = mt_profiler.num_phases++;
    mt_phase *phase = &mt_profiler.phases[mt_profiler.phase];
    phase->name = name, phase->micro_batch = micro_batch, phase->chunk = chunk;
    mt_moment_mark(&phase->begin, stream);
}

static void mt_profile_phase_end(mt_stream *stream) {
    if (mt_profiler.recording) mt_moment_mark(&mt_profiler.phases[mt_profiler.phase].end, stream);
    mt_profiler.phase = -1;
}

static void mt_trace_step(double end);
static void mt_profile_add_traffic(mt_profile *sums, const mt_call *calls, int64_t count);

/* A trace alone also times the step before its first, which makes room for the records. */
void mt_profile_step_begin(void) {
    mt_trace *trace = &mt_profiler.trace;
    trace->step++;
    mt_profiler.num_calls = mt_profiler.num_phases = 0;
    mt_profiler.phase = -1;
    mt_profiler.recording = !trace->alone || (trace->step >= trace->first - 1 && trace->step <= trace->last);
    mt_moment_mark(&mt_profiler.base, NULL);
#ifdef MT_HAVE_CUDA
    if (mt_profiler.on_gpu) mt_profiler.ops->event_wait(mt_profiler.base.event);
#endif
    mt_profiler.step_begin = mt_time();
}

void mt_profile_step_end(void) {
    double end = mt_time();
    if (!mt_profiler.recording) return;
    mt_profiler.recording = false;
    for (int64_t i = 0; i < mt_profiler.num_calls; i++) {
        mt_call *call = &mt_profiler.calls[i];
        call->from = mt_moment_time(&call->begin);
        call->to = call->from + mt_moment_seconds(&call->begin, &call->end);
    }
    const mt_trace *trace = &mt_profiler.trace;
    if (trace->path && trace->step >= trace->first && trace->step <= trace->last) mt_trace_step(end);
    if (!mt_profiler.warm) {
        mt_profiler.warm = true;
        return;
    }
    mt_profiler.sums.steps++;
    mt_profiler.sums.seconds += end - mt_profiler.step_begin;
    for (int64_t i = 0; i < mt_profiler.num_calls; i++) {
        const mt_call *call = &mt_profiler.calls[i];
        mt_profile_row *row = &mt_profiler.sums.rows[call->operation];
        row->calls++;
        row->seconds += call->to - call->from;
        row->flops += call->work.flops;
        row->bytes += call->work.bytes;
    }
    mt_profile_add_traffic(&mt_profiler.sums, mt_profiler.calls, mt_profiler.num_calls);
}

void mt_profile_parts(double parts[MT_NUM_PARTS]) {
    for (int64_t i = 0; i < mt_profiler.num_calls; i++) {
        const mt_call *call = &mt_profiler.calls[i];
        const char *phase = call->phase >= 0 ? mt_profiler.phases[call->phase].name : "";
        int part = call->work.traffic != MT_TRAFFIC_NONE ? MT_PART_COMMUNICATION
                   : strncmp(phase, "forward", 7) == 0   ? MT_PART_FORWARD
                   : strncmp(phase, "backward", 8) == 0  ? MT_PART_BACKWARD
                                                         : MT_PART_OPTIMIZER;
        parts[part] += call->to - call->from;
    }
}

const mt_profile *mt_profile_read(void) {
    return &mt_profiler.sums;
}

/* ==== the timed operations ================================================================================== */
/* One function an operation: the work, then the real call between two moments. Bytes are those that must move: each
 * operand once, without what is small beside the rows (indices, weights of norms, statistics). */

static mt_work mt_work_product(int64_t T, int64_t N, int64_t K) {
    return (mt_work){.flops = 2.0 * (double)T * (double)N * (double)K};
}

static mt_work mt_work_bytes(int64_t elements, int64_t bytes_each) {
    return (mt_work){.bytes = (double)elements * (double)bytes_each};
}

/* The pairs of a query and a key that it sees take over_d products of D channels (forward q k^T; backward that again,
 * dq and dk) and over_dv of Dv (forward p v; backward dout v^T and dv). */
static mt_work mt_work_attention(const mt_attention *a, int over_d, int over_dv) {
    int64_t pairs = 0;
    for (int64_t s = 0; s < a->spans.count; s++)
        for (int64_t i = 0, begin, end; i < a->spans.host[s].q_len; i++) {
            mt_span_keys(&a->spans.host[s], a->window, i, &begin, &end);
            pairs += end - begin;
        }
    return mt_work_product(pairs, a->num_heads, over_d * a->head_size + over_dv * a->value_size);
}

#define MT_TIMED(operation, work, ...)                                                                                 \
    do {                                                                                                               \
        mt_call_begin(MT_OPERATION_##operation, work, stream);                                                         \
        mt_profiler.ops->operation(__VA_ARGS__, stream);                                                               \
        mt_call_end(stream);                                                                                           \
    } while (0)

static void mt_timed_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    MT_TIMED(memory_copy, mt_work_bytes(bytes, 2), to, from, bytes);
}

static void mt_timed_memory_zero(void *memory, int64_t bytes, mt_stream *stream) {
    MT_TIMED(memory_zero, mt_work_bytes(bytes, 1), memory, bytes);
}

static void mt_timed_linear_forward(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N,
                                    int64_t K, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(linear_forward, mt_work_product(T, N, K), y, x, w, bias, T, N, K, dtype);
}

static void mt_timed_linear_backward_input(void *dx, const void *dy, const void *w, int64_t T, int64_t N, int64_t K,
                                           mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(linear_backward_input, mt_work_product(T, N, K), dx, dy, w, T, N, K, dtype);
}

static void mt_timed_linear_backward_weight(float *dw, float *dbias, const void *dy, const void *x, int64_t T,
                                            int64_t N, int64_t K, bool accumulate, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(linear_backward_weight, mt_work_product(T, N, K), dw, dbias, dy, x, T, N, K, accumulate, dtype);
}

static void mt_timed_embedding_forward(void *out, const int32_t *ids, const void *w, int64_t T, int64_t C,
                                       int64_t first, int64_t count, bool accumulate, mt_dtype dtype,
                                       mt_stream *stream) {
    MT_TIMED(embedding_forward, mt_work_bytes(T * C, (accumulate ? 3 : 2) * mt_dtype_size(dtype)), out, ids, w, T, C,
             first, count, accumulate, dtype);
}

/* Only dout is counted: how many rows of dw occur, which move 8 bytes an element, the host does not know. */
static void mt_timed_embedding_backward(float *dw, const void *dout, const int32_t *ids, int64_t T, int64_t C,
                                        int64_t first, int64_t count, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(embedding_backward, mt_work_bytes(T * C, mt_dtype_size(dtype)), dw, dout, ids, T, C, first, count, dtype);
}

static void mt_timed_rmsnorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(rmsnorm_forward, mt_work_bytes(a->T * a->H * a->C, 2 * mt_dtype_size(dtype)), a, dtype);
}

static void mt_timed_rmsnorm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(rmsnorm_backward, mt_work_bytes(a->T * a->H * a->C, (a->dresidual ? 4 : 3) * mt_dtype_size(dtype)), a,
             dtype);
}

static void mt_timed_layernorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(layernorm_forward, mt_work_bytes(a->T * a->C, 2 * mt_dtype_size(dtype)), a, dtype);
}

static void mt_timed_layernorm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(layernorm_backward, mt_work_bytes(a->T * a->C, (a->dresidual ? 4 : 3) * mt_dtype_size(dtype)), a, dtype);
}

/* In place, the channels that do not rotate stay where they are. */
static void mt_timed_rope_forward(const mt_rope_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(rope_forward, mt_work_bytes(a->T * a->H * (a->y == a->x ? a->rotation.R : a->D), 2 * mt_dtype_size(dtype)),
             a, dtype);
}

static void mt_timed_rope_backward(const mt_rope_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(rope_backward,
             mt_work_bytes(a->T * a->H * (a->y == a->x ? a->rotation.R : a->D), 2 * mt_dtype_size(dtype)), a, dtype);
}

/* k_rope, q, kv and what is made of them. */
static mt_work mt_work_latent_heads(const mt_latent_heads_args *a, mt_dtype dtype) {
    int64_t R = a->rotation.R, elements = a->T * R + a->T * a->H * (2 * R + a->N + a->Dv + a->N + R + a->Dv);
    return mt_work_bytes(elements, mt_dtype_size(dtype));
}

static void mt_timed_latent_heads_forward(const mt_latent_heads_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(latent_heads_forward, mt_work_latent_heads(a, dtype), a, dtype);
}

static void mt_timed_latent_heads_backward(const mt_latent_heads_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(latent_heads_backward, mt_work_latent_heads(a, dtype), a, dtype);
}

/* In place, as above. */
static void mt_timed_qk_forward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(qk_forward,
             mt_work_bytes(a->T * (a->H + a->G) * (a->qk == a->qkv ? a->rotation.R : a->D), 2 * mt_dtype_size(dtype)),
             a, dtype);
}

static void mt_timed_qk_backward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(qk_backward,
             mt_work_bytes(a->T * (a->H + a->G) * (a->dqkv == a->dqk ? a->rotation.R : a->D),
                           (a->q_w ? 3 : 2) * mt_dtype_size(dtype)),
             a, dtype);
}

static void mt_timed_attention_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(attention_forward, mt_work_attention(a, 1, 1), a, dtype);
}

static void mt_timed_attention_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(attention_backward, mt_work_attention(a, 3, 2), a, dtype);
}

/* Reads the part, reads and writes the sum. */
static void mt_timed_attention_merge(float *out, float *lse, const void *part, const float *part_lse,
                                     const mt_spans *spans, int64_t H, int64_t Dv, bool first, mt_dtype dtype,
                                     mt_stream *stream) {
    int64_t rows = 0;
    for (int64_t s = 0; s < spans->count; s++) rows += spans->host[s].q_len;
    MT_TIMED(attention_merge, mt_work_bytes(rows * H * Dv, (first ? 4 : 8) + mt_dtype_size(dtype)), out, lse, part,
             part_lse, spans, H, Dv, first, dtype);
}

static void mt_timed_accumulate_rows(float *sum, const void *x, const mt_spans *spans, bool of_keys, int64_t width,
                                     int64_t x_stride, bool first, mt_dtype dtype, mt_stream *stream) {
    int64_t rows = 0;
    for (int64_t s = 0; s < spans->count; s++) rows += of_keys ? spans->host[s].k_len : spans->host[s].q_len;
    MT_TIMED(accumulate_rows, mt_work_bytes(rows * width, (first ? 4 : 8) + mt_dtype_size(dtype)), sum, x, spans,
             of_keys, width, x_stride, first, dtype);
}

static void mt_timed_gelu_forward(void *y, const void *x, int64_t n, bool tanh_approximation, mt_dtype dtype,
                                  mt_stream *stream) {
    MT_TIMED(gelu_forward, mt_work_bytes(n, 2 * mt_dtype_size(dtype)), y, x, n, tanh_approximation, dtype);
}

static void mt_timed_gelu_backward(void *dx, const void *dy, const void *x, int64_t n, bool tanh_approximation,
                                   mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(gelu_backward, mt_work_bytes(n, 3 * mt_dtype_size(dtype)), dx, dy, x, n, tanh_approximation, dtype);
}

static void mt_timed_linear_gelu_forward(void *y, void *pre, const void *x, const void *w, const void *bias, int64_t T,
                                         int64_t N, int64_t K, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(linear_gelu_forward, mt_work_product(T, N, K), y, pre, x, w, bias, T, N, K, dtype);
}

static void mt_timed_linear_backward_gelu(void *dpre, const void *dy, const void *w, const void *pre, int64_t T,
                                          int64_t N, int64_t K, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(linear_backward_gelu, mt_work_product(T, N, K), dpre, dy, w, pre, T, N, K, dtype);
}

static void mt_timed_swiglu_forward(void *y, const void *gate_up, int64_t T, int64_t F, mt_dtype dtype,
                                    mt_stream *stream) {
    MT_TIMED(swiglu_forward, mt_work_bytes(T * F, 3 * mt_dtype_size(dtype)), y, gate_up, T, F, dtype);
}

static void mt_timed_swiglu_backward(void *dgate_up, const void *dy, const void *gate_up, int64_t T, int64_t F,
                                     mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(swiglu_backward, mt_work_bytes(T * F, 5 * mt_dtype_size(dtype)), dgate_up, dy, gate_up, T, F, dtype);
}

static void mt_timed_dropout_add_forward(void *out, const void *x, const void *residual, const int64_t *token_index,
                                         int64_t T, int64_t C, int64_t first_channel, const mt_dropout *dropout,
                                         mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(dropout_add_forward, mt_work_bytes(T * C, (residual ? 3 : 2) * mt_dtype_size(dtype)), out, x, residual,
             token_index, T, C, first_channel, dropout, dtype);
}

static void mt_timed_dropout_add_backward(void *dx, const void *dout, const int64_t *token_index, int64_t T, int64_t C,
                                          int64_t first_channel, const mt_dropout *dropout, mt_dtype dtype,
                                          mt_stream *stream) {
    MT_TIMED(dropout_add_backward, mt_work_bytes(T * C, 2 * mt_dtype_size(dtype)), dx, dout, token_index, T, C,
             first_channel, dropout, dtype);
}

static void mt_timed_scatter_rows(void *to, const void *from, const int32_t *rows, int64_t T, int64_t width,
                                  int64_t to_stride, int64_t from_stride, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(scatter_rows, mt_work_bytes(T * width, 2 * mt_dtype_size(dtype)), to, from, rows, T, width, to_stride,
             from_stride, dtype);
}

static void mt_timed_gather_rows(void *to, const void *from, const int32_t *rows, int64_t T, int64_t width,
                                 int64_t to_stride, int64_t from_stride, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(gather_rows, mt_work_bytes(T * width, 2 * mt_dtype_size(dtype)), to, from, rows, T, width, to_stride,
             from_stride, dtype);
}

static void mt_timed_cross_entropy_forward(float *row_max, float *row_sum, float *row_target, float *row_weighted,
                                           const void *logits, const int32_t *labels, int64_t T, int64_t stride,
                                           int64_t first, int64_t count, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(cross_entropy_forward, mt_work_bytes(T * count, mt_dtype_size(dtype)), row_max, row_sum, row_target,
             row_weighted, logits, labels, T, stride, first, count, dtype);
}

static void mt_timed_cross_entropy_combine(float *row_max, float *row_sum, float *row_target, float *row_weighted,
                                           const float *parts, int64_t n, int64_t T, mt_stream *stream) {
    MT_TIMED(cross_entropy_combine, mt_work_bytes((n + 1) * T, (row_weighted ? 4 : 3) * 4), row_max, row_sum,
             row_target, row_weighted, parts, n, T);
}

static void mt_timed_cross_entropy_loss(float *loss, float *entropy, float *lse, const float *row_max,
                                        const float *row_sum, const float *row_target, const float *row_weighted,
                                        int64_t T, mt_stream *stream) {
    MT_TIMED(cross_entropy_loss, mt_work_bytes(T, (entropy ? 7 : 5) * 4), loss, entropy, lse, row_max, row_sum,
             row_target, row_weighted, T);
}

/* Reads the vocabulary's columns and writes the padding's too. */
static void mt_timed_cross_entropy_backward(void *dlogits, const void *logits, const int32_t *labels, const float *lse,
                                            const float *dloss, int64_t T, int64_t stride, int64_t first, int64_t count,
                                            mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(cross_entropy_backward, mt_work_bytes(T * (count + stride), mt_dtype_size(dtype)), dlogits, logits, labels,
             lse, dloss, T, stride, first, count, dtype);
}

static void mt_timed_loss_accumulate(double *sums, const float *loss, const float *mask, int64_t T, mt_stream *stream) {
    MT_TIMED(loss_accumulate, mt_work_bytes(T, 8), sums, loss, mask, T);
}

static void mt_timed_likeliest(int32_t *ids, const void *logits, int64_t T, int64_t stride, int64_t count,
                               mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(likeliest, mt_work_bytes(T * count, mt_dtype_size(dtype)), ids, logits, T, stride, count, dtype);
}

static void mt_timed_accumulate(float *sum, const float *x, int64_t n, mt_stream *stream) {
    MT_TIMED(accumulate, mt_work_bytes(n, 12), sum, x, n);
}

static void mt_timed_squared_norm(double *sum, const float *x, int64_t n, mt_stream *stream) {
    MT_TIMED(squared_norm, mt_work_bytes(n, 4), sum, x, n);
}

static void mt_timed_gradient_scale(float *scale, float *norm, const double *sum_of_squares, const double *denominator,
                                    float clip, mt_stream *stream) {
    MT_TIMED(gradient_scale, mt_work_bytes(1, 24), scale, norm, sum_of_squares, denominator, clip);
}

static void mt_timed_step_guard(double *guard, float *scale, const double *loss_sum, const double *tokens,
                                const float *norm, const mt_guard_rules *rules, mt_stream *stream) {
    MT_TIMED(step_guard, mt_work_bytes(1, 72), guard, scale, loss_sum, tokens, norm, rules);
}

/* Reads the gradient; reads and writes both moments and the fp32 weights; writes the bf16 copy. */
static void mt_timed_adamw_step(void *param, float *master, float *m, float *v, const float *grad, const float *scale,
                                int64_t n, const mt_adamw *adamw, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(adamw_step, mt_work_bytes(n, 28 + (master ? mt_dtype_size(dtype) : 0)), param, master, m, v, grad, scale,
             n, adamw, dtype);
}

static void mt_timed_random_normal(void *param, int64_t n, uint64_t key, int64_t first, float mean, float std,
                                   mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(random_normal, mt_work_bytes(n, mt_dtype_size(dtype)), param, n, key, first, mean, std, dtype);
}

static void mt_timed_convert(void *to, mt_dtype to_dtype, const void *from, mt_dtype from_dtype, int64_t n,
                             mt_stream *stream) {
    MT_TIMED(convert, mt_work_bytes(n, mt_dtype_size(to_dtype) + mt_dtype_size(from_dtype)), to, to_dtype, from,
             from_dtype, n);
}

/* Collectives count what each rank sends, and receives, at least. A group of one does nothing and is not recorded. */

/* Sums of doubles are of losses and norms. Groups of replicas exchange gradients and parameters. */
static mt_work mt_work_sent(mt_operation operation, int64_t elements, mt_dtype dtype, const mt_group *group) {
    static const struct {
        const char *group;
        mt_traffic traffic;
    } groups[] = {{"tensor", MT_TRAFFIC_TENSOR},     {"tensor-context", MT_TRAFFIC_TENSOR},
                  {"context", MT_TRAFFIC_CONTEXT},   {"context-a2a", MT_TRAFFIC_CONTEXT},
                  {"expert", MT_TRAFFIC_EXPERT},     {"context-ring", MT_TRAFFIC_CONTEXT},
                  {"model", MT_TRAFFIC_SUMS},        {"expert-exchange", MT_TRAFFIC_EXPERT},
                  {"pipeline", MT_TRAFFIC_PIPELINE}, {"expert-tensor", MT_TRAFFIC_EXPERT}};
    mt_work work = mt_work_bytes(elements, mt_dtype_size(dtype));
    work.traffic = operation == MT_OPERATION_all_gather ? MT_TRAFFIC_PARAMETERS : MT_TRAFFIC_GRADIENTS;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (strcmp(group->name, groups[i].group) == 0) work.traffic = groups[i].traffic;
    if (operation == MT_OPERATION_all_reduce && dtype == MT_F64) work.traffic = MT_TRAFFIC_SUMS;
    return work;
}

static void mt_timed_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype,
                                const mt_group *group, mt_stream *stream) {
    if (group->size == 1) return;
    mt_work work = mt_work_sent(MT_OPERATION_all_reduce, count, dtype, group);
    work.bytes *= 2.0 * (group->size - 1) / group->size; // in two halves: summed slices, then the slices
    MT_TIMED(all_reduce, work, buffer, count, reduction, dtype, group);
}

static void mt_timed_all_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                mt_stream *stream) {
    if (group->size == 1)
        mt_profiler.ops->all_gather(out, in, count, dtype, group, stream);
    else
        MT_TIMED(all_gather, mt_work_sent(MT_OPERATION_all_gather, (group->size - 1) * count, dtype, group), out, in,
                 count, dtype, group);
}

static void mt_timed_reduce_scatter(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                    mt_stream *stream) {
    if (group->size == 1)
        mt_profiler.ops->reduce_scatter(out, in, count, dtype, group, stream);
    else
        MT_TIMED(reduce_scatter, mt_work_sent(MT_OPERATION_reduce_scatter, (group->size - 1) * count, dtype, group),
                 out, in, count, dtype, group);
}

static void mt_timed_all_to_all(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                mt_stream *stream) {
    if (group->size == 1)
        mt_profiler.ops->all_to_all(out, in, count, dtype, group, stream);
    else
        MT_TIMED(all_to_all, mt_work_sent(MT_OPERATION_all_to_all, (group->size - 1) * count, dtype, group), out, in,
                 count, dtype, group);
}

static void mt_timed_all_to_all_v(void *out, const int64_t *out_counts, const void *in, const int64_t *in_counts,
                                  mt_dtype dtype, const mt_group *group, mt_stream *stream) {
    int64_t sent = -in_counts[group->rank];
    for (int rank = 0; rank < group->size; rank++) sent += in_counts[rank];
    if (group->size == 1)
        mt_profiler.ops->all_to_all_v(out, out_counts, in, in_counts, dtype, group, stream);
    else
        MT_TIMED(all_to_all_v, mt_work_sent(MT_OPERATION_all_to_all_v, sent, dtype, group), out, out_counts, in,
                 in_counts, dtype, group);
}

static void mt_timed_broadcast(void *buffer, int64_t count, mt_dtype dtype, int root, const mt_group *group,
                               mt_stream *stream) {
    if (group->size == 1) return;
    MT_TIMED(broadcast, mt_work_sent(MT_OPERATION_broadcast, count, dtype, group), buffer, count, dtype, root, group);
}

/* Marks the record that was begun as one of a message; both ends give it the same number. */
static void mt_call_is_message(const mt_channel *channel, int64_t ticket) {
    if (!mt_profiler.recording) return;
    const mt_group *group = channel->group;
    mt_call *call = &mt_profiler.calls[mt_profiler.num_calls];
    int64_t pair = (int64_t)group->members[channel->from] << 16 ^ group->members[channel->to];
    call->message = (pair << 4 ^ channel->id) << 16 ^ (ticket & 0xffff);
    call->sends = group->rank == channel->from;
}

/* A message that leaves: until it is through where it has a stream of its own, else the time of the call. */
static int64_t mt_timed_channel_send(mt_channel *channel, const void *buffer, int64_t count, mt_dtype dtype,
                                     mt_stream *stream) {
    mt_call_begin(MT_OPERATION_channel_send, mt_work_sent(MT_OPERATION_channel_send, count, dtype, channel->group),
                  stream);
    int64_t ticket = mt_profiler.ops->channel_send(channel, buffer, count, dtype, stream);
    mt_call_is_message(channel, ticket);
    mt_call_end(channel->stream ? channel->stream : stream);
    return ticket;
}

/* The time that a message keeps the stream waiting. */
static void mt_timed_channel_wait(mt_channel *channel, int64_t ticket, mt_stream *stream) {
    int64_t bytes = channel->bytes[ticket % MT_CHANNEL_TICKETS];
    mt_call_begin(MT_OPERATION_channel_wait, mt_work_sent(MT_OPERATION_channel_wait, bytes, MT_U8, channel->group),
                  stream);
    mt_profiler.ops->channel_wait(channel, ticket, stream);
    mt_call_is_message(channel, ticket);
    mt_call_end(stream);
}

static void mt_timed_mailbox_trade(mt_mailbox *mailbox, const void *in, int64_t count, int64_t first, int64_t stride,
                                   mt_dtype dtype, int to, int from, mt_stream *stream) {
    MT_TIMED(mailbox_trade, mt_work_sent(MT_OPERATION_mailbox_trade, count, dtype, mailbox->group), mailbox, in, count,
             first, stride, dtype, to, from);
}

static void mt_timed_residual_norm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(residual_norm_forward, mt_work_bytes(a->T * a->C, 4 * mt_dtype_size(dtype)), a, dtype);
}

static void mt_timed_router_logits(float *logits, const void *x, const void *w, int64_t T, int64_t E, int64_t C,
                                   mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(router_logits, mt_work_product(T, E, C), logits, x, w, T, E, C, dtype);
}

static void mt_timed_route_forward(float *probs, int32_t *experts, int32_t *invalid, const float *logits,
                                   const float *bias, int64_t T, const mt_router *router, mt_stream *stream) {
    MT_TIMED(route_forward, mt_work_bytes(T * (router->num_experts + 2 * router->topk), 4), probs, experts, invalid,
             logits, bias, T, router);
}

static void mt_timed_route_sinkhorn(float *probs, int32_t *experts, int32_t *invalid, const float *logits, int64_t T,
                                    int64_t first, int64_t count, const mt_router *router, mt_stream *stream) {
    MT_TIMED(route_sinkhorn, mt_work_bytes(T * router->num_experts + 2 * count * router->topk, 4), probs, experts,
             invalid, logits, T, first, count, router);
}

static void mt_timed_route_backward(float *dlogits, const float *dprobs, const int32_t *experts, const float *logits,
                                    int64_t T, const mt_router *router, mt_stream *stream) {
    MT_TIMED(route_backward, mt_work_bytes(T * (router->num_experts + router->topk), 8), dlogits, dprobs, experts,
             logits, T, router);
}

static void mt_timed_balance_forward(float *sums, double *z_sum, const float *logits, const int32_t *sequence,
                                     int64_t S, int64_t T, const mt_router *router, mt_stream *stream) {
    MT_TIMED(balance_forward, mt_work_bytes((T + 2 * S) * router->num_experts, 4), sums, z_sum, logits, sequence, S, T,
             router);
}

static void mt_timed_balance_loss(double *loss, const float *sums, int64_t S, int64_t E, mt_stream *stream) {
    MT_TIMED(balance_loss, mt_work_bytes(S * E, 8), loss, sums, S, E);
}

static void mt_timed_balance_backward(float *dlogits, const float *logits, const float *counts, const int32_t *sequence,
                                      int64_t S, int64_t T, float aux_scale, float z_scale, const mt_router *router,
                                      mt_stream *stream) {
    MT_TIMED(balance_backward, mt_work_bytes(T * router->num_experts, 12), dlogits, logits, counts, sequence, S, T,
             aux_scale, z_scale, router);
}

static void mt_timed_count_experts(float *loads, const int32_t *experts, int64_t n, int64_t E, mt_stream *stream) {
    MT_TIMED(count_experts, mt_work_bytes(n, 4), loads, experts, n, E);
}

static void mt_timed_drop_tokens(int32_t *kept, const int32_t *experts, const float *probs, const int64_t *token_index,
                                 int64_t T, int64_t k, int64_t first, int64_t count, int64_t capacity, bool by_position,
                                 mt_stream *stream) {
    MT_TIMED(drop_tokens, mt_work_bytes((by_position ? T : 2 * T) * k + 2 * T + count * k, 4), kept, experts, probs,
             token_index, T, k, first, count, capacity, by_position);
}

static void mt_timed_dispatch_plan(int32_t *offsets, int32_t *position, int32_t *choice, int32_t *token,
                                   const int32_t *experts, int64_t T, int64_t M, const mt_dispatch *dispatch,
                                   mt_stream *stream) {
    MT_TIMED(dispatch_plan, mt_work_bytes(T * dispatch->topk * (1 + dispatch->copies) + 2 * M, 4), offsets, position,
             choice, token, experts, T, M, dispatch);
}

static void mt_timed_exchange_order(int32_t *to_expert, int32_t *from_expert, int32_t *offsets, const int32_t *counts,
                                    int64_t sources, int64_t local, int64_t M, mt_stream *stream) {
    MT_TIMED(exchange_order, mt_work_bytes(M, 8), to_expert, from_expert, offsets, counts, sources, local, M);
}

/* As if every position were a row: how many are, the host does not know. */
static void mt_timed_combine_rows(void *out, const void *in, const int32_t *position, const void *base, int64_t T,
                                  int64_t n, int64_t C, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(combine_rows, mt_work_bytes(T * (n + (base ? 2 : 1)) * C, mt_dtype_size(dtype)), out, in, position, base,
             T, n, C, dtype);
}

/* As if every row that there is memory for were some expert's: likewise. */
static void mt_timed_grouped_linear_forward(void *y, const void *x, const void *w, const int32_t *offsets, int64_t M,
                                            int64_t N, int64_t K, int64_t E, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(grouped_linear_forward, mt_work_product(M, N, K), y, x, w, offsets, M, N, K, E, dtype);
}

static void mt_timed_grouped_linear_backward_input(void *dx, const void *dy, const void *w, const int32_t *offsets,
                                                   int64_t M, int64_t N, int64_t K, int64_t E, mt_dtype dtype,
                                                   mt_stream *stream) {
    MT_TIMED(grouped_linear_backward_input, mt_work_product(M, N, K), dx, dy, w, offsets, M, N, K, E, dtype);
}

static void mt_timed_grouped_linear_backward_weight(float *dw, const void *dy, const void *x, const int32_t *offsets,
                                                    int64_t M, int64_t N, int64_t K, int64_t E, bool accumulate,
                                                    mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(grouped_linear_backward_weight, mt_work_product(M, N, K), dw, dy, x, offsets, M, N, K, E, accumulate,
             dtype);
}

static void mt_timed_expert_swiglu_forward(void *y, const void *gate_up, const float *weights, int64_t M, int64_t F,
                                           mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(expert_swiglu_forward, mt_work_bytes(M * F, 3 * mt_dtype_size(dtype)), y, gate_up, weights, M, F, dtype);
}

static void mt_timed_expert_swiglu_backward(void *dgate_up, float *dweights, const void *dy, const void *gate_up,
                                            const float *weights, int64_t M, int64_t F, mt_dtype dtype,
                                            mt_stream *stream) {
    MT_TIMED(expert_swiglu_backward, mt_work_bytes(M * F, 5 * mt_dtype_size(dtype)), dgate_up, dweights, dy, gate_up,
             weights, M, F, dtype);
}

static void mt_timed_scale_rows_forward(void *y, const void *x, const float *weights, int64_t M, int64_t C,
                                        mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(scale_rows_forward, mt_work_bytes(M * C, 2 * mt_dtype_size(dtype)), y, x, weights, M, C, dtype);
}

static void mt_timed_scale_rows_backward(void *dx, float *dweights, const void *dy, const void *x, const float *weights,
                                         int64_t M, int64_t C, mt_dtype dtype, mt_stream *stream) {
    MT_TIMED(scale_rows_backward, mt_work_bytes(M * C, 3 * mt_dtype_size(dtype)), dx, dweights, dy, x, weights, M, C,
             dtype);
}

static void mt_timed_expert_bias_step(float *bias, const float *loads, const float *scale, int64_t E, float rate,
                                      mt_stream *stream) {
    MT_TIMED(expert_bias_step, mt_work_bytes(E, 12), bias, loads, scale, E, rate);
}

static void mt_profile_time_experts(mt_ops *timed) {
    timed->router_logits = mt_timed_router_logits;
    timed->route_forward = mt_timed_route_forward;
    timed->route_sinkhorn = mt_timed_route_sinkhorn;
    timed->route_backward = mt_timed_route_backward;
    timed->balance_forward = mt_timed_balance_forward;
    timed->balance_loss = mt_timed_balance_loss;
    timed->balance_backward = mt_timed_balance_backward;
    timed->count_experts = mt_timed_count_experts;
    timed->drop_tokens = mt_timed_drop_tokens;
    timed->dispatch_plan = mt_timed_dispatch_plan;
    timed->exchange_order = mt_timed_exchange_order;
    timed->combine_rows = mt_timed_combine_rows;
    timed->grouped_linear_forward = mt_timed_grouped_linear_forward;
    timed->grouped_linear_backward_input = mt_timed_grouped_linear_backward_input;
    timed->grouped_linear_backward_weight = mt_timed_grouped_linear_backward_weight;
    timed->expert_swiglu_forward = mt_timed_expert_swiglu_forward;
    timed->expert_swiglu_backward = mt_timed_expert_swiglu_backward;
    timed->scale_rows_forward = mt_timed_scale_rows_forward;
    timed->scale_rows_backward = mt_timed_scale_rows_backward;
    timed->expert_bias_step = mt_timed_expert_bias_step;
}

/* Communication, and what a backend may lack, which its profile then lacks too. */
static void mt_profile_time_others(mt_ops *timed, const mt_ops *ops) {
    timed->all_reduce = mt_timed_all_reduce;
    timed->all_gather = mt_timed_all_gather;
    timed->reduce_scatter = mt_timed_reduce_scatter;
    timed->all_to_all = mt_timed_all_to_all;
    timed->all_to_all_v = mt_timed_all_to_all_v;
    timed->broadcast = mt_timed_broadcast;
    timed->stream_follow = ops->stream_follow;
    timed->channel_open = ops->channel_open;
    timed->channel_send = mt_timed_channel_send;
    timed->channel_recv = ops->channel_recv;
    timed->channel_wait = mt_timed_channel_wait;
    timed->channel_close = ops->channel_close;
    timed->mailbox_open = ops->mailbox_open;
    timed->mailbox_trade = mt_timed_mailbox_trade;
    timed->mailbox_close = ops->mailbox_close;
    if (ops->qk_forward) timed->qk_forward = mt_timed_qk_forward;
    if (ops->qk_backward) timed->qk_backward = mt_timed_qk_backward;
    if (ops->linear_gelu_forward) timed->linear_gelu_forward = mt_timed_linear_gelu_forward;
    if (ops->linear_backward_gelu) timed->linear_backward_gelu = mt_timed_linear_backward_gelu;
    if (ops->residual_norm_forward) timed->residual_norm_forward = mt_timed_residual_norm_forward;
}

/* What gives no work to the device is the real operation itself. Graphs are left out: what they hold has no moments. */
static mt_ops mt_profile_timed_ops(const mt_ops *ops) {
    return (mt_ops){
        .name = ops->name,
        .memory_available = ops->memory_available,
        .memory_alloc = ops->memory_alloc,
        .memory_free = ops->memory_free,
        .memory_alloc_ordered = ops->memory_alloc_ordered,
        .memory_free_ordered = ops->memory_free_ordered,
        .memory_alloc_host = ops->memory_alloc_host,
        .memory_free_host = ops->memory_free_host,
        .memory_copy = mt_timed_memory_copy,
        .memory_zero = mt_timed_memory_zero,
        .workspace_bytes = ops->workspace_bytes,
        .stream_create = ops->stream_create,
        .stream_destroy = ops->stream_destroy,
        .stream_wait = ops->stream_wait,
        .event_create = ops->event_create,
        .event_destroy = ops->event_destroy,
        .event_record = ops->event_record,
        .event_wait = ops->event_wait,
        .linear_forward = mt_timed_linear_forward,
        .linear_backward_input = mt_timed_linear_backward_input,
        .linear_backward_weight = mt_timed_linear_backward_weight,
        .embedding_forward = mt_timed_embedding_forward,
        .embedding_backward = mt_timed_embedding_backward,
        .rmsnorm_forward = mt_timed_rmsnorm_forward,
        .rmsnorm_backward = mt_timed_rmsnorm_backward,
        .layernorm_forward = mt_timed_layernorm_forward,
        .layernorm_backward = mt_timed_layernorm_backward,
        .rope_forward = mt_timed_rope_forward,
        .rope_backward = mt_timed_rope_backward,
        .latent_heads_forward = mt_timed_latent_heads_forward,
        .latent_heads_backward = mt_timed_latent_heads_backward,
        .attention_forward = mt_timed_attention_forward,
        .attention_backward = mt_timed_attention_backward,
        .attention_merge = mt_timed_attention_merge,
        .accumulate_rows = mt_timed_accumulate_rows,
        .gelu_forward = mt_timed_gelu_forward,
        .gelu_backward = mt_timed_gelu_backward,
        .swiglu_forward = mt_timed_swiglu_forward,
        .swiglu_backward = mt_timed_swiglu_backward,
        .dropout_add_forward = mt_timed_dropout_add_forward,
        .dropout_add_backward = mt_timed_dropout_add_backward,
        .scatter_rows = mt_timed_scatter_rows,
        .gather_rows = mt_timed_gather_rows,
        .cross_entropy_forward = mt_timed_cross_entropy_forward,
        .cross_entropy_combine = mt_timed_cross_entropy_combine,
        .cross_entropy_loss = mt_timed_cross_entropy_loss,
        .cross_entropy_backward = mt_timed_cross_entropy_backward,
        .loss_accumulate = mt_timed_loss_accumulate,
        .likeliest = mt_timed_likeliest,
        .accumulate = mt_timed_accumulate,
        .squared_norm = mt_timed_squared_norm,
        .gradient_scale = mt_timed_gradient_scale,
        .step_guard = mt_timed_step_guard,
        .adamw_step = mt_timed_adamw_step,
        .random_normal = mt_timed_random_normal,
        .convert = mt_timed_convert,
    };
}

const mt_ops *mt_profile_open(const mt_ops *ops) {
#define MT_PROFILE_ROW(operation) {.name = #operation},
    mt_profiler.sums = (mt_profile){.rows = {MT_ALL_OPERATIONS(MT_PROFILE_ROW)}};
#undef MT_PROFILE_ROW
    mt_profiler.ops = ops;
    mt_profiler.timed = mt_profile_timed_ops(ops);
    mt_profile_time_experts(&mt_profiler.timed);
    mt_profile_time_others(&mt_profiler.timed, ops);
    mt_profiler.timed.phase_begin = mt_profile_phase_begin;
    mt_profiler.timed.phase_end = mt_profile_phase_end;
    mt_profiler.on_gpu = strcmp(ops->name, "cuda") == 0;
    mt_profiler.recording = mt_profiler.warm = false;
    mt_profiler.trace = (mt_trace){0};
    return &mt_profiler.timed;
}

void mt_profile_close(void) {
    for (int64_t i = 0; i < mt_profiler.max_calls; i++) {
        mt_moment_free(&mt_profiler.calls[i].begin);
        mt_moment_free(&mt_profiler.calls[i].end);
    }
    for (int64_t i = 0; i < mt_profiler.max_phases; i++) {
        mt_moment_free(&mt_profiler.phases[i].begin);
        mt_moment_free(&mt_profiler.phases[i].end);
    }
    mt_moment_free(&mt_profiler.base);
    free(mt_profiler.calls);
    free(mt_profiler.phases);
    mt_profiler.calls = NULL, mt_profiler.phases = NULL;
    mt_profiler.num_calls = mt_profiler.max_calls = mt_profiler.num_phases = mt_profiler.max_phases = 0;
    free(mt_profiler.trace.events);
    mt_profiler.trace = (mt_trace){0};
}

/* ==== the ceilings and the table ============================================================================ */

/* The best of a few batches of a few calls, in seconds a call: a copy of `bytes`, or y = x w^T of n^3 when n > 0. */
static double mt_profile_best(void *to, const void *from, int64_t bytes, const void *w, int64_t n, mt_dtype dtype,
                              mt_stream *stream) {
    enum { BATCHES = 5, CALLS = 4 };
    const mt_ops *ops = mt_profiler.ops;
    mt_moment begin = {0}, end = {0};
    double best = INFINITY;
    for (int batch = 0; batch <= BATCHES; batch++) { // the first one warms up
        mt_moment_mark(&begin, stream);
        for (int i = 0; i < CALLS; i++)
            if (n > 0)
                ops->linear_forward(to, from, w, NULL, n, n, n, dtype, stream);
            else
                ops->memory_copy(to, from, bytes, stream);
        mt_moment_mark(&end, stream);
        double seconds = mt_moment_seconds(&begin, &end) / CALLS;
        if (batch > 0) best = fmin(best, seconds);
    }
    mt_moment_free(&begin);
    mt_moment_free(&end);
    return best;
}

/* Operations a second of a large product of this type, and bytes a second, read and written, of a large copy. */
static mt_work mt_profile_ceilings(mt_dtype dtype) {
    const int64_t n = 8192, bytes = n * n * 4;
    const mt_ops *ops = mt_profiler.ops;
    int64_t workspace_bytes = ops->workspace_bytes(n, n, 1, 8);
    void *workspace = workspace_bytes > 0 ? ops->memory_alloc(workspace_bytes) : NULL;
    mt_stream *stream = ops->stream_create(workspace, workspace_bytes, false);
    char *memory = ops->memory_alloc(3 * bytes), *x = memory + bytes, *w = x + bytes;
    ops->memory_zero(memory, 2 * bytes, stream);
    mt_work rates = {.bytes = 2.0 * (double)bytes / mt_profile_best(memory, x, bytes, NULL, 0, dtype, stream)};
    if (mt_profiler.on_gpu) {
        ops->random_normal(x, n * n, 1, 0, 0, 1, dtype, stream);
        ops->random_normal(w, n * n, 2, 0, 0, 1, dtype, stream);
        double seconds = mt_profile_best(memory, x, 0, w, n, dtype, stream);
        rates.flops = 2.0 * (double)n * (double)n * (double)n / seconds;
    } else
        rates.flops = mt_cpu_matmul_rate(2048);
    ops->stream_wait(stream);
    ops->memory_free(memory);
    ops->stream_destroy(stream);
    if (workspace) ops->memory_free(workspace);
    return rates;
}

static int mt_profile_by_time(const void *a, const void *b) {
    double x = ((const mt_profile_row *)a)->seconds, y = ((const mt_profile_row *)b)->seconds;
    return (x < y) - (x > y);
}

/* A rate such as "712.1 TFLOP/s" or "31.2 GB/s". */
static void mt_rate_format(char text[32], double rate, const char *unit) {
    bool tera = rate >= 1e12;
    snprintf(text, 32, "%.*f %c%s/s", tera && rate < 1e14 ? 2 : 1, rate * (tera ? 1e-12 : 1e-9), tera ? 'T' : 'G',
             unit);
}

static void mt_profile_print_row(const mt_profile_row *row, const mt_profile *sums, const mt_work *ceilings,
                                 FILE *file) {
    bool computes = row->flops > 0;
    double steps = (double)sums->steps, rate = (computes ? row->flops : row->bytes) / row->seconds;
    char text[32];
    mt_rate_format(text, rate, computes ? "FLOP" : "B");
    fprintf(file, "  %-22s %8.6g %11.3f %6.1f%% %15s %11.1f%%\n", row->name, (double)row->calls / steps,
            1e3 * row->seconds / steps, 100 * row->seconds / sums->seconds, text,
            100 * rate / (computes ? ceilings->flops : ceilings->bytes));
}

void mt_profile_print(mt_dtype dtype, FILE *file) {
    const mt_profile *sums = &mt_profiler.sums;
    mt_profile_row rows[MT_NUM_OPERATIONS];
    double steps = (double)sums->steps, rest = sums->seconds;
    char flops[32], bytes[32];
    mt_work ceilings = sums->steps > 0 ? mt_profile_ceilings(dtype) : (mt_work){0};
    if (!file) return;
    if (sums->steps == 0) {
        fprintf(file, "profile: no step to show, since the first is not counted; raise --train-iters\n");
        return;
    }
    mt_rate_format(flops, ceilings.flops, "FLOP");
    mt_rate_format(bytes, ceilings.bytes, "B");
    memcpy(rows, sums->rows, sizeof rows);
    qsort(rows, MT_NUM_OPERATIONS, sizeof *rows, mt_profile_by_time);
    fprintf(file, "profile of %lld steps without the first; ceilings: product %s, copy %s (%s)\n",
            (long long)sums->steps, flops, bytes, mt_profiler.ops->name);
    fprintf(file, "  %-22s %8s %11s %7s %15s %12s\n", "operation", "calls", "ms a step", "share", "rate", "of ceiling");
    for (int i = 0; i < MT_NUM_OPERATIONS; i++) {
        if (rows[i].calls == 0) continue;
        mt_profile_print_row(&rows[i], sums, &ceilings, file);
    }
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) rest -= sums->traffic[i].exposed; // operations may overlap
    fprintf(file, "  %-22s %8s %11.3f %6.1f%%\n", "outside of operations", "", 1e3 * rest / steps,
            100 * rest / sums->seconds);
    fprintf(file, "  %-22s %8s %11.3f %6.1f%%\n", "a step", "", 1e3 * sums->seconds / steps, 100.0);
}

/* ==== communication ========================================================================================= */
/* How much of the communication nothing hides. Invariant: every instant of a step counts once, for what computes, else
 * for one kind of communication, else for none. */

/* An interval begins (change 1) or ends (-1). */
typedef struct mt_edge {
    double time;
    mt_traffic traffic;
    int change;
} mt_edge;

static int mt_edge_by_time(const void *a, const void *b) {
    double x = ((const mt_edge *)a)->time, y = ((const mt_edge *)b)->time;
    return (x > y) - (x < y);
}

void mt_traffic_expose(double exposed[MT_NUM_TRAFFICS], const mt_busy *busy, int64_t count) {
    mt_edge *edges = mt_malloc(2 * count * (int64_t)sizeof *edges + 1);
    int64_t running[MT_NUM_TRAFFICS] = {0};
    for (int64_t i = 0; i < count; i++) {
        edges[2 * i] = (mt_edge){busy[i].from, busy[i].traffic, 1};
        edges[2 * i + 1] = (mt_edge){busy[i].to, busy[i].traffic, -1};
    }
    qsort(edges, (size_t)(2 * count), sizeof *edges, mt_edge_by_time);
    for (int64_t i = 0; i < 2 * count; i++) {
        int first = 0;
        while (first < MT_NUM_TRAFFICS && running[first] == 0) first++;
        if (first < MT_NUM_TRAFFICS) exposed[first] += edges[i].time - edges[i - 1].time;
        running[edges[i].traffic] += edges[i].change;
    }
    free(edges);
}

/* Adds a step's calls to the sums by kind. */
static void mt_profile_add_traffic(mt_profile *sums, const mt_call *calls, int64_t count) {
    mt_busy *busy = mt_malloc(count * (int64_t)sizeof *busy + 1);
    double exposed[MT_NUM_TRAFFICS] = {0};
    for (int64_t i = 0; i < count; i++) {
        mt_profile_traffic *sum = &sums->traffic[calls[i].work.traffic];
        busy[i] = (mt_busy){calls[i].from, calls[i].to, calls[i].work.traffic};
        sum->calls++;
        sum->seconds += calls[i].to - calls[i].from;
        if (calls[i].operation != MT_OPERATION_channel_wait) sum->bytes += calls[i].work.bytes; // counted by the send
    }
    mt_traffic_expose(exposed, busy, count);
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) sums->traffic[i].exposed += exposed[i];
    free(busy);
}

/* What a rank tells of itself, seconds a step. */
typedef struct mt_rank_profile {
    double step, computing;
    double calls[MT_NUM_TRAFFICS], seconds[MT_NUM_TRAFFICS], exposed[MT_NUM_TRAFFICS], bytes[MT_NUM_TRAFFICS];
} mt_rank_profile;

static mt_rank_profile mt_rank_profile_of(const mt_profile *sums) {
    double steps = (double)sums->steps;
    mt_rank_profile own = {.step = sums->seconds / steps};
    own.computing = sums->traffic[MT_TRAFFIC_NONE].exposed / steps;
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) {
        own.calls[i] = (double)sums->traffic[i].calls / steps;
        own.seconds[i] = sums->traffic[i].seconds / steps;
        own.exposed[i] = sums->traffic[i].exposed / steps;
        own.bytes[i] = sums->traffic[i].bytes / steps;
    }
    return own;
}

static void mt_rank_profile_print(const mt_rank_profile *own, int rank, const char *why, FILE *file) {
    static const char *const names[MT_NUM_TRAFFICS] = {"computing", "tensor",   "gradients", "parameters",
                                                       "context",   "pipeline", "experts",   "loss and norm"};
    double idle = own->step;
    fprintf(file, "communication of rank %d%s\n", rank, why);
    fprintf(file, "  %-22s %8s %11s %11s %7s %10s\n", "kind", "calls", "ms a step", "exposed ms", "share", "MiB sent");
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) {
        idle -= own->exposed[i];
        if (own->calls[i] == 0) continue;
        fprintf(file, "  %-22s %8.6g %11.3f %11.3f %6.1f%%", names[i], own->calls[i], 1e3 * own->seconds[i],
                1e3 * own->exposed[i], 100 * own->exposed[i] / own->step);
        if (i != MT_TRAFFIC_NONE) fprintf(file, " %10.3f", own->bytes[i] / 1048576);
        fprintf(file, "\n");
    }
    fprintf(file, "  %-22s %8s %11s %11.3f %6.1f%%\n", "none of these", "", "", 1e3 * idle, 100 * idle / own->step);
    fprintf(file, "  %-22s %8s %11s %11.3f %6.1f%%\n", "a step", "", "", 1e3 * own->step, 100.0);
}

void mt_profile_print_communication(const mt_grid *grid, FILE *file) {
    enum { TAG = 1 };
    const mt_group *world = &grid->world;
    if (world->size == 1 || mt_profiler.sums.steps == 0) return;
    mt_rank_profile own = mt_rank_profile_of(&mt_profiler.sums);
    if (world->rank > 0) {
        mt_send(world, &own, sizeof own, 0, TAG);
        return;
    }
    mt_rank_profile slowest = own;
    double least[2] = {own.step, own.computing}, most[2] = {own.step, own.computing};
    int slowest_rank = 0;
    for (int rank = 1; rank < world->size; rank++) {
        mt_rank_profile other = {0};
        mt_receive(world, &other, sizeof other, rank, TAG);
        least[0] = fmin(least[0], other.step), most[0] = fmax(most[0], other.step);
        least[1] = fmin(least[1], other.computing), most[1] = fmax(most[1], other.computing);
        if (other.computing > slowest.computing) slowest = other, slowest_rank = rank;
    }
    if (!file) return;
    mt_rank_profile_print(&own, 0, slowest_rank == 0 ? ", the slowest: it computes longest" : "", file);
    if (slowest_rank > 0) mt_rank_profile_print(&slowest, slowest_rank, ", the slowest: it computes longest", file);
    fprintf(file, "over %d ranks a step takes %.3f to %.3f ms, of which they compute %.3f to %.3f ms\n", world->size,
            1e3 * least[0], 1e3 * most[0], 1e3 * least[1], 1e3 * most[1]);
}

/* ==== traces ================================================================================================ */
/* Some steps as a timeline. Every rank writes its part as text, and rank 0 puts the parts together. Invariants: boxes
 * of one thread lie beside or, for phases within their step, inside one another; times are those of rank 0's clock. */

double mt_clock_offset(const mt_group *world, double (*clock)(void)) {
    enum { ROUNDS = 32, TAG = 2 };
    double offset = 0, quickest = INFINITY;
    for (int rank = 1; rank < world->size; rank++)
        for (int round = 0; round < ROUNDS; round++) {
            double asked, answer = 0;
            if (world->rank == 0) {
                mt_receive(world, &asked, sizeof asked, rank, TAG);
                answer = clock();
                mt_send(world, &answer, sizeof answer, rank, TAG);
            } else if (world->rank == rank) {
                asked = clock();
                mt_send(world, &asked, sizeof asked, 0, TAG);
                mt_receive(world, &answer, sizeof answer, 0, TAG);
                double answered = clock();
                if (answered - asked >= quickest) continue;
                quickest = answered - asked;
                offset = answer - (asked + answered) / 2;
            }
        }
    return offset;
}

/* Ranks that run on one kernel share its clock. */
static bool mt_clock_is_shared(const mt_group *world) {
    char own[64] = "", first[64];
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        if (!fgets(own, sizeof own, file)) own[0] = '\0';
        fclose(file);
    }
    memcpy(first, own, sizeof own);
    mt_broadcast(world, first, sizeof first, 0);
    return own[0] && strcmp(own, first) == 0;
}

/* An error if the file cannot be written; leaves no file behind. */
static int mt_trace_try(const char *path, mt_error *error) {
    mt_new_file file;
    if (mt_new_file_open(&file, path, "--trace", error) != 0) return -1;
    mt_error ignored;
    mt_new_file_close(&file, -1, &ignored);
    return 0;
}

int mt_trace_open(const mt_options *options, const mt_grid *grid, const mt_run_state *state, mt_error *error) {
    int64_t steps = options->num_iterations - state->iteration;
    int status = 0;
    MT_CHECK(mt_profiler.ops && options->trace);
    if (options->trace_first_step > steps)
        return mt_error_set(error, "--trace-first-step %lld comes after this run's last step (step %lld)",
                            (long long)options->trace_first_step, (long long)steps);
    if (grid->world.rank == 0) status = mt_trace_try(options->trace, error);
    if (mt_agree(&grid->world, status != 0, error) != 0) return -1;
    double offset = mt_clock_offset(&grid->world, mt_time);
    if (mt_clock_is_shared(&grid->world)) offset = 0;
    mt_profiler.trace = (mt_trace){.path = options->trace,
                                   .grid = grid,
                                   .alone = !options->profile && !options->log_straggler,
                                   .iteration = state->iteration,
                                   .first = options->trace_first_step,
                                   .last = options->trace_last_step < steps ? options->trace_last_step : steps,
                                   .clock_offset = offset,
                                   .num_lanes = 1};
    return 0;
}

bool mt_trace_is_open(void) {
    return mt_profiler.trace.path != NULL;
}

bool mt_trace_is_complete(void) {
    return mt_trace_is_open() && mt_profiler.trace.step >= mt_profiler.trace.last;
}

/* The lane of a call: one for each kind on each stream, and apart from it one for what is sent. */
static int mt_trace_lane_of(mt_trace *trace, const mt_call *call) {
    mt_trace_lane lane = {call->work.traffic, call->sends, call->stream, 0};
    for (int i = 1; i < trace->num_lanes; i++) {
        const mt_trace_lane *other = &trace->lanes[i];
        if (other->traffic == lane.traffic && other->sends == lane.sends && other->stream == lane.stream) return i;
    }
    MT_CHECK(trace->num_lanes < MT_TRACE_LANES);
    trace->lanes[trace->num_lanes] = lane;
    return trace->num_lanes++;
}

static mt_trace_event *mt_trace_add(mt_trace *trace, const char *name, int lane, double from, double to) {
    trace->events = mt_records_grow(trace->events, trace->num_events, &trace->max_events, sizeof(mt_trace_event));
    mt_trace_event *event = &trace->events[trace->num_events++];
    *event = (mt_trace_event){.name = name, .lane = lane};
    event->from = from + trace->clock_offset, event->to = to + trace->clock_offset;
    event->micro_batch = event->chunk = event->message = event->iteration = -1;
    return event;
}

/* Keeps the step that is over: itself, its phases, its calls. A message waits for those before it on its stream, so its
 * box begins after theirs. */
static void mt_trace_step(double end) {
    mt_trace *trace = &mt_profiler.trace;
    int64_t whole = trace->num_events;
    double last = end;
    mt_trace_add(trace, "step", 0, mt_profiler.step_begin, end)->iteration = trace->iteration + trace->step;
    for (int64_t i = 0; i < mt_profiler.num_phases; i++) {
        const mt_phase *phase = &mt_profiler.phases[i];
        double until = mt_moment_time(&phase->end);
        mt_trace_event *event = mt_trace_add(trace, phase->name, 0, mt_moment_time(&phase->begin), until);
        event->micro_batch = phase->micro_batch, event->chunk = phase->chunk;
        last = fmax(last, until);
    }
    for (int64_t i = 0; i < mt_profiler.num_calls; i++) {
        const mt_call *call = &mt_profiler.calls[i];
        const mt_phase *phase = call->phase >= 0 ? &mt_profiler.phases[call->phase] : NULL;
        int lane = mt_trace_lane_of(trace, call);
        double from = fmax(call->from, trace->lanes[lane].until), to = fmax(call->to, from);
        mt_trace_event *event = mt_trace_add(trace, mt_profiler.sums.rows[call->operation].name, lane, from, to);
        if (phase) event->micro_batch = phase->micro_batch, event->chunk = phase->chunk;
        event->message = call->message, event->sends = call->sends;
        event->flops = call->work.flops, event->bytes = call->work.bytes;
        trace->lanes[lane].until = to;
        last = fmax(last, to);
    }
    trace->events[whole].to = last + trace->clock_offset; // a GPU's clock may run some microseconds ahead of the host's
}

static void mt_trace_write_name(FILE *text, int rank, int thread, const char *what, const char *name) {
    fprintf(text, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}},\n", rank, thread,
            what, name);
}

/* The names of a rank and its lanes, by which viewers show them, and their order. */
static void mt_trace_write_names(const mt_trace *trace, FILE *text) {
    static const char *const names[MT_NUM_TRAFFICS] = {"compute",          "tensor communication", "gradient reduction",
                                                       "parameter gather", "context ring",         "pipeline receives",
                                                       "experts",          "loss and norm"};
    const mt_grid *grid = trace->grid;
    int rank = grid->world.rank;
    char name[128];
    snprintf(name, sizeof name, "rank %d: tp %d cp %d pp %d dp %d", rank, grid->tensor.rank, grid->context.rank,
             grid->pipeline.rank, grid->data.rank);
    mt_trace_write_name(text, rank, 0, "process_name", name);
    fprintf(text, "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}},\n",
            rank, rank);
    mt_trace_write_name(text, rank, 0, "thread_name", "phases");
    for (int i = 1; i < trace->num_lanes; i++) {
        const mt_trace_lane *lane = &trace->lanes[i];
        int number = 1;
        for (int k = 1; k < i; k++)
            number += trace->lanes[k].traffic == lane->traffic && trace->lanes[k].sends == lane->sends;
        bool pipeline = lane->traffic == MT_TRAFFIC_PIPELINE;
        int length =
            snprintf(name, sizeof name, "%s%s", lane->sends && pipeline ? "pipeline sends" : names[lane->traffic],
                     lane->sends && !pipeline ? " (sends)" : "");
        if (number > 1) snprintf(name + length, sizeof name - (size_t)length, ", stream %d", number);
        mt_trace_write_name(text, rank, i, "thread_name", name);
        fprintf(text,
                "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}},\n",
                rank, i, 1 + MT_TRACE_LANES * (2 * (int)lane->traffic + lane->sends) + i);
    }
}

/* A time in the microseconds of the format, to a nanosecond. */
static void mt_trace_write_time(FILE *text, const char *key, int64_t nanoseconds) {
    fprintf(text, ",\"%s\":%lld.%03lld", key, (long long)(nanoseconds / 1000), (long long)(nanoseconds % 1000));
}

/* A box, and for a message the end of an arrow from the sender's box to the receiver's. */
static void mt_trace_write_event(const mt_trace_event *event, int rank, double origin, FILE *text) {
    int64_t from = llround(1e9 * (event->from - origin)), to = llround(1e9 * (event->to - origin));
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"iteration", event->iteration}, {"micro_batch", event->micro_batch}, {"chunk", event->chunk}};
    const char *comma = "";
    fprintf(text, "{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\"", rank, event->lane, event->name);
    mt_trace_write_time(text, "ts", from);
    mt_trace_write_time(text, "dur", to - from);
    fprintf(text, ",\"args\":{");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].value >= 0)
            fprintf(text, "%s\"%s\":%lld", comma, numbers[i].name, (long long)numbers[i].value), comma = ",";
    if (event->flops > 0) fprintf(text, "%s\"flops\":%.17g", comma, event->flops), comma = ",";
    if (event->bytes > 0) fprintf(text, "%s\"bytes\":%.17g", comma, event->bytes);
    fprintf(text, "}},\n");
    bool waits_to_send = event->sends && strcmp(event->name, "channel_wait") == 0;
    if (event->message < 0 || waits_to_send) return;
    fprintf(text, "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"cat\":\"message\",\"name\":\"message\",\"id\":%lld",
            event->sends ? "s" : "f\",\"bp\":\"e", rank, event->lane, (long long)event->message);
    mt_trace_write_time(text, "ts", event->sends ? from : from > to - 1 ? from : to - 1);
    fprintf(text, "},\n");
}

/* This rank's part of the file, to free; rank 0's has the file's beginning. */
static char *mt_trace_text(const mt_trace *trace, double origin, size_t *bytes) {
    char *memory;
    FILE *text = open_memstream(&memory, bytes);
    if (!text) mt_die("no memory for a trace");
    if (trace->grid->world.rank == 0) fprintf(text, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    mt_trace_write_names(trace, text);
    for (int64_t i = 0; i < trace->num_events; i++)
        mt_trace_write_event(&trace->events[i], trace->grid->world.rank, origin, text);
    if (fclose(text) != 0) mt_die("no memory for a trace");
    return memory;
}

/* On rank 0: its own part, then the others' as they come, which are received even if the disk is full. */
static int mt_trace_write_file(const mt_trace *trace, const char *text, size_t bytes, mt_error *error) {
    enum { TAG = 3 };
    const mt_group *world = &trace->grid->world;
    mt_new_file file;
    int status = mt_new_file_open(&file, trace->path, "--trace", error);
    if (status == 0) fwrite(text, 1, bytes, file.stream);
    for (int rank = 1; rank < world->size; rank++) {
        int64_t length = 0;
        mt_receive(world, &length, sizeof length, rank, TAG);
        char *part = mt_malloc(length);
        mt_receive(world, part, length, rank, TAG);
        if (status == 0 && fwrite(part, 1, (size_t)length, file.stream) != (size_t)length)
            status = mt_file_write_error(error, trace->path, "--trace");
        free(part);
    }
    // the last box ended with a comma, so one more event follows: the backend's name
    if (status == 0)
        fprintf(file.stream,
                "{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"process_labels\",\"args\":{\"labels\":\"%s\"}}\n]}\n",
                mt_profiler.ops->name);
    return mt_new_file_close(&file, status, error);
}

int mt_trace_write(mt_error *error) {
    enum { TAG = 3 };
    mt_trace *trace = &mt_profiler.trace;
    const mt_group *world = &trace->grid->world;
    double first = trace->num_events > 0 ? -trace->events[0].from : -INFINITY;
    size_t bytes;
    int status = 0;
    mt_all_reduce_max(world, &first, 1, MT_F64); // the earliest of all ranks is 0
    char *text = mt_trace_text(trace, -first, &bytes);
    int64_t length = (int64_t)bytes;
    if (world->rank == 0)
        status = mt_trace_write_file(trace, text, bytes, error);
    else {
        mt_send(world, &length, sizeof length, 0, TAG);
        mt_send(world, text, length, 0, TAG);
    }
    free(text);
    trace->path = NULL; // it is closed
    return mt_agree(world, status != 0, error);
}
