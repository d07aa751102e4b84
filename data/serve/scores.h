/* scores.h: the log-probabilities of a sequence's tokens and of their most probable rivals. */
#ifndef MT_SCORES_H
#define MT_SCORES_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_MAX_RIVALS = 20 };

/* Tokens first ... end - 1 of a sequence, each under the model's own distribution after the tokens before it. */
typedef struct mt_scores {
    int64_t first, end;
    int64_t num_rivals; // of each token; at most MT_MAX_RIVALS, and no more than the vocabulary has
    float *logps;       // [end - first] of the token
    int32_t *rivals;    // [end - first, num_rivals] the most probable tokens, in order
    float *rival_logps; // [end - first, num_rivals]
    int64_t vocab_size;
} mt_scores;

/* Memory for these tokens, and its end. */
void mt_scores_begin(mt_scores *scores, int64_t first, int64_t end, int64_t num_rivals, int64_t vocab_size);
void mt_scores_end(mt_scores *scores);

/* mt_sequence.view with mt_scores as its context: keeps those of the token that follows `position`. */
void mt_scores_view(void *scores, const mt_sequence *sequence, int64_t position, const float *logits);

#ifdef __cplusplus
}
#endif
#endif
