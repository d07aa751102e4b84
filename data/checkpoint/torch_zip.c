/* torch_zip.c: the archives that torch.save writes: zip files whose entries are stored without compression. Invariant:
 * no number of the file is used before it was compared with the archive's bounds. The format is PKWARE's APPNOTE 6.3;
 * torch writes sizes into the directory alone, so the local headers give only the place of the data. */
#include "torch_zip.h"

#include <stdlib.h>
#include <string.h>

enum {
    MT_ZIP_END = 22,        // bytes of the end record without its comment
    MT_ZIP_LOCATOR = 20,    // bytes of the locator of the end record of zip64
    MT_ZIP_END64 = 56,      // bytes of that record
    MT_ZIP_DIRECTORY = 46,  // bytes of an entry of the directory without its name
    MT_ZIP_LOCAL = 30,      // bytes of a local header without its name
    MT_ZIP_COMMENT = 65535, // the longest comment
    MT_ZIP_MOST = 1 << 20,  // entries
};

/* The bytes of an archive, and the one whose directory is read. */
typedef struct mt_zip_reader {
    const unsigned char *at;
    int64_t bytes;
    const char *path;
    mt_error *error;
} mt_zip_reader;

static uint64_t mt_zip_number(const unsigned char *at, int size) {
    uint64_t value = 0;
    for (int i = size - 1; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

static int mt_zip_refuse(const mt_zip_reader *r, const char *what) {
    return mt_error_set(r->error, "%s: not a whole archive of torch.save: %s; get it again", r->path, what);
}

/* Finds the end record: its comment ends the archive. */
static int64_t mt_zip_find_end(const mt_zip_reader *r) {
    int64_t lowest = mt_max(r->bytes - MT_ZIP_END - MT_ZIP_COMMENT, 0);
    for (int64_t at = r->bytes - MT_ZIP_END; at >= lowest; at--)
        if (memcmp(r->at + at, "PK\5\6", 4) == 0 &&
            at + MT_ZIP_END + (int64_t)mt_zip_number(r->at + at + 20, 2) == r->bytes)
            return at;
    return -1;
}

/* The directory's place and its entries, from the end record, or from that of zip64 where one is. */
static int mt_zip_find_directory(const mt_zip_reader *r, uint64_t *first, uint64_t *size, uint64_t *count) {
    int64_t end = mt_zip_find_end(r);
    if (end < 0) return mt_zip_refuse(r, "it has no end record");
    const unsigned char *at = r->at + end;
    *count = mt_zip_number(at + 10, 2), *size = mt_zip_number(at + 12, 4), *first = mt_zip_number(at + 16, 4);
    int64_t limit = end;
    const unsigned char *locator = end >= MT_ZIP_LOCATOR ? at - MT_ZIP_LOCATOR : NULL;
    if (locator && memcmp(locator, "PK\6\7", 4) == 0) {
        uint64_t wide = mt_zip_number(locator + 8, 8);
        int64_t room = end - MT_ZIP_LOCATOR - MT_ZIP_END64;
        if (room < 0 || wide > (uint64_t)room || memcmp(r->at + wide, "PK\6\6", 4) != 0)
            return mt_zip_refuse(r, "its end record of 64 bits is not where it should be");
        *count = mt_zip_number(r->at + wide + 32, 8), *size = mt_zip_number(r->at + wide + 40, 8);
        *first = mt_zip_number(r->at + wide + 48, 8);
        limit = (int64_t)wide;
    }
    if (*first > (uint64_t)limit || *size > (uint64_t)limit - *first)
        return mt_zip_refuse(r, "its directory lies outside it");
    if (*count > MT_ZIP_MOST) return mt_zip_refuse(r, "it has over 1,048,576 entries");
    if (*count > *size / MT_ZIP_DIRECTORY) return mt_zip_refuse(r, "its directory is shorter than its entries");
    return 0;
}

/* Replaces the numbers of 32 bits that are full by those of the extra field of zip64. */
static int mt_zip_read_wide(const mt_zip_reader *r, const unsigned char *extra, int64_t bytes, uint64_t number[3]) {
    for (int64_t at = 0, length; bytes - at >= 4; at += 4 + length) {
        length = (int64_t)mt_zip_number(extra + at + 2, 2);
        if (length > bytes - at - 4) return mt_zip_refuse(r, "an extra field is cut short");
        if (mt_zip_number(extra + at, 2) != 1) continue;
        int64_t used = 0;
        for (int i = 0; i < 3; i++) {
            if (number[i] != UINT32_MAX) continue;
            if (used + 8 > length) return mt_zip_refuse(r, "an extra field of zip64 is cut short");
            number[i] = mt_zip_number(extra + at + 4 + used, 8);
            used += 8;
        }
        return 0;
    }
    return 0;
}

/* Sets an entry's data: behind its local header, and before the directory, which begins at `first`. */
static int mt_zip_place(const mt_zip_reader *r, mt_zip_entry *entry, uint64_t local, uint64_t size, uint64_t first) {
    if (first < MT_ZIP_LOCAL || local > first - MT_ZIP_LOCAL || memcmp(r->at + local, "PK\3\4", 4) != 0)
        return mt_zip_refuse(r, "an entry's header is not where the directory says");
    uint64_t begin = local + MT_ZIP_LOCAL + mt_zip_number(r->at + local + 26, 2) + mt_zip_number(r->at + local + 28, 2);
    if (begin > first || size > first - begin) return mt_zip_refuse(r, "an entry reaches beyond its data");
    entry->data = r->at + begin, entry->bytes = (int64_t)size;
    return 0;
}

/* Reads the entry of the directory at `at`; returns its length there, or -1. */
static int64_t mt_zip_read_entry(const mt_zip_reader *r, mt_zip_entry *entry, const unsigned char *at, int64_t left,
                                 uint64_t first) {
    if (left < MT_ZIP_DIRECTORY || memcmp(at, "PK\1\2", 4) != 0) return mt_zip_refuse(r, "its directory is cut short");
    int64_t name = (int64_t)mt_zip_number(at + 28, 2), extra = (int64_t)mt_zip_number(at + 30, 2);
    int64_t length = MT_ZIP_DIRECTORY + name + extra + (int64_t)mt_zip_number(at + 32, 2);
    if (length > left) return mt_zip_refuse(r, "its directory is cut short");
    if (mt_zip_number(at + 8, 2) & 1) return mt_zip_refuse(r, "it has encrypted entries");
    uint64_t number[3] = {mt_zip_number(at + 24, 4), mt_zip_number(at + 20, 4), mt_zip_number(at + 42, 4)};
    if (mt_zip_read_wide(r, at + MT_ZIP_DIRECTORY + name, extra, number) != 0) return -1;
    if (mt_zip_number(at + 10, 2) != 0 || number[0] != number[1])
        return mt_error_set(r->error,
                            "%s: has compressed entries, which torch.save does not write; save it again by "
                            "torch.save",
                            r->path);
    const char *whole = (const char *)at + MT_ZIP_DIRECTORY, *slash = memchr(whole, '/', (size_t)name);
    entry->name = slash ? slash + 1 : whole;
    entry->name_bytes = name - (entry->name - whole);
    entry->sum = (uint32_t)mt_zip_number(at + 16, 4);
    return mt_zip_place(r, entry, number[2], number[0], first) == 0 ? length : -1;
}

static int mt_zip_compare_names(const void *a, const void *b) {
    const mt_zip_entry *x = a, *y = b;
    int order = memcmp(x->name, y->name, (size_t)mt_min(x->name_bytes, y->name_bytes));
    return order ? order : (x->name_bytes > y->name_bytes) - (x->name_bytes < y->name_bytes);
}

static int mt_zip_compare_places(const void *a, const void *b) {
    const mt_zip_entry *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Entries may neither overlap nor share a name; leaves them sorted by name. */
static int mt_zip_check(const mt_zip_reader *r, mt_zip *zip) {
    if (zip->count == 0) return mt_zip_refuse(r, "it has no entries");
    qsort(zip->entries, (size_t)zip->count, sizeof *zip->entries, mt_zip_compare_places);
    for (int64_t i = 1; i < zip->count; i++)
        if (zip->entries[i].data < zip->entries[i - 1].data + zip->entries[i - 1].bytes)
            return mt_zip_refuse(r, "two entries overlap");
    qsort(zip->entries, (size_t)zip->count, sizeof *zip->entries, mt_zip_compare_names);
    for (int64_t i = 1; i < zip->count; i++)
        if (mt_zip_compare_names(&zip->entries[i - 1], &zip->entries[i]) == 0)
            return mt_zip_refuse(r, "two entries have one name");
    return 0;
}

int mt_zip_open(mt_zip *zip, const void *archive, int64_t bytes, const char *path, mt_error *error) {
    mt_zip_reader r = {archive, bytes, path, error};
    uint64_t first = 0, size = 0, count = 0;
    *zip = (mt_zip){0};
    if (bytes < MT_ZIP_END || memcmp(archive, "PK", 2) != 0)
        return mt_error_set(error,
                            "%s: not a zip archive; torch.save writes them since PyTorch 1.6: load it there and save "
                            "it again",
                            path);
    if (mt_zip_find_directory(&r, &first, &size, &count) != 0) return -1;
    zip->entries = mt_calloc((int64_t)mt_max((int64_t)count, 1) * (int64_t)sizeof *zip->entries);
    const unsigned char *at = r.at + first;
    for (int64_t left = (int64_t)size, length; zip->count < (int64_t)count; at += length, left -= length) {
        length = mt_zip_read_entry(&r, &zip->entries[zip->count], at, left, first);
        if (length < 0) return -1;
        zip->count++;
    }
    return mt_zip_check(&r, zip);
}

void mt_zip_free(mt_zip *zip) {
    free(zip->entries);
    *zip = (mt_zip){0};
}

const mt_zip_entry *mt_zip_find(const mt_zip *zip, const char *name) {
    mt_zip_entry key = {.name = name, .name_bytes = (int64_t)strlen(name)};
    if (zip->count == 0) return NULL;
    return bsearch(&key, zip->entries, (size_t)zip->count, sizeof key, mt_zip_compare_names);
}

/* ---- sums */

static const uint32_t mt_zip_polynomial = 0xedb88320; // x^31 is its lowest bit

void mt_zip_sums_init(mt_zip_sums *sums) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t sum = b;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? mt_zip_polynomial : 0);
        sums->table[0][b] = sum;
    }
    for (int i = 1; i < 8; i++)
        for (int b = 0; b < 256; b++)
            sums->table[i][b] = sums->table[i - 1][b] >> 8 ^ sums->table[0][sums->table[i - 1][b] & 255];
}

/* The state of the sum after more bytes, eight at a time. */
static uint32_t mt_zip_sum_update(const mt_zip_sums *sums, uint32_t state, const void *data, int64_t bytes) {
    const unsigned char *at = data;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint32_t first =
            state ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
        state = 0;
        for (int i = 0; i < 4; i++) state ^= sums->table[7 - i][first >> 8 * i & 255] ^ sums->table[3 - i][at[4 + i]];
    }
    for (; bytes > 0; at++, bytes--) state = state >> 8 ^ sums->table[0][(state ^ *at) & 255];
    return state;
}

/* a b modulo the polynomial. */
static uint32_t mt_zip_sum_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b >> 1 ^ (b & 1 ? mt_zip_polynomial : 0);
    }
    return product;
}

/* The state after so many zeros: a product with x^(8 bytes). */
static uint32_t mt_zip_sum_zeros(uint32_t state, int64_t bytes) {
    uint32_t power = 1u << 23; // x^8
    for (; bytes > 0; bytes >>= 1) {
        if (bytes & 1) state = mt_zip_sum_multiply(state, power);
        power = mt_zip_sum_multiply(power, power);
    }
    return state;
}

uint32_t mt_zip_sum_lines(const mt_zip_sums *sums, const char *data, int64_t bytes, int64_t lines, int64_t pitch,
                          int64_t left) {
    uint32_t state = 0, step = lines > 1 ? mt_zip_sum_zeros(1u << 31, pitch) : 0;
    for (int64_t i = 0; i < lines; i++)
        state = mt_zip_sum_multiply(state, step) ^ mt_zip_sum_update(sums, 0, data + i * bytes, bytes);
    return mt_zip_sum_zeros(state, left);
}

uint32_t mt_zip_sum_finish(uint32_t contributions, int64_t bytes) {
    return ~(contributions ^ mt_zip_sum_zeros(UINT32_MAX, bytes));
}

int mt_zip_verify(const mt_zip_entry *entry, const char *path, mt_error *error) {
    mt_zip_sums sums;
    if (entry->sum == 0) return 0;
    mt_zip_sums_init(&sums);
    if (mt_zip_sum_finish(mt_zip_sum_update(&sums, 0, entry->data, entry->bytes), entry->bytes) == entry->sum) return 0;
    return mt_error_set(error, "%s: \"%.*s\" of the archive is damaged: it does not have the sum stored; get it again",
                        path, (int)mt_min(entry->name_bytes, 100), entry->name);
}
