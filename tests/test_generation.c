/* Generation: sampling compared with its definition, the key/value cache with full forwards, greedy continuations with
 * Hugging Face transformers. */
// Sections of megatron.c: §15c §16 §1
#include "../cuda/decode.h"
#include "../data/tokens/prompts.h"
#include "../data/tokens/response.h"
#include "../data/models/special_tokens.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/generate.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/hf_folder.h"
#include "../data/checkpoint/run_options.h"
#include "families.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const mt_stops no_stops = {.count = 0};
static const mt_sampling greedy = {.temperature = 0, .top_p = 1};

/* ---- a model from a folder */

/* Separate from create_model so that the model's pointer to the options stays valid. */
static mt_run_options read_options(const char *folder) {
    mt_run_options options;
    mt_error error = {{0}};
    char *arguments[] = {"infer", "--load", (char *)folder, "--max-new-tokens", "24"};
    if (mt_options_parse(&options, MT_PROGRAM_INFER, 5, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_INFER, 1, &error) != 0)
        fail_msg("%s", error.text);
    return options;
}

static mt_model *create_model(const mt_run_options *options, const mt_model_plan *plan) {
    mt_model *model;
    mt_error error = {{0}};
    mt_run_state state = {0};
    if (mt_model_create(&model, &options->stack, &mt_grid_of_one, &mt_cpu_ops, plan, &error) != 0 ||
        mt_checkpoint_load(model, options, &state, options->load, &error) != 0)
        fail_msg("%s", error.text);
    return model;
}

/* --device auto may select the CPU after the options were checked. */
static void a_model_on_the_cpu_has_no_backend_of_a_gpu(void **state) {
    (void)state;
    const mt_model_plan plan = {.max_tokens = 8, .max_logits = 8, .max_position = 8};
    const mt_attention_backend backends[] = {MT_ATTENTION_UNFUSED, MT_ATTENTION_CUDNN};
    for (int i = 0; i < 2; i++) {
        mt_run_options options = read_options("tests/golden/hf/gpt2");
        mt_error error = {{0}};
        mt_model *model = NULL;
        options.stack.attention_backend = backends[i];
        assert_int_equal(mt_model_create(&model, &options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error), -1);
        assert_non_null(strstr(error.text, "needs a GPU, and this run is on the CPU"));
        assert_non_null(strstr(error.text, i == 0 ? "unfused" : "cudnn"));
        assert_null(model);
        mt_options_free(&options);
    }
}

/* Steps of generation choose among keys with equal scores as a forward of the whole text only where that does not
 * depend on the number of keys. */
static mt_run_options read_family(int family) {
    char folder[256];
    snprintf(folder, sizeof folder, "tests/golden/hf/%s", families[family]);
    mt_run_options options = read_options(folder);
    options.stack.dsa_indexer_ties = MT_TIES_FIRST;
    return options;
}

/* Reads an array of ids from a JSON file; returns their number. */
static int64_t read_ids(const char *path, const char *key, int32_t *ids, int64_t room) {
    json_t *root = json_load_file(path, 0, NULL), *item;
    size_t i;
    assert_non_null(root);
    int64_t count = (int64_t)json_array_size(json_object_get(root, key));
    assert_in_range(count, 1, room);
    json_array_foreach(json_object_get(root, key), i, item) ids[i] = (int32_t)json_integer_value(item);
    json_decref(root);
    return count;
}

static mt_sequence begin(const mt_run_options *options, int64_t id, const int32_t *prompt, int64_t count,
                         int64_t context) {
    mt_sequence sequence;
    mt_error error;
    if (mt_sequence_begin(&sequence, id, prompt, count, context, options->max_new_tokens, &options->stack, &error) != 0)
        fail_msg("%s", error.text);
    return sequence;
}

/* Generates until all sequences are finished, with at most `piece` tokens per forward (0: as planned). */
static void run(const mt_run_options *options, mt_sequence *sequences, int64_t count, int64_t piece,
                const mt_sampling *sampling, const mt_stops *stops) {
    mt_error error;
    int64_t longest = 0, prompt_tokens = 0, unfinished = count, steps = 0;
    for (int64_t s = 0; s < count; s++) {
        if (sequences[s].max_tokens > longest) longest = sequences[s].max_tokens;
        prompt_tokens += sequences[s].num_prompt;
    }
    mt_model_plan plan = mt_generator_plan(count, longest, prompt_tokens);
    if (piece > 0) plan.max_tokens = piece;
    mt_model *model = create_model(options, &plan);
    mt_generator *generator = mt_generator_create(model, sampling, stops);
    for (; unfinished > 0; steps++) {
        unfinished = mt_generator_step(generator, sequences, count, &error);
        if (unfinished < 0) fail_msg("%s", error.text);
    }
    /* One forward reads whole prompts, or plan.max_tokens tokens; each other one writes a token. */
    assert_in_range(steps, 1, options->max_new_tokens + (piece > 0 ? count * longest / piece : prompt_tokens / 512));
    mt_generator_destroy(generator);
    mt_model_destroy(model);
}

static void assert_same_tokens(const mt_sequence *a, const mt_sequence *b) {
    assert_int_equal(a->num_tokens, b->num_tokens);
    for (int64_t i = 0; i < a->num_tokens; i++)
        if (a->tokens[i] != b->tokens[i])
            fail_msg("token %d of sequence %d: %d and %d", (int)i, (int)a->id, a->tokens[i], b->tokens[i]);
}

/* ---- sampling */

enum { DRAWS = 20000, CHOICES = 8 };

static const float logits8[CHOICES] = {0.3f, -1.2f, 2.0f, 0.3f, -0.5f, 1.4f, -3.0f, 0.9f};

/* The token drawn for a position of a sequence. */
static int32_t sample(const float *logits, int64_t V, const mt_sampling *sampling, int64_t id, int64_t position,
                      int32_t *scratch) {
    const mt_sequence sequence = {.id = id, .num_tokens = position};
    return mt_sample(logits, V, sampling, &sequence, scratch).token;
}

static void count_draws(const float *logits, int64_t V, const mt_sampling *sampling, int64_t *counts) {
    int32_t order[2 * CHOICES];
    for (int64_t i = 0; i < V; i++) counts[i] = 0;
    for (int64_t position = 0; position < DRAWS; position++) {
        int32_t token = sample(logits, V, sampling, 3, position, order);
        assert_in_range(token, 0, V - 1);
        counts[token]++;
    }
}

/* Fails if the counts come from these weights with a probability under 1 in 1,000 (Pearson's chi-square test). */
static void assert_drawn_from(const double *weights, const int64_t *counts, int64_t V) {
    static const double limit[CHOICES] = {0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32}; // by degrees of freedom
    double total = 0, chi_square = 0;
    int choices = 0;
    for (int64_t i = 0; i < V; i++) total += weights[i];
    for (int64_t i = 0; i < V; i++) {
        double expected = DRAWS * weights[i] / total, difference = (double)counts[i] - expected;
        if (weights[i] == 0)
            assert_int_equal(counts[i], 0);
        else
            chi_square += difference * difference / expected, choices++;
    }
    if (!(chi_square <= limit[choices - 1])) fail_msg("chi-square is %g for %d choices", chi_square, choices);
}

static void draws_follow_the_softmax_at_any_temperature(void **state) {
    (void)state;
    const double temperatures[] = {0.5, 1, 2.5};
    for (int k = 0; k < 3; k++) {
        int64_t counts[CHOICES];
        double weights[CHOICES];
        mt_sampling sampling = {.temperature = temperatures[k], .top_p = 1, .seed = 7};
        for (int i = 0; i < CHOICES; i++) weights[i] = exp(logits8[i] / temperatures[k]);
        count_draws(logits8, CHOICES, &sampling, counts);
        assert_drawn_from(weights, counts, CHOICES);
    }
}

static void top_k_draws_from_the_k_most_probable_in_proportion(void **state) {
    (void)state;
    const int32_t by_rank[CHOICES] = {2, 5, 7, 0, 3, 4, 1, 6}; // 0 before 3: equal logits, lower id
    for (int64_t k = 1; k <= CHOICES; k++) {
        int64_t counts[CHOICES];
        double weights[CHOICES] = {0};
        mt_sampling sampling = {.temperature = 1, .top_p = 1, .top_k = k, .seed = 11};
        for (int64_t i = 0; i < k; i++) weights[by_rank[i]] = exp(logits8[by_rank[i]]);
        count_draws(logits8, CHOICES, &sampling, counts);
        assert_drawn_from(weights, counts, CHOICES);
    }
}

static void top_p_draws_from_the_fewest_that_hold_p(void **state) {
    (void)state;
    const double weights[4] = {0.15, 0.5, 0.05, 0.3}; // cumulative, most probable first: 0.5, 0.8, 0.95, 1
    float logits[4];
    for (int i = 0; i < 4; i++) logits[i] = (float)log(weights[i]);
    const struct {
        double top_p;
        int64_t top_k;
        double kept[4];
    } cases[] = {
        {0.001, 0, {0, 0.5, 0, 0}},  {0.49, 0, {0, 0.5, 0, 0}},      {0.51, 0, {0, 0.5, 0, 0.3}},
        {0.79, 0, {0, 0.5, 0, 0.3}}, {0.81, 0, {0.15, 0.5, 0, 0.3}}, {0.96, 0, {0.15, 0.5, 0.05, 0.3}},
        {0.83, 3, {0, 0.5, 0, 0.3}}, {0.85, 3, {0.15, 0.5, 0, 0.3}}, // cumulative over the top three: 0.526, 0.842, 1
        {0.62, 2, {0, 0.5, 0, 0}}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int64_t counts[CHOICES];
        mt_sampling sampling = {.temperature = 1, .top_p = cases[k].top_p, .top_k = cases[k].top_k, .seed = 5};
        count_draws(logits, 4, &sampling, counts);
        assert_drawn_from(cases[k].kept, counts, 4);
    }
}

/* Compares with a full sort, for many random distributions that include equal logits. */
static void top_k_and_top_p_keep_what_sorting_would(void **state) {
    (void)state;
    enum { V = 300 };
    float logits[V];
    int32_t order[2 * V];
    for (uint64_t trial = 0; trial < 200; trial++) {
        uint32_t words[4];
        for (uint64_t i = 0; i < V; i++) {
            mt_philox(words, 1, trial, i);
            logits[i] = (float)(words[0] % 64) / 8;
        }
        mt_philox(words, 2, trial, 0);
        mt_sampling sampling = {.temperature = 0.8, .top_k = words[0] % V, .top_p = (words[1] % 100 + 1) / 100.0};
        int32_t token = sample(logits, V, &sampling, 0, (int64_t)trial, order);
        double before = 0, all = 0; // weight of the tokens that come before the drawn one, and of the top k
        int64_t rank = 0, k = sampling.top_k ? sampling.top_k : V;
        for (int32_t i = 0; i < V; i++) {
            int64_t rank_i = 0;
            for (int32_t j = 0; j < V; j++) rank_i += logits[j] > logits[i] || (logits[j] == logits[i] && j < i);
            double weight = exp(logits[i] / 0.8);
            bool first = logits[i] > logits[token] || (logits[i] == logits[token] && i < token);
            if (first) before += weight;
            if (rank_i < k) all += weight;
            rank += first;
        }
        assert_true(rank < k);
        assert_true(rank == 0 || before < sampling.top_p * all * (1 + 1e-12));
    }
}

static void min_p_keeps_the_tokens_near_the_most_probable(void **state) {
    (void)state;
    const double weights[4] = {0.15, 0.5, 0.05, 0.3}; // over the greatest: 0.3, 1, 0.1, 0.6
    float logits[4];
    for (int i = 0; i < 4; i++) logits[i] = (float)log(weights[i]);
    const struct {
        double min_p, top_p;
        int64_t top_k;
        double kept[4];
    } cases[] = {
        {0.05, 1, 0, {0.15, 0.5, 0.05, 0.3}}, {0.2, 1, 0, {0.15, 0.5, 0, 0.3}}, {0.5, 1, 0, {0, 0.5, 0, 0.3}},
        {0.7, 1, 0, {0, 0.5, 0, 0}},          {1, 1, 0, {0, 0.5, 0, 0}},        {0.2, 0.79, 0, {0, 0.5, 0, 0.3}},
        {0.5, 0.96, 3, {0, 0.5, 0, 0.3}},     {0.05, 1, 3, {0.15, 0.5, 0, 0.3}}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int64_t counts[CHOICES];
        mt_sampling sampling = {.temperature = 1, .top_p = cases[k].top_p, .top_k = cases[k].top_k, .seed = 6};
        sampling.min_p = cases[k].min_p;
        count_draws(logits, 4, &sampling, counts);
        assert_drawn_from(cases[k].kept, counts, 4);
    }
    /* Temperature 2 takes square roots: 0.55, 1, 0.32, 0.77. */
    const double kept[4] = {sqrt(0.15), sqrt(0.5), 0, sqrt(0.3)};
    int64_t counts[CHOICES];
    mt_sampling sampling = {.temperature = 2, .top_p = 1, .min_p = 0.5, .seed = 6};
    count_draws(logits, 4, &sampling, counts);
    assert_drawn_from(kept, counts, 4);
}

/* Logits of tokens in the prompt or text are divided by the penalty if positive, else multiplied, once each. */
static void the_repetition_penalty_changes_logits_of_tokens_seen(void **state) {
    (void)state;
    int32_t tokens[] = {2, 6, 2, 5}, scratch[2 * CHOICES];
    double weights[CHOICES];
    int64_t counts[CHOICES] = {0};
    mt_sequence sequence = {.id = 3, .tokens = tokens, .num_prompt = 2, .num_tokens = 4};
    mt_sampling sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1.7};
    for (int i = 0; i < CHOICES; i++) {
        bool seen = i == 2 || i == 5 || i == 6;
        weights[i] = exp(!seen ? logits8[i] : logits8[i] > 0 ? logits8[i] / 1.7 : logits8[i] * 1.7);
    }
    for (uint64_t draw = 0; draw < DRAWS; draw++) {
        sampling.seed = draw;
        counts[mt_sample(logits8, CHOICES, &sampling, &sequence, scratch).token]++;
    }
    assert_drawn_from(weights, counts, CHOICES);
    sampling.temperature = 0; // token 2 has 2.0 / 1.7, token 5 1.4 / 1.7, and token 7 keeps 0.9
    assert_int_equal(mt_sample(logits8, CHOICES, &sampling, &sequence, scratch).token, 2);
    sampling.repetition_penalty = 3;
    assert_int_equal(mt_sample(logits8, CHOICES, &sampling, &sequence, scratch).token, 7);
}

/* logp is the log-softmax of the scaled logits; sampled_logp that of the tokens kept, after penalty and temperature. */
static void log_probabilities_are_of_the_model_and_of_the_draw(void **state) {
    (void)state;
    int32_t tokens[] = {2, 6}, scratch[2 * CHOICES];
    const mt_sampling samplings[] = {
        {.temperature = 0, .top_p = 1, .logprobs = true},
        {.temperature = 1, .top_p = 1, .logprobs = true},
        {.temperature = 0.7, .top_p = 0.8, .logprobs = true},
        {.temperature = 0.7, .top_p = 1, .top_k = 4, .logprobs = true, .logp_scale = 1 / 0.7f},
        {.temperature = 1, .top_p = 1, .repetition_penalty = 1.3, .logprobs = true, .logp_scale = 0.5f},
        {.temperature = 1.5, .top_p = 1, .top_k = 3, .repetition_penalty = 1.3, .logprobs = true},
        {.temperature = 1, .top_p = 1, .min_p = 0.2, .logprobs = true},
        {.temperature = 1, .top_p = 1},
    };
    for (size_t k = 0; k < sizeof samplings / sizeof *samplings; k++)
        for (int64_t draw = 0; draw < 50; draw++) {
            const mt_sampling *s = &samplings[k];
            mt_sequence sequence = {.id = draw, .tokens = tokens, .num_tokens = 2};
            mt_sampled sampled = mt_sample(logits8, CHOICES, s, &sequence, scratch);
            double all = 0, kept = 0, weights[CHOICES], top = 0, scale = s->logp_scale > 0 ? s->logp_scale : 1;
            for (int i = 0; i < CHOICES; i++) {
                double x = logits8[i], penalty = s->repetition_penalty > 0 ? s->repetition_penalty : 1;
                if (i == 2 || i == 6) x = x > 0 ? x / penalty : x * penalty;
                weights[i] = s->temperature > 0 ? exp(x / s->temperature) : 0;
                all += exp(scale * logits8[i]), kept += weights[i], top = fmax(top, weights[i]);
            }
            double total = kept;
            for (int i = 0; i < CHOICES; i++) { // by the weight before each, in order
                double before = 0;
                int64_t rank = 0;
                for (int j = 0; j < CHOICES; j++)
                    if (weights[j] > weights[i] || (weights[j] == weights[i] && j < i)) before += weights[j], rank++;
                bool in =
                    (s->top_k == 0 || rank < s->top_k) && before < s->top_p * total && weights[i] >= s->min_p * top;
                if (!in) kept -= weights[i];
            }
            double logp = s->logprobs ? scale * logits8[sampled.token] - log(all) : 0;
            double sampled_logp = s->temperature > 0 ? log(weights[sampled.token] / kept) : 0;
            if (!(fabs(sampled.logp - logp) <= 1e-6 && fabs(sampled.sampled_logp - sampled_logp) <= 1e-6))
                fail_msg("case %d, token %d: %.8f and %.8f, should be %.8f and %.8f", (int)k, sampled.token,
                         sampled.logp, sampled.sampled_logp, logp, sampled_logp);
        }
}

/* The operation of the backends on many rows gives the bits of mt_sample, for equal logits and logits that are not
 * numbers too. */
static void the_operation_samples_as_one_call_per_row(void **state) {
    (void)state;
    enum { T = 40, V = 300, STRIDE = 304, COLUMNS = 2 };
    static const int64_t columns[COLUMNS] = {V, 1}, top_ks[] = {0, 1, 50, V};
    static const double temperatures[] = {0, 0.7, 1}, top_ps[] = {1, 0.95, 0.1}, min_ps[] = {0, 0.05};
    static float logits[T * STRIDE];
    static uint16_t rounded[T * STRIDE];
    static int32_t scratch[2 * V];
    double uniforms[T];
    mt_sampled sampled[T];
    for (int64_t i = 0; i < T * STRIDE; i++) {
        uint32_t words[4];
        mt_philox(words, 1, (uint64_t)i, 0);
        logits[i] = words[1] % 50 == 0 ? -INFINITY : (float)(words[0] % 64) / 8;
        if (i == 5 * STRIDE || i % STRIDE >= V) logits[i] = NAN;
        if (i / STRIDE == 6) logits[i] = -INFINITY;
    }
    mt_cpu_ops.convert(rounded, MT_BF16, logits, MT_F32, T * STRIDE, NULL); // exact
    for (int64_t t = 0; t < T; t++) {
        uint32_t words[4];
        mt_philox(words, mt_random_key(13, 3, 0), (uint64_t)(t % 7), (uint64_t)t); // the purpose of sampling is 3
        uniforms[t] = ldexp((double)((uint64_t)words[0] << 21 | words[1] >> 11), -53);
    }
    for (int i = 0; i < 3 * 4 * 3 * 2 * COLUMNS * 2; i++) {
        mt_sampling s = {.temperature = temperatures[i % 3], .top_k = top_ks[i / 3 % 4], .top_p = top_ps[i / 12 % 3]};
        s.min_p = min_ps[i / 36 % 2], s.logprobs = i % 5 < 3, s.seed = 13;
        bool is_bf16 = i / 72 % 2;
        mt_sample_args a = {T, STRIDE, columns[i / 144], &s, is_bf16 ? (void *)rounded : logits, uniforms, sampled};
        mt_cpu_ops.sample(&a, is_bf16 ? MT_BF16 : MT_F32, NULL);
        for (int64_t t = 0; t < T; t++) {
            const mt_sequence sequence = {.id = t, .num_tokens = t % 7};
            mt_sampled expected = mt_sample(logits + t * STRIDE, a.count, &s, &sequence, scratch);
            assert_memory_equal(&sampled[t], &expected, sizeof expected);
        }
        assert_int_equal(sampled[5].token, -1);
        assert_int_equal(sampled[6].token, -1);
    }
}

/* A penalty that is all but 1 changes no logit, and lets the host sample. */
static void the_device_samples_what_the_host_does(void **state) {
    (void)state;
    const mt_sampling samplings[] = {{.temperature = 1, .top_p = 0.95, .top_k = 50, .seed = 3},
                                     {.temperature = 0.7, .top_p = 1, .seed = 4},
                                     {.temperature = 0, .top_p = 1}};
    for (int k = 0; k < 3; k++) {
        mt_run_options options = read_family(k);
        const int32_t prompt[] = {3, 9, 27};
        mt_sequence device = begin(&options, 5, prompt, 3, 64), host = begin(&options, 5, prompt, 3, 64);
        mt_sampling sampling = samplings[k];
        run(&options, &device, 1, 0, &sampling, &no_stops);
        sampling.repetition_penalty = 1 + 0x1p-50;
        run(&options, &host, 1, 0, &sampling, &no_stops);
        assert_same_tokens(&device, &host);
        mt_sequence_end(&device), mt_sequence_end(&host);
        mt_options_free(&options);
    }
}

static void greedy_takes_the_lowest_id_among_equals(void **state) {
    (void)state;
    const float logits[] = {1, 3, -INFINITY, 3, 2};
    int32_t order[10];
    assert_int_equal(sample(logits, 5, &greedy, 0, 0, order), 1);
    mt_sampling one = {.temperature = 1, .top_p = 1, .top_k = 1};
    for (int64_t position = 0; position < 100; position++)
        assert_int_equal(sample(logits, 5, &one, 0, position, order), 1);
}

static void logits_that_are_not_numbers_are_refused(void **state) {
    (void)state;
    const float bad[][3] = {{NAN, 1, 2}, {1, 2, NAN}, {1, INFINITY, 0}, {-INFINITY, -INFINITY, -INFINITY}};
    const mt_sampling drawn = {.temperature = 1, .top_p = 0.9};
    int32_t order[6];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(sample(bad[i], 3, &greedy, 0, 0, order), -1);
        assert_int_equal(sample(bad[i], 3, &drawn, 0, 0, order), -1);
    }
}

static void a_draw_depends_on_seed_sequence_and_position_alone(void **state) {
    (void)state;
    enum { V = 5000 };
    static float logits[V]; // all equal: every draw is one of 5,000
    static int32_t order[2 * V];
    const mt_sampling a = {.temperature = 1, .top_p = 1, .seed = 1}, b = {.temperature = 1, .top_p = 1, .seed = 2};
    int32_t token = sample(logits, V, &a, 4, 9, order);
    assert_int_equal(sample(logits, V, &a, 4, 9, order), token);
    assert_int_not_equal(sample(logits, V, &b, 4, 9, order), token);
    assert_int_not_equal(sample(logits, V, &a, 5, 9, order), token);
    assert_int_not_equal(sample(logits, V, &a, 4, 10, order), token);
}

/* ---- the cache */

static void greedy_continuations_equal_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_run_options options = read_family(k);
        int32_t expected[64];
        char path[512];
        if (has_equal_scores(families[k])) {
            mt_options_free(&options);
            continue;
        }
        snprintf(path, sizeof path, "%s/expected.json", options.load);
        int64_t count = read_ids(path, "greedy_ids", expected, 64);
        assert_int_equal(count, 32); // 8 of the prompt and 24 generated
        mt_sequence sequence = begin(&options, 0, expected, 8, 64);
        run(&options, &sequence, 1, 0, &greedy, &no_stops);
        assert_int_equal(sequence.num_tokens, count);
        for (int64_t i = 0; i < count; i++)
            if (sequence.tokens[i] != expected[i])
                fail_msg("%s: token %d is %d, expected %d", families[k], (int)i, sequence.tokens[i], expected[i]);
        mt_sequence_end(&sequence);
        mt_options_free(&options);
    }
}

static void a_folder_opens_and_generates_in_two_calls(void **state) {
    (void)state;
    const char *const settings[] = {"device", "cpu", NULL};
    for (int k = 0; k < NUM_FAMILIES; k++) {
        char folder[256], path[512];
        mt_grid grid = mt_grid_of_one;
        mt_hf *hf;
        mt_error error;
        int32_t expected[64], tokens[32];
        int64_t num_tokens = 8;
        if (has_equal_scores(families[k])) continue;
        snprintf(folder, sizeof folder, "tests/golden/hf/%s", families[k]);
        snprintf(path, sizeof path, "%s/expected.json", folder);
        assert_int_equal(read_ids(path, "greedy_ids", expected, 64), 32);
        memcpy(tokens, expected, 8 * sizeof *tokens);
        if (mt_hf_open(&hf, folder, settings, 1, 32, &grid, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(mt_generate(hf->model, tokens, &num_tokens, 1, 32, NULL, NULL, &error), 0);
        assert_int_equal(num_tokens, 32);
        assert_memory_equal(tokens, expected, sizeof tokens);
        mt_hf_close(hf);
    }
}

static void a_folder_that_cannot_be_opened_says_why(void **state) {
    (void)state;
    const struct {
        const char *folder, *name, *value, *says;
        int64_t max_tokens;
    } cases[] = {{"tests/golden/hf/absent", NULL, NULL, "No such file", 8},
                 {"tests/golden/hf/llama", "devise", "cpu", "device", 8},
                 {"tests/golden/hf/llama", "tensor_model_parallel_size", "2", "tensor-model-parallel-size", 8},
                 {"tests/golden/hf/llama", "device", "cpu", "context", 1 << 30}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *const settings[] = {cases[i].name, cases[i].value, NULL};
        mt_grid grid = mt_grid_of_one;
        mt_hf *hf;
        mt_error error;
        assert_int_equal(mt_hf_open(&hf, cases[i].folder, settings, 1, cases[i].max_tokens, &grid, &error), -1);
        assert_null(hf);
        if (!strstr(error.text, cases[i].says)) fail_msg("%s does not say %s", error.text, cases[i].says);
    }
}

/* Logits [count, vocab_size] of one forward of the whole sequence. */
static void forward_whole(mt_model *model, mt_batch *batch, const int32_t *tokens, int64_t count, float *logits) {
    for (int64_t t = 0; t < count; t++) {
        batch->tokens[t] = tokens[t], batch->labels[t] = 0, batch->positions[t] = (int32_t)t;
        batch->loss_mask[t] = 1, batch->token_index[t] = t;
    }
    batch->spans[0] = (mt_span){.q_len = count, .k_len = count, .causal = true};
    batch->num_tokens = count, batch->num_spans = 1;
    mt_model_forward(model, batch, false);
    mt_model_read(model, NULL, NULL, logits);
}

/* Logits of the last of tokens [first, first + count); the cache holds the earlier tokens from row `base` on. */
static void decode(mt_model *model, mt_batch *batch, const int32_t *tokens, int64_t first, int64_t count, int64_t base,
                   float *logits) {
    int32_t rows[64], last = (int32_t)count - 1;
    for (int64_t t = 0; t < count; t++) {
        batch->tokens[t] = tokens[first + t], batch->positions[t] = (int32_t)(first + t);
        rows[t] = (int32_t)(base + first + t);
    }
    batch->spans[0] = (mt_span){.q_len = count, .k_start = base, .k_len = first + count, .causal = true};
    batch->num_tokens = count, batch->num_spans = 1;
    mt_model_decode(model, batch, rows, &last, 1, logits);
}

static void decoding_gives_the_logits_of_a_full_forward(void **state) {
    (void)state;
    enum { COUNT = 23, BASE = 5 };
    const int64_t prompts[] = {1, 3, 7, 16, 22};
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_run_options options = read_family(k);
        mt_model_plan plan = {
            .max_tokens = COUNT, .max_logits = COUNT, .cache_rows = COUNT + BASE, .max_position = COUNT};
        mt_model *model = create_model(&options, &plan);
        mt_batch batch;
        mt_batch_alloc(&batch, COUNT);
        int64_t V = options.stack.vocab_size;
        float *whole = mt_malloc(COUNT * V * 4), *step = mt_malloc(V * 4);
        int32_t tokens[COUNT];
        for (int32_t i = 0; i < COUNT; i++) tokens[i] = (i * 37 + 11) % (int32_t)V;
        forward_whole(model, &batch, tokens, COUNT, whole);
        for (size_t p = 0; p < sizeof prompts / sizeof *prompts; p++)
            for (int64_t end = prompts[p]; end <= COUNT; end++) {
                int64_t first = end == prompts[p] ? 0 : end - 1;
                decode(model, &batch, tokens, first, end - first, BASE, step);
                for (int64_t i = 0; i < V; i++)
                    if (!(fabsf(step[i] - whole[(end - 1) * V + i]) <= 1e-5f))
                        fail_msg("%s, prompt of %d, position %d: logit %d is %.8f, in a full forward %.8f", families[k],
                                 (int)prompts[p], (int)end - 1, (int)i, step[i], whole[(end - 1) * V + i]);
            }
        free(whole), free(step);
        mt_batch_free(&batch);
        mt_model_destroy(model);
        mt_options_free(&options);
    }
}

/* True if the text's token n is either of two, as logits within rounding of a full forward's decide. */
static bool draws_either(const mt_run_options *options, const mt_sequence *text, int64_t n, const mt_sampling *sampling,
                         int32_t one, int32_t other) {
    const mt_model_plan plan = {.max_tokens = n, .max_logits = n, .max_position = n};
    int64_t V = options->stack.vocab_size;
    mt_model *model = create_model(options, &plan);
    mt_batch batch;
    mt_batch_alloc(&batch, n);
    float *logits = mt_malloc(n * V * 4), *near = mt_malloc(V * 4);
    int32_t *scratch = mt_malloc(2 * V * 4);
    bool seen[2] = {false, false};
    forward_whole(model, &batch, text->tokens, n, logits);
    for (int64_t trial = 0; trial < 500; trial++) {
        for (int64_t i = 0; i < V; i++)
            near[i] = logits[(n - 1) * V + i] + 2e-5f * (float)((i * 7919 + trial * 104729) % 199 - 99) / 99;
        int32_t token = sample(near, V, sampling, text->id, n, scratch);
        seen[0] |= token == one, seen[1] |= token == other;
    }
    free(logits), free(near), free(scratch);
    mt_batch_free(&batch);
    mt_model_destroy(model);
    return seen[0] && seen[1];
}

/* Two runs of a text, in other batches, draw the same tokens, up to one that rounding decides. Returns the number of
 * equal tokens. */
static int64_t assert_same_text(const mt_run_options *options, const mt_sampling *sampling, const mt_sequence *a,
                                const mt_sequence *b) {
    int64_t n = 0;
    assert_int_equal(a->num_tokens, b->num_tokens);
    while (n < a->num_tokens && a->tokens[n] == b->tokens[n]) n++;
    if (n < a->num_tokens && !draws_either(options, a, n, sampling, a->tokens[n], b->tokens[n]))
        fail_msg("%s: token %d of sequence %d: %d and %d", options->load, (int)n, (int)a->id, a->tokens[n],
                 b->tokens[n]);
    return n;
}

enum { NUM_PROMPTS = 5 };

/* Prompts of 1, 8, 15, 22 and 29 tokens. */
static void begin_prompts(const mt_run_options *options, int64_t context, mt_sequence *sequences) {
    for (int64_t s = 0; s < NUM_PROMPTS; s++) {
        int32_t prompt[64];
        int64_t count = 1 + 7 * s;
        for (int32_t i = 0; i < count; i++) prompt[i] = (i * 31 + 7 * (int32_t)s) % (int32_t)options->stack.vocab_size;
        sequences[s] = begin(options, s, prompt, count, context);
    }
}

static void free_prompts(mt_sequence *sequences) {
    for (int64_t s = 0; s < NUM_PROMPTS; s++) mt_sequence_end(&sequences[s]);
}

static void a_batch_of_unequal_prompts_equals_single_runs(void **state) {
    (void)state;
    const mt_sampling drawn = {.temperature = 1, .top_p = 0.95, .top_k = 50, .seed = 3};
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_run_options options = read_family(k);
        mt_sequence together[NUM_PROMPTS], alone[NUM_PROMPTS];
        begin_prompts(&options, 64, together);
        begin_prompts(&options, 64, alone);
        run(&options, together, NUM_PROMPTS, 0, &drawn, &no_stops);
        for (int64_t s = 0; s < NUM_PROMPTS; s++) {
            run(&options, &alone[s], 1, 0, &drawn, &no_stops);
            assert_same_text(&options, &drawn, &together[s], &alone[s]);
        }
        free_prompts(together), free_prompts(alone);
        mt_options_free(&options);
    }
}

static void prompts_read_in_pieces_equal_prompts_read_at_once(void **state) {
    (void)state;
    const mt_sampling drawn = {.temperature = 1, .top_p = 1, .seed = 8};
    const int64_t pieces[] = {1, 3, 7, 64};
    mt_run_options options = read_family(1);
    mt_sequence whole[NUM_PROMPTS], cut[NUM_PROMPTS];
    begin_prompts(&options, 64, whole);
    run(&options, whole, NUM_PROMPTS, 0, &drawn, &no_stops);
    for (int i = 0; i < 4; i++) {
        begin_prompts(&options, 64, cut);
        run(&options, cut, NUM_PROMPTS, pieces[i], &drawn, &no_stops);
        for (int64_t s = 0; s < NUM_PROMPTS; s++) assert_same_text(&options, &drawn, &cut[s], &whole[s]);
        free_prompts(cut);
    }
    free_prompts(whole);
    mt_options_free(&options);
}

/* mt_generate, greedy and sampled, with a stop token that some sequence meets. */
static void one_call_generates_what_single_steps_do(void **state) {
    (void)state;
    enum { ROW = 40 };
    const mt_sampling drawn = {.temperature = 1, .top_p = 0.9, .seed = 5};
    mt_run_options options = read_family(1);
    options.max_new_tokens = ROW;
    mt_model_plan plan = mt_generator_plan(NUM_PROMPTS, ROW, 75);
    mt_model *model = create_model(&options, &plan);
    mt_error error = {{0}};
    for (int i = 0; i < 2; i++) {
        const mt_sampling *sampling = i ? &drawn : &greedy;
        mt_sequence sequences[NUM_PROMPTS];
        int32_t tokens[NUM_PROMPTS][ROW];
        int64_t num_tokens[NUM_PROMPTS];
        begin_prompts(&options, ROW, sequences);
        run(&options, sequences, NUM_PROMPTS, 0, sampling, &no_stops);
        const mt_stops stops = {.ids = {sequences[2].tokens[sequences[2].num_prompt + 2]}, .count = 1};
        free_prompts(sequences);
        begin_prompts(&options, ROW, sequences);
        for (int s = 0; s < NUM_PROMPTS; s++) {
            num_tokens[s] = sequences[s].num_prompt;
            memcpy(tokens[s], sequences[s].tokens, (size_t)num_tokens[s] * 4);
        }
        run(&options, sequences, NUM_PROMPTS, 0, sampling, &stops);
        assert_int_equal(mt_generate(model, tokens[0], num_tokens, NUM_PROMPTS, ROW, i ? &drawn : NULL, &stops, &error),
                         0);
        for (int s = 0; s < NUM_PROMPTS; s++) {
            mt_sequence one = {.id = s, .tokens = tokens[s], .num_tokens = num_tokens[s]};
            assert_same_tokens(&one, &sequences[s]);
        }
        assert_true(num_tokens[2] <= sequences[2].num_prompt + 3);
        free_prompts(sequences);
    }
    int32_t tokens[2][ROW] = {{1, 2}, {3}};
    int64_t num_tokens[2] = {2, 0};
    assert_int_equal(mt_generate(model, tokens[0], num_tokens, 2, ROW, NULL, NULL, &error), -1);
    assert_non_null(strstr(error.text, "prompt 2 is empty"));
    assert_int_equal(num_tokens[0], 2);
    assert_int_equal(mt_generate(model, tokens[0], num_tokens, 1, ROW + 1, NULL, NULL, &error), -1);
    assert_non_null(strstr(error.text, "do not fit the model's plan"));
    mt_model_destroy(model);
    mt_options_free(&options);
}

static void a_sequence_ends_at_a_stop_token_or_at_its_length(void **state) {
    (void)state;
    mt_run_options options = read_family(1);
    int32_t expected[64];
    read_ids("tests/golden/hf/llama/expected.json", "greedy_ids", expected, 64);
    const mt_stops stops = {.ids = {159, expected[8]}, .count = 2};
    mt_sequence stopped = begin(&options, 0, expected, 8, 64), cut = begin(&options, 0, expected, 8, 11);
    run(&options, &stopped, 1, 0, &greedy, &stops);
    assert_int_equal(stopped.num_tokens, 9); // the last token is the stop token
    assert_int_equal(stopped.tokens[8], expected[8]);
    run(&options, &cut, 1, 0, &greedy, &no_stops);
    assert_int_equal(cut.num_tokens, 11); // the whole context
    mt_sequence_end(&stopped), mt_sequence_end(&cut);
    mt_options_free(&options);
}

static void damaged_weights_end_generation_with_a_message(void **state) {
    (void)state;
    mt_run_options options = read_family(1);
    const int32_t prompt[] = {4, 5};
    mt_sequence sequence = begin(&options, 0, prompt, 2, 64);
    mt_model_plan plan = mt_generator_plan(1, 64, 2);
    mt_model *model = create_model(&options, &plan);
    int64_t num_buckets;
    mt_bucket *buckets = mt_model_buckets(model, &num_buckets);
    ((float *)buckets[num_buckets - 1].params)[buckets[num_buckets - 1].decay_count] = NAN; // of the final norm
    mt_generator *generator = mt_generator_create(model, &greedy, &no_stops);
    mt_error error = {{0}};
    assert_int_equal(mt_generator_step(generator, &sequence, 1, &error), -1);
    assert_non_null(strstr(error.text, "not all numbers"));
    mt_generator_destroy(generator);
    mt_model_destroy(model);
    mt_sequence_end(&sequence);
    mt_options_free(&options);
}

static void prompts_that_cannot_be_continued_are_refused(void **state) {
    (void)state;
    mt_run_options options = read_family(0);
    mt_sequence sequence;
    mt_error error = {{0}};
    int32_t prompt[64] = {0};
    assert_int_equal(mt_sequence_begin(&sequence, 2, prompt, 0, 64, options.max_new_tokens, &options.stack, &error),
                     -1);
    assert_non_null(strstr(error.text, "prompt 3 is empty"));
    assert_int_equal(mt_sequence_begin(&sequence, 0, prompt, 64, 64, options.max_new_tokens, &options.stack, &error),
                     -1);
    assert_non_null(strstr(error.text, "64 tokens"));
    for (int i = 0; i < 2; i++) {
        prompt[5] = i ? -1 : (int32_t)options.stack.vocab_size;
        assert_int_equal(mt_sequence_begin(&sequence, 0, prompt, 8, 64, options.max_new_tokens, &options.stack, &error),
                         -1);
        assert_non_null(strstr(error.text, "outside the model's vocabulary"));
    }
    prompt[5] = 0;
    sequence = begin(&options, 0, prompt, 63, 64);
    assert_int_equal(sequence.max_tokens, 64);
    mt_sequence_end(&sequence);
    static const char *const bad[] = {"", "1,,2", "1,2,", "x", "-1", "1 2", "99999999999999999999", "1,4294967296"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(mt_sequence_parse(&sequence, 0, bad[i], 64, options.max_new_tokens, &options.stack, &error),
                         -1);
    assert_int_equal(mt_sequence_parse(&sequence, 0, "7, 8,159", 64, options.max_new_tokens, &options.stack, &error),
                     0);
    assert_int_equal(sequence.num_prompt, 3);
    assert_int_equal(sequence.tokens[2], 159);
    mt_sequence_end(&sequence);
    options.max_new_tokens = 0;
    sequence = begin(&options, 0, prompt, 3, 64);
    assert_int_equal(sequence.finish, MT_FINISH_LENGTH);
    mt_sequence_end(&sequence);
    mt_options_free(&options);
}

/* ---- continuous batching and pages */

enum { LONGEST = 40, MANY = 60 };

/* A cache that records the prefix whose key and value a row would hold: a hash of the tokens up to its own. */
typedef struct fake_cache {
    const mt_batcher_plan *plan;
    uint64_t *rows;      // [(num_pages + 1) * page_rows]; 0: nothing
    uint64_t *states[2]; // [max_sequences] running and kept: of all tokens that were read
} fake_cache;

static uint64_t extend(uint64_t hash, int32_t token) {
    return (hash ^ (uint64_t)(token + 1)) * 0x9E3779B97F4A7C15u + 1;
}

static int64_t row_of(const mt_batcher *b, int64_t key) {
    return b->batch.pages[key / b->plan.page_rows] * b->plan.page_rows + key % b->plan.page_rows;
}

/* Runs the forward at hand on the cache: copies, then writes, then checks that each span reads the prefix of its
 * sequence, and that what it writes was no other's. Returns the tokens of prompts. */
static void run_fake(fake_cache *cache, const mt_batcher *b, const mt_sequence *sequences, int64_t count) {
    const mt_batch *batch = &b->batch;
    int64_t logits = 0, prefill = 0, keys = 0;
    assert_in_range(batch->num_tokens, 1, b->plan.max_tokens);
    for (int64_t i = 0; i < b->num_copies; i++)
        for (int64_t r = 0; r < b->copies[i].rows; r++)
            cache->rows[b->copies[i].to + r] = cache->rows[b->copies[i].from + r];
    for (const mt_state_copy *c = b->state_copies; c < b->state_copies + b->num_state_copies; c++)
        cache->states[c->to_kept][c->to] = cache->states[c->from_kept][c->from];
    for (int64_t s = 0, t = 0; s < batch->num_spans; s++) {
        const mt_span *span = &batch->spans[s];
        int64_t first = span->k_len - span->q_len, i = 0;
        assert_int_equal(span->q_start, t);
        assert_int_equal(span->k_start % b->plan.page_rows, 0);
        int64_t slot =
            span->k_start / b->plan.page_rows / ((b->plan.max_length + b->plan.page_rows - 1) / b->plan.page_rows);
        while (i < count && sequences[i].slot != slot) i++;
        assert_in_range(i, 0, count - 1);
        if (b->plan.num_adapters > 0) { // the rows of its adapter, or behind those of all
            int64_t adapter = sequences[i].adapter, n = b->plan.num_adapters;
            assert_true(t >= batch->adapter_rows[adapter > 0 ? adapter - 1 : n]);
            assert_true(adapter == 0 || t + span->q_len <= batch->adapter_rows[adapter]);
        }
        bool is_prefill = first + 1 < sequences[i].num_tokens || first < sequences[i].num_prompt;
        if (is_prefill) prefill += span->q_len;
        for (int64_t at = first; at < span->k_len && is_prefill; at++) keys += at + 1;
        uint64_t hash = (uint64_t)sequences[i].adapter; // another adapter has other keys for the same tokens
        for (int64_t at = 0; at < first; at++) hash = extend(hash, sequences[i].tokens[at]);
        if (b->plan.has_states && first > 0) assert_true(cache->states[0][slot] == hash);
        for (int64_t at = first; at < span->k_len; at++, t++) {
            assert_int_equal(batch->tokens[t], sequences[i].tokens[at]);
            assert_int_equal(batch->positions[t], at);
            assert_int_equal(b->cache_rows[t], row_of(b, span->k_start + at));
            hash = extend(hash, batch->tokens[t]);
            cache->rows[b->cache_rows[t]] = hash;
        }
        cache->states[0][slot] = hash;
        if (span->k_len == sequences[i].num_tokens) {
            assert_int_equal(b->logit_rows[logits], t - 1);
            assert_int_equal(b->logit_sequences[logits++], i);
        }
    }
    assert_int_equal(b->num_logits, logits);
    assert_int_equal(prefill, b->prefill.tokens);
    assert_int_equal(keys, b->prefill.keys);
    assert_true(prefill <= b->max_prefill.tokens && (keys <= b->max_prefill.keys || prefill == 1));
    for (int64_t s = 0; s < batch->num_spans; s++) { // after all writes, as in a layer
        const mt_span *span = &batch->spans[s];
        uint64_t hash;
        int64_t i = 0;
        int64_t slot =
            span->k_start / b->plan.page_rows / ((b->plan.max_length + b->plan.page_rows - 1) / b->plan.page_rows);
        while (sequences[i].slot != slot) i++;
        hash = (uint64_t)sequences[i].adapter;
        for (int64_t at = 0; at < span->k_len; at++) {
            hash = extend(hash, sequences[i].tokens[at]);
            assert_true(cache->rows[row_of(b, span->k_start + at)] == hash);
        }
    }
}

/* Every page is free, or as many slots list it as refer to it. */
static void assert_pages(const mt_batcher *b) {
    for (int64_t page = 0; page < b->plan.num_pages; page++) {
        bool is_free = false;
        for (int64_t i = 0; i < b->num_free; i++) is_free |= b->free_pages[i] == page;
        assert_int_equal(is_free, b->references[page] == 0);
    }
}

/* Sequences with common beginnings of many lengths, from a tight to an ample cache: each span reads its own prefix, all
 * end, and nothing is lost or freed twice. */
static void batches_read_the_prefix_of_each_sequence(void **state) {
    (void)state;
    for (uint64_t trial = 0; trial < 300; trial++) {
        uint32_t words[4];
        mt_philox(words, 17, trial, 0);
        mt_batcher_plan plan = {
            .max_sequences = 1 + words[0] % 7, .max_length = LONGEST, .max_tokens = 1 + words[1] % 50};
        plan.page_rows = 1 << words[2] % 5;
        int64_t most = (LONGEST + plan.page_rows - 1) / plan.page_rows;
        plan.num_pages = most + words[3] % (2 * most), plan.has_states = trial % 4 > 1;
        plan.num_adapters = trial % 3;
        mt_batcher *b = mt_batcher_create(&plan);
        if (trial % 5 < 2) b->max_prefill.tokens = 1 + words[2] % 9;
        if (trial % 5 == 1 || trial % 5 == 2) b->max_prefill.keys = words[2] / 9 % 60;
        uint64_t states[2][8] = {{0}};
        fake_cache cache = {&plan, mt_calloc((plan.num_pages + 1) * plan.page_rows * 8), {states[0], states[1]}};
        mt_sequence sequences[MANY];
        int32_t tokens[MANY][LONGEST];
        for (uint64_t s = 0; s < MANY; s++) {
            mt_philox(words, 18, trial, s);
            sequences[s] = (mt_sequence){.id = (int64_t)s, .tokens = tokens[s], .slot = -1};
            sequences[s].num_prompt = sequences[s].num_tokens = 1 + words[0] % 30;
            sequences[s].max_tokens = sequences[s].num_prompt + 1 + words[1] % 10;
            sequences[s].adapter = words[1] / 10 % (plan.num_adapters + 1);
            int32_t differs = (int32_t)(words[2] % 40); // from here on, from the others of its group
            for (int32_t i = 0; i < LONGEST; i++)
                tokens[s][i] = (i < differs ? 0 : (int32_t)s) + (int32_t)(words[3] % 2);
        }
        int64_t forwards = 0, known = trial % 2 ? MANY : MANY / 2; // the others come later
        while (mt_sequences_unfinished(sequences, MANY) > 0) {
            int64_t num_tokens = mt_batcher_next(b, sequences, known);
            assert_int_equal(num_tokens, b->batch.num_tokens);
            assert_pages(b);
            if (known < MANY && forwards > 20) known = MANY;
            if (num_tokens == 0 && known == MANY / 2) {
                known = MANY;
                continue;
            }
            run_fake(&cache, b, sequences, known);
            for (int64_t i = 0; i < b->num_logits; i++) {
                mt_sequence *sequence = &sequences[b->logit_sequences[i]];
                sequence->tokens[sequence->num_tokens++] = (int32_t)(sequence->id % 3);
                if (sequence->num_tokens == sequence->max_tokens) sequence->finish = MT_FINISH_LENGTH;
            }
            assert_in_range(++forwards, 1, 20000);
        }
        assert_int_equal(mt_batcher_next(b, sequences, MANY), 0);
        mt_batcher_destroy(b);
        free(cache.rows);
    }
}

/* Samples of one prompt of 35 tokens, in pages of 8: four pages are computed once; samples that come later copy the
 * three rows of the next page that the prompt fills. */
static void samples_of_a_prompt_share_its_pages(void **state) {
    (void)state;
    const mt_batcher_plan plan = {
        .max_sequences = 4, .max_length = 48, .max_tokens = 100, .page_rows = 8, .num_pages = 24};
    mt_batcher *b = mt_batcher_create(&plan);
    mt_sequence sequences[6];
    int32_t tokens[6][48];
    for (int s = 0; s < 6; s++) {
        sequences[s] = (mt_sequence){.id = s, .tokens = tokens[s], .num_prompt = 35, .num_tokens = 35, .slot = -1};
        sequences[s].max_tokens = 40 + s;
        for (int i = 0; i < 35; i++) tokens[s][i] = i;
    }
    assert_int_equal(mt_batcher_next(b, sequences, 6), 35 + 3 * 3);
    assert_int_equal(b->num_copies, 0);
    assert_int_equal(24 - b->num_free, 4 + 4);
    assert_int_equal(b->references[b->batch.pages[0]], 4);
    while (sequences[0].finish == MT_UNFINISHED) {
        for (int64_t i = 0; i < b->num_logits; i++) {
            mt_sequence *sequence = &sequences[b->logit_sequences[i]];
            sequence->tokens[sequence->num_tokens++] = 100 + (int32_t)sequence->id;
            if (sequence->num_tokens == sequence->max_tokens) sequence->finish = MT_FINISH_STOP;
        }
        if (sequences[0].finish == MT_UNFINISHED) assert_int_equal(mt_batcher_next(b, sequences, 6), 4);
    }
    /* Sequence 4 takes the place of sequence 0, whose cache begins with the whole prompt: one token is left to read. */
    assert_int_equal(mt_batcher_next(b, sequences, 6), 3 + 1);
    assert_int_equal(b->num_copies, 0);
    assert_int_equal(sequences[4].slot, 0);
    mt_batcher_destroy(b);

    /* A sequence that joins one that runs copies the rows of the last page, and leaves its page as it is. */
    b = mt_batcher_create(&plan);
    for (int s = 0; s < 2; s++)
        sequences[s].num_tokens = 35, sequences[s].slot = -1, sequences[s].finish = MT_UNFINISHED;
    assert_int_equal(mt_batcher_next(b, sequences, 1), 35);
    sequences[0].tokens[sequences[0].num_tokens++] = 7;
    assert_int_equal(mt_batcher_next(b, sequences, 2), 2);
    assert_int_equal(b->num_copies, 1);
    assert_int_equal(b->copies[0].rows, 2); // the last token of the prompt is read again, for its logits
    assert_int_equal(b->copies[0].from, b->batch.pages[4] * 8);
    assert_int_not_equal(b->copies[0].from, b->copies[0].to);
    mt_batcher_destroy(b);
}

/* Reads the prompts of all sequences, and a token of each; returns the tokens of prompts that were read. */
static int64_t read_prompts(mt_batcher *b, mt_sequence *sequences, int64_t count) {
    int64_t read = 0;
    while (mt_batcher_next(b, sequences, count) > 0) {
        read += b->prefill.tokens;
        for (int64_t i = 0; i < b->num_logits; i++) sequences[b->logit_sequences[i]].finish = MT_FINISH_LENGTH;
    }
    return read;
}

/* With states: samples of one prompt wait until its first 34 tokens are read, then each reads one token. A beginning
 * that only two texts have had is read again by the second one, which keeps its state for the third. A text that goes
 * on where another ended reads only what is new. */
static void samples_of_a_prompt_share_its_state(void **state) {
    (void)state;
    const mt_batcher_plan plan = {
        .max_sequences = 4, .max_length = 48, .max_tokens = 100, .page_rows = 8, .num_pages = 24, .has_states = true};
    mt_batcher *b = mt_batcher_create(&plan);
    mt_sequence sequences[6];
    int32_t tokens[6][48];
    for (int s = 0; s < 6; s++) {
        sequences[s] = (mt_sequence){.id = s, .tokens = tokens[s], .num_prompt = 35, .num_tokens = 35, .slot = -1};
        sequences[s].max_tokens = 40;
        for (int i = 0; i < 48; i++) tokens[s][i] = i;
    }
    assert_int_equal(read_prompts(b, sequences, 6), 34 + 6);
    mt_batcher_destroy(b);

    static const int64_t new_tokens[] = {40, 40, 40 - 24, 45 - 40};
    b = mt_batcher_create(&plan);
    for (int s = 0; s < 4; s++) { // one after another; the last one continues the one before
        sequences[s].num_prompt = sequences[s].num_tokens = s < 3 ? 40 : 45, sequences[s].max_tokens = 48;
        sequences[s].slot = -1, sequences[s].finish = MT_UNFINISHED;
        for (int i = 24; i < 48; i++) tokens[s][i] = 100 * (s < 3 ? s : 2) + i;
        assert_int_equal(read_prompts(b, &sequences[s], 1), new_tokens[s]);
    }
    mt_batcher_destroy(b);
}

/* A plan of `slots` sequences at once and `pages` pages of `rows` rows; generates as run() does. Returns forwards, and
 * the tokens of prompts that were read. */
static int64_t run_paged(const mt_run_options *options, mt_sequence *sequences, int64_t count, int64_t slots,
                         int64_t rows, int64_t tokens, const mt_sampling *sampling, int64_t *read) {
    mt_model_plan plan = {.max_tokens = 40, .page_rows = rows};
    mt_error error;
    int64_t forwards = 0, left = 1;
    mt_plan_generation(&plan, slots, 64, tokens);
    mt_model *model = create_model(options, &plan);
    mt_generator *generator = mt_generator_create(model, sampling, &no_stops);
    for (; left > 0; forwards++)
        if ((left = mt_generator_step(generator, sequences, count, &error)) < 0) fail_msg("%s", error.text);
    *read = mt_generator_read_totals(generator).prefill_tokens;
    mt_generator_destroy(generator);
    mt_model_destroy(model);
    return forwards;
}

/* More sequences than slots, pages of 4 to 64 rows, and caches too small for all that run: the tokens of each sequence
 * are those of its own run, and log-probabilities agree to 1e-5. */
static void sequences_that_wait_share_or_are_put_back_equal_single_runs(void **state) {
    (void)state;
    enum { COUNT = 14 };
    const mt_sampling drawn = {.temperature = 1, .top_p = 0.95, .top_k = 50, .seed = 3, .logprobs = true};
    const struct {
        int64_t slots, rows, tokens;
    } cases[] = {{3, 64, 0}, {14, 4, 0}, {5, 4, 100}, {6, 16, 130}, {14, 8, 72}, {1, 16, 0}};
    for (int k = 0; k < NUM_FAMILIES; k += 2) {
        mt_run_options options = read_family(k);
        mt_sequence alone[COUNT], together[COUNT];
        int64_t forwards[6], read, prompts = 0;
        for (int c = -1; c < 6; c++) {
            for (int32_t s = 0; s < COUNT; s++) { // in groups: 3 samples of a prompt, and prompts that begin alike
                int32_t prompt[64];
                int64_t count = 3 + 9 * (s / 3);
                for (int32_t i = 0; i < count; i++)
                    prompt[i] = (i * 31 + (i > 20 ? s / 3 : s / 6)) % (int32_t)options.stack.vocab_size;
                prompts += c < 0 ? count : 0;
                (c < 0 ? alone : together)[s] = begin(&options, s, prompt, count, 64);
                if (c < 0) run(&options, &alone[s], 1, 0, &drawn, &no_stops);
            }
            if (c < 0) continue;
            forwards[c] =
                run_paged(&options, together, COUNT, cases[c].slots, cases[c].rows, cases[c].tokens, &drawn, &read);
            if (c == 1) assert_true(read < prompts * 3 / 4); // all run at once: a prompt is read once, not three times
            for (int s = 0; s < COUNT; s++) {
                int64_t equal = assert_same_text(&options, &drawn, &together[s], &alone[s]);
                assert_int_equal(together[s].finish, MT_FINISH_LENGTH);
                for (int64_t i = 0; i < equal - alone[s].num_prompt; i++) {
                    assert_true(fabsf(together[s].logps[i] - alone[s].logps[i]) <= 1e-5f);
                    assert_true(fabsf(together[s].sampled_logps[i] - alone[s].sampled_logps[i]) <= 1e-5f);
                }
                mt_sequence_end(&together[s]);
            }
        }
        for (int s = 0; s < COUNT; s++) mt_sequence_end(&alone[s]);
        assert_true(forwards[1] < forwards[2]); // all run at once; 25 pages of 4 rows hold few sequences
        assert_true(forwards[5] >= COUNT * 24);
        mt_options_free(&options);
    }
}

/* The log-probabilities that a view has seen, by position. */
typedef struct seen {
    float logps[64];
    int64_t vocab_size, times[64];
} seen;

static void note_logp(void *context, const mt_sequence *sequence, int64_t position, const float *logits) {
    seen *s = context;
    if (position + 1 < sequence->num_tokens)
        s->logps[position] = mt_logits_logp(logits, s->vocab_size, sequence->tokens[position + 1]);
    s->times[position]++;
}

/* Sequences with samplings of their own arrive and leave between steps; some are viewed, from the prompt on or not;
 * two are ended early. Each other one has the tokens of its own run, and views see each position once, with the
 * log-probability that a run alone gives. A sequence may only be read. */
static void sequences_with_settings_of_their_own_equal_single_runs(void **state) {
    (void)state;
    enum { COUNT = 10, VIEWED = 6, READ_ONLY = 9 };
    const mt_sampling samplings[] = {{.top_p = 1, .logprobs = true},
                                     {.temperature = 1, .top_p = 0.9, .seed = 3, .logprobs = true},
                                     {.temperature = 0.7, .top_p = 1, .top_k = 9, .seed = 5, .logprobs = true},
                                     {.top_p = 1, .repetition_penalty = 1.4, .logprobs = true}};
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_run_options options = read_family(k);
        mt_sequence alone[COUNT], together[COUNT];
        seen *views = mt_calloc(2 * COUNT * (int64_t)sizeof *views);
        mt_model_plan plan = {.max_tokens = 9, .page_rows = 4, .max_logits = 5 + VIEWED};
        mt_error error;
        mt_plan_generation(&plan, 5, 64, 0);
        for (int32_t s = 0; s < COUNT; s++) {
            int32_t prompt[64];
            int64_t count = 1 + 5 * (s % 5);
            for (int32_t i = 0; i < count; i++) prompt[i] = (i * 31 + s / 5) % (int32_t)options.stack.vocab_size;
            alone[s] = begin(&options, s, prompt, count, 64), together[s] = begin(&options, s, prompt, count, 64);
            run(&options, &alone[s], 1, 0, &samplings[s % 4], &no_stops);
            together[s].sampling = &samplings[s % 4];
            views[s].vocab_size = options.stack.vocab_size;
            if (s % 3 == 0) together[s].view = note_logp, together[s].view_context = &views[s];
            together[s].views_prompt = s % 3 == 0 && s % 2 == 1;
        }
        together[READ_ONLY].max_tokens = together[READ_ONLY].num_prompt;
        mt_model *model = create_model(&options, &plan);
        mt_generator *generator = mt_generator_create_mixed(model, &samplings[0], &no_stops, VIEWED);
        int64_t left = 1, first = 0, count = 4, steps = 0;
        for (; left > 0 || count < COUNT; steps++) {
            if ((left = mt_generator_step(generator, together + first, count - first, &error)) < 0)
                fail_msg("%s", error.text);
            if (steps % 4 == 3 && count < COUNT) count += 2;
            if (steps == 6) together[1].finish = together[2].finish = MT_FINISH_STOP; // their clients have gone
            while (first < count - 1 && together[first].finish != MT_UNFINISHED && steps > 8) first++;
        }
        mt_generator_destroy(generator);
        mt_model_destroy(model);
        for (int s = 0; s < COUNT; s++) {
            int64_t n = together[s].num_tokens, prompt = together[s].num_prompt;
            bool whole = s != 1 && s != 2 && s != READ_ONLY;
            if (whole) n = assert_same_text(&options, &samplings[s % 4], &together[s], &alone[s]);
            if (s == READ_ONLY) assert_int_equal(n, prompt);
            for (int64_t p = 0; p < 63 && together[s].view && whole; p++)
                assert_int_equal(views[s].times[p],
                                 p + 1 < together[s].num_tokens && (p + 1 >= prompt || together[s].views_prompt));
            for (int64_t p = prompt - 1; p + 1 < n && together[s].view && whole; p++)
                assert_true(fabsf(views[s].logps[p] - alone[s].logps[p + 1 - prompt]) <= 2e-5f);
            mt_sequence_end(&alone[s]), mt_sequence_end(&together[s]);
        }
        free(views);
        mt_options_free(&options);
    }
}

/* Samples for training: log-probabilities are those of a forward over the whole sequence; ids make samples differ. */
static void rollouts_have_the_log_probabilities_of_training(void **state) {
    (void)state;
    enum { PROMPTS = 3, EACH = 4 };
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_run_options options = read_family(k);
        mt_model_plan plan = {.max_tokens = 64, .max_logits = 64, .max_position = 64, .page_rows = 16};
        mt_plan_generation(&plan, 5, 64, 0);
        mt_model *model = create_model(&options, &plan);
        int32_t prompts[PROMPTS][20];
        const int32_t *const lists[PROMPTS] = {prompts[0], prompts[1], prompts[2]};
        const int64_t counts[PROMPTS] = {1, 9, 20};
        for (int32_t i = 0; i < PROMPTS * 20; i++)
            prompts[i / 20][i % 20] = (i * 29 + 3) % (int32_t)options.stack.vocab_size;
        mt_sequence samples[PROMPTS * EACH];
        mt_rollout rollout = {.num_return_sequences = EACH, .max_new_tokens = 16, .first_id = 100};
        rollout.sampling = (mt_sampling){.temperature = 1, .top_p = 1, .seed = 9};
        mt_error error = {{0}};
        if (mt_rollout_generate(model, &rollout, lists, counts, PROMPTS, samples, &error) != 0)
            fail_msg("%s", error.text);
        mt_batch batch;
        mt_batch_alloc(&batch, 64);
        int64_t different = 0;
        for (int s = 0; s < PROMPTS * EACH; s++) {
            const mt_sequence *sample = &samples[s];
            float logp[64];
            int64_t T = sample->num_tokens - 1;
            assert_int_equal(sample->num_tokens, counts[s / EACH] + 16);
            assert_memory_equal(sample->tokens, prompts[s / EACH], (size_t)counts[s / EACH] * 4);
            for (int64_t t = 0; t < T; t++) {
                batch.tokens[t] = sample->tokens[t], batch.labels[t] = sample->tokens[t + 1];
                batch.positions[t] = (int32_t)t, batch.loss_mask[t] = 1, batch.token_index[t] = t;
            }
            batch.spans[0] = (mt_span){.q_len = T, .k_len = T, .causal = true};
            batch.num_tokens = T, batch.num_spans = 1;
            mt_model_forward(model, &batch, false);
            mt_model_read(model, logp, NULL, NULL);
            for (int64_t i = 0; i < 16; i++) {
                float want = logp[sample->num_prompt + i - 1];
                if (!(fabsf(sample->logps[i] - want) <= 2e-6f * (1 + fabsf(want)) + 5e-6f))
                    fail_msg("%s, sample %d, token %d: %.7f, in a forward %.7f", families[k], s, (int)i,
                             sample->logps[i], want);
                assert_true(fabsf(sample->logps[i] - sample->sampled_logps[i]) <= 1e-5f);
            }
            if (s % EACH > 0)
                different += memcmp(sample->tokens + sample->num_prompt, samples[s - 1].tokens + sample->num_prompt,
                                    16 * 4) != 0;
        }
        assert_int_equal(different, PROMPTS * (EACH - 1));
        for (int s = 0; s < PROMPTS * EACH; s++) mt_sequence_end(&samples[s]);
        prompts[1][3] = 5000;
        assert_int_equal(mt_rollout_generate(model, &rollout, lists, counts, PROMPTS, samples, &error), -1);
        assert_non_null(strstr(error.text, "prompt 2: token 5000 is outside the model's vocabulary"));
        mt_batch_free(&batch);
        mt_model_destroy(model);
        mt_options_free(&options);
    }
}

/* ---- texts */

/* The text of `all`, a byte a token, after `num_prompt` bytes of prompt, up to a stop string. */
static void assert_text(const char *all, int64_t num_prompt, const mt_strings *stops, const char *expected,
                        mt_finish finish) {
    mt_tokenizer *tokenizer;
    mt_error error;
    int32_t tokens[64];
    mt_sequence sequence = {.id = 7, .tokens = tokens, .num_prompt = num_prompt, .num_tokens = num_prompt};
    if (mt_tokenizer_open(&tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, &error) != 0) fail_msg("%s", error.text);
    for (size_t i = 0; i < strlen(all); i++) tokens[i] = (uint8_t)all[i];
    mt_responses responses = mt_responses_open(tokenizer, stops, 5, 3);
    const mt_response *response = mt_responses_update(&responses, &sequence);
    char shown[64] = "";
    int64_t length = (int64_t)strlen(all), settled = response->prompt_bytes;
    while (sequence.finish == MT_UNFINISHED) {
        sequence.num_tokens++;
        if (mt_responses_end(&responses, &sequence))
            sequence.finish = MT_FINISH_STOP;
        else if (sequence.num_tokens == length)
            sequence.finish = MT_FINISH_LENGTH;
        mt_responses_update(&responses, &sequence);
        int64_t now = mt_responses_settled(&responses, response);
        assert_true(now >= settled); // text that was shown is never cut off
        strncat(shown, response->text.data + settled, (size_t)(now - settled));
        settled = now;
    }
    assert_int_equal(sequence.finish, finish);
    assert_string_equal(shown, expected);
    assert_int_equal(response->text.bytes - response->prompt_bytes, strlen(expected));
    mt_responses_close(&responses);
    mt_tokenizer_close(tokenizer);
}

static void texts_end_before_a_stop_string(void **state) {
    (void)state;
    char *texts[] = {"END", "aab", "\n\n"};
    const mt_strings stops = {.items = texts, .count = 3}, none = {.count = 0};
    assert_text("p: one END two", 3, &stops, "one ", MT_FINISH_STOP);
    assert_text("ENone EN", 2, &stops, "one EN", MT_FINISH_LENGTH);
    assert_text("p: aaab", 3, &stops, "a", MT_FINISH_STOP);           // begins again within itself
    assert_text("p\n\nEND: x\n", 8, &stops, "x\n", MT_FINISH_LENGTH); // not in the prompt
    assert_text("EENDx", 3, &stops, "Dx", MT_FINISH_LENGTH);          // nor across its end
    assert_text("pEND", 1, &stops, "", MT_FINISH_STOP);
    assert_text("p\xC3\xA9"
                "END",
                1, &stops, "\xC3\xA9", MT_FINISH_STOP);
    assert_text("px\xC3", 1, &stops, "x\xEF\xBF\xBD", MT_FINISH_LENGTH); // half a character
    assert_text("p END", 1, &none, " END", MT_FINISH_LENGTH);
}

/* ---- files of a model's folder */

static void write_text(const char *folder, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (!text) {
        unlink(path);
        return;
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void texts_begin_with_bos_where_hugging_face_adds_one(void **state) {
    (void)state;
    static const char *const names[] = {"tokenizer_config.json", "tokenizer.json", "tokenizer.model"};
    const char *llama3 = "{\"post_processor\": {\"type\": \"Sequence\", \"processors\": [{\"type\": \"ByteLevel\"}, "
                         "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<s>\"}}, "
                         "{\"Sequence\": {\"id\": \"A\"}}]}]}}";
    const char *gpt2 = "{\"post_processor\": {\"type\": \"ByteLevel\"}}", *none = "{\"post_processor\": null}";
    const struct {
        const char *files[3];
        int expected;
    } cases[] = {
        {{NULL, NULL, NULL}, 0},
        {{NULL, NULL, "x"}, 1},
        {{"{\"add_bos_token\": false}", NULL, "x"}, 0},
        {{"{\"add_bos_token\": null}", NULL, "x"}, 1},
        {{NULL, llama3, NULL}, 1},
        {{NULL, gpt2, NULL}, 0},
        {{NULL, none, "x"}, 0},
        {{"{\"add_bos_token\": true}", gpt2, NULL}, 1},
    };
    char folder[] = "/tmp/mt_test_bos_XXXXXX", path[512];
    assert_non_null(mkdtemp(folder));
    mt_error error;
    bool begins;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int k = 0; k < 3; k++) write_text(folder, names[k], cases[i].files[k]);
        assert_int_equal(mt_prompt_begins_with_bos(folder, &begins, &error), 0);
        if (begins != cases[i].expected) fail_msg("case %d: %d", (int)i, begins);
    }
    write_text(folder, "other.model", "x");
    write_text(folder, names[0], NULL);
    snprintf(path, sizeof path, "%s/other.model", folder);
    assert_int_equal(mt_prompt_begins_with_bos(path, &begins, &error), 0);
    assert_true(begins);
    write_text(folder, "other.json", llama3);
    snprintf(path, sizeof path, "%s/other.json", folder);
    assert_int_equal(mt_prompt_begins_with_bos(path, &begins, &error), 0);
    assert_true(begins);
    write_text(folder, "other.json", NULL);
    write_text(folder, names[0], "{\"add_bos_token\": ");
    assert_int_equal(mt_prompt_begins_with_bos(folder, &begins, &error), -1);
    assert_non_null(strstr(error.text, "tokenizer_config.json"));
    write_text(folder, names[0], "{\"eos_token\": 5}"); // also beside SentencePiece's tokenizer.model
    assert_int_equal(mt_prompt_begins_with_bos(folder, &begins, &error), -1);
    assert_non_null(strstr(error.text, "tokenizer_config.json: \"eos_token\" must be a token's text"));
    for (int k = 0; k < 3; k++) write_text(folder, names[k], NULL);
    write_text(folder, "other.model", NULL);
    rmdir(folder);
}

/* The token that a fine-tuned model learned to end with is added to those of its base, and nothing else changes. */
static void an_end_is_added_to_generation_config_once(void **state) {
    (void)state;
    mt_run_options options;
    mt_stops stops;
    mt_error error;
    mt_options_default(&options);
    options.eos_token_id = 3;
    mt_generation_config_add_end(&options, 3);
    assert_null(options.generation_config);
    for (int i = 0; i < 2; i++) mt_generation_config_add_end(&options, 5);
    assert_int_equal(mt_stops_of_options(&stops, &options, &error), 0);
    assert_int_equal(stops.count, 2);
    assert_int_equal(stops.ids[1], 5);
    free(options.generation_config);
    options.generation_config = strdup("{\"eos_token_id\": 7, \"top_k\": 20}");
    mt_generation_config_add_end(&options, 5);
    assert_non_null(strstr(options.generation_config, "\"top_k\": 20"));
    assert_int_equal(mt_stops_of_options(&stops, &options, &error), 0);
    assert_int_equal(stops.count, 2);
    assert_int_equal(stops.ids[0], 7);
    assert_int_equal(stops.ids[1], 5);
    mt_options_free(&options);
}

/* An end token that the vocabulary does not have is named. */
static void ends_beyond_the_vocabulary_are_noted(void **state) {
    (void)state;
    mt_run_options options;
    char text[300] = "";
    mt_options_default(&options);
    options.stack.vocab_size = 100;
    options.generation_config = strdup("{\"eos_token_id\": [99, 100]}");
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    mt_stops_warn(&options, file);
    fclose(file);
    assert_non_null(strstr(text, "has 100, and the model's last token is 99"));
    assert_null(strstr(text, "has 99,"));
    mt_options_free(&options);
}

static void stop_tokens_come_from_generation_config_or_config(void **state) {
    (void)state;
    char folder[] = "/tmp/mt_test_stops_XXXXXX", text[4000];
    assert_non_null(mkdtemp(folder));
    mt_run_options options = read_family(0); // eos_token_id 1
    mt_stops stops;
    mt_error error;
    assert_int_equal(mt_generation_config_read(&options, folder, &error), 0);
    assert_int_equal(mt_stops_of_options(&stops, &options, &error), 0);
    assert_int_equal(stops.count, 1);
    assert_int_equal(stops.ids[0], 1);
    write_text(folder, "generation_config.json", "{\"eos_token_id\": [7, 9, 7]}");
    assert_int_equal(mt_generation_config_read(&options, folder, &error), 0);
    assert_int_equal(mt_stops_of_options(&stops, &options, &error), 0);
    assert_int_equal(stops.count, 2);
    assert_int_equal(stops.ids[1], 9);
    write_text(folder, "generation_config.json",
               "{\"eos_token_id\": 5, \"max_length\": 1000000000000000019884624838656}");
    assert_int_equal(mt_generation_config_read(&options, folder, &error), 0);
    assert_int_equal(mt_stops_of_options(&stops, &options, &error), 0);
    assert_int_equal(stops.count, 1);
    assert_int_equal(stops.ids[0], 5);
    for (int count = MT_MAX_STOPS; count <= MT_MAX_STOPS + 1; count++) { // all of a list end a text, or it is refused
        int used = snprintf(text, sizeof text, "{\"eos_token_id\": [0");
        for (int id = 1; id < count; id++) used += snprintf(text + used, sizeof text - (size_t)used, ", %d", id);
        snprintf(text + used, sizeof text - (size_t)used, "]}");
        write_text(folder, "generation_config.json", text);
        assert_int_equal(mt_generation_config_read(&options, folder, &error), 0);
        assert_int_equal(mt_stops_of_options(&stops, &options, &error), count > MT_MAX_STOPS ? -1 : 0);
        if (count == MT_MAX_STOPS) assert_int_equal(stops.ids[count - 1], count - 1);
    }
    static const char *const wrong[] = {"[1, 2]",
                                        "{\"eos_token_id\": \"80\"}",
                                        "{\"eos_token_id\": 1.5}",
                                        "{\"eos_token_id\": -5}",
                                        "{\"eos_token_id\": true}",
                                        "{\"eos_token_id\": {\"a\": 1}}",
                                        "{\"eos_token_id\": [[1]]}",
                                        "{\"eos_token_id\": [1, \"a\"]}",
                                        "{\"eos_token_id\": [1, null]}",
                                        "{\"eos_token_id\": 1000000000000000019884624838656}",
                                        "{\"bos_token_id\": [1]}",
                                        "{\"pad_token_id\": \"0\"}"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        write_text(folder, "generation_config.json", wrong[i]);
        if (mt_generation_config_read(&options, folder, &error) == 0) fail_msg("accepted: %s", wrong[i]);
        assert_non_null(strstr(error.text, "generation_config.json"));
        if (i > 0) assert_non_null(strstr(error.text, "token_id"));
    }
    const char *const sampling[] = {"{\"temperature\": \"hot\"}",
                                    "{\"do_sample\": 1}",
                                    "{\"top_k\": [1]}",
                                    "{\"top_k\": 1.5}",
                                    "{\"num_beams\": \"4\"}",
                                    "{\"num_beams\": true}",
                                    "{\"typical_p\": \"0.9\"}",
                                    "{\"stop_strings\": [\"a\", 1]}",
                                    "{\"stop_strings\": 5}",
                                    "{\"use_cache\": \"true\"}",
                                    "{\"suppress_tokens\": 5}",
                                    "{\"suppress_tokens\": [\"5\"]}",
                                    "{\"bad_words_ids\": [5]}",
                                    "{\"forced_eos_token_id\": \"5\"}",
                                    "{\"exponential_decay_length_penalty\": 1.5}",
                                    "{\"early_stopping\": 1}",
                                    "{\"cache_implementation\": 1}",
                                    "{\"sequence_bias\": 1}",
                                    "{\"watermarking_config\": []}"};
    for (size_t i = 0; i < sizeof sampling / sizeof *sampling; i++) {
        write_text(folder, "generation_config.json", sampling[i]);
        if (mt_generation_config_read(&options, folder, &error) == 0) fail_msg("accepted: %s", sampling[i]);
        assert_non_null(strstr(error.text, "correct the file"));
    }
    write_text(folder, "generation_config.json",
               "{\"do_sample\": true, \"temperature\": 1, \"top_k\": 50.0, \"num_beams\": 1, \"max_length\": "
               "1000000000000000019884624838656, \"stop_strings\": \"end\", \"early_stopping\": \"never\", "
               "\"suppress_tokens\": [1, 2], \"begin_suppress_tokens\": [], \"bad_words_ids\": [[1], [2, 3]], "
               "\"forced_eos_token_id\": [7], \"exponential_decay_length_penalty\": [5, 1.5], \"typical_p\": null, "
               "\"sequence_bias\": [[[1], 0.5]], \"watermarking_config\": {\"bias\": 2}, \"a_key_of_others\": {}}");
    if (mt_generation_config_read(&options, folder, &error) != 0) fail_msg("%s", error.text);
    write_text(folder, "generation_config.json", NULL);
    rmdir(folder);
    mt_options_free(&options);
}

/* ---- a real model */

static void stories260k_gives_its_reference_logits_and_story(void **state) {
    (void)state;
    const char *shared = getenv("MT_SHARED");
    char folder[512], path[600];
    snprintf(folder, sizeof folder, "%s/models/stories260K-hf", shared ? shared : "../shared");
    snprintf(path, sizeof path, "%s/reference_logits.json", folder);
    if (access(path, R_OK) != 0) {
        print_message("skipped: %s is absent\n", path);
        skip();
    }
    mt_run_options options = read_options(folder);
    int32_t tokens[64];
    int64_t count = read_ids(path, "input_ids", tokens, 64), V = options.stack.vocab_size;
    mt_model_plan plan = {.max_tokens = 64, .max_logits = 64, .cache_rows = 64, .max_position = 64};
    mt_model *model = create_model(&options, &plan);
    mt_batch batch;
    mt_batch_alloc(&batch, 64);
    float *logits = mt_malloc(count * V * 4);
    forward_whole(model, &batch, tokens, count, logits);
    json_t *root = json_load_file(path, 0, NULL), *rows = json_object_get(root, "logits_float64");
    for (int64_t i = 0; i < count * V; i++) {
        double expected = json_real_value(json_array_get(json_array_get(rows, (size_t)(i / V)), (size_t)(i % V)));
        if (!(fabs(logits[i] - expected) <= 1e-4))
            fail_msg("logit %d of position %d is %.7f, expected %.7f", (int)(i % V), (int)(i / V), logits[i], expected);
    }
    json_decref(root);
    free(logits);
    mt_batch_free(&batch);
    mt_model_destroy(model);

    mt_sequence sequence = begin(&options, 0, tokens, 1, 512); // from BOS alone
    run(&options, &sequence, 1, 0, &greedy, &no_stops);
    for (int64_t i = 0; i < sequence.num_tokens; i++) assert_int_equal(sequence.tokens[i], tokens[i]);
    mt_sequence_end(&sequence);
    mt_options_free(&options);
}

/* Whatever is set in a call and is not listed as known is refused: the gradients today, and fields to come. */
static void one_kernel_for_a_decode_step_refuses_fields_of_attention_that_it_does_not_know(void **state) {
    mt_attention known, call;
    float gradient = 0;
    int64_t refused = 0;
    (void)state;
    memset(&known, 0, sizeof known);
#define KNOWN(field) memset(&known.field, 1, sizeof known.field);
    MT_DECODE_ATTENTION_FIELDS(KNOWN)
#undef KNOWN
    assert_true(mt_decode_knows_attention(&known));
    for (size_t i = 0; i < sizeof call; i++) {
        unsigned char is_known;
        memcpy(&is_known, (const char *)&known + i, 1);
        memcpy(&call, &known, sizeof call);
        memset((char *)&call + i, 1, 1);
        assert_int_equal(mt_decode_knows_attention(&call), is_known);
        refused += !is_known;
    }
    assert_true(refused >= 5 * (int64_t)sizeof(void *));
    memcpy(&call, &known, sizeof call);
    call.row_dot = &gradient;
    assert_false(mt_decode_knows_attention(&call));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_on_the_cpu_has_no_backend_of_a_gpu),
        cmocka_unit_test(draws_follow_the_softmax_at_any_temperature),
        cmocka_unit_test(top_k_draws_from_the_k_most_probable_in_proportion),
        cmocka_unit_test(top_p_draws_from_the_fewest_that_hold_p),
        cmocka_unit_test(top_k_and_top_p_keep_what_sorting_would),
        cmocka_unit_test(min_p_keeps_the_tokens_near_the_most_probable),
        cmocka_unit_test(the_repetition_penalty_changes_logits_of_tokens_seen),
        cmocka_unit_test(log_probabilities_are_of_the_model_and_of_the_draw),
        cmocka_unit_test(the_operation_samples_as_one_call_per_row),
        cmocka_unit_test(the_device_samples_what_the_host_does),
        cmocka_unit_test(greedy_takes_the_lowest_id_among_equals),
        cmocka_unit_test(logits_that_are_not_numbers_are_refused),
        cmocka_unit_test(a_draw_depends_on_seed_sequence_and_position_alone),
        cmocka_unit_test(greedy_continuations_equal_transformers),
        cmocka_unit_test(a_folder_opens_and_generates_in_two_calls),
        cmocka_unit_test(a_folder_that_cannot_be_opened_says_why),
        cmocka_unit_test(decoding_gives_the_logits_of_a_full_forward),
        cmocka_unit_test(a_batch_of_unequal_prompts_equals_single_runs),
        cmocka_unit_test(prompts_read_in_pieces_equal_prompts_read_at_once),
        cmocka_unit_test(one_call_generates_what_single_steps_do),
        cmocka_unit_test(a_sequence_ends_at_a_stop_token_or_at_its_length),
        cmocka_unit_test(batches_read_the_prefix_of_each_sequence),
        cmocka_unit_test(samples_of_a_prompt_share_its_pages),
        cmocka_unit_test(samples_of_a_prompt_share_its_state),
        cmocka_unit_test(sequences_that_wait_share_or_are_put_back_equal_single_runs),
        cmocka_unit_test(sequences_with_settings_of_their_own_equal_single_runs),
        cmocka_unit_test(rollouts_have_the_log_probabilities_of_training),
        cmocka_unit_test(damaged_weights_end_generation_with_a_message),
        cmocka_unit_test(prompts_that_cannot_be_continued_are_refused),
        cmocka_unit_test(texts_end_before_a_stop_string),
        cmocka_unit_test(texts_begin_with_bos_where_hugging_face_adds_one),
        cmocka_unit_test(stop_tokens_come_from_generation_config_or_config),
        cmocka_unit_test(an_end_is_added_to_generation_config_once),
        cmocka_unit_test(ends_beyond_the_vocabulary_are_noted),
        cmocka_unit_test(stories260k_gives_its_reference_logits_and_story),
        cmocka_unit_test(one_kernel_for_a_decode_step_refuses_fields_of_attention_that_it_does_not_know),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
