/* fuzz_image_chat.c: a JSON line of arbitrary bytes, messages with pictures -> parts, and tokens of the pictures that
 * can be read, relative to tests/golden/images. */
#include "data/base/file.h"
#include "data/datasets/image_chat.h"
#include "data/tokens/tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

enum { IMAGE_TOKEN = 5, TEXT_TOKEN = 6 };

/* A token for each part, as a template writes them; a content that is no list has one. */
static void push_content(const json_t *content, mt_ids *ids, mt_ids *turns) {
    size_t i;
    json_t *part;
    if (!json_is_array(content)) mt_ids_push(ids, TEXT_TOKEN), mt_ids_push(turns, -1);
    json_array_foreach(content, i, part) {
        const char *type = json_string_value(json_object_get(part, "type"));
        bool is_image = type && strcmp(type, "image") == 0;
        MT_CHECK(json_is_object(part) && (is_image || json_is_string(json_object_get(part, "text"))));
        MT_CHECK(!is_image || json_object_size(part) == 1);
        mt_ids_push(ids, is_image ? IMAGE_TOKEN : TEXT_TOKEN), mt_ids_push(turns, (int32_t)i);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mt_run_options options = {0};
    options.stack = (mt_options){.vision = {.tower = MT_VISION_QWEN3,
                                            .patch_size = 4,
                                            .temporal_patch_size = 2,
                                            .spatial_merge_size = 2,
                                            .image_token_id = IMAGE_TOKEN}};
    mt_image_reader reader;
    mt_images images = {0};
    mt_ids ids = {0}, turns = {0};
    mt_error error = {{0}};
    size_t i;
    json_t *line = mt_json_parse((const char *)data, (int64_t)size, JSON_ALLOW_NUL, NULL, &error), *message;
    if (!line) return 0;
    MT_CHECK(mt_image_reader_open(&reader, &options, NULL, &error) == 0);
    reader.config.min_pixels = 256, reader.config.max_pixels = 1600;
    json_t *messages = json_object_get(line, "messages");
    const json_t *beside = json_object_get(line, "images");
    int status = mt_images_take(&images, messages, beside, "tests/golden/images", &error);
    if (status == 0) {
        json_array_foreach(messages, i, message) push_content(json_object_get(message, "content"), &ids, &turns);
        status = mt_images_expand(&images, 0, &reader, &ids, &turns, 0, &error);
        int64_t tokens = 0, expected = 0;
        for (int64_t t = 0; t < ids.count; t++) tokens += ids.data[t] == IMAGE_TOKEN;
        for (int64_t k = 0; k < images.count; k++) expected += mt_image_tokens(&reader.config, &images.items[k].grid);
        MT_CHECK(turns.count == ids.count && (status != 0 || tokens == expected));
    }
    MT_CHECK(status == 0 || (error.text[0] != '\0' && !strchr(error.text, '\n')));
    mt_images_cut(&images, 0);
    free(ids.data);
    free(turns.data);
    json_decref(line);
    return 0;
}
