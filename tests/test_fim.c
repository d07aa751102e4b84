/* test_fim.c: filling in the middle against Megatron-LM's own code. */
#include "data/datasets/fim.h"
#include "data/options/option_table.h"
#include "data/options/option_reader.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void skip_without_libraries(void) {
#if !defined MT_HAVE_PCRE2 || !defined MT_HAVE_UTF8PROC
    printf("skipped: built without PCRE2 or utf8proc\n");
    skip();
#endif
}

static mt_tokenizer *open_tokenizer(void) {
    mt_tokenizer *tokenizer;
    mt_error error;
    if (mt_tokenizer_open(&tokenizer, MT_TOKENIZER_HUGGINGFACE, "tests/golden/tokenizer/bytelevel.json", &error) != 0)
        fail_msg("%s", error.text);
    return tokenizer;
}

/* Options with tokens of that tokenizer. */
static void set_options(mt_run_options *o, const char *split, const char *no_prefix) {
    const char *settings[][2] = {{"fim-prefix-token", "<x>"}, {"fim-middle-token", "WORD"}, {"fim-suffix-token", "!"},
                                 {"fim-pad-token", "#"},      {"fim-fragment-rate", "0.7"}, {"fim-split-sample", split},
                                 {"fim-no-prefix", no_prefix}};
    mt_error error;
    mt_options_default(o);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (*settings[i][1] && mt_options_set(o, settings[i][0], settings[i][1], &error) != 0)
            fail_msg("%s", error.text);
}

/* Recorded draws. */
typedef struct record {
    const json_t *draws;
    size_t at;
} record;

static bool decide(void *context, double rate) {
    record *r = context;
    assert_true(rate > 0 && rate <= 1 && r->at < json_array_size(r->draws));
    return json_integer_value(json_array_get(r->draws, r->at++)) != 0;
}

static int64_t place(void *context, int64_t largest) {
    record *r = context;
    assert_true(r->at < json_array_size(r->draws));
    int64_t drawn = json_integer_value(json_array_get(r->draws, r->at++));
    assert_true(drawn <= largest);
    return drawn;
}

static int64_t read_tokens(int32_t *tokens, int64_t room, const json_t *list) {
    int64_t count = (int64_t)json_array_size(list);
    assert_true(count <= room);
    for (int64_t i = 0; i < count; i++) tokens[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return count;
}

static void samples_are_those_of_megatron_for_its_draws(void **state) {
    (void)state;
    skip_without_libraries();
    mt_tokenizer *tokenizer = open_tokenizer();
    json_error_t damage;
    json_t *cases = json_load_file("tests/golden/megatron/fim.json", 0, &damage), *c;
    size_t i;
    assert_true(json_array_size(cases) == 30);
    json_array_foreach(cases, i, c) {
        enum { ROOM = 1000 };
        int32_t tokens[ROOM], expected[ROOM];
        mt_run_options o;
        mt_fim *fim;
        mt_error error;
        bool splits = json_is_true(json_object_get(c, "split"));
        set_options(&o, splits ? "." : "", json_string_value(json_object_get(c, "no_prefix")));
        if (mt_fim_open(&fim, &o, tokenizer, &error) != 0) fail_msg("%s", error.text);
        int64_t count = read_tokens(tokens, ROOM, json_object_get(c, "tokens"));
        assert_int_equal(read_tokens(expected, ROOM, json_object_get(c, "expected")), count);
        record r = {.draws = json_object_get(c, "draws")};
        const mt_fim_draws draws = {decide, place, &r};
        if (mt_fim_permute(fim, tokens, count, &draws, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(r.at, json_array_size(r.draws)); // as many, and in this order
        for (int64_t t = 0; t < count; t++)
            if (tokens[t] != expected[t])
                fail_msg("case %zu, token %lld: %d, not %d", i, (long long)t, tokens[t], expected[t]);
        mt_fim_close(fim);
        mt_options_free(&o);
    }
    json_decref(cases);
    mt_tokenizer_close(tokenizer);
}

/* The rates and the places of many samples; the same number has the same sample. */
static void draws_depend_on_the_seed_and_the_number(void **state) {
    (void)state;
    skip_without_libraries();
    enum { COUNT = 40, SAMPLES = 4000 };
    mt_tokenizer *tokenizer = open_tokenizer();
    mt_run_options o;
    mt_fim *fim, *other;
    mt_error error;
    int32_t text[COUNT], first[COUNT], again[COUNT];
    set_options(&o, "", "");
    o.fim_rate = 0.25, o.fim_spm_rate = 0.75;
    assert_int_equal(mt_fim_open(&fim, &o, tokenizer, &error), 0);
    o.stack.seed++;
    assert_int_equal(mt_fim_open(&other, &o, tokenizer, &error), 0);
    for (int i = 0; i < COUNT; i++) text[i] = mt_tokenizer_find(tokenizer, i % 2 ? "a" : "b", 1);
    int32_t prefix = mt_tokenizer_find(tokenizer, "<x>", 3), suffix = mt_tokenizer_find(tokenizer, "!", 1);
    int cut = 0, suffix_first = 0, same = 0;
    for (int64_t number = 0; number < SAMPLES; number++) {
        memcpy(first, text, sizeof text), memcpy(again, text, sizeof text);
        assert_int_equal(mt_fim_apply(fim, first, COUNT, number, &error), 0);
        assert_int_equal(mt_fim_apply(other, again, COUNT, number, &error), 0);
        same += memcmp(first, again, sizeof first) == 0;
        memcpy(again, text, sizeof text);
        assert_int_equal(mt_fim_apply(fim, again, COUNT, number, &error), 0);
        assert_memory_equal(first, again, sizeof first);
        cut += first[0] == prefix, suffix_first += first[0] == prefix && first[1] == suffix;
    }
    assert_true(cut > SAMPLES / 4 - 200 && cut < SAMPLES / 4 + 200);                   // 7 standard deviations
    assert_true(suffix_first > cut * 3 / 4 - 100 && suffix_first < cut * 3 / 4 + 150); // also of an empty prefix
    assert_true(same < SAMPLES * 3 / 4);
    mt_fim_close(fim), mt_fim_close(other);
    mt_options_free(&o);
    mt_tokenizer_close(tokenizer);
}

static void tokens_that_are_absent_are_errors(void **state) {
    (void)state;
    skip_without_libraries();
    mt_tokenizer *tokenizer = open_tokenizer();
    mt_run_options o;
    mt_fim *fim;
    mt_error error;
    set_options(&o, "several tokens", "");
    assert_int_equal(mt_fim_open(&fim, &o, tokenizer, &error), -1);
    assert_string_equal(error.text,
                        "--fim-split-sample 'several tokens' is no token of the tokenizer; name one of its tokens");
    assert_int_equal(mt_fim_open(&fim, &o, NULL, &error), -1);
    assert_non_null(strstr(error.text, "--fim-data needs a tokenizer"));
    mt_options_free(&o);
    mt_options_default(&o);
    assert_int_equal(mt_fim_open(&fim, &o, tokenizer, &error), -1);
    assert_string_equal(error.text,
                        "--fim-prefix-token '<fim_prefix>' is no token of the tokenizer; name one of its tokens");
    mt_options_free(&o);
    mt_tokenizer_close(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(samples_are_those_of_megatron_for_its_draws),
                                       cmocka_unit_test(draws_depend_on_the_seed_and_the_number),
                                       cmocka_unit_test(tokens_that_are_absent_are_errors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
