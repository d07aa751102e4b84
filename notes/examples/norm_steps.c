/* RMSNorm in four steps from slow to fast, on the CPU: each with the bytes that it moves and its rate relative to a
 * copy.
 *
 *   make everything && build/default/notes/examples/norm_steps
 *
 * Chapter 23 does the same on a GPU.
 */
#include "megatron.h"

#include <math.h>
#include <string.h>

enum { ROWS = 4096, CHANNELS = 2048, ROUNDS = 3, LANES = 16 };

static const float eps = 1e-5f;
static float *x, *y, *squares, *w, rstd[ROWS];

/* One operation after another over whole arrays, as a framework without fusion runs them. */
static void separate(void) {
    for (int64_t i = 0; i < ROWS * CHANNELS; i++) squares[i] = x[i] * x[i];
    for (int64_t t = 0; t < ROWS; t++) {
        float sum = 0;
        for (int64_t c = 0; c < CHANNELS; c++) sum += squares[t * CHANNELS + c];
        rstd[t] = 1 / sqrtf(sum / CHANNELS + eps);
    }
    for (int64_t t = 0; t < ROWS; t++)
        for (int64_t c = 0; c < CHANNELS; c++) y[t * CHANNELS + c] = x[t * CHANNELS + c] * rstd[t];
    for (int64_t t = 0; t < ROWS; t++)
        for (int64_t c = 0; c < CHANNELS; c++) y[t * CHANNELS + c] *= w[c];
}

/* Two passes over the arrays. */
static void fused(void) {
    for (int64_t t = 0; t < ROWS; t++) {
        float sum = 0;
        for (int64_t c = 0; c < CHANNELS; c++) sum += x[t * CHANNELS + c] * x[t * CHANNELS + c];
        rstd[t] = 1 / sqrtf(sum / CHANNELS + eps);
    }
    for (int64_t t = 0; t < ROWS; t++)
        for (int64_t c = 0; c < CHANNELS; c++) y[t * CHANNELS + c] = x[t * CHANNELS + c] * rstd[t] * w[c];
}

/* One pass: a row is in the cache when it is read again. */
static void by_row(void) {
    for (int64_t t = 0; t < ROWS; t++) {
        const float *row = x + t * CHANNELS;
        float sum = 0;
        for (int64_t c = 0; c < CHANNELS; c++) sum += row[c] * row[c];
        rstd[t] = 1 / sqrtf(sum / CHANNELS + eps);
        for (int64_t c = 0; c < CHANNELS; c++) y[t * CHANNELS + c] = row[c] * rstd[t] * w[c];
    }
}

/* Independent sums: an addition no longer waits for the one before it. */
static void in_lanes(void) {
    for (int64_t t = 0; t < ROWS; t++) {
        const float *row = x + t * CHANNELS;
        float sums[LANES] = {0}, sum = 0;
        for (int64_t c = 0; c < CHANNELS; c += LANES)
            for (int64_t i = 0; i < LANES; i++) sums[i] += row[c + i] * row[c + i];
        for (int64_t i = 0; i < LANES; i++) sum += sums[i];
        rstd[t] = 1 / sqrtf(sum / CHANNELS + eps);
        for (int64_t c = 0; c < CHANNELS; c++) y[t * CHANNELS + c] = row[c] * rstd[t] * w[c];
    }
}

static void copy(void) {
    memcpy(y, x, (size_t)ROWS * CHANNELS * 4);
}

static double best_time(void (*run)(void)) {
    double best = INFINITY;
    for (int round = 0; round < ROUNDS; round++) {
        double start = mt_time();
        run();
        best = fmin(best, mt_time() - start);
    }
    return best;
}

/* The largest error of y relative to a norm in float64, over some rows. */
static double largest_error(void) {
    double worst = 0;
    for (int64_t t = 0; t < ROWS; t += ROWS / 16) {
        const float *row = x + t * CHANNELS;
        double sum = 0;
        for (int64_t c = 0; c < CHANNELS; c++) sum += (double)row[c] * (double)row[c];
        for (int64_t c = 0; c < CHANNELS; c++) {
            double expected = (double)row[c] * (double)w[c] / sqrt(sum / CHANNELS + (double)eps);
            worst = fmax(worst, fabs((double)y[t * CHANNELS + c] - expected) / (1 + fabs(expected)));
        }
    }
    return worst;
}

int main(void) {
    static const struct step {
        const char *name;
        void (*run)(void);
        int bytes; // that pass between memory and processor, for each element
    } steps[] = {{"separate", separate, 28}, {"fused", fused, 12}, {"by row", by_row, 8}, {"in lanes", in_lanes, 8}};
    const int64_t count = (int64_t)ROWS * CHANNELS;
    x = mt_malloc(count * 4), y = mt_calloc(count * 4), squares = mt_calloc(count * 4), w = mt_malloc(CHANNELS * 4);
    mt_cpu_ops.random_normal(x, count, 1, 0, 0, 1, MT_F32, NULL);
    mt_cpu_ops.random_normal(w, CHANNELS, 2, 0, 0, 1, MT_F32, NULL);
    double rate = 8 * (double)count / best_time(copy);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        double time = best_time(steps[i].run), error = largest_error();
        printf("%-8s  %2d bytes  error %-5s  %3.0f%% of the copy rate\n", steps[i].name, steps[i].bytes,
               error < 1e-5 ? "small" : "LARGE", 100 * 8 * (double)count / time / rate);
    }
    return 0;
}
