/* option_source.c: the settings of a run, as its sources name them. */
#include "option_source.h"

#include "../tokens/tokenizer.h"
#include "yaml.h"

#include <stdlib.h>
#include <string.h>

/* ---- the list */

mt_given *mt_givens_add(mt_givens *givens, mt_source source, mt_given_form form, const char *position,
                        const char *name) {
    char where[420];
    givens->items = mt_realloc(givens->items, (givens->count + 1) * (int64_t)sizeof *givens->items);
    mt_given *given = &givens->items[givens->count++];
    *given = (mt_given){.source = source, .form = form, .name = mt_strdup(name), .position = mt_strdup(position)};
    if (*position)
        snprintf(where, sizeof where, "%.299s%.80s", position, name);
    else
        mt_option_print_name(where, name, strlen(name));
    given->where = mt_strdup(where);
    return given;
}

void mt_givens_free(mt_givens *givens) {
    for (int64_t i = 0; i < givens->count; i++) {
        mt_given *given = &givens->items[i];
        free(given->name), free(given->position), free(given->where), free(given->unset);
        mt_strings_free(&given->values);
    }
    free(givens->items);
    *givens = (mt_givens){0};
}

/* "--lr 1", "--lr=1", "-h". */
static bool mt_is_name(const char *argument) {
    return strncmp(argument, "--", 2) == 0 || strcmp(argument, "-h") == 0;
}

void mt_givens_add_arguments(mt_givens *givens, int argc, char **argv) {
    for (int i = 1; i < argc;) {
        const char *argument = argv[i], *equals = strchr(argument, '=');
        bool is_name = mt_is_name(argument), has_value = is_name && equals;
        char *name = mt_strdup(!is_name ? "" : argument[1] == 'h' ? "help" : argument + 2);
        if (has_value) name[equals - argument - 2] = 0;
        mt_given *given =
            mt_givens_add(givens, MT_SOURCE_COMMAND_LINE, has_value ? MT_GIVEN_TEXT : MT_GIVEN_WORDS, "", name);
        free(name);
        if (has_value) mt_strings_add(&given->values, equals + 1);
        for (i += is_name; i < argc && !has_value && !mt_is_name(argv[i]); i++) mt_strings_add(&given->values, argv[i]);
    }
}

/* The words that a setting of the command line takes. */
static int64_t mt_given_count_words(const mt_given *given) {
    mt_setting setting = mt_setting_find(given->name, strlen(given->name));
    bool is_on;
    if (!*given->name || given->values.count == 0) return 0;
    if (!setting.row && !setting.megatron.value) return 1;
    if (mt_setting_is_flag(&setting))
        return mt_parse_bool(given->values.items[0], &is_on) || mt_text_is_none(given->values.items[0]);
    return setting.row && mt_option_is_list(setting.row) ? given->values.count : 1;
}

void mt_givens_split_overrides(mt_givens *givens, mt_strings *overrides) {
    for (int64_t i = 0; i < givens->count; i++) {
        mt_given *given = &givens->items[i];
        if (given->form != MT_GIVEN_WORDS) continue;
        int64_t kept = mt_given_count_words(given);
        for (int64_t j = kept; j < given->values.count; j++) {
            char *word = given->values.items[j];
            if (!mt_yaml_is_override(word)) {
                given->values.items[kept++] = word;
                continue;
            }
            mt_strings_add(overrides, word);
            free(word);
        }
        given->values.count = kept;
        if (*given->name || kept > 0) continue;
        free(given->name), free(given->position), free(given->where);
        mt_strings_free(&given->values);
        givens->count--;
        memmove(given, given + 1, (size_t)(givens->count - i) * sizeof *given);
        i--;
    }
}

const mt_given *mt_givens_find(const mt_givens *givens, size_t offset) {
    const mt_given *found = NULL;
    for (int64_t i = 0; i < givens->count; i++) {
        const mt_given *given = &givens->items[i];
        mt_setting setting = mt_setting_find(given->name, strlen(given->name));
        bool is_typed = given->source == MT_SOURCE_COMMAND_LINE;
        if (is_typed && setting.row && setting.row->offset == offset) found = given;
    }
    return found;
}

int mt_givens_find_config(const mt_givens *givens, const char **config, mt_error *error) {
    const mt_given *first = NULL;
    *config = NULL;
    for (int64_t i = 0; i < givens->count; i++) {
        const mt_given *given = &givens->items[i];
        mt_setting setting = mt_setting_find(given->name, strlen(given->name));
        if (!setting.row || setting.row->offset != MT_AT(config)) continue;
        const char *path = given->values.count > 0 ? given->values.items[0] : NULL;
        if (first && (!path || !*config || strcmp(path, *config) != 0))
            return mt_error_set(error, "--%s and --%s name two files; one is read, so leave one out", first->name,
                                given->name);
        first = given;
        if (path) *config = path;
    }
    return 0;
}

/* ---- contradictions */

/* The value that a source has given an option. */
typedef struct mt_taken {
    size_t offset;
    mt_source source;
    char *name, *where, *value;
} mt_taken;

typedef struct mt_taken_list {
    mt_taken *items;
    int64_t count;
} mt_taken_list;

/* True if a name with its own value for an option has set it: one that is given false, or yields, has not. */
static bool mt_setting_holds(const mt_setting *setting, const mt_run_options *options) {
    const char *value = setting->megatron.value;
    if (!value || *value == '!') return true;
    char *text = mt_option_text(options, setting->row);
    bool holds = strcmp(text, value + (*value == '?')) == 0; // '?': unless another option says more
    free(text);
    return holds;
}

/* Notes that an argument of a file is given again, further down. */
static void mt_given_note_again(mt_option_reader *reader, const mt_taken *taken, const mt_given *given,
                                const char *value) {
    char reason[300];
    snprintf(reason, sizeof reason, "line %lld gives it again, %.100s, which is taken, as Megatron-LM's parser does",
             given->line, value);
    mt_strings_add(&reader->idle, taken->where);
    mt_strings_add(&reader->idle, reason);
}

/* Two values of an option within one source are a contradiction; on the command line, and among the arguments of a
 * file, one name that is given again replaces its value, as in every program. */
static int mt_given_compare(mt_taken_list *list, mt_option_reader *reader, const mt_given *given, const mt_option *row,
                            mt_error *error) {
    mt_run_options *options = reader->options;
    bool is_typed = given->source == MT_SOURCE_COMMAND_LINE, is_flag = row->type == MT_FLAG || row->type == MT_NO;
    char *value = mt_option_text(options, row);
    mt_taken *taken = NULL;
    for (int64_t i = 0; i < list->count && !taken; i++) {
        bool is_same = list->items[i].offset == row->offset && list->items[i].source == given->source;
        if (is_same) taken = &list->items[i];
    }
    if (!taken) {
        list->items = mt_realloc(list->items, (list->count + 1) * (int64_t)sizeof *list->items);
        list->items[list->count++] =
            (mt_taken){row->offset, given->source, mt_strdup(given->name), mt_strdup(given->where), value};
        return 0;
    }
    int status = 0;
    bool differs = strcmp(taken->value, value) != 0;
    if (differs && given->is_argument && strcmp(taken->name, given->name) == 0) {
        mt_given_note_again(reader, taken, given, value);
        free(taken->where);
        taken->where = mt_strdup(given->where);
    } else if (differs && !is_typed) {
        status = mt_error_set(error, "%s is given twice in this file, with the values %.100s and, as %s, %.100s",
                              given->where, value, taken->where, taken->value);
    } else if (differs && strcmp(taken->where, given->where) != 0) {
        const char *first = is_flag ? "" : taken->value, *space = is_flag ? "" : " "; // one name may be the opposite
        status =
            mt_error_set(error, "%s%s%.100s and %s%s%.100s are two names of one option, with two values; leave one out",
                         taken->where, space, first, given->where, space, is_flag ? "" : value);
    }
    if (status != 0) mt_strings_free(&options->typed_names); // the message has the names as they were given
    free(taken->value);
    taken->value = value;
    return status;
}

/* ---- the one way of a setting to its option */

static int mt_refuse_word(const mt_given *given, const mt_setting *setting, const char *word, mt_error *error) {
    if (*given->position)
        return mt_error_set(error, "%s expects %s, got '%.100s'", given->where, mt_setting_metavar(setting), word);
    if (mt_yaml_is_override(word))
        return mt_error_set(error,
                            "unexpected argument '%.100s': such a word changes a key of a file of roles, --config FILE "
                            "--role ROLE; options begin with --",
                            word);
    bool is_flag = setting && mt_setting_is_flag(setting);
    return mt_error_set(error, "unexpected argument '%.100s'%s%s%s; options begin with -- (--help lists them)", word,
                        setting ? " after " : "", setting ? given->where : "",
                        !setting  ? ""
                        : is_flag ? ", which takes true, false or nothing"
                                  : ", which takes one value");
}

/* Zeros and ones, one for each layer, as the text "[0,1,1]". */
static int mt_given_take_layers(mt_option_reader *reader, const mt_given *given, const mt_setting *setting,
                                mt_error *error) {
    char *list = NULL;
    size_t size;
    int status = 0;
    FILE *file = open_memstream(&list, &size);
    MT_CHECK(file);
    for (int64_t i = 0; i < given->values.count && !status; i++) {
        const char *layer = given->values.items[i];
        if (strcmp(layer, "0") != 0 && strcmp(layer, "1") != 0)
            status = mt_error_set(error, "%s expects 0 or 1 for each layer in its list", given->where);
        fprintf(file, "%c%s", i > 0 ? ',' : '[', layer);
    }
    fputs(given->values.count > 0 ? "]" : "[]", file);
    MT_CHECK(fclose(file) == 0);
    if (!status) status = mt_setting_set(reader, setting, list, given->where, error);
    free(list);
    return status;
}

/* Values of a list. */
static int mt_given_take_list(mt_option_reader *reader, const mt_given *given, const mt_setting *setting,
                              mt_error *error) {
    mt_layer_freq_rule rule;
    if (mt_option_names_layers(setting->row, &rule)) return mt_given_take_layers(reader, given, setting, error);
    if (!setting->row || !mt_option_is_list(setting->row))
        return mt_error_set(error, "%s expects %s, not a list", given->where, mt_setting_metavar(setting));
    for (int64_t i = 0; i < given->values.count; i++)
        if (mt_setting_set(reader, setting, given->values.items[i], given->where, error) != 0) return -1;
    return 0;
}

/* Words behind a name: a flag may have one, as transformers writes them, a list several, others have one. */
static int mt_given_take_words(mt_option_reader *reader, const mt_given *given, const mt_setting *setting,
                               mt_error *error) {
    const mt_strings *words = &given->values;
    const mt_option *row = setting->row;
    bool is_on, is_flag = mt_setting_is_flag(setting);
    bool has_none = words->count > 0 && mt_text_is_none(words->items[0]);
    bool is_list = !row && mt_choice_index(setting->megatron.value, "none") >= 0; // of a program with such options
    int64_t taken = 0;
    if (words->count == 0 && is_list) {
        if (mt_setting_set(reader, setting, "", given->where, error) != 0) return -1;
    } else if (is_flag ? words->count == 0 || (!has_none && !mt_parse_bool(words->items[0], &is_on))
                       : words->count == 0 && row && row->type == MT_OPTIONAL) {
        if (mt_setting_set(reader, setting, "true", given->where, error) != 0) return -1;
    } else if (words->count == 0) {
        return mt_error_set(error, "%s expects %s, got nothing", given->where, mt_setting_metavar(setting));
    } else {
        int64_t most = row && mt_option_is_list(row) ? words->count : 1;
        for (; taken < most; taken++)
            if (mt_setting_set(reader, setting, words->items[taken], given->where, error) != 0) return -1;
    }
    return taken < words->count ? mt_refuse_word(given, setting, words->items[taken], error) : 0;
}

/* A name that the program does not take. */
static void mt_given_refuse(mt_option_reader *reader, const mt_given *given, const mt_setting *setting) {
    const char *first = given->values.count > 0 ? given->values.items[0] : NULL;
    bool is_on, takes = setting->megatron.value || (first && mt_parse_bool(first, &is_on));
    bool has_value = given->form == MT_GIVEN_TEXT || (given->form == MT_GIVEN_WORDS && takes);
    if (given->form == MT_GIVEN_NULL && setting->megatron.kind != MT_NAME_UNKNOWN) return;
    mt_option_reader_refuse(reader, setting, given->position, given->name, strlen(given->name),
                            has_value ? first : NULL);
}

/* An interval in steps and its share of all steps are two options of one meaning: a typed one replaces the other of the
 * file. `interval`: the option of the name that was given. */
static void mt_replace_interval(mt_option_reader *reader, const mt_option *row, const mt_option *interval) {
    const char *share = mt_share_option(interval->name);
    if (!share) return;
    const mt_option *other = row == interval ? mt_option_find(share, strlen(share)) : interval;
    bool is_typed = reader->typed[other->offset / 64] >> other->offset % 64 & 1;
    if (!is_typed) mt_option_reset(reader->options, other);
}

/* Gives the option of a setting its values; *taken is the option, if it has got them. */
static int mt_given_take(mt_option_reader *reader, const mt_given *given, const mt_option **taken, mt_error *error) {
    const mt_strings *values = &given->values;
    bool is_typed = given->source == MT_SOURCE_COMMAND_LINE;
    bool has_one = given->form == MT_GIVEN_TEXT || (given->form == MT_GIVEN_WORDS && values->count > 0);
    *taken = NULL;
    if (!*given->name) return mt_refuse_word(given, NULL, values->count > 0 ? values->items[0] : "--", error);
    mt_setting setting = mt_setting_find(given->name, strlen(given->name));
    const mt_option *interval = setting.row;
    if (has_one) mt_setting_take_share(&setting, values->items[0]);
    if (!mt_setting_is_accepted(&setting, reader->program)) {
        mt_given_refuse(reader, given, &setting);
        return 0;
    }
    const mt_option *row = setting.row;
    if (given->form == MT_GIVEN_SECTION)
        return mt_error_set(error, "%s expects %s, not a section", given->where, mt_setting_metavar(&setting));
    bool is_nothing = !row && given->form == MT_GIVEN_LIST && values->count == 0; // an empty list for a property
    if (given->form == MT_GIVEN_NULL || is_nothing) return 0;
    if (row && row->offset == MT_AT(config) && !is_typed)
        return mt_error_set(error, "%s names another --config; one file is read, from the command line", given->where);
    if (has_one && mt_setting_is_default(&setting, values->items[0]))
        return values->count > 1 ? mt_refuse_word(given, &setting, values->items[1], error) : 0;
    if (row && is_typed) mt_replace_interval(reader, row, interval);
    if (row && is_typed) reader->typed[row->offset / 64] |= (uint64_t)1 << row->offset % 64;
    if (row && !setting.megatron.value) mt_option_clear(reader->options, row); // the last one wins
    int status = given->form == MT_GIVEN_LIST ? mt_given_take_list(reader, given, &setting, error)
                 : given->form == MT_GIVEN_TEXT
                     ? mt_setting_set(reader, &setting, values->items[0], given->where, error)
                     : mt_given_take_words(reader, given, &setting, error);
    if (status == 0 && row && mt_setting_holds(&setting, reader->options)) {
        *taken = row;
        int64_t line = given->line > 0 ? given->line : MT_ORIGIN_ABSENT;
        bool is_of_command_line = is_typed || given->line == MT_YAML_COMMAND_LINE;
        mt_option_set_origin(reader->options, row, is_of_command_line ? MT_ORIGIN_COMMAND_LINE : line);
    }
    return status;
}

/* True if a setting has a variable that is not set, and an effect. */
static bool mt_given_lacks_variable(const mt_given *given, mt_program program) {
    mt_setting setting = mt_setting_find(given->name, strlen(given->name));
    return given->unset && mt_setting_is_accepted(&setting, program);
}

/* True if a source of higher precedence has the option of a setting. */
static bool mt_given_is_replaced(const mt_givens *givens, const mt_given *given) {
    mt_setting setting = mt_setting_find(given->name, strlen(given->name));
    return setting.row && mt_givens_find(givens, setting.row->offset) != NULL;
}

/* True if a rule without a condition excludes `other` beside `row`. */
static bool mt_option_always_excludes(const mt_option *row, const mt_option *other) {
    mt_option_rule rule;
    for (const char *column = row->excludes; mt_option_next_rule(&column, &rule);)
        if (rule.other->offset == other->offset && !rule.condition && !rule.choices) return true;
    return false;
}

/* True if the command line has an option that excludes the one of a setting, which then gives way. */
static bool mt_given_is_excluded(const mt_givens *givens, const mt_given *given) {
    mt_setting setting = mt_setting_find(given->name, strlen(given->name));
    for (int64_t i = 0; setting.row && i < givens->count; i++) {
        if (givens->items[i].source != MT_SOURCE_COMMAND_LINE) continue;
        mt_setting typed = mt_setting_find(givens->items[i].name, strlen(givens->items[i].name));
        if (typed.row &&
            (mt_option_always_excludes(typed.row, setting.row) || mt_option_always_excludes(setting.row, typed.row)))
            return true;
    }
    return false;
}

/* BERT and T5 have no option that names them beside their vocabulary: trained as decoders, they would be other models.
 * Also a path with a variable that is not set says so by its name. */
static int mt_given_check_vocab(const mt_given *given, mt_error *error) {
    mt_setting setting = mt_setting_find(given->name, strlen(given->name));
    bool is_vocab = setting.row && setting.row->offset == MT_AT(vocab_file) && given->values.count > 0;
    if (!is_vocab || !mt_vocab_is_word_list(given->values.items[0])) return 0;
    return mt_error_set(error,
                        "%s %.300s: a list of words is WordPiece's, of BERT and of T5 in Megatron-LM: it is not read; "
                        "GPT2BPETokenizer has a vocab.json",
                        given->where, given->values.items[0]);
}

/* A value with a variable that is not set. */
static void mt_given_refuse_unset(mt_option_reader *reader, const mt_given *given) {
    char reason[300];
    snprintf(reason, sizeof reason, "has ${%.100s}, which is not set; export it, or give the option by itself",
             given->unset);
    if (reader->prints_only) {
        mt_strings_add(&reader->idle, given->where);
        mt_strings_add(&reader->idle, reason);
        return;
    }
    mt_refusal *refusal = mt_option_reader_add_refusal(reader);
    if (!refusal) return;
    snprintf(refusal->position, sizeof refusal->position, "%s", given->position);
    snprintf(refusal->name, sizeof refusal->name, "%.100s", given->name);
    snprintf(refusal->reason, sizeof refusal->reason, "%s", reason);
}

int mt_givens_take(const mt_givens *givens, mt_option_reader *reader, int64_t *file_iters, mt_error *error) {
    mt_taken_list list = {0};
    bool is_argument = false;
    int status = 0;
    for (mt_source source = 0; source < MT_NUM_SOURCES && status == 0; source++) {
        if (source == MT_SOURCE_COMMAND_LINE && file_iters) *file_iters = reader->options->stack.train_iters;
        for (int64_t i = 0; i < givens->count && status == 0; i++) {
            const mt_given *given = &givens->items[i];
            const mt_option *taken = NULL;
            if (given->source != source) continue;
            bool is_last = source == MT_SOURCE_COMMAND_LINE || !mt_given_is_replaced(givens, given);
            if (is_last) status = mt_given_check_vocab(given, error);
            is_argument = given->is_argument;
            if (status != 0) break;
            if (!mt_given_lacks_variable(given, reader->program))
                status = mt_given_take(reader, given, &taken, error);
            else if (!mt_given_is_replaced(givens, given) && !mt_given_is_excluded(givens, given))
                mt_given_refuse_unset(reader, given);
            bool yields = source == MT_SOURCE_ROLE && mt_given_is_replaced(givens, given);
            if (status != 0 && yields) status = 0, taken = NULL; // a value that is not supported does no harm
            if (status == 0 && taken && source != MT_SOURCE_ROLE)
                status = mt_given_compare(&list, reader, given, taken, error);
        }
    }
    for (int64_t i = 0; i < list.count; i++)
        free(list.items[i].name), free(list.items[i].where), free(list.items[i].value);
    free(list.items);
    bool has_refused = is_argument && mt_option_reader_lacks_one(reader); // in the order of a file of another program
    return status != 0 && has_refused ? mt_option_reader_report(reader, error) : status;
}
