/* option_yaml.c: the settings of a YAML file of options. */
#include "option_yaml.h"

#include <stdlib.h>
#include <string.h>

enum { MT_YAML_DEPTH = 8 };

/* A YAML file being read. */
typedef struct mt_yaml_file {
    mt_yaml *yaml;
    mt_givens *givens;
    bool has_words; // the keys at hand are words of a command line
    int depth;
} mt_yaml_file;

/* Adds the words of a text: several for an option of several words, which may be in brackets, "[a b]", as may those of
 * a name that is no option. */
static void mt_yaml_add_words(mt_given *given, const mt_option *row, char *text) {
    mt_layer_freq_rule rule;
    size_t length = strlen(text);
    bool has_brackets = length > 1 && text[0] == '[' && text[length - 1] == ']';
    bool takes_one = row && (!mt_option_is_list(row) || mt_option_names_layers(row, &rule));
    if (takes_one || (!row && !has_brackets)) {
        mt_strings_add(&given->values, text);
        return;
    }
    if (has_brackets) text[length - 1] = 0;
    char *rest = NULL;
    for (char *word = strtok_r(text + has_brackets, " \t\r\n", &rest); word; word = strtok_r(NULL, " \t\r\n", &rest))
        mt_strings_add(&given->values, word);
}

/* Adds a text to the values of the last setting. */
static int mt_yaml_add_text(mt_yaml_file *file, const mt_option *row, mt_yaml_node *node) {
    mt_yaml *yaml = file->yaml;
    mt_given *given = &file->givens->items[file->givens->count - 1];
    mt_layer_freq_rule rule;
    mt_option_type type = row ? row->type : MT_STRING;
    bool wants_number = type == MT_INT || type == MT_REAL || type == MT_INTS || type == MT_REALS, is_on = false;
    if (mt_yaml_visit(yaml, node) != 0 || mt_yaml_follow(yaml, &node) != 0) return -1;
    if (node->kind != MT_YAML_TEXT)
        return mt_error_set(yaml->error, "%s expects %s in its list", given->where,
                            mt_option_names_layers(row, &rule) ? "0 or 1 for each layer" : "plain values");
    *yaml->unset = 0;
    char *text = mt_yaml_value(yaml, node, wants_number);
    if (!text) return -1;
    if (*yaml->unset && !given->unset) given->unset = mt_strdup(yaml->unset);
    bool is_flag = given->form == MT_GIVEN_WORDS && node->is_plain && mt_parse_bool(text, &is_on) && is_on;
    if (given->form == MT_GIVEN_WORDS && !is_flag)
        mt_yaml_add_words(given, row, text);
    else if (!is_flag)
        mt_strings_add(&given->values, text);
    free(text);
    return 0;
}

/* Adds a setting. */
static int mt_yaml_add(mt_yaml_file *file, const mt_yaml_node *key, mt_yaml_node *node) {
    char position[300];
    const char *name = key->text + (strncmp(key->text, "--", 2) == 0 ? 2 : 0);
    mt_setting setting = mt_setting_find(name, strlen(name));
    bool is_unknown = !setting.row && setting.megatron.kind == MT_NAME_UNKNOWN, is_list = node->kind == MT_YAML_LIST;
    if (is_unknown && file->depth == 1 && mt_yaml_refers_to(file->yaml, name)) return 0; // a value of other keys
    mt_given_form form = mt_yaml_is_null(node)           ? MT_GIVEN_NULL
                         : node->kind == MT_YAML_SECTION ? MT_GIVEN_SECTION
                         : file->has_words && !is_list   ? MT_GIVEN_WORDS
                         : is_list                       ? MT_GIVEN_LIST
                                                         : MT_GIVEN_TEXT;
    snprintf(position, sizeof position, "%.250s:%lld: ", file->yaml->path, key->line);
    mt_given *given = mt_givens_add(file->givens, MT_SOURCE_FILE, form, position, name);
    given->line = key->line, given->is_argument = file->has_words;
    if (form == MT_GIVEN_NULL || form == MT_GIVEN_SECTION) return 0;
    mt_layer_freq_rule rule;
    bool takes_list = setting.row && (mt_option_is_list(setting.row) || mt_option_names_layers(setting.row, &rule));
    bool is_property = !setting.row && setting.megatron.kind == MT_NAME_ALWAYS; // an empty list may be one
    if (is_list && !takes_list && !is_property) return 0;                       // an error, or refused
    if (!is_list) return mt_yaml_add_text(file, setting.row, node);
    for (int64_t i = 0; i < node->count; i++)
        if (mt_yaml_add_text(file, setting.row, node->values[i]) != 0) return -1;
    return 0;
}

/* Adds the keys of a section; the names of sections have no meaning. */
static int mt_yaml_add_section(mt_yaml_file *file, const mt_yaml_node *section) {
    mt_yaml *yaml = file->yaml;
    for (int64_t i = 0; i < section->count; i++) {
        const mt_yaml_node *key = section->keys[i];
        mt_yaml_node *node = section->values[i];
        if (mt_yaml_visit(yaml, key) != 0 || mt_yaml_visit(yaml, node) != 0) return -1;
        if (key->kind != MT_YAML_TEXT || !*key->text || strcmp(key->text, "--") == 0)
            return mt_yaml_fail(yaml, key, "expects the name of an option");
        if (mt_yaml_follow(yaml, &node) != 0) return -1;
        if (file->has_words || node->kind != MT_YAML_SECTION || mt_option_find(key->text, strlen(key->text))) {
            if (mt_yaml_add(file, key, node) != 0) return -1;
            continue;
        }
        if (file->depth == MT_YAML_DEPTH)
            return mt_error_set(yaml->error, "%s:%lld: %.80s: sections are nested deeper than %d", yaml->path,
                                key->line, key->text, MT_YAML_DEPTH);
        file->depth++;
        if (mt_yaml_add_section(file, node) != 0) return -1;
        file->depth--;
    }
    return 0;
}

/* A file whose MODE names another program of Megatron-LM has this one error. */
static int mt_yaml_check_mode(const mt_yaml_file *file, const mt_yaml_node *root) {
    const mt_yaml_node *mode = mt_yaml_get(root, "MODE");
    if (!mode || mode->kind != MT_YAML_TEXT || mt_yaml_is_null(mode) || strcmp(mode->text, "pretraining") == 0)
        return 0;
    bool is_rl = strcmp(mode->text, "rl") == 0;
    return mt_error_set(file->yaml->error,
                        "%.250s:%lld: MODE is %.80s, whose file is not read: it is of another program of Megatron-LM "
                        "than its pre-training; %s",
                        file->yaml->path, mode->line, mode->text,
                        is_rl ? "--stage rl has reinforcement learning, with options of its own (--help)"
                              : "give its options on the command line");
}

/* Adds the section MODEL_ARGS, and notes the other keys. */
static int mt_yaml_add_model_args(mt_yaml_file *file, const mt_yaml_node *root, mt_option_reader *reader) {
    char where[400];
    if (mt_yaml_check_mode(file, root) != 0) return -1;
    for (int64_t i = 0; i < root->count; i++) {
        const mt_yaml_node *key = root->keys[i], *node = root->values[i];
        snprintf(where, sizeof where, "%.250s:%lld: %.80s", file->yaml->path, key->line, key->text);
        if (strcmp(key->text, "MODEL_ARGS") == 0) {
            file->has_words = reader->options->config_is_arguments = true;
            if (mt_yaml_add_section(file, node) != 0) return -1;
        } else if (strcmp(key->text, "MODE") != 0 || node->kind != MT_YAML_TEXT) {
            bool is_variables = strcmp(key->text, "ENV_VARS") == 0;
            mt_strings_add(&reader->idle, where);
            mt_strings_add(&reader->idle, is_variables ? "its variables are for ${...} alone; export what the run needs"
                                                       : "MODEL_ARGS has the options; the other keys are of the test");
        }
    }
    return 0;
}

int mt_givens_add_yaml(mt_givens *givens, mt_yaml *yaml, mt_option_reader *reader) {
    mt_yaml_file file = {.yaml = yaml, .givens = givens, .depth = 1};
    const mt_yaml_node *root = yaml->root, *args = mt_yaml_get(root, "MODEL_ARGS");
    yaml->keeps_unset = true;
    if (!root || mt_yaml_is_null(root)) return 0;
    yaml->expands_plain = args && args->kind == MT_YAML_SECTION;
    if (yaml->expands_plain) return mt_yaml_add_model_args(&file, root, reader);
    if (root->kind == MT_YAML_SECTION) return mt_yaml_add_section(&file, root);
    return mt_yaml_fail(yaml, root, "expects lines such as `num_layers: 12`");
}
