/* test_requests.c: requests of clients as a server reads them, the calls of tools that it finds, keys, places, and
 * counters. */
#include "data/serve/counters.h"
#include "data/serve/http.h"
#include "data/serve/request.h"
#include "data/serve/scores.h"
#include "data/serve/serve.h"
#include "data/serve/tool_calls.h"
#include "data/tokens/tokenizer_vocab.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static mt_service bytes_service(mt_tokenizer **tokenizer, mt_chat **chat) {
    mt_error error;
    if (mt_tokenizer_open(tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, &error) != 0) fail_msg("%s", error.text);
    if (mt_chat_open(chat, MT_CHAT_PLAIN, *tokenizer, NULL, &error) != 0) fail_msg("%s", error.text);
    mt_service service = {.name = "model", .tokenizer = *tokenizer, .bos = 7, .context = 32, .vocab_size = 257};
    service.max_choices = 8, service.max_new_tokens = -1, service.chat = *chat, service.chat_lock = &lock;
    service.sampling = (mt_sampling){.temperature = 0.5, .top_p = 0.75, .seed = 11};
    return service;
}

static void close_service(mt_tokenizer *tokenizer, mt_chat *chat) {
    mt_chat_close(chat);
    mt_tokenizer_close(tokenizer);
}

static mt_request read(const mt_service *service, bool is_chat, const char *body) {
    mt_request request;
    mt_request_error refusal;
    if (mt_request_read(&request, is_chat, body, (int64_t)strlen(body), service, &refusal) != 0)
        fail_msg("%s: %s", body, refusal.error.text);
    return request;
}

static void requests_have_the_defaults_of_the_service(void **state) {
    (void)state;
    mt_tokenizer *tokenizer;
    mt_chat *chat;
    mt_service service = bytes_service(&tokenizer, &chat);
    mt_request r = read(&service, false, "{\"prompt\": \"ab\"}");
    assert_int_equal(r.num_prompts, 1);
    assert_int_equal(r.prompts[0].count, 3); // BOS is the first
    assert_int_equal(r.prompts[0].data[0], 7);
    assert_int_equal(r.max_new_tokens, 16);
    assert_int_equal(r.num_rivals, -1);
    assert_true(r.sampling.temperature == 0.5 && r.sampling.top_p == 0.75 && r.sampling.seed == 11 && !r.has_seed);
    mt_request_free(&r);
    r = read(&service, true, "{\"messages\": [{\"role\": \"user\", \"content\": \"ab\"}]}");
    assert_int_equal(r.max_new_tokens, 30); // the rest of the context
    mt_request_free(&r);
    r = read(&service, false,
             "{\"prompt\": [[1, 2], [3]], \"max_tokens\": 0, \"echo\": true, \"logprobs\": 5, \"seed\": -3, \"n\": 4,"
             " \"temperature\": 0, \"top_k\": -1, \"stop\": [\"x\", \"yz\"], \"user\": \"me\", \"suffix\": null}");
    assert_int_equal(r.num_prompts, 2);
    assert_int_equal(r.prompts[0].count, 2); // tokens are taken as they are
    assert_int_equal(r.max_new_tokens, 0);
    assert_int_equal(r.num_rivals, 5);
    assert_int_equal(r.stop.count, 2);
    assert_true(r.echo && r.has_seed && r.sampling.seed == (uint64_t)-3 && r.sampling.top_k == 0);
    mt_request_free(&r);
    close_service(tokenizer, chat);
}

static void refusals_name_the_field(void **state) {
    (void)state;
    mt_tokenizer *tokenizer;
    mt_chat *chat;
    mt_service service = bytes_service(&tokenizer, &chat);
    const struct {
        const char *body, *parameter, *words;
    } cases[] = {{"{\"prompt\": \"a\", \"max_tokens\": 40}", "max_tokens", "context of this server has 32"},
                 {"{\"prompt\": [257]}", "prompt", "outside the model's vocabulary of 257"},
                 {"{\"prompt\": [1, 2], \"n\": 9}", "n", "from 1 to 8"},
                 {"{\"prompt\": [[1], [2], [3]], \"n\": 4}", "n", "12 choices"},
                 {"{\"prompt\": \"a\", \"messages\": []}", NULL, "does not know"},
                 {"{\"prompt\": \"a\", \"presence_penalty\": 1}", "presence_penalty", "not supported"},
                 {"{\"prompt\": \"a\"", NULL, "cut short"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_request r;
        mt_request_error refusal;
        assert_int_equal(mt_request_read(&r, false, cases[i].body, (int64_t)strlen(cases[i].body), &service, &refusal),
                         -1);
        mt_request_free(&r);
        assert_int_equal(refusal.status, 400);
        if (!strstr(refusal.error.text, cases[i].words)) fail_msg("%s: %s", cases[i].body, refusal.error.text);
        assert_true(cases[i].parameter ? refusal.parameter && strcmp(refusal.parameter, cases[i].parameter) == 0
                                       : !refusal.parameter);
    }
    close_service(tokenizer, chat);
}

/* A server without a tokenizer takes tokens and returns them. */
static void without_a_tokenizer_prompts_are_tokens(void **state) {
    (void)state;
    const mt_service service = {.name = "model", .bos = -1, .context = 8, .vocab_size = 10, .max_choices = 2};
    mt_request r = read(&service, false, "{\"prompt\": [1, 2], \"max_tokens\": 3}");
    assert_true(r.returns_ids);
    mt_request_free(&r);
    const char *text = "{\"prompt\": \"ab\"}";
    mt_request_error refusal;
    assert_int_equal(mt_request_read(&r, false, text, (int64_t)strlen(text), &service, &refusal), -1);
    assert_non_null(strstr(refusal.error.text, "no tokenizer"));
    mt_request_free(&r);
}

static mt_text text_of(const char *from) {
    mt_text text = {0};
    mt_text_append(&text, from, (int64_t)strlen(from));
    return text;
}

static void calls_of_tools_are_taken_out_of_a_text(void **state) {
    (void)state;
    mt_text text = text_of("I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, 2]}}\n</tool_call>\n"
                           "<tool_call>{\"name\": \"g\"}</tool_call>");
    json_t *calls = mt_tool_calls_take(&text, 3, 1);
    assert_int_equal(json_array_size(calls), 2);
    const json_t *first = json_object_get(json_array_get(calls, 0), "function");
    assert_string_equal(json_string_value(json_object_get(first, "name")), "f");
    assert_string_equal(json_string_value(json_object_get(first, "arguments")), "{\"a\":[1,2]}");
    first = json_object_get(json_array_get(calls, 1), "function");
    assert_string_equal(json_string_value(json_object_get(first, "arguments")), "{}");
    assert_string_not_equal(json_string_value(json_object_get(json_array_get(calls, 0), "id")),
                            json_string_value(json_object_get(json_array_get(calls, 1), "id")));
    assert_int_equal(text.bytes, 7);
    assert_memory_equal(text.data, "I look.", 7);
    json_decref(calls);
    free(text.data);
    const char *const others[] = {"nothing", "<tool_call>{\"name\": 1}</tool_call>", "<tool_call>no JSON</tool_call>",
                                  "<tool_call", "<tool_call>"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        text = text_of(others[i]);
        assert_null(mt_tool_calls_take(&text, 0, 0));
        assert_int_equal(text.bytes, strlen(others[i]));
        free(text.data);
    }
    assert_int_equal(mt_tool_calls_begin("abc", 0, 3), 3);
    assert_int_equal(mt_tool_calls_begin("ab<tool", 0, 7), 2);
    assert_int_equal(mt_tool_calls_begin("ab<tool_call>x", 1, 14), 2);
    assert_int_equal(mt_tool_calls_begin("<tool_call>x", 5, 12), 12);
}

static void keys_and_places_are_read(void **state) {
    (void)state;
    mt_error error;
    assert_true(mt_keys_equal("key", "key"));
    assert_false(mt_keys_equal("key", "kez") || mt_keys_equal("key", "ke") || mt_keys_equal("key", "keykey") ||
                 mt_keys_equal("key", "") || mt_keys_equal("kk", "k"));
    const struct {
        const char *text, *address;
        int64_t port;
    } places[] = {{"8000", "127.0.0.1", 8000}, {"0.0.0.0:1", "0.0.0.0", 1}, {"[::1]:65535", "::1", 65535}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char *address;
        int64_t port;
        assert_int_equal(mt_serve_parse_place(places[i].text, &address, &port, &error), 0);
        assert_string_equal(address, places[i].address);
        assert_int_equal(port, places[i].port);
        free(address);
    }
    const char *const wrong[] = {"", ":", "x", ":80", "65536", "-1", "1 ", "::1:80", "[::1]", "[]:80", "a:b"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *address;
        int64_t port;
        if (mt_serve_parse_place(wrong[i], &address, &port, &error) == 0) fail_msg("accepted: %s", wrong[i]);
    }
}

/* The view keeps the log-probability of the next token, and the most probable tokens with theirs. */
static void scores_are_those_of_softmax(void **state) {
    (void)state;
    const float logits[] = {0.5f, -1, 2, 2, 0};
    int32_t tokens[] = {4, 0, 1};
    double sum = 0;
    mt_scores scores;
    for (int i = 0; i < 5; i++) sum += exp((double)logits[i]);
    mt_sequence sequence = {.tokens = tokens, .num_prompt = 2, .num_tokens = 3};
    mt_scores_begin(&scores, 1, 4, 3, 5);
    mt_scores_view(&scores, &sequence, 0, logits);
    mt_scores_view(&scores, &sequence, 2, logits); // no token follows
    assert_true(fabs((double)scores.logps[0] - (0.5 - log(sum))) < 1e-6);
    const int32_t best[] = {2, 3, 0};
    assert_memory_equal(scores.rivals, best, sizeof best);
    assert_true(fabs((double)scores.rival_logps[1] - (2 - log(sum))) < 1e-6);
    mt_scores_end(&scores);
}

static void counters_are_prometheus_text(void **state) {
    (void)state;
    mt_counters *counters = mt_counters_open();
    mt_counters_request(counters, "/a", 200), mt_counters_request(counters, "/a", 200);
    mt_counters_request(counters, "/a", 429);
    mt_counters_tokens(counters, 5, 6);
    mt_counters_time(counters, MT_LATENCY_STEP, 0.004), mt_counters_time(counters, MT_LATENCY_STEP, 1000);
    mt_text text = {0};
    mt_counters_print(counters, &text);
    mt_text_append(&text, "", 1);
    const char *const lines[] = {"megatron_requests_total{endpoint=\"/a\",status=\"200\"} 2\n",
                                 "megatron_requests_total{endpoint=\"/a\",status=\"429\"} 1\n",
                                 "# TYPE megatron_generated_tokens_total counter\nmegatron_generated_tokens_total 6\n",
                                 "megatron_step_seconds_bucket{le=\"0.0025\"} 0\n",
                                 "megatron_step_seconds_bucket{le=\"0.005\"} 1\n",
                                 "megatron_step_seconds_bucket{le=\"60\"} 1\n",
                                 "megatron_step_seconds_bucket{le=\"+Inf\"} 2\n",
                                 "megatron_step_seconds_sum 1000.004\n"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(text.data, lines[i])) fail_msg("%s is not in %s", lines[i], text.data);
    free(text.data);
    mt_counters_close(counters);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_have_the_defaults_of_the_service),
        cmocka_unit_test(refusals_name_the_field),
        cmocka_unit_test(without_a_tokenizer_prompts_are_tokens),
        cmocka_unit_test(calls_of_tools_are_taken_out_of_a_text),
        cmocka_unit_test(keys_and_places_are_read),
        cmocka_unit_test(scores_are_those_of_softmax),
        cmocka_unit_test(counters_are_prometheus_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
