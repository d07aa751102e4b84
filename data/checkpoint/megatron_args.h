/* megatron_args.h: the model of a checkpoint of Megatron-LM, from the arguments that it holds. */
#ifndef MT_MEGATRON_ARGS_H
#define MT_MEGATRON_ARGS_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With options->use_checkpoint_args, or without --num-layers: takes the model's options that were not given from the
 * arguments of the checkpoint in `folder`; given ones must agree. Otherwise compares them, so that an option that
 * changes no tensor's shape, such as --rotary-base, does not differ unseen. A checkpoint without arguments gives
 * nothing. */
int mt_options_read_megatron(mt_run_options *options, const char *folder, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
