/* checkpoint_fp8.h: the state of delayed scaling in a checkpoint. */
#ifndef MT_CHECKPOINT_FP8_H
#define MT_CHECKPOINT_FP8_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The file of a checkpoint with the state of delayed scaling. */
#define MT_FP8_FILE "fp8.safetensors"

/* Frees what mt_train_fp8_state allocated. */
void mt_fp8_state_free(mt_fp8_state *state);

/* The bytes of MT_FP8_FILE, to free, on rank 0. NULL: the model has no delayed scaling, or another rank. Every rank
 * calls it. */
char *mt_fp8_collect(mt_model *m, int64_t *bytes);

/* Sets the state of delayed scaling: from the folder's file if the run continues from it, else fresh. Every rank calls
 * it and returns the same. Rank 0 reports in one line what differs from the run that saved it. */
int mt_fp8_state_load(mt_model *m, const char *folder, bool continues, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
