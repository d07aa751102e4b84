/* torch_write.h: writes the archives and pickles that torch.load reads. */
#ifndef MT_TORCH_WRITE_H
#define MT_TORCH_WRITE_H

#include "torch_zip.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that grow at their end. Free `data`. */
typedef struct mt_bytes {
    char *data;
    int64_t count, room;
} mt_bytes;

/* Appends some bytes. */
void mt_bytes_add(mt_bytes *bytes, const void *data, int64_t count);

/* ---- pickles, protocol 2 */

/* A pickle that is being written; its globals are written once. */
typedef struct mt_pickler {
    mt_bytes out;
    const char *globals[64];
    int num_globals;
} mt_pickler;

/* Begins a pickle, and ends it: then free pickler->out.data. */
void mt_pickler_begin(mt_pickler *pickler);
void mt_pickler_end(mt_pickler *pickler);

/* One opcode without an operand, such as '(' MARK, 't' TUPLE, ']' EMPTY_LIST, 'R' REDUCE; see Python's pickletools. */
void mt_pickle_op(mt_pickler *pickler, char opcode);
void mt_pickle_none(mt_pickler *pickler);
void mt_pickle_bool(mt_pickler *pickler, bool value);
void mt_pickle_int(mt_pickler *pickler, int64_t value);
void mt_pickle_real(mt_pickler *pickler, double value);
void mt_pickle_text(mt_pickler *pickler, const char *text);

/* "module\nname"; the text must stay until mt_pickler_end. */
void mt_pickle_global(mt_pickler *pickler, const char *name);

/* A tuple of whole numbers, or torch.Size of it. */
void mt_pickle_tuple(mt_pickler *pickler, const int64_t *values, int64_t count);
void mt_pickle_size(mt_pickler *pickler, const int64_t *values, int64_t count);

/* A contiguous tensor on the CPU, whose values are the archive's entry data/0. Type: fp32, bf16, fp16 or fp64. */
void mt_pickle_tensor(mt_pickler *pickler, mt_dtype dtype, const int64_t *shape, int64_t num_dims);

/* "torch\nfloat32" and the like. */
const char *mt_torch_dtype(mt_dtype dtype);

/* ---- archives of torch.save */

/* An archive's bytes before and behind those of its tensor. */
typedef struct mt_archive {
    mt_bytes head, tail;
} mt_archive;

/* Makes an archive of a pickle and, with data_bytes >= 0, a tensor of so many bytes with the sum `sum`, which are not
 * copied; without one the tail is empty. Entries are stored. The tensor begins at a multiple of 64 bytes. Numbers of 64
 * bits are used where they are needed. Lengths do not depend on the sum. */
void mt_archive_make(mt_archive *archive, const mt_bytes *pickle, int64_t data_bytes, uint32_t sum);
void mt_archive_free(mt_archive *archive);

#ifdef __cplusplus
}
#endif
#endif
