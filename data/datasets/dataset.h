/* dataset.h: from files of tokens to batches of tokens. Each file calls only those above it in this list:
 *
 *   indexed_dataset.c   Megatron's pair of files: PREFIX.bin holds tokens, PREFIX.idx the position of each sequence
 *   gpt_dataset.c       samples by index, in Megatron-LM's order, id for id; blends
 *   dataset.c           the training, validation and test split of a run; mock data and token files
 *   packing.c           rows of samples of any length (sft.h), and the micro-batches of a step with even work
 *   loader.c            the samples that a data-parallel rank reads next, and the batch that they make
 *
 * The only state is the number of samples consumed so far: a sample is a pure function of its index, so a resumed run
 * reads exactly the same samples as an uninterrupted run.
 */
#ifndef MT_DATASET_H
#define MT_DATASET_H

#include "../options/flops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- indexed datasets --------------------------------------------------------------------------------------------
 *
 * PREFIX.idx, little-endian: "MMIDIDX\0\0", u64 version 1, u8 token type, u64 sequences, u64 documents + 1, then
 *   i32 length of each sequence in tokens; i64 byte offset of each in the .bin;
 *   i64 document index: document d has the sequences [entry d, entry d + 1).
 * PREFIX.bin: the tokens only. (Megatron-LM, megatron/core/datasets/indexed_dataset.py)
 */

/* A validated .idx in memory. The three arrays point into it and may be unaligned. */
typedef struct mt_indexed_index {
    mt_dtype dtype; // of a token: u8, i8, i16, u16, i32 or i64
    int64_t num_sequences, num_documents;
    const uint8_t *lengths;   // i32 [num_sequences]
    const uint8_t *offsets;   // i64 [num_sequences]
    const uint8_t *documents; // i64 [num_documents + 1]
    int64_t gaps, overlaps;   // sequences that begin behind the end of the one before, or before it
    int64_t first_odd;        // the first of them; -1: none
    int64_t trailing;         // bytes of the .bin behind the last byte of any sequence
} mt_indexed_index;

/* Parses and validates the `size` bytes of an .idx whose .bin has `bin_size` bytes. After success every sequence lies
 * inside the .bin, at a multiple of the token's size, and the document index ascends from 0 to num_sequences. `path` is
 * for messages; `bytes` must outlive `index`. */
int mt_indexed_index_parse(mt_indexed_index *index, const void *bytes, int64_t size, int64_t bin_size, const char *path,
                           mt_error *error);

typedef struct mt_indexed_dataset mt_indexed_dataset;

/* Maps PREFIX.bin and PREFIX.idx read-only and validates the index. */
int mt_indexed_dataset_open(mt_indexed_dataset **dataset, const char *prefix, mt_error *error);
void mt_indexed_dataset_close(mt_indexed_dataset *dataset);

/* The parsed index, and the prefix that it was opened with. */
const mt_indexed_index *mt_indexed_dataset_index(const mt_indexed_dataset *dataset);
const char *mt_indexed_dataset_prefix(const mt_indexed_dataset *dataset);

/* The fingerprint of both files: of the whole index, and of pieces of the tokens. */
uint64_t mt_indexed_dataset_fingerprint(const mt_indexed_dataset *dataset);

/* Number of tokens of a sequence. */
int64_t mt_indexed_dataset_length(const mt_indexed_dataset *dataset, int64_t sequence);

/* An error if the .bin has become shorter: the end of its last page would read as zeros. Called once for each sample;
 * a read beyond that page ends the program with an error. */
int mt_indexed_dataset_check(const mt_indexed_dataset *dataset, mt_error *error);

/* Copies tokens [offset, offset + count) of a sequence; the range must lie within the sequence. A token outside
 * [0, vocab_size) is an error that names the file, the document and the token. */
int mt_indexed_dataset_get(const mt_indexed_dataset *dataset, int64_t sequence, int64_t offset, int64_t count,
                           int64_t vocab_size, int32_t *tokens, mt_error *error);

/* Writes a pair of files under temporary names until _publish renames them; a writer closed earlier removes them. The
 * index is held in memory: 4 bytes per sequence and 8 per document. */
typedef struct mt_indexed_writer mt_indexed_writer;

/* `dtype` is MT_U16 or MT_I32, see mt_indexed_dtype_for_vocab. */
int mt_indexed_writer_open(mt_indexed_writer **writer, const char *prefix, mt_dtype dtype, mt_error *error);

/* Appends one document of `num_sequences` (possibly 0) sequences that are contiguous in `tokens`. */
int mt_indexed_writer_add_document(mt_indexed_writer *writer, const int32_t *tokens, const int32_t *lengths,
                                   int64_t num_sequences, mt_error *error);

/* Writes the index and syncs both temporary files to the disk; a full disk is reported here at the latest. */
int mt_indexed_writer_seal(mt_indexed_writer *writer, mt_error *error);

/* Renames the sealed files into place. */
int mt_indexed_writer_publish(mt_indexed_writer *writer, mt_error *error);

/* Removes unpublished files and frees the writer. */
void mt_indexed_writer_close(mt_indexed_writer *writer);

/* MT_U16 if the vocabulary has under 65,500 tokens, else MT_I32 (the rule of Megatron's tool). */
mt_dtype mt_indexed_dtype_for_vocab(int64_t vocab_size);

/* ---- the random numbers of NumPy and PyTorch ---------------------------------------------------------------------
 * Megatron's two shuffles, bit for bit, so that the order of samples is the same. Both draw from MT19937 (Matsumoto and
 * Nishimura, "Mersenne Twister", 1998).
 */
typedef struct mt_mt19937 {
    uint32_t state[624];
    int position;
} mt_mt19937;

/* init_genrand and genrand_int32 of the authors' code, as in numpy.random.RandomState and torch.Generator. */
void mt_mt19937_seed(mt_mt19937 *random, uint32_t seed);
uint32_t mt_mt19937_next(mt_mt19937 *random);

/* numpy.random.RandomState.shuffle of a one-dimensional array. */
void mt_numpy_shuffle(mt_mt19937 *random, uint32_t *items, int64_t count);

/* torch.randperm(count, generator=torch.Generator().manual_seed(seed)) on the CPU. */
void mt_torch_randperm(uint32_t *permutation, int64_t count, uint64_t seed);

/* ---- datasets ---------------------------------------------------------------------------------------------------- */

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

    /* samples of any length, see sft.h */
    const mt_options *options;                               // how files are read
    const struct mt_tokenizer *tokenizer;                    // of the files' text
    const char *tokenizer_path;                              // its file or folder; NULL: none
    FILE *log;                                               // lines about the files; NULL: none
    bool sft, pairs, sequence_packing, variable_seq_lengths; // pairs: see mt_samples
    int64_t train_epochs;                                    // 0: no limit
    bool dynamic_context_parallel;                           // with the next fields as in mt_plan_shape
    int64_t context_size, min_context_size, rank_tokens, slot_group, slot_rest;
    bool meets;
    mt_token_work work; // for even micro-batches
} mt_data_config;

/* Samples of seq_length + 1 tokens by index: the first seq_length are inputs, the last seq_length labels. Every kind of
 * dataset begins with this struct. */
typedef struct mt_dataset mt_dataset;
struct mt_dataset {
    int64_t num_samples, seq_length;
    int (*get)(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error);
    void (*free)(mt_dataset *dataset);
    int64_t num_documents, num_tokens; // each counted once, however often samples repeat it; 0: generated
    struct mt_packing *packing;        // a dataset of rows (sft.h), without `get`; NULL: all others
};

/* Copies the tokens [seq_length + 1] of sample `index`, in [0, num_samples). A pure function of the index. */
int mt_dataset_get(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error);
void mt_dataset_free(mt_dataset *dataset);

/* The configuration that options describe. `eod_id` is the tokenizer's end of document; -1: none. */
mt_data_config mt_data_config_of(const mt_options *options, int64_t eod_id);

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

/* NULL if the split has size 0 or was omitted. */
const mt_dataset *mt_data_split(const mt_data *data, mt_split split);

/* Prints a warning for files whose sequences do not follow one another; a warning and its remedy for every split that
 * was omitted, and for every one that is shorter than a sequence
 * or blends a path that is. */
void mt_data_warn(const mt_data *data, const mt_data_config *config, FILE *file);

/* ---- the parts of mt_data_open, for callers that build datasets themselves ----------------------------------------
 * Megatron-LM, megatron/core/datasets/gpt_dataset.py, blended_dataset.py, blended_megatron_dataset_builder.py.
 */

/* Samples of the sequences [begin, end) of an indexed dataset, which must stay open. Has whole epochs: as many as
 * num_samples needs, or one if num_samples is negative. `config` gives seq_length, seed and vocab_size. */
int mt_gpt_dataset_create(mt_dataset **dataset, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                          int64_t num_samples, const mt_data_config *config, mt_error *error);

/* The same for a run that was extended: sizes[i] samples, ascending, were asked for at its start (i 0) and by its
 * extensions. The samples of the first come in the order of a run of sizes[0] samples, whole epochs of it; where these
 * do not reach sizes[i], whole epochs with a shuffle of their own follow, so no extension changes an earlier order. */
int mt_gpt_dataset_extend(mt_dataset **dataset, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                          const int64_t *sizes, int64_t count, const mt_data_config *config, mt_error *error);

/* Draws `size` samples from `sources` [num_sources] in proportion to `weights`. Takes ownership of the sources, even on
 * error. */
int mt_blended_dataset_create(mt_dataset **dataset, mt_dataset *const *sources, const double *weights,
                              int64_t num_sources, int64_t size, mt_error *error);

/* The source of sample `index` of a blend, and the index of the sample in that source. */
void mt_blended_dataset_locate(const mt_dataset *blend, int64_t index, int64_t *source, int64_t *source_index);

/* Returns the number of sources of a blend and sets `sources` to them; 0 for any other dataset. */
int64_t mt_blended_dataset_sources(const mt_dataset *dataset, mt_dataset *const **sources);

/* The prefix of the indexed dataset that a dataset of mt_gpt_dataset_create samples; NULL for any other. */
const char *mt_gpt_dataset_prefix(const mt_dataset *dataset);

/* Samples that a source of normalized weight `weight` contributes to a blend of `size`; and the size to create its
 * dataset with: Megatron adds 0.5% so that rounding never exhausts it. */
int64_t mt_blend_target(double weight, int64_t size);
int64_t mt_blend_surplus(int64_t target);

/* weights / numpy.sum(weights), bit for bit. */
void mt_weights_normalize(double *normalized, const double *weights, int64_t count);

/* Parses shares such as "969,30,1" to fractions: split i is [edges[i], edges[i + 1]), empty if they are equal. */
int mt_split_parse(double edges[MT_NUM_SPLITS + 1], const char *split, mt_error *error);

/* A list of paths, with or without weights. `paths` point into `words`. */
typedef struct mt_blend {
    int64_t count;
    const char **paths;
    double *weights; // NULL: without weights
} mt_blend;

/* `option` is the name of the option with the value `words`, for messages. */
int mt_blend_parse(mt_blend *blend, const mt_strings *words, const char *option, mt_error *error);
void mt_blend_free(mt_blend *blend);

/* ---- batches ----------------------------------------------------------------------------------------------------- */

typedef struct mt_loader mt_loader;

/* Reads one split for one data-parallel rank. `dataset` and `config` must outlive the loader. */
int mt_loader_open(mt_loader **loader, const mt_dataset *dataset, const mt_data_config *config,
                   int64_t micro_batch_size, int64_t dp_rank, int64_t dp_size, mt_error *error);
void mt_loader_close(mt_loader *loader);

/* The index of the sample in row `row` of this rank's micro-batch, after the job has consumed `consumed_samples` (for
 * `cyclic` a multiple of micro_batch_size * dp_size). After the last whole micro-batch `single` is an error and
 * `cyclic` starts the next epoch. */
int mt_loader_sample(mt_loader *loader, int64_t consumed_samples, int64_t row, int64_t *sample, mt_error *error);

/* Fills `batch` (room for micro_batch_size * seq_length tokens) with contiguous sequences: one span per sequence, or
 * per document with reset_attention_mask. The job's next micro-batch is at consumed_samples + micro_batch_size *
 * dp_size. */
int mt_loader_fill(mt_loader *loader, int64_t consumed_samples, mt_batch *batch, mt_error *error);

/* Prints a line on a dataset of rows (sft.h): how full the `samples` rows after `consumed_samples` are, and how even
 * the work of the ranks is, before and after samples are given to ranks by their work. Nothing for other datasets. */
void mt_loader_print(const mt_loader *loader, int64_t consumed_samples, int64_t samples, FILE *file);

/* --print-schedule with --dynamic-context-parallel: prints and draws the schedule of the micro-batches of the
 * first step (timeline.h). */
int mt_step_print(const mt_options *options, const mt_data_config *config, FILE *file, mt_error *error);

/* The micro-batches of one training step or evaluation. */
typedef struct mt_feed {
    mt_loader *loader;
    int64_t consumed, samples; // of the run: before the step, and of the step
    int64_t read;              // of these samples: fewer in the last step of an epoch that is the last
    int64_t micro_batches;     // of each rank
    int64_t rank, num_ranks;   // that read different samples
    double tokens, flops;      // of the step's samples, without padding; 0: all samples have seq_length tokens
    bool shared;               // other ranks read the same samples: those of one model replica
    int status;                // of reading on this rank, with its first error
    mt_error error;
    uint64_t print; // sum of the fingerprints of the micro-batches that this rank has read
} mt_feed;

/* A feed of `loader` of a number of samples, from a number of consumed samples on. */
mt_feed mt_feed_begin(mt_loader *loader, int64_t consumed_samples, int64_t samples, const mt_grid *grid);

/* The mt_batch_source of mt_train_step and mt_evaluate; `feed` is an mt_feed. If a read fails, the batch has sequences
 * of one token and the call succeeds, because other ranks wait for this rank's part of the step; mt_feed_check reports
 * it and the step's result must not be used. */
int mt_feed_batch(void *feed, int64_t index, mt_batch *batch, mt_error *error);

/* The same, but micro-batch `index` of another rank that reads different samples; of datasets of rows only. */
int mt_feed_batch_of(mt_feed *feed, int64_t index, int64_t rank, mt_batch *batch, mt_error *error);

/* After the step. Errors, the same on every rank: a rank could not read its data; a rank read other data than the first
 * rank of its model replica (the fingerprints at the start leave out parts of large files). Every rank calls it. */
int mt_feed_check(const mt_feed *feed, const mt_grid *grid, int64_t iteration, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
