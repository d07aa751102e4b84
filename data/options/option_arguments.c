/* option_arguments.c: options on a command line. */
#include "option_arguments.h"

#include <stdlib.h>
#include <string.h>

static bool mt_is_name(const char *argument) {
    return strncmp(argument, "--", 2) == 0;
}

/* True if a name with its own value for an option has set it: one that is given false, or yields, has not. */
static bool mt_setting_holds(const mt_setting *setting, const mt_run_options *options) {
    const char *value = setting->megatron.value;
    if (!value || *value == '!') return true;
    char *text = mt_option_text(options, setting->row);
    bool holds = strcmp(text, value) == 0;
    free(text);
    return holds;
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
        mt_strings_free(&reader->options->typed_names);            // the message has the names as they were given
        bool is_flag = row->type == MT_FLAG || row->type == MT_NO; // one name may be the opposite
        const char *first = is_flag ? "" : named->items[i + 2], *space = is_flag ? "" : " ";
        status =
            mt_error_set(error, "%s%s%.100s and %s%s%.100s are two names of one option, with two values; leave one out",
                         named->items[i + 1], space, first, where, space, is_flag ? "" : value);
    } else {
        mt_string_set(&named->items[i + 2], value);
    }
    free(value);
    return status;
}

/* Takes the option at arguments[index]; returns the index after its values, or -1. *taken: what it has set, if it is
 * an option and no default of another program. */
static int mt_options_read_argument(mt_option_reader *reader, int index, int count, char **arguments, mt_setting *taken,
                                    mt_error *error) {
    const char *argument = arguments[index++];
    if (!mt_is_name(argument) || !argument[2])
        return mt_error_set(error, "unexpected argument '%.100s'; options begin with -- (--help lists them)", argument);
    const char *name = argument + 2, *equals = strchr(argument, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    mt_setting setting = mt_setting_find(name, length);
    const char *next = equals ? equals + 1 : index < count && !mt_is_name(arguments[index]) ? arguments[index] : "";
    mt_setting_take_share(&setting, next);
    const mt_option *row = setting.row;
    if (!mt_setting_is_accepted(&setting, reader->program)) {
        const char *value = equals ? equals + 1 : NULL;
        bool is_on, takes = setting.megatron.value || (index < count && mt_parse_bool(arguments[index], &is_on));
        if (!value && takes && index < count && !mt_is_name(arguments[index])) value = arguments[index];
        mt_option_reader_refuse(reader, &setting, "", name, length, value);
        while (index < count && !mt_is_name(arguments[index])) index++;
        return index;
    }
    char where[112];
    mt_option_print_name(where, name, length);
    if (mt_setting_is_default(&setting, next)) return index + !equals;
    *taken = setting;
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

int mt_options_read_arguments(mt_option_reader *reader, int argc, char **argv, mt_error *error) {
    for (int index = 1; index < argc;) {
        const char *argument = argv[index];
        mt_setting setting = {0};
        index = mt_options_read_argument(reader, index, argc, argv, &setting, error);
        if (index < 0) return -1;
        bool compares = setting.row && mt_setting_holds(&setting, reader->options);
        char where[112];
        if (compares) mt_option_print_name(where, argument + 2, strcspn(argument, "=") - 2);
        if (compares && mt_option_reader_compare_names(reader, setting.row, where, error) != 0) return -1;
    }
    return 0;
}

int mt_options_find_config(const char **config, int argc, char **argv, mt_error *error) {
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

const char *mt_options_find_role(int argc, char **argv) {
    const char *role = NULL;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--role=", 7) == 0) role = argv[i] + 7;
        if (strcmp(argv[i], "--role") == 0 && i + 1 < argc && !mt_is_name(argv[i + 1])) role = argv[i + 1];
    }
    return role;
}
