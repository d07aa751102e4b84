/* megatron_tensors.h: the place of each parameter in the matrices of a checkpoint of Megatron-LM. */
#ifndef MT_MEGATRON_TENSORS_H
#define MT_MEGATRON_TENSORS_H

#include "checkpoint_tensors.h"
#include "megatron_folder.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The matrix that holds one state of a parameter of finished options, and its place there; NULL with error: it is not
 * there, or has another shape. */
const mt_megatron_matrix *mt_megatron_place(const mt_megatron *checkpoint, const mt_param *param, mt_param_state state,
                                            const mt_options *options, const char *folder, mt_placement *place,
                                            mt_error *error);

/* Compares a checkpoint with the whole model's table: every state of every parameter is there with its shape, and each
 * matrix has a parameter. For one rank. */
int mt_megatron_check(const mt_megatron *checkpoint, bool weights, const mt_options *options, const char *folder,
                      mt_error *error);

/* The states of a parameter that such a folder holds: [the result, mt_stem_end). The optimizer of fp32 parameters may
 * have no master weights. */
int mt_megatron_first_state(const mt_megatron *checkpoint, bool weights);

#ifdef __cplusplus
}
#endif
#endif
