/* checkpoint_plan.h: the tensors of a checkpoint, and where each of their bytes stands in its files: known to every
 * rank before the first one is written. */
#ifndef MT_CHECKPOINT_PLAN_H
#define MT_CHECKPOINT_PLAN_H

#include "../options/options.h"
#include "megatron_tensors.h"
#include "torch_write.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor of a checkpoint: one parameter, or several that it holds one after another. Of a folder torch_dist: a part
 * of one, in an archive of its own. */
typedef struct mt_saved_tensor {
    char name[192];         // of torch_dist: with the part's place
    const mt_param *params; // rows of this rank's table; NULL: this rank has no part of it
    int64_t num_params;
    mt_param_state state;
    mt_dtype dtype;
    int64_t shape[MT_PARAM_DIMS], num_dims;
    int64_t file, offset, bytes; // number in the set; offset in the file
    mt_core_chunk chunk;         // of torch_dist
    bool trained;                // of torch_dist: by the optimizer
    uint32_t sum;                // mt_zip_sum_lines of the bytes that this rank has written; on rank 0 then of all
} mt_saved_tensor;

/* A file, and the text that it begins with. */
typedef struct mt_saved_file {
    char name[64];
    char *header; // length, JSON and padding; NULL with torch_dist
    int64_t header_bytes, bytes;
} mt_saved_file;

/* The tensors of a stem ("model" or "optimizer"), or with `dist` of both, by name, and their files. */
typedef struct mt_saved_set {
    const char *stem, *option; // option: the one that names the folder
    mt_saved_tensor *tensors;
    int64_t count, bytes;
    mt_saved_file *files;
    int64_t num_files, first_file; // first_file: files of the sets before this one
    bool dist;                     // of a folder torch_dist: weights and the optimizer's state
    bool has_masters;              // torch_dist: master weights besides the weights
} mt_saved_set;

/* Plans the files of a stem in a Hugging Face folder: tensors by name, as transformers writes them, in files of at most
 * max_shard_bytes. `option` names the folder. */
void mt_saved_plan(mt_saved_set *set, const mt_model *model, const char *stem, int64_t first_file,
                   int64_t max_shard_bytes, const char *option);

/* Plans the files of a folder torch_dist: the weights, and with `states` the optimizer's, in files of at most
 * max_shard_bytes. Every parameter has a place there (mt_core_check). */
void mt_saved_plan_dist(mt_saved_set *set, const mt_model *model, const mt_run_options *options, bool states,
                        int64_t max_shard_bytes, const char *option);

/* Plans the weights of the whole model's table, rows[count], which must stay, in the format of --ckpt-format. */
void mt_saved_plan_weights(mt_saved_set *set, const mt_param *rows, int64_t count, const mt_run_options *options,
                           mt_dtype dtype, int64_t max_shard_bytes, const char *option);
void mt_saved_free(mt_saved_set *set);

/* The place of a parameter in its tensor. */
mt_placement mt_saved_place(const mt_saved_tensor *tensor, const mt_param *param, const mt_options *options);

/* The type of a saved state. A type with scales is saved as fp32 values, as by Transformer Engine, because the scales
 * belong to the parts of this run's ranks. */
mt_dtype mt_saved_dtype(const mt_model *model, mt_param_state state);

/* The archive around a tensor of torch_dist, without its values. Free it. */
void mt_saved_archive(const mt_saved_tensor *tensor, mt_archive *archive);

#ifdef __cplusplus
}
#endif
#endif
