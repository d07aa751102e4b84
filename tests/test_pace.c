/* test_pace.c: the work on prompts in each step of a server, with the batcher and costs that a formula gives, so that
 * no clock is read: streams never wait longer than three of their own steps, and prompts are read as fast as that lets
 * them. */
// Sections of megatron.c: §16
#include "data/serve/pace.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Seconds of a step: of its weights, a stream and its keys; of prompts at all, a token, its keys and a view; of a patch
 * of a picture, and a pair of them. */
typedef struct costs {
    double weights, stream, key, mixed, token, prompt_key, view, patch, pair;
} costs;

static double alone(const costs *c, const mt_streams *s) {
    return s->count > 0 ? c->weights + c->stream * (double)s->count + c->key * (double)s->keys : 0;
}

static double beside(const costs *c, const mt_prefill *p) {
    if (p->tokens == 0) return 0;
    return c->mixed + c->token * (double)p->tokens + c->prompt_key * (double)p->keys + c->view * (double)p->viewed +
           c->patch * (double)p->patches + c->pair * (double)p->patch_pairs;
}

static double uniform(uint64_t seed, uint64_t at, uint64_t which) {
    uint32_t words[4];
    mt_philox(words, seed, at, which);
    return words[0] / 4294967296.0;
}

enum { LONGEST = 3000, MANY = 40, PICTURES = 3 };

/* A server without a model: sequences, their batcher, and the pace. */
typedef struct world {
    mt_batcher *batcher;
    mt_pace pace;
    mt_sequence sequences[MANY];
    int32_t *tokens; // [MANY, LONGEST]
    mt_sequence_image images[MANY][PICTURES];
    mt_sequence_images lists[MANY];
    int64_t known;
} world;

static world open_world(int64_t max_sequences, int64_t max_prefill) {
    mt_batcher_plan plan = {.max_sequences = max_sequences, .max_length = LONGEST, .page_rows = 16, .max_viewed = 64};
    plan.max_tokens = max_sequences + max_prefill, plan.num_pages = max_sequences * (LONGEST / 16 + 1);
    mt_prefill most = {max_prefill, INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX};
    plan.max_image_tokens = LONGEST, plan.merge_size = 2;
    world w = {.batcher = mt_batcher_create(&plan), .pace = mt_pace_open(&most)};
    w.tokens = mt_calloc(MANY * LONGEST * 4);
    return w;
}

static void close_world(world *w) {
    mt_batcher_destroy(w->batcher);
    free(w->tokens);
}

/* A sequence with tokens of its own behind the first `common`, which others have too. */
static void begin(world *w, int64_t prompt, int64_t new_tokens, int64_t common, bool viewed) {
    int64_t i = w->known++;
    assert_true(i < MANY && prompt + new_tokens <= LONGEST);
    int32_t *tokens = w->tokens + i * LONGEST;
    for (int64_t t = 0; t < prompt; t++) tokens[t] = t < common ? 1 : (int32_t)i + 2;
    w->sequences[i] = (mt_sequence){.id = i, .tokens = tokens, .num_prompt = prompt, .num_tokens = prompt, .slot = -1};
    w->sequences[i].max_tokens = prompt + new_tokens, w->sequences[i].views_prompt = viewed;
}

/* Gives the last sequence pictures of 2 x `side` tokens each, as many as find a place in its prompt. */
static void show(world *w, int64_t side) {
    int64_t i = w->known - 1, count = mt_min(PICTURES, w->sequences[i].num_prompt / (4 * side));
    for (int64_t k = 0; k < count; k++)
        w->images[i][k] = (mt_sequence_image){4 * side * k + side, {4, 2 * side}, (uint64_t)(i * PICTURES + k)};
    w->lists[i] = (mt_sequence_images){.count = count, .items = w->images[i]};
    if (count > 0) w->sequences[i].images = &w->lists[i];
}

/* A step's work; `factor`: of the true time, as the pace sees it. Returns the streams before it. */
static mt_streams step(world *w, const costs *c, double factor, mt_prefill *read) {
    mt_batcher *b = w->batcher;
    mt_streams streams = mt_batcher_streams(b, w->sequences, w->known);
    b->max_prefill = mt_pace_next(&w->pace, &streams);
    mt_batcher_next(b, w->sequences, w->known);
    *read = b->prefill;
    for (int64_t row = 0; row < b->num_logits; row++) {
        mt_sequence *s = &w->sequences[b->logit_sequences[row]];
        if (mt_batcher_row_is_viewed(b, w->sequences, row)) continue;
        s->tokens[s->num_tokens++] = (int32_t)s->id + 2;
        if (s->num_tokens == s->max_tokens) s->finish = MT_FINISH_LENGTH;
    }
    mt_pace_note(&w->pace, read, factor * (alone(c, &streams) + beside(c, read)));
    return streams;
}

/* Random costs, prompts that share beginnings, views, streams of all lengths that come and leave: no step beside
 * streams takes longer than three of theirs, unless it reads one token, without which a prompt would never end, or for
 * one picture, which is not divided. */
static void no_step_takes_longer_than_three_of_the_streams(void **state) {
    (void)state;
    int64_t mixed = 0, least = 0, seen = 0, several = 0;
    for (uint64_t trial = 0; trial < 200; trial++) {
        costs c = {.weights = uniform(1, trial, 0) < 0.3 ? 0 : uniform(1, trial, 1)};
        c.stream = 0.1 * uniform(1, trial, 2), c.key = 1e-3 * uniform(1, trial, 3) + 1e-9;
        c.mixed = trial % 3 == 0 ? 0.3 * uniform(1, trial, 4) : 0, c.token = 0.1 * uniform(1, trial, 5);
        c.prompt_key = trial % 4 == 0 ? 0 : 1e-3 * uniform(1, trial, 6), c.view = 0.05 * uniform(1, trial, 7);
        c.patch = 0.05 * uniform(1, trial, 9), c.pair = trial % 2 == 0 ? 0 : 1e-3 * uniform(1, trial, 10);
        world w = open_world(1 + (int64_t)(trial % 9), 1 + (int64_t)(512 * uniform(1, trial, 8)));
        int64_t steps = 0;
        while (w.known < MANY || mt_sequences_unfinished(w.sequences, w.known) > 0) {
            double chance = uniform(2, trial, (uint64_t)steps);
            if (w.known < MANY && (chance < 0.05 || mt_sequences_unfinished(w.sequences, w.known) == 0)) {
                uint64_t at = trial * MANY + (uint64_t)w.known;
                int64_t prompt = 1 + (int64_t)(uniform(3, at, 0) * uniform(3, at, 0) * 2000);
                begin(&w, prompt, 1 + (int64_t)(300 * uniform(3, at, 1)), (int64_t)(1500 * uniform(3, at, 2)),
                      uniform(3, at, 3) < 0.2);
                if (uniform(3, at, 4) < 0.4) show(&w, 1 + (int64_t)(60 * uniform(3, at, 5)));
            } else if (chance > 0.99) { // a client leaves
                w.sequences[steps % w.known].finish = MT_FINISH_STOP;
            }
            mt_prefill read;
            mt_streams streams = step(&w, &c, 1, &read);
            assert_true(++steps < 200000);
            if (streams.count == 0 || read.tokens == 0) continue;
            double own = alone(&c, &streams), whole = own + beside(&c, &read);
            mixed++, least += read.tokens == 1;
            seen += w.batcher->num_seen, several += w.batcher->num_seen > 1;
            if (w.batcher->num_seen == 1) whole -= c.patch * (double)read.patches + c.pair * (double)read.patch_pairs;
            if (read.tokens > 1 && whole > MT_PACE_STEPS * own * (1 + 1e-9))
                fail_msg("trial %d, step %d: %d tokens with %d keys beside %d streams take %g steps", (int)trial,
                         (int)steps, (int)read.tokens, (int)read.keys, (int)streams.count, whole / own);
        }
        close_world(&w);
    }
    assert_true(mixed > 20000 && least < mixed / 2 && seen > 500 && several > 0);
}

/* A prompt whose second picture has no room in a step ends the step before it, and goes on with it in the next one. */
static void a_picture_waits_for_a_step_with_room(void **state) {
    (void)state;
    world w = open_world(4, 512);
    mt_batcher *b = w.batcher;
    begin(&w, 200, 1, 0, false), show(&w, 8); // pictures of 16 tokens, 64 patches, at tokens 8, 40 and 72
    b->max_prefill = (mt_prefill){512, INT64_MAX, INT64_MAX, 100, INT64_MAX};
    const int64_t ends[] = {40, 72, 200};
    for (int64_t k = 0, at = 0; k < PICTURES; at = ends[k++]) {
        assert_int_equal(mt_batcher_next(b, w.sequences, w.known), ends[k] - at);
        assert_int_equal(b->num_seen, 1);
        assert_int_equal(b->seen[0].image, k);
        assert_int_equal(b->seen[0].row, 16 * k);
        assert_int_equal(b->prefill.patches, 64);
        assert_int_equal(b->prefill.patch_pairs, 64 * 64);
    }
    begin(&w, 200, 1, 0, false), show(&w, 8);
    w.sequences[0].finish = MT_FINISH_STOP;
    b->max_prefill.patches = 128; // two of them
    assert_int_equal(mt_batcher_next(b, w.sequences, w.known), 72);
    assert_int_equal(b->num_seen, 2);
    b->max_prefill.patches = 0; // one beside the first prompt's tokens, none beside another's
    begin(&w, 40, 1, 0, false), show(&w, 2);
    assert_int_equal(mt_batcher_next(b, w.sequences, w.known), 128 + 2);
    assert_int_equal(b->num_seen, 1);
    close_world(&w);
}

/* Steps that a prompt of 2,000 tokens takes beside 16 streams, its costs by `factor`s of a random size; and the part of
 * them that is too long. */
static int64_t read_prompt(const costs *c, double noise, double spikes, double *late) {
    world w = open_world(20, 512);
    for (int i = 0; i < 16; i++) begin(&w, 5, 2500, 0, false);
    int64_t steps = 0, reads = 0, lates = 0;
    mt_prefill read;
    while (steps < 40) step(&w, c, 1, &read), steps++;
    begin(&w, 2000, 1, 0, false);
    for (; w.sequences[16].finish == MT_UNFINISHED; steps++, reads++) {
        double factor = 1 + noise * (2 * uniform(4, (uint64_t)steps, 0) - 1);
        if (uniform(4, (uint64_t)steps, 1) < spikes) factor *= 5;
        mt_streams streams = step(&w, c, factor, &read);
        assert_int_equal(streams.count, 16);
        lates += alone(c, &streams) + beside(c, &read) > MT_PACE_STEPS * alone(c, &streams);
        assert_true(steps < 100000);
    }
    close_world(&w);
    *late = (double)lates / (double)reads;
    return reads;
}

/* The fewest steps that let no stream wait longer than the wanted 2.5: its own, and 1.5 of prompts. */
static int64_t fewest_steps(const costs *c) {
    int64_t at = 0, steps = 0;
    for (; at < 2000; steps++) {
        mt_streams streams = {16, 16 * (45 + steps)};
        mt_prefill read = {.tokens = 0};
        double room = 1.5 * alone(c, &streams);
        do {
            read.tokens++, read.keys += ++at;
        } while (at < 2000 && beside(c, &(mt_prefill){.tokens = read.tokens + 1, .keys = read.keys + at + 1}) <= room);
    }
    return steps;
}

static void prompts_are_read_as_fast_as_the_streams_let_them(void **state) {
    (void)state;
    const costs cases[] = {
        {.weights = 1, .stream = 0.01, .key = 1e-5, .token = 0.01},
        {.weights = 1, .stream = 0.01, .key = 1e-5, .token = 0.02, .prompt_key = 1e-4},
        {.weights = 0.1, .stream = 0.1, .key = 1e-4, .mixed = 0.5, .token = 0.03, .prompt_key = 1e-5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double late;
        int64_t best = fewest_steps(&cases[i]), took = read_prompt(&cases[i], 0, 0, &late);
        print_message("case %d: %d steps, at the best %d; ", (int)i, (int)took, (int)best);
        assert_true(took <= best * 3 / 2 + 8 && late == 0);
        took = read_prompt(&cases[i], 0.2, 0.03, &late);
        print_message("with noise %d, %.1f%% of them late\n", (int)took, 100 * late);
        assert_true(took <= 3 * best + 16 && late < 0.1);
    }
}

/* Seconds until 40 prompts of nine tokens that come at once have 256 tokens each, in relation to those of a batch that
 * reads them all in its first step. */
static double crowd(const costs *c, double noise) {
    world w = open_world(MANY, 512);
    double seconds = 0, best = beside(c, &(mt_prefill){.tokens = 9 * MANY, .keys = 45 * MANY});
    for (int i = 0; i < MANY; i++) begin(&w, 9, 256, 0, false);
    int64_t known = w.known;
    w.known = 1; // the others come while the first is read
    for (int64_t steps = 0; mt_sequences_unfinished(w.sequences, w.known) > 0; w.known = known, steps++) {
        mt_prefill read;
        double factor = 1 + noise * uniform(6, (uint64_t)steps, 0);
        mt_streams streams = step(&w, c, factor, &read);
        seconds += alone(c, &streams) + beside(c, &read);
    }
    for (int64_t t = 1; t < 256; t++) best += alone(c, &(mt_streams){MANY, MANY * (9 + t)});
    close_world(&w);
    return seconds / best;
}

/* The costs of large weights and of steps with prompts, as on a GPU; of products; and between. */
static void many_prompts_at_once_are_read_in_few_steps(void **state) {
    (void)state;
    const costs cases[] = {{.weights = 4, .stream = 0.028, .mixed = 3, .token = 0.02},
                           {.weights = 1, .stream = 0.3, .key = 1e-4, .token = 0.3, .prompt_key = 1e-4},
                           {.weights = 0.2, .stream = 0.02, .key = 1e-5, .token = 0.02}};
    const double most[] = {1.15, 1.02, 1.03};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double exact = crowd(&cases[i], 0), noisy = crowd(&cases[i], 0.5);
        print_message("case %d: %.3f times the least, with noise %.3f times\n", (int)i, exact, noisy);
        assert_true(exact < most[i] && noisy < most[i]);
    }
}

/* Where nobody writes, nobody waits: the whole limit. */
static void without_streams_a_step_reads_all_it_may(void **state) {
    (void)state;
    world w = open_world(2, 300);
    const costs c = {.token = 1};
    mt_prefill read;
    begin(&w, 700, 1, 0, false);
    step(&w, &c, 1, &read), assert_int_equal(read.tokens, 300);
    step(&w, &c, 1, &read), assert_int_equal(read.tokens, 300);
    step(&w, &c, 1, &read), assert_int_equal(read.tokens, 100);
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_step_takes_longer_than_three_of_the_streams),
        cmocka_unit_test(prompts_are_read_as_fast_as_the_streams_let_them),
        cmocka_unit_test(a_picture_waits_for_a_step_with_room),
        cmocka_unit_test(many_prompts_at_once_are_read_in_few_steps),
        cmocka_unit_test(without_streams_a_step_reads_all_it_may),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
