/* test_fp8.c: linears in fp8 equal those of Transformer Engine: outputs, gradients, scales and histories of the largest
 * values, for every recipe and step of the folder in MT_FP8_GOLDEN. Operands that the operation before a linear stores
 * in fp8 give the bits of operands that the linear quantizes. On the CPU, and on the GPU where one answers. */
// Sections of megatron.c: §7
#include "../data/base/file.h"
#include "../data/base/safetensors.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_HISTORY = 16 };

static int64_t T, K, N; // the sizes of the golden linear

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

/* The sizes of a matrix. */
static void read_shape(const char *name, int64_t *rows, int64_t *columns) {
    const mt_tensor_info *info = mt_safetensors_find(tensors, name);
    if (!info) fail_msg("%s has no tensor %s", golden_folder(), name);
    assert_int_equal(info->num_dims, 2);
    *rows = info->shape[0], *columns = info->shape[1];
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
    int64_t bytes = ops->workspace_bytes(T, mt_max(N, K), 1, 1);
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

/* A pass of training with a fixture's linears. */
static mt_linear_pass training(const mt_tensor_parallel *tp) {
    return (mt_linear_pass){.tp = tp, .training = true};
}

static void check_step(fixture *f, const recipe *r, int64_t step) {
    mt_linear_io io = {.x = f->x, .y = f->y, .dy = f->dy, .dx = f->dx};
    put(f, f->x, tensor("x.%d", NULL, step, T * K * 2), T * K * 2);
    put(f, f->dy, tensor("dy.%d", NULL, step, T * N * 2), T * N * 2);
    mt_linear_forward(training(&f->tp), &f->linear, &io);
    mt_linear_backward(training(&f->tp), &f->linear, &io, MT_BACKWARD_BOTH);
    uint16_t *y = fetch(f, f->y, T * N * 2), *dx = fetch(f, f->dx, T * K * 2);
    float *dw = fetch(f, f->linear.weight.dw, N * K * 4);
    uint16_t *expected = mt_malloc(T * mt_max(N, K) * 2);
    float *gradient = mt_malloc(N * K * 4);
    memcpy(expected, tensor("%s.%d.y", r->name, step, T * N * 2), (size_t)(T * N * 2));
    assert_equal_in_bf16("y", r, step, y, expected, T * N);
    memcpy(expected, tensor("%s.%d.dx", r->name, step, T * K * 2), (size_t)(T * K * 2));
    assert_equal_in_bf16("dx", r, step, dx, expected, T * K);
    memcpy(gradient, tensor("%s.%d.main_grad", r->name, step, N * K * 4), (size_t)(N * K * 4));
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
            int64_t scales = mt_fp8_num_scales(1, N, K, w.blocks), of_transpose = mt_fp8_num_scales(1, K, N, w.blocks);
            w.data = ops->memory_alloc(N * K), w.inverse_scales = ops->memory_alloc(scales * 4);
            t.data = ops->memory_alloc(N * K), t.inverse_scales = ops->memory_alloc(of_transpose * 4), t.stride = N;
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

/* The operations of a GPU; a test without one is skipped. */
static const mt_ops *gpu_or_skip(void) {
    mt_error error;
    const mt_ops *gpu = mt_cuda_open(0, &error);
    if (!gpu) {
        print_message("skipped: %s\n", error.text);
        skip();
    }
    return gpu;
}

static void linears_equal_transformer_engine_on_the_gpu(void **state) {
    (void)state;
    const mt_ops *gpu = gpu_or_skip();
    check_backend(gpu, true);
    check_backend(gpu, false);
}

/* ---- operands that the operation before a linear stores in fp8 */

enum { TOKENS = 64, CHANNELS = 128, F = 80, WIDTH = 2 * F };

static int64_t quantize_calls, transpose_calls;
static const mt_ops *counted_ops;

static void counted_quantize(const mt_quantize_args *a, mt_dtype dtype, mt_stream *stream) {
    quantize_calls++;
    counted_ops->quantize(a, dtype, stream);
}

static void counted_transpose(const mt_quantize_args *a, mt_stream *stream) {
    transpose_calls++;
    counted_ops->fp8_transpose(a, stream);
}

/* An MLP after a norm: everything that it reads and writes. */
typedef struct mlp {
    mt_ops ops;
    mt_stream *stream;
    mt_tensor_parallel tp;
    mt_linear fc1, down;
    mt_fp8 fp8;
    mt_fp8_linear states[2];
    float *amax; // [6]
    void *workspace, *x, *normed, *hidden, *active, *y, *dy, *dactive, *dhidden, *dnormed;
    void *saved[2]; // x^T of both linears, or NULL
    void *memory[24];
    int count;
} mlp;

/* Values over some octaves, some beyond the largest of e4m3 after scaling. */
static float value_of(int64_t i) {
    uint32_t bits = (uint32_t)i * 2654435761u;
    return ldexpf((float)(int32_t)(bits ^ bits >> 15) * 0x1p-31f, (int)(i % 9) - 3);
}

static void *mlp_memory(mlp *m, int64_t bytes) {
    return m->memory[m->count++] = m->ops.memory_alloc(bytes);
}

static void *mlp_bf16(mlp *m, int64_t n, int64_t seed) {
    uint16_t *host = mt_malloc(n * 2), *to = mlp_memory(m, n * 2);
    for (int64_t i = 0; i < n; i++) host[i] = mt_f32_to_bf16(value_of(i + seed * 7919));
    m->ops.memory_copy(to, host, n * 2, m->stream);
    m->ops.stream_synchronize(m->stream);
    free(host);
    return to;
}

static void *mlp_floats(mlp *m, int64_t n, float value) {
    float *host = mt_malloc(n * 4), *to = mlp_memory(m, n * 4);
    for (int64_t i = 0; i < n; i++) host[i] = value * (float)(i + 1);
    m->ops.memory_copy(to, host, n * 4, m->stream);
    m->ops.stream_synchronize(m->stream);
    free(host);
    return to;
}

static void mlp_linear(mlp *m, mt_linear *l, mt_fp8_linear *state, int64_t N, int64_t width, float *numbers) {
    *l = (mt_linear){.N = N, .K = width, .kind = MT_LINEAR_REPLICATED, .fp8 = state};
    l->weight = (mt_weight){mlp_bf16(m, N * width, N), mlp_floats(m, N * width, 0), NULL, 0};
    *state = (mt_fp8_linear){.recipe = &m->fp8, .scale = numbers, .amax = m->amax + (state - m->states) * 3};
    state->inverse_scales = mlp_memory(m, MT_NUM_FP8_OPERANDS * MT_FP8_SCALE_STEP * 4);
}

static void mlp_open(mlp *m, const mt_ops *ops, mt_fp8_recipe recipe, bool in_place, bool saves) {
    *m = (mlp){.ops = *ops, .fp8 = mt_fp8_recipes[recipe]};
    int64_t bytes = ops->workspace_bytes(TOKENS, WIDTH, 1, 1);
    counted_ops = ops, m->ops.quantize = counted_quantize, m->ops.fp8_transpose = counted_transpose;
    m->workspace = mlp_memory(m, bytes), m->stream = ops->stream_create(m->workspace, bytes, false);
    m->fp8.format = MT_F8_E4M3, m->fp8.gradient_format = MT_F8_E5M2, m->fp8.wgrad = true;
    m->fp8.scratch.capacity = 1 << 20, m->fp8.scratch.base = mlp_memory(m, 1 << 20);
    m->amax = mlp_floats(m, 6, 0);
    mlp_linear(m, &m->fc1, &m->states[0], WIDTH, CHANNELS, mlp_floats(m, 3, 40));
    mlp_linear(m, &m->down, &m->states[1], CHANNELS, F, mlp_floats(m, 3, 60));
    m->states[0].in_place[MT_FP8_X] = m->states[0].in_place[MT_FP8_DY] = m->states[1].in_place[MT_FP8_X] = in_place;
    m->x = mlp_bf16(m, TOKENS * CHANNELS, 1), m->dy = mlp_bf16(m, TOKENS * CHANNELS, 2),
    m->normed = mlp_bf16(m, TOKENS * CHANNELS, 3);
    m->hidden = mlp_bf16(m, TOKENS * WIDTH, 4), m->active = mlp_bf16(m, TOKENS * F, 5),
    m->y = mlp_bf16(m, TOKENS * CHANNELS, 6);
    m->dactive = mlp_bf16(m, TOKENS * F, 7), m->dhidden = mlp_bf16(m, TOKENS * WIDTH, 8),
    m->dnormed = mlp_bf16(m, TOKENS * CHANNELS, 9);
    m->tp = (mt_tensor_parallel){.ops = &m->ops, .group = &mt_grid_of_one.tensor, .stream = m->stream};
    m->tp.comm = m->stream, m->tp.dtype = MT_BF16, m->tp.T = m->tp.rows = TOKENS;
    for (int i = 0; i < 2 && saves; i++) m->saved[i] = mlp_memory(m, 1 << 16);
}

/* The activation's result is x or dy of a linear: in place, it is stored in fp8. */
static void mlp_activation_result(mt_activation_args *a, const mt_fp8_linear *reader, mt_fp8_operand operand,
                                  void *result, int64_t width) {
    mt_dtype format = operand == MT_FP8_DY ? MT_F8_E5M2 : MT_F8_E4M3;
    float *inverse_scale = reader->inverse_scales + operand * MT_FP8_SCALE_STEP;
    a->quantize = (mt_quantize_args){0};
    if (!reader->in_place[operand]) return;
    a->quantize = (mt_quantize_args){result, 1, TOKENS, width, .scale = reader->scale + operand};
    a->quantize.amax = reader->amax + operand;
    a->quantize.rows = (mt_fp8_matrix){result, inverse_scale, width, format, MT_FP8_TENSOR};
}

/* Norm, MLP, and the backward of the MLP. */
static void mlp_run(mlp *m) {
    mt_norm_args norm = {
        .T = TOKENS, .H = 1, .C = CHANNELS, .x = m->x, .w = m->fc1.weight.w, .eps = 1e-5f, .y = m->normed};
    norm.rstd = mlp_memory(m, TOKENS * 4), norm.x_stride = norm.y_stride = CHANNELS;
    if (m->states[0].in_place[MT_FP8_X]) {
        norm.quantize =
            (mt_quantize_args){m->normed, 1, TOKENS, CHANNELS, .scale = m->states[0].scale, .amax = m->amax};
        norm.quantize.rows =
            (mt_fp8_matrix){m->normed, m->states[0].inverse_scales, CHANNELS, MT_F8_E4M3, MT_FP8_TENSOR};
    }
    m->ops.rmsnorm_forward(&norm, MT_BF16, m->stream);
    mt_linear_io fc1 = {
        .x = m->normed, .x_transposed = m->saved[0], .y = m->hidden, .dy = m->dhidden, .dx = m->dnormed};
    mt_linear_io down = {.x = m->active, .x_transposed = m->saved[1], .y = m->y, .dy = m->dy, .dx = m->dactive};
    mt_activation_args activation = {TOKENS, F, MT_ACTIVATION_SWIGLU, m->hidden, .y = m->active, .dy = m->dactive};
    activation.dx = m->dhidden;
    mt_linear_forward(training(&m->tp), &m->fc1, &fc1);
    mlp_activation_result(&activation, &m->states[1], MT_FP8_X, m->active, F);
    m->ops.activation_forward(&activation, MT_BF16, m->stream);
    mt_linear_forward(training(&m->tp), &m->down, &down);
    if (m->saved[0])
        m->ops.memory_zero(m->normed, TOKENS * CHANNELS * 2, m->stream), fc1.x = down.x = NULL; // read by no backward
    mt_linear_backward(training(&m->tp), &m->down, &down, MT_BACKWARD_BOTH);
    mlp_activation_result(&activation, &m->states[0], MT_FP8_DY, m->dhidden, WIDTH);
    m->ops.activation_backward(&activation, MT_BF16, m->stream);
    mt_linear_backward(training(&m->tp), &m->fc1, &fc1, MT_BACKWARD_BOTH);
}

static void same_bits(mlp *stored, mlp *quantized, const char *what, const void *got, const void *want, int64_t bytes) {
    fixture on[] = {{.ops = counted_ops, .stream = stored->stream}, {.ops = counted_ops, .stream = quantized->stream}};
    uint8_t *bits[] = {fetch(&on[0], got, bytes), fetch(&on[1], want, bytes)};
    for (int64_t i = 0; i < bytes; i++)
        if (bits[0][i] != bits[1][i]) fail_msg("%s: byte %d is %02x, not %02x", what, (int)i, bits[0][i], bits[1][i]);
    free(bits[0]), free(bits[1]);
}

static void mlp_close(mlp *m) {
    m->ops.stream_destroy(m->stream);
    for (int i = 0; i < m->count; i++) m->ops.memory_free(m->memory[i]);
}

static void same_mlp(mlp m[2]) {
    same_bits(&m[1], &m[0], "y", m[1].y, m[0].y, TOKENS * CHANNELS * 2);
    same_bits(&m[1], &m[0], "dx", m[1].dnormed, m[0].dnormed, TOKENS * CHANNELS * 2);
    same_bits(&m[1], &m[0], "dw of the first", m[1].fc1.weight.dw, m[0].fc1.weight.dw, WIDTH * CHANNELS * 4);
    same_bits(&m[1], &m[0], "dw of the second", m[1].down.weight.dw, m[0].down.weight.dw, CHANNELS * F * 4);
    same_bits(&m[1], &m[0], "amax", m[1].amax, m[0].amax, 6 * 4);
}

/* Two weights are quantized twice each, as they are not kept; with operands in place also dy of the second linear, and
 * else three operands more, x twice. */
static void check_in_place(const mt_ops *ops) {
    mlp m[2];
    for (int in_place = 0; in_place < 2; in_place++) {
        mlp_open(&m[in_place], ops, MT_FP8_DELAYED, in_place, false);
        quantize_calls = transpose_calls = 0;
        mlp_run(&m[in_place]);
        assert_int_equal(quantize_calls, in_place ? 4 + 1 : 4 + 2 * 3);
        assert_int_equal(transpose_calls, in_place ? 3 : 0);
    }
    same_mlp(m);
    mlp_close(&m[0]), mlp_close(&m[1]);
}

static void operands_in_place_change_no_bit_on_the_cpu(void **state) {
    (void)state;
    check_in_place(&mt_cpu_ops);
}

static void operands_in_place_change_no_bit_on_the_gpu(void **state) {
    (void)state;
    check_in_place(gpu_or_skip());
}

/* Of the recipes whose products this backend has: with saved transposes x of both linears is quantized once. */
static void check_saved_transposes(const mt_ops *ops) {
    const mt_fp8_recipe recipes[] = {MT_FP8_DELAYED, MT_FP8_TENSORWISE, MT_FP8_BLOCKWISE, MT_FP8_MXFP8};
    for (int i = 0; i < (ops->limits.no_mxfp8 ? 3 : 4); i++) {
        mlp m[2];
        for (int saves = 0; saves < 2; saves++) {
            mlp_open(&m[saves], ops, recipes[i], false, saves);
            quantize_calls = 0;
            mlp_run(&m[saves]);
            assert_int_equal(quantize_calls, saves ? 4 + 4 : 4 + 6);
        }
        same_mlp(m);
        mlp_close(&m[0]), mlp_close(&m[1]);
    }
}

static void saved_transposes_change_no_bit_on_the_cpu(void **state) {
    (void)state;
    check_saved_transposes(&mt_cpu_ops);
}

static void saved_transposes_change_no_bit_on_the_gpu(void **state) {
    (void)state;
    check_saved_transposes(gpu_or_skip());
}

static int open_golden(void **state) {
    (void)state;
    mt_error error;
    char path[512];
    snprintf(path, sizeof path, "%s/transformer_engine.safetensors", golden_folder());
    if (mt_safetensors_open(&tensors, path, &error) != 0) return fprintf(stderr, "%s\n", error.text), -1;
    read_shape("x.0", &T, &K), read_shape("w", &N, &K);
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
        cmocka_unit_test(operands_in_place_change_no_bit_on_the_cpu),
        cmocka_unit_test(operands_in_place_change_no_bit_on_the_gpu),
        cmocka_unit_test(saved_transposes_change_no_bit_on_the_cpu),
        cmocka_unit_test(saved_transposes_change_no_bit_on_the_gpu),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
