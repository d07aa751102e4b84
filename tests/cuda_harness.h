/* cuda_harness.h: what the suites of the GPU's kernels share. Their rungs are called on streams of their own, with
 * operands that are made here and copied there; where no GPU answers, every test is skipped. Include it once, and let
 * all the rest of a suite be in #ifdef MT_HAVE_CUDA. */
#ifndef MT_CUDA_HARNESS_H
#define MT_CUDA_HARNESS_H

#include "../megatron.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifndef MT_HAVE_CUDA

static void kernels_are_right(void **state) {
    (void)state;
    print_message("skipped: built without CUDA\n");
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(kernels_are_right)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static const mt_ops *gpu; // NULL where no GPU answers
static mt_stream *stream, *deterministic_stream;
static void *workspace;

static inline int open_gpu(void **state) {
    (void)state;
    mt_error error;
    gpu = mt_cuda_open(0, &error);
    if (!gpu) {
        print_message("skipped: %s\n", error.text);
        return 0;
    }
    int64_t bytes = gpu->workspace_bytes(4096, 4096, 32, 128);
    workspace = gpu->memory_alloc(bytes);
    stream = gpu->stream_create(workspace, bytes, false);
    deterministic_stream = gpu->stream_create(workspace, bytes, true);
    return 0;
}

/* False where the kernels are those of compute capability 7.5. */
static inline bool gpu_has_bf16(void) {
    return gpu && !gpu->limits.no_bf16;
}

static inline int close_gpu(void **state) {
    (void)state;
    if (!gpu) return 0;
    gpu->stream_destroy(stream), gpu->stream_destroy(deterministic_stream);
    gpu->memory_free(workspace);
    return 0;
}

/* A copy of `from` in memory of the GPU. */
static inline void *to_gpu(const void *from, int64_t bytes) {
    void *to = gpu->memory_alloc(bytes);
    gpu->memory_copy(to, from, bytes, stream);
    gpu->stream_synchronize(stream);
    return to;
}

/* Copies results of either stream from the GPU. */
static inline void from_gpu(void *to, const void *from, int64_t bytes) {
    gpu->stream_synchronize(deterministic_stream);
    gpu->memory_copy(to, from, bytes, stream);
    gpu->stream_synchronize(stream);
}

static uint64_t random_state = 88172645463325252u;

static inline uint64_t random_word(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline int64_t random_below(int64_t n) {
    return (int64_t)(random_word() % (uint64_t)n);
}

/* In [-1, 1). */
static inline float random_float(void) {
    return (float)((double)(random_word() >> 11) / (1ull << 52) - 1);
}

#endif
#endif
