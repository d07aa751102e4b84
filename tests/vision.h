/* vision.h: opens and trains the models with a vision tower of tests/golden/vision with the options of `train`. */
#ifndef MT_TESTS_VISION_H
#define MT_TESTS_VISION_H

#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/checkpoint_tensors.h"
#include "../data/checkpoint/run_options.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

/* The sizes of the reference: sequences with an image each, their tokens; patches of both images and their numbers. */
enum { STEPS = 5, SEQUENCES = 2, LENGTH = 48, VOCABULARY = 160, PATCHES = 64, PATCH_VALUES = 96 };

static const struct {
    const char *name;
    double tolerance;
    int norm_steps; // whose gradient norms are compared: see tests/golden/vision/make_float64.py --disturb
} models[] = {{"qwen3_vl", 1e-5, STEPS},
              {"qwen2_5_vl", 1e-5, STEPS},
              {"qwen3_5_vl", 3e-4, 2},
              {"qwen3_vl_moe", 1e-5, STEPS},
              {"qwen3_5_moe", 3e-4, 2}};
enum { NUM_MODELS = sizeof models / sizeof *models };

/* The backend that models are created on. */
static const mt_ops *backend = &mt_cpu_ops;

typedef struct fixture {
    char folder[256];
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    int64_t num_labels; // that count
    int32_t tokens[SEQUENCES * LENGTH], mask[SEQUENCES * LENGTH], labels[SEQUENCES * LENGTH], grids[SEQUENCES * 3];
    float patches[PATCHES * PATCH_VALUES], logits[SEQUENCES * LENGTH * VOCABULARY];
} fixture;

static void take(mt_safetensors *set, const char *name, void *to, int64_t bytes) {
    const mt_tensor_info *tensor = mt_safetensors_find(set, name);
    assert_non_null(tensor);
    assert_int_equal(tensor->bytes, bytes);
    memcpy(to, tensor->data, (size_t)bytes);
}

/* `words` are more options of `train`. */
static void open_options(fixture *f, const char *folder, int64_t micro_batch_size, int64_t ranks, const char *words) {
    mt_error error = {{0}};
    char line[1024], *arguments[80], *rest = line;
    int count = 0;
    memset(f, 0, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "%s", folder);
    snprintf(line, sizeof line,
             "train --load %s --data-path none --seq-length 48 --micro-batch-size %d --global-batch-size 2 "
             "--train-iters 5 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --lr-warmup-iters 0 --adam-beta1 0.9 "
             "--adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 --device cpu%s",
             f->folder, (int)micro_batch_size, words);
    for (char *word; (word = strtok_r(rest, " ", &rest));) arguments[count++] = word;
    if (mt_options_parse(&f->options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&f->options, MT_PROGRAM_TRAIN, ranks, &error) != 0) fail_msg("%s", error.text);
}

/* Reads inputs and outputs of a reference. */
static void read_io(fixture *f, const char *name) {
    char folder[256];
    mt_error error;
    mt_safetensors *io;
    snprintf(folder, sizeof folder, "tests/golden/vision/%s", name);
    if (mt_safetensors_open_folder(&io, folder, "io", &error) != 0) fail_msg("%s", error.text);
    take(io, "input_ids", f->tokens, sizeof f->tokens), take(io, "attention_mask", f->mask, sizeof f->mask);
    take(io, "labels", f->labels, sizeof f->labels), take(io, "logits", f->logits, sizeof f->logits);
    take(io, "image_grid_thw", f->grids, sizeof f->grids), take(io, "pixel_values", f->patches, sizeof f->patches);
    mt_safetensors_close(io);
    for (int s = 0; s < SEQUENCES; s++)
        for (int i = 1; i < LENGTH; i++) f->num_labels += f->labels[s * LENGTH + i] >= 0;
}

/* Opens a model with the weights of a folder, and the reference's inputs. */
static void open_folder(fixture *f, const char *name, const char *folder, const mt_grid *grid, int64_t micro_batch_size,
                        const char *words) {
    mt_error error = {{0}};
    mt_run_state state = {0};
    open_options(f, folder, micro_batch_size, grid->world.size, words);
    int64_t tokens = mt_rank_tokens(&f->options.stack, micro_batch_size * LENGTH);
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = LENGTH, .train = true};
    plan.max_patches = mt_max_patches(&f->options.stack, tokens * f->options.stack.context_parallel_size);
    if (mt_model_create(&f->model, &f->options.stack, grid, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_load(f->model, &f->options, &state, f->folder, &error) != 0) fail_msg("%s", error.text);
    mt_batch_alloc(&f->batch, SEQUENCES * LENGTH + 16);
    if (f->options.stack.vision.tower != MT_VISION_NONE)
        mt_batch_alloc_images(&f->batch, &f->options.stack, SEQUENCES * LENGTH * 4);
    read_io(f, name);
}

__attribute__((unused)) static void open_model(fixture *f, const char *name, const mt_grid *grid,
                                               int64_t micro_batch_size, const char *words) {
    char folder[256];
    snprintf(folder, sizeof folder, "tests/golden/vision/%s", name);
    open_folder(f, name, folder, grid, micro_batch_size, words);
}

static void close_model(fixture *f) {
    mt_model_destroy(f->model);
    mt_batch_free(&f->batch);
    mt_options_free(&f->options);
}

/* The sequences [first, first + count) with their images: the tokens that the mask keeps, and each one's next token as
 * its label. */
static void fill_batch(const fixture *f, int64_t first, int64_t count, mt_batch *batch) {
    mt_image_batch *images = &batch->images;
    int64_t patches = 0;
    batch->num_tokens = batch->num_spans = images->num_images = 0;
    for (int64_t s = first; s < first + count; s++) {
        int64_t at = batch->num_tokens, length = 0;
        while (length < LENGTH && f->mask[s * LENGTH + length]) length++;
        for (int64_t i = 0; i < length; i++) {
            int32_t label = i + 1 < LENGTH ? f->labels[s * LENGTH + i + 1] : -100;
            batch->tokens[at + i] = f->tokens[s * LENGTH + i], batch->labels[at + i] = label < 0 ? 0 : label;
            batch->loss_mask[at + i] = label >= 0, batch->positions[at + i] = (int32_t)i;
            batch->token_index[at + i] = s * LENGTH + i;
        }
        batch->spans[batch->num_spans++] = (mt_span){at, length, at, length, true};
        batch->num_tokens += length;
        mt_image_grid grid = {f->grids[3 * s + 1], f->grids[3 * s + 2]};
        int64_t number = grid.height * grid.width, begin = 0;
        for (int64_t i = 0; i < s; i++) begin += f->grids[3 * i + 1] * f->grids[3 * i + 2];
        memcpy(images->patches + patches * PATCH_VALUES, f->patches + begin * PATCH_VALUES,
               (size_t)(number * PATCH_VALUES) * 4);
        images->grids[images->num_images++] = grid, patches += number;
    }
}

#include "five_steps.h"

/* Fails unless losses and norms equal those of transformers. */
__attribute__((unused)) static void assert_expected(int model, const char *words, const double losses[STEPS],
                                                    const double norms[STEPS]) {
    assert_five_steps("tests/golden/vision", models[model].name, words, models[model].tolerance,
                      models[model].norm_steps, losses, norms);
}

#endif
