/* test_bad_steps_mpi.c: bad steps on four ranks. Injects faults into the results of operations, and compares runs that
 * skip, rewind or rerun the step bit for bit with a run without the fault. */
// Sections of megatron.c: §14
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"
#include "new_folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { LENGTH = 16, STEPS = 8, BATCH = 8 };

static mt_grid grid;

/* ---- faults */

static mt_ops ops; // the CPU backend with faulty operations

static struct {
    bool gradient, loss; // the faulty operation
    float value;         // replaces (gradient) or is added to (loss) one result
    int rank;            // the faulty rank
    int64_t times;       // faulty calls left
    bool no_update;      // AdamW does nothing
} fault;

/* True if this call is faulty; counts it. */
static bool is_faulty(bool here) {
    if (!here || fault.rank != grid.world.rank || fault.times == 0) return false;
    fault.times--;
    return true;
}

static void faulty_backward_weight(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cpu_ops.linear_backward_weight(a, dtype, stream);
    if (is_faulty(fault.gradient)) a->dw[a->K / 2] = fault.value;
}

static void faulty_fp8_product(const mt_fp8_product_args *a, mt_stream *stream) {
    mt_cpu_ops.fp8_product(a, stream);
    if (is_faulty(fault.gradient)) *(float *)a->out = fault.value;
}

static void faulty_nll_loss(double *sums, float *dlogp, const float *logp, const float *weights, int64_t T,
                            mt_stream *stream) {
    mt_cpu_ops.nll_loss(sums, dlogp, logp, weights, T, stream);
    if (is_faulty(fault.loss)) sums[0] += (double)fault.value;
}

static void faulty_adamw_step(const mt_update_args *a, const mt_update *adamw, mt_stream *stream) {
    if (!fault.no_update) mt_cpu_ops.adamw_step(a, adamw, stream);
}

static void faulty_call_host(mt_stream *stream, mt_host_function *function, void *context) { // AdamW on the host
    if (!fault.no_update) mt_cpu_ops.stream_call_host(stream, function, context);
}

/* ---- a tiny run */

typedef struct trainee {
    mt_run_options options;
    mt_model *model;
    mt_saver *saver;
    mt_batch batch;
    mt_run_state state;
} trainee;

typedef struct tiny_source {
    int64_t first, stride;
} tiny_source;

static int64_t masked_step;  // all tokens of this step are masked; 0: none
static int64_t masked_steps; // and of these first ones

/* A sequence is a function of its number only. */
static int tiny_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const tiny_source *from = context;
    int64_t number = from->first + index * from->stride;
    batch->num_tokens = LENGTH, batch->num_spans = 1;
    batch->spans[0] = (mt_span){0, LENGTH, 0, LENGTH, true};
    for (int64_t i = 0; i < LENGTH; i++) {
        batch->tokens[i] = (int32_t)((number % 4 * 7 + i * i * 3) % 60);
        batch->labels[i] = (int32_t)((number % 4 * 7 + (i + 1) * (i + 1) * 3) % 60);
        batch->positions[i] = (int32_t)i, batch->token_index[i] = number * LENGTH + i;
        batch->loss_mask[i] = number / BATCH + 1 == masked_step || number / BATCH < masked_steps ? 0 : 1;
    }
    return 0;
}

static const char *const layouts[] = {
    "",
    "--data-parallel-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather",
    "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --data-parallel-sharding-strategy optim_grads --bf16",
    "--context-parallel-size 2 --pipeline-model-parallel-size 2",
    ("--data-parallel-sharding-strategy optim_grads --bf16 --optimizer-cpu-offload --use-precision-aware-optimizer "
     "--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
    "--pipeline-model-parallel-size 2 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
};
enum { NUM_LAYOUTS = sizeof layouts / sizeof *layouts };

static void trainee_open(trainee *t, const char *layout, const char *words) {
    char line[1024], *arguments[64];
    int count = 0;
    mt_error error = {{0}};
    *t = (trainee){0};
    snprintf(line, sizeof line,
             "train --mock-data --seq-length %d --micro-batch-size 1 --global-batch-size %d --train-iters %d --lr 1e-2 "
             "--lr-decay-style constant --init-method-std 0.1 --device cpu --num-layers 2 --hidden-size 24 "
             "--num-attention-heads 2 --ffn-hidden-size 40 --vocab-size 60 --make-vocab-size-divisible-by 64 "
             "--distributed-timeout-seconds 60 %s %s",
             LENGTH, BATCH, STEPS, layout, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(&t->options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0) fail_msg("%s", error.text);
    if (mt_options_finish(&t->options, MT_PROGRAM_TRAIN, grid.world.size, &error) != 0) fail_msg("%s", error.text);
    if (mt_grid_build(&grid, &t->options.stack, &error) != 0) fail_msg("%s", error.text);
    int64_t tokens = LENGTH / t->options.stack.context_parallel_size;
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = LENGTH, .train = true};
    if (mt_model_create(&t->model, &t->options.stack, &grid, &ops, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_batch_alloc(&t->batch, LENGTH);
    mt_model_init(t->model);
    memset(&fault, 0, sizeof fault);
}

static void trainee_close(trainee *t) {
    mt_model_destroy(t->model);
    mt_batch_free(&t->batch);
    mt_options_free(&t->options);
    mt_grid_clear(&grid);
}

/* One step as in train.c; returns MT_REWIND after a rewind. */
static int step(trainee *t, mt_metrics *metrics, mt_error *error) {
    tiny_source from = {t->state.consumed_train_samples + grid.data.rank, grid.data.size};
    int status =
        mt_train_step(t->model, &t->state, BATCH / grid.data.size, tiny_batch, &from, &t->batch, metrics, error);
    if (status == MT_REWIND && mt_checkpoint_rewind(t->model, &t->options, &t->state, t->saver, error) != 0) return -1;
    return status;
}

/* The bits of this rank's weights, master weights and moments; free them. */
static char *snapshot(trainee *t, int64_t *bytes) {
    int64_t num_buckets;
    mt_model_buckets(t->model, &num_buckets);
    char *all = NULL;
    *bytes = 0;
    for (int64_t i = 0; i < num_buckets; i++)
        for (int state = 0; state < MT_NUM_STATES; state++) {
            mt_shard shard = mt_bucket_shard(t->model, i, (mt_param_state)state);
            int64_t size = shard.data ? shard.count * mt_dtype_size(shard.dtype) : 0;
            all = mt_realloc(all, *bytes + size + 1);
            if (size > 0) memcpy(all + *bytes, shard.data, (size_t)size);
            *bytes += size;
        }
    return all;
}

/* Arms a fault. Rank 3 is in the last stage, so it has the loss, on every layout. */
static void arm(bool loss, float value, int rank, int64_t times) {
    fault.loss = loss, fault.gradient = !loss, fault.value = value, fault.rank = rank, fault.times = times;
}

/* Trains to the end with a fault in step `bad` (from 1), once or `always`; returns the snapshot. */
static char *train(trainee *t, int64_t bad, bool loss, float value, bool always, mt_metrics *metrics, int64_t *bytes) {
    mt_error error;
    bool struck = false;
    while (t->state.iteration < STEPS) {
        bool strike = t->state.iteration + 1 == bad && (always || !struck);
        if (strike) arm(loss, value, 3, 1), struck = true;
        int status = step(t, t->state.iteration % 3 == 2 || t->state.iteration + 1 == STEPS ? metrics : NULL, &error);
        fault.times = 0;
        if (status < 0) fail_msg("%s", error.text);
    }
    if (mt_train_finish(t->model, &error) != 0) fail_msg("%s", error.text);
    return snapshot(t, bytes);
}

/* Trains to the end without faults; step `without` (0: none) makes no update. Returns the snapshot. */
static char *train_without(const char *layout, int64_t without, int64_t *bytes) {
    trainee t;
    mt_error error;
    trainee_open(&t, layout, "");
    while (t.state.iteration < STEPS) {
        fault.no_update = t.state.iteration + 1 == without;
        if (step(&t, NULL, &error) != 0) fail_msg("%s", error.text);
        if (fault.no_update) t.state.optimizer_step--; // AdamW does not count it
    }
    if (mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
    char *all = snapshot(&t, bytes);
    trainee_close(&t);
    return all;
}

static void assert_same(const char *what, char *got, int64_t got_bytes, char *want, int64_t want_bytes, bool same) {
    assert_int_equal(got_bytes, want_bytes);
    if ((memcmp(got, want, (size_t)got_bytes) == 0) != same)
        fail_msg("'%s': the state after the run is %s", what, same ? "different" : "the same");
    free(got), free(want);
}

/* ---- messages of rank 0 on standard error */

static int saved_stderr;
static FILE *captured;

static void capture_start(void) {
    fflush(stderr);
    saved_stderr = dup(2);
    captured = tmpfile();
    assert_non_null(captured);
    dup2(fileno(captured), 2);
}

static void capture_end(char text[4096]) {
    fflush(stderr);
    dup2(saved_stderr, 2);
    close(saved_stderr);
    rewind(captured);
    text[fread(text, 1, 4095, captured)] = 0;
    fclose(captured);
}

static void assert_printed(const char *text, const char *words) {
    if (grid.world.rank == 0 && !strstr(text, words)) fail_msg("rank 0 printed '%s', without '%s'", text, words);
}

/* ---- tests */

static void a_skipped_step_makes_no_update_on_every_layout(void **state) {
    (void)state;
    static const struct {
        bool loss;
        float value;
    } faults[] = {{false, NAN}, {false, INFINITY}, {true, NAN}, {true, -INFINITY}};
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        int64_t bytes, plain_bytes, without_bytes;
        char *plain = train_without(layouts[k], 0, &plain_bytes);
        for (int i = 0; i < 4; i++) {
            trainee t;
            mt_metrics metrics = {0};
            trainee_open(&t, layouts[k], "--bad-step-policy skip");
            char *got = train(&t, 4, faults[i].loss, faults[i].value, true, &metrics, &bytes), *again;
            assert_int_equal(metrics.skipped, 1);
            assert_true(isfinite(metrics.loss) && isfinite(metrics.grad_norm));
            trainee_close(&t);
            again = memcpy(mt_malloc(bytes), got, (size_t)bytes);
            assert_same(layouts[k], again, bytes, memcpy(mt_malloc(plain_bytes), plain, (size_t)plain_bytes),
                        plain_bytes, false);
            assert_same(layouts[k], got, bytes, train_without(layouts[k], 4, &without_bytes), bytes, true);
        }
        free(plain);
    }
}

static void every_rank_stops_at_a_bad_step_and_the_state_is_unchanged(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        trainee t;
        mt_error error = {{0}};
        int64_t bytes, after_bytes;
        trainee_open(&t, layouts[k], "");
        for (int i = 0; i < 3; i++) assert_int_equal(step(&t, NULL, &error), 0);
        assert_int_equal(mt_train_finish(t.model, &error), 0);
        char *before = snapshot(&t, &bytes);
        arm(false, NAN, 2, 1);
        mt_metrics metrics;
        assert_int_equal(step(&t, &metrics, &error), -1);
        assert_non_null(strstr(error.text, "iteration 4: the gradient norm is"));
        char *after = snapshot(&t, &after_bytes);
        assert_same(layouts[k], after, after_bytes, before, bytes, true);
        trainee_close(&t);
    }
}

static void without_the_check_non_finite_values_spread(void **state) {
    (void)state;
    trainee t;
    mt_error error;
    mt_metrics metrics;
    trainee_open(&t, "", "--no-check-for-nan-in-loss-and-grad");
    arm(false, NAN, 1, 1);
    assert_int_equal(step(&t, NULL, &error), 0);
    assert_int_equal(step(&t, &metrics, &error), 0);
    assert_true(isnan(metrics.loss) && metrics.skipped == 0);
    trainee_close(&t);
}

static void too_many_bad_steps_in_a_row_end_the_run(void **state) {
    (void)state;
    for (int reads = 0; reads < 2; reads++) {
        trainee t;
        mt_error error = {{0}};
        mt_metrics metrics;
        int status = 0;
        int64_t steps = 0;
        trainee_open(&t, "", "--bad-step-policy skip --max-bad-steps-in-a-row 2");
        for (; steps < 12 && status == 0; steps++) {
            bool bad = steps == 0 || steps == 1 || steps >= 4; // two bad steps, two good steps, then only bad steps
            arm(true, bad ? NAN : 0, 1, 1);
            status = step(&t, reads ? &metrics : NULL, &error);
        }
        assert_int_equal(status, -1);
        assert_int_equal(steps, 7); // the third bad step in a row; the CPU runs no step ahead
        assert_non_null(strstr(error.text, "iteration 7: the loss is"));
        assert_non_null(strstr(error.text, "after 2 bad steps in a row"));
        trainee_close(&t);
    }
}

static void a_loss_spike_is_skipped_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++)
        for (int64_t bad = 2; bad <= 5; bad += 3) { // before and after there is an average
            trainee t;
            mt_metrics metrics = {0};
            int64_t bytes, without_bytes; // with tensor parallelism only one of the two ranks with the loss is faulty
            trainee_open(&t, layouts[k],
                         "--bad-step-policy skip --check-for-spiky-loss --loss-spike-factor 3 --loss-spike-window 3");
            char *got = train(&t, bad, true, 4 * 6 * BATCH * LENGTH, true, &metrics, &bytes);
            assert_int_equal(metrics.skipped, bad == 5);
            trainee_close(&t);
            assert_same(layouts[k], got, bytes, train_without(layouts[k], bad == 5 ? 5 : 0, &without_bytes), bytes,
                        true);
        }
}

/* Creates a folder and broadcasts its name. */
static void make_folder(char folder[64]) {
    MT_CHECK(grid.world.rank != 0 || new_folder(folder) == 0);
    mt_broadcast(&grid.world, folder, 64, 0);
}

static void remove_folder(const char *folder) {
    char command[160];
    mt_barrier(&grid.world);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (grid.world.rank == 0) assert_int_equal(system(command), 0);
}

/* AdamW's first update is lr in size, however many steps without tokens or with a NaN came before; the saved state
 * counts that one. */
static void steps_without_an_update_do_not_change_the_size_of_the_first_one(void **state) {
    (void)state;
    static const int fp32[] = {0, 1, 7};
    for (int k = 0; k < 3 * 3 * 2; k++) {
        trainee t;
        mt_error error = {{0}};
        mt_metrics metrics;
        char folder[64], text[4096];
        int64_t before_steps = k % 3 * 2, bytes, counted = 0, whole = 0;
        bool masks = k / 9;
        make_folder(folder);
        trainee_open(
            &t, layouts[fp32[k / 3 % 3]],
            "--bad-step-policy skip --max-bad-steps-in-a-row 9 --adam-eps 1e-15 --weight-decay 0 --clip-grad 0");
        masked_steps = masks ? before_steps : 0;
        capture_start();
        for (int64_t i = 0; i < before_steps; i++) {
            if (!masks) arm(false, NAN, 3, 1);
            if (step(&t, i % 2 ? &metrics : NULL, &error) != 0) mt_die("%s", error.text);
        }
        capture_end(text);
        fault.times = 0;
        mt_shard shard = mt_bucket_shard(t.model, 0, MT_STATE_WEIGHTS);
        bytes = shard.count * 4;
        float *before = memcpy(mt_malloc(bytes), shard.data, (size_t)bytes);
        if (step(&t, &metrics, &error) != 0) fail_msg("%s", error.text);
        masked_steps = 0;
        for (int64_t i = 0; i < shard.count; i++) {
            double change = fabs((double)((const float *)shard.data)[i] - (double)before[i]) / 1e-2;
            assert_true(change < 1.0001);
            counted += change > 0, whole += change > 0.9999;
        }
        if (2 * whole < counted || counted == 0)
            fail_msg("after %lld steps without an update, %lld of %lld changes are lr in size", (long long)before_steps,
                     (long long)whole, (long long)counted);
        assert_true(t.state.optimizer_step == 1 && t.state.iteration == before_steps + 1);
        if (mt_checkpoint_save(t.model, &t.options, &t.state, folder, NULL, NULL, &error) != 0)
            fail_msg("%s", error.text);
        mt_run_state loaded = {0};
        if (mt_checkpoint_load(t.model, &t.options, &loaded, folder, &error) != 0) fail_msg("%s", error.text);
        assert_true(loaded.optimizer_step == 1);
        trainee_close(&t);
        remove_folder(folder);
        free(before);
    }
}

/* Saves after step 3; step 6 is faulty. A fault that occurs once leaves no trace; a repeated fault costs one update. */
static void a_run_that_rewinds_ends_as_without_the_fault(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++)
        for (int always = 0; always < 2; always++) {
            trainee t;
            mt_metrics metrics = {0};
            mt_error error;
            char folder[64], words[160], text[4096];
            int64_t bytes, without_bytes;
            make_folder(folder);
            snprintf(words, sizeof words, "--bad-step-policy rewind --save %s", folder);
            trainee_open(&t, layouts[k], words);
            for (int i = 0; i < 3; i++) assert_int_equal(step(&t, NULL, &error), 0);
            if (mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
            if (mt_checkpoint_save(t.model, &t.options, &t.state, folder, NULL, NULL, &error) != 0)
                fail_msg("%s", error.text);
            capture_start();
            char *got = train(&t, 6, k % 2, NAN, always, &metrics, &bytes);
            capture_end(text);
            assert_printed(text, "going back to the last checkpoint");
            assert_printed(text, "went back to iteration 3");
            assert_int_equal(metrics.skipped, 1 + always);
            trainee_close(&t);
            assert_same(layouts[k], got, bytes, train_without(layouts[k], always ? 6 : 0, &without_bytes), bytes, true);
            remove_folder(folder);
        }
}

/* The average of the loss comes back with the checkpoint, so the repeated spike is found again, and skipped. */
static void a_spike_is_found_again_after_the_rewind(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        trainee t;
        mt_metrics metrics = {0};
        mt_error error;
        char folder[64], words[200], text[4096];
        int64_t bytes, without_bytes;
        make_folder(folder);
        snprintf(
            words, sizeof words,
            "--bad-step-policy rewind --check-for-spiky-loss --loss-spike-factor 3 --loss-spike-window 3 --save %s",
            folder);
        trainee_open(&t, layouts[k], words);
        for (int i = 0; i < 4; i++) assert_int_equal(step(&t, NULL, &error), 0);
        if (mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
        if (mt_checkpoint_save(t.model, &t.options, &t.state, folder, NULL, NULL, &error) != 0)
            fail_msg("%s", error.text);
        capture_start();
        char *got = train(&t, 5, true, 4 * 6 * BATCH * LENGTH, true, &metrics, &bytes);
        capture_end(text);
        assert_printed(text, "went back to iteration 4");
        assert_printed(text, "times its average; this step makes no update");
        assert_int_equal(metrics.skipped, 2);
        trainee_close(&t);
        assert_same(layouts[k], got, bytes, train_without(layouts[k], 5, &without_bytes), bytes, true);
        remove_folder(folder);
    }
}

/* --finetune is for the folder of --load, not for the run's own checkpoints. */
static void a_fine_tuned_run_rewinds_to_its_own_step(void **state) {
    (void)state;
    trainee t;
    mt_metrics metrics = {0};
    mt_error error;
    char folders[2][64], words[240], text[4096];
    int64_t bytes, without_bytes;
    for (int i = 0; i < 2; i++) make_folder(folders[i]);
    trainee_open(&t, "", "");
    if (mt_checkpoint_save(t.model, &t.options, &t.state, folders[0], NULL, NULL, &error) != 0)
        fail_msg("%s", error.text);
    trainee_close(&t);
    snprintf(words, sizeof words, "--bad-step-policy rewind --load %s --finetune --save %s", folders[0], folders[1]);
    trainee_open(&t, "", words);
    for (int i = 0; i < 3; i++) assert_int_equal(step(&t, NULL, &error), 0);
    if (mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
    if (mt_checkpoint_save(t.model, &t.options, &t.state, folders[1], NULL, NULL, &error) != 0)
        fail_msg("%s", error.text);
    capture_start();
    char *got = train(&t, 6, true, NAN, false, &metrics, &bytes);
    capture_end(text);
    assert_printed(text, "went back to iteration 3");
    trainee_close(&t);
    assert_same("fine-tuned", got, bytes, train_without("", 0, &without_bytes), bytes, true);
    for (int i = 0; i < 2; i++) remove_folder(folders[i]);
}

static void a_step_without_tokens_changes_nothing_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++)
        for (int reruns = 0; reruns < 2; reruns++) {
            trainee t;
            mt_metrics metrics = {0};
            char text[4096];
            int64_t bytes, without_bytes;
            trainee_open(&t, layouts[k], reruns ? "--rerun-mode validate_results --log-interval 1" : "");
            masked_step = 5;
            capture_start();
            char *got = train(&t, 0, false, 0, false, &metrics, &bytes);
            capture_end(text);
            masked_step = 0;
            assert_printed(text, "iteration 5: every token is masked; this step makes no update");
            assert_true(!strstr(text, "ran again"));
            assert_int_equal(metrics.skipped, 1);
            trainee_close(&t);
            assert_same(layouts[k], got, bytes, train_without(layouts[k], 5, &without_bytes), bytes, true);
        }
}

static void rewinding_before_the_first_checkpoint_is_an_error(void **state) {
    (void)state;
    trainee t;
    mt_metrics metrics;
    mt_error error = {{0}};
    char folder[64], words[160], text[4096];
    make_folder(folder);
    snprintf(words, sizeof words, "--bad-step-policy rewind --save %s", folder);
    trainee_open(&t, "", words);
    capture_start();
    arm(true, NAN, 3, 1);
    int status = step(&t, &metrics, &error);
    capture_end(text);
    assert_int_equal(status, -1);
    assert_non_null(strstr(error.text, "no checkpoint yet"));
    trainee_close(&t);
    remove_folder(folder);
}

/* The saver is not polled, so at the bad step the last save is not yet in place. */
static void rewinding_waits_for_an_unfinished_save(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++)
        for (int first = 0; first < 2; first++) { // the save is the first one, or replaces an older one
            trainee t;
            mt_error error;
            mt_metrics metrics = {0};
            char folder[64], words[160], text[4096];
            int64_t bytes, plain_bytes;
            make_folder(folder);
            snprintf(words, sizeof words, "--bad-step-policy rewind --keep-checkpoints 1 --save %s", folder);
            trainee_open(&t, layouts[k], words);
            mt_saver_open(&t.saver, t.model, &t.options, folder, NULL, NULL, true);
            for (int i = 0; i < 4; i++) {
                if (step(&t, NULL, &error) != 0 || mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
                if (i != 3 && (first || i != 1)) continue;
                if (mt_saver_save(t.saver, &t.state, &error) != 0) fail_msg("%s", error.text);
            }
            capture_start();
            char *got = train(&t, 6, k % 2, NAN, false, &metrics, &bytes);
            capture_end(text);
            assert_printed(text, "went back to iteration 4");
            assert_int_equal(mt_saver_in_place(t.saver), 4);
            mt_saver_close(t.saver);
            trainee_close(&t);
            assert_same(layouts[k], got, bytes, train_without(layouts[k], 0, &plain_bytes), bytes, true);
            remove_folder(folder);
        }
}

/* A host may see files of another host late: odd ranks get a folder that names an older checkpoint. */
static void every_rank_loads_the_checkpoint_that_rank_0_finds(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        trainee t;
        mt_error error;
        char folder[64], late[80], command[320];
        make_folder(folder);
        trainee_open(&t, layouts[k], "");
        for (int i = 1; i <= 2; i++) {
            if (step(&t, NULL, &error) != 0 || mt_train_finish(t.model, &error) != 0) fail_msg("%s", error.text);
            if (mt_checkpoint_save(t.model, &t.options, &t.state, folder, NULL, NULL, &error) != 0)
                fail_msg("%s", error.text);
        }
        snprintf(late, sizeof late, "%s/late", folder);
        snprintf(command, sizeof command, "cd %s && mkdir late && ln -s ../iter_0000001 ../iter_0000002 late && %s",
                 folder, "echo 1 >late/latest_checkpointed_iteration.txt");
        if (grid.world.rank == 0) assert_int_equal(system(command), 0);
        mt_barrier(&grid.world);
        const char *own = grid.world.rank % 2 ? late : folder;
        if (mt_checkpoint_load(t.model, &t.options, &t.state, own, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(t.state.iteration, 2);
        trainee_close(&t);
        remove_folder(folder);
    }
}

static mt_event *any_event(void) {
    static char event;
    return (mt_event *)(void *)&event;
}

static void nothing_is_recorded(mt_event *event, mt_stream *stream) {
    (void)event, (void)stream;
}

static void no_event(mt_event *event) {
    (void)event;
}

/* With events, as on a GPU, steps are enqueued ahead, and a bad step may be found only when something else waits for
 * it, such as a save of a later step. */
static void a_bad_step_found_late_is_reported_before_a_save(void **state) {
    (void)state;
    trainee t;
    mt_error error;
    mt_ops waiting = ops;
    mt_metrics metrics = {0};
    char folder[64], words[160], text[4096];
    int64_t bytes, plain_bytes;
    ops.event_create = any_event, ops.event_destroy = ops.event_synchronize = no_event;
    ops.event_record = nothing_is_recorded;
    make_folder(folder);
    snprintf(words, sizeof words, "--bad-step-policy rewind --save %s", folder);
    trainee_open(&t, layouts[3], words);
    for (int i = 0; i < 3; i++) assert_int_equal(step(&t, NULL, &error), 0);
    assert_int_equal(mt_train_updates(t.model, &t.state), 3); // two of them are not yet checked
    assert_int_equal(mt_train_finish(t.model, &error), 0);
    assert_int_equal(mt_train_bad_iteration(t.model), 0);
    if (mt_checkpoint_save(t.model, &t.options, &t.state, folder, NULL, NULL, &error) != 0) fail_msg("%s", error.text);
    capture_start();
    arm(true, NAN, 3, 1);
    assert_int_equal(step(&t, NULL, &error), 0); // its result is not yet read
    assert_int_equal(step(&t, NULL, &error), 0);
    assert_int_equal(mt_train_finish(t.model, &error), 0);
    bool goes_back = mt_train_bad_iteration(t.model) == 4;
    assert_int_equal(step(&t, NULL, &error), MT_REWIND);
    capture_end(text);
    assert_true(goes_back && mt_train_bad_iteration(t.model) == 0);
    assert_printed(text, "went back to iteration 3");
    char *got = train(&t, 0, true, 0, false, &metrics, &bytes);
    trainee_close(&t);
    ops = waiting;
    assert_same(layouts[3], got, bytes, train_without(layouts[3], 0, &plain_bytes), bytes, true);
    remove_folder(folder);
}

static void a_transient_fault_is_repaired_and_its_rank_named(void **state) {
    (void)state;
    static const char *const shared[] = {
        "", "--data-parallel-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather",
        "--data-parallel-sharding-strategy optim_grads_params", "--fp8-format hybrid --fp8-recipe delayed"};
    for (int k = 0; k < 4; k++)
        for (int loss = 0; loss < 2; loss++) {
            trainee t;
            mt_error error;
            mt_metrics metrics = {0};
            char text[4096];
            int64_t bytes, plain_bytes;
            trainee_open(&t, shared[k], "--rerun-mode validate_results --log-interval 1");
            capture_start();
            for (int i = 0; i < STEPS; i++) {
                if (i == 4) arm(loss, NAN, 2, 1);
                if (step(&t, &metrics, &error) != 0) mt_die("%s", error.text);
            }
            capture_end(text);
            assert_printed(text, "iteration 5 ran again: a transient fault, rank 2 had a different result; the "
                                 "second result is used");
            assert_int_equal(metrics.skipped, 0);
            char *got = snapshot(&t, &bytes);
            trainee_close(&t);
            assert_same(shared[k], got, bytes, train_without(shared[k], 0, &plain_bytes), bytes, true);
        }
}

/* Also with spikes, which are finite. Every rank has the loss here. */
static void a_repeatable_fault_is_reported_and_left_to_the_policy(void **state) {
    (void)state;
    for (int spikes = 0; spikes < 2; spikes++) {
        trainee t;
        mt_error error;
        mt_metrics metrics = {0};
        char text[4096];
        trainee_open(
            &t, "",
            "--rerun-mode validate_results --bad-step-policy skip --check-for-spiky-loss --loss-spike-factor 2 "
            "--loss-spike-window 2");
        capture_start();
        for (int i = 0; i < STEPS; i++) {
            arm(true, spikes ? 1e6f : NAN, 1, i == 4 ? 4 : 0); // both micro-batches, twice
            if (step(&t, &metrics, &error) != 0) mt_die("%s", error.text);
        }
        capture_end(text);
        assert_printed(text, "iteration 5 ran again: a repeatable fault, every rank had the same result");
        if (!spikes) assert_printed(text, "not finite: rank 1\n");
        assert_printed(text, "this step makes no update");
        assert_int_equal(metrics.skipped, 1);
        trainee_close(&t);
    }
}

/* Trains with injected faults; rank 0's messages go to `text`. Returns the snapshot. */
static char *train_injected(const char *layout, const char *type, char text[4096], int64_t *bytes) {
    trainee t;
    mt_error error;
    mt_metrics metrics = {0};
    char words[200];
    snprintf(words, sizeof words,
             "--rerun-mode validate_results --bad-step-policy skip --max-bad-steps-in-a-row 100 "
             "--error-injection-rate 7 --error-injection-type %s",
             type);
    trainee_open(&t, layout, words);
    capture_start();
    for (int i = 0; i < STEPS; i++)
        if (step(&t, &metrics, &error) != 0) mt_die("%s", error.text);
    capture_end(text);
    char *got = snapshot(&t, bytes);
    trainee_close(&t);
    return got;
}

/* The ranks, "rank 2" or "ranks 0 1", behind `before` in the next line of a text that has it; the text after them. */
static const char *find_ranks(const char *text, const char *before, const char *after, char ranks[100]) {
    const char *found = strstr(text, before), *end = found ? strstr(found, after) : NULL;
    if (!end) return NULL;
    found += strlen(before);
    snprintf(ranks, 100, "%.*s", (int)(end - found), found);
    return end;
}

/* Each injected transient fault is found on its ranks, and no weight differs from a run without. */
static void injected_transient_faults_are_found_on_their_ranks_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        char text[4096], injected[100], named[100];
        int64_t bytes, plain_bytes;
        char *got = train_injected(layouts[k], "transient_error", text, &bytes);
        int count = 0;
        for (const char *at = text; (at = find_ranks(at, "injecting a transient error on ", " (--error", injected));) {
            at = find_ranks(at, "ran again: a transient fault, ", " had a different result", named);
            assert_non_null(at);
            assert_string_equal(injected, named);
            count++;
        }
        if (grid.world.rank == 0 && count == 0) fail_msg("'%s': no fault was injected", layouts[k]);
        assert_null(strstr(text, "repeatable"));
        assert_null(strstr(text, "iteration 1:")); // as in Megatron-LM
        assert_same(layouts[k], got, bytes, train_without(layouts[k], 0, &plain_bytes), bytes, true);
    }
}

static void injected_persistent_faults_are_named_and_left_to_the_policy_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        char text[4096], injected[100], named[100];
        int64_t bytes, plain_bytes;
        char *got = train_injected(layouts[k], "persistent_error", text, &bytes);
        int count = 0;
        for (const char *at = text; (at = find_ranks(at, "injecting a persistent error on ", " (--error", injected));) {
            at = find_ranks(at, "a repeatable fault, every rank had the same result; not finite: ", "\n", named);
            assert_non_null(at);
            assert_string_equal(injected, named);
            at = strstr(at, "this step makes no update");
            assert_non_null(at);
            count++;
        }
        if (grid.world.rank == 0 && count == 0) fail_msg("'%s': no fault was injected", layouts[k]);
        assert_null(strstr(text, "transient"));
        assert_same(layouts[k], got, bytes, train_without(layouts[k], 0, &plain_bytes), bytes, false);
    }
}

/* A good result that is rejected runs again, is the same, and is used: the step counts once. */
static void rejected_results_that_are_correct_are_used(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        char text[4096];
        int64_t bytes, plain_bytes;
        char *got = train_injected(layouts[k], "correct_result", text, &bytes);
        assert_printed(text, "injecting a rejected result on rank");
        assert_printed(text, "ran again: a correct result, every rank had the same and it passes the check");
        assert_same(layouts[k], got, bytes, train_without(layouts[k], 0, &plain_bytes), bytes, true);
    }
}

int main(int argc, char **argv) {
    ops = mt_cpu_ops;
    ops.linear_backward_weight = faulty_backward_weight, ops.fp8_product = faulty_fp8_product;
    ops.nll_loss = faulty_nll_loss;
    ops.adamw_step = faulty_adamw_step, ops.stream_call_host = faulty_call_host;
    mt_grid_start(&grid, &argc, &argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_skipped_step_makes_no_update_on_every_layout),
        cmocka_unit_test(every_rank_stops_at_a_bad_step_and_the_state_is_unchanged),
        cmocka_unit_test(steps_without_an_update_do_not_change_the_size_of_the_first_one),
        cmocka_unit_test(without_the_check_non_finite_values_spread),
        cmocka_unit_test(too_many_bad_steps_in_a_row_end_the_run),
        cmocka_unit_test(a_step_without_tokens_changes_nothing_on_every_layout),
        cmocka_unit_test(a_spike_is_found_again_after_the_rewind),
        cmocka_unit_test(a_fine_tuned_run_rewinds_to_its_own_step),
        cmocka_unit_test(a_loss_spike_is_skipped_on_every_layout),
        cmocka_unit_test(a_run_that_rewinds_ends_as_without_the_fault),
        cmocka_unit_test(rewinding_before_the_first_checkpoint_is_an_error),
        cmocka_unit_test(rewinding_waits_for_an_unfinished_save),
        cmocka_unit_test(every_rank_loads_the_checkpoint_that_rank_0_finds),
        cmocka_unit_test(a_bad_step_found_late_is_reported_before_a_save),
        cmocka_unit_test(a_transient_fault_is_repaired_and_its_rank_named),
        cmocka_unit_test(a_repeatable_fault_is_reported_and_left_to_the_policy),
        cmocka_unit_test(injected_transient_faults_are_found_on_their_ranks_on_every_layout),
        cmocka_unit_test(injected_persistent_faults_are_named_and_left_to_the_policy_on_every_layout),
        cmocka_unit_test(rejected_results_that_are_correct_are_used),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
