/* loader.c: the samples that a data-parallel rank reads next, and the batch that they make.
 *
 * Megatron-LM, megatron/training/datasets/data_samplers.py, and _get_ltor_masks_and_position_ids in gpt_dataset.py.
 */
#include "loader.h"

#include "../base/file.h"
#include "../base/watchdog.h"
#include "../options/option_rules.h"
#include "fim.h"
#include "gpt_dataset.h"
#include "random_order.h"
#include "sft.h"
#include "step_plan_print.h"
#include "t5_dataset.h"

#include <stdlib.h>
#include <string.h>

struct mt_loader {
    const mt_dataset *dataset;
    const mt_data_config *config;
    int64_t micro_batch_size, dp_rank, dp_size;
    bool cyclic, whole;    // whole: masked samples follow the last one
    int32_t *sample;       // [seq_length + 1] scratch
    int64_t epoch;         // of `permutation`; -1: none
    uint32_t *permutation; // [samples of an epoch that this rank draws from]

    /* of a dataset of rows, and of sequences that dynamic context parallelism gives to ranks document by document */
    mt_step_plan plan;                    // of the step that begins after `planned_after` samples
    int64_t planned_after, planned_count; // samples; -1: none
    mt_step_plan next;                    // of the step after it, if next_after is not -1
    int64_t next_after, next_count;
    bool cuts;                      // sequences are cut into their documents, or are whole ones
    mt_samples documents, upcoming; // those of `plan` and of `next`
    int status, next_status;        // of reading them on this rank, with its error
    mt_error error, next_error;
};

/* ---- samplers ---------------------------------------------------------------------------------------------------- */

static int check_loader(const mt_loader *loader, mt_error *error) {
    int64_t step = loader->micro_batch_size * loader->dp_size;
    if (!loader->dataset->packing && loader->dataset->num_samples < (loader->whole ? 1 : step))
        return mt_error_set(error,
                            "the dataset has %lld samples, but one micro-batch on every data-parallel rank takes %lld; "
                            "give more data or a smaller --micro-batch-size",
                            (long long)loader->dataset->num_samples, (long long)step);
    return 0;
}

static int open_loader(mt_loader **out, const mt_dataset *dataset, const mt_data_config *config, bool whole,
                       int64_t micro_batch_size, int64_t dp_rank, int64_t dp_size, mt_error *error) {
    MT_CHECK(micro_batch_size > 0 && dp_rank >= 0 && dp_rank < dp_size);
    mt_loader *loader = mt_calloc(sizeof *loader);
    *loader = (mt_loader){.dataset = dataset,
                          .config = config,
                          .micro_batch_size = micro_batch_size,
                          .dp_rank = dp_rank,
                          .dp_size = dp_size,
                          .cyclic = config->dataloader_type == MT_DATALOADER_CYCLIC && !whole,
                          .whole = whole,
                          .sample = mt_malloc((dataset->seq_length + 1) * 4),
                          .epoch = -1,
                          .cuts = config->dynamic_context_parallel && !dataset->packing,
                          .planned_after = -1,
                          .next_after = -1};
    *out = loader;
    if (check_loader(loader, error) == 0) return 0;
    mt_loader_close(loader);
    *out = NULL;
    return -1;
}

int mt_loader_open(mt_loader **loader, const mt_dataset *dataset, const mt_data_config *config,
                   int64_t micro_batch_size, int64_t dp_rank, int64_t dp_size, mt_error *error) {
    return open_loader(loader, dataset, config, false, micro_batch_size, dp_rank, dp_size, error);
}

int mt_loader_open_whole(mt_loader **loader, const mt_dataset *dataset, const mt_data_config *config,
                         int64_t micro_batch_size, int64_t dp_rank, int64_t dp_size, mt_error *error) {
    return open_loader(loader, dataset, config, true, micro_batch_size, dp_rank, dp_size, error);
}

int64_t mt_loader_count(const mt_loader *loader) {
    return loader->dataset->num_samples;
}

void mt_loader_close(mt_loader *loader) {
    if (!loader) return;
    free(loader->sample);
    free(loader->permutation);
    mt_step_plan_free(&loader->plan);
    mt_step_plan_free(&loader->next);
    mt_samples_free(&loader->documents);
    mt_samples_free(&loader->upcoming);
    free(loader);
}

/* The shape of a plan with dynamic context parallelism. */
static mt_plan_shape plan_shape_of(const mt_loader *loader) {
    const mt_data_config *config = loader->config;
    return (mt_plan_shape){.num_ranks = loader->dp_size * config->context_size,
                           .micro_batch_size = loader->micro_batch_size,
                           .row_length = config->seq_length,
                           .regroups = config->variable_seq_lengths,
                           .work = config->work,
                           .context_size = config->context_size,
                           .min_context_size = config->min_context_size,
                           .rank_tokens = config->rank_tokens,
                           .meets = config->meets,
                           .slot_group = config->slot_group,
                           .slot_rest = config->slot_rest};
}

static int data_ends(const mt_loader *loader, int64_t consumed, int64_t needed, mt_error *error) {
    return mt_error_set(error,
                        "the dataset ends after %lld samples; %lld are used and %lld more are needed; train on "
                        "fewer samples or use --dataloader-type cyclic",
                        (long long)loader->dataset->num_samples, (long long)consumed, (long long)needed);
}

/* Every rank takes micro_batch_size consecutive samples of each group of micro_batch_size * dp_size. */
static int sample_in_order(const mt_loader *loader, int64_t consumed, int64_t row, int64_t *sample, mt_error *error) {
    int64_t step = loader->micro_batch_size * loader->dp_size, have = loader->dataset->num_samples;
    if (consumed + step > have && !loader->whole) return data_ends(loader, consumed, step, error);
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

/* Appends a sample of an encoder-decoder; `masked`: no label counts. */
static void append_mapping(mt_batch *batch, mt_t5_sample sample, int64_t sample_number, bool masked,
                           const mt_data_config *config) {
    mt_encoder_batch *e = &batch->encoder;
    int64_t first = batch->num_tokens, begin = e->num_tokens;
    for (int64_t i = 0; i < sample.num_targets; i++) {
        int64_t t = first + i;
        batch->tokens[t] = sample.targets[i], batch->labels[t] = sample.targets[i + 1];
        batch->loss_mask[t] = masked ? 0 : 1, batch->positions[t] = (int32_t)i;
        batch->token_index[t] = sample_number * config->seq_length + i;
    }
    add_span(batch, first, batch->num_tokens = first + sample.num_targets);
    for (int64_t i = 0; i < sample.num_inputs; i++) {
        e->tokens[begin + i] = sample.inputs[i];
        e->token_index[begin + i] = sample_number * config->spans->input_length + i;
    }
    e->spans[e->num_spans++] = (mt_span){begin, sample.num_inputs, begin, sample.num_inputs, .causal = false};
    e->num_tokens = begin + sample.num_inputs;
}

int mt_loader_fill(mt_loader *loader, int64_t consumed_samples, mt_batch *batch, mt_error *error) {
    int64_t seq_length = loader->dataset->seq_length;
    int64_t first_number = consumed_samples + loader->dp_rank * loader->micro_batch_size;
    batch->num_tokens = batch->num_spans = batch->encoder.num_tokens = batch->encoder.num_spans = 0;
    for (int64_t row = 0; row < loader->micro_batch_size; row++) {
        int64_t index = 0;
        if (mt_loader_sample(loader, consumed_samples, row, &index, error) != 0) return -1;
        bool is_behind = loader->whole && index >= loader->dataset->num_samples;
        if (mt_dataset_get(loader->dataset, is_behind ? 0 : index, loader->sample, error) != 0) return -1;
        if (loader->config->spans) {
            append_mapping(batch, mt_t5_sample_of(loader->sample), first_number + row, is_behind, loader->config);
            continue;
        }
        struct mt_fim *fim = loader->config->fim;
        if (fim && mt_fim_apply(fim, loader->sample, seq_length + 1, first_number + row, error) != 0) return -1;
        append_sequence(batch, loader->sample, first_number + row, seq_length, loader->config);
        for (int64_t i = batch->num_tokens - seq_length; i < batch->num_tokens && is_behind; i++)
            batch->loss_mask[i] = 0;
    }
    return 0;
}

/* Fills `batch` with sequences of one token, in place of data that cannot be read: the run ends after the step. They
 * are not masked, as a step of masked tokens would be reported too. */
static void fill_with_one_token(mt_loader *loader, mt_batch *batch) {
    static const int32_t tokens[2] = {0};
    const mt_t5_sample mapping = {.num_inputs = 1, .num_targets = 1, .inputs = tokens, .targets = tokens};
    int64_t seq_length = loader->dataset->seq_length;
    for (int64_t i = 0; i <= seq_length; i++) loader->sample[i] = loader->config->eod_id == 0; // no end of document
    batch->num_tokens = batch->num_spans = batch->encoder.num_tokens = batch->encoder.num_spans = 0;
    batch->images.num_images = 0;
    for (int64_t row = 0; row < loader->micro_batch_size && loader->config->spans; row++)
        append_mapping(batch, mapping, row, false, loader->config);
    if (loader->config->spans) return;
    for (int64_t row = 0; row < loader->micro_batch_size; row++)
        append_sequence(batch, loader->sample, row, seq_length, loader->config);
    memset(batch->positions, 0, (size_t)batch->num_tokens * 4); // a row of pairs is longer than the model has positions
}

/* ---- documents, for dynamic context parallelism without rows ----------------------------------------------------- */

/* The tokens of a document of a sequence, the label of its last token included. `first` and `last` are positions. */
static void add_document(mt_samples *documents, const mt_loader *loader, int64_t first, int64_t last) {
    const int32_t *sample = loader->sample;
    int64_t at = documents->offsets[documents->count];
    for (int64_t i = first; i <= last + 1; i++, at++) {
        documents->tokens[at] = sample[i];
        bool follows_end = i > first && sample[i - 1] == loader->config->eod_id;
        documents->is_trained[at] = i > first && !(loader->config->eod_mask_loss && follows_end);
    }
    documents->offsets[++documents->count] = at;
}

/* Reads the sequences of `count` samples after `consumed` ones into documents; with --reset-attention-mask, which has
 * --reset-position-ids here, each document is one, otherwise each sequence. first[count + 1]: the documents of each.
 * Without `reads`, and after an error, the sequences are one token, repeated. */
static int cut_sequences(mt_samples *documents, int64_t *first, mt_loader *loader, int64_t consumed, int64_t count,
                         bool reads, mt_error *error) {
    int32_t filler = loader->config->eod_id == 0; // no end of document
    int64_t T = loader->dataset->seq_length, have = loader->dataset->num_samples;
    mt_samples_free(documents);
    documents->offsets = mt_calloc((count * T + 1) * 8);
    documents->tokens = mt_malloc(count * 2 * T * 4);
    documents->is_trained = mt_malloc(count * 2 * T);
    int status = !reads || consumed + count <= have ? 0 : data_ends(loader, consumed, count, error);
    first[0] = 0;
    for (int64_t row = 0; row < count; row++) {
        if (reads && status == 0) status = mt_dataset_get(loader->dataset, consumed + row, loader->sample, error);
        bool is_read = reads && status == 0, cuts = is_read && loader->config->reset_attention_mask;
        for (int64_t i = 0; i <= T && !is_read; i++) loader->sample[i] = filler;
        int64_t begin = 0;
        for (int64_t i = 0; i < T; i++) {
            if (i < T - 1 && !(cuts && loader->sample[i] == loader->config->eod_id)) continue;
            add_document(documents, loader, begin, i);
            begin = i + 1;
        }
        first[row + 1] = documents->count;
    }
    return status;
}

/* Plans the step of `count` sequences, read or not. */
static int plan_documents(mt_step_plan *plan, mt_samples *documents, mt_loader *loader, int64_t consumed, int64_t count,
                          bool reads, mt_error *error) {
    int64_t T = loader->dataset->seq_length, *first = mt_malloc((count + 1) * 8);
    int status = cut_sequences(documents, first, loader, consumed, count, reads, error);
    mt_piece *pieces = mt_malloc(documents->count * (int64_t)sizeof *pieces);
    for (int64_t row = 0; row < count; row++) {
        int64_t index = (consumed + row) * T;
        for (int64_t i = first[row]; i < first[row + 1]; i++) {
            pieces[i] = (mt_piece){.sample = i, .length = mt_sample_length(documents, i), .token_index = index};
            index += pieces[i].length;
        }
    }
    mt_plan_shape shape = plan_shape_of(loader);
    mt_step_plan_solve(plan, pieces, documents->count, &shape);
    free(pieces);
    free(first);
    return status;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Plans the step of `count` rows after `consumed` ones. */
static void plan_rows(mt_step_plan *plan, const mt_loader *loader, int64_t consumed, int64_t count, bool in_order) {
    const mt_data_config *config = loader->config;
    mt_packing *packing = loader->dataset->packing;
    const mt_samples *samples = mt_packing_samples(packing);
    mt_plan_shape shape = {.num_ranks = loader->dp_size,
                           .micro_batch_size = loader->micro_batch_size,
                           .row_length = config->seq_length,
                           .pads = !config->variable_seq_lengths && !config->dynamic_context_parallel,
                           .regroups = config->variable_seq_lengths,
                           .in_order = in_order,
                           .work = config->work};
    int64_t num_pieces = 0, room = 0;
    int64_t *first = mt_calloc((count + 1) * 8);
    mt_piece *pieces = NULL;
    for (int64_t row = 0; row < count; row++) {
        const int64_t *order;
        int64_t index = (consumed + row) * config->seq_length, here = mt_packing_row(packing, consumed + row, &order);
        if (num_pieces + here > room) {
            room = 2 * (num_pieces + here);
            pieces = mt_realloc(pieces, room * (int64_t)sizeof *pieces);
        }
        for (int64_t i = 0; i < here; i++) {
            int64_t length = mt_sample_length(samples, order[i]);
            pieces[num_pieces++] = (mt_piece){.sample = order[i], .length = length, .token_index = index};
            index += length;
        }
        first[row + 1] = num_pieces;
    }
    if (config->dynamic_context_parallel && !in_order) {
        shape = plan_shape_of(loader);
        mt_step_plan_solve(plan, pieces, num_pieces, &shape);
    } else {
        mt_step_plan_balance(plan, pieces, first, count, &shape);
    }
    free(first);
    free(pieces);
}

static int fill_rows(const mt_loader *loader, int64_t index, int64_t rank, mt_batch *batch, mt_error *error) {
    const mt_data_config *config = loader->config;
    bool varies = config->variable_seq_lengths || config->dynamic_context_parallel;
    const mt_samples *samples = loader->cuts ? &loader->documents : mt_packing_samples(loader->dataset->packing);
    int64_t tokens = varies ? 0 : loader->micro_batch_size * config->seq_length;
    return mt_step_plan_fill(&loader->plan, index, rank, samples, tokens, batch, error);
}

void mt_loader_print(const mt_loader *loader, int64_t consumed, int64_t count, FILE *file) {
    mt_packing *packing = loader->dataset->packing;
    if (!packing) return;
    const int64_t *unused;
    double tokens = 0, room = (double)(count * loader->dataset->seq_length);
    mt_step_plan before, after;
    plan_rows(&before, loader, consumed, count, true);
    plan_rows(&after, loader, consumed, count, false);
    for (int64_t i = 0; i < after.num_pieces; i++) tokens += (double)after.pieces[i].length;
    int64_t rows = 0;
    for (int64_t row = 0; row < count; row++) rows += mt_packing_row(packing, consumed + row, &unused) > 0;
    fprintf(file, "first step: %lld samples in %lld rows of %lld tokens, %.1f%% full", (long long)after.num_pieces,
            (long long)rows, (long long)loader->dataset->seq_length, 100 * tokens / room);
    if (after.num_ranks > 1)
        fprintf(file, "; the slowest rank has %.1f%% more work than the mean, in order of the rows %.1f%%",
                100 * mt_step_plan_imbalance(&after), 100 * mt_step_plan_imbalance(&before));
    fprintf(file, "\n");
    mt_step_plan_free(&before);
    mt_step_plan_free(&after);
}

int mt_step_print(const mt_run_options *o, const mt_data_config *config, FILE *file, mt_error *error) {
    mt_data *data;
    mt_loader *loader = NULL;
    mt_step_plan plan = {0};
    if (mt_data_open(&data, config, error) != 0) return -1;
    const mt_dataset *dataset = mt_data_split(data, MT_SPLIT_TRAIN);
    int status =
        mt_loader_open(&loader, dataset, config, o->stack.micro_batch_size, 0, o->stack.data_parallel_size, error);
    if (status == 0 && loader->cuts)
        status = plan_documents(&plan, &loader->documents, loader, 0, mt_global_batch_size(o, 0), true, error);
    else if (status == 0)
        plan_rows(&plan, loader, 0, mt_global_batch_size(o, 0), false);
    if (status == 0) status = mt_step_plan_print(&plan, config->meets, o->print_schedule, file, error);
    mt_step_plan_free(&plan);
    mt_loader_close(loader);
    mt_data_close(data);
    return status;
}

/* ---- feeds ------------------------------------------------------------------------------------------------------- */

/* Sets loader->plan to that of a step. */
static void plan_step(mt_loader *loader, int64_t consumed, int64_t count) {
    if (loader->planned_after == consumed && loader->planned_count == count) return;
    mt_step_plan_free(&loader->plan);
    if (loader->next_after == consumed && loader->next_count == count) {
        mt_samples_free(&loader->documents);
        loader->plan = loader->next;
        loader->documents = loader->upcoming;
        loader->status = loader->next_status, loader->error = loader->next_error;
        loader->next = (mt_step_plan){0}, loader->upcoming = (mt_samples){0}, loader->next_after = -1;
    } else if (loader->cuts) {
        loader->status =
            plan_documents(&loader->plan, &loader->documents, loader, consumed, count, true, &loader->error);
    } else {
        plan_rows(&loader->plan, loader, consumed, count, false);
    }
    loader->planned_after = consumed, loader->planned_count = count;
}

/* Plans the step after a feed's, supposing that it has as many samples. Called with the last micro-batch: a device is
 * at work on the ones before it meanwhile. */
static void plan_next_step(mt_loader *loader, const mt_feed *feed) {
    int64_t after = feed->consumed + feed->samples;
    const int64_t *unused;
    if (loader->next_after == after && loader->next_count == feed->samples) return;
    bool ends = loader->cuts ? after + feed->samples > loader->dataset->num_samples
                             : mt_packing_row(loader->dataset->packing, after, &unused) == 0;
    if (ends) return;
    mt_step_plan_free(&loader->next);
    if (loader->cuts)
        loader->next_status =
            plan_documents(&loader->next, &loader->upcoming, loader, after, feed->samples, true, &loader->next_error);
    else
        plan_rows(&loader->next, loader, after, feed->samples, false);
    loader->next_after = after, loader->next_count = feed->samples;
}

/* Where a rank could not read the step's sequences, its plan would be another one: then all ranks plan sequences that
 * none has read, and the run ends after the step. */
static void agree_on_reading(mt_loader *loader, mt_feed *feed, const mt_grid *grid) {
    double failed = loader->status != 0;
    mt_all_reduce_max(&grid->world, &failed, 1, MT_F64);
    feed->status = loader->status, feed->error = loader->error;
    if (failed == 0) return;
    mt_error unused;
    mt_step_plan_free(&loader->plan);
    plan_documents(&loader->plan, &loader->documents, loader, feed->consumed, feed->samples, false, &unused);
    loader->planned_after = -1;
}

/* FLOPs of the tower for a piece's share of the pictures of its sample. */
static double piece_image_flops(const mt_loader *loader, const mt_piece *piece) {
    if (loader->cuts || !loader->config->options) return 0;
    const mt_samples *samples = mt_packing_samples(loader->dataset->packing);
    double flops = 0, share = (double)piece->length / (double)mt_sample_length(samples, piece->sample);
    if (!samples->image_offsets) return 0;
    for (int64_t i = samples->image_offsets[piece->sample]; i < samples->image_offsets[piece->sample + 1]; i++) {
        const mt_image_grid *grid = &samples->images.items[i].grid;
        flops += share * mt_image_flops(&loader->config->options->stack, grid->height, grid->width);
    }
    return flops;
}

mt_feed mt_feed_begin(mt_loader *loader, int64_t consumed_samples, int64_t samples, const mt_grid *grid) {
    mt_feed feed = {.loader = loader,
                    .consumed = consumed_samples,
                    .samples = samples,
                    .read = samples,
                    .micro_batches = samples / (loader->micro_batch_size * loader->dp_size),
                    .rank = grid->data.rank,
                    .num_ranks = grid->data.size};
    if (loader->config->dynamic_context_parallel) {
        feed.rank = grid->data.rank * grid->context.size + grid->context.rank;
        feed.num_ranks = grid->data.size * grid->context.size;
    }
    feed.shared = grid->world.size > feed.num_ranks;
    if (!loader->dataset->packing && !loader->cuts) return feed;
    mt_packing *rows = loader->dataset->packing;
    if (rows) feed.read = mt_max(mt_min(samples, mt_packing_last(rows) - consumed_samples), 0);
    plan_step(loader, consumed_samples, samples);
    if (loader->cuts) agree_on_reading(loader, &feed, grid);
    feed.micro_batches = loader->plan.num_slots;
    for (int64_t i = 0; i < loader->plan.num_pieces; i++) {
        double length = (double)loader->plan.pieces[i].length;
        feed.tokens += length;
        feed.flops += loader->config->work.per_token * length + loader->config->work.per_pair * length * length;
        feed.flops += piece_image_flops(loader, &loader->plan.pieces[i]);
    }
    return feed;
}

/* Refuses more sequences than seq_aux_loss is planned for. Samples and documents are cut anywhere by context ranks, so
 * a micro-batch may have more of them than a rank has tokens. mt_batch_check would refuse it too, but on its ranks
 * alone, while others wait for them in the exchange of experts. */
static int check_sequences(const mt_loader *loader, const mt_batch *batch, mt_error *error) {
    if (!loader->config->options) return 0;
    const mt_options *o = &loader->config->options->stack;
    if (!mt_has_experts(o) || !mt_balances_by(o, MT_BALANCING_SEQ_AUX_LOSS)) return 0;
    int64_t padded = mt_rank_tokens(o, batch->num_tokens) * o->context_parallel_size, longest = 64; // see mt_batch_pad
    int64_t sequences = batch->num_spans + mt_divide_up(padded - batch->num_tokens, longest);
    int64_t room = mt_rank_tokens(o, loader->micro_batch_size * loader->config->seq_length);
    if (sequences <= room) return 0;
    return mt_error_set(
        error,
        "a micro-batch has %lld sequences, and --moe-router-load-balancing-type seq_aux_loss is planned "
        "for %lld, the tokens of a rank; take aux_loss, or a smaller --context-parallel-size",
        (long long)sequences, (long long)room);
}

/* Fills a micro-batch of a feed. */
static int fill_batch(const mt_feed *feed, int64_t index, mt_batch *batch, mt_error *error) {
    mt_loader *loader = feed->loader;
    if (!loader->dataset->packing && !loader->cuts) {
        int64_t stride = loader->micro_batch_size * loader->dp_size;
        if (mt_loader_fill(loader, feed->consumed + index * stride, batch, error) != 0) return -1;
        return check_sequences(loader, batch, error);
    }
    if (fill_rows(loader, index, feed->rank, batch, error) != 0) return -1;
    if (index == feed->micro_batches - 1) plan_next_step(loader, feed);
    return check_sequences(loader, batch, error);
}

int mt_feed_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    mt_feed *feed = context;
    int watched = mt_watch_file_begin("data", MT_FILE_READ);
    int status = feed->loader->cuts ? 0 : feed->status; // the plan of sequences that could not be read has others
    if (status == 0) status = fill_batch(feed, index, batch, error);
    mt_watch_file_end(watched);
    if (status != 0 && feed->status == 0) feed->status = status, feed->error = *error;
    if (status != 0) fill_with_one_token(feed->loader, batch);
    if (status != 0 || !feed->shared) return 0;
    uint64_t prints[] = {mt_contents_fingerprint(batch->tokens, batch->num_tokens * 4, true),
                         mt_contents_fingerprint(batch->labels, batch->num_tokens * 4, true), (uint64_t)index};
    const mt_encoder_batch *e = &batch->encoder;
    if (e->num_tokens > 0) prints[2] += mt_contents_fingerprint(e->tokens, e->num_tokens * 4, true);
    feed->print += mt_contents_fingerprint(prints, sizeof prints, true); // ranks read in different orders
    return 0;
}

int mt_feed_batch_of(mt_feed *feed, int64_t index, int64_t rank, mt_batch *batch, mt_error *error) {
    mt_feed other = *feed;
    MT_CHECK(feed->loader->dataset->packing || feed->loader->cuts);
    other.rank = rank, other.shared = false;
    int status = mt_feed_batch(&other, index, batch, error);
    feed->status = other.status, feed->error = other.error;
    return status;
}

/* Names the rank that read other data than the first rank of its replica. */
static int refuse_difference(const mt_grid *grid, int64_t replica, double print, int64_t iteration, mt_error *error) {
    const mt_group *world = &grid->world;
    int first = 0;
    double *prints = mt_calloc(2 * world->size * 8), *replicas = prints + world->size;
    prints[world->rank] = print, replicas[world->rank] = (double)replica;
    mt_all_reduce_sum(world, prints, 2 * world->size, MT_F64);
    while (replicas[first] != (double)replica) first++;
    bool differs = prints[first] != print;
    if (differs)
        mt_error_set(error, "iteration %lld: rank %d read other data than rank %d; give every rank the same files",
                     (long long)iteration, world->rank, first);
    free(prints);
    return mt_agree(world, differs, error);
}

int mt_feed_check(const mt_feed *feed, const mt_grid *grid, int64_t iteration, mt_error *error) {
    int64_t replicas = feed->shared ? feed->num_ranks : 0, differences = 0;
    double print = (uint32_t)(feed->print ^ feed->print >> 32);
    double *greatest = mt_malloc((1 + 2 * replicas) * 8); // a rank failed; print and -print of each replica
    for (int64_t i = 0; i < 2 * replicas; i++) greatest[1 + i] = -1e300;
    greatest[0] = feed->status != 0;
    if (replicas > 0) greatest[1 + 2 * feed->rank] = print, greatest[2 + 2 * feed->rank] = -print;
    mt_all_reduce_max(&grid->world, greatest, 1 + 2 * replicas, MT_F64);
    for (int64_t i = 0; i < replicas; i++) differences += greatest[1 + 2 * i] != -greatest[2 + 2 * i];
    bool failed = greatest[0] > 0;
    free(greatest);
    *error = feed->error;
    if (failed) return mt_agree(&grid->world, feed->status != 0, error);
    return differences > 0 ? refuse_difference(grid, feed->rank, print, iteration, error) : 0;
}
