/* role_config.c: reads a YAML file with roles. libyaml loads the document as a tree, with anchors and aliases; a walk
 * over the keys of the pipeline and of one role looks each up in role_keys.c. References ${...} follow OmegaConf. */
#include "role_config.h"

#include "../base/file.h"
#include "megatron_names.h"
#include "option_table.h"
#include "role_keys.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

static void free_entry(mt_role_entry *entry) {
    free(entry->key);
    free(entry->option);
    free(entry->text);
    free(entry->accepted);
    mt_strings_free(&entry->values);
}

void mt_role_config_free(mt_role_config *config) {
    for (int64_t i = 0; i < config->count; i++) free_entry(&config->entries[i]);
    free(config->entries);
    *config = (mt_role_config){0};
}

#ifdef MT_HAVE_YAML
enum {
    MAX_NESTING = 16,    // of collections; sections of options nest 8 deep at most, and may hold lists
    MAX_ANCHORS = 1000,  // with aliases; libyaml compares each with all before it
    MAX_DEPTH = 12,      // of sections that "<<" merges
    MAX_REFERENCES = 16, // that lead to one another
    MAX_NODES = 20000,   // visited; with aliases a small file could have more than any memory
    MAX_TEXT = 16384,    // bytes of a value
    MAX_KEY = 400,       // bytes of a key with its sections
    MAX_SEARCHED = 2000, // names of Megatron-LM's options, likewise
    MAX_UNKNOWN = 50,    // keys whose nearest names are looked up
    MAX_FILE = 1 << 20,  // bytes of a file that a key names
    VERL_LENGTH = 512,   // of prompts and of responses, by default
    VERL_BATCH = 1024,   // prompts of an iteration, by default
    ROLL_PROMPT = 1024
};

typedef struct reader {
    yaml_document_t document;
    mt_role_config *config;
    const char *path, *role;
    const char *stage; // of the role; NULL: it does not train
    const char *text;  // of the file
    int64_t bytes;
    bool has_role;
    char key[MAX_KEY]; // of the value at hand, with its sections
    int64_t visited;
    int depth; // of sections; 1: the keys of the file
    int64_t num_unknown, num_searched;
    bool is_other; // the keys at hand are another role's, and only their names matter
    mt_error *error;
} reader;

/* ---- the tree ------------------------------------------------------------------------------------------------------
 */

static yaml_node_t *get_node(reader *r, int index) {
    return yaml_document_get_node(&r->document, index);
}

static long long line_of(const yaml_node_t *node) {
    return (long long)node->start_mark.line + 1;
}

static bool is_mapping(const yaml_node_t *node) {
    return node->type == YAML_MAPPING_NODE;
}

static const char *scalar_text(const yaml_node_t *node) {
    return node->type == YAML_SCALAR_NODE ? (const char *)node->data.scalar.value : "";
}

static bool is_null(const yaml_node_t *node) {
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", "None"};
    if (node->type != YAML_SCALAR_NODE || node->data.scalar.style != YAML_PLAIN_SCALAR_STYLE) return false;
    for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++)
        if (strcmp(scalar_text(node), nulls[i]) == 0) return true;
    return false;
}

/* A section or a list with nothing in it. */
static bool is_empty(const yaml_node_t *node) {
    if (is_mapping(node)) return node->data.mapping.pairs.start == node->data.mapping.pairs.top;
    return node->type == YAML_SEQUENCE_NODE && node->data.sequence.items.start == node->data.sequence.items.top;
}

static int fail_at(const reader *r, const yaml_node_t *node, const char *what) {
    return mt_error_set(r->error, "%s:%lld: %s", r->path, line_of(node), what);
}

/* Counts a visit of a node; a text in it must not end early. */
static int visit(reader *r, const yaml_node_t *node) {
    if (++r->visited > MAX_NODES) return fail_at(r, node, "holds more than a file of roles could need");
    if (node->type != YAML_SCALAR_NODE) return 0;
    if (strlen(scalar_text(node)) != node->data.scalar.length) return fail_at(r, node, "holds a zero byte");
    return node->data.scalar.length < MAX_TEXT ? 0 : fail_at(r, node, "holds a text of more than 16 KiB");
}

/* The value of a key; NULL if there is none. Keys of the section itself come before merged ones ("<<"). */
static yaml_node_t *find_key(reader *r, const yaml_node_t *mapping, const char *name, size_t length, int depth) {
    yaml_node_t *merged = NULL;
    if (!mapping || !is_mapping(mapping) || depth > MAX_DEPTH) return NULL;
    if (depth > 0 && ++r->visited > MAX_NODES) return NULL; // the next visit is an error
    const yaml_node_pair_t *pair = mapping->data.mapping.pairs.start;
    for (; pair < mapping->data.mapping.pairs.top; pair++) {
        const char *key = scalar_text(get_node(r, pair->key));
        yaml_node_t *value = get_node(r, pair->value);
        if (strlen(key) == length && strncmp(key, name, length) == 0) return value;
        if (strcmp(key, "<<") != 0 || merged) continue;
        merged = find_key(r, value, name, length, depth + 1);
        if (value->type != YAML_SEQUENCE_NODE) continue;
        const yaml_node_item_t *item = value->data.sequence.items.start;
        for (; item < value->data.sequence.items.top && !merged; item++)
            merged = find_key(r, get_node(r, *item), name, length, depth + 1);
    }
    return merged;
}

static yaml_node_t *find_root_key(reader *r, const char *name) {
    return find_key(r, yaml_document_get_root_node(&r->document), name, strlen(name), 0);
}

/* ---- references ----------------------------------------------------------------------------------------------------
 */

/* The end of the reference that begins at `text`, "${", behind its brace; NULL: there is none. */
static const char *reference_end(const char *text) {
    int open = 0;
    for (const char *at = text; *at; at++) {
        if (at[0] == '$' && at[1] == '{')
            open++, at++;
        else if (*at == '{') // of a default, {}
            open++;
        else if (*at == '}' && --open == 0)
            return at + 1;
    }
    return NULL;
}

static int follow(reader *r, yaml_node_t **node, int depth);

/* The section or list that a node is in, the first of the file if aliases put it into several; NULL: none. */
static yaml_node_t *parent_of(reader *r, const yaml_node_t *child) {
    yaml_node_t *first = r->document.nodes.start, *end = r->document.nodes.top;
    if (child < first || child >= end) return NULL;
    int index = (int)(child - first) + 1;
    r->visited += (end - first) / 64; // a search is quicker than visits; too many are an error of the next one
    for (yaml_node_t *node = first; node < end; node++) {
        if (node->type == YAML_SEQUENCE_NODE) {
            const yaml_node_item_t *item = node->data.sequence.items.start;
            for (; item < node->data.sequence.items.top; item++)
                if (*item == index) return node;
        } else if (is_mapping(node)) {
            const yaml_node_pair_t *pair = node->data.mapping.pairs.start;
            for (; pair < node->data.mapping.pairs.top; pair++)
                if (pair->value == index) return node;
        }
    }
    return NULL;
}

/* The node of a path: "a.b.0" from the root of the file, ".b" from the section that `from` is in, "..b" from the one
 * around that. */
static int find_path(reader *r, const char *path, const yaml_node_t *from, yaml_node_t **found, int depth) {
    yaml_node_t *node = yaml_document_get_root_node(&r->document);
    const char *at = path;
    for (const yaml_node_t *inner = from; *at == '.' && node; at++) inner = node = parent_of(r, inner);
    while (node && *at) {
        size_t length = strcspn(at, ".");
        if (follow(r, &node, depth) != 0) return -1;
        if (node->type == YAML_SEQUENCE_NODE && length > 0 && strspn(at, "0123456789") == length) {
            const yaml_node_item_t *first = node->data.sequence.items.start, *end = node->data.sequence.items.top;
            long long index = strtoll(at, NULL, 10);
            node = index < end - first ? get_node(r, first[index]) : NULL;
        } else {
            node = find_key(r, node, at, length, 0);
        }
        at += length;
        at += *at == '.';
    }
    *found = *path ? node : NULL;
    if (*found) return 0;
    return mt_error_set(r->error, "%s:%lld: ${%.100s}: the file has no such key", r->path, line_of(from), path);
}

static char *expand(reader *r, const yaml_node_t *from, const char *text, int depth);

/* The text of a resolver, "oc.env:NAME,default", "oc.select:a.b,default" or "oc.decode:text", to free. */
static char *resolve_call(reader *r, const yaml_node_t *from, const char *call, int depth) {
    const char *argument = strchr(call, ':') + 1, *comma = strchr(argument, ',');
    char name[200];
    yaml_node_t *node = NULL;
    mt_error ignored, *error = r->error;
    snprintf(name, sizeof name, "%.*s", comma ? (int)(comma - argument) : (int)strlen(argument), argument);
    if (strncmp(call, "oc.decode:", 10) == 0) return mt_strdup(argument);
    if (strncmp(call, "oc.env:", 7) == 0) {
        const char *value = getenv(name);
        if (value || comma) return mt_strdup(value ? value : comma + 1 + strspn(comma + 1, " "));
        mt_error_set(error, "%s:%lld: ${%.100s}: the environment has no such variable", r->path, line_of(from), call);
        return NULL;
    }
    if (strncmp(call, "oc.select:", 10) == 0) {
        r->error = comma ? &ignored : error;
        int status = find_path(r, name, from, &node, depth);
        r->error = error;
        if (status != 0) return comma ? mt_strdup(comma + 1 + strspn(comma + 1, " ")) : NULL;
        if (follow(r, &node, depth) != 0) return NULL;
        return expand(r, node, scalar_text(node), depth);
    }
    mt_error_set(error, "%s:%lld: ${%.100s}: of the resolvers, oc.decode, oc.env and oc.select are supported", r->path,
                 line_of(from), call);
    return NULL;
}

/* True for a path into Trinity-RFT's configuration of verl: keys that it lacks have verl's defaults. */
static bool is_in_trainer(const char *path) {
    return strncmp(path, "trainer.trainer_config.", 23) == 0;
}

/* The text of the reference between `begin` and `end`, its braces included, to free. */
static char *expand_reference(reader *r, const yaml_node_t *from, const char *begin, const char *end, int depth) {
    char *inner = mt_strdup(begin + 2), *path, *text = NULL;
    inner[end - begin - 3] = 0;
    yaml_node_t *node;
    path = expand(r, from, inner, depth);
    free(inner);
    if (!path) return NULL;
    if (strchr(path, ':')) {
        text = resolve_call(r, from, path, depth);
    } else if (find_path(r, path, from, &node, depth) != 0) {
        if (is_in_trainer(path)) text = mt_strdup("null");
    } else if (follow(r, &node, depth) == 0) {
        if (node->type == YAML_SCALAR_NODE)
            text = expand(r, node, scalar_text(node), depth);
        else
            mt_error_set(r->error, "%s:%lld: ${%.100s} is a section or a list, not a text", r->path, line_of(from),
                         path);
    }
    free(path);
    return text;
}

/* A text with its references replaced, to free; NULL with error. `from` is for messages. */
static char *expand(reader *r, const yaml_node_t *from, const char *text, int depth) {
    char *expanded = NULL, *part = NULL;
    size_t size;
    FILE *file;
    if (depth > MAX_REFERENCES) {
        mt_error_set(r->error, "%s:%lld: '%.100s' refers to itself, or through more than %d references", r->path,
                     line_of(from), text, MAX_REFERENCES);
        return NULL;
    }
    MT_CHECK(file = open_memstream(&expanded, &size));
    bool good = visit(r, from) == 0;
    while (*text && good) {
        const char *end = text[0] == '$' && text[1] == '{' ? reference_end(text) : NULL;
        part = end ? expand_reference(r, from, text, end, depth + 1) : NULL;
        good = !end || part;
        if (good && end) fputs(part, file);
        if (!end) fputc(*text, file);
        free(part);
        if (good && ftell(file) >= MAX_TEXT) good = fail_at(r, from, "its references make a text of 16 KiB") == 0;
        text = end ? end : text + 1;
    }
    MT_CHECK(fclose(file) == 0);
    if (good) return expanded;
    free(expanded);
    return NULL;
}

/* Replaces a node that is one reference by the node that it leads to. */
static int follow(reader *r, yaml_node_t **node, int depth) {
    for (;; depth++) {
        const char *text = scalar_text(*node), *end = strncmp(text, "${", 2) == 0 ? reference_end(text) : NULL;
        bool selects = strncmp(text, "${oc.select:", 12) == 0; // a default is a text, for `expand`
        if (!end || *end || strstr(text + 2, "${") || (strchr(text, ':') && !selects)) return 0;
        if (visit(r, *node) != 0) return -1;
        if (depth > MAX_REFERENCES)
            return mt_error_set(r->error, "%s:%lld: '%.100s' refers to itself, or through more than %d references",
                                r->path, line_of(*node), text, MAX_REFERENCES);
        char path[200];
        mt_error ignored, *error = r->error;
        const char *begin = text + (selects ? 12 : 2);
        snprintf(path, sizeof path, "%.*s", (int)strcspn(begin, selects ? ",}" : "}"), begin);
        yaml_node_t *found;
        if (selects || is_in_trainer(path)) r->error = &ignored;
        int status = find_path(r, path, *node, &found, depth + 1);
        r->error = error;
        if (status != 0) return selects || is_in_trainer(path) ? 0 : -1;
        *node = found;
    }
}

/* The text of a scalar with its references replaced, to free. A whole number of YAML, 1_000 or 0x1F, is in decimal, for
 * all who compare or convert it. */
static char *scalar_value(reader *r, const yaml_node_t *scalar) {
    char *text = expand(r, scalar, scalar_text(scalar), 0);
    bool is_plain = scalar->type == YAML_SCALAR_NODE && scalar->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    char decimal[32];
    if (!text || !is_plain || !mt_yaml_decimal(decimal, text)) return text;
    free(text);
    return mt_strdup(decimal);
}

/* The text of a key of the section that the value at hand is in, or of the root, to free; NULL: there is none. */
static char *sibling_text(reader *r, const yaml_node_t *mapping, const char *name) {
    mt_error *error = r->error, ignored;
    yaml_node_t *node = find_key(r, mapping, name, strlen(name), 0);
    if (!node) return NULL;
    r->error = &ignored;
    char *text = NULL;
    if (follow(r, &node, 0) == 0 && node->type == YAML_SCALAR_NODE && !is_null(node)) text = scalar_value(r, node);
    r->error = error;
    return text;
}

/* ---- entries -------------------------------------------------------------------------------------------------------
 */

static mt_role_entry *add_entry(reader *r, mt_role_entry_kind kind, long long line, const char *text) {
    mt_role_config *c = r->config;
    c->entries = mt_realloc(c->entries, (c->count + 1) * (int64_t)sizeof *c->entries);
    mt_role_entry *entry = &c->entries[c->count++];
    *entry = (mt_role_entry){.kind = kind, .key = mt_strdup(r->key), .text = mt_strdup(text), .line = line};
    const char *dot = strrchr(entry->key, '.');
    entry->name = dot ? dot + 1 : entry->key;
    return entry;
}

static mt_role_entry *add_option(reader *r, long long line, const char *option, const char *value) {
    mt_role_entry *entry = add_entry(r, MT_ENTRY_OPTION, line, "");
    entry->option = mt_strdup(option);
    if (value) mt_strings_add(&entry->values, value);
    return entry;
}

/* Adds the text of a scalar, with a name of its own here, to the values of an entry. */
static void add_value(reader *r, int64_t index, const mt_role_key *row, const char *text) {
    char value[MAX_TEXT];
    bool good = !row || mt_role_key_translate(row, text, value, sizeof value);
    if (!row) snprintf(value, sizeof value, "%s", text);
    mt_role_entry *entry = &r->config->entries[index];
    if (good) {
        mt_strings_add(&entry->values, value);
        return;
    }
    char reason[400];
    snprintf(reason, sizeof reason, "cannot be %.100s: %.250s", text, value);
    entry->kind = MT_ENTRY_REFUSED;
    mt_string_set(&entry->text, reason);
}

static int expects_value(const reader *r, const yaml_node_t *node, long long line) {
    return mt_error_set(r->error, "%s:%lld: %s expects a value, not a %s", r->path, line, r->key,
                        is_mapping(node) ? "section" : "list in a list");
}

/* Adds an entry for an option with the values of a node: one, or a list. */
static int take_values(reader *r, const mt_role_key *row, const char *option, yaml_node_t *node, long long line) {
    int64_t index = r->config->count;
    mt_role_entry *entry = add_option(r, line, option, NULL);
    entry->is_megatron = !row;
    entry->is_sequence = node->type == YAML_SEQUENCE_NODE;
    if (row && row->accepted) entry->accepted = mt_strdup(row->accepted);
    if (is_mapping(node)) return expects_value(r, node, line);
    bool is_list = entry->is_sequence;
    const yaml_node_item_t *item = is_list ? node->data.sequence.items.start : NULL;
    for (; !is_list || item < node->data.sequence.items.top; item++) {
        yaml_node_t *scalar = is_list ? get_node(r, *item) : node;
        if (visit(r, scalar) != 0 || follow(r, &scalar, 0) != 0) return -1;
        if (scalar->type != YAML_SCALAR_NODE) return expects_value(r, scalar, line);
        char *text = scalar_value(r, scalar);
        bool is_octal = scalar->data.scalar.style == YAML_PLAIN_SCALAR_STYLE && mt_yaml_is_octal(scalar_text(scalar));
        if (text && is_octal) mt_yaml_refuse_octal(r->path, line_of(scalar), text, r->error);
        if (!text || is_octal) {
            free(text);
            return -1;
        }
        add_value(r, index, row, text);
        free(text);
        if (!is_list) return 0;
    }
    return 0;
}

/* ---- values that follow from several keys --------------------------------------------------------------------------
 */

/* Reads up to three numbers from 0 to a million with commas between them; returns how many, or -1. */
static int read_numbers(const char **text, int64_t numbers[3]) {
    for (int count = 0; count < 3;) {
        char *end;
        numbers[count] = strtoll(*text, &end, 10);
        if (end == *text || numbers[count] < 0 || numbers[count] > 1000000) return -1;
        count++;
        *text = end + strspn(end, " ");
        if (**text != ',') return count;
        ++*text;
    }
    return -1;
}

/* The number of items of Python's list(range(a, b, c)) or [0, 1], also several with + between them; -1: neither. */
static int64_t count_devices(const char *text) {
    int64_t count = 0;
    for (;;) {
        text += strspn(text, " ");
        if (strncmp(text, "list(range(", 11) == 0) {
            int64_t range[3] = {0, 0, 1};
            text += 11;
            int read = read_numbers(&text, range);
            if (read == 1) range[1] = range[0], range[0] = 0;
            if (read < 1 || range[2] < 1 || strncmp(text, "))", 2) != 0) return -1;
            if (range[1] > range[0]) count += (range[1] - range[0] + range[2] - 1) / range[2];
            text += 2;
        } else if (*text == '[') {
            do {
                char *end;
                (void)strtoll(++text, &end, 10);
                if (end == text) return -1;
                count++;
                text = end + strspn(end, " ");
            } while (*text == ',');
            if (*text++ != ']') return -1;
        } else {
            return -1;
        }
        text += strspn(text, " ");
        if (!*text) return count;
        if (*text++ != '+') return -1;
    }
}

/* The number of items of a list of whole numbers; -1: it has others. */
static int64_t count_items(reader *r, const yaml_node_t *list) {
    const yaml_node_item_t *items = list->data.sequence.items.start;
    int64_t count = list->data.sequence.items.top - items;
    for (int64_t i = 0; i < list->data.sequence.items.top - items && count >= 0; i++) {
        const yaml_node_t *item = get_node(r, items[i]);
        char *text = expand(r, item, scalar_text(item), 0);
        if (!text || !*text || text[strspn(text, "0123456789")]) count = -1;
        free(text);
    }
    return count;
}

static int take_devices(reader *r, yaml_node_t *node, long long line) {
    char text[80];
    int64_t count = -1;
    if (node->type == YAML_SEQUENCE_NODE) {
        count = count_items(r, node);
    } else if (node->type == YAML_SCALAR_NODE) {
        char *expanded = expand(r, node, scalar_text(node), 0);
        if (!expanded) return -1;
        count = count_devices(expanded);
        free(expanded);
    }
    if (count < 0)
        return mt_error_set(r->error, "%s:%lld: %s expects devices, such as list(range(0,8)) or [0, 1]", r->path, line,
                            r->key);
    r->config->num_devices = count;
    snprintf(text, sizeof text, "the ranks are those of mpirun; the file has %lld", (long long)count);
    add_entry(r, MT_ENTRY_UNUSED, line, text);
    return 0;
}

static bool file_exists(const char *path) {
    return mt_path_exists(path, (int64_t)strlen(path), "");
}

/* Replaces "~/" by the home folder. */
static void expand_home(mt_role_entry *entry) {
    const char *home = getenv("HOME");
    for (int64_t i = 0; home && i < entry->values.count; i++) {
        if (strncmp(entry->values.items[i], "~/", 2) != 0) continue;
        char *joined = mt_path_join(home, entry->values.items[i] + 2);
        mt_string_set(&entry->values.items[i], joined);
        free(joined);
    }
}

/* Files are looked up as they are named, then in dataset_dir. Reinforcement learning has prompts, and no validation. */
static void find_files(reader *r, const yaml_node_t *mapping, mt_role_entry *entry) {
    char *folder = sibling_text(r, mapping, "dataset_dir");
    bool is_valid = strcmp(entry->option, "valid-data-path") == 0, is_rl = r->stage && strcmp(r->stage, "rl") == 0;
    if (is_rl) mt_string_set(&entry->option, "data-path");
    if (is_rl && is_valid) entry->kind = MT_ENTRY_UNUSED, mt_string_set(&entry->text, "a validation of responses");
    for (int64_t i = 0; folder && i < entry->values.count; i++) {
        char *joined = mt_path_join(folder, entry->values.items[i]);
        if (!file_exists(entry->values.items[i]) && file_exists(joined)) mt_string_set(&entry->values.items[i], joined);
        free(joined);
    }
    for (int64_t i = 0; i < entry->values.count && entry->kind == MT_ENTRY_OPTION; i++) {
        size_t length = strlen(entry->values.items[i]);
        if (length < 8 || strcmp(entry->values.items[i] + length - 8, ".parquet") != 0) continue;
        entry->kind = MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, "is a Parquet file: write its samples as JSON Lines");
    }
    free(folder);
}

/* The number that a key of a section has; `fallback` if there is none. */
static double sibling_number(reader *r, const yaml_node_t *mapping, const char *name, double fallback) {
    char *text = sibling_text(r, mapping, name), *end;
    double value = text ? strtod(text, &end) : fallback;
    if (text && (end == text || *end)) value = fallback;
    free(text);
    return value;
}

/* The text of a path from the root, as a number. */
static double path_number(reader *r, const char *path, double fallback) {
    mt_error *error = r->error, ignored;
    yaml_node_t *node;
    double value = fallback;
    r->error = &ignored;
    if (find_path(r, path, yaml_document_get_root_node(&r->document), &node, 0) == 0 && follow(r, &node, 0) == 0) {
        char *text = scalar_value(r, node);
        if (text && *text && strspn(text, "0123456789.eE+-") == strlen(text)) value = strtod(text, NULL);
        free(text);
    }
    r->error = error;
    return value;
}

/* Replaces the value of the entry by a number. */
static void set_number(mt_role_entry *entry, double value) {
    char text[32];
    mt_real_print(text, value);
    mt_string_set(&entry->values.items[0], text);
}

static bool is_number(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end > text && *end == 0 && *value > -1e15 && *value < 1e15;
}

/* Changes the entry of a key whose value depends on other keys too. */
static void derive_value(reader *r, const mt_role_key *row, const yaml_node_t *mapping, mt_role_entry *entry) {
    double number = 0;
    bool is_true = false, numeric = is_number(entry->values.items[0], &number);
    char *flag = sibling_text(r, mapping, row->kind == MT_KEY_ENABLED ? "enable" : "use_kl_loss");
    if (row->kind == MT_KEY_LENGTH && numeric) {
        double response = sibling_number(r, mapping, "response_length", 0);
        double of_verl = strcmp(entry->name, "max_prompt_length") == 0 ? VERL_LENGTH : response;
        response = sibling_number(r, mapping, "max_response_length", of_verl);
        response = sibling_number(r, mapping, "max_response_tokens", response);
        double whole = sibling_number(r, mapping, "sequence_length", 0);
        if (sibling_number(r, mapping, "max_model_len", whole) == 0)
            set_number(entry, number + response);
        else
            entry->kind = MT_ENTRY_UNUSED, mt_string_set(&entry->text, "the whole length has prompt and response");
    } else if (row->kind == MT_KEY_MINI_BATCH && numeric) {
        double responses = path_number(r, "actor_rollout_ref.rollout.n", 1);
        set_number(entry, number * sibling_number(r, mapping, "rollout_n", responses));
    } else if (row->kind == MT_KEY_DUAL_CLIP && mt_parse_bool(entry->values.items[0], &is_true)) {
        set_number(entry, 1 + 2 * sibling_number(r, mapping, "pg_clip", 0.2));
        if (!is_true) entry->kind = MT_ENTRY_FIXED, mt_string_set(&entry->text, "off");
    } else if (row->kind == MT_KEY_LOSS_COEF && numeric) {
        if (!flag || !mt_parse_bool(flag, &is_true) || !is_true) set_number(entry, 0);
    } else if (row->kind == MT_KEY_LR_SHARE) {
        double lr = sibling_number(r, mapping, "lr", 0);
        set_number(entry, number * lr);
        if (!numeric || (number > 0 && lr <= 0))
            entry->kind = MT_ENTRY_REFUSED, mt_string_set(&entry->text, "is a share of lr: give both as numbers");
    } else if (row->kind == MT_KEY_ENABLED) {
        if (!flag || !mt_parse_bool(flag, &is_true) || !is_true)
            entry->kind = MT_ENTRY_FIXED, mt_string_set(&entry->text, "off: enable is not true");
    } else if (row->kind == MT_KEY_DIST_PATH) {
        char *use = sibling_text(r, mapping, "use_dist_checkpointing");
        bool is_off = use && mt_parse_bool(use, &is_true) && !is_true;
        entry->kind = is_off ? MT_ENTRY_UNUSED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, is_off ? "use_dist_checkpointing, which is false" : row->text);
        free(use);
    } else if (row->kind == MT_KEY_GEN_BATCH) {
        bool same = numeric && number == sibling_number(r, mapping, "train_batch_size", VERL_BATCH);
        char reason[200];
        snprintf(reason, sizeof reason, "can only be train_batch_size here: %s", row->text);
        entry->kind = same ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, same ? row->text : reason);
    } else if (row->kind == MT_KEY_GROUP_LIMIT) {
        double share = 1 / fmax(sibling_number(r, mapping, "num_return_sequences_in_group", 1), 1);
        bool is_low = strcmp(entry->name, "difficulty_low_threshold") == 0;
        bool good = numeric && (is_low ? number >= 0 && number <= share : number <= 1 && number >= 1 - share);
        entry->kind = good ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, good ? row->text
                                         : "drops more than the groups whose rewards are all alike, which "
                                           "--dynamic-sampling drops");
    }
    free(flag);
}

/* True if a reference of the file leads to a key of the root, or into it. */
static bool is_referenced(const reader *r, const char *name) {
    char begin[120];
    size_t length = (size_t)snprintf(begin, sizeof begin, "${%.100s", name);
    const char *at = r->text, *end = r->text + r->bytes;
    while ((at = memmem(at, (size_t)(end - at), begin, length)) != NULL) {
        at += length;
        if (at < end && (*at == '.' || *at == '}')) return true;
    }
    return false;
}

/* ---- the walk ------------------------------------------------------------------------------------------------------
 */

static int walk(reader *r, yaml_node_t *mapping, const char *section, bool roles);
static int load_document(reader *r, const char *text, int64_t bytes);

/* Takes a section, or a list with one. */
static int take_section(reader *r, yaml_node_t *node, const char *section, long long line) {
    bool is_list = node->type == YAML_SEQUENCE_NODE;
    if (is_list && node->data.sequence.items.top - node->data.sequence.items.start == 1)
        node = get_node(r, *node->data.sequence.items.start);
    if (!is_mapping(node))
        return mt_error_set(r->error, "%s:%lld: %s expects a section of keys", r->path, line, r->key);
    r->depth++;
    int status = walk(r, node, section, false);
    if (status == 0) status = walk(r, node, section, true);
    r->depth--;
    return status;
}

/* The section of an engine, whose name is beside it. That of another engine may be in a file that is not there. */
static int take_strategy(reader *r, const mt_role_key *row, const yaml_node_t *mapping, yaml_node_t *node,
                         long long line) {
    char *name = NULL;
    yaml_node_t *sibling = find_key(r, mapping, "strategy_name", strlen("strategy_name"), 0);
    if (sibling && follow(r, &sibling, 0) != 0) return -1;
    if (sibling && !(name = expand(r, sibling, scalar_text(sibling), 0))) return -1;
    bool is_megatron = name && strncasecmp(name, "megatron", 8) == 0; // of any case, as mt_role_key_translate
    int status = is_megatron ? follow(r, &node, 0) : 0;
    if (status == 0 && is_megatron && !is_null(node)) status = take_section(r, node, row->text, line);
    if (!is_megatron && !r->is_other)
        add_entry(r, MT_ENTRY_UNUSED, line, name ? name : "the engine without a strategy_name");
    free(name);
    return status;
}

/* An option of Megatron-LM's name. */
static int take_megatron(reader *r, const char *section, const char *name, yaml_node_t *node, long long line) {
    char nearest[112] = "";
    int64_t index = r->config->count;
    bool has_value = !is_null(node) && !is_empty(node) && !r->is_other;
    int status = has_value ? take_values(r, NULL, name, node, line) : 0;
    if (!has_value) add_option(r, line, name, NULL)->is_megatron = true;
    r->config->entries[index].is_name = r->is_other;
    bool is_searched = status == 0 && r->num_searched++ < MAX_SEARCHED;
    if (is_searched && mt_role_key_nearest(nearest, section, name))
        mt_string_set(&r->config->entries[index].text, nearest);
    return status;
}

/* The keys of a JSON file, which is YAML too; messages name the line of the key that has its path. */
static int take_file(reader *r, const mt_role_key *row, const yaml_node_t *node, long long line) {
    char *path = expand(r, node, scalar_text(node), 0);
    int64_t bytes, first = r->config->count;
    char *text = path ? mt_file_read(path, MAX_FILE, &bytes, r->error) : NULL;
    yaml_document_t outer = r->document;
    const char *outer_path = r->path;
    if (path) r->path = path;
    int status = text ? load_document(r, text, bytes) : -1;
    if (status == 0) {
        yaml_node_t *root = yaml_document_get_root_node(&r->document);
        status = root ? take_section(r, root, row->text, line) : 0;
        yaml_document_delete(&r->document);
        for (int64_t i = first; i < r->config->count; i++) r->config->entries[i].line = line;
    }
    r->document = outer;
    r->path = outer_path;
    free(text);
    free(path);
    return status;
}

/* A section or a list that is refused, unless the section is off or the list is empty. */
static void take_refused(reader *r, const mt_role_key *row, const yaml_node_t *node, long long line) {
    char *enable = sibling_text(r, node, "enable"), reason[400];
    bool is_on = true;
    if (!enable) enable = sibling_text(r, node, "enabled");
    bool is_off = is_empty(node) || (enable && mt_parse_bool(enable, &is_on) && !is_on);
    snprintf(reason, sizeof reason, "is not supported: %s", row->text);
    add_entry(r, is_off ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED, line, is_off ? row->text : reason);
    free(enable);
}

/* True for two plain values with the same text. */
static bool values_agree(const yaml_node_t *a, const yaml_node_t *b) {
    bool are_scalars = a->type == YAML_SCALAR_NODE && b->type == YAML_SCALAR_NODE;
    return are_scalars && strcmp(scalar_text(a), scalar_text(b)) == 0;
}

/* An error if a key stands twice in a section with two values. */
static int check_keys(reader *r, const yaml_node_t *mapping) {
    const yaml_node_pair_t *first = mapping->data.mapping.pairs.start, *end = mapping->data.mapping.pairs.top;
    if (end - first > MAX_NODES / 10) return fail_at(r, mapping, "holds more than a file of roles could need");
    for (const yaml_node_pair_t *pair = first; pair < end; pair++) {
        const yaml_node_t *key = get_node(r, pair->key);
        const char *name = scalar_text(key);
        if (visit(r, key) != 0) return -1;
        if (key->type != YAML_SCALAR_NODE || !*name || strchr(name, '.'))
            return fail_at(r, key, "expects the name of a key");
        for (const yaml_node_pair_t *other = first; other < pair; other++)
            if (strcmp(scalar_text(get_node(r, other->key)), name) == 0 &&
                !values_agree(get_node(r, other->value), get_node(r, pair->value)))
                return mt_error_set(r->error, "%s:%lld: %.80s is given twice in this section", r->path, line_of(key),
                                    name);
    }
    return 0;
}

/* A plain scalar is null, a boolean or a number if it reads as one; every other one is a text. */
static json_t *json_of_scalar(reader *r, const yaml_node_t *node) {
    json_t *value = NULL;
    int64_t whole;
    bool flag;
    char *end;
    if (is_null(node)) return json_null();
    char *text = scalar_value(r, node);
    if (!text) return NULL;
    bool is_plain = node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    bool is_octal = is_plain && mt_yaml_is_octal(scalar_text(node));
    double number = strtod(text, &end);
    bool is_real = *text && strspn(text, "0123456789+-.eE") == strlen(text) && *end == 0 && isfinite(number);
    if (is_plain && mt_parse_bool(text, &flag))
        value = json_boolean(flag);
    else if (is_plain && mt_parse_int(text, &whole))
        value = json_integer(whole);
    else if (is_plain && is_real)
        value = json_real(number);
    else
        value = json_string(text);
    if (is_octal) {
        json_decref(value), value = NULL;
        mt_yaml_refuse_octal(r->path, line_of(node), text, r->error);
    } else if (!value) {
        fail_at(r, node, "holds a text that is not UTF-8");
    }
    free(text);
    return value;
}

/* The value of a node in JSON, with the types that YAML 1.1 gives it; NULL with error. */
static json_t *json_of(reader *r, yaml_node_t *node, int depth) {
    mt_error *error = r->error;
    json_t *value;
    if (visit(r, node) != 0 || follow(r, &node, 0) != 0) return NULL;
    if (depth > MAX_DEPTH) mt_error_set(error, "%s:%lld: is nested too deeply", r->path, line_of(node));
    if (depth > MAX_DEPTH) return NULL;
    if (node->type == YAML_SEQUENCE_NODE) {
        json_t *list = json_array();
        const yaml_node_item_t *item = node->data.sequence.items.start;
        for (; item < node->data.sequence.items.top; item++) {
            value = json_of(r, get_node(r, *item), depth + 1);
            if (value) json_array_append_new(list, value);
            if (!value) json_decref(list);
            if (!value) return NULL;
        }
        return list;
    }
    if (is_mapping(node)) {
        if (check_keys(r, node) != 0) return NULL;
        json_t *object = json_object();
        const yaml_node_pair_t *pair = node->data.mapping.pairs.start;
        for (; pair < node->data.mapping.pairs.top; pair++) {
            value = json_of(r, get_node(r, pair->value), depth + 1);
            if (value) json_object_set_new(object, scalar_text(get_node(r, pair->key)), value);
            if (!value) json_decref(object);
            if (!value) return NULL;
        }
        return object;
    }
    return json_of_scalar(r, node);
}

/* A section as one text of an option. */
static int take_json(reader *r, const mt_role_key *row, yaml_node_t *node, long long line) {
    if (is_empty(node)) {
        add_entry(r, MT_ENTRY_FIXED, line, "empty");
        return 0;
    }
    if (!is_mapping(node)) return mt_error_set(r->error, "%s:%lld: %s expects a section", r->path, line, r->key);
    json_t *json = json_of(r, node, 0);
    char *text = json ? json_dumps(json, 0) : NULL;
    json_decref(json);
    if (!text) return -1;
    add_option(r, line, row->text, text);
    free(text);
    return 0;
}

/* Shares of domains or files, a mapping, a list or a text with commas: one share is all of them. */
static int take_shares(reader *r, const mt_role_key *row, const yaml_node_t *node, long long line) {
    bool is_text = node->type == YAML_SCALAR_NODE, is_one = false;
    char *text = is_text ? expand(r, node, scalar_text(node), 0) : NULL, reason[200];
    if (is_text && !text) return -1;
    if (is_text)
        is_one = !strchr(text, ',');
    else if (is_mapping(node))
        is_one = node->data.mapping.pairs.top - node->data.mapping.pairs.start <= 1;
    else
        is_one = node->data.sequence.items.top - node->data.sequence.items.start <= 1;
    snprintf(reason, sizeof reason, "is not supported: %s", row->text);
    add_entry(r, is_one ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED, line, is_one ? "one share is all" : reason);
    free(text);
    return 0;
}

/* Shares of domains: each has the tags of its section of `rewards`, and ROLL's math_rule those of no other. */
static int take_domains(reader *r, const mt_role_key *row, const yaml_node_t *node, long long line) {
    if (!is_mapping(node))
        return mt_error_set(r->error, "%s:%lld: %s expects a section of domains and their shares", r->path, line,
                            r->key);
    const yaml_node_pair_t *pair = node->data.mapping.pairs.start, *end = node->data.mapping.pairs.top;
    if (end - pair <= 1) {
        add_entry(r, MT_ENTRY_FIXED, line, "one share is all");
        return 0;
    }
    int64_t index = r->config->count;
    add_option(r, line, row->text, NULL)->is_sequence = true;
    yaml_node_t *rewards = find_root_key(r, "rewards");
    for (; pair < end; pair++) {
        const char *name = scalar_text(get_node(r, pair->key));
        yaml_node_t *share = get_node(r, pair->value), *reward = NULL, *tags = NULL;
        char *word = NULL, *text = NULL;
        size_t size;
        FILE *file = open_memstream(&word, &size);
        MT_CHECK(file);
        fprintf(file, "%s%s", name, strcmp(name, "math_rule") == 0 ? ",*" : "");
        if (rewards) reward = find_key(r, rewards, name, strlen(name), 0);
        if (reward) tags = find_key(r, reward, "tag_included", strlen("tag_included"), 0);
        bool is_list = tags && tags->type == YAML_SEQUENCE_NODE;
        const yaml_node_item_t *item = is_list ? tags->data.sequence.items.start : NULL;
        for (; is_list && item < tags->data.sequence.items.top; item++)
            fprintf(file, ",%s", scalar_text(get_node(r, *item)));
        bool good = visit(r, share) == 0 && follow(r, &share, 0) == 0;
        if (good) text = expand(r, share, scalar_text(share), 0);
        fprintf(file, "=%s", text ? text : "");
        MT_CHECK(fclose(file) == 0);
        if (text) mt_strings_add(&r->config->entries[index].values, word);
        good = text != NULL;
        free(text), free(word);
        if (!good) return -1;
    }
    return 0;
}

/* The section of an adapter: without a rank its keys have no effect, and their names are checked. */
static int take_adapter(reader *r, const mt_role_key *row, yaml_node_t *node, long long line) {
    static const char *const needed[] = {"type", "alpha", "target_modules", "lora_A_init_method"};
    bool is_on = is_mapping(node) && sibling_number(r, node, "rank", 0) > 0, is_other = r->is_other;
    if (!is_on) add_entry(r, MT_ENTRY_FIXED, line, "off: rank is 0");
    for (size_t i = 0; i < sizeof needed / sizeof *needed && is_on; i++) {
        char reason[80];
        snprintf(reason, sizeof reason, "needs %s, whose default here is another", needed[i]);
        if (!find_key(r, node, needed[i], strlen(needed[i]), 0)) add_entry(r, MT_ENTRY_REFUSED, line, reason);
    }
    r->is_other = is_other || !is_on;
    int status = take_section(r, node, row->text, line);
    r->is_other = is_other;
    return status;
}

/* A key of a value that is not null. `node` is its value. */
static int take_row(reader *r, const mt_role_key *row, const yaml_node_t *mapping, yaml_node_t *node, long long line) {
    int64_t index = r->config->count;
    char value[MAX_TEXT];
    bool is_on = true;
    if (row->kind == MT_KEY_SECTION) return take_section(r, node, row->text, line);
    if (row->kind == MT_KEY_DEVICES) return take_devices(r, node, line);
    if (row->kind == MT_KEY_ADAPTER) return take_adapter(r, row, node, line);
    bool is_off = row->kind == MT_KEY_ADDITIONAL && mt_parse_bool(scalar_text(node), &is_on) && !is_on;
    if (is_off) return 0;
    if (row->kind == MT_KEY_ADDITIONAL && node->type == YAML_SCALAR_NODE) return take_file(r, row, node, line);
    if (row->kind == MT_KEY_ADDITIONAL) return is_empty(node) ? 0 : take_section(r, node, row->text, line);
    if (row->kind == MT_KEY_DOMAINS) return take_domains(r, row, node, line);
    if (row->kind == MT_KEY_JSON) return take_json(r, row, node, line);
    if (row->kind == MT_KEY_SHARES) return take_shares(r, row, node, line);
    if (row->kind == MT_KEY_REFUSED && node->type != YAML_SCALAR_NODE) {
        take_refused(r, row, node, line);
        return 0;
    }
    if (take_values(r, row->kind == MT_KEY_FIXED ? NULL : row, row->text, node, line) != 0) return -1;
    mt_role_entry *entry = &r->config->entries[index];
    entry->is_megatron = false;
    const char *first = entry->values.count > 0 ? entry->values.items[0] : "";
    if (entry->kind == MT_ENTRY_REFUSED) return 0;
    if (row->kind == MT_KEY_FIXED || row->kind == MT_KEY_REFUSED) {
        bool is_none = !*first || (strncmp(scalar_text(node), "${", 2) == 0 && strcmp(first, "null") == 0);
        bool good = row->kind == MT_KEY_FIXED ? is_none || mt_role_key_translate(row, first, value, sizeof value)
                                              : is_none || (mt_parse_bool(first, &is_on) && !is_on);
        char reason[400];
        if (row->kind == MT_KEY_FIXED)
            snprintf(reason, sizeof reason, "can only be %s here: %s", row->values, row->text);
        else
            snprintf(reason, sizeof reason, "is not supported: %s", row->text);
        entry->kind = good ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, good ? row->text : reason);
    } else if (entry->values.count == 0 || (!*first && !entry->is_sequence) ||
               (strncmp(scalar_text(node), "${", 2) == 0 && strcmp(first, "null") == 0)) {
        entry->kind = MT_ENTRY_FIXED; // the value that stands for the default, or an empty list
        mt_string_set(&entry->text, "the default");
    } else if (row->kind == MT_KEY_FILES) {
        expand_home(entry);
        find_files(r, mapping, entry);
    } else if (row->kind == MT_KEY_MODEL) {
        expand_home(entry);
        add_option(r, line, "finetune", "true")->is_implied = true;
    } else if (row->kind == MT_KEY_OFFLOAD) {
        snprintf(value, sizeof value, "%s", first);
        add_option(r, line, "grad-offload", value)->is_implied = true;
        add_option(r, line, "optimizer-offload", value)->is_implied = true;
    } else if (row->kind == MT_KEY_BETAS) {
        if (entry->values.count != 2)
            return mt_error_set(r->error, "%s:%lld: betas expects two numbers", r->path, line);
        snprintf(value, sizeof value, "%s", entry->values.items[1]);
        free(entry->values.items[--entry->values.count]);
        entry->is_sequence = false;
        add_option(r, line, "adam-beta2", value);
    } else if (row->kind == MT_KEY_STEPS) {
        double share = strtod(first, NULL);
        if (share > 0 && share < 1) mt_string_set(&entry->option, mt_share_option(row->text));
    } else if (row->kind == MT_KEY_DATA_SEED) {
        yaml_node_t *seed = find_key(r, mapping, "seed", 4, 0);
        if (!seed) seed = find_root_key(r, "seed");
        char *text = seed && follow(r, &seed, 0) == 0 ? scalar_value(r, seed) : NULL;
        bool differs = text && strcmp(text, first) != 0;
        if (text) entry->kind = differs ? MT_ENTRY_REFUSED : MT_ENTRY_FIXED;
        if (text)
            mt_string_set(&entry->text,
                          differs ? "is not the file's seed: one seed is for all here" : "the seed itself");
        free(text);
    } else if (row->kind == MT_KEY_OPTION) {
        const mt_option *option = mt_option_find(row->text, strlen(row->text));
        if (option && option->type == MT_STRING) expand_home(entry);
    } else {
        derive_value(r, row, mapping, entry);
    }
    return 0;
}

/* True for the section of the role itself, not for a part of another role's, or one of several roles. */
static bool is_own_section(const mt_role_key *row, const char *role) {
    static const char *const own[] = {"role", "verl.actor", "verl.critic", "verl.reward"};
    bool is_own = strcmp(row->text, "verl.rollout") == 0 && strcmp(role, "actor_infer") == 0;
    for (size_t i = 0; i < sizeof own / sizeof *own && !is_own; i++) is_own = strcmp(row->text, own[i]) == 0;
    return is_own;
}

/* A key of another role: the names below it are checked. A section that a reference names is checked where it is. */
static int take_other(reader *r, const yaml_node_t *mapping, yaml_node_t *node, const char *name, const char *section,
                      long long line) {
    const mt_role_key *row = mt_role_key_find(section, name, r->role);
    if (!row) return take_megatron(r, section, name, node, line);
    bool is_engine = strcmp(name, "strategy_name") == 0 || strcmp(name, "strategy") == 0;
    if (is_engine && row->kind == MT_KEY_FIXED && node->type == YAML_SCALAR_NODE && !is_null(node)) {
        char *engine = expand(r, node, scalar_text(node), 0), known[80], reason[400];
        if (!engine) return -1;
        snprintf(reason, sizeof reason, "can only be %s", row->values);
        if (!mt_role_key_translate(row, engine, known, sizeof known)) add_entry(r, MT_ENTRY_REFUSED, line, reason);
        free(engine);
    }
    if (!is_mapping(node)) return 0;
    if (row->kind == MT_KEY_STRATEGY) return take_strategy(r, row, mapping, node, line);
    bool is_section = row->kind == MT_KEY_SECTION || row->kind == MT_KEY_ADAPTER || row->kind == MT_KEY_ADDITIONAL;
    return is_section ? take_section(r, node, row->text, line) : 0;
}

/* A key: first those of the pipeline (roles: false), then the sections of roles. */
static int take_key(reader *r, const yaml_node_t *mapping, const yaml_node_t *key, yaml_node_t *node,
                    const char *section, bool roles) {
    const char *name = scalar_text(key);
    char nearest[112];
    const mt_role_key *row = mt_role_key_find(section, name, r->role);
    bool applies = row && mt_role_key_applies(row, name, r->role);
    if ((row && row->kind == MT_KEY_SECTION && row->roles) != roles) return 0;
    if (row && row->kind == MT_KEY_OTHERS) {
        add_entry(r, MT_ENTRY_UNUSED, line_of(key), row->text);
        r->is_other = true;
        int status = take_other(r, mapping, node, name, row->values, line_of(key));
        r->is_other = false;
        return status;
    }
    bool is_megatron = !row && mt_role_section_is_megatron(section);
    if (r->is_other && (row || is_megatron)) return take_other(r, mapping, node, name, section, line_of(key));
    r->has_role = r->has_role || (roles && applies && is_own_section(row, r->role));
    if (row && !applies) {
        add_entry(r, MT_ENTRY_UNUSED, line_of(key), "other roles");
        return 0;
    }
    if (row && row->kind == MT_KEY_UNUSED) {
        add_entry(r, MT_ENTRY_UNUSED, line_of(key), row->text);
        return 0;
    }
    if (!row && r->depth == 1 && is_referenced(r, name)) {
        add_entry(r, MT_ENTRY_UNUSED, line_of(key), "a value that other keys refer to");
        return 0;
    }
    if (!row && !is_megatron) {
        bool found = r->num_unknown++ < MAX_UNKNOWN && mt_role_key_nearest(nearest, section, name);
        add_entry(r, MT_ENTRY_UNKNOWN, line_of(key), found ? nearest : "");
        return 0;
    }
    if (row && row->kind == MT_KEY_STRATEGY) return take_strategy(r, row, mapping, node, line_of(key));
    if (follow(r, &node, 0) != 0) return -1;
    if (is_megatron) return take_megatron(r, section, name, node, line_of(key));
    return is_null(node) ? 0 : take_row(r, row, mapping, node, line_of(key));
}

/* Takes the keys of a mapping; at depth > 0, where "<<" merges it, only the keys that `outer` does not have. */
static int walk_merged(reader *r, yaml_node_t *mapping, yaml_node_t *outer, const char *section, bool roles,
                       int depth) {
    if (mapping->type == YAML_SEQUENCE_NODE && depth > 0 && depth < MAX_DEPTH) {
        const yaml_node_item_t *item = mapping->data.sequence.items.start;
        for (; item < mapping->data.sequence.items.top; item++)
            if (walk_merged(r, get_node(r, *item), outer, section, roles, depth + 1) != 0) return -1;
        return 0;
    }
    if (!is_mapping(mapping) || depth > MAX_DEPTH)
        return fail_at(r, mapping, "<< merges what is no section, or itself");
    if (check_keys(r, mapping) != 0) return -1;
    size_t length = strlen(r->key);
    const yaml_node_pair_t *pair = mapping->data.mapping.pairs.start;
    for (; pair < mapping->data.mapping.pairs.top; pair++) {
        yaml_node_t *key = get_node(r, pair->key), *value = get_node(r, pair->value);
        const char *name = scalar_text(key);
        if (visit(r, value) != 0) return -1;
        if (strcmp(name, "<<") == 0) {
            if (walk_merged(r, value, outer, section, roles, depth + 1) != 0) return -1;
            continue;
        }
        if (depth > 0 && find_key(r, outer, name, strlen(name), 0) != value) continue;
        if (length + strlen(name) + 2 > MAX_KEY) return fail_at(r, key, "has a long name");
        snprintf(r->key + length, MAX_KEY - length, "%s%s", length > 0 ? "." : "", name);
        int status = take_key(r, outer, key, value, section, roles);
        r->key[length] = 0;
        if (status != 0) return -1;
    }
    return 0;
}

static int walk(reader *r, yaml_node_t *mapping, const char *section, bool roles) {
    return walk_merged(r, mapping, mapping, section, roles, 0);
}

/* ---- the file ------------------------------------------------------------------------------------------------------
 */

static bool is_role(reader *r, const yaml_node_t *section) {
    static const char *const names[] = {"model_args", "training_args", "strategy_args",
                                        "worker_cls", "megatron",      "optim"};
    for (size_t i = 0; section && i < sizeof names / sizeof *names; i++)
        if (find_key(r, section, names[i], strlen(names[i]), 0)) return true;
    return false;
}

/* The section with verl's keys: the file, or Trinity-RFT's trainer.trainer_config; NULL: none. */
static const yaml_node_t *find_verl(reader *r) {
    const yaml_node_t *root = yaml_document_get_root_node(&r->document);
    if (find_root_key(r, "actor_rollout_ref")) return root;
    const yaml_node_t *trainer = find_root_key(r, "trainer");
    const yaml_node_t *config = trainer ? find_key(r, trainer, "trainer_config", strlen("trainer_config"), 0) : NULL;
    return config && find_key(r, config, "actor_rollout_ref", strlen("actor_rollout_ref"), 0) ? config : NULL;
}

/* The roles of a file, with ", " between them. */
static void list_roles(reader *r, char roles[400]) {
    static const char *const names[] = {"sft_train",   "student",   "teacher", "actor_train",
                                        "actor_infer", "reference", "critic",  "reward"};
    static const char *const verl[][2] = {{"actor", "actor_train"}, {"rollout", "actor_infer"}, {"ref", "reference"}};
    size_t used = 0;
    *roles = 0;
    const yaml_node_t *root = find_verl(r), *rewards = find_root_key(r, "rewards");
    const yaml_node_t *group = root ? find_key(r, root, "actor_rollout_ref", strlen("actor_rollout_ref"), 0) : NULL;
    if (!root) root = yaml_document_get_root_node(&r->document);
    for (size_t i = 0; group && i < 3; i++)
        if (find_key(r, group, verl[i][0], strlen(verl[i][0]), 0))
            used += (size_t)snprintf(roles + used, 400 - used, "%s%s", used ? ", " : "", verl[i][1]);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (is_role(r, find_key(r, root, names[i], strlen(names[i]), 0)))
            used += (size_t)snprintf(roles + used, 400 - used, "%s%s", used ? ", " : "", names[i]);
    }
    if (group && is_role(r, find_root_key(r, "reward_model")))
        used += (size_t)snprintf(roles + used, 400 - used, "%sreward", used ? ", " : "");
    if (!rewards || !is_mapping(rewards)) return;
    const yaml_node_pair_t *pair = rewards->data.mapping.pairs.start;
    for (; pair < rewards->data.mapping.pairs.top && used < 300; pair++)
        used += (size_t)snprintf(roles + used, 400 - used, "%srewards.%.60s", used ? ", " : "",
                                 scalar_text(get_node(r, pair->key)));
}

static long long line_of_root_key(reader *r, const char *name) {
    const yaml_node_t *root = yaml_document_get_root_node(&r->document);
    const yaml_node_pair_t *pair = root->data.mapping.pairs.start;
    for (; pair < root->data.mapping.pairs.top; pair++)
        if (strcmp(scalar_text(get_node(r, pair->key)), name) == 0) return line_of(get_node(r, pair->key));
    return 1;
}

/* '_' equals '-'. */
static bool names_equal(const char *a, const char *b) {
    while (*a && (*a == '_' ? '-' : *a) == (*b == '_' ? '-' : *b)) a++, b++;
    return *a == *b;
}

/* The entry that sets an option; NULL: there is none. */
static const mt_role_entry *find_option(const reader *r, const char *option) {
    for (int64_t i = r->config->count - 1; i >= 0; i--) {
        const mt_role_entry *entry = &r->config->entries[i];
        if (entry->kind == MT_ENTRY_OPTION && entry->values.count > 0 && names_equal(entry->option, option))
            return entry;
    }
    return NULL;
}

/* True if the file sets an option, not to false. */
static bool is_set(const reader *r, const char *option) {
    const mt_role_entry *entry = find_option(r, option);
    bool is_on = true;
    return entry && (!mt_parse_bool(entry->values.items[0], &is_on) || is_on);
}

/* True for an option that the file's policy loss does not read: PPO alone clips twice, and verl's losses of sequences
 * have an aggregation of their own. ROLL's loss of sequences reads both, and the run refuses them; its cispo has a
 * range of its own. */
static bool is_idle_in_loss(const reader *r, const char *root, const char *option, const char *key) {
    const mt_role_entry *loss = find_option(r, "pg-variant");
    const char *variant = loss ? loss->values.items[0] : "ppo";
    bool is_verl = strcmp(root, "roll") != 0, is_ppo = mt_choice_index("ppo|vanilla", variant) >= 0;
    bool by_sequence = mt_choice_index("gspo|gmpo", variant) >= 0;
    if (strcmp(option, "clip-ratio-c") == 0) return !is_ppo && (is_verl || !by_sequence);
    if (strncmp(key, "pg_clip", 7) == 0) return !is_verl && strcmp(variant, "cispo") == 0;
    return strcmp(option, "loss-agg-mode") == 0 && is_verl && by_sequence;
}

static void drop_idle_in_loss(reader *r, const char *root) {
    for (mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++) {
        if (entry->kind != MT_ENTRY_OPTION || !is_idle_in_loss(r, root, entry->option, entry->name)) continue;
        entry->kind = MT_ENTRY_UNUSED;
        mt_string_set(&entry->text, "the policy loss of this file does not read it");
    }
}

/* True if the file has what a default needs. */
static bool has_condition(reader *r, const char *with) {
    const char *equals = strchr(with, '=');
    if (strncmp(with, "key ", 4) == 0) {
        bool is_on = false;
        for (const mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++)
            if (mt_text_ends_with(entry->key, with + 4) && entry->values.count > 0)
                is_on = mt_parse_bool(entry->values.items[0], &is_on) && is_on;
        return is_on;
    }
    if (!equals) return is_set(r, with);
    char option[80];
    snprintf(option, sizeof option, "%.*s", (int)(equals - with), with);
    const mt_role_entry *entry = find_option(r, option);
    return entry && strcmp(entry->values.items[0], equals + 1) == 0;
}

/* One option has the estimator of the divergence in rewards and of that in the loss: ROLL's in the loss is k3. */
static void settle_divergence(reader *r) {
    const mt_role_entry *coef = find_option(r, "kl-loss-coef");
    bool in_reward = is_set(r, "kl-in-reward");
    bool in_loss = coef ? strtod(coef->values.items[0], NULL) > 0 : has_condition(r, "key actor.use_kl_loss"); // verl's
    const char *of_loss = "k3", *of_reward = "k1"; // the defaults
    mt_role_entry *reward = NULL, *flag = NULL;
    for (mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++) {
        if (entry->kind != MT_ENTRY_OPTION || entry->values.count == 0) continue;
        if (strcmp(entry->option, "kl-in-reward") == 0) flag = entry;
        if (strcmp(entry->option, "kl-loss-type") != 0) continue;
        if (strcmp(entry->name, "kl_penalty") == 0)
            of_reward = entry->values.items[0], reward = entry;
        else
            of_loss = entry->values.items[0];
    }
    bool differ = in_reward && in_loss && strcmp(of_loss, of_reward) != 0;
    if (!reward && differ) reward = flag;
    if (!reward || (in_reward && !differ)) return;
    reward->kind = differ ? MT_ENTRY_REFUSED : MT_ENTRY_UNUSED;
    mt_string_set(&reward->text, differ ? "differs from the estimator in the loss; one --kl-loss-type serves both"
                                        : "rewards without a divergence");
}

/* The number that the file gives an option; 0: none. */
static double option_number(const reader *r, const char *option) {
    const mt_role_entry *entry = find_option(r, option);
    return entry ? strtod(entry->values.items[0], NULL) : 0;
}

/* The number of an absent key that follows from others; 0: it has none. */
static double derive_default(reader *r, const char *root, const char *rule) {
    bool is_roll = strcmp(root, "roll") == 0;
    double response = option_number(r, "max-new-tokens"), prompt = is_roll ? ROLL_PROMPT : VERL_LENGTH;
    if (strcmp(rule, "=2 x lora-rank") == 0) return 2 * option_number(r, "lora-rank");
    if (strcmp(rule, "=256 x num-return-sequences") == 0) return 256 * option_number(r, "num-return-sequences");
    if (strcmp(rule, "=prompt + response") == 0) return response > 0 ? prompt + response : 0;
    MT_CHECK(strcmp(rule, "=sequence - prompt") == 0);
    return fmax(option_number(r, "seq-length") - path_number(r, "prompt_length", prompt), 0);
}

/* True if the file gives an option a value, or says that it has its default here. */
static bool decides_option(const reader *r, const char *option) {
    for (const mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++)
        if (entry->option && entry->values.count > 0 && names_equal(entry->option, option) &&
            (entry->kind == MT_ENTRY_OPTION || entry->kind == MT_ENTRY_FIXED))
            return true;
    return false;
}

/* Adds the defaults of keys that the file does not have. */
static void add_defaults(reader *r, const char *root) {
    const mt_role_entry *loss = find_option(r, "pg-variant");
    const char *stage = r->stage ? r->stage : "infer";
    bool is_cispo = loss && strcmp(loss->values.items[0], "cispo") == 0;
    for (const mt_role_default *row = mt_role_defaults; row->root; row++) {
        char value[32];
        if (strcmp(row->root, root) != 0 || (row->stage && strcmp(row->stage, stage) != 0)) continue;
        if (!row->stage && !r->stage) continue; // of training
        if (is_idle_in_loss(r, root, row->option, row->key)) continue;
        if (strncmp(row->key, "cispo_", 6) == 0 && !is_cispo) continue;
        if (decides_option(r, row->option) || (row->with && !has_condition(r, row->with))) continue;
        if (row->unless && find_option(r, row->unless)) continue;
        double number = *row->value == '=' ? derive_default(r, root, row->value) : 1;
        if (number == 0) continue;
        if (*row->value == '=') mt_real_print(value, number);
        snprintf(r->key, sizeof r->key, "(absent: %s)", row->key);
        add_option(r, 0, row->option, *row->value == '=' ? value : row->value)->is_implied = true;
        *r->key = 0;
    }
}

/* Adds --stage and the defaults of a role that trains. */
static void add_stage(reader *r, const mt_role_stage *row, const char *root) {
    const char *name = row->key ? row->key : row->role;
    if (!find_root_key(r, name)) name = strcmp(root, "trinity") == 0 ? "trainer" : "actor_rollout_ref";
    snprintf(r->key, sizeof r->key, "%s", name);
    add_option(r, line_of_root_key(r, name), "stage", row->stage)->is_implied = true;
    *r->key = 0;
    drop_idle_in_loss(r, root);
    settle_divergence(r);
    add_defaults(r, root);
}

/* True if the strategy_name of the role, if there is one, is an engine that trains. */
static bool has_training_strategy(reader *r) {
    char path[200];
    mt_error ignored, *error = r->error;
    yaml_node_t *node;
    snprintf(path, sizeof path, "%.100s.strategy_args.strategy_name", r->role);
    r->error = &ignored;
    bool found = find_path(r, path, yaml_document_get_root_node(&r->document), &node, 0) == 0;
    char *name = found && follow(r, &node, 0) == 0 ? expand(r, node, scalar_text(node), 0) : NULL;
    r->error = error;
    size_t length = name ? strlen(name) : 0;
    bool trains = !name || (length > 6 && strcasecmp(name + length - 6, "_train") == 0);
    free(name);
    return trains;
}

static int read_document(reader *r) {
    yaml_node_t *root = yaml_document_get_root_node(&r->document);
    char roles[400];
    if (!root || !is_mapping(root))
        return mt_error_set(r->error, "%s: is no file of roles: it has no sections", r->path);
    const mt_role_stage *stage = mt_role_stages;
    while (stage->stage && (strcmp(stage->role, r->role) != 0 || (stage->key && !find_root_key(r, stage->key))))
        stage++;
    r->stage = stage->stage;
    r->config->trains = r->stage && has_training_strategy(r);
    list_roles(r, roles);
    const yaml_node_t *verl = find_verl(r);
    const char *section = verl == root ? "verl" : verl ? "trinity" : "roll";
    if (take_section(r, root, section, 1) != 0) return -1;
    if (r->has_role && r->stage) add_stage(r, stage, section);
    if (r->has_role && strcmp(r->role, "actor_infer") == 0) add_defaults(r, section);
    if (r->has_role) return 0;
    if (!*roles) return mt_error_set(r->error, "--role %.80s: %s has no sections of roles", r->role, r->path);
    return mt_error_set(r->error, "--role %.80s: %s has the roles %s", r->role, r->path, roles);
}

bool mt_yaml_decimal(char decimal[32], const char *text) {
    const char *at = text + (*text == '-' || *text == '+');
    int base = strncmp(at, "0x", 2) == 0 ? 16 : strncmp(at, "0b", 2) == 0 ? 2 : 10;
    const char *digits = base == 16 ? "0123456789abcdefABCDEF" : base == 2 ? "01" : "0123456789";
    int64_t value = 0;
    if (base == 10 && !strchr(at, '_')) return false; // decimal, or no number
    if (base != 10) at += 2;
    if (!strchr(digits, *at) || !*at || at[strlen(at) - 1] == '_' || strstr(at, "__")) return false;
    for (; *at; at++) {
        char digit[2] = {*at, 0};
        if (*at == '_') continue;
        if (!strchr(digits, *at) || value > INT64_MAX / base - 1) return false;
        value = base * value + strtoll(digit, NULL, base);
    }
    snprintf(decimal, 32, "%s%lld", *text == '-' ? "-" : "", (long long)value);
    return true;
}

bool mt_yaml_is_octal(const char *text) {
    const char *digits = text + (*text == '-' || *text == '+');
    return *digits == '0' && digits[1] && strspn(digits, "01234567_") == strlen(digits);
}

int mt_yaml_refuse_octal(const char *path, long long line, const char *text, mt_error *error) {
    return mt_error_set(
        error, "%s:%lld: '%.40s' is an octal number in YAML; write it in decimal, or in quotes if it is a text", path,
        line, text);
}

long long mt_yaml_line(const char *text, int64_t bytes, size_t mark) {
    long long lines = 1;
    for (int64_t i = 0; i + 1 < bytes; i++) lines += text[i] == '\n';
    return mt_min((int64_t)mark + 1, lines);
}

/* Reads tokens, which libyaml finds in linear time while they nest little. The parser reports what is not YAML. */
int mt_yaml_check_work(const char *text, int64_t bytes, const char *path, mt_error *error) {
    yaml_parser_t parser;
    yaml_token_t token;
    int depth = 0, anchors = 0;
    bool ends = false;
    long long line = 0;
    if (!yaml_parser_initialize(&parser)) return mt_error_set(error, "%s: no memory to read YAML", path);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, (size_t)bytes);
    while (!ends && depth <= MAX_NESTING && anchors <= MAX_ANCHORS && yaml_parser_scan(&parser, &token)) {
        yaml_token_type_t type = token.type;
        anchors += type == YAML_ANCHOR_TOKEN || type == YAML_ALIAS_TOKEN;
        depth += type == YAML_FLOW_SEQUENCE_START_TOKEN || type == YAML_FLOW_MAPPING_START_TOKEN ||
                 type == YAML_BLOCK_SEQUENCE_START_TOKEN || type == YAML_BLOCK_MAPPING_START_TOKEN;
        depth -=
            type == YAML_FLOW_SEQUENCE_END_TOKEN || type == YAML_FLOW_MAPPING_END_TOKEN || type == YAML_BLOCK_END_TOKEN;
        line = (long long)token.start_mark.line + 1;
        ends = type == YAML_STREAM_END_TOKEN;
        yaml_token_delete(&token);
    }
    yaml_parser_delete(&parser);
    if (anchors > MAX_ANCHORS)
        return mt_error_set(error, "%s:%lld: has more than %d anchors and aliases; is it a file of options?", path,
                            line, MAX_ANCHORS);
    if (depth <= MAX_NESTING) return 0;
    return mt_error_set(error, "%s:%lld: sections and lists are nested deeper than %d; is it a file of options?", path,
                        line, MAX_NESTING);
}

static int fail_to_parse(const reader *r, const yaml_parser_t *parser) {
    return mt_error_set(r->error, "%s:%lld: is not YAML: %s", r->path,
                        mt_yaml_line(r->text, r->bytes, parser->problem_mark.line),
                        parser->problem ? parser->problem : "it cannot be read");
}

/* Loads the one document of a text; 0 with the document to delete. */
static int load_document(reader *r, const char *text, int64_t bytes) {
    yaml_parser_t parser;
    yaml_document_t second;
    if (mt_yaml_check_work(text, bytes, r->path, r->error) != 0) return -1;
    if (!yaml_parser_initialize(&parser)) return mt_error_set(r->error, "%s: no memory to read YAML", r->path);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, (size_t)bytes);
    int status = yaml_parser_load(&parser, &r->document) ? 0 : fail_to_parse(r, &parser);
    if (status == 0) {
        status = yaml_parser_load(&parser, &second) ? 0 : fail_to_parse(r, &parser);
        if (status == 0 && yaml_document_get_root_node(&second))
            status = mt_error_set(r->error, "%s: has a second document; roles are in one", r->path);
        yaml_document_delete(&second);
        if (status != 0) yaml_document_delete(&r->document);
    }
    yaml_parser_delete(&parser);
    return status;
}

int mt_role_config_read(mt_role_config *config, const char *role, const char *text, int64_t bytes, const char *path,
                        mt_error *error) {
    reader r = {.config = config, .role = role, .path = path, .text = text, .bytes = bytes, .error = error};
    *config = (mt_role_config){0};
    if (load_document(&r, text, bytes) != 0) return -1;
    int status = read_document(&r);
    yaml_document_delete(&r.document);
    return status;
}

bool mt_role_config_detect(char roles[400], const char *text, int64_t bytes) {
    mt_error ignored;
    reader r = {.role = "", .path = "", .text = text, .bytes = bytes, .error = &ignored};
    *roles = 0;
    if (load_document(&r, text, bytes) != 0) return false;
    list_roles(&r, roles);
    yaml_document_delete(&r.document);
    return *roles;
}
#else
int mt_role_config_read(mt_role_config *config, const char *role, const char *text, int64_t bytes, const char *path,
                        mt_error *error) {
    (void)role, (void)text, (void)bytes;
    *config = (mt_role_config){0};
    return mt_error_set(error, "--config %s: built without libyaml; `make deps` installs it", path);
}

bool mt_role_config_detect(char roles[400], const char *text, int64_t bytes) {
    (void)text, (void)bytes;
    *roles = 0;
    return false;
}
#endif
