/* hidden_pairs.h: the pairs of layers whose hidden states a distillation compares. */
#ifndef MT_HIDDEN_PAIRS_H
#define MT_HIDDEN_PAIRS_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads --kd-hidden-layers into c->pairs and c->num_pairs. A pair is STUDENT:TEACHER or STUDENT:TEACHER:TYPE with
 * Megatron-Core's names: decoder.layers.N, the output of layer N from 0, and decoder.final_layernorm. Error: another
 * name, a type that is none of cosine and mse, too many pairs. */
int mt_options_hidden_pairs(mt_distillation_config *c, const mt_run_options *o, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
