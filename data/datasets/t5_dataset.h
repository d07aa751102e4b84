/* t5_dataset.h: samples of an encoder-decoder from documents: spans of tokens are masked in the input, and the target
 * has them. In Megatron-Core's order, token for token. */
#ifndef MT_T5_DATASET_H
#define MT_T5_DATASET_H

#include "dataset.h"
#include "indexed_dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How spans are masked. Sentinel i takes the place of span i in the input, and stands before it in the target. */
typedef struct mt_span_masking {
    double mask_prob;      // --mask-prob: the share of tokens in spans
    double short_seq_prob; // --short-seq-prob: the share of samples that are shorter, of any length
    int64_t input_length;  // --encoder-seq-length: the most tokens of an input
    int64_t num_sentinels;
    int32_t *sentinels;
    uint8_t *continues; // [vocab_size] tokens that continue a word, which spans do not cut; NULL: no token
} mt_span_masking;

/* The masking that the options describe, for a vocabulary of `vocab_size`. Sentinels are the tokenizer's <extra_id_0>,
 * <extra_id_1> ..., or else --vocab-extra-ids ids behind its vocabulary; without a tokenizer, the last of vocab_size.
 * Words go on with tokens that begin with ##, as in WordPiece. Error: there are no sentinels. Free it with
 * mt_span_masking_free. */
int mt_span_masking_open(mt_span_masking **masking, const mt_run_options *options, const struct mt_tokenizer *tokenizer,
                         mt_error *error);
void mt_span_masking_free(mt_span_masking *masking);

/* Samples of the documents [begin, end) of an indexed dataset, whose sequences are sentences: each sample is sentences
 * of one document, in whole epochs, as many as num_samples needs, or one if num_samples is negative (Raffel et al.,
 * "Exploring the limits of transfer learning with a unified text-to-text transformer"; Megatron-Core,
 * megatron/core/datasets/t5_dataset.py). Documents of several sentences with one of over 512 tokens are left out. The
 * decoder begins with token 0, as in generation. config->spans and config->eod_id are set. */
int mt_t5_dataset_create(mt_dataset **dataset, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                         int64_t num_samples, const mt_data_config *config, mt_error *error);

/* `num_samples` samples that count upwards from a random token, for --mock-data; the target is the input backwards. */
mt_dataset *mt_t5_mock_create(const mt_data_config *config, mt_split split);

/* Samples of one epoch of a dataset of mt_t5_dataset_create, and its prefix; 0 and NULL for any other dataset. */
int64_t mt_t5_dataset_epoch(const mt_dataset *dataset);
const char *mt_t5_dataset_prefix(const mt_dataset *dataset);

/* The numbers of a sample as mt_dataset_get gives it: inputs[num_inputs]; the decoder has num_targets positions with
 * the inputs targets[0 .. num_targets - 1] and the labels targets[1 .. num_targets]. */
typedef struct mt_t5_sample {
    int64_t num_inputs, num_targets;
    const int32_t *inputs, *targets;
} mt_t5_sample;
mt_t5_sample mt_t5_sample_of(const int32_t *numbers);

#ifdef __cplusplus
}
#endif
#endif
