/* rollouts.h: reinforcement learning's book-keeping in memory. In a step, a number of prompts get num_return_sequences
 * responses each (a group). Their scores become advantages, and their tokens micro-batches.
 *
 *   mt_prompts_order          the prompts of the step
 *   mt_rollouts_begin, _set   prompts and the responses that the generator wrote; _extend: more prompts
 *   mt_rollouts_score         scores of the responses; or the caller writes `scores`
 *   mt_rollouts_select        drops groups, lays out the sequences that remain
 *   mt_rollouts_plan, _load   micro-batches of sequences; _store takes a model's results for them: old and reference
 *                             log-probabilities, values
 *   mt_rollouts_advantages    rewards per token, advantages, returns
 *   mt_rollouts_mini_batch    the sequences of a mini-batch of a PPO epoch
 *
 * All ranks do this with the same responses and get the same results. */
#ifndef MT_ROLLOUTS_H
#define MT_ROLLOUTS_H

#include "../datasets/packing.h"
#include "../datasets/sft.h"
#include "advantages.h"
#include "rewards.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Responses that did not end before max_new_tokens. */
typedef enum mt_overlong {
    MT_OVERLONG_KEEP,
    MT_OVERLONG_MASK,   // the loss does not count their tokens; their scores count in their groups
    MT_OVERLONG_PENALTY // their scores are lowered
} mt_overlong;

/* The names of mt_overlong, in its order. */
#define MT_OVERLONG "keep|mask|penalty"

typedef struct mt_rollout_config {
    mt_overlong overlong;
    /* MT_OVERLONG_PENALTY: overlong responses lose `penalty`; with a buffer, others lose a part of it that grows from 0
     * at max_new_tokens - overlong_buffer tokens to all of it at max_new_tokens ("DAPO", arXiv 2503.14476) */
    double overlong_penalty;
    int64_t overlong_buffer, max_new_tokens;
    double reward_clip; // of scores, after the penalty, to +-; 0: none
    int64_t first;      // response of the first sequence, a multiple of the group's size
    /* as a reward model needs: the last token is an input too, a counted token 0 follows it; baselines are sequences */
    bool whole;
    int64_t image_token_id; // with `whole`: a response that ends with it ends with token 0, as it has no picture
    bool dynamic_sampling;  // groups of several responses whose rewards are all alike are dropped
    mt_kl_type kl_type;     // of the KL penalty in the reward
    double kl_in_reward;    // its coefficient; 0: none
    mt_reward_norm norm_mean, norm_std; // of rewards, after the penalty, before the clip
    mt_reals weights;                   // of several rewards
    bool weighs_rollouts;               // MT_ROLLOUT_WEIGHTS are computed
    mt_kl_type distill_type;            // of the old policy from the teacher, in the advantages
    double distill_coef;                // of this divergence; 0: none
    double distill_max_clamp;           // it is clipped to +- this; 0: not
    mt_advantage_config advantage;
} mt_rollout_config;

/* Numbers of a step. Means over all responses but baselines, unless noted. */
typedef struct mt_rollout_stats {
    double score, score_deviation; // before penalty and clip; n - 1
    double response_tokens;
    double overlong; // fraction
    double turns;    // of conversations with an environment
    int64_t groups_dropped;
    double kl;                      // in the reward, by kl_type: mean over counted tokens
    double advantage, value_target; // means over counted tokens
    double distillation;            // the divergence in the advantages, before it is clipped: mean over counted tokens
} mt_rollout_stats;

/* The turns of a conversation, whose response holds all that follows the prompt. */
typedef struct mt_turns {
    uint8_t *is_written; // [response_tokens]: by the model, so trained on; NULL: all are
    int64_t count;       // responses of the model; 0: no environment
    int64_t last;        // the token with which the last one begins; rewards read it alone
    double reward;       // of the environment, over all turns
} mt_turns;

typedef struct mt_rollouts {
    const mt_samples *prompts;
    int64_t num_prompts, group_size, count; // count = num_prompts * group_size responses; s belongs to s / group_size
    /* The last response of each group is a baseline: its reward becomes a baseline of the others, it counts in nothing
     * else and is not trained on. The caller sets it after mt_rollouts_begin. */
    bool has_baselines;
    int64_t *prompt_of;         // [count] number among `prompts`
    int32_t **responses;        // [count]; NULL before mt_rollouts_set
    int64_t *response_tokens;   // [count]
    bool *overlong;             // [count]
    double *scores;             // [count]
    double *parts[MT_MAX_INTS]; // [count] by each of several rewards; NULL: by one
    float **routes;             // [count] mt_sequence.routes; NULL: not kept
    mt_turns *turns;            // [count] of conversations with an environment; of others one turn

    /* of the sequences that mt_rollouts_select keeps: prompt and response. Sequence k has the positions spans[k] of T,
     * one for each token but its last; a position's numbers belong to the prediction of the next token. */
    mt_samples samples;   // is_trained: tokens of responses that count
    int64_t *response_of; // [samples.count] number among all responses
    int64_t *groups;      // [samples.count]
    double *rewards;      // [samples.count] scores after penalty and clip
    double *baselines;    // [samples.count] those of the groups' baselines; 0 without
    mt_span *spans;       // [samples.count]
    int64_t T;
    float *mask;                        // [T] 1 where the label counts
    double *token_rewards;              // [T]
    double *squares;                    // [T] of the old policy: sums of squared probabilities; 0 until stored
    double *inputs[MT_NUM_LOSS_INPUTS]; // [T] 0 until stored or computed; without a reference model, a copy
                                        // of MT_OLD_LOGP belongs into MT_REF_LOGP, since the loss reads it
    mt_rollout_stats stats;
} mt_rollouts;

/* order[count]: the prompts at positions first, first + 1, ... of the run, which reads all `num_prompts` of them once
 * in each epoch, in an order drawn from seed and epoch, or in their own. A pure function, so that a resumed run goes on
 * with the next ones. */
void mt_prompts_order(int64_t num_prompts, bool shuffles, int64_t seed, int64_t first, int64_t count, int64_t *order);

/* The prompts of an iteration of `batch` that belong to each of `count` shares "TAG,TAG=SHARE", rounded down, the last
 * the rest, in quotas[count]. Error: a share without a prompt, or one that is no number. */
int mt_prompt_quotas(int64_t *quotas, const mt_strings *shares, int64_t batch, mt_error *error);

/* mt_prompts_order where the prompts of an iteration belong to shares (mt_question.share). The prompts of a share
 * have epochs of their own. */
void mt_prompts_order_shares(const mt_samples *prompts, const int64_t *quotas, int64_t num_shares, bool shuffles,
                             int64_t seed, int64_t first, int64_t count, int64_t *order);

/* Begins a step: group_size responses to each of the prompts order[num_prompts]. `prompts`, with questions, must
 * outlive it. Free it before the next step. */
void mt_rollouts_begin(mt_rollouts *r, const mt_samples *prompts, const int64_t *order, int64_t num_prompts,
                       int64_t group_size);

/* Adds prompts order[num_prompts], whose responses follow those of the others. */
void mt_rollouts_extend(mt_rollouts *r, const int64_t *order, int64_t num_prompts);
void mt_rollouts_free(mt_rollouts *r);

/* Sets response s: a copy of tokens[count >= 1], with the token that ends it. `overlong`: it did not end. */
void mt_rollouts_set(mt_rollouts *r, int64_t s, const int32_t *tokens, int64_t count, bool overlong);

/* Sets the turns of response s, and takes over their array. */
void mt_rollouts_set_turns(mt_rollouts *r, int64_t s, mt_turns turns);

/* Writes `scores` of the responses from `first` on: the rewards of the environment. */
void mt_rollouts_score_turns(mt_rollouts *r, int64_t first);

/* Writes `scores` of the responses from `first` on. Texts are without special tokens and end before the first of the
 * stop strings. Returns the status of mt_rewards_compute. */
int mt_rollouts_score(mt_rollouts *r, int64_t first, mt_reward_function *reward, const mt_tokenizer *tokenizer,
                      const mt_strings *stops, mt_error *error);

/* The scores from `first` on are those by reward `part`. */
void mt_rollouts_keep_part(mt_rollouts *r, int64_t first, int64_t part);

/* The scores from `first` on are the weighted sums of all parts. */
void mt_rollouts_add_parts(mt_rollouts *r, int64_t first, const mt_reals *weights);

/* From scores: rewards, and the sequences that remain; possibly none, then the step has nothing to train on. May be
 * called again. */
void mt_rollouts_select(mt_rollouts *r, const mt_rollout_config *config);

/* The tokens of the sequences that count. */
int64_t mt_rollouts_count(const mt_rollouts *r);

/* Leaves counted tokens out of training whose keeps[T] is 0: their labels no longer count. */
void mt_rollouts_keep(mt_rollouts *r, const float *keeps);

/* From token rewards and stored results (old_logp and ref_logp with kl_in_reward, old_logp and teacher_logp with
 * distill_coef, old_values with GAE): writes token_rewards, MT_ADVANTAGES and MT_RETURNS. */
void mt_rollouts_advantages(mt_rollouts *r, const mt_rollout_config *config);

/* The sequences [samples.count] of mini-batch `index` of `mini_batches`, whose sizes differ by at most one; returns
 * their number. They come in their own order, or with `shuffles` in one drawn from seed, step and epoch. */
int64_t mt_rollouts_mini_batch(const mt_rollouts *r, bool shuffles, int64_t seed, int64_t step, int64_t epoch,
                               int64_t index, int64_t mini_batches, int64_t *sequences);

/* Plans the micro-batches of sequences[count >= 1]: packed into rows of at most shape->row_length positions (`packs`)
 * or one in each row, and dealt to shape->num_ranks ranks with rows that may be empty. mt_step_plan_fill with
 * r->samples fills a micro-batch, mt_rollouts_load its loss_inputs. No sequence may have more positions than a row.
 * Free the plan.
 */
void mt_rollouts_plan(mt_step_plan *plan, const mt_rollouts *r, const int64_t *sequences, int64_t count, bool packs,
                      const mt_plan_shape *shape);

/* The position of token t of a batch that was filled from a plan of mt_rollouts_plan; -1: padding, or one whose label
 * does not count. */
int64_t mt_rollouts_position(const mt_rollouts *r, const mt_batch *batch, int64_t t);

/* Writes all loss_inputs of a batch that was filled from a plan of mt_rollouts_plan. */
void mt_rollouts_load(const mt_rollouts *r, mt_batch *batch);

/* Stores numbers[batch->num_tokens] of such a batch, where its mask is 1, into r->inputs[input]. Ranks that computed
 * different micro-batches then add up their arrays [T]. */
void mt_rollouts_store(mt_rollouts *r, mt_loss_input input, const mt_batch *batch, const double *numbers);

/* The same into r->squares. */
void mt_rollouts_store_squares(mt_rollouts *r, const mt_batch *batch, const double *numbers);

#ifdef __cplusplus
}
#endif
#endif
