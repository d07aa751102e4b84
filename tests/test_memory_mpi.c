/* test_memory_mpi.c: the memory plans of a machine's ranks are added up. Run by mpirun. */
// Sections of megatron.c: §15a
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TOKENS = 16 };
static mt_grid grid, started; // started: before it was built

static const mt_ops *backend = &mt_cpu_ops;
static char *offload = "--mock-data"; // or one more option

/* Creates a data-parallel model where `host_memory` bytes are available to all ranks; returns the status. */
static int create(int64_t host_memory, mt_error *error) {
    char *arguments[] = {"train", "--num-layers", "1",    "--hidden-size", "256",  "--num-attention-heads",
                         "4",     "--seq-length", "16",   "--vocab-size",  "64",   "--train-iters",
                         "1",     "--lr",         "1e-3", "--mock-data",   offload};
    mt_model_plan plan = {
        .max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .host_memory = host_memory, .train = true};
    mt_run_options options;
    mt_model *model = NULL;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, sizeof arguments / sizeof *arguments, arguments, error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, grid.world.size, error) != 0)
        fail_msg("%s", error->text);
    int status = mt_model_create(&model, &options.stack, &grid, backend, &plan, error);
    assert_true((status == 0) == (model != NULL));
    mt_model_destroy(model);
    mt_options_free(&options);
    return status;
}

/* Finds the bytes from which on the ranks are accepted, by halving. */
static void ranks_of_a_machine_share_its_memory(void **state) {
    (void)state;
    mt_error error;
    int64_t refused = 0, accepted = INT64_C(1) << 30;
    char expected[100];
    assert_int_equal(create(accepted, &error), 0);
    while (accepted - refused > 1024) {
        int64_t middle = (refused + accepted) / 2;
        if (create(middle, &error) == 0)
            accepted = middle;
        else
            refused = middle;
    }
    // 789,760 parameters with 16 bytes each for weights, gradients and moments, and a little more, on each rank
    assert_true(accepted > grid.world.size * INT64_C(789760) * 16 && accepted < grid.world.size * INT64_C(789760) * 24);
    assert_true(create(accepted / grid.world.size + (1 << 20), &error) != 0); // enough for one rank
    snprintf(expected, sizeof expected, "the %d ranks of a machine need %.1f GiB of memory together (", grid.world.size,
             (double)accepted / (1 << 30));
    assert_non_null(strstr(error.text, expected));
    snprintf(expected, sizeof expected, ") and it has %.1f GiB", (double)accepted / grid.world.size / (1 << 30));
    assert_non_null(strstr(error.text, expected));
    assert_null(strchr(error.text, '\n'));
}

/* A rank that sees less than the others, as in a control group of its own, decides for all. */
static void every_rank_refuses_when_one_must(void **state) {
    (void)state;
    mt_error error = {""};
    bool last = grid.world.rank == grid.world.size - 1;
    assert_int_equal(create(INT64_C(1) << 30, &error), 0);
    assert_true(create(last ? 1 << 20 : INT64_C(1) << 30, &error) != 0);
    assert_non_null(strstr(error.text, "0.0 GiB available"));
}

/* With a GPU the host holds only what is offloaded: 8 bytes a parameter and, on this scale, as much for the slots. */
static void offloaded_state_must_fit_the_host(void **state) {
    (void)state;
    mt_error error = {""};
    mt_ops gpu = mt_cpu_ops;
    gpu.on_device = true, backend = &gpu;
    assert_int_equal(create(1 << 20, &error), 0);
    offload = "--optimizer-cpu-offload";
    assert_true(create(1 << 20, &error) != 0);
    assert_non_null(strstr(error.text, "offloading needs "));
    assert_non_null(strstr(error.text, "lower --optimizer-offload-fraction"));
    assert_null(strchr(error.text, '\n'));
    assert_true(create(grid.world.size * INT64_C(789760) * 8, &error) != 0);
    assert_int_equal(create(grid.world.size * INT64_C(789760) * 25, &error), 0);
    offload = "--mock-data", backend = &mt_cpu_ops;
}

/* The last stage has the only layer in fp8, whose products this backend cannot compute. */
static void every_stage_refuses_when_one_must(void **state) {
    (void)state;
    mt_error error = {""};
    mt_run_options options;
    mt_model *model;
    char line[400], *arguments[40];
    int count = 0;
    mt_ops ops = mt_cpu_ops;
    mt_grid built = started;
    ops.limits.fp8_multiple = 48;
    snprintf(line, sizeof line,
             "train --num-layers %d --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 64 "
             "--train-iters 1 --lr 1e-3 --mock-data --pipeline-model-parallel-size %d --bf16 --fp8-format e4m3 "
             "--first-last-layers-bf16 --num-layers-at-start-in-bf16 %d --num-layers-at-end-in-bf16 0",
             grid.world.size, grid.world.size, grid.world.size - 1);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .train = true};
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, grid.world.size, &error) != 0 ||
        mt_grid_build(&built, &options.stack, &error) != 0)
        fail_msg("%s", error.text);
    assert_int_equal(mt_model_create(&model, &options.stack, &built, &ops, &plan, &error), -1);
    assert_non_null(strstr(error.text, "--fp8-format on this device needs weights of multiples of 48 x 48, and layer"));
    mt_grid_clear(&built);
    mt_options_free(&options);
}

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv);
    started = grid;
    mt_options_default(&options);
    if (mt_grid_build(&grid, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_of_a_machine_share_its_memory),
        cmocka_unit_test(every_rank_refuses_when_one_must),
        cmocka_unit_test(offloaded_state_must_fit_the_host),
        cmocka_unit_test(every_stage_refuses_when_one_must),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
