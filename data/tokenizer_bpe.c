/* tokenizer_bpe.c: byte-pair encoding of one word (Sennrich et al. 2016, "Neural machine translation of rare words with
 * subword units"): begin with characters or bytes, and merge the best pair of neighbours until none may merge.
 *
 * A heap holds the pairs that may merge, so that a word of n symbols takes O(n log n), however long and hostile it is.
 * A pair in the heap may be stale, one of its sides having merged with another neighbour since: symbols only ever grow,
 * so it is current exactly if both sides are still there and together as long as they were. */
#include "tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

void mt_merge_add(mt_tokenizer *tokenizer, int32_t left, int32_t right, int32_t merged, int64_t rank) {
    uint64_t key = (uint64_t)left << 32 | (uint32_t)right, value = (uint64_t)rank << 32 | (uint32_t)merged;
    if (!mt_map_insert(&tokenizer->merges, key, value))
        *mt_map_find(&tokenizer->merges, key) = value; // the last of two equal merges counts, as in `tokenizers`
}

/* ---- which pairs merge, and which first ------------------------------------------------------------------------- */

/* Maps a score to an integer that is smaller the higher the score is. */
static uint32_t score_order(float score) {
    uint32_t bits;
    score += 0.0f; // -0 becomes 0
    memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? bits : 0x7FFFFFFFu - bits;
}

/* The token that two neighbours merge into, and how urgently; false if they do not merge. */
static bool merged_pair(mt_encoder *encoder, const char *text, int32_t left, uint32_t *priority, int32_t *id) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    const mt_symbol *a = &encoder->symbols[left], *b = &encoder->symbols[a->next];
    if (tokenizer->kind == MT_KIND_BPE) {
        uint64_t *merge = mt_map_find(&tokenizer->merges, (uint64_t)(uint32_t)a->id << 32 | (uint32_t)b->id);
        if (!merge) return false;
        *priority = (uint32_t)(*merge >> 32);
        *id = (int32_t)*merge;
        return true;
    }
    if (a->frozen || b->frozen) return false;
    *id = mt_token_find(tokenizer, text + a->start, a->bytes + b->bytes);
    if (*id < 0) return false;
    const mt_token *token = &tokenizer->tokens[*id];
    if (token->type == MT_TOKEN_UNUSED) encoder->split_at[*id] = a->bytes;
    *priority = score_order(token->score);
    return token->type == MT_TOKEN_NORMAL || token->type == MT_TOKEN_USER_DEFINED || token->type == MT_TOKEN_UNUSED;
}

/* ---- the heap -------------------------------------------------------------------------------------------------- */

static void heap_push(mt_encoder *encoder, mt_candidate candidate) {
    if (encoder->heap_count == encoder->heap_capacity) {
        encoder->heap_capacity = encoder->heap_capacity ? 2 * encoder->heap_capacity : 256;
        encoder->heap = mt_realloc(encoder->heap, encoder->heap_capacity * (int64_t)sizeof *encoder->heap);
    }
    mt_candidate *heap = encoder->heap;
    int64_t at = encoder->heap_count++;
    for (; at > 0 && heap[(at - 1) / 2].order > candidate.order; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = candidate;
}

static mt_candidate heap_pop(mt_encoder *encoder) {
    mt_candidate *heap = encoder->heap, top = heap[0], last = heap[--encoder->heap_count];
    int64_t at = 0, count = encoder->heap_count;
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1].order < heap[child].order) child++;
        if (heap[child].order >= last.order) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return top;
}

/* ---- merging --------------------------------------------------------------------------------------------------- */

mt_symbol *mt_symbols_reserve(mt_encoder *encoder, int64_t count) {
    if (count > encoder->symbol_capacity) {
        encoder->symbol_capacity = 2 * count;
        encoder->symbols = mt_realloc(encoder->symbols, encoder->symbol_capacity * (int64_t)sizeof *encoder->symbols);
    }
    return encoder->symbols;
}

/* Puts the pair of `left` and its next symbol into the heap, if they may merge. */
static void consider(mt_encoder *encoder, const char *text, int32_t left) {
    if (left < 0 || encoder->symbols[left].next < 0) return;
    int32_t right = encoder->symbols[left].next, id;
    uint32_t priority;
    if (!merged_pair(encoder, text, left, &priority, &id)) return;
    int32_t bytes = encoder->symbols[left].bytes + encoder->symbols[right].bytes;
    heap_push(encoder, (mt_candidate){(uint64_t)priority << 32 | (uint32_t)left, right, bytes, id});
}

void mt_bpe_merge(mt_encoder *encoder, const char *text, int64_t count) {
    mt_symbol *symbols = encoder->symbols;
    encoder->heap_count = 0;
    for (int64_t i = 0; i + 1 < count; i++) consider(encoder, text, (int32_t)i);
    while (encoder->heap_count) {
        mt_candidate best = heap_pop(encoder);
        int32_t left_index = (int32_t)(uint32_t)best.order;
        mt_symbol *left = &symbols[left_index], *right = &symbols[best.right];
        if (!left->bytes || !right->bytes || left->bytes + right->bytes != best.bytes) continue;
        left->bytes = best.bytes;
        left->id = best.id;
        left->next = right->next;
        right->bytes = 0;
        if (right->next >= 0) symbols[right->next].previous = left_index;
        consider(encoder, text, left->previous);
        consider(encoder, text, left_index);
    }
}

/* ---- words of a tokenizer.json or of GPT-2 ---------------------------------------------------------------------- */

static void symbol_push(mt_encoder *encoder, int64_t *count, int32_t id, int32_t start, int32_t bytes) {
    mt_symbol *symbols = encoder->symbols;
    int32_t at = (int32_t)(*count)++;
    symbols[at] = (mt_symbol){at - 1, -1, start, bytes, id, false};
    if (at > 0) symbols[at - 1].next = at;
}

/* The tokens <0xXX> that stand for an unknown character; false unless there is one for each of its bytes. */
static bool push_fallback(mt_encoder *encoder, int64_t *count, const char *word, int32_t start, int32_t bytes) {
    const int32_t *byte_ids = encoder->tokenizer->byte_ids;
    for (int32_t i = start; i < start + bytes; i++)
        if (byte_ids[(unsigned char)word[i]] < 0) return false;
    for (int32_t i = start; i < start + bytes; i++) symbol_push(encoder, count, byte_ids[(unsigned char)word[i]], i, 1);
    return true;
}

/* Cuts the word into characters (byte-level: bytes) that the vocabulary knows. An unknown one becomes its bytes, or the
 * unknown token (one for a run of them if fuse_unknown), or nothing, in the order in which `tokenizers` emits them. */
static int64_t first_symbols(mt_encoder *encoder, const char *word, int32_t bytes) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    int64_t count = 0;
    int32_t unknown_start = 0, unknown_bytes = 0;
    mt_symbols_reserve(encoder, bytes);
    for (int32_t start = 0, length; start < bytes; start += length) {
        mt_utf8_state state;
        length = tokenizer->byte_level ? 1 : mt_utf8_scan(word + start, bytes - start, &state);
        int32_t id = tokenizer->byte_level ? tokenizer->byte_ids[(unsigned char)word[start]]
                                           : mt_token_find(tokenizer, word + start, length);
        if (id < 0 && tokenizer->byte_fallback && push_fallback(encoder, &count, word, start, length)) continue;
        if (id < 0 && tokenizer->unknown < 0) continue;
        bool fused = id < 0 && unknown_bytes && tokenizer->fuse_unknown;
        if (unknown_bytes && !fused) {
            symbol_push(encoder, &count, tokenizer->unknown, unknown_start, unknown_bytes);
            unknown_bytes = 0;
        }
        if (id >= 0) {
            symbol_push(encoder, &count, id, start, length);
        } else {
            if (!fused) unknown_start = start;
            unknown_bytes += length;
        }
    }
    if (unknown_bytes) symbol_push(encoder, &count, tokenizer->unknown, unknown_start, unknown_bytes);
    return count;
}

static void encode_new_word(mt_encoder *encoder, const char *word, int32_t bytes, mt_ids *ids) {
    int32_t whole = encoder->tokenizer->ignore_merges ? mt_token_find(encoder->tokenizer, word, bytes) : -1;
    if (whole >= 0) {
        mt_ids_push(ids, whole);
        return;
    }
    int64_t count = first_symbols(encoder, word, bytes);
    mt_bpe_merge(encoder, word, count);
    for (int32_t at = count ? 0 : -1; at >= 0; at = encoder->symbols[at].next)
        mt_ids_push(ids, encoder->symbols[at].id);
}

/* Natural text repeats its words: each slot of the cache keeps the last word that hashed to it. */
static void encode_word(mt_encoder *encoder, const char *word, int32_t bytes, mt_ids *ids) {
    bool cached = bytes <= MT_CACHE_BYTES && !encoder->tokenizer->has_unused;
    mt_cache_slot *slot = cached ? &encoder->cache[mt_hash(word, bytes) & (MT_CACHE_SLOTS - 1)] : NULL;
    if (slot && slot->bytes == bytes && !memcmp(slot->word, word, (size_t)bytes)) {
        for (int i = 0; i < slot->count; i++) mt_ids_push(ids, slot->ids[i]);
        return;
    }
    int64_t before = ids->count;
    if (encoder->tokenizer->kind == MT_KIND_BPE)
        encode_new_word(encoder, word, bytes, ids);
    else
        mt_sentencepiece_encode_word(encoder, word, bytes, ids);
    int64_t count = ids->count - before;
    if (!slot || count > MT_CACHE_IDS) return;
    slot->bytes = (uint8_t)bytes;
    slot->count = (uint8_t)count;
    memcpy(slot->word, word, (size_t)bytes);
    if (count) memcpy(slot->ids, ids->data + before, (size_t)count * sizeof *slot->ids);
}

static bool is_space_symbol(const char *text, int64_t bytes) {
    return bytes >= 3 && !memcmp(text, MT_SPACE_SYMBOL, 3);
}

/* Where the first word of the text ends: before a space symbol that follows something else. */
static int64_t word_end(const char *text, int64_t bytes) {
    int64_t at = 0;
    while (is_space_symbol(text + at, bytes - at)) at += 3;
    while (at < bytes && !is_space_symbol(text + at, bytes - at)) at++;
    return at;
}

void mt_bpe_find_words(mt_tokenizer *tokenizer) {
    if (tokenizer->byte_level || tokenizer->has_unused || mt_token_find(tokenizer, MT_SPACE_SYMBOL, 3) < 0) return;
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        const mt_token *token = &tokenizer->tokens[id];
        if (token->type != MT_TOKEN_ABSENT &&
            word_end(mt_token_text(tokenizer, id), token->text_bytes) < token->text_bytes)
            return;
    }
    tokenizer->words_at_spaces = true;
}

int mt_bpe_encode(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    for (int64_t length; bytes; text += length, bytes -= length) {
        length = encoder->tokenizer->words_at_spaces ? word_end(text, bytes) : bytes;
        if (length > INT32_MAX / 2)
            return mt_error_set(error, "%s: a text of %lld bytes without a word boundary is too long; split it",
                                encoder->tokenizer->path, (long long)length);
        encode_word(encoder, text, (int32_t)length, ids);
    }
    return 0;
}
