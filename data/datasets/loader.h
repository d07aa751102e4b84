/* loader.h: the samples that a data-parallel rank reads next, and the batch that they make. */
#ifndef MT_LOADER_H
#define MT_LOADER_H

#include "dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- batches ----------------------------------------------------------------------------------------------------- */

typedef struct mt_loader mt_loader;

/* Reads one split for one data-parallel rank. `dataset` and `config` must outlive the loader. */
int mt_loader_open(mt_loader **loader, const mt_dataset *dataset, const mt_data_config *config,
                   int64_t micro_batch_size, int64_t dp_rank, int64_t dp_size, mt_error *error);
void mt_loader_close(mt_loader *loader);

/* The same for a loader that reads every sample once, in order: samples behind the last one are masked. */
int mt_loader_open_whole(mt_loader **loader, const mt_dataset *dataset, const mt_data_config *config,
                         int64_t micro_batch_size, int64_t dp_rank, int64_t dp_size, mt_error *error);

/* The samples of the loader's dataset. */
int64_t mt_loader_count(const mt_loader *loader);

/* The index of the sample in row `row` of this rank's micro-batch, after the job has consumed `consumed_samples` (for
 * `cyclic` a multiple of micro_batch_size * dp_size). After the last whole micro-batch `single` is an error and
 * `cyclic` starts the next epoch. */
int mt_loader_sample(mt_loader *loader, int64_t consumed_samples, int64_t row, int64_t *sample, mt_error *error);

/* Fills `batch` (room for micro_batch_size * seq_length tokens) with contiguous sequences: one span per sequence, or
 * per document with reset_attention_mask. The job's next micro-batch is at consumed_samples + micro_batch_size *
 * dp_size. */
int mt_loader_fill(mt_loader *loader, int64_t consumed_samples, mt_batch *batch, mt_error *error);

/* Prints a line on a dataset of rows (packing.h): how full the `samples` rows after `consumed_samples` are, and how
 * even the work of the ranks is, before and after samples are given to ranks by their work. Nothing for other datasets.
 */
void mt_loader_print(const mt_loader *loader, int64_t consumed_samples, int64_t samples, FILE *file);

/* --print-schedule with --dynamic-context-parallel: prints and draws the schedule of the micro-batches of the
 * first step (step_plan_print.h). */
int mt_step_print(const mt_run_options *options, const mt_data_config *config, FILE *file, mt_error *error);

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
