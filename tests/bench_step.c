/* How fast a training step is, against what its matrix products alone need at the sgemm rate of the same run. The
 * shape is GPT-2 124M on 4 sequences of 64 tokens, with random weights and tokens.
 *
 *   usage: bench_step [OPTIONS OF train, such as --bf16 or another --hf-config]
 */
#include "../megatron.h"

#include <math.h>
#include <stdlib.h>
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#endif

enum { STEPS = 8, MATRIX = 2048, MAX_ARGUMENTS = 64 };

static int num_threads(void) {
#ifdef MT_HAVE_OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* Fills a micro-batch with random tokens; `context` is the options. */
static int random_tokens(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const mt_options *o = context;
    (void)error;
    batch->num_tokens = o->micro_batch_size * o->seq_length;
    batch->num_spans = o->micro_batch_size;
    for (int64_t t = 0; t < batch->num_tokens; t++) {
        uint32_t words[4];
        mt_philox(words, 1, (uint64_t)t, (uint64_t)index);
        batch->tokens[t] = (int32_t)(words[0] % (uint64_t)o->vocab_size);
        batch->labels[t] = (int32_t)(words[1] % (uint64_t)o->vocab_size);
        batch->loss_mask[t] = 1;
        batch->positions[t] = (int32_t)(t % o->seq_length);
        batch->token_index[t] = t;
    }
    for (int64_t s = 0; s < batch->num_spans; s++) {
        int64_t start = s * o->seq_length;
        batch->spans[s] = (mt_span){start, o->seq_length, start, o->seq_length, true};
    }
    return 0;
}

/* Operations of the matrix products with weights: those of mt_flops without attention's own. */
static double product_flops(const mt_options *o) {
    double tokens = (double)(o->global_batch_size * o->seq_length);
    double attention = (double)(o->num_layers * o->num_attention_heads * o->kv_channels * o->seq_length);
    return mt_flops(o, o->global_batch_size) - 6 * tokens * attention;
}

/* Seconds of the fastest step. */
static double step_seconds(mt_model *model, mt_options *o) {
    mt_run_state state = {0};
    mt_metrics metrics;
    mt_error error;
    mt_batch batch;
    double best = INFINITY;
    mt_batch_alloc(&batch, o->micro_batch_size * o->seq_length);
    for (int step = 0; step < STEPS; step++) {
        int64_t micro_batches = o->global_batch_size / o->micro_batch_size;
        if (mt_train_step(model, &state, micro_batches, random_tokens, o, &batch, &metrics, &error) != 0)
            mt_die("%s", error.text);
        best = fmin(best, metrics.seconds);
    }
    mt_batch_free(&batch);
    return best;
}

int main(int argc, char **argv) {
    // clang-format off
    char *arguments[MAX_ARGUMENTS] = {
        "train", "--hf-config", "data/configs/gpt2-124m.json", "--mock-data", "--train-iters", "100", "--lr", "1e-4",
        "--micro-batch-size", "4", "--seq-length", "64", "--hidden-dropout", "0", "--attention-dropout", "0"};
    // clang-format on
    int count = 16;
    for (int i = 1; i < argc && count < MAX_ARGUMENTS; i++) arguments[count++] = argv[i];
    mt_options o;
    mt_error error;
    if (mt_options_parse(&o, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&o, MT_PROGRAM_TRAIN, 1, &error) != 0)
        mt_die("%s", error.text);
    const mt_grid grid = {.world = {.name = "world", .size = 1}, .data = {.name = "data", .size = 1}};
    int64_t tokens = o.micro_batch_size * o.seq_length;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = o.seq_length, .train = true};
    mt_model *model;
    if (mt_model_create(&model, &o, &grid, &mt_cpu_ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);

    double rate = mt_cpu_matmul_rate(MATRIX), seconds = step_seconds(model, &o);
    rate = fmax(rate, mt_cpu_matmul_rate(MATRIX));
    double flops = product_flops(&o), floor = flops / rate;
    printf("training step, %.0fM parameters, %lld x %lld tokens, %s, %d threads: %.2f s; its matrix products, %.1f "
           "GFLOP, at the sgemm rate of %.0f GFLOP/s need %.2f s, so %.2f times that (goal: 1.5)\n",
           (double)mt_num_parameters(&o) / 1e6, (long long)o.global_batch_size, (long long)o.seq_length,
           o.bf16 ? "bf16" : "fp32", num_threads(), seconds, flops * 1e-9, rate * 1e-9, floor, seconds / floor);
    mt_model_destroy(model);
    mt_options_free(&o);
    return 0;
}
