/* golden.h: opens and trains the families of tests/golden/hf with the options of `train`. */
#ifndef MT_TESTS_GOLDEN_H
#define MT_TESTS_GOLDEN_H

#include "../data/base/file.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/base/safetensors.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_tensors.h"
#include "../data/checkpoint/run_options.h"
#include "families.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { STEPS = 10, SEQUENCES = 4, SEQ_LENGTH = 32, TOKENS = SEQUENCES * SEQ_LENGTH };

/* The backend that models are created on. */
static const mt_ops *backend = &mt_cpu_ops;

/* Appended to the command line of `train`. */
static const char *more_options = "";

/* A family opened with the options of `train`. */
typedef struct fixture {
    char folder[256];
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    int32_t *tokens; // [STEPS, SEQUENCES, SEQ_LENGTH + 1]
} fixture;

static void *read_file(const char *folder, const char *name, int64_t bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    void *data = mt_malloc(bytes);
    assert_int_equal(fread(data, 1, (size_t)bytes, file), bytes);
    fclose(file);
    return data;
}

/* True if a tensor of the folder has this in its name. */
static bool folder_names(const char *folder, const char *text) {
    mt_safetensors *set;
    mt_error error;
    bool found = false;
    if (mt_safetensors_open_folder(&set, folder, "model", &error) != 0) fail_msg("%s", error.text);
    for (int64_t i = 0; i < mt_safetensors_count(set) && !found; i++)
        found = strstr(mt_safetensors_get(set, i)->name, text) != NULL;
    mt_safetensors_close(set);
    return found;
}

static fixture open_family(const char *family, int64_t micro_batch_size, int64_t world_size, bool bf16) {
    fixture f = {0};
    mt_error error = {{0}};
    char line[1024], *arguments[64];
    int count = 0;
    snprintf(f.folder, sizeof f.folder, "tests/golden/hf/%s", family);
    // The reference does not move the bias that balances the loads.
    bool is_biased = folder_names(f.folder, "e_score_correction_bias") || folder_names(f.folder, "expert_bias");
    const char *own = is_biased ? "--moe-router-bias-update-rate 0"
                      : strcmp(family, "gpt_oss") == 0 || strcmp(family, "granitemoehybrid") == 0
                          ? "--moe-aux-loss-coeff 0" // their references have none
                          : "";
    // Some families have no modules of multi-token prediction, so that --load of a folder of theirs refuses them.
    bool adds = strstr(more_options, "--mtp-num-layers");
    snprintf(line, sizeof line,
             "train %s %s%s --tokens-file %s/tokens.i32 --seq-length 32 --micro-batch-size %d --global-batch-size 4 "
             "--train-iters 10 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --lr-warmup-iters 0 --adam-beta1 0.9 "
             "--adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 --device cpu%s %s %s",
             adds ? "--hf-config" : "--load", f.folder, adds ? "/config.json" : "", f.folder, (int)micro_batch_size,
             bf16 ? " --bf16" : "", own, more_options);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&f.options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&f.options, MT_PROGRAM_TRAIN, world_size, &error) != 0) fail_msg("%s", error.text);
    int64_t bytes = STEPS * SEQUENCES * (SEQ_LENGTH + 1) * 4; // a folder elsewhere, such as ../vision/NAME, has none
    f.tokens = strchr(family, '/') ? mt_calloc(bytes) : read_file(f.folder, "tokens.i32", bytes);
    mt_batch_alloc(&f.batch, TOKENS);
    return f;
}

/* Separate from open_family so that the model's pointer to the options stays valid. */
static void create_model(fixture *f, const mt_grid *grid) {
    mt_error error = {{0}};
    mt_run_state state = {0};
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    if (mt_model_create(&f->model, &f->options.stack, grid, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_load(f->model, &f->options, &state, f->folder, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(state.iteration, 0);
}

static void close_family(fixture *f) {
    mt_model_destroy(f->model);
    mt_batch_free(&f->batch);
    mt_options_free(&f->options);
    free(f->tokens);
}

/* True for a family, or a type, that the backend has no kernels for: bf16 before compute capability 8.0, or gated delta
 * nets where a block has 64 KiB of shared memory. */
__attribute__((unused)) static bool is_refused(const char *family, bool bf16) {
    if (backend == &mt_cpu_ops) return false;
    mt_error error = {{0}};
    fixture f = open_family(family, 1, 1, bf16);
    bool refused = mt_options_check_limits(&f.options.stack, &backend->limits, &error) != 0;
    if (refused) print_message("left out: %s: %s\n", family, error.text);
    mt_batch_free(&f.batch);
    mt_options_free(&f.options);
    free(f.tokens);
    return refused;
}

static void fill_batch(const fixture *f, int64_t step, int64_t first, int64_t sequences, mt_batch *batch) {
    batch->num_tokens = sequences * SEQ_LENGTH;
    batch->num_spans = sequences;
    for (int64_t s = 0; s < sequences; s++) {
        const int32_t *row = f->tokens + ((step * SEQUENCES) + first + s) * (SEQ_LENGTH + 1);
        batch->spans[s] = (mt_span){s * SEQ_LENGTH, SEQ_LENGTH, s * SEQ_LENGTH, SEQ_LENGTH, true};
        for (int64_t i = 0; i < SEQ_LENGTH; i++) {
            int64_t t = s * SEQ_LENGTH + i;
            batch->tokens[t] = row[i], batch->labels[t] = row[i + 1], batch->positions[t] = (int32_t)i;
            batch->loss_mask[t] = 1, batch->token_index[t] = (step * SEQUENCES + first) * SEQ_LENGTH + t;
        }
    }
}

/* The element of the whole tensor that is element (row, col) of this rank's part of a weight. */
__attribute__((unused)) static int64_t stored_at(const mt_param *param, int64_t row, int64_t col) {
    mt_placement place = mt_param_placement(param, MT_STATE_WEIGHTS);
    int64_t slice = place.slice * (param->hf_rows_total * param->whole_cols / place.slices);
    row = mt_placement_row(&place, param->first_row + row), col += param->first_col;
    return slice + (place.transposed ? col * place.width + row : row * place.width + col);
}

typedef struct source {
    const fixture *fixture;
    int64_t step, micro_batch_size, first, stride; // stride: sequences of one micro-batch over all ranks
} source;

static int next_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const source *from = context;
    fill_batch(from->fixture, from->step, from->first + index * from->stride, from->micro_batch_size, batch);
    return 0;
}

/* Ten AdamW steps; losses and gradient norms before clipping. */
__attribute__((unused)) static void train_ten_steps(const char *family, const mt_grid *grid, int64_t micro_batch_size,
                                                    bool bf16, double losses[STEPS], double norms[STEPS]) {
    fixture f = open_family(family, micro_batch_size, grid->world.size, bf16);
    create_model(&f, grid);
    mt_run_state run = {0};
    mt_error error;
    int64_t stride = micro_batch_size * grid->data.size;
    for (int64_t step = 0; step < STEPS; step++) {
        source from = {&f, step, micro_batch_size, grid->data.rank * micro_batch_size, stride};
        mt_metrics metrics;
        if (mt_train_step(f.model, &run, SEQUENCES / stride, next_micro_batch, &from, &f.batch, &metrics, &error))
            fail_msg("%s", error.text);
        losses[step] = metrics.loss, norms[step] = metrics.grad_norm;
    }
    assert_int_equal(run.iteration, STEPS);
    assert_int_equal(run.consumed_train_samples, STEPS * SEQUENCES);
    close_family(&f);
}

/* The relative error that a gradient's norm may have: transformers computes the gated delta rule and Mamba-2 in float32
 * whatever the model's type. */
__attribute__((unused)) static double linear_attention_error(const char *family, double otherwise) {
    return has_delta_nets(family) || has_mamba(family) || strcmp(family, "kimi_linear") == 0 ? 3e-4 : otherwise;
}

/* Fails unless losses and norms equal expected.json to 1e-5 relative. A gradient of Gemma 3's first step
 * (model.layers.1.mlp.up_proj.weight [58, 1]) is 1.2e-8 and so as large as --adam-eps: an error of 1e-8, the rounding
 * of its terms in fp32, changes its update by a quarter of the learning rate, which moves later norms by 1e-5. Three
 * times that is allowed. */
__attribute__((unused)) static void assert_expected(const char *family, const double losses[STEPS],
                                                    const double norms[STEPS]) {
    char path[512];
    snprintf(path, sizeof path, "tests/golden/hf/%s/expected.json", family);
    json_t *expected = json_load_file(path, 0, NULL);
    assert_non_null(expected);
    double of_norms = linear_attention_error(family, strcmp(family, "gemma3") == 0 ? 3e-5 : 1e-5);
    for (size_t i = 0; i < STEPS; i++) {
        double loss = json_real_value(json_array_get(json_object_get(expected, "losses"), i));
        double norm = json_real_value(json_array_get(json_object_get(expected, "grad_norms"), i));
        if (!(fabs(losses[i] - loss) <= 1e-5 * loss) || !(fabs(norms[i] - norm) <= of_norms * norm))
            fail_msg("%s step %d: loss %.9f, expected %.9f; norm %.9f, expected %.9f", family, (int)i + 1, losses[i],
                     loss, norms[i], norm);
    }
    json_decref(expected);
}

#endif
