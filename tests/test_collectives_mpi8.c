/* Collectives and channels of the CPU backend through MPI, in groups of 1, 2, 3, 4 and 8 ranks: sums have the bits of a
 * sum in rank order on the host, and what only moves arrives where it should. Run by mpirun. */
// Sections of megatron.c: §5
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "collectives.h"

#include <mpi.h>

static mt_grid grid;

/* The groups of `size` neighbours; the remaining ranks are a smaller one. */
static mt_group neighbours(int size, MPI_Comm *comm) {
    mt_group group = {.name = "neighbours", .comm = comm};
    MPI_Comm_split(*(MPI_Comm *)grid.world.comm, grid.world.rank / size, grid.world.rank, comm);
    MPI_Comm_size(*comm, &group.size);
    MPI_Comm_rank(*comm, &group.rank);
    return group;
}

static void check_size(int size) {
    MPI_Comm comm;
    mt_group group = neighbours(size, &comm);
    check_group(&group);
    MPI_Comm_free(&comm);
}

static void a_group_of_1_only_copies(void **state) {
    (void)state;
    mt_group alone = {.name = "alone", .size = 1};
    check_group(&alone);
}

static void groups_of_2_agree_with_the_host(void **state) {
    (void)state;
    check_size(2);
}

static void groups_of_3_agree_with_the_host(void **state) {
    (void)state;
    check_size(3);
}

static void groups_of_4_agree_with_the_host(void **state) {
    (void)state;
    check_size(4);
}

static void a_group_of_all_agrees_with_the_host(void **state) {
    (void)state;
    check_group(&grid.world);
}

/* Host values go the same way whatever the backend. */
static void host_values_are_summed_and_maximised(void **state) {
    (void)state;
    double sum[2] = {1.5, grid.world.rank}, max = -grid.world.rank;
    int size = grid.world.size;
    mt_all_reduce_sum(&grid.world, sum, 2, MT_F64);
    mt_all_reduce_max(&grid.world, &max, 1, MT_F64);
    assert_true(sum[0] == 1.5 * size && sum[1] == size * (size - 1) / 2.0 && max == 0);
    int token = grid.world.rank == 0 ? 41 : 0; // passed on from rank to rank
    if (grid.world.rank > 0) mt_receive(&grid.world, &token, sizeof token, grid.world.rank - 1);
    token++;
    if (grid.world.rank + 1 < size) mt_send(&grid.world, &token, sizeof token, grid.world.rank + 1);
    assert_int_equal(token, 42 + grid.world.rank);
}

static void a_maximum_with_a_nan_of_any_rank_is_nan(void **state) {
    (void)state;
    for (int from = 0; from < grid.world.size; from++)
        for (int i = 0; i < NUM_DTYPES; i++) {
            double host[2];
            put(host, 0, dtypes[i], from == grid.world.rank ? NAN : grid.world.rank);
            put(host, 1, dtypes[i], grid.world.rank);
            ops->all_reduce(host, 2, MT_MAX, dtypes[i], &grid.world, stream);
            assert_true(isnan(get(host, 0, dtypes[i])) && get(host, 1, dtypes[i]) == grid.world.size - 1);
        }
}

/* Takes 9 GiB and a minute, so it runs where MT_TEST_LARGE is set. */
static void counts_past_2_to_the_31_work(void **state) {
    (void)state;
    if (!getenv("MT_TEST_LARGE")) {
        printf("skipped: MT_TEST_LARGE is not set\n");
        skip();
    }
    const int64_t n = ((int64_t)1 << 31) + 11, probes[] = {0, 12345, ((int64_t)1 << 31) - 1, n - 1};
    MPI_Comm comm;
    mt_group group = neighbours(2, &comm);
    if (grid.world.rank < 2) { // the others have nothing to do
        uint8_t *bytes = mt_calloc(2 * n), *own = bytes + group.rank * n, *other = bytes + (1 - group.rank) * n;
        for (int i = 0; i < 4; i++) own[probes[i]] = (uint8_t)(10 * group.rank + i + 1);
        ops->all_gather(bytes, own, n, MT_U8, &group, NULL);
        for (int i = 0; i < 4; i++) assert_int_equal(other[probes[i]], 10 * (1 - group.rank) + i + 1);
        mt_channel *channel = ops->channel_open(&group, 0, 1, 5);
        for (int i = 0; i < 4; i++) own[probes[i]] = (uint8_t)(100 + i);
        int64_t ticket = group.rank == 0 ? ops->channel_send(channel, own, n, MT_U8, NULL)
                                         : ops->channel_recv(channel, other, n, MT_U8, NULL);
        ops->channel_wait(channel, ticket, NULL);
        for (int i = 0; i < 4; i++) assert_int_equal(bytes[probes[i]], 100 + i);
        ops->channel_close(channel);
        ops->broadcast(bytes, n, MT_U8, 1, &group, NULL);
        for (int i = 0; i < 4; i++) assert_int_equal(bytes[probes[i]], 100 + i);
        memset(bytes, 0, (size_t)(2 * n));
        for (int i = 0; i < 4; i++) put(bytes, probes[i], MT_BF16, 1 + i + group.rank);
        ops->all_reduce(bytes, n, MT_SUM, MT_BF16, &group, NULL);
        for (int i = 0; i < 4; i++) assert_true(get(bytes, probes[i], MT_BF16) == 2 * (1 + i) + 1);
        free(bytes);
    }
    MPI_Comm_free(&comm);
    mt_barrier(&grid.world);
}

/* Every group of a grid adds up its own members' ranks. */
static void groups_of_a_grid_hold_their_members(void **state) {
    (void)state;
    int world = grid.world.size;
    for (int tp = 1; tp <= world; tp++)
        for (int pp = 1; tp * pp <= world; pp++) {
            if (world % (tp * pp) != 0) continue;
            mt_grid here = grid; // the world alone is shared
            mt_run_options options;
            mt_error error;
            mt_options_default(&options);
            options.stack.tensor_model_parallel_size = tp, options.stack.pipeline_model_parallel_size = pp;
            options.stack.context_parallel_size = world / (tp * pp) % 2 == 0 ? 2 : 1;
            options.stack.num_query_groups = 1;
            assert_int_equal(mt_grid_build(&here, &options.stack, &error), 0);
            for (int kind = 0; kind < MT_NUM_GROUP_KINDS; kind++) {
                mt_group *group = mt_grid_group(&here, kind);
                double sum = here.world.rank, expected = 0;
                for (int i = 0; i < group->size; i++) expected += group->members[i];
                assert_int_equal(group->members[group->rank], here.world.rank);
                mt_cpu_ops.all_reduce(&sum, 1, MT_SUM, MT_F64, group, NULL);
                assert_true(sum == expected);
                if (kind == MT_GROUP_WORLD) continue;
                if (group->comm) MPI_Comm_free(group->comm);
                free(group->comm);
                free(group->members);
            }
            mt_options_free(&options);
        }
}

int main(int argc, char **argv) {
    mt_grid_start(&grid, &argc, &argv);
    if (!grid.world.comm) mt_die("start me with mpirun");
    ops = &mt_cpu_ops;
    rounds_like_the_host = true;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_group_of_1_only_copies),
        cmocka_unit_test(groups_of_2_agree_with_the_host),
        cmocka_unit_test(groups_of_3_agree_with_the_host),
        cmocka_unit_test(groups_of_4_agree_with_the_host),
        cmocka_unit_test(a_group_of_all_agrees_with_the_host),
        cmocka_unit_test(host_values_are_summed_and_maximised),
        cmocka_unit_test(a_maximum_with_a_nan_of_any_rank_is_nan),
        cmocka_unit_test(groups_of_a_grid_hold_their_members),
        cmocka_unit_test(counts_past_2_to_the_31_work),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
