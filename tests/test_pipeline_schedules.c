/* Pipeline schedules: the lists against Megatron's own tables, and against one another. */
#include "../megatron.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_PP = 8, MAX_VP = 4, MAX_MICRO_BATCHES = 25, MAX_STEPS = 6 * MAX_VP * MAX_MICRO_BATCHES };

static json_t *read_golden(const char *path) {
    json_t *root = json_load_file(path, 0, NULL);
    if (!root) fail_msg("%s is missing; run from the root of the project", path);
    return root;
}

static int64_t number(const json_t *object, const char *key) {
    return (int64_t)json_integer_value(json_object_get(object, key));
}

/* The steps that compute. Returns how many. */
static int64_t computing_steps(mt_step *steps, const mt_schedule *schedule, int64_t rank) {
    mt_step all[MAX_STEPS];
    int64_t count = mt_schedule_steps(all, schedule, rank), kept = 0;
    assert_int_equal(mt_schedule_steps(NULL, schedule, rank), count);
    for (int64_t i = 0; i < count; i++)
        if (all[i].kind <= MT_STEP_BACKWARD_WEIGHT) steps[kept++] = all[i];
    return kept;
}

/* The list of one rank as Megatron's schedule runs: warm-up forwards in the order of the table, then a forward and a
 * backward in turn, then backwards, whose chunks count from the last. */
static void assert_as_megatron(const mt_schedule *schedule, int64_t rank, const json_t *table, int64_t warmup,
                               int64_t remaining) {
    mt_step steps[MAX_STEPS];
    int64_t total = schedule->micro_batches * schedule->vp, at = 0, forward = 0;
    assert_int_equal(computing_steps(steps, schedule, rank), 2 * total);
    assert_int_equal(json_array_size(table), total);
    assert_int_equal(warmup + remaining, total);
    for (int64_t backward = -warmup; backward < total; backward++) {
        if (forward < total) {
            const json_t *entry = json_array_get(table, (size_t)forward++);
            assert_int_equal(steps[at].kind, MT_STEP_FORWARD);
            assert_int_equal(steps[at].micro_batch, json_integer_value(json_array_get(entry, 0)));
            assert_int_equal(steps[at++].chunk, json_integer_value(json_array_get(entry, 1)));
        }
        if (backward < 0) continue;
        const json_t *entry = json_array_get(table, (size_t)backward);
        assert_int_equal(steps[at].kind, MT_STEP_BACKWARD);
        assert_int_equal(steps[at].micro_batch, json_integer_value(json_array_get(entry, 0)));
        assert_int_equal(steps[at++].chunk, schedule->vp - 1 - json_integer_value(json_array_get(entry, 1)));
    }
    assert_int_equal(at, 2 * total);
}

static void orders_equal_megatron(void **state) {
    (void)state;
    json_t *cases = read_golden("tests/golden/megatron/pipeline_schedules.json"), *item, *rank_item;
    size_t index, rank;
    int64_t checked = 0;
    json_array_foreach(cases, index, item) {
        mt_schedule schedule = {MT_SCHEDULE_1F1B, number(item, "pp"), number(item, "vp"), number(item, "microbatches"),
                                number(item, "group")};
        if (schedule.vp > 1) schedule.kind = MT_SCHEDULE_INTERLEAVED;
        json_array_foreach(json_object_get(item, "ranks"), rank, rank_item) {
            assert_as_megatron(&schedule, (int64_t)rank, json_object_get(item, "table"), number(rank_item, "warmup"),
                               number(rank_item, "remaining"));
            checked++;
        }
    }
    assert_int_equal(checked, 126);
    json_decref(cases);
}

/* ---- all lists of up to 8 ranks, 4 stages a rank and 24 micro-batches */

/* Calls `check` with every legal schedule of the kind. */
static int64_t for_all_schedules(mt_schedule_kind kind, void (*check)(const mt_schedule *)) {
    int64_t count = 0;
    bool many = kind == MT_SCHEDULE_INTERLEAVED || kind == MT_SCHEDULE_FORWARD_ONLY;
    for (int64_t pp = 1; pp <= MAX_PP; pp++)
        for (int64_t vp = kind == MT_SCHEDULE_INTERLEAVED ? 2 : 1; vp <= (many && pp > 1 ? MAX_VP : 1); vp++)
            for (int64_t m = 1; m <= 24; m++)
                for (int64_t group = pp; group <= (vp > 1 ? m : pp); group++) {
                    if (vp > 1 && m % group != 0 && m % group < pp) continue;
                    const mt_schedule schedule = {kind, pp, vp, m, group};
                    check(&schedule);
                    count++;
                }
    return count;
}

static void for_every_schedule(void (*check)(const mt_schedule *)) {
    assert_int_equal(for_all_schedules(MT_SCHEDULE_1F1B, check), 8 * 24);
    assert_int_equal(for_all_schedules(MT_SCHEDULE_ZB_H1, check), 8 * 24);
    assert_true(for_all_schedules(MT_SCHEDULE_INTERLEAVED, check) > 2000);
    assert_true(for_all_schedules(MT_SCHEDULE_FORWARD_ONLY, check) > 2000);
}

static void describe(const mt_schedule *s, const char *what) {
    fail_msg("kind %d, pp %d, vp %d, %d micro-batches, group %d: %s", (int)s->kind, (int)s->pp, (int)s->vp,
             (int)s->micro_batches, (int)s->group, what);
}

/* How often each virtual stage did what to each micro-batch, and which messages are on their way. */
typedef struct progress {
    int done[4][MAX_PP * MAX_VP][MAX_MICRO_BATCHES]; // by mt_step_kind
    int sent[2][MAX_PP * MAX_VP][MAX_MICRO_BATCHES]; // by direction and the virtual stage that sent
    int received[2][MAX_PP * MAX_VP][MAX_MICRO_BATCHES];
} progress;

/* Does one step, asserting all that it needs; false if it is a receive whose message is not sent yet. Messages are
 * found by name: virtual stage and micro-batch. */
static bool take_step(progress *p, const mt_schedule *s, int64_t rank, const mt_step *step) {
    int64_t stage = step->chunk * s->pp + rank, last = s->pp * s->vp - 1, m = step->micro_batch;
    assert_true(step->chunk >= 0 && step->chunk < s->vp && m >= 0 && m < s->micro_batches);
    if (step->kind > MT_STEP_BACKWARD_WEIGHT) {
        bool backward = step->kind == MT_STEP_SEND_BACKWARD || step->kind == MT_STEP_RECV_BACKWARD;
        bool sends = step->kind == MT_STEP_SEND_FORWARD || step->kind == MT_STEP_SEND_BACKWARD;
        int64_t other = stage + (sends != backward ? 1 : -1); // the virtual stage at the other end
        assert_true(other >= 0 && other <= last);
        assert_int_equal(step->peer, other % s->pp);
        assert_int_not_equal(step->peer, rank);
        if (sends) {
            int made = backward ? p->done[MT_STEP_BACKWARD][stage][m] + p->done[MT_STEP_BACKWARD_INPUT][stage][m]
                                : p->done[MT_STEP_FORWARD][stage][m];
            assert_int_equal(made, 1);
            assert_int_equal(p->sent[backward][stage][m]++, 0);
            return true;
        }
        if (!p->sent[backward][other][m]) return false;
        assert_int_equal(p->received[backward][stage][m]++, 0);
        return true;
    }
    assert_int_equal(step->peer, -1);
    assert_int_equal(p->done[step->kind][stage][m]++, 0);
    if (step->kind == MT_STEP_FORWARD && stage > 0) assert_int_equal(p->received[0][stage][m], 1);
    if (step->kind == MT_STEP_BACKWARD || step->kind == MT_STEP_BACKWARD_INPUT) {
        assert_int_equal(p->done[MT_STEP_FORWARD][stage][m], 1);
        if (stage < last) assert_int_equal(p->received[1][stage][m], 1);
    }
    if (step->kind == MT_STEP_BACKWARD_WEIGHT) assert_int_equal(p->done[MT_STEP_BACKWARD_INPUT][stage][m], 1);
    return true;
}

/* Every stage did to every micro-batch what the schedule is for, once. */
static void assert_complete(const progress *p, const mt_schedule *s) {
    bool trains = s->kind != MT_SCHEDULE_FORWARD_ONLY, splits = s->kind == MT_SCHEDULE_ZB_H1;
    int64_t last = s->pp * s->vp - 1;
    for (int64_t stage = 0; stage <= last; stage++)
        for (int64_t m = 0; m < s->micro_batches; m++) {
            assert_int_equal(p->done[MT_STEP_FORWARD][stage][m], 1);
            assert_int_equal(p->done[MT_STEP_BACKWARD][stage][m], trains && !splits);
            assert_int_equal(p->done[MT_STEP_BACKWARD_INPUT][stage][m], splits);
            assert_int_equal(p->done[MT_STEP_BACKWARD_WEIGHT][stage][m], splits);
            assert_int_equal(p->sent[0][stage][m], stage < last);
            assert_int_equal(p->received[0][stage][m], stage > 0);
            assert_int_equal(p->sent[1][stage][m], trains && stage > 0);
            assert_int_equal(p->received[1][stage][m], trains && stage < last);
        }
}

static void check_dependencies(const mt_schedule *s) {
    static mt_step steps[MAX_PP][MAX_STEPS];
    static progress p;
    int64_t count[MAX_PP], next[MAX_PP] = {0}, left = 0;
    memset(&p, 0, sizeof p);
    for (int64_t r = 0; r < s->pp; r++) left += count[r] = mt_schedule_steps(steps[r], s, r);
    for (bool moves = true; moves;) {
        moves = false;
        for (int64_t r = 0; r < s->pp; r++)
            for (; next[r] < count[r] && take_step(&p, s, r, &steps[r][next[r]]); left--) next[r]++, moves = true;
    }
    if (left > 0) describe(s, "the ranks wait for one another for ever");
    assert_complete(&p, s);
}

static void every_stage_computes_every_micro_batch_once_from_what_it_was_sent(void **state) {
    (void)state;
    for_every_schedule(check_dependencies);
}

/* The messages of one rank in one direction, by the virtual stage that sends and the micro-batch. */
static int64_t messages(int64_t *names, const mt_schedule *s, int64_t rank, mt_step_kind kind, int64_t to_sender) {
    mt_step steps[MAX_STEPS];
    int64_t count = mt_schedule_steps(steps, s, rank), kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (steps[i].kind == kind)
            names[kept++] = (steps[i].chunk * s->pp + rank + to_sender) * MAX_MICRO_BATCHES + steps[i].micro_batch;
    return kept;
}

static void check_message_order(const mt_schedule *s) {
    int64_t sent[MAX_STEPS], received[MAX_STEPS];
    for (int64_t a = 0; a < s->pp && s->pp > 1; a++)
        for (int backward = 0; backward < 2; backward++) {
            int64_t b = (a + (backward ? s->pp - 1 : 1)) % s->pp;
            int64_t count = messages(sent, s, a, backward ? MT_STEP_SEND_BACKWARD : MT_STEP_SEND_FORWARD, 0);
            int64_t other =
                messages(received, s, b, backward ? MT_STEP_RECV_BACKWARD : MT_STEP_RECV_FORWARD, backward ? 1 : -1);
            if (count != other || memcmp(sent, received, (size_t)count * sizeof *sent) != 0)
                describe(s, "receives are in another order than sends");
        }
}

static void messages_of_a_direction_are_received_in_the_order_of_their_sends(void **state) {
    (void)state;
    for_every_schedule(check_message_order);
}

static const mt_step_costs units = {1, 1, 1, 0};

/* With unlimited room, with the least that the contract names, and with slow messages. */
static void check_room(const mt_schedule *s) {
    const mt_step_costs slow = {1, 1, 1, 7};
    int64_t least = s->vp > 1 ? s->group - s->pp + 1 : 1;
    for (int64_t in_flight = 0; in_flight <= least; in_flight += least) {
        mt_timeline timeline;
        if (mt_timeline_create(&timeline, s, &slow, in_flight)) describe(s, "stops for want of room");
        mt_timeline_free(&timeline);
    }
}

static void lists_run_without_deadlock_with_little_room_for_messages(void **state) {
    (void)state;
    for_every_schedule(check_room);
}

static void too_little_room_for_messages_is_a_deadlock(void **state) {
    (void)state;
    const mt_schedule wide = {MT_SCHEDULE_INTERLEAVED, 2, 2, 24, 24};
    mt_timeline timeline;
    assert_int_equal(mt_timeline_create(&timeline, &wide, &units, 1), -1);
    mt_timeline_free(&timeline);
    assert_int_equal(mt_timeline_create(&timeline, &wide, &units, 23), 0);
    mt_timeline_free(&timeline);
}

static int64_t least_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Micro-batches between forward and the backward of the input at most, counted here. */
static int64_t in_backward_of_input(const mt_timeline *t, int64_t rank) {
    int64_t held = 0, most = 0;
    for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
        held += t->steps[i].kind == MT_STEP_FORWARD;
        held -= t->steps[i].kind == MT_STEP_BACKWARD || t->steps[i].kind == MT_STEP_BACKWARD_INPUT;
        if (held > most) most = held;
    }
    return most;
}

/* 1F1B: pp - rank. Interleaved: the warm-up and one. ZB-H1: pp on every rank, which 1F1B has on its first; of these
 * pp - rank wait for the gradient of their input. */
static void check_peak(const mt_schedule *s) {
    mt_timeline t;
    assert_int_equal(mt_timeline_create(&t, s, &units, 0), 0);
    for (int64_t r = 0; r < s->pp; r++) {
        int64_t expected = least_of(s->micro_batches, s->pp - r);
        if (s->kind == MT_SCHEDULE_INTERLEAVED)
            expected = least_of(s->micro_batches * s->vp, 2 * (s->pp - r - 1) + (s->vp - 1) * s->group + 1);
        if (s->kind != MT_SCHEDULE_FORWARD_ONLY) assert_int_equal(in_backward_of_input(&t, r), expected);
        if (s->kind == MT_SCHEDULE_ZB_H1) expected = least_of(s->micro_batches, s->pp);
        if (s->kind == MT_SCHEDULE_FORWARD_ONLY) expected = 0;
        if (t.live[r] != expected) describe(s, "holds another number of micro-batches");
    }
    mt_timeline_free(&t);
}

static void peak_live_micro_batches_are_as_theory_says(void **state) {
    (void)state;
    for_every_schedule(check_peak);
}

/* ---- time */

static double span_of(const mt_schedule *s, const mt_step_costs *costs) {
    mt_timeline t;
    assert_int_equal(mt_timeline_create(&t, s, costs, 0), 0);
    double span = t.span, step = costs->forward + costs->backward_input + costs->backward_weight;
    if (s->kind == MT_SCHEDULE_FORWARD_ONLY) step = costs->forward;
    double work = (double)(s->micro_batches * s->vp) * step;
    assert_true(fabs(t.bubble - (span - work) / work) < 1e-12);
    mt_timeline_free(&t);
    return span;
}

/* With forward, gradient of the input and of the weights one unit each. ZB-H1's bubble is a third of 1F1B's; too few
 * micro-batches to fill the pipeline take a forward and a backward through all ranks, then two units each on the first
 * rank. Interleaved formulas are for whole groups of pp. */
static void check_span(const mt_schedule *s) {
    double m = (double)s->micro_batches, vp = (double)s->vp, ahead = (double)(s->pp - 1),
           expected = 3 * (m * vp + ahead);
    if (s->vp > 1 && (s->group != s->pp || s->micro_batches % s->pp != 0)) return;
    if (s->kind == MT_SCHEDULE_ZB_H1) expected = s->micro_batches < s->pp ? 2 * ahead + 1 + 2 * m : 3 * m + ahead;
    if (s->kind == MT_SCHEDULE_FORWARD_ONLY) expected = m * vp + ahead;
    if (span_of(s, &units) != expected) describe(s, "takes another time than theory says");
}

static void bubbles_of_equal_costs_are_as_theory_says(void **state) {
    (void)state;
    for_every_schedule(check_span);
}

/* Narayanan et al.: (pp - 1) (f + b), divided by vp when interleaved. Qi et al., table 1: (pp - 1) (f + b - w) where a
 * forward and a backward of the input take the same time. */
static void bubbles_follow_the_costs(void **state) {
    (void)state;
    const mt_step_costs costs = {2, 2, 1, 0}, part = {1, 1, 0.5, 0}, sends = {1, 1, 1, 0.25};
    const mt_schedule plain = {MT_SCHEDULE_1F1B, 4, 1, 12, 0}, interleaved = {MT_SCHEDULE_INTERLEAVED, 4, 2, 12, 4},
                      zero_bubble = {MT_SCHEDULE_ZB_H1, 4, 1, 12, 0}, forward = {MT_SCHEDULE_FORWARD_ONLY, 4, 1, 12, 0};
    assert_true(span_of(&plain, &costs) == 12 * 5 + 3 * (2 + 2 + 1));
    assert_true(span_of(&interleaved, &part) == 12 * 5 + 3 * (2 + 2 + 1) / 2.0);
    assert_true(span_of(&zero_bubble, &costs) == 12 * 5 + 3 * (2 + 2 - 1));
    assert_true(span_of(&forward, &sends) == 12 + 3 * 1.25);
}

static void one_rank_alternates_forward_and_backward(void **state) {
    (void)state;
    const mt_schedule schedule = {MT_SCHEDULE_1F1B, 1, 1, 4, 0};
    mt_step steps[8];
    assert_int_equal(mt_schedule_steps(steps, &schedule, 0), 8);
    for (int64_t i = 0; i < 8; i++) {
        assert_int_equal(steps[i].kind, i % 2 ? MT_STEP_BACKWARD : MT_STEP_FORWARD);
        assert_int_equal(steps[i].micro_batch, i / 2);
        assert_int_equal(steps[i].peer, -1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_equal_megatron),
        cmocka_unit_test(every_stage_computes_every_micro_batch_once_from_what_it_was_sent),
        cmocka_unit_test(messages_of_a_direction_are_received_in_the_order_of_their_sends),
        cmocka_unit_test(lists_run_without_deadlock_with_little_room_for_messages),
        cmocka_unit_test(too_little_room_for_messages_is_a_deadlock),
        cmocka_unit_test(peak_live_micro_batches_are_as_theory_says),
        cmocka_unit_test(bubbles_of_equal_costs_are_as_theory_says),
        cmocka_unit_test(bubbles_follow_the_costs),
        cmocka_unit_test(one_rank_alternates_forward_and_backward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
