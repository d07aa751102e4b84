/* tokenizer_json.c: reads Hugging Face's tokenizer.json, GPT-2's vocab.json with merges.txt, and Kimi's tiktoken.model.
 * Every component of the file is either implemented exactly or refused by name; unknown keys are ignored, as by
 * `tokenizers`. */
#include "tokenizer_json.h"

#include "../base/file.h"
#include "tokenizer_encode.h"

#include <stdlib.h>
#include <string.h>

typedef struct loader {
    mt_tokenizer *tokenizer;
    const char *path;
    mt_error *error;
    const char **keys; // [key_count] tokens as spelled in the file, borrowed from the JSON; NULL: not in the vocabulary
    int64_t key_count;
    bool fused; // the decoders read so far include Fuse
} loader;

/* ---- JSON ------------------------------------------------------------------------------------------------------ */

static json_t *parse_json(const char *path, const mt_text *text, mt_error *error) {
    return mt_json_parse(text->bytes ? text->data : "", text->bytes, JSON_ALLOW_NUL, path, error);
}

int mt_tokenizer_config_check(const json_t *config, const char *path, mt_error *error) {
    static const mt_json_field fields[] = {
        {"add_bos_token", MT_JSON_BOOL, "true or false"},
        {"add_eos_token", MT_JSON_BOOL, "true or false"},
        {"add_prefix_space", MT_JSON_BOOL, "true or false"},
        {"legacy", MT_JSON_BOOL, "true or false"},
        {"bos_token", MT_JSON_STRING | MT_JSON_OBJECT, "a token's text, or an object with its content"},
        {"eos_token", MT_JSON_STRING | MT_JSON_OBJECT, "a token's text, or an object with its content"},
        {"chat_template", MT_JSON_STRING | MT_JSON_LIST | MT_JSON_OBJECT, "a text, or a list of named templates"},
        {"tokenizer_class", MT_JSON_STRING, "a class's name"},
    };
    static const mt_json_field content = {"content", MT_JSON_STRING, "a text"};
    if (mt_json_check_fields(config, fields, sizeof fields / sizeof *fields, path, error) != 0) return -1;
    if (mt_json_check_fields(json_object_get(config, "bos_token"), &content, 1, path, error) != 0) return -1;
    return mt_json_check_fields(json_object_get(config, "eos_token"), &content, 1, path, error);
}

/* Checks the values of an object of tokenizer.json and of those in it. */
static int check_types(const loader *l, const json_t *value) {
    static const mt_json_field fields[] = {
        {"type", MT_JSON_STRING, "a text"},
        {"content", MT_JSON_STRING, "a text"},
        {"prepend", MT_JSON_STRING, "a text"},
        {"prepend_scheme", MT_JSON_STRING, "a text"},
        {"replacement", MT_JSON_STRING, "a text"},
        {"behavior", MT_JSON_STRING, "a text"},
        {"String", MT_JSON_STRING, "a text"},
        {"Regex", MT_JSON_STRING, "a text"},
        {"unk_token", MT_JSON_STRING, "a text"},
        {"continuing_subword_prefix", MT_JSON_STRING, "a text"},
        {"end_of_word_suffix", MT_JSON_STRING, "a text"},
        {"dropout", MT_JSON_NUMBER, "a number"},
        {"id", MT_JSON_INT, "a whole number"},
        {"start", MT_JSON_INT, "a whole number"},
        {"stop", MT_JSON_INT, "a whole number"},
        {"add_prefix_space", MT_JSON_BOOL, "true or false"},
        {"byte_fallback", MT_JSON_BOOL, "true or false"},
        {"fuse_unk", MT_JSON_BOOL, "true or false"},
        {"ignore_merges", MT_JSON_BOOL, "true or false"},
        {"individual_digits", MT_JSON_BOOL, "true or false"},
        {"invert", MT_JSON_BOOL, "true or false"},
        {"lstrip", MT_JSON_BOOL, "true or false"},
        {"normalized", MT_JSON_BOOL, "true or false"},
        {"rstrip", MT_JSON_BOOL, "true or false"},
        {"single_word", MT_JSON_BOOL, "true or false"},
        {"special", MT_JSON_BOOL, "true or false"},
        {"split", MT_JSON_BOOL, "true or false"},
        {"strip_left", MT_JSON_BOOL, "true or false"},
        {"strip_right", MT_JSON_BOOL, "true or false"},
        {"use_regex", MT_JSON_BOOL, "true or false"},
        {"normalizers", MT_JSON_LIST, "a list"},
        {"pretokenizers", MT_JSON_LIST, "a list"},
        {"decoders", MT_JSON_LIST, "a list"},
    };
    const char *key;
    const json_t *item;
    size_t i;
    if (mt_json_check_fields(value, fields, sizeof fields / sizeof *fields, l->path, l->error) != 0) return -1;
    json_array_foreach(value, i, item) {
        if (check_types(l, item) != 0) return -1;
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, item) {
        bool holds_tokens = strcmp(key, "vocab") == 0 || strcmp(key, "merges") == 0; // keys of these are tokens
        if (!holds_tokens && check_types(l, item) != 0) return -1;
    }
    return 0;
}

/* Checks the parts of tokenizer.json that are read. */
static int check_parts(const loader *l, const json_t *root) {
    static const mt_json_field fields[] = {
        {"model", MT_JSON_OBJECT, "an object"},          {"normalizer", MT_JSON_OBJECT, "an object"},
        {"pre_tokenizer", MT_JSON_OBJECT, "an object"},  {"decoder", MT_JSON_OBJECT, "an object"},
        {"post_processor", MT_JSON_OBJECT, "an object"}, {"added_tokens", MT_JSON_LIST, "a list"},
    };
    if (mt_json_check_fields(root, fields, sizeof fields / sizeof *fields, l->path, l->error) != 0) return -1;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strcmp(fields[i].key, "post_processor") != 0 && check_types(l, json_object_get(root, fields[i].key)) != 0)
            return -1;
    return 0;
}

static bool get_bool(const json_t *object, const char *key, bool otherwise) {
    const json_t *value = json_object_get(object, key);
    return json_is_boolean(value) ? json_is_true(value) : otherwise;
}

/* The string at `key`, or "". */
static mt_text get_text(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) return (mt_text){"", 0, 0};
    return (mt_text){(char *)json_string_value(value), (int64_t)json_string_length(value), 0};
}

static bool is_missing(const json_t *value) {
    return !value || json_is_null(value);
}

static bool equals(mt_text text, const char *name) {
    return text.bytes == (int64_t)strlen(name) && !memcmp(text.data, name, (size_t)text.bytes);
}

static int refuse(loader *l, const char *part, mt_text type) {
    return mt_error_set(l->error, "%s: a %s of type '%.60s' is not supported; use a tokenizer without it", l->path,
                        part, type.data);
}

/* ---- byte-level vocabularies ----------------------------------------------------------------------------------- */

/* GPT-2 spells each byte as a printable character: itself if printable, else the next of U+0100, U+0101, ... Returns
 * the byte of a character, or -1. */
static int byte_of_character(uint32_t c) {
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255)) return (int)c;
    if (c < 256 || c > 323) return -1;
    int n = (int)c - 256; // bytes 0-32, 127-160, 173 in this order
    return n < 33 ? n : n < 67 ? 127 + n - 33 : 173;
}

/* Appends the bytes that the token spells; false if a character spells no byte. */
static bool append_spelled_bytes(mt_text *out, const char *text, int64_t bytes) {
    for (int64_t i = 0; i < bytes;) {
        uint32_t c = 0;
        int length = mt_utf8_decode(text + i, bytes - i, &c);
        int byte = length ? byte_of_character(c) : -1;
        if (byte < 0) return false;
        mt_text_append(out, &(char){(char)byte}, 1);
        i += length;
    }
    return true;
}

/* ---- normalizer and pre_tokenizer ------------------------------------------------------------------------------- */

static int read_pattern(loader *l, mt_pattern *out, const json_t *pattern) {
    mt_text literal = get_text(pattern, "String"), regex = get_text(pattern, "Regex");
    if (json_is_string(json_object_get(pattern, "String"))) {
        mt_pattern_literal(out, literal.data, literal.bytes);
        return 0;
    }
    if (!json_is_string(json_object_get(pattern, "Regex")))
        return mt_error_set(l->error, "%s: a pattern is neither a String nor a Regex", l->path);
    return mt_pattern_compile(out, l->path, regex.data, regex.bytes, l->error);
}

static void set_content(mt_rule *step, mt_text content) {
    step->content = mt_malloc(content.bytes + 1);
    memcpy(step->content, content.data, (size_t)content.bytes);
    step->content_bytes = content.bytes;
}

static int need_utf8proc(loader *l, const char *what) {
#ifdef MT_HAVE_UTF8PROC
    (void)l, (void)what;
    return 0;
#else
    return mt_error_set(
        l->error,
        "%s: %s needs utf8proc, which this program was built without; install its development package and "
        "build again",
        l->path, what);
#endif
}

static int read_unicode_normalizer(loader *l, mt_rule *step, mt_text type) {
    step->kind = equals(type, "Lowercase") ? MT_RULE_LOWERCASE : MT_RULE_UNICODE;
    step->form = equals(type, "NFC") ? MT_NFC : equals(type, "NFD") ? MT_NFD : equals(type, "NFKC") ? MT_NFKC : MT_NFKD;
    return need_utf8proc(l, "its normalizer");
}

static int read_normalizer(loader *l, mt_rule *step, const json_t *object) {
    mt_text type = get_text(object, "type");
    if (equals(type, "NFC") || equals(type, "NFD") || equals(type, "NFKC") || equals(type, "NFKD") ||
        equals(type, "Lowercase"))
        return read_unicode_normalizer(l, step, type);
    if (equals(type, "Prepend")) {
        step->kind = MT_RULE_PREPEND;
        set_content(step, get_text(object, "prepend"));
    } else if (equals(type, "Replace")) {
        step->kind = MT_RULE_REPLACE;
        set_content(step, get_text(object, "content"));
        return read_pattern(l, &step->pattern, json_object_get(object, "pattern"));
    } else if (equals(type, "Strip")) {
        step->kind = MT_RULE_STRIP;
        step->left = get_bool(object, "strip_left", true);
        step->right = get_bool(object, "strip_right", true);
    } else {
        return refuse(l, "normalizer", type);
    }
    return 0;
}

static int read_behavior(loader *l, mt_rule *step, mt_text name) {
    static const char *const names[] = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"};
    for (int i = 0; i < 5; i++) {
        step->behavior = (mt_behavior)i;
        if (equals(name, names[i])) return 0;
    }
    return refuse(l, "split behavior", name);
}

static int set_regex(loader *l, mt_rule *step, mt_behavior behavior, const char *regex) {
    step->kind = MT_RULE_SPLIT;
    step->behavior = behavior;
    return mt_pattern_compile(&step->pattern, l->path, regex, (int64_t)strlen(regex), l->error);
}

static int read_metaspace(loader *l, mt_rule *step, const json_t *object) {
    mt_text scheme = get_text(object, "prepend_scheme"), replacement = get_text(object, "replacement");
    if (!replacement.bytes) replacement = (mt_text){MT_SPACE_SYMBOL, 3, 0};
    step->kind = MT_RULE_METASPACE;
    step->behavior = MT_MERGED_WITH_NEXT;
    step->prefix = get_bool(object, "add_prefix_space", true) ? MT_PREFIX_ALWAYS : MT_PREFIX_NEVER;
    if (equals(scheme, "first")) step->prefix = MT_PREFIX_FIRST;
    if (equals(scheme, "never")) step->prefix = MT_PREFIX_NEVER;
    if (equals(scheme, "always")) step->prefix = MT_PREFIX_ALWAYS;
    if (scheme.bytes && !equals(scheme, "first") && !equals(scheme, "never") && !equals(scheme, "always"))
        return refuse(l, "prepend_scheme", scheme);
    set_content(step, replacement);
    mt_pattern_literal(&step->pattern, replacement.data, get_bool(object, "split", true) ? replacement.bytes : 0);
    return 0;
}

/* \w of Rust, in which this pre-tokenizer is written: its joiners are words, the fractions of Latin-1 are none. */
#define RUST_WORDS "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}\\x{200C}\\x{200D}"

static int read_pretokenizer(loader *l, mt_rule *step, const json_t *object) {
    mt_text type = get_text(object, "type");
    if (l->tokenizer->byte_level) return refuse(l, "pre_tokenizer after ByteLevel", type);
    if (equals(type, "ByteLevel")) {
        bool use_regex = get_bool(object, "use_regex", true);
        if (use_regex && set_regex(l, step, MT_ISOLATED, mt_gpt2_pattern)) return -1;
        if (!use_regex) mt_pattern_literal(&step->pattern, "", 0);
        step->kind = MT_RULE_BYTE_LEVEL;
        step->prefix = get_bool(object, "add_prefix_space", true) ? MT_PREFIX_ALWAYS : MT_PREFIX_NEVER;
        l->tokenizer->byte_level = true;
        return 0;
    }
    if (equals(type, "Metaspace")) return read_metaspace(l, step, object);
    if (equals(type, "Split")) {
        step->kind = MT_RULE_SPLIT;
        step->invert = get_bool(object, "invert", false);
        if (read_behavior(l, step, get_text(object, "behavior"))) return -1;
        return read_pattern(l, &step->pattern, json_object_get(object, "pattern"));
    }
    if (equals(type, "Digits"))
        return set_regex(l, step, get_bool(object, "individual_digits", false) ? MT_ISOLATED : MT_CONTIGUOUS, "\\p{N}");
    if (equals(type, "Punctuation")) {
        if (set_regex(l, step, MT_ISOLATED, "[\\p{P}$+<=>^`|~]")) return -1;
        mt_text behavior = get_text(object, "behavior");
        return behavior.bytes ? read_behavior(l, step, behavior) : 0;
    }
    if (equals(type, "WhitespaceSplit")) return set_regex(l, step, MT_REMOVED, "\\s");
    if (equals(type, "Whitespace")) {
        step->invert = true;
        return set_regex(l, step, MT_REMOVED, "[" RUST_WORDS "]+|[^" RUST_WORDS "\\s]+");
    }
    return refuse(l, "pre_tokenizer", type);
}

typedef int step_reader(loader *l, mt_rule *step, const json_t *object);

/* Reads a component into steps[*count]; a Sequence, with its members at `members`, becomes several steps. */
static int read_steps(loader *l, const json_t *object, const char *members, step_reader *read, mt_rule *steps,
                      int *count, int depth) {
    if (is_missing(object)) return 0;
    if (!equals(get_text(object, "type"), "Sequence")) {
        if (*count == MT_MAX_STEPS)
            return mt_error_set(l->error, "%s: more than %d %s are not supported", l->path, MT_MAX_STEPS, members);
        return read(l, &steps[(*count)++], object);
    }
    const json_t *list = json_object_get(object, members), *member;
    size_t i;
    if (!json_is_array(list) || depth > 8)
        return mt_error_set(l->error, "%s: a Sequence without its %s, or nested too deeply", l->path, members);
    json_array_foreach(list, i, member) {
        if (read_steps(l, member, members, read, steps, count, depth + 1)) return -1;
    }
    return 0;
}

/* ---- vocabulary and merges ------------------------------------------------------------------------------------- */

static void remember_key(loader *l, int64_t id, const char *key) {
    if (id >= l->key_count) {
        int64_t larger = 2 * id + 256;
        l->keys = mt_realloc(l->keys, larger * (int64_t)sizeof *l->keys);
        for (int64_t i = l->key_count; i < larger; i++) l->keys[i] = NULL;
        l->key_count = larger;
    }
    l->keys[id] = key;
}

/* Adds every token of the object {token: id}. Byte-level tokens are stored as the bytes that they spell; a token that
 * spells no bytes cannot come from text and is only decoded. */
static int read_vocabulary(loader *l, json_t *vocabulary) {
    const char *key;
    json_t *value;
    mt_text spelled = {0};
    int failed = 0;
    if (!json_is_object(vocabulary) || !json_object_size(vocabulary))
        return mt_error_set(l->error, "%s: has no vocabulary", l->path);
    json_object_foreach(vocabulary, key, value) {
        spelled.bytes = 0;
        int64_t bytes = (int64_t)strlen(key);
        bool is_bytes = l->tokenizer->byte_level && bytes && append_spelled_bytes(&spelled, key, bytes);
        if (!json_is_integer(value)) {
            failed = mt_error_set(l->error, "%s: the id of token '%.60s' is not an integer", l->path, key);
            break;
        }
        int64_t id = json_integer_value(value);
        failed = mt_token_add(l->tokenizer, id, is_bytes ? spelled.data : key, is_bytes ? spelled.bytes : bytes,
                              MT_TOKEN_NORMAL, l->error);
        if (failed) break;
        remember_key(l, id, key);
        if (is_bytes || !l->tokenizer->byte_level) mt_token_index(l->tokenizer, (int32_t)id);
    }
    free(spelled.data);
    return failed;
}

/* The token of this spelling, or -1. */
static int32_t find_spelled(loader *l, mt_text *scratch, const char *text, int64_t bytes) {
    if (!l->tokenizer->byte_level) return mt_token_find(l->tokenizer, text, bytes);
    scratch->bytes = 0;
    if (!append_spelled_bytes(scratch, text, bytes)) return -1;
    return mt_token_find(l->tokenizer, bytes ? scratch->data : "", scratch->bytes);
}

static void merge_add(mt_tokenizer *tokenizer, int32_t left, int32_t right, int32_t merged, int64_t rank) {
    uint64_t key = (uint64_t)left << 32 | (uint32_t)right, value = (uint64_t)rank << 32 | (uint32_t)merged;
    if (!mt_map_insert(&tokenizer->merges, key, value))
        *mt_map_find(&tokenizer->merges, key) = value; // the last of equal merges counts, as in `tokenizers`
}

static int add_merge(loader *l, mt_text *scratch, int64_t rank, mt_text left, mt_text right) {
    mt_text both = {0};
    mt_text_append(&both, left.data, left.bytes);
    mt_text_append(&both, right.data, right.bytes);
    int32_t a = find_spelled(l, scratch, left.data, left.bytes), b = find_spelled(l, scratch, right.data, right.bytes);
    int32_t merged = both.bytes ? find_spelled(l, scratch, both.data, both.bytes) : -1;
    free(both.data);
    if (a < 0 || b < 0 || merged < 0)
        return mt_error_set(l->error, "%s: merge %lld, '%.*s' with '%.*s', needs a token that the vocabulary lacks",
                            l->path, (long long)rank, (int)(left.bytes < 60 ? left.bytes : 60), left.data,
                            (int)(right.bytes < 60 ? right.bytes : 60), right.data);
    merge_add(l->tokenizer, a, b, merged, rank);
    return 0;
}

/* `line` is "LEFT RIGHT". */
static int add_merge_line(loader *l, mt_text *scratch, int64_t rank, const char *line, int64_t bytes) {
    const char *space = memchr(line, ' ', (size_t)bytes);
    if (!space || memchr(space + 1, ' ', (size_t)(line + bytes - space - 1)))
        return mt_error_set(l->error, "%s: merge %lld, '%.*s', is not two tokens with a space between them", l->path,
                            (long long)rank, (int)(bytes < 60 ? bytes : 60), line);
    mt_text left = {(char *)line, space - line, 0}, right = {(char *)space + 1, line + bytes - space - 1, 0};
    return add_merge(l, scratch, rank, left, right);
}

static int read_merges(loader *l, const json_t *merges) {
    mt_text scratch = {0};
    const json_t *merge;
    size_t rank;
    int failed = json_is_array(merges) ? 0 : mt_error_set(l->error, "%s: the model has no merges", l->path);
    json_array_foreach(merges, rank, merge) {
        const json_t *a = json_array_get(merge, 0), *b = json_array_get(merge, 1);
        if (json_is_string(merge)) {
            failed = add_merge_line(l, &scratch, (int64_t)rank, json_string_value(merge),
                                    (int64_t)json_string_length(merge));
        } else if (json_is_string(a) && json_is_string(b) && json_array_size(merge) == 2) {
            mt_text left = {(char *)json_string_value(a), (int64_t)json_string_length(a), 0};
            mt_text right = {(char *)json_string_value(b), (int64_t)json_string_length(b), 0};
            failed = add_merge(l, &scratch, (int64_t)rank, left, right);
        } else {
            failed = mt_error_set(l->error, "%s: merge %lld is not a pair of strings", l->path, (long long)rank);
        }
        if (failed) break;
    }
    free(scratch.data);
    return failed;
}

/* byte_ids: the tokens of single bytes, or the fallback tokens <0xXX>. */
static void find_byte_tokens(mt_tokenizer *tokenizer) {
    for (int byte = 0; byte < 256; byte++) {
        char name[8] = {(char)byte};
        if (!tokenizer->byte_level) snprintf(name, sizeof name, "<0x%02X>", byte);
        tokenizer->byte_ids[byte] = mt_token_find(tokenizer, name, tokenizer->byte_level ? 1 : 6);
    }
}

static int read_model(loader *l, const json_t *model) {
    mt_tokenizer *tokenizer = l->tokenizer;
    mt_text type = get_text(model, "type"), unknown = get_text(model, "unk_token");
    if (!json_is_object(model)) return mt_error_set(l->error, "%s: has no model", l->path);
    if (type.bytes ? !equals(type, "BPE") : !json_object_get(model, "merges")) return refuse(l, "model", type);
    if (get_text(model, "continuing_subword_prefix").bytes || get_text(model, "end_of_word_suffix").bytes)
        return mt_error_set(l->error, "%s: continuing_subword_prefix and end_of_word_suffix are not supported",
                            l->path);
    if (json_number_value(json_object_get(model, "dropout")) != 0)
        return mt_error_set(l->error, "%s: BPE dropout is not supported; set it to null", l->path);
    tokenizer->kind = MT_KIND_BPE;
    tokenizer->fuse_unknown = get_bool(model, "fuse_unk", false);
    tokenizer->byte_fallback = get_bool(model, "byte_fallback", false);
    tokenizer->ignore_merges = get_bool(model, "ignore_merges", false);
    if (read_vocabulary(l, json_object_get(model, "vocab"))) return -1;
    if (read_merges(l, json_object_get(model, "merges"))) return -1;
    find_byte_tokens(tokenizer);
    if (!json_is_string(json_object_get(model, "unk_token"))) return 0;
    for (int64_t id = 0; id < tokenizer->vocab_size; id++)
        if (l->keys[id] && equals(unknown, l->keys[id])) tokenizer->unknown = (int32_t)id;
    if (tokenizer->unknown < 0)
        return mt_error_set(l->error, "%s: unk_token '%.60s' is not in the vocabulary", l->path, unknown.data);
    return 0;
}

/* ---- added tokens ---------------------------------------------------------------------------------------------- */

/* A token of `normalized` kind is matched in normalized text, so its content is normalized too. */
static int insert_added(mt_encoder *encoder, mt_tokenizer *tokenizer, int32_t index, mt_text content, mt_error *error) {
    bool normalized = tokenizer->added[index].normalized;
    const char *text = content.data;
    int64_t bytes = content.bytes;
    if (normalized && mt_normalize(encoder, &text, &bytes, error)) return -1;
    return bytes ? mt_trie_add(&tokenizer->added_tries[normalized], tokenizer->path, text, bytes, index, error) : 0;
}

static int read_added_token(loader *l, mt_encoder *encoder, const json_t *object) {
    mt_tokenizer *tokenizer = l->tokenizer;
    mt_text content = get_text(object, "content");
    const json_t *id_value = json_object_get(object, "id");
    int64_t id = json_integer_value(id_value);
    if (!json_is_integer(id_value) || !json_is_string(json_object_get(object, "content")))
        return mt_error_set(l->error, "%s: an added token lacks its id or its content", l->path);
    const char *key = id >= 0 && id < l->key_count ? l->keys[id] : NULL;
    if (!key) {
        if (mt_token_add(tokenizer, id, content.data, content.bytes, MT_TOKEN_USER_DEFINED, l->error)) return -1;
    } else if (!equals(content, key)) {
        return mt_error_set(l->error, "%s: added token '%.60s' has id %lld, the id of '%.60s'", l->path, content.data,
                            (long long)id, key);
    }
    mt_token *token = &tokenizer->tokens[id];
    token->type = get_bool(object, "special", false) ? MT_TOKEN_CONTROL : MT_TOKEN_USER_DEFINED;
    mt_added_token *added = &tokenizer->added[tokenizer->added_count];
    *added = (mt_added_token){.id = (int32_t)id,
                              .single_word = get_bool(object, "single_word", false),
                              .lstrip = get_bool(object, "lstrip", false),
                              .rstrip = get_bool(object, "rstrip", false),
                              .normalized = get_bool(object, "normalized", token->type != MT_TOKEN_CONTROL)};
    if (added->single_word && need_utf8proc(l, "an added token with single_word")) return -1;
    return insert_added(encoder, tokenizer, (int32_t)tokenizer->added_count++, content, l->error);
}

static int read_added_tokens(loader *l, const json_t *list) {
    const json_t *object;
    size_t i;
    int failed = 0;
    if (is_missing(list)) return 0;
    l->tokenizer->added = mt_calloc((int64_t)json_array_size(list) * (int64_t)sizeof *l->tokenizer->added);
    mt_encoder *encoder = mt_encoder_open(l->tokenizer);
    json_array_foreach(list, i, object) {
        failed = read_added_token(l, encoder, object);
        if (failed) break;
    }
    mt_encoder_close(encoder);
    return failed;
}

/* ---- decoder --------------------------------------------------------------------------------------------------- */

static int read_decoder(loader *l, mt_rule *step, const json_t *object) {
    mt_tokenizer *tokenizer = l->tokenizer;
    mt_text type = get_text(object, "type"), content = get_text(object, "content");
    const json_t *pattern = json_object_get(object, "pattern");
    step->kind = MT_RULE_FUSE; // also for steps that act on the whole text only
    if (equals(type, "Fuse")) {
        l->fused = true;
    } else if (equals(type, "Strip") && l->fused) {
        int64_t start = json_integer_value(json_object_get(object, "start"));
        if (!equals(content, " ") || start < 0 || start > 1000 || json_integer_value(json_object_get(object, "stop")))
            return mt_error_set(l->error, "%s: the decoder Strip is supported for spaces at the start only", l->path);
        tokenizer->strip_start = (int)start;
    } else if (l->fused) {
        return refuse(l, "decoder after Fuse", type);
    } else if (equals(type, "ByteLevel")) {
        step->kind = MT_RULE_BYTE_LEVEL;
    } else if (equals(type, "ByteFallback")) {
        step->kind = MT_RULE_BYTE_FALLBACK;
    } else if (equals(type, "Metaspace")) {
        if (read_metaspace(l, step, object)) return -1;
        if (step->prefix != MT_PREFIX_NEVER) tokenizer->join = MT_JOIN_METASPACE;
    } else if (equals(type, "Replace") && json_is_string(json_object_get(pattern, "String"))) {
        step->kind = MT_RULE_REPLACE;
        set_content(step, content);
        return read_pattern(l, &step->pattern, pattern);
    } else {
        return refuse(l, "decoder", type);
    }
    return 0;
}

/* The byte of <0xXX>, or -1. */
static int fallback_byte(const mt_text *token) {
    if (token->bytes != 6 || memcmp(token->data, "<0x", 3) || token->data[5] != '>') return -1;
    static const char digits[] = "0123456789abcdef";
    const char *high = memchr(digits, token->data[3] | 0x20, 16), *low = memchr(digits, token->data[4] | 0x20, 16);
    return high && low ? (int)(16 * (high - digits) + (low - digits)) : -1;
}

/* False if the text would be longer than `most` bytes. */
static bool replace_literal(mt_text *out, const mt_text *text, const mt_rule *step, int64_t most) {
    const char *from = text->bytes ? text->data : "", *end = from + text->bytes, *at;
    while (step->pattern.bytes &&
           (at = memmem(from, (size_t)(end - from), step->pattern.source, (size_t)step->pattern.bytes))) {
        if (out->bytes + (at - from) + step->content_bytes > most) return false;
        mt_text_append(out, from, at - from);
        mt_text_append(out, step->content, step->content_bytes);
        from = at + step->pattern.bytes;
    }
    mt_text_append(out, from, end - from);
    return out->bytes <= most;
}

/* Applies one decoder to token[0]; token[1] is scratch. False if the result would be longer than `most` bytes. */
static bool decode_token(mt_text token[2], const mt_rule *step, bool added, int64_t most) {
    token[1].bytes = 0;
    int byte = step->kind == MT_RULE_BYTE_FALLBACK ? fallback_byte(&token[0]) : -1;
    if (step->kind == MT_RULE_REPLACE || step->kind == MT_RULE_METASPACE) {
        if (!replace_literal(&token[1], &token[0], step, most)) return false;
    } else if (byte >= 0) {
        mt_text_append(&token[1], &(char){(char)byte}, 1);
    } else if (step->kind != MT_RULE_BYTE_LEVEL || added ||
               !append_spelled_bytes(&token[1], token[0].data, token[0].bytes)) {
        return true;
    }
    mt_text swap = token[0];
    token[0] = token[1];
    token[1] = swap;
    return true;
}

/* Applies the decoders to every token once, so that decoding only joins the surfaces. */
static int set_surfaces(loader *l, const mt_rule *steps, int count) {
    mt_tokenizer *tokenizer = l->tokenizer;
    mt_text text[2] = {{0}, {0}};
    int64_t most = tokenizer->strings.bytes + MT_TEXT_GROWTH(tokenizer->strings.bytes); // of all strings
    bool fits = true;
    for (int32_t id = 0; id < tokenizer->vocab_size && fits; id++) {
        mt_token *token = &tokenizer->tokens[id];
        if (token->type == MT_TOKEN_ABSENT) continue;
        const char *key = id < l->key_count ? l->keys[id] : NULL;
        text[0].bytes = 0;
        mt_text_append(&text[0], key ? key : mt_token_text(tokenizer, id),
                       key ? (int64_t)strlen(key) : token->text_bytes);
        bool added = token->type != MT_TOKEN_NORMAL;
        for (int i = 0; i < count && fits; i++)
            fits = decode_token(text, &steps[i], added, most - tokenizer->strings.bytes);
        token->surface = tokenizer->strings.bytes;
        token->surface_bytes = (int32_t)text[0].bytes;
        mt_text_append(&tokenizer->strings, text[0].data, text[0].bytes);
    }
    free(text[0].data);
    free(text[1].data);
    if (fits) return 0;
    return mt_error_set(l->error, "%s: its decoders lengthen the texts of its tokens to over %lld bytes; get it again",
                        l->path, (long long)most);
}

static void metaspace_decodes_to_space(mt_rule *step) {
    if (step->kind != MT_RULE_METASPACE) return;
    mt_pattern_free(&step->pattern);
    mt_pattern_literal(&step->pattern, step->content, step->content_bytes);
    step->content[0] = ' ';
    step->content_bytes = 1;
}

static int read_decoders(loader *l, const json_t *decoder) {
    mt_rule steps[MT_MAX_STEPS] = {0};
    int count = 0;
    if (is_missing(decoder)) l->tokenizer->join = MT_JOIN_SPACE;
    int failed = read_steps(l, decoder, "decoders", read_decoder, steps, &count, 0);
    for (int i = 0; i < count && !failed; i++) metaspace_decodes_to_space(&steps[i]);
    if (!failed) failed = set_surfaces(l, steps, count);
    for (int i = 0; i < count; i++) mt_rule_free(&steps[i]);
    return failed;
}

/* ---- BOS and EOD ------------------------------------------------------------------------------------------------- */

static int32_t find_added(const mt_tokenizer *tokenizer, const char *content) {
    int64_t bytes = (int64_t)strlen(content);
    for (int64_t i = 0; i < tokenizer->added_count; i++) {
        int32_t id = tokenizer->added[i].id;
        if (tokenizer->tokens[id].text_bytes == bytes && !memcmp(mt_token_text(tokenizer, id), content, (size_t)bytes))
            return id;
    }
    return -1;
}

/* The token at `key` of tokenizer_config.json (a string, or an object with `content`), or -1. */
static int32_t configured_token(const mt_tokenizer *tokenizer, const json_t *config, const char *key) {
    const json_t *value = json_object_get(config, key);
    mt_text content = json_is_object(value) ? get_text(value, "content") : get_text(config, key);
    int32_t id = find_added(tokenizer, content.data);
    return id >= 0 || !content.bytes ? id : mt_token_find(tokenizer, content.data, content.bytes);
}

static void find_ends(mt_tokenizer *tokenizer, const json_t *config) {
    static const char *const ends[] = {"<|end_of_text|>", "<|endoftext|>",        "</s>", "<eos>", "<|im_end|>",
                                       "<|eot_id|>",      "<｜end▁of▁sentence｜>"};
    static const char *const begins[] = {"<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>"};
    tokenizer->eod = configured_token(tokenizer, config, "eos_token");
    tokenizer->bos = configured_token(tokenizer, config, "bos_token");
    for (size_t i = 0; i < sizeof ends / sizeof *ends && tokenizer->eod < 0; i++)
        tokenizer->eod = find_added(tokenizer, ends[i]);
    for (size_t i = 0; i < sizeof begins / sizeof *begins && tokenizer->bos < 0; i++)
        tokenizer->bos = find_added(tokenizer, begins[i]);
}

/* True if the file puts a space before a text. */
static bool adds_prefix(const mt_tokenizer *tokenizer) {
    for (int i = 0; i < tokenizer->normalizer_steps; i++)
        if (tokenizer->normalizer[i].kind == MT_RULE_PREPEND) return true;
    for (int i = 0; i < tokenizer->pretokenizer_steps; i++) {
        const mt_rule *step = &tokenizer->pretokenizer[i];
        bool may = step->kind == MT_RULE_BYTE_LEVEL || step->kind == MT_RULE_METASPACE;
        if (may && step->prefix != MT_PREFIX_NEVER) return true;
    }
    return false;
}

/* True if a post-processor adds a token behind a text. */
static bool adds_end(const json_t *processor) {
    const json_t *item;
    size_t i;
    bool behind = false, adds = json_is_array(json_object_get(processor, "sep"));
    json_array_foreach(json_object_get(processor, "single"), i, item) {
        adds |= behind && json_object_get(item, "SpecialToken");
        behind |= json_object_get(item, "Sequence") != NULL;
    }
    json_array_foreach(json_object_get(processor, "processors"), i, item) adds |= adds_end(item);
    return adds;
}

/* True for a class of transformers, and for its fast form, which version 5 has no more. */
static bool is_class(const char *name, const char *of) {
    size_t length = strlen(of);
    return strncmp(name, of, length) == 0 && (name[length] == 0 || strcmp(name + length, "Fast") == 0);
}

/* transformers lets add_prefix_space and add_eos_token of tokenizer_config.json change what tokenizer.json says, in the
 * classes that are named here: the first in version 5, the second in version 4. */
static int check_config(const loader *l, const json_t *root, const json_t *config) {
    const json_t *class = json_object_get(config, "tokenizer_class"),
                 *prefix = json_object_get(config, "add_prefix_space");
    const char *name = json_is_string(class) ? json_string_value(class) : "";
    bool is_llama = is_class(name, "LlamaTokenizer");
    bool is_gpt2 = is_class(name, "GPT2Tokenizer") || is_class(name, "Qwen2Tokenizer");
    bool asks = (is_llama && !l->tokenizer->byte_level) || is_gpt2;
    if (asks && json_is_boolean(prefix) && json_is_true(prefix) != adds_prefix(l->tokenizer))
        return mt_error_set(
            l->error,
            "%s: puts %s space before a text, but \"add_prefix_space\" of tokenizer_config.json is %s, by "
            "which %s changes it; make both agree",
            l->path, adds_prefix(l->tokenizer) ? "a" : "no", json_is_true(prefix) ? "true" : "false", name);
    bool ends = is_llama && json_is_true(json_object_get(config, "add_eos_token"));
    if (ends && !adds_end(json_object_get(root, "post_processor")))
        return mt_error_set(
            l->error,
            "%s: adds no token behind a text, but \"add_eos_token\" of tokenizer_config.json is true, by "
            "which %s of transformers 4 does; set that to false, or put the token into the post_processor",
            l->path, name);
    return 0;
}

/* ---- whole files ----------------------------------------------------------------------------------------------- */

static int load_json(loader *l, const json_t *root, const json_t *config) {
    mt_tokenizer *tokenizer = l->tokenizer;
    if (check_parts(l, root)) return -1;
    if (read_steps(l, json_object_get(root, "normalizer"), "normalizers", read_normalizer, tokenizer->normalizer,
                   &tokenizer->normalizer_steps, 0))
        return -1;
    if (read_steps(l, json_object_get(root, "pre_tokenizer"), "pretokenizers", read_pretokenizer,
                   tokenizer->pretokenizer, &tokenizer->pretokenizer_steps, 0))
        return -1;
    if (read_model(l, json_object_get(root, "model"))) return -1;
    if (read_added_tokens(l, json_object_get(root, "added_tokens"))) return -1;
    if (read_decoders(l, json_object_get(root, "decoder"))) return -1;
    mt_tokenizer_find_words(tokenizer);
    find_ends(tokenizer, config);
    return check_config(l, root, config);
}

/* Sets *config to the tokenizer_config.json beside the file at `path`, or to NULL if there is none. */
static int read_config(json_t **config, const char *path, const mt_text *json, mt_error *error) {
    *config = NULL;
    if (!json || !json->bytes) return 0;
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash + 1 - path) : 0;
    char *config_path = mt_malloc(folder + (int64_t)sizeof "tokenizer_config.json");
    sprintf(config_path, "%.*stokenizer_config.json", folder, path);
    *config = parse_json(config_path, json, error);
    int wrong = *config ? mt_tokenizer_config_check(*config, config_path, error) : -1;
    free(config_path);
    if (wrong) json_decref(*config);
    return wrong;
}

int mt_tokenizer_load_json(mt_tokenizer *tokenizer, const char *path, const mt_text *json, const mt_text *config_json,
                           mt_error *error) {
    loader l = {.tokenizer = tokenizer, .path = path, .error = error};
    json_t *config;
    if (read_config(&config, path, config_json, error)) return -1;
    json_t *root = parse_json(path, json, error);
    int failed = root ? load_json(&l, root, config) : -1;
    free(l.keys);
    json_decref(root);
    json_decref(config);
    return failed;
}

/* One merge per line, best first; a line that begins with #version is a comment. */
static int read_merges_file(loader *l, const mt_text *merges) {
    mt_text scratch = {0};
    int64_t rank = 0;
    int failed = 0;
    const char *line = merges->bytes ? merges->data : "", *end = line + merges->bytes, *next;
    for (; line < end && !failed; line = next) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        next = stop ? stop + 1 : end;
        int64_t bytes = (stop ? stop : end) - line;
        if (bytes && line[bytes - 1] == '\r') bytes--;
        if (!bytes || (bytes >= 8 && !memcmp(line, "#version", 8))) continue;
        failed = add_merge_line(l, &scratch, rank++, line, bytes);
    }
    free(scratch.data);
    return failed;
}

static int load_gpt2(loader *l, json_t *vocabulary, const char *merges_path, const mt_text *merges) {
    mt_tokenizer *tokenizer = l->tokenizer;
    const mt_text end_of_text = {"<|endoftext|>", 13, 0};
    tokenizer->kind = MT_KIND_BPE;
    tokenizer->byte_level = true;
    mt_rule *step = &tokenizer->pretokenizer[tokenizer->pretokenizer_steps++];
    if (set_regex(l, step, MT_ISOLATED, mt_gpt2_pattern)) return -1;
    if (read_vocabulary(l, vocabulary)) return -1;
    find_byte_tokens(tokenizer);
    int32_t eod = mt_token_find(tokenizer, end_of_text.data, end_of_text.bytes);
    if (eod >= 0) {
        tokenizer->tokens[eod].type = MT_TOKEN_CONTROL;
        tokenizer->added = mt_calloc(sizeof *tokenizer->added);
        tokenizer->added[tokenizer->added_count++] = (mt_added_token){.id = eod};
        mt_trie_insert(&tokenizer->added_tries[0], end_of_text.data, end_of_text.bytes, 0);
    }
    tokenizer->eod = eod;
    if (set_surfaces(l, &(mt_rule){.kind = MT_RULE_BYTE_LEVEL}, 1) != 0) return -1;
    l->path = merges_path;
    return read_merges_file(l, merges);
}

int mt_tokenizer_load_gpt2(mt_tokenizer *tokenizer, const char *vocab_path, const mt_text *vocab,
                           const char *merges_path, const mt_text *merges, mt_error *error) {
    loader l = {.tokenizer = tokenizer, .path = vocab_path, .error = error};
    json_t *root = parse_json(vocab_path, vocab, error);
    int failed = root ? load_gpt2(&l, root, merges_path, merges) : -1;
    free(l.keys);
    json_decref(root);
    return failed;
}

/* ---- tiktoken.model: a line for each token, its bytes in base64 and its rank. The rank is the id, and two neighbours
 * merge wherever their bytes are a token, the lowest rank first. --------------------------------------------------- */

/* Kimi's and Moonlight's pattern (pat_str of their tokenization code). PCRE2 has no intersection of classes, so a
 * look-ahead keeps Han characters out; HAN is their script alone, as in Rust, without the punctuation that other
 * scripts share. */
#define KIMI_LETTERS(han, letters) "(?:(?!" han ")[" letters "\\p{Lm}\\p{Lo}\\p{M}])"
#define KIMI_PATTERN(han)                                                                                              \
    han "+"                                                                                                            \
        "|[^\\r\\n\\p{L}\\p{N}]?" KIMI_LETTERS(han, "\\p{Lu}\\p{Lt}") "*" KIMI_LETTERS(                                \
            han,                                                                                                       \
            "\\p{Ll}") "+"                                                                                             \
                       "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"                                                                 \
                       "|[^\\r\\n\\p{L}\\p{N}]?" KIMI_LETTERS(han, "\\p{Lu}\\p{Lt}") "+" KIMI_LETTERS(                 \
                           han,                                                                                        \
                           "\\p{Ll}") "*"                                                                              \
                                      "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"                                                  \
                                      "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

enum {
    KIMI_SPECIAL_TOKENS = 256,     // ids behind the ranks, named by tokenizer_config.json or reserved
    MAX_RANKED_TOKEN_BYTES = 2048, // all cuts of a token are looked up; those of Kimi are shorter than 200
};

/* PCRE2 before 10.40 has no sc:, and there \p{Han} means the script. */
static int set_kimi_pattern(loader *l) {
    mt_rule *step = &l->tokenizer->pretokenizer[l->tokenizer->pretokenizer_steps++];
    mt_error unknown, *error = l->error;
    l->error = &unknown;
    int failed = set_regex(l, step, MT_ISOLATED, KIMI_PATTERN("\\p{sc:Han}"));
    l->error = error;
    return failed ? set_regex(l, step, MT_ISOLATED, KIMI_PATTERN("\\p{Han}")) : 0;
}

bool mt_base64_append(mt_text *out, const char *text, int64_t bytes) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (bytes == 0 || bytes % 4 != 0) return false;
    int64_t padding = text[bytes - 1] != '=' ? 0 : text[bytes - 2] != '=' ? 1 : 2;
    uint32_t bits = 0;
    for (int64_t i = 0; i < bytes; i++) {
        const char *digit = text[i] ? strchr(digits, text[i]) : NULL;
        if (!digit && i < bytes - padding) return false;
        bits = bits << 6 | (digit ? (uint32_t)(digit - digits) : 0);
        if (i % 4 != 3) continue;
        char three[] = {(char)(bits >> 16), (char)(bits >> 8), (char)bits};
        mt_text_append(out, three, i + 1 < bytes ? 3 : 3 - padding);
    }
    return true;
}

/* Adds the token of a line. */
static int add_ranked_token(loader *l, mt_text *scratch, int64_t number, const char *line, int64_t bytes) {
    const char *space = memchr(line, ' ', (size_t)bytes);
    int64_t rank = 0, digits = space ? line + bytes - space - 1 : 0;
    scratch->bytes = 0;
    bool good = digits > 0 && digits < 10 && mt_base64_append(scratch, line, space - line);
    for (int64_t i = 1; i <= digits && good; i++) {
        good = space[i] >= '0' && space[i] <= '9';
        rank = 10 * rank + (space[i] - '0');
    }
    if (!good)
        return mt_error_set(l->error, "%s:%lld: is not a token in base64, a space and a rank; get the file again",
                            l->path, (long long)number);
    if (scratch->bytes > MAX_RANKED_TOKEN_BYTES)
        return mt_error_set(l->error, "%s:%lld: has a token of %lld bytes, more than %d; get the file again", l->path,
                            (long long)number, (long long)scratch->bytes, (int)MAX_RANKED_TOKEN_BYTES);
    if (mt_token_add(l->tokenizer, rank, scratch->data, scratch->bytes, MT_TOKEN_NORMAL, l->error)) return -1;
    if (mt_token_index(l->tokenizer, (int32_t)rank) == (int32_t)rank) return 0;
    return mt_error_set(l->error, "%s:%lld: the token of rank %lld has another rank too; get the file again", l->path,
                        (long long)number, (long long)rank);
}

static int read_ranks(loader *l, const mt_text *model) {
    mt_text scratch = {0};
    int64_t number = 1, tokens = 0;
    int failed = 0;
    const char *line = model->bytes ? model->data : "", *end = line + model->bytes, *next;
    for (; line < end && !failed; line = next, number++) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        next = stop ? stop + 1 : end;
        int64_t bytes = (stop ? stop : end) - line;
        if (bytes && line[bytes - 1] == '\r') bytes--;
        if (!bytes) continue;
        failed = add_ranked_token(l, &scratch, number, line, bytes);
        tokens++;
    }
    free(scratch.data);
    if (!failed && tokens != l->tokenizer->vocab_size)
        return mt_error_set(l->error, "%s: has %lld tokens, and ranks up to %lld; get the file again", l->path,
                            (long long)tokens, (long long)l->tokenizer->vocab_size - 1);
    return failed;
}

/* All pairs of tokens whose bytes together are a token. */
static void add_ranked_merges(mt_tokenizer *tokenizer) {
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        const char *text = mt_token_text(tokenizer, id);
        int64_t bytes = tokenizer->tokens[id].text_bytes;
        for (int64_t at = 1; at < bytes; at++) {
            int32_t left = mt_token_find(tokenizer, text, at);
            int32_t right = left < 0 ? -1 : mt_token_find(tokenizer, text + at, bytes - at);
            if (right >= 0) merge_add(tokenizer, left, right, id, id);
        }
    }
}

/* The added tokens as tokenizer.json lists them: those of added_tokens_decoder, and the ids that it leaves reserved. */
static json_t *list_special_tokens(loader *l, const json_t *named) {
    json_t *list = json_array(), *value;
    const char *key;
    int64_t first = l->tokenizer->vocab_size;
    json_object_foreach((json_t *)named, key, value) {
        char *end;
        long long id = strtoll(key, &end, 10);
        if (!*key || *end || id < first || id >= MT_MAX_VOCAB || !json_is_object(value)) {
            mt_error_set(l->error,
                         "%s: \"added_tokens_decoder\" of tokenizer_config.json has '%.40s', and must have ids of %lld "
                         "or more with objects",
                         l->path, key, (long long)first);
            json_decref(list);
            return NULL;
        }
        json_t *token = json_copy(value);
        json_object_set_new(token, "id", json_integer(id));
        json_array_append_new(list, token);
    }
    for (int64_t id = first; id < first + KIMI_SPECIAL_TOKENS; id++) {
        char number[24], name[48];
        snprintf(number, sizeof number, "%lld", (long long)id);
        snprintf(name, sizeof name, "<|reserved_token_%lld|>", (long long)id);
        if (json_object_get(named, number)) continue;
        json_array_append_new(list, json_pack("{s:s, s:b, s:I}", "content", name, "special", 1, "id", (json_int_t)id));
    }
    return list;
}

static int load_tiktoken(loader *l, const mt_text *model, const json_t *config) {
    mt_tokenizer *tokenizer = l->tokenizer;
    mt_text class = get_text(config, "tokenizer_class");
    if (class.bytes && !equals(class, "TikTokenTokenizer"))
        return mt_error_set(l->error,
                            "%s: \"tokenizer_class\" of tokenizer_config.json is %.60s, whose words are not known; "
                            "TikTokenTokenizer is supported, which Kimi and Moonlight have",
                            l->path, class.data);
    tokenizer->kind = MT_KIND_BPE;
    tokenizer->byte_level = tokenizer->ignore_merges = true;
    if (set_kimi_pattern(l) || read_ranks(l, model)) return -1;
    find_byte_tokens(tokenizer);
    for (int byte = 0; byte < 256; byte++)
        if (tokenizer->byte_ids[byte] < 0)
            return mt_error_set(l->error, "%s: has no token for the byte %d; get the file again", l->path, byte);
    add_ranked_merges(tokenizer);
    json_t *special = list_special_tokens(l, json_object_get(config, "added_tokens_decoder"));
    int failed = special ? read_added_tokens(l, special) : -1;
    json_decref(special);
    if (!failed) find_ends(tokenizer, config);
    return failed;
}

int mt_tokenizer_load_tiktoken(mt_tokenizer *tokenizer, const char *path, const mt_text *model,
                               const mt_text *config_json, mt_error *error) {
    loader l = {.tokenizer = tokenizer, .path = path, .error = error};
    json_t *config;
    if (read_config(&config, path, config_json, error)) return -1;
    int failed = load_tiktoken(&l, model, config);
    json_decref(config);
    return failed;
}
