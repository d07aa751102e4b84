/* Recall from a memory of fixed size. 128 pairs of a key and a value are written into a matrix S of 32 x 32
 * numbers a head, one after another, and then each is asked for:
 *
 *   make everything && build/default/notes/examples/associative_memory
 *
 * by a sum, S += k v^T, and by the gated delta rule with and without decay, which is the operation of the library and
 * is compared with its recurrence written out. Chapter 29 derives the rule.
 */
#include "megatron.h"

#include <math.h>
#include <string.h>

enum { PAIRS = 128, TOKENS = 2 * PAIRS, HEADS = 32, D = 32 };

/* [token, head, channel]. The first PAIRS tokens write, the others read: their beta is 0. */
static float keys[TOKENS][HEADS][D], values[TOKENS][HEADS][D], out[TOKENS][HEADS][D];
static float beta[TOKENS][HEADS], decay[TOKENS][HEADS], A_log[HEADS], dt_bias[HEADS];

/* Pairs of standard normal numbers, each asked for in the order in which it was written. */
static void fill(const mt_ops *ops) {
    ops->random_normal(keys, PAIRS * HEADS * D, 1, 0, 0, 1, MT_F32, NULL);
    ops->random_normal(values, PAIRS * HEADS * D, 2, 0, 0, 1, MT_F32, NULL);
    memcpy(keys[PAIRS], keys[0], sizeof keys / 2);
}

/* Reads by the operation, which makes keys and queries unit vectors and divides queries by sqrt(D). beta is a sigmoid,
 * 1 while pairs are written and 0 while they are read; a token's decay is exp(-log(1 + exp(decay))). */
static void read_by_delta_rule(const mt_ops *ops, float forgetting) {
    mt_span span = {0, TOKENS, 0, TOKENS, true};
    mt_spans spans = {&span, &span, 1};
    mt_delta_args a = {.spans = &spans, .Hk = HEADS, .Hv = HEADS, .Dk = D, .Dv = D, .decays = 1};
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++) {
            beta[t][h] = t < PAIRS ? 40 : -40;
            decay[t][h] = t < PAIRS && forgetting > 0 ? logf(expf(forgetting) - 1) : -40;
        }
    a.q = keys, a.k = keys, a.v = values, a.b = beta, a.a = decay, a.A_log = A_log, a.dt_bias = dt_bias, a.out = out;
    a.q_stride = a.k_stride = a.v_stride = HEADS * D, a.b_stride = a.a_stride = HEADS;
    ops->delta_rule_forward(&a, MT_F32, NULL);
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++)
            for (int c = 0; c < D; c++) out[t][h][c] *= sqrtf(D);
}

/* The same for one head, token by token in double, or the sum of outer products. Writes `to` [PAIRS, D]. */
static void read_by_recurrence(double (*to)[D], int head, double forgetting, bool is_sum) {
    static double S[D][D];
    memset(S, 0, sizeof S);
    for (int t = 0; t < TOKENS; t++) {
        double length = 0, k[D], held[D] = {0};
        for (int c = 0; c < D; c++) length += (double)keys[t][head][c] * (double)keys[t][head][c];
        for (int c = 0; c < D; c++) k[c] = (double)keys[t][head][c] / sqrt(length);
        for (int i = 0; i < D && t < PAIRS; i++)
            for (int c = 0; c < D; c++) S[i][c] *= exp(-forgetting);
        for (int i = 0; i < D; i++)
            for (int c = 0; c < D; c++) held[c] += S[i][c] * k[i]; // S^T k
        if (t >= PAIRS) memcpy(to[t - PAIRS], held, sizeof held);
        for (int i = 0; i < D && t < PAIRS; i++)
            for (int c = 0; c < D; c++) S[i][c] += k[i] * ((double)values[t][head][c] - (is_sum ? 0 : held[c]));
    }
}

/* The error of the value read over the length of the value written, for all heads and 8 pairs; `age` pairs were written
 * after these. */
static double error_at(double (*result)[PAIRS][D], int age) {
    double error = 0, length = 0;
    for (int pair = PAIRS - age - 8; pair < PAIRS - age; pair++)
        for (int h = 0; h < HEADS; h++)
            for (int c = 0; c < D; c++) {
                double v = (double)values[pair][h][c], difference = result[h][pair][c] - v;
                error += difference * difference, length += v * v;
            }
    return sqrt(error / length);
}

int main(void) {
    mt_grid grid = mt_grid_of_one;
    mt_error error;
    const mt_ops *ops = mt_backend_open(MT_DEVICE_CPU, &grid, &error);
    if (!ops) mt_die("%s", error.text);
    fill(ops);
    static double sum[HEADS][PAIRS][D], delta[2][HEADS][PAIRS][D];
    const float forgetting[2] = {0, 0.05f};
    double worst = 0;
    for (int h = 0; h < HEADS; h++) read_by_recurrence(sum[h], h, 0, true);
    for (int i = 0; i < 2; i++) {
        read_by_delta_rule(ops, forgetting[i]);
        for (int h = 0; h < HEADS; h++) read_by_recurrence(delta[i][h], h, (double)forgetting[i], false);
        for (int t = 0; t < PAIRS; t++)
            for (int h = 0; h < HEADS; h++)
                for (int c = 0; c < D; c++) worst = fmax(worst, fabs(delta[i][h][t][c] - (double)out[PAIRS + t][h][c]));
    }
    printf("error after  sum  delta rule  delta rule with decay\n");
    for (int age = 0; age < PAIRS; age += age ? age : 8)
        printf("%11d %4.2f %11.2f %22.2f\n", age, error_at(sum, age), error_at(delta[0], age), error_at(delta[1], age));
    if (worst < 1e-4)
        printf("the operation equals its recurrence: ok\n");
    else
        printf("largest difference of the operation from its recurrence %.1e: WRONG\n", worst);
    return worst < 1e-4 ? 0 : 1;
}
