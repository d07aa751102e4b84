/* options.c: the options of a run as text: command line and YAML. */
#include "options.h"

#include "option_finish.h"
#include "option_help.h"
#include "option_roles.h"
#include "option_rules.h"
#include "option_source.h"
#include "option_yaml.h"
#include "role_config.h"

#include <stdlib.h>
#include <string.h>

/* Adds the settings of a file; `role` is NULL for a file of options. */
static int mt_givens_add_file(mt_givens *givens, mt_option_reader *reader, const char *role, mt_yaml *yaml) {
    return role ? mt_givens_add_role(givens, role, yaml, reader) : mt_givens_add_yaml(givens, yaml, reader);
}

/* Reads a text; `role` is NULL for a file of options. */
static int mt_options_read_text(mt_run_options *options, mt_program program, const char *role, const char *text,
                                int64_t bytes, const char *path, mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    mt_givens givens = {0};
    mt_yaml yaml;
    if (mt_yaml_open(&yaml, text, bytes, path, error) != 0) return -1;
    int status = mt_givens_add_file(&givens, &reader, role, &yaml);
    if (!status) status = mt_givens_take(&givens, &reader, NULL, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    if (!status && role) mt_option_reader_yield(&reader, 0);
    mt_option_reader_free(&reader);
    mt_givens_free(&givens);
    mt_yaml_close(&yaml);
    return status;
}

int mt_options_read_yaml(mt_run_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    return mt_options_read_text(options, program, NULL, text, bytes, path, error);
}

int mt_options_read_role(mt_run_options *options, mt_program program, const char *role, const char *text, int64_t bytes,
                         const char *path, mt_error *error) {
    return mt_options_read_text(options, program, role, text, bytes, path, error);
}

/* Adds the settings of the file of --config, after the changes of the command line. */
static int mt_givens_add_config(mt_givens *givens, mt_option_reader *reader, mt_yaml *yaml, const char *role,
                                const mt_strings *overrides) {
    char roles[400];
    for (int64_t i = 0; i < overrides->count; i++)
        if (mt_yaml_override(yaml, overrides->items[i]) != 0) return -1;
    if (!role && mt_role_config_detect(roles, yaml))
        return mt_error_set(yaml->error, "%s: has the roles %s; choose one with --role", yaml->path, roles);
    return mt_givens_add_file(givens, reader, role, yaml);
}

/* The role of a file that has one alone; NULL: it has none or several. */
static char *mt_config_only_role(mt_yaml *yaml) {
    char roles[400] = "";
    bool is_one = mt_role_config_detect(roles, yaml) && !strchr(roles, ',');
    return is_one ? mt_strdup(roles) : NULL;
}

/* True if the command line has a flag. */
static bool mt_givens_have(const mt_givens *givens, size_t offset) {
    const mt_given *given = mt_givens_find(givens, offset);
    bool is_on = true;
    return given && (given->values.count == 0 || !mt_parse_bool(given->values.items[0], &is_on) || is_on);
}

/* Refuses to train a role that does not train. */
static int mt_options_check_role(const mt_option_reader *reader, const char *role, mt_error *error) {
    if (reader->program != MT_PROGRAM_TRAIN || !role) return 0;
    if (strcmp(role, "critic") == 0)
        return mt_error_set(error, "--role critic: a critic trains beside its actor; run --role actor_train, and see "
                                   "this role with --print-config");
    bool chooses = mt_option_is_typed(reader, MT_AT(stack.stage)) || mt_option_is_typed(reader, MT_AT(sft));
    if (!reader->role_rests || chooses || mt_options_converts(reader->options)) return 0;
    return mt_error_set(error,
                        "--role %.80s: %s does not train this role; `infer` runs it, --print-config shows "
                        "it, and --stage or --sft trains its model",
                        role, reader->options->config);
}

int mt_options_read(mt_run_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    mt_givens givens = {0};
    const char *config;
    mt_options_default(options);
    mt_givens_add_arguments(&givens, argc, argv);
    mt_options_help(program, &givens);
    const mt_given *given = mt_givens_find(&givens, MT_AT(role));
    char *role = given && given->values.count > 0 ? mt_strdup(given->values.items[0]) : NULL;
    reader.prints_only = mt_givens_have(&givens, MT_AT(print_config));
    mt_yaml yaml = {0};
    int status = mt_givens_find_config(&givens, &config, error);
    if (!status && config) status = mt_yaml_open_file(&yaml, config, MT_CONFIG_BYTES, error);
    if (!status && config && !given) role = mt_config_only_role(&yaml);
    mt_strings overrides = {0};
    if (!status && config && role) mt_givens_split_overrides(&givens, &overrides);
    if (!status && config) status = mt_givens_add_config(&givens, &reader, &yaml, role, &overrides);
    mt_yaml_close(&yaml);
    mt_strings_free(&overrides);
    int64_t file_iters = 0;
    if (role && !given) mt_string_set(&options->role, role);
    if (!status) status = mt_givens_take(&givens, &reader, &file_iters, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    if (!status) status = mt_option_reader_check_sums(&reader, error);
    if (!status && config && !role) mt_option_reader_yield_file(&reader);
    if (!status && options->strict_options) status = mt_option_reader_refuse_idle(&reader, error);
    if (!status) mt_option_reader_yield_ratios(&reader);
    if (!status && role) mt_option_reader_yield(&reader, file_iters);
    if (!status) mt_options_take_vocabulary(options);
    FILE *notes = program == MT_PROGRAM_INFER ? stderr : stdout; // infer's output is text
    if (!status) mt_option_reader_print_idle(&reader, notes);
    if (!status && role && config && !options->print_config && mt_launch_rank() == 0)
        mt_options_print_unused(options, notes);
    mt_option_reader_free(&reader);
    mt_givens_free(&givens);
    if (!status && !options->print_config) status = mt_options_check_role(&reader, role, error);
    free(role);
    return status;
}
