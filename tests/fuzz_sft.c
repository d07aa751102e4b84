/* fuzz_sft.c: JSON Lines of arbitrary bytes -> samples. The first byte selects pairs, the loss, the treatment of
 * long samples, prompts, log-probabilities of pairs, and pictures. Bad lines are left out, so that each input reaches
 * its last line. */
#include "data/datasets/sft.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Every prompt fits, has a text and trains on nothing. */
static void check_prompts(const mt_samples *samples, const mt_sft_config *config) {
    for (int64_t s = 0; s < samples->count; s++) {
        int64_t first = samples->offsets[s], end = samples->offsets[s + 1];
        MT_CHECK(end - first >= 1 && end - first <= config->seq_length && samples->questions[s].prompt);
        for (int64_t t = first; t < end; t++)
            MT_CHECK(samples->tokens[t] >= 0 && samples->tokens[t] < config->vocab_size && !samples->is_trained[t]);
    }
}

/* Every sample fits, has a token to train on, and does not train on its first token. */
static void check_samples(const mt_samples *samples, const mt_sft_config *config) {
    for (int64_t s = 0; s < samples->count; s++) {
        int64_t first = samples->offsets[s], end = samples->offsets[s + 1], trained = 0;
        MT_CHECK(end - first >= 2 && end - first <= config->seq_length + 1 && !samples->is_trained[first]);
        for (int64_t t = first; t < end; t++) {
            MT_CHECK(samples->tokens[t] >= 0 && samples->tokens[t] < config->vocab_size);
            trained += samples->is_trained[t];
        }
        MT_CHECK(trained > 0);
    }
    MT_CHECK(!config->pairs || samples->count % 2 == 0);
    MT_CHECK((config->pairs && config->ref_logps) == (samples->ref_logps != NULL));
    for (int64_t s = 0; s < samples->count && samples->ref_logps; s++) MT_CHECK(samples->ref_logps[s] <= 1e-3);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static mt_tokenizer *tokenizer;
    mt_error error;
    char path[64], *paths[] = {path};
    mt_samples samples;
    const mt_image_reader reader = {.config = {.merge_size = 1}, .image_token_id = 'z'};
    if (size == 0) return 0;
    if (!tokenizer) MT_CHECK(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, &error) == 0);
    mt_sft_config config = {.paths = {1, paths},
                            .vocab_size = 257,
                            .seq_length = 40,
                            .chat_template = MT_CHAT_PLAIN,
                            .pairs = data[0] & 1,
                            .loss_on = (mt_loss_on)(data[0] / 2 % 3),
                            .long_samples = (mt_long_samples)(data[0] / 6 % 2),
                            .prompts = data[0] / 12 % 4 == 3,
                            .ref_logps = data[0] / 12 % 4 == 1,
                            .needs_answer = data[0] & 1,
                            .images = data[0] / 48 % 2 && !(data[0] & 1) ? &reader : NULL,
                            .skip_bad_samples = 1 << 20};
    int file = memfd_create("fuzz", MFD_CLOEXEC);
    MT_CHECK(file >= 0 && write(file, data + 1, size - 1) == (ssize_t)size - 1);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (mt_samples_read(&samples, &config, tokenizer, &error) == 0)
        (config.prompts ? check_prompts : check_samples)(&samples, &config);
    else
        MT_CHECK(error.text[0] != '\0' && !strchr(error.text, '\n') && !samples.tokens);
    mt_samples_free(&samples);
    close(file);
    return 0;
}
