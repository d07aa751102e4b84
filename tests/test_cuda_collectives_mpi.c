/* Collectives and channels of the CUDA backend through NCCL, a GPU for each rank: the same checks as those of the CPU
 * (tests/collectives.h), with sums near the exact ones, alike on every rank and in every run. Run by mpirun with as
 * many ranks as there are GPUs. */
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "collectives.h"

#include <mpi.h>

static mt_grid grid;

/* Groups of `size` neighbours, and one of the remaining ranks. */
static void check_size(int size) {
    if (size > grid.world.size) skip();
    mt_group group = {.name = "neighbours"};
    mt_error error;
    MPI_Comm comm;
    MPI_Comm_split(*(MPI_Comm *)grid.world.comm, grid.world.rank / size, grid.world.rank, &comm);
    MPI_Comm_size(comm, &group.size);
    MPI_Comm_rank(comm, &group.rank);
    group.comm = &comm;
    if (mt_cuda_group_open(&group, &error) != 0) fail_msg("%s", error.text);
    check_group(&group);
    mt_cuda_group_close(&group);
    MPI_Comm_free(&comm);
}

static void groups_of_1_agree_with_the_host(void **state) {
    (void)state;
    check_size(1);
}

static void groups_of_2_agree_with_the_host(void **state) {
    (void)state;
    check_size(2);
}

static void groups_of_3_agree_with_the_host(void **state) {
    (void)state;
    check_size(3);
}

static void a_group_of_all_agrees_with_the_host(void **state) {
    (void)state;
    check_group(&grid.world);
}

/* The second stream would otherwise copy long before the first has written. */
static void a_stream_that_follows_another_sees_its_work(void **state) {
    (void)state;
    enum { BYTES = 1 << 28, TIMES = 20 };
    mt_stream *second = ops->stream_create(NULL, 0, false);
    char *from = ops->memory_alloc(BYTES), *middle = ops->memory_alloc(BYTES), *to = ops->memory_alloc(4);
    uint32_t word = 0x12345678, got = 0;
    ops->memory_zero(middle, BYTES, stream);
    ops->memory_copy(from + BYTES - 4, &word, 4, stream);
    ops->stream_synchronize(stream);
    for (int i = 0; i < TIMES; i++) ops->memory_copy(middle, from, BYTES, stream);
    ops->stream_wait_stream(second, stream);
    ops->memory_copy(to, middle + BYTES - 4, 4, second);
    ops->memory_copy(&got, to, 4, second);
    ops->stream_synchronize(second);
    assert_int_equal(got, word);
    ops->stream_synchronize(stream);
    ops->memory_free(from);
    ops->memory_free(middle);
    ops->memory_free(to);
    ops->stream_destroy(second);
}

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv);
    if (!grid.world.comm) mt_die("start me with mpirun");
    mt_options_default(&options);
    options.stack.tensor_model_parallel_size = grid.world.size; // all others are then groups of one, or the same
    if (mt_grid_build(&grid, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    ops = mt_backend_open(MT_DEVICE_CUDA, &grid, &error);
    if (!ops) {
        printf("skipped: %s\n", error.text);
        mt_grid_stop(&grid);
        return 77;
    }
    stream = ops->stream_create(NULL, 0, false);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_of_1_agree_with_the_host),
        cmocka_unit_test(groups_of_2_agree_with_the_host),
        cmocka_unit_test(groups_of_3_agree_with_the_host),
        cmocka_unit_test(a_group_of_all_agrees_with_the_host),
        cmocka_unit_test(a_stream_that_follows_another_sees_its_work),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    ops->stream_destroy(stream);
    mt_grid_stop(&grid);
    return failures;
}
