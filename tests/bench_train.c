/* bench_train.c: the time of a training step of GPT-2 124M on 4 x 64 tokens in fp32, relative to the time of its matrix
 * products at the rate of one large product in the same run.
 *
 *   usage: bench_train [OPTIONS OF train, such as --bf16 or another --hf-config]
 */
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/profile.h"

#include <stdlib.h>

enum { SEQUENCES = 4, SEQ_LENGTH = 64, STEPS = 7, MAX_ARGUMENTS = 64 };

static int random_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)index, (void)error;
    const mt_options *options = context;
    batch->num_tokens = SEQUENCES * SEQ_LENGTH;
    batch->num_spans = SEQUENCES;
    for (int64_t s = 0; s < SEQUENCES; s++)
        batch->spans[s] = (mt_span){s * SEQ_LENGTH, SEQ_LENGTH, s * SEQ_LENGTH, SEQ_LENGTH, true};
    for (int64_t t = 0; t < batch->num_tokens; t++) {
        uint32_t words[4];
        mt_philox(words, 1, (uint64_t)t, 0);
        batch->tokens[t] = (int32_t)(words[0] % (uint64_t)options->vocab_size);
        batch->labels[t] = (int32_t)(words[1] % (uint64_t)options->vocab_size);
        batch->positions[t] = (int32_t)(t % SEQ_LENGTH);
        batch->loss_mask[t] = 1;
        batch->token_index[t] = t;
    }
    return 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* FLOPs of the matrix products of a step: 6 per weight of the linear layers and token. */
static double product_flops(const mt_options *o) {
    mt_param *params;
    int64_t count = mt_params_build(&params, o, NULL);
    double weights = 0;
    for (int64_t i = 0; i < count; i++) {
        bool is_table = params[i].role == MT_POSITION_EMBEDDING ||
                        (params[i].role == MT_WORD_EMBEDDING && o->untie_embeddings_and_output_weights);
        if (!params[i].is_vector && !is_table) weights += (double)params[i].rows * (double)params[i].cols;
    }
    free(params);
    return 6 * weights * SEQUENCES * SEQ_LENGTH;
}

int main(int argc, char **argv) {
    static char *defaults[] = {"train",
                               "--hf-config",
                               "data/configs/gpt2-124m.json",
                               "--mock-data",
                               "--train-iters",
                               "8",
                               "--lr",
                               "1e-4",
                               "--seq-length",
                               "64",
                               "--micro-batch-size",
                               "4",
                               "--hidden-dropout",
                               "0",
                               "--attention-dropout",
                               "0",
                               "--device",
                               "cpu"};
    char *arguments[MAX_ARGUMENTS];
    int count = 0;
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++) arguments[count++] = defaults[i];
    for (int i = 1; i < argc && count < MAX_ARGUMENTS; i++) arguments[count++] = argv[i];
    mt_run_options options;
    mt_error error;
    mt_grid grid = mt_grid_of_one;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        mt_die("%s", error.text);

    int64_t tokens = SEQUENCES * SEQ_LENGTH;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = SEQ_LENGTH, .train = true};
    mt_model *model;
    mt_batch batch;
    mt_run_state state = {0};
    mt_metrics metrics;
    double seconds[STEPS], before = mt_cpu_matmul_rate(2048);
    if (mt_model_create(&model, &options.stack, &grid, &mt_cpu_ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);
    mt_batch_alloc(&batch, tokens);
    for (int i = -1; i < STEPS; i++) { // the first step touches every page: not timed
        if (mt_train_step(model, &state, 1, random_micro_batch, &options, &batch, &metrics, &error) != 0)
            mt_die("%s", error.text);
        if (i >= 0) seconds[i] = metrics.seconds;
    }
    double after = mt_cpu_matmul_rate(2048), rate = before > after ? before : after,
           flops = product_flops(&options.stack);
    qsort(seconds, STEPS, sizeof *seconds, by_value);
    printf("training step, %d x %d tokens, %s\n", SEQUENCES, SEQ_LENGTH, options.stack.bf16 ? "bf16" : "fp32");
    printf("  sgemm at 2048^3                %8.1f GFLOP/s\n", rate * 1e-9);
    printf("  matrix products of a step      %8.1f GFLOP, %.3f s at that rate\n", flops * 1e-9, flops / rate);
    printf("  step: median, best             %8.3f s, %.3f s\n", seconds[STEPS / 2], seconds[0]);
    printf("  step / its products            %8.2f times, best %.2f\n", seconds[STEPS / 2] * rate / flops,
           seconds[0] * rate / flops);
    mt_batch_free(&batch);
    mt_model_destroy(model);
    mt_options_free(&options);
    return 0;
}
