/* distillation.h: the options of distillation that are more than a number: pairs of layers, and the names and the file
 * that Megatron-LM's distillation by Model Optimizer has (megatron/post_training, nvidia-modelopt's
 * torch/distill/plugins/megatron.py). */
#ifndef MT_DISTILLATION_H
#define MT_DISTILLATION_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads --kd-hidden-layers into c->pairs and c->num_pairs. A pair is STUDENT:TEACHER or STUDENT:TEACHER:TYPE with
 * Megatron-Core's names: decoder.layers.N, the output of layer N from 0, and decoder.final_layernorm. Error: another
 * name, a type that is none of cosine and mse, too many pairs. */
int mt_options_hidden_pairs(mt_distillation_config *c, const mt_run_options *o, mt_error *error);

/* Replaces --export-kd-teacher-load DIR by --teacher-load DIR --stage kd --kd-balance hidden, on the data of
 * pre-training unless --sft is given, and --export-kd-cfg by the options that its file means. With --print-config a
 * file that is not there stays a name. Keys without effect are warnings. */
int mt_options_read_distillation(mt_run_options *o, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
