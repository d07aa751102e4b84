/* safetensors.h: files of tensors in the safetensors format (huggingface/safetensors), and the checksums of a folder's
 * files. */
#ifndef MT_SAFETENSORS_H
#define MT_SAFETENSORS_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- safetensors */

/* A tensor of a safetensors file: its place, type and shape. */
typedef struct mt_tensor_info {
    const char *name;
    const char *file; // path of the file that holds it
    mt_dtype dtype;
    int64_t num_dims; // 0 for a scalar
    int64_t shape[8];
    const void *data; // in the mapped file; need not be aligned
    int64_t bytes;
} mt_tensor_info;

/* A file of an open set. */
typedef struct mt_safetensors_file {
    char *path; // or the name that mt_safetensors_open_memory was given
    const unsigned char *base;
    int64_t bytes;
    bool mapped; // false: the memory belongs to the caller
} mt_safetensors_file;

/* One safetensors file, or a folder of them with an index, mapped read-only. The header is validated whole: length,
 * JSON, dtypes, shapes, offsets that tile the data without holes or overlaps. It must not shrink while it is open. */
typedef struct mt_safetensors mt_safetensors;
int mt_safetensors_open(mt_safetensors **set, const char *path, mt_error *error);
/* Validates an image in memory that the caller keeps; for tests and fuzzing. */
int mt_safetensors_open_memory(mt_safetensors **set, const void *data, int64_t bytes, const char *name,
                               mt_error *error);
/* Opens DIR/model.safetensors, or every file of DIR/model.safetensors.index.json; `stem` is "model" or "optimizer". */
int mt_safetensors_open_folder(mt_safetensors **set, const char *folder, const char *stem, mt_error *error);
void mt_safetensors_close(mt_safetensors *set);

/* The tensors, by name. */
int64_t mt_safetensors_count(const mt_safetensors *set);
const mt_tensor_info *mt_safetensors_get(const mt_safetensors *set, int64_t index);
/* NULL when there is no such tensor. */
const mt_tensor_info *mt_safetensors_find(const mt_safetensors *set, const char *name);

/* Puts parts[count] in the place of tensor `index`: parts of its bytes, or the same under another name. Their names are
 * the set's from then on. mt_safetensors_find needs mt_safetensors_sort after the last replacement; indices stay until
 * then, and new tensors come at the end. */
void mt_safetensors_replace(mt_safetensors *set, int64_t index, const mt_tensor_info *parts, int64_t count);
void mt_safetensors_sort(mt_safetensors *set);

/* The files, in the order of their opening; a tensor's `file` is the same pointer as its file's `path`. */
int64_t mt_safetensors_num_files(const mt_safetensors *set);
const mt_safetensors_file *mt_safetensors_get_file(const mt_safetensors *set, int64_t index);

/* ---- checksums: checksums.json names every other file of a folder with its size and the CRC-32C of each block */

/* CRC-32C of some bytes (RFC 3720, appendix B.4). */
uint32_t mt_crc32c(const void *data, int64_t bytes);

/* Bytes of a block. */
enum { MT_SUM_BLOCK = 1 << 20 };

/* One file's sums. Before mt_checksums_finish: the contribution of the bytes added so far, on this rank. */
typedef struct mt_file_checksums {
    char name[256];
    int64_t bytes, count; // of the file; blocks
    uint32_t *sums;       // [count]
} mt_file_checksums;

/* The sums of a folder's files. */
typedef struct mt_checksums {
    mt_file_checksums *files;
    int64_t count;
} mt_checksums;

/* Appends a file, without any of its bytes. */
mt_file_checksums *mt_checksums_append(mt_checksums *sums, const char *name, int64_t bytes);

/* Adds bytes [offset, offset + bytes) of a file, each byte once, in any order and from any thread. A CRC is linear: the
 * exclusive or of several ranks' sums of different bytes is the sum of all these bytes. */
void mt_checksums_add(mt_file_checksums *file, int64_t offset, const void *data, int64_t bytes);

/* mt_checksums_add for `lines` lines of `bytes` bytes that begin `pitch` bytes apart in the file and lie one after
 * another in memory. */
void mt_checksums_add_lines(mt_file_checksums *file, int64_t offset, int64_t pitch, const char *data, int64_t bytes,
                            int64_t lines);

/* Turns sums of all bytes into CRC-32C. */
void mt_checksums_finish(mt_file_checksums *file);

/* The sums of a file's name; NULL: none. */
const mt_file_checksums *mt_checksums_find(const mt_checksums *sums, const char *name);

/* The text of checksums.json, to free; it ends with its own checksum. */
char *mt_checksums_print(const mt_checksums *sums);

/* Reads FOLDER/checksums.json; a folder without one gives no files. A damaged one is an error, without a remedy. */
int mt_checksums_read(mt_checksums *sums, const char *folder, mt_error *error);

/* The parts of a folder that are compared besides the files without tensors, which always are. */
enum {
    MT_VERIFY_TENSORS = 1,  // the sums of files of tensors, not their sizes alone
    MT_VERIFY_OPTIMIZER = 2 // the optimizer's files too; the folder *.distcp keeps them with the weights
};

/* Checks that every file exists and has its size and its sum; `parts` adds MT_VERIFY_*. Files of tensors are
 * model*.safetensors, optimizer*.safetensors and *.distcp. The error names the damage without a remedy, which depends
 * on the folders beside it: mt_checkpoint_advise. */
int mt_checksums_verify(const mt_checksums *sums, const char *folder, int parts, mt_error *error);

/* Sets the error of a block whose sum differs, without a remedy; returns -1. */
int mt_checksums_damaged(mt_error *error, const char *folder, const char *name, int64_t block, int64_t bytes);

/* Frees the sums; none are left. */
void mt_checksums_free(mt_checksums *sums);

#ifdef __cplusplus
}
#endif
#endif
