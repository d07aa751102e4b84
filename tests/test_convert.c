/* infer --convert: weights go from one format into another and back without a change, and memory holds one tensor
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

/* Sizes of a model whose embedding, in fp32, is much larger than any other tensor, and of GPT-2's, whose two matrices
 * of the MLP are, and stored transposed. A layer of the first has 12 MiB. */
typedef struct sizes {
    int layers, hidden, ffn, vocab;
} sizes;

enum { MIB = 1 << 20, HIDDEN = 256, FFN = 4096, GPT2_HIDDEN = 128 };

static int fill_random(void *context, const mt_saved_tensor *tensor, void *values, mt_error *error) {
    uint32_t *state = context;
    (void)error;
    for (int64_t i = 0; i < tensor->bytes / 4; i++) {
        *state = *state * 1664525u + 1013904223u;
        ((float *)values)[i] = (float)(*state >> 8) * 0x1p-26F - 0.125F;
    }
    return 0;
}

static void end_with(const mt_error *error) {
    fprintf(stderr, "%s\n", error->text);
    _exit(1);
}

/* A Hugging Face folder of a model with random weights; ends the process, whose memory the caller does not inherit. */
static void make_model(const char *folder, bool gpt2, sizes n) {
    static const char llama[] = " --group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu "
                                "--disable-bias-linear --position-embedding-type rope";
    char line[700], *words[60], *rest = NULL;
    int count = 0;
    snprintf(line, sizeof line,
             "train --num-layers %d --hidden-size %d --ffn-hidden-size %d --vocab-size %d --num-attention-heads 8 "
             "--max-position-embeddings 64 --seq-length 64 --mock-data --train-iters 1 --lr 1e-3%s",
             n.layers, n.hidden, n.ffn, n.vocab, gpt2 ? "" : llama);
    for (char *word = strtok_r(line, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) words[count++] = word;
    mt_run_options options;
    mt_error error;
    mt_saved_set set;
    mt_checksums sums = {0};
    mt_param *rows;
    uint32_t state = 7;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, words, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        end_with(&error);
    int64_t num_rows = mt_params_build(&rows, &options.stack, NULL);
    mt_saved_plan_weights(&set, rows, num_rows, &options, MT_F32, INT64_MAX, NULL);
    if (mt_folder_create(folder, NULL, &error) != 0 ||
        mt_saved_write(&set, &options, MT_F32, folder, fill_random, &state, &sums, &error) != 0 ||
        mt_model_files_write(&options, folder, NULL, NULL, &error) != 0)
        end_with(&error);
    mt_checksums_free(&sums);
    mt_saved_free(&set);
    free(rows);
    mt_options_free(&options);
    _exit(0);
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

/* The peaks of both directions, the second 0 for a model that stays a Hugging Face folder. */
static void convert_both(const char *name, bool gpt2, sizes n, int64_t peaks[2]) {
    char from[300], there[320], back[320], file[400], again[400];
    snprintf(from, sizeof from, "%s", at(name));
    snprintf(there, sizeof there, "%s-there", from);
    snprintf(back, sizeof back, "%s-back", from);
    int status = -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) make_model(from, gpt2, n);
    assert_true(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    peaks[0] = convert(from, there, gpt2 ? "huggingface" : "torch_dist");
    peaks[1] = gpt2 ? 0 : convert(there, back, "huggingface");
    snprintf(file, sizeof file, "%s/model.safetensors", from);
    snprintf(again, sizeof again, "%s/model.safetensors", gpt2 ? there : back);
    assert_same_file(file, again);
    char command[1024];
    snprintf(command, sizeof command, "rm -rf '%s' '%s' '%s'", from, there, back);
    assert_int_equal(system(command), 0);
}

/* `more` is of a model whose largest tensor is `bytes` larger than that of `few`, and with 0 of one with more tensors.
 * A quarter of a tensor is for the rounding of the C library and of the kernel. */
static void expect_peaks(const int64_t few[2], const int64_t more[2], int64_t bytes, int64_t tensor) {
#ifndef __SANITIZE_ADDRESS__ // which keeps freed memory
    for (int i = 0; i < 2; i++)
        if (more[i] - few[i] > bytes + tensor / 4)
            fail_msg("%lld bytes over %lld, where a tensor is %lld larger", (long long)(more[i] - few[i]),
                     (long long)few[i], (long long)bytes);
#else
    (void)few, (void)more, (void)bytes, (void)tensor;
#endif
}

static void weights_return_unchanged_and_memory_holds_one_tensor(void **state) {
    (void)state;
    const int64_t tensor = 24 * MIB;
    const int vocab = (int)(tensor / HIDDEN / 4), ffn = (int)(tensor / GPT2_HIDDEN / 4);
    int64_t few[2], many[2], larger[2];
    convert_both("few", false, (sizes){1, HIDDEN, FFN, vocab}, few);
    convert_both("many", false, (sizes){6, HIDDEN, FFN, vocab}, many);
    convert_both("larger", false, (sizes){1, HIDDEN, FFN, 2 * vocab}, larger);
    expect_peaks(few, many, 0, tensor);
    expect_peaks(few, larger, tensor, tensor);
    convert_both("gpt2", true, (sizes){1, GPT2_HIDDEN, ffn, 128}, few);
    convert_both("gpt2-larger", true, (sizes){1, GPT2_HIDDEN, 2 * ffn, 128}, larger);
    expect_peaks(few, larger, tensor, tensor);
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
        cmocka_unit_test(weights_return_unchanged_and_memory_holds_one_tensor),
        cmocka_unit_test(a_folder_in_use_is_refused_and_stays),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
