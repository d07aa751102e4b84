/* Two linear layers cut over the ranks of a tensor group, y = (x A^T) B^T: A by rows (column parallel), B by columns
 * (row parallel), so that only y is summed over the ranks (Shoeybi et al., "Megatron-LM"). Every rank checks its
 * gradients against finite differences of the loss sum(y dy).
 *
 *   make everything && mpirun -np 2 build/default/notes/examples/tensor_parallel_linear
 *
 * Runs on any number of ranks that divides 8, one included. Chapter 11 explains the regions.
 */
#include "data/options/options.h"

#include <math.h>

enum { TOKENS = 6, INPUT = 8, HIDDEN = 8, OUTPUT = 4 };

static float x[TOKENS * INPUT], hidden[TOKENS * HIDDEN], y[TOKENS * OUTPUT]; // hidden: [T, HIDDEN / ranks] is used
static float a[HIDDEN * INPUT], b[OUTPUT * HIDDEN], da[HIDDEN * INPUT], db[OUTPUT * HIDDEN];
static float dx[TOKENS * INPUT], dhidden[TOKENS * HIDDEN], dy[TOKENS * OUTPUT];

static void forward(mt_linear_pass pass, const mt_linear *column, const mt_linear *row) {
    mt_linear_forward(pass, column, &(mt_linear_io){.x = x, .y = hidden}); // no communication: x is whole on every rank
    mt_linear_forward(pass, row, &(mt_linear_io){.x = hidden, .y = y});    // partial sums, then an all-reduce
}

/* The derivative of the loss with respect to *weight, which one rank has changed: every rank takes part in the sums. */
static double difference(mt_linear_pass pass, const mt_linear *column, const mt_linear *row, float *weight) {
    const float step = 1e-2f; // the loss is linear in every weight: a large step costs no accuracy
    double losses[2] = {0};
    for (int sign = 0; sign < 2; sign++) {
        float before = weight ? *weight : 0;
        if (weight) *weight += sign ? step : -step;
        forward(pass, column, row);
        for (int i = 0; i < TOKENS * OUTPUT; i++) losses[sign] += (double)y[i] * (double)dy[i];
        if (weight) *weight = before;
    }
    return (losses[1] - losses[0]) / (2 * (double)step);
}

int main(int argc, char **argv) {
    mt_grid grid;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv); // joins the job that mpirun started
    int ranks = grid.world.size, rank = grid.world.rank;
    if (HIDDEN % ranks != 0) mt_die("%d ranks do not divide %d hidden channels", ranks, HIDDEN);
    const mt_ops *ops = mt_backend_open(MT_DEVICE_CPU, &grid, &error);
    if (!ops) mt_die("%s", error.text);

    /* All ranks have the same x and dy; the key of a and b differs by rank, as each holds its own part. */
    const int64_t part = HIDDEN / ranks;
    ops->random_normal(x, TOKENS * INPUT, 1, 0, 0, 1, MT_F32, NULL);
    ops->random_normal(dy, TOKENS * OUTPUT, 2, 0, 0, 1, MT_F32, NULL);
    ops->random_normal(a, part * INPUT, 3 + (uint64_t)rank, 0, 0, 1, MT_F32, NULL);
    ops->random_normal(b, OUTPUT * part, 99 + (uint64_t)rank, 0, 0, 1, MT_F32, NULL);

    mt_tensor_parallel tp = {.ops = ops, .group = &grid.world, .dtype = MT_F32, .T = TOKENS, .rows = TOKENS};
    mt_linear_pass pass = {.tp = &tp};
    mt_linear column = {.weight = {.w = a, .dw = da}, .N = part, .K = INPUT, .kind = MT_LINEAR_COLUMN};
    mt_linear row = {.weight = {.w = b, .dw = db}, .N = OUTPUT, .K = part, .kind = MT_LINEAR_ROW};

    /* The backward goes the other way: dy is whole on every rank, and dx is summed over the ranks. */
    forward(pass, &column, &row);
    mt_linear_backward(pass, &row, &(mt_linear_io){.x = hidden, .dy = dy, .dx = dhidden}, MT_BACKWARD_BOTH);
    mt_linear_backward(pass, &column, &(mt_linear_io){.x = x, .dy = dhidden, .dx = dx}, MT_BACKWARD_BOTH);

    double worst = 0;
    for (int owner = 0; owner < ranks; owner++) // one rank after another changes its weights
        for (int64_t i = 0; i < part * (INPUT + OUTPUT); i++) {
            bool of_a = i < part * INPUT, mine = owner == rank;
            float *weight = of_a ? &a[i] : &b[i - part * INPUT];
            double expected = difference(pass, &column, &row, mine ? weight : NULL);
            double gradient = (double)(of_a ? da[i] : db[i - part * INPUT]);
            if (mine) worst = fmax(worst, fabs(expected - gradient) / (1 + fabs(expected)));
        }
    mt_all_reduce_max(&grid.world, &worst, 1, MT_F64);
    if (rank == 0) printf("%d ranks, largest difference %.1e: %s\n", ranks, worst, worst < 1e-3 ? "ok" : "WRONG");
    mt_grid_stop(&grid);
    return worst < 1e-3 ? 0 : 1;
}
