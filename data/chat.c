/* chat.c: chat templates: a conversation as the tokens that a model was trained on. */
#include "chat.h"

#include "file.h"
#include "prompts.h"
#include "tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_TOKENS = 6 };

/* A template: its option value and the special tokens that it needs. The last one ends a response. */
typedef struct template_row {
    const char *name;
    const char *tokens[MAX_TOKENS];
} template_row;

#define DEEPSEEK(name) "<\xEF\xBD\x9C" name "\xEF\xBD\x9C>" // in fullwidth bars

static const template_row rows[] = {
    [MT_CHAT_AUTO] = {"auto", {0}},
    [MT_CHAT_CHATML] = {"chatml", {"<|im_start|>", "<|im_end|>"}},
    [MT_CHAT_QWEN2_5] = {"qwen2_5", {"<|im_start|>", "<|im_end|>"}},
    [MT_CHAT_QWEN3] = {"qwen3", {"<|im_start|>", "<|im_end|>"}},
    [MT_CHAT_LLAMA3] = {"llama3", {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}},
    [MT_CHAT_MISTRAL] = {"mistral", {"<s>", "[INST]", "[/INST]", "</s>"}},
    [MT_CHAT_DEEPSEEK3] = {"deepseek3",
                           {DEEPSEEK("begin\xE2\x96\x81of\xE2\x96\x81sentence"), DEEPSEEK("User"),
                            DEEPSEEK("Assistant"), DEEPSEEK("end\xE2\x96\x81of\xE2\x96\x81sentence")}},
    [MT_CHAT_PLAIN] = {"plain", {0}},
};

/* ---- rendering -----------------------------------------------------------------------------------------------------
 */

static void append(mt_chat_text *out, mt_chat_kind kind, int32_t turn, const char *text, int64_t bytes) {
    if (kind == MT_CHAT_TEXT && bytes == 0) return;
    if (out->count == out->capacity) {
        out->capacity = 2 * out->capacity + 16;
        out->parts = mt_realloc(out->parts, out->capacity * (int64_t)sizeof *out->parts);
    }
    mt_text_append(&out->text, text, bytes);
    out->parts[out->count++] = (mt_chat_part){kind, out->text.bytes, turn};
}

static void append_text(mt_chat_text *out, int32_t turn, const char *text) {
    append(out, MT_CHAT_TEXT, turn, text, (int64_t)strlen(text));
}

static void append_token(mt_chat_text *out, int32_t turn, const char *token) {
    append(out, MT_CHAT_TOKEN, turn, token, (int64_t)strlen(token));
}

/* A text inside another. */
typedef struct slice {
    const char *text;
    int64_t bytes;
} slice;

static slice content_of(const mt_chat_message *message) {
    return (slice){message->content, message->bytes};
}

static void append_slice(mt_chat_text *out, int32_t turn, slice s) {
    append(out, MT_CHAT_TEXT, turn, s.text, s.bytes);
}

/* Python's str.strip(): Unicode's white space and the separators U+001C to U+001F. */
static bool is_stripped(uint32_t c) {
    return mt_is_white_space(c) || (c >= 0x1C && c <= 0x1F);
}

static slice strip(slice s) {
    uint32_t c;
    for (int length; s.bytes > 0 && (length = mt_utf8_decode(s.text, s.bytes, &c)) > 0 && is_stripped(c);)
        s.text += length, s.bytes -= length;
    while (s.bytes > 0) {
        int64_t at = s.bytes - 1;
        while (at > 0 && ((unsigned char)s.text[at] & 0xC0) == 0x80) at--;
        if (mt_utf8_decode(s.text + at, s.bytes - at, &c) == 0 || !is_stripped(c)) break;
        s.bytes = at;
    }
    return s;
}

static slice strip_newlines(slice s, bool left, bool right) {
    for (; left && s.bytes > 0 && *s.text == '\n'; s.text++) s.bytes--;
    while (right && s.bytes > 0 && s.text[s.bytes - 1] == '\n') s.bytes--;
    return s;
}

/* The first place of `mark` in `s`, or with `last` the last one; -1: none. */
static int64_t find(slice s, const char *mark, bool last) {
    int64_t length = (int64_t)strlen(mark), found = -1;
    for (int64_t i = 0; i + length <= s.bytes && (found < 0 || last); i++)
        if (memcmp(s.text + i, mark, (size_t)length) == 0) found = i;
    return found;
}

static slice before(slice s, int64_t at) {
    return (slice){s.text, at};
}

static slice after(slice s, int64_t at) {
    return (slice){s.text + at, s.bytes - at};
}

static bool is_role(const mt_chat_message *message, const char *role) {
    return strcmp(message->role, role) == 0;
}

/* "<|im_start|>ROLE\n". */
static void open_chatml(mt_chat_text *out, const char *role) {
    append_token(out, -1, "<|im_start|>");
    append_text(out, -1, role);
    append_text(out, -1, "\n");
}

static void close_chatml(mt_chat_text *out, int32_t turn) {
    append_token(out, turn, "<|im_end|>");
    append_text(out, -1, "\n");
}

static void render_chatml(mt_chat_text *out, mt_chat_template template, const mt_chat_message *messages, int64_t count,
                          bool generates) {
    if (template == MT_CHAT_QWEN2_5 && (count == 0 || !is_role(&messages[0], "system"))) {
        open_chatml(out, "system");
        append_text(out, -1, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
        close_chatml(out, -1);
    }
    for (int64_t i = 0; i < count; i++) {
        int32_t turn = is_role(&messages[i], "assistant") ? (int32_t)i : -1;
        open_chatml(out, messages[i].role);
        append_slice(out, turn, content_of(&messages[i]));
        close_chatml(out, turn);
    }
    if (generates) open_chatml(out, "assistant");
}

/* The last message of the user that is not a tool's response; without one, the last message. */
static int64_t last_question(const mt_chat_message *messages, int64_t count) {
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    const int64_t open_bytes = sizeof open - 1, close_bytes = sizeof close - 1;
    for (int64_t i = count - 1; i >= 0; i--) {
        slice s = content_of(&messages[i]);
        bool is_tool = s.bytes >= open_bytes && s.bytes >= close_bytes &&
                       memcmp(s.text, open, (size_t)open_bytes) == 0 &&
                       memcmp(s.text + s.bytes - close_bytes, close, (size_t)close_bytes) == 0;
        if (is_role(&messages[i], "user") && !is_tool) return i;
    }
    return count - 1;
}

/* A response of Qwen3: its thoughts are kept only after the last question, and written there even if empty. */
static void append_qwen3_response(mt_chat_text *out, int32_t turn, slice s, bool is_last, bool thinks) {
    slice thoughts = {"", 0};
    int64_t first = find(s, "</think>", false);
    if (first >= 0) {
        thoughts = strip_newlines(before(s, first), false, true);
        int64_t open = find(thoughts, "<think>", true);
        if (open >= 0) thoughts = after(thoughts, open + 7);
        thoughts = strip_newlines(thoughts, true, false);
        s = strip_newlines(after(s, find(s, "</think>", true) + 8), true, false);
    }
    if (thinks && (is_last || thoughts.bytes > 0)) {
        append_text(out, turn, "<think>\n");
        append_slice(out, turn, strip_newlines(thoughts, true, true));
        append_text(out, turn, "\n</think>\n\n");
        s = strip_newlines(s, true, false);
    }
    append_slice(out, turn, s);
}

static void render_qwen3(mt_chat_text *out, const mt_chat_message *messages, int64_t count, bool generates) {
    int64_t question = last_question(messages, count);
    for (int64_t i = 0; i < count; i++) {
        int32_t turn = is_role(&messages[i], "assistant") ? (int32_t)i : -1;
        open_chatml(out, messages[i].role);
        if (turn < 0)
            append_slice(out, -1, content_of(&messages[i]));
        else
            append_qwen3_response(out, turn, content_of(&messages[i]), i == count - 1, i > question);
        close_chatml(out, turn);
    }
    if (generates) open_chatml(out, "assistant");
}

static void open_llama3(mt_chat_text *out, const char *role) {
    append_token(out, -1, "<|start_header_id|>");
    append_text(out, -1, role);
    append_token(out, -1, "<|end_header_id|>");
    append_text(out, -1, "\n\n");
}

static void render_llama3(mt_chat_text *out, const mt_chat_message *messages, int64_t count, bool generates) {
    append_token(out, -1, "<|begin_of_text|>");
    for (int64_t i = 0; i < count; i++) {
        int32_t turn = is_role(&messages[i], "assistant") ? (int32_t)i : -1;
        open_llama3(out, messages[i].role);
        append_slice(out, turn, strip(content_of(&messages[i])));
        append_token(out, turn, "<|eot_id|>");
    }
    if (generates) open_llama3(out, "assistant");
}

static void render_mistral(mt_chat_text *out, const mt_chat_message *messages, int64_t count) {
    int64_t last = count - 1;
    while (last > 0 && !is_role(&messages[last], "user")) last--;
    append_token(out, -1, "<s>");
    for (int64_t i = is_role(&messages[0], "system"); i < count; i++) {
        if (is_role(&messages[i], "user")) {
            append_token(out, -1, "[INST]");
            append_text(out, -1, " ");
            if (i == last && is_role(&messages[0], "system")) {
                append_slice(out, -1, content_of(&messages[0]));
                append_text(out, -1, "\n\n");
            }
            append_slice(out, -1, content_of(&messages[i]));
            append_token(out, -1, "[/INST]");
        } else {
            append_text(out, (int32_t)i, " ");
            append_slice(out, (int32_t)i, strip(content_of(&messages[i])));
            append_token(out, (int32_t)i, "</s>");
        }
    }
}

static void render_deepseek3(mt_chat_text *out, const mt_chat_message *messages, int64_t count, bool generates) {
    const char *const *tokens = rows[MT_CHAT_DEEPSEEK3].tokens;
    append_token(out, -1, tokens[0]);
    for (int64_t i = 0; i < count; i++) {
        int32_t turn = is_role(&messages[i], "assistant") ? (int32_t)i : -1;
        if (!is_role(&messages[i], "system")) append_token(out, -1, tokens[turn < 0 ? 1 : 2]);
        append_slice(out, turn, content_of(&messages[i]));
        if (turn >= 0) append_token(out, turn, tokens[3]);
    }
    if (generates) append_token(out, -1, tokens[2]);
}

static void render_plain(mt_chat_text *out, const mt_chat_message *messages, int64_t count) {
    append(out, MT_CHAT_BEGIN, -1, "", 0);
    for (int64_t i = 0; i < count; i++) {
        int32_t turn = is_role(&messages[i], "assistant") ? (int32_t)i : -1;
        append_slice(out, turn, content_of(&messages[i]));
        if (turn >= 0) append(out, MT_CHAT_END, turn, "", 0);
    }
}

static int check_roles(mt_chat_template template, const mt_chat_message *messages, int64_t count, mt_error *error) {
    int64_t first = count > 0 && is_role(&messages[0], "system");
    if (count == first) return mt_error_set(error, "the conversation has no message of a user or an assistant");
    for (int64_t i = first; i < count; i++) {
        if (is_role(&messages[i], "system"))
            return mt_error_set(error, "message %lld has the role system, which only the first may have",
                                (long long)i + 1);
        if (!is_role(&messages[i], "user") && !is_role(&messages[i], "assistant"))
            return mt_error_set(error, "message %lld has the role \"%.40s\", which is not system, user or assistant",
                                (long long)i + 1, messages[i].role);
        if (template == MT_CHAT_MISTRAL && is_role(&messages[i], "user") != ((i - first) % 2 == 0))
            return mt_error_set(error, "message %lld: in the template mistral, user and assistant take turns",
                                (long long)i + 1);
    }
    return 0;
}

int mt_chat_render(mt_chat_text *out, mt_chat_template kind, const mt_chat_message *messages, int64_t count,
                   bool generates, mt_error *error) {
    out->text.bytes = out->count = 0;
    mt_text_reserve(&out->text, 1); // empty texts have an address too
    if (check_roles(kind, messages, count, error) != 0) return -1;
    switch (kind) {
    case MT_CHAT_QWEN3:
        render_qwen3(out, messages, count, generates);
        break;
    case MT_CHAT_LLAMA3:
        render_llama3(out, messages, count, generates);
        break;
    case MT_CHAT_MISTRAL:
        render_mistral(out, messages, count);
        break; // [/INST] opens the response
    case MT_CHAT_DEEPSEEK3:
        render_deepseek3(out, messages, count, generates);
        break;
    case MT_CHAT_PLAIN:
        render_plain(out, messages, count);
        break;
    default:
        render_chatml(out, kind, messages, count, generates);
    }
    return 0;
}

void mt_chat_text_free(mt_chat_text *text) {
    free(text->text.data);
    free(text->parts);
    *text = (mt_chat_text){0};
}

/* ---- the template of a model ----------------------------------------------------------------------------------------
 */

/* A template of transformers is a program in Jinja. It is recognised by texts that it has, and by texts of its
 * relatives that it lacks. */
static const struct {
    mt_chat_template template;
    const char *has[3], *lacks[3];
} known[] = {
    {MT_CHAT_QWEN3, {"<|im_start|>", "last_query_index", "enable_thinking is false"}, {0}},
    {MT_CHAT_QWEN2_5,
     {"<|im_start|>", "system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
     {0}},
    {MT_CHAT_CHATML, {"<|im_start|>", "<|im_end|>"}, {"think>", "You are", "tools"}},
    {MT_CHAT_LLAMA3, {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}, {"Cutting Knowledge", "tools"}},
    {MT_CHAT_MISTRAL, {"\"[INST] \"", "\"[/INST]\"", "[AVAILABLE_TOOLS] ["}, {"SYSTEM_PROMPT", "<<SYS>>"}},
    {MT_CHAT_DEEPSEEK3, {DEEPSEEK("User"), DEEPSEEK("Assistant"), "is_first_sp"}, {"think>"}},
};

mt_chat_template mt_chat_recognise(const char *jinja) {
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        bool fits = true;
        for (int i = 0; i < 3; i++) {
            fits = fits && (!known[k].has[i] || strstr(jinja, known[k].has[i]));
            fits = fits && (!known[k].lacks[i] || !strstr(jinja, known[k].lacks[i]));
        }
        if (fits) return known[k].template;
    }
    return MT_CHAT_AUTO;
}

/* Reads the chat template of a folder, to free: chat_template.jinja, or else the one in tokenizer_config.json, where
 * several may have names. NULL without error: the folder has none. */
static int read_jinja(char **jinja, const char *folder, mt_error *error) {
    int64_t bytes;
    int status = 0;
    const char *name = mt_folder_has(folder, "chat_template.jinja") ? "chat_template.jinja" : "tokenizer_config.json";
    char *path = mt_path_join(folder, name);
    *jinja = NULL;
    if (strcmp(name, "chat_template.jinja") == 0) {
        *jinja = mt_file_read(path, 1 << 24, &bytes, error);
        status = *jinja ? 0 : -1;
    } else if (mt_folder_has(folder, name)) {
        json_t *config = mt_json_read(path, error), *item;
        const json_t *field = json_object_get(config, "chat_template"), *found = field;
        size_t i;
        json_array_foreach(field, i, item) {
            const char *title = json_string_value(json_object_get(item, "name"));
            if (title && strcmp(title, "default") == 0) found = json_object_get(item, "template");
        }
        if (json_is_string(found)) *jinja = mt_strdup(json_string_value(found));
        status = config ? 0 : -1;
        json_decref(config);
    }
    free(path);
    return status;
}

/* Sets `template` to that of the tokenizer at `path`, a file or a folder. */
static int find_template(mt_chat_template *template, const char *path, mt_error *error) {
    struct stat info;
    char *folder = mt_strdup(path), *slash = strrchr(folder, '/'), *jinja = NULL;
    bool is_file = stat(path, &info) == 0 && S_ISREG(info.st_mode);
    if (is_file) strcpy(slash ? slash : folder, slash ? "" : ".");
    int status = read_jinja(&jinja, *folder ? folder : "/", error);
    if (status == 0 && jinja) *template = mt_chat_recognise(jinja);
    if (status == 0 && *template == MT_CHAT_AUTO)
        status =
            mt_error_set(error, "%s: %s; choose one with --chat-template (plain: no marks, only the texts)", folder,
                         jinja ? "its chat template is none of " MT_CHAT_TEMPLATES : "has no chat template");
    free(jinja);
    free(folder);
    return status;
}

/* ---- tokens --------------------------------------------------------------------------------------------------------
 */

struct mt_chat {
    mt_chat_template template;
    const mt_tokenizer *tokenizer;
    mt_encoder *encoder;
    int32_t bos, eod; // bos -1: texts do not begin with one
    int32_t ids[MAX_TOKENS];
    mt_chat_text rendered; // of the last call
    mt_ids header;         // scratch
};

static int resolve_tokens(mt_chat *chat, mt_error *error) {
    const template_row *row = &rows[chat->template];
    for (int i = 0; i < MAX_TOKENS && row->tokens[i]; i++) {
        chat->ids[i] = mt_tokenizer_find(chat->tokenizer, row->tokens[i], (int64_t)strlen(row->tokens[i]));
        if (chat->ids[i] < 0)
            return mt_error_set(error,
                                "--chat-template %s needs the token %s, which the tokenizer does not have; choose "
                                "another template (plain needs no token)",
                                row->name, row->tokens[i]);
    }
    if (chat->template != MT_CHAT_PLAIN || chat->eod >= 0) return 0;
    return mt_error_set(error, "--chat-template plain needs an end of document, which the tokenizer does not have; "
                               "choose another tokenizer");
}

int mt_chat_open(mt_chat **out, mt_chat_template kind, const mt_tokenizer *tokenizer, const char *path,
                 mt_error *error) {
    bool begins = false;
    *out = NULL;
    if (kind == MT_CHAT_AUTO && !path)
        return mt_error_set(error, "the tokenizer has no folder with a chat template; choose one with --chat-template "
                                   "(plain: no marks, only the texts)");
    if (kind == MT_CHAT_AUTO && find_template(&kind, path, error) != 0) return -1;
    if (path && mt_prompt_begins_with_bos(path, &begins, error) != 0) return -1;
    mt_chat *chat = mt_calloc(sizeof *chat);
    *chat = (mt_chat){.template = kind,
                      .tokenizer = tokenizer,
                      .encoder = mt_encoder_open(tokenizer),
                      .bos = begins ? mt_tokenizer_bos(tokenizer) : -1,
                      .eod = mt_tokenizer_eod(tokenizer)};
    if (resolve_tokens(chat, error) != 0) {
        mt_chat_close(chat);
        return -1;
    }
    *out = chat;
    return 0;
}

void mt_chat_close(mt_chat *chat) {
    if (!chat) return;
    mt_encoder_close(chat->encoder);
    mt_chat_text_free(&chat->rendered);
    free(chat->header.data);
    free(chat);
}

int32_t mt_chat_end(const mt_chat *chat) {
    const char *const *tokens = rows[chat->template].tokens;
    int last = 0;
    while (last + 1 < MAX_TOKENS && tokens[last + 1]) last++;
    return tokens[0] ? chat->ids[last] : chat->eod;
}

static int32_t token_of(const mt_chat *chat, const char *text, int64_t bytes) {
    const char *const *tokens = rows[chat->template].tokens;
    for (int i = 0; i < MAX_TOKENS && tokens[i]; i++)
        if ((int64_t)strlen(tokens[i]) == bytes && memcmp(tokens[i], text, (size_t)bytes) == 0) return chat->ids[i];
    return -1;
}

static void push(mt_ids *ids, mt_ids *turns, int32_t id, int32_t turn) {
    mt_ids_push(ids, id);
    mt_ids_push(turns, turn);
}

/* Encodes a text between two special tokens as one, as transformers does. Its first `header` bytes do not belong to the
 * response `turn`; a token that crosses their end does not either. */
static int encode_run(mt_chat *chat, slice run, int64_t header, bool first, int32_t turn, mt_ids *ids, mt_ids *turns,
                      mt_error *error) {
    int64_t start = ids->count, own = 0;
    if (mt_encode_part(chat->encoder, run.text, run.bytes, first, ids, error) != 0) return -1;
    int64_t count = ids->count - start;
    if (header == run.bytes) own = count;
    if (header > 0 && header < run.bytes) {
        chat->header.count = 0;
        if (mt_encode_part(chat->encoder, run.text, header, first, &chat->header, error) != 0) return -1;
        while (own < mt_min(count, chat->header.count) && ids->data[start + own] == chat->header.data[own]) own++;
        if (own < chat->header.count && own < count) own++;
    }
    for (int64_t i = 0; i < count; i++) mt_ids_push(turns, i < own ? -1 : turn);
    return 0;
}

int mt_chat_encode(mt_chat *chat, const mt_chat_message *messages, int64_t count, bool generates, mt_ids *ids,
                   mt_ids *turns, mt_error *error) {
    const mt_chat_text *out = &chat->rendered;
    if (mt_chat_render(&chat->rendered, chat->template, messages, count, generates, error) != 0) return -1;
    int64_t at = 0; // bytes
    for (int64_t p = 0; p < out->count;) {
        bool first = p == (chat->template == MT_CHAT_PLAIN); // after plain's BOS
        const mt_chat_part *part = &out->parts[p++];
        const char *text = out->text.data + at;
        if (part->kind == MT_CHAT_TOKEN) push(ids, turns, token_of(chat, text, part->end - at), part->turn);
        if (part->kind == MT_CHAT_BEGIN && chat->bos >= 0) push(ids, turns, chat->bos, part->turn);
        if (part->kind == MT_CHAT_END) push(ids, turns, chat->eod, part->turn);
        int64_t start = at, header = part->turn < 0 ? part->end - at : 0;
        at = part->end;
        if (part->kind != MT_CHAT_TEXT) continue;
        int32_t turn = part->turn;
        for (; p < out->count && out->parts[p].kind == MT_CHAT_TEXT; p++) {
            turn = out->parts[p].turn;
            if (turn < 0) header = out->parts[p].end - start;
            at = out->parts[p].end;
        }
        if (encode_run(chat, (slice){text, at - start}, header, first, turn, ids, turns, error) != 0) return -1;
    }
    return 0;
}

int mt_chat_encode_document(mt_chat *chat, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    if (chat->bos >= 0) mt_ids_push(ids, chat->bos);
    if (mt_encode_part(chat->encoder, text, bytes, true, ids, error) != 0) return -1;
    if (chat->eod >= 0) mt_ids_push(ids, chat->eod);
    return 0;
}

/* ---- conversations -------------------------------------------------------------------------------------------------
 */

void mt_conversation_add(mt_conversation *conversation, const char *role, const char *text, int64_t bytes) {
    if (conversation->count == conversation->capacity) {
        conversation->capacity = 2 * conversation->capacity + 16;
        conversation->messages =
            mt_realloc(conversation->messages, conversation->capacity * (int64_t)sizeof *conversation->messages);
    }
    char *copy = mt_malloc(bytes + 1);
    if (bytes > 0) memcpy(copy, text, (size_t)bytes);
    conversation->messages[conversation->count++] = (mt_chat_message){role, copy, bytes};
}

void mt_conversation_cut(mt_conversation *conversation, int64_t count) {
    while (conversation->count > count) free((char *)conversation->messages[--conversation->count].content);
}
