/* fp8.h: the implementations of fp8 products on the GPU, from the definition to the fastest, for tests and benchmarks
 * to call directly. fp8_product uses the last one that serves. */
#ifndef MT_CUDA_FP8_H
#define MT_CUDA_FP8_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues the product and returns true, or enqueues nothing and returns false if this implementation does not serve
 * it. */
typedef bool mt_fp8_product_rung(const mt_fp8_product_args *p, mt_stream *stream);

typedef struct mt_fp8_rung {
    const char *name;
    mt_fp8_product_rung *product;
} mt_fp8_rung;

/* Any product: operands are converted to fp32 and multiplied in fp32. */
mt_fp8_product_rung mt_fp8_definition;
/* Products without experts through cuBLASLt. */
mt_fp8_product_rung mt_fp8_cublaslt;
/* Products with experts on Hopper. b in e4m3; scales of tensors, or those of MT_FP8_BLOCKWISE. */
mt_fp8_product_rung mt_fp8_hopper;

enum { MT_NUM_FP8_RUNGS = 3 };
extern const mt_fp8_rung mt_fp8_rungs[MT_NUM_FP8_RUNGS];

#ifdef __cplusplus
}
#endif
#endif
