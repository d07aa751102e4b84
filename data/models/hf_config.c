/* hf_config.c: config.json of Hugging Face, read and written from one table: the options of the model that each
 * family's file holds, with their keys, and the values that all its models share. A model belongs to a family if
 * its file, written and read again, gives the same model. A model that no family of transformers computes is written as
 * "megatron", under the names of this program's options. */
#include "hf_config.h"

#include "../base/file.h"
#include "special_tokens.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- families */

const char *mt_hf_family_name(mt_hf_family family) {
    return mt_hf_families[family].model_type;
}

mt_hf_family mt_hf_family_find(const char *name) {
    int family = MT_NUM_HF_FAMILIES - 1;
    while (family > 0 && strcmp(name, mt_hf_families[family].model_type) != 0) family--;
    return (mt_hf_family)family;
}

/* ---- keys */

#define MT_HF_FAMILY_BIT(name, ...) name = 1ull << MT_HF_##name,

/* Families as bits; DeepSeek-V3 has a second bit for its layers of experts, which a model may do without. */
enum {
    MT_HF_FAMILIES(MT_HF_FAMILY_BIT) DEEPSEEK_MOE = 1ull << MT_NUM_HF_FAMILIES,
    NEMOTRON_MOE = DEEPSEEK_MOE << 1, // likewise; of the other one the layers all have experts or none
    GRANITE_MOE = DEEPSEEK_MOE << 2,
    GRANITE_DENSE = DEEPSEEK_MOE << 3,
    QWEN_MOE = QWEN2_MOE | QWEN3_MOE,
    QWENS = QWEN2 | QWEN3 | QWEN_MOE,
    WINDOWED = GEMMA3 | OLMO3, // some layers have a window, and RoPE of their own
    ROPE_BY_TYPE = WINDOWED | MIMO_V2_FLASH,
    EXAONES = EXAONE4 | EXAONE_MOE,      // some layers have a window, and only these have RoPE
    SPARSE = DEEPSEEK_V32 | GLM_MOE_DSA, // latent attention with an indexer
    LATENT = DEEPSEEK_V3 | GLM4_MOE_LITE | KIMI_LINEAR | SPARSE,
    LATENT_ROPE = LATENT & ~KIMI_LINEAR,
    GROUPED = DEEPSEEK_MOE | DOTS1 | GLM4_MOE | SOLAR_OPEN | EXAONE_MOE | GLM4_MOE_LITE | // DeepSeek-V3's router
              MIMO_V2_FLASH | NEMOTRON_MOE | KIMI_LINEAR | SPARSE,
    MISTRALS = MISTRAL | MINISTRAL3,
    SIGMOID = GROUPED | MINIMAX_M2 | HY_V3, // a router with sigmoids and a bias that balances the loads
    NUM_SHARED =
        EXAONE_MOE | HY_V3 | KIMI_LINEAR, // num_experts and num_shared_experts instead of n_routed_experts and n_...
    N_ROUTED = GROUPED & ~(EXAONE_MOE | KIMI_LINEAR),
    MAMBA = NEMOTRON_H | GRANITE,
    LEADING_DENSE = DEEPSEEK_V3 | DOTS1 | GLM4_MOE | EXAONE_MOE | KIMI_LINEAR | SPARSE,     // first_k_dense_replace
    LAYER_LIST = EXAONE_MOE | HY_V3 | GLM4_MOE_LITE | MIMO_V2_FLASH | KIMI_LINEAR | SPARSE, // mlp_layer_types
    DELTA_MOE = QWEN3_NEXT | QWEN3_5_MOE,
    DELTA = DELTA_MOE | QWEN3_5,                                          // gated delta nets
    PARTIAL = GLM4_MOE | MINIMAX_M2 | SOLAR_OPEN | DELTA | MIMO_V2_FLASH, // RoPE on a part of the channels
    EPSILON_5 = MIXTRAL | OLMO3 | EXAONES | GLM4_MOE | HY_V3 | SOLAR_OPEN | GLM4_MOE_LITE | MINISTRAL3 | ERNIE4_5_MOE |
                GPT_OSS | MIMO_V2_FLASH | KIMI_LINEAR | GLM_MOE_DSA,                // rms_norm_eps is 1e-5
    OTHER_THETA = MINIMAX_M2 | HY_V3 | SOLAR_OPEN | ERNIE4_5_MOE | GPT_OSS | LFM2 | // rope_theta is not 10000
                  MIMO_V2_FLASH,
    OWN_BLOCKS = DOTS1 | EXAONES | GLM4_MOE | MINIMAX_M2 | HY_V3 | SOLAR_OPEN | GLM4_MOE_LITE | MINISTRAL3 |
                 ERNIE4_5_MOE | DELTA | LFM2 | MAMBA | MIMO_V2_FLASH | KIMI_LINEAR | SPARSE,
    BLOCKS = LLAMA | MISTRAL | MIXTRAL | QWENS | DEEPSEEK_V3 | SMOLLM3 | WINDOWED | OWN_BLOCKS | GPT_OSS,
    MOE = MIXTRAL | QWEN_MOE | SIGMOID | ERNIE4_5_MOE | GPT_OSS | DELTA_MOE | GRANITE_MOE,
    ALL = GPT2 | BLOCKS | MEGATRON,
};

enum {
    REQUIRED = 1,           // a file without it is refused
    NEGATED = 2,            // a flag that is true where the option is false
    NULLABLE = 4,           // null is the option's 0
    NONZERO = 8,            // written unless it is 0
    PLAIN = 16,             // a flag of the struct that is no option
    FIXED = 32,             // no option: `absent` lists the supported words; the first is written
    READ = 64,              // read only
    WRITE = 128,            // written only, or read by mt_config_read_later
    OWN = 256,              // an option under its own name; its range is checked at the end, for 0 is often "not given"
    PLAIN_ACTIVATION = 512, // the name of an activation that is not gated
    GATED_ACTIVATION = 1024, // the name of an activation that is gated
    NULL_IS_ZERO = 4096,     // null is the option's 0, which is written as a number
    SAME = 2048,             // another number for the option of the row above: both must be equal
    REPLACES = 8192,         // another key for the option of a row above, which wins where both differ
};

/* A number of the file that means something else than the option that it stands for. */
typedef struct mt_hf_conversion {
    void (*read)(mt_options *shape); // after the option was set to the file's number
    int64_t (*write)(const mt_options *o);
} mt_hf_conversion;

/* A key of config.json and the option that it stands for. */
typedef struct mt_hf_key {
    const char *key; // NULL: none; every model of the families has the value `absent`, and no other model is theirs
    uint64_t families;
    size_t offset; // of the option
    unsigned flags;
    const char *absent; // its value (JSON) in a file without it, as in transformers 5; NULL: none, or the option's
    const mt_hf_conversion *conversion; // NULL: the file's number is the option's
} mt_hf_key;

/* The shared experts' width as a multiple of an expert's. */
static void mt_shared_experts_read(mt_options *shape) {
    shape->moe_shared_expert_intermediate_size *= shape->moe_ffn_hidden_size;
}

static int64_t mt_shared_experts_write(const mt_options *o) {
    return o->moe_shared_expert_intermediate_size / mt_max(o->moe_ffn_hidden_size, 1);
}

/* One group, or all groups chosen: no groups. */
static void mt_groups_read(mt_options *shape) {
    if (shape->moe_router_num_groups == 1 || shape->moe_router_num_groups == shape->moe_router_group_topk)
        shape->moe_router_num_groups = shape->moe_router_group_topk = 0;
}

static int64_t mt_groups_write(const mt_options *o) {
    return mt_max(o->moe_router_num_groups, 1);
}

static int64_t mt_group_topk_write(const mt_options *o) {
    return mt_max(o->moe_router_group_topk, 1);
}

/* A group's score is the sum of its two best ones. */
static void mt_group_best_read(mt_options *shape) {
    shape->moe_router_group_best = 2;
}

/* The file has the number of channels whose square root divides the products of queries and keys. */
static void mt_softmax_scale_read(mt_options *shape) {
    bool usual = shape->softmax_scale == (double)shape->kv_channels;
    shape->softmax_scale = usual ? 0 : 1 / sqrt(shape->softmax_scale);
}

static int64_t mt_softmax_scale_write(const mt_options *o) {
    return o->softmax_scale == 0 ? o->kv_channels : llround(1 / (o->softmax_scale * o->softmax_scale));
}

/* The embedding's output is scaled by the square root of its width. */
static void mt_root_of_width_read(mt_options *shape) {
    shape->embedding_multiplier = sqrt((double)shape->hidden_size);
}

static const mt_hf_conversion mt_values = {NULL, mt_value_channels};
static const mt_hf_conversion mt_softmax_scale = {mt_softmax_scale_read, mt_softmax_scale_write};
static const mt_hf_conversion mt_root_of_width = {mt_root_of_width_read, NULL};
static const mt_hf_conversion mt_group_best = {mt_group_best_read, NULL};
static const mt_hf_conversion mt_shared_experts = {mt_shared_experts_read, mt_shared_experts_write};
static const mt_hf_conversion mt_modules = {NULL, mt_num_mtp_modules};
static const mt_hf_conversion mt_groups = {NULL, mt_groups_write},
                              mt_group_topk = {mt_groups_read, mt_group_topk_write};

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most keys have no flags

static const mt_hf_key mt_hf_keys[] = {
    {"vocab_size", T5, MT_AT(stack.vocab_size), 0, "32128"},
    {"d_model", T5, MT_AT(stack.hidden_size), 0, "512"},
    {"d_kv", T5, MT_AT(stack.kv_channels), 0, "64"},
    {"d_ff", T5, MT_AT(stack.ffn_hidden_size), 0, "2048"},
    {"num_layers", T5, MT_AT(stack.encoder_num_layers), 0, "6"},
    {"num_decoder_layers", T5, MT_AT(stack.decoder_num_layers), NULLABLE}, // absent: as many as the encoder
    {"num_heads", T5, MT_AT(stack.num_attention_heads), 0, "8"},
    {"relative_attention_num_buckets", T5, MT_AT(stack.relative_attention_num_buckets), 0, "32"},
    {"relative_attention_max_distance", T5, MT_AT(stack.relative_attention_max_distance), 0, "128"},
    {"dropout_rate", T5, MT_AT(stack.hidden_dropout), 0, "0.1"},
    {"dropout_rate", T5, MT_AT(stack.attention_dropout), 0, "0.1"},
    {"layer_norm_epsilon", T5, MT_AT(stack.norm_epsilon), 0, "1e-6"},
    {"n_positions", T5, MT_AT(stack.max_position_embeddings), 0, "1048576"}, // distances have no end
    {"is_encoder_decoder", T5, 0, FIXED, "true"},
    {"is_decoder", T5, 0, FIXED, "false"},
    {"use_cache", T5, 0, FIXED | WRITE, "true"},
    {NULL, T5, MT_AT(stack.normalization), 0, "\"RMSNorm\""},
    {NULL, T5, MT_AT(stack.position_embedding_type), 0, "\"relative\""},
    {NULL, T5, MT_AT(stack.softmax_scale), 0, "1"},

    {"vocab_size", ALL & ~GPT_OSS, MT_AT(stack.vocab_size), REQUIRED},
    {"vocab_size", GPT_OSS, MT_AT(stack.vocab_size), 0, "201088"},
    {"initializer_range", ALL & ~(MEGATRON | HY_V3), MT_AT(stack.init_method_std), 0, "0.02"},
    {"initializer_range", HY_V3, MT_AT(stack.init_method_std), 0, "0.006"},
    {"initializer_range", MEGATRON, MT_AT(stack.init_method_std)},
    {"tie_word_embeddings", GPT2, MT_AT(stack.untie_embeddings_and_output_weights), NEGATED, "true"},
    {"tie_word_embeddings", BLOCKS & ~(GEMMA3 | SMOLLM3 | ERNIE4_5_MOE | LFM2),
     MT_AT(stack.untie_embeddings_and_output_weights), NEGATED, "false"},
    {"tie_word_embeddings", GEMMA3 | SMOLLM3 | ERNIE4_5_MOE | LFM2, MT_AT(stack.untie_embeddings_and_output_weights),
     NEGATED, "true"},
    {"tie_embedding", LFM2, MT_AT(stack.untie_embeddings_and_output_weights), NEGATED | READ}, // its older name
    {"tie_word_embeddings", MEGATRON, MT_AT(stack.untie_embeddings_and_output_weights), NEGATED | WRITE},
    {"use_cache", ALL, 0, FIXED | WRITE, "true"},
    {"scale_attn_weights", ALL, 0, FIXED | READ, "true"},
    {"scale_attn_by_inverse_layer_idx", ALL, 0, FIXED | READ, "false"},
    {"reorder_and_upcast_attn", ALL, 0, FIXED | READ, "false"},
    {"add_cross_attention", ALL, 0, FIXED | READ, "false"},
    {"is_encoder_decoder", ALL, 0, FIXED | READ, "false"},
    {"use_mrope", ALL, 0, FIXED | READ, "false"},
    {"is_causal", ALL, 0, FIXED | READ, "true"},

    {"n_layer", GPT2, MT_AT(stack.num_layers), REQUIRED},
    {"n_embd", GPT2, MT_AT(stack.hidden_size), REQUIRED},
    {"n_head", GPT2, MT_AT(stack.num_attention_heads), REQUIRED},
    {"n_positions", GPT2, MT_AT(stack.max_position_embeddings), REQUIRED},
    {"num_hidden_layers", GPT2, MT_AT(stack.num_layers), READ}, // these four: their other names in transformers
    {"hidden_size", GPT2, MT_AT(stack.hidden_size), READ},
    {"num_attention_heads", GPT2, MT_AT(stack.num_attention_heads), READ},
    {"max_position_embeddings", GPT2, MT_AT(stack.max_position_embeddings), READ},
    {"n_inner", GPT2, MT_AT(stack.ffn_hidden_size)},
    {"activation_function", GPT2, 0, PLAIN_ACTIVATION, "\"gelu_new\""},
    {"layer_norm_epsilon", GPT2, MT_AT(stack.norm_epsilon), 0, "1e-5"},
    {"embd_pdrop", GPT2, MT_AT(stack.hidden_dropout), 0, "0.1"},
    {"resid_pdrop", GPT2, MT_AT(stack.hidden_dropout), SAME, "0.1"},
    {"attn_pdrop", GPT2, MT_AT(stack.attention_dropout), 0, "0.1"},

    {"num_hidden_layers", BLOCKS & ~(GPT_OSS | NEMOTRON_H), MT_AT(stack.num_layers), REQUIRED},
    {"num_hidden_layers", NEMOTRON_H, MT_AT(stack.num_layers), WRITE}, // for transformers before 5
    {"num_hidden_layers", GPT_OSS, MT_AT(stack.num_layers), 0, "36"},
    {"hidden_size", BLOCKS & ~GPT_OSS, MT_AT(stack.hidden_size), REQUIRED},
    {"hidden_size", GPT_OSS, MT_AT(stack.hidden_size), 0, "2880"},
    {"intermediate_size", BLOCKS & ~(QWEN3_5_MOE | GPT_OSS | SOLAR_OPEN | LFM2 | GRANITE), MT_AT(stack.ffn_hidden_size),
     REQUIRED},
    {"intermediate_size", LFM2, MT_AT(stack.ffn_hidden_size), 0, "12288"},
    {"block_ff_dim", LFM2, MT_AT(stack.ffn_hidden_size), READ | REPLACES}, // the key above
    {"block_auto_adjust_ff_dim", LFM2, 0, FIXED | WRITE, "false"},
    {"intermediate_size", GRANITE_MOE, MT_AT(stack.ffn_hidden_size), REQUIRED},
    {"shared_intermediate_size", GRANITE_DENSE, MT_AT(stack.ffn_hidden_size), 0, "1024"},
    {"moe_intermediate_size", SOLAR_OPEN | QWEN3_5_MOE, MT_AT(stack.ffn_hidden_size),
     REQUIRED}, // every layer has experts
    {"intermediate_size", GPT_OSS, MT_AT(stack.ffn_hidden_size), 0, "2880"},
    {"num_attention_heads", BLOCKS & ~GPT_OSS, MT_AT(stack.num_attention_heads), REQUIRED},
    {"num_attention_heads", GPT_OSS, MT_AT(stack.num_attention_heads), 0, "64"},
    {"num_key_value_heads", LLAMA | OLMO3, MT_AT(stack.num_query_groups), NULLABLE},
    {"num_key_value_heads", SMOLLM3, MT_AT(stack.num_query_groups), NULLABLE, "4"},
    {"num_key_value_heads", GPT_OSS, MT_AT(stack.num_query_groups), NULLABLE, "8"},
    {"num_key_value_heads", BLOCKS & ~(LLAMA | OLMO3 | SMOLLM3 | GPT_OSS), MT_AT(stack.num_query_groups),
     REQUIRED | NULLABLE},
    {"head_dim", LLAMA | MISTRAL | MIXTRAL | QWEN2 | QWEN_MOE | SMOLLM3 | OLMO3 | LFM2, MT_AT(stack.kv_channels),
     NULLABLE},
    {"head_dim", DOTS1 | EXAONES | GLM4_MOE | ERNIE4_5_MOE, MT_AT(stack.kv_channels), NULLABLE},
    {"head_dim", GEMMA3 | DELTA, MT_AT(stack.kv_channels), 0, "256"},
    {"head_dim", GPT_OSS, MT_AT(stack.kv_channels), NULLABLE, "64"},
    {"head_dim", MIMO_V2_FLASH, MT_AT(stack.kv_channels), 0, "192"},
    {"swa_head_dim", MIMO_V2_FLASH, MT_AT(stack.kv_channels), SAME},
    {"v_head_dim", MIMO_V2_FLASH, MT_AT(stack.value_channels), 0, "128", &mt_values},
    {"swa_v_head_dim", MIMO_V2_FLASH, MT_AT(stack.value_channels), SAME, NULL, &mt_values},
    {"attention_value_scale", MIMO_V2_FLASH, MT_AT(stack.attention_value_scale), NULLABLE, "0.707"},
    {"query_pre_attn_scalar", GEMMA3, MT_AT(stack.softmax_scale), 0, "256", &mt_softmax_scale},
    {"head_dim", QWEN3 | MINIMAX_M2 | HY_V3 | SOLAR_OPEN | MINISTRAL3, MT_AT(stack.kv_channels), NULLABLE, "128"},
    {"head_dim", NEMOTRON_H, MT_AT(stack.kv_channels), 0, "128"},
    {"head_dim", DEEPSEEK_V3 | SPARSE, MT_AT(stack.qk_pos_emb_head_dim), WRITE},
    {"max_position_embeddings", BLOCKS & ~(GPT_OSS | KIMI_LINEAR), MT_AT(stack.max_position_embeddings), REQUIRED},
    {"model_max_length", KIMI_LINEAR, MT_AT(stack.max_position_embeddings), 0, "1048576"},
    {"max_position_embeddings", KIMI_LINEAR, MT_AT(stack.max_position_embeddings),
     READ}, // its other name in transformers 5
    {"max_position_embeddings", GPT_OSS, MT_AT(stack.max_position_embeddings), 0, "131072"},
    {"hidden_act", BLOCKS & ~(GEMMA3 | GPT_OSS | LFM2 | NEMOTRON_H), 0, GATED_ACTIVATION, "\"silu\""},
    {"mlp_hidden_act", NEMOTRON_H, 0, PLAIN_ACTIVATION, "\"relu2\""},
    {"hidden_act", GPT_OSS, 0, FIXED, "silu"}, // the activation is that of the next two keys
    {"swiglu_alpha", GPT_OSS, 0, FIXED, "1.702"},
    {"swiglu_limit", GPT_OSS, MT_AT(stack.activation_func_clamp_value), 0, "7.0"},
    {"hidden_activation", GEMMA3, 0, GATED_ACTIVATION, "\"gelu_pytorch_tanh\""},
    {"attn_logit_softcapping", GEMMA3, 0, FIXED | READ, "null"},
    {"final_logit_softcapping", GEMMA3, 0, FIXED | READ, "null"},
    {"use_bidirectional_attention", GEMMA3, 0, FIXED | READ, "false"},
    {"rms_norm_eps", BLOCKS & ~(EPSILON_5 | LFM2 | NEMOTRON_H), MT_AT(stack.norm_epsilon), 0, "1e-6"},
    {"norm_eps", LFM2, MT_AT(stack.norm_epsilon), 0, "1e-5"},
    {"layer_norm_epsilon", NEMOTRON_H, MT_AT(stack.norm_epsilon), 0, "1e-5"},
    {"rms_norm_eps", EPSILON_5, MT_AT(stack.norm_epsilon), 0, "1e-5"},
    {"attention_dropout", BLOCKS, MT_AT(stack.attention_dropout), 0, "0.0"},
    {"hidden_dropout", BLOCKS, MT_AT(stack.hidden_dropout), NONZERO, "0.0"}, // this program's
    {"attention_bias", LLAMA | QWEN3 | QWEN3_MOE | SMOLLM3 | WINDOWED | DOTS1 | HY_V3 | GRANITE,
     MT_AT(stack.attention_output_bias), PLAIN, "false"},
    {"attention_bias", GPT_OSS, MT_AT(stack.attention_output_bias), PLAIN, "true"},
    {"attention_bias", LATENT | DELTA | NEMOTRON_H | MIMO_V2_FLASH, 0, FIXED, "false"},
    {"use_bias", NEMOTRON_H, 0, FIXED, "false"},
    {"mamba_proj_bias", MAMBA, 0, FIXED, "false"},
    {"moe_latent_size", NEMOTRON_H, MT_AT(stack.moe_latent_size), NULLABLE},
    {"use_bias", ERNIE4_5_MOE, 0, FIXED, "false"},
    {"attention_bias", GLM4_MOE | SOLAR_OPEN, MT_AT(stack.add_qkv_bias), 0, "false"},
    {"use_qk_norm", GLM4_MOE, MT_AT(stack.qk_layernorm), 0, "false"},
    {"use_qk_norm", MINIMAX_M2, 0, FIXED | READ, "true"}, // these five: transformers has nothing else
    {"qk_norm_type", MINIMAX_M2, 0, FIXED | READ, "per_layer"},
    {"use_routing_bias", MINIMAX_M2, 0, FIXED | READ, "true"},
    {"scoring_func", MINIMAX_M2, 0, FIXED | READ, "sigmoid"},
    {"shared_intermediate_size", MINIMAX_M2, 0, FIXED | READ, "0"},
    {"qkv_bias", QWEN2_MOE, MT_AT(stack.add_qkv_bias), 0, "true"},
    {"mlp_bias", LLAMA | SMOLLM3, MT_AT(stack.mlp_bias), PLAIN, "false"},
    {"mlp_bias", HY_V3 | NEMOTRON_H | SPARSE, 0, FIXED, "false"},
    {"rope_theta", BLOCKS & ~(MIXTRAL | SMOLLM3 | WINDOWED | OTHER_THETA | NEMOTRON_H | KIMI_LINEAR),
     MT_AT(stack.rotary_base), WRITE, "10000.0"}, // for transformers before 5
    {"rope_theta", SMOLLM3, MT_AT(stack.rotary_base), WRITE, "2000000.0"},
    {"rope_theta", GEMMA3, MT_AT(stack.rotary_base), WRITE, "1000000.0"},
    {"rope_theta", OLMO3, MT_AT(stack.rotary_base), WRITE, "500000.0"},
    {"rope_theta", ERNIE4_5_MOE, MT_AT(stack.rotary_base), WRITE, "500000.0"},
    {"rope_theta", MIXTRAL | SOLAR_OPEN | LFM2, MT_AT(stack.rotary_base), WRITE, "1000000.0"},
    {"rope_theta", MINIMAX_M2, MT_AT(stack.rotary_base), WRITE, "5000000.0"},
    {"rope_theta", HY_V3, MT_AT(stack.rotary_base), WRITE, "11158840.0"},
    {"rope_theta", MIMO_V2_FLASH, MT_AT(stack.rotary_base), WRITE, "5000000.0"},
    {"partial_rotary_factor", PARTIAL & ~(GLM4_MOE | DELTA | MIMO_V2_FLASH), MT_AT(stack.rotary_percent), WRITE, "1.0"},
    {"partial_rotary_factor", MIMO_V2_FLASH, MT_AT(stack.rotary_percent), WRITE, "0.334"},
    {"partial_rotary_factor", DELTA, MT_AT(stack.rotary_percent), WRITE, "0.25"},
    {"partial_rotary_factor", GLM4_MOE, MT_AT(stack.rotary_percent), WRITE, "0.5"},
    {"rope_theta", GPT_OSS, MT_AT(stack.rotary_base), WRITE, "150000.0"},
    {"sliding_window", MISTRAL, MT_AT(stack.window_size), NULLABLE, "4096"},
    {"sliding_window", MIXTRAL | MINISTRAL3, MT_AT(stack.window_size), NULLABLE},
    {"sliding_window", QWENS | WINDOWED | DOTS1 | EXAONES, MT_AT(stack.window_size), NULLABLE | WRITE, "4096"},
    {"sliding_window", SMOLLM3, MT_AT(stack.window_size), NULLABLE | WRITE},
    {"sliding_window", GPT_OSS, MT_AT(stack.window_size), NULLABLE | WRITE, "128"},
    {"sliding_window", MIMO_V2_FLASH, MT_AT(stack.window_size), WRITE, "129"},
    {"use_sliding_window", QWENS | SMOLLM3, 0, FIXED | READ, "true|false"},

    {"q_lora_rank", DEEPSEEK_V3, MT_AT(stack.q_lora_rank), NULLABLE, "1536"},
    {"q_lora_rank", GLM4_MOE_LITE, MT_AT(stack.q_lora_rank), NULLABLE, "768"},
    {"q_lora_rank", DEEPSEEK_V32, MT_AT(stack.q_lora_rank), 0, "1536"},
    {"q_lora_rank", GLM_MOE_DSA, MT_AT(stack.q_lora_rank), 0, "2048"},
    {"q_lora_rank", KIMI_LINEAR, MT_AT(stack.q_lora_rank), NULLABLE},
    {"kv_lora_rank", LATENT, MT_AT(stack.kv_lora_rank), REQUIRED},
    {"qk_nope_head_dim", LATENT, MT_AT(stack.qk_head_dim), REQUIRED},
    {"qk_rope_head_dim", LATENT, MT_AT(stack.qk_pos_emb_head_dim), REQUIRED},
    {"head_dim", GLM4_MOE_LITE, MT_AT(stack.qk_pos_emb_head_dim), READ}, // its other name in transformers 5
    {"qk_head_dim", LATENT, MT_AT(stack.kv_channels), WRITE},
    {"v_head_dim", LATENT, MT_AT(stack.v_head_dim), REQUIRED},
    {"rope_interleave", LATENT_ROPE & ~SPARSE, MT_AT(stack.rotary_interleaved), 0, "true"},
    {"index_n_heads", DEEPSEEK_V32, MT_AT(stack.dsa_indexer_n_heads), 0, "64"},
    {"index_n_heads", GLM_MOE_DSA, MT_AT(stack.dsa_indexer_n_heads), 0, "32"},
    {"index_head_dim", SPARSE, MT_AT(stack.dsa_indexer_head_dim), 0, "128"},
    {"index_topk", SPARSE, MT_AT(stack.dsa_indexer_topk), 0, "2048"},
    {"num_nextn_predict_layers", DEEPSEEK_V3 | GLM4_MOE | MIMO, MT_AT(stack.mtp_num_layers), WRITE, NULL, &mt_modules},
    {"num_nextn_predict_layers", GLM4_MOE_LITE | SPARSE | NEMOTRON_H, MT_AT(stack.mtp_num_layers), WRITE | NONZERO,
     NULL, &mt_modules},
    {"mtp_num_hidden_layers", DELTA, MT_AT(stack.mtp_num_layers), WRITE | NONZERO, NULL, &mt_modules},
    {"mtp_num_layers", LATENT_ROPE | GLM4_MOE | MIMO | DELTA | NEMOTRON_H, MT_AT(stack.mtp_num_layers),
     NONZERO}, // this and the next one are this program's: the folder has the weights
    {"mtp_use_repeated_layer", LATENT_ROPE | GLM4_MOE | MIMO | DELTA | NEMOTRON_H, MT_AT(stack.mtp_use_repeated_layer),
     NONZERO},

    {"intermediate_size", MIXTRAL | MINIMAX_M2, MT_AT(stack.moe_ffn_hidden_size), REQUIRED},
    {"intermediate_size", GPT_OSS, MT_AT(stack.moe_ffn_hidden_size), 0, "2880"},
    {"linear_num_key_heads", DELTA, MT_AT(stack.linear_num_key_heads), 0, "16"},
    {"linear_num_value_heads", DELTA, MT_AT(stack.linear_num_value_heads), 0, "32"},
    {"linear_key_head_dim", DELTA, MT_AT(stack.linear_key_head_dim), 0, "128"},
    {"linear_value_head_dim", DELTA, MT_AT(stack.linear_value_head_dim), 0, "128"},
    {"linear_conv_kernel_dim", DELTA, MT_AT(stack.linear_conv_kernel_dim), 0, "4"},
    {"conv_L_cache", LFM2, MT_AT(stack.linear_conv_kernel_dim), 0, "3"},
    {"conv_bias", LFM2, 0, FIXED, "false"},
    {"conv_kernel", NEMOTRON_H, MT_AT(stack.linear_conv_kernel_dim), 0, "4"},
    {"ssm_state_size", NEMOTRON_H, MT_AT(stack.mamba_state_dim), 0, "128"},
    {"n_groups", NEMOTRON_H, MT_AT(stack.mamba_num_groups), 0, "8"},
    {"mamba_num_heads", NEMOTRON_H, MT_AT(stack.mamba_num_heads), 0, "128"},
    {"mamba_head_dim", NEMOTRON_H, MT_AT(stack.mamba_head_dim), 0, "64"},
    {"use_conv_bias", NEMOTRON_H, MT_AT(stack.mamba_conv_bias), 0, "true"},
    {"time_step_min", NEMOTRON_H, MT_AT(stack.mamba_dt_limit_low), 0, "0.001"}, // transformers 5 cuts steps there
    {"mamba_d_conv", NEMOTRON_H, MT_AT(stack.linear_conv_kernel_dim), READ}, // these four: other names in transformers
    {"mamba_n_groups", NEMOTRON_H, MT_AT(stack.mamba_num_groups), READ},
    {"mamba_conv_bias", NEMOTRON_H, MT_AT(stack.mamba_conv_bias), READ},
    {"mamba_dt_min", NEMOTRON_H, MT_AT(stack.mamba_dt_limit_low), READ},
    {"mamba_hidden_act", NEMOTRON_H, 0, FIXED, "silu"},
    {"mamba_d_conv", GRANITE, MT_AT(stack.linear_conv_kernel_dim), 0, "4"},
    {"mamba_d_state", GRANITE, MT_AT(stack.mamba_state_dim), 0, "256"},
    {"mamba_n_groups", GRANITE, MT_AT(stack.mamba_num_groups), 0, "1"},
    {"mamba_n_heads", GRANITE, MT_AT(stack.mamba_num_heads), 0, "128"},
    {"mamba_d_head", GRANITE, MT_AT(stack.mamba_head_dim), WRITE},
    {"mamba_conv_bias", GRANITE, MT_AT(stack.mamba_conv_bias), 0, "true"},
    {"embedding_multiplier", GRANITE, MT_AT(stack.embedding_multiplier), 0, "1.0"},
    {"residual_multiplier", GRANITE, MT_AT(stack.residual_multiplier), 0, "1.0"},
    {"logits_scaling", GRANITE, MT_AT(stack.logits_scaling), 0, "1.0"},
    {"intermediate_size", GRANITE_MOE, MT_AT(stack.moe_ffn_hidden_size), REQUIRED},
    {"num_local_experts", GRANITE_MOE, MT_AT(stack.num_experts), 0, "8"},
    {"num_local_experts", GRANITE_DENSE, MT_AT(stack.num_experts), WRITE},
    {"shared_intermediate_size", GRANITE_MOE, MT_AT(stack.moe_shared_expert_intermediate_size), 0, "1024"},

    {"moe_intermediate_size", DELTA_MOE | QWEN_MOE | GROUPED | HY_V3 | ERNIE4_5_MOE, MT_AT(stack.moe_ffn_hidden_size),
     REQUIRED},
    {"num_local_experts", MIXTRAL | QWEN_MOE | MINIMAX_M2, MT_AT(stack.num_experts)},
    {"num_local_experts", N_ROUTED | NUM_SHARED | DELTA_MOE, MT_AT(stack.num_experts), READ},
    {"num_experts", QWEN_MOE | DELTA_MOE, MT_AT(stack.num_experts)}, // for transformers before 5
    {"num_experts", NUM_SHARED, MT_AT(stack.num_experts)},
    {"num_local_experts", GPT_OSS, MT_AT(stack.num_experts), 0, "128"},
    {"num_experts", MIXTRAL | N_ROUTED | MINIMAX_M2 | GPT_OSS, MT_AT(stack.num_experts), READ},
    {"n_routed_experts", N_ROUTED, MT_AT(stack.num_experts)},
    {"n_routed_experts", MIXTRAL | QWEN_MOE, MT_AT(stack.num_experts), READ},
    {"num_experts", ERNIE4_5_MOE, MT_AT(stack.num_experts), READ},
    {"num_local_experts", ERNIE4_5_MOE, MT_AT(stack.num_experts), READ},
    {"moe_num_experts", ERNIE4_5_MOE, MT_AT(stack.num_experts)},
    {"num_experts_per_token", KIMI_LINEAR, MT_AT(stack.moe_router_topk), 0, "8"},
    {"num_experts_per_tok", KIMI_LINEAR, MT_AT(stack.moe_router_topk), READ}, // its other name in transformers 5
    {"num_experts_per_tok", MOE & ~(ERNIE4_5_MOE | GPT_OSS | GRANITE_MOE | KIMI_LINEAR), MT_AT(stack.moe_router_topk),
     REQUIRED},
    {"num_experts_per_tok", GRANITE_MOE, MT_AT(stack.moe_router_topk), 0, "2"},
    {"num_experts_per_tok", GPT_OSS, MT_AT(stack.moe_router_topk), 0, "4"},
    {"moe_k", ERNIE4_5_MOE, MT_AT(stack.moe_router_topk), 0, "6"},
    {"num_experts_per_tok", ERNIE4_5_MOE, MT_AT(stack.moe_router_topk), READ}, // its other name in transformers 5
    {"router_aux_loss_coef", MIXTRAL | QWEN_MOE | DELTA_MOE | MINIMAX_M2 | ERNIE4_5_MOE | GPT_OSS | GRANITE_MOE,
     MT_AT(stack.moe_aux_loss_coeff), 0, "0.001"},
    {"router_aux_loss_coef", GROUPED | HY_V3, MT_AT(stack.moe_aux_loss_coeff), NONZERO, "0.0"}, // this program's
    {"router_jitter_noise", MIXTRAL | MINIMAX_M2, 0, FIXED | READ, "0.0|0"},
    {"output_router_logits", MOE & ~DEEPSEEK_MOE, 0, FIXED | WRITE, "false"},
    {"norm_topk_prob", QWEN_MOE, MT_AT(stack.moe_router_pre_softmax), NEGATED, "false"},
    {"norm_topk_prob", QWEN3_NEXT, MT_AT(stack.moe_router_pre_softmax), NEGATED, "true"},
    {"norm_topk_prob", QWEN3_5_MOE, 0, FIXED | READ, "true"},
    {"moe_renormalize", KIMI_LINEAR, 0, FIXED, "true"},
    {"norm_topk_prob", KIMI_LINEAR, 0, FIXED | READ, "true"}, // its other name in transformers 5
    {"moe_router_activation_func", KIMI_LINEAR, 0, FIXED, "sigmoid"},
    {"moe_layer_freq", KIMI_LINEAR, 0, FIXED | READ, "1"},
    {"mla_use_nope", KIMI_LINEAR, 0, FIXED, "true"},
    {"norm_topk_prob", GROUPED & ~(DOTS1 | KIMI_LINEAR), 0, FIXED, "true"},
    {"norm_topk_prob", DOTS1, 0, FIXED | REQUIRED, "true"}, // absent: false
    {"shared_expert_intermediate_size", QWEN2_MOE | DELTA_MOE, MT_AT(stack.moe_shared_expert_intermediate_size),
     REQUIRED},

    {"moe_shared_expert_intermediate_size", NEMOTRON_MOE, MT_AT(stack.moe_shared_expert_intermediate_size), REQUIRED},
    {"n_shared_experts", N_ROUTED & ~(DOTS1 | NEMOTRON_MOE | MIMO_V2_FLASH),
     MT_AT(stack.moe_shared_expert_intermediate_size), NULL_IS_ZERO, "1", &mt_shared_experts},
    {"n_shared_experts", DOTS1, MT_AT(stack.moe_shared_expert_intermediate_size), REQUIRED, NULL, &mt_shared_experts},
    {"moe_num_shared_experts", ERNIE4_5_MOE, MT_AT(stack.moe_shared_expert_intermediate_size), NULL_IS_ZERO | OWN, "2",
     &mt_shared_experts},
    {"num_shared_experts", NUM_SHARED, MT_AT(stack.moe_shared_expert_intermediate_size), NULL_IS_ZERO, "1",
     &mt_shared_experts},
    {"n_shared_experts", KIMI_LINEAR, MT_AT(stack.moe_shared_expert_intermediate_size), READ | NULL_IS_ZERO, NULL,
     &mt_shared_experts}, // its other name in transformers 5
    {"n_group", DEEPSEEK_MOE | DEEPSEEK_V32, MT_AT(stack.moe_router_num_groups), NULL_IS_ZERO, "8", &mt_groups},
    {"topk_group", DEEPSEEK_MOE | DEEPSEEK_V32, MT_AT(stack.moe_router_group_topk), NULL_IS_ZERO, "4", &mt_group_topk},
    {"num_expert_group", KIMI_LINEAR, MT_AT(stack.moe_router_num_groups), NULL_IS_ZERO, "1", &mt_groups},
    {"n_group", KIMI_LINEAR, MT_AT(stack.moe_router_num_groups), READ | NULL_IS_ZERO, NULL,
     &mt_groups}, // its other name in transformers 5
    {"n_group", GROUPED & ~(DEEPSEEK_MOE | DEEPSEEK_V32 | KIMI_LINEAR), MT_AT(stack.moe_router_num_groups),
     NULL_IS_ZERO, "1", &mt_groups},
    {"topk_group", GROUPED & ~(DEEPSEEK_MOE | DEEPSEEK_V32), MT_AT(stack.moe_router_group_topk), NULL_IS_ZERO, "1",
     &mt_group_topk},
    {"routed_scaling_factor", DEEPSEEK_MOE | EXAONE_MOE | SPARSE, MT_AT(stack.moe_router_topk_scaling_factor), 0,
     "2.5"},
    {"routed_scaling_factor", DOTS1 | GLM4_MOE | SOLAR_OPEN | NEMOTRON_MOE, MT_AT(stack.moe_router_topk_scaling_factor),
     0, "1.0"},
    {"routed_scaling_factor", MIMO_V2_FLASH, MT_AT(stack.moe_router_topk_scaling_factor), NULLABLE, "1.0"},
    {"routed_scaling_factor", KIMI_LINEAR, MT_AT(stack.moe_router_topk_scaling_factor), 0, "2.446"},
    {"routed_scaling_factor", GLM4_MOE_LITE, MT_AT(stack.moe_router_topk_scaling_factor), 0, "1.8"},
    {"router_scaling_factor", HY_V3, MT_AT(stack.moe_router_topk_scaling_factor), 0, "2.826"},
    {"enable_moe_fp32_combine", HY_V3, 0, FIXED, "true|false"}, // rounding of the sum with the shared expert
    {"scoring_func", DEEPSEEK_MOE | SPARSE, 0, FIXED | WRITE, "sigmoid"},
    {"topk_method", DEEPSEEK_MOE | SPARSE, 0, FIXED | WRITE, "noaux_tc"},

    {NULL, BLOCKS, MT_AT(stack.normalization), 0, "\"RMSNorm\""},
    {NULL, BLOCKS & ~(MAMBA | KIMI_LINEAR), MT_AT(stack.position_embedding_type), 0, "\"rope\""},
    {NULL, MAMBA | KIMI_LINEAR, MT_AT(stack.position_embedding_type), 0, "\"none\""}, // Granite's file may say RoPE
    {NULL, GRANITE, MT_AT(stack.experimental_attention_variant), 0, "\"mamba2\""},
    {NULL, DELTA, MT_AT(stack.experimental_attention_variant), 0, "\"gated_delta_net\""},
    {NULL, KIMI_LINEAR, MT_AT(stack.experimental_attention_variant), 0, "\"kda\""},
    {NULL, LFM2, MT_AT(stack.experimental_attention_variant), 0, "\"short_conv\""},
    {NULL, SPARSE, MT_AT(stack.experimental_attention_variant), 0, "\"dsa\""},
    {NULL, GLM_MOE_DSA, MT_AT(stack.dsa_indexer_rope_interleaved), 0, "true"},
    {NULL, LFM2, MT_AT(stack.swiglu), 0, "true"},
    {NULL, DELTA, MT_AT(stack.attention_output_gate), 0, "true"},
    {NULL, QWEN3_5_MOE, MT_AT(stack.moe_router_pre_softmax), 0, "false"},
    {NULL, QWEN3 | QWEN3_MOE | WINDOWED | DELTA | DOTS1 | EXAONES | MINIMAX_M2 | HY_V3 | LFM2,
     MT_AT(stack.qk_layernorm), 0, "true"},
    {NULL, OLMO3 | MINIMAX_M2, MT_AT(stack.qk_layernorm_all_heads), 0, "true"},
    {NULL, GPT_OSS, MT_AT(stack.quick_geglu), 0, "true"},
    {NULL, GPT_OSS, MT_AT(stack.glu_linear_offset), 0, "1"},
    {NULL, GPT_OSS | MIMO_V2_FLASH, MT_AT(stack.softmax_type), 0, "\"learnable\""},
    {NULL, MIMO_V2_FLASH, MT_AT(stack.sinks_in_windows_only), 0, "true"},
    {NULL, GPT_OSS, MT_AT(stack.moe_router_linear_bias), 0, "true"},
    {NULL, GPT_OSS, MT_AT(stack.mlp_bias), PLAIN, "true"},
    {NULL, GEMMA3, MT_AT(stack.norm_placement), 0, "\"both\""},
    {NULL, OLMO3 | EXAONE4, MT_AT(stack.norm_placement), 0, "\"after\""},
    {NULL, GEMMA3 | DELTA, MT_AT(stack.layernorm_zero_centered_gamma), 0, "true"},
    {NULL, GEMMA3, MT_AT(stack.embedding_multiplier), 0, "1", &mt_root_of_width},
    {NULL, QWEN2, MT_AT(stack.add_qkv_bias), 0, "true"},
    {NULL, LATENT, MT_AT(stack.multi_latent_attention), 0, "true"},
    {NULL, LATENT, MT_AT(stack.qk_layernorm), 0, "true"},
    {NULL, LATENT, MT_AT(stack.latent_norm_epsilon), 0, "1e-6"}, // whatever rms_norm_eps is
    {NULL, QWEN2_MOE | DELTA_MOE, MT_AT(stack.moe_shared_expert_gate), 0, "true"},
    {NULL, SIGMOID, MT_AT(stack.moe_router_score_function), 0, "\"sigmoid\""},
    {NULL, GROUPED, MT_AT(stack.moe_router_enable_expert_bias), 0, "true", &mt_group_best},
    {NULL, MINIMAX_M2 | HY_V3 | ERNIE4_5_MOE, MT_AT(stack.moe_router_enable_expert_bias), 0, "true"},
    {NULL, ERNIE4_5_MOE | SPARSE, MT_AT(stack.rotary_interleaved), 0, "true"},

    {"attention_output_bias", MEGATRON, MT_AT(stack.attention_output_bias), PLAIN},
    {"mlp_bias", MEGATRON, MT_AT(stack.mlp_bias), PLAIN},
};

/* Keys of RoPE's parameters; here a bit stands for a type of scaling. */
enum { LINEAR = 1 << MT_ROPE_SCALING_LINEAR, LLAMA3 = 1 << MT_ROPE_SCALING_LLAMA3, YARN = 1 << MT_ROPE_SCALING_YARN };

static const mt_hf_key mt_rope_keys[] = {
    {"factor", LINEAR | LLAMA3 | YARN, MT_AT(stack.rope_scaling_factor), REQUIRED},
    {"original_max_position_embeddings", LLAMA3 | YARN, MT_AT(stack.original_max_position_embeddings)},
    {"low_freq_factor", LLAMA3, MT_AT(stack.rope_low_freq_factor), REQUIRED},
    {"high_freq_factor", LLAMA3, MT_AT(stack.rope_high_freq_factor), REQUIRED},
    {"beta_fast", YARN, MT_AT(stack.yarn_beta_fast)},
    {"beta_slow", YARN, MT_AT(stack.yarn_beta_slow)},
    {"attention_factor", YARN, MT_AT(stack.yarn_attention_factor)},
    {"truncate", YARN, MT_AT(stack.yarn_correction_range_round_to_int), READ, "true"},
    {"mscale", YARN, MT_AT(yarn_mscale), NONZERO},
    {"mscale_all_dim", YARN, MT_AT(stack.yarn_mscale_all_dim), NONZERO},
};

static const char *const mt_rope_types[] = {
    [MT_ROPE_SCALING_NONE] = "default",
    [MT_ROPE_SCALING_LINEAR] = "linear",
    [MT_ROPE_SCALING_LLAMA3] = "llama3",
    [MT_ROPE_SCALING_YARN] = "yarn",
};

enum {
    NUM_KEYS = sizeof mt_hf_keys / sizeof *mt_hf_keys,
    NUM_ROPE_KEYS = sizeof mt_rope_keys / sizeof *mt_rope_keys,
    NUM_ROPE_TYPES = sizeof mt_rope_types / sizeof *mt_rope_types,
};

/* Families whose config.json is that of another family, apart from some keys. */
static const struct mt_hf_variant {
    uint64_t family, like;
    int64_t bos, eos, pad; // tokens in a file without these keys
    mt_hf_key keys[8];     // in place of the other family's rows of the same key or option
} mt_hf_variants[] = {
    {MIMO, QWEN2, -1, -1, -1, {{"attention_bias", MIMO, 0, FIXED, "true"}}},
    {SEED_OSS,
     LLAMA,
     0,
     2,
     1,
     {{"num_key_value_heads", SEED_OSS, MT_AT(stack.num_query_groups), REQUIRED | NULLABLE},
      {"head_dim", SEED_OSS, MT_AT(stack.kv_channels), NULLABLE, "128"},
      {"attention_dropout", SEED_OSS, MT_AT(stack.attention_dropout), 0, "0.1"},
      {"residual_dropout", SEED_OSS, MT_AT(stack.hidden_dropout), 0, "0.1"},
      {"attention_bias", SEED_OSS, MT_AT(stack.add_qkv_bias), 0, "true"},
      {"attention_out_bias", SEED_OSS, MT_AT(stack.attention_output_bias), PLAIN, "false"}}},
};
enum {
    NUM_VARIANTS = sizeof mt_hf_variants / sizeof *mt_hf_variants,
    NUM_OWN_KEYS = sizeof mt_hf_variants->keys / sizeof *mt_hf_variants->keys
};

/* The row of a family, or of a mask with it; NULL: none. */
static const struct mt_hf_variant *mt_hf_variant_of(uint64_t mask) {
    for (int i = 0; i < NUM_VARIANTS; i++)
        if (mt_hf_variants[i].family & mask) return &mt_hf_variants[i];
    return NULL;
}

/* A bit for the family, and for the one that it is like. */
static uint64_t mt_hf_mask(mt_hf_family family) {
    uint64_t bit = 1ull << family;
    const struct mt_hf_variant *variant = mt_hf_variant_of(bit);
    return variant ? bit | variant->like : bit;
}

/* True if a row of `keys` belongs to the families (or types) of `mask`, and is not replaced by a key of the variant. */
static bool mt_hf_key_counts(const mt_hf_key *keys, const mt_hf_key *key, uint64_t mask) {
    const struct mt_hf_variant *variant = keys == mt_hf_keys ? mt_hf_variant_of(mask) : NULL;
    if (!(key->families & mask)) return false;
    if (!variant || key->families & variant->family) return true;
    for (const mt_hf_key *own = variant->keys; own < variant->keys + NUM_OWN_KEYS && own->key; own++)
        if ((key->key && strcmp(own->key, key->key) == 0) || (own->offset > 0 && own->offset == key->offset))
            return false;
    return true;
}

/* The key of an option in the files that transformers writes today: the last row that is written. */
static const char *mt_hf_key_name(size_t offset, uint64_t families) {
    const struct mt_hf_variant *variant = mt_hf_variant_of(families);
    for (int i = 0; variant && i < NUM_OWN_KEYS; i++)
        if (variant->keys[i].key && variant->keys[i].offset == offset) return variant->keys[i].key;
    const mt_hf_key *key = mt_hf_keys + NUM_KEYS - 1;
    while (key->offset != offset || !(key->families & families) || key->flags & READ) key--;
    return key->key;
}

/* The key of an option of the model under its own name; false for another option. */
static bool mt_hf_key_of(mt_hf_key *key, char name[80], const mt_option *row) {
    if (!row->name || row->origin == MT_OF_RUN || mt_option_of(row->offset) != row) return false;
    mt_option_key(name, row);
    *key = (mt_hf_key){name, MEGATRON, row->offset, row->type == MT_NO ? OWN | NEGATED : OWN};
    return true;
}

/* ---- reading */

enum { MT_NOTE = 800 };

/* A config.json that is read. Only the first error is kept, so that readers need not check after each key. */
typedef struct mt_config {
    json_t *root;
    json_t *beside; // of a model with a vision tower: the whole file, and root its text model; else NULL
    int tower;      // mt_vision_tower
    bool text_only; // --language-model-only
    const char *path;
    mt_error *error;
    bool failed;
    char note[MT_NOTE]; // for the user, where the file holds something without effect; "": none
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

/* Adds a sentence to the note. */
__attribute__((format(printf, 2, 3))) static void mt_config_note(mt_config *config, const char *format, ...) {
    size_t length = strlen(config->note);
    va_list arguments;
    if (length > 0) length += (size_t)snprintf(config->note + length, sizeof config->note - length, "; ");
    if (length >= sizeof config->note) return;
    va_start(arguments, format);
    vsnprintf(config->note + length, sizeof config->note - length, format, arguments);
    va_end(arguments);
}

/* The value of a key; NULL when it is absent or null. */
static json_t *mt_config_get(const json_t *object, const char *key) {
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

/* A value of another type than its key has: the message names the key and the value. */
static void mt_config_refuse_type(mt_config *config, const char *key, const json_t *value, const char *wanted) {
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    mt_config_fail(config, "\"%s\" must be %s, not %.60s", key, wanted, text ? text : "this");
    free(text);
}

/* Readers of a key by the type of its value; `fallback` where it is absent or null. */
static int64_t mt_config_int(mt_config *config, const json_t *object, const char *key, int64_t fallback) {
    const json_t *value = mt_config_get(object, key);
    if (value && !json_is_integer(value)) mt_config_refuse_type(config, key, value, "a whole number");
    return json_is_integer(value) ? json_integer_value(value) : fallback;
}

static double mt_config_real(mt_config *config, const json_t *object, const char *key, double fallback) {
    const json_t *value = mt_config_get(object, key);
    if (value && !json_is_number(value)) mt_config_refuse_type(config, key, value, "a number");
    return json_is_number(value) ? json_number_value(value) : fallback;
}

static bool mt_config_bool(mt_config *config, const json_t *object, const char *key, bool fallback) {
    const json_t *value = mt_config_get(object, key);
    if (value && !json_is_boolean(value)) mt_config_refuse_type(config, key, value, "true or false");
    return json_is_boolean(value) ? json_is_true(value) : fallback;
}

static json_t *mt_config_list(mt_config *config, const json_t *object, const char *key) {
    json_t *value = mt_config_get(object, key);
    if (value && !json_is_array(value)) mt_config_refuse_type(config, key, value, "a list");
    return json_is_array(value) ? value : NULL;
}

static json_t *mt_config_object(mt_config *config, const json_t *object, const char *key) {
    json_t *value = mt_config_get(object, key);
    if (value && !json_is_object(value)) mt_config_refuse_type(config, key, value, "an object");
    return json_is_object(value) ? value : NULL;
}

static const char *mt_config_string(mt_config *config, const json_t *object, const char *key, const char *fallback) {
    const json_t *value = mt_config_get(object, key);
    if (value && !json_is_string(value)) mt_config_refuse_type(config, key, value, "a string");
    return json_is_string(value) ? json_string_value(value) : fallback;
}

/* A key whose value must be one of the words that are supported. */
static void mt_config_check_fixed(mt_config *config, const mt_hf_key *key, const json_t *value) {
    char *text = json_dumps(value, JSON_ENCODE_ANY);
    bool is_flag = *key->absent == 't' || *key->absent == 'f', is_number = *key->absent >= '0' && *key->absent <= '9';
    if (is_flag && !json_is_boolean(value))
        mt_config_refuse_type(config, key->key, value, "true or false");
    else if (is_number && !json_is_number(value))
        mt_config_refuse_type(config, key->key, value, "a number");
    else if (mt_choice_index(key->absent, json_is_string(value) ? json_string_value(value) : text) < 0)
        mt_config_fail(config, "\"%s\": %.40s is not supported; %s is", key->key, text, key->absent);
    free(text);
}

/* Sets the option of the activation that a key names. */
static void mt_config_set_activation(mt_config *config, const mt_hf_key *key, const json_t *value, mt_options *shape) {
    char supported[200] = "", *text = json_dumps(value, JSON_ENCODE_ANY);
    bool found = false;
    for (const mt_activation_row *row = mt_activation_rows; row < mt_activation_rows + MT_NUM_ACTIVATIONS; row++) {
        if (row->gated != ((key->flags & GATED_ACTIVATION) != 0)) continue;
        size_t end = strlen(supported);
        snprintf(supported + end, sizeof supported - end, "%s%s", end ? "|" : "", row->config_names);
        if (!json_is_string(value) || mt_choice_index(row->config_names, json_string_value(value)) < 0) continue;
        found = true;
        if (row->field) *(bool *)((char *)shape + row->field) = true;
    }
    if (!found) mt_config_fail(config, "\"%s\": %.40s is not supported; %s is", key->key, text, supported);
    free(text);
}

/* The value of an option that is a number. */
static double mt_option_number(const mt_run_options *shape, const mt_option *row) {
    return row->type == MT_INT ? (double)*mt_option_int(shape, row) : *mt_option_real(shape, row);
}

/* Sets the option of a key; the table of options says its type and range. */
static void mt_config_set(mt_config *config, const mt_hf_key *key, const json_t *value, mt_run_options *shape) {
    mt_error problem;
    const mt_option *row = key->flags & PLAIN ? NULL : mt_option_of(key->offset);
    mt_option_type type = row ? row->type : MT_FLAG;
    bool is_int = type == MT_INT, is_real = type == MT_REAL || type == MT_REALS,
         is_text = type == MT_CHOICE || type == MT_STRING;
    double before = key->flags & SAME ? mt_option_number(shape, row) : 0;
    if (is_text ? !json_is_string(value) : is_int ? !json_is_integer(value) : is_real && !json_is_number(value))
        mt_config_refuse_type(config, key->key, value, is_text ? "a string" : is_int ? "a whole number" : "a number");
    else if (is_text && mt_option_set(shape, row, json_string_value(value), key->key, &problem))
        mt_config_fail(config, "%s", problem.text);
    else if (is_int)
        *mt_option_int(shape, row) = json_integer_value(value);
    else if (is_real)
        *mt_option_real(shape, row) = json_number_value(value);
    else if (!is_text && !json_is_boolean(value))
        mt_config_refuse_type(config, key->key, value, "true or false");
    else if (!is_text)
        *(bool *)((char *)shape + key->offset) = json_is_true(value) != ((key->flags & NEGATED) != 0);
    if ((is_int || is_real) && !(key->flags & OWN) && !mt_option_in_range(row, json_number_value(value)))
        mt_config_fail(config, "\"%s\" is %g, must be in %s", key->key, json_number_value(value), row->values);
    if (key->flags & SAME && mt_option_number(shape, row) != before)
        mt_config_fail(config, "\"%s\" and \"%s\" differ; one --%s is supported: make them equal", key[-1].key,
                       key->key, row->name);
    if (!config->failed && key->conversion && key->conversion->read) key->conversion->read(&shape->stack);
}

/* The value of a key that is null: no value if the file may say so, false for a flag, and an error where a file without
 * the key has a default. */
static json_t *mt_config_null(mt_config *config, const mt_hf_key *key) {
    const mt_option *row = key->flags & (PLAIN | FIXED) ? NULL : mt_option_of(key->offset);
    bool is_word = key->flags & (PLAIN_ACTIVATION | GATED_ACTIVATION);
    bool is_flag = key->flags & PLAIN || (row && !is_word && (row->type == MT_FLAG || row->type == MT_NO));
    if (key->flags & FIXED && key->absent) is_flag = *key->absent == 't' || *key->absent == 'f';
    if (is_flag) return json_false();
    if (key->absent && strcmp(key->absent, "null") != 0)
        mt_config_fail(config, "\"%s\" is null; give a value, or leave the key out for %s", key->key, key->absent);
    return NULL;
}

/* Two keys of the file that stand for one thing must agree. */
static void mt_config_compare(mt_config *config, const json_t *object, const char *key, const char *other) {
    const json_t *value = mt_config_get(object, key), *also = mt_config_get(object, other);
    bool are_numbers = json_is_number(value) && json_is_number(also);
    if (!value || !also || json_equal(value, also)) return;
    if (are_numbers && json_number_value(value) == json_number_value(also)) return;
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY),
         *beside = json_dumps(also, JSON_COMPACT | JSON_ENCODE_ANY);
    mt_config_fail(config,
                   "\"%s\" is %.60s and \"%s\" %.60s, two names of one thing; make them agree, or leave one out", key,
                   text ? text : "", other, beside ? beside : "");
    free(text), free(beside);
}

/* Compares a key with those above it of the same option. */
static void mt_config_compare_names(mt_config *config, const json_t *object, const mt_hf_key *keys,
                                    const mt_hf_key *key, uint64_t mask) {
    unsigned words = FIXED | PLAIN_ACTIVATION | GATED_ACTIVATION, others = SAME | REPLACES; // no option; other rules
    for (const mt_hf_key *above = keys; above < key; above++) {
        bool is_same = above->key && mt_hf_key_counts(keys, above, mask) && above->offset == key->offset;
        if (is_same && !(above->flags & (words | WRITE)) && !(key->flags & (words | others)) &&
            (above->flags & PLAIN) == (key->flags & PLAIN) && strcmp(above->key, key->key) != 0)
            mt_config_compare(config, object, above->key, key->key);
    }
}

/* The keys of `object` that the families (or types) of `mask` have. */
static void mt_config_read_keys(mt_config *config, const json_t *object, const mt_hf_key *keys, size_t count,
                                uint64_t mask, mt_run_options *shape) {
    for (const mt_hf_key *key = keys; key < keys + count; key++) {
        json_t *value = key->key ? json_object_get(object, key->key) : NULL, *absent = NULL;
        if (!mt_hf_key_counts(keys, key, mask) || key->flags & WRITE) continue;
        if (value && !json_is_null(value)) mt_config_compare_names(config, object, keys, key, mask);
        if (json_is_null(value) && key->flags & (NULLABLE | NULL_IS_ZERO)) continue;
        if (json_is_null(value)) value = mt_config_null(config, key);
        if (value && key->flags & FIXED) mt_config_check_fixed(config, key, value);
        if (!value && key->flags & FIXED && key->flags & REQUIRED)
            mt_config_fail(config, "\"%s\" is missing, which means another value than %s, the only one supported",
                           key->key, key->absent);
        if (key->flags & FIXED) continue;
        if (!value && key->absent) value = absent = json_loads(key->absent, JSON_DECODE_ANY, NULL);
        if (value && key->flags & (PLAIN_ACTIVATION | GATED_ACTIVATION))
            mt_config_set_activation(config, key, value, &shape->stack);
        else if (value)
            mt_config_set(config, key, value, shape);
        else if (key->flags & REQUIRED)
            mt_config_fail(config, "\"%s\" is missing", key->key);
        json_decref(absent);
    }
}

/* A key whose object or effect depends on other keys. */
static void mt_config_read_later(mt_config *config, const json_t *object, const char *name, uint64_t mask,
                                 mt_run_options *shape) {
    for (const mt_hf_key *row = mt_hf_keys; row < mt_hf_keys + NUM_KEYS; row++) {
        if (!row->key || strcmp(row->key, name) != 0 || !(row->flags & WRITE)) continue;
        if (!mt_hf_key_counts(mt_hf_keys, row, mask)) continue;
        mt_hf_key key = *row;
        key.flags &= ~(unsigned)WRITE;
        mt_config_read_keys(config, object, &key, 1, mask, shape);
    }
}

/* Tokens that begin, end and pad texts in files of a family without these keys. */
static const struct {
    uint64_t families;
    int64_t bos, eos, pad;
} mt_hf_tokens[] = {
    {GPT2, 50256, 50256, -1},
    {LLAMA | MISTRAL | MIXTRAL, 1, 2, -1},
    {KIMI_LINEAR, 163584, 163586, 163839},
    {LATENT, 0, 1, -1},
    {GEMMA3, 2, 1, 0},
    {SMOLLM3, 128000, 128001, 128004},
    {OLMO3, -1, 50279, 1},
    {EXAONE4, 0, 2, -1},
    {NEMOTRON_H, 1, 2, 0},
    {GRANITE, 1, 2, -1},
    {EXAONE_MOE, 1, 53, 0},
    {MINISTRAL3, 1, 2, 11},
    {ERNIE4_5_MOE, 1, 2, 0},
    {MINIMAX_M2, 200034, 200020, -1},
    {LFM2, 1, 2, 0},
    {MIMO_V2_FLASH, 1, -1, -1},
    {T5, -1, 1, 0},
    {ALL, -1, -1, -1},
};

/* A token id that was checked, or the first of a list; -1 if there is none or the vocabulary does not hold it. */
static int64_t mt_config_token(const mt_config *config, const char *key, int64_t absent, int64_t vocab_size) {
    const json_t *value = json_object_get(config->root, key);
    if (json_is_array(value)) value = json_array_get(value, 0);
    int64_t token = json_is_integer(value) ? json_integer_value(value) : -1;
    if (!json_object_get(config->root, key)) token = absent;
    return token >= 0 && token < vocab_size ? token : -1;
}

static void mt_config_read_tokens(mt_config *config, uint64_t mask, mt_run_options *shape) {
    mt_error problem;
    const struct mt_hf_variant *variant = mt_hf_variant_of(mask);
    size_t row = 0;
    while (!(mt_hf_tokens[row].families & mask)) row++;
    int64_t bos = variant ? variant->bos : mt_hf_tokens[row].bos, eos = variant ? variant->eos : mt_hf_tokens[row].eos;
    int64_t absent_pad = variant ? variant->pad : mt_hf_tokens[row].pad;
    if (!config->failed && mt_special_tokens_check(config->root, config->path, &problem) != 0)
        config->failed = true, *config->error = problem;
    shape->bos_token_id = mt_config_token(config, "bos_token_id", bos, shape->stack.vocab_size);
    shape->eos_token_id = mt_config_token(config, "eos_token_id", eos, shape->stack.vocab_size);
    int64_t pad = mt_config_token(config, "pad_token_id", absent_pad, shape->stack.vocab_size);
    if (pad >= 0 && !json_object_get(config->root, "pad_token_id")) mt_json_set_int(config->root, "pad_token_id", pad);
    mt_special_tokens_take(shape, config->root);
}

/* A type of RoPE's scaling as mt_rope_scaling; -1: not in the table. */
static int mt_config_rope_type(mt_config *config, const char *type) {
    char supported[100] = "";
    for (int i = 0; i < NUM_ROPE_TYPES; i++) {
        size_t end = strlen(supported);
        if (strcmp(type, mt_rope_types[i]) == 0) return i;
        const char *before = i == 0 ? "" : i + 1 < NUM_ROPE_TYPES ? ", " : " and ";
        snprintf(supported + end, sizeof supported - end, "%s%s", before, mt_rope_types[i]);
    }
    mt_config_fail(config, "RoPE of type \"%.40s\" is not supported; %s are", type, supported);
    return -1;
}

/* RoPE's parameters of families whose layers with a window have their own: rope_parameters has an object for each type
 * of layer, and rope_scaling replaces keys of the full layers' object, as in transformers 5, which reads no others. */
static json_t *mt_config_rope_by_type(mt_config *config, uint64_t mask, json_t *newer, json_t *older,
                                      const json_t **window) {
    const char *key;
    json_t *value, *full = mt_config_object(config, newer, "full_attention");
    *window = mt_config_object(config, newer, "sliding_attention");
    json_object_foreach(newer, key, value) {
        bool is_type = strcmp(key, "full_attention") == 0 || strcmp(key, "sliding_attention") == 0;
        const char *word = json_string_value(value);
        bool is_default = strcmp(key, "rope_type") == 0 && word && strcmp(word, "default") == 0;
        if (strcmp(key, "rope_theta") == 0) is_default = json_number_value(value) == (mask & GEMMA3 ? 1e6 : 5e5);
        if (!is_type && !is_default)
            mt_config_fail(config,
                           "\"rope_parameters\" holds \"%.60s\", which has no effect in this family; write it into its "
                           "objects \"full_attention\" and \"sliding_attention\"",
                           key);
    }
    if (mt_config_get(older, "type") && !mt_config_get(older, "rope_type"))
        mt_config_fail(config, "\"rope_scaling\" has a \"type\", which transformers 5 does not read in this family; "
                               "rename it to \"rope_type\"");
    if (full && older) json_object_update(full, older);
    return full ? full : older;
}

/* The object of RoPE's parameters: rope_parameters, or rope_scaling, which older files have beside rope_theta and which
 * replaces rope_parameters as a whole, as in transformers 5. *window: that of layers with a window, if it has its own.
 */
static const json_t *mt_config_rope_object(mt_config *config, uint64_t mask, const json_t **window) {
    json_t *newer = mt_config_object(config, config->root, "rope_parameters");
    json_t *older = mt_config_object(config, config->root, "rope_scaling"), *value;
    const char *key;
    const json_t *rope = json_object_size(older) > 0 ? older : newer;
    const json_t *base = rope == older ? mt_config_get(newer, "rope_theta") : NULL;
    if (base && !mt_config_get(rope, "rope_theta") && !mt_config_get(config->root, "rope_theta"))
        mt_config_note(
            config,
            "\"rope_scaling\" replaces \"rope_parameters\", as in transformers 5, so that its \"rope_theta\" %g is "
            "unused; write it into \"rope_scaling\" too",
            json_number_value(base));
    *window = NULL;
    if (mask & ROPE_BY_TYPE) rope = mt_config_rope_by_type(config, mask, newer, older, window);
    mt_config_compare(config, rope, "rope_type", "type");
    json_object_foreach((json_t *)rope, key, value) {
        if (json_is_null(value) && mt_choice_index("rope_theta|rope_type", key) >= 0)
            mt_config_fail(config, "\"%s\" of RoPE's parameters is null; give a value or leave the key out", key);
        if (json_is_object(value))
            mt_config_fail(config, "RoPE with parameters of its own for \"%.60s\" is not supported", key);
    }
    return rope;
}

/* RoPE of layers with a window: a base of their own, and no scaling. Files of Gemma 3 may have the base beside the
 * object. OLMo 3's have 500000 where the object has none; a base of all layers beside it is theirs in transformers 4
 * only. */
static void mt_config_read_window_rope(mt_config *config, const json_t *window, uint64_t mask, mt_options *shape) {
    if (!(mask & ROPE_BY_TYPE)) return;
    const char *older = mt_config_string(config, window, "type", "default");
    const char *type = mt_config_string(config, window, "rope_type", older);
    bool gemma = mask & GEMMA3;
    const char *local = gemma ? "rope_local_base_freq" : "swa_rope_theta";
    double beside = mask & OLMO3 ? 500000 : mt_config_real(config, config->root, local, 10000);
    double base = mt_config_real(config, window, "rope_theta", beside);
    double all = mt_config_real(config, config->root, "rope_theta", beside);
    double part = mt_config_real(config, window, "partial_rotary_factor", shape->rotary_percent);
    if (part != shape->rotary_percent)
        mt_config_fail(config,
                       "\"partial_rotary_factor\" is %g in layers with a window and %g in others; make them equal",
                       part, shape->rotary_percent);
    if (mask & OLMO3 && !mt_config_get(window, "rope_theta") && all != beside)
        mt_config_fail(config,
                       "\"rope_theta\" is %g, which layers with a window have in transformers 4 and not in 5; write "
                       "it into \"full_attention\" and \"sliding_attention\" of \"rope_parameters\"",
                       all);
    if (base <= 0) mt_config_fail(config, "RoPE of layers with a window has a base of %g, must be above 0", base);
    if (type && strcmp(type, "default") != 0)
        mt_config_fail(config, "RoPE of type \"%.40s\" in layers with a window is not supported", type);
    bool same = base == shape->rotary_base && shape->rope_scaling_type == MT_ROPE_SCALING_NONE;
    shape->window_rotary_base = same ? 0 : base;
}

/* The context before its extension. A value beside the object wins, except where types of layers have objects. */
static void mt_config_read_original_context(mt_config *config, const json_t *rope, int type, mt_options *shape) {
    static const char key[] = "original_max_position_embeddings";
    uint64_t mask = mt_hf_mask(shape->hf_family);
    int64_t inside = mt_config_int(config, rope, key, shape->max_position_embeddings);
    int64_t beside = mt_config_int(config, config->root, key, inside);
    if (type == MT_ROPE_SCALING_LINEAR) return;
    if (beside < 1) mt_config_fail(config, "\"%s\" is %lld, must be positive", key, (long long)beside);
    if (mask & ROPE_BY_TYPE && beside != inside)
        mt_config_fail(config,
                       "\"%s\" has no effect beside \"rope_parameters\" in this family; write it into its "
                       "\"full_attention\"",
                       key);
    shape->original_max_position_embeddings = beside;
}

/* RoPE of a gpt-oss whose file does not say it. */
static json_t *mt_gpt_oss_rope(void) {
    return json_pack("{s:s, s:f, s:f, s:f, s:b, s:i}", "rope_type", "yarn", "factor", 32.0, "beta_fast", 32.0,
                     "beta_slow", 1.0, "truncate", 0, "original_max_position_embeddings", 4096);
}

/* The part of a head's channels with RoPE. MiniMax-M2's released files have it as a number of channels. */
static void mt_config_read_partial_rope(mt_config *config, const json_t *rope, uint64_t mask, mt_run_options *shape) {
    static const char key[] = "partial_rotary_factor";
    int64_t heads = mt_max(shape->stack.num_attention_heads, 1);
    int64_t channels = mask & MINIMAX_M2 ? mt_config_int(config, config->root, "rotary_dim", 0) : 0;
    double beside = mt_config_real(config, config->root, key, 1), inside = mt_config_real(config, rope, key, beside);
    if (!(mask & PARTIAL)) {
        if (inside != 1) mt_config_fail(config, "\"%s\" other than 1 is not supported", key);
        return;
    }
    mt_config_read_later(config, mt_config_get(rope, key) ? rope : config->root, key, mask, shape);
    int64_t all = shape->stack.kv_channels > 0 ? shape->stack.kv_channels : shape->stack.hidden_size / heads;
    if (channels == 0) return;
    if (channels < 2 || channels > all)
        mt_config_fail(config, "\"rotary_dim\" is %lld, must be from 2 to \"head_dim\" %lld", (long long)channels,
                       (long long)all);
    double part = (double)channels / (double)mt_max(all, 1);
    bool gives_part = mt_config_get(rope, key) || mt_config_get(config->root, key);
    if (gives_part && (int64_t)((double)all * shape->stack.rotary_percent) != channels)
        mt_config_fail(
            config,
            "\"rotary_dim\" is %lld and \"%s\" %g of %lld channels, two names of one thing; make them agree, "
            "or leave one out",
            (long long)channels, key, shape->stack.rotary_percent, (long long)all);
    if (!gives_part) shape->stack.rotary_percent = part;
}

/* RoPE of Ministral 3 where a file has no parameters. */
static const char mt_ministral_rope[] =
    "{\"rope_type\": \"yarn\", \"rope_theta\": 1000000.0, \"factor\": 16.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, "
    "\"original_max_position_embeddings\": 16384, \"mscale\": 1.0, \"mscale_all_dim\": 1.0, "
    "\"llama_4_scaling_beta\": 0.1}";

/* The scale of queries by their position, after RoPE's other parameters: it counts contexts before their extension. */
static void mt_config_read_query_scale(mt_config *config, const json_t *rope, uint64_t mask, mt_options *shape) {
    static const char key[] = "llama_4_scaling_beta";
    double beta = mt_config_real(config, rope, key, 0);
    if (!(mask & MINISTRAL3)) {
        if (beta != 0) mt_config_fail(config, "\"%s\" is supported in \"model_type\" ministral3 only", key);
        return;
    }
    if (!mt_config_get(rope, key)) mt_config_fail(config, "\"%s\" is missing in \"rope_parameters\"", key);
    if (beta < 0) mt_config_fail(config, "\"%s\" is %g, must be at least 0", key, beta);
    if (beta > 0 && shape->original_max_position_embeddings == 0)
        mt_config_fail(config, "\"%s\" needs RoPE of type yarn or llama3", key);
    shape->llama_4_scaling_beta = beta;
}

static void mt_config_read_rope(mt_config *config, mt_run_options *shape) {
    uint64_t mask = mt_hf_mask(shape->stack.hf_family);
    if (mask & GPT_OSS && !mt_config_get(config->root, "rope_parameters")) // as in transformers
        json_object_set_new(config->root, "rope_parameters", mt_gpt_oss_rope());
    const json_t *window, *rope = mt_config_rope_object(config, mask, &window);
    json_t *absent = mask & MINISTRAL3 && json_object_size(rope) == 0 ? json_loads(mt_ministral_rope, 0, NULL) : NULL;
    if (absent) rope = absent;
    double inside = mt_config_real(config, rope, "rope_theta", 0);
    double beside = mt_config_real(config, config->root, "rope_theta", inside);
    if (inside != 0 && inside != beside)
        mt_config_note(config,
                       "\"rope_theta\" %g has no effect, as in transformers 5: RoPE's parameters have their own, %g; "
                       "leave one out",
                       beside, inside);
    mt_config_read_later(config, mt_config_get(rope, "rope_theta") ? rope : config->root, "rope_theta", mask, shape);
    const char *older = mt_config_string(config, rope, "type", "default");
    const char *type = mt_config_string(config, rope, "rope_type", older);
    int index = mt_config_rope_type(config, type);
    mt_config_read_partial_rope(config, rope, mask, shape);
    if (index > 0) {
        shape->stack.rope_scaling_type = (mt_rope_scaling)index;
        if (!mt_config_get(rope, "factor")) mt_config_fail(config, "RoPE of type \"%s\" needs a \"factor\"", type);
        mt_config_read_keys(config, rope, mt_rope_keys, NUM_ROPE_KEYS, 1u << index, shape);
        mt_config_read_original_context(config, rope, index, &shape->stack);
    }
    mt_config_read_query_scale(config, rope, mask, &shape->stack);
    mt_config_read_window_rope(config, window, mask, &shape->stack);
    json_decref(absent);
}

/* Sets `letters` [num_layers] to the layers that layer_types says to have a sliding window, '1'; false without that
 * list. */
static bool mt_config_read_layer_types(mt_config *config, char *letters, int64_t num_layers) {
    const json_t *types = mt_config_list(config, config->root, "layer_types");
    if (!types) return false;
    if ((int64_t)json_array_size(types) != num_layers)
        mt_config_fail(config, "\"layer_types\" must list %lld layers", (long long)num_layers);
    for (size_t i = 0; i < json_array_size(types) && (int64_t)i < num_layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || mt_choice_index("full_attention|sliding_attention", type) < 0)
            mt_config_fail(config, "\"layer_types\" holds %.40s; full_attention and sliding_attention are supported",
                           type ? type : "values other than strings");
        else
            letters[i] = *type == 's' ? '1' : '0';
    }
    return true;
}

/* Layer i has a window where no list says it, as in transformers 5. Qwen: layers from max_window_layers on; in
 * Qwen2-MoE every second one before; in Qwen3-MoE all, whatever a list says. Gemma 3, OLMo 3, EXAONE: all but every
 * sliding_window_pattern-th. gpt-oss: every second one from the first on. */
static bool mt_config_slides(mt_config *config, uint64_t mask, int64_t i) {
    bool counts = mask & (QWENS | DOTS1) && !(mask & QWEN3_MOE), has_pattern = mask & (GEMMA3 | EXAONES);
    int64_t first = counts ? mt_config_int(config, config->root, "max_window_layers", mask & DOTS1 ? 62 : 28) : 0;
    int64_t pattern = mask & GEMMA3 ? 6 : 4;
    if (has_pattern) pattern = mt_config_int(config, config->root, "sliding_window_pattern", pattern);
    if (pattern < 1) mt_config_fail(config, "\"sliding_window_pattern\" is %lld, must be positive", (long long)pattern);
    if (mask & (WINDOWED | EXAONES)) return pattern > 0 && (i + 1) % pattern != 0;
    if (mask & QWEN2_MOE) return i < first && i % 2 == 0;
    if (mask & GPT_OSS) return i % 2 == 0;
    if (mask & MIMO_V2_FLASH) return i > 0 && (i + 1) % 6 != 0;
    return counts ? i >= first : true;
}

/* EXAONE with a window: RoPE in the layers that have it, none in the others. */
static void mt_config_take_rope_of_windows(mt_config *config, const char *letters, mt_run_options *shape) {
    if (!strchr(letters, '1'))
        mt_config_fail(config, "a \"sliding_window\" that no layer has leaves the model without RoPE, which is not "
                               "supported; set it to null for RoPE in all layers");
    free(shape->no_rope_freq);
    shape->no_rope_freq = strchr(letters, '0') ? mt_layer_freq_print(letters, MT_ROPE_LAYERS) : NULL;
}

/* The sliding window and the layers that have it. Mistral and Mixtral: all, and a list that says otherwise is of
 * another model; Qwen and SmolLM3: only with use_sliding_window. */
static void mt_config_read_windows(mt_config *config, uint64_t mask, mt_run_options *shape) {
    bool uses = mt_config_bool(config, config->root, "use_sliding_window", false) || !(mask & (QWENS | SMOLLM3));
    if (config->failed || shape->stack.num_layers < 1) return;
    char *listed = mt_calloc(shape->stack.num_layers + 1), *letters = mt_calloc(shape->stack.num_layers + 1);
    bool lists = mt_config_read_layer_types(config, listed, shape->stack.num_layers);
    if (uses)
        mt_config_read_later(config, config->root, "sliding_window", mask, shape);
    else // any number: transformers 5 writes 0 for Qwen2-MoE
        mt_config_int(config, config->root, "sliding_window", 0);
    if (!uses) shape->stack.window_size = 0;
    if (mask & (QWENS | DOTS1)) mt_config_int(config, config->root, "max_window_layers", 0); // its type always counts
    bool compares = mask & (MISTRALS | MIXTRAL | QWEN3_MOE);          // a list, with the layers of the family
    bool asks = shape->stack.window_size > 0 && (!lists || compares); // a pattern beside a list has no effect
    for (int64_t i = 0; i < shape->stack.num_layers; i++)
        letters[i] = asks && mt_config_slides(config, mask, i) ? '1' : '0';
    if (lists && strchr(listed, '1') && shape->stack.window_size == 0)
        mt_config_fail(config,
                       "\"layer_types\" holds sliding_attention without a window; %sgive a \"sliding_window\", or list "
                       "full_attention",
                       mask & (QWENS | SMOLLM3) ? "set \"use_sliding_window\" to true and " : "");
    else if (lists && compares && strcmp(listed, letters) != 0)
        mt_config_fail(config,
                       "\"layer_types\" lists other layers with a sliding window than this family has, which is "
                       "all of them with a \"sliding_window\"; make them agree");
    int64_t pattern = asks && mask & GEMMA3 ? mt_config_int(config, config->root, "sliding_window_pattern", 6) : 0;
    if (pattern > 0 && mt_config_int(config, config->root, "_sliding_window_pattern", pattern) != pattern)
        mt_config_fail(config, "\"_sliding_window_pattern\" is read by nothing; give \"layer_types\", or name it "
                               "\"sliding_window_pattern\"");
    if (lists && shape->stack.window_size > 0) memcpy(letters, listed, (size_t)shape->stack.num_layers);
    if (mask & EXAONES && shape->stack.window_size > 0) mt_config_take_rope_of_windows(config, letters, shape);
    if (!strchr(letters, '1')) shape->stack.window_size = 0, shape->stack.window_rotary_base = 0;
    if (strchr(letters, '1') && strchr(letters, '0')) {
        free(shape->window_attn_skip_freq);
        shape->window_attn_skip_freq = mt_layer_freq_print(letters, MT_WINDOW_LAYERS);
    }
    free(listed), free(letters);
}

/* True if full_attn_idxs, or its absence, gives a layer of LFM2 attention. */
static bool mt_config_attends(mt_config *config, int64_t layer) {
    const json_t *layers = mt_config_list(config, config->root, "full_attn_idxs"), *value;
    size_t i;
    bool found = !layers;
    json_array_foreach(layers, i, value) {
        if (!json_is_integer(value))
            mt_config_refuse_type(config, "full_attn_idxs", layers, "a list of layers' numbers");
        found |= json_integer_value(value) == layer;
    }
    return found;
}

/* The width of LFM2's MLP, which a file may have before a reduction that transformers computes. */
static void mt_config_read_adjusted_width(mt_config *config, mt_options *shape) {
    bool adjusts = mt_config_bool(config, config->root, "block_auto_adjust_ff_dim", true);
    double factor = mt_config_real(config, config->root, "block_ffn_dim_multiplier", 1);
    int64_t multiple = mt_config_int(config, config->root, "block_multiple_of", 256);
    if (config->failed || !adjusts) return;
    if (multiple < 1 || multiple > 16777216)
        mt_config_fail(config, "\"block_multiple_of\" is %lld, must be in [1,16777216]", (long long)multiple);
    if (!(factor > 0 && factor <= 1024))
        mt_config_fail(config, "\"block_ffn_dim_multiplier\" is %g, must be in (0,1024]", factor);
    if (config->failed) return;
    bool multiplies = !json_is_null(json_object_get(config->root, "block_ffn_dim_multiplier"));
    shape->ffn_hidden_size = 2 * shape->ffn_hidden_size / 3;
    if (multiplies)
        shape->ffn_hidden_size =
            ((int64_t)(factor * (double)shape->ffn_hidden_size) + multiple - 1) / multiple * multiple;
}

/* Layers with a gated delta net: a list, or all but every full_attention_interval-th. Layers with a short convolution:
 * a list, or all but those of full_attn_idxs. Granite's with Mamba-2: a list, or all. */
static void mt_config_read_linear_layers(mt_config *config, uint64_t mask, mt_run_options *shape) {
    const char *word = mask & LFM2 ? "conv" : "linear_attention";
    const char *words = mask & LFM2      ? "full_attention|conv"
                        : mask & GRANITE ? "full_attention|linear_attention|attention|mamba" // before transformers 5
                                         : "full_attention|linear_attention";
    const char *key =
        mt_config_get(config->root, "layer_types") || !(mask & GRANITE) ? "layer_types" : "layers_block_type";
    const json_t *types = mt_config_list(config, config->root, key);
    if (mask & GRANITE) mt_config_compare(config, config->root, "layer_types", "layers_block_type");
    int64_t every = mask & GRANITE ? INT64_MAX : mt_config_int(config, config->root, "full_attention_interval", 4);
    if (config->failed || shape->stack.num_layers < 1) return;
    if (every < 1) mt_config_fail(config, "\"full_attention_interval\" is %lld, must be positive", (long long)every);
    if (types && (int64_t)json_array_size(types) != shape->stack.num_layers)
        mt_config_fail(config, "\"layer_types\" must list %lld layers", (long long)shape->stack.num_layers);
    if (config->failed) return;
    char *letters = mt_calloc(shape->stack.num_layers + 1);
    for (int64_t i = 0; i < shape->stack.num_layers; i++) {
        const char *type = types ? json_string_value(json_array_get(types, (size_t)i)) : NULL;
        bool replaced = mask & LFM2 ? !mt_config_attends(config, i) : (i + 1) % every != 0;
        letters[i] = (type ? strcmp(type, word) == 0 : replaced) ? '1' : '0';
        if (mask & GRANITE && type && strcmp(type, "mamba") == 0) letters[i] = '1';
        if (mask & LFM2 && type && mt_config_get(config->root, "full_attn_idxs") && replaced != (letters[i] == '1'))
            mt_config_fail(config,
                           "\"layer_types\" and \"full_attn_idxs\" differ in layer %lld, the first being 0; make them "
                           "agree, or leave one out",
                           (long long)i);
        if (types && (!type || mt_choice_index(words, type) < 0))
            mt_config_fail(config, "\"layer_types\" holds %.40s; full_attention and %s are supported",
                           type ? type : "values other than strings", word);
    }
    if (!strchr(letters, '1')) mt_config_fail(config, "\"layer_types\" lists no layer of %s", word);
    free(shape->linear_attention_freq);
    shape->linear_attention_freq = mt_layer_freq_print(letters, MT_LINEAR_LAYERS);
    free(letters);
}

/* A size of Kimi delta attention: of "linear_attn_config", else of `key`. */
static int64_t mt_config_kda_size(mt_config *config, const char *inner, const char *key, int64_t fallback,
                                  int64_t most) {
    const json_t *linear = mt_config_object(config, config->root, "linear_attn_config");
    int64_t outer = mt_config_int(config, config->root, key, fallback);
    int64_t size = linear ? mt_config_int(config, linear, inner, outer) : outer;
    if (!config->failed && mt_config_get(config->root, key) && size != outer)
        mt_config_fail(config,
                       "\"%s\" of \"linear_attn_config\" is %lld and \"%s\" %lld, two names of one thing; make them "
                       "agree, or leave one out",
                       inner, (long long)size, key, (long long)outer);
    if (!config->failed && (size < 1 || size > most))
        mt_config_fail(config, "\"%s\" is %lld, must be in [1,%lld]", linear ? inner : key, (long long)size,
                       (long long)most);
    return size;
}

/* A list of numbers of layers, the first being 1; NULL: none. */
static void mt_config_check_numbers(mt_config *config, const char *key, const json_t *list, int64_t num_layers) {
    int64_t number;
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!mt_json_int(json_array_get(list, i), 1, num_layers, &number))
            mt_config_fail(config, "\"%s\" must hold numbers of layers, from 1 to %lld", key, (long long)num_layers);
}

/* Kimi delta attention: its sizes, and its layers: a list of all, or the numbers of these, or all but every fourth
 * behind the first. Numbers begin with 1. */
static void mt_config_read_kda(mt_config *config, mt_run_options *shape) {
    const json_t *linear = mt_config_object(config, config->root, "linear_attn_config");
    const json_t *types = mt_config_list(config, config->root, "layer_types");
    const json_t *numbers = linear ? mt_config_list(config, linear, "kda_layers") : NULL;
    const json_t *full = linear ? mt_config_list(config, linear, "full_attn_layers") : NULL;
    int64_t heads = mt_config_kda_size(config, "num_heads", "linear_num_heads", 32, 65536);
    int64_t channels = mt_config_kda_size(config, "head_dim", "linear_head_dim", 128, 4096);
    shape->stack.linear_conv_kernel_dim =
        mt_config_kda_size(config, "short_conv_kernel_size", "linear_conv_kernel_dim", 4, MT_MAX_TAPS);
    shape->stack.linear_num_key_heads = shape->stack.linear_num_value_heads = heads;
    shape->stack.linear_key_head_dim = shape->stack.linear_value_head_dim = channels;
    if (config->failed || shape->stack.num_layers < 1) return;
    if (types && (int64_t)json_array_size(types) != shape->stack.num_layers)
        mt_config_fail(config, "\"layer_types\" must list %lld layers", (long long)shape->stack.num_layers);
    if (config->failed) return;
    char *letters = mt_calloc(shape->stack.num_layers + 1);
    bool by_number = !types && numbers && full;
    mt_config_check_numbers(config, "kda_layers", numbers, shape->stack.num_layers);
    mt_config_check_numbers(config, "full_attn_layers", full, shape->stack.num_layers);
    for (int k = 0; k < 2 && types && numbers && full; k++)
        for (size_t i = 0; i < json_array_size(k ? numbers : full); i++) {
            int64_t number = json_integer_value(json_array_get(k ? numbers : full, i));
            const char *type = number >= 1 ? json_string_value(json_array_get(types, (size_t)number - 1)) : NULL;
            if (type && (strcmp(type, "linear_attention") == 0) != (k == 1))
                mt_config_fail(
                    config,
                    "\"layer_types\" and \"linear_attn_config\" differ in layer %lld, the first being 1; make "
                    "them agree, or leave one out",
                    (long long)number);
        }
    memset(letters, by_number ? '?' : '0', (size_t)shape->stack.num_layers);
    for (int64_t i = 0; i < shape->stack.num_layers && !by_number; i++) {
        const char *type = types ? json_string_value(json_array_get(types, (size_t)i)) : NULL;
        letters[i] = (type ? strcmp(type, "linear_attention") == 0 : i == 0 || i % 4 != 0) ? '1' : '0';
        if (types && (!type || mt_choice_index("full_attention|linear_attention", type) < 0))
            mt_config_fail(config, "\"layer_types\" holds %.40s; full_attention and linear_attention are supported",
                           type ? type : "values other than strings");
    }
    for (int k = 0; k < 2 && by_number; k++)
        for (size_t i = 0; i < json_array_size(k ? numbers : full); i++) {
            int64_t number = json_integer_value(json_array_get(k ? numbers : full, i));
            if (number < 1 || number > shape->stack.num_layers) continue;
            if (letters[number - 1] != '?')
                mt_config_fail(config, "layer %lld stands twice in \"kda_layers\" and \"full_attn_layers\"",
                               (long long)number);
            letters[number - 1] = k ? '1' : '0';
        }
    if (strchr(letters, '?'))
        mt_config_fail(config, "layer %lld is in neither \"kda_layers\" nor \"full_attn_layers\"",
                       (long long)(strchr(letters, '?') - letters + 1));
    if (!strchr(letters, '1')) mt_config_fail(config, "no layer has Kimi delta attention");
    free(shape->linear_attention_freq);
    shape->linear_attention_freq = mt_layer_freq_print(letters, MT_LINEAR_LAYERS);
    free(letters);
}

/* Types of layers with one half, as in config.json, and their letters. */
static const struct {
    const char *names; // of transformers 5, then before
    char letter;
} mt_half_layers[] = {{"linear_attention|mamba", 'M'}, {"full_attention|attention", '*'}, {"moe", 'E'}, {"mlp", '-'}};

enum { NUM_HALF_LAYERS = sizeof mt_half_layers / sizeof *mt_half_layers };

/* The types of layers, from their letters. */
static json_t *mt_config_half_types(const char *letters) {
    json_t *types = json_array();
    for (; *letters; letters++)
        for (int k = 0; k < NUM_HALF_LAYERS; k++)
            if (mt_half_layers[k].letter == *letters)
                json_array_append_new(types,
                                      json_stringn(mt_half_layers[k].names, strcspn(mt_half_layers[k].names, "|")));
    return types;
}

/* The layers of a list of types as letters, to free; NULL if one is unknown, with error. */
static char *mt_config_half_letters(mt_config *config, const char *key, const json_t *types) {
    char *letters = mt_calloc((int64_t)json_array_size(types) + 1);
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        for (int k = 0; type && k < NUM_HALF_LAYERS; k++)
            if (mt_choice_index(mt_half_layers[k].names, type) >= 0) letters[i] = mt_half_layers[k].letter;
        if (letters[i]) continue;
        mt_config_fail(config, "\"%s\" holds %.40s; linear_attention, full_attention, moe and mlp are supported", key,
                       type ? type : "values other than strings");
        free(letters);
        return NULL;
    }
    return letters;
}

/* The layers of a Nemotron-H, a letter each, to free: a list under one of two names, or its older form as letters,
 * which must agree where a file has several. NULL if there is none, or a layer that is unknown.
 */
static char *mt_config_read_half_layers(mt_config *config) {
    static const char *const keys[] = {"layers_block_type", "layer_types", "hybrid_override_pattern"};
    char *letters = NULL;
    const char *first = NULL;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !config->failed; i++) {
        const json_t *types = i < 2 ? mt_config_list(config, config->root, keys[i]) : NULL;
        const char *pattern = i == 2 ? mt_config_string(config, config->root, keys[i], NULL) : NULL;
        char *found = types ? mt_config_half_letters(config, keys[i], types) : pattern ? mt_strdup(pattern) : NULL;
        if (letters && found && strcmp(letters, found) != 0)
            mt_config_fail(config,
                           "\"%s\" and \"%s\" give other layers, %.60s and %.60s; make them agree, or leave one out",
                           first, keys[i], letters, found);
        if (!letters && found) first = keys[i], letters = found, found = NULL;
        free(found);
    }
    if (!letters) mt_config_fail(config, "\"layers_block_type\" is missing");
    if (!config->failed) return letters;
    free(letters);
    return NULL;
}

/* The layer of a Nemotron-H's modules of multi-token prediction, which a file may describe without having any. */
static void mt_config_read_module(mt_config *config, mt_run_options *shape) {
    const json_t *types = mt_config_list(config, config->root, "mtp_layers_block_type");
    const char *pattern = mt_config_string(config, config->root, "mtp_hybrid_override_pattern", NULL);
    if (config->failed || mt_config_int(config, config->root, "num_nextn_predict_layers", 0) == 0) return;
    char *letters = types ? mt_config_half_letters(config, "mtp_layers_block_type", types) : NULL;
    mt_string_set(&shape->mtp_hybrid_override_pattern, letters ? letters : pattern ? pattern : "*E");
    free(letters);
}

/* A number, or what transformers 5 writes for infinity, {"__float__": "Infinity"}. */
static double mt_config_bound(mt_config *config, const char *key, const json_t *value) {
    const char *word = json_string_value(json_object_get(value, "__float__"));
    if (word && strcmp(word, "Infinity") == 0) return INFINITY;
    if (!json_is_number(value))
        mt_config_refuse_type(config, key, value, "two numbers, the least step and the largest");
    return json_number_value(value);
}

/* The range of Mamba-2's steps. */
static void mt_config_read_steps(mt_config *config, mt_run_options *shape) {
    static const char key[] = "time_step_limit";
    const json_t *range = mt_config_list(config, config->root, key);
    if (!range) return;
    if (json_array_size(range) != 2)
        mt_config_refuse_type(config, key, range, "two numbers, the least step and the largest");
    if (config->failed) return;
    double low = mt_config_bound(config, key, json_array_get(range, 0));
    double high = mt_config_bound(config, key, json_array_get(range, 1));
    if (!config->failed && !(low >= 0 && low < INFINITY && high > 0 && high >= low))
        mt_config_fail(config, "\"%s\" is [%g, %g]; the least step is at least 0, and the largest at least that", key,
                       low, high);
    if (shape->stack.hf_family == MT_HF_GRANITE)
        shape->stack.mamba_dt_limit_low = low, shape->stack.mamba_dt_limit_high = high < INFINITY ? high : 0;
    else if (!config->failed && ((low != 0 && low != shape->stack.mamba_dt_limit_low) || high < INFINITY))
        mt_config_fail(config,
                       "\"%s\" is [%g, %g], which transformers 5 does not read in this family; its least step is "
                       "\"time_step_min\", %g: make them equal",
                       key, low, high, shape->stack.mamba_dt_limit_low);
}

/* Granite's heads of Mamba-2, whose width may be "auto", its scale of attention, which is 1 in a file without it, and
 * its positions. */
static void mt_config_finish_granite(mt_config *config, mt_run_options *shape) {
    const json_t *width = mt_config_get(config->root, "mamba_d_head");
    bool is_auto = !width || (json_is_string(width) && strcmp(json_string_value(width), "auto") == 0);
    int64_t inner = mt_config_int(config, config->root, "mamba_expand", 2) * shape->stack.hidden_size;
    int64_t heads = mt_max(shape->stack.mamba_num_heads, 1);
    const char *positions = mt_config_string(config, config->root, "position_embedding_type", "nope");
    shape->stack.mamba_head_dim = is_auto ? inner / heads : mt_config_int(config, config->root, "mamba_d_head", 0);
    if (!config->failed && shape->stack.mamba_head_dim * heads != inner)
        mt_config_fail(config,
                       "\"mamba_n_heads\" %lld times \"mamba_d_head\" %lld is not \"mamba_expand\" times "
                       "\"hidden_size\", %lld",
                       (long long)heads, (long long)shape->stack.mamba_head_dim, (long long)inner);
    double scale = mt_config_real(config, config->root, "attention_multiplier", 1);
    int64_t channels = shape->stack.hidden_size / mt_max(shape->stack.num_attention_heads, 1);
    if (!(scale > 0)) mt_config_fail(config, "\"attention_multiplier\" is %g, must be above 0", scale);
    shape->stack.softmax_scale = scale == 1 / sqrt((double)channels) ? 0 : scale;
    if (positions && mt_choice_index("rope|nope|none", positions) < 0)
        mt_config_fail(config, "\"position_embedding_type\" is %.60s; supported: rope and nope", positions);
    if (!positions || strcmp(positions, "rope") != 0) return;
    shape->stack.position_embedding_type = MT_POSITION_ROPE;
    mt_config_read_rope(config, shape);
}

static void mt_config_finish_mamba(mt_config *config, mt_run_options *shape) {
    mt_config_read_steps(config, shape);
    if (shape->stack.hf_family == MT_HF_GRANITE) {
        mt_config_finish_granite(config, shape);
        return;
    }
    char *letters = mt_config_read_half_layers(config);
    shape->stack.num_layers = letters ? (int64_t)strlen(letters) : 0;
    int64_t given = mt_config_int(config, config->root, "num_hidden_layers", shape->stack.num_layers);
    if (given != shape->stack.num_layers)
        mt_config_note(config, "\"num_hidden_layers\" %lld has no effect, as in transformers 5: %lld layers are listed",
                       (long long)given, (long long)shape->stack.num_layers);
    mt_string_set(&shape->hybrid_override_pattern, letters);
    free(letters);
    mt_config_read_module(config, shape);
}

/* SmolLM3's layers with RoPE: a list, or all but every no_rope_layer_interval-th. */
static void mt_config_read_rope_layers(mt_config *config, mt_run_options *shape) {
    const json_t *list = mt_config_list(config, config->root, "no_rope_layers");
    int64_t every = mt_config_int(config, config->root, "no_rope_layer_interval", 4), value;
    if (config->failed || shape->stack.num_layers < 1) return;
    if (every < 1) mt_config_fail(config, "\"no_rope_layer_interval\" is %lld, must be positive", (long long)every);
    if (list && (int64_t)json_array_size(list) != shape->stack.num_layers)
        mt_config_fail(config, "\"no_rope_layers\" must list %lld layers", (long long)shape->stack.num_layers);
    if (config->failed) return;
    char *letters = mt_calloc(shape->stack.num_layers + 1);
    for (int64_t i = 0; i < shape->stack.num_layers; i++) {
        value = (i + 1) % every != 0;
        if (list && !mt_json_int(json_array_get(list, (size_t)i), 0, 1, &value))
            mt_config_refuse_type(config, "no_rope_layers", list, "a list of 0 and 1");
        letters[i] = value ? '1' : '0';
    }
    free(shape->no_rope_freq);
    shape->no_rope_freq = strchr(letters, '0') ? mt_layer_freq_print(letters, MT_ROPE_LAYERS) : NULL;
    free(letters);
}

/* The first layer with experts in families whose first layers may have none. */
static int64_t mt_config_first_expert_layer(mt_config *config, uint64_t mask) {
    if (mask & (HY_V3 | GLM4_MOE_LITE | MIMO_V2_FLASH)) return 1;
    if (!(mask & LEADING_DENSE)) return 0;
    int64_t absent = mask & (DEEPSEEK_V3 | SPARSE) ? 3 : mask & DOTS1 ? 0 : 1;
    return mt_config_int(config, config->root, "first_k_dense_replace", absent);
}

/* Sets `layers` [num_layers], '1' for experts, by the list mlp_layer_types if there is one. */
static void mt_config_read_mlp_types(mt_config *config, char *layers, int64_t num_layers) {
    const json_t *types = mt_config_list(config, config->root, "mlp_layer_types");
    if (types && (int64_t)json_array_size(types) != num_layers)
        mt_config_fail(config, "\"mlp_layer_types\" must list %lld layers", (long long)num_layers);
    for (size_t i = 0; i < json_array_size(types) && (int64_t)i < num_layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || mt_choice_index("dense|sparse", type) < 0)
            mt_config_fail(config, "\"mlp_layer_types\" holds %.40s; dense and sparse are supported",
                           type ? type : "values other than strings");
        else
            layers[i] = *type == 's' ? '1' : '0';
    }
}

/* Sets `layers` [num_layers], '1' for experts, by ERNIE's first and last layer with experts and their distance. */
static void mt_config_read_layer_range(mt_config *config, char *layers, int64_t num_layers) {
    int64_t first = mt_config_int(config, config->root, "moe_layer_start_index", 1);
    int64_t last = mt_config_int(config, config->root, "moe_layer_end_index", -1);
    int64_t every = mt_config_int(config, config->root, "moe_layer_interval", 1);
    if (every < 1) mt_config_fail(config, "\"moe_layer_interval\" is %lld, must be positive", (long long)every);
    if (mt_config_real(config, config->root, "moe_norm_min", 1e-12) > 1e-6) // bounds the sum of the chosen scores
        mt_config_fail(config, "\"moe_norm_min\" above 1e-6 is not supported");
    if (last == -1) last = num_layers - 1;
    for (int64_t i = 0; i < num_layers; i++)
        layers[i] = i >= first && i <= last && (i + 1) % mt_max(every, 1) == 0 ? '1' : '0';
}

/* The layers with experts, as --moe-layer-freq. */
static void mt_config_read_expert_layers(mt_config *config, uint64_t mask, mt_run_options *shape) {
    bool lists = mask & (QWEN_MOE | QWEN3_NEXT);
    const json_t *dense = lists ? mt_config_list(config, config->root, "mlp_only_layers") : NULL;
    int64_t every = lists ? mt_config_int(config, config->root, "decoder_sparse_step", 1) : 1;
    int64_t leading = mt_config_first_expert_layer(config, mask);
    if (every < 1) mt_config_fail(config, "\"decoder_sparse_step\" must be a number above 0");
    if (config->failed || shape->stack.num_layers == 0) return;
    char *layers = mt_calloc(shape->stack.num_layers + 1);
    for (int64_t i = 0; i < shape->stack.num_layers; i++) layers[i] = i >= leading && (i + 1) % every == 0 ? '1' : '0';
    if (mask & LAYER_LIST) mt_config_read_mlp_types(config, layers, shape->stack.num_layers);
    if (mask & ERNIE4_5_MOE) mt_config_read_layer_range(config, layers, shape->stack.num_layers);
    for (size_t i = 0; i < json_array_size(dense); i++) {
        int64_t layer = json_integer_value(json_array_get(dense, i));
        if (!json_is_integer(json_array_get(dense, i)))
            mt_config_refuse_type(config, "mlp_only_layers", dense, "a list of layers' numbers");
        if (layer >= 0 && layer < shape->stack.num_layers) layers[layer] = '0';
    }
    if (!strchr(layers, '1')) mt_config_fail(config, "no layer has experts");
    free(shape->moe_layer_freq);
    shape->moe_layer_freq = strchr(layers, '0') ? mt_layer_freq_print(layers, MT_EXPERT_LAYERS) : mt_strdup("1");
    free(layers);
}

/* True if a schedule of indexers gives layer i, counted from 0, one: as transformers 5.23 computes indexer_types. */
static bool mt_has_indexer(int64_t i, int64_t freq, int64_t offset) {
    return mt_max(i + 1 - offset, 0) % freq == 0;
}

/* Sets `full` [num_layers], true for layers with an indexer, from a list of "full" and "shared", or of the letters F
 * and S of GLM's index_topk_pattern. */
static void mt_config_read_indexer_types(mt_config *config, const char *key, const json_t *list, bool *full,
                                         int64_t num_layers) {
    const char *letters = json_string_value(list);
    int64_t count = letters ? (int64_t)strlen(letters) : (int64_t)json_array_size(list);
    if (count != num_layers) {
        mt_config_fail(config, "\"%s\" must name %lld layers", key, (long long)num_layers);
        return;
    }
    for (int64_t i = 0; i < num_layers; i++) {
        char letter[2] = {letters ? letters[i] : 0, 0};
        const char *type = letters ? letter : json_string_value(json_array_get(list, (size_t)i));
        int choice = type ? mt_choice_index(letters ? "F|S" : "full|shared", type) : -1;
        if (choice < 0)
            mt_config_fail(config, "\"%s\" holds %.40s; supported: %s", key, type ? type : "values other than strings",
                           letters ? "F and S" : "full and shared");
        full[i] = choice == 0;
    }
}

/* Layers of sparse attention that have an indexer, as a schedule: every freq-th from layer `offset` on, and those
 * before. */
static void mt_config_read_indexers(mt_config *config, uint64_t mask, mt_run_options *shape) {
    int64_t num_layers = shape->stack.num_layers, freq = 1, offset = 0;
    const json_t *kinds = mt_config_list(config, config->root, "layer_types");
    const json_t *list = mt_config_list(config, config->root, "indexer_types");
    const char *key = "indexer_types";
    if (kinds && (int64_t)json_array_size(kinds) != num_layers)
        mt_config_fail(config, "\"layer_types\" must list %lld layers", (long long)num_layers);
    for (size_t i = 0; i < json_array_size(kinds); i++) {
        const char *kind = json_string_value(json_array_get(kinds, i));
        if (!kind || strcmp(kind, "indexed_attention") != 0)
            mt_config_fail(config, "\"layer_types\" holds %.40s; supported: indexed_attention",
                           kind ? kind : "values other than strings");
    }
    if (!(mask & GLM_MOE_DSA) || num_layers < 1) return;
    freq = mt_max(mt_config_int(config, config->root, "index_topk_freq", 1), 1);
    offset = mt_config_int(config, config->root, "index_skip_topk_offset", freq > 1 ? 2 : 0);
    if (!list && mt_config_get(config->root, "index_topk_pattern"))
        list = mt_config_get(config->root, "index_topk_pattern"), key = "index_topk_pattern";
    bool *full = mt_calloc(num_layers * (int64_t)sizeof *full), found = false;
    for (int64_t i = 0; i < num_layers; i++) full[i] = mt_has_indexer(i, freq, offset);
    if (list) mt_config_read_indexer_types(config, key, list, full, num_layers);
    int64_t first = 0, second; // layers before the first one that shares, and the next layer with an indexer
    while (first < num_layers && full[first]) first++;
    for (second = first; second < num_layers && !full[second];) second++;
    for (int i = 0; i < 2 && !found; i++) { // the file's own schedule first
        if (i == 1) freq = first == num_layers ? 1 : second - first + 1, offset = mt_max(first, 1);
        found = true;
        for (int64_t layer = 0; layer < num_layers; layer++)
            found &= full[layer] == mt_has_indexer(layer, freq, offset);
    }
    if (!full[0]) mt_config_fail(config, "\"%s\": the first layer has no indexer, and no layer before to share", key);
    if (!found)
        mt_config_fail(config,
                       "\"%s\": only indexers in every so many layers, after some layers that all have one, are "
                       "supported",
                       key);
    free(full);
    shape->stack.dsa_indexer_topk_freq = freq, shape->stack.dsa_indexer_skip_topk_offset = freq > 1 ? offset : 0;
}

/* The number of experts, and the layers that have them. */
static void mt_config_finish_experts(mt_config *config, uint64_t mask, mt_run_options *shape) {
    if (shape->stack.num_experts == 0)
        mt_config_fail(config, "\"%s\" is missing", mt_hf_key_name(MT_AT(stack.num_experts), mask));
    if (!(mask & (MIXTRAL | GPT_OSS | MINIMAX_M2 | SOLAR_OPEN | MAMBA)))
        mt_config_read_expert_layers(config, mask, shape);
}

/* MiMo-V2-Flash: layers with a window have twice as many heads of keys and values, as many heads of queries, and see
 * one key more than sliding_window_size says (transformers 5.23). */
static void mt_config_read_window_heads(mt_config *config, mt_run_options *shape) {
    int64_t heads = mt_config_int(config, config->root, "swa_num_attention_heads", shape->stack.num_attention_heads);
    int64_t groups =
        shape->stack.num_query_groups > 0 ? shape->stack.num_query_groups : shape->stack.num_attention_heads;
    int64_t twice = mt_config_int(config, config->root, "swa_num_key_value_heads", 2 * groups);
    int64_t window = mt_config_int(config, config->root, "sliding_window_size", shape->stack.window_size - 1);
    if (heads != shape->stack.num_attention_heads)
        mt_config_fail(config, "\"swa_num_attention_heads\" is %lld and \"num_attention_heads\" %lld; make them equal",
                       (long long)heads, (long long)shape->stack.num_attention_heads);
    if (twice != 2 * groups)
        mt_config_fail(
            config,
            "\"swa_num_key_value_heads\" is %lld, and layers with a window have twice \"num_key_value_heads\" "
            "%lld",
            (long long)twice, (long long)groups);
    if (window < 0 && shape->stack.window_size > 0)
        mt_config_fail(config, "\"sliding_window_size\" is %lld, must be at least 0", (long long)window);
    if (shape->stack.window_size == 0) // no layer has one
        shape->stack.softmax_type = MT_SOFTMAX_VANILLA, shape->stack.sinks_in_windows_only = false;
    else
        shape->stack.window_size = window + 1, shape->stack.window_num_query_groups = 2 * groups;
}

/* Values of Llama's block that follow from several keys. */
static void mt_config_finish_block(mt_config *config, uint64_t mask, mt_run_options *shape) {
    if (mask & SEED_OSS && shape->stack.attention_output_bias && !shape->stack.add_qkv_bias)
        mt_config_fail(config, "\"attention_out_bias\" without \"attention_bias\" is not supported");
    shape->stack.add_qkv_bias |= shape->stack.attention_output_bias;
    shape->add_bias_linear = shape->stack.attention_output_bias && shape->stack.mlp_bias;
    if (shape->stack.num_query_groups == shape->stack.num_attention_heads)
        shape->stack.num_query_groups = 0; // a group for each head
    shape->group_query_attention = shape->stack.num_query_groups != 0;
    if (mask & SEED_OSS && shape->stack.hidden_dropout > 0)
        mt_config_note(config,
                       "\"residual_dropout\" %g becomes --hidden-dropout, which drops channels of the embedding too",
                       shape->stack.hidden_dropout);
    if (mask & KIMI_LINEAR) mt_config_read_kda(config, shape);
    if (mask & MAMBA)
        mt_config_finish_mamba(config, shape);
    else if (!(mask & KIMI_LINEAR))
        mt_config_read_rope(config, shape);
    if (mask & (MISTRALS | MIXTRAL | QWENS | SMOLLM3 | WINDOWED | GPT_OSS | DOTS1 | EXAONES | MIMO_V2_FLASH))
        mt_config_read_windows(config, mask, shape);
    if (mask & MIMO_V2_FLASH) mt_config_read_window_heads(config, shape);
    if (mask & SMOLLM3) mt_config_read_rope_layers(config, shape);
    if (mask & (DELTA | LFM2 | GRANITE)) mt_config_read_linear_layers(config, mask, shape);
    if (mask & LFM2) mt_config_read_adjusted_width(config, &shape->stack);
    if (mask & SPARSE) mt_config_read_indexers(config, mask, shape);
    if (mask & MOE) mt_config_finish_experts(config, mask, shape);
    if (mask & DELTA && mt_num_mtp_modules(&shape->stack) > 1)
        mt_config_fail(config, "\"mtp_num_layers\" is %lld; this family has one module of multi-token prediction",
                       (long long)shape->stack.mtp_num_layers);
    if (mask & KIMI_LINEAR && mt_config_int(config, config->root, "num_nextn_predict_layers", 0) > 0)
        mt_config_fail(config, "\"num_nextn_predict_layers\" above 0 is not supported for this family");
    if (!(mask & (LATENT | GLM4_MOE | HY_V3 | MIMO))) return;
    mt_config_compare(config, config->root, "num_nextn_predict_layers", "num_mtp_layers");
    const json_t *modules = mt_config_get(config->root, "num_nextn_predict_layers");
    if (!modules) modules = mt_config_get(config->root, "num_mtp_layers"); // its other name in transformers 5
    shape->mtp_layers_stored = !(mask & KIMI_LINEAR);
    if (modules && !mt_json_int(modules, 0, 10000, &shape->mtp_layers_stored))
        mt_config_fail(config, "\"num_nextn_predict_layers\" must be a whole number from 0 to 10000");
    int64_t channels = shape->stack.qk_head_dim + shape->stack.qk_pos_emb_head_dim;
    int64_t all = mt_config_int(config, config->root, "qk_head_dim", channels);
    if (mask & LATENT) mt_config_int(config, config->root, "head_dim", 0); // its type counts, though it has no effect
    if (mask & LATENT && all != channels)
        mt_config_fail(config,
                       "\"qk_head_dim\" is %lld, and \"qk_nope_head_dim\" and \"qk_rope_head_dim\" together %lld; "
                       "make them agree, or leave it out",
                       (long long)all, (long long)channels);
    if (mask & LATENT && shape->group_query_attention)
        mt_config_fail(config,
                       "\"num_key_value_heads\" is %lld and \"num_attention_heads\" %lld; with a latent every head has "
                       "its own key and value: make them equal",
                       (long long)shape->stack.num_query_groups, (long long)shape->stack.num_attention_heads);
}

/* The activation of T5: its name, after "gated-" with a gate. "gated-gelu" is the tanh approximation. */
static void mt_config_read_feed_forward(mt_config *config, mt_options *shape) {
    const char *name = mt_config_string(config, config->root, "feed_forward_proj", "relu");
    bool gated = name && strncmp(name, "gated-", 6) == 0;
    const char *word = gated ? name + 6 : name ? name : "";
    const mt_hf_key key = {"feed_forward_proj", T5, 0, gated ? GATED_ACTIVATION : PLAIN_ACTIVATION, NULL, NULL};
    json_t *value = json_string(gated && strcmp(word, "gelu") == 0 ? "gelu_new" : word);
    mt_config_set_activation(config, &key, value, shape);
    json_decref(value);
}

/* transformers 5 scales the decoder's output by 1 / sqrt(d_model) unless the file says that embeddings are not tied;
 * its own files keep that as "scale_decoder_outputs". */
static void mt_config_finish_t5(mt_config *config, mt_run_options *shape) {
    mt_options *s = &shape->stack;
    bool tied = mt_config_bool(config, config->root, "tie_word_embeddings", true);
    bool scales = mt_config_bool(config, config->root, "scale_decoder_outputs", tied);
    int64_t start = mt_config_int(config, config->root, "decoder_start_token_id", 0);
    if (config->failed) return; // the numbers of layers may be any
    s->untie_embeddings_and_output_weights = !tied;
    s->logits_scaling = scales ? sqrt((double)s->hidden_size) : 1;
    double factor = mt_config_real(config, config->root, "initializer_factor", 1);
    s->init_method_std = mt_config_real(config, config->root, "init_method_std", 0.02 * factor); // ours: not rounded
    if (s->decoder_num_layers == 0) s->decoder_num_layers = s->encoder_num_layers;
    s->num_layers = s->encoder_num_layers + 2 * s->decoder_num_layers;
    shape->add_bias_linear = false;
    mt_config_read_feed_forward(config, s);
    if (start != 0)
        mt_config_fail(config,
                       "\"decoder_start_token_id\" is %lld; only decoders that begin with token 0 are supported",
                       (long long)start);
}

static void mt_config_write_t5(json_t *root, const mt_options *o) {
    mt_activation activation = mt_options_activation(o);
    const mt_activation_row *row = &mt_activation_rows[activation];
    const char *names = activation == MT_ACTIVATION_GEGLU ? "gelu" : row->config_names;
    char text[80];
    snprintf(text, sizeof text, "%s%.*s", row->gated ? "gated-" : "", (int)strcspn(names, "|"), names);
    mt_json_set_string(root, "feed_forward_proj", text);
    mt_json_set_bool(root, "tie_word_embeddings", !o->untie_embeddings_and_output_weights);
    mt_json_set_bool(root, "scale_decoder_outputs", o->logits_scaling != 1);
    mt_json_set_real(root, "initializer_factor", o->init_method_std / 0.02);
    mt_json_set_real(root, "init_method_std", o->init_method_std);
    mt_json_set_int(root, "decoder_start_token_id", 0);
    if (!json_object_get(root, "pad_token_id")) mt_json_set_int(root, "pad_token_id", 0);
}

/* A model that no family of transformers describes: this program's own options, under their names. */
static void mt_config_read_megatron(mt_config *config, mt_run_options *shape) {
    char name[80];
    mt_hf_key key;
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (mt_hf_key_of(&key, name, row)) mt_config_read_keys(config, config->root, &key, 1, MEGATRON, shape);
    bool is_older = mt_is_latent(&shape->stack) && !json_object_get(config->root, "latent_norm_epsilon");
    if (is_older) shape->stack.latent_norm_epsilon = 1e-6; // which these norms always had
    shape->mtp_layers_stored = mt_num_mtp_modules(&shape->stack);
}

/* Weights in fp8 with a scale per block, as in DeepSeek-V3's folders; experts in MXFP4, as in gpt-oss's: what their
 * tensors' names and types say. A model is saved as it is trained, without this key. */
static void mt_config_read_quantization(mt_config *config, mt_run_options *shape) {
    const json_t *quantization = mt_config_object(config, config->root, "quantization_config");
    if (!quantization) return;
    const char *method = mt_config_string(config, quantization, "quant_method", NULL);
    const char *format = mt_config_string(config, quantization, "fmt", "e4m3");
    const char *activations = mt_config_string(config, quantization, "activation_scheme", "dynamic");
    const json_t *sizes = mt_config_get(quantization, "weight_block_size");
    if (method && strcmp(method, "mxfp4") == 0 && shape->stack.hf_family == MT_HF_GPT_OSS) return;
    if (!method || strcmp(method, "fp8") != 0 || !format || strcmp(format, "e4m3") != 0)
        mt_config_fail(config,
                       "quantized weights (\"quantization_config\") of \"quant_method\" %.60s, \"fmt\" %.60s are not "
                       "supported, only fp8 and e4m3; load the fp32, bf16 or fp16 model",
                       method ? method : "missing", format ? format : "missing");
    if (activations && strcmp(activations, "dynamic") != 0)
        mt_config_fail(config,
                       "\"activation_scheme\" of \"quantization_config\" is %.60s; supported: dynamic; load the fp32, "
                       "bf16 or fp16 model",
                       activations);
    for (size_t i = 0; i < 2; i++)
        if (json_array_size(sizes) != 2 ||
            !mt_json_int(json_array_get(sizes, i), 1, 1 << 20, &shape->weight_block_size[i]))
            mt_config_fail(config,
                           "\"weight_block_size\" of \"quantization_config\" must be two whole numbers, the rows "
                           "and columns per scale; load the fp32, bf16 or fp16 model");
}

/* The ends of class names of models with a value head, by mt_head_type. */
static const char *const mt_head_classes[] = {NULL, "ForSequenceClassification", "ForTokenClassification"};

/* The head, by the model's class. A value head has one label; files without id2label mean two. */
static void mt_config_read_head(mt_config *config, mt_options *shape) {
    const json_t *labels = mt_config_object(config, config->root, "id2label");
    const json_t *classes = mt_config_list(config, config->root, "architectures");
    const char *class = json_string_value(json_array_get(classes, 0));
    int64_t number = mt_config_int(config, config->root, "num_labels", 2);
    int64_t count = labels ? (int64_t)json_object_size(labels) : number;
    if (json_array_size(classes) > 0 && !class)
        mt_config_refuse_type(config, "architectures", classes, "a list of classes' names");
    for (int head = MT_HEAD_SEQUENCE; class && head <= MT_HEAD_TOKEN; head++)
        if (mt_text_ends_with(class, mt_head_classes[head])) shape->head_type = (mt_head_type)head;
    if (shape->head_type == MT_HEAD_LM) return;
    if (labels && mt_config_get(config->root, "num_labels") && number != count)
        mt_config_fail(config, "\"num_labels\" is %lld and \"id2label\" has %lld; make them agree, or leave one out",
                       (long long)number, (long long)count);
    if (count != 1)
        mt_config_fail(config, "%.80s has %lld labels; value heads have one: \"id2label\": {\"0\": \"LABEL_0\"}", class,
                       (long long)count);
    shape->mtp_num_layers = 0;
}

/* GPT2LMHeadModel, LlamaForCausalLM or Qwen3VLForConditionalGeneration -> GPT2ForTokenClassification and so on. */
static void mt_config_write_head(json_t *root, const char *class, const mt_options *o) {
    static const char *const ends[] = {"ForCausalLM", "LMHeadModel", "ForConditionalGeneration"};
    const char *end = NULL;
    char name[128];
    for (int i = 0; i < 3 && !end; i++) end = strstr(class, ends[i]);
    snprintf(name, sizeof name, "%s", class);
    if (o->head_type != MT_HEAD_LM)
        snprintf(name, sizeof name, "%.*s%s", (int)(end - class), class, mt_head_classes[o->head_type]);
    json_object_set_new(root, "architectures", json_pack("[s]", name));
    if (o->head_type == MT_HEAD_LM) return;
    json_object_set_new(root, "id2label", json_pack("{ss}", "0", "LABEL_0"));
    json_object_set_new(root, "label2id", json_pack("{si}", "LABEL_0", 0));
}

/* Moves the class of a value head and its labels from the file of a model with a tower to its text model's. */
static void mt_config_take_head(json_t *text, const json_t *root) {
    static const char *const keys[] = {"architectures", "id2label", "num_labels"};
    const char *class = json_string_value(json_array_get(json_object_get(root, keys[0]), 0));
    bool has_values = class && (mt_text_ends_with(class, mt_head_classes[MT_HEAD_SEQUENCE]) ||
                                mt_text_ends_with(class, mt_head_classes[MT_HEAD_TOKEN]));
    for (int i = 0; i < 3; i++) {
        json_object_del(text, keys[i]);
        if (has_values && json_object_get(root, keys[i]))
            json_object_set(text, keys[i], json_object_get(root, keys[i]));
    }
}

enum { MOST_LAYERS = 10000 }; // of --num-layers

static void mt_config_read_tower(mt_config *config, mt_run_options *shape);

/* Sets `shape`, which holds defaults, to the model of a file of a supported family. */
static void mt_config_read_family(mt_config *config, mt_run_options *shape) {
    mt_error problem;
    uint64_t mask = mt_hf_mask(shape->stack.hf_family);
    int64_t layers = mt_config_int(config, config->root, "num_hidden_layers", 0);
    if (mask & DEEPSEEK_V3 && mt_config_first_expert_layer(config, mask) < layers) mask |= DEEPSEEK_MOE;
    char *halves = mask & NEMOTRON_H ? mt_config_read_half_layers(config) : NULL;
    if (halves && strchr(halves, 'E')) mask |= NEMOTRON_MOE;
    free(halves);
    if (mask & GRANITE)
        mask |= mt_config_int(config, config->root, "num_local_experts", 8) > 0 ? GRANITE_MOE : GRANITE_DENSE;
    mt_config_read_quantization(config, shape);
    const struct mt_hf_variant *variant = mt_hf_variant_of(mask);
    mt_config_read_keys(config, config->root, mt_hf_keys, NUM_KEYS, mask, shape);
    if (variant) mt_config_read_keys(config, config->root, variant->keys, NUM_OWN_KEYS, variant->family, shape);
    if (shape->stack.num_layers > MOST_LAYERS) return; // which is refused; before lists of so many
    mt_config_read_tokens(config, mask, shape);
    if (mask & BLOCKS) mt_config_finish_block(config, mask, shape);
    if (mask & T5) mt_config_finish_t5(config, shape);
    if (mask & MEGATRON) mt_config_read_megatron(config, shape);
    mt_config_read_head(config, &shape->stack);
    mt_config_read_tower(config, shape);
    memset(shape->given, 0, sizeof shape->given);
    if (mt_options_check_ranges(shape, MT_PROGRAM_TRAIN, &problem)) mt_config_fail(config, "%s", problem.text);
    int64_t heads = shape->stack.num_attention_heads, groups = shape->stack.num_query_groups;
    if (!config->failed && groups > 0 && heads % groups != 0)
        mt_config_fail(config, "the %lld heads do not divide into %lld groups", (long long)heads, (long long)groups);
}

#define MT_HF_FAMILY_TYPE(name, model_type, ...) " " model_type

/* The family whose class "architectures" names: Kimi K2's model_type is its own, and its class is DeepSeek-V3's. */
static mt_hf_family mt_config_family_of_class(const mt_config *config) {
    const char *name = json_string_value(json_array_get(json_object_get(config->root, "architectures"), 0));
    int family = MT_NUM_HF_FAMILIES - 1;
    while (family > 0 && (!name || strcmp(name, mt_hf_families[family].model_class) != 0)) family--;
    return (mt_hf_family)family;
}

/* A copy of a JSON text, to free, whose bare Infinity, as Python writes it, is as in transformers 5. */
static char *mt_config_name_infinity(const char *json, int64_t bytes, int64_t *copied) {
    static const char bare[] = "Infinity", named[] = "{\"__float__\": \"Infinity\"}";
    char *text = mt_malloc(bytes * 4 + 1), *to = text;
    bool quoted = false;
    for (int64_t i = 0; i < bytes; i++) {
        bool escaped = i > 0 && quoted && json[i - 1] == '\\' && !(i > 1 && json[i - 2] == '\\');
        if (json[i] == '"' && !escaped) quoted = !quoted;
        bool found = !quoted && bytes - i >= 8 && memcmp(json + i, bare, 8) == 0;
        if (found)
            memcpy(to, named, sizeof named - 1), to += sizeof named - 1, i += 7;
        else
            *to++ = json[i];
    }
    *to = 0, *copied = to - text;
    return text;
}

/* ---- a vision tower beside the text model */

/* Types of files with both, the text model's family, and the place of RoPE's sections where a file has none. */
static const struct {
    const char *type, *class, *text_type;
    mt_hf_family family;
    mt_vision_tower tower;
    int64_t mrope_section[3];
    bool interleaved, deepstack;
    int64_t image_token, video_token, start_token, end_token;
} mt_vision_types[] = {
    {"qwen2_5_vl",
     "Qwen2_5_VLForConditionalGeneration",
     "qwen2_5_vl_text",
     MT_HF_QWEN2,
     MT_VISION_QWEN2_5,
     {16, 24, 24},
     false,
     false,
     151655,
     151656,
     151652,
     151653},
    {"qwen3_vl",
     "Qwen3VLForConditionalGeneration",
     "qwen3_vl_text",
     MT_HF_QWEN3,
     MT_VISION_QWEN3,
     {24, 20, 20},
     true,
     true,
     151655,
     151656,
     151652,
     151653},
    {"qwen3_5",
     "Qwen3_5ForConditionalGeneration",
     "qwen3_5_text",
     MT_HF_QWEN3_5,
     MT_VISION_QWEN3,
     {11, 11, 10},
     true,
     false,
     248056,
     248057,
     248053,
     248054},
    {"qwen3_vl_moe",
     "Qwen3VLMoeForConditionalGeneration",
     "qwen3_vl_moe_text",
     MT_HF_QWEN3_MOE,
     MT_VISION_QWEN3,
     {24, 20, 20},
     true,
     true,
     151655,
     151656,
     151652,
     151653},
    {"qwen3_5_moe",
     "Qwen3_5MoeForConditionalGeneration",
     "qwen3_5_moe_text",
     MT_HF_QWEN3_5_MOE,
     MT_VISION_QWEN3,
     {11, 11, 10},
     true,
     false,
     248056,
     248057,
     248053,
     248054},
};
enum { NUM_VISION_TYPES = sizeof mt_vision_types / sizeof *mt_vision_types };

/* The row of a text model's family with a tower; NUM_VISION_TYPES: it has none. */
static size_t mt_vision_type_of(mt_hf_family family, mt_vision_tower tower) {
    size_t i = 0;
    while (i < NUM_VISION_TYPES && (mt_vision_types[i].family != family || mt_vision_types[i].tower != tower)) i++;
    return i;
}

/* Keys of "vision_config"; here a bit stands for a tower. */
enum { TOWER_2_5 = 1 << MT_VISION_QWEN2_5, TOWER_3 = 1 << MT_VISION_QWEN3, TOWERS = TOWER_2_5 | TOWER_3 };

static const mt_hf_key mt_vision_keys[] = {
    {"depth", TOWER_2_5, MT_AT(stack.vision.num_layers), 0, "32"},
    {"depth", TOWER_3, MT_AT(stack.vision.num_layers), 0, "27"},
    {"hidden_size", TOWER_2_5, MT_AT(stack.vision.hidden_size), 0, "3584"},
    {"hidden_size", TOWER_3, MT_AT(stack.vision.hidden_size), 0, "1152"},
    {"intermediate_size", TOWER_2_5, MT_AT(stack.vision.ffn_hidden_size), 0, "3420"},
    {"intermediate_size", TOWER_3, MT_AT(stack.vision.ffn_hidden_size), 0, "4304"},
    {"num_heads", TOWERS, MT_AT(stack.vision.num_attention_heads), 0, "16"},
    {"patch_size", TOWER_2_5, MT_AT(stack.vision.patch_size), 0, "14"},
    {"patch_size", TOWER_3, MT_AT(stack.vision.patch_size), 0, "16"},
    {"spatial_merge_size", TOWERS, MT_AT(stack.vision.spatial_merge_size), 0, "2"},
    {"temporal_patch_size", TOWERS, MT_AT(stack.vision.temporal_patch_size), 0, "2"},
    {"num_position_embeddings", TOWER_3, MT_AT(stack.vision.num_positions), 0, "2304"},
    {"window_size", TOWER_2_5, MT_AT(stack.vision.window_size), 0, "112"},
    {"hidden_act", TOWER_2_5, 0, FIXED, "silu"},
    {"hidden_act", TOWER_3, 0, FIXED, "gelu_pytorch_tanh"},
    {"in_channels", TOWERS, 0, FIXED, "3"},
};
enum { NUM_VISION_KEYS = sizeof mt_vision_keys / sizeof *mt_vision_keys };

/* A list of the tower's layers, which names no layer twice, as words of an option. */
static void mt_config_read_vision_layers(mt_config *config, const json_t *vision, const char *key, const char *absent,
                                         mt_strings *words) {
    json_t *read = mt_config_list(config, vision, key), *list = read ? json_incref(read) : json_loads(absent, 0, NULL);
    int64_t before = -1;
    for (size_t i = 0; i < json_array_size(list); i++) {
        char word[24];
        int64_t layer;
        if (!mt_json_int(json_array_get(list, i), before + 1, MT_MAX_VISION_LAYERS - 1, &layer)) {
            mt_config_fail(config, "\"%s\" of \"vision_config\" must list ascending layers from 0 to %d", key,
                           MT_MAX_VISION_LAYERS - 1);
            break;
        }
        snprintf(word, sizeof word, "%lld", (long long)layer);
        mt_strings_add(words, word);
        before = layer;
    }
    json_decref(list);
}

/* The sections of RoPE, of the text model's parameters. */
static void mt_config_read_sections(mt_config *config, size_t type, mt_options *shape) {
    const json_t *rope = mt_config_object(config, config->root, "rope_parameters");
    const json_t *older = mt_config_object(config, config->root, "rope_scaling");
    if (!mt_config_get(rope, "mrope_section") && mt_config_get(older, "mrope_section")) rope = older;
    const json_t *list = mt_config_list(config, rope, "mrope_section");
    memcpy(shape->mrope_section.items, mt_vision_types[type].mrope_section, sizeof shape->mrope_section.items);
    shape->mrope_section.count = 3;
    shape->mrope_interleaved = mt_vision_types[type].interleaved;
    if (list && json_array_size(list) != 3) mt_config_fail(config, "\"mrope_section\" must list three whole numbers");
    for (size_t i = 0; i < 3 && list && !config->failed; i++)
        if (!mt_json_int(json_array_get(list, i), 0, 65536, &shape->mrope_section.items[i]))
            mt_config_fail(config, "\"mrope_section\" must list three whole numbers from 0 to 65536");
    if (mt_config_bool(config, rope, "mrope_interleaved", shape->mrope_interleaved) != shape->mrope_interleaved)
        mt_config_fail(config, "\"mrope_interleaved\" must be %s in this family",
                       shape->mrope_interleaved ? "true" : "false");
}

/* The tower of "vision_config", and the tokens of images. */
static void mt_config_read_tower(mt_config *config, mt_run_options *shape) {
    mt_vision_options *v = &shape->stack.vision;
    const json_t *vision = mt_config_object(config, config->beside, "vision_config");
    size_t type = mt_vision_type_of(shape->stack.hf_family, (mt_vision_tower)config->tower);
    if (config->tower == MT_VISION_NONE || config->failed) return;
    v->tower = (mt_vision_tower)config->tower;
    mt_config_read_keys(config, vision, mt_vision_keys, NUM_VISION_KEYS, 1u << v->tower, shape);
    bool windows = v->tower == MT_VISION_QWEN2_5;
    if (windows)
        mt_config_read_vision_layers(config, vision, "fullatt_block_indexes", "[7, 15, 23, 31]",
                                     &shape->vision_full_attention_layers);
    if (mt_vision_types[type].deepstack)
        mt_config_read_vision_layers(config, vision, "deepstack_visual_indexes", "[8, 16, 24]",
                                     &shape->vision_deepstack_layers);
    int64_t out = mt_config_int(config, vision, "out_hidden_size", 3584);
    if (out != shape->stack.hidden_size)
        mt_config_fail(config,
                       "\"out_hidden_size\" of \"vision_config\" is %lld, and the text model's "
                       "\"hidden_size\" %lld; make them equal",
                       (long long)out, (long long)shape->stack.hidden_size);
    const json_t *rope = mt_config_object(config, vision, "rope_parameters");
    double base = mt_config_real(config, rope, "rope_theta", 10000);
    if (base != 10000) mt_config_fail(config, "\"rope_theta\" of \"vision_config\" is %g; 10000 is supported", base);
    v->image_token_id = mt_config_int(config, config->beside, "image_token_id", mt_vision_types[type].image_token);
    v->video_token_id = mt_config_int(config, config->beside, "video_token_id", mt_vision_types[type].video_token);
    v->start_token_id =
        mt_config_int(config, config->beside, "vision_start_token_id", mt_vision_types[type].start_token);
    v->end_token_id = mt_config_int(config, config->beside, "vision_end_token_id", mt_vision_types[type].end_token);
    mt_config_read_sections(config, type, &shape->stack);
}

static json_t *mt_config_vision_layers(const mt_strings *words) {
    json_t *list = json_array();
    for (int64_t i = 0; i < words->count; i++)
        json_array_append_new(list, json_integer(strtoll(words->items[i], NULL, 10)));
    return list;
}

static void mt_config_write_keys(json_t *object, const mt_hf_key *keys, size_t count, uint64_t mask,
                                 const mt_run_options *o);

/* The file of a model with a tower, which takes the text model's `text`. */
static json_t *mt_config_write_tower(json_t *text, const mt_run_options *o) {
    static const char *const shared[] = {"dtype", "torch_dtype", "tie_word_embeddings"};
    const mt_vision_options *v = &o->stack.vision;
    size_t type = mt_vision_type_of(o->stack.hf_family, v->tower);
    if (type == NUM_VISION_TYPES) return text; // no family has both
    json_t *root = json_object(), *vision = json_object(), *rope = json_object_get(text, "rope_parameters");
    json_t *sections = json_array();
    for (int64_t i = 0; i < o->stack.mrope_section.count; i++)
        json_array_append_new(sections, json_integer(o->stack.mrope_section.items[i]));
    json_object_set_new(rope, "mrope_section", sections);
    if (mt_vision_types[type].interleaved) mt_json_set_bool(rope, "mrope_interleaved", true);
    mt_config_write_head(root, mt_vision_types[type].class, &o->stack);
    mt_json_set_string(root, "model_type", mt_vision_types[type].type);
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        if (json_object_get(text, shared[i])) json_object_set(root, shared[i], json_object_get(text, shared[i]));
    mt_json_set_string(text, "model_type", mt_vision_types[type].text_type);
    json_object_del(text, "architectures"), json_object_del(text, "id2label"), json_object_del(text, "label2id");
    json_object_set_new(root, "text_config", text);
    char name[64];
    snprintf(name, sizeof name, "%s_vision", mt_vision_types[type].type);
    mt_json_set_string(vision, "model_type", name);
    mt_config_write_keys(vision, mt_vision_keys, NUM_VISION_KEYS, 1u << v->tower, o);
    json_object_set_new(vision, "in_channels", json_integer(MT_IMAGE_CHANNELS));
    mt_json_set_int(vision, "out_hidden_size", o->stack.hidden_size);
    if (v->tower == MT_VISION_QWEN2_5)
        json_object_set_new(vision, "fullatt_block_indexes", mt_config_vision_layers(&o->vision_full_attention_layers));
    if (mt_vision_types[type].deepstack)
        json_object_set_new(vision, "deepstack_visual_indexes", mt_config_vision_layers(&o->vision_deepstack_layers));
    json_object_set_new(vision, "rope_parameters",
                        json_pack("{s:s, s:f}", "rope_type", "axial", "rope_theta", 10000.0));
    json_object_set_new(root, "vision_config", vision);
    mt_json_set_int(root, "image_token_id", v->image_token_id);
    mt_json_set_int(root, "video_token_id", v->video_token_id);
    mt_json_set_int(root, "vision_start_token_id", v->start_token_id);
    mt_json_set_int(root, "vision_end_token_id", v->end_token_id);
    return root;
}

/* A file of a model with a vision tower: the text model's keys become the file's. The tokens, and the key that ties the
 * embedding, may stand beside it; in files of Qwen2.5-VL from before transformers 5 all of them do. */
static void mt_config_take_text(mt_config *config) {
    static const char *const beside[] = {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
                                         "quantization_config"};
    const char *type = json_string_value(json_object_get(config->root, "model_type"));
    size_t row = 0;
    while (row < NUM_VISION_TYPES && (!type || strcmp(type, mt_vision_types[row].type) != 0)) row++;
    if (row == NUM_VISION_TYPES) return;
    json_t *text = mt_config_object(config, config->root, "text_config");
    bool is_flat = !text && mt_vision_types[row].tower == MT_VISION_QWEN2_5;
    if (!text && !is_flat) return;
    text = is_flat ? json_copy(config->root) : json_incref(text);
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++) {
        json_t *outer = json_object_get(config->root, beside[i]), *inner = json_object_get(text, beside[i]);
        if (outer && inner && i == 0 && !json_equal(outer, inner))
            mt_config_fail(config, "\"%s\" differs from that in \"text_config\"; make them equal", beside[i]);
        if (outer && !inner) json_object_set(text, beside[i], outer);
    }
    mt_json_set_string(text, "model_type", mt_hf_families[mt_vision_types[row].family].model_type);
    if (mt_vision_types[row].family == MT_HF_QWEN3_MOE && !json_object_get(text, "norm_topk_prob"))
        mt_json_set_bool(text, "norm_topk_prob", true); // transformers' class does nothing else
    mt_config_take_head(text, config->root);
    json_t *older = json_object_get(text, "rope_scaling");
    const char *scaling = json_string_value(json_object_get(older, "type"));
    if (scaling && strcmp(scaling, "mrope") == 0) { // no scaling: the name of its sections
        older = json_deep_copy(older);
        mt_json_set_string(older, "type", "default");
        if (json_object_get(older, "rope_type")) mt_json_set_string(older, "rope_type", "default");
        json_object_set_new(text, "rope_scaling", older);
    }
    config->beside = config->root, config->root = text;
    config->tower = config->text_only ? MT_VISION_NONE : (int)mt_vision_types[row].tower;
    if (config->tower == MT_VISION_NONE)
        snprintf(
            config->note, sizeof config->note,
            "the text model of \"text_config\" is read; the vision tower is not, and folders are saved without it");
}

/* Sets `shape`, which holds defaults, to the model of a file, and a note about it for the user ("": none). */
static int mt_config_read(mt_run_options *shape, const char *json, int64_t bytes, const char *path, bool text_only,
                          char note[MT_NOTE], mt_error *error) {
    mt_config config = {.path = path, .text_only = text_only, .error = error};
    int64_t copied;
    char *text = mt_config_name_infinity(json, bytes, &copied);
    config.root = mt_json_parse(text, copied, JSON_REJECT_DUPLICATES, path, error);
    free(text);
    if (!config.root) return -1;
    mt_config_take_text(&config);
    const char *family = mt_config_string(&config, config.root, "model_type", NULL);
    shape->stack.hf_family = family ? mt_hf_family_find(family) : MT_HF_UNKNOWN;
    if (shape->stack.hf_family == MT_HF_UNKNOWN) shape->stack.hf_family = mt_config_family_of_class(&config);
    if (shape->stack.hf_family == MT_HF_UNKNOWN && json_is_object(json_object_get(config.root, "text_config")))
        mt_config_fail(
            &config,
            "\"model_type\" is %.60s, whose text model is in \"text_config\"; only text models are read: save "
            "it by AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers",
            family ? family : "missing");
    else if (shape->stack.hf_family == MT_HF_UNKNOWN)
        mt_config_fail(&config,
                       "\"model_type\" is %.60s%s; supported:" MT_HF_FAMILIES(
                           MT_HF_FAMILY_TYPE) " (megatron: saved by this program, as no other family has its shape)",
                       family ? family : "missing", family ? ", a kind of model that is not supported" : "");
    else
        mt_config_read_family(&config, shape);
    json_decref(config.root), json_decref(config.beside);
    memcpy(note, config.note, sizeof config.note);
    return config.failed ? -1 : 0;
}

/* True if two patterns have the same layers: one of them may have stages (|) and modules (/). */
static bool mt_patterns_equal(const char *a, const char *b) {
    for (;; a++, b++) {
        while (*a == '|') a++;
        while (*b == '|') b++;
        bool ends = !*a || *a == '/', other_ends = !*b || *b == '/';
        if (ends || other_ends) return ends && other_ends;
        if (*a != *b) return false;
    }
}

/* True if a given value means another model than the weights are of. A list of layers can be written in several ways;
 * the width of the MLP has no meaning where every layer has experts of a given width; 0 query groups are one per head,
 * and 0 value channels are those of keys; biases of all linear layers include those of queries, keys and values. */
static bool mt_option_differs(const mt_run_options *options, const mt_run_options *shape, const mt_option *row) {
    mt_error ignored;
    mt_layer_freq_rule rule;
    if (row->type == MT_REALS) return *mt_option_real(options, row) != *mt_option_real(shape, row); // files hold one
    int64_t count = shape->stack.num_experts > 0 ? shape->stack.num_layers : 0;
    char *given = mt_option_text(options, row), *theirs = mt_option_text(shape, row);
    bool differs = strcmp(given, theirs) != 0;
    bool has_layers = mt_option_names_layers(row, &rule) && (rule != MT_EXPERT_LAYERS || count > 0);
    bool all = !*theirs && has_layers && rule == MT_ROPE_LAYERS; // have RoPE
    if (differs && has_layers && *given && (*theirs || all)) {
        char *asked = mt_layer_freq_expand(given, rule, shape->stack.num_layers, true, &ignored);
        char *stored = all ? NULL : mt_layer_freq_expand(theirs, rule, shape->stack.num_layers, false, &ignored);
        differs = !asked || (all ? strchr(asked, '0') != NULL : !stored || strcmp(asked, stored) != 0);
        free(asked), free(stored);
    } else if (differs && count > 0 && row->offset == MT_AT(stack.ffn_hidden_size)) {
        char *stored = mt_layer_freq_expand(shape->moe_layer_freq, MT_EXPERT_LAYERS, count, false, &ignored);
        differs = !stored || strchr(stored, '0') || !MT_GIVEN(options, stack.moe_ffn_hidden_size);
        free(stored);
    } else if (differs && row->offset == MT_AT(hybrid_override_pattern)) {
        differs = !mt_patterns_equal(given, theirs);
    } else if (differs && row->offset == MT_AT(stack.num_query_groups)) {
        differs =
            options->stack.num_query_groups != 0 || shape->stack.num_query_groups != shape->stack.num_attention_heads;
    } else if (differs && row->offset == MT_AT(stack.value_channels)) {
        differs = shape->stack.value_channels != 0 || options->stack.value_channels != shape->stack.kv_channels;
    } else if (differs && row->offset == MT_AT(stack.add_qkv_bias)) {
        differs = !shape->add_bias_linear || (!options->stack.add_qkv_bias && !options->add_bias_linear);
    }
    free(given), free(theirs);
    return differs;
}

/* Options that a dense model lacks, which --moe-use-upcycling gives it. */
static bool mt_option_is_of_experts(const mt_option *row) {
    return strncmp(row->name, "moe-", 4) == 0 || row->offset == MT_AT(stack.num_experts);
}

/* Weights were trained with one value of these options; another value that the user gave is an error. */
static int mt_options_check_weights(const mt_run_options *options, const mt_run_options *shape, const char *path,
                                    mt_error *error) {
    bool learned = shape->stack.position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !mt_options_gave(options, row->offset)) continue;
        if (row->origin != MT_OF_WEIGHTS && !(learned && row->offset == MT_AT(stack.max_position_embeddings))) continue;
        if (options->stack.moe_use_upcycling && mt_option_is_of_experts(row)) continue;
        if (!mt_option_differs(options, shape, row)) continue;
        char *given = mt_option_text(options, row), *theirs = mt_option_text(shape, row);
        mt_error_set(error, "--%s is %.60s, but the weights have %.60s (%.200s); leave the option out", row->name,
                     given, *theirs ? theirs : "none", path);
        free(given), free(theirs);
        return -1;
    }
    return 0;
}

int mt_options_take_shape(mt_run_options *options, const char *json, int64_t bytes, const char *path, bool has_weights,
                          mt_error *error) {
    mt_run_options shape;
    char note[MT_NOTE] = "";
    mt_options_default(&shape);
    int result = mt_config_read(&shape, json, bytes, path, options->language_model_only, note, error);
    if (!result && *note && mt_launch_rank() <= 0) fprintf(stderr, "warning: %s: %s\n", path, note);
    const mt_options *halves = &shape.stack; // --num-layers of an encoder-decoder is its encoder's
    if (!result && halves->decoder_num_layers > 0 && options->stack.num_layers == halves->encoder_num_layers)
        options->stack.num_layers = halves->num_layers;
    if (!result && has_weights && options->stack.moe_use_upcycling && shape.stack.num_experts > 0)
        result = mt_error_set(error, "--moe-use-upcycling: the model of %.200s has experts; leave it out", path);
    if (!result && has_weights && options->stack.moe_use_upcycling) {
        options->upcycled_family = shape.stack.hf_family;
        options->finetune = true; // its optimizer's state is of other parameters
    }
    if (!result && has_weights) {
        mt_options_derive_sizes(&shape);
        result = mt_options_check_weights(options, &shape, path, error);
    }
    if (!result) {
        // config.json has biases apart; --disable-bias-linear changes all of them.
        bool same_biases = !MT_GIVEN(options, add_bias_linear) || options->add_bias_linear == shape.add_bias_linear;
        options->stack.attention_output_bias = same_biases && shape.stack.attention_output_bias;
        options->stack.mlp_bias = same_biases && shape.stack.mlp_bias;
        options->stack.moe_router_group_best = shape.stack.moe_router_group_best;
        options->mtp_layers_stored = shape.mtp_layers_stored;
        options->bos_token_id = shape.bos_token_id;
        options->eos_token_id = shape.eos_token_id;
        mt_string_set(&options->special_tokens, shape.special_tokens);
        options->stack.hf_family = shape.stack.hf_family;
        options->stack.head_type = shape.stack.head_type;
        memcpy(options->weight_block_size, shape.weight_block_size, sizeof shape.weight_block_size);
        for (const mt_option *row = mt_option_table; row->help; row++) {
            if (!row->name || row->origin == MT_OF_RUN || mt_options_gave(options, row->offset)) continue;
            mt_option_copy(options, &shape, row);
            mt_option_set_origin(options, row, MT_ORIGIN_MODEL);
        }
    }
    mt_options_free(&shape);
    return result;
}

int mt_options_check_shape(const mt_run_options *options, const char *json, int64_t bytes, const char *option,
                           const char *path, mt_head_type *head, mt_error *error) {
    mt_run_options shape;
    char note[MT_NOTE];
    mt_options_default(&shape);
    int status = mt_config_read(&shape, json, bytes, path, options->language_model_only, note, error);
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (row->name && row->origin != MT_OF_RUN && mt_options_gave(options, row->offset))
            mt_option_copy(&shape, options, row); // sizes may derive from it
    mt_options_derive_sizes(&shape);
    for (const mt_option *row = mt_option_table; row->help && status == 0; row++) {
        bool drops = row->offset == MT_AT(stack.hidden_dropout) ||
                     row->offset == MT_AT(stack.attention_dropout); // --load's holds
        if (!row->name || row->origin == MT_OF_RUN || drops || mt_options_gave(options, row->offset)) continue;
        if (!mt_option_differs(&shape, options, row)) continue;
        char *ours = mt_option_text(&shape, row), *theirs = mt_option_text(options, row);
        status = mt_error_set(error,
                              "%s %s: has --%s %.60s, but the model of --load %s has %.60s; leave %s out, or name "
                              "another folder",
                              option, path, row->name, ours, options->load, theirs, option);
        free(ours), free(theirs);
    }
    if (head) *head = shape.stack.head_type;
    mt_options_free(&shape);
    return status;
}

int mt_options_read_hf_config(mt_run_options *options, const char *json, int64_t bytes, const char *path,
                              mt_error *error) {
    return mt_options_take_shape(options, json, bytes, path, false, error);
}

/* ---- writing */

/* The value of a key in the options of a model. */
static json_t *mt_config_value(const mt_hf_key *key, const mt_run_options *o) {
    const mt_option *row = key->flags & (PLAIN | FIXED) ? NULL : mt_option_of(key->offset);
    const char *names = mt_activation_rows[mt_options_activation(&o->stack)].config_names;
    if (key->flags & (PLAIN_ACTIVATION | GATED_ACTIVATION)) return json_stringn(names, strcspn(names, "|"));
    if (key->conversion) return json_integer(key->conversion->write(&o->stack));
    bool is_flag = key->flags & FIXED && (strncmp(key->absent, "true", 4) == 0 || strcmp(key->absent, "false") == 0);
    if (is_flag) return json_boolean(*key->absent == 't');
    if (key->flags & FIXED && *key->absent >= '0' && *key->absent <= '9') return json_real(strtod(key->absent, NULL));
    if (key->flags & FIXED) return json_stringn(key->absent, strcspn(key->absent, "|"));
    if (row && row->type == MT_INT) return json_integer(*mt_option_int(o, row));
    if (row && (row->type == MT_REAL || row->type == MT_REALS)) return json_real(*mt_option_real(o, row));
    if (!row || row->type == MT_FLAG || row->type == MT_NO)
        return json_boolean(*(const bool *)((const char *)o + key->offset) != ((key->flags & NEGATED) != 0));
    char *text = mt_option_text(o, row);
    json_t *value = json_string(text);
    free(text);
    return value;
}

/* The keys that the families (or types) of `mask` have. */
static void mt_config_write_keys(json_t *object, const mt_hf_key *keys, size_t count, uint64_t mask,
                                 const mt_run_options *o) {
    for (const mt_hf_key *key = keys; key < keys + count; key++) {
        if (!mt_hf_key_counts(keys, key, mask) || key->flags & READ || !key->key) continue;
        json_t *value = mt_config_value(key, o);
        bool zero = (json_is_number(value) && json_number_value(value) == 0) || json_is_false(value);
        bool none = key->flags & OWN && json_is_string(value) && !*json_string_value(value);
        if (none)
            (void)0; // an option that is not given
        else if (!zero || !(key->flags & (NULLABLE | NONZERO)))
            json_object_set(object, key->key, value);
        else if (key->flags & NULLABLE)
            json_object_set_new(object, key->key, json_null());
        json_decref(value);
    }
}

/* RoPE's parameters as an object; the newer form holds the base too. */
static json_t *mt_config_rope(const mt_run_options *o, bool newer) {
    json_t *rope = json_object();
    bool partial = newer && mt_hf_mask(o->stack.hf_family) & PARTIAL;
    if (partial) mt_json_set_real(rope, "partial_rotary_factor", o->stack.rotary_percent);
    mt_json_set_string(rope, "rope_type", mt_rope_types[o->stack.rope_scaling_type]);
    if (newer) mt_json_set_real(rope, "rope_theta", o->stack.rotary_base);
    mt_config_write_keys(rope, mt_rope_keys, NUM_ROPE_KEYS, 1u << o->stack.rope_scaling_type, o);
    if (o->stack.rope_scaling_type == MT_ROPE_SCALING_YARN && !o->stack.yarn_correction_range_round_to_int)
        mt_json_set_bool(rope, "truncate", false); // older versions of transformers warn of the key
    if (o->stack.hf_family == MT_HF_MINISTRAL3) {
        mt_json_set_real(rope, "llama_4_scaling_beta", o->stack.llama_4_scaling_beta);
        mt_json_set_int(rope, "max_position_embeddings", o->stack.max_position_embeddings);
        mt_json_set_string(rope, "type", mt_rope_types[o->stack.rope_scaling_type]);
    }
    return rope;
}

/* The first layer with experts; num_layers without. */
static int64_t mt_first_expert_layer(const mt_options *o) {
    int64_t first = 0;
    while (first < o->num_layers && !mt_layer_has_experts(o, first)) first++;
    return first;
}

/* ERNIE's first and last layer with experts, and their distance. */
static void mt_config_write_layer_range(json_t *root, const mt_options *o) {
    int64_t first = mt_first_expert_layer(o), second = first + 1, last = o->num_layers - 1;
    while (second < o->num_layers && !mt_layer_has_experts(o, second)) second++;
    while (last > first && !mt_layer_has_experts(o, last)) last--;
    mt_json_set_real(root, "moe_norm_min", 1e-12);
    mt_json_set_int(root, "moe_layer_start_index", first);
    mt_json_set_int(root, "moe_layer_end_index", last);
    mt_json_set_int(root, "moe_layer_interval", second < o->num_layers ? second - first : 1);
}

/* The layers with sliding windows, without RoPE, and with experts. */
static void mt_config_write_layers(json_t *root, uint64_t mask, const mt_options *o) {
    json_t *types = json_array(), *dense = json_array(), *rope = json_array(), *mlps = json_array();
    json_t *indexers = json_array();
    int64_t full = 0;
    for (int64_t i = 0; i < o->num_layers; i++) {
        mt_layer_kind kind = mt_layer_kind_of(o, i);
        bool has_experts = mt_layer_has_experts(o, i);
        if (full == i && kind.window == 0) full++;
        const char *type = kind.window > 0 ? "sliding_attention" : mt_layer_type(&kind);
        json_array_append_new(indexers, json_string(kind.shares_indices ? "shared" : "full"));
        json_array_append_new(types, json_string(type));
        json_array_append_new(rope, json_integer(kind.rope != MT_ROPE_NONE));
        json_array_append_new(mlps, json_string(has_experts ? "sparse" : "dense"));
        if (!has_experts) json_array_append_new(dense, json_integer(i));
    }
    if (mask &
        (DELTA | LFM2 | QWENS | SMOLLM3 | ROPE_BY_TYPE | GPT_OSS | DOTS1 | EXAONES | GRANITE | KIMI_LINEAR | SPARSE))
        json_object_set(root, "layer_types", types);
    if (mask & GLM_MOE_DSA) {
        json_object_set(root, "indexer_types", indexers);
        mt_json_set_int(root, "index_topk_freq", o->dsa_indexer_topk_freq);
        mt_json_set_int(root, "index_skip_topk_offset", mt_max(o->dsa_indexer_skip_topk_offset, 1));
    }
    if (mask & NEMOTRON_H) json_object_set(root, "layers_block_type", types);
    if (mask & NEMOTRON_H && o->mtp_hybrid_layers) {
        json_object_set_new(root, "mtp_layers_block_type", mt_config_half_types(o->mtp_hybrid_layers));
        mt_json_set_string(root, "mtp_hybrid_override_pattern", o->mtp_hybrid_layers);
    }
    if (mask & NEMOTRON_H && o->hybrid_layers) // for transformers before 5
        mt_json_set_string(root, "hybrid_override_pattern", o->hybrid_layers);
    if (mask & DOTS1) mt_json_set_int(root, "max_window_layers", full);
    if (mask & LAYER_LIST) json_object_set(root, "mlp_layer_types", mlps);
    if (mask & (QWENS | SMOLLM3)) {
        mt_json_set_bool(root, "use_sliding_window", o->window_size > 0);
        mt_json_set_int(root, "max_window_layers", full); // for transformers before 5
    }
    if (mask & SMOLLM3) json_object_set(root, "no_rope_layers", rope);
    if (mask & (QWEN_MOE | QWEN3_NEXT)) {
        json_object_set(root, "mlp_only_layers", dense);
        mt_json_set_int(root, "decoder_sparse_step", 1);
    }
    if (mask & (LEADING_DENSE | GLM4_MOE_LITE))
        mt_json_set_int(root, "first_k_dense_replace", mt_first_expert_layer(o));
    if (mask & ERNIE4_5_MOE) mt_config_write_layer_range(root, o);
    json_decref(types), json_decref(dense), json_decref(rope), json_decref(mlps);
    json_decref(indexers);
}

/* RoPE's parameters for each type of layer. */
static json_t *mt_config_rope_of_types(const mt_run_options *o) {
    json_t *all = json_object(), *window = json_object();
    if (mt_hf_mask(o->stack.hf_family) & PARTIAL)
        mt_json_set_real(window, "partial_rotary_factor", o->stack.rotary_percent);
    mt_json_set_string(window, "rope_type", "default");
    mt_json_set_real(window, "rope_theta",
                     o->stack.window_rotary_base > 0 ? o->stack.window_rotary_base : o->stack.rotary_base);
    json_object_set_new(all, "full_attention", mt_config_rope(o, true));
    json_object_set_new(all, "sliding_attention", window);
    return all;
}

/* Keys of Mamba-2, and of Granite's attention. */
static void mt_config_write_mamba(json_t *root, uint64_t mask, const mt_options *o) {
    int64_t expand = o->mamba_num_heads * o->mamba_head_dim / mt_max(o->hidden_size, 1);
    json_t *low = json_real(o->mamba_dt_limit_low), *high = json_pack("{ss}", "__float__", "Infinity");
    if (o->mamba_dt_limit_high > 0) json_decref(high), high = json_real(o->mamba_dt_limit_high);
    json_object_set_new(root, "time_step_limit", json_pack("[oo]", low, high));
    mt_json_set_int(root, mask & GRANITE ? "mamba_expand" : "expand", mt_max(expand, 1));
    if (!(mask & GRANITE)) return;
    double usual = 1 / sqrt((double)(o->hidden_size / mt_max(o->num_attention_heads, 1)));
    mt_json_set_real(root, "attention_multiplier", o->softmax_scale == 0 ? usual : o->softmax_scale);
    mt_json_set_string(root, "position_embedding_type",
                       o->position_embedding_type == MT_POSITION_ROPE ? "rope" : "nope");
}

/* Kimi delta attention: the object of released files, and the keys of transformers 5. */
static void mt_config_write_kda(json_t *root, const mt_options *o) {
    json_t *linear = json_object(), *kda = json_array(), *full = json_array();
    for (int64_t i = 0; i < o->num_layers; i++)
        json_array_append_new(mt_mixer_attends(mt_layer_kind_of(o, i).mixer) ? full : kda, json_integer(i + 1));
    json_object_set_new(linear, "kda_layers", kda), json_object_set_new(linear, "full_attn_layers", full);
    mt_json_set_int(linear, "head_dim", o->linear_key_head_dim);
    mt_json_set_int(linear, "num_heads", o->linear_num_key_heads);
    mt_json_set_int(linear, "short_conv_kernel_size", o->linear_conv_kernel_dim);
    json_object_set_new(root, "linear_attn_config", linear);
    mt_json_set_int(root, "linear_head_dim", o->linear_key_head_dim);
    mt_json_set_int(root, "linear_num_heads", o->linear_num_key_heads);
    mt_json_set_int(root, "linear_conv_kernel_dim", o->linear_conv_kernel_dim);
    mt_json_set_int(root, "head_dim", o->qk_pos_emb_head_dim);
}

/* Keys of Llama's block that are no single option. */
static void mt_config_write_block(json_t *root, uint64_t mask, const mt_run_options *o) {
    bool by_type = mask & ROPE_BY_TYPE;
    if (mask & MAMBA) mt_config_write_mamba(root, mask, &o->stack);
    if (mask & KIMI_LINEAR) mt_config_write_kda(root, &o->stack);
    if (mask & (NEMOTRON_H | KIMI_LINEAR)) {
        mt_config_write_layers(root, mask, &o->stack);
        return;
    }
    if (mask & MINIMAX_M2) // as in released files
        mt_json_set_int(root, "rotary_dim", (int64_t)((double)o->stack.kv_channels * o->stack.rotary_percent));
    json_object_set_new(root, "rope_parameters", by_type ? mt_config_rope_of_types(o) : mt_config_rope(o, true));
    if (mask & GEMMA3) // these two: for transformers before 5
        mt_json_set_real(root, "rope_local_base_freq",
                         o->stack.window_rotary_base > 0 ? o->stack.window_rotary_base : o->stack.rotary_base);
    if (!by_type)
        json_object_set_new(root, "rope_scaling",
                            o->stack.rope_scaling_type == MT_ROPE_SCALING_NONE ? json_null()
                                                                               : mt_config_rope(o, false));
    if (mask & MIMO_V2_FLASH) {
        mt_json_set_int(root, "swa_num_attention_heads", o->stack.num_attention_heads);
        mt_json_set_int(root, "swa_num_key_value_heads", 2 * o->stack.num_query_groups);
    }
    mt_config_write_layers(root, mask, &o->stack);
}

char *mt_options_write_hf_config(const mt_run_options *o) {
    const char *dtype = o->stack.bf16 ? "bfloat16" : o->stack.fp16 ? "float16" : "float32";
    uint64_t mask = mt_hf_mask(o->stack.hf_family);
    const struct mt_hf_variant *variant = mt_hf_variant_of(mask);
    char name[80];
    mt_hf_key key;
    json_t *root = json_object();
    if (mask & DEEPSEEK_V3 && mt_num_expert_layers(&o->stack) > 0) mask |= DEEPSEEK_MOE;
    if (mask & NEMOTRON_H && mt_num_expert_layers(&o->stack) > 0) mask |= NEMOTRON_MOE;
    if (mask & GRANITE) mask |= mt_num_expert_layers(&o->stack) > 0 ? GRANITE_MOE : GRANITE_DENSE;
    mt_config_write_head(root, mt_hf_families[o->stack.hf_family].model_class, &o->stack);
    mt_json_set_string(root, "model_type", mt_hf_families[o->stack.hf_family].model_type);
    mt_config_write_keys(root, mt_hf_keys, NUM_KEYS, mask, o);
    if (variant) mt_config_write_keys(root, variant->keys, NUM_OWN_KEYS, variant->family, o);
    mt_special_tokens_set(root, o, true);
    mt_json_set_string(root, "dtype", dtype);
    mt_json_set_string(root, "torch_dtype", dtype); // for transformers before 5
    if (mask & BLOCKS) mt_config_write_block(root, mask, o);
    if (mask & T5) mt_config_write_t5(root, &o->stack);
    for (const mt_option *row = mt_option_table; mask & MEGATRON && row->help; row++)
        if (mt_hf_key_of(&key, name, row)) mt_config_write_keys(root, &key, 1, MEGATRON, o);
    if (o->stack.vision.tower != MT_VISION_NONE) root = mt_config_write_tower(root, o);
    char *text = mt_json_print(root);
    json_decref(root);
    return text;
}

/* ---- the family of a model */

/* Options of the model that stand for others: activation, biases and groups are compared as such. */
static bool mt_option_stands_for_others(const mt_option *row) {
    for (int i = 0; i < MT_NUM_ACTIVATIONS; i++)
        if (mt_activation_rows[i].field > 0 && row->offset == MT_AT(stack) + mt_activation_rows[i].field) return true;
    return row->offset == MT_AT(add_bias_linear) || row->offset == MT_AT(group_query_attention);
}

/* True if a finished model is the same as one that was read. */
static bool mt_models_equal(const mt_run_options *model, const mt_run_options *read) {
    bool groups = mt_num_expert_layers(&model->stack) > 0 && model->stack.moe_router_num_groups > 0;
    if (model->stack.attention_output_bias != read->stack.attention_output_bias ||
        model->stack.mlp_bias != read->stack.mlp_bias)
        return false;
    if (mt_options_activation(&model->stack) != mt_options_activation(&read->stack)) return false;
    if (groups && model->stack.moe_router_group_best != read->stack.moe_router_group_best) return false;
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (row->name && row->origin != MT_OF_RUN && !mt_option_stands_for_others(row) &&
            mt_option_differs(model, read, row))
            return false;
    return true;
}

/* True if the family's config.json, written and read again, gives the same model. */
static bool mt_family_fits(mt_hf_family family, const mt_run_options *o) {
    mt_run_options written = *o, read;
    mt_error unread;
    char note[MT_NOTE];
    if (family == MT_HF_UNKNOWN || family == MT_HF_MEGATRON) return family == MT_HF_MEGATRON; // see check_names
    written.stack.hf_family = family;
    char *json = mt_options_write_hf_config(&written);
    mt_options_default(&read);
    bool fits = mt_config_read(&read, json, (int64_t)strlen(json), "config.json", false, note, &unread) == 0;
    if (fits) {
        mt_options_derive_sizes(&read);
        mt_options_derive_biases(&read);
        fits = mt_models_equal(o, &read);
    }
    mt_options_free(&read);
    free(json);
    return fits;
}

void mt_options_derive_family(mt_run_options *o) {
    if (mt_family_fits(o->stack.hf_family, o)) return;
    o->stack.hf_family = MT_HF_UNKNOWN; // no model fits it
    while (!mt_family_fits(o->stack.hf_family, o)) o->stack.hf_family++;
}

/* Appends the names of the given options of the model without which `family` computes it; of all that were given, where
 * no single one is the cause. */
static void mt_family_append_causes(char *text, int room, mt_hf_family family, const mt_run_options *o) {
    int length = 0;
    mt_run_options plain;
    mt_options_default(&plain);
    for (int single = 1; single >= 0 && length == 0; single--) {
        for (const mt_option *row = mt_option_table; row->help; row++) {
            bool is_given = row->name && row->origin == MT_OF_MODEL && mt_options_gave(o, row->offset);
            bool is_text = row->type == MT_STRING || row->type == MT_OPTIONAL;
            mt_run_options without = *o; // borrows the texts and lists
            if (!is_given || (single && is_text)) continue;
            if (single) mt_option_copy(&without, &plain, row);
            if (single && !mt_family_fits(family, &without)) continue;
            if (length < room)
                length += snprintf(text + length, (size_t)(room - length), "%s--%s", length ? ", " : "", row->name);
        }
    }
    mt_options_free(&plain);
}

int mt_options_check_names(const mt_run_options *o, mt_hf_family stored, mt_error *error) {
    char causes[300] = "";
    if (o->stack.decoder_num_layers > 0 && o->stack.hf_family != MT_HF_T5)
        return mt_error_set(error, "--decoder-num-layers: an encoder-decoder is one of T5: with --disable-bias-linear, "
                                   "--softmax-scale 1, one rate of dropout, a key head for each query head, and "
                                   "--logits-scaling 1 or sqrt(--hidden-size)");
    if (o->stack.vision.tower != MT_VISION_NONE &&
        mt_vision_type_of(o->stack.hf_family, o->stack.vision.tower) == NUM_VISION_TYPES)
        return mt_error_set(
            error, "--vision-tower: no model of the Qwen-VL line has this decoder; its config.json would "
                   "be of none: take a decoder of Qwen2 for qwen2_5, of Qwen3 or Qwen3.5 with or without experts for "
                   "qwen3");
    if (o->stack.vision.tower != MT_VISION_NONE && o->stack.hf_family == MT_HF_QWEN3_MOE &&
        o->stack.moe_router_pre_softmax)
        return mt_error_set(error,
                            "--moe-router-pre-softmax: the router of Qwen3-VL with experts normalises the chosen "
                            "experts' probabilities; leave it out");
    bool same = mt_hf_families[stored].names == mt_hf_families[o->stack.hf_family].names;
    if (!o->load || stored == MT_HF_UNKNOWN || same || o->stack.moe_use_upcycling) return 0;
    mt_family_append_causes(causes, sizeof causes, stored, o);
    return mt_error_set(error, "--load %s: its \"model_type\" is %s, and no model of this type has %s; leave that out",
                        o->load, mt_hf_family_name(stored), *causes ? causes : "this shape");
}
