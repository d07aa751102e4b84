/* A state space is attention with a mask that decays. The scan of Mamba-2, which is the operation of the library,
 * beside two definitions in double: its recurrence, and a T x T matrix of products of C and B times the decays:
 *
 *   make everything && build/default/notes/examples/state_space
 *
 * The table has what a head still holds of a token, some tokens later, if every token takes the same step, and if one
 * token in between takes a large one. Chapter 30 derives both forms.
 */
#include "megatron.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { T = 192, HEADS = 4, N = 8, P = 6 }; // T: three chunks

static float x[T][HEADS][P], B[T][N], C[T][N], dt[T][HEADS], A_log[HEADS], D[HEADS], dt_bias[HEADS], out[T][HEADS][P];

static void scan(const mt_ops *ops) {
    mt_span span = {0, T, 0, T, true};
    mt_spans spans = {&span, &span, 1};
    /* x, B and C are parts of one row of a model's matrix; here each is a matrix, so a head is scanned at a time */
    for (int h = 0; h < HEADS; h++) {
        static float row[T][P + 2 * N], one[T][P], step[T];
        for (int t = 0; t < T; t++) {
            memcpy(row[t], x[t][h], sizeof x[t][h]);
            memcpy(row[t] + P, B[t], sizeof B[t]), memcpy(row[t] + P + N, C[t], sizeof C[t]);
            step[t] = dt[t][h];
        }
        mt_ssd_args a = {.spans = &spans, .G = 1, .H = 1, .N = N, .P = P, .dt_max = INFINITY};
        a.x = row[0], a.B = row[0] + P, a.C = row[0] + P + N, a.stride = P + 2 * N, a.dt = step, a.dt_stride = 1;
        a.A_log = &A_log[h], a.D = &D[h], a.dt_bias = &dt_bias[h], a.out = one;
        ops->ssd_forward(&a, MT_F32, NULL);
        for (int t = 0; t < T; t++) memcpy(out[t][h], one[t], sizeof one[t]);
    }
}

static double step_of(int t, int h) {
    return log1p(exp((double)dt[t][h] + (double)dt_bias[h]));
}

/* S_t = e^(step A) S_t-1 + step B_t x_t^T; y_t = S_t^T C_t + D x_t. */
static void by_recurrence(double (*y)[P], int h) {
    double S[N][P] = {{0}}, A = -exp((double)A_log[h]);
    for (int t = 0; t < T; t++)
        for (int c = 0; c < P; c++) {
            y[t][c] = (double)D[h] * (double)x[t][h][c];
            for (int n = 0; n < N; n++) {
                S[n][c] = exp(step_of(t, h) * A) * S[n][c] + step_of(t, h) * (double)B[t][n] * (double)x[t][h][c];
                y[t][c] += S[n][c] * (double)C[t][n];
            }
        }
}

/* y = M X + D x, M_ti = e^(G_t - G_i) C_t.B_i on and below the diagonal, X_i = step_i x_i. */
static void by_attention(double (*y)[P], int h) {
    double G[T], A = -exp((double)A_log[h]);
    for (int t = 0; t < T; t++) G[t] = (t > 0 ? G[t - 1] : 0) + step_of(t, h) * A;
    for (int t = 0; t < T; t++) {
        for (int c = 0; c < P; c++) y[t][c] = (double)D[h] * (double)x[t][h][c];
        for (int i = 0; i <= t; i++) {
            double score = 0;
            for (int n = 0; n < N; n++) score += (double)C[t][n] * (double)B[i][n];
            for (int c = 0; c < P; c++) y[t][c] += exp(G[t] - G[i]) * score * step_of(i, h) * (double)x[i][h][c];
        }
    }
}

/* The largest distance of the operation from a definition. */
static double worst_of(void definition(double (*)[P], int)) {
    static double y[T][P];
    double worst = 0;
    for (int h = 0; h < HEADS; h++) {
        definition(y, h);
        for (int t = 0; t < T; t++)
            for (int c = 0; c < P; c++) worst = fmax(worst, fabs(y[t][c] - (double)out[t][h][c]));
    }
    return worst;
}

/* The part of token 0, which alone has an x, in the heads' outputs some tokens later. Heads 0 to 2 take the same step
 * at every token, with A of -0.01, -0.1 and -1; head 3 is as head 0, but its token 20 takes a step of 500. */
static void print_memory(const mt_ops *ops) {
    const float A[HEADS] = {0.01f, 0.1f, 1, 0.01f};
    memset(x, 0, sizeof x), memset(D, 0, sizeof D), memset(dt_bias, 0, sizeof dt_bias);
    for (int h = 0; h < HEADS; h++) {
        A_log[h] = logf(A[h]), x[0][h][0] = 1;
        for (int t = 0; t < T; t++) {
            dt[t][h] = h == 3 && t == 20 ? 500 : logf(expf(1) - 1); // softplus of it: 500, or 1
            for (int n = 0; n < N; n++) B[t][n] = C[t][n] = n == 0;
        }
    }
    scan(ops);
    const int later[] = {0, 1, 10, 30, 100};
    printf("tokens later  slow  middle   fast  slow, then a large step\n");
    for (int i = 0; i < 5; i++)
        printf("%12d %5.2f %7.2f %6.2f %24.2f\n", later[i], (double)out[later[i]][0][0], (double)out[later[i]][1][0],
               (double)out[later[i]][2][0], (double)out[later[i]][3][0]);
}

int main(void) {
    mt_grid grid = mt_grid_of_one;
    mt_error error;
    const mt_ops *ops = mt_backend_open(MT_DEVICE_CPU, &grid, &error);
    if (!ops) mt_die("%s", error.text);
    print_memory(ops);
    float *const operands[] = {x[0][0], B[0], C[0], dt[0], D};
    const int64_t sizes[] = {T * HEADS * P, T * N, T * N, T * HEADS, HEADS};
    for (int i = 0; i < 5; i++) ops->random_normal(operands[i], sizes[i], (uint64_t)i + 1, 0, 0, 1, MT_F32, NULL);
    scan(ops);
    double recurrence = worst_of(by_recurrence), attention = worst_of(by_attention);
    bool good = recurrence < 1e-3 && attention < 1e-3;
    if (good)
        printf("the operation equals its recurrence and its attention: ok\n");
    else
        printf("distance from the recurrence %.1e, from attention %.1e: WRONG\n", recurrence, attention);
    return good ? 0 : 1;
}
