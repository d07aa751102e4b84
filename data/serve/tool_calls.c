/* tool_calls.c: calls of tools in the text that a model writes. */
#include "tool_calls.h"

#include "../tokens/tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

json_t *mt_tool_calls_take(mt_text *text, int64_t number, int64_t index) {
    static const char opens[] = "<tool_call>", closes[] = "</tool_call>";
    if (text->bytes == 0) return NULL;
    json_t *calls = json_array();
    mt_text rest = {0};
    const char *at = text->data, *end = text->data + text->bytes, *begins;
    while ((begins = memmem(at, (size_t)(end - at), opens, sizeof opens - 1)) != NULL) {
        const char *inside = begins + sizeof opens - 1;
        const char *ends = memmem(inside, (size_t)(end - inside), closes, sizeof closes - 1);
        json_t *call = json_loadb(inside, (size_t)((ends ? ends : end) - inside), 0, NULL);
        const json_t *name = json_object_get(call, "name"), *arguments = json_object_get(call, "arguments");
        if (!json_is_string(name)) {
            json_decref(call);
            break;
        }
        char id[64], *dumped = json_is_string(arguments) ? strdup(json_string_value(arguments))
                               : arguments               ? json_dumps(arguments, JSON_COMPACT | JSON_ENCODE_ANY)
                                                         : strdup("{}");
        snprintf(id, sizeof id, "call-%lld-%lld-%lld", (long long)number, (long long)index,
                 (long long)json_array_size(calls));
        json_array_append_new(calls, json_pack("{s:s, s:s, s:{s:s, s:s}}", "id", id, "type", "function", "function",
                                               "name", json_string_value(name), "arguments", dumped));
        free(dumped);
        json_decref(call);
        mt_text_append(&rest, at, begins - at);
        at = ends ? ends + sizeof closes - 1 : end;
    }
    if (json_array_size(calls) == 0) {
        json_decref(calls);
        free(rest.data);
        return NULL;
    }
    mt_text_append(&rest, at, end - at);
    while (rest.bytes > 0 && strchr(" \t\r\n", rest.data[rest.bytes - 1])) rest.bytes--;
    free(text->data);
    *text = rest;
    return calls;
}

int64_t mt_tool_calls_begin(const char *text, int64_t from, int64_t to) {
    static const char opens[] = "<tool_call>";
    int64_t bytes = (int64_t)sizeof opens - 1;
    if (to <= from) return to;
    const char *found = memmem(text + from, (size_t)(to - from), opens, (size_t)bytes);
    if (found) return found - text;
    for (int64_t part = mt_min(bytes - 1, to - from); part > 0; part--)
        if (memcmp(text + to - part, opens, (size_t)part) == 0) return to - part;
    return to;
}
