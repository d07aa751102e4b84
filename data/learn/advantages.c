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

/* The advantage of all tokens of sequence s, from the scores of its group. */
static double mt_group_advantage(const mt_advantage_tokens *t, const mt_advantage_config *c, const double *scores,
                                 int64_t s) {
    double number = 0, sum = 0, squares = 0;
    for (int64_t other = 0; other < t->num_sequences; other++)
        if (t->groups[other] == t->groups[s]) number += 1, sum += scores[other];
    if (number == 1) return c->estimator == MT_ADV_GRPO && c->norm_by_std ? scores[s] / (1 + 1e-6) : scores[s];
    double mean = sum / number, distance = scores[s] - mean;
    if (c->estimator == MT_ADV_RLOO) return distance * number / (number - 1);
    for (int64_t other = 0; other < t->num_sequences; other++)
        if (t->groups[other] == t->groups[s]) squares += (scores[other] - mean) * (scores[other] - mean);
    return c->norm_by_std ? distance / (sqrt(squares / (number - 1)) + 1e-6) : distance;
}

/* Backwards over the counted tokens of a sequence; tokens between them are passed over. */
static void mt_sequence_advantages(const mt_advantage_tokens *t, const mt_advantage_config *c, const double *scores,
                                   int64_t s) {
    bool gae = c->estimator == MT_ADV_GAE, by_group = c->estimator == MT_ADV_GRPO || c->estimator == MT_ADV_RLOO;
    double next_value = 0, running = 0, of_group = by_group ? mt_group_advantage(t, c, scores, s) : 0;
    const mt_span *span = &t->sequences[s];
    for (int64_t i = span->q_start + span->q_len - 1; i >= span->q_start; i--) {
        if (t->mask[i] == 0) continue;
        if (gae) {
            running = t->rewards[i] + c->gamma * next_value - t->values[i] + c->gamma * c->lambda * running;
            next_value = t->values[i];
        } else
            running = by_group ? of_group : t->rewards[i] + c->gamma * running;
        t->advantages[i] = running, t->returns[i] = gae ? running + t->values[i] : running;
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
    if (c->whiten || c->estimator == MT_ADV_REINFORCE_PLUS_PLUS) mt_whiten(t->advantages, counted, t->T);
    for (int64_t i = 0; i < t->T && clip > 0; i++) t->advantages[i] = mt_bounded(t->advantages[i], -clip, clip);
    free(scores);
    free(counted);
}
