/* test_t5_mpi.c: encoder-decoders on four ranks train and generate as transformers does on one, whatever the layout. */
// Sections of megatron.c: §12 §16 §20
#include "t5.h"
#include "../data/models/generate.h"
#include "../data/tokens/prompts.h"

enum { NUM_RANKS = 4 };

static mt_grid world;

#define TP       " --tensor-model-parallel-size 2"
#define SP       " --sequence-parallel"
#define STRATEGY " --data-parallel-sharding-strategy "

static const char *const layouts[] = {
    "",
    TP,
    TP SP,
    " --use-distributed-optimizer",
    STRATEGY "optim_grads",
    STRATEGY "optim_grads_params",
    TP SP STRATEGY "optim_grads_params",
    TP SP " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    TP SP STRATEGY "optim_grads_params --overlap-grad-reduce --overlap-param-gather --recompute-granularity full",
};

/* The grid of a layout on all ranks; free it with mt_grid_clear. */
static mt_grid grid_of(const char *model, const char *words) {
    fixture f;
    mt_error error;
    mt_grid grid = mt_grid_new(&world);
    open_options(&f, model, 1, NUM_RANKS, words);
    if (mt_grid_build(&grid, &f.options.stack, &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&f.options);
    return grid;
}

static void five_steps_equal_pytorch_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            double losses[STEPS], norms[STEPS];
            mt_grid grid = grid_of(models[k], layouts[i]);
            train_five_steps(models[k], &grid, 1, layouts[i], losses, norms);
            assert_expected(models[k], layouts[i], losses, norms);
            mt_grid_clear(&grid);
        }
}

static void two_tensor_ranks_generate_the_text_of_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        mt_grid grid = grid_of(models[k], TP);
        assert_greedy(models[k], &grid, TP, 3);
        mt_grid_clear(&grid);
    }
}

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&world, &argc, &argv);
    if (world.world.size != NUM_RANKS) mt_die("run it on %d ranks", NUM_RANKS);
    mt_options_default(&options);
    if (mt_grid_build(&world, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(five_steps_equal_pytorch_on_every_layout),
        cmocka_unit_test(two_tensor_ranks_generate_the_text_of_transformers),
    };
    int failures = cmocka_run_group_tests_name("t5 on ranks", tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
