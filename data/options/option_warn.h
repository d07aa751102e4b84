/* option_warn.h: options that change nothing, and values that were chosen. */
#ifndef MT_OPTION_WARN_H
#define MT_OPTION_WARN_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Prints a line for each option of a finished run that has no effect, and, for a training run, for each layout that was
 * chosen or that could take less memory. */
void mt_options_warn(const mt_run_options *options, mt_program program, FILE *file);

/* Prints a line for each option that has no effect because the run is on the CPU, also where no GPU answers
 * --device auto. */
void mt_options_warn_cpu(const mt_run_options *options, mt_program program, FILE *file);

/* Prints a line for each option that was given at its default and has no effect, because another one is missing or
 * takes its place. Other values of such options are errors. mt_options_warn does this itself. */
void mt_options_warn_defaults(const mt_run_options *options, mt_program program, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
