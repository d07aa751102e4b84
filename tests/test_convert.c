/* infer --convert: weights go from one format into another and back without a change, and memory holds about one tensor
 * of them, however many there are. */
#include "../data/base/file.h"
#include "../data/checkpoint/adapter_merge.h"
#include "../data/checkpoint/convert.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"
#include "../data/options/option_table.h"
#include "folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* The largest tensor, in fp32: of the MLP. All of them: over LAYERS times 4 of it. */
enum { LAYERS = 12, HIDDEN = 512, FFN = 4096, LARGEST = HIDDEN * FFN * 4 };

static int fill_random(void *context, const mt_saved_tensor *tensor, void *values, mt_error *error) {
    uint32_t *state = context;
    (void)error;
    for (int64_t i = 0; i < tensor->bytes / 4; i++) {
        *state = *state * 1664525u + 1013904223u;
        ((float *)values)[i] = (float)(*state >> 8) * 0x1p-26F - 0.125F;
    }
    return 0;
}

/* A Hugging Face folder of a model of over 300 MB. */
static void make_model(const char *folder) {
    char *words[] = {"train",
                     "--num-layers",
                     "12",
                     "--hidden-size",
                     "512",
                     "--ffn-hidden-size",
                     "4096",
                     "--num-attention-heads",
                     "8",
                     "--group-query-attention",
                     "--num-query-groups",
                     "4",
                     "--max-position-embeddings",
                     "64",
                     "--vocab-size",
                     "1000",
                     "--normalization",
                     "RMSNorm",
                     "--swiglu",
                     "--disable-bias-linear",
                     "--untie-embeddings-and-output-weights",
                     "--position-embedding-type",
                     "rope",
                     "--seq-length",
                     "64",
                     "--mock-data",
                     "--train-iters",
                     "1",
                     "--lr",
                     "1e-3"};
    mt_run_options options;
    mt_error error;
    mt_saved_set set;
    mt_checksums sums = {0};
    mt_param *rows;
    uint32_t state = 7;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, sizeof words / sizeof *words, words, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        fail_msg("%s", error.text);
    int64_t count = mt_params_build(&rows, &options.stack, NULL);
    mt_saved_plan_weights(&set, rows, count, &options, MT_F32, INT64_MAX, NULL);
    assert_true(set.bytes > (int64_t)LAYERS * 3 * LARGEST);
    if (mt_folder_create(folder, NULL, &error) != 0 ||
        mt_saved_write(&set, &options, MT_F32, folder, fill_random, &state, &sums, &error) != 0 ||
        mt_model_files_write(&options, folder, NULL, NULL, &error) != 0)
        fail_msg("%s", error.text);
    mt_checksums_free(&sums);
    mt_saved_free(&set);
    free(rows);
    mt_options_free(&options);
}

/* The peak memory, in bytes, of a process that converts. */
static int64_t convert(const char *from, const char *to, const char *format) {
    char *words[] = {"infer", "--load", (char *)from, "--convert", (char *)to, "--ckpt-format", (char *)format};
    int status = -1;
    struct rusage usage;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        mt_run_options options;
        mt_error error;
        if (mt_options_parse(&options, MT_PROGRAM_INFER, sizeof words / sizeof *words, words, &error) != 0 ||
            mt_options_finish(&options, MT_PROGRAM_INFER, 1, &error) != 0 ||
            mt_checkpoint_convert(&options, NULL, &error) != 0) {
            fprintf(stderr, "%s\n", error.text);
            _exit(1);
        }
        _exit(0);
    }
    assert_true(child > 0 && wait4(child, &status, 0, &usage) == child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return (int64_t)usage.ru_maxrss * 1024;
}

static void assert_same_file(const char *a, const char *b) {
    char command[1024];
    snprintf(command, sizeof command, "cmp '%s' '%s'", a, b);
    assert_int_equal(system(command), 0);
}

static void weights_return_unchanged_and_memory_holds_about_one_tensor(void **state) {
    (void)state;
    char big[300], dist[300], back[300], file[400], again[400];
    snprintf(big, sizeof big, "%s", at("big"));
    snprintf(dist, sizeof dist, "%s", at("dist"));
    snprintf(back, sizeof back, "%s", at("back"));
    int64_t least = convert("tests/golden/megatron_dist/dense", at("small"), "huggingface");
    make_model(big);
    int64_t there = convert(big, dist, "torch_dist"), home = convert(dist, back, "huggingface");
    snprintf(file, sizeof file, "%s/model.safetensors", big);
    snprintf(again, sizeof again, "%s/model.safetensors", back);
    assert_same_file(file, again);
#ifndef __SANITIZE_ADDRESS__ // which keeps freed memory
    // a tensor to write, the pages that it is made of, and as much again that the C library and the kernel may keep
    if (there - least > 4 * (int64_t)LARGEST || home - least > 4 * (int64_t)LARGEST)
        fail_msg("%lld and %lld bytes over %lld, with a largest tensor of %d", (long long)(there - least),
                 (long long)(home - least), (long long)least, LARGEST);
#else
    assert_true(there > 0 && home > 0 && least > 0);
#endif
}

static void a_folder_in_use_is_refused_and_stays(void **state) {
    (void)state;
    char *words[] = {"infer", "--load", "tests/golden/megatron_dist/dense", "--convert", NULL};
    mt_run_options options;
    mt_error error;
    assert_int_equal(mt_folder_create(at("used"), NULL, &error), 0);
    char *note = mt_strdup(at("used/note"));
    assert_int_equal(mt_file_write(note, "x", 1, NULL, &error), 0);
    words[4] = mt_strdup(at("used"));
    if (mt_options_parse(&options, MT_PROGRAM_INFER, 5, words, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_INFER, 1, &error) != 0)
        fail_msg("%s", error.text);
    assert_int_equal(mt_checkpoint_convert(&options, NULL, &error), -1);
    assert_non_null(strstr(error.text, "holds note; name an empty folder"));
    assert_int_equal(access(note, F_OK), 0);
    free(note), free(words[4]);
    mt_options_free(&options);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_return_unchanged_and_memory_holds_about_one_tensor),
        cmocka_unit_test(a_folder_in_use_is_refused_and_stays),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
