/* options.h: the options of a run.
 *
 * A value takes one way. Sources name it: the YAML file of --config (flat, or with roles as ROLL, verl and Trinity-RFT
 * have them) and the command line, which are one list of settings (option_source.h), then the folder that a run resumes
 * from and the model's config.json, which fill in options that were not given (run_options.h); with --role an option of
 * the file gives way to the command line (option_roles.h). Each name is found once, in option_table.c or among the
 * answers of megatron_names.c, and each text is read by mt_setting_set (option_reader.h), whichever source has it. Then
 * options are finished (option_finish.h): texts become the stack's values, derived values are filled in, and all rules
 * are checked. */
#ifndef MT_OPTIONS_H
#define MT_OPTIONS_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_timing_log { MT_TIMING_MAX, MT_TIMING_MINMAX, MT_TIMING_ALL } mt_timing_log;

/* Sizes of --step-batch-size-schedule. */
enum { MT_MAX_BATCH_STEPS = 32 };
enum { MT_MAX_ROLLOUT_LAG = 64 };
enum { MT_MAX_OPTIONS = 640 }; // rows of the option table

/* --ckpt-format: the kind of folder that --save writes. */
typedef enum mt_checkpoint_format {
    MT_CHECKPOINT_HF,          // a Hugging Face folder
    MT_CHECKPOINT_TORCH_DIST,  // as Megatron-Core's
    MT_CHECKPOINT_TORCH,       // Megatron-LM's older one, which is read only: the first, with a note
    MT_CHECKPOINT_FSDP_DTENSOR // Megatron-FSDP's word for parameters that ranks share: the first, until options finish
} mt_checkpoint_format;

/* --norm-mean-type, --norm-std-type: over which responses rewards are normalised. */
typedef enum mt_reward_norm { MT_REWARD_NORM_NONE, MT_REWARD_NORM_BATCH, MT_REWARD_NORM_GROUP } mt_reward_norm;

/* --router-replay: the experts that training takes. */
typedef enum mt_router_replay {
    MT_ROUTER_REPLAY_DISABLED, // the router's
    MT_ROUTER_REPLAY_R2,       // those of the old policy, when it scored the responses
    MT_ROUTER_REPLAY_R3,       // those of the generator; the old policy scores with them too
} mt_router_replay;

/* --kd-data: the samples of distillation. */
typedef enum mt_kd_data { MT_KD_OF_SFT, MT_KD_OF_PRETRAINING } mt_kd_data;

/* --self-distillation: the actor as its own teacher. */
typedef enum mt_self_distillation {
    MT_SELF_DISTILL_NONE,
    MT_SELF_DISTILL_INITIAL, // the reference model
    MT_SELF_DISTILL_LAGGING  // the actor of some iterations ago
} mt_self_distillation;

/* --rollout-is: weights of tokens that correct the policy's loss for a generator that differs from training. */
typedef enum mt_rollout_is {
    MT_ROLLOUT_IS_NONE,
    MT_ROLLOUT_IS_TOKEN,   // the ratio of the token's probabilities
    MT_ROLLOUT_IS_SEQUENCE // the product of those of its response
} mt_rollout_is;

/* The options of a run by their Megatron names, with underscores: the stack's, and the options that only files,
 * terminals, reports and rewards need. option_table.c has each one's default, range and help. A number 0 and a string
 * NULL mean "not given". The struct owns its strings and lists, also those of `stack`; everything else is plain values,
 * about 3 KB. */
typedef struct mt_run_options {
    mt_options stack;
    /* other names and forms of options of the stack, from which mt_options_finish derives these */
    int64_t make_vocab_size_divisible_by;
    bool group_query_attention, add_bias_linear;
    char *linear_attention_freq;       // as text; see stack.linear_layers
    char *hybrid_override_pattern;     // as text; see stack.hybrid_layers
    char *mtp_hybrid_override_pattern; // as text; see stack.mtp_hybrid_layers
    char *window_attn_skip_freq;       // as text, NULL: all layers have the window; see stack.window_layers
    char *no_rope_freq;                // as text, NULL: all layers have RoPE; see stack.rope_layers
    char *moe_layer_freq;              // as text; see stack.moe_layers
    mt_strings vision_full_attention_layers, vision_deepstack_layers; // see stack.vision
    bool language_model_only;                                         // no vision tower
    bool use_rope_scaling;
    int64_t rotary_seq_len_interpolation_factor;
    double yarn_mscale;
    int64_t gradient_accumulation_steps;
    double weight_decay;
    bool use_precision_aware_optimizer, use_distributed_optimizer, grad_reduce_in_bf16;
    mt_ints hierarchical_context_parallel_sizes; // a2a, ring
    int64_t num_layers_per_virtual_pipeline_stage;
    double mask_prob, short_seq_prob;     // of masked spans (t5_dataset.h), and the number of sentinels behind
    int64_t vocab_extra_ids;              // the tokenizer's vocabulary
    int64_t decoder_seq_length;           // of an encoder-decoder: stack.seq_length, once options are finished
    char *pipeline_model_parallel_layout; // as text; see stack.pipeline_letters
    bool recompute_activations, moe_layer_recompute;
    mt_strings lora_target; // names of Hugging Face modules; see stack.lora_roles
    /* the run */
    mt_device device;
    mt_ints rampup_batch_size;      // start, increment, samples
    char *step_batch_size_schedule; // "TOKENS:SIZE TOKENS:SIZE ..."
    int64_t eval_global_batch_size; // 0: that of training
    int64_t start_eval_at_iter;
    int64_t eval_interval, eval_iters, log_interval, exit_interval, check_weight_hash_across_dp_replicas_interval;
    double eval_interval_fraction, log_interval_fraction, save_interval_fraction; // of all steps; 0: not given
    double exit_duration_in_mins;
    mt_exit_signal exit_signal;
    bool exit_signal_handler, log_straggler;
    int64_t max_seqlen_per_dp_cp_rank, min_dynamic_context_parallel_size;
    /* print only */
    char *print_schedule; // an SVG file, or "-"
    int64_t print_launch; // of so many ranks at most
    bool plan, explain;   // see data/plan/planner.h
    int64_t gpus, gpus_per_host, explain_rank;
    char *gpu;          // the name of a machine, or its file
    char *memory_limit; // "15GiB"
    /* data */
    mt_strings data_path, train_data_path, valid_data_path, test_data_path;
    bool full_validation, multiple_validation_sets;
    mt_strings validation_set_names;
    char *split, *tokenizer_model, *vocab_file, *merge_file, *tokens_file;
    mt_tokenizer_type tokenizer_type;
    mt_tiktoken_pattern tiktoken_pattern;
    int64_t tiktoken_num_special_tokens;
    mt_dataloader_type dataloader_type;
    int64_t data_seed; // -1: the stack's seed; see mt_options_data_seed
    bool reset_position_ids, reset_attention_mask, eod_mask_loss, mock_data;
    bool fim_data; // filling in the middle
    double fim_rate, fim_spm_rate, fim_fragment_rate;
    char *fim_split_sample, *fim_no_prefix, *fim_prefix_token, *fim_middle_token, *fim_suffix_token, *fim_pad_token,
        *fim_eod_token;
    /* fine-tuning: samples of any length */
    bool sft, sequence_packing, variable_seq_lengths;
    int64_t train_epochs, skip_bad_samples;
    mt_chat_template chat_template;
    char *chat_template_kwargs; // JSON
    mt_loss_on loss_on;
    mt_long_samples long_samples;
    char *messages_key, *prompt_key, *query_key, *response_key, *image_key, *image_folder;
    /* after pre-training */
    bool value_head, ipo, ref_logps_in_data;
    mt_preference_variant preference_loss;
    double beta, label_smoothing;
    char *ref_load, *chosen_key, *rejected_key;
    char *teacher_load;
    mt_divergence_type kd_objective;
    int64_t logits_topk;
    double kd_temperature, distill_loss_weight, skew_lambda, adaptive_kl_alpha, kd_hidden_weight, kd_loss_scale;
    mt_distillation_balance kd_balance;
    mt_kd_data kd_data;
    mt_strings kd_hidden_layers; // see mt_options_hidden_pairs
    char *export_kd_teacher_load, *export_kd_cfg;
    /* reinforcement learning */
    int64_t rollout_lag; // up to MT_MAX_ROLLOUT_LAG
    int64_t rollout_ranks, partial_rollout_max_split, over_sampling_batch_size, max_head_offpolicyness;
    int64_t rollout_batch_size, ppo_epochs, dynamic_sampling_max_rounds, overlong_buffer_length;
    mt_adv_estimator adv_estimator;
    bool norm_adv_by_std, whiten_advantages, dynamic_sampling, overlong_mask, kl_in_reward;
    bool shuffle_prompts, shuffle_mini_batches;
    mt_strings prompt_shares;
    char *tag_key;
    double gamma, lam, reward_clip, advantage_clip, overlong_penalty, overlong_penalty_factor, kl_coef;
    mt_policy_variant pg_variant;
    double clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c, entropy_coeff, kl_loss_coef, value_clip;
    double tau_pos, tau_neg, dro_beta, kimi15_tau, opmd_tau, tis_lower_bound, tis_upper_bound;
    double topr_positive_weight, topr_negative_weight, kl_cov_ratio, ppo_kl_coef, clip_cov_ratio, clip_cov_lb,
        clip_cov_ub;
    mt_rollout_is rollout_is; // see mt_options_correction
    bool rollout_is_batch_normalize, bitwise_rollouts, moe_enable_routing_replay;
    mt_router_replay router_replay;
    char *rollout_is_threshold, *rollout_rs, *rollout_rs_threshold;
    mt_loss_aggregation loss_agg_mode;
    mt_kl_type kl_loss_type;
    mt_ints reward; // mt_reward_kind of each
    mt_reals reward_weights;
    mt_reward_norm norm_mean_type, norm_std_type;
    double episode_reward_weight, step_reward_weight;
    bool bypass_mode;
    /* on-policy distillation */
    mt_distillation_in distillation_in;
    mt_strings teachers; // KEY=FOLDER
    char *teacher_key;
    mt_self_distillation self_distillation;
    int64_t teacher_interval;
    mt_kl_type distillation_loss_mode;
    double distillation_loss_coef, distillation_max_clamp, distillation_clip_ratio_low, distillation_clip_ratio_high;
    int64_t distillation_topk;
    double distillation_min_clamp;
    bool use_task_rewards;
    char *reward_command, *reward_pattern, *reward_load, *env_command, *critic_load, *answer_key;
    int64_t env_max_turns;
    double reward_timeout_seconds, env_timeout_seconds, critic_lr;
    /* models that take turns; a size of 0: see mt_model_role_sizes */
    int64_t rollout_tensor_model_parallel_size, rollout_expert_model_parallel_size;
    int64_t teacher_tensor_model_parallel_size, teacher_pipeline_model_parallel_size;
    int64_t teacher_expert_model_parallel_size;
    int64_t ref_tensor_model_parallel_size, ref_pipeline_model_parallel_size, ref_expert_model_parallel_size;
    int64_t critic_tensor_model_parallel_size, critic_pipeline_model_parallel_size, critic_expert_model_parallel_size;
    int64_t reward_tensor_model_parallel_size, reward_pipeline_model_parallel_size, reward_expert_model_parallel_size;
    bool param_offload, grad_offload, optimizer_offload;
    /* checkpoints and reports */
    char *load, *load_adapter, *merge_adapter, *convert, *save, *hf_config, *metrics, *tensorboard_dir, *config, *role;
    bool print_config, strict_options;
    int64_t save_interval, keep_checkpoints, save_retain_interval;
    bool profile, finetune, no_load_optim, no_save_optim, no_load_rng, log_memory_to_tensorboard;
    bool use_checkpoint_opt_param_scheduler;
    int64_t timing_log_level;
    mt_timing_log timing_log_option;
    bool async_save, auto_resume, overwrite, exit_on_missing_checkpoint;
    mt_checkpoint_format ckpt_format;
    bool use_checkpoint_args; // of a checkpoint of Megatron-LM: its arguments give the model
    char *trace;              // a file for the timeline of the steps that follow, counted from 1
    int64_t trace_first_step, trace_last_step;
    /* inference */
    mt_strings prompt, image;
    bool chat;
    char *system_prompt;
    char *prompts, *prompt_tokens, *score, *out, *entropy_out, *logits_out;
    bool print_tokens;
    double top_p, min_p, repetition_penalty;
    int64_t top_k, max_new_tokens, max_sequences, num_return_sequences, max_image_tokens;
    int64_t image_min_pixels, image_max_pixels; // 0: the processor's
    int64_t inference_max_requests, inference_dynamic_batching_block_size, kv_cache_tokens, num_speculative_tokens;
    mt_strings stop;
    char *serve, *api_key, *serve_model_name, *serve_cors; // infer --serve
    mt_strings serve_adapter;                              // NAME=FOLDER
    int64_t serve_queue, serve_timeout, serve_max_body, max_prefill_tokens, inference_max_seq_length;
    uint64_t given[68]; // a bit per byte above: the user gave the option of the field that begins there (MT_GIVEN)
    /* derived from step_batch_size_schedule: the samples from which a size holds, the size */
    int64_t num_batch_steps, batch_steps[MT_MAX_BATCH_STEPS][2];
    mt_strings typed_names;          // pairs for messages: an option, and the other name that the user typed
    mt_strings config_keys;          // of --role: line, key, option, why it has no effect; for --print-config
    int32_t origins[MT_MAX_OPTIONS]; // by row of the option table: see mt_option_origin_text
    bool config_is_arguments;        // the file of --config has arguments of Megatron-LM
    int64_t config_devices;          // ranks that the file of --role names; 0: none
    /* not options: read from the model's folder */
    bool ignores_sequence_parallel, ignores_pre_softmax, ignores_save_interval, ignores_train_epochs,
        ignores_first_last_layers_bf16;             // these options were given where they have no effect
    mt_attention_backend ignores_attention_backend; // --attention-backend of a GPU, on the CPU; auto: none
    mt_strings unmet_arguments;                     // pairs: an option of config_is_arguments, and one that it needs
    mt_hf_family upcycled_family;                   // of the dense model that --moe-use-upcycling loads
    int64_t mtp_layers_stored;                      // MTP modules that the folder to load may hold, in use or not
    bool head_is_new;                               // for the stage: the folder to load has none
    int64_t weight_block_size[2];       // rows, columns per scale of the fp8 weights to load; 0: none are in fp8
    int64_t bos_token_id, eos_token_id; // -1: none
    char *special_tokens;               // ids of special tokens in config.json, as JSON; NULL: those two
    char *generation_config;            // text of the loaded folder's file of settings for generation; NULL: none
} mt_run_options;

/* The program that options are for. LIBRARY: any program that trains on its own data; it may set every option. */
typedef enum mt_program { MT_PROGRAM_TRAIN = 1, MT_PROGRAM_INFER = 2, MT_PROGRAM_LIBRARY = 3 } mt_program;

/* train_iters of a run with --train-epochs until its data is read: the caller sets it then and finishes again. */
enum { MT_UNKNOWN_ITERATIONS = 1000000000 };

/* Reads a YAML text: names with underscores or dashes, flat or in sections, whose names have no meaning; lists; true
 * and false for flags; null leaves the default. `path` is for messages. Later settings win. */
int mt_options_read_yaml(mt_run_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error);

/* Reads a YAML text of ROLL, verl or Trinity-RFT: the pipeline's keys and those of a role ("actor_train", "sft_train",
 * "rewards.NAME"). role_keys.c has the keys that are known: they set options, are not used here, or are refused. The
 * keys are noted in options->config_keys. */
int mt_options_read_role(mt_run_options *options, mt_program program, const char *role, const char *text, int64_t bytes,
                         const char *path, mt_error *error);

enum { MT_CONFIG_BYTES = 1 << 22 }; // limit of config.json and of a YAML file

/* mt_options_parse (run_options.h) without what comes from the folders of models: defaults, the YAML file of --config,
 * then the command line. `--help` prints and exits with 0. */
int mt_options_read(mt_run_options *options, mt_program program, int argc, char **argv, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
