/* test_t5_mpi.c: encoder-decoders on four ranks train and generate as transformers does on one, whatever the layout;
 * and again on four GPUs where they answer. */
// Sections of megatron.c: §12 §16 §20
#include "t5.h"
#include "../data/models/generate.h"
#include "../data/tokens/prompts.h"

enum { NUM_RANKS = 4 };

static mt_grid world;

#define TP        " --tensor-model-parallel-size 2"
#define SP        " --sequence-parallel"
#define PP(n)     " --pipeline-model-parallel-size " #n
#define LAYOUT(n) PP(n) " --pipeline-model-parallel-layout "
#define STRATEGY  " --data-parallel-sharding-strategy "

typedef struct staged {
    const char *model, *words;
} staged;

/* The string of layers in stages: 3 of the encoder and 8 of the decoder, or 3 and 6. */
static const staged pipelines[] = {
    {"t5", PP(2) " --decoder-first-pipeline-num-layers 2"},
    {"t5", PP(2) STRATEGY "optim_grads_params --overlap-grad-reduce --decoder-last-pipeline-num-layers 6"},
    {"t5", LAYOUT(2) "Etttt|tttttttL" TP SP},
    {"t5", LAYOUT(4) "Ett|t|ttttt|tttL"},
    {"t5", LAYOUT(4) "Et|t|t|tttt|tt|t|t|L"}, // interleaved
    {"t5", LAYOUT(4) "Ett|ttt|tt|ttttL --pipeline-schedule zb-h1"},
    {"t5_gated", LAYOUT(2) "Et||tttttttt|L" TP},
    {"t5_gated", LAYOUT(4) "E|tt|tttt|tttL --recompute-granularity full --recompute-num-layers 2"},
    {"t5_gated", LAYOUT(2) "Et|t|tttt|tttL" TP SP " --use-distributed-optimizer --overlap-grad-reduce"},
    {"t5_gated", LAYOUT(2) "Ett|tttttttL --pipeline-schedule zb-h1 --use-distributed-optimizer"},
};

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
    mt_grid grid = mt_grid_new(&world);
    open_options(&f, model, 1, NUM_RANKS, words);
    build_grid(&grid, &f.options.stack);
    mt_options_free(&f.options);
    return grid;
}

static void train_on(const char *model, const char *words) {
    double losses[STEPS], norms[STEPS];
    mt_grid grid = grid_of(model, words);
    train_five_steps(model, &grid, 1, words, losses, norms);
    assert_expected(model, words, losses, norms);
    mt_grid_clear(&grid);
}

static void five_steps_equal_pytorch_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) train_on(models[k], layouts[i]);
}

static void five_steps_equal_pytorch_however_the_layers_are_split_into_stages(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof pipelines / sizeof *pipelines; i++) train_on(pipelines[i].model, pipelines[i].words);
}

static void stages_generate_the_text_of_transformers(void **state) {
    static const staged cases[] = {{"t5", LAYOUT(4) "Ett|t|ttttt|tttL"},
                                   {"t5_gated", LAYOUT(2) "Et|t|tttt|tttL" TP},
                                   {"t5_gated", LAYOUT(2) "Etttt|tttttL" TP}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_grid grid = grid_of(cases[i].model, cases[i].words);
        assert_greedy(cases[i].model, &grid, cases[i].words, 3);
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
        cmocka_unit_test(five_steps_equal_pytorch_however_the_layers_are_split_into_stages),
        cmocka_unit_test(stages_generate_the_text_of_transformers),
        cmocka_unit_test(two_tensor_ranks_generate_the_text_of_transformers),
    };
    int failures = cmocka_run_group_tests_name("t5 on ranks", tests, NULL, NULL);
    if (take_gpus(&world.world)) failures += cmocka_run_group_tests_name("t5 on GPUs", tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
