/* picture_prompts.c: pictures in the prompts and messages of infer. */
#include "picture_prompts.h"

#include "../options/option_table.h"
#include "../tokens/tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

int mt_inference_open_pictures(mt_inference *r, mt_error *error) {
    const mt_run_options *o = &r->options;
    if (o->stack.vision.tower == MT_VISION_NONE) {
        if (o->image.count == 0) return 0;
        return mt_error_set(error, "--image: the model has no vision tower, so it takes no pictures; leave it out%s",
                            o->language_model_only ? ", or --language-model-only" : "");
    }
    int status = mt_image_reader_open(&r->reader, o, r->folder, error);
    r->takes_pictures = status == 0;
    return mt_agree(&r->grid.world, status != 0, error);
}

/* ---- messages as JSON */

/* A text of JSON; bytes that are not UTF-8 become U+FFFD. */
static json_t *text_of(const char *text, int64_t bytes) {
    json_t *string = json_stringn(text, (size_t)bytes);
    if (string) return string;
    mt_text whole = {0};
    mt_utf8_repair(&whole, text, bytes);
    string = json_stringn(whole.data, (size_t)whole.bytes);
    free(whole.data);
    return string;
}

static json_t *image_of(const char *path) {
    return json_pack("{s:s, s:s}", "type", "image", "image", path);
}

/* Encodes messages, and frees them. Each rank reads the files. */
static int encode(mt_inference *r, json_t *messages, const json_t *beside, mt_ids *ids, mt_images *images,
                  mt_error *error) {
    mt_ids turns = {0};
    mt_image_chat conversation = {.messages = messages, .beside = beside, .generates = true};
    int status = mt_image_chat_encode(r->chat, &r->reader, &conversation, ids, &turns, images, error);
    free(turns.data);
    json_decref(messages);
    return mt_agree(&r->grid.world, status != 0, error);
}

int mt_inference_encode_shown(mt_inference *r, const char *text, mt_ids *ids, mt_images *images, mt_error *error) {
    const mt_strings *paths = &r->options.image;
    json_t *content, *beside = NULL, *said = text_of(text, (int64_t)strlen(text));
    if (strstr(text, "<image>")) { // their places
        content = said, beside = json_array();
        for (int64_t i = 0; i < paths->count; i++) json_array_append_new(beside, json_string(paths->items[i]));
    } else {
        content = json_array();
        for (int64_t i = 0; i < paths->count; i++) json_array_append_new(content, image_of(paths->items[i]));
        json_array_append_new(content, json_pack("{s:s, s:o}", "type", "text", "text", said));
    }
    json_t *messages = json_pack("[{s:s, s:o}]", "role", "user", "content", content);
    mt_error why;
    int status = encode(r, messages, beside, ids, images, &why);
    if (status != 0) mt_error_set(error, "--image: %.2000s", why.text);
    json_decref(beside);
    return status;
}

/* ---- pictures of a conversation */

enum { WAITS = -1 }; // for the next message

static void add_shown(mt_inference *r, char *path) {
    if (r->num_shown == r->shown_capacity) {
        r->shown_capacity = 2 * r->shown_capacity + 4;
        r->shown = mt_realloc(r->shown, r->shown_capacity * (int64_t)sizeof *r->shown);
    }
    r->shown[r->num_shown++] = (mt_shown){WAITS, path};
}

int mt_inference_show(mt_inference *r, const char *path, mt_error *error) {
    mt_picture picture;
    if (!r->takes_pictures)
        return mt_error_set(error, "%.400s: the model has no vision tower, so it takes no pictures", path);
    int status = mt_picture_read(&picture, path, error);
    if (status == 0) mt_picture_free(&picture);
    if (mt_agree(&r->grid.world, status != 0, error) != 0) return -1;
    add_shown(r, mt_strdup(path));
    return 0;
}

int mt_inference_show_line(mt_inference *r, const char *line, int64_t bytes, mt_error *error) {
    static const char command[] = "/image ";
    int64_t from = sizeof command - 1, end = bytes;
    if (bytes <= from || memcmp(line, command, (size_t)from) != 0) return 0;
    while (from < end && line[from] == ' ') from++;
    while (from < end && line[end - 1] == ' ') end--;
    char *path = mt_malloc(end - from + 1);
    memcpy(path, line + from, (size_t)(end - from)), path[end - from] = '\0';
    int status = mt_inference_show(r, path, error) == 0 ? 1 : -1;
    free(path);
    return status;
}

void mt_inference_give_shown(mt_inference *r, int64_t message) {
    for (int64_t i = 0; i < r->num_shown; i++)
        if (r->shown[i].message == WAITS) r->shown[i].message = message;
}

void mt_inference_cut_shown(mt_inference *r, int64_t count) {
    while (r->num_shown > 0 && r->shown[r->num_shown - 1].message >= count) free(r->shown[--r->num_shown].path);
}

void mt_inference_move_shown(mt_inference *r, int64_t from, int64_t to) {
    int64_t kept = 0;
    for (int64_t i = 0; i < r->num_shown; i++) {
        if (r->shown[i].message == from)
            r->shown[kept++] = (mt_shown){to, r->shown[i].path};
        else
            free(r->shown[i].path);
    }
    r->num_shown = kept;
}

int mt_inference_encode_talk(mt_inference *r, mt_ids *ids, mt_images *images, mt_error *error) {
    const mt_conversation *c = &r->conversation;
    mt_ids turns = {0};
    if (r->num_shown == 0) {
        int status = mt_chat_encode(r->chat, c->messages, c->count, true, ids, &turns, error);
        free(turns.data);
        return status;
    }
    json_t *messages = json_array();
    for (int64_t i = 0; i < c->count; i++) {
        const mt_chat_message *said = &c->messages[i];
        json_t *content = json_array(), *text = text_of(said->content, said->bytes);
        for (int64_t k = 0; k < r->num_shown; k++)
            if (r->shown[k].message == i) json_array_append_new(content, image_of(r->shown[k].path));
        bool has_pictures = json_array_size(content) > 0;
        if (has_pictures) json_array_append_new(content, json_pack("{s:s, s:O}", "type", "text", "text", text));
        json_array_append_new(messages,
                              json_pack("{s:s, s:O}", "role", said->role, "content", has_pictures ? content : text));
        json_decref(content), json_decref(text);
    }
    return encode(r, messages, NULL, ids, images, error);
}

/* ---- pictures of sequences */

int mt_inference_attach(mt_inference *r, mt_sequence *sequence, mt_images *images, mt_error *error) {
    mt_text_images *text = mt_text_images_open(images, &r->reader, sequence->tokens, sequence->num_prompt);
    int64_t tokens = mt_text_images_tokens(text), most = r->options.max_image_tokens;
    r->has_many_pictures = r->options.chat && tokens > most;
    if (!text) return 0;
    if (r->has_many_pictures) {
        mt_text_images_close(text);
        return mt_error_set(error,
                            "the pictures of the conversation have %lld tokens, and --max-image-tokens is %lld; raise "
                            "it, or show smaller pictures",
                            (long long)tokens, (long long)most);
    }
    r->texts = mt_realloc(r->texts, (r->num_texts + 1) * (int64_t)sizeof(void *));
    r->texts[r->num_texts++] = text;
    r->most_image_tokens = mt_max(r->most_image_tokens, tokens), r->all_image_tokens += tokens;
    r->most_patches = mt_max(r->most_patches, mt_text_images_patches(text));
    sequence->images = mt_text_images_list(text);
    return 0;
}

int mt_inference_attach_line(mt_inference *r, mt_sequence *sequence, const mt_samples *prompts, int64_t i,
                             mt_error *error) {
    int64_t first = prompts->image_offsets[i], count = prompts->image_offsets[i + 1] - first;
    if (count == 0) return 0;
    mt_images images = {0};
    mt_images_copy(&images, &prompts->images, first, count);
    return mt_inference_attach(r, sequence, &images, error);
}

void mt_inference_forget_pictures(mt_inference *r) {
    while (r->num_texts > 0) mt_text_images_close(r->texts[--r->num_texts]);
    free(r->texts);
    r->texts = NULL;
}

void mt_inference_plan_pictures(const mt_inference *r, mt_model_plan *plan) {
    const mt_run_options *o = &r->options;
    int64_t side = o->stack.vision.spatial_merge_size, some = o->max_image_tokens;
    if (!r->takes_pictures) return;
    if (o->chat || o->serve) {
        plan->max_image_tokens = mt_min(some, r->context), plan->max_patches = plan->max_image_tokens * side * side;
        return;
    }
    plan->max_image_tokens = mt_max(r->most_image_tokens, mt_min(r->all_image_tokens, some));
    plan->max_patches = r->most_patches;
}
