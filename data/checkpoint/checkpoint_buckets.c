/* checkpoint_buckets.c: from tensors into a model's buckets. */
#include "checkpoint_buckets.h"

#include "../models/transfer.h"
#include "adapter.h"
#include "checkpoint_folder.h"
#include "checkpoint_reader.h"
#include "checkpoint_tensors.h"
#include "megatron_tensors.h"
#include "mxfp4.h"
#include "upcycle.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One state of a parameter, and the tensor that it is loaded from. Weights in bf16 or fp16 go into two parts: in this
 * type, and as master weights, which keep the stored precision. */
typedef struct mt_target {
    const mt_param *param;
    const mt_param *source;                // whose tensor it is: param, or of a dense model that is upcycled
    const mt_tensor_info *tensor, *scales; // of stacked experts: the expert's slice; scales: of fp8 or MXFP4, else NULL
    mt_placement place;                    // in the tensor
    int64_t first_col;                     // of the parameter in the tensor, before it is transposed
    mt_param_state state;                  // of shards[0]
    mt_shard shards[2];                    // either may have no data
    bool weights;
    float factor;       // of the values of an adapter's B
    float *transposed;  // this rank's part of a transposed tensor, until its last segment is read
    float *scaled;      // this rank's part of a state with scales, likewise
    int64_t not_finite; // values of weights
} mt_target;

/* The non-finite ones of values[n], whose bucket elements begin at `at`, that lie in a part. */
static int64_t mt_count_not_finite(const mt_shard *shard, int64_t at, const float *values, int64_t n) {
    int64_t count = 0, end = mt_min(n, shard->first + shard->count - at);
    bool is_half = mt_dtype_is_half(shard->dtype); // whose largest number may be below the value
    for (int64_t i = mt_max(shard->first - at, 0); i < end; i++)
        count += !isfinite(is_half ? mt_half_to_f32(mt_f32_to_half(values[i], shard->dtype), shard->dtype) : values[i]);
    return count;
}

/* The state with scales that a target sets, or weights in fp8, whose scale its last value may change, as the shard in
 * host memory; no data: none. */
static mt_shard mt_target_scaled(mt_target *t, int k) {
    mt_shard part = t->shards[k];
    int64_t begin, end;
    mt_param_part(t->param, &part, &begin, &end);
    if (!part.data || !mt_state_has_scale(part.dtype) || begin >= end) return (mt_shard){.data = NULL};
    if (!t->scaled) t->scaled = mt_calloc((end - begin) * (int64_t)sizeof *t->scaled);
    return (mt_shard){t->scaled, t->param->offset + begin, end - begin, MT_F32};
}

/* Writes n values to elements [at, at + n) of this rank's part of the parameter. */
static void mt_target_write(mt_reader *r, mt_target *t, int64_t at, const float *values, int64_t n) {
    mt_model *m = r->model;
    at += t->param->offset;
    for (int64_t done = 0, count; done < n; done += count) {
        count = mt_min(n - done, MT_STAGED);
        if (t->weights) t->not_finite += mt_count_not_finite(&t->shards[0], at + done, values + done, count);
        for (int k = 0; k < 2; k++) {
            const mt_shard *shard = &t->shards[k];
            if (!shard->data) continue;
            if (mt_state_has_scale(shard->dtype)) {
                mt_shard part = mt_target_scaled(t, k);
                int64_t begin = mt_max(at + done, part.first), end = mt_min(at + done + count, part.first + part.count);
                if (part.data && begin < end)
                    memcpy((float *)part.data + begin - part.first, values + begin - at,
                           (size_t)(end - begin) * sizeof *values);
                continue;
            }
            bool is_half = mt_dtype_is_half(shard->dtype);
            for (int64_t i = 0; is_half && i < count; i++)
                r->staged_half[i] = mt_f32_to_half(values[done + i], shard->dtype);
            mt_shard_write(m, shard, at + done, is_half ? (const void *)r->staged_half : values + done, count);
        }
        mt_model_ops(m)->stream_synchronize(mt_model_stream(m)); // before the buffers are filled again
    }
}

/* mt_target_write for stored elements. */
static void mt_target_write_stored(mt_reader *r, mt_target *t, int64_t at, const char *from, mt_dtype dtype,
                                   int64_t n) {
    float shift = t->place.shift;
    if (dtype == MT_F32 && (uintptr_t)from % sizeof(float) == 0 && t->factor == 1 && shift == 0) {
        mt_target_write(r, t, at, (const float *)(const void *)from, n);
        return;
    }
    for (int64_t done = 0, count; done < n; done += count) {
        count = mt_min(n - done, MT_STAGED);
        mt_stored_to_f32(r->staged, 1, from + done * mt_dtype_size(dtype), dtype, count);
        for (int64_t i = 0; t->factor != 1 && i < count; i++) r->staged[i] *= t->factor;
        for (int64_t i = 0; shift != 0 && i < count; i++) r->staged[i] -= shift;
        mt_target_write(r, t, at + done, r->staged, count);
    }
}

/* Rows [*first, *end) of this rank's part of a parameter that a part of the bucket touches: fewer than all where a data
 * group shards the state. */
static void mt_target_rows(const mt_target *t, int64_t *first, int64_t *end) {
    int64_t cols = t->param->cols, count = mt_param_rows_stored(t->param) * cols;
    *first = count, *end = 0;
    for (int k = 0; k < 2; k++) {
        const mt_shard *shard = &t->shards[k];
        int64_t begin = mt_max(shard->first - t->param->offset, 0);
        int64_t last = mt_min(shard->first + shard->count - t->param->offset, count);
        if (!shard->data || begin >= last) continue;
        *first = mt_min(*first, begin / cols), *end = mt_max(*end, mt_divide_up(last, cols));
    }
    if (*end == 0) *first = 0;
}

/* True for a tensor in MXFP4, whose elements are bytes of two values. */
static bool mt_target_is_mxfp4(const mt_target *t) {
    return t->tensor->dtype == MT_U8;
}

/* The first row of the parameter in the tensor's view. */
static int64_t mt_target_row(const mt_target *t) {
    return t->place.stride > 1 ? 0 : t->place.row;
}

/* The view of a tensor has one column for each value, and of rows that take turns (place.stride) the parameter's own
 * alone. This is the view's part of a rectangle of elements. */
static mt_rectangle mt_target_view(const mt_target *t, mt_rectangle given) {
    int64_t *first = t->place.transposed ? &given.col : &given.row;
    int64_t *count = t->place.transposed ? &given.cols : &given.rows, stride = t->place.stride;
    if (mt_target_is_mxfp4(t)) given.col *= 2, given.cols *= 2;
    if (stride == 1) return given;
    int64_t end = mt_divide_up(mt_max(*first + *count - t->place.row, 0), stride);
    *first = mt_divide_up(mt_max(*first - t->place.row, 0), stride), *count = end - *first;
    return given;
}

/* Groups of rows of this rank's part that are apart in the tensor. */
static int64_t mt_target_groups(const mt_target *t) {
    return t->place.groups > 1 ? mt_max(t->param->rows / t->place.group_rows, 1) : 1;
}

/* The rows and columns of the tensor's view that this rank loads, in its group of rows `group`. */
static mt_rectangle mt_target_rectangle(const mt_target *t, int64_t group) {
    const mt_param *param = t->param;
    mt_rectangle own = mt_param_rectangle(param);
    own.rows /= mt_target_groups(t);
    own.col += t->first_col;
    if (t->place.groups > 1)
        own.row = mt_placement_row(&t->place, own.row + group * own.rows);
    else
        own.row += mt_target_row(t);
    if (!t->place.transposed) return own;
    int64_t first, end;
    mt_target_rows(t, &first, &end);
    return (mt_rectangle){own.col, own.cols, own.row + first, end - first};
}

/* to[n, m], rows `pitch` apart = the transpose of stored from[m, n], rows `width` apart; blocks of 16 rows of `to` stay
 * in the cache. */
static void mt_stored_transpose(float *to, int64_t pitch, const char *from, int64_t width, mt_dtype dtype, int64_t m,
                                int64_t n) {
    int64_t size = mt_dtype_size(dtype);
    for (int64_t first = 0, lines; first < n; first += lines) {
        lines = mt_min(n - first, 16);
        for (int64_t row = 0; row < m; row++)
            mt_stored_to_f32(to + first * pitch + row, pitch, from + (row * width + first) * size, dtype, lines);
    }
}

/* Loads this rank's part of a rectangle of the tensor's view, whose elements are at `data`, row after row; of its group
 * of rows `group`. */
static void mt_target_load_group(mt_reader *r, mt_target *t, int64_t group, mt_rectangle given, const char *data,
                                 mt_dtype dtype) {
    const mt_param *param = t->param;
    mt_rectangle own = mt_target_rectangle(t, group), part = mt_rectangle_intersect(given, own);
    int64_t size = mt_dtype_size(dtype), cols = param->cols;
    if (part.rows == 0 || part.cols == 0) return;
    if (t->place.transposed) {
        if (!t->transposed) t->transposed = mt_reader_borrow(r, own.rows * own.cols * 4);
        mt_stored_transpose(t->transposed + (part.col - own.col) * cols + part.row - own.row, cols,
                            data + ((part.row - given.row) * given.cols + part.col - given.col) * size, given.cols,
                            dtype, part.rows, part.cols);
        return;
    }
    bool contiguous = part.cols == given.cols && part.cols == cols; // whole rows in the tensor and in the bucket
    for (int64_t row = 0, rows = contiguous ? part.rows : 1; row < part.rows; row += rows) {
        const char *from = data + ((part.row + row - given.row) * given.cols + part.col - given.col) * size;
        int64_t to_row = group * own.rows + part.row + row - own.row, to_col = part.col - own.col;
        mt_target_write_stored(r, t, to_row * cols + to_col, from, dtype, rows * part.cols);
    }
}

static void mt_target_load_rectangle(mt_reader *r, mt_target *t, mt_rectangle given, const char *data, mt_dtype dtype) {
    for (int64_t group = 0; group < mt_target_groups(t); group++) mt_target_load_group(r, t, group, given, data, dtype);
}

/* values[cols] = a row of the tensor's view from column `col` on, for a tensor in fp8; the elements are at `bits`. */
static void mt_target_decode_fp8(const mt_reader *r, const mt_target *t, int64_t row, int64_t col, int64_t cols,
                                 const unsigned char *bits, float *values) {
    const int64_t *block = r->block_size;
    const mt_tensor_info *scales = t->scales;
    const char *of_row = (const char *)scales->data + row / block[0] * scales->shape[1] * mt_dtype_size(scales->dtype);
    for (int64_t first = col, end; col < first + cols; col = end) {
        float scale;
        mt_stored_to_f32(&scale, 1, of_row + col / block[1] * mt_dtype_size(scales->dtype), scales->dtype, 1);
        end = mt_min((col / block[1] + 1) * block[1], first + cols);
        for (int64_t i = col; i < end; i++) *values++ = r->f8_values[bits[i - first]] * scale;
    }
}

/* values = a part of the tensor's view. The rectangle `given` of the tensor is at `data`, row after row. */
static void mt_target_decode(const mt_reader *r, const mt_target *t, mt_rectangle part, mt_rectangle given,
                             const char *data, float *values) {
    enum { GATHERED = 512 };
    const mt_placement *place = &t->place;
    int64_t size = mt_dtype_size(t->tensor->dtype), stride = place->stride;
    bool mxfp4 = mt_target_is_mxfp4(t);
    for (int64_t i = 0; i < part.rows; i++, values += part.cols) {
        int64_t row = part.row + i, col = part.col;
        if (stride > 1 && !place->transposed) row = place->row + row * stride;
        if (stride > 1 && place->transposed) col = place->row + col * stride;
        if (mxfp4) col /= 2;
        const char *from = data + ((row - given.row) * given.cols + col - given.col) * size;
        if (mxfp4) {
            const unsigned char *scales = t->scales->data;
            mt_mxfp4_row_to_f32(values, (const unsigned char *)from,
                                scales + row * t->param->whole_cols / MT_MXFP4_BLOCK, part.col, part.cols);
        } else if (t->scales) {
            mt_target_decode_fp8(r, t, row, col, part.cols, (const unsigned char *)from, values);
        } else {
            double gathered[GATHERED]; // of any type
            for (int64_t k = 0, n; k < part.cols; k += n) {
                n = mt_min(part.cols - k, GATHERED);
                mt_stored_gather((char *)gathered, from + k * stride * size, stride, size, n);
                mt_stored_to_f32(values + k, 1, gathered, t->tensor->dtype, n);
            }
        }
    }
}

/* mt_target_load_rectangle for a rectangle of a tensor whose view is not the tensor itself: decodes this rank's part,
 * then loads it as fp32. */
static void mt_target_load_view(mt_reader *r, mt_target *t, mt_rectangle given, const char *data) {
    mt_rectangle part = mt_target_view(t, given);
    if (mt_target_groups(t) == 1) part = mt_rectangle_intersect(part, mt_target_rectangle(t, 0));
    int64_t cols = mt_min(part.cols, MT_STAGED), rows = mt_max(MT_STAGED / mt_max(cols, 1), 1);
    for (int64_t row = 0; row < part.rows; row += rows)
        for (int64_t col = 0; col < part.cols; col += cols) {
            mt_rectangle piece = {part.row + row, mt_min(rows, part.rows - row), part.col + col,
                                  mt_min(cols, part.cols - col)};
            mt_target_decode(r, t, piece, given, data, r->decoded);
            mt_target_load_rectangle(r, t, piece, (const char *)r->decoded, MT_F32);
        }
}

/* Loads this rank's part of elements [begin, end) of the tensor. */
static void mt_target_load_elements(mt_reader *r, mt_target *t, int64_t begin, int64_t end, const char *data) {
    int64_t width = mt_target_is_mxfp4(t) ? t->place.width / 2 : t->place.width;
    if (mt_param_is_adapter(t->param)) width = t->tensor->shape[1]; // perhaps of a smaller rank
    int64_t size = mt_dtype_size(t->tensor->dtype);
    mt_rectangle given[3];
    int count = mt_rectangles_of_run(given, begin, end, width);
    for (int i = 0; i < count; data += given[i].rows * given[i].cols * size, i++) {
        given[i].row += t->place.first_row, given[i].col += t->place.first_col;
        if (t->scales || t->place.stride > 1)
            mt_target_load_view(r, t, given[i], data);
        else
            mt_target_load_rectangle(r, t, given[i], data, t->tensor->dtype);
    }
}

/* After the tensor's last segment: writes a transposed tensor, and sets padding rows to 0. */
static void mt_target_finish(mt_reader *r, mt_target *t) {
    const mt_param *param = t->param;
    int64_t stored = mt_param_rows_stored(param) * param->cols, padding = param->rows * param->cols - stored;
    if (t->transposed) {
        mt_rectangle own = mt_target_rectangle(t, 0);
        int64_t first_row = own.col - mt_target_row(t) - param->first_row;
        mt_target_write(r, t, first_row * param->cols, t->transposed, own.rows * own.cols);
        mt_reader_return(r, t->transposed, own.rows * own.cols * 4);
        t->transposed = NULL;
    }
    mt_param_state state = t->weights && !param->in_fp8 ? MT_STATE_MASTER : t->state;
    if (t->scaled) mt_state_write(r->model, param, state, t->scaled);
    free(t->scaled);
    t->scaled = NULL;
    for (int k = 0; k < 2; k++)
        if (t->shards[k].data) mt_shard_write(r->model, &t->shards[k], param->offset + stored, NULL, padding);
}

/* Offset of the target's tensor in its file. */
static int64_t mt_target_start(const mt_target *t, const mt_safetensors_file *file) {
    return (const unsigned char *)t->tensor->data - file->base;
}

/* Loads this rank's part of bytes [begin, end) of the file, which are at `data`. An element that `begin` cuts is read
 * from the mapped file, together with its second half. */
static void mt_target_load_segment(mt_reader *r, mt_target *t, int64_t begin, int64_t end, const char *data) {
    const mt_tensor_info *tensor = t->tensor;
    int64_t start = mt_target_start(t, r->file), size = mt_dtype_size(tensor->dtype), count = tensor->bytes / size;
    if (start >= end || start + tensor->bytes <= begin) return;
    int64_t first = begin <= start ? 0 : mt_divide_up(begin - start, size), last = mt_min((end - start) / size, count);
    if (begin > start && (begin - start) % size != 0)
        mt_target_load_elements(r, t, first - 1, first, (const char *)tensor->data + (first - 1) * size);
    if (first < last) mt_target_load_elements(r, t, first, last, data + start + first * size - begin);
    if (start + tensor->bytes <= end) mt_target_finish(r, t);
}

/* Reads one file and loads targets[count], whose tensors are in it, in their order. Every rank of the host calls it. */
static void mt_reader_load_file(mt_reader *r, const mt_safetensors_file *file, mt_target *targets, int64_t count) {
    pthread_t threads[MT_READERS];
    int num_threads = mt_reader_begin(r, file, threads);
    int64_t first = 0;
    for (int64_t begin = 0; begin < file->bytes; begin += MT_SEGMENT) {
        int64_t end = mt_min(begin + MT_SEGMENT, file->bytes);
        const char *data = mt_reader_get(r, begin / MT_SEGMENT);
        for (int64_t i = first; i < count && mt_target_start(&targets[i], file) < end; i++) {
            mt_target_load_segment(r, &targets[i], begin, end, data);
            if (i == first && mt_target_start(&targets[i], file) + targets[i].tensor->bytes <= end) first++;
        }
        mt_reader_give_back(r, begin / MT_SEGMENT);
    }
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    if (r->descriptor >= 0) close(r->descriptor);
    if (r->direct >= 0) close(r->direct);
}

static int mt_target_compare(const void *a, const void *b) {
    const mt_target *x = a, *y = b;
    int order = strcmp(x->tensor->file, y->tensor->file);
    if (order != 0) return order;
    return (x->tensor->data > y->tensor->data) - (x->tensor->data < y->tensor->data);
}

typedef struct mt_file_list {
    const mt_safetensors_file *items;
    int64_t count;
} mt_file_list;

/* Reads all files and loads targets[count]. Every rank calls it and returns the same. Sets *damaged if a sum differs.
 */
static int mt_targets_load(mt_target *targets, int64_t count, mt_file_list files, mt_model *m, const mt_run_options *o,
                           const mt_checksums *sums, bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_reader r;
    mt_reader_open(&r, m, sums);
    r.block_size = o->weight_block_size;
    if (count > 0) qsort(targets, (size_t)count, sizeof *targets, mt_target_compare);
    for (int64_t i = 0; i < files.count; i++) {
        const mt_safetensors_file *file = &files.items[i];
        int64_t first = 0, end;
        while (first < count && targets[first].tensor->file != file->path) first++;
        for (end = first; end < count && targets[end].tensor->file == file->path;) end++;
        mt_reader_load_file(&r, file, targets + first, end - first);
    }
    double bad = r.damaged;
    mt_all_reduce_max(world, &bad, 1, MT_F64);
    if (bad > 0) *damaged = true;
    if (r.status != 0) *error = r.error;
    int status = mt_agree(world, r.status != 0, error);
    mt_reader_close(&r);
    return status;
}

/* Weights that are not finite: an error if they are an adapter's, else a warning on one of the ranks that hold them. */
static int mt_target_check_finite(const mt_model *m, const mt_target *t, mt_error *error) {
    const mt_bucket *b = mt_bucket_get(m, t->param->bucket);
    bool reports = t->param->counted && (b->group->rank == 0 || b->strategy == MT_SHARD_PARAMS);
    if (t->not_finite > 0 && mt_param_is_adapter(t->param) && t->weights)
        return mt_error_set(error, "%s: %lld values of tensor \"%s\" are not finite; take another adapter",
                            t->tensor->file, (long long)t->not_finite, t->tensor->name);
    if (t->not_finite > 0 && reports)
        fprintf(stderr, "warning: %s: %lld values of tensor \"%s\" are not finite%s\n", t->tensor->file,
                (long long)t->not_finite, t->tensor->name, mt_model_dtype(m) == MT_F16 ? " in fp16; take --bf16" : "");
    return 0;
}

int mt_checkpoint_check(const mt_run_options *options, const char *folder, mt_error *error) {
    mt_safetensors *set = NULL;
    mt_error damage;
    char *path = mt_checkpoint_resolve(folder, error);
    mt_run_options stored = *options; // with the model of the folder
    if (options->stack.moe_use_upcycling) stored.stack = mt_upcycle_dense(options);
    int status = path ? 0 : -1;
    if (status == 0 && mt_folder_is_megatron(path)) {
        mt_megatron *checkpoint;
        status = mt_megatron_open(&checkpoint, path, true, error);
        if (status == 0) status = mt_megatron_check(checkpoint, true, &options->stack, path, error);
        mt_megatron_close(checkpoint);
    } else if (status == 0) {
        status = mt_stem_open(&set, path, "model", &stored, error);
        if (status == 0) status = mt_stem_check(set, "model", NULL, &stored, path, error);
        mt_safetensors_close(set);
        if (status != 0 && mt_checkpoint_verify(path, MT_VERIFY_TENSORS, &damage) != 0) {
            *error = damage;
            mt_checkpoint_advise(path, error);
        }
    }
    free(path);
    return status;
}

/* Sets a half of an adapter to 0, which its file may fill in part or not at all, and finds the factor of its values:
 * the model has one scale for all adapters. Training would differ from peft's then. */
static int mt_target_begin_adapter(mt_model *m, const mt_run_options *o, mt_target *t, const mt_adapter_file *file,
                                   mt_error *error) {
    const mt_param *param = t->param;
    mt_adapter_shape shape;
    if (mt_adapter_of(file, param, o, &shape, error) != 0) return -1;
    for (int k = 0; k < 2; k++)
        if (t->shards[k].data)
            mt_shard_write(m, &t->shards[k], param->offset, NULL, mt_param_rows_stored(param) * param->cols);
    double scale = o->stack.lora_alpha / (double)o->stack.lora_rank, factor = shape.scale / scale;
    if (param->role != MT_LORA_B || !shape.exists || fabs(factor - 1) < 1e-12) return 0;
    if (mt_model_get_plan(m)->train)
        return mt_error_set(
            error,
            "%s: the scale of this adapter, alpha / rank, is %g and that of others %g, by \"rank_pattern\" "
            "or \"alpha_pattern\" of adapter_config.json; a run trains adapters of one scale: merge "
            "these by infer --merge-adapter and train new ones",
            param->hf_name, shape.scale, scale);
    t->factor = (float)factor;
    return 0;
}

/* Slices of tensors that hold all experts of a layer. */
typedef struct mt_slices {
    mt_tensor_info *items;
    int64_t count;
} mt_slices;

/* Room for every state of some parameters, and their scales. */
static mt_slices mt_slices_new(int64_t num_params) {
    mt_tensor_info *items = mt_calloc(mt_max(2 * num_params * MT_NUM_STATES, 1) * (int64_t)sizeof *items);
    return (mt_slices){items, 0};
}

/* Appends one of the equal slices of a tensor. */
static const mt_tensor_info *mt_slices_add(mt_slices *slices, const mt_tensor_info *tensor, int64_t number) {
    mt_tensor_info *slice = &slices->items[slices->count++];
    *slice = *tensor;
    slice->bytes /= tensor->shape[0], slice->num_dims--;
    memmove(slice->shape, slice->shape + 1, (size_t)slice->num_dims * sizeof *slice->shape);
    slice->data = (const char *)tensor->data + number * slice->bytes;
    return slice;
}

/* Finds the scales of the target's tensor, and the parameter's place. */
static void mt_target_place(mt_target *t, const mt_safetensors *set, mt_slices *slices) {
    const mt_param *param = t->source;
    t->place = mt_tensor_placement(param, t->weights ? MT_STATE_WEIGHTS : t->state, t->tensor);
    if (t->tensor->dtype == MT_F8_E4M3) t->scales = mt_scales_find(set, t->tensor);
    if (mt_target_is_mxfp4(t)) { // rows of the matrix, not transposed
        t->scales = mt_tensor_beside(set, t->tensor, MT_BLOCKS, MT_SCALES);
        t->place.transposed = false, t->place.width = param->whole_cols;
    }
    if (param->hf_stack == 0) return;
    t->tensor = mt_slices_add(slices, t->tensor, t->place.slice);
    if (t->scales) t->scales = mt_slices_add(slices, t->scales, t->place.slice);
}

/* The part of a dense MLP that an expert's matrix is: rows, or columns of the second linear's. */
static void mt_target_upcycle(mt_target *t, const mt_options *o) {
    int64_t first = mt_upcycle_part(o, t->param) * o->moe_ffn_hidden_size;
    MT_CHECK(!t->place.transposed || t->param->expert < 0); // the families that store transposed matrices have biases
    if (t->param->role == MT_EXPERT_DOWN)
        t->first_col = first;
    else
        t->place.row += first;
    t->factor = mt_upcycle_factor(o, t->param);
}

int mt_stem_load(mt_model *m, const mt_run_options *o, const char *folder, const char *stem, const mt_checksums *sums,
                 bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    bool weights = strcmp(stem, "optimizer") != 0;
    mt_safetensors *set = NULL;
    mt_adapter_file *adapter = NULL;
    mt_param *dense_rows = NULL;
    mt_run_options stored = *o; // with the model of the folder
    int64_t num_dense = 0;
    bool upcycles = o->stack.moe_use_upcycling && strcmp(stem, "model") == 0;
    if (upcycles) {
        stored.stack = mt_upcycle_dense(o);
        num_dense = mt_params_build(&dense_rows, &stored.stack, NULL);
    }
    int status = mt_stem_open(&set, folder, stem, &stored, error);
    if (status == 0 && strcmp(stem, "adapter_model") == 0) {
        adapter = mt_adapter_file_open(folder, error);
        status = adapter ? 0 : -1;
    }
    if (status == 0) status = mt_stem_check(set, stem, adapter, &stored, folder, error);
    status = mt_agree(world, status != 0, error);
    if (status != 0) {
        mt_safetensors_close(set);
        mt_adapter_file_close(adapter);
        free(dense_rows);
        return status;
    }
    int64_t num_params, count = 0;
    const mt_param *params = mt_model_params(m, &num_params);
    mt_target *targets = mt_calloc(mt_max(num_params * MT_NUM_STATES, 1) * (int64_t)sizeof *targets);
    mt_slices slices = mt_slices_new(num_params);
    int first = num_params > 0 ? mt_stem_first(set, weights, &params[0]) : 0;
    for (int64_t i = 0; i < num_params; i++)
        for (int state = first; state < mt_stem_end(weights, &params[i]) && mt_stem_holds(stem, &params[i]); state++) {
            mt_target *t = &targets[count];
            *t = (mt_target){.param = &params[i], .state = (mt_param_state)state, .weights = weights, .factor = 1};
            t->source = upcycles ? mt_upcycle_source(dense_rows, num_dense, &params[i]) : &params[i];
            t->tensor = t->source ? mt_state_find(set, t->source, (mt_param_state)state) : NULL;
            t->shards[0] = mt_state_shard(m, &params[i], (mt_param_state)state);
            if (weights && mt_model_dtype(m) != MT_F32 && params[i].trained)
                t->shards[1] = mt_state_shard(m, &params[i], MT_STATE_MASTER);
            if (adapter && status == 0) status = mt_target_begin_adapter(m, o, t, adapter, error);
            if (!t->tensor && !adapter) mt_param_init(m, &params[i]); // mt_param_grows, or a new router
            if (!t->tensor) continue;
            count++;
            mt_target_place(t, set, &slices);
            if (upcycles) mt_target_upcycle(t, &o->stack);
        }
    mt_adapter_file_close(adapter);
    status = mt_agree(world, status != 0, error);
    mt_file_list files = {mt_safetensors_get_file(set, 0), mt_safetensors_num_files(set)};
    if (status == 0) status = mt_targets_load(targets, count, files, m, o, sums, damaged, error);
    if (status == 0) {
        for (int64_t i = 0; i < count && status == 0; i++) status = mt_target_check_finite(m, &targets[i], error);
        status = mt_agree(world, status != 0, error);
    }
    free(targets), free(slices.items), free(dense_rows);
    mt_safetensors_close(set);
    return status;
}

/* Adds a target for each piece of the matrix that holds one state of a parameter and reaches this rank. */
static int mt_megatron_add_targets(mt_target **targets, int64_t *count, int64_t *room, mt_target target,
                                   const mt_megatron_matrix *matrix, mt_error *error) {
    for (int k = 0; k < 2; k++)
        if (target.shards[k].data && mt_state_has_scale(target.shards[k].dtype))
            return mt_error_set(
                error,
                target.param->in_fp8
                    ? "%s: --lora-base-dtype fp8 does not read a checkpoint of Megatron-LM; convert it "
                      "to a Hugging Face folder first, by infer --convert"
                    : "%s: the optimizer's state has scales by --exp-avg-dtype, --exp-avg-sq-dtype or "
                      "--main-params-dtype, which a checkpoint of Megatron-LM cannot fill; convert it to a "
                      "Hugging Face folder first, by --train-iters 0 without these options",
                matrix->pieces[0].tensor.file);
    for (int64_t i = 0; i < matrix->count; i++) {
        const mt_megatron_piece *piece = &matrix->pieces[i];
        target.tensor = &piece->tensor;
        target.place.width = piece->part.cols;
        target.place.first_row = piece->part.row, target.place.first_col = piece->part.col;
        if (*count == *room) {
            *room = mt_max(2 * *room, 64);
            *targets = mt_realloc(*targets, *room * (int64_t)sizeof **targets);
        }
        (*targets)[(*count)++] = target;
    }
    return 0;
}

int mt_megatron_load(mt_model *m, const mt_run_options *o, const char *folder, bool weights, const mt_checksums *sums,
                     bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_megatron *checkpoint = NULL;
    int status = mt_megatron_open(&checkpoint, folder, weights, error);
    if (status == 0) status = mt_megatron_check(checkpoint, weights, &o->stack, folder, error);
    if (status == 0 && !sums) status = mt_megatron_verify(checkpoint, world->rank, world->size, error);
    int64_t num_params, count = 0, room = 0;
    const mt_param *params = mt_model_params(m, &num_params);
    mt_target *targets = NULL;
    int first = status == 0 ? mt_megatron_first_state(checkpoint, weights) : 0;
    for (int64_t i = 0; i < num_params; i++) {
        if (mt_param_is_adapter(&params[i]) || (!weights && !params[i].trained)) continue;
        for (int state = first; state < mt_stem_end(weights, &params[i]) && status == 0; state++) {
            mt_target t = {.param = &params[i],
                           .source = &params[i],
                           .state = (mt_param_state)state,
                           .weights = weights,
                           .factor = 1};
            const mt_megatron_matrix *matrix =
                mt_megatron_place(checkpoint, &params[i], (mt_param_state)state, &o->stack, folder, &t.place, error);
            t.shards[0] = mt_state_shard(m, &params[i], (mt_param_state)state);
            if (weights && mt_model_dtype(m) != MT_F32 && params[i].trained)
                t.shards[1] = mt_state_shard(m, &params[i], MT_STATE_MASTER);
            status = matrix ? mt_megatron_add_targets(&targets, &count, &room, t, matrix, error) : -1;
        }
    }
    status = mt_agree(world, status != 0, error);
    if (status == 0) {
        mt_file_list files;
        files.items = mt_megatron_files(checkpoint, &files.count);
        status = mt_targets_load(targets, count, files, m, o, sums, damaged, error);
    }
    if (status == 0) {
        for (int64_t i = 0; i < count && status == 0; i++) status = mt_target_check_finite(m, &targets[i], error);
        status = mt_agree(world, status != 0, error);
    }
    free(targets);
    mt_megatron_close(checkpoint);
    return status;
}
