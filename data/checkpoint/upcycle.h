/* upcycle.h: a model with experts that begins as a dense one (Komatsuzaki et al., "Sparse upcycling"; He et al.,
 * "Upcycling large language models into mixture of experts", with Megatron's scales). Every expert is a copy of the
 * dense MLP or, with a granularity G above 1, one of the G parts of its hidden channels: expert e has part e % G. All
 * other weights are the dense model's; routers start as in a new model, and the G parts of a copy share one row. */
#ifndef MT_UPCYCLE_H
#define MT_UPCYCLE_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The dense model that --load holds; it borrows the texts of `options`, which has --moe-use-upcycling. */
mt_options mt_upcycle_dense(const mt_run_options *options);

/* The dense parameter that a parameter of the model with experts begins as, among rows[count]; NULL: none. */
const mt_param *mt_upcycle_source(const mt_param *rows, int64_t count, const mt_param *param);

/* The part of the dense MLP's hidden channels that an expert's parameter is, from 0; 0 for all others. */
int64_t mt_upcycle_part(const mt_options *options, const mt_param *param);

/* The factor of an expert's matrices: with equal weights of a token's experts, their sum is the dense MLP's output, up
 * to the curvature of a gate's activation. 1 for all others. */
float mt_upcycle_factor(const mt_options *options, const mt_param *param);

#ifdef __cplusplus
}
#endif
#endif
