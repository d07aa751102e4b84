/* checkpoint_fp8.c: the state of delayed scaling in a checkpoint: fp8.safetensors, with the scales and histories of all
 * linears by layer number and name, so that any layout loads them. The ranks of a pipeline stage hold the same values,
 * which one of them sends to rank 0; with --tp-only-amax-red each data-parallel rank has its own.
 *
 *   largest                       [3]        largest number of the formats of x, w, dy
 *   layers.N.LINEAR.scale         [D, 3]     D: data-parallel ranks, 1 without --tp-only-amax-red
 *   layers.N.LINEAR.amax_history  [D, H, 3]  entry 0 is that of the next step, 0; then the oldest first */
#include "checkpoint_fp8.h"

#include "../base/file.h"
#include "../base/safetensors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { OPERANDS = MT_NUM_FP8_OPERANDS };

/* ---- saving */

/* One linear of one data-parallel rank; its scales, then its history, follow. */
typedef struct mt_fp8_record {
    int64_t layer, data_rank;
    char linear[16];
} mt_fp8_record;

static int mt_fp8_record_compare(const void *a, const void *b) {
    const mt_fp8_record *x = a, *y = b;
    int order = (x->layer > y->layer) - (x->layer < y->layer);
    if (order == 0) order = strcmp(x->linear, y->linear);
    return order != 0 ? order : (x->data_rank > y->data_rank) - (x->data_rank < y->data_rank);
}

static float *mt_fp8_record_values(const mt_fp8_record *record) {
    return (float *)(void *)(record + 1);
}

/* This rank's records. */
static char *mt_fp8_records_make(const mt_fp8_state *state, int64_t data_rank, int64_t size) {
    char *records = mt_calloc(mt_max(state->num_linears * size, 1));
    for (int64_t i = 0; i < state->num_linears; i++) {
        mt_fp8_record *record = (mt_fp8_record *)(void *)(records + i * size);
        float *values = mt_fp8_record_values(record);
        *record = (mt_fp8_record){.layer = state->keys[i].layer, .data_rank = data_rank};
        snprintf(record->linear, sizeof record->linear, "%s", state->keys[i].linear);
        memcpy(values, state->scale + i * OPERANDS, OPERANDS * sizeof *values);
        for (int64_t t = 0; t < state->history_length; t++)
            memcpy(values + (t + 1) * OPERANDS, state->history + (t * state->num_linears + i) * OPERANDS,
                   OPERANDS * sizeof *values);
    }
    return records;
}

/* Appends a tensor to the header; returns its number of bytes. */
static int64_t mt_fp8_header_add(char *header, int64_t *used, const char *name, int64_t at, int64_t ranks,
                                 int64_t length) {
    char shape[64];
    int64_t bytes = mt_max(ranks, 1) * mt_max(length, 1) * OPERANDS * 4;
    if (length > 0)
        snprintf(shape, sizeof shape, "%lld,%lld,%d", (long long)ranks, (long long)length, OPERANDS);
    else if (ranks > 0)
        snprintf(shape, sizeof shape, "%lld,%d", (long long)ranks, OPERANDS);
    else
        snprintf(shape, sizeof shape, "%d", OPERANDS);
    *used += sprintf(header + *used, ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}", name,
                     shape, (long long)at, (long long)(at + bytes));
    return bytes;
}

/* The file of sorted records, with `ranks` of them for each linear. */
static char *mt_fp8_image(const char *records, int64_t count, int64_t size, int64_t ranks, const mt_fp8_state *state,
                          int64_t *bytes) {
    int64_t used = 8, at = 0, values = size - (int64_t)sizeof(mt_fp8_record), H = state->history_length;
    char *image = mt_malloc(256 + count / ranks * 2 * 192 + count * values + 8), name[96];
    used += sprintf(image + used, "{\"__metadata__\":{\"format\":\"pt\"}");
    at += mt_fp8_header_add(image, &used, "largest", at, 0, 0);
    for (int64_t i = 0; i < count; i += ranks) {
        const mt_fp8_record *record = (const mt_fp8_record *)(const void *)(records + i * size);
        snprintf(name, sizeof name, "layers.%lld.%s.scale", (long long)record->layer, record->linear);
        at += mt_fp8_header_add(image, &used, name, at, ranks, 0);
        snprintf(name, sizeof name, "layers.%lld.%s.amax_history", (long long)record->layer, record->linear);
        at += mt_fp8_header_add(image, &used, name, at, ranks, H);
    }
    image[used++] = '}';
    while (used % 8) image[used++] = ' ';
    int64_t length = used - 8;
    memcpy(image, &length, 8);
    memcpy(image + used, state->largest, OPERANDS * 4);
    used += OPERANDS * 4;
    for (int64_t i = 0; i < count; i += ranks)
        for (int part = 0; part < 2; part++) // scales of all ranks, histories of all ranks
            for (int64_t k = i; k < i + ranks; k++) {
                int64_t n = (part ? H : 1) * OPERANDS * 4;
                memcpy(image + used, records + k * size + sizeof(mt_fp8_record) + (part ? OPERANDS * 4 : 0), (size_t)n);
                used += n;
            }
    *bytes = used;
    return image;
}

char *mt_fp8_collect(mt_model *m, int64_t *bytes) {
    const mt_grid *grid = mt_model_grid(m);
    const mt_group *world = &grid->world;
    mt_fp8_state state = mt_train_fp8_state(m);
    if (state.history_length == 0) return NULL;
    bool each_rank = mt_model_options(m)->tp_only_amax_red;
    int64_t size = (int64_t)sizeof(mt_fp8_record) + (1 + state.history_length) * OPERANDS * 4;
    size = mt_divide_up(size, 8) * 8;
    bool sends = grid->tensor_context.rank == 0 && (each_rank || grid->data.rank == 0);
    int64_t count = sends ? state.num_linears : 0;
    char *records = mt_fp8_records_make(&state, each_rank ? grid->data.rank : 0, size), *image = NULL;
    if (world->rank != 0) {
        mt_send(world, &count, sizeof count, 0);
        if (count > 0) mt_send(world, records, count * size, 0);
    }
    for (int rank = 1; rank < world->size && world->rank == 0; rank++) {
        int64_t theirs;
        mt_receive(world, &theirs, sizeof theirs, rank);
        records = mt_realloc(records, mt_max((count + theirs) * size, 1));
        if (theirs > 0) mt_receive(world, records + count * size, theirs * size, rank);
        count += theirs;
    }
    if (world->rank == 0) {
        qsort(records, (size_t)count, (size_t)size, mt_fp8_record_compare);
        image = mt_fp8_image(records, count, size, each_rank ? grid->data.size : 1, &state, bytes);
    }
    free(records);
    mt_fp8_state_free(&state);
    return image;
}

/* ---- loading */

/* A tensor of scales, fp32 and positive, or of histories, where a step may have had values that are not finite. */
static int mt_fp8_tensor_check(const mt_tensor_info *tensor, int64_t num_dims, bool positive, mt_error *error) {
    if (tensor->dtype != MT_F32 || tensor->num_dims != num_dims || tensor->bytes == 0 ||
        tensor->shape[num_dims - 1] != OPERANDS)
        return mt_error_set(error, "%s: tensor \"%s\" lacks the type or shape of fp8 scales; take another checkpoint",
                            tensor->file, tensor->name);
    for (int64_t i = 0; i < tensor->bytes / 4; i++) {
        float value;
        memcpy(&value, (const char *)tensor->data + i * 4, 4);
        if (positive ? !(value > 0) || isinf(value) : value < 0)
            return mt_error_set(error, "%s: tensor \"%s\" has the value %g; take another checkpoint", tensor->file,
                                tensor->name, (double)value);
    }
    return 0;
}

static float mt_fp8_value(const mt_tensor_info *tensor, int64_t i) {
    float value;
    memcpy(&value, (const char *)tensor->data + i * 4, 4);
    return value;
}

/* Differences between the saved state and the one that is loaded. */
typedef struct mt_fp8_changes {
    int64_t fresh;        // linears without scales in the file
    int64_t saved_length; // of the histories
} mt_fp8_changes;

/* The tensor of a linear, or NULL. The linear of a mixer's input had a name for each mixer in files of versions before
 * 2.0. */
static const mt_tensor_info *mt_fp8_find(const mt_safetensors *set, const mt_fp8_key *key, const char *part) {
    static const char *const older[] = {"delta_in", "short_in", "mamba_in"};
    char name[96];
    snprintf(name, sizeof name, "layers.%lld.%s.%s", (long long)key->layer, key->linear, part);
    const mt_tensor_info *tensor = mt_safetensors_find(set, name);
    for (size_t i = 0; i < sizeof older / sizeof *older && !tensor && strcmp(key->linear, "mixer_in") == 0; i++) {
        snprintf(name, sizeof name, "layers.%lld.%s.%s", (long long)key->layer, older[i], part);
        tensor = mt_safetensors_find(set, name);
    }
    return tensor;
}

/* Sets linear i of the state, which is fresh. If the checkpoint has another number of data-parallel ranks, it takes the
 * least of their scales and the largest of their histories. */
static int mt_fp8_linear_load(mt_fp8_state *state, int64_t i, const mt_safetensors *set, const mt_tensor_info *largest,
                              const mt_group *data, bool each_rank, mt_fp8_changes *changes, mt_error *error) {
    const mt_tensor_info *scale = mt_fp8_find(set, &state->keys[i], "scale");
    const mt_tensor_info *history = mt_fp8_find(set, &state->keys[i], "amax_history");
    if (!scale && !history) {
        changes->fresh++;
        return 0;
    }
    if (!scale || !history)
        return mt_error_set(error, "%s: tensor \"%s\" is without its %s; take another checkpoint", largest->file,
                            (scale ? scale : history)->name, scale ? "history" : "scale");
    if (mt_fp8_tensor_check(scale, 2, true, error) != 0 || mt_fp8_tensor_check(history, 3, false, error) != 0)
        return -1;
    int64_t ranks = scale->shape[0], H = history->shape[1], ours = state->history_length;
    if (history->shape[0] != ranks)
        return mt_error_set(error, "%s: tensor \"%s\" has %lld ranks and its scale %lld; take another checkpoint",
                            history->file, history->name, (long long)history->shape[0], (long long)ranks);
    bool own = each_rank && ranks == data->size;
    changes->saved_length = H;
    for (int64_t r = own ? data->rank : 0; r < (own ? data->rank + 1 : ranks); r++)
        for (int64_t k = 0; k < OPERANDS; k++) {
            float *to = &state->scale[i * OPERANDS + k];
            float value = mt_fp8_value(scale, r * OPERANDS + k) * (state->largest[k] / mt_fp8_value(largest, k));
            *to = own || r == 0 ? value : fminf(*to, value);
            for (int64_t age = 1; age < mt_min(H, ours); age++) { // the newest entry is the last
                float *to_amax = &state->history[((ours - age) * state->num_linears + i) * OPERANDS + k];
                float amax = mt_fp8_value(history, (r * H + H - age) * OPERANDS + k);
                if (amax != amax || amax > *to_amax) *to_amax = amax;
            }
        }
    return 0;
}

/* Reads the file into the state. */
static int mt_fp8_read(mt_fp8_state *state, const mt_model *m, const char *path, mt_fp8_changes *changes,
                       mt_error *error) {
    mt_safetensors *set = NULL;
    if (mt_safetensors_open(&set, path, error) != 0) return -1;
    const mt_tensor_info *largest = mt_safetensors_find(set, "largest");
    int status = 0;
    if (!largest) status = mt_error_set(error, "%s: has no tensor \"largest\"; take another checkpoint", path);
    if (largest) status = mt_fp8_tensor_check(largest, 1, true, error);
    for (int64_t i = 0; i < state->num_linears && status == 0; i++)
        status = mt_fp8_linear_load(state, i, set, largest, &mt_model_grid(m)->data,
                                    mt_model_options(m)->tp_only_amax_red, changes, error);
    mt_safetensors_close(set);
    return status;
}

/* Rank 0 reports what differs from the saved state. */
static void mt_fp8_report(const mt_group *world, const char *path, int64_t history_length, mt_fp8_changes *changes) {
    double numbers[2] = {(double)changes->fresh, (double)changes->saved_length};
    mt_all_reduce_max(world, numbers, 2, MT_F64);
    int64_t saved = (int64_t)numbers[1];
    if (world->rank != 0) return;
    if (numbers[0] > 0)
        fprintf(stderr, "warning: %s: lacks linears that are in fp8 now; their scales begin at 1\n", path);
    if (saved > 0 && saved != history_length)
        fprintf(stderr,
                "warning: %s: the run's --fp8-amax-history-len was %lld; now, with %lld, the histories are %s\n", path,
                (long long)saved, (long long)history_length,
                saved > history_length ? "cut to the newest entries" : "longer and fill up step by step");
}

int mt_fp8_state_load(mt_model *m, const char *folder, bool continues, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_fp8_state state = mt_train_fp8_state(m);
    bool delayed = state.history_length > 0, exists = continues && mt_folder_has(folder, MT_FP8_FILE);
    int status = 0;
    mt_broadcast(world, &exists, sizeof exists, 0);
    if (world->rank == 0 && continues && exists != delayed)
        fprintf(stderr, "warning: %s: %s\n", folder,
                exists ? "its fp8 scales are left aside: this run has no --fp8-recipe delayed"
                       : "has no fp8 scales; those of --fp8-recipe delayed begin at 1");
    if (!delayed) return 0;
    int64_t n = state.num_linears * OPERANDS;
    for (int64_t i = 0; i < n; i++) state.scale[i] = 1;
    memset(state.history, 0, (size_t)(state.history_length * n) * sizeof *state.history);
    if (exists) {
        mt_fp8_changes changes = {0};
        char *path = mt_path_join(folder, MT_FP8_FILE);
        status = mt_agree(world, mt_fp8_read(&state, m, path, &changes, error) != 0, error);
        if (status == 0) mt_fp8_report(world, path, state.history_length, &changes);
        free(path);
    }
    if (status == 0) mt_train_set_fp8_state(m, &state);
    mt_fp8_state_free(&state);
    return status;
}

void mt_fp8_state_free(mt_fp8_state *s) {
    free(s->scale);
    free(s->history);
    *s = (mt_fp8_state){0};
}
