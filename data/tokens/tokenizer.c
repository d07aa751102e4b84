/* tokenizer.c: opens, saves and closes tokenizers, and decodes ids to text. */
#include "tokenizer.h"

#include "../base/file.h"
#include "tokenizer_encode.h"
#include "tokenizer_json.h"
#include "tokenizer_tiktoken.h"
#include "tokenizer_sentencepiece.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BYTE_LEVEL_MARKER "{\n  \"tokenizer_class\": \"ByteLevel\"\n}\n"

/* ---- files ----------------------------------------------------------------------------------------------------- */

static bool is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static mt_file *add_file(mt_tokenizer *tokenizer, const char *name) {
    int64_t count = tokenizer->file_count + 1;
    tokenizer->files = mt_realloc(tokenizer->files, count * (int64_t)sizeof *tokenizer->files);
    tokenizer->files[tokenizer->file_count] = (mt_file){.name = mt_strdup(name)};
    return &tokenizer->files[tokenizer->file_count++];
}

static const mt_file *find_file(const mt_tokenizer *tokenizer, const char *name) {
    for (int i = 0; i < tokenizer->file_count; i++)
        if (strcmp(tokenizer->files[i].name, name) == 0) return &tokenizer->files[i];
    return NULL;
}

/* Reads a file and keeps it under its name in a model folder. `named`: the user named the file, not only its folder. */
static int keep_file(mt_tokenizer *tokenizer, const char *path, const char *name, bool named, mt_error *error) {
    mt_file *file = add_file(tokenizer, name);
    file->outside = named ? NULL : mt_link_outside(path);
    file->content.data = mt_file_read(path, MT_MAX_TEXT, &file->content.bytes, error);
    file->content.capacity = file->content.bytes + 1;
    return file->content.data ? 0 : -1;
}

/* ---- opening --------------------------------------------------------------------------------------------------- */

mt_tokenizer *mt_tokenizer_new(const char *path) {
    mt_tokenizer *tokenizer = mt_calloc(sizeof *tokenizer);
    tokenizer->path = mt_strdup(path);
    tokenizer->eod = tokenizer->bos = tokenizer->unknown = -1;
    memset(tokenizer->byte_ids, -1, sizeof tokenizer->byte_ids);
    mt_text_append(&tokenizer->strings, "", 1); // an empty token has an address too
    return tokenizer;
}

void mt_tokenizer_close(mt_tokenizer *tokenizer) {
    if (!tokenizer) return;
    for (int i = 0; i < MT_MAX_STEPS; i++) {
        mt_rule_free(&tokenizer->normalizer[i]);
        mt_rule_free(&tokenizer->pretokenizer[i]);
    }
    for (int i = 0; i < tokenizer->file_count; i++) {
        free(tokenizer->files[i].name);
        free(tokenizer->files[i].outside);
        free(tokenizer->files[i].content.data);
    }
    free(tokenizer->files);
    mt_trie_free(&tokenizer->added_tries[0]);
    mt_trie_free(&tokenizer->added_tries[1]);
    mt_trie_free(&tokenizer->pieces);
    mt_trie_free(&tokenizer->user_defined);
    free(tokenizer->rules.units);
    free(tokenizer->rules.replacements);
    free(tokenizer->merges.slots);
    free(tokenizer->added);
    free(tokenizer->lookup);
    free(tokenizer->strings.data);
    free(tokenizer->tokens);
    free(tokenizer->path);
    free(tokenizer);
}

static int open_bytes(mt_tokenizer *tokenizer) {
    tokenizer->kind = MT_KIND_BYTES;
    tokenizer->eod = 256;
    mt_error ignored;
    for (int id = 0; id < 256; id++) mt_token_add(tokenizer, id, &(char){(char)id}, 1, MT_TOKEN_NORMAL, &ignored);
    mt_token_add(tokenizer, 256, "", 0, MT_TOKEN_CONTROL, &ignored);
    mt_file *marker = add_file(tokenizer, "tokenizer_config.json");
    mt_text_append(&marker->content, BYTE_LEVEL_MARKER, (int64_t)strlen(BYTE_LEVEL_MARKER));
    return 0;
}

/* The folder of a file, to free. */
static char *folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder = mt_strdup(slash ? path : ".");
    if (slash) folder[slash - path] = 0;
    return folder;
}

/* Keeps a file of a folder, if it is there and not kept yet. */
static int keep_beside(mt_tokenizer *tokenizer, const char *folder, const char *name, mt_error *error) {
    char *beside = mt_path_join(folder, name);
    int failed = mt_link_check(folder, name, error);
    if (!failed && mt_folder_has(folder, name) && !find_file(tokenizer, name))
        failed = keep_file(tokenizer, beside, name, false, error);
    free(beside);
    return failed;
}

/* Files beside the tokenizer's own that belong to it: the tokens that begin and end texts, templates of conversations,
 * sizes of pictures, and the forms that other programs read. transformers keeps further templates in a folder. */
static const char *const beside[] = {"tokenizer_config.json",   "chat_template.jinja", "chat_template.json",
                                     "special_tokens_map.json", "added_tokens.json",   "processor_config.json",
                                     "preprocessor_config.json"};
static const char *const other_forms[] = {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
                                          "tiktoken.model"};
/* The code by which transformers reads tiktoken.model. */
static const char *const tiktoken_code[] = {"tokenization_kimi.py", "tokenization_moonshot.py",
                                            "tool_declaration_ts.py"};
#define TEMPLATES "additional_chat_templates"

typedef struct templates {
    mt_tokenizer *tokenizer;
    const char *folder; // of the tokenizer
    mt_error *error;
} templates;

static int keep_template(const char *folder, const char *name, void *context) {
    templates *t = context;
    char inner[300];
    (void)folder;
    if (!mt_text_ends_with(name, ".jinja")) return 0;
    if (strlen(name) > 200 || strpbrk(name, "\"\\\n"))
        return mt_error_set(t->error, "%s/" TEMPLATES "/%.200s: cannot be saved under this name; rename it", t->folder,
                            name);
    snprintf(inner, sizeof inner, TEMPLATES "/%s", name);
    return keep_beside(t->tokenizer, t->folder, inner, t->error);
}

static int keep_all_beside(mt_tokenizer *tokenizer, const char *folder, mt_error *error) {
    char *path = mt_path_join(folder, TEMPLATES);
    templates t = {tokenizer, folder, error};
    int failed = 0;
    for (size_t i = 0; i < sizeof beside / sizeof *beside && !failed; i++)
        failed = keep_beside(tokenizer, folder, beside[i], error);
    // a reader takes tokenizer.json where there are several, so that the others may stand beside it
    for (size_t i = 0; i < sizeof other_forms / sizeof *other_forms && !failed; i++)
        if (tokenizer->in_folder && find_file(tokenizer, "tokenizer.json"))
            failed = keep_beside(tokenizer, folder, other_forms[i], error);
    if (!failed && is_folder(path)) failed = mt_folder_visit(path, keep_template, &t);
    free(path);
    return failed;
}

static int open_json(mt_tokenizer *tokenizer, const char *path, mt_error *error) {
    if (keep_file(tokenizer, path, "tokenizer.json", !tokenizer->in_folder, error)) return -1;
    char *folder = folder_of(path);
    int failed = keep_beside(tokenizer, folder, "tokenizer_config.json", error);
    const mt_file *config = find_file(tokenizer, "tokenizer_config.json");
    if (!failed)
        failed = mt_tokenizer_load_json(tokenizer, path, &tokenizer->files[0].content, config ? &config->content : NULL,
                                        error);
    free(folder);
    return failed;
}

static int open_tiktoken(mt_tokenizer *tokenizer, const char *path, mt_error *error) {
    if (keep_file(tokenizer, path, "tiktoken.model", !tokenizer->in_folder, error)) return -1;
    char *folder = folder_of(path);
    int failed = keep_beside(tokenizer, folder, "tokenizer_config.json", error);
    for (size_t i = 0; i < sizeof tiktoken_code / sizeof *tiktoken_code && !failed; i++)
        failed = keep_beside(tokenizer, folder, tiktoken_code[i], error);
    const mt_file *config = find_file(tokenizer, "tokenizer_config.json");
    if (!failed)
        failed = mt_tokenizer_load_tiktoken(tokenizer, path, &tokenizer->files[0].content,
                                            config ? &config->content : NULL, error);
    free(folder);
    return failed;
}

static int open_sentencepiece(mt_tokenizer *tokenizer, const char *path, mt_error *error) {
    if (keep_file(tokenizer, path, "tokenizer.model", !tokenizer->in_folder, error)) return -1;
    return mt_tokenizer_load_sentencepiece(tokenizer, path, &tokenizer->files[0].content, error);
}

static int open_vocab_and_merges(mt_tokenizer *tokenizer, const char *vocab, const char *merges, mt_error *error) {
    bool named = !tokenizer->in_folder;
    if (keep_file(tokenizer, vocab, "vocab.json", named, error)) return -1;
    if (keep_file(tokenizer, merges, "merges.txt", named, error)) return -1;
    return mt_tokenizer_load_gpt2(tokenizer, vocab, &tokenizer->files[0].content, merges, &tokenizer->files[1].content,
                                  error);
}

bool mt_vocab_is_word_list(const char *path) {
    char first = 0;
    int64_t bytes;
    mt_error ignored;
    int descriptor = mt_file_open(path, &bytes, &ignored);
    bool is_read = descriptor >= 0 && bytes > 0 && mt_file_read_at(descriptor, &first, 1, 0) == 0;
    if (descriptor >= 0) close(descriptor);
    return is_read ? !strchr("{ \t\r\n\xef", first) : mt_text_ends_with(path, ".txt"); // \xef: of a byte order mark
}

/* `path` is "VOCAB,MERGES", or .../Xvocab.json with .../Xmerges.txt beside it. */
static int open_gpt2(mt_tokenizer *tokenizer, const char *path, mt_error *error) {
    char *vocab = mt_strdup(path), *merges = NULL, *comma = strchr(vocab, ',');
    const char *ending = "vocab.json";
    int64_t stem = (int64_t)strlen(path) - (int64_t)strlen(ending);
    if (comma) {
        *comma = 0;
        merges = mt_strdup(comma + 1);
    } else if (stem >= 0 && !strcmp(path + stem, ending)) {
        merges = mt_malloc(stem + 11);
        snprintf(merges, (size_t)stem + 11, "%.*smerges.txt", (int)stem, path);
    }
    int failed = merges ? open_vocab_and_merges(tokenizer, vocab, merges, error)
                        : mt_error_set(error,
                                       "%s: give GPT2BPETokenizer a folder, VOCAB.json,MERGES.txt, or a file whose "
                                       "name ends in vocab.json with merges.txt beside it",
                                       path);
    free(vocab);
    free(merges);
    return failed;
}

/* Opens folder/name by `open`. */
static int open_in(mt_tokenizer *tokenizer, const char *folder, const char *name,
                   int (*open)(mt_tokenizer *, const char *, mt_error *), mt_error *error) {
    char *path = mt_path_join(folder, name);
    free(tokenizer->path);
    tokenizer->path = mt_strdup(path);
    tokenizer->in_folder = true;
    int failed = open(tokenizer, path, error);
    free(path);
    return failed;
}

/* tokenizer.json, or tiktoken.model where a folder has no other. */
static int open_huggingface(mt_tokenizer *tokenizer, const char *path, bool folder, mt_error *error) {
    bool ranks = folder ? !mt_folder_has(path, "tokenizer.json") && mt_folder_has(path, "tiktoken.model")
                        : mt_text_ends_with(path, "tiktoken.model");
    if (folder && ranks) return open_in(tokenizer, path, "tiktoken.model", open_tiktoken, error);
    if (folder && !mt_folder_has(path, "tokenizer.json") && mt_folder_has(path, "tokenizer.model"))
        return mt_error_set(error,
                            "%s: has tokenizer.model and no tokenizer.json; give --tokenizer-type "
                            "SentencePieceTokenizer, or Llama2Tokenizer for its BOS",
                            path);
    if (folder) return open_in(tokenizer, path, "tokenizer.json", open_json, error);
    return ranks ? open_tiktoken(tokenizer, path, error) : open_json(tokenizer, path, error);
}

static int finish_open(mt_tokenizer **out, mt_tokenizer *tokenizer, int failed) {
    if (failed) mt_tokenizer_close(tokenizer);
    *out = failed ? NULL : tokenizer;
    return failed ? -1 : 0;
}

int mt_tokenizer_open(mt_tokenizer **out, mt_tokenizer_type type, const char *path, mt_error *error) {
    *out = NULL;
    bool bytes = type == MT_TOKENIZER_BYTE_LEVEL;
    if (type == MT_TOKENIZER_AUTO) return mt_tokenizer_open_folder(out, path, error);
    const mt_tiktoken_settings usual = {MT_TIKTOKEN_V2, 1000, 131072};
    if (type == MT_TOKENIZER_TIKTOKEN && path) return mt_tokenizer_open_tiktoken(out, path, &usual, error);
    if (!bytes && (!path || !*path))
        return mt_error_set(error, "--tokenizer-type needs --tokenizer-model, the tokenizer's file or folder, unless "
                                   "it is ByteLevel");
    mt_tokenizer *tokenizer = mt_tokenizer_new(bytes ? "ByteLevel" : path);
    bool folder = !bytes && is_folder(path);
    int failed;
    if (bytes)
        failed = open_bytes(tokenizer);
    else if (type == MT_TOKENIZER_HUGGINGFACE)
        failed = open_huggingface(tokenizer, path, folder, error);
    else if (type == MT_TOKENIZER_SENTENCEPIECE)
        failed = folder ? open_in(tokenizer, path, "tokenizer.model", open_sentencepiece, error)
                        : open_sentencepiece(tokenizer, path, error);
    else
        failed = folder ? open_in(tokenizer, path, "vocab.json", open_gpt2, error) : open_gpt2(tokenizer, path, error);
    char *place = folder_of(tokenizer->path);
    if (!failed && !bytes) failed = keep_all_beside(tokenizer, place, error); // a saved model must have them too
    free(place);
    return finish_open(out, tokenizer, failed);
}

int mt_tokenizer_open_tiktoken(mt_tokenizer **out, const char *path, const mt_tiktoken_settings *settings,
                               mt_error *error) {
    *out = NULL;
    mt_tokenizer *tokenizer = mt_tokenizer_new(path);
    int failed = keep_file(tokenizer, path, "tokenizer.json", true, error);
    mt_text *kept = &tokenizer->files[0].content;
    mt_tokenizer *table = mt_tokenizer_new(path);
    char *json = failed ? NULL : mt_tiktoken_convert(table, path, kept, settings, error);
    mt_tokenizer_close(table);
    if (!json) return finish_open(out, tokenizer, -1);
    free(kept->data);
    *kept = (mt_text){json, (int64_t)strlen(json), (int64_t)strlen(json) + 1};
    return finish_open(out, tokenizer, mt_tokenizer_load_json(tokenizer, path, kept, NULL, error));
}

static bool has_byte_level_marker(const char *folder) {
    mt_error ignored; // a damaged file is reported where a tokenizer reads it
    char *path = mt_path_join(folder, "tokenizer_config.json");
    json_t *config = mt_json_read(path, &ignored);
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));
    bool found = class && !strcmp(class, "ByteLevel");
    json_decref(config);
    free(path);
    return found;
}

int mt_tokenizer_open_folder(mt_tokenizer **out, const char *folder, mt_error *error) {
    *out = NULL;
    if (has_byte_level_marker(folder)) return mt_tokenizer_open(out, MT_TOKENIZER_BYTE_LEVEL, NULL, error);
    if (mt_folder_has(folder, "tokenizer.json")) return mt_tokenizer_open(out, MT_TOKENIZER_HUGGINGFACE, folder, error);
    if (mt_folder_has(folder, "tokenizer.model"))
        return mt_tokenizer_open(out, MT_TOKENIZER_SENTENCEPIECE, folder, error);
    if (mt_folder_has(folder, "vocab.json") && mt_folder_has(folder, "merges.txt"))
        return mt_tokenizer_open(out, MT_TOKENIZER_GPT2_BPE, folder, error);
    if (mt_folder_has(folder, "tiktoken.model")) return mt_tokenizer_open(out, MT_TOKENIZER_HUGGINGFACE, folder, error);
    for (size_t i = 0; i < sizeof other_forms / sizeof *other_forms; i++)
        if (mt_link_check(folder, other_forms[i], error) != 0) return -1;
    return mt_error_set(error,
                        "%s: holds no tokenizer (tokenizer.json, tokenizer.model, tiktoken.model, or vocab.json and "
                        "merges.txt); copy one there, or name one with --tokenizer-type and --tokenizer-model",
                        folder);
}

bool mt_folder_has_tokenizer(const char *folder) {
    mt_error ignored;
    for (size_t i = 0; i < sizeof other_forms / sizeof *other_forms; i++)
        if (mt_link_check(folder, other_forms[i], &ignored) != 0) return true; // that is, not whole
    bool merges = mt_folder_has(folder, "vocab.json") && mt_folder_has(folder, "merges.txt");
    return merges || mt_folder_has(folder, "tokenizer.json") || mt_folder_has(folder, "tokenizer.model") ||
           mt_folder_has(folder, "tiktoken.model");
}

int mt_tokenizer_keep_folder(mt_tokenizer **out, const char *folder, mt_error *error) {
    mt_tokenizer *tokenizer = mt_tokenizer_new(folder);
    int failed = 0;
    for (size_t i = 0; i < sizeof other_forms / sizeof *other_forms && !failed; i++)
        failed = keep_beside(tokenizer, folder, other_forms[i], error);
    if (!failed) failed = keep_all_beside(tokenizer, folder, error);
    for (int i = 0; i < tokenizer->file_count && !failed; i++) {
        const mt_file *file = &tokenizer->files[i];
        if (!mt_text_ends_with(file->name, ".json")) continue;
        char *path = mt_path_join(folder, file->name);
        json_t *json = mt_json_parse(file->content.bytes ? file->content.data : "", file->content.bytes, JSON_ALLOW_NUL,
                                     path, error);
        failed = json ? 0 : -1;
        json_decref(json);
        free(path);
    }
    return finish_open(out, tokenizer, failed);
}

int mt_tokenizer_check_links(const mt_tokenizer *tokenizer, mt_error *error) {
    for (int i = 0; i < tokenizer->file_count; i++)
        if (tokenizer->files[i].outside)
            return mt_error_set(error,
                                "%s: its %s is a link to %s, outside the folder, and is not copied into checkpoints; "
                                "put the file itself there",
                                tokenizer->path, tokenizer->files[i].name, tokenizer->files[i].outside);
    return 0;
}

int mt_tokenizer_save(const mt_tokenizer *tokenizer, const char *folder, mt_error *error) {
    if (mt_tokenizer_check_links(tokenizer, error) != 0) return -1;
    for (int i = 0; i < tokenizer->file_count; i++) {
        char *path = mt_path_join(folder, tokenizer->files[i].name), *place = folder_of(path);
        const mt_text *content = &tokenizer->files[i].content;
        int failed = strchr(tokenizer->files[i].name, '/') ? mt_folder_create(place, NULL, error) : 0;
        free(place);
        if (!failed) failed = mt_file_write(path, content->data, content->bytes, NULL, error);
        free(path);
        if (failed) return -1;
    }
    return 0;
}

uint64_t mt_tokenizer_fingerprint(const mt_tokenizer *tokenizer) {
    if (!tokenizer) return 0;
    uint64_t *prints = mt_calloc((tokenizer->file_count + 1) * (int64_t)sizeof *prints);
    for (int i = 0; i < tokenizer->file_count; i++)
        prints[i] = mt_contents_fingerprint(tokenizer->files[i].content.data, tokenizer->files[i].content.bytes, true);
    prints[tokenizer->file_count] = (uint64_t)tokenizer->vocab_size;
    uint64_t print = mt_contents_fingerprint(prints, (tokenizer->file_count + 1) * (int64_t)sizeof *prints, true);
    free(prints);
    return print;
}

static bool tokens_are_equal(const mt_tokenizer *a, const mt_tokenizer *b, int32_t id) {
    const mt_token *x = &a->tokens[id], *y = &b->tokens[id];
    bool is_absent = x->type == MT_TOKEN_ABSENT || y->type == MT_TOKEN_ABSENT;
    if (is_absent || (mt_tokenizer_is_special(a, id) && mt_tokenizer_is_special(b, id))) return true;
    return x->surface_bytes == y->surface_bytes &&
           memcmp(a->strings.data + x->surface, b->strings.data + y->surface, (size_t)x->surface_bytes) == 0;
}

int mt_tokenizer_compare(const mt_tokenizer *a, const mt_tokenizer *b, mt_error *error) {
    for (int32_t id = 0; id < mt_min(a->vocab_size, b->vocab_size); id++)
        if (!tokens_are_equal(a, b, id))
            return mt_error_set(error, "token %d is another text in %s than in %s", (int)id, a->path, b->path);
    return 0;
}

int64_t mt_tokenizer_vocab_size(const mt_tokenizer *tokenizer) {
    return tokenizer->vocab_size;
}

int32_t mt_tokenizer_eod(const mt_tokenizer *tokenizer) {
    return tokenizer->eod;
}

int32_t mt_tokenizer_bos(const mt_tokenizer *tokenizer) {
    return tokenizer->bos;
}

int32_t mt_tokenizer_find(const mt_tokenizer *tokenizer, const char *text, int64_t bytes) {
    for (int64_t i = 0; i < tokenizer->added_count; i++) {
        int32_t id = tokenizer->added[i].id;
        const mt_token *token = &tokenizer->tokens[id];
        if (token->text_bytes == bytes && !memcmp(mt_token_text(tokenizer, id), text, (size_t)bytes)) return id;
    }
    return mt_token_find(tokenizer, text, bytes);
}

bool mt_tokenizer_is_special(const mt_tokenizer *tokenizer, int32_t id) {
    if (id < 0 || id >= tokenizer->vocab_size) return false;
    int type = tokenizer->tokens[id].type;
    return type == MT_TOKEN_CONTROL || type == MT_TOKEN_UNKNOWN;
}

/* ---- decoding -------------------------------------------------------------------------------------------------- */

struct mt_decoder {
    const mt_tokenizer *tokenizer;
    int64_t tokens;  // so far
    bool started;    // the leading space has been removed
    int strip_left;  // leading spaces still to remove
    mt_text pending; // bytes of an incomplete character
};

static void decoder_restart(mt_decoder *decoder) {
    decoder->tokens = 0;
    decoder->started = false;
    decoder->strip_left = decoder->tokenizer->strip_start;
    decoder->pending.bytes = 0;
}

/* SentencePiece puts a space before the text, so the first piece loses one. With remove_extra_whitespaces every piece
 * loses one until text has been written (sentencepiece_processor.cc, DecodeSentencePiece). */
static bool drops_space(mt_decoder *decoder, int32_t id) {
    const mt_sentencepiece_rules *rules = &decoder->tokenizer->rules;
    const mt_token *token = &decoder->tokenizer->tokens[id];
    bool text =
        token->type == MT_TOKEN_NORMAL || token->type == MT_TOKEN_USER_DEFINED || token->type == MT_TOKEN_UNUSED;
    bool spaced = text && token->text_bytes >= 3 && !memcmp(mt_token_text(decoder->tokenizer, id), MT_SPACE_SYMBOL, 3);
    if (decoder->started || !spaced || (!rules->add_dummy_prefix && !rules->remove_extra_whitespaces)) return false;
    if (!rules->remove_extra_whitespaces) decoder->started = true;
    return true;
}

/* Appends the bytes of one token. */
static int decode_token(mt_decoder *decoder, int32_t id, mt_text *out, mt_error *error) {
    const mt_tokenizer *tokenizer = decoder->tokenizer;
    if (id < 0 || id >= tokenizer->vocab_size || tokenizer->tokens[id].type == MT_TOKEN_ABSENT)
        return mt_error_set(error, "%s: token %d is not in the vocabulary of %lld", tokenizer->path, id,
                            (long long)tokenizer->vocab_size);
    const mt_token *token = &tokenizer->tokens[id];
    const char *surface = tokenizer->strings.data + token->surface;
    int64_t bytes = token->surface_bytes;
    if (tokenizer->join == MT_JOIN_SPACE && decoder->tokens) mt_text_append(out, " ", 1);
    if (tokenizer->join == MT_JOIN_SENTENCEPIECE) {
        int64_t drop = drops_space(decoder, id);
        mt_text_append(out, surface + drop, bytes - drop);
        if (bytes > drop) decoder->started = true;
    } else if (tokenizer->join == MT_JOIN_METASPACE && decoder->tokens == 0 && token->type == MT_TOKEN_NORMAL) {
        for (int64_t i = 0; i < bytes; i++)
            if (surface[i] != ' ') mt_text_append(out, surface + i, 1);
    } else {
        for (; bytes && decoder->strip_left && *surface == ' '; surface++, bytes--) decoder->strip_left--;
        if (bytes) decoder->strip_left = 0;
        mt_text_append(out, surface, bytes);
    }
    decoder->tokens++;
    return 0;
}

int mt_tokenizer_decode(const mt_tokenizer *tokenizer, const int32_t *ids, int64_t count, mt_text *text,
                        mt_error *error) {
    mt_decoder decoder = {.tokenizer = tokenizer};
    int64_t before = text->bytes;
    decoder_restart(&decoder);
    for (int64_t i = 0; i < count; i++) {
        if (!decode_token(&decoder, ids[i], text, error)) continue;
        text->bytes = before;
        return -1;
    }
    return 0;
}

mt_decoder *mt_decoder_open(const mt_tokenizer *tokenizer) {
    mt_decoder *decoder = mt_calloc(sizeof *decoder);
    decoder->tokenizer = tokenizer;
    decoder_restart(decoder);
    return decoder;
}

void mt_decoder_close(mt_decoder *decoder) {
    if (!decoder) return;
    free(decoder->pending.data);
    free(decoder);
}

int mt_decode_next(mt_decoder *decoder, int32_t id, mt_text *text, mt_error *error) {
    mt_text *pending = &decoder->pending;
    if (decode_token(decoder, id, pending, error)) return -1;
    int64_t at = 0;
    while (at < pending->bytes) {
        mt_utf8_state state;
        int length = mt_utf8_scan(pending->data + at, pending->bytes - at, &state);
        if (state == MT_UTF8_CUT) break;
        if (state == MT_UTF8_WHOLE)
            mt_text_append(text, pending->data + at, length);
        else
            mt_utf8_append(text, 0xFFFD);
        at += length;
    }
    pending->bytes -= at;
    if (at) memmove(pending->data, pending->data + at, (size_t)pending->bytes);
    return 0;
}

void mt_decode_end(mt_decoder *decoder, mt_text *text) {
    if (decoder->pending.bytes) mt_utf8_append(text, 0xFFFD);
    decoder_restart(decoder);
}
