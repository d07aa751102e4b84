/* tokenizer_tiktoken.c: vocabularies of tiktoken as Megatron-LM's TikTokenizer stores them, written as tokenizer.json.
 */
#include "tokenizer_tiktoken.h"

#include "../base/file.h"
#include "tokenizer_json.h"
#include "tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

/* Megatron-LM's two patterns. */
static const char pattern_v1[] =
    "[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+";
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
static const char pattern_v2[] = "[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]*[" LOWER "]+|[^\\r\\n\\p{L}\\p{N}]?[" UPPER
                                 "]+[" LOWER "]*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* The name of a special token. */
static void print_special(char name[32], int64_t id) {
    static const char *const first[] = {"<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"};
    int64_t named = (int64_t)(sizeof first / sizeof *first);
    if (id < named)
        snprintf(name, 32, "%s", first[id]);
    else
        snprintf(name, 32, "<SPECIAL_%lld>", (long long)id);
}

/* Bytes as byte-level BPE writes them: printable ones of Latin-1 as themselves, the others from U+0100 on. */
static void write_bytes(mt_text *out, const char *bytes, int64_t count) {
    out->bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        int byte = (unsigned char)bytes[i], code = byte;
        if (byte <= 32) code = 256 + byte;
        if (byte >= 127 && byte <= 160) code = 256 + 33 + byte - 127;
        if (byte == 173) code = 256 + 33 + 34;
        char utf8[2] = {(char)code};
        if (code >= 128) utf8[0] = (char)(0xc0 | code >> 6), utf8[1] = (char)(0x80 | (code & 63));
        mt_text_append(out, utf8, code < 128 ? 1 : 2);
    }
    mt_text_append(out, "", 1), out->bytes--;
}

/* Reads the ranks into a table of tokens, whose ids are ranks. */
static int read_table(mt_tokenizer *table, const char *path, const json_t *ranks, int64_t count, mt_error *error) {
    mt_text bytes = {0};
    int status = 0;
    for (int64_t rank = 0; rank < count && status == 0; rank++) {
        const json_t *row = json_array_get(ranks, (size_t)rank);
        const char *text = json_string_value(json_object_get(row, "token_bytes"));
        int64_t own = -1;
        bytes.bytes = 0;
        bool good = mt_json_int(json_object_get(row, "rank"), rank, rank, &own) && text &&
                    mt_base64_append(&bytes, text, (int64_t)strlen(text));
        if (good && rank < 256) good = bytes.bytes == 1 && (unsigned char)bytes.data[0] == rank;
        if (good) status = mt_token_add(table, rank, bytes.data, bytes.bytes, MT_TOKEN_NORMAL, error);
        if (good && status == 0) good = mt_token_index(table, (int32_t)rank) == (int32_t)rank;
        if (!good)
            status = mt_error_set(error,
                                  "%s: entry %lld is not {\"rank\": %lld, \"token_bytes\": base64 of a new token}, or "
                                  "not the byte %lld of the first 256; get the file again",
                                  path, (long long)rank, (long long)rank, (long long)rank);
    }
    free(bytes.data);
    return status;
}

/* All pairs of tokens whose bytes together are a token: those of a lower rank merge first. */
static json_t *list_merges(const mt_tokenizer *table, int64_t count) {
    json_t *merges = json_array();
    mt_text left = {0}, right = {0};
    for (int32_t id = 0; id < count; id++) {
        const char *text = mt_token_text(table, id);
        int64_t bytes = table->tokens[id].text_bytes;
        for (int64_t at = 1; at < bytes; at++) {
            int32_t first = mt_token_find(table, text, at);
            if (first < 0 || mt_token_find(table, text + at, bytes - at) < 0) continue;
            write_bytes(&left, text, at), write_bytes(&right, text + at, bytes - at);
            json_array_append_new(merges, json_pack("[s, s]", left.data, right.data));
        }
    }
    free(left.data), free(right.data);
    return merges;
}

/* Special tokens, then the ranks. *twice: a name that both have, or "". */
static json_t *list_vocabulary(const mt_tokenizer *table, int64_t specials, int64_t count, char twice[32]) {
    json_t *vocab = json_object();
    mt_text text = {0};
    *twice = 0;
    for (int64_t id = 0; id < specials; id++) {
        char name[32];
        print_special(name, id);
        if (mt_token_find(table, name, (int64_t)strlen(name)) >= 0) snprintf(twice, 32, "%s", name);
        json_object_set_new(vocab, name, json_integer(id));
    }
    for (int32_t id = 0; id < count; id++) {
        write_bytes(&text, mt_token_text(table, id), table->tokens[id].text_bytes);
        json_object_set_new(vocab, text.data, json_integer(specials + id));
    }
    free(text.data);
    return vocab;
}

static json_t *list_specials(int64_t specials) {
    json_t *list = json_array();
    for (int64_t id = 0; id < specials; id++) {
        char name[32];
        print_special(name, id);
        json_array_append_new(list,
                              json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)id, "content", name,
                                        "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
    }
    return list;
}

static char *write_json(const mt_tokenizer *table, const char *path, const mt_tiktoken_settings *settings,
                        int64_t count, mt_error *error) {
    char twice[32];
    const char *pattern = settings->pattern == MT_TIKTOKEN_V1 ? pattern_v1 : pattern_v2;
    json_t *vocab = list_vocabulary(table, settings->num_special_tokens, count, twice);
    json_t *level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
                              "use_regex", 0);
    json_t *split = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", pattern, "behavior",
                              "Isolated", "invert", 0);
    json_t *model =
        json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout", "unk_token",
                  "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges",
                  1, "vocab", vocab, "merges", list_merges(table, count));
    json_t *json = json_pack("{s:s, s:n, s:n, s:o, s:n, s:{s:s, s:[o, O]}, s:n, s:o, s:o}", "version", "1.0",
                             "truncation", "padding", "added_tokens", list_specials(settings->num_special_tokens),
                             "normalizer", "pre_tokenizer", "type", "Sequence", "pretokenizers", split, level,
                             "post_processor", "decoder", level, "model", model);
    char *text = *twice ? NULL : json_dumps(json, JSON_COMPACT);
    if (*twice)
        mt_error_set(error, "%s: has a token that is written %s, as a special token; convert it to tokenizer.json",
                     path, twice);
    json_decref(json);
    return text;
}

char *mt_tiktoken_convert(mt_tokenizer *table, const char *path, const mt_text *ranks,
                          const mt_tiktoken_settings *settings, mt_error *error) {
    int64_t count = settings->vocab_size - settings->num_special_tokens;
    json_error_t why;
    json_t *list = json_loadb(ranks->bytes ? ranks->data : "", (size_t)ranks->bytes, JSON_ALLOW_NUL, &why);
    if (!list) {
        mt_error_set(error, "%s:%d: not JSON, or damaged: %s; get the file again", path, why.line, why.text);
        return NULL;
    }
    char *text = NULL;
    int64_t given = (int64_t)json_array_size(list);
    if (!json_is_array(list))
        mt_error_set(error, "%s: is no list of ranks of tiktoken; give --tokenizer-type TikTokenizer such a JSON file",
                     path);
    else if (count < 256 || count > given)
        mt_error_set(error,
                     "%s: has %lld ranks, and a vocabulary of %lld with %lld special tokens needs %lld, and 256 at "
                     "least; give --vocab-size and --tiktoken-num-special-tokens",
                     path, (long long)given, (long long)settings->vocab_size, (long long)settings->num_special_tokens,
                     (long long)count);
    else if (read_table(table, path, list, count, error) == 0)
        text = write_json(table, path, settings, count, error);
    json_decref(list);
    return text;
}
