/* A loss of one's own, and the gradient of a parameter: the focal loss (Lin et al., 2017), (1 - p)^2 times -log p, for
 * the probability p of each label. It is a function of the tokens' log-probabilities, on the host in float64; the
 * backward through the model follows from its derivatives.
 *
 *   make everything && build/default/notes/examples/focal_loss
 *
 * It needs no other file than megatron.c: cc -std=c11 -I. notes/examples/focal_loss.c megatron.c -lm
 *
 * Prints some gradients beside finite differences of the loss, and then the loss of a model that learns to count. Its
 * metric is the share of labels with a probability above one half. Ends with status 1 if a gradient is wrong.
 */
#include "megatron.h"

enum { VOCABULARY = 64, SEQ_LENGTH = 16, SEQUENCES = 4, TOKENS = SEQUENCES * SEQ_LENGTH };

/* `t` has whole sequences, whose tokens count where the mask is not 0. Sums are added to; so are derivatives. */
static void focal(const void *config, const mt_loss_tokens *t, mt_loss_sums *sums) {
    const double gamma = *(const double *)config;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        int64_t first = t->sequences[s].q_start, end = first + t->sequences[s].q_len;
        for (int64_t i = first; i < end; i++) {
            if (t->mask[i] == 0) continue;
            double logp = t->logp[i], p = exp(logp), rest = -expm1(logp); // rest = 1 - p
            sums->loss += -pow(rest, gamma) * logp;
            sums->count += 1;
            sums->metrics[0] += p > 0.5;
            t->dlogp[i] += gamma * pow(rest, gamma - 1) * p * logp - pow(rest, gamma);
        }
    }
}

/* The same micro-batch in every step: each sequence begins at some number and goes up by one. */
static int fill(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)context, (void)index, (void)error;
    batch->num_tokens = TOKENS;
    batch->num_spans = SEQUENCES;
    for (int64_t s = 0; s < SEQUENCES; s++)
        batch->spans[s] = (mt_span){s * SEQ_LENGTH, SEQ_LENGTH, s * SEQ_LENGTH, SEQ_LENGTH, true};
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t position = t % SEQ_LENGTH, first = t / SEQ_LENGTH * 37;
        batch->tokens[t] = (int32_t)((first + position) % VOCABULARY);
        batch->labels[t] = (int32_t)((first + position + 1) % VOCABULARY);
        batch->positions[t] = (int32_t)position;
        batch->loss_mask[t] = 1;
        batch->token_index[t] = t;
    }
    return 0;
}

/* A training step with this learning rate; with 0 it only computes the loss and its gradient. */
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
    options.num_iterations = options.train_iters = 60;
    options.lr = lr;
    options.lr_decay_style = MT_LR_CONSTANT;
    return options;
}

/* The model keeps the addresses of its options and its loss. */
static mt_model *create(const mt_options *options, const mt_loss *loss) {
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    plan.loss = loss;
    mt_model *model;
    mt_error error;
    if (mt_model_create(&model, options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);
    return model;
}

/* Compares the largest gradient of some parameters with the change of the loss. After a step, a bucket's `grads` are
 * the derivatives of the sum over tokens, which the optimizer divides by the count. Parameters and gradients of a model
 * on the CPU are plain arrays. */
static bool check_gradients(const mt_loss *loss, mt_batch *batch) {
    mt_options options = choose_options(0);
    mt_model *model = create(&options, loss);
    mt_run_state state = {0};
    int64_t num_params, num_buckets;
    const mt_param *params = mt_model_params(model, &num_params);
    double worst = 0;
    for (int64_t i = 0; i < num_params; i += 5) {
        double count = step(model, &state, batch).loss_count;
        const mt_bucket *bucket = &mt_model_buckets(model, &num_buckets)[params[i].bucket];
        const float *grads = bucket->grads + params[i].offset;
        int64_t at = 0;
        for (int64_t k = 0; k < params[i].rows * params[i].cols; k++)
            if (fabsf(grads[k]) > fabsf(grads[at])) at = k;
        double gradient = (double)grads[at] / count;
        float *w = (float *)bucket->params + params[i].offset + at, kept = *w, change = 1e-2F;
        *w = kept + change;
        double above = step(model, &state, batch).loss;
        *w = kept - change;
        double below = step(model, &state, batch).loss, difference = (above - below) / (2 * (double)change);
        *w = kept;
        printf("%-42s gradient %8.5f  finite difference %8.5f\n", params[i].hf_name, gradient, difference);
        worst = fmax(worst, fabs(gradient - difference) / fabs(gradient));
    }
    mt_model_destroy(model);
    printf("largest relative distance %.1e: %s\n", worst, worst < 0.05 ? "ok" : "wrong");
    return worst < 0.05;
}

int main(void) {
    static const double gamma = 2;
    static const mt_loss_metric metrics[] = {{"known", 0, -1}, {0}}; // metrics[0] / count
    const mt_loss loss = {.host = focal, .config = &gamma, .metrics = metrics};
    mt_batch batch;
    mt_batch_alloc(&batch, TOKENS);
    bool right = check_gradients(&loss, &batch);

    mt_options options = choose_options(1e-2);
    mt_model *model = create(&options, &loss);
    mt_run_state state = {0};
    for (int i = 1; i <= 60; i++) {
        mt_metrics m = step(model, &state, &batch);
        if (i == 1 || i % 20 == 0)
            printf("step %2d  loss %.4f  known %3.0f%%\n", i, m.loss, 100 * m.loss_metrics[0] / m.loss_count);
    }
    mt_model_destroy(model);
    mt_batch_free(&batch);
    return right ? 0 : 1;
}
