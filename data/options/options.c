/* options.c: the options of a run as text: command line and YAML. */
#include "options.h"

#include "../base/file.h"
#include "option_arguments.h"
#include "option_finish.h"
#include "option_help.h"
#include "option_roles.h"
#include "option_rules.h"
#include "option_yaml.h"
#include "role_config.h"

#include <stdlib.h>
#include <string.h>

int mt_options_read_yaml(mt_run_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    int status = mt_option_reader_read_yaml(&reader, text, bytes, path, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    mt_option_reader_free(&reader);
    return status;
}

int mt_options_read_role(mt_run_options *options, mt_program program, const char *role, const char *text, int64_t bytes,
                         const char *path, mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    int status = mt_option_reader_read_role(&reader, role, text, bytes, path, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    if (!status) mt_option_reader_yield(&reader, 0);
    mt_option_reader_free(&reader);
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

int mt_options_read(mt_run_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    mt_option_reader reader = {.options = options, .program = program};
    const char *config, *role = mt_options_find_role(argc, argv);
    mt_options_default(options);
    mt_options_help(program, argc, argv);
    int status = mt_options_find_config(&config, argc, argv, error);
    if (!status && config) status = mt_options_read_config(&reader, config, role, error); // later settings win
    int64_t file_iters = options->stack.train_iters;
    if (!status) status = mt_options_read_arguments(&reader, argc, argv, error);
    if (!status) status = mt_option_reader_report(&reader, error);
    if (!status && options->strict_options) status = mt_option_reader_refuse_idle(&reader, error);
    if (!status) mt_option_reader_yield_ratios(&reader);
    if (!status && role) mt_option_reader_yield(&reader, file_iters);
    if (!status) mt_options_take_vocabulary(options);
    FILE *notes = program == MT_PROGRAM_INFER ? stderr : stdout; // infer's output is text
    if (!status) mt_option_reader_print_idle(&reader, notes);
    if (!status && role && config && !options->print_config && mt_launch_rank() == 0)
        mt_options_print_unused(options, notes);
    mt_option_reader_free(&reader);
    if (status) return -1;
    if (options->print_config) return 0;
    if (program == MT_PROGRAM_TRAIN && role && strcmp(role, "critic") == 0)
        return mt_error_set(error, "--role critic: a critic trains beside its actor; run --role actor_train, and see "
                                   "this role with --print-config");
    bool chooses = mt_option_is_typed(&reader, MT_AT(stack.stage)) || mt_option_is_typed(&reader, MT_AT(sft));
    if (program == MT_PROGRAM_TRAIN && reader.role_rests && !chooses && !mt_options_converts(options))
        return mt_error_set(error,
                            "--role %.80s: %s does not train this role; `infer` runs it, --print-config shows "
                            "it, and --stage or --sft trains its model",
                            role, config);
    return 0;
}
