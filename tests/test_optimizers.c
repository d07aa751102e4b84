/* test_optimizers.c: steps of SGD with momentum and of Lion equal those of torch.optim.SGD (PyTorch 2.15) and of
 * emerging-optimizers 0.3.0 on three matrices (tests/golden/optimizers); a skipped step changes nothing. On the CPU,
 * and on the GPU where one answers. */
#include "../data/safetensors.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { STEPS = 6, MOST = 2048 };

static mt_safetensors *golden;

static const float *tensor(const char *run, const char *name, int step, int64_t *n) {
    char full[80];
    if (step < 0)
        snprintf(full, sizeof full, "%s.%s", name, run);
    else
        snprintf(full, sizeof full, "%s.%s.%d", run, name, step);
    const mt_tensor_info *info = mt_safetensors_find(golden, full);
    if (!info) fail_msg("the golden file has no tensor %s", full);
    *n = info->bytes / 4;
    return info->data;
}

typedef void step_operation(const mt_update_args *a, const mt_update *update, mt_stream *stream);

/* A step on memory of the backend; the gradient is doubled and its scale is a half. */
static void take_step(const mt_ops *ops, mt_stream *stream, step_operation *step, const mt_update *update, float *w,
                      float *m, const float *grad, float scale, int64_t n) {
    float doubled[MOST], *device[3];
    for (int64_t i = 0; i < n; i++) doubled[i] = 2 * grad[i];
    float *host[3] = {w, m, doubled}, *factor = ops->memory_alloc(4);
    for (int k = 0; k < 3; k++) {
        device[k] = ops->memory_alloc(n * 4);
        ops->memory_copy(device[k], host[k], n * 4, stream);
    }
    ops->memory_copy(factor, &scale, 4, stream);
    mt_update_args a = {.n = n, .param = device[0], .m = device[1], .grad = device[2], .scale = factor};
    step(&a, update, stream);
    for (int k = 0; k < 2; k++) ops->memory_copy(host[k], device[k], n * 4, stream);
    if (stream) ops->stream_synchronize(stream);
    for (int k = 0; k < 3; k++) ops->memory_free(device[k]);
    ops->memory_free(factor);
}

static void check_run(const mt_ops *ops, mt_stream *stream, const char *run, step_operation *step,
                      const mt_update *update) {
    static const char *const names[] = {"square", "tall", "wide"};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        int64_t n, count;
        const float *start = tensor("start", names[k], -1, &n);
        float w[MOST], m[MOST] = {0}, before[MOST];
        assert_true(n > 0 && n <= MOST);
        memcpy(w, start, (size_t)n * 4);
        for (int i = 0; i < STEPS; i++) {
            char grad[32];
            snprintf(grad, sizeof grad, "grad.%d", i);
            const float *g = tensor(grad, names[k], -1, &count), *want = tensor(run, names[k], i, &count);
            assert_int_equal(count, n);
            memcpy(before, w, sizeof before);
            take_step(ops, stream, step, update, w, m, g, -1, n); // a failed check
            assert_memory_equal(before, w, (size_t)n * 4);
            take_step(ops, stream, step, update, w, m, g, 0.5f, n);
            for (int64_t j = 0; j < n; j++)
                if (!(fabsf(w[j] - want[j]) <= 1e-6f * (fabsf(want[j]) + 0.1f)))
                    fail_msg("%s, %s, step %d: element %d is %.9g, the reference has %.9g", run, names[k], i, (int)j,
                             (double)w[j], (double)want[j]);
        }
    }
}

static void steps_equal_those_of_the_references(const mt_ops *ops, mt_stream *stream) {
    mt_update sgd = {.lr = 0.01f, .beta1 = 0.9f, .weight_decay = 0.1f};
    mt_update lion = {.lr = 0.001f, .beta1 = 0.9f, .beta2 = 0.99f, .weight_decay = 0.1f};
    check_run(ops, stream, "sgd_momentum", ops->sgd_step, &sgd);
    check_run(ops, stream, "lion", ops->lion_step, &lion);
}

static void steps_on_the_cpu_equal_those_of_the_references(void **state) {
    (void)state;
    steps_equal_those_of_the_references(&mt_cpu_ops, NULL);
}

static void steps_on_a_gpu_equal_those_of_the_references(void **state) {
    (void)state;
    mt_error error;
    const mt_ops *ops = mt_cuda_open(0, &error);
    if (!ops) skip();
    mt_stream *stream = ops->stream_create(NULL, 0, true);
    steps_equal_those_of_the_references(ops, stream);
    ops->stream_destroy(stream);
}

int main(void) {
    mt_error error;
    if (mt_safetensors_open(&golden, "tests/golden/optimizers/steps.safetensors", &error) != 0)
        mt_die("%s", error.text);
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_on_the_cpu_equal_those_of_the_references),
                                       cmocka_unit_test(steps_on_a_gpu_equal_those_of_the_references)};
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_safetensors_close(golden);
    return failures;
}
