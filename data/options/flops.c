/* flops.c: the floating-point operations of a model, from its options. */
#include "flops.h"

double mt_flops(const mt_options *o, int64_t num_sequences) {
    double C = (double)o->hidden_size, T = (double)o->seq_length, output = C * (double)o->padded_vocab_size;
    double per_token = output; // multiplications
    for (int64_t i = 0; i < o->num_layers; i++) per_token += mt_layer_multiplications(o, i);
    if (o->mtp_num_layers > 0) // work at every depth, repeated or not
        per_token += (double)o->mtp_num_layers * (2 * C * C + mt_layer_multiplications(o, o->num_layers) + output);
    return 6 * (double)num_sequences * T * per_token; // forward once, backward twice; a multiply and an add each
}

mt_token_work mt_token_work_of(const mt_options *options) {
    // Of H200s: matrix products in bf16, and an exchange that explains the 8% that a ring of four costs (notes/lab.md).
    const double flops_per_byte = 600e12 / 170e9;
    mt_options one = *options, many = *options; // their strings are not used
    // Without the padding that depends on the layout: any has the same micro-batches.
    one.padded_vocab_size = many.padded_vocab_size = options->vocab_size;
    one.seq_length = 1, many.seq_length = 1 << 20;
    int64_t selected = mt_num_selected_keys(options);
    int64_t bend = selected > 0 ? selected : options->window_size; // linear from there on
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
