/* advantages.h: rewards of tokens and advantages, of all rollouts of a step at once, in float64. */
#ifndef MT_ADVANTAGES_H
#define MT_ADVANTAGES_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_advantage_config {
    mt_adv_estimator estimator;
    double gamma, lambda;  // gamma: GAE and REINFORCE; lambda: GAE
    bool norm_by_std;      // GRPO, GRPO_PASSK
    bool whiten;           // over all counted tokens; verl: always with GAE. REINFORCE++ and its baseline: always
    double advantage_clip; // to +-, at the end; 0: none
    double step_weights;   // GIGPO: the sum of the weights of a response and of its step
    bool only_divergences; // `divergences` alone make the advantages
} mt_advantage_config;

typedef struct mt_advantage_tokens {
    int64_t T, num_sequences;
    const mt_span *sequences;     // as in mt_loss_tokens
    const float *mask;            // [T]
    const int64_t *groups;        // [num_sequences] sequences with the same number answer the same prompt
    const double *rewards;        // [T] a sequence's score is their sum over all of its tokens
    const double *values;         // [T] GAE: of the critic
    double *advantages, *returns; // [T] results; 0 where the mask is 0
    const double *baselines;      // [num_sequences] REMAX: of the prompt
    /* GDPO: the scores parts[num_parts][num_sequences] by several rewards, and their weights; `rewards` is not read */
    int64_t num_parts;
    const double *part_weights;
    const double *const *parts;
    const double *old_logp, *squares; // [T] OPTIMAL_TOKEN_BASELINE: of the old policy; squares: mt_cross_entropy_args
    const double *rollout_weights;    // [T] the same; NULL: 1
    /* [T] or NULL: subtracted from the advantages, before they are whitened and clipped, and not from the returns; an
     * estimator that whitens by itself has done so before (ROLL's use_opd) */
    const double *divergences;
} mt_advantage_tokens;

/* Advantages and returns of every counted token. A group of one has the score itself as its advantage (GRPO with
 * norm_by_std: nearly; GRPO_PASSK needs two). */
void mt_advantages(const mt_advantage_tokens *t, const mt_advantage_config *c);

/* Token-level rewards[T]: a sequence's score, clipped to +-reward_clip (0: not), at its last counted token; where
 * kl_coef is not 0, minus kl_coef times the KL estimate of t->old_logp against t->ref_logp at each counted token. A
 * sequence without counted tokens keeps its score at its last token. */
void mt_token_rewards(double *rewards, const mt_loss_tokens *t, const double *scores, double reward_clip,
                      mt_kl_type kl_type, double kl_coef);

/* Subtracts the mean of x[T] over counted tokens and divides by their standard deviation (n - 1); others become 0. */
void mt_whiten(double *x, const float *mask, int64_t T);

#ifdef __cplusplus
}
#endif
#endif
