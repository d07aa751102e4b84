/* options.c: the options of a run as text: command line, YAML, --help, and the rules of the option table. */
#include "options.h"

#include "megatron_names.h"
#include "option_table.h"

#include "adapter.h"
#include "checkpoint.h"
#include "file.h"
#include "hf_cache.h"
#include "model_role.h"
#include "role_config.h"
#include "special_tokens.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

enum { MT_CONFIG_BYTES = 1 << 22 }; // limit of config.json and of a YAML file

/* ---- names of options that resemble a typed one */

/* True if two names have the same words, in another order. */
static bool mt_has_same_words(const char *name, size_t length, const char *other) {
    size_t other_length = strlen(other), words = 0;
    if (length != other_length) return false;
    for (const char *at = other; *at; at += strcspn(at, "-"), at += *at == '-') {
        size_t word = strcspn(at, "-"), from = 0;
        for (; from < length; from += strcspn(name + from, "-_") + 1)
            if (strcspn(name + from, "-_=") == word && strncmp(name + from, at, word) == 0) break;
        if (from >= length) return false;
        words++;
    }
    return words > 1;
}

/* The program's option with the nearest name; NULL when none is near. */
static const mt_option *mt_option_nearest(const char *name, size_t length, int program) {
    const mt_option *nearest = NULL;
    int least = length < 6 ? 2 : 2 + (int)length / 4;
    if (length > 64) return NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !(row->programs & program)) continue;
        int distance = mt_has_same_words(name, length, row->name) ? 0 : mt_edit_distance(name, length, row->name);
        if (distance < least) least = distance, nearest = row;
    }
    return nearest;
}

/* ---- names: an option, another name of one, or a reason why it is refused */

/* A name that was refused. */
typedef struct mt_refusal {
    char position[300]; // in a file ("run.yaml:3: "), or "" for the command line
    char name[112];
    char reason[300];    // reads after the name; "": unknown
    char nearest[112];   // the option with the nearest name, or ""
    bool unless_sharded; // accepted without effect when the data-parallel ranks shard, as --use-megatron-fsdp sets
} mt_refusal;

enum { MT_MAX_REFUSALS = 100 }; // that are searched for a similar name and printed; others are counted

/* A pass over a file and the command line. */
typedef struct mt_option_reader {
    mt_options *options;
    mt_program program;
    mt_refusal *refused;
    int64_t num_refused, num_uncollected;
    bool role_rests;                                                   // the role of the file does not train
    mt_strings always;                                                 // names that state a property that always holds
    mt_strings named;                                                  // see mt_option_reader_compare_names
    uint64_t typed[sizeof((mt_options *)0)->given / sizeof(uint64_t)]; // options of the command line
} mt_option_reader;

/* The option, or the answer, that a name stands for. */
typedef struct mt_setting {
    const mt_option *row;      // NULL: no option takes the value
    mt_megatron_name megatron; // the answer to a name that is no row
} mt_setting;

static mt_setting mt_setting_find(const char *name, size_t length) {
    mt_setting setting = {.row = mt_option_find(name, length)};
    if (!setting.row) setting.megatron = mt_megatron_name_find(name, length);
    if (setting.megatron.kind == MT_NAME_ALIAS)
        setting.row = mt_option_find(setting.megatron.text, strlen(setting.megatron.text));
    return setting;
}

static bool mt_setting_is_accepted(const mt_setting *setting, mt_program program) {
    return setting->row ? setting->row->programs & (int)program : setting->megatron.kind == MT_NAME_ALWAYS;
}

/* True if the command line gives it without a value. */
static bool mt_setting_is_flag(const mt_setting *setting) {
    const char *value = setting->megatron.value;
    if (setting->megatron.kind == MT_NAME_ALWAYS)
        return mt_choice_index("true|false", value) >= 0 || !strcmp(value, "true|false");
    return value || setting->row->type == MT_FLAG || setting->row->type == MT_NO;
}

/* The kind of value that it expects, for messages. */
static const char *mt_setting_metavar(const mt_setting *setting) {
    const mt_option *row = setting->row;
    if (mt_setting_is_flag(setting)) return "true or false";
    if (!row) return setting->megatron.value;
    return row->type == MT_INT ? "a whole number" : row->type == MT_REAL ? "a number" : row->values;
}

/* A further refusal to fill in; NULL if there are enough. */
static mt_refusal *mt_option_reader_add_refusal(mt_option_reader *reader) {
    if (reader->num_refused == MT_MAX_REFUSALS) {
        reader->num_uncollected++;
        return NULL;
    }
    reader->refused = mt_realloc(reader->refused, (reader->num_refused + 1) * (int64_t)sizeof *reader->refused);
    mt_refusal *refusal = &reader->refused[reader->num_refused++];
    *refusal = (mt_refusal){0};
    return refusal;
}

#define NO_MEANING "has no meaning here"

/* Records a name that was refused; `value` is its value, or NULL. A feature that is not supported may be off. */
static void mt_option_reader_refuse(mt_option_reader *reader, const mt_setting *setting, const char *position,
                                    const char *name, size_t length, const char *value) {
    const char *dashes = *position ? "" : "--", *text = setting->megatron.text;
    bool is_on, infers = reader->program == MT_PROGRAM_INFER;
    mt_name_kind kind = setting->megatron.kind;
    if (kind == MT_NAME_UNSUPPORTED && value && mt_parse_bool(value, &is_on) && !is_on) return;
    mt_refusal *refusal = mt_option_reader_add_refusal(reader);
    if (!refusal) return;
    refusal->unless_sharded =
        kind == MT_NAME_UNSUPPORTED && value && setting->megatron.value && strcmp(value, setting->megatron.value) == 0;
    snprintf(refusal->position, sizeof refusal->position, "%s", position);
    snprintf(refusal->name, sizeof refusal->name, "%s%.*s", dashes, length < 100 ? (int)length : 100, name);
    size_t room = sizeof refusal->reason;
    if (setting->row)
        snprintf(refusal->reason, room, "is an option of %s, not of %s", infers ? "train" : "infer",
                 infers ? "infer" : "train");
    else if (kind == MT_NAME_NAMED)
        snprintf(refusal->reason, room, "is named %s here", text);
    else if (kind == MT_NAME_NO_MEANING)
        snprintf(refusal->reason, room, NO_MEANING " (%s)", text);
    else if (kind == MT_NAME_UNSUPPORTED)
        snprintf(refusal->reason, room, "is not supported (%s)", text);
    const mt_option *nearest = *refusal->reason ? NULL : mt_option_nearest(name, length, (int)reader->program);
    char key[80];
    if (!nearest) return;
    mt_option_key(key, nearest);
    snprintf(refusal->nearest, sizeof refusal->nearest, "%s%s", dashes, *position ? key : nearest->name);
}

/* Once all options are read: accepts the names that have no effect when the data-parallel ranks shard. */
static void mt_option_reader_accept_sharded(mt_option_reader *reader) {
    int64_t kept = 0;
    char where[sizeof reader->refused->position + sizeof reader->refused->name];
    if (reader->options->data_parallel_sharding_strategy == MT_NO_SHARD) return;
    for (int64_t i = 0; i < reader->num_refused; i++) {
        const mt_refusal *refusal = &reader->refused[i];
        snprintf(where, sizeof where, "%s%s", refusal->position, refusal->name);
        if (refusal->unless_sharded)
            mt_strings_add(&reader->always, where);
        else
            reader->refused[kept++] = *refusal;
    }
    reader->num_refused = kept;
}

/* Appends the names that were refused for the reason of `first`. */
static void mt_refusals_print(FILE *file, const mt_refusal *first, const mt_refusal *end) {
    bool is_idle = strncmp(first->reason, NO_MEANING, strlen(NO_MEANING)) == 0;
    fprintf(file, "\n  %s%s: ", *first->reason ? first->reason : "is unknown", is_idle ? "; leave out" : "");
    for (const mt_refusal *r = first; r < end; r++) {
        if (strcmp(r->reason, first->reason) != 0) continue;
        fprintf(file, r > first ? ", %s%s" : "%s%s", r->position, r->name);
        if (*r->nearest) fprintf(file, " (did you mean %s?)", r->nearest);
    }
}

/* One error for all names that were refused: a line for each reason. */
static int mt_option_reader_report(const mt_option_reader *reader, mt_error *error) {
    if (reader->num_refused == 0) return 0;
    const mt_refusal *first = reader->refused, *end = first + reader->num_refused;
    if (end == first + 1 && *first->reason)
        return mt_error_set(error, "%s%s %s%s", first->position, first->name, first->reason,
                            strncmp(first->reason, NO_MEANING, strlen(NO_MEANING)) == 0 ? "; leave it out" : "");
    if (end == first + 1 && *first->nearest)
        return mt_error_set(error, "%sunknown option %s; did you mean %s?", first->position, first->name,
                            first->nearest);
    if (end == first + 1)
        return mt_error_set(error, "%sunknown option %s; --help lists them all", first->position, first->name);
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    MT_CHECK(file);
    fprintf(file, "%lld options cannot be used", (long long)(reader->num_refused + reader->num_uncollected));
    if (reader->num_uncollected > 0) fprintf(file, ", here the first %lld", (long long)reader->num_refused);
    fprintf(file, ":");
    for (const mt_refusal *r = first; r < end; r++) {
        const mt_refusal *same = first;
        while (strcmp(same->reason, r->reason) != 0) same++;
        if (same == r) mt_refusals_print(file, r, end);
    }
    MT_CHECK(fclose(file) == 0);
    mt_text_clean(text, true);
    if (snprintf(error->text, sizeof error->text, "%s", text) >= (int)sizeof error->text)
        strcpy(error->text + sizeof error->text - sizeof " ...", " ...");
    free(text);
    return -1;
}

/* Prints the names that have no effect, because they state a property that always holds. */
static void mt_option_reader_print_always(const mt_option_reader *reader) {
    if (reader->always.count == 0 || mt_launch_rank() != 0) return;
    for (int64_t i = 0; i < reader->always.count; i++) printf(i ? ", %s" : "%s", reader->always.items[i]);
    printf(": always so here, no effect\n");
}

static void mt_option_reader_free(mt_option_reader *reader) {
    free(reader->refused);
    mt_strings_free(&reader->always);
    mt_strings_free(&reader->named);
}

/* Adds the words of a blend in one text, "0.7 a 0.3 b", or else one prefix, which may have blanks. */
static int mt_option_add_paths(mt_options *options, const mt_option *row, const char *text, const char *where,
                               mt_error *error) {
    static const char blanks[] = " \t\r\n"; // a text of YAML may have several lines
    char *end, *words, *rest = NULL;
    if (!*text) return mt_error_set(error, "%s expects %s, got nothing", where, row->values);
    (void)strtod(text, &end);
    words = mt_strdup(text);
    bool is_blend = end > text && *end && strchr(blanks, *end);
    int status = is_blend ? 0 : mt_option_set(options, row, text, where, error);
    for (char *word = is_blend ? strtok_r(words, blanks, &rest) : NULL; word && !status;
         word = strtok_r(NULL, blanks, &rest))
        status = mt_option_set(options, row, word, where, error);
    free(words);
    return status;
}

/* Notes the name that the user gave, "--NAME" or "FILE:LINE: NAME", if it is not the option's own. Messages print it
 * instead of the option's name; if the values of the two differ (is_form), they print both. */
static void mt_options_note_name(mt_options *options, const mt_option *row, const char *where, bool is_form) {
    const mt_option *option = mt_option_of(row->offset);
    const char *blank = strrchr(where, ' '), *name = blank ? blank + 1 : where + strlen("--");
    mt_strings *typed = &options->typed_names;
    int64_t i = 0;
    while (i < typed->count && strcmp(typed->items[i], option->name) != 0) i += 2;
    bool is_alias = !mt_option_named(option, name, strlen(name));
    if (i == typed->count && !is_alias) return;
    if (i == typed->count) mt_strings_add(typed, option->name), mt_strings_add(typed, where);
    char text[520];
    if (!is_alias)
        snprintf(text, sizeof text, "--%s", option->name);
    else if (is_form || row->type != option->type)
        snprintf(text, sizeof text, "--%s (by %s)", option->name, where);
    else
        snprintf(text, sizeof text, "%s", where);
    mt_string_set(&typed->items[i + 1], text);
}

/* True if `text` begins with the option of a pair, to be replaced by the text of the pair. */
static bool mt_option_is_renamed(const char *text, char *const pair[2]) {
    size_t length = strlen(pair[0]), typed = strlen(pair[1]);
    if (strncmp(text, "--", 2) != 0 || strncmp(text + 2, pair[0], length) != 0) return false;
    const char *end = text + 2 + length;
    bool is_longer = isalnum((unsigned char)*end) || (*end == '-' && isalnum((unsigned char)end[1]));
    bool is_replaced = typed > length + 2 && strncmp(text, pair[1], typed) == 0;
    return !is_longer && !is_replaced;
}

void mt_options_print_typed(const mt_options *options, const char *text, FILE *file) {
    const mt_strings *typed = &options->typed_names;
    while (*text) {
        int64_t i = 0;
        while (i < typed->count && !mt_option_is_renamed(text, &typed->items[i])) i += 2;
        if (i < typed->count)
            fputs(typed->items[i + 1], file);
        else
            fputc(*text, file);
        text += i < typed->count ? strlen(typed->items[i]) + 2 : 1;
    }
}

void mt_options_name_typed(const mt_options *options, mt_error *error) {
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    MT_CHECK(file);
    mt_options_print_typed(options, error->text, file);
    MT_CHECK(fclose(file) == 0);
    snprintf(error->text, sizeof error->text, "%s", text);
    free(text);
}

/* The value that `text` has here: "theirs=ours|...". */
static const char *mt_setting_translate(const char *values, const char *text, char *translated, size_t room) {
    size_t length = strlen(text);
    for (const char *at = values; *at; at += strcspn(at, "|"), at += *at == '|') {
        if (strcspn(at, "=") != length || strncmp(at, text, length) != 0) continue;
        const char *ours = at + length + 1;
        snprintf(translated, room, "%.*s", (int)strcspn(ours, "|"), ours);
        return translated;
    }
    return text;
}

/* Gives a setting that is accepted its value, or the next one of a list. `where` names it in messages. */
static int mt_setting_set(mt_option_reader *reader, const mt_setting *setting, const char *text, const char *where,
                          mt_error *error) {
    const mt_option *row = setting->row;
    const char *value = setting->megatron.value;
    bool is_true = false;
    char translated[80];
    if (row && setting->megatron.values) {
        text = mt_setting_translate(setting->megatron.values, text, translated, sizeof translated);
        if (!*text) return 0; // the default
    }
    if (mt_setting_is_flag(setting)) {
        if (!mt_parse_bool(text, &is_true))
            return mt_error_set(error, "%s expects true or false, got '%.100s'", where, text);
        text = is_true ? "true" : "false";
    }
    if (!row) {
        if (*text && mt_choice_index(value, text) < 0)
            return mt_error_set(error, "%s can only be %s here: %s", where, value, setting->megatron.text);
        mt_strings_add(&reader->always, where);
        return 0;
    }
    bool negates = value && *value == '!', weak = value && *value == '?';
    if (value && !negates && (!is_true || (weak && mt_options_gave(reader->options, row->offset)))) return 0;
    mt_options_note_name(reader->options, row, where, value != NULL);
    if (row->type == MT_LIST && strcmp(row->values, MT_PREFIXES) == 0)
        return mt_option_add_paths(reader->options, row, text, where, error);
    if (!value) return mt_option_set(reader->options, row, text, where, error);
    if (negates) return mt_option_set(reader->options, row, is_true ? "false" : "true", where, error);
    return mt_option_set(reader->options, row, value + weak, where, error);
}

/* The name of an option for messages, as the command line spells it. */
static void mt_option_print_name(char where[112], const char *name, size_t length) {
    snprintf(where, 112, "--%.*s", length < 100 ? (int)length : 100, name);
    for (char *c = where; *c; c++)
        if (*c == '_') *c = '-';
}

/* Gives a list the words of a text; if it has none, the text itself. */
static int mt_setting_set_words(mt_option_reader *reader, const mt_setting *setting, const char *text,
                                const char *where, mt_error *error) {
    int status = 0;
    char *words = mt_strdup(text), *rest = NULL, *word = strtok_r(words, " ", &rest);
    mt_option_clear(reader->options, setting->row);
    if (!word) status = mt_setting_set(reader, setting, text, where, error);
    for (; word && !status; word = strtok_r(NULL, " ", &rest))
        status = mt_setting_set(reader, setting, word, where, error);
    free(words);
    return status;
}

int mt_options_set(mt_options *options, const char *name, const char *value, mt_error *error) {
    char where[112];
    mt_option_reader reader = {.options = options, .program = MT_PROGRAM_LIBRARY};
    if (strncmp(name, "--", 2) == 0) name += 2;
    mt_setting setting = mt_setting_find(name, strlen(name));
    int status = 0;
    mt_option_print_name(where, name, strlen(name));
    if (setting.row && setting.row->offset == MT_AT(config))
        return mt_error_set(error, "%s is for a command line; read the file by mt_options_read_yaml", where);
    if (!mt_setting_is_accepted(&setting, reader.program)) {
        mt_option_reader_refuse(&reader, &setting, "", name, strlen(name), value);
        bool waits = reader.num_refused > 0 && reader.refused->unless_sharded;
        if (waits) mt_strings_add(&options->sharded_names, where);
        status = waits ? 0 : mt_option_reader_report(&reader, error);
    } else if (setting.row && mt_option_is_list(setting.row)) {
        status = mt_setting_set_words(&reader, &setting, value, where, error);
    } else {
        status = mt_setting_set(&reader, &setting, value, where, error);
    }
    mt_option_reader_free(&reader);
    return status;
}

/* ---- the command line and YAML: both find a setting, a text, and a position for messages, and call mt_setting_set */

static bool mt_is_name(const char *argument) {
    return strncmp(argument, "--", 2) == 0;
}

/* Two names of an option with two values are a contradiction; one name that is given again replaces its value. */
static int mt_option_reader_compare_names(mt_option_reader *reader, const mt_option *row, const char *where,
                                          mt_error *error) {
    mt_strings *named = &reader->named; // option, name and value in turn
    char *value = mt_option_text(reader->options, row);
    const char *option = mt_option_of(row->offset)->name;
    int64_t i = 0;
    int status = 0;
    while (i < named->count && strcmp(named->items[i], option) != 0) i += 3;
    if (i == named->count) {
        mt_strings_add(named, option), mt_strings_add(named, where), mt_strings_add(named, value);
    } else if (strcmp(named->items[i + 1], where) != 0 && strcmp(named->items[i + 2], value) != 0) {
        status =
            mt_error_set(error, "%s %.100s and %s %.100s are two names of one option, with two values; leave one out",
                         named->items[i + 1] + 2, named->items[i + 2], where + 2, value);
    } else {
        mt_string_set(&named->items[i + 2], value);
    }
    free(value);
    return status;
}

/* Takes the option at arguments[index]; returns the index after its values, or -1. */
static int mt_options_read_argument(mt_option_reader *reader, int index, int count, char **arguments, mt_error *error) {
    const char *argument = arguments[index++];
    if (!mt_is_name(argument) || !argument[2])
        return mt_error_set(error, "unexpected argument '%.100s'; options begin with -- (--help lists them)", argument);
    const char *name = argument + 2, *equals = strchr(argument, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    mt_setting setting = mt_setting_find(name, length);
    const mt_option *row = setting.row;
    if (!mt_setting_is_accepted(&setting, reader->program)) {
        const char *value = equals ? equals + 1 : NULL;
        if (!value && setting.megatron.value && index < count && !mt_is_name(arguments[index]))
            value = arguments[index];
        mt_option_reader_refuse(reader, &setting, "", name, length, value);
        while (index < count && !mt_is_name(arguments[index])) index++;
        return index;
    }
    char where[112];
    mt_option_print_name(where, name, length);
    if (row) reader->typed[row->offset / 64] |= (uint64_t)1 << row->offset % 64;
    bool is_list = row && mt_option_is_list(row), is_weak = setting.megatron.value != NULL;
    if (row && !is_weak) mt_option_clear(reader->options, row); // the last one wins
    if (equals) return mt_setting_set(reader, &setting, equals + 1, where, error) ? -1 : index;
    if (mt_setting_is_flag(&setting)) {
        bool is_on, has_value = index < count && mt_parse_bool(arguments[index], &is_on); // as transformers writes them
        const char *value = has_value ? arguments[index++] : "true";
        return mt_setting_set(reader, &setting, value, where, error) ? -1 : index;
    }
    int first = index;
    while (index < count && !mt_is_name(arguments[index]) && (is_list || index == first))
        if (mt_setting_set(reader, &setting, arguments[index++], where, error)) return -1;
    if (index == first && row && row->type == MT_OPTIONAL)
        return mt_setting_set(reader, &setting, "true", where, error) ? -1 : index;
    if (index == first) return mt_error_set(error, "%s expects %s, got nothing", where, mt_setting_metavar(&setting));
    return index;
}

static int mt_options_read_arguments(mt_option_reader *reader, int argc, char **argv, mt_error *error) {
    for (int index = 1; index < argc;) {
        const char *argument = argv[index];
        index = mt_options_read_argument(reader, index, argc, argv, error);
        if (index < 0) return -1;
        size_t length = strcspn(argument, "=");
        mt_setting setting = mt_setting_find(argument + 2, length - 2);
        bool compares = setting.row && mt_setting_is_accepted(&setting, reader->program) && !setting.megatron.value &&
                        !mt_setting_is_flag(&setting);
        char where[112];
        mt_option_print_name(where, argument + 2, length - 2);
        if (compares && mt_option_reader_compare_names(reader, setting.row, where, error) != 0) return -1;
    }
    return 0;
}

/* Finds the value of --config or another name of it; NULL if there is none. Two are an error, because one of the files
 * would not be read. */
static int mt_options_find_config(const char **config, int argc, char **argv, mt_error *error) {
    const char *first = NULL;
    *config = NULL;
    for (int i = 1; i < argc; i++) {
        size_t length = strcspn(argv[i], "=");
        if (!mt_is_name(argv[i])) continue;
        mt_setting setting = mt_setting_find(argv[i] + 2, length - 2);
        if (!setting.row || setting.row->offset != MT_AT(config)) continue;
        const char *path = argv[i][length] ? argv[i] + length + 1 : i + 1 < argc ? argv[i + 1] : NULL;
        if (path && !argv[i][length] && mt_is_name(path)) path = NULL;
        if (first && (!path || !*config || strcmp(path, *config) != 0))
            return mt_error_set(error, "%.*s and %.*s name two files; one is read, so leave one out",
                                (int)strcspn(first, "="), first, (int)length, argv[i]);
        first = argv[i];
        if (path) *config = path;
    }
    return 0;
}

/* The value of the last --role; NULL if there is none. */
static const char *mt_options_find_role(int argc, char **argv) {
    const char *role = NULL;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--role=", 7) == 0) role = argv[i] + 7;
        if (strcmp(argv[i], "--role") == 0 && i + 1 < argc && !mt_is_name(argv[i + 1])) role = argv[i + 1];
    }
    return role;
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
    bool is_sequence = yaml->event.type == YAML_SEQUENCE_START_EVENT;
    if (is_sequence && setting->row && setting->row->offset == MT_AT(moe_layer_freq))
        return mt_yaml_read_layers(yaml, setting, where);
    if (is_sequence && (!setting->row || !mt_option_is_list(setting->row)))
        return mt_error_set(yaml->error, "%s expects %s, not a list", where, mt_setting_metavar(setting));
    if (setting->row && !setting->megatron.value) mt_option_clear(yaml->reader->options, setting->row);
    if (is_sequence && mt_yaml_next(yaml)) return -1;
    while (yaml->event.type != YAML_SEQUENCE_END_EVENT) {
        if (yaml->event.type != YAML_SCALAR_EVENT)
            return mt_error_set(yaml->error, "%s expects plain values in its list", where);
        if (mt_yaml_scalar(yaml, &text) || mt_setting_set(yaml->reader, setting, text, where, yaml->error)) return -1;
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

static int mt_option_reader_read_yaml(mt_option_reader *reader, const char *text, int64_t bytes, const char *path,
                                      mt_error *error) {
    mt_yaml yaml = {.reader = reader, .path = path, .text = text, .bytes = bytes, .error = error};
    if (mt_yaml_check_nesting(text, bytes, path, error) != 0) return -1;
    if (!yaml_parser_initialize(&yaml.parser)) return mt_error_set(error, "%s: no memory to read YAML", path);
    yaml_parser_set_input_string(&yaml.parser, (const unsigned char *)text, (size_t)bytes);
    int result = mt_yaml_read(&yaml);
    if (yaml.has_event) yaml_event_delete(&yaml.event);
    yaml_parser_delete(&yaml.parser);
    return result;
}
#else
static int mt_option_reader_read_yaml(mt_option_reader *reader, const char *text, int64_t bytes, const char *path,
                                      mt_error *error) {
    (void)reader, (void)text, (void)bytes;
    return mt_error_set(error, "--config %s: built without libyaml; `make deps` installs it", path);
}
#endif

/* ---- a file with roles (role_config.c) */

/* Notes a key for --print-config: the option that it sets, or "", and why it has no effect, or "". */
static void mt_options_note_key(mt_options *options, const mt_role_entry *entry, const char *option, const char *text) {
    char line[24];
    mt_strings *keys = &options->config_keys;
    snprintf(line, sizeof line, "%lld", entry->line);
    for (int64_t i = 0; i < keys->count && *option; i += 4)
        if (strcmp(keys->items[i + 2], option) == 0 && !*keys->items[i + 3]) {
            char replaced[200];
            snprintf(replaced, sizeof replaced, "line %s, %.100s, has this option too", line, entry->name);
            mt_string_set(&keys->items[i + 3], replaced);
        }
    mt_strings_add(keys, line);
    mt_strings_add(keys, entry->key);
    mt_strings_add(keys, option);
    mt_strings_add(keys, text);
}

/* Records a key that was refused. `nearest` is the key or the option with the nearest name, or "". */
static void mt_option_reader_refuse_key(mt_option_reader *reader, const char *position, const char *name,
                                        const char *reason, const char *nearest) {
    mt_refusal *refusal = mt_option_reader_add_refusal(reader);
    if (!refusal) return;
    snprintf(refusal->position, sizeof refusal->position, "%s", position);
    snprintf(refusal->name, sizeof refusal->name, "%.100s", name);
    snprintf(refusal->reason, sizeof refusal->reason, "%s", reason);
    snprintf(refusal->nearest, sizeof refusal->nearest, "%s", nearest);
}

/* A key for an option that the table does not have. */
static void mt_option_reader_take_absent(mt_option_reader *reader, const mt_role_entry *entry, const char *position) {
    char reason[300];
    const char *value = entry->values.count > 0 ? entry->values.items[0] : "";
    bool is_on = true, is_stage = strcmp(entry->option, "stage") == 0;
    if (entry->is_implied && (!is_stage || reader->program == MT_PROGRAM_INFER)) return;
    bool is_off =
        (mt_parse_bool(value, &is_on) && !is_on) || (entry->accepted && mt_choice_index(entry->accepted, value) >= 0);
    snprintf(reason, sizeof reason, "sets --%s%s%s, which is not built yet", entry->option, is_stage ? " " : "",
             is_stage ? value : "");
    if (is_off)
        mt_options_note_key(reader->options, entry, "", "so here in any case");
    else
        mt_option_reader_refuse_key(reader, position, entry->name, reason, "");
}

/* A key that has Megatron-LM's name of no option. */
static void mt_option_reader_take_other(mt_option_reader *reader, const mt_role_entry *entry, const char *position,
                                        const mt_setting *setting) {
    const char *value = entry->values.count > 0 ? entry->values.items[0] : NULL;
    mt_name_kind kind = setting->megatron.kind;
    if (kind == MT_NAME_NO_MEANING) {
        mt_options_note_key(reader->options, entry, "", setting->megatron.text);
        return;
    }
    if (kind != MT_NAME_UNKNOWN && entry->values.count == 0) return; // null
    int64_t before = reader->num_refused, uncollected = reader->num_uncollected;
    mt_option_reader_refuse(reader, setting, position, entry->name, strlen(entry->name), value);
    if (reader->num_uncollected > uncollected) return;
    if (reader->num_refused == before)
        mt_options_note_key(reader->options, entry, "", "off, as here in any case");
    else if (kind == MT_NAME_UNKNOWN && *entry->text)
        snprintf(reader->refused[before].nearest, sizeof reader->refused[before].nearest, "%s", entry->text);
}

/* A whole number that a file of roles writes as a float, "3.0", without its fraction in `whole`; else the text. */
static const char *mt_whole_number(const mt_option *row, const char *text, char whole[32]) {
    char *end;
    double value = strtod(text, &end);
    bool is_float = row && row->type == MT_INT && *text && strspn(text, "0123456789+-.eE") == strlen(text) && *end == 0;
    if (!is_float || value != floor(value) || fabs(value) >= 0x1p53) return text;
    snprintf(whole, 32, "%.0f", value);
    return whole;
}

/* Gives a setting the values of a key. */
static int mt_option_reader_take_values(mt_option_reader *reader, const mt_role_entry *entry, const mt_setting *setting,
                                        const char *where, mt_error *error) {
    const mt_option *row = setting->row;
    const mt_strings *values = &entry->values;
    bool is_on = true, is_flag = !row && strcmp(setting->megatron.value, "true") == 0;
    if (is_flag && values->count == 1 && mt_parse_bool(values->items[0], &is_on) && !is_on) {
        mt_options_note_key(reader->options, entry, "", setting->megatron.text);
        return 0;
    }
    bool is_layers = row && row->offset == MT_AT(moe_layer_freq) && entry->is_sequence;
    if (entry->is_sequence && !is_layers && (!row || !mt_option_is_list(row)))
        return mt_error_set(error, "%s expects %s, not a list", where, mt_setting_metavar(setting));
    if (row && !setting->megatron.value) mt_option_clear(reader->options, row);
    if (row) mt_options_note_key(reader->options, entry, mt_option_of(row->offset)->name, "");
    if (is_layers) {
        char *list = NULL;
        size_t size;
        FILE *file = open_memstream(&list, &size);
        MT_CHECK(file);
        for (int64_t i = 0; i < values->count; i++) fprintf(file, "%c%s", i > 0 ? ',' : '[', values->items[i]);
        MT_CHECK(fputc(']', file) != EOF && fclose(file) == 0);
        int status = mt_setting_set(reader, setting, list, where, error);
        free(list);
        return status;
    }
    for (int64_t i = 0; i < values->count; i++) {
        char whole[32];
        const char *text = mt_whole_number(row, values->items[i], whole);
        if (mt_setting_set(reader, setting, text, where, error) != 0) return -1;
    }
    return 0;
}

static int mt_option_reader_take_entry(mt_option_reader *reader, const mt_role_entry *entry, const char *path,
                                       mt_error *error) {
    char position[300], where[400];
    bool infers = reader->program == MT_PROGRAM_INFER;
    snprintf(position, sizeof position, "%.250s:%lld: ", path, entry->line);
    if (entry->is_implied) // messages name the option
        snprintf(where, sizeof where, "--%.80s", entry->option);
    else
        snprintf(where, sizeof where, "%s%.80s", position, entry->name);
    if (entry->kind == MT_ENTRY_UNKNOWN)
        mt_option_reader_refuse_key(reader, position, entry->name, "", entry->text);
    else if (entry->kind == MT_ENTRY_REFUSED)
        mt_option_reader_refuse_key(reader, position, entry->name, entry->text, "");
    else if (entry->kind != MT_ENTRY_OPTION)
        mt_options_note_key(reader->options, entry, "", entry->text);
    if (entry->kind != MT_ENTRY_OPTION) return 0;
    mt_setting setting = mt_setting_find(entry->option, strlen(entry->option));
    bool is_stage = setting.row && setting.row->offset == MT_AT(stage);
    if (entry->is_name) {
        bool is_unknown = !setting.row && setting.megatron.kind == MT_NAME_UNKNOWN;
        if (is_unknown) mt_option_reader_take_other(reader, entry, position, &setting);
    } else if (is_stage && !infers && mt_choice_index(setting.row->values, entry->values.items[0]) < 0) {
        mt_option_reader_take_absent(reader, entry, position);
    } else if (mt_setting_is_accepted(&setting, reader->program)) {
        if (entry->values.count == 0 && !entry->is_sequence) return 0; // null
        return mt_option_reader_take_values(reader, entry, &setting, where, error);
    } else if (setting.row && !entry->is_implied) {
        mt_options_note_key(reader->options, entry, "", infers ? "training (train)" : "generation (infer)");
    } else if (!setting.row && entry->is_megatron) {
        mt_option_reader_take_other(reader, entry, position, &setting);
    } else if (!setting.row) {
        mt_option_reader_take_absent(reader, entry, position);
    }
    return 0;
}

static int mt_option_reader_read_role(mt_option_reader *reader, const char *role, const char *text, int64_t bytes,
                                      const char *path, mt_error *error) {
    mt_role_config config;
    int status = mt_role_config_read(&config, role, text, bytes, path, error);
    for (int64_t i = 0; i < config.count && status == 0; i++)
        status = mt_option_reader_take_entry(reader, &config.entries[i], path, error);
    reader->options->config_devices = config.num_devices;
    reader->role_rests = !config.trains;
    mt_role_config_free(&config);
    return status;
}

static bool mt_option_is_typed(const mt_option_reader *reader, size_t offset) {
    return reader->typed[offset / 64] >> offset % 64 & 1;
}

/* True if a rule of `column` names an option of the command line, which breaks it. `row` has the column. */
static bool mt_option_rule_yields(const mt_option_reader *reader, const mt_option *row, bool needs,
                                  mt_option_rule *rule) {
    const mt_options *o = reader->options;
    for (const char *column = needs ? row->needs : row->excludes; mt_option_next_rule(&column, rule);) {
        if (!mt_option_is_typed(reader, rule->other->offset) || !mt_option_rule_holds(o, row, rule)) continue;
        bool has = mt_option_has(o, rule->other, rule->choices);
        if (needs ? !has : !rule->condition && !rule->choices && mt_option_used(o, rule->other)) return true;
    }
    return false;
}

/* True if an option of the file is for something else than this run: another stage, conversations, scores, a critic. */
static bool mt_option_lacks_purpose(const mt_option_reader *reader, const mt_option *row) {
    static const char purposes[] =
        "sft|chat|score|stage|reward|adv-estimator|kl-in-reward|kd-objective|dynamic-sampling|recompute-granularity|"
        "optimizer-cpu-offload";
    const mt_options *o = reader->options;
    mt_option_rule rule;
    if (mt_options_idle_in_rl(o, row->offset)) return true;
    if (reader->program == MT_PROGRAM_INFER && row->offset == MT_AT(chat_template) && !o->chat && !o->score &&
        !o->prompts)
        return true;
    if (reader->program == MT_PROGRAM_INFER && row->offset == MT_AT(num_return_sequences) && o->prompt.count == 0 &&
        !o->prompts && !o->prompt_tokens)
        return true;
    for (const char *column = row->needs; mt_option_next_rule(&column, &rule);) {
        bool listed = mt_choice_index(purposes, rule.other->name) >= 0;
        bool samples = rule.other->offset == MT_AT(sft) && o->stage != MT_STAGE_PT;
        if (listed && !samples && rule.other->programs & (int)reader->program && mt_option_rule_holds(o, row, &rule) &&
            !mt_option_has(o, rule.other, rule.choices))
            return true;
    }
    const mt_option *stage = mt_option_of(MT_AT(stage));
    for (const char *column = stage->excludes; mt_option_next_rule(&column, &rule);)
        if (rule.other->offset == row->offset && mt_option_rule_holds(o, stage, &rule)) return true;
    return false;
}

/* True for a size of --rollout-*, --teacher-*, --ref-*, --critic-* or --reward-*. */
static bool mt_option_is_of_another_role(const mt_option *row) {
    static const char *const roles[] = {"rollout-", "teacher-", "ref-", "critic-", "reward-"};
    bool is_of_role = false;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        is_of_role |= strncmp(row->name, roles[i], strlen(roles[i])) == 0;
    return is_of_role && mt_text_ends_with(row->name, "-model-parallel-size");
}

/* The option of the command line that an option of the file gives way to; NULL: none. */
static const char *mt_option_yields_to(const mt_option_reader *reader, const mt_option *row) {
    const mt_options *o = reader->options;
    mt_option_rule rule;
    bool shaped = mt_option_is_typed(reader, MT_AT(num_layers)) && mt_option_is_typed(reader, MT_AT(hidden_size));
    bool loads = row->offset == MT_AT(load) || row->offset == MT_AT(finetune);
    if (loads && mt_option_is_typed(reader, MT_AT(hf_config))) return "hf-config";
    bool partner = row->offset == MT_AT(critic_load) || row->offset == MT_AT(ref_load); // of the actor's shape
    if ((loads || partner) && shaped) return "num-layers and --hidden-size";
    if (loads && mt_option_is_typed(reader, MT_AT(load))) return "load, which resumes a run unless --finetune is given";
    if (row->offset == MT_AT(train_epochs) && o->train_iters > 0) return "train-iters";
    if (row->offset == MT_AT(sequence_parallel) && o->tensor_model_parallel_size == 1)
        return "tensor-model-parallel-size 1";
    bool other_role = mt_option_is_of_another_role(row); // the file's layouts are for its own number of ranks
    if (other_role && mt_option_is_typed(reader, MT_AT(tensor_model_parallel_size)))
        return "tensor-model-parallel-size";
    if (other_role && mt_option_is_typed(reader, MT_AT(pipeline_model_parallel_size)))
        return "pipeline-model-parallel-size";
    for (const mt_option *same = mt_option_table; same->help; same++) {
        if (!same->name || same->offset != row->offset) continue;
        if (mt_option_rule_yields(reader, same, false, &rule)) return rule.other->name;
        if (mt_option_rule_yields(reader, same, true, &rule)) return rule.other->name;
    }
    for (const mt_option *other = mt_option_table; other->help; other++) {
        if (!other->name || !mt_option_is_typed(reader, other->offset)) continue;
        for (const char *column = other->excludes; mt_option_next_rule(&column, &rule);)
            if (rule.other->offset == row->offset && !rule.condition && !rule.choices && mt_option_used(o, other))
                return other->name;
    }
    return NULL;
}

/* Marks the keys of an option as without effect. */
static void mt_options_yield_keys(mt_options *options, const mt_option *row, const char *text) {
    const char *name = mt_option_of(row->offset)->name;
    for (int64_t i = 0; i < options->config_keys.count; i += 4)
        if (strcmp(options->config_keys.items[i + 2], name) == 0 && !*options->config_keys.items[i + 3])
            mt_string_set(&options->config_keys.items[i + 3], text);
}

/* --clip-ratio of the command line wins over the file's two sides of the range, a side over its --clip-ratio. */
static void mt_option_reader_yield_ratios(mt_option_reader *reader) {
    static const size_t ratios[] = {MT_AT(clip_ratio_low), MT_AT(clip_ratio_high), MT_AT(clip_ratio)};
    bool has_side = mt_option_is_typed(reader, ratios[0]) || mt_option_is_typed(reader, ratios[1]);
    for (int i = 0; i < 3; i++) {
        const mt_option *row = mt_option_of(ratios[i]);
        bool is_idle = i == 2 && has_side && mt_options_idle_in_rl(reader->options, ratios[2]);
        if (mt_option_is_typed(reader, ratios[i]) || (!is_idle && !mt_option_is_typed(reader, ratios[2]))) continue;
        mt_options_yield_keys(reader->options, row, "gives way to the command line's ratios");
        mt_option_reset(reader->options, row);
    }
}

/* The command line wins over a file of roles: an option of the file that breaks a rule together with an option of the
 * command line gets its default. A run with fewer steps by --train-iters keeps the learning rates of the file's number
 * of steps. */
static void mt_option_reader_yield(mt_option_reader *reader, int64_t file_iters) {
    mt_options *o = reader->options;
    char text[200];
    if (mt_option_is_typed(reader, MT_AT(train_iters)) && file_iters > 0 && !MT_GIVEN(o, lr_decay_iters))
        o->lr_decay_iters = file_iters;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !mt_option_is_typed(reader, row->offset)) continue;
        mt_options_yield_keys(o, row, "the command line has their options");
    }
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_is_typed(reader, row->offset) || !mt_options_gave(o, row->offset)) continue;
        bool lacks = mt_option_lacks_purpose(reader, row);
        const char *other = lacks ? "" : mt_option_yields_to(reader, row);
        if (!other) continue;
        snprintf(text, sizeof text, lacks ? "of no use in this run" : "gives way to --%s", other);
        mt_options_yield_keys(o, row, text);
        mt_option_reset(o, row);
        reader->typed[row->offset / 64] |= (uint64_t)1 << row->offset % 64; // options that need it give way as well
        row = mt_option_table;
    }
}

int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    int status = mt_option_reader_read_yaml(&reader, text, bytes, path, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    mt_option_reader_free(&reader);
    return status;
}

int mt_options_read_role(mt_options *options, mt_program program, const char *role, const char *text, int64_t bytes,
                         const char *path, mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    int status = mt_option_reader_read_role(&reader, role, text, bytes, path, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    if (!status) mt_option_reader_yield(&reader, 0);
    mt_option_reader_free(&reader);
    return status;
}

/* The model of --load, before it gives way to the checkpoint of --save, is the reference of a run that has one. */
static void mt_options_keep_reference(mt_options *o) {
    bool diverges = o->stage == MT_STAGE_RL && (o->kl_loss_coef > 0 || o->kl_in_reward);
    bool refers = diverges || (o->stage == MT_STAGE_DPO && !o->ref_logps_in_data);
    if (refers && !o->ref_load && o->lora_rank == 0) mt_string_set(&o->ref_load, o->load);
}

/* Resume from --save if it holds an intact checkpoint: for --auto-resume, or if --load is the same folder. Then
 * everything is resumed, also the parts that the run did not load at its start. */
static int mt_options_find_checkpoint(mt_options *o, mt_error *error) {
    bool same = mt_options_falls_back(o);
    if (same && o->overwrite && !o->finetune)
        return mt_error_set(error, "--%s %s continues the run that --overwrite would replace; leave one out",
                            mt_options_adapts(o) ? "load-adapter" : "load", *mt_options_run_folder(o));
    if (!o->save || (!same && !o->auto_resume)) return 0;
    if (mt_folder_check_lock(o->save, ".lock", "--save", error) != 0) return -1; // its checkpoints come and go
    if (mt_checkpoint_exists(o->save)) {
        char *path = mt_checkpoint_resolve_whole(o->save, error);
        free(path);
        if (!path) return -1;
        if (o->auto_resume) o->finetune = false;
        if (!o->finetune) o->value_head = false; // the run has given the model its head
        if (!same) {
            o->no_load_optim = o->no_load_rng = false;
            mt_string_set(&o->hf_config, NULL);
            mt_options_keep_reference(o);
        }
        mt_string_set(mt_options_run_folder(o), o->save);
        return 0;
    }
    if (o->exit_on_missing_checkpoint)
        return mt_error_set(error,
                            "%s: holds no checkpoint to resume from; check --save, or leave out "
                            "--exit-on-missing-checkpoint",
                            o->save);
    if (same) {
        mt_string_set(mt_options_run_folder(o), NULL);
        o->auto_resume = true; // a start of the same run, whose metrics start anew
    }
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

char *mt_options_load_folder(const mt_options *options, mt_error *error) {
    return mt_options_falls_back(options) && !mt_options_adapts(options)
               ? mt_checkpoint_resolve_whole(options->load, error)
               : mt_checkpoint_resolve(options->load, error);
}

/* Takes the model of a config.json; if the options have the model of --load already, compares the two. */
static int mt_options_read_json(mt_options *options, const char *path, bool has_weights, mt_error *error) {
    int64_t bytes;
    char *json = mt_file_read(path, MT_CONFIG_BYTES, &bytes, error);
    int status = !json ? -1
                 : options->load && !has_weights
                     ? mt_options_check_shape(options, json, bytes, "--hf-config", path, NULL, error)
                     : mt_options_take_shape(options, json, bytes, path, has_weights, error);
    free(json);
    return status;
}

/* Models named ORG/NAME, where the local cache of Hugging Face has them. */
static int mt_options_find_models(mt_options *o, mt_error *error) {
    if (mt_hf_cache_find(&o->load, NULL, "--load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->hf_config, "config.json", "--hf-config", error) != 0) return -1;
    if (mt_hf_cache_find(&o->load_adapter, NULL, "--load-adapter", error) != 0) return -1;
    if (mt_hf_cache_find(&o->ref_load, NULL, "--ref-load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->teacher_load, NULL, "--teacher-load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->reward_load, NULL, "--reward-load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->critic_load, NULL, "--critic-load", error) != 0) return -1;
    return mt_hf_cache_find(&o->tokenizer_model, NULL, "--tokenizer-model", error);
}

/* Options of a file of roles that are for experts give way where the model has none. */
static void mt_options_yield_experts(mt_options *options) {
    const mt_strings *keys = &options->config_keys;
    mt_option_rule rule;
    if (!options->role || options->num_experts > 0) return;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        bool needs = false, is_from_file = false;
        if (!row->name || !mt_options_gave(options, row->offset)) continue;
        for (const char *column = row->needs; mt_option_next_rule(&column, &rule);)
            needs |= rule.other->offset == MT_AT(num_experts);
        const char *name = mt_option_of(row->offset)->name;
        for (int64_t i = 0; i < keys->count; i += 4)
            is_from_file |= strcmp(keys->items[i + 2], name) == 0 && !*keys->items[i + 3];
        if (!needs || !is_from_file) continue;
        mt_options_yield_keys(options, row, "the model has no experts");
        mt_option_reset(options, row);
    }
}

int mt_options_read_shape(mt_options *options, mt_error *error) {
    if (mt_options_find_models(options, error) != 0) return -1;
    char *folder = options->load ? mt_options_load_folder(options, error) : NULL;
    if (options->load && !folder) return -1;
    if (folder && mt_options_converts(options)) mt_options_take_run(options, folder);
    char *path = folder ? mt_path_join(folder, "config.json") : NULL;
    int status = 0;
    if (folder && !mt_folder_has(folder, "config.json"))
        status = mt_error_set(error,
                              "--load %s: holds an adapter; name its base by --load and this folder by "
                              "--load-adapter",
                              options->load);
    if (status == 0 && path) status = mt_options_read_json(options, path, true, error);
    if (status == 0 && path) status = mt_generation_config_read(options, folder, error);
    if (status == 0 && options->hf_config) status = mt_options_read_json(options, options->hf_config, false, error);
    if (status == 0) status = mt_adapter_read_options(options, error);
    if (status == 0) mt_options_yield_experts(options);
    free(path), free(folder);
    return status;
}

/* Reads the file of --config; `role` is that of --role, or NULL. */
static int mt_options_read_config(mt_option_reader *reader, const char *path, const char *role, mt_error *error) {
    int64_t bytes;
    char *text = mt_file_read(path, MT_CONFIG_BYTES, &bytes, error), roles[400];
    int result = !text ? -1 : 0;
    if (text && role)
        result = mt_option_reader_read_role(reader, role, text, bytes, path, error);
    else if (text && mt_role_config_detect(roles, text, bytes))
        result = mt_error_set(error, "%s: has the roles %s; choose one with --role", path, roles);
    else if (text)
        result = mt_option_reader_read_yaml(reader, text, bytes, path, error);
    free(text);
    if (!result && reader->options->config)
        return mt_error_set(error, "%s: names another --config; one file is read, from the command line", path);
    return result;
}

int mt_options_parse(mt_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    const char *config, *role = mt_options_find_role(argc, argv);
    mt_options_default(options);
    mt_options_help(program, argc, argv);
    int status = mt_options_find_config(&config, argc, argv, error);
    if (!status && config) status = mt_options_read_config(&reader, config, role, error); // later settings win
    int64_t file_iters = options->train_iters;
    if (!status) status = mt_options_read_arguments(&reader, argc, argv, error);
    if (!status) mt_option_reader_accept_sharded(&reader);
    if (!status) status = mt_option_reader_report(&reader, error);
    if (!status) mt_option_reader_yield_ratios(&reader);
    if (!status && role) mt_option_reader_yield(&reader, file_iters);
    if (!status) mt_option_reader_print_always(&reader);
    if (!status && role && config && !options->print_config && mt_launch_rank() == 0)
        mt_options_print_unused(options, program == MT_PROGRAM_INFER ? stderr : stdout);
    mt_option_reader_free(&reader);
    if (status) return -1;
    if (options->print_config) return 0;
    if (program == MT_PROGRAM_TRAIN && role && strcmp(role, "critic") == 0)
        return mt_error_set(error, "--role critic: a critic trains beside its actor; run --role actor_train, and see "
                                   "this role with --print-config");
    bool chooses = mt_option_is_typed(&reader, MT_AT(stage)) || mt_option_is_typed(&reader, MT_AT(sft));
    if (program == MT_PROGRAM_TRAIN && reader.role_rests && !chooses && !mt_options_converts(options))
        return mt_error_set(error,
                            "--role %.80s: %s does not train this role; `infer` runs it, --print-config shows "
                            "it, and --stage or --sft trains its model",
                            role, config);
    if (program == MT_PROGRAM_TRAIN && mt_options_find_checkpoint(options, error) != 0) return -1;
    return mt_options_read_shape(options, error);
}
/* ---- rules of the table, and texts that are parsed for the struct */

/* A rule that is broken: names both options, with the choices that it has for them. */
static int mt_option_rule_fail(const mt_options *options, const mt_option *row, const mt_option_rule *rule, bool needs,
                               mt_error *error) {
    char name[200], other[200], *value = mt_option_text(options, rule->other), *own = mt_option_text(options, row);
    bool any = !rule->condition || strcmp(rule->condition, "any") == 0;
    const char *choice = any ? "" : row->type == MT_CHOICE ? own : rule->condition;
    bool shows_value = rule->choices && rule->other->type != MT_SET;
    snprintf(name, sizeof name, "--%s%s%s", row->name, any ? "" : " ", choice);
    snprintf(other, sizeof other, "--%s%s%s", rule->other->name, rule->choices ? " " : "",
             rule->choices ? rule->choices : "");
    if (needs)
        mt_error_set(error, "%s needs %s%s%s", name, other, shows_value ? ", not " : "", shows_value ? value : "");
    else
        mt_error_set(error, "%s and %s exclude each other; leave one out", name, other);
    free(value);
    free(own);
    return -1;
}

/* The columns `needs` and `excludes` of all options. An option that was given needs none of the other program. */
static int mt_options_check_columns(const mt_options *options, mt_program program, mt_error *error) {
    const int programs = program == MT_PROGRAM_INFER ? MT_INFER : MT_TRAIN;
    mt_option_rule rule;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) continue;
        for (const char *column = row->needs; mt_option_next_rule(&column, &rule);)
            if ((rule.condition || rule.other->programs & programs) && mt_option_rule_holds(options, row, &rule) &&
                !mt_option_has(options, rule.other, rule.choices))
                return mt_option_rule_fail(options, row, &rule, true, error);
        for (const char *column = row->excludes; mt_option_next_rule(&column, &rule);) {
            if (mt_option_is_form_of(row, rule.other) || mt_option_is_form_of(rule.other, row)) continue;
            bool given = !rule.condition && !rule.choices; // a value that was derived is no contradiction
            if (mt_option_rule_holds(options, row, &rule) &&
                (given ? mt_option_used(options, rule.other) : mt_option_has(options, rule.other, rule.choices)))
                return mt_option_rule_fail(options, row, &rule, false, error);
        }
    }
    return 0;
}

/* moe_layers from --moe-layer-freq. A model of config.json that is given fewer layers keeps the first ones, and is a
 * dense model if none of these has experts. */
static int mt_options_list_expert_layers(mt_options *o, mt_error *error) {
    bool given = MT_GIVEN(o, moe_layer_freq);
    mt_string_set(&o->moe_layers, NULL);
    if (o->num_experts == 0 || o->num_layers == 0) return 0;
    o->moe_layers = mt_layer_freq_expand(o->moe_layer_freq, MT_EXPERT_LAYERS, o->num_layers, !given, error);
    if (!o->moe_layers) return -1;
    bool dense = !strchr(o->moe_layers, '1');
    if (dense && given)
        return mt_error_set(error, "--moe-layer-freq %.100s gives no layer experts; leave out --num-experts",
                            o->moe_layer_freq);
    if (dense) o->num_experts = 0;
    char *text = dense ? mt_strdup("1") : mt_layer_freq_print(o->moe_layers, MT_EXPERT_LAYERS);
    if (!given && !isdigit((unsigned char)*o->moe_layer_freq)) mt_string_set(&o->moe_layer_freq, text);
    free(text);
    if (dense) mt_string_set(&o->moe_layers, NULL);
    return 0;
}

/* The letters of layers with a property that an option names: none (NULL) if all layers have it, or without the option.
 * `text` is then written as a list of the model's layers. */
static int mt_options_list_layers(char **letters, char **text, bool given, mt_layer_freq_rule rule, int64_t num_layers,
                                  mt_error *error) {
    mt_string_set(letters, NULL);
    if (!*text || num_layers == 0) return 0;
    *letters = mt_layer_freq_expand(*text, rule, num_layers, !given, error);
    if (!*letters) return -1;
    char *list = mt_layer_freq_print(*letters, rule);
    mt_string_set(text, strchr(*letters, '0') ? list : NULL);
    free(list);
    if (!strchr(*letters, '0')) mt_string_set(letters, NULL);
    return 0;
}

/* Layers with a window and with RoPE. A model whose layers all lack them has no window, or no position embedding. */
static int mt_options_list_attention_layers(mt_options *o, mt_error *error) {
    if (mt_options_list_layers(&o->window_layers, &o->window_attn_skip_freq, MT_GIVEN(o, window_attn_skip_freq),
                               MT_WINDOW_LAYERS, o->num_layers, error) != 0 ||
        mt_options_list_layers(&o->rope_layers, &o->no_rope_freq, MT_GIVEN(o, no_rope_freq), MT_ROPE_LAYERS,
                               o->num_layers, error) != 0)
        return -1;
    if (o->window_layers && !strchr(o->window_layers, '1')) {
        if (MT_GIVEN(o, window_attn_skip_freq))
            return mt_error_set(error, "--window-attn-skip-freq gives no layer a window; leave out --window-size");
        o->window_size = 0, o->window_rotary_base = 0;
        mt_string_set(&o->window_layers, NULL), mt_string_set(&o->window_attn_skip_freq, NULL);
    }
    if (o->rope_layers && !strchr(o->rope_layers, '1'))
        return mt_error_set(error, "--no-rope-freq gives no layer RoPE; use --position-embedding-type none");
    return 0;
}

/* The trace's file takes the place of any file with its name. */
static int mt_options_check_trace(const mt_options *o, mt_error *error) {
    if (!o->trace || !o->metrics || !mt_path_same(o->metrics, o->trace)) return 0;
    return mt_error_set(error, "--trace %s is the file of --metrics; choose another --trace", o->trace);
}

static int mt_options_check_bad_steps(const mt_options *o, mt_error *error) {
    bool stops = o->bad_step_policy == MT_BAD_STEP_STOP, reruns = o->rerun_mode != MT_RERUN_DISABLED;
    bool checks = o->check_for_nan_in_loss_and_grad || o->check_for_spiky_loss;
    if (!checks && (!stops || reruns))
        return mt_error_set(error, "--%s has no effect with --no-check-for-nan-in-loss-and-grad; leave one out",
                            stops ? "rerun-mode" : "bad-step-policy");
    return 0;
}

/* A word of --data-path is the prefix of X.bin and X.idx; people give one of these files, or their text. */
static int mt_options_check_prefix(const char *option, const char *prefix, mt_error *error) {
    static const char *const index = "_text_document.idx";
    bool is_half = mt_text_ends_with(prefix, ".bin") || mt_text_ends_with(prefix, ".idx");
    const char *slash = strrchr(prefix, '/'), *dot = strrchr(slash ? slash : prefix, '.');
    int whole = (int)strlen(prefix), cut = dot ? (int)(dot - prefix) : whole, stem = cut < 200 ? cut : 200;
    struct stat file;
    if (mt_path_exists(prefix, whole, ".idx")) return 0;
    int known = mt_path_exists(prefix, whole, index) ? whole : mt_path_exists(prefix, cut, index) ? cut : 0;
    if (!is_half && known > 0)
        return mt_error_set(error, "--%s %.200s: is not a dataset, but %.*s_text_document is; give that", option,
                            prefix, known, prefix);
    if (is_half)
        return mt_error_set(error, "--%s %.200s: expects the prefix of the two files of a dataset; give %.*s", option,
                            prefix, stem, prefix);
    if (stat(prefix, &file) != 0 || !S_ISREG(file.st_mode)) return 0;
    return mt_error_set(error,
                        "--%s %.200s: is text, not a dataset; first run data/preprocess --input %.200s --output-prefix "
                        "%.*s --tokenizer-type TYPE --tokenizer-model PATH, then give --%s %.*s_text_document",
                        option, prefix, prefix, stem, prefix, option, stem, prefix);
}

static int mt_options_check_prefixes(const mt_options *o, mt_error *error) {
    const struct {
        const char *name;
        const mt_strings *paths;
    } lists[] = {{"data-path", &o->data_path},
                 {"train-data-path", &o->train_data_path},
                 {"valid-data-path", &o->valid_data_path},
                 {"test-data-path", &o->test_data_path}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (int64_t j = 0; j < lists[i].paths->count; j++)
            if (mt_options_check_prefix(lists[i].name, lists[i].paths->items[j], error) != 0) return -1;
    return 0;
}

/* Names all that a run lacks, where it lacks several kinds of options; the rules of each name one. */
static int mt_options_check_missing(const mt_options *o, mt_error *error) {
    bool converts = mt_options_converts(o),
         shaped = o->num_layers > 0 && o->hidden_size > 0 && o->num_attention_heads > 0;
    bool endless = o->train_iters == 0 && o->train_samples == 0;
    bool fed = o->data_path.count > 0 || o->train_data_path.count > 0 || o->mock_data || o->tokens_file;
    const struct {
        bool is_missing;
        const char *names;
    } rows[] = {
        {!shaped, "the model (--load, --hf-config, or --num-layers, --hidden-size and --num-attention-heads)"},
        {o->vocab_size == 0, "its vocabulary (--vocab-size, or --tokenizer-type and --tokenizer-model)"},
        {o->seq_length == 0 && !converts, "--seq-length"},
        {!fed && !converts, "data (--data-path, --train-data-path, --tokens-file or --mock-data)"},
        {endless && !converts, o->sft ? "the length of training (--train-iters, --train-samples or --train-epochs)"
                                      : "the length of training (--train-iters or --train-samples)"},
        {o->lr == 0 && !converts, "--lr"},
    };
    char text[800] = "";
    int kinds = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!rows[i].is_missing) continue;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%s", kinds > 0 ? "; " : "", rows[i].names);
        kinds++;
    }
    return kinds < 2 ? 0 : mt_error_set(error, "the run lacks %s", text);
}

static int mt_options_check_data(const mt_options *o, mt_error *error) {
    if (mt_options_converts(o)) return 0;
    int sources = (o->data_path.count > 0) + (o->train_data_path.count > 0) + o->mock_data + (o->tokens_file != NULL);
    if (sources != 1)
        return mt_error_set(error, "give one source of data: --data-path, --train-data-path, --tokens-file or "
                                   "--mock-data");
    bool cuts = !o->sft && (o->reset_position_ids || o->reset_attention_mask);
    if ((cuts || o->eod_mask_loss) && !o->tokenizer_type && !o->load)
        return mt_error_set(error, "--%s needs --tokenizer-type, which knows the end of a document",
                            cuts && o->reset_position_ids ? "reset-position-ids"
                            : cuts                        ? "reset-attention-mask"
                                                          : "eod-mask-loss");
    return o->sft ? 0 : mt_options_check_prefixes(o, error);
}

/* --prompt-tokens "1,2,3": tokens of the vocabulary. */
static int mt_options_check_prompt_tokens(const mt_options *o, mt_error *error) {
    for (const char *at = o->prompt_tokens; at;) {
        char *end;
        errno = 0;
        long long token = strtoll(at, &end, 10);
        if (!*at && at > o->prompt_tokens)
            return mt_error_set(error,
                                "--prompt-tokens %.100s ends with a comma; give a number behind it, or leave it out",
                                o->prompt_tokens);
        if (!isdigit((unsigned char)*at) || (*end && *end != ','))
            return mt_error_set(error, "--prompt-tokens expects numbers with commas between them, got '%.100s'", at);
        if (errno != 0 || token >= o->vocab_size)
            return mt_error_set(error, "--prompt-tokens: %.*s is outside the vocabulary of %lld",
                                (int)mt_min(end - at, 100), at, (long long)o->vocab_size);
        at = *end ? end + 1 : NULL;
    }
    return 0;
}

static int mt_options_check_infer(const mt_options *o, mt_error *error) {
    if (!o->load) return mt_error_set(error, "--load is missing: the folder of the model to run");
    if (o->score && !o->out && !o->entropy_out && !o->logits_out)
        return mt_error_set(error, "--score needs --out, --entropy-out or --logits-out");
    bool prompted = o->prompts || o->prompt_tokens || o->prompt.count > 0;
    if (o->out && !o->score && !prompted)
        return mt_error_set(error, "--out needs --score, --prompt, --prompts or --prompt-tokens");
    if (o->num_return_sequences > 1 && !prompted)
        return mt_error_set(error, "--num-return-sequences needs --prompt, --prompts or --prompt-tokens");
    if (MT_GIVEN(o, chat_template) && !o->chat && !o->score && !o->prompts)
        return mt_error_set(error, "--chat-template needs --chat, --prompts or --score");
    if (o->score && o->seq_length == 0 && !mt_text_ends_with(o->score, ".jsonl"))
        return mt_error_set(error, "--seq-length is missing: --score needs it for sequences of int32 tokens");
    return 0;
}

static int mt_options_unfold_layout(mt_options *o, int64_t world_size, mt_stage_balancer *balance, mt_error *error) {
    free(o->pipeline_letters);
    o->pipeline_letters = NULL;
    if (!o->pipeline_model_parallel_layout) return 0;
    const char *layout = o->pipeline_model_parallel_layout;
    bool is_auto = strncmp(layout, "auto", 4) == 0;
    if (is_auto && !balance)
        return mt_error_set(error, "--pipeline-model-parallel-layout %s: ./train balances stages; give letters",
                            layout);
    o->pipeline_letters = is_auto ? balance(o, world_size, error) : mt_pipeline_layout_unfold(layout, error);
    return o->pipeline_letters ? 0 : -1;
}

/* --use-rope-scaling and --rotary-seq-len-interpolation-factor are other names of two types of scaling. */
static int mt_options_resolve_rope(mt_options *o, mt_error *error) {
    int64_t factor = o->rotary_seq_len_interpolation_factor;
    mt_rope_scaling asked = o->use_rope_scaling ? MT_ROPE_SCALING_LLAMA3
                            : factor > 0        ? MT_ROPE_SCALING_LINEAR
                                                : MT_ROPE_SCALING_NONE;
    if (asked && MT_GIVEN(o, rope_scaling_type) && asked != o->rope_scaling_type) {
        char *type = mt_option_text(o, mt_option_of(MT_AT(rope_scaling_type)));
        mt_error_set(error, "--rope-scaling-type %s and --%s exclude each other; leave one out", type,
                     o->use_rope_scaling ? "use-rope-scaling" : "rotary-seq-len-interpolation-factor");
        free(type);
        return -1;
    }
    if (asked) o->rope_scaling_type = asked;
    if (factor > 0 && MT_GIVEN(o, rope_scaling_factor) && o->rope_scaling_factor != (double)factor)
        return mt_error_set(
            error,
            "--rope-scaling-factor %g and --rotary-seq-len-interpolation-factor %lld exclude each other "
            "unless they agree; leave one out",
            o->rope_scaling_factor, (long long)factor);
    if (factor > 0 && !MT_GIVEN(o, rope_scaling_factor)) o->rope_scaling_factor = (double)factor;
    return 0;
}

/* Options that stand for values of others, and defaults that rules of the table read. */
static int mt_options_resolve(mt_options *o, mt_program program, mt_error *error) {
    if (mt_options_resolve_rope(o, error) != 0) return -1;
    mt_strategy *strategy = &o->data_parallel_sharding_strategy;
    bool distributed = *strategy == MT_NO_SHARD && o->use_distributed_optimizer;
    if (distributed && MT_GIVEN(o, data_parallel_sharding_strategy))
        return mt_error_set(error, "--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard exclude "
                                   "each other; leave one out");
    if (distributed) *strategy = MT_SHARD_OPTIM;
    if (o->stage != MT_STAGE_PT) o->sft = true;
    if (o->ipo && MT_GIVEN(o, preference_loss) && o->preference_loss != MT_PREFERENCE_IPO)
        return mt_error_set(error, "--ipo and --preference-loss exclude each other unless that is ipo; leave one out");
    if (o->ipo) o->preference_loss = MT_PREFERENCE_IPO;
    if (o->train_epochs > 0 && o->train_iters == 0) o->train_iters = MT_UNKNOWN_ITERATIONS;
    bool full = o->recompute_granularity == MT_RECOMPUTE_FULL; // which the table refuses with both flags
    if ((o->recompute_activations || o->moe_layer_recompute) && !full)
        o->recompute_granularity = MT_RECOMPUTE_SELECTIVE;
    if (o->moe_layer_recompute && !full) o->recompute_modules |= MT_MODULE_MOE;
    bool routes = program != MT_PROGRAM_INFER && o->num_experts > 0 && o->tensor_model_parallel_size > 1;
    if (!routes || o->sequence_parallel) return 0;
    if (MT_GIVEN(o, sequence_parallel))
        return mt_error_set(error, "--num-experts with --tensor-model-parallel-size of 2 or more needs "
                                   "--sequence-parallel: each rank routes tokens of its own");
    if (o->distribute_saved_activations)
        return mt_error_set(error, "--distribute-saved-activations is not supported with --num-experts and "
                                   "--tensor-model-parallel-size, which use --sequence-parallel; leave it out");
    o->sequence_parallel = true;
    return 0;
}

/* Names that mt_options_set took on condition that the data-parallel ranks shard. The command line refused them. */
static int mt_options_check_sharded_names(mt_options *o, mt_error *error) {
    if (o->data_parallel_sharding_strategy != MT_NO_SHARD) mt_strings_free(&o->sharded_names);
    if (o->sharded_names.count == 0) return 0;
    const char *name = o->sharded_names.items[0];
    return mt_error_set(error, "%s is not supported (%s)", name,
                        mt_megatron_name_find(name + 2, strlen(name + 2)).text);
}

static int mt_options_complete(mt_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                               mt_error *error) {
    if (mt_options_check_sharded_names(options, error)) return -1;
    if (mt_options_check_ranges(options, program, error) || mt_options_list_expert_layers(options, error) ||
        mt_options_list_attention_layers(options, error))
        return -1;
    if (mt_options_resolve(options, program, error) || mt_options_check_columns(options, program, error)) return -1;
    if (mt_options_unfold_layout(options, world_size, balance, error)) return -1;
    if (options->print_schedule && !options->dynamic_context_parallel)
        return mt_options_derive(options, program, world_size, error);
    if (program == MT_PROGRAM_INFER && mt_options_check_infer(options, error)) return -1;
    if (program == MT_PROGRAM_TRAIN && mt_options_check_missing(options, error)) return -1;
    if (program == MT_PROGRAM_TRAIN && mt_options_check_data(options, error)) return -1;
    if (mt_options_derive(options, program, world_size, error)) return -1;
    mt_options_derive_family(options);
    if (mt_options_derive_adapters(options, error)) return -1;
    if (program == MT_PROGRAM_INFER) return mt_options_check_prompt_tokens(options, error);
    return mt_options_check_trace(options, error) || mt_options_check_bad_steps(options, error) ? -1 : 0;
}

int mt_options_finish(mt_options *options, mt_program program, int64_t world_size, mt_error *error) {
    return mt_options_finish_by(options, program, world_size, NULL, error);
}

int mt_options_finish_by(mt_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                         mt_error *error) {
    int status = mt_options_complete(options, program, world_size, balance, error);
    if (status != 0) mt_options_name_typed(options, error);
    return status;
}

/* ---- options that change nothing, and values that were chosen */

/* MiB of saved activations per rank and micro-batch that sequence parallelism would save: of the inputs of the
 * two norms of each layer, a rank would keep its part. */
static double mt_sequence_parallel_saves(const mt_options *o) {
    double tp = (double)o->tensor_model_parallel_size, width = o->bf16 ? 2 : 4;
    double tokens = (double)(o->micro_batch_size * o->seq_length / o->context_parallel_size);
    double layers = (double)o->num_layers / (double)o->pipeline_model_parallel_size;
    return 2.0 / (1 << 20) * layers * tokens * (double)o->hidden_size * width * (tp - 1) / tp;
}

/* An option that changes nothing in this run, and why. */
typedef struct mt_idle_option {
    bool is_idle;
    const char *name, *reason;
} mt_idle_option;

static void mt_idle_options_print(const mt_idle_option *options, size_t count, FILE *file) {
    for (size_t i = 0; i < count; i++)
        if (options[i].is_idle) fprintf(file, "--%s has no effect: %s\n", options[i].name, options[i].reason);
}

/* Of both programs. */
static void mt_options_print_idle_common(const mt_options *o, FILE *file) {
    bool cpu = o->device == MT_DEVICE_CPU, unwatched = !mt_launched_by_mpi();
    const char *no_watch = "without mpirun, no time limits are watched";
    const mt_idle_option options[] = {
        {o->context_parallel_size == 1 && MT_GIVEN(o, cp_comm_type), "cp-comm-type", "--context-parallel-size is 1"},
        {cpu && o->deterministic_mode, "deterministic-mode", "on the CPU, runs always repeat bit for bit"},
        {cpu && o->attention_backend == MT_ATTENTION_FLASH, "attention-backend flash", "the CPU has one attention"},
        {unwatched && MT_GIVEN(o, distributed_timeout_minutes), "distributed-timeout-minutes", no_watch},
        {unwatched && MT_GIVEN(o, distributed_timeout_seconds), "distributed-timeout-seconds", no_watch},
        {mt_num_expert_layers(o) > 0 && o->expert_model_parallel_size * o->expert_tensor_parallel_size == 1 &&
             MT_GIVEN(o, moe_token_dispatcher_type),
         "moe-token-dispatcher-type", "--expert-model-parallel-size and --expert-tensor-parallel-size are 1"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Of a finished infer. */
static void mt_options_print_idle_inference(const mt_options *o, FILE *file) {
    bool generates = !o->score && !o->merge_adapter, argmax = generates && o->temperature == 0;
    bool no_text = o->prompt_tokens && o->print_tokens && o->stop.count == 0, dense = mt_num_expert_layers(o) == 0;
    const char *top = "--temperature 0 takes the most probable token", *merges = "--merge-adapter generates no text";
    const mt_idle_option options[] = {
        {argmax && MT_GIVEN(o, seed), "seed", top},
        {argmax && o->top_k > 0, "top-k", top},
        {argmax && o->top_p < 1, "top-p", top},
        {argmax && o->min_p > 0, "min-p", top},
        {no_text && MT_GIVEN(o, tokenizer_type), "tokenizer-type", "tokens are read and printed"},
        {no_text && MT_GIVEN(o, tokenizer_model), "tokenizer-model", "tokens are read and printed"},
        {dense && MT_GIVEN(o, moe_token_dispatcher_type), "moe-token-dispatcher-type", "no layer has experts"},
        {dense && MT_GIVEN(o, moe_grouped_gemm), "moe-grouped-gemm", "no layer has experts"},
        {dense && MT_GIVEN(o, moe_permute_fusion), "moe-permute-fusion", "no layer has experts"},
        {o->merge_adapter && MT_GIVEN(o, seed), "seed", merges},
        {o->merge_adapter && MT_GIVEN(o, temperature), "temperature", merges},
        {o->merge_adapter && MT_GIVEN(o, top_k), "top-k", merges},
        {o->merge_adapter && MT_GIVEN(o, top_p), "top-p", merges},
        {o->merge_adapter && MT_GIVEN(o, min_p), "min-p", merges},
        {o->merge_adapter && MT_GIVEN(o, repetition_penalty), "repetition-penalty", merges},
        {o->merge_adapter && MT_GIVEN(o, max_new_tokens), "max-new-tokens", merges},
        {o->merge_adapter && o->stop.count > 0, "stop", merges},
        {o->merge_adapter && MT_GIVEN(o, kv_cache_tokens), "kv-cache-tokens", merges},
        {o->merge_adapter && MT_GIVEN(o, inference_max_requests), "inference-max-requests", merges},
        {o->merge_adapter && MT_GIVEN(o, inference_dynamic_batching_block_size),
         "inference-dynamic-batching-block-size", merges},
        {o->merge_adapter && MT_GIVEN(o, tokenizer_type), "tokenizer-type", "the tokenizer of --load is copied"},
        {o->merge_adapter && MT_GIVEN(o, tokenizer_model), "tokenizer-model", "the tokenizer of --load is copied"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

static void mt_options_print_idle(const mt_options *o, FILE *file) {
    bool one = o->data_parallel_size * o->context_parallel_size == 1;
    bool warms_up = o->lr_warmup_iters > 0 || o->lr_warmup_samples > 0 || o->lr_warmup_fraction > 0;
    bool constant = o->lr_decay_style == MT_LR_CONSTANT, resumes = o->auto_resume || (o->load && o->save);
    unsigned modules = o->recompute_modules, offloaded = o->offload_modules;
    unsigned expert_inputs = offloaded & (MT_OFFLOAD_EXPERT_FC1 | MT_OFFLOAD_MOE_ACT);
    bool varies = o->expert_model_parallel_size * o->expert_tensor_parallel_size > 1 &&
                  (!o->moe_pad_expert_input_to_capacity || o->moe_token_dispatcher_type != MT_DISPATCHER_ALLTOALL);
    bool all_recomputed = o->recompute_granularity == MT_RECOMPUTE_FULL && o->recompute_method == MT_RECOMPUTE_UNIFORM;
    bool experts = mt_num_expert_layers(o) > 0, mlps = mt_num_expert_layers(o) < o->num_layers;
    const char *alone = "there is one data-parallel rank", *dense = "no layer has experts";
    bool unwatched = !mt_launched_by_mpi();
    const char *no_watch = "without mpirun, no time limits are watched";
    const char *own = "samples of --sft have attention and positions of their own in any case";
    const mt_idle_option options[] = {
        {o->sft && o->reset_position_ids, "reset-position-ids", own},
        {o->sft && o->reset_attention_mask, "reset-attention-mask", own},
        {one && o->overlap_grad_reduce, "overlap-grad-reduce", alone},
        {one && o->overlap_param_gather, "overlap-param-gather", alone},
        {one && o->use_distributed_optimizer, "use-distributed-optimizer", alone},
        {one && MT_GIVEN(o, data_parallel_sharding_strategy) && o->data_parallel_sharding_strategy != MT_NO_SHARD,
         "data-parallel-sharding-strategy", alone},
        {one && o->ddp_bucket_size > 0, "ddp-bucket-size", alone},
        {one && o->fp8_param_gather, "fp8-param-gather", alone},
        {o->add_bias_linear && MT_GIVEN(o, add_qkv_bias) && o->add_qkv_bias, "add-qkv-bias",
         "all linear layers have biases"},
        {!one && o->ddp_bucket_size > 0 && o->data_parallel_sharding_strategy >= MT_SHARD_GRADS, "ddp-bucket-size",
         "a layer's gradients are sharded before the next layer's are computed"},
        {o->window_size >= o->seq_length, "window-size", "no sequence is longer"},
        {o->multi_latent_attention && MT_GIVEN(o, qk_layernorm), "qk-layernorm",
         "with --multi-latent-attention, the latents always have norms"},
        {constant && MT_GIVEN(o, min_lr), "min-lr", "--lr-decay-style is constant"},
        {constant && MT_GIVEN(o, lr_decay_iters), "lr-decay-iters", "--lr-decay-style is constant"},
        {!warms_up && MT_GIVEN(o, lr_warmup_init), "lr-warmup-init", "there is no warm-up"},
        {o->overwrite && !o->save && !o->metrics, "overwrite", "neither --save nor --metrics is given"},
        {unwatched && MT_GIVEN(o, save_timeout_seconds), "save-timeout-seconds", no_watch},
        {o->eval_iters == 0 && MT_GIVEN(o, eval_interval), "eval-interval", "--eval-iters is 0"},
        {o->load && MT_GIVEN(o, init_method_std), "init-method-std", "the weights are loaded"},
        {o->exit_on_missing_checkpoint && !resumes, "exit-on-missing-checkpoint", "the run does not resume"},
        {modules & MT_MODULE_CORE_ATTN, "recompute-modules core_attn", "attention never keeps its probabilities"},
        {modules & MT_MODULE_MLP && !mlps, "recompute-modules mlp", "every layer has experts instead of an MLP"},
        {modules & MT_MODULE_MOE && !experts, "recompute-modules moe", dense},
        {modules & MT_MODULE_MOE_ACT && !experts, "recompute-modules moe_act", dense},
        {modules & MT_MODULE_SHARED_EXPERTS && (!experts || o->moe_shared_expert_intermediate_size == 0),
         "recompute-modules shared_experts", "no layer has a shared expert"},
        {offloaded & ~(unsigned)MT_OFFLOAD_ATTN_NORM && all_recomputed, "offload-modules other than attn_norm",
         "full recomputation keeps the input of a unit alone"},
        {offloaded & MT_OFFLOAD_MLP && !mlps, "offload-modules mlp", "every layer has experts instead of an MLP"},
        {expert_inputs && !experts, "offload-modules expert_fc1, moe_act", dense},
        {expert_inputs && experts && varies, "offload-modules expert_fc1, moe_act",
         "the number of their rows depends on the data; --moe-pad-expert-input-to-capacity fixes it"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

static void mt_options_print_idle_optimizer(const mt_options *o, FILE *file) {
    bool typed = MT_GIVEN(o, main_grads_dtype) || MT_GIVEN(o, main_params_dtype) || MT_GIVEN(o, exp_avg_dtype) ||
                 MT_GIVEN(o, exp_avg_sq_dtype);
    const mt_idle_option options[] = {
        {o->device == MT_DEVICE_CPU && o->optimizer_cpu_offload, "optimizer-cpu-offload",
         "on the CPU, the optimizer is in host memory already; only its order of work is simulated"},
        {o->use_precision_aware_optimizer && !typed, "use-precision-aware-optimizer",
         "none of --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype is given"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Options of models that take turns. */
static void mt_options_print_idle_roles(const mt_options *o, FILE *file) {
    bool rests = o->param_offload || o->grad_offload || o->optimizer_offload;
    const mt_idle_option options[] = {
        {o->device == MT_DEVICE_CPU && (o->param_offload || o->optimizer_offload), "param-offload, optimizer-offload",
         "on the CPU all memory is the host's"},
        {o->stage == MT_STAGE_DPO && rests && mt_options_refer_to_base(o),
         "param-offload, grad-offload, optimizer-offload",
         "no other model works: the reference is this one with its adapters switched off"},
        {o->ref_expert_model_parallel_size > 1 && o->num_experts == 0, "ref-expert-model-parallel-size",
         "no layer has experts"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Options of another optimizer. */
static void mt_options_print_idle_betas(const mt_options *o, FILE *file) {
    const char *name = mt_optimizer_name(o->optimizer);
    bool other = o->optimizer != MT_OPTIMIZER_ADAMW;
    char reason[40];
    snprintf(reason, sizeof reason, "--optimizer is %s", name);
    const mt_idle_option options[] = {{other && MT_GIVEN(o, adam_beta1), "adam-beta1", reason},
                                      {other && MT_GIVEN(o, adam_beta2), "adam-beta2", reason},
                                      {other && MT_GIVEN(o, adam_eps), "adam-eps", reason}};
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* The first rule by which an option has no effect: one that it needs, or (*is_needed: false) one beside which it has
 * none. False: it has an effect. Rules with a condition are for values other than the default. */
static bool mt_option_find_idle_rule(const mt_options *o, const mt_option *option, mt_program program,
                                     mt_option_rule *rule, bool *is_needed) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) continue;
        bool is_own = row->offset == option->offset;
        *is_needed = true;
        for (const char *column = is_own ? row->needs : NULL; mt_option_next_rule(&column, rule);)
            if (!rule->condition && rule->other->programs & (int)program &&
                !mt_option_has(o, rule->other, rule->choices))
                return true;
        *is_needed = false;
        for (const char *column = is_own ? row->excludes : NULL; mt_option_next_rule(&column, rule);)
            if (!rule->condition && !rule->choices && mt_option_used(o, rule->other)) return true;
        bool excludes = !is_own && row->programs & (int)program;
        for (const char *column = excludes ? row->excludes : NULL; mt_option_next_rule(&column, rule);) {
            if (rule->other->offset != option->offset || rule->choices || !mt_option_rule_holds(o, row, rule)) continue;
            rule->choices = rule->condition && row->type == MT_CHOICE ? "" : NULL;
            rule->other = row;
            return true;
        }
    }
    return false;
}

void mt_options_warn_defaults(const mt_options *o, mt_program program, FILE *file) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_of(row->offset) != row || !(row->programs & (int)program)) continue;
        if (!mt_options_gave(o, row->offset) || !mt_option_is_default(o, row)) continue;
        bool once = row->offset == MT_AT(dataloader_type) && o->sft && o->stage != MT_STAGE_RL; // it reads once
        if (once) continue;
        bool is_flag = row->type == MT_FLAG || row->type == MT_NO, needed, from_file = false;
        if (is_flag && !*mt_option_bool(o, row)) continue; // off, as it says
        for (int64_t i = 2; i < o->config_keys.count; i += 4)
            from_file |= strcmp(o->config_keys.items[i], row->name) == 0; // listed with the keys of its file
        mt_option_rule rule;
        if (from_file || !mt_option_find_idle_rule(o, row, program, &rule, &needed)) continue;
        if (mt_option_is_form_of(row, rule.other) || mt_option_is_form_of(rule.other, row)) continue;
        const mt_option *shown = row;
        for (const mt_option *other = row; row->type == MT_NO && other->help && shown->type == MT_NO; other++)
            if (other->name && other->offset == row->offset && other->type == MT_FLAG) shown = other;
        char *value = rule.choices && !*rule.choices ? mt_option_text(o, rule.other) : mt_strdup("");
        const char *choices = *value ? value : rule.choices ? rule.choices : "";
        fprintf(file, "--%s has no effect: %s --%s%s%s\n", shown->name, needed ? "it needs" : "not beside",
                rule.other->name, *choices ? " " : "", choices);
        free(value);
    }
}

static void mt_options_print_chosen(const mt_options *o, FILE *file) {
    long long tp = o->tensor_model_parallel_size, etp = o->expert_tensor_parallel_size;
    bool experts = o->num_experts > 0;
    if (experts && o->sequence_parallel && !MT_GIVEN(o, sequence_parallel))
        fprintf(
            file,
            "--sequence-parallel is on: with experts, each of the %lld tensor-parallel ranks routes its own tokens\n",
            tp);
    if (experts && etp != tp && !MT_GIVEN(o, expert_tensor_parallel_size))
        fprintf(file,
                "--expert-tensor-parallel-size is %lld: experts or ranks do not divide by "
                "--tensor-model-parallel-size %lld\n",
                etp, tp);
    if (tp > 1 && !o->sequence_parallel)
        fprintf(file,
                "--tensor-model-parallel-size %lld without --sequence-parallel: with it, each rank would keep at least "
                "%.3g MiB less per micro-batch\n",
                tp, mt_sequence_parallel_saves(o));
}

void mt_options_warn(const mt_options *o, mt_program program, FILE *file) {
    char *text = NULL;
    size_t size;
    FILE *lines = open_memstream(&text, &size);
    MT_CHECK(lines);
    mt_options_print_idle_common(o, lines);
    if (program == MT_PROGRAM_INFER) {
        mt_options_print_idle_inference(o, lines);
    } else {
        mt_options_print_chosen(o, lines);
        mt_options_print_idle(o, lines);
        mt_options_print_idle_optimizer(o, lines);
        mt_options_print_idle_roles(o, lines);
        mt_options_print_idle_betas(o, lines);
    }
    mt_options_warn_defaults(o, program, lines);
    MT_CHECK(fclose(lines) == 0);
    mt_options_print_typed(o, text, file);
    free(text);
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
