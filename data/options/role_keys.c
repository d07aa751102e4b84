/* role_keys.c: the keys of YAML files with roles, by section. A key that maps to an option works as soon as the option
 * table has a row of that name. */
#include "role_keys.h"

#include "option_table.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most keys take the values as they are

#define ROLL_WORKERS "actor_train actor_infer critic reference sft_train student teacher"
#define ROLL_TRAINS  "actor_train sft_train student critic reward"
#define ACTOR        "actor_train actor_infer reference sft_train"
#define LEARNER      "actor_train critic"
#define KL_TYPES                                                                                                       \
    "kl=k1|mse=k2|low_var_kl=k3|full=!the KL of whole distributions is not computed: take k1, k2, k3 or abs"
#define TRINITY_KL "low_var_kl=k3|none=none|*=!take k1, k2, k3 or abs|k1=k1|k2=k2|k3=k3|abs=abs"
#define LR_STYLES                                                                                                      \
    "constant_with_warmup=constant|inverse_sqrt=inverse-square-root|warmup_stable_decay=WSD|cosine_with_restarts=!"    \
    "the "                                                                                                             \
    "learning rate has no restarts: take cosine|polynomial=!take linear, or another of --lr-decay-style"
#define OPTIMIZERS "adam=adam|adamw=adam|*=!take adam; --optimizer on the command line has others"
#define DTYPES                                                                                                         \
    "bf16=true|bfloat16=true|fp32=false|float32=false|fp16=--fp16|float16=--fp16|auto=|*=!expects bf16, fp16 or fp32"
#define ATTENTION                                                                                                      \
    "fa2=flash|flash_attention_2=flash|fa3=flash|flash_attention_3=flash|sdpa=auto|eager=unfused|disabled=unfused|"    \
    "fused=cudnn|local=unfused"

#define FUSED "a fused matrix has one adapter there: take type canonical_lora, with linear_q or linear_fc1_gate"
#define CANONICAL                                                                                                      \
    "linear_q=q_proj|linear_k=k_proj|linear_v=v_proj|linear_proj=o_proj|linear_fc1_gate=gate_proj|"                    \
    "linear_fc1_up=up_proj|linear_fc2=down_proj|linear_qkv=!" FUSED "|linear_fc1=!" FUSED

/* Other engines, and reasons. */
#define HYDRA          "hydra"
#define RAY            "Ray and its processes"
#define TRACKERS       "trackers (here --tensorboard-dir and --metrics)"
#define PYTHON         "ROLL's Python classes"
#define SERVER         "the generating engine (vllm, sglang)"
#define TRANSFORMERS   "transformers"
#define TRINITY        "Trinity-RFT's explorer and buffer"
#define VALIDATION     "the validation of responses: a validation here computes losses"
#define SAMPLERS       "samples come from all files alike, without shares of domains"
#define CHECKPOINTS    "formats of checkpoints: here they are Hugging Face folders with the optimizer's state"
#define ANOTHER_LAYOUT "the trained model's, or on another layout none"
#define DIST_FOLDER    "weights are read from the Hugging Face folder of the model's path: convert them, and set it to"
#define DRAWN          "each iteration draws its own responses"
#define TEMPLATES      "the tokenizer's folder has the template, and --chat-template another"
#define ENGINE         "the choice of an engine: here it is this program"
#define STRATEGIES                                                                                                     \
    "megatron_train|megatron_infer|deepspeed_train|deepspeed_infer|fsdp2_train|fsdp2_infer|hf_infer|vllm|sglang|"      \
    "diffusion_deepspeed_train"
#define PROFILERS "profilers (here --profile and --trace)"
#define SCORES    "scoring, whose micro-batches are those of training"
#define GAPLESS                                                                                                        \
    "corrections of the generator's log-probabilities are verl's here: set it to false, and give --rollout-is or "     \
    "--rollout-rs"
#define ENVIRONMENTS "environments, which do not run here: prompts come from --data-path, rewards from --reward"
#define PADDING      "batches with padding: --sequence-packing and --variable-seq-lengths have none"
#define BY_LENGTH    "batching by length: here --sequence-packing evens the work of ranks"

static const mt_role_key keys[] = {
    /* ---- ROLL: the pipeline */
    {"roll", "hydra defaults", MT_KEY_UNUSED, HYDRA},
    {"roll", "exp_name model_name", MT_KEY_UNUSED, TRACKERS},
    {"roll", "track_with track_name tracker_kwargs logging_dir save_logging_board_dir", MT_KEY_UNUSED, TRACKERS},
    {"roll",
     "system_envs num_nodes num_gpus_per_node rpc_timeout local_rank model_update_buffer_size_mb model_download_type "
     "base_dir",
     MT_KEY_UNUSED, RAY},
    {"roll",
     "profiler_timeline profiler_memory profiler_output_dir length_profiler_dir report_length_and_rewards "
     "rollout_dump_dir",
     MT_KEY_UNUSED, PROFILERS},
    {"roll", "rollout_mock", MT_KEY_SECTION, "mock"},
    {"mock", "enable dump_dir", MT_KEY_UNUSED, PROFILERS},
    {"mock", "mode", MT_KEY_FIXED, "responses are drawn, not read from a dump", "dump"},
    {"roll", "checkpoint_config", MT_KEY_UNUSED, "uploads of checkpoints (here --save writes them)"},
    {"roll", "logits_transfer_backend", MT_KEY_UNUSED, "transfers between processes: teacher and student share them"},
    {"roll",
     "generate_opt_level is_num_return_sequences_expand max_running_requests is_use_additional_prompts "
     "use_additional_prompts max_additional_running_prompts router_args",
     MT_KEY_UNUSED, SERVER},
    {"roll", "user_defined_rollout_loop_cls", MT_KEY_FIXED, "responses are drawn by this program",
     "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"},
    {"roll", "train_batch_size", MT_KEY_UNUSED,
     "reading: an update has per_device_train_batch_size x gradient_accumulation_steps x ranks, and max_steps counts "
     "updates"},
    {"roll", "val_batch_size val_greedy val_n_sample val_prompt_length val_sequence_length", MT_KEY_UNUSED, VALIDATION},
    {"roll", "seed", MT_KEY_OPTION, "seed"},
    {"roll", "output_dir", MT_KEY_OPTION, "save", NULL, ROLL_TRAINS},
    {"roll", "max_steps", MT_KEY_OPTION, "train-iters", "-1=|0=", ROLL_TRAINS},
    {"roll", "save_steps", MT_KEY_OPTION, "save-interval", "-1=|0=", ROLL_TRAINS},
    {"roll", "max_ckpt_to_keep", MT_KEY_OPTION, "keep-checkpoints", "0=", ROLL_TRAINS},
    {"roll", "logging_steps", MT_KEY_OPTION, "log-interval", NULL, ROLL_TRAINS},
    {"roll", "eval_steps", MT_KEY_OPTION, "eval-interval", "-1=|0=", ROLL_TRAINS},
    {"roll", "resume_from_checkpoint", MT_KEY_OPTION, "auto-resume",
     "*=!expects true or false; a folder to resume from is --load DIR|true=true|false=false", ROLL_TRAINS},
    {"roll", "max_grad_norm", MT_KEY_OPTION, "clip-grad", NULL, ROLL_TRAINS},
    {"roll", "sequence_length", MT_KEY_OPTION, "seq-length"},
    {"roll", "prompt_length", MT_KEY_LENGTH, "seq-length"},
    {"roll", "response_length", MT_KEY_OPTION, "max-new-tokens", NULL, "actor_train actor_infer"},
    {"roll", "pretrain", MT_KEY_MODEL, "load", NULL, ACTOR},
    {"roll", "reward_pretrain", MT_KEY_MODEL, "load", NULL, "critic reward rewards"},
    {"roll", "reward_pretrain", MT_KEY_OPTION, "critic-load", NULL, "actor_train"},
    {"roll", "student_pretrain", MT_KEY_MODEL, "load", NULL, "student"},
    {"roll", "teacher_pretrain", MT_KEY_OPTION, "teacher-load", NULL, "student"},
    {"roll", "teacher_pretrain", MT_KEY_MODEL, "load", NULL, "teacher"},
    {"roll", "global_template", MT_KEY_OPTION, "chat-template", "native=auto"},
    {"roll", "validation", MT_KEY_SECTION, "validation"},
    // fine-tuning, distillation, preferences
    {"roll", "prompt_key question_key", MT_KEY_OPTION, "prompt-key"},
    {"roll", "query_key", MT_KEY_OPTION, "query-key"},
    {"roll", "response_key answer_key", MT_KEY_OPTION, "response-key"},
    {"roll", "system_key", MT_KEY_REFUSED, "a system prompt is the first of a list of messages: give --messages-key"},
    {"roll", "chosen_key", MT_KEY_OPTION, "chosen-key", NULL, "actor_train", .accepted = "chosen"},
    {"roll", "rejected_key", MT_KEY_OPTION, "rejected-key", NULL, "actor_train", .accepted = "rejected"},
    {"roll", "beta", MT_KEY_OPTION, "beta", NULL, "actor_train"},
    {"roll", "label_smoothing", MT_KEY_OPTION, "label-smoothing", NULL, "actor_train"},
    {"roll", "ipo", MT_KEY_OPTION, "ipo", NULL, "actor_train"},
    {"roll", "kd_objective", MT_KEY_OPTION, "kd-objective", NULL, "student"},
    {"roll", "kd_temperature", MT_KEY_OPTION, "kd-temperature", NULL, "student"},
    {"roll", "teacher_temperature", MT_KEY_OPTION, "teacher-temperature", NULL, "student", .accepted = "1|1.0"},
    {"roll", "adaptive_kl_alpha", MT_KEY_OPTION, "adaptive-kl-alpha", NULL, "student"},
    {"roll", "skew_lambda", MT_KEY_OPTION, "skew-lambda", NULL, "student"},
    {"roll", "logits_topk", MT_KEY_OPTION, "logits-topk", NULL, "student"},
    {"roll", "distill_loss_weight", MT_KEY_OPTION, "distill-loss-weight", NULL, "student"},
    {"roll", "distill_on_prompt", MT_KEY_OPTION, "loss-on", "true=all|false=responses", "student"},
    // reinforcement learning
    {"roll", "rollout_batch_size", MT_KEY_TRAJECTORIES, "rollout-batch-size", NULL, LEARNER},
    {"roll", "num_return_sequences_in_group", MT_KEY_OPTION, "num-return-sequences", NULL,
     "actor_train actor_infer critic"},
    {"roll", "adv_estimator", MT_KEY_ESTIMATOR, "adv-estimator", NULL, LEARNER},
    {"roll", "ppo_epochs", MT_KEY_OPTION, "ppo-epochs", NULL, LEARNER},
    {"roll", "gamma", MT_KEY_OPTION, "gamma", NULL, LEARNER},
    {"roll", "lambd", MT_KEY_OPTION, "lam", NULL, LEARNER},
    {"roll", "value_clip", MT_KEY_OPTION, "value-clip", NULL, LEARNER},
    {"roll", "reward_clip", MT_KEY_OPTION, "reward-clip", NULL, LEARNER},
    {"roll", "advantage_clip", MT_KEY_OPTION, "advantage-clip", NULL, LEARNER},
    {"roll", "whiten_advantages", MT_KEY_OPTION, "whiten-advantages", NULL, LEARNER},
    {"roll", "pg_clip", MT_KEY_OPTION, "clip-ratio", NULL, LEARNER},
    {"roll", "pg_clip_low", MT_KEY_OPTION, "clip-ratio-low", NULL, LEARNER},
    {"roll", "pg_clip_high", MT_KEY_OPTION, "clip-ratio-high", NULL, LEARNER},
    {"roll", "use_pg_clip_range", MT_KEY_FIXED, "pg_clip_low and pg_clip_high hold where they are given", "true"},
    {"roll", "dual_clip_loss", MT_KEY_DUAL_CLIP, "clip-ratio-c", NULL, LEARNER},
    {"roll", "loss_agg_mode", MT_KEY_OPTION, "loss-agg-mode", NULL, LEARNER},
    {"roll", "use_kl_loss", MT_KEY_FIXED, "--kl-loss-coef 0 is none", "true|false"},
    {"roll", "kl_loss_coef", MT_KEY_LOSS_COEF, "kl-loss-coef", NULL, LEARNER},
    {"roll", "kl_penalty", MT_KEY_REWARD_KL, "kl-loss-type", KL_TYPES, LEARNER}, // that of the loss is k3
    {"roll", "add_token_level_kl", MT_KEY_OPTION, "kl-in-reward", NULL, LEARNER},
    {"roll", "init_kl_coef", MT_KEY_OPTION, "kl-coef", NULL, LEARNER},
    {"roll", "target_kl", MT_KEY_REFUSED, "the weight of the divergence is constant"},
    {"roll", "kl_horizon", MT_KEY_UNUSED, "target_kl, which is not supported"},
    {"roll", "entropy_loss_coef", MT_KEY_OPTION, "entropy-coeff", NULL, LEARNER},
    {"roll", "max_len_mask", MT_KEY_OPTION, "overlong-mask", NULL, LEARNER},
    {"roll", "difficulty_mask", MT_KEY_OPTION, "dynamic-sampling", NULL, LEARNER},
    {"roll", "difficulty_low_threshold difficulty_high_threshold", MT_KEY_GROUP_LIMIT,
     "groups whose rewards are all alike are dropped", NULL, LEARNER},
    {"roll", "norm_std_type", MT_KEY_OPTION, "norm-std-type",
     "batch=batch|group=group|*=!rewards have no running statistics: take batch or group", LEARNER},
    {"roll", "norm_mean_type", MT_KEY_OPTION, "norm-mean-type",
     "batch=batch|group=group|*=!rewards have no running statistics: take batch or group", LEARNER},
    {"roll", "reward_norm", MT_KEY_REWARD_NORM, "norm-mean-type",
     "batch=batch|group=group|None=none|*=!rewards have no running statistics: take batch or group", LEARNER},
    {"roll", "reward_shift reward_scale", MT_KEY_FIXED,
     "reward_norm divides by the deviation too, unless reward_shift is true", "true|false"},
    {"roll", "episode_reward_weight", MT_KEY_OPTION, "episode-reward-weight", NULL, LEARNER},
    {"roll", "step_reward_weight", MT_KEY_OPTION, "step-reward-weight", NULL, LEARNER},
    {"roll", "use_policy_loss_type", MT_KEY_OPTION, "pg-variant", "PPO=ppo|PG=vanilla", LEARNER},
    {"roll", "importance_sampling", MT_KEY_OPTION, "pg-variant", "token=ppo|seq=gspo", LEARNER},
    {"roll",
     "difficulty_loss_weight length_loss_weight error_max_len_clip use_topr_loss balance_length whiten_rewards "
     "use_reward_scaling use_reward_norm add_len_reward",
     MT_KEY_REFUSED, "responses are weighted by their advantages alone", NULL, LEARNER},
    {"roll", "async_generation_ratio", MT_KEY_OPTION, "rollout-lag",
     "0=0|0.0=0|1=1|1.0=1|2=2|2.0=2|3=3|3.0=3|4=4|4.0=4|*=!whole batches wait for their iteration: take 0 to 4, or "
     "--rollout-lag on the command line",
     LEARNER},
    {"roll", "critic_warmup", MT_KEY_FIXED, "actor and critic train from the first iteration on", "0"},
    {"roll", "l2", MT_KEY_FIXED, "weight_decay is the optimizer's", "0|0.0"},
    {"roll", "postive_loss_coef use_topr_neg_loss_coef", MT_KEY_FIXED,
     "responses are weighted by their advantages alone", "0|0.0"},
    {"roll", "rl_loss_coef", MT_KEY_FIXED, "the policy's loss has weight 1", "1|1.0"},
    {"roll", "mask_type", MT_KEY_FIXED, "max_len_mask is for the loss", "loss"},
    {"roll", "minibatch_data_iter_num", MT_KEY_FIXED, "a mini-batch is used once in an epoch", "1"},
    {"roll", "enable_reference", MT_KEY_FIXED, "there is a reference where a divergence from it counts", "true|false"},
    {"roll", "enable_old_logprobs_recompute force_disable_old_logprobs_recompute", MT_KEY_FIXED,
     "old log-probabilities are computed once in an iteration", "true|false"},
    {"roll",
     "train_infer_ratio_mask train_infer_diff_mask train_infer_ratio_seq_mask train_infer_diff_seq_mask "
     "use_rollout_importance_sampling_ratio",
     MT_KEY_REFUSED, GAPLESS, NULL, LEARNER},
    {"roll",
     "train_infer_ratio_threshold_low train_infer_ratio_threshold_high train_infer_diff_threshold_low "
     "train_infer_diff_threshold_high train_infer_ratio_seq_threshold_low train_infer_ratio_seq_threshold_high "
     "train_infer_diff_seq_threshold_low train_infer_diff_seq_threshold_high "
     "rollout_importance_sampling_ratio_upper_bound",
     MT_KEY_UNUSED, "corrections of the generator's log-probabilities, which are not supported"},
    {"roll", "ratio_type", MT_KEY_FIXED, "a response has one segment", "token"},
    {"roll",
     "custom_envs val_env_manager env_manager_cls max_actions_per_traj math_agent_system_template math_agent_template "
     "agent_runner_cls default_history_length",
     MT_KEY_UNUSED, ENVIRONMENTS, NULL, LEARNER},
    {"roll", "train_env_manager", MT_KEY_SECTION, "environments", NULL, LEARNER},
    {"environments", "group_size", MT_KEY_OPTION, "num-return-sequences"},
    {"environments", "*", MT_KEY_UNUSED, ENVIRONMENTS},
    {"roll", "max_tokens_per_step", MT_KEY_OPTION, "max-new-tokens", NULL, "actor_train"},
    {"roll", "step_reward_gamma", MT_KEY_UNUSED, "later steps of an environment: a response is one", NULL, LEARNER},
    {"roll", "batch_adjust_mode", MT_KEY_UNUSED, "batches of environments: those of prompts are whole", NULL, LEARNER},
    {"roll", "reward_normalization", MT_KEY_SECTION, "reward_normalization", NULL, LEARNER},
    {"reward_normalization", "grouping", MT_KEY_GROUPING, "norm-mean-type"},
    {"reward_normalization", "method", MT_KEY_NORM_METHOD, "norm-mean-type",
     "mean=mean|mean_std=mean_std|identity=none|*=!rewards are not cut after their normalization: take mean, mean_std "
     "or identity"},
    {"reward_normalization", "norm_mean_type", MT_KEY_OPTION, "norm-mean-type", "batch=batch|group=group|None=none"},
    {"reward_normalization", "norm_std_type", MT_KEY_OPTION, "norm-std-type", "batch=batch|group=group|None=none"},
    {"roll", "render_save_dir", MT_KEY_UNUSED, "pictures of environments"},
    {"roll", "reward_system_config", MT_KEY_UNUSED, PYTHON},
    {"roll", "world_size", MT_KEY_UNUSED, RAY},
    // on-policy distillation (role_config.c adds its options)
    {"roll", "is_pure_opd use_opd", MT_KEY_FIXED, "it sets --distillation-in", "true|false", LEARNER},
    {"roll", "opd_kl_coef", MT_KEY_FIXED, "with use_opd it is --distillation-loss-coef", "*", LEARNER},
    {"roll", "pure_opd_pipeline_type", MT_KEY_FIXED, ENVIRONMENTS, "rlvr"},
    {"roll", "opsd_mode", MT_KEY_REFUSED, "a teacher reads the student's prompt: --self-distillation has no other"},
    {"roll", "student_train", MT_KEY_SECTION, "role", NULL, "actor_train"},
    {"roll", "student_infer", MT_KEY_SECTION, "role", NULL, "actor_infer"},
    {"roll", "student_infer", MT_KEY_SECTION, "rollouts", NULL, "actor_train"},
    {"roll", "train_infer_correction", MT_KEY_SECTION, "correction"}, // of training
    {"correction", "filters", MT_KEY_REFUSED, GAPLESS, NULL, LEARNER},
    {"correction", "is_weight", MT_KEY_SECTION, "correction.weight"},
    {"correction.weight", "enabled", MT_KEY_REFUSED, GAPLESS, NULL, LEARNER},
    {"correction.weight", "weight_type upper_bound detach", MT_KEY_UNUSED, "enabled, which is not supported"},
    {"roll", "dataset_filter", MT_KEY_SECTION, "filter"},
    {"filter", "source min_difficulty max_difficulty", MT_KEY_REFUSED, "all samples of the files are read"},
    {"filter", "num_samples", MT_KEY_FIXED, "all samples of the files are read", "0"},
    {"roll", "vlm_filter", MT_KEY_UNUSED, "filters of prompts: all of the files are read"},
    {"roll", "reward_model", MT_KEY_UNUSED, PYTHON},
    {"roll", "error_max_len_threshold", MT_KEY_UNUSED, "error_max_len_clip, which is not supported"},
    {"roll", "is_offload_states", MT_KEY_OFFLOAD, "param-offload", NULL, "actor_train student"},
    {"roll", "is_offload_optimizer_states_in_train_step", MT_KEY_FIXED, "the optimizer's state is in use in a step",
     "true|false"},
    // its roles
    {"roll", "actor_train actor_infer reference critic reward sft_train student teacher", MT_KEY_SECTION, "role", NULL,
     "="},
    {"roll", "actor_infer", MT_KEY_SECTION, "rollouts", NULL, "actor_train"},
    {"roll", "reference", MT_KEY_SECTION, "references", NULL, "actor_train"},
    {"roll", "critic", MT_KEY_SECTION, "critics", NULL, "actor_train"},
    {"roll", "reward", MT_KEY_SECTION, "reward_models", NULL, "actor_train"},
    {"roll", "teacher", MT_KEY_SECTION, "teachers", NULL, "student actor_train"},
    {"roll", "rewards", MT_KEY_SECTION, "rewards", NULL, "="},
    {"rewards", "*", MT_KEY_SECTION, "role", NULL, "="},
    // the parts of other roles that the run of an actor or of a student has use for
    {"rollouts", "generating_args", MT_KEY_SECTION, "generating_args"},
    {"rollouts", "strategy_args", MT_KEY_SECTION, "rollouts.strategy_args"},
    {"rollouts", "*", MT_KEY_OTHERS, "the role actor_infer", "role"},
    {"rollouts.strategy_args", "strategy_config", MT_KEY_SECTION, "rollouts.strategy"},
    {"rollouts.strategy_args", "*", MT_KEY_OTHERS, "the role actor_infer", "strategy_args"},
    {"rollouts.strategy", "tensor_model_parallel_size tensor_parallel_size tp_size", MT_KEY_OPTION,
     "rollout-tensor-model-parallel-size"},
    {"rollouts.strategy", "expert_model_parallel_size ep_size", MT_KEY_OPTION, "rollout-expert-model-parallel-size"},
    {"rollouts.strategy", "*", MT_KEY_UNUSED, "the role actor_infer"},
    {"references", "model_args", MT_KEY_SECTION, "references.model"},
    {"references", "strategy_args", MT_KEY_SECTION, "references.strategy_args"},
    {"references", "*", MT_KEY_OTHERS, "the role reference", "role"},
    {"references.strategy_args", "strategy_config", MT_KEY_STRATEGY, "references.strategy"},
    {"references.strategy_args", "*", MT_KEY_OTHERS, "the role reference", "strategy_args"},
    {"references.strategy", "tensor_model_parallel_size", MT_KEY_OPTION, "ref-tensor-model-parallel-size"},
    {"references.strategy", "pipeline_model_parallel_size", MT_KEY_OPTION, "ref-pipeline-model-parallel-size"},
    {"references.strategy", "expert_model_parallel_size", MT_KEY_OPTION, "ref-expert-model-parallel-size"},
    {"references.strategy", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"references.strategy", "*", MT_KEY_OTHERS, "the role reference", "strategy_config"},
    {"teachers", "model_args", MT_KEY_SECTION, "teachers.model", NULL, "actor_train"},
    {"teachers", "model_args", MT_KEY_OTHERS, "the role teacher", "role"},
    {"teachers.model", "model_name_or_path", MT_KEY_OPTION, "teacher-load"},
    {"teachers.model", "*", MT_KEY_OTHERS, "the role teacher", "model_args"},
    {"teachers", "strategy_args", MT_KEY_SECTION, "teachers.strategy_args"},
    {"teachers", "*", MT_KEY_OTHERS, "the role teacher", "role"},
    {"teachers.strategy_args", "strategy_config", MT_KEY_STRATEGY, "teachers.strategy"},
    {"teachers.strategy_args", "*", MT_KEY_OTHERS, "the role teacher", "strategy_args"},
    {"teachers.strategy", "tensor_model_parallel_size", MT_KEY_OPTION, "teacher-tensor-model-parallel-size"},
    {"teachers.strategy", "pipeline_model_parallel_size", MT_KEY_OPTION, "teacher-pipeline-model-parallel-size"},
    {"teachers.strategy", "expert_model_parallel_size", MT_KEY_OPTION, "teacher-expert-model-parallel-size"},
    {"teachers.strategy", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"teachers.strategy", "*", MT_KEY_OTHERS, "the role teacher", "strategy_config"},
    {"references.model", "model_name_or_path", MT_KEY_OPTION, "ref-load"},
    {"references.model", "*", MT_KEY_OTHERS, "the role reference", "model_args"},
    {"critics", "model_args", MT_KEY_SECTION, "critics.model"},
    {"critics", "training_args", MT_KEY_SECTION, "critics.training"},
    {"critics", "strategy_args", MT_KEY_SECTION, "critics.strategy_args"},
    {"critics", "*", MT_KEY_OTHERS, "the role critic", "role"},
    {"critics.model", "model_name_or_path", MT_KEY_OPTION, "critic-load"},
    {"critics.model", "*", MT_KEY_OTHERS, "the role critic", "model_args"},
    {"critics.training", "learning_rate", MT_KEY_OPTION, "critic-lr"},
    {"critics.training", "*", MT_KEY_OTHERS, "the role critic", "training_args"},
    {"critics.strategy_args", "strategy_config", MT_KEY_STRATEGY, "critics.strategy"},
    {"critics.strategy_args", "*", MT_KEY_OTHERS, "the role critic", "strategy_args"},
    {"critics.strategy", "tensor_model_parallel_size", MT_KEY_OPTION, "critic-tensor-model-parallel-size"},
    {"critics.strategy", "pipeline_model_parallel_size", MT_KEY_OPTION, "critic-pipeline-model-parallel-size"},
    {"critics.strategy", "expert_model_parallel_size", MT_KEY_OPTION, "critic-expert-model-parallel-size"},
    {"critics.strategy", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"critics.strategy", "*", MT_KEY_OTHERS, "the role critic", "strategy_config"},
    // the reward model of a run with --reward model
    {"reward_models", "model_args", MT_KEY_SECTION, "reward_models.model"},
    {"reward_models", "strategy_args", MT_KEY_SECTION, "reward_models.strategy_args"},
    {"reward_models", "*", MT_KEY_OTHERS, "the role reward", "role"},
    {"reward_models.model", "model_name_or_path", MT_KEY_OPTION, "reward-load"},
    {"reward_models.model", "*", MT_KEY_OTHERS, "the role reward", "model_args"},
    {"reward_models.strategy_args", "strategy_config", MT_KEY_STRATEGY, "reward_models.strategy"},
    {"reward_models.strategy_args", "*", MT_KEY_OTHERS, "the role reward", "strategy_args"},
    {"reward_models.strategy", "tensor_model_parallel_size", MT_KEY_OPTION, "reward-tensor-model-parallel-size"},
    {"reward_models.strategy", "pipeline_model_parallel_size", MT_KEY_OPTION, "reward-pipeline-model-parallel-size"},
    {"reward_models.strategy", "expert_model_parallel_size", MT_KEY_OPTION, "reward-expert-model-parallel-size"},
    {"reward_models.strategy", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"reward_models.strategy", "*", MT_KEY_OTHERS, "the role reward", "strategy_config"},

    /* ---- ROLL: a role */
    {"role", "model_args", MT_KEY_SECTION, "model_args"},
    {"role", "training_args", MT_KEY_SECTION, "training_args"},
    {"role", "data_args", MT_KEY_SECTION, "data_args"},
    {"role", "generating_args", MT_KEY_SECTION, "generating_args"},
    {"role", "strategy_args", MT_KEY_SECTION, "strategy_args"},
    {"role", "device_mapping", MT_KEY_DEVICES},
    {"role", "infer_batch_size", MT_KEY_OPTION, "micro-batch-size", NULL,
     "actor_infer reference teacher rewards reward"},
    {"role", "infer_batch_size", MT_KEY_UNUSED, SCORES},
    {"role", "use_sequence_packing", MT_KEY_OPTION, "sequence-packing"},
    {"role", "pg_variant", MT_KEY_OPTION, "pg-variant", "vanilla=gpg"}, // verl's "vanilla" is PPO's loss
    {"role", "cispo_epsilon_low", MT_KEY_OPTION, "clip-ratio-low"},
    {"role", "cispo_epsilon_high", MT_KEY_OPTION, "clip-ratio-high"},
    {"role", "cispo_use_unified_mask", MT_KEY_FIXED, "--pg-variant cispo has no mask; ppo has it", "false"},
    {"role", "tis_lower_bound", MT_KEY_OPTION, "tis-lower-bound"},
    {"role", "tis_upper_bound", MT_KEY_OPTION, "tis-upper-bound"},
    {"role", "kimi15_tau", MT_KEY_OPTION, "kimi15-tau"},
    {"role", "topr_positive_weight", MT_KEY_OPTION, "topr-positive-weight"},
    {"role", "topr_negative_weight", MT_KEY_OPTION, "topr-negative-weight"},
    {"role", "use_remove_padding", MT_KEY_UNUSED, PADDING},
    {"role", "logits_in_fp32", MT_KEY_FIXED, "the loss is computed in fp32", "true"},
    {"role", "apply_loss_scale", MT_KEY_FIXED, "the loss is a sum divided by the count of the whole step", "true"},
    {"role", "use_dynamic_batching_in_train", MT_KEY_DYNAMIC, "variable-seq-lengths", "false=", ROLL_TRAINS},
    {"role", "max_tokens_per_microbatch_in_train", MT_KEY_TOKENS, "max-seqlen-per-dp-cp-rank", NULL, ROLL_TRAINS},
    {"role", "use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer sequence_length_round_in_infer",
     MT_KEY_UNUSED, SCORES},
    {"role", "sequence_length_round_in_train", MT_KEY_UNUSED, PADDING},
    {"role", "sequence_packing_args", MT_KEY_UNUSED, BY_LENGTH},
    {"role",
     "world_size num_gpus_per_worker backend_timeout system_envs max_concurrency offload_nccl "
     "name checkpoint_config",
     MT_KEY_UNUSED, RAY},
    {"role", "worker_cls", MT_KEY_FIXED, "a class of one's own may compute another loss or other numbers",
     "roll.pipeline.base_worker.ActorWorker|roll.pipeline.base_worker.CriticWorker|"
     "roll.pipeline.rlvr.actor_worker.ActorWorker|roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker|"
     "roll.pipeline.agentic.agentic_actor_worker.ActorWorker|roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker|"
     "roll.pipeline.dpo.actor_worker.ActorWorker|roll.pipeline.sft.sft_worker.SFTWorker|"
     "roll.pipeline.distill.distill_worker.StudentWorker|roll.pipeline.distill.distill_worker.TeacherWorker",
     ROLL_WORKERS},
    {"role",
     "worker_cls reward_type code_url use_local judge_prompt "
     "judge_model_type judge_model_name judge_api_url judge_api_key format_pattern "
     "reward_manager_config",
     MT_KEY_UNUSED, PYTHON},
    {"role", "tag_included", MT_KEY_UNUSED, "domain_interleave_probs, whose shares have these tags"},
    {"role", "model_update_frequency", MT_KEY_FIXED, "the present weights generate the responses", "1"},
    {"role", "response_length_penalty_coef", MT_KEY_FIXED, "the reward is --reward's", "0|0.0"},
    {"role", "query_filter_config response_filter_config", MT_KEY_SECTION, "reward_filter"},
    {"reward_filter", "type", MT_KEY_FIXED, "all responses are trained on", "no_filter"},
    {"reward_filter", "filter_args", MT_KEY_UNUSED, "type, which is no_filter"},

    {"model_args", "model_name_or_path", MT_KEY_MODEL, "load"},
    {"model_args", "adapter_name_or_path", MT_KEY_OPTION, "load-adapter"},
    {"model_args", "dtype", MT_KEY_OPTION, "bf16", DTYPES},
    {"model_args", "flash_attn attn_implementation", MT_KEY_OPTION, "attention-backend", ATTENTION},
    {"model_args", "moe_aux_loss_coef", MT_KEY_OPTION, "moe-aux-loss-coeff"},
    {"model_args", "lora_rank", MT_KEY_OPTION, "lora-rank"},
    {"model_args", "lora_alpha", MT_KEY_OPTION, "lora-alpha"},
    {"model_args", "lora_dropout", MT_KEY_OPTION, "lora-dropout"},
    {"model_args", "lora_target", MT_KEY_OPTION, "lora-target", "all=all-linear"},
    {"model_args", "freeze_module_prefix", MT_KEY_FREEZE, "freeze-vision",
     "vision_model=true|*=!take vision_model; other parts of a model train whole, or adapters alone"},
    {"model_args", "additional_target autocast_adapter_dtype", MT_KEY_REFUSED,
     "adapters alone are trained, or the whole model"},
    {"model_args", "disable_gradient_checkpointing gradient_checkpointing_use_reentrant", MT_KEY_UNUSED,
     TRANSFORMERS " (recompute_granularity of strategy_config is Megatron's)"},
    {"model_args", "device_map vision_dp ulysses_size", MT_KEY_UNUSED, TRANSFORMERS},
    {"model_args", "model_type", MT_KEY_FIXED, "--load has its own head",
     "auto_sequence_classification|auto_token_classification|trl"},
    {"model_args", "num_labels", MT_KEY_FIXED, "a head of values has one", "1"},
    {"model_args", "model_config_kwargs", MT_KEY_SECTION, "transformer"},

    {"training_args", "learning_rate", MT_KEY_OPTION, "lr"},
    {"training_args", "per_device_train_batch_size", MT_KEY_OPTION, "micro-batch-size"},
    {"training_args", "gradient_accumulation_steps", MT_KEY_OPTION, "gradient-accumulation-steps"},
    {"training_args", "warmup_steps", MT_KEY_STEPS, "lr-warmup-iters"},
    {"training_args", "warmup_ratio", MT_KEY_OPTION, "lr-warmup-fraction"},
    {"training_args", "num_train_epochs", MT_KEY_OPTION, "train-epochs"},
    {"training_args", "max_steps", MT_KEY_OPTION, "train-iters", "-1=|0="},
    {"training_args", "lr_scheduler_type", MT_KEY_OPTION, "lr-decay-style", LR_STYLES},
    {"training_args", "max_grad_norm", MT_KEY_OPTION, "clip-grad"},
    {"training_args", "adam_epsilon", MT_KEY_OPTION, "adam-eps"},
    {"training_args", "optim", MT_KEY_OPTION, "optimizer",
     "adamw=adam|adamw_torch=adam|adamw_torch_fused=adam|adamw_hf=adam|"
     "sgd=!transformers' SGD has no momentum: take optimizer sgd and sgd_momentum 0"},
    {"training_args", "data_seed", MT_KEY_OPTION, "data-seed"},
    {"training_args", "fsdp_config", MT_KEY_UNUSED, "fsdp, which is off"},
    {"training_args", "accelerator_config", MT_KEY_ADDITIONAL, "accelerator"},
    {"accelerator", "split_batches dispatch_batches non_blocking use_configured_state", MT_KEY_FIXED, TRANSFORMERS,
     "false"},
    {"accelerator", "even_batches use_seedable_sampler", MT_KEY_FIXED, TRANSFORMERS, "true"},
    {"accelerator", "gradient_accumulation_kwargs", MT_KEY_REFUSED, "gradient_accumulation_steps says all"},
    {"training_args", "output_dir", MT_KEY_OPTION, "save"},
    {"training_args", "save_steps", MT_KEY_STEPS, "save-interval", "-1=|0="},
    {"training_args", "save_total_limit", MT_KEY_OPTION, "keep-checkpoints", "false=|False="},
    {"training_args", "logging_steps", MT_KEY_STEPS, "log-interval"},
    {"training_args", "eval_steps", MT_KEY_STEPS, "eval-interval", "false=|False=|no="},
    {"training_args", "per_device_eval_batch_size", MT_KEY_UNUSED,
     "evaluation, whose micro-batches are those of training"},
    {"training_args",
     "gradient_checkpointing gradient_checkpointing_kwargs ddp_timeout dataloader_num_workers "
     "dataloader_pin_memory remove_unused_columns save_safetensors do_train do_eval "
     "save_strategy eval_strategy evaluation_strategy logging_strategy disable_tqdm",
     MT_KEY_UNUSED, TRANSFORMERS},
    {"training_args", "report_to run_name logging_dir", MT_KEY_UNUSED, TRACKERS},
    {"training_args", "deepspeed", MT_KEY_UNUSED, "deepspeed"},

    {"data_args", "file_name", MT_KEY_FILES, "train-data-path"},
    {"data_args", "eval_file_name", MT_KEY_FILES, "valid-data-path"},
    {"data_args", "dataset_dir", MT_KEY_FIXED, "files are looked up there too", "*"},
    {"data_args", "template", MT_KEY_OPTION, "chat-template", "native=auto"},
    {"data_args", "messages", MT_KEY_OPTION, "messages-key"},
    {"data_args", "prompt", MT_KEY_OPTION, "prompt-key"},
    {"data_args", "response", MT_KEY_OPTION, "response-key"},
    {"data_args", "dataset_type", MT_KEY_FIXED, "files are JSON, JSON Lines or Parquet", "json|jsonl|parquet"},
    {"data_args", "preprocessing_num_workers cache_path overwrite_cache", MT_KEY_UNUSED, "datasets of transformers"},
    {"data_args", "interleave_probs", MT_KEY_SHARES, SAMPLERS},
    {"data_args", "domain_interleave_probs", MT_KEY_DOMAINS, "prompt-shares", NULL, "actor_train"},
    {"data_args", "tag", MT_KEY_OPTION, "tag-key", NULL, "actor_train"},
    {"data_args", "id", MT_KEY_UNUSED, "the order of samples"},
    {"data_args", "image_max_pixels", MT_KEY_OPTION, "image-max-pixels"},
    {"data_args", "image_min_pixels", MT_KEY_OPTION, "image-min-pixels"},
    {"data_args", "image_folder", MT_KEY_OPTION, "image-folder"},
    {"data_args",
     "custom_data_kwargs_func video_total_pixels video_min_pixels video_max_pixels video_fps video_max_frames "
     "video_folder",
     MT_KEY_REFUSED, "videos are not read: take files of texts and pictures"},

    {"generating_args", "max_new_tokens", MT_KEY_UNUSED,
     "the lengths of the file: a response has response_length, or sequence_length less prompt_length", NULL,
     "actor_train"},
    {"generating_args", "max_new_tokens", MT_KEY_OPTION, "max-new-tokens"},
    {"generating_args", "temperature", MT_KEY_OPTION, "temperature"},
    {"generating_args", "top_p", MT_KEY_OPTION, "top-p"},
    {"generating_args", "top_k", MT_KEY_OPTION, "top-k", "-1=0"},
    {"generating_args", "min_p", MT_KEY_OPTION, "min-p"},
    {"generating_args", "repetition_penalty", MT_KEY_OPTION, "repetition-penalty", .accepted = "1|1.0"},
    {"generating_args", "num_return_sequences", MT_KEY_UNUSED, "num_return_sequences_in_group, which replaces it", NULL,
     "actor_train"},
    {"generating_args", "num_return_sequences", MT_KEY_OPTION, "num-return-sequences", .accepted = "1"},
    {"generating_args", "stop_strings", MT_KEY_OPTION, "stop"},
    {"generating_args", "num_beams", MT_KEY_FIXED, "responses are sampled, without beams", "1"},
    {"generating_args", "do_sample", MT_KEY_FIXED, "--temperature 0 is the argmax", "true"},
    {"generating_args", "include_stop_str_in_output", MT_KEY_FIXED, "texts end before a stop string", "false"},
    {"generating_args", "logprobs max_length length_penalty", MT_KEY_UNUSED, SERVER},

    {"strategy_args", "strategy_name", MT_KEY_FIXED, ENGINE, STRATEGIES},
    {"strategy_args", "strategy_config", MT_KEY_STRATEGY, "strategy_config"},
    {"strategy_config", "additional_configs", MT_KEY_ADDITIONAL, "transformer"},
    {"strategy_config", "ckpt_format", MT_KEY_FIXED, CHECKPOINTS, "legacy"},
    {"strategy_config", "cuda_graph_scope", MT_KEY_FIXED, "decoding alone has CUDA graphs", "full"},
    {"training_args", "additional_configs", MT_KEY_ADDITIONAL, "transformer"},
    {"training_args", "ckpt_format", MT_KEY_FIXED, CHECKPOINTS, "legacy"},
    {"training_args", "cuda_graph_scope", MT_KEY_FIXED, "decoding alone has CUDA graphs", "full"},
    {"strategy_config", "save_only_model", MT_KEY_OPTION, "no-save-optim"},

    {"validation", "eval_steps", MT_KEY_UNUSED, VALIDATION},
    {"validation", "data_args", MT_KEY_SECTION, "valid_data_args"},
    {"validation", "*", MT_KEY_OTHERS, VALIDATION, "role"},
    {"valid_data_args", "file_name", MT_KEY_FILES, "valid-data-path", NULL, ROLL_TRAINS},
    {"valid_data_args", "dataset_dir", MT_KEY_FIXED, "files are looked up there too", "*"},
    {"valid_data_args", "*", MT_KEY_OTHERS, "the validation: it is read as the training data are", "data_args"},

    /* ---- verl and Trinity-RFT */
    {"verl", "hydra defaults", MT_KEY_UNUSED, HYDRA},
    {"verl", "ray_init ray_kwargs global_profiler transfer_queue", MT_KEY_UNUSED, RAY},
    {"verl", "custom_reward_function reward_manager sandbox_fusion", MT_KEY_UNUSED, "verl's Python classes"},
    {"verl", "skip", MT_KEY_SECTION, "verl.skip"},
    {"verl.skip", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.skip", "rollout rollout_tq async_rollout", MT_KEY_REFUSED, DRAWN},
    {"verl", "distillation", MT_KEY_DISTILLATION, "verl.distillation"},
    {"verl.distillation", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.distillation", "enabled", MT_KEY_FIXED, "it sets --distillation-in", "true"},
    {"verl.distillation", "n_gpus_per_node nnodes", MT_KEY_UNUSED, RAY},
    {"verl.distillation", "teacher_key", MT_KEY_TEACHER_KEY, "teacher-key", NULL, LEARNER},
    {"verl.distillation", "teacher_models", MT_KEY_TEACHERS, "teacher-load", NULL, LEARNER},
    {"verl.distillation", "distillation_loss", MT_KEY_SECTION, "verl.distillation_loss"},
    {"verl.teacher", "model_path", MT_KEY_OPTION, "teacher-load"},
    {"verl.teacher", "key", MT_KEY_FIXED, "one teacher has all prompts", "*"},
    {"verl.teacher", "inference", MT_KEY_SECTION, "verl.teacher.inference"},
    {"verl.teacher", "_target_ num_replicas", MT_KEY_UNUSED, RAY},
    {"verl.teacher.inference", "tensor_model_parallel_size", MT_KEY_OPTION, "teacher-tensor-model-parallel-size"},
    {"verl.teacher.inference", "pipeline_model_parallel_size", MT_KEY_OPTION, "teacher-pipeline-model-parallel-size"},
    {"verl.teacher.inference", "*", MT_KEY_UNUSED, SERVER},
    {"verl.teachers", "key model_path", MT_KEY_FIXED, "--teachers has it", "*"},
    {"verl.teachers", "_target_ num_replicas", MT_KEY_UNUSED, RAY},
    {"verl.teachers", "inference", MT_KEY_UNUSED,
     "layouts of several teachers: all have --teacher-*-model-parallel-size"},
    {"verl.distillation_loss", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.distillation_loss", "loss_mode", MT_KEY_OPTION, "distillation-loss-mode",
     "kl=k1|mse=k2|low_var_kl=k3|k1=k1|abs=abs|k2=k2|k3=k3|forward_kl_topk=forward_kl_topk|*=!the divergence is "
     "estimated from the tokens that the actor writes, or is over the teacher's most probable ones: take k1, k2, k3, "
     "abs "
     "or forward_kl_topk; --stage kd compares whole distributions",
     LEARNER},
    {"verl.distillation_loss", "topk", MT_KEY_DISTILL_TOPK, "distillation-topk", NULL, LEARNER},
    {"verl.distillation_loss", "log_prob_min_clamp", MT_KEY_DISTILL_TOPK, "distillation-log-prob-min-clamp", NULL,
     LEARNER},
    {"verl.distillation_loss", "use_chunked_topk chunked_topk_chunk_size", MT_KEY_UNUSED,
     "memory of whole logits, which are not copied here"},
    {"verl.distillation_loss", "use_task_rewards", MT_KEY_OPTION, "use-task-rewards", NULL, LEARNER},
    {"verl.distillation_loss", "distillation_loss_coef", MT_KEY_DISTILL_COEF, "distillation-loss-coef", NULL, LEARNER},
    {"verl.distillation_loss", "loss_max_clamp", MT_KEY_OPTION, "distillation-loss-max-clamp", NULL, LEARNER},
    {"verl.distillation_loss", "use_policy_gradient", MT_KEY_OPTION, "distillation-in",
     "true=policy-gradient|false=loss", LEARNER},
    {"verl.distillation_loss", "policy_loss_mode", MT_KEY_FIXED, "its policy loss is PPO's", "vanilla"},
    {"verl.distillation_loss", "clip_ratio", MT_KEY_UNUSED,
     "clip_ratio_low and clip_ratio_high, which verl always has"},
    {"verl.distillation_loss", "clip_ratio_low", MT_KEY_DISTILL_CLIP, "distillation-clip-ratio-low", NULL, LEARNER},
    {"verl.distillation_loss", "clip_ratio_high", MT_KEY_DISTILL_CLIP, "distillation-clip-ratio-high", NULL, LEARNER},
    {"verl", "reward", MT_KEY_SECTION, "verl.reward_loop", NULL, "actor_train reference critic"},
    {"verl.reward_loop", "reward_model", MT_KEY_REFUSED, "a reward model is the folder of --reward-load"},
    {"verl.reward_loop", "num_workers", MT_KEY_UNUSED, RAY},
    {"verl.reward_loop", "_target_ custom_reward_function reward_manager sandbox_fusion reward_kwargs", MT_KEY_UNUSED,
     "verl's Python classes"},
    {"verl", "buffer synchronizer enable_preview", MT_KEY_UNUSED, TRINITY},
    {"verl", "data", MT_KEY_SECTION, "verl.data"},
    {"verl", "algorithm", MT_KEY_SECTION, "verl.algorithm"},
    {"verl", "trainer", MT_KEY_SECTION, "verl.trainer"},
    {"verl", "actor_rollout_ref", MT_KEY_SECTION, "actor_rollout_ref"},
    {"verl", "critic", MT_KEY_SECTION, "verl.critic", NULL, "="},
    {"verl", "critic", MT_KEY_SECTION, "verl.critics", NULL, "actor_train"},
    {"verl.critics", "model", MT_KEY_SECTION, "verl.critics.model"},
    {"verl.critics", "optim", MT_KEY_SECTION, "verl.critics.optim"},
    {"verl.critics", "megatron", MT_KEY_SECTION, "verl.critics.megatron"},
    {"verl.critics", "cliprange_value", MT_KEY_OPTION, "value-clip"},
    {"verl.critics", "*", MT_KEY_OTHERS, "the role critic", "verl.critic"},
    {"verl.critics.model", "path", MT_KEY_OPTION, "critic-load"},
    {"verl.critics.model", "*", MT_KEY_OTHERS, "the role critic", "verl.model"},
    {"verl.critics.optim", "lr", MT_KEY_OPTION, "critic-lr"},
    {"verl.critics.optim", "*", MT_KEY_OTHERS, "the role critic", "verl.optim"},
    {"verl.critics.megatron", "tensor_model_parallel_size", MT_KEY_OPTION, "critic-tensor-model-parallel-size"},
    {"verl.critics.megatron", "pipeline_model_parallel_size", MT_KEY_OPTION, "critic-pipeline-model-parallel-size"},
    {"verl.critics.megatron", "expert_model_parallel_size", MT_KEY_OPTION, "critic-expert-model-parallel-size"},
    {"verl.critics.megatron", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"verl.critics.megatron", "use_dist_checkpointing", MT_KEY_REFUSED, DIST_FOLDER " false"},
    {"verl.critics.megatron", "dist_checkpointing_path", MT_KEY_DIST_PATH, "is not supported: " DIST_FOLDER " null"},
    {"verl.critics.megatron", "*", MT_KEY_OTHERS, "the role critic", "megatron"},
    {"verl", "reward_model", MT_KEY_SECTION, "verl.reward", NULL, "reward"},
    {"verl", "reward_model", MT_KEY_SECTION, "verl.rewards", NULL, "actor_train"},
    {"verl.rewards", "overlong_buffer", MT_KEY_SECTION, "verl.overlong"},
    {"verl.rewards", "reward_kwargs", MT_KEY_SECTION, "verl.reward_kwargs"},
    {"verl.rewards", "model", MT_KEY_SECTION, "verl.reward_models.model"},
    {"verl.rewards", "megatron", MT_KEY_SECTION, "verl.reward_models.megatron"},
    {"verl.rewards", "enable", MT_KEY_FIXED, "it sets --reward model", "true|false"},
    {"verl.rewards", "*", MT_KEY_OTHERS, "the role reward", "verl.reward"},
    {"verl.reward_models.model", "path", MT_KEY_OPTION, "reward-load"},
    {"verl.reward_models.model", "*", MT_KEY_OTHERS, "the role reward", "verl.model"},
    {"verl.reward_models.megatron", "tensor_model_parallel_size", MT_KEY_OPTION, "reward-tensor-model-parallel-size"},
    {"verl.reward_models.megatron", "pipeline_model_parallel_size", MT_KEY_OPTION,
     "reward-pipeline-model-parallel-size"},
    {"verl.reward_models.megatron", "expert_model_parallel_size", MT_KEY_OPTION, "reward-expert-model-parallel-size"},
    {"verl.reward_models.megatron", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"verl.reward_models.megatron", "use_dist_checkpointing", MT_KEY_REFUSED, DIST_FOLDER " false"},
    {"verl.reward_models.megatron", "dist_checkpointing_path", MT_KEY_DIST_PATH,
     "is not supported: " DIST_FOLDER " null"},
    {"verl.reward_models.megatron", "*", MT_KEY_OTHERS, "the role reward", "megatron"},
    {"verl.reward_kwargs", "overlong_buffer_cfg", MT_KEY_SECTION, "verl.overlong"},
    {"verl.reward_kwargs", "max_resp_len", MT_KEY_UNUSED, "max_response_length of data has it"},
    {"verl.reward_kwargs", "*", MT_KEY_UNUSED, "verl's Python classes"},
    {"verl.overlong", "enable", MT_KEY_FIXED, "without it there is no --overlong-buffer-length", "true|false"},
    {"verl.overlong", "len", MT_KEY_ENABLED, "overlong-buffer-length"},
    {"verl.overlong", "penalty_factor", MT_KEY_ENABLED, "overlong-penalty-factor"},
    {"verl.overlong", "log", MT_KEY_UNUSED, TRACKERS},
    {"actor_rollout_ref", "hybrid_engine nccl_timeout", MT_KEY_UNUSED, RAY},
    {"actor_rollout_ref", "profiler", MT_KEY_UNUSED, PROFILERS},
    {"actor_rollout_ref", "synchronizer explorer_name", MT_KEY_UNUSED, TRINITY},
    {"actor_rollout_ref", "model", MT_KEY_SECTION, "verl.model", NULL, "actor_train actor_infer reference"},
    {"actor_rollout_ref", "actor", MT_KEY_SECTION, "verl.actor", NULL, "actor_train"},
    {"actor_rollout_ref", "ref", MT_KEY_SECTION, "verl.actor", NULL, "reference"},
    {"actor_rollout_ref", "ref", MT_KEY_SECTION, "verl.refs", NULL, "actor_train"},
    {"verl.refs", "megatron", MT_KEY_SECTION, "verl.refs.megatron"},
    {"verl.refs", "model", MT_KEY_SECTION, "verl.refs.model"},
    {"verl.refs.model", "path", MT_KEY_OPTION, "ref-load"},
    {"verl.refs.model", "*", MT_KEY_OTHERS, "the role reference", "verl.model"},
    {"verl.refs", "*", MT_KEY_OTHERS, "the role reference", "verl.actor"},
    {"verl.refs.megatron", "tensor_model_parallel_size", MT_KEY_OPTION, "ref-tensor-model-parallel-size"},
    {"verl.refs.megatron", "pipeline_model_parallel_size", MT_KEY_OPTION, "ref-pipeline-model-parallel-size"},
    {"verl.refs.megatron", "expert_model_parallel_size", MT_KEY_OPTION, "ref-expert-model-parallel-size"},
    {"verl.refs.megatron", "sequence_parallel context_parallel_size", MT_KEY_UNUSED, ANOTHER_LAYOUT},
    {"verl.refs.megatron", "use_dist_checkpointing", MT_KEY_REFUSED, DIST_FOLDER " false"},
    {"verl.refs.megatron", "dist_checkpointing_path", MT_KEY_DIST_PATH, "is not supported: " DIST_FOLDER " null"},
    {"verl.refs.megatron", "*", MT_KEY_OTHERS, "the role reference", "megatron"},
    {"actor_rollout_ref", "rollout", MT_KEY_SECTION, "verl.rollout", NULL, "actor_train actor_infer"},

    {"verl.model", "path", MT_KEY_MODEL, "load"},
    {"verl.model", "override_config", MT_KEY_SECTION, "verl.override_config"},
    {"verl.override_config", "model_config", MT_KEY_SECTION, "transformer"},
    {"verl.override_config", "moe_config", MT_KEY_SECTION, "verl.moe_config"},
    {"verl.override_config", "*", MT_KEY_SECTION, "transformer"},
    {"verl.moe_config", "freeze_moe_router", MT_KEY_FIXED, "the router trains", "false"},
    {"verl.model", "lora_rank", MT_KEY_OPTION, "lora-rank", "0="},
    {"verl.model", "lora_alpha", MT_KEY_OPTION, "lora-alpha"},
    {"verl.model", "target_modules", MT_KEY_OPTION, "lora-target"},
    {"verl.model", "tokenizer_path input_tokenizer", MT_KEY_OPTION, "tokenizer-model"},
    {"verl.model", "lora", MT_KEY_ADAPTER, "verl.lora"},
    {"verl.lora", "rank", MT_KEY_OPTION, "lora-rank"},
    {"verl.lora", "alpha", MT_KEY_OPTION, "lora-alpha"},
    {"verl.lora", "dropout", MT_KEY_OPTION, "lora-dropout"},
    {"verl.lora", "target_modules", MT_KEY_OPTION, "lora-target", CANONICAL},
    {"verl.lora", "type", MT_KEY_FIXED, "q_proj, k_proj, v_proj, gate_proj and up_proj have an adapter each",
     "canonical_lora"},
    {"verl.lora", "exclude_modules", MT_KEY_REFUSED, "target_modules alone says which matrices have adapters"},
    {"verl.lora", "adapter_path", MT_KEY_OPTION, "load-adapter"},
    {"verl.lora", "dropout_position", MT_KEY_FIXED, "dropout applies to the inputs of adapters", "pre"},
    {"verl.lora", "lora_A_init_method", MT_KEY_FIXED, "as peft begins", "kaiming"},
    {"verl.lora", "lora_B_init_method", MT_KEY_FIXED, "an adapter begins at zero", "zero"},
    {"verl.lora", "dtype", MT_KEY_FIXED, "adapters have the type of --bf16, and masters in fp32", "bfloat16|bf16"},
    {"verl.lora", "freeze_language_model", MT_KEY_FIXED, "the model is frozen", "true"},
    {"verl.lora", "freeze_vision_model freeze_vision_projection", MT_KEY_FIXED, "the model is frozen", "true"},
    {"verl.lora", "merge", MT_KEY_UNUSED, SERVER},
    {"verl.lora", "a2a_experimental", MT_KEY_UNUSED, "kernels of Megatron-Bridge"},
    {"verl.model", "mtp", MT_KEY_SECTION, "verl.mtp"},
    {"verl.mtp", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.mtp", "enable", MT_KEY_MTP, "mtp-num-layers", NULL, "actor_train"},
    {"verl.mtp", "enable_train enable_rollout", MT_KEY_FIXED, "they decide on the keys beside them", "true|false"},
    {"verl.mtp", "detach_encoder", MT_KEY_MTP, "mtp-loss-scaling-factor", NULL, "actor_train"},
    {"verl.mtp", "mtp_loss_scaling_factor", MT_KEY_MTP, "mtp-loss-scaling-factor", NULL, "actor_train"},
    {"verl.mtp", "num_speculative_tokens speculative_num_steps", MT_KEY_MTP, "num-speculative-tokens", NULL,
     "actor_train"},
    {"verl.mtp", "speculative_eagle_topk", MT_KEY_FIXED, "drafts are one sequence", "1"},
    {"verl.mtp", "method", MT_KEY_FIXED, "modules of multi-token prediction draft", "mtp"},
    {"verl.mtp", "speculative_algorithm speculative_num_draft_tokens", MT_KEY_UNUSED, SERVER},
    {"verl.model", "fsdp_config", MT_KEY_UNUSED, "FSDP"},
    {"verl.model", "enable_gradient_checkpointing gradient_checkpointing_kwargs", MT_KEY_UNUSED,
     TRANSFORMERS " (recompute_granularity of override_transformer_config is Megatron's)"},
    {"verl.model", "lora_adapter_path", MT_KEY_OPTION, "load-adapter"},
    {"verl.model", "exclude_modules", MT_KEY_REFUSED, "target_modules alone says which matrices have adapters"},
    {"verl.model", "tiled_mlp", MT_KEY_UNUSED, "kernels of transformers"},
    {"verl.model", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.model", "hf_config_path", MT_KEY_REFUSED, "the model's config.json is in the folder of path"},
    {"verl.model",
     "trust_remote_code use_remove_padding use_shm use_liger use_fused_kernels "
     "fused_kernel_options enable_activation_offload",
     MT_KEY_UNUSED, TRANSFORMERS},
    {"verl.model", "custom_chat_template", MT_KEY_REFUSED, TEMPLATES},
    {"verl.model", "external_lib", MT_KEY_REFUSED, "models are those of this program"},

    {"verl.actor", "strategy", MT_KEY_FIXED, ENGINE,
     "megatron|fsdp|fsdp2|veomni|torchtitan|automodel|mindspeed|mindspeed_llm"},
    {"verl.actor", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.actor", "megatron", MT_KEY_SECTION, "megatron"},
    {"verl.actor", "optim", MT_KEY_SECTION, "verl.optim"},
    {"verl.actor", "ppo_mini_batch_size", MT_KEY_MINI_BATCH, "global-batch-size"},
    {"verl.actor", "ppo_micro_batch_size_per_gpu", MT_KEY_OPTION, "micro-batch-size", NULL, "actor_train critic"},
    {"verl.actor", "log_prob_micro_batch_size_per_gpu micro_batch_size_per_gpu", MT_KEY_OPTION, "micro-batch-size",
     NULL, "reference reward"},
    {"verl.actor", "ppo_micro_batch_size log_prob_micro_batch_size micro_batch_size", MT_KEY_REFUSED,
     "it counts all ranks: give the same key with _per_gpu"},
    {"verl.actor", "ppo_epochs", MT_KEY_OPTION, "ppo-epochs"},
    {"verl.actor", "clip_ratio", MT_KEY_OPTION, "clip-ratio"},
    {"verl.actor", "clip_ratio_low", MT_KEY_OPTION, "clip-ratio-low"},
    {"verl.actor", "clip_ratio_high", MT_KEY_OPTION, "clip-ratio-high"},
    {"verl.actor", "clip_ratio_c", MT_KEY_OPTION, "clip-ratio-c"},
    {"verl.actor", "grad_clip", MT_KEY_OPTION, "clip-grad"},
    {"verl.actor", "entropy_coeff", MT_KEY_OPTION, "entropy-coeff"},
    {"verl.actor", "use_kl_loss", MT_KEY_FIXED, "--kl-loss-coef 0 is none", "true|false"},
    {"verl.actor", "kl_loss_coef", MT_KEY_LOSS_COEF, "kl-loss-coef"},
    {"verl.actor", "kl_loss_type", MT_KEY_OPTION, "kl-loss-type", KL_TYPES},
    {"verl.actor", "loss_agg_mode", MT_KEY_OPTION, "loss-agg-mode"},
    {"verl.actor", "shuffle", MT_KEY_OPTION, "shuffle-mini-batches"},
    {"verl.actor", "rollout_n", MT_KEY_OPTION, "num-return-sequences", .accepted = "1"},
    {"verl.actor", "policy_loss", MT_KEY_SECTION, "verl.policy_loss"},
    {"verl.policy_loss", "loss_mode", MT_KEY_OPTION, "pg-variant", "geo_mean=gmpo"},
    {"verl.policy_loss", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.policy_loss", "clip_cov_ratio", MT_KEY_OPTION, "clip-cov-ratio"},
    {"verl.policy_loss", "clip_cov_lb", MT_KEY_OPTION, "clip-cov-lb"},
    {"verl.policy_loss", "clip_cov_ub", MT_KEY_OPTION, "clip-cov-ub"},
    {"verl.policy_loss", "kl_cov_ratio", MT_KEY_OPTION, "kl-cov-ratio"},
    {"verl.policy_loss", "ppo_kl_coef", MT_KEY_OPTION, "ppo-kl-coef"},
    {"verl.policy_loss", "dro_beta", MT_KEY_OPTION, "dro-beta"},
    {"verl.actor",
     "use_torch_compile entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
     "entropy_checkpointing",
     MT_KEY_UNUSED, "torch.compile"},
    {"verl.actor", "use_dynamic_bsz", MT_KEY_OPTION, "sequence-packing", "false="},
    {"verl.actor", "alg_type", MT_KEY_FIXED,
     "actor_train of verl learns from rewards; preferences are learned from a file of ROLL", "ppo"},
    {"verl.actor", "tau opmd_baseline use_uid", MT_KEY_UNUSED, "the losses opmd and pairwise_opmd of alg_type"},
    {"verl.actor", "param_offload", MT_KEY_OPTION, "param-offload"},
    {"verl.actor", "grad_offload", MT_KEY_OPTION, "grad-offload"},
    {"verl.actor", "optimizer_offload", MT_KEY_OPTION, "optimizer-offload"},
    {"verl.actor", "model", MT_KEY_REFUSED, "a reference of its own is --ref-load of actor_train"},
    {"verl.actor", "pad_to_length use_remove_padding", MT_KEY_UNUSED, PADDING},
    {"verl.actor", "calculate_sum_pi_squared sum_pi_squared_checkpointing", MT_KEY_UNUSED,
     "verl's estimator optimal_token_baseline"},
    {"verl.actor",
     "ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz "
     "forward_max_token_len_per_gpu data_loader_seed",
     MT_KEY_UNUSED, BY_LENGTH},
    {"verl.actor", "load_weight", MT_KEY_FIXED, "the weights of --load are loaded", "true"},
    {"verl.actor", "calculate_entropy", MT_KEY_FIXED, "--metrics has the entropy", "true|false"},
    {"verl.actor", "loss_scale_factor", MT_KEY_REFUSED, "seq-mean-token-sum-norm divides by --max-new-tokens"},
    {"verl.actor", "tau_pos", MT_KEY_OPTION, "tau-pos"},
    {"verl.actor", "tau_neg", MT_KEY_OPTION, "tau-neg"},
    {"verl.actor", "use_prefix_grouper use_fused_kernels nccl_timeout", MT_KEY_UNUSED, "verl's kernels and processes"},
    {"verl.actor", "router_replay", MT_KEY_SECTION, "verl.router_replay"},
    {"verl.actor", "freeze_vision_tower", MT_KEY_OPTION, "freeze-vision", "false="},
    {"verl.actor", "qat", MT_KEY_REFUSED, "models are trained without quantization"},
    {"verl.actor", "checkpoint", MT_KEY_UNUSED, CHECKPOINTS},
    {"verl.actor", "profile profiler npu_profile", MT_KEY_UNUSED, PROFILERS},
    {"verl.actor", "fsdp_config fsdp ulysses_sequence_parallel_size", MT_KEY_UNUSED, "FSDP"},
    {"verl.actor", "sync_actor", MT_KEY_REFUSED, "the reference does not move"},
    {"verl.actor", "sync_actor_alpha sync_steps", MT_KEY_UNUSED, "sync_actor, which is not supported"},

    {"verl.critic", "model", MT_KEY_SECTION, "verl.model"},
    {"verl.critic", "cliprange_value", MT_KEY_OPTION, "value-clip"},
    {"verl.critic", "rollout_n", MT_KEY_OPTION, "num-return-sequences", .accepted = "1"},
    {"verl.critic", "kl_ctrl enable", MT_KEY_UNUSED, "verl's Python classes"},
    {"verl.critic", "forward_micro_batch_size forward_micro_batch_size_per_gpu", MT_KEY_UNUSED, SCORES},
    {"verl.critic", "*", MT_KEY_SECTION, "verl.actor"}, // its other keys are those of an actor
    {"verl.reward",
     "max_length launch_reward_fn_async sandbox_fusion reward_manager overlong_buffer reward_kwargs use_reward_loop "
     "reward_loop_source reward_loop_module_path reward_loop_class_name",
     MT_KEY_UNUSED, "verl's Python classes"},
    {"verl.reward", "enable_resource_pool n_gpus_per_node nnodes num_workers", MT_KEY_UNUSED, RAY},
    {"verl.reward", "rollout", MT_KEY_UNUSED, SERVER},
    {"verl.reward", "*", MT_KEY_SECTION, "verl.critic"},

    {"verl.optim", "lr", MT_KEY_OPTION, "lr"},
    {"verl.optim", "optimizer", MT_KEY_OPTION, "optimizer", OPTIMIZERS},
    {"verl.optim", "clip_grad grad_clip", MT_KEY_OPTION, "clip-grad"},
    {"verl.optim", "lr_warmup_steps", MT_KEY_OPTION, "lr-warmup-iters", "-1="},
    {"verl.optim", "lr_warmup_steps_ratio", MT_KEY_OPTION, "lr-warmup-fraction"},
    {"verl.optim", "warmup_style lr_scheduler_type", MT_KEY_OPTION, "lr-decay-style", LR_STYLES},
    {"verl.optim", "total_training_steps", MT_KEY_OPTION, "train-iters", "-1="},
    {"verl.optim", "lr_decay_steps", MT_KEY_OPTION, "lr-decay-iters"},
    {"verl.optim", "lr_wsd_decay_steps", MT_KEY_OPTION, "lr-wsd-decay-iters"},
    {"verl.optim", "min_lr_ratio", MT_KEY_LR_SHARE, "min-lr"},
    {"verl.optim", "num_cycles", MT_KEY_FIXED, "the learning rate falls once", "0.5"},
    {"verl.optim", "zero_indexed_step", MT_KEY_FIXED, "the first iteration is step 0 of the schedule", "true"},
    {"verl.optim", "optimizer_impl", MT_KEY_UNUSED, "FSDP"},
    {"verl.optim",
     "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_match_adamw_update_rms muon_momentum "
     "muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode",
     MT_KEY_UNUSED, "the optimizer muon, whose settings here are options of the command line"},
    {"verl.optim", "beta1", MT_KEY_OPTION, "adam-beta1"},
    {"verl.optim", "beta2", MT_KEY_OPTION, "adam-beta2"},
    {"verl.optim", "betas", MT_KEY_BETAS, "adam-beta1"},
    {"verl.optim", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.optim", "override_optimizer_config", MT_KEY_SECTION, "transformer"},
    {"verl.optim", "use_checkpoint_opt_param_scheduler", MT_KEY_FIXED, "the options of the command line hold", "false"},

    {"megatron", "param_offload", MT_KEY_OPTION, "param-offload"},
    {"megatron", "grad_offload", MT_KEY_OPTION, "grad-offload"},
    {"megatron", "optimizer_offload", MT_KEY_OPTION, "optimizer-offload"},
    {"megatron", "use_mbridge vanilla_mbridge use_remove_padding dist_checkpointing_prefix", MT_KEY_UNUSED,
     CHECKPOINTS},
    {"megatron", "use_dist_checkpointing", MT_KEY_REFUSED, DIST_FOLDER " false"},
    {"megatron", "dist_checkpointing_path", MT_KEY_DIST_PATH, "is not supported: " DIST_FOLDER " null"},
    {"megatron", "load_weight", MT_KEY_FIXED, "the weights of --load are loaded", "true"},
    {"megatron", "dtype", MT_KEY_OPTION, "bf16", DTYPES},
    {"megatron", "override_transformer_config override_ddp_config", MT_KEY_SECTION, "transformer"},
    {"megatron", "override_mcore_model_config", MT_KEY_SECTION, "transformer"},
    {"megatron", "router_replay", MT_KEY_SECTION, "verl.router_replay"},
    {"verl.router_replay", "mode", MT_KEY_OPTION, "router-replay", NULL, LEARNER},
    {"verl.router_replay", "_target_ record_file replay_file", MT_KEY_UNUSED, "the replay of routes"},
    {"megatron", "qat", MT_KEY_REFUSED, "text models are trained, without quantization"},
    {"megatron", "pad_to_length pad_to_length_bucket pad_bshd_to_minibatch_max", MT_KEY_UNUSED, PADDING},
    {"megatron", "entropy_from_logits_with_chunking entropy_from_logits_chunk_size", MT_KEY_UNUSED, "torch.compile"},
    {"megatron", "forward_only", MT_KEY_UNUSED, "the choice of an engine: here it is this program"},
    {"megatron", "max_seqlen_per_dp_cp_rank", MT_KEY_OPTION, "max-seqlen-per-dp-cp-rank"},
    {"megatron", "extra _target_", MT_KEY_UNUSED, HYDRA},
    {"transformer", "attn_implementation", MT_KEY_OPTION, "attention-backend", ATTENTION},
    {"transformer", "attention_backend", MT_KEY_OPTION, "attention-backend", ATTENTION},

    {"verl.rollout", "n", MT_KEY_OPTION, "num-return-sequences", .accepted = "1"},
    {"verl.rollout", "temperature", MT_KEY_OPTION, "temperature"},
    {"verl.rollout", "top_k", MT_KEY_OPTION, "top-k", "-1=0"},
    {"verl.rollout", "top_p", MT_KEY_OPTION, "top-p"},
    {"verl.rollout", "response_length", MT_KEY_OPTION, "max-new-tokens"},
    {"verl.rollout", "prompt_length", MT_KEY_UNUSED, "max_prompt_length of data has it"},
    {"verl.rollout", "repetition_penalty", MT_KEY_OPTION, "repetition-penalty", .accepted = "1|1.0"},
    {"verl.rollout", "min_p", MT_KEY_OPTION, "min-p"},
    {"verl.rollout", "stop", MT_KEY_OPTION, "stop"},
    {"verl.rollout", "do_sample", MT_KEY_FIXED, "--temperature 0 is the argmax", "true"},
    {"verl.rollout", "ignore_eos", MT_KEY_FIXED, "a response ends at the end token", "false"},
    {"verl.rollout", "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu", MT_KEY_UNUSED, SCORES},
    {"verl.rollout", "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu", MT_KEY_UNUSED, BY_LENGTH},
    {"verl.rollout", "tensor_model_parallel_size", MT_KEY_OPTION, "rollout-tensor-model-parallel-size", NULL,
     "actor_train"},
    {"verl.rollout", "expert_parallel_size", MT_KEY_OPTION, "rollout-expert-model-parallel-size", NULL, "actor_train"},
    {"verl.rollout", "tensor_model_parallel_size expert_parallel_size", MT_KEY_UNUSED, SERVER},
    {"verl.rollout",
     "_target_ nnodes n_gpus_per_node dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes "
     "free_cache_engine data_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size "
     "max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode "
     "scheduling_policy load_format layered_summon disable_log_stats multi_stage_wake_up "
     "enable_sleep_mode engine_kwargs calculate_log_probs server checkpoint_engine "
     "checkpoint_manager_class update_weights_bucket_megabytes trace skip_dump_dir "
     "skip_tokenizer_init moe_load_balance_metrics_interval prometheus "
     "mtp layer_name_map limit_images sglang_engine_mode "
     "disaggregation router_config_path use_preprocessed_multimodal_input full_determinism seed",
     MT_KEY_UNUSED, SERVER},
    {"verl.rollout", "name", MT_KEY_FIXED, ENGINE, "vllm|sglang|trtllm|hf|naive|vllm_omni|???"},
    {"verl.rollout", "mode", MT_KEY_FIXED, ENGINE, "sync|async"},
    {"verl.rollout", "custom", MT_KEY_REFUSED, "responses are drawn by this program"},
    {"verl.rollout", "skip skip_rollout", MT_KEY_REFUSED, DRAWN},
    {"verl.rollout", "quantization quantization_config_file use_block_quant_rollout qat", MT_KEY_REFUSED,
     "the generator has the weights of training"},
    {"verl.rollout", "enable_rollout_routing_replay", MT_KEY_FIXED,
     "the generator keeps its routes where the actor's "
     "router_replay.mode is R3",
     "true|false"},
    {"verl.rollout", "over_sample_rate", MT_KEY_FIXED, "all responses are waited for", "0|0.0"},
    {"verl.rollout", "multi_turn", MT_KEY_SECTION, "verl.multi_turn"},
    {"verl.multi_turn", "enable", MT_KEY_REFUSED,
     "tools are Python classes there: here --env-command is a program that holds conversations"},
    {"verl.multi_turn", "*", MT_KEY_UNUSED, "enable, which is not supported"},
    {"verl.rollout", "agent", MT_KEY_SECTION, "verl.agent"},
    {"verl.agent", "default_agent_loop", MT_KEY_FIXED, "a prompt has one response", "single_turn_agent"},
    {"verl.agent", "agent_loop_config_path agent_loop_manager_class", MT_KEY_REFUSED, "a prompt has one response"},
    {"verl.agent", "*", MT_KEY_UNUSED, SERVER},
    {"verl.rollout", "use_fire_sampling", MT_KEY_FIXED, "all tokens are drawn at one temperature", "false"},
    {"verl.rollout", "profiler", MT_KEY_UNUSED, PROFILERS},
    {"verl.rollout", "val_kwargs", MT_KEY_SECTION, "verl.val_kwargs"},
    {"verl.val_kwargs", "_target_ top_k top_p min_p temperature n do_sample repetition_penalty seed", MT_KEY_UNUSED,
     VALIDATION},

    {"verl.algorithm", "adv_estimator", MT_KEY_OPTION, "adv-estimator", NULL, LEARNER},
    {"verl.algorithm", "gamma", MT_KEY_OPTION, "gamma", NULL, LEARNER},
    {"verl.algorithm", "lam", MT_KEY_OPTION, "lam", NULL, LEARNER},
    {"verl.algorithm", "norm_adv_by_std_in_grpo", MT_KEY_OPTION, "norm-adv-by-std", NULL, LEARNER},
    {"verl.algorithm", "use_kl_in_reward", MT_KEY_OPTION, "kl-in-reward", NULL, LEARNER},
    {"verl.algorithm", "kl_penalty", MT_KEY_REWARD_KL, "kl-loss-type", KL_TYPES, LEARNER},
    {"verl.algorithm", "kl_ctrl", MT_KEY_SECTION, "verl.kl_ctrl"},
    {"verl.kl_ctrl", "kl_coef", MT_KEY_OPTION, "kl-coef", NULL, LEARNER},
    {"verl.kl_ctrl", "type", MT_KEY_FIXED, "the weight of the divergence is constant", "fixed"},
    {"verl.kl_ctrl", "horizon target_kl _target_", MT_KEY_UNUSED, "the adaptive kind of kl_ctrl"},
    {"verl.algorithm", "use_pf_ppo", MT_KEY_REFUSED, "rewards are weighted by their advantages alone"},
    {"verl.algorithm", "pf_ppo", MT_KEY_UNUSED, "use_pf_ppo, which is not supported"},
    {"verl.algorithm", "rollout_correction", MT_KEY_SECTION, "verl.correction"},
    {"verl.algorithm", "_target_", MT_KEY_UNUSED, HYDRA},
    {"verl.correction", "rollout_is", MT_KEY_OPTION, "rollout-is", NULL, LEARNER},
    {"verl.correction", "rollout_is_threshold", MT_KEY_OPTION, "rollout-is-threshold", NULL, LEARNER},
    {"verl.correction", "rollout_is_batch_normalize", MT_KEY_OPTION, "rollout-is-batch-normalize", NULL, LEARNER},
    {"verl.correction", "rollout_rs", MT_KEY_OPTION, "rollout-rs", NULL, LEARNER},
    {"verl.correction", "rollout_rs_threshold", MT_KEY_OPTION, "rollout-rs-threshold", NULL, LEARNER},
    {"verl.correction", "bypass_mode", MT_KEY_OPTION, "bypass-mode", NULL, LEARNER},
    {"verl.correction", "loss_type", MT_KEY_FIXED, "with bypass_mode the loss is that of policy_loss.loss_mode",
     "ppo_clip"},
    {"verl.correction", "use_policy_gradient", MT_KEY_FIXED, "the loss is that of policy_loss.loss_mode", "false"},
    {"verl.algorithm", "gdpo_reward_weights", MT_KEY_OPTION, "reward-weights", NULL, LEARNER},
    {"verl.algorithm", "gdpo_reward_keys", MT_KEY_UNUSED, PYTHON},
    {"verl.correction", "rollout_rs_threshold_lower rollout_token_veto_threshold", MT_KEY_REFUSED,
     "rollout_rs has rules of tokens and responses, each with bounds in rollout_rs_threshold"},
    {"verl.algorithm", "filter_groups", MT_KEY_SECTION, "verl.filter_groups"},
    {"verl.filter_groups", "enable", MT_KEY_OPTION, "dynamic-sampling", NULL, LEARNER},
    {"verl.filter_groups", "max_num_gen_batches", MT_KEY_ENABLED, "dynamic-sampling-max-rounds", "0=1000000|-1=1000000",
     LEARNER},
    {"verl.filter_groups", "metric", MT_KEY_FIXED, "groups are compared by their rewards",
     "acc|score|reward|seq_reward|seq_final_reward"},
    {"verl.filter_groups", "max_inflight_gen_batches", MT_KEY_UNUSED, SERVER},
    {"verl.filter_groups", "_target_", MT_KEY_UNUSED, HYDRA},

    {"verl.data", "train_files", MT_KEY_FILES, "train-data-path", NULL, "actor_train critic"},
    {"verl.data", "val_files", MT_KEY_FILES, "valid-data-path", NULL, "actor_train critic"},
    {"verl.data", "prompt_key", MT_KEY_OPTION, "prompt-key"},
    {"verl.data", "train_batch_size", MT_KEY_OPTION, "rollout-batch-size", NULL, LEARNER},
    {"verl.data", "gen_batch_size", MT_KEY_GEN_BATCH, "an iteration draws the prompts of train_batch_size"},
    {"verl.data", "max_response_length", MT_KEY_OPTION, "max-new-tokens", NULL, "actor_train actor_infer"},
    {"verl.data", "max_prompt_length", MT_KEY_LENGTH, "seq-length"},
    {"verl.data", "tokenizer", MT_KEY_OPTION, "tokenizer-model"},
    {"verl.data", "train_max_samples", MT_KEY_FIXED, "all samples of the files are read", "-1"},
    {"verl.data", "shuffle", MT_KEY_OPTION, "shuffle-prompts", NULL, LEARNER},
    {"verl.data", "seed", MT_KEY_OPTION, "data-seed", NULL, LEARNER}, // of the order of prompts alone
    {"verl.data", "truncation", MT_KEY_FIXED, "longer prompts are left out, and their number is printed", "error"},
    {"verl.data", "apply_chat_template_kwargs", MT_KEY_JSON, "chat-template-kwargs", NULL, "actor_train"},
    {"verl.data", "tool_config_path function_tool_path", MT_KEY_REFUSED, "prompts have no tools"},
    {"verl.data", "custom_cls sampler datagen", MT_KEY_SECTION, "verl.custom"},
    {"verl.custom", "path class_path", MT_KEY_REFUSED, "prompts are the lines of JSON files, in this program's order"},
    {"verl.custom", "*", MT_KEY_UNUSED, "path, which is not supported"},
    {"verl.data", "val_batch_size val_max_samples validation_shuffle", MT_KEY_UNUSED, VALIDATION},
    {"verl.data", "image_key", MT_KEY_OPTION, "image-key", "images="},
    {"verl.data",
     "_target_ use_shm reward_fn_key return_raw_input_ids return_raw_chat "
     "return_full_prompt "
     "return_multi_modal_inputs dataloader_num_workers image_patch_size video_key audio_key "
     "mm_processor_kwargs filter_overlong_prompts "
     "filter_overlong_prompts_workers trust_remote_code databuffer",
     MT_KEY_UNUSED, "verl's datasets"},

    {"verl.trainer", "critic_warmup", MT_KEY_FIXED, "actor and critic train from the first iteration on", "0"},
    {"verl.trainer", "total_epochs", MT_KEY_OPTION, "train-epochs", NULL, LEARNER},
    {"verl.trainer", "total_training_steps", MT_KEY_OPTION, "train-iters", "-1=", LEARNER},
    {"verl.trainer", "default_local_dir", MT_KEY_OPTION, "save", NULL, LEARNER},
    {"verl.trainer", "save_freq", MT_KEY_OPTION, "save-interval", "-1=|0=", LEARNER},
    {"verl.trainer", "test_freq", MT_KEY_OPTION, "eval-interval", "-1=|0=", LEARNER},
    {"verl.trainer", "max_actor_ckpt_to_keep", MT_KEY_OPTION, "keep-checkpoints", NULL, "actor_train"},
    {"verl.trainer", "resume_mode", MT_KEY_OPTION, "auto-resume",
     "auto=true|disable=false|*=!give --load with the folder", LEARNER},
    {"verl.trainer",
     "project_name experiment_name group_name logger log_val_generations val_generations_to_log_to_wandb "
     "rollout_data_dir validation_data_dir",
     MT_KEY_UNUSED, TRACKERS},
    {"verl.trainer", "remove_previous_ckpt_in_save training_rollout_mode enable_exp_buffer sync_freq", MT_KEY_UNUSED,
     TRINITY},
    {"verl.trainer",
     "balance_batch nnodes n_gpus_per_node resume_from_path del_local_ckpt_after_load val_before_train "
     "default_hdfs_dir max_critic_ckpt_to_keep max_ref_ckpt_to_keep device use_legacy_worker_impl "
     "ray_wait_register_center_timeout esi_redundant_time use_v1 checkpoint_callback_class",
     MT_KEY_UNUSED, RAY},
    {"verl.trainer", "profile_steps controller_nsight_options worker_nsight_options npu_profile", MT_KEY_UNUSED,
     PROFILERS},
    {"verl.trainer", "val_only", MT_KEY_REFUSED, "a run trains"},
    {"verl.trainer", "v1", MT_KEY_SECTION, "verl.v1"},
    {"verl.v1", "trainer_mode", MT_KEY_FIXED, "the present weights generate the responses", "sync"},
    {"verl.v1", "sync colocate_async separate_async sampler replay_buffer", MT_KEY_UNUSED, RAY},

    /* ---- Trinity-RFT: its own file, with verl's configuration in trainer.trainer_config */
    {"trinity", "project group name monitor log", MT_KEY_UNUSED, TRACKERS},
    {"trinity", "cluster service ray_namespace ignore_validator_suggestions", MT_KEY_UNUSED, RAY},
    {"trinity", "mode", MT_KEY_FIXED, "a run draws responses and trains on them, or on samples", "both|colocate|train"},
    {"trinity", "checkpoint_root_dir", MT_KEY_OPTION, "save", NULL, LEARNER},
    {"trinity", "checkpoint_job_dir", MT_KEY_UNUSED, "folders: --save is that of checkpoint_root_dir"},
    {"trinity", "continue_from_checkpoint", MT_KEY_OPTION, "auto-resume", NULL, LEARNER},
    {"trinity", "stages data_processor", MT_KEY_REFUSED, "a run has one stage, on the prompts of its files"},
    {"trinity", "algorithm", MT_KEY_SECTION, "trinity.algorithm"},
    {"trinity", "model", MT_KEY_SECTION, "trinity.model"},
    {"trinity", "buffer", MT_KEY_SECTION, "trinity.buffer"},
    {"trinity", "explorer", MT_KEY_SECTION, "trinity.explorer"},
    {"trinity", "synchronizer", MT_KEY_SECTION, "trinity.synchronizer"},
    {"trinity", "trainer", MT_KEY_SECTION, "trinity.trainer"},
    {"trinity.algorithm", "algorithm_type", MT_KEY_ALGORITHM, "adv-estimator",
     "ppo=gae|grpo=grpo|gspo=grpo|cispo=grpo|dapo=grpo|opmd=grpo|sppo=grpo|rloo=rloo|"
     "reinforceplusplus=reinforce_plus_plus|remax=remax|sft=sft|dpo=dpo|"
     "sapo=grpo|topr=reinforce|"
     "*=!take ppo, grpo, gspo, cispo, dapo, sapo, topr, opmd, sppo, rloo, reinforceplusplus, remax, sft or dpo",
     LEARNER},
    {"trinity.algorithm", "repeat_times", MT_KEY_OPTION, "num-return-sequences", NULL,
     "actor_train actor_infer critic"},
    {"trinity.algorithm", "optimizer", MT_KEY_SECTION, "trinity.optim"},
    {"trinity.optim", "optimizer_type", MT_KEY_OPTION, "optimizer", OPTIMIZERS},
    {"trinity.optim", "*", MT_KEY_SECTION, "verl.optim"},
    {"trinity.algorithm", "policy_loss_fn", MT_KEY_OPTION, "pg-variant",
     "ppo=ppo|gspo=gspo|cispo=cispo|opmd=opmd|sppo=sppo|sapo=sapo_detached|topr=topr|sft=|dpo=|*=!take ppo, gspo, "
     "cispo, sapo, topr, opmd or sppo",
     LEARNER},
    {"trinity.algorithm", "advantage_fn", MT_KEY_OPTION, "adv-estimator",
     "ppo=gae|grpo=grpo|grpo_verl=grpo|rloo=rloo|reinforceplusplus=reinforce_plus_plus|remax=remax|reinforce=reinforce|"
     "opmd=grpo|*=!take ppo, grpo, grpo_verl, rloo, reinforceplusplus, remax, reinforce or opmd",
     LEARNER},
    {"trinity.algorithm", "sample_strategy", MT_KEY_FIXED, "all responses are trained on", "default|warmup"},
    {"trinity.algorithm", "kl_penalty_fn", MT_KEY_PENALTY, "kl-in-reward", TRINITY_KL, LEARNER},
    {"trinity.algorithm", "kl_penalty_fn_args", MT_KEY_SECTION, "trinity.penalty"},
    {"trinity.penalty", "kl_coef", MT_KEY_PENALTY, "kl-coef", NULL, LEARNER},
    {"trinity.penalty", "adaptive", MT_KEY_FIXED, "the weight of the divergence is constant", "false"},
    {"trinity.penalty", "target_kl horizon", MT_KEY_UNUSED, "adaptive, which is not supported"},
    {"trinity.algorithm", "kl_loss_fn", MT_KEY_DIVERGENCE, "kl-loss-type", TRINITY_KL, LEARNER},
    {"trinity.algorithm", "entropy_loss_fn", MT_KEY_FIXED, "0 of entropy_coef is none", "default|none"},
    {"trinity.algorithm", "loss_agg_mode", MT_KEY_AGGREGATION, "loss-agg-mode", NULL, LEARNER},
    {"trinity.algorithm", "enable_router_replay", MT_KEY_OPTION, "router-replay", "true=R3|false=disabled", LEARNER},
    {"trinity.algorithm", "bypass_old_logprobs", MT_KEY_UNUSED, GAPLESS},
    {"trinity.algorithm", "rollout_correction sample_strategy_args advantage_fn_args", MT_KEY_REFUSED,
     "advantages are those of algorithm_type"},
    {"trinity.algorithm", "kl_loss_fn_args", MT_KEY_SECTION, "trinity.kl"},
    {"trinity.algorithm", "entropy_loss_fn_args", MT_KEY_SECTION, "trinity.entropy"},
    {"trinity.algorithm", "policy_loss_fn_args", MT_KEY_SECTION, "trinity.loss"},
    {"trinity.kl", "kl_coef", MT_KEY_KL_COEF, "kl-loss-coef", NULL, LEARNER},
    {"trinity.kl", "adaptive", MT_KEY_FIXED, "the weight of the divergence is constant", "false"},
    {"trinity.kl", "target_kl horizon", MT_KEY_UNUSED, "adaptive, which is not supported"},
    {"trinity.entropy", "entropy_coef", MT_KEY_ENTROPY_COEF, "entropy-coeff", NULL, LEARNER},
    {"trinity.loss", "clip_range", MT_KEY_OPTION, "clip-ratio", NULL, LEARNER},
    {"trinity.loss", "clip_range_low", MT_KEY_OPTION, "clip-ratio-low", NULL, LEARNER},
    {"trinity.loss", "clip_range_high", MT_KEY_OPTION, "clip-ratio-high", NULL, LEARNER},
    {"trinity.loss", "epsilon", MT_KEY_OPTION, "clip-ratio", NULL, LEARNER},
    {"trinity.loss", "tau_pos", MT_KEY_OPTION, "tau-pos", NULL, LEARNER},
    {"trinity.loss", "tau_neg", MT_KEY_OPTION, "tau-neg", NULL, LEARNER},
    {"trinity.loss", "advantage_threshold", MT_KEY_FIXED, "topr distinguishes scores above 0", "0|0.0"},
    {"trinity.loss", "tau", MT_KEY_OPTION, "opmd-tau", NULL, LEARNER},
    {"trinity.loss", "beta", MT_KEY_OPTION, "beta", NULL, LEARNER},
    {"trinity.loss", "label_smoothing", MT_KEY_OPTION, "label-smoothing", NULL, LEARNER},
    {"trinity.loss", "clip_ratio_c", MT_KEY_OPTION, "clip-ratio-c", NULL, LEARNER},
    {"trinity.loss", "loss_agg_mode", MT_KEY_UNUSED, "loss_agg_mode of algorithm, which replaces it"},
    {"trinity.loss", "enable_sequence_masking fallback_to_policy_gradient", MT_KEY_FIXED, "all tokens have PPO's loss",
     "false"},
    {"trinity.loss", "enable_mask_clip", MT_KEY_FIXED, "--pg-variant cispo has no mask; ppo has it", "false"},
    {"trinity.loss", "mask_clip_range_low mask_clip_range_high", MT_KEY_UNUSED,
     "enable_mask_clip, which is not supported"},
    {"trinity.loss", "delta_sequence_masking", MT_KEY_UNUSED, "enable_sequence_masking, which is not supported"},
    {"trinity.model", "model_path", MT_KEY_MODEL, "load", NULL, "actor_train actor_infer reference"},
    {"trinity.model", "critic_model_path", MT_KEY_OPTION, "critic-load", NULL, "actor_train"},
    {"trinity.model", "critic_model_path", MT_KEY_MODEL, "load", NULL, "critic"},
    {"trinity.model", "max_model_len", MT_KEY_OPTION, "seq-length"},
    {"trinity.model", "max_prompt_tokens", MT_KEY_LENGTH, "seq-length"},
    {"trinity.model", "max_response_tokens", MT_KEY_OPTION, "max-new-tokens", NULL, "actor_train actor_infer"},
    {"trinity.model", "min_response_tokens", MT_KEY_FIXED, "a response ends at the end token", "0"},
    {"trinity.model", "temperature", MT_KEY_OPTION, "temperature"},
    {"trinity.model", "top_p", MT_KEY_OPTION, "top-p"},
    {"trinity.model", "top_k", MT_KEY_OPTION, "top-k", "-1=0"},
    {"trinity.model", "repetition_penalty", MT_KEY_OPTION, "repetition-penalty", .accepted = "1|1.0"},
    {"trinity.model", "rope_theta", MT_KEY_OPTION, "rotary-base"},
    {"trinity.model", "rope_scaling custom_chat_template chat_template_path enable_thinking tinker external_model",
     MT_KEY_REFUSED, "the model's folder has its positions and its template, and --chat-template another"},
    {"trinity.model", "trust_remote_code logprobs enable_prompt_truncation fully_sharded_loras max_cpu_loras",
     MT_KEY_UNUSED, SERVER},
    {"trinity.model", "lora_configs", MT_KEY_SECTION, "trinity.lora"},
    {"trinity.lora", "lora_rank", MT_KEY_OPTION, "lora-rank"},
    {"trinity.lora", "lora_alpha", MT_KEY_OPTION, "lora-alpha"},
    {"trinity.lora", "target_modules", MT_KEY_OPTION, "lora-target"},
    {"trinity.lora", "path", MT_KEY_OPTION, "load-adapter"},
    {"trinity.lora", "exclude_modules", MT_KEY_REFUSED, "target_modules alone says which matrices have adapters"},
    {"trinity.lora", "name base_model_name lora_dtype is_dummy", MT_KEY_UNUSED, SERVER},
    {"trinity.buffer", "total_epochs", MT_KEY_OPTION, "train-epochs", NULL, LEARNER},
    {"trinity.buffer", "total_steps", MT_KEY_OPTION, "train-iters", NULL, LEARNER},
    {"trinity.buffer", "batch_size", MT_KEY_OPTION, "rollout-batch-size", NULL, LEARNER},
    {"trinity.buffer", "train_batch_size", MT_KEY_OPTION, "global-batch-size", "0=", LEARNER},
    {"trinity.buffer", "max_retry_times max_retry_interval cache_dir explorer_output", MT_KEY_UNUSED, TRINITY},
    {"trinity.buffer", "tokenizer_path", MT_KEY_OPTION, "tokenizer-model"},
    {"trinity.buffer", "explorer_input", MT_KEY_SECTION, "trinity.input"},
    {"trinity.buffer", "trainer_input", MT_KEY_SECTION, "trinity.trainer_input"},
    {"trinity.trainer_input", "experience_buffer", MT_KEY_EXPERIENCE, "trinity.experience"},
    {"trinity.experience", "path", MT_KEY_FILES, "train-data-path"},
    {"trinity.experience", "storage_type", MT_KEY_FIXED, "samples come from files", "file"},
    {"trinity.experience", "format", MT_KEY_SECTION, "trinity.sample"},
    {"trinity.sample", "response_key", MT_KEY_OPTION, "response-key"},
    {"trinity.sample", "chosen_key", MT_KEY_OPTION, "chosen-key"},
    {"trinity.sample", "rejected_key", MT_KEY_OPTION, "rejected-key"},
    {"trinity.sample", "enable_concatenated_multi_turn", MT_KEY_OPTION, "loss-on", "true=responses|false=last"},
    {"trinity.sample", "*", MT_KEY_SECTION, "trinity.format"},
    {"trinity.experience", "data_selector", MT_KEY_SECTION, "trinity.selector"},
    {"trinity.experience", "subset_name split", MT_KEY_UNUSED, "Hugging Face's datasets: a file is read whole"},
    {"trinity.experience", "*", MT_KEY_UNUSED, TRINITY},
    {"trinity.trainer_input", "auxiliary_buffers sft_warmup_dataset", MT_KEY_REFUSED, "responses alone are trained on"},
    {"trinity.trainer_input", "sft_warmup_steps", MT_KEY_FIXED, "responses alone are trained on", "0"},
    {"trinity.input", "taskset tasksets", MT_KEY_SECTION, "trinity.taskset"},
    {"trinity.input", "eval_tasksets default_eval_workflow_type", MT_KEY_UNUSED, VALIDATION},
    {"trinity.input", "default_workflow_type default_reward_fn_type", MT_KEY_UNUSED, "Trinity-RFT's Python classes"},
    {"trinity.taskset", "path", MT_KEY_FILES, "train-data-path", NULL, LEARNER},
    {"trinity.taskset", "storage_type", MT_KEY_FIXED, "prompts come from files", "file"},
    {"trinity.taskset", "format", MT_KEY_SECTION, "trinity.format"},
    {"trinity.taskset", "rollout_args", MT_KEY_SECTION, "trinity.rollout_args"},
    {"trinity.taskset", "default_workflow_type default_reward_fn_type reward_fn_args", MT_KEY_UNUSED,
     "Trinity-RFT's Python classes"},
    {"trinity.taskset", "workflow_args", MT_KEY_REFUSED, "prompts are those of the files"},
    {"trinity.taskset", "repeat_times", MT_KEY_FIXED, "repeat_times of algorithm has it", "1"},
    {"trinity.taskset", "subset_name split", MT_KEY_UNUSED, "Hugging Face's datasets: a file is read whole"},
    {"trinity.taskset", "data_selector task_selector", MT_KEY_SECTION, "trinity.selector"},
    {"trinity.selector", "selector_type", MT_KEY_OPTION, "shuffle-prompts",
     "sequential=false|shuffle=true|random=!take shuffle, which draws a new order in every pass|*=!take sequential or "
     "shuffle",
     LEARNER},
    {"trinity.selector", "seed", MT_KEY_UNUSED, "the order of prompts, which is drawn from --seed"},
    {"trinity.selector", "*", MT_KEY_UNUSED, "other kinds of selector_type, which are not supported"},
    {"trinity.taskset", "name index enable_progress_bar max_retry_times max_retry_interval", MT_KEY_UNUSED, TRINITY},
    {"trinity.format", "prompt_key", MT_KEY_OPTION, "prompt-key"},
    {"trinity.format", "response_key", MT_KEY_OPTION, "answer-key", NULL, LEARNER},
    {"trinity.format", "messages_key", MT_KEY_OPTION, "messages-key"},
    {"trinity.format", "prompt_type", MT_KEY_UNUSED, "datasets: a sample has a prompt or messages"},
    {"trinity.format", "system_prompt system_prompt_key reply_prefix chat_template enable_thinking", MT_KEY_REFUSED,
     "a system prompt is the first of a list of messages: give messages_key"},
    {"trinity.format", "image_key", MT_KEY_OPTION, "image-key"},
    {"trinity.format", "video_key", MT_KEY_REFUSED, "videos are not read: take files of texts and pictures"},
    {"trinity.format", "tools_key", MT_KEY_FIXED, "a conversation has its tools as tools", "tools"},
    {"trinity.format", "workflow_key reward_fn_key", MT_KEY_UNUSED, TRINITY},
    {"trinity.rollout_args", "temperature", MT_KEY_OPTION, "temperature"},
    {"trinity.rollout_args", "top_p", MT_KEY_OPTION, "top-p"},
    {"trinity.rollout_args", "top_k", MT_KEY_OPTION, "top-k", "-1=0"},
    {"trinity.rollout_args", "max_tokens", MT_KEY_OPTION, "max-new-tokens", NULL, "actor_train actor_infer"},
    {"trinity.rollout_args", "n", MT_KEY_FIXED, "repeat_times of algorithm has it", "1"},
    {"trinity.rollout_args", "logprobs", MT_KEY_UNUSED, SERVER},
    {"trinity.explorer", "rollout_model", MT_KEY_SECTION, "trinity.rollout_model"},
    {"trinity.explorer", "over_rollout", MT_KEY_SECTION, "trinity.over_rollout"},
    {"trinity.over_rollout", "ratio", MT_KEY_FIXED, "all responses are waited for", "0|0.0"},
    {"trinity.over_rollout", "wait_after_min return_partial_tasks", MT_KEY_UNUSED, "ratio, which is not supported"},
    {"trinity.explorer", "*", MT_KEY_UNUSED, TRINITY},
    {"trinity.rollout_model", "temperature", MT_KEY_OPTION, "temperature"},
    {"trinity.rollout_model", "top_p", MT_KEY_OPTION, "top-p"},
    {"trinity.rollout_model", "top_k", MT_KEY_OPTION, "top-k", "-1=0"},
    {"trinity.rollout_model", "tensor_parallel_size", MT_KEY_OPTION, "rollout-tensor-model-parallel-size", NULL,
     "actor_train"},
    {"trinity.rollout_model", "chat_template enable_thinking ignore_eos", MT_KEY_REFUSED,
     TEMPLATES "; a response ends at the end token"},
    {"trinity.rollout_model", "max_response_tokens", MT_KEY_OPTION, "max-new-tokens", NULL, "actor_train actor_infer"},
    {"trinity.rollout_model", "*", MT_KEY_UNUSED, SERVER},
    {"trinity.synchronizer", "sync_interval explorer_sync_interval trainer_sync_interval", MT_KEY_FIXED,
     "the present weights generate the responses", "1"},
    {"trinity.synchronizer", "sync_offset", MT_KEY_OPTION, "rollout-lag", NULL, LEARNER},
    {"trinity.synchronizer", "sync_method sync_style sync_timeout group_name wait_for_checkpoint", MT_KEY_UNUSED, RAY},
    {"trinity.trainer", "trainer_config", MT_KEY_SECTION, "verl"},
    {"trinity.trainer", "trainer_config_path", MT_KEY_REFUSED, "give the file itself by --config"},
    {"trinity.trainer", "trainer_type", MT_KEY_FIXED, ENGINE, "verl"},
    {"trinity.trainer", "trainer_strategy", MT_KEY_FIXED, ENGINE, "megatron|fsdp|fsdp2"},
    {"trinity.trainer", "save_interval", MT_KEY_OPTION, "save-interval", "-1=|0=", LEARNER},
    {"trinity.trainer", "total_steps", MT_KEY_OPTION, "train-iters", NULL, LEARNER},
    {"trinity.trainer", "max_checkpoints_to_keep", MT_KEY_OPTION, "keep-checkpoints", "0=", LEARNER},
    {"trinity.trainer", "grad_clip", MT_KEY_OPTION, "clip-grad", NULL, LEARNER},
    {"trinity.trainer", "use_dynamic_bsz", MT_KEY_OPTION, "sequence-packing", "false=", LEARNER},
    {"trinity.trainer", "ppo_max_token_len_per_gpu max_token_len_per_gpu", MT_KEY_UNUSED, BY_LENGTH},
    {"trinity.trainer", "ulysses_sequence_parallel_size offload_policy", MT_KEY_UNUSED, "FSDP"},
    {"trinity.trainer", "use_remove_padding", MT_KEY_UNUSED, PADDING},
    {"trinity.trainer", "name balance_batch trust_remote_code save_strategy", MT_KEY_UNUSED, RAY},
    {"trinity.trainer", "enable_preview", MT_KEY_UNUSED, TRACKERS},
    {"trinity.trainer", "save_hf_checkpoint", MT_KEY_UNUSED, CHECKPOINTS},
    {"trinity.trainer", "critic_warmup", MT_KEY_FIXED, "actor and critic train from the first iteration on", "0"},
    {"trinity.trainer", "fix_actor_microbatch_loss_scale", MT_KEY_FIXED,
     "the loss is a sum divided by the count of the whole step", "true|false"},
    {"trinity.trainer", "param_offload", MT_KEY_OPTION, "param-offload"},
    {"trinity.trainer", "grad_offload", MT_KEY_OPTION, "grad-offload"},
    {"trinity.trainer", "optimizer_offload", MT_KEY_OPTION, "optimizer-offload"},
    {"trinity.trainer", "megatron", MT_KEY_SECTION, "megatron"},
};

const mt_role_stage mt_role_stages[] = {
    {"sft_train", NULL, "sft"},
    {"student", NULL, "kd"},
    {"reward", NULL, "rm"},
    {"actor_train", "chosen_key", "dpo"},
    {"actor_train", "beta", "dpo"},
    {"actor_train", NULL, "rl"},
    {NULL, NULL, NULL},
};

const mt_role_default mt_role_defaults[] = {
    {"roll", NULL, "dtype", "bf16", "true", .unless = "fp16"},
    {"roll", NULL, "seed", "seed", "42"},
    // of transformers' TrainingArguments
    {"roll", NULL, "learning_rate", "lr", "5e-05"},
    {"roll", NULL, "weight_decay", "weight-decay", "0"},
    {"roll", NULL, "per_device_train_batch_size", "micro-batch-size", "8"},
    {"roll", NULL, "gradient_accumulation_steps", "gradient-accumulation-steps", "1", .unless = "global-batch-size"},
    {"roll", "sft", "num_train_epochs", "train-epochs", "3", .unless = "train-iters"},
    {"roll", NULL, "lora_rank", "lora-rank", "8", "lora-target"},
    {"roll", NULL, "lora_alpha", "lora-alpha", "=2 x lora-rank", "lora-target"},
    {"roll", NULL, "save_steps", "save-interval", "50", "save"},
    {"roll", "rl", "max_steps", "train-iters", "500", .unless = "train-epochs"},
    {"roll", "rl", "rollout_batch_size", "rollout-batch-size", "128"},
    {"roll", "rl", "max_new_tokens", "max-new-tokens", "=sequence - prompt"},
    {"roll", "rl", "prompt_length", "seq-length", "=prompt + response"},
    {"roll", "rl", "temperature", "temperature", "0.95"}, // of GeneratingArguments
    {"roll", "rl", "top_p", "top-p", "0.7"},
    {"roll", "rl", "top_k", "top-k", "50"},
    {"roll", "infer", "temperature", "temperature", "0.95"},
    {"roll", "infer", "top_p", "top-p", "0.7"},
    {"roll", "infer", "top_k", "top-k", "50"},
    {"roll", "rl", "loss_agg_mode", "loss-agg-mode", "seq-mean-token-mean"},
    {"roll", "rl", "cispo_epsilon_low", "clip-ratio-low", "0.1"}, // where the loss is cispo
    {"roll", "rl", "cispo_epsilon_high", "clip-ratio-high", "0.1"},
    {"roll", "rl", "adv_estimator", "adv-estimator", "gae"},
    {"roll", "rl", "lambd", "lam", "0.95", "adv-estimator=gae"},
    {"roll", "rl", "critic.learning_rate", "critic-lr", "5e-05", "adv-estimator=gae"},
    {"roll", "rl", "num_return_sequences_in_group", "num-return-sequences", "1"},
    {"roll", "rl", "kl_penalty", "kl-loss-type", "k1", "kl-in-reward"},
    {"roll", "rl", "init_kl_coef", "kl-coef", "0.2", "kl-in-reward"},
    {"roll", "rl", "reward", "reward", "exact", .unless = "reward-load"}, // in place of ROLL's Python classes
    {"roll", "rl", "reward.model_args", "reward", "model", "reward-load"},
    {"roll", "rl", "is_use_additional_prompts", "dynamic-sampling-max-rounds", "1", "dynamic-sampling"},
    // verl's generated file
    {"verl", NULL, "dtype", "bf16", "true", .unless = "fp16"},
    {"verl", NULL, "initial_loss_scale", "initial-loss-scale", "32768", "fp16", .unless = "loss-scale"},
    {"verl", NULL, "seed", "seed", "42"},
    {"verl", NULL, "lr", "lr", "1e-06"},
    {"verl", NULL, "lr_decay_style", "lr-decay-style", "constant"},
    {"verl", NULL, "sequence_parallel", "sequence-parallel", "true", "tensor-model-parallel-size"},
    {"verl", NULL, "target_modules", "lora-target", "all-linear", "lora-rank"},
    {"verl", NULL, "lora_alpha", "lora-alpha", "16", "lora-rank"},
    {"verl", "rl", "total_epochs", "train-epochs", "30", .unless = "train-iters"},
    {"verl", "rl", "resume_mode", "auto-resume", "true", "save"},
    {"verl", "rl", "train_batch_size", "rollout-batch-size", "1024"},
    {"verl", "rl", "max_response_length", "max-new-tokens", "512"},
    {"verl", "rl", "max_prompt_length", "seq-length", "=prompt + response"},
    {"verl", "rl", "n", "num-return-sequences", "1"},
    {"verl", "rl", "ppo_mini_batch_size", "global-batch-size", "=256 x num-return-sequences",
     .unless = "gradient-accumulation-steps"},
    {"verl", "rl", "adv_estimator", "adv-estimator", "gae"},
    {"verl", "rl", "adv_estimator", "whiten-advantages", "true", "adv-estimator=gae"}, // always, in its gae
    {"verl", "rl", "critic.optim.lr", "critic-lr", "1e-05", "adv-estimator=gae"},
    {"verl", "rl", "critic.cliprange_value", "value-clip", "0.5", "adv-estimator=gae"},
    {"verl", "rl", "clip_ratio_c", "clip-ratio-c", "3"},
    {"verl", "rl", "kl_loss_coef", "kl-loss-coef", "0.001", "key actor.use_kl_loss"},
    {"verl", "rl", "kl_penalty", "kl-loss-type", "k1", "kl-in-reward"},
    {"verl", "rl", "shuffle", "shuffle-mini-batches", "false"},
    {"verl", "rl", "use_policy_gradient", "distillation-in", "loss", "teacher-load"},
    {"verl", "rl", "use_policy_gradient", "distillation-in", "loss", "teachers"},
    {"verl", "rl", "loss_mode", "distillation-loss-mode", "k3", "distillation-in"},
    {"verl", "rl", "mtp.enable", "mtp-num-layers", "0"},
    {"verl", "rl", "num_speculative_tokens", "num-speculative-tokens", "1",
     "key actor_rollout_ref.model.mtp.enable_rollout"},
    {"verl", "rl", "reward_model", "reward", "model", "key reward_model.enable"},
    {"verl", "rl", "reward", "reward", "exact"}, // in place of verl's Python functions
    // Trinity-RFT's classes, and those of the trainer's part
    {"trinity", NULL, "dtype", "bf16", "true", .unless = "fp16"},
    {"trinity", NULL, "initial_loss_scale", "initial-loss-scale", "32768", "fp16", .unless = "loss-scale"},
    {"trinity", NULL, "seed", "seed", "42"},
    {"trinity", NULL, "lr_scheduler_type", "lr-decay-style", "constant"},
    {"trinity", NULL, "sequence_parallel", "sequence-parallel", "true", "tensor-model-parallel-size"},
    {"trinity", NULL, "target_modules", "lora-target", "all-linear", "lora-rank"},
    {"trinity", NULL, "lora_alpha", "lora-alpha", "32", "lora-rank"},
    {"trinity", "rl", "total_epochs", "train-epochs", "1", .unless = "train-iters"},
    {"trinity", "rl", "continue_from_checkpoint", "auto-resume", "true", "save"},
    {"trinity", "rl", "batch_size", "rollout-batch-size", "1"},
    {"trinity", "rl", "repeat_times", "num-return-sequences", "1"},
    {"trinity", "rl", "algorithm_type", "adv-estimator", "gae"},
    {"trinity", "rl", "algorithm_type", "whiten-advantages", "true", "adv-estimator=gae"}, // always, in its ppo
    {"trinity", "rl", "critic.optim.lr", "critic-lr", "1e-06", "adv-estimator=gae"},
    {"trinity", "rl", "critic.cliprange_value", "value-clip", "0.5", "adv-estimator=gae"},
    {"trinity", "rl", "clip_ratio_c", "clip-ratio-c", "3"},
    {"trinity", "rl", "kl_loss_fn", "kl-loss-type", "k2"},
    {"trinity", "rl", "kl_loss_fn_args", "kl-loss-coef", "0.001"},
    {"trinity", "rl", "policy_loss_fn_args", "clip-ratio-low", "0.0003", "pg-variant=gspo", "clip-ratio"},
    {"trinity", "rl", "policy_loss_fn_args", "clip-ratio-high", "0.0004", "pg-variant=gspo", "clip-ratio"},
    {"trinity", "rl", "policy_loss_fn_args", "clip-ratio", "0.3", "pg-variant=sppo"},
    {"trinity", "rl", "loss_agg_mode", "loss-agg-mode", "token-mean", "pg-variant=gspo"},
    {"trinity", "rl", "loss_agg_mode", "loss-agg-mode", "token-mean", "pg-variant=opmd"},
    {"trinity", "rl", "loss_agg_mode", "loss-agg-mode", "token-mean", "pg-variant=sppo"},
    {"trinity", "rl", "policy_loss_fn_args", "clip-ratio-low", "1", "pg-variant=cispo"},
    {"trinity", "rl", "policy_loss_fn_args", "clip-ratio-high", "0.28", "pg-variant=cispo"},
    {"trinity", "sft", "enable_concatenated_multi_turn", "loss-on", "last"},
    {"trinity", "sft", "total_epochs", "train-epochs", "1", .unless = "train-iters"},
    {"trinity", "dpo", "total_epochs", "train-epochs", "1", .unless = "train-iters"},
    {"trinity", "dpo", "kl_loss_fn", "kl-loss-type", "k2"}, // its loss always has one
    {"trinity", "dpo", "kl_loss_fn_args", "kl-loss-coef", "0.001"},
    {"trinity", NULL, "lr", "lr", "1e-06"},
    {"trinity", NULL, "min_lr_ratio", "min-lr", "=min_lr_ratio x lr"},
    {"trinity", NULL, "min_lr_ratio", "lr-warmup-init", "=the same with a warm-up"},
    {"trinity", "rl", "shuffle", "shuffle-mini-batches", "false"},
    {"trinity", "rl", "reward", "reward", "exact"}, // in place of Trinity-RFT's Python classes
    {NULL},
};

enum { NUM_KEYS = sizeof keys / sizeof *keys };

/* True if `word` of `length` is one of the words of `list`. */
static bool is_listed(const char *list, const char *word, size_t length) {
    for (const char *at = list; *at; at += strspn(at, " ")) {
        size_t listed = strcspn(at, " ");
        if (listed == length && strncmp(at, word, length) == 0) return true;
        at += listed;
    }
    return false;
}

bool mt_role_key_applies(const mt_role_key *row, const char *name, const char *role) {
    size_t length = strcspn(role, ".");
    if (!row->roles) return true;
    if (strcmp(row->roles, "=") != 0) return is_listed(row->roles, role, length);
    const char *own = strcmp(row->section, "rewards") == 0 && role[length] ? role + length + 1 : role;
    return strlen(name) == (own == role ? length : strlen(own)) && strncmp(own, name, strlen(name)) == 0;
}

/* The section whose keys a row "*" stands for; NULL: none. */
static const char *base_of(const mt_role_key *row) {
    bool extends = row && row->kind == MT_KEY_SECTION && !row->roles;
    return extends ? row->text : row && row->kind == MT_KEY_OTHERS ? row->values : NULL;
}

/* The row "*" of a section; NULL: there is none. */
static const mt_role_key *find_rest(const char *section) {
    for (const mt_role_key *row = keys; row < keys + NUM_KEYS; row++)
        if (*row->names == '*' && strcmp(row->section, section) == 0) return row;
    return NULL;
}

const mt_role_key *mt_role_key_find(const char *section, const char *name, const char *role) {
    const mt_role_key *other = NULL, *rest = find_rest(section);
    for (const mt_role_key *row = keys; row < keys + NUM_KEYS; row++) {
        if (strcmp(row->section, section) != 0 || row == rest || !is_listed(row->names, name, strlen(name))) continue;
        if (mt_role_key_applies(row, name, role)) return row;
        if (!other) other = row;
    }
    const char *base = base_of(rest);
    if (other || !base) return other ? other : rest;
    const mt_role_key *of_base = mt_role_key_find(base, name, role);
    if (rest->kind != MT_KEY_OTHERS) return of_base;
    return of_base || mt_role_section_is_megatron(base) ? rest : NULL;
}

bool mt_role_section_is_megatron(const char *section) {
    return is_listed("strategy_config training_args megatron transformer verl.optim trinity.optim verl.override_config",
                     section, strlen(section));
}

bool mt_role_key_nearest(char nearest[112], const char *section, const char *name) {
    size_t length = strlen(name);
    int least = length < 6 ? 2 : 2 + (int)length / 4;
    const mt_role_key *elsewhere = NULL;
    static const char *const parts[] = {"critics", "reward_models", "references", "rollouts", "teachers", "refs"};
    bool is_verl = strncmp(section, "verl", 4) == 0;
    const char *bases[4] = {section}; // sections whose keys it has
    for (int i = 1; i < 4 && bases[i - 1]; i++) bases[i] = base_of(find_rest(bases[i - 1]));
    *nearest = 0;
    if (length > 64) return false;
    for (const mt_role_key *row = keys; row < keys + NUM_KEYS; row++) {
        bool is_part = false, is_own = false; // of another role
        for (size_t i = 0; i < sizeof parts / sizeof *parts && !is_part; i++) is_part = strstr(row->section, parts[i]);
        bool is_kin = (strncmp(row->section, "verl", 4) == 0) == is_verl && !is_part;
        if (!elsewhere && is_kin && is_listed(row->names, name, length)) elsewhere = row;
        if (*row->names == '*') continue;
        for (int i = 0; i < 4 && bases[i] && !is_own; i++) is_own = strcmp(row->section, bases[i]) == 0;
        if (!is_own) continue;
        for (const char *at = row->names; *at; at += strspn(at, " ")) {
            char key[64], dashed[64]; // mt_edit_distance takes '_' in its first name as '-'
            snprintf(key, sizeof key, "%.*s", (int)strcspn(at, " "), at);
            snprintf(dashed, sizeof dashed, "%s", key);
            for (char *c = dashed; *c; c++)
                if (*c == '_') *c = '-';
            int distance = mt_edit_distance(name, length, dashed);
            if (distance < least) least = distance, snprintf(nearest, 112, "%s", key);
            at += strcspn(at, " ");
        }
    }
    if (*nearest || !elsewhere) return *nearest;
    snprintf(nearest, 112, "%s in %s", name,
             elsewhere->section + (strncmp(elsewhere->section, "verl.", 5) == 0 ? 5 : 0));
    return true;
}

/* True if the text of `length` at `at` equals `text`, whatever their case; "*" is any. */
static bool is_value(const char *at, size_t length, const char *text) {
    if (length == 1 && *at == '*') return true;
    return strlen(text) == length && strncasecmp(at, text, length) == 0;
}

bool mt_role_key_translate(const mt_role_key *row, const char *text, char *value, size_t room) {
    snprintf(value, room, "%s", text);
    const char *found = NULL;
    for (const char *at = row->values; at && *at; at += strcspn(at, "|"), at += *at == '|') {
        size_t length = row->kind == MT_KEY_FIXED ? strcspn(at, "|") : strcspn(at, "=");
        if (is_value(at, length, text) && (!found || *found == '*')) found = at;
    }
    if (row->kind == MT_KEY_FIXED) return found;
    if (!found) return true;
    found += strcspn(found, "=") + 1;
    bool is_refused = *found == '!';
    snprintf(value, room, "%.*s", (int)strcspn(found + is_refused, "|"), found + is_refused);
    return !is_refused;
}
