/* test_sparse_attention.c: the indexer's choice against a sort, its loss and gradients against definitions in float64
 * and finite differences, and sparse attention over all keys against latent attention. */
// Sections of megatron.c: §19 §19a §19b
#include "data/options/option_table.h"
#include "data/options/options.h"
#include "data/checkpoint/run_options.h"
#include "megatron.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- operations: T query rows in two sequences, the last rows padding, more than one block of the loss */

enum { T = 150, H = 3, D = 6, TOPK = 9, FIRST = 100, SECOND = 40 };

static const mt_span spans_of_two[] = {{0, FIRST, 0, FIRST, true}, {FIRST, SECOND, FIRST, SECOND, true}};
static const mt_spans spans = {spans_of_two, spans_of_two, 2};

typedef struct operands {
    float q[T * H * D], k[T * D], weights[T * H];
    int32_t selected[T * TOPK];
} operands;

/* Numbers without a pattern in [-1, 1); rounded to halves, many products are equal, or not positive. */
static void fill(float *x, int64_t n, int seed, bool coarse) {
    for (int64_t i = 0; i < n; i++) {
        double value = sin((double)(i * 37 + seed * 101)) * 43758.5453;
        value = 2 * (value - floor(value)) - 1;
        x[i] = (float)(coarse ? round(2 * value) / 2 : value);
    }
}

static void operands_fill(operands *o, bool coarse) {
    fill(o->q, T * H * D, 1, coarse), fill(o->k, T * D, 2, coarse), fill(o->weights, T * H, 3, coarse);
}

static mt_indexer_args indexer_of(operands *o) {
    return (mt_indexer_args){.spans = &spans,
                             .rows = T,
                             .H = H,
                             .D = D,
                             .topk = TOPK,
                             .ties = MT_TIES_FIRST,
                             .scale = 0.25f,
                             .q = o->q,
                             .k = o->k,
                             .weights = o->weights,
                             .selected = o->selected};
}

static const mt_span *span_of(int64_t t) {
    return t < FIRST ? &spans_of_two[0] : t < FIRST + SECOND ? &spans_of_two[1] : NULL;
}

/* The score of query row t and key j of its span, in float64. */
static double score(const operands *o, int64_t t, int64_t j) {
    double sum = 0;
    for (int64_t h = 0; h < H; h++) {
        double product = 0;
        for (int64_t c = 0; c < D; c++)
            product += (double)o->q[(t * H + h) * D + c] * (double)o->k[(span_of(t)->k_start + j) * D + c];
        sum += 0.25 * (double)o->weights[t * H + h] * fmax(product, 0);
    }
    return sum;
}

typedef struct scored {
    double score;
    int32_t key;
} scored;

/* Greatest scores first, of equal ones the earlier key. */
static int by_score(const void *left, const void *right) {
    const scored *a = left, *b = right;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->key < b->key ? -1 : 1;
}

static int by_key(const void *left, const void *right) {
    const scored *a = left, *b = right;
    return a->key < b->key ? -1 : a->key > b->key;
}

/* Sums of halves are exact in fp32, so that equal scores are equal there too. */
static void the_greatest_scores_are_selected_and_of_equal_ones_the_first(void **state) {
    (void)state;
    static operands o;
    int64_t ties = 0;
    for (int coarse = 0; coarse < 2; coarse++) {
        operands_fill(&o, coarse);
        mt_indexer_args a = indexer_of(&o);
        mt_cpu_ops.indexer_forward(&a, MT_F32, NULL);
        for (int64_t t = 0; t < FIRST + SECOND; t++) {
            scored all[FIRST];
            int64_t seen = t - span_of(t)->q_start + 1, count = seen < TOPK ? seen : TOPK;
            for (int64_t j = 0; j < seen; j++) all[j] = (scored){score(&o, t, j), (int32_t)j};
            qsort(all, (size_t)seen, sizeof *all, by_score);
            ties += seen > TOPK && all[TOPK - 1].score == all[TOPK].score;
            qsort(all, (size_t)count, sizeof *all, by_key);
            for (int64_t i = 0; i < TOPK; i++) {
                int32_t want = i < count ? all[i].key : -1, got = o.selected[t * TOPK + i];
                if (got != want) fail_msg("query %d: key %d is %d, not %d", (int)t, (int)i, got, want);
            }
        }
    }
    assert_true(ties > 20);
}

/* torch 2.15 on a CPU: torch.tensor(scores).topk(k).indices, sorted. */
static void equal_scores_are_selected_as_by_torch_on_demand(void **state) {
    (void)state;
    static const struct {
        int n, k;
        const char *scores, *selected; // a digit each; keys from A on, in the order of ASCII
    } cases[] = {
        {28, 5, "1030000130200002102000300000", "CIKSW"},
        {14, 8, "00200113200031", "BCFGHIMN"},
        {35, 4, "00200210021030331311320020310031101", "MRU["},
        {31, 7, "0111311100311131111121031100013", "EKOSUX_"},
        {18, 8, "020211000300003000", "BDEFJNOR"},
        {39, 4, "001020101222031322011312011310300301002", "PV\\_"},
        {9, 6, "103003101", "ACFGHI"},
        {18, 6, "300011110311000130", "AGHJKQ"},
        {37, 8, "0022323201301021310033102000100012023", "EGKQUVYe"},
        {34, 4, "0000201002002013311001010100110013", "MPQb"},
        {32, 6, "00010000302331002002000300210111", "ILMQTX"},
        {34, 6, "2011210002000000003310231213300000", "JSTX\\]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum { MOST = 40 };
        float q[MOST] = {0}, k[MOST], weights[MOST] = {0};
        int32_t selected[MOST * MOST];
        int n = cases[i].n;
        const mt_span span = {0, n, 0, n, false};
        const mt_spans one = {&span, &span, 1};
        mt_indexer_args a = {.spans = &one,
                             .rows = n,
                             .H = 1,
                             .D = 1,
                             .topk = cases[i].k,
                             .ties = MT_TIES_TORCH,
                             .scale = 1,
                             .q = q,
                             .k = k,
                             .weights = weights,
                             .selected = selected};
        for (int j = 0; j < n; j++) k[j] = (float)(cases[i].scores[j] - '0'), q[j] = weights[j] = 1;
        mt_cpu_ops.indexer_forward(&a, MT_F32, NULL);
        for (int j = 0; j < a.topk; j++)
            if (selected[j] != cases[i].selected[j] - 'A') fail_msg("case %d: key %d is %d", (int)i, j, selected[j]);
    }
}

/* ---- the loss */

enum { ROWS = 64, HEADS = 2 };

static float shares[(T + ROWS) * T];

/* Targets: positive numbers with any sum. */
static void shares_fill(void) {
    fill(shares, (T + ROWS) * T, 4, false);
    for (int64_t i = 0; i < (T + ROWS) * T; i++) shares[i] = shares[i] * shares[i];
}

static int64_t token_index[T];

/* Loss and gradients of all rows, block by block; padding and rows in no span count nothing. */
static double loss_of(operands *o, bool all, double counted[1], float *dq, float *dweights, float *dk) {
    static float slopes[ROWS * T];
    double sums[2] = {0};
    mt_indexer_args a = indexer_of(o);
    a.width = all ? T : TOPK, a.all_keys = all, a.token_index = token_index, a.slopes = slopes, a.coeff = 1;
    a.sums = sums, a.dq = dq, a.dweights = dweights, a.dk = dk;
    memset(dk, 0, T * D * sizeof *dk);
    for (int64_t t = 0; t < T; t++) token_index[t] = t % 17 == 5 ? -1 : t;
    for (a.block = 0; a.block < T; a.block += ROWS) {
        a.block_rows = T - a.block < ROWS ? T - a.block : ROWS;
        a.shares = shares + a.block * a.width;
        mt_cpu_ops.indexer_backward(&a, MT_F32, NULL);
    }
    counted[0] = sums[1];
    return sums[0];
}

/* The definition, in float64. */
static double divergence(const operands *o, bool all) {
    double loss = 0;
    for (int64_t t = 0; t < FIRST + SECOND; t++) {
        if (token_index[t] < 0) continue;
        int64_t seen = t - span_of(t)->q_start + 1, n = all || seen < TOPK ? seen : TOPK;
        const float *target = shares + t * (all ? T : TOPK);
        double scores[T], sum = 0, total = 0;
        for (int64_t i = 0; i < n; i++) {
            scores[i] = score(o, t, all ? i : o->selected[t * TOPK + i]);
            sum += exp(scores[i]), total += (double)target[i];
        }
        for (int64_t i = 0; i < n; i++) {
            double p = (double)target[i] / total;
            if (p > 0) loss += p * (log(p) - scores[i] + log(sum));
        }
    }
    return loss;
}

static void expect_slopes(operands *o, bool all, float *x, const float *gradient, int64_t n, const char *what) {
    const double h = 1e-4;
    double largest = 0;
    for (int64_t i = 0; i < n; i += 7) {
        float before = x[i];
        x[i] = (float)((double)before + h);
        double up = divergence(o, all), step = (double)x[i];
        x[i] = (float)((double)before - h);
        double slope = (up - divergence(o, all)) / (step - (double)x[i]);
        x[i] = before;
        largest = fmax(largest, fabs(slope));
        if (!(fabs(slope - (double)gradient[i]) <= 3e-4 + 0.02 * fabs(slope)))
            fail_msg("%s[%d], %s keys: gradient %g, slope %g", what, (int)i, all ? "all" : "selected",
                     (double)gradient[i], slope);
    }
    assert_true(largest > 0.01);
}

static void the_loss_of_many_blocks_is_the_divergence_and_its_gradients_are_slopes(void **state) {
    (void)state;
    static operands o;
    static float dq[T * H * D], dweights[T * H], dk[T * D];
    operands_fill(&o, false);
    shares_fill();
    mt_indexer_args a = indexer_of(&o);
    mt_cpu_ops.indexer_forward(&a, MT_F32, NULL);
    for (int all = 0; all < 2; all++) {
        double counted, got = loss_of(&o, all, &counted, dq, dweights, dk), want = divergence(&o, all);
        int64_t queries = 0;
        for (int64_t t = 0; t < FIRST + SECOND; t++) queries += t % 17 != 5;
        assert_true(counted == (double)queries);
        if (!(fabs(got - want) <= 1e-5 * want)) fail_msg("loss %.9g, not %.9g", got, want);
        expect_slopes(&o, all, o.q, dq, T * H * D, "q");
        expect_slopes(&o, all, o.weights, dweights, T * H, "weights");
        expect_slopes(&o, all, o.k, dk, T * D, "k");
    }
}

/* Ranks that own different rows: the same choice and loss, and gradients of keys that sum to the same. */
static void rows_of_two_ranks_are_those_of_one(void **state) {
    (void)state;
    static operands o, other;
    static float dq[2][T * H * D], dweights[2][T * H], dk[3][T * D], slopes[ROWS * T];
    double counted, sums[2] = {0};
    operands_fill(&o, false);
    shares_fill();
    mt_indexer_args a = indexer_of(&o);
    mt_cpu_ops.indexer_forward(&a, MT_F32, NULL);
    double want = loss_of(&o, true, &counted, dq[0], dweights[0], dk[0]);
    memcpy(&other, &o, sizeof o);
    memset(dk[1], 0, sizeof dk[1] + sizeof dk[2]);
    for (int rank = 0; rank < 2; rank++) {
        mt_indexer_args b = indexer_of(&other);
        int64_t first = b.first_row = rank * T / 2;
        b.rows = T / 2, b.q = other.q + first * H * D, b.weights = other.weights + first * H;
        b.selected = other.selected + first * TOPK;
        memset(b.selected, 0, T / 2 * TOPK * sizeof *b.selected);
        mt_cpu_ops.indexer_forward(&b, MT_F32, NULL);
        b.width = T, b.all_keys = true, b.token_index = token_index, b.slopes = slopes, b.coeff = 1, b.sums = sums;
        b.dq = dq[1] + first * H * D, b.dweights = dweights[1] + first * H, b.dk = dk[1 + rank];
        for (b.block = 0; b.block < T; b.block += ROWS) {
            b.block_rows = T - b.block < ROWS ? T - b.block : ROWS;
            b.shares = shares + b.block * T;
            mt_cpu_ops.indexer_backward(&b, MT_F32, NULL);
        }
    }
    assert_memory_equal(other.selected, o.selected, sizeof o.selected);
    assert_memory_equal(dq[1], dq[0], sizeof dq[0]);
    assert_memory_equal(dweights[1], dweights[0], sizeof dweights[0]);
    assert_true(fabs(sums[0] - want) <= 1e-9 * want && sums[1] == counted);
    for (int64_t i = 0; i < T * D; i++) {
        double sum = (double)dk[1][i] + (double)dk[2][i];
        assert_true(fabs(sum - (double)dk[0][i]) <= 1e-5 * (1 + fabs(sum)));
    }
}

/* A NaN in an operand of the indexer: the queries whose choice it decides are NaN for attention too, in their first
 * element, and no others; the loss is NaN, and so are gradients of these queries. */
static void a_score_that_is_not_a_number_reaches_attention_and_the_loss(void **state) {
    (void)state;
    static operands o;
    static float dq[T * H * D], dweights[T * H], dk[T * D], attention[T * 2];
    enum { BAD = 50 };
    shares_fill();
    for (int operand = 0; operand < 3; operand++) {
        operands_fill(&o, false);
        *(operand == 0   ? &o.q[(BAD * H + 1) * D + 2]
          : operand == 1 ? &o.weights[BAD * H + 1]
                         : &o.k[BAD * D + 2]) = NAN;
        for (int64_t i = 0; i < T * 2; i++) attention[i] = 1;
        mt_indexer_args a = indexer_of(&o);
        a.attention_q = attention, a.attention_q_stride = 2;
        mt_cpu_ops.indexer_forward(&a, MT_F32, NULL);
        double counted, loss = loss_of(&o, true, &counted, dq, dweights, dk);
        if (!isnan(loss)) fail_msg("operand %d: the loss is %g", operand, loss);
        for (int64_t t = 0; t < T; t++) {
            bool is_bad = operand == 2 ? t >= BAD && t < FIRST : t == BAD, has_nan = false;
            for (int64_t i = 0; i < H * D; i++) has_nan |= isnan(dq[t * H * D + i]);
            for (int64_t i = 0; i < H; i++) has_nan |= isnan(dweights[t * H + i]);
            if (isnan(attention[2 * t]) != is_bad || isnan(attention[2 * t + 1]))
                fail_msg("operand %d: attention's query %d is %g", operand, (int)t, (double)attention[2 * t]);
            if (token_index[t] >= 0 && has_nan != is_bad) // padding multiplies keys by 0
                fail_msg("operand %d: gradients of query %d", operand, (int)t);
        }
    }
}

/* ---- models */

enum { TOKENS = 96, LENGTH = 48, VOCABULARY = 64 };

#define LATENT                                                                                                         \
    "--num-layers 2 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "            \
    "--multi-latent-attention --qk-layernorm --latent-norm-epsilon 1e-6 --q-lora-rank 12 --kv-lora-rank 8 "            \
    "--qk-head-dim 6 --qk-pos-emb-head-dim 4 "                                                                         \
    "--v-head-dim 5 "
#define SPARSE                                                                                                         \
    LATENT "--experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk "

static int fill_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    batch->num_tokens = TOKENS, batch->num_spans = 2;
    for (int64_t s = 0; s < 2; s++) batch->spans[s] = (mt_span){s * LENGTH, LENGTH, s * LENGTH, LENGTH, true};
    for (int64_t t = 0; t < TOKENS; t++) {
        batch->tokens[t] = (int32_t)(t * t * 7 % 61), batch->labels[t] = (int32_t)(t * 13 % VOCABULARY);
        batch->positions[t] = (int32_t)(t % LENGTH), batch->loss_mask[t] = 1, batch->token_index[t] = t;
    }
    return 0;
}

typedef struct subject {
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    const mt_param *params;
    int64_t num_params;
    mt_bucket *buckets;
} subject;

static float *values_of(const subject *s, const mt_param *param, bool gradient) {
    const mt_bucket *b = &s->buckets[param->bucket];
    return (gradient ? b->grads : (float *)b->params) + param->offset;
}

static bool is_of_indexer(const mt_param *param) {
    return param->role >= MT_INDEXER_Q && param->role <= MT_INDEXER_K_NORM_BIAS;
}

/* A learning rate that changes no weight. */
static void subject_open(subject *s, const char *words) {
    char line[1024], *arguments[128];
    int count = 0;
    int64_t buckets;
    mt_error error;
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-30 "
             "--min-lr 0 --weight-decay 0 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --vocab-size "
             "%d --init-method-std 0.3 --hidden-dropout 0 --attention-dropout 0 --device cpu %s",
             LENGTH, VOCABULARY, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&s->options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&s->options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        fail_msg("%s", error.text);
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = LENGTH, .train = true};
    if (mt_model_create(&s->model, &s->options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    mt_model_init(s->model);
    mt_batch_alloc(&s->batch, TOKENS);
    s->params = mt_model_params(s->model, &s->num_params);
    s->buckets = mt_model_buckets(s->model, &buckets);
    fill_batch(NULL, 0, &s->batch, NULL);
}

static void subject_close(subject *s) {
    mt_batch_free(&s->batch);
    mt_model_destroy(s->model);
    mt_options_free(&s->options);
}

static void compute_gradients(subject *s) {
    mt_model_forward(s->model, &s->batch, true);
    mt_model_backward(s->model);
}

/* The metrics of a step. */
static mt_metrics step(subject *s) {
    mt_run_state run = {0};
    mt_metrics metrics;
    mt_error error;
    if (mt_train_step(s->model, &run, 1, fill_batch, NULL, &s->batch, &metrics, &error) != 0)
        fail_msg("%s", error.text);
    return metrics;
}

static const mt_param *same_param(const subject *s, const mt_param *of) {
    for (int64_t i = 0; i < s->num_params; i++)
        if (s->params[i].role == of->role && s->params[i].layer == of->layer) return &s->params[i];
    return NULL;
}

/* Random numbers depend on roles and layers, so that both models begin with equal weights. */
static void attention_over_all_keys_is_latent_attention(void **state) {
    (void)state;
    static float logits[2][TOKENS * VOCABULARY], logp[TOKENS];
    subject dense, sparse, few;
    double different = 0;
    subject_open(&dense, LATENT), subject_open(&sparse, SPARSE "48"), subject_open(&few, SPARSE "5");
    mt_model_forward(dense.model, &dense.batch, false), mt_model_forward(sparse.model, &sparse.batch, false);
    mt_model_read(dense.model, logp, NULL, logits[0]);
    mt_model_read(sparse.model, logp, NULL, logits[1]);
    compute_gradients(&dense), compute_gradients(&sparse), compute_gradients(&few);
    for (int64_t i = 0; i < TOKENS * VOCABULARY; i++)
        if (!(fabsf(logits[0][i] - logits[1][i]) <= 1e-4f * (1 + fabsf(logits[0][i]))))
            fail_msg("logit %d is %g, of latent attention %g", (int)i, (double)logits[1][i], (double)logits[0][i]);
    for (int64_t i = 0; i < sparse.num_params; i++) {
        const mt_param *param = &sparse.params[i], *other = same_param(&dense, param);
        const float *gradient = values_of(&sparse, param, true);
        assert_true(!other == is_of_indexer(param));
        for (int64_t k = 0; k < param->rows * param->cols; k++) {
            float want = other ? values_of(&dense, other, true)[k] : 0; // the indexer learns from its own loss only
            assert_true(fabsf(gradient[k] - want) <= 1e-4f * (1 + fabsf(want)));
            different =
                fmax(different, fabs((double)gradient[k] - (double)values_of(&few, same_param(&few, param), true)[k]));
        }
    }
    assert_true(different > 0.01); // from attention over five keys
    subject_close(&dense), subject_close(&sparse), subject_close(&few);
}

/* Adds `by` times its gradient to a role's values. */
static void move(const subject *s, mt_role role, float **gradients, double by) {
    for (int64_t i = 0; i < s->num_params; i++)
        for (int64_t k = 0; s->params[i].role == role && k < s->params[i].rows * s->params[i].cols; k++)
            values_of(s, &s->params[i], false)[k] += (float)(by * (double)gradients[i][k]);
}

/* The loss trains the indexer alone; its metric rises along its gradient by the gradient's norm. */
static void expect_slope_of_metric(const char *words, const char *loss, int64_t layers) {
    const double h = 0.002; // a step over a product of 0 changes the slope
    static const mt_role roles[] = {MT_INDEXER_Q, MT_INDEXER_K, MT_INDEXER_WEIGHTS, MT_INDEXER_K_NORM,
                                    MT_INDEXER_K_NORM_BIAS};
    char with[600];
    subject plain, s;
    snprintf(with, sizeof with, "%s --dsa-indexer-loss-coeff 3%s", words, loss);
    subject_open(&plain, words), subject_open(&s, with);
    compute_gradients(&plain), compute_gradients(&s);
    for (int64_t i = 0; i < s.num_params; i++) {
        const mt_param *param = &s.params[i];
        const float *with_loss = values_of(&s, param, true),
                    *without = values_of(&plain, same_param(&plain, param), true);
        if (!is_of_indexer(param)) assert_memory_equal(with_loss, without, (size_t)(param->rows * param->cols) * 4);
    }
    float **gradients = mt_calloc(s.num_params * (int64_t)sizeof *gradients);
    for (int64_t i = 0; i < s.num_params; i++) {
        int64_t bytes = s.params[i].rows * s.params[i].cols * 4;
        gradients[i] = memcpy(mt_malloc(bytes), values_of(&s, &s.params[i], true), (size_t)bytes);
    }
    for (size_t r = 0; r < sizeof roles / sizeof *roles; r++) {
        double norm = 0, losses[2];
        for (int64_t i = 0; i < s.num_params; i++)
            for (int64_t k = 0; s.params[i].role == roles[r] && k < s.params[i].rows * s.params[i].cols; k++)
                norm += (double)gradients[i][k] * (double)gradients[i][k];
        norm = sqrt(norm);
        assert_true(norm > 1e-2);
        for (int way = 0; way < 2; way++) {
            move(&s, roles[r], gradients, (way ? -h : h) / norm);
            losses[way] = step(&s).indexer_loss * TOKENS * (double)layers;
            move(&s, roles[r], gradients, (way ? h : -h) / norm);
        }
        double slope = (losses[0] - losses[1]) / (2 * h);
        if (!(fabs(slope - norm) <= 0.01 * norm))
            fail_msg("%s\n  role %d: the loss rises by %g, and the gradient's norm is %g", words, (int)roles[r], slope,
                     norm);
    }
    for (int64_t i = 0; i < s.num_params; i++) free(gradients[i]);
    free(gradients);
    subject_close(&plain), subject_close(&s);
}

static void the_indexers_loss_trains_the_indexer_by_its_slope_and_nothing_else(void **state) {
    (void)state;
    expect_slope_of_metric(SPARSE "48", "", 2);
    expect_slope_of_metric(SPARSE "48 --dsa-indexer-rope-interleaved", " --dsa-indexer-use-sparse-loss", 2);
    expect_slope_of_metric(SPARSE "48 --dsa-indexer-topk-freq 2", "", 1);
}

/* In bf16 the indexer's loss is near that in fp32. */
static void the_indexers_loss_in_bf16_is_that_in_fp32(void **state) {
    (void)state;
    subject plain, s;
    subject_open(&plain, SPARSE "7 --dsa-indexer-loss-coeff 1"),
        subject_open(&s, SPARSE "7 --dsa-indexer-loss-coeff 1 --bf16");
    double want = step(&plain).indexer_loss, got = step(&s).indexer_loss;
    if (!(want > 0.01 && fabs(got - want) <= 0.05 * want)) fail_msg("loss %g in bf16, %g in fp32", got, want);
    subject_close(&plain), subject_close(&s);
}

/* The loss over the seven selected keys is another than that over all. */
static void the_sparse_loss_is_over_the_selected_keys(void **state) {
    (void)state;
    subject all, some;
    subject_open(&all, SPARSE "7 --dsa-indexer-loss-coeff 1");
    subject_open(&some, SPARSE "7 --dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss");
    double a = step(&all).indexer_loss, b = step(&some).indexer_loss;
    if (!(a > 0 && b > 0 && fabs(a - b) > 0.01 * a)) fail_msg("loss %g over all keys, %g over the selected ones", a, b);
    subject_close(&all), subject_close(&some);
}

/* In fp8 the indexer's backward reads the values of its own layer: gradients are those of values that are computed
 * again. */
static void gradients_in_fp8_are_those_of_recomputation(void **state) {
    (void)state;
#define IN_FP8 SPARSE "7 --dsa-indexer-loss-coeff 1 --bf16 --fp8-format hybrid --fp8-recipe tensorwise"
    subject kept, again;
    subject_open(&kept, IN_FP8);
    subject_open(&again, IN_FP8 " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1");
    double a = step(&kept).grad_norm, b = step(&again).grad_norm;
    if (!(a > 0 && fabs(a - b) <= 1e-4 * a)) fail_msg("gradient norm %g, with recomputation %g", a, b);
    subject_close(&kept), subject_close(&again);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_greatest_scores_are_selected_and_of_equal_ones_the_first),
        cmocka_unit_test(equal_scores_are_selected_as_by_torch_on_demand),
        cmocka_unit_test(the_loss_of_many_blocks_is_the_divergence_and_its_gradients_are_slopes),
        cmocka_unit_test(rows_of_two_ranks_are_those_of_one),
        cmocka_unit_test(a_score_that_is_not_a_number_reaches_attention_and_the_loss),
        cmocka_unit_test(attention_over_all_keys_is_latent_attention),
        cmocka_unit_test(the_indexers_loss_trains_the_indexer_by_its_slope_and_nothing_else),
        cmocka_unit_test(the_indexers_loss_in_bf16_is_that_in_fp32),
        cmocka_unit_test(the_sparse_loss_is_over_the_selected_keys),
        cmocka_unit_test(gradients_in_fp8_are_those_of_recomputation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
