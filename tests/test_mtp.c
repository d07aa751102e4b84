/* test_mtp.c: multi-token prediction. Losses and gradients equal those of a reference model in double, written below
 * for one sequence and one module at a time; loading and saving folders with modules; errors. */
// Sections of megatron.c: §10b
#include "../data/options/option_rules.h"
#include "../data/models/hf_config.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/report/report.h"
#include "folder.h"
#include "golden.h"

#include <sys/stat.h>
#include <unistd.h>

/* ---- the batch: sequences of different lengths with masked labels */

enum { LENGTH = 20, NUM_SPANS = 3, VOCABULARY = 23, MODULES = 2, CHANNELS = 12, HEADS = 2, D = 6, F = 16 };
static const int64_t span_lengths[NUM_SPANS] = {9, 3, 8};

static int make_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    batch->num_tokens = LENGTH, batch->num_spans = NUM_SPANS;
    for (int64_t s = 0, t = 0; s < NUM_SPANS; s++) {
        batch->spans[s] = (mt_span){t, span_lengths[s], t, span_lengths[s], true};
        for (int64_t i = 0; i < span_lengths[s]; i++, t++) {
            batch->tokens[t] = (int32_t)((s * 7 + i * i * 3 + 1) % VOCABULARY);
            batch->labels[t] = (int32_t)((s * 7 + (i + 1) * (i + 1) * 3 + 1) % VOCABULARY);
            batch->positions[t] = (int32_t)i, batch->token_index[t] = t;
            batch->loss_mask[t] =
                s == 1 ? i == 0 : (s + i) % 4 != 1; // in the second sequence only the main model has a label
        }
    }
    return 0;
}

/* ---- the reference; values[i]: row i of the whole model's parameter table */

typedef struct reference {
    const mt_param *params;
    int64_t num_params;
    double **values;
    const mt_options *options;
} reference;

static const double *weight(const reference *r, mt_role role, int64_t layer) {
    for (int64_t i = 0; i < r->num_params; i++)
        if (r->params[i].role == role && r->params[i].layer == layer) return r->values[i];
    fail_msg("no row of role %d in layer %d", (int)role, (int)layer);
    return NULL;
}

/* y[n] = w[n, k] x[k]. */
static void multiply(double *y, const double *w, const double *x, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = 0;
        for (int64_t j = 0; j < k; j++) y[i] += w[i * k + j] * x[j];
    }
}

/* The role of a norm's biases. */
static mt_role bias_of(mt_role norm) {
    return norm == MT_INPUT_NORM           ? MT_INPUT_NORM_BIAS
           : norm == MT_MLP_NORM           ? MT_MLP_NORM_BIAS
           : norm == MT_MTP_EMBEDDING_NORM ? MT_MTP_EMBEDDING_NORM_BIAS
           : norm == MT_MTP_HIDDEN_NORM    ? MT_MTP_HIDDEN_NORM_BIAS
           : norm == MT_MTP_FINAL_NORM     ? MT_MTP_FINAL_NORM_BIAS
                                           : MT_FINAL_NORM_BIAS;
}

/* RMSNorm, or LayerNorm, which subtracts the mean and adds biases. */
static void normalize(const reference *r, double *y, const double *x, mt_role norm, int64_t layer) {
    bool is_layernorm = r->options->normalization == MT_LAYERNORM;
    const double *w = weight(r, norm, layer), *b = is_layernorm ? weight(r, bias_of(norm), layer) : NULL;
    double square = 0, mean = 0, offset = r->options->layernorm_zero_centered_gamma;
    for (int64_t i = 0; i < CHANNELS && is_layernorm; i++) mean += x[i] / CHANNELS;
    for (int64_t i = 0; i < CHANNELS; i++) square += (x[i] - mean) * (x[i] - mean) / CHANNELS;
    for (int64_t i = 0; i < CHANNELS; i++)
        y[i] = (x[i] - mean) / sqrt(square + r->options->norm_epsilon) * (w[i] + offset) + (b ? b[i] : 0);
}

static void turn(double *x, int64_t position) {
    for (int64_t h = 0; h < HEADS; h++)
        for (int64_t i = 0; i < D / 2; i++) {
            double angle = (double)position * pow(10000, -2.0 * (double)i / D), *a = &x[h * D + i], *b = a + D / 2;
            double u = *a * cos(angle) - *b * sin(angle), v = *b * cos(angle) + *a * sin(angle);
            *a = u, *b = v;
        }
}

/* One transformer layer on x[n][CHANNELS], in place, at positions 0 to n - 1. */
static void layer_forward(const reference *r, int64_t layer, double (*x)[CHANNELS], int64_t n) {
    double q[LENGTH][CHANNELS], k[LENGTH][CHANNELS], v[LENGTH][CHANNELS], y[CHANNELS], z[CHANNELS];
    double gate[F], up[F];
    for (int64_t t = 0; t < n; t++) {
        normalize(r, y, x[t], MT_INPUT_NORM, layer);
        multiply(q[t], weight(r, MT_Q, layer), y, CHANNELS, CHANNELS);
        multiply(k[t], weight(r, MT_K, layer), y, CHANNELS, CHANNELS);
        multiply(v[t], weight(r, MT_V, layer), y, CHANNELS, CHANNELS);
        for (int64_t i = 0; i < CHANNELS && r->options->add_qkv_bias; i++) {
            q[t][i] += weight(r, MT_Q_BIAS, layer)[i], k[t][i] += weight(r, MT_K_BIAS, layer)[i];
            v[t][i] += weight(r, MT_V_BIAS, layer)[i];
        }
        turn(q[t], t), turn(k[t], t);
    }
    for (int64_t t = 0; t < n; t++) {
        for (int64_t h = 0; h < HEADS; h++) {
            double p[LENGTH], sum = 0;
            for (int64_t s = 0; s <= t; s++) {
                double dot = 0;
                for (int64_t i = 0; i < D; i++) dot += q[t][h * D + i] * k[s][h * D + i];
                sum += p[s] = exp(dot / sqrt(D));
            }
            for (int64_t i = 0; i < D; i++) {
                y[h * D + i] = 0;
                for (int64_t s = 0; s <= t; s++) y[h * D + i] += p[s] / sum * v[s][h * D + i];
            }
        }
        multiply(z, weight(r, MT_O, layer), y, CHANNELS, CHANNELS);
        for (int64_t i = 0; i < CHANNELS; i++) x[t][i] += z[i];
        normalize(r, y, x[t], MT_MLP_NORM, layer);
        multiply(gate, weight(r, MT_GATE, layer), y, F, CHANNELS);
        multiply(up, weight(r, MT_UP, layer), y, F, CHANNELS);
        for (int64_t i = 0; i < F; i++) up[i] *= gate[i] / (1 + exp(-gate[i]));
        multiply(z, weight(r, MT_DOWN, layer), up, CHANNELS, F);
        for (int64_t i = 0; i < CHANNELS; i++) x[t][i] += z[i];
    }
}

/* The negative log-probability of a label. */
static double token_loss(const reference *r, const double *hidden, int32_t label) {
    bool tied = !r->options->untie_embeddings_and_output_weights;
    double logits[VOCABULARY], sum = 0;
    multiply(logits, weight(r, tied ? MT_WORD_EMBEDDING : MT_LM_HEAD, -1), hidden, VOCABULARY, CHANNELS);
    for (int64_t i = 0; i < VOCABULARY; i++) sum += exp(logits[i]);
    return log(sum) - logits[label];
}

/* Sums over a batch, of the main model and of each module. The weight of a module's mean over a sequence is the number
 * of labels of the sequence in the main model. */
typedef struct losses {
    double sum[1 + MODULES], count[1 + MODULES];
} losses;

/* The layer of module k, which is the same at every depth if it is repeated. */
static int64_t module_layer(const reference *r, int64_t k) {
    return r->options->num_layers + (r->options->mtp_use_repeated_layer ? 0 : k - 1);
}

/* One sequence: module k has position t if there is a token t + k, and counts it if that label is unmasked. */
static void sequence_losses(const reference *r, const mt_batch *batch, const mt_span *span, losses *total) {
    const double *embedding = weight(r, MT_WORD_EMBEDDING, -1);
    double x[LENGTH][CHANNELS], hidden[LENGTH][CHANNELS], joined[2 * CHANNELS];
    int64_t first = span->q_start, labels = 0;
    for (int64_t t = 0; t < span->q_len; t++) labels += batch->loss_mask[first + t] > 0;
    for (int64_t k = 0; k <= MODULES; k++) {
        int64_t n = span->q_len - k, unmasked = 0;
        double sum = 0;
        for (int64_t t = 0; t < n; t++) {
            const double *token = embedding + batch->tokens[first + t + k] * CHANNELS;
            if (k == 0) memcpy(x[t], token, sizeof x[t]);
            if (k == 0) continue;
            int64_t second = r->options->hf_family == MT_HF_MIMO ? 0 : CHANNELS; // of the hidden state
            normalize(r, joined + CHANNELS - second, token, MT_MTP_EMBEDDING_NORM, module_layer(r, k));
            normalize(r, joined + second, hidden[t], MT_MTP_HIDDEN_NORM, module_layer(r, k));
            multiply(x[t], weight(r, MT_MTP_PROJECTION, module_layer(r, k)), joined, CHANNELS, 2 * CHANNELS);
        }
        for (int64_t layer = 0; layer < r->options->num_layers && k == 0; layer++) layer_forward(r, layer, x, n);
        if (k > 0) layer_forward(r, module_layer(r, k), x, n);
        for (int64_t t = 0; t < n; t++) {
            normalize(r, hidden[t], x[t], k ? MT_MTP_FINAL_NORM : MT_FINAL_NORM, k ? module_layer(r, k) : -1);
            if (batch->loss_mask[first + t + k] == 0) continue;
            sum += token_loss(r, hidden[t], batch->labels[first + t + k]);
            unmasked++;
        }
        if (unmasked == 0) continue;
        total->sum[k] += sum / (double)unmasked * (double)labels;
        total->count[k] += (double)labels;
    }
}

static losses batch_losses(const reference *r, const mt_batch *batch) {
    losses total = {{0}, {0}};
    for (int64_t s = 0; s < batch->num_spans; s++) sequence_losses(r, batch, &batch->spans[s], &total);
    return total;
}

/* The objective of training, before the division by the number of labels. */
static double objective(const reference *r, const mt_batch *batch) {
    losses l = batch_losses(r, batch);
    double sum = l.sum[0];
    for (int k = 1; k <= MODULES; k++) sum += r->options->mtp_loss_scaling_factor / MODULES * l.sum[k];
    return sum;
}

/* ---- the model */

typedef struct subject {
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    const mt_param *params;
    int64_t num_params;
    mt_bucket *buckets;
} subject;

static int parse(mt_run_options *options, const char *words, mt_error *error) {
    char line[1024], *arguments[64];
    int count = 0;
    snprintf(line, sizeof line,
             "train --mock-data --num-layers 1 --hidden-size 12 --num-attention-heads 2 --ffn-hidden-size 16 "
             "--vocab-size 23 --make-vocab-size-divisible-by 8 --seq-length 20 --train-iters 4 --lr 1e-2 "
             "--init-method-std 0.4 --swiglu --normalization RMSNorm --position-embedding-type rope "
             "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --device cpu %s",
             words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(options, MT_PROGRAM_TRAIN, count, arguments, error) != 0) return -1;
    return mt_options_finish(options, MT_PROGRAM_TRAIN, 1, error);
}

static void open_subject(subject *s, const char *words) {
    mt_error error;
    mt_model_plan plan = {.max_tokens = LENGTH, .max_logits = LENGTH, .max_position = LENGTH, .train = true};
    int64_t num_buckets;
    if (parse(&s->options, words, &error) != 0) fail_msg("%s", error.text);
    if (mt_model_create(&s->model, &s->options.stack, &mt_grid_of_one, backend, &plan, &error) != 0)
        fail_msg("%s", error.text);
    mt_model_init(s->model);
    mt_batch_alloc(&s->batch, LENGTH);
    s->params = mt_model_params(s->model, &s->num_params);
    s->buckets = mt_model_buckets(s->model, &num_buckets);
}

static void close_subject(subject *s) {
    mt_model_destroy(s->model);
    mt_batch_free(&s->batch);
    mt_options_free(&s->options);
}

/* Changes the weights of norms from one, so that they matter; returns a copy of all weights for the reference. */
static reference copy_weights(subject *s) {
    reference r = {s->params, s->num_params, mt_calloc(s->num_params * 8), &s->options.stack};
    for (int64_t i = 0; i < s->num_params; i++) {
        const mt_param *param = &s->params[i];
        float *values = (float *)s->buckets[param->bucket].params + param->offset;
        r.values[i] = mt_malloc(param->rows * param->cols * 8);
        for (int64_t e = 0; e < param->rows * param->cols; e++) {
            if (param->is_vector) values[e] += 0.1f * (float)((e * 5 + i * 3) % 7 - 3);
            r.values[i][e] = values[e];
        }
    }
    return r;
}

static void free_weights(reference *r) {
    for (int64_t i = 0; i < r->num_params; i++) free(r->values[i]);
    free(r->values);
}

/* Compares gradients of a parameter with central differences of the reference, relative to the largest. */
static void assert_gradients(const subject *s, reference *r, int64_t i) {
    const mt_param *param = &s->params[i];
    const float *gradients = s->buckets[param->bucket].grads + param->offset;
    int64_t count = param->rows_stored * param->cols, stride = count / 24 + 1;
    double largest = 0, worst = 0, h = 1e-5;
    for (int64_t e = 0; e < count; e += stride) {
        double value = r->values[i][e];
        r->values[i][e] = value + h;
        double above = objective(r, &s->batch);
        r->values[i][e] = value - h;
        double expected = (above - objective(r, &s->batch)) / (2 * h);
        r->values[i][e] = value;
        largest = fmax(largest, fabs(expected)), worst = fmax(worst, fabs((double)gradients[e] - expected));
    }
    if (!(worst <= 2e-5 * largest) || largest < 1e-3)
        fail_msg("%s: gradients up to %g are off by %g", param->hf_name, largest, worst);
}

static void check_step(const char *words, mt_hf_family family) {
    subject s;
    mt_metrics metrics;
    mt_error error;
    mt_run_state run = {0};
    open_subject(&s, words);
    assert_int_equal(s.options.stack.hf_family, family);
    reference r = copy_weights(&s);
    if (mt_train_step(s.model, &run, 1, make_batch, NULL, &s.batch, &metrics, &error) != 0) fail_msg("%s", error.text);
    losses l = batch_losses(&r, &s.batch);
    assert_true(l.count[1] < l.count[0]); // the second sequence has labels for the main model only
    assert_true(fabs(metrics.loss - l.sum[0] / l.count[0]) <= 1e-6 * metrics.loss);
    for (int k = 1; k <= MODULES; k++) {
        double expected = l.sum[k] / l.count[k], actual = metrics.mtp_losses[k - 1];
        if (!(fabs(actual - expected) <= 1e-6 * expected)) fail_msg("module %d: %.9g, %.9g", k, actual, expected);
    }
    for (int64_t i = 0; i < s.num_params; i++) assert_gradients(&s, &r, i);
    free_weights(&r);
    close_subject(&s);
}

static void losses_and_gradients_equal_a_reference_in_double(void **state) {
    (void)state;
    check_step("--untie-embeddings-and-output-weights --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7",
               MT_HF_MEGATRON);
    check_step("--mtp-num-layers 2 --mtp-loss-scaling-factor 1.5", MT_HF_MEGATRON);
    check_step("--mtp-num-layers 2 --normalization LayerNorm", MT_HF_MEGATRON);
    check_step("--mtp-num-layers 2 --normalization LayerNorm --layernorm-zero-centered-gamma --untie-embeddings-and-"
               "output-weights",
               MT_HF_MEGATRON);
    check_step("--mtp-num-layers 2 --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.7", MT_HF_MEGATRON);
    check_step("--mtp-num-layers 2 --mtp-use-repeated-layer --normalization LayerNorm --recompute-granularity full "
               "--untie-embeddings-and-output-weights",
               MT_HF_MEGATRON);
    check_step("--mtp-num-layers 2 --add-qkv-bias", MT_HF_MIMO); // MiMo, whose projection has the hidden state first
}

/* The values of row `param` of a subject's model, or of their gradients. */
static float *values_of(const subject *s, const mt_param *param, bool gradients) {
    const mt_bucket *b = &s->buckets[param->bucket];
    return (gradients ? b->grads : (float *)b->params) + param->offset;
}

/* The row with the same name in another layer, or none. */
static const mt_param *row_in(const subject *s, const mt_param *param, int64_t layer) {
    for (int64_t i = 0; i < s->num_params; i++)
        if (s->params[i].role == param->role && s->params[i].layer == layer && s->params[i].expert == param->expert)
            return &s->params[i];
    return NULL;
}

static void step_of(subject *s, mt_metrics *metrics) {
    mt_error error;
    mt_run_state run = {0};
    if (mt_train_step(s->model, &run, 1, make_batch, NULL, &s->batch, metrics, &error) != 0) fail_msg("%s", error.text);
}

/* A repeated module has the losses of two modules with its weights, and the sum of their gradients. */
static void check_repeated(const char *words) {
    subject one, two;
    mt_metrics of_one, of_two;
    char line[512];
    snprintf(line, sizeof line, "--mtp-num-layers 2 %s", words);
    open_subject(&two, line);
    snprintf(line, sizeof line, "--mtp-num-layers 2 --mtp-use-repeated-layer %s", words);
    open_subject(&one, line);
    reference r = copy_weights(&one);
    int64_t module = one.options.stack.num_layers;
    for (int64_t i = 0; i < one.num_params; i++)
        for (int64_t layer = one.params[i].layer; layer <= one.params[i].layer + (one.params[i].layer == module);
             layer++) {
            const mt_param *param = row_in(&two, &one.params[i], layer);
            assert_non_null(param);
            memcpy(values_of(&two, param, false), values_of(&one, &one.params[i], false),
                   (size_t)(param->rows * param->cols) * 4);
        }
    mt_options single = two.options.stack; // its strings are not freed
    single.mtp_num_layers = 1;
    assert_int_equal(mt_num_parameters(&one.options.stack), mt_num_parameters(&single));
    step_of(&one, &of_one), step_of(&two, &of_two);
    assert_true(of_one.loss == of_two.loss);
    for (int k = 0; k < 2; k++) assert_true(of_one.mtp_losses[k] == of_two.mtp_losses[k]);
    for (int64_t i = 0; i < one.num_params; i++) {
        const mt_param *param = &one.params[i], *first = row_in(&two, param, param->layer);
        const mt_param *second = param->layer == module ? row_in(&two, param, module + 1) : NULL;
        double largest = 0, worst = 0;
        for (int64_t e = 0; e < param->rows * param->cols && param->trained; e++) {
            double expected = (double)values_of(&two, first, true)[e];
            if (second) expected += (double)values_of(&two, second, true)[e];
            largest = fmax(largest, fabs(expected));
            worst = fmax(worst, fabs((double)values_of(&one, param, true)[e] - expected));
        }
        if (!(worst <= 1e-6 * largest)) fail_msg("%s: up to %g, off by %g", param->hf_name, largest, worst);
    }
    assert_true(mt_flops(&one.options.stack, 1) == mt_flops(&two.options.stack, 1));
    free_weights(&r);
    close_subject(&one), close_subject(&two);
}

static void a_repeated_module_has_the_gradients_of_two_modules_with_its_weights(void **state) {
    (void)state;
    check_repeated("");
    check_repeated("--untie-embeddings-and-output-weights --add-qkv-bias --recompute-granularity full");
    check_repeated("--num-experts 4 --moe-ffn-hidden-size 8 --moe-router-topk 2 --moe-z-loss-coeff 0.01");
}

/* The evaluation loss of a model with modules equals that of the model without them. */
static void evaluation_ignores_modules(void **state) {
    (void)state;
    subject with, without;
    mt_error error;
    double a, b;
    open_subject(&with, "--mtp-num-layers 2");
    open_subject(&without, "");
    if (mt_evaluate(with.model, 1, make_batch, NULL, &with.batch, &a, &error) != 0) fail_msg("%s", error.text);
    if (mt_evaluate(without.model, 1, make_batch, NULL, &without.batch, &b, &error) != 0) fail_msg("%s", error.text);
    assert_true(a == b);
    int64_t module = mt_num_parameters(&with.options.stack) - mt_num_parameters(&without.options.stack);
    int64_t layer = 4 * CHANNELS * CHANNELS + 3 * CHANNELS * F + 2 * CHANNELS;
    assert_int_equal(module, 2 * (layer + 2 * CHANNELS * CHANNELS + 3 * CHANNELS));
    double flops = 6.0 * LENGTH *
                   (4 * CHANNELS * CHANNELS + LENGTH * CHANNELS + 3 * CHANNELS * F + 2 * CHANNELS * CHANNELS +
                    CHANNELS * (double)with.options.stack.padded_vocab_size);
    assert_true(mt_flops(&with.options.stack, 1) - mt_flops(&without.options.stack, 1) == 2 * flops);
    close_subject(&with);
    close_subject(&without);
}

/* ---- folders */

/* Opens a golden family with modules and random weights. */
static void open_with_modules(fixture *f, const char *family, const char *words) {
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    mt_error error;
    more_options = words;
    *f = open_family(family, 4, 1, false);
    more_options = "";
    if (mt_model_create(&f->model, &f->options.stack, &mt_grid_of_one, backend, &plan, &error) != 0)
        fail_msg("%s", error.text);
    mt_model_init(f->model);
}

static void save_model(fixture *f, const char *folder) {
    mt_error error;
    mt_run_state run = {.iteration = 1};
    if (mt_checkpoint_save(f->model, &f->options, &run, folder, NULL, NULL, &error) != 0) fail_msg("%s", error.text);
}

/* Saves weights and config.json only, like other programs. */
static void save_weights(fixture *f, const char *folder) {
    char path[512], *config = mt_options_write_hf_config(&f->options);
    mt_error error;
    assert_int_equal(mkdir(folder, 0777), 0);
    if (mt_safetensors_save_folder(f->model, folder, "model", 1 << 30, "--save", NULL, &error) != 0)
        fail_msg("%s", error.text);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    fputs(config, out);
    assert_int_equal(fclose(out), 0);
    free(config);
}

static void train_steps(fixture *f, mt_run_state *run, int64_t count, double *loss) {
    mt_metrics metrics;
    mt_error error;
    for (int64_t i = 0; i < count; i++) {
        source from = {f, run->iteration, SEQUENCES, 0, SEQUENCES};
        if (mt_train_step(f->model, run, 1, next_micro_batch, &from, &f->batch, &metrics, &error) != 0)
            fail_msg("%s", error.text);
    }
    loss[0] = metrics.loss, loss[1] = metrics.mtp_losses[0];
}

static void a_run_with_modules_continues_bit_for_bit(void **state) {
    (void)state;
    static const char *const subjects[] = {"deepseek_v3", "qwen3", "mixtral", "nemotron_h"};
    static const char *const modules[] = {"--mtp-num-layers 1", "--mtp-num-layers 2 --mtp-use-repeated-layer",
                                          "--mtp-num-layers 1", "--mtp-num-layers 2 --mtp-hybrid-override-pattern *-"};
    for (int k = 0; k < 4; k++) {
        fixture f, again;
        char words[128];
        mt_error error;
        mt_run_state run = {0}, resumed = {0};
        double losses[2], resumed_losses[2];
        open_with_modules(&f, subjects[k], modules[k]);
        snprintf(words, sizeof words, "%s --seed 5", modules[k]);
        open_with_modules(&again, subjects[k], words);
        again.options.stack.seed = f.options.stack.seed;
        train_steps(&f, &run, 2, losses);
        if (mt_checkpoint_save(f.model, &f.options, &run, at(subjects[k]), NULL, NULL, &error) != 0)
            fail_msg("%s", error.text);
        train_steps(&f, &run, 2, losses);
        if (mt_checkpoint_load(again.model, &again.options, &resumed, at(subjects[k]), &error) != 0)
            fail_msg("%s", error.text);
        train_steps(&again, &resumed, 2, resumed_losses);
        assert_memory_equal(losses, resumed_losses, sizeof losses);
        close_family(&f);
        close_family(&again);
    }
}

/* Parses the options of `train` or `infer` with --load. */
static int try_parse_load(mt_run_options *options, mt_program program, const char *folder, const char *words,
                          mt_error *error) {
    char line[512], *arguments[32];
    int count = 0;
    snprintf(line, sizeof line, "x --load %s --device cpu %s", folder, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(options, program, count, arguments, error) != 0) return -1;
    return mt_options_finish(options, program, 1, error);
}

static void parse_load(mt_run_options *options, mt_program program, const char *folder, const char *words) {
    mt_error error;
    if (try_parse_load(options, program, folder, words, &error) != 0) fail_msg("%s", error.text);
}

static int load_folder(const mt_run_options *options, const char *folder, bool train, mt_error *error) {
    mt_model *model;
    mt_run_state run;
    mt_model_plan plan = {.max_tokens = 8, .max_logits = 8, .max_position = 8, .train = train};
    if (mt_model_create(&model, &options->stack, &mt_grid_of_one, backend, &plan, error) != 0) return -1;
    int status = mt_checkpoint_load(model, options, &run, folder, error);
    mt_model_destroy(model);
    return status;
}

#define TRAIN "--mock-data --seq-length 32 --train-iters 1 --lr 1 "

static void the_number_of_modules_is_read_from_the_folder(void **state) {
    (void)state;
    static const char *const subjects[] = {"deepseek_v3", "qwen3", "qwen2", "glm4_moe", "glm4_moe_lite"};
    static const mt_hf_family saved[] = {MT_HF_DEEPSEEK_V3, MT_HF_MEGATRON, MT_HF_MIMO, MT_HF_GLM4_MOE,
                                         MT_HF_GLM4_MOE_LITE};
    for (int k = 0; k < 5; k++) {
        fixture f;
        mt_run_options o;
        mt_error error;
        open_with_modules(&f, subjects[k], "--mtp-num-layers 2");
        save_model(&f, at(subjects[k]));
        assert_int_equal(f.options.stack.hf_family, saved[k]);
        parse_load(&o, MT_PROGRAM_TRAIN, at(subjects[k]), TRAIN);
        assert_int_equal(o.stack.mtp_num_layers, 2);
        if (load_folder(&o, at(subjects[k]), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        parse_load(&o, MT_PROGRAM_TRAIN, at(subjects[k]), TRAIN "--mtp-num-layers 0");
        if (load_folder(&o, at(subjects[k]), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        parse_load(&o, MT_PROGRAM_INFER, at(subjects[k]), "--prompt-tokens 1,2");
        assert_int_equal(o.stack.mtp_num_layers, 0);
        if (load_folder(&o, at(subjects[k]), false, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        // saved by transformers: without modules, which some families do not have
        if (try_parse_load(&o, MT_PROGRAM_TRAIN, f.folder, TRAIN "--mtp-num-layers 1", &error) == 0)
            assert_int_equal(load_folder(&o, f.folder, true, &error), -1);
        if (!strstr(error.text, "--mtp-num-layers")) fail_msg("%s", error.text);
        mt_options_free(&o);
        close_family(&f);
    }
}

/* The names of the hub's folders, which have one module; it attends, as transformers' other programs compute it. */
static void qwens_module_has_its_names_and_attends(void **state) {
    (void)state;
    static const char *const subjects[] = {"qwen3_next", "qwen3_5", "qwen3_5_moe"};
    static const char *const names[] = {"mtp.fc.weight",
                                        "mtp.norm.weight",
                                        "mtp.pre_fc_norm_embedding.weight",
                                        "mtp.pre_fc_norm_hidden.weight",
                                        "mtp.layers.0.input_layernorm.weight",
                                        "mtp.layers.0.self_attn.q_proj.weight",
                                        "mtp.layers.0.self_attn.k_norm.weight"};
    for (int k = 0; k < 3; k++) {
        fixture f;
        mt_run_options o;
        mt_error error;
        mt_safetensors *set;
        char folder[300];
        open_with_modules(&f, subjects[k], "--mtp-num-layers 1");
        save_model(&f, at(subjects[k]));
        snprintf(folder, sizeof folder, "%s/iter_0000001", at(subjects[k]));
        if (mt_safetensors_open_folder(&set, folder, "model", &error) != 0) fail_msg("%s", error.text);
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (!mt_safetensors_find(set, names[i])) fail_msg("%s: no %s", subjects[k], names[i]);
        for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
            const char *name = mt_safetensors_get(set, i)->name;
            assert_true(strncmp(name, "mtp.", 4) != 0 || !strstr(name, "linear_attn"));
        }
        mt_safetensors_close(set);
        parse_load(&o, MT_PROGRAM_TRAIN, at(subjects[k]), TRAIN);
        assert_int_equal(o.stack.hf_family, f.options.stack.hf_family);
        assert_int_equal(o.stack.mtp_num_layers, 1);
        if (load_folder(&o, at(subjects[k]), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        parse_load(&o, MT_PROGRAM_TRAIN, at(subjects[k]), TRAIN "--mtp-num-layers 0");
        if (load_folder(&o, at(subjects[k]), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        close_family(&f);
    }
}

/* ---- Megatron-Core */

/* One sequence of tests/golden/make_megatron_checkpoints.py. */
static int megatron_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    batch->num_tokens = 16, batch->num_spans = 1, batch->spans[0] = (mt_span){0, 16, 0, 16, true};
    for (int64_t t = 0; t < 16; t++) {
        batch->tokens[t] = (int32_t)(t * 7 % 100), batch->labels[t] = (int32_t)((t + 1) * 7 % 100);
        batch->positions[t] = (int32_t)t, batch->token_index[t] = t, batch->loss_mask[t] = 1;
    }
    return 0;
}

/* The model of a folder of Megatron-Core, with its weights. */
static void open_megatron(subject *s, const char *name, const char *words) {
    char folder[128];
    mt_error error;
    mt_run_state run;
    mt_model_plan plan = {.max_tokens = 16, .max_logits = 16, .max_position = 16, .train = true};
    int64_t num_buckets;
    snprintf(folder, sizeof folder, "tests/golden/megatron_dist/%s", name);
    parse_load(&s->options, MT_PROGRAM_TRAIN, folder, words);
    if (mt_model_create(&s->model, &s->options.stack, &mt_grid_of_one, backend, &plan, &error) != 0 ||
        mt_checkpoint_load(s->model, &s->options, &run, folder, &error) != 0)
        fail_msg("%s", error.text);
    mt_batch_alloc(&s->batch, 16);
    s->params = mt_model_params(s->model, &s->num_params);
    s->buckets = mt_model_buckets(s->model, &num_buckets);
}

/* Losses and gradients are those of Megatron-Core's own step, also of the router's auxiliary loss and z-loss; and so is
 * the step of the biases that balance the experts, which counts the tokens of all depths. */
static void check_megatron(const char *name, const char *factor) {
    subject s, gradients;
    char words[512], path[128];
    mt_metrics metrics;
    mt_error error;
    mt_run_state run = {0};
    snprintf(words, sizeof words,
             "--use-checkpoint-args --no-load-optim --mock-data --seq-length 16 --train-iters 1 --lr 1 "
             "--hidden-dropout 0 --attention-dropout 0 --mtp-loss-scaling-factor %s --moe-router-load-balancing-type "
             "seq_aux_loss --moe-aux-loss-coeff 0.3 "
             "--moe-z-loss-coeff 0.02",
             factor);
    open_megatron(&s, name, words);
    snprintf(path, sizeof path, "%s_gradients", name);
    open_megatron(&gradients, path, words);
    int64_t depths = s.options.stack.mtp_num_layers;
    assert_true(s.options.stack.mtp_use_repeated_layer && depths >= 2);
    snprintf(path, sizeof path, "tests/golden/megatron_dist/%s", name);
    double *losses = read_file(path, "losses.f64", (1 + depths) * 8);
    if (mt_train_step(s.model, &run, 1, megatron_batch, NULL, &s.batch, &metrics, &error) != 0)
        fail_msg("%s", error.text);
    for (int64_t k = 0; k <= depths; k++) {
        double actual = k == 0 ? metrics.loss : metrics.mtp_losses[k - 1];
        if (!(fabs(actual - losses[k]) <= 1e-5 * losses[k])) fail_msg("loss %d: %.9g, %.9g", (int)k, actual, losses[k]);
    }
    for (int64_t i = 0; i < s.num_params; i++) {
        const mt_param *param = &s.params[i];
        const float *actual = values_of(&s, param, param->trained), *expected = values_of(&gradients, param, false);
        double largest = 0, worst = 0, tokens = param->trained ? 16 : 1; // gradients are of the sum over these
        for (int64_t e = 0; e < param->rows * param->cols; e++) {
            largest = fmax(largest, fabs((double)expected[e]));
            worst = fmax(worst, fabs((double)actual[e] / tokens - (double)expected[e]));
        }
        assert_true(param->trained || largest > 0);
        if (!(worst <= 1e-5 * largest)) fail_msg("%s: %s up to %g, off by %g", name, param->hf_name, largest, worst);
    }
    free(losses);
    close_subject(&s), close_subject(&gradients);
}

static void a_repeated_module_has_the_losses_and_gradients_of_megatron_core(void **state) {
    (void)state;
    check_megatron("mtp_repeated", "0.7");
    check_megatron("mtp_hybrid", "0.3");
}

/* ---- folders of Nemotron-H, and of one module that is repeated */

static void a_repeated_module_is_one_module_of_the_folder(void **state) {
    (void)state;
    static const struct {
        const char *family, *words, *names[4];
    } cases[] = {{"deepseek_v3", "", {"model.layers.4.eh_proj.weight", "model.layers.4.shared_head.norm.weight"}},
                 {"qwen3_5", "", {"mtp.fc.weight", "mtp.norm.weight"}},
                 {"llama", "", {"model.layers.4.eh_proj.weight"}},
                 {"nemotron_h",
                  "--mtp-hybrid-override-pattern *E",
                  {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.mixer.q_proj.weight", "mtp.layers.1.mixer.gate.weight",
                   "mtp.layers.1.final_layernorm.weight"}}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        fixture f;
        mt_run_options o;
        mt_error error;
        mt_safetensors *set;
        char words[128], folder[300];
        snprintf(words, sizeof words, "--mtp-num-layers 3 --mtp-use-repeated-layer %s", cases[k].words);
        open_with_modules(&f, cases[k].family, words);
        save_model(&f, at(cases[k].family));
        snprintf(folder, sizeof folder, "%s/iter_0000001", at(cases[k].family));
        if (mt_safetensors_open_folder(&set, folder, "model", &error) != 0) fail_msg("%s", error.text);
        for (int i = 0; i < 4 && cases[k].names[i]; i++)
            if (!mt_safetensors_find(set, cases[k].names[i])) fail_msg("no %s", cases[k].names[i]);
        mt_safetensors_close(set);
        snprintf(folder, sizeof folder, "%s/iter_0000001/config.json", at(cases[k].family));
        json_t *config = json_load_file(folder, 0, NULL);
        json_t *number = json_object_get(config, "num_nextn_predict_layers");
        assert_true(!number || json_integer_value(number) == 1);
        assert_true(json_is_true(json_object_get(config, "mtp_use_repeated_layer")));
        json_decref(config);
        parse_load(&o, MT_PROGRAM_TRAIN, at(cases[k].family), TRAIN);
        assert_true(o.stack.mtp_num_layers == 3 && o.stack.mtp_use_repeated_layer);
        assert_int_equal(o.stack.hf_family, f.options.stack.hf_family);
        if (load_folder(&o, at(cases[k].family), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        // one module of the folder for another number of depths
        parse_load(&o, MT_PROGRAM_TRAIN, at(cases[k].family), TRAIN "--mtp-num-layers 2");
        if (load_folder(&o, at(cases[k].family), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        parse_load(&o, MT_PROGRAM_TRAIN, at(cases[k].family), TRAIN "--mtp-num-layers 0");
        if (load_folder(&o, at(cases[k].family), true, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        parse_load(&o, MT_PROGRAM_INFER, at(cases[k].family), "--prompt-tokens 1,2");
        if (load_folder(&o, at(cases[k].family), false, &error) != 0) fail_msg("%s", error.text);
        mt_options_free(&o);
        close_family(&f);
    }
}

/* NVIDIA's folders of Nemotron-H hold one module, and config.json describes it; they do not say how often it is used.
 */
static void the_module_of_a_released_nemotron_h_is_read_where_it_is_asked_for(void **state) {
    (void)state;
    fixture f;
    mt_run_options o;
    mt_error error;
    char path[512];
    open_with_modules(&f, "nemotron_h", "--mtp-num-layers 1 --mtp-hybrid-override-pattern *E");
    const char *folder = at("released");
    save_weights(&f, folder);
    snprintf(path, sizeof path, "%s/config.json", folder);
    json_t *config = json_load_file(path, 0, NULL);
    assert_int_equal(json_object_del(config, "mtp_num_layers"), 0);
    assert_int_equal(json_integer_value(json_object_get(config, "num_nextn_predict_layers")), 1);
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
    parse_load(&o, MT_PROGRAM_TRAIN, folder, TRAIN);
    assert_int_equal(o.stack.mtp_num_layers, 0);
    if (load_folder(&o, folder, true, &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&o);
    parse_load(&o, MT_PROGRAM_TRAIN, folder, TRAIN "--mtp-num-layers 2 --mtp-use-repeated-layer");
    assert_string_equal(o.stack.mtp_hybrid_layers, "*E");
    assert_int_equal(o.stack.hf_family, MT_HF_NEMOTRON_H);
    if (load_folder(&o, folder, true, &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&o);
    parse_load(&o, MT_PROGRAM_TRAIN, folder, TRAIN "--mtp-num-layers 2");
    assert_int_equal(load_folder(&o, folder, true, &error), -1);
    if (!strstr(error.text, "\"mtp.layers.2.mixer.q_proj.weight\" of a module")) fail_msg("%s", error.text);
    mt_options_free(&o);
    close_family(&f);
}

/* Adds to folder/model.safetensors a copy of a tensor under another name, with one byte changed if `changed`. */
static void add_copy(const char *folder, const char *name, const char *copied, bool changed) {
    char path[512];
    struct stat status;
    uint64_t length;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_int_equal(stat(path, &status), 0);
    char *file = read_file(folder, "model.safetensors", status.st_size);
    memcpy(&length, file, 8);
    json_t *header = json_loadb(file + 8, length, 0, NULL), *entry = json_deep_copy(json_object_get(header, copied));
    json_t *offsets = json_object_get(entry, "data_offsets");
    int64_t from = json_integer_value(json_array_get(offsets, 0)), to = json_integer_value(json_array_get(offsets, 1));
    int64_t data = status.st_size - 8 - (int64_t)length;
    json_array_set_new(offsets, 0, json_integer(data));
    json_array_set_new(offsets, 1, json_integer(data + to - from));
    json_object_set_new(header, name, entry);
    char *text = json_dumps(header, JSON_COMPACT), *values = file + 8 + length;
    uint64_t text_length = strlen(text);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    fwrite(&text_length, 8, 1, out), fwrite(text, 1, text_length, out), fwrite(values, 1, (size_t)data, out);
    values[to - 1] ^= changed;
    fwrite(values + from, 1, (size_t)(to - from), out);
    assert_int_equal(fclose(out), 0);
    json_decref(header);
    free(text), free(file);
}

static void a_stored_copy_of_a_shared_tensor_must_be_equal(void **state) {
    (void)state;
    fixture f;
    mt_run_options o;
    mt_error error;
    char embedding[64], head[64];
    open_with_modules(&f, "deepseek_v3", "--mtp-num-layers 1");
    int layers = (int)f.options.stack.num_layers;
    snprintf(embedding, sizeof embedding, "model.layers.%d.embed_tokens.weight", layers);
    snprintf(head, sizeof head, "model.layers.%d.shared_head.head.weight", layers);
    const char *folder = at("model");
    save_weights(&f, folder);
    add_copy(folder, embedding, "model.embed_tokens.weight", false);
    parse_load(&o, MT_PROGRAM_TRAIN, folder, TRAIN "--mtp-num-layers 1");
    if (load_folder(&o, folder, true, &error) != 0) fail_msg("%s", error.text);
    add_copy(folder, head, "lm_head.weight", true);
    assert_int_equal(load_folder(&o, folder, true, &error), -1);
    if (!strstr(error.text, "is not the same as \"lm_head.weight\"")) fail_msg("%s", error.text);
    mt_options_free(&o);
    close_family(&f);
}

/* transformers leaves them out, and has no names for them. */
static void modules_that_no_family_names_are_left_out(void **state) {
    (void)state;
    static const char *const cases[][2] = {{"exaone_moe", "mtp.norm.weight"},
                                           {"ernie4_5_moe", "model.mtp_emb_norm.0.weight"},
                                           {"hy_v3", "model.layers.4.eh_proj.weight"},
                                           {"qwen3_next", "mtp.layers.0.input_layernorm.weight"},
                                           {"qwen3_5", "mtp.fc.weight"},
                                           {"qwen3_5_moe", "mtp.norm.weight"},
                                           {"llama", "mtp.norm.weight"}};
    for (int k = 0; k < 7; k++) {
        fixture f;
        mt_run_options o;
        mt_error error;
        open_with_modules(&f, cases[k][0], "");
        const char *folder = at(cases[k][0]);
        save_weights(&f, folder);
        add_copy(folder, cases[k][1], "model.norm.weight", false);
        parse_load(&o, MT_PROGRAM_TRAIN, folder, TRAIN);
        assert_int_equal(load_folder(&o, folder, true, &error), k == 6 ? -1 : 0);
        mt_options_free(&o);
        close_family(&f);
    }
}

/* ---- options */

static void unsupported_options_with_modules_are_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"--mtp-num-layers 9", "--mtp-num-layers must be in [0,8]"},
        {"--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor needs --mtp-num-layers"},
        {"--mtp-num-layers 1 --mtp-loss-scaling-factor 0", "--mtp-loss-scaling-factor must be in (0,1e6]"},
        {"--mtp-num-layers 1 --position-embedding-type learned_absolute", "--position-embedding-type rope|none"},
        {"--mtp-num-layers 4 --seq-length 4", "must be less than --seq-length 4"},
        {"--mtp-num-layers 1 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
         "and --pipeline-schedule zb-h1 exclude each other"},
        {"--mtp-use-repeated-layer", "--mtp-use-repeated-layer needs --mtp-num-layers"},
        {"--mtp-num-layers 1 --mtp-hybrid-override-pattern *-",
         "--mtp-hybrid-override-pattern needs --hybrid-override-pattern"},
        {"--hybrid-override-pattern * --mtp-num-layers 1", "--mtp-hybrid-override-pattern is missing"},
        {"--hybrid-override-pattern */*-/*", "has modules (/) of different layers"},
        {"--hybrid-override-pattern */*-/*-- --mtp-num-layers 2", "has modules (/) of different layers"},
        {"--hybrid-override-pattern */-/- --mtp-num-layers 3", "has 2 modules (/), and --mtp-num-layers is 3"},
        {"--hybrid-override-pattern */-/- --mtp-hybrid-override-pattern *-", "leave one of them out"},
        {"--hybrid-override-pattern */M", "--mtp-hybrid-override-pattern is M; a module"},
        {"--hybrid-override-pattern */", "--mtp-hybrid-override-pattern is ; a module"},
        {"--hybrid-override-pattern */*E", "--mtp-hybrid-override-pattern *E has experts (E), and"},
        {"--hybrid-override-pattern */-/-/-/-/-/-/-/-/-", "has 9 modules (/), and 8 are possible"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_run_options o;
        mt_error error = {{0}};
        assert_int_equal(parse(&o, cases[i][0], &error), -1);
        if (!strstr(error.text, cases[i][1])) fail_msg("%s: %s", cases[i][0], error.text);
        mt_options_free(&o);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_and_gradients_equal_a_reference_in_double),
        cmocka_unit_test(a_repeated_module_has_the_gradients_of_two_modules_with_its_weights),
        cmocka_unit_test(a_repeated_module_has_the_losses_and_gradients_of_megatron_core),
        cmocka_unit_test(evaluation_ignores_modules),
        cmocka_unit_test_setup_teardown(a_run_with_modules_continues_bit_for_bit, make_root, remove_root),
        cmocka_unit_test_setup_teardown(the_number_of_modules_is_read_from_the_folder, make_root, remove_root),
        cmocka_unit_test_setup_teardown(qwens_module_has_its_names_and_attends, make_root, remove_root),
        cmocka_unit_test_setup_teardown(a_repeated_module_is_one_module_of_the_folder, make_root, remove_root),
        cmocka_unit_test_setup_teardown(the_module_of_a_released_nemotron_h_is_read_where_it_is_asked_for, make_root,
                                        remove_root),
        cmocka_unit_test_setup_teardown(a_stored_copy_of_a_shared_tensor_must_be_equal, make_root, remove_root),
        cmocka_unit_test_setup_teardown(modules_that_no_family_names_are_left_out, make_root, remove_root),
        cmocka_unit_test(unsupported_options_with_modules_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
