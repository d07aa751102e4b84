/* checkpoint_load.h: loads checkpoints and Hugging Face folders. */
#ifndef MT_CHECKPOINT_LOAD_H
#define MT_CHECKPOINT_LOAD_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Loads weights from a Hugging Face folder, or from the latest checkpoint of a folder that mt_checkpoint_save wrote. A
 * model for training also gets the optimizer's state, the loss's running average and `state` from a checkpoint, and
 * then continues bit for bit. From a Hugging Face folder, or with options->finetune, it begins at iteration 0. With
 * options->no_load_optim it continues with a new optimizer; else a checkpoint without the optimizer's state is refused.
 * Without latest_checkpointed_iteration.txt the newest checkpoint that is whole is loaded, with a warning. Weights may
 * be F32, BF16, F16 or F64. Errors: a missing tensor, one without a place in the model, a wrong shape, a run that began
 * with another seed or sequence length. Values that are not finite cause a warning on standard error. Every rank calls
 * it, loads its part of each tensor, and returns the same. */
int mt_checkpoint_load(mt_model *model, const mt_run_options *options, mt_run_state *state, const char *folder,
                       mt_error *error);

/* mt_checkpoint_load; *found (NULL: not wanted) is the folder whose files were loaded, to free. `own`: the folder is
 * this run's --save, so that options->finetune and no_load_optim do not apply, and a damaged checkpoint is followed by
 * the one before. */
int mt_checkpoint_load_found(mt_model *model, const mt_run_options *options, mt_run_state *state, const char *folder,
                             bool own, char **found, mt_error *error);

/* Loads the adapter of a folder of peft, or of the latest checkpoint of a run with adapters; training continues from
 * that as above. NULL: the adapter of a new run. mt_checkpoint_load does this too, with options->load_adapter,
 * after the base weights of `folder`. `own` as above. Every rank calls it. */
int mt_checkpoint_load_adapter(mt_model *model, const mt_run_options *options, mt_run_state *state, const char *folder,
                               bool own, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
