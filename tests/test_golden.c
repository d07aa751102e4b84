/* test_golden.c: tiny models of every family equal Hugging Face transformers in float64: logits, losses, every
 * gradient, ten training steps. */
// Sections of megatron.c: §8 §9 §9a §9c §9d §9e §9f §9g §10 §10a §10c §17b §17c §18b §19b §15b
#include "golden.h"
#include "../data/base/safetensors.h"

#include <unistd.h>

static void assert_all_close(const char *what, const float *actual, const float *expected, int64_t count, double sign,
                             double tolerance) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(sign * actual[i] - expected[i]) <= tolerance))
            fail_msg("%s[%lld] is %.8f, expected %.8f", what, (long long)i, sign * actual[i], expected[i]);
}

static void logits_logprobs_and_entropy_equal_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        if (is_refused(families[k], false)) continue;
        fixture f = open_family(families[k], 4, 1, false);
        create_model(&f, &mt_grid_of_one);
        int64_t vocabulary = f.options.stack.vocab_size;
        float *expected_logits = read_file(f.folder, "logits.f32", TOKENS * vocabulary * 4);
        float *expected_logprobs = read_file(f.folder, "logprobs.f32", TOKENS * 4);
        float *expected_entropy = read_file(f.folder, "entropy.f32", TOKENS * 4);
        float *logits = mt_malloc(TOKENS * vocabulary * 4), logp[TOKENS], entropy[TOKENS];
        fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
        mt_model_forward(f.model, &f.batch, false);
        mt_model_read(f.model, logp, entropy, logits);
        assert_all_close("logits", logits, expected_logits, TOKENS * vocabulary, 1, 1e-4);
        assert_all_close("logprobs", logp, expected_logprobs, TOKENS, 1, 1e-4);
        assert_all_close("entropy", entropy, expected_entropy, TOKENS, 1, 1e-4);
        free(expected_logits), free(expected_logprobs), free(expected_entropy), free(logits);
        close_family(&f);
    }
}

/* Adds the squared distance of one parameter's gradient from the reference, and the squared norm of the reference. */
static void add_gradient_error(const mt_model *model, const mt_param *param, const float *grads, const float *expected,
                               double *distance, double *norm) {
    int64_t bytes = param->rows_stored * param->cols * 4;
    float *grad = mt_malloc(bytes); // the bucket may be on a GPU
    mt_model_ops(model)->memory_copy(grad, grads + param->offset, bytes, mt_model_stream(model));
    mt_model_ops(model)->stream_synchronize(mt_model_stream(model));
    for (int64_t row = 0; row < param->rows_stored; row++)
        for (int64_t col = 0; col < param->cols; col++) {
            double e = expected[stored_at(param, row, col)];
            double d = (double)grad[row * param->cols + col] / TOKENS - e;
            *distance += d * d, *norm += e * e;
        }
    free(grad);
}

static void every_gradient_equals_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        if (is_refused(families[k], false)) continue;
        fixture f = open_family(families[k], 4, 1, false);
        create_model(&f, &mt_grid_of_one);
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
            next = i + 1;
            if (!buckets[params[i].bucket].trained) continue;
            if (!tensor) fail_msg("%s: no reference gradient of %s", families[k], params[i].hf_name);
            double distance = 0, norm = 0;
            for (next = i; next < num_params && strcmp(params[next].hf_name, params[i].hf_name) == 0; next++)
                add_gradient_error(f.model, &params[next], buckets[params[next].bucket].grads, tensor->data, &distance,
                                   &norm);
            if (!(sqrt(distance) <= linear_attention_error(families[k], 1e-4) * sqrt(norm)))
                fail_msg("%s: gradient of %s is off by %g of its norm", families[k], params[i].hf_name,
                         sqrt(distance / norm));
        }
        mt_safetensors_close(reference);
        close_family(&f);
    }
}

/* Of every role of a family the first parameter, whole. Experts may have no token; modules of multi-token prediction
 * give no logits. */
static void a_nan_in_a_parameter_reaches_the_logprobs(void **state) {
    (void)state;
    if (backend != &mt_cpu_ops) skip();
    for (int k = 0; k < NUM_FAMILIES; k++) {
        if (is_refused(families[k], false)) continue;
        fixture f = open_family(families[k], 4, 1, false);
        create_model(&f, &mt_grid_of_one);
        fill_batch(&f, 0, 0, 1, &f.batch);
        int64_t num_params, num_buckets;
        const mt_param *params = mt_model_params(f.model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
        bool tried[MT_NUM_ROLES] = {false};
        for (int64_t i = 0; i < num_params; i++) {
            const mt_param *p = &params[i];
            int64_t n = p->rows * p->cols;
            float *values = (float *)buckets[p->bucket].params + p->offset, *kept = mt_malloc(n * 4);
            float logp[SEQ_LENGTH], sum = 0;
            if (!tried[p->role] && p->expert < 0 && p->layer < f.options.stack.num_layers) {
                tried[p->role] = true;
                memcpy(kept, values, (size_t)n * 4);
                for (int64_t j = 0; j < n; j++) values[j] = NAN;
                mt_model_forward(f.model, &f.batch, false);
                mt_model_read(f.model, logp, NULL, NULL);
                for (int64_t t = 0; t < SEQ_LENGTH; t++) sum += logp[t];
                if (!isnan(sum)) fail_msg("%s: a NaN in %s is lost", families[k], p->hf_name);
                memcpy(values, kept, (size_t)n * 4);
            }
            free(kept);
        }
        close_family(&f);
    }
}

static void ten_steps_equal_pytorch_for_any_micro_batch_size(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++)
        for (int64_t micro_batch_size = 1; micro_batch_size <= 4; micro_batch_size *= 2) {
            if (is_refused(families[k], false)) continue;
            double losses[STEPS], norms[STEPS];
            train_ten_steps(families[k], &mt_grid_of_one, micro_batch_size, false, losses, norms);
            assert_expected(families[k], losses, norms);
        }
}

static void bf16_trains_to_within_two_percent_of_fp32(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        double losses[STEPS], norms[STEPS], reference[STEPS];
        if (is_refused(families[k], true)) continue;
        train_ten_steps(families[k], &mt_grid_of_one, 2, false, reference, norms);
        train_ten_steps(families[k], &mt_grid_of_one, 2, true, losses, norms);
        for (int i = 0; i < STEPS; i++)
            if (!(fabs(losses[i] - reference[i]) <= 0.02 * reference[i]))
                fail_msg("%s step %d: loss %g in bf16, %g in fp32", families[k], i + 1, losses[i], reference[i]);
        assert_true(losses[STEPS - 1] != reference[STEPS - 1]); // bf16 does round
    }
}

/* Of models with norms before the blocks, after them, and on both sides: a norm stores its result in fp8 if a linear
 * reads it alone. */
static void fp8_trains_to_within_five_percent_of_fp32_wherever_norms_stand(void **state) {
    (void)state;
    static const char *const subjects[] = {"qwen3", "olmo3", "gemma3"};
    if (backend && backend->limits.no_fp8) skip();
    for (int k = 0; k < 3; k++) {
        double losses[STEPS], norms[STEPS], reference[STEPS];
        train_ten_steps(subjects[k], &mt_grid_of_one, 2, false, reference, norms);
        more_options = " --fp8-format hybrid";
        train_ten_steps(subjects[k], &mt_grid_of_one, 2, true, losses, norms);
        more_options = "";
        for (int i = 0; i < STEPS; i++)
            if (!(fabs(losses[i] - reference[i]) <= 0.05 * reference[i]))
                fail_msg("%s step %d: loss %g in fp8, %g in fp32", subjects[k], i + 1, losses[i], reference[i]);
        assert_true(losses[STEPS - 1] != reference[STEPS - 1]); // fp8 does round
    }
}

static void two_runs_repeat_bit_for_bit(void **state) {
    (void)state;
    more_options = " --deterministic-mode";
    for (int k = 0; k < NUM_FAMILIES; k++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            double losses[2][STEPS], norms[2][STEPS];
            if (is_refused(families[k], bf16)) continue;
            for (int turn = 0; turn < 2; turn++)
                train_ten_steps(families[k], &mt_grid_of_one, 2, bf16, losses[turn], norms[turn]);
            for (int i = 0; i < STEPS; i++)
                if (losses[0][i] != losses[1][i] || norms[0][i] != norms[1][i])
                    fail_msg("%s in %s step %d: loss %.17g and %.17g, norm %.17g and %.17g", families[k],
                             bf16 ? "bf16" : "fp32", i + 1, losses[0][i], losses[1][i], norms[0][i], norms[1][i]);
        }
    more_options = "";
}

static int train_step(fixture *f, mt_run_state *run, mt_metrics *metrics, mt_error *error) {
    source from = {f, run->iteration % STEPS, 1, 0, 1};
    return mt_train_step(f->model, run, SEQUENCES, next_micro_batch, &from, &f->batch, metrics, error);
}

enum { WAITED_MICROSECONDS = 5000 };

/* next_micro_batch after a wait, which no machine makes shorter. */
static int wait_for_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    usleep(WAITED_MICROSECONDS);
    return next_micro_batch(context, index, batch, error);
}

static void unread_metrics_change_nothing(void **state) {
    (void)state;
    double losses[STEPS], norms[STEPS];
    train_ten_steps("llama", &mt_grid_of_one, 1, false, losses, norms);
    fixture f = open_family("llama", 1, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {0};
    mt_error error;
    mt_metrics metrics;
    double seconds = 0, called = 0; // reported; of the calls, without what other processes do between them
    for (int64_t last = 0, step = 0; step < STEPS; step++) {
        bool read = step == 2 || step == 3 || step == STEPS - 1;
        source from = {&f, step, 1, 0, 1};
        double begin = mt_time();
        if (mt_train_step(f.model, &run, SEQUENCES, wait_for_micro_batch, &from, &f.batch, read ? &metrics : NULL,
                          &error) != 0)
            fail_msg("%s", error.text);
        called += mt_time() - begin;
        begin = mt_time();
        if (step == 5 && mt_train_finish(f.model, &error) != 0) fail_msg("%s", error.text);
        called += mt_time() - begin;
        if (!read) continue;
        assert_true(metrics.loss == losses[step] && metrics.grad_norm == norms[step]);
        assert_true(metrics.tokens == TOKENS && metrics.seconds > 0);
        assert_true(metrics.seconds >= SEQUENCES * WAITED_MICROSECONDS * 1e-6); // also of steps that were not read
        seconds +=
            metrics.seconds * (double)(step + 1 - last); // `seconds` is the mean over the steps since the last read
        last = step + 1;
    }
    assert_true(seconds <= called);
    assert_int_equal(run.iteration, STEPS);
    assert_int_equal(run.optimizer_step, STEPS);
    close_family(&f);
}

/* Sets one weight to NaN. */
static void poison(mt_model *model) {
    const mt_ops *ops = mt_model_ops(model);
    const float nan = NAN;
    int64_t count;
    mt_bucket *last = mt_model_buckets(model, &count);
    last += count - 1; // with the final norm
    ops->memory_copy((float *)last->params + last->decay_count, &nan, 4, mt_model_stream(model));
    ops->stream_synchronize(mt_model_stream(model));
}

static void a_non_finite_loss_is_reported_with_its_step_within_two_steps(void **state) {
    (void)state;
    for (int64_t more = 0; more <= 3; more++) { // steps after the bad step
        fixture f = open_family("llama", 1, 1, false);
        create_model(&f, &mt_grid_of_one);
        mt_run_state run = {0};
        mt_error error = {{0}};
        int status = 0;
        for (int64_t step = 0; step < 4 + more && status == 0; step++) {
            if (step == 3) poison(f.model);
            status = train_step(&f, &run, NULL, &error);
            if (step < 3) assert_int_equal(status, 0);
        }
        if (more >= 2) assert_int_equal(status, -1);
        if (status == 0) status = mt_train_finish(f.model, &error);
        assert_int_equal(status, -1);
        assert_non_null(strstr(error.text, "iteration 4: the loss is"));
        assert_in_range(run.iteration, 3, 5);
        close_family(&f);
    }
}

typedef struct bad_batch {
    const char *family;
    void (*damage)(mt_batch *batch);
    const char *message;
} bad_batch;

typedef struct damaged_source {
    source from;
    const bad_batch *bad;
} damaged_source;

static int damaged_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    damaged_source *d = context;
    int status = next_micro_batch(&d->from, index, batch, error);
    if (index == 1) d->bad->damage(batch);
    return status;
}

static void longer_than_planned(mt_batch *b) {
    b->num_tokens = TOKENS + 1;
}
static void label_outside(mt_batch *b) {
    b->labels[5] = 1 << 20;
}
static void label_below(mt_batch *b) {
    b->labels[6] = -100;
}
static void token_outside(mt_batch *b) {
    b->tokens[0] = 1 << 20;
}
static void position_outside(mt_batch *b) {
    b->positions[3] = SEQ_LENGTH;
}
static void learned_position_outside(mt_batch *b) {
    b->positions[4] = 1 << 20;
}
static void span_outside(mt_batch *b) {
    b->spans[0].k_start = 1;
}
static void last_token_without_span(mt_batch *b) {
    b->spans[0].q_len = b->spans[0].k_len = SEQ_LENGTH - 1, b->loss_mask[SEQ_LENGTH - 1] = 0;
}
static void without_spans(mt_batch *b) {
    b->num_spans = 0;
}

/* A caller's mistake in one micro-batch ends the step with an error that names it. */
static void a_bad_batch_is_refused(void **state) {
    static const bad_batch cases[] = {
        {"llama", longer_than_planned, "micro-batch 1: 129 tokens, and the model is planned for 1 to 128"},
        {"llama", label_outside, "micro-batch 1: the label of token 5 is 1048576, outside the vocabulary of"},
        {"llama", label_below, "micro-batch 1: the label of token 6 is -100, outside the vocabulary of"},
        {"llama", token_outside, "micro-batch 1: token 0 is 1048576, outside the vocabulary of"},
        {"llama", position_outside,
         "micro-batch 1: the position of token 3 is 32, and the model has positions 0 to 31"},
        {"gpt2", learned_position_outside, "micro-batch 1: the position of token 4 is 1048576"},
        {"llama", span_outside, "micro-batch 1: span 0, 32 queries from 0 and 32 keys from 1, is outside 32 tokens"},
        {"llama", last_token_without_span, "micro-batch 1: the spans have 31 queries for 32 tokens"},
        {"llama", without_spans, "micro-batch 1: 0 spans for 32 tokens"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f = open_family(cases[i].family, 1, 1, false);
        create_model(&f, &mt_grid_of_one);
        mt_run_state run = {0};
        mt_error error = {{0}};
        damaged_source from = {{&f, 0, 1, 0, 1}, &cases[i]};
        assert_int_equal(mt_train_step(f.model, &run, SEQUENCES, damaged_micro_batch, &from, &f.batch, NULL, &error),
                         -1);
        if (!strstr(error.text, cases[i].message)) fail_msg("'%s' instead of '%s'", error.text, cases[i].message);
        close_family(&f);
    }
}

static void mask_sixth_label(mt_batch *b) {
    b->labels[6] = -100, b->loss_mask[6] = 0;
}

/* -100, PyTorch's index of an ignored label. */
static void a_masked_label_may_be_outside_the_vocabulary(void **state) {
    static const bad_batch masked = {"llama", mask_sixth_label, ""};
    (void)state;
    fixture f = open_family(masked.family, 1, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {0};
    mt_error error;
    mt_metrics metrics;
    damaged_source from = {{&f, 0, 1, 0, 1}, &masked};
    if (mt_train_step(f.model, &run, SEQUENCES, damaged_micro_batch, &from, &f.batch, &metrics, &error) != 0)
        fail_msg("%s", error.text);
    assert_true(isfinite(metrics.loss) && metrics.tokens == TOKENS && isfinite(metrics.grad_norm));
    close_family(&f);
}

static void without_a_gpu(void **state) {
    (void)state;
    mt_error error;
    mt_cuda_open(0, &error);
    print_message("skipped on a GPU: %s\n", error.text);
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_logprobs_and_entropy_equal_transformers),
        cmocka_unit_test(every_gradient_equals_transformers),
        cmocka_unit_test(a_nan_in_a_parameter_reaches_the_logprobs),
        cmocka_unit_test(ten_steps_equal_pytorch_for_any_micro_batch_size),
        cmocka_unit_test(bf16_trains_to_within_two_percent_of_fp32),
        cmocka_unit_test(fp8_trains_to_within_five_percent_of_fp32_wherever_norms_stand),
        cmocka_unit_test(two_runs_repeat_bit_for_bit),
        cmocka_unit_test(unread_metrics_change_nothing),
        cmocka_unit_test(a_non_finite_loss_is_reported_with_its_step_within_two_steps),
        cmocka_unit_test(a_bad_batch_is_refused),
        cmocka_unit_test(a_masked_label_may_be_outside_the_vocabulary),
    };
    const struct CMUnitTest none[] = {cmocka_unit_test(without_a_gpu)};
    mt_error error;
    int failures = cmocka_run_group_tests_name("cpu", tests, NULL, NULL);
    backend = mt_cuda_open(0, &error);
    if (!backend) return failures + cmocka_run_group_tests_name("cuda", none, NULL, NULL);
    return failures + cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
}
