/* The equivalence matrix on GPUs, a GPU for each rank: tests/layouts.h. Run by mpirun with as many ranks as there are
 * GPUs: layouts of more ranks are skipped. */
#include "cuda_loading.h"

static void ranks_of_a_pipeline_do_not_wait_for_each_other_while_kernels_load(void **state) {
    (void)state;
    train_while_kernels_load("");
}

int main(int argc, char **argv) {
    const struct CMUnitTest first[] = {
        cmocka_unit_test(ranks_of_a_pipeline_do_not_wait_for_each_other_while_kernels_load)};
    if (!start_on_gpus(argc, argv)) return 77;
    int failures = cmocka_run_group_tests(first, NULL, NULL) + run_layout_tests();
    mt_grid_stop(&world);
    return failures;
}
