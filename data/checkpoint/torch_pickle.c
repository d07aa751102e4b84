/* torch_pickle.c: reads the pickles of PyTorch's and Megatron-LM's checkpoints into a tree of values. The machine of a
 * pickle is a stack; its opcodes are those of CPython's Lib/pickletools.py. Invariants: no name is looked up and no
 * function called; a value has at most a few words for each byte of the pickle; nothing here calls itself. */
#include "torch_pickle.h"

#include <stdlib.h>
#include <string.h>

enum {
    MT_PICKLE_STACK = 1 << 20, // values on the stack
    MT_PICKLE_MARKS = 1000,    // nested marks
    MT_PICKLE_BLOCK = 1 << 16, // bytes of a block of memory
};
static const int64_t MT_PICKLE_BYTES = (int64_t)1 << 30; // of a pickle

typedef struct mt_block {
    struct mt_block *next;
    int64_t used, room;
    max_align_t bytes[];
} mt_block;

struct mt_pickle {
    mt_block *blocks;
    mt_pickled *root;
};

typedef struct mt_pickle_reader {
    mt_pickle *pickle;
    const unsigned char *begin, *at, *end;
    const char *path;
    mt_error *error;
    mt_pickled **stack, **memo;
    int64_t count, room, memo_count, memo_room;
    int64_t marks[MT_PICKLE_MARKS], num_marks;
} mt_pickle_reader;

/* ---- the globals that checkpoints have; each becomes a name */

/* Modules with blanks between the names that are known of them. Enumerations, types and plain records, whose values
 * Megatron-LM's own list of safe globals (megatron/core/safe_globals.py) has, or that .metadata has. */
static const struct {
    const char *module, *names;
} mt_known_globals[] = {
    {"argparse", "Namespace"},
    {"builtins", "bytearray complex dict frozenset list set slice tuple"},
    {"__builtin__", "bytearray dict frozenset list set tuple"},
    {"_codecs", "encode"},
    {"collections", "OrderedDict defaultdict deque"},
    {"copyreg", "_reconstructor"},
    {"copy_reg", "_reconstructor"},
    {"enum", "Enum"},
    {"io", "BytesIO"},
    {"_io", "BytesIO"},
    {"numpy", "dtype ndarray"},
    {"numpy.core.multiarray", "_reconstruct scalar"},
    {"numpy._core.multiarray", "_reconstruct scalar"},
    {"numpy.dtypes", "UInt32DType"},
    {"pathlib", "Path PosixPath PurePosixPath"},
    {"pathlib._local", "Path PosixPath PurePosixPath"},
    {"signal", "Signals"},
    {"torch",
     "BFloat16Storage BoolStorage ByteStorage CharStorage DoubleStorage FloatStorage HalfStorage IntStorage "
     "LongStorage ShortStorage Size Tensor bfloat16 bool device dtype float float16 float32 float64 float8_e4m3fn "
     "float8_e5m2 half int16 int32 int64 int8 uint16 uint32 uint64 uint8 strided"},
    {"torch._C", "Generator"},
    {"torch._utils", "_rebuild_parameter _rebuild_tensor_v2 _rebuild_tensor_v3"},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix"},
    {"torch.distributed.checkpoint.metadata",
     "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
     "TensorStorageMetadata _MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.planner", "SavePlan TensorWriteData WriteItem WriteItemType BytesIOWriteData"},
    {"torch.nn.parameter", "Parameter"},
    {"torch.serialization", "_get_layout"},
    {"torch.storage", "UntypedStorage TypedStorage"},
    {"types", "SimpleNamespace"},
    {"megatron.core.dist_checkpointing.mapping", "ShardedObject ShardedTensor"},
    {"megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"},
    {"megatron.core.enums", "Fp4Recipe Fp8Recipe ModelType"},
    {"megatron.core.optimizer", "OptimizerConfig"},
    {"megatron.core.optimizer.optimizer_config", "OptimizerConfig"},
    {"megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState"},
    {"megatron.core.transformer.cuda_graphs", "CudaGraphScope"},
    {"megatron.core.transformer.enums",
     "AttnBackend AttnMaskType AttnType CudaGraphModule CudaGraphScope InferenceCudaGraphScope LayerType ModelType"},
    {"megatron.core.transformer.moe.upcycling_utils", "UpcyclingMode"},
    {"megatron.model.enums", "ModelType"},
    {"megatron.training.tokenizer.tokenizer", "_BPETokenizer"},
    {"transformer_engine.common.recipe", "DelayedScaling Format"},
};

static bool mt_global_is_known(const char *module, int64_t module_bytes, const char *name, int64_t name_bytes) {
    for (size_t i = 0; i < sizeof mt_known_globals / sizeof *mt_known_globals; i++) {
        const char *known = mt_known_globals[i].module, *names = mt_known_globals[i].names;
        if ((int64_t)strlen(known) != module_bytes || memcmp(known, module, (size_t)module_bytes) != 0) continue;
        for (const char *at = names; *at; at += strspn(at, " ")) {
            int64_t listed = (int64_t)strcspn(at, " ");
            if (listed == name_bytes && memcmp(at, name, (size_t)listed) == 0) return true;
            at += listed;
        }
    }
    return false;
}

/* ---- memory */

static void *mt_pickle_alloc(mt_pickle *pickle, int64_t bytes) {
    int64_t unit = (int64_t)sizeof(max_align_t), need = mt_divide_up(bytes, unit) * unit;
    mt_block *block = pickle->blocks;
    if (!block || block->room - block->used < need) {
        int64_t room = mt_max(need, MT_PICKLE_BLOCK);
        mt_block *added = mt_malloc((int64_t)sizeof *added + room);
        *added = (mt_block){.room = room};
        if (block && need > MT_PICKLE_BLOCK / 4) { // keeps the rest of the first block in use
            added->next = block->next, block->next = added;
        } else {
            added->next = block, pickle->blocks = added;
        }
        block = added;
    }
    void *memory = (char *)block->bytes + block->used;
    block->used += need;
    return memory;
}

static mt_pickled *mt_pickled_new(mt_pickle_reader *r, mt_pickled_kind kind) {
    mt_pickled *value = mt_pickle_alloc(r->pickle, sizeof *value);
    *value = (mt_pickled){.kind = kind, .room = -1};
    return value;
}

/* Room for `more` further items. */
static void mt_pickled_reserve(mt_pickle_reader *r, mt_pickled *value, int64_t used, int64_t more) {
    int64_t room = value->room >= 0 ? (int64_t)1 << value->room : 0;
    if (used + more <= room) return;
    int32_t power = mt_max(value->room, 0);
    while (((int64_t)1 << power) < used + more) power++;
    mt_pickled **items = mt_pickle_alloc(r->pickle, ((int64_t)1 << power) * (int64_t)sizeof *items);
    if (used > 0) memcpy(items, value->items, (size_t)used * sizeof *items);
    value->items = items, value->room = power;
}

static mt_pickled *mt_pickled_new_text(mt_pickle_reader *r, mt_pickled_kind kind, const void *text, int64_t bytes) {
    mt_pickled *value = mt_pickled_new(r, kind);
    char *copy = mt_pickle_alloc(r->pickle, bytes + 1);
    if (bytes > 0) memcpy(copy, text, (size_t)bytes);
    copy[bytes] = 0;
    value->text = copy, value->count = bytes;
    return value;
}

static mt_pickled *mt_pickled_new_int(mt_pickle_reader *r, mt_pickled_kind kind, int64_t number) {
    mt_pickled *value = mt_pickled_new(r, kind);
    value->number = number;
    return value;
}

static mt_pickled *mt_pickled_new_object(mt_pickle_reader *r, mt_pickled *class, mt_pickled *arguments) {
    mt_pickled *value = mt_pickled_new(r, MT_PICKLED_OBJECT);
    mt_pickled_reserve(r, value, 0, 3);
    value->count = 3, value->items[0] = class, value->items[1] = arguments, value->items[2] = NULL;
    return value;
}

/* ---- the stack */

static int mt_pickle_refuse(const mt_pickle_reader *r, const char *what) {
    return mt_error_set(r->error, "%s: not a pickle of a checkpoint: %s at byte %lld; get it again", r->path, what,
                        (long long)(r->at - r->begin));
}

static int mt_pickle_push(mt_pickle_reader *r, mt_pickled *value) {
    if (r->count == MT_PICKLE_STACK) return mt_pickle_refuse(r, "its stack is too deep");
    if (r->count == r->room) {
        r->room = mt_max(2 * r->room, 64);
        r->stack = mt_realloc(r->stack, r->room * (int64_t)sizeof *r->stack);
    }
    r->stack[r->count++] = value;
    return 0;
}

/* The value on top, or NULL with error: none above the last mark. */
static mt_pickled *mt_pickle_pop(mt_pickle_reader *r) {
    int64_t bottom = r->num_marks > 0 ? r->marks[r->num_marks - 1] : 0;
    if (r->count > bottom) return r->stack[--r->count];
    mt_pickle_refuse(r, "its stack is empty");
    return NULL;
}

/* Takes the last mark off and returns its place in the stack, or -1. */
static int64_t mt_pickle_pop_mark(mt_pickle_reader *r) {
    return r->num_marks > 0 ? r->marks[--r->num_marks] : mt_pickle_refuse(r, "a mark is missing");
}

/* `bytes` bytes of the pickle, or NULL with error. */
static const unsigned char *mt_pickle_take(mt_pickle_reader *r, uint64_t bytes) {
    if (bytes > (uint64_t)(r->end - r->at)) {
        mt_pickle_refuse(r, "it ends too early");
        return NULL;
    }
    const unsigned char *taken = r->at;
    r->at += bytes;
    return taken;
}

/* A number of `size` bytes, little-endian. */
static int mt_pickle_take_number(mt_pickle_reader *r, int size, uint64_t *number) {
    const unsigned char *at = mt_pickle_take(r, (uint64_t)size);
    *number = 0;
    for (int i = size - 1; i >= 0 && at; i--) *number = *number << 8 | at[i];
    return at ? 0 : -1;
}

/* ---- opcodes */

/* A text or bytes, whose length is a number of `size` bytes. */
static int mt_pickle_text(mt_pickle_reader *r, int size) {
    uint64_t bytes;
    if (mt_pickle_take_number(r, size, &bytes) != 0) return -1;
    const unsigned char *text = mt_pickle_take(r, bytes);
    return text ? mt_pickle_push(r, mt_pickled_new_text(r, MT_PICKLED_TEXT, text, (int64_t)bytes)) : -1;
}

static int mt_pickle_int(mt_pickle_reader *r, int size) {
    uint64_t number;
    if (mt_pickle_take_number(r, size, &number) != 0) return -1;
    int64_t value = size == 4 ? (int32_t)(uint32_t)number : (int64_t)number;
    return mt_pickle_push(r, mt_pickled_new_int(r, MT_PICKLED_INT, value));
}

/* LONG1 and LONG4: two's complement of any length. */
static int mt_pickle_long(mt_pickle_reader *r, int size) {
    uint64_t bytes, number = 0;
    if (mt_pickle_take_number(r, size, &bytes) != 0) return -1;
    const unsigned char *at = mt_pickle_take(r, bytes);
    if (!at) return -1;
    bool negative = bytes > 0 && at[bytes - 1] >> 7;
    if (bytes <= 8) {
        for (int i = 7; i >= 0; i--) number = number << 8 | ((uint64_t)i < bytes ? at[i] : negative ? 255 : 0);
        return mt_pickle_push(r, mt_pickled_new_int(r, MT_PICKLED_INT, (int64_t)number));
    }
    mt_pickled *value = mt_pickled_new(r, MT_PICKLED_REAL);
    double real = 0;
    for (uint64_t i = bytes; i-- > 0;) real = real * 256 + (negative ? 255 - at[i] : at[i]);
    value->real = negative ? -real - 1 : real;
    return mt_pickle_push(r, value);
}

static int mt_pickle_real(mt_pickle_reader *r) {
    const unsigned char *at = mt_pickle_take(r, 8);
    if (!at) return -1;
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits = bits << 8 | at[i];
    mt_pickled *value = mt_pickled_new(r, MT_PICKLED_REAL);
    memcpy(&value->real, &bits, sizeof bits);
    return mt_pickle_push(r, value);
}

/* Appends the values above stack place `from` to a list, or to a dict in pairs. */
static int mt_pickle_extend(mt_pickle_reader *r, mt_pickled *to, int64_t from, bool pairs) {
    int64_t added = r->count - from, width = pairs ? 2 : 1;
    if (pairs && added % 2 != 0) return mt_pickle_refuse(r, "a key has no value");
    if (to->kind != (pairs ? MT_PICKLED_DICT : MT_PICKLED_LIST))
        return mt_pickle_refuse(r, "items are added to a value that has none");
    mt_pickled_reserve(r, to, to->count * width, added);
    if (added > 0) memcpy(to->items + to->count * width, r->stack + from, (size_t)added * sizeof *to->items);
    to->count += added / width;
    r->count = from;
    return 0;
}

/* A new list or dict of the values above stack place `from`. */
static int mt_pickle_collect(mt_pickle_reader *r, int64_t from, bool pairs) {
    if (from < 0) return -1;
    mt_pickled *value = mt_pickled_new(r, pairs ? MT_PICKLED_DICT : MT_PICKLED_LIST);
    return mt_pickle_extend(r, value, from, pairs) == 0 ? mt_pickle_push(r, value) : -1;
}

/* TUPLE1 to TUPLE3. */
static int mt_pickle_tuple(mt_pickle_reader *r, int64_t count) {
    int64_t bottom = r->num_marks > 0 ? r->marks[r->num_marks - 1] : 0;
    if (r->count - bottom < count) return mt_pickle_refuse(r, "its stack is empty");
    return mt_pickle_collect(r, r->count - count, false);
}

/* APPENDS, ADDITEMS, SETITEMS: the values above the last mark join the one below it. */
static int mt_pickle_join(mt_pickle_reader *r, bool pairs) {
    int64_t from = mt_pickle_pop_mark(r), bottom = r->num_marks > 0 ? r->marks[r->num_marks - 1] : 0;
    if (from < 0) return -1;
    if (from <= bottom) return mt_pickle_refuse(r, "its stack is empty");
    return mt_pickle_extend(r, r->stack[from - 1], from, pairs);
}

/* APPEND, SETITEM. */
static int mt_pickle_join_one(mt_pickle_reader *r, bool pairs) {
    int64_t bottom = r->num_marks > 0 ? r->marks[r->num_marks - 1] : 0, from = r->count - (pairs ? 2 : 1);
    if (from <= bottom) return mt_pickle_refuse(r, "its stack is empty");
    return mt_pickle_extend(r, r->stack[from - 1], from, pairs);
}

static int mt_pickle_global(mt_pickle_reader *r, const char *module, int64_t module_bytes, const char *name,
                            int64_t name_bytes) {
    char whole[256];
    snprintf(whole, sizeof whole, "%.*s.%.*s", (int)mt_min(module_bytes, 120), module, (int)mt_min(name_bytes, 120),
             name);
    for (char *at = whole; *at; at++)
        if ((unsigned char)*at < ' ' || *at == 127) *at = '?';
    if (!mt_global_is_known(module, module_bytes, name, name_bytes))
        return mt_error_set(r->error,
                            "%s: its pickle names \"%s\", which is not among the classes that checkpoints of "
                            "Megatron-LM have; nothing of it is run: save the checkpoint without that object",
                            r->path, whole);
    return mt_pickle_push(r, mt_pickled_new_text(r, MT_PICKLED_GLOBAL, whole, (int64_t)strlen(whole)));
}

/* GLOBAL: two lines. */
static int mt_pickle_global_lines(mt_pickle_reader *r) {
    const char *line[2];
    int64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        const unsigned char *end = memchr(r->at, '\n', (size_t)(r->end - r->at));
        if (!end) return mt_pickle_refuse(r, "it ends too early");
        line[i] = (const char *)r->at, bytes[i] = end - r->at;
        r->at = end + 1;
    }
    return mt_pickle_global(r, line[0], bytes[0], line[1], bytes[1]);
}

static int mt_pickle_stack_global(mt_pickle_reader *r) {
    const mt_pickled *name = mt_pickle_pop(r), *module = name ? mt_pickle_pop(r) : NULL;
    if (!module) return -1;
    if (name->kind != MT_PICKLED_TEXT || module->kind != MT_PICKLED_TEXT)
        return mt_pickle_refuse(r, "the name of a class is no text");
    return mt_pickle_global(r, module->text, module->count, name->text, name->count);
}

/* True for the classes whose instances hold items of their own. */
static bool mt_global_is_dict(const mt_pickled *class) {
    return strcmp(class->text, "collections.OrderedDict") == 0 || strcmp(class->text, "collections.defaultdict") == 0 ||
           strcmp(class->text, "builtins.dict") == 0 || strcmp(class->text, "__builtin__.dict") == 0;
}

static bool mt_global_is_list(const mt_pickled *class) {
    static const char *const names[] = {"list", "tuple", "set", "frozenset"};
    const char *dot = strrchr(class->text, '.');
    if (strncmp(class->text, "builtins.", 9) != 0 && strncmp(class->text, "__builtin__.", 12) != 0) return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(dot + 1, names[i]) == 0) return true;
    return false;
}

/* The first item of a tuple, if it is of a kind. */
static mt_pickled *mt_arguments_first(const mt_pickled *arguments, mt_pickled_kind kind) {
    return arguments->count > 0 && arguments->items[0]->kind == kind ? arguments->items[0] : NULL;
}

/* REDUCE and NEWOBJ: an instance, which is a record. */
static int mt_pickle_make(mt_pickle_reader *r) {
    mt_pickled *arguments = mt_pickle_pop(r), *class = arguments ? mt_pickle_pop(r) : NULL;
    if (!class) return -1;
    if (class->kind != MT_PICKLED_GLOBAL || arguments->kind != MT_PICKLED_LIST)
        return mt_pickle_refuse(r, "an instance has no class");
    if (mt_global_is_dict(class)) {
        mt_pickled *dict = mt_pickled_new(r, MT_PICKLED_DICT), *list = mt_arguments_first(arguments, MT_PICKLED_LIST);
        for (int64_t i = 0; list && i < list->count; i++) { // Python 2 gives pairs
            const mt_pickled *pair = list->items[i];
            if (pair->kind != MT_PICKLED_LIST || pair->count != 2) return mt_pickle_refuse(r, "a key has no value");
            mt_pickled_reserve(r, dict, 2 * dict->count, 2);
            dict->items[2 * dict->count] = pair->items[0], dict->items[2 * dict->count + 1] = pair->items[1];
            dict->count++;
        }
        return mt_pickle_push(r, dict);
    }
    mt_pickled *items = mt_global_is_list(class) ? mt_arguments_first(arguments, MT_PICKLED_LIST) : NULL;
    if (items) return mt_pickle_push(r, items);
    return mt_pickle_push(r, mt_pickled_new_object(r, class, arguments));
}

/* NEWOBJ_EX: with arguments by name, which are left out. */
static int mt_pickle_make_named(mt_pickle_reader *r) {
    return mt_pickle_pop(r) ? mt_pickle_make(r) : -1;
}

/* BUILD: the state of an instance; attributes of a dict are left out. */
static int mt_pickle_build(mt_pickle_reader *r) {
    mt_pickled *state = mt_pickle_pop(r);
    int64_t bottom = r->num_marks > 0 ? r->marks[r->num_marks - 1] : 0;
    if (!state) return -1;
    if (r->count <= bottom) return mt_pickle_refuse(r, "its stack is empty");
    mt_pickled *value = r->stack[r->count - 1];
    if (value->kind == MT_PICKLED_DICT) return 0;
    if (value->kind != MT_PICKLED_OBJECT) return mt_pickle_refuse(r, "a plain value has a state");
    value->items[2] = state;
    return 0;
}

static int mt_pickle_persistent(mt_pickle_reader *r) {
    mt_pickled *id = mt_pickle_pop(r);
    if (!id) return -1;
    const char *tag = mt_pickled_text(mt_pickled_item(id, 0));
    if (id->kind != MT_PICKLED_LIST || id->count != 5 || !tag || strcmp(tag, "storage") != 0)
        return mt_pickle_refuse(r, "a reference is to no storage of a tensor");
    mt_pickled *value = mt_pickled_new(r, MT_PICKLED_STORAGE);
    mt_pickled_reserve(r, value, 0, 1);
    value->items[0] = id, value->count = 1;
    return mt_pickle_push(r, value);
}

/* BINPUT, LONG_BINPUT, MEMOIZE: writers number values in their order. */
static int mt_pickle_put(mt_pickle_reader *r, uint64_t index) {
    int64_t bottom = r->num_marks > 0 ? r->marks[r->num_marks - 1] : 0;
    if (r->count <= bottom) return mt_pickle_refuse(r, "its stack is empty");
    if (index > (uint64_t)r->memo_count) return mt_pickle_refuse(r, "a number of the memo is skipped");
    if (r->memo_count == r->memo_room) {
        r->memo_room = mt_max(2 * r->memo_room, 256);
        r->memo = mt_realloc(r->memo, r->memo_room * (int64_t)sizeof *r->memo);
    }
    if ((int64_t)index == r->memo_count) r->memo_count++;
    r->memo[index] = r->stack[r->count - 1];
    return 0;
}

static int mt_pickle_get(mt_pickle_reader *r, int size) {
    uint64_t index;
    if (mt_pickle_take_number(r, size, &index) != 0) return -1;
    if (index >= (uint64_t)r->memo_count) return mt_pickle_refuse(r, "the memo has no such number");
    return mt_pickle_push(r, r->memo[index]);
}

static int mt_pickle_put_numbered(mt_pickle_reader *r, int size) {
    uint64_t index;
    return mt_pickle_take_number(r, size, &index) == 0 ? mt_pickle_put(r, index) : -1;
}

static int mt_pickle_mark(mt_pickle_reader *r) {
    if (r->num_marks == MT_PICKLE_MARKS) return mt_pickle_refuse(r, "it is nested too deep");
    r->marks[r->num_marks++] = r->count;
    return 0;
}

static int mt_pickle_pop_to_mark(mt_pickle_reader *r) {
    int64_t from = mt_pickle_pop_mark(r);
    if (from >= 0) r->count = from;
    return from < 0 ? -1 : 0;
}

static int mt_pickle_protocol(mt_pickle_reader *r) {
    const unsigned char *version = mt_pickle_take(r, 1);
    if (!version) return -1;
    return *version <= 5 ? 0 : mt_pickle_refuse(r, "its protocol is later than 5");
}

/* Runs one opcode other than STOP. */
static int mt_pickle_step(mt_pickle_reader *r, unsigned char opcode) {
    switch (opcode) {
    case 0x80:
        return mt_pickle_protocol(r);
    case 0x95:
        return mt_pickle_take(r, 8) ? 0 : -1; // FRAME
    case '(':
        return mt_pickle_mark(r);
    case '0':
        return mt_pickle_pop(r) ? 0 : -1;
    case '1':
        return mt_pickle_pop_to_mark(r);
    case 'N':
        return mt_pickle_push(r, mt_pickled_new(r, MT_PICKLED_NONE));
    case 0x88:
        return mt_pickle_push(r, mt_pickled_new_int(r, MT_PICKLED_BOOL, 1));
    case 0x89:
        return mt_pickle_push(r, mt_pickled_new_int(r, MT_PICKLED_BOOL, 0));
    case 'J':
        return mt_pickle_int(r, 4);
    case 'K':
        return mt_pickle_int(r, 1);
    case 'M':
        return mt_pickle_int(r, 2);
    case 0x8a:
        return mt_pickle_long(r, 1);
    case 0x8b:
        return mt_pickle_long(r, 4);
    case 'G':
        return mt_pickle_real(r);
    case 0x8c: // SHORT_BINUNICODE, SHORT_BINBYTES, SHORT_BINSTRING
    case 'C':
    case 'U':
        return mt_pickle_text(r, 1);
    case 'X': // BINUNICODE, BINBYTES, BINSTRING
    case 'B':
    case 'T':
        return mt_pickle_text(r, 4);
    case 0x8d: // BINUNICODE8, BINBYTES8, BYTEARRAY8
    case 0x8e:
    case 0x96:
        return mt_pickle_text(r, 8);
    case ']': // EMPTY_LIST, EMPTY_TUPLE, EMPTY_SET
    case ')':
    case 0x8f:
        return mt_pickle_collect(r, r->count, false);
    case '}':
        return mt_pickle_collect(r, r->count, true);
    case 'l': // LIST, TUPLE, FROZENSET
    case 't':
    case 0x91:
        return mt_pickle_collect(r, mt_pickle_pop_mark(r), false);
    case 'd':
        return mt_pickle_collect(r, mt_pickle_pop_mark(r), true);
    case 0x85:
    case 0x86:
    case 0x87:
        return mt_pickle_tuple(r, opcode - 0x84);
    case 'a':
        return mt_pickle_join_one(r, false);
    case 'e': // APPENDS, ADDITEMS
    case 0x90:
        return mt_pickle_join(r, false);
    case 's':
        return mt_pickle_join_one(r, true);
    case 'u':
        return mt_pickle_join(r, true);
    case 'q':
        return mt_pickle_put_numbered(r, 1);
    case 'r':
        return mt_pickle_put_numbered(r, 4);
    case 0x94:
        return mt_pickle_put(r, (uint64_t)r->memo_count);
    case 'h':
        return mt_pickle_get(r, 1);
    case 'j':
        return mt_pickle_get(r, 4);
    case 'c':
        return mt_pickle_global_lines(r);
    case 0x93:
        return mt_pickle_stack_global(r);
    case 'R': // REDUCE, NEWOBJ
    case 0x81:
        return mt_pickle_make(r);
    case 0x92:
        return mt_pickle_make_named(r);
    case 'b':
        return mt_pickle_build(r);
    case 'Q':
        return mt_pickle_persistent(r);
    default:
        break;
    }
    return mt_error_set(r->error,
                        "%s: not a pickle of a checkpoint: opcode 0x%02x at byte %lld is not one that "
                        "PyTorch writes; get it again",
                        r->path, opcode, (long long)(r->at - 1 - r->begin));
}

static int mt_pickle_run(mt_pickle_reader *r) {
    for (;;) {
        const unsigned char *opcode = mt_pickle_take(r, 1);
        if (!opcode) return -1;
        if (*opcode == '.') break;
        if (mt_pickle_step(r, *opcode) != 0) return -1;
    }
    if (r->count != 1 || r->num_marks != 0) return mt_pickle_refuse(r, "it has more than one value");
    r->pickle->root = r->stack[0];
    return 0;
}

int mt_pickle_read(mt_pickle **pickle, const void *data, int64_t bytes, const char *path, mt_error *error) {
    *pickle = NULL;
    if (bytes > MT_PICKLE_BYTES)
        return mt_error_set(error, "%s: its pickle has over 1 GiB, more than any checkpoint's", path);
    mt_pickle_reader r = {.begin = data, .at = data, .path = path, .error = error};
    r.end = r.begin + bytes;
    r.pickle = mt_calloc(sizeof *r.pickle);
    int status = mt_pickle_run(&r);
    free(r.stack), free(r.memo);
    if (status == 0)
        *pickle = r.pickle;
    else
        mt_pickle_free(r.pickle);
    return status;
}

void mt_pickle_free(mt_pickle *pickle) {
    if (!pickle) return;
    for (mt_block *block = pickle->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(pickle);
}

const mt_pickled *mt_pickle_root(const mt_pickle *pickle) {
    return pickle->root;
}

/* ---- values */

const mt_pickled *mt_pickled_get(const mt_pickled *value, const char *key) {
    if (value && value->kind == MT_PICKLED_OBJECT) value = value->items[2];
    if (!value || value->kind != MT_PICKLED_DICT) return NULL;
    int64_t bytes = (int64_t)strlen(key);
    for (int64_t i = 0; i < value->count; i++) {
        const mt_pickled *name = value->items[2 * i];
        if (name->kind == MT_PICKLED_TEXT && name->count == bytes && memcmp(name->text, key, (size_t)bytes) == 0)
            return value->items[2 * i + 1];
    }
    return NULL;
}

const mt_pickled *mt_pickled_item(const mt_pickled *value, int64_t i) {
    return value && value->kind == MT_PICKLED_LIST && i < value->count ? value->items[i] : NULL;
}

const char *mt_pickled_class(const mt_pickled *value) {
    return value && value->kind == MT_PICKLED_OBJECT ? value->items[0]->text : NULL;
}

const char *mt_pickled_text(const mt_pickled *value) {
    return value && value->kind == MT_PICKLED_TEXT ? value->text : NULL;
}

bool mt_pickled_int(const mt_pickled *value, int64_t low, int64_t high, int64_t *number) {
    if (!value || value->kind != MT_PICKLED_INT || value->number < low || value->number > high) return false;
    *number = value->number;
    return true;
}

int64_t mt_pickled_sizes(const mt_pickled *value, int64_t *out, int64_t max) {
    const char *class = mt_pickled_class(value);
    if (class && strcmp(class, "torch.Size") == 0) value = mt_pickled_item(value->items[1], 0);
    if (!value || value->kind != MT_PICKLED_LIST || value->count > max) return -1;
    for (int64_t i = 0; i < value->count; i++)
        if (!mt_pickled_int(value->items[i], 0, INT64_MAX, &out[i])) return -1;
    return value->count;
}

int mt_pickled_dtype(const mt_pickled *value) {
    static const struct {
        const char *name;
        mt_dtype dtype;
    } rows[] = {{"torch.float32", MT_F32},
                {"torch.float", MT_F32},
                {"torch.FloatStorage", MT_F32},
                {"torch.bfloat16", MT_BF16},
                {"torch.BFloat16Storage", MT_BF16},
                {"torch.float16", MT_F16},
                {"torch.half", MT_F16},
                {"torch.HalfStorage", MT_F16},
                {"torch.float64", MT_F64},
                {"torch.DoubleStorage", MT_F64},
                {"torch.uint8", MT_U8},
                {"torch.ByteStorage", MT_U8},
                {"torch.int8", MT_I8},
                {"torch.CharStorage", MT_I8},
                {"torch.int16", MT_I16},
                {"torch.ShortStorage", MT_I16},
                {"torch.int32", MT_I32},
                {"torch.IntStorage", MT_I32},
                {"torch.int64", MT_I64},
                {"torch.LongStorage", MT_I64},
                {"torch.bool", MT_BOOL},
                {"torch.BoolStorage", MT_BOOL},
                {"torch.float8_e4m3fn", MT_F8_E4M3},
                {"torch.float8_e5m2", MT_F8_E5M2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows && value && value->kind == MT_PICKLED_GLOBAL; i++)
        if (strcmp(rows[i].name, value->text) == 0) return rows[i].dtype;
    return -1;
}

/* True if a shape's rows follow one another; *count is the number of elements. */
static bool mt_shape_is_contiguous(const mt_torch_tensor *tensor, const int64_t *strides, int64_t *count) {
    bool contiguous = true;
    *count = 1;
    for (int64_t i = tensor->num_dims - 1; i >= 0; i--) {
        contiguous = contiguous && (tensor->shape[i] <= 1 || strides[i] == *count);
        if (__builtin_mul_overflow(*count, tensor->shape[i], count)) *count = INT64_MAX;
        if (*count == INT64_MAX) return false;
    }
    return contiguous;
}

bool mt_pickled_tensor(const mt_pickled *value, mt_torch_tensor *tensor) {
    int64_t strides[8];
    for (int depth = 0; depth < 2; depth++) { // a parameter is made of a tensor
        const char *made = mt_pickled_class(value);
        if (made && strcmp(made, "torch._utils._rebuild_parameter") == 0) value = mt_pickled_item(value->items[1], 0);
    }
    const char *class = mt_pickled_class(value);
    if (!class || strncmp(class, "torch._utils._rebuild_tensor_v", 30) != 0) return false;
    const mt_pickled *arguments = value->items[1], *storage = mt_pickled_item(arguments, 0);
    if (!storage || storage->kind != MT_PICKLED_STORAGE) return false;
    const mt_pickled *id = storage->items[0];
    bool untyped = strcmp(class, "torch._utils._rebuild_tensor_v3") == 0; // its type is an argument
    int dtype = mt_pickled_dtype(untyped ? mt_pickled_item(arguments, 6) : mt_pickled_item(id, 1));
    *tensor = (mt_torch_tensor){.key = mt_pickled_text(mt_pickled_item(id, 2))};
    if (dtype < 0 || !tensor->key) return false;
    tensor->dtype = (mt_dtype)dtype;
    if (!mt_pickled_int(mt_pickled_item(id, 4), 0, INT64_MAX, &tensor->elements)) return false;
    if (untyped) tensor->elements /= mt_dtype_size(tensor->dtype); // counted in bytes
    if (!mt_pickled_int(mt_pickled_item(arguments, 1), 0, tensor->elements, &tensor->first)) return false;
    tensor->num_dims = mt_pickled_sizes(mt_pickled_item(arguments, 2), tensor->shape, 8);
    if (tensor->num_dims < 0 || mt_pickled_sizes(mt_pickled_item(arguments, 3), strides, 8) != tensor->num_dims)
        return false;
    tensor->contiguous = mt_shape_is_contiguous(tensor, strides, &tensor->count);
    return !tensor->contiguous || tensor->count <= tensor->elements - tensor->first;
}
