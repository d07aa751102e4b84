/* score.h: scores of the tokens in a file: log-probabilities, entropies, values, rewards. */
#ifndef MT_SCORE_H
#define MT_SCORE_H

#include "../tokens/tokenizer.h"
#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The sequences of options->score, and the files that get their scores. */
typedef struct mt_scoring mt_scoring;

/* Opens the first options->max_sequences (0: all) sequences of options->score, and plans the memory of a model for
 * micro-batches of options->micro_batch_size of them. A file whose name ends with .jsonl holds samples as
 * mt_samples_read reads them, up to seq_length tokens each (0: as long as the context); `tokenizer` and its path may be
 * NULL if all lines have "tokens". Any other file is int32 [N, seq_length + 1]. Errors: a file that cannot be read or
 * has another size; a token outside the vocabulary, in JSON Lines. Every rank calls it. */
int mt_scoring_open(mt_scoring **scoring, const mt_run_options *options, const mt_tokenizer *tokenizer,
                    const char *tokenizer_path, mt_model_plan *plan, mt_error *error);

/* Scores them on any layout; micro-batches are dealt to data-parallel ranks, and results are in the order of the file.
 * For int32, writes fp32 files where these options are given: to `out` each label's log-probability [N, seq_length], or
 * with a value head each token's value; to entropy_out the entropy of each distribution in nats [N, seq_length]; to
 * logits_out the logits [N, seq_length, vocab_size], which need one data- and one context-parallel rank.
 * For JSON Lines, writes to `out` a line for each sample:
 *
 *   {"tokens": [...], "logprobs": [...], "entropies": [...], "logprob": sum over the tokens of responses, "count": ...}
 *   {"tokens": [...], "values": [...]} with a value of each token, or {"tokens": [...], "reward": ...}
 *
 * logprobs and entropies are of tokens 1, 2, ... Returns the number of sequences and in *tokens that of their tokens,
 * or -1 with error: an unreadable file, a token outside the vocabulary, an unwritable output. No output is left
 * half-written. Every rank calls it; rank 0 writes; all ranks return the same. */
int64_t mt_scoring_run(mt_scoring *scoring, mt_model *model, int64_t *tokens, mt_error *error);
void mt_scoring_close(mt_scoring *scoring);

#ifdef __cplusplus
}
#endif
#endif
