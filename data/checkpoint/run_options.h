/* run_options.h: the options of a run together with the folders of its model. */
#ifndef MT_RUN_OPTIONS_H
#define MT_RUN_OPTIONS_H

#include "../options/option_finish.h"
#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets defaults, then reads the YAML file of --config, then the command line, which takes precedence, and with --load
 * or --hf-config the model of config.json. `--help` prints and exits with 0. No option is derived and no rule between
 * options is checked yet: the caller starts the ranks, sets vocab_size from its tokenizer if it is 0, and calls
 * mt_options_finish. Free the options also after an error. */
int mt_options_parse(mt_run_options *options, mt_program program, int argc, char **argv, mt_error *error);

/* Parses the remaining texts, derives values that were not given and checks all rules, before a model is created.
 * `world_size` is the number of ranks. May be called again after a change. A program with its own data passes
 * MT_PROGRAM_LIBRARY: it needs --vocab-size, but no option of data or tokenizer. */
int mt_options_finish(mt_run_options *options, mt_program program, int64_t world_size, mt_error *error);

/* The same with a function for --pipeline-model-parallel-layout auto; mt_options_finish refuses this value. See
 * mt_train_options_finish (data/plan/balance.h). */
int mt_options_finish_by(mt_run_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                         mt_error *error);

/* Takes the model's shape from config.json of the folder options->load, or from the file options->hf_config, for
 * options that were not given. If both are there, they must agree. Names ORG/NAME there and in tokenizer_model become
 * paths in the cache of Hugging Face (hf_cache.h). mt_options_parse does this itself. */
int mt_options_read_shape(mt_run_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
