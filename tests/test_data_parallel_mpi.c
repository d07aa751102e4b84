/* test_data_parallel_mpi.c: data parallelism with every sharding strategy trains like one rank. Run by mpirun. */
// Sections of megatron.c: §12 §12a §12b §13 §14 §5
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/report/report.h"
#include "golden.h"
#include "new_folder.h"

#include <mpi.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_RANKS = 4, NUM_STRATEGIES = 4, TINY_LENGTH = 8 };
static const char *const strategies[NUM_STRATEGIES] = {"no_shard", "optim", "optim_grads", "optim_grads_params"};

static mt_grid grid;

/* ---- grids of the first ranks of the world */

static mt_grid first_ranks[MAX_RANKS + 1]; // [size]; size 0 on ranks outside; [1] is this rank alone
static MPI_Comm communicators[MAX_RANKS + 1];
static int members[MAX_RANKS] = {0, 1, 2, 3};

static mt_group group_of(const char *name, int size) {
    return (mt_group){.name = name,
                      .size = grid.world.rank < size ? size : 0,
                      .rank = grid.world.rank,
                      .members = members,
                      .comm = &communicators[size]};
}

static void open_grids(void) {
    first_ranks[1] = mt_grid_of_one;
    for (int size = 2; size <= grid.world.size && size <= MAX_RANKS; size++) {
        MPI_Comm_split(MPI_COMM_WORLD, grid.world.rank < size, grid.world.rank, &communicators[size]);
        first_ranks[size] = mt_grid_of_one;
        first_ranks[size].world = group_of("world", size);
        first_ranks[size].data = group_of("data", size);
        first_ranks[size].data_context = group_of("data-context", size);
        first_ranks[size].expert_data = group_of("expert-data", size);
    }
}

static bool is_in_grid(int size) {
    return size <= grid.world.size && first_ranks[size].world.size > 0;
}

/* ---- a tiny model and its data */

typedef struct trainee {
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    mt_run_state state;
    const mt_grid *grid;
} trainee;

typedef struct tiny_source {
    int64_t first, stride; // this rank's first sequence; sequences of one micro-batch over all ranks
} tiny_source;

/* A sequence is a function of its number only: one of four, plus a loss mask. */
static int tiny_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const tiny_source *from = context;
    int64_t number = from->first + index * from->stride;
    batch->num_tokens = TINY_LENGTH, batch->num_spans = 1;
    batch->spans[0] = (mt_span){0, TINY_LENGTH, 0, TINY_LENGTH, true};
    for (int64_t i = 0; i < TINY_LENGTH; i++) {
        batch->tokens[i] = (int32_t)((number % 4 * 7 + i * i * 3) % 60);
        batch->labels[i] = (int32_t)((number % 4 * 7 + (i + 1) * (i + 1) * 3) % 60);
        batch->positions[i] = (int32_t)i, batch->token_index[i] = number * TINY_LENGTH + i;
        batch->loss_mask[i] = (float)((number + i) % 5 != 0);
    }
    return 0;
}

/* The sizes leave gaps between parameters, and shards end inside parameters. The large epsilon: AdamW would divide the
 * gradient of the biases of k, which is zero except for rounding, by its own magnitude. */
static void trainee_options(mt_run_options *options, int64_t ranks, const char *words) {
    char line[2048], *arguments[128];
    int count = 0;
    mt_error error = {{0}};
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 1 --train-iters 10 --lr 1e-2 --lr-decay-style "
             "constant --weight-decay 0.5 --adam-eps 1e-4 --clip-grad 1 --init-method-std 0.1 --device cpu "
             "--num-layers 3 --hidden-size 24 "
             "--num-attention-heads 2 --ffn-hidden-size 40 --vocab-size 60 --make-vocab-size-divisible-by 64 %s",
             TINY_LENGTH, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(options, MT_PROGRAM_TRAIN, ranks, &error) != 0) fail_msg("%s", error.text);
}

static const char tied[] = "--hidden-dropout 0.1";
static const char untied[] = "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm "
                             "--position-embedding-type rope --disable-bias-linear --hidden-dropout 0";

static void trainee_open(trainee *t, const mt_grid *ranks, const char *words, int strategy, bool overlaps) {
    char all[1024];
    mt_error error = {{0}};
    snprintf(all, sizeof all, "%s --attention-dropout 0 --data-parallel-sharding-strategy %s%s%s", words,
             strategies[strategy], overlaps ? " --overlap-grad-reduce" : "",
             overlaps && strategy > 0 ? " --overlap-param-gather" : "");
    *t = (trainee){.grid = ranks};
    trainee_options(&t->options, ranks->world.size, all);
    mt_model_plan plan = {
        .max_tokens = TINY_LENGTH, .max_logits = TINY_LENGTH, .max_position = TINY_LENGTH, .train = true};
    if (mt_model_create(&t->model, &t->options.stack, ranks, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_batch_alloc(&t->batch, TINY_LENGTH);
}

static void trainee_close(trainee *t) {
    mt_model_destroy(t->model);
    mt_batch_free(&t->batch);
    mt_options_free(&t->options);
}

static mt_metrics train_one_step(trainee *t, int64_t micro_batches) {
    mt_metrics metrics;
    mt_error error;
    tiny_source from = {t->state.consumed_train_samples + t->grid->data.rank, t->grid->data.size};
    if (mt_train_step(t->model, &t->state, micro_batches, tiny_batch, &from, &t->batch, &metrics, &error) != 0)
        fail_msg("%s", error.text);
    return metrics;
}

/* One state of all parameters, unsharded, as `count` floats in the order of the table; free them. */
static float *whole_state(mt_model *model, mt_param_state state, int64_t *count) {
    int64_t num_params;
    const mt_param *params = mt_model_params(model, &num_params);
    float *values = NULL;
    *count = 0;
    for (int64_t i = 0; i < num_params; i++) {
        int64_t n = params[i].rows * params[i].cols, begin, end;
        mt_shard shard = mt_bucket_shard(model, params[i].bucket, state);
        values = mt_realloc(values, (*count + n) * 4);
        if (mt_state_has_scale(shard.dtype)) {
            const mt_bucket *b = mt_bucket_get(model, params[i].bucket);
            memset(values + *count, 0, (size_t)n * sizeof *values);
            mt_param_part(&params[i], &shard, &begin, &end);
            if (begin < end) mt_state_read(model, &params[i], state, begin, values + *count + begin, end - begin);
            if (b->strategy != MT_NO_SHARD) mt_all_reduce_sum(b->group, values + *count, n, MT_F32);
            *count += n;
            continue;
        }
        const char *bucket = mt_bucket_gather_state(model, params[i].bucket, state);
        bool is_bf16 = shard.dtype == MT_BF16;
        for (int64_t k = 0; k < n; k++) {
            int64_t at = params[i].offset + k;
            values[*count + k] = is_bf16 ? mt_bf16_to_f32(((const uint16_t *)(const void *)bucket)[at])
                                         : ((const float *)(const void *)bucket)[at];
        }
        *count += n;
    }
    return values;
}

/* The results of ten steps. */
typedef struct outcome {
    double losses[STEPS], norms[STEPS];
    float *weights;
    int64_t count;
} outcome;

static outcome ten_steps(const mt_grid *ranks, const char *words, int strategy, bool overlaps, int64_t micro_batches) {
    trainee t;
    outcome o;
    trainee_open(&t, ranks, words, strategy, overlaps);
    mt_model_init(t.model);
    for (int step = 0; step < STEPS; step++) {
        mt_metrics metrics = train_one_step(&t, micro_batches);
        o.losses[step] = metrics.loss, o.norms[step] = metrics.grad_norm;
    }
    o.weights = whole_state(t.model, MT_STATE_WEIGHTS, &o.count);
    trainee_close(&t);
    return o;
}

static double distance(const float *a, const float *b, int64_t count) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / norm);
}

static void assert_same_outcome(const outcome *o, const outcome *expected, double tolerance, const char *what) {
    for (int i = 0; i < STEPS; i++)
        if (!(fabs(o->losses[i] - expected->losses[i]) <= tolerance * expected->losses[i]) ||
            !(fabs(o->norms[i] - expected->norms[i]) <= tolerance * expected->norms[i]))
            fail_msg("%s, step %d: loss %.9f, alone %.9f; norm %.9f, alone %.9f", what, i + 1, o->losses[i],
                     expected->losses[i], o->norms[i], expected->norms[i]);
    assert_int_equal(o->count, expected->count);
    double off = distance(o->weights, expected->weights, o->count);
    if (!(off <= tolerance)) fail_msg("%s: the final weights are off by %g of their norm", what, off);
}

static void every_strategy_trains_like_one_rank(const char *words, double tolerance) {
    for (int64_t micro_batches = 1; micro_batches <= 3; micro_batches += 2)
        for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
            if (!is_in_grid(ranks)) continue;
            outcome expected = ten_steps(&mt_grid_of_one, words, 0, false, ranks * micro_batches);
            assert_true(expected.losses[STEPS - 1] < 0.9 * expected.losses[0]); // the model learns
            for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
                char what[160];
                snprintf(what, sizeof what, "%s%s, %d ranks, %d micro-batches", strategies[variant / 2],
                         variant % 2 ? " with overlap" : "", ranks, (int)micro_batches);
                outcome o = ten_steps(&first_ranks[ranks], words, variant / 2, variant % 2, micro_batches);
                assert_same_outcome(&o, &expected, tolerance, what);
                free(o.weights);
            }
            free(expected.weights);
        }
}

static void every_strategy_trains_tied_models_like_one_rank(void **state) {
    (void)state;
    every_strategy_trains_like_one_rank(tied, 1e-5);
}

static void every_strategy_trains_untied_models_like_one_rank(void **state) {
    (void)state;
    every_strategy_trains_like_one_rank(untied, 1e-5);
}

static void every_strategy_trains_in_bf16_to_within_two_percent(void **state) {
    (void)state;
    char words[512];
    snprintf(words, sizeof words, "%s --bf16 --lr 2e-3", untied); // few weights then round differently
    for (int strategy = 0; strategy < NUM_STRATEGIES; strategy++) {
        outcome expected = ten_steps(&mt_grid_of_one, words, 0, false, 3 * grid.world.size);
        outcome o = ten_steps(&grid, words, strategy, true, 3);
        assert_same_outcome(&o, &expected, 0.02, strategies[strategy]);
        free(o.weights), free(expected.weights);
    }
}

/* ---- gradients and moments in bf16 */

static const char precise[] = " --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
                              "--exp-avg-sq-dtype bf16";
static const char scaled[] = " --use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype fp8 "
                             "--exp-avg-sq-dtype fp16";
static const char scaled_fp32[] = " --use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp8";

static void every_strategy_rounds_gradients_and_moments_like_one_rank(void **state) {
    (void)state;
    for (int variant = 0; variant < 4 * NUM_STRATEGIES; variant++) {
        int strategy = variant / 4;
        const char *const types[] = {precise, precise, scaled_fp32, scaled};
        char words[512], plain[256];
        snprintf(plain, sizeof plain, "%s%s", variant % 2 ? untied : tied, variant % 2 ? " --bf16 --lr 2e-3" : "");
        snprintf(words, sizeof words, "%s%s", plain, types[variant % 4]);
        outcome exact = ten_steps(&mt_grid_of_one, plain, 0, false, 3 * grid.world.size);
        outcome expected = ten_steps(&mt_grid_of_one, words, 0, false, 3 * grid.world.size);
        outcome o = ten_steps(&grid, words, strategy, variant % 2, 3),
                again = ten_steps(&grid, words, strategy, true, 3);
        assert_same_outcome(&expected, &exact, 0.03, "rounded");
        assert_same_outcome(&o, &expected, 0.03, strategies[strategy]);
        assert_same_outcome(&again, &o, 0, strategies[strategy]); // overlap changes no bit
        assert_true(distance(expected.weights, exact.weights, o.count) > 1e-5);
        free(o.weights), free(expected.weights), free(exact.weights), free(again.weights);
    }
}

/* ---- streams */

/* A backend with late streams: all but the first run their calls only when another stream follows them, or when the
 * main thread waits for an event, as late as a GPU may. A missing wait then gives missing data, an early overwrite lost
 * data. */
typedef struct late_call {
    void (*run)(const struct late_call *call);
    void *out;
    const void *in;
    int64_t count;
    mt_dtype dtype;
    const mt_group *group;
    mt_host_function *function;
} late_call;

enum { MAX_LATE_CALLS = 1024, MAX_STREAMS = 8 };
typedef struct late_stream {
    late_call calls[MAX_LATE_CALLS];
    int count;
} late_stream;
static late_stream late_streams[MAX_STREAMS];
static int num_streams, most_late_calls;
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER; // the threads of a saver wait for events
static pthread_t own_thread;

static void run_all_reduce(const late_call *c) {
    mt_cpu_ops.all_reduce(c->out, c->count, MT_SUM, c->dtype, c->group, NULL);
}

static void run_all_gather(const late_call *c) {
    mt_cpu_ops.all_gather(c->out, c->in, c->count, c->dtype, c->group, NULL);
}

static void run_reduce_scatter(const late_call *c) {
    mt_cpu_ops.reduce_scatter(c->out, c->in, c->count, c->dtype, c->group, NULL);
}

static void run_accumulate(const late_call *c) {
    mt_cpu_ops.accumulate(c->out, c->in, c->count, c->dtype, NULL);
}

static void call_late(mt_stream *stream, late_call call) {
    late_stream *to = (late_stream *)(void *)stream;
    if (to == &late_streams[0]) { // the model's stream runs at once
        call.run(&call);
        return;
    }
    assert_true(to->count < MAX_LATE_CALLS);
    to->calls[to->count++] = call;
    if (to->count > most_late_calls) most_late_calls = to->count;
}

static void late_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype, const mt_group *group,
                            mt_stream *stream) {
    assert_int_equal(reduction, MT_SUM);
    call_late(stream, (late_call){run_all_reduce, buffer, NULL, count, dtype, group, NULL});
}

static void late_all_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                            mt_stream *stream) {
    call_late(stream, (late_call){run_all_gather, out, in, count, dtype, group, NULL});
}

static void late_reduce_scatter(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                mt_stream *stream) {
    call_late(stream, (late_call){run_reduce_scatter, out, in, count, dtype, group, NULL});
}

static void late_accumulate(void *sum, const float *x, int64_t n, mt_dtype dtype, mt_stream *stream) {
    call_late(stream, (late_call){run_accumulate, sum, x, n, dtype, NULL, NULL});
}

static void late_run(mt_stream *stream) {
    late_stream *from = (late_stream *)(void *)stream;
    pthread_mutex_lock(&late_lock);
    for (int i = 0; i < from->count; i++) from->calls[i].run(&from->calls[i]);
    from->count = 0;
    pthread_mutex_unlock(&late_lock);
}

static void late_wait_stream(mt_stream *stream, mt_stream *other) {
    assert_ptr_not_equal(stream, other);
    late_run(other);
}

static mt_stream *late_create(void *workspace, int64_t bytes, bool deterministic) {
    (void)workspace, (void)bytes, (void)deterministic;
    assert_true(num_streams < MAX_STREAMS);
    late_streams[num_streams].count = 0;
    return (mt_stream *)(void *)&late_streams[num_streams++];
}

static void late_destroy(mt_stream *stream) {
    assert_int_equal(((late_stream *)(void *)stream)->count, 0);
    num_streams--;
}

/* An event is the stream that it was recorded on last. */
static mt_event *late_event_create(void) {
    return mt_calloc(sizeof(mt_stream *));
}

static void late_event_destroy(mt_event *event) {
    free(event);
}

static void late_event_record(mt_event *event, mt_stream *stream) {
    *(mt_stream **)(void *)event = stream;
}

static void late_event_synchronize(mt_event *event) {
    late_stream *stream = *(late_stream **)(void *)event;
    bool mine = pthread_equal(pthread_self(), own_thread) != 0;
    if (stream && mine) late_run((mt_stream *)(void *)stream);
    for (bool waits = stream && !mine; waits; usleep(500)) {
        pthread_mutex_lock(&late_lock);
        waits = stream->count > 0;
        pthread_mutex_unlock(&late_lock);
    }
}

static void run_convert(const late_call *c) {
    mt_cpu_ops.convert(c->out, c->dtype, c->in, MT_F32, c->count, NULL);
}

static void late_convert(void *to, mt_dtype to_dtype, const void *from, mt_dtype from_dtype, int64_t n,
                         mt_stream *stream) {
    assert_int_equal(from_dtype, MT_F32);
    call_late(stream, (late_call){run_convert, to, from, n, to_dtype, NULL, NULL});
}

static void run_memory_copy(const late_call *c) {
    mt_cpu_ops.memory_copy(c->out, c->in, c->count, NULL);
}

static void late_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    call_late(stream, (late_call){run_memory_copy, to, from, bytes, MT_F32, NULL, NULL});
}

static void run_host_function(const late_call *c) {
    c->function(c->out);
}

static void late_call_host(mt_stream *stream, mt_host_function *function, void *context) {
    call_late(stream, (late_call){.run = run_host_function, .out = context, .function = function});
}

static mt_ops late_ops(void) {
    mt_ops late = mt_cpu_ops;
    own_thread = pthread_self();
    late.on_device = true; // disables special cases for the CPU
    late.all_reduce = late_all_reduce, late.all_gather = late_all_gather, late.reduce_scatter = late_reduce_scatter;
    late.accumulate = late_accumulate, late.convert = late_convert, late.stream_wait_stream = late_wait_stream,
    late.memory_copy = late_memory_copy;
    late.stream_create = late_create, late.stream_destroy = late_destroy;
    late.event_create = late_event_create, late.event_destroy = late_event_destroy;
    late.stream_call_host = late_call_host;
    late.event_record = late_event_record, late.event_synchronize = late_event_synchronize;
    return late;
}

static void streams_wait_for_their_inputs(void **state) {
    (void)state;
    mt_ops late = late_ops();
    for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
        const char *words = variant % 2 ? tied : untied;
        outcome expected = ten_steps(&mt_grid_of_one, words, 0, false, 2 * grid.world.size);
        backend = &late, most_late_calls = 0;
        outcome o = ten_steps(&grid, words, variant / 2, true, 2);
        backend = &mt_cpu_ops;
        assert_same_outcome(&o, &expected, 1e-5, strategies[variant / 2]);
        assert_true(most_late_calls > 0); // otherwise nothing overlaps
        free(o.weights), free(expected.weights);
    }
}

static void streams_wait_for_rounded_gradients(void **state) {
    (void)state;
    mt_ops late = late_ops();
    for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
        char words[512];
        snprintf(words, sizeof words, "%s%s", variant % 2 ? tied : untied, precise);
        outcome expected = ten_steps(&grid, words, variant / 2, true, 2);
        backend = &late, most_late_calls = 0;
        outcome o = ten_steps(&grid, words, variant / 2, true, 2);
        backend = &mt_cpu_ops;
        assert_same_outcome(&o, &expected, 0, strategies[variant / 2]);
        assert_true(most_late_calls > 0);
        free(o.weights), free(expected.weights);
    }
}

static const char routed[] =
    "--num-experts 4 --moe-router-topk 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 ";

/* Layers and their experts have buffers of their own, whose gathers and reductions overlap; with expert ranks the
 * gradients for the layer below are gathered beside qkv's weight gradient. */
static void streams_of_experts_wait_for_their_inputs(void **state) {
    (void)state;
    mt_ops late = late_ops();
    mt_grid shared = mt_grid_new(&grid);
    mt_run_options options;
    mt_error error;
    mt_options_default(&options);
    options.stack.num_experts = 4, options.stack.expert_tensor_parallel_size = 1;
    options.stack.expert_model_parallel_size = grid.world.size;
    if (mt_grid_build(&shared, &options.stack, &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&options);
    outcome alone = ten_steps(&mt_grid_of_one, routed, 0, false, 2 * grid.world.size);
    for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
        const mt_grid *ranks = variant % 2 ? &shared : &grid;
        char words[512];
        int size = variant % 2 ? grid.world.size : 1;
        snprintf(words, sizeof words, "%s--expert-model-parallel-size %d --moe-token-dispatcher-type allgather", routed,
                 size);
        outcome expected = ten_steps(ranks, words, variant / 2, true, 2);
        backend = &late, most_late_calls = 0;
        outcome o = ten_steps(ranks, words, variant / 2, true, 2);
        backend = &mt_cpu_ops;
        assert_same_outcome(&o, &expected, 0, strategies[variant / 2]);
        for (int i = 0; i < STEPS; i++) {
            assert_true(fabs(o.losses[i] - alone.losses[i]) <= 1e-5 * alone.losses[i]);
            assert_true(fabs(o.norms[i] - alone.norms[i]) <= 1e-5 * alone.norms[i]);
        }
        assert_true(most_late_calls > 0);
        free(o.weights), free(expected.weights);
    }
    free(alone.weights);
    mt_grid_clear(&shared);
}

/* ---- the optimizer on the host */

static const char offload[] = " --optimizer-cpu-offload --optimizer-offload-fraction ";
static const char experts[] = "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
                              "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 --swiglu "
                              "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                              "--untie-embeddings-and-output-weights --hidden-dropout 0 --bf16";

/* The same losses, norms and weights, bit for bit. */
static void assert_offload_changes_no_bit(const char *words, const char *fraction, int strategy, const mt_ops *with) {
    char all[512];
    snprintf(all, sizeof all, "%s%s%s", words, offload, fraction);
    outcome expected = ten_steps(&grid, words, strategy, true, 2);
    backend = with;
    outcome o = ten_steps(&grid, all, strategy, true, 2);
    backend = &mt_cpu_ops;
    assert_same_outcome(&o, &expected, 0, all);
    assert_memory_equal(o.weights, expected.weights, (size_t)o.count * 4);
    free(o.weights), free(expected.weights);
}

static void an_optimizer_on_the_host_changes_no_bit(void **state) {
    (void)state;
    char precise_bf16[512];
    snprintf(precise_bf16, sizeof precise_bf16, "--bf16%s", precise);
    const char *const models[] = {tied, untied, experts, precise_bf16};
    for (int variant = 0; variant < 4 * NUM_STRATEGIES; variant++)
        assert_offload_changes_no_bit(models[variant % 4], variant % 3 ? "0.3" : "1", variant / 4, backend);
    // more than one piece of a bucket
    assert_offload_changes_no_bit("--vocab-size 220000 --hidden-dropout 0", "1", 0, backend);
}

static void streams_wait_for_the_host(void **state) {
    (void)state;
    mt_ops late = late_ops();
    for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
        char words[512];
        most_late_calls = 0;
        snprintf(words, sizeof words, "%s --bf16%s", variant % 2 ? tied : untied, variant % 2 ? precise : "");
        assert_offload_changes_no_bit(words, "0.6 --overlap-cpu-optimizer-d2h-h2d", variant / 2, &late);
        assert_true(most_late_calls > 1); // copies are on their way while an update runs
    }
}

/* ---- weights gathered in fp8 */

static int64_t gathered_bytes[2]; // by the data-parallel ranks: in fp8, in the model's type

static void counted_all_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                               mt_stream *stream) {
    gathered_bytes[dtype != MT_U8] += count * mt_dtype_size(dtype);
    mt_cpu_ops.all_gather(out, in, count, dtype, group, stream);
}

/* Shards end inside weights; the ranks agree on the largest value of each. */
static void weights_gathered_in_fp8_change_no_bit(void **state) {
    (void)state;
    static const char *const models[] = {tied, untied, experts};
    static const char *const recipes[] = {
        "32 --ffn-hidden-size 48 --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max",
        "32 --ffn-hidden-size 48 --fp8-recipe tensorwise", "128 --ffn-hidden-size 128 --fp8-recipe blockwise"};
    mt_ops counted = mt_cpu_ops;
    counted.all_gather = counted_all_gather;
    for (int variant = 0; variant < 9; variant++) { // each recipe with each strategy and each model
        int strategy = 1 + variant % 3;
        bool overlaps = variant % 2 == 0, is_sharded = grid.world.size > 1;
        char words[800], all[900];
        snprintf(words, sizeof words, "%s --fp8-format hybrid --hidden-size %s", models[(variant + variant / 3) % 3],
                 recipes[variant / 3]);
        snprintf(all, sizeof all, "%s --fp8-param-gather", words);
        backend = &counted;
        memset(gathered_bytes, 0, sizeof gathered_bytes);
        outcome expected = ten_steps(&grid, words, strategy, overlaps, 2);
        int64_t whole_bytes = gathered_bytes[1];
        assert_int_equal(gathered_bytes[0], 0);
        memset(gathered_bytes, 0, sizeof gathered_bytes);
        outcome o = ten_steps(&grid, all, strategy, overlaps, 2);
        backend = &mt_cpu_ops;
        // most weights are those of layers, and whole_state gathers all of them once more
        if (is_sharded) assert_true(gathered_bytes[0] > 0 && gathered_bytes[1] < whole_bytes / 2);
        assert_same_outcome(&o, &expected, 0, all);
        assert_memory_equal(o.weights, expected.weights, (size_t)o.count * 4);
        free(o.weights), free(expected.weights);
    }
}

/* ---- the golden families */

static void set_strategy(mt_options *options, int strategy) {
    options->data_parallel_sharding_strategy = (mt_strategy)strategy;
    options->overlap_grad_reduce = options->overlap_param_gather = strategy > 0;
}

static void train_family(const char *family, const mt_grid *ranks, int strategy) {
    double losses[STEPS], norms[STEPS];
    fixture f = open_family(family, 1, ranks->world.size, false);
    set_strategy(&f.options.stack, strategy);
    create_model(&f, ranks);
    mt_run_state run = {0};
    mt_error error;
    for (int64_t step = 0; step < STEPS; step++) {
        source from = {&f, step, 1, ranks->data.rank, ranks->data.size};
        mt_metrics metrics;
        if (mt_train_step(f.model, &run, SEQUENCES / ranks->data.size, next_micro_batch, &from, &f.batch, &metrics,
                          &error) != 0)
            fail_msg("%s", error.text);
        losses[step] = metrics.loss, norms[step] = metrics.grad_norm;
    }
    assert_expected(family, losses, norms);
    close_family(&f);
}

static void every_strategy_trains_every_kind_of_parameter_like_pytorch_on_one(void **state) {
    (void)state;
    for (int k = 0; k < NUM_KINDS; k++)
        for (int strategy = 0; strategy < NUM_STRATEGIES; strategy++)
            for (int ranks = 2; ranks <= MAX_RANKS; ranks += 2)
                if (is_in_grid(ranks)) train_family(families[k], &first_ranks[ranks], strategy);
}

/* ---- reductions of several layers */

static int64_t gradient_reductions; // over the data-parallel ranks

static void counted_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype,
                               const mt_group *group, mt_stream *stream) {
    gradient_reductions += dtype == MT_F32 && group == &first_ranks[2].data_context;
    mt_cpu_ops.all_reduce(buffer, count, reduction, dtype, group, stream);
}

/* Words, positions, three layers and the final norm: each alone; the final norm with a layer, two layers, the others
 * alone; all but the words together. */
static void layers_reduced_together_train_bit_for_bit_like_layers_alone(void **state) {
    (void)state;
    static const char *const sizes[] = {"", " --ddp-bucket-size 9000", " --ddp-bucket-size 1000000"};
    static const int64_t expected[] = {6, 4, 2};
    if (!is_in_grid(2)) return;
    mt_ops counted = mt_cpu_ops;
    counted.all_reduce = counted_all_reduce;
    for (int strategy = 0; strategy < NUM_STRATEGIES; strategy++)
        for (int overlaps = 0; overlaps < 2; overlaps++) {
            outcome alone = {{0}, {0}, NULL, 0};
            for (int i = 0; i < 3; i++) {
                char words[200];
                snprintf(words, sizeof words, "%s%s", tied, sizes[i]);
                backend = &counted, gradient_reductions = 0;
                outcome o = ten_steps(&first_ranks[2], words, strategy, overlaps, 2);
                backend = &mt_cpu_ops;
                if (strategy == 0) assert_int_equal(gradient_reductions, STEPS * expected[i]);
                if (i == 0) alone = o;
                assert_same_outcome(&o, &alone, 0, words);
                assert_memory_equal(o.weights, alone.weights, (size_t)o.count * 4);
                if (i > 0) free(o.weights);
            }
            free(alone.weights);
        }
}

static void every_rank_ends_with_the_same_weights(void **state) {
    (void)state;
    for (int strategy = 0; strategy < NUM_STRATEGIES; strategy++) {
        outcome o = ten_steps(&grid, untied, strategy, strategy > 0, 1);
        float *of_rank_0 = mt_malloc(o.count * 4);
        memcpy(of_rank_0, o.weights, (size_t)o.count * 4);
        mt_broadcast(&grid.world, of_rank_0, o.count * 4, 0);
        assert_memory_equal(of_rank_0, o.weights, (size_t)o.count * 4);
        free(of_rank_0), free(o.weights);
    }
}

/* --check-weight-hash-across-dp-replicas-interval: one bit on the last rank is found, with its parameter and rank. */
static void a_replica_with_another_bit_is_named(void **state) {
    (void)state;
    for (int strategy = 0; strategy < NUM_STRATEGIES - 1; strategy++) {
        trainee t;
        mt_error error = {{0}};
        int last = grid.world.size - 1;
        char rank[40];
        snprintf(rank, sizeof rank, "rank %d has other values of ", last);
        trainee_open(&t, &grid, untied, strategy, strategy > 0);
        mt_model_init(t.model);
        train_one_step(&t, 1);
        if (mt_train_check_replicas(t.model, &error) != 0) fail_msg("%s: %s", strategies[strategy], error.text);
        int64_t count;
        const mt_param *params = mt_model_params(t.model, &count), *param = &params[count / 2];
        const mt_bucket *b = mt_bucket_get(t.model, param->bucket);
        uint32_t *bits = (uint32_t *)((float *)b->params + param->offset + param->rows * param->cols - 1);
        if (grid.world.rank == last) *bits ^= 1;
        int status = mt_train_check_replicas(t.model, &error);
        assert_int_equal(status, grid.world.size > 1 ? -1 : 0);
        if (status != 0) assert_non_null(strstr(error.text, rank));
        if (status != 0) assert_non_null(strstr(error.text, param->hf_name));
        trainee_close(&t);
    }
}

static void initial_weights_do_not_depend_on_the_strategy(void **state) {
    (void)state;
    for (int strategy = 0; strategy < NUM_STRATEGIES; strategy++) {
        trainee t[2];
        float *weights[2];
        int64_t count[2];
        for (int i = 0; i < 2; i++) {
            trainee_open(&t[i], i ? &grid : &mt_grid_of_one, tied, i ? strategy : 0, false);
            mt_model_init(t[i].model);
            weights[i] = whole_state(t[i].model, MT_STATE_WEIGHTS, &count[i]);
            trainee_close(&t[i]);
        }
        assert_int_equal(count[0], count[1]);
        assert_memory_equal(weights[0], weights[1], (size_t)count[0] * 4);
        free(weights[0]), free(weights[1]);
    }
}

/* ---- memory */

/* Bytes per parameter in a row of the printed plan; 0 if there is no such row. */
static double plan_bytes(const mt_model *model, const char *row) {
    char *text, *at;
    size_t length;
    double mebibytes, bytes = 0;
    FILE *file = open_memstream(&text, &length);
    mt_report_plan(model, file);
    fclose(file);
    if ((at = strstr(text, row))) assert_int_equal(sscanf(at + strlen(row), "%lf %lf", &mebibytes, &bytes), 2);
    free(text);
    return bytes;
}

static void memory_is_that_of_the_formula(void **state) {
    (void)state;
    static const char shape[] = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 "
                                "--vocab-size 1024 --disable-bias-linear --normalization RMSNorm "
                                "--position-embedding-type rope --hidden-dropout 0";
    for (int variant = 0; variant < 4 * NUM_STRATEGIES; variant++) {
        int strategy = variant / 4;
        bool is_bf16 = variant % 4 > 0, is_precise = variant % 4 == 2; // then gradients and moments take 2 bytes
        bool is_scaled = variant % 4 == 3;                             // then master weights take 2, moments 1 and 2
        double n = grid.world.size, size = is_bf16 ? 2 : 4, rounds = is_precise ? 2 : 4;
        char words[512];
        trainee t;
        snprintf(words, sizeof words, "%s%s%s", shape, is_bf16 ? " --bf16" : "",
                 is_precise  ? precise
                 : is_scaled ? scaled
                             : "");
        trainee_open(&t, &grid, words, strategy, false);
        double weights = size / (strategy >= 3 ? n : 1), gradients = rounds / (strategy >= 2 ? n : 1);
        int64_t num_params;
        mt_model_params(t.model, &num_params);
        double scales = is_scaled ? 2 * 3 * 4 * (double)num_params / 262208 : 0;
        double optimizer = scales + (is_scaled ? 5 : (is_bf16 ? 4 : 0) + 2 * rounds) / (strategy >= 1 ? n : 1);
        assert_true(fabs(plan_bytes(t.model, "weights") - weights) <= 0.02);
        assert_true(fabs(plan_bytes(t.model, "gradients") - gradients) <= 0.02);
        assert_true(fabs(plan_bytes(t.model, "optimizer state") - optimizer) <= 0.02);
        /* two layers and the embedding are whole, of four layers and the embedding */
        double layer = 64 * (4 * 64 + 2 * 256) + 2 * 64, embedding = 1024 * 64, all = 4 * layer + embedding + 64;
        double whole_gradients = strategy >= 2 || is_precise ? 4 : 0, whole_weights = strategy >= 3 ? size : 0;
        assert_true(plan_bytes(t.model, "host memory") == 0);
        double slots = (2 * layer + embedding) / all * (whole_gradients + whole_weights);
        assert_true(fabs(plan_bytes(t.model, "whole buckets") - slots) <= 0.02);
        trainee_close(&t);
    }
}

/* Master weights and moments of all parameters, or of the layers that hold a tenth of them, and the slots. */
static void offloaded_state_is_in_host_memory(void **state) {
    (void)state;
    for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
        int strategy = variant / 2;
        double n = strategy >= 1 ? grid.world.size : 1, part = variant % 2 ? 1 : 49216.0 / 262208;
        char words[512];
        trainee t;
        snprintf(words, sizeof words,
                 "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --vocab-size 1024 "
                 "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --bf16%s%s",
                 offload, variant % 2 ? "1" : "0.1");
        trainee_open(&t, &grid, words, strategy, false);
        double slots = 2 * 8 * (variant % 2 ? 65536 : 49280) / 262208.0 / n;
        assert_true(fabs(plan_bytes(t.model, "optimizer state") - 12 * (1 - part) / n) <= 0.02);
        assert_true(fabs(plan_bytes(t.model, "host memory") - 12 * part / n - slots) <= 0.02);
        trainee_close(&t);
    }
}

/* ---- rest between phases */

/* Device memory in use. New and released memory holds no zeros, and no address is used twice. */
static struct {
    char *memory;
    int64_t bytes;
    bool released;
} allocated[256];
static int num_allocated;

static void *counted_memory_alloc(int64_t bytes) {
    assert_true(num_allocated < 256);
    allocated[num_allocated].memory = mt_cpu_ops.memory_alloc(bytes), allocated[num_allocated].bytes = bytes;
    allocated[num_allocated].released = false;
    memset(allocated[num_allocated].memory, 0xff, (size_t)bytes);
    return allocated[num_allocated++].memory;
}

static void counted_memory_free(void *memory) {
    for (int i = 0; i < num_allocated; i++)
        if (allocated[i].memory == memory) {
            assert_false(allocated[i].released);
            memset(memory, 0xff, (size_t)allocated[i].bytes);
            allocated[i].released = true;
            return;
        }
    mt_cpu_ops.memory_free(memory); // of memory_alloc_ordered
}

static int64_t bytes_in_use(void) {
    int64_t bytes = 0;
    for (int i = 0; i < num_allocated; i++) bytes += allocated[i].released ? 0 : allocated[i].bytes;
    return bytes;
}

/* Steps with a rest before some of them; every rest releases the bytes of the plan's rows, and waking restores them. */
static outcome steps_with_rests(const char *words, int strategy, bool overlaps) {
    static const mt_plan_row rows[MT_NUM_PARTS] = {MT_PLAN_WEIGHTS, MT_PLAN_GRADIENTS, MT_PLAN_OPTIMIZER,
                                                   MT_PLAN_CACHE};
    trainee t;
    outcome o;
    mt_error error;
    trainee_open(&t, &grid, words, strategy, overlaps);
    mt_model_init(t.model);
    for (int step = 0; step < STEPS; step++) {
        unsigned parts = (unsigned)step; // all combinations
        int64_t before = bytes_in_use(), expected = before;
        if (mt_model_rest(t.model, parts & 4, &error) != 0 || mt_model_rest(t.model, parts, &error) != 0)
            fail_msg("%s", error.text);
        for (int part = 0; part < MT_NUM_PARTS; part++)
            expected -= parts >> part & 1 ? mt_model_planned_bytes(t.model, rows[part]) : 0;
        assert_true(bytes_in_use() == expected && (parts % 8 == 0) == (expected == before));
        if (parts % 8 != 0) {
            tiny_source from = {0, 1};
            assert_int_equal(mt_train_step(t.model, &t.state, 2, tiny_batch, &from, &t.batch, NULL, &error), -1);
            assert_non_null(strstr(error.text, "call mt_model_wake"));
        }
        if (mt_model_wake(t.model, 7, &error) != 0) fail_msg("%s", error.text);
        assert_true(bytes_in_use() == before);
        mt_metrics metrics = train_one_step(&t, 2);
        o.losses[step] = metrics.loss, o.norms[step] = metrics.grad_norm;
    }
    o.weights = whole_state(t.model, MT_STATE_WEIGHTS, &o.count);
    if (mt_model_rest(t.model, 7, &error) != 0) fail_msg("%s", error.text);
    trainee_close(&t);
    assert_true(bytes_in_use() == 0);
    for (int i = 0; i < num_allocated; i++) mt_cpu_ops.memory_free(allocated[i].memory);
    num_allocated = 0;
    return o;
}

static void a_model_that_rests_changes_no_bit(void **state) {
    (void)state;
    static const char fp8[] = " --hidden-size 32 --ffn-hidden-size 48 --fp8-format hybrid";
    mt_ops counted = mt_cpu_ops;
    counted.memory_alloc = counted_memory_alloc, counted.memory_free = counted_memory_free;
    for (int variant = 0; variant < 6 * NUM_STRATEGIES; variant++) {
        int strategy = variant / 6;
        char words[800];
        const char *const more[] = {"", " --bf16", fp8, fp8, offload, scaled};
        snprintf(words, sizeof words, "%s%s%s%s", variant % 2 ? experts : tied, more[variant % 6],
                 variant % 6 == 4 ? "0.5" : "", variant % 6 == 3 && strategy > 0 ? " --fp8-param-gather" : "");
        outcome expected = ten_steps(&grid, words, strategy, variant % 4 < 2, 2);
        backend = &counted;
        outcome o = steps_with_rests(words, strategy, variant % 4 < 2);
        backend = &mt_cpu_ops;
        assert_same_outcome(&o, &expected, 0, words);
        assert_memory_equal(o.weights, expected.weights, (size_t)o.count * 4);
        free(o.weights), free(expected.weights);
    }
}

/* ---- checkpoints */

static char folder[64]; // for all ranks

/* A new name; nothing has it yet. */
static void checkpoint_folder(void) {
    MT_CHECK(grid.world.rank != 0 || (new_folder(folder) == 0 && rmdir(folder) == 0));
    mt_broadcast(&grid.world, folder, sizeof folder, 0);
}

static void remove_checkpoint(void) {
    char command[300];
    mt_barrier(&grid.world);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (grid.world.rank == 0) assert_int_equal(system(command), 0);
    mt_barrier(&grid.world);
}

static void assert_same_state(trainee *a, trainee *b) {
    for (int state = 0; state < MT_NUM_STATES; state++) {
        int64_t count_a, count_b;
        float *values_a = whole_state(a->model, (mt_param_state)state, &count_a);
        float *values_b = whole_state(b->model, (mt_param_state)state, &count_b);
        assert_int_equal(count_a, count_b);
        assert_memory_equal(values_a, values_b, (size_t)count_a * 4);
        free(values_a), free(values_b);
    }
}

/* New memory has no zeros, as on a device that other work has used. */
static void *dirty_memory_alloc(int64_t bytes) {
    return memset(mt_cpu_ops.memory_alloc(bytes), 0xff, (size_t)bytes);
}

static void a_model_needs_no_zeroed_memory(void **state) {
    (void)state;
    mt_ops dirty = mt_cpu_ops;
    dirty.memory_alloc = dirty_memory_alloc;
    for (int variant = 0; variant < 2 * NUM_STRATEGIES; variant++) {
        char words[512];
        snprintf(words, sizeof words, "%s%s", untied, variant % 2 ? scaled_fp32 : precise);
        outcome expected = ten_steps(&grid, words, variant / 2, false, 2);
        backend = &dirty;
        outcome o = ten_steps(&grid, words, variant / 2, false, 2);
        backend = &mt_cpu_ops;
        assert_same_outcome(&o, &expected, 0, words);
        free(o.weights), free(expected.weights);
    }
}

/* Three steps, a checkpoint, then three steps by the model that saved it and by a model that loads it. */
static void save_and_resume(int saves, int loads, bool is_bf16, const char *types) {
    char words[512];
    mt_error error;
    trainee first, second;
    snprintf(words, sizeof words, "%s%s%s", tied, is_bf16 ? " --bf16" : "", types);
    trainee_open(&first, &grid, words, saves, saves % 2);
    mt_model_init(first.model);
    for (int i = 0; i < 3; i++) train_one_step(&first, 2);
    if (mt_checkpoint_save(first.model, &first.options, &first.state, folder, NULL, NULL, &error) != 0)
        fail_msg("%s", error.text);
    trainee_open(&second, &grid, words, loads, loads % 2);
    if (mt_checkpoint_load(second.model, &second.options, &second.state, folder, &error) != 0)
        fail_msg("%s", error.text);
    assert_int_equal(second.state.iteration, 3);
    if (types != scaled || !saves == !loads) assert_same_state(&first, &second); // else the scales' parts differ
    for (int i = 0; i < 3; i++) {
        double loss = train_one_step(&first, 2).loss, resumed = train_one_step(&second, 2).loss;
        if (saves == loads) assert_true(loss == resumed);
        if (!(fabs(loss - resumed) <= (is_bf16 || *types ? 0.02 : 1e-5) * loss))
            fail_msg("%s to %s: loss %.9f, resumed %.9f", strategies[saves], strategies[loads], loss, resumed);
    }
    if (saves == loads) assert_same_state(&first, &second); // bit for bit
    trainee_close(&first), trainee_close(&second);
    remove_checkpoint();
}

static void a_run_resumes_under_any_strategy(void **state) {
    (void)state;
    checkpoint_folder();
    for (int saves = 0; saves < NUM_STRATEGIES; saves++)
        for (int loads = 0; loads < NUM_STRATEGIES; loads++) {
            save_and_resume(saves, loads, saves % 2 == loads % 2, "");
            save_and_resume(saves, loads, saves / 2 == loads / 2, precise);
            save_and_resume(saves, loads, true, scaled);
            if (loads == 0) save_and_resume(saves, loads, saves % 2, " --optimizer-cpu-offload");
        }
}

static void one_rank_loads_the_checkpoint_of_many(void **state) {
    (void)state;
    mt_error error;
    checkpoint_folder();
    for (int strategy = 0; strategy < NUM_STRATEGIES; strategy++) {
        trainee together, single;
        trainee_open(&together, &grid, untied, strategy, true);
        mt_model_init(together.model);
        train_one_step(&together, 1);
        if (mt_checkpoint_save(together.model, &together.options, &together.state, folder, NULL, NULL, &error) != 0)
            fail_msg("%s", error.text);
        trainee_open(&single, &mt_grid_of_one, untied, 0, false);
        if (mt_checkpoint_load(single.model, &single.options, &single.state, folder, &error) != 0)
            fail_msg("%s", error.text);
        assert_same_state(&together, &single);
        trainee_close(&together), trainee_close(&single);
        remove_checkpoint();
    }
}

/* ---- asynchronous saves */

/* Saves after each of four steps; the last three saves wait until the previous one is in place. Then saves again, and
 * loads the first checkpoint before the copies of the last save are made. */
static void train_and_save(const char *words, int strategy, const char *into, bool async) {
    trainee t;
    mt_saver *saver;
    mt_error error;
    mt_run_state of_first;
    char first[1024];
    trainee_open(&t, &grid, words, strategy, true);
    mt_model_init(t.model);
    mt_saver_open(&saver, t.model, &t.options, into, NULL, NULL, async);
    const late_stream *copies = async ? &late_streams[num_streams - 1] : NULL;
    for (int i = 0; i < 5; i++) {
        if (i < 4) train_one_step(&t, 2);
        if (i < 4 && async) assert_int_equal(copies->count, 0); // the step waited for the copies
        t.state.iteration = i + 1;
        if (mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
        if (mt_saver_save(saver, &t.state, &error) != 0) fail_msg("%s", error.text);
        if (async) assert_true(copies->count > 0); // the save did not
    }
    snprintf(first, sizeof first, "%s/iter_0000001", into);
    if (mt_checkpoint_load(t.model, &t.options, &of_first, first, &error) != 0) fail_msg("%s", error.text);
    if (mt_saver_finish(saver, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(mt_saver_in_place(saver), 5);
    mt_saver_close(saver);
    trainee_close(&t);
}

static void late_copies_have_the_values_at_the_time_of_the_save(void **state) {
    (void)state;
    char offloaded[200];
    snprintf(offloaded, sizeof offloaded, "%s%s0.5", tied, offload);
    const char *const variants[] = {tied, untied, experts, offloaded};
    mt_ops late = late_ops();
    checkpoint_folder();
    for (int variant = 0; variant < 4 * NUM_STRATEGIES; variant++) {
        char into[2][300], command[1500];
        for (int async = 0; async < 2; async++) {
            snprintf(into[async], sizeof into[async], "%s/%s", folder, async ? "async" : "sync");
            if (grid.world.rank == 0) assert_true(mkdir(folder, 0777) == 0 || async);
            mt_barrier(&grid.world);
            backend = async ? &late : &mt_cpu_ops;
            train_and_save(variants[variant / NUM_STRATEGIES], variant % NUM_STRATEGIES, into[async], async);
        }
        backend = &mt_cpu_ops;
        double differs = 0;
        for (int i = 1; i <= 5 && grid.world.rank == 0; i++) { // equal checksums: equal files
            snprintf(command, sizeof command, "cmp '%s/iter_000000%d/checksums.json' '%s/iter_000000%d/checksums.json'",
                     into[0], i, into[1], i);
            differs += system(command) != 0;
        }
        mt_all_reduce_max(&grid.world, &differs, 1, MT_F64);
        remove_checkpoint();
        if (differs > 0) fail_msg("model %d, %s", variant / NUM_STRATEGIES, strategies[variant % NUM_STRATEGIES]);
    }
}

static void a_failed_save_is_an_error_on_every_rank(void **state) {
    (void)state;
    mt_error error = {{0}};
    trainee t;
    checkpoint_folder();
    if (grid.world.rank == 0) { // a file at the path of the folder
        FILE *file = fopen(folder, "w");
        assert_non_null(file);
        fclose(file);
    }
    mt_barrier(&grid.world);
    trainee_open(&t, &grid, tied, 3, false);
    assert_int_equal(mt_checkpoint_save(t.model, &t.options, &t.state, folder, NULL, NULL, &error), -1);
    assert_non_null(strstr(error.text, folder));
    mt_ops late = late_ops();
    trainee_close(&t);
    backend = &late;
    trainee_open(&t, &grid, tied, 3, false);
    mt_saver *saver;
    mt_saver_open(&saver, t.model, &t.options, folder, NULL, NULL, true);
    memset(&error, 0, sizeof error);
    assert_int_equal(mt_saver_save(saver, &t.state, &error), -1);
    assert_non_null(strstr(error.text, folder));
    assert_int_equal(mt_saver_finish(saver, &error), 0);
    assert_int_equal(mt_saver_in_place(saver), -1);
    mt_saver_close(saver); // without an unfinished save
    trainee_close(&t);
    backend = &mt_cpu_ops;
    remove_checkpoint();
}

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv);
    mt_options_default(&options);
    if (mt_grid_build(&grid, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    open_grids();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_strategy_trains_tied_models_like_one_rank),
        cmocka_unit_test(every_strategy_trains_untied_models_like_one_rank),
        cmocka_unit_test(every_strategy_trains_in_bf16_to_within_two_percent),
        cmocka_unit_test(every_strategy_rounds_gradients_and_moments_like_one_rank),
        cmocka_unit_test(streams_wait_for_their_inputs),
        cmocka_unit_test(streams_wait_for_rounded_gradients),
        cmocka_unit_test(streams_of_experts_wait_for_their_inputs),
        cmocka_unit_test(weights_gathered_in_fp8_change_no_bit),
        cmocka_unit_test(a_model_needs_no_zeroed_memory),
        cmocka_unit_test(a_model_that_rests_changes_no_bit),
        cmocka_unit_test(an_optimizer_on_the_host_changes_no_bit),
        cmocka_unit_test(streams_wait_for_the_host),
        cmocka_unit_test(every_strategy_trains_every_kind_of_parameter_like_pytorch_on_one),
        cmocka_unit_test(layers_reduced_together_train_bit_for_bit_like_layers_alone),
        cmocka_unit_test(every_rank_ends_with_the_same_weights),
        cmocka_unit_test(a_replica_with_another_bit_is_named),
        cmocka_unit_test(initial_weights_do_not_depend_on_the_strategy),
        cmocka_unit_test(memory_is_that_of_the_formula),
        cmocka_unit_test(offloaded_state_is_in_host_memory),
        cmocka_unit_test(a_run_resumes_under_any_strategy),
        cmocka_unit_test(one_rank_loads_the_checkpoint_of_many),
        cmocka_unit_test(late_copies_have_the_values_at_the_time_of_the_save),
        cmocka_unit_test(a_failed_save_is_an_error_on_every_rank),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
