/* test_tokenizer.c: ids and texts equal those of the reference libraries; damaged files give an error of one line. */
#include "../data/tokens/tokenizer_encode.h"
#include "../data/tokens/tokenizer_json.h"
#include "../data/tokens/tokenizer_sentencepiece.h"
#include "../data/tokens/tokenizer_tiktoken.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "new_folder.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define GOLDEN "tests/golden/tokenizer/"

/* ---- helpers --------------------------------------------------------------------------------------------------- */

static mt_tokenizer *open_or_fail(mt_tokenizer_type type, const char *path) {
    mt_tokenizer *tokenizer;
    mt_error error;
    if (mt_tokenizer_open(&tokenizer, type, path, &error)) fail_msg("%s", error.text);
    return tokenizer;
}

static json_t *read_json(const char *path) {
    json_error_t why;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &why);
    if (!root) fail_msg("%s:%d: %s", path, why.line, why.text);
    return root;
}

static mt_text read_whole(const char *path) {
    mt_text text = {0};
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s: cannot be opened", path);
    for (size_t got = 1; got; text.bytes += (int64_t)got) {
        mt_text_reserve(&text, 1 << 16);
        got = fread(text.data + text.bytes, 1, 1 << 16, file);
    }
    fclose(file);
    mt_text_append(&text, "", 1); // NUL-terminated
    text.bytes--;
    return text;
}

/* The path of a file beside the repository, or NULL if it does not exist. */
static const char *shared(const char *name) {
    static char path[512];
    const char *folder = getenv("MT_SHARED");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : "../shared", name);
    return access(path, R_OK) ? NULL : path;
}

static void skip_without(const char *name) {
    if (shared(name)) return;
    printf("skipped: ../shared/%s is absent\n", name);
    skip();
}

#if defined MT_HAVE_PCRE2 && defined MT_HAVE_UTF8PROC
enum { HAVE_LIBRARIES = 1 };
#else
enum { HAVE_LIBRARIES = 0 };
#endif

static void skip_without_libraries(void) {
    if (HAVE_LIBRARIES) return;
    printf("skipped: built without PCRE2 or utf8proc\n");
    skip();
}

static void assert_ids(const mt_ids *ids, const json_t *expected, const char *text) {
    for (int64_t i = 0; i < ids->count && i < (int64_t)json_array_size(expected); i++)
        if (ids->data[i] != json_integer_value(json_array_get(expected, (size_t)i)))
            fail_msg("'%s': id %lld is %d, not %lld", text, (long long)i, ids->data[i],
                     (long long)json_integer_value(json_array_get(expected, (size_t)i)));
    if (ids->count != (int64_t)json_array_size(expected))
        fail_msg("'%s': %lld ids, not %zu", text, (long long)ids->count, json_array_size(expected));
}

static void decode_in_stream(const mt_tokenizer *tokenizer, const mt_ids *ids, mt_text *out) {
    mt_error error;
    mt_decoder *decoder = mt_decoder_open(tokenizer);
    for (int64_t i = 0; i < ids->count; i++) {
        assert_int_equal(mt_decode_next(decoder, ids->data[i], out, &error), 0);
        assert_true(mt_utf8_is_valid(out->data, out->bytes)); // whole characters after every token
    }
    mt_decode_end(decoder, out);
    mt_decoder_close(decoder);
}

/* Encodes every string of strings.json and decodes the ids; compares both with NAME_expected.json. */
static void check_golden(mt_tokenizer_type type, const char *file, const char *name) {
    char path[256];
    snprintf(path, sizeof path, GOLDEN "%s_expected.json", name);
    json_t *strings = read_json(GOLDEN "strings.json"), *expected = read_json(path);
    snprintf(path, sizeof path, GOLDEN "%s", file);
    mt_tokenizer *tokenizer = open_or_fail(type, path);
    mt_encoder *encoder = mt_encoder_open(tokenizer);
    mt_error error;
    assert_int_equal(json_array_size(strings), json_array_size(expected));
    for (size_t i = 0; i < json_array_size(strings); i++) {
        const json_t *string = json_array_get(strings, i), *answer = json_array_get(expected, i);
        const json_t *decoded = json_object_get(answer, "text");
        const char *text = json_string_value(string);
        mt_ids ids = {0};
        mt_text out = {0}, streamed = {0};
        assert_int_equal(mt_encode(encoder, text, (int64_t)json_string_length(string), &ids, &error), 0);
        assert_ids(&ids, json_object_get(answer, "ids"), text);
        assert_int_equal(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &out, &error), 0);
        mt_text_append(&out, "", 1);
        assert_string_equal(out.data, json_string_value(decoded));
        assert_int_equal(out.bytes - 1, json_string_length(decoded));
        decode_in_stream(tokenizer, &ids, &streamed);
        assert_int_equal(streamed.bytes, out.bytes - 1);
        if (streamed.bytes) assert_memory_equal(streamed.data, out.data, (size_t)streamed.bytes);
        free(streamed.data);
        free(out.data);
        free(ids.data);
    }
    mt_encoder_close(encoder);
    mt_tokenizer_close(tokenizer);
    json_decref(strings);
    json_decref(expected);
}

/* ---- comparison with the reference libraries -------------------------------------------------------------------- */

static void byte_level_json_matches_tokenizers(void **state) {
    (void)state;
    skip_without_libraries();
    check_golden(MT_TOKENIZER_HUGGINGFACE, "bytelevel.json", "bytelevel_json");
}

static void normalizers_and_splits_match_tokenizers(void **state) {
    (void)state;
    skip_without_libraries();
    check_golden(MT_TOKENIZER_HUGGINGFACE, "steps.json", "steps_json");
}

static void metaspace_with_byte_fallback_matches_tokenizers(void **state) {
    (void)state;
    check_golden(MT_TOKENIZER_HUGGINGFACE, "metaspace.json", "metaspace_json");
    check_golden(MT_TOKENIZER_HUGGINGFACE, "metaspace_first.json", "metaspace_first_json");
}

static void fused_unknown_characters_match_tokenizers(void **state) {
    (void)state;
    skip_without_libraries();
    check_golden(MT_TOKENIZER_HUGGINGFACE, "unknown.json", "unknown_json");
}

static void gpt2_vocab_and_merges_match_tokenizers(void **state) {
    (void)state;
    skip_without_libraries();
    check_golden(MT_TOKENIZER_GPT2_BPE, "gpt2", "gpt2");
}

/* Kimi's and Moonlight's tokenizer: also saved and opened again. */
static void tiktoken_model_matches_tiktoken(void **state) {
    (void)state;
    skip_without_libraries();
    char root[64], file[128];
    assert_int_equal(new_folder(root), 0);
    json_t *expected = read_json(GOLDEN "kimi/expected.json"), *answer;
    mt_tokenizer *first = open_or_fail(MT_TOKENIZER_HUGGINGFACE, GOLDEN "kimi/tiktoken.model"), *tokenizer;
    mt_error error;
    assert_int_equal(mt_tokenizer_save(first, root, &error), 0);
    if (mt_tokenizer_open_folder(&tokenizer, root, &error)) fail_msg("%s", error.text);
    assert_int_equal(mt_tokenizer_fingerprint(tokenizer), mt_tokenizer_fingerprint(first));
    assert_int_equal(mt_tokenizer_vocab_size(tokenizer), 900 + 256);
    assert_int_equal(mt_tokenizer_bos(tokenizer), 900);
    assert_int_equal(mt_tokenizer_eod(tokenizer), 901);
    assert_true(mt_tokenizer_is_special(tokenizer, 905)); // a reserved one
    size_t i;
    json_array_foreach(expected, i, answer) {
        const json_t *string = json_object_get(answer, "string");
        const char *text = json_string_value(string);
        mt_ids ids = {0};
        mt_text out = {0};
        assert_int_equal(mt_tokenizer_encode(tokenizer, text, (int64_t)json_string_length(string), &ids, &error), 0);
        assert_ids(&ids, json_object_get(answer, "ids"), text);
        assert_int_equal(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &out, &error), 0);
        assert_int_equal(out.bytes, json_string_length(string));
        if (out.bytes) assert_memory_equal(out.data, text, (size_t)out.bytes);
        free(ids.data), free(out.data);
    }
    mt_tokenizer_close(first), mt_tokenizer_close(tokenizer);
    json_decref(expected);
    snprintf(file, sizeof file, "%s/tiktoken.model", root), unlink(file);
    snprintf(file, sizeof file, "%s/tokenizer_config.json", root), unlink(file);
    rmdir(root);
}

/* Megatron-LM's TikTokenizer: both patterns against the library tiktoken; also saved as tokenizer.json. */
static void megatrons_ranks_match_tiktoken(void **state) {
    (void)state;
    skip_without_libraries();
    json_t *expected = read_json(GOLDEN "tiktoken/expected.json"), *row;
    mt_tiktoken_settings settings = {MT_TIKTOKEN_V1, 20, 520};
    char folder[] = "/tmp/tiktoken-XXXXXX", file[200];
    mt_error error;
    size_t i;
    assert_non_null(mkdtemp(folder));
    for (int pattern = 0; pattern < 2; pattern++)
        for (int saved = 0; saved < 2; saved++) {
            mt_tokenizer *tokenizer;
            settings.pattern = pattern ? MT_TIKTOKEN_V2 : MT_TIKTOKEN_V1;
            int status = saved
                             ? mt_tokenizer_open_folder(&tokenizer, folder, &error)
                             : mt_tokenizer_open_tiktoken(&tokenizer, GOLDEN "tiktoken/vocab.json", &settings, &error);
            if (status != 0) fail_msg("%s", error.text);
            assert_int_equal(mt_tokenizer_vocab_size(tokenizer), 520);
            assert_int_equal(mt_tokenizer_eod(tokenizer), 2);
            assert_int_equal(mt_tokenizer_bos(tokenizer), 1);
            assert_int_equal(mt_tokenizer_find(tokenizer, "<SPECIAL_19>", 12), 19);
            mt_encoder *encoder = mt_encoder_open(tokenizer);
            int cases = 0;
            json_array_foreach(json_object_get(expected, "cases"), i, row) {
                const char *text = json_string_value(json_object_get(row, "text"));
                if (strstr(text, "<s>")) continue; // a special token here
                if (strcmp(json_string_value(json_object_get(row, "pattern")), pattern ? "v2" : "v1") != 0) continue;
                mt_ids ids = {0};
                assert_int_equal(mt_encode(encoder, text, (int64_t)strlen(text), &ids, &error), 0);
                const json_t *want = json_object_get(row, "ids");
                if (ids.count != (int64_t)json_array_size(want)) fail_msg("'%s': %lld ids", text, (long long)ids.count);
                for (int64_t k = 0; k < ids.count; k++)
                    assert_int_equal(ids.data[k], json_integer_value(json_array_get(want, (size_t)k)));
                free(ids.data);
                cases++;
            }
            assert_int_equal(cases, 9);
            mt_encoder_close(encoder);
            if (!saved && mt_tokenizer_save(tokenizer, folder, &error) != 0) fail_msg("%s", error.text);
            mt_tokenizer_close(tokenizer);
        }
    snprintf(file, sizeof file, "%s/tokenizer.json", folder), unlink(file);
    rmdir(folder);
    json_decref(expected);
}

static void other_ranks_of_tiktoken_are_refused(void **state) {
    (void)state;
    static const char *const texts[] = {"{}", "[", "[{\"rank\": 0, \"token_bytes\": \"AQ==\"}]"};
    mt_tiktoken_settings settings = {MT_TIKTOKEN_V2, 7, 7 + 256};
    char path[] = "/tmp/ranks-XXXXXX";
    mt_tokenizer *tokenizer;
    mt_error error;
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        assert_int_equal(ftruncate(descriptor, 0), 0);
        assert_int_equal(pwrite(descriptor, texts[i], strlen(texts[i]), 0), (ssize_t)strlen(texts[i]));
        assert_int_equal(mt_tokenizer_open_tiktoken(&tokenizer, path, &settings, &error), -1);
        assert_non_null(strstr(error.text, path));
    }
    close(descriptor);
    unlink(path);
    settings.vocab_size = 1000; // more than there are
    assert_int_equal(mt_tokenizer_open_tiktoken(&tokenizer, GOLDEN "tiktoken/vocab.json", &settings, &error), -1);
    assert_non_null(strstr(error.text, "has 500 ranks, and a vocabulary of 1000 with 7 special tokens needs 993"));
    mt_text whole = read_whole(GOLDEN "tiktoken/vocab.json");
    char *second = strstr(whole.data, "AQ=="); // the byte 1 becomes 0 again
    assert_non_null(second);
    memcpy(second, "AA==", 4);
    settings.vocab_size = 7 + 500;
    mt_tokenizer *table = mt_tokenizer_new("x");
    assert_null(mt_tiktoken_convert(table, "x", &whole, &settings, &error));
    mt_tokenizer_close(table);
    assert_non_null(strstr(error.text, "x: entry 1 is not {"));
    free(whole.data);
}

static void damaged_tiktoken_models_are_refused_by_line(void **state) {
    (void)state;
    skip_without_libraries();
    mt_text whole = read_whole(GOLDEN "kimi/tiktoken.model");
    char long_token[3000] = "AQ== 1\n";
    memset(strchr(long_token, 0), 'e', 2736); // 2052 bytes in base64
    strcpy(strchr(long_token, 0), " 900\n");
    const struct {
        const char *replaced, *by, *config, *message;
    } cases[] = {
        {"AQ== 1\n", long_token, NULL, "x/tiktoken.model:3: has a token of 2052 bytes, more than 2048"},
        {"AQ== 1\n", "AQ== 1 1\n", NULL, "x/tiktoken.model:2: is not a token in base64"},
        {"AQ== 1\n", "AQ= 1\n", NULL, "x/tiktoken.model:2: is not a token in base64"},
        {"AQ== 1\n", "A=Q= 1\n", NULL, "x/tiktoken.model:2: is not a token in base64"},
        {"AQ== 1\n", " 1\n", NULL, "x/tiktoken.model:2: is not a token in base64"},
        {"AQ== 1\n", "AQ== -1\n", NULL, "x/tiktoken.model:2: is not a token in base64"},
        {"AQ== 1\n", "AQ== 9999999999\n", NULL, "x/tiktoken.model:2: is not a token in base64"},
        {"AQ== 1\n", "AA== 1\n", NULL, "x/tiktoken.model:2: the token of rank 1 has another rank too"},
        {"AQ== 1\n", "AQ== 2\n", NULL, "have the same id, 2"},
        {"AQ== 1\n", "", NULL, "has 899 tokens, and ranks up to 899"},
        {"AQ== 1\n", "enp6enp6enp6 1\n", NULL, "has no token for the byte 1"},
        {"", "", "{\"tokenizer_class\": \"QWenTokenizer\"}", "QWenTokenizer, whose words are not known"},
        {"", "", "{\"added_tokens_decoder\": {\"899\": {\"content\": \"x\"}}}", "has '899', and must have ids of 900"},
        {"", "", "{\"added_tokens_decoder\": {\"901\": {}}}", "an added token lacks its id or its content"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_tokenizer *tokenizer;
        mt_error error = {0};
        char root[64], path[128], config[128];
        assert_int_equal(new_folder(root), 0);
        snprintf(path, sizeof path, "%s/tiktoken.model", root);
        snprintf(config, sizeof config, "%s/tokenizer_config.json", root);
        const char *at = strstr(whole.data, cases[i].replaced);
        assert_non_null(at);
        FILE *file = fopen(path, "wb");
        fwrite(whole.data, 1, (size_t)(at - whole.data), file);
        fprintf(file, "%s%s", cases[i].by, at + strlen(cases[i].replaced));
        fclose(file);
        if (cases[i].config) {
            file = fopen(config, "wb");
            fprintf(file, "%s", cases[i].config);
            fclose(file);
        }
        assert_int_equal(mt_tokenizer_open_folder(&tokenizer, root, &error), -1);
        const char *message = cases[i].message + (*cases[i].message == 'x');
        if (!strstr(error.text, message)) fail_msg("'%s' instead of '%s'", error.text, message);
        unlink(path), unlink(config), rmdir(root);
    }
    free(whole.data);
}

static void sentencepiece_unigram_matches_sentencepiece(void **state) {
    (void)state;
    check_golden(MT_TOKENIZER_SENTENCEPIECE, "unigram.model", "unigram_model");
}

static void sentencepiece_bpe_matches_sentencepiece(void **state) {
    (void)state;
    check_golden(MT_TOKENIZER_SENTENCEPIECE, "bpe.model", "bpe_model");
}

/* In the .inp file a line __ggml_vocab_test__ follows every text; the .out file has a line of ids per text. */
static void check_vectors(const char *name, mt_tokenizer_type type, const char *file) {
    const char *separator = "\n__ggml_vocab_test__\n";
    char path[256];
    snprintf(path, sizeof path, "tokenizers/vectors/%s.inp", name);
    mt_text inputs = read_whole(shared(path));
    snprintf(path, sizeof path, "tokenizers/vectors/%s.out", name);
    mt_text outputs = read_whole(shared(path));
    snprintf(path, sizeof path, "tokenizers/%s", file);
    mt_tokenizer *tokenizer = open_or_fail(type, shared(path));
    char *line = outputs.data;
    int vectors = 0;
    for (const char *text = inputs.data, *next; text && *text; text = next, vectors++) {
        const char *stop = strstr(text, separator);
        int64_t bytes = stop ? stop - text : (int64_t)strlen(text);
        next = stop ? stop + strlen(separator) : NULL;
        mt_ids ids = {0};
        mt_error error;
        assert_int_equal(mt_tokenizer_encode(tokenizer, text, bytes, &ids, &error), 0);
        char *line_end = strchr(line, '\n');
        assert_non_null(line_end);
        *line_end = 0;
        for (int64_t i = 0; i < ids.count; i++) {
            char *after;
            long id = strtol(line, &after, 10);
            assert_true(after > line);
            if (id != ids.data[i]) fail_msg("%s: '%.*s': id %d, not %ld", name, (int)bytes, text, ids.data[i], id);
            line = after;
        }
        assert_int_equal(strspn(line, " "), strlen(line)); // no further ids expected
        line = line_end + 1;
        free(ids.data);
    }
    assert_true(vectors > 40);
    assert_int_equal(*line, 0);
    mt_tokenizer_close(tokenizer);
    free(inputs.data);
    free(outputs.data);
}

static void encode_matches_reference_vectors_of_gpt2(void **state) {
    (void)state;
    skip_without_libraries();
    skip_without("tokenizers/vectors/gpt-2.inp");
    check_vectors("gpt-2", MT_TOKENIZER_HUGGINGFACE, "gpt2_tokenizer_hf.json");
    check_vectors("gpt-2", MT_TOKENIZER_GPT2_BPE, "gpt2-vocab.json");
}

static void encode_matches_reference_vectors_of_qwen2(void **state) {
    (void)state;
    skip_without_libraries();
    skip_without("tokenizers/vectors/qwen2.inp");
    check_vectors("qwen2", MT_TOKENIZER_HUGGINGFACE, "qwen3_tokenizer.json");
}

static void encode_matches_reference_vectors_of_llama3(void **state) {
    (void)state;
    skip_without_libraries();
    skip_without("tokenizers/vectors/llama-bpe.inp");
    check_vectors("llama-bpe", MT_TOKENIZER_HUGGINGFACE, "llama3_tokenizer.json");
}

static void check_corpus(const json_t *row, mt_tokenizer *tokenizer) {
    char name[256], hash[32];
    snprintf(name, sizeof name, "text/%s", json_string_value(json_object_get(row, "text")));
    mt_text text = read_whole(shared(name)), decoded = {0};
    mt_ids ids = {0};
    mt_error error;
    assert_int_equal(mt_tokenizer_encode(tokenizer, text.data, text.bytes, &ids, &error), 0);
    uint64_t fnv = 0xCBF29CE484222325u;
    for (int64_t i = 0; i < ids.count; i++) fnv = (fnv ^ (uint32_t)ids.data[i]) * 0x100000001B3u;
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)fnv);
    assert_int_equal(ids.count, json_integer_value(json_object_get(row, "count")));
    assert_string_equal(hash, json_string_value(json_object_get(row, "fnv1a")));
    assert_int_equal(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &decoded, &error), 0);
    assert_int_equal(decoded.bytes, text.bytes); // these four tokenizers are lossless
    assert_memory_equal(decoded.data, text.data, (size_t)text.bytes);
    free(decoded.data);
    free(ids.data);
    free(text.data);
}

static void whole_corpora_match_the_reference_libraries_and_decode_to_themselves(void **state) {
    (void)state;
    skip_without_libraries();
    skip_without("text/wikitext2_valid.txt");
    skip_without("tokenizers/llama3_tokenizer.json");
    json_t *rows = read_json(GOLDEN "corpora.json");
    mt_tokenizer *tokenizer = NULL;
    const char *opened = "";
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);
        const char *file = json_string_value(json_object_get(row, "tokenizer"));
        char name[256];
        snprintf(name, sizeof name, "tokenizers/%s", file);
        if (strcmp(opened, file)) {
            const char *type_name = json_string_value(json_object_get(row, "type"));
            mt_tokenizer_type type = (mt_tokenizer_type)mt_choice_index(MT_TOKENIZER_TYPES, type_name);
            mt_tokenizer_close(tokenizer);
            tokenizer = open_or_fail(type, shared(name));
            opened = file;
        }
        check_corpus(row, tokenizer);
    }
    mt_tokenizer_close(tokenizer);
    json_decref(rows);
}

/* ---- the interface ---------------------------------------------------------------------------------------------- */

static void bytes_are_their_own_ids(void **state) {
    (void)state;
    mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_BYTE_LEVEL, NULL);
    const char text[] = "a\0\xFF\x80 z";
    mt_ids ids = {0};
    mt_text out = {0};
    mt_error error;
    assert_int_equal(mt_tokenizer_vocab_size(tokenizer), 257);
    assert_int_equal(mt_tokenizer_eod(tokenizer), 256);
    assert_int_equal(mt_tokenizer_encode(tokenizer, text, 6, &ids, &error), 0);
    assert_int_equal(ids.count, 6);
    for (int i = 0; i < 6; i++) assert_int_equal(ids.data[i], (unsigned char)text[i]);
    mt_ids_push(&ids, 256);
    assert_int_equal(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &out, &error), 0);
    assert_int_equal(out.bytes, 6);
    assert_memory_equal(out.data, text, 6);
    free(out.data);
    free(ids.data);
    mt_tokenizer_close(tokenizer);
}

static void invalid_utf8_is_encoded_as_replacement_characters(void **state) {
    (void)state;
    skip_without_libraries();
    mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_HUGGINGFACE, GOLDEN "bytelevel.json");
    const char invalid[] = "a\xFF\xE2\x82z\xC0\x80\xF0\x9F\x98", repaired[] = "a\uFFFD\uFFFDz\uFFFD\uFFFD\uFFFD";
    mt_ids ids = {0};
    mt_text out = {0};
    mt_error error;
    assert_int_equal(mt_tokenizer_encode(tokenizer, invalid, sizeof invalid - 1, &ids, &error), 0);
    assert_int_equal(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &out, &error), 0);
    mt_text_append(&out, "", 1);
    assert_string_equal(out.data, repaired);
    free(out.data);
    free(ids.data);
    mt_tokenizer_close(tokenizer);
}

static void streamed_bytes_come_out_as_whole_characters(void **state) {
    (void)state;
    mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_BYTE_LEVEL, NULL);
    mt_decoder *decoder = mt_decoder_open(tokenizer);
    mt_text out = {0};
    mt_error error;
    const unsigned char llama[] = {0xF0, 0x9F, 0xA6, 0x99};
    for (int i = 0; i < 3; i++) assert_int_equal(mt_decode_next(decoder, llama[i], &out, &error), 0);
    assert_int_equal(out.bytes, 0);
    mt_decode_next(decoder, llama[3], &out, &error);
    assert_int_equal(out.bytes, 4);
    mt_decode_next(decoder, 0xE2, &out, &error); // cut by the next byte, then by the end
    mt_decode_next(decoder, 'x', &out, &error);
    mt_decode_next(decoder, 0xE2, &out, &error);
    mt_decode_end(decoder, &out);
    mt_text_append(&out, "", 1);
    assert_string_equal(out.data, "\U0001F999\uFFFDx\uFFFD");
    free(out.data);
    mt_decoder_close(decoder);
    mt_tokenizer_close(tokenizer);
}

static void ids_outside_the_vocabulary_are_refused(void **state) {
    (void)state;
    skip_without_libraries();
    mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_HUGGINGFACE, GOLDEN "bytelevel.json");
    mt_text out = {0};
    mt_error error;
    mt_text_append(&out, "kept", 4);
    const int32_t bad[][2] = {{1, -1}, {1, (int32_t)mt_tokenizer_vocab_size(tokenizer)}, {1, INT32_MAX}};
    for (int i = 0; i < 3; i++) {
        error.text[0] = 0;
        assert_int_equal(mt_tokenizer_decode(tokenizer, bad[i], 2, &out, &error), -1);
        assert_non_null(strstr(error.text, "not in the vocabulary"));
        assert_int_equal(out.bytes, 4);
    }
    free(out.data);
    mt_tokenizer_close(tokenizer);
}

static void eod_is_the_configured_token_or_has_a_usual_name(void **state) {
    (void)state;
    mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_HUGGINGFACE, GOLDEN "metaspace.json");
    assert_int_equal(mt_tokenizer_bos(tokenizer), 1);
    assert_int_equal(mt_tokenizer_eod(tokenizer), 2);
    assert_true(mt_tokenizer_is_special(tokenizer, 2));
    assert_false(mt_tokenizer_is_special(tokenizer, 100));
    mt_tokenizer_close(tokenizer);
    tokenizer = mt_tokenizer_new("tokenizer.json");
    mt_text json = read_whole(GOLDEN "metaspace.json");
    mt_text config = {"{\"eos_token\": {\"content\": \"<s>\"}, \"bos_token\": \"</s>\"}", 54, 0};
    mt_error error;
    assert_int_equal(mt_tokenizer_load_json(tokenizer, "tokenizer.json", &json, &config, &error), 0);
    assert_int_equal(mt_tokenizer_bos(tokenizer), 2);
    assert_int_equal(mt_tokenizer_eod(tokenizer), 1);
    mt_tokenizer_close(tokenizer);
    free(json.data);
}

static void check_save(mt_tokenizer_type type, const char *path) {
    char folder[64], command[128];
    assert_int_equal(new_folder(folder), 0);
    mt_tokenizer *tokenizer = open_or_fail(type, path), *again;
    mt_error error;
    const char *text = "Save me, and find me again.";
    mt_ids before = {0}, after = {0};
    assert_int_equal(mt_tokenizer_open_folder(&again, folder, &error), -1);
    assert_non_null(strstr(error.text, folder));
    assert_int_equal(mt_tokenizer_save(tokenizer, folder, &error), 0);
    if (mt_tokenizer_open_folder(&again, folder, &error)) fail_msg("%s", error.text);
    assert_int_equal(mt_tokenizer_eod(tokenizer), mt_tokenizer_eod(again));
    assert_int_equal(mt_tokenizer_encode(tokenizer, text, (int64_t)strlen(text), &before, &error), 0);
    assert_int_equal(mt_tokenizer_encode(again, text, (int64_t)strlen(text), &after, &error), 0);
    assert_int_equal(before.count, after.count);
    assert_memory_equal(before.data, after.data, (size_t)before.count * sizeof *before.data);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(mt_tokenizer_save(tokenizer, folder, &error), -1); // the folder does not exist any more
    assert_non_null(strstr(error.text, "cannot be written"));
    free(before.data);
    free(after.data);
    mt_tokenizer_close(tokenizer);
    mt_tokenizer_close(again);
}

static void a_saved_tokenizer_is_found_in_its_folder(void **state) {
    (void)state;
    skip_without_libraries();
    check_save(MT_TOKENIZER_HUGGINGFACE, GOLDEN "bytelevel.json");
    check_save(MT_TOKENIZER_SENTENCEPIECE, GOLDEN "unigram.model");
    check_save(MT_TOKENIZER_GPT2_BPE, GOLDEN "gpt2/vocab.json," GOLDEN "gpt2/merges.txt");
    check_save(MT_TOKENIZER_BYTE_LEVEL, NULL);
}

/* A model that is saved has the template of conversations and the tokens that begin a text. */
static void files_beside_a_tokenizer_are_saved(void **state) {
    (void)state;
    skip_without_libraries();
    static const struct {
        mt_tokenizer_type type;
        const char *files;
    } cases[] = {{MT_TOKENIZER_HUGGINGFACE, "bytelevel.json from/tokenizer.json"},
                 {MT_TOKENIZER_SENTENCEPIECE, "unigram.model from/tokenizer.model"},
                 {MT_TOKENIZER_GPT2_BPE, "gpt2/vocab.json gpt2/merges.txt from"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char root[64], from[128], to[128], command[500];
        mt_error error;
        assert_int_equal(new_folder(root), 0);
        snprintf(from, sizeof from, "%s/from", root);
        snprintf(to, sizeof to, "%s/to", root);
        snprintf(command, sizeof command,
                 "golden=$PWD/" GOLDEN " && cd %s && mkdir from to && ln -s $golden/* . && cp %s && "
                 "echo {} >from/tokenizer_config.json && echo template >from/chat_template.jinja",
                 root, cases[i].files);
        assert_int_equal(system(command), 0);
        mt_tokenizer *tokenizer = open_or_fail(cases[i].type, from);
        assert_int_equal(mt_tokenizer_save(tokenizer, to, &error), 0);
        mt_tokenizer_close(tokenizer);
        snprintf(command, sizeof command, "diff -r %s %s && rm -r %s", from, to, root);
        assert_int_equal(system(command), 0);
    }
}

typedef struct worker {
    const mt_tokenizer *tokenizer;
    mt_text text;
    mt_ids ids;
} worker;

static void *encode_all(void *argument) {
    worker *w = argument;
    mt_error error;
    mt_tokenizer_encode(w->tokenizer, w->text.data, w->text.bytes, &w->ids, &error);
    return NULL;
}

static void threads_share_a_tokenizer(void **state) {
    (void)state;
    skip_without_libraries();
    mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_HUGGINGFACE, GOLDEN "bytelevel.json");
    worker workers[4] = {0};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        workers[i].tokenizer = tokenizer;
        workers[i].text = read_whole("data/tokens/tokenizer.c");
        assert_int_equal(pthread_create(&threads[i], NULL, encode_all, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    assert_true(workers[0].ids.count > 1000);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(workers[i].ids.count, workers[0].ids.count);
        assert_memory_equal(workers[i].ids.data, workers[0].ids.data, (size_t)workers[0].ids.count * sizeof(int32_t));
    }
    for (int i = 0; i < 4; i++) {
        free(workers[i].ids.data);
        free(workers[i].text.data);
    }
    mt_tokenizer_close(tokenizer);
}

/* ---- bad input -------------------------------------------------------------------------------------------------- */

#define VOCAB "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2}"
#define MODEL "\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[\"a b\"]}"

static void check_refused_json(const char *json, const char *reason) {
    mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
    mt_text text = {(char *)json, (int64_t)strlen(json), 0};
    mt_error error = {0};
    if (!mt_tokenizer_load_json(tokenizer, "t.json", &text, NULL, &error)) fail_msg("accepted: %s", json);
    if (!strstr(error.text, reason)) fail_msg("'%s' lacks '%s'", error.text, reason);
    assert_non_null(strstr(error.text, "t.json"));
    assert_null(strchr(error.text, '\n'));
    mt_tokenizer_close(tokenizer);
}

static void damaged_or_unsupported_json_is_refused_by_name(void **state) {
    (void)state;
    check_refused_json("", "not JSON");
    check_refused_json("[]", "not a JSON object");
    check_refused_json("{}", "no model");
    check_refused_json("{\"model\":{\"type\":\"WordPiece\"}}", "WordPiece");
    check_refused_json("{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}", "no vocabulary");
    check_refused_json("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", "-1");
    check_refused_json("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1099511627776},\"merges\":[]}}", "1099511627776");
    check_refused_json("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\\n\":0},\"merges\":[]}}", "the same id");
    check_refused_json("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", "not an integer");
    check_refused_json("{\"model\":{\"type\":\"BPE\"," VOCAB "}}", "no merges");
    check_refused_json("{\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[\"a c\"]}}", "vocabulary lacks");
    check_refused_json("{\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[\"ab\"]}}", "merge 0");
    check_refused_json("{\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[],\"unk_token\":\"?\"}}", "unk_token");
    check_refused_json("{\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[],\"dropout\":0.1}}", "dropout");
    check_refused_json("{" MODEL ",\"normalizer\":{\"type\":\"BertNormalizer\"}}", "BertNormalizer");
    check_refused_json("{" MODEL ",\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}}", "UnicodeScripts");
    check_refused_json("{" MODEL ",\"decoder\":{\"type\":\"WordPiece\"}}", "WordPiece");
    check_refused_json("{" MODEL ",\"added_tokens\":[{\"id\":0,\"content\":\"x\"}]}", "id 0");
    check_refused_json("{" MODEL ",\"added_tokens\":[{\"content\":\"x\"}]}", "lacks its id");
}

#define SPLIT(regex)                                                                                                   \
    "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"" regex "\"}" \
    "}}"

static void bad_patterns_are_refused_and_catastrophic_ones_fail(void **state) {
    (void)state;
    skip_without_libraries();
    check_refused_json(SPLIT("(a"), "does not compile");
    check_refused_json(SPLIT("[a[b]]"), "Oniguruma");
    check_refused_json(SPLIT("\\\\h"), "Oniguruma");
    mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
    mt_text json = {SPLIT("(a|aa)+[bc]"), (int64_t)strlen(SPLIT("(a|aa)+[bc]")), 0};
    mt_error error = {0};
    mt_ids ids = {0};
    char text[200];
    memset(text, 'a', sizeof text);
    assert_int_equal(mt_tokenizer_load_json(tokenizer, "t.json", &json, NULL, &error), 0);
    assert_int_equal(mt_tokenizer_encode(tokenizer, text, sizeof text, &ids, &error), -1);
    assert_non_null(strstr(error.text, "fails on this text"));
    assert_int_equal(ids.count, 0);
    free(ids.data);
    mt_tokenizer_close(tokenizer);
}

/* Matches are those of Oniguruma in Ruby's syntax: the texts in which tokenizers 0.23 has replaced them by X. PCRE2
 * gives other ones to each of these patterns. */
static void patterns_mean_what_oniguruma_means(void **state) {
    (void)state;
    skip_without_libraries();
    static const struct {
        const char *pattern, *text, *replaced;
    } rows[] = {
        {"(?m)b.a", "ab\nab", "aXb"},
        {"(?m:b.)b", "ab\nb", "aX"},
        {"a{,2}b", "aaab", "aX"},
        {"a{0,2}", "aaab", "XXbX"},
        {"a|", "ab", "XbX"},
        {"\\\\p{Han}+", "\344\270\255\343\200\201a", "X\343\200\201a"},
        {"\\\\p{^Han}+", "\344\270\255\343\200\201a", "\344\270\255X"},
        {"\\\\w+", "a\302\262 b", "X X"},
        {"[\\\\w]+", "a\302\262 b", "X\302\262 X"},
        {"\\\\ba", "\314\201a a", "\314\201a X"},
        {"b\\\\B", "b\314\201 b", "X\314\201 b"},
        {"[[:punct:]]+", "a\302\242b", "aXb"},
        {"[[:alpha:]]+", "\342\223\220 \302\262", "X \302\262"},
        {"[[:^lower:]]+", "a\302\252\302\262", "a\302\252X"},
    };
    static const char *const refused[] = {"[\\\\W]", "\\\\v", "\\\\Qa", "\\\\pL", "(?s)a", "[[:^word:]]"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char json[1024];
        snprintf(json, sizeof json,
                 "{\"decoder\":{\"type\":\"Fuse\"},\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"%s\"},"
                 "\"content\":\"X\"},"
                 "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{\"a\":0,\"b\":1,\"X\":2,\" \":3,\"\\n\":4,"
                 "\"\344\270\255\":5,\"\343\200\201\":6,\"\302\262\":7,\"\314\201\":8,\"\302\242\":9,\"\342\223\220\":"
                 "10,\"\302\252\":11}}}",
                 rows[i].pattern);
        mt_text file = {json, (int64_t)strlen(json), 0}, text = {0};
        mt_error error = {0};
        mt_ids ids = {0};
        mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
        if (mt_tokenizer_load_json(tokenizer, "t.json", &file, NULL, &error)) fail_msg("%s", error.text);
        assert_int_equal(mt_tokenizer_encode(tokenizer, rows[i].text, (int64_t)strlen(rows[i].text), &ids, &error), 0);
        assert_int_equal(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &text, &error), 0);
        if (text.bytes != (int64_t)strlen(rows[i].replaced) ||
            memcmp(text.data, rows[i].replaced, (size_t)text.bytes) != 0)
            fail_msg("%s makes %.*s of %s, not %s", rows[i].pattern, (int)text.bytes, text.data, rows[i].text,
                     rows[i].replaced);
        free(text.data);
        free(ids.data);
        mt_tokenizer_close(tokenizer);
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char json[512];
        snprintf(json, sizeof json, SPLIT("%s"), refused[i]);
        check_refused_json(json, "Oniguruma");
    }
}

/* The limit on backtracking holds for the whole text: no start alone reaches it here. Without it the first text has
 * its tokens, after a hundred times as many attempts. */
static void a_text_of_many_costly_matches_fails_soon(void **state) {
    (void)state;
    skip_without_libraries();
    enum { BYTES = 3400 };
    const char costly[] = SPLIT("a{0,60}a{0,60}a{0,60}a{0,60}b|a"), cheap[] = SPLIT("(?:a|b)+c|a");
    mt_text files[] = {{(char *)costly, sizeof costly - 1, 0}, {(char *)cheap, sizeof cheap - 1, 0}};
    char text[BYTES];
    memset(text, 'a', sizeof text);
    for (int i = 0; i < 2; i++) {
        mt_error error = {0};
        mt_ids ids = {0};
        mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
        assert_int_equal(mt_tokenizer_load_json(tokenizer, "t.json", &files[i], NULL, &error), 0);
        int status = mt_tokenizer_encode(tokenizer, text, i == 0 ? BYTES : 300, &ids, &error);
        assert_int_equal(status, i == 0 ? -1 : 0);
        if (i == 0) assert_non_null(strstr(error.text, "fails on this text of 3400 bytes: it backtracks too much"));
        assert_int_equal(ids.count, i == 0 ? 0 : 300);
        free(ids.data);
        mt_tokenizer_close(tokenizer);
    }
}

/* Encodes `text` with a tokenizer.json; its status. */
static int encode_with(const char *json, double match_seconds, const char *text, int64_t bytes, mt_ids *ids,
                       mt_error *error) {
    mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
    mt_text file = {(char *)json, (int64_t)strlen(json), 0};
    if (mt_tokenizer_load_json(tokenizer, "t.json", &file, NULL, error) != 0) fail_msg("%s", error->text);
    tokenizer->match_seconds = match_seconds;
    int status = mt_tokenizer_encode(tokenizer, text, bytes, ids, error);
    mt_tokenizer_close(tokenizer);
    return status;
}

/* Here by a limit of a nanosecond and a pattern that is fast. */
static void searches_of_a_text_have_a_limit_of_time(void **state) {
    (void)state;
    skip_without_libraries();
    char text[400];
    mt_ids ids = {0};
    mt_error error = {0};
    memset(text, 'a', sizeof text);
    assert_int_equal(encode_with(SPLIT("a"), 1e-9, text, sizeof text, &ids, &error), -1);
    assert_non_null(strstr(error.text, "t.json: the pattern 'a' fails on this text of 400 bytes: it takes too long"));
    assert_int_equal(ids.count, 0);
    assert_int_equal(encode_with(SPLIT("b"), 1e-9, text, sizeof text, &ids, &error), -1); // one search of many starts
    assert_int_equal(encode_with(SPLIT("a"), 0, text, sizeof text, &ids, &error), 0);
    assert_int_equal(ids.count, 400);
    free(ids.data);
}

/* A search tries some starts, then twice as many: a match is found wherever it begins. */
static void a_match_is_found_behind_any_number_of_starts(void **state) {
    (void)state;
    skip_without_libraries();
    char text[600];
    mt_error error = {0};
    for (int64_t n = 1; n < 520; n++) { // a ... a b
        mt_ids ids = {0};
        memset(text, 'a', sizeof text);
        text[n] = 'b';
        assert_int_equal(encode_with(SPLIT("(?<=a)b"), 0, text, n + 1, &ids, &error), 0);
        assert_int_equal(ids.count, n + 1);
        free(ids.data);
    }
}

#define TIMES_10 "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aaaaaaaaaa\"}"
#define TIMES_10_9                                                                                                     \
    TIMES_10 "," TIMES_10 "," TIMES_10 "," TIMES_10 "," TIMES_10 "," TIMES_10 "," TIMES_10 "," TIMES_10 "," TIMES_10

/* Of a file of a kilobyte, a text of four bytes would become four gigabytes. */
static void rules_that_multiply_texts_are_refused(void **state) {
    (void)state;
    skip_without_libraries();
    mt_ids ids = {0};
    mt_error error = {0};
    const char normalizers[] = "{" MODEL ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[" TIMES_10_9 "]}}";
    assert_int_equal(encode_with(normalizers, 0, "aaaa", 4, &ids, &error), -1);
    assert_non_null(strstr(error.text, "t.json: its normalizers lengthen a text of "));
    check_refused_json("{" MODEL ",\"decoder\":{\"type\":\"Sequence\",\"decoders\":[" TIMES_10_9 "]}}",
                       "its decoders lengthen the texts of its tokens");
    // the parts of a text between added tokens, each with a prefix of 4 kB
    char *prefix = mt_calloc(4097), *json = mt_calloc(5000), text[2000];
    memset(prefix, 'a', 4096);
    sprintf(json,
            "{" MODEL ",\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"%s\"},"
            "\"added_tokens\":[{\"id\":9,\"content\":\"x\",\"normalized\":false}]}",
            prefix);
    for (int i = 0; i < 2000; i++) text[i] = i % 2 ? 'x' : 'a';
    assert_int_equal(encode_with(json, 0, text, sizeof text, &ids, &error), -1);
    assert_non_null(strstr(error.text, "its normalizers lengthen"));
    assert_int_equal(encode_with(json, 0, text, 200, &ids, &error), 0);
    free(prefix);
    free(json);
    free(ids.data);
}

/* At each place of a text that repeats a part of such a token, its search would go on to the token's end. */
static void tokens_too_long_to_search_for_are_refused(void **state) {
    (void)state;
    skip_without_libraries();
    mt_error error = {0};
    for (int bytes = MT_MAX_SEARCHED_TOKEN; bytes < MT_MAX_SEARCHED_TOKEN + 2; bytes++) {
        bool too_long = bytes > MT_MAX_SEARCHED_TOKEN;
        char *content = mt_calloc(bytes + 1), json[MT_MAX_SEARCHED_TOKEN + 300];
        memset(content, 'a', (size_t)bytes);
        sprintf(json, "{" MODEL ",\"added_tokens\":[{\"id\":9,\"content\":\"%s\"}]}", content);
        mt_text text = {json, (int64_t)strlen(json), 0};
        mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
        assert_int_equal(mt_tokenizer_load_json(tokenizer, "t.json", &text, NULL, &error), too_long ? -1 : 0);
        mt_tokenizer_close(tokenizer);
        if (too_long) assert_non_null(strstr(error.text, "t.json: token 'aaaaaaaaaaaaaaaaaaaa...' has 1025 bytes"));
        // one more piece of a SentencePiece model, normal or defined by its user
        for (int type = 1; type <= 4; type += 3) {
            mt_text model = read_whole(GOLDEN "unigram.model");
            int inner = bytes + 5;
            char head[] = {0x0A, (char)((inner & 127) | 128), (char)(inner >> 7),
                           0x0A, (char)((bytes & 127) | 128), (char)(bytes >> 7)};
            mt_text_append(&model, head, sizeof head);
            mt_text_append(&model, content, bytes);
            mt_text_append(&model, (const char[]){0x18, (char)type}, 2);
            tokenizer = mt_tokenizer_new("t.model");
            assert_int_equal(mt_tokenizer_load_sentencepiece(tokenizer, "t.model", &model, &error), too_long ? -1 : 0);
            mt_tokenizer_close(tokenizer);
            if (too_long)
                assert_non_null(strstr(error.text, "t.model: token 'aaaaaaaaaaaaaaaaaaaa...' has 1025 bytes"));
            free(model.data);
        }
        free(content);
    }
}

/* Every prefix of a model, and the model with a flipped byte, must be refused or usable. For sanitizers. */
static void truncated_and_corrupted_models_never_crash(void **state) {
    (void)state;
    static const char *const files[] = {GOLDEN "unigram.model", GOLDEN "bpe.model"};
    uint64_t seed = 1;
    for (int f = 0; f < 2; f++) {
        mt_text whole = read_whole(files[f]);
        for (int i = 0; i < 200; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            mt_text part = {whole.data, i % 2 ? whole.bytes : (int64_t)((seed >> 33) % (uint64_t)whole.bytes), 0};
            char *flipped = &whole.data[(seed >> 20) % (uint64_t)whole.bytes], was = *flipped;
            if (i % 2) *flipped ^= (char)(1 << (seed >> 61));
            mt_tokenizer *tokenizer = mt_tokenizer_new("t.model");
            mt_error error = {0};
            mt_ids ids = {0};
            if (mt_tokenizer_load_sentencepiece(tokenizer, "t.model", &part, &error))
                assert_non_null(strstr(error.text, "t.model"));
            else
                assert_int_equal(mt_tokenizer_encode(tokenizer, "caf\xC3\xA9 <sep> \xEF\xBC\xA1", 14, &ids, &error), 0);
            *flipped = was;
            free(ids.data);
            mt_tokenizer_close(tokenizer);
        }
        free(whole.data);
    }
}

/* A folder as Llama 2 has it is no damaged one: the message names the type that reads it. */
static void a_folder_with_sentencepiece_alone_names_its_type(void **state) {
    (void)state;
    char folder[64], command[300];
    mt_tokenizer *tokenizer;
    mt_error error;
    assert_int_equal(new_folder(folder), 0);
    snprintf(command, sizeof command, "cp %sbpe.model %s/tokenizer.model", GOLDEN, folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_HUGGINGFACE, folder, &error), -1);
    assert_non_null(strstr(error.text, "has tokenizer.model and no tokenizer.json; give --tokenizer-type "
                                       "SentencePieceTokenizer"));
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

static void missing_files_are_named(void **state) {
    (void)state;
    mt_tokenizer *tokenizer;
    mt_error error;
    assert_int_equal(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_HUGGINGFACE, "no/such.json", &error), -1);
    assert_non_null(strstr(error.text, "no/such.json"));
    assert_int_equal(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_SENTENCEPIECE, NULL, &error), -1);
    assert_non_null(strstr(error.text, "--tokenizer-model"));
    assert_int_equal(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_GPT2_BPE, GOLDEN "bpe.model", &error), -1);
    assert_non_null(strstr(error.text, "merges.txt"));
    assert_int_equal(mt_tokenizer_open_folder(&tokenizer, "tests", &error), -1);
    assert_non_null(strstr(error.text, "holds no tokenizer"));
}

static void a_megabyte_without_a_space_takes_no_quadratic_time(void **state) {
    (void)state;
    skip_without_libraries();
    static const char *const files[] = {GOLDEN "bytelevel.json", GOLDEN "metaspace.json"};
    mt_text text = {mt_malloc(1 << 20), 1 << 20, 0};
    memset(text.data, 'a', 1 << 20);
    for (int f = 0; f < 2; f++) {
        mt_tokenizer *tokenizer = open_or_fail(MT_TOKENIZER_HUGGINGFACE, files[f]);
        mt_ids ids = {0};
        mt_error error;
        // quadratic time would take hours, and the runner stops a suite after minutes
        assert_int_equal(mt_tokenizer_encode(tokenizer, text.data, text.bytes, &ids, &error), 0);
        free(ids.data);
        mt_tokenizer_close(tokenizer);
    }
    free(text.data);
}

/* A part of 65,536 symbols would end between b and c, which merge; bb and cb are in no token. */
static void long_words_are_cut_only_where_no_token_crosses(void **state) {
    (void)state;
    enum { REPEATS = 30000 };
    static const char unit[] = "ababbabcb";
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abab\":4,\"bc\":5,"
        "\"abc\":6,\"ca\":7},\"merges\":[\"a b\",\"ab ab\",\"b c\",\"ab c\"]}}";
    mt_text file = {(char *)json, (int64_t)strlen(json), 0}, text = {0};
    mt_tokenizer *tokenizer = mt_tokenizer_new("t.json");
    mt_ids ids = {0}, one = {0};
    mt_error error;
    assert_int_equal(mt_tokenizer_load_json(tokenizer, "t.json", &file, NULL, &error), 0);
    for (int i = 0; i < REPEATS; i++) mt_text_append(&text, unit, 9);
    assert_int_equal(mt_tokenizer_encode(tokenizer, unit, 9, &one, &error), 0);
    assert_int_equal(mt_tokenizer_encode(tokenizer, text.data, text.bytes, &ids, &error), 0);
    assert_int_equal(ids.count, REPEATS * one.count);
    for (int64_t i = 0; i < ids.count; i++) assert_int_equal(ids.data[i], one.data[i % one.count]);
    free(text.data);
    free(ids.data);
    free(one.data);
    mt_tokenizer_close(tokenizer);
}

static void a_missing_library_is_named(void **state) {
    (void)state;
    mt_tokenizer *tokenizer;
    mt_error error = {0};
    int failed = mt_tokenizer_open(&tokenizer, MT_TOKENIZER_HUGGINGFACE, GOLDEN "bytelevel.json", &error);
    assert_int_equal(failed, HAVE_LIBRARIES ? 0 : -1);
    if (failed) assert_non_null(strstr(error.text, "built without"));
    mt_tokenizer_close(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(metaspace_with_byte_fallback_matches_tokenizers),
        cmocka_unit_test(sentencepiece_unigram_matches_sentencepiece),
        cmocka_unit_test(sentencepiece_bpe_matches_sentencepiece),
        cmocka_unit_test(bytes_are_their_own_ids),
        cmocka_unit_test(streamed_bytes_come_out_as_whole_characters),
        cmocka_unit_test(eod_is_the_configured_token_or_has_a_usual_name),
        cmocka_unit_test(damaged_or_unsupported_json_is_refused_by_name),
        cmocka_unit_test(truncated_and_corrupted_models_never_crash),
        cmocka_unit_test(a_folder_with_sentencepiece_alone_names_its_type),
        cmocka_unit_test(missing_files_are_named),
        cmocka_unit_test(a_missing_library_is_named),
        cmocka_unit_test(long_words_are_cut_only_where_no_token_crosses),
        cmocka_unit_test(fused_unknown_characters_match_tokenizers),
        cmocka_unit_test(gpt2_vocab_and_merges_match_tokenizers),
        cmocka_unit_test(encode_matches_reference_vectors_of_gpt2),
        cmocka_unit_test(encode_matches_reference_vectors_of_llama3),
        cmocka_unit_test(bad_patterns_are_refused_and_catastrophic_ones_fail),
        cmocka_unit_test(patterns_mean_what_oniguruma_means),
        cmocka_unit_test(a_text_of_many_costly_matches_fails_soon),
        cmocka_unit_test(searches_of_a_text_have_a_limit_of_time),
        cmocka_unit_test(a_match_is_found_behind_any_number_of_starts),
        cmocka_unit_test(rules_that_multiply_texts_are_refused),
        cmocka_unit_test(tokens_too_long_to_search_for_are_refused),
        cmocka_unit_test(tiktoken_model_matches_tiktoken),
        cmocka_unit_test(damaged_tiktoken_models_are_refused_by_line),
        cmocka_unit_test(megatrons_ranks_match_tiktoken),
        cmocka_unit_test(other_ranks_of_tiktoken_are_refused),
        cmocka_unit_test(byte_level_json_matches_tokenizers),
        cmocka_unit_test(normalizers_and_splits_match_tokenizers),
        cmocka_unit_test(encode_matches_reference_vectors_of_qwen2),
        cmocka_unit_test(whole_corpora_match_the_reference_libraries_and_decode_to_themselves),
        cmocka_unit_test(invalid_utf8_is_encoded_as_replacement_characters),
        cmocka_unit_test(ids_outside_the_vocabulary_are_refused),
        cmocka_unit_test(a_saved_tokenizer_is_found_in_its_folder),
        cmocka_unit_test(files_beside_a_tokenizer_are_saved),
        cmocka_unit_test(threads_share_a_tokenizer),
        cmocka_unit_test(a_megabyte_without_a_space_takes_no_quadratic_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
