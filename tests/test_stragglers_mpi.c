/* --log-straggler on four ranks: operations of one rank are delayed; the report names the rank and the part. */
#include "../data/base/file.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/profile.h"
#include "../data/report/report.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

enum { LENGTH = 16 };

static mt_grid grid;
static mt_ops slow_ops;
static bool slow_forward, slow_backward, slow_data; // on this rank
static int delay_ms = 100;                          // far above what a scheduler takes from a rank

static void wait_if(bool slow) {
    if (slow) usleep((useconds_t)delay_ms * 1000);
}

static void slow_activation_forward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    wait_if(slow_forward);
    mt_cpu_ops.activation_forward(a, dtype, stream);
}

static void slow_activation_backward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    wait_if(slow_backward);
    mt_cpu_ops.activation_backward(a, dtype, stream);
}

static int make_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    wait_if(slow_data);
    batch->num_tokens = LENGTH, batch->num_spans = 1;
    batch->spans[0] = (mt_span){0, LENGTH, 0, LENGTH, true};
    for (int32_t i = 0; i < LENGTH; i++) {
        batch->tokens[i] = i, batch->labels[i] = i + 1, batch->positions[i] = i, batch->token_index[i] = i;
        batch->loss_mask[i] = 1;
    }
    return 0;
}

static void options_open(mt_run_options *options, const char *layout, const char *metrics) {
    char line[1024], *arguments[64];
    int count = 0;
    mt_error error;
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 1 --global-batch-size 4 --train-iters 8 --lr 1e-3 "
             "--log-interval 2 --device cpu --num-layers 2 --hidden-size 16 --num-attention-heads 4 --vocab-size 60 "
             "--make-vocab-size-divisible-by 64 --log-straggler --metrics %s %s",
             LENGTH, metrics, layout);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(options, MT_PROGRAM_TRAIN, grid.world.size, &error) != 0) fail_msg("%s", error.text);
    if (mt_grid_build(&grid, &options->stack, &error) != 0) fail_msg("%s", error.text);
}

/* Trains four steps; returns the report of the fourth on rank 0, to free. */
static json_t *report_of_four_steps(const char *layout) {
    char path[64]; // of rank 0, the only one that writes
    snprintf(path, sizeof path, "/tmp/mt-stragglers-%d.jsonl", (int)getpid());
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    mt_report report;
    mt_metrics metrics;
    mt_run_state state = {0};
    mt_error error;
    options_open(&options, layout, path);
    const mt_ops *ops = mt_profile_open(&slow_ops);
    mt_model_plan plan = {.max_tokens = LENGTH, .max_logits = LENGTH, .max_position = LENGTH, .train = true};
    if (mt_model_create(&model, &options.stack, &grid, ops, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_model_init(model);
    mt_batch_alloc(&batch, LENGTH);
    if (mt_report_open(&report, model, &options, &state, &error) != 0) fail_msg("%s", error.text);
    report.prints = false;
    for (int i = 0; i < 4; i++) {
        mt_profile_step_begin();
        if (mt_train_step(model, &state, 4 / grid.data.size, make_batch, NULL, &batch, &metrics, &error) != 0)
            mt_die("%s", error.text);
        mt_profile_step_end();
        mt_report_stragglers(&report, &grid, &state, &metrics);
    }
    mt_report_close(&report);
    mt_model_destroy(model);
    mt_profile_close();
    mt_batch_free(&batch);
    mt_options_free(&options);
    mt_grid_clear(&grid);
    if (grid.world.rank != 0) return NULL;
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    json_t *second = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL), *last = json_loadf(file, 0, NULL);
    fclose(file);
    unlink(path);
    assert_int_equal(json_integer_value(json_object_get(second, "iteration")), 2); // every --log-interval steps
    assert_int_equal(json_integer_value(json_object_get(last, "iteration")), 4);
    json_decref(second);
    return last;
}

static double number(const json_t *report, const char *part, const char *key) {
    const json_t *value = json_object_get(json_object_get(report, part), key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

/* In `part` the rank takes at least its delays, and the fastest at most half as long: load on the machine slows all. */
static void assert_slow(json_t *report, const char *part, int rank, double delays) {
    static const char *const parts[] = {"straggler_data", "straggler_forward", "straggler_backward"};
    if (!report) return;
    for (int i = 0; i < 3; i++) {
        double most = number(report, parts[i], "slowest_ms"), least = number(report, parts[i], "fastest_ms");
        if (strcmp(parts[i], part) == 0) {
            assert_int_equal((int)number(report, part, "slowest_rank"), rank);
            assert_true(most >= delays * delay_ms && most > 2 * least);
        }
    }
    assert_true(number(report, "straggler_optimizer", "slowest_ms") > 0);
    // the others wait for the slow rank, which waits least
    assert_int_equal((int)number(report, "straggler_communication", "fastest_rank"), rank);
    assert_true(number(report, "straggler_communication", "slowest_ms") >
                0.5 * delays * delay_ms); // of three ranks that wait, one at least is not late itself
    json_decref(report);
}

static void the_rank_that_is_slow_is_named_with_what_is_slow(void **state) {
    (void)state;
    slow_forward = grid.world.rank == 2;
    assert_slow(report_of_four_steps(""), "straggler_forward", 2, 2); // layers
    slow_forward = false, slow_backward = grid.world.rank == 3;
    assert_slow(report_of_four_steps(""), "straggler_backward", 3, 2);
    slow_backward = false, slow_data = grid.world.rank == 1;
    assert_slow(report_of_four_steps(""), "straggler_data", 1, 1);
    slow_data = false;
}

/* Its neighbours' forwards last as long, but waiting does not count as computation. */
static void a_slow_rank_of_a_tensor_group_is_distinguished_from_ranks_that_wait_for_it(void **state) {
    (void)state;
    slow_forward = grid.world.rank == 1, delay_ms = 25;
    assert_slow(report_of_four_steps("--tensor-model-parallel-size 4"), "straggler_forward", 1, 8); // 4 x 2 layers
    slow_forward = false;
}

int main(int argc, char **argv) {
    slow_ops = mt_cpu_ops;
    slow_ops.activation_forward = slow_activation_forward;
    slow_ops.activation_backward = slow_activation_backward;
    mt_grid_start(&grid, &argc, &argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_rank_that_is_slow_is_named_with_what_is_slow),
        cmocka_unit_test(a_slow_rank_of_a_tensor_group_is_distinguished_from_ranks_that_wait_for_it),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
