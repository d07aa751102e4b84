/* mismatch.c: mismatch of generator and training; selected tokens. */
#include "mismatch.h"

#include <math.h>
#include <stdlib.h>

static const double mt_mean_epsilon = 1e-8; // verl's
static const double mt_safe_log = 20;       // verl's bound of logarithms before exp

/* The divergence of a token by the rule's type. */
static double mt_token_divergence(mt_kl_type type, double x) {
    double bounded = mt_bounded(x, -mt_safe_log, mt_safe_log);
    if (type == MT_KL_K1) return -bounded;
    return type == MT_KL_K2 ? bounded * bounded / 2 : exp(bounded) - bounded - 1;
}

/* The counted tokens of a sequence and the sum of their x. */
static int64_t mt_sequence_sum(const mt_mismatch_tokens *t, const mt_span *span, double *sum) {
    int64_t counted = 0;
    *sum = 0;
    for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++)
        if (t->mask[i] != 0) counted++, *sum += t->x[i];
    return counted;
}

mt_mismatch mt_mismatch_measure(const mt_mismatch_tokens *t) {
    mt_mismatch m = {0};
    double tokens = 0, sequences = 0;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        double sum, counted = (double)mt_sequence_sum(t, span, &sum);
        if (counted == 0) continue;
        tokens += counted, sequences += 1;
        m.perplexity_ratio += exp(-sum / counted);
        m.chi2_sequence += exp(2 * mt_bounded(sum, -mt_safe_log, mt_safe_log));
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) {
            if (t->mask[i] == 0) continue;
            m.kl -= t->x[i], m.k3 += exp(t->x[i]) - t->x[i] - 1;
            m.chi2 += exp(2 * mt_bounded(t->x[i], -mt_safe_log, mt_safe_log));
        }
    }
    if (tokens == 0) return m;
    m.kl /= tokens, m.k3 /= tokens, m.chi2 = m.chi2 / tokens - 1;
    m.chi2_sequence = m.chi2_sequence / sequences - 1, m.perplexity_ratio /= sequences;
    return m;
}

double mt_correction_weights(double *weights, const mt_mismatch_tokens *t, const mt_correction *c) {
    bool by_sequence = c->is == MT_ROLLOUT_IS_SEQUENCE;
    double total = 0, number = 0, cut = 0, tokens = 0;
    for (int64_t i = 0; i < t->T; i++) weights[i] = 0;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        double sum, counted = (double)mt_sequence_sum(t, span, &sum), of_sequence = 0;
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) {
            if (t->mask[i] == 0) continue;
            double raw = exp(mt_bounded(by_sequence ? sum : t->x[i], -mt_safe_log, mt_safe_log));
            bool outside = raw > c->is_high || raw < c->is_low;
            weights[i] = c->is_low > 0 ? (outside ? 0 : raw) : mt_minimum(raw, c->is_high);
            of_sequence += weights[i], cut += outside;
        }
        tokens += counted;
        total += by_sequence ? of_sequence / (counted + mt_mean_epsilon) : of_sequence;
        number += by_sequence ? counted > 0 : counted;
    }
    double mean = by_sequence ? total / mt_maximum(number, mt_mean_epsilon) : total / (number + mt_mean_epsilon);
    for (int64_t i = 0; i < t->T && c->normalize && !(mean <= mt_mean_epsilon); i++) weights[i] /= mean;
    return tokens > 0 ? cut / tokens : 0;
}

/* True if the rule leaves out what has this divergence; NaN stays. */
static bool mt_rejects(const mt_rejection *rule, double divergence) {
    return divergence < rule->low || divergence > rule->high;
}

static double mt_sequence_divergence(const mt_mismatch_tokens *t, const mt_span *span, const mt_rejection *rule) {
    double sum = 0, greatest = -INFINITY, counted = 0;
    for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) {
        if (t->mask[i] == 0) continue;
        double divergence = mt_token_divergence(rule->type, t->x[i]);
        counted += 1, sum += divergence, greatest = mt_maximum(greatest, divergence);
    }
    if (rule->of == MT_REJECT_MAX) return counted > 0 ? greatest : 0;
    return rule->of == MT_REJECT_SUM ? sum : sum / (counted + mt_mean_epsilon);
}

double mt_correction_keeps(float *keeps, const mt_mismatch_tokens *t, const mt_correction *c) {
    double tokens = 0, out = 0;
    for (int64_t i = 0; i < t->T; i++) keeps[i] = 0;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        bool whole = true;
        for (int k = 0; k < c->num_rules; k++)
            if (c->rules[k].of != MT_REJECT_TOKEN)
                whole &= !mt_rejects(&c->rules[k], mt_sequence_divergence(t, span, &c->rules[k]));
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) {
            bool kept = whole;
            if (t->mask[i] == 0) continue;
            for (int k = 0; k < c->num_rules && kept; k++)
                if (c->rules[k].of == MT_REJECT_TOKEN)
                    kept = !mt_rejects(&c->rules[k], mt_token_divergence(c->rules[k].type, t->x[i]));
            keeps[i] = kept, tokens += 1, out += !kept;
        }
    }
    return tokens > 0 ? out / tokens : 0;
}

/* ---- tokens that a policy loss treats apart */

/* A counted token: KL_COV's are taken by covariance, CLIP_COV's by a random key, each time from the front. */
typedef struct mt_candidate {
    double covariance;
    uint64_t key;
    int64_t token;
} mt_candidate;

static int mt_candidate_compare(const void *a, const void *b) {
    const mt_candidate *x = a, *y = b;
    if (x->covariance != y->covariance) return x->covariance > y->covariance ? -1 : 1;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

void mt_select_tokens(double *selected, const mt_loss_tokens *t, const int64_t *sequences, int64_t count,
                      const mt_policy_config *c, uint64_t seed) {
    bool draws = c->variant == MT_POLICY_CLIP_COV;
    double advantages = 0, logps = 0;
    int64_t tokens = 0, candidates = 0;
    mt_candidate *all = mt_malloc(mt_max(t->T, 1) * (int64_t)sizeof *all);
    for (int64_t k = 0; k < count; k++) {
        const mt_span *span = &t->sequences[sequences[k]];
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) {
            selected[i] = 0;
            if (t->mask[i] == 0) continue;
            advantages += t->advantages[i], logps += t->logp[i];
            all[tokens++] = (mt_candidate){.token = i};
        }
    }
    for (int64_t k = 0; k < tokens; k++) {
        mt_candidate of = all[k];
        of.covariance =
            (t->advantages[of.token] - advantages / (double)tokens) * (t->logp[of.token] - logps / (double)tokens);
        if (isnan(of.covariance) || (draws && !(of.covariance > c->cov_low && of.covariance < c->cov_high))) continue;
        if (draws) of.covariance = 0, of.key = mt_random_key(seed, 0, (uint64_t)of.token);
        all[candidates++] = of;
    }
    int64_t wanted = mt_max((int64_t)(c->cov_share * (double)tokens), 1);
    qsort(all, (size_t)candidates, sizeof *all, mt_candidate_compare);
    for (int64_t k = 0; k < mt_min(wanted, candidates); k++) selected[all[k].token] = 1;
    free(all);
}
