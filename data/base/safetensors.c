/* safetensors.c: reads files of tensors, and the checksums of a folder's files. Invariant: nothing that a file says is
 * used before it was checked. The rules of the format are those of its own implementation (huggingface/safetensors,
 * safetensors/src/tensor.rs). */
#include "safetensors.h"

#include "file.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- headers: a file is the header's length in 8 bytes, the header in JSON, then the data, little-endian */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is used where it lies: little-endian");

enum { MT_MAX_HEADER_BYTES = 100000000, MT_MAX_TENSORS = 1 << 18, MT_MAX_DIMS = 8 };

struct mt_safetensors {
    int64_t num_files, count;
    mt_safetensors_file *files;
    mt_tensor_info *tensors; // by name
};

static int mt_format_error(mt_error *error, const char *path, const char *what) {
    return mt_error_set(error, "%s: not a whole safetensors file: %s; get it again", path, what);
}

static int mt_tensor_error(mt_error *error, const mt_tensor_info *tensor, const char *what) {
    return mt_error_set(error, "%s: not a valid safetensors file: tensor \"%.120s\" %s; get it again", tensor->file,
                        tensor->name, what);
}

/* The bytes of a shape, or -1 when they overflow 63 bits; a later dimension of 0 does not excuse that (as upstream). */
static int64_t mt_shape_bytes(const mt_tensor_info *tensor) {
    int64_t bytes = mt_dtype_size(tensor->dtype), elements = 1;
    for (int64_t i = 0; i < tensor->num_dims; i++)
        if (__builtin_mul_overflow(elements, tensor->shape[i], &elements)) return -1;
    return __builtin_mul_overflow(bytes, elements, &bytes) ? -1 : bytes;
}

/* Reads an array of whole numbers >= 0 into out[max]; returns its length, or -1. */
static int64_t mt_json_integers(const json_t *array, int64_t *out, int64_t max) {
    int64_t count = (int64_t)json_array_size(array);
    if (!json_is_array(array) || count > max) return -1;
    for (int64_t i = 0; i < count; i++)
        if (!mt_json_int(json_array_get(array, (size_t)i), 0, INT64_MAX, &out[i])) return -1;
    return count;
}

/* The type of a name, or -1. */
static int mt_dtype_parse(const char *name) {
    for (int dtype = 0; dtype < MT_NUM_DTYPES; dtype++)
        if (strcmp(name, mt_dtype_name((mt_dtype)dtype)) == 0) return dtype;
    return -1;
}

/* Parses one entry of the header; tensor->name and ->file are set. `data` [bytes] is the data of the file. */
static int mt_tensor_parse(mt_tensor_info *tensor, const json_t *entry, const unsigned char *data, int64_t bytes,
                           mt_error *error) {
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape");
    int64_t offsets[2];
    if (!dtype) return mt_tensor_error(error, tensor, "has no dtype");
    int parsed = mt_dtype_parse(dtype);
    if (parsed < 0) {
        char what[160];
        snprintf(what, sizeof what, "has dtype \"%.120s\", which is not known", dtype);
        return mt_tensor_error(error, tensor, what);
    }
    tensor->dtype = (mt_dtype)parsed;
    if (json_array_size(shape) > MT_MAX_DIMS) return mt_tensor_error(error, tensor, "has more than 8 dimensions");
    tensor->num_dims = mt_json_integers(shape, tensor->shape, MT_MAX_DIMS);
    if (tensor->num_dims < 0) return mt_tensor_error(error, tensor, "has no shape of whole numbers from 0 on");
    tensor->bytes = mt_shape_bytes(tensor);
    if (tensor->bytes < 0) return mt_tensor_error(error, tensor, "has a shape whose size overflows");
    if (mt_json_integers(json_object_get(entry, "data_offsets"), offsets, 2) != 2)
        return mt_tensor_error(error, tensor, "has no data_offsets of two whole numbers from 0 on");
    if (offsets[0] > offsets[1] || offsets[1] > bytes)
        return mt_tensor_error(error, tensor, "lies outside the file's data: the file is cut short or damaged");
    if (offsets[1] - offsets[0] != tensor->bytes)
        return mt_tensor_error(error, tensor, "has data_offsets that do not fit its dtype and shape");
    tensor->data = data + offsets[0];
    return 0;
}

static int mt_tensor_by_place(const void *a, const void *b) {
    const mt_tensor_info *x = a, *y = b;
    const char *x_start = x->data, *y_start = y->data;
    if (x_start != y_start) return x_start < y_start ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int mt_tensor_by_name(const void *a, const void *b) {
    return strcmp(((const mt_tensor_info *)a)->name, ((const mt_tensor_info *)b)->name);
}

/* Tensors must follow one another from the first byte of the data to the last: bytes in no tensor, or in two, have no
 * defined meaning. */
static int mt_tensors_tile(mt_tensor_info *tensors, int64_t count, const unsigned char *data, int64_t bytes,
                           const char *path, mt_error *error) {
    const unsigned char *end = data;
    qsort(tensors, (size_t)count, sizeof *tensors, mt_tensor_by_place);
    for (int64_t i = 0; i < count; i++) {
        if (tensors[i].data != end)
            return mt_tensor_error(error, &tensors[i], "does not begin where the one before it ends");
        end += tensors[i].bytes;
    }
    if (end != data + bytes) return mt_format_error(error, path, "there are bytes after the last tensor");
    return 0;
}

/* Counts the brackets of a header. True when it has more than tensors can have: an entry takes three and at least 48
 * bytes. Parsed brackets take hundreds of bytes each, so a small file could take much memory. */
static bool mt_header_is_dense(const char *text, int64_t bytes, int64_t *brackets) {
    *brackets = 0;
    bool in_string = false;
    for (int64_t i = 0; i < bytes; i++) {
        if (text[i] == '"') in_string = !in_string;
        if (text[i] == '\\' && in_string) i++;
        if (!in_string && (text[i] == '{' || text[i] == '[')) ++*brackets;
    }
    return *brackets * 16 > bytes + 64;
}

/* The length of the header; -1 with error where this is no safetensors file. */
static int64_t mt_header_length(const mt_safetensors_file *file, mt_error *error) {
    static const char lfs[] = "version https://git-lfs";
    uint64_t length;
    if (file->bytes >= (int64_t)sizeof lfs && memcmp(file->base, lfs, sizeof lfs - 1) == 0)
        return mt_error_set(error, "%s: only a git-lfs pointer to the file; fetch it: git lfs pull", file->path);
    if (file->bytes < (int64_t)sizeof length) return mt_format_error(error, file->path, "it is under 8 bytes long");
    memcpy(&length, file->base, sizeof length);
    if (length > MT_MAX_HEADER_BYTES)
        return mt_format_error(error, file->path, "its first 8 bytes claim a header of over 100,000,000 bytes");
    if (length > (uint64_t)file->bytes - sizeof length)
        return mt_format_error(error, file->path, "it ends inside its header");
    if (length == 0) return mt_format_error(error, file->path, "its header is empty");
    int64_t brackets; // two of the header and its metadata, three of a tensor
    if (mt_header_is_dense((const char *)file->base + sizeof length, (int64_t)length, &brackets))
        return mt_format_error(error, file->path, "its header has too many brackets for its length");
    if (brackets > 2 + 3 * MT_MAX_TENSORS)
        return mt_error_set(error, "%s: its header lists over %d tensors, more than any model has; get it again",
                            file->path, MT_MAX_TENSORS);
    return (int64_t)length;
}

/* `__metadata__` maps strings to strings. */
static int mt_metadata_check(const json_t *metadata, const char *path, mt_error *error) {
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) return mt_format_error(error, path, "its __metadata__ is no object");
    json_object_foreach((json_t *)metadata, key, value) {
        if (!json_is_string(value)) return mt_format_error(error, path, "its __metadata__ holds more than strings");
    }
    return 0;
}

/* Appends the tensors of a parsed header, not yet sorted by name. */
static int mt_header_read(mt_safetensors *set, const mt_safetensors_file *file, int64_t header_bytes, json_t *header,
                          mt_error *error) {
    const unsigned char *data = file->base + 8 + header_bytes;
    int64_t first = set->count, bytes = file->bytes - 8 - header_bytes;
    int64_t capacity = first + (int64_t)json_object_size(header);
    const char *name;
    json_t *entry;
    set->tensors = mt_realloc(set->tensors, capacity * (int64_t)sizeof(mt_tensor_info));
    json_object_foreach(header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            if (mt_metadata_check(entry, file->path, error) != 0) return -1;
            continue;
        }
        mt_tensor_info *tensor = &set->tensors[set->count++];
        *tensor = (mt_tensor_info){.name = mt_strdup(name), .file = file->path};
        if (mt_tensor_parse(tensor, entry, data, bytes, error) != 0) return -1;
    }
    return mt_tensors_tile(set->tensors + first, set->count - first, data, bytes, file->path, error);
}

/* Adds a file to a set, which owns it from then on, also when this fails. */
static int mt_safetensors_add(mt_safetensors *set, mt_safetensors_file file, mt_error *error) {
    set->files = mt_realloc(set->files, (set->num_files + 1) * (int64_t)sizeof file);
    set->files[set->num_files++] = file;
    int64_t header_bytes = mt_header_length(&file, error);
    if (header_bytes < 0) return -1;
    json_t *header = mt_json_parse((const char *)file.base + 8, header_bytes, JSON_REJECT_DUPLICATES, file.path, error);
    if (!header) return -1;
    int status = mt_header_read(set, &file, header_bytes, header, error);
    json_decref(header);
    return status;
}

static int mt_safetensors_map(mt_safetensors *set, const char *path, mt_error *error) {
    mt_mapping mapping;
    if (mt_mapping_open(&mapping, path, error) != 0) return -1;
    mt_safetensors_file file = {
        .path = mt_strdup(path), .base = mapping.bytes, .bytes = mapping.size, .mapped = mapping.bytes != NULL};
    return mt_safetensors_add(set, file, error);
}

void mt_safetensors_sort(mt_safetensors *set) {
    if (set->count > 0) qsort(set->tensors, (size_t)set->count, sizeof *set->tensors, mt_tensor_by_name);
}

void mt_safetensors_replace(mt_safetensors *set, int64_t index, const mt_tensor_info *parts, int64_t count) {
    MT_CHECK(index >= 0 && index < set->count && count > 0);
    free((char *)set->tensors[index].name);
    set->tensors[index] = parts[0];
    set->tensors = mt_realloc(set->tensors, (set->count + count - 1) * (int64_t)sizeof *set->tensors);
    memcpy(set->tensors + set->count, parts + 1, (size_t)(count - 1) * sizeof *parts);
    set->count += count - 1;
}

/* Sorts the tensors and returns the set in *out; closes it when reading failed. */
static int mt_safetensors_finish(mt_safetensors **out, mt_safetensors *set, int status) {
    if (status != 0) {
        mt_safetensors_close(set);
        return -1;
    }
    mt_safetensors_sort(set);
    *out = set;
    return 0;
}

int mt_safetensors_open(mt_safetensors **set, const char *path, mt_error *error) {
    mt_safetensors *opened = mt_calloc(sizeof *opened);
    return mt_safetensors_finish(set, opened, mt_safetensors_map(opened, path, error));
}

int mt_safetensors_open_memory(mt_safetensors **set, const void *data, int64_t bytes, const char *name,
                               mt_error *error) {
    mt_safetensors *opened = mt_calloc(sizeof *opened);
    mt_safetensors_file file = {.path = mt_strdup(name), .base = data, .bytes = bytes};
    return mt_safetensors_finish(set, opened, mt_safetensors_add(opened, file, error));
}

void mt_safetensors_close(mt_safetensors *set) {
    if (!set) return;
    for (int64_t i = 0; i < set->count; i++) free((char *)set->tensors[i].name);
    for (int64_t i = 0; i < set->num_files; i++) {
        if (set->files[i].mapped) mt_mapping_close(&(mt_mapping){set->files[i].base, set->files[i].bytes});
        free(set->files[i].path);
    }
    free(set->tensors);
    free(set->files);
    free(set);
}

int64_t mt_safetensors_count(const mt_safetensors *set) {
    return set->count;
}

const mt_tensor_info *mt_safetensors_get(const mt_safetensors *set, int64_t index) {
    MT_CHECK(index >= 0 && index < set->count);
    return &set->tensors[index];
}

int64_t mt_safetensors_num_files(const mt_safetensors *set) {
    return set->num_files;
}

const mt_safetensors_file *mt_safetensors_get_file(const mt_safetensors *set, int64_t index) {
    MT_CHECK(index >= 0 && index < set->num_files);
    return &set->files[index];
}

const mt_tensor_info *mt_safetensors_find(const mt_safetensors *set, const char *name) {
    mt_tensor_info key = {.name = name};
    if (set->count == 0) return NULL;
    return bsearch(&key, set->tensors, (size_t)set->count, sizeof key, mt_tensor_by_name);
}

/* ---- folders */

/* True for the name of a file in the folder itself. */
static bool mt_is_plain_name(const char *name) {
    if (!name || !*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return false;
    while (*name && !iscntrl((unsigned char)*name)) name++;
    return *name == 0;
}

/* "FOLDER/STEM SUFFIX" to free. */
static char *mt_path_stem(const char *folder, const char *stem, const char *suffix) {
    char *name = mt_malloc((int64_t)(strlen(stem) + strlen(suffix)) + 1);
    sprintf(name, "%s%s", stem, suffix);
    char *path = mt_path_join(folder, name);
    free(name);
    return path;
}

/* True if a set that is being opened has the file. */
static bool mt_safetensors_has_file(const mt_safetensors *set, const char *path) {
    for (int64_t i = 0; i < set->num_files; i++)
        if (strcmp(set->files[i].path, path) == 0) return true;
    return false;
}

/* Opens every file that the index names, each once. */
static int mt_index_open_files(mt_safetensors *set, const char *folder, const char *index_path, json_t *map,
                               mt_error *error) {
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value) {
        const char *part = json_string_value(value);
        if (!mt_is_plain_name(part))
            return mt_error_set(error, "%s: weight_map gives tensor \"%.120s\" no plain file name; get it again",
                                index_path, name);
        char *path = mt_path_join(folder, part);
        int status = mt_safetensors_has_file(set, path) ? 0 : mt_safetensors_map(set, path, error);
        free(path);
        if (status != 0) return -1;
    }
    return 0;
}

/* The index and the files must name the same tensors in the same places. */
static int mt_index_check(const mt_safetensors *set, const char *folder, const char *index_path, json_t *map,
                          mt_error *error) {
    size_t prefix = strlen(folder) + 1;
    for (int64_t i = 0; i < set->count; i++) {
        const mt_tensor_info *tensor = &set->tensors[i];
        const char *part = json_string_value(json_object_get(map, tensor->name));
        if (!part || strcmp(part, tensor->file + prefix) != 0)
            return mt_error_set(error, "%s: holds tensor \"%.120s\", which %s places %s%s; get both files again",
                                tensor->file, tensor->name, index_path, part ? "in " : "nowhere", part ? part : "");
    }
    if ((int64_t)json_object_size(map) == set->count) return 0;
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value) {
        if (mt_safetensors_find(set, name)) continue;
        return mt_error_set(error, "%s: places tensor \"%.120s\" in %s, which does not hold it; get both files again",
                            index_path, name, json_string_value(value));
    }
    return 0;
}

static int mt_index_read(mt_safetensors *set, const char *folder, const char *index_path, mt_error *error) {
    json_t *index = mt_json_read(index_path, error);
    if (!index) return -1;
    json_t *map = json_object_get(index, "weight_map");
    int status = json_is_object(map)
                     ? mt_index_open_files(set, folder, index_path, map, error)
                     : mt_error_set(error, "%s: has no object weight_map; get the file again", index_path);
    mt_safetensors_sort(set); // for mt_safetensors_find
    if (status == 0) status = mt_index_check(set, folder, index_path, map, error);
    json_decref(index);
    return status;
}

int mt_safetensors_open_folder(mt_safetensors **set, const char *folder, const char *stem, mt_error *error) {
    char *whole = mt_path_stem(folder, stem, ".safetensors");
    char *index = mt_path_stem(folder, stem, ".safetensors.index.json");
    mt_safetensors *opened = mt_calloc(sizeof *opened);
    int status;
    if (access(whole, F_OK) == 0) // before an index, as transformers does
        status = mt_safetensors_map(opened, whole, error);
    else if (access(index, F_OK) == 0)
        status = mt_index_read(opened, folder, index, error);
    else if (mt_folder_has(folder, "pytorch_model.bin") || mt_folder_has(folder, "pytorch_model.bin.index.json"))
        status = mt_error_set(error,
                              "%s: holds its weights as pytorch_model.bin only; save them as safetensors first "
                              "(save_pretrained of transformers does)",
                              folder);
    else if ((status = mt_link_check(folder, strrchr(whole, '/') + 1, error)) == 0 &&
             (status = mt_link_check(folder, strrchr(index, '/') + 1, error)) == 0)
        status = mt_error_set(
            error, "%s: has neither %s.safetensors nor %s.safetensors.index.json; get the folder again, whole", folder,
            stem, stem);
    free(whole);
    free(index);
    return mt_safetensors_finish(set, opened, status);
}

/* ---- checksums: CRC-32C (Castagnoli et al., "Optimization of cyclic redundancy-check codes with 24 and 32 parity
 * bits"; RFC 3720, appendix B.4). Blocks are of files, not of tensors, so headers count too and a reader checks the
 * block it has without the rest. A CRC is linear, so ranks that write parts of one block each sum their own. */

static const uint32_t mt_crc_polynomial = 0x82f63b78; // x^31 is its lowest bit

/* The state of the CRC after eight more bytes, a little-endian word. */
static inline uint32_t mt_crc_word(uint32_t state, uint64_t word) {
#if defined(__SSE4_2__)
    return (uint32_t)__builtin_ia32_crc32di(state, word);
#elif defined(__ARM_FEATURE_CRC32)
    return __builtin_aarch64_crc32cx(state, word);
#else
    static const uint32_t of_nibble[16] = {0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
                                           0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
                                           0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75};
    for (int i = 0; i < 16; i++, word >>= 4) state = (state >> 4) ^ of_nibble[(state ^ word) & 15];
    return state;
#endif
}

static uint32_t mt_crc_byte(uint32_t state, unsigned char byte) {
    state ^= byte;
    for (int i = 0; i < 8; i++) state = (state >> 1) ^ (state & 1 ? mt_crc_polynomial : 0);
    return state;
}

/* The product of two polynomials modulo that of the CRC. */
static uint32_t mt_crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a >> 31) product ^= b;
        b = (b >> 1) ^ (b & 1 ? mt_crc_polynomial : 0);
    }
    return product;
}

/* The state after `bytes` more zero bytes. */
static uint32_t mt_crc_zeros(uint32_t state, int64_t bytes) {
    for (uint32_t power = 1u << 23; bytes > 0; bytes >>= 1) { // x^8, squared again and again
        if (bytes & 1) state = mt_crc_multiply(state, power);
        power = mt_crc_multiply(power, power);
    }
    return state;
}

/* The state after more bytes. Three parts at once, because each CRC instruction waits for the one before it. */
static uint32_t mt_crc_update(uint32_t state, const void *data, int64_t bytes) {
    enum { PART = 16384 };
    const unsigned char *from = data;
    uint32_t once = bytes >= 3 * PART ? mt_crc_zeros(1u << 31, PART) : 0, twice = mt_crc_multiply(once, once);
    uint64_t word[3];
    for (; bytes >= 3 * PART; bytes -= 3 * PART, from += 3 * PART) {
        uint32_t second = 0, third = 0;
        for (int64_t i = 0; i < PART; i += 8) {
            for (int k = 0; k < 3; k++) memcpy(&word[k], from + k * PART + i, 8);
            state = mt_crc_word(state, word[0]);
            second = mt_crc_word(second, word[1]);
            third = mt_crc_word(third, word[2]);
        }
        state = mt_crc_multiply(state, twice) ^ mt_crc_multiply(second, once) ^ third;
    }
    for (; bytes >= 8; bytes -= 8, from += 8) {
        memcpy(word, from, 8);
        state = mt_crc_word(state, word[0]);
    }
    while (bytes-- > 0) state = mt_crc_byte(state, *from++);
    return state;
}

uint32_t mt_crc32c(const void *data, int64_t bytes) {
    return ~mt_crc_update(~0u, data, bytes);
}

/* The sum of a block is the exclusive or of its parts' contributions, which threads add atomically. */
void mt_checksums_add(mt_file_checksums *file, int64_t offset, const void *data, int64_t bytes) {
    const char *from = data;
    MT_CHECK(offset + bytes <= file->bytes);
    for (int64_t block = offset / MT_SUM_BLOCK, n; bytes > 0; block++, offset += n, from += n, bytes -= n) {
        int64_t end = mt_min((block + 1) * MT_SUM_BLOCK, file->bytes);
        n = mt_min(bytes, end - offset);
        uint32_t sum = mt_crc_zeros(mt_crc_update(0, from, n), end - offset - n);
        __atomic_fetch_xor(&file->sums[block], sum, __ATOMIC_RELAXED);
    }
}

/* The lines of one block are summed together: each moves the sum on by the same number of bytes. */
void mt_checksums_add_lines(mt_file_checksums *file, int64_t offset, int64_t pitch, const char *data, int64_t bytes,
                            int64_t lines) {
    uint32_t step = mt_crc_zeros(1u << 31, pitch);
    for (int64_t i = 0; i < lines;) {
        int64_t at = offset + i * pitch, block = at / MT_SUM_BLOCK;
        int64_t end = mt_min((block + 1) * MT_SUM_BLOCK, file->bytes);
        int64_t count = at + bytes > end ? 0 : mt_min((end - at - bytes) / pitch + 1, lines - i); // lie in the block
        if (count < 2) {
            mt_checksums_add(file, at, data + i++ * bytes, bytes);
            continue;
        }
        uint32_t sum = 0;
        for (int64_t k = 0; k < count; k++, i++)
            sum = mt_crc_multiply(sum, step) ^ mt_crc_update(0, data + i * bytes, bytes);
        sum = mt_crc_zeros(sum, end - (at + (count - 1) * pitch + bytes));
        __atomic_fetch_xor(&file->sums[block], sum, __ATOMIC_RELAXED);
    }
}

/* From the linear part to CRC-32C, which starts with ones and ends inverted. */
void mt_checksums_finish(mt_file_checksums *file) {
    for (int64_t block = 0; block < file->count; block++)
        file->sums[block] ^= ~mt_crc_zeros(~0u, mt_min(MT_SUM_BLOCK, file->bytes - block * MT_SUM_BLOCK));
}

mt_file_checksums *mt_checksums_append(mt_checksums *sums, const char *name, int64_t bytes) {
    sums->files = mt_realloc(sums->files, (sums->count + 1) * (int64_t)sizeof(mt_file_checksums));
    mt_file_checksums *file = &sums->files[sums->count++];
    *file = (mt_file_checksums){.bytes = bytes, .count = (bytes + MT_SUM_BLOCK - 1) / MT_SUM_BLOCK};
    snprintf(file->name, sizeof file->name, "%s", name);
    file->sums = mt_calloc(mt_max(file->count, 1) * 4);
    return file;
}

void mt_checksums_free(mt_checksums *sums) {
    for (int64_t i = 0; i < sums->count; i++) free(sums->files[i].sums);
    free(sums->files);
    *sums = (mt_checksums){0};
}

const mt_file_checksums *mt_checksums_find(const mt_checksums *sums, const char *name) {
    for (int64_t i = 0; i < sums->count; i++)
        if (strcmp(sums->files[i].name, name) == 0) return &sums->files[i];
    return NULL;
}

char *mt_checksums_print(const mt_checksums *sums) {
    int64_t room = 256, used;
    for (int64_t i = 0; i < sums->count; i++) room += 400 + 12 * sums->files[i].count;
    char *text = mt_malloc(room);
    used = sprintf(text, "{\"algorithm\": \"CRC-32C\", \"block_bytes\": %d, \"files\": {", MT_SUM_BLOCK);
    for (int64_t i = 0; i < sums->count; i++) {
        const mt_file_checksums *file = &sums->files[i];
        used += sprintf(text + used, "%s\n\"%s\": {\"bytes\": %lld, \"blocks\": [", i > 0 ? "," : "", file->name,
                        (long long)file->bytes);
        for (int64_t block = 0; block < file->count; block++)
            used += sprintf(text + used, "%s\"%08x\"", block > 0 ? "," : "", file->sums[block]);
        used += sprintf(text + used, "]}");
    }
    used += sprintf(text + used, "},\n");
    sprintf(text + used, "\"before_this_line\": \"%08x\"}\n", mt_crc32c(text, used));
    return text;
}

/* Parses a sum of eight hexadecimal digits; false if it is none. */
static bool mt_sum_parse(const json_t *item, uint32_t *sum) {
    const char *text = json_string_value(item);
    if (!text || strlen(text) != 8 || strspn(text, "0123456789abcdef") != 8) return false;
    *sum = (uint32_t)strtoul(text, NULL, 16);
    return true;
}

/* True for the name of a file in the folder, or in a folder of it. */
static bool mt_is_saved_name(const char *name) {
    char first[256];
    const char *slash = strchr(name, '/');
    if (!slash) return mt_is_plain_name(name);
    snprintf(first, sizeof first, "%.*s", (int)(slash - name), name);
    return mt_is_plain_name(first) && mt_is_plain_name(slash + 1);
}

static int mt_checksums_parse(mt_checksums *sums, const json_t *json, const char *path, mt_error *error) {
    const char *name;
    json_t *entry;
    const char *algorithm = json_string_value(json_object_get(json, "algorithm"));
    bool good = json_integer_value(json_object_get(json, "block_bytes")) == MT_SUM_BLOCK && algorithm &&
                strcmp(algorithm, "CRC-32C") == 0;
    json_object_foreach(json_object_get(json, "files"), name, entry) {
        const json_t *blocks = json_object_get(entry, "blocks");
        int64_t bytes;
        good = good && mt_is_saved_name(name) && strlen(name) < 256 &&
               mt_json_int(json_object_get(entry, "bytes"), 0, INT64_MAX - MT_SUM_BLOCK, &bytes) &&
               (int64_t)json_array_size(blocks) == (bytes + MT_SUM_BLOCK - 1) / MT_SUM_BLOCK;
        if (!good) break;
        mt_file_checksums *file = mt_checksums_append(sums, name, bytes);
        for (int64_t block = 0; block < file->count; block++)
            good = mt_sum_parse(json_array_get(blocks, (size_t)block), &file->sums[block]) && good;
    }
    if (good && sums->count > 0) return 0;
    mt_checksums_free(sums);
    return mt_error_set(error, "%s: damaged: no sums of blocks are in it", path);
}

int mt_checksums_read(mt_checksums *sums, const char *folder, mt_error *error) {
    *sums = (mt_checksums){0};
    if (!mt_folder_has(folder, "checksums.json")) return 0;
    int64_t bytes;
    uint32_t sum = 0;
    char *path = mt_path_join(folder, "checksums.json");
    char *text = mt_file_read(path, MT_MAX_HEADER_BYTES, &bytes, error);
    json_t *json = text ? mt_json_parse(text, bytes, JSON_REJECT_DUPLICATES, path, error) : NULL;
    const char *last = json ? strstr(text, "\n\"before_this_line\"") : NULL;
    bool good = last && text + bytes - (last + 1) == (int64_t)sizeof "\"before_this_line\": \"00000000\"}\n" - 1 &&
                mt_sum_parse(json_object_get(json, "before_this_line"), &sum) &&
                sum == mt_crc32c(text, last + 1 - text);
    int status = !text  ? -1
                 : good ? mt_checksums_parse(sums, json, path, error)
                        : mt_error_set(error, "%s: damaged: its own checksum does not fit", path);
    json_decref(json);
    free(text);
    free(path);
    return status;
}

int mt_checksums_damaged(mt_error *error, const char *folder, const char *name, int64_t block, int64_t bytes) {
    int64_t first = block * MT_SUM_BLOCK;
    return mt_error_set(error, "%s/%s: damaged: bytes %lld to %lld differ from the saved ones (CRC-32C)", folder, name,
                        (long long)first, (long long)mt_min(first + MT_SUM_BLOCK, bytes) - 1);
}

/* True for a file of the optimizer's states. */
static bool mt_is_optimizer_file(const char *name) {
    return strncmp(name, "optimizer.", 10) == 0 || strncmp(name, "optimizer-", 10) == 0;
}

/* A file of the kinds that a checkpoint is read from, without a sum: it came from elsewhere. */
typedef struct mt_unlisted {
    const mt_checksums *sums;
    int parts;
    char name[256];
} mt_unlisted;

static int mt_unlisted_note(const char *folder, const char *name, void *context) {
    mt_unlisted *found = context;
    static const char *const stems[] = {"model", "optimizer", "adapter_model"}, *const files[] = {
                                                                                    "trainer.json", "config.json",
                                                                                    "adapter_config.json"};
    bool is_read = false;
    (void)folder;
    for (size_t i = 0; i < 3; i++) {
        size_t length = strlen(stems[i]);
        bool is_stem = strncmp(name, stems[i], length) == 0 && (name[length] == '.' || name[length] == '-');
        bool is_data = mt_text_ends_with(name, ".safetensors") || mt_text_ends_with(name, ".safetensors.index.json");
        is_read = is_read || (is_stem && is_data) || strcmp(name, files[i]) == 0;
    }
    if (mt_is_optimizer_file(name) && !(found->parts & MT_VERIFY_OPTIMIZER)) return 0;
    if (is_read && !mt_checksums_find(found->sums, name)) snprintf(found->name, sizeof found->name, "%s", name);
    return 0;
}

/* The error of a file without tensors that is not the saved one: people edit some of them. */
static int mt_text_changed(mt_error *error, const char *folder, const char *name) {
    bool edited = strcmp(name, "trainer.json") != 0 && !mt_text_ends_with(name, ".index.json") &&
                  (mt_text_ends_with(name, ".json") || mt_text_ends_with(name, ".jinja"));
    return mt_error_set(error, "%s/%s: damaged: it differs from the saved file%s", folder, name,
                        edited ? " (a text edited on purpose counts once checksums.json and trainer.json beside it "
                                 "are removed)"
                               : "");
}

/* Compares an open file of `bytes` bytes with its sums. */
static int mt_sums_compare(const mt_file_checksums *file, const char *folder, int descriptor, int64_t bytes,
                           bool has_tensors, bool reads, mt_error *error) {
    if (bytes != file->bytes && has_tensors)
        return mt_error_set(error, "%s/%s: damaged: it is %lld bytes long, and %lld were saved", folder, file->name,
                            (long long)bytes, (long long)file->bytes);
    if (bytes != file->bytes) return mt_text_changed(error, folder, file->name);
    char *buffer = reads ? mt_malloc(MT_SUM_BLOCK) : NULL;
    int status = 0;
    for (int64_t block = 0; block < file->count && reads && status == 0; block++) {
        int64_t first = block * MT_SUM_BLOCK, n = mt_min(MT_SUM_BLOCK, bytes - first);
        if (mt_file_read_at(descriptor, buffer, n, first) == 0 && mt_crc32c(buffer, n) == file->sums[block]) continue;
        status = has_tensors ? mt_checksums_damaged(error, folder, file->name, block, bytes)
                             : mt_text_changed(error, folder, file->name);
    }
    free(buffer);
    return status;
}

int mt_checksums_verify(const mt_checksums *sums, const char *folder, int parts, mt_error *error) {
    mt_unlisted unlisted = {.sums = sums, .parts = parts};
    mt_folder_visit(folder, mt_unlisted_note, &unlisted);
    if (*unlisted.name)
        return mt_error_set(error, "%s: damaged: its checksums.json does not list %s, which came from elsewhere",
                            folder, unlisted.name);
    int status = 0;
    for (int64_t i = 0; i < sums->count && status == 0; i++) {
        const mt_file_checksums *file = &sums->files[i];
        const char *name = file->name;
        if (mt_is_optimizer_file(name) && !(parts & MT_VERIFY_OPTIMIZER)) continue;
        bool is_stem = strncmp(name, "model", 5) == 0 || strncmp(name, "optimizer", 9) == 0;
        bool is_dist = mt_text_ends_with(name, ".distcp");
        bool has_tensors = is_dist || mt_text_ends_with(name, ".safetensors");
        bool reads = !has_tensors || !(is_stem || is_dist) || (parts & MT_VERIFY_TENSORS); // others are small
        char *path = mt_path_join(folder, name);
        int64_t bytes;
        int descriptor = mt_file_open(path, &bytes, error);
        status = descriptor >= 0 ? mt_sums_compare(file, folder, descriptor, bytes, has_tensors, reads, error)
                                 : mt_error_set(error, "%s: damaged: %s was saved, but %s", folder, name,
                                                mt_folder_has(folder, name) ? "cannot be read" : "is not there");
        if (descriptor >= 0) close(descriptor);
        free(path);
    }
    return status;
}
