/* dataset.h: from files of tokens to batches of tokens. Each file calls only those above it in this list:
 *
 *   indexed_dataset.c   Megatron's pair of files: PREFIX.bin holds tokens, PREFIX.idx the position of each sequence
 *   t5_dataset.c        samples of an encoder-decoder from documents, with masked spans, in Megatron-Core's order
 *   gpt_dataset.c       samples by index, in Megatron-LM's order, id for id; blends
 *   dataset.c           the training, validation and test split of a run; mock data and token files
 *   packing.c           rows of samples of any length (sft.c), and the micro-batches of a step with even work
 *   fim.c               filling in the middle: samples of documents in another order
 *   loader.c            the samples that a data-parallel rank reads next, and the batch that they make
 *
 * The only state is the number of samples consumed so far: a sample is a pure function of its index, so a resumed run
 * reads exactly the same samples as an uninterrupted run.
 */
#ifndef MT_DATASET_H
#define MT_DATASET_H

#include "../options/options.h"
#include "../options/flops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_split { MT_SPLIT_TRAIN, MT_SPLIT_VALID, MT_SPLIT_TEST, MT_NUM_SPLITS } mt_split;

/* The data options, named as in Megatron. Exactly one of data_path, split_data_path, mock_data and tokens_file is
 * set. */
typedef struct mt_data_config {
    /* --data-path: PREFIX; or several, blended by size; or WEIGHT PREFIX WEIGHT PREFIX ... Divided by `split`. */
    mt_strings data_path;
    const char *split; // --split; NULL: "969,30,1"
    /* --train-data-path, --valid-data-path, --test-data-path: like data_path, each for one whole split. */
    mt_strings split_data_path[MT_NUM_SPLITS];
    bool mock_data;          // --mock-data: generated tokens, see mt_data_open
    const char *tokens_file; // --tokens-file: int32 [iterations, global batch, seq_length + 1], in file order

    int64_t seq_length;
    int64_t seed;                        // --seed, of the shuffles
    int64_t sizes[MT_NUM_SPLITS];        // samples of each split that the whole run needs; 0: no split
    int64_t num_plans;                   // 0: the order is that of `sizes`
    int64_t plans[MT_MAX_DATA_PLANS][2]; // training and validation: the sizes of the run's start and extensions
    int64_t vocab_size;                  // tokens must be below it
    int64_t eod_id;                      // end of document; -1: none
    bool reset_position_ids;             // positions restart at 0 after each EOD
    bool reset_attention_mask;           // attention stays within a document
    bool eod_mask_loss;                  // no loss at positions whose input token is EOD
    mt_dataloader_type dataloader_type;  // single: in order; cyclic: a new shuffle every epoch
    bool reads_once;                     // training data that are too short for `sizes` are an error
    bool no_data_sharding;               // --no-data-sharding, for cyclic: ranks share one shuffle
    bool full_validation;                // the validation data are read for one epoch, whatever their size in `sizes`
    bool multiple_validation_sets;       // with it: each path of --valid-data-path is a set of its own

    /* samples of any length, see sft.h */
    const mt_run_options *options;                           // how files are read
    const struct mt_tokenizer *tokenizer;                    // of the files' text
    struct mt_fim *fim;                                      // fills in the middle (fim.h); NULL: none
    const struct mt_span_masking *spans;                     // of an encoder-decoder (t5_dataset.h); NULL: none
    const char *tokenizer_path;                              // its file or folder; NULL: none
    FILE *log;                                               // lines about the files; NULL: none
    bool sft, pairs, sequence_packing, variable_seq_lengths; // pairs: see mt_samples
    int64_t train_epochs;                                    // 0: no limit
    bool dynamic_context_parallel;                           // with the next fields as in mt_plan_shape
    int64_t context_size, min_context_size, rank_tokens, slot_group, slot_rest;
    bool meets;
    mt_token_work work; // for even micro-batches
} mt_data_config;

/* Samples of seq_length + 1 tokens by index: the first seq_length are inputs, the last seq_length labels. Those of an
 * encoder-decoder are as many numbers that mt_t5_sample_of reads. Every kind of dataset begins with this struct. */
typedef struct mt_dataset mt_dataset;
struct mt_dataset {
    int64_t num_samples, seq_length;
    int (*get)(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error);
    void (*free)(mt_dataset *dataset);
    int64_t num_documents, num_tokens; // each counted once, however often samples repeat it; 0: generated
    struct mt_packing *packing;        // a dataset of rows (packing.h), without `get`; NULL: all others
};

/* The configuration that options describe. `eod_id` is the tokenizer's end of document; -1: none. */
mt_data_config mt_data_config_of(const mt_run_options *options, int64_t eod_id);

/* All splits of a run. */
typedef struct mt_data mt_data;

/* Opens the data of `config` and builds the sample order of every split with a nonzero size. A split has at least that
 * size, and more if its last epoch is whole. As in Megatron, a list of paths without weights is read for one epoch: it
 * is an error if that is too short, unless dataloader_type is cyclic. The validation or test split is omitted if its
 * share of some path has no document. tokens_file has a training split only.
 *
 * Mock documents count upwards from a random token. After every token the document ends with probability 1/16: with
 * eod_id, or, if eod_id is -1, by a jump to a random token. A model learns this quickly: with eod_id the loss falls
 * from log(V) to (log(V) + 16 * 0.234) / 17, where 0.234 is the entropy of a coin with probability 1/16. */
int mt_data_open(mt_data **data, const mt_data_config *config, mt_error *error);
void mt_data_close(mt_data *data);

/* All ranks return an error if the files of one differ from those of rank 0: the whole .idx is compared, and pieces of
 * the .bin or of tokens_file (mt_contents_fingerprint). Every rank calls it, with the same options. In a file above 256
 * MiB a difference between these pieces is not found here: train compares what the ranks of a replica read, each step.
 */
int mt_data_agree(mt_data *data, const mt_group *world, mt_error *error);

/* The identity of the training data: the files that it is made of, its documents and their lengths, the weights of a
 * blend, pieces of the tokens, and --loss-on. Generated data have the fingerprint 0. */
typedef struct mt_data_identity {
    int64_t documents, tokens, fingerprint; // samples and positions, where these are of any length
} mt_data_identity;
mt_data_identity mt_data_identify(mt_data *data, const mt_data_config *config);

/* Compares the data with the data that a resumed run began with, and writes what it has now into `state`. Sets
 * config->plans such that the order of samples that the run began with stays, whatever its new length: *reorders, if
 * the data must be opened again for that. Prints a line on an extension to `file`, unless it is NULL. Errors: other
 * data; too many extensions. `group` is micro_batch_size * data-parallel ranks. */
int mt_data_resume(mt_data *data, mt_data_config *config, mt_run_state *state, int64_t group, bool *reorders,
                   FILE *file, mt_error *error);

/* NULL if the split has size 0 or was omitted. Of several validation sets, the first. */
const mt_dataset *mt_data_split(const mt_data *data, mt_split split);

/* The validation sets of multiple_validation_sets after the first; `index` counts from 1. NULL: there are no more. */
const mt_dataset *mt_data_validation_set(const mt_data *data, int64_t index);

/* The most patches of pictures that a micro-batch of `tokens` tokens has, for mt_model_plan.max_patches. */
int64_t mt_data_max_patches(const mt_data *data, int64_t tokens);

/* Prints a warning for files whose sequences do not follow one another; a warning and its remedy for every split that
 * was omitted, and for every one that is shorter than a sequence
 * or blends a path that is. */
void mt_data_warn(const mt_data *data, const mt_data_config *config, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
