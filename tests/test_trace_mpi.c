/* --trace and the profile's communication on four ranks on the CPU. Run by mpirun. */
#include "trace.h"

/* ---- refused traces; clocks */

static void expect_refusal(const char *more, const char *words) {
    mt_error error = {{0}};
    mt_run_state run = {0};
    fixture f = open_llama(more, RANKS);
    mt_profile_open(real_ops);
    assert_int_equal(mt_trace_open(&f.options, &grid, &run, &error), -1);
    if (!strstr(error.text, words)) fail_msg("wanted \"%s\", got: %s", words, error.text);
    assert_false(mt_trace_is_open());
    mt_profile_close();
    mt_batch_free(&f.batch), mt_options_free(&f.options), free(f.tokens);
}

static void traces_that_cannot_be_written_are_refused_on_every_rank(void **state) {
    (void)state;
    expect_refusal("--trace tests/no-such-folder/trace.json", "tests/no-such-folder/trace.json: cannot be written");
    expect_refusal("--trace tests", "tests: cannot be written: Is a directory; choose another --trace");
    expect_refusal("--trace t.json --trace-first-step 11", "comes after this run's last step (step 10)");
    assert_int_equal(access("t.json", F_OK), -1);
}

/* Each rank's clock is 1000 seconds ahead of the previous rank's. */
static double skewed_clock(void) {
    return mt_time() + 1000.0 * grid.world.rank;
}

static void clocks_are_compared_with_that_of_rank_0(void **state) {
    (void)state;
    double offset = mt_clock_offset(&grid.world, skewed_clock);
    assert_true(fabs(offset + 1000.0 * grid.world.rank) < 0.25);
}

/* ---- communication */

/* Bytes that each of the t ranks of a tensor group sends in a step of `tokens` tokens: the formulas of
 * notes/11-tensor-parallelism.md. */
static double tensor_bytes(const mt_options *o, double tokens, int64_t t, bool sequence_parallel) {
    double L = (double)o->num_layers, C = (double)o->hidden_size, part = (double)(t - 1) / (double)t;
    double statistics = (double)(t - 1) * 3 * tokens * 4;
    if (!sequence_parallel) return (4 * L + 2) * 2 * part * tokens * C * 4 + statistics;
    double padded = ceil(C / 64) * 64, norms = (L * (padded + C) + C) * 4; // the two of a layer are one message
    return (10 * L + 5) * part * tokens * C * 4 + statistics + 2 * part * norms;
}

static void tensor_communication_is_what_the_notes_count(void **state) {
    (void)state;
    static const layout ways[] = {
        {"--tensor-model-parallel-size 2", 2, 1, 1, 2, {NULL}},
        {"--tensor-model-parallel-size 2 --sequence-parallel", 2, 1, 1, 2, {NULL}},
        {"--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", 2, 1, 1, 2, {NULL}}};
    fixture f = open_llama("", 1);
    for (int k = 0; k < 3; k++) {
        mt_metrics metrics[RUN_STEPS];
        train_layout(&ways[k], "--profile", metrics);
        const mt_profile *sums = mt_profile_read();
        assert_int_equal(sums->steps, RUN_STEPS - 1);
        double bytes = sums->traffic[MT_TRAFFIC_TENSOR].bytes / (RUN_STEPS - 1);
        assert_true(bytes ==
                    tensor_bytes(&f.options.stack, TOKENS / 2, 2, k > 0)); // two data-parallel ranks share the tokens
        // ten of a layer and three of the output layer's five go rank by rank: with two ranks, one exchange each
        int64_t exchanges = sums->rows[MT_OPERATION_mailbox_exchange].calls, micro_batches = SEQUENCES / 2;
        assert_int_equal(exchanges,
                         k < 2 ? 0 : (RUN_STEPS - 1) * micro_batches * (10 * f.options.stack.num_layers + 3));
        mt_profile_close();
    }
    mt_batch_free(&f.batch), mt_options_free(&f.options), free(f.tokens);
}

/* Bytes of tokens and results of experts on four ranks, forward and backward: the formulas of notes/15-experts.md. */
static void communication_of_experts_is_what_the_notes_count(void **state) {
    (void)state;
    static const layout ways[] = {
        {"--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-expert-capacity-factor 1 "
         "--moe-pad-expert-input-to-capacity",
         1,
         1,
         1,
         4,
         {NULL}},
        {"--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-token-dispatcher-type allgather",
         1,
         1,
         1,
         4,
         {NULL}}};
    fixture f = open_llama("", 1);
    double L = (double)f.options.stack.num_layers, C = (double)f.options.stack.hidden_size, R = TOKENS / 4, k = 2,
           g = 4;
    const double counted[2] = {L * (g - 1) / g * R * k * (4 * C * 4 + 8), L * (g - 1) * R * (4 * C * 4 + 12 * k)};
    for (int i = 0; i < 2; i++) {
        mt_metrics metrics[RUN_STEPS];
        train_layout(&ways[i], "--profile", metrics);
        double bytes = mt_profile_read()->traffic[MT_TRAFFIC_EXPERT].bytes / (RUN_STEPS - 1);
        if (bytes != counted[i]) fail_msg("%s: %.1f bytes, counted %.1f", ways[i].options, bytes, counted[i]);
        mt_profile_close();
    }
    mt_batch_free(&f.batch), mt_options_free(&f.options), free(f.tokens);
}

/* Operations of the CPU do not overlap, so all time is exposed, and the kinds add up to the rows. */
static void kinds_of_time_sum_to_the_step(void **state) {
    (void)state;
    for (int k = 0; k < NUM_LAYOUTS; k++) {
        mt_metrics metrics[RUN_STEPS];
        double exposed = 0, kinds = 0, operations = 0;
        int64_t calls[2] = {0};
        train_layout(&layouts[k], "--profile", metrics);
        const mt_profile *sums = mt_profile_read();
        for (int i = 0; i < MT_NUM_TRAFFICS; i++) {
            const mt_profile_traffic *kind = &sums->traffic[i];
            exposed += kind->exposed, kinds += kind->seconds, calls[0] += kind->calls;
            assert_true(fabs(kind->exposed - kind->seconds) <= 1e-6 + 1e-9 * kind->seconds);
        }
        for (int i = 0; i < MT_NUM_OPERATIONS; i++)
            operations += sums->rows[i].seconds, calls[1] += sums->rows[i].calls;
        assert_true(fabs(kinds - operations) <= 1e-6 && calls[0] == calls[1]);
        assert_true(exposed <= sums->seconds && exposed > 0); // other processes may take any share of a step
        assert_int_equal(sums->traffic[MT_TRAFFIC_TENSOR].calls > 0, layouts[k].tp > 1);
        assert_int_equal(sums->traffic[MT_TRAFFIC_CONTEXT].calls > 0, layouts[k].cp > 1);
        assert_int_equal(sums->traffic[MT_TRAFFIC_PIPELINE].calls > 0, layouts[k].pp > 1);
        assert_int_equal(sums->traffic[MT_TRAFFIC_PARAMETERS].calls > 0, layouts[k].dp > 1);
        mt_profile_close();
    }
}

static void table_of_communication_sums_to_the_step(void **state) {
    (void)state;
    mt_metrics metrics[RUN_STEPS];
    char *text, *rest = NULL;
    size_t bytes;
    train_layout(&layouts[0], "--profile", metrics);
    FILE *file = open_memstream(&text, &bytes);
    mt_profile_print_communication(&grid, grid.world.rank == 0 ? file : NULL);
    fclose(file);
    mt_profile_close();
    if (grid.world.rank > 0) assert_int_equal(bytes, 0);
    double sum = 0, whole = 0;
    int tables = 0, rank, ranks = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        double calls, total, exposed, share, most, least, computing;
        char name[32];
        if (sscanf(line, "communication of rank %d", &rank) == 1) {
            assert_int_equal(rank > 0, tables > 0);
            tables++, sum = 0;
        }
        if (sscanf(line, "  a step %lf %lf%%", &exposed, &share) == 2) {
            assert_true(fabs(sum - exposed) < 0.01 && share == 100); // rows are rounded to a microsecond
            whole = exposed;
        } else if (sscanf(line, "  none of these %lf %lf%%", &exposed, &share) == 2)
            sum += exposed;
        else if (sscanf(line, "  %31[a-z ] %lf %lf %lf %lf%%", name, &calls, &total, &exposed, &share) == 5) {
            assert_true(exposed <= total + 0.001 && calls > 0 && share <= 100);
            sum += exposed;
        } else if (sscanf(line, "over %d ranks a step takes %lf to %lf ms; they compute %lf to", &ranks, &least, &most,
                          &computing) == 4)
            assert_true(least <= most && computing < most && whole <= most + 0.001 && whole >= least - 0.001);
    }
    if (grid.world.rank == 0) assert_true((tables == 1 || tables == 2) && ranks == RANKS);
    free(text);
}

int main(int argc, char **argv) {
    mt_grid_start(&grid, &argc, &argv);
    if (grid.world.size != RANKS) mt_die("start me with mpirun -np %d", RANKS);
    real_ops = &mt_cpu_ops;
    long process = (long)getpid();
    mt_broadcast(&grid.world, &process, sizeof process, 0);
    snprintf(trace_path, sizeof trace_path, "/tmp/mt_trace.%ld.json", process);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trace_shows_every_rank_step_phase_and_message),
        cmocka_unit_test(losses_are_the_same_with_a_trace),
        cmocka_unit_test(traces_that_cannot_be_written_are_refused_on_every_rank),
        cmocka_unit_test(clocks_are_compared_with_that_of_rank_0),
        cmocka_unit_test(tensor_communication_is_what_the_notes_count),
        cmocka_unit_test(communication_of_experts_is_what_the_notes_count),
        cmocka_unit_test(kinds_of_time_sum_to_the_step),
        cmocka_unit_test(table_of_communication_sums_to_the_step),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
