/* torch_zip.h: the archives that torch.save writes: zip files whose entries are stored without compression. */
#ifndef MT_TORCH_ZIP_H
#define MT_TORCH_ZIP_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An entry: its name behind the archive's folder ("data.pkl", "data/0"), which is not terminated, and its bytes. */
typedef struct mt_zip_entry {
    const char *name;
    int64_t name_bytes;
    const unsigned char *data;
    int64_t bytes;
    uint32_t sum; // CRC-32 (ISO 3309) of the data; 0: its writer computed none
} mt_zip_entry;

/* The entries by name. They point into the memory of the archive. */
typedef struct mt_zip {
    mt_zip_entry *entries;
    int64_t count;
} mt_zip;

/* Reads the directory of an archive in memory, which the caller keeps: zip with or without the fields of 64 bits. Every
 * entry lies inside the archive before its directory, no two overlap, and no name comes twice. `path` is for messages.
 * Errors: another file, one that is cut short, compressed or encrypted entries. Free also after an error. */
int mt_zip_open(mt_zip *zip, const void *archive, int64_t bytes, const char *path, mt_error *error);
void mt_zip_free(mt_zip *zip);

/* The entry of a name; NULL: none. */
const mt_zip_entry *mt_zip_find(const mt_zip *zip, const char *name);

/* Refuses an entry whose data do not have its sum. PyTorch itself does not compare them. */
int mt_zip_verify(const mt_zip_entry *entry, const char *path, mt_error *error);

/* ---- CRC-32 (ISO 3309), the sum of an archive's entries, from parts in any order */

/* Sums of a byte followed by 0 to 7 zeros. */
typedef struct mt_zip_sums {
    uint32_t table[8][256];
} mt_zip_sums;

/* Fills the tables, which are constants. */
void mt_zip_sums_init(mt_zip_sums *sums);

/* The contribution of `lines` lines of `bytes` bytes, one after another in memory, that begin `pitch` bytes apart in an
 * entry; `left`: bytes of the entry behind the last line. The exclusive or of the contributions of all bytes of an
 * entry, each once, in mt_zip_sum_finish, is its sum. */
uint32_t mt_zip_sum_lines(const mt_zip_sums *sums, const char *data, int64_t bytes, int64_t lines, int64_t pitch,
                          int64_t left);
uint32_t mt_zip_sum_finish(uint32_t contributions, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
