/* loader.c: the samples that a data-parallel rank reads next, and the batch that they make.
 *
 * Megatron-LM, megatron/training/datasets/data_samplers.py, and _get_ltor_masks_and_position_ids in gpt_dataset.py.
 */
#include "dataset.h"

#include "watchdog.h"

#include <stdlib.h>
#include <string.h>

struct mt_loader {
    const mt_dataset *dataset;
    const mt_data_config *config;
    int64_t micro_batch_size, dp_rank, dp_size;
    bool cyclic;
    int32_t *sample;       // [seq_length + 1] scratch
    int64_t epoch;         // of `permutation`; -1: none
    uint32_t *permutation; // [samples of an epoch that this rank draws from]
};

/* ---- samplers ---------------------------------------------------------------------------------------------------- */

static int check_loader(const mt_loader *loader, mt_error *error) {
    int64_t step = loader->micro_batch_size * loader->dp_size;
    if (loader->dataset->num_samples < step)
        return mt_error_set(error,
                            "the dataset has %lld samples, but one micro-batch on every data-parallel rank takes %lld; "
                            "give more data or a smaller --micro-batch-size",
                            (long long)loader->dataset->num_samples, (long long)step);
    return 0;
}

int mt_loader_open(mt_loader **out, const mt_dataset *dataset, const mt_data_config *config, int64_t micro_batch_size,
                   int64_t dp_rank, int64_t dp_size, mt_error *error) {
    MT_CHECK(micro_batch_size > 0 && dp_rank >= 0 && dp_rank < dp_size);
    mt_loader *loader = mt_calloc(sizeof *loader);
    *loader = (mt_loader){.dataset = dataset,
                          .config = config,
                          .micro_batch_size = micro_batch_size,
                          .dp_rank = dp_rank,
                          .dp_size = dp_size,
                          .cyclic = config->dataloader_type == MT_DATALOADER_CYCLIC,
                          .sample = mt_malloc((dataset->seq_length + 1) * 4),
                          .epoch = -1};
    *out = loader;
    if (check_loader(loader, error) == 0) return 0;
    mt_loader_close(loader);
    *out = NULL;
    return -1;
}

void mt_loader_close(mt_loader *loader) {
    if (!loader) return;
    free(loader->sample);
    free(loader->permutation);
    free(loader);
}

/* Every rank takes micro_batch_size consecutive samples of each group of micro_batch_size * dp_size. */
static int sample_in_order(const mt_loader *loader, int64_t consumed, int64_t row, int64_t *sample, mt_error *error) {
    int64_t step = loader->micro_batch_size * loader->dp_size, have = loader->dataset->num_samples;
    if (consumed + step > have)
        return mt_error_set(error,
                            "the dataset ends after %lld samples; %lld are used and %lld more are needed; train on "
                            "fewer samples or use "
                            "--dataloader-type cyclic",
                            (long long)have, (long long)consumed, (long long)step);
    *sample = consumed + loader->dp_rank * loader->micro_batch_size + row;
    return 0;
}

static void permute_epoch(mt_loader *loader, int64_t epoch, int64_t bucket_size) {
    if (loader->epoch == epoch) return;
    if (!loader->permutation) loader->permutation = mt_malloc(bucket_size * (int64_t)sizeof *loader->permutation);
    mt_torch_randperm(loader->permutation, bucket_size, (uint64_t)epoch);
    loader->epoch = epoch;
}

/* An epoch has the complete groups of micro_batch_size * dp_size samples and its own permutation. With data sharding
 * every rank permutes its own contiguous bucket; without it the ranks take turns in one permutation. */
static int64_t sample_shuffled(mt_loader *loader, int64_t consumed, int64_t row) {
    int64_t step = loader->micro_batch_size * loader->dp_size, have = loader->dataset->num_samples;
    int64_t per_epoch = have / step * step;
    int64_t epoch = consumed / per_epoch, done = consumed % per_epoch;
    if (!loader->config->no_data_sharding) {
        int64_t bucket = have / step * loader->micro_batch_size;
        permute_epoch(loader, epoch, bucket);
        return loader->dp_rank * bucket + loader->permutation[done / loader->dp_size + row];
    }
    permute_epoch(loader, epoch, have / loader->micro_batch_size * loader->micro_batch_size);
    return loader->permutation[done + row * loader->dp_size + loader->dp_rank];
}

int mt_loader_sample(mt_loader *loader, int64_t consumed_samples, int64_t row, int64_t *sample, mt_error *error) {
    int64_t step = loader->micro_batch_size * loader->dp_size;
    MT_CHECK(row >= 0 && row < loader->micro_batch_size && consumed_samples >= 0);
    if (!loader->cyclic) return sample_in_order(loader, consumed_samples, row, sample, error);
    if (consumed_samples % step != 0)
        return mt_error_set(error,
                            "--dataloader-type cyclic: the %lld samples consumed so far are not a multiple of %lld "
                            "(--micro-batch-size times data-parallel ranks); continue with the former sizes",
                            (long long)consumed_samples, (long long)step);
    *sample = sample_shuffled(loader, consumed_samples, row);
    return 0;
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

static void add_span(mt_batch *batch, int64_t start, int64_t end) {
    batch->spans[batch->num_spans++] =
        (mt_span){.q_start = start, .q_len = end - start, .k_start = start, .k_len = end - start, .causal = true};
}

/* Appends one sequence. An EOD token belongs to the document that it ends. */
static void append_sequence(mt_batch *batch, const int32_t *sample, int64_t sample_number, int64_t seq_length,
                            const mt_data_config *config) {
    int64_t first = batch->num_tokens, span_start = first, document_start = first;
    for (int64_t i = 0; i < seq_length; i++) {
        int64_t t = first + i;
        bool ends_document = sample[i] == config->eod_id;
        batch->tokens[t] = sample[i];
        batch->labels[t] = sample[i + 1];
        batch->loss_mask[t] = config->eod_mask_loss && ends_document ? 0.0f : 1.0f;
        batch->positions[t] = (int32_t)(t - document_start);
        batch->token_index[t] = sample_number * seq_length + i;
        if (!ends_document) continue;
        if (config->reset_position_ids) document_start = t + 1;
        if (!config->reset_attention_mask) continue;
        add_span(batch, span_start, t + 1);
        span_start = t + 1;
    }
    batch->num_tokens = first + seq_length;
    if (span_start < batch->num_tokens) add_span(batch, span_start, batch->num_tokens);
}

int mt_loader_fill(mt_loader *loader, int64_t consumed_samples, mt_batch *batch, mt_error *error) {
    int64_t seq_length = loader->dataset->seq_length;
    int64_t first_number = consumed_samples + loader->dp_rank * loader->micro_batch_size;
    batch->num_tokens = 0;
    batch->num_spans = 0;
    for (int64_t row = 0; row < loader->micro_batch_size; row++) {
        int64_t index;
        if (mt_loader_sample(loader, consumed_samples, row, &index, error) != 0) return -1;
        if (mt_dataset_get(loader->dataset, index, loader->sample, error) != 0) return -1;
        append_sequence(batch, loader->sample, first_number + row, seq_length, loader->config);
    }
    return 0;
}

/* Fills `batch` with masked tokens, which add nothing to the loss and the gradients. */
static void fill_masked(mt_loader *loader, mt_batch *batch) {
    int64_t seq_length = loader->dataset->seq_length;
    for (int64_t i = 0; i <= seq_length; i++) loader->sample[i] = loader->config->eod_id == 0; // no end of document
    batch->num_tokens = batch->num_spans = 0;
    for (int64_t row = 0; row < loader->micro_batch_size; row++)
        append_sequence(batch, loader->sample, row, seq_length, loader->config);
    memset(batch->loss_mask, 0, (size_t)batch->num_tokens * sizeof *batch->loss_mask);
}

/* ---- feeds ------------------------------------------------------------------------------------------------------- */

mt_feed mt_feed_begin(mt_loader *loader, int64_t consumed_samples, const mt_grid *grid) {
    return (mt_feed){.loader = loader,
                     .consumed = consumed_samples,
                     .stride = loader->micro_batch_size * loader->dp_size,
                     .shared = grid->world.size > grid->data.size};
}

int mt_feed_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    mt_feed *feed = context;
    int watched = mt_watch_file_begin("data", MT_FILE_READ);
    int status = feed->status;
    if (status == 0) status = mt_loader_fill(feed->loader, feed->consumed + index * feed->stride, batch, error);
    mt_watch_file_end(watched);
    if (status != 0 && feed->status == 0) feed->status = status, feed->error = *error;
    if (status != 0) fill_masked(feed->loader, batch);
    if (status != 0 || !feed->shared) return 0;
    uint64_t prints[] = {mt_contents_fingerprint(batch->tokens, batch->num_tokens * 4, true),
                         mt_contents_fingerprint(batch->labels, batch->num_tokens * 4, true), (uint64_t)index};
    feed->print += mt_contents_fingerprint(prints, sizeof prints, true); // ranks read in different orders
    return 0;
}

/* Names the rank that read other data than the first rank of its replica. */
static int refuse_difference(const mt_grid *grid, double print, int64_t iteration, mt_error *error) {
    const mt_group *world = &grid->world;
    int first = 0;
    double *prints = mt_calloc(2 * world->size * 8), *replicas = prints + world->size;
    prints[world->rank] = print, replicas[world->rank] = grid->data.rank;
    mt_all_reduce_sum(world, prints, 2 * world->size, MT_F64);
    while (replicas[first] != grid->data.rank) first++;
    bool differs = prints[first] != print;
    if (differs)
        mt_error_set(error, "iteration %lld: rank %d read other data than rank %d; give every rank the same files",
                     (long long)iteration, world->rank, first);
    free(prints);
    return mt_agree(world, differs, error);
}

int mt_feed_check(const mt_feed *feed, const mt_grid *grid, int64_t iteration, mt_error *error) {
    int64_t replicas = feed->shared ? grid->data.size : 0, differences = 0;
    double print = (uint32_t)(feed->print ^ feed->print >> 32);
    double *greatest = mt_malloc((1 + 2 * replicas) * 8); // a rank failed; print and -print of each replica
    for (int64_t i = 0; i < 2 * replicas; i++) greatest[1 + i] = -1e300;
    greatest[0] = feed->status != 0;
    if (replicas > 0) greatest[1 + 2 * grid->data.rank] = print, greatest[2 + 2 * grid->data.rank] = -print;
    mt_all_reduce_max(&grid->world, greatest, 1 + 2 * replicas, MT_F64);
    for (int64_t i = 0; i < replicas; i++) differences += greatest[1 + 2 * i] != -greatest[2 + 2 * i];
    bool failed = greatest[0] > 0;
    free(greatest);
    *error = feed->error;
    if (failed) return mt_agree(&grid->world, feed->status != 0, error);
    return differences > 0 ? refuse_difference(grid, print, iteration, error) : 0;
}
