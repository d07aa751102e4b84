/* test_memory.c: the memory plan. The logits share memory with scratch that is unused while they exist. */
#include "../data/options.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TOKENS = 256, HIDDEN = 64, FFN = 256 };

/* KiB of activations in the printed plan for training a model with this vocabulary size. */
static double planned_activations(const char *vocab_size) {
    char *arguments[] = {"train",
                         "--num-layers",
                         "2",
                         "--hidden-size",
                         "64",
                         "--ffn-hidden-size",
                         "256",
                         "--num-attention-heads",
                         "4",
                         "--seq-length",
                         "256",
                         "--vocab-size",
                         (char *)vocab_size,
                         "--micro-batch-size",
                         "1",
                         "--global-batch-size",
                         "1",
                         "--make-vocab-size-divisible-by",
                         "16",
                         "--train-iters",
                         "1",
                         "--lr",
                         "1e-3",
                         "--mock-data"};
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .train = true};
    mt_options options;
    mt_error error;
    mt_model *model = NULL;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, sizeof arguments / sizeof *arguments, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0 ||
        mt_model_create(&model, &options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    char *text;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    mt_model_print_plan(model, file);
    fclose(file);
    const char *row = strstr(text, "activations");
    double mebibytes = 0;
    assert_non_null(row);
    assert_int_equal(sscanf(row, "activations %lf", &mebibytes), 1);
    free(text);
    mt_model_destroy(model);
    mt_options_free(&options);
    return 1024 * mebibytes;
}

static void logits_add_memory_only_beyond_the_size_of_the_scratch_they_share(void **state) {
    (void)state;
    const double scratch_channels = HIDDEN + FFN + FFN + 4; // per token: hidden, wide, active, row_dot
    double small = planned_activations("16"), fitting = planned_activations("560");
    double large = planned_activations("4096"), larger = planned_activations("8192");
    assert_true(small == fitting);
    assert_true(fabs(large - small - TOKENS * (4096 - scratch_channels) * 4 / 1024) < 110); // printed to 0.1 MiB
    assert_true(fabs(larger - large - TOKENS * 4096.0 * 4 / 1024) < 110);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_add_memory_only_beyond_the_size_of_the_scratch_they_share),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
