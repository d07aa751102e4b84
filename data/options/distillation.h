/* distillation.h: the names and the file that Megatron-LM's distillation by Model Optimizer has
 * (megatron/post_training, nvidia-modelopt's torch/distill/plugins/megatron.py). */
#ifndef MT_DISTILLATION_H
#define MT_DISTILLATION_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Replaces --export-kd-teacher-load DIR by --teacher-load DIR --stage kd --kd-balance hidden, on the data of
 * pre-training unless --sft is given, and --export-kd-cfg by the options that its file means. With --print-config a
 * file that is not there stays a name. Keys without effect are warnings. */
int mt_options_read_distillation(mt_run_options *o, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
