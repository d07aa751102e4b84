/* option_table.c: the row of every option, and the value of an option as its row describes it. */
#include "option_table.h"

#include "../tokens/chat.h"
#include "../tokens/tokenizer.h"
#include "option_rules.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most rows need and exclude nothing

_Static_assert(offsetof(mt_run_options, given) <= 8 * sizeof((mt_run_options *)0)->given,
               "a bit of given for every byte");

#define MT_MODULE_CHOICE(name, choice)           "|" choice
#define MT_PLACEMENT_CHOICE(name, choice, norms) "|" choice

const mt_option mt_option_table[] = {
    {.help = "model"},
    {"num-layers", MT_INT, MT_AT(stack.num_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,10000]",
     "transformer layers; of an encoder-decoder those of its encoder"},
    {"encoder-num-layers", MT_INT, MT_AT(stack.encoder_num_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,10000]",
     "layers of the encoder of an encoder-decoder (default: --num-layers)", .needs = "any: decoder-num-layers"},
    {"decoder-num-layers", MT_INT, MT_AT(stack.decoder_num_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,10000]",
     "an encoder-decoder as T5, with so many layers in its decoder, which attend to the encoder's output too",
     .needs = "any: position-embedding-type relative, any: normalization RMSNorm",
     .excludes = "any: multi-latent-attention, any: experimental-attention-variant, any: hybrid-override-pattern, "
                 "any: num-experts, any: mtp-num-layers, any: window-size, any: norm-placement after|both, "
                 "any: qk-layernorm, any: attention-output-gate, any: softmax-type off-by-one|learnable, "
                 "any: value-channels"},
    {"hidden-size", MT_INT, MT_AT(stack.hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,1048576]",
     "width of hidden states"},
    {"ffn-hidden-size", MT_INT, MT_AT(stack.ffn_hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,16777216]",
     "width of the MLP (default: 4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a multiple of 64)"},
    {"num-attention-heads", MT_INT, MT_AT(stack.num_attention_heads), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "query heads"},
    {"relative-attention-num-buckets", MT_INT, MT_AT(stack.relative_attention_num_buckets), MT_TRAIN, MT_OF_WEIGHTS,
     "32", "[4,65536]", "numbers that a head adds to scores by the distance of key and query",
     .needs = "position-embedding-type relative"},
    {"relative-attention-max-distance", MT_INT, MT_AT(stack.relative_attention_max_distance), MT_TRAIN, MT_OF_WEIGHTS,
     "128", "[2,1073741824]", "distance from which on all keys have one of these numbers",
     .needs = "position-embedding-type relative"},
    {"group-query-attention", MT_FLAG, MT_AT(group_query_attention), MT_TRAIN, MT_OF_MODEL, NULL, NULL,
     "groups of query heads share a key and value head"},
    {"num-query-groups", MT_INT, MT_AT(stack.num_query_groups), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[0,65536]",
     "key and value heads; 0: one per query head (default: 0, with --group-query-attention 1)"},
    {"kv-channels", MT_INT, MT_AT(stack.kv_channels), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "channels of a head (default: hidden size / heads)"},
    {"value-channels", MT_INT, MT_AT(stack.value_channels), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "channels of a value head (default: --kv-channels)", .excludes = "multi-latent-attention, attention-output-gate",
     .own = true},
    {"multi-latent-attention", MT_FLAG, MT_AT(stack.multi_latent_attention), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "multi-head latent attention, as in DeepSeek-V2 and V3: keys and values are computed from one small latent",
     .excludes = "group-query-attention, rotary-percent, add-qkv-bias"},
    {"q-lora-rank", MT_INT, MT_AT(stack.q_lora_rank), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[0,1048576]",
     "width of the latent of queries; 0: queries have no latent (default: 0)", .needs = "multi-latent-attention"},
    {"kv-lora-rank", MT_INT, MT_AT(stack.kv_lora_rank), MT_TRAIN, MT_OF_WEIGHTS, "32", "[1,1048576]",
     "width of the latent of keys and values", .needs = "multi-latent-attention"},
    {"qk-head-dim", MT_INT, MT_AT(stack.qk_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "128", "[1,65536]",
     "channels of a query or key head without RoPE", .needs = "multi-latent-attention"},
    {"qk-pos-emb-head-dim", MT_INT, MT_AT(stack.qk_pos_emb_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "64", "[2,65536]",
     "RoPE channels of a query or key head; all key heads share theirs", .needs = "multi-latent-attention"},
    {"v-head-dim", MT_INT, MT_AT(stack.v_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "128", "[1,65536]",
     "channels of a value head", .needs = "multi-latent-attention"},
    {"max-position-embeddings", MT_INT, MT_AT(stack.max_position_embeddings), MT_TRAIN, MT_OF_MODEL, NULL,
     "[1,1073741824]", "number of positions (default: --seq-length)"},
    {"vocab-size", MT_INT, MT_AT(stack.vocab_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,16777216]",
     "tokens of the vocabulary (default: the tokenizer's)"},
    {"make-vocab-size-divisible-by", MT_INT, MT_AT(make_vocab_size_divisible_by), MT_TRAIN, MT_OF_RUN, "128",
     "[1,1048576]", "pad the vocabulary to a multiple of this times the tensor-parallel size"},
    {"normalization", MT_CHOICE, MT_AT(stack.normalization), MT_TRAIN, MT_OF_WEIGHTS, "LayerNorm", "LayerNorm|RMSNorm",
     "type of norm"},
    {"norm-epsilon", MT_REAL, MT_AT(stack.norm_epsilon), MT_TRAIN, MT_OF_WEIGHTS, "1e-5", "(0,1)",
     "epsilon of the norms"},
    {"latent-norm-epsilon", MT_REAL, MT_AT(stack.latent_norm_epsilon), MT_TRAIN, MT_OF_WEIGHTS, NULL, "(0,1)",
     "epsilon of the norms of latents (default: --norm-epsilon, as in Megatron; DeepSeek's models have 1e-6)",
     .needs = "multi-latent-attention", .own = true},
    {"layernorm-epsilon", MT_REAL, MT_AT(stack.norm_epsilon), MT_TRAIN, MT_OF_WEIGHTS, "1e-5", "(0,1)",
     "older name of --norm-epsilon"},
    {"norm-placement", MT_CHOICE, MT_AT(stack.norm_placement), MT_TRAIN, MT_OF_WEIGHTS, "before",
     &MT_NORM_PLACEMENTS(MT_PLACEMENT_CHOICE)[1], // without the first |
     "norms of the input of attention and MLP, of their output (as in OLMo 3), or of both (as in Gemma 3)",
     .own = true},
    {"layernorm-zero-centered-gamma", MT_FLAG, MT_AT(stack.layernorm_zero_centered_gamma), MT_TRAIN, MT_OF_WEIGHTS,
     NULL, NULL, "norms scale by 1 + weight, and weights start as 0"},
    {"apply-layernorm-1p", MT_FLAG, MT_AT(stack.layernorm_zero_centered_gamma), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "older name of --layernorm-zero-centered-gamma"},
    {"embedding-multiplier", MT_REAL, MT_AT(stack.embedding_multiplier), MT_TRAIN, MT_OF_WEIGHTS, "1", "(0,1048576]",
     "factor of the embedding's output (Gemma: square root of the hidden size)", .own = true},
    {"residual-multiplier", MT_REAL, MT_AT(stack.residual_multiplier), MT_TRAIN, MT_OF_WEIGHTS, "1", "(0,1048576]",
     "factor of the outputs that blocks add to the residual stream (Granite)", .own = true},
    {"logits-scaling", MT_REAL, MT_AT(stack.logits_scaling), MT_TRAIN, MT_OF_WEIGHTS, "1", "(0,1048576]",
     "divisor of the logits (Granite)", .excludes = "any: mtp-num-layers", .own = true},
    {"swiglu", MT_FLAG, MT_AT(stack.swiglu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL, "gated MLP with SiLU instead of GELU",
     .excludes = "any: openai-gelu, any: squared-relu, any: geglu"},
    {"geglu", MT_FLAG, MT_AT(stack.geglu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "gated MLP with the tanh approximation of GELU, as in Gemma", .excludes = "any: openai-gelu, any: squared-relu",
     .own = true},
    {"quick-geglu", MT_FLAG, MT_AT(stack.quick_geglu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "gated MLP with x sigmoid(1.702 x), as in gpt-oss",
     .excludes = "any: openai-gelu, any: squared-relu, any: geglu, any: swiglu"},
    {"activation-func-clamp-value", MT_REAL, MT_AT(stack.activation_func_clamp_value), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     "(0,1048576]",
     "gated MLP: the gate is at most this, the other operand within +- this (gpt-oss: 7; default: no bound)"},
    {"glu-linear-offset", MT_REAL, MT_AT(stack.glu_linear_offset), MT_TRAIN, MT_OF_WEIGHTS, "0", "[-1048576,1048576]",
     "gated MLP: is added to the operand beside the gate (gpt-oss: 1)"},
    {"relu", MT_FLAG, MT_AT(stack.relu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL, "ReLU instead of GELU, as in T5",
     .excludes = "any: openai-gelu, any: squared-relu, any: geglu, any: swiglu, any: quick-geglu", .own = true},
    {"squared-relu", MT_FLAG, MT_AT(stack.squared_relu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "squared ReLU instead of GELU (So et al., \"Primer\")", .excludes = "any: openai-gelu"},
    {"openai-gelu", MT_FLAG, MT_AT(stack.openai_gelu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "tanh approximation of GELU, as in GPT-2"},
    {"qk-layernorm", MT_FLAG, MT_AT(stack.qk_layernorm), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "norm of each query and key head; with --multi-latent-attention: norms of the latents"},
    {"qk-layernorm-all-heads", MT_FLAG, MT_AT(stack.qk_layernorm_all_heads), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "one norm over all query heads and one over all key heads, as in OLMo 3", .needs = "qk-layernorm",
     .excludes = "multi-latent-attention", .own = true},
    {"untie-embeddings-and-output-weights", MT_FLAG, MT_AT(stack.untie_embeddings_and_output_weights), MT_TRAIN,
     MT_OF_WEIGHTS, NULL, NULL, "separate weights for the output layer"},
    {"disable-bias-linear", MT_NO, MT_AT(add_bias_linear), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "linear layers without biases"},
    {"add-qkv-bias", MT_FLAG, MT_AT(stack.add_qkv_bias), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "biases for queries, keys and values even with --disable-bias-linear"},
    {"init-method-std", MT_REAL, MT_AT(stack.init_method_std), MT_TRAIN, MT_OF_MODEL, "0.02", "[0,100]",
     "standard deviation of the initial weights"},
    {"hidden-dropout", MT_REAL, MT_AT(stack.hidden_dropout), MT_TRAIN, MT_OF_MODEL, "0.1", "[0,1)",
     "dropout of embeddings and of the outputs of attention and MLP (default with --stage rm, dpo and rl: 0, "
     "whatever config.json has)"},
    {"attention-dropout", MT_REAL, MT_AT(stack.attention_dropout), MT_TRAIN, MT_OF_MODEL, "0.1", "[0,1)",
     "dropout of attention probabilities (default with --stage rm, dpo and rl: 0, whatever config.json has)"},
    {"window-size", MT_INT, MT_AT(stack.window_size), MT_TRAIN, MT_OF_MODEL, NULL, "[1,1073741824]",
     "sliding-window attention: number of keys that a query sees, its own included, or Megatron's (N-1,0) (default: "
     "all)"},
    {"window-attn-skip-freq", MT_STRING, MT_AT(window_attn_skip_freq), MT_TRAIN, MT_OF_MODEL, NULL,
     "N or '([1]*3+[0]*1)*2'",
     "layers with the sliding window: all but every N-th, or a 1 (window) or 0 (all keys) for each layer (default: all "
     "layers have it)",
     .needs = "window-size"},
    {"softmax-scale", MT_REAL, MT_AT(stack.softmax_scale), MT_TRAIN, MT_OF_WEIGHTS, NULL, "(0,1048576]",
     "scale of queries times keys (default: 1 / square root of a head's channels)"},
    {"softmax-type", MT_CHOICE, MT_AT(stack.softmax_type), MT_TRAIN, MT_OF_WEIGHTS, "vanilla",
     "vanilla|off-by-one|learnable",
     "sum of attention's exponentials; off-by-one: plus 1; learnable: plus the exponential of a parameter of each head "
     "(attention sinks, as in gpt-oss)"},
    {"sinks-in-windows-only", MT_FLAG, MT_AT(stack.sinks_in_windows_only), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "--softmax-type only in layers with the sliding window, as in MiMo-V2-Flash; vanilla in the others",
     .needs = "softmax-type off-by-one|learnable, window-size", .own = true},
    {"window-num-query-groups", MT_INT, MT_AT(stack.window_num_query_groups), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     "[1,65536]", "key and value heads of layers with the sliding window (default: as in other layers)",
     .needs = "window-size", .excludes = "multi-latent-attention", .own = true},
    {"attention-value-scale", MT_REAL, MT_AT(stack.attention_value_scale), MT_TRAIN, MT_OF_WEIGHTS, "1", "(0,1048576]",
     "factor of attention's values", .excludes = "multi-latent-attention", .own = true},
    {"attention-output-gate", MT_FLAG, MT_AT(stack.attention_output_gate), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "multiply attention's output by the sigmoid of one more product with the layer's input",
     .excludes = "multi-latent-attention"},
    {"experimental-attention-variant", MT_CHOICE, MT_AT(stack.experimental_attention_variant), MT_TRAIN, MT_OF_WEIGHTS,
     "none", "none|dsa|" MT_VARIANT_NAMES,
     "mixer in place of attention in the layers of --linear-attention-freq; gated_delta_net (gdn): linear attention as "
     "in Qwen3-Next and Qwen3.5; short_conv: a gated short convolution as in LFM2; mamba2: as in Granite 4; kda: Kimi "
     "delta attention as in Kimi Linear. dsa, in all layers: sparse latent attention as in DeepSeek-V3.2 and GLM-5",
     .excludes = "dsa: window-size, dsa: softmax-type"},
    {"linear-attention-freq", MT_STRING, MT_AT(linear_attention_freq), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     "N or '([1]*3+[0]*1)*2'",
     "layers of --experimental-attention-variant: all but every N-th, or a 1 (variant) or 0 (attention) for each layer",
     .needs = "experimental-attention-variant " MT_VARIANT_NAMES},
    {"linear-num-key-heads", MT_INT, MT_AT(stack.linear_num_key_heads), MT_TRAIN, MT_OF_WEIGHTS, "16", "[1,65536]",
     "heads of queries and keys of linear attention", .needs = "experimental-attention-variant gated_delta_net|kda"},
    {"linear-num-value-heads", MT_INT, MT_AT(stack.linear_num_value_heads), MT_TRAIN, MT_OF_WEIGHTS, "32", "[1,65536]",
     "heads of values of linear attention", .needs = "experimental-attention-variant gated_delta_net|kda"},
    {"linear-key-head-dim", MT_INT, MT_AT(stack.linear_key_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "128", "[1,4096]",
     "channels of a query or key head of linear attention",
     .needs = "experimental-attention-variant gated_delta_net|kda"},
    {"linear-value-head-dim", MT_INT, MT_AT(stack.linear_value_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "128", "[1,4096]",
     "channels of a value head of linear attention", .needs = "experimental-attention-variant gated_delta_net|kda"},
    {"dsa-indexer-n-heads", MT_INT, MT_AT(stack.dsa_indexer_n_heads), MT_TRAIN, MT_OF_WEIGHTS, "64", "[1,65536]",
     "heads of the indexer, which selects the keys of each query in sparse attention",
     .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-head-dim", MT_INT, MT_AT(stack.dsa_indexer_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "128", "[2,65536]",
     "channels of a head of the indexer", .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-topk", MT_INT, MT_AT(stack.dsa_indexer_topk), MT_TRAIN, MT_OF_WEIGHTS, "2048", "[1,1073741824]",
     "keys that the indexer selects for a query", .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-topk-freq", MT_INT, MT_AT(stack.dsa_indexer_topk_freq), MT_TRAIN, MT_OF_WEIGHTS, "1", "[1,65536]",
     "every how many layers have an indexer; the others attend to the keys of the layer before, as in GLM-5.2",
     .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-skip-topk-offset", MT_INT, MT_AT(stack.dsa_indexer_skip_topk_offset), MT_TRAIN, MT_OF_WEIGHTS, "0",
     "[0,65536]", "first layers that all have an indexer, with --dsa-indexer-topk-freq; 0: as 1",
     .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-rope-interleaved", MT_FLAG, MT_AT(stack.dsa_indexer_rope_interleaved), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     NULL, "RoPE of the indexer on pairs of neighbouring channels, as in GLM-5",
     .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-k-norm-epsilon", MT_REAL, MT_AT(stack.dsa_indexer_k_norm_epsilon), MT_TRAIN, MT_OF_WEIGHTS, "1e-6",
     "(0,1]", "epsilon of the norm of the indexer's keys", .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-loss-coeff", MT_REAL, MT_AT(stack.dsa_indexer_loss_coeff), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "coefficient of the indexer's loss, the divergence of attention's probabilities from its own; 0: the indexer is "
     "not trained",
     .needs = "experimental-attention-variant dsa"},
    {"dsa-indexer-use-sparse-loss", MT_FLAG, MT_AT(stack.dsa_indexer_use_sparse_loss), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "the indexer's loss over the selected keys (default: over all keys that a query sees)",
     .needs = "any: dsa-indexer-loss-coeff"},
    {"dsa-indexer-ties", MT_CHOICE, MT_AT(stack.dsa_indexer_ties), MT_BOTH, MT_OF_RUN, "torch", "torch|first",
     "keys that the indexer selects of those with equal scores: as torch.topk on a CPU, which depends on the number of "
     "keys, or the first; only indexers of few heads have equal scores",
     .needs = "any: experimental-attention-variant dsa", .own = true},
    {"linear-conv-kernel-dim", MT_INT, MT_AT(stack.linear_conv_kernel_dim), MT_TRAIN, MT_OF_WEIGHTS, "4", "[1,8]",
     "tokens that a short convolution mixes"},
    {"hybrid-override-pattern", MT_STRING, MT_AT(hybrid_override_pattern), MT_TRAIN, MT_OF_WEIGHTS, NULL, "M*-E...",
     "layers with one half only, a letter each, as in Nemotron-H: M Mamba-2, * attention, - MLP, E experts; | begins a "
     "pipeline stage, and / a module of multi-token prediction",
     .excludes = "any: moe-layer-freq, any: experimental-attention-variant, any: multi-latent-attention"},
    {"mamba-state-dim", MT_INT, MT_AT(stack.mamba_state_dim), MT_TRAIN, MT_OF_WEIGHTS, "128", "[1,4096]",
     "rows of the state of a head of Mamba-2"},
    {"mamba-head-dim", MT_INT, MT_AT(stack.mamba_head_dim), MT_TRAIN, MT_OF_WEIGHTS, "64", "[1,4096]",
     "channels of a head of Mamba-2"},
    {"mamba-num-groups", MT_INT, MT_AT(stack.mamba_num_groups), MT_TRAIN, MT_OF_WEIGHTS, "8", "[1,65536]",
     "groups of heads of Mamba-2 that share B and C"},
    {"mamba-num-heads", MT_INT, MT_AT(stack.mamba_num_heads), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "heads of Mamba-2 (default: 2 x hidden size / --mamba-head-dim)"},
    {"mamba-dt-limit-low", MT_REAL, MT_AT(stack.mamba_dt_limit_low), MT_TRAIN, MT_OF_MODEL, "0", "[0,1048576]",
     "least step of a token of Mamba-2", .own = true},
    {"mamba-dt-limit-high", MT_REAL, MT_AT(stack.mamba_dt_limit_high), MT_TRAIN, MT_OF_MODEL, "0", "[0,1048576]",
     "largest step of a token of Mamba-2; 0: none", .own = true},
    {"disable-mamba-conv-bias", MT_NO, MT_AT(stack.mamba_conv_bias), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "short convolutions of Mamba-2 without biases", .own = true},

    {.help = "positions"},
    {"position-embedding-type", MT_CHOICE, MT_AT(stack.position_embedding_type), MT_TRAIN, MT_OF_WEIGHTS,
     "learned_absolute", "learned_absolute|rope|none|relative",
     "type of position embedding; relative: numbers added to attention's scores, of an encoder-decoder",
     .needs = "relative: decoder-num-layers"},
    {"rotary-base", MT_REAL, MT_AT(stack.rotary_base), MT_TRAIN, MT_OF_MODEL, "10000", "(0,1e15]",
     "base of RoPE's frequencies", .needs = "position-embedding-type rope"},
    {"rotary-percent", MT_REAL, MT_AT(stack.rotary_percent), MT_TRAIN, MT_OF_WEIGHTS, "1", "(0,1]",
     "fraction of a head's channels with RoPE", .needs = "position-embedding-type rope"},
    {"window-rotary-base", MT_REAL, MT_AT(stack.window_rotary_base), MT_TRAIN, MT_OF_MODEL, NULL, "(0,1e15]",
     "base of RoPE in layers with the sliding window, where RoPE is not scaled (default: as in other layers)",
     .needs = "any: position-embedding-type rope, any: window-size", .own = true},
    {"no-rope-freq", MT_STRING, MT_AT(no_rope_freq), MT_TRAIN, MT_OF_WEIGHTS, NULL, "N or '([0]*3+[1]*1)*2'",
     "layers without RoPE: every N-th, or a 1 (without) or 0 (with) for each layer (default: none)",
     .needs = "position-embedding-type rope", .excludes = "multi-latent-attention"},
    {"rotary-interleaved", MT_FLAG, MT_AT(stack.rotary_interleaved), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "rotate the pairs (2i, 2i + 1) rather than (i, i + half)"},
    {"rotary-seq-len-interpolation-factor", MT_INT, MT_AT(rotary_seq_len_interpolation_factor), MT_TRAIN, MT_OF_RUN,
     NULL, "[1,1048576]", "divide positions by this: --rope-scaling-type linear",
     .needs = "position-embedding-type rope"},
    {"use-rope-scaling", MT_FLAG, MT_AT(use_rope_scaling), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "RoPE scaling of Llama 3.1: --rope-scaling-type llama3", .needs = "position-embedding-type rope",
     .excludes = "rotary-seq-len-interpolation-factor"},
    {"rope-scaling-type", MT_CHOICE, MT_AT(stack.rope_scaling_type), MT_TRAIN, MT_OF_MODEL, "none",
     "none|linear|llama3|yarn", "how RoPE is scaled to longer sequences",
     .needs = "any: position-embedding-type rope, linear|yarn: rope-scaling-factor, "
              "yarn: original-max-position-embeddings",
     .own = true},
    {"rope-scaling-factor", MT_REAL, MT_AT(stack.rope_scaling_factor), MT_TRAIN, MT_OF_MODEL, NULL, "[1,1048576]",
     "factor of RoPE scaling (default for llama3: 8); with --multi-latent-attention alone: of yarn from 4096 positions",
     .needs = "rope-scaling-type linear|llama3|yarn", .excludes = "rotary-seq-len-interpolation-factor"},
    {"rope-low-freq-factor", MT_REAL, MT_AT(stack.rope_low_freq_factor), MT_TRAIN, MT_OF_MODEL, "1", "(0,1048576]",
     "llama3: scale wavelengths above original positions / this", .needs = "rope-scaling-type llama3", .own = true},
    {"rope-high-freq-factor", MT_REAL, MT_AT(stack.rope_high_freq_factor), MT_TRAIN, MT_OF_MODEL, "4", "(0,1048576]",
     "llama3: keep wavelengths below original positions / this", .needs = "rope-scaling-type llama3", .own = true},
    {"original-max-position-embeddings", MT_INT, MT_AT(stack.original_max_position_embeddings), MT_TRAIN, MT_OF_MODEL,
     NULL, "[1,1073741824]", "llama3, yarn: positions before scaling (default for llama3: 8192)",
     .needs = "rope-scaling-type llama3|yarn"},
    {"llama-4-scaling-beta", MT_REAL, MT_AT(stack.llama_4_scaling_beta), MT_TRAIN, MT_OF_WEIGHTS, NULL, "(0,1024]",
     "scale queries by 1 + this x log(1 + position / --original-max-position-embeddings, rounded down), as in "
     "Ministral 3 (default: not)",
     .needs = "rope-scaling-type llama3|yarn", .excludes = "multi-latent-attention", .own = true},
    {"yarn-beta-fast", MT_REAL, MT_AT(stack.yarn_beta_fast), MT_TRAIN, MT_OF_MODEL, "32", "(0,1048576]",
     "yarn: keep channels with more rotations than this", .needs = "rope-scaling-type yarn"},
    {"yarn-beta-slow", MT_REAL, MT_AT(stack.yarn_beta_slow), MT_TRAIN, MT_OF_MODEL, "1", "(0,1048576]",
     "yarn: scale channels with fewer rotations than this", .needs = "rope-scaling-type yarn"},
    {"no-yarn-correction-range-round-to-int", MT_NO, MT_AT(stack.yarn_correction_range_round_to_int), MT_TRAIN,
     MT_OF_MODEL, NULL, NULL,
     "yarn: the range of channels between those two is not rounded to whole channels, as in gpt-oss",
     .needs = "rope-scaling-type yarn"},
    {"yarn-mscale", MT_REAL, MT_AT(yarn_mscale), MT_TRAIN, MT_OF_MODEL, NULL, "[0,1048576]",
     "yarn: attention is scaled by g(mscale) / g(mscale-all-dim), where g(m) = 0.1 m ln(factor) + 1",
     .needs = "rope-scaling-type yarn", .own = true},
    {"yarn-mscale-all-dim", MT_REAL, MT_AT(stack.yarn_mscale_all_dim), MT_TRAIN, MT_OF_MODEL, NULL, "[0,1048576]",
     "yarn: see --yarn-mscale", .needs = "rope-scaling-type yarn", .own = true},
    {"yarn-attention-factor", MT_REAL, MT_AT(stack.yarn_attention_factor), MT_TRAIN, MT_OF_MODEL, NULL, "(0,1048576]",
     "yarn: the scale of attention itself (default: g(1))", .needs = "rope-scaling-type yarn", .own = true},

    {"mrope-section", MT_INTS, MT_AT(stack.mrope_section), MT_TRAIN, MT_OF_WEIGHTS, NULL, "FRAMES ROWS COLUMNS",
     "pairs of a head's RoPE channels for each coordinate of an image's tokens", .needs = "any: vision-tower"},
    {"mrope-interleaved", MT_FLAG, MT_AT(stack.mrope_interleaved), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "these pairs take turns, as in Qwen3-VL, rather than stand in sections, as in Qwen2.5-VL",
     .needs = "any: vision-tower", .own = true},

    {.help = "vision"},
    {"vision-tower", MT_CHOICE, MT_AT(stack.vision.tower), MT_TRAIN, MT_OF_WEIGHTS, "none", "none|qwen2_5|qwen3",
     "layers that make tokens of the decoder from images, as in Qwen2.5-VL, or in Qwen3-VL and Qwen3.5", .own = true},
    {"vision-num-layers", MT_INT, MT_AT(stack.vision.num_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,64]",
     "layers of the tower", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-hidden-size", MT_INT, MT_AT(stack.vision.hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[4,1048576]",
     "width of its hidden states", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-ffn-hidden-size", MT_INT, MT_AT(stack.vision.ffn_hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     "[1,16777216]", "width of its MLPs", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-num-attention-heads", MT_INT, MT_AT(stack.vision.num_attention_heads), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     "[1,65536]", "its heads", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-patch-size", MT_INT, MT_AT(stack.vision.patch_size), MT_TRAIN, MT_OF_WEIGHTS, "16", "[1,1024]",
     "pixels of a patch's side", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-temporal-patch-size", MT_INT, MT_AT(stack.vision.temporal_patch_size), MT_TRAIN, MT_OF_WEIGHTS, "2",
     "[1,64]", "frames of a patch; an image is repeated", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-spatial-merge-size", MT_INT, MT_AT(stack.vision.spatial_merge_size), MT_TRAIN, MT_OF_WEIGHTS, "2",
     "[1,64]", "side of the square of patches that becomes a token", .needs = "vision-tower qwen2_5|qwen3",
     .own = true},
    {"vision-num-positions", MT_INT, MT_AT(stack.vision.num_positions), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,1048576]",
     "learned positions of the tower: a square, stretched over each image", .needs = "vision-tower qwen3", .own = true},
    {"vision-window-size", MT_INT, MT_AT(stack.vision.window_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "pixels of the side of a window, in which patches see each other", .needs = "vision-tower qwen2_5", .own = true},
    {"vision-full-attention-layers", MT_LIST, MT_AT(vision_full_attention_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL,
     "LAYER...", "layers of the tower whose patches see the whole image, from 0", .needs = "vision-tower qwen2_5",
     .own = true},
    {"vision-deepstack-layers", MT_LIST, MT_AT(vision_deepstack_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL, "LAYER...",
     "layers of the tower, from 0, whose outputs are added behind the first layers of the decoder",
     .needs = "vision-tower qwen3", .own = true},
    {"image-token-id", MT_INT, MT_AT(stack.vision.image_token_id), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[0,2147483646]",
     "the token that stands for a square of patches", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"video-token-id", MT_INT, MT_AT(stack.vision.video_token_id), MT_TRAIN, MT_OF_MODEL, NULL, "[0,2147483646]",
     "that of videos, for config.json: videos are not read", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-start-token-id", MT_INT, MT_AT(stack.vision.start_token_id), MT_TRAIN, MT_OF_MODEL, NULL, "[0,2147483646]",
     "the token before an image", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"vision-end-token-id", MT_INT, MT_AT(stack.vision.end_token_id), MT_TRAIN, MT_OF_MODEL, NULL, "[0,2147483646]",
     "the token after an image", .needs = "vision-tower qwen2_5|qwen3", .own = true},
    {"freeze-vision", MT_FLAG, MT_AT(stack.vision.freeze), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "do not train the tower, its mergers apart; --lora-target all-linear leaves it out, and names such as qkv of "
     "matrices of the tower alone give them adapters",
     .needs = "any: vision-tower", .own = true},
    {"freeze-projector", MT_FLAG, MT_AT(stack.vision.freeze_projector), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "do not train the mergers, which make tokens of patches; adapters as with --freeze-vision",
     .needs = "any: vision-tower", .own = true},
    {"image-min-pixels", MT_INT, MT_AT(image_min_pixels), MT_BOTH, MT_OF_RUN, "0", "[0,268435456]",
     "fewest pixels of a picture; smaller ones are enlarged (0: as the processor's file says)",
     .needs = "any: vision-tower", .own = true},
    {"image-max-pixels", MT_INT, MT_AT(image_max_pixels), MT_BOTH, MT_OF_RUN, "0", "[0,268435456]",
     "most pixels of a picture; larger ones are reduced (0: as the processor's file says)",
     .needs = "any: vision-tower", .own = true},
    {"language-model-only", MT_FLAG, MT_AT(language_model_only), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "of a folder with a vision tower take the decoder alone; --save writes a folder without the tower",
     .needs = "load", .own = true},

    {.help = "batches and length of training"},
    {"micro-batch-size", MT_INT, MT_AT(stack.micro_batch_size), MT_BOTH, MT_OF_RUN, "1", "[1,1048576]",
     "sequences per rank and micro-batch; infer: with --score", .needs = "score"},
    {"global-batch-size", MT_INT, MT_AT(stack.global_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741824]",
     "sequences per step (default: micro batch size x data-parallel ranks)"},
    {"rampup-batch-size", MT_INTS, MT_AT(rampup_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "START INCREMENT SAMPLES",
     "grow the global batch from START by INCREMENT over the first SAMPLES", .needs = "train-samples",
     .excludes = "stage rl"},
    {"step-batch-size-schedule", MT_STRING, MT_AT(step_batch_size_schedule), MT_TRAIN, MT_OF_RUN, NULL,
     "'TOKENS:SIZE ...'",
     "sequences per step from a number of trained tokens on, beginning with 0; K, M, B and T are 10^3 to 10^12: '0:384 "
     "200B:768'",
     .needs = "train-samples",
     .excludes = "global-batch-size, gradient-accumulation-steps, rampup-batch-size, stage rl"},
    {"seq-length", MT_INT, MT_AT(stack.seq_length), MT_BOTH, MT_OF_RUN, NULL, "[1,1073741823]",
     "tokens per sequence; infer: with --score", .needs = "score"},
    {"encoder-seq-length", MT_INT, MT_AT(stack.encoder_seq_length), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741823]",
     "tokens per sequence of the encoder of an encoder-decoder (default: --seq-length)",
     .needs = "any: decoder-num-layers"},
    {"decoder-seq-length", MT_INT, MT_AT(decoder_seq_length), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741823]",
     "tokens per sequence of its decoder (default: --seq-length)", .needs = "any: decoder-num-layers"},
    {"mask-prob", MT_REAL, MT_AT(mask_prob), MT_TRAIN, MT_OF_RUN, "0.15", "(0,1)",
     "share of a text's tokens that are masked, in spans, for an encoder-decoder to find",
     .needs = "decoder-num-layers", .excludes = "sft, mock-data"},
    {"short-seq-prob", MT_REAL, MT_AT(short_seq_prob), MT_TRAIN, MT_OF_RUN, "0.1", "[0,1]",
     "share of its samples that have any length below --encoder-seq-length", .needs = "decoder-num-layers",
     .excludes = "sft, mock-data"},
    {"vocab-extra-ids", MT_INT, MT_AT(vocab_extra_ids), MT_TRAIN, MT_OF_RUN, "0", "[0,100000]",
     "tokens behind the tokenizer's vocabulary that stand for masked spans (default: <extra_id_0> and so on of the "
     "tokenizer)",
     .needs = "decoder-num-layers", .excludes = "sft, mock-data"},
    {"gradient-accumulation-steps", MT_INT, MT_AT(gradient_accumulation_steps), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1073741824]",
     "micro-batches of a step on each data-parallel rank, instead of --global-batch-size, which is their product",
     .excludes = "global-batch-size, rampup-batch-size", .own = true},
    {"train-iters", MT_INT, MT_AT(stack.train_iters), MT_TRAIN, MT_OF_RUN, NULL, "[0,1000000000000]",
     "steps to train; 0 with --load and --save: only convert the checkpoint to this precision",
     .excludes = "train-samples"},
    {"train-samples", MT_INT, MT_AT(stack.train_samples), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences to train on, instead of --train-iters", .excludes = "stage rl"},
    {"exit-duration-in-mins", MT_REAL, MT_AT(exit_duration_in_mins), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e9]",
     "save and stop after this many minutes"},
    {"exit-interval", MT_INT, MT_AT(exit_interval), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "save and stop after a step whose number this divides"},
    {"exit-signal-handler", MT_FLAG, MT_AT(exit_signal_handler), MT_TRAIN, MT_OF_RUN, "true", NULL,
     "after the step under way save and stop on SIGTERM, Ctrl-C (SIGINT), a closed terminal (SIGHUP, but not under "
     "nohup) and --exit-signal; a second SIGTERM or Ctrl-C ends the run at once"},
    {"no-exit-signal-handler", MT_NO, MT_AT(exit_signal_handler), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "let these signals end the run at once"},
    {"exit-signal", MT_CHOICE, MT_AT(exit_signal), MT_TRAIN, MT_OF_RUN, "SIGTERM", "SIGTERM|SIGINT|SIGUSR1|SIGUSR2",
     "a further signal that saves and stops; mpirun forwards SIGUSR1 and SIGUSR2 and does not kill its ranks after "
     "them, so without this option SIGUSR1 saves and stops there",
     .excludes = "no-exit-signal-handler"},
    {"bf16", MT_FLAG, MT_AT(stack.bf16), MT_BOTH, MT_OF_RUN, NULL, NULL, "compute in bf16 (default: fp32)"},
    {"fp16", MT_FLAG, MT_AT(stack.fp16), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "compute in fp16, for GPUs without bf16, with a scaled loss; Adam reads gradients in fp16, in fp32 with "
     "--accumulate-allreduce-grads-in-fp32",
     .excludes = "bf16"},
    {"fp32-residual-connection", MT_FLAG, MT_AT(stack.fp32_residual_connection), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "with --bf16 or --fp16: the residual stream, its gradient and the messages between pipeline stages are fp32"},
    {"loss-scale", MT_REAL, MT_AT(stack.loss_scale), MT_TRAIN, MT_OF_RUN, NULL, "[1e-20,1e30]",
     "constant scale of the loss in fp16 (default: found while training, by the next four options)", .needs = "fp16"},
    {"initial-loss-scale", MT_REAL, MT_AT(stack.initial_loss_scale), MT_TRAIN, MT_OF_RUN, "4294967296", "[1e-20,1e30]",
     "scale of the loss of the first step", .needs = "fp16", .excludes = "loss-scale"},
    {"min-loss-scale", MT_REAL, MT_AT(stack.min_loss_scale), MT_TRAIN, MT_OF_RUN, "1", "[1e-20,1e30]",
     "least scale; a step that is not finite there is a bad step", .needs = "fp16", .excludes = "loss-scale"},
    {"loss-scale-window", MT_INT, MT_AT(stack.loss_scale_window), MT_TRAIN, MT_OF_RUN, "1000", "[1,1000000000]",
     "steps in succession without an overflow before the scale is doubled", .needs = "fp16", .excludes = "loss-scale"},
    {"hysteresis", MT_INT, MT_AT(stack.hysteresis), MT_TRAIN, MT_OF_RUN, "2", "[1,1000000000]",
     "steps with an overflow before the scale is halved", .needs = "fp16", .excludes = "loss-scale"},
    {"device", MT_CHOICE, MT_AT(device), MT_BOTH, MT_OF_RUN, "auto", "auto|cpu|cuda",
     "device to compute on; auto: the GPU if there is one", .own = true},
    {"memory-limit", MT_STRING, MT_AT(memory_limit), MT_BOTH, MT_OF_RUN, NULL, "N[GiB|MiB|GB|MB]",
     "use no more memory of a GPU than a smaller one has, what other programs and libraries use included; on the CPU: "
     "no more for the model of a rank; --plan and --explain: of each GPU (default: all of it)",
     .own = true},
    {"attention-backend", MT_CHOICE, MT_AT(stack.attention_backend), MT_BOTH, MT_OF_RUN, "auto",
     "auto|flash|cudnn|unfused",
     "attention on a GPU; flash: fused kernels; cudnn: cuDNN for sequences of equal length, otherwise flash, and its "
     "backward does not repeat bit for bit; unfused: plain kernels; auto: the fastest of flash, cudnn "
     "and another backward of ours that does not repeat, measured once",
     .needs = "cudnn: bf16",
     .excludes = "cudnn: window-size, cudnn: rerun-mode validate_results, cudnn: deterministic-mode"},
    {"cuda-graph-impl", MT_CHOICE, MT_AT(stack.cuda_graph_impl), MT_TRAIN, MT_OF_RUN, "none", "none|local",
     "local: on one GPU, a micro-batch's forward and backward are launched as one CUDA graph from the third of its "
     "shape "
     "on, with the same numbers; steps of small models take less time"},
    {"deterministic-mode", MT_FLAG, MT_AT(stack.deterministic_mode), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "repeat runs on a GPU bit for bit: use only deterministic algorithms and choose none by measuring"},
    {"seed", MT_INT, MT_AT(stack.seed), MT_BOTH, MT_OF_RUN, "1234", "[0,4294967295]", "seed of all random numbers"},

    {.help = "mixture of experts"},
    {"num-experts", MT_INT, MT_AT(stack.num_experts), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "experts per layer (default: no experts)"},
    {"moe-layer-freq", MT_STRING, MT_AT(moe_layer_freq), MT_TRAIN, MT_OF_WEIGHTS, "1", "N or '([0]*3+[1]*58)'",
     "layers with experts: every N-th, counted from the first, or a 0 or 1 for each layer", .needs = "num-experts"},
    {"moe-ffn-hidden-size", MT_INT, MT_AT(stack.moe_ffn_hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,16777216]",
     "width of an expert (default: --ffn-hidden-size)", .needs = "num-experts"},
    {"moe-shared-expert-intermediate-size", MT_INT, MT_AT(stack.moe_shared_expert_intermediate_size), MT_TRAIN,
     MT_OF_WEIGHTS, NULL, "[1,16777216]", "width of the shared expert, which every token visits (default: none)",
     .needs = "num-experts"},
    {"moe-latent-size", MT_INT, MT_AT(stack.moe_latent_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,16777216]",
     "latent experts: a linear narrows tokens to this width before the experts, another widens their sums (default: "
     "none)",
     .needs = "num-experts"},
    {"moe-shared-expert-gate", MT_FLAG, MT_AT(stack.moe_shared_expert_gate), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "weight the shared expert's output with a sigmoid gate per token", .needs = "moe-shared-expert-intermediate-size"},
    {"moe-use-upcycling", MT_FLAG, MT_AT(stack.moe_use_upcycling), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "begin as the dense model of --load: experts are copies of its MLP, routers are new; --train-iters 0 with --save "
     "converts only",
     .needs = "num-experts, load",
     .excludes = "moe-shared-expert-intermediate-size, moe-latent-size, lora-rank, load-adapter, fp8-param-gather"},
    {"moe-upcycling-granularity", MT_INT, MT_AT(stack.moe_upcycling_granularity), MT_TRAIN, MT_OF_RUN, "1", "[1,65536]",
     "experts that share a copy of the dense MLP, each with a part of its hidden channels",
     .needs = "moe-use-upcycling"},
    {"moe-router-topk", MT_INT, MT_AT(stack.moe_router_topk), MT_TRAIN, MT_OF_MODEL, "2", "[1,65536]",
     "experts per token", .needs = "num-experts"},
    {"moe-router-score-function", MT_CHOICE, MT_AT(stack.moe_router_score_function), MT_TRAIN, MT_OF_MODEL, "softmax",
     "softmax|sigmoid|sqrtsoftplus",
     "scores from the router's logits; sqrtsoftplus: the square root of log(1 + exp(x))", .needs = "num-experts"},
    {"moe-router-pre-softmax", MT_FLAG, MT_AT(stack.moe_router_pre_softmax), MT_TRAIN, MT_OF_MODEL, NULL, NULL,
     "softmax over all experts before top-k, not over the chosen ones",
     .needs = "num-experts, any: moe-router-score-function softmax"},
    {"moe-router-num-groups", MT_INT, MT_AT(stack.moe_router_num_groups), MT_TRAIN, MT_OF_MODEL, NULL, "[1,65536]",
     "groups of experts; --moe-router-group-topk of them are chosen first",
     .needs = "num-experts, moe-router-group-topk"},
    {"moe-router-group-topk", MT_INT, MT_AT(stack.moe_router_group_topk), MT_TRAIN, MT_OF_MODEL, NULL, "[1,65536]",
     "groups to choose a token's experts from", .needs = "moe-router-num-groups"},
    {"moe-router-topk-scaling-factor", MT_REAL, MT_AT(stack.moe_router_topk_scaling_factor), MT_TRAIN, MT_OF_MODEL, "1",
     "(0,1e6]", "factor of the routing probabilities", .needs = "num-experts"},
    {"moe-router-linear-bias", MT_FLAG, MT_AT(stack.moe_router_linear_bias), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "trained bias of the router's logits, as in gpt-oss", .needs = "num-experts", .own = true},
    {"moe-router-enable-expert-bias", MT_FLAG, MT_AT(stack.moe_router_enable_expert_bias), MT_TRAIN, MT_OF_WEIGHTS,
     NULL, NULL,
     "add a bias to each expert's score (the sigmoid, or the softmax over all experts) and adjust it after each step "
     "to balance the loads",
     .needs = "num-experts"},
    {"moe-router-bias-update-rate", MT_REAL, MT_AT(stack.moe_router_bias_update_rate), MT_TRAIN, MT_OF_RUN, "1e-3",
     "[0,1e6]", "change of that bias per step", .needs = "moe-router-enable-expert-bias"},
    {"moe-router-quantile-bias", MT_FLAG, MT_AT(stack.moe_router_quantile_bias), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "the bias of quantile_balancing, which sets this option: added to the router's logits for the choice alone",
     .needs = "num-experts", .excludes = "any: moe-router-num-groups", .own = true},
    {"moe-router-load-balancing-type", MT_CHOICES, MT_AT(stack.moe_router_load_balancing_type), MT_TRAIN, MT_OF_RUN,
     "aux_loss", "none|aux_loss|seq_aux_loss|global_aux_loss|sinkhorn|quantile_balancing",
     "how loads are balanced, by one or several losses; aux_loss: per micro-batch; seq_aux_loss: per sequence; "
     "global_aux_loss: over the global batch so far; or sinkhorn: by choosing the experts of all tokens of a "
     "micro-batch jointly; quantile_balancing: by a bias of each expert's logits, which follows from quantiles of the "
     "last step's logits",
     .needs = "num-experts",
     .excludes = "sinkhorn: moe-router-num-groups, sinkhorn: moe-router-enable-expert-bias, sinkhorn: "
                 "moe-expert-capacity-factor, quantile_balancing: moe-router-num-groups"},
    {"moe-router-quantile-balancing-ema", MT_REAL, MT_AT(stack.moe_router_quantile_balancing_ema), MT_TRAIN, MT_OF_RUN,
     "0", "[0,1]", "part of the last bias that quantile_balancing keeps",
     .needs = "moe-router-load-balancing-type quantile_balancing"},
    {"moe-router-force-load-balancing", MT_FLAG, MT_AT(stack.moe_router_force_load_balancing), MT_TRAIN, MT_OF_RUN,
     NULL, NULL, "for benchmarks: route by random logits, which balance the loads; the router gets their gradient",
     .needs = "num-experts", .excludes = "stage rl"},
    {"moe-aux-loss-coeff", MT_REALS, MT_AT(stack.moe_aux_loss_coeff), MT_TRAIN, MT_OF_MODEL, "0", "[0,1e6]",
     "coefficient of the load-balancing auxiliary loss, or of each one that --moe-router-load-balancing-type names",
     .needs = "num-experts, any: moe-router-load-balancing-type aux_loss|seq_aux_loss|global_aux_loss"},
    {"moe-z-loss-coeff", MT_REAL, MT_AT(stack.moe_z_loss_coeff), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "coefficient of the z-loss, which keeps the router's logits small", .needs = "num-experts"},
    {"moe-expert-capacity-factor", MT_REAL, MT_AT(stack.moe_expert_capacity_factor), MT_TRAIN, MT_OF_RUN, NULL,
     "(0,1e6]",
     "an expert takes at most this many times its even share of a micro-batch and drops further tokens (default: no "
     "tokens are dropped)",
     .needs = "num-experts"},
    {"moe-token-drop-policy", MT_CHOICE, MT_AT(stack.moe_token_drop_policy), MT_TRAIN, MT_OF_RUN, "probs",
     "probs|position", "tokens to drop: the ones with the lowest probabilities, or the last ones",
     .needs = "moe-expert-capacity-factor"},
    {"moe-pad-expert-input-to-capacity", MT_FLAG, MT_AT(stack.moe_pad_expert_input_to_capacity), MT_TRAIN, MT_OF_RUN,
     NULL, NULL, "pad each expert's input to its capacity, so that the host need not wait for the loads",
     .needs = "moe-expert-capacity-factor"},
    {"moe-token-dispatcher-type", MT_CHOICE, MT_AT(stack.moe_token_dispatcher_type), MT_BOTH, MT_OF_RUN, "alltoall",
     "alltoall|allgather|flex",
     "how tokens reach the experts of other ranks; alltoall: each token to each of its experts; allgather: all tokens "
     "to all ranks; flex: the same by copies into other GPUs' memory, beside computation; GPUs of one host",
     .needs = "num-experts"},
    {"no-moe-grouped-gemm", MT_NO, MT_AT(stack.moe_grouped_gemm), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "one matrix product per expert; the host waits for the loads", .needs = "num-experts"},
    {"moe-grouped-gemm", MT_FLAG, MT_AT(stack.moe_grouped_gemm), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "one grouped matrix product for all experts; the default"},
    {"no-moe-permute-fusion", MT_NO, MT_AT(stack.moe_permute_fusion), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "weight and sum the experts' outputs in separate passes", .needs = "num-experts"},
    {"moe-permute-fusion", MT_FLAG, MT_AT(stack.moe_permute_fusion), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "apply the routing probabilities in the experts' activation and sum a token's rows in one pass; the default"},

    {.help = "multi-token prediction"},
    {"mtp-num-layers", MT_INT, MT_AT(stack.mtp_num_layers), MT_TRAIN, MT_OF_MODEL, "0", "[0,8]",
     "modules of multi-token prediction after the last layer; each predicts one token further, as in DeepSeek-V3",
     .needs = "any: position-embedding-type rope|none",
     .excludes = "any: pipeline-schedule zb-h1"}, // their backward is not split
    {"mtp-use-repeated-layer", MT_FLAG, MT_AT(stack.mtp_use_repeated_layer), MT_TRAIN, MT_OF_MODEL, NULL, NULL,
     "one module, applied --mtp-num-layers times: its gradients are the sums over these", .needs = "mtp-num-layers"},
    {"mtp-hybrid-override-pattern", MT_STRING, MT_AT(mtp_hybrid_override_pattern), MT_TRAIN, MT_OF_MODEL, NULL, "*E",
     "layer of a module of a model of --hybrid-override-pattern, which may hold it: * attention, then - MLP or E "
     "experts",
     .needs = "hybrid-override-pattern"},
    {"mtp-loss-scaling-factor", MT_REAL, MT_AT(stack.mtp_loss_scaling_factor), MT_TRAIN, MT_OF_RUN, "0.1", "(0,1e6]",
     "weight of the mean of their losses", .needs = "mtp-num-layers"},

    {.help = "parallelism"},
    {"tensor-model-parallel-size", MT_INT, MT_AT(stack.tensor_model_parallel_size), MT_BOTH, MT_OF_RUN, "1",
     "[1,1048576]", "ranks that split each layer: heads, MLP and vocabulary"},
    {"pipeline-model-parallel-size", MT_INT, MT_AT(stack.pipeline_model_parallel_size), MT_BOTH, MT_OF_RUN, "1",
     "[1,1048576]", "ranks that split the sequence of layers"},
    {"context-parallel-size", MT_INT, MT_AT(stack.context_parallel_size), MT_BOTH, MT_OF_RUN, "1", "[1,1048576]",
     "ranks that split each sequence"},
    {"expert-model-parallel-size", MT_INT, MT_AT(stack.expert_model_parallel_size), MT_BOTH, MT_OF_RUN, "1",
     "[1,1048576]", "ranks that split the experts of a layer", .needs = "num-experts"},
    {"expert-tensor-parallel-size", MT_INT, MT_AT(stack.expert_tensor_parallel_size), MT_BOTH, MT_OF_RUN, NULL,
     "[1,1048576]",
     "ranks that split each expert (default: --tensor-model-parallel-size, or 1 where experts or ranks do not divide "
     "by it)"},
    {"sequence-parallel", MT_FLAG, MT_AT(stack.sequence_parallel), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "split the tokens of norms and dropout over the tensor-parallel ranks; with experts, the default",
     .needs = "any: tensor-model-parallel-size"},
    {"tp-comm-overlap", MT_FLAG, MT_AT(stack.tp_comm_overlap), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "with --sequence-parallel: overlap tensor-parallel communication with matrix products, rank by rank; GPUs of one "
     "host",
     .needs = "any: sequence-parallel"},
    {"cp-comm-type", MT_CHOICE, MT_AT(stack.cp_comm_type), MT_BOTH, MT_OF_RUN, "p2p", "p2p|all_gather|a2a|a2a+p2p",
     "how context-parallel ranks exchange keys and values; p2p: round a ring; all_gather: all at once; a2a: "
     "exchange tokens for heads; a2a+p2p: a2a within groups, p2p between them"},
    {"hierarchical-context-parallel-sizes", MT_INTS, MT_AT(hierarchical_context_parallel_sizes), MT_TRAIN, MT_OF_RUN,
     NULL, "A2A RING", "a2a+p2p: ranks of an a2a group, and number of groups in the ring",
     .needs = "cp-comm-type a2a+p2p"},
    {"dynamic-context-parallel", MT_FLAG, MT_AT(stack.dynamic_context_parallel), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "each sample has 1, 2, 4 ... --context-parallel-size ranks: as many as its memory and even work need; without "
     "--sft a sample is a document of a sequence (--reset-position-ids --reset-attention-mask) or the whole sequence",
     .needs = "any: context-parallel-size", .excludes = "any: cp-comm-type a2a+p2p, any: stage rl", .own = true},
    {"hybrid-context-parallel", MT_FLAG, MT_AT(stack.dynamic_context_parallel), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "--dynamic-context-parallel"},
    {"max-seqlen-per-dp-cp-rank", MT_INT, MT_AT(max_seqlen_per_dp_cp_rank), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741823]",
     "tokens of a micro-batch on each rank, at most (default: --micro-batch-size x --seq-length / "
     "--context-parallel-size)",
     .needs = "dynamic-context-parallel"},
    {"min-dynamic-context-parallel-size", MT_INT, MT_AT(min_dynamic_context_parallel_size), MT_TRAIN, MT_OF_RUN, "1",
     "[1,1048576]", "ranks of a sample, at least: a power of two", .needs = "dynamic-context-parallel", .own = true},
    {"distributed-timeout-minutes", MT_REAL, MT_AT(stack.distributed_timeout_minutes), MT_BOTH, MT_OF_RUN, "10",
     "(0,1e7]",
     "end the job when a rank waits this long for another rank or a file while the job starts; also the limit of a "
     "step unless that is given"},
    {"distributed-timeout-seconds", MT_INT, MT_AT(stack.distributed_timeout_seconds), MT_BOTH, MT_OF_RUN, "600",
     "[1,1000000000]", "the same for one wait during a step", .own = true},
    {"distributed-timeout-seconds-after-init", MT_INT, MT_AT(stack.distributed_timeout_seconds), MT_BOTH, MT_OF_RUN,
     NULL, "[1,1000000000]", "another name of --distributed-timeout-seconds"},
    {"save-timeout-seconds", MT_INT, MT_AT(stack.save_timeout_seconds), MT_TRAIN, MT_OF_RUN, "1800", "[1,1000000000]",
     "the same while a checkpoint is saved; at least the limit of a step unless given", .own = true},
    {"num-virtual-stages-per-pipeline-rank", MT_INT, MT_AT(stack.num_virtual_stages_per_pipeline_rank), MT_TRAIN,
     MT_OF_RUN, "1", "[1,10000]", "pipeline stages per rank: more stages, a smaller bubble and more messages",
     .needs = "pipeline-model-parallel-size"},
    {"num-layers-per-virtual-pipeline-stage", MT_INT, MT_AT(num_layers_per_virtual_pipeline_stage), MT_TRAIN, MT_OF_RUN,
     NULL, "[1,10000]", "layers per virtual stage, instead of the number of stages",
     .needs = "pipeline-model-parallel-size",
     .excludes =
         "num-virtual-stages-per-pipeline-rank, decoder-first-pipeline-num-layers, decoder-last-pipeline-num-layers"},
    {"microbatch-group-size-per-virtual-pipeline-stage", MT_INT,
     MT_AT(stack.microbatch_group_size_per_virtual_pipeline_stage), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741824]",
     "micro-batches that run through a virtual stage before the next stage's turn (default: the pipeline size)"},
    {"decoder-first-pipeline-num-layers", MT_INT, MT_AT(stack.decoder_first_pipeline_num_layers), MT_BOTH, MT_OF_RUN,
     NULL, "[1,10000]", "layers of the first pipeline rank (default: an equal share)",
     .needs = "pipeline-model-parallel-size",
     .excludes = "account-for-embedding-in-pipeline-split, account-for-loss-in-pipeline-split"},
    {"decoder-last-pipeline-num-layers", MT_INT, MT_AT(stack.decoder_last_pipeline_num_layers), MT_BOTH, MT_OF_RUN,
     NULL, "[1,10000]", "layers of the last pipeline rank (default: an equal share)",
     .needs = "pipeline-model-parallel-size",
     .excludes = "account-for-embedding-in-pipeline-split, account-for-loss-in-pipeline-split"},
    {"account-for-embedding-in-pipeline-split", MT_FLAG, MT_AT(stack.account_for_embedding_in_pipeline_split), MT_TRAIN,
     MT_OF_RUN, NULL, NULL, "count the embedding as a layer when layers are split into stages",
     .needs = "pipeline-model-parallel-size"},
    {"account-for-loss-in-pipeline-split", MT_FLAG, MT_AT(stack.account_for_loss_in_pipeline_split), MT_TRAIN,
     MT_OF_RUN, NULL, NULL, "count the loss as a layer when layers are split into stages",
     .needs = "pipeline-model-parallel-size"},
    {"pipeline-model-parallel-layout", MT_STRING, MT_AT(pipeline_model_parallel_layout), MT_TRAIN, MT_OF_RUN, NULL,
     "'Et*3|(tt|)*6L'|auto",
     "the stages in letters: E embedding, t layer (a decoder that attends to an encoder has two for each of its own), "
     "m "
     "module of multi-token prediction, L loss, | between stages, *n repeats; auto (auto*2: two stages a rank): ranks "
     "that take equal times in a simulation on --gpu, or with an encoder do equal work",
     .needs = "pipeline-model-parallel-size",
     .excludes = "num-virtual-stages-per-pipeline-rank, num-layers-per-virtual-pipeline-stage, "
                 "decoder-first-pipeline-num-layers, decoder-last-pipeline-num-layers, "
                 "account-for-embedding-in-pipeline-split, account-for-loss-in-pipeline-split"},
    {"pipeline-schedule", MT_CHOICE, MT_AT(stack.pipeline_schedule), MT_TRAIN, MT_OF_RUN, NULL,
     "1f1b|interleaved|zb-h1",
     "order of forwards and backwards (default: interleaved with several stages per rank, otherwise 1f1b)",
     // zb-h1 accumulates gradients in two parts and needs them whole between the two
     .needs = "zb-h1: pipeline-model-parallel-size, zb-h1: data-parallel-sharding-strategy no_shard|optim, "
              "zb-h1: main-grads-dtype fp32",
     .own = true},
    {"print-schedule", MT_OPTIONAL, MT_AT(print_schedule), MT_TRAIN, MT_OF_RUN, NULL, "FILE.svg",
     "print the stages and the schedule, optionally draw them into a file, and exit; needs no mpirun", .own = true},
    {"print-launch", MT_INT, MT_AT(print_launch), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000]",
     "print what launch.sh needs, first the largest number of ranks up to this that can run these options, and exit",
     .own = true},
    {"plan", MT_FLAG, MT_AT(plan), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "find the fastest layouts of this model on --gpus GPUs by simulation, print the ten best, and exit; layout "
     "options that are given are kept",
     .needs = "gpus", .excludes = "explain, print-schedule, print-config, print-launch", .own = true},
    {"explain", MT_FLAG, MT_AT(explain), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "print a simulated training step of this run, operation by operation, and exit; on --gpus GPUs, or on as many as "
     "mpirun starts, or one process as many as the layout needs",
     .excludes = "print-schedule, print-config, print-launch", .own = true},
    {"plan-explain", MT_FLAG, MT_AT(explain), MT_TRAIN, MT_OF_RUN, NULL, NULL, "another name of --explain",
     .own = true},
    {"explain-rank", MT_INT, MT_AT(explain_rank), MT_TRAIN, MT_OF_RUN, "-1", "[-1,999999]",
     "pipeline rank whose operations --explain prints; -1: the one that ends its step last", .needs = "explain",
     .own = true},
    {"plan-explain-rank", MT_INT, MT_AT(explain_rank), MT_TRAIN, MT_OF_RUN, "-1", "[-1,999999]",
     "another name of --explain-rank", .own = true},
    {"gpus", MT_INT, MT_AT(gpus), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000]", "GPUs of --plan and --explain",
     .own = true},
    {"gpu", MT_STRING, MT_AT(gpu), MT_TRAIN, MT_OF_RUN, "h200", "NAME|FILE.json",
     "kind of these GPUs: h100, h200, a100, b200, t4, rtx3060, rtx3090, rtx4090 or rtx5090 (data/machines), or a file "
     "of the same form",
     .own = true},
    {"gpus-per-host", MT_INT, MT_AT(gpus_per_host), MT_TRAIN, MT_OF_RUN, "8", "[1,1024]",
     "those of them that NVLink connects", .own = true},
    {"use-distributed-optimizer", MT_FLAG, MT_AT(use_distributed_optimizer), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "split the optimizer state over the data-parallel ranks: --data-parallel-sharding-strategy optim"},
    {"data-parallel-sharding-strategy", MT_CHOICE, MT_AT(stack.data_parallel_sharding_strategy), MT_TRAIN, MT_OF_RUN,
     "no_shard", "no_shard|optim|optim_grads|optim_grads_params",
     "state to split over the data-parallel ranks: none, optimizer state, also gradients, also parameters"},
    {"use-tp-pp-dp-mapping", MT_FLAG, MT_AT(stack.use_tp_pp_dp_mapping), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "number the ranks by tensor, context, pipeline, data rather than tensor, context, data, pipeline"},
    {"overlap-grad-reduce", MT_FLAG, MT_AT(stack.overlap_grad_reduce), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "reduce the gradients of a layer during the backward of the next ones"},
    {"overlap-param-gather", MT_FLAG, MT_AT(stack.overlap_param_gather), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "gather the parameters of a layer during the forward of the one before",
     .needs = "any: overlap-grad-reduce, any: data-parallel-sharding-strategy optim|optim_grads|optim_grads_params"},
    {"ddp-bucket-size", MT_INT, MT_AT(stack.ddp_bucket_size), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "reduce the gradients of layers together, up to this many parameters (default: each layer alone)"},

    {.help = "recomputation"},
    {"recompute-granularity", MT_CHOICE, MT_AT(stack.recompute_granularity), MT_TRAIN, MT_OF_RUN, "none",
     "none|full|selective",
     "compute activations again in the backward instead of keeping them; full: whole layers, from their input; "
     "selective: --recompute-modules"},
    {"recompute-method", MT_CHOICE, MT_AT(stack.recompute_method), MT_TRAIN, MT_OF_RUN, NULL, "default|uniform|block",
     "full recomputation; uniform (the default): units of --recompute-num-layers layers keep their input; block: the "
     "first --recompute-num-layers layers of each stage keep theirs, the others keep all",
     .needs = "any: recompute-granularity full"},
    {"recompute-num-layers", MT_INT, MT_AT(stack.recompute_num_layers), MT_TRAIN, MT_OF_RUN, NULL, "[1,10000]",
     "uniform: layers of a unit; block: recomputed layers of a stage (default: 1)",
     .needs = "any: recompute-granularity full"},
    {"recompute-modules", MT_SET, MT_AT(stack.recompute_modules), MT_TRAIN, MT_OF_RUN, NULL,
     &MT_RECOMPUTE_MODULES(MT_MODULE_CHOICE)[1], // without the first |
     "modules of selective recomputation (default: core_attn, which is free: attention keeps no probabilities)",
     .needs = "any: recompute-granularity selective, mla_up_proj: multi-latent-attention",
     .excludes = "moe_act: no-moe-grouped-gemm"},
    {"recompute-activations", MT_FLAG, MT_AT(recompute_activations), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "--recompute-granularity selective", .excludes = "any: recompute-granularity full"},
    {"moe-layer-recompute", MT_FLAG, MT_AT(moe_layer_recompute), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "--recompute-granularity selective --recompute-modules moe", .needs = "any: num-experts",
     .excludes = "any: recompute-granularity full"},
    {"distribute-saved-activations", MT_FLAG, MT_AT(stack.distribute_saved_activations), MT_TRAIN, MT_OF_RUN, NULL,
     NULL, "full recomputation: each tensor-parallel rank keeps a part of the inputs",
     .needs = "any: recompute-granularity full, any: tensor-model-parallel-size", .excludes = "any: sequence-parallel"},

    {.help = "fp8"},
    {"fp8-format", MT_CHOICE, MT_AT(stack.fp8_format), MT_TRAIN, MT_OF_RUN, NULL, "none|e4m3|hybrid",
     "matrix products of layers in fp8; hybrid: gradients in e5m2, else e4m3",
     .excludes = "any: no-moe-grouped-gemm, any: fp16"},
    {"fp8", MT_CHOICE, MT_AT(stack.fp8_format), MT_TRAIN, MT_OF_RUN, NULL, "none|e4m3|hybrid", "--fp8-format"},
    {"fp8-recipe", MT_CHOICE, MT_AT(stack.fp8_recipe), MT_TRAIN, MT_OF_RUN, "delayed",
     "delayed|tensorwise|blockwise|mxfp8",
     "scales; delayed: per tensor, from earlier steps; tensorwise: from the tensor itself; blockwise: 1 x 128 and, of "
     "weights, 128 x 128; mxfp8: 1 x 32",
     .needs = "fp8-format"},
    {"fp8-margin", MT_INT, MT_AT(stack.fp8_margin), MT_TRAIN, MT_OF_RUN, "0", "[0,16]",
     "delayed: scales are 2^margin smaller", .needs = "fp8-format, fp8-recipe delayed"},
    {"fp8-amax-history-len", MT_INT, MT_AT(stack.fp8_amax_history_len), MT_TRAIN, MT_OF_RUN, "1", "[1,65536]",
     "delayed: steps whose largest values are kept", .needs = "fp8-format, fp8-recipe delayed"},
    {"fp8-amax-compute-algo", MT_CHOICE, MT_AT(stack.fp8_amax_compute_algo), MT_TRAIN, MT_OF_RUN, "most_recent",
     "most_recent|max", "delayed: the value that sets the scale, of these steps",
     .needs = "fp8-format, fp8-recipe delayed"},
    {"no-fp8-wgrad", MT_NO, MT_AT(stack.fp8_wgrad), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "compute the weights' gradients without fp8", .needs = "fp8-format"},
    {"fp8-wgrad", MT_FLAG, MT_AT(stack.fp8_wgrad), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "compute the weights' gradients in fp8 too; the default"},
    {"fp8-param-gather", MT_FLAG, MT_AT(stack.fp8_param_gather), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "gather the weights of these products in fp8; the other ranks' parts in bf16 are gathered for readers only",
     .needs = "any: fp8-format, any: fp8-recipe delayed|tensorwise|blockwise, "
              "any: data-parallel-sharding-strategy optim|optim_grads|optim_grads_params",
     .excludes = "any: tp-only-amax-red"},
    {"fp8-param", MT_FLAG, MT_AT(stack.fp8_param_gather), MT_TRAIN, MT_OF_RUN, NULL, NULL, "--fp8-param-gather"},
    {"tp-only-amax-red", MT_FLAG, MT_AT(stack.tp_only_amax_red), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "delayed: the tensor- and context-parallel ranks alone share their largest values",
     .needs = "fp8-format, fp8-recipe delayed"},
    {"first-last-layers-bf16", MT_FLAG, MT_AT(stack.first_last_layers_bf16), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "fp8 in the middle layers only", .needs = "fp8-format"},
    {"num-layers-at-start-in-bf16", MT_INT, MT_AT(stack.num_layers_at_start_in_bf16), MT_TRAIN, MT_OF_RUN, "1",
     "[0,10000]", "first layers without fp8", .needs = "first-last-layers-bf16"},
    {"num-layers-at-end-in-bf16", MT_INT, MT_AT(stack.num_layers_at_end_in_bf16), MT_TRAIN, MT_OF_RUN, "1", "[0,10000]",
     "last layers without fp8", .needs = "first-last-layers-bf16"},

    {.help = "offloading"},
    {"fine-grained-activation-offloading", MT_FLAG, MT_AT(stack.fine_grained_activation_offloading), MT_TRAIN,
     MT_OF_RUN, NULL, NULL,
     "keep activations in host memory from the forward to the backward: the inputs of --offload-modules",
     .needs = "offload-modules"},
    {"offload-modules", MT_SET, MT_AT(stack.offload_modules), MT_TRAIN, MT_OF_RUN, NULL,
     "attn_norm|qkv_linear|core_attn|attn_proj|mlp_norm|expert_fc1|moe_act|mlp",
     "modules whose input is offloaded; attn_proj needs core_attn; mlp, not in Megatron: MLPs of layers without "
     "experts",
     .needs = "fine-grained-activation-offloading, attn_proj: offload-modules core_attn"},
    {"optimizer-cpu-offload", MT_FLAG, MT_AT(stack.optimizer_cpu_offload), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "keep master weights and moments in host memory and update these parameters on the host"},
    {"optimizer-offload-fraction", MT_REAL, MT_AT(stack.optimizer_offload_fraction), MT_TRAIN, MT_OF_RUN, "1", "[0,1]",
     "fraction of the parameters to offload, rounded up to whole layers; the last layers come first",
     .needs = "optimizer-cpu-offload"},
    {"overlap-cpu-optimizer-d2h-h2d", MT_FLAG, MT_AT(stack.overlap_cpu_optimizer_d2h_h2d), MT_TRAIN, MT_OF_RUN, NULL,
     NULL, "overlap the copies of gradients and parameters with the update on the host",
     .needs = "optimizer-cpu-offload"},

    {.help = "learning rate and optimizer"},
    {"lr", MT_REAL, MT_AT(stack.lr), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]", "maximum learning rate"},
    {"min-lr", MT_REAL, MT_AT(stack.min_lr), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "minimum learning rate after warm-up"},
    {"decoupled-lr", MT_REAL, MT_AT(stack.decoupled_lr), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]",
     "maximum learning rate of the word embedding and the output layer (default: --lr)",
     .excludes = "stage rm, lora-rank"},
    {"decoupled-min-lr", MT_REAL, MT_AT(stack.decoupled_min_lr), MT_TRAIN, MT_OF_RUN, NULL, "[0,1e6]",
     "their minimum learning rate (default: --min-lr)", .needs = "decoupled-lr"},
    {"lr-decay-style", MT_CHOICE, MT_AT(stack.lr_decay_style), MT_TRAIN, MT_OF_RUN, "linear",
     "constant|linear|cosine|inverse-square-root|WSD", "decay of the learning rate"},
    {"lr-decay-iters", MT_INT, MT_AT(stack.lr_decay_iters), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "steps until the minimum learning rate (default: --train-iters)", .needs = "train-iters"},
    {"lr-decay-samples", MT_INT, MT_AT(stack.lr_decay_samples), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences until the minimum learning rate (default: --train-samples)", .needs = "train-samples"},
    {"lr-wsd-decay-style", MT_CHOICE, MT_AT(stack.lr_wsd_decay_style), MT_TRAIN, MT_OF_RUN, "exponential",
     "exponential|linear|cosine|minus_sqrt", "WSD: decay in its last phase", .needs = "lr-decay-style WSD"},
    {"lr-wsd-decay-iters", MT_INT, MT_AT(stack.lr_wsd_decay_iters), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "WSD: steps of its last phase", .needs = "train-iters, lr-decay-style WSD"},
    {"lr-wsd-decay-samples", MT_INT, MT_AT(stack.lr_wsd_decay_samples), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "WSD: sequences of its last phase", .needs = "train-samples, lr-decay-style WSD"},
    {"lr-warmup-iters", MT_INT, MT_AT(stack.lr_warmup_iters), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "steps of linear warm-up", .needs = "train-iters"},
    {"lr-warmup-samples", MT_INT, MT_AT(stack.lr_warmup_samples), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "sequences of linear warm-up", .needs = "train-samples"},
    {"lr-warmup-fraction", MT_REAL, MT_AT(stack.lr_warmup_fraction), MT_TRAIN, MT_OF_RUN, NULL, "[0,1)",
     "warm-up as a fraction of the decay", .excludes = "lr-warmup-iters, lr-warmup-samples"},
    {"lr-warmup-init", MT_REAL, MT_AT(stack.lr_warmup_init), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "learning rate at the start of warm-up"},
    {"weight-decay", MT_REAL, MT_AT(weight_decay), MT_TRAIN, MT_OF_RUN, "0.01", "[0,1e6]",
     "weight decay of matrices; vectors have none"},
    {"apply-wd-to-qk-layernorm", MT_FLAG, MT_AT(stack.apply_wd_to_qk_layernorm), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "weight decay of the norms of query and key heads too", .excludes = "multi-latent-attention, optimizer muon"},
    {"start-weight-decay", MT_REAL, MT_AT(stack.start_weight_decay), MT_TRAIN, MT_OF_RUN, NULL, "[0,1e6]",
     "weight decay at the start of its schedule"},
    {"end-weight-decay", MT_REAL, MT_AT(stack.end_weight_decay), MT_TRAIN, MT_OF_RUN, NULL, "[0,1e6]",
     "weight decay at the end of its schedule"},
    {"weight-decay-incr-style", MT_CHOICE, MT_AT(stack.weight_decay_incr_style), MT_TRAIN, MT_OF_RUN, "constant",
     "constant|linear|cosine", "schedule of the weight decay"},
    {"optimizer", MT_CHOICE, MT_AT(stack.optimizer), MT_TRAIN, MT_OF_RUN, "adam", MT_OPTIMIZER_NAMES,
     "adam: AdamW; sgd: with momentum, weight decay added to the gradient; lion: the sign of a moment; muon: "
     "orthogonalised momentum for the matrices of layers, another optimizer for embeddings, head and vectors",
     .excludes = "muon: optimizer-cpu-offload, muon: lora-rank"},
    {"sgd-momentum", MT_REAL, MT_AT(stack.sgd_momentum), MT_TRAIN, MT_OF_RUN, "0.9", "[0,1)", "SGD's momentum",
     .needs = "optimizer sgd"},
    {"lion-beta1", MT_REAL, MT_AT(stack.lion_beta1), MT_TRAIN, MT_OF_RUN, "0.9", "[0,1)",
     "Lion's weight of the moment in an update", .needs = "optimizer lion|muon"},
    {"lion-beta2", MT_REAL, MT_AT(stack.lion_beta2), MT_TRAIN, MT_OF_RUN, "0.99", "[0,1)",
     "decay rate of Lion's moment", .needs = "optimizer lion|muon"},
    {"muon-momentum", MT_REAL, MT_AT(stack.muon.momentum), MT_TRAIN, MT_OF_RUN, "0.95", "[0,1)",
     "Muon's decay rate of the momentum", .needs = "optimizer muon"},
    {"muon-nesterov", MT_FLAG, MT_AT(stack.muon.nesterov), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "Muon: Nesterov's momentum, which looks one step ahead", .needs = "optimizer muon"},
    {"muon-no-split-qkv", MT_NO, MT_AT(stack.muon.split_qkv), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "Muon: the projections to queries, keys and values are one matrix", .needs = "optimizer muon"},
    {"muon-split-qkv", MT_FLAG, MT_AT(stack.muon.split_qkv), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "Muon: these are three matrices; the default", .needs = "optimizer muon"},
    {"muon-scale-mode", MT_CHOICE, MT_AT(stack.muon.scale_mode), MT_TRAIN, MT_OF_RUN, "spectral",
     "spectral|unit_rms_norm|shape_scaling",
     "Muon's factor for a matrix of so many outputs and inputs: the root of the larger; of outputs / inputs; of the "
     "same but at least 1",
     .needs = "optimizer muon"},
    {"muon-extra-scale-factor", MT_REAL, MT_AT(stack.muon.extra_scale_factor), MT_TRAIN, MT_OF_RUN, "1", "(0,1e6]",
     "Muon: a further factor; 0.2 gives updates about as large as AdamW's", .needs = "optimizer muon"},
    {"muon-num-ns-steps", MT_INT, MT_AT(stack.muon.num_ns_steps), MT_TRAIN, MT_OF_RUN, "5", "[1,100]",
     "Muon: Newton-Schulz iterations", .needs = "optimizer muon"},
    {"muon-coefficient-type", MT_CHOICE, MT_AT(stack.muon.coefficient_type), MT_TRAIN, MT_OF_RUN, "quintic",
     "quintic|simple|polar_express|cans|aol|deepseekv4", "Muon: the coefficients of these iterations",
     .needs = "optimizer muon"},
    {"muon-fp32-matmul-prec", MT_CHOICE, MT_AT(stack.muon.fp32_matmul_prec), MT_TRAIN, MT_OF_RUN, "medium",
     "medium|high|highest", "Muon: products of bf16, of TF32 (on the CPU fp32), or of fp32", .needs = "optimizer muon"},
    {"muon-tp-mode", MT_CHOICE, MT_AT(stack.muon.tp_mode), MT_TRAIN, MT_OF_RUN, "blockwise",
     "blockwise|duplicated|distributed",
     "Muon: a matrix that tensor-parallel ranks share: each takes its part for a matrix of its own; each computes the "
     "whole; or each its part, with sums over all",
     .needs = "optimizer muon"},
    {"muon-scalar-optimizer", MT_CHOICE, MT_AT(stack.muon.scalar_optimizer), MT_TRAIN, MT_OF_RUN, "adam", "adam|lion",
     "Muon: the optimizer of embeddings, head and vectors", .needs = "optimizer muon"},
    {"adam-beta1", MT_REAL, MT_AT(stack.adam_beta1), MT_TRAIN, MT_OF_RUN, "0.9", "[0,1)",
     "Adam's decay rate of the first moment"},
    {"adam-beta2", MT_REAL, MT_AT(stack.adam_beta2), MT_TRAIN, MT_OF_RUN, "0.999", "[0,1)",
     "Adam's decay rate of the second moment"},
    {"adam-eps", MT_REAL, MT_AT(stack.adam_eps), MT_TRAIN, MT_OF_RUN, "1e-8", "(0,1]",
     "Adam's epsilon, added to the root of the second moment"},
    {"clip-grad", MT_REAL, MT_AT(stack.clip_grad), MT_TRAIN, MT_OF_RUN, "1", "[0,1e30]",
     "maximum norm of the gradient; 0: no clipping"},
    {"grad-reduce-in-bf16", MT_FLAG, MT_AT(grad_reduce_in_bf16), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "sum gradients over micro-batches and ranks in bf16: --main-grads-dtype bf16", .needs = "bf16, optimizer adam",
     .excludes = "pipeline-schedule zb-h1"},
    {"use-precision-aware-optimizer", MT_FLAG, MT_AT(use_precision_aware_optimizer), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "keep gradients, master weights and moments in the types of the next four options; AdamW computes in fp32",
     .needs = "optimizer adam"},
    {"main-grads-dtype", MT_CHOICE, MT_AT(stack.main_grads_dtype), MT_TRAIN, MT_OF_RUN, "fp32", "fp32|bf16|fp16",
     "gradients summed over micro-batches and ranks; those of one micro-batch and layer are fp32",
     .needs = "use-precision-aware-optimizer, fp16: fp16"},
    {"main-params-dtype", MT_CHOICE, MT_AT(stack.main_params_dtype), MT_TRAIN, MT_OF_RUN, "fp32", "fp32|fp16",
     "master weights; fp16: with a scale for each parameter", .needs = "use-precision-aware-optimizer, fp16: bf16",
     .excludes = "fp16: optimizer-cpu-offload"},
    {"exp-avg-dtype", MT_CHOICE, MT_AT(stack.exp_avg_dtype), MT_TRAIN, MT_OF_RUN, "fp32", "fp32|bf16|fp16|fp8",
     "Adam's first moment; fp16 and fp8 (e4m3): with a scale for each parameter",
     .needs = "use-precision-aware-optimizer", .excludes = "fp16|fp8: optimizer-cpu-offload"},
    {"exp-avg-sq-dtype", MT_CHOICE, MT_AT(stack.exp_avg_sq_dtype), MT_TRAIN, MT_OF_RUN, "fp32", "fp32|bf16|fp16|fp8",
     "Adam's second moment, likewise", .needs = "use-precision-aware-optimizer",
     .excludes = "fp16|fp8: optimizer-cpu-offload"},

    {.help = "bad steps"},
    {"check-for-nan-in-loss-and-grad", MT_FLAG, MT_AT(stack.check_for_nan_in_loss_and_grad), MT_TRAIN, MT_OF_RUN,
     "true", NULL, "treat a step as bad if its loss or gradient norm is not finite", .own = true},
    {"no-check-for-nan-in-loss-and-grad", MT_NO, MT_AT(stack.check_for_nan_in_loss_and_grad), MT_TRAIN, MT_OF_RUN, NULL,
     NULL, "continue after a loss or gradient norm that is not finite"},
    {"check-for-spiky-loss", MT_FLAG, MT_AT(stack.check_for_spiky_loss), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "treat a step as bad if its loss is far above the running average; not with --stage rl, whose losses have either "
     "sign and no scale"},
    {"loss-spike-factor", MT_REAL, MT_AT(stack.loss_spike_factor), MT_TRAIN, MT_OF_RUN, "10", "(1,1e6]",
     "a loss above this many times the average is a spike", .needs = "check-for-spiky-loss", .own = true},
    {"loss-spike-window", MT_INT, MT_AT(stack.loss_spike_window), MT_TRAIN, MT_OF_RUN, "100", "[1,1000000000]",
     "steps of the running average; earlier steps are never spikes", .needs = "check-for-spiky-loss", .own = true},
    {"bad-step-policy", MT_CHOICE, MT_AT(stack.bad_step_policy), MT_TRAIN, MT_OF_RUN, "stop", "stop|skip|rewind",
     "stop: end the run; skip: make no update; rewind: return to the last checkpoint and skip the step if it is bad "
     "again",
     .needs = "rewind: save", .excludes = "rewind: stage rl", .own = true},
    {"max-bad-steps-in-a-row", MT_INT, MT_AT(stack.max_bad_steps_in_a_row), MT_TRAIN, MT_OF_RUN, "3", "[1,1000000000]",
     "end the run after more consecutive bad steps than this", .needs = "bad-step-policy skip|rewind", .own = true},
    {"rerun-mode", MT_CHOICE, MT_AT(stack.rerun_mode), MT_TRAIN, MT_OF_RUN, "disabled", "disabled|validate_results",
     "repeat a bad step to distinguish a transient fault from a reproducible one, and name the rank; implies "
     "--deterministic-mode"},
    {"error-injection-rate", MT_INT, MT_AT(stack.error_injection_rate), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "test the reruns: of this many micro-batches of a rank, after the run's first step, one makes its step faulty, on "
     "average; 0: none",
     .needs = "rerun-mode validate_results", .excludes = "fp16"},
    {"error-injection-type", MT_CHOICE, MT_AT(stack.error_injection_type), MT_TRAIN, MT_OF_RUN, "transient_error",
     "transient_error|persistent_error|correct_result",
     "the fault: the loss is NaN, in the first run of the step or in both; or a good result is rejected",
     .needs = "error-injection-rate"},

    {.help = "data"},
    {"data-path", MT_LIST, MT_AT(data_path), MT_TRAIN, MT_OF_RUN, NULL, MT_PREFIXES,
     "indexed datasets, divided by --split: one prefix, several, or weight prefix weight prefix ...",
     .excludes = "train-data-path, mock-data, tokens-file"},
    {"split", MT_STRING, MT_AT(split), MT_TRAIN, MT_OF_RUN, "969,30,1", "A,B,C",
     "fractions of --data-path for training, validation and test", .needs = "data-path"},
    {"train-data-path", MT_LIST, MT_AT(train_data_path), MT_TRAIN, MT_OF_RUN, NULL, MT_PREFIXES,
     "datasets for training, instead of --data-path", .excludes = "mock-data, tokens-file"},
    {"valid-data-path", MT_LIST, MT_AT(valid_data_path), MT_TRAIN, MT_OF_RUN, NULL, MT_PREFIXES,
     "datasets for validation", .needs = "train-data-path"},
    {"test-data-path", MT_LIST, MT_AT(test_data_path), MT_TRAIN, MT_OF_RUN, NULL, MT_PREFIXES, "datasets for test",
     .needs = "train-data-path"},
    {"mock-data", MT_FLAG, MT_AT(mock_data), MT_TRAIN, MT_OF_RUN, NULL, NULL, "train on synthetic tokens",
     .excludes = "tokens-file"},
    {"data-seed", MT_INT, MT_AT(data_seed), MT_TRAIN, MT_OF_RUN, "-1", "[-1,4294967295]",
     "seed of the order of samples or prompts, and of synthetic tokens; weights, dropout and responses keep --seed; "
     "-1: --seed",
     .own = true},
    {"tokens-file", MT_STRING, MT_AT(tokens_file), MT_TRAIN, MT_OF_RUN, NULL, "FILE",
     "int32 [iterations, global batch, seq + 1], read in order",
     .excludes = "reset-position-ids, reset-attention-mask, eod-mask-loss, dataloader-type", .own = true},
    {"tokenizer-type", MT_CHOICE, MT_AT(tokenizer_type), MT_BOTH, MT_OF_RUN, "auto", MT_TOKENIZER_TYPES,
     "type of tokenizer; auto: the one in the --load folder",
     .needs = "HuggingFaceTokenizer|SentencePieceTokenizer|GPT2BPETokenizer|TikTokenizer: tokenizer-model"},
    {"tiktoken-pattern", MT_CHOICE, MT_AT(tiktoken_pattern), MT_BOTH, MT_OF_RUN, "v2", "v1|v2",
     "how TikTokenizer splits texts into words", .needs = "tokenizer-type TikTokenizer"},
    {"tiktoken-num-special-tokens", MT_INT, MT_AT(tiktoken_num_special_tokens), MT_BOTH, MT_OF_RUN, "1000",
     "[7,1000000]", "its first ids, which are special tokens", .needs = "tokenizer-type TikTokenizer"},
    {"tokenizer-model", MT_STRING, MT_AT(tokenizer_model), MT_BOTH, MT_OF_RUN, NULL, "PATH",
     "the tokenizer's file or folder, or ORG/NAME in the cache of Hugging Face",
     .needs = "tokenizer-type HuggingFaceTokenizer|SentencePieceTokenizer|GPT2BPETokenizer|TikTokenizer"},
    {"vocab-file", MT_STRING, MT_AT(vocab_file), MT_BOTH, MT_OF_RUN, NULL, "FILE",
     "vocab.json of GPT-2: with --merge-file, --tokenizer-type GPT2BPETokenizer", .needs = "merge-file",
     .excludes = "tokenizer-model"},
    {"merge-file", MT_STRING, MT_AT(merge_file), MT_BOTH, MT_OF_RUN, NULL, "FILE", "merges.txt beside --vocab-file",
     .needs = "vocab-file", .excludes = "tokenizer-model"},
    {"dataloader-type", MT_CHOICE, MT_AT(dataloader_type), MT_TRAIN, MT_OF_RUN, NULL, "single|cyclic",
     "single: samples in order, once: data that are too short for the run are an error; cyclic: a new shuffle every "
     "epoch; without this option samples are read in order, and data that are too short again, as Megatron-LM does"},
    {"reset-position-ids", MT_FLAG, MT_AT(reset_position_ids), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "restart positions after each end of document"},
    {"reset-attention-mask", MT_FLAG, MT_AT(reset_attention_mask), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "no attention between the documents of a sample"},
    {"eod-mask-loss", MT_FLAG, MT_AT(eod_mask_loss), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "no loss at positions whose input is an end of document"},
    {"fim-data", MT_FLAG, MT_AT(fim_data), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "filling in the middle: texts are cut into prefix, middle and suffix, and the middle comes last; as in "
     "Megatron-LM, "
     "but the draws depend on the data's seed and the sample's number alone, not on ranks and loading processes",
     .needs = "stage pt", .excludes = "mock-data, tokens-file, sft, dynamic-context-parallel"},
    {"fim-rate", MT_REAL, MT_AT(fim_rate), MT_TRAIN, MT_OF_RUN, "0.5", "(0,1]", "share of texts that are cut",
     .needs = "fim-data"},
    {"fim-spm-rate", MT_REAL, MT_AT(fim_spm_rate), MT_TRAIN, MT_OF_RUN, "0.5", "[0,1]",
     "share of these that have the suffix first", .needs = "fim-data"},
    {"fim-split-sample", MT_STRING, MT_AT(fim_split_sample), MT_TRAIN, MT_OF_RUN, NULL, "TOKEN",
     "a token that divides a document into fragments, which are cut one by one",
     .needs = "fim-data, fim-fragment-rate"},
    {"fim-fragment-rate", MT_REAL, MT_AT(fim_fragment_rate), MT_TRAIN, MT_OF_RUN, "0", "[0,1]",
     "share of the fragments that are cut, of a document that --fim-rate chose", .needs = "fim-split-sample"},
    {"fim-no-prefix", MT_STRING, MT_AT(fim_no_prefix), MT_TRAIN, MT_OF_RUN, NULL, "TEXT",
     "texts that begin with this are not cut", .needs = "fim-data"},
    {"fim-prefix-token", MT_STRING, MT_AT(fim_prefix_token), MT_TRAIN, MT_OF_RUN, "<fim_prefix>", "TOKEN",
     "token before a prefix", .needs = "fim-data"},
    {"fim-middle-token", MT_STRING, MT_AT(fim_middle_token), MT_TRAIN, MT_OF_RUN, "<fim_middle>", "TOKEN",
     "token before a middle", .needs = "fim-data"},
    {"fim-suffix-token", MT_STRING, MT_AT(fim_suffix_token), MT_TRAIN, MT_OF_RUN, "<fim_suffix>", "TOKEN",
     "token before a suffix", .needs = "fim-data"},
    {"fim-pad-token", MT_STRING, MT_AT(fim_pad_token), MT_TRAIN, MT_OF_RUN, "<fim_pad>", "TOKEN",
     "token that fills up a sample", .needs = "fim-data"},
    {"fim-eod-token", MT_STRING, MT_AT(fim_eod_token), MT_TRAIN, MT_OF_RUN, "<|endoftext|>", "TOKEN",
     "token between documents", .needs = "fim-data"},

    {.help = "fine-tuning: samples of any length"},
    {"sft", MT_FLAG, MT_AT(sft), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "train on samples of any length up to --seq-length, each with attention and positions of its own: on JSON Lines "
     "or Parquet in --data-path; --mock-data: with log-normal lengths",
     .excludes = "tokens-file, dataloader-type"},
    {"sequence-packing", MT_FLAG, MT_AT(sequence_packing), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "pack several samples into a row of --seq-length; a row is one sample of --global-batch-size (default for "
     "--stage rl: true)",
     .needs = "sft", .own = true},
    {"use-sequence-packing", MT_FLAG, MT_AT(sequence_packing), MT_TRAIN, MT_OF_RUN, NULL, NULL, "--sequence-packing",
     .own = true},
    {"variable-seq-lengths", MT_FLAG, MT_AT(variable_seq_lengths), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "micro-batches as long as their samples, without padding to --seq-length", .needs = "sft"},
    {"train-epochs", MT_INT, MT_AT(train_epochs), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000]",
     "visit every sample this many times, instead of --train-iters; with --stage rl every prompt, "
     "--rollout-batch-size in an iteration",
     .needs = "sft", .excludes = "train-iters, train-samples", .own = true},
    {"chat-template", MT_CHOICE, MT_AT(chat_template), MT_BOTH, MT_OF_RUN, "auto", "auto|" MT_CHAT_TEMPLATES,
     "how a conversation becomes tokens; auto: as in the tokenizer's folder; plain: the texts alone", .needs = "sft",
     .excludes = "mock-data"},
    {"chat-template-kwargs", MT_STRING, MT_AT(chat_template_kwargs), MT_BOTH, MT_OF_RUN, NULL, "JSON",
     "further variables of the chat template of the tokenizer's folder, such as {\"enable_thinking\": false}; a "
     "variable that a line of the data has wins",
     .needs = "sft", .excludes = "mock-data", .own = true},
    {"apply-chat-template-kwargs", MT_STRING, MT_AT(chat_template_kwargs), MT_BOTH, MT_OF_RUN, NULL, "JSON",
     "--chat-template-kwargs", .needs = "sft", .excludes = "mock-data", .own = true},
    {"loss-on", MT_CHOICE, MT_AT(loss_on), MT_TRAIN, MT_OF_RUN, "responses", "responses|last|all",
     "tokens that the loss counts: of all responses, of the last one, or all", .needs = "sft", .excludes = "mock-data",
     .own = true},
    {"long-samples", MT_CHOICE, MT_AT(long_samples), MT_TRAIN, MT_OF_RUN, "truncate", "truncate|drop",
     "samples longer than --seq-length; a truncated one is dropped if no token is left that the loss counts",
     .needs = "sft", .excludes = "mock-data", .own = true},
    {"skip-bad-samples", MT_INT, MT_AT(skip_bad_samples), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "lines that are no sample and are left out, each named; one more ends the run", .needs = "sft",
     .excludes = "mock-data", .own = true},
    {"messages-key", MT_STRING, MT_AT(messages_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field of a line with a list of messages, each with role and content (default: messages)", .needs = "sft",
     .excludes = "mock-data", .own = true},
    {"prompt-key", MT_STRING, MT_AT(prompt_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the prompt (default: prompt or instruction)", .needs = "sft", .excludes = "mock-data", .own = true},
    {"image-key", MT_STRING, MT_AT(image_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the pictures beside the messages (default: images or image)", .needs = "sft, any: vision-tower",
     .excludes = "mock-data", .own = true},
    {"image-folder", MT_STRING, MT_AT(image_folder), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "where relative paths of pictures begin (default: the folder of the file that names them)",
     .needs = "sft, any: vision-tower", .excludes = "mock-data", .own = true},
    {"query-key", MT_STRING, MT_AT(query_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the input that follows the prompt on the next line, or with nothing (default: input)", .needs = "sft",
     .excludes = "mock-data", .own = true},
    {"response-key", MT_STRING, MT_AT(response_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the response (default: response or output)", .needs = "sft", .excludes = "mock-data", .own = true},

    {.help = "after pre-training"},
    {"stage", MT_CHOICE, MT_AT(stack.stage), MT_TRAIN, MT_OF_RUN, "pt", "pt|sft|rm|dpo|rl|kd",
     "pt: pre-training; sft: --sft; rm: a reward model, from pairs of a chosen and a rejected response; dpo: direct "
     "preference optimization on such pairs; rl: reinforcement learning on the model's own responses to the prompts of "
     "--data-path; kd: distillation, on the samples of --sft, or of --kd-data",
     .needs = "kd: teacher-load, rl: data-path",
     .excludes = "rm|dpo|rl|kd|sft: tokens-file, rm|dpo|rl|kd|sft: dataloader-type, rm|dpo|rl: "
                 "reset-position-ids, rm|dpo|rl: reset-attention-mask, rm|dpo|rl: eod-mask-loss, "
                 "rm|dpo|rl: response-key, rm|rl: loss-on, rl: long-samples, rl: variable-seq-lengths, rl: split, rl: "
                 "valid-data-path, rl: test-data-path, rl: eval-interval, rl: profile, rl: trace, rl: log-straggler, "
                 "rl: timing-log-level, rl: check-for-spiky-loss",
     .own = true},
    {"value-head", MT_FLAG, MT_AT(value_head), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "a language model in --load gets a value head with random weights", .needs = "stage rm, load", .own = true},
    {"ref-load", MT_STRING, MT_AT(ref_load), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "the reference model (default: the model of --load before training; with adapters, this model while they are "
     "switched off)",
     .needs = "stage dpo|rl", .own = true},
    {"ref-logps-in-data", MT_FLAG, MT_AT(ref_logps_in_data), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "no reference model: pairs have its log-probabilities, ref_chosen_logp and ref_rejected_logp, each the sum over "
     "the tokens of a response that the loss counts (\"logprob\" of infer --score)",
     .needs = "stage dpo",
     .excludes = "ref-load, mock-data, ref-tensor-model-parallel-size, ref-pipeline-model-parallel-size, "
                 "ref-expert-model-parallel-size",
     .own = true},
    {"preference-loss", MT_CHOICE, MT_AT(preference_loss), MT_TRAIN, MT_OF_RUN, "sigmoid", "sigmoid|ipo|hinge",
     "loss of a pair: -log sigmoid(beta h), (h - 1 / (2 beta))^2 or max(0, 1 - beta h), where h is the margin of the "
     "log-probabilities over those of the reference model",
     .needs = "stage dpo", .own = true},
    {"ipo", MT_FLAG, MT_AT(ipo), MT_TRAIN, MT_OF_RUN, NULL, NULL, "--preference-loss ipo", .needs = "stage dpo",
     .excludes = "preference-loss", .own = true},
    {"beta", MT_REAL, MT_AT(beta), MT_TRAIN, MT_OF_RUN, "0.1", "(0,1e6]",
     "how strongly a preference is held against the reference model", .needs = "stage dpo", .own = true},
    {"label-smoothing", MT_REAL, MT_AT(label_smoothing), MT_TRAIN, MT_OF_RUN, "0", "[0,0.5)",
     "probability that a pair is labelled the wrong way round", .needs = "stage dpo",
     .excludes = "ipo, preference-loss ipo|hinge", .own = true},
    {"chosen-key", MT_STRING, MT_AT(chosen_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the chosen response (default: chosen)", .needs = "stage rm|dpo", .own = true},
    {"rejected-key", MT_STRING, MT_AT(rejected_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the rejected response (default: rejected)", .needs = "stage rm|dpo", .own = true},
    {"teacher-load", MT_STRING, MT_AT(teacher_load), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "the teacher: a language model of any shape with the student's vocabulary", .needs = "stage kd|rl",
     .excludes = "rerun-mode validate_results", .own = true}, // a step that is repeated needs the logits again
    {"export-kd-teacher-load", MT_STRING, MT_AT(export_kd_teacher_load), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "--stage kd --teacher-load DIR --kd-balance hidden, and without --sft --kd-data pretraining", .own = true},
    {"export-kd-cfg", MT_STRING, MT_AT(export_kd_cfg), MT_TRAIN, MT_OF_RUN, NULL, "FILE",
     "Model Optimizer's YAML file of a distillation: intermediate_layer_pairs, logit_layers, skip_lm_loss, "
     "kd_loss_scale, logit_kl_temperature, logit_kl_topk",
     .own = true},
    {"kd-data", MT_CHOICE, MT_AT(kd_data), MT_TRAIN, MT_OF_RUN, "sft", "sft|pretraining",
     "samples of distillation: those of --sft, or those of pre-training, where every token counts", .needs = "stage kd",
     .excludes = "pretraining: sft", .own = true},
    {"kd-hidden-layers", MT_LIST, MT_AT(kd_hidden_layers), MT_TRAIN, MT_OF_RUN, NULL, "PAIR...",
     "hidden states that the student learns, pairs STUDENT:TEACHER or STUDENT:TEACHER:cosine|mse of decoder.layers.N, "
     "the output of layer N from 0, or decoder.final_layernorm; both models are as wide, and these layers are on the "
     "pipeline stage with the loss",
     .needs = "stage kd", .own = true},
    {"kd-hidden-weight", MT_REAL, MT_AT(kd_hidden_weight), MT_TRAIN, MT_OF_RUN, "1", "[0,1e6]",
     "weight v of the mean of the pairs' losses in (1 - w) cross-entropy + w (divergence + v hidden), where w is "
     "--distill-loss-weight",
     .needs = "kd-hidden-layers", .excludes = "kd-balance hidden|all", .own = true},
    {"kd-balance", MT_CHOICE, MT_AT(kd_balance), MT_TRAIN, MT_OF_RUN, "fixed", "fixed|hidden|all",
     "weights of the losses: fixed ones; or each micro-batch scales the hidden states' loss to the size of the "
     "divergence, and their sum is the loss (hidden), or is scaled to the size of the cross-entropy and added to it "
     "(all)",
     .needs = "stage kd", .excludes = "hidden|all: distill-loss-weight", .own = true},
    {"kd-loss-scale", MT_REAL, MT_AT(kd_loss_scale), MT_TRAIN, MT_OF_RUN, "1", "(0,1e6]",
     "factor of the sum that --kd-balance all adds", .needs = "kd-balance all", .own = true},
    {"kd-objective", MT_CHOICE, MT_AT(kd_objective), MT_TRAIN, MT_OF_RUN, "forward_kl",
     "forward_kl|reverse_kl|adaptive_kl|skewed_forward_kl|skewed_reverse_kl|js_divergence",
     "divergence of the student from the teacher", .needs = "stage kd", .own = true},
    {"kd-temperature", MT_REAL, MT_AT(kd_temperature), MT_TRAIN, MT_OF_RUN, "1", "(0,1e6]",
     "divides the logits of both in the divergence", .needs = "stage kd", .own = true},
    {"logits-topk", MT_INT, MT_AT(logits_topk), MT_TRAIN, MT_OF_RUN, "0", "[0,16777216]",
     "logits of a token in the divergence: the teacher's greatest; 0: the whole vocabulary, which keeps the logits of "
     "a step in host memory",
     .needs = "stage kd", .own = true},
    {"distill-loss-weight", MT_REAL, MT_AT(distill_loss_weight), MT_TRAIN, MT_OF_RUN, "0.5", "[0,1]",
     "weight w of the divergence in the loss (1 - w) cross-entropy + w divergence", .needs = "stage kd", .own = true},
    {"skew-lambda", MT_REAL, MT_AT(skew_lambda), MT_TRAIN, MT_OF_RUN, "0.1", "[0,1)",
     "skewed divergences: part of the first distribution in the second",
     .needs = "kd-objective skewed_forward_kl|skewed_reverse_kl", .own = true},
    {"adaptive-kl-alpha", MT_REAL, MT_AT(adaptive_kl_alpha), MT_TRAIN, MT_OF_RUN, "0.5", "[0,1]",
     "adaptive_kl: the teacher's tail has at most this probability", .needs = "kd-objective adaptive_kl", .own = true},

    {.help = "on-policy distillation"},
    {"distillation-in", MT_CHOICE, MT_AT(distillation_in), MT_TRAIN, MT_OF_RUN, "none",
     "none|loss|policy-gradient|advantages",
     "the divergence of the actor from a teacher at the tokens of its own responses: a term of the loss; the negative "
     "advantages of a second policy loss; or subtracted from the advantages, by the old log-probabilities. The teacher "
     "is --teacher-load, one of --teachers for each prompt, or --self-distillation",
     .needs = "stage rl", .own = true},
    {"distillation-loss-mode", MT_CHOICE, MT_AT(distillation_loss_mode), MT_TRAIN, MT_OF_RUN, "k1",
     "k1|abs|k2|k3|forward_kl_topk",
     "that divergence: an estimate from the tokens of the responses (default: k1, in the loss k3), or forward_kl_topk, "
     "the sum of q (log q - log p) over the teacher's most probable tokens at each position, at least 0",
     .needs = "distillation-in loss|policy-gradient|advantages", .own = true},
    {"distillation-topk", MT_INT, MT_AT(distillation_topk), MT_TRAIN, MT_OF_RUN, "32", "[1,1000000]",
     "forward_kl_topk: number of these tokens", .needs = "distillation-loss-mode forward_kl_topk", .own = true},
    {"distillation-log-prob-min-clamp", MT_REAL, MT_AT(distillation_min_clamp), MT_TRAIN, MT_OF_RUN, NULL, "[-1e6,0)",
     "forward_kl_topk: raise lower log-probabilities of both models to this, and those of the actor then have no "
     "gradient (default: none)",
     .needs = "distillation-loss-mode forward_kl_topk", .own = true},
    {"distillation-loss-coef", MT_REAL, MT_AT(distillation_loss_coef), MT_TRAIN, MT_OF_RUN, "1", "(0,1e6]",
     "its weight", .needs = "distillation-in loss|policy-gradient|advantages", .own = true},
    {"distillation-loss-max-clamp", MT_REAL, MT_AT(distillation_max_clamp), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]",
     "clip the divergence of a token to at most this in magnitude (default: none)",
     .needs = "distillation-in loss|policy-gradient|advantages", .own = true},
    {"distillation-clip-ratio-low", MT_REAL, MT_AT(distillation_clip_ratio_low), MT_TRAIN, MT_OF_RUN, "0.2", "(0,1e6]",
     "clip the ratio of the second policy loss downwards to 1 - this", .needs = "distillation-in policy-gradient",
     .own = true},
    {"distillation-clip-ratio-high", MT_REAL, MT_AT(distillation_clip_ratio_high), MT_TRAIN, MT_OF_RUN, "0.2",
     "(0,1e6]", "the same upwards to 1 + this", .needs = "distillation-in policy-gradient", .own = true},
    {"use-task-rewards", MT_FLAG, MT_AT(use_task_rewards), MT_TRAIN, MT_OF_RUN, "true", NULL,
     "rewards train too, beside the divergence", .needs = "distillation-in loss|policy-gradient|advantages",
     .own = true},
    {"no-use-task-rewards", MT_NO, MT_AT(use_task_rewards), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "they are reported only: the divergence alone trains, and --reward none needs no answers",
     .needs = "distillation-in loss|policy-gradient|advantages",
     .excludes = "adv-estimator gae|remax, dynamic-sampling", .own = true},
    {"teachers", MT_LIST, MT_AT(teachers), MT_TRAIN, MT_OF_RUN, NULL, "KEY=DIR...",
     "teachers of the prompts whose field --teacher-key is KEY, or, for *, no other's",
     .needs = "distillation-in loss|policy-gradient|advantages", .excludes = "teacher-load, self-distillation",
     .own = true},
    {"teacher-key", MT_STRING, MT_AT(teacher_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field of a line of --data-path that names its teacher (default: data_source)", .needs = "teachers", .own = true},
    {"self-distillation", MT_CHOICE, MT_AT(self_distillation), MT_TRAIN, MT_OF_RUN, "none", "none|initial|lagging",
     "the actor teaches itself: the teacher is the reference model (--ref-load, or the model before training), or a "
     "copy of the actor that is renewed every --teacher-interval iterations",
     .needs = "distillation-in loss|policy-gradient|advantages", .excludes = "teacher-load", .own = true},
    {"teacher-interval", MT_INT, MT_AT(teacher_interval), MT_TRAIN, MT_OF_RUN, "10", "[1,1000000000]",
     "iterations after which the copy is renewed", .needs = "self-distillation lagging", .own = true},

    {.help = "reinforcement learning"},
    {"rollout-batch-size", MT_INT, MT_AT(rollout_batch_size), MT_TRAIN, MT_OF_RUN, "8", "[1,1073741824]",
     "prompts of an iteration", .needs = "stage rl", .own = true},
    {"rollout-lag", MT_INT, MT_AT(rollout_lag), MT_TRAIN, MT_OF_RUN, "0", "[0,64]",
     "train on responses that the weights of this many iterations ago wrote, with the log-probabilities that these "
     "gave them; the first iteration writes the responses of all of these iterations, and the last ones write "
     "some that only a longer run reads. Writing and training take turns on all ranks, unless --rollout-ranks write",
     .needs = "stage rl", .own = true},
    {"rollout-ranks", MT_INT, MT_AT(rollout_ranks), MT_TRAIN, MT_OF_RUN, "0", "[0,1048576]",
     "the last ranks of the job, this many, write responses with a copy of the actor's weights while the others train: "
     "data-parallel, and by --rollout-tensor-model-parallel-size. The responses are those of the same --rollout-lag "
     "without such ranks",
     .needs = "stage rl, rollout-lag, bypass-mode",
     .excludes = "dynamic-sampling, env-command, partial-rollout-max-split, adv-estimator remax, router-replay R2|R3, "
                 "lora-rank",
     .own = true},
    {"partial-rollout-max-split", MT_INT, MT_AT(partial_rollout_max_split), MT_TRAIN, MT_OF_RUN, "1", "[1,1024]",
     "write a response in up to this many iterations: generation goes by phases of --max-new-tokens / this tokens, and "
     "stops when --rollout-batch-size prompts have all their responses; the others go on in the next iteration, with "
     "its weights, and their tokens keep the log-probabilities of the weights that wrote them. Each phase reads its "
     "texts again, and an iteration trains on the oldest prompts that have ended, short responses first",
     .needs = "stage rl",
     .excludes = "env-command, stop, adv-estimator remax|optimal_token_baseline, router-replay R2, prompt-shares",
     .own = true},
    {"over-sampling-batch-size", MT_INT, MT_AT(over_sampling_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741824]",
     "prompts in progress at once, up to twice --rollout-batch-size (default: twice)",
     .needs = "partial-rollout-max-split", .own = true},
    {"max-head-offpolicyness", MT_INT, MT_AT(max_head_offpolicyness), MT_TRAIN, MT_OF_RUN, NULL, "[1,2048]",
     "most iterations between the weights that write a token and the iteration that trains on it: a prompt that would "
     "wait longer is finished first (default: --rollout-lag + --partial-rollout-max-split)",
     .needs = "partial-rollout-max-split", .own = true},
    {"reward", MT_CHOICES, MT_AT(reward), MT_TRAIN, MT_OF_RUN, "exact", "exact|number|regex|command|model|env|none",
     "reward of a response: 1 if it is the answer, or if its last number is, or if a pattern matches; the number that "
     "a program writes; the value of a reward model; the rewards of --env-command (its default); none, where a teacher "
     "alone trains; several are added up; "
     "of a conversation the first four read the last response",
     .needs = "stage rl, regex: reward-pattern, command: reward-command, model: reward-load, env: env-command",
     .own = true},
    {"reward-pattern", MT_STRING, MT_AT(reward_pattern), MT_TRAIN, MT_OF_RUN, NULL, "PATTERN",
     "a pattern of PCRE2; its group \"answer\", if it has one, must be the answer", .needs = "reward regex",
     .own = true},
    {"reward-command", MT_STRING, MT_AT(reward_command), MT_TRAIN, MT_OF_RUN, NULL, "COMMAND",
     "reads a line {\"prompt\", \"response\", \"answer\"} for each response and writes a number for each",
     .needs = "reward command", .own = true},
    {"reward-timeout-seconds", MT_REAL, MT_AT(reward_timeout_seconds), MT_TRAIN, MT_OF_RUN, "60", "(0,1e9]",
     "most seconds for the rewards of an iteration", .needs = "reward command", .own = true},
    {"env-command", MT_STRING, MT_AT(env_command), MT_TRAIN, MT_OF_RUN, NULL, "COMMAND",
     "an environment that answers the model, such as tools, a user or a game, in conversations of several turns: reads "
     "a line {\"id\", \"messages\", \"answer\", \"turns_left\"} for each conversation and writes a line {\"id\", "
     "\"messages\": those to append, \"reward\", \"done\"} for each, in any order; --max-new-tokens counts all tokens "
     "behind the prompt",
     .needs = "stage rl", .excludes = "stop, adv-estimator remax|gigpo|step_reinforce", .own = true},
    {"env-max-turns", MT_INT, MT_AT(env_max_turns), MT_TRAIN, MT_OF_RUN, "8", "[1,10000]",
     "most responses of the model in a conversation", .needs = "env-command", .own = true},
    {"env-timeout-seconds", MT_REAL, MT_AT(env_timeout_seconds), MT_TRAIN, MT_OF_RUN, "60", "(0,1e9]",
     "most seconds for the environment's answers to a turn of all conversations", .needs = "env-command", .own = true},
    {"reward-load", MT_STRING, MT_AT(reward_load), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "the reward model: of any shape, with the actor's vocabulary", .needs = "reward model", .own = true},
    {"reward-weights", MT_REALS, MT_AT(reward_weights), MT_TRAIN, MT_OF_RUN, NULL, "[-1e6,1e6]",
     "weight of each --reward, in their order (default: 1)", .needs = "stage rl", .own = true},
    {"norm-mean-type", MT_CHOICE, MT_AT(norm_mean_type), MT_TRAIN, MT_OF_RUN, "none", "none|batch|group",
     "subtract from a reward the mean of those of the iteration, or of its prompt",
     .needs = "stage rl, adv-estimator gae|reinforce|reinforce_plus_plus|step_reinforce", .own = true},
    {"norm-std-type", MT_CHOICE, MT_AT(norm_std_type), MT_TRAIN, MT_OF_RUN, "none", "none|batch|group",
     "divide it by their standard deviation",
     .needs = "stage rl, adv-estimator gae|reinforce|reinforce_plus_plus|step_reinforce", .own = true},
    {"reward-clip", MT_REAL, MT_AT(reward_clip), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e9]",
     "clip rewards to at most this in magnitude (default: none)", .needs = "stage rl", .own = true},
    {"answer-key", MT_STRING, MT_AT(answer_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the answer to a prompt (default: answer)", .needs = "stage rl", .own = true},
    {"adv-estimator", MT_CHOICE, MT_AT(adv_estimator), MT_TRAIN, MT_OF_RUN, "grpo",
     "gae|grpo|rloo|reinforce|reinforce_plus_plus|reinforce_plus_plus_baseline|opo|gpg|grpo_passk|remax|"
     "gdpo|gigpo|step_reinforce|optimal_token_baseline",
     "advantages: gae trains a critic beside the actor; grpo, rloo, reinforce_plus_plus_baseline, opo, gpg, "
     "grpo_passk, gdpo, gigpo and optimal_token_baseline (on the CPU) compare the responses to one prompt, gdpo by "
     "each reward on its own; remax compares "
     "them with a greedy response",
     .needs = "stage rl", .own = true},
    {"norm-adv-by-std", MT_FLAG, MT_AT(norm_adv_by_std), MT_TRAIN, MT_OF_RUN, "true", NULL,
     "grpo, grpo_passk, gdpo, gigpo: divide by the standard deviation of the group's rewards",
     .needs = "stage rl, adv-estimator grpo|grpo_passk|gdpo|gigpo", .own = true},
    {"no-norm-adv-by-std", MT_NO, MT_AT(norm_adv_by_std), MT_TRAIN, MT_OF_RUN, NULL, NULL, "do not",
     .needs = "stage rl, adv-estimator grpo|grpo_passk|gdpo|gigpo", .own = true},
    {"whiten-advantages", MT_FLAG, MT_AT(whiten_advantages), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "advantages of an iteration get mean 0 and deviation 1", .needs = "stage rl", .own = true},
    {"advantage-clip", MT_REAL, MT_AT(advantage_clip), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e9]",
     "clip advantages to at most this in magnitude (default: none)", .needs = "stage rl", .own = true},
    {"gamma", MT_REAL, MT_AT(gamma), MT_TRAIN, MT_OF_RUN, "1", "[0,1]", "discount of later rewards",
     .needs = "stage rl, adv-estimator gae|reinforce|reinforce_plus_plus|step_reinforce", .own = true},
    {"episode-reward-weight", MT_REAL, MT_AT(episode_reward_weight), MT_TRAIN, MT_OF_RUN, "1", "[0,1e6]",
     "weight of the advantage of a response", .needs = "adv-estimator gigpo", .own = true},
    {"step-reward-weight", MT_REAL, MT_AT(step_reward_weight), MT_TRAIN, MT_OF_RUN, "1", "[0,1e6]",
     "weight of the advantage of its step, which with one turn is the same", .needs = "adv-estimator gigpo",
     .own = true},
    {"lam", MT_REAL, MT_AT(lam), MT_TRAIN, MT_OF_RUN, "1", "[0,1]", "lambda of gae", .needs = "adv-estimator gae",
     .own = true},
    {"dynamic-sampling", MT_FLAG, MT_AT(dynamic_sampling), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "drop the prompts whose responses all have one reward, and draw others instead (DAPO)", .needs = "stage rl",
     .own = true},
    {"dynamic-sampling-max-rounds", MT_INT, MT_AT(dynamic_sampling_max_rounds), MT_TRAIN, MT_OF_RUN, "10",
     "[1,1000000]",
     "most rounds of responses in an iteration, which then trains on the prompts that it has; 1: no others are drawn",
     .needs = "dynamic-sampling", .own = true},
    {"overlong-mask", MT_FLAG, MT_AT(overlong_mask), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "do not train on responses that are cut off at --max-new-tokens", .needs = "stage rl", .own = true},
    {"overlong-penalty", MT_REAL, MT_AT(overlong_penalty), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e9]",
     "subtract this from the rewards of responses that are cut off", .needs = "stage rl",
     .excludes = "overlong-mask, overlong-buffer-length", .own = true},
    {"overlong-buffer-length", MT_INT, MT_AT(overlong_buffer_length), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741824]",
     "soft overlong punishment (DAPO): in the last tokens before --max-new-tokens, this many, a penalty grows from 0 "
     "to --overlong-penalty-factor",
     .needs = "stage rl", .excludes = "overlong-mask", .own = true},
    {"overlong-penalty-factor", MT_REAL, MT_AT(overlong_penalty_factor), MT_TRAIN, MT_OF_RUN, "1", "(0,1e9]",
     "the most that it subtracts from a reward", .needs = "overlong-buffer-length", .own = true},
    {"ppo-epochs", MT_INT, MT_AT(ppo_epochs), MT_TRAIN, MT_OF_RUN, "1", "[1,1000]",
     "passes over the responses of an iteration, in steps of --global-batch-size (default: of all)",
     .needs = "stage rl", .own = true},
    {"shuffle-mini-batches", MT_FLAG, MT_AT(shuffle_mini_batches), MT_TRAIN, MT_OF_RUN, "true", NULL,
     "draw the responses of each step at random", .needs = "stage rl", .own = true},
    {"no-shuffle-mini-batches", MT_NO, MT_AT(shuffle_mini_batches), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "take them in the order of their prompts", .needs = "stage rl", .own = true},
    {"prompt-shares", MT_LIST, MT_AT(prompt_shares), MT_TRAIN, MT_OF_RUN, NULL, "TAG,TAG=SHARE",
     "an iteration has these shares of prompts whose lines have one of the tags (*: any other), the last what is left; "
     "prompts with other tags are left out (default: prompts of all files alike)",
     .needs = "stage rl", .own = true},
    {"tag-key", MT_STRING, MT_AT(tag_key), MT_TRAIN, MT_OF_RUN, NULL, "KEY",
     "field with the tag of a prompt (default: tag); \"domain\" comes before it", .needs = "prompt-shares",
     .own = true},
    {"shuffle-prompts", MT_FLAG, MT_AT(shuffle_prompts), MT_TRAIN, MT_OF_RUN, "true", NULL,
     "draw the order of the prompts anew in every pass over them", .needs = "stage rl", .own = true},
    {"no-shuffle-prompts", MT_NO, MT_AT(shuffle_prompts), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "take them in the order of the files", .needs = "stage rl", .own = true},
    {"pg-variant", MT_CHOICE, MT_AT(pg_variant), MT_TRAIN, MT_OF_RUN, "ppo",
     "ppo|vanilla|gspo|cispo|gmpo|gpg|sapo|dppo_tv|dppo_kl|dro|kimi15|kl_cov|clip_cov|tis|topr|opmd|sppo|sapo_detached",
     "policy loss; vanilla: verl's name for ppo; sapo_detached: Trinity-RFT's sapo", .needs = "stage rl", .own = true},
    {"clip-ratio", MT_REAL, MT_AT(clip_ratio), MT_TRAIN, MT_OF_RUN, "0.2", "(0,1e6]",
     "clip the ratio of new and old probabilities to 1 -+ this", .needs = "stage rl", .own = true},
    {"clip-ratio-low", MT_REAL, MT_AT(clip_ratio_low), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]",
     "the same downwards (default: --clip-ratio)", .needs = "stage rl", .own = true},
    {"clip-ratio-high", MT_REAL, MT_AT(clip_ratio_high), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]",
     "the same upwards (default: --clip-ratio)", .needs = "stage rl", .own = true},
    {"clip-ratio-c", MT_REAL, MT_AT(clip_ratio_c), MT_TRAIN, MT_OF_RUN, NULL, "(1,1e6]",
     "dual clipping: most loss of a token with a negative advantage, in advantages; dppo: most of the ratio "
     "(default: none)",
     .needs = "pg-variant ppo|vanilla|dppo_tv|dppo_kl", .own = true},
    {"tau-pos", MT_REAL, MT_AT(tau_pos), MT_TRAIN, MT_OF_RUN, "1", "(0,1e6]",
     "steepness of the gate for positive advantages", .needs = "pg-variant sapo|sapo_detached", .own = true},
    {"tau-neg", MT_REAL, MT_AT(tau_neg), MT_TRAIN, MT_OF_RUN, "1.05", "(0,1e6]", "the same for the others",
     .needs = "pg-variant sapo|sapo_detached", .own = true},
    {"dro-beta", MT_REAL, MT_AT(dro_beta), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]",
     "weight of the squared logarithm of the ratio", .needs = "pg-variant dro", .own = true},
    {"kimi15-tau", MT_REAL, MT_AT(kimi15_tau), MT_TRAIN, MT_OF_RUN, "0.1", "(0,1e6]", "the same in kimi15",
     .needs = "pg-variant kimi15", .own = true},
    {"opmd-tau", MT_REAL, MT_AT(opmd_tau), MT_TRAIN, MT_OF_RUN, "1", "[0,1e6]", "divide the loss by 1 + this",
     .needs = "pg-variant opmd", .own = true},
    {"tis-lower-bound", MT_REAL, MT_AT(tis_lower_bound), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]", "least ratio",
     .needs = "pg-variant tis", .own = true},
    {"tis-upper-bound", MT_REAL, MT_AT(tis_upper_bound), MT_TRAIN, MT_OF_RUN, "1", "(0,1e6]", "greatest ratio",
     .needs = "pg-variant tis", .own = true},
    {"topr-positive-weight", MT_REAL, MT_AT(topr_positive_weight), MT_TRAIN, MT_OF_RUN, "1", "[0,1e6]",
     "weight of responses with a score above 0", .needs = "pg-variant topr", .own = true},
    {"topr-negative-weight", MT_REAL, MT_AT(topr_negative_weight), MT_TRAIN, MT_OF_RUN, "1", "[0,1e6]",
     "weight of the others", .needs = "pg-variant topr", .own = true},
    {"kl-cov-ratio", MT_REAL, MT_AT(kl_cov_ratio), MT_TRAIN, MT_OF_RUN, "0.0002", "(0,1]",
     "share of the tokens of a step, those whose advantage and log-probability vary together most, whose divergence "
     "from the old policy is added",
     .needs = "pg-variant kl_cov", .own = true},
    {"ppo-kl-coef", MT_REAL, MT_AT(ppo_kl_coef), MT_TRAIN, MT_OF_RUN, "0.1", "[0,1e6]", "weight of that divergence",
     .needs = "pg-variant kl_cov", .own = true},
    {"clip-cov-ratio", MT_REAL, MT_AT(clip_cov_ratio), MT_TRAIN, MT_OF_RUN, "0.0002", "(0,1]",
     "share of the tokens of a step that is left out, drawn from those whose advantage and log-probability vary "
     "together",
     .needs = "pg-variant clip_cov", .own = true},
    {"clip-cov-lb", MT_REAL, MT_AT(clip_cov_lb), MT_TRAIN, MT_OF_RUN, "1", "[-1e6,1e6]", "least covariance of these",
     .needs = "pg-variant clip_cov", .own = true},
    {"clip-cov-ub", MT_REAL, MT_AT(clip_cov_ub), MT_TRAIN, MT_OF_RUN, "5", "[-1e6,1e6]", "greatest covariance of these",
     .needs = "pg-variant clip_cov", .own = true},
    {"loss-agg-mode", MT_CHOICE, MT_AT(loss_agg_mode), MT_TRAIN, MT_OF_RUN, "token-mean",
     "token-mean|seq-mean-token-sum|seq-mean-token-mean|seq-mean-token-sum-norm",
     "mean of the tokens' losses; the last divides sums by --max-new-tokens; gspo, gmpo and sapo have "
     "seq-mean-token-mean alone, which is their default",
     .needs = "stage rl", .own = true},
    {"rollout-is", MT_CHOICE, MT_AT(rollout_is), MT_TRAIN, MT_OF_RUN, "none", "none|token|sequence",
     "weigh each token's policy loss by the ratio of its probabilities in training and in the generator, or by that of "
     "its response",
     .needs = "stage rl", .own = true},
    {"rollout-is-threshold", MT_STRING, MT_AT(rollout_is_threshold), MT_TRAIN, MT_OF_RUN, "2", "HIGH|LOW_HIGH",
     "greatest weight; with two numbers, weights outside are 0", .needs = "rollout-is token|sequence", .own = true},
    {"rollout-is-batch-normalize", MT_FLAG, MT_AT(rollout_is_batch_normalize), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "divide the weights by their mean over the iteration", .needs = "rollout-is token|sequence", .own = true},
    {"rollout-rs", MT_STRING, MT_AT(rollout_rs), MT_TRAIN, MT_OF_RUN, NULL, "RULE,RULE",
     "leave out tokens (token_k1 to k3) or responses (seq_sum_k1 to k3, seq_mean_k1 to k3, seq_max_k2 and k3) whose "
     "divergence between generator and training is beyond a bound",
     .needs = "stage rl, rollout-rs-threshold", .own = true},
    {"rollout-rs-threshold", MT_STRING, MT_AT(rollout_rs_threshold), MT_TRAIN, MT_OF_RUN, NULL, "BOUND,BOUND",
     "the bound of each rule, or one of all: k2 and k3 HIGH, k1 LOW_HIGH as ratios of probabilities",
     .needs = "rollout-rs", .own = true},
    {"bypass-mode", MT_FLAG, MT_AT(bypass_mode), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "the old log-probabilities are those of the generator, and training does not compute them: the ratio of the loss "
     "corrects both differences",
     .needs = "stage rl", .excludes = "rollout-is token|sequence, rollout-rs, router-replay R2", .own = true},
    {"router-replay", MT_CHOICE, MT_AT(router_replay), MT_TRAIN, MT_OF_RUN, "disabled", "disabled|R2|R3",
     "experts of training: R2: the choice of the old policy when it scored the responses; R3: that of the "
     "generator, which the old policy takes too (routing replay, on the CPU)",
     .needs = "stage rl", .own = true},
    {"moe-enable-routing-replay", MT_FLAG, MT_AT(moe_enable_routing_replay), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "--router-replay R3", .needs = "stage rl", .excludes = "router-replay"},
    {"bitwise-rollouts", MT_FLAG, MT_AT(bitwise_rollouts), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "the generator's log-probabilities equal those of training bit for bit: all sums of a forward are in one order, "
     "whatever the batch; slower, on the CPU only",
     .needs = "stage rl", .own = true},
    {"kl-loss-coef", MT_REAL, MT_AT(kl_loss_coef), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "weight of the divergence from the reference model in the loss; with --stage dpo of its mean over a pair's tokens",
     .needs = "stage dpo|rl", .excludes = "ref-logps-in-data", .own = true}, // which are sums
    {"kl-loss-type", MT_CHOICE, MT_AT(kl_loss_type), MT_TRAIN, MT_OF_RUN, "k3", "k1|abs|k2|k3",
     "estimator of that divergence, and of that of --kl-in-reward", .needs = "stage dpo|rl", .own = true},
    {"kl-in-reward", MT_FLAG, MT_AT(kl_in_reward), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "subtract --kl-coef times the divergence from each token's reward", .needs = "stage rl", .own = true},
    {"kl-coef", MT_REAL, MT_AT(kl_coef), MT_TRAIN, MT_OF_RUN, "0.001", "(0,1e6]", "weight of the divergence in rewards",
     .needs = "kl-in-reward", .own = true},
    {"entropy-coeff", MT_REAL, MT_AT(entropy_coeff), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "weight of the entropy that the loss rewards", .needs = "stage rl", .own = true},
    {"critic-load", MT_STRING, MT_AT(critic_load), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "the critic, or a reward model or a language model that becomes one: of any shape, with the actor's vocabulary "
     "(default: the model of --load with a new value head); a run that goes on has the critic that it saved",
     .needs = "adv-estimator gae", .own = true},
    {"critic-lr", MT_REAL, MT_AT(critic_lr), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]", "its learning rate (default: --lr)",
     .needs = "adv-estimator gae", .own = true},
    {"value-clip", MT_REAL, MT_AT(value_clip), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]",
     "clip the change of values to this in the critic's loss (default: none)", .needs = "adv-estimator gae",
     .own = true},

    {.help = "models that take turns"},
    {"rollout-tensor-model-parallel-size", MT_INT, MT_AT(rollout_tensor_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]",
     "generate with a copy of the actor's weights on this tensor-parallel size, pipeline size 1 and data-parallel "
     "ranks (default, and where that is the actor's layout: the actor itself)",
     .needs = "stage rl", .own = true},
    {"rollout-expert-model-parallel-size", MT_INT, MT_AT(rollout_expert_model_parallel_size), MT_TRAIN, MT_OF_RUN, "1",
     "[1,1048576]", "ranks that split the experts of that copy",
     .needs = "stage rl, num-experts, rollout-tensor-model-parallel-size", .own = true},
    {"teacher-tensor-model-parallel-size", MT_INT, MT_AT(teacher_tensor_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "tensor-parallel size of the teacher (default: the student's)", .needs = "stage kd|rl",
     .own = true},
    {"teacher-pipeline-model-parallel-size", MT_INT, MT_AT(teacher_pipeline_model_parallel_size), MT_TRAIN, MT_OF_RUN,
     NULL, "[1,1048576]",
     "pipeline size of the teacher (default: the student's); another layout than the student's has context size 1",
     .needs = "stage kd|rl", .own = true},
    {"teacher-expert-model-parallel-size", MT_INT, MT_AT(teacher_expert_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]",
     "ranks that split the teacher's experts (default: the student's size; 1 on another layout than the student's)",
     .needs = "stage kd|rl", .own = true},
    {"ref-tensor-model-parallel-size", MT_INT, MT_AT(ref_tensor_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "tensor-parallel size of the reference model (default: the trained model's)",
     .needs = "stage dpo|rl", .own = true},
    {"ref-pipeline-model-parallel-size", MT_INT, MT_AT(ref_pipeline_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "its pipeline size (default: the same); another layout has context size 1", .needs = "stage dpo|rl",
     .own = true},
    {"ref-expert-model-parallel-size", MT_INT, MT_AT(ref_expert_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "ranks that split its experts (default: the same; 1 on another layout)", .needs = "stage dpo|rl",
     .own = true},
    {"critic-tensor-model-parallel-size", MT_INT, MT_AT(critic_tensor_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "tensor-parallel size of the critic, which trains there (default: the actor's)",
     .needs = "adv-estimator gae", .own = true},
    {"critic-pipeline-model-parallel-size", MT_INT, MT_AT(critic_pipeline_model_parallel_size), MT_TRAIN, MT_OF_RUN,
     NULL, "[1,1048576]", "its pipeline size (default: the same); another layout has context size 1",
     .needs = "adv-estimator gae", .own = true},
    {"critic-expert-model-parallel-size", MT_INT, MT_AT(critic_expert_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "ranks that split its experts (default: the same; 1 on another layout)",
     .needs = "adv-estimator gae", .own = true},
    {"reward-tensor-model-parallel-size", MT_INT, MT_AT(reward_tensor_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "tensor-parallel size of the reward model (default: the actor's)", .needs = "reward model",
     .own = true},
    {"reward-pipeline-model-parallel-size", MT_INT, MT_AT(reward_pipeline_model_parallel_size), MT_TRAIN, MT_OF_RUN,
     NULL, "[1,1048576]", "its pipeline size (default: the same); another layout has context size 1",
     .needs = "reward model", .own = true},
    {"reward-expert-model-parallel-size", MT_INT, MT_AT(reward_expert_model_parallel_size), MT_TRAIN, MT_OF_RUN, NULL,
     "[1,1048576]", "ranks that split its experts (default: the same; 1 on another layout)", .needs = "reward model",
     .own = true},
    {"param-offload", MT_FLAG, MT_AT(param_offload), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "parameters of a model rest in host memory, and its KV cache has no memory, while other models work",
     .needs = "stage dpo|rl|kd", .own = true},
    {"grad-offload", MT_FLAG, MT_AT(grad_offload), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "gradients have no memory while other models work", .needs = "stage dpo|rl|kd", .own = true},
    {"optimizer-offload", MT_FLAG, MT_AT(optimizer_offload), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "the optimizer's state rests in host memory while other models work", .needs = "stage dpo|rl|kd", .own = true},

    {.help = "evaluation, checkpoints, reports"},
    {"eval-interval", MT_INT, MT_AT(eval_interval), MT_TRAIN, MT_OF_RUN, "1000", "[1,1000000000000]",
     "steps between evaluations"},
    {"eval-interval-fraction", MT_REAL, MT_AT(eval_interval_fraction), MT_TRAIN, MT_OF_RUN, NULL, "[0,1)",
     "steps between evaluations, as a fraction of all steps", .excludes = "eval-interval", .own = true},
    {"eval-iters", MT_INT, MT_AT(eval_iters), MT_TRAIN, MT_OF_RUN, "100", "[0,1000000000]",
     "global batches of an evaluation; 0: none"},
    {"eval-global-batch-size", MT_INT, MT_AT(eval_global_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741824]",
     "sequences of a batch of an evaluation (default: --global-batch-size)", .excludes = "stage rl"},
    {"eval-micro-batch-size", MT_INT, MT_AT(stack.eval_micro_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "[1,1048576]",
     "sequences of a micro-batch of an evaluation (default: --micro-batch-size); memory is planned for the larger of "
     "the two",
     .excludes = "stage rl, dynamic-context-parallel"},
    {"start-eval-at-iter", MT_INT, MT_AT(start_eval_at_iter), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "iteration from which on the validation data are evaluated; the end of the run evaluates them in any case",
     .excludes = "stage rl"},
    {"full-validation", MT_FLAG, MT_AT(full_validation), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "every evaluation reads the whole validation data, each sample once, instead of --eval-iters batches",
     .excludes = "mock-data, tokens-file, sft, dynamic-context-parallel, dataloader-type cyclic, stage rm|dpo|kd|rl"},
    {"multiple-validation-sets", MT_FLAG, MT_AT(multiple_validation_sets), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "each path of --valid-data-path is a set with a loss of its own", .needs = "full-validation, valid-data-path"},
    {"validation-set-names", MT_LIST, MT_AT(validation_set_names), MT_TRAIN, MT_OF_RUN, NULL, "NAME...",
     "their names in reports: validation-NAME (default: validation-0, validation-1, ...)",
     .needs = "multiple-validation-sets"},
    {"log-interval", MT_INT, MT_AT(log_interval), MT_TRAIN, MT_OF_RUN, "1", "[1,1000000000000]",
     "steps between printed lines"},
    {"log-num-zeros-in-grad", MT_FLAG, MT_AT(stack.log_num_zeros_in_grad), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "report how many elements of the gradients are 0"},
    {"log-params-norm", MT_FLAG, MT_AT(stack.log_params_norm), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "report the norm of the parameters"},
    {"log-memory-to-tensorboard", MT_FLAG, MT_AT(log_memory_to_tensorboard), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "write the memory in use to --tensorboard-dir and --metrics too; on a GPU it is that of the model, as the maximum "
     "is"},
    {"timing-log-level", MT_INT, MT_AT(timing_log_level), MT_TRAIN, MT_OF_RUN, "0", "[0,2]",
     "with every printed line: 1: the time of forward and backward, of the optimizer, and of communication; 2: also of "
     "waiting for data, of forward and of backward"},
    {"timing-log-option", MT_CHOICE, MT_AT(timing_log_option), MT_TRAIN, MT_OF_RUN, "minmax", "max|minmax|all",
     "these times: of the slowest rank, of the fastest and the slowest, or of all ranks", .needs = "timing-log-level"},
    {"check-weight-hash-across-dp-replicas-interval", MT_INT, MT_AT(check_weight_hash_across_dp_replicas_interval),
     MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "compare the parameters of data-parallel ranks after every so many steps, and end the run if they differ",
     .excludes = "any: data-parallel-sharding-strategy optim_grads_params, any: fp8-param-gather"},
    {"log-interval-fraction", MT_REAL, MT_AT(log_interval_fraction), MT_TRAIN, MT_OF_RUN, NULL, "[0,1)",
     "steps between printed lines, as a fraction of all steps", .excludes = "log-interval", .own = true},
    {"metrics", MT_STRING, MT_AT(metrics), MT_TRAIN, MT_OF_RUN, NULL, "FILE.jsonl", "write one JSON object per step",
     .own = true},
    {"profile", MT_FLAG, MT_AT(profile), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "time every operation and print at the end where the time of a step went"},
    {"tensorboard-dir", MT_STRING, MT_AT(tensorboard_dir), MT_TRAIN, MT_OF_RUN, NULL, "DIR",
     "write event files for TensorBoard"},
    {"log-straggler", MT_FLAG, MT_AT(log_straggler), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "with every printed line, name the slowest and the fastest rank of each part of a step"},
    {"trace", MT_STRING, MT_AT(trace), MT_TRAIN, MT_OF_RUN, NULL, "FILE.json",
     "write a timeline of some steps on all ranks, for ui.perfetto.dev or chrome://tracing", .own = true},
    {"trace-first-step", MT_INT, MT_AT(trace_first_step), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "first step to trace, counted from the start of this run (default: 2)", .needs = "trace", .own = true},
    {"trace-last-step", MT_INT, MT_AT(trace_last_step), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "last step to trace (default: the one after the first)", .needs = "trace", .own = true},
    {"load", MT_STRING, MT_AT(load), MT_BOTH, MT_OF_RUN, NULL, "DIR",
     "load model and weights from a Hugging Face folder, a folder of --save, or ORG/NAME in the cache of Hugging Face"},
    {"load-adapter", MT_STRING, MT_AT(load_adapter), MT_BOTH, MT_OF_RUN, NULL, "DIR",
     "load a low-rank adapter from a folder of peft or of --save; --load names its base", .own = true},
    {"hf-config", MT_STRING, MT_AT(hf_config), MT_TRAIN, MT_OF_RUN, NULL, "FILE",
     "take the model from a config.json, or that of ORG/NAME in the cache of Hugging Face, with random weights",
     .own = true},
    {"save", MT_STRING, MT_AT(save), MT_TRAIN, MT_OF_RUN, NULL, "DIR", "write checkpoints into this folder"},
    {"save-interval", MT_INT, MT_AT(save_interval), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "steps between checkpoints (default: one at the end)", .needs = "save"},
    {"ckpt-format", MT_CHOICE, MT_AT(ckpt_format), MT_BOTH, MT_OF_RUN, "huggingface",
     "huggingface|torch_dist|torch|fsdp_dtensor",
     "what --save, or --convert of infer, writes: a Hugging Face folder, or torch_dist, which Megatron-LM loads and "
     "this program too; fsdp_dtensor, with --use-megatron-fsdp, and torch, which is read only: a Hugging Face folder"},
    {"save-interval-fraction", MT_REAL, MT_AT(save_interval_fraction), MT_TRAIN, MT_OF_RUN, NULL, "[0,1)",
     "steps between checkpoints, as a fraction of all steps", .needs = "save", .excludes = "save-interval",
     .own = true},
    {"async-save", MT_FLAG, MT_AT(async_save), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "continue training while a checkpoint is written; takes host memory for a copy", .needs = "save"},
    {"keep-checkpoints", MT_INT, MT_AT(keep_checkpoints), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "keep only this many of the last checkpoints (default: all)", .needs = "save", .own = true},
    {"save-retain-interval", MT_INT, MT_AT(save_retain_interval), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "keep the checkpoints whose step is a multiple of this; of the others only the last, or those of "
     "--keep-checkpoints",
     .needs = "save-interval"},
    {"finetune", MT_FLAG, MT_AT(finetune), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "load weights only and start at iteration 0", .needs = "load"},
    {"no-load-optim", MT_FLAG, MT_AT(no_load_optim), MT_TRAIN, MT_OF_RUN, NULL, NULL, "do not load optimizer state",
     .needs = "load"},
    {"no-load-rng", MT_FLAG, MT_AT(no_load_rng), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "continue with another --seed: dropout and the order of data change from here on", .needs = "load"},
    {"use-checkpoint-opt-param-scheduler", MT_FLAG, MT_AT(use_checkpoint_opt_param_scheduler), MT_TRAIN, MT_OF_RUN,
     NULL, NULL,
     "a run that continues has the learning rates and the weight decay, with their schedules, of its checkpoint, not "
     "those of its options",
     .excludes = "stage rl"},
    {"auto-resume", MT_FLAG, MT_AT(auto_resume), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "resume from --save if it holds an intact checkpoint, otherwise start as --load says", .needs = "save",
     .own = true},
    {"overwrite", MT_FLAG, MT_AT(overwrite), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "replace the run in --save, whose checkpoints go once this run has saved one, and the file of --metrics",
     .excludes = "auto-resume", .own = true},
    {"use-checkpoint-args", MT_FLAG, MT_AT(use_checkpoint_args), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "take the model's options from the arguments that a checkpoint of Megatron-LM in --load holds; a Hugging Face "
     "folder always gives the model"},
    {"exit-on-missing-checkpoint", MT_FLAG, MT_AT(exit_on_missing_checkpoint), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "stop with an error if a run that resumes from --save finds no checkpoint there"},
    {"no-save-optim", MT_FLAG, MT_AT(no_save_optim), MT_TRAIN, MT_OF_RUN, NULL, NULL, "do not save optimizer state",
     .needs = "save"},
    {"config", MT_STRING, MT_AT(config), MT_BOTH, MT_OF_RUN, NULL, "FILE.yaml",
     "read options from a file; the command line takes precedence", .own = true},
    {"role", MT_STRING, MT_AT(role), MT_BOTH, MT_OF_RUN, NULL, "ROLE",
     "the file of --config is one of ROLL, verl or Trinity-RFT: read the pipeline's keys and those of this role, such "
     "as sft_train, actor_train, reference, student or rewards.NAME; a file with one role needs no --role",
     .needs = "config", .own = true},
    {"print-config", MT_FLAG, MT_AT(print_config), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "print the keys of the file of --role with the options that they set, the keys that are not used, and all options "
     "that differ from their defaults, and exit",
     .own = true},
    {"strict-options", MT_FLAG, MT_AT(strict_options), MT_BOTH, MT_OF_RUN, NULL, NULL,
     "refuse options of Megatron-LM that have no effect here, which one line at the start lists otherwise",
     .own = true},

    {.help = "low-rank adapters"},
    {"lora-rank", MT_INT, MT_AT(stack.lora_rank), MT_TRAIN, MT_OF_RUN, NULL, "[1,65536]",
     "freeze the model and train adapters of this rank (LoRA); --save writes folders of peft", .needs = "lora-target",
     .own = true},
    {"lora-alpha", MT_REAL, MT_AT(stack.lora_alpha), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e9]",
     "scale adapters by this / rank (default: the rank)", .needs = "lora-rank", .own = true},
    {"lora-target", MT_LIST, MT_AT(lora_target), MT_TRAIN, MT_OF_RUN, NULL, "NAME",
     "matrices with adapters, by their names in Hugging Face models (q_proj,v_proj): all-linear for all of attention, "
     "MLP and experts, without routers, and of a vision tower; regex:PATTERN for those whose whole names match a "
     "pattern of PCRE2",
     .needs = "lora-rank", .own = true},
    {"lora-dropout", MT_REAL, MT_AT(stack.lora_dropout), MT_TRAIN, MT_OF_RUN, "0", "[0,1)",
     "dropout of the adapters' inputs", .needs = "lora-rank", .own = true},
    {"lora-base-dtype", MT_CHOICE, MT_AT(stack.lora_base_dtype), MT_TRAIN, MT_OF_RUN, "model", "model|fp8",
     "the frozen matrices of layers; fp8: in e4m3 with a scale for 128 x 128, half the memory of bf16; products read "
     "their values in the model's type, and with --fp8-recipe blockwise the codes themselves",
     .needs = "fp8: lora-rank", .excludes = "fp8: stage rl, fp8: data-parallel-sharding-strategy optim_grads_params",
     .own = true},
    {"convert", MT_STRING, MT_AT(convert), MT_INFER, MT_OF_RUN, NULL, "DIR",
     "write the weights of --load into this folder, in the format of --ckpt-format, and end; takes memory for "
     "one tensor",
     .excludes = "prompt, prompts, prompt-tokens, print-tokens, chat, score, load-adapter", .own = true},
    {"merge-adapter", MT_STRING, MT_AT(merge_adapter), MT_INFER, MT_OF_RUN, NULL, "DIR",
     "write the whole model with the adapter merged into this folder, and end", .needs = "load-adapter",
     .excludes = "prompt, prompt-tokens, print-tokens, chat, score", .own = true},

    {.help = "generation (interactive without --prompt)"},
    {"prompt", MT_LIST, MT_AT(prompt), MT_INFER, MT_OF_RUN, NULL, "TEXT",
     "texts to continue as one batch; several are printed in order, each after a header", .excludes = "prompt-tokens",
     .own = true},
    {"image", MT_LIST, MT_AT(image), MT_INFER, MT_OF_RUN, NULL, "FILE",
     "pictures, PNG or JPEG, for a model with a vision tower: with --prompt each prompt is a user's message with all "
     "of "
     "them, in the places <image> of its text or before it; with --chat they go with the first message",
     .excludes = "prompts, prompt-tokens, serve, score, convert, merge-adapter", .own = true},
    {"max-image-tokens", MT_INT, MT_AT(max_image_tokens), MT_BOTH, MT_OF_RUN, "4096", "[1,1073741824]",
     "image tokens of pictures whose features have memory at once in generation; with --chat and --serve those of a "
     "conversation at most",
     .needs = "stage rl", .own = true},
    {"prompts", MT_STRING, MT_AT(prompts), MT_INFER, MT_OF_RUN, NULL, "FILE",
     "prompts to continue, JSON Lines or Parquet as for --stage rl of train, with --chat-template; --out gets a line "
     "for each, in order",
     .needs = "out", .excludes = "prompt, prompt-tokens, print-tokens, chat, score, merge-adapter", .own = true},
    {"prompt-tokens", MT_STRING, MT_AT(prompt_tokens), MT_INFER, MT_OF_RUN, NULL, "1,2,3",
     "tokens to continue; needs no tokenizer", .own = true},
    {"print-tokens", MT_FLAG, MT_AT(print_tokens), MT_INFER, MT_OF_RUN, NULL, NULL,
     "print the ids of the new tokens, one line per prompt, instead of text", .own = true},
    {"max-new-tokens", MT_INT, MT_AT(max_new_tokens), MT_BOTH, MT_OF_RUN, "256", "[0,1073741824]",
     "maximum number of new tokens per prompt", .needs = "stage rl", .own = true},
    {"temperature", MT_REAL, MT_AT(stack.temperature), MT_BOTH, MT_OF_RUN, "1", "[0,1e6]",
     "temperature of sampling; 0: argmax; --stage rl scores and trains the probabilities at this temperature",
     .needs = "stage rl", .own = true},
    {"top-k", MT_INT, MT_AT(top_k), MT_BOTH, MT_OF_RUN, "0", "[0,16777216]",
     "sample from the k most probable tokens; 0: from all", .needs = "stage rl", .own = true},
    {"top-p", MT_REAL, MT_AT(top_p), MT_BOTH, MT_OF_RUN, "1", "(0,1]",
     "sample from the smallest set of most probable tokens with total probability p", .needs = "stage rl", .own = true},
    {"min-p", MT_REAL, MT_AT(min_p), MT_BOTH, MT_OF_RUN, "0", "[0,1]",
     "sample from the tokens whose probability is at least p times the greatest; 0: from all", .needs = "stage rl",
     .own = true},
    {"repetition-penalty", MT_REAL, MT_AT(repetition_penalty), MT_BOTH, MT_OF_RUN, "1", "(0,1e6]",
     "divide positive logits of tokens in the prompt and the text by r, multiply negative ones; 1: none",
     .needs = "stage rl", .own = true},
    {"stop", MT_LIST, MT_AT(stop), MT_BOTH, MT_OF_RUN, NULL, "TEXT",
     "texts that end a continuation, which is cut before them; they may span tokens; --stage rl trains the tokens up "
     "to the end of the first one, and rewards read the text before it",
     .needs = "stage rl", .excludes = "print-tokens", .own = true},
    {"num-return-sequences", MT_INT, MT_AT(num_return_sequences), MT_BOTH, MT_OF_RUN, "1", "[1,1000000]",
     "continuations of each prompt, which share its cache (default with --stage rl: 8)", .excludes = "chat",
     .needs = "stage rl", .own = true},
    {"inference-max-requests", MT_INT, MT_AT(inference_max_requests), MT_BOTH, MT_OF_RUN, "256", "[1,1000000]",
     "sequences at once on a data-parallel rank; when one ends, the next takes its place", .needs = "stage rl"},
    {"kv-cache-tokens", MT_INT, MT_AT(kv_cache_tokens), MT_BOTH, MT_OF_RUN, NULL, "[1,2000000000]",
     "tokens whose keys and values are kept on a data-parallel rank (default: those of all sequences at once; with "
     "--serve 65536, or those of one sequence); sequences wait for room",
     .needs = "stage rl", .own = true},
    {"inference-dynamic-batching-block-size", MT_INT, MT_AT(inference_dynamic_batching_block_size), MT_BOTH, MT_OF_RUN,
     "128", "[1,65536]", "tokens of a page of keys and values, a power of two; GPUs are fastest with 128 or more",
     .needs = "stage rl"},
    {"num-speculative-tokens", MT_INT, MT_AT(num_speculative_tokens), MT_BOTH, MT_OF_RUN, "0", "[0,8]",
     "modules of multi-token prediction draft so many tokens, and the model checks all of them in one pass. The text "
     "is the same; it comes sooner where most drafts are right and a step costs little more for more tokens",
     .excludes = "serve-adapter, decoder-num-layers", .needs = "stage rl"},
    {"chat", MT_FLAG, MT_AT(chat), MT_INFER, MT_OF_RUN, NULL, NULL,
     "hold a conversation: each line is a message, the model responds until its template's end of a turn; a line "
     "/image "
     "FILE adds a picture to the next message",
     .excludes = "prompt, prompt-tokens", .own = true},
    {"system-prompt", MT_STRING, MT_AT(system_prompt), MT_INFER, MT_OF_RUN, NULL, "TEXT",
     "begin the conversation with this system message", .needs = "chat", .own = true},

    {.help = "serving"},
    {"serve", MT_STRING, MT_AT(serve), MT_INFER, MT_OF_RUN, NULL, "[ADDRESS:]PORT",
     "answer requests by HTTP as OpenAI's interface has them: /v1/completions, /v1/chat/completions, /v1/models, "
     "/tokenize, /health, /metrics; by default to this machine alone, 127.0.0.1; until SIGTERM. Options of sampling "
     "hold for requests that say nothing",
     .excludes = "prompt, prompts, prompt-tokens, print-tokens, chat, score, convert, merge-adapter, stop, out, "
                 "num-return-sequences",
     .own = true},
    {"api-key", MT_STRING, MT_AT(api_key), MT_INFER, MT_OF_RUN, NULL, "FILE",
     "the first line of this file is a key, which requests must bring as Authorization: Bearer KEY", .needs = "serve",
     .own = true},
    {"serve-model-name", MT_STRING, MT_AT(serve_model_name), MT_INFER, MT_OF_RUN, NULL, "NAME",
     "name of the model in requests (default: that of its folder)", .needs = "serve", .own = true},
    {"serve-adapter", MT_LIST, MT_AT(serve_adapter), MT_INFER, MT_OF_RUN, NULL, "NAME=FOLDER",
     "models of their own to requests: adapters of peft or of --save over the weights of --load, one or several, also "
     "in one batch",
     .needs = "serve", .excludes = "load-adapter", .own = true},
    {"serve-queue", MT_INT, MT_AT(serve_queue), MT_INFER, MT_OF_RUN, "256", "[1,1000000]",
     "requests that wait at most; more are refused with the status 429", .needs = "serve", .own = true},
    {"serve-timeout", MT_INT, MT_AT(serve_timeout), MT_INFER, MT_OF_RUN, "600", "[0,1000000]",
     "seconds that a request may take, in the queue and after it; 0: as many as it needs", .needs = "serve",
     .own = true},
    {"serve-max-body", MT_INT, MT_AT(serve_max_body), MT_INFER, MT_OF_RUN, "8388608", "[1024,1073741824]",
     "bytes of a request at most", .needs = "serve", .own = true},
    {"serve-cors", MT_STRING, MT_AT(serve_cors), MT_INFER, MT_OF_RUN, NULL, "ORIGIN",
     "let pages of this origin, such as https://example.org, call the server from a browser", .needs = "serve",
     .own = true},
    {"max-prefill-tokens", MT_INT, MT_AT(max_prefill_tokens), MT_INFER, MT_OF_RUN, "512", "[1,1000000]",
     "tokens of prompts that are read in one step at most; beside sequences that generate fewer, with the aim that "
     "these "
     "wait for their next token as long as three steps take without",
     .needs = "serve", .own = true},
    {"inference-max-seq-length", MT_INT, MT_AT(inference_max_seq_length), MT_INFER, MT_OF_RUN, NULL, "[2,1073741824]",
     "tokens of prompt and answer at most (default: the model's context, at most 8192)", .needs = "serve"},

    {.help = "scoring"},
    {"score", MT_STRING, MT_AT(score), MT_INFER, MT_OF_RUN, NULL, "FILE",
     "sequences to score, on any layout: FILE.jsonl or FILE.parquet as for --sft, or int32 [sequences, seq length + 1]",
     .excludes = "prompt, prompt-tokens, print-tokens, chat, max-new-tokens, temperature, top-k, top-p, min-p, "
                 "repetition-penalty, stop, num-return-sequences, seed, kv-cache-tokens, inference-max-requests, "
                 "inference-dynamic-batching-block-size",
     .own = true},
    {"out", MT_STRING, MT_AT(out), MT_INFER, MT_OF_RUN, NULL, "FILE",
     "write the log-probability of every label; with prompts, instead of printing them: a line of JSON for each "
     "continuation, with tokens, text, log-probabilities and the reason of its end",
     .own = true},
    {"entropy-out", MT_STRING, MT_AT(entropy_out), MT_INFER, MT_OF_RUN, NULL, "FILE.f32",
     "write the entropy of every distribution", .needs = "score", .own = true},
    {"logits-out", MT_STRING, MT_AT(logits_out), MT_INFER, MT_OF_RUN, NULL, "FILE.f32", "write all logits",
     .needs = "score", .own = true},
    {"max-sequences", MT_INT, MT_AT(max_sequences), MT_INFER, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences to score (default: all)", .needs = "score", .own = true},
    {0},
};

/* ---- the value of an option */

const mt_option *mt_option_of(size_t offset) {
    const mt_option *row = mt_option_table;
    while (!row->name || row->offset != offset) row++;
    return row;
}

_Static_assert(sizeof mt_option_table / sizeof *mt_option_table <= MT_MAX_OPTIONS, "raise MT_MAX_OPTIONS");

void mt_option_set_origin(mt_run_options *options, const mt_option *row, int64_t origin) {
    options->origins[mt_option_of(row->offset) - mt_option_table] = (int32_t)mt_min(origin, INT32_MAX);
}

int64_t mt_option_line(const mt_run_options *options, const mt_option *row) {
    return options->origins[mt_option_of(row->offset) - mt_option_table];
}

char *mt_option_origin_text(const mt_run_options *options, const mt_option *row) {
    static const char *const texts[] = {"", "command line", "config.json", "checkpoint", "a key that is absent"};
    int32_t origin = options->origins[mt_option_of(row->offset) - mt_option_table];
    char text[300];
    if (origin <= 0) return mt_strdup(texts[-origin]);
    snprintf(text, sizeof text, "%.250s:%d", options->config ? options->config : "line", origin);
    return mt_strdup(text);
}

bool *mt_option_bool(const mt_run_options *options, const mt_option *row) {
    return (bool *)((char *)options + row->offset);
}

int64_t *mt_option_int(const mt_run_options *options, const mt_option *row) {
    return (int64_t *)((char *)options + row->offset);
}

double *mt_option_real(const mt_run_options *options, const mt_option *row) {
    return (double *)((char *)options + row->offset);
}

char **mt_option_string(const mt_run_options *options, const mt_option *row) {
    return (char **)((char *)options + row->offset);
}

/* An enum is as large as an unsigned int. */
unsigned *mt_option_choice(const mt_run_options *options, const mt_option *row) {
    return (unsigned *)((char *)options + row->offset);
}

static mt_strings *mt_option_list(const mt_run_options *options, const mt_option *row) {
    return (mt_strings *)((char *)options + row->offset);
}

static mt_ints *mt_option_ints(const mt_run_options *options, const mt_option *row) {
    return (mt_ints *)((char *)options + row->offset);
}

static mt_reals *mt_option_reals(const mt_run_options *options, const mt_option *row) {
    return (mt_reals *)((char *)options + row->offset);
}

bool mt_option_is_list(const mt_option *row) {
    return row->type == MT_LIST || row->type == MT_INTS || row->type == MT_SET || row->type == MT_CHOICES ||
           row->type == MT_REALS;
}

void mt_strings_free(mt_strings *strings) {
    for (int64_t i = 0; i < strings->count; i++) free(strings->items[i]);
    free(strings->items);
    *strings = (mt_strings){0};
}

void mt_option_clear(mt_run_options *options, const mt_option *row) {
    if (row->type == MT_LIST) mt_strings_free(mt_option_list(options, row));
    if (row->type == MT_INTS || row->type == MT_CHOICES) *mt_option_ints(options, row) = (mt_ints){0};
    if (row->type == MT_REALS) *mt_option_reals(options, row) = (mt_reals){0};
    if (row->type == MT_SET) *mt_option_choice(options, row) = 0;
}

void mt_strings_add(mt_strings *strings, const char *text) {
    strings->items = mt_realloc(strings->items, (strings->count + 1) * (int64_t)sizeof(char *));
    strings->items[strings->count++] = mt_strdup(text);
}

int mt_edit_distance(const char *a, size_t a_length, const char *b) {
    enum { LONGEST = 64 };
    int row[LONGEST + 1], b_length = (int)strlen(b) < LONGEST ? (int)strlen(b) : LONGEST;
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (int i = 1; i <= (int)a_length && i <= LONGEST; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int replaced = diagonal + ((a[i - 1] == '_' ? '-' : a[i - 1]) != b[j - 1]);
            int shorter = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replaced < shorter ? replaced : shorter;
        }
    }
    return row[b_length];
}

void mt_string_set(char **string, const char *text) {
    char *copy = text ? mt_strdup(text) : NULL; // before the free: text may be *string
    free(*string);
    *string = copy;
}

void mt_real_print(char text[32], double value) {
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) return;
    }
}

/* A Python expression of lists of 0 and 1, + and *, that is being evaluated. */
typedef struct mt_layer_freq {
    const char *at;
    char *layers; // '0' and '1', at most `max`
    int64_t count, max;
    int depth; // of brackets
} mt_layer_freq;

/* Skips blanks; takes the character c, if it is next. */
static bool mt_layer_freq_take(mt_layer_freq *freq, char c) {
    while (*freq->at == ' ') freq->at++;
    bool found = *freq->at == c;
    freq->at += found;
    return found;
}

static bool mt_layer_freq_list(mt_layer_freq *freq) {
    do {
        while (*freq->at == ' ') freq->at++;
        if ((*freq->at != '0' && *freq->at != '1') || freq->count == freq->max) return false;
        freq->layers[freq->count++] = *freq->at++;
        if (mt_layer_freq_take(freq, ']')) return true;
        if (!mt_layer_freq_take(freq, ',')) return false;
    } while (!mt_layer_freq_take(freq, ']'));
    return true;
}

/* A sum of products: lists or sums in brackets, each repeated by the numbers behind it. Appends its layers. */
static bool mt_layer_freq_sum(mt_layer_freq *freq) {
    enum { DEPTH = 32 };
    do {
        int64_t first = freq->count;
        if (mt_layer_freq_take(freq, '[')) {
            if (!mt_layer_freq_list(freq)) return false;
        } else if (!mt_layer_freq_take(freq, '(') || ++freq->depth > DEPTH || !mt_layer_freq_sum(freq) ||
                   !mt_layer_freq_take(freq, ')')) {
            return false;
        } else {
            freq->depth--;
        }
        while (mt_layer_freq_take(freq, '*')) {
            char *end;
            int64_t times = strtoll(freq->at, &end, 10), length = freq->count - first;
            if (end == freq->at || times < 0 || times > freq->max || times * length > freq->max - first) return false;
            freq->at = end;
            freq->count = first + times * length;
            for (int64_t i = first + length; i < freq->count; i++) freq->layers[i] = freq->layers[i - length];
        }
    } while (mt_layer_freq_take(freq, '+'));
    return true;
}

/* Layers as Megatron's Python expression, ([0]*3+[1]*58) or ([0]+[1]*2)*2. Writes at most `max` letters
 * to `layers`; returns their number, or -1. */
static int64_t mt_layer_freq_parse(const char *text, char *layers, int64_t max) {
    mt_layer_freq freq = {.at = text, .layers = layers, .max = max};
    bool good = mt_layer_freq_sum(&freq);
    return good && mt_layer_freq_take(&freq, 0) ? freq.count : -1;
}

bool mt_option_names_layers(const mt_option *row, mt_layer_freq_rule *rule) {
    static const size_t offsets[] = {[MT_EXPERT_LAYERS] = MT_AT(moe_layer_freq),
                                     [MT_WINDOW_LAYERS] = MT_AT(window_attn_skip_freq),
                                     [MT_ROPE_LAYERS] = MT_AT(no_rope_freq),
                                     [MT_LINEAR_LAYERS] = MT_AT(linear_attention_freq)};
    for (size_t i = 0; row && i < sizeof offsets / sizeof *offsets; i++)
        if (row->offset == offsets[i]) return *rule = (mt_layer_freq_rule)i, true;
    return false;
}

char *mt_layer_freq_expand(const char *text, mt_layer_freq_rule rule, int64_t num_layers, bool may_be_longer,
                           mt_error *error) {
    static const struct {
        const char *option, *example;
        bool last, sets; // a number N is of the last of each N layers, not the first; those layers have the letter 1
        bool inverse;    // a list has 0 where the letters have 1
    } rules[] = {
        [MT_EXPERT_LAYERS] = {"--moe-layer-freq", "([0]*1+[1]*%lld)", false, true, false},
        [MT_WINDOW_LAYERS] = {"--window-attn-skip-freq", "([0]*1+[1]*%lld)", true, false, false},
        [MT_ROPE_LAYERS] = {"--no-rope-freq", "([1]*1+[0]*%lld)", true, false, true},
        [MT_LINEAR_LAYERS] = {"--linear-attention-freq", "([0]*1+[1]*%lld)", true, false, false},
    };
    char example[64];
    int64_t every = 0;
    const int64_t most = mt_max(num_layers, 4096);
    char *layers = mt_calloc(most + 1);
    bool is_number = mt_parse_int(text, &every);
    for (int64_t i = 0; is_number && every > 0 && i < num_layers; i++) {
        bool listed = (rules[rule].last ? i + 1 : i) % every == 0;
        layers[i] = listed == rules[rule].sets ? '1' : '0';
    }
    int64_t listed = is_number ? num_layers : mt_layer_freq_parse(text, layers, most);
    for (int64_t i = 0; !is_number && rules[rule].inverse && i < listed; i++) layers[i] = layers[i] == '1' ? '0' : '1';
    if (is_number ? every > 0 : listed == num_layers || (listed > num_layers && may_be_longer)) {
        layers[num_layers] = 0;
        return layers;
    }
    free(layers);
    snprintf(example, sizeof example, rules[rule].example, (long long)num_layers - 1);
    mt_error_set(error, "%s expects a number, or 0 or 1 for each of the %lld layers such as %s, got '%.100s'",
                 rules[rule].option, (long long)num_layers, example, text);
    return NULL;
}

char *mt_layer_freq_print(const char *layers, mt_layer_freq_rule rule) {
    bool inverse = rule == MT_ROPE_LAYERS;
    size_t room = 16 * strlen(layers) + 3, used = 1;
    char *text = mt_calloc((int64_t)room);
    text[0] = '(';
    for (const char *at = layers; *at;) {
        int64_t times = 0;
        char layer = *at;
        for (; *at == layer; at++) times++;
        if (inverse) layer = layer == '1' ? '0' : '1';
        used += (size_t)snprintf(text + used, room - used, "%s[%c]*%lld", used > 1 ? "+" : "", layer, (long long)times);
    }
    text[used] = ')';
    return text;
}

int mt_choice_index(const char *choices, const char *text) {
    size_t length = strlen(text);
    int index = 0;
    for (const char *at = choices; *at; at += strcspn(at, "|"), at += *at == '|', index++)
        if (strcspn(at, "|") == length && strncmp(at, text, length) == 0) return index;
    return -1;
}

/* The choice with an index among "a|b|c", to free; "" if there is none. */
static char *mt_choice_text(const char *choices, unsigned index) {
    for (; index > 0 && *choices; index--) choices += strcspn(choices, "|"), choices += *choices == '|';
    char *text = mt_strdup(choices);
    text[strcspn(text, "|")] = 0;
    return text;
}

/* The members of a set of "a|b|c", to free. */
static char *mt_set_text(const char *members, unsigned set) {
    char *all = mt_calloc((int64_t)strlen(members) + 1), *end = all;
    for (unsigned i = 0; set >> i; i++) {
        char *member = mt_choice_text(members, i);
        if (set >> i & 1) end += sprintf(end, end > all ? " %s" : "%s", member);
        free(member);
    }
    return all;
}

/* Choices in their order, to free. */
static char *mt_choices_text(const char *choices, const mt_ints *chosen) {
    char *all = mt_calloc(chosen->count * ((int64_t)strlen(choices) + 1) + 1), *end = all;
    for (int64_t i = 0; i < chosen->count; i++) {
        char *choice = mt_choice_text(choices, (unsigned)chosen->items[i]);
        end += sprintf(end, i ? " %s" : "%s", choice);
        free(choice);
    }
    return all;
}

static char *mt_reals_text(const mt_reals *reals) {
    char all[33 * MT_MAX_INTS + 1] = "", *end = all, number[32];
    for (int64_t i = 0; i < reals->count; i++) {
        mt_real_print(number, reals->items[i]);
        end += sprintf(end, i ? " %s" : "%s", number);
    }
    return mt_strdup(all);
}

char *mt_option_text(const mt_run_options *options, const mt_option *row) {
    char text[32] = "";
    switch (row->type) {
    case MT_FLAG:
    case MT_NO:
        return mt_strdup(*mt_option_bool(options, row) == (row->type == MT_FLAG) ? "true" : "false");
    case MT_INT:
        snprintf(text, sizeof text, "%lld", (long long)*mt_option_int(options, row));
        return mt_strdup(text);
    case MT_REAL:
        mt_real_print(text, *mt_option_real(options, row));
        return mt_strdup(text);
    case MT_STRING:
    case MT_OPTIONAL:
        return mt_strdup(*mt_option_string(options, row) ? *mt_option_string(options, row) : "");
    case MT_CHOICE:
        return mt_choice_text(row->values, *mt_option_choice(options, row));
    case MT_SET:
        return mt_set_text(row->values, *mt_option_choice(options, row));
    case MT_CHOICES:
        return mt_choices_text(row->values, mt_option_ints(options, row));
    case MT_REALS:
        return mt_reals_text(mt_option_reals(options, row));
    case MT_INTS:
    case MT_LIST:
        break;
    }
    if (row->type == MT_INTS) {
        const mt_ints *ints = mt_option_ints(options, row);
        char all[24 * MT_MAX_INTS] = "";
        for (int64_t i = 0, end = 0; i < ints->count; i++)
            end += sprintf(all + end, i ? " %lld" : "%lld", (long long)ints->items[i]);
        return mt_strdup(all);
    }
    const mt_strings *list = mt_option_list(options, row);
    int64_t bytes = 1;
    for (int64_t i = 0; i < list->count; i++) bytes += (int64_t)strlen(list->items[i]) + 1;
    char *all = mt_calloc(bytes), *end = all;
    for (int64_t i = 0; i < list->count; i++) end += sprintf(end, i ? " %s" : "%s", list->items[i]);
    return all;
}

void mt_option_key(char key[80], const mt_option *row) {
    snprintf(key, 80, "%s", row->name);
    for (char *at = key; *at; at++)
        if (*at == '-') *at = '_';
}

void mt_option_copy(mt_run_options *to, const mt_run_options *from, const mt_option *row) {
    switch (row->type) {
    case MT_FLAG:
    case MT_NO:
        *mt_option_bool(to, row) = *mt_option_bool(from, row);
        break;
    case MT_INT:
        *mt_option_int(to, row) = *mt_option_int(from, row);
        break;
    case MT_REAL:
        *mt_option_real(to, row) = *mt_option_real(from, row);
        break;
    case MT_STRING:
    case MT_OPTIONAL:
        mt_string_set(mt_option_string(to, row), *mt_option_string(from, row));
        break;
    case MT_CHOICE:
    case MT_SET:
        *mt_option_choice(to, row) = *mt_option_choice(from, row);
        break;
    case MT_INTS:
    case MT_CHOICES:
        *mt_option_ints(to, row) = *mt_option_ints(from, row);
        break;
    case MT_REALS:
        *mt_option_reals(to, row) = *mt_option_reals(from, row);
        break;
    case MT_LIST:
        mt_strings_free(mt_option_list(to, row));
        for (int64_t i = 0; i < mt_option_list(from, row)->count; i++)
            mt_strings_add(mt_option_list(to, row), mt_option_list(from, row)->items[i]);
        break;
    }
}

bool mt_option_in_range(const mt_option *row, double value) {
    char left, right;
    double low, high;
    MT_CHECK(sscanf(row->values, "%c%lf,%lf%c", &left, &low, &high, &right) == 4);
    return (left == '(' ? value > low : value >= low) && (right == ')' ? value < high : value <= high);
}

/* Strings and lists of the struct that are no options. */
static const size_t mt_other_strings[] = {
    MT_AT(special_tokens),      MT_AT(generation_config),      MT_AT(stack.moe_layers),
    MT_AT(stack.window_layers), MT_AT(stack.rope_layers),      MT_AT(stack.linear_layers),
    MT_AT(stack.hybrid_layers), MT_AT(stack.pipeline_letters), MT_AT(stack.mtp_hybrid_layers)};
static const size_t mt_other_lists[] = {MT_AT(typed_names), MT_AT(config_keys), MT_AT(unmet_arguments)};

static char **mt_string_at(mt_run_options *options, size_t offset) {
    return (char **)(void *)((char *)options + offset);
}

static mt_strings *mt_strings_at(mt_run_options *options, size_t offset) {
    return (mt_strings *)(void *)((char *)options + offset);
}

void mt_options_free(mt_run_options *options) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) continue;
        if (row->type == MT_STRING || row->type == MT_OPTIONAL) mt_string_set(mt_option_string(options, row), NULL);
        if (row->type == MT_LIST) mt_strings_free(mt_option_list(options, row));
    }
    for (size_t i = 0; i < sizeof mt_other_lists / sizeof *mt_other_lists; i++)
        mt_strings_free(mt_strings_at(options, mt_other_lists[i]));
    for (size_t i = 0; i < sizeof mt_other_strings / sizeof *mt_other_strings; i++)
        mt_string_set(mt_string_at(options, mt_other_strings[i]), NULL);
}

/* Replaces a string, or a list, that is shared with other options by a copy. */
static void mt_string_unshare(char **string) {
    if (*string) *string = mt_strdup(*string);
}

static void mt_strings_unshare(mt_strings *strings) {
    const mt_strings shared = *strings;
    *strings = (mt_strings){0};
    for (int64_t i = 0; i < shared.count; i++) mt_strings_add(strings, shared.items[i]);
}

void mt_options_copy(mt_run_options *to, const mt_run_options *from) {
    *to = *from;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        bool is_string = row->type == MT_STRING || row->type == MT_OPTIONAL, is_list = row->type == MT_LIST;
        if (!row->name || !(is_string || is_list) || mt_option_of(row->offset) != row) continue;
        if (is_string) mt_string_unshare(mt_option_string(to, row));
        if (is_list) mt_strings_unshare(mt_option_list(to, row));
    }
    for (size_t i = 0; i < sizeof mt_other_lists / sizeof *mt_other_lists; i++)
        mt_strings_unshare(mt_strings_at(to, mt_other_lists[i]));
    for (size_t i = 0; i < sizeof mt_other_strings / sizeof *mt_other_strings; i++)
        mt_string_unshare(mt_string_at(to, mt_other_strings[i]));
}

bool mt_parse_bool(const char *text, bool *value) {
    *value = mt_choice_index("true|True|TRUE|yes|Yes|YES|on|On|ON", text) >= 0;
    return *value || mt_choice_index("false|False|FALSE|no|No|NO|off|Off|OFF", text) >= 0;
}

enum { MT_NUMBER_TEXT = 400 }; // bytes of a number's text

/* Copies a number without the underscores between its digits, 1_000; false where one stands elsewhere. */
static bool mt_number_copy(char out[MT_NUMBER_TEXT], const char *text) {
    static const char digits[] = "0123456789";
    size_t length = 0;
    for (const char *at = text; *at; at++) {
        bool between = at > text && at[1] && strchr(digits, at[-1]) && strchr(digits, at[1]);
        if (*at == '_' && !between) return false;
        if (*at == '_') continue;
        if (length == MT_NUMBER_TEXT - 1) return false;
        out[length++] = *at;
    }
    out[length] = 0;
    return length > 0;
}

bool mt_parse_int(const char *text, int64_t *value) {
    char number[MT_NUMBER_TEXT];
    if (!mt_number_copy(number, text)) return false;
    const char *digits = number + (*number == '-' || *number == '+');
    if (!*digits || strspn(digits, "0123456789") != strlen(digits)) return false;
    errno = 0;
    *value = strtoll(number, NULL, 10);
    return errno == 0;
}

static bool mt_parse_real(const char *text, double *value) {
    char *end, number[MT_NUMBER_TEXT];
    if (!mt_number_copy(number, text)) return false;
    if (strspn(number, "0123456789+-.eE") != strlen(number)) return false; // no inf, nan or hexadecimal
    *value = strtod(number, &end);
    return *end == 0 && isfinite(*value);
}

/* Adds members to a set, separated by commas or blanks. */
static int mt_set_add(unsigned *set, const mt_option *row, const char *text, const char *where, mt_error *error) {
    if (text[strspn(text, ", ")] == 0)
        return mt_error_set(error, "%s expects some of %s, got none: '%.100s'", where, row->values, text);
    char *words = mt_strdup(text), *rest = NULL;
    int status = 0;
    for (char *word = strtok_r(words, ", ", &rest); word && !status; word = strtok_r(NULL, ", ", &rest)) {
        int member = mt_choice_index(row->values, word);
        if (member < 0)
            status = mt_error_set(error, "%s expects some of %s, got '%.100s'", where, row->values, word);
        else
            *set |= 1u << member;
    }
    free(words);
    return status;
}

/* Values of Megatron-LM with other names here: the value, or the answer that refuses it. */
static const struct {
    const char *option, *text, *value, *answer;
} mt_other_choices[] = {
    {"tokenizer-type", "NullTokenizer", "auto"}, // --vocab-size is enough
    {"tokenizer-type", "Llama2Tokenizer", "SentencePieceTokenizer"},
    {"tokenizer-type", "GPTSentencePieceTokenizer", "SentencePieceTokenizer"},
    {"tokenizer-type", "NullMultimodalTokenizer", NULL, "models of images and text are not supported"},
    {"tokenizer-type", "MultimodalTokenizer", NULL, "models of images and text are not supported"},
    {"tokenizer-type", "BertWordPieceLowerCase", NULL, "WordPiece, of BERT and of T5 in Megatron-LM: it is not read"},
    {"tokenizer-type", "BertWordPieceCase", NULL, "WordPiece, of BERT and of T5 in Megatron-LM: it is not read"},
    {"tokenizer-type", "Llama3Tokenizer", NULL,
     "it is HuggingFaceTokenizer here, with --tokenizer-model tokenizer.json"},
    {"tokenizer-type", "SFTTokenizer", NULL, "it is HuggingFaceTokenizer here, and --chat-template has its prompts"},
    {"dataloader-type", "external", NULL, "a training script's own loader; this program reads --data-path itself"},
    {"attention-backend", "fused", "cudnn"},
    {"cuda-graph-impl", "transformer_engine", "local"},
    {"cuda-graph-impl", "full_iteration", "local"},
    {"attention-backend", "local", "unfused"},
};

/* The index of a choice, by its name here or in Megatron-LM; -1: none, with the answer or NULL. */
static int mt_option_choice_index(const mt_option *row, const char *text, const char **answer) {
    *answer = NULL;
    for (size_t i = 0; i < sizeof mt_other_choices / sizeof *mt_other_choices; i++) {
        if (strcmp(mt_other_choices[i].option, row->name) != 0 || strcmp(mt_other_choices[i].text, text) != 0) continue;
        *answer = mt_other_choices[i].answer;
        return *answer ? -1 : mt_choice_index(row->values, mt_other_choices[i].value);
    }
    return mt_choice_index(row->values, text);
}

/* Megatron-LM's window "(127,0)", or without brackets: keys before the query and behind it; -1: all. In `value` the
 * number of keys that it sees; other texts as they are. */
static const char *mt_window_translate(const mt_option *row, const char *text, char value[32]) {
    long long before, behind;
    int end = -1;
    if (row->offset != MT_AT(stack.window_size)) return text;
    const char *format = *text == '(' ? "(%lld ,%lld )%n" : "%lld ,%lld%n";
    if (sscanf(text, format, &before, &behind, &end) != 2 || end < 0 || text[end] || behind != 0) return text;
    if (before < -1 || before > 1 << 30) return text;
    snprintf(value, 32, "%lld", before == -1 ? 1LL << 30 : before + 1);
    return value;
}

int mt_option_set(mt_run_options *options, const mt_option *row, const char *text, const char *where, mt_error *error) {
    char window[32];
    text = mt_window_translate(row, text, window);
    bool is_true, is_bool = mt_parse_bool(text, &is_true);
    const char *answer = NULL;
    int choice = row->type == MT_CHOICE || row->type == MT_CHOICES ? mt_option_choice_index(row, text, &answer) : 0;
    mt_ints *ints = mt_option_ints(options, row);
    mt_reals *reals = mt_option_reals(options, row);
    switch (row->type) {
    case MT_FLAG:
    case MT_NO:
        if (!is_bool) return mt_error_set(error, "%s expects true or false, got '%.100s'", where, text);
        *mt_option_bool(options, row) = is_true == (row->type == MT_FLAG);
        break;
    case MT_INT:
        if (!mt_parse_int(text, mt_option_int(options, row)))
            return mt_error_set(error, "%s expects a whole number, got '%.100s'", where, text);
        break;
    case MT_REAL:
        if (!mt_parse_real(text, mt_option_real(options, row)))
            return mt_error_set(error, "%s expects a number, got '%.100s'", where, text);
        break;
    case MT_CHOICES:
        if (choice < 0)
            return mt_error_set(error, "%s expects %s, got '%.100s' (%s)", where, row->values, text, row->help);
        for (int64_t i = 0; i < ints->count; i++)
            if (ints->items[i] == choice) return mt_error_set(error, "%s names %s twice; leave one out", where, text);
        if (ints->count == MT_MAX_INTS)
            return mt_error_set(error, "%s takes at most %d names, and '%.100s' is one more", where, MT_MAX_INTS, text);
        ints->items[ints->count++] = choice;
        break;
    case MT_REALS:
        if (reals->count == MT_MAX_INTS || !mt_parse_real(text, &reals->items[reals->count]))
            return mt_error_set(error, "%s expects at most %d numbers, got '%.100s'", where, MT_MAX_INTS, text);
        reals->count++;
        break;
    case MT_CHOICE:
        if (answer) return mt_error_set(error, "%s %s: %s", where, text, answer);
        if (choice < 0)
            return mt_error_set(error, "%s expects %s, got '%.100s' (%s)", where, row->values, text, row->help);
        *mt_option_choice(options, row) = (unsigned)choice;
        break;
    case MT_SET:
        if (mt_set_add(mt_option_choice(options, row), row, text, where, error)) return -1;
        break;
    case MT_STRING:
        if (!*text) return mt_error_set(error, "%s expects %s, got nothing", where, row->values);
        mt_string_set(mt_option_string(options, row), text);
        break;
    case MT_OPTIONAL: // true and false in a file
        if (!*text) return mt_error_set(error, "%s expects %s or nothing at all", where, row->values);
        mt_string_set(mt_option_string(options, row), is_true ? "-" : is_bool ? NULL : text);
        break;
    case MT_LIST:
        mt_strings_add(mt_option_list(options, row), text);
        break;
    case MT_INTS:
        if (ints->count == MT_MAX_INTS || !mt_parse_int(text, &ints->items[ints->count]))
            return mt_error_set(error, "%s expects %s, whole numbers, got '%.100s'", where, row->values, text);
        ints->count++;
        break;
    }
    options->given[row->offset / 64] |= (uint64_t)1 << row->offset % 64;
    return 0;
}

static void mt_option_set_default(mt_run_options *options, const mt_option *row) {
    mt_error unused;
    if (row->type == MT_NO) *mt_option_bool(options, row) = true;
    if (row->fallback) MT_CHECK(mt_option_set(options, row, row->fallback, row->name, &unused) == 0);
}

void mt_option_reset(mt_run_options *options, const mt_option *row) {
    mt_option_clear(options, row);
    if (row->type == MT_FLAG || row->type == MT_NO) *mt_option_bool(options, row) = false;
    if (row->type == MT_INT) *mt_option_int(options, row) = 0;
    if (row->type == MT_REAL) *mt_option_real(options, row) = 0;
    if (row->type == MT_CHOICE) *mt_option_choice(options, row) = 0;
    if (row->type == MT_STRING || row->type == MT_OPTIONAL) mt_string_set(mt_option_string(options, row), NULL);
    for (const mt_option *other = mt_option_table; other->help; other++)
        if (other->name && other->offset == row->offset) mt_option_set_default(options, other);
    options->given[row->offset / 64] &= ~((uint64_t)1 << row->offset % 64);
    mt_option_set_origin(options, row, MT_ORIGIN_NONE);
}

/* All options at their defaults, made once: they are compared often. */
static const mt_run_options *mt_option_defaults(void) {
    static mt_run_options defaults;
    static bool is_set;
    if (!is_set) mt_options_default(&defaults);
    is_set = true;
    return &defaults;
}

bool mt_option_is_default(const mt_run_options *options, const mt_option *row) {
    const mt_run_options *defaults = mt_option_defaults();
    if (row->type == MT_LIST) return mt_option_list(options, row)->count == 0;
    if (row->type == MT_INTS) return mt_option_ints(options, row)->count == 0;
    if (row->type == MT_CHOICES || row->type == MT_REALS) {
        char *value = mt_option_text(options, row), *text = mt_option_text(defaults, row);
        bool same = strcmp(value, text) == 0;
        free(value), free(text);
        return same;
    }
    if (row->type == MT_STRING || row->type == MT_OPTIONAL) {
        const char *value = *mt_option_string(options, row), *text = *mt_option_string(defaults, row);
        return value && text ? strcmp(value, text) == 0 : !value && !text;
    }
    if (row->type == MT_INT) return *mt_option_int(options, row) == *mt_option_int(defaults, row);
    if (row->type == MT_REAL) return *mt_option_real(options, row) == *mt_option_real(defaults, row);
    if (row->type == MT_CHOICE || row->type == MT_SET)
        return *mt_option_choice(options, row) == *mt_option_choice(defaults, row);
    return *mt_option_bool(options, row) == *mt_option_bool(defaults, row);
}

void mt_options_default(mt_run_options *options) {
    memset(options, 0, sizeof *options);
    options->bos_token_id = options->eos_token_id = -1;
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (row->name) mt_option_set_default(options, row);
    memset(options->given, 0, sizeof options->given);
}

bool mt_option_named(const mt_option *row, const char *name, size_t length) {
    if (!row->name) return false;
    for (size_t i = 0; i < length; i++)
        if (row->name[i] != (name[i] == '_' ? '-' : name[i])) return false;
    return row->name[length] == 0;
}

const mt_option *mt_option_find(const char *name, size_t length) {
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (mt_option_named(row, name, length)) return row;
    return NULL;
}

bool mt_option_next_rule(const char **column, mt_option_rule *rule) {
    size_t length = *column ? strcspn(*column, ",") : 0;
    *rule = (mt_option_rule){0};
    if (length == 0) return false;
    MT_CHECK(length < sizeof rule->text);
    memcpy(rule->text, *column, length);
    *column += length;
    *column += strspn(*column, ", ");
    char *name = rule->text, *colon = strstr(name, ": "), *blank;
    if (colon) rule->condition = name, *colon = 0, name = colon + 2;
    if ((blank = strchr(name, ' '))) rule->choices = blank + 1, *blank = 0;
    rule->other = mt_option_find(name, strlen(name));
    MT_CHECK(rule->other);
    return true;
}

bool mt_option_used(const mt_run_options *options, const mt_option *row) {
    return mt_options_gave(options, row->offset) && !mt_option_is_default(options, mt_option_of(row->offset));
}

bool mt_option_is_form_of(const mt_option *row, const mt_option *other) {
    static const size_t forms[][2] = {
        {MT_AT(gradient_accumulation_steps), MT_AT(stack.global_batch_size)},
        {MT_AT(stack.train_iters), MT_AT(stack.train_samples)},
        {MT_AT(train_epochs), MT_AT(stack.train_iters)},
        {MT_AT(stack.rope_scaling_factor), MT_AT(rotary_seq_len_interpolation_factor)},
        {MT_AT(stack.lr_warmup_fraction), MT_AT(stack.lr_warmup_iters)},
        {MT_AT(stack.lr_warmup_fraction), MT_AT(stack.lr_warmup_samples)},
        {MT_AT(eval_interval_fraction), MT_AT(eval_interval)},
        {MT_AT(log_interval_fraction), MT_AT(log_interval)},
        {MT_AT(save_interval_fraction), MT_AT(save_interval)},
        {MT_AT(num_layers_per_virtual_pipeline_stage), MT_AT(stack.num_virtual_stages_per_pipeline_rank)},
        {MT_AT(pipeline_model_parallel_layout), MT_AT(stack.num_virtual_stages_per_pipeline_rank)},
        {MT_AT(ipo), MT_AT(preference_loss)},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (row->offset == forms[i][0] && other->offset == forms[i][1]) return true;
    return false;
}

bool mt_option_has(const mt_run_options *options, const mt_option *row, const char *choices) {
    if (!choices) return !mt_option_is_default(options, row);
    char *value = mt_option_text(options, row), *rest = NULL;
    bool found = false;
    for (char *word = strtok_r(value, " ", &rest); word && !found; word = strtok_r(NULL, " ", &rest))
        found = mt_choice_index(choices, word) >= 0;
    free(value);
    return found;
}

bool mt_option_rule_holds(const mt_run_options *options, const mt_option *row, const mt_option_rule *rule) {
    if (!rule->condition) return mt_option_used(options, row);
    return mt_option_has(options, row, strcmp(rule->condition, "any") == 0 ? NULL : rule->condition);
}

int mt_options_check_ranges(const mt_run_options *options, mt_program program, mt_error *error) {
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || (row->origin == MT_OF_RUN && !(row->programs & (int)program))) continue;
        if (!mt_options_gave(options, row->offset) && mt_option_is_default(options, row)) continue;
        char *text = mt_option_text(options, row);
        bool good = row->type != MT_CHOICE || *text;
        if (row->type == MT_INT) good = mt_option_in_range(row, (double)*mt_option_int(options, row));
        if (row->type == MT_REAL) good = mt_option_in_range(row, *mt_option_real(options, row));
        for (int64_t i = 0; row->type == MT_REALS && good && i < mt_option_reals(options, row)->count; i++)
            good = mt_option_in_range(row, mt_option_reals(options, row)->items[i]);
        if (!good)
            mt_error_set(error, "--%s must be %s%s, got %.100s", row->name, row->type == MT_CHOICE ? "" : "in ",
                         row->values, text);
        free(text);
        if (!good) return -1;
    }
    return 0;
}
