/* Trains a tiny Llama on arrays in memory: no file, no command line, no data option. The model learns to count: each
 * sequence begins at some number and goes up by one modulo 64.
 *
 *   make everything && build/default/notes/examples/train_from_arrays
 *
 * It needs no other file than megatron.c: cc -std=c11 -I. notes/examples/train_from_arrays.c megatron.c -lm
 *
 * Prints the loss, which falls from that of a guess, log 64 = 4.16, to almost 0. Chapter 5 explains the step.
 */
#include "megatron.h"

enum { VOCABULARY = 64, SEQ_LENGTH = 16, SEQUENCES = 512, MICRO_BATCH = 4 };

static int32_t corpus[SEQUENCES][SEQ_LENGTH + 1]; // one token more: the label of the last position

/* mt_train_step calls this for each micro-batch. `context` is the caller's: here the number of sequences used so far.
 */
static int next_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    int64_t first = *(const int64_t *)context + index * MICRO_BATCH;
    if (first + MICRO_BATCH > SEQUENCES) return mt_error_set(error, "the corpus ends after %d sequences", SEQUENCES);
    batch->num_tokens = MICRO_BATCH * SEQ_LENGTH;
    batch->num_spans = MICRO_BATCH;
    for (int64_t s = 0; s < MICRO_BATCH; s++) {
        /* A span says which tokens see which: queries [start, start + length) see the same keys, causally. */
        batch->spans[s] = (mt_span){s * SEQ_LENGTH, SEQ_LENGTH, s * SEQ_LENGTH, SEQ_LENGTH, true};
        for (int64_t i = 0; i < SEQ_LENGTH; i++) {
            int64_t t = s * SEQ_LENGTH + i;
            batch->tokens[t] = corpus[first + s][i];
            batch->labels[t] = corpus[first + s][i + 1];
            batch->positions[t] = (int32_t)i;
            batch->loss_mask[t] = 1;
            batch->token_index[t] = (first + s) * SEQ_LENGTH + i; // names the token in the run, for dropout
        }
    }
    return 0;
}

/* A small Llama. The options have Megatron's names; the others have their defaults. */
static mt_options choose_options(void) {
    mt_options options = mt_options_plain(2, 32, 4, VOCABULARY, SEQ_LENGTH); // layers, hidden size, heads
    options.swiglu = options.untie_embeddings_and_output_weights = true;
    options.normalization = MT_RMSNORM;
    options.position_embedding_type = MT_POSITION_ROPE;
    options.add_qkv_bias = options.attention_output_bias = options.mlp_bias = false;
    options.micro_batch_size = MICRO_BATCH;
    options.global_batch_size = 16;
    options.num_iterations = options.train_iters = 30;
    options.lr = 1e-2;
    options.lr_decay_style = MT_LR_CONSTANT;
    return options;
}

int main(void) {
    for (int s = 0; s < SEQUENCES; s++)
        for (int i = 0; i <= SEQ_LENGTH; i++) corpus[s][i] = (s * 37 + i) % VOCABULARY;

    mt_options options = choose_options();
    mt_error error;

    /* The plan says for how many tokens memory is laid out. Nothing is allocated in a step. */
    int64_t tokens = MICRO_BATCH * SEQ_LENGTH;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = SEQ_LENGTH, .train = true};
    mt_model *model;
    if (mt_model_create(&model, &options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model); // the initial weights, drawn from options.seed

    mt_batch batch;
    mt_batch_alloc(&batch, tokens);
    mt_run_state state = {0};
    mt_metrics metrics;
    for (int64_t step = 1; step <= options.num_iterations; step++) {
        int64_t consumed = state.consumed_train_samples, micro_batches = options.global_batch_size / MICRO_BATCH;
        if (mt_train_step(model, &state, micro_batches, next_micro_batch, &consumed, &batch, &metrics, &error) != 0)
            mt_die("%s", error.text);
        if (step == 1 || step % 10 == 0)
            printf("step %2lld  loss %.4f  grad norm %.3f\n", (long long)step, metrics.loss, metrics.grad_norm);
    }
    mt_batch_free(&batch);
    mt_model_destroy(model);
    return 0;
}
