/* option_yaml.c: options in a YAML file. */
#include "option_yaml.h"

#include "role_config.h"

#include <stdlib.h>
#include <string.h>
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

#ifdef MT_HAVE_YAML
enum { MT_YAML_DEPTH = 8, MT_YAML_EVENTS = 100000 };

/* A YAML text being read as a stream of events. */
typedef struct mt_yaml {
    yaml_parser_t parser;
    yaml_event_t event;
    bool has_event;
    int64_t events;
    uint64_t seen[sizeof((mt_run_options *)0)->given / sizeof(uint64_t)]; // options that this text has named
    mt_option_reader *reader;
    const char *path, *text;
    int64_t bytes;
    mt_error *error;
} mt_yaml;

/* Moves to the next event. Anchors are refused: aliases could expand without end. */
static int mt_yaml_next(mt_yaml *yaml) {
    if (yaml->has_event) yaml_event_delete(&yaml->event);
    yaml->has_event = yaml_parser_parse(&yaml->parser, &yaml->event) != 0;
    if (!yaml->has_event)
        return mt_error_set(yaml->error, "%s:%lld: is not YAML: %s", yaml->path,
                            mt_yaml_line(yaml->text, yaml->bytes, yaml->parser.problem_mark.line),
                            yaml->parser.problem ? yaml->parser.problem : "it cannot be read");
    const yaml_event_t *event = &yaml->event;
    long long line = (long long)event->start_mark.line + 1;
    if (++yaml->events > MT_YAML_EVENTS)
        return mt_error_set(yaml->error, "%s:%lld: holds more than options could need", yaml->path, line);
    if (event->type == YAML_ALIAS_EVENT || (event->type == YAML_SCALAR_EVENT && event->data.scalar.anchor) ||
        (event->type == YAML_SEQUENCE_START_EVENT && event->data.sequence_start.anchor) ||
        (event->type == YAML_MAPPING_START_EVENT && event->data.mapping_start.anchor))
        return mt_error_set(yaml->error, "%s:%lld: anchors and aliases are not supported; write the value out",
                            yaml->path, line);
    return 0;
}

/* The event's text; a zero byte in it is an error. */
static int mt_yaml_scalar(mt_yaml *yaml, const char **text) {
    *text = (const char *)yaml->event.data.scalar.value;
    if (strlen(*text) == yaml->event.data.scalar.length) return 0;
    return mt_error_set(yaml->error, "%s:%lld: holds a zero byte", yaml->path,
                        (long long)yaml->event.start_mark.line + 1);
}

static bool mt_yaml_is_null(const yaml_event_t *event) {
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", "None"};
    const char *text = (const char *)event->data.scalar.value;
    if (event->type != YAML_SCALAR_EVENT || event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE) return false;
    for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++)
        if (strcmp(text, nulls[i]) == 0) return true;
    return false;
}

/* Reads a list of zeros and ones, one for each layer, as the text "[0,1,1]". The current event begins the list. */
static int mt_yaml_read_layers(mt_yaml *yaml, const mt_setting *setting, const char *where) {
    char *list = NULL;
    size_t size;
    int64_t count = 0;
    FILE *file = open_memstream(&list, &size);
    MT_CHECK(file);
    int status = mt_yaml_next(yaml);
    for (; !status && yaml->event.type != YAML_SEQUENCE_END_EVENT; status = mt_yaml_next(yaml)) {
        const char *text = yaml->event.type == YAML_SCALAR_EVENT ? (const char *)yaml->event.data.scalar.value : "";
        status = strcmp(text, "0") != 0 && strcmp(text, "1") != 0;
        if (status) mt_error_set(yaml->error, "%s expects 0 or 1 for each layer in its list", where);
        if (status) break;
        fprintf(file, "%c%s", count++ > 0 ? ',' : '[', text);
    }
    fputs(count > 0 ? "]" : "[]", file);
    MT_CHECK(fclose(file) == 0);
    if (!status) status = mt_setting_set(yaml->reader, setting, list, where, yaml->error);
    free(list);
    return status ? -1 : 0;
}

/* Reads the value of a setting: the current event is a scalar or begins a sequence. */
static int mt_yaml_read_value(mt_yaml *yaml, const mt_setting *setting, const char *where) {
    const char *text;
    char decimal[32];
    mt_option_type type = setting->row ? setting->row->type : MT_STRING;
    bool takes_number = type == MT_INT || type == MT_REAL || type == MT_INTS || type == MT_REALS;
    bool is_sequence = yaml->event.type == YAML_SEQUENCE_START_EVENT;
    mt_layer_freq_rule rule;
    if (is_sequence && mt_option_names_layers(setting->row, &rule)) return mt_yaml_read_layers(yaml, setting, where);
    if (is_sequence && !setting->row) { // an empty list is none
        if (mt_yaml_next(yaml)) return -1;
        if (yaml->event.type == YAML_SEQUENCE_END_EVENT)
            return mt_setting_set(yaml->reader, setting, "", where, yaml->error);
    }
    if (is_sequence && (!setting->row || !mt_option_is_list(setting->row)))
        return mt_error_set(yaml->error, "%s expects %s, not a list", where, mt_setting_metavar(setting));
    if (setting->row && !setting->megatron.value) mt_option_clear(yaml->reader->options, setting->row);
    if (is_sequence && mt_yaml_next(yaml)) return -1;
    while (yaml->event.type != YAML_SEQUENCE_END_EVENT) {
        if (yaml->event.type != YAML_SCALAR_EVENT)
            return mt_error_set(yaml->error, "%s expects plain values in its list", where);
        bool is_plain = yaml->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
        if (mt_yaml_scalar(yaml, &text)) return -1;
        if (is_plain && mt_yaml_is_octal(text))
            return mt_yaml_refuse_octal(yaml->path, (long long)yaml->event.start_mark.line + 1, text, yaml->error);
        if (takes_number && is_plain && mt_yaml_decimal(decimal, text)) text = decimal;
        if (mt_setting_set(yaml->reader, setting, text, where, yaml->error)) return -1;
        if (!is_sequence) return 0;
        if (mt_yaml_next(yaml)) return -1;
    }
    return 0;
}

/* Moves from the beginning of a sequence to its end. */
static int mt_yaml_skip_sequence(mt_yaml *yaml) {
    for (int depth = 1; depth > 0;) {
        if (mt_yaml_next(yaml)) return -1;
        yaml_event_type_t type = yaml->event.type;
        depth += type == YAML_SEQUENCE_START_EVENT || type == YAML_MAPPING_START_EVENT;
        depth -= type == YAML_SEQUENCE_END_EVENT || type == YAML_MAPPING_END_EVENT;
    }
    return 0;
}

/* Reads the option `name`, whose value is the current event; `position` is the file and line. */
static int mt_yaml_read_option(mt_yaml *yaml, const char *name, const char *position) {
    char where[400];
    const char *text;
    mt_setting setting = mt_setting_find(name, strlen(name));
    bool is_scalar = yaml->event.type == YAML_SCALAR_EVENT, is_null = mt_yaml_is_null(&yaml->event);
    if (!mt_setting_is_accepted(&setting, yaml->reader->program)) {
        if (is_scalar && mt_yaml_scalar(yaml, &text)) return -1;
        if (!is_null || setting.megatron.kind == MT_NAME_UNKNOWN)
            mt_option_reader_refuse(yaml->reader, &setting, position, name, strlen(name), is_scalar ? text : NULL);
        return is_scalar ? 0 : mt_yaml_skip_sequence(yaml);
    }
    snprintf(where, sizeof where, "%s%.80s", position, name);
    if (yaml->event.type == YAML_MAPPING_START_EVENT)
        return mt_error_set(yaml->error, "%s expects %s, not a section", where, mt_setting_metavar(&setting));
    if (is_null) return 0;
    if (is_scalar) mt_setting_take_share(&setting, (const char *)yaml->event.data.scalar.value);
    if (is_scalar && mt_setting_is_default(&setting, (const char *)yaml->event.data.scalar.value)) return 0;
    if (!setting.row || setting.megatron.value) return mt_yaml_read_value(yaml, &setting, where);
    size_t offset = setting.row->offset;
    bool again = yaml->seen[offset / 64] >> offset % 64 & 1;
    char *before = again ? mt_option_text(yaml->reader->options, setting.row) : NULL;
    yaml->seen[offset / 64] |= (uint64_t)1 << offset % 64;
    int status = mt_yaml_read_value(yaml, &setting, where);
    char *after = again && status == 0 ? mt_option_text(yaml->reader->options, setting.row) : NULL;
    if (after && strcmp(before, after) != 0)
        status = mt_error_set(yaml->error, "%s is given twice in this file, with the values %.100s and %.100s", where,
                              before, after);
    free(before), free(after);
    return status;
}

/* Reads a key, the current event, and its value, whose last event is current afterwards. If the value is a section,
 * increments `depth` instead; the names of sections have no meaning. */
static int mt_yaml_read_entry(mt_yaml *yaml, int *depth) {
    char position[300];
    const char *key;
    long long line = (long long)yaml->event.start_mark.line + 1;
    if (yaml->event.type != YAML_SCALAR_EVENT)
        return mt_error_set(yaml->error, "%s:%lld: expects the name of an option", yaml->path, line);
    if (mt_yaml_scalar(yaml, &key)) return -1;
    char *name = mt_strdup(key); // the next event frees this one
    snprintf(position, sizeof position, "%.250s:%lld: ", yaml->path, line);
    int result = mt_yaml_next(yaml);
    bool is_section = yaml->event.type == YAML_MAPPING_START_EVENT && !mt_option_find(name, strlen(name));
    if (!result && !is_section) result = mt_yaml_read_option(yaml, name, position);
    if (!result && is_section && ++*depth > MT_YAML_DEPTH)
        result =
            mt_error_set(yaml->error, "%s%.80s: sections are nested deeper than %d", position, name, MT_YAML_DEPTH);
    free(name);
    return result;
}

/* Reads one document, a mapping or nothing. */
static int mt_yaml_read(mt_yaml *yaml) {
    int depth = 1;
    do
        if (mt_yaml_next(yaml)) return -1;
    while (yaml->event.type == YAML_STREAM_START_EVENT || yaml->event.type == YAML_DOCUMENT_START_EVENT);
    if (yaml->event.type == YAML_STREAM_END_EVENT || mt_yaml_is_null(&yaml->event)) return 0;
    if (yaml->event.type != YAML_MAPPING_START_EVENT)
        return mt_error_set(yaml->error, "%s:%lld: expects lines such as `num_layers: 12`", yaml->path,
                            (long long)yaml->event.start_mark.line + 1);
    while (depth > 0) {
        if (mt_yaml_next(yaml)) return -1;
        if (yaml->event.type == YAML_MAPPING_END_EVENT)
            depth--;
        else if (mt_yaml_read_entry(yaml, &depth))
            return -1;
    }
    if (mt_yaml_next(yaml) || mt_yaml_next(yaml)) return -1;
    if (yaml->event.type == YAML_STREAM_END_EVENT) return 0;
    return mt_error_set(yaml->error, "%s:%lld: a second document; options are one", yaml->path,
                        (long long)yaml->event.start_mark.line + 1);
}

int mt_option_reader_read_yaml(mt_option_reader *reader, const char *text, int64_t bytes, const char *path,
                               mt_error *error) {
    mt_yaml yaml = {.reader = reader, .path = path, .text = text, .bytes = bytes, .error = error};
    if (mt_yaml_check_work(text, bytes, path, error) != 0) return -1;
    if (!yaml_parser_initialize(&yaml.parser)) return mt_error_set(error, "%s: no memory to read YAML", path);
    yaml_parser_set_input_string(&yaml.parser, (const unsigned char *)text, (size_t)bytes);
    int result = mt_yaml_read(&yaml);
    if (yaml.has_event) yaml_event_delete(&yaml.event);
    yaml_parser_delete(&yaml.parser);
    return result;
}
#else
int mt_option_reader_read_yaml(mt_option_reader *reader, const char *text, int64_t bytes, const char *path,
                               mt_error *error) {
    (void)reader, (void)text, (void)bytes;
    return mt_error_set(error, "--config %s: built without libyaml; `make deps` installs it", path);
}
#endif
