/* hf_config.c: config.json of Hugging Face: families of transformers, and one of our own for what none of them can say.
 * Values are checked against the table of options, so what is written here can be read here. */
#include "file.h"
#include "option_table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const char *const mt_hf_families[MT_NUM_HF_FAMILIES] = {
    "", "gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "megatron"};

const char *mt_hf_family_name(mt_hf_family family) {
    return mt_hf_families[family];
}

mt_hf_family mt_hf_family_find(const char *name) {
    int family = MT_NUM_HF_FAMILIES - 1;
    while (family > 0 && strcmp(name, mt_hf_families[family]) != 0) family--;
    return (mt_hf_family)family;
}

static bool mt_has(const char *choices, const char *text) {
    return mt_choice_index(choices, text) >= 0;
}

/* A config.json being read. Only the first error is kept, so that a reader can go on to its end. */
typedef struct mt_config {
    json_t *root;
    const char *path;
    mt_error *error;
    bool failed;
} mt_config;

__attribute__((format(printf, 2, 3))) static void mt_config_fail(mt_config *config, const char *format, ...) {
    char text[800];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!config->failed) mt_error_set(config->error, "%.200s: %s", config->path, text);
    config->failed = true;
}

/* The value of a key; NULL when it is absent or null. */
static json_t *mt_config_get(const json_t *object, const char *key) {
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

/* Sets an option from a key, where the object has it; the table says its type and range. */
static void mt_config_read_option(mt_config *config, const json_t *object, const char *key, mt_options *options,
                                  size_t offset) {
    const json_t *value = mt_config_get(object, key);
    const mt_option *row = mt_option_of(offset);
    if (!value) return;
    if (row->type == MT_INT ? !json_is_integer(value) : !json_is_number(value)) {
        mt_config_fail(config, "\"%s\" must be a %snumber", key, row->type == MT_INT ? "whole " : "");
        return;
    }
    if (row->type == MT_INT)
        *mt_option_int(options, row) = json_integer_value(value);
    else
        *mt_option_real(options, row) = json_number_value(value);
    if (!mt_option_in_range(row, json_number_value(value)))
        mt_config_fail(config, "\"%s\" is %g, must be in %s", key, json_number_value(value), row->values);
}

/* The same for a key that every file of the kind has. */
static void mt_config_read_size(mt_config *config, const char *key, mt_options *options, size_t offset) {
    if (!mt_config_get(config->root, key)) mt_config_fail(config, "\"%s\" is missing", key);
    mt_config_read_option(config, config->root, key, options, offset);
}

static bool mt_config_bool(mt_config *config, const char *key, bool fallback) {
    const json_t *value = mt_config_get(config->root, key);
    if (value && !json_is_boolean(value)) mt_config_fail(config, "\"%s\" must be true or false", key);
    return json_is_boolean(value) ? json_is_true(value) : fallback;
}

static const char *mt_config_string(mt_config *config, const json_t *object, const char *key, const char *fallback) {
    const json_t *value = mt_config_get(object, key);
    if (value && !json_is_string(value)) mt_config_fail(config, "\"%s\" must be a string", key);
    return json_is_string(value) ? json_string_value(value) : fallback;
}

/* A token id, or the first of a list of them; -1 when there is none or the vocabulary does not hold it. */
static int64_t mt_config_token(mt_config *config, const char *key, int64_t vocab_size) {
    const json_t *value = mt_config_get(config->root, key);
    if (json_is_array(value)) value = json_array_get(value, 0);
    if (!value) return -1;
    if (!json_is_integer(value)) mt_config_fail(config, "\"%s\" must be a token or a list of tokens", key);
    int64_t token = json_integer_value(value);
    return token >= 0 && token < vocab_size ? token : -1;
}

/* Keys that would change what the model computes, and are not supported when true. */
static void mt_config_refuse(mt_config *config) {
    static const char *const keys[] = {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
                                       "add_cross_attention", "is_encoder_decoder", "use_mrope"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (mt_config_bool(config, keys[i], false)) mt_config_fail(config, "\"%s\": true is not supported", keys[i]);
    if (!mt_config_bool(config, "scale_attn_weights", true))
        mt_config_fail(config, "\"scale_attn_weights\": false is not supported");
    if (mt_config_get(config->root, "quantization_config"))
        mt_config_fail(config, "quantized weights (\"quantization_config\") are not supported; load the fp32, bf16 or "
                               "fp16 model");
}

/* The stretch of rotary positions, under either of its keys: newer files have rope_parameters with the base inside,
 * older ones rope_scaling beside rope_theta. */
static void mt_config_read_rope(mt_config *config, mt_options *options) {
    static const struct {
        const char *key;
        size_t offset;
    } numbers[] = {
        {"factor", MT_AT(rope_scaling_factor)},
        {"original_max_position_embeddings", MT_AT(original_max_position_embeddings)},
        {"low_freq_factor", MT_AT(rope_low_freq_factor)},
        {"high_freq_factor", MT_AT(rope_high_freq_factor)},
        {"beta_fast", MT_AT(yarn_beta_fast)},
        {"beta_slow", MT_AT(yarn_beta_slow)},
        {"mscale", MT_AT(yarn_mscale)},
        {"mscale_all_dim", MT_AT(yarn_mscale_all_dim)},
        {"attention_factor", MT_AT(yarn_attention_factor)},
    };
    const json_t *rope = mt_config_get(config->root, "rope_parameters");
    if (!rope) rope = mt_config_get(config->root, "rope_scaling");
    if (rope && !json_is_object(rope)) mt_config_fail(config, "the parameters of RoPE must be an object");
    const json_t *base = mt_config_get(rope, "rope_theta") ? rope : config->root;
    mt_config_read_option(config, base, "rope_theta", options, MT_AT(rotary_base));
    const char *older = mt_config_string(config, rope, "type", "default");
    const char *type = mt_config_string(config, rope, "rope_type", older);
    if (strcmp(type, "default") == 0) type = "none";
    if (!mt_has("none|linear|llama3|yarn", type))
        mt_config_fail(config, "RoPE of type \"%.40s\" is not supported; default, linear, llama3 and yarn are", type);
    const json_t *partial = mt_config_get(rope, "partial_rotary_factor");
    if (!partial) partial = mt_config_get(config->root, "partial_rotary_factor");
    if (partial && json_number_value(partial) != 1)
        mt_config_fail(config, "\"partial_rotary_factor\" other than 1 is not supported");
    if (json_is_false(json_object_get(rope, "truncate")))
        mt_config_fail(config, "RoPE with \"truncate\": false is not supported");
    options->rope_scaling_type = (mt_rope_scaling)mt_choice_index("none|linear|llama3|yarn", type);
    if (strcmp(type, "none") == 0) return;
    if (!mt_config_get(rope, "factor")) mt_config_fail(config, "RoPE of type \"%s\" needs a \"factor\"", type);
    if (strcmp(type, "linear") != 0) options->original_max_position_embeddings = options->max_position_embeddings;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (i == 0 || strcmp(type, "linear") != 0)
            mt_config_read_option(config, rope, numbers[i].key, options, numbers[i].offset);
}

/* How many of the layers of a Qwen model look through the sliding window: layer_types says, or else those from
 * max_window_layers on. */
static int64_t mt_config_sliding_layers(mt_config *config, int64_t num_layers) {
    const json_t *types = mt_config_get(config->root, "layer_types");
    int64_t sliding = 0;
    if (!types) {
        const json_t *value = mt_config_get(config->root, "max_window_layers");
        if (value && !json_is_integer(value)) mt_config_fail(config, "\"max_window_layers\" must be a whole number");
        int64_t first = value ? json_integer_value(value) : 28; // Qwen2Config's default
        return first >= num_layers ? 0 : first <= 0 ? num_layers : num_layers - first;
    }
    if (!json_is_array(types) || (int64_t)json_array_size(types) != num_layers)
        mt_config_fail(config, "\"layer_types\" must list %lld layers", (long long)num_layers);
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || !mt_has("full_attention|sliding_attention", type))
            mt_config_fail(config, "\"layer_types\" holds %.40s; full_attention and sliding_attention are supported",
                           type ? type : "something else than strings");
        else
            sliding += *type == 's';
    }
    return sliding;
}

static void mt_config_read_window(mt_config *config, mt_options *options) {
    bool is_mistral = mt_has("mistral|mixtral", mt_hf_family_name(options->hf_family));
    if (strcmp(mt_hf_family_name(options->hf_family), "llama") == 0) return; // transformers reads no window there
    if (!is_mistral && !mt_config_bool(config, "use_sliding_window", false)) return;
    if (!json_is_null(json_object_get(config->root, "sliding_window"))) options->window_size = 4096; // when not given
    mt_config_read_option(config, config->root, "sliding_window", options, MT_AT(window_size));
    if (is_mistral || options->window_size == 0) return;
    int64_t sliding = mt_config_sliding_layers(config, options->num_layers);
    if (sliding > 0 && sliding < options->num_layers)
        mt_config_fail(config, "%lld of %lld layers have a sliding window; a mixture is not supported",
                       (long long)sliding, (long long)options->num_layers);
    if (sliding == 0) options->window_size = 0;
}

static void mt_config_read_gpt2(mt_config *config, mt_options *options) {
    const char *activation = mt_config_string(config, config->root, "activation_function", "gelu_new");
    mt_config_read_size(config, "n_layer", options, MT_AT(num_layers));
    mt_config_read_size(config, "n_embd", options, MT_AT(hidden_size));
    mt_config_read_size(config, "n_head", options, MT_AT(num_attention_heads));
    mt_config_read_size(config, "n_positions", options, MT_AT(max_position_embeddings));
    mt_config_read_option(config, config->root, "n_inner", options, MT_AT(ffn_hidden_size));
    mt_config_read_option(config, config->root, "layer_norm_epsilon", options, MT_AT(norm_epsilon));
    mt_config_read_option(config, config->root, "embd_pdrop", options, MT_AT(hidden_dropout));
    double embedding_dropout = options->hidden_dropout;
    options->hidden_dropout = 0.1; // GPT2Config's default, for all three
    mt_config_read_option(config, config->root, "resid_pdrop", options, MT_AT(hidden_dropout));
    mt_config_read_option(config, config->root, "attn_pdrop", options, MT_AT(attention_dropout));
    if (embedding_dropout != options->hidden_dropout)
        mt_config_fail(config, "\"embd_pdrop\" and \"resid_pdrop\" differ; one hidden dropout is supported: make them "
                               "equal");
    if (!mt_has("gelu_new|gelu|gelu_pytorch_tanh", activation))
        mt_config_fail(config,
                       "\"activation_function\" \"%.40s\" is not supported; gelu_new, gelu_pytorch_tanh and gelu are",
                       activation);
    options->openai_gelu = strcmp(activation, "gelu") != 0;
    options->untie_embeddings_and_output_weights = !mt_config_bool(config, "tie_word_embeddings", true);
}

/* The sizes of Llama, Mistral, Qwen2 and Qwen3. */
static void mt_config_read_llama_sizes(mt_config *config, mt_options *options) {
    mt_config_read_size(config, "num_hidden_layers", options, MT_AT(num_layers));
    mt_config_read_size(config, "hidden_size", options, MT_AT(hidden_size));
    mt_config_read_size(config, "intermediate_size", options, MT_AT(ffn_hidden_size));
    mt_config_read_size(config, "num_attention_heads", options, MT_AT(num_attention_heads));
    mt_config_read_size(config, "max_position_embeddings", options, MT_AT(max_position_embeddings));
    mt_config_read_option(config, config->root, "num_key_value_heads", options, MT_AT(num_query_groups));
    if (strcmp(mt_hf_family_name(options->hf_family), "llama") != 0 &&
        !json_object_get(config->root, "num_key_value_heads"))
        mt_config_fail(config, "\"num_key_value_heads\" is missing");
    if (options->num_query_groups == options->num_attention_heads) options->num_query_groups = 0; // one group a head
    options->group_query_attention = options->num_query_groups != 0;
    bool is_qwen3 = strncmp(mt_hf_family_name(options->hf_family), "qwen3", 5) == 0;
    if (is_qwen3 && !json_object_get(config->root, "head_dim")) options->kv_channels = 128; // Qwen3Config's default
    mt_config_read_option(config, config->root, "head_dim", options, MT_AT(kv_channels));
}

/* Which layers of Qwen2-MoE, Qwen3-MoE and DeepSeek-V3 have experts. */
static void mt_config_read_expert_layers(mt_config *config, mt_options *options) {
    const json_t *dense = mt_config_get(config->root, "mlp_only_layers");
    const json_t *step = mt_config_get(config->root, "decoder_sparse_step");
    const json_t *first = mt_config_get(config->root, "first_k_dense_replace");
    int64_t every = step ? json_integer_value(step) : 1, leading = json_integer_value(first);
    if (config->failed || options->num_layers == 0) return;
    if (every < 1) mt_config_fail(config, "\"decoder_sparse_step\" must be a number above 0");
    if (dense && !json_is_array(dense)) mt_config_fail(config, "\"mlp_only_layers\" must be a list");
    if (config->failed) return;
    char *layers = mt_calloc(options->num_layers + 1);
    for (int64_t i = 0; i < options->num_layers; i++) layers[i] = i >= leading && (i + 1) % every == 0 ? '1' : '0';
    for (size_t i = 0; i < json_array_size(dense); i++) {
        int64_t layer = json_integer_value(json_array_get(dense, i));
        if (layer >= 0 && layer < options->num_layers) layers[layer] = '0';
    }
    bool any = strchr(layers, '1') != NULL;
    char *text = mt_layer_freq_print(layers);
    free(options->moe_layer_freq);
    options->moe_layer_freq = mt_strdup(strchr(layers, '0') ? text : "1");
    if (!any) mt_config_fail(config, "no layer has experts");
    free(text), free(layers);
}

/* The experts of Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3. */
static void mt_config_read_experts(mt_config *config, mt_options *options) {
    bool is_mixtral = strcmp(mt_hf_family_name(options->hf_family), "mixtral") == 0,
         is_qwen = mt_has("qwen2_moe|qwen3_moe", mt_hf_family_name(options->hf_family));
    const char *names[] = {"num_local_experts", "num_experts", "n_routed_experts"}, *name = NULL;
    for (size_t i = 0; i < 3; i++)
        if (mt_config_get(config->root, names[i])) name = names[i];
    if (!name) mt_config_fail(config, "\"%s\" is missing", names[is_mixtral ? 0 : is_qwen ? 1 : 2]);
    if (!name) return;
    mt_config_read_size(config, name, options, MT_AT(num_experts));
    mt_config_read_size(config, "num_experts_per_tok", options, MT_AT(moe_router_topk));
    mt_config_read_option(config, config->root, "router_aux_loss_coef", options, MT_AT(moe_aux_loss_coeff));
    mt_config_read_size(config, is_mixtral ? "intermediate_size" : "moe_intermediate_size", options,
                        MT_AT(moe_ffn_hidden_size));
    if (is_mixtral) return;
    mt_config_read_expert_layers(config, options);
    bool normalised = mt_config_bool(config, "norm_topk_prob", !is_qwen);
    if (is_qwen) options->moe_router_pre_softmax = !normalised;
    options->moe_shared_expert_gate = strcmp(mt_hf_family_name(options->hf_family), "qwen2_moe") == 0;
    if (options->moe_shared_expert_gate)
        mt_config_read_size(config, "shared_expert_intermediate_size", options,
                            MT_AT(moe_shared_expert_intermediate_size));
    if (is_qwen) return;
    if (!normalised) mt_config_fail(config, "\"norm_topk_prob\": false is not supported for deepseek_v3");
    options->moe_router_score_function = MT_SCORE_SIGMOID;
    options->moe_router_enable_expert_bias = true;
    mt_config_read_option(config, config->root, "n_group", options, MT_AT(moe_router_num_groups));
    mt_config_read_option(config, config->root, "topk_group", options, MT_AT(moe_router_group_topk));
    mt_config_read_option(config, config->root, "routed_scaling_factor", options,
                          MT_AT(moe_router_topk_scaling_factor));
    mt_config_read_option(config, config->root, "n_shared_experts", options,
                          MT_AT(moe_shared_expert_intermediate_size));
    options->moe_shared_expert_intermediate_size *= options->moe_ffn_hidden_size;
    if (options->moe_router_num_groups == 1 || options->moe_router_num_groups == options->moe_router_group_topk)
        options->moe_router_num_groups = options->moe_router_group_topk = 0; // all groups: none
    options->moe_router_group_best = 2;
}

/* Llama, Mistral, Qwen2 and Qwen3: the same block but for biases, norms of heads and windows. */
static void mt_config_read_llama(mt_config *config, mt_options *options) {
    const char *activation = mt_config_string(config, config->root, "hidden_act", "silu");
    bool is_qwen2 = strcmp(mt_hf_family_name(options->hf_family), "qwen2") == 0;
    bool is_qwen3 = strncmp(mt_hf_family_name(options->hf_family), "qwen3", 5) == 0; // qwen3_moe too
    bool is_llama = strcmp(mt_hf_family_name(options->hf_family), "llama") == 0;
    mt_config_read_llama_sizes(config, options);
    options->norm_epsilon = 1e-6; // what their classes in transformers have by default
    options->hidden_dropout = options->attention_dropout = 0;
    mt_config_read_option(config, config->root, "rms_norm_eps", options, MT_AT(norm_epsilon));
    mt_config_read_option(config, config->root, "hidden_dropout", options, MT_AT(hidden_dropout));
    mt_config_read_option(config, config->root, "attention_dropout", options, MT_AT(attention_dropout));
    if (!mt_has("silu|swish", activation))
        mt_config_fail(config, "\"hidden_act\" \"%.40s\" is not supported; silu is", activation);
    options->swiglu = true;
    options->qk_layernorm = is_qwen3;
    options->normalization = MT_RMSNORM;
    options->position_embedding_type = MT_POSITION_ROPE;
    options->attention_output_bias = (is_llama || is_qwen3) && mt_config_bool(config, "attention_bias", false);
    options->add_qkv_bias = is_qwen2 || options->attention_output_bias;
    if (strcmp(mt_hf_family_name(options->hf_family), "qwen2_moe") == 0)
        options->add_qkv_bias = mt_config_bool(config, "qkv_bias", true);
    options->mlp_bias = is_llama && mt_config_bool(config, "mlp_bias", false);
    options->add_bias_linear = options->attention_output_bias && options->mlp_bias;
    options->untie_embeddings_and_output_weights = !mt_config_bool(config, "tie_word_embeddings", false);
    mt_config_read_rope(config, options);
    mt_config_read_window(config, options);
    if (mt_has("mixtral|qwen2_moe|qwen3_moe", mt_hf_family_name(options->hf_family)))
        mt_config_read_experts(config, options);
}

/* The attention of DeepSeek-V3. "head_dim" is that of what turns. */
static void mt_config_read_latent(mt_config *config, mt_options *options) {
    int64_t groups = options->num_query_groups;
    options->multi_latent_attention = true;
    options->q_lora_rank = json_object_get(config->root, "q_lora_rank") ? 0 : 1536; // DeepseekV3Config's default
    mt_config_read_option(config, config->root, "q_lora_rank", options, MT_AT(q_lora_rank));
    mt_config_read_size(config, "kv_lora_rank", options, MT_AT(kv_lora_rank));
    mt_config_read_size(config, "qk_nope_head_dim", options, MT_AT(qk_head_dim));
    mt_config_read_size(config, "qk_rope_head_dim", options, MT_AT(qk_pos_emb_head_dim));
    mt_config_read_size(config, "v_head_dim", options, MT_AT(v_head_dim));
    options->rotary_interleaved = mt_config_bool(config, "rope_interleave", true);
    options->kv_channels = 0; // follows from them
    if (groups != 0)
        mt_config_fail(config,
                       "\"num_key_value_heads\" is %lld and \"num_attention_heads\" %lld; with a latent "
                       "every head has its own key and value: make them equal",
                       (long long)groups, (long long)options->num_attention_heads);
    if (mt_config_bool(config, "attention_bias", false))
        mt_config_fail(config, "\"attention_bias\": true is not supported with latent attention");
}

/* Llama's block with another attention, and experts in the layers from first_k_dense_replace on. Whether the modules of
 * multi-token prediction are in the folder too is not said: transformers leaves them out and keeps their number. This
 * program says it, under its option's name. */
static void mt_config_read_deepseek(mt_config *config, mt_options *options) {
    mt_config_read_llama(config, options);
    mt_config_read_latent(config, options);
    options->mtp_layers_stored = json_integer_value(mt_config_get(config->root, "num_nextn_predict_layers"));
    mt_config_read_option(config, config->root, "mtp_num_layers", options, MT_AT(mtp_num_layers));
    const json_t *dense = mt_config_get(config->root, "first_k_dense_replace");
    if (!dense || json_integer_value(dense) < options->num_layers) mt_config_read_experts(config, options);
}

/* A model that no family of transformers describes: this program's own options, under their names. */
static void mt_config_read_megatron(mt_config *config, mt_options *options) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        char key[80], where[100], number[32];
        if (!row->name || row->origin == MT_OF_RUN || mt_option_of(row->offset) != row) continue;
        mt_option_key(key, row);
        const json_t *value = mt_config_get(config->root, key);
        if (!value) continue;
        snprintf(where, sizeof where, "\"%s\"", key);
        const char *text = json_is_boolean(value) ? (json_is_true(value) ? "true" : "false") : number;
        if (json_is_integer(value))
            snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
        else if (json_is_real(value))
            mt_real_print(number, json_real_value(value));
        else if (json_is_string(value))
            text = json_string_value(value);
        else if (!json_is_boolean(value))
            text = "an array or object";
        mt_error problem;
        if (mt_option_set(options, row, text, where, &problem)) mt_config_fail(config, "%s", problem.text);
    }
    memset(options->given, 0, sizeof options->given);
    options->mtp_layers_stored = options->mtp_num_layers;
    options->attention_output_bias = mt_config_bool(config, "attention_output_bias", false);
    options->mlp_bias = mt_config_bool(config, "mlp_bias", false);
}

/* Sets `shape`, which holds defaults, to what a file of a supported family says. */
static void mt_config_read_family(mt_config *config, mt_options *shape, const char *family) {
    mt_error problem;
    shape->hf_family = mt_hf_family_find(family);
    mt_config_read_size(config, "vocab_size", shape, MT_AT(vocab_size));
    mt_config_read_option(config, config->root, "initializer_range", shape, MT_AT(init_method_std));
    shape->bos_token_id = mt_config_token(config, "bos_token_id", shape->vocab_size);
    shape->eos_token_id = mt_config_token(config, "eos_token_id", shape->vocab_size);
    mt_config_refuse(config);
    if (strcmp(family, "megatron") == 0)
        mt_config_read_megatron(config, shape);
    else if (strcmp(family, "gpt2") == 0)
        mt_config_read_gpt2(config, shape);
    else if (strcmp(family, "deepseek_v3") == 0)
        mt_config_read_deepseek(config, shape);
    else
        mt_config_read_llama(config, shape);
    if (mt_options_check_ranges(shape, MT_PROGRAM_TRAIN, &problem)) mt_config_fail(config, "%s", problem.text);
    int64_t heads = shape->num_attention_heads, groups = shape->num_query_groups;
    if (!config->failed && groups > 0 && heads % groups != 0)
        mt_config_fail(config, "the %lld heads do not divide into %lld groups", (long long)heads, (long long)groups);
}

static int mt_config_read(mt_options *shape, const char *json, int64_t bytes, const char *path, mt_error *error) {
    mt_config config = {.path = path, .error = error};
    config.root = mt_json_parse(json, bytes, JSON_REJECT_DUPLICATES, path, error);
    if (!config.root) return -1;
    const char *family = mt_config_string(&config, config.root, "model_type", NULL);
    if (!family || !mt_has("gpt2|llama|mistral|qwen2|qwen3|mixtral|qwen2_moe|qwen3_moe|deepseek_v3|megatron", family))
        mt_config_fail(&config,
                       "\"model_type\" is %.60s; gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe and "
                       "deepseek_v3 are supported",
                       family ? family : "missing");
    else
        mt_config_read_family(&config, shape, family);
    json_decref(config.root);
    return config.failed ? -1 : 0;
}

/* Weights were trained for one value of these: another one that was given is an error. */
static int mt_options_check_weights(const mt_options *options, const mt_options *shape, const char *path,
                                    mt_error *error) {
    bool learned = shape->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !mt_options_gave(options, row->offset)) continue;
        if (row->origin != MT_OF_WEIGHTS && !(learned && row->offset == MT_AT(max_position_embeddings))) continue;
        char *given = mt_option_text(options, row), *theirs = mt_option_text(shape, row);
        int result = 0;
        if (strcmp(given, theirs) != 0)
            result = mt_error_set(error, "--%s is %.60s, but the weights have %.60s (%.200s); leave the option out",
                                  row->name, given, theirs, path);
        free(given), free(theirs);
        if (result) return result;
    }
    return 0;
}

/* Copies the model that config.json describes into the options that were not given. */
int mt_options_take_shape(mt_options *options, const char *json, int64_t bytes, const char *path, bool has_weights,
                          mt_error *error) {
    mt_options shape;
    mt_options_default(&shape);
    int result = mt_config_read(&shape, json, bytes, path, error);
    if (!result && has_weights) {
        mt_options_derive_sizes(&shape);
        result = mt_options_check_weights(options, &shape, path, error);
    }
    if (!result) {
        // Biases that config.json tells apart from --disable-bias-linear stay unless the user said otherwise.
        bool same_biases =
            !mt_options_gave(options, MT_AT(add_bias_linear)) || options->add_bias_linear == shape.add_bias_linear;
        options->attention_output_bias = same_biases && shape.attention_output_bias;
        options->mlp_bias = same_biases && shape.mlp_bias;
        options->moe_router_group_best = shape.moe_router_group_best;
        options->mtp_layers_stored = shape.mtp_layers_stored;
        options->bos_token_id = shape.bos_token_id;
        options->eos_token_id = shape.eos_token_id;
        options->hf_family = shape.hf_family;
        for (const mt_option *row = mt_option_table; row->help; row++)
            if (row->name && row->origin != MT_OF_RUN && !mt_options_gave(options, row->offset))
                mt_option_copy(options, &shape, row);
    }
    mt_options_free(&shape);
    return result;
}

int mt_options_read_hf_config(mt_options *options, const char *json, int64_t bytes, const char *path, mt_error *error) {
    return mt_options_take_shape(options, json, bytes, path, false, error);
}

/* Whether transformers' implementation of a family computes what the options describe. */
static bool mt_family_fits(const mt_options *o, const char *family) {
    bool qkv = o->add_qkv_bias, output = o->attention_output_bias, mlp = o->mlp_bias;
    bool layernorm = o->normalization == MT_LAYERNORM;
    if (strcmp(family, "gpt2") == 0)
        return layernorm && !o->multi_latent_attention && o->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE &&
               !o->swiglu && qkv && output && mlp && !o->qk_layernorm && o->window_size == 0 &&
               o->num_query_groups == o->num_attention_heads &&
               o->kv_channels * o->num_attention_heads == o->hidden_size;
    if (layernorm || o->position_embedding_type != MT_POSITION_ROPE || !o->swiglu || o->rotary_percent != 1)
        return false;
    bool has_experts = o->num_experts > 0, softmax = o->moe_router_score_function == MT_SCORE_SOFTMAX;
    if (strcmp(family, "deepseek_v3") == 0)
        return o->multi_latent_attention && !output && !mlp && o->window_size == 0 &&
               (!has_experts ||
                (!softmax && o->moe_router_enable_expert_bias && o->moe_shared_expert_intermediate_size > 0 &&
                 !o->moe_shared_expert_gate && (o->moe_router_num_groups == 0 || o->moe_router_group_best == 2) &&
                 o->moe_shared_expert_intermediate_size % o->moe_ffn_hidden_size == 0 &&
                 !strstr(o->moe_layers, "10"))); // experts from some layer on
    if (strcmp(family, "megatron") == 0) return true;
    if (o->multi_latent_attention || o->rotary_interleaved || o->mtp_num_layers > 0) return false;
    if (mt_has("mixtral|qwen2_moe|qwen3_moe", family) != has_experts) return false;
    if (has_experts && (!softmax || o->moe_router_num_groups > 0 || o->moe_router_topk_scaling_factor != 1 ||
                        (o->moe_shared_expert_intermediate_size > 0) != (strcmp(family, "qwen2_moe") == 0)))
        return false;
    if (strcmp(family, "qwen2_moe") == 0) return o->moe_shared_expert_gate && !o->qk_layernorm && !output && !mlp;
    if (strcmp(family, "mixtral") == 0)
        return !o->moe_router_pre_softmax && !strchr(o->moe_layers, '0') && !o->qk_layernorm && !qkv && !output;
    if (strcmp(family, "qwen3_moe") == 0) return o->qk_layernorm && qkv == output;
    if (strcmp(family, "llama") == 0) return !o->qk_layernorm && qkv == output && o->window_size == 0;
    if (strcmp(family, "mistral") == 0) return !o->qk_layernorm && !qkv && !output && !mlp;
    if (strcmp(family, "qwen2") == 0) return !o->qk_layernorm && qkv && !output && !mlp;
    if (strcmp(family, "qwen3") == 0) return o->qk_layernorm && qkv == output && !mlp;
    return strcmp(family, "megatron") == 0;
}

/* Keeps the family that the shape came from while it fits, else finds one that does. */
void mt_options_derive_family(mt_options *options) {
    static const char *const families[] = {"gpt2",    "llama",     "mistral",   "qwen2",      "qwen3",
                                           "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"};
    if (options->hf_family && mt_family_fits(options, mt_hf_family_name(options->hf_family))) return;
    options->hf_family = MT_HF_MEGATRON;
    for (size_t i = sizeof families / sizeof families[0]; i-- > 0;)
        if (mt_family_fits(options, families[i])) options->hf_family = mt_hf_family_find(families[i]);
}

static void mt_config_write_gpt2(json_t *root, const mt_options *o) {
    mt_json_set_int(root, "n_layer", o->num_layers);
    mt_json_set_int(root, "n_embd", o->hidden_size);
    mt_json_set_int(root, "n_head", o->num_attention_heads);
    mt_json_set_int(root, "n_positions", o->max_position_embeddings);
    mt_json_set_int(root, "n_inner", o->ffn_hidden_size);
    mt_json_set_string(root, "activation_function", o->openai_gelu ? "gelu_new" : "gelu");
    mt_json_set_real(root, "layer_norm_epsilon", o->norm_epsilon);
    mt_json_set_real(root, "embd_pdrop", o->hidden_dropout);
    mt_json_set_real(root, "resid_pdrop", o->hidden_dropout);
    mt_json_set_real(root, "attn_pdrop", o->attention_dropout);
}

/* RoPE's parameters as an object; the newer form holds the base too. */
static json_t *mt_config_rope(const mt_options *o, bool newer) {
    json_t *rope = json_object();
    bool is_llama3 = o->rope_scaling_type == MT_ROPE_SCALING_LLAMA3,
         is_yarn = o->rope_scaling_type == MT_ROPE_SCALING_YARN;
    bool is_none = o->rope_scaling_type == MT_ROPE_SCALING_NONE;
    mt_json_set_string(rope, "rope_type", is_none ? "default" : is_llama3 ? "llama3" : is_yarn ? "yarn" : "linear");
    if (newer) mt_json_set_real(rope, "rope_theta", o->rotary_base);
    if (!is_none) mt_json_set_real(rope, "factor", o->rope_scaling_factor);
    if (is_llama3 || is_yarn)
        mt_json_set_int(rope, "original_max_position_embeddings", o->original_max_position_embeddings);
    if (is_llama3) {
        mt_json_set_real(rope, "low_freq_factor", o->rope_low_freq_factor);
        mt_json_set_real(rope, "high_freq_factor", o->rope_high_freq_factor);
    }
    if (is_yarn) {
        mt_json_set_real(rope, "beta_fast", o->yarn_beta_fast);
        mt_json_set_real(rope, "beta_slow", o->yarn_beta_slow);
        mt_json_set_real(rope, "attention_factor", o->yarn_attention_factor);
        if (o->yarn_mscale > 0) mt_json_set_real(rope, "mscale", o->yarn_mscale);
        if (o->yarn_mscale_all_dim > 0) mt_json_set_real(rope, "mscale_all_dim", o->yarn_mscale_all_dim);
    }
    return rope;
}

static void mt_config_write_llama(json_t *root, const mt_options *o) {
    bool is_qwen = strncmp(mt_hf_family_name(o->hf_family), "qwen", 4) == 0;
    mt_json_set_int(root, "num_hidden_layers", o->num_layers);
    mt_json_set_int(root, "hidden_size", o->hidden_size);
    mt_json_set_int(root, "intermediate_size", o->ffn_hidden_size);
    mt_json_set_int(root, "num_attention_heads", o->num_attention_heads);
    mt_json_set_int(root, "num_key_value_heads", o->num_query_groups);
    mt_json_set_int(root, "head_dim", o->kv_channels);
    mt_json_set_int(root, "max_position_embeddings", o->max_position_embeddings);
    mt_json_set_string(root, "hidden_act", "silu");
    mt_json_set_real(root, "rms_norm_eps", o->norm_epsilon);
    mt_json_set_real(root, "attention_dropout", o->attention_dropout);
    if (o->hidden_dropout > 0) mt_json_set_real(root, "hidden_dropout", o->hidden_dropout); // ours; theirs has none
    if (strcmp(mt_hf_family_name(o->hf_family), "llama") == 0 ||
        strncmp(mt_hf_family_name(o->hf_family), "qwen3", 5) == 0)
        mt_json_set_bool(root, "attention_bias", o->attention_output_bias);
    if (strcmp(mt_hf_family_name(o->hf_family), "llama") == 0) mt_json_set_bool(root, "mlp_bias", o->mlp_bias);
    json_object_set_new(root, "rope_parameters", mt_config_rope(o, true));
    mt_json_set_real(root, "rope_theta", o->rotary_base); // this and the next: transformers before 5
    json_object_set_new(root, "rope_scaling",
                        o->rope_scaling_type == MT_ROPE_SCALING_NONE ? json_null() : mt_config_rope(o, false));
    if (strcmp(mt_hf_family_name(o->hf_family), "llama") == 0 || o->multi_latent_attention) return;
    json_object_set_new(root, "sliding_window", o->window_size ? json_integer(o->window_size) : json_null());
    if (!is_qwen) return;
    json_t *types = json_array();
    for (int64_t layer = 0; layer < o->num_layers; layer++)
        json_array_append_new(types, json_string(o->window_size ? "sliding_attention" : "full_attention"));
    json_object_set_new(root, "layer_types", types);
    mt_json_set_bool(root, "use_sliding_window", o->window_size > 0);
    mt_json_set_int(root, "max_window_layers", o->window_size > 0 ? 0 : o->num_layers);
}

/* The experts of Mixtral, Qwen2-MoE and Qwen3-MoE. */
static void mt_config_write_experts(json_t *root, const mt_options *o) {
    bool is_mixtral = strcmp(mt_hf_family_name(o->hf_family), "mixtral") == 0;
    mt_json_set_int(root, "num_local_experts", o->num_experts);
    mt_json_set_int(root, "num_experts_per_tok", o->moe_router_topk);
    mt_json_set_real(root, "router_aux_loss_coef", o->moe_aux_loss_coeff);
    mt_json_set_bool(root, "output_router_logits", false);
    if (is_mixtral) {
        mt_json_set_int(root, "intermediate_size", o->moe_ffn_hidden_size);
        return;
    }
    json_t *dense = json_array();
    for (int64_t i = 0; i < o->num_layers; i++)
        if (o->moe_layers[i] == '0') json_array_append_new(dense, json_integer(i));
    mt_json_set_int(root, "num_experts", o->num_experts); // transformers before 5
    mt_json_set_int(root, "moe_intermediate_size", o->moe_ffn_hidden_size);
    mt_json_set_bool(root, "norm_topk_prob", !o->moe_router_pre_softmax);
    mt_json_set_int(root, "decoder_sparse_step", 1);
    json_object_set_new(root, "mlp_only_layers", dense);
    if (strcmp(mt_hf_family_name(o->hf_family), "qwen3_moe") == 0) return;
    mt_json_set_int(root, "shared_expert_intermediate_size", o->moe_shared_expert_intermediate_size);
    mt_json_set_bool(root, "qkv_bias", o->add_qkv_bias);
}

static void mt_config_write_deepseek(json_t *root, const mt_options *o) {
    mt_config_write_llama(root, o);
    mt_json_set_int(root, "head_dim", o->qk_pos_emb_head_dim);
    json_object_set_new(root, "q_lora_rank", o->q_lora_rank > 0 ? json_integer(o->q_lora_rank) : json_null());
    mt_json_set_int(root, "kv_lora_rank", o->kv_lora_rank);
    mt_json_set_int(root, "qk_nope_head_dim", o->qk_head_dim);
    mt_json_set_int(root, "qk_rope_head_dim", o->qk_pos_emb_head_dim);
    mt_json_set_int(root, "qk_head_dim", o->qk_head_dim + o->qk_pos_emb_head_dim);
    mt_json_set_int(root, "v_head_dim", o->v_head_dim);
    mt_json_set_bool(root, "rope_interleave", o->rotary_interleaved);
    mt_json_set_bool(root, "attention_bias", false);
    mt_json_set_int(root, "num_nextn_predict_layers", o->mtp_num_layers);
    if (o->mtp_num_layers > 0) mt_json_set_int(root, "mtp_num_layers", o->mtp_num_layers);
    const char *first = o->moe_layers ? strchr(o->moe_layers, '1') : NULL;
    mt_json_set_int(root, "first_k_dense_replace", first ? first - o->moe_layers : o->num_layers);
    if (!first) return;
    mt_json_set_int(root, "n_routed_experts", o->num_experts);
    mt_json_set_int(root, "num_experts_per_tok", o->moe_router_topk);
    mt_json_set_int(root, "moe_intermediate_size", o->moe_ffn_hidden_size);
    mt_json_set_int(root, "n_shared_experts", o->moe_shared_expert_intermediate_size / o->moe_ffn_hidden_size);
    mt_json_set_int(root, "n_group", mt_max(o->moe_router_num_groups, 1));
    mt_json_set_int(root, "topk_group", mt_max(o->moe_router_group_topk, 1));
    mt_json_set_real(root, "routed_scaling_factor", o->moe_router_topk_scaling_factor);
    mt_json_set_bool(root, "norm_topk_prob", true);
    mt_json_set_string(root, "scoring_func", "sigmoid");
    mt_json_set_string(root, "topk_method", "noaux_tc");
}

static void mt_config_write_megatron(json_t *root, const mt_options *options) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        char key[80];
        if (!row->name || row->origin == MT_OF_RUN || mt_option_of(row->offset) != row) continue;
        mt_option_key(key, row);
        if (row->type == MT_FLAG) mt_json_set_bool(root, key, *mt_option_bool(options, row));
        if (row->type == MT_NO) mt_json_set_bool(root, key, !*mt_option_bool(options, row));
        if (row->type == MT_INT) mt_json_set_int(root, key, *mt_option_int(options, row));
        if (row->type == MT_REAL) mt_json_set_real(root, key, *mt_option_real(options, row));
        if (row->type == MT_CHOICE || row->type == MT_STRING) {
            char *text = mt_option_text(options, row);
            mt_json_set_string(root, key, text);
            free(text);
        }
    }
    mt_json_set_bool(root, "attention_output_bias", options->attention_output_bias);
    mt_json_set_bool(root, "mlp_bias", options->mlp_bias);
}

char *mt_options_write_hf_config(const mt_options *options) {
    static const char *const classes[][2] = {
        {"gpt2", "GPT2LMHeadModel"},          {"llama", "LlamaForCausalLM"},
        {"mistral", "MistralForCausalLM"},    {"qwen2", "Qwen2ForCausalLM"},
        {"qwen3", "Qwen3ForCausalLM"},        {"deepseek_v3", "DeepseekV3ForCausalLM"},
        {"mixtral", "MixtralForCausalLM"},    {"qwen3_moe", "Qwen3MoeForCausalLM"},
        {"qwen2_moe", "Qwen2MoeForCausalLM"}, {"megatron", "MegatronForCausalLM"}};
    const char *family = mt_hf_family_name(options->hf_family), *dtype = options->bf16 ? "bfloat16" : "float32";
    json_t *root = json_object();
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        if (strcmp(family, classes[i][0]) == 0)
            json_object_set_new(root, "architectures", json_pack("[s]", classes[i][1]));
    mt_json_set_string(root, "model_type", family);
    mt_json_set_int(root, "vocab_size", options->vocab_size);
    mt_json_set_real(root, "initializer_range", options->init_method_std);
    mt_json_set_bool(root, "tie_word_embeddings", !options->untie_embeddings_and_output_weights);
    json_object_set_new(root, "bos_token_id",
                        options->bos_token_id < 0 ? json_null() : json_integer(options->bos_token_id));
    json_object_set_new(root, "eos_token_id",
                        options->eos_token_id < 0 ? json_null() : json_integer(options->eos_token_id));
    mt_json_set_string(root, "dtype", dtype);
    mt_json_set_string(root, "torch_dtype", dtype); // transformers before 5
    mt_json_set_bool(root, "use_cache", true);
    if (strcmp(family, "gpt2") == 0)
        mt_config_write_gpt2(root, options);
    else if (strcmp(family, "megatron") == 0)
        mt_config_write_megatron(root, options);
    else if (strcmp(family, "deepseek_v3") == 0)
        mt_config_write_deepseek(root, options);
    else
        mt_config_write_llama(root, options);
    if (mt_has("mixtral|qwen2_moe|qwen3_moe", family)) mt_config_write_experts(root, options);
    char *text = mt_json_print(root);
    json_decref(root);
    return text;
}
