/* option_reader.c: reads values of options from texts: names, their answers, refusals. */
#include "option_reader.h"

#include "../base/file.h"
#include "option_rules.h"
#include "option_typed.h"

#include <stdlib.h>
#include <string.h>

/* The words of `name` that `other` lacks; *words: all of them. */
static int mt_count_lacking(const char *name, size_t length, const char *other, size_t other_length, int *words) {
    int lacking = 0;
    *words = 0;
    for (size_t at = 0; at < length; at += strcspn(name + at, "-_=") + 1) {
        size_t word = mt_min(strcspn(name + at, "-_="), length - at), from = 0;
        for (; from < other_length; from += strcspn(other + from, "-_=") + 1)
            if (strcspn(other + from, "-_=") == word && strncmp(name + at, other + from, word) == 0) break;
        lacking += from >= other_length;
        ++*words;
    }
    return lacking;
}

/* The words that one of two names has and the other lacks, if all others are in both, in any order; else many. */
static int mt_words_apart(const char *name, size_t length, const char *other) {
    enum { MANY = 1000 };
    int words, other_words;
    size_t other_length = strlen(other);
    int lacking = mt_count_lacking(name, length, other, other_length, &words);
    int other_lacking = mt_count_lacking(other, other_length, name, length, &other_words);
    return (lacking > 0 && other_lacking > 0) || words < 2 || other_words < 2 ? MANY : lacking + other_lacking;
}

/* The program's option with the nearest name; NULL when none is near. */
static const mt_option *mt_option_nearest(const char *name, size_t length, int program) {
    const mt_option *nearest = NULL;
    int least = length < 6 ? 2 : 2 + (int)length / 4;
    if (length > 64) return NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !(row->programs & program)) continue;
        int words = mt_words_apart(name, length, row->name);
        int distance = words < least ? words : mt_edit_distance(name, length, row->name);
        if (distance < least) least = distance, nearest = row;
    }
    return nearest;
}

/* ---- names: an option, another name of one, or a reason why it is refused */

enum { MT_MAX_REFUSALS = 100 }; // that are searched for a similar name and printed; others are counted

mt_setting mt_setting_find(const char *name, size_t length) {
    mt_setting setting = {.row = mt_option_find(name, length)};
    if (!setting.row) setting.megatron = mt_megatron_name_find(name, length);
    if (setting.megatron.kind == MT_NAME_ALIAS)
        setting.row = mt_option_find(setting.megatron.text, strlen(setting.megatron.text));
    return setting;
}

bool mt_setting_is_accepted(const mt_setting *setting, mt_program program) {
    return setting->row ? setting->row->programs & (int)program : setting->megatron.kind == MT_NAME_ALWAYS;
}

bool mt_setting_is_flag(const mt_setting *setting) {
    const char *value = setting->megatron.value;
    if (setting->megatron.kind == MT_NAME_ALWAYS)
        return mt_choice_index("true|false", value) >= 0 || !strcmp(value, "true|false");
    return value || setting->row->type == MT_FLAG || setting->row->type == MT_NO;
}

const char *mt_setting_metavar(const mt_setting *setting) {
    const mt_option *row = setting->row;
    if (mt_setting_is_flag(setting)) return "true or false";
    if (!row) return setting->megatron.value;
    return row->type == MT_INT     ? "a whole number"
           : row->type == MT_REAL  ? "a number"
           : row->type == MT_REALS ? "numbers"
                                   : row->values;
}

mt_refusal *mt_option_reader_add_refusal(mt_option_reader *reader) {
    if (reader->num_refused == MT_MAX_REFUSALS) {
        reader->num_uncollected++;
        return NULL;
    }
    reader->refused = mt_realloc(reader->refused, (reader->num_refused + 1) * (int64_t)sizeof *reader->refused);
    mt_refusal *refusal = &reader->refused[reader->num_refused++];
    *refusal = (mt_refusal){0};
    return refusal;
}

#define NO_MEANING    "has no meaning here"
#define NOT_SUPPORTED "is not supported ("

void mt_option_reader_refuse(mt_option_reader *reader, const mt_setting *setting, const char *position,
                             const char *name, size_t length, const char *value) {
    const char *dashes = *position ? "" : "--", *text = setting->megatron.text;
    bool is_on, infers = reader->program == MT_PROGRAM_INFER;
    mt_name_kind kind = setting->megatron.kind;
    if (kind == MT_NAME_UNSUPPORTED && value && mt_parse_bool(value, &is_on) && !is_on) return;
    const char *only = setting->megatron.value; // values without effect; NULL: all
    bool is_idle = kind == MT_NAME_IDLE && (!only || (value && mt_choice_index(only, value) >= 0));
    if (is_idle && reader->program != MT_PROGRAM_LIBRARY) {
        char where[420];
        snprintf(where, sizeof where, "%s%s%.*s", position, dashes, length < 100 ? (int)length : 100, name);
        mt_strings_add(&reader->idle, where), mt_strings_add(&reader->idle, text);
        return;
    }
    mt_refusal *refusal = mt_option_reader_add_refusal(reader);
    if (!refusal) return;
    snprintf(refusal->position, sizeof refusal->position, "%s", position);
    snprintf(refusal->name, sizeof refusal->name, "%s%.*s", dashes, length < 100 ? (int)length : 100, name);
    size_t room = sizeof refusal->reason;
    if (setting->row)
        snprintf(refusal->reason, room, "is an option of %s, not of %s", infers ? "train" : "infer",
                 infers ? "infer" : "train");
    else if (kind == MT_NAME_NAMED)
        snprintf(refusal->reason, room, "is named %s here", text);
    else if (kind == MT_NAME_IDLE && !is_idle)
        snprintf(refusal->reason, room, "is not supported with this value (only %.200s: %s)", only, text);
    else if (kind == MT_NAME_NO_MEANING || kind == MT_NAME_IDLE)
        snprintf(refusal->reason, room, NO_MEANING " (%s)", text);
    else if (kind == MT_NAME_UNSUPPORTED)
        snprintf(refusal->reason, room, NOT_SUPPORTED "%s)", text);
    const mt_option *nearest = *refusal->reason ? NULL : mt_option_nearest(name, length, (int)reader->program);
    char key[80];
    if (!nearest) return;
    mt_option_key(key, nearest);
    snprintf(refusal->nearest, sizeof refusal->nearest, "%s%s", dashes, *position ? key : nearest->name);
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

bool mt_option_reader_lacks_one(const mt_option_reader *reader) {
    for (int64_t i = 0; i < reader->num_refused; i++) {
        const char *reason = reader->refused[i].reason;
        if (strncmp(reason, NOT_SUPPORTED, strlen(NOT_SUPPORTED)) != 0) return false;
        if (strcmp(reason, reader->refused[0].reason) != 0) return false;
    }
    return reader->num_refused > 0;
}

/* Names of one capability that is not supported make one line, with its first names. */
static int mt_refusals_report_one(const mt_option_reader *reader, mt_error *error) {
    enum { MT_NAMES = 6 };
    char names[900] = "";
    int64_t total = reader->num_refused + reader->num_uncollected, shown = mt_min(reader->num_refused, MT_NAMES);
    for (int64_t i = 0; i < shown; i++) {
        const mt_refusal *r = &reader->refused[i];
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "", r->name);
    }
    size_t used = strlen(names);
    if (total > shown) snprintf(names + used, sizeof names - used, " and %lld more", (long long)(total - shown));
    return mt_error_set(error, "%s%s are %s", reader->refused[0].position, names,
                        reader->refused[0].reason + strlen("is "));
}

int mt_option_reader_report(const mt_option_reader *reader, mt_error *error) {
    if (reader->num_refused == 0) return 0;
    const mt_refusal *first = reader->refused, *end = first + reader->num_refused;
    if (end == first + 1 && *first->reason)
        return mt_error_set(error, "%s%s %s%s", first->position, first->name, first->reason,
                            strncmp(first->reason, NO_MEANING, strlen(NO_MEANING)) == 0 ? "; leave it out" : "");
    if (end > first + 1 && mt_option_reader_lacks_one(reader)) return mt_refusals_report_one(reader, error);
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

/* "--a, --b (reason); --c (reason)": the names without effect, each reason once. */
static void mt_option_reader_print_names(const mt_option_reader *reader, FILE *file) {
    const mt_strings *idle = &reader->idle;
    for (int64_t i = 0; i < idle->count; i += 2) {
        const char *reason = idle->items[i + 1];
        int64_t first = 1;
        while (strcmp(idle->items[first], reason) != 0) first += 2;
        if (first != i + 1) continue; // printed with the first of its reason
        fprintf(file, "%s%s", i ? "; " : "", idle->items[i]);
        for (int64_t j = i + 2; j < idle->count; j += 2)
            if (strcmp(idle->items[j + 1], reason) == 0) fprintf(file, ", %s", idle->items[j]);
        fprintf(file, " (%s)", reason);
    }
}

void mt_option_reader_print_idle(const mt_option_reader *reader, FILE *file) {
    if (mt_launch_rank() != 0 || reader->idle.count == 0) return;
    fprintf(file, "no effect here: ");
    mt_option_reader_print_names(reader, file);
    fprintf(file, "\n");
}

int mt_option_reader_refuse_idle(const mt_option_reader *reader, mt_error *error) {
    char *text = NULL;
    size_t size;
    if (reader->idle.count == 0) return 0;
    FILE *file = open_memstream(&text, &size);
    MT_CHECK(file);
    mt_option_reader_print_names(reader, file);
    MT_CHECK(fclose(file) == 0);
    mt_error_set(error, "--strict-options: no effect here: %s; leave them out", text);
    free(text);
    return -1;
}

int mt_option_reader_check_sums(const mt_option_reader *reader, mt_error *error) {
    static const char name[] = "ddp-reduce-scatter-with-fp32-accumulation";
    const mt_run_options *o = reader->options;
    const char *reason = mt_megatron_name_find(name, strlen(name)).text;
    const mt_strings *idle = &reader->idle;
    bool in_fp32 = !o->grad_reduce_in_bf16 && o->stack.main_grads_dtype == MT_OPTIMIZER_FP32;
    for (int64_t i = 0; i < idle->count && !in_fp32; i += 2)
        if (strcmp(idle->items[i + 1], reason) == 0)
            return mt_error_set(
                error,
                "%s: sums of some gradients or ranks in fp32 are not supported beside sums in %s; leave "
                "it out, or %s",
                idle->items[i], o->grad_reduce_in_bf16 ? "bf16 (--grad-reduce-in-bf16)" : "another type",
                o->grad_reduce_in_bf16 ? "--grad-reduce-in-bf16" : "--main-grads-dtype");
    return 0;
}

void mt_option_reader_free(mt_option_reader *reader) {
    free(reader->refused);
    mt_strings_free(&reader->idle);
}

/* Adds the words of a blend in one text, "0.7 a 0.3 b", or else one prefix, which may have blanks. */
static int mt_option_add_paths(mt_run_options *options, const mt_option *row, const char *text, const char *where,
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

/* The value that `text` has here: "theirs=ours|...". Python's False is false. */
static const char *mt_setting_translate(const char *values, const char *text, char *translated, size_t room) {
    bool is_true, is_off = mt_parse_bool(text, &is_true) && !is_true;
    const char *given = text;
    if (is_off) text = "false";
    size_t length = strlen(text);
    for (const char *at = values; *at; at += strcspn(at, "|"), at += *at == '|') {
        if (strcspn(at, "=") != length || strncmp(at, text, length) != 0) continue;
        const char *ours = at + length + 1;
        snprintf(translated, room, "%.*s", (int)strcspn(ours, "|"), ours);
        return translated;
    }
    return given;
}

bool mt_text_is_none(const char *text) {
    return mt_choice_index("None|null|~", text) >= 0;
}

bool mt_setting_is_default(const mt_setting *setting, const char *text) {
    char translated[160];
    const mt_option *row = setting->row;
    const char *values = row ? setting->megatron.values : NULL;
    bool is_alias = setting->megatron.kind == MT_NAME_ALIAS; // no text of another program is None
    bool has_no_text = row && (row->type == MT_INT || row->type == MT_REAL || mt_setting_is_flag(setting));
    if (row && (is_alias || has_no_text) && mt_text_is_none(text)) return true;
    return values && *text && !*mt_setting_translate(values, text, translated, sizeof translated);
}

void mt_setting_take_share(mt_setting *setting, const char *text) {
    double share = strtod(text, NULL);
    bool is_alias = setting->megatron.kind == MT_NAME_ALIAS && setting->row;
    const char *option = is_alias && share > 0 && share < 1 ? mt_share_option(setting->row->name) : NULL;
    if (option) setting->row = mt_option_find(option, strlen(option));
}

/* True for a value of a property that gives none: no text, None, an empty list, or a form of false. */
static bool mt_value_is_none(const char *choices, const char *text) {
    bool is_true, is_off = mt_parse_bool(text, &is_true) && !is_true;
    return !*text || mt_text_is_none(text) || strcmp(text, "[]") == 0 ||
           (is_off && mt_choice_index(choices, "false") >= 0);
}

/* A whole number without the fraction .0, with which other programs may write it. */
static const char *mt_value_trim(const char *text, char *trimmed, size_t room) {
    size_t digits = strspn(text, "+-0123456789"), length = strlen(text);
    bool has_fraction = digits > 0 && text[digits] == '.' && digits + 1 + strspn(text + digits + 1, "0") == length;
    if (!has_fraction || digits >= room) return text;
    snprintf(trimmed, room, "%.*s", (int)digits, text);
    return trimmed;
}

/* A section of a trainer in JSON, such as --accelerator-config '{"even_batches": true}': each of its keys must be a
 * name that states a property of this program, with its value. */
static int mt_setting_check_section(mt_option_reader *reader, const mt_setting *of, const char *text, const char *where,
                                    mt_error *error) {
    json_error_t damage;
    json_t *section = json_loads(text, JSON_REJECT_DUPLICATES, &damage), *value;
    const char *key;
    int status = section ? 0 : mt_error_set(error, "%s: not a section in JSON: %s", where, damage.text);
    json_object_foreach(section, key, value) {
        char name[300];
        mt_setting setting = mt_setting_find(key, strlen(key));
        bool is_text = json_is_string(value), is_property = !setting.row && setting.megatron.kind == MT_NAME_ALWAYS;
        char *printed = is_text ? mt_strdup(json_string_value(value)) : json_dumps(value, JSON_ENCODE_ANY);
        snprintf(name, sizeof name, "%.200s: \"%.80s\"", where, key);
        if (status == 0 && !is_property && setting.megatron.kind != MT_NAME_IDLE)
            status = mt_error_set(error, "%s is not known; leave it out", name);
        if (status == 0 && is_property) status = mt_setting_set(reader, &setting, printed, name, error);
        free(printed);
    }
    json_decref(section);
    if (status == 0) mt_strings_add(&reader->idle, where), mt_strings_add(&reader->idle, of->megatron.text);
    return status;
}

/* A name that sets an option unless that is given: an error if another such name has set it to another value. */
static int mt_setting_check_weak(const mt_run_options *o, const mt_setting *setting, const char *where,
                                 mt_error *error) {
    const mt_option *row = setting->row;
    const mt_strings *typed = &o->typed_names;
    const char *other = NULL, *value = setting->megatron.value + 1;
    for (int64_t i = 0; i < typed->count; i += 2)
        if (strcmp(typed->items[i], row->name) == 0) other = strstr(typed->items[i + 1], " (by ");
    if (!other || row->type != MT_CHOICE) return 0;
    other += strlen(" (by ");
    int length = (int)strlen(other) - 1;                                        // without the parenthesis
    const char *blank = strrchr(other, ' '), *name = blank ? blank + 1 : other; // behind a file's place
    if (strncmp(name, "--", 2) == 0) name += 2;
    const char *first = mt_setting_find(name, (size_t)(other + length - name)).megatron.value;
    bool differs = (int)*mt_option_choice(o, row) != mt_choice_index(row->values, value);
    if (!first || *first != '?' || !differs) return 0;
    return mt_error_set(error, "%s and %.*s exclude each other: they ask for two values of one option; leave one out",
                        where, length, other);
}

int mt_setting_set(mt_option_reader *reader, const mt_setting *setting, const char *text, const char *where,
                   mt_error *error) {
    const mt_option *row = setting->row;
    const char *value = setting->megatron.value;
    bool is_true = false;
    char translated[160], trimmed[80];
    if (row && row->type == MT_INT && setting->megatron.kind == MT_NAME_ALIAS)
        text = mt_value_trim(text, trimmed, sizeof trimmed);
    if (row && setting->megatron.values) {
        text = mt_setting_translate(setting->megatron.values, text, translated, sizeof translated);
        if (!*text) return 0; // the default
        if (*text == '!') return mt_error_set(error, "%s: %s", where, text + 1);
    }
    bool gives_none = !row && mt_value_is_none(value, text);
    if (mt_setting_is_flag(setting) && !gives_none) {
        if (!mt_parse_bool(text, &is_true))
            return mt_error_set(error, "%s expects true or false, got '%.100s'", where, text);
        text = is_true ? "true" : "false";
    }
    if (!row && *text == '{') return mt_setting_check_section(reader, setting, text, where, error);
    if (!row) {
        if (!gives_none && mt_choice_index(value, text) < 0)
            return mt_error_set(error, "%s can only be %s here: %s", where, value, setting->megatron.text);
        mt_strings_add(&reader->idle, where), mt_strings_add(&reader->idle, setting->megatron.text);
        return 0;
    }
    bool negates = value && *value == '!', weak = value && *value == '?';
    if (value && !negates && !is_true) return 0;
    if (weak && mt_options_gave(reader->options, row->offset))
        return mt_setting_check_weak(reader->options, setting, where, error);
    mt_options_note_name(reader->options, row, where, value != NULL);
    if (row->type == MT_LIST && strcmp(row->values, MT_PREFIXES) == 0)
        return mt_option_add_paths(reader->options, row, text, where, error);
    if (!value) return mt_option_set(reader->options, row, text, where, error);
    if (negates) return mt_option_set(reader->options, row, is_true ? "false" : "true", where, error);
    return mt_option_set(reader->options, row, value + weak, where, error);
}

void mt_option_print_name(char where[112], const char *name, size_t length) {
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

int mt_options_set(mt_run_options *options, const char *name, const char *value, mt_error *error) {
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
        status = mt_option_reader_report(&reader, error);
    } else if (setting.row && mt_option_is_list(setting.row)) {
        status = mt_setting_set_words(&reader, &setting, value, where, error);
    } else {
        status = mt_setting_set(&reader, &setting, value, where, error);
    }
    mt_option_reader_free(&reader);
    return status;
}
