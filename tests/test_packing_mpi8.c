/* test_packing_mpi8.c: sequences of any length, several in a micro-batch and micro-batches of different lengths, train
 * on every layout as they do one by one on one rank, with every kind of loss: losses, gradient norms and loads of
 * experts. Padding changes none of these, nor what depends on the tokens of a micro-batch. */
// Sections of megatron.c: §9h §10c
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SAMPLES = 24, STEPS = 3, VOCABULARY = 61, LONGEST = 37, TOKENS = 400 };

static mt_grid world;

/* ---- samples: functions of their numbers ------------------------------------------------------------------------ */

static int64_t sample_length(int64_t sample) {
    static const int64_t lengths[] = {13, 29, 1, 7, 22, 5, 2, 17, LONGEST, 11};
    return lengths[sample * 7 % 10];
}

/* Operands of the losses on the host: around the log-probability of chance, around 0, and around 1. */
static void set_inputs(mt_batch *batch, int64_t t, int64_t sample, int64_t i) {
    double wave = sin((double)(sample * 31 + i * 7));
    batch->loss_inputs[MT_OLD_LOGP][t] = (float)(-4.1 + 0.2 * wave);
    batch->loss_inputs[MT_REF_LOGP][t] = (float)(-4.2 + 0.2 * cos(3 * wave));
    batch->loss_inputs[MT_ADVANTAGES][t] = (float)(1.5 * sin((double)sample + 0.1 * (double)i));
    batch->loss_inputs[MT_RETURNS][t] = (float)(0.5 + wave);
    batch->loss_inputs[MT_OLD_VALUES][t] = (float)(0.1 * wave);
}

/* Appends a sample to a batch. */
static void add_sample(mt_batch *batch, int64_t step, int64_t sample) {
    int64_t start = batch->num_tokens, length = sample_length(sample);
    batch->spans[batch->num_spans++] = (mt_span){start, length, start, length, true};
    for (int64_t i = 0, t = start; i < length; i++, t++) {
        batch->tokens[t] = (int32_t)((sample % 5 * 7 + i * i * 3) % VOCABULARY);
        batch->labels[t] = (int32_t)((sample % 5 * 7 + (i + 1) * (i + 1) * 3) % VOCABULARY);
        batch->loss_mask[t] = (sample + i) % 4 != 0 || length == 1;
        batch->positions[t] = (int32_t)i;
        batch->token_index[t] = (step * SAMPLES + sample) * LONGEST + i;
        set_inputs(batch, t, sample, i);
    }
    batch->num_tokens += length;
}

/* A step's slots, micro-batches by number: in each, blocks of ranks have a batch. Samples, or pairs of them, are
 * dealt to the blocks of all slots and data-parallel ranks in turn. */
typedef struct dealer {
    const mt_grid *grid;
    int64_t step, slots, together; // 2: pairs
    int64_t pads;                  // the tokens of a micro-batch are padded to a multiple; 0: to none
    bool dynamic, one_by_one;
} dealer;

/* The size of the block of context ranks that has `rank` in a slot: all, halves, or singles and a half. */
static int64_t block_size(const dealer *d, int64_t slot, int64_t rank) {
    int64_t cp = d->grid->context.size;
    if (!d->dynamic || cp == 1 || slot % 3 == 0) return cp;
    if (slot % 3 == 1) return cp / 2;
    return rank < cp / 2 ? 1 : cp / 2;
}

static int deal(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const dealer *d = context;
    int64_t cp = d->grid->context.size, blocks = 0, mine = -1;
    for (int64_t slot = 0; slot < d->slots; slot++)
        for (int64_t data = 0; data < d->grid->data.size; data++)
            for (int64_t first = 0; first < cp; first += block_size(d, slot, first), blocks++) {
                bool is_inside =
                    d->grid->context.rank >= first && d->grid->context.rank < first + block_size(d, slot, first);
                if (slot == index && data == d->grid->data.rank && is_inside) mine = blocks;
            }
    batch->num_tokens = batch->num_spans = 0;
    batch->context_size = d->dynamic ? block_size(d, index, d->grid->context.rank) : 0;
    for (int64_t sample = 0; sample < SAMPLES; sample++)
        if (d->one_by_one ? sample / d->together == index : sample / d->together % blocks == mine)
            add_sample(batch, d->step, sample);
    if (batch->num_tokens > 0 && d->pads == 0) return 0;
    batch->num_tokens++; // one token is padding even if the others are a multiple
    batch->spans[batch->num_spans++] = (mt_span){batch->num_tokens - 1, 1, batch->num_tokens - 1, 1, true};
    batch->tokens[batch->num_tokens - 1] = batch->labels[batch->num_tokens - 1] = VOCABULARY - 1;
    batch->loss_mask[batch->num_tokens - 1] = 0, batch->positions[batch->num_tokens - 1] = 0;
    batch->token_index[batch->num_tokens - 1] = -1;
    if (d->pads > 0) mt_batch_pad(batch, d->pads);
    return 0;
}

/* ---- training --------------------------------------------------------------------------------------------------- */

typedef struct results {
    double loss[STEPS], norm[STEPS], experts[STEPS][4]; // auxiliary and z-loss, imbalance and the worst layer's
    int64_t data_ranks;
} results;

static const mt_preference_config sigmoid = {.variant = MT_PREFERENCE_SIGMOID, .beta = 0.5, .label_smoothing = 0.1};
static const mt_reward_config rewards = {0, 0};
static const mt_policy_config ppo = {.aggregation = {MT_TOKEN_MEAN, 0, 0, false},
                                     .clip_ratio_low = 0.1,
                                     .clip_ratio_high = 0.2,
                                     .kl_coef = 0.1,
                                     .entropy_coef = 0.05,
                                     .kl_type = MT_KL_K3};
static const mt_policy_config gspo = {.variant = MT_POLICY_GSPO, .clip_ratio_low = 0.05, .clip_ratio_high = 0.05};
static const mt_value_config value = {.aggregation = {MT_SEQ_MEAN_TOKEN_SUM, 0, 0, false}, .clip = 0.2};

/* The losses by name; the pre-training loss for any other. */
static mt_loss loss_of(const char *name) {
    mt_loss loss = mt_nll;
    if (strcmp(name, "preference") == 0) loss = mt_preference, loss.config = &sigmoid;
    if (strcmp(name, "reward") == 0) loss = mt_reward, loss.config = &rewards;
    if (strcmp(name, "ppo") == 0)
        loss = mt_policy, loss.config = &ppo, loss.uses_entropy = true, loss.inputs |= 1 << MT_REF_LOGP;
    if (strcmp(name, "gspo") == 0) loss = mt_policy, loss.config = &gspo;
    if (strcmp(name, "value") == 0) loss = mt_value, loss.config = &value;
    return loss;
}

/* Trains a model on a layout, with `slots` micro-batches a step; slots 0: one of each sample, or pair. */
static results train(const char *model, const char *layout, const char *loss_name, const mt_grid *start, int64_t slots,
                     int64_t pads) {
    char line[2048], *arguments[128];
    int count = 0;
    mt_error error;
    mt_run_options o;
    mt_model *m;
    mt_batch batch;
    results r;
    const mt_loss loss = loss_of(loss_name);
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --train-iters %d --lr 5e-3 --lr-decay-style constant --adam-eps 1e-3 "
             "--clip-grad 1 --init-method-std 0.1 --hidden-dropout 0.1 --attention-dropout 0.1 --hidden-size 32 "
             "--num-attention-heads 4 --ffn-hidden-size 48 --vocab-size %d --make-vocab-size-divisible-by 16 "
             "--num-layers 4 --micro-batch-size 1 --global-batch-size 24 --distributed-timeout-seconds 60 --device cpu "
             "%s %s",
             LONGEST, STEPS, VOCABULARY, model, layout);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&o, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&o, MT_PROGRAM_TRAIN, start->world.size, &error) != 0) fail_msg("%s", error.text);
    if (loss.of_values) o.stack.head_type = strcmp(loss_name, "reward") == 0 ? MT_HEAD_SEQUENCE : MT_HEAD_TOKEN;
    mt_grid grid = *start;
    if (mt_grid_build(&grid, &o.stack, &error) != 0) fail_msg("%s", error.text);
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = LONGEST, .train = true};
    plan.loss = &loss;
    if (mt_model_create(&m, &o.stack, &grid, &mt_cpu_ops, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_batch_alloc(&batch, TOKENS * o.stack.context_parallel_size);
    mt_model_init(m);
    mt_run_state state = {0};
    for (int step = 0; step < STEPS; step++) {
        int64_t together = loss.metrics == mt_preference.metrics ? 2 : 1;
        dealer d = {&grid,     step, slots > 0 ? slots : SAMPLES / together,
                    together,  pads, o.stack.dynamic_context_parallel,
                    slots == 0};
        mt_metrics metrics;
        if (mt_train_step(m, &state, d.slots, deal, &d, &batch, &metrics, &error) != 0) fail_msg("%s", error.text);
        r.loss[step] = metrics.loss, r.norm[step] = metrics.grad_norm;
        r.experts[step][0] = metrics.load_balancing_loss, r.experts[step][1] = metrics.z_loss;
        r.experts[step][2] = metrics.imbalance, r.experts[step][3] = metrics.worst_imbalance;
    }
    r.data_ranks = grid.data.size;
    mt_model_destroy(m);
    mt_batch_free(&batch);
    mt_options_free(&o);
    mt_grid_clear(&grid);
    return r;
}

#define ROTARY   "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
#define LLAMA    ROTARY "--group-query-attention --num-query-groups 2 "
#define GPT2     ""
#define WINDOW   LLAMA "--window-size 9 "
#define MTP      LLAMA "--mtp-num-layers 2 --untie-embeddings-and-output-weights "
#define EXPERTS  ROTARY "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
#define LOSSES   EXPERTS "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
#define BALANCED LOSSES "--moe-router-load-balancing-type seq_aux_loss "
#define BIASED                                                                                                         \
    BALANCED "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 " \
             "--moe-shared-expert-intermediate-size 24 "
#define GLOBAL   LOSSES "--moe-router-load-balancing-type global_aux_loss "
#define CAPACITY LOSSES "--moe-expert-capacity-factor 0.75 "
#define SINKHORN EXPERTS "--moe-router-pre-softmax --moe-router-load-balancing-type sinkhorn "
#define BY       "--cp-comm-type "
#define CP       "--context-parallel-size "
#define TP       "--sequence-parallel --tensor-model-parallel-size "
#define PP       "--pipeline-model-parallel-size "
#define EP       "--expert-model-parallel-size "
#define SHARD    "--data-parallel-sharding-strategy "
#define DYNAMIC  "--sft --dynamic-context-parallel "
#define PER_RANK "--num-virtual-stages-per-pipeline-rank "

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most rows have the loss of pre-training

static const struct {
    const char *model, *layout;
    int64_t slots;
    const char *loss; // NULL: that one
    int64_t pads;     // more than 0: compared with one rank that has the same micro-batches without padding
} rows[] = {
    {LLAMA, "", 3},
    {LLAMA, CP "2", 3},
    {GPT2, CP "4", 2},
    {LLAMA, CP "2 " BY "all_gather", 3},
    {GPT2, CP "4 " BY "all_gather", 2},
    {LLAMA, CP "2 " BY "a2a", 3},
    {GPT2, CP "4 " BY "a2a", 3},
    {GPT2, CP "4 " BY "a2a+p2p --hierarchical-context-parallel-sizes 2 2", 3},
    {WINDOW, CP "4 " BY "all_gather", 2},
    {WINDOW, CP "2 " BY "a2a", 2},
    {LLAMA, TP "2", 3},
    {LLAMA, CP "2 " TP "2", 3},
    {LLAMA, CP "2 " PP "2 " PER_RANK "2", 4},
    {LLAMA, CP "2 " PP "2 --pipeline-schedule zb-h1", 4},
    {MTP, CP "2 " PP "2", 3},
    {EXPERTS, CP "2 " EP "2", 3},
    {EXPERTS, EP "4", 3},
    {EXPERTS, CP "2 " EP "4 --moe-token-dispatcher-type flex", 2},
    {EXPERTS, TP "2 " EP "2 --moe-token-dispatcher-type allgather", 3},
    {BALANCED, CP "2", 3},
    {BALANCED, CP "2 " EP "2 " BY "all_gather", 2},
    {BALANCED, EP "4", 4}, // 32 places for 24 samples
    {BIASED, CP "2 " EP "2", 3},
    {BIASED, TP "2 " EP "2 --recompute-granularity full --recompute-method uniform", 3},
    {BIASED, TP "2 " CP "2 " EP "2 --moe-token-dispatcher-type flex", 3},
    {BIASED, CP "2 " PP "2 " PER_RANK "2", 4},
    {LOSSES, EP "2 --no-moe-permute-fusion", 2, NULL, 64},
    {LOSSES, CP "2 " EP "4 --moe-token-dispatcher-type allgather", 2, NULL, 36},
    {GLOBAL, TP "2 " EP "2", 2, NULL, 64},
    {CAPACITY, CP "2 " EP "2", 2, NULL, 64},
    {CAPACITY,
     TP "2 " EP "4 --moe-pad-expert-input-to-capacity --recompute-granularity selective "
        "--recompute-modules moe",
     2, NULL, 6}, // ranks have micro-batches of different lengths
    {CAPACITY "--moe-token-drop-policy position ", EP "4", 4, NULL, 40},
    {SINKHORN, CP "2 " TP "2 " EP "2", 2, NULL, 64},
    {SINKHORN, "", 2, NULL, 50},
    {LLAMA, CP "2 " SHARD "optim_grads_params", 2},
    {LLAMA, DYNAMIC CP "2", 3},
    {GPT2, DYNAMIC CP "4", 3},
    {LLAMA, DYNAMIC CP "8", 3},
    {GPT2, DYNAMIC CP "4 " BY "a2a", 3},
    {WINDOW, DYNAMIC CP "4 " BY "all_gather", 3},
    {LLAMA, DYNAMIC CP "4 " TP "2", 3},
    /* losses on the host */
    {LLAMA, "", 1, "preference"},
    {LLAMA, TP "2", 3, "preference"},
    {LLAMA, CP "4", 2, "preference"},
    {LLAMA, CP "2 " PP "2", 3, "preference"},
    {LLAMA, DYNAMIC CP "4", 3, "preference"},
    {LLAMA, CP "2 " BY "a2a", 3, "reward"},
    {LLAMA, TP "2 " CP "2", 3, "reward"},
    {LLAMA, CP "2 " PP "2 " PER_RANK "2", 4, "reward"},
    {LLAMA, "", 3, "ppo"},
    {LLAMA, "--tensor-model-parallel-size 2 " CP "2", 3, "ppo"},
    {LLAMA, CP "4 " BY "all_gather", 2, "ppo"},
    {LLAMA, CP "2 " PP "2 --pipeline-schedule zb-h1", 4, "ppo"},
    {LLAMA, CP "4", 2, "gspo"},
    {LLAMA, TP "2 " PP "2", 3, "gspo"},
    {LLAMA, CP "4", 2, "value"},
    {LLAMA, TP "2 " SHARD "optim_grads_params", 3, "value"},
    {LLAMA, CP "2 " PP "2 " PER_RANK "2", 4, "value"},
    {LLAMA, DYNAMIC CP "2 " PP "2 " PER_RANK "2", 4},
    {LLAMA, DYNAMIC CP "4 " PP "2 --pipeline-schedule zb-h1", 4},
    {MTP, DYNAMIC CP "4", 3},
    {EXPERTS, DYNAMIC CP "4 " EP "4", 3},
    {EXPERTS, DYNAMIC CP "4 " EP "4 --moe-token-dispatcher-type allgather", 3},
    {LLAMA, DYNAMIC CP "4 " SHARD "optim_grads_params --overlap-grad-reduce", 3},
};

/* False if step `step` differs from the expected one; the first rank prints how. */
static bool step_is_right(const results *r, const results *expected, int step, const char *name) {
    const double *experts = r->experts[step], *wanted = expected->experts[step];
    bool is_equal = fabs(r->loss[step] - expected->loss[step]) <= 1e-5 * fabs(expected->loss[step]) &&
                    fabs(r->norm[step] - expected->norm[step]) <= 1e-5 * expected->norm[step];
    for (int i = 0; i < 4; i++) is_equal = is_equal && fabs(experts[i] - wanted[i]) <= 1e-5 * wanted[i];
    if (is_equal || world.world.rank > 0) return is_equal;
    fprintf(stderr, "%s, step %d: loss %.9g, expected %.9g; norm %.9g, expected %.9g\n", name, step, r->loss[step],
            expected->loss[step], r->norm[step], expected->norm[step]);
    fprintf(stderr, "  auxiliary loss %.9g, expected %.9g; z-loss %.9g, %.9g; imbalance %.9g, %.9g; worst %.9g, %.9g\n",
            experts[0], wanted[0], experts[1], wanted[1], experts[2], wanted[2], experts[3], wanted[3]);
    return false;
}

static void packed_trains_as_one_by_one(void **state) {
    (void)state;
    const char *reference = "", *reference_loss = "";
    results expected = {0};
    int failures = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *loss = rows[i].loss ? rows[i].loss : "nll";
        char name[512];
        snprintf(name, sizeof name, "%s: %s%s", loss, rows[i].model, rows[i].layout);
        results r = train(rows[i].model, rows[i].layout, loss, &world, rows[i].slots, rows[i].pads);
        if (rows[i].pads > 0)
            expected = train(rows[i].model, "", loss, &mt_grid_of_one, rows[i].slots * r.data_ranks, 0);
        else if (strcmp(reference, rows[i].model) != 0 || strcmp(reference_loss, loss) != 0)
            expected = train(rows[i].model, "", loss, &mt_grid_of_one, 0, 0);
        reference = rows[i].pads > 0 ? "" : rows[i].model, reference_loss = loss;
        for (int step = 0; step < STEPS; step++) failures += !step_is_right(&r, &expected, step, name);
    }
    assert_int_equal(failures, 0);
}

int main(int argc, char **argv) {
    mt_grid_start(&world, &argc, &argv);
    if (world.world.size != 8) mt_die("start me with mpirun -np 8");
    const struct CMUnitTest tests[] = {cmocka_unit_test(packed_trains_as_one_by_one)};
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
