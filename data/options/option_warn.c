/* option_warn.c: options that change nothing, and values that were chosen. */
#include "option_warn.h"

#include "option_rules.h"
#include "option_table.h"
#include "option_typed.h"
#include "role_sizes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* MiB of saved activations per rank and micro-batch that sequence parallelism would save: of the inputs of the
 * two norms of each layer, a rank would keep its part. */
static double mt_sequence_parallel_saves(const mt_run_options *o) {
    double tp = (double)o->stack.tensor_model_parallel_size, width = (double)mt_dtype_size(mt_options_dtype(&o->stack));
    double tokens = (double)(o->stack.micro_batch_size * o->stack.seq_length / o->stack.context_parallel_size);
    double layers = (double)o->stack.num_layers / (double)o->stack.pipeline_model_parallel_size;
    return 2.0 / (1 << 20) * layers * tokens * (double)o->stack.hidden_size * width * (tp - 1) / tp;
}

/* An option that changes nothing in this run, and why. */
typedef struct mt_idle_option {
    bool is_idle;
    const char *name, *reason;
} mt_idle_option;

static void mt_idle_options_print(const mt_idle_option *options, size_t count, FILE *file) {
    for (size_t i = 0; i < count; i++)
        if (options[i].is_idle) fprintf(file, "--%s has no effect: %s\n", options[i].name, options[i].reason);
}

/* Of both programs. */
static void mt_options_print_idle_common(const mt_run_options *o, FILE *file) {
    bool cpu = o->device == MT_DEVICE_CPU, unwatched = !mt_launched_by_mpi();
    const char *no_watch = "without mpirun, no time limits are watched", *one_attention = "the CPU has one attention";
    for (int64_t i = 0; i < o->unmet_arguments.count; i += 2)
        fprintf(file, "--%s has no effect: it needs %s\n", o->unmet_arguments.items[i],
                o->unmet_arguments.items[i + 1]);
    const mt_idle_option options[] = {
        {!mt_has_experts(&o->stack) && MT_GIVEN(o, stack.expert_tensor_parallel_size), "expert-tensor-parallel-size",
         "no layer has experts"},
        {mt_is_latent(&o->stack) && MT_GIVEN(o, stack.kv_channels), "kv-channels",
         "heads of latent attention have --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim"},
        {o->stack.context_parallel_size == 1 && MT_GIVEN(o, stack.cp_comm_type), "cp-comm-type",
         "--context-parallel-size is 1"},
        {o->ignores_attention_backend == MT_ATTENTION_UNFUSED, "attention-backend unfused", one_attention},
        {o->ignores_attention_backend == MT_ATTENTION_CUDNN, "attention-backend cudnn",
         cpu ? one_attention : "the CPU has one attention, and cuDNN's has no dropout here"},
        {o->use_checkpoint_args && !o->load, "use-checkpoint-args", "there is no --load"},
        {o->ckpt_format == MT_CHECKPOINT_TORCH, "ckpt-format torch",
         "that format is read only; a checkpoint is saved as a Hugging Face folder, or with torch_dist as "
         "Megatron-Core's"},
        {unwatched && MT_GIVEN(o, stack.distributed_timeout_minutes), "distributed-timeout-minutes", no_watch},
        {unwatched && MT_GIVEN(o, stack.distributed_timeout_seconds), "distributed-timeout-seconds", no_watch},
        {mt_num_expert_layers(&o->stack) > 0 &&
             o->stack.expert_model_parallel_size * o->stack.expert_tensor_parallel_size == 1 &&
             MT_GIVEN(o, stack.moe_token_dispatcher_type),
         "moe-token-dispatcher-type", "--expert-model-parallel-size and --expert-tensor-parallel-size are 1"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Of a finished infer. */
static void mt_options_print_idle_inference(const mt_run_options *o, FILE *file) {
    bool writes = o->merge_adapter || o->convert, generates = !o->score && !writes,
         argmax = generates && !o->serve && o->stack.temperature == 0; // requests have temperatures of their own
    bool no_text = o->prompt_tokens && o->print_tokens && o->stop.count == 0,
         dense = mt_num_expert_layers(&o->stack) == 0;
    const char *top = "--temperature 0 takes the most probable token", *merges = "no text is generated",
               *copies = "the tokenizer of --load is copied";
    const mt_idle_option options[] = {
        {argmax && MT_GIVEN(o, stack.seed), "seed", top},
        {argmax && o->top_k > 0, "top-k", top},
        {argmax && o->top_p < 1, "top-p", top},
        {argmax && o->min_p > 0, "min-p", top},
        {no_text && MT_GIVEN(o, tokenizer_type), "tokenizer-type", "tokens are read and printed"},
        {no_text && MT_GIVEN(o, tokenizer_model), "tokenizer-model", "tokens are read and printed"},
        {dense && MT_GIVEN(o, stack.moe_token_dispatcher_type), "moe-token-dispatcher-type", "no layer has experts"},
        {dense && MT_GIVEN(o, stack.moe_grouped_gemm), "moe-grouped-gemm", "no layer has experts"},
        {dense && MT_GIVEN(o, stack.moe_permute_fusion), "moe-permute-fusion", "no layer has experts"},
        {writes && MT_GIVEN(o, stack.seed), "seed", merges},
        {writes && MT_GIVEN(o, stack.temperature), "temperature", merges},
        {writes && MT_GIVEN(o, top_k), "top-k", merges},
        {writes && MT_GIVEN(o, top_p), "top-p", merges},
        {writes && MT_GIVEN(o, min_p), "min-p", merges},
        {writes && MT_GIVEN(o, repetition_penalty), "repetition-penalty", merges},
        {writes && MT_GIVEN(o, max_new_tokens), "max-new-tokens", merges},
        {writes && o->stop.count > 0, "stop", merges},
        {writes && MT_GIVEN(o, kv_cache_tokens), "kv-cache-tokens", merges},
        {!generates && o->num_speculative_tokens > 0, "num-speculative-tokens", "no text is generated"},
        {writes && MT_GIVEN(o, inference_max_requests), "inference-max-requests", merges},
        {writes && MT_GIVEN(o, inference_dynamic_batching_block_size), "inference-dynamic-batching-block-size", merges},
        {writes && MT_GIVEN(o, tokenizer_type), "tokenizer-type", copies},
        {writes && MT_GIVEN(o, tokenizer_model), "tokenizer-model", copies},
        {o->ckpt_format == MT_CHECKPOINT_TORCH_DIST && !o->convert, "ckpt-format", "there is no --convert"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

static void mt_options_print_idle(const mt_run_options *o, FILE *file) {
    bool one = o->stack.data_parallel_size * o->stack.context_parallel_size == 1;
    bool warms_up = o->stack.lr_warmup_iters > 0 || o->stack.lr_warmup_samples > 0 || o->stack.lr_warmup_fraction > 0;
    bool constant = o->stack.lr_decay_style == MT_LR_CONSTANT, resumes = o->auto_resume || (o->load && o->save);
    unsigned modules = o->stack.recompute_modules, offloaded = o->stack.offload_modules;
    unsigned expert_inputs = offloaded & (MT_OFFLOAD_EXPERT_FC1 | MT_OFFLOAD_MOE_ACT);
    bool varies =
        o->stack.expert_model_parallel_size * o->stack.expert_tensor_parallel_size > 1 &&
        (!o->stack.moe_pad_expert_input_to_capacity || o->stack.moe_token_dispatcher_type != MT_DISPATCHER_ALLTOALL);
    bool all_recomputed =
        o->stack.recompute_granularity == MT_RECOMPUTE_FULL && o->stack.recompute_method == MT_RECOMPUTE_UNIFORM;
    bool experts = mt_num_expert_layers(&o->stack) > 0, mlps = mt_num_dense_layers(&o->stack) > 0;
    bool attends = false;
    for (int64_t i = 0; i < o->stack.num_layers; i++) attends |= mt_mixer_attends(mt_layer_kind_of(&o->stack, i).mixer);
    const char *alone = "there is one data-parallel rank", *dense = "no layer has experts";
    bool unwatched = !mt_launched_by_mpi();
    bool single = one && o->stack.tensor_model_parallel_size * o->stack.pipeline_model_parallel_size == 1;
    const char *no_watch = "without mpirun, no time limits are watched";
    const char *simulated = "it is for --plan, --explain and --print-launch";
    bool wants_graphs = o->stack.cuda_graph_impl != MT_GRAPHS_NONE && o->device != MT_DEVICE_CPU;
    bool timed = o->profile || o->trace || o->log_straggler || o->timing_log_level > 0;
    bool other_stage = o->stack.stage != MT_STAGE_PT && o->stack.stage != MT_STAGE_SFT;
    const char *no_graphs = timed         ? "the operations of a step are timed one by one"
                            : other_stage ? "the host computes the losses of --stage"
                                          : mt_options_without_graphs(&o->stack);
    const char *own = "samples of --sft have attention and positions of their own in any case";
    const mt_idle_option options[] = {
        {wants_graphs && no_graphs, "cuda-graph-impl", no_graphs},
        {o->ignores_save_interval, "save-interval", "there is no --save"},
        {o->ignores_train_epochs, "train-epochs", "--train-iters decides, as in transformers"},
        {MT_GIVEN(o, ckpt_format) && o->ckpt_format != MT_CHECKPOINT_TORCH && !o->save, "ckpt-format",
         "there is no --save"},
        {o->stack.pipeline_model_parallel_size == 1 && MT_GIVEN(o, stack.pipeline_schedule), "pipeline-schedule",
         "--pipeline-model-parallel-size is 1"},
        {!o->plan && !o->explain && MT_GIVEN(o, gpu), "gpu", simulated},
        {!o->plan && !o->explain && MT_GIVEN(o, gpus_per_host), "gpus-per-host", simulated},
        {o->use_checkpoint_opt_param_scheduler && !o->load, "use-checkpoint-opt-param-scheduler", "there is no --load"},
        {o->log_memory_to_tensorboard && !o->tensorboard_dir && !o->metrics, "log-memory-to-tensorboard",
         "neither --tensorboard-dir nor --metrics is given"},
        {single && o->check_weight_hash_across_dp_replicas_interval > 0,
         "check-weight-hash-across-dp-replicas-interval", alone},
        {single && o->stack.use_tp_pp_dp_mapping, "use-tp-pp-dp-mapping", "there is one rank"},
        {o->stack.apply_wd_to_qk_layernorm && !o->stack.qk_layernorm, "apply-wd-to-qk-layernorm",
         "heads have no norms without --qk-layernorm"},
        {o->ignores_sequence_parallel, "sequence-parallel", "--tensor-model-parallel-size is 1"},
        {o->ignores_first_last_layers_bf16, "first-last-layers-bf16", "without --fp8-format all layers are so"},
        {o->ignores_pre_softmax, "moe-router-pre-softmax", "--moe-router-score-function is not softmax"},
        {o->sft && o->reset_position_ids, "reset-position-ids", own},
        {o->sft && o->reset_attention_mask, "reset-attention-mask", own},
        {one && o->stack.overlap_grad_reduce, "overlap-grad-reduce", alone},
        {one && o->stack.overlap_param_gather, "overlap-param-gather", alone},
        {one && o->use_distributed_optimizer, "use-distributed-optimizer", alone},
        {one && MT_GIVEN(o, stack.data_parallel_sharding_strategy) &&
             o->stack.data_parallel_sharding_strategy != MT_NO_SHARD,
         "data-parallel-sharding-strategy", alone},
        {one && o->stack.ddp_bucket_size > 0, "ddp-bucket-size", alone},
        {one && o->stack.fp8_param_gather, "fp8-param-gather", alone},
        {o->add_bias_linear && MT_GIVEN(o, stack.add_qkv_bias) && o->stack.add_qkv_bias, "add-qkv-bias",
         "all linear layers have biases"},
        {!one && o->stack.ddp_bucket_size > 0 && o->stack.data_parallel_sharding_strategy >= MT_SHARD_GRADS,
         "ddp-bucket-size", "a layer's gradients are sharded before the next layer's are computed"},
        {o->stack.window_size >= o->stack.seq_length, "window-size", "no sequence is longer"},
        {mt_is_latent(&o->stack) && !o->stack.qk_layernorm && MT_GIVEN(o, stack.latent_norm_epsilon),
         "latent-norm-epsilon", "latents have no norms without --qk-layernorm"},
        {constant && MT_GIVEN(o, stack.min_lr), "min-lr", "--lr-decay-style is constant"},
        {constant && MT_GIVEN(o, stack.lr_decay_iters), "lr-decay-iters", "--lr-decay-style is constant"},
        {!warms_up && MT_GIVEN(o, stack.lr_warmup_init), "lr-warmup-init", "there is no warm-up"},
        {o->overwrite && !o->save && !o->metrics, "overwrite", "neither --save nor --metrics is given"},
        {unwatched && MT_GIVEN(o, stack.save_timeout_seconds), "save-timeout-seconds", no_watch},
        {o->eval_iters == 0 && MT_GIVEN(o, eval_interval), "eval-interval", "--eval-iters is 0"},
        {o->eval_iters == 0 && MT_GIVEN(o, eval_interval_fraction), "eval-interval-fraction", "--eval-iters is 0"},
        {o->eval_iters == 0 && MT_GIVEN(o, eval_global_batch_size), "eval-global-batch-size", "--eval-iters is 0"},
        {o->eval_iters == 0 && MT_GIVEN(o, stack.eval_micro_batch_size), "eval-micro-batch-size", "--eval-iters is 0"},
        {o->eval_iters == 0 && MT_GIVEN(o, start_eval_at_iter), "start-eval-at-iter", "--eval-iters is 0"},
        {o->load && MT_GIVEN(o, stack.init_method_std), "init-method-std", "the weights are loaded"},
        {o->exit_on_missing_checkpoint && !resumes, "exit-on-missing-checkpoint", "the run does not resume"},
        {modules & MT_MODULE_CORE_ATTN, "recompute-modules core_attn", "attention never keeps its probabilities"},
        {modules & MT_MODULE_MLP && !mlps, "recompute-modules mlp", "no layer has an MLP without experts"},
        {modules & MT_MODULE_MOE && !experts, "recompute-modules moe", dense},
        {modules & MT_MODULE_MOE_ACT && !experts, "recompute-modules moe_act", dense},
        {modules & MT_MODULE_SHARED_EXPERTS && (!experts || o->stack.moe_shared_expert_intermediate_size == 0),
         "recompute-modules shared_experts", "no layer has a shared expert"},
        {offloaded & ~(unsigned)MT_OFFLOAD_ATTN_NORM && all_recomputed, "offload-modules other than attn_norm",
         "full recomputation keeps the input of a unit alone"},
        {offloaded & MT_OFFLOAD_MLP && !mlps, "offload-modules mlp", "no layer has an MLP without experts"},
        {offloaded & MT_OFFLOAD_CORE_ATTN && !attends, "offload-modules core_attn", "no layer has attention"},
        {expert_inputs && !experts, "offload-modules expert_fc1, moe_act", dense},
        {expert_inputs && experts && varies, "offload-modules expert_fc1, moe_act",
         "the number of their rows depends on the data; --moe-pad-expert-input-to-capacity fixes it"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

static void mt_options_print_idle_optimizer(const mt_run_options *o, FILE *file) {
    bool typed = MT_GIVEN(o, stack.main_grads_dtype) || MT_GIVEN(o, stack.main_params_dtype) ||
                 MT_GIVEN(o, stack.exp_avg_dtype) || MT_GIVEN(o, stack.exp_avg_sq_dtype);
    const mt_idle_option options[] = {
        {o->use_precision_aware_optimizer && !typed, "use-precision-aware-optimizer",
         "none of --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype is given"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Options of models that take turns. */
static void mt_options_print_idle_roles(const mt_run_options *o, FILE *file) {
    bool rests = o->param_offload || o->grad_offload || o->optimizer_offload;
    const mt_idle_option options[] = {
        {o->stack.stage == MT_STAGE_DPO && rests && mt_options_refer_to_base(o),
         "param-offload, grad-offload, optimizer-offload",
         "no other model works: the reference is this one with its adapters switched off"},
        {o->ref_expert_model_parallel_size > 1 && !mt_has_experts(&o->stack), "ref-expert-model-parallel-size",
         "no layer has experts"},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Options of the policy's loss and advantages where a teacher alone trains. */
static void mt_options_print_idle_policy(const mt_run_options *o, FILE *file) {
    bool in_loss = o->distillation_in == MT_DISTILL_IN_LOSS || o->distillation_in == MT_DISTILL_IN_POLICY_GRADIENT;
    const char *alone = "with --no-use-task-rewards the divergence from the teacher is the whole loss";
    if (o->stack.stage != MT_STAGE_RL || !in_loss || o->use_task_rewards) return;
    const mt_idle_option options[] = {
        {MT_GIVEN(o, pg_variant), "pg-variant", alone},
        {MT_GIVEN(o, clip_ratio), "clip-ratio", alone},
        {MT_GIVEN(o, clip_ratio_low), "clip-ratio-low", alone},
        {MT_GIVEN(o, clip_ratio_high), "clip-ratio-high", alone},
        {MT_GIVEN(o, clip_ratio_c), "clip-ratio-c", alone},
        {MT_GIVEN(o, adv_estimator), "adv-estimator", alone},
        {MT_GIVEN(o, whiten_advantages) && o->whiten_advantages, "whiten-advantages", alone},
        {MT_GIVEN(o, entropy_coeff) && o->entropy_coeff != 0, "entropy-coeff", alone},
        {MT_GIVEN(o, kl_loss_coef) && o->kl_loss_coef != 0, "kl-loss-coef", alone},
        {MT_GIVEN(o, kl_loss_type), "kl-loss-type", alone},
        {MT_GIVEN(o, kl_in_reward) && o->kl_in_reward, "kl-in-reward", alone},
        {o->distillation_in == MT_DISTILL_IN_LOSS && o->rollout_is != MT_ROLLOUT_IS_NONE, "rollout-is", alone},
    };
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* Options of another optimizer. */
static void mt_options_print_idle_betas(const mt_run_options *o, FILE *file) {
    const char *name = mt_optimizer_name(o->stack.optimizer);
    bool other = o->stack.optimizer != MT_OPTIMIZER_ADAMW;
    char reason[40];
    snprintf(reason, sizeof reason, "--optimizer is %s", name);
    const mt_idle_option options[] = {{other && MT_GIVEN(o, stack.adam_beta1), "adam-beta1", reason},
                                      {other && MT_GIVEN(o, stack.adam_beta2), "adam-beta2", reason},
                                      {other && MT_GIVEN(o, stack.adam_eps), "adam-eps", reason}};
    mt_idle_options_print(options, sizeof options / sizeof *options, file);
}

/* The first rule by which an option has no effect: one that it needs, or (*is_needed: false) one beside which it has
 * none. False: it has an effect. Rules with a condition on the option's value are for others than the default. */
static bool mt_option_find_idle_rule(const mt_run_options *o, const mt_option *option, mt_program program,
                                     mt_option_rule *rule, bool *is_needed) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) continue;
        bool is_own = row->offset == option->offset;
        *is_needed = true;
        for (const char *column = is_own ? row->needs : NULL; mt_option_next_rule(&column, rule);)
            if ((!rule->condition || strcmp(rule->condition, "any") == 0) && rule->other->programs & (int)program &&
                !mt_option_has(o, rule->other, rule->choices))
                return true;
        *is_needed = false;
        for (const char *column = is_own ? row->excludes : NULL; mt_option_next_rule(&column, rule);)
            if (!rule->condition && !rule->choices && mt_option_used(o, rule->other)) return true;
        bool excludes = !is_own && row->programs & (int)program;
        for (const char *column = excludes ? row->excludes : NULL; mt_option_next_rule(&column, rule);) {
            if (rule->other->offset != option->offset || rule->choices || !mt_option_rule_holds(o, row, rule)) continue;
            rule->choices = rule->condition && row->type == MT_CHOICE ? "" : NULL;
            rule->other = row;
            return true;
        }
    }
    return false;
}

void mt_options_warn_defaults(const mt_run_options *o, mt_program program, FILE *file) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_of(row->offset) != row || !(row->programs & (int)program)) continue;
        if (!mt_options_gave(o, row->offset) || !mt_option_is_default(o, row)) continue;
        bool once = row->offset == MT_AT(dataloader_type) && o->sft && o->stack.stage != MT_STAGE_RL; // it reads once
        if (once) continue;
        bool is_flag = row->type == MT_FLAG || row->type == MT_NO, needed, from_file = false;
        if (is_flag && !*mt_option_bool(o, row)) continue; // off, as it says
        for (int64_t i = 2; i < o->config_keys.count; i += 4)
            from_file |= strcmp(o->config_keys.items[i], row->name) == 0; // listed with the keys of its file
        mt_option_rule rule;
        if (from_file || !mt_option_find_idle_rule(o, row, program, &rule, &needed)) continue;
        if (mt_option_is_form_of(row, rule.other) || mt_option_is_form_of(rule.other, row)) continue;
        const mt_option *shown = row;
        for (const mt_option *other = row; row->type == MT_NO && other->help && shown->type == MT_NO; other++)
            if (other->name && other->offset == row->offset && other->type == MT_FLAG) shown = other;
        char *value = rule.choices && !*rule.choices ? mt_option_text(o, rule.other) : mt_strdup("");
        const char *choices = *value ? value : rule.choices ? rule.choices : "";
        fprintf(file, "--%s has no effect: %s --%s%s%s\n", shown->name, needed ? "it needs" : "not beside",
                rule.other->name, *choices ? " " : "", choices);
        free(value);
    }
}

static void mt_options_print_chosen(const mt_run_options *o, FILE *file) {
    long long tp = o->stack.tensor_model_parallel_size, etp = o->stack.expert_tensor_parallel_size;
    bool experts = mt_has_experts(&o->stack);
    if (experts && o->stack.sequence_parallel && !MT_GIVEN(o, stack.sequence_parallel))
        fprintf(
            file,
            "--sequence-parallel is on: with experts, each of the %lld tensor-parallel ranks routes its own tokens\n",
            tp);
    if (experts && etp != tp && !MT_GIVEN(o, stack.expert_tensor_parallel_size))
        fprintf(file,
                "--expert-tensor-parallel-size is %lld: experts or ranks do not divide by "
                "--tensor-model-parallel-size %lld\n",
                etp, tp);
    if (tp > 1 && !o->stack.sequence_parallel)
        fprintf(file,
                "--tensor-model-parallel-size %lld without --sequence-parallel: with it, each rank would keep at least "
                "%.3g MiB less per micro-batch\n",
                tp, mt_sequence_parallel_saves(o));
}

void mt_options_warn(const mt_run_options *o, mt_program program, FILE *file) {
    char *text = NULL;
    size_t size;
    FILE *lines = open_memstream(&text, &size);
    MT_CHECK(lines);
    mt_options_print_idle_common(o, lines);
    if (program == MT_PROGRAM_INFER) {
        mt_options_print_idle_inference(o, lines);
    } else {
        mt_options_print_chosen(o, lines);
        mt_options_print_idle(o, lines);
        mt_options_print_idle_optimizer(o, lines);
        mt_options_print_idle_roles(o, lines);
        mt_options_print_idle_policy(o, lines);
        mt_options_print_idle_betas(o, lines);
    }
    mt_options_warn_defaults(o, program, lines);
    MT_CHECK(fclose(lines) == 0);
    mt_options_print_typed(o, text, file);
    free(text);
}

void mt_options_warn_cpu(const mt_run_options *o, mt_program program, FILE *file) {
    bool trains = program == MT_PROGRAM_TRAIN;
    const mt_idle_option options[] = {
        {o->stack.deterministic_mode, "deterministic-mode", "on the CPU, runs always repeat bit for bit"},
        {o->stack.attention_backend == MT_ATTENTION_FLASH, "attention-backend flash", "the CPU has one attention"},
        {trains && o->stack.cuda_graph_impl != MT_GRAPHS_NONE, "cuda-graph-impl", "the CPU has no graphs"},
        {trains && o->stack.optimizer_cpu_offload, "optimizer-cpu-offload",
         "on the CPU, the optimizer is in host memory already; only its order of work is simulated"},
        {trains && (o->param_offload || o->optimizer_offload), "param-offload, optimizer-offload",
         "on the CPU all memory is the host's"},
    };
    char *text = NULL;
    size_t size;
    FILE *lines = open_memstream(&text, &size);
    MT_CHECK(lines);
    mt_idle_options_print(options, sizeof options / sizeof *options, lines);
    MT_CHECK(fclose(lines) == 0);
    mt_options_print_typed(o, text, file);
    free(text);
}
