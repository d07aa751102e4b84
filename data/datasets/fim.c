/* fim.c: filling in the middle. */
#include "fim.h"

#include "../options/option_rules.h"
#include "../tokens/tokenizer_encode.h"
#include "../tokens/tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

struct mt_fim {
    const mt_tokenizer *tokenizer;
    mt_encoder *encoder;
    int32_t prefix, middle, suffix, pad, eod;
    int32_t split; // -1: none
    double rate, spm_rate, fragment_rate;
    const char *no_prefix; // NULL: none
    uint64_t key;
    mt_text text;              // of the part at hand
    mt_ids parts[3], permuted; // of its prefix, middle and suffix; of the sample
};

int mt_fim_open(mt_fim **out, const mt_run_options *o, const mt_tokenizer *tokenizer, mt_error *error) {
    *out = NULL;
    if (!tokenizer)
        return mt_error_set(error, "--fim-data needs a tokenizer: --tokenizer-type, or --load a model with one");
    mt_fim *fim = mt_calloc(sizeof *fim);
    *fim = (mt_fim){.tokenizer = tokenizer,
                    .split = -1,
                    .rate = o->fim_rate,
                    .spm_rate = o->fim_spm_rate,
                    .fragment_rate = o->fim_fragment_rate,
                    .no_prefix = o->fim_no_prefix,
                    .key = mt_random_key((uint64_t)mt_options_data_seed(o), UINT64_C(0x66696d), 0)};
    const struct {
        const char *option, *text;
        int32_t *id;
    } tokens[] = {
        {"prefix-token", o->fim_prefix_token, &fim->prefix}, {"middle-token", o->fim_middle_token, &fim->middle},
        {"suffix-token", o->fim_suffix_token, &fim->suffix}, {"pad-token", o->fim_pad_token, &fim->pad},
        {"eod-token", o->fim_eod_token, &fim->eod},          {"split-sample", o->fim_split_sample, &fim->split}};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        if (!tokens[i].text) continue; // no --fim-split-sample
        *tokens[i].id = mt_tokenizer_find(tokenizer, tokens[i].text, (int64_t)strlen(tokens[i].text));
        if (*tokens[i].id >= 0) continue;
        free(fim);
        return mt_error_set(error, "--fim-%s '%.80s' is no token of the tokenizer; name one of its tokens",
                            tokens[i].option, tokens[i].text);
    }
    fim->encoder = mt_encoder_open(tokenizer);
    *out = fim;
    return 0;
}

void mt_fim_close(mt_fim *fim) {
    if (!fim) return;
    mt_encoder_close(fim->encoder);
    for (int i = 0; i < 3; i++) free(fim->parts[i].data);
    free(fim->permuted.data), free(fim->text.data);
    free(fim);
}

static void append(mt_fim *fim, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) mt_ids_push(&fim->permuted, tokens[i]);
}

/* The text of tokens, without special ones: valid UTF-8, as ill-formed bytes become U+FFFD. */
static int read_text(mt_fim *fim, const int32_t *tokens, int64_t count, mt_error *error) {
    mt_decoder *decoder = mt_decoder_open(fim->tokenizer);
    int status = 0;
    fim->text.bytes = 0;
    for (int64_t i = 0; i < count && status == 0; i++)
        if (!mt_tokenizer_is_special(fim->tokenizer, tokens[i]))
            status = mt_decode_next(decoder, tokens[i], &fim->text, error);
    mt_decode_end(decoder, &fim->text);
    mt_decoder_close(decoder);
    return status;
}

/* The byte at which character `place` begins; the end of the text for the number of its characters. */
static int64_t find_character(const mt_text *text, int64_t place) {
    for (int64_t i = 0; i < text->bytes; i++)
        if (((unsigned char)text->data[i] & 0xc0) != 0x80 && place-- == 0) return i;
    return text->bytes;
}

static int64_t count_characters(const mt_text *text) {
    int64_t count = 0;
    for (int64_t i = 0; i < text->bytes; i++) count += ((unsigned char)text->data[i] & 0xc0) != 0x80;
    return count;
}

/* Appends a part of a text, permuted with probability `rate`. */
static int permute_part(mt_fim *fim, const int32_t *tokens, int64_t count, double rate, const mt_fim_draws *draws,
                        mt_error *error) {
    int64_t skipped = fim->no_prefix ? (int64_t)strlen(fim->no_prefix) : 0;
    bool permutes = draws->decide(draws->context, rate);
    if (permutes && read_text(fim, tokens, count, error) != 0) return -1;
    bool is_kept =
        skipped > 0 && fim->text.bytes >= skipped && memcmp(fim->text.data, fim->no_prefix, (size_t)skipped) == 0;
    if (!permutes || is_kept) {
        append(fim, tokens, count);
        return 0;
    }
    int64_t characters = count_characters(&fim->text);
    int64_t a = draws->place(draws->context, characters), b = draws->place(draws->context, characters);
    int64_t cuts[] = {0, find_character(&fim->text, mt_min(a, b)), find_character(&fim->text, mt_max(a, b)),
                      fim->text.bytes};
    for (int i = 0; i < 3; i++) {
        fim->parts[i].count = 0;
        int64_t bytes = cuts[i + 1] - cuts[i];
        if (bytes > 0 && mt_encode(fim->encoder, fim->text.data + cuts[i], bytes, &fim->parts[i], error) != 0)
            return -1;
    }
    const mt_ids *prefix = &fim->parts[0], *middle = &fim->parts[1], *suffix = &fim->parts[2];
    bool suffix_first = draws->decide(draws->context, fim->spm_rate);
    mt_ids_push(&fim->permuted, fim->prefix);
    if (!suffix_first) append(fim, prefix->data, prefix->count);
    mt_ids_push(&fim->permuted, fim->suffix);
    append(fim, suffix->data, suffix->count);
    mt_ids_push(&fim->permuted, fim->middle);
    if (suffix_first) append(fim, prefix->data, prefix->count);
    append(fim, middle->data, middle->count);
    return 0;
}

/* Appends the parts that `mark` (-1: none) divides the tokens into, and the marks; an empty part goes with the mark
 * behind it. `permute` permutes a part. */
typedef int permute_function(mt_fim *fim, const int32_t *tokens, int64_t count, const mt_fim_draws *draws,
                             mt_error *error);
static int permute_parts(mt_fim *fim, const int32_t *tokens, int64_t count, int32_t mark, permute_function *permute,
                         const mt_fim_draws *draws, mt_error *error) {
    int64_t begin = 0;
    for (int64_t i = 0; i < count; i++) {
        if (tokens[i] != mark) continue;
        if (i > begin) {
            if (permute(fim, tokens + begin, i - begin, draws, error) != 0) return -1;
            mt_ids_push(&fim->permuted, mark);
        }
        begin = i + 1;
    }
    return permute(fim, tokens + begin, count - begin, draws, error);
}

static int permute_fragment(mt_fim *fim, const int32_t *tokens, int64_t count, const mt_fim_draws *draws,
                            mt_error *error) {
    return permute_part(fim, tokens, count, fim->fragment_rate, draws, error);
}

/* A document, or its fragments. */
static int permute_document(mt_fim *fim, const int32_t *tokens, int64_t count, const mt_fim_draws *draws,
                            mt_error *error) {
    bool has_fragments = false;
    for (int64_t i = 0; i < count && fim->split >= 0; i++) has_fragments |= tokens[i] == fim->split;
    if (!has_fragments) return permute_part(fim, tokens, count, fim->rate, draws, error);
    if (draws->decide(draws->context, fim->rate))
        return permute_parts(fim, tokens, count, fim->split, permute_fragment, draws, error);
    append(fim, tokens, count);
    return 0;
}

int mt_fim_permute(mt_fim *fim, int32_t *tokens, int64_t count, const mt_fim_draws *draws, mt_error *error) {
    fim->permuted.count = 0;
    if (permute_parts(fim, tokens, count, fim->eod, permute_document, draws, error) != 0) return -1;
    for (int64_t i = 0; i < count; i++) tokens[i] = i < fim->permuted.count ? fim->permuted.data[i] : fim->pad;
    return 0;
}

/* ---- draws of a sample */

typedef struct fim_stream {
    uint64_t key;
    int64_t number, draw;
} fim_stream;

/* Uniform in [0, 1). */
static double next_draw(fim_stream *stream) {
    uint32_t words[4];
    mt_philox(words, stream->key, (uint64_t)stream->number, (uint64_t)stream->draw++);
    return (double)(((uint64_t)words[0] << 32 | words[1]) >> 11) * 0x1p-53;
}

static bool decide(void *context, double rate) {
    return next_draw(context) < rate;
}

static int64_t place(void *context, int64_t largest) {
    return mt_min((int64_t)(next_draw(context) * (double)(largest + 1)), largest);
}

int mt_fim_apply(mt_fim *fim, int32_t *tokens, int64_t count, int64_t number, mt_error *error) {
    fim_stream stream = {.key = fim->key, .number = number};
    const mt_fim_draws draws = {decide, place, &stream};
    return mt_fim_permute(fim, tokens, count, &draws, error);
}
