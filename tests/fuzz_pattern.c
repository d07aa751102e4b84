/* fuzz_pattern.c: any bytes as the regular expression of a tokenizer.json, on a text of any bytes. A pattern is refused
 * with one line, or cuts the text: the tokens spell it again. The first two bytes are the length of the pattern. */
#include "../data/tokens/tokenizer_encode.h"
#include "../data/tokens/tokenizer_json.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A byte-level vocabulary of every byte, without merges: every text has tokens. */
static mt_tokenizer *open_bytes(const char *pattern, int64_t bytes, mt_error *error) {
    mt_tokenizer *tokenizer = mt_tokenizer_new("tokenizer.json");
    json_t *vocabulary = json_object();
    for (int byte = 0, next = 256; byte < 256; byte++) { // GPT-2's letters for bytes
        bool shown = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        mt_text letter = {0};
        mt_utf8_append(&letter, (uint32_t)(shown ? byte : next++));
        mt_text_append(&letter, "", 1);
        json_object_set_new(vocabulary, letter.data, json_integer(byte));
        free(letter.data);
    }
    json_t *json =
        json_pack("{s:{s:s, s:o, s:[]}, s:{s:s, s:[{s:s, s:s, s:{s:s%}}, {s:s, s:b, s:b}]}, s:{s:s}}", "model", "type",
                  "BPE", "vocab", vocabulary, "merges", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type",
                  "Split", "behavior", "Isolated", "pattern", "Regex", pattern, (size_t)bytes, "type", "ByteLevel",
                  "add_prefix_space", 0, "use_regex", 0, "decoder", "type", "ByteLevel");
    if (!json) { // not UTF-8, or with a NUL
        mt_tokenizer_close(tokenizer);
        return NULL; // json_pack has freed the vocabulary
    }
    mt_text file = {.data = json_dumps(json, 0)};
    file.bytes = (int64_t)strlen(file.data);
    json_decref(json);
    error->text[0] = 0;
    if (mt_tokenizer_load_json(tokenizer, "tokenizer.json", &file, NULL, error) != 0) {
        MT_CHECK(error->text[0] && !strchr(error->text, '\n'));
        mt_tokenizer_close(tokenizer);
        tokenizer = NULL;
    }
    free(file.data);
    return tokenizer;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    int64_t bytes = mt_min((int64_t)size - 2, data[0] | data[1] << 8);
    const char *pattern = (const char *)data + 2, *text = pattern + bytes;
    int64_t text_bytes = (const char *)data + size - text;
    mt_error error = {{0}};
    mt_tokenizer *tokenizer = open_bytes(pattern, bytes, &error);
    if (!tokenizer) return 0;
    mt_ids ids = {0};
    mt_text again = {0}, repaired = {0};
    mt_utf8_repair(&repaired, text, text_bytes);
    if (mt_tokenizer_encode(tokenizer, text, text_bytes, &ids, &error) == 0) {
        MT_CHECK(mt_tokenizer_decode(tokenizer, ids.data, ids.count, &again, &error) == 0);
        MT_CHECK(again.bytes == repaired.bytes);
        MT_CHECK(again.bytes == 0 || memcmp(again.data, repaired.data, (size_t)again.bytes) == 0);
    } else {
        MT_CHECK(error.text[0] && !strchr(error.text, '\n'));
    }
    free(repaired.data);
    free(again.data);
    free(ids.data);
    mt_tokenizer_close(tokenizer);
    return 0;
}
