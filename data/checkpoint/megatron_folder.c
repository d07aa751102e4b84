/* megatron_folder.c: a checkpoint of Megatron-LM as matrices. A tensor of a file becomes rectangles of matrices: the
 * layers of a tensor [layers, rows, columns] and the experts of one [layers, experts, rows, columns] are apart. Names
 * and numbers that torch_dist keeps in .metadata stand in the layers' names in the format torch, where each rank has
 * its own part and counts its own layers and experts. Invariant: a matrix that is given out has each of its elements
 * in exactly one piece. */
#include "megatron_folder.h"

#include "../base/file.h"
#include "torch_zip.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MT_MEGATRON_PIECES = 1 << 22, // of a checkpoint
    MT_MEGATRON_OF_ONE = 4096,    // of a matrix
    MT_MEGATRON_RANKS = 1000,     // numbers of a rank in mp_rank_XX_YYY
};
static const int64_t MT_METADATA_BYTES = (int64_t)1 << 30;

/* A piece before its matrix is known. */
typedef struct mt_found_piece {
    char *name;
    int64_t layer, expert, rows, cols;
    mt_param_state state;
    mt_megatron_piece piece;
} mt_found_piece;

/* A matrix of the model: its name without numbers, then the numbers; its whole size. */
typedef struct mt_matrix_key {
    const char *name;
    int64_t layer, expert;
    mt_param_state state;
    int64_t rows, cols;
} mt_matrix_key;

/* Values in a file, row after row. */
typedef struct mt_stored_values {
    const char *data;
    mt_dtype dtype;
    const char *path;
} mt_stored_values;

/* A chunk of a tensor of .metadata. */
typedef struct mt_tensor_chunk {
    const char *full; // the tensor's name
    int64_t num_dims, offsets[8], sizes[8];
    mt_dtype dtype;
} mt_tensor_chunk;

/* The entry of an archive that holds a tensor. */
typedef struct mt_held_entry {
    mt_zip_entry entry;
    const char *path;
} mt_held_entry;

struct mt_megatron {
    char *folder;
    mt_safetensors_file *files;
    int64_t num_files;
    mt_found_piece *found;
    int64_t num_found, found_room;
    mt_held_entry *held;
    int64_t num_held, held_room;
    mt_megatron_piece *pieces;
    mt_megatron_matrix *matrices;
    int64_t num_matrices;
    mt_pickle *common; // all but the tensors
    const mt_pickled *common_state;
    mt_zip common_zip; // of its tensors
    const char *other_optimizer;
    bool has_optimizer, has_buckets, misplaced; // misplaced: parameters in this order do not fill the buckets
    int64_t bucket_order;                       // see mt_bucket_orders
    int64_t bucket_step;                        // updates by the optimizer whose state is in buckets; -1: not there
};

/* ---- names */

/* A name without its numbers. */
typedef struct mt_megatron_name_parts {
    char text[256];
    int64_t layer, expert;        // -1: none, or a dimension
    bool has_layers, has_experts; // the first dimensions
} mt_megatron_name_parts;

/* Takes the number behind `marker` out of a name, "layers.3.mlp" -> "layers.mlp"; -1 if there is none. */
static int64_t mt_name_take_number(char *name, const char *marker) {
    char *at = strstr(name, marker), *end;
    if (!at || !isdigit((unsigned char)at[strlen(marker)])) return -1;
    at += strlen(marker);
    int64_t number = strtoll(at, &end, 10);
    if (*end != '.' || number > 1000000) return -1;
    memmove(at, end + 1, strlen(end));
    return number;
}

/* Splits a name of Megatron-Core; false if it is too long. */
static bool mt_name_split(const char *name, mt_megatron_name_parts *parts) {
    *parts = (mt_megatron_name_parts){.expert = -1};
    static const char *const prefixes[] = {"module.", "model."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) name += strlen(prefixes[i]);
    if (strlen(name) >= sizeof parts->text - 16) return false;
    strcpy(parts->text, name);
    bool in_layers = strncmp(name, "decoder.layers.", 15) == 0 || strncmp(name, "mtp.layers.", 11) == 0;
    parts->layer = mt_name_take_number(parts->text, "layers.");
    parts->has_layers = in_layers && parts->layer < 0;
    char *local = strstr(parts->text, ".experts.local_experts."), *grouped = strstr(parts->text, ".experts.linear_fc");
    bool is_shared = grouped && grouped - parts->text >= 7 && strncmp(grouped - 7, ".shared", 7) == 0;
    if (local) { // one module an expert
        memmove(local + strlen(".experts.experts."), local + strlen(".experts.local_experts."),
                strlen(local + strlen(".experts.local_experts.")) + 1);
        memcpy(local, ".experts.experts.", strlen(".experts.experts."));
    } else if (grouped && !is_shared && !strstr(parts->text, ".experts.experts.")) { // "experts.linear_fc1.weight3"
        char *end = parts->text + strlen(parts->text), *digits = end;
        while (digits > grouped && isdigit((unsigned char)digits[-1])) digits--;
        if (digits == end || end - digits > 6) digits = end;
        if (digits < end) parts->expert = strtoll(digits, NULL, 10);
        *digits = 0;
        memmove(grouped + strlen(".experts.experts"), grouped + strlen(".experts"), strlen(grouped + 8) + 1);
        memcpy(grouped, ".experts.experts", strlen(".experts.experts"));
    }
    if (parts->expert < 0) parts->expert = mt_name_take_number(parts->text, ".experts.experts.");
    parts->has_experts = strstr(parts->text, ".experts.experts.") && parts->expert < 0;
    return true;
}

/* ---- files */

/* Maps FOLDER/NAME once; NULL with error. */
static const mt_safetensors_file *mt_megatron_map(mt_megatron *c, const char *name, mt_error *error) {
    char *path = mt_path_join(c->folder, name);
    for (int64_t i = 0; i < c->num_files; i++)
        if (strcmp(c->files[i].path, path) == 0) {
            free(path);
            return &c->files[i];
        }
    mt_mapping mapping;
    if (mt_mapping_open(&mapping, path, error) != 0) {
        free(path);
        return NULL;
    }
    c->files = mt_realloc(c->files, (c->num_files + 1) * (int64_t)sizeof *c->files);
    c->files[c->num_files] = (mt_safetensors_file){path, mapping.bytes, mapping.size, mapping.bytes != NULL};
    return &c->files[c->num_files++];
}

/* The bytes of a tensor in an archive, and the entry that has them; NULL with error. */
static const void *mt_megatron_tensor_data(const mt_zip *zip, const mt_torch_tensor *tensor, mt_zip_entry *holds,
                                           const char *path, const char *name, mt_error *error) {
    char entry_name[128];
    snprintf(entry_name, sizeof entry_name, "data/%.100s", tensor->key);
    const mt_zip_entry *entry = mt_zip_find(zip, entry_name), *order = mt_zip_find(zip, "byteorder");
    int64_t bytes;
    if (order && !(order->bytes == 6 && memcmp(order->data, "little", 6) == 0)) {
        mt_error_set(error, "%s: was written on a machine of another byte order; save it again on a little-endian one",
                     path);
        return NULL;
    }
    if (!entry || __builtin_mul_overflow(tensor->elements, mt_dtype_size(tensor->dtype), &bytes) ||
        bytes > entry->bytes) {
        mt_error_set(error, "%s: the values of \"%.120s\" are not all there; get it again", path, name);
        return NULL;
    }
    if (!tensor->contiguous) {
        mt_error_set(error,
                     "%s: \"%.120s\" is a view whose rows do not follow one another; save it by contiguous() of torch",
                     path, name);
        return NULL;
    }
    *holds = *entry;
    return entry->data + tensor->first * mt_dtype_size(tensor->dtype);
}

static void mt_megatron_hold(mt_megatron *c, const mt_zip_entry *entry, const char *path) {
    if (c->num_held == c->held_room) {
        c->held_room = mt_max(2 * c->held_room, 64);
        c->held = mt_realloc(c->held, c->held_room * (int64_t)sizeof *c->held);
    }
    c->held[c->num_held++] = (mt_held_entry){*entry, path};
}

int mt_megatron_verify(const mt_megatron *c, int64_t rank, int64_t ranks, mt_error *error) {
    for (int64_t i = rank; i < c->num_held; i += ranks) {
        if (mt_zip_verify(&c->held[i].entry, c->held[i].path, error) != 0) return -1;
        mt_mapping_release(c->held[i].entry.data, c->held[i].entry.bytes);
    }
    return 0;
}

/* Opens an archive in a file and reads its pickle. */
static int mt_megatron_read_archive(mt_zip *zip, mt_pickle **pickle, const void *archive, int64_t bytes,
                                    const char *path, mt_error *error) {
    if (mt_zip_open(zip, archive, bytes, path, error) != 0) return -1;
    const mt_zip_entry *data = mt_zip_find(zip, "data.pkl");
    if (!data) return mt_error_set(error, "%s: an archive has no data.pkl; get it again", path);
    return mt_zip_verify(data, path, error) == 0 ? mt_pickle_read(pickle, data->data, data->bytes, path, error) : -1;
}

/* ---- pieces */

/* Adds a rectangle of a matrix. */
static int mt_megatron_add(mt_megatron *c, const mt_matrix_key *matrix, mt_rectangle part, mt_stored_values values,
                           mt_error *error) {
    mt_megatron_piece piece = {.part = part};
    piece.tensor.file = values.path, piece.tensor.data = values.data, piece.tensor.dtype = values.dtype;
    piece.tensor.num_dims = 2, piece.tensor.shape[0] = part.rows, piece.tensor.shape[1] = part.cols;
    piece.tensor.bytes = part.rows * part.cols * mt_dtype_size(values.dtype);
    if (piece.tensor.bytes == 0) return 0;
    if (c->num_found == MT_MEGATRON_PIECES)
        return mt_error_set(error, "%s: has over %d parts of tensors, more than any model", c->folder,
                            MT_MEGATRON_PIECES);
    if (c->num_found == c->found_room) {
        c->found_room = mt_max(2 * c->found_room, 256);
        c->found = mt_realloc(c->found, c->found_room * (int64_t)sizeof *c->found);
    }
    c->found[c->num_found++] = (mt_found_piece){.name = mt_strdup(matrix->name),
                                                .layer = matrix->layer,
                                                .expert = matrix->expert,
                                                .rows = matrix->rows,
                                                .cols = matrix->cols,
                                                .state = matrix->state,
                                                .piece = piece};
    return 0;
}

static int mt_found_compare_matrix(const mt_found_piece *x, const mt_found_piece *y) {
    int order = strcmp(x->name, y->name);
    if (order != 0) return order;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

static int mt_found_compare(const void *a, const void *b) {
    const mt_found_piece *x = a, *y = b;
    int order = mt_found_compare_matrix(x, y);
    if (order != 0) return order;
    if (x->piece.part.row != y->piece.part.row) return x->piece.part.row < y->piece.part.row ? -1 : 1;
    return (x->piece.part.col > y->piece.part.col) - (x->piece.part.col < y->piece.part.col);
}

/* The pieces of a matrix must lie in it, fill it, and not overlap. */
static int mt_matrix_check(const mt_megatron *c, const mt_megatron_matrix *matrix, mt_error *error) {
    int64_t filled = 0;
    bool good = matrix->count <= MT_MEGATRON_OF_ONE;
    for (int64_t i = 0; i < matrix->count && good; i++) {
        mt_rectangle part = matrix->pieces[i].part;
        good = part.row + part.rows <= matrix->rows && part.col + part.cols <= matrix->cols;
        filled += part.rows * part.cols;
        for (int64_t k = i + 1; k < matrix->count && good; k++) {
            if (matrix->pieces[k].part.row >= part.row + part.rows) break;
            mt_rectangle both = mt_rectangle_intersect(part, matrix->pieces[k].part);
            good = both.rows == 0 || both.cols == 0;
        }
    }
    if (good && filled == matrix->rows * matrix->cols) return 0;
    char layer[32] = "";
    if (matrix->layer >= 0) snprintf(layer, sizeof layer, " of layer %lld", (long long)matrix->layer);
    return mt_error_set(error,
                        "%s: the parts of tensor \"%.120s\"%s do not fill it, or overlap; the files of some ranks are "
                        "missing or of another run: get the folder again",
                        c->folder, matrix->name, layer);
}

/* Groups the pieces by their matrices. */
static int mt_megatron_group(mt_megatron *c, mt_error *error) {
    if (c->num_found > 0) qsort(c->found, (size_t)c->num_found, sizeof *c->found, mt_found_compare);
    c->pieces = mt_calloc(mt_max(c->num_found, 1) * (int64_t)sizeof *c->pieces);
    c->matrices = mt_calloc(mt_max(c->num_found, 1) * (int64_t)sizeof *c->matrices);
    for (int64_t i = 0; i < c->num_found; i++) {
        const mt_found_piece *found = &c->found[i];
        c->pieces[i] = found->piece;
        c->pieces[i].tensor.name = found->name;
        if (i == 0 || mt_found_compare_matrix(&c->found[i - 1], found) != 0)
            c->matrices[c->num_matrices++] = (mt_megatron_matrix){
                found->name, found->layer, found->expert, found->state, found->rows, found->cols, &c->pieces[i], 0};
        mt_megatron_matrix *matrix = &c->matrices[c->num_matrices - 1];
        if (found->rows != matrix->rows || found->cols != matrix->cols)
            return mt_error_set(error,
                                "%s: the parts of tensor \"%.120s\" are of different sizes; get the folder again",
                                c->folder, found->name);
        matrix->count++;
    }
    for (int64_t i = 0; i < c->num_matrices; i++)
        if (mt_matrix_check(c, &c->matrices[i], error) != 0) return -1;
    return 0;
}

/* ---- torch_dist */

/* An entry of .metadata's storage_data. */
typedef struct mt_storage_row {
    const char *name, *file;
    int64_t offsets[8], num_offsets; // -1: an object
    int64_t first, bytes;
} mt_storage_row;

typedef struct mt_storage {
    mt_storage_row *rows;
    int64_t count;
} mt_storage;

static int mt_storage_compare(const void *a, const void *b) {
    const mt_storage_row *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    if (order != 0) return order;
    if (x->num_offsets != y->num_offsets) return x->num_offsets < y->num_offsets ? -1 : 1;
    for (int64_t i = 0; i < x->num_offsets; i++)
        if (x->offsets[i] != y->offsets[i]) return x->offsets[i] < y->offsets[i] ? -1 : 1;
    return 0;
}

static bool mt_is_file_name(const char *name) {
    return name && *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static int mt_storage_read(mt_storage *storage, const mt_pickled *data, const char *path, mt_error *error) {
    if (!data || data->kind != MT_PICKLED_DICT)
        return mt_error_set(error, "%s: has no \"storage_data\", the places of the tensors; get it again", path);
    storage->rows = mt_calloc(mt_max(data->count, 1) * (int64_t)sizeof *storage->rows);
    for (int64_t i = 0; i < data->count; i++) {
        const mt_pickled *index = data->items[2 * i], *info = data->items[2 * i + 1];
        const mt_pickled *offset = mt_pickled_get(index, "offset");
        mt_storage_row *row = &storage->rows[storage->count++];
        row->name = mt_pickled_text(mt_pickled_get(index, "fqn"));
        row->file = mt_pickled_text(mt_pickled_get(info, "relative_path"));
        bool is_object = !offset || offset->kind == MT_PICKLED_NONE;
        row->num_offsets = is_object ? -1 : mt_pickled_sizes(offset, row->offsets, 8);
        if (!row->name || !mt_is_file_name(row->file) || (!is_object && row->num_offsets < 0) ||
            !mt_pickled_int(mt_pickled_get(info, "offset"), 0, INT64_MAX, &row->first) ||
            !mt_pickled_int(mt_pickled_get(info, "length"), 0, INT64_MAX, &row->bytes))
            return mt_error_set(error, "%s: entry %lld of \"storage_data\" is not a tensor's place; get it again", path,
                                (long long)i);
    }
    qsort(storage->rows, (size_t)storage->count, sizeof *storage->rows, mt_storage_compare);
    return 0;
}

static const mt_storage_row *mt_storage_find(const mt_storage *storage, const char *name, const int64_t *offsets,
                                             int64_t num_offsets) {
    mt_storage_row key = {.name = name, .num_offsets = num_offsets};
    for (int64_t i = 0; i < num_offsets; i++) key.offsets[i] = offsets[i];
    if (storage->count == 0) return NULL;
    return bsearch(&key, storage->rows, (size_t)storage->count, sizeof key, mt_storage_compare);
}

/* Opens the archive of an entry and reads its pickle. */
static int mt_megatron_open_blob(mt_megatron *c, const mt_storage_row *row, const mt_safetensors_file **file,
                                 mt_zip *zip, mt_pickle **pickle, mt_error *error) {
    *pickle = NULL;
    *zip = (mt_zip){0};
    *file = mt_megatron_map(c, row->file, error);
    if (!*file) return -1;
    if (row->first > (*file)->bytes || row->bytes > (*file)->bytes - row->first)
        return mt_error_set(error, "%s: ends before the values of \"%.120s\"; get it again", (*file)->path, row->name);
    return mt_megatron_read_archive(zip, pickle, (*file)->base + row->first, row->bytes, (*file)->path, error);
}

/* The state and the parameter's name of a tensor's name; false: of no state that is read. */
static bool mt_state_of_name(const char **name, mt_param_state *state) {
    static const struct {
        const char *prefix;
        mt_param_state state;
    } rows[] = {{"optimizer.state.exp_avg.", MT_STATE_EXP_AVG},
                {"optimizer.state.exp_avg_sq.", MT_STATE_EXP_AVG_SQ},
                {"optimizer.state.fp32_param.", MT_STATE_MASTER},
                {"optimizer.state.param.", MT_STATE_MASTER}};
    *state = MT_STATE_WEIGHTS;
    const char *inner = strncmp(*name, "chained_", 8) == 0 ? strchr(*name, '.') : NULL; // of several optimizers
    const char *from = inner ? inner + 1 : *name;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strncmp(from, rows[i].prefix, strlen(rows[i].prefix)) == 0) {
            *name = from + strlen(rows[i].prefix), *state = rows[i].state;
            return true;
        }
    return strncmp(from, "optimizer.", 10) != 0;
}

/* The values of one chunk of a tensor, and the file that has them; NULL with error. */
static const void *mt_megatron_chunk_data(mt_megatron *c, const mt_tensor_chunk *chunk, const mt_storage *storage,
                                          const char **path, mt_error *error) {
    const char *full = chunk->full;
    const mt_storage_row *row = mt_storage_find(storage, full, chunk->offsets, chunk->num_dims);
    const mt_safetensors_file *file;
    mt_torch_tensor tensor;
    mt_zip zip;
    mt_pickle *pickle;
    mt_zip_entry holds;
    if (!row) {
        mt_error_set(error, "%s/.metadata: has no place of a part of tensor \"%.120s\"; get it again", c->folder, full);
        return NULL;
    }
    const void *data = NULL;
    if (mt_megatron_open_blob(c, row, &file, &zip, &pickle, error) == 0) {
        bool good = mt_pickled_tensor(mt_pickle_root(pickle), &tensor) && tensor.dtype == chunk->dtype &&
                    tensor.num_dims == chunk->num_dims;
        for (int64_t i = 0; i < chunk->num_dims && good; i++) good = tensor.shape[i] == chunk->sizes[i];
        if (!good)
            mt_error_set(error,
                         "%s: holds another tensor than the part of \"%.120s\" that .metadata lists; "
                         "get the folder again",
                         file->path, full);
        else if ((data = mt_megatron_tensor_data(&zip, &tensor, &holds, file->path, full, error)))
            mt_megatron_hold(c, &holds, file->path), *path = file->path;
    }
    mt_pickle_free(pickle);
    mt_zip_free(&zip);
    return data;
}

/* One chunk of a tensor: its values, cut into rectangles of the layers' and experts' matrices. */
static int mt_megatron_add_chunk(mt_megatron *c, const mt_tensor_chunk *chunk, const mt_megatron_name_parts *parts,
                                 mt_param_state state, const int64_t *shape, const mt_storage *storage,
                                 mt_error *error) {
    const int64_t *offsets = chunk->offsets, *sizes = chunk->sizes, num_dims = chunk->num_dims;
    mt_stored_values values = {.dtype = chunk->dtype};
    values.data = mt_megatron_chunk_data(c, chunk, storage, &values.path, error);
    if (!values.data) return -1;
    int status = 0;
    int64_t lead = parts->has_layers + parts->has_experts, count = 1, rest = 1;
    for (int64_t i = 0; i < lead; i++) count *= sizes[i];
    for (int64_t i = lead + 1; i < num_dims; i++) rest *= shape[i];
    mt_rectangle part = {offsets[lead], sizes[lead], 0, rest};
    if (num_dims == lead + 2) part.col = offsets[lead + 1], part.cols = sizes[lead + 1];
    for (int64_t i = lead + 2; i < num_dims; i++)
        if (sizes[i] != shape[i] || sizes[lead + 1] != shape[lead + 1])
            return mt_error_set(error,
                                "%s: tensor \"%.120s\" of over two dimensions is cut in its last ones; it has "
                                "no place here",
                                values.path, chunk->full);
    int64_t bytes = part.rows * part.cols * mt_dtype_size(values.dtype);
    int64_t inner = parts->has_experts ? sizes[lead - 1] : 1;
    mt_matrix_key matrix = {.name = parts->text, .state = state, .rows = shape[lead], .cols = rest};
    for (int64_t i = 0; i < count && status == 0; i++) {
        matrix.layer = parts->has_layers ? offsets[0] + i / inner : parts->layer;
        matrix.expert = parts->has_experts ? offsets[lead - 1] + i % inner : parts->expert;
        status = mt_megatron_add(c, &matrix, part, values, error);
        values.data += bytes;
    }
    return status;
}

static int mt_megatron_bad_entry(const mt_megatron *c, const char *name, mt_error *error) {
    return mt_error_set(error, "%s/.metadata: the sizes of tensor \"%.120s\" are not right; get it again", c->folder,
                        name);
}

/* One tensor of .metadata. */
static int mt_megatron_add_tensor(mt_megatron *c, const char *full, const mt_pickled *entry, bool weights,
                                  const mt_storage *storage, mt_error *error) {
    const char *name = full;
    mt_param_state state;
    mt_megatron_name_parts parts;
    int64_t shape[8], elements = 1;
    bool known = mt_state_of_name(&name, &state);
    if (state != MT_STATE_WEIGHTS) c->has_optimizer = true;
    if (!known || weights != (state == MT_STATE_WEIGHTS)) return 0;
    const mt_pickled *properties = mt_pickled_get(entry, "properties");
    const mt_pickled *built = properties && properties->kind == MT_PICKLED_OBJECT ? properties->items[2] : NULL;
    int dtype = mt_pickled_dtype(mt_pickled_item(built, 0));
    int64_t num_dims = mt_pickled_sizes(mt_pickled_get(entry, "size"), shape, 8);
    const mt_pickled *chunks = mt_pickled_get(entry, "chunks");
    if (num_dims < 0 || !chunks || chunks->kind != MT_PICKLED_LIST) return mt_megatron_bad_entry(c, full, error);
    bool is_float = dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16 || dtype == MT_F64;
    if (!is_float && strstr(full, "_extra_state")) return 0;
    if (num_dims == 0) return 0; // counters
    if (!is_float)
        return mt_error_set(error,
                            "%s: tensor \"%.120s\" is of no type of 16, 32 or 64 bits; save a checkpoint of "
                            "bf16 or fp32 parameters",
                            c->folder, full);
    for (int64_t i = 0; i < num_dims; i++)
        if (__builtin_mul_overflow(elements, shape[i], &elements) || elements > INT64_MAX / 16)
            return mt_megatron_bad_entry(c, full, error);
    if (!mt_name_split(name, &parts) || num_dims <= parts.has_layers + parts.has_experts)
        return mt_megatron_bad_entry(c, full, error);
    mt_tensor_chunk chunk = {.full = full, .num_dims = num_dims, .dtype = (mt_dtype)dtype};
    for (int64_t i = 0; i < chunks->count; i++) {
        if (mt_pickled_sizes(mt_pickled_get(chunks->items[i], "offsets"), chunk.offsets, 8) != num_dims ||
            mt_pickled_sizes(mt_pickled_get(chunks->items[i], "sizes"), chunk.sizes, 8) != num_dims)
            return mt_megatron_bad_entry(c, full, error);
        for (int64_t k = 0; k < num_dims; k++)
            if (chunk.offsets[k] > shape[k] || chunk.sizes[k] > shape[k] - chunk.offsets[k])
                return mt_megatron_bad_entry(c, full, error);
        if (mt_megatron_add_chunk(c, &chunk, &parts, state, shape, storage, error) != 0) return -1;
    }
    return 0;
}

/* All but the tensors: common.pt of older versions, or the object common_state, a list of one dict. */
static int mt_megatron_read_common(mt_megatron *c, const mt_storage *storage, mt_error *error) {
    const mt_safetensors_file *file;
    int status = -1;
    if (mt_folder_has(c->folder, "common.pt")) {
        file = mt_megatron_map(c, "common.pt", error);
        if (!file) return -1;
        status = mt_megatron_read_archive(&c->common_zip, &c->common, file->base, file->bytes, file->path, error);
    } else {
        status = 0;
        for (int64_t i = 0; i < storage->count; i++) {
            if (strncmp(storage->rows[i].name, "common_state/", 13) != 0) continue;
            status = mt_megatron_open_blob(c, &storage->rows[i], &file, &c->common_zip, &c->common, error);
            break;
        }
    }
    if (status != 0) return -1;
    c->common_state = c->common ? mt_pickle_root(c->common) : NULL;
    if (c->common_state && c->common_state->kind == MT_PICKLED_LIST)
        c->common_state = mt_pickled_item(c->common_state, 0);
    return 0;
}

/* True for master weights under the distributed optimizer's name that the plain one's name lists too. */
static bool mt_name_is_second(const mt_pickled *entries, const char *name) {
    static const char distributed[] = "optimizer.state.param.";
    char plain[512];
    if (strncmp(name, distributed, strlen(distributed)) != 0 || strlen(name) > 400) return false;
    snprintf(plain, sizeof plain, "optimizer.state.fp32_param.%s", name + strlen(distributed));
    return mt_pickled_get(entries, plain) != NULL;
}

/* ---- the layout of the ranks that wrote a folder */

/* How Megatron-Core cuts a matrix over the tensor-parallel ranks. */
typedef enum mt_megatron_cut { MT_MEGATRON_WHOLE, MT_MEGATRON_ROWS, MT_MEGATRON_COLS } mt_megatron_cut;

static mt_megatron_cut mt_megatron_cut_of(const char *name) {
    static const char *const rows[] = {"embedding.word_embeddings.weight",
                                       "output_layer.weight",
                                       ".linear_qkv.weight",
                                       ".linear_qkv.bias",
                                       ".linear_fc1.weight",
                                       ".linear_fc1.bias",
                                       ".linear_q_proj.weight",
                                       ".linear_q_up_proj.weight",
                                       ".linear_kv_up_proj.weight",
                                       ".core_attention.softmax_offset",
                                       ".eh_proj.weight"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (mt_text_ends_with(name, rows[i])) return MT_MEGATRON_ROWS;
    if (mt_text_ends_with(name, ".linear_proj.weight") || mt_text_ends_with(name, ".linear_fc2.weight"))
        return MT_MEGATRON_COLS;
    return MT_MEGATRON_WHOLE;
}

/* The layout of the ranks that wrote a folder, from its arguments. */
typedef struct mt_megatron_layout {
    int64_t tp, pp, ep, chunks; // chunks: virtual stages of a pipeline rank
    bool gated;
    int64_t first_layer[MT_MEGATRON_RANKS]; // [chunk * pp + rank]
} mt_megatron_layout;

static int64_t mt_args_int(const mt_pickled *args, const char *key, int64_t otherwise) {
    int64_t value;
    return mt_pickled_int(mt_pickled_get(args, key), 1, MT_MEGATRON_RANKS - 1, &value) ? value : otherwise;
}

static bool mt_args_true(const mt_pickled *args, const char *key) {
    const mt_pickled *value = mt_pickled_get(args, key);
    return value && value->kind == MT_PICKLED_BOOL && value->number;
}

/* ---- the optimizer's steps */

static bool mt_steps_of(double number, int64_t *step) {
    bool counts = number >= 0 && number < 1e9;
    if (counts) *step = (int64_t)number;
    return counts;
}

/* A whole number of steps, as PyTorch's Adam counts: a number, or a tensor of one float. */
static bool mt_megatron_steps(const mt_megatron *c, const mt_pickled *value, int64_t *step) {
    mt_torch_tensor tensor;
    mt_error ignored;
    mt_zip_entry holds;
    float number;
    if (mt_pickled_int(value, 0, INT32_MAX, step)) return true;
    if (value && value->kind == MT_PICKLED_REAL) return mt_steps_of(value->real, step);
    if (!mt_pickled_tensor(value, &tensor) || tensor.count != 1 || tensor.dtype != MT_F32) return false;
    const void *data = mt_megatron_tensor_data(&c->common_zip, &tensor, &holds, c->folder, "step", &ignored);
    if (!data || mt_zip_verify(&holds, c->folder, &ignored) != 0) return false;
    memcpy(&number, data, sizeof number);
    return mt_steps_of((double)number, step);
}

/* ---- torch_dist: buckets of the distributed optimizer (dp_reshardable) */

/* The state of a model-parallel rank's optimizer as tensors of one dimension, "dp_group_idx_G.gbuf_idx_B.dtype_(...)
 * .bucket_idx_K.STATE": G is the tensor rank plus the tensor size times the pipeline rank, B the virtual stage. A
 * bucket has whole parameters as that rank has them, in the reverse order of the model's modules, each at a multiple of
 * 64 elements; a bucket is full where the next parameter would begin, or where its last one ends
 * (megatron/core/optimizer/distrib_optimizer.py of 0.19.2). The names of parameters are not stored: those of the
 * weights, in the order of a known specification of layers, must fill all buckets, and mt_buckets_match compares. */
enum { MT_BUCKET_ORDERS = 2, MT_BUCKET_NAMES = 21, MT_BUCKET_ALIGNMENT = 64 };

/* The parameters of a layer as Megatron-Core's specifications create them: for Transformer Engine, and the local one.
 */
static const char *const mt_bucket_orders[MT_BUCKET_ORDERS][MT_BUCKET_NAMES] = {
    {"input_layernorm.weight",
     "input_layernorm.bias",
     "self_attention.core_attention.softmax_offset",
     "self_attention.linear_proj.weight",
     "self_attention.linear_proj.bias",
     "self_attention.linear_qkv.layer_norm_weight",
     "self_attention.linear_qkv.layer_norm_bias",
     "self_attention.linear_qkv.weight",
     "self_attention.linear_qkv.bias",
     "self_attention.q_layernorm.weight",
     "self_attention.q_layernorm.bias",
     "self_attention.k_layernorm.weight",
     "self_attention.k_layernorm.bias",
     "pre_mlp_layernorm.weight",
     "pre_mlp_layernorm.bias",
     "mlp.linear_fc1.layer_norm_weight",
     "mlp.linear_fc1.layer_norm_bias",
     "mlp.linear_fc1.weight",
     "mlp.linear_fc1.bias",
     "mlp.linear_fc2.weight",
     "mlp.linear_fc2.bias"},
    {"self_attention.linear_qkv.layer_norm_weight",
     "self_attention.linear_qkv.layer_norm_bias",
     "input_layernorm.weight",
     "input_layernorm.bias",
     "self_attention.core_attention.softmax_offset",
     "self_attention.linear_proj.weight",
     "self_attention.linear_proj.bias",
     "self_attention.linear_qkv.weight",
     "self_attention.linear_qkv.bias",
     "self_attention.q_layernorm.weight",
     "self_attention.q_layernorm.bias",
     "self_attention.k_layernorm.weight",
     "self_attention.k_layernorm.bias",
     "mlp.linear_fc1.layer_norm_weight",
     "mlp.linear_fc1.layer_norm_bias",
     "pre_mlp_layernorm.weight",
     "pre_mlp_layernorm.bias",
     "mlp.linear_fc1.weight",
     "mlp.linear_fc1.bias",
     "mlp.linear_fc2.weight",
     "mlp.linear_fc2.bias"},
};

/* A tensor of the weights: a matrix, or one for each layer. */
typedef struct mt_bucket_weight {
    mt_megatron_name_parts parts;
    int64_t layers, rows, cols; // layers -1: parts.layer alone
} mt_bucket_weight;

/* A parameter of a rank in its bucket. */
typedef struct mt_bucket_param {
    const mt_bucket_weight *weight;
    int64_t layer, rows, cols; // of the rank's part
    int64_t bucket, first;     // its place, in elements
    bool is_copy;              // of a matrix that another rank has too
} mt_bucket_param;

/* A tensor of .metadata that is a state of a bucket. */
typedef struct mt_bucket_tensor {
    long long group, buffer, bucket;
    mt_param_state state;
    const char *name;
    const mt_pickled *entry;
    int64_t size;
} mt_bucket_tensor;

typedef struct mt_buckets {
    mt_megatron *c;
    mt_megatron_layout layout;
    int64_t num_layers;
    bool tied;
    mt_bucket_weight *weights;
    mt_bucket_tensor *tensors;
    mt_bucket_param *params; // of one buffer
    int64_t num_weights, num_tensors, num_params;
} mt_buckets;

/* The numbers and the state in a bucket's name; false: of another form. */
static bool mt_bucket_name_read(const char *name, mt_bucket_tensor *tensor) {
    int used = 0;
    static const struct {
        const char *name;
        mt_param_state state;
    } states[] = {{"param", MT_STATE_MASTER}, {"exp_avg", MT_STATE_EXP_AVG}, {"exp_avg_sq", MT_STATE_EXP_AVG_SQ}};
    if (sscanf(name, "optimizer.distributed.dp_group_idx_%6lld.gbuf_idx_%6lld.dtype_(%n", &tensor->group,
               &tensor->buffer, &used) != 2 ||
        used == 0)
        return false;
    const char *rest = strstr(name, ").bucket_idx_");
    if (!rest || sscanf(rest, ").bucket_idx_%6lld.%n", &tensor->bucket, &used) != 1) return false;
    for (size_t i = 0; i < sizeof states / sizeof *states; i++)
        if (strcmp(rest + used, states[i].name) == 0) {
            tensor->state = states[i].state;
            return tensor->group >= 0 && tensor->buffer >= 0 && tensor->bucket >= 0;
        }
    return false;
}

static const mt_bucket_tensor *mt_bucket_find(const mt_buckets *b, int64_t group, int64_t buffer, int64_t bucket,
                                              mt_param_state state) {
    for (int64_t i = 0; i < b->num_tensors; i++) {
        const mt_bucket_tensor *t = &b->tensors[i];
        if (t->group == group && t->buffer == buffer && t->bucket == bucket && t->state == state) return t;
    }
    return NULL;
}

/* Lists the tensors of the weights and of the buckets. */
static int mt_buckets_list(mt_buckets *b, const mt_pickled *entries, mt_error *error) {
    b->weights = mt_calloc(mt_max(entries->count, 1) * (int64_t)sizeof *b->weights);
    b->tensors = mt_calloc(mt_max(entries->count, 1) * (int64_t)sizeof *b->tensors);
    for (int64_t i = 0; i < entries->count; i++) {
        const char *name = mt_pickled_text(entries->items[2 * i]), *class = mt_pickled_class(entries->items[2 * i + 1]);
        const mt_pickled *entry = entries->items[2 * i + 1];
        int64_t shape[8], num_dims;
        if (!name || !class || !mt_text_ends_with(class, ".TensorStorageMetadata") || strstr(name, "_extra_state"))
            continue;
        num_dims = mt_pickled_sizes(mt_pickled_get(entry, "size"), shape, 8);
        if (num_dims < 0) return mt_megatron_bad_entry(b->c, name, error);
        if (strncmp(name, "optimizer.", 10) == 0) {
            mt_bucket_tensor *t = &b->tensors[b->num_tensors];
            if (!mt_bucket_name_read(name, t)) continue;
            if (num_dims != 1 || shape[0] > INT64_MAX / 16) return mt_megatron_bad_entry(b->c, name, error);
            t->name = name, t->entry = entry, t->size = shape[0], b->num_tensors++;
            continue;
        }
        mt_bucket_weight *w = &b->weights[b->num_weights];
        if (num_dims == 0) continue;
        if (!mt_name_split(name, &w->parts)) return mt_megatron_bad_entry(b->c, name, error);
        int64_t lead = w->parts.has_layers;
        if (num_dims < lead + 1 || num_dims > lead + 2) return mt_megatron_bad_entry(b->c, name, error);
        w->layers = lead ? shape[0] : -1, w->rows = shape[lead], w->cols = num_dims > lead + 1 ? shape[lead + 1] : 1;
        int64_t elements;
        if (__builtin_mul_overflow(w->rows, w->cols, &elements) || elements > INT64_MAX / 16)
            return mt_megatron_bad_entry(b->c, name, error);
        b->num_weights++;
    }
    return 0;
}

/* The weight of a layer (-1: none) by its name behind `prefix`, or NULL. */
static const mt_bucket_weight *mt_bucket_weight_find(const mt_buckets *b, const char *prefix, const char *name,
                                                     int64_t layer) {
    for (int64_t i = 0; i < b->num_weights; i++) {
        const mt_bucket_weight *w = &b->weights[i];
        size_t length = strlen(prefix);
        if (strncmp(w->parts.text, prefix, length) != 0 || strcmp(w->parts.text + length, name) != 0) continue;
        if (w->layers >= 0 ? layer < w->layers : w->parts.layer == layer) return w;
    }
    return NULL;
}

/* Appends a parameter of tensor rank `tp`, if the model has it. */
static void mt_bucket_append(mt_buckets *b, const char *prefix, const char *name, int64_t layer, int64_t tp) {
    const mt_bucket_weight *w = mt_bucket_weight_find(b, prefix, name, layer);
    if (!w) return;
    mt_megatron_cut cut = mt_megatron_cut_of(w->parts.text);
    b->params[b->num_params++] = (mt_bucket_param){.weight = w,
                                                   .layer = layer,
                                                   .rows = cut == MT_MEGATRON_ROWS ? w->rows / b->layout.tp : w->rows,
                                                   .cols = cut == MT_MEGATRON_COLS ? w->cols / b->layout.tp : w->cols,
                                                   .is_copy = cut == MT_MEGATRON_WHOLE && tp > 0};
}

/* The parameters of one virtual stage in the order of its modules. */
static void mt_bucket_list_params(mt_buckets *b, int64_t tp, int64_t pp, int64_t chunk) {
    const mt_megatron_layout *l = &b->layout;
    int64_t stages = l->pp * l->chunks, stage = chunk * l->pp + pp, layers = b->num_layers / stages;
    b->num_params = 0;
    if (stage == 0) {
        mt_bucket_append(b, "embedding.", "word_embeddings.weight", -1, tp);
        mt_bucket_append(b, "embedding.", "position_embeddings.weight", -1, tp);
    }
    for (int64_t layer = stage * layers; layer < (stage + 1) * layers; layer++)
        for (int i = 0; i < MT_BUCKET_NAMES; i++)
            mt_bucket_append(b, "decoder.layers.", mt_bucket_orders[b->c->bucket_order][i], layer, tp);
    if (stage + 1 < stages) return;
    mt_bucket_append(b, "decoder.", "final_layernorm.weight", -1, tp);
    mt_bucket_append(b, "decoder.", "final_layernorm.bias", -1, tp);
    mt_bucket_append(b, "output_layer.", "weight", -1, tp);
    if (!b->tied || stages == 1) return;
    int64_t before = b->num_params;
    mt_bucket_append(b, "embedding.", "word_embeddings.weight", -1, tp);
    if (b->num_params > before) b->params[before].is_copy = true;
}

static int64_t mt_bucket_aligned(int64_t at) {
    return mt_divide_up(at, MT_BUCKET_ALIGNMENT) * MT_BUCKET_ALIGNMENT;
}

/* True for the first matrix of an MLP with a gate: a rank has its rows of the gate, then those of the other half. */
static bool mt_bucket_is_gated(const mt_buckets *b, const mt_bucket_weight *w) {
    return b->layout.gated && strstr(w->parts.text, "mlp.linear_fc1.") &&
           mt_megatron_cut_of(w->parts.text) == MT_MEGATRON_ROWS;
}

/* True if the tensor ranks have equal parts of a matrix, with a gate of both of its halves. */
static bool mt_bucket_divides(const mt_buckets *b, const mt_bucket_weight *w) {
    mt_megatron_cut cut = mt_megatron_cut_of(w->parts.text);
    int64_t parts = b->layout.tp * (mt_bucket_is_gated(b, w) ? 2 : 1);
    return cut == MT_MEGATRON_WHOLE || (cut == MT_MEGATRON_ROWS ? w->rows : w->cols) % parts == 0;
}

/* Gives the parameters their places in the buckets of a buffer; false: they do not fill them. */
static bool mt_bucket_place_params(mt_buckets *b, int64_t group, int64_t buffer) {
    int64_t bucket = 0, end = 0;
    const mt_bucket_tensor *in = mt_bucket_find(b, group, buffer, 0, MT_STATE_MASTER);
    for (int64_t i = b->num_params - 1; i >= 0 && in; i--) {
        mt_bucket_param *param = &b->params[i];
        int64_t first = mt_bucket_aligned(end), count = param->rows * param->cols;
        if (end > 0 && (end == in->size || first == in->size)) {
            in = mt_bucket_find(b, group, buffer, ++bucket, MT_STATE_MASTER), first = 0;
            if (!in) return false;
        }
        if (first > in->size || count > in->size - first || !mt_bucket_divides(b, param->weight)) return false;
        param->bucket = bucket, param->first = first, end = first + count;
    }
    return in && (end == in->size || mt_bucket_aligned(end) == in->size) &&
           !mt_bucket_find(b, group, buffer, bucket + 1, MT_STATE_MASTER);
}

/* Adds elements [first, first + count) of a rank's part of a matrix. */
static int mt_bucket_add_elements(mt_buckets *b, const mt_bucket_param *param, int64_t tp, mt_param_state state,
                                  int64_t first, int64_t count, mt_stored_values values, mt_error *error) {
    const mt_bucket_weight *w = param->weight;
    mt_matrix_key matrix = {w->parts.text, param->layer, -1, state, w->rows, w->cols};
    mt_megatron_cut cut = mt_megatron_cut_of(w->parts.text);
    int64_t halves = mt_bucket_is_gated(b, w) ? 2 : 1, block = param->rows / halves;
    while (count > 0) {
        int64_t row = first / param->cols, col = first % param->cols, in_block = row % block;
        bool whole = col == 0 && count >= param->cols;
        mt_rectangle part = {row, 1, col, mt_min(count, param->cols - col)};
        if (whole) part.rows = mt_min(count / param->cols, block - in_block);
        int64_t taken = part.rows * part.cols;
        if (cut == MT_MEGATRON_ROWS) part.row = row / block * (w->rows / halves) + tp * block + in_block;
        if (cut == MT_MEGATRON_COLS) part.col += tp * param->cols;
        if (mt_megatron_add(b->c, &matrix, part, values, error) != 0) return -1;
        first += taken, count -= taken, values.data += taken * mt_dtype_size(values.dtype);
    }
    return 0;
}

/* Adds the chunks of one state of a bucket: those of data-parallel ranks, each with parts of parameters or padding. */
static int mt_bucket_add(mt_buckets *b, const mt_bucket_tensor *t, int64_t tp, const mt_storage *storage,
                         mt_error *error) {
    const mt_pickled *chunks = mt_pickled_get(t->entry, "chunks"), *properties = mt_pickled_get(t->entry, "properties");
    const mt_pickled *built = properties && properties->kind == MT_PICKLED_OBJECT ? properties->items[2] : NULL;
    int dtype = mt_pickled_dtype(mt_pickled_item(built, 0));
    bool is_float = dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16;
    if (!chunks || chunks->kind != MT_PICKLED_LIST || !is_float) return mt_megatron_bad_entry(b->c, t->name, error);
    mt_tensor_chunk chunk = {.full = t->name, .num_dims = 1, .dtype = (mt_dtype)dtype};
    for (int64_t i = 0; i < chunks->count; i++) {
        if (mt_pickled_sizes(mt_pickled_get(chunks->items[i], "offsets"), chunk.offsets, 1) != 1 ||
            mt_pickled_sizes(mt_pickled_get(chunks->items[i], "sizes"), chunk.sizes, 1) != 1 ||
            chunk.offsets[0] > t->size || chunk.sizes[0] > t->size - chunk.offsets[0])
            return mt_megatron_bad_entry(b->c, t->name, error);
        int64_t offset = chunk.offsets[0], size = chunk.sizes[0];
        const char *data = NULL, *path = NULL;
        for (int64_t k = 0; k < b->num_params; k++) {
            const mt_bucket_param *param = &b->params[k];
            int64_t from = mt_max(offset, param->first);
            int64_t to = mt_min(offset + size, param->first + param->rows * param->cols);
            if (param->bucket != t->bucket || param->is_copy || from >= to) continue;
            if (!data) data = mt_megatron_chunk_data(b->c, &chunk, storage, &path, error);
            if (!data) return -1;
            mt_stored_values values = {data + (from - offset) * mt_dtype_size(chunk.dtype), chunk.dtype, path};
            if (mt_bucket_add_elements(b, param, tp, t->state, from - param->first, to - from, values, error) != 0)
                return -1;
        }
    }
    return 0;
}

/* The updates that the optimizer of the first rank has made. */
static int mt_bucket_read_step(mt_megatron *c, const mt_storage *storage, mt_error *error) {
    static const char name[] = "optimizer.distributed.dp_group_idx_0.optimizer/";
    for (int64_t i = 0; i < storage->count; i++) {
        if (strncmp(storage->rows[i].name, name, sizeof name - 1) != 0) continue;
        const mt_safetensors_file *file;
        mt_zip zip;
        mt_pickle *pickle;
        int status = mt_megatron_open_blob(c, &storage->rows[i], &file, &zip, &pickle, error);
        const mt_pickled *root = status == 0 ? mt_pickle_root(pickle) : NULL;
        if (root && root->kind == MT_PICKLED_LIST) root = mt_pickled_item(root, 0);
        const mt_pickled *groups = mt_pickled_get(root, "param_groups");
        mt_megatron_steps(c, mt_pickled_get(mt_pickled_item(groups, 0), "step"), &c->bucket_step);
        mt_pickle_free(pickle);
        mt_zip_free(&zip);
        return status;
    }
    return 0;
}

/* A part of the model whose buckets have no known place, or NULL. */
static const char *mt_buckets_unknown(const mt_buckets *b, const mt_pickled *entries, const mt_pickled *args) {
    static const char *const uneven[] = {"decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                                         "pipeline_model_parallel_layout"};
    static const char *const counted[] = {"account_for_embedding_in_pipeline_split",
                                          "account_for_loss_in_pipeline_split"};
    for (int64_t i = 0; i < entries->count; i++) {
        const char *name = mt_pickled_text(entries->items[2 * i]);
        if (name && strncmp(name, "chained_", 8) == 0) return "a model with several optimizers, as of experts";
    }
    if (!args) return "a folder without the arguments of its run";
    if (b->layout.tp * b->layout.pp > MT_MEGATRON_RANKS) return "so many ranks";
    for (size_t i = 0; i < sizeof uneven / sizeof *uneven; i++) {
        const mt_pickled *value = mt_pickled_get(args, uneven[i]);
        if (value && value->kind != MT_PICKLED_NONE) return "pipeline stages of different numbers of layers";
    }
    for (size_t i = 0; i < sizeof counted / sizeof *counted; i++)
        if (mt_args_true(args, counted[i])) return "pipeline stages of different numbers of layers";
    if (b->num_layers % (b->layout.pp * b->layout.chunks) != 0) return "pipeline stages of different numbers of layers";
    for (int64_t i = 0; i < b->num_weights; i++) {
        const char *text = b->weights[i].parts.text;
        bool known = strcmp(text, "output_layer.weight") == 0 || strncmp(text, "embedding.", 10) == 0 ||
                     strncmp(text, "decoder.final_layernorm.", 24) == 0;
        for (int k = 0; k < MT_BUCKET_NAMES && !known && strncmp(text, "decoder.layers.", 15) == 0; k++)
            known = strcmp(text + 15, mt_bucket_orders[0][k]) == 0;
        if (!known) return "other layers than attention and a dense MLP";
    }
    return NULL;
}

/* Adds the pieces of all buckets, with `tensors`; else only their step. */
static int mt_buckets_read(mt_megatron *c, const mt_pickled *entries, bool tensors, const mt_storage *storage,
                           mt_error *error) {
    const mt_pickled *args = mt_megatron_args(c);
    mt_buckets b = {.c = c, .layout = {.tp = mt_args_int(args, "tensor_model_parallel_size", 1)}};
    b.layout.pp = mt_args_int(args, "pipeline_model_parallel_size", 1);
    b.layout.chunks = mt_args_int(args, "virtual_pipeline_model_parallel_size", 1);
    b.layout.gated = mt_args_true(args, "swiglu") || mt_args_true(args, "geglu") || mt_args_true(args, "quick_geglu");
    b.num_layers = mt_args_int(args, "num_layers", 0);
    int status = mt_buckets_list(&b, entries, error);
    b.tied = !mt_bucket_weight_find(&b, "output_layer.", "weight", -1);
    if (status == 0) c->other_optimizer = mt_buckets_unknown(&b, entries, args);
    c->has_optimizer = !c->other_optimizer;
    if (status == 0 && !c->other_optimizer) status = mt_bucket_read_step(c, storage, error);
    bool reads = status == 0 && tensors && !c->other_optimizer;
    if (reads) b.params = mt_calloc((b.num_layers * MT_BUCKET_NAMES + 8) * (int64_t)sizeof *b.params);
    for (int64_t group = 0; group < b.layout.tp * b.layout.pp && reads && status == 0; group++)
        for (int64_t chunk = 0; chunk < b.layout.chunks && status == 0; chunk++) {
            int64_t tp = group % b.layout.tp;
            mt_bucket_list_params(&b, tp, group / b.layout.tp, chunk);
            c->misplaced = !mt_bucket_place_params(&b, group, chunk);
            if (c->misplaced)
                status = mt_error_set(error,
                                      "%s: the buckets of the optimizer's state (dp_group_idx_%lld) have other sizes "
                                      "than the model's parameters; save it by Megatron-LM with "
                                      "--dist-ckpt-optim-fully-reshardable, or give --no-load-optim",
                                      c->folder, (long long)group);
            for (int64_t i = 0; i < b.num_tensors && status == 0; i++)
                if (b.tensors[i].group == group && b.tensors[i].buffer == chunk)
                    status = mt_bucket_add(&b, &b.tensors[i], tp, storage, error);
        }
    free(b.weights), free(b.tensors), free(b.params);
    return status;
}

static int mt_megatron_open_dist(mt_megatron *c, bool tensors, bool weights, mt_error *error) {
    char *path = mt_path_join(c->folder, ".metadata");
    int64_t bytes;
    mt_pickle *pickle = NULL;
    mt_storage storage = {0};
    char *text = mt_file_read(path, MT_METADATA_BYTES, &bytes, error);
    int status = text ? mt_pickle_read(&pickle, text, bytes, path, error) : -1;
    free(text);
    if (status == 0)
        status = mt_storage_read(&storage, mt_pickled_get(mt_pickle_root(pickle), "storage_data"), path, error);
    if (status == 0) status = mt_megatron_read_common(c, &storage, error);
    const mt_pickled *entries = status == 0 ? mt_pickled_get(mt_pickle_root(pickle), "state_dict_metadata") : NULL;
    if (status == 0 && (!entries || entries->kind != MT_PICKLED_DICT))
        status = mt_error_set(error, "%s: has no \"state_dict_metadata\", the list of the tensors; get it again", path);
    for (int64_t i = 0; status == 0 && i < entries->count; i++) {
        const char *name = mt_pickled_text(entries->items[2 * i]), *class = mt_pickled_class(entries->items[2 * i + 1]);
        if (name && strstr(name, ".gbuf_idx_")) c->has_buckets = true;
        if (!name || !class || !mt_text_ends_with(class, ".TensorStorageMetadata")) continue;
        if (mt_name_is_second(entries, name)) continue;
        if (tensors) status = mt_megatron_add_tensor(c, name, entries->items[2 * i + 1], weights, &storage, error);
        mt_param_state state;
        if (mt_state_of_name(&name, &state) && state != MT_STATE_WEIGHTS) c->has_optimizer = true;
    }
    if (status == 0 && c->has_buckets) status = mt_buckets_read(c, entries, tensors && !weights, &storage, error);
    free(storage.rows);
    mt_pickle_free(pickle);
    free(path);
    return status;
}

/* ---- torch: a file of each tensor, pipeline and expert rank */

/* Reads the file of a rank. */
typedef struct mt_rank_file {
    const mt_safetensors_file *file;
    mt_zip zip;
    mt_pickle *pickle;
} mt_rank_file;

static void mt_rank_file_close(mt_rank_file *rank) {
    mt_zip_free(&rank->zip);
    mt_pickle_free(rank->pickle);
    *rank = (mt_rank_file){0};
}

static int mt_rank_file_open(mt_megatron *c, mt_rank_file *rank, const char *name, mt_error *error) {
    *rank = (mt_rank_file){.file = mt_megatron_map(c, name, error)};
    if (!rank->file) return -1;
    return mt_megatron_read_archive(&rank->zip, &rank->pickle, rank->file->base, rank->file->bytes, rank->file->path,
                                    error);
}

static void mt_rank_file_name(char name[96], const mt_megatron_layout *l, int64_t tp, int64_t pp, int64_t ep) {
    int used = snprintf(name, 96, "mp_rank_%02lld", (long long)tp);
    if (l->pp > 1) used += snprintf(name + used, 96 - (size_t)used, "_%03lld", (long long)pp);
    if (l->ep > 1) used += snprintf(name + used, 96 - (size_t)used, "_%03lld", (long long)ep);
    snprintf(name + used, 96 - (size_t)used, "/model_optim_rng.pt");
}

/* The model of a virtual stage, or NULL with error. */
static const mt_pickled *mt_rank_model(const mt_rank_file *rank, const mt_megatron_layout *l, int64_t chunk,
                                       mt_error *error) {
    char key[32] = "model";
    if (l->chunks > 1) snprintf(key, sizeof key, "model%lld", (long long)chunk);
    const mt_pickled *model = mt_pickled_get(mt_pickle_root(rank->pickle), key);
    if (model && model->kind == MT_PICKLED_DICT && mt_pickled_get(model, "language_model"))
        model = NULL, mt_error_set(error,
                                   "%s: has the modules of Megatron-LM before Megatron-Core (language_model); "
                                   "convert it by Megatron-LM's tools/checkpoint/convert.py",
                                   rank->file->path);
    else if (!model || model->kind != MT_PICKLED_DICT)
        model = NULL,
        mt_error_set(error, "%s: has no \"%s\", the weights of its rank; get it again", rank->file->path, key);
    return model;
}

/* The decoder's layers of a virtual stage. */
static int64_t mt_model_layers(const mt_pickled *model) {
    int64_t count = 0;
    for (int64_t i = 0; i < model->count; i++) {
        const char *name = mt_pickled_text(model->items[2 * i]);
        mt_megatron_name_parts parts;
        if (name && mt_name_split(name, &parts) && strncmp(parts.text, "decoder.layers.", 15) == 0)
            count = mt_max(count, parts.layer + 1);
    }
    return count;
}

/* Finds the first layer of each virtual stage: they follow one another chunk by chunk. */
static int mt_megatron_find_layers(mt_megatron *c, mt_megatron_layout *l, mt_error *error) {
    int64_t counts[MT_MEGATRON_RANKS] = {0}, first = 0;
    for (int64_t pp = 0; pp < l->pp; pp++) {
        char name[96];
        mt_rank_file rank;
        mt_rank_file_name(name, l, 0, pp, 0);
        int status = mt_rank_file_open(c, &rank, name, error);
        for (int64_t chunk = 0; chunk < l->chunks && status == 0; chunk++) {
            const mt_pickled *model = mt_rank_model(&rank, l, chunk, error);
            if (model) counts[chunk * l->pp + pp] = mt_model_layers(model);
            status = model ? 0 : -1;
        }
        mt_rank_file_close(&rank);
        if (status != 0) return -1;
    }
    for (int64_t i = 0; i < l->chunks * l->pp; first += counts[i++]) l->first_layer[i] = first;
    return 0;
}

/* The experts of a rank's layer. */
static int64_t mt_model_experts(const mt_pickled *model) {
    int64_t count = 0;
    for (int64_t i = 0; i < model->count; i++) {
        const char *name = mt_pickled_text(model->items[2 * i]);
        mt_megatron_name_parts parts;
        if (name && mt_name_split(name, &parts)) count = mt_max(count, parts.expert + 1);
    }
    return count;
}

/* Adds a rank's part of a matrix, of the tensor's shape. With a gate, each rank has its rows of the gate, then those of
 * the other half. Sets the matrix's size. */
static int mt_megatron_add_part(mt_megatron *c, const mt_megatron_layout *l, mt_matrix_key *matrix, int64_t tp,
                                const mt_torch_tensor *tensor, mt_stored_values values, mt_error *error) {
    int64_t rows = tensor->shape[0], cols = tensor->num_dims > 1 ? tensor->shape[1] : 1;
    mt_megatron_cut cut = mt_megatron_cut_of(matrix->name);
    mt_rectangle part = {0, rows, 0, cols};
    matrix->rows = cut == MT_MEGATRON_ROWS ? rows * l->tp : rows;
    matrix->cols = cut == MT_MEGATRON_COLS ? cols * l->tp : cols;
    if (cut == MT_MEGATRON_WHOLE) return tp > 0 ? 0 : mt_megatron_add(c, matrix, part, values, error);
    bool gated = l->gated && (strstr(matrix->name, ".linear_fc1.weight") || strstr(matrix->name, ".linear_fc1.bias"));
    int64_t halves = gated ? 2 : 1;
    if (rows % halves != 0)
        return mt_error_set(error, "%s: \"%.120s\" has an odd number of rows, and a gate needs two halves", values.path,
                            matrix->name);
    int64_t bytes = rows / halves * cols * mt_dtype_size(values.dtype);
    if (cut == MT_MEGATRON_COLS) part.col = tp * cols;
    int status = 0;
    for (int64_t half = 0; half < halves && status == 0; half++) {
        part.rows = rows / halves;
        if (cut == MT_MEGATRON_ROWS) part.row = half * (matrix->rows / halves) + tp * part.rows;
        status = mt_megatron_add(c, matrix, part, values, error);
        values.data += bytes;
    }
    return status;
}

/* Adds the tensors of one virtual stage of a rank. */
static int mt_megatron_add_stage(mt_megatron *c, const mt_megatron_layout *l, const mt_rank_file *rank, int64_t chunk,
                                 int64_t tp, int64_t pp, int64_t ep, mt_error *error) {
    const mt_pickled *model = mt_rank_model(rank, l, chunk, error);
    if (!model) return -1;
    int64_t experts = mt_model_experts(model);
    bool first = chunk == 0 && pp == 0;
    for (int64_t i = 0; i < model->count; i++) {
        const char *name = mt_pickled_text(model->items[2 * i]);
        mt_torch_tensor tensor;
        mt_megatron_name_parts parts;
        if (!name || strstr(name, "_extra_state") || strstr(name, "inv_freq")) continue;
        if (!mt_pickled_tensor(model->items[2 * i + 1], &tensor) || !mt_name_split(name, &parts)) continue;
        if (tensor.num_dims < 1 || tensor.num_dims > 2 || mt_dtype_size(tensor.dtype) < 2) continue;
        if (tensor.dtype != MT_F32 && tensor.dtype != MT_BF16 && tensor.dtype != MT_F16 && tensor.dtype != MT_F64)
            continue;
        bool of_expert = parts.expert >= 0;
        if (ep > 0 && !of_expert) continue; // the same on every expert rank
        bool embeds = strncmp(parts.text, "embedding.", 10) == 0;
        if (embeds && !first) continue; // a copy for the output layer
        mt_zip_entry holds;
        const void *data = mt_megatron_tensor_data(&rank->zip, &tensor, &holds, rank->file->path, name, error);
        if (!data) return -1;
        mt_megatron_hold(c, &holds, rank->file->path);
        bool decodes = strncmp(parts.text, "decoder.layers.", 15) == 0;
        int64_t layer = parts.layer + (decodes ? l->first_layer[chunk * l->pp + pp] : 0);
        mt_matrix_key matrix = {.name = parts.text, .layer = layer, .state = MT_STATE_WEIGHTS};
        matrix.expert = of_expert ? parts.expert + ep * experts : -1;
        mt_stored_values values = {data, tensor.dtype, rank->file->path};
        if (mt_megatron_add_part(c, l, &matrix, tp, &tensor, values, error) != 0) return -1;
    }
    return 0;
}

static int mt_megatron_check_layout(const mt_megatron *c, const mt_megatron_layout *l, const mt_pickled *args,
                                    mt_error *error) {
    if (!args)
        return mt_error_set(error,
                            "%s: has no arguments of its run (args), which say how its ranks cut the model; "
                            "save it by Megatron-LM",
                            c->folder);
    if (l->pp * l->chunks > MT_MEGATRON_RANKS)
        return mt_error_set(error, "%s: has over %d virtual stages", c->folder, MT_MEGATRON_RANKS);
    int64_t of_experts = mt_args_int(args, "expert_tensor_parallel_size", l->tp);
    if (mt_args_int(args, "num_experts", 0) > 0 && of_experts != l->tp)
        return mt_error_set(error,
                            "%s: its experts are cut over %lld tensor ranks and other layers over %lld; convert "
                            "it to torch_dist by Megatron-LM's --ckpt-convert-format",
                            c->folder, (long long)of_experts, (long long)l->tp);
    return 0;
}

/* Files of two ranks differ, at least in their parts of the matrices; experts may begin alike. */
static int mt_megatron_check_ranks(const mt_megatron *c, const mt_megatron_layout *l, mt_error *error) {
    if (l->ep > 1) return 0;
    for (int64_t i = 0; i < c->num_files; i++)
        for (int64_t k = 0; k < i; k++) {
            const mt_safetensors_file *a = &c->files[k], *b = &c->files[i];
            if (a->bytes == b->bytes && memcmp(a->base, b->base, (size_t)a->bytes) == 0)
                return mt_error_set(error, "%s: is the same file as %s; copy each rank's own", b->path, a->path);
        }
    return 0;
}

static int mt_megatron_open_torch(mt_megatron *c, bool tensors, mt_error *error) {
    mt_megatron_layout l = {.tp = 1, .pp = 1, .ep = 1, .chunks = 1};
    mt_rank_file rank;
    const char *first = mt_folder_has(c->folder, "mp_rank_00")       ? "mp_rank_00/model_optim_rng.pt"
                        : mt_folder_has(c->folder, "mp_rank_00_000") ? "mp_rank_00_000/model_optim_rng.pt"
                                                                     : "mp_rank_00_000_000/model_optim_rng.pt";
    int status = mt_rank_file_open(c, &rank, first, error);
    c->common_zip = rank.zip, c->common = rank.pickle;
    if (status != 0) return -1;
    c->common_state = mt_pickle_root(c->common);
    if (mt_pickled_get(c->common_state, "optimizer")) c->other_optimizer = "torch";
    if (!tensors) return 0;
    const mt_pickled *args = mt_megatron_args(c);
    l.tp = mt_args_int(args, "tensor_model_parallel_size", 1),
    l.pp = mt_args_int(args, "pipeline_model_parallel_size", 1);
    l.ep = mt_args_int(args, "expert_model_parallel_size", 1);
    l.chunks = mt_args_int(args, "virtual_pipeline_model_parallel_size", 1);
    l.gated = mt_args_true(args, "swiglu") || mt_args_true(args, "geglu") || mt_args_true(args, "quick_geglu");
    if (mt_megatron_check_layout(c, &l, args, error) != 0 || mt_megatron_find_layers(c, &l, error) != 0) return -1;
    for (int64_t pp = 0; pp < l.pp; pp++)
        for (int64_t tp = 0; tp < l.tp; tp++)
            for (int64_t ep = 0; ep < l.ep && status == 0; ep++) {
                char name[96];
                mt_rank_file_name(name, &l, tp, pp, ep);
                status = mt_rank_file_open(c, &rank, name, error);
                for (int64_t chunk = 0; chunk < l.chunks && status == 0; chunk++)
                    status = mt_megatron_add_stage(c, &l, &rank, chunk, tp, pp, ep, error);
                mt_rank_file_close(&rank);
            }
    return status == 0 ? mt_megatron_check_ranks(c, &l, error) : -1;
}

/* ---- */

const char *mt_megatron_format(const char *folder) {
    if (mt_folder_has(folder, ".metadata") || mt_folder_has(folder, "common.pt")) return "torch_dist";
    if (mt_folder_has(folder, "mp_rank_00") || mt_folder_has(folder, "mp_rank_00_000") ||
        mt_folder_has(folder, "mp_rank_00_000_000"))
        return "torch";
    return NULL;
}

/* Element (row, col) of a matrix in the type of its file, as a float; false: in no piece, or of another type. */
static bool mt_matrix_element(const mt_megatron_matrix *matrix, int64_t row, int64_t col, float *value,
                              mt_dtype *dtype) {
    for (int64_t i = 0; matrix && i < matrix->count; i++) {
        const mt_megatron_piece *piece = &matrix->pieces[i];
        int64_t r = row - piece->part.row, k = col - piece->part.col;
        if (r < 0 || r >= piece->part.rows || k < 0 || k >= piece->part.cols) continue;
        *dtype = piece->tensor.dtype;
        const char *at = (const char *)piece->tensor.data + (r * piece->part.cols + k) * mt_dtype_size(*dtype);
        uint16_t half;
        if (*dtype == MT_F32)
            memcpy(value, at, 4);
        else if (mt_dtype_is_half(*dtype))
            memcpy(&half, at, 2), *value = mt_half_to_f32(half, *dtype);
        else
            return false;
        return true;
    }
    return false;
}

/* True if master weights in buckets, rounded, are the weights of the folder, at the first elements of every piece:
 * parameters in another order would stand out. Else an error. */
static bool mt_buckets_match(const mt_megatron *c, mt_error *error) {
    enum { COMPARED = 16 };
    mt_megatron *weights;
    if (mt_megatron_open(&weights, c->folder, true, error) != 0) return false;
    bool equal = c->num_matrices > 0;
    for (int64_t i = 0; i < c->num_matrices && equal; i++) {
        const mt_megatron_matrix *master = &c->matrices[i];
        if (master->state != MT_STATE_MASTER) continue;
        const mt_megatron_matrix *own =
            mt_megatron_find(weights, MT_STATE_WEIGHTS, master->name, master->layer, master->expert);
        for (int64_t k = 0; k < master->count && equal; k++) {
            mt_rectangle part = master->pieces[k].part;
            for (int64_t col = part.col; col < part.col + mt_min(part.cols, COMPARED) && equal; col++) {
                float kept, wanted;
                mt_dtype of_kept, of_wanted;
                equal = mt_matrix_element(master, part.row, col, &kept, &of_kept) &&
                        mt_matrix_element(own, part.row, col, &wanted, &of_wanted);
                if (equal && mt_dtype_is_half(of_wanted))
                    kept = mt_half_to_f32(mt_f32_to_half(kept, of_wanted), of_wanted);
                equal = equal && (kept == wanted || (kept != kept && wanted != wanted));
            }
        }
        if (!equal)
            mt_error_set(
                error,
                "%s: the optimizer's master weights of \"%.120s\" are not its weights: its buckets have another "
                "order of parameters than is known here; save it by Megatron-LM with "
                "--dist-ckpt-optim-fully-reshardable, or continue with a new optimizer by --no-load-optim",
                c->folder, master->name);
    }
    mt_megatron_close(weights);
    return equal;
}

static int mt_megatron_open_once(mt_megatron **checkpoint, const char *folder, bool tensors, bool weights,
                                 int64_t bucket_order, bool *misplaced, mt_error *error) {
    mt_megatron *c = mt_calloc(sizeof *c);
    c->folder = mt_strdup(folder);
    c->bucket_order = bucket_order, c->bucket_step = -1;
    const char *format = mt_megatron_format(folder);
    int status;
    if (!format)
        status = mt_error_set(error, "%s: holds no checkpoint of Megatron-LM", folder);
    else if (strcmp(format, "torch_dist") == 0)
        status = mt_megatron_open_dist(c, tensors, weights, error);
    else
        status = mt_megatron_open_torch(c, tensors && weights, error);
    if (status == 0 && tensors) status = mt_megatron_group(c, error);
    *misplaced = c->misplaced;
    if (status == 0)
        *checkpoint = c;
    else
        mt_megatron_close(c), *checkpoint = NULL;
    return status;
}

/* Opens a folder; the state in buckets by the order of parameters in which its master weights are the weights. */
static int mt_megatron_open_parts(mt_megatron **checkpoint, const char *folder, bool tensors, bool weights,
                                  mt_error *error) {
    bool misplaced;
    for (int64_t order = 0;; order++) {
        bool is_last = order + 1 == MT_BUCKET_ORDERS;
        int status = mt_megatron_open_once(checkpoint, folder, tensors, weights, order, &misplaced, error);
        if (status != 0 && misplaced && !is_last) continue;
        if (status != 0 || !tensors || weights || !(*checkpoint)->has_buckets) return status;
        if ((*checkpoint)->other_optimizer || mt_buckets_match(*checkpoint, error)) return 0;
        mt_megatron_close(*checkpoint), *checkpoint = NULL;
        if (is_last) return -1;
    }
}

int mt_megatron_open(mt_megatron **checkpoint, const char *folder, bool weights, mt_error *error) {
    return mt_megatron_open_parts(checkpoint, folder, true, weights, error);
}

int mt_megatron_open_common(mt_megatron **checkpoint, const char *folder, mt_error *error) {
    return mt_megatron_open_parts(checkpoint, folder, false, false, error);
}

void mt_megatron_close(mt_megatron *c) {
    if (!c) return;
    for (int64_t i = 0; i < c->num_found; i++) free(c->found[i].name);
    for (int64_t i = 0; i < c->num_files; i++) {
        if (c->files[i].mapped) mt_mapping_close(&(mt_mapping){c->files[i].base, c->files[i].bytes});
        free(c->files[i].path);
    }
    mt_pickle_free(c->common);
    mt_zip_free(&c->common_zip);
    free(c->files), free(c->found), free(c->held), free(c->pieces), free(c->matrices), free(c->folder);
    free(c);
}

const mt_safetensors_file *mt_megatron_files(const mt_megatron *c, int64_t *count) {
    *count = c->num_files;
    return c->files;
}

int64_t mt_megatron_count(const mt_megatron *c) {
    return c->num_matrices;
}

const mt_megatron_matrix *mt_megatron_get(const mt_megatron *c, int64_t index) {
    MT_CHECK(index >= 0 && index < c->num_matrices);
    return &c->matrices[index];
}

static int mt_matrix_compare(const void *a, const void *b) {
    const mt_megatron_matrix *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    if (order != 0) return order;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

const mt_megatron_matrix *mt_megatron_find(const mt_megatron *c, mt_param_state state, const char *name, int64_t layer,
                                           int64_t expert) {
    mt_megatron_matrix key = {.name = name, .layer = layer, .expert = expert, .state = state};
    if (c->num_matrices == 0) return NULL;
    return bsearch(&key, c->matrices, (size_t)c->num_matrices, sizeof key, mt_matrix_compare);
}

const mt_pickled *mt_megatron_args(const mt_megatron *c) {
    const mt_pickled *args = mt_pickled_get(c->common_state, "args");
    return args && args->kind == MT_PICKLED_OBJECT && args->items[2] ? args : NULL;
}

const mt_pickled *mt_megatron_schedule(const mt_megatron *c) {
    return mt_pickled_get(c->common_state, "opt_param_scheduler");
}

/* The updates by the optimizer: a number of its state, or of its groups of parameters. */
static bool mt_optimizer_updates(const mt_megatron *c, const mt_pickled *optimizer, int64_t *step) {
    const mt_pickled *inner = mt_pickled_get(optimizer, "optimizer"), *own = inner ? inner : optimizer;
    const mt_pickled *groups = mt_pickled_get(own, "param_groups");
    return mt_megatron_steps(c, mt_pickled_get(mt_pickled_get(own, "state"), "common_step"), step) ||
           mt_megatron_steps(c, mt_pickled_get(mt_pickled_item(groups, 0), "step"), step);
}

mt_megatron_run mt_megatron_read_run(const mt_megatron *c) {
    enum { MOST = 1000000000 };
    mt_megatron_run run = {.has_optimizer = c->has_optimizer, .other_optimizer = c->other_optimizer};
    const mt_pickled *args = mt_megatron_args(c);
    mt_pickled_int(mt_pickled_get(c->common_state, "iteration"), 0, MOST, &run.iteration);
    mt_pickled_int(mt_pickled_get(args, "consumed_train_samples"), 0, 1000ll * MOST, &run.consumed_train_samples);
    mt_pickled_int(mt_pickled_get(args, "consumed_valid_samples"), 0, 1000ll * MOST, &run.consumed_valid_samples);
    const mt_pickled *schedule = mt_pickled_get(c->common_state, "opt_param_scheduler");
    int64_t counted = run.consumed_train_samples;
    if (mt_pickled_int(mt_pickled_get(schedule, "num_steps"), 0, run.consumed_train_samples, &counted))
        run.skipped_samples = run.consumed_train_samples - counted;
    run.optimizer_step = run.iteration;
    if (!mt_optimizer_updates(c, mt_pickled_get(c->common_state, "optimizer"), &run.optimizer_step))
        run.optimizer_step = c->bucket_step >= 0 ? c->bucket_step : run.iteration;
    return run;
}
