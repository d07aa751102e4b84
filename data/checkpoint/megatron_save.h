/* megatron_save.h: the files of a folder torch_dist that hold no values: .metadata, common.pt, and what a module of
 * Megatron-Core expects besides its weights. */
#ifndef MT_MEGATRON_SAVE_H
#define MT_MEGATRON_SAVE_H

#include "checkpoint_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The file of the modules' further state, which is None: fp8's in Transformer Engine. */
#define MT_DIST_OBJECTS "__objects_0.distcp"

/* The contents of that file, an archive that holds [None]. */
void mt_dist_objects_make(mt_bytes *file);

/* The contents of .metadata: every tensor's parts and their places in the files. Master weights are listed under the
 * names of both optimizers of Megatron-Core, the plain one's (fp32_param) and the distributed one's (param), which with
 * fp32 parameters are the weights; `states`: the folder holds them. */
void mt_dist_metadata_make(const mt_saved_set *set, bool states, mt_bytes *file);

/* The contents of common.pt: the run's arguments and numbers; with `states` also the optimizer's groups and the
 * schedule of the learning rate. `dtype`: of the weights. */
void mt_dist_common_make(const mt_run_options *options, const mt_grid *grid, const mt_run_state *state, bool states,
                         mt_dtype dtype, mt_bytes *file);

#ifdef __cplusplus
}
#endif
#endif
