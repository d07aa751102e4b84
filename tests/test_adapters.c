/* test_adapters.c: low-rank adapters equal peft's: log-probabilities, gradients, five steps, files; on every family
 * their gradients follow from those of the merged model. */
// Sections of megatron.c: §7 §8 §15c §16
#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/checkpoint/adapter.h"
#include "../data/checkpoint/adapter_merge.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/tensor_stream.h"
#include "golden.h"
#include "folder.h"

#define PEFT "tests/golden/tune/lora"

enum { PEFT_STEPS = 5 };

static fixture open_adapted(const char *family, const char *options) {
    more_options = options;
    fixture f = open_family(family, 4, 1, false);
    more_options = "";
    return f;
}

/* A value of a state as the bucket holds it, in fp32. */
static float *values_of(const fixture *f, const mt_param *param, bool gradient) {
    int64_t count;
    mt_bucket *b = &mt_model_buckets(f->model, &count)[param->bucket];
    return (gradient ? b->grads : (float *)b->params) + param->offset;
}

static double relative_error(const float *actual, const float *expected, int64_t n, double scale) {
    double distance = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = scale * (double)actual[i] - (double)expected[i];
        distance += d * d, norm += (double)expected[i] * (double)expected[i];
    }
    return distance == 0 ? 0 : sqrt(distance / norm); // 0 / 0: of an expert that no token visits
}

static void train_step(fixture *f, mt_run_state *run, mt_metrics *metrics) {
    mt_error error;
    source from = {f, run->iteration, 4, 0, 4};
    if (mt_train_step(f->model, run, 1, next_micro_batch, &from, &f->batch, metrics, &error) != 0)
        fail_msg("%s", error.text);
}

/* ---- golden numbers of peft */

static void logprobs_equal_peft(void **state) {
    (void)state;
    fixture f = open_adapted("llama", " --load-adapter " PEFT);
    create_model(&f, &mt_grid_of_one);
    float *expected = read_file(PEFT, "logprobs.f32", TOKENS * 4), logp[TOKENS];
    fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
    mt_model_forward(f.model, &f.batch, false);
    mt_model_read(f.model, logp, NULL, NULL);
    for (int t = 0; t < TOKENS; t++) assert_true(fabsf(logp[t] - expected[t]) <= 1e-5f * fabsf(expected[t]));
    free(expected);
    close_family(&f);
}

static void every_gradient_equals_peft(void **state) {
    (void)state;
    fixture f = open_adapted("llama", " --load-adapter " PEFT);
    mt_error error;
    mt_safetensors *reference;
    int64_t num_params, checked = 0;
    create_model(&f, &mt_grid_of_one);
    assert_int_equal(mt_safetensors_open_folder(&reference, PEFT, "grads", &error), 0);
    fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
    mt_model_forward(f.model, &f.batch, true);
    mt_model_backward(f.model);
    const mt_param *params = mt_model_params(f.model, &num_params);
    for (int64_t i = 0; i < num_params; i++) {
        const mt_tensor_info *tensor = mt_safetensors_find(reference, params[i].hf_name + strlen("base_model.model."));
        assert_int_equal(params[i].trained, mt_param_is_adapter(&params[i]));
        if (!params[i].trained) continue;
        assert_non_null(tensor);
        double off = relative_error(values_of(&f, &params[i], true), tensor->data, params[i].rows * params[i].cols,
                                    1.0 / TOKENS);
        if (!(off <= 1e-5)) fail_msg("the gradient of %s is off by %g", params[i].hf_name, off);
        checked++;
    }
    assert_int_equal(checked, mt_safetensors_count(reference));
    mt_safetensors_close(reference);
    close_family(&f);
}

static void five_steps_equal_peft(void **state) {
    (void)state;
    fixture f = open_adapted("llama", " --load-adapter " PEFT);
    mt_run_state run = {0};
    json_t *expected = json_load_file(PEFT "/expected.json", 0, NULL);
    assert_non_null(expected);
    create_model(&f, &mt_grid_of_one);
    for (size_t i = 0; i < PEFT_STEPS; i++) {
        mt_metrics metrics;
        train_step(&f, &run, &metrics);
        double loss = json_real_value(json_array_get(json_object_get(expected, "losses"), i));
        double norm = json_real_value(json_array_get(json_object_get(expected, "grad_norms"), i));
        if (!(fabs(metrics.loss - loss) <= 1e-5 * loss) || !(fabs(metrics.grad_norm - norm) <= 1e-5 * norm))
            fail_msg("step %d: loss %.9f, expected %.9f; norm %.9f, expected %.9f", (int)i + 1, metrics.loss, loss,
                     metrics.grad_norm, norm);
    }
    json_decref(expected);
    close_family(&f);
}

/* ---- adapters that differ from matrix to matrix */

/* Those of tests/golden/tune/patterns with a scale of 2 for all. A matrix without an adapter, and ranks above its own,
 * have zeros, which a step leaves zeros; all else moves. */
static void what_an_adapter_lacks_stays_zero(void **state) {
    (void)state;
    static const char config[] =
        "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"q_proj\", \"v_proj\", "
        "\"o_proj\", "
        "\"down_proj\"], \"layers_to_transform\": [0, 2], \"exclude_modules\": [\"layers.2.self_attn.o_proj\"], "
        "\"rank_pattern\": {\"model.layers.0.self_attn.q_proj\": 2, \"layers.\\\\d.mlp.down_proj\": 3}, "
        "\"alpha_pattern\": {\"model.layers.0.self_attn.q_proj\": 4, \"mlp.down_proj\": 6}}";
    char command[300];
    snprintf(command, sizeof command, "mkdir -p %s && cp tests/golden/tune/patterns/adapter_model.safetensors %s",
             at("even"), at("even"));
    assert_int_equal(system(command), 0);
    FILE *file = fopen(at("even/adapter_config.json"), "w");
    assert_non_null(file);
    assert_true(fputs(config, file) >= 0 && fclose(file) == 0);
    snprintf(command, sizeof command, " --load-adapter %s", at("even"));
    fixture f = open_adapted("llama", command);
    create_model(&f, &mt_grid_of_one);
    assert_true(f.options.stack.lora_rank == 4 && f.options.stack.lora_alpha == 8);
    int64_t num_params, checked = 0;
    const mt_param *params = mt_model_params(f.model, &num_params);
    float *before[256] = {NULL};
    for (int turn = 0; turn < 2; turn++) {
        mt_run_state run = {0};
        mt_metrics metrics;
        for (int64_t i = 0; i < num_params; i++) {
            const mt_param *p = &params[i];
            if (!mt_param_is_adapter(p)) continue;
            bool exists = p->layer % 2 == 0 && !(p->layer == 2 && p->adapts == MT_O);
            int64_t rank = !exists ? 0 : p->adapts == MT_DOWN ? 3 : p->adapts == MT_Q && p->layer == 0 ? 2 : 4;
            const float *values = values_of(&f, p, false);
            for (int64_t k = 0; k < p->rows * p->cols; k++) {
                bool is_zero = (p->role == MT_LORA_A ? k / p->cols : k % p->cols) >= rank;
                if (is_zero != (values[k] == 0)) fail_msg("%s[%d] is %g", p->hf_name, (int)k, (double)values[k]);
                if (turn && !is_zero) assert_true(values[k] != before[i][k]);
                checked += turn;
            }
            if (turn == 0)
                before[i] = memcpy(mt_malloc(p->rows * p->cols * 4), values, (size_t)(p->rows * p->cols) * 4);
            else
                free(before[i]);
        }
        if (turn == 0) train_step(&f, &run, &metrics);
    }
    assert_true(checked > 0 && num_params <= 256);
    close_family(&f);
}

/* ---- every family: the merged model, which other suites compare with transformers, gives output and gradients */

#define ALL_LINEAR " --lora-rank 3 --lora-alpha 6 --lora-target all-linear"

/* Values of about `size`, a function of the parameter's number and the element's. */
static void fill_adapters(const fixture *f, float size) {
    int64_t num_params;
    const mt_param *params = mt_model_params(f->model, &num_params);
    for (int64_t i = 0; i < num_params; i++) {
        float *values = values_of(f, &params[i], false);
        for (int64_t k = 0; mt_param_is_adapter(&params[i]) && k < params[i].rows * params[i].cols; k++)
            values[k] = size * sinf((float)(i * 131 + k * 7 + 1));
    }
}

/* The row of an adapter's matrix in another table, or of its other half. */
static const mt_param *find_param(const mt_param *params, int64_t count, const mt_param *of, mt_role role) {
    for (int64_t i = 0; i < count; i++)
        if (params[i].role == role && params[i].layer == of->layer && params[i].expert == of->expert &&
            (!mt_param_is_adapter(&params[i]) || params[i].adapts == of->adapts))
            return &params[i];
    return NULL;
}

/* out[rows, cols] = factor a[rows, inner] b[inner, cols], either transposed. */
static void multiply(float *out, const float *a, bool a_transposed, const float *b, int64_t rows, int64_t cols,
                     int64_t inner, double factor) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            double sum = 0;
            for (int64_t k = 0; k < inner; k++)
                sum += (double)(a_transposed ? a[k * rows + r] : a[r * inner + k]) * (double)b[k * cols + c];
            out[r * cols + c] += (float)(factor * sum);
        }
}

/* y = x (W + s B A)^T: dB = s dW A^T and dA = s B^T dW. GPT-2's q, k and v have one A. */
static void check_gradients(const fixture *adapted, const fixture *merged, const float *const *saved,
                            const char *family) {
    int64_t num_params, num_merged;
    const mt_param *params = mt_model_params(adapted->model, &num_params);
    const mt_param *others = mt_model_params(merged->model, &num_merged);
    for (int64_t i = 0; i < num_params; i++) {
        const mt_param *p = &params[i];
        if (!mt_param_is_adapter(p)) continue;
        float *expected = mt_calloc(p->rows * p->cols * 4);
        for (int64_t k = 0; k < num_params; k++) { // the other half, or halves that share A
            const mt_param *other = &params[k], *b = p->role == MT_LORA_B ? p : other;
            if (!mt_param_is_adapter(other) || other->role == p->role || other->layer != p->layer ||
                other->expert != p->expert)
                continue;
            bool shares = strncmp(other->hf_name, p->hf_name, strlen(p->hf_name) - strlen("A.weight")) == 0;
            if (!shares) continue;
            const float *dw = values_of(merged, find_param(others, num_merged, b, b->adapts), true);
            if (p->role == MT_LORA_B) { // dw[rows, K], A[r, K] -> [rows, r]
                for (int64_t r = 0; r < p->rows; r++)
                    for (int64_t c = 0; c < p->cols; c++) {
                        double sum = 0;
                        for (int64_t n = 0; n < other->cols; n++)
                            sum += (double)dw[r * other->cols + n] * (double)saved[k][c * other->cols + n];
                        expected[r * p->cols + c] = (float)(2 * sum);
                    }
            } else { // B[rows, r], dw[rows, K] -> [r, K]
                multiply(expected, saved[k], true, dw, p->rows, p->cols, other->rows, 2);
            }
        }
        double off = relative_error(values_of(adapted, p, true), expected, p->rows * p->cols, 1);
        if (!(off <= 1e-4)) fail_msg("%s: the gradient of %s is off by %g", family, p->hf_name, off);
        free(expected);
    }
}

static void adapters_equal_the_merged_model_on_every_family(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        fixture adapted = open_adapted(families[k], ALL_LINEAR), merged = open_adapted(families[k], "");
        int64_t num_params, num_merged, vocabulary = adapted.options.stack.vocab_size;
        float *logits[2] = {mt_malloc(TOKENS * vocabulary * 4), mt_malloc(TOKENS * vocabulary * 4)};
        create_model(&adapted, &mt_grid_of_one);
        create_model(&merged, &mt_grid_of_one);
        fill_adapters(&adapted, 0.2f);
        fill_batch(&adapted, 0, 0, SEQUENCES, &adapted.batch);
        mt_model_forward(adapted.model, &adapted.batch, false);
        mt_model_read(adapted.model, NULL, NULL, logits[0]);
        mt_model_forward(adapted.model, &adapted.batch, true);
        mt_model_backward(adapted.model);
        const mt_param *params = mt_model_params(adapted.model, &num_params);
        const mt_param *others = mt_model_params(merged.model, &num_merged);
        float **saved = mt_calloc(num_params * (int64_t)sizeof *saved);
        for (int64_t i = 0; i < num_params; i++) {
            int64_t bytes = params[i].rows * params[i].cols * 4;
            saved[i] = memcpy(mt_malloc(bytes), values_of(&adapted, &params[i], false), (size_t)bytes);
        }
        mt_model_merge_adapters(adapted.model);
        for (int64_t i = 0; i < num_params; i++) {
            if (mt_param_is_adapter(&params[i])) continue;
            const mt_param *to = find_param(others, num_merged, &params[i], params[i].role);
            memcpy(values_of(&merged, to, false), values_of(&adapted, &params[i], false),
                   (size_t)(to->rows * to->cols * 4));
        }
        for (int turn = 0; turn < 2; turn++) { // the merged model, and the one whose B are zero now
            fixture *f = turn ? &adapted : &merged;
            mt_model_forward(f->model, &adapted.batch, false);
            mt_model_read(f->model, NULL, NULL, logits[1]);
            double off = relative_error(logits[1], logits[0], TOKENS * vocabulary, 1);
            if (!(off <= 1e-5)) fail_msg("%s: the merged logits are off by %g", families[k], off);
        }
        mt_model_forward(merged.model, &adapted.batch, true);
        mt_model_backward(merged.model);
        check_gradients(&adapted, &merged, (const float *const *)saved, families[k]);
        for (int64_t i = 0; i < num_params; i++) free(saved[i]);
        free(saved), free(logits[0]), free(logits[1]);
        close_family(&adapted);
        close_family(&merged);
    }
}

/* ---- a table of adapters */

enum { PROMPTS = 3, PROMPT = 9, WRITTEN = 8, SLOTS = 4 };

/* Every adapter's values are a function of the adapter, the matrix and the element, so that the padded rows and columns
 * of a larger rank hold values too. */
static void fill_by_place(const fixture *f, int64_t number) {
    int64_t num_params;
    const mt_param *params = mt_model_params(f->model, &num_params);
    for (const mt_param *p = params; p < params + num_params; p++) {
        float *values = values_of(f, p, false);
        int64_t key = number * 7 + p->layer * 13 + (int64_t)p->adapts * 29 + (p->role == MT_LORA_B ? 5 : 0);
        for (int64_t row = 0; mt_param_is_adapter(p) && row < p->rows; row++)
            for (int64_t col = 0; col < p->cols; col++)
                values[row * p->cols + col] = 0.3f * sinf((float)(key + row * 31 + col * 3));
    }
}

static void create_for_generation(fixture *f, int64_t num_adapters) {
    mt_error error;
    mt_run_state run = {0};
    mt_model_plan plan = {.page_rows = 4, .max_tokens = 12, .num_adapters = num_adapters};
    mt_plan_generation(&plan, SLOTS, PROMPT + WRITTEN, 0);
    if (mt_model_create(&f->model, &f->options.stack, &mt_grid_of_one, backend, &plan, &error) != 0)
        fail_msg("%s", error.text);
    if (mt_checkpoint_load(f->model, &f->options, &run, f->folder, &error) != 0) fail_msg("%s", error.text);
}

/* Sequence i of `count` has the adapter i % (count / PROMPTS); its prompt is shared by all adapters. */
static void generate(const fixture *f, mt_sequence *sequences, int64_t count) {
    const mt_sampling sampling = {.top_p = 1, .logprobs = true};
    mt_error error;
    int64_t left = count;
    for (int64_t i = 0; i < count; i++) {
        mt_sequence *s = &sequences[i];
        *s = (mt_sequence){.id = i, .num_prompt = PROMPT, .num_tokens = PROMPT, .max_tokens = PROMPT + WRITTEN};
        s->slot = -1, s->adapter = i % (count / PROMPTS);
        s->tokens = mt_calloc(s->max_tokens * 4), s->logps = mt_calloc(WRITTEN * 4);
        s->sampled_logps = mt_calloc(WRITTEN * 4);
        memcpy(s->tokens, f->tokens + i / (count / PROMPTS) * (SEQ_LENGTH + 1), PROMPT * 4);
    }
    mt_generator *generator = mt_generator_create(f->model, &sampling, &(mt_stops){.count = 0});
    while (left > 0)
        if ((left = mt_generator_step(generator, sequences, count, &error)) < 0) fail_msg("%s", error.text);
    mt_generator_destroy(generator);
}

static void free_sequences(mt_sequence *sequences, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        free(sequences[i].tokens), free(sequences[i].logps), free(sequences[i].sampled_logps);
}

/* Sequences of the base and of two adapters of different ranks, scales and matrices in one batch, with the same
 * prompts, over few slots of the cache: each is that of a model with its adapter alone. */
static void check_table(const char *family, const char *targets, const char *some) {
    char options[3][256];
    snprintf(options[0], 256, " --lora-rank 4 --lora-alpha 4 --lora-target %s", targets); // holds both
    snprintf(options[1], 256, " --lora-rank 4 --lora-alpha 6 --lora-target %s", targets);
    snprintf(options[2], 256, " --lora-rank 3 --lora-alpha 7 --lora-target %s", some);
    fixture table = open_adapted(family, options[0]);
    mt_sequence mixed[3 * PROMPTS], alone[PROMPTS];
    create_for_generation(&table, 2);
    fixture each[3] = {open_adapted(family, ""), open_adapted(family, options[1]), open_adapted(family, options[2])};
    for (int64_t n = 1; n < 3; n++) {
        fill_by_place(&table, n);
        mt_model_keep_adapter(table.model, n - 1, &each[n].options.stack);
    }
    generate(&table, mixed, 3 * PROMPTS);
    int64_t differ = 0;
    for (int64_t n = 0; n < 3; n++) {
        create_for_generation(&each[n], 0);
        fill_by_place(&each[n], n);
        generate(&each[n], alone, PROMPTS);
        for (int64_t i = 0; i < PROMPTS; i++) {
            const mt_sequence *own = &mixed[i * 3 + n];
            for (int64_t t = 0; t < WRITTEN; t++) {
                if (own->tokens[PROMPT + t] != alone[i].tokens[PROMPT + t])
                    fail_msg("%s: adapter %d, prompt %d: token %d differs", family, (int)n, (int)i, (int)t);
                double off = fabs((double)own->logps[t] - (double)alone[i].logps[t]);
                if (!(off <= 1e-5 * fmax(1, fabs((double)alone[i].logps[t]))))
                    fail_msg("%s: adapter %d, prompt %d: log-probability %d is off by %g", family, (int)n, (int)i,
                             (int)t, off);
            }
            differ += n > 0 && fabs((double)own->logps[0] - (double)mixed[i * 3].logps[0]) > 1e-3;
        }
        free_sequences(alone, PROMPTS);
    }
    assert_in_range(differ, PROMPTS, 2 * PROMPTS); // the adapters have an effect
    free_sequences(mixed, 3 * PROMPTS);
    close_family(&table);
    for (int n = 0; n < 3; n++) close_family(&each[n]);
}

static void sequences_of_a_table_are_those_of_one_adapter_alone(void **state) {
    (void)state;
    check_table("llama", "all-linear", "q_proj,v_proj,down_proj");
    check_table("gpt2", "all-linear", "c_attn,mlp.c_proj"); // q, k and v share A
    check_table("deepseek_v3_dense", "all-linear", "kv_b_proj,o_proj");
    check_table("nemotron_h", "q_proj,k_proj,v_proj,o_proj,in_proj,out_proj", "in_proj,k_proj"); // states
}

/* ---- switched off */

/* A pass with the adapters switched off has the logits of the base, bit for bit, and leaves the gradients of the next
 * one as they are. */
static void check_switched_off(const char *family, const char *options, const char *of_base) {
    fixture base = open_adapted(family, of_base), switched = open_adapted(family, options);
    fixture adapted = open_adapted(family, options), *all[] = {&base, &switched, &adapted};
    int64_t num_params, bytes = TOKENS * base.options.stack.vocab_size * 4;
    float *logits[] = {mt_malloc(bytes), mt_malloc(bytes), mt_malloc(bytes)};
    for (int i = 0; i < 3; i++) {
        create_model(all[i], &mt_grid_of_one);
        fill_batch(all[i], 0, 0, SEQUENCES, &all[i]->batch);
        if (!all[i]->options.load_adapter) fill_adapters(all[i], 0.2f);
        mt_model_use_adapters(all[i]->model, i != 1);
        mt_model_forward(all[i]->model, &all[i]->batch, false);
        mt_model_read(all[i]->model, NULL, NULL, logits[i]);
        mt_model_use_adapters(all[i]->model, true);
    }
    if (memcmp(logits[0], logits[1], (size_t)bytes) != 0) fail_msg("%s%s: not the logits of the base", family, options);
    assert_memory_not_equal(logits[0], logits[2], (size_t)bytes);
    for (int i = 1; i < 3; i++) {
        mt_model_forward(all[i]->model, &all[i]->batch, true);
        mt_model_backward(all[i]->model);
    }
    const mt_param *params = mt_model_params(adapted.model, &num_params);
    for (int64_t i = 0; i < num_params; i++) {
        size_t count = (size_t)(params[i].rows * params[i].cols);
        if (!params[i].trained) continue;
        if (memcmp(values_of(&switched, &params[i], true), values_of(&adapted, &params[i], true), count * 4) != 0)
            fail_msg("%s%s: another gradient of %s", family, options, params[i].hf_name);
    }
    for (int i = 0; i < 3; i++) {
        free(logits[i]);
        close_family(all[i]);
    }
}

static void switched_off_adapters_leave_no_trace(void **state) {
    (void)state;
    static const char *const types[] = {" --lora-dropout 0.2", " --bf16",
                                        " --bf16 --fp8-format hybrid --fp8-recipe delayed",
                                        " --bf16 --fp8-format e4m3 --fp8-recipe blockwise"};
    for (int k = 0; k < NUM_FAMILIES; k++) check_switched_off(families[k], ALL_LINEAR, "");
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        char options[256];
        snprintf(options, sizeof options, " --load-adapter " PEFT "%s", types[i]);
        check_switched_off("llama", options, i > 0 ? types[i] : "");
    }
}

/* Two files hold the same tensors. */
static void assert_same_tensors(const char *folder, const char *other, const char *stem) {
    mt_safetensors *a, *b;
    mt_error error;
    assert_int_equal(mt_safetensors_open_folder(&a, folder, stem, &error), 0);
    assert_int_equal(mt_safetensors_open_folder(&b, other, stem, &error), 0);
    assert_int_equal(mt_safetensors_count(a), mt_safetensors_count(b));
    for (int64_t i = 0; i < mt_safetensors_count(a); i++) {
        const mt_tensor_info *x = mt_safetensors_get(a, i), *y = mt_safetensors_find(b, x->name);
        if (!y || x->dtype != y->dtype || x->bytes != y->bytes || memcmp(x->data, y->data, (size_t)x->bytes) != 0)
            fail_msg("%s of %s is another one in %s", x->name, folder, other);
    }
    mt_safetensors_close(a);
    mt_safetensors_close(b);
}

/* ---- a base in fp8 */

#define BASE_IN_FP8 ALL_LINEAR " --lora-base-dtype fp8"

/* The nearest number of e4m3, ties to even. */
static double nearest_e4m3(double x) {
    int exponent;
    if (x == 0) return x;
    frexp(x, &exponent); // |x| in [2^(exponent - 1), 2^exponent)
    double step = ldexp(1, (exponent - 1 < -6 ? -6 : exponent - 1) - 3);
    return fmax(-448, fmin(448, step * nearbyint(x / step)));
}

/* Rounds values[R, C] in place, with a power of two as scale for each 128 x 128. */
static void round_blocks(float *values, int64_t R, int64_t C) {
    for (int64_t r0 = 0; r0 < R; r0 += 128)
        for (int64_t c0 = 0; c0 < C; c0 += 128) {
            double amax = 0;
            for (int64_t r = r0; r < mt_min(r0 + 128, R); r++)
                for (int64_t c = c0; c < mt_min(c0 + 128, C); c++) amax = fmax(amax, fabs((double)values[r * C + c]));
            int scale = amax > 0 ? ilogb(448 / amax) : 0;
            for (int64_t r = r0; r < mt_min(r0 + 128, R); r++)
                for (int64_t c = c0; c < mt_min(c0 + 128, C); c++)
                    values[r * C + c] = (float)ldexp(nearest_e4m3(ldexp((double)values[r * C + c], scale)), -scale);
        }
}

/* Both models have the same logits and gradients of adapters, bit for bit. */
static void assert_same_passes(fixture *a, fixture *b, const char *what) {
    int64_t num_params, bytes = TOKENS * a->options.stack.vocab_size * 4;
    float *logits[] = {mt_malloc(bytes), mt_malloc(bytes)};
    fixture *both[] = {a, b};
    for (int i = 0; i < 2; i++) {
        fill_batch(both[i], 0, 0, SEQUENCES, &both[i]->batch);
        mt_model_forward(both[i]->model, &both[i]->batch, true);
        mt_model_backward(both[i]->model);
        mt_model_forward(both[i]->model, &both[i]->batch, false);
        mt_model_read(both[i]->model, NULL, NULL, logits[i]);
    }
    if (memcmp(logits[0], logits[1], (size_t)bytes) != 0)
        fail_msg("%s: the logits are off by %g", what, relative_error(logits[1], logits[0], bytes / 4, 1));
    const mt_param *params = mt_model_params(a->model, &num_params);
    for (int64_t i = 0; i < num_params; i++) {
        size_t count = (size_t)(params[i].rows * params[i].cols);
        if (!params[i].trained) continue;
        if (memcmp(values_of(a, &params[i], true), values_of(b, &params[i], true), count * 4) != 0)
            fail_msg("%s: another gradient of %s", what, params[i].hf_name);
    }
    free(logits[0]), free(logits[1]);
}

static void a_base_in_fp8_is_one_whose_matrices_were_rounded(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        fixture rounded = open_adapted(families[k], ALL_LINEAR), coded = open_adapted(families[k], BASE_IN_FP8);
        int64_t num_params, count = 0;
        create_model(&rounded, &mt_grid_of_one);
        create_model(&coded, &mt_grid_of_one);
        const mt_param *params = mt_model_params(coded.model, &num_params);
        for (int64_t i = 0; i < num_params; i++) {
            const mt_param *p = &params[i];
            bool is_narrow = p->role >= MT_KDA_F_A && p->role <= MT_KDA_G_B; // as in products in fp8
            if (p->can_adapt && !p->in_fp8 && !is_narrow) fail_msg("%s: %s is not in fp8", families[k], p->hf_name);
            assert_false(p->in_fp8 && (p->is_vector || p->trained || p->layer < 0));
            if (!p->in_fp8) continue;
            round_blocks(values_of(&rounded, p, false), p->rows, p->cols); // both tables are one
            count++;
        }
        assert_true(count > 0);
        fill_adapters(&rounded, 0.2f);
        fill_adapters(&coded, 0.2f);
        assert_same_passes(&rounded, &coded, families[k]);
        close_family(&rounded);
        close_family(&coded);
    }
}

/* The values of a base in fp8 as the base of another model, in its type. */
static void copy_base(const fixture *to, const fixture *coded) {
    int64_t num_params;
    const mt_param *params = mt_model_params(coded->model, &num_params);
    const mt_param *others = mt_model_params(to->model, &num_params);
    for (int64_t i = 0; i < num_params; i++) {
        int64_t n = params[i].rows * params[i].cols;
        mt_shard shard = mt_state_shard(to->model, &others[i], MT_STATE_WEIGHTS);
        if (!params[i].in_fp8) continue;
        float *values = mt_malloc(n * 4);
        uint16_t *halves = mt_malloc(n * 2);
        mt_state_read(coded->model, &params[i], MT_STATE_WEIGHTS, 0, values, n);
        for (int64_t e = 0; e < n && shard.dtype != MT_F32; e++) halves[e] = mt_f32_to_half(values[e], shard.dtype);
        mt_shard_write(to->model, &shard, others[i].offset, shard.dtype == MT_F32 ? (void *)values : halves, n);
        free(values), free(halves);
    }
}

static void products_of_every_type_read_a_base_in_fp8(void **state) {
    (void)state;
    static const struct {
        const char *family, *type;
    } rows[] = {{"llama", " --bf16"},
                {"llama", " --fp16 --accumulate-allreduce-grads-in-fp32"},
                {"gpt2", " --bf16"},
                {"mixtral", " --bf16"},
                {"llama", " --fp8-format e4m3 --fp8-recipe blockwise"},
                {"llama", " --bf16 --fp8-format hybrid --fp8-recipe delayed"},
                {"llama", " --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"},
                {"qwen3_moe", " --bf16 --fp8-format e4m3 --fp8-recipe mxfp8"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char options[256];
        snprintf(options, sizeof options, ALL_LINEAR "%s", rows[i].type);
        fixture rounded = open_adapted(rows[i].family, options);
        snprintf(options, sizeof options, BASE_IN_FP8 "%s", rows[i].type);
        fixture coded = open_adapted(rows[i].family, options);
        create_model(&rounded, &mt_grid_of_one);
        create_model(&coded, &mt_grid_of_one);
        copy_base(&rounded, &coded);
        assert_same_passes(&rounded, &coded, rows[i].type);
        close_family(&rounded);
        close_family(&coded);
    }
}

/* Both as tensors of a folder and of a stream. */
static void a_base_in_fp8_is_saved_and_streamed_as_its_values(void **state) {
    (void)state;
    static const char *const cases[] = {"llama", "gpt2", "mixtral"};
    for (int k = 0; k < 3; k++) {
        fixture rounded = open_adapted(cases[k], ALL_LINEAR), coded = open_adapted(cases[k], BASE_IN_FP8);
        mt_checksums sums = {0};
        mt_error error;
        mt_tensor_stream *stream;
        mt_whole_tensor tensor;
        mt_safetensors *set;
        int64_t count = 0;
        char names[2][32];
        for (int i = 0; i < 2; i++) {
            fixture *f = i ? &coded : &rounded;
            create_model(f, &mt_grid_of_one);
            if (i == 1) copy_base(&rounded, &coded);
        }
        for (int i = 0; i < 2; i++) {
            snprintf(names[i], sizeof names[i], "%s_%s", cases[k], i ? "coded" : "rounded");
            assert_int_equal(mkdir(at(names[i]), 0700), 0);
            mt_model *model = i ? coded.model : rounded.model;
            if (mt_safetensors_save_folder(model, at(names[i]), "model", INT64_MAX, "--save", &sums, &error) != 0)
                fail_msg("%s", error.text);
        }
        char *folder = mt_strdup(at(names[0]));
        assert_same_tensors(folder, at(names[1]), "model");
        assert_int_equal(mt_safetensors_open_folder(&set, folder, "model", &error), 0);
        assert_int_equal(mt_tensor_stream_open(&stream, coded.model, MT_STREAM_WEIGHTS, 0, &error), 0);
        while (mt_tensor_stream_next(stream, &tensor)) {
            const mt_tensor_info *saved = mt_safetensors_find(set, tensor.name);
            assert_non_null(saved);
            assert_int_equal(saved->bytes, tensor.count * 4);
            assert_memory_equal(saved->data, tensor.values, (size_t)saved->bytes);
            count++;
        }
        assert_int_equal(count, mt_safetensors_count(set));
        mt_tensor_stream_close(stream);
        mt_safetensors_close(set);
        mt_checksums_free(&sums);
        free(folder);
        close_family(&rounded);
        close_family(&coded);
    }
}

static int64_t allocated;

static void *count_alloc(int64_t bytes) {
    allocated += bytes;
    return mt_cpu_ops.memory_alloc(bytes);
}

static void *count_alloc_ordered(int64_t bytes, mt_stream *stream) {
    allocated += bytes;
    return mt_cpu_ops.memory_alloc_ordered(bytes, stream);
}

static void a_base_in_fp8_takes_the_bytes_of_its_plan(void **state) {
    (void)state;
    static const char *const types[] = {" --bf16", " --bf16 --fp8-format e4m3 --fp8-recipe blockwise"};
    mt_ops counting = mt_cpu_ops;
    counting.memory_alloc = count_alloc, counting.memory_alloc_ordered = count_alloc_ordered;
    for (int k = 0; k < 2; k++) {
        char options[256];
        int64_t num_params, expected = 0, slack = 0, largest = 0;
        mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
        mt_error error;
        snprintf(options, sizeof options, BASE_IN_FP8 "%s", types[k]);
        fixture f = open_adapted("llama", options);
        allocated = 0;
        if (mt_model_create(&f.model, &f.options.stack, &mt_grid_of_one, &counting, &plan, &error) != 0)
            fail_msg("%s", error.text);
        assert_int_equal(allocated, mt_model_planned_bytes(f.model, MT_PLAN_TOTAL));
        const mt_param *params = mt_model_params(f.model, &num_params);
        for (int64_t i = 0; i < num_params; i++) {
            int64_t n = params[i].rows * params[i].cols;
            bool is_base = params[i].is_linear && params[i].layer >= 0 && !params[i].trained;
            expected += is_base ? n + 4 * 4 : 2 * n; // a matrix is a block, whose row of scales has 4
            slack += 2 * 256;
            largest = is_base ? mt_max(largest, n) : largest;
        }
        assert_in_range(mt_model_planned_bytes(f.model, MT_PLAN_WEIGHTS), expected, expected + slack);
        assert_in_range(mt_model_planned_bytes(f.model, MT_PLAN_FP8), 2 * largest, INT64_MAX); // values of one matrix
        close_family(&f);
    }
}

/* ---- files */

static void a_checkpoint_is_a_folder_of_peft(void **state) {
    (void)state;
    fixture f = open_adapted("llama", " --load-adapter " PEFT);
    mt_run_state run = {0};
    mt_error error;
    create_model(&f, &mt_grid_of_one);
    if (mt_checkpoint_save(f.model, &f.options, &run, at("peft"), NULL, NULL, &error) != 0) fail_msg("%s", error.text);
    assert_same_tensors(PEFT, at("peft/iter_0000000"), "adapter_model");
    assert_false(mt_folder_has(at("peft/iter_0000000"), "model.safetensors"));
    assert_false(mt_folder_has(at("peft/iter_0000000"), "config.json"));
    assert_true(mt_folder_has(at("peft"), "adapter_config.json")); // a link into the latest
    json_t *config = json_load_file(at("peft/adapter_config.json"), 0, NULL);
    assert_string_equal(json_string_value(json_object_get(config, "peft_type")), "LORA");
    assert_int_equal(json_integer_value(json_object_get(config, "r")), 4);
    assert_true(json_number_value(json_object_get(config, "lora_alpha")) == 8);
    assert_int_equal(json_array_size(json_object_get(config, "target_modules")), 7);
    json_decref(config);
    close_family(&f);
}

static void a_run_continues_bit_for_bit(void **state) {
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        double losses[PEFT_STEPS][2];
        mt_error error;
        char options[1024];
        const char *folder = at(bf16 ? "resumed_bf16" : "resumed");
        for (int turn = 0; turn < 2; turn++) {
            snprintf(options, sizeof options,
                     " --lora-rank 4 --lora-target q_proj v_proj,down_proj --lora-dropout 0.2"
                     "%s%s%s",
                     bf16 ? " --bf16" : "", turn ? " --load-adapter " : "", turn ? folder : "");
            fixture f = open_adapted("llama", options);
            mt_run_state run = {0};
            if (mt_model_create(
                    &f.model, &f.options.stack, &mt_grid_of_one, backend,
                    &(mt_model_plan){
                        .max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true},
                    &error) != 0 ||
                mt_checkpoint_load(f.model, &f.options, &run, f.folder, &error) != 0)
                fail_msg("%s", error.text);
            assert_int_equal(run.iteration, turn ? 2 : 0);
            while (run.iteration < PEFT_STEPS) {
                mt_metrics metrics;
                train_step(&f, &run, &metrics);
                losses[run.iteration - 1][turn] = metrics.loss;
                if (turn == 0 && run.iteration == 2 &&
                    mt_checkpoint_save(f.model, &f.options, &run, folder, NULL, NULL, &error) != 0)
                    fail_msg("%s", error.text);
            }
            close_family(&f);
        }
        for (int i = 2; i < PEFT_STEPS; i++) assert_true(losses[i][0] == losses[i][1]);
        assert_true(losses[2][0] != losses[3][0]);
    }
}

static void a_merged_folder_is_a_whole_model(void **state) {
    (void)state;
    mt_error error;
    mt_run_state ignored;
    fixture f = open_adapted("llama", " --load-adapter " PEFT), whole = open_adapted("llama", "");
    float *expected = read_file(PEFT, "logprobs.f32", TOKENS * 4), logp[TOKENS];
    create_model(&f, &mt_grid_of_one);
    create_model(&whole, &mt_grid_of_one);
    f.options.merge_adapter = mt_strdup(at("merged"));
    if (mt_adapter_merge(f.model, &f.options, NULL, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(mt_adapter_merge(f.model, &f.options, NULL, &error), -1); // the folder holds a model now
    if (mt_checkpoint_load(whole.model, &whole.options, &ignored, at("merged"), &error) != 0)
        fail_msg("%s", error.text);
    fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
    mt_model_forward(whole.model, &f.batch, false);
    mt_model_read(whole.model, logp, NULL, NULL);
    for (int t = 0; t < TOKENS; t++) assert_true(fabsf(logp[t] - expected[t]) <= 1e-5f * fabsf(expected[t]));
    free(expected);
    close_family(&f);
    close_family(&whole);
}

/* ---- the plan, initial values */

static void a_frozen_base_has_neither_gradients_nor_optimizer_state(void **state) {
    (void)state;
    static const char *const shards[] = {"no_shard", "optim_grads_params"};
    for (int k = 0; k < 2; k++) {
        char options[256];
        int64_t num_params, adapters = 0, base = 0;
        snprintf(options, sizeof options,
                 " --bf16 --lora-rank 4 --lora-target q_proj,v_proj "
                 "--data-parallel-sharding-strategy %s",
                 shards[k]);
        fixture f = open_adapted("llama", options);
        create_model(&f, &mt_grid_of_one);
        const mt_param *params = mt_model_params(f.model, &num_params);
        for (int64_t i = 0; i < num_params; i++)
            *(params[i].trained ? &adapters : &base) += params[i].rows * params[i].cols;
        assert_int_equal(adapters, 4 * 4 * (32 + 32 + 32 + 16));
        int64_t slack = 1 << 13; // alignment
        int64_t weights = mt_model_planned_bytes(f.model, MT_PLAN_WEIGHTS);
        int64_t gradients = mt_model_planned_bytes(f.model, MT_PLAN_GRADIENTS);
        int64_t optimizer = mt_model_planned_bytes(f.model, MT_PLAN_OPTIMIZER);
        assert_in_range(weights, 2 * (base + adapters), 2 * (base + adapters) + slack);
        assert_in_range(gradients, 4 * adapters, 4 * adapters + slack);
        assert_in_range(optimizer, 12 * adapters, 12 * adapters + slack);
        close_family(&f);
    }
}

static void a_new_adapter_changes_nothing_and_a_has_the_variance_of_peft(void **state) {
    (void)state;
    fixture f = open_adapted("llama", ALL_LINEAR);
    int64_t num_params, count = 0;
    double sum = 0;
    create_model(&f, &mt_grid_of_one);
    const mt_param *params = mt_model_params(f.model, &num_params);
    for (int64_t i = 0; i < num_params; i++) {
        const float *values = values_of(&f, &params[i], false);
        for (int64_t k = 0; k < params[i].rows * params[i].cols; k++) {
            if (params[i].role == MT_LORA_B) assert_true(values[k] == 0);
            if (params[i].role != MT_LORA_A) continue;
            sum += (double)values[k] * (double)values[k] * 3 * (double)params[i].whole_cols, count++;
        }
    }
    assert_true(fabs(sum / (double)count - 1) < 0.1);
    float *expected = read_file(f.folder, "logprobs.f32", TOKENS * 4), logp[TOKENS];
    fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
    mt_model_forward(f.model, &f.batch, false);
    mt_model_read(f.model, logp, NULL, NULL);
    for (int t = 0; t < TOKENS; t++) assert_true(fabsf(logp[t] - expected[t]) <= 1e-4f);
    free(expected);
    close_family(&f);
}

static void training_changes_adapters_only(void **state) {
    (void)state;
    fixture f = open_adapted("deepseek_v3", ALL_LINEAR " --moe-router-bias-update-rate 0.1");
    int64_t num_params;
    mt_run_state run = {0};
    mt_metrics metrics;
    create_model(&f, &mt_grid_of_one);
    const mt_param *params = mt_model_params(f.model, &num_params);
    float **before = mt_calloc(num_params * (int64_t)sizeof *before);
    for (int64_t i = 0; i < num_params; i++) {
        int64_t bytes = params[i].rows * params[i].cols * 4;
        before[i] = memcpy(mt_malloc(bytes), values_of(&f, &params[i], false), (size_t)bytes);
    }
    for (int i = 0; i < 2; i++) train_step(&f, &run, &metrics);
    for (int64_t i = 0; i < num_params; i++) {
        bool same =
            memcmp(before[i], values_of(&f, &params[i], false), (size_t)(params[i].rows * params[i].cols * 4)) == 0;
        if (same != !mt_param_is_adapter(&params[i])) fail_msg("%s %s", params[i].hf_name, same ? "stays" : "changes");
        free(before[i]);
    }
    free(before);
    close_family(&f);
}

/* ---- refusals */

static void assert_refused(const char *words, const char *part) {
    mt_run_options options = {0};
    mt_error error = {{0}};
    char line[1024], *arguments[64];
    int count = 0;
    snprintf(line, sizeof line,
             "train --load tests/golden/hf/llama --tokens-file tests/golden/hf/llama/tokens.i32 "
             "--seq-length 32 --train-iters 1 --lr 1 --device cpu %s",
             words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    int status = mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error);
    if (status == 0) status = mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error);
    if (status == 0) fail_msg("%s is accepted", words);
    if (!strstr(error.text, part)) fail_msg("%s: \"%s\" does not say \"%s\"", words, error.text, part);
    mt_options_free(&options);
}

/* adapter_config.json of peft with one value changed, in a folder of its own; returns the folder. */
static const char *write_config(const char *name, const char *key, const char *value) {
    json_t *config = json_load_file(PEFT "/adapter_config.json", 0, NULL);
    json_object_set_new(config, key, json_loads(value, JSON_DECODE_ANY, NULL));
    const char *folder = at(name);
    char path[600];
    mkdir(folder, 0700);
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
    return folder;
}

static void what_is_not_supported_is_refused(void **state) {
    (void)state;
    assert_refused("--lora-rank 4", "--lora-target");
    assert_refused("--lora-target q_proj", "--lora-rank");
    assert_refused("--lora-base-dtype fp8", "--lora-base-dtype fp8 needs --lora-rank");
    assert_refused("--lora-rank 4 --lora-target q_proj --lora-base-dtype fp8 "
                   "--data-parallel-sharding-strategy optim_grads_params",
                   "--lora-base-dtype fp8 and --data-parallel-sharding-strategy optim_grads_params exclude each other");
    assert_refused("--lora-rank 4 --lora-target q_porj", "did you mean q_proj?");
    assert_refused("--lora-rank 4 --lora-target lm_head",
                   "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
    assert_refused("--load tests/golden/hf/mixtral --lora-rank 4 --lora-target all-linear --lora-dropout 0.1",
                   "experts");
    assert_refused("--lora-rank 4 --lora-target model.layers.0.self_attn.q_proj",
                   "names model.layers.0.self_attn.q_proj but not model.layers.1.self_attn.q_proj");
    assert_refused("--load tests/golden/hf/mixtral --lora-rank 4 --lora-target experts.0.w1", "experts only");
    assert_refused("--load-adapter " PEFT " --lora-rank 8", "has 4");
    assert_refused("--load-adapter tests/golden/hf/llama", "holds a whole model, not an adapter");
    assert_refused("--load " PEFT, "--load-adapter");
    static const struct {
        const char *key, *value, *part;
    } rows[] = {
        {"use_dora", "true", "DoRA"},
        {"bias", "\"all\"", "biases"},
        {"modules_to_save", "[\"lm_head\"]", "whole modules"},
        {"layers_to_transform", "[9]", "leave no matrix"},
        {"init_lora_weights", "\"pissa\"", "base weights"},
        {"peft_type", "\"IA3\"", "LORA"},
        {"target_modules", "{}", "list"},
#ifdef MT_HAVE_PCRE2
        {"target_modules", "\"q_proj\"", "no matrix of this model"},
        {"target_modules", "\"(q_proj\"", "pattern of PCRE2"},
#else
        {"target_modules", "\".*q_proj\"", "needs PCRE2"},
#endif
        {"lora_dropout", "\"0.1\"", "lora_dropout"},
        {"lora_dropout", "1", "lora_dropout"},
        {"fan_in_fan_out", "true", "GPT-2"},
        {"task_type", "\"SEQ_CLS\"", "language model"},
        {"task_type", "\"TOKEN_CLS\"", "language model"},
        {"target_modules", "[\"qkv_proj\"]", "qkv_proj"},
        {"r", "0", "positive"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char words[600], name[32];
        snprintf(name, sizeof name, "refused_%d", (int)i);
        snprintf(words, sizeof words, "--load-adapter %s", write_config(name, rows[i].key, rows[i].value));
        assert_refused(words, rows[i].part);
    }
}

/* An adapter of another base, or with other targets than its file. */
static void other_tensors_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *family, *options, *part;
    } rows[] = {
        {"qwen3", "", "base_model.model.model.layers.0"},
        {"llama", " --lora-target q_proj", "check \"target_modules\""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char options[256];
        snprintf(options, sizeof options, " --load-adapter " PEFT "%s", rows[i].options);
        fixture f = open_adapted(rows[i].family, options);
        mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
        mt_run_state run;
        mt_error error;
        assert_int_equal(mt_model_create(&f.model, &f.options.stack, &mt_grid_of_one, backend, &plan, &error), 0);
        assert_int_equal(mt_checkpoint_load(f.model, &f.options, &run, f.folder, &error), -1);
        if (!strstr(error.text, rows[i].part)) fail_msg("\"%s\" does not say \"%s\"", error.text, rows[i].part);
        close_family(&f);
    }
}

/* The roles that targets name: a pattern matches whole names; paths of all layers are the kind. */
static void patterns_and_paths_name_whole_kinds(void **state) {
    (void)state;
    static const struct {
        const char *targets;
        uint64_t roles;
    } rows[] = {
        {"layers.0.self_attn.q_proj,layers.1.self_attn.q_proj,layers.2.self_attn.q_proj,layers.3.self_attn.q_proj,"
         "v_proj",
         1 << MT_Q | 1 << MT_V},
        {"self_attn.q_proj", 1 << MT_Q},
#ifdef MT_HAVE_PCRE2
        {"regex:.*\\.(q|v)_proj", 1 << MT_Q | 1 << MT_V},
        {"regex:model\\.layers\\.\\d{1,2}\\.self_attn\\.q_proj", 1 << MT_Q},
#endif
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char options[256];
        snprintf(options, sizeof options, " --lora-rank 2 --lora-target %s", rows[i].targets);
        fixture f = open_adapted("llama", options);
        const uint64_t *roles = f.options.stack.lora_roles;
        if (roles[0] != rows[i].roles || roles[1] != 0) fail_msg("%s: other roles", rows[i].targets);
        close_family(&f);
    }
}

/* A saved target names no matrix without an adapter, or the folder could not be loaded. */
static void saved_targets_name_their_matrices_only(void **state) {
    (void)state;
    static const struct {
        const char *family, *targets, *saved;
    } rows[] = {
        {"gpt2", "attn.c_proj", "\"attn.c_proj\""},
        {"gpt2", "attn.c_proj,mlp.c_proj", "\"c_proj\""},
        {"qwen2_moe", "shared_expert.gate_proj", "\"shared_expert.gate_proj\""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char options[256];
        snprintf(options, sizeof options, " --lora-rank 2 --lora-target %s", rows[i].targets);
        fixture f = open_adapted(rows[i].family, options);
        char *text = mt_adapter_print_config(&f.options);
        if (!strstr(text, rows[i].saved)) fail_msg("%s: %s", rows[i].targets, text);
        free(text);
        close_family(&f);
    }
}

/* The first value of the adapter is not a number. */
static void values_that_are_not_finite_are_refused(void **state) {
    (void)state;
    char source[600], path[600], options[700];
    const char *folder = at("not_finite");
    int64_t bytes;
    mt_error error;
    float nan = NAN;
    mkdir(folder, 0700);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "adapter_model.safetensors" : "adapter_config.json";
        snprintf(source, sizeof source, PEFT "/%s", name), snprintf(path, sizeof path, "%s/%s", folder, name);
        char *contents = mt_file_read(source, 1 << 22, &bytes, &error);
        assert_non_null(contents);
        if (i) memcpy(contents + bytes - 4, &nan, 4);
        FILE *file = fopen(path, "wb");
        assert_non_null(file);
        assert_int_equal(fwrite(contents, 1, (size_t)bytes, file), bytes);
        assert_int_equal(fclose(file), 0);
        free(contents);
    }
    snprintf(options, sizeof options, " --load-adapter %s", folder);
    fixture f = open_adapted("llama", options);
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    mt_run_state run;
    assert_int_equal(mt_model_create(&f.model, &f.options.stack, &mt_grid_of_one, backend, &plan, &error), 0);
    assert_int_equal(mt_checkpoint_load(f.model, &f.options, &run, f.folder, &error), -1);
    if (!strstr(error.text, "1 values of tensor")) fail_msg("%s", error.text);
    close_family(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logprobs_equal_peft),
        cmocka_unit_test(every_gradient_equals_peft),
        cmocka_unit_test(five_steps_equal_peft),
        cmocka_unit_test(what_an_adapter_lacks_stays_zero),
        cmocka_unit_test(adapters_equal_the_merged_model_on_every_family),
        cmocka_unit_test(sequences_of_a_table_are_those_of_one_adapter_alone),
        cmocka_unit_test(switched_off_adapters_leave_no_trace),
        cmocka_unit_test(a_base_in_fp8_is_one_whose_matrices_were_rounded),
        cmocka_unit_test(products_of_every_type_read_a_base_in_fp8),
        cmocka_unit_test(a_base_in_fp8_is_saved_and_streamed_as_its_values),
        cmocka_unit_test(a_base_in_fp8_takes_the_bytes_of_its_plan),
        cmocka_unit_test(a_checkpoint_is_a_folder_of_peft),
        cmocka_unit_test(a_run_continues_bit_for_bit),
        cmocka_unit_test(a_merged_folder_is_a_whole_model),
        cmocka_unit_test(a_frozen_base_has_neither_gradients_nor_optimizer_state),
        cmocka_unit_test(a_new_adapter_changes_nothing_and_a_has_the_variance_of_peft),
        cmocka_unit_test(training_changes_adapters_only),
        cmocka_unit_test(what_is_not_supported_is_refused),
        cmocka_unit_test(other_tensors_are_refused),
        cmocka_unit_test(patterns_and_paths_name_whole_kinds),
        cmocka_unit_test(saved_targets_name_their_matrices_only),
        cmocka_unit_test(values_that_are_not_finite_are_refused),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
