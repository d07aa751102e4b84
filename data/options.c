/* options.c: the options of a run as text: command line, YAML, --help, and the rules of the option table. */
#include "options.h"

#include "option_table.h"

#include "checkpoint.h"
#include "file.h"
#include "hf_cache.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

enum { MT_CONFIG_BYTES = 1 << 22 }; // limit of config.json and of a YAML file

static void mt_options_help(mt_program program, FILE *file);

/* ---- the command line and YAML: both find a row and a text, and call mt_option_set with the place for messages */

int mt_edit_distance(const char *a, size_t a_length, const char *b) {
    enum { LONGEST = 64 };
    int row[LONGEST + 1], b_length = (int)strlen(b) < LONGEST ? (int)strlen(b) : LONGEST;
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (int i = 1; i <= (int)a_length && i <= LONGEST; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int replaced = diagonal + ((a[i - 1] == '_' ? '-' : a[i - 1]) != b[j - 1]);
            int shorter = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replaced < shorter ? replaced : shorter;
        }
    }
    return row[b_length];
}

/* The program's option with the nearest name; NULL when none is near. */
static const mt_option *mt_option_nearest(const char *name, size_t length, int program) {
    const mt_option *nearest = NULL;
    int least = length < 6 ? 2 : 2 + (int)length / 4;
    if (length > 64) return NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !(row->programs & program)) continue;
        int distance = mt_edit_distance(name, length, row->name);
        if (distance < least) least = distance, nearest = row;
    }
    return nearest;
}

/* Finds an option of the program; NULL with error if there is none. `place` is its place in a file ("run.yaml:3: "), or
 * "" for the command line. */
static const mt_option *mt_option_lookup(const char *name, size_t length, mt_program program, const char *place,
                                         mt_error *error) {
    const mt_option *row = mt_option_find(name, length);
    if (row && row->programs & (int)program) return row;
    const mt_option *nearest = row ? NULL : mt_option_nearest(name, length, (int)program);
    const char *dashes = *place ? "" : "--";
    char key[80] = "";
    int shown = length < 100 ? (int)length : 100;
    if (nearest) mt_option_key(key, nearest);
    if (row)
        mt_error_set(error, "%s%s%.*s is an option of %s, not of %s", place, dashes, shown, name,
                     program == MT_PROGRAM_INFER ? "train" : "infer", program == MT_PROGRAM_INFER ? "infer" : "train");
    else if (nearest)
        mt_error_set(error, "%sunknown option %s%.*s; did you mean %s%s?", place, dashes, shown, name, dashes,
                     *place ? key : nearest->name);
    else
        mt_error_set(error, "%sunknown option %s%.*s; --help lists them all", place, dashes, shown, name);
    return NULL;
}

/* The kind of value that the option expects, for messages. */
static const char *mt_option_metavar(const mt_option *row) {
    return row->type == MT_INT ? "a whole number" : row->type == MT_REAL ? "a number" : row->values;
}

int mt_options_set(mt_options *options, const char *name, const char *value, mt_error *error) {
    char where[80];
    const mt_option *row = mt_option_lookup(name, strlen(name), MT_PROGRAM_LIBRARY, "", error);
    if (!row) return -1;
    snprintf(where, sizeof where, "--%s", row->name);
    mt_option_clear(options, row);
    if (!mt_option_is_list(row)) return mt_option_set(options, row, value, where, error);
    char *words = mt_strdup(value), *rest = NULL;
    int status = 0;
    for (char *word = strtok_r(words, " ", &rest); word && !status; word = strtok_r(NULL, " ", &rest))
        status = mt_option_set(options, row, word, where, error);
    free(words);
    return status;
}

/* Takes the option at arguments[index]; returns the index after its values, or -1. */
static int mt_options_read_argument(mt_options *options, mt_program program, int index, int count, char **arguments,
                                    mt_error *error) {
    const char *argument = arguments[index++];
    if (strncmp(argument, "--", 2) != 0 || !argument[2])
        return mt_error_set(error, "unexpected argument '%.100s'; options begin with -- (--help lists them)", argument);
    const char *equals = strchr(argument, '=');
    size_t length = equals ? (size_t)(equals - argument - 2) : strlen(argument) - 2;
    const mt_option *row = mt_option_lookup(argument + 2, length, program, "", error);
    if (!row) return -1;
    char where[80];
    snprintf(where, sizeof where, "--%s", row->name);
    mt_option_clear(options, row); // the last one wins
    if (equals) return mt_option_set(options, row, equals + 1, where, error) ? -1 : index;
    if (row->type == MT_FLAG || row->type == MT_NO)
        return mt_option_set(options, row, "true", where, error) ? -1 : index;
    int first = index;
    while (index < count && strncmp(arguments[index], "--", 2) != 0 && (mt_option_is_list(row) || index == first))
        if (mt_option_set(options, row, arguments[index++], where, error)) return -1;
    if (index == first && row->type == MT_OPTIONAL)
        return mt_option_set(options, row, "true", where, error) ? -1 : index;
    if (index == first) return mt_error_set(error, "%s expects %s, got nothing", where, mt_option_metavar(row));
    return index;
}

static int mt_options_read_arguments(mt_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    for (int index = 1; index < argc;) {
        index = mt_options_read_argument(options, program, index, argc, argv, error);
        if (index < 0) return -1;
    }
    return 0;
}

#ifdef MT_HAVE_YAML
enum { MT_YAML_DEPTH = 8, MT_YAML_EVENTS = 100000 };

/* A YAML text being read as a stream of events. */
typedef struct mt_yaml {
    yaml_parser_t parser;
    yaml_event_t event;
    bool has_event;
    int64_t events;
    uint64_t seen[sizeof((mt_options *)0)->given / sizeof(uint64_t)]; // options that this text has named
    mt_options *options;
    mt_program program;
    const char *path;
    mt_error *error;
} mt_yaml;

/* Moves to the next event. Anchors are refused: aliases could expand without end. */
static int mt_yaml_next(mt_yaml *yaml) {
    if (yaml->has_event) yaml_event_delete(&yaml->event);
    yaml->has_event = yaml_parser_parse(&yaml->parser, &yaml->event) != 0;
    if (!yaml->has_event)
        return mt_error_set(yaml->error, "%s:%lld: is not YAML: %s", yaml->path,
                            (long long)yaml->parser.problem_mark.line + 1,
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
    const char *text = (const char *)event->data.scalar.value;
    return event->type == YAML_SCALAR_EVENT && event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (!*text || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

/* Reads the value of `row`: the current event is a scalar or begins a sequence. */
static int mt_yaml_read_value(mt_yaml *yaml, const mt_option *row, const char *where) {
    const char *text;
    bool is_sequence = yaml->event.type == YAML_SEQUENCE_START_EVENT;
    if (mt_yaml_is_null(&yaml->event)) return 0;
    if (is_sequence && !mt_option_is_list(row))
        return mt_error_set(yaml->error, "%s expects %s, not a list", where, mt_option_metavar(row));
    mt_option_clear(yaml->options, row);
    if (is_sequence && mt_yaml_next(yaml)) return -1;
    while (yaml->event.type != YAML_SEQUENCE_END_EVENT) {
        if (yaml->event.type != YAML_SCALAR_EVENT)
            return mt_error_set(yaml->error, "%s expects plain values in its list", where);
        if (mt_yaml_scalar(yaml, &text) || mt_option_set(yaml->options, row, text, where, yaml->error)) return -1;
        if (!is_sequence) return 0;
        if (mt_yaml_next(yaml)) return -1;
    }
    return 0;
}

/* Reads the option `name`, whose value is the current event; `place` is its place in the file. */
static int mt_yaml_read_option(mt_yaml *yaml, const char *name, const char *place) {
    char where[400];
    const mt_option *row = mt_option_lookup(name, strlen(name), yaml->program, place, yaml->error);
    if (!row) return -1;
    snprintf(where, sizeof where, "%s%.80s", place, name);
    if (yaml->event.type == YAML_MAPPING_START_EVENT)
        return mt_error_set(yaml->error, "%s expects %s, not a section", where, mt_option_metavar(row));
    if (yaml->seen[row->offset / 64] >> row->offset % 64 & 1)
        return mt_error_set(yaml->error, "%s is given twice in this file", where);
    yaml->seen[row->offset / 64] |= (uint64_t)1 << row->offset % 64;
    return mt_yaml_read_value(yaml, row, where);
}

/* Reads a key, the current event, and its value, whose last event is current afterwards. If the value is a section,
 * increments `depth` instead; the names of sections have no meaning. */
static int mt_yaml_read_entry(mt_yaml *yaml, int *depth) {
    char place[300];
    const char *key;
    long long line = (long long)yaml->event.start_mark.line + 1;
    if (yaml->event.type != YAML_SCALAR_EVENT)
        return mt_error_set(yaml->error, "%s:%lld: expects the name of an option", yaml->path, line);
    if (mt_yaml_scalar(yaml, &key)) return -1;
    char *name = mt_strdup(key); // the next event frees this one
    snprintf(place, sizeof place, "%.250s:%lld: ", yaml->path, line);
    int result = mt_yaml_next(yaml);
    bool is_section = yaml->event.type == YAML_MAPPING_START_EVENT && !mt_option_find(name, strlen(name));
    if (!result && !is_section) result = mt_yaml_read_option(yaml, name, place);
    if (!result && is_section && ++*depth > MT_YAML_DEPTH)
        result = mt_error_set(yaml->error, "%s%.80s: sections are nested deeper than %d", place, name, MT_YAML_DEPTH);
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

int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    mt_yaml yaml = {.options = options, .program = program, .path = path, .error = error};
    if (!yaml_parser_initialize(&yaml.parser)) return mt_error_set(error, "%s: no memory to read YAML", path);
    yaml_parser_set_input_string(&yaml.parser, (const unsigned char *)text, (size_t)bytes);
    int result = mt_yaml_read(&yaml);
    if (yaml.has_event) yaml_event_delete(&yaml.event);
    yaml_parser_delete(&yaml.parser);
    return result;
}
#else
int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    (void)options, (void)program, (void)text, (void)bytes;
    return mt_error_set(error, "--config %s: built without libyaml; `make deps` installs it", path);
}
#endif

/* Resume from --save if it holds an intact checkpoint: for --auto-resume, or if --load is the same folder. Then
 * everything is resumed, whatever --load was to take at the start of the run. */
static int mt_options_find_checkpoint(mt_options *o, mt_error *error) {
    bool same = o->load && o->save && strcmp(o->load, o->save) == 0;
    if (!o->save || (!same && !o->auto_resume)) return 0;
    if (mt_checkpoint_exists(o->save)) {
        char *path = mt_checkpoint_resolve_whole(o->save, error);
        free(path);
        if (!path) return -1;
        if (!same) {
            o->finetune = o->no_load_optim = o->no_load_rng = false;
            mt_string_set(&o->hf_config, NULL);
        }
        mt_string_set(&o->load, o->save);
        return 0;
    }
    if (o->exit_on_missing_checkpoint)
        return mt_error_set(error,
                            "%s: holds no checkpoint to resume from; check --save, or leave out "
                            "--exit-on-missing-checkpoint",
                            o->save);
    if (same) mt_string_set(&o->load, NULL);
    if (mt_launch_rank() == 0) printf("%s holds no checkpoint: the run starts from the beginning\n", o->save);
    return 0;
}

/* A conversion keeps the seed and the sequence length of the run that saved the folder, unless they are given. The
 * loader reports what is wrong with trainer.json. */
static void mt_options_take_run(mt_options *o, const char *folder) {
    static const struct {
        const char *key;
        size_t offset;
    } rows[] = {{"seed", MT_AT(seed)}, {"seq_length", MT_AT(seq_length)}};
    char *path = mt_path_join(folder, "trainer.json");
    mt_error ignored;
    json_t *json = mt_json_read(path, &ignored);
    for (size_t i = 0; json && i < sizeof rows / sizeof *rows; i++) {
        const mt_option *row = mt_option_of(rows[i].offset);
        const json_t *value = json_object_get(json, rows[i].key);
        bool good = json_is_integer(value) && mt_option_in_range(row, json_number_value(value));
        if (good && !mt_options_gave(o, row->offset)) *mt_option_int(o, row) = json_integer_value(value);
    }
    json_decref(json);
    free(path);
}

bool mt_options_falls_back(const mt_options *options) {
    return options->load && options->save && strcmp(options->load, options->save) == 0;
}

/* Models named ORG/NAME, where the local cache of Hugging Face has them. */
static int mt_options_find_models(mt_options *o, mt_error *error) {
    if (mt_hf_cache_find(&o->load, NULL, "--load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->hf_config, "config.json", "--hf-config", error) != 0) return -1;
    return mt_hf_cache_find(&o->tokenizer_model, NULL, "--tokenizer-model", error);
}

int mt_options_read_shape(mt_options *options, mt_error *error) {
    if (mt_options_find_models(options, error) != 0) return -1;
    if (!options->load && !options->hf_config) return 0;
    if (options->load && options->hf_config)
        return mt_error_set(error, "--load and --hf-config exclude each other: the folder %s has a config.json",
                            options->load);
    int64_t bytes;
    char *path = !options->load                   ? mt_strdup(options->hf_config)
                 : mt_options_falls_back(options) ? mt_checkpoint_resolve_whole(options->load, error)
                                                  : mt_checkpoint_resolve(options->load, error);
    if (!path) return -1;
    if (mt_options_converts(options)) mt_options_take_run(options, path);
    if (options->load) path = strcat(mt_realloc(path, (int64_t)strlen(path) + 16), "/config.json");
    char *json = mt_file_read(path, MT_CONFIG_BYTES, &bytes, error);
    int result = json ? mt_options_take_shape(options, json, bytes, path, options->load != NULL, error) : -1;
    free(json), free(path);
    return result;
}

static int mt_options_read_config(mt_options *options, mt_program program, const char *path, mt_error *error) {
    int64_t bytes;
    char *text = mt_file_read(path, MT_CONFIG_BYTES, &bytes, error);
    int result = text ? mt_options_read_yaml(options, program, text, bytes, path, error) : -1;
    free(text);
    if (!result && options->config)
        return mt_error_set(error, "%s: names another --config; one file is read, from the command line", path);
    return result;
}

int mt_options_parse(mt_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    mt_options_default(options);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0) continue;
        if (mt_launch_rank() == 0) mt_options_help(program, stdout);
        exit(0);
    }
    if (mt_options_read_arguments(options, program, argc, argv, error)) return -1;
    if (options->config) { // read again, the file first: later settings win
        char *path = mt_strdup(options->config);
        mt_options_free(options);
        mt_options_default(options);
        int result = mt_options_read_config(options, program, path, error);
        free(path);
        if (result || mt_options_read_arguments(options, program, argc, argv, error)) return -1;
    }
    if (program == MT_PROGRAM_TRAIN && mt_options_find_checkpoint(options, error) != 0) return -1;
    return mt_options_read_shape(options, error);
}
/* ---- rules of the table, and texts that are parsed for the struct */

/* True for an option that was given with another value than its default. */
static bool mt_option_used(const mt_options *options, size_t offset) {
    return mt_options_gave(options, offset) && !mt_option_is_default(options, mt_option_of(offset));
}

/* Each item of an option's column is another option: its value must not be the default, or must be one of the choices
 * behind its name. Options of the other program are not needed. */
static int mt_option_check_needs(const mt_options *options, mt_program program, const mt_option *row, mt_error *error) {
    char item[100];
    for (const char *column = row->needs; mt_option_next_item(&column, item);) {
        size_t length = strcspn(item, " ");
        const mt_option *other = mt_option_find(item, length);
        const char *choices = item[length] ? item + length + 1 : NULL;
        if (!(other->programs & (program == MT_PROGRAM_INFER ? MT_INFER : MT_TRAIN))) continue;
        char *value = mt_option_text(options, other);
        bool good = choices ? mt_choice_index(choices, value) >= 0 : !mt_option_is_default(options, other);
        if (!good && choices)
            mt_error_set(error, "--%s needs --%s %s, which is %s", row->name, other->name, choices, value);
        else if (!good)
            mt_error_set(error, "--%s needs --%s", row->name, other->name);
        free(value);
        if (!good) return -1;
    }
    return 0;
}

/* The columns `needs` and `excludes` of all options that are used. */
static int mt_options_check_columns(const mt_options *options, mt_program program, mt_error *error) {
    char item[100];
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !mt_option_used(options, row->offset)) continue;
        if (mt_option_check_needs(options, program, row, error)) return -1;
        for (const char *column = row->excludes; mt_option_next_item(&column, item);)
            if (mt_option_used(options, mt_option_find(item, strlen(item))->offset))
                return mt_error_set(error, "--%s and --%s exclude each other; leave one out", row->name, item);
    }
    return 0;
}

/* Layers with experts as a Python sum of repeated lists, ([0]*3+[1]*58). Writes at most `max` letters to `layers`;
 * returns their number, or -1. */
static int64_t mt_layer_freq_parse(const char *text, char *layers, int64_t max) {
    int64_t count = 0;
    for (const char *at = text; *at;) {
        int64_t first = count, times = 1;
        while (*at == '(' || *at == ' ') at++;
        if (*at++ != '[') return -1;
        while (*at != ']') {
            if ((*at != '0' && *at != '1') || count == max) return -1;
            layers[count++] = *at++;
            while (*at == ',' || *at == ' ') at++;
        }
        for (at++; *at == ' ';) at++;
        if (*at == '*') {
            char *end;
            times = strtoll(at + 1, &end, 10), at = end;
        }
        int64_t listed = count - first;
        if (times < 0 || times > max || listed == 0) return -1;
        if (times == 0) count = first;
        for (int64_t i = listed; i < listed * times; i++) {
            if (count == max) return -1;
            layers[count] = layers[count - listed], count++;
        }
        while (*at == ' ' || *at == ')') at++;
        if (*at == '+')
            at++;
        else if (*at)
            return -1;
    }
    return count;
}

char *mt_layer_freq_expand(const char *text, int64_t num_layers, bool may_be_longer, mt_error *error) {
    int64_t every = 0;
    const int64_t most = mt_max(num_layers, 4096);
    char *layers = mt_calloc(most + 1);
    bool is_number = mt_parse_int(text, &every);
    for (int64_t i = 0; is_number && every > 0 && i < num_layers; i++) layers[i] = i % every ? '0' : '1';
    int64_t listed = is_number ? num_layers : mt_layer_freq_parse(text, layers, most);
    if (is_number ? every > 0 : listed == num_layers || (listed > num_layers && may_be_longer)) {
        layers[num_layers] = 0;
        return layers;
    }
    free(layers);
    mt_error_set(error,
                 "--moe-layer-freq expects a number, or 0 or 1 for each of the %lld layers such as "
                 "([0]*1+[1]*%lld), got '%.100s'",
                 (long long)num_layers, (long long)num_layers - 1, text);
    return NULL;
}

/* moe_layers from --moe-layer-freq. A model of config.json that is given fewer layers keeps the first ones, and is a
 * dense model if none of these has experts. */
static int mt_options_list_expert_layers(mt_options *o, mt_error *error) {
    bool given = MT_GIVEN(o, moe_layer_freq);
    mt_string_set(&o->moe_layers, NULL);
    if (o->num_experts == 0 || o->num_layers == 0) return 0;
    o->moe_layers = mt_layer_freq_expand(o->moe_layer_freq, o->num_layers, !given, error);
    if (!o->moe_layers) return -1;
    bool dense = !strchr(o->moe_layers, '1');
    if (dense && given)
        return mt_error_set(error, "--moe-layer-freq %.100s gives no layer experts; leave out --num-experts",
                            o->moe_layer_freq);
    if (dense) o->num_experts = 0;
    char *text = dense ? mt_strdup("1") : mt_layer_freq_print(o->moe_layers);
    if (!given && !isdigit((unsigned char)*o->moe_layer_freq)) mt_string_set(&o->moe_layer_freq, text);
    free(text);
    if (dense) mt_string_set(&o->moe_layers, NULL);
    return 0;
}

static int mt_options_finish_trace(mt_options *o, mt_error *error) {
    if (!o->trace) return 0;
    if (o->trace_first_step == 0) o->trace_first_step = 2; // the first step allocates
    if (o->trace_last_step == 0) o->trace_last_step = o->trace_first_step + 1;
    if (o->trace_last_step < o->trace_first_step)
        return mt_error_set(error, "--trace-last-step %lld comes before --trace-first-step %lld",
                            (long long)o->trace_last_step, (long long)o->trace_first_step);
    return 0;
}

static int mt_options_check_bad_steps(const mt_options *o, mt_error *error) {
    bool stops = o->bad_step_policy == MT_BAD_STEP_STOP, reruns = o->rerun_mode != MT_RERUN_DISABLED;
    bool checks = o->check_for_nan_in_loss_and_grad || o->check_for_spiky_loss;
    if (!checks && (!stops || reruns))
        return mt_error_set(error, "--%s has no effect with --no-check-for-nan-in-loss-and-grad; leave one out",
                            stops ? "rerun-mode" : "bad-step-policy");
    if (o->bad_step_policy == MT_BAD_STEP_REWIND && !o->save)
        return mt_error_set(error, "--bad-step-policy rewind needs --save, and --save-interval, to return to");
    return 0;
}

static int mt_options_check_tokenizer(const mt_options *o, mt_error *error) {
    bool has_model = o->tokenizer_type != MT_TOKENIZER_AUTO && o->tokenizer_type != MT_TOKENIZER_BYTE_LEVEL;
    if (!has_model || o->tokenizer_model) return 0;
    return mt_error_set(error, "--tokenizer-type needs --tokenizer-model unless it is ByteLevel");
}

static int mt_options_check_data(const mt_options *o, mt_error *error) {
    if (mt_options_converts(o)) return 0;
    int sources = (o->data_path.count > 0) + (o->train_data_path.count > 0) + o->mock_data + (o->tokens_file != NULL);
    if (sources != 1)
        return mt_error_set(error, "give one source of data: --data-path, --train-data-path, --tokens-file or "
                                   "--mock-data");
    if ((o->reset_position_ids || o->reset_attention_mask || o->eod_mask_loss) && !o->tokenizer_type && !o->load)
        return mt_error_set(error, "--%s needs --tokenizer-type, which knows the end of a document",
                            o->reset_position_ids     ? "reset-position-ids"
                            : o->reset_attention_mask ? "reset-attention-mask"
                                                      : "eod-mask-loss");
    return 0;
}

/* --prompt-tokens "1,2,3": tokens of the vocabulary. */
static int mt_options_check_prompt_tokens(const mt_options *o, mt_error *error) {
    for (const char *at = o->prompt_tokens; at;) {
        char *end;
        errno = 0;
        long long token = strtoll(at, &end, 10);
        if (!isdigit((unsigned char)*at) || (*end && *end != ','))
            return mt_error_set(error, "--prompt-tokens expects numbers with commas between them, got '%.100s'", at);
        if (errno != 0 || token >= o->vocab_size)
            return mt_error_set(error, "--prompt-tokens: %lld is outside the vocabulary of %lld", token,
                                (long long)o->vocab_size);
        at = *end ? end + 1 : NULL;
    }
    return 0;
}

static int mt_options_check_infer(const mt_options *o, mt_error *error) {
    if (!o->load) return mt_error_set(error, "--load is missing: the folder of the model to run");
    if (o->score && !o->out && !o->entropy_out && !o->logits_out)
        return mt_error_set(error, "--score needs --out, --entropy-out or --logits-out");
    return 0;
}

enum { MT_PIPELINE_LETTERS = 100000 };

/* The letters of a layout with repeats written out, to free; NULL with error. Commas have no meaning. */
static char *mt_pipeline_layout_unfold(const char *layout, mt_error *error) {
    char *letters = mt_malloc(MT_PIPELINE_LETTERS + 1);
    int64_t count = 0, open = -1, last = 0; // the open bracket; the begin of the last repeatable unit
    const char *at = layout, *problem = NULL;
    for (; *at && !problem; at++) {
        if (*at == ',') continue;
        if (*at == '(' && open < 0)
            open = count;
        else if (*at == ')' && open >= 0 && at[1] == '*')
            last = open, open = -1;
        else if (*at == '*' && at > layout && (strchr("EtL|m", at[-1]) || at[-1] == ')') &&
                 isdigit((unsigned char)at[1])) {
            char *end;
            errno = 0;
            int64_t times = strtoll(at + 1, &end, 10), length = count - last;
            if (errno || times < 1 || times > MT_PIPELINE_LETTERS ||
                count + (times - 1) * length > MT_PIPELINE_LETTERS) {
                problem = "repeats too often, or not at all";
                break;
            }
            for (; times > 1; times--, count += length) memcpy(letters + count, letters + last, (size_t)length);
            at = end - 1;
        } else if (strchr("EtmL|", *at) && count < MT_PIPELINE_LETTERS) {
            last = count;
            letters[count++] = *at;
        } else
            problem = "not understood";
        if (problem) break;
    }
    if (!problem && open >= 0) problem = "a bracket is not closed";
    letters[count] = 0;
    if (!problem) return letters;
    free(letters);
    mt_error_set(error,
                 "--pipeline-model-parallel-layout '%.200s': %s at '%.20s'; letters are E, t, m, L and |, and (tt|)*3 "
                 "repeats",
                 layout, problem, at);
    return NULL;
}

static int mt_options_unfold_layout(mt_options *o, mt_error *error) {
    free(o->pipeline_letters);
    o->pipeline_letters = NULL;
    if (!o->pipeline_model_parallel_layout) return 0;
    o->pipeline_letters = mt_pipeline_layout_unfold(o->pipeline_model_parallel_layout, error);
    return o->pipeline_letters ? 0 : -1;
}

/* --use-rope-scaling and --rotary-seq-len-interpolation-factor are other names of two types of scaling. */
static int mt_options_resolve_rope(mt_options *o, mt_error *error) {
    mt_rope_scaling asked = o->use_rope_scaling                          ? MT_ROPE_SCALING_LLAMA3
                            : o->rotary_seq_len_interpolation_factor > 0 ? MT_ROPE_SCALING_LINEAR
                                                                         : MT_ROPE_SCALING_NONE;
    if (asked && MT_GIVEN(o, rope_scaling_type) && asked != o->rope_scaling_type) {
        char *type = mt_option_text(o, mt_option_of(MT_AT(rope_scaling_type)));
        mt_error_set(error, "--rope-scaling-type %s and --%s exclude each other; leave one out", type,
                     o->use_rope_scaling ? "use-rope-scaling" : "rotary-seq-len-interpolation-factor");
        free(type);
        return -1;
    }
    if (asked) o->rope_scaling_type = asked;
    return 0;
}

int mt_options_finish(mt_options *options, mt_program program, int64_t world_size, mt_error *error) {
    if (mt_options_check_ranges(options, program, error) || mt_options_resolve_rope(options, error)) return -1;
    if (mt_options_check_columns(options, program, error) || mt_options_unfold_layout(options, error)) return -1;
    if (options->print_schedule) return mt_options_derive(options, program, world_size, error);
    if (mt_options_check_tokenizer(options, error) || mt_options_list_expert_layers(options, error)) return -1;
    if (program == MT_PROGRAM_INFER && mt_options_check_infer(options, error)) return -1;
    if (program == MT_PROGRAM_TRAIN && mt_options_check_data(options, error)) return -1;
    if (mt_options_derive(options, program, world_size, error)) return -1;
    mt_options_derive_family(options);
    if (program == MT_PROGRAM_INFER) return mt_options_check_prompt_tokens(options, error);
    return mt_options_finish_trace(options, error) || mt_options_check_bad_steps(options, error) ? -1 : 0;
}

/* ---- printing */

/* Prints words from `column` on, wraps them at column 100 and indents further lines by `indent`. */
static void mt_print_wrapped(FILE *file, const char *text, int column, int indent) {
    enum { WIDTH = 100 };
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > indent && column + 1 + length > WIDTH) {
            fprintf(file, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', file);
            column++;
        }
        fprintf(file, "%.*s", length, text);
        column += length, text += length;
        text += *text == ' ';
    }
    fputc('\n', file);
}

/* Prints an option: name and value on the left, then help, choices and default. */
static void mt_option_help(const mt_option *row, FILE *file) {
    enum { INDENT = 34 };
    char left[120], text[600];
    const char *value = row->type == MT_INT || row->type == MT_REAL ? " N"
                        : row->type == MT_CHOICE                    ? " NAME"
                        : mt_option_is_list(row)                    ? " ..."
                                                                    : "";
    if (row->type == MT_OPTIONAL)
        snprintf(left, sizeof left, "  --%s [%s]", row->name, row->values);
    else if (row->type == MT_STRING || mt_option_is_list(row))
        snprintf(left, sizeof left, "  --%s %s%s", row->name, row->values, value);
    else
        snprintf(left, sizeof left, "  --%s%s", row->name, value);
    int end = snprintf(text, sizeof text, "%s", row->help), room = (int)sizeof text;
    if (row->type == MT_CHOICE) { // "(a, b, c; default: a)"
        end += snprintf(text + end, (size_t)(room - end), " (");
        for (const char *at = row->values; *at; at++)
            end += snprintf(text + end, (size_t)(room - end), *at == '|' ? ", " : "%c", *at);
        end += snprintf(text + end, (size_t)(room - end), row->fallback ? "; default: %s)" : ")", row->fallback);
    } else if (row->fallback)
        snprintf(text + end, (size_t)(room - end), " (default: %s)", row->fallback);
    if (strlen(left) > INDENT - 2)
        fprintf(file, "%s\n%*s", left, INDENT, "");
    else
        fprintf(file, "%-*s", INDENT, left);
    mt_print_wrapped(file, text, INDENT, INDENT);
}

static void mt_options_help(mt_program program, FILE *file) {
    fprintf(file, program == MT_PROGRAM_TRAIN ? "usage: train [options]; trains a GPT-family model\n"
                                              : "usage: infer --load DIR [options]; runs a GPT-family model\n");
    const char *group = NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program)) continue;
        if (group) fprintf(file, "\n%s\n", group);
        group = NULL;
        mt_option_help(row, file);
    }
}

void mt_options_print(const mt_options *options, mt_program program, FILE *file) {
    const char *group = NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program) || mt_option_of(row->offset) != row) continue;
        if (mt_option_is_default(options, row)) continue;
        if (group) fprintf(file, "%s\n", group);
        group = NULL;
        char *text = mt_option_text(options, row);
        fprintf(file, "  %-36s %s\n", row->name, text);
        free(text);
    }
}

/* ---- agreement of the ranks */

/* Writes the values of all options as strings, one after another; returns their bytes. NULL only counts them. */
static int64_t mt_options_values(const mt_options *options, char *values) {
    int64_t bytes = 0;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_of(row->offset) != row) continue;
        char *text = mt_option_text(options, row);
        int64_t length = (int64_t)strlen(text) + 1;
        if (values) memcpy(values + bytes, text, (size_t)length);
        bytes += length;
        free(text);
    }
    return bytes;
}

/* Compares with the values of rank 0; true with error if one differs. */
static bool mt_options_differ(const mt_options *options, const char *values, int64_t bytes, int rank, mt_error *error) {
    const char *end = values + bytes;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_of(row->offset) != row) continue;
        const char *theirs = values < end ? values : "";
        char *ours = mt_option_text(options, row);
        bool differs = strcmp(ours, theirs) != 0;
        if (differs)
            mt_error_set(error, "rank %d has --%s '%.200s' and rank 0 '%.200s'; give every rank the same options", rank,
                         row->name, ours, theirs);
        free(ours);
        if (differs) return true;
        values += strlen(theirs) + 1;
    }
    return false;
}

int mt_options_agree(const mt_options *options, const mt_group *world, mt_error *error) {
    if (world->size == 1) return 0;
    int64_t bytes = mt_options_values(options, NULL);
    mt_broadcast(world, &bytes, sizeof bytes, 0);
    char *values = mt_calloc(bytes + 1);
    if (world->rank == 0) mt_options_values(options, values);
    mt_broadcast(world, values, bytes, 0);
    bool differs = mt_options_differ(options, values, bytes, world->rank, error);
    free(values);
    return mt_agree(world, differs, error);
}
