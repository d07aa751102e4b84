/* score.h: log-probabilities of the tokens in a file. */
#ifndef MT_SCORE_H
#define MT_SCORE_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The memory plan for mt_score: a micro-batch, or the whole file if it holds fewer sequences. Errors: those of reading
 * the file. */
int mt_score_plan(mt_model_plan *plan, const mt_options *options, mt_error *error);

/* Scores the first options->max_sequences (0: all) sequences of options->score, int32 [N, seq_length + 1]. Writes fp32
 * files where these options are given: to `out` each label's log-probability [N, seq_length], to entropy_out the
 * entropy of its distribution in nats [N, seq_length], to logits_out the logits [N, seq_length, vocab_size]. Returns N,
 * or -1 with error: an unreadable file, a file that is not whole sequences, a token outside the vocabulary, an
 * unwritable output. No output is left half-written. Every rank calls it; rank 0 writes; all ranks return the same. The
 * model's plan is that of mt_score_plan. */
int64_t mt_score(mt_model *model, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
