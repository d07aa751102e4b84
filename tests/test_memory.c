/* test_memory.c: the memory plan. The logits share memory with scratch that is unused while they exist. And the memory
 * that the machine and its control groups leave. */
#include "../data/file.h"
#include "../data/host_memory.h"
#include "../data/options.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TOKENS = 256, HIDDEN = 64, FFN = 256 };

/* KiB of activations in the printed plan for training a model with this vocabulary size. */
static double planned_activations(const char *vocab_size) {
    char *arguments[] = {"train",
                         "--num-layers",
                         "2",
                         "--hidden-size",
                         "64",
                         "--ffn-hidden-size",
                         "256",
                         "--num-attention-heads",
                         "4",
                         "--seq-length",
                         "256",
                         "--vocab-size",
                         (char *)vocab_size,
                         "--micro-batch-size",
                         "1",
                         "--global-batch-size",
                         "1",
                         "--make-vocab-size-divisible-by",
                         "16",
                         "--train-iters",
                         "1",
                         "--lr",
                         "1e-3",
                         "--mock-data"};
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .train = true};
    mt_options options;
    mt_error error;
    mt_model *model = NULL;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, sizeof arguments / sizeof *arguments, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0 ||
        mt_model_create(&model, &options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    char *text;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    mt_model_print_plan(model, file);
    fclose(file);
    const char *row = strstr(text, "activations");
    double mebibytes = 0;
    assert_non_null(row);
    assert_int_equal(sscanf(row, "activations %lf", &mebibytes), 1);
    free(text);
    mt_model_destroy(model);
    mt_options_free(&options);
    return 1024 * mebibytes;
}

static void logits_add_memory_only_beyond_the_size_of_the_scratch_they_share(void **state) {
    (void)state;
    const double scratch_channels = HIDDEN + FFN + FFN + 4; // per token: hidden, wide, active, row_dot
    double small = planned_activations("16"), fitting = planned_activations("560");
    double large = planned_activations("4096"), larger = planned_activations("8192");
    assert_true(small == fitting);
    assert_true(fabs(large - small - TOKENS * (4096 - scratch_channels) * 4 / 1024) < 110); // printed to 0.1 MiB
    assert_true(fabs(larger - large - TOKENS * 4096.0 * 4 / 1024) < 110);
}

/* Bytes of a Llama of 4 layers with further options. */
static int64_t llama_bytes(const char *words) {
    char line[600], *arguments[64];
    int count = 0;
    snprintf(line, sizeof line,
             "train --num-layers 4 --hidden-size %d --ffn-hidden-size %d --num-attention-heads 4 --swiglu "
             "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length %d "
             "--vocab-size 64 --make-vocab-size-divisible-by 16 --train-iters 1 --lr 1e-3 --mock-data %s",
             HIDDEN, FFN, TOKENS, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .train = true};
    mt_options options;
    mt_error error;
    mt_model *model = NULL;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0 ||
        mt_model_create(&model, &options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    int64_t bytes = mt_model_bytes(model);
    mt_model_destroy(model);
    mt_options_free(&options);
    return bytes;
}

/* A layer saves its input and `rest`; recomputed values of all units share the buffers of one unit. */
static void recomputation_keeps_what_its_units_keep(void **state) {
    (void)state;
    const int64_t column = TOKENS * 4, input = HIDDEN * column, norm = HIDDEN * column, heads = 4;
    const int64_t mlp = 3 * FFN * column, attention = (3 * HIDDEN + HIDDEN + heads) * column; // qkv, attended, lse
    const int64_t rest = 2 * (norm + column) + attention + HIDDEN * column + mlp;
    const struct {
        const char *words;
        int64_t saved;
    } cases[] = {
        {"--recompute-granularity full", 3 * rest},
        {"--recompute-granularity full --recompute-num-layers 2", 2 * rest + input},
        {"--recompute-granularity full --recompute-method block", 0}, // one layer, and the buffer is as large
        {"--recompute-granularity full --recompute-method block --recompute-num-layers 3", 2 * rest},
        {"--recompute-granularity selective", 0},
        {"--recompute-granularity selective --recompute-modules layernorm", 3 * 2 * norm},
        {"--recompute-granularity selective --recompute-modules mlp layernorm", 3 * (2 * norm + mlp)},
        {"--recompute-granularity selective --recompute-modules moe moe_act", 0},
    };
    int64_t all = llama_bytes("");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (all - llama_bytes(cases[i].words) != cases[i].saved)
            fail_msg("%s saves %lld bytes, not %lld", cases[i].words, (long long)(all - llama_bytes(cases[i].words)),
                     (long long)cases[i].saved);
}

/* Writes a file of a machine whose / is the test's folder. */
static void machine_has(const char *path, const char *text) {
    char folder[300];
    mt_error error;
    snprintf(folder, sizeof folder, "%s", at(path));
    *strrchr(folder, '/') = 0;
    if (mt_folder_create(folder, NULL, &error) != 0 ||
        mt_file_write(at(path), text, (int64_t)strlen(text), NULL, &error) != 0)
        fail_msg("%s", error.text);
}

#define KILO INT64_C(1024)

static void available_memory_is_what_the_machine_has_left(void **state) {
    (void)state;
    assert_int_equal(mt_host_memory_available(root), 0); // no /proc: unknown
    machine_has("proc/meminfo", "MemTotal:       24684092 kB\nMemFree:  100 kB\nMemAvailable:    5000 kB\n");
    assert_int_equal(mt_host_memory_available(root), 5000 * KILO);
    assert_true(mt_host_memory_available("") > 0);
}

/* The group's limit less its use; its page cache is not in use. Groups around it count, too. */
static void limits_of_control_groups_version_2_count(void **state) {
    (void)state;
    machine_has("proc/meminfo", "MemAvailable:    5000 kB\n");
    machine_has("proc/self/cgroup", "0::/job/step\n");
    machine_has("sys/fs/cgroup/job/step/memory.max", "max\n");
    machine_has("sys/fs/cgroup/job/step/memory.current", "512000\n");
    assert_int_equal(mt_host_memory_available(root), 5000 * KILO);
    machine_has("sys/fs/cgroup/job/memory.max", "2048000\n");
    machine_has("sys/fs/cgroup/job/memory.current", "1024000\n");
    assert_int_equal(mt_host_memory_available(root), 1024000);
    machine_has("sys/fs/cgroup/job/memory.stat", "anon 7\nfile 9\ninactive_file 300000\nactive_file 200000\n");
    assert_int_equal(mt_host_memory_available(root), 1524000);
    machine_has("sys/fs/cgroup/job/step/memory.max", "1000000\n");
    assert_int_equal(mt_host_memory_available(root), 488000);
    machine_has("sys/fs/cgroup/job/step/memory.current", "2000000\n"); // above its limit: nothing is left
    assert_in_range(mt_host_memory_available(root), 1, 1);
}

/* In a container the path of version 1 is the host's, and only the container's own group is mounted. */
static void limits_of_control_groups_version_1_count(void **state) {
    (void)state;
    machine_has("proc/meminfo", "MemAvailable:    5000 kB\n");
    machine_has("proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu:/docker/abc\n");
    machine_has("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    machine_has("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
    assert_int_equal(mt_host_memory_available(root), 5000 * KILO);
    machine_has("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
    assert_int_equal(mt_host_memory_available(root), 3999000);
    machine_has("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "3000000\n");
    machine_has("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "900000\n");
    machine_has("sys/fs/cgroup/memory/docker/abc/memory.stat", "inactive_file 1\ntotal_inactive_file 400000\n");
    assert_int_equal(mt_host_memory_available(root), 2500000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_add_memory_only_beyond_the_size_of_the_scratch_they_share),
        cmocka_unit_test(recomputation_keeps_what_its_units_keep),
        cmocka_unit_test_setup_teardown(available_memory_is_what_the_machine_has_left, make_root, remove_root),
        cmocka_unit_test_setup_teardown(limits_of_control_groups_version_2_count, make_root, remove_root),
        cmocka_unit_test_setup_teardown(limits_of_control_groups_version_1_count, make_root, remove_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
