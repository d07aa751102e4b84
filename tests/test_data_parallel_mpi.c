/* Data parallelism: ranks that each take their share of the batch train like one rank. Run by mpirun. */
#include "golden.h"

static mt_grid grid;

static void ranks_together_train_like_pytorch_on_one(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        double losses[STEPS], norms[STEPS];
        train_ten_steps(families[k], &grid, SEQUENCES / grid.data.size, false, losses, norms);
        assert_expected(families[k], losses, norms);
    }
}

static void every_rank_ends_with_the_same_weights(void **state) {
    (void)state;
    fixture f = open_family("llama", 1, grid.world.size, false);
    create_model(&f, &grid);
    mt_run_state run = {0};
    mt_metrics metrics;
    mt_error error;
    source from = {&f, 0, 1, grid.data.rank, grid.data.size};
    assert_int_equal(
        mt_train_step(f.model, &run, SEQUENCES / grid.data.size, next_micro_batch, &from, &f.batch, &metrics, &error),
        0);
    int64_t num_buckets;
    mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
    for (int64_t i = 0; i < num_buckets; i++) {
        int64_t bytes = buckets[i].count * 4;
        float *of_rank_0 = mt_malloc(bytes);
        memcpy(of_rank_0, buckets[i].params, (size_t)bytes);
        mt_broadcast(&grid.data, of_rank_0, bytes, 0);
        assert_memory_equal(of_rank_0, buckets[i].params, (size_t)bytes);
        free(of_rank_0);
    }
    close_family(&f);
}

int main(int argc, char **argv) {
    mt_options options;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv);
    mt_options_default(&options);
    if (mt_grid_build(&grid, &options, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_together_train_like_pytorch_on_one),
        cmocka_unit_test(every_rank_ends_with_the_same_weights),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
