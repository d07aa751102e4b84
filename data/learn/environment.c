/* environment.c: conversations of the model with a program of the user's. */
#include "environment.h"

#include "../tokens/chat.h"
#include "../tokens/response.h"
#include "../tokens/tokenizer_vocab.h"
#include "line_command.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MT_LONGEST_ENV_LINE = 1 << 26 }; // bytes

/* A conversation that goes on. */
typedef struct conversation {
    json_t *messages;          // all
    json_t *tools, *variables; // of its template; NULL: none
    bool *is_written;          // [messages]: by the model
    mt_ids before;             // tokens up to its last response, by its template; none: not yet known
    const mt_question *question;
} conversation;

struct mt_environment {
    mt_line_command command;
    mt_chat *chat;
    const mt_tokenizer *tokenizer;
    conversation *conversations; // [count]
    int64_t count, first_id;
    /* of a step */
    mt_env_turn *turns; // that are asked
    json_t **answers;   // of each: messages to append; NULL: not yet answered
};

int mt_environment_open(mt_environment **out, const mt_environment_config *c, mt_error *error) {
    mt_environment *e = mt_calloc(sizeof *e);
    e->tokenizer = c->tokenizer, e->command.child = (mt_child){0, -1, -1};
    *out = NULL;
    int status = mt_chat_open(&e->chat, c->chat_template, c->tokenizer, c->tokenizer_path, error);
    if (status == 0) status = mt_chat_set_variables(e->chat, c->chat_template_kwargs, error);
    if (status == 0) status = mt_chat_prepare(e->chat, error);
    if (status == 0) status = mt_line_command_open(&e->command, "environment", c->command, c->seconds, error);
    if (status == 0)
        *out = e;
    else
        mt_environment_close(e);
    return status;
}

static void end_conversations(mt_environment *e) {
    for (int64_t i = 0; i < e->count; i++) {
        conversation *c = &e->conversations[i];
        json_decref(c->messages), json_decref(c->tools), json_decref(c->variables);
        free(c->is_written), free(c->before.data);
    }
    free(e->conversations);
    e->conversations = NULL, e->count = 0;
}

void mt_environment_close(mt_environment *e) {
    if (!e) return;
    end_conversations(e);
    mt_line_command_close(&e->command);
    mt_chat_close(e->chat);
    free(e);
}

int32_t mt_environment_end(const mt_environment *e) {
    return mt_chat_end(e->chat);
}

void mt_environment_begin(mt_environment *e, int64_t first_id, const mt_question *const *questions, int64_t count) {
    end_conversations(e);
    e->conversations = mt_calloc(mt_max(count, 1) * (int64_t)sizeof *e->conversations);
    e->count = count, e->first_id = first_id;
    for (int64_t i = 0; i < count; i++) {
        conversation *c = &e->conversations[i];
        json_t *whole = json_loads(questions[i]->conversation, JSON_ALLOW_NUL, NULL);
        MT_CHECK(whole);
        c->question = questions[i];
        c->messages = json_incref(json_object_get(whole, "messages"));
        c->tools = json_incref(json_object_get(whole, "tools"));
        c->variables = json_incref(json_object_get(whole, "chat_template_kwargs"));
        c->is_written = mt_calloc((int64_t)json_array_size(c->messages) + 1);
        json_decref(whole);
    }
}

static void append_message(conversation *c, json_t *message, bool is_written) {
    int64_t count = (int64_t)json_array_size(c->messages);
    c->is_written = mt_realloc(c->is_written, count + 1);
    c->is_written[count] = is_written;
    json_array_append(c->messages, message);
}

/* ---- tokens of messages ----------------------------------------------------------------------------------------- */

/* The tokens of the first `count` messages by the template, with a short text for each of the model's responses. */
static int encode(mt_environment *e, const conversation *c, int64_t count, bool generates, mt_ids *ids, mt_ids *turns,
                  mt_error *error) {
    mt_chat_message *messages = mt_calloc(count * (int64_t)sizeof *messages);
    json_t **fields = mt_calloc(count * (int64_t)sizeof *fields);
    const mt_chat_extras extras = {c->tools, c->variables, (const json_t *const *)fields};
    for (int64_t i = 0; i < count; i++) {
        const json_t *message = json_array_get(c->messages, (size_t)i);
        const json_t *content = json_object_get(message, "content");
        messages[i] = (mt_chat_message){json_string_value(json_object_get(message, "role")), json_string_value(content),
                                        (int64_t)json_string_length(content)};
        if (c->is_written[i]) messages[i] = (mt_chat_message){"assistant", "x", 1};
        json_t *others = json_copy((json_t *)message);
        json_object_del(others, "role"), json_object_del(others, "content");
        if (json_object_size(others) > 0)
            fields[i] = others;
        else
            json_decref(others);
    }
    mt_chat_set_extras(e->chat, &extras);
    int status = mt_chat_encode(e->chat, messages, count, generates, ids, turns, error);
    mt_chat_set_extras(e->chat, NULL);
    for (int64_t i = 0; i < count; i++) json_decref(fields[i]);
    free(messages), free(fields);
    return status;
}

/* next = the tokens between the last response of the model, message `written`, and the next one. The template marks
 * responses in a whole conversation, and writes the header of the next one where it generates; up to the end of the
 * response both texts must agree, and up to its beginning they must be what the model has read. */
static int find_next(mt_environment *e, conversation *c, int64_t written, mt_ids *next, mt_error *error) {
    mt_ids whole = {0}, turns = {0}, begun = {0}, unused = {0};
    int64_t count = (int64_t)json_array_size(c->messages), begin = 0, end = 0;
    int status = c->before.count > 0 ? 0 : encode(e, c, written, true, &c->before, &unused, error);
    unused.count = 0;
    if (status == 0) status = encode(e, c, count, false, &whole, &turns, error);
    if (status == 0) status = encode(e, c, count, true, &begun, &unused, error);
    if (status == 0) {
        for (int64_t i = 0; i < turns.count; i++)
            if (turns.data[i] == written) end = i + 1;
        while (begin < end && turns.data[begin] != written) begin++;
        bool agrees = end > 0 && end <= begun.count && memcmp(whole.data, begun.data, (size_t)end * 4) == 0;
        if (!agrees || whole.data[end - 1] != mt_chat_end(e->chat))
            status = mt_error_set(error, "the chat template does not say where a response ends that messages follow");
        else if (begin != c->before.count || memcmp(whole.data, c->before.data, (size_t)begin * 4) != 0)
            status = mt_error_set(error, "the chat template writes the messages before them in another way then");
        else if (end == begun.count)
            status = mt_error_set(error, "the chat template writes no token for them");
        for (int64_t i = end; i < begun.count && status == 0; i++) mt_ids_push(next, begun.data[i]);
    }
    free(c->before.data);
    c->before = begun;
    free(whole.data), free(turns.data), free(unused.data);
    return status;
}

/* ---- lines ------------------------------------------------------------------------------------------------------ */

/* The text of a response, without special tokens; a token without a text is U+FFFD. */
static void append_response(const mt_environment *e, const mt_env_turn *turn, mt_text *text) {
    mt_error ignored;
    mt_decoder *decoder = mt_decoder_open(e->tokenizer);
    for (int64_t i = 0; i < turn->count; i++) {
        if (mt_tokenizer_is_special(e->tokenizer, turn->tokens[i])) continue;
        if (mt_decode_next(decoder, turn->tokens[i], text, &ignored) != 0) mt_text_append(text, "\xEF\xBF\xBD", 3);
    }
    mt_decode_end(decoder, text);
    mt_decoder_close(decoder);
}

static void add_response(mt_environment *e, const mt_env_turn *turn) {
    mt_text text = {0}, repaired = {0};
    append_response(e, turn, &text);
    mt_utf8_repair(&repaired, text.bytes > 0 ? text.data : "", text.bytes);
    json_t *message = json_object();
    json_object_set_new(message, "role", json_string("assistant"));
    json_object_set_new(message, "content",
                        json_stringn(repaired.bytes > 0 ? repaired.data : "", (size_t)repaired.bytes));
    append_message(&e->conversations[turn->conversation], message, true);
    json_decref(message);
    free(text.data), free(repaired.data);
}

static void write_turn(void *context, int64_t i) {
    mt_environment *e = context;
    const mt_env_turn *turn = &e->turns[i];
    const conversation *c = &e->conversations[turn->conversation];
    mt_text *to = &e->command.request;
    char number[64];
    char *messages = json_dumps(c->messages, JSON_COMPACT);
    MT_CHECK(messages);
    snprintf(number, sizeof number, "{\"id\": %lld, \"messages\": ", (long long)(e->first_id + turn->conversation));
    mt_text_append(to, number, (int64_t)strlen(number));
    mt_text_append(to, messages, (int64_t)strlen(messages));
    mt_text_append(to, ", \"answer\": ", 12);
    if (c->question->answer)
        mt_line_command_append_string(&e->command, c->question->answer, c->question->answer_bytes);
    else
        mt_text_append(to, "null", 4);
    snprintf(number, sizeof number, ", \"turns_left\": %lld}\n", (long long)turn->turns_left);
    mt_text_append(to, number, (int64_t)strlen(number));
    free(messages);
}

/* An error about the line that was read last. */
static int refuse_line(const mt_environment *e, const char *why, const char *line, int64_t bytes, mt_error *error) {
    while (bytes > 0 && line[bytes - 1] == '\r') bytes--;
    mt_text repaired = {0};
    mt_utf8_repair(&repaired, line, mt_min(bytes, 80));
    for (int64_t i = 0; i < repaired.bytes; i++)
        if ((unsigned char)repaired.data[i] < 32) repaired.data[i] = ' ';
    int status = mt_error_set(error, "the environment \"%s\" wrote \"%.*s%s\" as line %lld of its output, %s",
                              e->command.text, (int)repaired.bytes, repaired.bytes > 0 ? repaired.data : "",
                              bytes > 80 ? "..." : "", (long long)e->command.lines, why);
    free(repaired.data);
    return status;
}

/* The first of `count` turns that are asked whose id this is; -1: none. */
static int64_t find_turn(const mt_environment *e, const json_t *id, int64_t count) {
    if (!json_is_integer(id)) return -1;
    int64_t conversation = json_integer_value(id) - e->first_id, first = 0, end = count;
    while (first < end) {
        int64_t middle = first + (end - first) / 2;
        if (e->turns[middle].conversation < conversation)
            first = middle + 1;
        else
            end = middle;
    }
    return first < count && e->turns[first].conversation == conversation ? first : -1;
}

/* NULL, or what is wrong with messages to append. */
static const char *check_messages(const json_t *messages) {
    size_t i;
    const json_t *message;
    json_array_foreach(messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        if (!role || !json_is_string(json_object_get(message, "content")))
            return "where a message has no text as \"role\" and as \"content\"";
        if (strcmp(role, "assistant") == 0) return "with a message of the assistant, which the model alone writes";
    }
    return NULL;
}

/* Takes an answer. */
static int read_turn(void *context, int64_t number, int64_t sent, const char *line, int64_t bytes, mt_error *error) {
    static const double largest = 1e30; // as of other rewards
    mt_environment *e = context;
    (void)number;
    if (bytes > MT_LONGEST_ENV_LINE) return refuse_line(e, "which is too long", line, bytes, error);
    json_t *answer = json_loadb(line, (size_t)bytes, JSON_REJECT_DUPLICATES, NULL);
    const json_t *messages = json_object_get(answer, "messages"), *reward = json_object_get(answer, "reward");
    const json_t *done = json_object_get(answer, "done");
    int64_t i = find_turn(e, json_object_get(answer, "id"), sent);
    bool goes_on = i >= 0 && e->turns[i].turns_left > 0 && !json_is_true(done);
    const char *why = NULL;
    if (!json_is_object(answer))
        why = "which is no object of JSON; it must write one a line, and other messages to standard error";
    else if (i < 0)
        why = "whose \"id\" is none of this turn";
    else if (e->answers[i])
        why = "whose \"id\" it had answered before";
    else if (reward && !(json_is_number(reward) && fabs(json_number_value(reward)) <= largest))
        why = "whose \"reward\" is no number of at most 1e30 in size";
    else if (done && !json_is_boolean(done))
        why = "whose \"done\" is neither true nor false";
    else if (messages && !json_is_array(messages))
        why = "whose \"messages\" are no list";
    else if (goes_on && json_array_size(messages) == 0)
        why = "which has neither messages to append nor \"done\": true";
    else
        why = check_messages(messages);
    if (!why) {
        e->turns[i].reward = json_number_value(reward);
        e->answers[i] = goes_on ? json_incref((json_t *)messages) : json_array();
    }
    json_decref(answer);
    return why ? refuse_line(e, why, line, bytes, error) : 0;
}

/* Appends the environment's messages and finds the tokens that follow. */
static int take_answer(mt_environment *e, int64_t i, mt_error *error) {
    mt_env_turn *turn = &e->turns[i];
    conversation *c = &e->conversations[turn->conversation];
    int64_t written = (int64_t)json_array_size(c->messages) - 1;
    size_t k;
    json_t *message;
    mt_error why;
    if (json_array_size(e->answers[i]) == 0) return 0;
    json_array_foreach(e->answers[i], k, message) append_message(c, message, false);
    if (find_next(e, c, written, &turn->next, &why) == 0) return 0;
    return mt_error_set(error,
                        "the environment \"%s\" answered conversation %lld with messages that cannot be written: %s",
                        e->command.text, (long long)(e->first_id + turn->conversation), why.text);
}

int mt_environment_step(mt_environment *e, mt_env_turn *turns, int64_t count, mt_error *error) {
    mt_line_exchange exchange = {.count = count,
                                 .requests = "responses",
                                 .answer = "one line",
                                 .longest = MT_LONGEST_ENV_LINE,
                                 .context = e,
                                 .write = write_turn,
                                 .read = read_turn};
    e->turns = turns;
    e->answers = mt_calloc(mt_max(count, 1) * (int64_t)sizeof *e->answers);
    for (int64_t i = 0; i < count; i++) {
        turns[i].reward = 0, turns[i].next = (mt_ids){0};
        add_response(e, &turns[i]);
    }
    int status = mt_line_command_exchange(&e->command, &exchange, error);
    for (int64_t i = 0; i < count && status == 0; i++) status = take_answer(e, i, error);
    for (int64_t i = 0; i < count; i++) json_decref(e->answers[i]);
    free(e->answers);
    e->answers = NULL, e->turns = NULL;
    return status == MT_LINE_COMMAND_STOPPED ? MT_ENVIRONMENT_STOPPED : status;
}
