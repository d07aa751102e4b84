/* options.h: the options of a run, as text: command line, YAML, config.json of Hugging Face, --help. */
#ifndef MT_OPTIONS_H
#define MT_OPTIONS_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets defaults, then reads the --config file that the command line may name, the command line itself, which wins, and
 * with --load or --hf-config the model's shape from config.json. `--help` prints and exits with 0. Nothing is derived
 * or checked across options yet: when it knows the number of ranks, the caller sets vocab_size from its tokenizer if it
 * is still 0 and calls mt_options_finish. Free the options also after an error. */
int mt_options_parse(mt_options *options, mt_program program, int argc, char **argv, mt_error *error);

/* Parses what is left as text, derives what was not given and checks every rule, before anything is allocated: the only
 * validator. `world_size` is the number of ranks. May be called again after a change. A program that feeds its own data
 * passes MT_PROGRAM_LIBRARY: it needs no option of data or tokenizer, but --vocab-size. */
int mt_options_finish(mt_options *options, mt_program program, int64_t world_size, mt_error *error);

/* Sets one option by its name ("lr" or "micro_batch_size"), as the command line would: `value` is one word, or the
 * words of a list with blanks between them; "true" or "false" for a flag. */
int mt_options_set(mt_options *options, const char *name, const char *value, mt_error *error);

/* The Levenshtein distance of two names, for "did you mean": '_' in `a` equals '-'; names are cut after 64 letters. */
int mt_edit_distance(const char *a, size_t a_length, const char *b);

/* Sets every option of a struct that holds nothing yet to its default; frees what a struct holds. */
void mt_options_default(mt_options *options);
void mt_options_free(mt_options *options);

/* Reads a YAML text: names with underscores or dashes, flat or in sections, which only group; lists; true and false for
 * flags; null leaves the default. `path` is for messages. Later settings win. */
int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error);

/* Takes the model from the text of a Hugging Face config.json, except the options that were given; `path` is for
 * messages. */
int mt_options_read_hf_config(mt_options *options, const char *json, int64_t bytes, const char *path, mt_error *error);

/* Takes the model's shape from config.json of the folder options->load, or from the file options->hf_config, but for
 * options that were given. mt_options_parse does this itself. */
int mt_options_read_shape(mt_options *options, mt_error *error);

/* Writes config.json for options->hf_family (finished options), such that transformers (and this program) loads the
 * folder; the family "megatron" is read by this program only. Returns text to free. */
char *mt_options_write_hf_config(const mt_options *options);

/* Prints the options that differ from their defaults, by group. */
void mt_options_print(const mt_options *options, mt_program program, FILE *file);

/* Fails on every rank, naming the first rank and option that differ from rank 0's. Every rank calls it, after
 * mt_options_finish. */
int mt_options_agree(const mt_options *options, const mt_group *world, mt_error *error);

/* The "model_type" of a family; and the family of a name, or MT_HF_UNKNOWN. */
const char *mt_hf_family_name(mt_hf_family family);
mt_hf_family mt_hf_family_find(const char *name);

/* The index of `text` among the choices "a|b|c", or -1. */
int mt_choice_index(const char *choices, const char *text);

#ifdef __cplusplus
}
#endif
#endif
