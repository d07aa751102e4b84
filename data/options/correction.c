/* correction.c: the options of rollout correction, as values. */
#include "correction.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A number above 0 at *text, which moves behind it. */
static bool mt_threshold_next(char **text, double *value) {
    char *end;
    *value = strtod(*text, &end);
    bool valid = end != *text && isfinite(*value) && *value > 0;
    *text = end;
    return valid;
}

/* "HIGH" or "LOW_HIGH"; *low is 0 without it. */
static bool mt_threshold_read(char *text, double *low, double *high) {
    *low = 0;
    if (!mt_threshold_next(&text, high)) return false;
    if (*text == '_') {
        *low = *high, text++;
        if (!mt_threshold_next(&text, high) || *low > *high) return false;
    }
    return *text == 0;
}

/* "seq_mean_k3" */
static bool mt_rejection_read(const char *name, mt_rejection *rule) {
    static const char *const kinds[] = {[MT_REJECT_TOKEN] = "token_k",
                                        [MT_REJECT_SUM] = "seq_sum_k",
                                        [MT_REJECT_MEAN] = "seq_mean_k",
                                        [MT_REJECT_MAX] = "seq_max_k"};
    static const mt_kl_type types[] = {MT_KL_K1, MT_KL_K2, MT_KL_K3};
    for (int i = 0; i < 4; i++) {
        size_t length = strlen(kinds[i]);
        if (strncmp(name, kinds[i], length) != 0) continue;
        const char digit = name[length];
        if (digit < '1' || digit > '3' || name[length + 1] || (i == MT_REJECT_MAX && digit == '1')) return false;
        rule->of = i, rule->type = types[digit - '1'];
        return true;
    }
    return false;
}

/* The words of a list with commas between them, changed in place; returns their number, at most `most` + 1. */
static int mt_words_split(char *list, char **words, int most) {
    int count = 0;
    for (char *rest, *word = strtok_r(list, ",", &rest); word && count <= most; word = strtok_r(NULL, ",", &rest)) {
        while (*word == ' ') word++;
        size_t length = strlen(word);
        while (length > 0 && word[length - 1] == ' ') word[--length] = 0;
        if (count < most) words[count] = word;
        count++;
    }
    return count;
}

static int mt_rejections_read(mt_correction *c, char *names, char *thresholds, mt_error *error) {
    char *words[MT_MAX_REJECTIONS], *bounds[MT_MAX_REJECTIONS];
    int count = mt_words_split(names, words, MT_MAX_REJECTIONS);
    int given = mt_words_split(thresholds, bounds, MT_MAX_REJECTIONS);
    if (count > MT_MAX_REJECTIONS || count == 0)
        return mt_error_set(error, "--rollout-rs has %d rules; give 1 to %d", count, MT_MAX_REJECTIONS);
    if (given != 1 && given != count)
        return mt_error_set(error, "--rollout-rs-threshold has %d values for %d rules; give one, or one for each",
                            given, count);
    for (int i = 0; i < count; i++) {
        mt_rejection rule, *earlier = c->rules;
        if (!mt_rejection_read(words[i], &rule))
            return mt_error_set(error,
                                "--rollout-rs has token_k1 to k3, seq_sum_k1 to k3, seq_mean_k1 to k3, seq_max_k2 and "
                                "k3, not '%.100s'",
                                words[i]);
        while (earlier < c->rules + c->num_rules && (earlier->of != rule.of || earlier->type != rule.type)) earlier++;
        if (earlier < c->rules + c->num_rules)
            return mt_error_set(error, "--rollout-rs has %.100s twice; leave one out", words[i]);
        const char *bound = bounds[given == 1 ? 0 : i];
        bool is_ratio = rule.type == MT_KL_K1;
        char copy[64];
        snprintf(copy, sizeof copy, "%s", bound);
        if (strlen(bound) >= sizeof copy || !mt_threshold_read(copy, &rule.low, &rule.high) ||
            (!is_ratio && rule.low > 0) || (is_ratio && rule.low == 0 && rule.high < 1))
            return mt_error_set(error, "--rollout-rs-threshold: %s expects %s, not '%.60s'", words[i],
                                is_ratio ? "LOW_HIGH, bounds of a ratio above 0, or HIGH from 1 for 1/HIGH_HIGH"
                                         : "one number above 0",
                                bound);
        if (is_ratio && rule.low == 0) rule.low = 1 / rule.high;
        rule.low = is_ratio ? log(rule.low) : -INFINITY;
        if (is_ratio) rule.high = log(rule.high);
        c->rules[c->num_rules++] = rule;
    }
    return 0;
}

int mt_options_correction(mt_correction *c, const mt_run_options *o, mt_error *error) {
    *c = (mt_correction){.is = o->rollout_is, .normalize = o->rollout_is_batch_normalize};
    char *threshold = mt_strdup(o->rollout_is_threshold), *names = mt_strdup(o->rollout_rs ? o->rollout_rs : "");
    char *thresholds = mt_strdup(o->rollout_rs_threshold ? o->rollout_rs_threshold : "");
    int status = 0;
    if (!mt_threshold_read(threshold, &c->is_low, &c->is_high))
        status = mt_error_set(error, "--rollout-is-threshold expects HIGH or LOW_HIGH, numbers above 0, not '%.60s'",
                              o->rollout_is_threshold);
    if (status == 0 && o->rollout_rs) status = mt_rejections_read(c, names, thresholds, error);
    free(threshold), free(names), free(thresholds);
    return status;
}
