/* option_finish.h: rules of the option table, and texts that are parsed for the struct. */
#ifndef MT_OPTION_FINISH_H
#define MT_OPTION_FINISH_H

#include "../tokens/tokenizer.h"
#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the letters of --pipeline-model-parallel-layout auto, to free; NULL with error. */
typedef char *mt_stage_balancer(const mt_run_options *options, int64_t world_size, mt_error *error);

/* --vocab-file and --merge-file as --tokenizer-type and --tokenizer-model. Once is enough. */
void mt_options_take_vocabulary(mt_run_options *options);

/* Opens the tokenizer of --tokenizer-type, which is not auto. */
int mt_options_open_tokenizer(mt_tokenizer **out, const mt_run_options *options, mt_error *error);

/* The CPU has one attention: a backend of a GPU has no effect there, which mt_options_warn notes. */
void mt_options_drop_attention_backend(mt_run_options *options);

/* The bytes of --memory-limit; 0: none. Fails if it is no number with GiB, MiB, GB or MB, or less than a MiB. */
int mt_options_memory_limit(const mt_run_options *options, int64_t *bytes, mt_error *error);

/* mt_options_finish_by (run_options.h) without what needs the files of a model, its family and its adapters.
 * `balance` may be NULL. */
int mt_options_complete(mt_run_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                        mt_error *error);

/* The rules that read derived values, after family and adapters: prompts of infer, traces, bad steps. */
int mt_options_check_run(const mt_run_options *options, mt_program program, mt_error *error);

/* True for --print-schedule without --dynamic-context-parallel, which needs no model. */
bool mt_options_draws_schedule(const mt_run_options *options);

/* True if the file of --score has samples to encode, not tokens. */
bool mt_options_score_samples(const mt_run_options *options);

#ifdef __cplusplus
}
#endif
#endif
