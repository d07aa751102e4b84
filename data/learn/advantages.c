/* advantages.c: from the scores of rollouts to the advantages that a policy loss reads. */
#include "advantages.h"

#include <math.h>
#include <stdlib.h>

static const double mt_variance_epsilon = 1e-8; // verl's

void mt_whiten(double *x, const float *mask, int64_t T) {
    double count = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < T; i++)
        if (mask[i] != 0) count += 1, sum += x[i];
    double mean = sum / (count + mt_variance_epsilon);
    for (int64_t i = 0; i < T; i++)
        if (mask[i] != 0) squares += (x[i] - mean) * (x[i] - mean);
    double variance = count > 1 ? squares / (count + mt_variance_epsilon) * (count / (count - 1)) : 0;
    for (int64_t i = 0; i < T; i++) x[i] = mask[i] != 0 ? (x[i] - mean) / sqrt(variance + mt_variance_epsilon) : 0;
}

void mt_token_rewards(double *rewards, const mt_loss_tokens *t, const double *scores, double reward_clip,
                      mt_kl_type kl_type, double kl_coef) {
    for (int64_t i = 0; i < t->T; i++) rewards[i] = 0;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        int64_t end = span->q_start + span->q_len, last = end - 1, counted = last;
        double score = reward_clip > 0 ? mt_bounded(scores[s], -reward_clip, reward_clip) : scores[s], dkl;
        while (counted >= span->q_start && t->mask[counted] == 0) counted--;
        if (counted >= span->q_start) last = counted;
        for (int64_t i = span->q_start; i < end && kl_coef != 0; i++)
            if (t->mask[i] != 0) rewards[i] = -kl_coef * mt_kl_estimate(kl_type, t->old_logp[i], t->ref_logp[i], &dkl);
        if (last >= span->q_start) rewards[last] += score;
    }
}

/* The scores of a group, and of the counted tokens of its responses. */
typedef struct mt_group_sums {
    double number, sum, squares; // squares: of distances from the mean
    double best, second;         // scores; second: of the others
    double tokens, weighted;     // weighted: scores times tokens
    double responses, scored;    // of all groups; scored: with a score that is not 0
} mt_group_sums;

static mt_group_sums mt_group_sum(const mt_advantage_tokens *t, const double *scores, int64_t s) {
    mt_group_sums g = {.best = -INFINITY, .second = -INFINITY, .responses = (double)t->num_sequences};
    for (int64_t other = 0; other < t->num_sequences; other++) {
        const mt_span *span = &t->sequences[other];
        double score = scores[other], tokens = 0;
        g.scored += score != 0;
        if (t->groups[other] != t->groups[s]) continue;
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) tokens += t->mask[i] != 0;
        g.number += 1, g.sum += score, g.tokens += tokens, g.weighted += tokens * score;
        g.second = mt_maximum(g.second, mt_minimum(g.best, score)), g.best = mt_maximum(g.best, score);
    }
    for (int64_t other = 0; other < t->num_sequences; other++)
        if (t->groups[other] == t->groups[s])
            g.squares += (scores[other] - g.sum / g.number) * (scores[other] - g.sum / g.number);
    return g;
}

/* The advantage of all tokens of sequence s, from the scores of its group. */
static double mt_group_advantage(const mt_advantage_tokens *t, const mt_advantage_config *c, const double *scores,
                                 int64_t s) {
    mt_group_sums g = mt_group_sum(t, scores, s);
    bool alone = g.number == 1;
    double mean = alone ? 0 : g.sum / g.number, distance = scores[s] - mean;
    double deviation = alone ? 1 : sqrt(g.squares / (g.number - 1)), divisor = c->norm_by_std ? deviation + 1e-6 : 1;
    switch (c->estimator) {
    case MT_ADV_GRPO:
        return distance / divisor;
    case MT_ADV_RLOO:
        return alone ? distance : distance * g.number / (g.number - 1);
    case MT_ADV_OPO:
        return alone ? distance : scores[s] - g.weighted / g.tokens;
    case MT_ADV_GPG:
        return distance * g.responses / mt_maximum(g.scored, 1);
    case MT_ADV_GRPO_PASSK: // NaN stays
        return scores[s] < g.best ? 0 : (g.best - g.second) / divisor;
    case MT_ADV_GDPO: // of one of its rewards
        return distance / divisor;
    case MT_ADV_GIGPO:
        return c->step_weights * (distance / divisor);
    case MT_ADV_REINFORCE_PLUS_PLUS_BASELINE:
    case MT_ADV_REMAX:
    case MT_ADV_GAE:
    case MT_ADV_REINFORCE:
    case MT_ADV_STEP_REINFORCE:
    case MT_ADV_REINFORCE_PLUS_PLUS:
    case MT_ADV_OPTIMAL_TOKEN_BASELINE:
        break;
    }
    return distance;
}

static double mt_gdpo_advantage(const mt_advantage_tokens *t, const mt_advantage_config *c, int64_t s) {
    double sum = 0;
    for (int64_t i = 0; i < t->num_parts; i++) sum += t->part_weights[i] * mt_group_advantage(t, c, t->parts[i], s);
    return sum;
}

/* Backwards over the counted tokens of a sequence; tokens between them are passed over. */
static void mt_sequence_advantages(const mt_advantage_tokens *t, const mt_advantage_config *c, const double *scores,
                                   int64_t s) {
    bool gae = c->estimator == MT_ADV_GAE, remax = c->estimator == MT_ADV_REMAX;
    bool by_token = gae || remax || c->estimator == MT_ADV_REINFORCE || c->estimator == MT_ADV_REINFORCE_PLUS_PLUS ||
                    c->estimator == MT_ADV_STEP_REINFORCE || c->estimator == MT_ADV_OPTIMAL_TOKEN_BASELINE;
    double baseline = remax ? t->baselines[s] : 0;
    double next_value = 0, running = 0, of_group = 0;
    if (!by_token)
        of_group = c->estimator == MT_ADV_GDPO ? mt_gdpo_advantage(t, c, s) : mt_group_advantage(t, c, scores, s);
    const mt_span *span = &t->sequences[s];
    for (int64_t i = span->q_start + span->q_len - 1; i >= span->q_start; i--) {
        if (t->mask[i] == 0) continue;
        if (gae) {
            running = t->rewards[i] + c->gamma * next_value - t->values[i] + c->gamma * c->lambda * running;
            next_value = t->values[i];
        } else
            running = by_token ? t->rewards[i] + c->gamma * running : of_group;
        t->advantages[i] = running - baseline, t->returns[i] = gae ? running + t->values[i] : running;
    }
}

/* Adds to each step of the group of sequence s, [steps], the returns times their weights, and the weights; with
 * sums[steps] and weights[steps]. Returns the counted tokens of the longest of the others. */
static int64_t mt_add_path_weights(const mt_advantage_tokens *t, int64_t s, double *sums, double *weights) {
    int64_t longest = 0;
    for (int64_t other = 0; other < t->num_sequences; other++) {
        const mt_span *span = &t->sequences[other];
        double path = 0;
        int64_t step = 0;
        if (t->groups[other] != t->groups[s]) continue;
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++) {
            if (t->mask[i] == 0) continue;
            double weight = t->rollout_weights ? t->rollout_weights[i] * t->rollout_weights[i] : 1;
            path += weight * (1 - 2 * exp(t->old_logp[i]) + t->squares[i]);
            sums[step] += t->returns[i] * path, weights[step++] += path;
        }
        if (other != s) longest = step > longest ? step : longest;
    }
    return longest;
}

/* Subtracts from the returns the baseline of each step, verl's optimal token baseline. A step that one response alone
 * has reached, or the only response of a group, has none. */
static void mt_subtract_token_baselines(const mt_advantage_tokens *t) {
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        int64_t alone = 0, step = 0, steps = 1;
        for (int64_t other = 0; other < t->num_sequences; other++) {
            if (t->sequences[other].q_len > steps) steps = t->sequences[other].q_len;
            alone += t->groups[other] == t->groups[s];
        }
        double *sums = mt_calloc(2 * steps * 8), *weights = sums + steps;
        int64_t others = mt_add_path_weights(t, s, sums, weights);
        for (int64_t i = span->q_start; i < span->q_start + span->q_len && alone > 1; i++) {
            if (t->mask[i] == 0) continue;
            if (step < others) t->advantages[i] = t->returns[i] - sums[step] / (weights[step] + mt_variance_epsilon);
            step++;
        }
        free(sums);
    }
}

void mt_advantages(const mt_advantage_tokens *t, const mt_advantage_config *c) {
    double *scores = mt_calloc(t->num_sequences * 8), clip = c->advantage_clip;
    float *counted = mt_calloc(t->T * 4); // the mask of tokens in sequences
    for (int64_t i = 0; i < t->T; i++) t->advantages[i] = t->returns[i] = 0;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++)
            scores[s] += t->rewards[i], counted[i] = t->mask[i];
    }
    for (int64_t s = 0; s < t->num_sequences; s++) mt_sequence_advantages(t, c, scores, s);
    if (c->estimator == MT_ADV_OPTIMAL_TOKEN_BASELINE) mt_subtract_token_baselines(t);
    bool whitens = c->estimator == MT_ADV_REINFORCE_PLUS_PLUS || c->estimator == MT_ADV_REINFORCE_PLUS_PLUS_BASELINE ||
                   c->estimator == MT_ADV_GDPO;
    if (whitens || (c->whiten && !t->divergences)) mt_whiten(t->advantages, counted, t->T);
    bool returns_too = c->estimator == MT_ADV_REINFORCE_PLUS_PLUS_BASELINE || c->estimator == MT_ADV_GDPO; // verl's
    for (int64_t i = 0; i < t->T && returns_too; i++) t->returns[i] = t->advantages[i];
    for (int64_t i = 0; i < t->T && t->divergences; i++)
        if (counted[i] != 0) t->advantages[i] = (c->only_divergences ? 0 : t->advantages[i]) - t->divergences[i];
    if (t->divergences && c->whiten) mt_whiten(t->advantages, counted, t->T);
    for (int64_t i = 0; i < t->T && clip > 0; i++) t->advantages[i] = mt_bounded(t->advantages[i], -clip, clip);
    free(scores);
    free(counted);
}
