/* bench_packing.c: simulates steps on log-normal lengths: static context parallelism, in which all context ranks share
 * every packed row, against dynamic context parallelism. Needs no GPU. Predicted for H200s:
 *
 *   products of tokens        FLOPs of mt_flops at 600 TFLOP/s
 *   attention                 at 500 TFLOP/s for long samples; a call whose queries see K keys on average reaches
 *                             K / (K + 230) of that (both from the table of attention in notes/lab.md). A sample of
 *                             static context parallelism is 2 s chunks on s ranks, and each call sees up to two chunks
 *   exchange of keys, values  170 GB/s, none of it hidden by attention: an assumption that explains the context ring of
 *                             notes/lab.md, 8% slower than data parallelism; the result depends on it. Every rank of a
 * block receives the keys and values of all its tokens
 *
 * Prints tokens per second of dynamic over static, and the time of the solver.
 */
#include "data/options/option_reader.h"
#include "data/options/options.h"
#include "data/datasets/packing.h"
#include "data/datasets/sft.h"
#include "data/checkpoint/run_options.h"
#include "data/report/report.h"

#include <math.h>
#include <stdlib.h>

enum { MEDIAN = 2048, LONGEST = 65536, WINDOW = 1024 };

typedef struct shape {
    const char *name, *layers, *hidden, *ffn, *heads, *groups;
} shape;

static mt_token_work work_of(const shape *s) {
    mt_run_options options;
    mt_error error;
    const char *const settings[][2] = {{"num_layers", s->layers},
                                       {"hidden_size", s->hidden},
                                       {"ffn_hidden_size", s->ffn},
                                       {"num_attention_heads", s->heads},
                                       {"num_query_groups", s->groups},
                                       {"group_query_attention", "true"},
                                       {"vocab_size", "128256"},
                                       {"seq_length", "65536"},
                                       {"position_embedding_type", "rope"},
                                       {"lr", "1e-3"},
                                       {"train_iters", "1"},
                                       {"swiglu", "true"}};
    mt_options_default(&options);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (mt_options_set(&options, settings[i][0], settings[i][1], &error) != 0) mt_die("%s", error.text);
    if (mt_options_finish(&options, MT_PROGRAM_LIBRARY, 1, &error) != 0) mt_die("%s", error.text);
    mt_token_work work = mt_token_work_of(&options.stack);
    mt_options_free(&options);
    return work;
}

/* Predicted time of a batch on its ranks, whose attention is slower for few keys. */
static double batch_time(const mt_step_plan *plan, const mt_plan_batch *batch, const mt_token_work *work,
                         int64_t size) {
    double pairs = 0;
    for (int64_t i = batch->first; i < batch->first + batch->count; i++) {
        double length = (double)plan->pieces[i].length;
        double keys = size > 1 ? 1.5 * length / (2 * (double)size) : length / 2;
        pairs += length * length * (keys + 230) / keys * 600 / 500;
    }
    return mt_shared_work(work, (double)batch->num_tokens, pairs, size);
}

/* Replaces the solver's prediction by that of the simulator. */
static void predict(mt_step_plan *plan, const mt_token_work *work, int64_t context_size) {
    for (int64_t b = 0; b < plan->num_batches; b++) {
        mt_plan_batch *batch = &plan->batches[b];
        batch->work = batch_time(plan, batch, work, mt_max(batch->context_size, context_size));
    }
}

/* One step of `rows` rows on `ranks` ranks of blocks up to `context`. */
static void simulate(const mt_token_work *work, int64_t ranks, int64_t context, int64_t rows, uint64_t key,
                     double *times, double *seconds, double *even) {
    int64_t count = rows * LONGEST / 2048, kept = 0, num_pieces = 0;
    int64_t *lengths = mt_malloc(count * 8), *first = mt_calloc((rows + 1) * 8);
    mt_piece *pieces = mt_malloc(count * (int64_t)sizeof *pieces);
    mt_rows packed;
    for (int64_t i = 0; i < count; i++) lengths[i] = mt_lognormal_length(key, i, MEDIAN, MT_MOCK_SIGMA, LONGEST);
    mt_rows_pack(&packed, lengths, count, LONGEST, WINDOW, 1, 0);
    if (packed.count < rows) mt_die("%lld samples make only %lld rows", (long long)count, (long long)packed.count);
    for (; kept < rows; kept++) {
        int64_t at = kept * LONGEST;
        for (int64_t i = packed.first[kept]; i < packed.first[kept + 1]; i++) {
            pieces[num_pieces++] = (mt_piece){packed.order[i], lengths[packed.order[i]], at};
            at += lengths[packed.order[i]];
        }
        first[kept + 1] = num_pieces;
    }
    mt_plan_shape fixed = {ranks / context, 1, LONGEST, .work = *work};
    mt_plan_shape dynamic = {ranks,
                             1,
                             LONGEST,
                             .work = *work,
                             .context_size = context,
                             .min_context_size = 1,
                             .rank_tokens = LONGEST / context};
    mt_step_plan plan;
    mt_step_plan_balance(&plan, pieces, first, rows, &fixed);
    predict(&plan, work, context);
    times[0] += mt_step_plan_time(&plan, false, NULL);
    mt_step_plan_free(&plan);
    for (int meets = 0; meets < 2; meets++) {
        dynamic.meets = meets;
        double begin = mt_time();
        mt_step_plan_solve(&plan, pieces, num_pieces, &dynamic);
        *seconds += (mt_time() - begin) / 2;
        if (!meets) *even += mt_step_plan_imbalance(&plan);
        predict(&plan, work, 1);
        times[1 + meets] += mt_step_plan_time(&plan, meets, NULL);
        mt_step_plan_free(&plan);
    }
    mt_rows_free(&packed);
    free(lengths), free(first), free(pieces);
}

int main(void) {
    static const shape shapes[] = {{"GPT 1.3B, 16 KV heads", "24", "2048", "5504", "16", "16"},
                                   {"Llama 2 7B, 32 KV heads", "32", "4096", "11008", "32", "32"},
                                   {"Llama 3 8B, 8 KV heads", "32", "4096", "14336", "32", "8"}};
    enum { STEPS = 4 };
    for (size_t m = 0; m < sizeof shapes / sizeof *shapes; m++) {
        mt_token_work work = work_of(&shapes[m]);
        printf("%s\n  ranks  context  dynamic/static  if ranks meet in each slot  slowest rank  solver ms  of a step\n",
               shapes[m].name);
        for (int64_t ranks = 2; ranks <= 1024; ranks *= 2) {
            int64_t context = mt_min(ranks, 8);
            double times[3] = {0}, seconds = 0, even = 0;
            for (uint64_t step = 0; step < STEPS; step++)
                simulate(&work, ranks, context, 2 * mt_max(ranks, 4), 77 + step, times, &seconds, &even);
            printf("  %5lld %8lld %15.2f %26.2f %+13.1f%% %10.2f %9.3f%%\n", (long long)ranks, (long long)context,
                   times[0] / times[1], times[0] / times[2], 100 * even / STEPS, 1e3 * seconds / STEPS,
                   100 * seconds / (times[1] / 600e12));
        }
    }
    return 0;
}
