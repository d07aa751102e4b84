/* partial.h: responses that several iterations write (--partial-rollout-max-split). Generation goes by phases, in which
 * each response in progress grows by a number of tokens. It stops as soon as enough prompts have all their responses;
 * the others go on in the next iteration, with its weights. A token keeps the log-probabilities and the version of the
 * weights that wrote it. All ranks hold the same. */
#ifndef MT_PARTIAL_H
#define MT_PARTIAL_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_partial {
    int32_t *tokens;   // [count]
    float *logps;      // [count] of the generator
    int64_t *versions; // [count] of the weights: iterations before
    double *old_logps; // [num_scored] of training
    float *routes;     // mt_sequence.routes of num_routes positions of prompt and response; NULL: not kept
    int64_t count, num_scored, num_routes;
    bool ended, overlong; // overlong: it ended at --max-new-tokens
} mt_partial;

/* The responses to a prompt. */
typedef struct mt_partial_group {
    int64_t position;      // of the prompt in the run, from which the ids of the responses follow
    int64_t prompt;        // its number among the prompts
    int64_t batch;         // the iteration whose batch was wanted when it began
    mt_partial *responses; // [each]
} mt_partial_group;

/* Prompts in progress in the order of their positions. */
typedef struct mt_partials {
    mt_partial_group *groups; // [count]
    int64_t count, each;      // each: responses of a group
} mt_partials;

/* Frees all prompts; there are none then. */
void mt_partials_free(mt_partials *p);

/* Frees the responses to a prompt. */
void mt_partial_group_free(mt_partial_group *group, int64_t each);

/* Appends a prompt without tokens of responses. */
void mt_partials_begin(mt_partials *p, int64_t position, int64_t prompt, int64_t batch);

/* Appends tokens[count], which weights of `version` wrote. */
void mt_partial_append(mt_partial *r, const int32_t *tokens, const float *logps, int64_t count, int64_t version);

/* True if the batch of iteration `batch` can be made of `wanted` prompts: that many have ended, and each prompt that
 * began for the batch of iteration batch - most_age or before has ended. Such prompts are the first of the list. */
bool mt_partials_suffice(const mt_partials *p, int64_t wanted, int64_t batch, int64_t most_age);

/* Moves the first `wanted` prompts that have ended to taken[wanted]. */
void mt_partials_take(mt_partials *p, int64_t wanted, mt_partial_group *taken);

/* Responses that have not ended. */
int64_t mt_partials_unfinished(const mt_partials *p);

#ifdef __cplusplus
}
#endif
#endif
