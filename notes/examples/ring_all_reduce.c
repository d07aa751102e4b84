/* Sums a buffer over all ranks around a ring, in a tree, and by the library, and compares messages, bytes, bits and
 * times.
 *
 *   make everything && mpirun -np 4 build/default/notes/examples/ring_all_reduce
 *
 * Chapter 21 derives the costs.
 */
#include "megatron.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 16, ROUNDS = 5 };

/* The channels of one rank; NULL where the tree ends. */
typedef struct links {
    const mt_ops *ops;
    const mt_group *group;
    mt_channel *to_next, *from_previous;                               // the ring
    mt_channel *to_parent, *from_parent, *to_child[2], *from_child[2]; // the tree
    int64_t messages, bytes;                                           // sent by this rank
} links;

static mt_channel *keep(mt_channel *opened, bool is_mine, mt_channel *before) {
    return is_mine ? opened : before;
}

/* All ranks open all channels in one order; an end that is another rank's is NULL here. */
static void links_open(links *l, const mt_ops *ops, const mt_group *group) {
    *l = (links){.ops = ops, .group = group};
    int n = group->size, rank = group->rank;
    for (int from = 0; from < n && n > 1; from++) {
        mt_channel *channel = ops->channel_open(group, from, (from + 1) % n, 0);
        l->to_next = keep(channel, rank == from, l->to_next);
        l->from_previous = keep(channel, rank == (from + 1) % n, l->from_previous);
    }
    for (int down = 0; down < 2; down++)
        for (int child = 1; child < n; child++) { // the parent of rank r is (r - 1) / 2
            int parent = (child - 1) / 2, side = child % 2;
            mt_channel *channel = ops->channel_open(group, down ? parent : child, down ? child : parent, 1 + down);
            mt_channel **of_child = down ? &l->from_parent : &l->to_parent;
            mt_channel **of_parent = down ? &l->to_child[side] : &l->from_child[side];
            *of_child = keep(channel, rank == child, *of_child);
            *of_parent = keep(channel, rank == parent, *of_parent);
        }
}

static void links_close(links *l) {
    mt_channel *all[] = {l->to_next,     l->from_previous, l->to_parent,     l->from_parent,
                         l->to_child[0], l->to_child[1],   l->from_child[0], l->from_child[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) l->ops->channel_close(all[i]);
}

static int64_t send_start(links *l, mt_channel *channel, const float *x, int64_t count) {
    l->messages++, l->bytes += 4 * count;
    return l->ops->channel_send(channel, x, count, MT_F32, NULL);
}

static void receive(links *l, mt_channel *channel, float *x, int64_t count) {
    l->ops->channel_wait(channel, l->ops->channel_recv(channel, x, count, MT_F32, NULL), NULL);
}

static void add(float *x, const float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

/* Slice s is complete on rank s - 1 after n - 1 steps, and on all ranks after n - 1 more. count % n == 0. */
static void ring_all_reduce(links *l, float *x, int64_t count, float *scratch) {
    int n = l->group->size, rank = l->group->rank;
    int64_t slice = count / n;
    for (int step = 0; step < 2 * (n - 1); step++) {
        bool reduces = step < n - 1;
        int out = (rank - step + 2 * n) % n, in = (out - 1 + n) % n;
        int64_t ticket = send_start(l, l->to_next, x + out * slice, slice);
        receive(l, l->from_previous, reduces ? scratch : x + in * slice, slice);
        if (reduces) add(x + in * slice, scratch, slice);
        l->ops->channel_wait(l->to_next, ticket, NULL);
    }
}

/* Sums to rank 0, then copies from it. */
static void tree_all_reduce(links *l, float *x, int64_t count, float *scratch) {
    for (int side = 1; side >= 0; side--) // rank 2 r + 1 first
        if (l->from_child[side]) {
            receive(l, l->from_child[side], scratch, count);
            add(x, scratch, count);
        }
    if (l->to_parent) {
        l->ops->channel_wait(l->to_parent, send_start(l, l->to_parent, x, count), NULL);
        receive(l, l->from_parent, x, count);
    }
    for (int side = 1; side >= 0; side--)
        if (l->to_child[side])
            l->ops->channel_wait(l->to_child[side], send_start(l, l->to_child[side], x, count), NULL);
}

static void library_all_reduce(links *l, float *x, int64_t count, float *scratch) {
    (void)scratch;
    l->ops->all_reduce(x, count, MT_SUM, MT_F32, l->group, NULL);
}

typedef struct algorithm {
    const char *name;
    void (*run)(links *l, float *x, int64_t count, float *scratch);
} algorithm;

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints what one algorithm sends and how long it takes, and how many sums differ in a bit from `expected`, or sets
 * it. */
static void measure(links *l, const algorithm *a, int64_t count, float *expected, bool is_first) {
    float *x = mt_malloc(count * 4), *scratch = mt_malloc(count * 4);
    double times[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        l->ops->random_normal(x, count, 1 + (uint64_t)l->group->rank, 0, 0, 1, MT_F32, NULL);
        l->messages = l->bytes = 0;
        mt_barrier(l->group);
        times[round] = mt_time();
        a->run(l, x, count, scratch);
        times[round] = mt_time() - times[round];
    }
    if (is_first) memcpy(expected, x, (size_t)count * 4);
    double sent[] = {(double)l->messages, (double)l->bytes / (4 * (double)count)}, differ = 0;
    for (int64_t i = 0; i < count; i++) differ += memcmp(&x[i], &expected[i], 4) != 0;
    mt_all_reduce_max(l->group, sent, 2, MT_F64); // of the rank that sends most
    mt_all_reduce_max(l->group, &differ, 1, MT_F64);
    qsort(times, ROUNDS, sizeof *times, compare);
    if (l->group->rank == 0 && a->run == library_all_reduce)
        printf("%8lld %-8s        -       -  %5.1f%%  %8.1f us\n", (long long)count, a->name,
               100 * differ / (double)count, 1e6 * times[ROUNDS / 2]);
    else if (l->group->rank == 0)
        printf("%8lld %-8s %8.0f %7.2f  %5.1f%%  %8.1f us\n", (long long)count, a->name, sent[0], sent[1],
               100 * differ / (double)count, 1e6 * times[ROUNDS / 2]);
    free(x), free(scratch);
}

int main(int argc, char **argv) {
    static const algorithm algorithms[] = {
        {"library", library_all_reduce}, {"ring", ring_all_reduce}, {"tree", tree_all_reduce}};
    static const int64_t counts[] = {MAX_RANKS * 3 * 5, MAX_RANKS * 3 * 5 * 1024}; // divisible by 2, 3, 4, 5, ...
    mt_grid grid;
    mt_error error;
    links l;
    mt_grid_start(&grid, &argc, &argv); // joins the job that mpirun started
    if (grid.world.size > MAX_RANKS || counts[0] % grid.world.size != 0)
        mt_die("%d ranks: the number must divide %lld and be at most %d", grid.world.size, (long long)counts[0],
               MAX_RANKS);
    const mt_ops *ops = mt_backend_open(MT_DEVICE_CPU, &grid, &error);
    if (!ops) mt_die("%s", error.text);
    links_open(&l, ops, &grid.world);
    if (grid.world.rank == 0) printf("elements          messages buffers  differ      time\n");
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        float *expected = mt_malloc(counts[c] * 4);
        for (size_t i = 0; i < sizeof algorithms / sizeof *algorithms; i++)
            measure(&l, &algorithms[i], counts[c], expected, i == 0);
        free(expected);
    }
    links_close(&l);
    mt_grid_stop(&grid);
    return 0;
}
