/* flops.h: the floating-point operations of a model, from its options. */
#ifndef MT_FLOPS_H
#define MT_FLOPS_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Predicted work of forward and backward, in FLOPs: of a token, of a pair of tokens of one sample (its length squared),
 * and the time of a token's keys and values on the links of context parallelism, as the FLOPs of that time. */
typedef struct mt_token_work {
    double per_token, per_pair, per_exchange;
} mt_token_work;

/* Floating-point operations of forward and backward over `num_sequences` (Megatron's num_floating_point_operations;
 * recomputation is not counted; with --window-size only the keys of the window are). */
double mt_flops(const mt_options *options, int64_t num_sequences);

/* The same of a vision tower for an image of height x width patches. Parts that --freeze-vision or --freeze-projector
 * keeps have their forward, and the gradient of their input where a part before them trains. */
double mt_image_flops(const mt_options *options, int64_t height, int64_t width);

/* The predicted work of a model's tokens: the linear and the quadratic term of mt_flops, and the FLOPs that
 * an H200 computes while it receives a token's keys and values, forward and backward, over NVLink. */
mt_token_work mt_token_work_of(const mt_options *options);

#ifdef __cplusplus
}
#endif
#endif
