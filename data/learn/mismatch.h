/* mismatch.h: the mismatch of rollouts, whose log-probabilities by the generator and by training differ, and what is
 * done about it; and tokens that a policy loss treats apart. Pure functions in float64. */
#ifndef MT_MISMATCH_H
#define MT_MISMATCH_H

#include "../options/correction.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rollouts with x[T] = log(training / generator) of each counted token. */
typedef struct mt_mismatch_tokens {
    int64_t T, num_sequences;
    const mt_span *sequences; // as in mt_loss_tokens
    const float *mask;        // [T]
    const double *x;          // [T]
} mt_mismatch_tokens;

/* Means over counted tokens, or over sequences that have some. */
typedef struct mt_mismatch {
    double kl, k3;           // KL(generator | training): of -x, and of exp(x) - x - 1
    double chi2;             // of exp(2 x), - 1
    double chi2_sequence;    // of exp(2 sum x), - 1
    double perplexity_ratio; // of exp(-mean x): training's perplexity by the generator's
} mt_mismatch;
mt_mismatch mt_mismatch_measure(const mt_mismatch_tokens *t);

/* weights[T] of the policy's loss, 0 where the mask is 0; returns the share of counted tokens whose weight was bounded
 * or became 0. c->is is not MT_ROLLOUT_IS_NONE. */
double mt_correction_weights(double *weights, const mt_mismatch_tokens *t, const mt_correction *c);

/* keeps[T] = 1 for counted tokens that all rules keep, else 0; returns the share of counted tokens that are left out.
 * NaN is kept, so that training names it. */
double mt_correction_keeps(float *keeps, const mt_mismatch_tokens *t, const mt_correction *c);

/* selected[T]: 1 for the tokens of `sequences` that MT_POLICY_KL_COV or MT_POLICY_CLIP_COV treat apart, 0 for their
 * others; the rest of the array stays. By the covariance (A - mean A) (logp - mean logp) over the counted tokens:
 * KL_COV takes the greatest, the first among equals, and CLIP_COV draws from those between cov_low and cov_high, by
 * `seed` and the tokens' places. t: logp and advantages. */
void mt_select_tokens(double *selected, const mt_loss_tokens *t, const int64_t *sequences, int64_t count,
                      const mt_policy_config *c, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
