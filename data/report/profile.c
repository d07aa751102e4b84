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

/* Begins a record; false, without one, for a call that does nothing. */
static bool mt_call_begin(mt_operation operation, mt_work work, mt_stream *stream) {
    if (work.is_nothing) return false;
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
    return true;
}

static void mt_call_end(mt_stream *stream) {
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
    if (mt_profiler.on_gpu) mt_profiler.ops->event_synchronize(mt_profiler.base.event);
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

/* ==== the timed operations ======================================================================================= */
/* Each row of the lists in megatron.h makes one function: the real call between two moments, recorded with its work. */

mt_work mt_work_product(int64_t M, int64_t N, int64_t K) {
    return (mt_work){.flops = 2.0 * (double)M * (double)N * (double)K};
}

mt_work mt_work_bytes(int64_t elements, mt_dtype dtype) {
    return (mt_work){.bytes = (double)elements * (double)mt_dtype_size(dtype)};
}

/* The pairs of a query and a key that it sees take over_d products of D channels (forward q k^T; backward that again,
 * dq and dk) and over_dv of Dv (forward p v; backward dout v^T and dv). */
mt_work mt_work_attention(const mt_attention *a, int over_d, int over_dv) {
    int64_t pairs = 0;
    for (const mt_span *s = a->spans.host; s < a->spans.host + a->spans.count; s++) {
        bool whole = !s->causal && a->window == 0, triangle = s->causal && a->window == 0 && s->k_len >= s->q_len;
        if (whole) pairs += s->q_len * s->k_len;
        if (triangle) pairs += s->q_len * (s->k_len - s->q_len) + s->q_len * (s->q_len + 1) / 2;
        for (int64_t i = 0, begin, end; !whole && !triangle && i < s->q_len; i++) {
            mt_span_keys(s, a->window, i, &begin, &end);
            pairs += end - begin;
        }
    }
    return mt_work_product(pairs, a->num_heads, over_d * a->head_size + over_dv * a->value_size);
}

/* Pairs of a query row in [first, first + rows) and a key that it sees, at most `most` for a query. */
static int64_t mt_limited_pairs(const mt_spans *spans, int64_t first, int64_t rows, int64_t most) {
    int64_t pairs = 0;
    for (const mt_span *s = spans->host; s < spans->host + spans->count; s++)
        for (int64_t i = mt_max(0, first - s->q_start); i < mt_min(s->q_len, first + rows - s->q_start); i++) {
            int64_t begin, end;
            mt_span_keys(s, 0, i, &begin, &end);
            pairs += mt_min(end - begin, most);
        }
    return pairs;
}

/* A block of the loss has its own rows; `passes`: products of a pair. */
mt_work mt_work_indexer(const mt_indexer_args *a, int passes) {
    bool is_loss = a->block_rows > 0;
    int64_t first = is_loss ? mt_max(a->block, a->first_row) : a->first_row;
    int64_t end = a->first_row + a->rows;
    if (is_loss) end = mt_min(end, a->block + a->block_rows);
    int64_t most = is_loss && !a->all_keys ? a->topk : INT64_MAX;
    return mt_work_product(mt_limited_pairs(a->spans, first, end - first, most), a->H, passes * a->D);
}

mt_work mt_work_sparse_attention(const mt_sparse_attention *a, int over_d, int over_dv) {
    const mt_attention *call = &a->attention;
    bool is_block = a->block_rows > 0;
    int64_t first = is_block ? a->block : 0, rows = is_block ? a->block_rows : INT64_MAX / 2;
    int64_t pairs = mt_limited_pairs(&call->spans, first, rows, a->all_keys ? INT64_MAX : a->topk);
    return mt_work_product(pairs, call->num_heads, over_d * call->head_size + over_dv * call->value_size);
}

/* Reads k_rope, the rope channels of q and kv; writes the rope channels of q, k and v. */
mt_work mt_work_latent_heads(const mt_latent_heads_args *a, mt_dtype dtype) {
    int64_t R = a->rotation.R, q = 2 * R, kv = a->N + a->Dv, k_and_v = a->N + R + a->Dv;
    return mt_work_bytes(a->T * R + a->T * a->H * (q + kv + k_and_v), dtype);
}

/* Key rows or query rows of all spans. */
int64_t mt_span_rows(const mt_spans *spans, bool of_keys) {
    int64_t rows = 0;
    for (int64_t s = 0; s < spans->count; s++) rows += of_keys ? spans->host[s].k_len : spans->host[s].q_len;
    return rows;
}

int64_t mt_sent_to_others(const int64_t *counts, const mt_group *group) {
    int64_t sent = -counts[group->rank];
    for (int rank = 0; rank < group->size; rank++) sent += counts[rank];
    return sent;
}

/* Bytes that each rank sends, and receives, at least. Sums of doubles are those of losses and norms; groups of replicas
 * exchange gradients and parameters. A group of one does nothing and is not recorded. */
mt_work mt_work_sent(mt_operation operation, int64_t elements, mt_dtype dtype, const mt_group *group) {
    static const struct {
        const char *group;
        mt_traffic traffic;
    } groups[] = {{"tensor", MT_TRAFFIC_TENSOR},     {"tensor-context", MT_TRAFFIC_TENSOR},
                  {"context", MT_TRAFFIC_CONTEXT},   {"context-a2a", MT_TRAFFIC_CONTEXT},
                  {"expert", MT_TRAFFIC_EXPERT},     {"context-ring", MT_TRAFFIC_CONTEXT},
                  {"model", MT_TRAFFIC_SUMS},        {"expert-exchange", MT_TRAFFIC_EXPERT},
                  {"pipeline", MT_TRAFFIC_PIPELINE}, {"expert-tensor", MT_TRAFFIC_EXPERT},
                  {"stage", MT_TRAFFIC_SUMS}};
    mt_work work = mt_work_bytes(elements, dtype);
    work.is_nothing = group->size == 1, work.group = group;
    work.traffic = operation == MT_OPERATION_all_gather ? MT_TRAFFIC_PARAMETERS : MT_TRAFFIC_GRADIENTS;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (strcmp(group->name, groups[i].group) == 0) work.traffic = groups[i].traffic;
    if (operation != MT_OPERATION_all_reduce) return work;
    if (dtype == MT_F64) work.traffic = MT_TRAFFIC_SUMS;
    work.bytes *= 2.0 * (group->size - 1) / group->size; // in two halves: summed slices, then the slices
    return work;
}

#define MT_TIMED_FUNCTION(name, work, arguments, ...)                                                                  \
    static void mt_timed_##name(__VA_ARGS__) {                                                                         \
        bool recorded = mt_profiler.recording && mt_call_begin(MT_OPERATION_##name, work, stream);                     \
        mt_profiler.ops->name arguments;                                                                               \
        if (recorded) mt_call_end(stream);                                                                             \
    }
MT_TIMED_OPERATIONS(MT_TIMED_FUNCTION)
MT_FUSED_OPERATIONS(MT_TIMED_FUNCTION)
MT_PLAIN_OPERATIONS(MT_TIMED_FUNCTION)
#undef MT_TIMED_FUNCTION

/* Marks the record that was begun as one of a message; both ends give it the same number. */
static void mt_call_is_message(const mt_channel *channel, int64_t ticket) {
    const mt_group *group = channel->group;
    mt_profile_call *call = &mt_profiler.calls[mt_profiler.step.num_calls];
    int64_t pair = (int64_t)group->members[channel->from] << 16 ^ group->members[channel->to];
    call->message = (pair << 4 ^ channel->id) << 16 ^ (ticket & 0xffff);
    call->sends = group->rank == channel->from;
}

/* The time of a message that leaves: until it is sent if it has a stream of its own, else the time of the call. */
static int64_t mt_timed_channel_send(mt_channel *channel, const void *buffer, int64_t count, mt_dtype dtype,
                                     mt_stream *stream) {
    mt_work work = mt_work_sent(MT_OPERATION_channel_send, count, dtype, channel->group);
    bool recorded = mt_profiler.recording && mt_call_begin(MT_OPERATION_channel_send, work, stream);
    int64_t ticket = mt_profiler.ops->channel_send(channel, buffer, count, dtype, stream);
    if (recorded) mt_call_is_message(channel, ticket);
    if (recorded) mt_call_end(channel->stream ? channel->stream : stream);
    return ticket;
}

/* The time that a message keeps the stream waiting. */
static void mt_timed_channel_wait(mt_channel *channel, int64_t ticket, mt_stream *stream) {
    int64_t bytes = channel->bytes[ticket % MT_CHANNEL_TICKETS];
    mt_work work = mt_work_sent(MT_OPERATION_channel_wait, bytes, MT_U8, channel->group);
    bool recorded = mt_profiler.recording && mt_call_begin(MT_OPERATION_channel_wait, work, stream);
    mt_profiler.ops->channel_wait(channel, ticket, stream);
    if (recorded) mt_call_is_message(channel, ticket);
    if (recorded) mt_call_end(stream);
}

/* A copy of the backend whose timed and fused operations are replaced by wrappers. Graphs are left out: their
 * operations run without a record. */
static mt_ops mt_profile_timed_ops(const mt_ops *ops) {
    mt_ops timed = *ops;
#define MT_TIMED_ENTRY(name, ...) timed.name = ops->name ? mt_timed_##name : NULL;
#define MT_NO_ENTRY(name, ...)    timed.name = NULL;
    MT_TIMED_OPERATIONS(MT_TIMED_ENTRY)
    MT_FUSED_OPERATIONS(MT_TIMED_ENTRY)
    MT_PLAIN_OPERATIONS(MT_TIMED_ENTRY)
    MT_GRAPH_OPERATIONS(MT_NO_ENTRY)
#undef MT_TIMED_ENTRY
#undef MT_NO_ENTRY
    timed.channel_send = mt_timed_channel_send, timed.channel_wait = mt_timed_channel_wait;
    timed.phase_begin = mt_profile_phase_begin, timed.phase_end = mt_profile_phase_end;
    return timed;
}

const mt_ops *mt_profile_open(const mt_ops *ops) {
#define MT_PROFILE_ROW(operation, ...) {.name = #operation},
    mt_profiler.sums = (mt_profile){.backend = ops->name, .rows = {MT_ALL_OPERATIONS(MT_PROFILE_ROW)}};
#undef MT_PROFILE_ROW
    mt_profiler.ops = ops;
    mt_profiler.timed = mt_profile_timed_ops(ops);
    mt_profiler.on_gpu = ops->on_device;
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
                ops->linear_forward(&(mt_linear_args){n, n, n, .x = from, .w = w, .y = to}, dtype, stream);
            else
                ops->memory_copy(to, from, bytes, stream);
        mt_moment_mark(&moments[1], stream);
        double seconds = mt_moment_seconds(&moments[0], &moments[1]) / CALLS;
        if (batch > 0) best = fmin(best, seconds);
    }
    mt_moments_free(moments, 2);
    return best;
}

double mt_cpu_matmul_rate(int64_t n) {
    float *memory = mt_cpu_ops.memory_alloc(3 * n * n * (int64_t)sizeof(float)), *x = memory, *w = x + n * n,
          *y = w + n * n;
    for (int64_t i = 0; i < 2 * n * n; i++) memory[i] = (float)(i % 7) - 3.0f;
    double best = 1e30, begin = mt_time();
    for (int64_t run = 0; run < 4 || (run < 20 && mt_time() - begin < 0.5); run++) {
        double start = mt_time();
        mt_cpu_ops.linear_forward(&(mt_linear_args){n, n, n, .x = x, .w = w, .y = y}, MT_F32, NULL);
        best = fmin(best, mt_time() - start);
    }
    mt_cpu_ops.memory_free(memory);
    return 2.0 * (double)n * (double)n * (double)n / best;
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
    ops->stream_synchronize(stream);
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
    fprintf(file, "  %-22s %8.6g %11.3f %6.1f%% %15s %11.1f%% %13.6g %s\n", row->name, (double)row->calls / steps,
            1e3 * row->seconds / steps, 100 * row->seconds / sums->seconds, text,
            100 * rate / (computes ? ceilings->flops : ceilings->bytes),
            computes ? 1e-9 * row->flops / steps : 1e-6 * row->bytes / steps, computes ? "GFLOP" : "MB");
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
    fprintf(file, "  %-22s %8s %11s %7s %15s %12s %19s\n", "operation", "calls", "ms a step", "share", "rate",
            "of ceiling", "work a step");
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
