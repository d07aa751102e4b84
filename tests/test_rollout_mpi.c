/* Samples for reinforcement learning between training steps, on four ranks in many layouts: tokens, log-probabilities
 * and the losses of the steps are those of one rank. Run by mpirun. */
// Sections of megatron.c: §16 §10c
#include "../data/tokens/prompts.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/generate.h"
#include "../data/checkpoint/run_options.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LENGTH = 32, STEPS = 3, PROMPTS = 5, EACH = 3, SAMPLES = PROMPTS * EACH, NEW_TOKENS = 12, BATCH = 8 };

static mt_grid world;
static bool trains = true;

#define DENSE   "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu "
#define EXPERTS DENSE "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "

/* Results of a run. */
typedef struct result {
    double losses[STEPS];
    int64_t num_tokens[STEPS][SAMPLES];
    int32_t tokens[STEPS][SAMPLES][LENGTH];
    float logps[STEPS][SAMPLES][NEW_TOKENS], sampled_logps[STEPS][SAMPLES][NEW_TOKENS];
    mt_finish finish[STEPS][SAMPLES];
} result;

static int make_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const mt_run_state *state = context;
    (void)error;
    int64_t sample = (state->iteration * BATCH / world.data.size + index) * world.data.size + world.data.rank;
    batch->num_tokens = LENGTH, batch->num_spans = 1;
    batch->spans[0] = (mt_span){0, LENGTH, 0, LENGTH, true};
    for (int32_t i = 0; i < LENGTH; i++) {
        batch->tokens[i] = (int32_t)((sample * 7 + i * 11) % 90), batch->labels[i] = (batch->tokens[i] + 11) % 90;
        batch->positions[i] = i, batch->token_index[i] = sample * LENGTH + i, batch->loss_mask[i] = 1;
    }
    return 0;
}

static void generate(mt_model *model, int step, result *r) {
    int32_t prompts[PROMPTS][20];
    const int32_t *lists[PROMPTS];
    int64_t counts[PROMPTS];
    mt_error error;
    for (int32_t p = 0; p < PROMPTS; p++) {
        lists[p] = prompts[p], counts[p] = 1 + 4 * p;
        for (int32_t i = 0; i < counts[p]; i++) prompts[p][i] = (i * 29 + (p < 3 ? 3 : 5)) % 90;
    }
    mt_rollout rollout = {.num_return_sequences = EACH, .max_new_tokens = NEW_TOKENS, .first_id = step * SAMPLES};
    rollout.sampling = (mt_sampling){.temperature = 0.9, .top_p = 0.99, .seed = 4};
    rollout.stops = (mt_stops){.ids = {17, 30, 31, 60, 77}, .count = 5};
    mt_sequence samples[SAMPLES];
    if (mt_rollout_generate(model, &rollout, lists, counts, PROMPTS, samples, &error) != 0) fail_msg("%s", error.text);
    for (int s = 0; s < SAMPLES; s++) {
        int64_t count = samples[s].num_tokens - samples[s].num_prompt;
        r->num_tokens[step][s] = samples[s].num_tokens, r->finish[step][s] = samples[s].finish;
        memcpy(r->tokens[step][s], samples[s].tokens, (size_t)samples[s].num_tokens * 4);
        memcpy(r->logps[step][s], samples[s].logps, (size_t)count * 4);
        memcpy(r->sampled_logps[step][s], samples[s].sampled_logps, (size_t)count * 4);
        mt_sequence_end(&samples[s]);
    }
}

/* Trains, unless the model is to generate alone, and generates after every step; on several ranks the cache has no
 * memory during the steps. */
static void run(result *r, const char *model_words, const char *layout, int ranks) {
    char line[1024], *arguments[64];
    int count = 0;
    mt_error error;
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    mt_metrics metrics;
    mt_run_state state = {0};
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 1 --global-batch-size %d --train-iters 9 --lr 1e-2 "
             "--adam-eps 1e-2 --make-vocab-size-divisible-by 2 " // every tensor rank has tokens
             "--device cpu --vocab-size 90 --position-embedding-type rope --init-method-std 0.2 %s %s",
             LENGTH, BATCH, model_words, layout);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, ranks, &error) != 0)
        mt_die("%s: %s", layout, error.text);
    mt_grid started = world;
    if (ranks == 1) world = mt_grid_of_one;
    if (ranks > 1 && mt_grid_build(&world, &options.stack, &error) != 0) mt_die("%s: %s", layout, error.text);
    mt_model_plan plan = {.max_tokens = LENGTH, .max_position = LENGTH, .page_rows = 8, .train = trains};
    plan.max_tokens = plan.max_logits = mt_rank_tokens(&options.stack, LENGTH);
    mt_plan_generation(&plan, 4, LENGTH, 72); // four at once where they find pages
    if (mt_model_create(&model, &options.stack, &world, &mt_cpu_ops, &plan, &error) != 0)
        mt_die("%s: %s", layout, error.text);
    mt_model_init(model);
    mt_batch_alloc(&batch, LENGTH);
    for (int step = 0; step < STEPS; step++) {
        if (ranks > 1 && mt_model_rest(model, 1 << MT_PART_CACHE, &error) != 0) mt_die("%s: %s", layout, error.text);
        metrics.loss = 0;
        if (trains &&
            mt_train_step(model, &state, BATCH / world.data.size, make_batch, &state, &batch, &metrics, &error) != 0)
            mt_die("%s: %s", layout, error.text);
        r->losses[step] = metrics.loss;
        if (mt_model_wake(model, 1 << MT_PART_CACHE, &error) != 0) mt_die("%s: %s", layout, error.text);
        generate(model, step, r);
    }
    mt_batch_free(&batch);
    mt_model_destroy(model);
    mt_options_free(&options);
    if (ranks > 1) mt_grid_clear(&world);
    if (ranks == 1) world = started;
}

/* Probabilities that are equal up to their rounding have no order, and a draw between them takes either: one of all
 * samples may part from that of one rank. Up to there it is the same. */
static void compare(const result *r, const result *one, const char *layout) {
    int parted = 0;
    for (int step = 0; step < STEPS; step++) {
        if (!(fabs(r->losses[step] - one->losses[step]) <= 1e-5 * one->losses[step]))
            fail_msg("%s: loss %d is %.8f, on one rank %.8f", layout, step, r->losses[step], one->losses[step]);
        for (int s = 0; s < SAMPLES; s++) {
            int64_t count = one->num_tokens[step][s], num_prompt = 1 + 4 * (s / EACH), same = 0;
            while (same < count && same < r->num_tokens[step][s] &&
                   r->tokens[step][s][same] == one->tokens[step][s][same])
                same++;
            bool parts = same < count && same < r->num_tokens[step][s];
            bool ends = r->num_tokens[step][s] == count && r->finish[step][s] == one->finish[step][s];
            if (same < num_prompt || (!parts && !ends) || (parted += parts) > 1)
                fail_msg("%s: sample %d of step %d differs from one rank", layout, s, step);
            for (int64_t i = 0; i < same - num_prompt; i++)
                if (!(fabsf(r->logps[step][s][i] - one->logps[step][s][i]) <= 1e-4f) ||
                    !(fabsf(r->sampled_logps[step][s][i] - one->sampled_logps[step][s][i]) <= 1e-4f))
                    fail_msg("%s: log-probability %d of sample %d, step %d: %.7f, on one rank %.7f", layout, (int)i, s,
                             step, r->logps[step][s][i], one->logps[step][s][i]);
        }
    }
}

static void run_layouts(const char *model_words, const char *const *layouts, int count) {
    static result one, r;
    int64_t stopped = 0, changed = 0;
    run(&one, model_words, "", 1);
    for (int s = 0; s < SAMPLES; s++) {
        stopped += one.finish[0][s] == MT_FINISH_STOP;
        changed += memcmp(one.tokens[0][s], one.tokens[1][s], sizeof one.tokens[0][s]) != 0;
    }
    assert_in_range(stopped, 1, SAMPLES - 1);
    assert_in_range(changed, SAMPLES / 2, SAMPLES); // other weights, and other draws
    for (int i = 0; i < count; i++) {
        run(&r, model_words, layouts[i], world.world.size);
        compare(&r, &one, layouts[i]);
    }
}

static void dense_models_generate_alike_on_all_layouts(void **state) {
    (void)state;
    static const char *const layouts[] = {
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    };
    run_layouts(DENSE, layouts, sizeof layouts / sizeof *layouts);
}

static void experts_generate_alike_on_all_layouts(void **state) {
    (void)state;
    static const char *const layouts[] = {
        "--expert-model-parallel-size 4",
        "--expert-model-parallel-size 2 --use-distributed-optimizer --moe-token-dispatcher-type flex",
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--expert-model-parallel-size 2 --context-parallel-size 2",
        "--expert-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params",
    };
    run_layouts(EXPERTS, layouts, sizeof layouts / sizeof *layouts);
}

/* The last stage has no experts, and goes on as long as the replica that the first one exchanges tokens with. */
static void stages_without_experts_wait_for_the_others(void **state) {
    (void)state;
    static const char *const layouts[] = {"--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"};
    run_layouts(EXPERTS "--moe-layer-freq ([1]*2+[0]*2) ", layouts, 1);
}

/* Norms of all heads exchange sums of tensor-parallel ranks, in memory that a model has without training too. */
static void models_without_training_generate_alike(void **state) {
    (void)state;
    static const char *const layouts[] = {"--tensor-model-parallel-size 2",
                                          "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"};
    trains = false;
    run_layouts(DENSE "--qk-layernorm --qk-layernorm-all-heads --attention-output-gate ", layouts, 2);
    trains = true;
}

int main(int argc, char **argv) {
    mt_grid_start(&world, &argc, &argv);
    if (!world.world.comm) mt_die("start me with mpirun");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_models_generate_alike_on_all_layouts),
        cmocka_unit_test(experts_generate_alike_on_all_layouts),
        cmocka_unit_test(stages_without_experts_wait_for_the_others),
        cmocka_unit_test(models_without_training_generate_alike),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
