/* Pipeline schedules: comparison with Megatron's tables; the lists of all ranks run together; time, layouts, pictures.
 */
// Sections of megatron.c: §11 §11a §11b
#include "../data/base/file.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/timeline.h"
#include "folder.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_PP = 8, MAX_VP = 4, MAX_MICRO_BATCHES = 25, MAX_ACTIONS = 6 * MAX_VP * MAX_MICRO_BATCHES };

static json_t *read_golden(const char *path) {
    json_t *root = json_load_file(path, 0, NULL);
    if (!root) fail_msg("%s is missing; run from the root of the project", path);
    return root;
}

static int64_t number(const json_t *object, const char *key) {
    return (int64_t)json_integer_value(json_object_get(object, key));
}

/* Gets the actions that compute; returns their number. */
static int64_t computing_actions(mt_action *actions, const mt_schedule *schedule, int64_t rank) {
    mt_action all[MAX_ACTIONS];
    int64_t count = mt_schedule_actions(all, schedule, rank), kept = 0;
    assert_int_equal(mt_schedule_actions(NULL, schedule, rank), count);
    for (int64_t i = 0; i < count; i++)
        if (all[i].kind <= MT_ACTION_BACKWARD_WEIGHT) actions[kept++] = all[i];
    return kept;
}

/* Compares the list of one rank with Megatron's: warm-up forwards in the order of the table, then forwards and
 * backwards alternately, then backwards, whose chunks count from the last. */
static void assert_as_megatron(const mt_schedule *schedule, int64_t rank, const json_t *table, int64_t warmup,
                               int64_t remaining) {
    mt_action actions[MAX_ACTIONS];
    int64_t total = schedule->micro_batches * schedule->vp, at = 0, forward = 0;
    assert_int_equal(computing_actions(actions, schedule, rank), 2 * total);
    assert_int_equal(json_array_size(table), total);
    assert_int_equal(warmup + remaining, total);
    for (int64_t backward = -warmup; backward < total; backward++) {
        if (forward < total) {
            const json_t *entry = json_array_get(table, (size_t)forward++);
            assert_int_equal(actions[at].kind, MT_ACTION_FORWARD);
            assert_int_equal(actions[at].micro_batch, json_integer_value(json_array_get(entry, 0)));
            assert_int_equal(actions[at++].chunk, json_integer_value(json_array_get(entry, 1)));
        }
        if (backward < 0) continue;
        const json_t *entry = json_array_get(table, (size_t)backward);
        assert_int_equal(actions[at].kind, MT_ACTION_BACKWARD);
        assert_int_equal(actions[at].micro_batch, json_integer_value(json_array_get(entry, 0)));
        assert_int_equal(actions[at++].chunk, schedule->vp - 1 - json_integer_value(json_array_get(entry, 1)));
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

/* Counts of actions by virtual stage and micro-batch, and the messages in flight. */
typedef struct progress {
    int done[4][MAX_PP * MAX_VP][MAX_MICRO_BATCHES]; // by mt_action_kind
    int sent[2][MAX_PP * MAX_VP][MAX_MICRO_BATCHES]; // by direction and the virtual stage that sent
    int received[2][MAX_PP * MAX_VP][MAX_MICRO_BATCHES];
} progress;

/* Runs one action and asserts its preconditions; false for a receive whose message is not sent yet. A virtual stage and
 * a micro-batch identify a message. */
static bool take_action(progress *p, const mt_schedule *s, int64_t rank, const mt_action *action) {
    int64_t stage = action->chunk * s->pp + rank, last = s->pp * s->vp - 1, m = action->micro_batch;
    assert_true(action->chunk >= 0 && action->chunk < s->vp && m >= 0 && m < s->micro_batches);
    if (action->kind > MT_ACTION_BACKWARD_WEIGHT) {
        bool backward = action->kind == MT_ACTION_SEND_BACKWARD || action->kind == MT_ACTION_RECV_BACKWARD;
        bool sends = action->kind == MT_ACTION_SEND_FORWARD || action->kind == MT_ACTION_SEND_BACKWARD;
        int64_t other = stage + (sends != backward ? 1 : -1); // the virtual stage at the other end
        assert_true(other >= 0 && other <= last);
        assert_int_equal(action->peer, other % s->pp);
        assert_int_not_equal(action->peer, rank);
        if (sends) {
            int made = backward ? p->done[MT_ACTION_BACKWARD][stage][m] + p->done[MT_ACTION_BACKWARD_INPUT][stage][m]
                                : p->done[MT_ACTION_FORWARD][stage][m];
            assert_int_equal(made, 1);
            assert_int_equal(p->sent[backward][stage][m]++, 0);
            return true;
        }
        if (!p->sent[backward][other][m]) return false;
        assert_int_equal(p->received[backward][stage][m]++, 0);
        return true;
    }
    assert_int_equal(action->peer, -1);
    assert_int_equal(p->done[action->kind][stage][m]++, 0);
    if (action->kind == MT_ACTION_FORWARD && stage > 0) assert_int_equal(p->received[0][stage][m], 1);
    if (action->kind == MT_ACTION_BACKWARD || action->kind == MT_ACTION_BACKWARD_INPUT) {
        assert_int_equal(p->done[MT_ACTION_FORWARD][stage][m], 1);
        if (stage < last) assert_int_equal(p->received[1][stage][m], 1);
    }
    if (action->kind == MT_ACTION_BACKWARD_WEIGHT) assert_int_equal(p->done[MT_ACTION_BACKWARD_INPUT][stage][m], 1);
    return true;
}

/* Every stage ran the actions of the schedule once on every micro-batch. */
static void assert_complete(const progress *p, const mt_schedule *s) {
    bool trains = s->kind != MT_SCHEDULE_FORWARD_ONLY, splits = s->kind == MT_SCHEDULE_ZB_H1;
    int64_t last = s->pp * s->vp - 1;
    for (int64_t stage = 0; stage <= last; stage++)
        for (int64_t m = 0; m < s->micro_batches; m++) {
            assert_int_equal(p->done[MT_ACTION_FORWARD][stage][m], 1);
            assert_int_equal(p->done[MT_ACTION_BACKWARD][stage][m], trains && !splits);
            assert_int_equal(p->done[MT_ACTION_BACKWARD_INPUT][stage][m], splits);
            assert_int_equal(p->done[MT_ACTION_BACKWARD_WEIGHT][stage][m], splits);
            assert_int_equal(p->sent[0][stage][m], stage < last);
            assert_int_equal(p->received[0][stage][m], stage > 0);
            assert_int_equal(p->sent[1][stage][m], trains && stage > 0);
            assert_int_equal(p->received[1][stage][m], trains && stage < last);
        }
}

static void check_dependencies(const mt_schedule *s) {
    static mt_action actions[MAX_PP][MAX_ACTIONS];
    static progress p;
    int64_t count[MAX_PP], next[MAX_PP] = {0}, left = 0;
    memset(&p, 0, sizeof p);
    for (int64_t r = 0; r < s->pp; r++) left += count[r] = mt_schedule_actions(actions[r], s, r);
    for (bool moves = true; moves;) {
        moves = false;
        for (int64_t r = 0; r < s->pp; r++)
            for (; next[r] < count[r] && take_action(&p, s, r, &actions[r][next[r]]); left--) next[r]++, moves = true;
    }
    if (left > 0) describe(s, "the ranks wait for one another for ever");
    assert_complete(&p, s);
}

static void every_stage_computes_every_micro_batch_once_from_what_it_was_sent(void **state) {
    (void)state;
    for_every_schedule(check_dependencies);
}

/* The messages of one rank in one direction, by the virtual stage that sends and the micro-batch. */
static int64_t messages(int64_t *names, const mt_schedule *s, int64_t rank, mt_action_kind kind, int64_t to_sender) {
    mt_action actions[MAX_ACTIONS];
    int64_t count = mt_schedule_actions(actions, s, rank), kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (actions[i].kind == kind)
            names[kept++] = (actions[i].chunk * s->pp + rank + to_sender) * MAX_MICRO_BATCHES + actions[i].micro_batch;
    return kept;
}

static void check_message_order(const mt_schedule *s) {
    int64_t sent[MAX_ACTIONS], received[MAX_ACTIONS];
    for (int64_t a = 0; a < s->pp && s->pp > 1; a++)
        for (int backward = 0; backward < 2; backward++) {
            int64_t b = (a + (backward ? s->pp - 1 : 1)) % s->pp;
            int64_t count = messages(sent, s, a, backward ? MT_ACTION_SEND_BACKWARD : MT_ACTION_SEND_FORWARD, 0);
            int64_t other = messages(received, s, b, backward ? MT_ACTION_RECV_BACKWARD : MT_ACTION_RECV_FORWARD,
                                     backward ? 1 : -1);
            if (count != other || memcmp(sent, received, (size_t)count * sizeof *sent) != 0)
                describe(s, "receives are in another order than sends");
        }
}

static void messages_of_a_direction_are_received_in_the_order_of_their_sends(void **state) {
    (void)state;
    for_every_schedule(check_message_order);
}

static const mt_action_costs units = {1, 1, 1, 0};

/* With unlimited messages in flight, with the fewest that the contract allows, and with slow messages. */
static void check_room(const mt_schedule *s) {
    const mt_action_costs slow = {1, 1, 1, 7};
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

/* Peak number of micro-batches between forward and backward of the input. */
static int64_t in_backward_of_input(const mt_timeline *t, int64_t rank) {
    int64_t held = 0, most = 0;
    for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
        held += t->actions[i].kind == MT_ACTION_FORWARD;
        held -= t->actions[i].kind == MT_ACTION_BACKWARD || t->actions[i].kind == MT_ACTION_BACKWARD_INPUT;
        if (held > most) most = held;
    }
    return most;
}

/* Live micro-batches: 1F1B pp - rank; interleaved the warm-up and one; ZB-H1 pp on every rank, as 1F1B on its first, of
 * which pp - rank wait for the gradient of their input. */
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

static double span_of(const mt_schedule *s, const mt_action_costs *costs) {
    mt_timeline t;
    assert_int_equal(mt_timeline_create(&t, s, costs, 0), 0);
    double span = t.span, step = costs->forward + costs->backward_input + costs->backward_weight;
    if (s->kind == MT_SCHEDULE_FORWARD_ONLY) step = costs->forward;
    double work = (double)(s->micro_batches * s->vp) * step;
    assert_true(fabs(t.bubble - (span - work) / work) < 1e-12);
    mt_timeline_free(&t);
    return span;
}

/* Forward, gradient of the input and gradient of the weights take one unit each. ZB-H1's bubble is a third of 1F1B's.
 * With fewer micro-batches than fill the pipeline: a forward and a backward through all ranks, then two units each on
 * the first rank. The formulas of the interleaved schedule hold for whole groups of pp. */
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
    const mt_action_costs costs = {2, 2, 1, 0}, part = {1, 1, 0.5, 0}, sends = {1, 1, 1, 0.25};
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
    mt_action actions[8];
    assert_int_equal(mt_schedule_actions(actions, &schedule, 0), 8);
    for (int64_t i = 0; i < 8; i++) {
        assert_int_equal(actions[i].kind, i % 2 ? MT_ACTION_BACKWARD : MT_ACTION_FORWARD);
        assert_int_equal(actions[i].micro_batch, i / 2);
        assert_int_equal(actions[i].peer, -1);
    }
}

/* ---- layouts */

/* Options of a pipeline without a model, finished for one rank, which is enough for --print-schedule. */
static int open_pipeline(mt_run_options *options, const char *line, mt_error *error) {
    char text[512], *words[64] = {"train", "--print-schedule"};
    int count = 2;
    snprintf(text, sizeof text, "%s", line);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    int status = mt_options_parse(options, MT_PROGRAM_TRAIN, count, words, error);
    return status ? status : mt_options_finish(options, MT_PROGRAM_TRAIN, 1, error);
}

/* A layout as text: for each stage, in the order of layers, E, the numbers of its layers, L. */
static void assert_layout(const char *line, const char *expected) {
    mt_run_options options;
    mt_error error;
    mt_stage stages[64];
    char text[512] = "", *end = text;
    if (open_pipeline(&options, line, &error)) fail_msg("%s: %s", line, error.text);
    int64_t count = options.stack.pipeline_model_parallel_size * options.stack.num_virtual_stages_per_pipeline_rank;
    mt_pipeline_layout_build(stages, &options.stack);
    for (int64_t i = 0; i < count; i++) {
        end += sprintf(end, "%s%s", i ? "|" : "", stages[i].embedding ? "E" : "");
        for (int64_t l = 0; l < stages[i].num_layers; l++)
            end += sprintf(end, "%s%lld", l ? "," : "", (long long)(stages[i].first_layer + l));
        end += sprintf(end, "%s", stages[i].loss ? "L" : "");
    }
    if (strcmp(text, expected) != 0) fail_msg("%s\n  gave %s\n  not %s", line, text, expected);
    mt_options_free(&options);
}

static void assert_refused(const char *line, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    if (open_pipeline(&options, line, &error) == 0) fail_msg("%s was accepted", line);
    if (!strstr(error.text, expected) || strchr(error.text, '\n'))
        fail_msg("%s\n  gave: %s\n  not: %s", line, error.text, expected);
    mt_options_free(&options);
}

static void layouts_share_layers_out(void **state) {
    (void)state;
    assert_layout("--num-layers 4 --pipeline-model-parallel-size 2", "E0,1|2,3L");
    // stage v of rank p holds layers from v L / vp + p L / pp / vp
    assert_layout("--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                  "--global-batch-size 2",
                  "E0,1|2,3|4,5|6,7L");
    assert_layout("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
                  "--global-batch-size 2",
                  "E0|1|2|3|4|5|6|7L");
    assert_layout("--num-layers 7 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1",
                  "E0|1,2,3|4,5,6L");
    assert_layout("--num-layers 7 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1 "
                  "--decoder-last-pipeline-num-layers 2",
                  "E0|1,2,3,4|5,6L");
    assert_layout("--num-layers 12 --pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 4 "
                  "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3",
                  "E0,1|2,3|4,5|6,7|8,9|10,11L");
    assert_layout("--num-layers 10 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 4 "
                  "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
                  "E0,1,2|3,4|5,6,7|8,9L");
    assert_layout("--num-layers 6 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
                  "--account-for-loss-in-pipeline-split",
                  "E0,1,2|3,4,5L");
    assert_layout("--num-layers 5 --pipeline-model-parallel-size 3 --account-for-loss-in-pipeline-split",
                  "E0,1|2,3|4L");
    assert_layout("--num-layers 2 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
                  "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 1 "
                  "--global-batch-size 2",
                  "E|0|1|L");
    assert_layout("--num-layers 4 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E||t*4|L",
                  "E||0,1,2,3|L");
    assert_layout("--num-layers 61 --pipeline-model-parallel-size 31 --pipeline-model-parallel-layout "
                  "Et*3|(tt|)*29,L",
                  "E0,1,2|3,4|5,6|7,8|9,10|11,12|13,14|15,16|17,18|19,20|21,22|23,24|25,26|27,28|29,30|31,32|33,34|"
                  "35,36|37,38|39,40|41,42|43,44|45,46|47,48|49,50|51,52|53,54|55,56|57,58|59,60|L");
}

/* Number of `name` in a stage of Megatron's layout. */
static int64_t entries(const json_t *stage, const char *name) {
    int64_t count = 0;
    for (size_t i = 0; i < json_array_size(stage); i++)
        count += strcmp(json_string_value(json_array_get(stage, i)), name) == 0;
    return count;
}

static void layout_strings_equal_megatron(void **state) {
    (void)state;
    json_t *cases = read_golden("tests/golden/megatron/pipeline_layouts.json"), *item;
    size_t index;
    int64_t built = 0, refused = 0;
    json_array_foreach(cases, index, item) {
        const json_t *expected = json_object_get(item, "stages"); // [pp][vp]
        const char *layout = json_string_value(json_object_get(item, "layout"));
        int64_t pp = number(item, "pp"), vp = number(item, "vpp"), layers = 0;
        char line[300];
        mt_run_options options;
        mt_error error;
        mt_stage stages[64];
        for (int64_t i = 0; i < pp * vp; i++)
            layers += entries(json_array_get(json_array_get(expected, (size_t)(i % pp)), (size_t)(i / pp)), "decoder");
        snprintf(line, sizeof line,
                 "--num-layers %d --pipeline-model-parallel-size %d --global-batch-size 8 "
                 "--pipeline-model-parallel-layout %s",
                 expected ? (int)layers : 9, (int)pp, layout);
        if (!expected) {
            assert_refused(line, "number of stages 5 must be a multiple of --pipeline-model-parallel-size 4");
            refused++;
            continue;
        }
        if (open_pipeline(&options, line, &error)) fail_msg("%s: %s", line, error.text);
        assert_int_equal(options.stack.num_virtual_stages_per_pipeline_rank, vp);
        mt_pipeline_layout_build(stages, &options.stack);
        for (int64_t i = 0; i < pp * vp; i++) {
            const json_t *stage = json_array_get(json_array_get(expected, (size_t)(i % pp)), (size_t)(i / pp));
            assert_int_equal(stages[i].num_layers, entries(stage, "decoder"));
            assert_int_equal(stages[i].embedding, entries(stage, "embedding"));
            assert_int_equal(stages[i].loss, entries(stage, "loss"));
        }
        mt_options_free(&options);
        built++;
    }
    assert_int_equal(built, 4);
    assert_int_equal(refused, 1);
    json_decref(cases);
}

#define TWO "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "

#define MTP "--mtp-num-layers 1 --normalization RMSNorm --position-embedding-type rope "

static void layouts_that_cannot_be_are_refused(void **state) {
    (void)state;
    assert_refused("--num-layers 5 --pipeline-model-parallel-size 2", "--num-layers, 5, must be a multiple of 2");
    assert_refused("--num-layers 6 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
                   "--num-layers, 6, must be a multiple of 2 pipeline ranks times 2 virtual stages");
    assert_refused("--num-layers 6 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
                   "--num-layers 6 must be a multiple of");
    assert_refused("--num-layers 6 --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
                   "--num-layers plus the layers that --account-for-* adds, 7, must be");
    assert_refused("--num-layers 6 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1",
                   "the layers of the other ranks, 5, must be");
    assert_refused("--num-layers 6 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
                   "--decoder-last-pipeline-num-layers 4",
                   "5 together, do not fit --num-layers 6 on 2 ranks");
    assert_refused("--num-layers 6 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 7",
                   "do not fit");
    assert_refused(TWO "Ett|ttmL", "must have --mtp-num-layers 0 times m");
    assert_refused(MTP TWO "Ett|ttL", "must have --mtp-num-layers 1 times m, right before L and in its stage");
    assert_refused(MTP TWO "Ett|ttmmL", "--mtp-num-layers 1 times m");
    assert_refused(MTP TWO "Ettm|ttL", "--mtp-num-layers 1 times m");
    assert_refused(MTP TWO "Ett|tmtL", "--mtp-num-layers 1 times m");
    assert_refused(MTP "--num-layers 4 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|ttm|L",
                   "--mtp-num-layers 1 times m");
    assert_refused(TWO "Ett|ttx", "not understood at 'x'");
    assert_refused(TWO "Ett|t*0L", "repeats too often, or not at all at '*0L'");
    assert_refused(TWO "Et|t*9999999999999999999L", "repeats too often");
    assert_refused(TWO "E(t*99999)*99999|L", "repeats too often");
    assert_refused(TWO "E(tt|ttL", "a bracket is not closed");
    assert_refused(TWO "E(tt)|ttL", "not understood at ')|ttL'");
    assert_refused(TWO "tt|ttL", "must begin with E and end with L");
    assert_refused(TWO "Ett|tt", "must begin with E and end with L");
    assert_refused(TWO "Ett|EttL", "must begin with E and end with L, once each");
    assert_refused(TWO "Ett|tL", "has 3 layers, but --num-layers is 4");
    assert_refused(TWO "Ett|t|tL", "number of stages 3 must be a multiple of");
    assert_refused(TWO "Ett|ttL --account-for-loss-in-pipeline-split", "exclude each other");
    assert_refused(TWO "Ett|ttL --decoder-first-pipeline-num-layers 2", "exclude each other");
    assert_refused("--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
                   "--account-for-embedding-in-pipeline-split",
                   "exclude each other");
}

#define FOUR "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "

static void schedules_that_cannot_be_are_refused(void **state) {
    (void)state;
    assert_refused("--num-layers 8 --num-virtual-stages-per-pipeline-rank 2",
                   "--num-virtual-stages-per-pipeline-rank needs --pipeline-model-parallel-size");
    assert_refused(FOUR "--global-batch-size 3", "is 3 micro-batches, fewer than the 4 of");
    assert_refused(FOUR "--global-batch-size 6", "groups of 4 leave 2 over, fewer than --pipeline-model-parallel-size");
    assert_refused(FOUR "--global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 3",
                   "-virtual-pipeline-stage 3 must be at least --pipeline-model-parallel-size 4");
    assert_refused(FOUR "--global-batch-size 256 --microbatch-group-size-per-virtual-pipeline-stage 131",
                   "-virtual-pipeline-stage 131 must be less than --pipeline-model-parallel-size 4 + 127");
    assert_refused(FOUR "--global-batch-size 8 --pipeline-schedule zb-h1", "zb-h1 has one stage per rank");
    assert_refused(FOUR "--global-batch-size 8 --pipeline-schedule 1f1b", "1f1b or zb-h1 has one stage per rank");
    assert_refused("--num-layers 8 --pipeline-schedule zb-h1", "zb-h1 needs --pipeline-model-parallel-size");
    assert_refused("--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved",
                   "interleaved needs several virtual stages");
    assert_refused("--num-layers 8 --pipeline-model-parallel-size 2 "
                   "--microbatch-group-size-per-virtual-pipeline-stage 2",
                   "needs several virtual stages");
    assert_refused("--pipeline-model-parallel-size 2", "--num-layers is missing");
    assert_refused(FOUR "--train-samples 100 --global-batch-size 12 --rampup-batch-size 4 2 50",
                   "a batch of 6 sequences is 6 micro-batches; groups of 4 leave 2 over");
    mt_run_options options;
    mt_error error;
    assert_int_equal(open_pipeline(&options, FOUR "--global-batch-size 16", &error), 0);
    assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 6, &error), -1);
    assert_non_null(strstr(error.text, "the number of ranks 6 must be a multiple of"));
    assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 8, &error), 0);
    assert_int_equal(options.stack.data_parallel_size, 2);
    mt_schedule schedule = mt_schedule_of(&options.stack, 8);
    assert_int_equal(schedule.kind, MT_SCHEDULE_INTERLEAVED);
    assert_true(schedule.pp == 4 && schedule.vp == 2 && schedule.micro_batches == 8 && schedule.group == 4);
    assert_int_equal(options.stack.pipeline_schedule, MT_SCHEDULE_INTERLEAVED);
    mt_options_free(&options);
}

/* ---- pictures */

static void schedule_prints_as_drawn_by_hand(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    char text[4096] = "";
    const char *pipe = at("pipe");
    assert_int_equal(
        open_pipeline(&options, "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 2", &error), 0);
    FILE *file = tmpfile();
    assert_int_equal(mt_schedule_print(&options, file, &error), 0);
    rewind(file);
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    assert_string_equal(text, "1F1B schedule: 2 ranks of 1 stage, 2 micro-batches\n\n"
                              "rank 0: embedding layers 0-1\n"
                              "rank 1: layers 2-3 loss\n\n"
                              "rank 0  0 1 . . [0 ]. [1 ]  peak 2\n"
                              "rank 1  . 0 [0 ]1 [1 ]. .   peak 1\n\n"
                              "3 is a forward of micro-batch 3, [3 ] its backward; forward = 1 unit, backward = 2.\n"
                              "peak: live micro-batches. Bubble: 3 of 9 units, 50.0% of the work.\n");
    free(options.print_schedule);
    options.print_schedule = mt_strdup("/nonexistent/schedule.svg");
    file = tmpfile();
    assert_int_equal(mt_schedule_print(&options, file, &error), -1);
    assert_non_null(strstr(error.text, "/nonexistent/schedule.svg: cannot be written: No such"));
    fclose(file);
    free(options.print_schedule);
    options.print_schedule = mt_strdup(pipe);
    file = tmpfile();
    assert_int_equal(mkfifo(pipe, 0600), 0);
    int reader = open(pipe, O_RDONLY | O_NONBLOCK); // a pipe is written to, not replaced
    assert_int_equal(mt_schedule_print(&options, file, &error), 0);
    assert_true(read(reader, text, 5) == 5 && memcmp(text, "<svg ", 5) == 0);
    close(reader), fclose(file);
    options.stack.global_batch_size = 1 << 30;
    assert_int_equal(mt_schedule_print(&options, stdout, &error), -1);
    assert_non_null(strstr(error.text, "--print-schedule draws at most a million forwards"));
    mt_options_free(&options);
}

/* --print-schedule FILE.svg: a complete SVG with a box for every forward and backward. */
static void schedule_is_drawn_into_a_file(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    char text[16384] = "";
    const char *path = at("schedule.svg");
    int boxes = 0;
    assert_int_equal(open_pipeline(&options,
                                   "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 3 "
                                   "--pipeline-schedule zb-h1",
                                   &error),
                     0);
    free(options.print_schedule);
    options.print_schedule = mt_strdup(path);
    FILE *sink = tmpfile(), *svg;
    assert_int_equal(mt_schedule_print(&options, sink, &error), 0);
    fclose(sink);
    svg = fopen(path, "r");
    assert_non_null(svg);
    assert_true(fread(text, 1, sizeof text - 1, svg) > 0);
    fclose(svg);
    assert_true(strncmp(text, "<svg ", 5) == 0 && strcmp(text + strlen(text) - 7, "</svg>\n") == 0);
    for (const char *box = text; (box = strstr(box, "fill-opacity")); box++) boxes++;
    assert_int_equal(boxes, 2 * 3 * 3); // ranks, micro-batches; forward and two parts of a backward
    mt_options_free(&options);
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
        cmocka_unit_test(layouts_share_layers_out),
        cmocka_unit_test(layout_strings_equal_megatron),
        cmocka_unit_test(layouts_that_cannot_be_are_refused),
        cmocka_unit_test(schedules_that_cannot_be_are_refused),
        cmocka_unit_test_setup_teardown(schedule_prints_as_drawn_by_hand, make_root, remove_root),
        cmocka_unit_test_setup_teardown(schedule_is_drawn_into_a_file, make_root, remove_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
