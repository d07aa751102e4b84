/* test_optimizers.c: steps of SGD with momentum, of Lion and of Muon equal those of torch.optim.SGD and Muon (PyTorch
 * 2.15) and of emerging-optimizers 0.3.0 on three matrices (tests/golden/optimizers); a skipped step changes nothing.
 * On the CPU, and on the GPU where one answers. */
// Sections of megatron.c: §3i §13
#include "../data/base/safetensors.h"

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

/* ---- Muon */

/* Memory of the backend for a step of Muon on two copies of a matrix, with a gap between them. */
typedef struct muon_memory {
    float *w, *m, *grad, *scale;
    double *sums;
    void *x, *next, *squares, *polynomial;
} muon_memory;

enum { COPIES = 2, GAP = 3, SIDE = 64 };

/* A step whose gradient is doubled and whose scale is a half. */
static void muon_step(const mt_ops *ops, mt_stream *stream, muon_memory *at, const mt_muon_options *o,
                      const mt_update *update, int64_t rows, int64_t cols) {
    mt_matrices matrices = {COPIES, rows, cols, rows * cols + GAP, .x = at->x, .x_stride = rows * cols};
    matrices.dtype = o->fp32_matmul_prec == MT_MUON_MEDIUM ? MT_BF16 : MT_F32, matrices.row_stride = cols;
    matrices.nesterov = o->nesterov;
    matrices.sums = at->sums, matrices.counted = true, matrices.factor = mt_muon_factor(o, rows, cols);
    mt_update_args a = {.param = at->w, .m = at->m, .grad = at->grad, .scale = at->scale, .matrices = &matrices};
    mt_iterate iterate = {COPIES, rows, cols, rows, .transposed = rows > cols, .x = at->x, .next = at->next};
    iterate.squares = at->squares, iterate.polynomial = at->polynomial;
    ops->memory_zero(at->sums, COPIES * 8, stream);
    ops->muon_momentum(&a, update, stream);
    ops->muon_normalize(&a, update, stream);
    mt_newton_schulz(ops, o, &iterate, stream);
    matrices.x = iterate.x;
    ops->muon_step(&a, update, stream);
}

/* Steps on a matrix of the golden file; `tolerance`: of the update of the largest element. */
static void check_muon(const mt_ops *ops, mt_stream *stream, const char *run, const char *name, int64_t rows,
                       int64_t cols, const mt_muon_options *o, double tolerance) {
    static const float scales[2] = {-1, 0.5f};
    int64_t n = rows * cols, count, room = COPIES * (n + GAP);
    float w[COPIES * (MOST + GAP)] = {0}, before[COPIES * (MOST + GAP)];
    float doubled[COPIES * (MOST + GAP)] = {0};
    mt_update update = {.lr = 0.02f, .beta1 = (float)o->momentum, .weight_decay = 0.1f};
    muon_memory at = {.w = ops->memory_alloc(room * 4), .m = ops->memory_alloc(room * 4)};
    at.grad = ops->memory_alloc(room * 4), at.scale = ops->memory_alloc(4), at.sums = ops->memory_alloc(COPIES * 8);
    void **buffers[] = {&at.x, &at.next, &at.squares, &at.polynomial};
    for (int i = 0; i < 4; i++) *buffers[i] = ops->memory_alloc(COPIES * SIDE * SIDE * 4);
    const float *start = tensor("start", name, -1, &count);
    assert_int_equal(count, n);
    for (int i = 0; i < COPIES; i++) memcpy(w + i * (n + GAP), start, (size_t)n * 4);
    ops->memory_copy(at.w, w, room * 4, stream);
    ops->memory_zero(at.m, room * 4, stream);
    for (int step = 0; step < STEPS; step++) {
        char grad[32];
        snprintf(grad, sizeof grad, "grad.%d", step);
        const float *g = tensor(grad, name, -1, &count);
        for (int i = 0; i < COPIES; i++)
            for (int64_t k = 0; k < n; k++) doubled[i * (n + GAP) + k] = 2 * g[k];
        ops->memory_copy(at.grad, doubled, room * 4, stream);
        for (int passes = 0; passes < 2; passes++) { // a failed check changes nothing
            memcpy(before, w, sizeof before);
            ops->memory_copy(at.scale, &scales[passes], 4, stream);
            muon_step(ops, stream, &at, o, &update, rows, cols);
            ops->memory_copy(w, at.w, room * 4, stream);
            if (stream) ops->stream_synchronize(stream);
            if (passes == 0) assert_memory_equal(before, w, (size_t)room * 4);
        }
        char full[80];
        snprintf(full, sizeof full, "%s.%s.%d", run, name, step);
        if (!mt_safetensors_find(golden, full)) continue;
        const float *want = tensor(run, name, step, &count);
        double bound = tolerance * (double)update.lr * (double)mt_muon_factor(o, rows, cols);
        for (int i = 0; i < COPIES; i++)
            for (int64_t k = 0; k < n; k++)
                if (!(fabs((double)(w[i * (n + GAP) + k] - want[k])) <= bound))
                    fail_msg("%s, %s, step %d: element %d is %.9g, the reference has %.9g", run, name, step, (int)k,
                             (double)w[i * (n + GAP) + k], (double)want[k]);
        for (int k = 0; k < GAP; k++) assert_true(w[n + k] == 0);
    }
    for (int i = 0; i < 4; i++) ops->memory_free(*buffers[i]);
    ops->memory_free(at.w), ops->memory_free(at.m), ops->memory_free(at.grad), ops->memory_free(at.scale);
    ops->memory_free(at.sums);
}

static void muon_equals_the_references(const mt_ops *ops, mt_stream *stream) {
    static const mt_muon_options plain = {
        .momentum = 0.95, .extra_scale_factor = 1, .num_ns_steps = 5, .fp32_matmul_prec = MT_MUON_HIGHEST};
    struct {
        const char *run;
        mt_muon_options o;
        double tolerance;
    } runs[] = {{"muon", plain, 3e-5},
                {"muon_nesterov", plain, 3e-5},
                {"muon_simple", plain, 3e-5},
                {"muon_polar_express", plain, 3e-5},
                {"muon_aol", plain, 3e-5},
                {"muon_cans", plain, 3e-5},
                {"muon_unit_rms_norm", plain, 3e-5},
                {"muon_shape_scaling", plain, 3e-5},
                {"muon_extra_scale", plain, 3e-5},
                {"torch_muon_original", plain, 0.02}, // in bf16
                {"torch_muon_match_rms_adamw", plain, 0.02}};
    runs[1].o.nesterov = true;
    runs[2].o.coefficient_type = MT_MUON_SIMPLE, runs[3].o.coefficient_type = MT_MUON_POLAR_EXPRESS;
    runs[4].o.coefficient_type = MT_MUON_AOL, runs[5].o.coefficient_type = MT_MUON_CANS;
    runs[6].o.scale_mode = MT_MUON_UNIT_RMS_NORM, runs[7].o.scale_mode = MT_MUON_SHAPE_SCALING;
    runs[8].o.extra_scale_factor = 0.2, runs[8].o.momentum = 0.9, runs[8].o.num_ns_steps = 7;
    for (int i = 9; i < 11; i++) {
        runs[i].o.fp32_matmul_prec = MT_MUON_MEDIUM, runs[i].o.nesterov = true;
        runs[i].o.coefficient_type = MT_MUON_SIMPLE;
    }
    runs[9].o.scale_mode = MT_MUON_SHAPE_SCALING, runs[10].o.extra_scale_factor = 0.2;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        check_muon(ops, stream, runs[i].run, "square", 24, 24, &runs[i].o, runs[i].tolerance);
        check_muon(ops, stream, runs[i].run, "tall", 48, 20, &runs[i].o, runs[i].tolerance);
        check_muon(ops, stream, runs[i].run, "wide", 16, 40, &runs[i].o, runs[i].tolerance);
    }
}

/* The iterations of DeepSeek-V4 converge: eight coarse ones, then two of a polynomial with the fixed point 1. */
static void deepseeks_coefficients_make_singular_values_one(const mt_ops *ops, mt_stream *stream) {
    const mt_muon_options o = {
        .num_ns_steps = 10, .fp32_matmul_prec = MT_MUON_HIGHEST, .coefficient_type = MT_MUON_DEEPSEEKV4};
    float values[4] = {0.9f, 0, 0, 0.3f};
    void *memory[4];
    for (int i = 0; i < 4; i++) memory[i] = ops->memory_alloc(sizeof values);
    ops->memory_copy(memory[0], values, sizeof values, stream);
    mt_iterate x = {1, 2, 2, 2, .x = memory[0], .next = memory[1], .squares = memory[2], .polynomial = memory[3]};
    mt_newton_schulz(ops, &o, &x, stream);
    ops->memory_copy(values, x.x, sizeof values, stream);
    if (stream) ops->stream_synchronize(stream);
    assert_true(fabsf(values[0] - 1) < 0.03f && fabsf(values[3] - 1) < 0.03f && values[1] == 0 && values[2] == 0);
    for (int i = 0; i < 4; i++) ops->memory_free(memory[i]);
}

static void steps_equal_those_of_the_references(const mt_ops *ops, mt_stream *stream) {
    mt_update sgd = {.lr = 0.01f, .beta1 = 0.9f, .weight_decay = 0.1f};
    mt_update lion = {.lr = 0.001f, .beta1 = 0.9f, .beta2 = 0.99f, .weight_decay = 0.1f};
    check_run(ops, stream, "sgd_momentum", ops->sgd_step, &sgd);
    check_run(ops, stream, "lion", ops->lion_step, &lion);
    muon_equals_the_references(ops, stream);
    deepseeks_coefficients_make_singular_values_one(ops, stream);
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
    int64_t bytes = ops->workspace_bytes(1, 1, 1, 1);
    void *workspace = ops->memory_alloc(bytes);
    mt_stream *stream = ops->stream_create(workspace, bytes, true);
    steps_equal_those_of_the_references(ops, stream);
    ops->stream_destroy(stream);
    ops->memory_free(workspace);
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
