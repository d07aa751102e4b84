/* hidden_pairs.c: see hidden_pairs.h. */
#include "hidden_pairs.h"

#include <string.h>

/* "decoder.layers.N" or "decoder.final_layernorm" of `length` characters; false: none of these. */
static bool mt_hidden_layer_read(const char *name, size_t length, int64_t *layer) {
    static const char norm[] = "decoder.final_layernorm", layers[] = "decoder.layers.";
    *layer = MT_TAP_FINAL_NORM;
    if (length == sizeof norm - 1 && strncmp(name, norm, length) == 0) return true;
    size_t digits = sizeof layers - 1;
    if (length <= digits || length > digits + 6 || strncmp(name, layers, digits) != 0) return false;
    for (*layer = 0; digits < length; digits++) {
        if (name[digits] < '0' || name[digits] > '9') return false;
        *layer = 10 * *layer + (name[digits] - '0');
    }
    return true;
}

static int mt_hidden_pair_read(mt_hidden_pair *pair, const char *text, mt_error *error) {
    const char *names[3] = {text};
    size_t lengths[3] = {0};
    int count = 0;
    for (const char *at = text;; at++) {
        if (*at && *at != ':') continue;
        lengths[count] = (size_t)(at - names[count]), count++;
        if (!*at || count == 3) break;
        names[count] = at + 1;
    }
    bool whole = count >= 2 && !names[count - 1][lengths[count - 1]];
    int64_t *layers[] = {&pair->student, &pair->teacher};
    for (int i = 0; i < 2 && whole; i++)
        if (!mt_hidden_layer_read(names[i], lengths[i], layers[i]))
            return mt_error_set(error,
                                "--kd-hidden-layers: %.*s is not supported; a hidden state is the output of "
                                "decoder.layers.N, with N from 0, or of decoder.final_layernorm",
                                (int)mt_min((int64_t)lengths[i], 100), names[i]);
    pair->type = count == 3 && strcmp(names[2], "mse") == 0 ? MT_HIDDEN_MSE : MT_HIDDEN_COSINE;
    bool typed = count < 3 || pair->type == MT_HIDDEN_MSE || strcmp(names[2], "cosine") == 0;
    if (whole && typed) return 0;
    return mt_error_set(error, "--kd-hidden-layers expects STUDENT:TEACHER or STUDENT:TEACHER:cosine|mse, got '%.100s'",
                        text);
}

int mt_options_hidden_pairs(mt_distillation_config *c, const mt_run_options *o, mt_error *error) {
    const mt_strings *texts = &o->kd_hidden_layers;
    c->num_pairs = 0;
    if (texts->count > MT_MAX_HIDDEN_PAIRS)
        return mt_error_set(error, "--kd-hidden-layers has %lld pairs; give at most %d", (long long)texts->count,
                            MT_MAX_HIDDEN_PAIRS);
    for (int64_t i = 0; i < texts->count; i++)
        if (mt_hidden_pair_read(&c->pairs[i], texts->items[i], error) != 0) return -1;
    c->num_pairs = texts->count;
    return 0;
}
