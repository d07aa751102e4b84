/* Gradients of whole models against central differences of the loss. */
// Sections of megatron.c: §9 §9c §9d §9e §9f §9g §10 §10a §10c §17b §17c §18b §19b
#include "data/options/option_table.h"
#include "data/options/options.h"
#include "data/checkpoint/run_options.h"
#include "megatron.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TOKENS = 32, VOCABULARY = 64, HIDDEN = 16, PAIRS = 3 };

/* ---- a teacher: logits of the tokens whose label counts */

typedef struct teacher {
    mt_distillation_config config;
    mt_loss loss;
    int64_t K;
    bool knows_labels; // gives each label a probability of nearly 1
    bool topk;         // log-probabilities of K - 1 labels, and the id of the token's own
    mt_teacher_logits logits;
    int32_t tokens[TOKENS], ids[TOKENS * VOCABULARY];
    float values[TOKENS * VOCABULARY], hidden[TOKENS * PAIRS * HIDDEN];
} teacher;

static teacher *the_teacher; // of batches; NULL: none

/* The student's forward overwrites the logits, so every batch gets them anew. 5 and the vocabulary have no common
 * factor: the ids of a token are different. */
static void teach(teacher *from, mt_batch *batch) {
    from->logits = (mt_teacher_logits){.K = from->K, .tokens = from->tokens, .ids = from->ids, .logits = from->values};
    if (from->K == VOCABULARY) from->logits.ids = NULL;
    from->logits.num_hidden = from->config.num_pairs, from->logits.width = HIDDEN, from->logits.hidden = from->hidden;
    for (int i = 0; i < TOKENS * PAIRS * HIDDEN; i++) from->hidden[i] = sinf((float)(i * 13));
    for (int64_t t = 0; t < TOKENS; t++) {
        batch->loss_mask[t] = t % 5 != 3;
        if (t % 5 == 3) continue;
        int64_t row = from->logits.count++;
        from->tokens[row] = (int32_t)t;
        for (int64_t k = 0; k < from->K; k++) {
            int64_t at = row * from->K + k, id = from->logits.ids ? (t * 11 + k * 5) % VOCABULARY : k;
            from->ids[at] = (int32_t)id, from->values[at] = 2 * sinf((float)(t * 17 + id * 5));
            if (from->knows_labels) from->values[at] = id == batch->labels[t] ? 60 : 0;
            if (from->topk) from->values[at] = logf(0.9f * (float)(k + 1) / (float)(from->K * from->K));
        }
        int32_t *ids = from->ids + row * from->K;
        if (from->topk) ids[from->K - 1] = batch->labels[t];
        for (int64_t k = 0; k < from->K - 1 && from->topk; k++)
            if (ids[k] == batch->labels[t]) ids[from->K - 1] = -1;
    }
    batch->teacher = &from->logits;
}

/* ---- models */

static int fill(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    batch->num_tokens = TOKENS, batch->num_spans = 2;
    for (int64_t s = 0; s < 2; s++) batch->spans[s] = (mt_span){s * 16, 16, s * 16, 16, true};
    for (int64_t t = 0; t < TOKENS; t++) {
        batch->tokens[t] = (int32_t)(t * t * 7 % 61), batch->labels[t] = (int32_t)(t * 13 % VOCABULARY);
        batch->positions[t] = (int32_t)(t % 16), batch->loss_mask[t] = 1, batch->token_index[t] = t;
        batch->loss_inputs[MT_ADVANTAGES][t] = 0.3f * (float)(t % 7 - 3);
    }
    if (the_teacher) teach(the_teacher, batch);
    return 0;
}

/* A model with the gradients of one batch; its biases are random too, not zeros. */
typedef struct subject {
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    const mt_param *params;
    int64_t num_params;
    mt_bucket *buckets;
    float **gradients; // [num_params]
} subject;

static float *values_of(const subject *s, const mt_param *param, bool gradient) {
    const mt_bucket *b = &s->buckets[param->bucket];
    return (gradient ? b->grads : (float *)b->params) + param->offset;
}

/* Negative log-likelihood minus an entropy bonus, as of policy gradients. */
static void forward_with_entropy(const mt_ops *ops, const mt_loss_args *a, mt_stream *stream) {
    (void)ops, (void)stream;
    for (int64_t t = 0; t < a->cross_entropy->T; t++) {
        const float bonus = 0.7f * a->weights[t];
        a->sums[0] -= (double)a->weights[t] * (double)a->cross_entropy->logp[t] +
                      (double)bonus * (double)a->cross_entropy->entropy[t];
        a->sums[1] += (double)a->weights[t];
        a->dlogp[t] = -a->weights[t], a->dentropy[t] = -bonus;
    }
}

static const mt_loss with_entropy = {.uses_entropy = true, .forward = forward_with_entropy};
static const mt_loss *the_loss; // of models that subject_open opens; NULL: the default
static double the_temperature;  // of their samples, as in reinforcement learning; 0: none

static void subject_open(subject *s, const char *words) {
    char line[1024], *arguments[128];
    int count = 0;
    int64_t buckets;
    mt_error error;
    snprintf(line, sizeof line,
             "train --mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1 "
             "--hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --vocab-size %d --init-method-std 0.3 "
             "--hidden-dropout 0 --attention-dropout 0 --device cpu %s",
             VOCABULARY, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&s->options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&s->options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        fail_msg("%s", error.text);
    if (the_temperature > 0) s->options.stack.stage = MT_STAGE_RL, s->options.stack.temperature = the_temperature;
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = 16, .train = true};
    plan.loss = the_loss;
    for (int k = 0; the_teacher && k < the_teacher->config.num_pairs; k++)
        plan.taps[plan.num_taps++] = the_teacher->config.pairs[k].student;
    if (mt_model_create(&s->model, &s->options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    mt_model_init(s->model);
    mt_batch_alloc(&s->batch, TOKENS);
    s->params = mt_model_params(s->model, &s->num_params);
    s->buckets = mt_model_buckets(s->model, &buckets);
    s->gradients = mt_calloc(s->num_params * (int64_t)sizeof *s->gradients);
    for (int64_t i = 0; i < s->num_params; i++)
        for (int64_t k = 0; s->params[i].is_vector && k < s->params[i].rows; k++)
            values_of(s, &s->params[i], false)[k] += 0.3f * sinf((float)(k + 3 * (int)s->params[i].role));
    fill(NULL, 0, &s->batch, NULL);
    mt_model_forward(s->model, &s->batch, true);
    mt_model_backward(s->model);
    for (int64_t i = 0; i < s->num_params; i++) {
        const mt_param *param = &s->params[i];
        size_t bytes = (size_t)(param->rows * param->cols) * sizeof(float);
        s->gradients[i] = mt_calloc((int64_t)bytes);
        if (param->trained) memcpy(s->gradients[i], values_of(s, param, true), bytes);
    }
}

static void subject_close(subject *s) {
    for (int64_t i = 0; i < s->num_params; i++) free(s->gradients[i]);
    free(s->gradients);
    mt_batch_free(&s->batch);
    mt_model_destroy(s->model);
    mt_options_free(&s->options);
}

/* Adds `step` times the gradient of a role (MT_NUM_ROLES: none), over all layers and experts, to its values. */
static void move(const subject *s, mt_role role, double step) {
    for (int64_t i = 0; i < s->num_params; i++) {
        const mt_param *param = &s->params[i];
        float *values = values_of(s, param, false);
        for (int64_t k = 0; param->role == role && k < param->rows * param->cols; k++)
            values[k] += (float)(step * (double)s->gradients[i][k]);
    }
}

/* The sum of the counted tokens' losses with a role's values `step` further along its gradient. */
static double loss_at(subject *s, mt_role role, double step) {
    double loss;
    mt_error error;
    move(s, role, step);
    if (mt_evaluate(s->model, 1, fill, NULL, &s->batch, &loss, &error) != 0) fail_msg("%s", error.text);
    move(s, role, -step);
    double counted = 0;
    for (int64_t t = 0; t < TOKENS; t++) counted += (double)s->batch.loss_mask[t];
    return loss * counted;
}

/* Along its own gradient, the loss must rise by the gradient's norm. Returns false for a role that the model lacks. */
static bool expect_slope(subject *s, mt_role role, const char *words) {
    const double h = 0.01;
    double norm = 0;
    bool exists = false;
    for (int64_t i = 0; i < s->num_params; i++) {
        if (s->params[i].role != role || !s->params[i].trained) continue;
        exists = true;
        for (int64_t k = 0; k < s->params[i].rows * s->params[i].cols; k++)
            norm += (double)s->gradients[i][k] * (double)s->gradients[i][k];
    }
    norm = sqrt(norm);
    if (norm < 1e-3) return false; // as of keys' biases, which change no softmax
    double slope = (loss_at(s, role, h / norm) - loss_at(s, role, -h / norm)) / (2 * h);
    if (!(fabs(slope - norm) <= 0.01 * norm))
        fail_msg("%s\n  role %d: the loss rises by %g, and the gradient's norm is %g", words, (int)role, slope, norm);
    return exists;
}

#define EVERY_EXPERT " --num-layers 2 --num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 8"

/* Every parameter of models in which all experts are chosen, so that no step changes the choice. */
static void every_gradient_is_the_slope_of_the_loss(void **state) {
    (void)state;
    static const char *const cases[] = {
        "--num-layers 2",
        "--num-layers 2 --openai-gelu",
        "--num-layers 2 --swiglu",
        "--num-layers 2 --squared-relu",
        "--num-layers 2 --geglu --norm-placement both",
        "--num-layers 2 --norm-placement after --normalization RMSNorm --layernorm-zero-centered-gamma",
        "--num-layers 2 --layernorm-zero-centered-gamma --embedding-multiplier 3",
        "--num-layers 2 --normalization RMSNorm --norm-placement after --qk-layernorm --qk-layernorm-all-heads",
        "--num-layers 2 --softmax-type learnable --window-size 3 --window-attn-skip-freq 2",
        "--num-layers 2 --softmax-type off-by-one --softmax-scale 0.7",
        "--num-layers 2 --position-embedding-type rope --no-rope-freq 2 --window-size 4 --window-rotary-base 100",
        EVERY_EXPERT " --norm-placement both --softmax-type learnable",
        "--num-layers 2 --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
        EVERY_EXPERT " --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
        EVERY_EXPERT,
        EVERY_EXPERT " --openai-gelu --disable-bias-linear",
        EVERY_EXPERT " --swiglu",
        EVERY_EXPERT " --swiglu --disable-bias-linear",
        EVERY_EXPERT " --moe-router-linear-bias --moe-aux-loss-coeff 0",
        EVERY_EXPERT " --moe-router-linear-bias --moe-router-score-function sigmoid",
        EVERY_EXPERT " --moe-router-score-function sqrtsoftplus",
        EVERY_EXPERT " --no-moe-permute-fusion",
        EVERY_EXPERT " --disable-bias-linear --no-moe-permute-fusion",
        EVERY_EXPERT " --no-moe-grouped-gemm",
        EVERY_EXPERT " --disable-bias-linear --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate",
        EVERY_EXPERT " --openai-gelu --disable-bias-linear --moe-shared-expert-intermediate-size 12",
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        subject s;
        int roles = 0;
        subject_open(&s, cases[i]);
        for (int role = 0; role < MT_NUM_ROLES; role++) roles += expect_slope(&s, (mt_role)role, cases[i]);
        assert_true(roles >= 10);
        subject_close(&s);
    }
}

#define UNEVEN_EXPERTS                                                                                                 \
    " --num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-aux-loss-coeff "

/* The angles of layers that have windows: latent attention's too. */
static void windows_have_angles_of_their_own(void **state) {
    (void)state;
    static const char *const kinds[] = {"", " --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 "
                                            "--qk-pos-emb-head-dim 8 --v-head-dim 8"};
    static const char *const angles[] = {"--rotary-base 100", "--rotary-base 7 --window-rotary-base 100",
                                         "--rotary-base 7"};
    for (int kind = 0; kind < 2; kind++) {
        double losses[3];
        for (int i = 0; i < 3; i++) {
            subject s;
            char words[512];
            snprintf(words, sizeof words, "--num-layers 2 --position-embedding-type rope --window-size 4 %s%s",
                     angles[i], kinds[kind]);
            subject_open(&s, words);
            losses[i] = loss_at(&s, MT_NUM_ROLES, 0);
            subject_close(&s);
        }
        assert_true(losses[0] == losses[1]);
        assert_true(losses[0] != losses[2]);
    }
}

/* With all three auxiliary losses, every gradient is that without any plus what each loss adds alone. */
static void auxiliary_losses_add_their_gradients(void **state) {
    (void)state;
    static const char *const cases[] = {
        UNEVEN_EXPERTS "0",
        UNEVEN_EXPERTS "0.5",
        UNEVEN_EXPERTS "0.25 --moe-router-load-balancing-type seq_aux_loss",
        UNEVEN_EXPERTS "0.75 --moe-router-load-balancing-type global_aux_loss",
        UNEVEN_EXPERTS "0.75 0.5 0.25 --moe-router-load-balancing-type global_aux_loss aux_loss seq_aux_loss",
    };
    subject s[5];
    double largest[5] = {0};
    for (int i = 0; i < 5; i++) subject_open(&s[i], cases[i]);
    for (int64_t p = 0; p < s[0].num_params; p++)
        for (int64_t k = 0; s[0].params[p].trained && k < s[0].params[p].rows * s[0].params[p].cols; k++) {
            double none = (double)s[0].gradients[p][k], sum = none, all = (double)s[4].gradients[p][k];
            for (int i = 1; i < 4; i++) {
                sum += (double)s[i].gradients[p][k] - none;
                largest[i] = fmax(largest[i], fabs((double)s[i].gradients[p][k] - none));
            }
            if (!(fabs(all - sum) <= 1e-5 + 1e-4 * fabs(sum))) fail_msg("gradient %g, not %g", all, sum);
        }
    for (int i = 1; i < 4; i++) assert_true(largest[i] > 1e-3);
    for (int i = 0; i < 5; i++) subject_close(&s[i]);
}

/* Drawn logits: the loss does not depend on the router, which gets a gradient all the same (straight-through). */
static void a_router_with_drawn_logits_gets_their_gradient(void **state) {
    (void)state;
    static const char *const words = UNEVEN_EXPERTS "0 --moe-router-force-load-balancing";
    subject s;
    subject_open(&s, words);
    double norm = 0, loss = loss_at(&s, MT_NUM_ROLES, 0);
    for (int64_t i = 0; i < s.num_params; i++)
        for (int64_t k = 0; s.params[i].role == MT_ROUTER && k < s.params[i].rows * s.params[i].cols; k++)
            norm += fabs((double)s.gradients[i][k]);
    assert_true(norm > 1e-2 && loss_at(&s, MT_ROUTER, 1) == loss);
    assert_true(expect_slope(&s, MT_FINAL_NORM, words)); // behind the last router: no gradient of a router reaches it
    subject_close(&s);
}

/* A loss of one's own, with coefficients of both log-probability and entropy. */
static void gradients_of_a_loss_with_entropy_are_its_slopes(void **state) {
    (void)state;
    static const char *const cases[] = {"--num-layers 1", "--num-layers 2 --untie-embeddings-and-output-weights"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        subject plain, s;
        int roles = 0;
        subject_open(&plain, cases[i]);
        the_loss = &with_entropy;
        subject_open(&s, cases[i]);
        the_loss = NULL;
        assert_true(loss_at(&s, MT_NUM_ROLES, 0) < loss_at(&plain, MT_NUM_ROLES, 0) - 1);
        for (int role = 0; role < MT_NUM_ROLES; role++) roles += expect_slope(&s, (mt_role)role, cases[i]);
        assert_true(roles >= 10);
        subject_close(&s), subject_close(&plain);
    }
}

/* The loss of a forward, from its logits. */
static double distilled(subject *s, const teacher *from) {
    static float logits[TOKENS * VOCABULARY], logp[TOKENS];
    double sum = 0, student[VOCABULARY], other[VOCABULARY], unused[VOCABULARY];
    mt_model_forward(s->model, &s->batch, false);
    mt_model_read(s->model, logp, NULL, logits);
    fill(NULL, 0, &s->batch, NULL);
    for (int64_t row = 0; row < from->logits.count; row++) {
        int64_t t = from->tokens[row];
        for (int64_t k = 0; k < from->K; k++) {
            student[k] = (double)logits[t * VOCABULARY + from->ids[row * from->K + k]];
            other[k] = (double)from->values[row * from->K + k];
        }
        sum += from->config.weight * mt_divergence(&from->config.divergence, student, other, from->K, unused) -
               (1 - from->config.weight) * (double)logp[t];
    }
    return sum;
}

static void subject_open_distilled(subject *s, teacher *from, const char *words) {
    from->loss = mt_distillation, from->loss.config = from->loss.distillation = &from->config;
    the_teacher = from, the_loss = &from->loss;
    subject_open(s, words);
}

/* The share of adaptive KL is a constant of its gradient, so that its slope is another one. */
static void gradients_of_distillation_are_slopes_of_its_loss(void **state) {
    (void)state;
    static teacher from;
    for (int type = MT_FORWARD_KL; type <= MT_JS_DIVERGENCE; type++) {
        char words[200];
        subject s;
        int roles = 0;
        from = (teacher){.config = {{(mt_divergence_type)type, 1.5, 0.2, 0.5}, .weight = 0.8},
                         .K = type % 2 ? 7 : VOCABULARY};
        snprintf(words, sizeof words, "--num-layers 2 --untie-embeddings-and-output-weights");
        subject_open_distilled(&s, &from, words);
        fill(NULL, 0, &s.batch, NULL);
        double want = distilled(&s, &from), got = loss_at(&s, MT_NUM_ROLES, 0);
        if (!(fabs(got - want) <= 1e-6 * fabs(want))) fail_msg("divergence %d: loss %.9g, not %.9g", type, got, want);
        for (int role = 0; role < MT_NUM_ROLES && type != MT_ADAPTIVE_KL; role++)
            roles += expect_slope(&s, (mt_role)role, words);
        assert_true(type == MT_ADAPTIVE_KL || roles >= 10);
        subject_close(&s);
    }
    the_teacher = NULL, the_loss = NULL;
}

/* The forward divergence over the teacher's most probable labels beside a policy's loss, whose formula test_losses.c
 * compares with verl's: alone and with other terms, at a temperature, with a clamp. */
static void gradients_of_topk_distillation_are_slopes_of_its_loss(void **state) {
    (void)state;
    static teacher from;
    static const mt_policy_config cases[] = {
        {.distillation = {MT_DISTILL_IN_LOSS, MT_KL_FORWARD_TOPK, 1.5, .alone = true, .min_clamp = -INFINITY}},
        {.variant = MT_POLICY_GPG,
         .entropy_coef = 0.3,
         .distillation = {MT_DISTILL_IN_LOSS, MT_KL_FORWARD_TOPK, 0.5, .min_clamp = -4.5}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *words = i == 0 ? "--num-layers 2" : "--num-layers 1 --untie-embeddings-and-output-weights";
        subject s;
        int roles = 0, with = 0;
        from = (teacher){.K = 8, .topk = true, .loss = mt_policy};
        from.loss.inputs = i == 0 ? 0 : 1 << MT_ADVANTAGES;
        from.loss.uses_entropy = cases[i].entropy_coef > 0;
        from.loss.config = &cases[i], from.loss.topk = &cases[i].distillation;
        the_teacher = &from, the_loss = &from.loss, the_temperature = 0.8;
        subject_open(&s, words);
        for (int64_t row = 0; row < from.logits.count; row++) with += from.ids[row * from.K + from.K - 1] < 0;
        assert_true(with > 0 && with < from.logits.count); // the label is among the teacher's, or not
        for (int role = 0; role < MT_NUM_ROLES; role++) roles += expect_slope(&s, (mt_role)role, words);
        assert_true(roles >= 10);
        subject_close(&s);
    }
    the_teacher = NULL, the_loss = NULL, the_temperature = 0;
}

#define HIDDEN_PAIRS                                                                                                   \
    .num_pairs = PAIRS,                                                                                                \
    .pairs = {{0, 0, MT_HIDDEN_COSINE}, {MT_TAP_FINAL_NORM, 0, MT_HIDDEN_COSINE}, {1, 0, MT_HIDDEN_MSE}}

/* Outputs of layers and of the final norm, with and without recomputation. */
static void gradients_of_hidden_state_losses_are_slopes(void **state) {
    (void)state;
    static teacher from;
    static const char *const cases[] = {
        "--num-layers 3", "--num-layers 3 --norm-placement both --normalization RMSNorm",
        "--num-layers 3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
        EVERY_EXPERT};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        subject s;
        int roles = 0;
        from = (teacher){.config = {{MT_FORWARD_KL, 1.5, 0, 0}, .weight = 0.8, .hidden_weight = 2, HIDDEN_PAIRS},
                         .K = VOCABULARY};
        subject_open_distilled(&s, &from, cases[i]);
        double with = loss_at(&s, MT_NUM_ROLES, 0);
        for (int role = 0; role < MT_NUM_ROLES; role++) roles += expect_slope(&s, (mt_role)role, cases[i]);
        assert_true(roles >= 6);
        from.config.hidden_weight = 0; // the model reads it again
        assert_true(with > loss_at(&s, MT_NUM_ROLES, 0) + 1);
        subject_close(&s);
    }
    the_teacher = NULL, the_loss = NULL;
}

/* The gradients of a balanced loss are those of fixed weights of the same size. */
static void balances_have_the_gradients_of_their_weights(void **state) {
    (void)state;
    static teacher from;
    const char *words = "--num-layers 2";
    subject entropy, divergence, both;
    from = (teacher){.config = {{MT_FORWARD_KL, 1.5, 0, 0}, .weight = 0, HIDDEN_PAIRS}, .K = VOCABULARY};
    subject_open_distilled(&entropy, &from, words);
    double E = loss_at(&entropy, MT_NUM_ROLES, 0);
    from.config.weight = 1;
    subject_open_distilled(&divergence, &from, words);
    double D = loss_at(&divergence, MT_NUM_ROLES, 0);
    from.config.hidden_weight = 1;
    subject_open_distilled(&both, &from, words);
    double H = loss_at(&both, MT_NUM_ROLES, 0) - D, scale = 3;
    for (int all = 0; all < 2; all++) {
        subject s;
        from.config.balance = all ? MT_DISTILL_BALANCE_ALL : MT_DISTILL_BALANCE_HIDDEN, from.config.scale = scale;
        subject_open_distilled(&s, &from, words);
        double want = all ? E + scale * E : 2 * D, got = loss_at(&s, MT_NUM_ROLES, 0);
        if (!(fabs(got - want) <= 1e-5 * want)) fail_msg("balance %d: loss %.9g, not %.9g", all, got, want);
        for (int64_t i = 0; i < s.num_params; i++) {
            double difference = 0, norm = 0, of_both = all ? scale * E / (2 * D) : 1;
            for (int64_t k = 0; k < s.params[i].rows * s.params[i].cols; k++) {
                double plain = (double)divergence.gradients[i][k], hidden = (double)both.gradients[i][k] - plain;
                double whole = of_both * (plain + D / H * hidden) + (all ? (double)entropy.gradients[i][k] : 0);
                difference += pow((double)s.gradients[i][k] - whole, 2), norm += whole * whole;
            }
            if (!(sqrt(difference) <= 1e-4 * sqrt(norm) + 1e-5))
                fail_msg("balance %d, role %d: %g from a gradient of norm %g", all, (int)s.params[i].role,
                         sqrt(difference), sqrt(norm));
        }
        subject_close(&s);
    }
    the_teacher = NULL, the_loss = NULL;
    subject_close(&entropy), subject_close(&divergence), subject_close(&both);
}

/* Forward KL from a teacher that is sure of the labels is the cross-entropy. */
static void a_teacher_that_is_sure_gives_the_gradients_of_labels(void **state) {
    (void)state;
    static teacher from;
    subject plain, s;
    from = (teacher){.config = {{MT_FORWARD_KL, 1, 0, 0}, .weight = 0.6}, .K = VOCABULARY, .knows_labels = true};
    subject_open_distilled(&s, &from, "--num-layers 2");
    the_loss = NULL; // the same batch
    subject_open(&plain, "--num-layers 2");
    for (int64_t i = 0; i < s.num_params; i++) {
        double difference = 0, norm = 0;
        for (int64_t k = 0; k < s.params[i].rows * s.params[i].cols; k++) {
            double want = (double)plain.gradients[i][k];
            difference += pow((double)s.gradients[i][k] - want, 2), norm += want * want;
        }
        if (!(sqrt(difference) <= 1e-5 * sqrt(norm) + 1e-6))
            fail_msg("role %d: %g from a gradient of norm %g", (int)s.params[i].role, sqrt(difference), sqrt(norm));
    }
    the_teacher = NULL;
    subject_close(&plain), subject_close(&s);
}

/* Experts choose, drop and pad; their own parameters are behind the choice of their layer. */
static void gradients_of_chosen_experts_are_slopes_of_the_loss(void **state) {
    (void)state;
    static const char *const capacities[] = {"", " --moe-expert-capacity-factor 1",
                                             " --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"};
    static const char *const kinds[] = {"", " --openai-gelu", " --squared-relu", " --swiglu"};
    static const char *const ways[] = {"", " --no-moe-permute-fusion", " --no-moe-grouped-gemm"};
    for (int k = 0; k < 3 * 4 * 3; k++) {
        char words[400];
        subject s;
        int roles = 0;
        snprintf(words, sizeof words, "--num-layers 1 --num-experts 8 --moe-ffn-hidden-size 8%s%s%s",
                 capacities[k / 12], kinds[k / 3 % 4], ways[k % 3]);
        subject_open(&s, words);
        for (int role = MT_EXPERT_GATE; role <= MT_EXPERT_DOWN; role++) roles += expect_slope(&s, (mt_role)role, words);
        for (int role = MT_EXPERT_GATE_BIAS; role <= MT_EXPERT_DOWN_BIAS; role++)
            roles += expect_slope(&s, (mt_role)role, words);
        assert_int_equal(roles, strstr(words, "swiglu") ? 6 : 4);
        subject_close(&s);
    }
}

/* The sum of the tokens' losses of a model, and of one whose every expert is that model's MLP. */
static void expect_experts_like_mlp(const char *words, const char *more) {
    static const struct {
        mt_role expert, mlp;
    } roles[] = {{MT_EXPERT_GATE, MT_GATE},       {MT_EXPERT_UP, MT_UP},
                 {MT_EXPERT_DOWN, MT_DOWN},       {MT_EXPERT_GATE_BIAS, MT_GATE_BIAS},
                 {MT_EXPERT_UP_BIAS, MT_UP_BIAS}, {MT_EXPERT_DOWN_BIAS, MT_DOWN_BIAS}};
    char line[400];
    subject dense, experts;
    int copied = 0;
    subject_open(&dense, words);
    snprintf(line, sizeof line, "%s --num-experts 8 --moe-router-topk 3%s", words, more);
    subject_open(&experts, line);
    for (int64_t i = 0; i < experts.num_params; i++)
        for (size_t k = 0; k < sizeof roles / sizeof *roles; k++)
            for (int64_t d = 0; experts.params[i].role == roles[k].expert && d < dense.num_params; d++) {
                const mt_param *to = &experts.params[i], *from = &dense.params[d];
                if (from->role != roles[k].mlp || from->layer != to->layer) continue;
                assert_true(from->rows == to->rows && from->cols == to->cols);
                memcpy(values_of(&experts, to, false), values_of(&dense, from, false),
                       (size_t)(to->rows * to->cols) * sizeof(float));
                copied++;
            }
    int per_expert = (dense.options.stack.swiglu ? 3 : 2) * (dense.options.stack.mlp_bias ? 2 : 1);
    assert_int_equal(copied, 8 * 2 * per_expert);
    double want = loss_at(&dense, MT_NUM_ROLES, 0), got = loss_at(&experts, MT_NUM_ROLES, 0);
    if (!(fabs(got - want) <= 1e-5 * want)) fail_msg("%s\n  loss %.9g, of the MLP %.9g", line, got, want);
    subject_close(&dense), subject_close(&experts);
}

/* A token's probabilities sum to 1, so that they scale biases too, and not only products. */
static void equal_experts_compute_the_mlp_that_each_of_them_is(void **state) {
    (void)state;
    static const char *const kinds[] = {"--num-layers 2", "--num-layers 2 --openai-gelu", "--num-layers 2 --swiglu"};
    static const char *const ways[] = {"", " --no-moe-permute-fusion", " --no-moe-grouped-gemm"};
    for (int k = 0; k < 18; k++) {
        char words[200];
        snprintf(words, sizeof words, "%s%s", kinds[k / 3 % 3], k < 9 ? "" : " --disable-bias-linear");
        expect_experts_like_mlp(words, ways[k % 3]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_gradient_is_the_slope_of_the_loss),
        cmocka_unit_test(windows_have_angles_of_their_own),
        cmocka_unit_test(auxiliary_losses_add_their_gradients),
        cmocka_unit_test(a_router_with_drawn_logits_gets_their_gradient),
        cmocka_unit_test(gradients_of_a_loss_with_entropy_are_its_slopes),
        cmocka_unit_test(gradients_of_distillation_are_slopes_of_its_loss),
        cmocka_unit_test(gradients_of_topk_distillation_are_slopes_of_its_loss),
        cmocka_unit_test(gradients_of_hidden_state_losses_are_slopes),
        cmocka_unit_test(balances_have_the_gradients_of_their_weights),
        cmocka_unit_test(a_teacher_that_is_sure_gives_the_gradients_of_labels),
        cmocka_unit_test(equal_experts_compute_the_mlp_that_each_of_them_is),
        cmocka_unit_test(gradients_of_chosen_experts_are_slopes_of_the_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
