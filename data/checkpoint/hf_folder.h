/* hf_folder.h: opens a folder of Hugging Face in one call, to generate. */
#ifndef MT_HF_FOLDER_H
#define MT_HF_FOLDER_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A model that generates, from a folder. */
typedef struct mt_hf {
    mt_run_options options; // the shape from config.json, then the settings; finished
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

#ifdef __cplusplus
}
#endif
#endif
