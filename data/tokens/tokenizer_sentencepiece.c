/* tokenizer_sentencepiece.c: reads SentencePiece models (Kudo and Richardson 2018), BPE and unigram. The file is one
 * protobuf message, sentencepiece_model.proto's ModelProto; only the fields for encoding and decoding are read. */
#include "tokenizer_sentencepiece.h"

#include "tokenizer_encode.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- protobuf -------------------------------------------------------------------------------------------------- */

/* One field of a message: a number (varint or fixed) or bytes, by wire type. */
typedef struct field {
    uint64_t number;
    int wire;
    uint64_t value;
    const char *data;
    int64_t bytes;
} field;

typedef struct reader {
    const char *at, *end;
} reader;

static bool read_varint(reader *r, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 64 && r->at < r->end; shift += 7) {
        unsigned char byte = (unsigned char)*r->at++;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

/* Reads the next field: 1; 0 at the end of the message; -1 if it is damaged. */
static int read_field(reader *r, field *f) {
    uint64_t key;
    *f = (field){0};
    if (r->at == r->end) return 0;
    if (!read_varint(r, &key)) return -1;
    f->number = key >> 3;
    f->wire = (int)(key & 7);
    if (f->wire == 0) return read_varint(r, &f->value) ? 1 : -1;
    uint64_t bytes = f->wire == 1 ? 8 : 4;
    if (f->wire == 2 ? !read_varint(r, &bytes) : f->wire != 1 && f->wire != 5) return -1;
    if (bytes > (uint64_t)(r->end - r->at)) return -1;
    f->data = r->at;
    f->bytes = (int64_t)bytes;
    r->at += bytes;
    if (f->wire != 2)
        for (int64_t i = f->bytes - 1; i >= 0; i--) f->value = f->value << 8 | (unsigned char)f->data[i];
    return 1;
}

static float field_float(const field *f) {
    uint32_t bits = (uint32_t)f->value;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- the model file -------------------------------------------------------------------------------------------- */

typedef struct loader {
    mt_tokenizer *tokenizer;
    mt_error *error;
    const char *path;
    uint64_t model_type; // 1 unigram, 2 BPE
    bool byte_fallback;
    mt_text bos, eos, unknown_surface; // borrowed from the file
} loader;

static int damaged(const loader *l, const char *part) {
    return mt_error_set(l->error, "%s: not a SentencePiece model, or damaged: %s cannot be read; fetch the file again",
                        l->path, part);
}

static int read_piece(loader *l, const field *message) {
    reader r = {message->data, message->data + message->bytes};
    field f, text = {0};
    float score = 0;
    uint64_t type = MT_TOKEN_NORMAL;
    int more;
    while ((more = read_field(&r, &f)) > 0) {
        if (f.number == 1 && f.wire == 2) text = f;
        if (f.number == 2 && f.wire == 5) score = field_float(&f);
        if (f.number == 3 && f.wire == 0) type = f.value;
    }
    int64_t id = l->tokenizer->vocab_size;
    if (more < 0 || type < MT_TOKEN_NORMAL || type > MT_TOKEN_BYTE || !text.bytes || !isfinite(score))
        return mt_error_set(l->error, "%s: piece %lld is damaged; fetch the file again", l->path, (long long)id);
    if (mt_token_add(l->tokenizer, id, text.data, text.bytes, (mt_token_type)type, l->error)) return -1;
    l->tokenizer->tokens[id].score = score;
    if (mt_token_index(l->tokenizer, (int32_t)id) != id)
        return mt_error_set(l->error, "%s: piece '%.*s' is defined twice", l->path,
                            (int)(text.bytes < 100 ? text.bytes : 100), text.data);
    return 0;
}

static int read_trainer(loader *l, const field *message) {
    reader r = {message->data, message->data + message->bytes};
    field f;
    int more;
    while ((more = read_field(&r, &f)) > 0) {
        mt_text value = {(char *)f.data, f.bytes, 0};
        if (f.number == 3 && f.wire == 0) l->model_type = f.value;
        if (f.number == 24 && f.wire == 0) l->tokenizer->rules.whitespace_as_suffix = f.value != 0;
        if (f.number == 35 && f.wire == 0) l->byte_fallback = f.value != 0;
        if (f.number == 44 && f.wire == 2) l->unknown_surface = value;
        if (f.number == 46 && f.wire == 2) l->bos = value;
        if (f.number == 47 && f.wire == 2) l->eos = value;
    }
    return more < 0 ? damaged(l, "trainer_spec") : 0;
}

/* precompiled_charsmap: bytes of a double array (uint32), its units, then the strings that its values point at. */
static int read_charsmap(loader *l, const field *f) {
    mt_sentencepiece_rules *rules = &l->tokenizer->rules;
    if (!f->bytes) return 0;
    const unsigned char *b = (const unsigned char *)f->data;
    if (rules->units || f->bytes <= 4) return damaged(l, "precompiled_charsmap");
    int64_t size = (int64_t)b[0] | (int64_t)b[1] << 8 | (int64_t)b[2] << 16 | (int64_t)b[3] << 24;
    if (size % 4 || size < 4 || size >= f->bytes - 4) return damaged(l, "precompiled_charsmap");
    rules->unit_count = size / 4;
    rules->units = mt_malloc(size);
    for (int64_t i = 0; i < rules->unit_count; i++) {
        const unsigned char *u = b + 4 + 4 * i;
        rules->units[i] = (uint32_t)u[0] | (uint32_t)u[1] << 8 | (uint32_t)u[2] << 16 | (uint32_t)u[3] << 24;
    }
    rules->replacement_bytes = f->bytes - 4 - size;
    rules->replacements = mt_malloc(rules->replacement_bytes + 1);
    memcpy(rules->replacements, b + 4 + size, (size_t)rules->replacement_bytes);
    rules->replacements[rules->replacement_bytes] = 0;
    return 0;
}

static int read_normalizer(loader *l, const field *message) {
    mt_sentencepiece_rules *rules = &l->tokenizer->rules;
    reader r = {message->data, message->data + message->bytes};
    field f;
    int more;
    while ((more = read_field(&r, &f)) > 0) {
        if (f.number == 2 && f.wire == 2 && read_charsmap(l, &f)) return -1;
        if (f.number == 3 && f.wire == 0) rules->add_dummy_prefix = f.value != 0;
        if (f.number == 4 && f.wire == 0) rules->remove_extra_whitespaces = f.value != 0;
        if (f.number == 5 && f.wire == 0) rules->escape_whitespaces = f.value != 0;
    }
    return more < 0 ? damaged(l, "normalizer_spec") : 0;
}

static int refuse_denormalizer(loader *l, const field *message) {
    reader r = {message->data, message->data + message->bytes};
    field f;
    int more;
    while ((more = read_field(&r, &f)) > 0)
        if (f.number == 2 && f.bytes)
            return mt_error_set(l->error, "%s: a denormalizer_spec with rules of its own is not supported", l->path);
    return more < 0 ? damaged(l, "denormalizer_spec") : 0;
}

/* Byte pieces are named <0x00> to <0xFF>; the model has all of them or none. */
static int find_byte_pieces(loader *l) {
    mt_tokenizer *tokenizer = l->tokenizer;
    int64_t found = 0;
    for (int64_t id = 0; id < tokenizer->vocab_size; id++) found += tokenizer->tokens[id].type == MT_TOKEN_BYTE;
    if (!l->byte_fallback)
        return found ? mt_error_set(l->error, "%s: has byte pieces although byte_fallback is off", l->path) : 0;
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", byte);
        int32_t id = mt_token_find(tokenizer, name, 6);
        if (id < 0 || tokenizer->tokens[id].type != MT_TOKEN_BYTE || found != 256)
            return mt_error_set(l->error,
                                "%s: byte_fallback needs the 256 byte pieces <0x00> to <0xFF>, and %s is missing "
                                "or of another type",
                                l->path, name);
        tokenizer->byte_ids[byte] = id;
    }
    tokenizer->byte_fallback = true;
    return 0;
}

/* Surfaces: the space symbol becomes a space, a byte piece its byte, a control piece nothing. */
static void set_surfaces(loader *l) {
    mt_tokenizer *tokenizer = l->tokenizer;
    for (int64_t id = 0; id < tokenizer->vocab_size; id++) {
        mt_token *token = &tokenizer->tokens[id];
        mt_text surface = {0};
        const char *text = tokenizer->strings.data + token->text;
        if (token->type == MT_TOKEN_UNKNOWN) {
            mt_text_append(&surface, l->unknown_surface.data, l->unknown_surface.bytes);
        } else if (token->type == MT_TOKEN_BYTE) {
            char byte = (char)strtol((char[]){text[3], text[4], 0}, NULL, 16);
            mt_text_append(&surface, &byte, 1);
        } else if (token->type != MT_TOKEN_CONTROL) {
            for (int32_t i = 0; i < token->text_bytes; i++) {
                bool space = token->text_bytes - i >= 3 && !memcmp(text + i, MT_SPACE_SYMBOL, 3);
                mt_text_append(&surface, space ? " " : text + i, 1);
                if (space) i += 2;
            }
        }
        token->surface = tokenizer->strings.bytes;
        token->surface_bytes = (int32_t)surface.bytes;
        mt_text_append(&tokenizer->strings, surface.data, surface.bytes);
        free(surface.data);
    }
}

/* Builds the tables for encoding and finds the special pieces. */
static int finish(loader *l) {
    mt_tokenizer *tokenizer = l->tokenizer;
    if (l->model_type != 1 && l->model_type != 2)
        return mt_error_set(l->error, "%s: SentencePiece models of type %s are not supported; BPE and unigram are",
                            l->path,
                            l->model_type == 3   ? "word"
                            : l->model_type == 4 ? "char"
                                                 : "unknown");
    tokenizer->kind = l->model_type == 1 ? MT_KIND_UNIGRAM : MT_KIND_SENTENCEPIECE_BPE;
    tokenizer->join = MT_JOIN_SENTENCEPIECE;
    tokenizer->min_score = FLT_MAX;
    tokenizer->max_score = FLT_MIN; // as in unigram_model.cc
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        const mt_token *token = &tokenizer->tokens[id];
        const char *text = mt_token_text(tokenizer, id);
        if (token->type == MT_TOKEN_UNKNOWN && tokenizer->unknown >= 0)
            return mt_error_set(l->error, "%s: has two unknown pieces, %d and %d", l->path, tokenizer->unknown, id);
        if (token->type == MT_TOKEN_UNKNOWN) tokenizer->unknown = id;
        if (token->type == MT_TOKEN_UNUSED) tokenizer->has_unused = true;
        bool is_user_defined = token->type == MT_TOKEN_USER_DEFINED;
        mt_trie *const tries[] = {is_user_defined ? &tokenizer->user_defined : NULL,
                                  (token->type == MT_TOKEN_NORMAL || is_user_defined) &&
                                          tokenizer->kind == MT_KIND_UNIGRAM
                                      ? &tokenizer->pieces
                                      : NULL};
        for (int i = 0; i < 2; i++)
            if (tries[i] && mt_trie_add(tries[i], l->path, text, token->text_bytes, id, l->error) != 0) return -1;
        if (token->type != MT_TOKEN_NORMAL) continue;
        if (token->score < tokenizer->min_score) tokenizer->min_score = token->score;
        if (token->score > tokenizer->max_score) tokenizer->max_score = token->score;
    }
    if (tokenizer->unknown < 0) return mt_error_set(l->error, "%s: has no unknown piece", l->path);
    if (find_byte_pieces(l)) return -1;
    set_surfaces(l);
    mt_tokenizer_find_words(tokenizer);
    tokenizer->bos = mt_token_find(tokenizer, l->bos.data, l->bos.bytes);
    tokenizer->eod = mt_token_find(tokenizer, l->eos.data, l->eos.bytes);
    return 0;
}

static int load_model(loader *l, const mt_text *model) {
    reader r = {model->data, model->data + model->bytes};
    field f;
    int more;
    while ((more = read_field(&r, &f)) > 0) {
        int failed = 0;
        if (f.number >= 1 && f.number <= 5 && f.wire != 2) return damaged(l, "a field");
        if (f.number == 1) failed = read_piece(l, &f);
        if (f.number == 2) failed = read_trainer(l, &f);
        if (f.number == 3) failed = read_normalizer(l, &f);
        if (f.number == 5) failed = refuse_denormalizer(l, &f);
        if (failed) return -1;
    }
    if (more < 0 || !l->tokenizer->vocab_size) return damaged(l, "the file");
    return finish(l);
}

int mt_tokenizer_load_sentencepiece(mt_tokenizer *tokenizer, const char *path, const mt_text *model, mt_error *error) {
    loader l = {.tokenizer = tokenizer, .error = error, .path = path, .model_type = 1};
    l.bos = (mt_text){"<s>", 3, 0};
    l.eos = (mt_text){"</s>", 4, 0};
    l.unknown_surface = (mt_text){" \xE2\x81\x87 ", 5, 0};
    tokenizer->rules.add_dummy_prefix = true;
    tokenizer->rules.remove_extra_whitespaces = true;
    tokenizer->rules.escape_whitespaces = true;
    if (!model->bytes) return mt_error_set(error, "%s: is empty; fetch the file again", path);
    return load_model(&l, model);
}
