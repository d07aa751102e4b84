/* Losses after pre-training against verl's numbers and TRL's formulas in float64 (tests/golden/losses/losses.json and
 * losses2.json, or the files that MT_LOSSES_GOLDEN and MT_LOSSES2_GOLDEN name); divergences and reward losses against
 * formulas written again here and finite differences. Every entry of the file is computed; an unknown one fails. */
// Sections of megatron.c: §7b
#include "../data/base/file.h"
#include "../data/learn/advantages.h"
#include "../data/learn/mismatch.h"
#include "../data/options/option_table.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

/* The number of names in the row of an option, so that what is added there is tried here. */
static int num_choices(const char *option) {
    const mt_option *row = mt_option_find(option, strlen(option));
    int count = 1;
    assert_non_null(row);
    for (const char *c = row->values; *c; c++) count += *c == '|';
    return count;
}

/* ---- the file --------------------------------------------------------------------------------------------------- */

enum { MAX_ROWS = 64, MAX_COLUMNS = 256, MAX_TOKENS = MAX_ROWS * MAX_COLUMNS };

/* The file at hand: verl's losses, or its newer ones. */
static enum { FIRST, SECOND, NUM_FILES } file_at_hand;

static const char *golden_path(void) {
    bool first = file_at_hand == FIRST;
    const char *path = getenv(first ? "MT_LOSSES_GOLDEN" : "MT_LOSSES2_GOLDEN");
    return path && *path ? path : first ? "tests/golden/losses/losses.json" : "tests/golden/losses/losses2.json";
}

static json_t *read_golden(void) {
    json_error_t problem;
    json_t *root = json_load_file(golden_path(), JSON_REJECT_DUPLICATES, &problem);
    if (!root) fail_msg("%s:%d: %s", golden_path(), problem.line, problem.text);
    if (!json_is_object(root)) fail_msg("%s: not an object", golden_path());
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        static const char *const known[] = {
            "inputs", "policy", "kl", "value", "advantage", "preference", "rollout_correction", "verl"};
        size_t i = 0;
        while (i < 8 && strcmp(key, known[i]) != 0) i++;
        if (i == 8) fail_msg("%s: unknown section \"%s\"", golden_path(), key);
        if (!json_is_object(value) && strcmp(key, "verl") != 0)
            fail_msg("%s: \"%s\" is not an object", golden_path(), key);
    }
    return root;
}

/* object[key], which must be there; `where` names the object. */
static json_t *member(const json_t *object, const char *where, const char *key) {
    json_t *value = json_object_get(object, key);
    if (!value) fail_msg("%s: %s has no \"%s\"", golden_path(), where, key);
    return value;
}

static double number(const json_t *object, const char *where, const char *key) {
    const json_t *value = member(object, where, key);
    if (!json_is_number(value)) fail_msg("%s: %s.%s is not a number", golden_path(), where, key);
    return json_number_value(value);
}

/* A list of numbers; *count: its length, or if it is not 0 the length it must have. */
static void read_vector(const json_t *list, const char *where, double *to, int64_t *count) {
    size_t i;
    json_t *item;
    if (!json_is_array(list) || json_array_size(list) == 0) fail_msg("%s: %s is no list", golden_path(), where);
    int64_t length = (int64_t)json_array_size(list);
    if (length > MAX_COLUMNS || (*count && *count != length))
        fail_msg("%s: %s has %lld items, not %lld", golden_path(), where, (long long)length, (long long)*count);
    *count = length;
    json_array_foreach(list, i, item) {
        if (!json_is_number(item)) fail_msg("%s: %s[%d] is not a number", golden_path(), where, (int)i);
        to[i] = json_number_value(item);
    }
}

/* rows of columns; sizes of 0 are set, others required. */
static void read_matrix(const json_t *list, const char *where, double *to, int64_t *rows, int64_t *columns) {
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MAX_ROWS)
        fail_msg("%s: %s is no list of 1 to %d rows", golden_path(), where, MAX_ROWS);
    if (*rows && *rows != (int64_t)json_array_size(list))
        fail_msg("%s: %s has %d rows, not %lld", golden_path(), where, (int)json_array_size(list), (long long)*rows);
    *rows = (int64_t)json_array_size(list);
    for (int64_t r = 0; r < *rows; r++) {
        read_vector(json_array_get(list, (size_t)r), where, to, columns);
        to += *columns;
    }
}

/* Equal to 1e-9 relative; numbers around 0 to rounding. */
static void assert_near(double value, double expected, const char *where) {
    if (!(fabs(value - expected) <= 1e-9 * fabs(expected) + 1e-13))
        fail_msg("%s: %s: %.17g, expected %.17g", golden_path(), where, value, expected);
}

/* The rest of a name "word key=value ..." after its first words: the next "key=value" or word. */
static bool next_word(char **rest, char **key, char **value) {
    char *word = strtok_r(NULL, " ", rest);
    if (!word) return false;
    *key = word;
    *value = strchr(word, '=');
    if (*value) *(*value)++ = 0;
    return true;
}

static double parse_number(const char *text, const char *where) {
    char *end;
    double x = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end) fail_msg("%s: %s: \"%s\" is no number", golden_path(), where, text ? text : "");
    return x;
}

/* ---- the inputs ------------------------------------------------------------------------------------------------- */

typedef struct inputs {
    int64_t rows, columns, tokens;
    mt_span sequences[MAX_ROWS];
    float mask[MAX_TOKENS];
    double logp[MAX_TOKENS], old_logp[MAX_TOKENS], ref_logp[MAX_TOKENS], advantages[MAX_TOKENS];
    double values[MAX_TOKENS], old_values[MAX_TOKENS], returns[MAX_TOKENS];
    double rollout_logp[MAX_TOKENS], rollout_weights[MAX_TOKENS], selected[MAX_TOKENS];
    double gradient[MAX_TOKENS], expected[MAX_TOKENS];
    int64_t counted_sequences;
} inputs;

static inputs in; // large

static void read_inputs(const json_t *root) {
    const json_t *section = member(root, "the file", "inputs");
    double mask[MAX_TOKENS];
    struct {
        const char *key;
        double *to;
    } arrays[] = {{"mask", mask},
                  {"logprobs", in.logp},
                  {"old_logprobs", in.old_logp},
                  {"ref_logprobs", in.ref_logp},
                  {"advantages", in.advantages},
                  {"values", in.values},
                  {"old_values", in.old_values},
                  {"returns", in.returns},
                  {"rollout_logprobs", in.rollout_logp},
                  {"rollout_is_weights", in.rollout_weights}};
    size_t count = sizeof arrays / sizeof *arrays - (file_at_hand == FIRST ? 2 : 0);
    memset(&in, 0, sizeof in);
    for (size_t i = 0; i < count; i++)
        read_matrix(member(section, "inputs", arrays[i].key), arrays[i].key, arrays[i].to, &in.rows, &in.columns);
    if (json_object_size(section) != count) fail_msg("%s: inputs has an unknown array", golden_path());
    in.tokens = in.rows * in.columns;
    for (int64_t r = 0; r < in.rows; r++) {
        int64_t counted = 0, first = r * in.columns;
        in.sequences[r] = (mt_span){first, in.columns, first, in.columns, true};
        for (int64_t i = first; i < first + in.columns; i++) {
            if (mask[i] != 0 && mask[i] != 1) fail_msg("%s: inputs.mask has %g", golden_path(), mask[i]);
            in.mask[i] = (float)mask[i];
            counted += mask[i] != 0;
        }
        in.counted_sequences += counted > 0;
    }
}

/* The inputs as operands of a loss, with gradients in in.gradient. */
static mt_loss_tokens loss_tokens(void) {
    memset(in.gradient, 0, sizeof in.gradient);
    return (mt_loss_tokens){.T = in.tokens,
                            .num_sequences = in.rows,
                            .sequences = in.sequences,
                            .mask = in.mask,
                            .logp = in.logp,
                            .values = in.values,
                            .old_logp = in.old_logp,
                            .ref_logp = in.ref_logp,
                            .advantages = in.advantages,
                            .returns = in.returns,
                            .old_values = in.old_values,
                            .dlogp = in.gradient,
                            .dvalues = in.gradient};
}

/* Compares loss / count and the gradients with an entry of the file. */
static void check_entry(const json_t *entry, const char *name, const mt_loss_sums *sums) {
    int64_t rows = in.rows, columns = in.columns;
    assert_near(sums->loss / sums->count, number(entry, name, "loss"), name);
    read_matrix(member(entry, name, "gradient"), name, in.expected, &rows, &columns);
    for (int64_t i = 0; i < in.tokens; i++) assert_near(in.gradient[i] / sums->count, in.expected[i], name);
}

/* ---- policy, KL, value ------------------------------------------------------------------------------------------ */

static bool parse_aggregation(const char *word, mt_aggregation *a) {
    static const char *const modes[] = {[MT_TOKEN_MEAN] = "token-mean",
                                        [MT_SEQ_MEAN_TOKEN_SUM] = "seq-mean-token-sum",
                                        [MT_SEQ_MEAN_TOKEN_MEAN] = "seq-mean-token-mean",
                                        [MT_SEQ_MEAN_TOKEN_SUM_NORM] = "seq-mean-token-sum-norm"};
    for (int m = 0; m < 4; m++) {
        if (strcmp(word, modes[m]) != 0) continue;
        a->mode = (mt_loss_aggregation)m;
        return true;
    }
    return false;
}

/* verl's constants: without a mode of its own, the mean over tokens. */
static mt_aggregation verl_aggregation(void) {
    return (mt_aggregation){.norm_length = (double)in.columns, .norm_sequences = in.counted_sequences};
}

/* "gspo token-mean clip_ratio=0.2 clip_ratio_low=0.03" */
static mt_policy_config parse_policy(const char *name) {
    static const struct {
        const char *name;
        mt_policy_variant variant;
    } variants[] = {{"vanilla", MT_POLICY_PPO}, {"ppo", MT_POLICY_PPO},       {"gspo", MT_POLICY_GSPO},
                    {"cispo", MT_POLICY_CISPO}, {"geo_mean", MT_POLICY_GMPO}, {"gmpo", MT_POLICY_GMPO},
                    {"gpg", MT_POLICY_GPG},     {"sapo", MT_POLICY_SAPO},     {"dppo_tv", MT_POLICY_DPPO_TV},
                    {"dro", MT_POLICY_DRO},     {"kl_cov", MT_POLICY_KL_COV}, {"dppo_kl", MT_POLICY_DPPO_KL}};
    enum { NUM = sizeof variants / sizeof *variants };
    char text[256], *rest, *key, *value;
    mt_policy_config c = {.clip_ratio_low = 0.2, .clip_ratio_high = 0.2, .clip_ratio_c = 3}; // verl's defaults
    c.tau_pos = 1, c.tau_neg = 1.05;
    c.beta = 0.1, c.kl_cov_coef = 1, c.cov_share = 0.1; // of the file
    snprintf(text, sizeof text, "%s", name);
    char *word = strtok_r(text, " ", &rest);
    size_t v = 0;
    while (v < NUM && (!word || strcmp(word, variants[v].name) != 0)) v++;
    if (v == NUM) fail_msg("%s: policy \"%s\": unknown variant", golden_path(), name);
    c.variant = variants[v].variant;
    c.aggregation = verl_aggregation();
    c.aggregation.counts_empty = c.variant == MT_POLICY_GMPO;
    while (next_word(&rest, &key, &value)) {
        if (!value && parse_aggregation(key, &c.aggregation)) continue;
        if (!value && (strcmp(key, "with") == 0 || strcmp(key, "rollout_is_weights") == 0)) continue;
        double x = parse_number(value, name);
        if (strcmp(key, "clip_ratio") == 0)
            c.clip_ratio_low = c.clip_ratio_high = x;
        else if (strcmp(key, "clip_ratio_low") == 0)
            c.clip_ratio_low = x;
        else if (strcmp(key, "clip_ratio_high") == 0)
            c.clip_ratio_high = x;
        else if (strcmp(key, "clip_ratio_c") == 0)
            c.clip_ratio_c = x;
        else
            fail_msg("%s: policy \"%s\": unknown parameter %s", golden_path(), name, key);
    }
    return c;
}

static void check_policies(void) {
    json_t *root = read_golden(), *entry, *field;
    const char *name, *key;
    read_inputs(root);
    json_object_foreach(member(root, "the file", "policy"), name, entry) {
        mt_policy_config c = parse_policy(name);
        mt_loss_tokens t = loss_tokens();
        mt_loss_sums sums = {0};
        int64_t sequences[MAX_ROWS];
        for (int64_t r = 0; r < in.rows; r++) sequences[r] = r;
        if (strstr(name, "with rollout_is_weights")) t.rollout_weights = in.rollout_weights;
        mt_select_tokens(in.selected, &t, sequences, in.rows, &c, 0); // verl selects by the present log-probabilities
        t.selected = in.selected;
        mt_policy_loss(&t, &c, &sums);
        check_entry(entry, name, &sums);
        double tokens = sums.metrics[MT_POLICY_TOKENS];
        json_object_foreach(entry, key, field) {
            int metric = strcmp(key, "pg_clipfrac") == 0         ? MT_POLICY_CLIPFRAC
                         : strcmp(key, "pg_clipfrac_lower") == 0 ? MT_POLICY_CLIPFRAC_LOWER
                         : strcmp(key, "ppo_kl") == 0            ? MT_POLICY_PPO_KL
                                                                 : -1;
            if (metric >= 0)
                assert_near(sums.metrics[metric] / tokens, number(entry, name, key), name);
            else if (strcmp(key, "loss") != 0 && strcmp(key, "gradient") != 0)
                fail_msg("%s: policy \"%s\": unknown field %s", golden_path(), name, key);
        }
    }
    json_decref(root);
}

/* One sequence whose tokens have these numbers, and the loss of a policy that only a teacher changes. */
static mt_loss_sums distill(const mt_distill_policy_config *distillation, const double *weights, double *gradient) {
    static const float mask[] = {1, 1, 0, 1};
    static const double logp[] = {-1, -2, -9, -0.5}, teacher[] = {-2, -0.5, -1, -30}, old[] = {-1.5, -2, -1, -0.25};
    static const double advantages[] = {1, -1, 5, 2};
    static const mt_span span = {0, 4, 0, 4, true};
    mt_loss_tokens t = {.T = 4, .num_sequences = 1, .sequences = &span, .mask = mask, .logp = logp, .old_logp = old};
    mt_policy_config c = {.variant = MT_POLICY_GPG, .distillation = *distillation};
    mt_loss_sums sums = {0};
    t.teacher_logp = teacher, t.advantages = advantages, t.rollout_weights = weights, t.dlogp = gradient;
    memset(gradient, 0, 4 * sizeof *gradient);
    mt_policy_loss(&t, &c, &sums);
    return sums;
}

/* By hand, from verl's formulas (distillation_ppo_loss). x = teacher - logp is -1, 1.5 and -29.5, and the ratio of new
 * and old probabilities exp(0.5), 1 and exp(-0.25). Without the term, the loss of gpg is 1 - 2 + 1 = 0. */
static void distillation_terms_equal_hand_computed_numbers(void **state) {
    (void)state;
    static const struct {
        mt_kl_type type;
        double values[3], slopes[3];
    } rows[] = {
        {MT_KL_K1, {1, -1.5, 29.5}, {1, 1, 1}},
        {MT_KL_ABS, {1, 1.5, 29.5}, {1, -1, 1}},
        {MT_KL_K2, {0.5, 1.125, 435.125}, {1, -1.5, 29.5}},
        {MT_KL_K3, {0.36787944117144233, 1.9816890703380645, 10}, {0.63212055882855767, -3.4816890703380645, 0}}};
    static const int at[] = {0, 1, 3};
    static const double plain[] = {-1, 1, -2};
    double gradient[4];
    for (int k = 0; k < 4; k++) {
        mt_distill_policy_config c = {.in = MT_DISTILL_IN_LOSS, .type = rows[k].type, .coef = 0.5};
        const double *v = rows[k].values;
        mt_loss_sums sums = distill(&c, NULL, gradient);
        assert_near(sums.loss, 0.5 * (v[0] + v[1] + v[2]), "in the loss");
        assert_near(sums.metrics[MT_POLICY_DISTILLATION], v[0] + v[1] + v[2], "the metric");
        for (int i = 0; i < 3; i++) assert_near(gradient[at[i]], plain[i] + 0.5 * rows[k].slopes[i], "in the loss");
        assert_true(gradient[2] == 0);
        c.alone = true, c.max_clamp = 1.2;
        sums = distill(&c, NULL, gradient);
        double sum = 0;
        for (int i = 0; i < 3; i++) {
            bool cut = fabs(v[i]) > 1.2;
            sum += cut ? copysign(1.2, v[i]) : v[i];
            assert_near(gradient[at[i]], cut ? 0 : 0.5 * rows[k].slopes[i], "clipped");
        }
        assert_near(sums.loss, 0.5 * sum, "clipped");
    }
    // PPO's loss with advantages -1, 1.5 and, clipped, -4: the ratio of the first is above its range, which a negative
    // advantage does not profit from; that of the last is below, and is clipped
    mt_distill_policy_config c = {MT_DISTILL_IN_POLICY_GRADIENT, MT_KL_K1, 1, 4, 0.2, 0.2, 3, true, 0};
    mt_loss_sums sums = distill(&c, NULL, gradient);
    double ratio = exp(0.5);
    assert_near(sums.loss, ratio - 1.5 + 4 * 0.8, "policy gradient");
    assert_near(gradient[0], ratio, "policy gradient"), assert_near(gradient[1], -1.5, "policy gradient");
    assert_near(gradient[3], 0, "policy gradient");
    static const double weights[] = {0.5, 2, 1, 0.25};
    c.coef = 2, c.clip_ratio_c = 1.5; // dual clipping: the first has loss 1.5 at most, and then no gradient
    sums = distill(&c, weights, gradient);
    assert_near(sums.loss, 2 * (0.5 * 1.5 - 2 * 1.5 + 0.25 * 4 * 0.8), "weights");
    assert_near(gradient[0], 0, "weights"), assert_near(gradient[1], -6, "weights");
}

/* ROLL's use_opd and its pure form, and Trinity-RFT's on_policy_distill: the divergence, here by k1, is subtracted from
 * the advantages of a reward, or is all of them. */
static void divergences_lower_advantages(void **state) {
    (void)state;
    static const float mask[] = {1, 1, 0, 1};
    static const double rewards[] = {0, 2, 0, -1}, divergences[] = {0.5, -1, 7, 0.25};
    static const int64_t groups[] = {0, 0};
    static const mt_span spans[] = {{0, 2, 0, 2, true}, {2, 2, 2, 2, true}};
    double advantages[4], returns[4];
    mt_advantage_tokens t = {.T = 4, .num_sequences = 2, .sequences = spans, .mask = mask, .groups = groups};
    mt_advantage_config c = {.estimator = MT_ADV_REINFORCE, .gamma = 1};
    t.rewards = rewards, t.advantages = advantages, t.returns = returns, t.divergences = divergences;
    mt_advantages(&t, &c);
    static const double mixed[] = {1.5, 3, 0, -1.25}, own[] = {-0.5, 1, 0, -0.25}, kept[] = {2, 2, 0, -1};
    for (int i = 0; i < 4; i++) assert_near(advantages[i], mixed[i], "mixed"), assert_near(returns[i], kept[i], "kept");
    c.only_divergences = true, c.advantage_clip = 0.75;
    mt_advantages(&t, &c);
    for (int i = 0; i < 4; i++) assert_near(advantages[i], fmin(own[i], 0.75), "alone");
    c.advantage_clip = 0, c.whiten = true;
    mt_advantages(&t, &c); // mean 1/12; deviation, n - 1: 0.80364
    static const double white[] = {-0.72583, 1.14068, 0, -0.41475};
    for (int i = 0; i < 4; i++) assert_true(fabs(advantages[i] - white[i]) < 1e-4);
}

static void policy_losses_equal_verl(void **state) {
    (void)state;
    for (int file = FIRST; file < NUM_FILES; file++) {
        file_at_hand = file;
        check_policies();
    }
    file_at_hand = FIRST;
}

/* "rollout_is=token rollout_is_threshold=0.8_1.2" */
static mt_correction parse_correction(const char *name) {
    char text[256], *rest, *key, *value;
    mt_run_options o = {.rollout_is_threshold = "2"};
    mt_correction c;
    mt_error error;
    snprintf(text, sizeof text, "- %s", name);
    strtok_r(text, " ", &rest);
    while (next_word(&rest, &key, &value)) {
        if (strcmp(key, "rollout_is") == 0)
            o.rollout_is = strcmp(value, "token") == 0 ? MT_ROLLOUT_IS_TOKEN : MT_ROLLOUT_IS_SEQUENCE;
        else if (strcmp(key, "rollout_is_threshold") == 0)
            o.rollout_is_threshold = value;
        else if (strcmp(key, "rollout_is_batch_normalize") == 0)
            o.rollout_is_batch_normalize = strcmp(value, "True") == 0;
        else if (strcmp(key, "rollout_rs") == 0)
            o.rollout_rs = value;
        else if (strcmp(key, "rollout_rs_threshold") == 0)
            o.rollout_rs_threshold = value;
        else
            fail_msg("%s: correction \"%s\": unknown parameter %s", golden_path(), name, key);
    }
    if (mt_options_correction(&c, &o, &error) != 0) fail_msg("%s: %s", name, error.text);
    return c;
}

static void rollout_corrections_equal_verl(void **state) {
    (void)state;
    static double x[MAX_TOKENS], weights[MAX_TOKENS];
    static float keeps[MAX_TOKENS];
    file_at_hand = SECOND;
    json_t *root = read_golden(), *entry;
    const char *name;
    read_inputs(root);
    mt_mismatch_tokens t = {in.tokens, in.rows, in.sequences, in.mask, x};
    for (int64_t i = 0; i < in.tokens; i++) x[i] = in.old_logp[i] - in.rollout_logp[i];
    json_object_foreach(member(root, "the file", "rollout_correction"), name, entry) {
        mt_correction c = parse_correction(name);
        const json_t *expected = member(entry, name, "weights");
        int64_t rows = in.rows, columns = in.columns;
        if (c.is == MT_ROLLOUT_IS_NONE)
            assert_true(json_is_null(expected));
        else {
            mt_correction_weights(weights, &t, &c);
            read_matrix(expected, name, in.expected, &rows, &columns);
            for (int64_t i = 0; i < in.tokens; i++) assert_near(weights[i], in.expected[i], name);
        }
        mt_correction_keeps(keeps, &t, &c);
        read_matrix(member(entry, name, "mask"), name, in.expected, &rows, &columns);
        for (int64_t i = 0; i < in.tokens; i++) assert_true((double)keeps[i] == in.expected[i]);
        assert_int_equal(json_object_size(entry), 2);
    }
    json_decref(root);
    file_at_hand = FIRST;
}

/* The losses of ROLL and Trinity-RFT, and clip_cov, which the files do not have, written again. */
static double other_loss(mt_policy_variant variant, double logp, double old_logp, double a, bool selected) {
    double x = logp - old_logp, r = exp(x), low = fmin(fmax(r, 0.8), 1.3);
    switch ((int)variant) {
    case MT_POLICY_TIS: // bounds 0.8 and 1.3
        return -low * a * logp;
    case MT_POLICY_TOPR: // weights 2 and 0.5
        return selected ? -2 * a * logp : -0.5 * fmin(r, 1) * a * logp;
    case MT_POLICY_KIMI15: // tau 0.4
        return -a * logp + 0.2 * x * x;
    case MT_POLICY_OPMD: // tau 0.4
        return -a * logp / 1.4;
    case MT_POLICY_SPPO:
        return -a * fmin(fmax(x, -log(1.2)), log(1.3));
    case MT_POLICY_CLIP_COV:
        return selected ? 0 : fmax(-a * r, -a * low);
    case MT_POLICY_SAPO_DETACHED: // taus 1 and 1.05
        return -a * logp * 4 / (a > 0 ? 1 : 1.05) / (1 + exp(-(a > 0 ? 1 : 1.05) * (r - 1)));
    }
    fail_msg("variant %d", (int)variant);
    return 0;
}

static void losses_of_other_programs_equal_their_formulas(void **state) {
    (void)state;
    static const mt_policy_variant variants[] = {MT_POLICY_TIS,          MT_POLICY_TOPR, MT_POLICY_KIMI15,
                                                 MT_POLICY_OPMD,         MT_POLICY_SPPO, MT_POLICY_CLIP_COV,
                                                 MT_POLICY_SAPO_DETACHED};
    json_t *root = read_golden();
    read_inputs(root);
    json_decref(root);
    for (int v = 0; v < 7; v++) {
        mt_policy_config c = {.variant = variants[v], .clip_ratio_low = 0.2, .clip_ratio_high = 0.3, .beta = 0.4};
        static double dlogp[MAX_TOKENS];
        c.weight_pos = 2, c.weight_neg = 0.5, c.tau_pos = 1, c.tau_neg = 1.05;
        memset(dlogp, 0, sizeof dlogp);
        mt_loss_tokens t = loss_tokens();
        mt_loss_sums sums = {0};
        double loss = 0, count = 0;
        for (int64_t i = 0; i < in.tokens; i++) in.selected[i] = i % 3 == 0;
        t.selected = in.selected, t.dlogp = dlogp;
        for (int64_t i = 0; i < in.tokens; i++) {
            if (in.mask[i] == 0) continue;
            loss += other_loss(variants[v], in.logp[i], in.old_logp[i], in.advantages[i], i % 3 == 0);
            count += 1;
        }
        mt_policy_loss(&t, &c, &sums);
        assert_near(sums.loss, loss, "variant");
        assert_near(sums.count, count, "variant");
        for (int64_t i = 0; i < in.tokens && variants[v] == MT_POLICY_SAPO_DETACHED; i++) // the gate is a constant
            if (in.mask[i] != 0)
                assert_near(dlogp[i],
                            other_loss(variants[v], in.logp[i], in.old_logp[i], in.advantages[i], false) / in.logp[i],
                            "gradient");
    }
}

static void a_weight_that_is_not_finite_reaches_the_loss(void **state) {
    (void)state;
    json_t *root = read_golden();
    read_inputs(root);
    json_decref(root);
    for (int variant = MT_POLICY_PPO; variant <= MT_POLICY_SAPO_DETACHED; variant++) {
        mt_policy_config c = {.variant = (mt_policy_variant)variant, .clip_ratio_low = 0.2, .clip_ratio_high = 0.3};
        c.beta = c.tau_pos = c.tau_neg = c.weight_pos = c.weight_neg = c.kl_cov_coef = 0.5;
        mt_loss_tokens t = loss_tokens();
        for (int bad = 0; bad < 2; bad++) {
            mt_loss_sums sums = {0};
            for (int64_t i = 0; i < in.tokens; i++) in.rollout_weights[i] = 1;
            if (bad) in.rollout_weights[1] = NAN;
            t.rollout_weights = in.rollout_weights;
            mt_policy_loss(&t, &c, &sums);
            assert_true(isfinite(sums.loss) == !bad);
        }
    }
}

/* clip_cov draws from the tokens in its range, the same for a seed and as many as its share says. */
static void covariances_select_tokens(void **state) {
    (void)state;
    json_t *root = read_golden();
    read_inputs(root);
    json_decref(root);
    mt_policy_config c = {.variant = MT_POLICY_CLIP_COV, .cov_share = 0.1, .cov_low = 0.05, .cov_high = 5};
    mt_loss_tokens t = loss_tokens();
    double chosen[2][MAX_TOKENS], logps = 0, advantages = 0;
    int64_t sequences[MAX_ROWS], tokens = 0, others = 0;
    for (int64_t r = 0; r < in.rows; r++) sequences[r] = in.rows - 1 - r;
    for (int64_t i = 0; i < in.tokens; i++)
        if (in.mask[i] != 0) logps += in.logp[i], advantages += in.advantages[i], tokens++;
    for (uint64_t seed = 0; seed < 4; seed++) {
        int64_t number = 0;
        mt_select_tokens(chosen[0], &t, sequences, in.rows, &c, seed);
        mt_select_tokens(chosen[1], &t, sequences, in.rows, &c, seed + 1);
        for (int64_t i = 0; i < in.tokens; i++) {
            double covariance =
                (in.logp[i] - logps / (double)tokens) * (in.advantages[i] - advantages / (double)tokens);
            number += chosen[0][i] == 1, others += chosen[0][i] != chosen[1][i];
            if (chosen[0][i] != 0) assert_true(in.mask[i] != 0 && covariance > 0.05 && covariance < 5);
        }
        assert_int_equal(number, tokens / 10);
    }
    assert_true(others > 0);
}

static void mismatch_is_measured(void **state) {
    (void)state;
    mt_span spans[] = {{0, 3, 0, 3, true}, {3, 2, 3, 2, true}, {5, 1, 5, 1, true}};
    float mask[] = {0, 1, 1, 1, 0, 0};
    double x[] = {9, 0.1, -0.3, 0.2, 9, 9};
    mt_mismatch m = mt_mismatch_measure(&(mt_mismatch_tokens){6, 3, spans, mask, x});
    assert_near(m.kl, -(0.1 - 0.3 + 0.2) / 3, "kl");
    assert_near(m.k3, (exp(0.1) + exp(-0.3) + exp(0.2) - 3) / 3, "k3");
    assert_near(m.chi2, (exp(0.2) + exp(-0.6) + exp(0.4)) / 3 - 1, "chi2");
    assert_near(m.chi2_sequence, (exp(-0.4) + exp(0.4)) / 2 - 1, "chi2 of sequences");
    assert_near(m.perplexity_ratio, (exp(0.1) + exp(-0.2)) / 2, "perplexities");
}

static void kl_estimates_equal_verl(void **state) {
    (void)state;
    static const char *const types[] = {[MT_KL_K1] = "k1", [MT_KL_ABS] = "abs", [MT_KL_K2] = "k2", [MT_KL_K3] = "k3"};
    json_t *root = read_golden(), *entry;
    const char *name;
    read_inputs(root);
    json_object_foreach(member(root, "the file", "kl"), name, entry) {
        mt_policy_config c = {.aggregation = verl_aggregation(), .kl_coef = 1};
        mt_loss_tokens t = loss_tokens();
        mt_loss_sums sums = {0};
        int type = 0;
        while (type < 4 && strcmp(name, types[type]) != 0) type++;
        if (type == 4) fail_msg("%s: kl: unknown estimator \"%s\"", golden_path(), name);
        c.kl_type = (mt_kl_type)type;
        t.advantages = NULL; // KL alone
        mt_policy_loss(&t, &c, &sums);
        check_entry(entry, name, &sums);
        assert_near(sums.metrics[MT_POLICY_REF_KL] / sums.metrics[MT_POLICY_TOKENS], number(entry, name, "loss"), name);
        assert_int_equal(json_object_size(entry), 2);
    }
    json_decref(root);
}

static void value_losses_equal_verl(void **state) {
    (void)state;
    json_t *root = read_golden(), *entry;
    const char *name;
    read_inputs(root);
    json_object_foreach(member(root, "the file", "value"), name, entry) {
        char text[256], *rest, *key, *value;
        mt_value_config c = {.aggregation = verl_aggregation()};
        mt_loss_tokens t = loss_tokens();
        mt_loss_sums sums = {0};
        snprintf(text, sizeof text, "value %s", name);
        strtok_r(text, " ", &rest);
        while (next_word(&rest, &key, &value)) {
            if (!value && parse_aggregation(key, &c.aggregation)) continue;
            if (strcmp(key, "clip") != 0) fail_msg("%s: value \"%s\": unknown parameter %s", golden_path(), name, key);
            c.clip = parse_number(value, name);
        }
        mt_value_loss(&t, &c, &sums);
        check_entry(entry, name, &sums);
        assert_int_equal(json_object_size(entry), 2);
    }
    json_decref(root);
}

/* ---- advantages ------------------------------------------------------------------------------------------------- */

/* "gae gamma=0.99 lambda=0.95 whitened" */
static mt_advantage_config parse_advantage(const char *name) {
    static const char *const names[] = {[MT_ADV_GAE] = "gae",
                                        [MT_ADV_GRPO] = "grpo",
                                        [MT_ADV_RLOO] = "rloo",
                                        [MT_ADV_REINFORCE] = "reinforce",
                                        [MT_ADV_REINFORCE_PLUS_PLUS] = "reinforce_plus_plus",
                                        [MT_ADV_REINFORCE_PLUS_PLUS_BASELINE] = "reinforce_plus_plus_baseline",
                                        [MT_ADV_OPO] = "opo",
                                        [MT_ADV_GPG] = "gpg",
                                        [MT_ADV_GRPO_PASSK] = "grpo_passk",
                                        [MT_ADV_REMAX] = "remax"};
    enum { NUM = sizeof names / sizeof *names };
    char text[256], *rest, *key, *value;
    mt_advantage_config c = {.gamma = 1, .lambda = 1, .norm_by_std = file_at_hand == SECOND};
    snprintf(text, sizeof text, "%s", name);
    char *word = strtok_r(text, " ", &rest);
    int e = 0;
    while (e < NUM && (!word || strcmp(word, names[e]) != 0)) e++;
    if (e == NUM) fail_msg("%s: advantage \"%s\": unknown estimator", golden_path(), name);
    c.estimator = (mt_adv_estimator)e;
    while (next_word(&rest, &key, &value)) {
        if (strcmp(key, "whitened") == 0 && !value)
            c.whiten = true;
        else if (strcmp(key, "without") == 0 || (strcmp(key, "std") == 0 && !value))
            c.norm_by_std = false;
        else if (strcmp(key, "std") == 0 && value && (!strcmp(value, "True") || !strcmp(value, "False")))
            c.norm_by_std = strcmp(value, "True") == 0;
        else if (strcmp(key, "gamma") == 0)
            c.gamma = parse_number(value, name);
        else if (strcmp(key, "lambda") == 0)
            c.lambda = parse_number(value, name);
        else
            fail_msg("%s: advantage \"%s\": unknown parameter %s", golden_path(), name, key);
    }
    return c;
}

/* Compares at counted tokens; elsewhere is 0 here. Behind the last one of a row verl leaves `rest`, or without it one
 * constant. */
static void check_tokens(const json_t *list, const char *name, const double *values, const double *rest) {
    int64_t rows = in.rows, columns = in.columns, first = -1;
    read_matrix(list, name, in.expected, &rows, &columns);
    for (int64_t i = 0; i < in.tokens; i++) assert_near(values[i], in.mask[i] != 0 ? in.expected[i] : 0, name);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = (r + 1) * columns - 1; i >= r * columns && in.mask[i] == 0; i--) {
            if (first < 0) first = i;
            assert_near(in.expected[i], rest ? rest[i] : in.expected[first], name);
        }
}

static void check_advantages(void) {
    static double rewards[MAX_TOKENS], advantages[MAX_TOKENS], returns[MAX_TOKENS], zeros[MAX_TOKENS];
    double numbers[MAX_COLUMNS], scores[MAX_COLUMNS], baselines[MAX_COLUMNS] = {0};
    int64_t groups[MAX_ROWS];
    json_t *root = read_golden(), *entry;
    const char *name;
    read_inputs(root);
    const json_t *section = member(root, "the file", "advantage"), *inputs = member(section, "advantage", "inputs");
    read_matrix(member(inputs, "inputs", "token_level_rewards"), "token_level_rewards", rewards, &in.rows, &in.columns);
    read_vector(member(inputs, "inputs", "scores"), "scores", scores, &in.rows);
    read_vector(member(inputs, "inputs", "group"), "group", numbers, &in.rows);
    bool first = file_at_hand == FIRST;
    if (!first) read_vector(member(inputs, "inputs", "reward_baselines"), "reward_baselines", baselines, &in.rows);
    assert_int_equal(json_object_size(inputs), first ? 3 : 4);
    for (int64_t r = 0; r < in.rows; r++) groups[r] = (int64_t)numbers[r];

    mt_loss_tokens tokens = loss_tokens(); // scores become the token-level rewards
    mt_token_rewards(advantages, &tokens, scores, 0, MT_KL_K1, 0);
    for (int64_t i = 0; i < in.tokens; i++) assert_true(advantages[i] == rewards[i]);

    mt_advantage_tokens t = {
        in.tokens, in.rows, in.sequences, in.mask, groups, rewards, in.old_values,          advantages, returns,
        baselines, 0,       NULL,         NULL,    NULL,   NULL,    .rollout_weights = NULL};
    json_object_foreach((json_t *)section, name, entry) {
        if (strcmp(name, "inputs") == 0) continue;
        mt_advantage_config c = parse_advantage(name);
        mt_advantages(&t, &c);
        if (json_is_object(entry)) {
            check_tokens(member(entry, name, "advantages"), name, advantages, NULL);
            check_tokens(member(entry, name, "returns"), name, returns, first ? in.old_values : NULL);
            assert_int_equal(json_object_size(entry), 2);
        } else
            check_tokens(entry, name, advantages, zeros);
        c.advantage_clip = 0.25;
        memcpy(in.expected, advantages, sizeof advantages);
        mt_advantages(&t, &c);
        for (int64_t i = 0; i < in.tokens; i++) assert_true(advantages[i] == fmin(fmax(in.expected[i], -0.25), 0.25));
    }
    json_decref(root);
}

static void advantages_equal_verl(void **state) {
    (void)state;
    for (int file = FIRST; file < NUM_FILES; file++) {
        file_at_hand = file;
        check_advantages();
    }
    file_at_hand = FIRST;
}

/* GDPO's by verl's code in float64, with rewards of its own; GIGPO's of one turn are GRPO's, STEP_REINFORCE's
 * REINFORCE's. */
static void advantages_of_several_rewards_equal_verl(void **state) {
    (void)state;
    static double advantages[MAX_TOKENS], returns[MAX_TOKENS], others[MAX_TOKENS], rewards[MAX_TOKENS];
    static double squares[MAX_TOKENS];
    static double numbers[MAX_ROWS * MAX_COLUMNS];
    double groups_read[MAX_COLUMNS], weights[2];
    int64_t groups[MAX_ROWS], two = 2;
    file_at_hand = SECOND;
    json_t *root = read_golden();
    json_error_t problem;
    json_t *newer = json_load_file("tests/golden/losses/losses3.json", JSON_REJECT_DUPLICATES, &problem);
    if (!newer) fail_msg("losses3.json:%d: %s", problem.line, problem.text);
    read_inputs(root);
    const json_t *inputs = member(member(root, "the file", "advantage"), "advantage", "inputs");
    read_vector(member(inputs, "inputs", "group"), "group", groups_read, &in.rows);
    read_matrix(member(inputs, "inputs", "token_level_rewards"), "token_level_rewards", rewards, &in.rows, &in.columns);
    for (int64_t r = 0; r < in.rows; r++) groups[r] = (int64_t)groups_read[r];
    const json_t *given = member(newer, "the file", "inputs"), *expected = member(newer, "the file", "advantage");
    read_matrix(member(given, "inputs", "reward_parts"), "reward_parts", numbers, &two, &in.rows);
    read_vector(member(given, "inputs", "reward_weights"), "reward_weights", weights, &two);
    const double *parts[] = {numbers, numbers + in.rows};
    mt_advantage_tokens t = {
        in.tokens, in.rows, in.sequences, in.mask, groups,      rewards, in.old_values,          advantages, returns,
        NULL,      2,       weights,      parts,   in.old_logp, squares, .rollout_weights = NULL};
    mt_advantage_config c = {.estimator = MT_ADV_GDPO, .gamma = 0.9, .norm_by_std = true, .step_weights = 1.5};
    for (int std = 1; std >= 0; std--, c.norm_by_std = false) {
        c.estimator = MT_ADV_GDPO;
        mt_advantages(&t, &c);
        check_tokens(member(expected, "advantage", std ? "gdpo" : "gdpo without std"), "gdpo", advantages, NULL);
        for (int64_t i = 0; i < in.tokens; i++) assert_true(advantages[i] == returns[i]);
        c.estimator = MT_ADV_GIGPO;
        mt_advantages(&t, &c);
        memcpy(others, advantages, sizeof others);
        c.estimator = MT_ADV_GRPO;
        mt_advantages(&t, &c);
        for (int64_t i = 0; i < in.tokens; i++) assert_true(others[i] == 1.5 * advantages[i]);
    }
    c.estimator = MT_ADV_OPTIMAL_TOKEN_BASELINE, c.gamma = 1;
    read_matrix(member(given, "inputs", "sum_pi_squared"), "sum_pi_squared", squares, &in.rows, &in.columns);
    for (int weighted = 0; weighted < 2; weighted++) {
        const char *otb = weighted ? "optimal_token_baseline with rollout_is_weights" : "optimal_token_baseline";
        t.rollout_weights = weighted ? in.rollout_weights : NULL;
        mt_advantages(&t, &c);
        check_tokens(member(member(expected, "advantage", otb), otb, "advantages"), otb, advantages, NULL);
        check_tokens(member(member(expected, "advantage", otb), otb, "returns"), otb, returns, NULL);
    }
    c.estimator = MT_ADV_STEP_REINFORCE, c.gamma = 0.9;
    mt_advantages(&t, &c);
    memcpy(others, advantages, sizeof others);
    c.estimator = MT_ADV_REINFORCE;
    mt_advantages(&t, &c);
    assert_memory_equal(others, advantages, sizeof others);
    json_decref(root), json_decref(newer);
    file_at_hand = FIRST;
}

/* Rewards 1 at token 1 and 2 at token 4; token 3 does not count. */
static void discounted_returns_pass_over_uncounted_tokens(void **state) {
    (void)state;
    mt_span span = {0, 5, 0, 5, true};
    float mask[] = {1, 1, 1, 0, 1};
    double rewards[] = {0, 1, 0, 100, 2}, advantages[5], returns[5];
    const double expected[] = {0.5 * (1 + 0.5 * 0.5 * 2), 1 + 0.5 * 0.5 * 2, 0.5 * 2, 0, 2};
    mt_advantage_config c = {.estimator = MT_ADV_REINFORCE, .gamma = 0.5};
    mt_advantage_tokens t = {5,       1,    &span, mask, NULL, rewards, NULL, advantages,
                             returns, NULL, 0,     NULL, NULL, NULL,    NULL, .rollout_weights = NULL};
    mt_advantages(&t, &c);
    for (int i = 0; i < 5; i++) assert_true(advantages[i] == expected[i] && returns[i] == expected[i]);
    c.whiten = true;
    mt_advantages(&t, &c);
    double sum = 0, squares = 0;
    for (int i = 0; i < 5; i++) sum += advantages[i], squares += advantages[i] * advantages[i];
    assert_true(advantages[3] == 0 && fabs(sum) < 1e-7 && fabs(squares - 3) < 1e-6);
}

static void token_rewards_clip_scores_and_subtract_kl(void **state) {
    (void)state;
    mt_span spans[] = {{0, 3, 0, 3, true}, {3, 2, 3, 2, true}};
    float mask[] = {0, 1, 1, 0, 0};
    double old_logp[] = {-9, -1, -2, -9, -9}, ref_logp[] = {-1, -1.5, -1, -1, -1}, rewards[5], scores[] = {7, -7};
    mt_loss_tokens t = {
        .T = 5, .num_sequences = 2, .sequences = spans, .mask = mask, .old_logp = old_logp, .ref_logp = ref_logp};
    const double expected[] = {0, -0.1 * 0.5, 5 - 0.1 * -1, 0, -5};
    mt_token_rewards(rewards, &t, scores, 5, MT_KL_K1, 0.1);
    for (int i = 0; i < 5; i++) assert_true(fabs(rewards[i] - expected[i]) < 1e-15);
}

static void a_group_of_one_keeps_its_score(void **state) {
    (void)state;
    mt_span span = {0, 2, 0, 2, true};
    float mask[] = {1, 1};
    int64_t group = 7;
    double rewards[] = {0, 3}, advantages[2], returns[2];
    mt_advantage_tokens t = {2,       1,    &span, mask, &group, rewards, NULL, advantages,
                             returns, NULL, 0,     NULL, NULL,   NULL,    NULL, .rollout_weights = NULL};
    const mt_advantage_config configs[] = {
        {.estimator = MT_ADV_RLOO}, {.estimator = MT_ADV_GRPO}, {.estimator = MT_ADV_GRPO, .norm_by_std = true}};
    for (int i = 0; i < 3; i++) {
        mt_advantages(&t, &configs[i]);
        assert_true(fabs(advantages[0] - 3) < 1e-5 && advantages[0] == advantages[1]);
    }
}

/* ---- preferences ------------------------------------------------------------------------------------------------ */

typedef struct pairs {
    int64_t count, tokens;
    double logp[2][MAX_COLUMNS], ref[2][MAX_COLUMNS], lengths[2][MAX_COLUMNS]; // chosen, rejected: sums
    mt_span sequences[2 * MAX_COLUMNS];
} pairs;

/* Spreads the sums of the file over tokens, with uncounted tokens before them. */
static void spread_pairs(const json_t *inputs, pairs *p) {
    static const char *const keys[] = {"chosen",       "rejected",      "ref_chosen",
                                       "ref_rejected", "chosen_tokens", "rejected_tokens"};
    double *const arrays[] = {p->logp[0], p->logp[1], p->ref[0], p->ref[1], p->lengths[0], p->lengths[1]};
    p->count = p->tokens = 0;
    for (int i = 0; i < 6; i++) read_vector(member(inputs, "inputs", keys[i]), keys[i], arrays[i], &p->count);
    assert_int_equal(json_object_size(inputs), 6);
    memset(&in, 0, sizeof in);
    for (int64_t s = 0; s < 2 * p->count; s++) {
        int64_t length = (int64_t)p->lengths[s % 2][s / 2], first = p->tokens;
        assert_true(length > 0 && first + length + 2 <= MAX_TOKENS);
        p->sequences[s] = (mt_span){first, length + 2, first, length + 2, true};
        for (int64_t i = first; i < first + length + 2; i++) {
            double share = (i < first + 2 ? 100 : 1 + 0.5 * ((i - first) % 2 ? -1 : 1)) / (double)length;
            if (length % 2 && i == first + length + 1) share = 1 / (double)length; // shares of counted tokens add to 1
            in.mask[i] = i >= first + 2;
            in.logp[i] = p->logp[s % 2][s / 2] * share;
            in.ref_logp[i] = p->ref[s % 2][s / 2] * share;
        }
        p->tokens += length + 2;
    }
}

/* "sigmoid beta=0.1 label_smoothing=0.0" */
static mt_preference_config parse_preference(const char *name) {
    static const char *const variants[] = {
        [MT_PREFERENCE_SIGMOID] = "sigmoid", [MT_PREFERENCE_IPO] = "ipo", [MT_PREFERENCE_HINGE] = "hinge"};
    char text[256], *rest, *key, *value;
    mt_preference_config c = {.beta = 0.1};
    snprintf(text, sizeof text, "%s", name);
    char *word = strtok_r(text, " ", &rest);
    int v = 0;
    while (v < 3 && (!word || strcmp(word, variants[v]) != 0)) v++;
    if (v == 3) fail_msg("%s: preference \"%s\": unknown variant", golden_path(), name);
    c.variant = (mt_preference_variant)v;
    while (next_word(&rest, &key, &value)) {
        if (strcmp(key, "beta") == 0)
            c.beta = parse_number(value, name);
        else if (strcmp(key, "label_smoothing") == 0)
            c.label_smoothing = parse_number(value, name);
        else
            fail_msg("%s: preference \"%s\": unknown parameter %s", golden_path(), name, key);
    }
    return c;
}

/* The rewards of a list, their sums as metrics, and the gradients of both sides. */
static void check_preference(const json_t *entry, const char *name, const pairs *p, const mt_loss_sums *sums) {
    static const char *const gradients[] = {"gradient_chosen", "gradient_rejected"};
    static const char *const reward_keys[] = {"chosen_rewards", "rejected_rewards"};
    double rewards[2][MAX_COLUMNS], expected[MAX_COLUMNS], sum[2] = {0}, right = 0;
    assert_near(sums->loss / sums->count, number(entry, name, "loss"), name);
    assert_true(sums->count == (double)p->count && json_object_size(entry) == 5);
    for (int side = 0; side < 2; side++) {
        int64_t count = p->count;
        read_vector(member(entry, name, reward_keys[side]), name, rewards[side], &count);
        read_vector(member(entry, name, gradients[side]), name, expected, &count);
        for (int64_t i = 0; i < count; i++) {
            const mt_span *span = &p->sequences[2 * i + side];
            for (int64_t k = 0; k < span->q_len; k++)
                assert_near(in.gradient[span->q_start + k] / sums->count, k < 2 ? 0 : expected[i], name);
            sum[side] += rewards[side][i];
        }
    }
    for (int64_t i = 0; i < p->count; i++) right += rewards[0][i] > rewards[1][i];
    assert_true(sums->metrics[MT_PAIR_ACCURACY] == right);
    assert_near(sums->metrics[MT_PAIR_CHOSEN], sum[0], name);
    assert_near(sums->metrics[MT_PAIR_REJECTED], sum[1], name);
    assert_near(sums->metrics[MT_PAIR_MARGIN], sum[0] - sum[1], name);
}

static void preference_losses_equal_the_file(void **state) {
    (void)state;
    static pairs p;
    json_t *root = read_golden(), *section = member(root, "the file", "preference"), *entry;
    const char *name;
    spread_pairs(member(section, "preference", "inputs"), &p);
    json_object_foreach(section, name, entry) {
        if (strcmp(name, "inputs") == 0) continue;
        mt_preference_config c = parse_preference(name);
        mt_loss_tokens t = loss_tokens();
        mt_loss_sums sums = {0}, parts = {0}, free_sums = {0};
        t.T = p.tokens, t.num_sequences = 2 * p.count, t.sequences = p.sequences;
        mt_preference_loss(&t, &c, &sums);
        check_preference(entry, name, &p, &sums);

        memcpy(in.expected, in.gradient, sizeof in.gradient);
        t = loss_tokens();
        for (int64_t i = 0; i < p.count; i++) { // a call for each pair
            t.num_sequences = 2, t.sequences = p.sequences + 2 * i;
            mt_preference_loss(&t, &c, &parts);
        }
        assert_true(memcmp(&parts, &sums, sizeof sums) == 0);
        assert_memory_equal(in.gradient, in.expected, sizeof in.gradient);

        t.num_sequences = 2 * p.count, t.sequences = p.sequences; // without a reference: the same as a reference of 0
        t.ref_logp = NULL;
        mt_preference_loss(&t, &c, &free_sums);
        memset(in.expected, 0, sizeof in.expected);
        t.ref_logp = in.expected;
        memset(&sums, 0, sizeof sums);
        mt_preference_loss(&t, &c, &sums);
        assert_memory_equal(&sums, &free_sums, sizeof sums);
    }
    json_decref(root);
}

static void pairs_without_counted_tokens_are_skipped(void **state) {
    (void)state;
    mt_span spans[] = {{0, 1, 0, 1, true}, {1, 1, 1, 1, true}, {2, 1, 2, 1, true}, {3, 1, 3, 1, true}};
    float mask[] = {1, 0, 0, 0};
    double logp[] = {-1, -2, -3, -4}, values[] = {1, 2, 3, 4}, dlogp[4] = {0}, dvalues[4] = {0};
    mt_loss_tokens t = {.T = 4,
                        .num_sequences = 4,
                        .sequences = spans,
                        .mask = mask,
                        .logp = logp,
                        .values = values,
                        .dlogp = dlogp,
                        .dvalues = dvalues};
    mt_loss_sums preference = {0}, reward = {0};
    mt_preference_loss(&t, &(mt_preference_config){.variant = MT_PREFERENCE_IPO, .beta = 1}, &preference);
    mt_reward_loss(&t, &(mt_reward_config){0}, &reward);
    assert_true(preference.count == 1 && reward.count == 1);
    assert_true(dlogp[0] != 0 && dlogp[1] == 0 && dlogp[2] == 0 && dlogp[3] == 0);
    assert_true(dvalues[0] != 0 && dvalues[1] != 0 && dvalues[2] == 0 && dvalues[3] == 0);
}

/* x^2 / 2 with x = ref - logp: 1/8 and 0 of the chosen tokens, 2 of the rejected one; -x is its slope. */
static void a_preference_has_the_divergence_of_its_tokens(void **state) {
    (void)state;
    mt_span spans[] = {{0, 3, 0, 3, true}, {3, 1, 3, 1, true}};
    float mask[] = {0, 1, 1, 1};
    double logp[] = {-9, -1, -2, -3}, ref_logp[] = {-1, -1.5, -2, -1}, alone[4] = {0}, both[4] = {0};
    mt_loss_tokens t = {
        .T = 4, .num_sequences = 2, .sequences = spans, .mask = mask, .logp = logp, .ref_logp = ref_logp};
    mt_preference_config c = {.variant = MT_PREFERENCE_SIGMOID, .beta = 0.1, .kl_type = MT_KL_K2};
    mt_loss_sums without = {0}, with = {0};
    t.dlogp = alone;
    mt_preference_loss(&t, &c, &without);
    c.kl_coef = 0.6, t.dlogp = both;
    mt_preference_loss(&t, &c, &with);
    assert_true(fabs(with.loss - without.loss - 0.6 * 2.125 / 3) < 1e-12 && with.count == without.count);
    for (int i = 0; i < 4; i++)
        assert_true(fabs(both[i] - alone[i] - mask[i] * 0.6 * (logp[i] - ref_logp[i]) / 3) < 1e-12);
}

/* ---- any split, finite differences ------------------------------------------------------------------------------ */

/* Sums of one call and of a call for each sequence, in reverse order. */
static void assert_split(void (*loss)(const mt_loss_tokens *, const void *, mt_loss_sums *), const void *config) {
    mt_loss_sums whole = {0}, parts = {0};
    mt_loss_tokens t = loss_tokens();
    loss(&t, config, &whole);
    memcpy(in.expected, in.gradient, sizeof in.gradient);
    t = loss_tokens();
    for (int64_t r = in.rows; r-- > 0;) {
        t.num_sequences = 1, t.sequences = in.sequences + r;
        loss(&t, config, &parts);
    }
    assert_near(parts.loss, whole.loss, "split");
    assert_near(parts.count, whole.count, "split");
    for (int m = 0; m < MT_MAX_LOSS_METRICS; m++) assert_near(parts.metrics[m], whole.metrics[m], "split");
    for (int64_t i = 0; i < in.tokens; i++) assert_near(in.gradient[i], in.expected[i], "split");
}

static void policy(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    mt_policy_loss(t, config, sums);
}

static void value(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    mt_value_loss(t, config, sums);
}

static void sums_do_not_depend_on_the_split(void **state) {
    (void)state;
    json_t *root = read_golden();
    read_inputs(root);
    json_decref(root);
    for (int mode = 0; mode < num_choices("loss-agg-mode"); mode++) {
        mt_aggregation aggregation = verl_aggregation();
        aggregation.mode = (mt_loss_aggregation)mode;
        mt_value_config v = {aggregation, 0.2};
        assert_split(value, &v);
        for (int variant = 0; variant < num_choices("pg-variant"); variant++) {
            mt_policy_config c = {.variant = (mt_policy_variant)variant,
                                  .aggregation = aggregation,
                                  .clip_ratio_low = 0.1,
                                  .clip_ratio_high = 0.2,
                                  .clip_ratio_c = 1.2,
                                  .beta = 0.3,
                                  .tau_pos = 1,
                                  .tau_neg = 2,
                                  .weight_pos = 2,
                                  .weight_neg = 0.5,
                                  .kl_cov_coef = 0.7,
                                  .kl_coef = 0.1,
                                  .kl_type = MT_KL_K3};
            assert_split(policy, &c);
        }
    }
}

/* Central differences of sums.loss by x[i] for all tokens, against the derivative. */
static void assert_derivative(void (*loss)(const mt_loss_tokens *, const void *, mt_loss_sums *), const void *config,
                              const mt_loss_tokens *t, double *x, const double *derivative) {
    const double step = 1e-6;
    mt_loss_tokens values = *t;
    values.dlogp = values.dentropy = values.dvalues = NULL;
    for (int64_t i = 0; i < t->T; i++) {
        mt_loss_sums low = {0}, high = {0};
        double kept = x[i];
        x[i] = kept - step, loss(&values, config, &low);
        x[i] = kept + step, loss(&values, config, &high);
        x[i] = kept;
        double slope = (high.loss - low.loss) / (2 * step);
        if (!(fabs(slope - derivative[i]) <= 1e-7 * fmax(1, fabs(slope))))
            fail_msg("token %d: derivative %.12g, slope %.12g", (int)i, derivative[i], slope);
    }
}

/* Not those whose gradient leaves out the ratio; GSPO with one advantage per sequence. */
static void policy_gradients_equal_finite_differences(void **state) {
    (void)state;
    static double entropy[MAX_TOKENS], dentropy[MAX_TOKENS];
    const mt_policy_variant variants[] = {MT_POLICY_PPO,      MT_POLICY_GSPO, MT_POLICY_GMPO,   MT_POLICY_GPG,
                                          MT_POLICY_SAPO,     MT_POLICY_DRO,  MT_POLICY_KIMI15, MT_POLICY_KL_COV,
                                          MT_POLICY_CLIP_COV, MT_POLICY_OPMD, MT_POLICY_SPPO};
    enum { NUM = sizeof variants / sizeof *variants };
    json_t *root = read_golden();
    read_inputs(root);
    json_decref(root);
    for (int64_t i = 0; i < in.tokens; i++) entropy[i] = 1 + 0.1 * sin((double)i);
    for (int v = 0; v < NUM; v++)
        for (int mode = 0; mode < num_choices("loss-agg-mode"); mode++) {
            mt_policy_config c = {.variant = variants[v],
                                  .aggregation = verl_aggregation(),
                                  .clip_ratio_low = 0.1,
                                  .clip_ratio_high = 0.25,
                                  .clip_ratio_c = 1.5,
                                  .beta = 0.4,
                                  .tau_pos = 1,
                                  .tau_neg = 2,
                                  .kl_cov_coef = 0.7,
                                  .kl_coef = 0.3,
                                  .entropy_coef = 0.2,
                                  .kl_type = MT_KL_K3};
            c.aggregation.mode = (mt_loss_aggregation)mode;
            if (variants[v] == MT_POLICY_GSPO)
                for (int64_t i = 0; i < in.tokens; i++) in.advantages[i] = in.advantages[i / in.columns * in.columns];
            mt_loss_tokens t = loss_tokens();
            mt_loss_sums sums = {0};
            memset(dentropy, 0, sizeof dentropy);
            t.entropy = entropy, t.dentropy = dentropy;
            for (int64_t i = 0; i < in.tokens; i++)
                in.selected[i] = i % 3 == 0, in.rollout_weights[i] = 1 + 0.1 * (double)(i / in.columns % 5);
            t.selected = in.selected, t.rollout_weights = v % 2 ? in.rollout_weights : NULL;
            mt_policy_loss(&t, &c, &sums);
            assert_derivative(policy, &c, &t, in.logp, in.gradient);
            assert_derivative(policy, &c, &t, entropy, dentropy);
        }
}

static void reward(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    mt_reward_loss(t, config, sums);
}

static void reward_loss_is_bradley_terry(void **state) {
    (void)state;
    enum { PAIRS = 3, LENGTH = 4, TOKENS = 2 * PAIRS * LENGTH };
    mt_span spans[2 * PAIRS];
    float mask[TOKENS];
    double values[TOKENS], dvalues[TOKENS] = {0}, loss = 0, right = 0;
    const mt_reward_config c = {.margin = 0.5, .center_coef = 0.01};
    for (int i = 0; i < TOKENS; i++) mask[i] = 1, values[i] = 3 * sin(1.7 * i);
    for (int64_t s = 0; s < 2 * PAIRS; s++) spans[s] = (mt_span){s * LENGTH, LENGTH, s * LENGTH, LENGTH, true};
    mt_loss_tokens t = {.T = TOKENS,
                        .num_sequences = 2 * PAIRS,
                        .sequences = spans,
                        .mask = mask,
                        .values = values,
                        .dvalues = dvalues};
    mt_loss_sums sums = {0}, extreme = {0};
    mt_reward_loss(&t, &c, &sums);
    for (int i = 0; i < PAIRS; i++) {
        double chosen = values[(2 * i + 1) * LENGTH - 1], rejected = values[(2 * i + 2) * LENGTH - 1];
        loss += log(1 + exp(rejected - chosen + 0.5)) + 0.01 * pow(chosen + rejected, 2);
        right += chosen > rejected;
    }
    assert_true(fabs(sums.loss - loss) < 1e-12 && sums.count == PAIRS && sums.metrics[MT_PAIR_ACCURACY] == right);
    assert_derivative(reward, &c, &t, values, dvalues);
    values[LENGTH - 1] = -1000, values[2 * LENGTH - 1] = 1000; // no overflow
    t.num_sequences = 2;
    mt_reward_loss(&t, &(mt_reward_config){0}, &extreme);
    assert_true(extreme.loss == 2000);
}

static void large_ratios_stay_finite(void **state) {
    (void)state;
    mt_span span = {0, 2, 0, 2, true};
    float mask[] = {1, 1};
    double logp[] = {-1, -2000}, other[] = {-1500, -1}, advantages[] = {-1, 1}, dlogp[2];
    for (int variant = MT_POLICY_PPO; variant <= MT_POLICY_SAPO_DETACHED; variant++)
        for (int type = MT_KL_K1; type <= MT_KL_K3; type++) {
            mt_policy_config c = {.variant = (mt_policy_variant)variant,
                                  .clip_ratio_low = 0.2,
                                  .clip_ratio_high = 0.2,
                                  .tau_pos = 1,
                                  .tau_neg = 1,
                                  .weight_neg = 1,
                                  .kl_cov_coef = 1,
                                  .kl_type = (mt_kl_type)type,
                                  .kl_coef = 1};
            mt_loss_tokens t = {
                2, 1, &span, mask, logp, .old_logp = other, .ref_logp = other, .advantages = advantages};
            mt_loss_sums sums = {0};
            dlogp[0] = dlogp[1] = 0, t.dlogp = dlogp;
            mt_policy_loss(&t, &c, &sums);
            assert_true(isfinite(sums.loss) && isfinite(dlogp[0]) && isfinite(dlogp[1]));
        }
    for (int variant = MT_POLICY_PPO; variant <= MT_POLICY_GSPO; variant++) { // clamped: no gradient
        mt_policy_config c = {.variant = (mt_policy_variant)variant, .clip_ratio_low = 0.2, .clip_ratio_high = 0.2};
        mt_loss_tokens t = {
            1, 1, &(mt_span){0, 1, 0, 1, true}, mask, logp, .old_logp = other, .advantages = advantages};
        mt_loss_sums sums = {0};
        dlogp[0] = 0, t.dlogp = dlogp;
        mt_policy_loss(&t, &c, &sums);
        assert_true(fabs(sums.loss / exp(variant == MT_POLICY_GSPO ? 10 : 20) - 1) < 1e-7 && dlogp[0] == 0);
    }
}

/* ---- divergences ------------------------------------------------------------------------------------------------ */

enum { LABELS = 7 };

static void softmax(double *p, const double *logits, double temperature) {
    double sum = 0;
    for (int i = 0; i < LABELS; i++) sum += p[i] = exp(logits[i] / temperature);
    for (int i = 0; i < LABELS; i++) p[i] /= sum;
}

static double kl(const double *p, const double *q) {
    double sum = 0;
    for (int i = 0; i < LABELS; i++) sum += p[i] * log(p[i] / q[i]);
    return sum;
}

/* The definitions, with softmaxes computed plainly. */
static double expected_divergence(const mt_divergence_config *c, const double *student, const double *teacher) {
    double p[LABELS], q[LABELS], mix[LABELS], head = 0, tail = 0, mass = 0;
    bool taken[LABELS] = {false};
    softmax(p, student, c->temperature);
    softmax(q, teacher, c->temperature);
    double of_p = c->type == MT_SKEWED_FORWARD_KL   ? 1 - c->skew_lambda
                  : c->type == MT_SKEWED_REVERSE_KL ? c->skew_lambda
                                                    : 0.5;
    for (int i = 0; i < LABELS; i++) mix[i] = of_p * p[i] + (1 - of_p) * q[i];
    for (int n = 0; n < LABELS; n++) { // from the least probable label
        int least = -1;
        for (int i = 0; i < LABELS; i++)
            if (!taken[i] && (least < 0 || q[i] < q[least])) least = i;
        taken[least] = true, mass += q[least];
        *(mass <= c->adaptive_alpha ? &tail : &head) += fabs(p[least] - q[least]);
    }
    switch (c->type) {
    case MT_FORWARD_KL:
        return kl(q, p);
    case MT_REVERSE_KL:
        return kl(p, q);
    case MT_ADAPTIVE_KL:
        return (head * kl(q, p) + tail * kl(p, q)) / (head + tail);
    case MT_SKEWED_FORWARD_KL:
        return kl(q, mix);
    case MT_SKEWED_REVERSE_KL:
        return kl(p, mix);
    case MT_JS_DIVERGENCE:
        return (kl(p, mix) + kl(q, mix)) / 2;
    }
    return NAN;
}

static const double student_logits[LABELS] = {1.2, -0.3, 0.1, 2.5, -1.7, 0.4, 0.9};
static const double teacher_logits[LABELS] = {0.2, 1.3, -2.1, 1.5, -0.7, 0.2, 1.1};

static void divergences_equal_their_definitions(void **state) {
    (void)state;
    const double temperatures[] = {1, 2.5};
    for (int type = MT_FORWARD_KL; type <= MT_JS_DIVERGENCE; type++)
        for (int i = 0; i < 2; i++) {
            mt_divergence_config c = {(mt_divergence_type)type, temperatures[i], 0.1, 0.5};
            double gradient[LABELS];
            double value = mt_divergence(&c, student_logits, teacher_logits, LABELS, gradient);
            assert_true(fabs(value - expected_divergence(&c, student_logits, teacher_logits)) < 1e-14);
            assert_true(fabs(mt_divergence(&c, teacher_logits, teacher_logits, LABELS, gradient)) < 1e-15);
            for (int k = 0; k < LABELS; k++) assert_true(fabs(gradient[k]) < 1e-15);
        }
}

/* The weights of adaptive KL are constants (arXiv 2404.02657), so its slope is that of the weighted sum. */
static void divergence_gradients_equal_finite_differences(void **state) {
    (void)state;
    const double step = 1e-6;
    for (int type = MT_FORWARD_KL; type <= MT_JS_DIVERGENCE; type++)
        for (int missing = 0; missing < 2; missing++) { // a label that the teacher lacks
            mt_divergence_config c = {(mt_divergence_type)type, 1.3, 0.2, 0.5};
            double teacher[LABELS], student[LABELS], gradient[LABELS], unused[LABELS], share = 0, values[2];
            memcpy(student, student_logits, sizeof student);
            memcpy(teacher, teacher_logits, sizeof teacher);
            if (missing) teacher[4] = -INFINITY;
            double value = mt_divergence(&c, student, teacher, LABELS, gradient);
            mt_divergence_config parts[2] = {c, c};
            if (type == MT_ADAPTIVE_KL) {
                parts[0].type = MT_FORWARD_KL, parts[1].type = MT_REVERSE_KL;
                for (int k = 0; k < 2; k++) values[k] = mt_divergence(&parts[k], student, teacher, LABELS, unused);
                share = (value - values[1]) / (values[0] - values[1]);
                assert_true(share > 0.1 && share < 0.9);
            }
            for (int i = 0; i < LABELS; i++) {
                double slopes[2];
                for (int k = 0; k < 2; k++) {
                    student[i] = student_logits[i] + step;
                    slopes[k] = mt_divergence(&parts[k], student, teacher, LABELS, unused);
                    student[i] = student_logits[i] - step;
                    slopes[k] -= mt_divergence(&parts[k], student, teacher, LABELS, unused);
                    student[i] = student_logits[i];
                }
                double slope = (share * slopes[0] + (1 - share) * slopes[1]) / (2 * step);
                if (!(fabs(gradient[i] - slope) < 1e-9))
                    fail_msg("divergence %d, label %d: derivative %.12g, slope %.12g", type, i, gradient[i], slope);
            }
        }
}

/* ---- distillation by Model Optimizer (tests/golden/make_distillation.py) */

static double at(const json_t *list, size_t i) {
    return json_number_value(json_array_get(list, i));
}

/* The largest difference of a gradient from the file's. */
static double off(const json_t *wanted, const double *got, size_t count) {
    double most = 0;
    for (size_t i = 0; i < count; i++) most = fmax(most, fabs(got[i] - at(wanted, i)));
    return most;
}

/* verl's forward_kl_topk as a term of the loss (tests/golden/make_topk.py), and by these divergences as the advantages
 * of a policy loss. */
static void topk_distillation_equals_verl(void **state) {
    (void)state;
    enum { T = 6, V = 9, K = 4 };
    json_error_t problem;
    json_t *root = json_load_file("tests/golden/losses/topk.json", 0, &problem);
    if (!root) fail_msg("tests/golden/losses/topk.json:%d: %s", problem.line, problem.text);
    const json_t *logits = json_object_get(root, "student"), *cases = json_object_get(root, "cases");
    const json_t *ids = json_object_get(root, "ids"), *logps = json_object_get(root, "teacher_logps");
    static const mt_span span = {0, T, 0, T, true};
    assert_true(json_array_size(cases) == 4);
    for (size_t n = 0; n < json_array_size(cases); n++) {
        const json_t *wanted = json_array_get(cases, n), *min_clamp = json_object_get(wanted, "min_clamp");
        double divergence[T], slopes[T][K], p[T][V], ddivergence[T] = {0}, dlogp[T] = {0}, old[T] = {0}, ratio = 1.1;
        float mask[T];
        mt_policy_config c = {.distillation = {MT_DISTILL_IN_LOSS, MT_KL_FORWARD_TOPK, 1, .alone = true}};
        c.distillation.min_clamp = json_is_null(min_clamp) ? -INFINITY : json_number_value(min_clamp);
        c.distillation.max_clamp = json_number_value(json_object_get(wanted, "max_clamp"));
        for (size_t t = 0; t < T; t++) {
            double sum = 0, log_p[K], log_q[K];
            for (size_t i = 0; i < V; i++) sum += exp(at(json_array_get(logits, t), i));
            for (size_t i = 0; i < V; i++) p[t][i] = exp(at(json_array_get(logits, t), i)) / sum;
            for (size_t k = 0; k < K; k++) {
                log_p[k] = log(p[t][(int)at(json_array_get(ids, t), k)]);
                log_q[k] = at(json_array_get(logps, t), k);
            }
            mask[t] = (float)at(json_object_get(root, "mask"), t);
            divergence[t] = mt_topk_divergence(c.distillation.min_clamp, log_p, log_q, K, slopes[t]);
            assert_near(divergence[t], at(json_object_get(wanted, "divergence"), t), "divergence");
        }
        mt_loss_tokens tokens = {.T = T, .num_sequences = 1, .sequences = &span, .mask = mask, .logp = divergence};
        tokens.divergence = divergence, tokens.ddivergence = ddivergence, tokens.dlogp = dlogp;
        mt_loss_sums sums = {0};
        mt_policy_loss(&tokens, &c, &sums);
        assert_near(sums.loss, json_number_value(json_object_get(wanted, "loss")), "loss");
        for (size_t t = 0; t < T; t++) {
            double gradient[V] = {0}, mass = 0;
            assert_true(dlogp[t] == 0);
            for (size_t k = 0; k < K; k++) mass -= slopes[t][k];
            for (size_t i = 0; i < V; i++) gradient[i] = ddivergence[t] * mass * p[t][i];
            for (size_t k = 0; k < K; k++)
                gradient[(int)at(json_array_get(ids, t), k)] += ddivergence[t] * slopes[t][k];
            for (size_t i = 0; i < V; i++)
                assert_near(gradient[i], at(json_array_get(json_object_get(wanted, "gradient"), t), i), "gradient");
        }
        // as a reward: PPO's loss with the negative divergence, at least 0, in place of an advantage; no other gradient
        double loss = 0, most = c.distillation.max_clamp > 0 ? c.distillation.max_clamp : INFINITY;
        c.distillation.in = MT_DISTILL_IN_POLICY_GRADIENT;
        c.distillation.clip_ratio_low = c.distillation.clip_ratio_high = 0.2;
        for (size_t t = 0; t < T; t++) old[t] = divergence[t] - log(ratio);
        memset(ddivergence, 0, sizeof ddivergence);
        tokens.old_logp = old, sums = (mt_loss_sums){0};
        mt_policy_loss(&tokens, &c, &sums);
        for (size_t t = 0; t < T; t++) {
            double term = mask[t] == 0 ? 0 : ratio * fmin(fmax(divergence[t], 0), most);
            loss += term;
            assert_near(dlogp[t], term, "policy gradient"), assert_true(ddivergence[t] == 0);
        }
        assert_near(sums.loss, loss, "policy gradient");
    }
    json_decref(root);
}

/* Values and gradients in float64, except hidden states, which are floats. */
static void balanced_distillation_equals_model_optimizer(void **state) {
    (void)state;
    enum { T = 5, V = 7, C = 6, PAIRS = 2 };
    json_error_t problem;
    json_t *root = json_load_file("tests/golden/losses/distillation.json", 0, &problem);
    if (!root) fail_msg("tests/golden/losses/distillation.json:%d: %s", problem.line, problem.text);
    const json_t *inputs = json_object_get(root, "inputs"), *cases = json_object_get(root, "cases");
    const json_t *states = json_object_get(inputs, "student_hidden"),
                 *others = json_object_get(inputs, "teacher_hidden");
    static const char *const names[] = {[MT_DISTILL_BALANCE_HIDDEN] = "hidden", [MT_DISTILL_BALANCE_ALL] = "all"};
    mt_distillation_config c = {.divergence = {.type = MT_FORWARD_KL}, .num_pairs = PAIRS};
    c.divergence.temperature = json_number_value(json_object_get(root, "temperature"));
    c.scale = json_number_value(json_object_get(root, "scale"));
    for (int balance = MT_DISTILL_BALANCE_HIDDEN; balance <= MT_DISTILL_BALANCE_ALL; balance++) {
        const json_t *wanted = json_object_get(cases, names[balance]), *slopes = json_object_get(wanted, "gradients");
        double logp[T], divergence[T], hidden[T] = {0}, dlogp[T] = {0}, dstudent[T][V], dhidden[PAIRS][T][C];
        float mask[T];
        mt_loss_sums sums = {0};
        for (size_t t = 0; t < T; t++) {
            double student[V], teacher[V];
            mask[t] = (float)at(json_object_get(inputs, "mask"), t), logp[t] = at(json_object_get(inputs, "logp"), t);
            for (size_t i = 0; i < V; i++) {
                student[i] = at(json_array_get(json_object_get(inputs, "student"), t), i);
                teacher[i] = at(json_array_get(json_object_get(inputs, "teacher"), t), i);
            }
            divergence[t] = mt_divergence(&c.divergence, student, teacher, V, dstudent[t]);
            for (size_t k = 0; k < PAIRS; k++) {
                float x[C], y[C];
                for (size_t i = 0; i < C; i++) {
                    x[i] = (float)at(json_array_get(json_array_get(states, k), t), i);
                    y[i] = (float)at(json_array_get(json_array_get(others, k), t), i);
                }
                hidden[t] += mt_hidden_loss(k == 0 ? MT_HIDDEN_COSINE : MT_HIDDEN_MSE, x, y, C, y) / PAIRS;
                for (size_t i = 0; i < C; i++) dhidden[k][t][i] = (double)y[i] / PAIRS;
            }
        }
        mt_loss_tokens tokens = {.T = T, .mask = mask, .logp = logp, .divergence = divergence, .hidden = hidden};
        tokens.dlogp = dlogp;
        c.balance = (mt_distillation_balance)balance;
        mt_distillation_loss(&tokens, &c, &sums);
        assert_true(fabs(sums.loss - json_number_value(json_object_get(wanted, "loss"))) < 1e-6);
        assert_true(fabs(sums.metrics[MT_DISTILLATION_HIDDEN] - json_number_value(json_object_get(wanted, "hidden"))) <
                    1e-6);
        assert_true(fabs(sums.metrics[MT_DISTILLATION_DIVERGENCE] -
                         json_number_value(json_object_get(wanted, "divergence"))) < 1e-12);
        assert_true(off(json_object_get(slopes, "logp"), dlogp, T) < 1e-12);
        for (size_t t = 0; t < T; t++) {
            for (size_t i = 0; i < V; i++) dstudent[t][i] *= (double)mask[t] * sums.divergence_factor;
            assert_true(off(json_array_get(json_object_get(slopes, "student"), t), dstudent[t], V) < 1e-6);
            for (size_t k = 0; k < PAIRS; k++) {
                const json_t *rows = json_array_get(json_object_get(slopes, "student_hidden"), k);
                for (size_t i = 0; i < C; i++) dhidden[k][t][i] *= (double)mask[t] * sums.hidden_factor;
                assert_true(off(json_array_get(rows, t), dhidden[k][t], C) < 1e-6);
            }
        }
    }
    json_decref(root);
}

static void divergences_have_known_values(void **state) {
    (void)state;
    double unused[LABELS], far[2] = {0, 800}, near[2] = {800, 0};
    mt_divergence_config js = {MT_JS_DIVERGENCE, 1, 0, 0}, forward = js, reverse = js, skewed = js;
    forward.type = MT_FORWARD_KL, reverse.type = MT_REVERSE_KL, skewed.type = MT_SKEWED_FORWARD_KL;
    assert_true(fabs(mt_divergence(&js, student_logits, teacher_logits, LABELS, unused) -
                     mt_divergence(&js, teacher_logits, student_logits, LABELS, unused)) < 1e-15);
    assert_true(mt_divergence(&forward, student_logits, teacher_logits, LABELS, unused) ==
                mt_divergence(&skewed, student_logits, teacher_logits, LABELS, unused)); // lambda 0
    assert_true(fabs(mt_divergence(&forward, student_logits, teacher_logits, LABELS, unused) -
                     mt_divergence(&reverse, teacher_logits, student_logits, LABELS, unused)) < 1e-15);
    assert_true(fabs(mt_divergence(&js, far, near, 2, unused) - log(2)) < 1e-15); // its greatest value
    assert_true(fabs(mt_divergence(&forward, far, near, 2, unused) - 800) < 1e-12 && isfinite(unused[0]));
    double equal[LABELS] = {0}; // labels with equal probabilities: 3 of 7 have at most a half
    mt_divergence_config adaptive = {MT_ADAPTIVE_KL, 1, 0, 0.5};
    double p[LABELS], head = 0, tail = 0;
    softmax(p, student_logits, 1);
    for (int i = 0; i < LABELS; i++) *(i < 3 ? &tail : &head) += fabs(p[i] - 1.0 / LABELS);
    double expected = (head * mt_divergence(&forward, student_logits, equal, LABELS, unused) +
                       tail * mt_divergence(&reverse, student_logits, equal, LABELS, unused)) /
                      (head + tail);
    assert_true(fabs(mt_divergence(&adaptive, student_logits, equal, LABELS, unused) - expected) < 1e-14);
}

/* ---- NaN -------------------------------------------------------------------------------------------------------- */

/* Operands of two pairs of sequences; the same numbers with each sign of the advantages, within and beyond clips. */
enum { NAN_TOKENS = 8, NAN_OPERANDS = 10 };
static double operands[NAN_OPERANDS][NAN_TOKENS];

static mt_loss_tokens operand_tokens(void) {
    static const mt_span spans[] = {{0, 2, 0, 2, true}, {2, 2, 2, 2, true}, {4, 2, 4, 2, true}, {6, 2, 6, 2, true}};
    static const float mask[NAN_TOKENS] = {1, 1, 1, 1, 1, 1, 1, 1};
    mt_loss_tokens t = {.T = NAN_TOKENS, .num_sequences = 4, .sequences = spans, .mask = mask};
    t.logp = operands[0], t.old_logp = operands[1], t.ref_logp = operands[2], t.advantages = operands[3];
    t.entropy = operands[4], t.values = operands[5], t.returns = operands[6], t.old_values = operands[7];
    t.divergence = operands[8], t.hidden = operands[9];
    return t;
}

/* Sets the operands, with `bad` at `token` of one of them; `wide`: differences beyond every clip; sign: of advantages.
 */
static void set_operands(int operand, int token, double bad, double wide, double sign) {
    for (int i = 0; i < NAN_TOKENS; i++) {
        double x = wide * (i % 2 ? 1 : -1);
        const double numbers[NAN_OPERANDS] = {-2, -2 + x, -2 - x, sign, 1, x, x / 2, -x, 0.5, 0.25};
        for (int k = 0; k < NAN_OPERANDS; k++) operands[k][i] = numbers[k];
    }
    operands[operand][token] = bad;
}

static const double bad_numbers[] = {NAN, INFINITY, -INFINITY};
enum { NUM_BAD = 3 };

/* The loss is not finite wherever one of these operands is not, and a number without. */
static void assert_nan_stays(const char *name, void (*loss)(const mt_loss_tokens *, const void *, mt_loss_sums *),
                             const void *config, const char *reads) {
    static const char letters[] = "lorAevtwdh"; // of `reads`, in the order of the operands
    for (int operand = 0; operand < NAN_OPERANDS; operand++)
        for (int i = 0; i < 4 * NAN_TOKENS * NUM_BAD; i++) {
            double unread[NAN_TOKENS] = {0}, wide = i / NAN_TOKENS % 2 ? 30 : 0.01;
            double sign = i / NAN_TOKENS / 2 % 2 ? -1 : 1, bad = bad_numbers[i / NAN_TOKENS / 4];
            mt_loss_tokens t = operand_tokens();
            mt_loss_sums sums = {0};
            set_operands(operand, i % NAN_TOKENS, bad, wide, sign);
            t.dlogp = t.dvalues = unread;
            loss(&t, config, &sums);
            bool is_read = strchr(reads, letters[operand]) != NULL;
            if (isfinite(sums.loss) == is_read)
                fail_msg("%s: %g in operand %c, token %d: the loss is %g", name, bad, letters[operand], i % NAN_TOKENS,
                         sums.loss);
        }
}

static void preference(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    mt_preference_loss(t, config, sums);
}

static void distillation(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    mt_distillation_loss(t, config, sums);
}

/* The same without a reference, which only the divergence reads. */
static void policy_alone(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    mt_loss_tokens alone = *t;
    alone.ref_logp = alone.entropy = NULL;
    mt_policy_loss(&alone, config, sums);
}

/* The same for tokens that the variant treats apart. */
static void policy_of_selected(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    static const double ones[NAN_TOKENS] = {1, 1, 1, 1, 1, 1, 1, 1};
    mt_loss_tokens alone = *t;
    alone.ref_logp = alone.entropy = NULL, alone.selected = ones;
    mt_policy_loss(&alone, config, sums);
}

/* A reward loss reads the last token of each sequence. */
static void reward_of_tokens(const mt_loss_tokens *t, const void *config, mt_loss_sums *sums) {
    static const mt_span ones[] = {{0, 1, 0, 1, true}, {1, 1, 1, 1, true}, {2, 1, 2, 1, true}, {3, 1, 3, 1, true},
                                   {4, 1, 4, 1, true}, {5, 1, 5, 1, true}, {6, 1, 6, 1, true}, {7, 1, 7, 1, true}};
    mt_loss_tokens each = *t;
    each.sequences = ones, each.num_sequences = NAN_TOKENS;
    mt_reward_loss(&each, config, sums);
}

static void a_loss_is_not_finite_if_an_operand_is_not(void **state) {
    (void)state;
    for (int mode = 0; mode < num_choices("loss-agg-mode"); mode++) {
        mt_aggregation aggregation = {.mode = (mt_loss_aggregation)mode, .norm_length = 4};
        mt_value_config plain = {aggregation, 0}, clipped = {aggregation, 0.2};
        assert_nan_stays("value", value, &plain, "vt");
        assert_nan_stays("clipped value", value, &clipped, "vtw");
        for (int variant = 0; variant < num_choices("pg-variant"); variant++) {
            mt_policy_config c = {
                .variant = (mt_policy_variant)variant, .aggregation = aggregation, .clip_ratio_low = 0.2};
            bool is_logp = variant == MT_POLICY_GPG || variant == MT_POLICY_OPMD;
            c.clip_ratio_high = 0.3, c.clip_ratio_c = variant == MT_POLICY_PPO ? 3 : 0;
            c.beta = c.tau_pos = c.tau_neg = c.weight_neg = c.weight_pos = c.kl_cov_coef = 0.5;
            assert_nan_stays("policy", policy_alone, &c, is_logp ? "lA" : "loA");
            bool has_no_ratio = is_logp || variant == MT_POLICY_TOPR;
            assert_nan_stays("policy of selected tokens", policy_of_selected, &c, has_no_ratio ? "lA" : "loA");
            c.kl_coef = 0.1, c.entropy_coef = 0.01;
            for (int type = 0; type < num_choices("kl-loss-type"); type++) {
                c.kl_type = (mt_kl_type)type;
                assert_nan_stays("policy with a divergence", policy, &c, is_logp ? "lrAe" : "lorAe");
            }
        }
    }
    for (int variant = 0; variant < num_choices("preference-loss"); variant++) {
        mt_preference_config c = {.variant = (mt_preference_variant)variant, .beta = 0.5};
        c.label_smoothing = variant == MT_PREFERENCE_SIGMOID ? 0.1 : 0;
        assert_nan_stays("preference", preference, &c, "lr");
        c.kl_coef = 0.1;
        for (int type = 0; type < num_choices("kl-loss-type"); type++) {
            c.kl_type = (mt_kl_type)type;
            assert_nan_stays("preference with a divergence", preference, &c, "lr");
        }
    }
    assert_nan_stays("reward", reward_of_tokens, &(mt_reward_config){0.5, 0.01}, "v");
    for (int balance = 0; balance < num_choices("kd-balance"); balance++) {
        mt_distillation_config c = {.weight = 0.5, .balance = (mt_distillation_balance)balance, .hidden_weight = 2};
        c.scale = 0.5;
        assert_nan_stays("distillation", distillation, &c, "ld");
        c.num_pairs = 1;
        assert_nan_stays("distillation of hidden states", distillation, &c, "ldh");
    }
}

static void a_loss_of_hidden_states_is_not_finite_if_one_is_not(void **state) {
    (void)state;
    enum { C = 6 };
    for (int type = MT_HIDDEN_COSINE; type <= MT_HIDDEN_MSE; type++)
        for (int i = 0; i < 2 * C * NUM_BAD; i++) {
            float x[2][C], slopes[C];
            for (int j = 0; j < 2 * C; j++) x[j / C][j % C] = (float)(j % 5 - 2);
            x[i / C % 2][i % C] = (float)bad_numbers[i / C / 2];
            bool is_lost = isfinite(mt_hidden_loss((mt_hidden_loss_type)type, x[0], x[1], C, slopes));
            double sum = 0;
            for (int j = 0; j < C; j++) sum += (double)slopes[j];
            if (is_lost || isfinite(sum)) fail_msg("hidden loss %d: number %d is lost", type, i);
        }
}

static void a_divergence_is_not_finite_if_a_logit_is_not(void **state) {
    (void)state;
    double logits[2][LABELS], unread[LABELS];
    for (int type = 0; type < num_choices("kd-objective"); type++)
        for (int i = 0; i < 2 * LABELS * 2; i++) {
            mt_divergence_config c = {(mt_divergence_type)type, 2, 0.1, 0.5};
            double bad = bad_numbers[i / LABELS / 2]; // -INFINITY is a label that cannot occur
            memcpy(logits[0], student_logits, sizeof logits[0]), memcpy(logits[1], teacher_logits, sizeof logits[1]);
            logits[i / LABELS % 2][i % LABELS] = bad;
            if (isfinite(mt_divergence(&c, logits[0], logits[1], LABELS, unread)))
                fail_msg("divergence %d: %g of the %s is lost", type, bad, i / LABELS % 2 ? "teacher" : "student");
        }
}

/* A NaN or infinity in any number that rewards and advantages read reaches an advantage. */
static void advantages_are_not_finite_if_an_operand_is_not(void **state) {
    (void)state;
    enum { OLD_LOGP, REF_LOGP, SCORES, VALUES, BASELINES, SQUARES, WEIGHTS, PARTS, PART_WEIGHTS, NUM_READ };
    static const int64_t groups[] = {0, 0, 1, 1};
    static const int lengths[] = {NAN_TOKENS, NAN_TOKENS, 4, NAN_TOKENS, 4, NAN_TOKENS, NAN_TOKENS, 8, 2};
    int estimators = num_choices("adv-estimator"), types = num_choices("kl-loss-type");
    for (int estimator = 0; estimator < estimators; estimator++)
        for (int i = 0; i < NUM_BAD * 4 * NUM_READ * NAN_TOKENS * types; i++) {
            int at = i % NAN_TOKENS, read = i / NAN_TOKENS % NUM_READ, form = i / NAN_TOKENS / NUM_READ % 4;
            int type = i / NAN_TOKENS / NUM_READ / 4 % types;
            double bad = bad_numbers[i / NAN_TOKENS / NUM_READ / 4 / types];
            bool whiten = form % 2, clips = form / 2, gdpo = estimator == MT_ADV_GDPO;
            bool baseline = estimator == MT_ADV_OPTIMAL_TOKEN_BASELINE;
            bool is_read = read <= SCORES                       ? !gdpo
                           : read == VALUES                     ? estimator == MT_ADV_GAE
                           : read == BASELINES                  ? estimator == MT_ADV_REMAX
                           : read == SQUARES || read == WEIGHTS ? baseline
                                                                : gdpo;
            if (!is_read || at >= lengths[read]) continue;
            double scores[] = {1, 0, 2, -1}, rewards[NAN_TOKENS], advantages[NAN_TOKENS], returns[NAN_TOKENS], sum = 0;
            double baselines[4] = {0}, squares[NAN_TOKENS], weights[NAN_TOKENS], part_weights[] = {1, 2};
            double part_scores[] = {1, 0, 2, -1, 0, 3, 1, 1};
            const double *const parts[] = {part_scores, part_scores + 4};
            for (int k = 0; k < NAN_TOKENS; k++) squares[k] = 0.5, weights[k] = 1.5;
            double *const reads[NUM_READ] = {operands[1], operands[2], scores,      operands[5], baselines,
                                             squares,     weights,     part_scores, part_weights};
            mt_loss_tokens t = operand_tokens();
            set_operands(9, 0, NAN, 0.01, 1);
            reads[read][at] = bad;
            mt_token_rewards(rewards, &t, scores, clips ? 0.5 : 0, (mt_kl_type)type, 0.1);
            mt_advantage_tokens of = {.T = NAN_TOKENS, .num_sequences = 4, .sequences = t.sequences, .mask = t.mask};
            of.groups = groups, of.rewards = rewards, of.values = t.values, of.advantages = advantages;
            of.returns = returns, of.baselines = baselines, of.num_parts = 2, of.part_weights = part_weights;
            of.parts = parts, of.old_logp = t.old_logp, of.squares = squares, of.rollout_weights = weights;
            mt_advantage_config c = {.estimator = (mt_adv_estimator)estimator, .gamma = 0.9, .lambda = 0.9};
            c.whiten = whiten, c.norm_by_std = whiten, c.advantage_clip = clips ? 0.5 : 0, c.step_weights = 2;
            mt_advantages(&of, &c);
            for (int k = 0; k < NAN_TOKENS; k++) sum += advantages[k];
            if (isfinite(sum)) fail_msg("estimator %d: %g in operand %d, number %d, is lost", estimator, bad, read, at);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(policy_losses_equal_verl),
        cmocka_unit_test(distillation_terms_equal_hand_computed_numbers),
        cmocka_unit_test(divergences_lower_advantages),
        cmocka_unit_test(rollout_corrections_equal_verl),
        cmocka_unit_test(losses_of_other_programs_equal_their_formulas),
        cmocka_unit_test(a_weight_that_is_not_finite_reaches_the_loss),
        cmocka_unit_test(covariances_select_tokens),
        cmocka_unit_test(mismatch_is_measured),
        cmocka_unit_test(kl_estimates_equal_verl),
        cmocka_unit_test(value_losses_equal_verl),
        cmocka_unit_test(advantages_equal_verl),
        cmocka_unit_test(advantages_of_several_rewards_equal_verl),
        cmocka_unit_test(discounted_returns_pass_over_uncounted_tokens),
        cmocka_unit_test(token_rewards_clip_scores_and_subtract_kl),
        cmocka_unit_test(a_group_of_one_keeps_its_score),
        cmocka_unit_test(preference_losses_equal_the_file),
        cmocka_unit_test(a_preference_has_the_divergence_of_its_tokens),
        cmocka_unit_test(pairs_without_counted_tokens_are_skipped),
        cmocka_unit_test(sums_do_not_depend_on_the_split),
        cmocka_unit_test(policy_gradients_equal_finite_differences),
        cmocka_unit_test(reward_loss_is_bradley_terry),
        cmocka_unit_test(large_ratios_stay_finite),
        cmocka_unit_test(divergences_equal_their_definitions),
        cmocka_unit_test(divergence_gradients_equal_finite_differences),
        cmocka_unit_test(balanced_distillation_equals_model_optimizer),
        cmocka_unit_test(topk_distillation_equals_verl),
        cmocka_unit_test(divergences_have_known_values),
        cmocka_unit_test(a_loss_is_not_finite_if_an_operand_is_not),
        cmocka_unit_test(a_loss_of_hidden_states_is_not_finite_if_one_is_not),
        cmocka_unit_test(a_divergence_is_not_finite_if_a_logit_is_not),
        cmocka_unit_test(advantages_are_not_finite_if_an_operand_is_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
