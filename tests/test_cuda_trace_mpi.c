/* --trace on four ranks with a GPU each: the checks of the CPU, without the ones of a common clock. Run by mpirun. */
#include "trace.h"

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv);
    if (grid.world.size != RANKS) mt_die("start me with mpirun -np %d", RANKS);
    mt_grid built = grid;
    mt_options_default(&options);
    if (mt_grid_build(&built, &options.stack, &error) != 0) mt_die("%s", error.text);
    real_ops = mt_backend_open(MT_DEVICE_CUDA, &built, &error);
    if (!real_ops) printf("skipped: %s\n", error.text);
    mt_grid_clear(&built);
    mt_options_free(&options);
    long process = (long)getpid();
    mt_broadcast(&grid.world, &process, sizeof process, 0);
    snprintf(trace_path, sizeof trace_path, "/tmp/mt_trace.%ld.json", process);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trace_shows_every_rank_step_phase_and_message),
        cmocka_unit_test(losses_are_the_same_with_a_trace),
    };
    int failures = real_ops ? cmocka_run_group_tests(tests, NULL, NULL) : 77;
    mt_grid_stop(&grid);
    return failures;
}
