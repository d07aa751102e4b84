/* option_reader.h: reads values of options from texts: names, their answers, refusals. */
#ifndef MT_OPTION_READER_H
#define MT_OPTION_READER_H

#include "megatron_names.h"
#include "option_table.h"
#include "options.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A name that was refused. */
typedef struct mt_refusal {
    char position[300]; // in a file ("run.yaml:3: "), or "" for the command line
    char name[112];
    char reason[300];  // reads after the name; "": unknown
    char nearest[112]; // the option with the nearest name, or ""
} mt_refusal;

/* A pass over a file and the command line. */
typedef struct mt_option_reader {
    mt_run_options *options;
    mt_program program;
    mt_refusal *refused;
    int64_t num_refused, num_uncollected;
    bool role_rests;  // the role of the file does not train
    mt_strings idle;  // names without effect, and why, in turn
    bool prints_only; // --print-config: a value with a variable that is not set has no effect
    uint64_t typed[sizeof((mt_run_options *)0)->given / sizeof(uint64_t)]; // options of the command line
} mt_option_reader;

/* The option, or the answer, that a name stands for. */
typedef struct mt_setting {
    const mt_option *row;      // NULL: no option takes the value
    mt_megatron_name megatron; // the answer to a name that is no row
} mt_setting;

/* Finds the option or the answer of a name with dashes or underscores; both are empty for an unknown name. */
mt_setting mt_setting_find(const char *name, size_t length);

/* True if the program takes the setting, with or without effect. */
bool mt_setting_is_accepted(const mt_setting *setting, mt_program program);

/* True for a word that says that no value is given: as Python writes it, or null. */
bool mt_text_is_none(const char *text);

/* True if the command line gives it without a value. */
bool mt_setting_is_flag(const mt_setting *setting);

/* The kind of value that it expects, for messages. */
const char *mt_setting_metavar(const mt_setting *setting);

/* A further refusal to fill in; NULL if there are enough. */
mt_refusal *mt_option_reader_add_refusal(mt_option_reader *reader);

/* Records a name that is no option: one that is refused, or one without effect. `value` is its value, or NULL. A
 * feature that is not supported may be off. */
void mt_option_reader_refuse(mt_option_reader *reader, const mt_setting *setting, const char *position,
                             const char *name, size_t length, const char *value);

/* True if there are refused names, which all lack one capability. */
bool mt_option_reader_lacks_one(const mt_option_reader *reader);

/* One error for all names that were refused: a line for each reason; one line where they lack one capability. */
int mt_option_reader_report(const mt_option_reader *reader, mt_error *error);

/* Prints one line with the names that have no effect, and why: each states a property that always holds, or there is
 * nothing to change. */
void mt_option_reader_print_idle(const mt_option_reader *reader, FILE *file);

/* For --strict-options: an error with the same names, if there are any. */
int mt_option_reader_refuse_idle(const mt_option_reader *reader, mt_error *error);

/* An error for a name that asks for sums of gradients in fp32 where they are in another type: it has no effect only
 * where all sums are in fp32. */
int mt_option_reader_check_sums(const mt_option_reader *reader, mt_error *error);

/* Frees what the reader owns; its options stay. */
void mt_option_reader_free(mt_option_reader *reader);

/* Gives a setting that is accepted its value, or the next one of a list. `where` names it in messages. */
int mt_setting_set(mt_option_reader *reader, const mt_setting *setting, const char *text, const char *where,
                   mt_error *error);

/* True for a value by which another program says that its field is not given, such as --max-steps -1. */
bool mt_setting_is_default(const mt_setting *setting, const char *text);

/* transformers takes --warmup-steps, --logging-steps, --eval-steps and --save-steps below 1 as a share of all steps:
 * sets the row to that of the share. */
void mt_setting_take_share(mt_setting *setting, const char *text);

/* The name of an option for messages, as the command line spells it. */
void mt_option_print_name(char where[112], const char *name, size_t length);

/* Sets one option by its name ("lr", "--lr", "micro_batch_size"), as --NAME=VALUE does on the command line, with the
 * same messages; mt_options_finish checks what depends on other options. `value` is one word, the words of a list with
 * blanks between them, or "true" or "false" for a flag. */
int mt_options_set(mt_run_options *options, const char *name, const char *value, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
