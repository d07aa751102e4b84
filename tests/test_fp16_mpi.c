/* test_fp16_mpi.c: fp16 on four ranks. Layouts train like one rank, and a gradient that overflows on one rank makes all
 * ranks skip the step. */
// Sections of megatron.c: §12a §14
#include "layouts.h"

static const layout in_fp16[] = {
    {2, EXPERTS, EP "2"},
    {4, SHARED, TP "2" SP EP "4" ETP "1"},
    {4, GATED, TP "2" SP PP "2" EP "2" GATHER},
    {4, MTP_LATENT, TP "2" SP PP "2" EP "2" ETP "1"},
    {2, LLAMA, TP "2" SP},
    {4, LLAMA, TP "4" STEPWISE},
    {2, GPT2, PP "2" VP "2"},
    {4, QWEN, CP "2" SHARD "optim" PREFETCH},
    {4, LLAMA, SHARD "optim_grads_params" PREFETCH},
    {4, QWEN, PP "2" SHARD "optim_grads" OVERLAP},
    {4, LLAMA,
     TP "2" CP "2"
        " --accumulate-allreduce-grads-in-fp32"},
    {4, LATENT, TP "2" SP PP "2"},
    {2, ADAPTED, TP "2"},
};

/* A rounding to fp16 is an eighth of one to bf16, whose runs differ by up to two percent. */
static void layouts_train_in_fp16_to_within_a_quarter_percent_of_one_rank(void **state) {
    (void)state;
    RUN_ROWS(in_fp16, MT_F16, 0.02 / 8);
}

/* ---- overflows */

static mt_ops ops; // the CPU backend with faulty operations

typedef enum { OF_A_LINEAR, OF_EXPERTS, OF_A_NORM, OF_ACTIVATIONS, NUM_PLACES } place;

static struct {
    place place;
    float value; // replaces one element of a gradient
    int rank;
    int64_t times; // faulty calls left
} fault;

static bool is_faulty(place place) {
    if (fault.place != place || fault.rank != world.world.rank || fault.times == 0) return false;
    fault.times--;
    return true;
}

static void faulty_linear(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cpu_ops.linear_backward_weight(a, dtype, stream);
    if (is_faulty(OF_A_LINEAR)) a->dw[a->K / 2] = fault.value;
}

static void faulty_experts(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cpu_ops.grouped_linear_backward_weight(a, dtype, stream);
    if (is_faulty(OF_EXPERTS)) a->dw[a->K / 2] = fault.value;
}

static void faulty_norm(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cpu_ops.rmsnorm_backward(a, dtype, stream);
    if (is_faulty(OF_A_NORM)) a->dw[a->C / 2] = fault.value;
}

static void faulty_input(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cpu_ops.linear_backward_input(a, dtype, stream);
    if (is_faulty(OF_ACTIVATIONS)) ((uint16_t *)a->dx)[a->K / 2] = mt_f32_to_f16(fault.value);
}

/* The bits of this rank's weights, master weights and moments; free them. */
static char *snapshot(mt_model *model, int64_t *bytes) {
    int64_t num_buckets;
    char *all = NULL;
    mt_model_buckets(model, &num_buckets);
    *bytes = 0;
    for (int64_t i = 0; i < num_buckets; i++)
        for (int kind = 0; kind < MT_NUM_STATES; kind++) {
            mt_shard shard = mt_bucket_shard(model, i, (mt_param_state)kind);
            int64_t size = shard.data ? shard.count * mt_dtype_size(shard.dtype) : 0;
            all = mt_realloc(all, *bytes + size + 1);
            if (size > 0) memcpy(all + *bytes, shard.data, (size_t)size);
            *bytes += size;
        }
    return all;
}

/* A rank that shards the optimizer has no states but of its part, and master weights are fp32. */
static void check_master_weights(const char *words, mt_model *model) {
    int64_t num_buckets;
    const mt_bucket *buckets = mt_model_buckets(model, &num_buckets);
    for (int64_t i = 0; i < num_buckets; i++) {
        mt_shard master = mt_bucket_shard(model, i, MT_STATE_MASTER);
        if (!buckets[i].trained) continue;
        if (buckets[i].dtype != MT_F16 || !master.data || master.dtype != MT_F32)
            fail_msg("%s: weights in %s, master weights in %s", words, mt_dtype_name(buckets[i].dtype),
                     master.data ? mt_dtype_name(master.dtype) : "no type");
    }
}

enum { RUN = 5, STRUCK = 2, PER_STEP = 8, BEFORE = 7 };

/* Trains with an overflow in one step; returns the snapshot at the end. The run had skipped BEFORE steps before. */
static char *train_with_overflow(subject subject, const char *words, place place, float value, int rank,
                                 int64_t *bytes) {
    trainee t = {.grid = grid_of_job(4), .sequences = 1, .ops = &ops};
    mt_error error = {{0}};
    mt_metrics metrics, before = {0};
    char *old = NULL;
    if (trainee_parse(&t.options, subject, words, MT_F16, 4, &error) != 0 || trainee_open(&t, &error) != 0)
        fail_msg("%s: %s", words, error.text);
    check_master_weights(words, t.model);
    t.state.skipped_iterations = BEFORE;
    for (int step = 1; step <= RUN; step++) {
        if (step == STRUCK) {
            old = snapshot(t.model, bytes);
            fault.place = place, fault.value = value, fault.rank = rank, fault.times = 1;
        }
        if (train_one_step(&t, &metrics, &error) != 0) fail_msg("%s: %s", words, error.text);
        bool strikes = step == STRUCK, struck = step >= STRUCK;
        assert_int_equal(fault.times, strikes && rank != world.world.rank);
        fault.times = 0;
        if (metrics.skipped != BEFORE + struck || t.state.skipped_iterations != metrics.skipped)
            fail_msg("%s: place %d, %g on rank %d: %lld steps skipped at step %d", words, (int)place, (double)value,
                     rank, (long long)metrics.skipped, step);
        assert_true(isfinite(metrics.loss) && isfinite(metrics.grad_norm) != strikes);
        assert_int_equal(t.state.iteration, step);
        assert_int_equal(t.state.optimizer_step, step - struck);
        assert_int_equal(t.state.consumed_train_samples, step * PER_STEP);
        assert_int_equal(t.state.skipped_samples, struck * PER_STEP);
        // a step without an overflow and then two more double the scale
        assert_true(metrics.loss_scale == (struck && !strikes ? 512 : 1024));
        assert_true(t.state.loss_scaler.scale == (step < STRUCK ? 1024 : step < RUN ? 512 : 1024));
        assert_true(step == 1 || (metrics.learning_rate < before.learning_rate) == (step != STRUCK + 1));
        before = metrics;
        if (!strikes) continue;
        char *now = snapshot(t.model, bytes);
        if (memcmp(now, old, (size_t)*bytes) != 0)
            fail_msg("%s: rank %d changed in the step in which rank %d overflowed", words, world.world.rank, rank);
        free(now), free(old);
    }
    char *end = snapshot(t.model, bytes);
    trainee_close(&t);
    return end;
}

static const char *const overflowing[] = {
    "",
    OVERLAP,
    SHARD "optim" PREFETCH,
    SHARD "optim_grads",
    SHARD "optim_grads" OVERLAP,
    SHARD "optim_grads_params" PREFETCH,
    TP "2" SP,
    TP "2" SP SHARD "optim" OVERLAP,
    TP "4" STEPWISE,
    PP "2",
    PP "2" VP "2" SHARD "optim_grads" OVERLAP,
    PP "4",
    CP "2",
    CP "4" SHARD "optim_grads_params",
    EP "2",
    EP "4" SHARD "optim",
    EP "2" PP "2" FLEX,
    TP "2" SP EP "2" ETP "1",
    TP "2" SP PP "2" SHARD "optim",
    " --optimizer-cpu-offload",
    " --rerun-mode validate_results",
    " --check-for-spiky-loss",
    " --optimizer sgd" SHARD "optim",
    " --optimizer lion",
};

/* The steps are the same on every layout, for every rank and place; and the run does not depend on the rank, since the
 * step leaves no trace. */
static void check_overflows(subject subject, const char *const *words, int count, const char *more) {
    static const float values[] = {1e6f, INFINITY, -INFINITY, NAN}; // the first one overflows in fp16 alone
    bool in_fp32 = strstr(more, "in-fp32");
    bool has_experts = strstr(subjects[subject].words, "--num-experts") != NULL;
    for (int k = 0; k < count; k++) {
        char all[512], *first = NULL;
        snprintf(all, sizeof all,
                 "%s%s --lr-decay-style linear --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 3", more,
                 words[k]);
        for (int rank = 0, i = k; rank < 4; rank++)
            for (int where = rank % 2; where < NUM_PLACES; where += 2, i++) {
                int64_t bytes, first_bytes = 0;
                float value = values[i % 4];
                if (where == OF_EXPERTS && !has_experts) continue;
                if (value == values[0] && (in_fp32 || strstr(all, "--optimizer ") || where == OF_ACTIVATIONS))
                    value = INFINITY;
                char *end = train_with_overflow(subject, all, (place)where, value, rank, &bytes);
                if (!first)
                    first = end, first_bytes = bytes;
                else if (memcmp(first, end, (size_t)bytes) != 0)
                    fail_msg("%s: an overflow on rank %d left a trace", all, rank);
                if (first != end) free(end);
                (void)first_bytes;
            }
        free(first);
    }
}

static void an_overflow_on_any_rank_is_skipped_by_all(void **state) {
    (void)state;
    check_overflows(EXPERTS, overflowing, sizeof overflowing / sizeof *overflowing, "");
}

/* The biases that balance the experts' loads are moved without a gradient. */
static void a_skipped_step_leaves_the_biases_of_experts(void **state) {
    (void)state;
    static const char *const words[] = {"", EP "4" SHARD "optim"};
    check_overflows(SHARED, words, 2, "");
}

static void an_overflow_is_skipped_with_gradients_in_fp32(void **state) {
    (void)state;
    static const char *const words[] = {"", SHARD "optim_grads" OVERLAP, TP "2" SP PP "2"};
    check_overflows(EXPERTS, words, 3, " --accumulate-allreduce-grads-in-fp32");
}

static void an_overflow_without_sequence_parallelism_is_skipped_by_all(void **state) {
    (void)state;
    static const char *const words[] = {TP "2", TP "4", TP "2" PP "2" SHARD "optim"};
    check_overflows(LLAMA, words, 3, "");
}

const char long_test[] = "an_overflow_on_any_rank_is_skipped_by_all";

int main(int argc, char **argv) {
    ops = mt_cpu_ops;
    ops.linear_backward_weight = faulty_linear, ops.grouped_linear_backward_weight = faulty_experts;
    ops.rmsnorm_backward = faulty_norm, ops.linear_backward_input = faulty_input;
    mt_grid_start(&world, &argc, &argv);
    jobs_open();
    (void)run_layout_tests; // of the other suites
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_train_in_fp16_to_within_a_quarter_percent_of_one_rank),
        cmocka_unit_test(an_overflow_on_any_rank_is_skipped_by_all),
        cmocka_unit_test(a_skipped_step_leaves_the_biases_of_experts),
        cmocka_unit_test(an_overflow_is_skipped_with_gradients_in_fp32),
        cmocka_unit_test(an_overflow_without_sequence_parallelism_is_skipped_by_all),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    references_free();
    mt_grid_stop(&world);
    return failures;
}
