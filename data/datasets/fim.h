/* fim.h: filling in the middle. A part of a text moves behind the text that follows it, between tokens that say so, and
 * a model learns to write it from both sides (Bavarian et al., "Efficient training of language models to fill in the
 * middle"; StarCoder). The transformation is that of Megatron-LM, megatron/training/datasets/fim_dataset.py. */
#ifndef MT_FIM_H
#define MT_FIM_H

#include "../tokens/tokenizer.h"
#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_fim mt_fim;

/* The random numbers of a sample, in the order of Megatron-LM's: for each part of a text a decision, two places, and a
 * decision on their order. */
typedef struct mt_fim_draws {
    bool (*decide)(void *context, double rate);       // true with this probability
    int64_t (*place)(void *context, int64_t largest); // uniform in [0, largest]
    void *context;
} mt_fim_draws;

/* By --fim-*. Errors: the tokenizer is NULL, or lacks a token that an option names. The tokenizer must outlive it. */
int mt_fim_open(mt_fim **fim, const mt_run_options *options, const mt_tokenizer *tokenizer, mt_error *error);
void mt_fim_close(mt_fim *fim);

/* Changes a sample of `count` tokens in place. The text between two ends of document, or, where some lie in it, between
 * two tokens of --fim-split-sample, is prefix, middle and suffix, cut at two of its characters; with probability
 * --fim-spm-rate the suffix comes first. The result is cut to `count` tokens, or filled up with --fim-pad-token. */
int mt_fim_permute(mt_fim *fim, int32_t *tokens, int64_t count, const mt_fim_draws *draws, mt_error *error);

/* The same with draws that depend on the data's seed and the sample's number in the run alone: the same samples on
 * every layout, and after a resume. (Megatron-LM draws from one stream for each process that loads data.) */
int mt_fim_apply(mt_fim *fim, int32_t *tokens, int64_t count, int64_t number, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
