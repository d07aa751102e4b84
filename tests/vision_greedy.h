/* vision_greedy.h: generation from texts with pictures, as transformers generates (tests/golden/vision/make_greedy.py).
 */
#ifndef MT_TESTS_VISION_GREEDY_H
#define MT_TESTS_VISION_GREEDY_H

#include "vision.h"

enum { TEXTS = 6, LONGEST = 36, NEW_TOKENS = 12, PICTURES = 3, NUMBERS_OF_PICTURE = 32 * PATCH_VALUES };

typedef struct greedy_text {
    int32_t prompt[LONGEST], expected[NEW_TOKENS];
    int64_t num_prompt;
    mt_sequence_image images[2];
    int pictures[2];
    mt_sequence_images list;
    struct greedy_file *file;
} greedy_text;

typedef struct greedy_file {
    greedy_text texts[TEXTS];
    float patches[PICTURES][NUMBERS_OF_PICTURE];
    int reads;    // of pictures
    int fails_at; // the read that fails; 0: none
} greedy_file;

static int read_patches(void *context, int64_t image, float *patches, mt_error *error) {
    greedy_text *text = context;
    if (++text->file->reads == text->file->fails_at) return mt_error_set(error, "the picture is gone");
    memcpy(patches, text->file->patches[text->pictures[image]], NUMBERS_OF_PICTURE * 4);
    return 0;
}

static int64_t take_ids(int32_t *ids, const json_t *list) {
    for (size_t i = 0; i < json_array_size(list); i++) ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return (int64_t)json_array_size(list);
}

/* The texts of a model, whose image tokens are number 150. */
static void read_greedy(greedy_file *g, const char *name) {
    fixture *f = mt_malloc((int64_t)sizeof *f);
    char path[256];
    mt_error error;
    memset(f, 0, sizeof *f), memset(g, 0, sizeof *g);
    read_io(f, name);
    memcpy(g->patches, f->patches, sizeof f->patches);
    for (int i = 0; i < NUMBERS_OF_PICTURE; i++) g->patches[2][i] = -g->patches[0][i];
    snprintf(path, sizeof path, "tests/golden/vision/%s/greedy.json", name);
    json_t *root = mt_json_read(path, &error), *texts = json_object_get(root, "texts");
    assert_int_equal(json_array_size(texts), TEXTS);
    for (size_t i = 0; i < TEXTS; i++) {
        const json_t *from = json_array_get(texts, i), *pictures = json_object_get(from, "pictures");
        greedy_text *text = &g->texts[i];
        text->num_prompt = take_ids(text->prompt, json_object_get(from, "prompt"));
        assert_int_equal(take_ids(text->expected, json_object_get(from, "greedy")), NEW_TOKENS);
        take_ids(text->pictures, pictures);
        text->file = g;
        text->list = (mt_sequence_images){(int64_t)json_array_size(pictures), text->images, read_patches, text};
        for (int64_t k = 0, t = 0; k < text->list.count; k++) {
            int32_t *grid = &f->grids[3 * (text->pictures[k] % 2)];
            while (text->prompt[t] != 150) t++;
            text->images[k] = (mt_sequence_image){t, {grid[1], grid[2]}, (uint64_t)text->pictures[k]};
            t += grid[1] * grid[2] / 4;
        }
    }
    json_decref(root);
    free(f);
}

static mt_sequence sequence_of(greedy_text *text, int64_t id) {
    mt_sequence s = {.id = id, .num_prompt = text->num_prompt, .num_tokens = text->num_prompt, .slot = -1};
    s.max_tokens = text->num_prompt + NEW_TOKENS, s.tokens = mt_malloc(s.max_tokens * 4);
    memcpy(s.tokens, text->prompt, (size_t)text->num_prompt * 4);
    if (text->list.count > 0) s.images = &text->list;
    return s;
}

/* The sizes of a generator. */
typedef struct greedy_plan {
    int64_t sequences, prefill, page_rows, image_tokens, cache_tokens;
} greedy_plan;

/* `words` are more options of `infer`. */
static void open_generation_options(mt_run_options *options, const char *name, int64_t ranks, const char *words) {
    char line[1024], *arguments[80], *rest = line;
    int count = 0;
    mt_error error = {{0}};
    snprintf(line, sizeof line, "infer --load tests/golden/vision/%s --prompt-tokens 1 --print-tokens --device cpu%s",
             name, words);
    for (char *word; (word = strtok_r(rest, " ", &rest));) arguments[count++] = word;
    if (mt_options_parse(options, MT_PROGRAM_INFER, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(options, MT_PROGRAM_INFER, ranks, &error) != 0) fail_msg("%s", error.text);
}

/* Opens a model for generation. */
static mt_model *open_generation(mt_run_options *options, const char *name, const mt_grid *grid,
                                 const greedy_plan *sizes, const char *words) {
    mt_error error = {{0}};
    mt_run_state state = {0};
    mt_model *model;
    open_generation_options(options, name, grid->world.size, words);
    mt_model_plan plan = {.max_tokens = sizes->prefill, .page_rows = sizes->page_rows};
    plan.max_image_tokens = sizes->image_tokens, plan.max_patches = 32;
    mt_plan_generation(&plan, sizes->sequences, LONGEST + NEW_TOKENS, sizes->cache_tokens);
    if (mt_model_create(&model, &options->stack, grid, &mt_cpu_ops, &plan, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_load(model, options, &state, options->load, &error) != 0) fail_msg("%s", error.text);
    return model;
}

/* Fails unless a sequence is its text and what transformers generates. */
static void assert_greedy(const greedy_text *text, const mt_sequence *s, const char *name, const char *words) {
    assert_int_equal(s->num_tokens, text->num_prompt + NEW_TOKENS);
    for (int64_t i = 0; i < NEW_TOKENS; i++)
        if (s->tokens[text->num_prompt + i] != text->expected[i])
            fail_msg("%s%s: new token %d of text %d is %d, expected %d", name, words, (int)i,
                     (int)(text - text->file->texts), s->tokens[text->num_prompt + i], text->expected[i]);
}

#endif
