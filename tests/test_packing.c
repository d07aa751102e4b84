/* test_packing.c: rows of samples of any length, micro-batches with even work, and training on them. */
#include "golden.h"
#include "data/options/option_reader.h"
#include "data/datasets/gpt_dataset.h"
#include "data/datasets/loader.h"
#include "data/datasets/packing.h"
#include "data/datasets/sft.h"
#include "data/report/report.h"

#include <math.h>

enum { ROW = 4096, COUNT = 3000 };

/* Log-normal lengths around ROW / 16, as samples with tokens that count up. */
static mt_samples make_samples(int64_t count, int64_t row_length) {
    mt_samples samples = {.count = count, .offsets = mt_calloc((count + 1) * 8)};
    for (int64_t s = 0; s < count; s++)
        samples.offsets[s + 1] =
            samples.offsets[s] + 1 + mt_lognormal_length(7, s, mt_max(row_length / 16, 2), 1.3, row_length);
    samples.tokens = mt_malloc(samples.offsets[count] * 4);
    samples.is_trained = mt_malloc(samples.offsets[count]);
    for (int64_t t = 0; t < samples.offsets[count]; t++) {
        samples.tokens[t] = (int32_t)(t * 7 % 61);
        samples.is_trained[t] = t % 5 != 0;
    }
    return samples;
}

static mt_data_config make_config(int64_t row_length, bool packs) {
    return (mt_data_config){.seq_length = row_length,
                            .seed = 1234,
                            .vocab_size = 61,
                            .eod_id = -1,
                            .sft = true,
                            .sequence_packing = packs,
                            .sizes = {1 << 20, 0, 0},
                            .work = {6e9, 1e6, 1e7}};
}

/* ---- rows */

static void a_row_holds_whole_samples_and_an_epoch_every_sample_once(void **state) {
    (void)state;
    mt_samples samples = make_samples(COUNT, ROW);
    int64_t *lengths = mt_malloc(COUNT * 8), tokens = 0;
    for (int64_t s = 0; s < COUNT; s++) lengths[s] = mt_sample_length(&samples, s), tokens += lengths[s];
    for (int64_t epoch = 0; epoch < 3; epoch++) {
        mt_rows rows;
        char seen[COUNT] = {0};
        mt_rows_pack(&rows, lengths, COUNT, ROW, 1024, 1, epoch);
        assert_int_equal(rows.first[0], 0);
        assert_int_equal(rows.first[rows.count], COUNT);
        for (int64_t r = 0; r < rows.count; r++) {
            int64_t length = 0;
            assert_true(rows.first[r] < rows.first[r + 1]);
            for (int64_t i = rows.first[r]; i < rows.first[r + 1]; i++) {
                length += lengths[rows.order[i]];
                assert_int_equal(seen[rows.order[i]]++, 0);
            }
            assert_true(length <= ROW);
        }
        double full = (double)tokens / (double)(rows.count * ROW);
        if (full < 0.97) fail_msg("rows are %.1f%% full", 100 * full);
        mt_rows_free(&rows);
    }
    free(lengths);
    mt_samples_free(&samples);
}

/* By best-fit decreasing, 6 + 4, 5 + 5 and 7 + 2 + 1; first-fit in this order would take four rows. */
static void rows_are_packed_by_best_fit_decreasing(void **state) {
    (void)state;
    const int64_t lengths[] = {2, 5, 4, 7, 1, 5, 6};
    mt_rows rows;
    mt_rows_pack(&rows, lengths, 7, 10, 1024, 0, 0);
    assert_int_equal(rows.count, 3);
    mt_rows_free(&rows);
    mt_rows_pack(&rows, lengths, 7, 10, 1, 0, 0);
    assert_int_equal(rows.count, 7);
    mt_rows_free(&rows);
}

/* A packing that is opened anew reads any row as one that read all rows before it; other seeds and epochs shuffle. */
static void rows_are_a_function_of_their_number(void **state) {
    (void)state;
    enum { SAMPLES = 200, ROWS = 90 };
    mt_samples samples = make_samples(SAMPLES, ROW);
    for (int packs = 0; packs < 2; packs++) {
        mt_data_config config = make_config(ROW, packs), other = config;
        other.seed++;
        mt_dataset *unbroken = mt_row_dataset_create(&samples, 10, SAMPLES, MT_SPLIT_TRAIN, &config);
        mt_dataset *different = mt_row_dataset_create(&samples, 10, SAMPLES, MT_SPLIT_TRAIN, &other);
        int64_t epoch = mt_packing_count(unbroken->packing, 1), moved = 0, differing = 0;
        assert_true(epoch < ROWS || !packs);
        for (int64_t row = 0; row < ROWS; row++) {
            const int64_t *order, *again, *foreign;
            mt_dataset *resumed = mt_row_dataset_create(&samples, 10, SAMPLES, MT_SPLIT_TRAIN, &config);
            int64_t count = mt_packing_row(unbroken->packing, row, &order);
            assert_int_equal(mt_packing_row(resumed->packing, row, &again), count);
            assert_memory_equal(order, again, (size_t)count * 8);
            assert_true(order[0] >= 10 && order[0] < SAMPLES);
            mt_packing_row(different->packing, row, &foreign);
            differing += foreign[0] != order[0];
            mt_packing_row(resumed->packing, row + epoch, &again);
            moved += again[0] != order[0];
            mt_dataset_free(resumed);
        }
        assert_true(differing > ROWS / 2 && moved > ROWS / 2);
        mt_dataset_free(unbroken);
        mt_dataset_free(different);
    }
    mt_samples_free(&samples);
}

static void epochs_end_with_their_last_row(void **state) {
    (void)state;
    enum { SAMPLES = 150 };
    mt_samples samples = make_samples(SAMPLES, ROW);
    mt_data_config config = make_config(ROW, true);
    config.train_epochs = 3;
    mt_dataset *dataset = mt_row_dataset_create(&samples, 0, SAMPLES, MT_SPLIT_TRAIN, &config);
    int64_t seen[SAMPLES] = {0}, rows = dataset->num_samples;
    const int64_t *order;
    assert_int_equal(rows, mt_packing_count(dataset->packing, 3));
    for (int64_t row = 0; row < rows + 5; row++) {
        int64_t count = mt_packing_row(dataset->packing, row, &order);
        assert_true(row < rows ? count > 0 : count == 0);
        for (int64_t i = 0; i < count; i++) seen[order[i]]++;
    }
    for (int64_t s = 0; s < SAMPLES; s++) assert_int_equal(seen[s], 3);
    mt_dataset_free(dataset);
    mt_samples_free(&samples);
}

/* ---- steps */

/* The pieces of the rows [0, rows), as the loader makes them. */
static mt_piece *list_pieces(mt_dataset *dataset, int64_t rows, int64_t *first) {
    const mt_samples *samples = mt_packing_samples(dataset->packing);
    mt_piece *pieces = mt_malloc(samples->count * (int64_t)sizeof *pieces);
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t *order;
        int64_t at = row * dataset->seq_length, here = mt_packing_row(dataset->packing, row, &order);
        first[row] = count;
        for (int64_t i = 0; i < here; i++) {
            int64_t length = mt_sample_length(samples, order[i]);
            pieces[count++] = (mt_piece){order[i], length, at};
            at += length;
        }
    }
    first[rows] = count;
    return pieces;
}

static int compare_pieces(const void *a, const void *b) {
    const mt_piece *one = a, *other = b;
    return (one->token_index > other->token_index) - (one->token_index < other->token_index);
}

/* Every piece is in one micro-batch, which holds what its plan allows. */
static void check_plan(const mt_step_plan *plan, const mt_piece *pieces, int64_t count, const mt_plan_shape *shape) {
    assert_int_equal(plan->num_pieces, count);
    int64_t listed = 0, batches = plan->num_slots * plan->num_ranks;
    mt_piece *sorted = mt_malloc(count * (int64_t)sizeof *sorted);
    char *used = mt_calloc(batches);
    for (int64_t b = 0; b < batches; b++) {
        const mt_plan_batch *batch = &plan->batches[plan->batch_of[b]];
        int64_t tokens = 0;
        assert_int_equal(used[plan->batch_of[b]]++, 0);
        for (int64_t i = 0; i < batch->count; i++) {
            sorted[listed++] = plan->pieces[batch->first + i];
            tokens += plan->pieces[batch->first + i].length;
        }
        assert_int_equal(tokens, batch->num_tokens);
        assert_true(tokens <= shape->micro_batch_size * shape->row_length);
    }
    assert_int_equal(listed, count);
    qsort(sorted, (size_t)count, sizeof *sorted, compare_pieces);
    for (int64_t i = 0; i < count; i++) assert_memory_equal(&sorted[i], &pieces[i], sizeof *sorted);
    free(sorted);
    free(used);
}

static void a_step_has_every_sample_once_and_even_work(void **state) {
    (void)state;
    mt_samples samples = make_samples(COUNT, ROW);
    enum { ROWS = 96 };
    for (int packs = 0; packs < 2; packs++) {
        mt_data_config config = make_config(ROW, packs);
        mt_dataset *dataset = mt_row_dataset_create(&samples, 0, COUNT, MT_SPLIT_TRAIN, &config);
        int64_t first[ROWS + 1];
        mt_piece *pieces = list_pieces(dataset, ROWS, first);
        double total = 0, longest = 0;
        for (int64_t i = 0; i < first[ROWS]; i++) {
            double length = (double)pieces[i].length;
            double work = config.work.per_token * length + config.work.per_pair * length * length;
            total += work, longest = fmax(longest, work);
        }
        for (int64_t ranks = 1; ranks <= 16; ranks *= 2)
            for (int64_t each = 1; each <= 3; each++)
                for (int variable = 0; variable < 2; variable++) {
                    mt_plan_shape shape = {.num_ranks = ranks,
                                           .micro_batch_size = each,
                                           .row_length = ROW,
                                           .pads = !variable,
                                           .regroups = variable,
                                           .in_order = true,
                                           .work = config.work};
                    mt_step_plan before, after;
                    mt_step_plan_balance(&before, pieces, first, ROWS, &shape);
                    shape.in_order = false;
                    mt_step_plan_balance(&after, pieces, first, ROWS, &shape);
                    check_plan(&before, pieces, first[ROWS], &shape);
                    check_plan(&after, pieces, first[ROWS], &shape);
                    assert_int_equal(after.num_slots, ROWS / ranks / each);
                    double gain = mt_step_plan_imbalance(&before), rest = mt_step_plan_imbalance(&after);
                    double bound = fmax(0.05, (double)ranks * longest / total - 1 + 0.01); // no rank splits a sample
                    if (rest > gain || rest > bound)
                        fail_msg("packs %d variable %d, %lld ranks of %lld rows: %.3f before, %.3f after", packs,
                                 variable, (long long)ranks, (long long)each, gain, rest);
                    if (ranks == 16 && !packs && variable) assert_true(gain > 0.2); // not even by itself
                    mt_step_plan_free(&before);
                    mt_step_plan_free(&after);
                }
        free(pieces);
        mt_dataset_free(dataset);
    }
    mt_samples_free(&samples);
}

static void a_batch_restarts_positions_and_masks_prompts_and_padding(void **state) {
    (void)state;
    int64_t offsets[] = {0, 4, 10};
    int32_t tokens[] = {5, 6, 7, 8, 20, 21, 22, 23, 24, 25};
    uint8_t is_trained[] = {1, 0, 1, 1, 0, 0, 0, 1, 1, 0};
    const mt_samples samples = {.count = 2, .offsets = offsets, .tokens = tokens, .is_trained = is_trained};
    const mt_piece pieces[] = {{0, 3, 100}, {1, 5, 103}};
    const int64_t first[] = {0, 2};
    mt_plan_shape shape = {.num_ranks = 1, .micro_batch_size = 1, .row_length = 80, .pads = true, .work = {1, 1, 0}};
    mt_step_plan plan;
    mt_batch batch;
    mt_error error;
    mt_batch_alloc(&batch, 80);
    mt_step_plan_balance(&plan, pieces, first, 1, &shape);
    assert_int_equal(mt_step_plan_fill(&plan, 0, 0, &samples, 80, &batch, &error), 0);
    const int32_t inputs[] = {5, 6, 7, 20, 21, 22, 23, 24, 0}, labels[] = {6, 7, 8, 21, 22, 23, 24, 25, 0};
    const int32_t positions[] = {0, 1, 2, 0, 1, 2, 3, 4, 0};
    const float mask[] = {0, 1, 1, 0, 0, 1, 1, 0, 0};
    const mt_span spans[] = {{0, 3, 0, 3, true}, {3, 5, 3, 5, true}, {8, 64, 8, 64, true}, {72, 8, 72, 8, true}};
    assert_int_equal(batch.num_tokens, 80);
    assert_int_equal(batch.num_spans, 4);
    assert_memory_equal(batch.tokens, inputs, sizeof inputs);
    assert_memory_equal(batch.labels, labels, sizeof labels);
    assert_memory_equal(batch.positions, positions, sizeof positions);
    assert_memory_equal(batch.loss_mask, mask, sizeof mask);
    for (int s = 0; s < 4; s++) {
        assert_int_equal(batch.spans[s].q_start, spans[s].q_start);
        assert_int_equal(batch.spans[s].q_len, spans[s].q_len);
        assert_int_equal(batch.spans[s].k_start, spans[s].k_start);
        assert_int_equal(batch.spans[s].k_len, spans[s].k_len);
        assert_true(batch.spans[s].causal);
    }
    for (int t = 0; t < 8; t++) assert_int_equal(batch.token_index[t], 100 + t);
    for (int t = 8; t < 80; t++) assert_true(batch.loss_mask[t] == 0);
    assert_int_equal(mt_step_plan_fill(&plan, 0, 0, &samples, 0, &batch, &error), 0);
    assert_int_equal(batch.num_tokens, 8);
    plan.batches[0].count = 0;
    assert_int_equal(mt_step_plan_fill(&plan, 0, 0, &samples, 0, &batch, &error), 0);
    assert_int_equal(batch.num_tokens, 1);
    assert_true(batch.loss_mask[0] == 0);
    assert_int_equal(mt_step_plan_fill(&plan, 0, 0, &samples, 80, &batch, &error), 0);
    assert_int_equal(batch.num_tokens, 80);
    for (int t = 0; t < 80; t++) assert_true(batch.loss_mask[t] == 0);
    mt_step_plan_free(&plan);
    mt_batch_free(&batch);
}

/* ---- dynamic context parallelism */

/* Every piece is once in a plan; blocks are aligned, partition the ranks of each slot, and have memory. */
static void check_blocks(const mt_step_plan *plan, int64_t count, const mt_plan_shape *shape) {
    int64_t ranks = plan->num_ranks, batches = 0;
    char *pieces = mt_calloc(count + 1), *seen = mt_calloc(plan->num_batches);
    assert_int_equal(plan->num_pieces, count);
    for (int64_t slot = 0; slot < plan->num_slots; slot++)
        for (int64_t rank = 0, size; rank < ranks; rank += size) {
            int64_t index = plan->batch_of[slot * ranks + rank], tokens = 0;
            const mt_plan_batch *batch = &plan->batches[index];
            size = batch->context_size;
            assert_true(size >= shape->min_context_size && size <= shape->context_size && (size & (size - 1)) == 0);
            assert_int_equal(rank % size, 0);
            for (int64_t i = 0; i < size; i++) assert_int_equal(plan->batch_of[slot * ranks + rank + i], index);
            assert_int_equal(seen[index]++, 0);
            batches++;
            for (int64_t i = batch->first; i < batch->first + batch->count; i++) {
                tokens += plan->pieces[i].length;
                assert_int_equal(pieces[plan->pieces[i].sample]++, 0);
            }
            assert_int_equal(tokens, batch->num_tokens);
            assert_true(tokens <= size * shape->rank_tokens);
        }
    assert_int_equal(batches, plan->num_batches);
    for (int64_t i = 0; i < count; i++) assert_int_equal(pieces[i], 1);
    free(pieces);
    free(seen);
}

/* Random lengths, ranks and limits. With many samples the predicted work of all ranks is even; the plan is the same for
 * the same lengths. */
static void blocks_are_aligned_and_even(void **state) {
    (void)state;
    for (uint64_t round = 0; round < 100; round++) {
        uint32_t draw[4], more[4];
        mt_philox(draw, 11, round, 0);
        mt_philox(more, 11, round, 1);
        int64_t context = (int64_t)1 << draw[0] % 5, data = 1 + draw[1] % 4, count = draw[2] % 600;
        int64_t unit = 1 + draw[3] % 100, longest = context * unit * (1 + more[0] % 50);
        mt_plan_shape shape = {.num_ranks = context * data,
                               .context_size = context,
                               .min_context_size = (int64_t)1 << more[1] % 5,
                               .rank_tokens = longest / context,
                               .meets = more[2] % 2,
                               .slot_group = more[3] % 4,
                               .slot_rest = more[3] % 4 / 2,
                               .work = {6e9, 1e6 * (more[2] % 7), 1e9 * (more[2] % 3)}};
        shape.min_context_size = mt_min(shape.min_context_size, context);
        mt_piece *pieces = mt_calloc((count + 1) * (int64_t)sizeof *pieces);
        for (int64_t i = 0; i < count; i++)
            pieces[i] = (mt_piece){i, mt_lognormal_length(round, i, mt_max(longest / 32, 1), 1.3, longest), i};
        mt_step_plan plan, again;
        mt_step_plan_solve(&plan, pieces, count, &shape);
        mt_step_plan_solve(&again, pieces, count, &shape);
        check_blocks(&plan, count, &shape);
        int64_t group = mt_max(shape.slot_group, 1), rest = plan.num_slots % group;
        assert_true(plan.num_slots >= group && (rest == 0 || rest >= shape.slot_rest));
        assert_int_equal(plan.num_slots, again.num_slots);
        assert_memory_equal(plan.batch_of, again.batch_of, (size_t)(plan.num_slots * plan.num_ranks) * 8);
        assert_memory_equal(plan.pieces, again.pieces, (size_t)count * sizeof *pieces);
        mt_step_plan_free(&plan);
        mt_step_plan_free(&again);
        free(pieces);
    }
}

/* Four samples a rank, of lengths that are alike: without exchanges some steps are off by more than 5%. */
static void steps_of_few_samples_are_even(void **state) {
    (void)state;
    enum { RANKS = 8, SAMPLES = 32 };
    for (uint64_t round = 0; round < 50; round++)
        for (int dynamic = 0; dynamic < 2; dynamic++) {
            mt_piece pieces[SAMPLES];
            int64_t first[SAMPLES + 1];
            mt_plan_shape shape = {.num_ranks = RANKS,
                                   .micro_batch_size = 1,
                                   .row_length = 2048,
                                   .regroups = true,
                                   .context_size = 2,
                                   .min_context_size = 1,
                                   .rank_tokens = 1024,
                                   .work = {6e9, 1e5, 1e9}};
            for (int64_t i = 0; i < SAMPLES; i++) {
                uint32_t draw[4];
                mt_philox(draw, 13, round, (uint64_t)i);
                pieces[i] = (mt_piece){i, 250 + draw[0] % 600, i * shape.row_length}, first[i] = i;
            }
            first[SAMPLES] = SAMPLES;
            mt_step_plan plan;
            if (dynamic)
                mt_step_plan_solve(&plan, pieces, SAMPLES, &shape), check_blocks(&plan, SAMPLES, &shape);
            else
                mt_step_plan_balance(&plan, pieces, first, SAMPLES, &shape), check_plan(&plan, pieces, SAMPLES, &shape);
            double off = mt_step_plan_imbalance(&plan);
            if (off > 0.05) fail_msg("round %d, dynamic %d: off by %.3f", (int)round, dynamic, off);
            mt_step_plan_free(&plan);
        }
}

/* A long-tailed step of 8 and of 64 ranks: even work, in less time than with every row on a whole context group. */
static void dynamic_blocks_are_even_and_faster(void **state) {
    (void)state;
    enum { LONGEST = 65536, SAMPLES = 12000 };
    const mt_token_work work = {5e10, 7e5, 1e10}; // of 8 billion parameters with as many key heads as query heads
    int64_t *lengths = mt_malloc(SAMPLES * 8), first[129] = {0};
    mt_piece *pieces = mt_calloc(SAMPLES * (int64_t)sizeof *pieces);
    mt_rows rows;
    for (int64_t i = 0; i < SAMPLES; i++) lengths[i] = mt_lognormal_length(5, i, 2048, 1.3, LONGEST);
    mt_rows_pack(&rows, lengths, SAMPLES, LONGEST, 1024, 0, 0);
    for (int64_t i = 0; i < rows.first[128]; i++) pieces[i] = (mt_piece){i, lengths[rows.order[i]], i};
    for (int64_t r = 0; r <= 128; r++) first[r] = rows.first[r];
    for (int64_t ranks = 8; ranks <= 64; ranks *= 8)
        for (int meets = 0; meets < 2; meets++) {
            mt_plan_shape shape = {.num_ranks = ranks,
                                   .context_size = 8,
                                   .min_context_size = 1,
                                   .rank_tokens = LONGEST / 8,
                                   .meets = meets,
                                   .work = work};
            mt_plan_shape fixed = {.num_ranks = ranks / 8, .micro_batch_size = 1, .row_length = LONGEST, .work = work};
            mt_step_plan plan, whole;
            int64_t num_rows = 2 * ranks;
            mt_step_plan_solve(&plan, pieces, first[num_rows], &shape);
            check_blocks(&plan, first[num_rows], &shape);
            double off = mt_step_plan_imbalance(&plan), span = mt_step_plan_time(&plan, meets, NULL), sum = 0;
            mt_step_plan_balance(&whole, pieces, first, num_rows, &fixed);
            for (int64_t b = 0; b < whole.num_batches; b++) {
                double pairs = 0, tokens = (double)whole.batches[b].num_tokens;
                for (int64_t i = 0; i < whole.batches[b].count; i++) {
                    double length = (double)whole.pieces[whole.batches[b].first + i].length;
                    pairs += length * length;
                }
                sum += mt_shared_work(&work, tokens, pairs, 8) / (double)(ranks / 8); // perfectly even
            }
            if (off > 0.05 || span > 0.85 * sum)
                fail_msg("%lld ranks, meets %d: off by %.3f, %.3f of static", (long long)ranks, meets, off, span / sum);
            mt_step_plan_free(&plan);
            mt_step_plan_free(&whole);
        }
    mt_rows_free(&rows);
    free(lengths);
    free(pieces);
}

/* ---- training */

/* A model of one rank, and the feed of its step. */
typedef struct trained {
    double loss;
    int64_t count;
    double *gradients;
} trained;

/* One step over the rows of `config`; its loss, and the sum of the gradients of every micro-batch. */
static trained train_step(const mt_samples *samples, mt_data_config config, int64_t rows, int64_t micro_batch_size,
                          bool has_experts) {
    mt_run_options options;
    mt_error error;
    const char *const settings[][2] = {{"num_layers", "2"},
                                       {"hidden_size", "32"},
                                       {"num_attention_heads", "4"},
                                       {"vocab_size", "61"},
                                       {"seq_length", "96"},
                                       {"position_embedding_type", "rope"},
                                       {"hidden_dropout", "0"},
                                       {"attention_dropout", "0"},
                                       {"lr", "1e-3"},
                                       {"train_iters", "2"},
                                       {"clip_grad", "0"},
                                       {"swiglu", "true"},
                                       {"normalization", "RMSNorm"},
                                       {"disable_bias_linear", "true"},
                                       {"num_experts", "4"}, // from here on: experts
                                       {"moe_router_topk", "2"},
                                       {"moe_ffn_hidden_size", "24"},
                                       {"moe_shared_expert_intermediate_size", "16"},
                                       {"moe_aux_loss_coeff", "0.1"},
                                       {"moe_z_loss_coeff", "0.01"},
                                       {"moe_router_load_balancing_type", "seq_aux_loss"}};
    mt_options_default(&options);
    for (size_t i = 0; i < sizeof settings / sizeof *settings - (has_experts ? 0 : 7); i++)
        assert_int_equal(mt_options_set(&options, settings[i][0], settings[i][1], &error), 0);
    if (mt_options_finish(&options, MT_PROGRAM_LIBRARY, 1, &error) != 0) fail_msg("%s", error.text);
    int64_t tokens = micro_batch_size * config.seq_length, count;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = config.seq_length, .train = true};
    mt_model *model;
    if (mt_model_create(&model, &options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    mt_model_init(model);
    mt_batch batch;
    mt_batch_alloc(&batch, tokens);
    mt_dataset *dataset = mt_row_dataset_create(samples, 0, samples->count, MT_SPLIT_TRAIN, &config);
    mt_loader *loader;
    if (mt_loader_open(&loader, dataset, &config, micro_batch_size, 0, 1, &error) != 0) fail_msg("%s", error.text);
    mt_feed feed = mt_feed_begin(loader, 0, rows, &mt_grid_of_one);
    mt_run_state run = {0};
    mt_metrics metrics;
    if (mt_train_step(model, &run, feed.micro_batches, mt_feed_batch, &feed, &batch, &metrics, &error) != 0)
        fail_msg("%s", error.text);
    trained result = {.loss = metrics.loss};
    mt_bucket *buckets = mt_model_buckets(model, &count);
    for (int64_t b = 0; b < count; b++) result.count += buckets[b].count;
    result.gradients = mt_calloc(result.count * 8);
    for (int64_t b = 0, at = 0; b < count; at += buckets[b++].count)
        for (int64_t i = 0; buckets[b].trained && i < buckets[b].count; i++)
            result.gradients[at + i] = ((const float *)buckets[b].main_grads)[i];
    mt_loader_close(loader);
    mt_dataset_free(dataset);
    mt_batch_free(&batch);
    mt_model_destroy(model);
    mt_options_free(&options);
    return result;
}

/* One sample a row and micro-batch against packed rows, padded or of variable length: the same loss and gradients.
 * Without dropout, whose coordinates are those of the rows. Of a model with experts, the samples alone have no padding,
 * which packed rows have. */
static void check_packed_samples(bool has_experts) {
    enum { SAMPLES = 24, LENGTH = 96 };
    mt_samples samples = make_samples(SAMPLES, LENGTH);
    mt_data_config config = make_config(LENGTH, false);
    config.variable_seq_lengths = has_experts;
    trained alone = train_step(&samples, config, SAMPLES, 1, has_experts);
    for (int packs = 0; packs < 2; packs++)
        for (int variable = 0; variable < 2; variable++)
            for (int64_t each = 1; each <= 2; each++) {
                config.sequence_packing = packs, config.variable_seq_lengths = variable;
                config.train_epochs = 1; // rows after the epoch are empty
                mt_dataset *rows = mt_row_dataset_create(&samples, 0, SAMPLES, MT_SPLIT_TRAIN, &config);
                int64_t count = (rows->num_samples + each - 1) / each * each;
                mt_dataset_free(rows);
                assert_true(!packs || count < SAMPLES);
                trained packed = train_step(&samples, config, count, each, has_experts);
                double largest = 0, worst = 0;
                for (int64_t i = 0; i < alone.count; i++) {
                    largest = fmax(largest, fabs(alone.gradients[i]));
                    worst = fmax(worst, fabs(alone.gradients[i] - packed.gradients[i]));
                }
                if (fabs(alone.loss - packed.loss) > 1e-5 * alone.loss || worst > 1e-5 * largest)
                    fail_msg("packs %d variable %d rows %lld: loss %.7f, %.7f alone; gradients off by %g of %g", packs,
                             variable, (long long)each, packed.loss, alone.loss, worst, largest);
                free(packed.gradients);
            }
    free(alone.gradients);
    mt_samples_free(&samples);
}

static void packed_samples_train_as_one_by_one(void **state) {
    (void)state;
    check_packed_samples(false);
}

/* The tensor-parallel size pads the vocabulary: 67 to 80 and to 96. Micro-batches must stay the same, as auxiliary
 * losses and capacities of experts depend on them. */
static void work_does_not_depend_on_the_layout(void **state) {
    (void)state;
    mt_token_work work[2];
    for (int i = 0; i < 2; i++) {
        mt_run_options options;
        mt_error error;
        const char *settings[][2] = {{"vocab_size", "67"},
                                     {"make_vocab_size_divisible_by", "16"},
                                     {"num_layers", "2"},
                                     {"hidden_size", "16"},
                                     {"seq_length", "32"},
                                     {"num_attention_heads", "2"},
                                     {"micro_batch_size", "1"},
                                     {"global_batch_size", "4"},
                                     {"sft", "true"},
                                     {"mock_data", "true"},
                                     {"train_iters", "1"},
                                     {"lr", "1e-3"},
                                     {"tensor_model_parallel_size", i ? "2" : "1"}};
        mt_options_default(&options);
        for (size_t s = 0; s < sizeof settings / sizeof *settings; s++)
            assert_int_equal(mt_options_set(&options, settings[s][0], settings[s][1], &error), 0);
        if (mt_options_finish(&options, MT_PROGRAM_TRAIN, 2, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(options.stack.padded_vocab_size, i ? 96 : 80);
        work[i] = mt_token_work_of(&options.stack);
        mt_options_free(&options);
    }
    assert_memory_equal(&work[0], &work[1], sizeof *work);
}

static void padding_trains_no_router(void **state) {
    (void)state;
    check_packed_samples(true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_holds_whole_samples_and_an_epoch_every_sample_once),
        cmocka_unit_test(rows_are_packed_by_best_fit_decreasing),
        cmocka_unit_test(rows_are_a_function_of_their_number),
        cmocka_unit_test(epochs_end_with_their_last_row),
        cmocka_unit_test(a_step_has_every_sample_once_and_even_work),
        cmocka_unit_test(a_batch_restarts_positions_and_masks_prompts_and_padding),
        cmocka_unit_test(blocks_are_aligned_and_even),
        cmocka_unit_test(steps_of_few_samples_are_even),
        cmocka_unit_test(dynamic_blocks_are_even_and_faster),
        cmocka_unit_test(packed_samples_train_as_one_by_one),
        cmocka_unit_test(work_does_not_depend_on_the_layout),
        cmocka_unit_test(padding_trains_no_router),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
