/* image_chat.c: conversations with pictures, as tokens and pictures. */
#include "image_chat.h"

#include "../base/file.h"
#include "../tokens/tokenizer_json.h"
#include "../tokens/tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char image_mark[] = MT_IMAGE_MARK;
enum { IMAGE_MARK_BYTES = sizeof image_mark - 1 };

void mt_images_cut(mt_images *images, int64_t count) {
    for (; images->count > count; images->count--)
        if (!images->borrows) free(images->items[images->count - 1].source);
    if (count > 0) return;
    free(images->items);
    *images = (mt_images){0};
}

static void push_image(mt_images *images, mt_image image) {
    if (images->count == images->capacity) {
        images->capacity = 2 * images->capacity + 4;
        images->items = mt_realloc(images->items, images->capacity * (int64_t)sizeof *images->items);
    }
    images->items[images->count++] = image;
}

void mt_images_move(mt_images *images, mt_images *from) {
    for (int64_t i = 0; i < from->count; i++) push_image(images, from->items[i]);
    from->count = 0;
}

void mt_images_borrow(mt_images *images, const mt_images *from, int64_t first, int64_t count) {
    MT_CHECK(images->count == 0 || images->borrows);
    images->borrows = true;
    for (int64_t i = first; i < first + count; i++) push_image(images, from->items[i]);
}

void mt_images_copy(mt_images *images, const mt_images *from, int64_t first, int64_t count) {
    MT_CHECK(!images->borrows);
    for (int64_t i = first; i < first + count; i++) {
        mt_image image = from->items[i];
        image.source = mt_strdup(image.source);
        push_image(images, image);
    }
}

int mt_image_reader_open(mt_image_reader *reader, const mt_run_options *options, const char *tokenizer,
                         mt_error *error) {
    mt_image_config *c = &reader->config;
    *reader = (mt_image_reader){.image_token_id = options->stack.vision.image_token_id};
    if (options->stack.vision.tower == MT_VISION_NONE)
        return mt_error_set(error, "the model has no vision tower (--vision-tower), so it takes no pictures");
    char *folder = tokenizer ? mt_path_folder(tokenizer) : NULL;
    int status = mt_image_config_read(c, &options->stack, folder, error);
    free(folder);
    if (status != 0) return -1;
    if (options->image_min_pixels > 0) c->min_pixels = options->image_min_pixels;
    if (options->image_max_pixels > 0) c->max_pixels = options->image_max_pixels;
    int64_t side = c->patch_size * c->merge_size;
    if (c->min_pixels <= c->max_pixels && c->max_pixels >= side * side) return 0;
    return mt_error_set(error,
                        "pictures would have %lld to %lld pixels, and a token has %lld; change --image-min-pixels or "
                        "--image-max-pixels",
                        (long long)c->min_pixels, (long long)c->max_pixels, (long long)(side * side));
}

/* ---- pictures of messages */

/* The list beside the messages, and its pictures that have found a place. */
typedef struct beside_list {
    const json_t *list;
    const char *folder; // where relative paths begin; NULL: the working directory
    size_t count, taken;
} beside_list;

static const char data_address[] = "data:", file_address[] = "file://";
enum { DATA_BYTES = sizeof data_address - 1, FILE_BYTES = sizeof file_address - 1 };

/* The path of a picture: a text, or a field of an object. NULL: none. */
static const char *source_of(const json_t *item) {
    static const char *const keys[] = {"image", "image_url", "bytes", "path", "url"};
    for (int i = 0; json_is_object(item) && i < 5; i++) {
        const char *source = source_of(json_object_get(item, keys[i]));
        bool has_bytes = source && strncasecmp(source, data_address, DATA_BYTES) == 0; // of a file of Parquet
        if (source && (has_bytes || strcmp(keys[i], "bytes") != 0)) return source;
    }
    const char *text = json_string_value(item);
    return text && *text && strlen(text) == json_string_length(item) ? text : NULL;
}

static int take_source(mt_images *images, const char *source, const char *folder, mt_error *error) {
    bool is_data = strncasecmp(source, data_address, DATA_BYTES) == 0;
    if (strncasecmp(source, "http://", 7) == 0 || strncasecmp(source, "https://", 8) == 0)
        return mt_error_set(error, "the picture %.200s is on a network; download it, and name the file", source);
    if (strncmp(source, file_address, FILE_BYTES) == 0) source += FILE_BYTES;
    bool joins = folder && !is_data && *source != '/';
    push_image(images, (mt_image){.source = joins ? mt_path_join(folder, source) : mt_strdup(source)});
    return 0;
}

/* A picture of the list beside the messages, for the next place. */
static int take_beside(mt_images *images, beside_list *beside, mt_error *error) {
    const json_t *item = json_is_array(beside->list) ? json_array_get(beside->list, beside->taken) : beside->list;
    if (beside->taken++ >= beside->count) return 0; // counted
    const char *source = source_of(item);
    if (!source)
        return mt_error_set(error, "\"images\": item %lld is not the path of a picture%s", (long long)beside->taken,
                            json_object_get(item, "bytes") ? "; write its bytes to a file" : "");
    return take_source(images, source, beside->folder, error);
}

static json_t *image_part(void) {
    return json_pack("{s:s}", "type", "image");
}

/* Appends the parts of a text, with a picture for each image_mark. */
static int split_text(mt_images *images, beside_list *beside, json_t *parts, const json_t *content, mt_error *error) {
    const char *text = json_string_value(content), *end = text + json_string_length(content);
    for (const char *at = text; at <= end; at++) {
        bool found = end - at >= IMAGE_MARK_BYTES && memcmp(at, image_mark, IMAGE_MARK_BYTES) == 0;
        if (!found && at < end) continue;
        if (at > text)
            json_array_append_new(
                parts, json_pack("{s:s, s:o}", "type", "text", "text", json_stringn(text, (size_t)(at - text))));
        if (!found) break;
        json_array_append_new(parts, image_part());
        if (take_beside(images, beside, error) != 0) return -1;
        text = at + IMAGE_MARK_BYTES, at = text - 1;
    }
    return 0;
}

/* Appends one part of a content, without the path of its picture. */
static int take_part(mt_images *images, beside_list *beside, json_t *parts, json_t *part, mt_error *error) {
    const char *type = json_string_value(json_object_get(part, "type"));
    if (!json_is_object(part)) return mt_error_set(error, "a part of a message's content is not an object");
    if (!type && json_object_get(part, "text")) type = "text";
    if (!type && (json_object_get(part, "image") || json_object_get(part, "image_url"))) type = "image";
    if (type && strcmp(type, "text") == 0) {
        if (!json_is_string(json_object_get(part, "text")))
            return mt_error_set(error, "a part of a message's content has the type text and no \"text\"");
        return json_array_append(parts, part);
    }
    if (!type || (strcmp(type, "image") != 0 && strcmp(type, "image_url") != 0))
        return mt_error_set(error,
                            "a part of a message's content has %s%.40s%s; parts are {\"type\": \"text\"} and "
                            "{\"type\": \"image\"}",
                            type ? "the type \"" : "no type", type ? type : "", type ? "\"" : "");
    json_array_append_new(parts, image_part());
    const char *source = source_of(part);
    return source ? take_source(images, source, beside->folder, error) : take_beside(images, beside, error);
}

static int take_content(mt_images *images, beside_list *beside, json_t *message, const char *key, mt_error *error) {
    json_t *content = json_object_get(message, key), *part;
    size_t i;
    int status = 0;
    bool splits = beside->count > 0 && json_is_string(content) && strstr(json_string_value(content), image_mark);
    if (!splits && !json_is_array(content)) return 0;
    json_t *parts = json_array();
    if (splits) status = split_text(images, beside, parts, content, error);
    if (!splits) json_array_foreach(content, i, part) {
            status = take_part(images, beside, parts, part, error);
            if (status != 0) break;
        }
    json_object_set_new(message, key, parts);
    return status;
}

int mt_images_take(mt_images *images, json_t *messages, const json_t *list, const char *folder, mt_error *error) {
    beside_list beside = {.list = list, .folder = folder};
    json_t *message;
    size_t i;
    beside.count = json_is_array(list) ? json_array_size(list) : source_of(list) != NULL;
    if (list && !json_is_null(list) && !json_is_array(list) && beside.count == 0)
        return mt_error_set(error, "\"images\" is not a list of paths of pictures");
    json_array_foreach(messages, i, message) {
        if (take_content(images, &beside, message, "content", error) != 0) return -1;
        if (take_content(images, &beside, message, "value", error) != 0) return -1;
    }
    if (beside.taken == beside.count) return 0;
    return mt_error_set(error,
                        "has %lld pictures in \"images\" and %lld places for them, %s in a text or a part "
                        "{\"type\": \"image\"} without a path; each picture needs one",
                        (long long)beside.count, (long long)beside.taken, image_mark);
}

/* ---- files */

/* The bytes of a picture, to free. */
static char *read_source(const char *source, int64_t *bytes, mt_error *error) {
    static const char base64[] = ";base64,";
    static const int64_t max_file_bytes = (int64_t)1 << 30;
    if (strncasecmp(source, data_address, DATA_BYTES) != 0) return mt_file_read(source, max_file_bytes, bytes, error);
    const char *begin = strstr(source, base64);
    mt_text text = {0};
    if (begin) begin += sizeof base64 - 1;
    if (begin && *begin && mt_base64_append(&text, begin, (int64_t)strlen(begin))) {
        *bytes = text.bytes;
        return text.data;
    }
    free(text.data);
    mt_error_set(error, "a picture has the address %.40s..., which is not data:image/png;base64, and its bytes",
                 source);
    return NULL;
}

/* Decodes a picture, to be freed; sets its fingerprint. */
static int read_picture(mt_picture *picture, const char *source, const mt_image_config *config, uint64_t *fingerprint,
                        mt_image_grid *grid, mt_error *error) {
    int64_t count = 0;
    char *bytes = read_source(source, &count, error);
    const char *path = strncasecmp(source, data_address, DATA_BYTES) == 0 ? "a picture of an address" : source;
    int status = bytes ? mt_picture_decode(picture, bytes, count, path, error) : -1;
    if (status == 0) *fingerprint = mt_contents_fingerprint(bytes, count, true);
    if (status == 0) {
        status = mt_image_grid_of(grid, config, picture->height, picture->width, path, error);
        if (status != 0) mt_picture_free(picture);
    }
    free(bytes);
    return status;
}

int64_t mt_image_tokens(const mt_image_config *config, const mt_image_grid *grid) {
    return grid->height * grid->width / (config->merge_size * config->merge_size);
}

int mt_image_read(float *patches, const mt_image *image, const mt_image_config *config, mt_error *error) {
    mt_picture picture;
    mt_image_grid grid;
    uint64_t fingerprint;
    if (read_picture(&picture, image->source, config, &fingerprint, &grid, error) != 0) return -1;
    bool same =
        fingerprint == image->fingerprint && grid.height == image->grid.height && grid.width == image->grid.width;
    if (same) mt_image_patches(patches, config, &picture, &grid);
    mt_picture_free(&picture);
    return same ? 0 : mt_error_set(error, "%.400s: has changed since the run began; restore it", image->source);
}

/* ---- tokens */

int mt_images_check_chat(const mt_chat *chat, mt_error *error) {
    if (mt_chat_takes_extras(chat)) return 0;
    return mt_error_set(error, "has pictures, which only the chat template of a folder writes; --chat-template auto "
                               "takes that of the tokenizer's");
}

int mt_images_expand(mt_images *images, int64_t first, const mt_image_reader *reader, mt_ids *ids, mt_ids *turns,
                     int64_t from, mt_error *error) {
    int64_t places = 0, count = images->count - first, k = first;
    for (int64_t i = from; i < ids->count; i++) places += ids->data[i] == reader->image_token_id;
    if (places != count)
        return mt_error_set(error,
                            "has %lld pictures, and its text %lld image tokens (token %lld); a picture needs a place "
                            "in a message, and a chat template of the tokenizer's folder that writes one token for it",
                            (long long)count, (long long)places, (long long)reader->image_token_id);
    if (count == 0) return 0;
    for (int64_t i = first; i < images->count; i++) {
        mt_image *image = &images->items[i];
        mt_picture picture;
        if (read_picture(&picture, image->source, &reader->config, &image->fingerprint, &image->grid, error) != 0)
            return -1;
        mt_picture_free(&picture);
    }
    mt_ids whole = {0}, whole_turns = {0};
    for (int64_t i = from; i < ids->count; i++) {
        bool is_image = ids->data[i] == reader->image_token_id;
        int64_t copies = is_image ? mt_image_tokens(&reader->config, &images->items[k++].grid) : 1;
        for (int64_t c = 0; c < copies; c++) {
            mt_ids_push(&whole, ids->data[i]);
            mt_ids_push(&whole_turns, turns->data[turns->count - ids->count + i]);
        }
    }
    turns->count -= ids->count - from, ids->count = from;
    for (int64_t i = 0; i < whole.count; i++) {
        mt_ids_push(ids, whole.data[i]);
        mt_ids_push(turns, whole_turns.data[i]);
    }
    free(whole.data);
    free(whole_turns.data);
    return 0;
}

/* The messages as chat.h takes them: roles and texts; other fields, and contents of parts, are in `fields`. */
static int list_messages(mt_chat_message *messages, json_t **fields, const json_t *list, mt_error *error) {
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) {
        const char *role = json_string_value(json_object_get(item, "role"));
        const json_t *content = json_object_get(item, "content");
        if (!role) return mt_error_set(error, "message %lld has no \"role\"", (long long)i + 1);
        if (content && !json_is_string(content) && !json_is_array(content) && !json_is_null(content))
            return mt_error_set(error, "message %lld: \"content\" is neither a text nor a list of parts",
                                (long long)i + 1);
        messages[i] = (mt_chat_message){role, json_string_value(content), (int64_t)json_string_length(content)};
        fields[i] = json_copy(item);
        json_object_del(fields[i], "role");
        if (!json_is_array(content)) json_object_del(fields[i], "content");
    }
    return 0;
}

int mt_image_chat_encode(mt_chat *chat, const mt_image_reader *reader, const mt_image_chat *conversation, mt_ids *ids,
                         mt_ids *turns, mt_images *images, mt_error *error) {
    const json_t *list = conversation->messages, *beside = conversation->beside;
    const mt_chat_extras *extras = conversation->extras;
    int64_t first = images->count, from = ids->count, from_turns = turns->count, count = (int64_t)json_array_size(list);
    json_t *own = json_deep_copy(list);
    mt_chat_message *messages = mt_calloc((count + 1) * (int64_t)sizeof *messages);
    json_t **fields = mt_calloc((count + 1) * (int64_t)sizeof *fields);
    int status = mt_images_take(images, own, beside, reader->folder, error);
    if (status == 0) status = list_messages(messages, fields, own, error);
    if (status == 0 && images->count > first) status = mt_images_check_chat(chat, error);
    if (status == 0) {
        mt_chat_extras more = extras ? *extras : (mt_chat_extras){0};
        more.fields = (const json_t *const *)fields;
        mt_chat_set_extras(chat, &more);
        status = mt_chat_encode(chat, messages, count, conversation->generates, ids, turns, error);
        mt_chat_set_extras(chat, NULL);
    }
    if (status == 0) status = mt_images_expand(images, first, reader, ids, turns, from, error);
    if (status != 0) {
        ids->count = from, turns->count = from_turns;
        mt_images_cut(images, first);
    }
    for (int64_t i = 0; i < count; i++) json_decref(fields[i]);
    free(fields);
    free(messages);
    json_decref(own);
    return status;
}
