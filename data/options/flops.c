/* flops.c: the floating-point operations of a model, from its options. */
#include "flops.h"

double mt_flops(const mt_options *o, int64_t num_sequences) {
    double C = (double)o->hidden_size, F = (double)o->ffn_hidden_size, T = (double)o->seq_length;
    double mixers = 0; // multiplications per token, of all layers
    double matrices = mt_activation_rows[mt_options_activation(o)].gated ? 3 : 2, mlp = matrices * C * F;
    double experts = (double)mt_num_expert_layers(o);
    double L = (double)o->moe_latent_size, rows = L > 0 ? L : C; // channels of a row of the experts
    double visited = matrices * (double)(o->moe_router_topk * o->moe_ffn_hidden_size) * rows + 2 * C * L;
    visited += matrices * (double)o->moe_shared_expert_intermediate_size * C;
    double dense = (double)mt_num_dense_layers(o);
    if (o->decoder_num_layers > 0) // the encoder's layers see its tokens
        dense += (double)o->encoder_num_layers * ((double)o->encoder_seq_length / T - 1);
    double mlps = dense * mlp + experts * visited;
    for (int64_t i = 0; i < o->num_layers; i++) mixers += mt_mixer_multiplications(o, i);
    double output = C * (double)o->padded_vocab_size;
    double layers = mixers + mlps, module = 0;
    if (o->mtp_num_layers > 0) { // work at every depth, repeated or not
        mt_feed_forward_kind kind = mt_layer_kind_of(o, o->num_layers).feed_forward;
        module = 2 * C * C + mt_mixer_multiplications(o, o->num_layers);
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
