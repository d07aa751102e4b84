/* checkpoint_internal.h: shared by the files checkpoint_*.c. */
#ifndef MT_CHECKPOINT_INTERNAL_H
#define MT_CHECKPOINT_INTERNAL_H

#include "../base/safetensors.h"

enum {
    MT_TRAINER_VERSION = 2, // of trainer.json; from version 2 on a checkpoint has checksums.json
    MT_DIRECT = 4096        // alignment of memory, offsets and lengths for reads and writes past the page cache
};

/* The fields of mt_run_state, by their names in trainer.json. */
#define MT_RUN_STATE_FIELDS(FIELD)                                                                                     \
    FIELD(iteration)                                                                                                   \
    FIELD(consumed_train_samples)                                                                                      \
    FIELD(consumed_valid_samples)                                                                                      \
    FIELD(optimizer_step)

/* The first aligned address from `memory` on. */
char *mt_align_direct(char *memory);

/* Opens a file for reads or writes past the page cache (O_DIRECT), which saves a copy and the cost of new cache pages.
 * -1 where the system or the file system cannot. */
int mt_open_direct(const char *path, int flags);

/* The name of the tensor that holds a parameter's state, such as exp_avg.NAME; the optimizer has this state. */
void mt_state_tensor_name(char *name, size_t size, mt_optimizer optimizer, mt_param_state state, const char *hf_name);

/* Cuts the tensors that hold all experts of a layer, as transformers 5 has them in memory and writes them with
 * save_original_format=False, into the matrices of each expert under the names of the parameter table: gate_up_proj
 * [experts, 2 width, hidden], gate first, and down_proj [experts, hidden, width]. A family whose table has such tensors
 * keeps them. Errors: another shape. */
int mt_experts_unstack(mt_safetensors *set, const mt_options *options, mt_error *error);

/* Place of a parameter in a tensor of a file. The tensor holds `slices` slices of equal size, and the parameter lies in
 * one of them, which is a matrix with lines of `width` elements: element (r, c) of the whole parameter is at
 * (mt_placement_row(r), c), or transposed at (c, mt_placement_row(r)). */
typedef struct mt_placement {
    bool transposed;
    int64_t row, stride, width;
    int64_t slice, slices;
    int64_t group_rows, group_pitch; // groups of rows of the parameter, and the distance of their first rows
} mt_placement;

/* The row of the slice that holds row r of the whole parameter; without groups row + r stride. */
int64_t mt_placement_row(const mt_placement *place, int64_t r);

/* The place of one state. The optimizer's states of experts that are stacked (hf_stack) lie in their tensor as the
 * parameters lie in memory, gate before up: parts of a shard are then long runs of the file. */
mt_placement mt_param_placement(const mt_param *param, mt_param_state state);

/* The shape of the whole tensor that holds one state of a parameter; returns the number of dimensions. */
int64_t mt_param_shape(const mt_param *param, mt_param_state state, int64_t shape[3]);

/* Numbers of the checkpoints in a folder, in descending order; free the numbers. */
typedef struct mt_iterations {
    int64_t *numbers, count;
} mt_iterations;
mt_iterations mt_iterations_list(const char *folder);

/* The parameters whose tensors the files of a stem hold: "model", "adapter_model", or "optimizer". */
bool mt_stem_holds(const char *stem, const mt_param *param);

/* True when folder/name is a link into the latest iteration. */
bool mt_is_own_link(const char *folder, const char *name);

/* The file of a checkpoint with the state of delayed scaling. */
#define MT_FP8_FILE "fp8.safetensors"

/* The bytes of MT_FP8_FILE, to free, on rank 0. NULL: the model has no delayed scaling, or another rank. Every rank
 * calls it. */
char *mt_fp8_collect(mt_model *m, int64_t *bytes);

/* Sets the state of delayed scaling: from the folder's file if the run continues from it, else fresh. Every rank calls
 * it and returns the same. Rank 0 reports in one line what differs from the run that saved it. */
int mt_fp8_load(mt_model *m, const char *folder, bool continues, mt_error *error);

#endif
