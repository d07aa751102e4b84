/* test_roles_mpi8.c: several models on grids of their own over the same ranks, and weights that move between them in
 * memory. The reference is a model that loads the source's checkpoint. Run by mpirun on eight ranks. */
// Sections of megatron.c: §4 §12b §15b
#include "../data/base/watchdog.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/transfer.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROW_LENGTH = 16, VOCABULARY = 61, WATCHED_FILES = 16 }; // of data/base/watchdog.c

static mt_grid job;

#define TP    " --tensor-model-parallel-size "
#define SP    " --sequence-parallel"
#define PP    " --pipeline-model-parallel-size "
#define VP    " --num-virtual-stages-per-pipeline-rank "
#define CP    " --context-parallel-size "
#define EP    " --expert-model-parallel-size "
#define ETP   " --expert-tensor-parallel-size "
#define SHARD " --data-parallel-sharding-strategy "
#define BF16  " --bf16"

#define ROTARY " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
#define LLAMA                                                                                                          \
    ROTARY " --kv-channels 8 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4"
#define QWEN    ROTARY " --kv-channels 8 --add-qkv-bias --group-query-attention --num-query-groups 2"
#define GPT2    " --kv-channels 4 --openai-gelu"
#define EXPERTS LLAMA " --num-experts 8 --moe-ffn-hidden-size 16"
#define LATENT                                                                                                         \
    " --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-interleaved --disable-bias-linear"      \
    " --untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6"                \
    " --qk-layernorm --latent-norm-epsilon 1e-6 --qk-pos-emb-head-dim 4 --v-head-dim 7 --q-lora-rank 40"
#define DEEPSEEK                                                                                                       \
    LATENT " --num-experts 8 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid"                             \
           " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-layer-freq ([0]*1+[1]*3)"        \
           " --moe-shared-expert-intermediate-size 24"

#define LORA " --lora-rank 4 --lora-alpha 32 --lora-target all-linear"

/* ---- models ------------------------------------------------------------------------------------------------------ */

/* A model of the job on a layout. */
typedef struct role {
    mt_run_options options;
    mt_grid grid;
    mt_model *model;
    mt_batch batch;
    mt_run_state state;
} role;

static void role_open(role *r, const char *shape, const char *layout, bool train, int seed) {
    char line[2048], *arguments[128];
    mt_error error;
    int count = 0;
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 5e-2 "
             "--lr-decay-style constant --init-method-std 0.1 --num-layers 4 --hidden-size 32 --num-attention-heads 8 "
             "--ffn-hidden-size 48 --hidden-dropout 0 --attention-dropout 0 --vocab-size %d "
             "--make-vocab-size-divisible-by 16 --distributed-timeout-seconds 60 --device cpu --seed %d%s%s",
             ROW_LENGTH, VOCABULARY, seed, shape, layout);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    *r = (role){.grid = mt_grid_new(&job)};
    if (mt_options_parse(&r->options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&r->options, MT_PROGRAM_TRAIN, job.world.size, &error) != 0 ||
        mt_grid_build(&r->grid, &r->options.stack, &error) != 0)
        fail_msg("%s%s: %s", shape, layout, error.text);
    int64_t tokens = ROW_LENGTH / r->options.stack.context_parallel_size;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = ROW_LENGTH, .train = train};
    const mt_ops *ops = mt_backend_open(MT_DEVICE_CPU, &r->grid, &error);
    if (mt_model_create(&r->model, &r->options.stack, &r->grid, ops, &plan, &error) != 0)
        fail_msg("%s%s: %s", shape, layout, error.text);
    mt_batch_alloc(&r->batch, ROW_LENGTH);
    mt_model_init(r->model);
}

static void role_close(role *r) {
    mt_model_destroy(r->model);
    mt_batch_free(&r->batch);
    mt_options_free(&r->options);
    mt_grid_clear(&r->grid);
}

static int make_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const role *r = context;
    int64_t number = r->state.consumed_train_samples + index * r->grid.data.size + r->grid.data.rank;
    batch->num_tokens = ROW_LENGTH, batch->num_spans = 1;
    batch->spans[0] = (mt_span){0, ROW_LENGTH, 0, ROW_LENGTH, true};
    for (int64_t i = 0; i < ROW_LENGTH; i++) {
        batch->tokens[i] = (int32_t)((number * 7 + i * i * 3) % VOCABULARY);
        batch->labels[i] = (int32_t)((number * 7 + (i + 1) * (i + 1) * 3) % VOCABULARY);
        batch->positions[i] = (int32_t)i, batch->token_index[i] = number * ROW_LENGTH + i, batch->loss_mask[i] = 1;
    }
    return 0;
}

static double step(role *r) {
    mt_error error;
    mt_metrics metrics;
    role before = *r; // make_batch counts from the step's first sample
    if (mt_train_step(r->model, &r->state, 8 / r->grid.data.size, make_batch, &before, &r->batch, &metrics, &error) ||
        mt_train_finish(r->model, &error) != 0)
        fail_msg("%s", error.text);
    assert_int_equal(r->state.iteration, before.state.iteration + 1);
    return metrics.loss;
}

static void save(role *r) {
    mt_error error = {{0}};
    if (mt_checkpoint_save(r->model, &r->options, &r->state, at("run"), NULL, NULL, &error) != 0)
        fail_msg("%s", error.text);
    mt_barrier(&job.world);
}

static void load(role *r) {
    mt_error error = {{0}};
    if (mt_checkpoint_load(r->model, &r->options, &r->state, at("run"), &error) != 0) fail_msg("%s", error.text);
    mt_barrier(&job.world);
}

static void remove_checkpoint(void) {
    mt_barrier(&job.world);
    if (job.world.rank == 0 && (remove_root(NULL) != 0 || make_root(NULL) != 0)) mt_die("%s: not removed", root);
    mt_broadcast(&job.world, root, sizeof root, 0); // a new name
}

/* Fails unless this rank's weights, and its master weights where `masters`, are the same bits. */
static void assert_same(role *got, role *expected, bool masters, const char *what) {
    int64_t count;
    mt_bucket *buckets = mt_model_buckets(got->model, &count);
    mt_model_buckets(expected->model, &count); // gathers
    for (int64_t i = 0; i < count; i++)
        for (int state = 0; state < 1 + masters; state++) {
            mt_shard a = mt_bucket_shard(got->model, i, (mt_param_state)state);
            mt_shard b = mt_bucket_shard(expected->model, i, (mt_param_state)state);
            assert_true(a.count == b.count && a.dtype == b.dtype && !a.data == !b.data);
            if (a.data && memcmp(a.data, b.data, (size_t)(a.count * mt_dtype_size(a.dtype))) != 0)
                fail_msg("%s: rank %d, bucket %d of %d elements: %s differ", what, job.world.rank, (int)i,
                         (int)buckets[i].count, state ? "master weights" : "weights");
        }
}

/* Log-probabilities of one sequence; every rank of the job has the same batch. */
static void score(role *r, float logp[ROW_LENGTH]) {
    role first = {.grid = mt_grid_of_one};
    mt_error error;
    make_batch(&first, 0, &r->batch, &error);
    mt_model_forward(r->model, &r->batch, false);
    mt_model_read(r->model, logp, NULL, NULL);
}

static void assert_same_scores(role *a, role *b, const char *what) {
    float x[ROW_LENGTH], y[ROW_LENGTH];
    if (a->options.stack.context_parallel_size * b->options.stack.context_parallel_size > 1) return; // ranks have parts
    score(a, x), score(b, y);
    for (int i = 0; i < ROW_LENGTH; i++)
        if (!(fabsf(x[i] - y[i]) <= 1e-5f * fabsf(y[i]))) fail_msg("%s: token %d: %.8f and %.8f", what, i, x[i], y[i]);
}

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

/* True if this rank has the element of a state. */
static bool has_element(const mt_model *m, const mt_param *like, int64_t row, int64_t col, mt_param_state state) {
    int64_t count;
    const mt_param *params = mt_model_params(m, &count);
    for (int64_t i = 0; i < count; i++) {
        const mt_param *p = &params[i];
        if (p->role != like->role || p->layer != like->layer || p->expert != like->expert) continue;
        mt_shard shard = mt_bucket_shard(m, p->bucket, state);
        int64_t r = row - p->first_row, c = col - p->first_col, at = p->offset + r * p->cols + c;
        return r >= 0 && r < p->rows && c >= 0 && c < p->cols && at >= shard.first && at < shard.first + shard.count;
    }
    return false;
}

/* Bytes of the elements of `to` on this rank that it must receive, and that it has. */
static void count_bytes(const mt_model *to, const mt_model *from, int64_t *missing, int64_t *own) {
    int64_t count;
    const mt_param *params = mt_model_params(to, &count);
    bool masters = mt_model_get_plan(to)->train && mt_model_dtype(to) == MT_BF16;
    *missing = *own = 0;
    for (int64_t i = 0; i < count; i++)
        for (int state = 0; state < 1 + (masters && params[i].trained); state++) {
            mt_shard shard = mt_bucket_shard(to, params[i].bucket, (mt_param_state)state);
            int64_t begin, end;
            mt_param_part(&params[i], &shard, &begin, &end);
            for (int64_t k = begin; k < mt_min(end, mt_param_rows_stored(&params[i]) * params[i].cols); k++) {
                int64_t row = params[i].first_row + k / params[i].cols, col = params[i].first_col + k % params[i].cols;
                bool has = has_element(from, &params[i], row, col, (mt_param_state)state);
                *(has ? own : missing) += mt_dtype_size(shard.dtype);
            }
        }
}

/* Fails unless each rank receives what it does not have, once, and the ranks send about evenly. */
static void assert_fewest_bytes(const mt_transfer *t, role *to, role *from, bool evenly, const char *what) {
    mt_transfer_counts counts = mt_transfer_get_counts(t);
    int64_t missing, own;
    if (mt_model_dtype(to->model) == mt_model_dtype(from->model)) {
        count_bytes(to->model, from->model, &missing, &own);
        if (counts.received != missing || counts.kept != own)
            fail_msg("%s: rank %d receives %d bytes and keeps %d; missing are %d, own %d", what, job.world.rank,
                     (int)counts.received, (int)counts.kept, (int)missing, (int)own);
    }
    double sums[2] = {(double)counts.sent, (double)counts.received}, most = sums[0];
    mt_all_reduce_sum(&job.world, sums, 2, MT_F64);
    mt_all_reduce_max(&job.world, &most, 1, MT_F64);
    assert_true(sums[0] == sums[1]);
    if (evenly && most > 1.1 * sums[0] / job.world.size)
        fail_msg("%s: a rank sends %g of %g bytes", what, most, sums[0]);
}

/* ---- transfers --------------------------------------------------------------------------------------------------- */

/* A training source and a target. */
static const struct pair {
    const char *shape, *source, *target;
    bool train;      // the target trains
    int64_t scratch; // 0: the default, which one round needs
    bool even;       // the ranks send about as much
} pairs[] = {
    {LLAMA, TP "2" PP "2" SHARD "optim", "", false, 0, true},
    {LLAMA, TP "2" PP "2" SHARD "optim_grads", "", false, 3000, true},
    {LLAMA, TP "2" PP "2" SHARD "optim_grads_params", "", false, 0, true},
    {LLAMA, TP "2" PP "2" SHARD "optim --overlap-grad-reduce --overlap-param-gather" BF16, BF16, false, 1, true},
    {LLAMA, TP "2" PP "2" VP "2" SHARD "optim_grads_params --overlap-grad-reduce --overlap-param-gather" BF16,
     TP "8" BF16, false, 0, false},
    {LLAMA, TP "2" CP "2" SHARD "optim_grads_params" BF16, TP "4" PP "2" BF16, true, 0, false},
    {LLAMA, SHARD "optim_grads_params" BF16, TP "2" PP "4" BF16, true, 5000, false},
    {LLAMA, TP "8" SP BF16, PP "2" VP "2" SHARD "optim" BF16, true, 0, false},
    {LLAMA, TP "2" PP "2" SHARD "optim" BF16, TP "4", true, 0, false},
    {LLAMA, TP "2" PP "2" SHARD "optim", TP "4" SHARD "optim" BF16, true, 0, false},
    {QWEN, TP "2" PP "2" SHARD "optim", TP "8", false, 0, false},
    {QWEN, TP "8", "", false, 0, false},
    {QWEN, PP "4" SHARD "optim", SHARD "optim_grads_params --overlap-grad-reduce --overlap-param-gather", true, 0,
     false},
    {QWEN, TP "4" PP "2" SHARD "optim_grads_params" BF16, SHARD "optim_grads_params" BF16, true, 0, false},
    {QWEN " --mtp-num-layers 1", TP "2" PP "4" BF16, TP "4" BF16, false, 0, false},
    {GPT2, TP "2" PP "4" BF16, TP "8" BF16, true, 0, false},
    {GPT2, PP "4" SHARD "optim", TP "2", false, 0, false},
    {EXPERTS, TP "2" SP PP "2" EP "2" SHARD "optim", "", false, 0, true},
    {EXPERTS, TP "2" SP EP "2" ETP "2" SHARD "optim_grads_params" BF16, EP "8" BF16, false, 0, false},
    {EXPERTS, EP "4" SHARD "optim_grads" BF16, TP "2" SP ETP "1" EP "2" PP "2" BF16, true, 777, false},
    {DEEPSEEK, TP "2" SP PP "2" EP "2" ETP "1" SHARD "optim_grads_params" BF16, EP "4" BF16, false, 0, false},
    {DEEPSEEK " --mtp-num-layers 1", TP "2" SP PP "4" EP "2" ETP "1" BF16, "", true, 0, false},
    {LATENT, TP "8" BF16, PP "4" SHARD "optim" BF16, true, 0, false},
};

static mt_transfer *transfer_open(role *to, role *from, bool adapters_only, int64_t scratch, const char *what) {
    mt_transfer *t;
    mt_error error;
    if (mt_transfer_open(&t, to->model, from->model, adapters_only, scratch, &error) != 0)
        fail_msg("%s: %s", what, error.text);
    return t;
}

/* Parts of both models rest while the weights move. */
static void run_while_they_rest(mt_transfer *t, role *to, role *from, unsigned parts) {
    mt_error error;
    if (mt_model_rest(from->model, parts, &error) != 0 || mt_model_rest(to->model, parts >> 1, &error) != 0)
        fail_msg("%s", error.text);
    mt_transfer_run(t);
    if (mt_model_wake(from->model, 7, &error) != 0 || mt_model_wake(to->model, 7, &error) != 0)
        fail_msg("%s", error.text);
}

/* A target that loads the source's checkpoint has the same bits. */
static void assert_as_by_checkpoint(role *to, role *from, const struct pair *p, const char *what) {
    role loaded;
    save(from);
    role_open(&loaded, p->shape, p->target, p->train, 1);
    load(&loaded);
    assert_same(to, &loaded, p->train, what);
    role_close(&loaded);
    remove_checkpoint();
}

/* Another model of the source's layout gets the weights back. */
static void assert_back(role *to, role *from, const struct pair *p, const char *what) {
    role again;
    mt_error error;
    mt_transfer *t;
    role_open(&again, p->shape, p->source, true, 3);
    if (strstr(p->shape, "mtp") && !p->train) {
        assert_int_equal(mt_transfer_open(&t, again.model, to->model, false, 0, &error), -1);
        assert_non_null(strstr(error.text, "is not in the source"));
    } else {
        t = transfer_open(&again, to, false, p->scratch, what);
        mt_transfer_run(t);
        mt_transfer_close(t);
        assert_same(&again, from, p->train && mt_model_dtype(to->model) == MT_BF16, what);
        step(&again);
    }
    role_close(&again);
}

static void a_transfer_equals_a_checkpoint_on_every_pair_of_layouts(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const struct pair *p = &pairs[i];
        char what[500];
        float ignored[ROW_LENGTH];
        role actor, other;
        snprintf(what, sizeof what, "row %d, '%s' to '%s'", (int)i, p->source, p->target);
        role_open(&actor, p->shape, p->source, true, 1);
        role_open(&other, p->shape, p->target, p->train, 2);
        bool one_type = mt_model_dtype(actor.model) == mt_model_dtype(other.model);
        mt_transfer *t = transfer_open(&other, &actor, false, p->scratch, what);
        mt_transfer_counts counts = mt_transfer_get_counts(t);
        assert_true((counts.rounds > 1) == (p->scratch > 0));
        if (p->scratch > 4000) assert_true(counts.scratch <= p->scratch);
        assert_fewest_bytes(t, &other, &actor, p->even, what);
        mt_transfer_run(t);
        assert_as_by_checkpoint(&other, &actor, p, what);
        step(&actor);
        if (p->train) step(&other); // its weights are replaced
        mt_transfer_run(t);
        assert_as_by_checkpoint(&other, &actor, p, what);
        step(&actor);
        score(&other, ignored); // gathers parameters, which are stale after the transfer
        run_while_they_rest(t, &other, &actor, (unsigned)(2 * i + 1) % 8);
        assert_as_by_checkpoint(&other, &actor, p, what);
        if (one_type && mt_model_dtype(actor.model) == MT_F32) assert_same_scores(&other, &actor, what);
        if (one_type) assert_back(&other, &actor, p, what);
        mt_transfer_close(t);
        if (p->train) step(&other);
        role_close(&other);
        role_close(&actor);
    }
}

/* The base moves once, adapters after each step. */
static void adapters_move_without_their_base(void **state) {
    (void)state;
    static const struct {
        const char *shape, *source, *target;
    } rows[] = {
        {LLAMA LORA, TP "2" PP "2" SHARD "optim", ""},
        {GPT2 LORA, PP "2" SHARD "optim_grads_params", TP "4"},
        {EXPERTS LORA, TP "2" SP PP "2" EP "2" SHARD "optim_grads", EP "4"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        role actor, other, again;
        role_open(&actor, rows[i].shape, rows[i].source, true, 1);
        role_open(&other, rows[i].shape, rows[i].target, false, 2);
        role_open(&again, rows[i].shape, rows[i].source, true, 3);
        mt_transfer *all = transfer_open(&other, &actor, false, 0, rows[i].source);
        mt_transfer *adapters = transfer_open(&other, &actor, true, 0, rows[i].source);
        mt_transfer *back = transfer_open(&again, &other, false, 0, rows[i].target);
        assert_true(2 * mt_transfer_get_counts(adapters).received < mt_transfer_get_counts(all).received);
        mt_transfer_run(all);
        for (int times = 0; times < 2; times++) {
            assert_same_scores(&other, &actor, rows[i].source);
            step(&actor);
            mt_transfer_run(adapters);
        }
        mt_transfer_run(back);
        assert_same(&again, &actor, false, rows[i].target);
        mt_transfer_close(back), mt_transfer_close(adapters), mt_transfer_close(all);
        role_close(&again), role_close(&other), role_close(&actor);
    }
}

/* Losses of steps of a model alone. */
static void losses_alone(double losses[3], const char *shape, const char *layout) {
    role r;
    role_open(&r, shape, layout, true, 1);
    for (int i = 0; i < 3; i++) losses[i] = step(&r);
    role_close(&r);
}

/* Two models train in turns on grids of their own, as each does alone; the watchdog runs until the last grid ends. */
static void models_on_several_grids_do_not_disturb_each_other(void **state) {
    (void)state;
    double actor_losses[3], critic_losses[3];
    float before[ROW_LENGTH], after[ROW_LENGTH];
    role actor, critic, reference;
    mt_run_options watched = {.stack.distributed_timeout_seconds = 60};
    losses_alone(actor_losses, LLAMA, TP "2" PP "2" SHARD "optim --overlap-grad-reduce --overlap-param-gather");
    losses_alone(critic_losses, QWEN, PP "4");
    mt_watch_start(&watched.stack, &watched.typed_names);
    assert_int_equal(mt_watch_file_begin("none", MT_FILE_READ), WATCHED_FILES); // no grid, so no watchdog
    role_open(&actor, LLAMA, TP "2" PP "2" SHARD "optim --overlap-grad-reduce --overlap-param-gather", true, 1);
    role_open(&reference, LLAMA, "", false, 1);
    role_open(&critic, QWEN, PP "4", true, 1);
    score(&reference, before);
    for (int i = 0; i < 3; i++) {
        assert_true(step(&actor) == actor_losses[i]);
        score(&reference, after);
        assert_true(step(&critic) == critic_losses[i]);
    }
    assert_memory_equal(before, after, sizeof before);
    role_close(&critic);
    role_close(&actor);
    mt_watch_file_end(mt_watch_file_begin("none", MT_FILE_READ));
    assert_true(mt_watch_file_begin("none", MT_FILE_READ) < WATCHED_FILES);
    mt_watch_file_end(0);
    role_close(&reference);
    assert_int_equal(mt_watch_file_begin("none", MT_FILE_READ), WATCHED_FILES);
    mt_watch = NULL;
}

static void models_of_different_shapes_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *from_layout, *to_layout, *error;
    } rows[] = {
        {LLAMA, LLAMA " --num-layers 8", TP "2" PP "2", PP "4", "is not in the source"},
        {LLAMA " --num-layers 8", LLAMA, TP "2", PP "4", "is not in the target"},
        {LLAMA, LLAMA " --ffn-hidden-size 64", TP "2", TP "4", "target, 64 x 32, is not in the source"},
        {LLAMA, QWEN, PP "2", TP "8", "is not in the"},
        {LLAMA LORA, LLAMA, PP "2", TP "4", "lora_A.weight of the source"},
        {LLAMA, LLAMA, TP "2" BF16 SHARD "optim --use-precision-aware-optimizer --main-params-dtype fp16", TP "2",
         "needs master weights without a scale"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        role from, to;
        mt_error error;
        mt_transfer *t;
        role_open(&from, rows[i].from, rows[i].from_layout, true, 1);
        role_open(&to, rows[i].to, rows[i].to_layout, false, 1);
        assert_int_equal(mt_transfer_open(&t, to.model, from.model, false, 0, &error), -1);
        if (t || !strstr(error.text, rows[i].error)) fail_msg("row %d: %s", (int)i, error.text);
        role_close(&to);
        role_close(&from);
    }
}

int main(int argc, char **argv) {
    mt_grid_start(&job, &argc, &argv);
    if (!job.world.comm || job.world.size != 8) mt_die("start me with mpirun -np 8");
    if (job.world.rank == 0 && make_root(NULL) != 0) mt_die("%s: cannot be made", root);
    mt_broadcast(&job.world, root, sizeof root, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_transfer_equals_a_checkpoint_on_every_pair_of_layouts),
        cmocka_unit_test(adapters_move_without_their_base),
        cmocka_unit_test(models_on_several_grids_do_not_disturb_each_other),
        cmocka_unit_test(models_of_different_shapes_are_refused),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    if (job.world.rank == 0 && remove_root(NULL) != 0) mt_die("%s: not removed", root);
    mt_grid_stop(&job);
    return failures;
}
