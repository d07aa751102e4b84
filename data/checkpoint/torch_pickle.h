/* torch_pickle.h: the pickles of PyTorch's and Megatron-LM's checkpoints, read into a tree of values. Nothing of a
 * pickle is executed: a class is a name, and its instance a record of the name, the arguments and the state. */
#ifndef MT_TORCH_PICKLE_H
#define MT_TORCH_PICKLE_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_pickled_kind {
    MT_PICKLED_NONE,
    MT_PICKLED_BOOL,    // number
    MT_PICKLED_INT,     // number
    MT_PICKLED_REAL,    // real; also an integer of over 64 bits, rounded
    MT_PICKLED_TEXT,    // text[count], with a 0 behind it; also bytes
    MT_PICKLED_LIST,    // items[count]; also a tuple or a set
    MT_PICKLED_DICT,    // items[2 count]: key, value, key, value ...
    MT_PICKLED_GLOBAL,  // text[count]: "module.name"
    MT_PICKLED_OBJECT,  // items[3]: the global, the arguments (a list), the state or NULL
    MT_PICKLED_STORAGE, // items[1]: the list ("storage", class, key, device, elements)
} mt_pickled_kind;

/* A value. Values may share values, also in a circle, so nothing may walk them to their ends. */
typedef struct mt_pickled {
    mt_pickled_kind kind;
    int32_t room; // private: 1 << room items have memory
    int64_t count;
    union {
        int64_t number;
        double real;
        const char *text;
        struct mt_pickled **items;
    };
} mt_pickled;

typedef struct mt_pickle mt_pickle;

/* Reads a pickle of at most protocol 5. `path` is for messages. Errors, each one line: another opcode than such files
 * have; a global that is not in the list of known ones, by name; a pickle that is cut short, or nested too deep. */
int mt_pickle_read(mt_pickle **pickle, const void *data, int64_t bytes, const char *path, mt_error *error);
void mt_pickle_free(mt_pickle *pickle);
const mt_pickled *mt_pickle_root(const mt_pickle *pickle);

/* The value of a key of a dict, of an attribute of an object whose state is a dict, or NULL; also for value NULL. */
const mt_pickled *mt_pickled_get(const mt_pickled *value, const char *key);

/* Item i of a list; NULL: none. */
const mt_pickled *mt_pickled_item(const mt_pickled *value, int64_t i);

/* The name of the class of an object; NULL: no object. */
const char *mt_pickled_class(const mt_pickled *value);

/* A text; NULL for any other value. */
const char *mt_pickled_text(const mt_pickled *value);

/* True for a whole number in [low, high]; *number is set to it. */
bool mt_pickled_int(const mt_pickled *value, int64_t low, int64_t high, int64_t *number);

/* The whole numbers of a list or of a torch.Size, each >= 0; returns their number, or -1 for more than `max`. */
int64_t mt_pickled_sizes(const mt_pickled *value, int64_t *out, int64_t max);

/* The type of a global such as torch.bfloat16 or torch.BFloat16Storage, or -1. */
int mt_pickled_dtype(const mt_pickled *value);

/* A tensor of a pickle: a view of the storage whose bytes are the entry "data/KEY" of the archive. */
typedef struct mt_torch_tensor {
    const char *key;
    mt_dtype dtype;
    int64_t elements; // of the storage
    int64_t first;    // element of the storage
    int64_t num_dims, shape[8];
    bool contiguous; // by rows, as C's arrays
    int64_t count;   // elements
} mt_torch_tensor;

/* True for a tensor or a parameter of torch that lies inside its storage; its dtype is one that files of tensors
 * have. */
bool mt_pickled_tensor(const mt_pickled *value, mt_torch_tensor *tensor);

#ifdef __cplusplus
}
#endif
#endif
