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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_equal_megatron),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
