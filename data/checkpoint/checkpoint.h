/* checkpoint.h: saves and loads checkpoints. A checkpoint is a Hugging Face folder: config.json, and whole tensors in
 * safetensors under Hugging Face names; beside them the optimizer's state in the same form, and trainer.json. Any
 * layout of ranks loads a checkpoint that any other layout saved. That of a run with adapters is a folder of peft in
 * place of the model's, with adapter_config.json and adapter_model.safetensors. */
#ifndef MT_CHECKPOINT_H
#define MT_CHECKPOINT_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- loading */

/* Loads weights from a Hugging Face folder, or from the latest checkpoint of a folder that mt_checkpoint_save wrote. A
 * model for training also gets the optimizer's state, the loss's running average and `state` from a checkpoint, and
 * then continues bit for bit. From a Hugging Face folder, or with options->finetune, it begins at iteration 0. With
 * options->no_load_optim it continues with a new optimizer; else a checkpoint without the optimizer's state is refused.
 * Without latest_checkpointed_iteration.txt the newest checkpoint that is whole is loaded, with a warning. Weights may
 * be F32, BF16, F16 or F64. Errors: a missing tensor, one without a place in the model, a wrong shape, a run that began
 * with another seed or sequence length. Values that are not finite cause a warning on standard error. Every rank calls
 * it, loads its part of each tensor, and returns the same. */
int mt_checkpoint_load(mt_model *model, mt_run_state *state, const char *folder, mt_error *error);

/* mt_checkpoint_load; *found (NULL: not wanted) is the folder whose files were loaded, to free. `own`: the folder is
 * this run's --save, so that options->finetune and no_load_optim do not apply, and a damaged checkpoint is followed by
 * the one before. */
int mt_checkpoint_load_found(mt_model *model, mt_run_state *state, const char *folder, bool own, char **found,
                             mt_error *error);

/* Compares the tensors of a folder's headers with the model of finished options, and shared tensors with the
 * tensors that they repeat, as loading does, before memory is taken for the model. For one rank. */
int mt_checkpoint_check(const mt_options *options, const char *folder, mt_error *error);

/* Loads the adapter of a folder of peft, or of the latest checkpoint of a run with adapters; training continues from
 * that as above. NULL: the adapter of a new run. mt_checkpoint_load does this too, with options->load_adapter,
 * after the base weights of `folder`. `own` as above. Every rank calls it. */
int mt_checkpoint_load_adapter(mt_model *model, mt_run_state *state, const char *folder, bool own, mt_error *error);

/* The folder that holds config.json, or adapter_config.json: `folder` itself, its latest iter_NNNNNNN, or, without
 * latest_checkpointed_iteration.txt, the newest one that is whole. Returns text to free, or NULL with error. */
char *mt_checkpoint_resolve(const char *folder, mt_error *error);

/* mt_checkpoint_resolve for a folder of --save: if the latest checkpoint is damaged as far as mt_checkpoint_verify sees
 * without reading tensors, the one before. NULL with the error of the latest if none is whole. */
char *mt_checkpoint_resolve_whole(const char *folder, mt_error *error);

/* Iteration and samples of the run that the options continue, as its trainer.json has them. They stay as they are for a
 * run that begins, and for a file that loading will refuse. */
void mt_checkpoint_peek(const mt_options *options, mt_run_state *state);

/* True when a folder holds a checkpoint, damaged or not. */
bool mt_checkpoint_exists(const char *folder);

/* Compares one checkpoint's folder, an iter_NNNNNNN, with its checksums.json: every file exists and has its size; files
 * without tensors, or with `whole` all files, have their sums. Returns 0 also where there is no checksums.json: in a
 * Hugging Face folder, or one of an older version. */
int mt_checkpoint_verify(const char *folder, bool whole, mt_error *error);

/* "FOLDER/iter_NNNNNNN" to free. */
char *mt_iteration_path(const char *folder, int64_t number);

/* The number of a name iter_NNNNNNN, or -1 for any other name. */
int64_t mt_iteration_of(const char *name);

/* True when a folder holds a model's config.json or an adapter's adapter_config.json. */
bool mt_folder_has_weights(const char *folder);

/* The latest checkpoint of a folder before iteration `before` that mt_checkpoint_verify finds whole without reading its
 * tensors, and that has trainer.json. -1 if there is none; the error is that of the first checkpoint tried, or that the
 * folder has no checkpoint. */
int64_t mt_checkpoint_whole_before(const char *folder, int64_t before, mt_error *error);

/* A model that generates, from a folder. */
typedef struct mt_hf {
    mt_options options; // the shape from config.json, then the settings; finished
    mt_grid *grid;
    mt_model *model; // to be used with mt_generate (data/models/generate.h) or mt_generator_create
    mt_stops stops;  // tokens that end a text: generation_config.json, or else config.json
} mt_hf;

/* Opens a Hugging Face folder, or one that mt_checkpoint_save wrote, to generate `count` sequences of at most
 * max_tokens tokens as one batch; 0: the model's context, at most 4,096. `settings` (NULL: none) are pairs of an
 * option's name and its value, ended by NULL: {"device", "cpu", "bf16", "true", NULL}. Without them: fp32 on a GPU if
 * one answers, else on the CPU. `grid` was started by mt_grid_start and holds this one model until mt_hf_close; a job
 * of several ranks needs the setting "tensor_model_parallel_size" or "pipeline_model_parallel_size". Every rank calls
 * it. Errors: those of reading the options and the folder; a context that the model does not have; too little memory.
 */
int mt_hf_open(mt_hf **hf, const char *folder, const char *const *settings, int64_t count, int64_t max_tokens,
               mt_grid *grid, mt_error *error);

/* Frees the model and its options; nothing if hf is NULL. */
void mt_hf_close(mt_hf *hf);

/* ---- saving */

/* Before a run: makes options->save this run's alone. Rank 0 creates the folder and locks it for the job until the
 * process ends (mt_folder_lock). Errors: another run holds it; it holds checkpoints of another run, which is so unless
 * options->load is the folder or a checkpoint in it, or options->overwrite is set; with options->auto_resume, it holds
 * a checkpoint and options->load is not the folder, because another run has saved since the options were parsed;
 * without options->overwrite, the run would start below the newest iteration there. Does nothing without
 * options->save. Every rank calls it and returns the same. */
int mt_checkpoint_claim(const mt_options *options, const mt_group *world, mt_error *error);

/* Creates `folder` and checks that a checkpoint can be saved there: it can be written, has the space, and is no other
 * model's Hugging Face folder. Saving does this too; a driver calls it before training. */
int mt_checkpoint_prepare(const mt_model *model, const char *folder, mt_error *error);

/* Adds the caller's own files, such as the tokenizer's, to a checkpoint that is being written into `folder`. Rank 0
 * calls it in a thread of its own; with an asynchronous saver training continues meanwhile, so it must read only data
 * that training does not change. */
typedef int mt_checkpoint_extra(void *context, const char *folder, mt_error *error);

/* Saves folder/iter_NNNNNNN: config.json, safetensors, optimizer state (unless options->no_save_optim), trainer.json,
 * and the files of `extra` (NULL: none). Then makes it the latest: latest_checkpointed_iteration.txt names it, the link
 * `latest` leads to it, and further links make `folder` itself a Hugging Face folder. Older checkpoints stay untouched
 * until the new one is whole and on the disk. Errors: a full disk, a folder that cannot be written, another model's
 * Hugging Face folder. Every rank calls it, writes its share into the files, and returns the same; several hosts must
 * share the folder. */
int mt_checkpoint_save(mt_model *model, const mt_run_state *state, const char *folder, mt_checkpoint_extra *extra,
                       void *context, mt_error *error);

/* Saves a run's checkpoints one after another, as mt_checkpoint_save does. With `async`, mt_saver_save copies this
 * rank's share to host memory, which mt_saver_open allocates, and threads write it while training continues. On the CPU
 * it returns after the copies. On a GPU the copies overlap with later work of the model's stream; only work that
 * changes weights or optimizer waits for them, on the device. A model has one save under way at a time. Every rank
 * calls all of these. */
typedef struct mt_saver mt_saver;
void mt_saver_open(mt_saver **saver, mt_model *model, const char *folder, mt_checkpoint_extra *extra, void *context,
                   bool async);
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
 * one tensor is larger, and their index. The folder must exist and hold no such files. */
int mt_safetensors_save_folder(mt_model *model, const char *folder, const char *stem, int64_t max_shard_bytes,
                               mt_error *error);

/* ---- going back */

/* After mt_train_step returned MT_REWIND: loads the last checkpoint of options->save, or else options->load, in place
 * of the steps since, and sets `state` back. Waits for `saver` first (NULL: none): a checkpoint that is still on its
 * way to the disk is the last one too. An error if there is no checkpoint yet. Every rank calls it. */
int mt_checkpoint_rewind(mt_model *model, mt_run_state *state, mt_saver *saver, mt_error *error);

/* Frees what mt_train_fp8_state allocated. */
void mt_fp8_state_free(mt_fp8_state *state);

#ifdef __cplusplus
}
#endif
#endif
