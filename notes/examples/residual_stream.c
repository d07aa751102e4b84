/* Prints the size of the residual stream before every norm of a model's forward, to find the first layer in which two
 * runs differ: another layout, another precision, another folder.
 *
 *   make everything
 *   build/default/notes/examples/residual_stream DIR [OPTION VALUE]... >one
 *   mpirun -np 2 build/default/notes/examples/residual_stream DIR tensor_model_parallel_size 2 >two
 *   diff one two
 *
 * DIR is a Hugging Face folder; options are those of ./infer with underscores. The operations are those of the CPU,
 * with one replaced by a function that looks at its operand first. Chapter 27 uses it.
 */
#include "data/options/option_reader.h"
#include "data/options/options.h"
#include "data/checkpoint/checkpoint_load.h"
#include "data/checkpoint/run_options.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 16 };

static struct {
    int64_t hidden_size, num_layers, count;
    bool prints;
} stream;

/* Root of the mean square, and largest magnitude, of a norm's input; norms of heads and latents are left out. */
static void report(const mt_norm_args *a, mt_dtype dtype) {
    if (a->C != stream.hidden_size || a->H != 1) return;
    double sum = 0, largest = 0;
    for (int64_t i = 0; i < a->T * a->C; i++) {
        uint32_t bits = dtype == MT_F32 ? 0 : (uint32_t)((const uint16_t *)a->x)[i] << 16; // bf16: the high half
        float value;
        memcpy(&value, dtype == MT_F32 ? (const void *)((const float *)a->x + i) : &bits, sizeof value);
        sum += (double)value * (double)value;
        largest = fmax(largest, fabs((double)value));
    }
    char name[32] = "final";
    if (stream.count < 2 * stream.num_layers)
        snprintf(name, sizeof name, "%lld.%s", (long long)stream.count / 2, stream.count % 2 ? "mlp" : "attention");
    if (stream.prints) printf("%-14s rms %.6e largest %.6e\n", name, sqrt(sum / (double)(a->T * a->C)), largest);
    stream.count++;
}

static void rmsnorm(const mt_norm_args *a, mt_dtype dtype, mt_stream *on) {
    report(a, dtype);
    mt_cpu_ops.rmsnorm_forward(a, dtype, on);
}

static void layernorm(const mt_norm_args *a, mt_dtype dtype, mt_stream *on) {
    report(a, dtype);
    mt_cpu_ops.layernorm_forward(a, dtype, on);
}

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

int main(int argc, char **argv) {
    if (argc < 2 || argc % 2 != 0) mt_die("usage: residual_stream DIR [OPTION VALUE]...");
    mt_grid grid;
    mt_error error;
    mt_run_options options;
    mt_model *model;
    mt_run_state ignored;
    mt_batch batch;
    mt_grid_start(&grid, &argc, &argv);
    mt_options_default(&options);
    for (int i = 2; i < argc; i += 2) check(mt_options_set(&options, argv[i], argv[i + 1], &error), &error);
    check(mt_options_set(&options, "device", "cpu", &error), &error);
    check(mt_options_set(&options, "load", argv[1], &error), &error);
    check(mt_options_read_shape(&options, &error), &error);
    check(mt_options_finish(&options, MT_PROGRAM_INFER, grid.world.size, &error), &error);
    check(mt_grid_build(&grid, &options.stack, &error), &error);
    if (!mt_backend_open(MT_DEVICE_CPU, &grid, &error)) mt_die("%s", error.text);

    mt_ops ops = mt_cpu_ops;
    ops.rmsnorm_forward = rmsnorm, ops.layernorm_forward = layernorm;
    ops.residual_norm_forward = NULL; // separate operations
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS};
    check(mt_model_create(&model, &options.stack, &grid, &ops, &plan, &error), &error);
    check(mt_checkpoint_load(model, &options, &ignored, argv[1], &error), &error);
    stream.hidden_size = options.stack.hidden_size, stream.num_layers = options.stack.num_layers;
    stream.prints = grid.world.rank == 0;

    mt_batch_alloc(&batch, TOKENS);
    for (int t = 0; t < TOKENS; t++) {
        batch.tokens[t] = batch.labels[t] = (int32_t)(1 + t % (options.stack.vocab_size - 1));
        batch.positions[t] = t, batch.token_index[t] = t, batch.loss_mask[t] = 1;
    }
    batch.spans[0] = (mt_span){0, TOKENS, 0, TOKENS, true};
    batch.num_tokens = TOKENS, batch.num_spans = 1;
    mt_model_forward(model, &batch, false);

    mt_batch_free(&batch);
    mt_model_destroy(model);
    mt_options_free(&options);
    mt_grid_stop(&grid);
    return 0;
}
