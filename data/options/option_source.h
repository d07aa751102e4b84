/* option_source.h: the settings of a run, as its sources name them, before they become options.
 *
 * Options take one way. Each source turns its own form into settings, a name with its values and its origin; one list
 * has those of all sources:
 *
 *   file of options   option_yaml.c    each key that is no section, of the file or of its MODEL_ARGS
 *   file of roles     option_roles.c   the keys of the pipeline and of a role, by role_keys.c
 *   command line      option_source.c  each --name with the words behind it
 *
 * mt_givens_take then goes through the list once, in the order of the sources above, which is the rule of precedence:
 * the last setting of an option wins. One function, mt_given_take, finds the option of a name, reads its values and
 * notes the origin of the option; names that are refused are collected for one report. Two values of an option within
 * one source are a contradiction, and the message has both origins; a name that MODEL_ARGS gives again replaces its
 * value, as Megatron-LM's parser does, with a note; in a file of roles, where several keys mean one
 * option, the last one wins, and --print-config lists the others. A value that names a variable that is not set
 * (${DATA_PATH}) is refused unless a later source has the option.
 *
 * Three sources stay outside the list, since --load itself is an option: the folder that a run resumes from, the
 * arguments in a checkpoint of Megatron-LM, and config.json (run_options.h). They fill in options that are not given,
 * note their origin, and contradict options that are given. Messages name an option with its origin (option_typed.h),
 * and --print-config prints the origin of each value. */
#ifndef MT_OPTION_SOURCE_H
#define MT_OPTION_SOURCE_H

#include "option_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In order of precedence. */
typedef enum mt_source { MT_SOURCE_FILE, MT_SOURCE_ROLE, MT_SOURCE_COMMAND_LINE, MT_NUM_SOURCES } mt_source;

typedef enum mt_given_form {
    MT_GIVEN_WORDS, // the words behind a name, none for a flag
    MT_GIVEN_TEXT,  // one value
    MT_GIVEN_LIST,  // a list of values
    MT_GIVEN_NULL,  // null
    MT_GIVEN_SECTION
} mt_given_form;

/* A name that a source gives. */
typedef struct mt_given {
    mt_source source;
    mt_given_form form;
    char *name;       // without dashes in front; "": words without a name
    char *position;   // before the name in messages: "run.yaml:3: ", or "" for the command line
    char *where;      // the name in messages
    long long line;   // of the file, from 1; 0: of the command line, or of an absent key; MT_YAML_COMMAND_LINE
    bool is_argument; // of MODEL_ARGS: a word of a command line
    mt_strings values;
    char *unset; // a variable of the values that is not set, which they have as it is written; NULL: none
} mt_given;

typedef struct mt_givens {
    mt_given *items;
    int64_t count;
} mt_givens;

/* Adds a setting without values. `position` and `name` are copied. */
mt_given *mt_givens_add(mt_givens *givens, mt_source source, mt_given_form form, const char *position,
                        const char *name);
void mt_givens_free(mt_givens *givens);

/* Adds the settings of the words of a command line behind the program's name. */
void mt_givens_add_arguments(mt_givens *givens, int argc, char **argv);

/* Moves the words "a.b=VALUE" of the command line that belong to no option into `overrides`, for mt_yaml_override. */
void mt_givens_split_overrides(mt_givens *givens, mt_strings *overrides);

/* The last setting of the command line for an option; NULL: there is none. */
const mt_given *mt_givens_find(const mt_givens *givens, size_t offset);

/* The file that the command line names by --config or another name of it; NULL if there is none. Two are an error,
 * because one of the files would not be read. */
int mt_givens_find_config(const mt_givens *givens, const char **config, mt_error *error);

/* Gives the options of the reader the values of all settings. *file_iters (NULL: not wanted) is --train-iters of the
 * file. Refusals wait for mt_option_reader_report. */
int mt_givens_take(const mt_givens *givens, mt_option_reader *reader, int64_t *file_iters, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
