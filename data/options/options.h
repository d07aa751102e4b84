/* options.h: reads the options of a run: command line, YAML, config.json of Hugging Face. */
#ifndef MT_OPTIONS_H
#define MT_OPTIONS_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The program that options are for. LIBRARY: any program that trains on its own data; it may set every option. */
typedef enum mt_program { MT_PROGRAM_TRAIN = 1, MT_PROGRAM_INFER = 2, MT_PROGRAM_LIBRARY = 3 } mt_program;

/* train_iters of a run with --train-epochs until its data is read: the caller sets it then and finishes again. */
enum { MT_UNKNOWN_ITERATIONS = 1000000000 };

/* Reads a YAML text: names with underscores or dashes, flat or in sections, whose names have no meaning; lists; true
 * and false for flags; null leaves the default. `path` is for messages. Later settings win. */
int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error);

/* Reads a YAML text of ROLL, verl or Trinity-RFT: the pipeline's keys and those of a role ("actor_train", "sft_train",
 * "rewards.NAME"). role_keys.c has the keys that are known: they set options, are not used here, or are refused. The
 * keys are noted in options->config_keys. */
int mt_options_read_role(mt_options *options, mt_program program, const char *role, const char *text, int64_t bytes,
                         const char *path, mt_error *error);

enum { MT_CONFIG_BYTES = 1 << 22 }; // limit of config.json and of a YAML file

/* mt_options_parse (run_options.h) without what comes from the folders of models: defaults, the YAML file of --config,
 * then the command line. `--help` prints and exits with 0. */
int mt_options_read(mt_options *options, mt_program program, int argc, char **argv, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
