/* megatron_tensors.h: the place of each parameter in the matrices of a checkpoint of Megatron-LM. */
#ifndef MT_MEGATRON_TENSORS_H
#define MT_MEGATRON_TENSORS_H

#include "../options/options.h"
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

/* The part of a tensor of torch_dist that --save writes as one archive: a layer's and an expert's, and of a gate and
 * the other half of an MLP's first matrix one of them. */
typedef struct mt_core_chunk {
    char name[160];
    int64_t num_dims, shape[4]; // of the whole tensor
    int64_t num_lead;           // the first dimensions: layer, expert
    int64_t first[4], sizes[4]; // of this part
} mt_core_chunk;

/* The part that holds one state of a parameter, named as by the specification of layers for Transformer Engine. Layers
 * that are all alike are one tensor, as Megatron-Core decides by --moe-layer-freq and --linear-attention-freq. False:
 * checkpoints of Megatron-LM have no place for this role here. */
bool mt_core_chunk_of(const mt_param *param, mt_param_state state, const mt_run_options *options, mt_core_chunk *chunk);

/* The place of one state of a parameter in its part, which exists. */
mt_placement mt_core_placement(const mt_param *param, mt_param_state state, const mt_options *options);

/* An error if a parameter of the model has no place in a folder torch_dist, or its optimizer's state, with `states`. */
int mt_core_check(const mt_run_options *options, bool states, mt_error *error);

/* The states of a parameter that such a folder holds: [the result, mt_stem_end). The optimizer of fp32 parameters may
 * have no master weights. */
int mt_megatron_first_state(const mt_megatron *checkpoint, bool weights);

#ifdef __cplusplus
}
#endif
#endif
