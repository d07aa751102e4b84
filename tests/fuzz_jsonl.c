/* fuzz_jsonl.c: splitting of arbitrary bytes into documents, JSONL or plain text. The first byte selects the format. */
#include "data/base/text.h"

#include <string.h>

static int add_up(void *context, int64_t key, const char *text, int64_t bytes, mt_error *error) {
    (void)error;
    MT_CHECK(key >= 0 && key < 2 && text[bytes] == '\0');
    int64_t *sum = context; // reads every byte of the text
    for (int64_t i = 0; i < bytes; i++) *sum += (unsigned char)text[i];
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *names[] = {"text", "b"};
    const mt_strings keys = {2, names};
    if (size == 0) return 0;
    mt_text_format format = data[0] % 4;
    const char *text = (const char *)data + 1, *end = (const char *)data + size;
    while (text < end) {
        const char *next = mt_text_document_end(format, text, end);
        MT_CHECK(!next || (next > text && next <= end));
        if (!next) next = end;
        mt_error error;
        int64_t sum = 0;
        if (format == MT_TEXT_JSONL && mt_jsonl_read(text, next - text, &keys, add_up, &sum, &error) != 0)
            MT_CHECK(error.text[0] != '\0' && !strchr(error.text, '\n'));
        text = next;
    }
    return 0;
}
