/* Generation: sampling compared with its definition, the key/value cache with full forwards, greedy continuations with
 * Hugging Face transformers. */
#include "../data/checkpoint.h"
#include "../data/options.h"
#include "../data/prompts.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const char *const families[] = {"gpt2",      "llama", "llama3_rope_tied",  "qwen2",
                                       "qwen2_moe", "qwen3", "deepseek_v3_dense", "deepseek_v3_no_q_latent"};
enum { NUM_FAMILIES = sizeof families / sizeof *families };
static const mt_stops no_stops = {.count = 0};
static const mt_sampling greedy = {.temperature = 0, .top_p = 1};

/* ---- a model from a folder */

/* Separate from create_model so that the model's pointer to the options stays valid. */
static mt_options read_options(const char *folder) {
    mt_options options;
    mt_error error = {{0}};
    char *arguments[] = {"infer", "--load", (char *)folder, "--max-new-tokens", "24"};
    if (mt_options_parse(&options, MT_PROGRAM_INFER, 5, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_INFER, 1, &error) != 0)
        fail_msg("%s", error.text);
    return options;
}

static mt_model *create_model(const mt_options *options, const mt_model_plan *plan) {
    mt_model *model;
    mt_error error = {{0}};
    mt_run_state state = {0};
    if (mt_model_create(&model, options, &mt_grid_of_one, &mt_cpu_ops, plan, &error) != 0 ||
        mt_checkpoint_load(model, &state, options->load, &error) != 0)
        fail_msg("%s", error.text);
    return model;
}

/* --device auto may select the CPU after the options were checked. */
static void a_model_on_the_cpu_has_no_backend_of_a_gpu(void **state) {
    (void)state;
    const mt_model_plan plan = {.max_tokens = 8, .max_logits = 8, .max_position = 8};
    const mt_attention_backend backends[] = {MT_ATTENTION_UNFUSED, MT_ATTENTION_CUDNN};
    for (int i = 0; i < 2; i++) {
        mt_options options = read_options("tests/golden/hf/gpt2");
        mt_error error = {{0}};
        mt_model *model = NULL;
        options.attention_backend = backends[i];
        assert_int_equal(mt_model_create(&model, &options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error), -1);
        assert_non_null(strstr(error.text, "needs a GPU, and this run is on the CPU"));
        assert_non_null(strstr(error.text, i == 0 ? "unfused" : "cudnn"));
        assert_null(model);
        mt_options_free(&options);
    }
}

static mt_options read_family(int family) {
    char folder[256];
    snprintf(folder, sizeof folder, "tests/golden/hf/%s", families[family]);
    return read_options(folder);
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

static mt_sequence begin(const mt_options *options, int64_t id, const int32_t *prompt, int64_t count, int64_t context) {
    mt_sequence sequence;
    mt_error error;
    if (mt_sequence_begin(&sequence, id, prompt, count, context, options, &error) != 0) fail_msg("%s", error.text);
    return sequence;
}

/* Generates until all sequences are finished, with at most `piece` tokens per forward (0: as planned). */
static void run(const mt_options *options, mt_sequence *sequences, int64_t count, int64_t piece,
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
    mt_generator *generator = mt_generator_create(model, count, sampling, stops);
    for (; unfinished > 0; steps++) {
        unfinished = mt_generator_step(generator, sequences, count, &error);
        if (unfinished < 0) fail_msg("%s", error.text);
    }
    assert_in_range(steps, 1, options->max_new_tokens);
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

static void count_draws(const float *logits, int64_t V, const mt_sampling *sampling, int64_t *counts) {
    int32_t order[CHOICES];
    for (int64_t i = 0; i < V; i++) counts[i] = 0;
    for (int64_t position = 0; position < DRAWS; position++) {
        int32_t token = mt_sample(logits, V, sampling, 3, position, order);
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
    int32_t order[V];
    for (uint64_t trial = 0; trial < 200; trial++) {
        uint32_t words[4];
        for (uint64_t i = 0; i < V; i++) {
            mt_philox(words, 1, trial, i);
            logits[i] = (float)(words[0] % 64) / 8;
        }
        mt_philox(words, 2, trial, 0);
        mt_sampling sampling = {.temperature = 0.8, .top_k = words[0] % V, .top_p = (words[1] % 100 + 1) / 100.0};
        int32_t token = mt_sample(logits, V, &sampling, 0, (int64_t)trial, order);
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

static void greedy_takes_the_lowest_id_among_equals(void **state) {
    (void)state;
    const float logits[] = {1, 3, -INFINITY, 3, 2};
    int32_t order[5];
    assert_int_equal(mt_sample(logits, 5, &greedy, 0, 0, order), 1);
    mt_sampling one = {.temperature = 1, .top_p = 1, .top_k = 1};
    for (int64_t position = 0; position < 100; position++)
        assert_int_equal(mt_sample(logits, 5, &one, 0, position, order), 1);
}

static void logits_that_are_not_numbers_are_refused(void **state) {
    (void)state;
    const float bad[][3] = {{NAN, 1, 2}, {1, 2, NAN}, {1, INFINITY, 0}, {-INFINITY, -INFINITY, -INFINITY}};
    const mt_sampling drawn = {.temperature = 1, .top_p = 0.9};
    int32_t order[3];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(mt_sample(bad[i], 3, &greedy, 0, 0, order), -1);
        assert_int_equal(mt_sample(bad[i], 3, &drawn, 0, 0, order), -1);
    }
}

static void a_draw_depends_on_seed_sequence_and_position_alone(void **state) {
    (void)state;
    enum { V = 5000 };
    static float logits[V]; // all equal: every draw is one of 5,000
    static int32_t order[V];
    const mt_sampling a = {.temperature = 1, .top_p = 1, .seed = 1}, b = {.temperature = 1, .top_p = 1, .seed = 2};
    int32_t token = mt_sample(logits, V, &a, 4, 9, order);
    assert_int_equal(mt_sample(logits, V, &a, 4, 9, order), token);
    assert_int_not_equal(mt_sample(logits, V, &b, 4, 9, order), token);
    assert_int_not_equal(mt_sample(logits, V, &a, 5, 9, order), token);
    assert_int_not_equal(mt_sample(logits, V, &a, 4, 10, order), token);
}

/* ---- the cache */

static void greedy_continuations_equal_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_options options = read_family(k);
        int32_t expected[64];
        char path[512];
        snprintf(path, sizeof path, "%s/expected.json", options.load);
        int64_t count = read_ids(path, "greedy_ids", expected, 64);
        assert_int_equal(count, 32); // 8 of the prompt and 24 generated
        mt_sequence sequence = begin(&options, 0, expected, 8, 64);
        run(&options, &sequence, 1, 0, &greedy, &no_stops);
        assert_int_equal(sequence.num_tokens, count);
        for (int64_t i = 0; i < count; i++)
            if (sequence.tokens[i] != expected[i])
                fail_msg("%s: token %d is %d, expected %d", families[k], (int)i, sequence.tokens[i], expected[i]);
        free(sequence.tokens);
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
        mt_options options = read_family(k);
        mt_model_plan plan = {
            .max_tokens = COUNT, .max_logits = COUNT, .cache_rows = COUNT + BASE, .max_position = COUNT};
        mt_model *model = create_model(&options, &plan);
        mt_batch batch;
        mt_batch_alloc(&batch, COUNT);
        int64_t V = options.vocab_size;
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

enum { NUM_PROMPTS = 5 };

/* Prompts of 1, 8, 15, 22 and 29 tokens. */
static void begin_prompts(const mt_options *options, int64_t context, mt_sequence *sequences) {
    for (int64_t s = 0; s < NUM_PROMPTS; s++) {
        int32_t prompt[64];
        int64_t count = 1 + 7 * s;
        for (int32_t i = 0; i < count; i++) prompt[i] = (i * 31 + 7 * (int32_t)s) % (int32_t)options->vocab_size;
        sequences[s] = begin(options, s, prompt, count, context);
    }
}

static void free_prompts(mt_sequence *sequences) {
    for (int64_t s = 0; s < NUM_PROMPTS; s++) free(sequences[s].tokens);
}

static void a_batch_of_unequal_prompts_equals_single_runs(void **state) {
    (void)state;
    const mt_sampling drawn = {.temperature = 1, .top_p = 0.95, .top_k = 50, .seed = 3};
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_options options = read_family(k);
        mt_sequence together[NUM_PROMPTS], alone[NUM_PROMPTS];
        begin_prompts(&options, 64, together);
        begin_prompts(&options, 64, alone);
        run(&options, together, NUM_PROMPTS, 0, &drawn, &no_stops);
        for (int64_t s = 0; s < NUM_PROMPTS; s++) {
            run(&options, &alone[s], 1, 0, &drawn, &no_stops);
            assert_same_tokens(&together[s], &alone[s]);
        }
        free_prompts(together), free_prompts(alone);
        mt_options_free(&options);
    }
}

static void prompts_read_in_pieces_equal_prompts_read_at_once(void **state) {
    (void)state;
    const mt_sampling drawn = {.temperature = 1, .top_p = 1, .seed = 8};
    const int64_t pieces[] = {1, 3, 7, 64};
    mt_options options = read_family(1);
    mt_sequence whole[NUM_PROMPTS], cut[NUM_PROMPTS];
    begin_prompts(&options, 64, whole);
    run(&options, whole, NUM_PROMPTS, 0, &drawn, &no_stops);
    for (int i = 0; i < 4; i++) {
        begin_prompts(&options, 64, cut);
        run(&options, cut, NUM_PROMPTS, pieces[i], &drawn, &no_stops);
        for (int64_t s = 0; s < NUM_PROMPTS; s++) assert_same_tokens(&cut[s], &whole[s]);
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
    mt_options options = read_family(1);
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
    mt_options options = read_family(1);
    int32_t expected[64];
    read_ids("tests/golden/hf/llama/expected.json", "greedy_ids", expected, 64);
    const mt_stops stops = {.ids = {159, expected[8]}, .count = 2};
    mt_sequence stopped = begin(&options, 0, expected, 8, 64), cut = begin(&options, 0, expected, 8, 11);
    run(&options, &stopped, 1, 0, &greedy, &stops);
    assert_int_equal(stopped.num_tokens, 9); // the last token is the stop token
    assert_int_equal(stopped.tokens[8], expected[8]);
    run(&options, &cut, 1, 0, &greedy, &no_stops);
    assert_int_equal(cut.num_tokens, 11); // the whole context
    free(stopped.tokens), free(cut.tokens);
    mt_options_free(&options);
}

static void damaged_weights_end_generation_with_a_message(void **state) {
    (void)state;
    mt_options options = read_family(1);
    const int32_t prompt[] = {4, 5};
    mt_sequence sequence = begin(&options, 0, prompt, 2, 64);
    mt_model_plan plan = mt_generator_plan(1, 64, 2);
    mt_model *model = create_model(&options, &plan);
    int64_t num_buckets;
    mt_bucket *buckets = mt_model_buckets(model, &num_buckets);
    ((float *)buckets[num_buckets - 1].params)[buckets[num_buckets - 1].decay_count] = NAN; // of the final norm
    mt_generator *generator = mt_generator_create(model, 1, &greedy, &no_stops);
    mt_error error = {{0}};
    assert_int_equal(mt_generator_step(generator, &sequence, 1, &error), -1);
    assert_non_null(strstr(error.text, "not all numbers"));
    mt_generator_destroy(generator);
    mt_model_destroy(model);
    free(sequence.tokens);
    mt_options_free(&options);
}

static void prompts_that_cannot_be_continued_are_refused(void **state) {
    (void)state;
    mt_options options = read_family(0);
    mt_sequence sequence;
    mt_error error = {{0}};
    int32_t prompt[64] = {0};
    assert_int_equal(mt_sequence_begin(&sequence, 2, prompt, 0, 64, &options, &error), -1);
    assert_non_null(strstr(error.text, "prompt 3 is empty"));
    assert_int_equal(mt_sequence_begin(&sequence, 0, prompt, 64, 64, &options, &error), -1);
    assert_non_null(strstr(error.text, "64 tokens"));
    for (int i = 0; i < 2; i++) {
        prompt[5] = i ? -1 : (int32_t)options.vocab_size;
        assert_int_equal(mt_sequence_begin(&sequence, 0, prompt, 8, 64, &options, &error), -1);
        assert_non_null(strstr(error.text, "outside the model's vocabulary"));
    }
    prompt[5] = 0;
    sequence = begin(&options, 0, prompt, 63, 64);
    assert_int_equal(sequence.max_tokens, 64);
    free(sequence.tokens);
    static const char *const bad[] = {"", "1,,2", "1,2,", "x", "-1", "1 2", "99999999999999999999", "1,4294967296"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(mt_sequence_parse(&sequence, 0, bad[i], 64, &options, &error), -1);
    assert_int_equal(mt_sequence_parse(&sequence, 0, "7, 8,159", 64, &options, &error), 0);
    assert_int_equal(sequence.num_prompt, 3);
    assert_int_equal(sequence.tokens[2], 159);
    free(sequence.tokens);
    options.max_new_tokens = 0;
    sequence = begin(&options, 0, prompt, 3, 64);
    assert_true(sequence.finished);
    free(sequence.tokens);
    mt_options_free(&options);
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
    for (int k = 0; k < 3; k++) write_text(folder, names[k], NULL);
    write_text(folder, "other.model", NULL);
    rmdir(folder);
}

static void stop_tokens_come_from_generation_config_or_config(void **state) {
    (void)state;
    char folder[] = "/tmp/mt_test_stops_XXXXXX";
    assert_non_null(mkdtemp(folder));
    mt_options options = read_family(0); // eos_token_id 1
    mt_stops stops;
    mt_error error;
    assert_int_equal(mt_stops_read(&stops, folder, &options, &error), 0);
    assert_int_equal(stops.count, 1);
    assert_int_equal(stops.ids[0], 1);
    write_text(folder, "generation_config.json", "{\"eos_token_id\": [7, 9]}");
    assert_int_equal(mt_stops_read(&stops, folder, &options, &error), 0);
    assert_int_equal(stops.count, 2);
    assert_int_equal(stops.ids[1], 9);
    write_text(folder, "generation_config.json", "{\"eos_token_id\": 5}");
    assert_int_equal(mt_stops_read(&stops, folder, &options, &error), 0);
    assert_int_equal(stops.count, 1);
    assert_int_equal(stops.ids[0], 5);
    write_text(folder, "generation_config.json", "[1, 2]");
    assert_int_equal(mt_stops_read(&stops, folder, &options, &error), -1);
    assert_non_null(strstr(error.text, "generation_config.json"));
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
    mt_options options = read_options(folder);
    int32_t tokens[64];
    int64_t count = read_ids(path, "input_ids", tokens, 64), V = options.vocab_size;
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
    free(sequence.tokens);
    mt_options_free(&options);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_on_the_cpu_has_no_backend_of_a_gpu),
        cmocka_unit_test(draws_follow_the_softmax_at_any_temperature),
        cmocka_unit_test(top_k_draws_from_the_k_most_probable_in_proportion),
        cmocka_unit_test(top_p_draws_from_the_fewest_that_hold_p),
        cmocka_unit_test(top_k_and_top_p_keep_what_sorting_would),
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
        cmocka_unit_test(damaged_weights_end_generation_with_a_message),
        cmocka_unit_test(prompts_that_cannot_be_continued_are_refused),
        cmocka_unit_test(texts_begin_with_bos_where_hugging_face_adds_one),
        cmocka_unit_test(stop_tokens_come_from_generation_config_or_config),
        cmocka_unit_test(stories260k_gives_its_reference_logits_and_story),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
