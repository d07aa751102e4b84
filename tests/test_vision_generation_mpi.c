/* test_vision_generation_mpi.c: on four ranks, whatever the layout, models with a vision tower generate from texts and
 * pictures as transformers does on one. */
// Sections of megatron.c: §16 §21
#include "../data/models/generate.h"
#include "vision_greedy.h"

enum { NUM_RANKS = 4 };

static mt_grid world;

static const char *const layouts[] = {
    " --tensor-model-parallel-size 4", " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    " --pipeline-model-parallel-size 2", // two replicas of two stages
    "",                                  // four replicas
};

/* The grid of a layout on all ranks; free it with mt_grid_clear. */
static mt_grid grid_of(const char *model, const char *words) {
    mt_run_options options;
    mt_error error;
    mt_grid grid = mt_grid_new(&world);
    open_generation_options(&options, model, NUM_RANKS, words);
    if (mt_grid_build(&grid, &options.stack, &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&options);
    return grid;
}

static void greedy_texts_equal_transformers_on_every_layout(void **state) {
    static const mt_sampling greedy = {.top_p = 1};
    static const mt_stops no_stops = {.count = 0};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            greedy_file g;
            mt_run_options options;
            mt_sequence sequences[TEXTS];
            mt_error error = {{0}};
            greedy_plan sizes = {.sequences = 4, .prefill = 21, .page_rows = 8, .image_tokens = 24};
            read_greedy(&g, models[k].name);
            mt_grid grid = grid_of(models[k].name, layouts[i]);
            mt_model *model = open_generation(&options, models[k].name, &grid, &sizes, layouts[i]);
            mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
            for (int64_t s = 0; s < TEXTS; s++) sequences[s] = sequence_of(&g.texts[s], s);
            if (mt_sequences_generate(&grid, generator, sequences, TEXTS, NULL, &error) != 0)
                fail_msg("%s", error.text);
            for (int64_t s = 0; s < TEXTS; s++) {
                assert_greedy(&g.texts[s], &sequences[s], models[k].name, layouts[i]);
                free(sequences[s].tokens);
            }
            mt_generator_destroy(generator), mt_model_destroy(model), mt_options_free(&options);
            mt_grid_clear(&grid);
        }
}

/* The ranks of a model that read a picture, and the others, end with one error. */
static void a_picture_that_one_rank_cannot_read_ends_all(void **state) {
    static const mt_sampling greedy = {.top_p = 1};
    static const mt_stops no_stops = {.count = 0};
    greedy_file g;
    mt_run_options options;
    mt_error error = {{0}};
    greedy_plan sizes = {.sequences = 1, .prefill = 64, .page_rows = 16, .image_tokens = 16};
    const char *words = layouts[1];
    (void)state;
    read_greedy(&g, models[1].name);
    mt_grid grid = grid_of(models[1].name, words);
    g.fails_at = grid.tensor.rank; // of the two with the embedding one
    mt_model *model = open_generation(&options, models[1].name, &grid, &sizes, words);
    mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
    mt_sequence sequence = sequence_of(&g.texts[0], 0);
    assert_int_equal(mt_generator_step(generator, &sequence, 1, &error), -1);
    assert_string_equal(error.text, "the picture is gone");
    free(sequence.tokens);
    mt_generator_destroy(generator), mt_model_destroy(model), mt_options_free(&options);
    mt_grid_clear(&grid);
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
        cmocka_unit_test(greedy_texts_equal_transformers_on_every_layout),
        cmocka_unit_test(a_picture_that_one_rank_cannot_read_ends_all),
    };
    int failures = cmocka_run_group_tests_name("generation from pictures on ranks", tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
