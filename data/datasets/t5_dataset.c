/* t5_dataset.c: samples with masked spans, in the order of Megatron-Core, token for token.
 *
 * Sentences of a document are joined until a sample has its length; the samples of all epochs are shuffled. A sample's
 * spans are drawn by a generator of its own, whose seed is the sample's index plus --seed: words in random order begin
 * spans of as many words as a geometric distribution says, until enough tokens are masked (Joshi et al., "SpanBERT").
 */
#include "t5_dataset.h"

#include "../base/file.h"
#include "../tokens/tokenizer.h"
#include "../tokens/tokenizer_vocab.h"
#include "random_order.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONG_SENTENCE = 512, LONGEST_SPAN = 10 };
static const double SPAN_STOPS = 0.2; // the probability that a span ends with a word

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

/* std::mt19937_64 (Nishimura, "Tables of 64-bit Mersenne twisters"). */
typedef struct mt19937_64 {
    uint64_t state[312];
    int position;
} mt19937_64;

static void mt19937_64_seed(mt19937_64 *random, uint64_t seed) {
    random->state[0] = seed;
    for (uint64_t i = 1; i < 312; i++) {
        uint64_t previous = random->state[i - 1];
        random->state[i] = UINT64_C(6364136223846793005) * (previous ^ (previous >> 62)) + i;
    }
    random->position = 312;
}

static uint64_t mt19937_64_next(mt19937_64 *random) {
    uint64_t *state = random->state;
    for (int i = 0; i < 312 && random->position == 312; i++) {
        uint64_t mixed = (state[i] & ~UINT64_C(0x7fffffff)) | (state[(i + 1) % 312] & UINT64_C(0x7fffffff));
        state[i] = state[(i + 156) % 312] ^ (mixed >> 1) ^ (mixed & 1 ? UINT64_C(0xb5026f5aa96619e9) : 0);
    }
    if (random->position == 312) random->position = 0;
    uint64_t word = state[random->position++];
    word ^= (word >> 29) & UINT64_C(0x5555555555555555);
    word ^= (word << 17) & UINT64_C(0x71d67fffeda60000);
    word ^= (word << 37) & UINT64_C(0xfff7eee000000000);
    return word ^ (word >> 43);
}

/* NumPy's random_sample: 53 bits. */
static double numpy_uniform(mt_mt19937 *random) {
    uint32_t high = mt_mt19937_next(random) >> 5, low = mt_mt19937_next(random) >> 6;
    return ((double)high * 67108864.0 + (double)low) / 9007199254740992.0;
}

/* RandomState.geometric(p) for p below 1/3. */
static int64_t numpy_geometric(mt_mt19937 *random, double p) {
    return (int64_t)ceil(log1p(-numpy_uniform(random)) / log(1 - p));
}

/* ---- the order of samples ---------------------------------------------------------------------------------------- */

/* Sentences [first, end) of the indexed dataset, cut to `length` tokens. */
typedef struct sentences {
    int64_t first, end, length;
} sentences;

typedef struct t5_dataset {
    mt_dataset base;
    const mt_indexed_dataset *indexed;
    const mt_span_masking *masking;
    int64_t vocab_size, seed, end_id, target_length, longest; // longest: tokens of the sentences of a sample
    int64_t epoch;                                            // samples of one
    sentences *samples;                                       // [num_samples]
} t5_dataset;

static int64_t first_sentence(const mt_indexed_dataset *indexed, int64_t document) {
    int64_t sentence;
    memcpy(&sentence, mt_indexed_dataset_index(indexed)->documents + 8 * document, 8);
    return sentence;
}

/* The length of the next sample: `longest`, or of one in `ratio` any from 2 on. */
static int64_t draw_length(mt_mt19937 *random, int64_t ratio, int64_t longest) {
    if (ratio == 0) return longest;
    int64_t word = mt_mt19937_next(random);
    return word % ratio == 0 ? 2 + word % (longest - 1) : longest;
}

static bool has_long_sentence(const mt_indexed_dataset *indexed, int64_t first, int64_t end) {
    for (int64_t i = first; i < end && end - first > 1; i++)
        if (mt_indexed_dataset_length(indexed, i) > LONG_SENTENCE) return true;
    return false;
}

/* Appends the samples of one epoch; a sentence alone at the end of a document joins the sample before it. */
static void add_epoch(t5_dataset *d, mt_mt19937 *random, int64_t ratio, int64_t begin, int64_t end, int64_t *room) {
    for (int64_t document = begin; document < end; document++) {
        int64_t at = first_sentence(d->indexed, document), last = first_sentence(d->indexed, document + 1), tokens = 0;
        if (at == last || has_long_sentence(d->indexed, at, last)) continue;
        int64_t length = draw_length(random, ratio, d->base.seq_length);
        for (int64_t i = at; i < last; i++) {
            int64_t left = last - i - 1;
            tokens += mt_indexed_dataset_length(d->indexed, i);
            if (left > 0 && (tokens < length || left == 1)) continue;
            if (d->base.num_samples == *room)
                d->samples = mt_realloc(d->samples, (*room = 2 * *room + 64) * (int64_t)sizeof *d->samples);
            d->samples[d->base.num_samples++] = (sentences){at, i + 1, length};
            at = i + 1, tokens = 0;
            length = draw_length(random, ratio, d->base.seq_length);
        }
    }
}

/* Samples of whole epochs, shuffled. */
static int order_samples(t5_dataset *d, int64_t begin, int64_t end, int64_t wanted, mt_error *error) {
    mt_mt19937 random;
    mt19937_64 shuffle;
    int64_t ratio = d->masking->short_seq_prob > 0 ? (int64_t)round(1 / d->masking->short_seq_prob) : 0, room = 0;
    mt_mt19937_seed(&random, (uint32_t)d->seed);
    do {
        int64_t before = d->base.num_samples;
        add_epoch(d, &random, ratio, begin, end, &room);
        if (before == 0) d->epoch = d->base.num_samples;
        if (d->base.num_samples == before)
            return mt_error_set(error,
                                "%s: documents %lld to %lld make no sample: they are empty, or have a sentence of over "
                                "%d tokens beside others; give more data, or sentences as sequences",
                                mt_indexed_dataset_prefix(d->indexed), (long long)begin, (long long)end, LONG_SENTENCE);
    } while (d->base.num_samples < wanted);
    mt19937_64_seed(&shuffle, (uint64_t)(d->seed + 1));
    for (int64_t i = d->base.num_samples - 1; i > 0; i--) {
        int64_t j = (int64_t)(mt19937_64_next(&shuffle) % (uint64_t)(i + 1));
        sentences sample = d->samples[i];
        d->samples[i] = d->samples[j], d->samples[j] = sample;
    }
    return 0;
}

/* ---- masked spans ------------------------------------------------------------------------------------------------ */

/* The tokens of a sample, divided into words: word w is [words[w], words[w + 1]). */
typedef struct masked {
    int64_t count, num_words;
    int32_t *tokens;
    int64_t *words;   // [num_words + 1]
    uint32_t *order;  // [num_words]
    int64_t *span_at; // [count] length of the span that begins at a token; 0: none
    bool *is_masked;  // [count]
} masked;

static void divide_words(masked *x, const mt_span_masking *masking) {
    for (int64_t i = 0; i < x->count; i++) {
        bool continues = masking->continues && masking->continues[x->tokens[i]] && x->num_words > 0;
        if (!continues) x->words[x->num_words++] = i;
    }
    x->words[x->num_words] = x->count;
}

/* Spans of `words`, which may reach fewer at the end, shortened until their tokens are not too many. */
static void mask_spans(masked *x, mt_mt19937 *random, double most) {
    double masked = 0;
    for (int64_t w = 0; w < x->num_words; w++) x->order[w] = (uint32_t)w;
    mt_numpy_shuffle(random, x->order, x->num_words);
    for (int64_t k = 0; k < x->num_words && masked < most; k++) {
        int64_t word = x->order[k], words = mt_min(numpy_geometric(random, SPAN_STOPS), LONGEST_SPAN);
        int64_t first = x->words[word], count = 0;
        bool is_free = true;
        for (; words > 0; words--) {
            count = x->words[mt_min(word + words, x->num_words)] - first;
            if (masked + (double)count <= most) break;
        }
        for (int64_t i = first; i < first + count; i++) is_free &= !x->is_masked[i];
        if (words == 0 || !is_free) continue;
        memset(x->is_masked + first, true, (size_t)count);
        x->span_at[first] = count, masked += (double)count;
    }
}

/* Writes inputs and targets as mt_t5_sample_of reads them. */
static int write_sample(const t5_dataset *d, const masked *x, int64_t index, int32_t *numbers, mt_error *error) {
    const mt_span_masking *masking = d->masking;
    int64_t num_inputs = 0, num_targets = 1, spans = 0;
    int32_t *inputs = numbers + 2, *targets = inputs + masking->input_length;
    targets[0] = 0;
    for (int64_t i = 0; i < x->count; i++) {
        int64_t length = x->span_at[i];
        if (length == 0) {
            inputs[num_inputs++] = x->tokens[i];
            continue;
        }
        if (spans == masking->num_sentinels)
            return mt_error_set(error,
                                "%s: sample %lld has more than %lld masked spans, the number of sentinels; give more "
                                "--vocab-extra-ids, or a smaller --mask-prob or --encoder-seq-length",
                                mt_indexed_dataset_prefix(d->indexed), (long long)index,
                                (long long)masking->num_sentinels);
        if (num_targets + 1 + length > d->target_length)
            return mt_error_set(error,
                                "%s: the masked spans of sample %lld are longer than --decoder-seq-length %lld; raise "
                                "it, or lower --mask-prob or --encoder-seq-length",
                                mt_indexed_dataset_prefix(d->indexed), (long long)index, (long long)d->target_length);
        inputs[num_inputs++] = targets[num_targets++] = masking->sentinels[spans++];
        memcpy(targets + num_targets, x->tokens + i, (size_t)length * 4);
        num_targets += length, i += length - 1;
    }
    targets[num_targets] = (int32_t)d->end_id;
    numbers[0] = (int32_t)num_inputs, numbers[1] = (int32_t)num_targets;
    memmove(inputs + num_inputs, targets, (size_t)(num_targets + 1) * 4);
    return 0;
}

mt_t5_sample mt_t5_sample_of(const int32_t *numbers) {
    return (mt_t5_sample){numbers[0], numbers[1], numbers + 2, numbers + 2 + numbers[0]};
}

/* Numbers of a sample, less one: see mt_dataset.seq_length. */
static int64_t sample_numbers(const mt_data_config *config) {
    return 2 + config->spans->input_length + config->seq_length;
}

static int read_tokens(const t5_dataset *d, const sentences *s, masked *x, mt_error *error) {
    if (mt_indexed_dataset_check(d->indexed, error) != 0) return -1;
    for (int64_t i = s->first; i < s->end && x->count < s->length; i++) {
        int64_t count = mt_min(mt_indexed_dataset_length(d->indexed, i), s->length - x->count);
        if (mt_indexed_dataset_get(d->indexed, i, 0, count, d->vocab_size, x->tokens + x->count, error) != 0) return -1;
        x->count += count;
    }
    return 0;
}

static int t5_dataset_get(const mt_dataset *base, int64_t index, int32_t *numbers, mt_error *error) {
    const t5_dataset *d = (const t5_dataset *)base;
    const sentences *s = &d->samples[index];
    mt_arena arena = {0};
    mt_mt19937 random;
    masked x = {0};
    for (int pass = 0; pass < 2; pass++) { // the first pass counts
        x.words = mt_arena_alloc(&arena, (s->length + 1) * 8), x.span_at = mt_arena_alloc(&arena, s->length * 8);
        x.tokens = mt_arena_alloc(&arena, s->length * 4), x.order = mt_arena_alloc(&arena, s->length * 4);
        x.is_masked = mt_arena_alloc(&arena, s->length);
        if (pass == 0) arena = (mt_arena){.base = mt_calloc(arena.used), .capacity = arena.used};
    }
    int status = read_tokens(d, s, &x, error);
    if (status == 0) {
        double share = d->masking->mask_prob, rounded = fmax(1, nearbyint((double)x.count * share)); // half to even
        mt_mt19937_seed(&random, (uint32_t)(d->seed + index));
        divide_words(&x, d->masking);
        mask_spans(&x, &random, fmin(share * (double)s->length, rounded));
        status = write_sample(d, &x, index, numbers, error);
    }
    free(arena.base);
    return status;
}

static void t5_dataset_free(mt_dataset *base) {
    free(((t5_dataset *)base)->samples);
    free(base);
}

int mt_t5_dataset_create(mt_dataset **out, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                         int64_t num_samples, const mt_data_config *config, mt_error *error) {
    const mt_span_masking *masking = config->spans;
    *out = NULL;
    if (masking->input_length < 4)
        return mt_error_set(error, "--encoder-seq-length %lld: samples with masked spans need 4 or more",
                            (long long)masking->input_length);
    t5_dataset *d = mt_calloc(sizeof *d);
    // while samples are ordered, seq_length is the most tokens of a sample: Megatron leaves room for two more
    d->base = (mt_dataset){.seq_length = masking->input_length - 2, .get = t5_dataset_get, .free = t5_dataset_free};
    d->indexed = indexed, d->masking = masking, d->vocab_size = config->vocab_size, d->seed = config->seed;
    d->end_id = config->eod_id, d->target_length = config->seq_length;
    if (order_samples(d, begin, end, num_samples, error) != 0) {
        t5_dataset_free(&d->base);
        return -1;
    }
    d->base.num_documents = end - begin, d->base.seq_length = sample_numbers(config);
    for (int64_t i = first_sentence(indexed, begin); i < first_sentence(indexed, end); i++)
        d->base.num_tokens += mt_indexed_dataset_length(indexed, i);
    *out = &d->base;
    return 0;
}

int64_t mt_t5_dataset_epoch(const mt_dataset *base) {
    return base->get == t5_dataset_get ? ((const t5_dataset *)base)->epoch : 0;
}

const char *mt_t5_dataset_prefix(const mt_dataset *base) {
    return base->get == t5_dataset_get ? mt_indexed_dataset_prefix(((const t5_dataset *)base)->indexed) : NULL;
}

/* ---- mock data --------------------------------------------------------------------------------------------------- */

typedef struct mock_dataset {
    mt_dataset base;
    int64_t vocab_size, input_length, target_length, end_id;
    uint64_t key;
} mock_dataset;

/* Lengths and first token are functions of the seed and the index. */
static int mock_dataset_get(const mt_dataset *base, int64_t index, int32_t *numbers, mt_error *error) {
    (void)error;
    const mock_dataset *d = (const mock_dataset *)base;
    uint32_t word[4];
    mt_philox(word, d->key, (uint64_t)index, 0);
    int64_t num_inputs = 1 + word[0] % d->input_length, copied = mt_min(num_inputs, d->target_length - 1);
    int32_t *inputs = numbers + 2, *targets = inputs + num_inputs;
    for (int64_t i = 0; i < num_inputs; i++) inputs[i] = (int32_t)((word[1] + (uint64_t)i) % (uint64_t)d->vocab_size);
    targets[0] = 0;
    for (int64_t i = 0; i < copied; i++) targets[1 + i] = inputs[num_inputs - 1 - i];
    targets[1 + copied] = (int32_t)mt_max(d->end_id, 0);
    numbers[0] = (int32_t)num_inputs, numbers[1] = (int32_t)copied + 1;
    return 0;
}

static void mock_dataset_free(mt_dataset *base) {
    free(base);
}

mt_dataset *mt_t5_mock_create(const mt_data_config *config, mt_split split) {
    mock_dataset *d = mt_calloc(sizeof *d);
    d->base = (mt_dataset){.num_samples = config->sizes[split],
                           .seq_length = sample_numbers(config),
                           .get = mock_dataset_get,
                           .free = mock_dataset_free};
    d->vocab_size = config->vocab_size, d->end_id = config->eod_id < config->vocab_size ? config->eod_id : -1;
    d->input_length = config->spans->input_length, d->target_length = config->seq_length;
    d->key = mt_random_key((uint64_t)config->seed, UINT64_C(0x6d6f636b), (uint64_t)split); // "mock"
    return &d->base;
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

/* The tokens <extra_id_0>, <extra_id_1> ... of a tokenizer, at most `most` of them, if that is not 0. */
static void find_sentinels(mt_span_masking *masking, const mt_tokenizer *tokenizer, int64_t most) {
    char name[40];
    for (int64_t i = 0; most == 0 || i < most; i++) {
        int32_t id = mt_tokenizer_find(tokenizer, name, snprintf(name, sizeof name, "<extra_id_%lld>", (long long)i));
        if (id < 0) return;
        masking->sentinels = mt_realloc(masking->sentinels, (i + 1) * 4);
        masking->sentinels[i] = id, masking->num_sentinels = i + 1;
    }
}

static void find_words(mt_span_masking *masking, const mt_tokenizer *tokenizer, int64_t vocab_size) {
    masking->continues = mt_calloc(vocab_size);
    for (int64_t id = 0; id < mt_min(mt_tokenizer_vocab_size(tokenizer), vocab_size); id++) {
        const mt_token *token = &tokenizer->tokens[id];
        bool has_text = token->type != MT_TOKEN_UNUSED && token->text_bytes >= 2;
        masking->continues[id] = has_text && memcmp(mt_token_text(tokenizer, (int32_t)id), "##", 2) == 0;
    }
}

int mt_span_masking_open(mt_span_masking **out, const mt_run_options *o, const mt_tokenizer *tokenizer,
                         mt_error *error) {
    int64_t vocab_size = o->stack.vocab_size, extra = o->vocab_extra_ids;
    int64_t first = tokenizer ? mt_tokenizer_vocab_size(tokenizer) : vocab_size - extra;
    mt_span_masking *masking = mt_calloc(sizeof *masking);
    *out = masking;
    masking->mask_prob = o->mask_prob, masking->short_seq_prob = o->short_seq_prob;
    masking->input_length = o->stack.encoder_seq_length;
    if (o->mock_data) return 0;
    if (tokenizer) find_sentinels(masking, tokenizer, extra);
    if (tokenizer) find_words(masking, tokenizer, vocab_size);
    if (masking->num_sentinels > 0) return 0;
    if (extra > 0 && first >= 0 && first + extra <= vocab_size) {
        masking->sentinels = mt_malloc(extra * 4), masking->num_sentinels = extra;
        for (int64_t i = 0; i < extra; i++) masking->sentinels[i] = (int32_t)(first + i);
        return 0;
    }
    mt_span_masking_free(masking);
    *out = NULL;
    if (extra > 0)
        return mt_error_set(error,
                            "--vocab-extra-ids %lld: the vocabulary of %lld tokens has no room for as many behind the "
                            "%lld of the text; raise --vocab-size",
                            (long long)extra, (long long)vocab_size, (long long)mt_max(first, 0));
    return mt_error_set(error,
                        "the data have no sentinels for masked spans: give --vocab-extra-ids 100, or a tokenizer "
                        "that has <extra_id_0>; pairs of texts are trained on with --sft");
}

void mt_span_masking_free(mt_span_masking *masking) {
    if (!masking) return;
    free(masking->sentinels), free(masking->continues);
    free(masking);
}
