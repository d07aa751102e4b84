/* checkpoint_folder.h: which checkpoint of a folder: --save writes folders iter_NNNNNNN, and
 * latest_checkpointed_iteration.txt names the last one. */
#ifndef MT_CHECKPOINT_FOLDER_H
#define MT_CHECKPOINT_FOLDER_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The folder that holds config.json, or adapter_config.json: `folder` itself, its latest iter_NNNNNNN, or, without
 * latest_checkpointed_iteration.txt, the newest one that is whole. Returns text to free, or NULL with error. */
char *mt_checkpoint_locate(const char *folder, mt_error *error);

/* mt_checkpoint_locate; NULL with error also for a checkpoint that is damaged as far as mt_checkpoint_verify sees
 * without reading tensors and states. Whoever reads its files calls this first, so that one damage has one error. */
char *mt_checkpoint_resolve(const char *folder, mt_error *error);

/* mt_checkpoint_resolve for a folder of --save, with the optimizer's files: if the latest checkpoint is damaged, the
 * one before. NULL with the error of the latest if none is whole. */
char *mt_checkpoint_resolve_whole(const char *folder, mt_error *error);

/* True when a folder holds a checkpoint, damaged or not. */
bool mt_checkpoint_exists(const char *folder);

/* Compares one checkpoint's folder, an iter_NNNNNNN, with its checksums.json; parts: MT_VERIFY_* of
 * mt_checksums_verify. Returns 0 also where there is no checksums.json: in a Hugging Face folder, or one of an older
 * version. The error names the damage without a remedy. */
int mt_checkpoint_verify(const char *folder, int parts, mt_error *error);

/* Adds the remedy to the error of a damaged checkpoint: the newest one before it that is whole as far as
 * mt_checkpoint_verify sees without reading tensors. Returns -1. */
int mt_checkpoint_advise(const char *folder, mt_error *error);

/* "FOLDER/iter_NNNNNNN" to free. */
char *mt_iteration_path(const char *folder, int64_t number);

/* The number of a name iter_NNNNNNN, or -1 for any other name. */
int64_t mt_iteration_of(const char *name);

/* True when a folder holds a model's config.json, an adapter's adapter_config.json, or a checkpoint of Megatron-LM. */
bool mt_folder_has_weights(const char *folder);

/* True if the weights of a folder are those of a checkpoint of Megatron-LM (megatron_folder.h). */
bool mt_folder_is_megatron(const char *folder);

/* The latest checkpoint of a folder before iteration `before` that mt_checkpoint_verify finds whole without reading its
 * tensors, and that has trainer.json. -1 if there is none; the error is that of the first checkpoint tried, or that the
 * folder has no checkpoint. */
int64_t mt_checkpoint_whole_before(const char *folder, int64_t before, mt_error *error);

/* Numbers of the checkpoints in a folder, in descending order; free the numbers. */
typedef struct mt_iterations {
    int64_t *numbers, count;
} mt_iterations;
mt_iterations mt_iterations_list(const char *folder);

/* True when folder/name is a link into the latest iteration. */
bool mt_is_own_link(const char *folder, const char *name);

#ifdef __cplusplus
}
#endif
#endif
