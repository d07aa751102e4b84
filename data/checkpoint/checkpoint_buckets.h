/* checkpoint_buckets.h: from tensors into a model's buckets. */
#ifndef MT_CHECKPOINT_BUCKETS_H
#define MT_CHECKPOINT_BUCKETS_H

#include "../base/safetensors.h"
#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Loads the weights (stem "model", or "adapter_model"), or the moments and any master weights (stem "optimizer"). A
 * bf16 run may continue in fp32, from its master weights, and an fp32 run in bf16, with its weights as master weights.
 */
int mt_stem_load(mt_model *m, const mt_run_options *options, const char *folder, const char *stem,
                 const mt_checksums *sums, bool *damaged, mt_error *error);

/* mt_stem_load for a folder of Megatron-LM's: the weights, or the optimizer's moments and any master weights. Without
 * `sums` the sums in its archives are compared. */
int mt_megatron_load(mt_model *m, const mt_run_options *options, const char *folder, bool weights,
                     const mt_checksums *sums, bool *damaged, mt_error *error);

/* Compares the tensors of a folder's headers with the model of finished options, and shared tensors with the
 * tensors that they repeat, as loading does, before memory is taken for the model. For one rank. */
int mt_checkpoint_check(const mt_run_options *options, const char *folder, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
