/* Five families of tiny models against Hugging Face transformers in float64: logits, losses, every gradient, ten steps.
 */
#include "../megatron.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { STEPS = 10, SEQUENCES = 4, SEQ_LENGTH = 32, TOKENS = SEQUENCES * SEQ_LENGTH };

static const char *const families[] = {"gpt2", "llama", "llama3_rope_tied", "qwen2", "qwen3"};
enum { NUM_FAMILIES = sizeof families / sizeof *families };

static mt_grid grid = {.world = {.name = "world", .size = 1}, .data = {.name = "data", .size = 1}};

/* A family's folder opened as `train` would open it. */
typedef struct fixture {
    char folder[256];
    mt_options options;
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

static fixture open_family(const char *family, int64_t micro_batch_size, bool bf16) {
    fixture f = {0};
    mt_error error = {{0}};
    char tokens[512], size[16];
    snprintf(f.folder, sizeof f.folder, "tests/golden/hf/%s", family);
    snprintf(tokens, sizeof tokens, "%s/tokens.i32", f.folder);
    snprintf(size, sizeof size, "%d", (int)micro_batch_size);
    char *arguments[] = {"train",    "--load",
                         f.folder,   "--tokens-file",
                         tokens,     "--seq-length",
                         "32",       "--micro-batch-size",
                         size,       "--global-batch-size",
                         "4",        "--train-iters",
                         "10",       "--lr",
                         "1e-3",     "--min-lr",
                         "1e-3",     "--lr-decay-style",
                         "constant", "--lr-warmup-iters",
                         "0",        "--adam-beta1",
                         "0.9",      "--adam-beta2",
                         "0.95",     "--adam-eps",
                         "1e-8",     "--weight-decay",
                         "0.1",      "--clip-grad",
                         "1.0",      "--device",
                         "cpu",      "--bf16"};
    int count = (int)(sizeof arguments / sizeof *arguments) - (bf16 ? 0 : 1);
    if (mt_options_parse(&f.options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&f.options, MT_PROGRAM_TRAIN, 1, &error) != 0) fail_msg("%s", error.text);
    f.tokens = read_file(f.folder, "tokens.i32", STEPS * SEQUENCES * (SEQ_LENGTH + 1) * 4);
    mt_batch_alloc(&f.batch, TOKENS);
    return f;
}

/* Separate from open_family so that the model's pointer to the options stays valid. */
static void create_model(fixture *f) {
    mt_error error = {{0}};
    mt_run_state state = {0};
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    if (mt_model_create(&f->model, &f->options, &grid, &mt_cpu_ops, &plan, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_load(f->model, &state, f->folder, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(state.iteration, 0);
}

static void close_family(fixture *f) {
    mt_model_destroy(f->model);
    mt_batch_free(&f->batch);
    mt_options_free(&f->options);
    free(f->tokens);
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

static void assert_all_close(const char *what, const float *actual, const float *expected, int64_t count, double sign,
                             double tolerance) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(sign * actual[i] - expected[i]) <= tolerance))
            fail_msg("%s[%lld] is %.8f, expected %.8f", what, (long long)i, sign * actual[i], expected[i]);
}

static void logits_logprobs_and_entropy_equal_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        fixture f = open_family(families[k], 4, false);
        create_model(&f);
        int64_t vocabulary = f.options.vocab_size;
        float *expected_logits = read_file(f.folder, "logits.f32", TOKENS * vocabulary * 4);
        float *expected_logprobs = read_file(f.folder, "logprobs.f32", TOKENS * 4);
        float *expected_entropy = read_file(f.folder, "entropy.f32", TOKENS * 4);
        float *logits = mt_malloc(TOKENS * vocabulary * 4), loss[TOKENS], entropy[TOKENS];
        fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
        mt_model_forward(f.model, &f.batch, false);
        mt_model_read(f.model, loss, entropy, logits);
        assert_all_close("logits", logits, expected_logits, TOKENS * vocabulary, 1, 1e-4);
        assert_all_close("logprobs", loss, expected_logprobs, TOKENS, -1, 1e-4);
        assert_all_close("entropy", entropy, expected_entropy, TOKENS, 1, 1e-4);
        free(expected_logits), free(expected_logprobs), free(expected_entropy), free(logits);
        close_family(&f);
    }
}

/* Adds one parameter's squared distance from the reference gradient, and the reference's squared norm. */
static void add_gradient_error(const mt_param *param, const float *grad, const float *expected, double *distance,
                               double *norm) {
    for (int64_t row = 0; row < param->rows_stored; row++)
        for (int64_t col = 0; col < param->cols; col++) {
            int64_t hf_row = param->hf_row + row;
            int64_t at = param->hf_transposed ? col * param->hf_rows_total + hf_row : hf_row * param->cols + col;
            double e = expected[at], d = (double)grad[row * param->cols + col] / TOKENS - e;
            *distance += d * d, *norm += e * e;
        }
}

static void every_gradient_equals_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        fixture f = open_family(families[k], 4, false);
        create_model(&f);
        char folder[512];
        snprintf(folder, sizeof folder, "%s/grads", f.folder);
        mt_error error;
        mt_safetensors *reference;
        assert_int_equal(mt_safetensors_open_folder(&reference, folder, "model", &error), 0);
        fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
        mt_model_forward(f.model, &f.batch, true);
        mt_model_backward(f.model);
        int64_t num_params, num_buckets;
        const mt_param *params = mt_model_params(f.model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
        for (int64_t i = 0, next; i < num_params; i = next) {
            const mt_tensor_info *tensor = mt_safetensors_find(reference, params[i].hf_name);
            if (!tensor) fail_msg("%s: no reference gradient of %s", families[k], params[i].hf_name);
            double distance = 0, norm = 0;
            for (next = i; next < num_params && strcmp(params[next].hf_name, params[i].hf_name) == 0; next++)
                add_gradient_error(&params[next], buckets[params[next].bucket].grads + params[next].offset,
                                   tensor->data, &distance, &norm);
            if (!(sqrt(distance) <= 1e-4 * sqrt(norm)))
                fail_msg("%s: gradient of %s is off by %g of its norm", families[k], params[i].hf_name,
                         sqrt(distance / norm));
        }
        mt_safetensors_close(reference);
        close_family(&f);
    }
}

typedef struct source {
    const fixture *fixture;
    int64_t step, micro_batch_size;
} source;

static int next_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const source *from = context;
    fill_batch(from->fixture, from->step, index * from->micro_batch_size, from->micro_batch_size, batch);
    return 0;
}

/* Ten AdamW steps; losses and gradient norms before clipping. */
static void train_ten_steps(const char *family, int64_t micro_batch_size, bool bf16, double losses[STEPS],
                            double norms[STEPS]) {
    fixture f = open_family(family, micro_batch_size, bf16);
    create_model(&f);
    mt_run_state run = {0};
    mt_error error;
    for (int64_t step = 0; step < STEPS; step++) {
        source from = {&f, step, micro_batch_size};
        mt_metrics metrics;
        if (mt_train_step(f.model, &run, SEQUENCES / micro_batch_size, next_micro_batch, &from, &f.batch, &metrics,
                          &error))
            fail_msg("%s", error.text);
        losses[step] = metrics.loss, norms[step] = metrics.grad_norm;
    }
    assert_int_equal(run.iteration, STEPS);
    assert_int_equal(run.consumed_train_samples, STEPS * SEQUENCES);
    close_family(&f);
}

static void ten_steps_equal_pytorch_for_any_micro_batch_size(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++)
        for (int64_t micro_batch_size = 1; micro_batch_size <= 4; micro_batch_size *= 2) {
            double losses[STEPS], norms[STEPS];
            train_ten_steps(families[k], micro_batch_size, false, losses, norms);
            char path[512];
            snprintf(path, sizeof path, "tests/golden/hf/%s/expected.json", families[k]);
            json_t *expected = json_load_file(path, 0, NULL);
            assert_non_null(expected);
            for (size_t i = 0; i < STEPS; i++) {
                double loss = json_real_value(json_array_get(json_object_get(expected, "losses"), i));
                double norm = json_real_value(json_array_get(json_object_get(expected, "grad_norms"), i));
                if (!(fabs(losses[i] - loss) <= 1e-5 * loss) || !(fabs(norms[i] - norm) <= 1e-5 * norm))
                    fail_msg("%s, micro batch %d, step %d: loss %.9f, expected %.9f; norm %.9f, expected %.9f",
                             families[k], (int)micro_batch_size, (int)i + 1, losses[i], loss, norms[i], norm);
            }
            json_decref(expected);
        }
}

static void bf16_trains_to_within_two_percent_of_fp32(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        double losses[STEPS], norms[STEPS], reference[STEPS];
        train_ten_steps(families[k], 2, false, reference, norms);
        train_ten_steps(families[k], 2, true, losses, norms);
        for (int i = 0; i < STEPS; i++)
            if (!(fabs(losses[i] - reference[i]) <= 0.02 * reference[i]))
                fail_msg("%s step %d: loss %g in bf16, %g in fp32", families[k], i + 1, losses[i], reference[i]);
        assert_true(losses[STEPS - 1] != reference[STEPS - 1]); // else bf16 rounds nothing
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_logprobs_and_entropy_equal_transformers),
        cmocka_unit_test(every_gradient_equals_transformers),
        cmocka_unit_test(ten_steps_equal_pytorch_for_any_micro_batch_size),
        cmocka_unit_test(bf16_trains_to_within_two_percent_of_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
