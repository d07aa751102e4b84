/* --deterministic-mode on GPUs, a GPU for each rank. Run by mpirun. */
#include "cuda_loading.h"

/* Without this the algorithm of a new number of tokens is loaded while a message is pending. */
static void ranks_of_a_deterministic_pipeline_do_not_wait_for_each_other_while_kernels_load(void **state) {
    (void)state;
    train_while_kernels_load("--deterministic-mode");
}

static void ranks_of_a_pipeline_that_reruns_bad_steps_do_not_wait_for_each_other(void **state) {
    (void)state;
    train_while_kernels_load("--rerun-mode validate_results");
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_of_a_deterministic_pipeline_do_not_wait_for_each_other_while_kernels_load),
        cmocka_unit_test(ranks_of_a_pipeline_that_reruns_bad_steps_do_not_wait_for_each_other)};
    (void)run_layout_tests; // of the other suites
    if (!start_on_gpus(argc, argv)) return 77;
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
