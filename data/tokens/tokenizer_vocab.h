/* tokenizer_vocab.h: hash tables, the prefix tree, UTF-8, and the vocabulary of a tokenizer with its rules. */
#ifndef MT_TOKENIZER_VOCAB_H
#define MT_TOKENIZER_VOCAB_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_MAX_VOCAB (1 << 22) // larger ids are errors, so that a small damaged file cannot claim much memory
#define MT_MAX_STEPS 16        // steps of a normalizer, a pre-tokenizer or a decoder
#define MT_MAX_TEXT  ((int64_t)1 << 30)
// By how much the rules of a file may lengthen a text. NFKD may make 18 bytes of one.
#define MT_TEXT_GROWTH(bytes) (64 * (bytes) + (1 << 20))
#define MT_SPACE_SYMBOL       "\xE2\x96\x81" // U+2581, which SentencePiece writes for a space

/* A hash table from uint64 to uint64 with open addressing. Keys are below 2^64 - 1. */
typedef struct mt_map {
    struct mt_map_slot {
        uint64_t key_plus_one, value; // key_plus_one 0: empty
    } * slots;
    int64_t count, capacity; // capacity is 0 or a power of two
} mt_map;

uint64_t *mt_map_find(const mt_map *map, uint64_t key);        // the value, or NULL
bool mt_map_insert(mt_map *map, uint64_t key, uint64_t value); // false if present; no change

/* A prefix tree (trie) from byte strings to values. Node 0 is the root. */
typedef struct mt_trie {
    mt_map children; // node << 8 | byte -> node
    int32_t *values; // [count]; -1: no string ends here
    int64_t count, capacity;
    bool starts[256]; // first bytes of the strings
} mt_trie;

/* Inserts a string or replaces its value; walks one byte; finds the longest string that begins the text. */
void mt_trie_insert(mt_trie *trie, const char *text, int64_t bytes, int32_t value);

/* The same for a token that is looked for at every place of a text; `path` is the file that has it. An error if it is
 * so long that the search of a text which repeats a part of it would take hours. */
enum { MT_MAX_SEARCHED_TOKEN = 1024 }; // bytes; real ones have some hundred, of blanks
int mt_trie_add(mt_trie *trie, const char *path, const char *text, int64_t bytes, int32_t value, mt_error *error);
int64_t mt_trie_step(const mt_trie *trie, int64_t node, char byte);                            // the child, or -1
int64_t mt_trie_longest(const mt_trie *trie, const char *text, int64_t bytes, int32_t *value); // its length, or 0
void mt_trie_free(mt_trie *trie);

/* A hash for the tables here; not safe against an adversary. */
uint64_t mt_hash(const char *text, int64_t bytes);

typedef enum { MT_UTF8_WHOLE, MT_UTF8_CUT, MT_UTF8_BAD } mt_utf8_state;

/* The bytes of the first character of text[bytes > 0]: a whole character; one that the end of the text cuts; or the
 * longest valid prefix of an ill-formed one (Unicode's "maximal subpart"). */
int mt_utf8_scan(const char *text, int64_t bytes, mt_utf8_state *state);
int mt_utf8_decode(const char *text, int64_t bytes, uint32_t *codepoint); // its length, or 0 if ill-formed
void mt_utf8_append(mt_text *text, uint32_t codepoint);
bool mt_utf8_is_valid(const char *text, int64_t bytes);
void mt_utf8_repair(mt_text *out, const char *text, int64_t bytes); // appends `text`, ill-formed parts as U+FFFD
bool mt_is_white_space(uint32_t codepoint);                         // Unicode's White_Space

/* ---- the tokenizer --------------------------------------------------------------------------------------------- */

/* The numbers of SentencePiece's files. Hugging Face's special tokens are CONTROL. */
typedef enum {
    MT_TOKEN_ABSENT,
    MT_TOKEN_NORMAL,
    MT_TOKEN_UNKNOWN,
    MT_TOKEN_CONTROL,
    MT_TOKEN_USER_DEFINED,
    MT_TOKEN_UNUSED,
    MT_TOKEN_BYTE
} mt_token_type;

typedef struct mt_token {
    int64_t text, surface; // offsets in mt_tokenizer.strings: the text it encodes, the text it decodes to
    int32_t text_bytes, surface_bytes;
    float score; // SentencePiece
    uint8_t type;
} mt_token;

typedef struct mt_added_token {
    int32_t id;
    bool single_word, lstrip, rstrip, normalized;
} mt_added_token;

/* A regular expression, or a literal string if `code` is NULL. */
typedef struct mt_pattern {
    void *code; // pcre2_code
    char *source;
    int64_t bytes;
} mt_pattern;

typedef enum {
    // normalizers
    MT_RULE_UNICODE, // form: MT_NFC ...
    MT_RULE_LOWERCASE,
    MT_RULE_PREPEND, // content
    MT_RULE_REPLACE, // pattern by content
    MT_RULE_STRIP,   // left, right
    // pre-tokenizers
    MT_RULE_SPLIT,      // pattern, behavior, invert
    MT_RULE_BYTE_LEVEL, // prefix
    MT_RULE_METASPACE,  // content (the replacement), prefix
    // decoders; some of the above are decoders too
    MT_RULE_BYTE_FALLBACK,
    MT_RULE_FUSE
} mt_rule_kind;

typedef enum { MT_NFC, MT_NFD, MT_NFKC, MT_NFKD } mt_unicode_form;
typedef enum { MT_ISOLATED, MT_REMOVED, MT_CONTIGUOUS, MT_MERGED_WITH_PREVIOUS, MT_MERGED_WITH_NEXT } mt_behavior;
typedef enum { MT_PREFIX_NEVER, MT_PREFIX_FIRST, MT_PREFIX_ALWAYS } mt_prefix;

typedef struct mt_rule {
    mt_rule_kind kind;
    mt_unicode_form form;
    mt_behavior behavior;
    mt_prefix prefix;
    bool invert, left, right;
    mt_pattern pattern;
    char *content;
    int64_t content_bytes;
} mt_rule;

typedef enum {
    MT_KIND_BYTES,
    MT_KIND_BPE,               // merges pairs of ids by rank
    MT_KIND_SENTENCEPIECE_BPE, // merges strings by score
    MT_KIND_UNIGRAM            // SentencePiece's most probable segmentation
} mt_tokenizer_kind;

/* The rule that joins the surfaces of tokens to a text. */
typedef enum {
    MT_JOIN_PLAIN,
    MT_JOIN_SPACE,     // a space between two tokens: tokenizer.json without a decoder
    MT_JOIN_METASPACE, // the first token loses its spaces
    MT_JOIN_SENTENCEPIECE
} mt_join;

/* SentencePiece's normalizer_spec. */
typedef struct mt_sentencepiece_rules {
    bool add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces, whitespace_as_suffix;
    uint32_t *units; // [unit_count] the double array of precompiled_charsmap
    int64_t unit_count;
    char *replacements; // NUL-terminated strings; the values of the double array are offsets into them
    int64_t replacement_bytes;
} mt_sentencepiece_rules;

typedef struct mt_file {
    char *name; // without the tokenizer's folder
    mt_text content;
    char *outside; // the file that it was read from, if a link led out of the folder
} mt_file;

struct mt_tokenizer {
    mt_tokenizer_kind kind;
    char *path; // for messages
    mt_token *tokens;
    int64_t vocab_size, token_capacity;
    mt_text strings;
    int32_t *lookup; // [lookup_capacity] hash table of ids by text; -1: empty
    int64_t lookup_capacity, lookup_count;
    int32_t eod, bos, unknown; // -1: none
    int32_t byte_ids[256];     // byte-level: the token of each byte; else its fallback token <0xXX>; -1: none

    mt_map merges;   // left << 32 | right -> rank << 32 | merged
    bool byte_level; // words are bytes, not characters
    bool byte_fallback, fuse_unknown, ignore_merges;

    mt_rule normalizer[MT_MAX_STEPS], pretokenizer[MT_MAX_STEPS];
    int normalizer_steps, pretokenizer_steps;
    mt_added_token *added;
    int64_t added_count;
    mt_trie added_tries[2]; // matched before and after normalization; values index `added`

    mt_sentencepiece_rules rules;
    mt_trie pieces;       // unigram: all pieces of normal and user-defined type
    mt_trie user_defined; // values unused
    float min_score, max_score;
    bool has_unused;

    // No token has the space symbol after another character, so no token crosses the start of a word: words may be
    // encoded one by one and cached, even if the file has no pre-tokenizer.
    bool words_at_spaces;

    double match_seconds; // of processor time for the searches of a text by patterns; 0: from its length
    mt_join join;
    int strip_start; // leading spaces that decoding removes

    mt_file *files; // [file_count]
    int file_count;
    bool in_folder; // the user named the files' folder
};

/* Adds a token whose surface equals its text. Errors: id out of range or in use. */
int mt_token_add(mt_tokenizer *tokenizer, int64_t id, const char *text, int64_t bytes, mt_token_type type,
                 mt_error *error);
const char *mt_token_text(const mt_tokenizer *tokenizer, int32_t id);
int32_t mt_token_index(mt_tokenizer *tokenizer, int32_t id); // adds it to `lookup`; returns the id found if taken
int32_t mt_token_find(const mt_tokenizer *tokenizer, const char *text, int64_t bytes); // -1 if absent

/* Append one id; make room for `more` bytes; append bytes. */
void mt_ids_push(mt_ids *ids, int32_t id);
void mt_text_reserve(mt_text *text, int64_t more);
void mt_text_append(mt_text *text, const char *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
