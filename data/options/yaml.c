/* yaml.c: a YAML text as a tree. libyaml parses it; the tree has no alias and no merge left. */
#include "yaml.h"

#include "../base/file.h"
#include "option_table.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

enum {
    MAX_NESTING = 16,    // of collections; sections of options nest 8 deep at most, and may hold lists
    MAX_ANCHORS = 1000,  // with aliases; libyaml compares each with all before it
    MAX_TOKENS = 200000, // bounds the memory of the tree
    MAX_DEPTH = 12,      // of sections that "<<" merges, and of JSON
    MAX_REFERENCES = 16, // that lead to one another
    MAX_VISITS = 20000,  // of nodes; with aliases a small file could have more than any memory
    MAX_KEYS = 2000      // of a section that is checked or merged, which compares each with the others
};

mt_yaml_place mt_yaml_place_of(const mt_yaml *yaml, long long line) {
    mt_yaml_place place;
    if (line == MT_YAML_COMMAND_LINE)
        snprintf(place.text, sizeof place.text, "command line: ");
    else
        snprintf(place.text, sizeof place.text, "%.250s:%lld: ", yaml->path, line);
    return place;
}

int mt_yaml_fail(const mt_yaml *yaml, const mt_yaml_node *node, const char *what) {
    return mt_error_set(yaml->error, "%s%s", mt_yaml_place_of(yaml, node->line).text, what);
}

/* ---- the tree --------------------------------------------------------------------------------------------------- */

bool mt_yaml_is_null(const mt_yaml_node *node) {
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", "None"};
    for (size_t i = 0; i < sizeof nulls / sizeof *nulls && node->is_plain; i++)
        if (strcmp(node->text, nulls[i]) == 0) return true;
    return false;
}

bool mt_yaml_is_empty(const mt_yaml_node *node) {
    return node->kind != MT_YAML_TEXT && node->count == 0;
}

static int too_much(const mt_yaml *yaml, const mt_yaml_node *node) {
    return mt_yaml_fail(yaml, node, "holds more than options could need");
}

int mt_yaml_visit(mt_yaml *yaml, const mt_yaml_node *node) {
    if (++yaml->visits > MAX_VISITS) return too_much(yaml, node);
    if (strnlen(node->text, MT_YAML_BYTES) < MT_YAML_BYTES) return 0;
    return mt_yaml_fail(yaml, node, "holds a text of more than 64 KiB");
}

mt_yaml_node *mt_yaml_find(const mt_yaml_node *section, const char *name, size_t length) {
    if (!section || section->kind != MT_YAML_SECTION) return NULL;
    for (int64_t i = 0; i < section->count; i++) {
        const char *key = section->keys[i]->text;
        if (strncmp(key, name, length) == 0 && !key[length]) return section->values[i];
    }
    return NULL;
}

mt_yaml_node *mt_yaml_get(const mt_yaml_node *section, const char *name) {
    return mt_yaml_find(section, name, strlen(name));
}

/* True for two plain values with the same text. */
static bool values_agree(const mt_yaml_node *a, const mt_yaml_node *b) {
    return a->kind == MT_YAML_TEXT && b->kind == MT_YAML_TEXT && strcmp(a->text, b->text) == 0;
}

int mt_yaml_check_keys(mt_yaml *yaml, const mt_yaml_node *section) {
    if (section->count > MAX_KEYS) return too_much(yaml, section);
    for (int64_t i = 0; i < section->count; i++) {
        const mt_yaml_node *key = section->keys[i];
        if (mt_yaml_visit(yaml, key) != 0) return -1;
        if (key->kind != MT_YAML_TEXT || !*key->text || strchr(key->text, '.'))
            return mt_yaml_fail(yaml, key, "expects the name of a key");
        for (int64_t j = 0; j < i; j++)
            if (strcmp(section->keys[j]->text, key->text) == 0 && !values_agree(section->values[j], section->values[i]))
                return mt_error_set(yaml->error, "%s%.80s is given twice in this section",
                                    mt_yaml_place_of(yaml, key->line).text, key->text);
    }
    return 0;
}

bool mt_yaml_refers_to(const mt_yaml *yaml, const char *name) {
    char begin[120];
    size_t length = (size_t)snprintf(begin, sizeof begin, "${%.100s", name);
    const char *at = yaml->text, *end = yaml->text + yaml->bytes;
    while ((at = memmem(at, (size_t)(end - at), begin, length)) != NULL) {
        at += length;
        if (at < end && (*at == '.' || *at == '}')) return true;
    }
    return false;
}

/* ---- references ------------------------------------------------------------------------------------------------- */

static char *expand(mt_yaml *yaml, const mt_yaml_node *from, const char *text, int depth);
static int follow(mt_yaml *yaml, mt_yaml_node **node, int depth);

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

/* True for a name as variables of the environment have it. */
static bool is_variable(const char *path) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";
    return *path && !strchr("0123456789", *path) && !path[strspn(path, letters)];
}

/* True for a path whose absence means null. */
static bool may_be_absent(const mt_yaml *yaml, const char *path) {
    return yaml->absent_path && strncmp(path, yaml->absent_path, strlen(yaml->absent_path)) == 0;
}

static int find_path(mt_yaml *yaml, const char *path, const mt_yaml_node *from, mt_yaml_node **found, int depth) {
    mt_yaml_node *node = yaml->root;
    const char *at = path;
    for (const mt_yaml_node *inner = from; *at == '.' && node; at++) inner = node = inner ? inner->parent : NULL;
    while (node && *at) {
        size_t length = strcspn(at, ".");
        if (follow(yaml, &node, depth) != 0) return -1;
        if (node->kind == MT_YAML_LIST && length > 0 && strspn(at, "0123456789") == length) {
            long long index = strtoll(at, NULL, 10);
            node = index < node->count ? node->values[index] : NULL;
        } else {
            node = mt_yaml_find(node, at, length);
        }
        at += length;
        at += *at == '.';
    }
    *found = *path ? node : NULL;
    if (!*found && is_variable(path)) *found = mt_yaml_get(mt_yaml_get(yaml->root, "ENV_VARS"), path);
    if (*found) return 0;
    return mt_error_set(yaml->error, "%s${%.100s}: the file has no such key%s", mt_yaml_place_of(yaml, from->line).text,
                        path, is_variable(path) ? ", and the environment no such variable" : "");
}

/* The text of a resolver, "oc.env:NAME,default", "oc.select:a.b,default" or "oc.decode:text", to free. */
static char *resolve_call(mt_yaml *yaml, const mt_yaml_node *from, const char *call, int depth) {
    const char *argument = strchr(call, ':') + 1, *comma = strchr(argument, ',');
    char name[200];
    mt_yaml_node *node = NULL;
    mt_error ignored, *error = yaml->error;
    snprintf(name, sizeof name, "%.*s", comma ? (int)(comma - argument) : (int)strlen(argument), argument);
    if (strncmp(call, "oc.decode:", 10) == 0) return mt_strdup(argument);
    if (strncmp(call, "oc.env:", 7) == 0) {
        const char *value = getenv(name);
        if (value || comma) return mt_strdup(value ? value : comma + 1 + strspn(comma + 1, " "));
        mt_error_set(error, "%s${%.100s}: the environment has no such variable",
                     mt_yaml_place_of(yaml, from->line).text, call);
        return NULL;
    }
    if (strncmp(call, "oc.select:", 10) == 0) {
        yaml->error = comma ? &ignored : error;
        int status = find_path(yaml, name, from, &node, depth);
        yaml->error = error;
        if (status != 0) return comma ? mt_strdup(comma + 1 + strspn(comma + 1, " ")) : NULL;
        if (follow(yaml, &node, depth) != 0) return NULL;
        return expand(yaml, node, node->text, depth);
    }
    mt_error_set(error, "%s${%.100s}: of the resolvers, oc.decode, oc.env and oc.select are supported",
                 mt_yaml_place_of(yaml, from->line).text, call);
    return NULL;
}

/* The text of a path to free; NULL with error. */
static char *expand_path(mt_yaml *yaml, const mt_yaml_node *from, const char *path, int depth) {
    mt_error ignored, *error = yaml->error;
    mt_yaml_node *node;
    const char *variable = is_variable(path) ? getenv(path) : NULL;
    bool keeps = yaml->keeps_unset && is_variable(path);
    if (variable || keeps || may_be_absent(yaml, path)) yaml->error = &ignored;
    int status = find_path(yaml, path, from, &node, depth);
    yaml->error = error;
    if (status != 0 && variable) return mt_strdup(variable);
    if (status != 0 && keeps) {
        char written[120];
        snprintf(yaml->unset, sizeof yaml->unset, "%.110s", path);
        snprintf(written, sizeof written, "${%.110s}", path);
        return mt_strdup(written);
    }
    if (status != 0) return may_be_absent(yaml, path) ? mt_strdup("null") : NULL;
    if (follow(yaml, &node, depth) != 0) return NULL;
    if (node->kind == MT_YAML_TEXT) return expand(yaml, node, node->text, depth);
    mt_error_set(yaml->error, "%s${%.100s} is a section or a list, not a text", mt_yaml_place_of(yaml, from->line).text,
                 path);
    return NULL;
}

/* The text of the reference between `begin` and `end`, its braces included, to free. */
static char *expand_reference(mt_yaml *yaml, const mt_yaml_node *from, const char *begin, const char *end, int depth) {
    char *inner = mt_strdup(begin + 2);
    inner[end - begin - 3] = 0;
    char *path = expand(yaml, from, inner, depth), *text = NULL;
    if (path) text = strchr(path, ':') ? resolve_call(yaml, from, path, depth) : expand_path(yaml, from, path, depth);
    free(inner), free(path);
    return text;
}

static int refuse_circle(mt_yaml *yaml, const mt_yaml_node *from, const char *text) {
    return mt_error_set(yaml->error, "%s'%.100s' refers to itself, or through more than %d references",
                        mt_yaml_place_of(yaml, from->line).text, text, MAX_REFERENCES);
}

/* The end of "$NAME", the name of a variable without braces; NULL: `text` does not begin with one. */
static const char *plain_end(const mt_yaml *yaml, const char *text) {
    if (!yaml->expands_plain || *text != '$' || (!isalpha((unsigned char)text[1]) && text[1] != '_')) return NULL;
    const char *end = text + 2;
    while (isalnum((unsigned char)*end) || *end == '_') end++;
    return end;
}

/* The text of "$NAME", to free. */
static char *expand_plain(mt_yaml *yaml, const mt_yaml_node *from, const char *begin, const char *end, int depth) {
    char *name = mt_strdup(begin + 1);
    name[end - begin - 1] = 0;
    char *text = expand_path(yaml, from, name, depth);
    free(name);
    return text;
}

/* A text with its references replaced, to free; NULL with error. `from` is for paths and messages. "\${" is "${". */
static char *expand(mt_yaml *yaml, const mt_yaml_node *from, const char *text, int depth) {
    char *expanded = NULL;
    size_t size;
    if (depth > MAX_REFERENCES) refuse_circle(yaml, from, text);
    if (depth > MAX_REFERENCES || mt_yaml_visit(yaml, from) != 0) return NULL;
    if (!strstr(text, "${") && !(yaml->expands_plain && strchr(text, '$'))) return mt_strdup(text);
    FILE *file = open_memstream(&expanded, &size);
    MT_CHECK(file);
    bool good = true;
    while (*text && good) {
        bool is_escaped = strncmp(text, "\\${", 3) == 0;
        const char *end = strncmp(text, "${", 2) == 0 ? reference_end(text) : NULL;
        char *part = end ? expand_reference(yaml, from, text, end, depth + 1) : NULL;
        if (!end && (end = plain_end(yaml, text))) part = expand_plain(yaml, from, text, end, depth + 1);
        good = !end || part;
        if (good && end) fputs(part, file);
        if (is_escaped) fputs("${", file);
        if (!end && !is_escaped) fputc(*text, file);
        free(part);
        if (good && ftell(file) >= MT_YAML_BYTES)
            good = mt_yaml_fail(yaml, from, "its references make a text of 64 KiB") == 0;
        text = end ? end : text + (is_escaped ? 3 : 1);
    }
    yaml->visits += ftell(file) / 64;
    MT_CHECK(fclose(file) == 0);
    if (good) return expanded;
    free(expanded);
    return NULL;
}

static int follow(mt_yaml *yaml, mt_yaml_node **node, int depth) {
    for (;; depth++) {
        const char *text = (*node)->text, *end = strncmp(text, "${", 2) == 0 ? reference_end(text) : NULL;
        bool selects = strncmp(text, "${oc.select:", 12) == 0; // a default is a text, for `expand`
        if (!end || *end || strstr(text + 2, "${") || (strchr(text, ':') && !selects)) return 0;
        if (mt_yaml_visit(yaml, *node) != 0) return -1;
        if (depth > MAX_REFERENCES) return refuse_circle(yaml, *node, text);
        char path[200];
        mt_error ignored, *error = yaml->error;
        const char *begin = text + (selects ? 12 : 2);
        snprintf(path, sizeof path, "%.*s", (int)strcspn(begin, selects ? ",}" : "}"), begin);
        bool is_text = is_variable(path) && (yaml->keeps_unset || getenv(path)); // for `expand`
        bool may_fail = selects || is_text || may_be_absent(yaml, path);
        mt_yaml_node *found;
        if (may_fail) yaml->error = &ignored;
        int status = find_path(yaml, path, *node, &found, depth + 1);
        yaml->error = error;
        if (status != 0) return may_fail ? 0 : -1;
        *node = found;
    }
}

int mt_yaml_find_path(mt_yaml *yaml, const char *path, const mt_yaml_node *from, mt_yaml_node **found) {
    return find_path(yaml, path, from, found, 0);
}

int mt_yaml_follow(mt_yaml *yaml, mt_yaml_node **node) {
    return follow(yaml, node, 0);
}

char *mt_yaml_expand(mt_yaml *yaml, const mt_yaml_node *node) {
    return expand(yaml, node, node->text, 0);
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

/* Writes in decimal what YAML 1.1 reads as a whole number of another form: 0x1F, 0b101, 1_000. False for other texts.
 */
static bool write_decimal(char decimal[32], const char *text) {
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

static bool is_octal(const char *text) {
    const char *digits = text + (*text == '-' || *text == '+');
    return *digits == '0' && digits[1] && strspn(digits, "01234567_") == strlen(digits);
}

char *mt_yaml_value(mt_yaml *yaml, const mt_yaml_node *node, bool wants_number) {
    char decimal[32];
    if (node->is_plain && is_octal(node->text)) {
        mt_error_set(yaml->error,
                     "%s'%.40s' is an octal number in YAML; write it in decimal, or in quotes if it is a text",
                     mt_yaml_place_of(yaml, node->line).text, node->text);
        return NULL;
    }
    char *text = mt_yaml_expand(yaml, node);
    if (text && node->is_plain && wants_number && write_decimal(decimal, text)) mt_string_set(&text, decimal);
    return text;
}

/* A plain scalar is null, a boolean or a number if it reads as one; every other one is a text. */
static json_t *json_of_text(mt_yaml *yaml, const mt_yaml_node *node) {
    json_t *value = NULL;
    int64_t whole;
    bool flag;
    char *end;
    if (mt_yaml_is_null(node)) return json_null();
    char *text = mt_yaml_value(yaml, node, true);
    if (!text) return NULL;
    double number = strtod(text, &end);
    bool is_real = *text && strspn(text, "0123456789+-.eE") == strlen(text) && *end == 0 && isfinite(number);
    if (node->is_plain && mt_parse_bool(text, &flag))
        value = json_boolean(flag);
    else if (node->is_plain && mt_parse_int(text, &whole))
        value = json_integer(whole);
    else if (node->is_plain && is_real)
        value = json_real(number);
    else
        value = json_string(text);
    if (!value) mt_yaml_fail(yaml, node, "holds a text that is not UTF-8");
    free(text);
    return value;
}

static json_t *json_of(mt_yaml *yaml, mt_yaml_node *node, int depth) {
    if (mt_yaml_visit(yaml, node) != 0 || follow(yaml, &node, 0) != 0) return NULL;
    if (depth > MAX_DEPTH) mt_yaml_fail(yaml, node, "is nested too deeply");
    if (depth > MAX_DEPTH) return NULL;
    if (node->kind == MT_YAML_TEXT) return json_of_text(yaml, node);
    bool is_section = node->kind == MT_YAML_SECTION;
    if (is_section && mt_yaml_check_keys(yaml, node) != 0) return NULL;
    json_t *json = is_section ? json_object() : json_array();
    for (int64_t i = 0; i < node->count; i++) {
        json_t *value = json_of(yaml, node->values[i], depth + 1);
        if (!value) {
            json_decref(json);
            return NULL;
        }
        if (is_section)
            json_object_set_new(json, node->keys[i]->text, value);
        else
            json_array_append_new(json, value);
    }
    return json;
}

json_t *mt_yaml_json(mt_yaml *yaml, mt_yaml_node *node) {
    return json_of(yaml, node, 0);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

#ifdef MT_HAVE_YAML
/* An error if collections nest deeper than the parser should see, or if there are more anchors and aliases: libyaml's
 * time grows with the square of both. Reads tokens, which libyaml finds in linear time while they nest little. The
 * parser reports what is not YAML. */
static int check_work(const mt_yaml *yaml) {
    yaml_parser_t parser;
    yaml_token_t token;
    int depth = 0, anchors = 0, tokens = 0;
    bool ends = false;
    long long line = 0;
    if (!yaml_parser_initialize(&parser)) return mt_error_set(yaml->error, "%s: no memory to read YAML", yaml->path);
    yaml_parser_set_input_string(&parser, (const unsigned char *)yaml->text, (size_t)yaml->bytes);
    while (!ends && depth <= MAX_NESTING && anchors <= MAX_ANCHORS && tokens <= MAX_TOKENS &&
           yaml_parser_scan(&parser, &token)) {
        yaml_token_type_t type = token.type;
        anchors += type == YAML_ANCHOR_TOKEN || type == YAML_ALIAS_TOKEN;
        depth += type == YAML_FLOW_SEQUENCE_START_TOKEN || type == YAML_FLOW_MAPPING_START_TOKEN ||
                 type == YAML_BLOCK_SEQUENCE_START_TOKEN || type == YAML_BLOCK_MAPPING_START_TOKEN;
        depth -=
            type == YAML_FLOW_SEQUENCE_END_TOKEN || type == YAML_FLOW_MAPPING_END_TOKEN || type == YAML_BLOCK_END_TOKEN;
        line = (long long)token.start_mark.line + 1;
        ends = type == YAML_STREAM_END_TOKEN;
        tokens++;
        yaml_token_delete(&token);
    }
    yaml_parser_delete(&parser);
    if (anchors > MAX_ANCHORS)
        return mt_error_set(yaml->error, "%shas more than %d anchors and aliases; is it a file of options?",
                            mt_yaml_place_of(yaml, line).text, MAX_ANCHORS);
    if (tokens > MAX_TOKENS)
        return mt_error_set(yaml->error, "%sholds more than options could need", mt_yaml_place_of(yaml, line).text);
    if (depth <= MAX_NESTING) return 0;
    return mt_error_set(yaml->error, "%ssections and lists are nested deeper than %d; is it a file of options?",
                        mt_yaml_place_of(yaml, line).text, MAX_NESTING);
}

/* Loads a document of the parser. A mark at the end of a text may lie behind its last line. */
static int load(const mt_yaml *yaml, yaml_parser_t *parser, yaml_document_t *document) {
    if (yaml_parser_load(parser, document)) return 0;
    long long lines = 1, mark = (long long)parser->problem_mark.line + 1;
    for (int64_t i = 0; i + 1 < yaml->bytes; i++) lines += yaml->text[i] == '\n';
    return mt_error_set(yaml->error, "%s:%lld: is not YAML: %s", yaml->path, mark < lines ? mark : lines,
                        parser->problem ? parser->problem : "it cannot be read");
}

/* Loads the one document of a text; delete it if 0. */
static int load_document(const mt_yaml *yaml, yaml_document_t *document) {
    yaml_parser_t parser;
    yaml_document_t second;
    if (!yaml_parser_initialize(&parser)) return mt_error_set(yaml->error, "%s: no memory to read YAML", yaml->path);
    yaml_parser_set_input_string(&parser, (const unsigned char *)yaml->text, (size_t)yaml->bytes);
    int status = load(yaml, &parser, document);
    if (status == 0) {
        status = load(yaml, &parser, &second);
        const yaml_node_t *root = status == 0 ? yaml_document_get_root_node(&second) : NULL;
        if (root)
            status = mt_error_set(yaml->error, "%s:%lld: has a second document; options are in one", yaml->path,
                                  (long long)root->start_mark.line + 1);
        yaml_document_delete(&second);
        if (status != 0) yaml_document_delete(document);
    }
    yaml_parser_delete(&parser);
    return status;
}

/* Takes over a node of libyaml; its children are nodes of the same numbers. */
static int take_node(mt_yaml *yaml, mt_yaml_node *node, const yaml_node_t *from) {
    node->text = "";
    node->line = (long long)from->start_mark.line + 1;
    if (from->type == YAML_SCALAR_NODE) {
        node->kind = MT_YAML_TEXT;
        node->text = (const char *)from->data.scalar.value;
        node->is_plain = from->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
        if (strlen(node->text) != from->data.scalar.length) return mt_yaml_fail(yaml, node, "holds a zero byte");
        return 0;
    }
    bool is_section = from->type == YAML_MAPPING_NODE;
    const yaml_node_pair_t *pairs = is_section ? from->data.mapping.pairs.start : NULL;
    const yaml_node_item_t *items = is_section ? NULL : from->data.sequence.items.start;
    node->kind = is_section ? MT_YAML_SECTION : MT_YAML_LIST;
    node->count = is_section ? from->data.mapping.pairs.top - pairs : from->data.sequence.items.top - items;
    int64_t bytes = mt_max(node->count, 1) * (int64_t)sizeof(mt_yaml_node *);
    if (is_section) node->keys = mt_malloc(bytes);
    node->values = mt_malloc(bytes);
    for (int64_t i = 0; i < node->count; i++) {
        if (is_section) node->keys[i] = &yaml->nodes[pairs[i].key - 1];
        node->values[i] = &yaml->nodes[(is_section ? pairs[i].value : items[i]) - 1];
        if (!node->values[i]->parent) node->values[i]->parent = node;
    }
    return 0;
}

/* A section's keys while others are merged into it. */
typedef struct merged {
    mt_yaml_node **keys, **values;
    int64_t count;
} merged;

static int merge(mt_yaml *yaml, mt_yaml_node *section, int depth);

/* Adds keys of `from`, a section or a list of sections, to those of a section that lacks them. */
static int add_merged(mt_yaml *yaml, const mt_yaml_node *section, mt_yaml_node *from, merged *to, int depth) {
    if (from->kind == MT_YAML_LIST && depth < MAX_DEPTH) {
        for (int64_t i = 0; i < from->count; i++)
            if (add_merged(yaml, section, from->values[i], to, depth + 1) != 0) return -1;
        return 0;
    }
    if (from->kind != MT_YAML_SECTION || depth > MAX_DEPTH || from->merging == 1)
        return mt_yaml_fail(yaml, from, "<< merges what is no section, or itself");
    if (merge(yaml, from, depth + 1) != 0) return -1;
    if (to->count + from->count + section->count > MAX_KEYS) return too_much(yaml, section);
    for (int64_t i = 0; i < from->count; i++) {
        const char *name = from->keys[i]->text;
        bool is_there = mt_yaml_get(section, name) != NULL;
        for (int64_t j = 0; j < to->count && !is_there; j++) is_there = strcmp(to->keys[j]->text, name) == 0;
        if (++yaml->visits > MAX_VISITS) return too_much(yaml, from);
        if (is_there) continue;
        to->keys[to->count] = from->keys[i];
        to->values[to->count++] = from->values[i];
    }
    return 0;
}

/* Replaces "<<" among the keys of a section by the keys that it merges. */
static int merge(mt_yaml *yaml, mt_yaml_node *section, int depth) {
    bool merges = false;
    for (int64_t i = 0; i < section->count && section->merging == 0; i++)
        merges |= section->keys[i]->is_plain && strcmp(section->keys[i]->text, "<<") == 0;
    if (!merges) return 0;
    merged to = {mt_malloc(MAX_KEYS * (int64_t)sizeof *to.keys), mt_malloc(MAX_KEYS * (int64_t)sizeof *to.values), 0};
    section->merging = 1;
    int status = section->count > MAX_KEYS ? too_much(yaml, section) : 0;
    for (int64_t i = 0; i < section->count && status == 0; i++) {
        bool is_merge = section->keys[i]->is_plain && strcmp(section->keys[i]->text, "<<") == 0;
        if (is_merge) {
            status = add_merged(yaml, section, section->values[i], &to, depth);
        } else if (to.count == MAX_KEYS) {
            status = too_much(yaml, section);
        } else {
            to.keys[to.count] = section->keys[i];
            to.values[to.count++] = section->values[i];
        }
    }
    section->merging = 2;
    free(section->keys), free(section->values);
    section->keys = to.keys, section->values = to.values, section->count = to.count;
    return status;
}

static int build(mt_yaml *yaml) {
    yaml_document_t *document = yaml->document;
    const yaml_node_t *first = document->nodes.start;
    yaml->num_nodes = document->nodes.top - first;
    if (yaml->num_nodes == 0) return 0;
    yaml->nodes = mt_calloc(yaml->num_nodes * (int64_t)sizeof *yaml->nodes);
    yaml->root = yaml->nodes;
    for (int64_t i = 0; i < yaml->num_nodes; i++)
        if (take_node(yaml, &yaml->nodes[i], &first[i]) != 0) return -1;
    for (int64_t i = 0; i < yaml->num_nodes; i++)
        if (yaml->nodes[i].kind == MT_YAML_SECTION && merge(yaml, &yaml->nodes[i], 0) != 0) return -1;
    yaml->visits = 0;
    return 0;
}

int mt_yaml_open(mt_yaml *yaml, const char *text, int64_t bytes, const char *path, mt_error *error) {
    yaml_document_t document;
    *yaml = (mt_yaml){.path = path, .text = text, .bytes = bytes, .error = error};
    if (check_work(yaml) != 0 || load_document(yaml, &document) != 0) return -1;
    yaml->document = mt_malloc(sizeof document);
    memcpy(yaml->document, &document, sizeof document);
    if (build(yaml) == 0) return 0;
    mt_yaml_close(yaml);
    return -1;
}

/* ---- changes of the command line */

/* A section of `section` that nothing else uses, as aliases do: a copy in its place. */
static mt_yaml_node *own_section(mt_yaml *yaml, mt_yaml_node *section, int64_t i) {
    const mt_yaml_node *shared = section->values[i];
    mt_yaml_node *own = mt_malloc(sizeof *own);
    int64_t bytes = mt_max(shared->count, 1) * (int64_t)sizeof(mt_yaml_node *);
    *own = *shared;
    own->keys = mt_malloc(bytes), own->values = mt_malloc(bytes);
    memcpy(own->keys, shared->keys, (size_t)shared->count * sizeof(mt_yaml_node *));
    memcpy(own->values, shared->values, (size_t)shared->count * sizeof(mt_yaml_node *));
    for (int64_t j = 0; j < own->count; j++) own->values[j]->parent = own;
    own->parent = section;
    yaml->copies = mt_realloc(yaml->copies, (yaml->num_copies + 1) * (int64_t)sizeof *yaml->copies);
    yaml->copies[yaml->num_copies++] = own;
    return section->values[i] = own;
}

/* Puts the keys of `change` into `section`; where both have a section, the keys below it. */
static void put(mt_yaml *yaml, mt_yaml_node *section, const mt_yaml_node *change) {
    for (int64_t k = 0; k < change->count; k++) {
        mt_yaml_node *key = change->keys[k], *value = change->values[k];
        int64_t i = 0;
        while (i < section->count && strcmp(section->keys[i]->text, key->text) != 0) i++;
        bool is_there = i < section->count;
        if (is_there && value->kind == MT_YAML_SECTION && section->values[i]->kind == MT_YAML_SECTION) {
            put(yaml, own_section(yaml, section, i), value);
            continue;
        }
        if (!is_there) {
            int64_t bytes = ++section->count * (int64_t)sizeof(mt_yaml_node *);
            section->keys = mt_realloc(section->keys, bytes);
            section->values = mt_realloc(section->values, bytes);
        }
        section->keys[i] = key, section->values[i] = value;
        value->parent = section;
    }
}

/* Removes the key of a path. */
static int remove_key(mt_yaml *yaml, const char *path) {
    mt_yaml_node *section = yaml->root;
    for (const char *at = path; section->kind == MT_YAML_SECTION;) {
        size_t length = strcspn(at, ".");
        int64_t i = 0;
        while (i < section->count && (strncmp(section->keys[i]->text, at, length) || section->keys[i]->text[length]))
            i++;
        if (i == section->count) break;
        if (at[length] && section->values[i]->kind != MT_YAML_SECTION) break;
        if (at[length]) {
            section = own_section(yaml, section, i);
            at += length + 1;
            continue;
        }
        for (section->count--; i < section->count; i++)
            section->keys[i] = section->keys[i + 1], section->values[i] = section->values[i + 1];
        return 0;
    }
    return mt_error_set(yaml->error, "command line: ~%.200s: %s has no such key", path, yaml->path);
}

/* The text of a tree that has the value at the path, a key on a line, deeper each, to free. A value that only Hydra
 * reads as a text is in quotes. */
static char *nest(const char *path, const char *value) {
    char *text = NULL;
    size_t size;
    int depth = 0;
    FILE *file = open_memstream(&text, &size);
    MT_CHECK(file);
    for (const char *at = path; *at && *at != '='; at += strcspn(at, ".=")) {
        at += *at == '.';
        fprintf(file, "%s%*s%.*s:", depth ? "\n" : "", depth, "", (int)strcspn(at, ".="), at);
        depth++;
    }
    bool is_flow = *value && strchr("[{\"'", *value);
    bool is_text = !*value || strchr("*&!%@`#|>", *value) || (!is_flow && (strstr(value, ": ") || strstr(value, " #")));
    json_t *quoted = is_text ? json_string(value) : NULL;
    char *written = quoted ? json_dumps(quoted, JSON_ENCODE_ANY) : NULL;
    fprintf(file, " %s\n", written ? written : value);
    MT_CHECK(fclose(file) == 0);
    json_decref(quoted);
    free(written);
    return text;
}

bool mt_yaml_is_override(const char *text) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789-";
    bool removes = *text == '~';
    text += strspn(text, "+") > 2 ? 0 : *text == '+' ? strspn(text, "+") : (size_t)removes;
    for (;; text++) {
        size_t length = strspn(text, letters);
        if (length == 0 || *text == '-') return false;
        text += length;
        if (*text != '.') return removes ? !*text : *text == '=';
    }
}

int mt_yaml_override(mt_yaml *yaml, const char *text) {
    const char *path = text + strspn(text, "+"), *equals = strchr(path, '=');
    if (!yaml->root || yaml->root->kind != MT_YAML_SECTION)
        return mt_error_set(yaml->error, "%s: has no sections of keys", yaml->path);
    if (*text == '~') return remove_key(yaml, text + 1);
    char *nested = nest(path, equals + 1);
    mt_yaml inner;
    int status = mt_yaml_open(&inner, nested, (int64_t)strlen(nested), text, yaml->error);
    if (status != 0) {
        free(nested);
        return -1;
    }
    for (int64_t i = 0; i < inner.num_nodes; i++) inner.nodes[i].line = MT_YAML_COMMAND_LINE;
    yaml->overrides = mt_realloc(yaml->overrides, (yaml->num_overrides + 1) * (int64_t)sizeof *yaml->overrides);
    yaml->overrides[yaml->num_overrides++] = inner;
    put(yaml, yaml->root, inner.root);
    return 0;
}

void mt_yaml_close(mt_yaml *yaml) {
    for (int64_t i = 0; i < yaml->num_overrides; i++) {
        free((char *)yaml->overrides[i].text);
        mt_yaml_close(&yaml->overrides[i]);
    }
    free(yaml->overrides);
    for (int64_t i = 0; i < yaml->num_copies; i++) {
        free(yaml->copies[i]->keys), free(yaml->copies[i]->values);
        free(yaml->copies[i]);
    }
    free(yaml->copies);
    for (int64_t i = 0; i < yaml->num_nodes; i++) free(yaml->nodes[i].keys), free(yaml->nodes[i].values);
    free(yaml->nodes);
    if (yaml->document) yaml_document_delete(yaml->document);
    free(yaml->document);
    free(yaml->read);
    *yaml = (mt_yaml){0};
}
#else
bool mt_yaml_is_override(const char *text) {
    (void)text;
    return false;
}

int mt_yaml_override(mt_yaml *yaml, const char *text) {
    (void)text;
    return mt_error_set(yaml->error, "--config %s: built without libyaml; `make deps` installs it", yaml->path);
}

int mt_yaml_open(mt_yaml *yaml, const char *text, int64_t bytes, const char *path, mt_error *error) {
    *yaml = (mt_yaml){.path = path, .text = text, .bytes = bytes, .error = error};
    return mt_error_set(error, "--config %s: built without libyaml; `make deps` installs it", path);
}

void mt_yaml_close(mt_yaml *yaml) {
    *yaml = (mt_yaml){0};
}
#endif

int mt_yaml_open_file(mt_yaml *yaml, const char *path, int64_t most_bytes, mt_error *error) {
    int64_t bytes;
    char *text = mt_file_read(path, most_bytes, &bytes, error);
    int status = text ? mt_yaml_open(yaml, text, bytes, path, error) : -1;
    if (status == 0)
        yaml->read = text;
    else
        free(text);
    return status;
}
