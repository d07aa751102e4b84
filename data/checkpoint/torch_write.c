/* torch_write.c: writes the archives and pickles that torch.load reads. An archive is a zip file (PKWARE's APPNOTE 6.3)
 * whose entries are stored: data.pkl, byteorder, data/0, version, all in a folder. */
#include "torch_write.h"

#include <stdlib.h>
#include <string.h>

void mt_bytes_add(mt_bytes *bytes, const void *data, int64_t count) {
    if (bytes->count + count > bytes->room) {
        bytes->room = mt_max(2 * bytes->room, bytes->count + count + 64);
        bytes->data = mt_realloc(bytes->data, bytes->room);
    }
    if (count > 0) memcpy(bytes->data + bytes->count, data, (size_t)count);
    bytes->count += count;
}

/* Adds a number of `size` bytes, the lowest first. */
static void mt_bytes_number(mt_bytes *bytes, uint64_t value, int size) {
    char text[8];
    for (int i = 0; i < size; i++) text[i] = (char)(value >> 8 * i & 255);
    mt_bytes_add(bytes, text, size);
}

/* ---- pickles */

void mt_pickle_op(mt_pickler *p, char opcode) {
    mt_bytes_add(&p->out, &opcode, 1);
}

void mt_pickler_begin(mt_pickler *p) {
    *p = (mt_pickler){0};
    mt_bytes_add(&p->out, "\x80\x02", 2);
}

void mt_pickler_end(mt_pickler *p) {
    mt_pickle_op(p, '.');
}

void mt_pickle_none(mt_pickler *p) {
    mt_pickle_op(p, 'N');
}

void mt_pickle_bool(mt_pickler *p, bool value) {
    mt_pickle_op(p, value ? '\x88' : '\x89');
}

void mt_pickle_int(mt_pickler *p, int64_t value) {
    if (value >= INT32_MIN && value <= INT32_MAX) {
        mt_pickle_op(p, 'J');
        mt_bytes_number(&p->out, (uint64_t)value, 4);
    } else { // LONG1: a length, then two's complement
        mt_bytes_add(&p->out, "\x8a\x08", 2);
        mt_bytes_number(&p->out, (uint64_t)value, 8);
    }
}

void mt_pickle_real(mt_pickler *p, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    mt_pickle_op(p, 'G'); // the highest byte first
    for (int i = 7; i >= 0; i--) mt_bytes_number(&p->out, bits >> 8 * i & 255, 1);
}

void mt_pickle_text(mt_pickler *p, const char *text) {
    mt_pickle_op(p, 'X');
    mt_bytes_number(&p->out, strlen(text), 4);
    mt_bytes_add(&p->out, text, (int64_t)strlen(text));
}

void mt_pickle_global(mt_pickler *p, const char *name) {
    enum { MOST = sizeof p->globals / sizeof *p->globals };
    int i = 0;
    while (i < p->num_globals && strcmp(p->globals[i], name) != 0) i++;
    if (i < p->num_globals) {
        mt_pickle_op(p, 'h');
        mt_bytes_number(&p->out, (uint64_t)i, 1);
        return;
    }
    MT_CHECK(i < MOST);
    p->globals[p->num_globals++] = name;
    mt_pickle_op(p, 'c');
    mt_bytes_add(&p->out, name, (int64_t)strlen(name));
    mt_bytes_add(&p->out, "\nq", 2);
    mt_bytes_number(&p->out, (uint64_t)i, 1);
}

void mt_pickle_tuple(mt_pickler *p, const int64_t *values, int64_t count) {
    mt_pickle_op(p, '(');
    for (int64_t i = 0; i < count; i++) mt_pickle_int(p, values[i]);
    mt_pickle_op(p, 't');
}

void mt_pickle_size(mt_pickler *p, const int64_t *values, int64_t count) {
    mt_pickle_global(p, "torch\nSize");
    mt_pickle_tuple(p, values, count);
    mt_bytes_add(&p->out, "\x85R", 2); // TUPLE1, REDUCE
}

/* The classes of a type and of its storage. */
static const struct {
    mt_dtype dtype;
    const char *type, *storage;
} mt_torch_types[] = {{MT_F32, "torch\nfloat32", "torch\nFloatStorage"},
                      {MT_BF16, "torch\nbfloat16", "torch\nBFloat16Storage"},
                      {MT_F16, "torch\nfloat16", "torch\nHalfStorage"},
                      {MT_F64, "torch\nfloat64", "torch\nDoubleStorage"}};

static int mt_torch_type_index(mt_dtype dtype) {
    for (int i = 0; i < (int)(sizeof mt_torch_types / sizeof *mt_torch_types); i++)
        if (mt_torch_types[i].dtype == dtype) return i;
    mt_die("a tensor of type %s has no class of torch here", mt_dtype_name(dtype));
}

const char *mt_torch_dtype(mt_dtype dtype) {
    return mt_torch_types[mt_torch_type_index(dtype)].type;
}

void mt_pickle_tensor(mt_pickler *p, mt_dtype dtype, const int64_t *shape, int64_t num_dims) {
    int64_t elements = 1, strides[8];
    MT_CHECK(num_dims <= 8);
    for (int64_t i = num_dims - 1; i >= 0; i--) strides[i] = elements, elements *= shape[i];
    mt_pickle_global(p, "torch._utils\n_rebuild_tensor_v2");
    mt_pickle_op(p, '('); // storage, first element, shape, strides, requires_grad, hooks
    mt_pickle_op(p, '(');
    mt_pickle_text(p, "storage");
    mt_pickle_global(p, mt_torch_types[mt_torch_type_index(dtype)].storage);
    mt_pickle_text(p, "0");
    mt_pickle_text(p, "cpu");
    mt_pickle_int(p, elements);
    mt_bytes_add(&p->out, "tQ", 2); // TUPLE, BINPERSID
    mt_pickle_int(p, 0);
    mt_pickle_tuple(p, shape, num_dims);
    mt_pickle_tuple(p, strides, num_dims);
    mt_pickle_bool(p, false);
    mt_pickle_global(p, "collections\nOrderedDict");
    mt_bytes_add(&p->out, ")RtR", 4); // EMPTY_TUPLE, REDUCE, TUPLE, REDUCE
}

/* ---- archives */

#define MT_ARCHIVE "archive/"
enum {
    MT_ZIP_ALIGNMENT = 64,
    MT_ZIP_VERSION = 45,  // of the format: numbers of 64 bits
    MT_ZIP_UTF8 = 1 << 11 // flag: names are UTF-8
};

/* An entry for the directory. */
typedef struct mt_zip_item {
    const char *name;
    int64_t first, bytes; // of its local header; of its data
    uint32_t sum;
} mt_zip_item;

static bool mt_zip_is_wide(int64_t number) {
    return number >= UINT32_MAX;
}

/* The fields that local headers and the directory share: version to name and extra lengths. */
static void mt_zip_add_fields(mt_bytes *to, const mt_zip_item *item, int64_t extra) {
    bool wide = mt_zip_is_wide(item->bytes);
    mt_bytes_number(to, MT_ZIP_VERSION, 2);
    mt_bytes_number(to, MT_ZIP_UTF8, 2);
    mt_bytes_number(to, 0, 2);          // stored
    mt_bytes_number(to, 0, 2);          // time
    mt_bytes_number(to, 1 << 5 | 1, 2); // date: 1980-01-01
    mt_bytes_number(to, item->sum, 4);
    for (int i = 0; i < 2; i++) mt_bytes_number(to, wide ? UINT32_MAX : (uint64_t)item->bytes, 4);
    mt_bytes_number(to, strlen(MT_ARCHIVE) + strlen(item->name), 2);
    mt_bytes_number(to, (uint64_t)extra, 2);
}

static void mt_zip_add_name(mt_bytes *to, const mt_zip_item *item) {
    mt_bytes_add(to, MT_ARCHIVE, (int64_t)strlen(MT_ARCHIVE));
    mt_bytes_add(to, item->name, (int64_t)strlen(item->name));
}

/* Adds the local header of an entry, whose data begin at a multiple of `alignment`; `before`: bytes of the archive
 * before those of `to`. The extra field "FB" is PyTorch's for padding. */
static void mt_zip_add_local(mt_bytes *to, int64_t before, mt_zip_item *item, int64_t alignment) {
    bool wide = mt_zip_is_wide(item->bytes);
    int64_t length = 30 + (int64_t)(strlen(MT_ARCHIVE) + strlen(item->name)) + (wide ? 20 : 0), padding = 0;
    item->first = before + to->count;
    if (alignment > 1) padding = 4 + (-(item->first + length + 4) & (alignment - 1));
    mt_bytes_number(to, 0x04034b50, 4);
    mt_zip_add_fields(to, item, (wide ? 20 : 0) + padding);
    mt_zip_add_name(to, item);
    if (wide) {
        mt_bytes_number(to, 1, 2);
        mt_bytes_number(to, 16, 2);
        for (int i = 0; i < 2; i++) mt_bytes_number(to, (uint64_t)item->bytes, 8);
    }
    if (padding == 0) return;
    mt_bytes_add(to, "FB", 2);
    mt_bytes_number(to, (uint64_t)padding - 4, 2);
    for (int64_t i = 4; i < padding; i++) mt_bytes_add(to, "", 1);
}

static void mt_zip_add_entry(mt_bytes *to, int64_t before, mt_zip_item *item, const mt_zip_sums *sums, const char *name,
                             const char *data, int64_t bytes) {
    uint32_t sum = mt_zip_sum_finish(mt_zip_sum_lines(sums, data, bytes, 1, bytes, 0), bytes);
    *item = (mt_zip_item){.name = name, .bytes = bytes, .sum = sum};
    mt_zip_add_local(to, before, item, 1);
    mt_bytes_add(to, data, bytes);
}

static void mt_zip_add_directory(mt_bytes *to, int64_t before, const mt_zip_item *items, int64_t count) {
    int64_t first = before + to->count;
    for (const mt_zip_item *item = items; item < items + count; item++) {
        bool wide = mt_zip_is_wide(item->bytes), far = mt_zip_is_wide(item->first);
        int64_t extra = (wide ? 16 : 0) + (far ? 8 : 0);
        mt_bytes_number(to, 0x02014b50, 4);
        mt_bytes_number(to, MT_ZIP_VERSION, 2);
        mt_zip_add_fields(to, item, extra > 0 ? extra + 4 : 0);
        mt_bytes_number(to, 0, 2); // comment
        mt_bytes_number(to, 0, 2); // disk
        mt_bytes_number(to, 0, 2); // attributes
        mt_bytes_number(to, 0, 4);
        mt_bytes_number(to, far ? UINT32_MAX : (uint64_t)item->first, 4);
        mt_zip_add_name(to, item);
        if (extra == 0) continue;
        mt_bytes_number(to, 1, 2);
        mt_bytes_number(to, (uint64_t)extra, 2);
        for (int i = 0; i < 2 && wide; i++) mt_bytes_number(to, (uint64_t)item->bytes, 8);
        if (far) mt_bytes_number(to, (uint64_t)item->first, 8);
    }
    int64_t end = before + to->count;
    bool far = mt_zip_is_wide(first);
    if (far) {
        mt_bytes_number(to, 0x06064b50, 4);
        mt_bytes_number(to, 44, 8); // bytes of this record that follow
        mt_bytes_number(to, MT_ZIP_VERSION, 2);
        mt_bytes_number(to, MT_ZIP_VERSION, 2);
        mt_bytes_number(to, 0, 8); // disks
        for (int i = 0; i < 2; i++) mt_bytes_number(to, (uint64_t)count, 8);
        mt_bytes_number(to, (uint64_t)(end - first), 8);
        mt_bytes_number(to, (uint64_t)first, 8);
        mt_bytes_number(to, 0x07064b50, 4);
        mt_bytes_number(to, 0, 4);
        mt_bytes_number(to, (uint64_t)end, 8);
        mt_bytes_number(to, 1, 4);
    }
    mt_bytes_number(to, 0x06054b50, 4);
    mt_bytes_number(to, 0, 4); // disks
    for (int i = 0; i < 2; i++) mt_bytes_number(to, (uint64_t)count, 2);
    mt_bytes_number(to, (uint64_t)(end - first), 4);
    mt_bytes_number(to, far ? UINT32_MAX : (uint64_t)first, 4);
    mt_bytes_number(to, 0, 2); // comment
}

void mt_archive_make(mt_archive *a, const mt_bytes *pickle, int64_t data_bytes, uint32_t sum) {
    mt_zip_sums sums;
    mt_zip_item items[4];
    int64_t count = 0, before = 0;
    mt_bytes *to = &a->head;
    mt_zip_sums_init(&sums);
    *a = (mt_archive){{0}, {0}};
    mt_zip_add_entry(to, 0, &items[count++], &sums, "data.pkl", pickle->data, pickle->count);
    mt_zip_add_entry(to, 0, &items[count++], &sums, "byteorder", "little", 6);
    if (data_bytes >= 0) {
        items[count] = (mt_zip_item){.name = "data/0", .bytes = data_bytes, .sum = sum};
        mt_zip_add_local(to, 0, &items[count++], MT_ZIP_ALIGNMENT);
        before = a->head.count + data_bytes;
        to = &a->tail;
    }
    mt_zip_add_entry(to, before, &items[count++], &sums, "version", "3\n", 2);
    mt_zip_add_directory(to, before, items, count);
}

void mt_archive_free(mt_archive *a) {
    free(a->head.data), free(a->tail.data);
    *a = (mt_archive){{0}, {0}};
}
