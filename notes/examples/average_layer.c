/* A kind of layer of one's own: attention without scores. Each token gets the plain average of the values of the tokens
 * that it sees. A model calls its mixer through a table of operations, so a program can put functions of its own there;
 * parameters, gradients, optimizer, checkpoints and ranks stay the library's.
 *
 *   make everything && build/default/notes/examples/average_layer
 *
 * It needs no other file than megatron.c: cc -std=c11 -I. notes/examples/average_layer.c megatron.c -lm
 *
 * Prints some gradients beside finite differences of the loss, those of queries and keys, which are 0, and the loss of
 * a model that learns which token its sequence began with, beside attention's. Ends with status 1 if a gradient is
 * wrong. A kind with parameters of its own is a row of a table in megatron.c: notes/extending.md,
 * notes/extensions/mixer.patch.
 */
#include "megatron.h"

#include <math.h>
#include <string.h>

enum { VOCABULARY = 32, SEQ_LENGTH = 16, SEQUENCES = 8, TOKENS = SEQUENCES * SEQ_LENGTH, STEPS = 60 };

/* The row of token i and head h of a matrix of heads of `size` channels. */
static int64_t at(int64_t i, int64_t stride, int64_t h, int64_t size) {
    return i * stride + h * size;
}

/* Keys that query i of a causal span sees, from the span's first one. */
static int64_t seen(mt_span span, int64_t i) {
    return span.causal ? span.k_len - span.q_len + i + 1 : span.k_len;
}

/* out[Tq, H, Dv]: the mean of v over the keys that a query sees. lse is what softmax's backward reads; this needs none.
 */
static void average_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    const float *v = a->v;
    float *out = a->out;
    int64_t share = a->num_heads / a->num_groups; // query heads of a head of values
    (void)stream;
    MT_CHECK(dtype == MT_F32 && a->window == 0);
    for (int64_t s = 0; s < a->spans.count; s++) {
        mt_span span = a->spans.host[s];
        for (int64_t h = 0; h < a->num_heads; h++)
            for (int64_t i = 0; i < span.q_len; i++)
                for (int64_t c = 0; c < a->value_size; c++) {
                    double sum = 0;
                    for (int64_t j = 0; j < seen(span, i); j++)
                        sum += (double)v[at(span.k_start + j, a->v_stride, h / share, a->value_size) + c];
                    out[at(span.q_start + i, a->out_stride, h, a->value_size) + c] =
                        (float)(sum / (double)seen(span, i));
                }
    }
}

/* A key gets its share of the gradient of every query that sees it. Queries and keys have no effect: 0. */
static void average_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    const float *dout = a->dout;
    float *dq = a->dq, *dk = a->dk, *dv = a->dv;
    int64_t share = a->num_heads / a->num_groups, D = a->head_size;
    (void)dtype, (void)stream;
    for (int64_t s = 0; s < a->spans.count; s++) {
        mt_span span = a->spans.host[s];
        for (int64_t i = 0; i < span.q_len; i++)
            memset(dq + at(span.q_start + i, a->q_stride, 0, D), 0, (size_t)(a->num_heads * D) * sizeof *dq);
        for (int64_t j = 0; j < span.k_len; j++)
            memset(dk + at(span.k_start + j, a->k_stride, 0, D), 0, (size_t)(a->num_groups * D) * sizeof *dk);
        for (int64_t g = 0; g < a->num_groups; g++)
            for (int64_t j = 0; j < span.k_len; j++)
                for (int64_t c = 0; c < a->value_size; c++) {
                    double sum = 0;
                    for (int64_t i = 0; i < span.q_len; i++)
                        for (int64_t h = g * share; h < (g + 1) * share && j < seen(span, i); h++)
                            sum += (double)dout[at(span.q_start + i, a->out_stride, h, a->value_size) + c] /
                                   (double)seen(span, i);
                    dv[at(span.k_start + j, a->v_stride, g, a->value_size) + c] = (float)sum;
                }
    }
}

/* The same micro-batch in every step: sequences that count up, and labels that name the first token. */
static int fill(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    batch->num_tokens = TOKENS, batch->num_spans = SEQUENCES;
    for (int64_t s = 0; s < SEQUENCES; s++)
        batch->spans[s] = (mt_span){s * SEQ_LENGTH, SEQ_LENGTH, s * SEQ_LENGTH, SEQ_LENGTH, true};
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t position = t % SEQ_LENGTH, first = t / SEQ_LENGTH * 11;
        batch->tokens[t] = (int32_t)((first + 3 * position) % VOCABULARY);
        batch->labels[t] = (int32_t)(first % VOCABULARY);
        batch->positions[t] = (int32_t)position;
        batch->loss_mask[t] = 1, batch->token_index[t] = t;
    }
    return 0;
}

/* A training step; with a learning rate of 0 it only computes the loss and its gradient. */
static mt_metrics step(mt_model *model, mt_run_state *state, mt_batch *batch) {
    mt_metrics metrics;
    mt_error error;
    if (mt_train_step(model, state, 1, fill, NULL, batch, &metrics, &error) != 0) mt_die("%s", error.text);
    return metrics;
}

static mt_options choose_options(double lr) {
    mt_options options = mt_options_plain(2, 32, 4, VOCABULARY, SEQ_LENGTH); // layers, hidden size, heads
    options.hidden_dropout = options.attention_dropout = 0;
    options.micro_batch_size = options.global_batch_size = SEQUENCES;
    options.num_iterations = options.train_iters = STEPS;
    options.lr = lr;
    options.lr_decay_style = MT_LR_CONSTANT;
    return options;
}

/* The model keeps the addresses of its options and its operations. */
static mt_model *create(const mt_options *options, const mt_ops *ops) {
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    mt_model *model;
    mt_error error;
    if (mt_model_create(&model, options, &mt_grid_of_one, ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);
    return model;
}

/* The largest gradient of every parameter beside the change of the loss. */
static bool check_gradients(const mt_ops *ops, mt_batch *batch) {
    mt_options options = choose_options(0);
    mt_model *model = create(&options, ops);
    mt_run_state state = {0};
    int64_t num_params, num_buckets;
    const mt_param *params = mt_model_params(model, &num_params);
    double worst = 0;
    for (int64_t i = 0; i < num_params; i++) {
        double count = step(model, &state, batch).loss_count;
        const mt_bucket *bucket = &mt_model_buckets(model, &num_buckets)[params[i].bucket];
        const float *grads = bucket->grads + params[i].offset;
        bool is_query = strstr(params[i].hf_name, "q_proj") || strstr(params[i].hf_name, "k_proj");
        int64_t largest = 0;
        for (int64_t k = 0; k < params[i].rows * params[i].cols; k++)
            if (fabsf(grads[k]) > fabsf(grads[largest])) largest = k;
        double gradient = (double)grads[largest] / count;
        float *w = (float *)bucket->params + params[i].offset + largest, kept = *w, change = 1e-2F;
        *w = kept + change;
        double above = step(model, &state, batch).loss;
        *w = kept - change;
        double below = step(model, &state, batch).loss, difference = (above - below) / (2 * (double)change);
        *w = kept;
        if (i % 7 == 0 || is_query)
            printf("%-42s gradient %9.6f  finite difference %9.6f\n", params[i].hf_name, gradient, difference);
        if (is_query)
            worst = fmax(worst, gradient == 0 && difference == 0 ? 0 : 1);
        else
            worst = fmax(worst, fabs(gradient - difference) / fabs(gradient));
    }
    mt_model_destroy(model);
    printf("largest relative distance %.1e: %s\n", worst, worst < 0.05 ? "ok" : "wrong");
    return worst < 0.05;
}

static void train(const char *name, const mt_ops *ops, mt_batch *batch) {
    mt_options options = choose_options(5e-3);
    mt_model *model = create(&options, ops);
    mt_run_state state = {0};
    for (int i = 1; i <= STEPS; i++) {
        mt_metrics m = step(model, &state, batch);
        if (i == 1 || i == STEPS) printf("%-9s step %2d  loss %.4f\n", name, i, m.loss);
    }
    mt_model_destroy(model);
}

int main(void) {
    mt_ops ops = mt_cpu_ops;
    ops.attention_forward = average_forward;
    ops.attention_backward = average_backward;
    mt_batch batch;
    mt_batch_alloc(&batch, TOKENS);
    bool right = check_gradients(&ops, &batch);
    train("average", &ops, &batch);
    train("attention", &mt_cpu_ops, &batch);
    mt_batch_free(&batch);
    return right ? 0 : 1;
}
