/* test_memory.c: the memory plan. The logits share memory with scratch that is unused while they exist. And the memory
 * that the machine and its control groups leave, the limit of --memory-limit, and lines about small GPUs. */
// Sections of megatron.c: §9b §15a §15b §3a §4
#include "../data/base/file.h"
#include "../data/base/host_memory.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/report.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { TOKENS = 256, HIDDEN = 64, FFN = 256 };

/* MiB of a row of the printed plan; 0: there is no such row. */
static double planned(const mt_model *model, const char *row) {
    char *text;
    size_t bytes;
    double mebibytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    mt_report_plan(model, file);
    fclose(file);
    const char *found = strstr(text, row);
    if (found) assert_int_equal(sscanf(found + strlen(row), "%lf", &mebibytes), 1);
    free(text);
    return mebibytes;
}

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
    mt_run_options options;
    mt_error error;
    mt_model *model = NULL;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, sizeof arguments / sizeof *arguments, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0 ||
        mt_model_create(&model, &options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
    double mebibytes = planned(model, "activations");
    assert_true(mebibytes > 0);
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

typedef struct llama {
    mt_run_options options;
    mt_model *model;
} llama;

/* A Llama of 4 layers with further options on a machine with so much memory (0: this one's); returns the status. */
static int llama_open(llama *l, const mt_ops *ops, const char *words, int64_t host_memory, mt_error *error) {
    char line[900], *arguments[80];
    int count = 0;
    snprintf(line, sizeof line,
             "train --num-layers 4 --hidden-size %d --ffn-hidden-size %d --num-attention-heads 4 --swiglu "
             "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length %d "
             "--vocab-size 64 --make-vocab-size-divisible-by 16 --train-iters 1 --lr 1e-3 --mock-data %s",
             HIDDEN, FFN, TOKENS, words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = TOKENS, .train = true};
    plan.host_memory = host_memory, l->model = NULL;
    if (mt_options_parse(&l->options, MT_PROGRAM_TRAIN, count, arguments, error) != 0 ||
        mt_options_finish(&l->options, MT_PROGRAM_TRAIN, 1, error) != 0)
        fail_msg("%s", error->text);
    return mt_model_create(&l->model, &l->options.stack, &mt_grid_of_one, ops, &plan, error);
}

static void llama_close(llama *l) {
    mt_model_destroy(l->model);
    mt_options_free(&l->options);
}

/* Its bytes; and the MiB of host memory in its plan, unless `host` is NULL. */
static int64_t llama_bytes(const char *words, double *host) {
    llama l;
    mt_error error;
    if (llama_open(&l, &mt_cpu_ops, words, 0, &error) != 0) fail_msg("%s", error.text);
    int64_t bytes = mt_model_bytes(l.model);
    if (host) *host = planned(l.model, "host memory");
    llama_close(&l);
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
    int64_t all = llama_bytes("", NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (all - llama_bytes(cases[i].words, NULL) != cases[i].saved)
            fail_msg("%s saves %lld bytes, not %lld", cases[i].words,
                     (long long)(all - llama_bytes(cases[i].words, NULL)), (long long)cases[i].saved);
}

/* The forward quantizes x of four products and saves x^T in one byte an element, with a scale. Then x of the norms and
 * of the activation lies in memory that all layers share. */
static void products_in_fp8_save_one_byte_an_element(void **state) {
    (void)state;
    const int64_t norm = HIDDEN * TOKENS * 4, active = FFN * TOKENS * 4, aligned_scale = 256;
    const int64_t transposed = (3 * HIDDEN + FFN) * TOKENS + 4 * aligned_scale;
    const char *words = "--fp8-format hybrid --fp8-recipe tensorwise", *kept = "--no-fp8-wgrad"; // x in fp32
    char line[100];
    snprintf(line, sizeof line, "%s %s", words, kept);
    assert_int_equal(llama_bytes(line, NULL) - llama_bytes(words, NULL), 3 * (2 * norm + active) - 4 * transposed);
}

/* Two buffers hold the offloaded values of two layers; the host those of the other two of four. */
static void offloading_keeps_two_layers_on_the_device(void **state) {
    (void)state;
    const int64_t column = TOKENS * 4, width = HIDDEN * column, heads = 4, mlp = 3 * FFN * column;
    const int64_t rest = 2 * (width + column) + (3 * HIDDEN + HIDDEN + heads) * column + width + mlp;
    const struct {
        const char *words;
        int64_t offloaded, recomputed; // bytes per layer; bytes
    } cases[] = {
        {"attn_norm", width, 0},
        {"qkv_linear", width, 0},
        {"core_attn", 3 * width + heads * column, 0},
        {"core_attn attn_proj", 4 * width + heads * column, 0},
        {"attn_norm,mlp_norm", 2 * width, 0},
        {"mlp", width + mlp, 0},
        {"expert_fc1 moe_act", 0, 0},
        {"attn_norm qkv_linear core_attn attn_proj mlp_norm mlp", 7 * width + heads * column + mlp + width, 0},
        {"attn_norm qkv_linear core_attn --recompute-granularity full", width, 3 * rest},
        {"mlp_norm mlp --recompute-granularity selective --recompute-modules layernorm", width + mlp, 6 * width},
    };
    int64_t all = llama_bytes("", NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[256];
        double host;
        snprintf(words, sizeof words, "--fine-grained-activation-offloading --offload-modules %s", cases[i].words);
        int64_t saved = all - llama_bytes(words, &host), offloaded = 2 * cases[i].offloaded;
        if (saved != offloaded + cases[i].recomputed || fabs(host * 1048576 - (double)offloaded) > 0.051 * 1048576)
            fail_msg("%s saves %lld bytes, not %lld, with %.1f MiB on the host", cases[i].words, (long long)saved,
                     (long long)(offloaded + cases[i].recomputed), host);
    }
}

/* Layers without attention: the operand of their last product is offloaded, their norms are recomputed. */
static void mixers_with_states_recompute_and_offload_by_module(void **state) {
    (void)state;
    const int64_t column = TOKENS * 4, norm = HIDDEN * column, inner = 4 * 16 * column;
#define HEADS "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16"
    static const char *const mixers[] = {
        "gated_delta_net " HEADS, "kda " HEADS,
        "mamba2 --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 8"};
#undef HEADS
    const struct {
        const char *words;
        int64_t saved;
    } cases[] = {
        {"--recompute-granularity selective --recompute-modules layernorm", 3 * 2 * norm},
        {"--recompute-granularity selective --recompute-modules mlp", 3 * 3 * FFN * column},
        {"--fine-grained-activation-offloading --offload-modules attn_norm", 2 * norm},
        {"--fine-grained-activation-offloading --offload-modules qkv_linear", 2 * norm},
        {"--fine-grained-activation-offloading --offload-modules core_attn attn_proj", 2 * inner},
        {"--fine-grained-activation-offloading --offload-modules core_attn attn_proj mlp_norm", 2 * (inner + norm)},
    };
    for (size_t k = 0; k < sizeof mixers / sizeof *mixers; k++) {
        char all[300], words[500];
        snprintf(all, sizeof all, "--linear-attention-freq [1,1,1,1] --experimental-attention-variant %s", mixers[k]);
        int64_t bytes = llama_bytes(all, NULL);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            snprintf(words, sizeof words, "%s %s", all, cases[i].words);
            int64_t saved = bytes - llama_bytes(words, NULL);
            if (saved != cases[i].saved)
                fail_msg("%s saves %lld bytes, not %lld", words, (long long)saved, (long long)cases[i].saved);
        }
    }
}

/* On the CPU, device and host are one memory. */
static void offloading_on_the_cpu_counts_in_one_memory(void **state) {
    (void)state;
    const char *words = "--fine-grained-activation-offloading --offload-modules attn_norm";
    int64_t needed = llama_bytes(words, NULL) + 2 * HIDDEN * TOKENS * 4;
    for (int lacking = 0; lacking < 2; lacking++) {
        llama l;
        mt_error error = {""};
        int status = llama_open(&l, &mt_cpu_ops, words, needed - lacking, &error);
        llama_close(&l);
        assert_int_equal(status, -lacking);
        if (lacking && !strstr(error.text, "the model needs 0.0 GiB of memory (")) fail_msg("%s", error.text);
    }
}

/* The CPU in place of a GPU: its own memory suffices, but the host's does not. */
static void offloading_beyond_the_memory_of_the_host_is_refused(void **state) {
    (void)state;
    const int64_t input = HIDDEN * TOKENS * 4;
    const char *const words[] = {"--fine-grained-activation-offloading --offload-modules attn_norm", ""};
    const struct {
        const char *words;
        int64_t host_memory;
        bool refused;
    } cases[] = {{words[0], 2 * input, false}, {words[0], 2 * input - 1, true}, {words[1], 1, false}};
    mt_ops ops = mt_cpu_ops;
    ops.on_device = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llama l;
        mt_error error = {""};
        int status = llama_open(&l, &ops, cases[i].words, cases[i].host_memory, &error);
        llama_close(&l);
        assert_int_equal(status, cases[i].refused ? -1 : 0);
        if (cases[i].refused &&
            strcmp(error.text, "offloading needs 0.0 GiB of host memory and the machine has 0.0 GiB available (ranks "
                               "on it: 1); offload less, or lower --micro-batch-size or --seq-length") != 0)
            fail_msg("%s", error.text);
    }
}

/* ---- the recipes for one GPU: planned in memory that is only reserved, on a backend that writes nothing there */

static int64_t gpu_bytes;

static int64_t gpu_available(void) {
    return gpu_bytes;
}

static int64_t gpu_workspace(int64_t T, int64_t C, int64_t H, int64_t D) {
    (void)C;
    return T * H * D * 4;
}

static void *reserve(int64_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

static void keep(void *memory) {
    (void)memory;
}

static void zero_nothing(void *memory, int64_t bytes, mt_stream *stream) {
    (void)memory, (void)bytes, (void)stream;
}

/* Plans a recipe on a GPU and a host with so much memory; returns the status. */
static int plan_recipe(const char *recipe, const char *fraction, int64_t host_memory, mt_error *error) {
    char path[100];
    snprintf(path, sizeof path, "data/recipes/%s.yaml", recipe);
    char *arguments[] = {"train", "--config", path, "--mock-data", "--optimizer-offload-fraction", (char *)fraction};
    int count = fraction ? 6 : 4;
    mt_run_options o;
    mt_model *model = NULL;
    mt_ops ops = mt_cpu_ops;
    ops.on_device = true, ops.memory_available = gpu_available, ops.workspace_bytes = gpu_workspace;
    ops.memory_alloc = ops.memory_alloc_host = reserve, ops.memory_free = ops.memory_free_host = keep;
    ops.memory_zero = zero_nothing;
    if (mt_options_parse(&o, MT_PROGRAM_TRAIN, count, arguments, error) != 0 ||
        mt_options_finish(&o, MT_PROGRAM_TRAIN, 1, error) != 0)
        fail_msg("%s", error->text);
    int64_t tokens = o.stack.micro_batch_size * o.stack.seq_length;
    mt_model_plan plan = {
        .max_tokens = tokens, .max_logits = tokens, .max_position = o.stack.seq_length, .train = true};
    plan.host_memory = host_memory;
    int status = mt_model_create(&model, &o.stack, &mt_grid_of_one, &ops, &plan, error);
    mt_model_destroy(model);
    mt_options_free(&o);
    return status;
}

static void recipes_fit_their_gpu_and_host(void **state) {
    (void)state;
    const int64_t gib = 1 << 30;
    const struct {
        const char *name, *less;
        int64_t gpu, host; // GiB that a process may allocate
    } recipes[] = {{"llama3-8b-one-h100", "0.5", 76, 110}, {"llama3-8b-one-h200", "0.1", 137, 110}};
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++) {
        mt_error error = {""};
        gpu_bytes = recipes[i].gpu * gib;
        if (plan_recipe(recipes[i].name, NULL, recipes[i].host * gib, &error) != 0) fail_msg("%s", error.text);
        assert_true(plan_recipe(recipes[i].name, NULL, 30 * gib, &error) != 0);
        assert_non_null(strstr(error.text, "GiB available (ranks on it: 1); lower --optimizer-offload-fraction"));
        assert_true(plan_recipe(recipes[i].name, recipes[i].less, recipes[i].host * gib, &error) != 0);
        assert_non_null(strstr(error.text, ") and the GPU has"));
    }
}

/* ---- a limit, and GPUs of a desk */

static void the_cpu_counts_blocks_within_its_limit(void **state) {
    (void)state;
    const int64_t mib = 1 << 20;
    mt_cpu_ops.memory_limit(0);
    int64_t machine = mt_cpu_ops.memory_available();
    void *before = mt_cpu_ops.memory_alloc(5 * mib);
    mt_cpu_ops.memory_limit(40 * mib);
    int64_t left = mt_cpu_ops.memory_available();
    assert_true(left <= 35 * mib); // blocks count that were there
    void *block = mt_cpu_ops.memory_alloc(8 * mib), *ordered = mt_cpu_ops.memory_alloc_ordered(mib, NULL);
    void *host = mt_cpu_ops.memory_alloc_host(60 * mib); // not the device's
    assert_int_equal(mt_cpu_ops.memory_available(), left - 9 * mib);
    mt_cpu_ops.memory_free(block);
    mt_cpu_ops.memory_free(before);
    mt_cpu_ops.memory_free_ordered(ordered, NULL);
    mt_cpu_ops.memory_free_host(host);
    assert_int_equal(mt_cpu_ops.memory_available(), left + 5 * mib);
    mt_cpu_ops.memory_limit(0);
    assert_int_equal(mt_cpu_ops.memory_available(), machine);
}

/* A byte that is written makes a page of the machine resident, not a huge page, whose zeroing a stream would wait for.
 */
static void a_cache_comes_into_memory_in_small_pages(void **state) {
    (void)state;
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = 64 << 20, pages = bytes / page; // beyond malloc's own heap
    char *cache = mt_cpu_ops.memory_alloc_cache(bytes);
    unsigned char *resident = mt_malloc(pages);
    int64_t count = 0;
    cache[bytes / 2] = 1;
    assert_int_equal(mincore(cache, (size_t)bytes, resident), 0);
    for (int64_t i = 0; i < pages; i++) count += resident[i] & 1;
    assert_true(count >= 1 && count <= 4);
    free(resident);
    mt_cpu_ops.memory_free(cache);
}

static void an_allocation_beyond_the_limit_ends_the_program_in_a_line(void **state) {
    (void)state;
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], 2);
        mt_cpu_ops.memory_limit(32 << 20);
        mt_cpu_ops.memory_free(mt_cpu_ops.memory_alloc(64 << 20));
        _exit(0);
    }
    close(ends[1]);
    char line[1000] = "";
    size_t length = 0;
    for (ssize_t got; length < sizeof line - 1 && (got = read(ends[0], line + length, sizeof line - 1 - length)) > 0;)
        length += (size_t)got;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) != 0);
    assert_non_null(strstr(line, "67108864 bytes (0.06 GiB) requested"));
    assert_non_null(strstr(line, "0.03 GiB of --memory-limit"));
    assert_non_null(strchr(line, '\n')); // behind it a sanitizer may report what the child did not free
    assert_null(strstr(strchr(line, '\n'), "error: "));
}

static void a_gpu_that_cannot_compute_is_refused_in_words(void **state) {
    (void)state;
    mt_error error;
    mt_gpu_facts gpu = {.name = "Tesla T4", .capability = 75, .kernels = 75};
    assert_int_equal(mt_gpu_check(&gpu, 0, &error), 0);
    gpu.kernels = 0;
    assert_int_equal(mt_gpu_check(&gpu, 1, &error), -1);
    assert_non_null(strstr(error.text, "GPU 1 (Tesla T4) has compute capability 7.5, for which this build has no"));
    assert_non_null(strstr(error.text, "CUDA_ARCH=75 "));
    gpu = (mt_gpu_facts){.name = "Quadro P400", .capability = 61};
    assert_int_equal(mt_gpu_check(&gpu, 0, &error), -1);
    assert_non_null(strstr(error.text, "GPU 0 (Quadro P400) is older than compute capability 7.5; use --device cpu"));
}

static void gpus_of_different_kinds_are_listed_in_a_line(void **state) {
    (void)state;
    const int64_t gib = 1 << 30;
    char line[1000], few[40];
    const mt_gpu_facts gpus[] = {{"NVIDIA GeForce RTX 5090", 120, 120, 32 * gib, -1, false},
                                 {"NVIDIA GeForce RTX 3060", 86, 0, 12 * gib, -1, true},
                                 {"NVIDIA GeForce RTX 3060", 86, 0, 12 * gib, -1, false}};
    mt_gpu_kinds_note(line, sizeof line, gpus, 3);
    assert_non_null(strstr(line, "0 NVIDIA GeForce RTX 5090 (12.0, 32.0 GiB), 1 NVIDIA GeForce RTX 3060 (8.6, 12.0 "));
    assert_non_null(strstr(line, "CUDA_VISIBLE_DEVICES"));
    assert_null(strchr(line, '\n'));
    mt_gpu_kinds_note(line, sizeof line, gpus + 1, 2);
    assert_string_equal(line, "");
    mt_gpu_kinds_note(line, sizeof line, gpus, 1);
    assert_string_equal(line, "");
    mt_gpu_kinds_note(line, sizeof line, gpus, 0);
    assert_string_equal(line, "");
    mt_gpu_kinds_note(few, sizeof few, gpus, 3); // cut
    assert_true(strlen(few) < sizeof few);
}

static void memory_that_others_have_is_reported(void **state) {
    (void)state;
    const int64_t gib = 1 << 30;
    char line[400];
    mt_gpu_facts gpu = {"NVIDIA GeForce RTX 3060", 86, 86, 12 * gib, 10 * gib, true};
    mt_gpu_memory_note(line, sizeof line, &gpu, 0);
    assert_non_null(
        strstr(line, "2.0 of 12.0 GiB of GPU 0 (NVIDIA GeForce RTX 3060) are in use already, by its screen"));
    gpu.free = 12 * gib - (300 << 20); // the context alone
    mt_gpu_memory_note(line, sizeof line, &gpu, 0);
    assert_non_null(strstr(line, "draws a screen"));
    gpu.draws = false, gpu.free = 12 * gib - (1300 << 20); // with NCCL
    mt_gpu_memory_note(line, sizeof line, &gpu, 0);
    assert_string_equal(line, "");
    gpu.free = 4 * gib;
    mt_gpu_memory_note(line, sizeof line, &gpu, 3);
    assert_non_null(strstr(line, "8.0 of 12.0 GiB of GPU 3 "));
    assert_non_null(strstr(line, "by other programs;"));
    gpu.free = -1; // not asked
    mt_gpu_memory_note(line, sizeof line, &gpu, 3);
    assert_string_equal(line, "");
}

static void large_blocks_that_are_not_pinned_are_pageable(void **state) {
    (void)state;
    const int64_t gib = 1 << 30;
    char line[300];
    assert_true(mt_pageable_serves(line, sizeof line, 6 * gib, "5.15.153.1-microsoft-standard-WSL2"));
    assert_non_null(strstr(line, "6.0 GiB of host memory were not pinned, for WSL2 pins at most half of the memory"));
    assert_true(mt_pageable_serves(line, sizeof line, 6 * gib, "6.1.0-18-amd64"));
    assert_null(strstr(line, "WSL2"));
    assert_false(mt_pageable_serves(line, sizeof line, 1 << 20, "6.1.0-18-amd64"));
    assert_string_equal(line, "");
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
        cmocka_unit_test(products_in_fp8_save_one_byte_an_element),
        cmocka_unit_test(offloading_keeps_two_layers_on_the_device),
        cmocka_unit_test(mixers_with_states_recompute_and_offload_by_module),
        cmocka_unit_test(offloading_on_the_cpu_counts_in_one_memory),
        cmocka_unit_test(offloading_beyond_the_memory_of_the_host_is_refused),
        cmocka_unit_test(recipes_fit_their_gpu_and_host),
        cmocka_unit_test(the_cpu_counts_blocks_within_its_limit),
        cmocka_unit_test(a_cache_comes_into_memory_in_small_pages),
        cmocka_unit_test(an_allocation_beyond_the_limit_ends_the_program_in_a_line),
        cmocka_unit_test(a_gpu_that_cannot_compute_is_refused_in_words),
        cmocka_unit_test(gpus_of_different_kinds_are_listed_in_a_line),
        cmocka_unit_test(memory_that_others_have_is_reported),
        cmocka_unit_test(large_blocks_that_are_not_pinned_are_pageable),
        cmocka_unit_test_setup_teardown(available_memory_is_what_the_machine_has_left, make_root, remove_root),
        cmocka_unit_test_setup_teardown(limits_of_control_groups_version_2_count, make_root, remove_root),
        cmocka_unit_test_setup_teardown(limits_of_control_groups_version_1_count, make_root, remove_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
