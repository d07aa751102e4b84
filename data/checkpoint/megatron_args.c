/* megatron_args.c: the model of a checkpoint of Megatron-LM, from the arguments that it holds. */
#include "megatron_args.h"

#include "../options/option_reader.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "megatron_folder.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The argument with a letter for each layer of a hybrid model. */
#define MT_PATTERN "hybrid_layer_pattern"

/* The arguments that describe the model, and when they mean something: of an argument that is true or not None. */
static const struct {
    const char *key, *when;
} mt_model_args[] = {
    {"num_layers", NULL},
    {"hidden_size", NULL},
    {"ffn_hidden_size", NULL},
    {"num_attention_heads", NULL},
    {"group_query_attention", NULL},
    {"num_query_groups", "group_query_attention"},
    {"kv_channels", NULL},
    {"max_position_embeddings", NULL},
    {"position_embedding_type", NULL},
    {"rotary_base", NULL},
    {"rotary_percent", NULL},
    {"rotary_interleaved", NULL},
    {"add_bias_linear", NULL},
    {"add_qkv_bias", NULL},
    {"swiglu", NULL},
    {"quick_geglu", NULL},
    {"openai_gelu", NULL},
    {"squared_relu", NULL},
    {"untie_embeddings_and_output_weights", NULL},
    {"apply_layernorm_1p", NULL},
    {"normalization", NULL},
    {"norm_epsilon", NULL},
    {"qk_layernorm", NULL},
    {"num_experts", NULL},
    {"moe_ffn_hidden_size", "num_experts"},
    {"moe_layer_freq", "num_experts"},
    {"moe_router_topk", "num_experts"},
    {"moe_router_pre_softmax", "num_experts"},
    {"moe_router_score_function", "num_experts"},
    {"moe_router_enable_expert_bias", "num_experts"},
    {"moe_router_topk_scaling_factor", "num_experts"},
    {"moe_router_num_groups", "num_experts"},
    {"moe_router_group_topk", "num_experts"},
    {"moe_shared_expert_intermediate_size", "num_experts"},
    {"moe_shared_expert_gate", "num_experts"},
    {"moe_latent_size", "num_experts"},
    {"attention_output_gate", NULL},
    {"experimental_attention_variant", NULL},
    {"linear_attention_freq", "experimental_attention_variant"},
    {"linear_num_key_heads", "experimental_attention_variant"},
    {"linear_num_value_heads", "experimental_attention_variant"},
    {"linear_key_head_dim", "experimental_attention_variant"},
    {"linear_value_head_dim", "experimental_attention_variant"},
    {"linear_conv_kernel_dim", "experimental_attention_variant"},
    {"mamba_state_dim", MT_PATTERN},
    {"mamba_head_dim", MT_PATTERN},
    {"mamba_num_groups", MT_PATTERN},
    {"mamba_num_heads", MT_PATTERN},
    {"multi_latent_attention", NULL},
    {"q_lora_rank", "multi_latent_attention"},
    {"kv_lora_rank", "multi_latent_attention"},
    {"qk_head_dim", "multi_latent_attention"},
    {"qk_pos_emb_head_dim", "multi_latent_attention"},
    {"v_head_dim", "multi_latent_attention"},
    {"mtp_num_layers", NULL},
    {"mtp_use_repeated_layer", "mtp_num_layers"},
    {"mtp_hybrid_override_pattern", MT_PATTERN}, // before Megatron-Core 0.19, whose pattern has the modules too
    {"softmax_type", NULL},
    {"softmax_scale", NULL},
    {"activation_func_clamp_value", NULL},
    {"glu_linear_offset", NULL},
};

/* Arguments whose models are other ones, unless they are None, False or 0. */
static const char *const mt_other_args[] = {
    "window_size",
    "heterogeneous_layers_config_path",
    "qk_l2_norm",
    "apply_residual_connection_post_layernorm",
    "no_rope_freq",
    "use_mup",
    "mrope_section",
    "moe_expert_capacity_factor",
    "moe_apply_probs_on_input",
    "moe_router_topk_limited_devices",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
};

/* True for a value other than None, False and 0. */
static bool mt_pickled_is_set(const mt_pickled *value) {
    if (!value || value->kind == MT_PICKLED_NONE) return false;
    if (value->kind == MT_PICKLED_BOOL || value->kind == MT_PICKLED_INT) return value->number != 0;
    return value->kind != MT_PICKLED_REAL || value->real != 0;
}

/* True if latent attention has RoPE scaled by YaRN: its type unless "rope" is given, and its factor unless that is 1.
 */
static bool mt_args_scale_latent_rope(const mt_pickled *args) {
    const char *type = mt_pickled_text(mt_pickled_get(args, "rope_type"));
    const mt_pickled *factor = mt_pickled_get(args, "rotary_scaling_factor");
    bool is_one = factor && ((factor->kind == MT_PICKLED_REAL && factor->real == 1) ||
                             (factor->kind == MT_PICKLED_INT && factor->number == 1));
    return mt_pickled_is_set(mt_pickled_get(args, "multi_latent_attention")) && !is_one &&
           (!type || strcmp(type, "rope") != 0);
}

/* The value as the command line has it, in text[size]; false: none. */
static bool mt_pickled_print(const mt_pickled *value, char *text, size_t size) {
    if (!value) return false;
    if (value->kind == MT_PICKLED_BOOL)
        snprintf(text, size, "%s", value->number ? "true" : "false");
    else if (value->kind == MT_PICKLED_INT)
        snprintf(text, size, "%lld", (long long)value->number);
    else if (value->kind == MT_PICKLED_REAL)
        mt_real_print(text, value->real);
    else if (value->kind == MT_PICKLED_TEXT)
        snprintf(text, size, "%s", value->text);
    else if (value->kind == MT_PICKLED_LIST) {
        size_t used = (size_t)snprintf(text, size, "[");
        for (int64_t i = 0; i < value->count && used + 32 < size; i++) {
            int64_t number = 0;
            mt_pickled_int(value->items[i], INT64_MIN, INT64_MAX, &number);
            used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? "," : "", (long long)number);
        }
        snprintf(text + used, size - used, "]");
    } else {
        return false;
    }
    return true;
}

/* An argument whose model is another one; NULL: none. */
static const char *mt_args_other(const mt_pickled *args) {
    static const char key[] = "experimental_attention_variant";
    const mt_pickled *variant = mt_pickled_get(args, key);
    const char *name = mt_pickled_text(variant);
    for (size_t i = 0; i < sizeof mt_other_args / sizeof *mt_other_args; i++)
        if (mt_pickled_is_set(mt_pickled_get(args, mt_other_args[i]))) return mt_other_args[i];
    return mt_pickled_is_set(variant) && (!name || strcmp(name, "gated_delta_net") != 0) ? key : NULL;
}

/* The layers of a hybrid model, or NULL; free it. A stage (|) is of that run's layout. */
static char *mt_args_pattern(const mt_pickled *args) {
    const char *text = mt_pickled_text(mt_pickled_get(args, MT_PATTERN));
    if (!text) text = mt_pickled_text(mt_pickled_get(args, "hybrid_override_pattern")); // its name before
    char *pattern = text ? mt_strdup(text) : NULL, *to = pattern;
    for (const char *at = pattern; at && *at; at++)
        if (*at != '|') *to++ = *at;
    if (to) *to = 0;
    return pattern;
}

/* Sets the options of arguments whose condition holds. */
static int mt_args_set_model(mt_run_options *of_args, const mt_pickled *args, const char *pattern, const char *folder,
                             mt_error *error) {
    char text[4096];
    mt_error reason;
    if (pattern && mt_options_set(of_args, MT_PATTERN, pattern, &reason) != 0)
        return mt_error_set(error, "%s: %.1000s", folder, reason.text);
    for (size_t i = 0; i < sizeof mt_model_args / sizeof *mt_model_args; i++) {
        const char *key = mt_model_args[i].key, *when = mt_model_args[i].when;
        bool of_pattern = when && strcmp(when, MT_PATTERN) == 0;
        if (of_pattern ? !pattern : when && !mt_pickled_is_set(mt_pickled_get(args, when))) continue;
        if (pattern && strcmp(key, "moe_layer_freq") == 0) continue; // the pattern says it
        if (!mt_pickled_print(mt_pickled_get(args, key), text, sizeof text)) continue;
        if (mt_options_set(of_args, key, text, &reason) != 0)
            return mt_error_set(error, "%s: its run has \"%s\" %.100s, which is not taken here: %.1000s", folder, key,
                                text, reason.text);
    }
    return 0;
}

/* The number of an argument, or `absent`. */
static double mt_args_number(const mt_pickled *args, const char *key, double absent) {
    const mt_pickled *value = mt_pickled_get(args, key);
    if (value && value->kind == MT_PICKLED_REAL) return value->real;
    return value && value->kind == MT_PICKLED_INT ? (double)value->number : absent;
}

/* RoPE scaled as in Llama 3.1, or by a factor of all positions. */
static int mt_args_set_rope(mt_run_options *of_args, const mt_pickled *args, const char *folder, mt_error *error) {
    bool is_llama3 = mt_pickled_is_set(mt_pickled_get(args, "use_rope_scaling"));
    const char *key = is_llama3 ? "rope_scaling_factor" : "rotary_seq_len_interpolation_factor";
    char text[64];
    mt_error reason;
    bool is_both = is_llama3 && mt_pickled_is_set(mt_pickled_get(args, "rotary_seq_len_interpolation_factor"));
    if (is_both)
        return mt_error_set(error,
                            "%s: its run scales RoPE by use_rope_scaling and by rotary_seq_len_interpolation_factor "
                            "together, which is not read from a checkpoint of Megatron-LM",
                            folder);
    if (!is_llama3 && !mt_pickled_is_set(mt_pickled_get(args, key))) return 0;
    mt_real_print(text, mt_args_number(args, key, 8));
    if (mt_options_set(of_args, "rope-scaling-type", is_llama3 ? "llama3" : "linear", error) != 0) return -1;
    if (mt_options_set(of_args, "rope-scaling-factor", text, &reason) == 0) return 0;
    return mt_error_set(error, "%s: its run has \"%s\" %s, which is not taken here: %.1000s", folder, key, text,
                        reason.text);
}

/* YaRN of latent attention; what is not there is as in Megatron-Core's MLATransformerConfig. Its factor of cos and sin
 * is that of Hugging Face where both of mscale and mscale_all_dim are given or mscale is 1; otherwise it is set itself.
 */
static int mt_args_set_yarn(mt_run_options *of_args, const mt_pickled *args, const char *folder, mt_error *error) {
    double factor = mt_args_number(args, "rotary_scaling_factor", 40), mscale = mt_args_number(args, "mscale", 1);
    double all_dim = mt_args_number(args, "mscale_all_dim", 0);
    bool both = mscale != 0 && all_dim != 0;
    const struct {
        const char *option;
        double value;
        bool is_set;
    } rows[] = {
        {"rope-scaling-factor", factor, true},
        {"original-max-position-embeddings", mt_args_number(args, "original_max_position_embeddings", 4096), true},
        {"yarn-beta-fast", mt_args_number(args, "beta_fast", 32), true},
        {"yarn-beta-slow", mt_args_number(args, "beta_slow", 1), true},
        {"yarn-mscale", mscale, both},
        {"yarn-mscale-all-dim", all_dim, all_dim != 0},
        {"yarn-attention-factor", mt_yarn_mscale(factor, mscale) / mt_yarn_mscale(factor, all_dim),
         !both && (mscale != 1 || all_dim != 0)},
    };
    mt_error reason;
    if (mt_options_set(of_args, "rope-scaling-type", "yarn", error) != 0) return -1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[64];
        mt_real_print(text, rows[i].value);
        if (rows[i].is_set && mt_options_set(of_args, rows[i].option, text, &reason) != 0)
            return mt_error_set(error, "%s: YaRN of its latent attention is not taken here: %.1000s", folder,
                                reason.text);
    }
    return 0;
}

int mt_args_set(mt_run_options *of_args, const mt_pickled *args, const char *folder, mt_error *error) {
    const char *other = mt_args_other(args), *format = mt_megatron_format(folder);
    if (other)
        return mt_error_set(error,
                            "%s: its run has \"%s\", which is not read from a checkpoint of Megatron-LM; convert it "
                            "to a Hugging Face folder by Megatron Bridge (convert_checkpoints.py export)",
                            folder, other);
    char *pattern = mt_args_pattern(args);
    int status = mt_args_set_model(of_args, args, pattern, folder, error);
    bool has_states = pattern || mt_pickled_is_set(mt_pickled_get(args, "experimental_attention_variant"));
    if (status == 0 && has_states && format && strcmp(format, "torch") == 0)
        status = mt_error_set(error,
                              "%s: gated delta nets and Mamba-2 are read from the format torch_dist alone; save it "
                              "again by --ckpt-format torch_dist of Megatron-LM",
                              folder);
    free(pattern);
    if (status == 0 && mt_args_scale_latent_rope(args))
        status = mt_args_set_yarn(of_args, args, folder, error);
    else if (status == 0 && !mt_pickled_is_set(mt_pickled_get(args, "multi_latent_attention"))) // which ignores them
        status = mt_args_set_rope(of_args, args, folder, error);
    if (status != 0 || !mt_pickled_is_set(mt_pickled_get(args, "multi_latent_attention"))) return status;
    // Megatron-Core's latent attention rotates neighbouring channels, whatever its arguments rotary_interleaved and
    // position_embedding_type say
    const char *positions = mt_pickled_text(mt_pickled_get(args, "position_embedding_type"));
    if (positions && strcmp(positions, "none") == 0 &&
        mt_options_set(of_args, "position-embedding-type", "rope", error) != 0)
        return -1;
    return mt_options_set(of_args, "rotary-interleaved", "true", error);
}

/* The vocabulary: its tokens where the run had no tokenizer's file, else with its padding, unless a tokenizer says. */
static void mt_args_take_vocabulary(mt_run_options *o, const mt_pickled *args) {
    const mt_option *row = mt_option_of(MT_AT(stack.vocab_size));
    int64_t size;
    if (mt_options_gave(o, MT_AT(stack.vocab_size)) || o->tokenizer_model) return;
    if (mt_pickled_int(mt_pickled_get(args, "vocab_size"), 1, INT32_MAX, &size) ||
        mt_pickled_int(mt_pickled_get(args, "padded_vocab_size"), 1, INT32_MAX, &size))
        *mt_option_int(o, row) = size;
}

/* Compares one option, or takes it. */
static int mt_args_merge(mt_run_options *o, const mt_run_options *of_args, bool takes, const mt_option *row,
                         const char *folder, mt_error *error) {
    bool gave = mt_options_gave(o, row->offset);
    char *own = mt_option_text(o, row), *theirs = mt_option_text(of_args, row);
    bool derived = !gave && (!*own || strcmp(own, "0") == 0), differs = strcmp(own, theirs) != 0;
    int status = 0;
    if (takes && !gave) {
        mt_option_copy(o, of_args, row);
        mt_option_set_origin(o, row, MT_ORIGIN_CHECKPOINT);
    } else if (differs && !derived)
        status = mt_error_set(error, "%s: its run has --%s %s, not %s%s", folder, row->name, theirs, own,
                              takes ? "; leave the option out" : "; give that, or --use-checkpoint-args");
    free(own), free(theirs);
    return status;
}

/* The norms of Mamba-2 have the epsilon of all norms here, and in Megatron-Core one of their own. */
static void mt_args_warn(const mt_pickled *args, const char *folder) {
    const mt_pickled *epsilon = mt_pickled_get(args, "norm_epsilon");
    char *pattern = mt_args_pattern(args);
    bool has_epsilon = epsilon && epsilon->kind == MT_PICKLED_REAL && mt_launch_rank() == 0;
    if (has_epsilon && pattern && strchr(pattern, 'M') && fabs(epsilon->real / 1e-5 - 1) > 1e-9)
        fprintf(stderr,
                "warning: %s: the norms of its Mamba-2 layers add 1e-5 to the mean square, and here they add %g, as "
                "all norms of the model do\n",
                folder, epsilon->real);
    free(pattern);
}

int mt_options_read_megatron(mt_run_options *o, const char *folder, mt_error *error) {
    mt_megatron *checkpoint;
    if (mt_megatron_open_common(&checkpoint, folder, error) != 0) return -1;
    const mt_pickled *args = mt_megatron_args(checkpoint);
    mt_run_options of_args;
    bool takes = o->use_checkpoint_args || !mt_options_gave(o, MT_AT(stack.num_layers));
    mt_options_default(&of_args);
    int status = 0;
    if (args)
        status = mt_args_set(&of_args, args, folder, error);
    else if (takes)
        status = mt_error_set(error,
                              "%s: holds no arguments of its run; give train --num-layers and the other options of the "
                              "model, without --use-checkpoint-args",
                              folder);
    for (const mt_option *row = mt_option_table; row->help && status == 0; row++) {
        bool first = row->name && mt_option_of(row->offset) == row;
        if (first && row->origin != MT_OF_RUN && mt_options_gave(&of_args, row->offset))
            status = mt_args_merge(o, &of_args, takes, row, folder, error);
    }
    if (status == 0 && args && takes) mt_args_take_vocabulary(o, args);
    if (status == 0 && args) mt_args_warn(args, folder);
    mt_options_free(&of_args);
    mt_megatron_close(checkpoint);
    return status;
}
