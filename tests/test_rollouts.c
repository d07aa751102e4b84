/* test_rollouts.c: prompts of reinforcement learning, the order in which a run reads them, and a step's responses on
 * their way to scores, advantages and micro-batches. */
#include "data/base/file.h"
#include "data/tokens/tokenizer_vocab.h"
#include "data/learn/pending.h"
#include "data/learn/rollouts.h"
#include "data/options/option_table.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "folder.h"

/* ---- prompts ---------------------------------------------------------------------------------------------------- */

static mt_tokenizer *tokenizer; // ByteLevel: a token is a byte, 256 ends a text

/* Reads prompts from lines; `config` lacks paths. */
static int read_lines(mt_samples *prompts, mt_sft_config config, const char *lines, mt_error *error) {
    char *paths[] = {(char *)at("x.jsonl")};
    FILE *file = fopen(paths[0], "wb");
    assert_non_null(file);
    fputs(lines, file);
    assert_int_equal(fclose(file), 0);
    config.paths = (mt_strings){1, paths};
    config.prompts = true;
    if (!config.vocab_size) config.vocab_size = 257;
    if (!config.seq_length) config.seq_length = 1000;
    if (!config.chat_template) config.chat_template = MT_CHAT_PLAIN;
    return mt_samples_read(prompts, &config, tokenizer, error);
}

static mt_samples read_prompts(mt_sft_config config, const char *lines) {
    mt_samples prompts;
    mt_error error;
    if (read_lines(&prompts, config, lines, &error) != 0) fail_msg("%s", error.text);
    assert_non_null(prompts.questions);
    return prompts;
}

static void expect_error(mt_sft_config config, const char *lines, const char *words) {
    mt_samples prompts;
    mt_error error;
    if (read_lines(&prompts, config, lines, &error) == 0) fail_msg("accepted: %s", lines);
    if (!strstr(error.text, words)) fail_msg("\"%s\" does not say \"%s\"", error.text, words);
    assert_true(!strchr(error.text, '\n') && !prompts.tokens && !prompts.questions);
}

/* Prompt i: its tokens as text, the text for rewards, and the answer (NULL: none). */
static void assert_prompt(const mt_samples *prompts, int64_t i, const char *tokens, const char *text,
                          const char *answer) {
    const mt_question *question = &prompts->questions[i];
    assert_true(i < prompts->count);
    assert_int_equal(prompts->offsets[i + 1] - prompts->offsets[i], strlen(tokens));
    for (size_t k = 0; tokens[k]; k++) assert_int_equal(prompts->tokens[prompts->offsets[i] + (int64_t)k], tokens[k]);
    assert_string_equal(question->prompt, text);
    assert_int_equal(question->prompt_bytes, strlen(text));
    if (answer)
        assert_string_equal(question->answer, answer);
    else
        assert_null(question->answer);
    if (answer) assert_int_equal(question->answer_bytes, strlen(answer));
}

static void prompts_are_read_in_every_form(void **state) {
    (void)state;
    mt_samples p = read_prompts((mt_sft_config){0},
                                "{\"prompt\": \"ab\", \"answer\": \"c\"}\n"
                                "\n"
                                "{\"prompt\": \"a\", \"answer\": 72}\n"
                                "{\"instruction\": \"a\", \"input\": \"b\", \"answer\": 0.1}\n"
                                "{\"prompt\": [{\"role\": \"user\", \"content\": \"ab\"}], \"answer\": null}\n"
                                "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", "
                                "\"content\": \"u\"}], \"answer\": 1234567890123456}\n"
                                "{\"prompt\": \"\\u00e9\", \"answer\": \"\"}\n");
    assert_int_equal(p.count, 6);
    assert_prompt(&p, 0, "ab", "ab", "c");
    assert_prompt(&p, 1, "a", "a", "72");
    assert_prompt(&p, 2, "a\nb", "a\nb", "0.1");
    assert_prompt(&p, 3, "ab", "ab", NULL);
    assert_prompt(&p, 4, "su", "u", "1234567890123456");
    assert_int_equal(p.offsets[6] - p.offsets[5], 2);
    assert_string_equal(p.questions[5].answer, "");
    for (int64_t i = 0; i < p.offsets[p.count]; i++) assert_int_equal(p.is_trained[i], 0);
    mt_samples other = read_prompts((mt_sft_config){.prompt_key = "q", .answer_key = "solution"},
                                    "{\"q\": \"ab\", \"prompt\": \"x\", \"answer\": \"1\", \"solution\": \"2\"}");
    assert_prompt(&other, 0, "ab", "ab", "2");
    mt_samples same = read_prompts((mt_sft_config){0}, "{\"prompt\": \"ab\", \"answer\": \"2\"}");
    mt_samples differs = read_prompts((mt_sft_config){0}, "{\"prompt\": \"ab\", \"answer\": \"3\"}");
    assert_true(mt_samples_fingerprint(&other) == mt_samples_fingerprint(&same));
    assert_true(mt_samples_fingerprint(&other) != mt_samples_fingerprint(&differs));
    mt_samples_free(&p), mt_samples_free(&other), mt_samples_free(&same), mt_samples_free(&differs);
}

static void bad_and_long_prompts_are_left_out_or_errors(void **state) {
    (void)state;
    const mt_sft_config c = {0}, needs = {.needs_answer = true};
    expect_error(c, "{\"text\": \"a\"}", "x.jsonl:1: has neither \"messages\" nor \"prompt\"");
    expect_error(c, "{\"prompt\": \"\"}", "the prompt is empty");
    expect_error(c, "{\"messages\": []}", "does not end with a message of the user");
    expect_error(c,
                 "{\"messages\": [{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": "
                 "\"a\"}]}",
                 "does not end with a message of the user");
    expect_error(c, "{\"prompt\": \"a\", \"answer\": [1]}", "\"answer\" is neither a text nor a number");
    expect_error(needs, "{\"prompt\": \"a\", \"answer\": null}", "has no \"answer\"");
    expect_error((mt_sft_config){.needs_answer = true, .answer_key = "key"}, "{\"prompt\": \"a\"}", "has no \"key\"");
    expect_error((mt_sft_config){.seq_length = 2}, "{\"prompt\": \"abc\", \"answer\": \"x\"}",
                 "has no prompts of at most 2 tokens");
    expect_error(c, "\n", "has no samples");
    char summary[200] = "";
    FILE *log = fmemopen(summary, sizeof summary, "w");
    mt_samples p = read_prompts((mt_sft_config){.skip_bad_samples = 1, .seq_length = 2, .log = log},
                                "{\"prompt\": \"abc\"}\n{\"prompt\": 1}\n{\"prompt\": \"ab\"}\n{\"prompt\": \"c\"}\n");
    fclose(log);
    assert_int_equal(p.count, 2);
    assert_prompt(&p, 0, "ab", "ab", NULL);
    assert_prompt(&p, 1, "c", "c", NULL);
    assert_non_null(strstr(summary, ": 2 prompts, 3 tokens; the longest has 2; 1 are too long and left out; 1 bad"));
    mt_samples_free(&p);
}

/* A tokenizer with the special tokens of ChatML. */
static mt_tokenizer *open_chatml(void) {
    const char *source = "tests/golden/tokenizer/bytelevel.json", *texts[] = {"<|im_start|>", "<|im_end|>"};
    mt_tokenizer *opened;
    mt_error error;
    json_t *root = json_load_file(source, 0, NULL), *added = json_object_get(root, "added_tokens");
    if (mt_tokenizer_open(&opened, MT_TOKENIZER_HUGGINGFACE, source, &error) != 0) fail_msg("%s", error.text);
    for (int i = 0; i < 2; i++)
        json_array_append_new(added,
                              json_pack("{s:I,s:s,s:b,s:b,s:b,s:b,s:b}", "id",
                                        (json_int_t)mt_tokenizer_vocab_size(opened) + i, "content", texts[i],
                                        "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
    mt_tokenizer_close(opened);
    assert_int_equal(json_dump_file(root, at("tokenizer.json"), 0), 0);
    json_decref(root);
    if (mt_tokenizer_open(&opened, MT_TOKENIZER_HUGGINGFACE, at("tokenizer.json"), &error) != 0)
        fail_msg("%s", error.text);
    return opened;
}

static void the_header_of_the_response_ends_a_prompt(void **state) {
    (void)state;
    mt_error error;
    mt_text text = {0};
    mt_tokenizer *bytes = tokenizer;
    tokenizer = open_chatml();
    mt_samples p =
        read_prompts((mt_sft_config){.chat_template = MT_CHAT_CHATML, .vocab_size = mt_tokenizer_vocab_size(tokenizer)},
                     "{\"prompt\": \"ab\"}");
    assert_string_equal(p.questions[0].prompt, "ab");
    assert_int_equal(mt_tokenizer_decode(tokenizer, p.tokens, p.offsets[1], &text, &error), 0);
    mt_text_append(&text, "", 1);
    assert_string_equal(text.data, "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n");
    free(text.data);
    mt_samples_free(&p);
    mt_tokenizer_close(tokenizer);
    tokenizer = bytes;
}

static void order_depends_on_seed_and_position_only(void **state) {
    (void)state;
    enum { PROMPTS = 7, POSITIONS = 40 };
    int64_t whole[POSITIONS], part[POSITIONS], other[POSITIONS];
    mt_prompts_order(PROMPTS, true, 3, 0, POSITIONS, whole);
    for (int64_t first = 0; first < POSITIONS; first++)
        for (int64_t count = 0; first + count <= POSITIONS; count++) {
            mt_prompts_order(PROMPTS, true, 3, first, count, part);
            assert_memory_equal(part, whole + first, (size_t)count * 8);
        }
    for (int64_t epoch = 0; epoch < POSITIONS / PROMPTS; epoch++) {
        bool seen[PROMPTS] = {false};
        for (int64_t i = 0; i < PROMPTS; i++) seen[whole[epoch * PROMPTS + i]] = true;
        for (int64_t i = 0; i < PROMPTS; i++) assert_true(seen[i]);
    }
    assert_memory_not_equal(whole, whole + PROMPTS, PROMPTS * 8);
    mt_prompts_order(PROMPTS, true, 4, 0, POSITIONS, other);
    assert_memory_not_equal(whole, other, sizeof whole);
    mt_prompts_order(PROMPTS, false, 4, 3, POSITIONS, other);
    for (int64_t i = 0; i < POSITIONS; i++) assert_int_equal(other[i], (3 + i) % PROMPTS);
}

/* Each iteration has its quota of prompts of each share; a share has epochs of its own, and a part of the order is that
 * of the whole. */
static void shares_of_tags_have_quotas_and_epochs(void **state) {
    (void)state;
    enum { BATCH = 5, POSITIONS = 60 };
    char *words[] = {"math,*=0.4", "code=0.2", "value=0.4"}, *bad[] = {"math", "code=0.2"};
    mt_sft_config config = {.shares = {3, words}};
    mt_samples prompts = read_prompts(config, "{\"prompt\": \"a\", \"tag\": \"math\"}\n"
                                              "{\"prompt\": \"b\", \"tag\": \"code\"}\n"
                                              "{\"prompt\": \"c\", \"tag\": \"value\"}\n"
                                              "{\"prompt\": \"d\"}\n"
                                              "{\"prompt\": \"e\", \"tag\": \"math\", \"domain\": \"value\"}\n"
                                              "{\"prompt\": \"f\", \"tag\": \"new\"}\n");
    static const int64_t share_of[] = {0, 1, 2, 0, 2, 0};
    int64_t quotas[3], whole[POSITIONS], part[POSITIONS];
    mt_error error;
    assert_int_equal(prompts.count, 6);
    for (int64_t i = 0; i < 6; i++) assert_int_equal(prompts.questions[i].share, share_of[i]);
    assert_int_equal(mt_prompt_quotas(quotas, &config.shares, BATCH, &error), 0);
    mt_prompts_order_shares(&prompts, quotas, 3, true, 3, 0, POSITIONS, whole);
    int64_t visits[6] = {0};
    for (int64_t i = 0; i < POSITIONS; i++) {
        int64_t at = i % BATCH;
        assert_int_equal(share_of[whole[i]], at < 2 ? 0 : at < 3 ? 1 : 2);
        visits[whole[i]]++;
    }
    assert_true(visits[1] == 12 && visits[2] == 12 && visits[4] == 12); // 12 iterations
    assert_true(visits[0] == 8 && visits[3] == 8 && visits[5] == 8);
    for (int64_t first = 0; first < POSITIONS; first += 7) {
        mt_prompts_order_shares(&prompts, quotas, 3, true, 3, first, POSITIONS - first, part);
        assert_memory_equal(part, whole + first, (size_t)(POSITIONS - first) * 8);
    }
    mt_samples_free(&prompts);
    assert_int_equal(mt_prompt_quotas(quotas, &config.shares, 3, &error), -1); // 0.2 of 3
    assert_non_null(strstr(error.text, "leaves no prompt"));
    assert_int_equal(mt_prompt_quotas(quotas, &(mt_strings){2, bad}, 5, &error), -1);
    assert_non_null(strstr(error.text, "expects words such as"));
    words[0] = "math=0.4";
    const char *line = "{\"prompt\": \"a\", \"tag\": \"math\"}\n{\"prompt\": \"b\", \"tag\": \"code\"}\n"
                       "{\"prompt\": \"b\", \"tag\": \"new\"}\n";
    expect_error(config, line, "no prompt for the share value=0.4");
    config.shares.count = 2;
    prompts = read_prompts(config, line);
    assert_int_equal(prompts.count, 2); // that of no share is left out
    mt_samples_free(&prompts);
}

/* A field of a prompt names its teacher, as verl's teacher_key. */
static void prompts_name_their_teachers(void **state) {
    (void)state;
    char *words[] = {"math=a=b", "*=c", "code=d"};
    mt_sft_config config = {.teachers = {3, words}};
    const char *lines = "{\"prompt\": \"a\", \"data_source\": \"code\"}\n{\"prompt\": \"b\"}\n"
                        "{\"prompt\": \"c\", \"data_source\": \"math\", \"of\": \"code\"}\n"
                        "{\"prompt\": \"d\", \"data_source\": \"mat\"}\n";
    static const int64_t by_source[] = {2, 1, 0, 1}, by_key[] = {1, 1, 2, 1};
    for (int own = 0; own < 2; own++) {
        config.teacher_key = own ? "of" : NULL;
        mt_samples prompts = read_prompts(config, lines);
        assert_int_equal(prompts.count, 4);
        for (int64_t i = 0; i < 4; i++) assert_int_equal(prompts.questions[i].teacher, (own ? by_key : by_source)[i]);
        mt_samples_free(&prompts);
    }
    config = (mt_sft_config){.teachers = {1, words}};
    expect_error(config, lines, "\"data_source\" is \"code\", for which --teachers has no teacher");
    expect_error(config, "{\"prompt\": \"b\"}\n", "\"data_source\" is missing");
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

enum { GROUP = 3, GROUPS = 4, RESPONSES = GROUP * GROUPS };

static const char *const responses[RESPONSES] = {"1", "22", "1",    "3",    "4",     "5",
                                                 "2", "2",  "2abc", "long", "longe", "longer"};
static const double scores[RESPONSES] = {1, 0, 1, 0, 0, 0, 1, 1, 0, 0.5, 1, 2};

/* Four prompts, of 1 to 4 tokens, with three responses each. Responses end by 256, except the last two. */
static void begin_step(mt_rollouts *r, mt_samples *prompts) {
    static const int64_t order[] = {2, 0, 1, 3};
    *prompts = read_prompts((mt_sft_config){0}, "{\"prompt\": \"aa\", \"answer\": \"9\"}\n"
                                                "{\"prompt\": \"bbb\", \"answer\": \"2\"}\n"
                                                "{\"prompt\": \"c\", \"answer\": \"1\"}\n"
                                                "{\"prompt\": \"dddd\", \"answer\": \"x\"}\n");
    mt_rollouts_begin(r, prompts, order, GROUPS, GROUP);
    for (int64_t s = RESPONSES; s-- > 0;) { // in any order
        int32_t tokens[16];
        int64_t count = 0;
        for (const char *c = responses[s]; *c; c++) tokens[count++] = *c;
        if (s < RESPONSES - 2) tokens[count++] = 256;
        mt_rollouts_set(r, s, tokens, count, s >= RESPONSES - 2);
        r->scores[s] = scores[s];
    }
}

static void end_step(mt_rollouts *r, mt_samples *prompts) {
    mt_rollouts_free(r);
    mt_samples_free(prompts);
}

/* Sequence k as text; ',' before the first counted token, '|' for 256. */
static const char *sequence_text(const mt_rollouts *r, int64_t k) {
    static char text[64];
    char *to = text;
    int64_t first = r->samples.offsets[k];
    for (int64_t i = first; i < r->samples.offsets[k + 1]; i++) {
        if (r->samples.is_trained[i] && !(i > first && r->samples.is_trained[i - 1])) *to++ = ',';
        *to++ = r->samples.tokens[i] == 256 ? '|' : (char)r->samples.tokens[i];
    }
    *to = 0;
    return text;
}

/* The last response of each group of three is a baseline. */
static void baselines_are_compared_with_and_not_trained_on(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    begin_step(&r, &prompts);
    r.has_baselines = true;
    mt_rollout_config c = {.overlong = MT_OVERLONG_PENALTY, .overlong_penalty = 0.5, .max_new_tokens = 8};
    c.advantage = (mt_advantage_config){.estimator = MT_ADV_REMAX, .gamma = 1};
    mt_rollouts_select(&r, &c);
    assert_int_equal(r.samples.count, 8);
    const double rewards[] = {1, 0, 0, 0, 1, 1, 0.5, 0.5}, baselines[] = {1, 1, 0, 0, 0, 0, 1.5, 1.5};
    for (int k = 0; k < 8; k++) {
        assert_int_equal(r.response_of[k], k / 2 * 3 + k % 2);
        assert_true(r.rewards[k] == rewards[k] && r.baselines[k] == baselines[k]);
    }
    assert_true(r.stats.score == 4.5 / 8); // of the others
    mt_rollouts_advantages(&r, &c);
    for (int k = 0; k < 8; k++)
        for (int64_t i = r.spans[k].q_start; i < r.spans[k].q_start + r.spans[k].q_len; i++)
            assert_true(r.inputs[MT_ADVANTAGES][i] == (r.mask[i] != 0 ? rewards[k] - baselines[k] : 0));
    c.dynamic_sampling = true;
    mt_rollouts_select(&r, &c);
    assert_int_equal(r.stats.groups_dropped, 3); // one has two rewards
    assert_int_equal(r.samples.count, 2);
    c = (mt_rollout_config){.whole = true, .max_new_tokens = 8};
    mt_rollouts_select(&r, &c);
    assert_int_equal(r.samples.count, RESPONSES); // a reward model scores them
    end_step(&r, &prompts);
}

/* Against their definition, with the clip behind them. */
static void rewards_are_normalised_over_batch_or_group(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    begin_step(&r, &prompts);
    mt_rollout_config c = {.max_new_tokens = 8, .norm_mean = MT_REWARD_NORM_BATCH, .norm_std = MT_REWARD_NORM_GROUP};
    mt_rollouts_select(&r, &c);
    double mean = 0;
    for (int s = 0; s < RESPONSES; s++) mean += scores[s] / RESPONSES;
    for (int s = 0; s < RESPONSES; s++) {
        const double *group = scores + s / GROUP * GROUP;
        double of_group = (group[0] + group[1] + group[2]) / GROUP, squares = 0;
        for (int i = 0; i < GROUP; i++) squares += (group[i] - of_group) * (group[i] - of_group);
        assert_true(fabs(r.rewards[s] - (scores[s] - mean) / (sqrt(squares / 2) + 1e-6)) < 1e-9);
    }
    c = (mt_rollout_config){.max_new_tokens = 8, .norm_mean = MT_REWARD_NORM_GROUP, .reward_clip = 0.5};
    mt_rollouts_select(&r, &c);
    assert_true(r.rewards[0] == 1 - 2.0 / 3 && r.rewards[1] == -0.5 && r.rewards[3] == 0 && r.rewards[11] == 0.5);
    for (int s = 0; s < RESPONSES; s++) r.scores[s] = scores[s];
    mt_rollouts_keep_part(&r, 0, 0);
    for (int s = 0; s < RESPONSES; s++) r.scores[s] = s;
    mt_rollouts_keep_part(&r, 0, 1);
    mt_rollouts_add_parts(&r, 0, &(mt_reals){{2, -0.5}, 2});
    for (int s = 0; s < RESPONSES; s++) assert_true(r.scores[s] == 2 * scores[s] - 0.5 * s);
    end_step(&r, &prompts);
}

static const mt_strings no_stops;

static void responses_are_scored_as_text(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    mt_error error;
    mt_reward_function *exact, *command;
    begin_step(&r, &prompts);
    assert_int_equal(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error), 0);
    if (mt_rollouts_score(&r, 0, exact, tokenizer, &no_stops, &error) != 0) fail_msg("%s", error.text);
    mt_reward_close(exact);
    const double expected[RESPONSES] = {1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0};
    for (int s = 0; s < RESPONSES; s++) assert_true(r.scores[s] == expected[s]);
    assert_int_equal(mt_reward_open(&command, MT_REWARD_COMMAND, "read -r l; echo x; sleep 9", 5, &error), 0);
    assert_int_equal(mt_rollouts_score(&r, 0, command, tokenizer, &no_stops, &error), -1);
    assert_non_null(strstr(error.text, "wrote \"x\""));
    mt_reward_close(command);
    end_step(&r, &prompts);
}

/* Texts of an environment between the turns of a response are not trained on, and rewards read the last turn. */
static void turns_train_what_the_model_wrote(void **state) {
    (void)state;
    mt_rollouts r;
    mt_error error;
    mt_reward_function *exact;
    const int64_t order[] = {0};
    mt_samples prompts = read_prompts((mt_sft_config){0}, "{\"prompt\": \"a\", \"answer\": \"9\"}");
    const int32_t tokens[] = {'1', 256, 'x', 'y', '9', 256};
    static const uint8_t is_written[] = {1, 1, 0, 0, 1, 1};
    for (int whole = 0; whole < 2; whole++) {
        uint8_t *flags = mt_malloc(sizeof is_written);
        memcpy(flags, is_written, sizeof is_written);
        mt_rollouts_begin(&r, &prompts, order, 1, 1);
        mt_rollouts_set(&r, 0, tokens, 6, false);
        mt_rollouts_set_turns(&r, 0, (mt_turns){flags, 2, 4, 0.25});
        assert_int_equal(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error), 0);
        assert_int_equal(mt_rollouts_score(&r, 0, exact, tokenizer, &no_stops, &error), 0);
        assert_true(r.scores[0] == 1);
        mt_rollouts_score_turns(&r, 0);
        assert_true(r.scores[0] == 0.25);
        mt_rollout_config c = {.whole = whole, .advantage = {.estimator = MT_ADV_REINFORCE, .gamma = 1}};
        mt_rollouts_select(&r, &c);
        if (!whole) assert_string_equal(sequence_text(&r, 0), "a,1|xy,9|");
        assert_int_equal(mt_rollouts_count(&r), 4 + whole);
        assert_true(r.stats.turns == 2 && r.mask[1] == 1 && r.mask[2] == 0 && r.mask[3] == 0 && r.mask[4] == 1);
        mt_rollouts_advantages(&r, &c);
        const double *advantages = r.inputs[MT_ADVANTAGES];
        assert_true(advantages[0] == 0.25 && advantages[2] == 0 && advantages[3] == 0 && advantages[5] == 0.25);
        mt_rollouts_free(&r);
        mt_reward_close(exact);
    }
    mt_samples_free(&prompts);
}

/* "1<|im_end|>" is scored as "1". */
static void special_tokens_are_not_scored(void **state) {
    (void)state;
    mt_rollouts r;
    mt_error error;
    mt_reward_function *exact;
    const int64_t order[] = {0};
    mt_tokenizer *chat = open_chatml();
    mt_samples prompts = read_prompts((mt_sft_config){0}, "{\"prompt\": \"a\", \"answer\": \"1\"}");
    const int32_t tokens[] = {mt_tokenizer_find(chat, "1", 1), mt_tokenizer_find(chat, "<|im_end|>", 10)};
    mt_rollouts_begin(&r, &prompts, order, 1, 1);
    mt_rollouts_set(&r, 0, tokens, 2, false);
    assert_int_equal(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error), 0);
    if (mt_rollouts_score(&r, 0, exact, chat, &no_stops, &error) != 0) fail_msg("%s", error.text);
    assert_true(r.scores[0] == 1);
    mt_reward_close(exact);
    end_step(&r, &prompts);
    mt_tokenizer_close(chat);
}

/* A model may have more rows than its tokenizer has tokens, and draw one of them. */
static void tokens_without_a_text_are_scored(void **state) {
    (void)state;
    mt_rollouts r;
    mt_error error;
    mt_reward_function *exact;
    const int64_t order[] = {0};
    const int32_t tokens[] = {'1', 999};
    mt_samples prompts = read_prompts((mt_sft_config){0}, "{\"prompt\": \"a\", \"answer\": \"1\\uFFFD\"}");
    mt_rollouts_begin(&r, &prompts, order, 1, 2);
    for (int s = 0; s < 2; s++) mt_rollouts_set(&r, s, tokens, 1 + s, false);
    assert_int_equal(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error), 0);
    if (mt_rollouts_score(&r, 0, exact, tokenizer, &no_stops, &error) != 0) fail_msg("%s", error.text);
    assert_true(r.scores[0] == 0 && r.scores[1] == 1);
    mt_reward_close(exact);
    end_step(&r, &prompts);
}

/* Of "1a2b", "a" ends the text: it is the answer "1"; so does "2b", if "a" is no stop string. */
static void texts_end_before_a_stop_string(void **state) {
    (void)state;
    mt_rollouts r;
    mt_error error;
    mt_reward_function *exact;
    const int64_t order[] = {0, 1};
    const int32_t tokens[] = {'1', 'a', '2', 'b'};
    char *texts[] = {"2b", "a", "xyz"};
    mt_samples prompts = read_prompts((mt_sft_config){0}, "{\"prompt\": \"a\", \"answer\": \"1\"}\n"
                                                          "{\"prompt\": \"b\", \"answer\": \"1a\"}");
    mt_rollouts_begin(&r, &prompts, order, 2, 1);
    for (int s = 0; s < 2; s++) mt_rollouts_set(&r, s, tokens, 4, false);
    assert_int_equal(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error), 0);
    for (int64_t count = 0; count <= 3; count++) {
        const mt_strings stops = {count, texts};
        assert_int_equal(mt_rollouts_score(&r, 0, exact, tokenizer, &stops, &error), 0);
        assert_true(r.scores[0] == (count >= 2) && r.scores[1] == (count == 1));
    }
    mt_reward_close(exact);
    end_step(&r, &prompts);
}

static void groups_with_equal_rewards_are_dropped(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &(mt_rollout_config){.dynamic_sampling = true, .max_new_tokens = 5});
    static const char *const expected[] = {"c,1|",      "c,22|",      "c,1|",       "bbb,2|",     "bbb,2|",
                                           "bbb,2abc|", "dddd,long|", "dddd,longe", "dddd,longer"};
    const int64_t groups[] = {0, 0, 0, 2, 2, 2, 3, 3, 3}, from[] = {0, 1, 2, 6, 7, 8, 9, 10, 11};
    assert_int_equal(r.samples.count, 9);
    assert_int_equal(r.stats.groups_dropped, 1);
    int64_t position = 0;
    for (int64_t k = 0; k < 9; k++) {
        assert_string_equal(sequence_text(&r, k), expected[k]);
        assert_true(r.groups[k] == groups[k] && r.response_of[k] == from[k] && r.rewards[k] == scores[from[k]]);
        assert_true(r.spans[k].q_start == position && r.spans[k].q_len == (int64_t)strlen(expected[k]) - 2);
        for (int64_t i = 0; i < r.spans[k].q_len; i++, position++)
            assert_true(r.mask[position] == r.samples.is_trained[r.samples.offsets[k] + i + 1]);
    }
    assert_int_equal(r.T, position);
    assert_true(fabs(r.stats.score - 7.5 / 12) < 1e-15 && fabs(r.stats.overlong - 2.0 / 12) < 1e-15);
    assert_true(fabs(r.stats.response_tokens - 38.0 / 12) < 1e-14);
    end_step(&r, &prompts);
    begin_step(&r, &prompts);
    for (int s = 0; s < RESPONSES; s++) r.scores[s] = 1;
    mt_rollouts_select(&r, &(mt_rollout_config){.dynamic_sampling = true});
    mt_rollouts_advantages(&r, &(mt_rollout_config){.advantage = {.estimator = MT_ADV_GRPO}}); // of no sequence
    assert_true(r.samples.count == 0 && r.T == 0 && r.stats.groups_dropped == GROUPS);
    end_step(&r, &prompts);
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &(mt_rollout_config){.first = 6}); // of the third group
    assert_true(r.samples.count == RESPONSES - 6 && r.response_of[0] == 6);
    mt_rollouts_select(&r, &(mt_rollout_config){0});
    assert_true(r.samples.count == RESPONSES && r.stats.groups_dropped == 0);
    end_step(&r, &prompts);
}

static void overlong_responses_are_masked_or_penalised(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &(mt_rollout_config){.overlong = MT_OVERLONG_MASK, .max_new_tokens = 6});
    assert_string_equal(sequence_text(&r, 9), "dddd,long|");
    assert_string_equal(sequence_text(&r, 10), "ddddlonge");
    assert_string_equal(sequence_text(&r, 11), "ddddlonger");
    assert_true(r.rewards[11] == 2);
    mt_rollouts_advantages(&r, &(mt_rollout_config){.advantage = {.estimator = MT_ADV_GRPO}});
    const mt_span *kept = &r.spans[9], *masked = &r.spans[11]; // the masked ones count in the group's mean
    assert_true(fabs(r.inputs[MT_ADVANTAGES][kept->q_start + kept->q_len - 1] - (0.5 - 3.5 / 3)) < 1e-15);
    for (int64_t i = 0; i < masked->q_len; i++) assert_true(r.inputs[MT_ADVANTAGES][masked->q_start + i] == 0);
    end_step(&r, &prompts);

    mt_rollout_config c = {.overlong = MT_OVERLONG_PENALTY, .overlong_penalty = 0.5, .max_new_tokens = 6};
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &c);
    assert_true(r.rewards[9] == 0.5 && r.rewards[10] == 0.5 && r.rewards[11] == 1.5);
    end_step(&r, &prompts);

    // DAPO: a factor of 2 over the last 4 of 6 tokens: -2 (length - 2) / 4, from 0 to -2
    c.overlong_buffer = 4, c.overlong_penalty = 2;
    static const double lengths[RESPONSES] = {2, 3, 2, 2, 2, 2, 2, 2, 5, 5, 5, 6};
    static const double punished[RESPONSES] = {1, -0.5, 1, 0, 0, 0, 1, 1, -1.5, -1, -1, 0};
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &c);
    for (int s = 0; s < RESPONSES; s++) assert_true((double)r.response_tokens[s] == lengths[s]);
    for (int s = 0; s < RESPONSES; s++) assert_true(r.rewards[s] == punished[s]);
    end_step(&r, &prompts);

    c.overlong_penalty = 0.5, c.reward_clip = 1;
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &c);
    assert_true(r.rewards[0] == 1 && r.rewards[1] == -0.125 && r.rewards[9] == 0.5 - 0.375 && r.rewards[11] == 1);
    end_step(&r, &prompts);
}

/* A NaN or an infinity of a reward model passes normalisation, clip, penalty and dynamic sampling, and reaches the
 * advantages of its group. Also the same infinity of a whole group. */
static void a_score_that_is_not_finite_reaches_the_advantages(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    mt_rollout_config c = {.overlong = MT_OVERLONG_PENALTY, .overlong_penalty = 0.5, .overlong_buffer = 4};
    c.max_new_tokens = 6, c.reward_clip = 1, c.dynamic_sampling = true, c.advantage.step_weights = 2;
    const mt_option *row = mt_option_find("adv-estimator", strlen("adv-estimator"));
    static const double bad[] = {NAN, INFINITY};
    int estimators = 1;
    for (const char *name = row->values; *name; name++) estimators += *name == '|';
    for (int i = 0; i < 2 * 2 * 3 * 3 * estimators; i++) {
        bool whole_group = i / 2 % 2;
        int estimator = i / 2 / 2 / 3 / 3;
        c.norm_mean = (mt_reward_norm)(i / 2 / 2 % 3), c.norm_std = (mt_reward_norm)(i / 2 / 2 / 3 % 3);
        c.advantage.estimator = (mt_adv_estimator)estimator;
        c.weights.count = estimator == MT_ADV_GDPO, c.weights.items[0] = 1;
        begin_step(&r, &prompts);
        for (int64_t s = 3; s < 6; s++) r.scores[s] = whole_group || s == 4 ? bad[i % 2] : 1;
        if (c.weights.count > 0) mt_rollouts_keep_part(&r, 0, 0);
        mt_rollouts_select(&r, &c);
        mt_rollouts_advantages(&r, &c);
        double sum = 0;
        int64_t found = 0;
        for (int64_t k = 0; k < r.samples.count; k++) {
            found += r.response_of[k] / 3 == 1;
            for (int64_t j = 0; j < r.spans[k].q_len; j++) sum += r.inputs[MT_ADVANTAGES][r.spans[k].q_start + j];
        }
        if (found != 3 || isfinite(sum))
            fail_msg("estimator %d, case %d: %d responses, advantages %g", estimator, i, (int)found, sum);
        end_step(&r, &prompts);
    }
}

/* KL in the reward, GAE, whitening: against §7b called here with arrays made by hand. */
static void advantages_come_from_the_stored_numbers(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    mt_rollout_config c = {.kl_type = MT_KL_K1,
                           .kl_in_reward = 0.1,
                           .advantage = {.estimator = MT_ADV_GAE, .gamma = 0.9, .lambda = 0.8, .whiten = false}};
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &c);
    for (int64_t t = 0; t < r.T; t++) {
        r.inputs[MT_OLD_LOGP][t] = -1 - 0.01 * (double)t, r.inputs[MT_REF_LOGP][t] = -1.5;
        r.inputs[MT_OLD_VALUES][t] = 0.1 * sin((double)t);
    }
    mt_rollouts_advantages(&r, &c);
    double kl = 0, counted = 0;
    for (int64_t k = 0; k < r.samples.count; k++) {
        double next_value = 0, next_advantage = 0;
        bool last = true;
        for (int64_t t = r.spans[k].q_start + r.spans[k].q_len; t-- > r.spans[k].q_start;) {
            if (r.mask[t] == 0) {
                assert_true(r.inputs[MT_ADVANTAGES][t] == 0 && r.inputs[MT_RETURNS][t] == 0);
                continue;
            }
            double of_token = r.inputs[MT_OLD_LOGP][t] + 1.5, value = r.inputs[MT_OLD_VALUES][t];
            double reward = (last ? scores[k] : 0) - 0.1 * of_token;
            next_advantage = reward + 0.9 * next_value - value + 0.9 * 0.8 * next_advantage;
            next_value = value, last = false;
            assert_true(fabs(r.token_rewards[t] - reward) < 1e-15);
            assert_true(fabs(r.inputs[MT_ADVANTAGES][t] - next_advantage) < 1e-14);
            assert_true(fabs(r.inputs[MT_RETURNS][t] - next_advantage - value) < 1e-14);
            kl += of_token, counted += 1;
        }
    }
    assert_true(fabs(r.stats.kl - kl / counted) < 1e-14);
    end_step(&r, &prompts);
}

static void mini_batches_divide_the_sequences(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    int64_t first[RESPONSES], again[RESPONSES], other[RESPONSES];
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &(mt_rollout_config){0});
    for (int64_t batches = 1; batches <= RESPONSES + 2; batches++) {
        bool seen[RESPONSES] = {false};
        int64_t count = 0;
        for (int64_t i = 0; i < batches; i++) {
            int64_t size = mt_rollouts_mini_batch(&r, true, 1, 5, 0, i, batches, first + count);
            assert_true(size >= RESPONSES / batches && size <= RESPONSES / batches + 1);
            assert_int_equal(mt_rollouts_mini_batch(&r, true, 1, 5, 0, i, batches, again), size);
            assert_memory_equal(first + count, again, (size_t)size * 8);
            count += size;
        }
        assert_int_equal(count, RESPONSES);
        for (int64_t i = 0; i < RESPONSES; i++) seen[first[i]] = true;
        for (int64_t i = 0; i < RESPONSES; i++) assert_true(seen[i]);
    }
    static const int64_t keys[][3] = {{2, 5, 0}, {1, 6, 0}, {1, 5, 1}};
    for (int i = 0; i < 3; i++) {
        mt_rollouts_mini_batch(&r, true, keys[i][0], keys[i][1], keys[i][2], 0, 1, other);
        assert_memory_not_equal(first, other, sizeof first);
    }
    assert_int_equal(mt_rollouts_mini_batch(&r, false, 1, 5, 0, 1, 3, other), 4);
    for (int64_t i = 0; i < 4; i++) assert_int_equal(other[i], 4 + i);
    end_step(&r, &prompts);
}

/* Other prompts in further rounds: their responses follow the first ones, which stay. */
static void further_prompts_extend_a_step(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    mt_error error;
    mt_reward_function *exact;
    const int64_t more[] = {3, 1};
    const int32_t two[] = {'2', 256};
    begin_step(&r, &prompts);
    mt_rollouts_extend(&r, more, 2);
    assert_true(r.count == RESPONSES + 2 * GROUP && r.num_prompts == GROUPS + 2);
    for (int64_t s = RESPONSES; s < r.count; s++) mt_rollouts_set(&r, s, two, 2, false);
    assert_int_equal(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error), 0);
    if (mt_rollouts_score(&r, RESPONSES, exact, tokenizer, &no_stops, &error) != 0) fail_msg("%s", error.text);
    mt_reward_close(exact);
    for (int s = 0; s < RESPONSES; s++) assert_true(r.scores[s] == scores[s]);
    for (int s = RESPONSES; s < r.count; s++) assert_true(r.scores[s] == (s >= RESPONSES + GROUP));
    mt_rollouts_select(&r, &(mt_rollout_config){0});
    assert_string_equal(sequence_text(&r, 0), "c,1|");
    assert_string_equal(sequence_text(&r, RESPONSES), "dddd,2|");
    assert_string_equal(sequence_text(&r, RESPONSES + GROUP), "bbb,2|");
    assert_true(r.groups[RESPONSES] == GROUPS && r.groups[RESPONSES + GROUP] == GROUPS + 1);
    mt_rollouts_select(&r, &(mt_rollout_config){.dynamic_sampling = true});
    assert_true(r.samples.count == 9 && r.stats.groups_dropped == 3);
    end_step(&r, &prompts);
}

/* A loaded micro-batch: every counted token has its own numbers. Stores `logp` as returns, adds the policy loss, and
 * returns the number of counted tokens. */
static int64_t check_micro_batch(mt_rollouts *r, mt_batch *batch, const double *logp, const mt_policy_config *c,
                                 mt_loss_sums *sums) {
    double inputs[MT_NUM_LOSS_INPUTS][64], own[64] = {0};
    int64_t counted = 0;
    for (int64_t t = 0; t < batch->num_tokens; t++)
        for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) batch->loss_inputs[i][t] = 99;
    mt_rollouts_load(r, batch);
    for (int64_t t = 0; t < batch->num_tokens; t++) {
        int64_t position = batch->loss_mask[t] != 0 ? batch->token_index[t] : -1;
        for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) {
            inputs[i][t] = (double)batch->loss_inputs[i][t];
            assert_true(inputs[i][t] == (position >= 0 ? r->inputs[i][position] : 0));
        }
        if (position >= 0) own[t] = logp[position], counted++;
    }
    mt_rollouts_store(r, MT_RETURNS, batch, own);
    mt_loss_tokens part = {.T = batch->num_tokens,
                           .num_sequences = batch->num_spans,
                           .sequences = batch->spans,
                           .mask = batch->loss_mask,
                           .logp = own,
                           .old_logp = inputs[MT_OLD_LOGP],
                           .ref_logp = inputs[MT_REF_LOGP],
                           .advantages = inputs[MT_ADVANTAGES]};
    mt_policy_loss(&part, c, sums);
    return counted;
}

/* Runs a mini-batch through micro-batches of `ranks` ranks: every counted token comes once, a policy loss over
 * micro-batches equals that of the whole, and what is stored comes back. */
static void check_micro_batches(mt_rollouts *r, int64_t ranks, bool packs, bool regroups, bool interleaves) {
    int64_t sequences[RESPONSES], count = mt_rollouts_mini_batch(r, true, 1, 2, 3, 0, 1, sequences), seen = 0,
                                  counted = 0;
    mt_plan_shape shape = {.num_ranks = ranks, .micro_batch_size = 2, .row_length = 12, .regroups = regroups};
    mt_step_plan plan;
    mt_batch batch;
    mt_error error;
    mt_policy_config c = {.clip_ratio_low = 0.2, .clip_ratio_high = 0.2, .kl_coef = 0.5, .kl_type = MT_KL_K3};
    mt_loss_sums whole = {0}, parts = {0};
    double *logp = mt_calloc(r->T * 8);
    shape.work.per_token = 1;
    for (int64_t t = 0; t < r->T; t++) {
        logp[t] = -1 - 0.1 * cos((double)t);
        for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) r->inputs[i][t] = (float)(-2 - 0.01 * (double)t - 0.001 * i);
        counted += r->mask[t] != 0;
    }
    mt_loss_tokens all = {.T = r->T,
                          .num_sequences = r->samples.count,
                          .sequences = r->spans,
                          .mask = r->mask,
                          .logp = logp,
                          .old_logp = r->inputs[MT_OLD_LOGP],
                          .ref_logp = r->inputs[MT_REF_LOGP],
                          .advantages = r->inputs[MT_ADVANTAGES]};
    mt_policy_loss(&all, &c, &whole);
    mt_batch_alloc(&batch, 64);
    int64_t slots = mt_divide_up(packs ? mt_divide_up(r->T, 12) : RESPONSES, 2 * ranks);
    if (interleaves) { // groups of 4 micro-batches, the last of at least 3
        shape.slot_group = 4, shape.slot_rest = 3;
        slots = slots <= 4 ? 4 : slots < 7 ? 7 : slots;
    }
    mt_rollouts_plan(&plan, r, sequences, count, packs, &shape);
    assert_int_equal(plan.num_ranks, ranks);
    assert_int_equal(plan.num_slots, slots);
    for (int64_t slot = 0; slot < plan.num_slots; slot++)
        for (int64_t rank = 0; rank < ranks; rank++) {
            assert_int_equal(mt_step_plan_fill(&plan, slot, rank, &r->samples, 8, &batch, &error), 0);
            seen += check_micro_batch(r, &batch, logp, &c, &parts);
        }
    assert_int_equal(seen, counted);
    assert_true(parts.count == whole.count && fabs(parts.loss - whole.loss) < 1e-12);
    for (int64_t t = 0; t < r->T; t++) // others stay
        assert_true(r->mask[t] != 0 ? r->inputs[MT_RETURNS][t] == logp[t] : r->inputs[MT_RETURNS][t] < -1.9);
    mt_step_plan_free(&plan);
    mt_batch_free(&batch);
    free(logp);
}

static void micro_batches_carry_every_token_once(void **state) {
    (void)state;
    mt_rollouts r;
    mt_samples prompts;
    begin_step(&r, &prompts);
    mt_rollouts_select(&r, &(mt_rollout_config){0});
    for (int64_t ranks = 1; ranks <= 5; ranks++)
        for (int kind = 0; kind < 8; kind++) check_micro_batches(&r, ranks, kind & 1, kind & 2, kind & 4);
    end_step(&r, &prompts);
}

static int open_all(void **state) {
    mt_error error;
    return make_root(state) || mt_tokenizer_open(&tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, &error);
}

static int close_all(void **state) {
    mt_tokenizer_close(tokenizer);
    return remove_root(state);
}

/* A batch is made of the oldest prompts whose responses have ended; one that began long ago is waited for. */
static void prompts_that_end_make_a_batch(void **state) {
    (void)state;
    mt_partials p = {.each = 2};
    mt_partial_group taken[2];
    for (int64_t i = 0; i < 4; i++) mt_partials_begin(&p, 10 + i, i, i / 2); // for batches 0, 0, 1, 1
    for (int64_t g = 1; g < 4; g++) p.groups[g].responses[0].ended = p.groups[g].responses[1].ended = g != 2;
    p.groups[0].responses[1].ended = true;
    assert_int_equal(mt_partials_unfinished(&p), 3);
    assert_true(mt_partials_suffice(&p, 2, 1, 2) && !mt_partials_suffice(&p, 3, 1, 2));
    assert_false(mt_partials_suffice(&p, 2, 2, 2)); // the first two have to be in batch 2
    mt_partials_take(&p, 2, taken);
    assert_true(taken[0].position == 11 && taken[1].position == 13 && p.count == 2);
    assert_true(p.groups[0].position == 10 && p.groups[1].position == 12);
    assert_false(mt_partials_suffice(&p, 0, 2, 2));
    p.groups[0].responses[0].ended = true;
    assert_true(mt_partials_suffice(&p, 1, 2, 2) && !mt_partials_suffice(&p, 1, 3, 2));
    for (int i = 0; i < 2; i++) mt_partial_group_free(&taken[i], 2);
    mt_partials_free(&p);
}

/* Batches that wait are read as they were written; a file of any other length is refused. */
static void pending_batches_are_read_as_written(void **state) {
    (void)state;
    mt_samples prompts;
    mt_error error;
    mt_rollout_config config = {.max_new_tokens = 6, .overlong = MT_OVERLONG_MASK};
    mt_pending written[2] = {{.iteration = 3, .rounds = 2, .entropy = 0.25, .mismatch = {.kl = 0.5}}, {.cut = 0.125}};
    mt_pending read[2] = {{.iteration = 0}};
    enum { ROW = 3 };
    begin_step(&written[0].rollouts, &prompts);
    mt_rollouts *r = &written[0].rollouts;
    int64_t order[] = {2};
    uint8_t *is_written = mt_calloc(r->response_tokens[1]);
    is_written[0] = 1;
    mt_rollouts_set_turns(r, 1, (mt_turns){.is_written = is_written, .count = 2, .last = 1, .reward = 0.5});
    mt_rollouts_keep_part(r, 0, 0);
    mt_rollouts_select(r, &config);
    float *keeps = mt_calloc(r->T * 4);
    for (int64_t t = 0; t < r->T; t++) {
        keeps[t] = t % 3 > 0;
        r->inputs[MT_OLD_LOGP][t] = -0.1 * (double)t, r->inputs[MT_ROLLOUT_WEIGHTS][t] = 1 + (double)t;
        r->squares[t] = 0.01 * (double)t;
    }
    mt_rollouts_keep(r, keeps);
    written[0].routes.experts = mt_calloc(r->T * ROW * 4);
    for (int64_t i = 0; i < r->T * ROW; i++) written[0].routes.experts[i] = (float)i;
    mt_rollouts_begin(&written[1].rollouts, &prompts, order, 1, 1);
    mt_rollouts_set(&written[1].rollouts, 0, (const int32_t[]){7}, 1, true);
    written[1].rollouts.scores[0] = NAN;
    mt_rollouts_select(&written[1].rollouts, &config);
    written[0].versions = (mt_versions){2.5, 1, 0.75};
    mt_waiting all = {.batches = written, .count = 2, .partials = {.each = 2}}, got = {.batches = read, .most = 2};
    got.partials.each = 2;
    mt_partials_begin(&all.partials, 11, 1, 3), mt_partials_begin(&all.partials, 12, 0, 4);
    mt_partial *going = &all.partials.groups[0].responses[1];
    mt_partial_append(going, (const int32_t[]){5, 6}, (const float[]){-0.5f, -1}, 2, 3);
    mt_partial_append(going, (const int32_t[]){7}, (const float[]){-2}, 1, 4);
    going->old_logps = mt_calloc(16), going->old_logps[1] = -1.25, going->num_scored = 2;
    going->routes = mt_calloc((int64_t)ROW * 4 * 4), going->num_routes = 4, going->overlong = true;
    int64_t size, again;
    char *bytes = mt_waiting_write(&all, ROW, &size);
    assert_int_equal(mt_waiting_read(&got, bytes, size, ROW, &prompts, &config, &error), 0);
    char *copy = mt_waiting_write(&got, ROW, &again);
    assert_int_equal(size, again);
    assert_memory_equal(bytes, copy, (size_t)size);
    const mt_rollouts *other = &read[0].rollouts;
    assert_int_equal(other->T, r->T);
    assert_memory_equal(other->mask, r->mask, (size_t)r->T * 4);
    assert_memory_equal(other->samples.is_trained, r->samples.is_trained, (size_t)r->samples.offsets[r->samples.count]);
    assert_int_equal(read[0].iteration, 3);
    assert_true(read[0].mismatch.kl == 0.5 && read[1].cut == 0.125 && other->turns[1].reward == 0.5);
    const mt_partial *gone = &got.partials.groups[0].responses[1];
    assert_true(gone->versions[2] == 4 && gone->old_logps[1] == -1.25 && gone->overlong && !gone->ended);
    assert_int_equal(got.partials.groups[1].position, 12);
    mt_waiting_clear(&got);
    for (int64_t less = 0; less < size; less++)
        assert_int_equal(mt_waiting_read(&got, bytes, less, ROW, &prompts, &config, &error), -1);
    got.partials.each = 3;
    assert_int_equal(mt_waiting_read(&got, bytes, size, ROW, &prompts, &config, &error), -1);
    assert_non_null(strstr(error.text, "num-return-sequences"));
    got.most = 1;
    assert_int_equal(mt_waiting_read(&got, bytes, size, ROW, &prompts, &config, &error), -1);
    assert_non_null(strstr(error.text, "more than the 1"));
    got.most = 2;
    assert_int_equal(mt_waiting_read(&got, bytes, size, ROW + 1, &prompts, &config, &error), -1);
    assert_non_null(strstr(error.text, "another model"));
    // a file of the first format: without versions and responses in progress
    mt_waiting none = {.batches = written};
    char *first = mt_waiting_write(&none, ROW, &again);
    first[6] = '1', got.partials.each = 2;
    assert_int_equal(mt_waiting_read(&got, first, again - 16, ROW, &prompts, &config, &error), 0);
    free(first);
    mt_waiting_clear(&all);
    free(bytes), free(copy), free(keeps);
    mt_samples_free(&prompts);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_are_read_in_every_form),
        cmocka_unit_test(bad_and_long_prompts_are_left_out_or_errors),
        cmocka_unit_test(the_header_of_the_response_ends_a_prompt),
        cmocka_unit_test(order_depends_on_seed_and_position_only),
        cmocka_unit_test(shares_of_tags_have_quotas_and_epochs),
        cmocka_unit_test(prompts_name_their_teachers),
        cmocka_unit_test(prompts_that_end_make_a_batch),
        cmocka_unit_test(pending_batches_are_read_as_written),
        cmocka_unit_test(rewards_are_normalised_over_batch_or_group),
        cmocka_unit_test(baselines_are_compared_with_and_not_trained_on),
        cmocka_unit_test(responses_are_scored_as_text),
        cmocka_unit_test(turns_train_what_the_model_wrote),
        cmocka_unit_test(special_tokens_are_not_scored),
        cmocka_unit_test(tokens_without_a_text_are_scored),
        cmocka_unit_test(texts_end_before_a_stop_string),
        cmocka_unit_test(groups_with_equal_rewards_are_dropped),
        cmocka_unit_test(overlong_responses_are_masked_or_penalised),
        cmocka_unit_test(a_score_that_is_not_finite_reaches_the_advantages),
        cmocka_unit_test(advantages_come_from_the_stored_numbers),
        cmocka_unit_test(mini_batches_divide_the_sequences),
        cmocka_unit_test(further_prompts_extend_a_step),
        cmocka_unit_test(micro_batches_carry_every_token_once),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
