/* profile.c: where the time of a training step goes. The profile is a table of operations that times the real ones. A
 * call becomes a record: a moment before it, a moment after it, and the work that its arguments ask for. Records are
 * read when the step is over. A moment is a clock time on the CPU, and an event in the stream on a GPU, so that the
 * host never waits within a step. Operations have no context argument, so the profile is a static object, for one
 * thread and one run at a time. Invariants: results do not change; nothing is recorded outside of a step. Where a GPU
 * waits for the host, a call's time includes its launch. */
#include "profile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct mt_moment {
    double seconds;
    mt_event *event; // on a GPU; created once and reused in every step
} mt_moment;

static struct {
    const mt_ops *ops; // the real operations
    mt_ops timed;      // the table that mt_profile_open returns
    bool on_gpu, recording, warm;
    mt_moment base; // the begin of the step on a GPU
    mt_profile_step step;
    mt_profile_call *calls;                  // [max_calls] of this step
    mt_profile_phase *phases;                // [max_phases]
    mt_moment *call_moments, *phase_moments; // [2 max_calls], [2 max_phases]: begin and end
    int64_t max_calls, max_phases, phase;    // the current phase, or -1
    mt_profile sums;
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

/* The time of mt_time() at a moment of this step. */
static double mt_moment_time(const mt_moment *moment) {
    if (!mt_profiler.on_gpu) return moment->seconds;
    return mt_profiler.step.begin + mt_moment_seconds(&mt_profiler.base, moment);
}

static void mt_moments_free(mt_moment *moments, int64_t count) {
#ifdef MT_HAVE_CUDA
    for (int64_t i = 0; i < count; i++)
        if (moments[i].event) mt_cuda_event_destroy(moments[i].event);
#endif
    (void)count;
    free(moments);
}

/* Grows an array from `old` to `count` zeroed elements. Arrays grow in the first step, which the sums leave out. */
static void *mt_records_grow(void *records, int64_t old, int64_t count, size_t size) {
    records = mt_realloc(records, count * (int64_t)size);
    memset((char *)records + (size_t)old * size, 0, (size_t)(count - old) * size);
    return records;
}

static void mt_call_begin(mt_operation operation, mt_work work, mt_stream *stream) {
    if (!mt_profiler.recording) return;
    int64_t i = mt_profiler.step.num_calls, old = mt_profiler.max_calls;
    if (i == old) {
        mt_profiler.max_calls = old > 0 ? 2 * old : 1024;
        mt_profiler.calls = mt_records_grow(mt_profiler.calls, old, mt_profiler.max_calls, sizeof *mt_profiler.calls);
        mt_profiler.call_moments =
            mt_records_grow(mt_profiler.call_moments, 2 * old, 2 * mt_profiler.max_calls, sizeof(mt_moment));
    }
    mt_profiler.calls[i] =
        (mt_profile_call){.operation = operation, .work = work, .phase = mt_profiler.phase, .message = -1};
    mt_moment_mark(&mt_profiler.call_moments[2 * i], stream);
}

static void mt_call_end(mt_stream *stream) {
    if (!mt_profiler.recording) return;
    int64_t i = mt_profiler.step.num_calls++;
    mt_profiler.calls[i].stream = stream;
    mt_moment_mark(&mt_profiler.call_moments[2 * i + 1], stream);
}

static void mt_profile_phase_begin(const char *name, int64_t micro_batch, int64_t chunk, mt_stream *stream) {
    if (!mt_profiler.recording) return;
    int64_t i = mt_profiler.step.num_phases++, old = mt_profiler.max_phases;
    if (i == old) {
        mt_profiler.max_phases = old > 0 ? 2 * old : 256;
        mt_profiler.phases =
            mt_records_grow(mt_profiler.phases, old, mt_profiler.max_phases, sizeof *mt_profiler.phases);
        mt_profiler.phase_moments =
            mt_records_grow(mt_profiler.phase_moments, 2 * old, 2 * mt_profiler.max_phases, sizeof(mt_moment));
    }
    mt_profiler.phases[i] = (mt_profile_phase){.name = name, .micro_batch = micro_batch, .chunk = chunk};
    mt_profiler.phase = i;
    mt_moment_mark(&mt_profiler.phase_moments[2 * i], stream);
}

static void mt_profile_phase_end(mt_stream *stream) {
    if (mt_profiler.recording) mt_moment_mark(&mt_profiler.phase_moments[2 * mt_profiler.phase + 1], stream);
    mt_profiler.phase = -1;
}

static void mt_profile_add_traffic(mt_profile *sums, const mt_profile_step *step);

void mt_profile_step_begin(void) {
    mt_profiler.step = (mt_profile_step){0};
    mt_profiler.phase = -1;
    mt_profiler.recording = true;
    mt_moment_mark(&mt_profiler.base, NULL);
#ifdef MT_HAVE_CUDA
    if (mt_profiler.on_gpu) mt_profiler.ops->event_wait(mt_profiler.base.event);
#endif
    mt_profiler.step.begin = mt_time();
}

void mt_profile_step_end(void) {
    mt_profile_step *step = &mt_profiler.step;
    step->end = mt_time();
    step->calls = mt_profiler.calls, step->phases = mt_profiler.phases;
    mt_profiler.recording = false;
    for (int64_t i = 0; i < step->num_phases; i++) {
        const mt_moment *moments = &mt_profiler.phase_moments[2 * i];
        mt_profiler.phases[i].from = mt_moment_time(&moments[0]);
        mt_profiler.phases[i].to = mt_moment_time(&moments[1]);
    }
    for (int64_t i = 0; i < step->num_calls; i++) {
        const mt_moment *moments = &mt_profiler.call_moments[2 * i];
        mt_profiler.calls[i].from = mt_moment_time(&moments[0]);
        mt_profiler.calls[i].to = mt_profiler.calls[i].from + mt_moment_seconds(&moments[0], &moments[1]);
    }
    if (!mt_profiler.warm) {
        mt_profiler.warm = true;
        return;
    }
    mt_profile *sums = &mt_profiler.sums;
    sums->steps++;
    sums->seconds += step->end - step->begin;
    for (int64_t i = 0; i < step->num_calls; i++) {
        const mt_profile_call *call = &step->calls[i];
        mt_profile_row *row = &sums->rows[call->operation];
        row->calls++;
        row->seconds += call->to - call->from;
        row->flops += call->work.flops;
        row->bytes += call->work.bytes;
    }
    mt_profile_add_traffic(sums, step);
}

const mt_profile_step *mt_profile_last_step(void) {
    return &mt_profiler.step;
}

const mt_profile *mt_profile_read(void) {
    return &mt_profiler.sums;
}

/* ==== the timed operations ================================================================================== */
/* One function an operation: the work, then the real call between two moments. Bytes are the necessary ones: each
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

static void mt_timed_cross_entropy_loss(float *logp, float *entropy, float *lse, const float *row_max,
                                        const float *row_sum, const float *row_target, const float *row_weighted,
                                        int64_t T, mt_stream *stream) {
    MT_TIMED(cross_entropy_loss, mt_work_bytes(T, (entropy ? 7 : 5) * 4), logp, entropy, lse, row_max, row_sum,
             row_target, row_weighted, T);
}

static void mt_timed_cross_entropy_backward(void *dlogits, const void *logits, const int32_t *labels, const float *lse,
                                            const float *entropy, const float *dlogp, const float *dentropy, int64_t T,
                                            int64_t stride, int64_t first, int64_t count, mt_dtype dtype,
                                            mt_stream *stream) {
    MT_TIMED(cross_entropy_backward, mt_work_bytes(T * (count + stride), mt_dtype_size(dtype)), dlogits, logits, labels,
             lse, entropy, dlogp, dentropy, T, stride, first, count, dtype);
}

static void mt_timed_nll_loss(double *sums, float *dlogp, const float *logp, const float *weights, int64_t T,
                              mt_stream *stream) {
    MT_TIMED(nll_loss, mt_work_bytes(T, 12), sums, dlogp, logp, weights, T);
}

static void mt_timed_argmax(int32_t *ids, const void *logits, int64_t T, int64_t stride, int64_t count, mt_dtype dtype,
                            mt_stream *stream) {
    MT_TIMED(argmax, mt_work_bytes(T * count, mt_dtype_size(dtype)), ids, logits, T, stride, count, dtype);
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
    mt_profile_call *call = &mt_profiler.calls[mt_profiler.step.num_calls];
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

static void mt_timed_aux_loss_forward(float *sums, double *z_sum, const float *logits, const int32_t *sequence,
                                      int64_t S, int64_t T, const mt_router *router, mt_stream *stream) {
    MT_TIMED(aux_loss_forward, mt_work_bytes((T + 2 * S) * router->num_experts, 4), sums, z_sum, logits, sequence, S, T,
             router);
}

static void mt_timed_aux_loss_value(double *loss, const float *sums, int64_t S, int64_t E, mt_stream *stream) {
    MT_TIMED(aux_loss_value, mt_work_bytes(S * E, 8), loss, sums, S, E);
}

static void mt_timed_aux_loss_backward(float *dlogits, const float *logits, const float *counts,
                                       const int32_t *sequence, int64_t S, int64_t T, float aux_scale, float z_scale,
                                       const mt_router *router, mt_stream *stream) {
    MT_TIMED(aux_loss_backward, mt_work_bytes(T * router->num_experts, 12), dlogits, logits, counts, sequence, S, T,
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
    timed->aux_loss_forward = mt_timed_aux_loss_forward;
    timed->aux_loss_value = mt_timed_aux_loss_value;
    timed->aux_loss_backward = mt_timed_aux_loss_backward;
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

/* An operation that gives the device no work is not wrapped. Graphs are left out: their operations have no moments. */
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
        .nll_loss = mt_timed_nll_loss,
        .argmax = mt_timed_argmax,
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
    mt_profiler.sums = (mt_profile){.backend = ops->name, .rows = {MT_ALL_OPERATIONS(MT_PROFILE_ROW)}};
#undef MT_PROFILE_ROW
    mt_profiler.ops = ops;
    mt_profiler.timed = mt_profile_timed_ops(ops);
    mt_profile_time_experts(&mt_profiler.timed);
    mt_profile_time_others(&mt_profiler.timed, ops);
    mt_profiler.timed.phase_begin = mt_profile_phase_begin;
    mt_profiler.timed.phase_end = mt_profile_phase_end;
    mt_profiler.on_gpu = strcmp(ops->name, "cuda") == 0;
    mt_profiler.recording = mt_profiler.warm = false;
    return &mt_profiler.timed;
}

void mt_profile_close(void) {
    mt_moments_free(mt_profiler.call_moments, 2 * mt_profiler.max_calls);
    mt_moments_free(mt_profiler.phase_moments, 2 * mt_profiler.max_phases);
    free(mt_profiler.calls);
    free(mt_profiler.phases);
#ifdef MT_HAVE_CUDA
    if (mt_profiler.base.event) mt_cuda_event_destroy(mt_profiler.base.event);
#endif
    mt_profiler.call_moments = mt_profiler.phase_moments = NULL;
    mt_profiler.calls = NULL, mt_profiler.phases = NULL;
    mt_profiler.max_calls = mt_profiler.max_phases = 0;
    mt_profiler.base = (mt_moment){0};
    mt_profiler.step = (mt_profile_step){0};
}

/* ==== the table and its ceilings ================================================================================= */

/* Seconds per call, the best of several batches: of a copy of `bytes`, or with n > 0 of y = x w^T of size n^3. */
static double mt_profile_best(void *to, const void *from, int64_t bytes, const void *w, int64_t n, mt_dtype dtype,
                              mt_stream *stream) {
    enum { BATCHES = 5, CALLS = 4 };
    const mt_ops *ops = mt_profiler.ops;
    mt_moment *moments = mt_calloc(2 * (int64_t)sizeof *moments);
    double best = INFINITY;
    for (int batch = 0; batch <= BATCHES; batch++) { // the first batch is warm-up
        mt_moment_mark(&moments[0], stream);
        for (int i = 0; i < CALLS; i++)
            if (n > 0)
                ops->linear_forward(to, from, w, NULL, n, n, n, dtype, stream);
            else
                ops->memory_copy(to, from, bytes, stream);
        mt_moment_mark(&moments[1], stream);
        double seconds = mt_moment_seconds(&moments[0], &moments[1]) / CALLS;
        if (batch > 0) best = fmin(best, seconds);
    }
    mt_moments_free(moments, 2);
    return best;
}

/* Rates per second: operations of a large product of this type, bytes (read and written) of a large copy. */
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

/* Such as "712.1 TFLOP/s" or "31.2 GB/s". */
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
        fprintf(file, "profile: no step to show: the first step is not counted; raise --train-iters\n");
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
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) rest -= sums->traffic[i].exposed; // not their seconds: they may overlap
    fprintf(file, "  %-22s %8s %11.3f %6.1f%%\n", "outside of operations", "", 1e3 * rest / steps,
            100 * rest / sums->seconds);
    fprintf(file, "  %-22s %8s %11.3f %6.1f%%\n", "a step", "", 1e3 * sums->seconds / steps, 100.0);
}

/* ==== communication ============================================================================================== */
/* Exposed communication: the part that no computation overlaps. Invariant: every instant of a step counts once: as
 * computation, else as one kind of communication, else as neither. */

/* The begin (change 1) or end (-1) of an interval. */
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

/* Adds the calls of a step to the sums of their kinds of communication. */
static void mt_profile_add_traffic(mt_profile *sums, const mt_profile_step *step) {
    const mt_profile_call *calls = step->calls;
    int64_t count = step->num_calls;
    mt_busy *busy = mt_malloc(count * (int64_t)sizeof *busy + 1);
    double exposed[MT_NUM_TRAFFICS] = {0};
    for (int64_t i = 0; i < count; i++) {
        mt_profile_traffic *sum = &sums->traffic[calls[i].work.traffic];
        busy[i] = (mt_busy){calls[i].from, calls[i].to, calls[i].work.traffic};
        sum->calls++;
        sum->seconds += calls[i].to - calls[i].from;
        if (calls[i].operation != MT_OPERATION_channel_wait) sum->bytes += calls[i].work.bytes; // the send counted them
    }
    mt_traffic_expose(exposed, busy, count);
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) sums->traffic[i].exposed += exposed[i];
    free(busy);
}

/* The averages that a rank reports; times in seconds per step. */
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
    const mt_group *world = &grid->world;
    if (world->size == 1 || mt_profiler.sums.steps == 0) return;
    mt_rank_profile own = mt_rank_profile_of(&mt_profiler.sums);
    if (world->rank > 0) {
        mt_send(world, &own, sizeof own, 0);
        return;
    }
    mt_rank_profile slowest = own;
    double least[2] = {own.step, own.computing}, most[2] = {own.step, own.computing};
    int slowest_rank = 0;
    for (int rank = 1; rank < world->size; rank++) {
        mt_rank_profile other = {0};
        mt_receive(world, &other, sizeof other, rank);
        least[0] = fmin(least[0], other.step), most[0] = fmax(most[0], other.step);
        least[1] = fmin(least[1], other.computing), most[1] = fmax(most[1], other.computing);
        if (other.computing > slowest.computing) slowest = other, slowest_rank = rank;
    }
    if (!file) return;
    mt_rank_profile_print(&own, 0, slowest_rank == 0 ? ", the slowest: it computes longest" : "", file);
    if (slowest_rank > 0) mt_rank_profile_print(&slowest, slowest_rank, ", the slowest: it computes longest", file);
    fprintf(file, "over %d ranks a step takes %.3f to %.3f ms; they compute %.3f to %.3f ms\n", world->size,
            1e3 * least[0], 1e3 * most[0], 1e3 * least[1], 1e3 * most[1]);
}
