/* test_t5.c: tiny encoder-decoders equal Hugging Face transformers in float64: logits, every gradient, five steps; and
 * again on a GPU where one answers. */
// Sections of megatron.c: §8 §9g §10c §16 §20
#include "t5.h"

/* The relative error of logits and gradients; on a GPU as the suite golden has it. */
static double tolerance(void) {
    return backend == &mt_cpu_ops ? 1e-5 : 1e-4;
}

static void logits_equal_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        fixture f;
        open_model(&f, models[k], &mt_grid_of_one, SEQUENCES, "");
        float *logits = mt_malloc((int64_t)sizeof f.logits);
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        mt_model_forward(f.model, &f.batch, false);
        mt_model_read(f.model, NULL, NULL, logits);
        for (int i = 0; i < SEQUENCES * TARGETS * VOCABULARY; i++)
            if (!(fabs((double)logits[i] - f.logits[i]) <= tolerance() * (1 + fabs((double)f.logits[i]))))
                fail_msg("%s: logit %d is %.8f, expected %.8f", models[k], i, (double)logits[i], (double)f.logits[i]);
        free(logits);
        close_model(&f);
    }
}

static void every_gradient_equals_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        fixture f;
        mt_error error;
        mt_safetensors *reference;
        int64_t num_params, num_buckets, found = 0;
        open_model(&f, models[k], &mt_grid_of_one, SEQUENCES, "");
        assert_int_equal(mt_safetensors_open_folder(&reference, f.folder, "grads", &error), 0);
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        mt_model_forward(f.model, &f.batch, true);
        mt_model_backward(f.model);
        const mt_param *params = mt_model_params(f.model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
        for (int64_t i = 0; i < num_params; i++) {
            const mt_tensor_info *tensor = mt_safetensors_find(reference, params[i].hf_name);
            double distance = 0, norm = 0;
            if (!tensor) fail_msg("%s: no reference gradient of %s", models[k], params[i].hf_name);
            add_gradient_error(&f, &params[i], buckets[params[i].bucket].grads, tensor, &distance, &norm);
            if (!(sqrt(distance) <= tolerance() * sqrt(norm)))
                fail_msg("%s: gradient of %s is off by %g of its norm", models[k], params[i].hf_name,
                         sqrt(distance / norm));
            found++;
        }
        assert_int_equal(found, mt_safetensors_count(reference)); // each of them
        mt_safetensors_close(reference);
        close_model(&f);
    }
}

static void five_steps_equal_pytorch_for_any_micro_batch_size_and_recomputation(void **state) {
    static const char *const words[] = {
        "", " --recompute-granularity full", " --recompute-granularity full --recompute-num-layers 2",
        " --recompute-granularity full --recompute-method block --recompute-num-layers 4",
        " --recompute-granularity selective --recompute-modules layernorm mlp core_attn"};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            double losses[STEPS], norms[STEPS];
            train_five_steps(models[k], &mt_grid_of_one, i == 0 ? 4 : 1, words[i], losses, norms);
            assert_expected(models[k], words[i], losses, norms);
            train_five_steps(models[k], &mt_grid_of_one, 2, words[i], losses, norms);
            assert_expected(models[k], words[i], losses, norms);
        }
}

static void narrow_types_train_to_within_two_percent_of_fp32(void **state) {
    static const char *const words[] = {" --bf16", " --fp8-format hybrid", " --bf16 --fp8-format hybrid",
                                        " --bf16 --fp8-format e4m3 --fp8-recipe mxfp8"};
    const mt_limits *l = &backend->limits;
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        double losses[STEPS], norms[STEPS], reference[STEPS];
        train_five_steps(models[k], &mt_grid_of_one, 2, "", reference, norms);
        for (size_t n = 0; n < sizeof words / sizeof *words; n++) {
            bool fp8 = strstr(words[n], "fp8"), mxfp8 = strstr(words[n], "mxfp8"), bf16 = strstr(words[n], "bf16");
            if ((bf16 && l->no_bf16) || (fp8 && l->no_fp8) || (mxfp8 && l->no_mxfp8)) continue;
            train_five_steps(models[k], &mt_grid_of_one, 2, words[n], losses, norms);
            for (int i = 0; i < STEPS; i++)
                if (!(fabs(losses[i] - reference[i]) <= 0.02 * reference[i]))
                    fail_msg("%s%s step %d: loss %g, %g in fp32", models[k], words[n], i + 1, losses[i], reference[i]);
            assert_true(losses[STEPS - 1] != reference[STEPS - 1]); // they do round
        }
    }
}

static void greedy_text_equals_transformers_however_many_at_once(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (int64_t at_once = 1; at_once <= SEQUENCES; at_once += 3)
            assert_greedy(models[k], &mt_grid_of_one, "", at_once);
}

typedef struct bad_batch {
    void (*damage)(mt_batch *batch);
    const char *message;
} bad_batch;

static void without_inputs(mt_batch *b) {
    b->encoder.num_tokens = b->encoder.num_spans = 0;
}
static void with_too_many_inputs(mt_batch *b) {
    b->encoder.num_tokens = SEQUENCES * INPUTS + 1;
}
static void with_one_input_less(mt_batch *b) {
    b->encoder.num_tokens = b->encoder.spans[SEQUENCES - 1].q_start, b->encoder.num_spans = SEQUENCES - 1;
}
static void with_causal_inputs(mt_batch *b) {
    b->encoder.spans[1].causal = true;
}
static void with_a_gap(mt_batch *b) {
    b->encoder.spans[1].q_len--, b->encoder.spans[1].k_len--;
}
static void with_a_strange_token(mt_batch *b) {
    b->encoder.tokens[3] = VOCABULARY;
}

static void a_bad_batch_is_refused(void **state) {
    static const bad_batch cases[] = {
        {without_inputs, "0 tokens for the encoder, and the model is planned for 1 to 96"},
        {with_too_many_inputs, "97 tokens for the encoder, and the model is planned for 1 to 96"},
        {with_one_input_less, "sequence 3 has no tokens for the encoder; it has 3 sequences"},
        {with_causal_inputs, "span 1 of the encoder"},
        {with_a_gap, "tokens of the encoder; every token is in one span"},
        {with_a_strange_token, "token 3 of the encoder is 160, outside the vocabulary of 160"},
    };
    (void)state;
    fixture f;
    open_model(&f, "t5", &mt_grid_of_one, SEQUENCES, "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_error error = {{0}};
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        assert_int_equal(mt_batch_check(f.model, &f.batch, &error), 0);
        cases[i].damage(&f.batch);
        assert_int_equal(mt_batch_check(f.model, &f.batch, &error), -1);
        if (!strstr(error.text, cases[i].message)) fail_msg("'%s' instead of '%s'", error.text, cases[i].message);
    }
    close_model(&f);
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
        cmocka_unit_test(logits_equal_transformers),
        cmocka_unit_test(every_gradient_equals_transformers),
        cmocka_unit_test(five_steps_equal_pytorch_for_any_micro_batch_size_and_recomputation),
        cmocka_unit_test(narrow_types_train_to_within_two_percent_of_fp32),
        cmocka_unit_test(greedy_text_equals_transformers_however_many_at_once),
        cmocka_unit_test(a_bad_batch_is_refused),
    };
    const struct CMUnitTest none[] = {cmocka_unit_test(without_a_gpu)};
    mt_error error;
    int failures = cmocka_run_group_tests_name("t5", tests, NULL, NULL);
    backend = mt_cuda_open(0, &error);
    if (!backend) return failures + cmocka_run_group_tests_name("t5 on cuda", none, NULL, NULL);
    return failures + cmocka_run_group_tests_name("t5 on cuda", tests, NULL, NULL);
}
