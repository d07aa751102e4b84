/* test_rewards.c: rewards by comparing answers, by patterns, and by programs that behave and misbehave. */
#include "data/base/file.h"
#include "data/learn/rewards.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "folder.h"

static mt_reward_item item_of(const char *response, const char *answer) {
    return (mt_reward_item){"p", response, answer, 1, (int64_t)strlen(response), answer ? (int64_t)strlen(answer) : 0};
}

static mt_reward_function *open_reward(mt_reward_kind kind, const char *argument, double seconds) {
    mt_reward_function *reward;
    mt_error error;
    if (mt_reward_open(&reward, kind, argument, seconds, &error) != 0) fail_msg("%s", error.text);
    return reward;
}

/* The score of one response. */
static double score(mt_reward_function *reward, const char *response, const char *answer) {
    mt_reward_item item = item_of(response, answer);
    double value = NAN;
    mt_error error;
    if (mt_rewards_compute(reward, &item, 1, &value, &error) != 0) fail_msg("%s", error.text);
    return value;
}

static void assert_says(const mt_error *error, const char *words) {
    if (!strstr(error->text, words)) fail_msg("\"%s\" does not say \"%s\"", error->text, words);
    assert_null(strchr(error->text, '\n'));
}

/* ---- comparing -------------------------------------------------------------------------------------------------- */

static void exact_compares_texts(void **state) {
    (void)state;
    mt_reward_function *r = open_reward(MT_REWARD_EXACT, NULL, 1);
    assert_true(score(r, " a b\n", "a b") == 1 && score(r, "a b", "\ta b ") == 1 && score(r, "", " ") == 1);
    assert_true(score(r, "a  b", "a b") == 0 && score(r, "A", "a") == 0 && score(r, "", "a") == 0);
    mt_reward_item item = item_of("x", NULL);
    double value;
    mt_error error;
    assert_int_equal(mt_rewards_compute(r, &item, 1, &value, &error), -1);
    assert_says(&error, "has no answer");
    mt_reward_close(r);
}

static const struct {
    const char *response, *answer;
    double score;
} number_cases[] = {
    {"12", "12", 1},
    {"it is 12.", "12", 1},
    {"1,000", "1000", 1},
    {"1000", "1,000", 1},
    {"1,234,567.5", "1234567.5", 1},
    {"1e3", "1000", 1},
    {"2.5E-1", "0.25", 1},
    {"0.5", ".50", 1},
    {"1/2", "0.5", 1},
    {"2/6", "1/3", 1},
    {"0.333", "1/3", 0},
    {"\\frac{1}{2}", "0.5", 1},
    {"-\\dfrac{3}{4}", "-.75", 1},
    {"\\frac{-3}{4}", "-.75", 1},
    {"1/0", "0", 0},
    {"\\frac{1}{0}", "0", 0},
    {"\\boxed{2\\frac{1}{2}}", "2.5", 1},
    {"\\boxed{2\\frac{1}{2}}", "0.5", 0},
    {"-2 \\tfrac{1}{2}", "-2.5", 1},
    {"2\\,\\frac{1}{2}", "2.5", 1},
    {"2 1/2", "2.5", 1},
    {"it is 3 and 1/2", "0.5", 1},
    {"2\\frac{3}{2}", "1.5", 0}, // a product?
    {"\\frac12", "0.5", 1},
    {"\\frac 1 2", "0.5", 1},
    {"\\frac{1}2", "0.5", 1},
    {"\\frac1{72}", "1/72", 1},
    {"\\dfrac{ 1 }{ 1{,}000 }", "0.001", 1},
    {"2\\frac12", "2.5", 1},
    {"1{,}000", "1000", 1},
    {"1,\\!000,\\!000", "1000000", 1},
    {"12\\,345", "12345", 1},
    {"1{,}00", "1", 1}, // a decimal comma
    {"3{,}14", "3.14", 1},
    {"3{,}14", "14", 0},
    {"10{.}5", "10.5", 1},
    {"\\frac{\\pi}{2}", "2", 0},
    {"\\frac{\\sqrt{3}}{2}", "2", 0},
    {"2\\sqrt{3}", "3", 0},
    {"2\\sqrt{3}", "2", 0},
    {"\\sqrt[3]{8}", "8", 0},
    {"0.\\overline{3}", "3", 0},
    {"0.\\overline{3}", "0", 0},
    {"0.1\\overline{6}", "6", 0},
    {"0.\\dot{3}", "3", 0},
    {"\\binom{5}{2}", "2", 0},
    {"3\\binom{5}{2}", "3", 0},
    {"2e^{3}", "2", 0},
    {"10\xC2\xB2", "10", 0},
    {"10\xE2\x81\xBB\xC2\xB3", "10", 0},
    {"1011\xE2\x82\x82", "1011", 0},
    {"12 cm\xC2\xB2", "12", 1},
    {"2\xC2\xBD", "2", 0},
    {"2\xC2\xBD", "2.5", 1},
    {"\xE2\x85\x94", "2/3", 1},
    {"1 / 2", "0.5", 1},
    {"1 / 2", "2", 0},
    {"2 1 / 2", "2.5", 1},
    {"\\boxed{2+\\frac{1}{2}}", "0.5", 0},
    {"\\boxed{3 \\times 4}", "4", 0},
    {"\\boxed{3+4}", "4", 0},
    {"\\boxed{(3, 4)}", "4", 0},
    {"\\boxed{3+4 = 7}", "7", 1},
    {"\\boxed{f(2) = -5}", "-5", 1},
    {"\\boxed{12\\text{ m}^2}", "12", 1},
    {"\\boxed{- 5}", "-5", 1},
    {"x = - 5", "-5", 1},
    {"x = \xE2\x88\x92 5", "-5", 1},
    {"\xE2\x80\x93"
     "5",
     "-5", 1},
    {"(- 5)", "-5", 1},
    {"8 - 5", "5", 1},
    {"- 5 apples", "5", 1}, // a list
    {"12~345", "12345", 1},
    {"12\\ 345", "12345", 1},
    {"12\xE2\x80\xAF"
     "345",
     "12345", 1},
    {"12 345", "345", 1},
    {"\\sqrt{16} = 4", "4", 1},
    {"2\\pi", "2", 0},
    {"2^{10}", "10", 0},
    {"2^{10}", "2", 0},
    {"1011_2", "2", 0},
    {"12 cm^2", "12", 1},
    {"12 \\text{ m}^{2}", "12", 1},
    {"x_1 = 5", "5", 1},
    {"90^\\circ", "90", 1},
    {"90^{\\circ}", "90", 1},
    {"$12", "12", 1},
    {"-$12", "-12", 1},
    {"$-12", "-12", 1},
    {"\\$12.00", "12", 1},
    {"12%", "12", 1},
    {"-5", "5", 0},
    {"x = -5", "-5", 1},
    {"\xe2\x88\x92"
     "5",
     "-5", 1},
    {"8-5", "5", 1},
    {"The answer is negative 5.", "-5", 1},
    {"The answer is minus 5 degrees", "5", 0},
    {"\\boxed{\\text{negative } \\frac{1}{2}}", "-0.5", 1},
    {"so 7 minus 5", "5", 1},
    {"any non-negative 5", "5", 1},
    {"the value 0x1f", "1", 0},
    {"The answer is 0x10.", "10", 0},
    {"It is 2*3", "3", 0},
    {"It is 2**10", "10", 0},
    {"It is 2x3", "3", 0},
    {"It is **5**", "5", 1},
    {"8 -5", "-5", 1},
    {"(8)-5", "5", 1},
    {"1,2", "2", 1},
    {"1,2345", "2345", 1},
    {"12,34,567", "34567", 1},
    {"1234,567", "567", 1},
    {"007", "7", 1},
    {"-0", "0", 1},
    {"12 and 13", "13", 1},
    {"12 and 13", "12", 0},
    {"\\boxed{12} then 13", "12", 1},
    {"\\boxed{11} \\boxed{12} 13", "12", 1},
    {"\\boxed{\\frac{1}{2}} 13", "0.5", 1},
    {"\\boxed{x = {3}} 13", "3", 1},
    {"\\boxed{none} 13", "13", 0}, // the box counts
    {"\\boxed{} 13", "13", 0},
    {"\\boxed{11} \\boxed{12", "11", 1}, // the last one is not closed
    {"", "1", 0},
    {"no number", "1", 0},
    {".", "0", 0},
    {"12345678901234567890", "12345678901234567891", 0},
    {"2", "#### 2", 1},
    {"2", "1 + 1 = \\boxed{2}", 1},
    {"\\boxed{3.5\\times10^{6}}", "3500000", 1},
    {"1.2 \\cdot 10^{-5}", "0.000012", 1},
    {"-1.5 \xC3\x97 10^3", "-1500", 1},
    {"10\xC2\xB3", "1000", 1},
    {"\\boxed{10^{2x}}", "100", 0},
    {"\\boxed{3\\times10^2\\times10^3}", "300", 0},
    {"2\\times 3", "3", 0},
    {"\\nicefrac{1}{2}", "0.5", 1},
    {"\\frac{{1}}{{2}}", "0.5", 1},
    {"{1 \\over 2}", "0.5", 1},
    {"\\pi \\over 2", "2", 0},
    {"1/-2", "-0.5", 1},
    {"-(5)", "-5", 1},
    {"{-}5", "-5", 1},
    {"-{5}", "-5", 1},
    {"- \\frac{1}{2}", "-0.5", 1},
    {"\\boxed{-\\left(\\frac{1}{2}\\right)}", "-0.5", 1},
    {"\\pi/4", "4", 0},
    {"3/\\pi", "3", 0},
    {"2pi", "2", 0},
    {"\\frac{1}{2}x", "0.5", 0},
    {"3i", "3", 0},
    {"0.333...", "0.333", 0},
    {"0.3333\\ldots", "0.3333", 0},
    {"\\log_2 8", "8", 0},
    {"\\log_{10}(100)", "100", 0},
    {"\\sin(30^\\circ)", "30", 0},
    {"\\sqrt{2+3}", "3", 0},
    {"sqrt(2)", "2", 0},
    {"\\lfloor 3.7 \\rfloor", "3.7", 0},
    {"3:4", "4", 0},
    {"x = \\pm 5", "5", 0},
    {"\\boxed{\\pm 5}", "5", 0},
    {"\\boxed{5!}", "5", 0},
    {"\\boxed{2x}", "2", 0},
    {"\\boxed{2e}", "2", 0},
    {"\\boxed{x+3}", "3", 0},
    {"\\boxed{x \\geq 5}", "5", 0},
    {"\\boxed{(-\\infty, 5)}", "5", 0},
    {"\\boxed{x=3, y=5}", "5", 0},
    {"\\boxed{x=3 \\text{ or } x=5}", "5", 0},
    {"\\boxed{x = y = 5}", "5", 1},
    {"\\boxed{f(1,2) = 5}", "5", 1},
    {"\\boxed{\\gcd(5)}", "5", 0},
    {"\\boxed 5, for 2 + 3 is 5.5", "5", 1},
    {"\\fbox{5} 3", "5", 1},
    {"\\boxed{\\textbf{(B) } 12}", "12", 1},
    {"\\boxed{12\\,\\text{m/s}^2}", "12", 1},
    {"\\boxed{\\text{about } \\$1{,}250.50}", "1250.5", 1},
    {"\\boxed{9.8\\,\\mathrm{m\\,s^{-2}}}", "9.8", 1},
    {"\\boxed{\\text{-5}}", "-5", 1},
    {"List:\n- 5 apples", "5", 1},
    {"<answer>-5</answer>", "-5", 1},
    {"it is 5\n#### 7", "7", 1},
    {"1.", "1", 1},
    {"1e", "1", 1},
    {"1e+", "1", 1},
    {"1/", "1", 1},
};

static void number_compares_numbers(void **state) {
    (void)state;
    mt_reward_function *r = open_reward(MT_REWARD_NUMBER, NULL, 1);
    for (size_t i = 0; i < sizeof number_cases / sizeof *number_cases; i++)
        if (score(r, number_cases[i].response, number_cases[i].answer) != number_cases[i].score)
            fail_msg("\"%s\" for \"%s\" is not %g", number_cases[i].response, number_cases[i].answer,
                     number_cases[i].score);
    char digits[400]; // longer than any buffer
    memset(digits, '9', sizeof digits - 1);
    digits[sizeof digits - 1] = 0;
    score(r, digits, "9");
    digits[1] = '.';
    score(r, digits, "9");
    mt_reward_item item = item_of("1", "one");
    double value;
    mt_error error;
    assert_int_equal(mt_rewards_compute(r, &item, 1, &value, &error), -1);
    assert_says(&error, "\"one\" has no number, ");
    mt_reward_close(r);
}

/* An answer is one number. Of an expression that is not computed, no number may stand for it in silence. */
static void answers_that_are_no_number_are_refused(void **state) {
    (void)state;
    static const char *const numbers[] = {"5",
                                          "-5",
                                          "x = 5",
                                          "5 apples",
                                          "5\\text{ cm}^2",
                                          "$5",
                                          "5\\%",
                                          "5^\\circ",
                                          "\\$5",
                                          "\\frac{1}{2}",
                                          "2 1/2",
                                          "10^3",
                                          "So #### 5",
                                          "5.",
                                          "[5]",
                                          "\\boxed{5} of 6",
                                          "3+4=7",
                                          "\"5\"",
                                          "5 hours",
                                          "6.0 \\times 10^{23}",
                                          "There are 3 cats and 4 dogs, thus 7 pets. The answer is 7."};
    static const char *const others[] = {"(3, 5)",
                                         "3, 5",
                                         "x=3 or x=5",
                                         "3+5",
                                         "x>5",
                                         "x+3",
                                         "3x",
                                         "2\\pi",
                                         "\\pm 5",
                                         "3:4",
                                         "[0, 5)",
                                         "5!",
                                         "\\{3,5\\}",
                                         "x^2",
                                         "2^{10}",
                                         "between 3 and 5",
                                         "A",
                                         "\\sqrt{2}",
                                         "\\frac{5}{x}",
                                         "-1<x<5",
                                         "y = 2x + 5",
                                         "\\boxed{(3, 5)}",
                                         "5 or 7",
                                         "\\log_2 8",
                                         "|x-5|",
                                         ""};
    mt_error error;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (mt_reward_check_number(numbers[i], (int64_t)strlen(numbers[i]), &error) != 0) fail_msg("%s", error.text);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (mt_reward_check_number(others[i], (int64_t)strlen(others[i]), &error) == 0)
            fail_msg("\"%s\" is taken for a number", others[i]);
        assert_says(&error, "has no number, several, or one in an expression; ");
    }
}

#ifdef MT_HAVE_PCRE2
/* An exponential pattern ends at PCRE2's limit. That is no match, said once. */
static void a_response_that_takes_too_long_is_reported(void) {
    char said[512] = "";
    FILE *captured = tmpfile();
    int before = dup(2);
    assert_non_null(captured);
    mt_reward_function *r = open_reward(MT_REWARD_REGEX, "^(a+)+$", 1);
    dup2(fileno(captured), 2);
    double none = score(r, "b", NULL);
    long quiet = ftell(captured);
    double first = score(r, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", NULL);
    double second = score(r, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", NULL);
    double match = score(r, "aa", NULL);
    dup2(before, 2);
    close(before);
    mt_reward_close(r);
    rewind(captured);
    said[fread(said, 1, sizeof said - 1, captured)] = 0;
    fclose(captured);
    assert_true(none == 0 && quiet == 0 && first == 0 && second == 0 && match == 1);
    assert_non_null(strstr(said, "\"^(a+)+$\" gave up on a response of 48 bytes"));
    assert_ptr_equal(strchr(said, '\n'), said + strlen(said) - 1);
}
#endif

static void regex_matches_patterns(void **state) {
    (void)state;
    mt_reward_function *r;
    mt_error error;
#ifdef MT_HAVE_PCRE2
    r = open_reward(MT_REWARD_REGEX, "^<think>.*</think>\\s*(yes|no)$", 1);
    assert_true(score(r, "<think>a</think> yes", NULL) == 1 && score(r, "yes", NULL) == 0);
    mt_reward_close(r);
    r = open_reward(MT_REWARD_REGEX, "<a>(?<answer>.*?)</a>", 1);
    assert_true(score(r, "<a>1</a><a> 2 </a>", "2") == 1 && score(r, "<a>2</a><a>1</a>", "2") == 0);
    assert_true(score(r, "2", "2") == 0 && score(r, "", "") == 0 && score(r, "<a></a>", "") == 1);
    assert_true(score(r, "\xff<a>\xc3\xa9</a>\xe2\x82", "\xc3\xa9") == 1); // ill-formed UTF-8 around it
    mt_reward_close(r);
    r = open_reward(MT_REWARD_REGEX, "(?<answer>x*)", 1); // empty matches
    assert_true(score(r, "\xc3\xa9xx\xc3\xa9", "") == 1);
    mt_reward_close(r);
    a_response_that_takes_too_long_is_reported();
    assert_int_equal(mt_reward_open(&r, MT_REWARD_REGEX, "(", 1, &error), -1);
    assert_says(&error, "\"(\"");
#else
    assert_int_equal(mt_reward_open(&r, MT_REWARD_REGEX, "a", 1, &error), -1);
    assert_says(&error, "needs PCRE2");
#endif
    assert_null(r);
    assert_int_equal(mt_reward_open(&r, MT_REWARD_REGEX, NULL, 1, &error), -1);
    assert_says(&error, "needs a pattern");
}

/* ---- commands --------------------------------------------------------------------------------------------------- */

/* No child is left, not even as a zombie. */
static void assert_no_child(void) {
    assert_true(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
}

/* A command that fails on `count` responses of `bytes` bytes; its error. Commands that sleep do so for a day: a run
 * that waited for their end would be stopped by the runner. */
static mt_error expect_failure(const char *command, int64_t count, int64_t bytes, double seconds, const char *words) {
    mt_reward_function *r = open_reward(MT_REWARD_COMMAND, command, seconds);
    mt_reward_item *items = mt_calloc(count * (int64_t)sizeof *items);
    double *scores = mt_calloc(count * 8);
    char *text = mt_malloc(bytes + 1);
    mt_error error, again;
    sigset_t pending;
    memset(text, 'x', (size_t)bytes);
    text[bytes] = 0;
    for (int64_t i = 0; i < count; i++) items[i] = item_of(text, "1");
    int status = mt_rewards_compute(r, items, count, scores, &error);
    if (status == 0) fail_msg("%s gave scores", command);
    assert_says(&error, words);
    assert_says(&error, command);
    sigpending(&pending);
    assert_false(sigismember(&pending, SIGPIPE));
    assert_no_child();
    assert_int_equal(mt_rewards_compute(r, items, count, scores, &again), -1);
    assert_says(&again, "has ended");
    mt_reward_close(r);
    free(items);
    free(scores);
    free(text);
    return error;
}

static void a_command_gets_lines_of_json(void **state) {
    (void)state;
    char command[600];
    snprintf(command, sizeof command, "while IFS= read -r l; do printf '%%s\\n' \"$l\" >>%s; echo ' 2.5e-1\r'; done",
             at("lines"));
    mt_reward_function *r = open_reward(MT_REWARD_COMMAND, command, 10);
    mt_reward_item items[] = {{"p\"\\\n", "a\0b\x01\xff", "1", 4, 5, 1}, {"", "\xc3\xa9", NULL, 0, 2, 0}};
    double scores[2];
    mt_error error;
    for (int i = 0; i < 2; i++) { // the same process
        if (mt_rewards_compute(r, items, 2, scores, &error) != 0) fail_msg("%s", error.text);
        assert_true(scores[0] == 0.25 && scores[1] == 0.25);
    }
    if (mt_rewards_compute(r, items, 0, scores, &error) != 0) fail_msg("%s", error.text);
    mt_reward_close(r);
    assert_no_child();
    FILE *file = fopen(at("lines"), "r");
    assert_non_null(file);
    char line[256];
    for (int i = 0; i < 4; i++) {
        assert_non_null(fgets(line, sizeof line, file));
        json_t *object = json_loads(line, JSON_ALLOW_NUL, NULL);
        const json_t *response = json_object_get(object, "response"), *answer = json_object_get(object, "answer");
        assert_int_equal(json_object_size(object), 3);
        assert_string_equal(json_string_value(json_object_get(object, "prompt")), i % 2 ? "" : "p\"\\\n");
        if (i % 2)
            assert_true(json_is_null(answer));
        else
            assert_string_equal(json_string_value(answer), "1");
        assert_int_equal(json_string_length(response), i % 2 ? 2 : 7);
        assert_memory_equal(json_string_value(response), i % 2 ? "\xc3\xa9" : "a\0b\x01\xef\xbf\xbd", i % 2 ? 2 : 7);
        json_decref(object);
    }
    assert_null(fgets(line, sizeof line, file));
    fclose(file);
}

/* 10,000 responses of 300 bytes: answered one by one, and all at once after the last one. */
static void a_command_gets_many_responses(void **state) {
    (void)state;
    enum { COUNT = 10000 };
    static mt_reward_item items[COUNT];
    static char answers[COUNT][16], response[301];
    static double scores[COUNT];
    static const char *const commands[] = {
        "sed -u 's/.*\"answer\": \"\\(.*\\)\".*/\\1/'",
        "sed -un 's/.*\"answer\": \"\\(.*\\)\".*/\\1/; H; 0~10000 { x; s/^\\n//p; s/.*//; x }'"};
    mt_error error;
    memset(response, 'y', 300);
    for (int i = 0; i < COUNT; i++) {
        snprintf(answers[i], sizeof answers[i], "%d", i);
        items[i] = item_of(response, answers[i]);
    }
    for (int c = 0; c < 2; c++) {
        mt_reward_function *r = open_reward(MT_REWARD_COMMAND, commands[c], 60);
        for (int round = 0; round < 2; round++) {
            memset(scores, 0, sizeof scores);
            if (mt_rewards_compute(r, items, COUNT, scores, &error) != 0) fail_msg("%s", error.text);
            for (int i = 0; i < COUNT; i++) assert_true(scores[i] == i);
        }
        mt_reward_close(r);
        assert_no_child();
    }
}

static void a_command_that_dies_is_an_error(void **state) {
    (void)state;
    expect_failure("for i in 1 2 3; do read -r l; echo 1; done; exit 3", 10, 10, 10,
                   "exit status 3 after 3 answers to 10");
    expect_failure("read -r l; kill -9 $$", 2, 10, 10, "signal 9");
    expect_failure("mt-no-such-program", 2, 10, 10, "exit status 127 (the shell did not find it)");
    expect_failure("true", 100, 100000, 10, "exit status 0 after 0 answers to 100"); // writes to it fail
    expect_failure("exec <&-; sleep 86400", 100, 100000, 0.5, "hangs");
    expect_failure("exec >&-; sleep 86400", 2, 10, 10, "closed its output");
    mt_reward_function *r = open_reward(MT_REWARD_COMMAND, "read -r l; echo 1; exit 4", 10); // after its answer
    assert_true(score(r, "x", "1") == 1);
    mt_reward_item item = item_of("x", "1");
    double value;
    mt_error error;
    assert_int_equal(mt_rewards_compute(r, &item, 1, &value, &error), -1);
    assert_says(&error, "exit status 4 after 0 answers to 1 ");
    mt_reward_close(r);
    assert_no_child();
}

static void a_command_that_hangs_is_an_error(void **state) {
    (void)state;
    char command[600], process[32] = "", path[64];
    expect_failure("while read -r l; do sleep 86400; done", 2, 10, 0.3, "0 answers to 2 responses in 0.3 s");
    expect_failure("sleep 86400", 100, 100000, 0.3, "0 answers to 100 responses in 0.3 s"); // its input is full
    expect_failure("trap '' TERM INT HUP; read -r l; echo 1; while :; do sleep 1; done", 2, 10, 0.3,
                   " answers to 2 responses in 0.3 s"); // one, if it is quick enough
    snprintf(command, sizeof command, "sleep 86400 >/dev/null & echo $! >%s; exec >&-; wait", at("child"));
    expect_failure(command, 1, 10, 10, "closed its output");
    FILE *file = fopen(at("child"), "r"); // the command's child has ended too
    assert_non_null(file);
    assert_non_null(fgets(process, sizeof process, file));
    fclose(file);
    snprintf(path, sizeof path, "/proc/%d/stat", atoi(process));
    char stat[256] = "";
    for (int i = 0; i < 100; i++) {
        if (kill(atoi(process), 0) != 0) return;
        if ((file = fopen(path, "r"))) { // waits for another process to reap it
            char *state_of = fgets(stat, sizeof stat, file) ? strrchr(stat, ')') : NULL;
            fclose(file);
            if (state_of && state_of[2] == 'Z') return;
        }
        usleep(10000);
    }
    fail_msg("the command's child %s still runs", process);
}

static void a_command_that_writes_no_number_is_an_error(void **state) {
    (void)state;
    static const char *const lines[] = {"hello", "nan",   "inf",   "-inf",     "1 2",    "",
                                        "1,5",   "0x",    "1e999", "true",     "0x10",   "1e31",
                                        "-1e31", "1e306", "0X1p4", "infinity", "nan(1)", "1 e3"};
    char command[200], words[64];
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        snprintf(command, sizeof command, "read -r l; echo 1; read -r l; echo '%s'; sleep 86400", lines[i]);
        snprintf(words, sizeof words, "wrote \"%s\" as line 2", lines[i]);
        expect_failure(command, 2, 10, 10, words);
    }
    expect_failure("read -r l; printf '1\\n2'; sleep 86400", 1, 10, 10, "more lines"); // one write
    // a line before its response, which does not fit into the pipe
    expect_failure("echo 1; sleep 0.3; cat >/dev/null", 2, 200000, 10, "wrote more lines than it got");
    expect_failure("yes x | tr -d '\\n'", 1, 10, 10, "wrote \"xxxx"); // a line without end
    expect_failure("yes 1", 1, 10, 10, "more lines");
    expect_failure("read -r l; printf '1\\n2\\n'; sleep 86400", 1, 10, 10,
                   "wrote more lines than it got"); // in one read
    mt_reward_function *r = open_reward(MT_REWARD_COMMAND, "echo started; cat >/dev/null", 10);
    usleep(200000);
    mt_reward_item item = item_of("x", "1");
    double value;
    mt_error error;
    assert_int_equal(mt_rewards_compute(r, &item, 1, &value, &error), -1);
    mt_reward_close(r);
    assert_int_equal(mt_reward_open(&r, MT_REWARD_COMMAND, "", 1, &error), -1);
    assert_says(&error, "needs a command");
}

/* A line after the last answer may be written after the call that takes this answer; the next call sees it. */
static void a_line_after_the_last_answer_is_an_error(void **state) {
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "read -r l; echo 1; echo 2; : >%s; sleep 86400", at("written"));
    mt_reward_function *r = open_reward(MT_REWARD_COMMAND, command, 10);
    mt_reward_item item = item_of("x", "1");
    double value;
    mt_error error;
    int status = mt_rewards_compute(r, &item, 1, &value, &error);
    if (status == 0) {
        while (access(at("written"), F_OK) != 0) usleep(1000);
        status = mt_rewards_compute(r, &item, 1, &value, &error);
    }
    assert_int_equal(status, -1);
    assert_says(&error, "wrote more lines than it got");
    mt_reward_close(r);
    assert_no_child();
}

/* The third one ends with neither its input nor a signal. */
static void closing_ends_every_command(void **state) {
    (void)state;
    static const char *const commands[] = {"cat >/dev/null", "true", "trap '' TERM HUP; while :; do sleep 1; done"};
    for (int i = 0; i < 3; i++) {
        mt_reward_close(open_reward(MT_REWARD_COMMAND, commands[i], 10));
        assert_no_child();
    }
    mt_reward_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_compares_texts),
        cmocka_unit_test(number_compares_numbers),
        cmocka_unit_test(answers_that_are_no_number_are_refused),
        cmocka_unit_test(regex_matches_patterns),
        cmocka_unit_test(a_command_gets_lines_of_json),
        cmocka_unit_test(a_command_gets_many_responses),
        cmocka_unit_test(a_command_that_dies_is_an_error),
        cmocka_unit_test(a_command_that_hangs_is_an_error),
        cmocka_unit_test(a_command_that_writes_no_number_is_an_error),
        cmocka_unit_test(a_line_after_the_last_answer_is_an_error),
        cmocka_unit_test(closing_ends_every_command),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
