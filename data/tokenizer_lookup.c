/* tokenizer_lookup.c: hash tables, the prefix tree, growable arrays and UTF-8 for the tokenizer. */
#include "tokenizer_internal.h"

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

/* The ranges of the Unicode Standard's table 3-7: what may follow each first byte. */
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
