/* Reads the whole tensors of a model that several ranks share, one after another by their Hugging Face names: weights,
 * or with "gradients" those of one training step.
 *
 *   make everything
 *   build/default/notes/examples/stream_tensors DIR weights >one
 *   mpirun -np 4 build/default/notes/examples/stream_tensors DIR weights tensor_model_parallel_size 2 \
 *       pipeline_model_parallel_size 2 >four
 *   diff one four
 *   mpirun -np 2 build/default/notes/examples/stream_tensors DIR gradients data_parallel_sharding_strategy
 * optim_grads_params
 *
 * DIR is a Hugging Face folder; options are those of ./train with underscores. Prints each tensor's name, shape and
 * norm. Rank 0 holds one tensor at a time. A stream can take the place of a folder between a training run and another
 * program: an inference server, a report, an optimizer of one's own.
 */
#include "data/options/options.h"
#include "data/options/option_reader.h"
#include "data/checkpoint/checkpoint_load.h"
#include "data/checkpoint/run_options.h"
#include "data/checkpoint/tensor_stream.h"

#include <math.h>
#include <string.h>

enum { TOKENS = 16, SEQUENCES = 4 };

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

/* Micro-batch `index` of this data-parallel rank: one sequence of some tokens. `context`: the model. */
static int fill(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const mt_model *model = context;
    const mt_group *data = &mt_model_grid(model)->data;
    int64_t sequence = data->rank + index * data->size, vocabulary = mt_model_options(model)->vocab_size;
    (void)error;
    batch->num_tokens = TOKENS, batch->num_spans = 1;
    batch->spans[0] = (mt_span){0, TOKENS, 0, TOKENS, true};
    for (int64_t i = 0; i < TOKENS; i++) {
        batch->tokens[i] = (int32_t)((sequence * 5 + i) % vocabulary);
        batch->labels[i] = (int32_t)((sequence * 5 + i + 1) % vocabulary);
        batch->positions[i] = (int32_t)i, batch->loss_mask[i] = 1, batch->token_index[i] = sequence * TOKENS + i;
    }
    return 0;
}

/* Prints the tensors of a stream, whose values are divided by `count`. */
static void print_tensors(mt_model *model, mt_streamed streamed, double count) {
    mt_error error;
    mt_tensor_stream *stream;
    mt_whole_tensor tensor;
    check(mt_tensor_stream_open(&stream, model, streamed, 0, &error), &error);
    while (mt_tensor_stream_next(stream, &tensor)) {
        double sum = 0;
        if (!tensor.values) continue; // this rank only sends
        for (int64_t i = 0; i < tensor.count; i++) sum += (double)tensor.values[i] * (double)tensor.values[i];
        printf("%-56s", tensor.name);
        for (int64_t i = 0; i < tensor.num_dims; i++) printf(" %lld", (long long)tensor.shape[i]);
        printf("  norm %.5g\n", sqrt(sum) / count);
    }
    mt_tensor_stream_close(stream);
}

int main(int argc, char **argv) {
    if (argc < 3 || argc % 2 == 0 || (strcmp(argv[2], "weights") != 0 && strcmp(argv[2], "gradients") != 0))
        mt_die("usage: stream_tensors DIR weights|gradients [OPTION VALUE]...");
    static const char *const settings[][2] = {
        {"device", "cpu"},          {"mock_data", "true"}, {"seq_length", "16"},     {"train_iters", "1"},
        {"global_batch_size", "4"}, {"lr", "1e-3"},        {"micro_batch_size", "1"}};
    mt_grid grid;
    mt_error error;
    mt_run_options options;
    mt_model *model;
    mt_run_state state = {0};
    mt_grid_start(&grid, &argc, &argv);
    mt_options_default(&options);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        check(mt_options_set(&options, settings[i][0], settings[i][1], &error), &error);
    for (int i = 3; i < argc; i += 2) check(mt_options_set(&options, argv[i], argv[i + 1], &error), &error);
    check(mt_options_set(&options, "load", argv[1], &error), &error);
    check(mt_options_read_shape(&options, &error), &error);
    check(mt_options_finish(&options, MT_PROGRAM_TRAIN, grid.world.size, &error), &error);
    check(mt_grid_build(&grid, &options.stack, &error), &error);
    if (!mt_backend_open(MT_DEVICE_CPU, &grid, &error)) mt_die("%s", error.text);

    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .train = true};
    check(mt_model_create(&model, &options.stack, &grid, &mt_cpu_ops, &plan, &error), &error);
    check(mt_checkpoint_load(model, &options, &state, argv[1], &error), &error);
    if (strcmp(argv[2], "weights") == 0) {
        print_tensors(model, MT_STREAM_WEIGHTS, 1);
    } else {
        mt_batch batch;
        mt_metrics metrics;
        mt_batch_alloc(&batch, TOKENS);
        check(mt_train_step(model, &state, SEQUENCES / grid.data.size, fill, model, &batch, &metrics, &error), &error);
        print_tensors(model, MT_STREAM_GRADIENTS, metrics.loss_count); // of the mean over tokens
        mt_batch_free(&batch);
    }
    mt_model_destroy(model);
    mt_options_free(&options);
    mt_grid_stop(&grid);
    return 0;
}
