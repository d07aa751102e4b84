/* Context parallelism on GPUs, one a rank: the checks of the CPU's (tests/context_parallel.h) against the CPU on one
 * rank. Run by mpirun with a power of two of ranks and as many GPUs. */
#include "context_parallel.h"
#include "../data/options/option_table.h"

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv);
    if (!grid.world.comm) mt_die("start me with mpirun");
    mt_options_default(&options);
    options.stack.context_parallel_size = grid.world.size; // all others are then groups of one, or the same
    if (mt_grid_build(&grid, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    ops = mt_backend_open(MT_DEVICE_CUDA, &grid, &error);
    if (!ops) {
        printf("skipped: %s\n", error.text);
        mt_grid_stop(&grid);
        return 77;
    }
    int64_t bytes = ops->workspace_bytes(MAX_TOKENS, 1024, 32, 64);
    void *workspace = ops->memory_alloc(bytes);
    ops_stream = ops->stream_create(workspace, bytes, false);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_comm_type_equals_attention_on_one_rank),
        cmocka_unit_test(every_comm_type_equals_attention_on_one_rank_to_bf16_rounding),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    ops->stream_destroy(ops_stream);
    ops->memory_free(workspace);
    mt_grid_stop(&grid);
    return failures;
}
