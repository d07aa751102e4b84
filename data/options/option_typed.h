/* option_typed.h: names of options in messages, as the user gave them. */
#ifndef MT_OPTION_TYPED_H
#define MT_OPTION_TYPED_H

#include "option_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Notes the name that the user gave, "--NAME" or "FILE:LINE: NAME", if it is not the option's own. Messages print it
 * instead of the option's name; if the values of the two differ (is_form), they print both. */
void mt_options_note_name(mt_run_options *options, const mt_option *row, const char *where, bool is_form);

/* Prints a message, or changes one, so that it names options as the user gave them: by another name of an option
 * ("--num-moe-experts"), by its key in a file ("run.yaml:3: num_moe_experts"), or, for another form whose values
 * differ, by both ("--data-parallel-sharding-strategy (by --use-megatron-fsdp)"). An option that another source than
 * the command line has given is followed by its origin: "--lr (run.yaml:3)". A second call changes nothing.
 * mt_options_finish and mt_options_warn do this themselves. */
void mt_options_print_typed(const mt_run_options *options, const char *text, FILE *file);
void mt_options_name_typed(const mt_run_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
