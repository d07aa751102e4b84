/* correction.h: how rollouts are corrected whose log-probabilities by the generator differ from those of training. The
 * names are verl's (trainer/ppo/rollout_corr_helper.py). */
#ifndef MT_CORRECTION_H
#define MT_CORRECTION_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A rule that leaves tokens, or whole sequences, out of training. With x = log(training / generator) of a token, its
 * divergence is k1 = -x, k2 = x^2 / 2 or k3 = exp(x) - x - 1; that of a sequence is the sum, mean or maximum of its
 * counted tokens' divergences. A divergence from low to high is kept. */
typedef struct mt_rejection {
    enum { MT_REJECT_TOKEN, MT_REJECT_SUM, MT_REJECT_MEAN, MT_REJECT_MAX } of;
    mt_kl_type type;  // MT_KL_K1, MT_KL_K2 or MT_KL_K3
    double low, high; // k1: logarithms of the ratios that are given
} mt_rejection;

enum { MT_MAX_REJECTIONS = 11 };

typedef struct mt_correction {
    mt_rollout_is is;
    /* weights exp(x), of a token or of a sequence's sum: at most is_high; is_low above 0: 0 where they are outside of
     * both (IcePop) */
    double is_low, is_high;
    bool normalize; // weights are divided by their mean
    int num_rules;
    mt_rejection rules[MT_MAX_REJECTIONS];
} mt_correction;

/* Reads --rollout-is, --rollout-is-threshold, --rollout-is-batch-normalize, --rollout-rs and --rollout-rs-threshold.
 * Error: a rule or a threshold that is none, or other numbers of both. */
int mt_options_correction(mt_correction *c, const mt_run_options *o, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
