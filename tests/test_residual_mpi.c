/* test_residual_mpi.c: --fp32-residual-connection, a residual stream in fp32 beside bf16 or fp16, on four ranks. */
// Sections of megatron.c: §9c
#include "layouts.h"

#define WIDE " --fp32-residual-connection"

/* ---- against fp32, on one rank */

enum { WIDTH = 32, LOGITS = ROW_LENGTH * VOCABULARY };

typedef struct results {
    float logits[LOGITS];
    float *gradient; // of the embedding, at the end of the backward
    int64_t count;
} results;

/* A forward and a backward of a model of many layers that each add little to a large stream. */
static results compute(const char *types) {
    char line[1024], *arguments[64];
    int count = 0;
    mt_error error;
    int64_t num_buckets;
    trainee t = {.grid = mt_grid_of_one, .sequences = 1, .ops = &mt_cpu_ops};
    results r;
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 "
             "--hidden-size %d --num-attention-heads 4 --num-layers 48 --vocab-size %d --device cpu --swiglu "
             "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
             "--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.1 --residual-multiplier 0.02 "
             "--make-vocab-size-divisible-by 1%s",
             ROW_LENGTH, WIDTH, VOCABULARY, types);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&t.options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&t.options, MT_PROGRAM_TRAIN, 1, &error) != 0 || trainee_open(&t, &error) != 0)
        fail_msg("%s: %s", types, error.text);
    sequence_source from = source_of(&t, 0, false);
    make_batch(&from, 0, &t.batch, &error);
    mt_model_forward(t.model, &t.batch, true);
    mt_model_read(t.model, NULL, NULL, r.logits);
    mt_model_backward(t.model);
    const mt_bucket *b = mt_model_buckets(t.model, &num_buckets);
    r.count = b->count, r.gradient = mt_malloc(b->count * 4);
    memcpy(r.gradient, b->grads, (size_t)b->count * 4);
    trainee_close(&t);
    return r;
}

static double distance(const float *a, const float *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += pow((double)a[i] - (double)b[i], 2);
    return sqrt(sum / (double)n);
}

/* 96 sums in 16 bits round 96 times; in fp32, the last sum alone is rounded, for the final norm. The roundings that
 * both have, of operands of the norm and of the head, are a few more. Independent errors add up like their squares. */
static void many_sums_are_nearer_to_those_of_fp32(void **state) {
    (void)state;
    static const char *const types[] = {" --bf16", " --fp16 --accumulate-allreduce-grads-in-fp32"};
    results exact = compute("");
    for (int k = 0; k < 2; k++) {
        char words[128];
        snprintf(words, sizeof words, "%s" WIDE, types[k]);
        results narrow = compute(types[k]), wide = compute(words);
        double logits[2] = {distance(narrow.logits, exact.logits, LOGITS), distance(wide.logits, exact.logits, LOGITS)};
        double gradients[2] = {distance(narrow.gradient, exact.gradient, exact.count),
                               distance(wide.gradient, exact.gradient, exact.count)};
        if (!(logits[0] > 2 * logits[1]) || !(gradients[0] > 2 * gradients[1]))
            fail_msg("%s: errors of the logits %g, with fp32 sums %g; of the embedding's gradient %g, %g", types[k],
                     logits[0], logits[1], gradients[0], gradients[1]);
        free(narrow.gradient), free(wide.gradient);
    }
    free(exact.gradient);
}

/* ---- layouts */

static const layout rows[] = {
    {2, LLAMA, WIDE TP "2"},
    {4, LLAMA, WIDE TP "4" STEPWISE},
    {4, GPT2, WIDE PP "2" VP "2" SHARD "optim" PREFETCH},
    {4, QWEN, WIDE CP "2" SHARD "optim_grads_params"},
    {4, MTP_LATENT, WIDE TP "2" SP PP "2" EP "2" ETP "1"},
    {2, EXPERTS, WIDE EP "2" GATHER},
};

/* The bound of bf16 on any layout: one rank here adds up in bf16. */
static void layouts_train_to_within_two_percent_of_one_rank_in_bf16(void **state) {
    (void)state;
    RUN_ROWS(rows, MT_BF16, 0.02);
}

/* Stages compute as one rank does, so a loss has the same bits, unless a message rounds the stream. Gradients too,
 * whose squares are added up in another order. */
static void stages_exchange_the_stream_and_its_gradient_unrounded(void **state) {
    (void)state;
    static const layout stages[] = {
        {1, DEEP, WIDE},           {2, DEEP, WIDE PP "2"}, {2, DEEP, WIDE PP "2" VP "2"},
        {2, DEEP, WIDE PP "2" ZB}, {4, DEEP, WIDE PP "4"},
    };
    mt_metrics one = {0};
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        mt_metrics metrics;
        mt_error error;
        trainee t = {.grid = grid_of_job(stages[i].ranks), .sequences = 1};
        if (trainee_parse(&t.options, stages[i].subject, stages[i].words, MT_BF16, stages[i].ranks, &error) != 0 ||
            trainee_open(&t, &error) != 0 || train_one_step(&t, &metrics, &error) != 0)
            fail_msg("%s: %s", stages[i].words, error.text);
        if (i == 0) one = metrics;
        if (metrics.loss != one.loss || fabs(metrics.grad_norm / one.grad_norm - 1) > 1e-6)
            fail_msg("%s: the loss is %.17g and %.17g on one rank, the norm %.9g and %.9g", stages[i].words,
                     metrics.loss, one.loss, metrics.grad_norm, one.grad_norm);
        trainee_close(&t);
    }
}

static void recomputation_and_offloading_of_the_stream_change_no_bit(void **state) {
    (void)state;
    static const layout saving[] = {
        {1, MTP, " --bf16" WIDE},
        {2, LLAMA, " --fp16 --initial-loss-scale 4096" WIDE TP "2"},
    };
    run_saving_rows(saving, (int)(sizeof saving / sizeof *saving));
}

int main(int argc, char **argv) {
    mt_grid_start(&world, &argc, &argv);
    jobs_open();
    (void)run_layout_tests; // of the other suites
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_sums_are_nearer_to_those_of_fp32),
        cmocka_unit_test(layouts_train_to_within_two_percent_of_one_rank_in_bf16),
        cmocka_unit_test(stages_exchange_the_stream_and_its_gradient_unrounded),
        cmocka_unit_test(recomputation_and_offloading_of_the_stream_change_no_bit),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    references_free();
    mt_grid_stop(&world);
    return failures;
}
