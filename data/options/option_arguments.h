/* option_arguments.h: options on a command line. */
#ifndef MT_OPTION_ARGUMENTS_H
#define MT_OPTION_ARGUMENTS_H

#include "option_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads all words of a command line behind the program's name. */
int mt_options_read_arguments(mt_option_reader *reader, int argc, char **argv, mt_error *error);

/* Finds the value of --config or another name of it; NULL if there is none. Two are an error, because one of the files
 * would not be read. */
int mt_options_find_config(const char **config, int argc, char **argv, mt_error *error);

/* The value of the last --role; NULL if there is none. */
const char *mt_options_find_role(int argc, char **argv);

#ifdef __cplusplus
}
#endif
#endif
