/* tokenizer_sentencepiece.c: SentencePiece models (Kudo and Richardson 2018), BPE and unigram. The file is one protobuf
 * message, sentencepiece_model.proto's ModelProto; only what encoding and decoding need is read. Normalization and
 * segmentation follow sentencepiece's normalizer.cc, bpe_model.cc and unigram_model.cc step by step, since ids must
 * agree. */
#include "tokenizer_internal.h"

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

/* Reads the next field: 1, or 0 at the end of the message, or -1 if it is damaged. */
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

/* precompiled_charsmap: the size of a double array (uint32), its units, then the strings that its values point at. */
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

/* Byte pieces are called <0x00> to <0xFF>; all of them must be there, or none. */
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

/* Gives every piece its surface: the space symbol as a space, control pieces nothing, byte pieces their byte. */
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

/* Builds what encoding looks up, and finds the special pieces. */
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
        if (token->type == MT_TOKEN_USER_DEFINED) mt_trie_insert(&tokenizer->user_defined, text, token->text_bytes, id);
        bool from_text = token->type == MT_TOKEN_NORMAL || token->type == MT_TOKEN_USER_DEFINED;
        if (from_text && tokenizer->kind == MT_KIND_UNIGRAM)
            mt_trie_insert(&tokenizer->pieces, text, token->text_bytes, id);
        if (token->type != MT_TOKEN_NORMAL) continue;
        if (token->score < tokenizer->min_score) tokenizer->min_score = token->score;
        if (token->score > tokenizer->max_score) tokenizer->max_score = token->score;
    }
    if (tokenizer->unknown < 0) return mt_error_set(l->error, "%s: has no unknown piece", l->path);
    if (find_byte_pieces(l)) return -1;
    set_surfaces(l);
    mt_bpe_find_words(tokenizer);
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
    if (!load_model(&l, model)) return 0;
    mt_error_one_line(error);
    return -1;
}

/* ---- normalization --------------------------------------------------------------------------------------------- */

/* The longest rule of the charsmap that the text begins with: its length (0 if none) and its replacement. The units are
 * those of Darts-clone (Yata): bit 8 says that a leaf follows, the low byte is the label, the high bits an offset that
 * is XORed to the position. Every position is checked, since the file may be damaged. */
static int64_t charsmap_find(const mt_sentencepiece_rules *rules, const char *text, int64_t bytes, const char **out) {
    if (!rules->unit_count) return 0;
    int64_t longest = 0, results = 0;
    uint32_t at = 0, unit = rules->units[0];
    for (int64_t i = 0; i < bytes && results < 32; i++) { // sentencepiece keeps 32 results
        at ^= (unit >> 10) << ((unit & 0x200) >> 6);
        at ^= (unsigned char)text[i];
        if (at >= rules->unit_count) break;
        unit = rules->units[at];
        if ((unit & 0x800000FFu) != (unsigned char)text[i]) break;
        if (!(unit & 0x100)) continue;
        uint32_t leaf = at ^ ((unit >> 10) << ((unit & 0x200) >> 6));
        if (leaf >= rules->unit_count) break;
        uint32_t value = rules->units[leaf] & 0x7FFFFFFFu;
        if (value >= rules->replacement_bytes) break;
        *out = rules->replacements + value;
        longest = i + 1;
        results++;
    }
    return longest;
}

/* Normalizes the longest prefix that a rule covers, or one character; returns its length. */
static int64_t normalize_prefix(const mt_tokenizer *tokenizer, const char *text, int64_t bytes, const char **out,
                                int64_t *out_bytes) {
    int32_t ignored;
    int64_t length = mt_trie_longest(&tokenizer->user_defined, text, bytes, &ignored);
    *out = text;
    *out_bytes = length;
    if (length) return length;
    length = charsmap_find(&tokenizer->rules, text, bytes, out);
    if (length) {
        *out_bytes = (int64_t)strlen(*out);
        return length;
    }
    uint32_t codepoint;
    length = mt_utf8_decode(text, bytes, &codepoint);
    *out = length ? text : "\xEF\xBF\xBD";
    *out_bytes = length ? length : 3;
    return length ? length : 1;
}

static void append_spaced(const mt_tokenizer *tokenizer, mt_text *out, const char *text, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) {
        if (text[i] == ' ' && tokenizer->rules.escape_whitespaces)
            mt_text_append(out, MT_SPACE_SYMBOL, 3);
        else
            mt_text_append(out, text + i, 1);
    }
}

static void normalize(const mt_tokenizer *tokenizer, mt_text *out, const char *text, int64_t bytes) {
    const mt_sentencepiece_rules *rules = &tokenizer->rules;
    const char *part, *end = text + bytes;
    int64_t part_bytes;
    out->bytes = 0;
    while (rules->remove_extra_whitespaces && text < end) {
        int64_t length = normalize_prefix(tokenizer, text, end - text, &part, &part_bytes);
        if (part_bytes != 1 || *part != ' ') break;
        text += length;
    }
    if (text == end) return;
    bool after_space = rules->remove_extra_whitespaces;
    if (rules->add_dummy_prefix && !rules->whitespace_as_suffix) append_spaced(tokenizer, out, " ", 1);
    while (text < end) {
        text += normalize_prefix(tokenizer, text, end - text, &part, &part_bytes);
        for (; after_space && part_bytes && *part == ' '; part++) part_bytes--;
        append_spaced(tokenizer, out, part, part_bytes);
        if (part_bytes) after_space = part[part_bytes - 1] == ' ';
        if (!rules->remove_extra_whitespaces) after_space = false;
    }
    const char *space = rules->escape_whitespaces ? MT_SPACE_SYMBOL : " ";
    int64_t space_bytes = (int64_t)strlen(space);
    while (rules->remove_extra_whitespaces && out->bytes >= space_bytes &&
           !memcmp(out->data + out->bytes - space_bytes, space, (size_t)space_bytes))
        out->bytes -= space_bytes;
    if (rules->add_dummy_prefix && rules->whitespace_as_suffix) append_spaced(tokenizer, out, " ", 1);
}

/* ---- segmentation ---------------------------------------------------------------------------------------------- */

/* The bytes of the character, as its first byte claims, like sentencepiece's OneCharLen. */
static int64_t one_character(const char *text, int64_t bytes) {
    int64_t length = "\1\1\1\1\1\1\1\1\1\1\1\1\2\2\3\4"[(unsigned char)*text >> 4];
    return length < bytes ? length : bytes;
}

/* Appends a piece of the segmentation. An unknown one becomes its bytes, or one unknown token for a run of them. */
static void push_piece(const mt_tokenizer *tokenizer, const char *piece, int64_t bytes, int32_t id, bool *after_unknown,
                       mt_ids *ids) {
    bool unknown = id == tokenizer->unknown;
    if (unknown && tokenizer->byte_fallback) {
        for (int64_t i = 0; i < bytes; i++) mt_ids_push(ids, tokenizer->byte_ids[(unsigned char)piece[i]]);
    } else if (!unknown || !*after_unknown) {
        mt_ids_push(ids, id);
    }
    *after_unknown = unknown;
}

/* Splits an UNUSED piece into the two that it was merged from, and those again, until all may be used. */
static void push_resegmented(const mt_encoder *encoder, const char *piece, int64_t bytes, bool *after_unknown,
                             mt_ids *ids) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    int32_t id = mt_token_find(tokenizer, piece, bytes);
    if (id < 0) id = tokenizer->unknown;
    int32_t left = tokenizer->tokens[id].type == MT_TOKEN_UNUSED ? encoder->split_at[id] : 0;
    if (!left) {
        push_piece(tokenizer, piece, bytes, id, after_unknown, ids);
        return;
    }
    push_resegmented(encoder, piece, left, after_unknown, ids);
    push_resegmented(encoder, piece + left, bytes - left, after_unknown, ids);
}

void mt_sentencepiece_encode_word(mt_encoder *encoder, const char *text, int32_t bytes, mt_ids *ids) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    mt_symbol *symbols = mt_symbols_reserve(encoder, bytes);
    int32_t count = 0, ignored;
    for (int32_t at = 0; at < bytes; count++) {
        int64_t defined = mt_trie_longest(&tokenizer->user_defined, text + at, bytes - at, &ignored);
        int32_t length = (int32_t)(defined ? defined : one_character(text + at, bytes - at));
        symbols[count] = (mt_symbol){count - 1, count + 1, at, length, -1, defined > 0};
        at += length;
    }
    symbols[count - 1].next = -1;
    if (tokenizer->has_unused) memset(encoder->split_at, 0, (size_t)tokenizer->vocab_size * sizeof *encoder->split_at);
    mt_bpe_merge(encoder, text, count);
    bool after_unknown = false;
    for (int32_t at = 0; at >= 0; at = symbols[at].next)
        push_resegmented(encoder, text + symbols[at].start, symbols[at].bytes, &after_unknown, ids);
}

/* A path to `end` from `start` by a token: kept if it is the first or the best so far. */
static void offer_path(mt_path_node *path, int64_t start, int64_t end, int32_t id, float score) {
    if (path[end].start >= 0 && score <= path[end].score) return;
    path[end] = (mt_path_node){score, (int32_t)start, -1, id};
}

/* Extends the best path to `start` by every piece that begins there, or by an unknown character if none is as long as
 * one. Returns the furthest position that is reached. */
static int64_t extend_paths(const mt_tokenizer *tokenizer, mt_path_node *path, const char *text, int64_t bytes,
                            int64_t start) {
    const mt_trie *pieces = &tokenizer->pieces;
    int64_t character = one_character(text + start, bytes - start), furthest = start + character;
    bool single = false;
    int64_t node = pieces->count ? 0 : -1;
    for (int64_t end = start; end < bytes && node >= 0;) {
        node = mt_trie_step(pieces, node, text[end++]);
        if (node < 0 || pieces->values[node] < 0) continue;
        const mt_token *token = &tokenizer->tokens[pieces->values[node]];
        float score = token->score;
        if (token->type == MT_TOKEN_USER_DEFINED) score = (float)(end - start) * tokenizer->max_score - 0.1f;
        offer_path(path, start, end, pieces->values[node], score + path[start].score);
        if (end - start == character) single = true;
        if (end > furthest) furthest = end;
    }
    float unknown_score = tokenizer->min_score - 10.0f;
    if (!single) offer_path(path, start, start + character, tokenizer->unknown, unknown_score + path[start].score);
    return furthest;
}

/* Viterbi over the characters. Sums are float, and brought back to zero when they pass -100000, as sentencepiece 0.2
 * does, so that near ties fall the same way in texts of any length. */
static void encode_unigram(mt_encoder *encoder, const char *text, int32_t bytes, mt_ids *ids) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    if (bytes + 1 > encoder->path_capacity) {
        encoder->path_capacity = 2 * ((int64_t)bytes + 1);
        encoder->path = mt_realloc(encoder->path, encoder->path_capacity * (int64_t)sizeof *encoder->path);
    }
    mt_path_node *path = encoder->path;
    for (int32_t i = 0; i <= bytes; i++) path[i] = (mt_path_node){0, -1, -1, -1};
    int64_t furthest = 0;
    for (int64_t start = 0; start < bytes; start += one_character(text + start, bytes - start)) {
        float base = path[start].score;
        for (int64_t i = start; base < -100000.0f && i <= furthest; i++)
            if (path[i].start >= 0) path[i].score -= base;
        int64_t reached = extend_paths(tokenizer, path, text, bytes, start);
        if (reached > furthest) furthest = reached;
    }
    for (int32_t end = bytes; end > 0; end = path[end].start) path[path[end].start].next = end;
    bool after_unknown = false;
    for (int32_t at = 0, end; at < bytes; at = end) {
        end = path[at].next;
        push_piece(tokenizer, text + at, end - at, path[end].id, &after_unknown, ids);
    }
}

int mt_sentencepiece_encode(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    mt_text *normal = &encoder->normalized[0];
    normalize(encoder->tokenizer, normal, text, bytes);
    if (encoder->tokenizer->kind == MT_KIND_SENTENCEPIECE_BPE)
        return mt_bpe_encode(encoder, normal->data, normal->bytes, ids, error);
    if (normal->bytes > INT32_MAX / 2)
        return mt_error_set(error, "%s: a text of %lld bytes is too long; split it", encoder->tokenizer->path,
                            (long long)normal->bytes);
    if (normal->bytes) encode_unigram(encoder, normal->data, (int32_t)normal->bytes, ids);
    return 0;
}
