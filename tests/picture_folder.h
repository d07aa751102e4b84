/* picture_folder.h: a folder with the tokenizer and the chat template of tests/golden/images/chat.json. */
#ifndef MT_TEST_PICTURE_FOLDER_H
#define MT_TEST_PICTURE_FOLDER_H

#include "../data/base/file.h"
#include "folder.h"

#include <jansson.h>

enum { PICTURE_IMAGE_TOKEN = 1028, PICTURE_VOCABULARY = 1030 };

/* Writes tokenizer.json, tokenizer_config.json and chat_template.jinja to the folder `root`: the demo's tokenizer with
 * the special tokens of `golden`. */
static inline void write_picture_folder(const json_t *golden) {
    mt_error error;
    json_t *tokenizer = mt_json_read("data/demo-tokenizer.json", &error), *text;
    json_t *config = json_pack("{s:s}", "eos_token", "<|im_end|>");
    size_t i;
    assert_non_null(tokenizer);
    json_int_t vocab = (json_int_t)json_object_size(json_object_get(json_object_get(tokenizer, "model"), "vocab"));
    json_array_foreach(json_object_get(golden, "special"), i, text) json_array_append_new(
        json_object_get(tokenizer, "added_tokens"),
        json_pack("{s:I, s:O, s:b, s:b, s:b, s:b, s:b}", "id", vocab + (json_int_t)i, "content", text, "single_word", 0,
                  "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
    assert_int_equal(json_dump_file(tokenizer, at("tokenizer.json"), 0), 0);
    assert_int_equal(json_dump_file(config, at("tokenizer_config.json"), 0), 0);
    FILE *file = fopen(at("chat_template.jinja"), "w");
    assert_non_null(file);
    fputs(json_string_value(json_object_get(golden, "template")), file);
    fclose(file);
    json_decref(config);
    json_decref(tokenizer);
}

#endif
