/* test_sft.c: JSON Lines become samples: their tokens, the tokens that the loss counts, lengths, and bad lines. */
#include "data/datasets/sft.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "folder.h"

/* The samples of lines that are written into a file; `config` lacks paths. With the tokenizer ByteLevel and the
 * template plain, a token is a byte, and 256 ends a response. */
static int read_lines(mt_samples *samples, mt_sft_config config, const char *lines, mt_error *error) {
    char *paths[] = {(char *)at("x.jsonl")};
    mt_tokenizer *tokenizer;
    FILE *file = fopen(paths[0], "wb");
    assert_non_null(file);
    fputs(lines, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, error), 0);
    config.paths = (mt_strings){1, paths};
    if (!config.vocab_size) config.vocab_size = 257;
    if (!config.seq_length) config.seq_length = 1000;
    if (!config.chat_template) config.chat_template = MT_CHAT_PLAIN;
    int status = mt_samples_read(samples, &config, tokenizer, error);
    mt_tokenizer_close(tokenizer);
    return status;
}

/* Sample `s` as text: '|' ends a document, and trained tokens stand in brackets. */
static const char *sample_text(const mt_samples *samples, int64_t s) {
    static char text[4096];
    char *to = text;
    bool open = false;
    for (int64_t t = samples->offsets[s]; t < samples->offsets[s + 1]; t++) {
        if (samples->is_trained[t] != open) *to++ = open ? ']' : '[';
        open = samples->is_trained[t];
        *to++ = samples->tokens[t] == 256 ? '|' : (char)samples->tokens[t];
    }
    if (open) *to++ = ']';
    *to = 0;
    return text;
}

/* Reads lines that must give these samples. */
static void expect(mt_sft_config config, const char *lines, int64_t count, const char *const *expected) {
    mt_samples samples;
    mt_error error;
    if (read_lines(&samples, config, lines, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(samples.count, count);
    for (int64_t s = 0; s < count; s++) assert_string_equal(sample_text(&samples, s), expected[s]);
    mt_samples_free(&samples);
}

static void expect_one(mt_sft_config config, const char *line, const char *expected) {
    expect(config, line, 1, &expected);
}

static void expect_error(mt_sft_config config, const char *lines, const char *words) {
    mt_samples samples;
    mt_error error;
    if (read_lines(&samples, config, lines, &error) == 0) fail_msg("accepted: %s", lines);
    if (!strstr(error.text, words)) fail_msg("\"%s\" does not say \"%s\"", error.text, words);
    assert_null(strchr(error.text, '\n'));
    assert_null(samples.tokens);
}

static void assert_tokens(const int32_t *tokens, int64_t first, int64_t end, const int32_t *expected, int64_t count) {
    assert_int_equal(end - first, count);
    for (int64_t i = 0; i < count; i++) assert_int_equal(tokens[first + i], expected[i]);
}

/* Of an encoder-decoder: a decoder begins with 0, and learns all tokens of the target. */
static void inputs_and_targets_are_read_and_cut(void **state) {
    const char *lines = "{\"input\": \"abcdef\", \"target\": \"xyz\"}\n{\"input\": [7, 8], \"target\": \"uvwxyz\"}\n"
                        "{\"input\": \"ab\", \"target\": [9]}\n";
    static const int32_t inputs[] = {'a', 'b', 'c', 256, 7, 8, 'a', 'b', 256};
    static const int32_t targets[] = {0, 'x', 'y', 'z', 256, 0, 'u', 'v', 'w', 'x', 256, 0, 9};
    mt_sft_config c = {.input_length = 4, .seq_length = 5, .end_id = 256};
    mt_samples samples;
    mt_error error;
    (void)state;
    if (read_lines(&samples, c, lines, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(samples.count, 3);
    assert_tokens(samples.inputs, 0, samples.input_offsets[3], inputs, 9);
    assert_tokens(samples.tokens, 0, samples.offsets[3], targets, 13);
    for (int64_t s = 0; s < 3; s++)
        for (int64_t t = samples.offsets[s]; t < samples.offsets[s + 1]; t++)
            assert_int_equal(samples.is_trained[t], t > samples.offsets[s]);
    mt_samples_free(&samples);
    c.long_samples = MT_LONG_DROP; // the first two
    if (read_lines(&samples, c, lines, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(samples.count, 1);
    assert_tokens(samples.inputs, samples.input_offsets[0], samples.input_offsets[1], inputs + 6, 3);
    assert_tokens(samples.tokens, samples.offsets[0], samples.offsets[1], targets + 11, 2);
    mt_samples_free(&samples);
    expect_error(c, "{\"input\": \"a\", \"response\": \"b\"}", "has no \"target\", but an encoder-decoder");
    expect_error(c, "{\"input\": {}, \"target\": \"b\"}", "\"input\" is neither a text nor a list of tokens");
    expect_error(c, "{\"input\": [], \"target\": \"b\"}", "\"input\" is empty");
    expect_error(c, "{\"input\": [-1], \"target\": \"b\"}", "\"input\": item 1 is not a token");
    expect_error(c, "{\"input\": \"a\", \"target\": [300]}", "has the token 300");
}

static void every_form_of_a_line_is_read(void **state) {
    (void)state;
    const mt_sft_config c = {0};
    expect_one(c, "{\"prompt\": \"ab\", \"response\": \"cd\"}", "ab[cd|]");
    expect_one(c, "{\"instruction\": \"a\", \"input\": \"b\", \"output\": \"cd\"}\n", "a\nb[cd|]");
    expect_one(c, "{\"instruction\": \"a\", \"input\": \"\", \"output\": \"cd\", \"n\": 1e5}\n\n \n", "a[cd|]");
    expect_one(c, "{\"instruction\": \"a\", \"input\": null, \"output\": \"\"}", "a[|]");
    expect_one(c, "{\"text\": \"abc\"}", "a[bc|]");
    expect_one(c,
               "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"u\"}, "
               "{\"content\": \"a\", \"role\": \"assistant\"}, {\"role\": \"user\", \"content\": \"v\"}, "
               "{\"role\": \"assistant\", \"content\": \"b\"}]}",
               "su[a|]v[b|]");
    expect_one(c, "{\"prompt\": [{\"role\": \"user\", \"content\": \"u\"}], \"response\": \"a\"}", "u[a|]");
    expect_one(c,
               "{\"messages\": \"[{\\\"role\\\": \\\"user\\\", \\\"content\\\": \\\"u\\\"}, {\\\"role\\\": "
               "\\\"assistant\\\", \\\"content\\\": \\\"a\\\"}]\"}",
               "u[a|]");
    expect_one(c, "{\"prompt\": \"\\u00e9\", \"response\": \"x\"}\r\n", "\xC3\xA9[x|]");
    const char *const two[] = {"a[b|]", "c[d|]"};
    expect(c, "{\"prompt\": \"a\", \"response\": \"b\"}\n\n{\"prompt\": \"c\", \"response\": \"d\"}", 2, two);
}

#define USER(text)         "{\"role\": \"user\", \"content\": \"" text "\"}"
#define ASSISTANT(text)    "{\"role\": \"assistant\", \"content\": \"" text "\"}"
#define MARKED(text, mark) "{\"role\": \"assistant\", \"content\": \"" text "\", \"" mark "}"

static void system_history_and_sharegpt_are_read(void **state) {
    (void)state;
    const mt_sft_config c = {0};
    expect_one(c, "{\"system\": \"s\", \"prompt\": \"a\", \"response\": \"b\"}", "sa[b|]");
    expect_one(c, "{\"system\": \"\", \"history\": [], \"prompt\": \"a\", \"response\": \"b\"}", "a[b|]");
    expect_one(c,
               "{\"instruction\": \"a\", \"input\": \"i\", \"output\": \"b\", \"system\": \"s\", \"history\": "
               "[[\"q\", \"r\"], [\"v\", \"w\"]]}",
               "sq[r|]v[w|]a\ni[b|]");
    expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_LAST},
               "{\"prompt\": \"a\", \"response\": \"b\", \"history\": [[\"q\", \"r\"]]}", "qr|a[b|]");
    expect_one(c, "{\"system\": \"s\", \"messages\": [" USER("u") ", " ASSISTANT("a") "]}", "su[a|]");
    expect_one(c,
               "{\"conversations\": [{\"from\": \"human\", \"value\": \"u\"}, {\"from\": \"gpt\", \"value\": "
               "\"a\"}]}",
               "u[a|]");
    expect_error(c,
                 "{\"system\": \"s\", \"messages\": [{\"role\": \"system\", \"content\": \"t\"}, " USER(
                     "u") ", " ASSISTANT("a") "]}",
                 "\"system\" text and another");
    expect_error(c, "{\"system\": 1, \"prompt\": \"a\", \"response\": \"b\"}", "\"system\" is not a text");
    expect_error(c, "{\"history\": [[\"q\"]], \"prompt\": \"a\", \"response\": \"b\"}", "item 1 is not a pair");
    expect_error(c, "{\"history\": [[\"q\", \"r\"]], \"messages\": [" USER("u") ", " ASSISTANT("a") "]}",
                 "\"history\", which goes with a prompt");
    expect_error(c, "{\"conversations\": [{\"from\": \"observation\", \"value\": \"u\"}]}", "\"observation\"");
    const char *const pair[] = {"sq[r|]p[a|]", "sq[r|]p[b|]"};
    expect((mt_sft_config){.pairs = true},
           "{\"system\": \"s\", \"history\": [[\"q\", \"r\"]], \"prompt\": \"p\", \"chosen\": \"a\", "
           "\"rejected\": \"b\"}",
           2, pair);
    expect_one(c, "\xEF\xBB\xBF{\"prompt\": \"a\", \"response\": \"b\"}", "a[b|]");
    expect_one(c, "\xEF\xBB\xBF[{\"prompt\": \"a\", \"response\": \"b\"}]", "a[b|]");
}

/* Behind an end of document within a conversation begins the next turn. */
static void tokens_behind_an_end_of_document_can_be_masked(void **state) {
    (void)state;
    mt_sft_config c = {.loss_on = MT_LOSS_ON_ALL};
    const char *line = "{\"messages\": [" USER("u") ", " ASSISTANT("a") ", " USER("vw") ", " ASSISTANT("b") "]}";
    expect_one(c, line, "u[a|vwb|]");
    c.masks_eod = true, c.eod_id = 256;
    expect_one(c, line, "u[a|]v[wb|]");
}

static void answers_that_are_marked_are_not_trained(void **state) {
    (void)state;
    static const char *const no[] = {"weight\": 0", "weight\": 0.0",      "loss\": false",
                                     "train\": 0",  "trainable\": false", "training\": false"};
    static const char *const yes[] = {"weight\": 1", "loss\": true", "train\": null"};
    char line[1000];
    for (int i = 0; i < 9; i++) {
        const char *mark = i < 6 ? no[i] : yes[i - 6];
        snprintf(line, sizeof line,
                 "{\"messages\": [" USER("u") ", {\"role\": \"assistant\", \"content\": \"a\", \"%s}, " USER(
                     "v") ", " ASSISTANT("b") "]}",
                 mark);
        expect_one((mt_sft_config){0}, line, i < 6 ? "ua|v[b|]" : "u[a|]v[b|]");
        if (i < 6) expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_ALL}, line, "ua|[vb|]");
    }
    const mt_sft_config c = {0};
    expect_error(c, "{\"messages\": [" USER("u") ", " MARKED("a", "weight\": 0") "]}", "no token to train on");
    static const char *const strange[] = {"masked\": true", "mask\": 0",       "trained\": false",
                                          "loss_mask\": 0", "loss_scale\": 0", "train_detail\": [1]",
                                          "ignore\": true", "skip_loss\": 1",  "supervised\": false",
                                          "Weight\": 0",    "isLoss\": false", "label\": false"};
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++) {
        snprintf(line, sizeof line,
                 "{\"messages\": [" USER("u") ", {\"role\": \"assistant\", \"content\": \"a\", \"%s}]}", strange[i]);
        expect_error(c, line, "which is not supported; mark an answer");
    }
    expect_one(c, "{\"messages\": [" USER("u") ", " MARKED("a", "masked\": null") "]}", "u[a|]");
    expect_error(c, "{\"messages\": [" USER("u") ", " MARKED("a", "weight\": 0.5") "]}", "\"weight\" is not true or 1");
    expect_error(c, "{\"messages\": [" USER("u") ", " MARKED("a", "train\": \"no\"") "]}", "\"train\" is not true");
    expect_error(c, "{\"messages\": [" USER("u") ", " MARKED("a", "train\": true, \"weight\": 0") "]}", "contradict");
    expect_error(c, "{\"messages\": [{\"role\": \"user\", \"content\": \"u\", \"train\": true}, " ASSISTANT("a") "]}",
                 "no answer");
    expect_error(c, "{\"prompt\": \"a\", \"response\": \"b\", \"weight\": 0}", "untrained by \"weight\"");
    expect_error(c, "{\"prompt\": \"a\", \"response\": \"b\", \"weight\": 2}", "\"weight\" is not");
    expect_error(c, "{\"prompt\": \"a\", \"response\": \"b\", \"label\": false}", "unwanted");
    expect_error(c, "{\"prompt\": \"a\", \"response\": \"b\", \"tools\": \"[{}]\"}", "\"tools\"");
    expect_error(c, "{\"tokens\": [1, 2, 3], \"loss_mask\": [0, 0, 1]}", "\"loss_mask\"");
    expect_one(c, "{\"prompt\": \"a\", \"response\": \"b\", \"weight\": 1, \"tools\": [], \"label\": true}", "a[b|]");
}

/* The form of ultrafeedback_binarized and its kin. */
static void a_prompt_within_a_conversation_is_written_once(void **state) {
    (void)state;
    const mt_sft_config c = {.pairs = true};
    const char *const once[] = {"p[a|]", "p[b|]"}, *const with_system[] = {"sp[a|]", "sp[b|]"};
    const char *chosen = "[" USER("p") ", " ASSISTANT("a") "]", *rejected = "[" USER("p") ", " ASSISTANT("b") "]";
    char line[1000];
    static const char *const prompts[] = {"\"p\"", "[" USER("p") "]", "null"};
    for (int i = 0; i < 3; i++) {
        snprintf(line, sizeof line, "{\"prompt\": %s, \"chosen\": %s, \"rejected\": %s}", prompts[i], chosen, rejected);
        expect(c, line, 2, once);
        snprintf(line, sizeof line, "{\"system\": \"s\", \"prompt\": %s, \"chosen\": %s, \"rejected\": %s}", prompts[i],
                 chosen, rejected);
        expect(c, line, 2, with_system);
    }
    snprintf(line, sizeof line,
             "{\"prompt\": [" USER("p") "], \"chosen\": [" ASSISTANT("a") "], \"rejected\": [" ASSISTANT("b") "]}");
    expect(c, line, 2, once);
    snprintf(line, sizeof line, "{\"prompt\": \"q\", \"chosen\": %s, \"rejected\": %s}", chosen, rejected);
    expect_error(c, line, "\"chosen\" is a whole conversation, which does not hold \"prompt\"");
    snprintf(line, sizeof line, "{\"prompt\": [" USER("q") "], \"chosen\": %s, \"rejected\": %s}", chosen, rejected);
    expect_error(c, line, "does not hold \"prompt\"");
    snprintf(line, sizeof line, "{\"prompt\": \"p\", \"response\": %s}", chosen);
    expect_one((mt_sft_config){0}, line, "p[a|]");
    snprintf(line, sizeof line, "{\"prompt\": \"p\", \"messages\": %s}", chosen);
    expect_one((mt_sft_config){0}, line, "p[a|]");
    expect_error(c, "{\"chosen\": \"\\n\\nHuman: a\\n\\nAssistant: b\", \"rejected\": \"\\n\\nHuman: a\"}",
                 "a transcript");
}

static void fields_that_are_not_read_are_named(void **state) {
    (void)state;
    char log[2000] = "";
    mt_sft_config c = {.log = fmemopen(log, sizeof log, "w")};
    expect_one(c,
               "{\"prompt\": \"a\", \"response\": \"b\", \"thoughts\": \"t\", \"id\": 5, \"x\": \"\", "
               "\"train_on_input\": true, \"good\": true}",
               "a[b|]");
    fclose(c.log);
    assert_non_null(strstr(log, "not read: \"thoughts\", \"train_on_input\"\n"));
    c = (mt_sft_config){.pairs = true, .log = fmemopen(log, sizeof log, "w")};
    const char *const pair[] = {"what is the sum?[what is the sum? 4|]", "what is the sum?[what is the sum? 5|]"};
    expect(c,
           "{\"prompt\": \"what is the sum?\", \"chosen\": \"what is the sum? 4\", \"rejected\": \"what is the sum? "
           "5\"}",
           2, pair);
    fclose(c.log);
    assert_non_null(strstr(log, "begin with the whole prompt in 1 pairs"));
    assert_null(strstr(log, "not read"));
}

static void keys_are_options(void **state) {
    (void)state;
    const char *line = "{\"q\": \"a\", \"more\": \"b\", \"a\": \"c\", \"prompt\": \"x\", \"response\": \"y\"}";
    expect_one((mt_sft_config){0}, line, "x[y|]");
    expect_one((mt_sft_config){.prompt_key = "q", .response_key = "a"}, line, "a[c|]");
    expect_one((mt_sft_config){.prompt_key = "q", .query_key = "more", .response_key = "a"}, line, "a\nb[c|]");
    expect_one((mt_sft_config){.messages_key = "m"}, "{\"m\": [{\"role\": \"assistant\", \"content\": \"ab\"}]}",
               "a[b|]");
    expect_error((mt_sft_config){.prompt_key = "none"}, line, "\"none\"; name the fields with --prompt-key");
}

static void the_loss_counts_all_responses_or_the_last(void **state) {
    (void)state;
    const char *line = "{\"messages\": [{\"role\": \"user\", \"content\": \"u\"}, "
                       "{\"role\": \"assistant\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"v\"}, "
                       "{\"role\": \"assistant\", \"content\": \"b\"}, {\"role\": \"user\", \"content\": \"w\"}]}";
    expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_RESPONSES}, line, "u[a|]v[b|]w");
    expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_LAST}, line, "ua|v[b|]w");
    expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_ALL}, line, "u[a|vb|w]");
    expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_LAST}, "{\"text\": \"abc\"}", "a[bc|]");
    const char *question = "{\"messages\": [{\"role\": \"user\", \"content\": \"uv\"}]}";
    expect_error((mt_sft_config){0}, question, "no token to train on");
    expect_one((mt_sft_config){.loss_on = MT_LOSS_ON_ALL}, question, "u[v]");
}

static void long_samples_are_truncated_or_dropped(void **state) {
    (void)state;
    const char *lines = "{\"prompt\": \"ab\", \"response\": \"cd\"}\n{\"prompt\": \"ab\", \"response\": \"cdef\"}\n"
                        "{\"prompt\": \"abcdef\", \"response\": \"g\"}\n";
    // five tokens take four positions
    const char *const truncated[] = {"ab[cd|]", "ab[cde]"}, *const dropped[] = {"ab[cd|]"};
    expect((mt_sft_config){.seq_length = 4}, lines, 2, truncated);
    expect((mt_sft_config){.seq_length = 4, .long_samples = MT_LONG_DROP}, lines, 1, dropped);
    expect_error((mt_sft_config){.seq_length = 3, .long_samples = MT_LONG_DROP}, lines, "longer than --seq-length");
}

static void pairs_become_two_samples(void **state) {
    (void)state;
    const mt_sft_config c = {.pairs = true};
    const char *const plain[] = {"p[a|]", "p[bc|]"}, *const lists[] = {"u[a|]", "u[b|]"};
    expect(c, "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"bc\"}", 2, plain);
    expect(c,
           "{\"chosen\": [{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": \"a\"}], "
           "\"rejected\": [{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
           2, lists);
    expect_error(c, "{\"prompt\": \"p\", \"chosen\": \"a\"}", "no \"rejected\"");
    expect_error((mt_sft_config){0}, "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"b\"}", "a preference");
    // one bad or too long response leaves out both
    const char *lines = "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": 1}\n"
                        "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"bc\"}\n"
                        "{\"prompt\": \"p\", \"chosen\": \"abcdef\", \"rejected\": \"b\"}\n";
    expect((mt_sft_config){.pairs = true, .skip_bad_samples = 1, .seq_length = 4, .long_samples = MT_LONG_DROP}, lines,
           2, plain);
}

static void equal_pairs_are_left_out(void **state) {
    (void)state;
    const char *lines = "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"bc\"}\n"
                        "{\"prompt\": \"p\", \"chosen\": \"bc\", \"rejected\": \"bc\"}\n"
                        "{\"prompt\": \"p\", \"chosen\": \"abcdx\", \"rejected\": \"abcdy\"}\n"
                        "{\"prompt\": \"p\", \"chosen\": \"ab\", \"rejected\": \"abcdx\"}\n";
    const char *const kept[] = {"p[a|]", "p[bc|]", "p[ab|]", "p[abcd]"};
    char log[1000] = "";
    mt_sft_config c = {.pairs = true, .seq_length = 4};
    expect_error(c, lines, "x.jsonl:2: \"chosen\" and \"rejected\" are the same response");
    c.skip_bad_samples = 1, c.log = fmemopen(log, sizeof log, "w");
    expect(c, lines, 4, kept);
    fclose(c.log);
    assert_non_null(strstr(log, ": 4 samples, "));
    assert_non_null(strstr(log, "; 1 were truncated to --seq-length; 1 pairs are left out, whose responses are the "
                                "same once truncated; 1 bad lines"));
    c.log = NULL;
    expect_error(c, "{\"prompt\": \"pppp\", \"chosen\": \"ab\", \"rejected\": \"ac\"}\n", "the same once truncated");
}

static void bad_lines_are_named_and_counted(void **state) {
    (void)state;
    const char *lines = "{\"prompt\": \"a\", \"response\": \"b\"}\n{\"prompt\": \"a\"\n\n{\"prompt\": 1}\n"
                        "{\"prompt\": \"c\", \"response\": \"d\"}\n";
    const char *const good[] = {"a[b|]", "c[d|]"};
    expect_error((mt_sft_config){0}, lines, "x.jsonl:2: ");
    expect_error((mt_sft_config){.skip_bad_samples = 1}, lines, "x.jsonl:4: ");
    FILE *log = fopen(at("log"), "w+");
    expect((mt_sft_config){.skip_bad_samples = 2, .log = log}, lines, 2, good);
    char text[4096];
    rewind(log);
    text[fread(text, 1, sizeof text - 1, log)] = 0;
    fclose(log);
    assert_non_null(strstr(text, "x.jsonl:2: "));
    assert_non_null(strstr(text, "x.jsonl:4: "));
    assert_non_null(strstr(text, "2 bad lines are left out"));
    assert_non_null(strstr(text, "2 samples, 6 tokens, the loss counts 4; the longest takes 2 positions"));
}

static void what_is_not_a_sample_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *line, *words;
    } cases[] = {
        {"", "has no samples"},
        {"\n \n", "has no samples"},
        {"[1]", "x.jsonl:1: "},
        {"{\"a\": 1}", "neither messages"},
        {"{\"prompt\": \"a\", \"prompt\": \"b\", \"response\": \"c\"}", "duplicate"},
        {"{\"prompt\": \"a\", \"response\": 1}", "\"response\" is not a text"},
        {"{\"messages\": \"a\"}", "\"messages\" is not a list"},
        {"{\"messages\": \"[1\"}", "\"messages\" is not a list"},
        {"{\"messages\": []}", "no message"},
        {"{\"messages\": [{\"role\": \"system\", \"content\": \"a\"}]}", "no message"},
        {"{\"messages\": [1]}", "no \"role\""},
        {"{\"messages\": [{\"role\": \"user\\u0000\", \"content\": \"a\"}]}", "no \"role\""},
        {"{\"messages\": [{\"role\": \"user\"}]}", "\"content\" is not a text"},
        {"{\"messages\": [{\"role\": \"tool\", \"content\": \"a\"}]}", "the role \"tool\""},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"system\", \"content\": \"b\"}]}",
         "only the first"},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"tool_calls\": [{}]}]}", "tool_calls"},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"reasoning_content\": \"b\"}]}", "<think>"},
        {"{\"text\": \"\"}", "\"text\" is empty"},
        {"{\"text\": 5}", "\"text\" is not a text"},
        {"{\"instruction\": \"a\", \"input\": 5, \"output\": \"b\"}", "\"input\" is not a text"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_error((mt_sft_config){0}, cases[i].line, cases[i].words);
    expect_error((mt_sft_config){.vocab_size = 256}, "{\"prompt\": \"a\", \"response\": \"b\"}", "has the token 256");
    expect_error((mt_sft_config){.chat_template = MT_CHAT_CHATML}, "{\"prompt\": \"a\", \"response\": \"b\"}",
                 "--chat-template chatml needs the token <|im_start|>");
}

static void files_that_cannot_be_read_are_refused(void **state) {
    (void)state;
    char *none[] = {(char *)at("none.jsonl")}, *pipe[] = {(char *)at("pipe")};
    assert_int_equal(mkfifo(pipe[0], 0600), 0);
    mt_sft_config c = {.paths = {1, none}, .vocab_size = 257, .seq_length = 8, .chat_template = MT_CHAT_PLAIN};
    mt_tokenizer *tokenizer;
    mt_samples samples;
    mt_error error;
    assert_int_equal(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, &error), 0);
    assert_int_equal(mt_samples_read(&samples, &c, tokenizer, &error), -1);
    assert_non_null(strstr(error.text, "none.jsonl: cannot be read"));
    c.paths.items = pipe;
    assert_int_equal(mt_samples_read(&samples, &c, tokenizer, &error), -1);
    assert_non_null(strstr(error.text, "it is a pipe"));
    mt_tokenizer_close(tokenizer);
}

static void fingerprints_distinguish_samples(void **state) {
    (void)state;
    static const char *const lines[] = {"{\"prompt\": \"ab\", \"response\": \"cd\"}",
                                        "{\"prompt\": \"a\", \"response\": \"bcd\"}",
                                        "{\"prompt\": \"ab\", \"response\": \"ce\"}"};
    mt_samples samples;
    mt_error error;
    uint64_t prints[3];
    for (int i = 0; i < 3; i++) {
        assert_int_equal(read_lines(&samples, (mt_sft_config){0}, lines[i], &error), 0);
        prints[i] = mt_samples_fingerprint(&samples);
        mt_samples_free(&samples);
        assert_int_equal(read_lines(&samples, (mt_sft_config){0}, lines[i], &error), 0);
        assert_true(prints[i] == mt_samples_fingerprint(&samples));
        mt_samples_free(&samples);
    }
    assert_true(prints[0] != prints[1] && prints[0] != prints[2]);
}

/* A value head is read at the token that ends the response, as in reinforcement learning, not at the line break behind
 * it; a text that no response ends has no such token. */
static void a_value_head_is_read_at_the_end_of_the_response(void **state) {
    (void)state;
    const mt_sft_config c = {.whole = true};
    mt_samples samples;
    mt_error error;
    if (read_lines(&samples, c, "{\"prompt\": \"p\", \"response\": \"a\"}", &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(samples.offsets[1], 4); // with the token behind the last input
    assert_int_equal(samples.tokens[2], 256);
    mt_samples_free(&samples);
    expect_error(c, "{\"messages\": [" USER("u") ", " ASSISTANT("a") ", " USER("v") "]}",
                 "does not end with a message of the assistant");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inputs_and_targets_are_read_and_cut),
        cmocka_unit_test(every_form_of_a_line_is_read),
        cmocka_unit_test(system_history_and_sharegpt_are_read),
        cmocka_unit_test(tokens_behind_an_end_of_document_can_be_masked),
        cmocka_unit_test(answers_that_are_marked_are_not_trained),
        cmocka_unit_test(a_prompt_within_a_conversation_is_written_once),
        cmocka_unit_test(fields_that_are_not_read_are_named),
        cmocka_unit_test(keys_are_options),
        cmocka_unit_test(the_loss_counts_all_responses_or_the_last),
        cmocka_unit_test(long_samples_are_truncated_or_dropped),
        cmocka_unit_test(pairs_become_two_samples),
        cmocka_unit_test(equal_pairs_are_left_out),
        cmocka_unit_test(bad_lines_are_named_and_counted),
        cmocka_unit_test(what_is_not_a_sample_is_refused),
        cmocka_unit_test(files_that_cannot_be_read_are_refused),
        cmocka_unit_test(a_value_head_is_read_at_the_end_of_the_response),
        cmocka_unit_test(fingerprints_distinguish_samples),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
