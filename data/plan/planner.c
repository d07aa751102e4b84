/* planner.c: prints simulated steps, and finds the fastest layout of a model. */
#include "planner.h"

#include "../options/option_warn.h"
#include "layouts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const mt_step_part_names[MT_NUM_STEP_PARTS] = {[MT_STEP_PART_PRODUCTS] = "products",
                                                                  [MT_STEP_PART_ATTENTION] = "attention",
                                                                  [MT_STEP_PART_MEMORY] = "memory-bound",
                                                                  [MT_STEP_PART_OPTIMIZER] = "optimizer",
                                                                  [MT_STEP_PART_COMMUNICATION] =
                                                                      "exposed communication",
                                                                  [MT_STEP_PART_IDLE] = "idle",
                                                                  [MT_STEP_PART_BUBBLE] = "bubble"};
static const char *const mt_plan_row_names[MT_NUM_PLAN_ROWS] = {
    [MT_PLAN_WEIGHTS] = "weights", [MT_PLAN_GRADIENTS] = "gradients",     [MT_PLAN_OPTIMIZER] = "optimizer",
    [MT_PLAN_BUFFERS] = "buckets", [MT_PLAN_ACTIVATIONS] = "activations", [MT_PLAN_CACHE] = "cache",
    [MT_PLAN_FP8] = "fp8",         [MT_PLAN_EXPERTS] = "expert rows",     [MT_PLAN_TOTAL] = "in all",
    [MT_PLAN_HOST] = "on the host"};
static const char *const mt_traffic_words[MT_NUM_TRAFFICS] = {[MT_TRAFFIC_NONE] = "",
                                                              [MT_TRAFFIC_TENSOR] = "tensor",
                                                              [MT_TRAFFIC_GRADIENTS] = "gradients",
                                                              [MT_TRAFFIC_PARAMETERS] = "parameters",
                                                              [MT_TRAFFIC_CONTEXT] = "context",
                                                              [MT_TRAFFIC_PIPELINE] = "pipeline",
                                                              [MT_TRAFFIC_EXPERT] = "experts",
                                                              [MT_TRAFFIC_SUMS] = "sums"};

/* ---- one simulated step */

/* The time of a pipeline rank by part. */
static void mt_plan_print_time(const mt_simulation *s, const mt_simulated_rank *rank, FILE *file) {
    for (int part = 0; part < MT_NUM_STEP_PARTS; part++) {
        if (rank->parts[part] < 5e-6) continue;
        fprintf(file, " %s %.1f", mt_step_part_names[part], 1e3 * rank->parts[part]);
        const char *before = " (";
        for (int i = 1; i < MT_NUM_TRAFFICS && part == MT_STEP_PART_COMMUNICATION; i++)
            if (rank->exposed[i] >= 5e-6) {
                fprintf(file, "%s%s %.1f", before, mt_traffic_words[i], 1e3 * rank->exposed[i]);
                before = ", ";
            }
        if (*before == ',') fprintf(file, ")");
    }
    fprintf(file, " ms");
    if (s->pipeline_ranks > 1) {
        bool last = rank->last == s->pipeline[s->slowest].last;
        fprintf(file, " (pipeline rank %lld of %lld%s)", (long long)rank->last, (long long)s->pipeline_ranks,
                last ? ", the last to end" : "");
    }
    fprintf(file, "\n");
}

/* Three lines: speed, time of a pipeline rank by part, memory by row. */
static void mt_plan_print_rank(const mt_simulation *s, const mt_simulated_rank *rank, const mt_machine *machine,
                               const char *indent, FILE *file) {
    double day = s->tokens_per_second * 86400e-9;
    bool large = day >= 999.5;
    fprintf(file, "%sstep    %.1f ms, %.0f tokens/s, %.3g %c tokens a day, MFU %.1f%%", indent, 1e3 * s->seconds,
            s->tokens_per_second, large ? 1e-3 * day : day, large ? 'T' : 'G', 100 * s->mfu);
    if (s->bubble > 0) fprintf(file, ", bubble %.1f%% of all ranks' work", 100 * s->bubble);
    fprintf(file, "\n%stime   ", indent);
    mt_plan_print_time(s, rank, file);
    fprintf(file, "%smemory ", indent);
    for (int row = 0; row < MT_NUM_PLAN_ROWS; row++)
        if (s->bytes[row] > 0) fprintf(file, " %s %.2f", mt_plan_row_names[row], (double)s->bytes[row] / (1 << 30));
    fprintf(file, " GiB; with CUDA and libraries %.1f of %.1f GiB\n", s->needed / (1 << 30),
            machine->memory_gib / (1 << 30));
}

/* The same of the rank that ends last. */
static void mt_plan_print_step(const mt_simulation *s, const mt_machine *machine, const char *indent, FILE *file) {
    mt_plan_print_rank(s, &s->pipeline[s->slowest], machine, indent, file);
}

/* Samples of any length are not read. */
static void mt_plan_print_rows(const mt_run_options *o, FILE *file) {
    if (o->sft || o->stack.stage == MT_STAGE_SFT) fprintf(file, "each row is timed as one sample of --seq-length\n");
}

/* Equal calls of a step as one line. */
typedef struct mt_explained {
    const mt_simulated_call *call; // the first one
    int64_t calls;
    double seconds, hidden; // of all calls; the part of communication that overlaps with computation
    const char *behind;     // name of the computation that hides most of it
    double behind_seconds;
} mt_explained;

static bool mt_calls_equal(const mt_simulated_call *a, const mt_simulated_call *b) {
    return a->operation == b->operation && a->group == b->group && a->ranks == b->ranks &&
           a->work.bytes == b->work.bytes && a->work.flops == b->work.flops && a->on_host == b->on_host &&
           a->message == b->message && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

static int mt_explained_compare(const void *a, const void *b) {
    const mt_explained *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? 1 : -1;
    return (x->call > y->call) - (x->call < y->call);
}

/* Adds the computation beside a call of communication; computation is in the order of time. */
static void mt_explain_hidden(mt_explained *row, const mt_simulated_call *call,
                              const mt_simulated_call *const *computation, int64_t count) {
    double seconds[MT_NUM_OPERATIONS] = {0};
    int64_t first = 0, end = count;
    while (first < end) { // the first that ends after the call begins
        int64_t middle = (first + end) / 2;
        if (computation[middle]->to <= call->from)
            first = middle + 1;
        else
            end = middle;
    }
    for (int64_t i = first; i < count && computation[i]->from < call->to; i++) {
        double overlap = fmin(call->to, computation[i]->to) - fmax(call->from, computation[i]->from);
        seconds[computation[i]->operation] += overlap, row->hidden += overlap;
    }
    for (int i = 0; i < MT_NUM_OPERATIONS; i++)
        if (seconds[i] > row->behind_seconds)
            row->behind = mt_operation_name((mt_operation)i), row->behind_seconds = seconds[i];
}

/* Adds a message of the pipeline, whose time the schedule of all ranks gives. */
static void mt_explain_message(mt_explained *row, const mt_simulated_message *message) {
    static const char *const names[] = {[MT_ACTION_FORWARD] = "forward",
                                        [MT_ACTION_BACKWARD] = "backward",
                                        [MT_ACTION_BACKWARD_INPUT] = "backward of the input",
                                        [MT_ACTION_BACKWARD_WEIGHT] = "backward of the weights"};
    row->seconds += message->seconds;
    for (int i = 0; i <= MT_ACTION_BACKWARD_WEIGHT; i++) {
        row->hidden += message->behind[i];
        if (message->behind[i] > row->behind_seconds) row->behind = names[i], row->behind_seconds = message->behind[i];
    }
}

static void mt_explain_row(const mt_explained *row, FILE *file) {
    const mt_simulated_call *call = row->call;
    char shape[64] = "", bytes[32] = "", group[40] = "";
    if (call->group) snprintf(group, sizeof group, "%s of %d", call->group, call->ranks);
    if (call->shape[0] > 0)
        snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)call->shape[0], (long long)call->shape[1],
                 (long long)call->shape[2]);
    else if (call->message)
        snprintf(shape, sizeof shape, "%s",
                 call->message == MT_ACTION_SEND_BACKWARD || call->message == MT_ACTION_RECV_BACKWARD ? "gradients"
                                                                                                      : "activations");
    else if (call->work.flops > 0)
        snprintf(shape, sizeof shape, "%.3g GFLOP", call->work.flops * 1e-9);
    if (call->work.bytes > 0) snprintf(bytes, sizeof bytes, "%.4g", call->work.bytes / 1048576);
    fprintf(file, "%-30s %6lld  %-20s %9s  %-20s %9.3f %9.2f", mt_operation_name(call->operation),
            (long long)row->calls, shape, bytes, group, 1e3 * row->seconds / (double)row->calls, 1e3 * row->seconds);
    if (call->group && row->hidden > 0.005 * row->seconds)
        fprintf(file, "  %.0f%% behind %s", 100 * fmin(row->hidden / row->seconds, 1), row->behind);
    else if (call->group)
        fprintf(file, "  exposed");
    if (call->on_host) fprintf(file, "  on the host");
    fprintf(file, "\n");
}

/* The calls of the step that was simulated last, equal ones together, by time. */
static void mt_explain_calls(const mt_simulated_message *messages, FILE *file) {
    int64_t count, rows = 0, room = 256;
    const mt_simulated_call *calls = mt_simulated_calls(&count);
    mt_explained *table = mt_malloc(room * (int64_t)sizeof *table);
    const mt_simulated_call **computation = mt_malloc(mt_max(count, 1) * (int64_t)sizeof *computation);
    int64_t computed = 0;
    for (int64_t i = 0; i < count; i++)
        if (!calls[i].group && calls[i].stream == 0) computation[computed++] = &calls[i];
    for (int64_t i = 0; i < count; i++) {
        int64_t row = 0;
        while (row < rows && !mt_calls_equal(table[row].call, &calls[i])) row++;
        if (row == rows && rows == room) table = mt_realloc(table, (room *= 2) * (int64_t)sizeof *table);
        if (row == rows) table[rows++] = (mt_explained){.call = &calls[i]};
        table[row].calls++, table[row].seconds += calls[i].to - calls[i].from;
        if (calls[i].message)
            mt_explain_message(&table[row], &messages[calls[i].message]);
        else if (calls[i].group)
            mt_explain_hidden(&table[row], &calls[i], computation, computed);
    }
    qsort(table, (size_t)rows, sizeof *table, mt_explained_compare);
    fprintf(file, "%-30s %6s  %-20s %9s  %-20s %9s %9s  %s\n", "operation", "calls", "shape", "MiB", "group", "ms",
            "all, ms", "hidden");
    for (int64_t row = 0; row < rows; row++) mt_explain_row(&table[row], file);
    free(computation);
    free(table);
}

static int mt_plan_too_large(const mt_simulation *simulation, const mt_machine *machine, mt_error *error) {
    return mt_error_set(error,
                        "a GPU needs %.1f GiB, with CUDA and libraries, and the %s has %.1f GiB%s; shard or recompute "
                        "more, or lower --micro-batch-size",
                        simulation->needed / (1 << 30), machine->name, machine->memory_gib / (1 << 30),
                        machine->is_limited ? " by --memory-limit" : "");
}

bool mt_plan_has_room(const mt_run_options *o, int64_t ranks, mt_error *error) {
    mt_machine machine;
    mt_simulation simulation;
    mt_error other;
    if (mt_machine_of_options(&machine, o, &other) != 0) return true;
    bool has_room = mt_simulate(&simulation, &o->stack, ranks, &machine, &other) != MT_DOES_NOT_FIT;
    if (!has_room) mt_plan_too_large(&simulation, &machine, error);
    mt_simulation_free(&simulation);
    return has_room;
}

/* Prints a step that was simulated, and the operations of a pipeline rank. */
static int mt_explain_step(const mt_simulation *s, const mt_run_options *o, int64_t ranks, const mt_machine *machine,
                           FILE *file, mt_error *error) {
    mt_simulated_message messages[MT_ACTION_RECV_BACKWARD + 1];
    int64_t number = o->explain_rank >= 0 ? o->explain_rank : s->pipeline[s->slowest].last;
    mt_simulated_rank rank = {.rank = number, .last = number};
    mt_run_options on_gpu = *o; // its strings are not freed
    on_gpu.device = MT_DEVICE_CUDA;
    if (mt_simulate_rank(&rank, messages, s, &o->stack, ranks, machine, error) != 0) return -1;
    fprintf(file, "a training step on %lld x %s, simulated:\n", (long long)ranks, machine->name);
    mt_plan_print_rows(o, file);
    mt_plan_print_rank(s, &rank, machine, "  ", file);
    mt_options_warn(&on_gpu, MT_PROGRAM_TRAIN, file);
    fprintf(file, "\nOperations of pipeline rank %lld of %lld", (long long)number, (long long)s->pipeline_ranks);
    if (s->micro_batches_shown < s->micro_batches)
        fprintf(file, " in %lld of %lld micro-batches", (long long)s->micro_batches_shown, (long long)s->micro_batches);
    fprintf(file, "; shape: rows x columns x terms of a sum\n\n");
    mt_explain_calls(messages, file);
    return 0;
}

int mt_plan_explain(const mt_run_options *o, int64_t ranks, FILE *file, mt_error *error) {
    mt_machine machine;
    mt_simulation simulation;
    int64_t pp = o->stack.pipeline_model_parallel_size;
    if (o->explain_rank >= pp)
        return mt_error_set(error, "--explain-rank %lld: the pipeline's ranks are 0 to %lld",
                            (long long)o->explain_rank, (long long)pp - 1);
    if (mt_machine_of_options(&machine, o, error) != 0) return -1;
    int status = mt_simulate(&simulation, &o->stack, ranks, &machine, error);
    if (status == MT_DOES_NOT_FIT) mt_plan_too_large(&simulation, &machine, error);
    if (status == 0) status = mt_explain_step(&simulation, o, ranks, &machine, file, error);
    mt_simulation_free(&simulation);
    return status == 0 ? 0 : -1;
}

/* ---- the fastest layouts */

int mt_plan_print(const mt_run_options *o, FILE *file, mt_error *error) {
    const int64_t most_attempts = 10000; // one or two minutes of a core; 405B on 1,024 GPUs takes 1,790
    mt_machine machine;
    double begin = mt_time();
    if (mt_machine_of_options(&machine, o, error) != 0) return -1;
    mt_layouts *layouts = mt_malloc(sizeof *layouts);
    int status = mt_layouts_search(layouts, o, &machine, most_attempts, error);
    if (status == 0) {
        fprintf(file, "the fastest layouts on %lld x %s, %lld GPUs a host, simulated:\n", (long long)o->gpus,
                machine.name, (long long)o->gpus_per_host);
        mt_plan_print_rows(o, file);
        for (int64_t i = 0; i < layouts->count; i++) {
            fprintf(file, "\n%lld.%s\n", (long long)i + 1, layouts->best[i].line);
            mt_plan_print_step(&layouts->best[i].simulation, &machine, "   ", file);
        }
        fprintf(file,
                "\n%lld layouts: %lld simulated, %lld too large, %lld not legal, %lld slower by their least time or by "
                "sharding or recomputing needlessly; %.1f s.\n",
                (long long)layouts->considered, (long long)layouts->simulated, (long long)layouts->too_large,
                (long long)layouts->illegal, (long long)layouts->bounded, mt_time() - begin);
        if (layouts->skipped > 0)
            fprintf(file, "%lld layouts were left out after %lld simulations; give sizes that are known.\n",
                    (long long)layouts->skipped, (long long)layouts->attempts);
    }
    mt_layouts_free(layouts);
    free(layouts);
    return status;
}
