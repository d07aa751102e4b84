/* checkpoint_experts.h: tensors that hold all experts of a layer, cut into the matrices of each expert. The cut is one
 * of names and addresses: the bytes of an expert's matrix lie together in the stacked tensor. */
#ifndef MT_CHECKPOINT_EXPERTS_H
#define MT_CHECKPOINT_EXPERTS_H

#include "../base/safetensors.h"
#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Cuts the tensors that hold all experts of a layer, as transformers 5 has them in memory and writes them with
 * save_original_format=False, into the matrices of each expert under the names of the parameter table: gate_up_proj
 * [experts, 2 width, hidden], gate first, and down_proj [experts, hidden, width]. A family whose table has such tensors
 * keeps them. Errors: another shape. */
int mt_experts_unstack(mt_safetensors *set, const mt_run_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
