/* grouped.h: the implementations of linear layers grouped by expert, as a ladder. Each rung computes the same result
 * faster than the one below it. The first, the definition, takes any operands; the others need certain hardware and
 * shapes. */
#ifndef MT_GROUPED_H
#define MT_GROUPED_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The three products out = a b, for the rows of each expert:
 *   forward          y[rows, N] = x[rows, K] w[N, K]^T
 *   backward_input   dx[rows, K] = dy[rows, N] w[N, K]
 *   backward_weight  dw[N, K] = dy[rows, N]^T x[rows, K]   summed over the expert's rows */
typedef enum mt_grouped_kind {
    MT_GROUPED_FORWARD,
    MT_GROUPED_BACKWARD_INPUT,
    MT_GROUPED_BACKWARD_WEIGHT
} mt_grouped_kind;

/* The operands of one of the three products. */
typedef struct mt_grouped_call {
    mt_grouped_kind kind;
    void *out;
    const void *a, *b;      // forward: x, w; backward_input: dy, w; backward_weight: dy, x
    const int32_t *offsets; // [E + 1], device memory
    int64_t M, N, K, E;
    bool accumulate; // add to out
    mt_dtype dtype;
    mt_stream *stream;
    int64_t a_stride, b_stride,
        out_stride; // elements between rows, of operands that are no weight; 0: none between two
    float scale;    // of the product; 0: 1
} mt_grouped_call;

/* Returns false and enqueues nothing if the rung does not support these operands on this GPU. */
typedef bool mt_grouped_product(const mt_grouped_call *call);
typedef struct mt_grouped_rung {
    const char *name;
    mt_grouped_product *product;
} mt_grouped_rung;

/* Ordered from the definition to the fastest; a call uses the last rung that supports it. */
enum { MT_NUM_GROUPED_RUNGS = 3 };
extern const mt_grouped_rung mt_grouped_rungs[MT_NUM_GROUPED_RUNGS];

/* gemm.cu: the products of mt_grouped_args without offsets. */
void mt_cuda_strided_forward(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream);
void mt_cuda_strided_backward_input(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream);
void mt_cuda_strided_backward_weight(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
