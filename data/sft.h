/* sft.h: samples for fine-tuning, sequences of any length in memory.
 *
 *   sft.c       JSON Lines of conversations, prompts with responses, or instructions -> tokens to train on
 *   packing.c   samples -> rows of at most --seq-length tokens; rows -> micro-batches with even work
 */
#ifndef MT_SFT_H
#define MT_SFT_H

#include "dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sequences one after another. Sample s has the tokens [offsets[s], offsets[s + 1]): inputs are all but its last token,
 * labels all but its first, so it takes offsets[s + 1] - offsets[s] - 1 >= 1 positions of a micro-batch. */
typedef struct mt_samples {
    int64_t count;
    int64_t *offsets;    // [count + 1]
    int32_t *tokens;     // [offsets[count]]
    uint8_t *is_trained; // [offsets[count]]: the loss counts the prediction of this token
} mt_samples;

/* Frees the arrays. */
void mt_samples_free(mt_samples *samples);

#ifdef __cplusplus
}
#endif
#endif
