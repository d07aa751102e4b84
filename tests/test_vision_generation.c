/* test_vision_generation.c: tiny models with a vision tower generate from texts and pictures as Hugging Face
 * transformers does, alone and in a batch; and again on a GPU where one answers. */
// Sections of megatron.c: §16 §21
#include "vision_greedy.h"

static const mt_sampling greedy = {.top_p = 1};
static const mt_stops no_stops = {.count = 0};

/* Generates from texts order[count] with a generator that lives on: between them texts keep their pages. */
static void generate(mt_generator *generator, greedy_file *g, const int *order, int64_t count, const char *name,
                     const char *words) {
    mt_sequence sequences[2 * TEXTS];
    mt_error error = {{0}};
    for (int64_t i = 0; i < count; i++) sequences[i] = sequence_of(&g->texts[order[i]], i);
    for (int64_t left = 1; left > 0;) {
        left = mt_generator_step(generator, sequences, count, &error);
        if (left < 0) fail_msg("%s", error.text);
    }
    for (int64_t i = 0; i < count; i++) {
        assert_greedy(&g->texts[order[i]], &sequences[i], name, words);
        free(sequences[i].tokens);
    }
}

static void each_text_alone_equals_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (int text = 0; text < TEXTS; text++) {
            greedy_file g;
            mt_run_options options;
            greedy_plan sizes = {.sequences = 1, .prefill = 64, .page_rows = 16, .image_tokens = 16};
            read_greedy(&g, models[k].name);
            mt_model *model = open_generation(&options, models[k].name, &mt_grid_of_one, &sizes, "");
            mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
            generate(generator, &g, &text, 1, models[k].name, " alone");
            assert_int_equal(g.reads, g.texts[text].list.count); // the tower computes each picture once
            mt_generator_destroy(generator), mt_model_destroy(model), mt_options_free(&options);
        }
}

/* Texts with and without pictures together, whatever a forward has room for: prompts that end within a picture, few
 * rows of features, for which texts wait, and few pages, for which running texts are put back and begin anew. */
static void a_batch_of_any_sizes_equals_transformers(void **state) {
    static const greedy_plan sizes[] = {{6, 256, 16, 96, 0}, {6, 7, 8, 16, 0}, {3, 9, 4, 24, 0}, {6, 64, 4, 16, 96}};
    static const int order[] = {2, 1, 0, 5, 4, 3, 1, 2};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) { // with few patches in a forward too
            greedy_file g;
            mt_run_options options;
            read_greedy(&g, models[k].name);
            mt_model *model = open_generation(&options, models[k].name, &mt_grid_of_one, &sizes[i / 2], "");
            mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
            mt_prefill few = {INT64_MAX, INT64_MAX, INT64_MAX, i % 2 ? 1 : INT64_MAX, INT64_MAX};
            mt_generator_limit_prefill(generator, &few);
            generate(generator, &g, order, 8, models[k].name, " in a batch");
            mt_generator_destroy(generator), mt_model_destroy(model), mt_options_free(&options);
        }
}

/* Texts 0 and 3, 1 and 5 have equal tokens and other pictures; 0 and 1 begin with one picture and go on otherwise. */
static void texts_share_a_beginning_only_with_its_pictures(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        greedy_file g;
        mt_run_options options;
        greedy_plan sizes = {.sequences = 4, .prefill = 64, .page_rows = 4, .image_tokens = 16};
        read_greedy(&g, models[k].name);
        mt_model *model = open_generation(&options, models[k].name, &mt_grid_of_one, &sizes, "");
        mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
        int64_t read = 0;
        for (int i = 0; i < 12; i++) { // one text after the other, each in the cache of those before
            static const int order[] = {0, 3, 3, 0, 1, 5, 1, 5, 4, 2, 0, 1};
            generate(generator, &g, &order[i], 1, models[k].name, " after another");
            mt_generator_totals totals = mt_generator_read_totals(generator);
            int64_t tokens = totals.prefill_tokens - read;
            read = totals.prefill_tokens;
            bool has_states = strncmp(models[k].name, "qwen3_5", 7) == 0; // which stand at few places
            if (i == 1) assert_int_equal(tokens, g.texts[3].num_prompt - (has_states ? 0 : 6));
            if (i == 2 && !has_states) assert_in_range(tokens, 1, sizes.page_rows);
        }
        mt_generator_destroy(generator), mt_model_destroy(model), mt_options_free(&options);
    }
}

static void a_picture_that_cannot_be_read_ends_the_generation_with_its_error(void **state) {
    greedy_file g;
    mt_run_options options;
    mt_error error = {{0}};
    greedy_plan sizes = {.sequences = 1, .prefill = 64, .page_rows = 16, .image_tokens = 16};
    (void)state;
    read_greedy(&g, models[0].name);
    g.fails_at = 2;
    mt_model *model = open_generation(&options, models[0].name, &mt_grid_of_one, &sizes, "");
    mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
    mt_sequence sequence = sequence_of(&g.texts[1], 0);
    assert_int_equal(mt_generator_step(generator, &sequence, 1, &error), -1);
    assert_string_equal(error.text, "the picture is gone");
    free(sequence.tokens);
    mt_generator_destroy(generator), mt_model_destroy(model), mt_options_free(&options);
}

/* Tokens in the order of adapters keep their coordinates and rows of features. */
static void images_move_with_the_tokens_of_their_adapter(void **state) {
    greedy_file g;
    mt_sequence sequences[3];
    mt_batcher_plan plan = {.max_sequences = 3, .max_length = LONGEST + NEW_TOKENS, .max_tokens = 128, .page_rows = 16};
    (void)state;
    plan.num_pages = 9, plan.num_adapters = 2, plan.max_image_tokens = 32, plan.merge_size = 2;
    read_greedy(&g, models[0].name);
    mt_batcher *batcher = mt_batcher_create(&plan);
    for (int i = 0; i < 3; i++) sequences[i] = sequence_of(&g.texts[i], i), sequences[i].adapter = i == 0 ? 2 : i - 1;
    int64_t tokens = mt_batcher_next(batcher, sequences, 3), at[3];
    const mt_image_rows *rows = &batcher->batch.image_rows;
    assert_int_equal(tokens, 24 + 36 + 15);
    assert_int_equal(batcher->num_seen, 3);
    at[2] = 0, at[0] = 15, at[1] = 15 + 24; // adapters 1 and 2, then none
    for (int i = 0; i < 3; i++)
        assert_memory_equal(batcher->batch.tokens + at[i], g.texts[i].prompt, (size_t)g.texts[i].num_prompt * 4);
    for (int64_t i = 0; i < 2; i++) // the picture of 2 x 4 tokens begins at token 6, and ends at position 10
        for (int64_t t = 0; t < 24; t++) {
            const int32_t *place = &rows->coordinates[3 * (at[i] + t)];
            bool is_image = t >= 6 && t < 14, is_second = t >= 22;
            int64_t position = t < 6 ? t : is_image ? 6 : t - 4;
            if (i == 1 && is_second) continue;
            assert_int_equal(place[0], position);
            assert_int_equal(place[1], position + (is_image ? (t - 6) / 4 : 0));
            assert_int_equal(place[2], position + (is_image ? (t - 6) % 4 : 0));
            assert_int_equal(rows->features[at[i] + t], is_image ? batcher->seen[i].row + t - 6 : -1);
        }
    for (int64_t t = 0; t < 15; t++) assert_int_equal(rows->features[t], -1);
    for (int64_t t = 0; t < 15; t++) assert_int_equal(rows->coordinates[3 * t + 1], t);
    for (int i = 0; i < 3; i++) free(sequences[i].tokens);
    mt_batcher_destroy(batcher);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_text_alone_equals_transformers),
        cmocka_unit_test(a_batch_of_any_sizes_equals_transformers),
        cmocka_unit_test(texts_share_a_beginning_only_with_its_pictures),
        cmocka_unit_test(images_move_with_the_tokens_of_their_adapter),
        cmocka_unit_test(a_picture_that_cannot_be_read_ends_the_generation_with_its_error),
    };
    int failures = cmocka_run_group_tests_name("generation from texts and pictures", tests, NULL, NULL);
    if (!take_gpus(&mt_grid_of_one.world)) return failures;
    return failures + cmocka_run_group_tests_name("generation on a GPU", tests, NULL, NULL);
}
