/* yaml.h: a YAML text as a tree of texts, lists and sections: the one reader for files of options and of roles.
 *
 * Aliases (*a) are further uses of a node, and merges (<<) are resolved when the tree is built: keys of the section
 * itself come before merged ones, as PyYAML has them. References ${...} are replaced when a value is read, as OmegaConf
 * replaces them: ${a.b.0} from the root, ${.b} from the section around the value, oc.env, oc.select, oc.decode; a name
 * without a key is a variable of the file's section ENV_VARS, or of the environment. A small file must not cost
 * unbounded work: nesting, anchors, merges, references and visits of nodes have limits, and so do texts. */
#ifndef MT_YAML_H
#define MT_YAML_H

#include "../../megatron.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_yaml_kind { MT_YAML_TEXT, MT_YAML_LIST, MT_YAML_SECTION } mt_yaml_kind;

typedef struct mt_yaml_node {
    mt_yaml_kind kind;
    bool is_plain;    // a text without quotes
    const char *text; // "" for a list and a section
    long long line;   // from 1
    int64_t count;    // of a list's values, of a section's keys, the merged ones among them
    struct mt_yaml_node **keys, **values;
    struct mt_yaml_node *parent; // the list or section that it is in; the first one, if aliases put it into several
    int merging;                 // for mt_yaml_open
} mt_yaml_node;

typedef struct mt_yaml {
    const char *path, *text; // of the file; not copied
    char *read;              // the text, if mt_yaml_open_file has read it
    int64_t bytes;
    mt_yaml_node *root;      // NULL: an empty text
    const char *absent_path; // references to what begins with this are null where there is no such key; NULL: none are
    bool expands_plain;      // $NAME of a variable is ${NAME}
    bool keeps_unset;        // mt_yaml_value keeps a variable that is not set as it is written, and names it:
    char unset[112];
    mt_yaml_node *nodes;
    int64_t num_nodes;
    int64_t visits; // see mt_yaml_visit
    void *document;
    struct mt_yaml *overrides; // the texts of mt_yaml_override, as trees whose nodes are in this one
    mt_yaml_node **copies;     // sections that they change
    int64_t num_overrides, num_copies;
    mt_error *error; // of the functions below, without a parameter for it
} mt_yaml;

enum {
    MT_YAML_BYTES = 1 << 16,  // of one text, less one
    MT_YAML_COMMAND_LINE = -1 // in place of a line: of a node that mt_yaml_override put in
};

/* "FILE:LINE: " or "command line: ", for messages. */
typedef struct mt_yaml_place {
    char text[300];
} mt_yaml_place;
mt_yaml_place mt_yaml_place_of(const mt_yaml *yaml, long long line);

/* Reads the one document of a text. Close it if 0. `path` is for messages. */
int mt_yaml_open(mt_yaml *yaml, const char *text, int64_t bytes, const char *path, mt_error *error);
/* The same for a file of at most so many bytes. */
int mt_yaml_open_file(mt_yaml *yaml, const char *path, int64_t most_bytes, mt_error *error);
void mt_yaml_close(mt_yaml *yaml);

/* Changes the tree as Hydra's command line does: "a.b=VALUE" gives a key its value in YAML, or adds it; "+a.b=VALUE"
 * and "++a.b=VALUE" are the same; "~a.b" removes it. Sections that are missing are added, and one that an alias shares
 * is changed in this place alone. */
int mt_yaml_override(mt_yaml *yaml, const char *text);

/* True for a text of the form that mt_yaml_override takes. */
bool mt_yaml_is_override(const char *text);

/* Counts a visit of a node; too many, which aliases make of a small file, or a text that is too long, are an error. */
int mt_yaml_visit(mt_yaml *yaml, const mt_yaml_node *node);

/* An error at a node's line; returns -1. */
int mt_yaml_fail(const mt_yaml *yaml, const mt_yaml_node *node, const char *what);

/* True for a plain scalar that means null. */
bool mt_yaml_is_null(const mt_yaml_node *node);

/* True for a section or a list with nothing in it. */
bool mt_yaml_is_empty(const mt_yaml_node *node);

/* The value of a section's key; NULL: there is none, or no section. */
mt_yaml_node *mt_yaml_find(const mt_yaml_node *section, const char *name, size_t length);
mt_yaml_node *mt_yaml_get(const mt_yaml_node *section, const char *name);

/* An error if a key of a section is no name, or stands twice with two values. */
int mt_yaml_check_keys(mt_yaml *yaml, const mt_yaml_node *section);

/* The node of a path "a.b.0", ".b", "..b"; `from` has the reference. */
int mt_yaml_find_path(mt_yaml *yaml, const char *path, const mt_yaml_node *from, mt_yaml_node **found);

/* Replaces a node that is one reference by the node that it leads to. */
int mt_yaml_follow(mt_yaml *yaml, mt_yaml_node **node);

/* The text of a node with its references replaced, to free; NULL with error. */
char *mt_yaml_expand(mt_yaml *yaml, const mt_yaml_node *node);

/* The same as a value: a plain whole number of YAML 1.1, 1_000 or 0x1F, is in decimal if a number is wanted, and a
 * plain octal one, 017, is an error. */
char *mt_yaml_value(mt_yaml *yaml, const mt_yaml_node *node, bool wants_number);

/* The value of a node in JSON, with the types that YAML 1.1 gives it; NULL with error. */
json_t *mt_yaml_json(mt_yaml *yaml, mt_yaml_node *node);

/* True if a reference of the file leads to a key of the root, or into it. */
bool mt_yaml_refers_to(const mt_yaml *yaml, const char *name);

#ifdef __cplusplus
}
#endif
#endif
