/* test_environment.c: conversations with a program: the chat template writes the tokens between two responses,
 * each conversation gets its own answer, and a program that misbehaves is an error of one line. */
#include "data/base/file.h"
#include "data/learn/environment.h"
#include "data/tokens/chat.h"
#include "data/tokens/tokenizer_encode.h"
#include "data/tokens/tokenizer_vocab.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "folder.h"

static void fail_on(int status, const mt_error *error) {
    if (status != 0) fail_msg("%s", error->text);
}

static void assert_says(const mt_error *error, const char *words) {
    if (!strstr(error->text, words)) fail_msg("\"%s\" does not say \"%s\"", error->text, words);
    assert_null(strchr(error->text, '\n'));
}

/* ---- tokenizers */

/* Writes a folder with the demo's tokenizer, further special tokens, separated by blanks, and a template in Jinja. */
static const char *write_folder(const char *tokens, const char *end, const char *template) {
    mt_error error;
    char text[4096], *rest = NULL;
    json_t *tokenizer = mt_json_read("data/demo-tokenizer.json", &error);
    if (!tokenizer) fail_msg("%s", error.text);
    json_t *added = json_object_get(tokenizer, "added_tokens");
    json_int_t id = (json_int_t)json_object_size(json_object_get(json_object_get(tokenizer, "model"), "vocab"));
    snprintf(text, sizeof text, "%s", tokens);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        json_array_append_new(added,
                              json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id++, "content", word,
                                        "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
    assert_int_equal(json_dump_file(tokenizer, at("tokenizer.json"), 0), 0);
    json_decref(tokenizer);
    json_t *config = json_pack("{s:s, s:s*}", "eos_token", end, "chat_template", template);
    assert_int_equal(json_dump_file(config, at("tokenizer_config.json"), 0), 0);
    json_decref(config);
    return root;
}

#define CHATML_TOKENS "<|im_start|> <|im_end|>"
static const char chatml[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/* ---- an environment */

static mt_tokenizer *tokenizer;
static mt_environment_config config;
static mt_question question;

/* Takes the tokenizer of a folder (NULL: ByteLevel) with a template. */
static void take_tokenizer(const char *folder, mt_chat_template template) {
    mt_error error;
    config = (mt_environment_config){.seconds = 20, .chat_template = template, .tokenizer_path = folder};
    fail_on(mt_tokenizer_open(&tokenizer, folder ? MT_TOKENIZER_HUGGINGFACE : MT_TOKENIZER_BYTE_LEVEL, folder, &error),
            &error);
    config.tokenizer = tokenizer;
}

static mt_environment *open_environment(const char *command) {
    mt_environment *e;
    mt_error error;
    config.command = command;
    fail_on(mt_environment_open(&e, &config, &error), &error);
    return e;
}

/* The tokens of a list of messages in JSON, by the chat template. */
static mt_ids encode(const char *messages, bool generates) {
    mt_error error;
    mt_chat *chat;
    mt_ids ids = {0}, turns = {0};
    mt_chat_message list[16];
    size_t i;
    json_t *all = json_loads(messages, 0, NULL), *message;
    assert_in_range(json_array_size(all), 1, 16);
    json_array_foreach(all, i, message) list[i] = (mt_chat_message){
        json_string_value(json_object_get(message, "role")), json_string_value(json_object_get(message, "content")),
        (int64_t)json_string_length(json_object_get(message, "content"))};
    fail_on(mt_chat_open(&chat, config.chat_template, tokenizer, config.tokenizer_path, &error), &error);
    fail_on(mt_chat_encode(chat, list, (int64_t)json_array_size(all), generates, &ids, &turns, &error), &error);
    mt_chat_close(chat);
    json_decref(all);
    free(turns.data);
    return ids;
}

static void append(mt_ids *to, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) mt_ids_push(to, tokens[i]);
}

/* The tokens of a response that ends. */
static mt_ids response_of(const mt_environment *e, const char *text) {
    mt_ids ids = {0};
    mt_error error;
    mt_encoder *encoder = mt_encoder_open(tokenizer);
    fail_on(mt_encode_part(encoder, text, (int64_t)strlen(text), false, &ids, &error), &error);
    mt_encoder_close(encoder);
    mt_ids_push(&ids, mt_environment_end(e));
    return ids;
}

/* Answers every line with one message of a role. */
static const char *answering(const char *role, const char *content) {
    static char command[1000];
    snprintf(command, sizeof command,
             "while IFS= read -r l; do printf '%%s\\n' \"$l\" >>%s; id=${l#*: }; id=${id%%%%,*}; echo '{\"id\": '$id', "
             "\"messages\": [{\"role\": \"%s\", \"content\": \"%s\"}], \"reward\": 0.5}'; done",
             at("seen"), role, content);
    return command;
}

/* ---- tests */

#define USER(text)      "{\"role\": \"user\", \"content\": \"" text "\"}"
#define ASSISTANT(text) "{\"role\": \"assistant\", \"content\": \"" text "\"}"

/* Two responses, each behind a space of the template: the prompt, each response and what follows it are the tokens of
 * the whole conversation. */
static void holds_conversation(const char *name, const char *role, const char *space) {
    mt_error error;
    mt_environment *e = open_environment(answering(role, "and then? "));
    const mt_question *questions[] = {&question};
    const char *texts[] = {"Hello there.", "x"};
    char written[100];
    char whole[1000] = "[" USER("Once upon a time");
    question.conversation = "{\"messages\": [" USER("Once upon a time") "]}";
    mt_ids tokens = encode("[" USER("Once upon a time") "]", true);
    mt_environment_begin(e, 40, questions, 1);
    for (int i = 0; i < 2; i++) {
        snprintf(written, sizeof written, "%s%s", space, texts[i]);
        mt_ids response = response_of(e, written);
        mt_env_turn turn = {0, response.data, response.count, 3, 7, {0}};
        if (mt_environment_step(e, &turn, 1, &error) != 0) fail_msg("%s: %s", name, error.text);
        assert_true(turn.reward == 0.5);
        append(&tokens, response.data, response.count);
        append(&tokens, turn.next.data, turn.next.count);
        snprintf(whole + strlen(whole), sizeof whole - strlen(whole),
                 ", {\"role\": \"assistant\", \"content\": \"%s\"}, {\"role\": \"%s\", \"content\": \"and then? \"}",
                 texts[i], role);
        free(response.data), free(turn.next.data);
    }
    strcat(whole, "]");
    mt_ids expected = encode(whole, true);
    if (tokens.count != expected.count || memcmp(tokens.data, expected.data, (size_t)tokens.count * 4) != 0)
        fail_msg("%s: %lld tokens are not those of the conversation, %lld", name, (long long)tokens.count,
                 (long long)expected.count);
    free(tokens.data), free(expected.data);
    mt_environment_close(e);
}

static bool has_jinja(void) {
#if !defined MT_HAVE_PCRE2 || !defined MT_HAVE_UTF8PROC
    return false;
#endif
    return system("${MT_PYTHON:-python3} -c 'import jinja2' 2>/dev/null") == 0;
}

static void tokens_are_those_of_the_chat_template(void **state) {
    (void)state;
    take_tokenizer(NULL, MT_CHAT_PLAIN);
    holds_conversation("plain", "user", "");
    mt_tokenizer_close(tokenizer);
#if defined MT_HAVE_PCRE2 && defined MT_HAVE_UTF8PROC
    take_tokenizer(write_folder(CHATML_TOKENS, "<|im_end|>", NULL), MT_CHAT_CHATML);
    holds_conversation("chatml", "user", "");
    mt_tokenizer_close(tokenizer);
    take_tokenizer(write_folder("<s> [INST] [/INST] </s>", "</s>", NULL), MT_CHAT_MISTRAL);
    holds_conversation("mistral", "user", " ");
    mt_tokenizer_close(tokenizer);
#endif
    if (!has_jinja()) return;
    char tools[1000];
    snprintf(tools, sizeof tools, "{# tool #}%s", chatml);
    take_tokenizer(write_folder(CHATML_TOKENS, "<|im_end|>", tools), MT_CHAT_AUTO);
    holds_conversation("a template in Jinja", "tool", "");
    mt_tokenizer_close(tokenizer);
}

/* Mistral's template moves a system message to the last message of the user, and a template may shorten what it wrote
 * before. Then the conversation no longer begins with the tokens that a response was written behind. */
static void a_template_that_changes_earlier_turns_is_refused(void **state) {
    (void)state;
#if defined MT_HAVE_PCRE2 && defined MT_HAVE_UTF8PROC
    mt_error error;
    const mt_question *questions[] = {&question};
    take_tokenizer(write_folder("<s> [INST] [/INST] </s>", "</s>", NULL), MT_CHAT_MISTRAL);
    mt_environment *e = open_environment(answering("user", "go on"));
    question.conversation = "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, " USER("u") "]}";
    mt_environment_begin(e, 0, questions, 1);
    mt_ids response = response_of(e, "a");
    mt_env_turn turn = {0, response.data, response.count, 1, 0, {0}};
    assert_int_equal(mt_environment_step(e, &turn, 1, &error), -1);
    assert_says(&error, "conversation 0 with messages that cannot be written: the chat template writes the messages "
                        "before them in another way");
    free(response.data), free(turn.next.data);
    mt_environment_close(e);
    mt_tokenizer_close(tokenizer);
#endif
}

/* Begins `count` conversations of the prompt "hi" with ids from 10 on and asks once about responses "a", "b", ... */
static int ask(mt_environment *e, mt_env_turn *turns, int64_t count, int64_t turns_left, mt_error *error) {
    static int32_t tokens[8][2];
    const mt_question *questions[8];
    question = (mt_question){.conversation = "{\"messages\": [" USER("hi") "]}", .answer = "a\"1", .answer_bytes = 3};
    for (int64_t i = 0; i < count; i++) {
        questions[i] = &question;
        tokens[i][0] = 'a' + (int32_t)i, tokens[i][1] = 256;
        turns[i] = (mt_env_turn){i, tokens[i], 2, turns_left, 0, {0}};
    }
    mt_environment_begin(e, 10, questions, count);
    return mt_environment_step(e, turns, count, error);
}

static void each_conversation_gets_its_own_answer(void **state) {
    (void)state;
    mt_error error;
    mt_env_turn turns[3];
    char command[2000];
    take_tokenizer(NULL, MT_CHAT_PLAIN);
    // three requests are read before the first answer; the last is answered first
    snprintf(command, sizeof command,
             "for i in 0 1 2; do IFS= read -r l; printf '%%s\\n' \"$l\" >>%s; done; "
             "echo '{\"id\": 12, \"done\": true, \"reward\": -3, \"messages\": [{\"role\": \"user\", \"content\": "
             "\"n\"}]}'; "
             "echo '{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"user\", \"content\": "
             "\"\\u00e9\"}], \"id\": 10}'; "
             "echo "
             "'{\"id\":11,\"reward\":1e-1,\"done\":false,\"messages\":[{\"role\":\"user\",\"content\":\"m\"}],\"more\":"
             "1}'; cat >/dev/null",
             at("asked"));
    mt_environment *e = open_environment(command);
    fail_on(ask(e, turns, 3, 2, &error), &error);
    assert_true(turns[0].reward == 0 && turns[1].reward == 0.1 && turns[2].reward == -3);
    assert_int_equal(turns[2].next.count, 0);
    assert_int_equal(turns[0].next.count, 3); // the bytes of x and of e with an accent
    assert_true(turns[0].next.data[0] == 'x' && turns[0].next.data[1] == 0xc3 && turns[0].next.data[2] == 0xa9);
    mt_environment_close(e);
    int64_t bytes;
    char *asked = mt_file_read(at("asked"), 10000, &bytes, &error);
    assert_non_null(asked);
    json_t *first = json_loadb(asked, strcspn(asked, "\n"), 0, NULL),
           *expected =
               json_loads("{\"id\": 10, \"messages\": [" USER("hi") ", " ASSISTANT("a") "], \"answer\": \"a\\\"1\", "
                                                                                        "\"turns_left\": 2}",
                          0, NULL);
    assert_true(json_equal(first, expected));
    json_decref(first), json_decref(expected);
    free(asked);
    for (int i = 0; i < 3; i++) free(turns[i].next.data);
    mt_tokenizer_close(tokenizer);
}

/* With no turn left, messages need not come, and are not read. */
static void the_last_turn_ends_a_conversation(void **state) {
    (void)state;
    mt_error error;
    mt_env_turn turns[1];
    take_tokenizer(NULL, MT_CHAT_PLAIN);
    static const char *const commands[] = {"read -r l; echo '{\"id\": 10, \"reward\": 2}'; cat >/dev/null",
                                           "read -r l; echo '{\"id\": 10, \"reward\": 2, \"messages\": [{\"role\": "
                                           "\"user\", \"content\": \"x\"}]}'; cat >/dev/null"};
    for (int i = 0; i < 2; i++) {
        mt_environment *e = open_environment(commands[i]);
        fail_on(ask(e, turns, 1, 0, &error), &error);
        assert_true(turns[0].reward == 2 && turns[0].next.count == 0);
        mt_environment_close(e);
    }
    mt_tokenizer_close(tokenizer);
}

static const struct {
    const char *command, *words;
} faults[] = {
    {"exit 3", "the environment \"exit 3\" ended with exit status 3 after 0 answers to 2 responses"},
    {"no-such-program-here", "exit status 127 (the shell did not find it)"},
    {"read -r l; kill -SEGV $$", "was ended by signal 11"},
    {"read -r l; exec >&-; sleep 86400", "closed its output after 0 answers"},
    {"read -r l; echo hello; cat >/dev/null", "wrote \"hello\" as line 1 of its output, which is no object of JSON"},
    {"read -r l; echo '[1]'; cat >/dev/null", "which is no object of JSON"},
    {"read -r l; echo '{\"id\": 10, \"id\": 10}'; cat >/dev/null", "which is no object of JSON"},
    {"read -r l; echo; cat >/dev/null", "wrote \"\" as line 1"},
    {"read -r l; echo '{\"reward\": 1, \"done\": true}'; cat >/dev/null", "whose \"id\" is none of this turn"},
    {"read -r l; echo '{\"id\": 9, \"done\": true}'; cat >/dev/null", "whose \"id\" is none of this turn"},
    {"read -r l; echo '{\"id\": \"10\", \"done\": true}'; cat >/dev/null", "whose \"id\" is none of this turn"},
    {"read -r l; read -r l; echo '{\"id\": 10, \"done\": true}'; echo '{\"id\": 10, \"done\": true}'; cat >/dev/null",
     "as line 2 of its output, whose \"id\" it had answered before"},
    {"read -r l; echo '{\"id\": 10, \"done\": true, \"reward\": \"1\"}'; cat >/dev/null",
     "whose \"reward\" is no number"},
    {"read -r l; echo '{\"id\": 10, \"done\": true, \"reward\": 1e31}'; cat >/dev/null",
     "whose \"reward\" is no number"},
    {"read -r l; echo '{\"id\": 10, \"done\": true, \"reward\": NaN}'; cat >/dev/null", "no object of JSON"},
    {"read -r l; echo '{\"id\": 10, \"done\": 1}'; cat >/dev/null", "whose \"done\" is neither true nor false"},
    {"read -r l; echo '{\"id\": 10, \"messages\": \"x\"}'; cat >/dev/null", "whose \"messages\" are no list"},
    {"read -r l; echo '{\"id\": 10}'; cat >/dev/null", "has neither messages to append nor \"done\": true"},
    {"read -r l; echo '{\"id\": 10, \"messages\": []}'; cat >/dev/null", "has neither messages to append"},
    {"read -r l; echo '{\"id\": 10, \"messages\": [{\"role\": \"user\"}]}'; cat >/dev/null", "has no text as \"role\""},
    {"read -r l; echo '{\"id\": 10, \"messages\": [\"x\"]}'; cat >/dev/null", "has no text as \"role\""},
    {"read -r l; echo '{\"id\": 10, \"messages\": [{\"role\": \"assistant\", \"content\": \"x\"}]}'; cat >/dev/null",
     "a message of the assistant"},
    {"for i in 10 11; do read -r l; echo '{\"id\": '$i', \"messages\": [{\"role\": \"user\", \"content\": \"\"}]}'; "
     "done; "
     "cat >/dev/null",
     "the chat template writes no token for them"},
    {"read -r l; read -r l; printf '{\"id\": %d, \"done\": true}\\n' 10 11 12; cat >/dev/null",
     "wrote more lines than it got responses; it must write one line for each"},
    {"for i in 10 11; do read -r l; echo '{\"id\": '$i', \"messages\": [{\"role\": \"tool\", \"content\": \"x\"}]}'; "
     "done; "
     "cat >/dev/null",
     "answered conversation 10 with messages that cannot be written"},
};

static void an_environment_that_misbehaves_is_an_error_of_one_line(void **state) {
    (void)state;
    mt_error error;
    mt_env_turn turns[2];
    take_tokenizer(NULL, MT_CHAT_PLAIN);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        mt_environment *e = open_environment(faults[i].command);
        if (ask(e, turns, 2, 1, &error) != -1) fail_msg("%s: no error", faults[i].command);
        assert_says(&error, faults[i].words);
        assert_says(&error, faults[i].command);
        for (int k = 0; k < 2; k++) free(turns[k].next.data);
        mt_environment_close(e);
    }
    mt_tokenizer_close(tokenizer);
}

static void an_environment_that_hangs_is_an_error(void **state) {
    (void)state;
    mt_error error;
    mt_env_turn turns[2];
    take_tokenizer(NULL, MT_CHAT_PLAIN);
    config.seconds = 0.2;
    mt_environment *e = open_environment("read -r l; echo '{\"id\": 10, \"done\": true}'; cat >/dev/null");
    assert_int_equal(ask(e, turns, 2, 1, &error), -1);
    assert_says(&error, "wrote 1 answers to 2 responses in 0.2 s");
    assert_int_equal(ask(e, turns, 2, 1, &error), -1); // it has been ended
    assert_says(&error, "has ended");
    mt_environment_close(e);
    mt_tokenizer_close(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_are_those_of_the_chat_template),
        cmocka_unit_test(a_template_that_changes_earlier_turns_is_refused),
        cmocka_unit_test(each_conversation_gets_its_own_answer),
        cmocka_unit_test(the_last_turn_ends_a_conversation),
        cmocka_unit_test(an_environment_that_misbehaves_is_an_error_of_one_line),
        cmocka_unit_test(an_environment_that_hangs_is_an_error),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
