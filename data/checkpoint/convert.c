/* convert.c: a model's weights from one format of folders into another, tensor by tensor. The files of the source are
 * mapped, and read in the order of their bytes; their pages are given back on the way, so that memory holds the tensor
 * that is written and MT_CONVERTED_PAGES of the source. */
#include "convert.h"

#include "../base/file.h"
#include "adapter_merge.h"
#include "checkpoint_folder.h"
#include "checkpoint_save.h"
#include "checkpoint_tensors.h"
#include "megatron_tensors.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MT_CONVERTED_PAGES = 4 << 20 };

/* The weights to convert: one of the two. */
typedef struct mt_converted {
    const mt_run_options *options;
    char *folder;
    mt_safetensors *set;
    mt_megatron *megatron;
    float *line;        // of a parameter
    int64_t unreleased; // bytes that were read since pages of the source were given back
} mt_converted;

/* Where the elements of a parameter are. */
typedef struct mt_origin {
    mt_placement place;
    const mt_tensor_info *tensor;     // of a Hugging Face folder
    const mt_megatron_matrix *matrix; // of Megatron-LM's
} mt_origin;

static int mt_origin_find(mt_origin *from, const mt_converted *c, const mt_param *param, mt_error *error) {
    *from = (mt_origin){.tensor = NULL};
    if (c->megatron) {
        from->matrix =
            mt_megatron_place(c->megatron, param, MT_STATE_WEIGHTS, &c->options->stack, c->folder, &from->place, error);
        return from->matrix ? 0 : -1;
    }
    from->tensor = mt_state_find(c->set, param, MT_STATE_WEIGHTS);
    if (!from->tensor)
        return mt_error_set(error, "%s: has no tensor \"%s\", and a conversion begins no new one; take the whole model",
                            c->folder, param->hf_name);
    from->place = mt_tensor_placement(param, MT_STATE_WEIGHTS, from->tensor);
    mt_dtype dtype = from->tensor->dtype;
    if (dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16 || dtype == MT_F64) return 0;
    return mt_error_set(error,
                        "%s: tensor \"%s\" is of type %s, whose scales a conversion does not read; convert it by "
                        "train --train-iters 0 --save",
                        from->tensor->file, from->tensor->name, mt_dtype_name(dtype));
}

/* A line of a parameter in the order of its origin's bytes: row i, or column i of a transposed one, [count]. */
typedef struct mt_line {
    bool is_column;
    int64_t i, count;
} mt_line;

/* values[count] = a line of the parameter. */
static void mt_origin_read(const mt_origin *from, mt_line line, float *values) {
    const mt_placement *place = &from->place;
    if (from->tensor) {
        mt_dtype dtype = from->tensor->dtype;
        int64_t size = mt_dtype_size(dtype), row = mt_placement_row(place, line.is_column ? 0 : line.i);
        bool is_dense = !line.is_column || (place->stride == 1 && place->groups <= 1);
        const char *slice = (const char *)from->tensor->data + place->slice * (from->tensor->bytes / place->slices);
        for (int64_t i = 0, n = is_dense ? line.count : 1; i < line.count; i += n) {
            if (line.is_column) row = mt_placement_row(place, i);
            int64_t at = line.is_column ? line.i * place->width + row : row * place->width + i;
            mt_stored_to_f32(values + i, 1, slice + at * size, dtype, n);
        }
        return;
    }
    int64_t row = mt_placement_row(place, line.i);
    for (const mt_megatron_piece *piece = from->matrix->pieces; piece < from->matrix->pieces + from->matrix->count;
         piece++) {
        mt_rectangle part = piece->part;
        if (row < part.row || row >= part.row + part.rows) continue;
        const char *at =
            (const char *)piece->tensor.data + (row - part.row) * part.cols * mt_dtype_size(piece->tensor.dtype);
        mt_stored_to_f32(values + part.col, 1, at, piece->tensor.dtype, part.cols);
        for (int64_t c = 0; place->shift != 0 && c < part.cols; c++) values[part.col + c] -= place->shift;
    }
}

/* Elements of a line into their places in the tensor. */
static void mt_line_write(const mt_saved_tensor *tensor, const mt_placement *place, mt_line line, const float *from,
                          char *values) {
    int64_t size = mt_dtype_size(tensor->dtype);
    char *slice = values + place->slice * (tensor->bytes / place->slices);
    for (int64_t i = 0; i < line.count; i++) {
        int64_t row = mt_placement_row(place, line.is_column ? i : line.i), col = line.is_column ? line.i : i;
        float value = place->shift != 0 ? from[i] + place->shift : from[i]; // 0 would change the sign of -0
        uint16_t half = mt_f32_to_half(value, tensor->dtype);
        char *at = slice + (place->transposed ? col * place->width + row : row * place->width + col) * size;
        memcpy(at, mt_dtype_is_half(tensor->dtype) ? (const void *)&half : &value, (size_t)size);
    }
}

static void mt_converted_release(const mt_converted *c) {
    int64_t count = c->set ? mt_safetensors_num_files(c->set) : 0;
    const mt_safetensors_file *files =
        c->set ? mt_safetensors_get_file(c->set, 0) : mt_megatron_files(c->megatron, &count);
    for (int64_t i = 0; i < count; i++)
        if (files[i].mapped) mt_mapping_release(files[i].base, files[i].bytes);
}

/* Gives back the pages of the source after so many bytes. */
static void mt_converted_count(mt_converted *c, int64_t bytes) {
    c->unreleased += bytes;
    if (c->unreleased < MT_CONVERTED_PAGES) return;
    mt_converted_release(c);
    c->unreleased = 0;
}

/* The values of a tensor, from its parameters'. */
static int mt_converted_fill(void *context, const mt_saved_tensor *tensor, void *values, mt_error *error) {
    mt_converted *c = context;
    MT_CHECK(tensor->params);
    for (const mt_param *param = tensor->params; param < tensor->params + tensor->num_params; param++) {
        mt_placement place = mt_saved_place(tensor, param, &c->options->stack);
        mt_origin from;
        if (mt_origin_find(&from, c, param, error) != 0) return -1;
        int64_t rows = mt_param_rows_stored(param), cols = param->whole_cols;
        bool by_column = from.tensor && from.place.transposed;
        mt_line line = {by_column, 0, by_column ? rows : cols};
        c->line = mt_realloc(c->line, line.count * (int64_t)sizeof *c->line);
        for (; line.i < (by_column ? cols : rows); line.i++) {
            mt_origin_read(&from, line, c->line);
            mt_line_write(tensor, &place, line, c->line, values);
            mt_converted_count(c, line.count * (int64_t)sizeof *c->line);
        }
    }
    mt_converted_release(c);
    return 0;
}

/* bf16 or fp16 if all trained weights are stored in it, else fp32. */
static mt_dtype mt_converted_dtype(const mt_converted *c, const mt_param *rows, int64_t count) {
    mt_error ignored;
    mt_dtype all = MT_NUM_DTYPES;
    for (int64_t i = 0; i < count; i++) {
        mt_origin from;
        if (!rows[i].trained || mt_origin_find(&from, c, &rows[i], &ignored) != 0) continue;
        mt_dtype dtype = from.tensor ? from.tensor->dtype : from.matrix->pieces[0].tensor.dtype;
        if (!mt_dtype_is_half(dtype) || (all != MT_NUM_DTYPES && dtype != all)) return MT_F32;
        all = dtype;
    }
    return all == MT_NUM_DTYPES ? MT_F32 : all;
}

/* Opens the weights; they are checked against the model, and their files against the sums: those of the archives'
 * entries for a folder of Megatron-LM, whose files have the optimizer's state too. */
static int mt_converted_open(mt_converted *c, const mt_run_options *o, mt_error *error) {
    mt_error damage;
    *c = (mt_converted){.options = o, .folder = mt_checkpoint_resolve(o->load, error)};
    if (!c->folder) return -1;
    int status = 0;
    bool compares = !mt_folder_is_megatron(c->folder);
    if (!compares) {
        status = mt_megatron_open(&c->megatron, c->folder, true, error);
        if (status == 0) status = mt_megatron_check(c->megatron, true, &o->stack, c->folder, error);
        if (status == 0) status = mt_megatron_verify(c->megatron, 0, 1, error);
    }
    if ((compares || status != 0) && mt_checkpoint_verify(c->folder, MT_VERIFY_TENSORS, &damage) != 0) {
        *error = damage;
        return mt_checkpoint_advise(c->folder, error);
    }
    if (!compares) return status;
    if (mt_stem_open(&c->set, c->folder, "model", o, error) != 0) return -1;
    return mt_stem_check(c->set, "model", NULL, o, c->folder, error);
}

static void mt_converted_close(mt_converted *c) {
    mt_safetensors_close(c->set);
    mt_megatron_close(c->megatron);
    free(c->folder), free(c->line);
}

static int mt_convert_refuse(const char *folder, const char *name, void *error) {
    return mt_error_set(error, "--convert %s: holds %s; name an empty folder, or a new one", folder, name);
}

static int mt_convert_remove(const char *folder, const char *name, void *context) {
    char *path = mt_path_join(folder, name);
    (void)context;
    unlink(path);
    free(path);
    return 0;
}

int mt_checkpoint_convert(const mt_run_options *o, const mt_tokenizer *tokenizer, mt_error *error) {
    static const char release[] = "release";
    bool dist = o->ckpt_format == MT_CHECKPOINT_TORCH_DIST;
    mt_converted c;
    mt_saved_set set = {0};
    mt_checksums sums = {0};
    mt_param *rows = NULL;
    mt_run_options written = *o; // as the weights are stored
    char *folder = dist ? mt_path_join(o->convert, release) : mt_strdup(o->convert);
    int status = mt_converted_open(&c, o, error);
    if (status == 0) status = mt_folder_create(o->convert, "--convert", error);
    if (status == 0) status = mt_folder_visit(o->convert, mt_convert_refuse, error);
    if (status == 0 && dist) status = mt_folder_create(folder, "--convert", error);
    bool begun = status == 0;
    int64_t left;
    const mt_tensor_info *other = begun && c.set ? mt_tensors_left_out(c.set, o, &left) : NULL;
    if (other)
        fprintf(stderr, "%lld tensors of modules that the model does not have, such as \"%s\", are left out\n",
                (long long)left, other->name);
    if (begun) {
        int64_t count = mt_params_build(&rows, &o->stack, NULL);
        mt_dtype dtype = mt_options_dtype(&o->stack);
        if (dtype == MT_F32) dtype = mt_converted_dtype(&c, rows, count);
        written.stack.bf16 = dtype == MT_BF16, written.stack.fp16 = dtype == MT_F16;
        mt_saved_plan_weights(&set, rows, count, o, dtype, 5000000000, "--convert");
        mt_converted_release(&c);
        status = mt_saved_write(&set, &written, dtype, folder, mt_converted_fill, &c, &sums, error);
    }
    if (status == 0) status = mt_model_files_write(&written, folder, "--convert", tokenizer, error);
    if (status == 0) status = mt_checksums_write(&sums, folder, NULL, "--convert", error);
    if (status == 0) status = mt_file_sync(folder, "--convert", error); // the tracker must not reach the disk first
    if (status == 0 && dist) {
        char *tracker = mt_path_join(o->convert, "latest_checkpointed_iteration.txt");
        status = mt_file_write(tracker, release, (int64_t)strlen(release), "--convert", error);
        free(tracker);
    }
    if (status != 0 && begun) { // for another try
        mt_folder_visit(folder, mt_convert_remove, NULL);
        if (dist) rmdir(folder);
    }
    mt_checksums_free(&sums);
    mt_saved_free(&set);
    mt_converted_close(&c);
    free(rows), free(folder);
    return status;
}
