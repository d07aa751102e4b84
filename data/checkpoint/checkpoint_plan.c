/* checkpoint_plan.c: the tensors of a checkpoint, and where each of their bytes stands in its files. */
#include "checkpoint_plan.h"

#include "checkpoint_tensors.h"

#include <stdlib.h>
#include <string.h>

static int mt_saved_compare(const void *a, const void *b) {
    return strcmp(((const mt_saved_tensor *)a)->name, ((const mt_saved_tensor *)b)->name);
}

/* Rows [i, the result) of a table belong to one tensor. */
static int64_t mt_params_of_tensor(const mt_param *rows, int64_t count, int64_t i) {
    int64_t next = i + 1;
    while (next < count && strcmp(rows[next].hf_name, rows[i].hf_name) == 0) next++;
    return next;
}

/* Appends one state of every parameter of the whole model that the set's stem holds. */
static void mt_saved_add(mt_saved_set *set, const mt_param *rows, int64_t count, mt_param_state state, mt_dtype dtype) {
    for (int64_t i = 0; i < count; i = mt_params_of_tensor(rows, count, i)) {
        const mt_param *param = &rows[i];
        if (!mt_stem_holds(set->stem, param) || (int)state >= mt_num_states(param->optimizer)) continue;
        mt_saved_tensor *tensor = &set->tensors[set->count++];
        *tensor = (mt_saved_tensor){.state = state};
        tensor->dtype = param->unit == MT_UNIT_UNTRAINED ? MT_F32 : dtype;
        tensor->num_dims = mt_param_shape(param, state, tensor->shape);
        tensor->bytes = param->hf_rows_total * param->whole_cols * mt_dtype_size(tensor->dtype);
        mt_state_tensor_name(tensor->name, sizeof tensor->name, param->optimizer, state, param->hf_name);
    }
}

mt_dtype mt_saved_dtype(const mt_model *m, mt_param_state state) {
    mt_dtype dtype = mt_state_dtype(m, state);
    return mt_state_has_scale(dtype) ? MT_F32 : dtype;
}

/* Finds the rows of every tensor: this rank's, or the whole model's. */
static void mt_saved_find_params(mt_saved_set *set, const mt_param *params, int64_t num_params) {
    for (int64_t i = 0, next; i < num_params; i = next) {
        next = mt_params_of_tensor(params, num_params, i);
        for (int state = 0; state < mt_num_states(params[i].optimizer); state++) {
            mt_saved_tensor key;
            mt_state_tensor_name(key.name, sizeof key.name, params[i].optimizer, (mt_param_state)state,
                                 params[i].hf_name);
            mt_saved_tensor *tensor = bsearch(&key, set->tensors, (size_t)set->count, sizeof key, mt_saved_compare);
            if (tensor) tensor->params = &params[i], tensor->num_params = next - i;
        }
    }
}

/* Names a file ("model.safetensors", or "model-00001-of-00002.safetensors"), writes its header, and makes the offsets
 * of its tensors [first, end) those in the file. */
static void mt_saved_finish_file(mt_saved_set *set, int64_t number, int64_t first, int64_t end) {
    mt_saved_file *file = &set->files[number];
    if (set->num_files == 1)
        snprintf(file->name, sizeof file->name, "%s.safetensors", set->stem);
    else
        snprintf(file->name, sizeof file->name, "%s-%05lld-of-%05lld.safetensors", set->stem, (long long)number + 1,
                 (long long)set->num_files);
    char *text = mt_malloc(128 + (end - first) * 384);
    int64_t used = 8 + sprintf(text + 8, "{\"__metadata__\":{\"format\":\"pt\"}"), length;
    for (int64_t i = first; i < end; i++) {
        const mt_saved_tensor *tensor = &set->tensors[i];
        used += sprintf(text + used, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", tensor->name,
                        mt_dtype_name(tensor->dtype), (long long)tensor->shape[0]);
        for (int64_t k = 1; k < tensor->num_dims; k++)
            used += sprintf(text + used, ",%lld", (long long)tensor->shape[k]);
        used += sprintf(text + used, "],\"data_offsets\":[%lld,%lld]}", (long long)tensor->offset,
                        (long long)(tensor->offset + tensor->bytes));
    }
    text[used++] = '}';
    while (used % 8) text[used++] = ' '; // so that the data begins aligned
    length = used - 8;
    memcpy(text, &length, 8);
    file->header = text, file->header_bytes = used;
    for (int64_t i = first; i < end; i++) set->tensors[i].offset += used;
    file->bytes = set->tensors[end - 1].offset + set->tensors[end - 1].bytes;
}

/* Distributes the tensors over files of at most max_shard_bytes. */
static void mt_saved_plan_files(mt_saved_set *set, int64_t max_shard_bytes) {
    int64_t filled = 0;
    set->num_files = 1;
    qsort(set->tensors, (size_t)set->count, sizeof *set->tensors, mt_saved_compare);
    for (int64_t i = 0; i < set->count; i++) {
        mt_saved_tensor *tensor = &set->tensors[i];
        if (filled > 0 && tensor->bytes > max_shard_bytes - filled) set->num_files++, filled = 0;
        tensor->file = set->num_files - 1, tensor->offset = filled;
        filled += tensor->bytes, set->bytes += tensor->bytes;
    }
    set->files = mt_calloc(set->num_files * (int64_t)sizeof *set->files);
    for (int64_t i = 0, end; i < set->count; i = end) {
        for (end = i; end < set->count && set->tensors[end].file == set->tensors[i].file;) end++;
        mt_saved_finish_file(set, set->tensors[i].file, i, end);
    }
}

void mt_saved_plan(mt_saved_set *set, const mt_model *m, const char *stem, int64_t first_file, int64_t max_shard_bytes,
                   const char *option) {
    mt_param *rows;
    int64_t num_params, count = mt_params_build(&rows, mt_model_options(m), NULL);
    bool weights = strcmp(stem, "optimizer") != 0;
    *set = (mt_saved_set){.stem = stem, .option = option, .first_file = first_file};
    set->tensors = mt_malloc(MT_NUM_STATES * count * (int64_t)sizeof *set->tensors);
    for (int state = 0; state < MT_NUM_STATES; state++)
        if (weights == (state == MT_STATE_WEIGHTS) && (state != MT_STATE_MASTER || mt_model_dtype(m) != MT_F32))
            mt_saved_add(set, rows, count, (mt_param_state)state, mt_saved_dtype(m, (mt_param_state)state));
    free(rows);
    mt_saved_plan_files(set, max_shard_bytes);
    const mt_param *params = mt_model_params(m, &num_params);
    mt_saved_find_params(set, params, num_params);
}

void mt_saved_free(mt_saved_set *set) {
    for (int64_t i = 0; i < set->num_files; i++) free(set->files[i].header);
    free(set->files);
    free(set->tensors);
}

/* ---- torch_dist */

mt_placement mt_saved_place(const mt_saved_tensor *tensor, const mt_param *param, const mt_options *o) {
    return tensor->chunk.num_dims > 0 ? mt_core_placement(param, tensor->state, o)
                                      : mt_param_placement(param, tensor->state);
}

void mt_saved_archive(const mt_saved_tensor *tensor, mt_archive *archive) {
    mt_pickler pickle;
    mt_pickler_begin(&pickle);
    mt_pickle_tensor(&pickle, tensor->dtype, tensor->shape, tensor->num_dims);
    mt_pickler_end(&pickle);
    mt_archive_make(archive, &pickle.out, tensor->bytes, mt_zip_sum_finish(tensor->sum, tensor->bytes));
    free(pickle.out.data);
}

/* Name of the tensor's part, by which every rank finds it. */
static void mt_dist_part_name(const mt_core_chunk *chunk, char name[192]) {
    int used = snprintf(name, 192, "%s", chunk->name);
    for (int64_t i = 0; i < chunk->num_dims; i++)
        used += snprintf(name + used, 192 - (size_t)used, "/%lld", (long long)chunk->first[i]);
    MT_CHECK(used < 192);
}

/* Appends one state of every parameter of the whole model: a part for all parameters that it holds. */
static void mt_dist_add(mt_saved_set *set, const mt_param *rows, int64_t count, mt_param_state state, mt_dtype dtype,
                        const mt_run_options *o) {
    for (int64_t i = 0; i < count; i++) {
        const mt_param *param = &rows[i];
        mt_saved_tensor tensor = {.state = state, .trained = param->trained};
        if (state != MT_STATE_WEIGHTS && !param->trained) continue;
        MT_CHECK(mt_core_chunk_of(param, state, o, &tensor.chunk));
        mt_dist_part_name(&tensor.chunk, tensor.name);
        if (set->count > 0 && strcmp(set->tensors[set->count - 1].name, tensor.name) == 0) continue; // q, k, v
        tensor.dtype = param->unit == MT_UNIT_UNTRAINED ? MT_F32 : dtype;
        tensor.num_dims = tensor.chunk.num_dims, tensor.bytes = mt_dtype_size(tensor.dtype);
        for (int64_t k = 0; k < tensor.num_dims; k++)
            tensor.shape[k] = tensor.chunk.sizes[k], tensor.bytes *= tensor.shape[k];
        set->tensors[set->count++] = tensor;
    }
}

/* Finds the rows of every part, this rank's or the whole model's: they follow one another in the table. */
static void mt_dist_find_params(mt_saved_set *set, const mt_param *params, int64_t num_params,
                                const mt_run_options *o) {
    for (int64_t i = 0; i < num_params; i++)
        for (int state = 0; state < mt_num_states(params[i].optimizer); state++) {
            mt_core_chunk chunk;
            mt_saved_tensor key;
            MT_CHECK(mt_core_chunk_of(&params[i], (mt_param_state)state, o, &chunk));
            mt_dist_part_name(&chunk, key.name);
            mt_saved_tensor *tensor = bsearch(&key, set->tensors, (size_t)set->count, sizeof key, mt_saved_compare);
            if (!tensor) continue;
            if (!tensor->params) tensor->params = &params[i];
            MT_CHECK(&params[i] == tensor->params + tensor->num_params);
            tensor->num_params++;
        }
}

/* Distributes the archives over files of at most max_shard_bytes. */
static void mt_dist_plan_files(mt_saved_set *set, int64_t max_shard_bytes) {
    int64_t filled = 0;
    set->num_files = 1;
    qsort(set->tensors, (size_t)set->count, sizeof *set->tensors, mt_saved_compare);
    for (int64_t i = 0; i < set->count; i++) {
        mt_saved_tensor *tensor = &set->tensors[i];
        mt_archive archive;
        MT_CHECK(i == 0 || strcmp(set->tensors[i - 1].name, tensor->name) != 0);
        mt_saved_archive(tensor, &archive);
        int64_t bytes = archive.head.count + tensor->bytes + archive.tail.count;
        if (filled > 0 && bytes > max_shard_bytes - filled) set->num_files++, filled = 0;
        tensor->file = set->num_files - 1, tensor->offset = filled + archive.head.count;
        filled = mt_divide_up(filled + bytes, 64) * 64; // so that values are aligned in the file too
        set->bytes += tensor->bytes;
        mt_archive_free(&archive);
    }
    set->files = mt_calloc(set->num_files * (int64_t)sizeof *set->files);
    for (int64_t i = 0; i < set->count; i++) {
        const mt_saved_tensor *tensor = &set->tensors[i];
        mt_archive archive;
        mt_saved_archive(tensor, &archive);
        mt_saved_file *file = &set->files[tensor->file];
        snprintf(file->name, sizeof file->name, "__%lld_0.distcp", (long long)tensor->file);
        file->bytes = tensor->offset + tensor->bytes + archive.tail.count;
        mt_archive_free(&archive);
    }
}

void mt_saved_plan_dist(mt_saved_set *set, const mt_model *m, const mt_run_options *o, bool states,
                        int64_t max_shard_bytes, const char *option) {
    mt_param *rows;
    int64_t num_params, count = mt_params_build(&rows, mt_model_options(m), NULL);
    *set = (mt_saved_set){.stem = "torch_dist", .option = option, .dist = true};
    set->has_masters = states && mt_model_dtype(m) != MT_F32;
    set->tensors = mt_malloc(MT_NUM_STATES * count * (int64_t)sizeof *set->tensors);
    for (int state = 0; state < (states ? MT_NUM_STATES : MT_STATE_MASTER); state++)
        if (state != MT_STATE_MASTER || mt_model_dtype(m) != MT_F32)
            mt_dist_add(set, rows, count, (mt_param_state)state, mt_saved_dtype(m, (mt_param_state)state), o);
    free(rows);
    mt_dist_plan_files(set, max_shard_bytes);
    const mt_param *params = mt_model_params(m, &num_params);
    mt_dist_find_params(set, params, num_params, o);
}

void mt_saved_plan_weights(mt_saved_set *set, const mt_param *rows, int64_t count, const mt_run_options *o,
                           mt_dtype dtype, int64_t max_shard_bytes, const char *option) {
    bool dist = o->ckpt_format == MT_CHECKPOINT_TORCH_DIST;
    *set = (mt_saved_set){.stem = dist ? "torch_dist" : "model", .option = option, .dist = dist};
    set->tensors = mt_malloc(count * (int64_t)sizeof *set->tensors);
    if (dist) {
        mt_dist_add(set, rows, count, MT_STATE_WEIGHTS, dtype, o);
        mt_dist_plan_files(set, max_shard_bytes);
        mt_dist_find_params(set, rows, count, o);
    } else {
        mt_saved_add(set, rows, count, MT_STATE_WEIGHTS, dtype);
        mt_saved_plan_files(set, max_shard_bytes);
        mt_saved_find_params(set, rows, count);
    }
}
