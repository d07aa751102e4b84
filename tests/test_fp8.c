/* test_fp8.c: linears in fp8 equal those of Transformer Engine: outputs, gradients, scales and histories of the largest
 * values, for every recipe and step of the folder in MT_FP8_GOLDEN. On the CPU, and on the GPU where one answers. */
#include "../data/file.h"
#include "../data/safetensors.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { T = 64, K = 128, N = 256, MAX_HISTORY = 16 };

/* A recipe of the reference, and the number of its steps. */
typedef struct recipe {
    const char *name;
    int64_t steps;
    mt_fp8_recipe row; // of mt_fp8_recipes
    mt_dtype gradient_format;
    bool most_recent;
    int64_t history;
} recipe;

static const recipe recipes[] = {
    {"delayed", 4, MT_FP8_DELAYED, MT_F8_E5M2, false, 3},
    {"delayed_most_recent_e4m3", 4, MT_FP8_DELAYED, MT_F8_E4M3, true, 2},
    {"tensorwise", 2, MT_FP8_TENSORWISE, MT_F8_E5M2, false, 0},
    {"blockwise", 2, MT_FP8_BLOCKWISE, MT_F8_E4M3, false, 0},
};

static const char *golden_folder(void) {
    const char *folder = getenv("MT_FP8_GOLDEN");
    return folder ? folder : "tests/golden/fp8";
}

static mt_safetensors *tensors;
static json_t *states;

static const void *tensor(const char *format, const char *name, int64_t step, int64_t bytes) {
    char full[64];
    if (name)
        snprintf(full, sizeof full, format, name, (int)step);
    else
        snprintf(full, sizeof full, format, (int)step);
    const mt_tensor_info *info = mt_safetensors_find(tensors, full);
    if (!info) fail_msg("%s has no tensor %s", golden_folder(), full);
    assert_int_equal(info->bytes, bytes);
    return info->data;
}

/* A linear on a backend, with everything in the backend's memory. */
typedef struct fixture {
    const mt_ops *ops;
    mt_stream *stream;
    mt_tensor_parallel tp;
    mt_linear linear;
    mt_fp8 fp8;
    mt_fp8_linear state;
    bool has_gradient;
    float *history, *largest, *guard;
    void *x, *dy, *y, *dx, *workspace;
} fixture;

static void put(const fixture *f, void *to, const void *from, int64_t bytes) {
    void *aligned = mt_malloc(bytes);
    memcpy(aligned, from, (size_t)bytes);
    f->ops->memory_copy(to, aligned, bytes, f->stream);
    f->ops->stream_synchronize(f->stream);
    free(aligned);
}

static void *fetch(const fixture *f, const void *from, int64_t bytes) {
    void *to = mt_malloc(bytes);
    f->ops->memory_copy(to, from, bytes, f->stream);
    f->ops->stream_synchronize(f->stream);
    return to;
}

static fixture open_linear(const mt_ops *ops, const recipe *r) {
    fixture f = {.ops = ops, .fp8 = mt_fp8_recipes[r->row]};
    f.fp8.format = MT_F8_E4M3, f.fp8.gradient_format = r->gradient_format, f.fp8.wgrad = true;
    int64_t bytes = ops->workspace_bytes(T, N, 1, 1);
    f.workspace = ops->memory_alloc(bytes);
    f.stream = ops->stream_create(f.workspace, bytes, false);
    f.x = ops->memory_alloc(T * K * 2), f.dy = ops->memory_alloc(T * N * 2);
    f.y = ops->memory_alloc(T * N * 2), f.dx = ops->memory_alloc(T * K * 2);
    f.linear = (mt_linear){.N = N, .K = K, .kind = MT_LINEAR_REPLICATED};
    f.linear.weight.w = ops->memory_alloc(N * K * 2), f.linear.weight.dw = ops->memory_alloc(N * K * 4);
    put(&f, f.linear.weight.w, tensor("w", NULL, 0, N * K * 2), N * K * 2);
    f.fp8.scratch.capacity = 1 << 20, f.fp8.scratch.base = ops->memory_alloc(1 << 20);
    f.state.amax = f.history = ops->memory_alloc(MAX_HISTORY * 3 * 4);
    if (f.fp8.delayed) {
        const float ones[] = {1, 1, 1}, guard = 1;
        const float largest[] = {448, 448, mt_f8_largest(r->gradient_format)};
        f.largest = ops->memory_alloc(3 * 4);
        f.state.scale = ops->memory_alloc(3 * 4), f.guard = ops->memory_alloc(4);
        ops->memory_zero(f.history, MAX_HISTORY * 3 * 4, f.stream);
        put(&f, f.state.scale, ones, sizeof ones);
        put(&f, f.largest, largest, sizeof largest);
        put(&f, f.guard, &guard, sizeof guard);
    }
    return f;
}

/* Call after the fixture has its final address. */
static void bind(fixture *f) {
    f->state.recipe = &f->fp8, f->linear.fp8 = &f->state;
    f->linear.weight.has_gradient = &f->has_gradient; // steps add up, as in the reference's main_grad
    f->tp = (mt_tensor_parallel){.ops = f->ops,
                                 .group = &mt_grid_of_one.tensor,
                                 .stream = f->stream,
                                 .comm = f->stream,
                                 .dtype = MT_BF16,
                                 .training = true,
                                 .T = T,
                                 .rows = T};
}

static void close_linear(fixture *f) {
    void *memory[] = {
        f->x,       f->dy,      f->y,           f->dx,   f->linear.weight.w, f->linear.weight.dw, f->fp8.scratch.base,
        f->history, f->largest, f->state.scale, f->guard};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        if (memory[i]) f->ops->memory_free(memory[i]);
    f->ops->stream_destroy(f->stream);
    f->ops->memory_free(f->workspace);
}

/* Equal operands, summed in another order: results may round to neighbours in bf16. Where terms cancel, the tensor
 * cores of the reference show the bits that their sums drop: about 2^-13 of the terms' size. An operand rounded
 * otherwise is off by 2^-4. */
static void assert_equal_in_bf16(const char *what, const recipe *r, int64_t step, const uint16_t *actual,
                                 const uint16_t *expected, int64_t count) {
    double square = 0;
    for (int64_t i = 0; i < count; i++) square += pow((double)mt_bf16_to_f32(expected[i]), 2);
    double rms = sqrt(square / (double)count);
    for (int64_t i = 0; i < count; i++) {
        double a = (double)mt_bf16_to_f32(actual[i]), e = (double)mt_bf16_to_f32(expected[i]);
        if (!(fabs(a - e) <= 0x1p-7 * fabs(e) + 0x1p-10 * rms))
            fail_msg("%s, step %d: %s[%d] is %.7g, expected %.7g (rms %.3g)", r->name, (int)step, what, (int)i, a, e,
                     rms);
    }
}

static double relative_distance(const float *actual, const float *expected, int64_t count) {
    double distance = 0, norm = 0;
    for (int64_t i = 0; i < count; i++)
        distance += pow((double)actual[i] - (double)expected[i], 2), norm += pow((double)expected[i], 2);
    return sqrt(distance / norm);
}

static void check_step(fixture *f, const recipe *r, int64_t step) {
    mt_linear_io io = {.x = f->x, .y = f->y, .dy = f->dy, .dx = f->dx};
    put(f, f->x, tensor("x.%d", NULL, step, T * K * 2), T * K * 2);
    put(f, f->dy, tensor("dy.%d", NULL, step, T * N * 2), T * N * 2);
    mt_linear_forward(&f->tp, &f->linear, &io);
    mt_linear_backward(&f->tp, &f->linear, &io, MT_BACKWARD_BOTH);
    uint16_t *y = fetch(f, f->y, T * N * 2), *dx = fetch(f, f->dx, T * K * 2);
    float *dw = fetch(f, f->linear.weight.dw, N * K * 4);
    uint16_t *expected = mt_malloc(T * N * 2);
    float *gradient = mt_malloc(N * K * 4);
    memcpy(expected, tensor("%s.%d.y", r->name, step, T * N * 2), T * N * 2);
    assert_equal_in_bf16("y", r, step, y, expected, T * N);
    memcpy(expected, tensor("%s.%d.dx", r->name, step, T * K * 2), T * K * 2);
    assert_equal_in_bf16("dx", r, step, dx, expected, T * K);
    memcpy(gradient, tensor("%s.%d.main_grad", r->name, step, N * K * 4), N * K * 4);
    double off = relative_distance(dw, gradient, N * K);
    if (!(off <= 1e-3))
        fail_msg("%s, step %d: the weight's gradient is off by %g of its norm", r->name, (int)step, off);
    free(y), free(dx), free(dw), free(expected), free(gradient);
}

/* Scales and histories of delayed scaling after a step, exactly. */
static void check_scales(fixture *f, const recipe *r, int64_t step) {
    mt_fp8_scale_args a = {.n = 3,
                           .length = r->history,
                           .scale = f->state.scale,
                           .history = f->history,
                           .largest = f->largest,
                           .most_recent = r->most_recent,
                           .guard = f->guard};
    f->ops->fp8_scale_step(&a, f->stream);
    float *scale = fetch(f, f->state.scale, 3 * 4), *history = fetch(f, f->history, r->history * 3 * 4);
    json_t *state = json_array_get(json_object_get(json_object_get(states, "state"), r->name), (size_t)step);
    for (int operand = 0; operand < 3; operand++) {
        json_t *meta = json_object_get(state, operand == MT_FP8_DY ? "scaling_bwd" : "scaling_fwd");
        size_t column = operand == MT_FP8_DY ? 0 : (size_t)operand;
        float expected = (float)json_real_value(json_array_get(json_object_get(meta, "scale"), column));
        if (scale[operand] != expected)
            fail_msg("%s, step %d: scale %d is %.9g, expected %.9g", r->name, (int)step, operand, scale[operand],
                     expected);
        for (int64_t t = 0; t < r->history; t++) {
            json_t *row = json_array_get(json_object_get(meta, "amax_history"), (size_t)t);
            expected = (float)json_real_value(json_array_get(row, column));
            if (history[t * 3 + operand] != expected)
                fail_msg("%s, step %d: entry %d of history %d is %.9g, expected %.9g", r->name, (int)step, (int)t,
                         operand, history[t * 3 + operand], expected);
        }
    }
    free(scale), free(history);
}

static void check_backend(const mt_ops *ops, bool keeps_weights) {
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++) {
        const recipe *r = &recipes[i];
        fixture f = open_linear(ops, r);
        f.fp8.keeps_weights = keeps_weights, f.fp8.version = 1;
        if (keeps_weights) {
            mt_fp8_matrix w = {.stride = K, .format = MT_F8_E4M3, .blocks = f.fp8.weight_blocks}, t = w;
            w.data = ops->memory_alloc(N * K), w.inverse_scales = ops->memory_alloc(1024);
            t.data = ops->memory_alloc(N * K), t.inverse_scales = ops->memory_alloc(1024), t.stride = N;
            f.state.w = w, f.state.w_transposed = t;
        }
        bind(&f);
        for (int64_t step = 0; step < r->steps; step++) {
            f.fp8.version++;
            check_step(&f, r, step);
            if (f.fp8.delayed) check_scales(&f, r, step);
        }
        void *weights[] = {f.state.w.data, f.state.w.inverse_scales, f.state.w_transposed.data,
                           f.state.w_transposed.inverse_scales};
        for (size_t k = 0; k < 4 && keeps_weights; k++) ops->memory_free(weights[k]);
        close_linear(&f);
    }
}

static void linears_equal_transformer_engine_on_the_cpu(void **state) {
    (void)state;
    check_backend(&mt_cpu_ops, true);
    check_backend(&mt_cpu_ops, false);
}

static void linears_equal_transformer_engine_on_the_gpu(void **state) {
    (void)state;
    mt_error error;
    const mt_ops *gpu = mt_cuda_open(0, &error);
    if (!gpu) {
        print_message("skipped: %s\n", error.text);
        skip();
    }
    check_backend(gpu, true);
    check_backend(gpu, false);
}

static int open_golden(void **state) {
    (void)state;
    mt_error error;
    char path[512];
    snprintf(path, sizeof path, "%s/transformer_engine.safetensors", golden_folder());
    if (mt_safetensors_open(&tensors, path, &error) != 0) return fprintf(stderr, "%s\n", error.text), -1;
    snprintf(path, sizeof path, "%s/transformer_engine.json", golden_folder());
    if (!(states = mt_json_read(path, &error))) return fprintf(stderr, "%s\n", error.text), -1;
    return 0;
}

static int close_golden(void **state) {
    (void)state;
    mt_safetensors_close(tensors);
    json_decref(states);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linears_equal_transformer_engine_on_the_cpu),
        cmocka_unit_test(linears_equal_transformer_engine_on_the_gpu),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
