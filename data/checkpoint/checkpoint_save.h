/* checkpoint_save.h: writes checkpoints. The whole model's parameter table gives the file position of every byte before
 * the first one is written, so every rank knows it: rank 0 writes the headers, each rank its own share at computed
 * offsets, and no rank waits for another. Data passes through host memory, and threads write it from there: a small
 * ring while training waits, or room for the whole share, so that training continues during the writes and, on a GPU,
 * during the copies. The threads call no MPI; of the device they only wait for the copies. A checkpoint is written into
 * a folder with a temporary name beside its final one, brought to the disk, and renamed. Invariant: nothing
 * half-written ever replaces something whole. */
#ifndef MT_CHECKPOINT_SAVE_H
#define MT_CHECKPOINT_SAVE_H

#include "../options/options.h"
#include "checkpoint_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the caller's own files, such as the tokenizer's, to a checkpoint that is being written into `folder`. Rank 0
 * calls it in a thread of its own; with an asynchronous saver training continues meanwhile, so it must read only data
 * that training does not change. */
typedef int mt_checkpoint_extra(void *context, const char *folder, mt_error *error);

/* Before a run: makes options->save this run's alone. Rank 0 creates the folder and locks it for the job until the
 * process ends (mt_folder_lock). Errors: another run holds it; it holds checkpoints of another run, which is so unless
 * options->load is the folder or a checkpoint in it, or options->overwrite is set; with options->auto_resume, it holds
 * a checkpoint and options->load is not the folder, because another run has saved since the options were parsed;
 * without options->overwrite, the run would start below the newest iteration there. Does nothing without
 * options->save. Every rank calls it and returns the same. */
int mt_checkpoint_claim(const mt_run_options *options, const mt_group *world, mt_error *error);

/* Creates `folder` and checks that a checkpoint can be saved there: it can be written, has the space, and is no other
 * model's Hugging Face folder. Saving does this too; a driver calls it before training. */
int mt_checkpoint_prepare(const mt_model *model, const mt_run_options *options, const char *folder, mt_error *error);

/* Saves folder/iter_NNNNNNN: config.json, safetensors, optimizer state (unless options->no_save_optim), trainer.json,
 * and the files of `extra` (NULL: none). Then makes it the latest: latest_checkpointed_iteration.txt names it, the link
 * `latest` leads to it, and further links make `folder` itself a Hugging Face folder. Older checkpoints stay untouched
 * until the new one is whole and on the disk. Errors: a full disk, a folder that cannot be written, another model's
 * Hugging Face folder. Every rank calls it, writes its share into the files, and returns the same; several hosts must
 * share the folder. */
int mt_checkpoint_save(mt_model *model, const mt_run_options *options, const mt_run_state *state, const char *folder,
                       mt_checkpoint_extra *extra, void *context, mt_error *error);

/* Saves a run's checkpoints one after another, as mt_checkpoint_save does. With `async`, mt_saver_save copies this
 * rank's share to host memory, which mt_saver_open allocates, and threads write it while training continues. On the CPU
 * it returns after the copies. On a GPU the copies overlap with later work of the model's stream; only work that
 * changes weights or optimizer waits for them, on the device. A model has one save under way at a time. Every rank
 * calls all of these. */
typedef struct mt_saver mt_saver;
void mt_saver_open(mt_saver **saver, mt_model *model, const mt_run_options *options, const char *folder,
                   mt_checkpoint_extra *extra, void *context, bool async);
/* Begins a checkpoint, after waiting for the one before. With `async` the next calls return the errors of its files. */
int mt_saver_save(mt_saver *saver, const mt_run_state *state, mt_error *error);
/* Call it between training steps: moves a save on once the threads of all ranks are done, and returns their error. Does
 * nothing if no save is under way, or if saver is NULL. */
int mt_saver_poll(mt_saver *saver, mt_error *error);
/* Waits until the save under way is complete. Does nothing if saver is NULL. */
int mt_saver_finish(mt_saver *saver, mt_error *error);
/* The iteration of the last complete checkpoint; -1: none yet. */
int64_t mt_saver_in_place(const mt_saver *saver);
void mt_saver_close(mt_saver *saver);

/* Writes the model's weights (stem "model"), those of its adapters ("adapter_model") or its optimizer state
 * ("optimizer": fp32 master weights of bf16 ones, exp_avg and exp_avg_sq, as master.NAME, exp_avg.NAME,
 * exp_avg_sq.NAME) into a folder: whole tensors under Hugging Face names, in files of at most max_shard_bytes unless
 * one tensor is larger, and their index. The folder must exist and hold no such files. `sums` takes those of the files,
 * to free, complete on rank 0; NULL: not wanted. */
int mt_safetensors_save_folder(mt_model *model, const char *folder, const char *stem, int64_t max_shard_bytes,
                               const char *option, mt_checksums *sums, mt_error *error);

/* Writes checksums.json: `sums`, which has those of the files of tensors, and those of all other files that are in the
 * folder and in folders of it, which this reads. Names in `others` (NULL: none) are left out. */
int mt_checksums_write(mt_checksums *sums, const char *folder, const mt_strings *others, const char *option,
                       mt_error *error);

/* Sets the values of a tensor, [bytes] of its type, which are 0 before; its `params` are those of the plan. */
typedef int mt_tensor_source(void *context, const mt_saved_tensor *tensor, void *values, mt_error *error);

/* Writes planned weights into an empty folder, tensor by tensor: memory for the largest one is all that it takes. Of a
 * Hugging Face folder the weights and their index, of a folder torch_dist all files. `dtype`: of the weights. `sums`
 * takes those of the files of tensors, to free. */
int mt_saved_write(mt_saved_set *set, const mt_run_options *options, mt_dtype dtype, const char *folder,
                   mt_tensor_source *source, void *context, mt_checksums *sums, mt_error *error);

/* After mt_train_step returned MT_REWIND: loads the last checkpoint of options->save, or else options->load, in place
 * of the steps since, and sets `state` back. Waits for `saver` first (NULL: none): a checkpoint that is still on its
 * way to the disk is the last one too. An error if there is no checkpoint yet. Every rank calls it. */
int mt_checkpoint_rewind(mt_model *model, const mt_run_options *options, mt_run_state *state, mt_saver *saver,
                         mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
