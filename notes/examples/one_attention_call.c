/* Calls the attention operation alone and compares it with a softmax written out: 2 packed sequences, 4 query heads
 * over 2 key and value heads (grouped queries), causal, in fp32 on the CPU.
 *
 *   make everything && build/default/notes/examples/one_attention_call
 *
 * Chapter 3 derives the formula, chapter 1 explains spans.
 */
#include "megatron.h"

#include <math.h>

enum { LENGTH = 5, SEQUENCES = 2, TOKENS = LENGTH * SEQUENCES, HEADS = 4, GROUPS = 2, CHANNELS = 8 };

/* [token, head, channel], row-major: the layout of every operand of an operation. */
static float q[TOKENS][HEADS][CHANNELS], k[TOKENS][GROUPS][CHANNELS], v[TOKENS][GROUPS][CHANNELS];
static float out[TOKENS][HEADS][CHANNELS], lse[TOKENS][HEADS];

/* Standard normal numbers. A number depends on its key and its index alone (Philox), not on the order of calls. */
static void fill(float *x, int64_t count, uint64_t key) {
    mt_cpu_ops.random_normal(x, count, key, 0, 0, 1, MT_F32, NULL);
}

/* One query of one head: weights softmax(scale q k^T) over the keys of its sequence up to itself, then their mean of v.
 */
static void naive(double result[CHANNELS], int query, int head, double scale) {
    int group = head / (HEADS / GROUPS), first = query / LENGTH * LENGTH;
    double weights[LENGTH], sum = 0;
    for (int j = first; j <= query; j++) {
        double score = 0;
        for (int c = 0; c < CHANNELS; c++) score += (double)q[query][head][c] * (double)k[j][group][c];
        sum += weights[j - first] = exp(scale * score);
    }
    for (int c = 0; c < CHANNELS; c++) {
        result[c] = 0;
        for (int j = first; j <= query; j++) result[c] += weights[j - first] / sum * (double)v[j][group][c];
    }
}

int main(void) {
    mt_grid grid = mt_grid_of_one;
    mt_error error;
    const mt_ops *ops = mt_backend_open(MT_DEVICE_CPU, &grid, &error); // a table of functions, one for each operation
    if (!ops) mt_die("%s", error.text);

    fill(&q[0][0][0], TOKENS * HEADS * CHANNELS, 1);
    fill(&k[0][0][0], TOKENS * GROUPS * CHANNELS, 2);
    fill(&v[0][0][0], TOKENS * GROUPS * CHANNELS, 3);

    /* A span for each sequence: these queries attend to these keys, causally. */
    mt_span list[SEQUENCES];
    for (int s = 0; s < SEQUENCES; s++) list[s] = (mt_span){s * LENGTH, LENGTH, s * LENGTH, LENGTH, true};

    mt_attention attention = {.num_heads = HEADS,
                              .num_groups = GROUPS,
                              .head_size = CHANNELS,
                              .value_size = CHANNELS,
                              .q = q,
                              .k = k,
                              .v = v,
                              .out = out,
                              .lse = &lse[0][0],
                              .q_stride = HEADS * CHANNELS, // elements from one token to the next
                              .k_stride = GROUPS * CHANNELS,
                              .v_stride = GROUPS * CHANNELS,
                              .out_stride = HEADS * CHANNELS,
                              .spans = {.host = list, .device = list, .count = SEQUENCES}, // on the CPU both are one
                              .scale = 1 / sqrtf(CHANNELS)};
    ops->attention_forward(&attention, MT_F32, NULL); // NULL: the CPU has no streams

    double worst = 0;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++) {
            double expected[CHANNELS];
            naive(expected, t, h, (double)attention.scale);
            for (int c = 0; c < CHANNELS; c++) worst = fmax(worst, fabs(expected[c] - (double)out[t][h][c]));
        }
    printf("largest difference %.1e: %s\n", worst, worst < 1e-6 ? "ok" : "WRONG");
    return worst < 1e-6 ? 0 : 1;
}
