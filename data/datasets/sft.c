/* sft.c: JSON Lines, or rows of Parquet, of conversations, prompts with responses, or texts -> samples to train on. */
#include "sft.h"

#include "../base/file.h"
#include "../base/text.h"
#include "../tokens/chat.h"
#include "../tokens/tokenizer_encode.h"
#include "../tokens/tokenizer_vocab.h"
#include "parquet.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

void mt_samples_free(mt_samples *samples) {
    free(samples->offsets);
    free(samples->tokens);
    free(samples->is_trained);
    for (int64_t i = 0; samples->questions && i < samples->count; i++) {
        free(samples->questions[i].prompt);
        free(samples->questions[i].answer);
        free(samples->questions[i].conversation);
    }
    free(samples->questions);
    free(samples->ref_logps);
    free(samples->input_offsets);
    free(samples->inputs);
    free(samples->image_offsets);
    mt_images_cut(&samples->images, 0);
    *samples = (mt_samples){0};
}

uint64_t mt_samples_fingerprint(const mt_samples *samples) {
    int64_t tokens = samples->offsets[samples->count], count = samples->questions ? samples->count : 0;
    uint64_t *prints = mt_calloc((3 + 2 * count) * 8);
    prints[0] = mt_contents_fingerprint(samples->offsets, (samples->count + 1) * 8, true);
    prints[1] = mt_contents_fingerprint(samples->tokens, tokens * 4, true);
    prints[2] = mt_contents_fingerprint(samples->is_trained, tokens, true);
    for (int64_t i = 0; i < count; i++) {
        const mt_question *question = &samples->questions[i];
        prints[3 + 2 * i] = mt_contents_fingerprint(question->prompt, question->prompt_bytes, true);
        if (question->answer)
            prints[4 + 2 * i] = mt_contents_fingerprint(question->answer, question->answer_bytes, true);
    }
    uint64_t print = mt_contents_fingerprint(prints, (3 + 2 * count) * 8, true);
    if (samples->inputs)
        print += mt_contents_fingerprint(samples->inputs, samples->input_offsets[samples->count] * 4, true) +
                 mt_contents_fingerprint(samples->input_offsets, (samples->count + 1) * 8, true);
    if (samples->ref_logps) print += mt_contents_fingerprint(samples->ref_logps, samples->count * 8, true);
    for (int64_t i = 0; i < samples->images.count; i++) {
        const mt_image *image = &samples->images.items[i];
        const uint64_t parts[] = {(uint64_t)i, image->fingerprint, (uint64_t)image->grid.height,
                                  (uint64_t)image->grid.width};
        print += mt_contents_fingerprint(parts, sizeof parts, true);
    }
    free(prints);
    return print;
}

/* ---- one sample ------------------------------------------------------------------------------------------------- */

typedef struct reader {
    const mt_sft_config *config;
    const mt_tokenizer *tokenizer;
    mt_chat *chat;
    // of the line
    mt_chat_message *messages;
    bool *untrained;  // [num_messages]: marked as an answer that is not to be imitated
    json_t **fields;  // [num_messages]: a message's other fields, for templates that take them; or NULL
    json_t *tools;    // definitions of tools; NULL: none
    json_t *settings; // further variables of the template; NULL: none
    int64_t num_messages, message_capacity;
    mt_text joined;     // an instruction and its input
    mt_images images;   // its pictures, until the sample is added
    const char *folder; // of the file
    // of the sample
    mt_ids ids, turns;
    // all samples; `samples.count` and the last offset count them
    mt_samples samples;
    int64_t sample_capacity, token_capacity, input_capacity;
    int64_t untagged; // prompts whose tag is in no share
    int64_t bad, truncated, dropped, trained, longest, equal_pairs, repeated_prompts;
    mt_text unread; // names of fields that no line was read for, each followed by a 0
} reader;

/* Marks the tokens of the sample that the loss counts in `turns`: 1 or 0. Returns their number among the first
 * `limit`. The first token is no label. */
static int64_t mark_trained(reader *r, int64_t limit) {
    int32_t last = -1;
    int64_t trained = 0;
    for (int64_t i = 0; i < r->turns.count; i++)
        if (r->turns.data[i] > last) last = r->turns.data[i];
    for (int64_t i = 0; i < r->turns.count; i++) {
        int32_t turn = r->turns.data[i];
        bool counts = r->config->loss_on == MT_LOSS_ON_ALL || (turn >= 0 && r->config->loss_on == MT_LOSS_ON_RESPONSES);
        counts = counts || (last >= 0 && turn == last);
        counts = counts && !(turn >= 0 && turn < r->num_messages && r->untrained[turn]);
        counts = counts && !(i > 0 && r->config->masks_eod && r->ids.data[i - 1] == r->config->eod_id);
        counts = counts && !(r->config->images && r->ids.data[i] == r->config->images->image_token_id);
        r->turns.data[i] = counts && i > 0;
        trained += counts && i > 0 && i < limit;
    }
    return trained;
}

static int check_tokens(const reader *r, mt_error *error) {
    for (int64_t i = 0; i < r->ids.count; i++)
        if (r->ids.data[i] >= r->config->vocab_size)
            return mt_error_set(error,
                                "has the token %d, but the vocabulary has %lld tokens; take the model's tokenizer",
                                (int)r->ids.data[i], (long long)r->config->vocab_size);
    return 0;
}

/* Appends the first `count` tokens of the sample. */
static void add_sample(reader *r, int64_t count) {
    mt_samples *s = &r->samples;
    if (s->count + 2 > r->sample_capacity) {
        r->sample_capacity = 2 * r->sample_capacity + 1024;
        s->offsets = mt_realloc(s->offsets, r->sample_capacity * 8);
        s->offsets[0] = 0;
        if (r->config->images) {
            s->image_offsets = mt_realloc(s->image_offsets, r->sample_capacity * 8);
            s->image_offsets[0] = 0;
        }
    }
    int64_t first = s->offsets[s->count];
    if (first + count > r->token_capacity) {
        r->token_capacity = 2 * (first + count) + 65536;
        s->tokens = mt_realloc(s->tokens, r->token_capacity * 4);
        s->is_trained = mt_realloc(s->is_trained, r->token_capacity);
    }
    for (int64_t i = 0; i < count; i++) {
        s->tokens[first + i] = r->ids.data[i];
        s->is_trained[first + i] = (uint8_t)r->turns.data[i];
        r->trained += r->turns.data[i];
    }
    s->offsets[++s->count] = first + count;
    mt_images_move(&s->images, &r->images);
    if (s->image_offsets) s->image_offsets[s->count] = s->images.count;
    r->longest = mt_max(r->longest, count - 1);
}

static int check_tokenizer(const reader *r, mt_error *error) {
    if (r->chat) return 0;
    return mt_error_set(error, "has text, and there is no tokenizer; give --tokenizer-type and --tokenizer-model, or "
                               "--load a model with one");
}

/* One image token for each merged patch of the line's pictures. */
static int expand_images(reader *r, mt_error *error) {
    if (!r->config->images) return 0;
    return mt_images_expand(&r->images, 0, r->config->images, &r->ids, &r->turns, 0, error);
}

/* The tokens of the messages; all of them are in the scratch of the reader. `generates`: up to the header of a
 * response. */
static int encode_messages(reader *r, bool generates, mt_error *error) {
    const mt_chat_extras extras = {r->tools, r->settings, (const json_t *const *)r->fields};
    r->ids.count = r->turns.count = 0;
    if (check_tokenizer(r, error) != 0) return -1;
    mt_chat_set_extras(r->chat, &extras);
    int status = mt_chat_encode(r->chat, r->messages, r->num_messages, generates, &r->ids, &r->turns, error);
    mt_chat_set_extras(r->chat, NULL);
    if (status == 0) status = expand_images(r, error);
    return status == 0 ? check_tokens(r, error) : -1;
}

static int encode_sample(reader *r, mt_error *error) {
    return encode_messages(r, false, error);
}

/* A value head is read at the end of the last response, where a response that a model writes ends too; templates may
 * write more behind it. */
static int cut_behind_response(reader *r, mt_error *error) {
    int64_t last = r->turns.count - 1;
    while (last >= 0 && r->turns.data[last] < 0) last--;
    if (last < 0) return 0; // an error of its own
    if (r->num_messages > 0 && r->turns.data[last] != r->num_messages - 1)
        return mt_error_set(error, "does not end with a message of the assistant, at whose end the value is read");
    // a {% generation %} block may lack the token that ends the turn
    if (r->num_messages > 0 && last + 1 < r->ids.count && !mt_tokenizer_is_special(r->tokenizer, r->ids.data[last]))
        last += mt_tokenizer_is_special(r->tokenizer, r->ids.data[last + 1]);
    r->ids.count = r->turns.count = last + 1;
    return 0;
}

/* A sample has its pictures whole, or none of it is taken. The last of `count` tokens is a label alone. */
static int check_images(const reader *r, int64_t count, mt_error *error) {
    for (int64_t i = count - 1; i < r->ids.count && r->images.count > 0; i++)
        if (r->ids.data[i] == r->config->images->image_token_id)
            return mt_error_set(error,
                                "has %lld tokens with those of its %lld pictures, and --seq-length %lld would cut a "
                                "picture; raise it, lower max_pixels of the processor's file, or give --long-samples "
                                "drop",
                                (long long)r->ids.count, (long long)r->images.count, (long long)r->config->seq_length);
    return 0;
}

/* Takes the encoded sample: whole, truncated, or not at all if it is too long. */
static int take_sample(reader *r, mt_error *error) {
    bool whole = r->config->whole;
    if (whole && cut_behind_response(r, error) != 0) return -1;
    int64_t count = mt_min(r->ids.count, r->config->seq_length + !whole);
    bool is_long = r->ids.count > count;
    if (is_long && r->config->refuses_long)
        return mt_error_set(error, "has %lld tokens, more than the sequence length of %lld", (long long)r->ids.count,
                            (long long)r->config->seq_length);
    bool is_trained = mark_trained(r, r->ids.count) > 0;
    if (!is_trained && r->config->scores)
        return mt_error_set(error, "has no response to score: end it with a message of the assistant, or give the "
                                   "whole as \"text\" or \"tokens\"");
    if (!is_trained)
        return mt_error_set(error, "has no token to train on: no response, or none that is not marked as untrained; "
                                   "--loss-on all trains on the whole text");
    int64_t trained = 0;
    for (int64_t i = 0; i < count; i++) trained += r->turns.data[i];
    bool drops = is_long && (r->config->long_samples == MT_LONG_DROP || trained == 0);
    if (!drops && check_images(r, count, error) != 0) return -1;
    r->dropped += drops;
    r->truncated += is_long && !drops;
    if (!drops && whole) {
        r->ids.count = r->turns.count = count++;
        mt_ids_push(&r->ids, 0);
        mt_ids_push(&r->turns, 0);
    }
    if (!drops) add_sample(r, count);
    return 0;
}

/* ---- one line --------------------------------------------------------------------------------------------------- */

static void remove_messages(reader *r) {
    while (r->num_messages > 0) json_decref(r->fields[--r->num_messages]);
}

static void add_message(reader *r, const char *role, const char *content, int64_t bytes) {
    if (r->num_messages == r->message_capacity) {
        r->message_capacity = 2 * r->message_capacity + 16;
        r->messages = mt_realloc(r->messages, r->message_capacity * (int64_t)sizeof *r->messages);
        r->untrained = mt_realloc(r->untrained, r->message_capacity * (int64_t)sizeof *r->untrained);
        r->fields = mt_realloc(r->fields, r->message_capacity * (int64_t)sizeof *r->fields);
    }
    r->untrained[r->num_messages] = false;
    r->fields[r->num_messages] = NULL;
    r->messages[r->num_messages++] = (mt_chat_message){role, content, bytes};
}

/* The field of a key, or of "a.b", b in the object a, where there is no such key. */
static const json_t *get_field(const json_t *object, const char *key) {
    const json_t *field = json_object_get(object, key);
    const char *dot = strchr(key, '.');
    char first[200];
    if (field || !dot || dot - key >= (int)sizeof first) return field;
    snprintf(first, sizeof first, "%.*s", (int)(dot - key), key);
    return get_field(json_object_get(object, first), dot + 1);
}

/* The field of a key that the user chose, or else of one of two usual keys; NULL: none, or null. `name` is the key. */
static const json_t *find_field(const json_t *object, const char *key, const char *usual, const char *other,
                                const char **name) {
    const json_t *field = get_field(object, *name = key ? key : usual);
    if (!field && !key && other && (field = get_field(object, other))) *name = other;
    return json_is_null(field) ? NULL : field;
}

/* False for null, false, 0 and what is empty or absent. */
static bool has_value(const json_t *item) {
    if (json_is_string(item)) return json_string_length(item) > 0;
    if (json_is_array(item)) return json_array_size(item) > 0;
    if (json_is_object(item)) return json_object_size(item) > 0;
    return json_is_true(item) || (json_is_number(item) && json_number_value(item) != 0);
}

/* The first of these fields that has a value; NULL: none. */
static const char *first_with_value(const json_t *object, const char *const *names) {
    for (; *names; names++)
        if (has_value(json_object_get(object, *names))) return *names;
    return NULL;
}

/* Fields by which others mark what is trained: OpenAI's and Fireworks' weight, axolotl's and ms-swift's switches. */
static const char *const marks[] = {"weight", "loss_weight", "loss", "train", "training", "trainable", NULL};

/* A mark is true or 1, false or 0; null is none. *found: the name of the mark, or NULL. */
static int read_mark(const json_t *object, bool *trained, const char **found, mt_error *error) {
    *found = NULL;
    for (const char *const *name = marks; *name; name++) {
        const json_t *mark = json_object_get(object, *name);
        double value = json_is_boolean(mark) ? json_is_true(mark) : json_number_value(mark);
        if (!mark || json_is_null(mark)) continue;
        if ((!json_is_boolean(mark) && !json_is_number(mark)) || (value != 0 && value != 1))
            return mt_error_set(error, "\"%s\" is not true or 1, or false or 0; other weights are not supported",
                                *name);
        if (*found && *trained != (value == 1))
            return mt_error_set(error, "\"%s\" and \"%s\" contradict each other", *found, *name);
        *trained = value == 1;
        *found = *name;
    }
    return 0;
}

/* A message's mark: an answer may be left untrained; no other message can be trained by a mark. */
static int mark_message(reader *r, const json_t *message, const char *name, mt_error *error) {
    bool trained = true;
    const char *mark;
    mt_error why;
    if (read_mark(message, &trained, &mark, &why) != 0)
        return mt_error_set(error, "\"%s\": a message's %s", name, why.text);
    bool answers = strcmp(r->messages[r->num_messages - 1].role, "assistant") == 0;
    if (mark && trained && !answers && r->config->loss_on != MT_LOSS_ON_ALL)
        return mt_error_set(error,
                            "\"%s\": \"%s\" marks a message that is no answer as trained, but only answers "
                            "are; remove the mark",
                            name, mark);
    r->untrained[r->num_messages - 1] = mark && !trained;
    return 0;
}

/* The role of a message; ShareGPT calls it "from" and has names of its own. NULL: it has none. */
static const char *role_of(const json_t *message) {
    const json_t *role = json_object_get(message, "role");
    if (!role) role = json_object_get(message, "from");
    if (!json_is_string(role) || strlen(json_string_value(role)) != json_string_length(role)) return NULL;
    const char *name = json_string_value(role);
    return strcmp(name, "human") == 0 ? "user" : strcmp(name, "gpt") == 0 ? "assistant" : name;
}

static const json_t *content_of(const json_t *message) {
    const json_t *content = json_object_get(message, "content");
    return content ? content : json_object_get(message, "value");
}

/* True if the template takes tools, their calls and thoughts: that of the tokenizer's folder. */
static bool takes_extras(const reader *r) {
    return r->chat && mt_chat_takes_extras(r->chat);
}

static bool is_one_of(const char *key, const char *const *names) {
    while (*names && strcmp(*names, key) != 0) names++;
    return *names != NULL;
}

/* True for a field that may well say what is trained, such as torchtune's "masked", in a way that is not known. */
static bool is_strange_mark(const char *key, const json_t *value) {
    static const char *const parts[] = {"train", "loss", "mask", "weight", "ignore", "supervised", "learn", "label"};
    bool speaks = json_is_boolean(value) || json_is_number(value) || has_value(value);
    if (!speaks || is_one_of(key, marks)) return false;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const char *at = key; *at; at++)
            if (strncasecmp(at, parts[i], strlen(parts[i])) == 0) return true;
    return false;
}

/* Remembers the name of a field that is not read. */
static void note_field(reader *r, const char *key) {
    enum { MOST_BYTES = 1024 };
    for (int64_t at = 0; at < r->unread.bytes; at += (int64_t)strlen(r->unread.data + at) + 1)
        if (strcmp(r->unread.data + at, key) == 0) return;
    if (r->unread.bytes < MOST_BYTES) mt_text_append(&r->unread, key, (int64_t)strlen(key) + 1);
}

/* Fields of a message beside its role and its content: refused if they may change what is trained, or else noted. */
static int check_more_fields(reader *r, const json_t *message, const char *name, mt_error *error) {
    static const char *const read[] = {"role", "from", "content", "value", NULL};
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)message, key, value) {
        if (is_strange_mark(key, value))
            return mt_error_set(error,
                                "\"%s\": a message has \"%s\", which is not supported; mark an answer that the loss "
                                "must not count by \"train\": false",
                                name, key);
        bool is_read = is_one_of(key, read) || is_one_of(key, marks) || takes_extras(r);
        if (!is_read && has_value(value)) note_field(r, key);
    }
    return 0;
}

/* The fields of a message that are read here; a template in Jinja takes the others. */
static json_t *other_fields(const json_t *message) {
    static const char *const own[] = {"role", "from", "content", "value"};
    json_t *fields = json_copy((json_t *)message);
    for (int i = 0; i < 4; i++) json_object_del(fields, own[i]);
    return fields;
}

/* ShareGPT's roles for tools, "function_call" and "observation", are no roles of templates. */
static bool is_usual_role(const char *role) {
    return strcmp(role, "system") == 0 || strcmp(role, "user") == 0 || strcmp(role, "assistant") == 0 ||
           strcmp(role, "tool") == 0;
}

static int read_message(reader *r, const json_t *message, const char *name, mt_error *error) {
    static const char *const never[] = {"function_call", "tools",           "functions", "images", "audios",
                                        "videos",        "training_detail", "prefix",    NULL};
    static const char *const calls[] = {"tool_calls", "tool_call_id", NULL};
    static const char *const thoughts[] = {"reasoning_content", "reasoning", "thinking", NULL};
    const json_t *content = content_of(message);
    const char *role = role_of(message), *field = first_with_value(message, never);
    bool takes = takes_extras(r);
    if (!role) return mt_error_set(error, "\"%s\": a message has no \"role\"", name);
    if (!field && !takes) field = first_with_value(message, calls);
    if (field)
        return mt_error_set(
            error, "\"%s\": a message has \"%s\", which %s", name, field,
            strncmp(field, "tool_call", 9) != 0
                ? "are not supported"
                : "this template cannot write; --chat-template auto takes that of the tokenizer's folder");
    if (!takes && (field = first_with_value(message, thoughts)))
        return mt_error_set(error,
                            "\"%s\": a message has \"%s\", which is not supported; put it into the content, between "
                            "<think> and </think>",
                            name, field);
    if (takes && !json_object_get(message, "role") && !is_usual_role(role))
        return mt_error_set(error,
                            "\"%s\": a message is \"from\" \"%.40s\", which is no role of a template; write calls of "
                            "tools as \"tool_calls\" of the assistant, and results with the \"role\" \"tool\"",
                            name, role);
    bool calls_only = takes && (!content || json_is_null(content)) && strcmp(role, "assistant") == 0 &&
                      has_value(json_object_get(message, "tool_calls"));
    bool has_parts = r->config->images && takes && json_is_array(content); // see take_images
    if (!json_is_string(content) && !calls_only && !has_parts)
        return mt_error_set(error, "\"%s\": a message's \"content\" is not a text%s", name,
                            json_is_array(content)
                                ? "; parts and pictures need a model with a vision tower, and the chat "
                                  "template of a folder"
                                : "");
    if (check_more_fields(r, message, name, error) != 0) return -1;
    add_message(r, role, json_string_value(content), (int64_t)json_string_length(content));
    if (takes) r->fields[r->num_messages - 1] = other_fields(message);
    if (has_parts) json_object_set(r->fields[r->num_messages - 1], "content", (json_t *)content);
    return mark_message(r, message, name, error);
}

/* Adds a text as a message of a role, or a list of messages. */
static int read_messages(reader *r, const json_t *field, const char *name, const char *role, mt_error *error) {
    size_t i;
    const json_t *message;
    if (role && json_is_string(field)) {
        add_message(r, role, json_string_value(field), (int64_t)json_string_length(field));
        return 0;
    }
    if (!json_is_array(field))
        return mt_error_set(error, "\"%s\" is not a %slist of messages", name, role ? "text or a " : "");
    json_array_foreach(field, i, message) if (read_message(r, message, name, error) != 0) return -1;
    return 0;
}

/* The "system" text of a line, in front of its messages, which then have none of their own. */
static int read_system(reader *r, const json_t *object, const json_t *messages, mt_error *error) {
    const json_t *system = json_object_get(object, "system");
    if (!has_value(system)) return 0;
    if (!json_is_string(system)) return mt_error_set(error, "\"system\" is not a text");
    const json_t *first = json_array_get(messages, 0);
    const char *role = first ? role_of(first) : NULL;
    if (role && strcmp(role, "system") == 0) {
        if (json_equal(content_of(first), system)) return 0; // said twice
        return mt_error_set(error, "has a \"system\" text and another message with this role; remove one");
    }
    add_message(r, "system", json_string_value(system), (int64_t)json_string_length(system));
    return 0;
}

/* Alpaca's "history": pairs of a prompt and its response, before the prompt. */
static int read_history(reader *r, const json_t *object, mt_error *error) {
    const json_t *history = json_object_get(object, "history"), *pair;
    size_t i;
    if (!has_value(history)) return 0;
    if (!json_is_array(history)) return mt_error_set(error, "\"history\" is not a list of pairs of texts");
    json_array_foreach(history, i, pair) {
        for (size_t k = 0; k < 2; k++) {
            const json_t *text = json_array_get(pair, k);
            if (json_array_size(pair) != 2 || !json_is_string(text))
                return mt_error_set(error, "\"history\": item %lld is not a pair of texts", (long long)i + 1);
            add_message(r, k == 0 ? "user" : "assistant", json_string_value(text), (int64_t)json_string_length(text));
        }
    }
    return 0;
}

/* A prompt, or an instruction with an input on the lines after it; before it, the system text and the history. */
static int read_prompt(reader *r, const json_t *prompt, const char *name, const json_t *object, mt_error *error) {
    const char *query_name;
    if (read_system(r, object, prompt, error) != 0 || read_history(r, object, error) != 0) return -1;
    const json_t *query = find_field(object, r->config->query_key, "input", NULL, &query_name);
    if (!query || (json_is_string(query) && json_string_length(query) == 0))
        return read_messages(r, prompt, name, "user", error);
    if (!json_is_string(prompt) || !json_is_string(query))
        return mt_error_set(error, "\"%s\" is not a text", json_is_string(prompt) ? query_name : name);
    r->joined.bytes = 0;
    mt_text_append(&r->joined, json_string_value(prompt), (int64_t)json_string_length(prompt));
    mt_text_append(&r->joined, "\n", 1);
    mt_text_append(&r->joined, json_string_value(query), (int64_t)json_string_length(query));
    add_message(r, "user", r->joined.data, r->joined.bytes);
    return 0;
}

/* True if a list of messages begins with one that is no answer: it is a whole conversation. */
static bool is_conversation(const json_t *response) {
    const json_t *first = json_array_get(response, 0);
    const char *role = first ? role_of(first) : NULL;
    return role && strcmp(role, "assistant") != 0;
}

/* True if the conversation holds the prompt: begins with its messages, or has the text as a message of the user. */
static bool holds_prompt(const json_t *conversation, const json_t *prompt) {
    const json_t *message;
    size_t i, skipped = 0;
    if (json_is_string(prompt)) {
        json_array_foreach(conversation, i, message) {
            const char *role = role_of(message);
            if (role && strcmp(role, "user") == 0 && json_equal(content_of(message), prompt)) return true;
        }
        return false;
    }
    if (!json_is_array(prompt)) return false;
    const char *first = role_of(json_array_get(conversation, 0)), *own = role_of(json_array_get(prompt, 0));
    if (first && own && strcmp(first, "system") == 0 && strcmp(own, "system") != 0) skipped = 1;
    json_array_foreach(prompt, i, message) {
        const json_t *other = json_array_get(conversation, i + skipped);
        const char *role = role_of(message), *same = other ? role_of(other) : NULL;
        if (!role || !same || strcmp(role, same) != 0 || !json_equal(content_of(message), content_of(other)))
            return false;
    }
    return true;
}

/* The messages of a prompt, if there is one, and of its response, which may be a conversation that holds the prompt. */
static int read_exchange(reader *r, const json_t *object, const json_t *prompt, const char *name,
                         const json_t *response, const char *response_name, mt_error *error) {
    bool whole = is_conversation(response);
    const char *query_name;
    if (prompt && whole) {
        bool more = has_value(json_object_get(object, "history")) ||
                    has_value(find_field(object, r->config->query_key, "input", NULL, &query_name));
        if (more || !holds_prompt(response, prompt))
            return mt_error_set(error,
                                "\"%s\" is a whole conversation, which does not hold \"%s\"%s; leave one of them out",
                                response_name, name, more ? " with its input or history" : "");
    }
    if (prompt && !whole && read_prompt(r, prompt, name, object, error) != 0) return -1;
    if ((!prompt || whole) && read_system(r, object, response, error) != 0) return -1;
    if (!prompt && read_history(r, object, error) != 0) return -1;
    return read_messages(r, response, response_name, "assistant", error);
}

static int read_document(reader *r, const json_t *text, mt_error *error) {
    if (!json_is_string(text)) return mt_error_set(error, "\"text\" is not a text");
    if (check_tokenizer(r, error) != 0) return -1;
    r->ids.count = r->turns.count = 0;
    if (mt_chat_encode_document(r->chat, json_string_value(text), (int64_t)json_string_length(text), &r->ids, error))
        return -1;
    for (int64_t i = 0; i < r->ids.count; i++) mt_ids_push(&r->turns, 0); // one response
    if (expand_images(r, error) != 0 || check_tokens(r, error) != 0) return -1;
    return r->ids.count < 2 ? mt_error_set(error, "\"text\" is empty") : take_sample(r, error);
}

/* A list of tokens: the loss counts all but the first. */
static int read_tokens(reader *r, const json_t *tokens, mt_error *error) {
    size_t i;
    const json_t *token;
    r->ids.count = r->turns.count = 0;
    json_array_foreach(tokens, i, token) {
        double id = json_number_value(token);
        if (!json_is_number(token) || id < 0 || id > INT32_MAX || id != floor(id))
            return mt_error_set(error, "\"tokens\": item %lld is not a token", (long long)i + 1);
        mt_ids_push(&r->ids, (int32_t)id);
        mt_ids_push(&r->turns, 0); // one response
    }
    if (expand_images(r, error) != 0 || check_tokens(r, error) != 0) return -1;
    return r->ids.count < 2 ? mt_error_set(error, "\"tokens\" has less than two") : take_sample(r, error);
}

/* The messages of a line; NULL: none. */
static const json_t *find_messages(const reader *r, const json_t *object, const char **name) {
    return find_field(object, r->config->messages_key, "messages", "conversations", name);
}

/* Reads one line as a sample. */
static int read_single(reader *r, const json_t *object, mt_error *error) {
    const mt_sft_config *c = r->config;
    if (json_is_array(json_object_get(object, "tokens")))
        return read_tokens(r, json_object_get(object, "tokens"), error);
    const char *name, *response_name, *text_name;
    const json_t *messages = find_messages(r, object, &name);
    if (messages) {
        if (read_system(r, object, messages, error) != 0) return -1;
        if (read_messages(r, messages, name, NULL, error) != 0 || encode_sample(r, error) != 0) return -1;
        return take_sample(r, error);
    }
    const json_t *prompt = find_field(object, c->prompt_key, "prompt", "instruction", &name);
    const json_t *response = find_field(object, c->response_key, "response", "output", &response_name);
    if (prompt && response) {
        if (read_exchange(r, object, prompt, name, response, response_name, error) != 0) return -1;
        return encode_sample(r, error) != 0 ? -1 : take_sample(r, error);
    }
    const json_t *text = find_field(object, NULL, "text", NULL, &text_name);
    if (text && !prompt && !response) return read_document(r, text, error);
    if (json_object_get(object, "chosen") && json_object_get(object, "rejected"))
        return mt_error_set(error,
                            "has a \"chosen\" and a \"rejected\" response: a preference, not a sample to imitate");
    if (prompt || response)
        return mt_error_set(error, "has \"%s\" but not \"%s\"; name the fields with --prompt-key and --response-key",
                            prompt ? name : response_name, prompt ? response_name : name);
    return mt_error_set(error, "has neither messages, nor a prompt with a response, nor a text; name the fields with "
                               "--messages-key, or --prompt-key and --response-key");
}

/* The pictures beside the messages. */
static const char *const image_keys[] = {"images", "image", NULL};

/* The field of a line with pictures beside its messages; NULL: it has none. */
static const char *find_beside(const reader *r, const json_t *object) {
    const char *key = r->config->image_key;
    return key ? has_value(get_field(object, key)) ? key : NULL : first_with_value(object, image_keys);
}

/* Takes the pictures of `messages`, a list, and those beside it in the line. */
static int take_listed_images(reader *r, const json_t *object, json_t *messages, mt_error *error) {
    const char *beside = find_beside(r, object);
    const json_t *list = beside ? get_field(object, beside) : NULL;
    if (mt_images_take(&r->images, messages, list, r->folder, error) != 0) return -1;
    if (r->images.count == 0) return 0;
    return check_tokenizer(r, error) == 0 ? mt_images_check_chat(r->chat, error) : -1;
}

/* Makes a prompt of a text, with pictures beside it, a message of the user; NULL: there is none, or a list. */
static json_t *list_prompt(const reader *r, json_t *object) {
    const char *name;
    const json_t *prompt = find_field(object, r->config->prompt_key, "prompt", "instruction", &name);
    if (!json_is_string(prompt) || !find_beside(r, object)) return NULL;
    json_t *list = json_pack("[{s:s, s:O}]", "role", "user", "content", prompt);
    json_object_set_new(object, name, list);
    return list;
}

/* Takes the pictures out of the prompt and one of the two responses, `object` being a copy of the line: of both lists
 * of messages one after the other. A prompt that the response holds is left out. */
static int take_choice_images(reader *r, json_t *object, const char *choice, mt_error *error) {
    const char *name;
    const json_t *prompt = find_field(object, r->config->prompt_key, "prompt", "instruction", &name);
    json_t *response = json_object_get(object, choice), *both = json_array();
    mt_images_cut(&r->images, 0);
    if (is_conversation(response) && prompt && holds_prompt(response, prompt))
        json_object_del(object, name);
    else if (json_is_array(prompt) || (prompt = list_prompt(r, object)))
        json_array_extend(both, (json_t *)prompt);
    if (json_is_array(response)) json_array_extend(both, response);
    if (json_is_object(response)) json_array_append(both, response);
    int status = take_listed_images(r, object, both, error);
    json_decref(both);
    return status;
}

/* Encodes the prompt, if there is one, with one of the two responses. */
static int encode_choice(reader *r, const json_t *object, const char *choice, mt_error *error) {
    const char *name;
    const json_t *prompt = find_field(object, r->config->prompt_key, "prompt", "instruction", &name);
    const json_t *response = json_object_get(object, choice);
    remove_messages(r);
    if (!response) return mt_error_set(error, "has no \"%s\", but a preference needs chosen and rejected", choice);
    if (!prompt && json_is_string(response) && strncmp(json_string_value(response), "\n\nHuman:", 8) == 0)
        return mt_error_set(error,
                            "\"%s\" is a transcript, \"Human: ... Assistant: ...\", in one text; write it as a list of "
                            "messages",
                            choice);
    if (read_exchange(r, object, prompt, name, response, choice, error) != 0) return -1;
    return encode_sample(r, error);
}

/* True if the last two samples have the same tokens. */
static bool pair_is_equal(const mt_samples *s) {
    const int32_t *chosen = s->tokens + s->offsets[s->count - 2], *rejected = s->tokens + s->offsets[s->count - 1];
    int64_t count = s->offsets[s->count] - s->offsets[s->count - 1];
    return rejected - chosen == count && memcmp(chosen, rejected, (size_t)count * 4) == 0;
}

/* The log-probabilities of a pair by the reference model, under the names of this program and of TRL. */
static int read_ref_logps(const json_t *object, double logps[2], mt_error *error) {
    static const char *const names[2][3] = {
        {"ref_chosen_logp", "ref_chosen_logps", "reference_chosen_logps"},
        {"ref_rejected_logp", "ref_rejected_logps", "reference_rejected_logps"},
    };
    for (int i = 0; i < 2; i++) {
        const json_t *logp = NULL;
        for (int k = 0; k < 3 && !logp; k++) logp = json_object_get(object, names[i][k]);
        if (!json_is_number(logp))
            return mt_error_set(error, "has no number \"%s\", which --ref-logps-in-data needs", names[i][0]);
        logps[i] = json_number_value(logp);
        if (logps[i] > 1e-3) // rounding
            return mt_error_set(error, "\"%s\" is %g, but a log-probability is at most 0", names[i][0], logps[i]);
    }
    return 0;
}

/* Keeps the log-probabilities of the last two samples. */
static void add_ref_logps(reader *r, const double logps[2]) {
    mt_samples *s = &r->samples;
    s->ref_logps = mt_realloc(s->ref_logps, r->sample_capacity * (int64_t)sizeof *s->ref_logps);
    memcpy(s->ref_logps + s->count - 2, logps, 2 * sizeof *logps);
}

/* True if the text has this beginning and goes on after it. */
static bool begins_with(const json_t *text, const json_t *beginning) {
    size_t bytes = json_string_length(beginning);
    return json_is_string(text) && json_string_length(text) > bytes &&
           memcmp(json_string_value(text), json_string_value(beginning), bytes) == 0;
}

/* True if both responses are texts that repeat the whole prompt, unless that is a word or two. */
static bool repeats_prompt(const reader *r, const json_t *object, const char *const choices[2]) {
    enum { SURE_BYTES = 16 };
    const char *name;
    const json_t *prompt = find_field(object, r->config->prompt_key, "prompt", "instruction", &name);
    return json_is_string(prompt) && json_string_length(prompt) >= SURE_BYTES &&
           begins_with(json_object_get(object, choices[0]), prompt) &&
           begins_with(json_object_get(object, choices[1]), prompt);
}

/* Reads one line as two samples, both or none. Equal responses are bad, or left out if they differed before they were
 * truncated. */
static int read_pair(reader *r, const json_t *object, mt_error *error) {
    int64_t count = r->samples.count, trained = r->trained, truncated = r->truncated, dropped = r->dropped;
    int status = 0;
    const mt_sft_config *c = r->config;
    const char *const choices[] = {c->chosen_key ? c->chosen_key : "chosen",
                                   c->rejected_key ? c->rejected_key : "rejected"};
    double logps[2];
    if (c->ref_logps && read_ref_logps(object, logps, error) != 0) return -1;
    for (int i = 0; i < 2 && status == 0; i++) {
        json_t *line = c->images ? json_deep_copy(object) : json_incref((json_t *)object);
        status = c->images ? take_choice_images(r, line, choices[i], error) : 0;
        if (status == 0) status = encode_choice(r, line, choices[i], error);
        if (status == 0) status = take_sample(r, error);
        json_decref(line);
    }
    bool both = status == 0 && r->samples.count == count + 2, is_equal = both && pair_is_equal(&r->samples);
    bool is_cut = r->truncated > truncated;
    r->repeated_prompts += repeats_prompt(r, object, choices);
    if (both && !is_equal && !(is_cut && c->ref_logps)) {
        if (c->ref_logps) add_ref_logps(r, logps);
        return 0;
    }
    r->samples.count = count;
    if (c->images && r->samples.image_offsets) mt_images_cut(&r->samples.images, r->samples.image_offsets[count]);
    r->trained = trained;
    r->truncated = truncated;
    r->dropped = dropped + 2 * (status == 0 && !both);
    r->equal_pairs += is_equal && is_cut;
    if (both && is_cut && c->ref_logps)
        return mt_error_set(error,
                            "is longer than --seq-length, but the log-probabilities by the reference are those of "
                            "whole responses; raise it, or give --long-samples drop");
    if (!is_equal || is_cut) return status;
    return mt_error_set(error, "\"%s\" and \"%s\" are the same response", choices[0], choices[1]);
}

/* ---- an encoder-decoder */

/* The tokens of a field, a text or a list of tokens, with end_id behind them; `most`: how many there may be. Longer
 * ones are cut off, or with --long-samples drop set *drops. */
static int read_side(reader *r, const json_t *field, const char *name, int64_t most, bool *drops, mt_error *error) {
    const mt_sft_config *c = r->config;
    size_t i;
    const json_t *token;
    r->ids.count = 0;
    if (!json_is_string(field) && !json_is_array(field))
        return mt_error_set(error, "\"%s\" is neither a text nor a list of tokens", name);
    json_array_foreach(field, i, token) {
        double id = json_number_value(token);
        if (!json_is_number(token) || id < 0 || id > INT32_MAX || id != floor(id))
            return mt_error_set(error, "\"%s\": item %lld is not a token", name, (long long)i + 1);
        mt_ids_push(&r->ids, (int32_t)id);
    }
    if (json_is_string(field) && !r->tokenizer) return check_tokenizer(r, error);
    if (json_is_string(field) && mt_tokenizer_encode(r->tokenizer, json_string_value(field),
                                                     (int64_t)json_string_length(field), &r->ids, error) != 0)
        return -1;
    if (json_is_string(field) && c->end_id >= 0) mt_ids_push(&r->ids, (int32_t)c->end_id);
    if (r->ids.count == 0) return mt_error_set(error, "\"%s\" is empty", name);
    if (check_tokens(r, error) != 0) return -1;
    if (r->ids.count <= most) return 0;
    *drops |= c->long_samples == MT_LONG_DROP;
    r->truncated += !*drops;
    r->ids.count = most;
    if (c->end_id >= 0) r->ids.data[most - 1] = (int32_t)c->end_id;
    return 0;
}

/* Appends the tokens of the reader as the input of the next sample. */
static void add_input(reader *r) {
    mt_samples *s = &r->samples;
    int64_t first = s->input_offsets ? s->input_offsets[s->count] : 0, end = first + r->ids.count;
    s->input_offsets = mt_realloc(s->input_offsets, (s->count + 2) * 8);
    if (end > r->input_capacity) s->inputs = mt_realloc(s->inputs, (r->input_capacity = 2 * end + 65536) * 4);
    memcpy(s->inputs + first, r->ids.data, (size_t)r->ids.count * 4);
    s->input_offsets[s->count] = first, s->input_offsets[s->count + 1] = end;
}

/* Reads one line as a sample with an input: the decoder begins with token 0, as T5's, and all tokens of the target
 * count. */
static int read_mapping(reader *r, const json_t *object, mt_error *error) {
    const mt_sft_config *c = r->config;
    const char *input_name, *target_name;
    const json_t *input = find_field(object, c->prompt_key, "input", NULL, &input_name);
    const json_t *target = find_field(object, c->response_key, "target", NULL, &target_name);
    int64_t truncated = r->truncated;
    bool drops = false;
    if (!input || !target)
        return mt_error_set(error,
                            "has no \"%s\", but an encoder-decoder learns from an input and a target; name the fields "
                            "with --prompt-key and --response-key",
                            input ? target_name : input_name);
    if (read_side(r, input, input_name, c->input_length, &drops, error) != 0) return -1;
    add_input(r);
    if (read_side(r, target, target_name, c->seq_length, &drops, error) != 0) return -1;
    r->dropped += drops;
    if (drops) r->truncated = truncated;
    if (drops) return 0;
    int64_t count = r->ids.count;
    mt_ids_push(&r->ids, 0);
    memmove(r->ids.data + 1, r->ids.data, (size_t)count * 4);
    r->ids.data[0] = 0, r->turns.count = 0;
    for (int64_t i = 0; i <= count; i++) mt_ids_push(&r->turns, i > 0);
    add_sample(r, count + 1);
    return 0;
}

/* A copy that ends with a 0. */
static char *copy_text(const char *text, int64_t bytes) {
    char *copy = mt_malloc(bytes + 1);
    if (bytes > 0) memcpy(copy, text, (size_t)bytes);
    copy[bytes] = 0;
    return copy;
}

/* The field of the answer: verl's rows and those of ROLL have names of their own. */
static const json_t *find_answer(const reader *r, const json_t *object, const char **name) {
    const char *key = r->config->answer_key;
    const json_t *answer = find_field(object, key, "answer", "ground_truth", name);
    return answer || key ? answer : find_field(object, NULL, "answer", "reward_model.ground_truth", name);
}

/* The answer of a line, a text or a number with the fewest digits that read back as the same. */
static int read_answer(const reader *r, const json_t *object, mt_question *question, mt_error *error) {
    const char *name;
    const json_t *answer = find_answer(r, object, &name);
    char number[40];
    if (!answer && !r->config->needs_answer) return 0;
    if (!answer)
        return mt_error_set(error, "has no \"%s\" for the reward to compare with; name the field with --answer-key",
                            name);
    bool is_good = json_is_string(answer) || json_is_number(answer);
    bool is_wanted = r->config->needs_answer || r->config->answer_key || strcmp(name, "answer") == 0;
    if (!is_good && !is_wanted) return 0; // another program's field, which may be a list
    if (!is_good) return mt_error_set(error, "\"%s\" is neither a text nor a number", name);
    double value = json_number_value(answer);
    bool whole = json_is_number(answer) && value == floor(value);
    if (whole && fabs(value) >= 0x1p53)
        return mt_error_set(error, "\"%s\" is a number of more than 15 digits; write it as a text", name);
    if (whole) question->answer_bytes = snprintf(number, sizeof number, "%.0f", value);
    for (int digits = 15; json_is_number(answer) && !whole && digits <= 17; digits++) {
        question->answer_bytes = snprintf(number, sizeof number, "%.*g", digits, value);
        if (strtod(number, NULL) == value) break;
    }
    if (json_is_string(answer)) question->answer_bytes = (int64_t)json_string_length(answer);
    const char *text = json_is_string(answer) ? json_string_value(answer) : number;
    if (r->config->check_answer && r->config->check_answer(text, question->answer_bytes, error) != 0) return -1;
    question->answer = copy_text(text, question->answer_bytes);
    return 0;
}

/* True if "TAG,TAG=SHARE" lists the tag; "*" is any. */
static bool share_has(const char *share, const char *tag) {
    const char *end = strrchr(share, '=');
    for (const char *at = share; at < end; at += strcspn(at, ",="), at += *at == ',') {
        size_t length = strcspn(at, ",=");
        if (strlen(tag) == length && strncmp(at, tag, length) == 0) return true;
    }
    return false;
}

/* The share that a line belongs to; -1: none. */
static int64_t find_share(const mt_sft_config *c, const json_t *object) {
    const char *tag = json_string_value(json_object_get(object, "domain"));
    if (!tag) tag = json_string_value(json_object_get(object, c->tag_key ? c->tag_key : "tag"));
    for (int64_t i = 0; tag && i < c->shares.count; i++)
        if (share_has(c->shares.items[i], tag)) return i;
    for (int64_t i = 0; i < c->shares.count; i++)
        if (share_has(c->shares.items[i], "*")) return i;
    return c->shares.count > 0 ? -1 : 0;
}

static const char *teacher_key(const mt_sft_config *c) {
    return c->teacher_key ? c->teacher_key : "data_source";
}

/* The teacher of a prompt, by its field; "*" is any other. */
static int find_teacher(const mt_sft_config *c, const json_t *object, int64_t *teacher, mt_error *error) {
    const char *key = json_string_value(json_object_get(object, teacher_key(c)));
    int64_t other = c->teachers.count > 0 ? -1 : 0;
    *teacher = -1;
    for (int64_t i = 0; i < c->teachers.count && *teacher < 0; i++) {
        const char *word = c->teachers.items[i];
        size_t length = strcspn(word, "=");
        if (length == 1 && word[0] == '*') other = i;
        if (key && strlen(key) == length && strncmp(key, word, length) == 0) *teacher = i;
    }
    if (*teacher < 0) *teacher = other;
    if (*teacher >= 0) return 0;
    return mt_error_set(error,
                        "\"%s\" is %s%.100s%s, for which --teachers has no teacher; add one, or *=DIR for all others",
                        teacher_key(c), key ? "\"" : "", key ? key : "missing", key ? "\"" : "");
}

/* The messages of the line, its tools and variables of its template, as a text in JSON. */
static char *copy_conversation(const reader *r) {
    json_t *conversation = json_object(), *messages = json_array();
    for (int64_t i = 0; i < r->num_messages; i++) {
        const mt_chat_message *m = &r->messages[i];
        json_t *message = r->fields[i] ? json_copy(r->fields[i]) : json_object();
        json_object_set_new(message, "role", json_string(m->role));
        json_object_set_new(message, "content", m->content ? json_stringn(m->content, (size_t)m->bytes) : json_null());
        json_array_append_new(messages, message);
    }
    json_object_set_new(conversation, "messages", messages);
    if (r->tools) json_object_set(conversation, "tools", r->tools);
    if (r->settings) json_object_set(conversation, "chat_template_kwargs", r->settings);
    char *text = json_dumps(conversation, JSON_COMPACT);
    json_decref(conversation);
    MT_CHECK(text);
    return text;
}

/* The texts of a message's parts, with image_mark for each picture. */
static char *join_parts(const json_t *fields, int64_t *bytes) {
    const json_t *part;
    mt_text text = {0};
    size_t i;
    json_array_foreach(json_object_get(fields, "content"), i, part) {
        const json_t *words = json_object_get(part, "text");
        if (words)
            mt_text_append(&text, json_string_value(words), (int64_t)json_string_length(words));
        else
            mt_text_append(&text, MT_IMAGE_MARK, (int64_t)strlen(MT_IMAGE_MARK));
    }
    *bytes = text.bytes;
    mt_text_append(&text, "", 1);
    return text.data;
}

/* Reads one line as a prompt. */
static int read_question(reader *r, const json_t *object, mt_error *error) {
    const mt_sft_config *c = r->config;
    const char *name, *prompt_name;
    const json_t *messages = find_messages(r, object, &name);
    const json_t *prompt = find_field(object, c->prompt_key, "prompt", "instruction", &prompt_name);
    mt_samples *s = &r->samples;
    if (!messages && !prompt)
        return mt_error_set(error, "has neither \"%s\" nor \"%s\"; name the field with --messages-key or --prompt-key",
                            name, prompt_name);
    int status = messages ? read_system(r, object, messages, error) : 0;
    if (status == 0)
        status = messages ? read_messages(r, messages, name, NULL, error)
                          : read_prompt(r, prompt, prompt_name, object, error);
    const char *role = r->num_messages > 0 ? r->messages[r->num_messages - 1].role : "";
    if (status == 0 && strcmp(role, "user") != 0 && !(takes_extras(r) && strcmp(role, "tool") == 0))
        return mt_error_set(error, "\"%s\" does not end with a message of the user", messages ? name : prompt_name);
    if (status != 0 || encode_messages(r, true, error) != 0) return -1;
    if (r->ids.count == 0) return mt_error_set(error, "the prompt is empty");
    if (c->conversations && r->images.count > 0)
        return mt_error_set(error, "has pictures, which conversations with --env-command do not have so far; remove "
                                   "the line, or --env-command");
    for (int64_t i = 0; i < r->turns.count; i++) r->turns.data[i] = 0;
    const mt_chat_message *last = &r->messages[r->num_messages - 1];
    mt_question question = {0};
    if (r->ids.count > c->seq_length && c->refuses_long)
        return mt_error_set(error, "has a prompt of %lld tokens, which leaves no room in a context of %lld",
                            (long long)r->ids.count, (long long)c->seq_length + 1);
    question.share = find_share(c, object);
    if (question.share < 0) {
        r->untagged++;
        return 0;
    }
    if (find_teacher(c, object, &question.teacher, error) != 0) return -1;
    if (read_answer(r, object, &question, error) != 0) return -1;
    if (r->ids.count > c->seq_length) {
        free(question.answer);
        r->dropped++;
        return 0;
    }
    question.prompt = last->content ? copy_text(last->content, question.prompt_bytes = last->bytes)
                                    : join_parts(r->fields[r->num_messages - 1], &question.prompt_bytes);
    if (c->conversations) question.conversation = copy_conversation(r);
    add_sample(r, r->ids.count);
    s->questions = mt_realloc(s->questions, r->sample_capacity * (int64_t)sizeof *s->questions);
    s->questions[s->count - 1] = question;
    return 0;
}

/* The tools of a line, a list or its text in JSON, and the further variables of its template. */
static int read_settings(reader *r, const json_t *object, mt_error *error) {
    const json_t *tools = json_object_get(object, "tools"), *settings = json_object_get(object, "chat_template_kwargs");
    json_t *list = json_is_string(tools) ? json_loads(json_string_value(tools), 0, NULL) : json_incref((json_t *)tools);
    bool has_tools = has_value(tools) && !(json_is_array(list) && json_array_size(list) == 0);
    json_decref(r->tools);
    r->tools = has_tools ? json_incref(list) : NULL;
    r->settings = has_value(settings) ? (json_t *)settings : NULL;
    json_decref(list);
    if (!has_tools && !r->settings) return 0;
    if (!takes_extras(r))
        return mt_error_set(error,
                            "has \"%s\", which %s; --chat-template auto takes the template of the tokenizer's folder",
                            has_tools ? "tools" : "chat_template_kwargs",
                            r->chat ? "this template cannot write" : "needs a tokenizer and its template");
    if (has_tools && !json_is_array(r->tools))
        return mt_error_set(error, "\"tools\" is not a list of definitions, or one as a text in JSON");
    if (r->settings && !json_is_object(r->settings))
        return mt_error_set(error, "\"chat_template_kwargs\" is not an object");
    return 0;
}

/* Takes the pictures out of the messages of a line, whose contents become parts; see take_choice_images for pairs. */
static int take_images(reader *r, json_t *object, mt_error *error) {
    const char *name, *prompt_name, *beside = find_beside(r, object);
    if (!r->config->images || r->config->pairs) return 0; // see check_line
    json_t *messages = (json_t *)find_messages(r, object, &name);
    const json_t *prompt = find_field(object, r->config->prompt_key, "prompt", "instruction", &prompt_name);
    if (!messages && json_is_string(prompt)) prompt = list_prompt(r, object);
    if (!messages && json_is_array(prompt)) messages = (json_t *)prompt;
    if (beside && !messages)
        return mt_error_set(error, "has \"%s\" and no \"%s\"; pictures stand in messages, as <image> in a text", beside,
                            name);
    return take_listed_images(r, object, messages, error);
}

/* Fields of a line that would make another sample of it. */
static int check_line(const reader *r, const json_t *object, mt_error *error) {
    static const char *const refused[] = {"functions", "videos", "audios", NULL};
    static const char *const of_tokens[] = {"input_ids", "labels", "loss_mask", "mask"};
    bool trained = true;
    const char *mark, *field = first_with_value(object, refused), *image = find_beside(r, object);
    if (image && !r->config->images)
        return mt_error_set(error, "has \"%s\", which only a model with a vision tower reads; remove it or the line",
                            image);
    for (int i = 0; i < 4 && !field; i++)
        if (json_is_number(json_array_get(json_object_get(object, of_tokens[i]), 0))) field = of_tokens[i];
    if (field) return mt_error_set(error, "has \"%s\", which is not supported; remove it or the line", field);
    if (json_object_get(object, "messages") && has_value(json_object_get(object, "history")))
        return mt_error_set(error,
                            "has \"messages\" and a \"history\", which goes with a prompt; make it messages too");
    if (json_is_false(json_object_get(object, "kto_tag")) || json_is_false(json_object_get(object, "label")))
        return mt_error_set(error, "is marked as unwanted (\"%s\" is false), which is not supported; remove the line",
                            json_is_false(json_object_get(object, "label")) ? "label" : "kto_tag");
    if (read_mark(object, &trained, &mark, error) != 0) return -1;
    return mark && !trained ? mt_error_set(error, "is marked as untrained by \"%s\"; remove the line", mark) : 0;
}

/* True if the field was read: it belongs to the form of the line. */
static bool is_read(const reader *r, const json_t *object, const char *key) {
    const mt_sft_config *c = r->config;
    const char *name, *prompt_name, *response_name, *query_name, *answer_name;
    const json_t *messages = find_messages(r, object, &name);
    const json_t *prompt = find_field(object, c->prompt_key, "prompt", "instruction", &prompt_name);
    find_answer(r, object, &answer_name);
    find_field(object, c->response_key, "response", "output", &response_name);
    find_field(object, c->query_key, "input", NULL, &query_name);
    const char *read[16] = {"system"};
    int count = 1;
    if (c->input_length > 0) {
        find_field(object, c->prompt_key, "input", NULL, &prompt_name);
        find_field(object, c->response_key, "target", NULL, &response_name);
        return strcmp(key, prompt_name) == 0 || strcmp(key, response_name) == 0;
    }
    if (takes_extras(r)) read[count++] = "tools";
    if (takes_extras(r)) read[count++] = "chat_template_kwargs";
    if (c->images && c->image_key) read[count++] = c->image_key;
    if (c->images && !c->image_key) read[count++] = "images", read[count++] = "image";
    if (c->prompts) read[count++] = answer_name;
    if (c->shares.count > 0) read[count++] = "domain", read[count++] = c->tag_key ? c->tag_key : "tag";
    if (c->teachers.count > 0) read[count++] = teacher_key(c);
    if (json_is_array(json_object_get(object, "tokens")) && !c->pairs && !c->prompts) {
        read[0] = "tokens";
    } else if (messages && !c->pairs) {
        read[count++] = name;
        if (prompt && holds_prompt(messages, prompt)) read[count++] = prompt_name;
    } else if (prompt || c->pairs) {
        const char *const more[] = {prompt_name, query_name, "history"};
        for (int i = 0; i < 3; i++) read[count++] = more[i];
        if (!c->pairs && !c->prompts) read[count++] = response_name;
        if (c->pairs) read[count++] = c->chosen_key ? c->chosen_key : "chosen";
        if (c->pairs) read[count++] = c->rejected_key ? c->rejected_key : "rejected";
    } else {
        read[0] = "text";
    }
    size_t length = strlen(key);
    for (int i = 0; i < count; i++) // the key of a field, or of the object that has it
        if (strncmp(read[i], key, length) == 0 && (!read[i][length] || read[i][length] == '.')) return true;
    return false;
}

/* Remembers the names of fields that are not read and hold a text, a list, or a switch that may say what is trained. */
static void note_unread(reader *r, json_t *object) {
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        bool is_switch = json_is_boolean(value) && is_strange_mark(key, value) && strcmp(key, "label") != 0;
        bool holds = has_value(value) && !json_is_number(value) && !json_is_true(value);
        if ((is_switch || holds) && !is_read(r, object, key)) note_field(r, key);
    }
}

/* Messages that are a text in JSON, as in ROLL's files, are made a list. */
static void unpack_messages(const reader *r, json_t *object) {
    const char *name = r->config->messages_key ? r->config->messages_key : "messages";
    const char *text = json_string_value(json_object_get(object, name));
    json_t *list = text && *text == '[' ? json_loads(text, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (json_is_array(list)) json_object_set(object, name, list);
    json_decref(list);
}

static int read_line(reader *r, const char *line, int64_t bytes, mt_error *error) {
    // NUL is an ordinary character. Integers stay ones: templates write those of tools.
    const size_t flags = JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES;
    json_t *object = mt_json_parse(line, bytes, flags, NULL, error);
    if (!object) return -1;
    unpack_messages(r, object);
    int status = check_line(r, object, error);
    if (status == 0) status = take_images(r, object, error);
    if (status == 0) status = read_settings(r, object, error);
    if (status == 0)
        status = r->config->prompts        ? read_question(r, object, error)
                 : r->config->input_length ? read_mapping(r, object, error)
                 : r->config->pairs        ? read_pair(r, object, error)
                                           : read_single(r, object, error);
    if (status == 0) note_unread(r, object);
    remove_messages(r);
    mt_images_cut(&r->images, 0);
    json_decref(object);
    return status;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

/* A bad line is an error, unless it is one of the first skip_bad_samples. */
static int refuse_line(reader *r, const char *path, int64_t number, mt_error *error) {
    mt_error why = *error;
    FILE *log = r->config->log;
    mt_error_set(error, "%s:%lld: %s", path, (long long)number, why.text);
    if (++r->bad > r->config->skip_bad_samples) return -1;
    if (log) fprintf(log, "skipped %s\n", error->text);
    return 0;
}

/* Skips blanks, and counts lines. */
static const char *skip_blanks(const char *text, const char *end, int64_t *line) {
    for (; text < end && strchr(" \t\r\n", *text) && *text; text++) *line += *text == '\n';
    return text;
}

/* The end of the JSON object that begins at `text`, behind its brace, or the end of the file. */
static const char *object_end(const char *text, const char *end) {
    int64_t depth = 0;
    bool quoted = false;
    for (; text < end; text++) {
        if (*text == '"') quoted = !quoted;
        if (quoted && *text == '\\') text++;
        if (quoted) continue;
        depth += (*text == '{') - (*text == '}');
        if (depth == 0) return text + 1;
    }
    return end;
}

/* A file that is one JSON list, from behind its bracket: each object is read like a line. */
static int read_list(reader *r, const char *path, const char *text, const char *end, int64_t line, mt_error *error) {
    const char *problem = NULL;
    for (bool begins = true;; begins = false) {
        text = skip_blanks(text, end, &line);
        if (text < end && *text == ']') {
            text = skip_blanks(text + 1, end, &line);
            if (text < end) problem = "has more than one JSON list";
            break;
        }
        if (!begins && (text == end || *text++ != ',')) problem = "expects , or ] after an object of the JSON list";
        if (!problem) text = skip_blanks(text, end, &line);
        if (!problem && (text == end || *text != '{')) problem = "expects an object in the JSON list";
        if (problem) break;
        const char *next = object_end(text, end);
        if (read_line(r, text, next - text, error) != 0 && refuse_line(r, path, line, error) != 0) return -1;
        for (; text < next; text++) line += *text == '\n';
    }
    return problem ? mt_error_set(error, "%s:%lld: %s", path, (long long)line, problem) : 0;
}

/* A row of a file of Parquet: messages count rows, not lines. */
typedef struct row_reader {
    reader *reader;
    const char *path;
    mt_error *error;
} row_reader;

static int read_row(const char *row, int64_t bytes, int64_t number, void *context) {
    row_reader *rows = context;
    if (read_line(rows->reader, row, bytes, rows->error) == 0) return 0;
    return refuse_line(rows->reader, rows->path, number, rows->error) == 0 ? 0 : 1;
}

static int read_parquet(reader *r, const char *path, mt_error *error) {
    row_reader rows = {r, path, error};
    char *columns;
    int status = mt_parquet_read(path, &columns, read_row, &rows, error);
    mt_error why = *error;
    if (status > 0) mt_error_set(error, "%.1500s; the file has the columns %.400s", why.text, columns);
    free(columns);
    return status == 0 ? 0 : -1;
}

static int read_file(reader *r, const char *path, mt_error *error) {
    mt_mapping file;
    int64_t first_line = 1;
    char *behind;
    bool is_number = strtod(path, &behind) >= 0 && behind > path && *behind == 0;
    if (is_number && access(path, F_OK) != 0)
        return mt_error_set(
            error,
            "%s: is a weight, which only indexed datasets have; name the files of samples alone; each is "
            "read whole",
            path);
    int status = mt_mapping_open(&file, path, error);
    if (status == 0 && mt_is_parquet(path, file.bytes, file.size)) {
        mt_mapping_close(&file);
        return read_parquet(r, path, error);
    }
    const char *text = (const char *)file.bytes, *end = text ? text + file.size : NULL;
    if (text) text += mt_text_mark_bytes(text, end);
    const char *first = text ? skip_blanks(text, end, &first_line) : NULL;
    if (first < end && *first == '[') {
        status = read_list(r, path, first + 1, end, first_line, error);
        text = end;
    }
    for (int64_t number = 1; status == 0 && text < end; number++) {
        const char *next = mt_text_document_end(MT_TEXT_JSONL, text, end);
        if (!next) next = end;
        if (!mt_text_is_blank(text, next - text) && read_line(r, text, next - text, error) != 0)
            status = refuse_line(r, path, number, error);
        text = next;
    }
    mt_mapping_close(&file);
    return status;
}

static void print_summary(const reader *r) {
    FILE *log = r->config->log;
    const mt_samples *s = &r->samples;
    if (!log) return;
    fprintf(log, "%s%s: %lld %s, %lld tokens", r->config->paths.items[0],
            r->config->paths.count > 1 ? " and others" : "", (long long)s->count,
            r->config->prompts ? "prompts" : "samples", (long long)s->offsets[s->count]);
    if (r->config->prompts)
        fprintf(log, "; the longest has %lld", (long long)r->longest + 1);
    else
        fprintf(log, ", the loss counts %lld; the longest takes %lld positions", (long long)r->trained,
                (long long)r->longest);
    if (s->images.count > 0) fprintf(log, "; %lld pictures", (long long)s->images.count);
    if (r->truncated > 0) fprintf(log, "; %lld were truncated to --seq-length", (long long)r->truncated);
    if (r->dropped > 0) fprintf(log, "; %lld are too long and left out", (long long)r->dropped);
    if (r->untagged > 0) fprintf(log, "; %lld have tags of no share and are left out", (long long)r->untagged);
    if (r->equal_pairs > 0)
        fprintf(log, "; %lld pairs are left out, whose responses are the same once truncated",
                (long long)r->equal_pairs);
    if (r->bad > 0) fprintf(log, "; %lld bad lines are left out", (long long)r->bad);
    fprintf(log, "\n");
    if (r->repeated_prompts > 0)
        fprintf(log,
                "warning: both responses begin with the whole prompt in %lld pairs, so that it is written twice; leave "
                "it out of the responses\n",
                (long long)r->repeated_prompts);
    for (int64_t at = 0; at < r->unread.bytes; at += (int64_t)strlen(r->unread.data + at) + 1)
        fprintf(log, "%s\"%s\"",
                at > 0 ? ", " : "note: fields of the lines or their messages that are not read: ", r->unread.data + at);
    if (r->unread.bytes > 0) fprintf(log, "\n");
}

static int check_count(const reader *r, mt_error *error) {
    for (int64_t share = 0; share < r->config->shares.count; share++) {
        bool found = false;
        for (int64_t i = 0; i < r->samples.count && !found; i++) found = r->samples.questions[i].share == share;
        if (!found)
            return mt_error_set(error,
                                "%s: has no prompt for the share %.200s of --prompt-shares; the field of tags is "
                                "--tag-key %.80s",
                                r->config->paths.items[0], r->config->shares.items[share],
                                r->config->tag_key ? r->config->tag_key : "tag");
    }
    if (r->samples.count > 0) return 0;
    if (r->config->prompts && r->dropped > 0)
        return mt_error_set(error, "%s: has no prompts of at most %lld tokens, which the sequence length leaves them",
                            r->config->paths.items[0], (long long)r->config->seq_length);
    const char *why = "; check the path";
    if (r->dropped > 0) why = ": none has a token that the loss counts within --seq-length; raise it";
    if (r->dropped > 0 && r->config->long_samples == MT_LONG_DROP)
        why = ": all are longer than --seq-length; raise it, or give --long-samples truncate";
    if (r->equal_pairs > 0)
        why = ": responses are the same once truncated to --seq-length; raise it, or give --long-samples drop";
    return mt_error_set(error, "%s: has no samples%s", r->config->paths.items[0], why);
}

int mt_samples_read(mt_samples *samples, const mt_sft_config *config, const mt_tokenizer *tokenizer, mt_error *error) {
    reader r = {.config = config, .tokenizer = tokenizer, .samples.pairs = config->pairs};
    *samples = (mt_samples){0};
    bool chats = tokenizer && config->input_length == 0; // pairs are texts alone
    int status = chats ? mt_chat_open(&r.chat, config->chat_template, tokenizer, config->tokenizer_path, error) : 0;
    if (status == 0 && r.chat) status = mt_chat_set_variables(r.chat, config->chat_template_kwargs, error);
    if (!tokenizer && config->chat_template_kwargs)
        status = mt_error_set(error, "--chat-template-kwargs needs a tokenizer whose folder has a chat template");
    if (config->images) r.samples.image_config = config->images->config;
    for (int64_t i = 0; i < config->paths.count && status == 0; i++) {
        char *folder = mt_path_folder(config->paths.items[i]);
        r.folder = config->image_folder ? config->image_folder : folder;
        status = read_file(&r, config->paths.items[i], error);
        free(folder);
    }
    r.samples.input_length = config->input_length, r.samples.target_length = config->seq_length;
    if (status == 0) status = check_count(&r, error);
    if (status == 0) print_summary(&r);
    if (status != 0) mt_samples_free(&r.samples);
    *samples = r.samples;
    mt_chat_close(r.chat);
    remove_messages(&r);
    json_decref(r.tools);
    free(r.messages);
    free(r.untrained);
    free(r.fields);
    free(r.unread.data);
    free(r.joined.data);
    free(r.ids.data);
    free(r.turns.data);
    return status;
}
