/* option_rules.c: derives the option values that were left open, and checks the rules between values that need
 * arithmetic; the option table (option_table.c) has the ranges, and the options that one needs or excludes. Needs
 * megatron.c alone. Invariants: a message names both sides of a rule; mt_options_derive keeps no memory and may be
 * called again. */
#include "option_rules.h"

#include "correction.h"
#include "hidden_pairs.h"
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most constraints have no numbers

/* ---- sizes, positions, lengths */

bool mt_options_converts(const mt_run_options *o) {
    return MT_GIVEN(o, stack.train_iters) && o->stack.train_iters == 0 && o->stack.train_samples == 0 && o->load &&
           o->save;
}

int64_t mt_options_data_seed(const mt_run_options *o) {
    return o->data_seed >= 0 ? o->data_seed : o->stack.seed;
}

void mt_options_derive_sizes(mt_run_options *o) {
    bool gated = mt_activation_rows[mt_options_activation(&o->stack)].gated;
    if (o->stack.ffn_hidden_size == 0)
        o->stack.ffn_hidden_size = gated ? 4 * o->stack.hidden_size * 2 / 3 / 64 * 64 : 4 * o->stack.hidden_size;
    bool one_group = o->group_query_attention && !MT_GIVEN(o, stack.num_query_groups);
    if (o->stack.num_query_groups == 0) o->stack.num_query_groups = one_group ? 1 : o->stack.num_attention_heads;
    if (mt_is_latent(&o->stack)) {
        o->stack.kv_channels = o->stack.qk_head_dim + o->stack.qk_pos_emb_head_dim;
        if (o->stack.latent_norm_epsilon == 0) o->stack.latent_norm_epsilon = o->stack.norm_epsilon; // as in Megatron
    }
    if (o->stack.kv_channels == 0 && o->stack.num_attention_heads > 0)
        o->stack.kv_channels = o->stack.hidden_size / o->stack.num_attention_heads;
    mt_mixers_derive(&o->stack, o->hybrid_override_pattern != NULL);
    if (o->stack.value_channels == o->stack.kv_channels) o->stack.value_channels = 0;
}

void mt_options_derive_biases(mt_run_options *o) {
    if (!o->add_bias_linear) return;
    o->stack.attention_output_bias = o->stack.mlp_bias = true;
    o->stack.add_qkv_bias = !mt_is_latent(&o->stack); // as in Megatron
}

/* Sizes and biases of the model. */
static int mt_options_derive_model(mt_run_options *o, mt_error *error) {
    int64_t C = o->stack.hidden_size, heads = o->stack.num_attention_heads, groups = o->stack.num_query_groups;
    bool bounds = o->stack.activation_func_clamp_value > 0, shifts = o->stack.glu_linear_offset != 0;
    bool gated = mt_activation_rows[mt_options_activation(&o->stack)].gated;
    const mt_constraint before[] = {
        {bounds && !gated, "--activation-func-clamp-value needs a gated MLP: --swiglu, --geglu or --quick-geglu"},
        {shifts && !gated, "--glu-linear-offset needs a gated MLP: --swiglu, --geglu or --quick-geglu"},
        {C == 0, "--hidden-size is missing: give the model's shape by its options, --hf-config or --load"},
        {heads == 0, "--num-attention-heads is missing: give the model's shape by its options, --hf-config or --load"},
        {MT_GIVEN(o, group_query_attention) && !o->group_query_attention && groups > 0 && groups != heads,
         "--num-query-groups %lld needs --group-query-attention",
         {groups}},
    };
    if (MT_CHECK_CONSTRAINTS(before, error)) return -1;
    const mt_multiple multiples[] = {
        {"--hidden-size", C, "--num-attention-heads (without --kv-channels) =",
         o->stack.kv_channels == 0 && !mt_is_latent(&o->stack) ? heads : 1},
        {"--num-attention-heads", heads, "--num-query-groups", mt_max(groups, 1)},
        {"--num-attention-heads", heads, "--window-num-query-groups", mt_max(o->stack.window_num_query_groups, 1)},
        {"--num-query-groups", groups,
         "--num-attention-heads (for --multi-latent-attention) =", mt_is_latent(&o->stack) ? heads : 1},
    };
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    mt_options_derive_sizes(o);
    mt_options_derive_biases(o);
    if (o->stack.ffn_hidden_size == 0)
        return mt_error_set(error, "--ffn-hidden-size is missing: --hidden-size %lld is too small to derive it",
                            (long long)C);
    double attention = (double)heads * (double)o->stack.kv_channels, mlp = (double)o->stack.ffn_hidden_size;
    double parameters = (double)o->stack.num_layers * (double)C * (4 * attention + 3 * mlp);
    if (parameters <= 1e15) return 0;
    return mt_error_set(error,
                        "--num-layers, --hidden-size, --ffn-hidden-size, --num-attention-heads and --kv-channels "
                        "make %.3g parameters; at most 1e15 are supported",
                        parameters);
}

/* RoPE: its channels, and the numbers of its scaling. */
static int mt_options_derive_rope(mt_run_options *o, mt_error *error) {
    bool llama3 = o->stack.rope_scaling_type == MT_ROPE_SCALING_LLAMA3,
         yarn = o->stack.rope_scaling_type == MT_ROPE_SCALING_YARN;
    int64_t channels = (int64_t)((double)o->stack.kv_channels * o->stack.rotary_percent),
            latent = o->stack.qk_pos_emb_head_dim;
    if (o->stack.position_embedding_type != MT_POSITION_ROPE && !mt_is_latent(&o->stack)) return 0;
    if (mt_is_latent(&o->stack)) channels = latent;
    const mt_multiple multiples[] = {
        {"--qk-pos-emb-head-dim", latent, NULL, mt_is_latent(&o->stack) ? 2 : 1},
        {"--kv-channels x --rotary-percent (for RoPE) =", channels, NULL, 2},
    };
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    if (channels < 2)
        return mt_error_set(error, "--kv-channels %lld times --rotary-percent %g leaves no channels for RoPE",
                            (long long)o->stack.kv_channels, o->stack.rotary_percent);
    if (llama3 && o->stack.rope_scaling_factor == 0) o->stack.rope_scaling_factor = 8;
    if (llama3 && o->stack.original_max_position_embeddings == 0) o->stack.original_max_position_embeddings = 8192;
    if (llama3 && o->stack.rope_low_freq_factor >= o->stack.rope_high_freq_factor)
        return mt_error_set(error, "--rope-low-freq-factor %g must be less than --rope-high-freq-factor %g",
                            o->stack.rope_low_freq_factor, o->stack.rope_high_freq_factor);
    if (yarn && o->stack.yarn_attention_factor == 0) {
        bool both = o->yarn_mscale > 0 && o->stack.yarn_mscale_all_dim > 0;
        o->stack.yarn_attention_factor = mt_yarn_mscale(o->stack.rope_scaling_factor, both ? o->yarn_mscale : 1);
        if (both)
            o->stack.yarn_attention_factor /=
                mt_yarn_mscale(o->stack.rope_scaling_factor, o->stack.yarn_mscale_all_dim);
    }
    return 0;
}

/* Drafts need modules, and layers whose cache can forget tokens. */
static int mt_options_check_drafts(const mt_run_options *run, bool generates, mt_error *error) {
    const mt_options *o = &run->stack;
    int64_t drafts = run->num_speculative_tokens;
    const mt_constraint rules[] = {
        {o->mtp_num_layers == 0,
         "--num-speculative-tokens %lld: the model has no modules of multi-token prediction, which draft tokens; train "
         "it with --mtp-num-layers, or leave the option out",
         {drafts}},
        {mt_has_states(o),
         "--num-speculative-tokens %lld: layers with a state (linear attention, Mamba, short convolutions) cannot take "
         "back a draft that is not accepted; leave it out",
         {drafts}},
        {!generates && drafts > o->mtp_num_layers,
         "--num-speculative-tokens %lld is more than the --mtp-num-layers %lld that train; give at most as many",
         {drafts, o->mtp_num_layers}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Multi-token prediction; scoring, and generation without drafts, do without it, and --convert keeps it. */
static int mt_options_derive_mtp(mt_run_options *run, bool generates, mt_error *error) {
    mt_options *o = &run->stack;
    bool drafts = run->num_speculative_tokens > 0 && !run->score && !run->convert && !run->merge_adapter;
    if (generates && drafts && o->mtp_num_layers == 0) o->mtp_num_layers = run->mtp_layers_stored;
    if (drafts && mt_options_check_drafts(run, generates, error) != 0) return -1;
    if (generates && !drafts) o->mtp_num_layers = 0;
    if (o->mtp_num_layers == 0) {
        o->mtp_use_repeated_layer = false;
        free(o->mtp_hybrid_layers), free(run->mtp_hybrid_override_pattern);
        o->mtp_hybrid_layers = run->mtp_hybrid_override_pattern = NULL;
    }
    if (o->mtp_num_layers == 0 || o->seq_length == 0 || o->seq_length > o->mtp_num_layers) return 0;
    return mt_error_set(error, "--mtp-num-layers %lld must be less than --seq-length %lld",
                        (long long)o->mtp_num_layers, (long long)o->seq_length);
}

/* Recomputation: defaults are Megatron's, except that full recomputation without a method is uniform. */
static int mt_options_derive_recompute(mt_options *o, mt_error *error) {
    bool full = o->recompute_granularity == MT_RECOMPUTE_FULL, distributes = o->distribute_saved_activations;
    const mt_multiple multiples[] = {{"--distribute-saved-activations: --hidden-size", distributes ? o->hidden_size : 0,
                                      "--tensor-model-parallel-size", o->tensor_model_parallel_size}};
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    bool selective = o->recompute_granularity == MT_RECOMPUTE_SELECTIVE;
    if (selective && o->recompute_modules == 0) o->recompute_modules = MT_MODULE_CORE_ATTN;
    if (full && o->recompute_method == MT_RECOMPUTE_DEFAULT) o->recompute_method = MT_RECOMPUTE_UNIFORM;
    if (full && o->recompute_num_layers == 0) o->recompute_num_layers = 1;
    return 0;
}

/* --first-last-layers-bf16 leaves a layer for fp8. */
static int mt_options_check_fp8(const mt_options *o, mt_error *error) {
    int64_t start = o->num_layers_at_start_in_bf16, end = o->num_layers_at_end_in_bf16;
    if (!o->first_last_layers_bf16 || start + end < o->num_layers) return 0;
    return mt_error_set(error,
                        "--num-layers-at-start-in-bf16 %lld and --num-layers-at-end-in-bf16 %lld leave no layer of "
                        "%lld in fp8; lower them or leave out --first-last-layers-bf16",
                        (long long)start, (long long)end, (long long)o->num_layers);
}

/* A residual stream of another type than the other activations. Without a norm before them, blocks would read it. */
static int mt_options_check_residual(const mt_options *o, mt_error *error) {
    if (!o->fp32_residual_connection) return 0;
    if (!o->bf16 && !o->fp16)
        return mt_error_set(error, "--fp32-residual-connection needs --bf16 or --fp16: without them all is fp32");
    if ((mt_placed_norms(o) & MT_NORMS_IN) == MT_NORMS_IN) return 0;
    return mt_error_set(error, "--fp32-residual-connection needs norms before attention and MLP (--norm-placement "
                               "before or both); leave it out for this model");
}

/* Vocabulary, positions and sequence length. */
static int mt_options_derive_lengths(mt_run_options *o, mt_program program, mt_error *error) {
    bool learned = o->stack.position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE,
         trains = program != MT_PROGRAM_INFER;
    bool converts = mt_options_converts(o);
    int64_t rows = o->make_vocab_size_divisible_by * o->stack.tensor_model_parallel_size;
    const mt_constraint rules[] = {
        {o->stack.vocab_size == 0,
         "the vocabulary is unknown: give --vocab-size, or --tokenizer-type and --tokenizer-model"},
        {o->stack.seq_length == 0 && trains && !converts, "--seq-length is missing"},
    };
    if (MT_CHECK_CONSTRAINTS(rules, error)) return -1;
    o->stack.padded_vocab_size = (o->stack.vocab_size + rows - 1) / rows * rows;
    if (o->stack.seq_length == 0 && converts) { // a few tokens, which the context ranks can split
        o->stack.seq_length =
            2 * o->stack.tensor_model_parallel_size * o->stack.context_parallel_size * (1 + o->stack.mtp_num_layers);
        if (o->stack.max_position_embeddings > 0)
            o->stack.seq_length = mt_min(o->stack.seq_length, o->stack.max_position_embeddings);
    }
    if (o->stack.max_position_embeddings == 0) o->stack.max_position_embeddings = o->stack.seq_length;
    if (o->stack.seq_length == 0) o->stack.seq_length = o->stack.max_position_embeddings;
    if (o->stack.seq_length > o->stack.max_position_embeddings && (learned || trains))
        return mt_error_set(error, "--seq-length %lld is more than --max-position-embeddings %lld; %s",
                            (long long)o->stack.seq_length, (long long)o->stack.max_position_embeddings,
                            learned && o->load ? "the weights have no more" : "lower the one or raise the other");
    return 0;
}

/* ---- ranks and experts: how ranks split the model, sequences and the batch */

/* Everything that ranks split evenly; mt_mixers_check has those of other mixers than attention. */
static int mt_options_check_multiples(const mt_options *o, int64_t world_size, mt_error *error) {
    int64_t tp = o->tensor_model_parallel_size, cp = o->context_parallel_size, pp = o->pipeline_model_parallel_size;
    int64_t ep = o->expert_model_parallel_size, etp = mt_max(o->expert_tensor_parallel_size, 1);
    const char *tensor = "--tensor-model-parallel-size";
    const mt_multiple rows[] = {
        {"the number of ranks", world_size,
         "--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size =", tp * pp * cp,
         "start others or lower a size"},
        {"--num-attention-heads", o->num_attention_heads, tensor, tp},
        {"--num-query-groups", o->num_query_groups, tensor, tp, .or_divisor = o->window_num_query_groups == 0},
        {"--window-num-query-groups", o->window_num_query_groups, tensor, tp},
        {"--ffn-hidden-size", mt_num_dense_layers(o) == 0 ? 0 : o->ffn_hidden_size, tensor, tp},
        {"--num-experts", o->num_experts, "--expert-model-parallel-size", ep},
        {"--moe-ffn-hidden-size", o->moe_ffn_hidden_size, "--expert-tensor-parallel-size", etp},
        {"--moe-shared-expert-intermediate-size", o->moe_shared_expert_intermediate_size, tensor, tp},
        {"the number of ranks", world_size,
         "--expert-tensor-parallel-size x --expert-model-parallel-size x --pipeline-model-parallel-size =",
         mt_has_experts(o) ? ep * etp * pp : 1},
    };
    return MT_CHECK_MULTIPLES(rows, error);
}

/* With stages as neighbours, the ranks of a stage are the same for experts only if each replica has as many. */
static int mt_options_check_mapping(const mt_options *o, mt_error *error) {
    long long model = o->tensor_model_parallel_size * o->context_parallel_size;
    long long experts = o->expert_model_parallel_size * mt_max(o->expert_tensor_parallel_size, 1);
    bool alike = !mt_has_experts(o) || o->pipeline_model_parallel_size == 1 || model == experts;
    if (!o->use_tp_pp_dp_mapping || alike) return 0;
    return mt_error_set(error,
                        "--use-tp-pp-dp-mapping with experts needs --tensor-model-parallel-size x "
                        "--context-parallel-size = %lld to equal --expert-model-parallel-size x "
                        "--expert-tensor-parallel-size = %lld",
                        model, experts);
}

/* A module that predicts several tokens counts its choices once for each: one rank would count those of the second
 * before the next micro-batch's first, and data-parallel ranks compute both at the same time. */
static int mt_options_check_repeated(const mt_options *o, mt_error *error) {
    bool repeats = o->mtp_use_repeated_layer && o->mtp_num_layers > 1 && mt_has_experts(o);
    if (!repeats || o->data_parallel_size == 1 || !mt_balances_by(o, MT_BALANCING_GLOBAL_AUX_LOSS)) return 0;
    return mt_error_set(error,
                        "--mtp-use-repeated-layer with --moe-router-load-balancing-type global_aux_loss needs a "
                        "data-parallel size of 1, not %lld; take aux_loss or seq_aux_loss",
                        (long long)o->data_parallel_size);
}

/* The data-parallel size: ranks / (tensor, pipeline and context sizes). */
static int mt_options_derive_parallel(mt_options *o, int64_t world_size, mt_error *error) {
    int64_t tp = o->tensor_model_parallel_size, pp = o->pipeline_model_parallel_size, cp = o->context_parallel_size;
    if (mt_options_check_multiples(o, world_size, error)) return -1;
    o->data_parallel_size = world_size / (tp * pp * cp);
    if (mt_options_check_repeated(o, error) != 0) return -1;
    return mt_options_check_mapping(o, error);
}

static int mt_options_check_latents(const mt_options *o, mt_error *error) {
    const mt_constraint rules[] = {
        {mt_is_latent(o) && o->qk_layernorm && o->normalization != MT_RMSNORM,
         "--multi-latent-attention with --qk-layernorm needs --normalization RMSNorm, not LayerNorm"},
        {o->rotary_interleaved && o->position_embedding_type != MT_POSITION_ROPE && !mt_is_latent(o),
         "--rotary-interleaved needs --position-embedding-type rope"},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Sinkhorn computes the probabilities of the chosen experts itself, as in Megatron. */
static int mt_options_check_sinkhorn(const mt_options *o, mt_error *error) {
    if (!mt_balances_by(o, MT_BALANCING_SINKHORN)) return 0;
    const mt_constraint rules[] = {
        {o->moe_router_topk == 1 && o->moe_router_score_function != MT_SCORE_SIGMOID,
         "--moe-router-load-balancing-type sinkhorn with --moe-router-topk 1 needs --moe-router-score-function "
         "sigmoid"},
        {o->moe_router_topk > 1 && o->moe_router_score_function == MT_SCORE_SQRT_SOFTPLUS,
         "--moe-router-load-balancing-type sinkhorn takes no --moe-router-score-function sqrtsoftplus"},
        {o->moe_router_topk > 1 && !o->moe_router_pre_softmax,
         "--moe-router-load-balancing-type sinkhorn with --moe-router-topk %lld needs --moe-router-pre-softmax",
         {o->moe_router_topk}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Several types are auxiliary losses, with a coefficient each. */
static int mt_options_check_balancing(const mt_run_options *run, mt_error *error) {
    const mt_options *o = &run->stack;
    const mt_ints *types = &o->moe_router_load_balancing_type;
    int64_t E = o->num_experts, k = o->moe_router_topk, others = 0, tokens = o->micro_batch_size * o->seq_length;
    int64_t evaluated = mt_eval_micro_batch_size(o) * o->seq_length;
    for (int64_t i = 0; i < types->count; i++)
        others += types->items[i] < MT_BALANCING_AUX_LOSS || types->items[i] > MT_BALANCING_GLOBAL_AUX_LOSS;
    bool quantiles = mt_balances_by(o, MT_BALANCING_QUANTILE);
    const mt_constraint rules[] = {
        {types->count > 1 && others > 0, "--moe-router-load-balancing-type with several names takes aux_loss, "
                                         "seq_aux_loss and global_aux_loss; leave out the others"},
        {o->moe_aux_loss_coeff.count != types->count && (types->count > 1 || o->moe_aux_loss_coeff.count > 1),
         "--moe-aux-loss-coeff has %lld numbers, and --moe-router-load-balancing-type names %lld losses; give one for "
         "each, in the same order",
         {o->moe_aux_loss_coeff.count, types->count}},
        {quantiles && (run->sft || run->stack.stage != MT_STAGE_PT || o->dynamic_context_parallel),
         "--moe-router-load-balancing-type quantile_balancing needs micro-batches of equal numbers of tokens, those of "
         "pre-training without --dynamic-context-parallel"},
        {quantiles && k >= E,
         "--moe-router-load-balancing-type quantile_balancing needs a --moe-router-topk below --num-experts %lld, not "
         "%lld",
         {E, k}},
        {quantiles && tokens * k % E != 0,
         "--moe-router-load-balancing-type quantile_balancing gives all experts equally many of the %lld choices of a "
         "micro-batch (--micro-batch-size x --seq-length x --moe-router-topk): make it a multiple of --num-experts "
         "%lld",
         {tokens * k, E}},
        {quantiles && evaluated * k % E != 0,
         "--moe-router-load-balancing-type quantile_balancing gives all experts equally many of the %lld choices of a "
         "micro-batch of an evaluation (--eval-micro-batch-size x --seq-length x --moe-router-topk): make it a "
         "multiple of --num-experts %lld",
         {evaluated * k, E}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* How the router chooses experts. */
static int mt_options_check_router(const mt_run_options *o, mt_error *error) {
    int64_t E = o->stack.num_experts, k = o->stack.moe_router_topk, groups = o->stack.moe_router_num_groups;
    int64_t group_topk = o->stack.moe_router_group_topk, choice = groups > 0 ? E / groups * group_topk : E;
    bool softmax = o->stack.moe_router_score_function == MT_SCORE_SOFTMAX,
         pre_softmax = o->stack.moe_router_pre_softmax;
    const mt_constraint rules[] = {
        {o->stack.moe_shared_expert_intermediate_size > 0 && (o->stack.mlp_bias || o->add_bias_linear),
         "--moe-shared-expert-intermediate-size needs --disable-bias-linear: a shared expert has no biases"},
        {k > E, "--moe-router-topk %lld must be at most --num-experts %lld", {k, E}},
        {softmax && k == 1 && !pre_softmax, "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax of one "
                                            "chosen expert is 1 and teaches nothing"},
        {groups > 0 && (group_topk > groups || group_topk > k),
         "--moe-router-group-topk %lld must be at most --moe-router-num-groups %lld and --moe-router-topk %lld",
         {group_topk, groups, k}},
        {groups > 0 && k > choice,
         "--moe-router-topk %lld is more than the %lld experts of --moe-router-group-topk %lld groups; raise it or "
         "lower --moe-router-num-groups",
         {k, choice, group_topk}},
    };
    const mt_multiple multiples[] = {{"--num-experts", E, "--moe-router-num-groups", mt_max(groups, 1)}};
    if (MT_CHECK_MULTIPLES(multiples, error) || MT_CHECK_CONSTRAINTS(rules, error)) return -1;
    return mt_options_check_sinkhorn(&o->stack, error);
}

/* The parts of a dense MLP that become experts. */
static int mt_options_derive_upcycling(mt_run_options *o, mt_error *error) {
    int64_t parts = o->stack.moe_upcycling_granularity;
    if (!o->stack.moe_use_upcycling) return 0;
    const mt_multiple multiples[] = {
        {"--ffn-hidden-size", o->stack.ffn_hidden_size, "--moe-upcycling-granularity", parts},
        {"--num-experts", o->stack.num_experts, "--moe-upcycling-granularity", parts},
    };
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    if (!MT_GIVEN(o, stack.moe_ffn_hidden_size)) o->stack.moe_ffn_hidden_size = o->stack.ffn_hidden_size / parts;
    const mt_constraint rules[] = {
        {o->stack.moe_ffn_hidden_size != o->stack.ffn_hidden_size / parts,
         "--moe-ffn-hidden-size %lld: experts of --moe-use-upcycling have --ffn-hidden-size / "
         "--moe-upcycling-granularity = %lld channels; leave it out",
         {o->stack.moe_ffn_hidden_size, o->stack.ffn_hidden_size / parts}},
        {o->stack.mlp_bias, "--moe-use-upcycling needs a model whose MLP has no biases"},
        {o->stack.hybrid_layers != NULL, "--moe-use-upcycling does not run with --hybrid-override-pattern"},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Experts. */
static int mt_options_derive_experts(mt_run_options *o, int64_t world_size, mt_error *error) {
    int64_t tp = o->stack.tensor_model_parallel_size,
            others = o->stack.expert_model_parallel_size * o->stack.pipeline_model_parallel_size;
    if (!mt_has_experts(&o->stack)) return 0;
    if (mt_options_derive_upcycling(o, error)) return -1;
    if (o->stack.moe_ffn_hidden_size == 0) o->stack.moe_ffn_hidden_size = o->stack.ffn_hidden_size;
    if (mt_balances_by(&o->stack, MT_BALANCING_QUANTILE) && o->stack.moe_router_enable_expert_bias &&
        !o->stack.moe_router_quantile_bias)
        return mt_error_set(error,
                            "--moe-router-load-balancing-type quantile_balancing has a bias of its own, of logits "
                            "in place of scores: --moe-router-enable-expert-bias excludes it");
    if (mt_balances_by(&o->stack, MT_BALANCING_QUANTILE)) o->stack.moe_router_quantile_bias = true;
    if (o->stack.moe_router_quantile_bias) o->stack.moe_router_enable_expert_bias = true; // the same parameter
    if (o->stack.expert_tensor_parallel_size ==
        0) // split as the layer is, where the experts' widths and the ranks allow it
        o->stack.expert_tensor_parallel_size = o->stack.moe_ffn_hidden_size % tp || world_size % (tp * others) ? 1 : tp;
    if (o->stack.moe_router_group_best == 0 && o->stack.moe_router_group_topk > 0)
        o->stack.moe_router_group_best =
            mt_max(o->stack.moe_router_topk / o->stack.moe_router_group_topk, 1); // as in Megatron
    if (mt_balances_by(&o->stack, MT_BALANCING_SINKHORN) && !MT_GIVEN(o, stack.moe_router_score_function)) {
        // as in Megatron: a sigmoid for one expert, a softmax over all experts for several
        if (o->stack.moe_router_topk == 1) o->stack.moe_router_score_function = MT_SCORE_SIGMOID;
        if (o->stack.moe_router_topk > 1) o->stack.moe_router_pre_softmax = true;
    }
    return mt_options_check_balancing(o, error) ? -1 : mt_options_check_router(o, error);
}

bool mt_trains_on_pairs(const mt_options *o) {
    return o->stage == MT_STAGE_RM || o->stage == MT_STAGE_DPO;
}

int64_t mt_row_length(const mt_options *o) {
    return o->seq_length * (mt_trains_on_pairs(o) ? 2 : 1);
}

/* A query of a sliding window sees few blocks of a ring, and one that selects keys may see any. */
static void mt_options_derive_cp_comm_type(mt_run_options *o) {
    bool gathers = o->stack.window_size > 0 || mt_num_selected_keys(&o->stack) > 0;
    if (gathers && o->stack.context_parallel_size > 1 && !MT_GIVEN(o, stack.cp_comm_type))
        o->stack.cp_comm_type = MT_CP_ALL_GATHER;
}

/* Context parallelism: the ranks that exchange tokens for heads, and the layouts that a sliding window allows. With one
 * context rank --cp-comm-type has no effect, as in Megatron. */
static int mt_options_derive_context(mt_run_options *o, mt_error *error) {
    int64_t tp = o->stack.tensor_model_parallel_size, cp = o->stack.context_parallel_size;
    int64_t heads = o->stack.num_attention_heads / tp,
            groups = o->stack.num_query_groups < tp ? 1 : o->stack.num_query_groups / tp;
    const mt_ints *sizes = &o->hierarchical_context_parallel_sizes;
    bool hierarchical = o->stack.cp_comm_type == MT_CP_A2A_P2P && (cp > 1 || sizes->count > 0);
    int64_t a2a = hierarchical ? sizes->items[0] : o->stack.cp_comm_type == MT_CP_A2A ? cp : 1;
    if (hierarchical && (sizes->count != 2 || a2a < 1 || a2a > cp || a2a * sizes->items[1] != cp))
        return mt_error_set(error,
                            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A2A RING, two numbers "
                            "whose product is --context-parallel-size %lld",
                            (long long)cp);
    if (mt_has_states(&o->stack) && a2a > 1 && a2a < cp)
        return mt_error_set(error,
                            "--cp-comm-type a2a+p2p does not run with layers of %s, whose states pass along one ring "
                            "of ranks; take p2p, all_gather or a2a",
                            mt_mixer_name(mt_first_with_states(&o->stack)));
    const char *ranks = "the ranks over which --cp-comm-type a2a splits them,", *advice = "take p2p or all_gather";
    const mt_multiple multiples[] = {
        {"--num-attention-heads / --tensor-model-parallel-size =", heads, ranks, a2a, advice},
        {"--num-query-groups / --tensor-model-parallel-size =", groups, ranks, a2a, advice},
        {"--window-num-query-groups / --tensor-model-parallel-size =", o->stack.window_num_query_groups / tp, ranks,
         a2a, advice},
    };
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    if (o->stack.window_size > 0 && cp > a2a && o->stack.cp_comm_type != MT_CP_ALL_GATHER)
        return mt_error_set(error,
                            "--window-size %lld does not work with --cp-comm-type %s, whose blocks of keys are far "
                            "apart; take all_gather or a2a",
                            (long long)o->stack.window_size, hierarchical ? "a2a+p2p" : "p2p");
    o->stack.context_a2a_size = a2a;
    if (!o->stack.dynamic_context_parallel) return 0;
    if (!MT_GIVEN(o, max_seqlen_per_dp_cp_rank))
        o->max_seqlen_per_dp_cp_rank = mt_rank_tokens(&o->stack, o->stack.micro_batch_size * mt_row_length(&o->stack));
    int64_t smallest = o->min_dynamic_context_parallel_size, most = o->max_seqlen_per_dp_cp_rank;
    bool balances = mt_has_experts(&o->stack) && (mt_balances_by(&o->stack, MT_BALANCING_SEQ_AUX_LOSS) ||
                                                  mt_balances_by(&o->stack, MT_BALANCING_SINKHORN));
    const mt_constraint rules[] = {
        {(cp & (cp - 1)) != 0 || cp > 2 << MT_CONTEXT_BLOCKS,
         "--dynamic-context-parallel needs a power of two up to %lld as --context-parallel-size, not %lld",
         {2 << MT_CONTEXT_BLOCKS, cp}},
        {(smallest & (smallest - 1)) != 0 || smallest > cp,
         "--min-dynamic-context-parallel-size %lld must be a power of two, at most --context-parallel-size %lld",
         {smallest, cp}},
        {most * cp < o->stack.seq_length,
         "--max-seqlen-per-dp-cp-rank %lld on --context-parallel-size %lld ranks holds %lld tokens, fewer than "
         "--seq-length %lld; raise one of the first two",
         {most, cp, most * cp, o->stack.seq_length}},
        {most * cp < mt_row_length(&o->stack),
         "--max-seqlen-per-dp-cp-rank %lld on --context-parallel-size %lld ranks holds %lld tokens, fewer than a pair "
         "of samples of --seq-length %lld; raise one of the first two",
         {most, cp, most * cp, o->stack.seq_length}},
        {!o->sft && o->reset_position_ids != o->reset_attention_mask,
         "--dynamic-context-parallel gives whole documents to ranks: --reset-position-ids and --reset-attention-mask "
         "need each other"},
        {!o->sft && o->dataloader_type == MT_DATALOADER_CYCLIC,
         "--dynamic-context-parallel and --dataloader-type cyclic exclude each other; leave one out"},
        {balances, "--dynamic-context-parallel gives the ranks of a context group different samples, which "
                   "--moe-router-load-balancing-type seq_aux_loss and sinkhorn do not distinguish; take aux_loss"},
        {mt_has_experts(&o->stack) && o->stack.moe_expert_capacity_factor > 0,
         "--moe-expert-capacity-factor counts the tokens of a context group, whose ranks have different samples with "
         "--dynamic-context-parallel; leave one out"},
    };
    const mt_multiple shares[] = {{"--max-seqlen-per-dp-cp-rank", most, "--tensor-model-parallel-size",
                                   o->stack.sequence_parallel ? tp : 1,
                                   "its ranks share the tokens with --sequence-parallel"}};
    return MT_CHECK_CONSTRAINTS(rules, error) ? -1 : MT_CHECK_MULTIPLES(shares, error);
}

/* ---- stages, batches, schedules */

/* The number of layers in messages about stages: see mt_options.num_layers. */
static const char *mt_options_layers_name(const mt_options *o) {
    return o->decoder_num_layers > 0 ? "--encoder-num-layers plus twice --decoder-num-layers" : "--num-layers";
}

/* Virtual stages per rank: given, from the layers of a stage, or from the letters of a layout. */
static int mt_options_derive_stages(mt_run_options *o, mt_error *error) {
    int64_t pp = o->stack.pipeline_model_parallel_size, per_stage = o->num_layers_per_virtual_pipeline_stage;
    int64_t extra = o->stack.account_for_embedding_in_pipeline_split + o->stack.account_for_loss_in_pipeline_split;
    int64_t layers = o->stack.num_layers + extra, *vp = &o->stack.num_virtual_stages_per_pipeline_rank;
    int64_t stages = o->stack.pipeline_letters ? mt_pipeline_layout_count(o->stack.pipeline_letters) : pp;
    char name[128];
    snprintf(name, sizeof name, "%s%s", mt_options_layers_name(&o->stack),
             extra ? ", with the layers that --account-for-* adds," : "");
    const mt_multiple multiples[] = {
        {"--pipeline-model-parallel-layout's number of stages", stages, "--pipeline-model-parallel-size", pp},
        {name, layers, "--pipeline-model-parallel-size x --num-layers-per-virtual-pipeline-stage =",
         o->stack.pipeline_letters ? 1 : mt_max(pp * per_stage, 1)},
    };
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    bool typed = MT_GIVEN(o, stack.num_virtual_stages_per_pipeline_rank);
    int64_t follows = o->stack.pipeline_letters ? stages / pp : per_stage > 0 ? layers / (pp * per_stage) : *vp;
    if (typed && follows != *vp)
        return mt_error_set(error,
                            "--%s makes %lld virtual stages, and --num-virtual-stages-per-pipeline-rank is %lld: "
                            "the two exclude each other unless they agree; leave one out",
                            o->stack.pipeline_letters ? "pipeline-model-parallel-layout"
                                                      : "num-layers-per-virtual-pipeline-stage",
                            (long long)follows, (long long)*vp);
    if (o->stack.pipeline_letters)
        *vp = stages / pp;
    else if (per_stage > 0)
        *vp = layers / (pp * per_stage);
    else if (!typed)
        *vp = 1;
    if (pp * *vp <= 1000000) return 0;
    return mt_error_set(error, "--num-virtual-stages-per-pipeline-rank %lld is too many for %lld ranks", (long long)*vp,
                        (long long)pp);
}

/* The schedule, which must fit the number of virtual stages. */
static int mt_options_derive_order(mt_run_options *o, mt_error *error) {
    int64_t pp = o->stack.pipeline_model_parallel_size, vp = o->stack.num_virtual_stages_per_pipeline_rank;
    int64_t *group = &o->stack.microbatch_group_size_per_virtual_pipeline_stage;
    if (pp > 1 && !MT_GIVEN(o, stack.pipeline_schedule))
        o->stack.pipeline_schedule = vp > 1 ? MT_SCHEDULE_INTERLEAVED : MT_SCHEDULE_1F1B;
    if (!MT_GIVEN(o, stack.microbatch_group_size_per_virtual_pipeline_stage)) *group = vp > 1 ? pp : 0;
    mt_schedule_kind kind = o->stack.pipeline_schedule;
    const mt_constraint rules[] = {
        {kind == MT_SCHEDULE_INTERLEAVED && vp == 1,
         "--pipeline-schedule interleaved needs several virtual stages: give --num-virtual-stages-per-pipeline-rank"},
        {kind != MT_SCHEDULE_INTERLEAVED && vp > 1,
         "--pipeline-schedule 1f1b or zb-h1 has one stage per rank, but there are %lld: leave it out, or leave out "
         "--num-virtual-stages-per-pipeline-rank and other options that make virtual stages",
         {vp}},
        {vp == 1 && *group > 0, "--microbatch-group-size-per-virtual-pipeline-stage needs several virtual stages: give "
                                "--num-virtual-stages-per-pipeline-rank"},
        {vp > 1 && *group < pp,
         "--microbatch-group-size-per-virtual-pipeline-stage %lld must be at least --pipeline-model-parallel-size %lld",
         {*group, pp}},
        {*group - pp + 1 >= 2 * MT_CHANNEL_TICKETS, // messages in flight; each end holds half of them
         "--microbatch-group-size-per-virtual-pipeline-stage %lld must be less than --pipeline-model-parallel-size "
         "%lld + %lld: more messages would be in flight than fit",
         {*group, pp, 2 * MT_CHANNEL_TICKETS - 1}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Interleaved groups of micro-batches must be full, or the last one long enough to fill the pipeline. */
static int mt_options_check_micro_batches(const mt_options *o, int64_t batch, mt_error *error) {
    int64_t micro_batches = batch / (o->micro_batch_size * o->data_parallel_size);
    int64_t pp = o->pipeline_model_parallel_size, group = o->microbatch_group_size_per_virtual_pipeline_stage;
    if (o->num_virtual_stages_per_pipeline_rank == 1) return 0;
    int64_t rest = micro_batches % group;
    const mt_constraint rules[] = {
        {micro_batches < group,
         "a batch of %lld sequences is %lld micro-batches, fewer than the %lld of "
         "--microbatch-group-size-per-virtual-pipeline-stage (default: --pipeline-model-parallel-size); raise the "
         "batch",
         {batch, micro_batches, group}},
        {rest != 0 && rest < pp,
         "a batch of %lld sequences is %lld micro-batches; groups of %lld leave %lld over, fewer than "
         "--pipeline-model-parallel-size %lld: change the batch or --microbatch-group-size-per-virtual-pipeline-stage",
         {batch, micro_batches, group, rest, pp}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* A batch of an evaluation splits into its micro-batches. Any number of these pass through a pipeline. */
static int mt_options_check_eval_batch(const mt_run_options *o, mt_error *error) {
    int64_t micro = mt_eval_micro_batch_size(&o->stack), unit = micro * o->stack.data_parallel_size;
    bool of_run = micro == o->stack.micro_batch_size && o->eval_global_batch_size == 0;
    int64_t batch = mt_eval_batch_size(o), least = unit > 0 ? mt_divide_up(batch, unit) * unit : 0;
    if (of_run || unit == 0 || batch % unit == 0) return 0;
    return mt_error_set(error,
                        "%s %lld must be a multiple of %lld, %s %lld x %lld data-parallel ranks; try "
                        "--eval-global-batch-size %lld",
                        o->eval_global_batch_size > 0 ? "--eval-global-batch-size"
                                                      : "--global-batch-size, the batch of evaluations too,",
                        (long long)batch, (long long)unit,
                        o->stack.eval_micro_batch_size > 0 ? "--eval-micro-batch-size" : "--micro-batch-size",
                        (long long)micro, (long long)o->stack.data_parallel_size, (long long)least);
}

/* A batch of `value` sequences must split into micro-batches for every data-parallel rank. */
static int mt_options_check_batch(const mt_options *o, const char *name, int64_t value, mt_error *error) {
    int64_t unit = o->micro_batch_size * o->data_parallel_size, less = value / unit * unit;
    char other[64] = "", advice[160];
    if (less > 0) snprintf(other, sizeof other, "%lld or ", (long long)less);
    snprintf(advice, sizeof advice, "try %s%lld", other, (long long)(less + unit));
    const mt_multiple rows[] = {{name, value, "--micro-batch-size x the data-parallel size =", unit, advice}};
    return MT_CHECK_MULTIPLES(rows, error);
}

/* A number with the suffix K, M, B or T, as in Megatron-LM; -1: it is none, or too large. */
static int64_t mt_options_read_count(const char *text, char **end) {
    static const char suffixes[] = "KMBT";
    double number = isdigit((unsigned char)*text) ? strtod(text, end) : -1;
    if (number < 0) return -1;
    const char *suffix = **end ? strchr(suffixes, toupper((unsigned char)**end)) : NULL;
    for (const char *s = suffixes; suffix && s <= suffix; s++) number *= 1000;
    *end += suffix != NULL;
    return number <= 1e15 ? (int64_t)number : -1;
}

/* The steps of --step-batch-size-schedule; the last size is that of the run. */
static int mt_options_read_batch_steps(mt_run_options *o, mt_error *error) {
    static const char blanks[] = " ,\t\r\n";
    o->num_batch_steps = 0;
    if (!o->step_batch_size_schedule) return 0;
    for (char *at = o->step_batch_size_schedule + strspn(o->step_batch_size_schedule, blanks); *at;) {
        char *end = at;
        int64_t tokens = mt_options_read_count(at, &end), size = -1, samples = tokens / mt_max(o->stack.seq_length, 1);
        if (tokens >= 0 && *end == ':') size = mt_options_read_count(end + 1, &end);
        int64_t before = o->num_batch_steps > 0 ? o->batch_steps[o->num_batch_steps - 1][0] : -1;
        if (size < 1 || size > 1073741824 || (*end && !strchr(blanks, *end)))
            return mt_error_set(error,
                                "--step-batch-size-schedule expects TOKENS:SIZE, such as 0:384 200B:768, got "
                                "'%.40s'",
                                at);
        if (o->num_batch_steps == MT_MAX_BATCH_STEPS || samples <= before || (before < 0 && samples > 0))
            return mt_error_set(error,
                                "--step-batch-size-schedule: %.*s: the first number of tokens must be 0, each later "
                                "one larger by a sequence at least, and there may be %d sizes",
                                (int)mt_min(end - at, 40), at, MT_MAX_BATCH_STEPS);
        o->batch_steps[o->num_batch_steps][0] = samples, o->batch_steps[o->num_batch_steps++][1] = size;
        at = end + strspn(end, blanks);
    }
    if (o->num_batch_steps == 0) return mt_error_set(error, "--step-batch-size-schedule has no size");
    o->stack.global_batch_size = o->batch_steps[o->num_batch_steps - 1][1];
    return 0;
}

static int mt_options_derive_batches(mt_run_options *o, mt_error *error) {
    if (mt_options_read_batch_steps(o, error) != 0) return -1;
    const int64_t *ramp = o->rampup_batch_size.items, steps = o->gradient_accumulation_steps, longest = 1073741824;
    if (steps > longest / (o->stack.micro_batch_size * o->stack.data_parallel_size))
        return mt_error_set(error,
                            "--micro-batch-size %lld x --gradient-accumulation-steps %lld x %lld data-parallel ranks "
                            "make a batch of more than %lld sequences",
                            (long long)o->stack.micro_batch_size, (long long)steps,
                            (long long)o->stack.data_parallel_size, (long long)longest);
    int64_t product = o->stack.micro_batch_size * steps * o->stack.data_parallel_size;
    if (steps > 0 && MT_GIVEN(o, stack.global_batch_size) && o->stack.global_batch_size != product)
        return mt_error_set(error,
                            "--micro-batch-size %lld x --gradient-accumulation-steps %lld x %lld data-parallel ranks "
                            "is not --global-batch-size %lld: --gradient-accumulation-steps and --global-batch-size "
                            "exclude each other unless they agree; leave one out",
                            (long long)o->stack.micro_batch_size, (long long)steps,
                            (long long)o->stack.data_parallel_size, (long long)o->stack.global_batch_size);
    if (steps > 0) o->stack.global_batch_size = product;
    if (o->stack.global_batch_size == 0)
        o->stack.global_batch_size = o->stack.micro_batch_size * o->stack.data_parallel_size;
    int64_t responses = o->rollout_batch_size * o->num_return_sequences;
    if (o->stack.stage == MT_STAGE_RL && o->stack.global_batch_size > responses)
        return mt_error_set(error,
                            "%s %lld is more than the responses of an iteration, --rollout-batch-size %lld x "
                            "--num-return-sequences %lld = %lld; lower it, or leave it out",
                            steps > 0 ? "--micro-batch-size x --gradient-accumulation-steps x data-parallel ranks ="
                                      : "--global-batch-size",
                            (long long)o->stack.global_batch_size, (long long)o->rollout_batch_size,
                            (long long)o->num_return_sequences, (long long)responses);
    bool of_responses = o->stack.stage == MT_STAGE_RL && !MT_GIVEN(o, stack.global_batch_size) && steps == 0;
    const char *name = of_responses
                           ? "--rollout-batch-size x --num-return-sequences, the default --global-batch-size, ="
                           : "--global-batch-size";
    if (mt_options_check_batch(&o->stack, name, o->stack.global_batch_size, error)) return -1;
    if (mt_options_check_micro_batches(&o->stack, o->stack.global_batch_size, error)) return -1;
    if (mt_options_check_eval_batch(o, error) != 0) return -1;
    for (int64_t i = 0; i < o->num_batch_steps; i++)
        if (mt_options_check_batch(&o->stack, "a size of --step-batch-size-schedule", o->batch_steps[i][1], error) ||
            mt_options_check_micro_batches(&o->stack, o->batch_steps[i][1], error))
            return -1;
    if (o->rampup_batch_size.count == 0) return 0;
    bool good = o->rampup_batch_size.count == 3;
    for (int i = 0; i < 3 && good; i++) good = ramp[i] > 0 && ramp[i] <= 1000000000000;
    if (!good) return mt_error_set(error, "--rampup-batch-size expects three numbers: START INCREMENT SAMPLES");
    if (ramp[0] > o->stack.global_batch_size)
        return mt_error_set(error, "--rampup-batch-size's start %lld must be at most --global-batch-size %lld",
                            (long long)ramp[0], (long long)o->stack.global_batch_size);
    const mt_multiple multiples[] = {
        {"--global-batch-size less --rampup-batch-size's start =", o->stack.global_batch_size - ramp[0],
         "--rampup-batch-size's increment", ramp[1]}};
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    if (mt_options_check_batch(&o->stack, "--rampup-batch-size's start", ramp[0], error)) return -1;
    if (mt_options_check_batch(&o->stack, "--rampup-batch-size's increment", ramp[1], error)) return -1;
    for (int64_t size = ramp[0]; o->stack.num_virtual_stages_per_pipeline_rank > 1 && size < o->stack.global_batch_size;
         size += ramp[1])
        if (mt_options_check_micro_batches(&o->stack, size, error)) return -1;
    return 0;
}

/* The letters of the stages: one E at the start, one L at the end, the MTP modules right before L. */
static int mt_options_check_letters(const mt_run_options *o, mt_error *error) {
    const char *letters = o->stack.pipeline_letters, *last = letters + strlen(letters) - (*letters != 0), *mtp = last;
    bool good = *letters == 'E' && *last == 'L';
    int64_t layers = 0;
    while (mtp > letters && mtp[-1] == 'm') mtp--;
    int64_t modules = last - mtp;
    for (const char *at = letters; *at; at++) {
        if ((*at == 'E' && at != letters) || (*at == 'L' && at != last)) good = false;
        if (*at == 'm' && at < mtp) modules = -1; // a module before other letters
        layers += *at == 't';
    }
    if (!good)
        return mt_error_set(error,
                            "--pipeline-model-parallel-layout '%.200s' must begin with E and end with L, once each",
                            o->pipeline_model_parallel_layout);
    if (modules != o->stack.mtp_num_layers)
        return mt_error_set(error,
                            "--pipeline-model-parallel-layout '%.200s' must have --mtp-num-layers %lld times m, right "
                            "before L and in its stage",
                            o->pipeline_model_parallel_layout, (long long)o->stack.mtp_num_layers);
    if (layers != o->stack.num_layers)
        return mt_error_set(error, "--pipeline-model-parallel-layout '%.200s' has %lld layers, but %s is %lld",
                            o->pipeline_model_parallel_layout, (long long)layers, mt_options_layers_name(&o->stack),
                            (long long)o->stack.num_layers);
    return 0;
}

/* `ranks` ranks have equal shares of `layers`; `name` names the layers in the error. */
static int mt_options_check_share(const mt_options *o, const char *name, int64_t layers, int64_t ranks,
                                  mt_error *error) {
    int64_t vp = o->num_virtual_stages_per_pipeline_rank;
    if (layers >= 0 && layers % (ranks * vp) == 0) return 0;
    return mt_error_set(error,
                        "%s, %lld, must be a multiple of %lld pipeline ranks times %lld virtual stages: change "
                        "--num-layers, --pipeline-model-parallel-size or --num-virtual-stages-per-pipeline-rank",
                        name, (long long)layers, (long long)ranks, (long long)vp);
}

/* The layers of stages, for mt_pipeline_layout_build. */
static int mt_options_check_layout(const mt_run_options *o, mt_error *error) {
    int64_t pp = o->stack.pipeline_model_parallel_size, first = o->stack.decoder_first_pipeline_num_layers;
    int64_t last = o->stack.decoder_last_pipeline_num_layers, middle = pp - (first > 0) - (last > 0);
    int64_t extra = o->stack.account_for_embedding_in_pipeline_split + o->stack.account_for_loss_in_pipeline_split;
    int64_t rest = o->stack.num_layers + extra - first - last;
    if (o->stack.pipeline_letters) return mt_options_check_letters(o, error);
    if (first == 0 && last == 0) {
        char name[128];
        snprintf(name, sizeof name, "%s%s", mt_options_layers_name(&o->stack),
                 extra > 0 ? " plus the layers that --account-for-* adds" : "");
        return mt_options_check_share(&o->stack, name, rest, pp, error);
    }
    if (rest < 0 || (middle == 0 && rest > 0))
        return mt_error_set(error,
                            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, %lld "
                            "together, do not fit %s %lld on %lld ranks",
                            (long long)(first + last), mt_options_layers_name(&o->stack),
                            (long long)o->stack.num_layers, (long long)pp);
    if (mt_options_check_share(&o->stack, "--decoder-first-pipeline-num-layers", first, 1, error)) return -1;
    if (mt_options_check_share(&o->stack, "--decoder-last-pipeline-num-layers", last, 1, error)) return -1;
    return middle > 0 ? mt_options_check_share(&o->stack, "the layers of the other ranks", rest, middle, error) : 0;
}

/* The keys that a layer of sparse attention shares do not pass from stage to stage. */
static int mt_options_check_shared_indices(const mt_options *o, mt_error *error) {
    int64_t count = o->pipeline_model_parallel_size * o->num_virtual_stages_per_pipeline_rank;
    mt_stage *stages = mt_malloc(count * (int64_t)sizeof *stages);
    int status = 0;
    mt_pipeline_layout_build(stages, o);
    for (int64_t i = 0; i < count && status == 0; i++)
        if (stages[i].num_layers > 0 && mt_layer_kind_of(o, stages[i].first_layer).shares_indices)
            status = mt_error_set(error,
                                  "pipeline stage %lld begins with layer %lld, which has no indexer and attends to the "
                                  "keys of layer %lld (--dsa-indexer-topk-freq %lld), and these do not pass between "
                                  "stages; begin it with a layer that has one (--pipeline-model-parallel-layout)",
                                  (long long)i, (long long)stages[i].first_layer, (long long)stages[i].first_layer - 1,
                                  (long long)o->dsa_indexer_topk_freq);
    free(stages);
    return status;
}

/* Stages, their schedule, and the batches, which the ranks that hold the same stage share. */
static int mt_options_derive_pipeline(mt_run_options *o, mt_error *error) {
    if (mt_options_derive_stages(o, error) || mt_options_derive_order(o, error)) return -1;
    if (mt_options_check_layout(o, error) || mt_options_check_shared_indices(&o->stack, error)) return -1;
    return mt_options_derive_batches(o, error);
}

/* Steps for train_samples: whole batches, each of the size at its first sample, as Megatron counts them. */
static int64_t mt_options_count_iterations(const mt_run_options *o) {
    if (o->stack.train_samples == 0) return o->stack.train_iters;
    if (o->num_batch_steps > 0) { // the last step may be over train_samples
        int64_t steps = 0, trained = 0;
        for (int64_t i = 0; i < o->num_batch_steps && trained < o->stack.train_samples; i++) {
            int64_t end = i + 1 < o->num_batch_steps ? o->batch_steps[i + 1][0] : INT64_MAX;
            end = mt_min(end, o->stack.train_samples);
            int64_t more = end > trained ? mt_divide_up(end - trained, o->batch_steps[i][1]) : 0;
            steps += more, trained += more * o->batch_steps[i][1];
        }
        return steps;
    }
    if (o->rampup_batch_size.count == 0) return o->stack.train_samples / o->stack.global_batch_size;
    int64_t iterations = 0, consumed = 0, end = mt_min(o->rampup_batch_size.items[2], o->stack.train_samples);
    while (consumed <= end) {
        int64_t batch = mt_global_batch_size(o, consumed), low = 1, high = (end - consumed) / batch + 1;
        while (low < high) { // bisect for the step where the batch grows; it never shrinks
            int64_t middle = low + (high - low + 1) / 2;
            if (mt_global_batch_size(o, consumed + (middle - 1) * batch) == batch)
                low = middle;
            else
                high = middle - 1;
        }
        iterations += low, consumed += low * batch;
    }
    if (o->stack.train_samples > consumed)
        iterations += (o->stack.train_samples - consumed) / o->stack.global_batch_size;
    return iterations;
}

/* Weight decay starts and ends at --weight-decay unless it has a schedule. */
static int mt_options_derive_weight_decay(mt_run_options *o, mt_error *error) {
    bool constant = o->stack.weight_decay_incr_style == MT_WEIGHT_DECAY_CONSTANT;
    bool start = MT_GIVEN(o, stack.start_weight_decay), end = MT_GIVEN(o, stack.end_weight_decay);
    const mt_constraint rules[] = {
        {constant && (start || end),
         "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"},
        {!constant && (!start || !end || o->stack.start_weight_decay > o->stack.end_weight_decay),
         "--weight-decay-incr-style linear and cosine need --start-weight-decay and --end-weight-decay, the first at "
         "most the second"},
    };
    if (MT_CHECK_CONSTRAINTS(rules, error)) return -1;
    if (constant) o->stack.start_weight_decay = o->stack.end_weight_decay = o->weight_decay;
    return 0;
}

/* --train-iters and --train-samples that agree; the durations of the learning rate decide which of them stays. */
static int mt_options_derive_length(mt_run_options *o, mt_error *error) {
    bool by_samples =
        o->stack.lr_decay_samples > 0 || o->stack.lr_warmup_samples > 0 || o->stack.lr_wsd_decay_samples > 0;
    bool by_iters = o->stack.lr_decay_iters > 0 || o->stack.lr_warmup_iters > 0 || o->stack.lr_wsd_decay_iters > 0;
    if (o->stack.train_iters == 0 || o->stack.train_samples == 0) return 0;
    int64_t samples = mt_consumed_samples(o, o->stack.train_iters);
    if (samples != o->stack.train_samples)
        return mt_error_set(error,
                            "--train-iters %lld are %lld samples, and --train-samples is %lld: --train-iters and "
                            "--train-samples exclude each other unless they agree; leave one out",
                            (long long)o->stack.train_iters, (long long)samples, (long long)o->stack.train_samples);
    if (by_samples && by_iters)
        return mt_error_set(error, "--lr-*-iters and --lr-*-samples exclude each other; leave one kind out");
    *(by_samples || o->rampup_batch_size.count > 0 ? &o->stack.train_iters : &o->stack.train_samples) = 0;
    return 0;
}

/* Intervals that are shares of all steps, rounded up, as transformers' Trainer has them. */
static int mt_options_derive_intervals(mt_run_options *o, mt_error *error) {
    const struct {
        const char *name;
        double share;
        int64_t *steps;
        bool is_given;
    } intervals[] = {{"eval", o->eval_interval_fraction, &o->eval_interval, MT_GIVEN(o, eval_interval)},
                     {"log", o->log_interval_fraction, &o->log_interval, MT_GIVEN(o, log_interval)},
                     {"save", o->save_interval_fraction, &o->save_interval, MT_GIVEN(o, save_interval)}};
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++) {
        if (intervals[i].share == 0) continue;
        int64_t steps = (int64_t)ceil(intervals[i].share * (double)o->stack.num_iterations);
        const char *name = intervals[i].name;
        if (intervals[i].is_given && *intervals[i].steps != steps)
            return mt_error_set(error,
                                "--%s-interval-fraction %g is %lld steps, and --%s-interval is %lld: the two exclude "
                                "each other unless they agree; leave one out",
                                name, intervals[i].share, (long long)steps, name, (long long)*intervals[i].steps);
        *intervals[i].steps = steps;
    }
    return 0;
}

/* The length of training, and the schedules of learning rate and weight decay. */
static int mt_options_derive_schedules(mt_run_options *o, mt_error *error) {
    bool wsd = o->stack.lr_decay_style == MT_LR_WSD;
    o->stack.num_iterations = 0;
    if (mt_options_converts(o)) return 0;
    if (mt_options_derive_length(o, error) != 0) return -1;
    if ((o->stack.train_iters > 0) == (o->stack.train_samples > 0))
        return o->stack.train_iters > 0
                   ? mt_error_set(error, "--train-iters and --train-samples exclude each other; leave one out")
               : MT_GIVEN(o, stack.train_iters)
                   ? mt_error_set(error, "--train-iters 0 leaves no step; say how long to train, or give --load and "
                                         "--save too: then it converts the checkpoint")
                   : mt_error_set(error, "give one of --train-iters and --train-samples: how long to train");
    o->stack.num_iterations = mt_options_count_iterations(o);
    if (o->stack.num_iterations == 0)
        return mt_error_set(error, "--train-samples %lld is less than one --global-batch-size %lld",
                            (long long)o->stack.train_samples, (long long)o->stack.global_batch_size);
    if (o->stack.num_iterations < MT_UNKNOWN_ITERATIONS && mt_options_derive_intervals(o, error) != 0) return -1;
    if (o->stack.lr == 0) return mt_error_set(error, "--lr is missing");
    if (o->stack.min_lr > o->stack.lr)
        return mt_error_set(error, "--min-lr %g must be at most --lr %g", o->stack.min_lr, o->stack.lr);
    if (!MT_GIVEN(o, stack.decoupled_min_lr)) o->stack.decoupled_min_lr = o->stack.min_lr;
    if (o->stack.decoupled_lr > 0 && o->stack.decoupled_min_lr > o->stack.decoupled_lr)
        return mt_error_set(error, "--decoupled-min-lr %g must be at most --decoupled-lr %g", o->stack.decoupled_min_lr,
                            o->stack.decoupled_lr);
    if (o->stack.lr_warmup_init > o->stack.lr)
        return mt_error_set(error, "--lr-warmup-init %g must be at most --lr %g", o->stack.lr_warmup_init, o->stack.lr);
    mt_durations d = mt_options_durations(&o->stack);
    double given = (double)(o->stack.train_samples > 0 ? o->stack.lr_warmup_samples
                                                       : o->stack.lr_warmup_iters * o->stack.global_batch_size);
    if (o->stack.lr_warmup_fraction > 0 && given > 0 && fabs(given - d.warmup) > 1e-9 * d.warmup)
        return mt_error_set(error,
                            "--lr-warmup-fraction %g is %g samples, and --lr-warmup-%s %g: the two exclude each other "
                            "unless they agree; leave one out",
                            o->stack.lr_warmup_fraction, d.warmup,
                            o->stack.train_samples > 0 ? "samples" : "iters x the batch", given);
    const char *unit = o->stack.train_samples > 0 ? "samples" : "iters";
    double each = o->stack.train_samples > 0 ? 1 : (double)o->stack.global_batch_size;
    if (d.warmup >= d.decay)
        return mt_error_set(error, "--lr-warmup-%s %.10g must be less than --lr-decay-%s %.10g (default: --train-%s)",
                            unit, d.warmup / each, unit, d.decay / each, unit);
    if (wsd && (d.wsd_decay == 0 || d.wsd_decay > d.decay))
        return mt_error_set(error, "--lr-decay-style WSD needs --lr-wsd-decay-%s, at most --lr-decay-%s", unit, unit);
    return mt_options_derive_weight_decay(o, error);
}

/* cuDNN's attention in training; mt_options_check_cudnn compares sizes with its limits. Generation has no dropout, so
 * this is no rule of the option table. */
static int mt_options_check_attention(const mt_options *o, mt_program program, mt_error *error) {
    bool has_dropout = program != MT_PROGRAM_INFER && o->attention_dropout > 0;
    if (o->attention_backend != MT_ATTENTION_CUDNN || !has_dropout) return 0;
    return mt_error_set(error, "--attention-backend cudnn needs --attention-dropout 0, not %g", o->attention_dropout);
}

enum { MT_PIPELINE_LETTERS = 100000 };

char *mt_pipeline_layout_unfold(const char *layout, mt_error *error) {
    char *letters = mt_malloc(MT_PIPELINE_LETTERS + 1);
    int64_t count = 0, open = -1, last = 0; // the open bracket; the begin of the last repeatable unit
    const char *at = layout, *problem = NULL;
    for (; *at && !problem; at++) {
        if (*at == ',') continue;
        if (*at == '(' && open < 0)
            open = count;
        else if (*at == ')' && open >= 0 && at[1] == '*')
            last = open, open = -1;
        else if (*at == '*' && at > layout && (strchr("EtL|m", at[-1]) || at[-1] == ')') &&
                 isdigit((unsigned char)at[1])) {
            char *end;
            errno = 0;
            int64_t times = strtoll(at + 1, &end, 10), length = count - last;
            if (errno || times < 1 || times > MT_PIPELINE_LETTERS ||
                count + (times - 1) * length > MT_PIPELINE_LETTERS) {
                problem = "repeats too often, or not at all";
                break;
            }
            for (; times > 1; times--, count += length) memcpy(letters + count, letters + last, (size_t)length);
            at = end - 1;
        } else if (strchr("EtmL|", *at) && count < MT_PIPELINE_LETTERS) {
            last = count;
            letters[count++] = *at;
        } else
            problem = "not understood";
        if (problem) break;
    }
    if (!problem && open >= 0) problem = "a bracket is not closed";
    letters[count] = 0;
    if (!problem) return letters;
    free(letters);
    mt_error_set(error,
                 "--pipeline-model-parallel-layout '%.200s': %s at '%.20s'; letters are E, t, m, L and |, and (tt|)*3 "
                 "repeats",
                 layout, problem, at);
    return NULL;
}

/* --print-schedule needs no ranks: with one rank, the rest of the grid is imagined. */
static int mt_options_derive_printed(mt_run_options *o, int64_t world_size, mt_error *error) {
    int64_t pp = o->stack.pipeline_model_parallel_size,
            model = o->stack.tensor_model_parallel_size * pp * o->stack.context_parallel_size;
    const mt_multiple multiples[] = {
        {"the number of ranks", world_size > 1 ? world_size : 0,
         "--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size =", model}};
    if (MT_CHECK_MULTIPLES(multiples, error)) return -1;
    o->stack.data_parallel_size = mt_max(world_size / model, 1);
    return mt_options_derive_pipeline(o, error);
}

/* The limit of the start is also that of a step, unless a step has its own. A save may take at least as long. */
static void mt_options_derive_timeouts(mt_run_options *o) {
    if (MT_GIVEN(o, stack.distributed_timeout_minutes) && !MT_GIVEN(o, stack.distributed_timeout_seconds))
        o->stack.distributed_timeout_seconds = (int64_t)ceil(60 * o->stack.distributed_timeout_minutes);
    if (!MT_GIVEN(o, stack.save_timeout_seconds))
        o->stack.save_timeout_seconds = mt_max(o->stack.save_timeout_seconds, o->stack.distributed_timeout_seconds);
}

/* The head of the stage. A reward model has a value head; all others are language models. */
static int mt_options_derive_head(mt_run_options *o, mt_program program, mt_error *error) {
    bool rewards = o->stack.stage == MT_STAGE_RM, has_head = o->stack.head_type != MT_HEAD_LM;
    if (program == MT_PROGRAM_INFER) return 0;
    if (o->logits_topk > o->stack.vocab_size && o->stack.vocab_size > 0)
        return mt_error_set(error, "--logits-topk %lld is more than the vocabulary, %lld tokens; 0 takes all of them",
                            (long long)o->logits_topk, (long long)o->stack.vocab_size);
    mt_distillation_config unused;
    if (mt_options_hidden_pairs(&unused, o, error) != 0) return -1;
    if (o->stack.mtp_num_layers > 0 && o->stack.stage > MT_STAGE_SFT && o->stack.stage != MT_STAGE_RL)
        return mt_error_set(error, "--mtp-num-layers %lld is for --stage pt, sft and rl; set it to 0",
                            (long long)o->stack.mtp_num_layers);
    if (!rewards && has_head)
        return mt_error_set(error,
                            "--load %s: is a model with a value head, which --stage rm trains; take a language "
                            "model's folder",
                            o->load ? o->load : "");
    if (rewards && has_head && o->value_head && !o->head_is_new)
        return mt_error_set(error, "--value-head: %s has one already; leave it out", o->load);
    if (rewards && !has_head && o->load && !o->value_head)
        return mt_error_set(error, "--stage rm: %s is a language model; --value-head gives it a value head", o->load);
    if (rewards && !has_head) o->stack.head_type = MT_HEAD_SEQUENCE, o->head_is_new = true;
    return 0;
}

/* Options of reinforcement learning that others can leave without effect. */
static const struct {
    const char *name;
    size_t offset;
} mt_idle_in_rl[] = {{"ref-load", offsetof(mt_run_options, ref_load)},
                     {"ref-tensor-model-parallel-size", offsetof(mt_run_options, ref_tensor_model_parallel_size)},
                     {"ref-pipeline-model-parallel-size", offsetof(mt_run_options, ref_pipeline_model_parallel_size)},
                     {"ref-expert-model-parallel-size", offsetof(mt_run_options, ref_expert_model_parallel_size)},
                     {"kl-loss-type", offsetof(mt_run_options, kl_loss_type)},
                     {"clip-ratio", offsetof(mt_run_options, clip_ratio)},
                     {"clip-ratio-low", offsetof(mt_run_options, clip_ratio_low)},
                     {"clip-ratio-high", offsetof(mt_run_options, clip_ratio_high)}};
enum { MT_NUM_IDLE_IN_RL = sizeof mt_idle_in_rl / sizeof *mt_idle_in_rl };

const char *mt_options_idle_in_rl(const mt_run_options *o, size_t offset) {
    bool listed = false, diverges = o->kl_loss_coef > 0 || o->kl_in_reward;
    for (int i = 0; i < MT_NUM_IDLE_IN_RL; i++) listed |= mt_idle_in_rl[i].offset == offset;
    bool is_type = offset == offsetof(mt_run_options, kl_loss_type);
    if (o->stack.stage == MT_STAGE_DPO && is_type) return o->kl_loss_coef > 0 ? NULL : "without --kl-loss-coef";
    if (o->stack.stage != MT_STAGE_RL || !listed) return NULL;
    bool clips = offset == offsetof(mt_run_options, clip_ratio) || offset == offsetof(mt_run_options, clip_ratio_low) ||
                 offset == offsetof(mt_run_options, clip_ratio_high);
    bool refers = diverges || (o->self_distillation == MT_SELF_DISTILL_INITIAL && !is_type);
    if (!clips) return refers ? NULL : "without --kl-loss-coef or --kl-in-reward";
    if (!mt_policy_kind_of(o->pg_variant)->clips) return "with this --pg-variant, which has no range of ratios";
    bool both = MT_GIVEN(o, clip_ratio_low) && MT_GIVEN(o, clip_ratio_high);
    return both && offset == offsetof(mt_run_options, clip_ratio) ? "beside --clip-ratio-low and --clip-ratio-high"
                                                                  : NULL;
}

static int mt_options_check_idle_in_rl(const mt_run_options *o, mt_error *error) {
    for (int i = 0; i < MT_NUM_IDLE_IN_RL; i++) {
        const char *reason = mt_options_idle_in_rl(o, mt_idle_in_rl[i].offset);
        bool is_ratio =
            mt_idle_in_rl[i].offset == offsetof(mt_run_options, clip_ratio) && mt_policy_kind_of(o->pg_variant)->clips;
        bool agrees = is_ratio && o->clip_ratio == o->clip_ratio_low && o->clip_ratio == o->clip_ratio_high;
        if (agrees) continue;
        if (reason && mt_options_gave(o, mt_idle_in_rl[i].offset))
            return mt_error_set(error, "--%s has no effect %s; leave it out", mt_idle_in_rl[i].name, reason);
    }
    return 0;
}

/* Stages that compare two responses, or log-probabilities with a reference's or the generator's, have no dropout, as
 * trl's trainers; distillation has the model's. A run that resumes has that of its own config.json. */
static void mt_options_derive_dropout(mt_run_options *o) {
    bool resumes = o->load && o->save && strcmp(o->load, o->save) == 0 && !o->finetune;
    bool compares = o->stack.stage == MT_STAGE_RM || o->stack.stage == MT_STAGE_DPO || o->stack.stage == MT_STAGE_RL;
    if (!compares || resumes) return;
    if (!MT_GIVEN(o, stack.hidden_dropout)) o->stack.hidden_dropout = 0;
    if (!MT_GIVEN(o, stack.attention_dropout)) o->stack.attention_dropout = 0;
}

/* Generation, by infer or for --stage rl. */
static int mt_options_check_generation(const mt_run_options *o, mt_error *error) {
    int64_t page = o->inference_dynamic_batching_block_size;
    for (int64_t i = 0; i < o->stop.count; i++)
        if (!o->stop.items[i][0]) return mt_error_set(error, "--stop: a text is empty; leave it out");
    if ((page & (page - 1)) == 0) return 0;
    return mt_error_set(error, "--inference-dynamic-batching-block-size %lld is not a power of two; give %d",
                        (long long)page, MT_PAGE_ROWS);
}

bool mt_options_rewards(const mt_run_options *o, mt_reward_kind kind) {
    for (int64_t i = 0; i < o->reward.count; i++)
        if (o->reward.items[i] == (int64_t)kind) return true;
    return false;
}

/* Options under which generation and training have other orders of sums. */
static int mt_options_check_bitwise(const mt_run_options *o, mt_error *error) {
    const mt_options *s = &o->stack;
    int64_t tp = s->tensor_model_parallel_size, tensor = o->rollout_tensor_model_parallel_size,
            page = o->inference_dynamic_batching_block_size;
    if (!o->bitwise_rollouts) return 0;
    int64_t etp = s->expert_tensor_parallel_size > 0 ? s->expert_tensor_parallel_size : tp;
    int64_t flexes = mt_has_experts(s) ? etp * s->expert_model_parallel_size : 1;
    for (int64_t i = 0; i < s->num_layers; i++) {
        mt_mixer_kind mixer = mt_layer_kind_of(s, i).mixer;
        if (mt_mixer_is_bitwise(mixer)) continue;
        return mt_error_set(error,
                            "--bitwise-rollouts: layers of %s compute in other steps where they generate than where "
                            "they train; correct the difference by --rollout-is",
                            mt_mixer_name(mixer));
    }
    const mt_constraint rules[] = {
        {o->device == MT_DEVICE_CUDA, "--bitwise-rollouts is for the CPU: give --device cpu, or correct the difference "
                                      "by --rollout-is"},
        {tensor > 0 && tensor != s->tensor_model_parallel_size,
         "--bitwise-rollouts: --rollout-tensor-model-parallel-size %lld adds up other parts than "
         "--tensor-model-parallel-size %lld; make them equal",
         {tensor, s->tensor_model_parallel_size}},
        {s->context_parallel_size > 1,
         "--bitwise-rollouts: --context-parallel-size %lld adds up attention by parts of a sequence, and the generator "
         "does not; leave it out",
         {s->context_parallel_size}},
        {s->fp8_format != MT_FP8_OFF,
         "--bitwise-rollouts: the scales of --fp8-format depend on the batch; leave one of them out"},
        {mt_has_experts(s) && s->moe_expert_capacity_factor > 0,
         "--bitwise-rollouts: --moe-expert-capacity-factor drops tokens that the generator keeps; leave it out"},
        {flexes > 2 && s->moe_token_dispatcher_type == MT_DISPATCHER_FLEX,
         "--bitwise-rollouts: --moe-token-dispatcher-type flex adds up the parts of %lld ranks in an order that "
         "depends "
         "on the token's rank; take allgather or alltoall",
         {flexes}},
        {s->tp_comm_overlap && tp > 2,
         "--bitwise-rollouts: --tp-comm-overlap adds up the parts of %lld ranks in an order that depends on the "
         "token's "
         "rank; leave it out",
         {tp}},
        {page % 128 != 0,
         "--bitwise-rollouts: attention adds up keys by 128; make --inference-dynamic-batching-block-size %lld a "
         "multiple of that",
         {page}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* On-policy distillation: one kind of teacher, and a divergence that depends on it. */
static int mt_options_derive_teachers(mt_run_options *o, mt_error *error) {
    bool distills = o->distillation_in != MT_DISTILL_IN_NONE, in_loss = o->distillation_in == MT_DISTILL_IN_LOSS;
    bool self = o->self_distillation != MT_SELF_DISTILL_NONE, lags = o->self_distillation == MT_SELF_DISTILL_LAGGING;
    bool has_layout = o->teacher_tensor_model_parallel_size || o->teacher_pipeline_model_parallel_size ||
                      o->teacher_expert_model_parallel_size;
    bool no_rewards = mt_options_rewards(o, MT_REWARD_NONE);
    if (in_loss && !MT_GIVEN(o, distillation_loss_mode)) o->distillation_loss_mode = MT_KL_K3;
    bool topk = distills && o->distillation_loss_mode == MT_KL_FORWARD_TOPK;
    if (topk && o->distillation_topk > o->stack.vocab_size && o->stack.vocab_size > 0)
        return mt_error_set(error, "--distillation-topk %lld is more than the vocabulary, %lld tokens",
                            (long long)o->distillation_topk, (long long)o->stack.vocab_size);
    for (int64_t i = 0; i < o->teachers.count; i++) {
        const char *word = o->teachers.items[i], *equals = strchr(word, '=');
        if (!equals || equals == word || !equals[1])
            return mt_error_set(error, "--teachers expects words such as gsm8k=FOLDER, got '%.200s'", word);
        for (int64_t k = 0; k < i; k++)
            if (strncmp(word, o->teachers.items[k], (size_t)(equals - word + 1)) == 0)
                return mt_error_set(error, "--teachers has %.*s twice", (int)(equals - word), word);
    }
    const mt_constraint rules[] = {
        {distills && !self && !o->teacher_load && o->teachers.count == 0,
         "--distillation-in needs a teacher: --teacher-load, --teachers or --self-distillation"},
        {!distills && o->teacher_load,
         "--teacher-load with --stage rl needs --distillation-in loss, policy-gradient or advantages"},
        {has_layout && (!distills || o->self_distillation == MT_SELF_DISTILL_INITIAL),
         "--teacher-*-model-parallel-size: there is no teacher of its own here (--ref-*-model-parallel-size is for the "
         "reference model); leave it out"},
        {in_loss && o->distillation_loss_mode == MT_KL_K1,
         "--distillation-loss-mode k1 in the loss has a gradient that no teacher changes; take k2 or k3, or "
         "--distillation-in policy-gradient"},
        {topk && o->distillation_in == MT_DISTILL_IN_ADVANTAGES,
         "--distillation-loss-mode forward_kl_topk needs the actor's probabilities of other tokens than its own, which "
         "--distillation-in advantages does not have; take loss or policy-gradient"},
        {topk && o->stack.vocab_size > 1 << 24,
         "--distillation-loss-mode forward_kl_topk is for vocabularies of up to 16777216 tokens; take k1, k2 or k3"},
        {no_rewards && (o->reward.count > 1 || o->use_task_rewards),
         "--reward none is for --no-use-task-rewards, alone; there is nothing to learn from otherwise"},
        {lags && o->stack.lora_rank > 0,
         "--self-distillation lagging is not supported with adapters; take initial, their base"},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Responses of several iterations. Of the prompts in progress after an iteration the next one can take all. */
static int mt_options_derive_partial(mt_run_options *o, mt_error *error) {
    int64_t split = o->partial_rollout_max_split, batch = o->rollout_batch_size;
    if (split == 1) return 0;
    if (o->over_sampling_batch_size == 0) o->over_sampling_batch_size = 2 * batch;
    if (o->max_head_offpolicyness == 0) o->max_head_offpolicyness = o->rollout_lag + split;
    const mt_constraint rules[] = {
        {split > o->max_new_tokens,
         "--partial-rollout-max-split %lld is more than --max-new-tokens %lld; a phase writes a token at least",
         {split, o->max_new_tokens}},
        {o->over_sampling_batch_size < batch || o->over_sampling_batch_size > 2 * batch,
         "--over-sampling-batch-size %lld must be at least --rollout-batch-size %lld and at most twice that, so that "
         "no "
         "prompt has to wait longer than the others",
         {o->over_sampling_batch_size, batch}},
        {o->max_head_offpolicyness <= o->rollout_lag,
         "--max-head-offpolicyness %lld must be more than --rollout-lag %lld, the age of a batch that waits",
         {o->max_head_offpolicyness, o->rollout_lag}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Reinforcement learning: the sizes of an iteration, and the ranges of ratios. */
static int mt_options_derive_rl(mt_run_options *o, mt_error *error) {
    if (o->stack.stage == MT_STAGE_RL && !MT_GIVEN(o, num_return_sequences)) o->num_return_sequences = 8;
    if (o->env_command && !MT_GIVEN(o, reward)) o->reward = (mt_ints){.items = {MT_REWARD_ENV}, .count = 1};
    int64_t responses = o->rollout_batch_size * o->num_return_sequences;
    bool alone = o->adv_estimator == MT_ADV_GAE || o->adv_estimator == MT_ADV_REINFORCE ||
                 o->adv_estimator == MT_ADV_REINFORCE_PLUS_PLUS || o->adv_estimator == MT_ADV_REMAX ||
                 o->adv_estimator == MT_ADV_STEP_REINFORCE;
    bool group_norm = o->norm_mean_type == MT_REWARD_NORM_GROUP || o->norm_std_type == MT_REWARD_NORM_GROUP;
    bool norms = group_norm || o->norm_mean_type == MT_REWARD_NORM_BATCH || o->norm_std_type == MT_REWARD_NORM_BATCH;
    bool changes = o->reward_clip > 0 || o->overlong_penalty > 0 || o->overlong_buffer_length > 0 || o->kl_in_reward;
    if (o->stack.stage == MT_STAGE_DPO) return mt_options_check_idle_in_rl(o, error);
    if (o->stack.stage != MT_STAGE_RL) return 0;
    const mt_policy_kind *policy = mt_policy_kind_of(o->pg_variant);
    if (o->moe_enable_routing_replay) o->router_replay = MT_ROUTER_REPLAY_R3;
    bool replays = o->router_replay != MT_ROUTER_REPLAY_DISABLED;
    mt_correction unused;
    if (mt_options_check_idle_in_rl(o, error) != 0 || mt_options_derive_teachers(o, error) != 0) return -1;
    if (mt_options_correction(&unused, o, error) != 0 || mt_options_check_bitwise(o, error) != 0) return -1;
    if (mt_options_derive_partial(o, error) != 0) return -1;
    if (policy->mean_of_means && !MT_GIVEN(o, loss_agg_mode)) o->loss_agg_mode = MT_SEQ_MEAN_TOKEN_MEAN;
    if (!MT_GIVEN(o, sequence_packing)) o->sequence_packing = true;
    if (o->clip_ratio_low == 0) o->clip_ratio_low = o->clip_ratio;
    if (o->clip_ratio_high == 0) o->clip_ratio_high = o->clip_ratio;
    if (o->critic_lr == 0) o->critic_lr = o->stack.lr;
    if (o->stack.global_batch_size == 0) o->stack.global_batch_size = responses;
    const mt_constraint rules[] = {
        {!alone && o->use_task_rewards && o->num_return_sequences == 1,
         "all of --adv-estimator except gae, reinforce, reinforce_plus_plus, step_reinforce and remax compare the "
         "responses to a prompt: --num-return-sequences must be 2 or more"},
        {group_norm && o->num_return_sequences == 1,
         "--norm-mean-type and --norm-std-type group compare the responses to a prompt: --num-return-sequences must be "
         "2 or more"},
        {norms && responses == 1, "--norm-mean-type and --norm-std-type need two responses in an iteration"},
        {o->reward_weights.count > 0 && o->reward_weights.count != o->reward.count,
         "--reward-weights has %lld numbers, and --reward names %lld rewards; give one for each, in the same order",
         {o->reward_weights.count, o->reward.count}},
        {o->adv_estimator == MT_ADV_GDPO && changes,
         "--adv-estimator gdpo compares each reward as it is; leave out --reward-clip, --overlong-penalty, "
         "--overlong-buffer-length and --kl-in-reward"},
        {o->adv_estimator == MT_ADV_OPTIMAL_TOKEN_BASELINE && o->bypass_mode,
         "--adv-estimator optimal_token_baseline reads the old policy's distributions, which --bypass-mode does not "
         "compute; leave one of them out"},
        {replays && !mt_has_experts(&o->stack),
         "--router-replay: the model has no experts, so there is nothing to replay; leave it out"},
        {replays && o->device == MT_DEVICE_CUDA,
         "--router-replay is for the CPU: give --device cpu, or correct the difference by --rollout-is"},
        {o->pg_variant == MT_POLICY_DRO && o->dro_beta == 0,
         "--pg-variant dro needs --dro-beta, the weight of the squared logarithm of the ratio"},
        {o->pg_variant == MT_POLICY_TIS && o->tis_lower_bound > o->tis_upper_bound,
         "--tis-lower-bound is above --tis-upper-bound"},
        {o->pg_variant == MT_POLICY_CLIP_COV && o->clip_cov_lb >= o->clip_cov_ub,
         "--clip-cov-lb must be below --clip-cov-ub"},
        {o->stack.mtp_num_layers > 0 && (o->loss_agg_mode != MT_TOKEN_MEAN || policy->mean_of_means),
         "--mtp-num-layers: the loss of its modules is a mean over tokens, so that of the policy must be one too: take "
         "--loss-agg-mode token-mean, or set --mtp-num-layers to 0"},
        {o->stack.mtp_num_layers > 0 && o->adv_estimator == MT_ADV_GAE,
         "--mtp-num-layers and --adv-estimator gae exclude each other, as a critic predicts no tokens; set one of them "
         "to another value"},
        {o->stack.mtp_num_layers > 0 && replays, "--router-replay has no experts of --mtp-num-layers; set that to 0"},
        {o->dynamic_sampling && o->num_return_sequences == 1,
         "--dynamic-sampling compares the responses to a prompt: --num-return-sequences must be 2 or more"},
        {o->max_new_tokens == 0, "--max-new-tokens 0: --stage rl needs responses"},
        {o->max_new_tokens >= o->stack.seq_length,
         "--max-new-tokens %lld leaves no room for a prompt in --seq-length %lld",
         {o->max_new_tokens, o->stack.seq_length}},
        {policy->by_sequence && o->loss_agg_mode != MT_SEQ_MEAN_TOKEN_MEAN,
         "--pg-variant gspo and gmpo have one ratio for each sequence, and --loss-agg-mode seq-mean-token-mean; leave "
         "it out"},
        {policy->mean_of_means && o->loss_agg_mode != MT_SEQ_MEAN_TOKEN_MEAN,
         "--pg-variant sapo has --loss-agg-mode seq-mean-token-mean; leave it out"},
        {o->overlong_buffer_length > o->max_new_tokens,
         "--overlong-buffer-length %lld must be at most --max-new-tokens %lld",
         {o->overlong_buffer_length, o->max_new_tokens}},
        {MT_GIVEN(o, eval_iters) && o->eval_iters > 0,
         "--eval-iters %lld: --stage rl has no evaluation, and its metrics have the rewards of every iteration; leave "
         "it out",
         {o->eval_iters}},
        {!o->tokenizer_type && !o->load, "--stage rl needs a tokenizer: --tokenizer-type, or --load a model with one"},
        {mt_options_rewards(o, MT_REWARD_COMMAND) &&
             o->reward_timeout_seconds >= (double)o->stack.distributed_timeout_seconds,
         "--reward-timeout-seconds must be less than --distributed-timeout-seconds %lld: other ranks wait for rewards",
         {o->stack.distributed_timeout_seconds}},
        {o->env_command && o->env_timeout_seconds >= (double)o->stack.distributed_timeout_seconds,
         "--env-timeout-seconds must be less than --distributed-timeout-seconds %lld: other ranks wait for the "
         "environment",
         {o->stack.distributed_timeout_seconds}},
        {o->stack.temperature == 0, "--temperature 0 gives a prompt one response only; --stage rl needs several"},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

static int mt_options_derive_trace(mt_run_options *o, mt_error *error) {
    if (!o->trace) return 0;
    if (o->trace_first_step == 0) o->trace_first_step = 2; // the first step allocates
    if (o->trace_last_step == 0) o->trace_last_step = o->trace_first_step + 1;
    if (o->trace_last_step >= o->trace_first_step) return 0;
    return mt_error_set(error, "--trace-last-step %lld comes before --trace-first-step %lld",
                        (long long)o->trace_last_step, (long long)o->trace_first_step);
}

int mt_options_derive(mt_run_options *o, mt_program program, int64_t world_size, mt_error *error) {
    MT_CHECK(world_size >= 1);
    if (o->stack.num_layers == 0)
        return mt_error_set(error, "--num-layers is missing: give the model's shape by its options, --hf-config or "
                                   "--load");
    o->stack.data_parallel_size = world_size;
    mt_options_derive_timeouts(o);
    if (o->print_schedule && !o->stack.dynamic_context_parallel) return mt_options_derive_printed(o, world_size, error);
    if (o->print_schedule && world_size == 1) // the ranks are imagined
        world_size = o->stack.tensor_model_parallel_size * o->stack.pipeline_model_parallel_size *
                     o->stack.context_parallel_size;
    mt_options_derive_dropout(o);
    if (o->stack.rerun_mode != MT_RERUN_DISABLED && o->device != MT_DEVICE_CPU)
        o->stack.deterministic_mode = true; // compares bits
    if (mt_options_derive_model(o, error) || mt_options_derive_rope(o, error)) return -1;
    if (mt_options_derive_head(o, program, error) || mt_options_check_generation(o, error)) return -1;
    if (mt_options_derive_rl(o, error)) return -1;
    if (mt_options_derive_mtp(o, program == MT_PROGRAM_INFER && !o->convert, error) ||
        mt_options_derive_lengths(o, program, error))
        return -1;
    if (mt_options_derive_recompute(&o->stack, error) || mt_options_check_fp8(&o->stack, error)) return -1;
    if (mt_options_check_residual(&o->stack, error)) return -1;
    if (mt_options_check_attention(&o->stack, program, error) || mt_options_derive_experts(o, world_size, error))
        return -1;
    if (mt_options_check_latents(&o->stack, error)) return -1;
    mt_options_derive_cp_comm_type(o);
    if (mt_mixers_check(&o->stack, error)) return -1;
    if (mt_options_derive_parallel(&o->stack, world_size, error) || mt_options_derive_context(o, error)) return -1;
    if (mt_options_derive_pipeline(o, error) || mt_vision_check(&o->stack, error)) return -1;
    if (program == MT_PROGRAM_INFER && o->logits_out &&
        o->stack.data_parallel_size * o->stack.context_parallel_size > 1)
        return mt_error_set(error,
                            "--logits-out: needs all sequences on the ranks of one model, and there are %lld "
                            "ranks; start --tensor-model-parallel-size %lld x --pipeline-model-parallel-size "
                            "%lld ranks without --context-parallel-size",
                            (long long)world_size, (long long)o->stack.tensor_model_parallel_size,
                            (long long)o->stack.pipeline_model_parallel_size);
    if (program == MT_PROGRAM_INFER) return 0;
    return mt_options_derive_schedules(o, error) || mt_options_derive_trace(o, error) ? -1 : 0;
}

int64_t mt_consumed_samples(const mt_run_options *options, int64_t iterations) {
    return mt_consumed_samples_from(options, 0, 0, iterations);
}

int64_t mt_consumed_samples_from(const mt_run_options *options, int64_t from, int64_t consumed, int64_t iterations) {
    for (int64_t i = from; i < iterations; i++) {
        int64_t batch = mt_global_batch_size(options, consumed);
        int64_t steps = options->num_batch_steps;
        bool constant = steps > 0 ? consumed >= options->batch_steps[steps - 1][0]
                                  : batch == options->stack.global_batch_size; // the ramp has ended
        if (constant) return consumed + (iterations - i) * batch;
        consumed += batch;
    }
    return consumed;
}

int64_t mt_num_parameters(const mt_options *options) {
    mt_param *params;
    int64_t count = mt_params_build(&params, options, NULL), total = 0;
    for (int64_t i = 0; i < count; i++)
        if (!mt_param_is_adapter(&params[i])) total += params[i].rows_stored * params[i].whole_cols;
    free(params);
    return total;
}

int64_t mt_eval_batch_size(const mt_run_options *options) {
    return options->eval_global_batch_size > 0 ? options->eval_global_batch_size : options->stack.global_batch_size;
}

bool mt_validates_after(const mt_run_options *o, int64_t iteration) {
    return o->eval_interval > 0 && iteration % o->eval_interval == 0 && iteration >= o->start_eval_at_iter;
}

int64_t mt_count_evaluations(const mt_run_options *o, int64_t first, int64_t last) {
    if (o->eval_interval == 0) return 0;
    int64_t before = mt_max(first, o->start_eval_at_iter - 1);
    return mt_max(last / o->eval_interval - before / o->eval_interval, 0) + 1;
}

int64_t mt_global_batch_size(const mt_run_options *options, int64_t consumed_samples) {
    for (int64_t i = options->num_batch_steps - 1; i >= 0; i--)
        if (consumed_samples >= options->batch_steps[i][0]) return options->batch_steps[i][1];
    if (options->rampup_batch_size.count == 0) return options->stack.global_batch_size;
    const int64_t *ramp = options->rampup_batch_size.items, start = ramp[0], increment = ramp[1], samples = ramp[2];
    int64_t increments = (options->stack.global_batch_size - start) / increment;
    if (consumed_samples > samples || increments == 0) return options->stack.global_batch_size;
    double samples_per_increment = (double)samples / (double)increments;
    return start + (int64_t)((double)consumed_samples / samples_per_increment) * increment;
}

bool mt_options_gave(const mt_run_options *options, size_t offset) {
    return options->given[offset / 64] >> offset % 64 & 1;
}
