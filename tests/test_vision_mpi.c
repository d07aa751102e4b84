/* test_vision_mpi.c: models with a vision tower on four ranks train as transformers does on one, whatever the layout;
 * and again on four GPUs where they answer. */
// Sections of megatron.c: §12 §21
#include "vision.h"

enum { NUM_RANKS = 4 };

static mt_grid world;

#define TP       " --tensor-model-parallel-size 2"
#define SP       " --sequence-parallel"
#define PP       " --pipeline-model-parallel-size 2"
#define STRATEGY " --data-parallel-sharding-strategy "
#define OVERLAP  " --overlap-grad-reduce --overlap-param-gather"

static const char *const layouts[] = {
    TP,
    " --tensor-model-parallel-size 4" SP,
    PP,
    TP PP,
    PP " --pipeline-schedule zb-h1",
    TP PP " --num-layers-per-virtual-pipeline-stage 1",
    TP SP PP " --recompute-granularity full",
    TP SP " --tp-comm-overlap",
    TP " --use-distributed-optimizer" OVERLAP,
    PP STRATEGY "optim_grads",
    TP STRATEGY "optim_grads_params",
    TP SP STRATEGY "optim_grads_params --recompute-granularity full" OVERLAP,
};

/* The grid of a layout on all ranks; free it with mt_grid_clear. */
static mt_grid grid_of(const char *model, const char *words) {
    fixture f;
    char folder[256];
    mt_grid grid = mt_grid_new(&world);
    snprintf(folder, sizeof folder, "tests/golden/vision/%s", model);
    open_options(&f, folder, 1, NUM_RANKS, words);
    build_grid(&grid, &f.options.stack);
    mt_options_free(&f.options);
    return grid;
}

static void five_steps_equal_pytorch_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            double losses[STEPS], norms[STEPS];
            if (strstr(layouts[i], "virtual") && strcmp(models[k].name, "qwen3_vl") == 0) continue; // see deepstack
            mt_grid grid = grid_of(models[k].name, layouts[i]);
            train_five_steps(models[k].name, &grid, 1, layouts[i], losses, norms);
            assert_expected(k, layouts[i], losses, norms);
            mt_grid_clear(&grid);
        }
}

/* Frozen buckets stand behind those of the decoder, and are gathered alike. */
static void frozen_towers_train_alike_on_every_layout(void **state) {
    static const char *const words[] = {PP, TP SP STRATEGY "optim_grads_params" OVERLAP};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        double losses[2][STEPS], norms[2][STEPS];
        for (int i = 0; i < 2; i++) {
            char line[256];
            snprintf(line, sizeof line, "%s --freeze-vision", words[i]);
            mt_grid grid = grid_of(models[k].name, line);
            train_five_steps(models[k].name, &grid, 1, line, losses[i], norms[i]);
            mt_grid_clear(&grid);
        }
        for (int step = 0; step < STEPS; step++) {
            double tolerance = models[k].tolerance;
            assert_true(fabs(losses[0][step] - losses[1][step]) <= tolerance * losses[0][step]);
            if (step >= models[k].norm_steps) continue;
            assert_true(fabs(norms[0][step] - norms[1][step]) <= tolerance * norms[0][step]);
        }
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
        cmocka_unit_test(frozen_towers_train_alike_on_every_layout),
    };
    int failures = cmocka_run_group_tests_name("vision on ranks", tests, NULL, NULL);
    if (take_gpus(&world.world)) failures += cmocka_run_group_tests_name("vision on GPUs", tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
