/* The search for layouts, called as a library: it ends after a number of simulations. */
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/plan/layouts.h"
#include "../data/plan/machine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Searches layouts of a small model with at most so many simulations. */
static void search(mt_layouts *layouts, int64_t most_attempts) {
    static char line[] = "train --bf16 --plan --gpus 8 --gpu h200 --num-layers 8 --hidden-size 256 --vocab-size 300 "
                         "--num-attention-heads 8 --seq-length 128 --global-batch-size 32 --mock-data";
    char copy[sizeof line], *words[64];
    int count = 0;
    mt_run_options options;
    mt_machine machine;
    mt_error error;
    memcpy(copy, line, sizeof line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, words, &error) != 0) fail_msg("%s", error.text);
    mt_options_assume_run(&options);
    if (mt_machine_read(&machine, "h200", &error) != 0) fail_msg("%s", error.text);
    machine.gpus_per_host = 8;
    if (mt_layouts_search(layouts, &options, &machine, most_attempts, &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&options);
}

/* A limit of seconds would give another list on another machine. */
static void a_search_ends_after_a_number_of_simulations(void **state) {
    (void)state;
    mt_layouts *whole = mt_malloc(2 * (int64_t)sizeof *whole), *part = whole + 1;
    search(whole, INT64_MAX);
    assert_int_equal(whole->skipped, 0);
    search(part, whole->attempts); // as many as it needs: none is left out
    assert_int_equal(part->skipped, 0);
    assert_int_equal(part->attempts, whole->attempts);
    for (int64_t i = 0; i < whole->count; i++) assert_string_equal(part->best[i].line, whole->best[i].line);
    mt_layouts_free(part);
    int64_t few = whole->attempts - 1;
    search(part, few);
    assert_int_equal(part->attempts, few);
    assert_true(part->skipped > 0);
    assert_int_equal(part->considered, whole->considered);
    mt_layouts_free(part);
    mt_layouts_free(whole);
    free(whole);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_search_ends_after_a_number_of_simulations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
