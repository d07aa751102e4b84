/* generate.h: whole sequences from many prompts, on all data-parallel ranks. */
#ifndef MT_GENERATE_H
#define MT_GENERATE_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The memory plan of a model that generates `count` sequences of at most max_tokens tokens at once, from prompts of
 * prompt_tokens tokens in all. More sequences wait for their turn. */
mt_model_plan mt_generator_plan(int64_t count, int64_t max_tokens, int64_t prompt_tokens);

/* Completes begun sequences. Every rank of the generator's model, whose grid is given, calls it with the same ones and
 * gets all results; data-parallel ranks share them, neighbours with equal prompts on one rank. An error on any rank is
 * every rank's. Gives up soon after is_stopped (NULL: never) is true on any rank, and returns MT_GENERATION_STOPPED on
 * all. */
enum { MT_GENERATION_STOPPED = 1 };
int mt_sequences_generate(const mt_grid *grid, mt_generator *generator, mt_sequence *sequences, int64_t count,
                          bool (*is_stopped)(void), mt_error *error);

/* Continues `count` >= 1 prompts until each ends at a stop token, which it includes, or at max_tokens.
 * tokens[count, max_tokens] holds prompt s in the first num_tokens[s] elements of row s; afterwards num_tokens[s]
 * counts the generated tokens too. `sampling` NULL: greedy; `stops` NULL: none. The model was created with
 * mt_generator_plan(sequences at once, max_tokens, ...). Errors: longer sequences than that plan has; a prompt that is
 * empty, fills its row or has a token outside the vocabulary; logits that are not finite. Every rank of the model calls
 * it and gets the same tokens. */
int mt_generate(mt_model *model, int32_t *tokens, int64_t *num_tokens, int64_t count, int64_t max_tokens,
                const mt_sampling *sampling, const mt_stops *stops, mt_error *error);

/* Samples for reinforcement learning, with the model's present weights. */
typedef struct mt_rollout {
    int64_t num_return_sequences; // samples of each prompt
    int64_t max_new_tokens;
    int64_t first_id;      // id of the first sample, whose draws it determines with sampling.seed; the others follow
    const int64_t *ids;    // of the samples, ascending; NULL: from first_id on
    const int64_t *limits; // new tokens of each prompt's samples; NULL: max_new_tokens
    const mt_sequence_images *const *images; // of each prompt, NULL: it has none; NULL: none has any
    mt_sampling sampling;
    mt_stops stops;
    bool (*is_stopped)(void); // true: give up; NULL: never
    bool keeps_routes;        // mt_sequence.routes of the samples; see mt_model_keep_routes
    double *drafts;           // [2] drafted and accepted tokens of all ranks are added to these; NULL: not wanted
} mt_rollout;

/* Generates samples[count, num_return_sequences] of prompts[count], whose lengths are num_tokens[count]: tokens,
 * log-probabilities and the reason of the end; free each with mt_sequence_end. A training program calls it between
 * steps, for a model whose plan has mt_plan_generation; a sample ends at the plan's max_position at the latest. Every
 * rank calls it with the same prompts and gets all samples. Errors: a plan without a cache; a prompt that is empty, too
 * long or has a token outside the vocabulary; logits that are not finite. Then, and if it returns
 * MT_GENERATION_STOPPED, there are no samples. */
int mt_rollout_generate(mt_model *model, const mt_rollout *rollout, const int32_t *const *prompts,
                        const int64_t *num_tokens, int64_t count, mt_sequence *samples, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
