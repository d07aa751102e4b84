/* tokenizer_vocab.c: hash tables, the prefix tree, growable arrays, UTF-8 and the vocabulary of a tokenizer. */
#include "tokenizer_vocab.h"

#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

/* ---- hash tables ----------------------------------------------------------------------------------------------- */

/* Spreads every bit of the key over the result (the finalizer of splitmix64). */
static uint64_t mix(uint64_t key) {
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
}

uint64_t mt_hash(const char *text, int64_t bytes) {
    uint64_t hash = (uint64_t)bytes * 0x9E3779B97F4A7C15u, word;
    for (; bytes >= 8; text += 8, bytes -= 8) {
        memcpy(&word, text, 8);
        hash = mix(hash ^ word);
    }
    word = 0;
    if (bytes) memcpy(&word, text, (size_t)bytes);
    return mix(hash ^ word);
}

static struct mt_map_slot *map_slot(const mt_map *map, uint64_t key) {
    int64_t at = (int64_t)(mix(key) & (uint64_t)(map->capacity - 1));
    while (map->slots[at].key_plus_one && map->slots[at].key_plus_one != key + 1) at = (at + 1) & (map->capacity - 1);
    return &map->slots[at];
}

static void map_grow(mt_map *map) {
    mt_map larger = {.capacity = map->capacity ? 2 * map->capacity : 64, .count = map->count};
    larger.slots = mt_calloc(larger.capacity * (int64_t)sizeof *larger.slots);
    for (int64_t i = 0; i < map->capacity; i++)
        if (map->slots[i].key_plus_one) *map_slot(&larger, map->slots[i].key_plus_one - 1) = map->slots[i];
    free(map->slots);
    *map = larger;
}

uint64_t *mt_map_find(const mt_map *map, uint64_t key) {
    if (!map->capacity) return NULL;
    struct mt_map_slot *slot = map_slot(map, key);
    return slot->key_plus_one ? &slot->value : NULL;
}

bool mt_map_insert(mt_map *map, uint64_t key, uint64_t value) {
    if (2 * (map->count + 1) > map->capacity) map_grow(map);
    struct mt_map_slot *slot = map_slot(map, key);
    if (slot->key_plus_one) return false;
    *slot = (struct mt_map_slot){key + 1, value};
    map->count++;
    return true;
}

/* ---- the prefix tree ------------------------------------------------------------------------------------------- */

static int64_t trie_new_node(mt_trie *trie) {
    if (trie->count == trie->capacity) {
        trie->capacity = trie->capacity ? 2 * trie->capacity : 64;
        trie->values = mt_realloc(trie->values, trie->capacity * (int64_t)sizeof *trie->values);
    }
    trie->values[trie->count] = -1;
    return trie->count++;
}

int64_t mt_trie_step(const mt_trie *trie, int64_t node, char byte) {
    uint64_t *child = mt_map_find(&trie->children, (uint64_t)node << 8 | (unsigned char)byte);
    return child ? (int64_t)*child : -1;
}

void mt_trie_insert(mt_trie *trie, const char *text, int64_t bytes, int32_t value) {
    if (!trie->count) trie_new_node(trie);
    int64_t node = 0;
    for (int64_t i = 0; i < bytes; i++) {
        int64_t child = mt_trie_step(trie, node, text[i]);
        if (child < 0) {
            child = trie_new_node(trie);
            mt_map_insert(&trie->children, (uint64_t)node << 8 | (unsigned char)text[i], (uint64_t)child);
        }
        node = child;
    }
    if (bytes) trie->starts[(unsigned char)text[0]] = true;
    trie->values[node] = value;
}

int mt_trie_add(mt_trie *trie, const char *path, const char *text, int64_t bytes, int32_t value, mt_error *error) {
    if (bytes > MT_MAX_SEARCHED_TOKEN)
        return mt_error_set(error,
                            "%s: token '%.20s...' has %lld bytes; a token that is looked for in the text has at "
                            "most %d",
                            path, text, (long long)bytes, MT_MAX_SEARCHED_TOKEN);
    mt_trie_insert(trie, text, bytes, value);
    return 0;
}

int64_t mt_trie_longest(const mt_trie *trie, const char *text, int64_t bytes, int32_t *value) {
    int64_t longest = 0;
    if (!bytes || !trie->starts[(unsigned char)text[0]]) return 0;
    int64_t node = 0;
    for (int64_t i = 0; i < bytes && (node = mt_trie_step(trie, node, text[i])) >= 0; i++) {
        if (trie->values[node] < 0) continue;
        longest = i + 1;
        *value = trie->values[node];
    }
    return longest;
}

void mt_trie_free(mt_trie *trie) {
    free(trie->children.slots);
    free(trie->values);
    *trie = (mt_trie){0};
}

/* ---- growable arrays ------------------------------------------------------------------------------------------- */

void mt_ids_push(mt_ids *ids, int32_t id) {
    if (ids->count == ids->capacity) {
        ids->capacity = ids->capacity ? 2 * ids->capacity : 256;
        ids->data = mt_realloc(ids->data, ids->capacity * (int64_t)sizeof *ids->data);
    }
    ids->data[ids->count++] = id;
}

void mt_text_reserve(mt_text *text, int64_t more) {
    if (text->bytes + more <= text->capacity) return;
    text->capacity = 2 * text->capacity > text->bytes + more ? 2 * text->capacity : text->bytes + more + 64;
    text->data = mt_realloc(text->data, text->capacity);
}

void mt_text_append(mt_text *text, const char *data, int64_t bytes) {
    if (!bytes) return;
    mt_text_reserve(text, bytes);
    memcpy(text->data + text->bytes, data, (size_t)bytes);
    text->bytes += bytes;
}

/* ---- UTF-8 ----------------------------------------------------------------------------------------------------- */

/* The Unicode Standard, table 3-7: the bytes that may follow each first byte. */
int mt_utf8_scan(const char *text, int64_t bytes, mt_utf8_state *state) {
    const unsigned char *b = (const unsigned char *)text;
    int need = b[0] < 0x80 ? 1 : b[0] < 0xC2 ? 0 : b[0] < 0xE0 ? 2 : b[0] < 0xF0 ? 3 : b[0] < 0xF5 ? 4 : 0;
    *state = need == 1 ? MT_UTF8_WHOLE : MT_UTF8_BAD;
    if (need < 2) return 1;
    unsigned low = b[0] == 0xE0 ? 0xA0 : b[0] == 0xF0 ? 0x90 : 0x80;
    unsigned high = b[0] == 0xED ? 0x9F : b[0] == 0xF4 ? 0x8F : 0xBF;
    int have = 1;
    for (; have < need && have < bytes && b[have] >= low && b[have] <= high; have++) {
        low = 0x80;
        high = 0xBF;
    }
    *state = have == need ? MT_UTF8_WHOLE : have == bytes ? MT_UTF8_CUT : MT_UTF8_BAD;
    return have;
}

int mt_utf8_decode(const char *text, int64_t bytes, uint32_t *codepoint) {
    mt_utf8_state state;
    int length = mt_utf8_scan(text, bytes, &state);
    if (state != MT_UTF8_WHOLE) return 0;
    static const unsigned char first_mask[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    *codepoint = (unsigned char)text[0] & first_mask[length];
    for (int i = 1; i < length; i++) *codepoint = *codepoint << 6 | ((unsigned char)text[i] & 0x3F);
    return length;
}

void mt_utf8_append(mt_text *text, uint32_t c) {
    char b[4];
    if (c < 0x80) {
        b[0] = (char)c;
        mt_text_append(text, b, 1);
        return;
    }
    int length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = length - 1; i > 0; i--, c >>= 6) b[i] = (char)(0x80 | (c & 0x3F));
    b[0] = (char)((0xF00 >> length) | c);
    mt_text_append(text, b, length);
}

bool mt_utf8_is_valid(const char *text, int64_t bytes) {
    int64_t at = 0;
    while (at < bytes) {
        uint64_t eight;
        if (at + 8 <= bytes && (memcpy(&eight, text + at, 8), !(eight & 0x8080808080808080u))) {
            at += 8;
            continue;
        }
        mt_utf8_state state;
        at += mt_utf8_scan(text + at, bytes - at, &state);
        if (state != MT_UTF8_WHOLE) return false;
    }
    return true;
}

void mt_utf8_repair(mt_text *out, const char *text, int64_t bytes) {
    for (int64_t at = 0; at < bytes;) {
        mt_utf8_state state;
        int length = mt_utf8_scan(text + at, bytes - at, &state);
        if (state == MT_UTF8_WHOLE)
            mt_text_append(out, text + at, length);
        else
            mt_utf8_append(out, 0xFFFD);
        at += length;
    }
}

bool mt_is_white_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* ---- the vocabulary -------------------------------------------------------------------------------------------- */

const char *mt_token_text(const mt_tokenizer *tokenizer, int32_t id) {
    return tokenizer->strings.data + tokenizer->tokens[id].text;
}

int mt_token_add(mt_tokenizer *tokenizer, int64_t id, const char *text, int64_t bytes, mt_token_type type,
                 mt_error *error) {
    if (id < 0 || id >= MT_MAX_VOCAB)
        return mt_error_set(error, "%s: token '%.*s' has id %lld; ids run from 0 to %d", tokenizer->path,
                            (int)(bytes < 60 ? bytes : 60), text, (long long)id, MT_MAX_VOCAB - 1);
    if (id >= tokenizer->token_capacity) {
        int64_t old = tokenizer->token_capacity, size = sizeof *tokenizer->tokens;
        tokenizer->token_capacity = 2 * id + 256;
        tokenizer->tokens = mt_realloc(tokenizer->tokens, tokenizer->token_capacity * size);
        memset(tokenizer->tokens + old, 0, (size_t)((tokenizer->token_capacity - old) * size));
    }
    mt_token *token = &tokenizer->tokens[id];
    if (token->type != MT_TOKEN_ABSENT)
        return mt_error_set(error, "%s: tokens '%.*s' and '%.*s' have the same id, %lld", tokenizer->path,
                            token->text_bytes < 60 ? token->text_bytes : 60, mt_token_text(tokenizer, (int32_t)id),
                            (int)(bytes < 60 ? bytes : 60), text, (long long)id);
    if (bytes > INT32_MAX / 2) return mt_error_set(error, "%s: token %lld is too long", tokenizer->path, (long long)id);
    int64_t at = tokenizer->strings.bytes;
    *token = (mt_token){.text = at, .surface = at, .text_bytes = (int32_t)bytes, .surface_bytes = (int32_t)bytes};
    token->type = (uint8_t)type;
    mt_text_append(&tokenizer->strings, text, bytes);
    if (id >= tokenizer->vocab_size) tokenizer->vocab_size = id + 1;
    return 0;
}

/* The slot of the token with this text, or the empty slot for it. */
static int32_t *lookup_slot(const mt_tokenizer *tokenizer, const char *text, int64_t bytes) {
    int64_t mask = tokenizer->lookup_capacity - 1, at = (int64_t)(mt_hash(text, bytes) & (uint64_t)mask);
    for (;; at = (at + 1) & mask) {
        int32_t id = tokenizer->lookup[at];
        if (id < 0) return &tokenizer->lookup[at];
        const mt_token *token = &tokenizer->tokens[id];
        if (token->text_bytes == bytes && !memcmp(tokenizer->strings.data + token->text, text, (size_t)bytes))
            return &tokenizer->lookup[at];
    }
}

static void lookup_grow(mt_tokenizer *tokenizer) {
    int32_t *old = tokenizer->lookup;
    int64_t old_capacity = tokenizer->lookup_capacity;
    tokenizer->lookup_capacity = old_capacity ? 2 * old_capacity : 1024;
    tokenizer->lookup = mt_malloc(tokenizer->lookup_capacity * (int64_t)sizeof *tokenizer->lookup);
    memset(tokenizer->lookup, -1, (size_t)tokenizer->lookup_capacity * sizeof *tokenizer->lookup);
    for (int64_t i = 0; i < old_capacity; i++)
        if (old[i] >= 0)
            *lookup_slot(tokenizer, mt_token_text(tokenizer, old[i]), tokenizer->tokens[old[i]].text_bytes) = old[i];
    free(old);
}

int32_t mt_token_index(mt_tokenizer *tokenizer, int32_t id) {
    if (2 * (tokenizer->lookup_count + 1) > tokenizer->lookup_capacity) lookup_grow(tokenizer);
    int32_t *slot = lookup_slot(tokenizer, mt_token_text(tokenizer, id), tokenizer->tokens[id].text_bytes);
    if (*slot >= 0) return *slot;
    tokenizer->lookup_count++;
    return *slot = id;
}

int32_t mt_token_find(const mt_tokenizer *tokenizer, const char *text, int64_t bytes) {
    return tokenizer->lookup_capacity ? *lookup_slot(tokenizer, text, bytes) : -1;
}
