/* indexed_dataset.c: Megatron's .bin/.idx pair, read through a memory map and written atomically. For little-endian
 * hosts: the format is little-endian. */
#include "indexed_dataset.h"

#include "../base/file.h"
#include "../base/watchdog.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INDEX_MAGIC        "MMIDIDX\0\0" // nine bytes with the two zeros
#define INDEX_MAGIC_BYTES  9
#define INDEX_HEADER_BYTES (INDEX_MAGIC_BYTES + 8 + 1 + 8 + 8)

/* ---- the index --------------------------------------------------------------------------------------------------- */

// The arrays of an .idx start at byte 34, so their items are not aligned.
static int32_t load_i32(const uint8_t *array, int64_t index) {
    int32_t value;
    memcpy(&value, array + index * 4, sizeof value);
    return value;
}

static int64_t load_i64(const uint8_t *array, int64_t index) {
    int64_t value;
    memcpy(&value, array + index * 8, sizeof value);
    return value;
}

/* Of an index that is not as its writer left it. */
#define REMEDY "the file is damaged or cut short: copy it again, or make it again with data/preprocess"

/* Megatron's token type codes. */
static int dtype_from_code(mt_dtype *dtype, int code, const char *path, mt_error *error) {
    static const mt_dtype dtypes[] = {
        [1] = MT_U8, [2] = MT_I8, [3] = MT_I16, [4] = MT_I32, [5] = MT_I64, [6] = MT_F64, [7] = MT_F32, [8] = MT_U16};
    if (code < 1 || code > 8)
        return mt_error_set(error, "%s: token type %d is unknown (1 to 8 are defined); " REMEDY, path, code);
    if (code == 6 || code == 7)
        return mt_error_set(error, "%s: holds floating-point numbers, not tokens; prepare it with data/preprocess",
                            path);
    *dtype = dtypes[code];
    return 0;
}

static int dtype_code(mt_dtype dtype) {
    return dtype == MT_U16 ? 8 : 4;
}

static int64_t dtype_bytes(mt_dtype dtype) {
    if (dtype == MT_U8 || dtype == MT_I8) return 1;
    if (dtype == MT_I16 || dtype == MT_U16) return 2;
    return dtype == MT_I64 ? 8 : 4;
}

/* Writers put sequences one after another, so gaps, overlaps and bytes behind the last are counted: they are signs of
 * damage, but an index of a selection of sequences has them too. */
static int check_sequences(mt_indexed_index *index, int64_t bin_size, const char *path, mt_error *error) {
    int64_t item = dtype_bytes(index->dtype), previous = 0, last = 0, misaligned = -1;
    index->first_odd = -1;
    for (int64_t i = 0; i < index->num_sequences; i++) {
        int64_t length = load_i32(index->lengths, i), offset = load_i64(index->offsets, i);
        if (length < 0)
            return mt_error_set(error, "%s: sequence %lld has a negative length (%lld); " REMEDY, path, (long long)i,
                                (long long)length);
        if (offset < 0 || offset > bin_size || length * item > bin_size - offset)
            return mt_error_set(
                error,
                "%s: sequence %lld (%lld tokens at byte %lld) lies outside the .bin file of %lld bytes; "
                "the .bin is cut short or of another .idx: copy both again, or make them again with data/preprocess",
                path, (long long)i, (long long)length, (long long)offset, (long long)bin_size);
        if (offset % item != 0 && misaligned < 0) misaligned = i;
        index->gaps += offset > previous;
        index->overlaps += offset < previous;
        if (offset != previous && index->first_odd < 0) index->first_odd = i;
        previous = offset + length * item;
        last = mt_max(last, previous);
    }
    index->trailing = bin_size - last;
    if (misaligned < 0) return 0;
    return mt_error_set(error, "%s: sequence %lld begins at byte %lld, inside of a token of %lld bytes; " REMEDY, path,
                        (long long)misaligned, (long long)load_i64(index->offsets, misaligned), (long long)item);
}

static int check_documents(const mt_indexed_index *index, const char *path, mt_error *error) {
    int64_t previous = 0;
    for (int64_t d = 0; d <= index->num_documents; d++) {
        int64_t entry = load_i64(index->documents, d);
        if (entry < previous || entry > index->num_sequences || (d == 0 && entry != 0))
            return mt_error_set(error,
                                "%s: entry %lld of the document index is %lld, but entries ascend from 0 to the %lld "
                                "sequences; " REMEDY,
                                path, (long long)d, (long long)entry, (long long)index->num_sequences);
        previous = entry;
    }
    if (previous != index->num_sequences)
        return mt_error_set(error, "%s: the document index ends at sequence %lld of %lld; " REMEDY, path,
                            (long long)previous, (long long)index->num_sequences);
    return 0;
}

/* Multimodal writers add a mode of one byte for each sequence; 0 is text. Megatron-LM's GPT datasets do not look at
 * them and would train on the tokens of images. */
static int check_modes(const mt_indexed_index *index, const char *path, mt_error *error) {
    const int8_t *modes = (const int8_t *)index->documents + (index->num_documents + 1) * 8;
    for (int64_t i = 0; i < index->num_sequences; i++)
        if (modes[i] != 0)
            return mt_error_set(error,
                                "%s: sequence %lld has mode %d: multimodal data, which are not supported; prepare the "
                                "text alone",
                                path, (long long)i, modes[i]);
    return 0;
}

/* Locates the three arrays; they, and modes where there are some, must fill the file exactly. */
static int locate_arrays(mt_indexed_index *index, const uint8_t *bytes, int64_t size, const char *path,
                         mt_error *error) {
    uint64_t sequences, entries;
    memcpy(&sequences, bytes + 18, 8);
    memcpy(&entries, bytes + 26, 8);
    uint64_t room = (uint64_t)(size - INDEX_HEADER_BYTES);
    // A sequence takes 12 bytes and a document entry 8. These bounds also prevent overflow below.
    bool possible = sequences <= room / 12 && entries <= room / 8 && entries >= 1;
    uint64_t taken = possible ? sequences * 12 + entries * 8 : 0;
    if (!possible || (taken != room && taken + sequences != room))
        return mt_error_set(
            error, "%s: its %lld bytes cannot hold the %llu sequences and %llu document entries of its header; " REMEDY,
            path, (long long)size, (unsigned long long)sequences, (unsigned long long)entries);
    index->num_sequences = (int64_t)sequences;
    index->num_documents = (int64_t)entries - 1;
    index->lengths = bytes + INDEX_HEADER_BYTES;
    index->offsets = index->lengths + index->num_sequences * 4;
    index->documents = index->offsets + index->num_sequences * 8;
    return taken == room ? 0 : check_modes(index, path, error);
}

int mt_indexed_index_parse(mt_indexed_index *index, const void *bytes, int64_t size, int64_t bin_size, const char *path,
                           mt_error *error) {
    const uint8_t *header = bytes;
    *index = (mt_indexed_index){0};
    if (size < INDEX_HEADER_BYTES)
        return mt_error_set(error, "%s: its %lld bytes are less than an index begins with; " REMEDY, path,
                            (long long)size);
    if (memcmp(header, INDEX_MAGIC, INDEX_MAGIC_BYTES) != 0)
        return mt_error_set(error,
                            "%s: is not a Megatron index (it must begin with MMIDIDX); prepare the data with "
                            "data/preprocess",
                            path);
    uint64_t version;
    memcpy(&version, header + INDEX_MAGIC_BYTES, 8);
    if (version != 1)
        return mt_error_set(error, "%s: index version %llu is unknown (1 is supported); prepare the data again", path,
                            (unsigned long long)version);
    if (dtype_from_code(&index->dtype, header[17], path, error) != 0) return -1;
    if (locate_arrays(index, header, size, path, error) != 0) return -1;
    if (check_sequences(index, bin_size, path, error) != 0) return -1;
    return check_documents(index, path, error);
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

struct mt_indexed_dataset {
    mt_mapping bin, idx;
    int bin_descriptor;
    mt_indexed_index index;
    char *prefix, *bin_path;
};

static char *path_with_suffix(const char *prefix, const char *suffix) {
    char *path = mt_malloc((int64_t)(strlen(prefix) + strlen(suffix)) + 1);
    return strcat(strcpy(path, prefix), suffix);
}

static int open_pair(mt_indexed_dataset *dataset, const char *idx_path, mt_error *error) {
    int64_t bytes;
    if (mt_mapping_open(&dataset->idx, idx_path, error) != 0) return -1;
    if ((dataset->bin_descriptor = mt_file_open(dataset->bin_path, &bytes, error)) < 0) return -1;
    if (mt_mapping_make(&dataset->bin, dataset->bin_descriptor, bytes, dataset->bin_path, error) != 0) return -1;
    return mt_indexed_index_parse(&dataset->index, dataset->idx.bytes, dataset->idx.size, dataset->bin.size, idx_path,
                                  error);
}

int mt_indexed_dataset_open(mt_indexed_dataset **out, const char *prefix, mt_error *error) {
    mt_indexed_dataset *dataset = mt_calloc(sizeof *dataset);
    dataset->prefix = mt_strdup(prefix);
    dataset->bin_descriptor = -1;
    dataset->bin_path = path_with_suffix(prefix, ".bin");
    char *idx_path = path_with_suffix(prefix, ".idx");
    int result = open_pair(dataset, idx_path, error);
    free(idx_path);
    if (result != 0) {
        mt_indexed_dataset_close(dataset);
        dataset = NULL;
    }
    *out = dataset;
    return result;
}

void mt_indexed_dataset_close(mt_indexed_dataset *dataset) {
    if (!dataset) return;
    if (dataset->bin_descriptor >= 0) close(dataset->bin_descriptor);
    mt_mapping_close(&dataset->bin);
    mt_mapping_close(&dataset->idx);
    free(dataset->prefix);
    free(dataset->bin_path);
    free(dataset);
}

const mt_indexed_index *mt_indexed_dataset_index(const mt_indexed_dataset *dataset) {
    return &dataset->index;
}

const char *mt_indexed_dataset_prefix(const mt_indexed_dataset *dataset) {
    return dataset->prefix;
}

uint64_t mt_indexed_dataset_fingerprint(const mt_indexed_dataset *dataset) {
    int watched = mt_watch_file_begin(dataset->bin_path, MT_FILE_READ);
    uint64_t prints[2] = {mt_contents_fingerprint(dataset->idx.bytes, dataset->idx.size, true),
                          mt_contents_fingerprint(dataset->bin.bytes, dataset->bin.size, false)};
    mt_watch_file_end(watched);
    return mt_contents_fingerprint(prints, sizeof prints, true);
}

int64_t mt_indexed_dataset_length(const mt_indexed_dataset *dataset, int64_t sequence) {
    MT_CHECK(sequence >= 0 && sequence < dataset->index.num_sequences);
    return load_i32(dataset->index.lengths, sequence);
}

int mt_indexed_dataset_check(const mt_indexed_dataset *dataset, mt_error *error) {
    return mt_file_check_size(dataset->bin_descriptor, dataset->bin.size, dataset->bin_path, error);
}

static int64_t load_token(const uint8_t *bytes, mt_dtype dtype) {
    int64_t value = 0;
    memcpy(&value, bytes, (size_t)dtype_bytes(dtype)); // little-endian: the low bytes come first
    if (dtype == MT_I8) return (int8_t)value;
    if (dtype == MT_I16) return (int16_t)value;
    if (dtype == MT_I32) return (int32_t)value;
    return value;
}

/* The last document that begins at or before `sequence`. */
static int64_t document_of_sequence(const mt_indexed_index *index, int64_t sequence) {
    int64_t low = 0, high = index->num_documents;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (load_i64(index->documents, middle) <= sequence)
            low = middle;
        else
            high = middle;
    }
    return low;
}

int mt_indexed_dataset_get(const mt_indexed_dataset *dataset, int64_t sequence, int64_t offset, int64_t count,
                           int64_t vocab_size, int32_t *tokens, mt_error *error) {
    const mt_indexed_index *index = &dataset->index;
    MT_CHECK(offset >= 0 && count >= 0 && offset + count <= mt_indexed_dataset_length(dataset, sequence));
    int64_t item = dtype_bytes(index->dtype);
    const uint8_t *bytes = dataset->bin.bytes + load_i64(index->offsets, sequence) + offset * item;
    for (int64_t i = 0; i < count; i++) {
        int64_t token = load_token(bytes + i * item, index->dtype);
        if (token < 0 || token >= vocab_size)
            return mt_error_set(error,
                                "%s.bin: document %lld holds token %lld, but the vocabulary has %lld tokens; use the "
                                "tokenizer that the data was prepared with",
                                dataset->prefix, (long long)document_of_sequence(index, sequence), (long long)token,
                                (long long)vocab_size);
        tokens[i] = (int32_t)token;
    }
    return 0;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

struct mt_indexed_writer {
    mt_new_file bin, idx;
    mt_dtype dtype;
    int32_t *lengths; // [num_sequences]
    int64_t num_sequences, sequence_capacity;
    int64_t *documents; // [num_documents + 1]
    int64_t num_documents, document_capacity;
    uint16_t *narrow; // scratch
    int64_t narrow_capacity;
};

mt_dtype mt_indexed_dtype_for_vocab(int64_t vocab_size) {
    return vocab_size < 65500 ? MT_U16 : MT_I32;
}

static int open_new(mt_new_file *file, const char *prefix, const char *suffix, mt_error *error) {
    char *path = path_with_suffix(prefix, suffix);
    int status = mt_new_file_open(file, path, "--output-prefix", error);
    free(path);
    return status;
}

int mt_indexed_writer_open(mt_indexed_writer **out, const char *prefix, mt_dtype dtype, mt_error *error) {
    MT_CHECK(dtype == MT_U16 || dtype == MT_I32);
    mt_indexed_writer *writer = mt_calloc(sizeof *writer);
    *out = writer;
    writer->dtype = dtype;
    writer->document_capacity = 1024;
    writer->documents = mt_malloc(writer->document_capacity * (int64_t)sizeof *writer->documents);
    writer->documents[0] = 0;
    if (open_new(&writer->bin, prefix, ".bin", error) == 0 && open_new(&writer->idx, prefix, ".idx", error) == 0)
        return 0;
    mt_indexed_writer_close(writer);
    *out = NULL;
    return -1;
}

/* Converts tokens to u16 where the file has u16. */
static int write_tokens(mt_indexed_writer *writer, const int32_t *tokens, int64_t count, mt_error *error) {
    if (writer->dtype == MT_I32) return mt_new_file_write(&writer->bin, tokens, count * 4, error);
    if (count > writer->narrow_capacity) {
        writer->narrow_capacity = count;
        writer->narrow = mt_realloc(writer->narrow, count * 2);
    }
    for (int64_t i = 0; i < count; i++) {
        MT_CHECK(tokens[i] >= 0 && tokens[i] <= UINT16_MAX);
        writer->narrow[i] = (uint16_t)tokens[i];
    }
    return mt_new_file_write(&writer->bin, writer->narrow, count * 2, error);
}

int mt_indexed_writer_add_document(mt_indexed_writer *writer, const int32_t *tokens, const int32_t *lengths,
                                   int64_t num_sequences, mt_error *error) {
    if (writer->num_sequences + num_sequences > writer->sequence_capacity) {
        writer->sequence_capacity = 2 * (writer->num_sequences + num_sequences);
        writer->lengths = mt_realloc(writer->lengths, writer->sequence_capacity * (int64_t)sizeof *writer->lengths);
    }
    if (writer->num_documents + 2 > writer->document_capacity) {
        writer->document_capacity *= 2;
        writer->documents =
            mt_realloc(writer->documents, writer->document_capacity * (int64_t)sizeof *writer->documents);
    }
    int64_t count = 0;
    for (int64_t i = 0; i < num_sequences; i++) {
        writer->lengths[writer->num_sequences++] = lengths[i];
        count += lengths[i];
    }
    writer->documents[++writer->num_documents] = writer->num_sequences;
    return write_tokens(writer, tokens, count, error);
}

static int write_index(mt_indexed_writer *writer, mt_error *error) {
    uint8_t header[INDEX_HEADER_BYTES] = INDEX_MAGIC;
    uint64_t version = 1, sequences = (uint64_t)writer->num_sequences, entries = (uint64_t)writer->num_documents + 1;
    memcpy(header + 9, &version, 8);
    header[17] = (uint8_t)dtype_code(writer->dtype);
    memcpy(header + 18, &sequences, 8);
    memcpy(header + 26, &entries, 8);
    mt_new_file *idx = &writer->idx;
    if (mt_new_file_write(idx, header, sizeof header, error) != 0) return -1;
    if (mt_new_file_write(idx, writer->lengths, writer->num_sequences * 4, error) != 0) return -1;
    int64_t offset = 0;
    for (int64_t i = 0; i < writer->num_sequences; i++) {
        if (mt_new_file_write(idx, &offset, 8, error) != 0) return -1;
        offset += writer->lengths[i] * dtype_bytes(writer->dtype);
    }
    return mt_new_file_write(idx, writer->documents, (writer->num_documents + 1) * 8, error);
}

int mt_indexed_writer_seal(mt_indexed_writer *writer, mt_error *error) {
    if (write_index(writer, error) != 0) return -1;
    if (mt_new_file_seal(&writer->bin, error) != 0) return -1;
    return mt_new_file_seal(&writer->idx, error);
}

int mt_indexed_writer_publish(mt_indexed_writer *writer, mt_error *error) {
    if (mt_new_file_close(&writer->bin, 0, error) != 0) return -1;
    return mt_new_file_close(&writer->idx, 0, error);
}

void mt_indexed_writer_close(mt_indexed_writer *writer) {
    if (!writer) return;
    mt_error ignored;
    mt_new_file_close(&writer->bin, -1, &ignored); // unpublished files
    mt_new_file_close(&writer->idx, -1, &ignored);
    free(writer->lengths);
    free(writer->documents);
    free(writer->narrow);
    free(writer);
}
