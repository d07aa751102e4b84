/* grouped.h: the ladder of linear layers that are grouped by expert. Each rung computes the same thing, faster and for
 * less: the definition takes any operands, the rungs above it what their hardware is good at. */
#ifndef MT_GROUPED_H
#define MT_GROUPED_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each is a product of rows by columns for every expert, out = a b:
 *   forward          y[rows, N] = x[rows, K] w[N, K]^T     for an expert's rows
 *   backward_input   dx[rows, K] = dy[rows, N] w[N, K]
 *   backward_weight  dw[N, K] = dy[rows, N]^T x[rows, K]   the sum is over an expert's rows */
typedef enum mt_grouped_kind {
    MT_GROUPED_FORWARD,
    MT_GROUPED_BACKWARD_INPUT,
    MT_GROUPED_BACKWARD_WEIGHT
} mt_grouped_kind;

/* The operands of one of the three operations. */
typedef struct mt_grouped_call {
    mt_grouped_kind kind;
    void *out;
    const void *a, *b;      // x and w; dy and w; dy and x
    const int32_t *offsets; // [E + 1], on the device
    int64_t M, N, K, E;
    bool accumulate; // backward_weight: out +=
    mt_dtype dtype;
    mt_stream *stream;
} mt_grouped_call;

/* Returns whether the rung serves these operands on this GPU; where it does not, nothing was enqueued. */
typedef bool mt_grouped_product(const mt_grouped_call *call);
typedef struct mt_grouped_rung {
    const char *name;
    mt_grouped_product *product;
} mt_grouped_rung;

/* From the definition up: the last that serves a call is the fastest. */
enum { MT_NUM_GROUPED_RUNGS = 3 };
extern const mt_grouped_rung mt_grouped_rungs[MT_NUM_GROUPED_RUNGS];

#ifdef __cplusplus
}
#endif
#endif
