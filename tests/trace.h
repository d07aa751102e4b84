/* trace.h: traces and profiles of a job of four ranks in several layouts. For suites that run on one backend. */
#ifndef MT_TESTS_TRACE_H
#define MT_TESTS_TRACE_H

#include "../data/report/profile.h"
#include "../data/report/trace.h"
#include "golden.h"

#include <mpi.h>
#include <unistd.h>

enum { RANKS = 4, RUN_STEPS = 5, FIRST = 2, LAST = 3, MAX_THREADS = 64 };

static mt_grid grid;
static const mt_ops *real_ops; // the backend's own
static char trace_path[256];

/* A layout of llama on four ranks, with micro-batches of one sequence, and its communication. */
typedef struct layout {
    const char *options;
    int tp, cp, pp, dp;
    const char *threads[6]; // of the trace, besides "phases" and "compute"
} layout;

static const layout layouts[] = {
    {"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
     2,
     1,
     2,
     1,
     {"tensor communication", "pipeline sends", "pipeline receives", "loss and norm"}},
    {"--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel",
     2,
     2,
     1,
     1,
     {"tensor communication", "gradient reduction", "context ring", "context ring (sends)", "loss and norm"}},
    {"--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather",
     1,
     1,
     1,
     4,
     {"gradient reduction", "parameter gather", "loss and norm"}},
    {"--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --use-distributed-optimizer",
     1,
     1,
     2,
     2,
     {"pipeline sends", "pipeline receives", "gradient reduction", "parameter gather", "loss and norm"}},
};
enum { NUM_LAYOUTS = sizeof layouts / sizeof *layouts };

/* The shape of llama, by the command line of `train`. */
static fixture open_llama(const char *more, int64_t world_size) {
    fixture f = {0};
    mt_error error = {{0}};
    char line[1024], *arguments[64];
    int count = 0;
    snprintf(line, sizeof line,
             "train --hf-config tests/golden/hf/llama/config.json --tokens-file tests/golden/hf/llama/tokens.i32 "
             "--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-2 "
             "--deterministic-mode %s",
             more);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&f.options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&f.options, MT_PROGRAM_TRAIN, world_size, &error) != 0) fail_msg("%s", error.text);
    f.tokens = read_file("tests/golden/hf/llama", "tokens.i32", STEPS * SEQUENCES * (SEQ_LENGTH + 1) * 4);
    mt_batch_alloc(&f.batch, TOKENS);
    return f;
}

/* Trains llama for some steps in a layout; `more` may hold --trace or --profile. The profile stays open. */
static void train_layout(const layout *way, const char *more, mt_metrics metrics[RUN_STEPS]) {
    char words[512];
    mt_run_state run = {0};
    mt_error error;
    mt_model_plan plan = {
        .max_tokens = SEQ_LENGTH, .max_logits = SEQ_LENGTH, .max_position = SEQ_LENGTH, .train = true};
    snprintf(words, sizeof words, "%s %s", way->options, more);
    fixture f = open_llama(words, RANKS);
    mt_grid built = grid; // only the world is shared
    if (mt_grid_build(&built, &f.options.stack, &error) != 0) fail_msg("%s", error.text);
    backend = mt_backend_open(real_ops->on_device ? MT_DEVICE_CUDA : MT_DEVICE_CPU, &built, &error);
    if (!backend) fail_msg("%s", error.text);
    bool timed = f.options.trace || f.options.profile;
    if (timed) backend = mt_profile_open(backend);
    if (mt_model_create(&f.model, &f.options.stack, &built, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_model_init(f.model);
    if (f.options.trace && mt_trace_open(&f.options, &built, &run, &error) != 0) fail_msg("%s", error.text);
    for (int step = 0; step < RUN_STEPS; step++) {
        source from = {&f, step, 1, built.data.rank, built.data.size};
        bool traced = mt_trace_step_begin();
        if (timed) mt_profile_step_begin();
        if (mt_train_step(f.model, &run, SEQUENCES / built.data.size, next_micro_batch, &from, &f.batch, &metrics[step],
                          &error))
            fail_msg("%s", error.text);
        if (timed) mt_profile_step_end();
        if (traced) mt_trace_step_end();
        assert_int_equal(mt_trace_is_complete(), f.options.trace && step + 1 == LAST);
        if (mt_trace_is_complete() && mt_trace_write(&error) != 0) fail_msg("%s", error.text);
    }
    assert_false(mt_trace_is_open());
    close_family(&f);
    mt_grid_clear(&built);
}

/* ---- reading a trace --------------------------------------------------------------------------------------------- */

static const char *text_of(const json_t *event, const char *key) {
    const char *text = json_string_value(json_object_get(event, key));
    return text ? text : "";
}

static double number_of(const json_t *event, const char *key) {
    json_t *value = json_object_get(event, key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

/* A number of "args", -1 where there is none. */
static double argument_of(const json_t *event, const char *key) {
    json_t *value = json_object_get(json_object_get(event, "args"), key);
    return value ? json_number_value(value) : -1;
}

static bool is_phase(const json_t *event, const char *kind) {
    return strcmp(text_of(event, "ph"), kind) == 0;
}

/* A box of one rank. */
typedef struct trace_box {
    const json_t *event;
    int thread;
    double from, to;
} trace_box;

static int by_thread_and_time(const void *a, const void *b) {
    const trace_box *x = a, *y = b;
    if (x->thread != y->thread) return x->thread - y->thread;
    if (x->from != y->from) return (x->from > y->from) - (x->from < y->from);
    return (x->to < y->to) - (x->to > y->to); // the outer one first
}

/* The boxes of a rank, to free, by thread and time. */
static trace_box *boxes_of(const json_t *events, int rank, int64_t *count) {
    trace_box *boxes = mt_calloc((int64_t)json_array_size(events) * (int64_t)sizeof *boxes);
    *count = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        if (!is_phase(event, "X") || number_of(event, "pid") != rank) continue;
        double from = number_of(event, "ts");
        boxes[(*count)++] = (trace_box){event, (int)number_of(event, "tid"), from, from + number_of(event, "dur")};
    }
    qsort(boxes, (size_t)*count, sizeof *boxes, by_thread_and_time);
    return boxes;
}

/* Tolerance in microseconds for equal times, which are rounded to a nanosecond. */
#define SAME 0.0005

/* Boxes of a thread do not overlap, except phases, which lie inside their step, the box before them. */
static void assert_beside_one_another(const trace_box *boxes, int64_t count) {
    const trace_box *step = NULL, *last = NULL;
    for (int64_t i = 0; i < count; i++) {
        const trace_box *box = &boxes[i];
        bool is_step = strcmp(text_of(box->event, "name"), "step") == 0;
        assert_true(is_step <= (box->thread == 0) && box->to >= box->from && box->from >= 0);
        if (box->thread == 0 && !is_step) assert_true(step && box->from >= step->from && box->to <= step->to + SAME);
        if (is_step && step) assert_true(box->from >= step->to - SAME);
        if (!is_step && last && last->thread == box->thread) assert_true(box->from >= last->to - SAME);
        if (is_step) step = box, last = NULL;
        if (!is_step) last = box;
    }
}

/* The trace has steps FIRST to LAST; each box lies in one of them; each box of a micro-batch lies in its phase. */
static void assert_inside(const trace_box *boxes, int64_t count, bool on_cpu) {
    int steps = 0;
    for (int64_t i = 0; i < count; i++) {
        int around = 0;
        double micro_batch = argument_of(boxes[i].event, "micro_batch");
        if (strcmp(text_of(boxes[i].event, "name"), "step") == 0)
            assert_true(argument_of(boxes[i].event, "iteration") == FIRST + steps++);
        for (int64_t k = 0; k < count && boxes[k].thread == 0; k++) {
            bool is_step = strcmp(text_of(boxes[k].event, "name"), "step") == 0;
            if (!is_step && (!on_cpu || micro_batch < 0 || argument_of(boxes[k].event, "micro_batch") != micro_batch))
                continue;
            if (boxes[i].from >= boxes[k].from && boxes[i].to <= boxes[k].to + SAME) around |= is_step ? 1 : 2;
        }
        assert_int_equal(around, on_cpu && micro_batch >= 0 ? 3 : 1);
    }
    assert_int_equal(steps, LAST - FIRST + 1);
}

/* Every step has one forward and one backward of each micro-batch. */
static void assert_phases(const trace_box *boxes, int64_t count, const layout *way) {
    int forwards[SEQUENCES] = {0}, backwards[SEQUENCES] = {0}, weights[SEQUENCES] = {0}, optimizers = 0;
    bool splits = strstr(way->options, "zb-h1") != NULL;
    for (int64_t i = 0; i < count && boxes[i].thread == 0; i++) {
        const char *name = text_of(boxes[i].event, "name");
        int micro_batch = (int)argument_of(boxes[i].event, "micro_batch");
        assert_true(micro_batch < SEQUENCES / way->dp);
        if (micro_batch >= 0) assert_true(argument_of(boxes[i].event, "chunk") == 0);
        if (strcmp(name, "forward") == 0) forwards[micro_batch]++;
        if (strcmp(name, splits ? "backward of the input" : "backward") == 0) backwards[micro_batch]++;
        if (strcmp(name, "backward of the weights") == 0) weights[micro_batch]++;
        if (strcmp(name, "optimizer") == 0) optimizers++;
    }
    const int steps = LAST - FIRST + 1;
    assert_int_equal(optimizers, steps);
    for (int i = 0; i < SEQUENCES / way->dp; i++) {
        assert_int_equal(forwards[i], steps);
        assert_int_equal(backwards[i], steps);
        assert_int_equal(weights[i], splits ? steps : 0);
    }
}

/* Names: the rank with its coordinates (tp is the fastest, then cp, dp, pp), and its threads. */
static void assert_names(const json_t *events, int rank, const layout *way) {
    char expected[128], process[128] = "";
    const char *threads[MAX_THREADS] = {NULL};
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        if (!is_phase(event, "M") || number_of(event, "pid") != rank) continue;
        const char *name = text_of(json_object_get(event, "args"), "name");
        if (strcmp(text_of(event, "name"), "process_name") == 0) snprintf(process, sizeof process, "%s", name);
        if (strcmp(text_of(event, "name"), "thread_name") == 0) threads[(int)number_of(event, "tid")] = name;
    }
    snprintf(expected, sizeof expected, "rank %d: tp %d cp %d pp %d dp %d", rank, rank % way->tp,
             rank / way->tp % way->cp, rank / (way->tp * way->cp * way->dp), rank / (way->tp * way->cp) % way->dp);
    assert_string_equal(process, expected);
    assert_string_equal(threads[0], "phases");
    for (int k = -1; k < 6 && (k < 0 || way->threads[k]); k++) {
        bool found = false;
        for (int i = 1; i < MAX_THREADS; i++)
            found |= threads[i] && strcmp(threads[i], k < 0 ? "compute" : way->threads[k]) == 0;
        if (!found) fail_msg("rank %d of %s has no thread %s", rank, way->options, way->threads[k]);
    }
}

/* Every message arrives once, on another rank, not before it was sent. */
static void assert_arrows(const json_t *events, bool expected) {
    int64_t sent = 0, received = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        int matches = 0;
        received += is_phase(event, "f");
        if (!is_phase(event, "s")) continue;
        sent++;
        for (size_t k = 0; k < json_array_size(events); k++) {
            const json_t *other = json_array_get(events, k);
            if (!is_phase(other, "f") || number_of(other, "id") != number_of(event, "id")) continue;
            matches++;
            assert_true(number_of(other, "pid") != number_of(event, "pid"));
            if (real_ops == &mt_cpu_ops) assert_true(number_of(other, "ts") >= number_of(event, "ts") - SAME);
        }
        assert_int_equal(matches, 1);
    }
    assert_int_equal(sent, received);
    assert_int_equal(sent > 0, expected);
}

/* Operations of all ranks with weights in a step: 2 per token and per weight of every matrix. */
static double forward_flops(void) {
    mt_param *params;
    fixture f = open_llama("", 1);
    int64_t count = mt_params_build(&params, &f.options.stack, NULL);
    double weights = 0;
    for (int64_t i = 0; i < count; i++)
        if (!params[i].is_vector && params[i].role != MT_WORD_EMBEDDING)
            weights += (double)params[i].rows * (double)params[i].cols;
    free(params);
    mt_batch_free(&f.batch), mt_options_free(&f.options), free(f.tokens);
    return 2 * TOKENS * weights;
}

/* ---- tests ------------------------------------------------------------------------------------------------------ */

static void trace_shows_every_rank_step_phase_and_message(void **state) {
    (void)state;
    char more[320];
    snprintf(more, sizeof more, "--trace %s", trace_path);
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        const layout *way = &layouts[k];
        mt_metrics metrics[RUN_STEPS];
        train_layout(way, more, metrics);
        mt_profile_close();
        if (grid.world.rank > 0) continue;
        json_error_t problem;
        json_t *file = json_load_file(trace_path, JSON_REJECT_DUPLICATES, &problem);
        if (!file) fail_msg("%s: line %d: %s", trace_path, problem.line, problem.text);
        json_t *events = json_object_get(file, "traceEvents");
        double flops = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            int64_t count;
            trace_box *boxes = boxes_of(events, rank, &count);
            assert_names(events, rank, way);
            assert_beside_one_another(boxes, count);
            assert_inside(boxes, count, real_ops == &mt_cpu_ops);
            assert_phases(boxes, count, way);
            for (int64_t i = 0; i < count; i++)
                if (strcmp(text_of(boxes[i].event, "name"), "linear_forward") == 0)
                    flops += argument_of(boxes[i].event, "flops");
            free(boxes);
        }
        assert_true(flops == (LAST - FIRST + 1) * forward_flops());
        assert_arrows(events, way->pp * way->cp > 1);
        json_decref(file);
        unlink(trace_path);
    }
}

static void losses_are_the_same_with_a_trace(void **state) {
    (void)state;
    char more[320];
    snprintf(more, sizeof more, "--profile --trace %s", trace_path);
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        mt_metrics plain[RUN_STEPS], traced[RUN_STEPS];
        train_layout(&layouts[k], "", plain);
        train_layout(&layouts[k], more, traced);
        mt_profile_close();
        for (int step = 0; step < RUN_STEPS; step++) {
            assert_true(plain[step].loss == traced[step].loss);
            assert_true(plain[step].grad_norm == traced[step].grad_norm);
        }
        assert_true(plain[0].loss != plain[RUN_STEPS - 1].loss);
        if (grid.world.rank == 0) assert_int_equal(unlink(trace_path), 0);
    }
}

#endif
