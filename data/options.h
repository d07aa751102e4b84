/* options.h: the options of a run, as text: command line, YAML, config.json of Hugging Face, --help. */
#ifndef MT_OPTIONS_H
#define MT_OPTIONS_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The program that options are for. LIBRARY: any program that trains on its own data; it may set every option. */
typedef enum mt_program { MT_PROGRAM_TRAIN = 1, MT_PROGRAM_INFER = 2, MT_PROGRAM_LIBRARY = 3 } mt_program;

/* Sets defaults, then reads the YAML file of --config, then the command line, which takes precedence, and with --load
 * or --hf-config the model of config.json. `--help` prints and exits with 0. No option is derived and no rule between
 * options is checked yet: the caller starts the ranks, sets vocab_size from its tokenizer if it is 0, and calls
 * mt_options_finish. Free the options also after an error. */
int mt_options_parse(mt_options *options, mt_program program, int argc, char **argv, mt_error *error);

/* train_iters of a run with --train-epochs until its data is read: the caller sets it then and finishes again. */
enum { MT_UNKNOWN_ITERATIONS = 1000000000 };

/* Parses the remaining texts, derives values that were not given and checks all rules, before a model is created.
 * `world_size` is the number of ranks. May be called again after a change. A program with its own data passes
 * MT_PROGRAM_LIBRARY: it needs --vocab-size, but no option of data or tokenizer. */
int mt_options_finish(mt_options *options, mt_program program, int64_t world_size, mt_error *error);

/* The same with a function that gives the letters of --pipeline-model-parallel-layout auto, to free, or NULL with
 * error; mt_options_finish refuses this value. See mt_train_options_finish (data/balance.h). */
typedef char *mt_stage_balancer(const mt_options *options, int64_t world_size, mt_error *error);
int mt_options_finish_by(mt_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                         mt_error *error);

/* The letters of a --pipeline-model-parallel-layout with repeats written out, to free; NULL with error. Commas have no
 * meaning. */
char *mt_pipeline_layout_unfold(const char *layout, mt_error *error);

/* Derives values that were not given and checks the rules that need arithmetic; mt_options_finish calls it after its
 * checks of text, of ranges, and of options that need or exclude each other. A program that fills the struct itself
 * links option_rules.c, which needs megatron.c alone, sets no field that stands for others (use_rope_scaling,
 * recompute_activations, moe_layer_recompute, rotary_seq_len_interpolation_factor, use_distributed_optimizer) and keeps
 * to the columns of option_table.c. `world_size` is the number of ranks. May be called again after a change. Afterwards
 * add_qkv_bias, attention_output_bias and mlp_bias say which linear layers have biases. */
int mt_options_derive(mt_options *options, mt_program program, int64_t world_size, mt_error *error);

/* With --stage rl: why an option (MT_AT) has no effect beside the others, such as "without --kl-in-reward"; NULL if it
 * has one. The choices of the other options are final, their derived values need not be. */
const char *mt_options_idle_in_rl(const mt_options *options, size_t offset);

/* Derives sizes from one another: the width of the MLP, the channels of a head, the query groups. */
void mt_options_derive_sizes(mt_options *options);

/* With add_bias_linear: sets add_qkv_bias, attention_output_bias and mlp_bias. */
void mt_options_derive_biases(mt_options *options);

/* True for --train-iters 0 with --load and --save: the run converts a checkpoint and reads no data. */
bool mt_options_converts(const mt_options *options);

/* Samples that the first `iterations` steps consume in total. */
int64_t mt_consumed_samples(const mt_options *options, int64_t iterations);

/* Samples that a run has consumed after `iterations` steps, if it had consumed `consumed` after `from` of them, perhaps
 * with other batches. */
int64_t mt_consumed_samples_from(const mt_options *options, int64_t from, int64_t consumed, int64_t iterations);

/* Sets one option by its name ("lr", "--lr", "micro_batch_size"), as --NAME=VALUE does on the command line, with the
 * same messages; mt_options_finish checks what depends on other options. `value` is one word, the words of a list with
 * blanks between them, or "true" or "false" for a flag. */
int mt_options_set(mt_options *options, const char *name, const char *value, mt_error *error);

/* The Levenshtein distance of two names, for "did you mean": '_' in `a` equals '-'; names are cut after 64 letters. */
int mt_edit_distance(const char *a, size_t a_length, const char *b);

/* Sets every option to its default, in a struct that is not in use; frees the strings of a struct. */
void mt_options_default(mt_options *options);
void mt_options_free(mt_options *options);

/* Reads a YAML text: names with underscores or dashes, flat or in sections, whose names have no meaning; lists; true
 * and false for flags; null leaves the default. `path` is for messages. Later settings win. */
int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error);

/* Reads a YAML text of ROLL, verl or Trinity-RFT: the pipeline's keys and those of a role ("actor_train", "sft_train",
 * "rewards.NAME"). role_keys.c has the keys that are known: they set options, are not used here, or are refused. The
 * keys are noted in options->config_keys. */
int mt_options_read_role(mt_options *options, mt_program program, const char *role, const char *text, int64_t bytes,
                         const char *path, mt_error *error);

/* For --print-config: prints each key of a file of roles with the option that it sets, or the reason why it has no
 * effect; then the options that differ from their defaults, finished for `ranks`. `error`: the reason why they make no
 * run, or NULL. With --print-config mt_options_parse looks for no model. */
void mt_options_print_config(const mt_options *options, mt_program program, int64_t ranks, const mt_error *error,
                             FILE *file);

/* The number of ranks to finish printed options for: the ranks that run, or, if one rank runs and the layout needs
 * more, the devices in the file of --role, or the ranks of the layout. */
int64_t mt_options_printed_ranks(const mt_options *options, int64_t world_size);

/* Takes the model from the text of a Hugging Face config.json, except the options that were given; `path` is for
 * messages. */
int mt_options_read_hf_config(mt_options *options, const char *json, int64_t bytes, const char *path, mt_error *error);

/* The folder that options->load means: itself, its latest checkpoint, or, if the run continues in options->save and the
 * latest is damaged, the one before. To free; NULL with error. */
char *mt_options_load_folder(const mt_options *options, mt_error *error);

/* Takes the model's shape from config.json of the folder options->load, or from the file options->hf_config, for
 * options that were not given. If both are there, they must agree. Names ORG/NAME there and in tokenizer_model become
 * paths in the cache of Hugging Face (hf_cache.h). mt_options_parse does this itself. */
int mt_options_read_shape(mt_options *options, mt_error *error);

/* config.json of finished options, to free: transformers and this program load it; only this program loads the family
 * "megatron". */
char *mt_options_write_hf_config(const mt_options *options);

/* Prints the options that differ from their defaults, by group. */
void mt_options_print(const mt_options *options, mt_program program, FILE *file);

/* Prints a line for each option of a finished run that has no effect, and, for a training run, for each layout that was
 * chosen or that could take less memory. */
void mt_options_warn(const mt_options *options, mt_program program, FILE *file);

/* Prints a line for each option that was given at its default and has no effect, because another one is missing or
 * takes its place. Other values of such options are errors. mt_options_warn does this itself. */
void mt_options_warn_defaults(const mt_options *options, mt_program program, FILE *file);

/* Prints a message, or changes one, so that it names options as the user gave them: by another name of an option
 * ("--num-moe-experts"), by its key in a file ("run.yaml:3: num_moe_experts"), or, for another form whose values
 * differ, by both ("--data-parallel-sharding-strategy (by --use-megatron-fsdp)"). A second call changes nothing.
 * mt_options_finish and mt_options_warn do this themselves. */
void mt_options_print_typed(const mt_options *options, const char *text, FILE *file);
void mt_options_name_typed(const mt_options *options, mt_error *error);

/* If the options of a rank differ from rank 0's, all ranks return an error with that rank and option. Every rank calls
 * it, after mt_options_finish. */
int mt_options_agree(const mt_options *options, const mt_group *world, mt_error *error);

/* The "model_type" of a family; and the family of a name, or MT_HF_UNKNOWN. */
const char *mt_hf_family_name(mt_hf_family family);
mt_hf_family mt_hf_family_find(const char *name);

/* The index of `text` among the choices "a|b|c", or -1. */
int mt_choice_index(const char *choices, const char *text);

/* Parameters of the model. */
int64_t mt_num_parameters(const mt_options *options);

/* True if the samples of the stage are pairs of a chosen and a rejected response. */
bool mt_trains_on_pairs(const mt_options *options);

/* Positions of a row: --seq-length, or twice that for pairs. */
int64_t mt_row_length(const mt_options *options);

/* The global batch size, in sequences, of the step that begins after `consumed_samples`. It is constant, except with
 * --rampup-batch-size START INCREMENT SAMPLES: it begins at START and grows by INCREMENT in equal intervals, so that it
 * reaches --global-batch-size after SAMPLES samples. */
int64_t mt_global_batch_size(const mt_options *options, int64_t consumed_samples);

/* True if the user gave the option whose field begins at `offset`. */
bool mt_options_gave(const mt_options *options, size_t offset);
#define MT_GIVEN(options, field) mt_options_gave(options, offsetof(mt_options, field))

#ifdef __cplusplus
}
#endif
#endif
