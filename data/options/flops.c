/* flops.c: the floating-point operations of a model, from its options. */
#include "flops.h"

/* Mean number of keys that a query of a layer attends to: half of the sequence, as Megatron counts; with a window, or
 * an indexer that selects so many, its size, and fewer at the start. */
static double mean_keys(const mt_options *o, int64_t layer) {
    mt_layer_kind kind = mt_layer_kind_of(o, layer);
    double T = (double)o->seq_length, window = (double)kind.window;
    if (kind.mixer == MT_MIXER_SPARSE_ATTENTION) window = (double)o->dsa_indexer_topk;
    return window > 0 && window < T ? window - window * window / (2 * T) : T / 2;
}

/* Multiplications per token of a gated delta net between its two linears: the convolution, and the rule's three
 * products with the state. */
static double delta_multiplications(const mt_options *o) {
    double keys = (double)(o->linear_num_key_heads * o->linear_key_head_dim);
    double values = (double)(o->linear_num_value_heads * o->linear_value_head_dim);
    return (2 * keys + values) * (double)o->linear_conv_kernel_dim + 3 * values * (double)o->linear_key_head_dim;
}

/* The same of Mamba-2: the convolution, and the products of the state with x and C. */
static double mamba_multiplications(const mt_options *o) {
    double inner = (double)(o->mamba_num_heads * o->mamba_head_dim), N = (double)o->mamba_state_dim;
    return (inner + 2 * (double)o->mamba_num_groups * N) * (double)o->linear_conv_kernel_dim + 2 * inner * N;
}

/* Multiplications per token of latent attention's projections, including its norms, as Megatron counts them. */
static double latent_multiplications(const mt_options *o) {
    double heads = (double)o->num_attention_heads, C = (double)o->hidden_size;
    double q_rank = (double)o->q_lora_rank, kv_rank = (double)o->kv_lora_rank, nope = (double)o->qk_head_dim;
    double rope = (double)o->qk_pos_emb_head_dim, values = (double)o->v_head_dim, width = heads * (nope + rope);
    double queries = q_rank > 0 ? q_rank * (C + width + 1) : C * width;
    double keys = kv_rank * (C + heads * (nope + values) + 1) + C * rope;
    return queries + keys + heads * values * C;
}

/* Multiplications per token of a layer's indexer, without the gradients that it lacks if its loss is off, in units of
 * a forward and a backward: its projections, and its scores of all keys that a query sees. */
static double indexer_multiplications(const mt_options *o, int64_t layer) {
    mt_layer_kind kind = mt_layer_kind_of(o, layer);
    double heads = (double)o->dsa_indexer_n_heads, D = (double)o->dsa_indexer_head_dim, C = (double)o->hidden_size;
    double products = (double)o->q_lora_rank * heads * D + C * (D + heads),
           scores = heads * D * (double)o->seq_length / 2;
    if (kind.mixer != MT_MIXER_SPARSE_ATTENTION || kind.shares_indices) return 0;
    // The weights get gradients, their inputs none; the scores are computed in the forward, and for the loss again.
    return o->dsa_indexer_loss_coeff > 0 ? products * 2 / 3 + scores : (products + scores) / 3;
}

/* Multiplications per token of a layer's projections: of q, k, v and output; of other mixers their two linears. */
static double projection_multiplications(const mt_options *o, int64_t layer) {
    double heads = (double)o->num_attention_heads, groups = (double)mt_layer_kind_of(o, layer).groups;
    double D = (double)o->kv_channels, Dv = (double)mt_value_channels(o);
    double C = (double)o->hidden_size, keys = (double)(o->linear_num_key_heads * o->linear_key_head_dim);
    double values = (double)(o->linear_num_value_heads * o->linear_value_head_dim);
    double inner = (double)(o->mamba_num_heads * o->mamba_head_dim);
    mt_mixer_kind mixer = mt_layer_kind_of(o, layer).mixer;
    if (mixer == MT_MIXER_NONE) return 0;
    if (mixer == MT_MIXER_SHORT_CONV) return 4 * C * C;
    if (mixer == MT_MIXER_GATED_DELTA_NET) return C * (2 * keys + 3 * values + 2 * (double)o->linear_num_value_heads);
    if (mixer == MT_MIXER_KDA) // and the products through the narrow middle
        return C * (2 * keys + 2 * values + (double)o->linear_num_value_heads) +
               (2 * C + keys + values) * (double)o->linear_value_head_dim;
    if (mixer == MT_MIXER_MAMBA2)
        return C * (3 * inner + 2 * (double)(o->mamba_num_groups * o->mamba_state_dim) + (double)o->mamba_num_heads);
    if (o->multi_latent_attention) return latent_multiplications(o) + indexer_multiplications(o, layer);
    return C * (((o->attention_output_gate ? 2 : 1) * heads + groups) * D + groups * Dv) + heads * Dv * C;
}

/* Multiplications per token of queries times keys and probabilities times values, of one layer; of other mixers: of
 * the part between their linears. */
static double attention_multiplications(const mt_options *o, int64_t layer) {
    mt_mixer_kind mixer = mt_layer_kind_of(o, layer).mixer;
    if (mixer == MT_MIXER_NONE) return 0;
    if (mixer == MT_MIXER_SHORT_CONV)
        return (double)(o->hidden_size * (o->linear_conv_kernel_dim + 2)); // and the products with B and C
    if (mixer == MT_MIXER_GATED_DELTA_NET || mixer == MT_MIXER_KDA) return delta_multiplications(o);
    if (mixer == MT_MIXER_MAMBA2) return mamba_multiplications(o);
    double values = (double)mt_value_channels(o);
    return (double)o->num_attention_heads * ((double)o->kv_channels + values) * mean_keys(o, layer);
}

double mt_flops(const mt_options *o, int64_t num_sequences) {
    double C = (double)o->hidden_size, F = (double)o->ffn_hidden_size, T = (double)o->seq_length;
    double mixers = 0; // multiplications per token, of all layers
    double matrices = mt_activation_rows[mt_options_activation(o)].gated ? 3 : 2, mlp = matrices * C * F;
    double experts = (double)mt_num_expert_layers(o);
    double L = (double)o->moe_latent_size, rows = L > 0 ? L : C; // channels of a row of the experts
    double visited = matrices * (double)(o->moe_router_topk * o->moe_ffn_hidden_size) * rows + 2 * C * L;
    visited += matrices * (double)o->moe_shared_expert_intermediate_size * C;
    double mlps = (double)mt_num_dense_layers(o) * mlp + experts * visited;
    for (int64_t i = 0; i < o->num_layers; i++)
        mixers += projection_multiplications(o, i) + attention_multiplications(o, i);
    double output = C * (double)o->padded_vocab_size;
    double layers = mixers + mlps, module = 0;
    if (o->mtp_num_layers > 0) { // work at every depth, repeated or not
        mt_feed_forward_kind kind = mt_layer_kind_of(o, o->num_layers).feed_forward;
        module = 2 * C * C + projection_multiplications(o, o->num_layers) + attention_multiplications(o, o->num_layers);
        module += kind == MT_FEED_FORWARD_EXPERTS ? visited : kind == MT_FEED_FORWARD_DENSE ? mlp : 0;
        module += output;
    }
    double per_token = layers + output + (double)o->mtp_num_layers * module;
    return 6 * (double)num_sequences * T * per_token; // forward once, backward twice; a multiply and an add each
}

mt_token_work mt_token_work_of(const mt_options *options) {
    // Of H200s: matrix products in bf16, and an exchange that explains the 8% that a ring of four costs (notes/lab.md).
    const double flops_per_byte = 600e12 / 170e9;
    mt_options one = *options, many = *options; // their strings are not used
    // Without the padding that depends on the layout: any has the same micro-batches.
    one.padded_vocab_size = many.padded_vocab_size = options->vocab_size;
    one.seq_length = 1, many.seq_length = 1 << 20;
    bool is_sparse = options->experimental_attention_variant == MT_VARIANT_DSA;
    int64_t bend = is_sparse ? options->dsa_indexer_topk : options->window_size; // linear from there on
    if (bend > 0 && bend < many.seq_length) one.seq_length = bend;
    double least = (double)one.seq_length, most = (double)many.seq_length;
    double short_rate = mt_flops(&one, 1) / least, long_rate = mt_flops(&many, 1) / most;
    double width = (double)(options->num_query_groups * options->kv_channels);
    mt_token_work work = {.per_pair = (long_rate - short_rate) / (most - least)};
    work.per_token = short_rate - work.per_pair * least;
    // keys and values in bf16: once forward, once backward, and their gradients
    work.per_exchange = 3 * 2 * width * 2 * (double)options->num_layers * flops_per_byte;
    return work;
}
