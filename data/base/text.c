/* text.c: splits text files into documents. */
#include "text.h"

#include "file.h"

#include <jansson.h>
#include <string.h>

bool mt_text_is_blank(const char *text, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        if (!memchr(" \t\r\n", text[i], 4)) return false;
    return true;
}

/* The end of the first line, after its newline; NULL if there is no newline. */
static const char *line_end(const char *text, const char *end) {
    const char *newline = memchr(text, '\n', (size_t)(end - text));
    return newline ? newline + 1 : NULL;
}

/* A paragraph is optional blank lines, lines with text, then blank lines; the next line with text begins another. */
static const char *paragraph_end(const char *text, const char *end) {
    bool has_text = false, has_gap = false;
    while (text < end) {
        const char *next = line_end(text, end);
        bool blank = mt_text_is_blank(text, (next ? next : end) - text);
        if (!blank && has_gap) return text;
        if (!next) return NULL; // the last line may continue
        has_text = has_text || !blank;
        has_gap = has_gap || (has_text && blank);
        text = next;
    }
    return NULL;
}

const char *mt_text_document_end(mt_text_format format, const char *text, const char *end) {
    if (format == MT_TEXT_FILE) return NULL;
    return format == MT_TEXT_PARAGRAPHS ? paragraph_end(text, end) : line_end(text, end);
}

int64_t mt_text_mark_bytes(const char *text, const char *end) {
    return end - text >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

/* Visits a string, or the strings of a list. */
static int visit_field(const json_t *field, int64_t key, const char *name, mt_jsonl_visit *visit, void *context,
                       mt_error *error) {
    bool list = json_is_array(field);
    for (size_t i = 0; i < (list ? json_array_size(field) : 1); i++) {
        const json_t *text = list ? json_array_get(field, i) : field;
        if (!json_is_string(text))
            return mt_error_set(error, "\"%s\" is not a string or a list of strings; correct or remove the line", name);
        if (visit(context, key, json_string_value(text), (int64_t)json_string_length(text), error) != 0) return -1;
    }
    return 0;
}

static int visit_object(const json_t *object, const mt_strings *keys, mt_jsonl_visit *visit, void *context,
                        mt_error *error) {
    for (int64_t key = 0; key < keys->count; key++) {
        const char *name = keys->items[key];
        const json_t *field = json_object_get(object, name);
        if (!field) return mt_error_set(error, "has no key \"%s\"; name an existing key with --json-keys", name);
        if (visit_field(field, key, name, visit, context, error) != 0) return -1;
    }
    return 0;
}

int mt_jsonl_read(const char *line, int64_t bytes, const mt_strings *keys, mt_jsonl_visit *visit, void *context,
                  mt_error *error) {
    if (mt_text_is_blank(line, bytes)) return 0;
    // Numbers are unused; reading them as reals accepts integers of any size. NUL is an ordinary character.
    json_t *root = mt_json_parse(line, bytes, JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, NULL, error);
    if (!root) return -1;
    int result = visit_object(root, keys, visit, context, error);
    json_decref(root);
    return result;
}
