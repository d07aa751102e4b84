/* packing.h: rows of samples of any length, and the micro-batches of a step with even work. */
#ifndef MT_PACKING_H
#define MT_PACKING_H

#include "dataset.h"
#include "sft.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Items of rows: samples, or pairs of them. Below, the "sample" of a row, a piece or a plan is an item. */
int64_t mt_samples_items(const mt_samples *samples);

/* ---- rows ------------------------------------------------------------------------------------------------------
 *
 * With packing, one sample of the run (--global-batch-size, consumed_train_samples) is one row: samples one after
 * another, at most --seq-length positions. Without packing a row is one sample. A row is a pure function of the
 * samples, the seed and its number, so every layout reads the same rows, and a resumed run goes on with the next one.
 */

/* The rows of an epoch: row r has the samples order[first[r]] ... order[first[r + 1] - 1]. */
typedef struct mt_rows {
    int64_t count;
    int64_t *first; // [count + 1]
    int64_t *order; // [samples]
} mt_rows;

/* Shuffles samples of `lengths` [count] by seed and epoch, then packs each `window` of them in turn by best-fit
 * decreasing into rows of at most `row_length` (Johnson, "Fast algorithms for bin packing"), and shuffles these rows.
 * window 1: one sample a row. No length exceeds row_length. Free the rows. */
void mt_rows_pack(mt_rows *rows, const int64_t *lengths, int64_t count, int64_t row_length, int64_t window,
                  int64_t seed, int64_t epoch);
void mt_rows_free(mt_rows *rows);

/* Positions of an item. */
int64_t mt_sample_length(const mt_samples *samples, int64_t item);

/* A length with a log-normal distribution around `median`, at most `longest` and at least 1: a pure function of key and
 * index. Megatron's mock data for fine-tuning has this distribution too. */
int64_t mt_lognormal_length(uint64_t key, int64_t index, int64_t median, double sigma, int64_t longest);

/* Samples for --mock-data: `count` log-normal lengths around seq_length / 32 with a sigma of MT_MOCK_SIGMA, at most
 * seq_length. Each sample counts upwards from a random token, a rejected one downwards; the first quarter is a prompt,
 * without loss. */
#define MT_MOCK_SIGMA 1.3
void mt_samples_mock(mt_samples *samples, int64_t count, const mt_data_config *config, mt_split split);

/* A dataset of rows of the samples [begin, end), which must stay open: its num_samples are rows, and it has no `get`.
 * With config->train_epochs, a training split ends after that many epochs. */
mt_dataset *mt_row_dataset_create(const mt_samples *samples, int64_t begin, int64_t end, mt_split split,
                                  const mt_data_config *config);

/* The rows of a dataset that mt_row_dataset_create made (mt_dataset.packing). Rows after its last have no sample. */
typedef struct mt_packing mt_packing;

/* The samples that a packing's rows are made of. */
const mt_samples *mt_packing_samples(const mt_packing *packing);

/* Points `order` to the samples of row `row` of the run; returns their number. Valid until the next call. */
int64_t mt_packing_row(mt_packing *packing, int64_t row, const int64_t **order);

/* Rows of the run, if its data end; else INT64_MAX. */
int64_t mt_packing_last(const mt_packing *packing);

/* Rows of the first `epochs` epochs. */
int64_t mt_packing_count(mt_packing *packing, int64_t epochs);

/* ---- the micro-batches of a step -------------------------------------------------------------------------------
 *
 * A step trains on the same rows on every layout. Which rank computes which of their samples, and in which
 * micro-batch, is chosen so that the predicted work of all ranks is even; the loss is a sum over tokens divided by the
 * step's number of tokens, so this choice does not change it.
 */

/* A sample in the run: sample number, positions, and token index (mt_batch) of its first position, which is row *
 * seq_length + offset in the row. */
typedef struct mt_piece {
    int64_t sample, length, token_index;
} mt_piece;

/* A micro-batch has the pieces [first, first + count). */
typedef struct mt_plan_batch {
    int64_t first, count;
    int64_t num_tokens;   // positions of its pieces, without padding
    int64_t context_size; // ranks that share it, with dynamic context parallelism; else 0
    double work;          // predicted, of each of these ranks
} mt_plan_batch;

/* The micro-batches of a step. Rank r computes batches[batch_of[slot * num_ranks + r]] in each slot in turn. Ranks are
 * data-parallel ranks. */
typedef struct mt_step_plan {
    int64_t num_slots, num_ranks, num_pieces, num_batches;
    mt_piece *pieces;
    mt_plan_batch *batches;
    int64_t *batch_of; // [num_slots, num_ranks]
} mt_step_plan;
void mt_step_plan_free(mt_step_plan *plan);

/* The sizes of a plan. */
typedef struct mt_plan_shape {
    int64_t num_ranks, micro_batch_size; // data-parallel ranks; rows of a micro-batch
    int64_t row_length;                  // --seq-length
    bool pads;                           // every row is padded to row_length
    bool regroups;                       // micro-batches hold any samples that fit in their rows, not whole rows
    bool in_order;                       // rows are dealt in order, without regard to their work
    mt_token_work work;

    /* dynamic context parallelism */
    int64_t context_size, min_context_size; // ranks of the largest and the smallest block; powers of two
    int64_t rank_tokens;                    // tokens of a micro-batch on each of its ranks, at most
    bool meets;                             // all ranks wait for one another in each slot, as with experts

    /* interleaved pipelines, where the number of slots is not given */
    int64_t slot_group, slot_rest; // slots are groups of slot_group, and at least slot_rest more or none
} mt_plan_shape;

/* The smallest number of slots, at least `least`, that the pipeline's schedule can run. */
int64_t mt_step_plan_slots(const mt_plan_shape *shape, int64_t least);

/* Plans the step of `num_rows` rows, a multiple of num_ranks * micro_batch_size; row r has the `pieces`
 * [first[r], first[r + 1]). Each rank gets the same number of rows; with `regroups`, samples that fit in as many. Free
 * the plan. */
void mt_step_plan_balance(mt_step_plan *plan, const mt_piece *pieces, const int64_t *first, int64_t num_rows,
                          const mt_plan_shape *shape);

/* Dynamic context parallelism. Plans a step whose ranks are all num_ranks = data-parallel x context-parallel ranks,
 * with context-parallel ranks as neighbours. In each slot the ranks are divided into aligned blocks of 2^k neighbours,
 * and the ranks of a block share a batch. A sample gets the smallest block that has memory for it and computes it in
 * about the time of the slot; blocks of one size have even work. `pieces` [count] fit in context_size * rank_tokens
 * each. A pure function of the lengths. Free the plan. */
void mt_step_plan_solve(mt_step_plan *plan, const mt_piece *pieces, int64_t count, const mt_plan_shape *shape);

/* Predicted work of each of `size` ranks that share samples of `tokens` tokens and `pairs` pairs (sums of lengths and
 * of their squares): each computes its share, and receives the keys and values of all other ranks. */
double mt_shared_work(const mt_token_work *work, double tokens, double pairs, int64_t size);

/* The time of a plan in predicted work: blocks begin when their ranks have finished the slots before; with `meets`,
 * when all ranks have. start[num_batches]: when each batch begins; NULL: not wanted. */
double mt_step_plan_time(const mt_step_plan *plan, bool meets, double *start);

/* Predicted work of the slowest rank divided by the mean of all ranks, minus 1. */
double mt_step_plan_imbalance(const mt_step_plan *plan);

/* Fills `batch` with a micro-batch of a plan: a causal span and positions from 0 for each sample, then the masked
 * tokens of mt_batch_pad up to `num_tokens` in all (0: none, except one token where there is no sample). With ref_logps
 * of the samples also MT_REF_LOGP: the sum on the last trained token of a sample, 0 on the others. Pictures are read
 * from their files. Errors: those of mt_image_read. */
int mt_step_plan_fill(const mt_step_plan *plan, int64_t slot, int64_t rank, const mt_samples *samples,
                      int64_t num_tokens, mt_batch *batch, mt_error *error);

/* Appends the pictures of a sample to a batch, as mt_step_plan_fill does. */
int mt_batch_append_images(mt_batch *batch, const mt_samples *samples, int64_t sample, mt_error *error);

/* The most patches that the pictures of a micro-batch of `tokens` tokens have: those of the sample with the most for
 * its tokens. 0: none has pictures. */
int64_t mt_samples_max_patches(const mt_samples *samples, int64_t tokens);

#ifdef __cplusplus
}
#endif
#endif
