/* option_rules.h: derives the option values that were left open, and checks the rules between values that need
 * arithmetic; the option table (option_table.c) has the ranges, and the options that one needs or excludes. Needs
 * megatron.c alone. Invariants: a message names both sides of a rule; mt_options_derive keeps no memory and may be
 * called again. */
#ifndef MT_OPTION_RULES_H
#define MT_OPTION_RULES_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The letters of a --pipeline-model-parallel-layout with repeats written out, to free; NULL with error. Commas have no
 * meaning. */
char *mt_pipeline_layout_unfold(const char *layout, mt_error *error);

/* Derives values that were not given and checks the rules that need arithmetic; mt_options_finish calls it after its
 * checks of text, of ranges, and of options that need or exclude each other. A program that fills the struct itself
 * links option_rules.c, which needs megatron.c alone, sets no field that stands for others (use_rope_scaling,
 * recompute_activations, moe_layer_recompute, rotary_seq_len_interpolation_factor, use_distributed_optimizer) and keeps
 * to the columns of option_table.c. `world_size` is the number of ranks. May be called again after a change. Afterwards
 * add_qkv_bias, attention_output_bias and mlp_bias say which linear layers have biases. */
int mt_options_derive(mt_run_options *options, mt_program program, int64_t world_size, mt_error *error);

/* With --stage rl: why an option (MT_AT) has no effect beside the others, such as "without --kl-in-reward"; NULL if it
 * has one. The choices of the other options are final, their derived values need not be. */
const char *mt_options_idle_in_rl(const mt_run_options *options, size_t offset);

/* Derives sizes from one another: the width of the MLP, the channels of a head, the query groups. */
void mt_options_derive_sizes(mt_run_options *options);

/* With add_bias_linear: sets add_qkv_bias, attention_output_bias and mlp_bias. */
void mt_options_derive_biases(mt_run_options *options);

/* True for --train-iters 0 with --load and --save: the run converts a checkpoint and reads no data. */
bool mt_options_converts(const mt_run_options *options);

/* Samples that the first `iterations` steps consume in total. */
int64_t mt_consumed_samples(const mt_run_options *options, int64_t iterations);

/* Samples that a run has consumed after `iterations` steps, if it had consumed `consumed` after `from` of them, perhaps
 * with other batches. */
int64_t mt_consumed_samples_from(const mt_run_options *options, int64_t from, int64_t consumed, int64_t iterations);

/* Parameters of the model. */
int64_t mt_num_parameters(const mt_options *options);

/* True if the samples of the stage are pairs of a chosen and a rejected response. */
bool mt_trains_on_pairs(const mt_options *options);

/* Positions of a row: --seq-length, or twice that for pairs. */
int64_t mt_row_length(const mt_options *options);

/* The sequences of a batch of an evaluation: --eval-global-batch-size, or --global-batch-size. */
int64_t mt_eval_batch_size(const mt_run_options *options);

/* True if the validation data are evaluated after an iteration: a multiple of --eval-interval, from
 * --start-eval-at-iter on. */
bool mt_validates_after(const mt_run_options *options, int64_t iteration);

/* The most evaluations of the validation data after the iterations (first, last], with one at the end of the run. */
int64_t mt_count_evaluations(const mt_run_options *options, int64_t first, int64_t last);

/* The global batch size, in sequences, of the step that begins after `consumed_samples`. It is constant, except with
 * --rampup-batch-size START INCREMENT SAMPLES: it begins at START and grows by INCREMENT in equal intervals, so that it
 * reaches --global-batch-size after SAMPLES samples. */
int64_t mt_global_batch_size(const mt_run_options *options, int64_t consumed_samples);

/* True if the user gave the option whose field begins at `offset`. */
bool mt_options_gave(const mt_run_options *options, size_t offset);

/* The seed of the order of samples or prompts, and of synthetic data: --data-seed, or else --seed. */
int64_t mt_options_data_seed(const mt_run_options *options);
#define MT_GIVEN(options, field) mt_options_gave(options, offsetof(mt_run_options, field))

/* True if --reward names this kind. */
bool mt_options_rewards(const mt_run_options *options, mt_reward_kind kind);

#ifdef __cplusplus
}
#endif
#endif
