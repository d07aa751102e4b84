/* checkpoint_tensors.h: the tensors that a model takes from a folder, and how their elements become fp32. */
#ifndef MT_CHECKPOINT_TENSORS_H
#define MT_CHECKPOINT_TENSORS_H

#include "../base/safetensors.h"
#include "adapter.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Place of a parameter in a tensor of a file. The tensor holds `slices` slices of equal size, and the parameter lies in
 * one of them, which is a matrix with lines of `width` elements: element (r, c) of the whole parameter is at
 * (mt_placement_row(r), c), or transposed at (c, mt_placement_row(r)). */
typedef struct mt_placement {
    bool transposed;
    int64_t row, stride, width;
    int64_t slice, slices;
    int64_t group_rows, group_pitch; // groups of rows of the parameter, and the distance of their first rows
    int64_t groups;
    int64_t first_row, first_col; // of the tensor, if that is a part of the matrix: its first element's place
    float shift;                  // stored = the parameter's value + shift
} mt_placement;

/* The row of the slice that holds row r of the whole parameter; without groups row + r stride. */
int64_t mt_placement_row(const mt_placement *place, int64_t r);

/* The tensor with the scales of a tensor in fp8. */
const mt_tensor_info *mt_scales_find(const mt_safetensors *set, const mt_tensor_info *tensor);

/* The tensor of another name, which has `to` in the place of its end `from`; NULL: none, or no such end. */
const mt_tensor_info *mt_tensor_beside(const mt_safetensors *set, const mt_tensor_info *tensor, const char *from,
                                       const char *to);

/* The first of the *count tensors of modules that the model does not have, of multi-token prediction or a vision tower;
 * NULL: none. */
const mt_tensor_info *mt_tensors_left_out(const mt_safetensors *set, const mt_run_options *options, int64_t *count);

/* Ends of names in MXFP4. */
#define MT_BLOCKS "_blocks"
#define MT_SCALES "_scales"

/* to[n] = elements 0, stride, 2 stride ... of stored values, by their bytes. */
void mt_stored_gather(char *to, const char *from, int64_t stride, int64_t size, int64_t n);

/* out[i * out_stride] = element i of stored values, i < n; `in` need not be aligned. */
void mt_stored_to_f32(float *out, int64_t out_stride, const void *in, mt_dtype dtype, int64_t n);

/* The tensor that holds one state of a parameter. */
const mt_tensor_info *mt_state_find(const mt_safetensors *set, const mt_param *param, mt_param_state state);

/* Opens a stem's files; the experts of a model are apart in the set, whatever the form of its folder. */
int mt_stem_open(mt_safetensors **set, const char *folder, const char *stem, const mt_run_options *options,
                 mt_error *error);

/* The states in a stem's files: [the result, mt_stem_end). The optimizer of an fp32 run has no master weights. */
int mt_stem_first(const mt_safetensors *set, bool weights, const mt_param *row);

/* The state after the last one that files of weights, or of the optimizer, have of a row. */
int mt_stem_end(bool weights, const mt_param *row);

/* The adapter of a row; without a file, that of the options. */
int mt_adapter_of(const mt_adapter_file *file, const mt_param *row, const mt_run_options *options,
                  mt_adapter_shape *shape, mt_error *error);

/* Checks a stem's tensors against the whole model's table, so that every rank finds the same. `adapter`: of the stem
 * adapter_model, else NULL. */
int mt_stem_check(const mt_safetensors *set, const char *stem, const mt_adapter_file *adapter,
                  const mt_run_options *options, const char *folder, mt_error *error);

/* The name of the tensor that holds a parameter's state, such as exp_avg.NAME; the optimizer has this state. */
void mt_state_tensor_name(char *name, size_t size, mt_optimizer optimizer, mt_param_state state, const char *hf_name);

/* The place of one state. The optimizer's states of experts that are stacked (hf_stack) lie in their tensor as the
 * parameters lie in memory, gate before up: parts of a shard are then long runs of the file. */
mt_placement mt_param_placement(const mt_param *param, mt_param_state state);

/* The same in a tensor of a file, which may hold stacked matrices the other way (hf_either). */
mt_placement mt_tensor_placement(const mt_param *param, mt_param_state state, const mt_tensor_info *tensor);

/* The shape of the whole tensor that holds one state of a parameter; returns the number of dimensions. */
int64_t mt_param_shape(const mt_param *param, mt_param_state state, int64_t shape[MT_PARAM_DIMS]);

/* The parameters whose tensors the files of a stem hold: "model", "adapter_model", or "optimizer". */
bool mt_stem_holds(const char *stem, const mt_param *param);

#ifdef __cplusplus
}
#endif
#endif
