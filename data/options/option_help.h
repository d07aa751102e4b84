/* option_help.h: the option table as text: --help, the printed configuration, a man page, a bash completion. */
#ifndef MT_OPTION_HELP_H
#define MT_OPTION_HELP_H

#include "option_source.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Answers --help, --help WORD and --version on rank 0, and ends the program; returns if they are not among the
 * arguments. */
void mt_options_help(mt_program program, const mt_givens *givens);

/* Prints how many keys of the file of --role set options, and the others by reason. */
void mt_options_print_unused(const mt_run_options *options, FILE *file);

/* For --print-config: prints each key of a file of roles with the option that it sets, or the reason why it has no
 * effect; then the options that differ from their defaults, finished for `ranks`, with the origin of each value.
 * `error`: the reason why they make no run, or NULL. With --print-config mt_options_parse looks for no model. */
void mt_options_print_config(const mt_run_options *options, mt_program program, int64_t ranks, const mt_error *error,
                             FILE *file);

/* The number of ranks to finish printed options for: the ranks that run, or, if one rank runs and the layout needs
 * more, the devices in the file of --role, or the ranks of the layout. */
int64_t mt_options_printed_ranks(const mt_run_options *options, int64_t world_size);

/* Prints the options that differ from their defaults, by group. */
void mt_options_print(const mt_run_options *options, mt_program program, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
