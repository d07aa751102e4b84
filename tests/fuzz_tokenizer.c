/* fuzz_tokenizer.c: libFuzzer target for tokenizer files. The first byte selects the format, the rest is the file. A
 * tokenizer that opens must encode and decode a text without a fault, within libFuzzer's limits of memory and time.
 *
 * clang -fsanitize=fuzzer,address,undefined ... tests/fuzz_tokenizer.c, then ./fuzz_tokenizer CORPUS */
#include "../data/tokens/tokenizer_encode.h"
#include "../data/tokens/tokenizer_json.h"
#include "../data/tokens/tokenizer_sentencepiece.h"

#include <stdlib.h>
#include <string.h>

static const char sample[] = "Hello, world's  42nd \xC3\xA9t\xC3\xA9!\n\n<|endoftext|> \xE2\x96\x81"
                             "aaaaaaaabc\0\xFF "
                             "\xE4\xBD\xA0\xE5\xA5\xBD <0x41> </s> \xF0\x9F\xA6\x99";

static int load(mt_tokenizer *tokenizer, int format, const mt_text *file, mt_error *error) {
    if (format == 0) return mt_tokenizer_load_json(tokenizer, "tokenizer.json", file, NULL, error);
    if (format == 1) return mt_tokenizer_load_sentencepiece(tokenizer, "tokenizer.model", file, error);
    const char *zero = file->bytes ? memchr(file->data, 0, (size_t)file->bytes) : NULL; // vocab.json, NUL, second file
    mt_text first = {file->data, zero ? zero - file->data : file->bytes, 0}, second = {0};
    if (zero) second = (mt_text){(char *)zero + 1, file->data + file->bytes - zero - 1, 0};
    if (format == 2) return mt_tokenizer_load_gpt2(tokenizer, "vocab.json", &first, "merges.txt", &second, error);
    return mt_tokenizer_load_json(tokenizer, "tokenizer.json", &first, &second, error);
}

static void use(const mt_tokenizer *tokenizer) {
    mt_error error;
    mt_ids ids = {0};
    mt_text text = {0}, streamed = {0};
    mt_decoder *decoder = mt_decoder_open(tokenizer);
    if (!mt_tokenizer_encode(tokenizer, sample, sizeof sample - 1, &ids, &error))
        MT_CHECK(!mt_tokenizer_decode(tokenizer, ids.data, ids.count, &text, &error));
    for (int64_t i = 0; i < ids.count; i++) MT_CHECK(!mt_decode_next(decoder, ids.data[i], &streamed, &error));
    for (int32_t id = -1; id < 300; id++) mt_decode_next(decoder, id, &streamed, &error);
    mt_decode_end(decoder, &streamed);
    MT_CHECK(mt_utf8_is_valid(streamed.data, streamed.bytes));
    mt_decoder_close(decoder);
    free(streamed.data);
    free(text.data);
    free(ids.data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    mt_error error = {0};
    mt_text file = {0};
    mt_text_append(&file, (const char *)data + 1, (int64_t)size - 1);
    mt_tokenizer *tokenizer = mt_tokenizer_new("fuzzed");
    if (!load(tokenizer, data[0] % 4, &file, &error))
        use(tokenizer);
    else
        MT_CHECK(error.text[0] && !strchr(error.text, '\n')); // a message of one line
    mt_tokenizer_close(tokenizer);
    free(file.data);
    return 0;
}
