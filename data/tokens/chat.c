/* chat.c: chat templates: a conversation as the tokens that a model was trained on. */
#include "chat.h"

#include "../base/file.h"
#include "jinja.h"
#include "prompts.h"
#include "tokenizer_encode.h"
#include "tokenizer_json.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

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

/* ---- rendering -------------------------------------------------------------------------------------------------- */

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

/* ---- the template of a model ------------------------------------------------------------------------------------ */

/* A template of transformers is a program in Jinja. These are the whole programs, as published, that the functions
 * above render alike; any other one, however like it is to them, is rendered by Jinja. */
static const struct {
    mt_chat_template template;
    int64_t bytes;
    uint64_t fingerprint;
} known[] = {
    {MT_CHAT_CHATML, 199, 0xb1f303c481358888},   // of the documentation of transformers
    {MT_CHAT_CHATML, 224, 0xd25c677a1efd7c53},   // the same, of later releases
    {MT_CHAT_QWEN2_5, 2506, 0x0332cce628d8289f}, // Qwen2.5 Instruct
    {MT_CHAT_QWEN3, 4168, 0x2ae958bb7f150d15},   // Qwen3
    {MT_CHAT_LLAMA3, 389, 0xa73d88decefab72a},   // Llama 3 Instruct
};

/* The template plain, with and without BOS. */
#define PLAIN                                                                                                          \
    "{% for message in messages %}{{ message['content'] }}"                                                            \
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
static const char *const plain_programs[] = {PLAIN, "{{ bos_token }}" PLAIN};

mt_chat_template mt_chat_recognise(const char *jinja) {
    int64_t bytes = (int64_t)strlen(jinja);
    bytes -= bytes > 0 && jinja[bytes - 1] == '\n'; // Jinja drops it too
    for (int k = 0; k < 2; k++)
        if ((int64_t)strlen(plain_programs[k]) == bytes && memcmp(jinja, plain_programs[k], (size_t)bytes) == 0)
            return MT_CHAT_PLAIN;
    uint64_t fingerprint = mt_contents_fingerprint(jinja, bytes, true);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        if (known[k].bytes == bytes && known[k].fingerprint == fingerprint) return known[k].template;
    return MT_CHAT_AUTO;
}

/* Templates by name, and the file that they come from. */
typedef struct templates {
    json_t *texts;
    const char *file; // a literal
    mt_error *error;
} templates;

/* Adds a template that is a file of its own. */
static int add_file(templates *t, const char *name, const char *path) {
    enum { MOST_BYTES = 1 << 24 };
    int64_t bytes;
    char *text = mt_file_read(path, MOST_BYTES, &bytes, t->error);
    if (!text) return -1;
    json_t *value = json_stringn(text, (size_t)bytes);
    free(text);
    if (!value || json_object_set_new(t->texts, name, value) != 0)
        return mt_error_set(t->error, "%s: is not UTF-8; get the file again", path);
    return 0;
}

#define ADDITIONAL "additional_chat_templates"

static int visit_template(const char *folder, const char *name, void *context) {
    templates *t = context;
    if (!mt_text_ends_with(name, ".jinja")) return 0;
    char *title = mt_strdup(name), *path = mt_path_join(folder, name);
    title[strlen(name) - strlen(".jinja")] = 0;
    int status = add_file(t, title, path);
    free(title);
    free(path);
    return status;
}

/* tokenizer_config.json has one template, a list of {name, template}, or an object of them. */
static void add_configured(templates *t, const json_t *config) {
    const json_t *field = json_object_get(config, "chat_template");
    json_t *item;
    const char *key;
    size_t i;
    if (json_is_string(field)) json_object_set(t->texts, "default", (json_t *)field);
    json_array_foreach(field, i, item) {
        const char *name = json_string_value(json_object_get(item, "name"));
        json_t *text = json_object_get(item, "template");
        if (name && json_is_string(text)) json_object_set(t->texts, name, text);
    }
    if (!json_is_object(field)) return;
    json_object_foreach((json_t *)field, key, item) {
        if (json_is_string(item)) json_object_set(t->texts, key, item);
    }
}

/* Adds the template of chat_template.json, in which processors of models with a vision tower had theirs. */
static int add_processor(templates *t, const char *folder) {
    static const char name[] = "chat_template.json";
    if (!mt_folder_has(folder, name)) return 0;
    char *path = mt_path_join(folder, name);
    json_t *file = mt_json_read(path, t->error);
    t->file = name;
    add_configured(t, file);
    json_decref(file);
    free(path);
    return file ? 0 : -1;
}

/* Reads the chat templates of a folder: its files of templates, or else those in tokenizer_config.json, or in
 * chat_template.json. */
static int read_templates(templates *t, const char *folder, const json_t *config) {
    static const char single[] = "chat_template.jinja";
    char *path = mt_path_join(folder, single), *others = mt_path_join(folder, ADDITIONAL);
    struct stat info;
    int status = 0;
    t->file = single;
    if (mt_folder_has(folder, single)) status = add_file(t, "default", path);
    if (status == 0 && stat(others, &info) == 0 && S_ISDIR(info.st_mode))
        status = mt_folder_visit(others, visit_template, t);
    if (status == 0 && json_object_size(t->texts) == 0) {
        t->file = "tokenizer_config.json";
        add_configured(t, config);
    }
    if (status == 0 && json_object_size(t->texts) == 0) status = add_processor(t, folder);
    if (status == 0 && json_object_size(t->texts) > 0 && !json_object_get(t->texts, "default"))
        status = mt_error_set(t->error,
                              "%s: has several chat templates and none is named default; name one so, or choose a "
                              "template with --chat-template",
                              folder);
    free(path);
    free(others);
    return status;
}

/* Adds the texts of named special tokens that a file has. */
static void add_tokens(json_t *tokens, const json_t *file) {
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    json_t *extra = json_object_get(file, "extra_special_tokens"), *value;
    const char *key;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        value = json_object_get(file, names[i]);
        if (json_is_object(value)) value = json_object_get(value, "content");
        if (json_is_string(value) && !json_object_get(tokens, names[i])) json_object_set(tokens, names[i], value);
    }
    if (!json_is_object(extra)) return;
    json_object_foreach(extra, key, value) {
        if (json_is_object(value)) value = json_object_get(value, "content");
        if (json_is_string(value)) json_object_set(tokens, key, value);
    }
}

/* SentencePiece's own BOS and EOS, where no file names others. */
static void add_pieces(json_t *tokens, const mt_tokenizer *tokenizer) {
    const char *const names[] = {"bos_token", "eos_token"};
    const int32_t ids[] = {tokenizer->bos, tokenizer->eod};
    for (int i = 0; i < 2; i++)
        if (ids[i] >= 0 && !json_object_get(tokens, names[i]))
            json_object_set_new(
                tokens, names[i],
                json_stringn_nocheck(mt_token_text(tokenizer, ids[i]), (size_t)tokenizer->tokens[ids[i]].text_bytes));
}

/* A template that writes the date makes other tokens tomorrow, which the user should know, once. */
static void note_date(const json_t *texts, const char *file) {
    static bool is_noted;
    const char *title;
    json_t *text;
    json_object_foreach((json_t *)texts, title, text) {
        bool writes = strstr(json_string_value(text), "strftime_now") && !getenv("SOURCE_DATE_EPOCH");
        if (!writes || is_noted || mt_launch_rank() > 0) continue;
        fprintf(stderr,
                "note: %s: the chat template writes the date; SOURCE_DATE_EPOCH=%lld in the environment makes it "
                "today's, also of a run that goes on later\n",
                file, (long long)time(NULL));
        is_noted = true;
    }
}

/* Seconds of processor time that a template may take for a conversation. */
enum { RENDER_SECONDS = 60 };

/* Opens the template of the tokenizer at `path`, a file or a folder; `kind` becomes the one that the functions above
 * render alike, if there is one. */
static int find_template(mt_jinja **jinja, json_t **texts, mt_chat_template *kind, const char *path,
                         const mt_tokenizer *tokenizer, mt_error *error) {
    static const char *const files[] = {"tokenizer_config.json", "special_tokens_map.json"};
    char *folder = mt_path_folder(path);
    json_t *tokens = json_object(), *config[2] = {NULL, NULL};
    templates t = {.texts = json_object(), .error = error};
    int status = 0;
    for (int i = 0; i < 2 && status == 0; i++) {
        char *file = mt_path_join(folder, files[i]);
        if (mt_folder_has(folder, files[i]) && !(config[i] = mt_json_read(file, error))) status = -1;
        if (status == 0 && i == 0) status = mt_tokenizer_config_check(config[i], file, error);
        add_tokens(tokens, config[i]);
        free(file);
    }
    if (tokenizer->kind == MT_KIND_SENTENCEPIECE_BPE || tokenizer->kind == MT_KIND_UNIGRAM)
        add_pieces(tokens, tokenizer);
    if (status == 0) status = read_templates(&t, folder, config[0]);
    const char *text = json_string_value(json_object_get(t.texts, "default"));
    if (status == 0 && !text)
        status = mt_error_set(error,
                              "%s: has no chat template; choose one with --chat-template (plain: no marks, only the "
                              "texts)",
                              folder);
    if (status == 0) {
        char *file = mt_path_join(folder, t.file);
        bool whole = strlen(text) == json_string_length(json_object_get(t.texts, "default"));
        *kind = whole ? mt_chat_recognise(text) : MT_CHAT_AUTO;
        const char *bos = json_string_value(json_object_get(tokens, "bos_token"));
        if (*kind == MT_CHAT_LLAMA3 && (!bos || strcmp(bos, rows[*kind].tokens[0]) != 0))
            *kind = MT_CHAT_AUTO; // it begins with the folder's bos_token
        *jinja = mt_jinja_open(t.texts, tokens, file, RENDER_SECONDS);
        note_date(t.texts, file);
        *texts = json_incref(t.texts);
        free(file);
    }
    for (int i = 0; i < 2; i++) json_decref(config[i]);
    json_decref(t.texts);
    json_decref(tokens);
    free(folder);
    return status;
}

/* ---- tokens ----------------------------------------------------------------------------------------------------- */

struct mt_chat {
    mt_chat_template template; // AUTO: all conversations are rendered by Jinja
    const mt_tokenizer *tokenizer;
    mt_encoder *encoder;
    int32_t bos, eod; // bos -1: texts do not begin with one
    int32_t ids[MAX_TOKENS];
    mt_chat_text rendered; // of the last call
    mt_ids header;         // scratch
    mt_text repaired;      // scratch
    // the template of the tokenizer's folder; NULL: another one was chosen
    mt_jinja *jinja;
    json_t *texts;          // templates by name
    int32_t jinja_end;      // the token that ends a response; -1: none, or not known yet
    json_t *variables;      // of all conversations; NULL: none
    mt_chat_extras extras;  // of the conversation
    mt_ids places;          // of special tokens, as of mt_encode_places
    int64_t *starts, *ends; // [token_capacity] bytes of the text that each of its tokens stands for
    int64_t token_capacity;
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
    if (path && mt_prompt_begins_with_bos(path, &begins, error) != 0) return -1;
    mt_chat *chat = mt_calloc(sizeof *chat);
    *chat = (mt_chat){.template = kind,
                      .tokenizer = tokenizer,
                      .encoder = mt_encoder_open(tokenizer),
                      .bos = begins ? mt_tokenizer_bos(tokenizer) : -1,
                      .eod = mt_tokenizer_eod(tokenizer),
                      .jinja_end = -1};
    int status = 0;
    if (kind == MT_CHAT_AUTO)
        status = find_template(&chat->jinja, &chat->texts, &chat->template, path, tokenizer, error);
    if (status != 0 || resolve_tokens(chat, error) != 0) {
        mt_chat_close(chat);
        return -1;
    }
    *out = chat;
    return 0;
}

const char *mt_chat_program(const mt_chat *chat) {
    return chat->template == MT_CHAT_PLAIN ? plain_programs[chat->bos >= 0] : NULL;
}

void mt_chat_close(mt_chat *chat) {
    if (!chat) return;
    mt_encoder_close(chat->encoder);
    mt_chat_text_free(&chat->rendered);
    mt_jinja_close(chat->jinja);
    json_decref(chat->texts);
    json_decref(chat->variables);
    free(chat->header.data);
    free(chat->repaired.data);
    free(chat->places.data);
    free(chat->starts);
    free(chat->ends);
    free(chat);
}

/* A variable that the templates do not name is without effect, which the user should know, once. */
static void note_unnamed(const mt_chat *chat) {
    static bool is_noted;
    const char *name, *title;
    json_t *value, *text;
    json_object_foreach(chat->variables, name, value) {
        bool is_named = false;
        json_object_foreach(chat->texts, title, text) is_named |= strstr(json_string_value(text), name) != NULL;
        if (is_named || is_noted || mt_launch_rank() > 0) continue;
        fprintf(stderr,
                "note: --chat-template-kwargs: the chat template of the tokenizer's folder does not name \"%s\"\n",
                name);
        is_noted = true;
    }
}

int mt_chat_set_variables(mt_chat *chat, const char *json, mt_error *error) {
    mt_error why;
    json_decref(chat->variables);
    chat->variables = NULL;
    if (!json) return 0;
    if (!chat->jinja)
        return mt_error_set(error,
                            "--chat-template-kwargs: --chat-template %s has no variables; --chat-template auto takes "
                            "the template of the tokenizer's folder",
                            rows[chat->template].name);
    json_t *object = mt_json_parse(json, (int64_t)strlen(json), JSON_REJECT_DUPLICATES, NULL, &why);
    if (!json_is_object(object)) {
        json_decref(object);
        return mt_error_set(error,
                            "--chat-template-kwargs expects an object of JSON, {\"enable_thinking\": false}, got "
                            "'%.100s'",
                            json);
    }
    if (json_object_size(object) > 0)
        chat->variables = object;
    else
        json_decref(object);
    note_unnamed(chat);
    return 0;
}

int32_t mt_chat_end(const mt_chat *chat) {
    const char *const *tokens = rows[chat->template].tokens;
    int last = 0;
    if (chat->template == MT_CHAT_AUTO) return chat->jinja_end >= 0 ? chat->jinja_end : chat->eod;
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

/* Encodes a conversation that the functions above render. */
static int encode_known(mt_chat *chat, const mt_chat_message *messages, int64_t count, bool generates, mt_ids *ids,
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

/* ---- tokens of a text that Jinja wrote */

/* A response: its bytes in the text, and its message. */
typedef struct span {
    int64_t start, end;
    int32_t turn;
} span;

static span span_of(const json_t *spans, size_t k) {
    const json_t *item = json_array_get(spans, k);
    return (span){json_integer_value(json_array_get(item, 0)), json_integer_value(json_array_get(item, 1)),
                  (int32_t)json_integer_value(json_array_get(item, 2))};
}

/* Tokens [first, end) between two special tokens, and their bytes [start, stop) of the text. */
typedef struct text_piece {
    const int32_t *ids;
    int64_t first, end;
    const char *text;
    int64_t start, stop;
} text_piece;

/* True if the texts of the tokens, one after another, are the piece: the normalizer changed nothing. Then sets the
 * bytes of each. */
static bool add_up(mt_chat *chat, const text_piece *piece) {
    const int32_t *ids = piece->ids;
    const char *text = piece->text;
    int64_t first = piece->first, end = piece->end, start = piece->start, stop = piece->stop;
    const mt_tokenizer *t = chat->tokenizer;
    int64_t at = start;
    for (int64_t i = first; i < end; i++) {
        const mt_token *token = &t->tokens[ids[i]];
        if (token->surface_bytes > stop - at ||
            memcmp(text + at, t->strings.data + token->surface, (size_t)token->surface_bytes) != 0)
            return false;
        chat->starts[i] = at;
        chat->ends[i] = at += token->surface_bytes;
    }
    return at == stop;
}

/* A boundary of a response inside a piece: tokens that the piece has up to it alone stand before it, and the next one
 * crosses it, unless these were all. */
static int cut_piece(mt_chat *chat, const text_piece *piece, int64_t boundary, mt_error *error) {
    const int32_t *ids = piece->ids;
    int64_t first = piece->first, end = piece->end, start = piece->start, same = 0;
    chat->header.count = 0;
    if (mt_encode_part(chat->encoder, piece->text + start, boundary - start, start == 0, &chat->header, error) != 0)
        return -1;
    while (same < mt_min(end - first, chat->header.count) && ids[first + same] == chat->header.data[same]) same++;
    for (int64_t i = 0; i < same; i++) chat->ends[first + i] = mt_min(chat->ends[first + i], boundary);
    for (int64_t i = first + same + (same < chat->header.count); i < end; i++)
        chat->starts[i] = mt_max(chat->starts[i], boundary);
    return 0;
}

/* Sets the bytes of the piece's tokens as exactly as spans need them. */
static int locate_piece(mt_chat *chat, const text_piece *piece, const json_t *spans, mt_error *error) {
    if (add_up(chat, piece)) return 0;
    for (int64_t i = piece->first; i < piece->end; i++) chat->starts[i] = piece->start, chat->ends[i] = piece->stop;
    for (size_t k = 0; k < json_array_size(spans); k++) {
        const span s = span_of(spans, k);
        const int64_t boundaries[] = {s.start, s.end};
        for (int b = 0; b < 2; b++)
            if (boundaries[b] > piece->start && boundaries[b] < piece->stop &&
                cut_piece(chat, piece, boundaries[b], error) != 0)
                return -1;
    }
    return 0;
}

/* Sets the bytes of all tokens [count]. */
static int locate_tokens(mt_chat *chat, const int32_t *ids, int64_t count, const char *text, int64_t bytes,
                         const json_t *spans, mt_error *error) {
    int64_t token = 0, at = 0;
    if (count > chat->token_capacity) {
        chat->token_capacity = 2 * count;
        chat->starts = mt_realloc(chat->starts, chat->token_capacity * 8);
        chat->ends = mt_realloc(chat->ends, chat->token_capacity * 8);
    }
    for (int64_t p = 0; p <= chat->places.count; p += 3) {
        bool last = p == chat->places.count;
        const int32_t *place = chat->places.data + p;
        int64_t next = last ? count : place[0], stop = last ? bytes : place[1];
        text_piece piece = {ids, token, next, text, at, stop};
        if (next > token && locate_piece(chat, &piece, spans, error) != 0) return -1;
        if (last) break;
        chat->starts[next] = place[1];
        chat->ends[next] = at = place[2];
        token = next + 1;
    }
    return 0;
}

static bool is_blank_token(const mt_tokenizer *t, int32_t id) {
    const mt_token *token = &t->tokens[id];
    for (int32_t i = 0; i < token->surface_bytes; i++)
        if (!strchr(" \t\r\n", t->strings.data[token->surface + i])) return false;
    return true;
}

/* True if the token is a special or another added one. */
static bool has_place(const mt_chat *chat, int64_t token) {
    for (int64_t p = 0; p < chat->places.count; p += 3)
        if (chat->places.data[p] == token) return true;
    return false;
}

/* White space and the same token again behind the token that ends a turn are no part of the response: a model stops at
 * the first. */
static void trim_turns(const mt_chat *chat, const int32_t *ids, int32_t *turns, int64_t count) {
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t last = i;
        if (turns[i] < 0 || (i + 1 < count && turns[i + 1] == turns[i])) continue;
        while (last > 0 && turns[last] == turns[i] && is_blank_token(chat->tokenizer, ids[last]) &&
               !has_place(chat, last))
            last--;
        if (turns[last] != turns[i] || !has_place(chat, last)) continue;
        for (int64_t k = last - 1; k > 0 && turns[k] == turns[i]; k--) { // a template may write the token again
            if (has_place(chat, k) && ids[k] == ids[last])
                last = k;
            else if (has_place(chat, k) || !is_blank_token(chat->tokenizer, ids[k]))
                break;
        }
        for (int64_t k = last + 1; k <= i; k++) turns[k] = -1;
        i = last;
    }
}

/* A token belongs to a response that it begins in; with {% generation %} marks, as in transformers, to the first one
 * that it shares a byte with. */
static int32_t turn_of(const mt_chat *chat, int64_t token, const json_t *spans, bool is_marked, size_t *from) {
    int64_t start = chat->starts[token], end = chat->ends[token];
    for (; *from < json_array_size(spans); ++*from) {
        const span s = span_of(spans, *from);
        if (start >= s.end) continue;
        return (is_marked ? end > s.start : start >= s.start) ? s.turn : -1;
    }
    return -1;
}

/* Encodes the text of a reply as transformers does: special tokens are recognised in all of it. */
static int encode_reply(mt_chat *chat, const json_t *reply, mt_ids *ids, mt_ids *turns, mt_error *error) {
    const json_t *value = json_object_get(reply, "text"), *spans = json_object_get(reply, "spans");
    const char *text = json_string_value(value);
    int64_t bytes = (int64_t)json_string_length(value), before = ids->count;
    bool is_marked = json_is_true(json_object_get(reply, "is_marked"));
    mt_ids own = {0};
    size_t from = 0;
    chat->places.count = 0;
    int status = mt_encode_places(chat->encoder, text ? text : "", bytes, &own, &chat->places, error);
    if (status == 0) status = locate_tokens(chat, own.data, own.count, text, bytes, spans, error);
    for (int64_t i = 0; i < own.count && status == 0; i++)
        push(ids, turns, own.data[i], turn_of(chat, i, spans, is_marked, &from));
    if (status == 0 && !is_marked) trim_turns(chat, own.data, turns->data + turns->count - own.count, own.count);
    if (status != 0) ids->count = before;
    free(own.data);
    return status;
}

/* A text of JSON; ill-formed parts become U+FFFD. */
static json_t *json_text(mt_chat *chat, const char *text, int64_t bytes) {
    chat->repaired.bytes = 0;
    mt_utf8_repair(&chat->repaired, text, bytes);
    return json_stringn_nocheck(bytes > 0 ? chat->repaired.data : "", (size_t)chat->repaired.bytes);
}

/* The message as templates take it. */
static json_t *json_message(mt_chat *chat, const mt_chat_message *message, const json_t *fields) {
    json_t *object = json_object(), *value;
    const char *key;
    json_object_set_new(object, "role", json_text(chat, message->role, (int64_t)strlen(message->role)));
    if (message->content) json_object_set_new(object, "content", json_text(chat, message->content, message->bytes));
    if (fields) {
        json_object_foreach((json_t *)fields, key, value) json_object_set(object, key, value);
    }
    return object;
}

static int encode_jinja(mt_chat *chat, const mt_chat_message *messages, int64_t count, bool generates, mt_ids *ids,
                        mt_ids *turns, mt_error *error) {
    const mt_chat_extras *e = &chat->extras;
    json_t *request = json_object(), *list = json_array();
    for (int64_t i = 0; i < count; i++)
        json_array_append_new(list, json_message(chat, &messages[i], e->fields ? e->fields[i] : NULL));
    json_object_set_new(request, "messages", list);
    json_object_set_new(request, "generates", json_boolean(generates));
    if (e->tools) json_object_set(request, "tools", (json_t *)e->tools);
    json_t *variables = chat->variables ? json_copy(chat->variables) : json_object();
    if (e->variables) json_object_update(variables, (json_t *)e->variables);
    json_object_set_new(request, "variables", variables);
    json_t *reply = mt_jinja_ask(chat->jinja, request, error);
    json_decref(request);
    int status = reply ? encode_reply(chat, reply, ids, turns, error) : -1;
    json_decref(reply);
    return status;
}

/* The first part of the conversation that no function above can write, for messages; NULL: none. */
static const char *extra_of(const mt_chat *chat, const mt_chat_message *messages, int64_t count) {
    const mt_chat_extras *e = &chat->extras;
    const char *key;
    json_t *value;
    if (e->tools) return "tools";
    if (e->variables || chat->variables) return "chat_template_kwargs";
    for (int64_t i = 0; i < count; i++) {
        if (e->fields && e->fields[i]) {
            json_object_foreach((json_t *)e->fields[i], key, value) return key;
        }
        if (!messages[i].content) return "a message without content";
    }
    return NULL;
}

/* Fields that a template which does not name them would leave out in silence. */
static int check_named(const mt_chat *chat, int64_t count, mt_error *error) {
    static const char *const thoughts[] = {"reasoning_content", "reasoning", "thinking"};
    const mt_chat_extras *e = &chat->extras;
    const json_t *use = e->tools ? json_object_get(chat->texts, "tool_use") : NULL;
    const char *text = json_string_value(use ? use : json_object_get(chat->texts, "default")), *missing = NULL;
    bool thinks = strstr(text, "reasoning") || strstr(text, ".thinking") || strstr(text, "'thinking'") ||
                  strstr(text, "\"thinking\"");
    if (e->tools && !strstr(text, "tools")) missing = "tools";
    for (int64_t i = 0; i < count && e->fields; i++) {
        if (json_object_get(e->fields[i], "tool_calls") && !strstr(text, "tool_calls")) missing = "tool_calls";
        for (int k = 0; k < 3 && !thinks; k++)
            if (json_object_get(e->fields[i], thoughts[k])) missing = thoughts[k];
    }
    if (!missing) return 0;
    return mt_error_set(error,
                        "has \"%s\", which the chat template of the tokenizer's folder does not write; remove it, or "
                        "take a template that does",
                        missing);
}

/* True if the functions above render this conversation as the folder's template does. */
static bool has_plain_roles(const mt_chat_message *messages, int64_t count) {
    mt_error ignored;
    return check_roles(MT_CHAT_CHATML, messages, count, &ignored) == 0;
}

int mt_chat_encode(mt_chat *chat, const mt_chat_message *messages, int64_t count, bool generates, mt_ids *ids,
                   mt_ids *turns, mt_error *error) {
    const char *extra = extra_of(chat, messages, count);
    if (chat->jinja && count == 0) return mt_error_set(error, "the conversation has no message");
    if (chat->jinja && (chat->template == MT_CHAT_AUTO || extra || !has_plain_roles(messages, count))) {
        if (check_named(chat, count, error) != 0) return -1;
        return encode_jinja(chat, messages, count, generates, ids, turns, error);
    }
    if (extra)
        return mt_error_set(
            error,
            "has %s%s%s, which --chat-template %s cannot write; --chat-template auto takes the template "
            "of the tokenizer's folder",
            strchr(extra, ' ') ? "" : "\"", extra, strchr(extra, ' ') ? "" : "\"", rows[chat->template].name);
    return encode_known(chat, messages, count, generates, ids, turns, error);
}

void mt_chat_set_extras(mt_chat *chat, const mt_chat_extras *extras) {
    chat->extras = extras ? *extras : (mt_chat_extras){0};
}

bool mt_chat_takes_extras(const mt_chat *chat) {
    return chat->jinja != NULL;
}

/* The last token of a short response. A template that refuses it has no end here; its folder's files name one. */
int mt_chat_prepare(mt_chat *chat, mt_error *error) {
    static const mt_chat_message messages[] = {{"user", "Hi", 2}, {"assistant", "Hello", 5}};
    mt_ids ids = {0}, turns = {0};
    mt_error refusal;
    if (chat->template != MT_CHAT_AUTO) return 0;
    if (encode_jinja(chat, messages, 1, true, &ids, &turns, error) != 0) {
        free(ids.data);
        free(turns.data);
        return -1;
    }
    ids.count = turns.count = 0;
    if (encode_jinja(chat, messages, 2, false, &ids, &turns, &refusal) == 0) {
        int64_t last = ids.count - 1;
        while (last >= 0 && turns.data[last] < 0) last--;
        if (last >= 0 && has_place(chat, last)) chat->jinja_end = ids.data[last];
    }
    free(ids.data);
    free(turns.data);
    return 0;
}

int mt_chat_encode_document(mt_chat *chat, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    if (chat->bos >= 0) mt_ids_push(ids, chat->bos);
    if (mt_encode_part(chat->encoder, text, bytes, true, ids, error) != 0) return -1;
    if (chat->eod >= 0) mt_ids_push(ids, chat->eod);
    return 0;
}

/* ---- conversations ---------------------------------------------------------------------------------------------- */

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
