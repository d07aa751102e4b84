/* request.c: what a client asks for. */
#include "request.h"

#include "../options/option_table.h"
#include "../tokens/tokenizer_encode.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_STOP_STRINGS = 16, MAX_STOP_BYTES = 1024, MAX_MESSAGES = 4096, DEFAULT_NEW_TOKENS = 16 };

int mt_refuse(mt_request_error *refusal, int status, const char *parameter, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(refusal->error.text, sizeof refusal->error.text, format, arguments);
    va_end(arguments);
    refusal->status = status, refusal->parameter = parameter;
    return -1;
}

/* ---- fields */

/* A field of a request: which requests may have it, and its effect. */
typedef enum field_use {
    READ,    // by a function below
    IGNORED, // has no effect on the answer: a client's own notes
    NEUTRAL  // is understood as long as it asks for nothing: null, 0, "", false, [], {}
} field_use;

enum { OF_COMPLETIONS = 1, OF_CHATS = 2, OF_BOTH = 3, OF_TOKENIZE = 4 };

static const struct {
    const char *key;
    int of;
    field_use use;
} fields[] = {{"model", OF_BOTH | OF_TOKENIZE, READ},
              {"prompt", OF_COMPLETIONS | OF_TOKENIZE, READ},
              {"messages", OF_CHATS | OF_TOKENIZE, READ},
              {"tools", OF_CHATS | OF_TOKENIZE, READ},
              {"tool_choice", OF_CHATS | OF_TOKENIZE, READ},
              {"chat_template_kwargs", OF_CHATS | OF_TOKENIZE, READ},
              {"max_tokens", OF_BOTH, READ},
              {"max_completion_tokens", OF_CHATS, READ},
              {"temperature", OF_BOTH, READ},
              {"top_p", OF_BOTH, READ},
              {"top_k", OF_BOTH, READ},
              {"min_p", OF_BOTH, READ},
              {"repetition_penalty", OF_BOTH, READ},
              {"seed", OF_BOTH, READ},
              {"n", OF_BOTH, READ},
              {"best_of", OF_COMPLETIONS, READ},
              {"stop", OF_BOTH, READ},
              {"echo", OF_COMPLETIONS, READ},
              {"logprobs", OF_BOTH, READ},
              {"top_logprobs", OF_CHATS, READ},
              {"stream", OF_BOTH, READ},
              {"stream_options", OF_BOTH, READ},
              {"return_token_ids", OF_BOTH, READ},
              {"response_format", OF_CHATS, READ},
              {"add_special_tokens", OF_TOKENIZE, READ},
              {"add_generation_prompt", OF_TOKENIZE, READ},
              {"user", OF_BOTH, IGNORED},
              {"metadata", OF_BOTH, IGNORED},
              {"store", OF_BOTH, NEUTRAL},
              {"safety_identifier", OF_BOTH, IGNORED},
              {"prompt_cache_key", OF_BOTH, IGNORED},
              {"service_tier", OF_BOTH, IGNORED},
              {"parallel_tool_calls", OF_CHATS, IGNORED},
              {"suffix", OF_COMPLETIONS, NEUTRAL},
              {"presence_penalty", OF_BOTH, NEUTRAL},
              {"frequency_penalty", OF_BOTH, NEUTRAL},
              {"logit_bias", OF_BOTH, NEUTRAL}};

/* True if the value asks for nothing. */
static bool asks_nothing(const json_t *value) {
    if (json_is_null(value) || json_is_false(value)) return true;
    if (json_is_number(value)) return json_number_value(value) == 0;
    if (json_is_string(value)) return *json_string_value(value) == '\0';
    return json_is_array(value) ? json_array_size(value) == 0 : json_is_object(value) && json_object_size(value) == 0;
}

static int check_fields(json_t *root, int of, mt_request_error *refusal) {
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        size_t i = 0, count = sizeof fields / sizeof *fields;
        while (i < count && strcmp(fields[i].key, key) != 0) i++;
        if (i == count || !(fields[i].of & of))
            return mt_refuse(refusal, 400, NULL,
                             "the request has a field \"%.60s\", which this server does not know; "
                             "leave it out",
                             key);
        if (fields[i].use == NEUTRAL && !asks_nothing(value))
            return mt_refuse(refusal, 400, fields[i].key, "\"%s\" is not supported by this server; leave it out", key);
    }
    return 0;
}

/* The value of a key; NULL if it is absent or null. */
static const json_t *field(const json_t *root, const char *key) {
    const json_t *value = json_object_get(root, key);
    return json_is_null(value) ? NULL : value;
}

static int read_int(const json_t *root, const char *key, int64_t low, int64_t high, int64_t *value,
                    mt_request_error *refusal) {
    const json_t *item = field(root, key);
    if (!item || mt_json_int(item, low, high, value)) return 0;
    return mt_refuse(refusal, 400, key, "\"%s\" must be a whole number from %lld to %lld", key, (long long)low,
                     (long long)high);
}

/* low <= value <= high, or low < value where `above`. */
static int read_real(const json_t *root, const char *key, double low, double high, bool above, double *value,
                     mt_request_error *refusal) {
    const json_t *item = field(root, key);
    double given = json_number_value(item);
    if (!item) return 0;
    bool fits = json_is_number(item) && (above ? given > low : given >= low) && given <= high;
    if (fits) *value = given;
    return fits ? 0
                : mt_refuse(refusal, 400, key, "\"%s\" must be a number %s %g and at most %g", key,
                            above ? "above" : "of at least", low, high);
}

static int read_bool(const json_t *root, const char *key, bool *value, mt_request_error *refusal) {
    const json_t *item = field(root, key);
    if (!item) return 0;
    *value = json_is_true(item);
    return json_is_boolean(item) ? 0 : mt_refuse(refusal, 400, key, "\"%s\" must be true or false", key);
}

/* ---- prompts */

static int check_prompt(const mt_ids *ids, const char *key, const mt_service *service, mt_request_error *refusal) {
    if (ids->count == 0)
        return mt_refuse(refusal, 400, key, "the prompt has no token; give at least one character or token");
    if (ids->count > service->context)
        return mt_refuse(refusal, 400, key,
                         "the prompt has %lld tokens, and the context of this server has %lld; send fewer",
                         (long long)ids->count, (long long)service->context);
    for (int64_t i = 0; i < ids->count; i++)
        if (ids->data[i] < 0 || ids->data[i] >= service->vocab_size)
            return mt_refuse(refusal, 400, key, "token %d of the prompt is outside the model's vocabulary of %lld",
                             ids->data[i], (long long)service->vocab_size);
    return 0;
}

static int encode_text(mt_ids *ids, const char *text, int64_t bytes, bool begins, const mt_service *service,
                       const char *key, mt_request_error *refusal) {
    mt_error error;
    if (!service->tokenizer)
        return mt_refuse(refusal, 400, key, "this server has no tokenizer; give the prompt as a list of token ids");
    if (begins && service->bos >= 0) mt_ids_push(ids, service->bos);
    if (mt_tokenizer_encode(service->tokenizer, text, bytes, ids, &error) == 0) return 0;
    return mt_refuse(refusal, 400, key, "the text cannot be encoded: %.1000s", error.text);
}

static int read_tokens(mt_ids *ids, const json_t *list, mt_request_error *refusal) {
    json_t *item;
    size_t i;
    json_array_foreach(list, i, item) {
        int64_t id;
        if (!mt_json_int(item, 0, INT32_MAX, &id))
            return mt_refuse(refusal, 400, "prompt",
                             "\"prompt\" has a list of token ids with something else in it; "
                             "give whole numbers alone");
        mt_ids_push(ids, (int32_t)id);
    }
    return 0;
}

/* A prompt of a completion: a text, or a list of tokens. */
static int read_prompt(mt_ids *ids, const json_t *prompt, const mt_service *service, mt_request_error *refusal) {
    int status;
    if (json_is_string(prompt))
        status = encode_text(ids, json_string_value(prompt), (int64_t)json_string_length(prompt), true, service,
                             "prompt", refusal);
    else if (json_is_array(prompt))
        status = read_tokens(ids, prompt, refusal);
    else
        status =
            mt_refuse(refusal, 400, "prompt", "\"prompt\" must be a text, a list of token ids, or a list of these");
    return status == 0 ? check_prompt(ids, "prompt", service, refusal) : -1;
}

static int read_prompts(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    const json_t *prompt = field(root, "prompt");
    json_t *item;
    size_t i;
    if (!prompt) return mt_refuse(refusal, 400, "prompt", "\"prompt\" is missing: the text to continue");
    bool many = json_is_array(prompt) && !json_is_number(json_array_get(prompt, 0)) && json_array_size(prompt) > 0;
    if (many && (int64_t)json_array_size(prompt) > service->max_choices)
        return mt_refuse(refusal, 400, "prompt", "\"prompt\" has %lld prompts; this server takes %lld at once",
                         (long long)json_array_size(prompt), (long long)service->max_choices);
    r->prompts = mt_calloc((many ? (int64_t)json_array_size(prompt) : 1) * (int64_t)sizeof *r->prompts);
    r->num_prompts = 1;
    if (!many) return read_prompt(&r->prompts[0], prompt, service, refusal);
    json_array_foreach(prompt, i, item) {
        r->num_prompts = (int64_t)i + 1;
        if (read_prompt(&r->prompts[i], item, service, refusal) != 0) return -1;
    }
    return 0;
}

/* ---- conversations */

/* The content of a message, to free: a text, or the texts of a list of parts. NULL without a refusal: none. */
static int read_content(char **text, int64_t *bytes, const json_t *content, mt_request_error *refusal) {
    static const char wanted[] = "\"content\" of a message must be a text, or a list of parts of the type \"text\", "
                                 "or \"image_url\"";
    mt_text all = {0};
    json_t *part;
    size_t i;
    *text = NULL, *bytes = 0;
    if (!content || json_is_null(content)) return 0;
    if (json_is_string(content)) {
        mt_text_append(&all, json_string_value(content), (int64_t)json_string_length(content));
    } else if (json_is_array(content)) {
        json_array_foreach(content, i, part) {
            const char *type = json_string_value(json_object_get(part, "type"));
            const json_t *said = json_object_get(part, "text");
            if (!type || strcmp(type, "text") != 0 || !json_is_string(said)) {
                free(all.data);
                return mt_refuse(refusal, 400, "messages", "%s", wanted);
            }
            mt_text_append(&all, json_string_value(said), (int64_t)json_string_length(said));
        }
    } else {
        return mt_refuse(refusal, 400, "messages", "%s", wanted);
    }
    *bytes = all.bytes;
    mt_text_append(&all, "", 1);
    *text = all.data;
    return 0;
}

/* The arguments of calls, which clients send as a text of JSON and templates write as an object. */
static void parse_arguments(json_t *calls) {
    json_t *call;
    size_t i;
    json_array_foreach(calls, i, call) {
        json_t *function = json_object_get(call, "function");
        const json_t *arguments = json_object_get(function, "arguments");
        if (!json_is_string(arguments)) continue;
        json_t *parsed = json_loadb(json_string_value(arguments), json_string_length(arguments), 0, NULL);
        if (json_is_object(parsed))
            json_object_set_new(function, "arguments", parsed);
        else
            json_decref(parsed);
    }
}

/* A message's fields beside role and content; NULL: none. */
static json_t *other_fields(const json_t *message) {
    json_t *others = json_deep_copy(message);
    json_object_del(others, "role"), json_object_del(others, "content");
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(others, next, key, value) {
        if (json_is_null(value)) json_object_del(others, key);
    }
    if (json_object_size(others) == 0) {
        json_decref(others);
        return NULL;
    }
    parse_arguments(json_object_get(others, "tool_calls"));
    return others;
}

/* A conversation as the template takes it. */
typedef struct talk {
    mt_chat_message *messages;
    json_t **fields;
    int64_t count;
    bool has_fields;
} talk;

static void free_talk(talk *t) {
    for (int64_t i = 0; i < t->count; i++) free((char *)(uintptr_t)t->messages[i].content), json_decref(t->fields[i]);
    free(t->messages), free(t->fields);
}

static int read_messages(talk *t, const json_t *list, mt_request_error *refusal) {
    json_t *message;
    size_t i;
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MAX_MESSAGES)
        return mt_refuse(refusal, 400, "messages", "\"messages\" must be a list of 1 to %d messages", MAX_MESSAGES);
    t->messages = mt_calloc((int64_t)json_array_size(list) * (int64_t)sizeof *t->messages);
    t->fields = mt_calloc((int64_t)json_array_size(list) * (int64_t)sizeof *t->fields);
    json_array_foreach(list, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        char *content;
        int64_t bytes;
        if (!role) return mt_refuse(refusal, 400, "messages", "message %lld has no \"role\"", (long long)i + 1);
        if (read_content(&content, &bytes, json_object_get(message, "content"), refusal) != 0) return -1;
        t->messages[i] = (mt_chat_message){strcmp(role, "developer") == 0 ? "system" : role, content, bytes};
        t->fields[i] = other_fields(message);
        t->has_fields |= t->fields[i] != NULL, t->count = (int64_t)i + 1;
    }
    return 0;
}

/* The text of an error without the folder of the file that it begins with: clients need not know it. */
static const char *without_folder(const char *text) {
    const char *end = strstr(text, ": "), *name = text;
    for (const char *at = text; *text == '/' && end && at < end; at++)
        if (*at == '/') name = at + 1;
    return name;
}

/* ---- pictures of conversations. A request has their bytes: no path of it ever opens a file. */

static bool is_picture(const json_t *part) {
    const char *type = json_string_value(json_object_get(part, "type"));
    return type && strcmp(type, "image_url") == 0;
}

static bool has_pictures(const json_t *messages) {
    json_t *message, *part;
    size_t i, k;
    json_array_foreach(messages, i, message) {
        json_array_foreach(json_object_get(message, "content"), k, part) {
            if (is_picture(part)) return true;
        }
    }
    return false;
}

/* The part of a picture, whose bytes are in its address; nothing else of it is read. NULL: it has another address. */
static json_t *read_picture(const json_t *part) {
    const json_t *image = json_object_get(part, "image_url"), *url = json_object_get(image, "url");
    const char *address = json_string_value(url ? url : image);
    if (!address || strncasecmp(address, "data:", 5) != 0 || !strstr(address, ";base64,")) return NULL;
    return json_pack("{s:s, s:s}", "type", "image_url", "image_url", address);
}

/* The parts of message `number`, texts and pictures. NULL with a refusal. */
static json_t *read_parts(const json_t *content, int64_t number, mt_request_error *refusal) {
    json_t *parts = json_array(), *part;
    size_t i;
    json_array_foreach(content, i, part) {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *said = json_object_get(part, "text");
        bool is_text = type && strcmp(type, "text") == 0 && json_is_string(said);
        json_t *read = is_picture(part) ? read_picture(part)
                       : is_text        ? json_pack("{s:s, s:O}", "type", "text", "text", said)
                                        : NULL;
        if (read) {
            json_array_append_new(parts, read);
            continue;
        }
        json_decref(parts);
        mt_refuse(refusal, 400, "messages",
                  is_picture(part)
                      ? "message %lld: the \"url\" of a picture must be data:image/png;base64, or data:image/jpeg;"
                        "base64, and its bytes; this server opens no other address"
                      : "message %lld: a part of its \"content\" has neither the type \"text\" nor \"image_url\"",
                  (long long)number);
        return NULL;
    }
    return parts;
}

/* The messages as mt_image_chat_encode takes them. NULL with a refusal. */
static json_t *read_picture_messages(const json_t *list, mt_request_error *refusal) {
    json_t *messages = json_array(), *message;
    size_t i;
    json_array_foreach(list, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        json_t *content = json_object_get(message, "content"), *parts = NULL, *all = other_fields(message);
        if (!all) all = json_object();
        bool reads = role && json_is_array(content);
        if (!role) mt_refuse(refusal, 400, "messages", "message %lld has no \"role\"", (long long)i + 1);
        if (reads) parts = read_parts(content, (int64_t)i + 1, refusal);
        if (!role || (reads && !parts)) {
            json_decref(all), json_decref(messages);
            return NULL;
        }
        json_object_set_new(all, "role", json_string(strcmp(role, "developer") == 0 ? "system" : role));
        if (reads) json_object_set_new(all, "content", parts);
        if (!reads && content) json_object_set(all, "content", content);
        json_array_append_new(messages, all);
    }
    return messages;
}

/* Appends the tokens of a conversation with pictures, which *out has if it is not NULL. */
static int encode_pictures(mt_ids *ids, mt_text_images **out, const json_t *list, const mt_chat_extras *extras,
                           bool asks, const mt_service *service, mt_request_error *refusal) {
    mt_images images = {0};
    mt_ids turns = {0};
    mt_error error;
    if (!service->images)
        return mt_refuse(refusal, 400, "messages", "this model takes no pictures: it has no vision tower");
    json_t *messages = read_picture_messages(list, refusal);
    if (!messages) return -1;
    pthread_mutex_lock(service->chat_lock);
    mt_image_chat conversation = {.messages = messages, .extras = extras, .generates = asks};
    int status = mt_image_chat_encode(service->chat, service->images, &conversation, ids, &turns, &images, &error);
    pthread_mutex_unlock(service->chat_lock);
    json_decref(messages);
    free(turns.data);
    if (status != 0)
        return mt_refuse(refusal, 400, "messages", "the conversation and its pictures cannot be read: %.1500s",
                         without_folder(error.text));
    mt_text_images *read = mt_text_images_open(&images, service->images, ids->data, ids->count);
    int64_t tokens = mt_text_images_tokens(read);
    if (out)
        *out = read;
    else
        mt_text_images_close(read);
    if (tokens <= service->max_image_tokens) return 0;
    return mt_refuse(refusal, 400, "messages",
                     "the pictures of the conversation have %lld tokens, and this server takes %lld; send fewer or "
                     "smaller ones",
                     (long long)tokens, (long long)service->max_image_tokens);
}

/* Each tool is a function with a name, as templates expect. */
static int check_tools(const json_t *tools, mt_request_error *refusal) {
    json_t *tool;
    size_t i;
    if (tools && !json_is_array(tools)) return mt_refuse(refusal, 400, "tools", "\"tools\" must be a list");
    json_array_foreach(tools, i, tool) {
        const char *type = json_string_value(json_object_get(tool, "type"));
        const char *name = json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
        if (!type || strcmp(type, "function") != 0 || !name || !*name)
            return mt_refuse(refusal, 400, "tools",
                             "tool %lld must be {\"type\": \"function\", \"function\": {\"name\": ..., ...}}",
                             (long long)i + 1);
    }
    return 0;
}

/* Appends the tokens of the conversation, up to the header of the answer if that is wanted. */
static int encode_talk(mt_ids *ids, const json_t *root, bool asks, bool *has_tools, mt_text_images **images,
                       const mt_service *service, mt_request_error *refusal) {
    const json_t *messages = json_object_get(root, "messages"), *tools = field(root, "tools"),
                 *choice = field(root, "tool_choice"), *variables = field(root, "chat_template_kwargs");
    const char *chosen = json_string_value(choice);
    if (!service->chat)
        return mt_refuse(refusal, 400, "messages", "this server has no chat template: %.1500s",
                         without_folder(service->no_chat.text));
    if (choice && (!chosen || (strcmp(chosen, "auto") != 0 && strcmp(chosen, "none") != 0)))
        return mt_refuse(refusal, 400, "tool_choice", "\"tool_choice\" may be \"auto\" or \"none\"");
    if ((chosen && strcmp(chosen, "none") == 0) || asks_nothing(tools)) tools = NULL;
    if (check_tools(tools, refusal) != 0) return -1;
    if (variables && !json_is_object(variables))
        return mt_refuse(refusal, 400, "chat_template_kwargs", "\"chat_template_kwargs\" must be an object");
    if ((tools || variables) && !mt_chat_takes_extras(service->chat))
        return mt_refuse(refusal, 400, tools ? "tools" : "chat_template_kwargs",
                         "the chat template of this server takes no %s; leave them out", tools ? "tools" : "variables");
    mt_chat_extras extras = {.tools = tools, .variables = variables};
    if (has_tools) *has_tools = tools != NULL;
    if (has_pictures(messages) && json_array_size(messages) <= MAX_MESSAGES)
        return encode_pictures(ids, images, messages, &extras, asks, service, refusal);
    talk t = {0};
    mt_ids turns = {0};
    mt_error error;
    int status = read_messages(&t, messages, refusal);
    if (status == 0) {
        if (t.has_fields) extras.fields = (const json_t *const *)t.fields;
        pthread_mutex_lock(service->chat_lock);
        mt_chat_set_extras(service->chat, &extras);
        status = mt_chat_encode(service->chat, t.messages, t.count, asks, ids, &turns, &error);
        mt_chat_set_extras(service->chat, NULL);
        pthread_mutex_unlock(service->chat_lock);
        if (status != 0)
            mt_refuse(refusal, 400, "messages", "the conversation does not fit the chat template: %.1500s",
                      without_folder(error.text));
    }
    free(turns.data);
    free_talk(&t);
    return status;
}

static int read_conversation(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    r->prompts = mt_calloc((int64_t)sizeof *r->prompts), r->num_prompts = 1;
    if (encode_talk(&r->prompts[0], root, true, &r->has_tools, &r->images, service, refusal) != 0) return -1;
    return check_prompt(&r->prompts[0], "messages", service, refusal);
}

/* ---- the rest */

static int add_stop(mt_strings *stop, const json_t *text, const mt_service *service, mt_request_error *refusal) {
    size_t bytes = json_string_length(text);
    if (!service->tokenizer)
        return mt_refuse(refusal, 400, "stop", "this server has no tokenizer, and finds no texts to stop at");
    if (!json_is_string(text) || bytes == 0 || bytes > MAX_STOP_BYTES || strlen(json_string_value(text)) != bytes)
        return mt_refuse(refusal, 400, "stop",
                         "\"stop\" must be a text of 1 to %d bytes, or a list of up to %d of them", MAX_STOP_BYTES,
                         MAX_STOP_STRINGS);
    mt_strings_add(stop, json_string_value(text));
    return 0;
}

static int read_stop(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    const json_t *stop = field(root, "stop");
    json_t *item;
    size_t i;
    if (!stop) return 0;
    if (!json_is_array(stop)) return add_stop(&r->stop, stop, service, refusal);
    if (json_array_size(stop) > MAX_STOP_STRINGS)
        return mt_refuse(refusal, 400, "stop", "\"stop\" may have %d texts", MAX_STOP_STRINGS);
    json_array_foreach(stop, i, item) if (add_stop(&r->stop, item, service, refusal) != 0) return -1;
    return 0;
}

/* "logprobs": of a completion a number of rivals, of a chat true, with their number in "top_logprobs". */
static int read_logprobs(mt_request *r, const json_t *root, mt_request_error *refusal) {
    enum { MOST = 20 };
    bool wanted = false;
    r->num_rivals = -1;
    if (!r->is_chat) {
        if (json_is_boolean(json_object_get(root, "logprobs")))
            return mt_refuse(refusal, 400, "logprobs", "\"logprobs\" of a completion is a number, from 0 to %d", MOST);
        return read_int(root, "logprobs", 0, MOST, &r->num_rivals, refusal);
    }
    if (read_bool(root, "logprobs", &wanted, refusal) != 0) return -1;
    if (!wanted && field(root, "top_logprobs") && !asks_nothing(field(root, "top_logprobs")))
        return mt_refuse(refusal, 400, "top_logprobs", "\"top_logprobs\" needs \"logprobs\": true");
    if (wanted) r->num_rivals = 0;
    return wanted ? read_int(root, "top_logprobs", 0, MOST, &r->num_rivals, refusal) : 0;
}

static int read_sampling(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    mt_sampling *s = &r->sampling;
    int64_t seed = 0;
    *s = service->sampling;
    if (read_real(root, "temperature", 0, 1e6, false, &s->temperature, refusal) != 0 ||
        read_real(root, "top_p", 0, 1, true, &s->top_p, refusal) != 0 ||
        read_real(root, "min_p", 0, 1, false, &s->min_p, refusal) != 0 ||
        read_real(root, "repetition_penalty", 0, 1e6, true, &s->repetition_penalty, refusal) != 0)
        return -1;
    const json_t *top_k = field(root, "top_k");
    int64_t all = 0;
    if (!(top_k && mt_json_int(top_k, -1, -1, &all)) && read_int(root, "top_k", 0, 1 << 24, &s->top_k, refusal) != 0)
        return -1;
    if (all == -1) s->top_k = 0; // as other servers write it
    if (read_int(root, "seed", INT64_MIN, INT64_MAX, &seed, refusal) != 0) return -1;
    r->has_seed = field(root, "seed") != NULL;
    if (r->has_seed) s->seed = (uint64_t)seed;
    return 0;
}

/* The number of new tokens, which must fit the context behind the longest prompt. */
static int read_length(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    const char *key = field(root, "max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
    int64_t longest = 0, wanted = -1;
    for (int64_t i = 0; i < r->num_prompts; i++) longest = mt_max(longest, r->prompts[i].count);
    if (read_int(root, key, 0, INT32_MAX, &wanted, refusal) != 0) return -1;
    int64_t left = service->context - longest;
    bool given = wanted >= 0;
    if (!given) wanted = service->max_new_tokens;
    if (wanted < 0) wanted = r->is_chat ? left : DEFAULT_NEW_TOKENS;
    if (given && wanted > left)
        return mt_refuse(refusal, 400, key,
                         "the prompt has %lld tokens and \"%s\" asks for %lld more; the context of this server has "
                         "%lld in all",
                         (long long)longest, key, (long long)wanted, (long long)service->context);
    r->max_new_tokens = mt_min(wanted, left);
    if (r->max_new_tokens > 0 || (r->echo && given)) return 0;
    return mt_refuse(refusal, 400, key, "%s",
                     left == 0 ? "the prompt fills the context of this server; send less"
                               : "no token is asked for; 0 needs \"echo\": true");
}

static int read_choices(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    int64_t best = 0;
    r->num_choices = 1;
    if (read_int(root, "n", 1, service->max_choices, &r->num_choices, refusal) != 0 ||
        read_int(root, "best_of", 1, service->max_choices, &best, refusal) != 0)
        return -1;
    if (best > 0 && best != r->num_choices)
        return mt_refuse(refusal, 400, "best_of", "\"best_of\" is not supported unless it equals \"n\"");
    if (r->num_choices * r->num_prompts <= service->max_choices) return 0;
    return mt_refuse(refusal, 400, "n", "%lld prompts with \"n\" %lld are %lld choices; this server takes %lld at once",
                     (long long)r->num_prompts, (long long)r->num_choices, (long long)(r->num_choices * r->num_prompts),
                     (long long)service->max_choices);
}

static int read_stream(mt_request *r, const json_t *root, mt_request_error *refusal) {
    const json_t *options = field(root, "stream_options");
    if (read_bool(root, "stream", &r->streams, refusal) != 0) return -1;
    if (!options) return 0;
    if (!json_is_object(options) || !r->streams)
        return mt_refuse(refusal, 400, "stream_options",
                         "\"stream_options\" must be an object, beside \"stream\": true");
    return read_bool(options, "include_usage", &r->reports_usage, refusal);
}

int64_t mt_service_find(const mt_service *service, const char *name) {
    if (strcmp(name, service->name) == 0) return 0;
    for (int64_t i = 0; service->adapters && i < service->adapters->count; i++)
        if (strcmp(name, service->adapters->items[i]) == 0) return i + 1;
    return -1;
}

static int read_model(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    const json_t *model = field(root, "model");
    r->model = service->name;
    if (!model) return 0;
    if (!json_is_string(model)) return mt_refuse(refusal, 400, "model", "\"model\" must be a text");
    r->adapter = mt_service_find(service, json_string_value(model));
    if (r->adapter < 0 || strlen(json_string_value(model)) != json_string_length(model))
        return mt_refuse(refusal, 404, "model", "the model \"%.100s\" is not served here; /v1/models lists what is",
                         json_string_value(model));
    if (r->adapter > 0) r->model = service->adapters->items[r->adapter - 1];
    return 0;
}

static int read_body(mt_request *r, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    const json_t *format = field(root, "response_format");
    const char *type = json_string_value(json_object_get(format, "type"));
    if (read_model(r, root, service, refusal) != 0) return -1;
    if (format && (!type || strcmp(type, "text") != 0))
        return mt_refuse(refusal, 400, "response_format",
                         "\"response_format\" is not supported but as {\"type\": "
                         "\"text\"}");
    r->returns_ids = !service->tokenizer;
    if (read_bool(root, "return_token_ids", &r->returns_ids, refusal) != 0) return -1;
    if (read_bool(root, "echo", &r->echo, refusal) != 0 || read_stream(r, root, refusal) != 0) return -1;
    int status = r->is_chat ? read_conversation(r, root, service, refusal) : read_prompts(r, root, service, refusal);
    if (status == 0) status = read_choices(r, root, service, refusal);
    if (status == 0) status = read_length(r, root, service, refusal);
    if (status == 0) status = read_logprobs(r, root, refusal);
    if (status == 0) status = read_sampling(r, root, service, refusal);
    return status == 0 ? read_stop(r, root, service, refusal) : -1;
}

/* The body as an object; NULL with a refusal. */
static json_t *parse_body(const char *body, int64_t bytes, mt_request_error *refusal) {
    mt_error error;
    json_t *root = mt_json_parse(body, bytes, JSON_REJECT_DUPLICATES, NULL, &error);
    if (root) return root;
    char *remedy = strstr(error.text, "; correct or remove the line"); // of a file
    if (remedy) *remedy = '\0';
    mt_refuse(refusal, 400, NULL, "the request's body %.1000s", error.text);
    return NULL;
}

int mt_request_read(mt_request *r, bool is_chat, const char *body, int64_t bytes, const mt_service *service,
                    mt_request_error *refusal) {
    *r = (mt_request){.is_chat = is_chat};
    json_t *root = parse_body(body, bytes, refusal);
    if (!root) return -1;
    int status = check_fields(root, is_chat ? OF_CHATS : OF_COMPLETIONS, refusal);
    if (status == 0) status = read_body(r, root, service, refusal);
    json_decref(root);
    return status;
}

void mt_request_free(mt_request *r) {
    for (int64_t i = 0; i < r->num_prompts; i++) free(r->prompts[i].data);
    mt_text_images_close(r->images);
    free(r->prompts);
    mt_strings_free(&r->stop);
    *r = (mt_request){.is_chat = false};
}

/* Appends the tokens of a text or a conversation. */
static int encode_any(mt_ids *ids, const json_t *root, const mt_service *service, mt_request_error *refusal) {
    bool begins = true, asks = true, is_talk = field(root, "messages") != NULL;
    const json_t *prompt = field(root, "prompt");
    mt_request unused = {.is_chat = is_talk};
    if (read_model(&unused, root, service, refusal) != 0 ||
        read_bool(root, "add_special_tokens", &begins, refusal) != 0 ||
        read_bool(root, "add_generation_prompt", &asks, refusal) != 0)
        return -1;
    if (is_talk && prompt) return mt_refuse(refusal, 400, "prompt", "give \"prompt\" or \"messages\", not both");
    if (is_talk) return encode_talk(ids, root, asks, NULL, NULL, service, refusal);
    if (json_is_string(prompt))
        return encode_text(ids, json_string_value(prompt), (int64_t)json_string_length(prompt), begins, service,
                           "prompt", refusal);
    return mt_refuse(refusal, 400, "prompt", "\"prompt\" or \"messages\" is missing: the text to encode");
}

int mt_request_read_tokenize(mt_ids *ids, const char *body, int64_t bytes, const mt_service *service,
                             mt_request_error *refusal) {
    json_t *root = parse_body(body, bytes, refusal);
    if (!root) return -1;
    int status = check_fields(root, OF_TOKENIZE, refusal);
    if (status == 0) status = encode_any(ids, root, service, refusal);
    json_decref(root);
    return status;
}
