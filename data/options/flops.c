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

static double mt_count_bits(uint64_t bits) {
    double count = 0;
    for (; bits; bits &= bits - 1) count++;
    return count;
}

/* Pairs of patches of an image that see each other in a layer of windows. */
static double mt_window_pairs(const mt_vision_options *v, int64_t height, int64_t width) {
    int64_t tokens = v->window_size / v->patch_size / v->spatial_merge_size; // of a window's side
    int64_t side = (tokens > 1 ? tokens : 1) * v->spatial_merge_size;
    double pairs = 0;
    for (int64_t top = 0; top < height; top += side)
        for (int64_t left = 0; left < width; left += side) {
            int64_t rows = height - top < side ? height - top : side,
                    columns = width - left < side ? width - left : side;
            pairs += (double)(rows * columns) * (double)(rows * columns);
        }
    return pairs;
}

double mt_image_flops(const mt_options *o, int64_t height, int64_t width) {
    const mt_vision_options *v = &o->vision;
    double C = (double)v->hidden_size, F = (double)v->ffn_hidden_size, P = (double)(height * width);
    double M = (double)(v->spatial_merge_size * v->spatial_merge_size), layers = (double)v->num_layers;
    bool has_windows = v->tower == MT_VISION_QWEN2_5;
    if (v->tower == MT_VISION_NONE) return 0;
    double whole = has_windows ? mt_count_bits(v->full_layers) : layers; // layers whose patches see the whole image
    double pairs = whole * P * P + (layers - whole) * (has_windows ? mt_window_pairs(v, height, width) : 0);
    double mergers = 1 + (has_windows ? 0 : mt_count_bits(v->deepstack_layers));
    double products = 4 * C * C + (has_windows ? 3 : 2) * C * F;
    double of_tower = P * ((double)mt_patch_values(o) * C + layers * products) + 2 * C * pairs; // scores, and values
    double of_mergers = mergers * P / M * (M * C * M * C + M * C * (double)o->hidden_size);
    double passes = v->freeze_projector ? v->freeze ? 1 : 2 : v->freeze ? 2 : 3; // of the mergers
    return 2 * (of_tower * (v->freeze ? 1 : 3) + of_mergers * passes);
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
