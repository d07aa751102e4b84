/* option_roles.h: options in a file with roles, and what gives way to the command line. */
#ifndef MT_OPTION_ROLES_H
#define MT_OPTION_ROLES_H

#include "option_source.h"
#include "yaml.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the settings of the pipeline and of a role; the reader notes the keys without effect, and those refused. */
int mt_givens_add_role(mt_givens *givens, const char *role, mt_yaml *yaml, mt_option_reader *reader);

/* True if the command line has the option. */
bool mt_option_is_typed(const mt_option_reader *reader, size_t offset);

/* --clip-ratio of the command line wins over the file's two sides of the range, a side over its --clip-ratio. */
void mt_option_reader_yield_ratios(mt_option_reader *reader);

/* The command line wins over a file of roles: an option of the file that breaks a rule together with an option of the
 * command line gets its default. A run with fewer steps by --train-iters keeps the learning rates of the file's number
 * of steps. */
void mt_option_reader_yield(mt_option_reader *reader, int64_t file_iters);

/* The command line wins over a file of options too: one of the file that breaks a rule together with one of the command
 * line gets its default, and the reader notes it. */
void mt_option_reader_yield_file(mt_option_reader *reader);

/* Options of a file of roles that are for experts give way where the model has none. */
void mt_options_yield_experts(mt_run_options *options);

#ifdef __cplusplus
}
#endif
#endif
