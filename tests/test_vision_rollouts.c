/* test_vision_rollouts.c: responses to prompts with pictures: the log-probabilities that the generator reports, those
 * that training computes from packed rows, and those of transformers are the same. */
// Sections of megatron.c: §14 §16 §21
#include "../data/base/file.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/run_options.h"
#include "../data/learn/rollouts.h"
#include "../data/learn/stage.h"
#include "../data/models/generate.h"
#include "../data/models/text_images.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/tokens/prompts.h"
#include "../data/tokens/tokenizer_vocab.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { PROMPTS = 5, NEW_TOKENS = 8, LENGTH = 128 };

static char folder[] = "/tmp/test_vision_rollouts.XXXXXX";
static json_t *answers;

static const char *at(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void copy(const char *from, const char *name) {
    char path[256];
    int64_t bytes;
    mt_error error;
    snprintf(path, sizeof path, "%s/%s", from, name);
    char *text = mt_file_read(path, 1 << 30, &bytes, &error);
    if (!text || mt_file_write(at(name), text, bytes, "copy", &error) != 0) fail_msg("%s", error.text);
    free(text);
}

/* A folder of the model of tests/golden/vision/sft/answers.json, and its conversations as prompts, whose pictures stand
 * in the parts of messages. */
static int open_folder(void **state) {
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                                        "preprocessor_config.json"};
    mt_error error;
    json_t *root = mt_json_read("tests/golden/vision/sft/answers.json", &error), *answer;
    size_t i;
    (void)state;
    assert_non_null(mkdtemp(folder));
    copy("tests/golden/vision/qwen3_vl", "config.json"), copy("tests/golden/vision/qwen3_vl", "model.safetensors");
    for (int k = 0; k < 4; k++) copy("tests/golden/vision/sft", files[k]);
    char *pictures = realpath("tests/golden/images", NULL);
    assert_non_null(pictures);
    answers = json_incref(json_object_get(root, "answers"));
    assert_int_equal(json_array_size(answers), PROMPTS);
    FILE *lines = fopen(at("prompts.jsonl"), "w");
    json_array_foreach(answers, i, answer) {
        json_t *messages = json_deep_copy(json_object_get(answer, "messages")), *message, *part;
        size_t m, p;
        json_array_foreach(messages, m, message) json_array_foreach(json_object_get(message, "content"), p, part) {
            const char *name = json_string_value(json_object_get(part, "image"));
            if (name) json_object_set_new(part, "image", json_sprintf("%s/%s", pictures, name));
        }
        json_t *line = json_pack("{s:o}", "messages", messages);
        assert_int_equal(json_dumpf(line, lines, JSON_COMPACT), 0);
        fputc('\n', lines);
        json_decref(line);
    }
    fclose(lines);
    free(pictures);
    json_decref(root);
    return 0;
}

static int remove_folder(void **state) {
    char command[64];
    (void)state;
    json_decref(answers);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

/* The sink of scores. */
static void store(void *context, int64_t index, const mt_batch *batch, const double *numbers, const double *entropy) {
    (void)index, (void)entropy;
    mt_rollouts_store(context, MT_OLD_LOGP, batch, numbers);
}

typedef struct source {
    const mt_rollouts *rollouts;
    const mt_step_plan *plan;
} source;

static int fill(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const source *s = context;
    return mt_step_plan_fill(s->plan, index, 0, &s->rollouts->samples, 0, batch, error);
}

/* Fails unless log-probabilities are those of transformers, which are printed with six digits. */
static void assert_answer(size_t answer, const int32_t *tokens, const double *logps, int64_t count, const char *who) {
    const json_t *expected = json_array_get(answers, answer);
    assert_int_equal(count, json_array_size(json_object_get(expected, "tokens")));
    for (size_t i = 0; i < (size_t)count; i++) {
        double logp = json_number_value(json_array_get(json_object_get(expected, "logprobs"), i));
        assert_int_equal(tokens[i], json_integer_value(json_array_get(json_object_get(expected, "tokens"), i)));
        if (fabs(logps[i] - logp) > 1e-5 * fabs(logp) + 1e-6)
            fail_msg("answer %d: %s has %.7f for token %d, transformers %.6f", (int)answer, who, logps[i], (int)i,
                     logp);
    }
}

/* words: more options of train. Returns the most images that a micro-batch has. */
static int64_t roll_out(const char *words, bool packs) {
    mt_error error = {{0}};
    mt_run_options options = {0};
    mt_run_state state = {0};
    mt_image_reader reader;
    mt_tokenizer *tokenizer;
    mt_samples prompts;
    mt_model *model;
    mt_batch batch;
    char line[1024], *arguments[64], *rest = line;
    int count = 0;
    snprintf(line, sizeof line,
             "train --load %s --data-path none --seq-length 128 --micro-batch-size 1 --global-batch-size 1 "
             "--train-iters 1 --lr 1e-3 --device cpu --stage rl --reward regex --reward-pattern x --max-new-tokens 8%s",
             folder, words);
    for (char *word; (word = strtok_r(rest, " ", &rest));) arguments[count++] = word;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0) fail_msg("%s", error.text);
    if (mt_tokenizer_open_folder(&tokenizer, folder, &error) != 0) fail_msg("%s", error.text);
    if (mt_image_reader_open(&reader, &options, folder, &error) != 0) fail_msg("%s", error.text);
    mt_sft_config files = {.tokenizer_path = folder, .vocab_size = options.stack.vocab_size, .seq_length = LENGTH};
    char path[512], *paths[] = {path};
    snprintf(path, sizeof path, "%s", at("prompts.jsonl"));
    files.paths = (mt_strings){.items = paths, .count = 1}, files.chat_template = MT_CHAT_AUTO, files.prompts = true,
    files.images = &reader;
    if (mt_samples_read(&prompts, &files, tokenizer, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(prompts.count, PROMPTS);

    mt_model_plan plan = {.max_tokens = LENGTH, .max_logits = LENGTH, .max_position = LENGTH, .train = true};
    mt_stage_loss loss;
    plan.loss = mt_stage_loss_of(&loss, &options);
    plan.max_patches = mt_samples_max_patches(&prompts, LENGTH), plan.max_image_tokens = 64;
    mt_plan_generation(&plan, PROMPTS, LENGTH, 0);
    if (mt_model_create(&model, &options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    if (mt_checkpoint_load(model, &options, &state, folder, &error) != 0) fail_msg("%s", error.text);

    const int32_t *tokens[PROMPTS];
    int64_t lengths[PROMPTS], order[PROMPTS];
    mt_text_images *pictures[PROMPTS];
    const mt_sequence_images *images[PROMPTS];
    for (int64_t i = 0; i < PROMPTS; i++) {
        mt_images borrowed = {0};
        int64_t first = prompts.image_offsets[i];
        order[i] = i, tokens[i] = prompts.tokens + prompts.offsets[i];
        lengths[i] = prompts.offsets[i + 1] - prompts.offsets[i];
        assert_int_equal(lengths[i],
                         json_integer_value(json_object_get(json_array_get(answers, (size_t)i), "prompt_tokens")));
        mt_images_borrow(&borrowed, &prompts.images, first, prompts.image_offsets[i + 1] - first);
        pictures[i] = mt_text_images_open(&borrowed, &reader, tokens[i], lengths[i]);
        images[i] = mt_text_images_list(pictures[i]);
    }
    mt_rollout rollout = {.num_return_sequences = 1, .max_new_tokens = NEW_TOKENS, .images = images};
    rollout.sampling = (mt_sampling){.top_p = 1, .logp_scale = 1}, rollout.stops = (mt_stops){.ids = {155}, .count = 1};
    mt_sequence samples[PROMPTS];
    if (mt_rollout_generate(model, &rollout, tokens, lengths, PROMPTS, samples, &error) != 0)
        fail_msg("%s", error.text);
    mt_rollouts rollouts;
    mt_rollouts_begin(&rollouts, &prompts, order, PROMPTS, 1);
    for (int64_t i = 0; i < PROMPTS; i++) {
        double logps[NEW_TOKENS];
        int64_t written = samples[i].num_tokens - samples[i].num_prompt;
        for (int64_t k = 0; k < written; k++) logps[k] = (double)samples[i].logps[k];
        assert_answer((size_t)i, samples[i].tokens + samples[i].num_prompt, logps, written, "the generator");
        mt_rollouts_set(&rollouts, i, samples[i].tokens + samples[i].num_prompt, written, true);
        mt_sequence_end(&samples[i]);
    }

    mt_rollout_config config = {.max_new_tokens = NEW_TOKENS};
    mt_step_plan steps = {0};
    mt_plan_shape shape = {.num_ranks = 1, .micro_batch_size = 1, .row_length = LENGTH, .regroups = true};
    shape.work = mt_token_work_of(&options.stack);
    mt_rollouts_select(&rollouts, &config);
    mt_rollouts_plan(&steps, &rollouts, order, PROMPTS, packs, &shape);
    mt_batch_alloc(&batch, LENGTH);
    mt_batch_alloc_images(&batch, &options.stack, plan.max_patches);
    source from = {&rollouts, &steps};
    int64_t most = 0;
    for (int64_t i = 0; i < steps.num_slots; i++) {
        if (fill(&from, i, &batch, &error) != 0) fail_msg("%s", error.text);
        most = mt_max(most, batch.images.num_images);
    }
    if (mt_score_tokens(model, steps.num_slots, fill, &from, &batch, store, &rollouts, &error) != 0)
        fail_msg("%s", error.text);
    for (int64_t i = 0; i < PROMPTS; i++) {
        int64_t n = rollouts.response_tokens[i], end = rollouts.spans[i].q_start + rollouts.spans[i].q_len;
        assert_answer((size_t)i, rollouts.responses[i], rollouts.inputs[MT_OLD_LOGP] + end - n, n, "training");
    }
    mt_step_plan_free(&steps), mt_rollouts_free(&rollouts), mt_batch_free(&batch);
    for (int64_t i = 0; i < PROMPTS; i++) mt_text_images_close(pictures[i]);
    mt_samples_free(&prompts), mt_model_destroy(model), mt_tokenizer_close(tokenizer), mt_options_free(&options);
    return most;
}

static void generator_and_training_have_the_log_probabilities_of_transformers(void **state) {
    (void)state;
    assert_int_equal(roll_out("", false), 2); // those of one prompt
    assert_int_equal(roll_out(" --recompute-granularity full --recompute-num-layers 1", false), 2);
}

static void packed_rows_have_them_too(void **state) {
    (void)state;
    assert_true(roll_out("", true) > 2); // of several prompts
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generator_and_training_have_the_log_probabilities_of_transformers),
        cmocka_unit_test(packed_rows_have_them_too),
    };
    return cmocka_run_group_tests_name("responses to prompts with pictures", tests, open_folder, remove_folder);
}
