/* test_experts.c: the CPU's operations of mixtures of experts against Megatron's numbers, references in float64, finite
 * differences of the references, and direct implementations of the contracts. */
// Sections of megatron.c: §3h §9f
#include "../data/base/file.h"
#include "../data/checkpoint/upcycle.h"
#include "../data/report/profile.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#endif

static const mt_ops *ops = &mt_cpu_ops;
static mt_dtype both[2] = {MT_F32, MT_BF16}; // then MT_F32 and MT_F16

/* The largest relative error of a rounding to 16 bits. */
static double half_error(mt_dtype dtype) {
    return dtype == MT_F16 ? 0x1p-11 : 0x1p-8;
}

/* ==== numbers ==================================================================================================== */

static uint64_t random_state = 7;

static uint64_t random_word(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 8;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t random_below(int64_t n) {
    return (int64_t)(random_word() % (uint64_t)n);
}

/* In [-1, 1), rounded to bf16: exact in every element type. */
static double *random_values(int64_t n) {
    double *values = mt_malloc((n + 1) * 8);
    for (int64_t i = 0; i < n; i++)
        values[i] = mt_bf16_to_f32(mt_f32_to_bf16((float)random_below(1 << 24) / (1 << 23) - 1.0f));
    return values;
}

/* Distinct random logits. */
static double *random_logits(int64_t n) {
    double *values = mt_malloc((n + 1) * 8);
    for (int64_t i = 0; i < n; i++) values[i] = (float)(random_below(1 << 22)) / (1 << 19) - 4.0f;
    return values;
}

/* values[n] as elements of a type, in memory of exactly that size, so that sanitizers detect writes past the end. */
static void *store(const double *values, int64_t n, mt_dtype dtype) {
    char *memory = mt_malloc(n * mt_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++)
        if (dtype == MT_F32)
            ((float *)memory)[i] = (float)values[i];
        else
            ((uint16_t *)memory)[i] = mt_f32_to_half((float)values[i], dtype);
    return memory;
}

static double *load(const void *x, int64_t n, mt_dtype dtype) {
    double *values = mt_malloc(n * 8);
    for (int64_t i = 0; i < n; i++)
        values[i] =
            dtype == MT_F32 ? (double)((const float *)x)[i] : (double)mt_half_to_f32(((const uint16_t *)x)[i], dtype);
    return values;
}

/* n elements that are NaN: exposes unwritten elements and reads of them. */
static void *nans(int64_t n, mt_dtype dtype) {
    int64_t bytes = n * mt_dtype_size(dtype);
    void *memory = mt_malloc(bytes);
    memset(memory, 0xff, (size_t)bytes);
    return memory;
}

static void assert_nans(const void *x, int64_t n, mt_dtype dtype) {
    for (int64_t i = 0; i < n * mt_dtype_size(dtype); i++) assert_int_equal(((const unsigned char *)x)[i], 0xff);
}

/* Fails unless |got - want| <= tolerance * |want| (norms of vectors). */
static void assert_near(const char *what, const double *got, const double *want, int64_t n, double tolerance) {
    double size = 0, error = 0;
    for (int64_t i = 0; i < n; i++) size += want[i] * want[i], error += (got[i] - want[i]) * (got[i] - want[i]);
    if (!(sqrt(error) <= tolerance * sqrt(size) + 1e-30))
        fail_msg("%s: error %g of norm %g", what, sqrt(error), sqrt(size));
}

/* Tolerance: fp32 a few roundings; 16 bits one rounding per element. */
static void assert_rounded(const char *what, const double *got, const double *want, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) {
        assert_near(what, got, want, n, 1e-6);
        return;
    }
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += want[i] * want[i];
    double scale = sqrt(sum / (double)(n > 0 ? n : 1));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(got[i] - want[i]) <= fabs(want[i]) * half_error(dtype) * 1.001 + 1e-6 * scale))
            fail_msg("%s[%lld] in %s: %.9g, expected %.9g", what, (long long)i, mt_dtype_name(dtype), got[i], want[i]);
}

/* Computes out[n_out] from in[n_in] in float64. */
typedef void reference_fn(double *out, const double *in, const void *shape);

/* Compares got[n_in] with central differences of sum(dout * out). */
static void assert_gradient(const char *what, const double *got, reference_fn *reference, const void *shape,
                            const double *in, int64_t n_in, const double *dout, int64_t n_out, mt_dtype dtype) {
    const double h = 1e-4;
    double *point = mt_malloc(n_in * 8), *want = mt_malloc(n_in * 8), *out = mt_malloc(2 * n_out * 8);
    memcpy(point, in, (size_t)n_in * 8);
    for (int64_t i = 0; i < n_in; i++) {
        double slope = 0;
        point[i] = in[i] + h;
        reference(out, point, shape);
        point[i] = in[i] - h;
        reference(out + n_out, point, shape);
        point[i] = in[i];
        for (int64_t o = 0; o < n_out; o++) slope += dout[o] * (out[o] - out[n_out + o]);
        want[i] = slope / (2 * h);
    }
    assert_near(what, got, want, n_in, dtype == MT_F32 ? 1e-5 : half_error(dtype));
    free(point), free(want), free(out);
}

/* ==== Megatron's routers ========================================================================================= */

static double *json_numbers(const json_t *rows, int64_t n) {
    double *values = mt_malloc(n * 8);
    json_t *row, *item;
    size_t i, j;
    int64_t count = 0;
    json_array_foreach(rows, i, row) {
        if (!json_is_array(row)) values[count++] = json_number_value(row);
        json_array_foreach(row, j, item) values[count++] = json_number_value(item);
    }
    assert_int_equal(count, n);
    return values;
}

static int64_t json_integer_of(const json_t *object, const char *key) {
    return json_integer_value(json_object_get(object, key));
}

static mt_router json_router(const json_t *c) {
    const json_t *scaling = json_object_get(c, "scaling");
    return (mt_router){.num_experts = json_integer_of(c, "E"),
                       .topk = json_integer_of(c, "topk"),
                       .score = strcmp(json_string_value(json_object_get(c, "score")), "sigmoid") == 0
                                    ? MT_SCORE_SIGMOID
                                    : MT_SCORE_SOFTMAX,
                       .pre_softmax = json_is_true(json_object_get(c, "pre_softmax")),
                       .num_groups = json_integer_of(c, "groups"),
                       .group_topk = json_integer_of(c, "group_topk"),
                       .scaling = json_is_null(scaling) ? 1 : (float)json_number_value(scaling)};
}

/* Compares choices and probabilities as matrices [T, E], Megatron's form. */
static void assert_routes(const json_t *c, const mt_router *router, const float *logits, int64_t T) {
    int64_t E = router->num_experts, k = router->topk;
    const json_t *bias_json = json_object_get(c, "bias");
    double *bias_values = json_is_null(bias_json) ? NULL : json_numbers(bias_json, E);
    float *bias = bias_values ? store(bias_values, E, MT_F32) : NULL, *probs = mt_malloc(T * k * 4);
    double *want_probs = json_numbers(json_object_get(c, "probs"), T * E);
    double *want_map = json_numbers(json_object_get(c, "map"), T * E);
    double *got_probs = mt_calloc(T * E * 8), *got_map = mt_calloc(T * E * 8);
    int32_t *experts = mt_malloc(T * k * 4), invalid = 3;
    ops->route_forward(
        &(mt_route_args){T, router, logits, .bias = bias, .probs = probs, .experts = experts, .invalid = &invalid},
        NULL);
    assert_int_equal(invalid, 3);
    for (int64_t i = 0; i < T * k; i++) {
        got_probs[i / k * E + experts[i]] = (double)probs[i];
        got_map[i / k * E + experts[i]]++;
    }
    assert_memory_equal(got_map, want_map, T * E * 8);
    assert_near("probs", got_probs, want_probs, T * E, 1e-6);
    free(bias_values), free(bias), free(probs), free(want_probs), free(want_map), free(got_probs), free(got_map);
    free(experts);
}

/* With one sequence per token the sums are the scores of the tokens; with one sequence in all they give the losses. */
static void assert_aux_losses(const json_t *c, const mt_router *router, const float *logits, int64_t T) {
    int64_t E = router->num_experts;
    float *sums = mt_malloc(2 * T * E * 4);
    int32_t *sequence = mt_malloc(T * 4);
    double z_sum = 0, aux = 0, want_aux = json_number_value(json_object_get(c, "aux_loss_coeff_1e-2"));
    double want_z = json_number_value(json_object_get(c, "z_loss_coeff_1e-3"));
    double *want_scores = json_numbers(json_object_get(c, "aux_scores"), T * E);
    double *want_map = json_numbers(json_object_get(c, "aux_map"), T * E);
    for (int64_t t = 0; t < T; t++) sequence[t] = (int32_t)t;
    ops->aux_loss_forward(&(mt_aux_loss_args){T, T, router, logits, sequence, NULL, sums, .z_sum = &z_sum}, NULL);
    double *got = load(sums, 2 * T * E, MT_F32);
    assert_near("aux_scores", got, want_scores, T * E, 1e-6);
    assert_memory_equal(got + T * E, want_map, T * E * 8);
    double z = z_sum / (double)T * 1e-3;
    assert_near("z loss", &z, &want_z, 1, 1e-6);
    z_sum = 5;
    ops->aux_loss_forward(&(mt_aux_loss_args){1, T, router, logits, NULL, NULL, sums, .z_sum = &z_sum}, NULL);
    z = (z_sum - 5) / (double)T * 1e-3;
    assert_near("z loss of one sequence", &z, &want_z, 1, 1e-6);
    ops->aux_loss_value(&aux, sums, 1, E, NULL);
    aux *= 1e-2 / (double)T;
    assert_near("auxiliary loss", &aux, &want_aux, 1, 1e-6);
    free(sums), free(sequence), free(want_scores), free(want_map), free(got);
}

static void routers_and_auxiliary_losses_equal_megatrons(void **state) {
    (void)state;
    json_t *cases = json_load_file("tests/golden/megatron/router.json", 0, NULL), *c;
    size_t i;
    assert_int_equal(json_array_size(cases), 5);
    json_array_foreach(cases, i, c) {
        mt_router router = json_router(c);
        int64_t T = json_integer_of(c, "T");
        double *values = json_numbers(json_object_get(c, "logits"), T * router.num_experts);
        float *logits = store(values, T * router.num_experts, MT_F32);
        assert_routes(c, &router, logits, T);
        assert_aux_losses(c, &router, logits, T);
        free(values), free(logits);
    }
    json_decref(cases);
}

/* Quantile balancing: choices by logits plus a bias, quantiles of two micro-batches, the next bias; the same with
 * padding between the tokens; unchanged by a bad step. */
static void assert_quantiles(const json_t *c) {
    int64_t T = json_integer_of(c, "T"), E = json_integer_of(c, "E"), k = json_integer_of(c, "k");
    mt_router router = {.num_experts = E, .topk = k, .scaling = 1, .bias_of_logits = true};
    double *bias_values = json_numbers(json_object_get(c, "bias"), E), ema = json_real_value(json_object_get(c, "ema"));
    double *after = json_numbers(json_object_get(c, "after"), E), *want = mt_calloc((E + 1) * 8);
    float *bias = store(bias_values, E, MT_F32), *sums = mt_calloc((E + 1) * 4), *padded = mt_calloc((E + 1) * 4);
    const json_t *batch;
    size_t b;
    json_array_foreach(json_object_get(c, "micro_batches"), b, batch) {
        double *logits = json_numbers(json_object_get(batch, "logits"), T * E);
        double *chosen = json_numbers(json_object_get(batch, "experts"), T * k);
        double *quantiles = json_numbers(json_object_get(batch, "quantiles"), E);
        float *x = store(logits, T * E, MT_F32), *spread = mt_calloc(2 * T * E * 4), *probs = mt_calloc(T * k * 4);
        int32_t *experts = mt_calloc(T * k * 4), invalid = 0;
        int64_t *index = mt_calloc(2 * T * 8);
        for (int64_t t = 0; t < 2 * T; t++) {
            index[t] = t % 2 ? t : -1;
            for (int64_t e = 0; e < E; e++) spread[t * E + e] = t % 2 ? x[t / 2 * E + e] : 100;
        }
        ops->route_forward(
            &(mt_route_args){T, &router, x, .bias = bias, .probs = probs, .experts = experts, .invalid = &invalid},
            NULL);
        for (int64_t i = 0; i < T * k; i++) assert_int_equal(experts[i], (int32_t)chosen[i]);
        ops->quantile_sums(&(mt_quantile_args){T, E, k, x, bias, index + 1, sums}, NULL);
        ops->quantile_sums(&(mt_quantile_args){2 * T, E, k, spread, bias, index, padded}, NULL);
        for (int64_t e = 0; e < E; e++) want[e] += quantiles[e];
        free(logits), free(chosen), free(quantiles), free(x), free(spread), free(probs), free(experts), free(index);
    }
    for (int64_t e = 0; e < E; e++)
        if (!(fabs((double)padded[e] - want[e]) <= 1e-5)) fail_msg("quantile %g, not %g", (double)padded[e], want[e]);
    assert_true(padded[E] == 2);
    const float bad = -1, good = 1;
    ops->quantile_bias_step(bias, padded, &bad, E, ema, NULL);
    for (int64_t e = 0; e < E; e++) assert_true((double)bias[e] == bias_values[e]);
    ops->quantile_bias_step(bias, padded, &good, E, ema, NULL);
    for (int64_t e = 0; e < E; e++)
        if (!(fabs((double)bias[e] - after[e]) <= 1e-5)) fail_msg("bias %g, not %g", (double)bias[e], after[e]);
    free(bias_values), free(after), free(want), free(bias), free(sums), free(padded);
}

static void quantile_balancing_equals_megatrons_in_float64(void **state) {
    (void)state;
    json_t *all = json_load_file("tests/golden/megatron/balancing.json", 0, NULL), *c;
    size_t i;
    assert_int_equal(json_array_size(json_object_get(all, "quantiles")), 4);
    json_array_foreach(json_object_get(all, "quantiles"), i, c) assert_quantiles(c);
    json_decref(all);
}

/* The bias of the next step evens the loads of the same logits, which have a favourite expert. */
static void a_bias_from_quantiles_evens_the_loads(void **state) {
    (void)state;
    enum { T = 128, E = 8, K = 2 };
    mt_router router = {.num_experts = E, .topk = K, .scaling = 1, .bias_of_logits = true};
    float bias[E] = {0}, greatest[6];
    double *values = random_logits(T * E);
    for (int64_t t = 0; t < T; t++) values[t * E + 3] += 3;
    float *x = store(values, T * E, MT_F32), *probs = mt_calloc(T * K * 4);
    int32_t *experts = mt_calloc(T * K * 4), invalid = 0;
    int64_t *index = mt_calloc(T * 8);
    for (int step = 0; step < 6; step++) {
        float loads[E] = {0}, sums[E + 1] = {0};
        const float good = 1;
        ops->route_forward(
            &(mt_route_args){T, &router, x, .bias = bias, .probs = probs, .experts = experts, .invalid = &invalid},
            NULL);
        ops->count_experts(loads, experts, T * K, E, NULL);
        greatest[step] = 0;
        for (int e = 0; e < E; e++) greatest[step] = fmaxf(greatest[step], loads[e]);
        ops->quantile_sums(&(mt_quantile_args){T, E, K, x, bias, index, sums}, NULL);
        ops->quantile_bias_step(bias, sums, &good, E, 0, NULL);
    }
    assert_true(greatest[0] > 2 * T * K / E && greatest[5] < 1.25f * T * K / E);
    free(values), free(x), free(probs), free(experts), free(index);
}

static void drawn_logits_depend_on_key_and_token_alone(void **state) {
    (void)state;
    json_t *all = json_load_file("tests/golden/megatron/balancing.json", 0, NULL), *c = json_object_get(all, "draws");
    int64_t E = json_integer_of(c, "E"), index[4];
    double *want = json_numbers(json_object_get(c, "logits"), 4 * E);
    float *logits = nans(4 * E, MT_F32), *alone = nans(E, MT_F32);
    for (size_t t = 0; t < 4; t++) index[t] = json_integer_value(json_array_get(json_object_get(c, "token_index"), t));
    uint64_t key = strtoull(json_string_value(json_object_get(c, "key")), NULL, 10);
    ops->random_logits(logits, index, 4, E, key, NULL);
    for (int64_t i = 0; i < 4 * E; i++)
        if (!(fabs((double)logits[i] - want[i]) <= 1e-5)) fail_msg("%g, not %g", (double)logits[i], want[i]);
    ops->random_logits(alone, index + 3, 1, E, key, NULL);
    assert_memory_equal(alone, logits + 3 * E, (size_t)E * 4);
    free(want), free(logits), free(alone);
    json_decref(all);
}

static void upcycled_experts_have_megatrons_scale(void **state) {
    (void)state;
    json_t *all = json_load_file("tests/golden/megatron/balancing.json", 0, NULL), *c;
    size_t i;
    assert_int_equal(json_array_size(json_object_get(all, "upcycling")), 24);
    json_array_foreach(json_object_get(all, "upcycling"), i, c) {
        const char *activation = json_string_value(json_object_get(c, "activation"));
        mt_options o = {.num_experts = json_integer_of(c, "E"), .moe_router_topk = json_integer_of(c, "k")};
        o.moe_upcycling_granularity = json_integer_of(c, "G");
        o.swiglu = strcmp(activation, "swiglu") == 0, o.squared_relu = strcmp(activation, "squared-relu") == 0;
        o.moe_router_pre_softmax = json_is_true(json_object_get(c, "pre_softmax"));
        double want = json_real_value(json_object_get(c, "scale"));
        if (json_is_integer(json_object_get(c, "scale"))) want = (double)json_integer_of(c, "scale");
        for (int64_t expert = 0; expert < o.num_experts; expert++) {
            mt_param up = {.role = MT_EXPERT_UP, .expert = expert}, router = {.role = MT_ROUTER, .expert = -1};
            assert_true(fabs((double)mt_upcycle_factor(&o, &up) - want) <= 1e-6 * want);
            assert_int_equal(mt_upcycle_part(&o, &up), expert % o.moe_upcycling_granularity);
            assert_true(mt_upcycle_factor(&o, &router) == 1 && mt_upcycle_part(&o, &router) == 0);
        }
    }
    json_decref(all);
}

/* ==== routing in float64 ========================================================================================= */

static const mt_router routers[] = {
    {.num_experts = 8, .topk = 2, .scaling = 1},
    {.num_experts = 8, .topk = 2, .pre_softmax = true, .scaling = 1.5f},
    {.num_experts = 5, .topk = 1, .pre_softmax = true, .scaling = 1},
    {.num_experts = 6, .topk = 1, .score = MT_SCORE_SIGMOID, .scaling = 2},
    {.num_experts = 16, .topk = 4, .score = MT_SCORE_SIGMOID, .num_groups = 4, .group_topk = 2, .scaling = 2.5f},
    {.num_experts = 12, .topk = 4, .num_groups = 3, .group_topk = 2, .scaling = 1},
    {.num_experts = 12, .topk = 3, .pre_softmax = true, .num_groups = 4, .group_topk = 3, .scaling = 1},
    {.num_experts = 70, .topk = 8, .score = MT_SCORE_SIGMOID, .scaling = 1},
    {.num_experts = 3, .topk = 3, .scaling = 1},
    {.num_experts = 6, .topk = 1, .score = MT_SCORE_SQRT_SOFTPLUS, .scaling = 2},
    {.num_experts = 24, .topk = 4, .score = MT_SCORE_SQRT_SOFTPLUS, .num_groups = 4, .group_topk = 2, .scaling = 1.5f},
};
enum { NUM_ROUTERS = sizeof routers / sizeof *routers };

/* The score of a logit by itself. */
static double own_score(mt_score_function score, double x) {
    return score == MT_SCORE_SIGMOID ? 1 / (1 + exp(-x)) : sqrt(log1p(exp(x)));
}

/* scores[E] that select a token's experts. */
static void reference_scores(double *scores, const double *x, const double *bias, const mt_router *r) {
    double sum = 0;
    for (int64_t e = 0; e < r->num_experts; e++) sum += exp(x[e]);
    for (int64_t e = 0; e < r->num_experts; e++)
        if (r->score)
            scores[e] = own_score(r->score, x[e]) + (bias ? bias[e] : 0);
        else
            scores[e] = bias ? exp(x[e]) / sum + bias[e] : r->pre_softmax ? exp(x[e]) / sum : x[e];
}

/* The rank of x[i] among x[n], the largest first, ties by index. */
static int64_t rank_of(const double *x, int64_t n, int64_t i) {
    int64_t rank = 0;
    for (int64_t j = 0; j < n; j++) rank += x[j] > x[i] || (x[j] == x[i] && j < i);
    return rank;
}

/* chosen[k] by the ranks of all scores. */
static void reference_choice(int32_t *chosen, const double *x, const double *bias, const mt_router *r) {
    double scores[128], sums[128] = {0};
    int64_t E = r->num_experts, groups = r->num_groups, size = groups ? E / groups : E;
    reference_scores(scores, x, bias, r);
    for (int64_t e = 0; e < E && groups; e++)
        if (rank_of(scores + e / size * size, size, e % size) < r->topk / r->group_topk) sums[e / size] += scores[e];
    for (int64_t e = 0; e < E && groups; e++)
        if (rank_of(sums, groups, e / size) >= r->group_topk) scores[e] = -INFINITY;
    for (int64_t e = 0; e < E; e++) {
        int64_t rank = rank_of(scores, E, e);
        if (rank < r->topk) chosen[rank] = (int32_t)e;
    }
}

typedef struct route_shape {
    int64_t T;
    const mt_router *router;
    const int32_t *experts;
} route_shape;

/* out: probs[T, k]; in: logits[T, E]. */
static void route_reference(double *out, const double *in, const void *shape) {
    const route_shape *s = shape;
    const mt_router *r = s->router;
    for (int64_t t = 0; t < s->T; t++) {
        const double *x = in + t * r->num_experts;
        const int32_t *chosen = s->experts + t * r->topk;
        double *p = out + t * r->topk, sum = 0;
        for (int64_t j = 0; j < r->topk; j++) {
            p[j] = r->score ? own_score(r->score, x[chosen[j]]) : exp(x[chosen[j]]);
            sum += p[j];
        }
        if (!r->score && r->pre_softmax) sum = 0;
        for (int64_t e = 0; e < r->num_experts && !r->score && r->pre_softmax; e++) sum += exp(x[e]);
        for (int64_t j = 0; j < r->topk; j++)
            p[j] *= (double)r->scaling / (r->score && r->topk == 1 ? 1 : sum + (r->score ? 1e-20 : 0));
    }
}

static void routes_match_float64_and_finite_differences(void **state) {
    (void)state;
    enum { T = 29 };
    for (int i = 0; i < 2 * NUM_ROUTERS; i++) {
        const mt_router *r = &routers[i / 2];
        int64_t E = r->num_experts, k = r->topk, n = T * E;
        double *logits = random_logits(n), *bias = i % 2 ? random_logits(E) : NULL, *dprobs = random_values(T * k);
        double *want = mt_malloc(T * k * 8);
        for (int64_t e = 0; bias && e < E; e++) bias[e] /= 16;
        float *x = store(logits, n, MT_F32), *b = bias ? store(bias, E, MT_F32) : NULL, *p = mt_malloc(T * k * 4);
        float *dp = store(dprobs, T * k, MT_F32), *dx = nans(n, MT_F32);
        int32_t *experts = mt_malloc(T * k * 4), *chosen = mt_malloc(T * k * 4), invalid = 0;
        ops->route_forward(&(mt_route_args){T, r, x, .bias = b, .probs = p, .experts = experts, .invalid = &invalid},
                           NULL);
        ops->route_backward(&(mt_route_args){T, r, x, .experts = experts, .dprobs = dp, .dlogits = dx}, NULL);
        for (int64_t t = 0; t < T; t++) reference_choice(chosen + t * k, logits + t * E, bias, r);
        assert_memory_equal(experts, chosen, T * k * 4);
        route_shape shape = {T, r, experts};
        route_reference(want, logits, &shape);
        double *got = load(p, T * k, MT_F32), *slope = load(dx, n, MT_F32);
        assert_near("probs", got, want, T * k, 1e-6);
        assert_gradient("dlogits", slope, route_reference, &shape, logits, n, dprobs, T * k, MT_F32);
        for (int64_t t = 0; t < T && (r->score || !r->pre_softmax); t++)
            for (int64_t j = 0; j < k; j++) slope[t * E + experts[t * k + j]] = 0;
        for (int64_t e = 0; e < n && (r->score || !r->pre_softmax); e++) assert_true(slope[e] == 0);
        free(logits), free(bias), free(dprobs), free(want), free(x), free(b), free(p), free(dp), free(dx);
        free(experts), free(chosen), free(got), free(slope);
    }
}

static void equal_scores_choose_the_lowest_expert(void **state) {
    (void)state;
    static const float logits[2][8] = {{1, 2, 2, 0, 2, 2, 1, 2}, {40, 41, 40, 43, 42, 40, 44, 40}};
    static const int32_t plain[6] = {1, 2, 4, 6, 3, 4}; // the sigmoids of the second token all round to 1 in fp32
    mt_router router = {.num_experts = 8, .topk = 3, .score = MT_SCORE_SIGMOID, .scaling = 1};
    float probs[6], bias[8] = {0};
    int32_t experts[6], invalid = 0;
    ops->route_forward(
        &(mt_route_args){2, &router, &logits[0][0], .probs = probs, .experts = experts, .invalid = &invalid}, NULL);
    assert_memory_equal(experts, plain, sizeof plain);
    bias[7] = 0.01f;
    ops->route_forward(&(mt_route_args){1, &router, &logits[0][0], .bias = bias, .probs = probs, .experts = experts,
                                        .invalid = &invalid},
                       NULL);
    assert_true(experts[0] == 7 && experts[1] == 1 && experts[2] == 2);
    for (int j = 0; j < 3; j++) assert_true(fabsf(probs[j] - 1.0f / 3) < 1e-6f);
    mt_router grouped = {.num_experts = 8, .topk = 2, .num_groups = 4, .group_topk = 1, .scaling = 1};
    ops->route_forward(
        &(mt_route_args){1, &grouped, &logits[0][0], .probs = probs, .experts = experts, .invalid = &invalid}, NULL);
    assert_true(experts[0] == 4 && experts[1] == 5);
}

/* An expert's bias decides for every token. */
static void a_bias_that_is_not_finite_makes_every_token_invalid(void **state) {
    (void)state;
    enum { T = 5 };
    for (int i = 0; i < 3 * NUM_ROUTERS; i++) {
        const mt_router *r = &routers[i / 3];
        int64_t E = r->num_experts, k = r->topk;
        double *values = random_logits(T * E);
        float *logits = store(values, T * E, MT_F32), *probs = mt_malloc(T * k * 4), *bias = mt_calloc(E * 4);
        int32_t *experts = mt_malloc(T * k * 4), invalid = 0;
        bias[E - 1 - i % 2] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
        ops->route_forward(
            &(mt_route_args){T, r, logits, .bias = bias, .probs = probs, .experts = experts, .invalid = &invalid},
            NULL);
        assert_int_equal(invalid, T);
        for (int64_t t = 0; t < T * k; t++) assert_true(isnan(probs[t]));
        free(values), free(logits), free(probs), free(bias), free(experts);
    }
}

static void non_finite_logits_are_counted_and_affect_their_token_only(void **state) {
    (void)state;
    enum { T = 7 };
    for (int i = 0; i < NUM_ROUTERS; i++) {
        const mt_router *r = &routers[i];
        int64_t E = r->num_experts, k = r->topk;
        double *values = random_logits(T * E), z_sum = 0;
        float *logits = store(values, T * E, MT_F32), *probs = mt_malloc(2 * T * k * 4), *clean = probs + T * k;
        float *sums = mt_malloc(2 * 2 * E * 4);
        int32_t *experts = mt_malloc(2 * T * k * 4), *clean_experts = experts + T * k, invalid = 0;
        int32_t sequence[T] = {0, 1, 0, 1, 0, 1, 0};
        ops->route_forward(
            &(mt_route_args){T, r, logits, .probs = clean, .experts = clean_experts, .invalid = &invalid}, NULL);
        logits[1 * E + E - 1] = NAN, logits[3 * E] = INFINITY, logits[5 * E + 1] = -INFINITY;
        ops->route_forward(&(mt_route_args){T, r, logits, .probs = probs, .experts = experts, .invalid = &invalid},
                           NULL);
        assert_int_equal(invalid, 3);
        for (int64_t t = 0; t < T; t++)
            for (int64_t j = 0; j < k; j++) {
                int64_t at = t * k + j;
                assert_int_equal(experts[at], t % 2 ? j : clean_experts[at]);
                assert_true(t % 2 ? isnan(probs[at]) : probs[at] == clean[at]);
            }
        ops->aux_loss_forward(&(mt_aux_loss_args){2, T, r, logits, sequence, NULL, sums, .z_sum = &z_sum}, NULL);
        assert_true(isnan(z_sum) || isinf(z_sum));
        float counted = 0, wrong = 0;
        for (int64_t e = 0; e < E; e++) {
            assert_true(isfinite(sums[e]));
            counted += sums[2 * E + e], wrong += sums[3 * E + e];
        }
        assert_true(counted == 4 * k && wrong == 3 * k);
        free(values), free(logits), free(probs), free(sums), free(experts);
    }
}

/* ==== Sinkhorn routing =========================================================================================== */

/* Megatron's sinkhorn, line by line: scaled[T, E]; returns the number of iterations. */
static int sinkhorn_reference(double *scaled, const double *logits, int64_t T, int64_t E) {
    double *d0 = mt_malloc((T + 2 * E) * 8), *d1 = d0 + T, *old = d1 + E, error = 1e9;
    int rounds = 0;
    for (int64_t i = 0; i < T * E; i++) scaled[i] = exp(logits[i]);
    for (int64_t e = 0; e < E; e++) old[e] = d1[e] = 1;
    for (; error > 1e-4; rounds++) {
        error = 0;
        for (int64_t t = 0; t < T; t++) {
            double sum = 0;
            for (int64_t e = 0; e < E; e++) sum += d1[e] * scaled[t * E + e];
            d0[t] = 1.0 / (double)T * 1 / (sum + 1e-8);
        }
        for (int64_t e = 0; e < E; e++) {
            double sum = 0;
            for (int64_t t = 0; t < T; t++) sum += d0[t] * scaled[t * E + e];
            d1[e] = 1.0 / (double)E * 1 / (sum + 1e-8);
            error += fabs(old[e] - d1[e]) / (double)E;
            old[e] = d1[e];
        }
    }
    for (int64_t i = 0; i < T * E; i++) scaled[i] *= d1[i % E] * d0[i / E];
    free(d0);
    return rounds;
}

/* Logits that are higher for the first two experts. */
static double *uneven_logits(int64_t T, int64_t E) {
    double *logits = random_logits(T * E);
    for (int64_t i = 0; i < T * E; i++) logits[i] = (double)(float)(logits[i] / 2 + (i % E < 2 ? 3 : 0) - i / E % 7);
    return logits;
}

static const mt_router sinkhorn_routers[] = {
    {.num_experts = 8, .topk = 2, .pre_softmax = true, .scaling = 1},
    {.num_experts = 8, .topk = 1, .score = MT_SCORE_SIGMOID, .scaling = 2},
    {.num_experts = 70, .topk = 6, .pre_softmax = true, .scaling = 1.5f},
};

/* All tokens at once, then in two parts as on two ranks. */
static void sinkhorn_routing_equals_megatrons_in_float64(void **state) {
    (void)state;
    enum { T = 211, FIRST = 60 };
    for (int i = 0; i < 3; i++) {
        const mt_router *r = &sinkhorn_routers[i];
        int64_t E = r->num_experts, k = r->topk;
        double *logits = uneven_logits(T, E), *scaled = mt_malloc(T * E * 8), *want = mt_malloc(T * k * 8);
        float *x = store(logits, T * E, MT_F32), *p = mt_malloc(T * k * 4);
        int32_t *experts = mt_malloc(2 * T * k * 4), *chosen = experts + T * k, invalid = 5;
        assert_true(sinkhorn_reference(scaled, logits, T, E) >= 3);
        for (int64_t j = 0; j < T * E; j++) {
            int64_t rank = rank_of(scaled + j / E * E, E, j % E);
            if (rank < k) chosen[j / E * k + rank] = (int32_t)(j % E);
        }
        ops->route_sinkhorn(&(mt_route_args){T, r, x, .count = T, .probs = p, .experts = experts, .invalid = &invalid},
                            NULL);
        assert_memory_equal(experts, chosen, T * k * 4);
        route_shape shape = {T, r, experts};
        route_reference(want, logits, &shape);
        double *got = load(p, T * k, MT_F32);
        assert_near("probs", got, want, T * k, 1e-6);
        memset(experts, 0xff, T * k * 4);
        float *parts = nans(T * k, MT_F32);
        ops->route_sinkhorn(
            &(mt_route_args){T, r, x, .count = FIRST, .probs = parts, .experts = experts, .invalid = &invalid}, NULL);
        ops->route_sinkhorn(&(mt_route_args){T, r, x, .first = FIRST, .count = T - FIRST, .probs = parts + FIRST * k,
                                             .experts = experts + FIRST * k, .invalid = &invalid},
                            NULL);
        assert_memory_equal(experts, chosen, T * k * 4);
        assert_memory_equal(parts, p, T * k * 4);
        assert_int_equal(invalid, 5);
        free(logits), free(scaled), free(want), free(x), free(p), free(experts), free(got), free(parts);
    }
}

static float greatest_load(const int32_t *experts, int64_t n, int64_t E) {
    float *loads = mt_calloc(E * 4), greatest = 0;
    ops->count_experts(loads, experts, n, E, NULL);
    for (int64_t e = 0; e < E; e++) greatest = fmaxf(greatest, loads[e]);
    free(loads);
    return greatest;
}

static void sinkhorn_evens_loads_that_topk_does_not(void **state) {
    (void)state;
    enum { T = 1600, E = 8 };
    const mt_router *r = &sinkhorn_routers[1];
    double *logits = uneven_logits(T, E);
    float *x = store(logits, T * E, MT_F32), *p = mt_malloc(T * 4);
    int32_t *experts = mt_malloc(T * 4), invalid = 0;
    ops->route_forward(&(mt_route_args){T, r, x, .probs = p, .experts = experts, .invalid = &invalid}, NULL);
    assert_true(greatest_load(experts, T, E) > 3 * T / E);
    ops->route_sinkhorn(&(mt_route_args){T, r, x, .count = T, .probs = p, .experts = experts, .invalid = &invalid},
                        NULL);
    assert_true(greatest_load(experts, T, E) < 1.25 * T / E);
    free(logits), free(x), free(p), free(experts);
}

static void sinkhorn_ignores_non_finite_tokens_and_ends_for_all_others(void **state) {
    (void)state;
    enum { T = 40, E = 8, K = 2 };
    const mt_router *r = &sinkhorn_routers[0];
    double *logits = uneven_logits(T, E);
    float *x = store(logits, T * E, MT_F32), p[T * K], clean[T * K];
    int32_t experts[T * K], others[T * K], invalid = 0;
    ops->route_sinkhorn(
        &(mt_route_args){T - 1, r, x + E, .count = T - 1, .probs = clean, .experts = others, .invalid = &invalid},
        NULL);
    x[3] = NAN;
    ops->route_sinkhorn(&(mt_route_args){T, r, x, .count = T, .probs = p, .experts = experts, .invalid = &invalid},
                        NULL);
    assert_true(invalid == 1 && experts[0] == 0 && experts[1] == 1 && isnan(p[0]) && isnan(p[1]));
    assert_memory_equal(experts + K, others, (T - 1) * K * 4);
    assert_memory_equal(p + K, clean, (T - 1) * K * 4);
    for (int64_t i = 0; i < T * E; i++) x[i] = i % E == 0 ? 3e38f : i / E % 2 ? -3e38f : 1000.0f * (float)(i % 5);
    invalid = 0;
    ops->route_sinkhorn(&(mt_route_args){T, r, x, .count = T, .probs = p, .experts = experts, .invalid = &invalid},
                        NULL);
    for (int64_t i = 0; i < T * K; i++) assert_true(experts[i] >= 0 && experts[i] < E && isfinite(p[i]));
    for (int64_t t = 0; t < T; t++) assert_true(experts[t * K] != experts[t * K + 1]);
    for (int64_t i = 0; i < T * E; i++) x[i] = INFINITY;
    ops->route_sinkhorn(&(mt_route_args){T, r, x, .count = T, .probs = p, .experts = experts, .invalid = &invalid},
                        NULL);
    assert_int_equal(invalid, T);
    free(logits), free(x);
}

/* Rows [T, n] with padding of `fill` between them: token t is row 2 t + 1. */
static float *spread_rows(const float *x, int64_t T, int64_t n, float fill) {
    float *rows = mt_malloc(2 * T * n * 4);
    for (int64_t i = 0; i < 2 * T * n; i++) rows[i] = i / n % 2 ? x[i / n / 2 * n + i % n] : fill;
    return rows;
}

/* Checks rows [2 T, n] that spread_rows made room for: those of x, and padding of `fill`. */
static void assert_spread(const float *rows, const float *x, int64_t T, int64_t n, float fill) {
    float *want = spread_rows(x, T, n, fill);
    assert_memory_equal(rows, want, 2 * T * n * 4);
    free(want);
}

/* Padding has NaN logits, which nothing reads. */
static void padding_visits_no_expert_and_changes_nothing(void **state) {
    (void)state;
    enum { T = 29, S = 3, MOST_E = 70, MOST_K = 8 };
    int64_t index[2 * T];
    int32_t sequence[2 * T], packed_sequence[T];
    for (int t = 0; t < 2 * T; t++) index[t] = t % 2 ? t : -1 - t, sequence[t] = t / 2 % S;
    for (int t = 0; t < T; t++) packed_sequence[t] = t % S;
    for (int i = 0; i < NUM_ROUTERS + 3; i++) {
        const mt_router *r = i < NUM_ROUTERS ? &routers[i] : &sinkhorn_routers[i - NUM_ROUTERS];
        int64_t E = r->num_experts, k = r->topk;
        double *logits = random_logits(T * E), *values = random_values(T * E), z[2] = {0};
        float *x = store(logits, T * E, MT_F32), *dp = store(values, T * k, MT_F32), *dx = store(values, T * E, MT_F32);
        float *spread = spread_rows(x, T, E, NAN), *spread_dp = spread_rows(dp, T, k, NAN);
        float p[T * MOST_K], spread_p[2 * T * MOST_K], sums[2][2 * S * MOST_E], spread_dx[2 * T * MOST_E];
        int32_t experts[T * MOST_K], spread_experts[2 * T * MOST_K], invalid = 0;
        if (i < NUM_ROUTERS) {
            ops->route_forward(&(mt_route_args){T, r, x, .probs = p, .experts = experts, .invalid = &invalid}, NULL);
            ops->route_forward(&(mt_route_args){2 * T, r, spread, .token_index = index, .probs = spread_p,
                                                .experts = spread_experts, .invalid = &invalid},
                               NULL);
        } else {
            ops->route_sinkhorn(
                &(mt_route_args){T, r, x, .count = T, .probs = p, .experts = experts, .invalid = &invalid}, NULL);
            ops->route_sinkhorn(&(mt_route_args){2 * T, r, spread, .token_index = index, .count = 8, .probs = spread_p,
                                                 .experts = spread_experts, .invalid = &invalid},
                                NULL);
            ops->route_sinkhorn(&(mt_route_args){2 * T, r, spread, .token_index = index, .first = 8, .count = 2 * T - 8,
                                                 .probs = spread_p + 8 * k, .experts = spread_experts + 8 * k,
                                                 .invalid = &invalid},
                                NULL);
        }
        assert_int_equal(invalid, 0);
        assert_spread(spread_p, p, T, k, 0);
        for (int64_t j = 0; j < 2 * T * k; j++)
            assert_int_equal(spread_experts[j], j / k % 2 ? experts[j / k / 2 * k + j % k] : -1);
        ops->route_backward(&(mt_route_args){T, r, x, .experts = experts, .dprobs = dp, .dlogits = dx}, NULL);
        ops->route_backward(
            &(mt_route_args){2 * T, r, spread, .experts = spread_experts, .dprobs = spread_dp, .dlogits = spread_dx},
            NULL);
        assert_spread(spread_dx, dx, T, E, 0);
        mt_aux_loss_args a = {S, T, r, x, packed_sequence, NULL, sums[0], &z[0], sums[0] + S * E, 0.5f, 0.25f, dx};
        mt_aux_loss_args b = {S,     2 * T,           r,    spread, sequence, index, sums[1],
                              &z[1], sums[1] + S * E, 0.5f, 0.25f,  spread_dx};
        ops->aux_loss_forward(&a, NULL), ops->aux_loss_forward(&b, NULL);
        assert_memory_equal(sums[0], sums[1], 2 * S * E * 4);
        assert_true(z[0] == z[1] && z[0] > 0);
        ops->aux_loss_backward(&a, NULL), ops->aux_loss_backward(&b, NULL);
        assert_spread(spread_dx, dx, T, E, 0);
        free(logits), free(values), free(x), free(dp), free(dx), free(spread), free(spread_dp);
    }
}

/* ==== auxiliary loss ============================================================================================= */

typedef struct aux_loss_shape {
    int64_t S, T;
    const mt_router *router;
    const int32_t *sequence;
    const double *counts;
} aux_loss_shape;

/* out: auxiliary loss and sum of logsumexp^2; in: logits[T, E]; counts are constants. */
static void aux_loss_reference(double *out, const double *in, const void *shape) {
    const aux_loss_shape *s = shape;
    int64_t E = s->router->num_experts;
    out[0] = out[1] = 0;
    for (int64_t t = 0; t < s->T; t++) {
        const double *x = in + t * E, *n = s->counts + s->sequence[t] * E;
        mt_score_function score = s->router->score;
        double sum = 0, own = 1e-20, total = 0;
        for (int64_t e = 0; e < E; e++) sum += exp(x[e]), own += own_score(score, x[e]), total += n[e];
        for (int64_t e = 0; e < E; e++)
            out[0] += (double)E * n[e] / total * (score ? own_score(score, x[e]) / own : exp(x[e]) / sum);
        out[1] += log(sum) * log(sum);
    }
}

/* counts[S, E] by the ranks of all scores. */
static double *reference_counts(const double *logits, const int32_t *sequence, int64_t S, int64_t T, int64_t E,
                                int64_t k) {
    double *counts = mt_calloc(S * E * 8);
    for (int64_t i = 0; i < T * E; i++)
        counts[sequence[i / E] * E + i % E] += rank_of(logits + i / E * E, E, i % E) < k;
    return counts;
}

static void aux_loss_matches_float64_and_finite_differences(void **state) {
    (void)state;
    enum { S = 4, T = 37 };
    int32_t sequence[T]; // not contiguous; one sequence has no tokens
    for (int t = 0; t < T; t++) sequence[t] = t % 5 == 0 ? 3 : t / 20;
    for (int i = 0; i < NUM_ROUTERS; i++) {
        const mt_router *r = &routers[i];
        int64_t E = r->num_experts, n = T * E;
        double *logits = random_logits(n), *before = random_values(n), scales[2] = {0.75, 0.125}, want[2], got[2] = {0};
        double *counts = reference_counts(logits, sequence, S, T, E, r->topk);
        float *x = store(logits, n, MT_F32), *dx = store(before, n, MT_F32), *sums = nans(2 * S * E, MT_F32);
        aux_loss_shape shape = {S, T, r, sequence, counts};
        aux_loss_reference(want, logits, &shape);
        ops->aux_loss_forward(&(mt_aux_loss_args){S, T, r, x, sequence, NULL, sums, .z_sum = &got[1]}, NULL);
        ops->aux_loss_value(&got[0], sums, S, E, NULL);
        assert_near("losses", got, want, 2, 1e-6);
        for (int64_t j = 0; j < S * E; j++) assert_true((double)sums[S * E + j] == counts[j]);
        ops->aux_loss_backward(&(mt_aux_loss_args){S, T, r, x, sequence, .counts = sums + S * E, .aux_scale = 0.75f,
                                                   .z_scale = 0.125f, .dlogits = dx},
                               NULL);
        double *slope = load(dx, n, MT_F32);
        for (int64_t j = 0; j < n; j++) slope[j] -= before[j];
        assert_gradient("dlogits", slope, aux_loss_reference, &shape, logits, n, scales, 2, MT_F32);
        free(logits), free(before), free(counts), free(x), free(dx), free(sums), free(slope);
    }
}

static void aux_loss_is_per_sequence_or_over_the_batch(void **state) {
    (void)state;
    enum { S = 3, T = 1500, E = 8 }; // more rows than one block
    const mt_router *r = &routers[0];
    double *logits = random_logits(T * E), z_sum = 0, z_parts = 0, loss = 0, parts = 0;
    float *x = store(logits, T * E, MT_F32), sums[2 * S * E], part[2 * E];
    int32_t sequence[T];
    for (int t = 0; t < T; t++) sequence[t] = t / (T / S);
    ops->aux_loss_forward(&(mt_aux_loss_args){S, T, r, x, sequence, NULL, sums, .z_sum = &z_sum}, NULL);
    ops->aux_loss_value(&loss, sums, S, E, NULL);
    for (int s = 0; s < S; s++) {
        ops->aux_loss_forward(
            &(mt_aux_loss_args){1, T / S, r, x + s * (T / S) * E, NULL, NULL, part, .z_sum = &z_parts}, NULL);
        ops->aux_loss_value(&parts, part, 1, E, NULL);
        assert_memory_equal(part, sums + s * E, E * 4);
        assert_memory_equal(part + E, sums + (S + s) * E, E * 4);
    }
    assert_true(loss == parts && z_sum == z_parts);
    ops->aux_loss_forward(&(mt_aux_loss_args){1, T, r, x, NULL, NULL, part, .z_sum = &z_parts}, NULL);
    for (int i = 0; i < 2 * E; i++) {
        float sum = 0;
        for (int s = 0; s < S; s++) sum += sums[(i / E * S + s) * E + i % E];
        assert_true(fabsf(sum - part[i]) <= 1e-6f * part[i]);
    }
    free(logits), free(x);
}

static void expert_bias_moves_towards_the_mean_load(void **state) {
    (void)state;
    static const int32_t experts[12] = {0, 1, -1, 1, 3, 3, 3, -1, 0, 3, 2, 0};
    float loads[5] = {0}, bias[5] = {1, 2, 3, 4, 5}, before[5];
    ops->count_experts(loads, experts, 12, 5, NULL);
    const float counted[5] = {3, 2, 1, 4, 0}, want[5] = {0.75f, 2, 3.25f, 3.75f, 5.25f};
    assert_memory_equal(loads, counted, sizeof loads);
    ops->count_experts(loads, experts, 4, 5, NULL);
    ops->count_experts(loads, experts, 0, 5, NULL);
    const float again[5] = {4, 4, 1, 4, 0};
    assert_memory_equal(loads, again, sizeof loads);
    memcpy(loads, counted, sizeof loads);
    const float bad = -1, good = 0.5f;
    memcpy(before, bias, sizeof bias);
    ops->expert_bias_step(bias, loads, &bad, 5, 0.25f, NULL);
    assert_memory_equal(bias, before, sizeof bias);
    ops->expert_bias_step(bias, loads, &good, 5, 0.25f, NULL);
    assert_memory_equal(bias, want, sizeof bias);
    memset(loads, 0, sizeof loads); // equal loads
    ops->expert_bias_step(bias, loads, &good, 5, 0.25f, NULL);
    assert_memory_equal(bias, want, sizeof bias);
}

static void router_logits_are_fp32_and_independent_of_other_rows(void **state) {
    (void)state;
    enum { T = 37, E = 10, C = 83 };
    for (int d = 0; d < 2; d++) {
        double *x = random_values(T * C), *w = random_values(E * C), *want = mt_calloc(T * E * 8);
        double *bias = random_values(E);
        void *xs = store(x, T * C, both[d]), *ws = store(w, E * C, both[d]), *added = store(bias, E, both[d]);
        float *logits = nans(T * E, MT_F32), alone[E];
        for (int64_t i = 0; i < T * E; i++)
            for (int64_t c = 0; c < C; c++) want[i] += x[i / E * C + c] * w[i % E * C + c];
        ops->router_logits(&(mt_linear_args){T, E, C, .x = xs, .w = ws, .y = logits}, both[d], NULL);
        double *got = load(logits, T * E, MT_F32);
        assert_near("logits", got, want, T * E, 1e-6);
        for (int64_t i = 0; i < T * E; i++) want[i] += bias[i % E];
        free(got);
        ops->router_logits(&(mt_linear_args){T, E, C, .x = xs, .w = ws, .bias = added, .y = logits}, both[d], NULL);
        got = load(logits, T * E, MT_F32);
        assert_near("logits with a bias", got, want, T * E, 1e-6);
        for (int64_t t = 0; t < T; t++) {
            const void *row = (char *)xs + t * C * mt_dtype_size(both[d]);
            ops->router_logits(&(mt_linear_args){1, E, C, .x = row, .w = ws, .bias = added, .y = alone}, both[d], NULL);
            assert_memory_equal(alone, logits + t * E, sizeof alone);
        }
        free(x), free(w), free(want), free(xs), free(ws), free(logits), free(got), free(bias), free(added);
    }
}

/* ==== dispatch =================================================================================================== */

/* k distinct experts of E per token. `drop`: some choices are -1; `skew`: mostly the first experts. */
static int32_t *random_choices(int64_t T, int64_t k, int64_t E, bool skew, bool drop) {
    int32_t *experts = mt_malloc(T * k * 4);
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < k; j++) {
            bool taken = true;
            while (taken) {
                experts[t * k + j] = (int32_t)random_below(skew && random_below(4) ? smaller(E, k + 1) : E);
                taken = false;
                for (int64_t i = 0; i < j; i++) taken |= experts[t * k + i] == experts[t * k + j];
            }
        }
    for (int64_t i = 0; drop && i < T * k; i++)
        if (random_below(5) == 0) experts[i] = -1;
    return experts;
}

static void tokens_beyond_the_capacity_are_dropped_in_order(void **state) {
    (void)state;
    for (int round = 0; round < 60; round++) {
        int64_t T = round == 0 ? 1 : 1 + random_below(60), E = 1 + random_below(12),
                k = 1 + random_below(smaller(E, 4));
        int64_t capacity = random_below(T + 2), first = random_below(T), count = random_below(T - first + 1);
        bool by_position = round % 2;
        int32_t *experts = random_choices(T, k, E, round % 3 == 0, round % 5 == 0);
        int32_t *kept = nans(count * k, MT_F32);
        float *probs = mt_malloc(T * k * 4);
        int64_t *token_index = mt_malloc(T * 8);
        for (int64_t i = 0; i < T * k; i++) probs[i] = (float)random_below(8) / 8; // with ties
        for (int64_t i = 0; i < T * k && round % 4 == 2; i += 5) probs[i] = NAN; // ranks first, so that it is not lost
        for (int64_t t = 0; t < T; t++) token_index[t] = random_below(T);
        mt_drop_args drop = {T, k, first, count, capacity, experts, by_position ? NULL : probs, token_index, kept};
        ops->drop_tokens(&drop, NULL);
        for (int64_t i = first * k; i < (first + count) * k; i++) {
            int64_t before = 0;
            for (int64_t other = 0; other < T * k; other++) {
                if (other == i || experts[other] != experts[i]) continue;
                int64_t a = token_index[other / k], b = token_index[i / k];
                float p = isnan(probs[other]) ? INFINITY : probs[other], than = isnan(probs[i]) ? INFINITY : probs[i];
                if (by_position || p == than)
                    before += a < b || (a == b && other < i);
                else
                    before += p > than;
            }
            assert_int_equal(kept[i - first * k], before < capacity ? experts[i] : -1);
        }
        free(experts), free(kept), free(probs), free(token_index);
    }
}

typedef struct plan {
    int32_t *offsets, *position, *choice, *token;
    int64_t slots, rows;
} plan;

static plan make_plan(const int32_t *experts, int64_t T, int64_t spare, const mt_dispatch *d) {
    plan p = {.slots = d->count * d->copies};
    for (int64_t i = 0; i < T * d->topk; i++) p.rows += experts[i] >= d->first && experts[i] < d->first + d->count;
    p.rows = d->capacity > 0 ? p.slots * d->capacity : p.rows * d->copies + spare;
    p.offsets = nans(p.slots + 1, MT_F32), p.position = nans(T * d->topk * d->copies, MT_F32);
    p.choice = nans(p.rows, MT_F32), p.token = nans(p.rows, MT_F32);
    for (int64_t m = 0; m < p.rows; m++) p.choice[m] = p.token[m] = 12345;
    ops->dispatch_plan(&(mt_dispatch_args){T, p.rows, d, .experts = experts, .offsets = p.offsets,
                                           .position = p.position, .row_choice = p.choice, .row_token = p.token},
                       NULL);
    return p;
}

static void free_plan(plan *p) {
    free(p->offsets), free(p->position), free(p->choice), free(p->token);
}

/* Compares the plan with its contract: slot v has the choices of its expert, in the order of tokens. */
static void assert_plan(const plan *p, const int32_t *experts, int64_t T, const mt_dispatch *d) {
    int64_t row = 0, k = d->topk, expected = 0, positions = 0;
    for (int64_t v = 0; v < p->slots; v++) {
        if (d->capacity > 0) row = v * d->capacity;
        assert_int_equal(p->offsets[v], row);
        for (int64_t i = 0; i < T * k; i++)
            for (int64_t copy = 0; copy < d->copies; copy++) {
                int64_t e = experts[i] - d->first;
                if (experts[i] < 0 || e < 0 || e >= d->count) continue;
                if (((e / d->num_local) * d->copies + copy) * d->num_local + e % d->num_local != v) continue;
                assert_int_equal(p->position[i * d->copies + copy], row);
                assert_int_equal(p->choice[row], i);
                assert_int_equal(p->token[row], i / k);
                row++, expected++;
            }
    }
    if (d->capacity > 0) row = p->rows;
    assert_int_equal(p->offsets[p->slots], row);
    for (int64_t m = 0; m < p->rows; m++) {
        expected -= p->token[m] >= 0;
        if (p->token[m] < 0) assert_true(p->token[m] == -1 && p->choice[m] == -1);
    }
    assert_int_equal(expected, 0);
    for (int64_t i = 0; i < T * k * d->copies; i++) {
        int64_t e = experts[i / d->copies] - d->first;
        positions = experts[i / d->copies] >= 0 && e >= 0 && e < d->count;
        assert_true(positions ? p->position[i] >= 0 : p->position[i] == -1);
    }
}

static void dispatch_plans_follow_their_contract(void **state) {
    (void)state;
    for (int round = 0; round < 200; round++) {
        mt_dispatch d = {.num_local = 1 + random_below(4), .copies = 1 + random_below(3)};
        d.count = d.num_local * (1 + random_below(4)), d.first = random_below(5);
        int64_t E = d.first + d.count + random_below(4), T = round % 7 ? 1 + random_below(40) : 1;
        d.topk = 1 + random_below(smaller(E, 4));
        d.capacity = round % 2 ? T + random_below(3) : 0; // a token chooses an expert at most once
        int32_t *experts = random_choices(T, d.topk, E, round % 3 == 0, round % 4 == 0);
        plan p = make_plan(experts, T, random_below(6), &d);
        assert_plan(&p, experts, T, &d);
        free_plan(&p), free(experts);
    }
}

static void choices_beyond_the_capacity_have_no_row(void **state) {
    (void)state;
    static const int32_t experts[5] = {1, 0, 1, 1, 1};
    static const int32_t position[5] = {2, 0, 3, -1, -1}, token[4] = {1, -1, 0, 2}, offsets[3] = {0, 2, 4};
    mt_dispatch d = {.topk = 1, .count = 2, .num_local = 2, .copies = 1, .capacity = 2};
    plan p = make_plan(experts, 5, 0, &d);
    assert_memory_equal(p.position, position, sizeof position);
    assert_memory_equal(p.token, token, sizeof token);
    assert_memory_equal(p.offsets, offsets, sizeof offsets);
    free_plan(&p);
}

static void exchanged_rows_are_sorted_by_expert_then_source(void **state) {
    (void)state;
    for (int round = 0; round < 100; round++) {
        int64_t sources = 1 + random_below(6), local = 1 + random_below(5), M = 0, row = 0;
        int32_t counts[30], offsets[6];
        for (int64_t i = 0; i < sources * local; i++) M += counts[i] = (int32_t)random_below(round % 3 ? 6 : 2);
        int32_t *to_expert = nans(M, MT_F32), *from_expert = nans(M, MT_F32);
        ops->exchange_order(to_expert, from_expert, offsets, counts, sources, local, M, NULL);
        for (int64_t e = 0; e < local; e++) {
            assert_int_equal(offsets[e], row);
            for (int64_t s = 0, arrived = 0; s < sources; s++)
                for (int64_t of = 0; of < local; of++)
                    for (int32_t i = 0; i < counts[s * local + of]; i++, arrived++) {
                        if (of != e) continue;
                        assert_int_equal(to_expert[row], arrived);
                        assert_int_equal(from_expert[arrived], row++);
                    }
        }
        assert_int_equal(offsets[local], M);
        assert_int_equal(row, M);
        free(to_expert), free(from_expert);
    }
}

/* ==== rows ======================================================================================================= */

static void missing_rows_gather_zeros_and_are_not_combined(void **state) {
    (void)state;
    enum { FROM = 5, T = 9, C = 7 };
    static const int32_t rows[T] = {4, -1, 0, 0, 3, -1, -1, 2, 4};
    for (int d = 0; d < 2; d++) {
        double *x = random_values(FROM * C);
        char *from = store(x, FROM * C, both[d]), *to = nans(T * (C + 2), both[d]);
        int64_t size = mt_dtype_size(both[d]);
        ops->gather_rows(&(mt_row_args){T, C, rows, .from = from, .to = to, .to_stride = C + 2}, both[d], NULL);
        for (int64_t t = 0; t < T; t++) {
            double *row = load(to + t * (C + 2) * size, C, both[d]);
            for (int64_t c = 0; c < C; c++) assert_true(row[c] == (rows[t] < 0 ? 0 : x[rows[t] * C + c]));
            assert_nans(to + (t * (C + 2) + C) * size, 2, both[d]);
            free(row);
        }
        free(x), free(from), free(to);
    }
}

static void combine_adds_rows_in_their_order_to_the_base(void **state) {
    (void)state;
    enum { T = 31, N = 3, M = 40, C = 50 };
    for (int d = 0; d < 2; d++)
        for (int with_base = 0; with_base < 2; with_base++) {
            double *in = random_values(M * C), *base = random_values(T * C), *want = mt_malloc(T * C * 8);
            int32_t position[T * N];
            for (int i = 0; i < T * N; i++) position[i] = (int32_t)random_below(M + 10) - 10;
            for (int64_t i = 0; i < T * C; i++) {
                float sum = with_base ? (float)base[i] : 0;
                for (int64_t n = 0; n < N; n++)
                    if (position[i / C * N + n] >= 0) sum += (float)in[position[i / C * N + n] * C + i % C];
                want[i] =
                    both[d] == MT_F32 ? (double)sum : (double)mt_half_to_f32(mt_f32_to_half(sum, both[d]), both[d]);
            }
            void *rows = store(in, M * C, both[d]), *added = store(base, T * C, both[d]);
            void *out = nans(T * C, both[d]);
            ops->combine_rows(&(mt_combine_args){T, N, C, .in = rows, .position = position,
                                                 .base = with_base ? added : NULL, .out = out},
                              both[d], NULL);
            double *got = load(out, T * C, both[d]);
            assert_memory_equal(got, want, T * C * 8);
            free(got);
            if (with_base)
                ops->combine_rows(
                    &(mt_combine_args){T, N, C, .in = rows, .position = position, .base = added, .out = added}, both[d],
                    NULL);
            if (with_base) assert_memory_equal(added, out, T * C * mt_dtype_size(both[d]));
            free(in), free(base), free(want), free(rows), free(added), free(out);
        }
}

/* <gather(x), y> = <x, combine(y)>, exactly: all values are integers. */
static void gather_and_combine_are_each_others_backward(void **state) {
    (void)state;
    enum { C = 20 };
    for (int round = 0; round < 20; round++) {
        mt_dispatch d = {.topk = 2, .first = 1, .count = 4, .num_local = 2, .copies = 1 + round % 2};
        int64_t T = 1 + random_below(50);
        d.capacity = round % 3 ? 0 : T;
        int32_t *experts = random_choices(T, 2, 6, false, true);
        plan p = make_plan(experts, T, 3, &d);
        float *x = mt_malloc(T * C * 4), *y = mt_malloc(p.rows * C * 4), *gathered = nans(p.rows * C, MT_F32);
        float *combined = nans(T * C, MT_F32);
        double left = 0, right = 0;
        for (int64_t i = 0; i < T * C; i++) x[i] = (float)random_below(64) - 32;
        for (int64_t i = 0; i < p.rows * C; i++) y[i] = (float)random_below(64) - 32;
        ops->gather_rows(&(mt_row_args){p.rows, C, p.token, .from = x, .to = gathered}, MT_F32, NULL);
        ops->combine_rows(&(mt_combine_args){T, 2 * d.copies, C, .in = y, .position = p.position, .out = combined},
                          MT_F32, NULL);
        for (int64_t i = 0; i < p.rows * C; i++) left += (double)gathered[i] * (double)y[i];
        for (int64_t i = 0; i < T * C; i++) right += (double)x[i] * (double)combined[i];
        assert_true(left == right);
        free_plan(&p), free(experts), free(x), free(y), free(gathered), free(combined);
    }
}

/* ==== grouped linear layers and the activation =================================================================== */

typedef struct grouped_shape {
    int64_t M, N, K, E; // M allocated rows
    const int32_t *offsets;
} grouped_shape;

/* out: y[M, N]; in: x[M, K] and w[E, N, K]. Rows of no expert are 0. */
static void grouped_reference(double *y, const double *in, const void *shape) {
    const grouped_shape *s = shape;
    const double *x = in, *w = in + s->M * s->K;
    memset(y, 0, (size_t)(s->M * s->N) * 8);
    for (int64_t e = 0; e < s->E; e++)
        for (int64_t m = s->offsets[e]; m < s->offsets[e + 1]; m++)
            for (int64_t n = 0; n < s->N; n++)
                for (int64_t k = 0; k < s->K; k++) y[m * s->N + n] += x[m * s->K + k] * w[(e * s->N + n) * s->K + k];
}

/* Stores x with NaN in the rows from `used` on. */
static void *store_rows(const double *x, int64_t used, int64_t M, int64_t width, mt_dtype dtype) {
    char *memory = store(x, M * width, dtype);
    int64_t size = mt_dtype_size(dtype);
    memset(memory + used * width * size, 0xff, (size_t)((M - used) * width * size));
    return memory;
}

static void grouped_case(const grouped_shape *s, mt_dtype dtype) {
    int64_t used = s->offsets[s->E], nx = s->M * s->K, ny = s->M * s->N, nw = s->E * s->N * s->K;
    double *in = random_values(nx + nw), *dy = random_values(ny), *want = mt_malloc(ny * 8);
    double *slopes = mt_malloc((nx + nw) * 8);
    for (int64_t i = used * s->N; i < ny; i++) dy[i] = 0;
    void *x = store_rows(in, used, s->M, s->K, dtype), *w = store(in + nx, nw, dtype);
    void *dys = store_rows(dy, used, s->M, s->N, dtype), *y = nans(ny, dtype), *dx = nans(nx, dtype);
    float *dw = nans(nw, MT_F32);
    int64_t size = mt_dtype_size(dtype);
    ops->grouped_linear_forward(&(mt_grouped_args){s->M, s->N, s->K, s->E, s->offsets, x, w, .y = y}, dtype, NULL);
    ops->grouped_linear_backward_input(
        &(mt_grouped_args){s->M, s->N, s->K, s->E, s->offsets, .w = w, .dy = dys, .dx = dx}, dtype, NULL);
    ops->grouped_linear_backward_weight(&(mt_grouped_args){s->M, s->N, s->K, s->E, s->offsets, x, .dy = dys, .dw = dw},
                                        dtype, NULL);
    assert_nans((char *)y + used * s->N * size, (s->M - used) * s->N, dtype);
    assert_nans((char *)dx + used * s->K * size, (s->M - used) * s->K, dtype);
    double *got = load(y, ny, dtype), *got_dx = load(dx, nx, dtype), *got_dw = load(dw, nw, MT_F32);
    grouped_reference(want, in, s);
    assert_rounded("y", got, want, used * s->N, dtype);
    for (int64_t i = used * s->K; i < nx; i++) got_dx[i] = 0;
    memcpy(slopes, got_dx, (size_t)nx * 8), memcpy(slopes + nx, got_dw, (size_t)nw * 8);
    assert_gradient("dx and dw", slopes, grouped_reference, s, in, nx + nw, dy, ny, dtype);
    ops->grouped_linear_backward_weight(
        &(mt_grouped_args){s->M, s->N, s->K, s->E, s->offsets, x, .dy = dys, .dw = dw, .accumulate = true}, dtype,
        NULL);
    for (int64_t i = 0; i < nw; i++) assert_true(fabs((double)dw[i] - 2 * got_dw[i]) <= 1e-5);
    for (int64_t e = 0; e < s->E; e++)
        for (int64_t i = 0; s->offsets[e] == s->offsets[e + 1] && i < s->N * s->K; i++)
            assert_true(dw[e * s->N * s->K + i] == 0);
    free(in), free(dy), free(want), free(slopes), free(x), free(w), free(dys), free(y), free(dx), free(dw);
    free(got), free(got_dx), free(got_dw);
}

static void grouped_linears_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const int32_t offsets[4][9] = {{0, 0, 1, 12, 12, 26}, {0, 9}, {0, 0, 0}, {0, 1, 2, 3, 4, 6, 8, 8, 17}};
    static const int64_t counts[4] = {5, 1, 2, 8}, rows[4] = {29, 9, 3, 20};
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < 4; i++) {
            grouped_shape s = {rows[i], 6, 5, counts[i], offsets[i]};
            grouped_case(&s, both[d]);
        }
}

/* More rows and features than one block; integers, with sums exact in fp32, so every bit must be right. */
static void grouped_linears_are_exact_on_integers_past_every_block(void **state) {
    (void)state;
    enum { M = 700, N = 1100, K = 40, E = 3 };
    static const int32_t offsets[E + 1] = {0, 5, 5, 690};
    for (int d = 0; d < 2; d++) {
        double *x = mt_malloc(M * K * 8), *w = mt_malloc(E * N * K * 8), *dy = mt_calloc(M * N * 8);
        for (int64_t i = 0; i < M * K; i++) x[i] = (double)random_below(3) - 1;
        for (int64_t i = 0; i < E * N * K; i++) w[i] = (double)random_below(3) - 1;
        for (int64_t i = 0; i < M * N; i++) dy[i] = (double)(random_below(40) == 0); // sparse: sums are exact in bf16
        void *xs = store_rows(x, 690, M, K, both[d]), *ws = store(w, E * N * K, both[d]);
        void *dys = store_rows(dy, 690, M, N, both[d]), *y = nans(M * N, both[d]);
        void *dx = nans(M * K, both[d]);
        float *dw = nans(E * N * K, MT_F32);
        ops->grouped_linear_forward(&(mt_grouped_args){M, N, K, E, offsets, xs, ws, .y = y}, both[d], NULL);
        ops->grouped_linear_backward_input(&(mt_grouped_args){M, N, K, E, offsets, .w = ws, .dy = dys, .dx = dx},
                                           both[d], NULL);
        ops->grouped_linear_backward_weight(&(mt_grouped_args){M, N, K, E, offsets, xs, .dy = dys, .dw = dw}, both[d],
                                            NULL);
        double *want_y = mt_calloc(M * N * 8), *want_dx = mt_calloc(M * K * 8), *want_dw = mt_calloc(E * N * K * 8);
        for (int64_t m = 0; m < 690; m++)
            for (int64_t n = 0, e = m < 5 ? 0 : 2; n < N; n++)
                for (int64_t k = 0; k < K; k++) {
                    want_y[m * N + n] += x[m * K + k] * w[(e * N + n) * K + k];
                    want_dx[m * K + k] += dy[m * N + n] * w[(e * N + n) * K + k];
                    want_dw[(e * N + n) * K + k] += dy[m * N + n] * x[m * K + k];
                }
        double *got_y = load(y, M * N, both[d]), *got_dx = load(dx, M * K, both[d]), *got_dw = load(dw, E * N * K, 0);
        assert_memory_equal(got_y, want_y, 690 * N * 8);
        assert_memory_equal(got_dx, want_dx, 690 * K * 8);
        assert_memory_equal(got_dw, want_dw, E * N * K * 8);
        free(x), free(w), free(dy), free(xs), free(ws), free(dys), free(y), free(dx), free(dw), free(want_y);
        free(want_dx), free(want_dw), free(got_y), free(got_dx), free(got_dw);
    }
}

/* out: y[M, N] + bias[E, N]; in: bias. */
static void bias_reference(double *out, const double *in, const void *shape) {
    const grouped_shape *s = shape;
    for (int64_t e = 0; e < s->E; e++)
        for (int64_t i = s->offsets[e] * s->N; i < s->offsets[e + 1] * s->N; i++) out[i] = in[e * s->N + i % s->N];
}

/* Rows of no expert are not touched, biases of experts without rows have no gradient, and gradients add. */
static void grouped_biases_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const int32_t offsets[4][9] = {{0, 0, 1, 12, 12, 26}, {0, 900}, {0, 0, 0}, {0, 1, 2, 3, 4, 6, 8, 8, 17}};
    static const int64_t counts[4] = {5, 1, 2, 8}, rows[4] = {29, 900, 3, 20};
    for (int i = 0; i < 8; i++) {
        grouped_shape s = {rows[i / 2], 37, 0, counts[i / 2], offsets[i / 2]};
        mt_dtype dtype = both[i % 2];
        int64_t used = s.offsets[s.E], n = s.M * s.N, size = mt_dtype_size(dtype), biases = s.E * s.N;
        double *y = random_values(n), *bias = random_values(biases), *dy = random_values(n);
        double *want = mt_calloc(n * 8);
        void *ys = store_rows(y, used, s.M, s.N, dtype), *b = store(bias, biases, dtype);
        void *dys = store_rows(dy, used, s.M, s.N, dtype);
        float *dbias = mt_calloc(biases * 4);
        ops->grouped_bias_forward(ys, b, s.offsets, s.M, s.N, s.E, dtype, NULL);
        ops->grouped_bias_backward(dbias, dys, s.offsets, s.M, s.N, s.E, dtype, NULL);
        bias_reference(want, bias, &s);
        double *got = load(ys, n, dtype), *slopes = load(dbias, biases, MT_F32);
        for (int64_t k = 0; k < used * s.N; k++) want[k] += y[k];
        assert_rounded("y", got, want, used * s.N, dtype);
        assert_nans((char *)ys + used * s.N * size, (s.M - used) * s.N, dtype);
        assert_gradient("dbias", slopes, bias_reference, &s, bias, biases, dy, used * s.N, MT_F32);
        ops->grouped_bias_backward(dbias, dys, s.offsets, s.M, s.N, s.E, dtype, NULL);
        for (int64_t k = 0; k < biases; k++) assert_true(fabs((double)dbias[k] - 2 * slopes[k]) <= 1e-4);
        free(y), free(bias), free(dy), free(want), free(ys), free(b), free(dys), free(dbias), free(got), free(slopes);
    }
}

typedef struct scaling_shape {
    int64_t M, F;
} scaling_shape;

/* out: y[M, F]; in: x[M, F] and weights[M]. */
static void scaling_reference(double *y, const double *in, const void *shape) {
    const scaling_shape *s = shape;
    for (int64_t i = 0; i < s->M * s->F; i++) y[i] = in[s->M * s->F + i / s->F] * in[i];
}

static void scaled_rows_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const scaling_shape shapes[3] = {{5, 9}, {1, 1}, {2, 1300}};
    for (int i = 0; i < 6; i++) {
        const scaling_shape *s = &shapes[i / 2];
        mt_dtype dtype = both[i % 2];
        int64_t n = s->M * s->F;
        double *in = random_values(n + s->M), *dy = random_values(n), *want = mt_malloc(n * 8);
        void *x = store(in, n, dtype), *dys = store(dy, n, dtype), *y = nans(n, dtype);
        void *dx = nans(n, dtype);
        float *weights = store(in + n, s->M, MT_F32), *dweights = nans(s->M, MT_F32);
        ops->scale_rows_forward(&(mt_scale_rows_args){s->M, s->F, weights, .x = x, .y = y}, dtype, NULL);
        ops->scale_rows_backward(
            &(mt_scale_rows_args){s->M, s->F, weights, .x = x, .dy = dys, .dx = dx, .dweights = dweights}, dtype, NULL);
        scaling_reference(want, in, s);
        double *got = load(y, n, dtype), *slopes = load(dx, n, dtype), *dw = load(dweights, s->M, MT_F32);
        assert_rounded("y", got, want, n, dtype);
        slopes = realloc(slopes, (size_t)(n + s->M) * 8);
        memcpy(slopes + n, dw, (size_t)s->M * 8);
        assert_gradient("dx and dweights", slopes, scaling_reference, s, in, n + s->M, dy, n, dtype);
        ops->scale_rows_backward(
            &(mt_scale_rows_args){s->M, s->F, weights, .x = x, .dy = dys, .dx = dys, .dweights = dweights}, dtype,
            NULL); // in place
        ops->scale_rows_forward(&(mt_scale_rows_args){s->M, s->F, weights, .x = x, .y = x}, dtype, NULL);
        assert_memory_equal(dys, dx, n * mt_dtype_size(dtype));
        assert_memory_equal(x, y, n * mt_dtype_size(dtype));
        free(in), free(dy), free(want), free(x), free(dys), free(y), free(dx), free(weights), free(dweights);
        free(got), free(slopes), free(dw);
    }
}

enum { GATED_T = 5, GATED_C = 7, GATED_F = 6, GATED_INPUTS = GATED_T * GATED_C + GATED_C + GATED_T * 2 * GATED_F };

/* out: y[T, F] = sigmoid(x w) silu(gate) up; in: x[T, C], w[C] and gate_up[T, 2F]. */
static void gated_reference(double *y, const double *in, const void *shape) {
    enum { T = GATED_T, C = GATED_C, F = GATED_F };
    const double *w = in + T * C, *gate_up = w + C;
    (void)shape;
    for (int64_t t = 0; t < T; t++) {
        double logit = 0;
        for (int64_t c = 0; c < C; c++) logit += in[t * C + c] * w[c];
        for (int64_t f = 0; f < F; f++) {
            double gate = gate_up[t * 2 * F + f], up = gate_up[t * 2 * F + F + f];
            y[t * F + f] = 1 / (1 + exp(-logit)) * gate / (1 + exp(-gate)) * up;
        }
    }
}

static void a_shared_experts_gate_is_a_router_with_one_expert(void **state) {
    (void)state;
    enum { T = GATED_T, C = GATED_C, F = GATED_F };
    const mt_router one = {.num_experts = 1, .topk = 1, .score = MT_SCORE_SIGMOID, .scaling = 1};
    double *in = random_values(GATED_INPUTS), *dy = random_values(T * F), want[T * F];
    float *x = store(in, GATED_INPUTS, MT_F32), *w = x + T * C, *gate_up = w + C, *d = store(dy, T * F, MT_F32);
    float logits[T], gates[T], y[T * F], dgates[T], dlogits[T], gradients[GATED_INPUTS];
    int32_t experts[T], invalid = 0;
    ops->router_logits(&(mt_linear_args){T, 1, C, .x = x, .w = w, .y = logits}, MT_F32, NULL);
    ops->route_forward(&(mt_route_args){T, &one, logits, .probs = gates, .experts = experts, .invalid = &invalid},
                       NULL);
    ops->activation_forward(&(mt_activation_args){T, F, MT_ACTIVATION_SWIGLU, gate_up, gates, .y = y}, MT_F32, NULL);
    gated_reference(want, in, NULL);
    double *got = load(y, T * F, MT_F32);
    assert_rounded("y", got, want, T * F, MT_F32);
    ops->activation_backward(&(mt_activation_args){T, F, MT_ACTIVATION_SWIGLU, gate_up, gates, .dy = d,
                                                   .dx = gradients + T * C + C, .dweights = dgates},
                             MT_F32, NULL);
    ops->route_backward(&(mt_route_args){T, &one, logits, .experts = experts, .dprobs = dgates, .dlogits = dlogits},
                        NULL);
    ops->linear_backward_weight(&(mt_linear_args){T, 1, C, .x = x, .dy = dlogits, .dw = gradients + T * C}, MT_F32,
                                NULL);
    ops->linear_backward_input(&(mt_linear_args){T, 1, C, .w = w, .dy = dlogits, .dx = gradients}, MT_F32, NULL);
    double *slopes = load(gradients, GATED_INPUTS, MT_F32);
    assert_gradient("gate", slopes, gated_reference, NULL, in, GATED_INPUTS, dy, T * F, MT_F32);
    assert_int_equal(invalid, 0);
    free(in), free(dy), free(x), free(d), free(got), free(slopes);
}

static void activation_backward_sums_long_rows_to_fp32(void **state) {
    (void)state;
    enum { F = 20000 };
    double *gate_up = random_values(2 * F), *dy = random_values(F), want = 0;
    float *in = store(gate_up, 2 * F, MT_F32), *d = store(dy, F, MT_F32), weight = 0.5f, dweight;
    for (int64_t f = 0; f < F; f++) want += dy[f] * gate_up[f] / (1 + exp(-gate_up[f])) * gate_up[F + f];
    ops->activation_backward(
        &(mt_activation_args){1, F, MT_ACTIVATION_SWIGLU, in, &weight, .dy = d, .dx = in, .dweights = &dweight}, MT_F32,
        NULL);
    double got = (double)dweight;
    assert_near("dweight", &got, &want, 1, 1e-5);
    free(gate_up), free(dy), free(in), free(d);
}

/* ==== the layer ================================================================================================== */

enum { LAYER_T = 23, LAYER_C = 12, LAYER_F = 8, LAYER_E = 6, LAYER_K = 2 };

/* The operations of a layer on x[T, C], w1[E, 2F, C] and w2[E, C, F], with `spare` extra rows. `fused`: probabilities
 * in the activation and combine_rows; else separate operations. */
static void layer_forward(void *out, const void *x, const void *w1, const void *w2, const float *probs,
                          const int32_t *experts, int64_t capacity, int64_t spare, bool fused, mt_dtype dtype) {
    enum { C = LAYER_C, F = LAYER_F, E = LAYER_E, K = LAYER_K };
    mt_dispatch d = {.topk = K, .count = E, .num_local = E, .copies = 1, .capacity = capacity};
    plan p = make_plan(experts, LAYER_T, spare, &d);
    int64_t M = p.rows, used = p.offsets[E], size = mt_dtype_size(dtype);
    char *rows = nans(M * C, dtype), *gate_up = nans(M * 2 * F, dtype), *y = nans(M * F, dtype);
    char *back = nans(M * C, dtype);
    float *weights = nans(M, MT_F32);
    ops->gather_rows(&(mt_row_args){M, C, p.token, .from = x, .to = rows}, dtype, NULL);
    ops->gather_rows(&(mt_row_args){M, 1, p.choice, .from = probs, .to = weights}, MT_F32, NULL);
    memset(rows + used * C * size, 0xff, (size_t)((M - used) * C * size));
    for (int64_t m = used; m < M; m++) weights[m] = NAN;
    ops->grouped_linear_forward(&(mt_grouped_args){M, 2 * F, C, E, p.offsets, rows, w1, .y = gate_up}, dtype, NULL);
    ops->activation_forward(&(mt_activation_args){M, F, MT_ACTIVATION_SWIGLU, gate_up, fused ? weights : NULL, .y = y},
                            dtype, NULL);
    ops->grouped_linear_forward(&(mt_grouped_args){M, C, F, E, p.offsets, y, w2, .y = back}, dtype, NULL);
    float *sums = mt_calloc(LAYER_T * C * 4);
    if (!fused) ops->scale_rows_forward(&(mt_scale_rows_args){M, C, weights, .x = back, .y = back}, dtype, NULL);
    if (!fused)
        ops->embedding_backward(&(mt_embedding_args){M, C, 0, LAYER_T, p.token, .dout = back, .dw = sums}, dtype, NULL);
    if (fused)
        ops->combine_rows(&(mt_combine_args){LAYER_T, K, C, .in = back, .position = p.position, .out = out}, dtype,
                          NULL);
    else
        ops->convert(out, dtype, sums, MT_F32, LAYER_T * C, NULL);
    free_plan(&p), free(rows), free(gate_up), free(y), free(back), free(weights), free(sums);
}

/* The same layer, one token and expert at a time. */
static double *layer_reference(const double *x, const double *w1, const double *w2, const float *probs,
                               const int32_t *experts) {
    enum { C = LAYER_C, F = LAYER_F, K = LAYER_K };
    double *out = mt_calloc(LAYER_T * C * 8);
    for (int64_t i = 0; i < LAYER_T * K; i++) {
        double gate_up[2 * F] = {0};
        if (experts[i] < 0) continue;
        for (int64_t f = 0; f < 2 * F; f++)
            for (int64_t c = 0; c < C; c++) gate_up[f] += x[i / K * C + c] * w1[(experts[i] * 2 * F + f) * C + c];
        for (int64_t f = 0; f < F; f++)
            for (int64_t c = 0; c < C; c++)
                out[i / K * C + c] += (double)probs[i] * gate_up[f] / (1 + exp(-gate_up[f])) * gate_up[F + f] *
                                      w2[(experts[i] * C + c) * F + f];
    }
    return out;
}

static void layers_match_the_reference_with_any_data_in_spare_rows(void **state) {
    (void)state;
    enum { C = LAYER_C, F = LAYER_F, E = LAYER_E, N = LAYER_T * LAYER_K };
    for (int round = 0; round < 16; round++) {
        int64_t capacity = round % 2 ? LAYER_T + 1 : 0;
        mt_dtype dtype = both[round / 2 % 2];
        bool fused = round < 8;
        double *x = random_values(LAYER_T * C), *w1 = random_values(E * 2 * F * C), *w2 = random_values(E * C * F);
        int32_t *experts =
            random_choices(LAYER_T, LAYER_K, E - 1, round % 3 == 0, round % 8 >= 4); // the last expert has no token
        float probs[N];
        for (int i = 0; i < N; i++) probs[i] = (float)random_below(100) / 100;
        void *xs = store(x, LAYER_T * C, dtype), *w1s = store(w1, E * 2 * F * C, dtype);
        void *w2s = store(w2, E * C * F, dtype), *out = nans(LAYER_T * C, dtype);
        layer_forward(out, xs, w1s, w2s, probs, experts, capacity, round * 5, fused, dtype);
        double *want = layer_reference(x, w1, w2, probs, experts), *got = load(out, LAYER_T * C, dtype);
        assert_near("layer", got, want, LAYER_T * C,
                    dtype == MT_F32 ? 1e-6 : 2 * half_error(dtype)); // 16 bits: rounds four times
        free(x), free(w1), free(w2), free(experts), free(xs), free(w1s), free(w2s), free(out), free(want), free(got);
    }
}

/* ==== bit for bit ================================================================================================ */

static uint64_t hash_bytes(uint64_t hash, const void *memory, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)memory)[i]) * 1099511628211ull;
    return hash;
}

enum { BITS_T = 1300, BITS_C = 64, BITS_E = 12 };

static uint64_t hash_routing(mt_dtype dtype) {
    enum { T = BITS_T, C = BITS_C, E = BITS_E, S = 3 };
    static int32_t experts[T * 4], sequence[T];
    static float logits[T * E], probs[T * 4], dlogits[T * E], sums[2 * S * E];
    int32_t invalid = 0;
    uint64_t hash = 1;
    double z_sum = 0;
    random_state = 99;
    double *x = random_values(T * C), *w = random_values(E * C);
    void *xs = store(x, T * C, dtype), *ws = store(w, E * C, dtype);
    for (int t = 0; t < T; t++) sequence[t] = t % S;
    ops->router_logits(&(mt_linear_args){T, E, C, .x = xs, .w = ws, .y = logits}, dtype, NULL);
    for (int i = 0; i < NUM_ROUTERS; i++) {
        mt_router router = routers[i];
        router.num_experts = E, router.topk = smaller(router.topk, 4);
        if (router.num_groups) router.num_groups = 4;
        ops->route_forward(
            &(mt_route_args){T, &router, logits, .probs = probs, .experts = experts, .invalid = &invalid}, NULL);
        ops->route_backward(
            &(mt_route_args){T, &router, logits, .experts = experts, .dprobs = probs, .dlogits = dlogits}, NULL);
        ops->aux_loss_forward(&(mt_aux_loss_args){S, T, &router, logits, sequence, NULL, sums, .z_sum = &z_sum}, NULL);
        ops->aux_loss_backward(&(mt_aux_loss_args){S, T, &router, logits, sequence, .counts = sums + S * E,
                                                   .aux_scale = 0.5f, .z_scale = 0.25f, .dlogits = dlogits},
                               NULL);
        hash = hash_bytes(hash, probs, T * router.topk * 4);
        router = sinkhorn_routers[i % 2], router.num_experts = E;
        ops->route_sinkhorn(
            &(mt_route_args){T, &router, logits, .count = T, .probs = probs, .experts = experts, .invalid = &invalid},
            NULL);
        hash = hash_bytes(hash, experts, T * router.topk * 4);
        hash = hash_bytes(hash, dlogits, sizeof dlogits);
        hash = hash_bytes(hash_bytes(hash, sums, sizeof sums), &z_sum, 8);
    }
    free(x), free(w), free(xs), free(ws);
    return hash_bytes(hash, logits, sizeof logits);
}

static uint64_t hash_experts(mt_dtype dtype) {
    enum { T = BITS_T, C = BITS_C, E = BITS_E, F = 48, K = 2 };
    random_state = 98;
    mt_dispatch d = {.topk = K, .count = E, .num_local = E, .copies = 1};
    int32_t *experts = random_choices(T, K, E, true, true);
    plan p = make_plan(experts, T, 0, &d);
    int64_t M = p.rows, size = mt_dtype_size(dtype);
    double *x = random_values(T * C), *w = random_values(E * 2 * F * C), *probs = random_values(T * K);
    void *xs = store(x, T * C, dtype), *ws = store(w, E * 2 * F * C, dtype);
    float *weights = store(probs, T * K, MT_F32), *dw = mt_calloc(E * 2 * F * C * 4), *dweights = mt_malloc(M * 4);
    float *gathered = mt_malloc(M * 4);
    void *rows = mt_malloc(M * C * size), *gate_up = mt_malloc(M * 2 * F * size), *y = mt_malloc(M * F * size);
    ops->gather_rows(&(mt_row_args){M, C, p.token, .from = xs, .to = rows}, dtype, NULL);
    ops->gather_rows(&(mt_row_args){M, 1, p.choice, .from = weights, .to = gathered}, MT_F32, NULL);
    ops->grouped_linear_forward(&(mt_grouped_args){M, 2 * F, C, E, p.offsets, rows, ws, .y = gate_up}, dtype, NULL);
    ops->activation_forward(&(mt_activation_args){M, F, MT_ACTIVATION_SWIGLU, gate_up, gathered, .y = y}, dtype, NULL);
    ops->activation_backward(&(mt_activation_args){M, F, MT_ACTIVATION_SWIGLU, gate_up, gathered, .dy = y,
                                                   .dx = gate_up, .dweights = dweights},
                             dtype, NULL);
    ops->grouped_linear_backward_weight(
        &(mt_grouped_args){M, 2 * F, C, E, p.offsets, rows, .dy = gate_up, .dw = dw, .accumulate = true}, dtype, NULL);
    ops->grouped_linear_backward_input(
        &(mt_grouped_args){M, 2 * F, C, E, p.offsets, .w = ws, .dy = gate_up, .dx = rows}, dtype, NULL);
    ops->combine_rows(&(mt_combine_args){T, K, C, .in = rows, .position = p.position, .base = xs, .out = xs}, dtype,
                      NULL);
    uint64_t hash = hash_bytes(hash_bytes(3, xs, T * C * size), y, M * F * size);
    hash = hash_bytes(hash_bytes(hash, dw, E * 2 * F * C * 4), dweights, M * 4);
    free_plan(&p), free(experts), free(x), free(w), free(probs), free(xs), free(ws), free(weights), free(dw);
    free(dweights), free(gathered), free(rows), free(gate_up), free(y);
    return hash;
}

static void runs_repeat_bit_for_bit_on_any_number_of_threads(void **state) {
    (void)state;
    static uint64_t (*const parts[2])(mt_dtype) = {hash_routing, hash_experts};
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < 2; d++) {
            uint64_t want = parts[part](both[d]);
            assert_true(parts[part](both[d]) == want);
#ifdef MT_HAVE_OPENMP
            int threads = omp_get_max_threads();
            for (int n = 1; n <= 8; n = n < 3 ? n + 1 : n + 5) { // 8 threads: more than experts are split over
                omp_set_num_threads(n);
                if (parts[part](both[d]) != want) fail_msg("part %d differs on %d threads", part, n);
            }
            omp_set_num_threads(threads);
#endif
        }
}

/* The profile wraps every operation of the backend. */
static void the_profile_times_every_operation(void **state) {
    (void)state;
    const mt_ops *timed = mt_profile_open(ops);
#define PRESENT(name, ...) assert_non_null(timed->name);
    MT_OPERATIONS(PRESENT)
    MT_PLAIN_OPERATIONS(PRESENT)
#undef PRESENT
    float loads[3] = {0}, bias[3] = {0};
    const int32_t experts[4] = {0, 0, -1, 2};
    timed->count_experts(loads, experts, 4, 3, NULL);
    const float scale = 1;
    timed->expert_bias_step(bias, loads, &scale, 3, 1, NULL);
    assert_true(bias[0] == -1 && bias[1] == 1 && bias[2] == 0);
    mt_profile_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routers_and_auxiliary_losses_equal_megatrons),
        cmocka_unit_test(quantile_balancing_equals_megatrons_in_float64),
        cmocka_unit_test(upcycled_experts_have_megatrons_scale),
        cmocka_unit_test(a_bias_from_quantiles_evens_the_loads),
        cmocka_unit_test(drawn_logits_depend_on_key_and_token_alone),
        cmocka_unit_test(routes_match_float64_and_finite_differences),
        cmocka_unit_test(sinkhorn_routing_equals_megatrons_in_float64),
        cmocka_unit_test(sinkhorn_evens_loads_that_topk_does_not),
        cmocka_unit_test(sinkhorn_ignores_non_finite_tokens_and_ends_for_all_others),
        cmocka_unit_test(padding_visits_no_expert_and_changes_nothing),
        cmocka_unit_test(equal_scores_choose_the_lowest_expert),
        cmocka_unit_test(a_bias_that_is_not_finite_makes_every_token_invalid),
        cmocka_unit_test(non_finite_logits_are_counted_and_affect_their_token_only),
        cmocka_unit_test(aux_loss_matches_float64_and_finite_differences),
        cmocka_unit_test(aux_loss_is_per_sequence_or_over_the_batch),
        cmocka_unit_test(expert_bias_moves_towards_the_mean_load),
        cmocka_unit_test(router_logits_are_fp32_and_independent_of_other_rows),
        cmocka_unit_test(tokens_beyond_the_capacity_are_dropped_in_order),
        cmocka_unit_test(dispatch_plans_follow_their_contract),
        cmocka_unit_test(choices_beyond_the_capacity_have_no_row),
        cmocka_unit_test(exchanged_rows_are_sorted_by_expert_then_source),
        cmocka_unit_test(missing_rows_gather_zeros_and_are_not_combined),
        cmocka_unit_test(combine_adds_rows_in_their_order_to_the_base),
        cmocka_unit_test(gather_and_combine_are_each_others_backward),
        cmocka_unit_test(grouped_linears_match_float64_and_finite_differences),
        cmocka_unit_test(grouped_biases_match_float64_and_finite_differences),
        cmocka_unit_test(grouped_linears_are_exact_on_integers_past_every_block),
        cmocka_unit_test(scaled_rows_match_float64_and_finite_differences),
        cmocka_unit_test(a_shared_experts_gate_is_a_router_with_one_expert),
        cmocka_unit_test(activation_backward_sums_long_rows_to_fp32),
        cmocka_unit_test(layers_match_the_reference_with_any_data_in_spare_rows),
        cmocka_unit_test(runs_repeat_bit_for_bit_on_any_number_of_threads),
        cmocka_unit_test(the_profile_times_every_operation),
    };
    int failures = cmocka_run_group_tests_name("fp32 and bf16", tests, NULL, NULL);
    both[1] = MT_F16;
    return failures + cmocka_run_group_tests_name("fp32 and fp16", tests, NULL, NULL);
}
