/* t5.h: opens and trains the encoder-decoders of tests/golden/t5 with the options of `train`. */
#ifndef MT_TESTS_T5_H
#define MT_TESTS_T5_H

#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_tensors.h"
#include "../data/checkpoint/run_options.h"
#include "../data/models/generate.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/tokens/prompts.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The sizes of the reference: sequences, tokens of each for the encoder with padding, and for the decoder. */
enum { STEPS = 5, SEQUENCES = 4, INPUTS = 24, TARGETS = 16, VOCABULARY = 160 };

static const char *const models[] = {"t5", "t5_gated"};
enum { NUM_MODELS = sizeof models / sizeof *models };

/* The backend that models are created on. */
static const mt_ops *backend = &mt_cpu_ops;

typedef struct fixture {
    char folder[256];
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    int64_t num_labels; // that count
    int32_t inputs[SEQUENCES * INPUTS], mask[SEQUENCES * INPUTS], labels[SEQUENCES * TARGETS];
    float logits[SEQUENCES * TARGETS * VOCABULARY];
} fixture;

static void take(mt_safetensors *set, const char *name, void *to, int64_t bytes) {
    const mt_tensor_info *tensor = mt_safetensors_find(set, name);
    assert_non_null(tensor);
    assert_int_equal(tensor->bytes, bytes);
    memcpy(to, tensor->data, (size_t)bytes);
}

/* `words` are more options of `train`. */
static void open_options(fixture *f, const char *name, int64_t micro_batch_size, int64_t ranks, const char *words) {
    mt_error error = {{0}};
    char line[1024], *arguments[80], *rest = line;
    int count = 0;
    memset(f, 0, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "tests/golden/t5/%s", name);
    snprintf(line, sizeof line,
             "train --load %s --sft --data-path pairs.jsonl --encoder-seq-length 24 --decoder-seq-length 16 "
             "--micro-batch-size %d --global-batch-size 4 --train-iters 5 --lr 1e-3 --min-lr 1e-3 "
             "--lr-decay-style constant --lr-warmup-iters 0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 "
             "--weight-decay 0.1 --clip-grad 1.0 --device cpu%s",
             f->folder, (int)micro_batch_size, words);
    for (char *word; (word = strtok_r(rest, " ", &rest));) arguments[count++] = word;
    if (mt_options_parse(&f->options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&f->options, MT_PROGRAM_TRAIN, ranks, &error) != 0) fail_msg("%s", error.text);
}

/* Opens a model with its weights, and the reference's inputs. */
static void open_model(fixture *f, const char *name, const mt_grid *grid, int64_t micro_batch_size, const char *words) {
    mt_error error = {{0}};
    mt_run_state state = {0};
    mt_safetensors *io;
    open_options(f, name, micro_batch_size, grid->world.size, words);
    int64_t tokens = micro_batch_size * INPUTS, targets = micro_batch_size * TARGETS;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = targets, .max_position = INPUTS, .train = true};
    if (mt_model_create(&f->model, &f->options.stack, grid, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_load(f->model, &f->options, &state, f->folder, &error) != 0) fail_msg("%s", error.text);
    mt_batch_alloc(&f->batch, SEQUENCES * INPUTS);
    mt_batch_alloc_encoder(&f->batch, SEQUENCES * INPUTS);
    if (mt_safetensors_open_folder(&io, f->folder, "io", &error) != 0) fail_msg("%s", error.text);
    take(io, "input_ids", f->inputs, sizeof f->inputs), take(io, "attention_mask", f->mask, sizeof f->mask);
    take(io, "labels", f->labels, sizeof f->labels), take(io, "logits", f->logits, sizeof f->logits);
    mt_safetensors_close(io);
    for (int i = 0; i < SEQUENCES * TARGETS; i++) f->num_labels += f->labels[i] >= 0;
}

static void close_model(fixture *f) {
    mt_model_destroy(f->model);
    mt_batch_free(&f->batch);
    mt_options_free(&f->options);
}

/* The sequences [first, first + count): of the encoder those tokens that the mask keeps; the decoder's tokens are the
 * labels moved by one, and a label below 0 does not count. */
static void fill_batch(const fixture *f, int64_t first, int64_t count, mt_batch *batch) {
    mt_encoder_batch *e = &batch->encoder;
    batch->num_tokens = batch->num_spans = e->num_tokens = e->num_spans = 0;
    for (int64_t s = first; s < first + count; s++) {
        int64_t at = batch->num_tokens, begin = e->num_tokens;
        for (int64_t i = 0; i < INPUTS; i++) {
            if (!f->mask[s * INPUTS + i]) continue;
            e->tokens[e->num_tokens] = f->inputs[s * INPUTS + i], e->token_index[e->num_tokens++] = s * INPUTS + i;
        }
        int64_t length = e->num_tokens - begin;
        e->spans[e->num_spans++] = (mt_span){begin, length, begin, length, false};
        for (int64_t i = 0; i < TARGETS; i++) {
            int32_t label = f->labels[s * TARGETS + i], before = i > 0 ? f->labels[s * TARGETS + i - 1] : 0;
            batch->tokens[at + i] = before < 0 ? 0 : before, batch->labels[at + i] = label < 0 ? 0 : label;
            batch->loss_mask[at + i] = label >= 0, batch->positions[at + i] = (int32_t)i;
            batch->token_index[at + i] = s * TARGETS + i;
        }
        batch->spans[batch->num_spans++] = (mt_span){at, TARGETS, at, TARGETS, true};
        batch->num_tokens += TARGETS;
    }
}

#include "five_steps.h"

/* Fails unless losses and norms equal those of transformers. */
__attribute__((unused)) static void assert_expected(const char *name, const char *words, const double losses[STEPS],
                                                    const double norms[STEPS]) {
    assert_five_steps("tests/golden/t5", name, words, 1e-5, STEPS, losses, norms);
}

/* Fails unless the model generates greedy.json from the reference's inputs, `at_once` sequences at a time. */
__attribute__((unused)) static void assert_greedy(const char *name, const mt_grid *grid, const char *words,
                                                  int64_t at_once) {
    fixture f;
    mt_error error = {{0}};
    mt_run_state state = {0};
    mt_sequence sequences[SEQUENCES];
    mt_sampling greedy = {.top_p = 1};
    mt_stops stops = {.ids = {1}, .count = 1};
    char path[512];
    open_model(&f, name, grid, 1, words); // for its inputs
    mt_model_destroy(f.model);
    snprintf(path, sizeof path, "%s/greedy.json", f.folder);
    json_t *expected = json_load_file(path, 0, NULL), *texts = json_object_get(expected, "greedy");
    assert_int_equal(json_array_size(texts), SEQUENCES);
    mt_model_plan plan = {.max_inputs = INPUTS};
    mt_plan_generation(&plan, at_once, 13, 0);
    if (mt_model_create(&f.model, &f.options.stack, grid, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_load(f.model, &f.options, &state, f.folder, &error) != 0) fail_msg("%s", error.text);
    fill_batch(&f, 0, SEQUENCES, &f.batch);
    for (int64_t s = 0; s < SEQUENCES; s++) {
        const mt_span *span = &f.batch.encoder.spans[s];
        if (mt_sequence_begin_mapping(&sequences[s], s, f.batch.encoder.tokens + span->q_start, span->q_len, 64, 12,
                                      &f.options.stack, &error) != 0)
            fail_msg("%s", error.text);
    }
    mt_generator *generator = mt_generator_create(f.model, &greedy, &stops);
    if (mt_sequences_generate(grid, generator, sequences, SEQUENCES, NULL, &error) != 0) fail_msg("%s", error.text);
    for (int64_t s = 0; s < SEQUENCES; s++) {
        const json_t *text = json_array_get(texts, (size_t)s);
        assert_int_equal(sequences[s].num_tokens, json_array_size(text));
        for (int64_t i = 0; i < sequences[s].num_tokens; i++)
            if (sequences[s].tokens[i] != json_integer_value(json_array_get(text, (size_t)i)))
                fail_msg("%s: token %lld of text %lld is %d", name, (long long)i, (long long)s, sequences[s].tokens[i]);
        mt_sequence_end(&sequences[s]);
    }
    mt_generator_destroy(generator);
    json_decref(expected);
    close_model(&f);
}

#endif
