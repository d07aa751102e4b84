/* option_yaml.c: options in a YAML file. */
#include "option_yaml.h"

#include <stdlib.h>
#include <string.h>

enum { MT_YAML_DEPTH = 8 };

/* A YAML file being read. */
typedef struct mt_yaml_file {
    mt_yaml *yaml;
    mt_option_reader *reader;
    uint64_t seen[sizeof((mt_run_options *)0)->given / sizeof(uint64_t)]; // options that this text has named
    int depth;
} mt_yaml_file;

/* Reads a list of zeros and ones, one for each layer, as the text "[0,1,1]". */
static int mt_yaml_read_layers(mt_yaml_file *file, const mt_setting *setting, const mt_yaml_node *node,
                               const char *where) {
    char *list = NULL;
    size_t size;
    int status = 0;
    FILE *text = open_memstream(&list, &size);
    MT_CHECK(text);
    for (int64_t i = 0; i < node->count && !status; i++) {
        const char *layer = node->values[i]->text;
        if (strcmp(layer, "0") != 0 && strcmp(layer, "1") != 0)
            status = mt_error_set(file->yaml->error, "%s expects 0 or 1 for each layer in its list", where);
        fprintf(text, "%c%s", i > 0 ? ',' : '[', layer);
    }
    fputs(node->count > 0 ? "]" : "[]", text);
    MT_CHECK(fclose(text) == 0);
    if (!status) status = mt_setting_set(file->reader, setting, list, where, file->yaml->error);
    free(list);
    return status;
}

/* Reads a value of a setting, or one of its list. */
static int mt_yaml_read_text(mt_yaml_file *file, const mt_setting *setting, mt_yaml_node *node, const char *where) {
    mt_yaml *yaml = file->yaml;
    mt_option_type type = setting->row ? setting->row->type : MT_STRING;
    bool wants_number = type == MT_INT || type == MT_REAL || type == MT_INTS || type == MT_REALS;
    if (mt_yaml_visit(yaml, node) != 0 || mt_yaml_follow(yaml, &node) != 0) return -1;
    if (node->kind != MT_YAML_TEXT) return mt_error_set(yaml->error, "%s expects plain values in its list", where);
    char *text = mt_yaml_value(yaml, node, wants_number);
    int status = text ? mt_setting_set(file->reader, setting, text, where, yaml->error) : -1;
    free(text);
    return status;
}

static int mt_yaml_read_value(mt_yaml_file *file, const mt_setting *setting, mt_yaml_node *node, const char *where) {
    bool is_list = node->kind == MT_YAML_LIST;
    mt_layer_freq_rule rule;
    if (is_list && mt_option_names_layers(setting->row, &rule)) return mt_yaml_read_layers(file, setting, node, where);
    if (is_list && (!setting->row || !mt_option_is_list(setting->row)))
        return mt_error_set(file->yaml->error, "%s expects %s, not a list", where, mt_setting_metavar(setting));
    if (setting->row && !setting->megatron.value) mt_option_clear(file->reader->options, setting->row);
    if (!is_list) return mt_yaml_read_text(file, setting, node, where);
    for (int64_t i = 0; i < node->count; i++)
        if (mt_yaml_read_text(file, setting, node->values[i], where) != 0) return -1;
    return 0;
}

/* Reads the option `name`; `position` is the file and line. */
static int mt_yaml_read_option(mt_yaml_file *file, const char *name, mt_yaml_node *node, const char *position) {
    char where[400];
    mt_option_reader *reader = file->reader;
    mt_setting setting = mt_setting_find(name, strlen(name));
    bool is_text = node->kind == MT_YAML_TEXT, is_null = mt_yaml_is_null(node);
    if (!mt_setting_is_accepted(&setting, reader->program)) {
        bool is_unknown = !setting.row && setting.megatron.kind == MT_NAME_UNKNOWN;
        if (is_unknown && file->depth == 1 && mt_yaml_refers_to(file->yaml, name)) return 0; // a value of other keys
        if (!is_null || setting.megatron.kind == MT_NAME_UNKNOWN)
            mt_option_reader_refuse(reader, &setting, position, name, strlen(name), is_text ? node->text : NULL);
        return 0;
    }
    snprintf(where, sizeof where, "%s%.80s", position, name);
    if (node->kind == MT_YAML_SECTION)
        return mt_error_set(file->yaml->error, "%s expects %s, not a section", where, mt_setting_metavar(&setting));
    if (is_null) return 0;
    if (is_text) mt_setting_take_share(&setting, node->text);
    if (is_text && mt_setting_is_default(&setting, node->text)) return 0;
    if (!setting.row || setting.megatron.value) return mt_yaml_read_value(file, &setting, node, where);
    size_t offset = setting.row->offset;
    bool again = file->seen[offset / 64] >> offset % 64 & 1;
    char *before = again ? mt_option_text(reader->options, setting.row) : NULL;
    file->seen[offset / 64] |= (uint64_t)1 << offset % 64;
    int status = mt_yaml_read_value(file, &setting, node, where);
    char *after = again && status == 0 ? mt_option_text(reader->options, setting.row) : NULL;
    if (after && strcmp(before, after) != 0)
        status = mt_error_set(file->yaml->error, "%s is given twice in this file, with the values %.100s and %.100s",
                              where, before, after);
    free(before), free(after);
    return status;
}

/* Reads the keys of a section; the names of sections have no meaning. */
static int mt_yaml_read_section(mt_yaml_file *file, const mt_yaml_node *section) {
    mt_yaml *yaml = file->yaml;
    for (int64_t i = 0; i < section->count; i++) {
        const mt_yaml_node *key = section->keys[i];
        mt_yaml_node *node = section->values[i];
        char position[300];
        snprintf(position, sizeof position, "%.250s:%lld: ", yaml->path, key->line);
        if (mt_yaml_visit(yaml, key) != 0 || mt_yaml_visit(yaml, node) != 0) return -1;
        if (key->kind != MT_YAML_TEXT) return mt_yaml_fail(yaml, key, "expects the name of an option");
        if (mt_yaml_follow(yaml, &node) != 0) return -1;
        if (node->kind != MT_YAML_SECTION || mt_option_find(key->text, strlen(key->text))) {
            if (mt_yaml_read_option(file, key->text, node, position) != 0) return -1;
            continue;
        }
        if (file->depth == MT_YAML_DEPTH)
            return mt_error_set(yaml->error, "%s%.80s: sections are nested deeper than %d", position, key->text,
                                MT_YAML_DEPTH);
        file->depth++;
        if (mt_yaml_read_section(file, node) != 0) return -1;
        file->depth--;
    }
    return 0;
}

int mt_option_reader_read_yaml(mt_option_reader *reader, mt_yaml *yaml) {
    mt_yaml_file file = {.yaml = yaml, .reader = reader, .depth = 1};
    if (!yaml->root || mt_yaml_is_null(yaml->root)) return 0;
    if (yaml->root->kind == MT_YAML_SECTION) return mt_yaml_read_section(&file, yaml->root);
    return mt_yaml_fail(yaml, yaml->root, "expects lines such as `num_layers: 12`");
}
