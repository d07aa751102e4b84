/* Every operation of the table on the GPU against the CPU, on random shapes, awkward ones among them. An operation's
 * test is written once, for any backend; its fp32 run on the CPU, on the inputs that the GPU gets (rounded to bf16 for
 * a bf16 run), is the answer. Outputs begin as NaN, so that elements that nothing wrote show, and so do elements that
 * were written but should not be. A second run on the GPU must give the same bits. */
#include "../megatron.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#ifdef MT_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

enum { MAX_BUFFERS = 24, MAX_SIZES = 8 };

/* ---- one run of one operation ------------------------------------------------------------------------------------ */

typedef struct buffer {
    void *device;
    int64_t count;
    mt_dtype dtype;
    bool is_output;
} buffer;

typedef struct run {
    const mt_ops *ops;
    mt_stream *stream;
    mt_dtype dtype;   // of activations and parameters
    mt_dtype rounded; // that of the inputs for the answer to a run in bf16 or fp16; else MT_F32
    uint64_t seed;
    int64_t num_buffers;
    buffer buffers[MAX_BUFFERS];
} run;

/* The contents of a buffer. */
typedef enum fill { POISON, NORMAL, POSITIVE, ONES, WHOLE, SMALL } fill; // SMALL: whole, -2 to 2

static void write_element(void *data, int64_t i, mt_dtype dtype, double value) {
    if (mt_dtype_is_half(dtype)) ((uint16_t *)data)[i] = mt_f32_to_half((float)value, dtype);
    if (dtype == MT_F32) ((float *)data)[i] = (float)value;
    if (dtype == MT_F64) ((double *)data)[i] = value;
}

static double read_element(const void *data, int64_t i, mt_dtype dtype) {
    if (mt_dtype_is_half(dtype)) return mt_half_to_f32(((const uint16_t *)data)[i], dtype);
    if (dtype == MT_I32) return ((const int32_t *)data)[i];
    return dtype == MT_F32 ? ((const float *)data)[i] : ((const double *)data)[i];
}

static void *upload(run *r, const void *data, int64_t count, mt_dtype dtype, bool is_output) {
    assert_true(r->num_buffers < MAX_BUFFERS);
    int64_t bytes = count * mt_dtype_size(dtype);
    void *device = r->ops->memory_alloc(bytes);
    r->ops->memory_copy(device, data, bytes, r->stream);
    r->ops->stream_synchronize(r->stream);
    r->buffers[r->num_buffers++] = (buffer){device, count, dtype, is_output};
    return device;
}

/* A new buffer of the run: the same numbers in every run of one shape. */
static void *numbers(run *r, mt_dtype dtype, int64_t count, fill with, bool is_output) {
    void *data = mt_malloc(count * mt_dtype_size(dtype));
    mt_dtype rounded = dtype == r->dtype && r->rounded != MT_F32 ? r->rounded : dtype;
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];
        mt_philox(words, r->seed + (uint64_t)r->num_buffers, (uint64_t)i, 0);
        double uniform = words[0] * 0x1p-32, value = NAN; // four of them make a nearly normal number
        if (with == NORMAL) value = (uniform + (words[1] + 0.0 + words[2] + words[3]) * 0x1p-32 - 2) * 1.7320508;
        if (with == POSITIVE) value = 0.5 + uniform;
        if (with == ONES) value = words[2] % 4 ? 1 : 0;
        if (with == WHOLE) value = (double)(words[0] % 127) - 63;
        if (with == SMALL) value = (double)(words[0] % 5) - 2;
        if (mt_dtype_is_half(rounded) && with != POISON)
            value = mt_half_to_f32(mt_f32_to_half((float)value, rounded), rounded);
        write_element(data, i, dtype, value);
    }
    void *device = upload(r, data, count, dtype, is_output);
    free(data);
    return device;
}

static void *input(run *r, int64_t count) {
    return numbers(r, r->dtype, count, NORMAL, false);
}
static void *output(run *r, int64_t count) {
    return numbers(r, r->dtype, count, POISON, true);
}
static void *changed(run *r, int64_t count) { // read and written
    return numbers(r, r->dtype, count, NORMAL, true);
}
static float *float_input(run *r, int64_t count, fill with) {
    mt_dtype dtype = r->dtype;
    r->dtype = MT_F64; // an fp32 input is not rounded in any run
    float *device = numbers(r, MT_F32, count, with, false);
    r->dtype = dtype;
    return device;
}
static float *float_output(run *r, int64_t count) {
    return numbers(r, MT_F32, count, POISON, true);
}
static float *float_changed(run *r, int64_t count, fill with) {
    float *device = float_input(r, count, with);
    r->buffers[r->num_buffers - 1].is_output = true;
    return device;
}

/* count whole numbers in [low, high), or a permutation of [0, high) cut off at count. */
static int32_t *integers(run *r, int64_t count, int64_t low, int64_t high, bool distinct) {
    int64_t room = distinct ? high : count;
    int32_t *data = mt_malloc(room * 4);
    for (int64_t i = 0; i < room; i++) {
        uint32_t words[4];
        mt_philox(words, r->seed + (uint64_t)r->num_buffers, (uint64_t)i, 1);
        data[i] = (int32_t)(distinct ? i : low + words[0] % (high - low));
        int64_t other = distinct ? words[0] % (i + 1) : i;
        int32_t swapped = data[i];
        data[i] = data[other], data[other] = swapped;
    }
    int32_t *device = upload(r, data, count, MT_I32, false);
    free(data);
    return device;
}

/* Names of tokens in the whole run: neighbours mostly, some beyond 32 bits. */
static int64_t *token_names(run *r, int64_t count) {
    int64_t *data = mt_malloc(count * 8);
    for (int64_t i = 0; i < count; i++) data[i] = (i % 7 == 6 ? (int64_t)1 << 33 : 1000003) + i;
    int64_t *device = upload(r, data, count, MT_I64, false);
    free(data);
    return device;
}

/* ---- the operations ---------------------------------------------------------------------------------------------- */

static void linear_forward(run *r, const int64_t *n) { // T, N, K, bias
    void *y = output(r, n[0] * n[1]), *x = input(r, n[0] * n[2]), *w = input(r, n[1] * n[2]);
    void *bias = n[3] ? input(r, n[1]) : NULL;
    r->ops->linear_forward(&(mt_linear_args){n[0], n[1], n[2], .x = x, .w = w, .bias = bias, .y = y}, r->dtype,
                           r->stream);
}

static void linear_backward_input(run *r, const int64_t *n) {
    void *dx = output(r, n[0] * n[2]), *dy = input(r, n[0] * n[1]), *w = input(r, n[1] * n[2]);
    r->ops->linear_backward_input(&(mt_linear_args){n[0], n[1], n[2], .w = w, .dy = dy, .dx = dx}, r->dtype, r->stream);
}

static void linear_backward_weight(run *r, const int64_t *n) {
    float *dw = n[4] ? float_output(r, n[1] * n[2]) : float_changed(r, n[1] * n[2], NORMAL);
    float *dbias = n[3] ? float_changed(r, n[1], NORMAL) : NULL;
    void *dy = input(r, n[0] * n[1]), *x = input(r, n[0] * n[2]);
    r->ops->linear_backward_weight(
        &(mt_linear_args){n[0], n[1], n[2], .x = x, .dy = dy, .dw = dw, .dbias = dbias, .accumulate = !n[4]}, r->dtype,
        r->stream);
}

static void column_sums(run *r, const int64_t *n) { // R, C
    void *x = input(r, n[0] * n[1]);
    r->ops->column_sums(float_changed(r, n[1], NORMAL), x, n[0], n[1], r->dtype, r->stream);
}

static void embedding_forward(run *r, const int64_t *n) { // T, C, first, count, vocabulary, accumulate
    void *out = n[5] ? changed(r, n[0] * n[1]) : output(r, n[0] * n[1]), *w = input(r, n[3] * n[1]);
    int32_t *ids = integers(r, n[0], 0, n[4], false);
    r->ops->embedding_forward(&(mt_embedding_args){n[0], n[1], n[2], n[3], ids, w, out, .accumulate = n[5]}, r->dtype,
                              r->stream);
}

static void embedding_backward(run *r, const int64_t *n) {
    float *dw = float_changed(r, n[3] * n[1], NORMAL);
    void *dout = input(r, n[0] * n[1]);
    int32_t *ids = integers(r, n[0], 0, n[4], false);
    r->ops->embedding_backward(&(mt_embedding_args){n[0], n[1], n[2], n[3], ids, .dout = dout, .dw = dw}, r->dtype,
                               r->stream);
}

static float weight_offset; // of norms

static void rmsnorm_forward(run *r, const int64_t *n) { // T, H, C, y's gap, x's gap, dresidual (0 none, 1, 2 in dx)
    mt_norm_args a = {.T = n[0], .H = n[1], .C = n[2], .eps = 1e-5f, .w_offset = weight_offset};
    a.y_stride = n[1] * n[2] + n[3], a.x_stride = n[1] * n[2] + n[4];
    a.y = output(r, n[0] * a.y_stride), a.x = input(r, n[0] * a.x_stride), a.w = input(r, n[2]);
    a.rstd = float_output(r, n[0] * n[1]);
    r->ops->rmsnorm_forward(&a, r->dtype, r->stream);
}

static void rmsnorm_backward(run *r, const int64_t *n) {
    mt_norm_args a = {.T = n[0], .H = n[1], .C = n[2], .w_offset = weight_offset};
    a.dx_stride = n[1] * n[2] + n[3], a.x_stride = a.dy_stride = n[1] * n[2] + n[4];
    a.dx = n[5] == 2 ? changed(r, n[0] * a.dx_stride) : output(r, n[0] * a.dx_stride);
    a.dresidual = n[5] == 2 ? a.dx : n[5] == 1 ? input(r, n[0] * a.dx_stride) : NULL;
    a.dy = input(r, n[0] * a.x_stride), a.x = input(r, n[0] * a.x_stride), a.w = input(r, n[2]);
    a.dw = float_changed(r, n[2], NORMAL), a.rstd = float_input(r, n[0] * n[1], POSITIVE);
    r->ops->rmsnorm_backward(&a, r->dtype, r->stream);
}

static void layernorm_forward(run *r, const int64_t *n) {
    int64_t T = n[0] * n[1], C = n[2];
    mt_norm_args a = {.T = T, .H = 1, .C = C, .eps = 1e-5f, .w_offset = weight_offset};
    if (n[3] > 0) a.y_stride = C + n[3];
    a.y = output(r, T * (C + n[3])), a.x = input(r, T * C), a.w = input(r, C), a.b = input(r, C);
    a.mean = float_output(r, T), a.rstd = float_output(r, T);
    r->ops->layernorm_forward(&a, r->dtype, r->stream);
}

static void layernorm_backward(run *r, const int64_t *n) {
    int64_t T = n[0] * n[1], C = n[2];
    mt_norm_args a = {.T = T, .H = 1, .C = C, .w_offset = weight_offset};
    if (n[4] > 0) a.dy_stride = C + n[4];
    a.dx = n[5] == 2 ? changed(r, T * C) : output(r, T * C);
    a.dresidual = n[5] == 2 ? a.dx : n[5] == 1 ? input(r, T * C) : NULL;
    a.dy = input(r, T * (C + n[4])), a.x = input(r, T * C), a.w = input(r, C);
    a.dw = float_changed(r, C, NORMAL), a.db = float_changed(r, C, NORMAL);
    a.mean = float_input(r, T, NORMAL), a.rstd = float_input(r, T, POSITIVE);
    r->ops->layernorm_backward(&a, r->dtype, r->stream);
}

/* Norms whose weights are stored less 1. */
static void with_offset(void (*test)(run *r, const int64_t *n), run *r, const int64_t *n) {
    weight_offset = 1;
    test(r, n);
    weight_offset = 0;
}
static void rmsnorm_forward_offset(run *r, const int64_t *n) {
    with_offset(rmsnorm_forward, r, n);
}
static void rmsnorm_backward_offset(run *r, const int64_t *n) {
    with_offset(rmsnorm_backward, r, n);
}
static void layernorm_forward_offset(run *r, const int64_t *n) {
    with_offset(layernorm_forward, r, n);
}
static void layernorm_backward_offset(run *r, const int64_t *n) {
    with_offset(layernorm_backward, r, n);
}

/* A row whose means are given: of all ranks. */
static void rmsnorm_forward_means(run *r, const int64_t *n) {
    int64_t T = n[0], C = n[1] * n[2];
    mt_norm_args a = {.T = T, .H = 1, .C = C, .eps = 1e-5f, .x_stride = C + n[4], .y_stride = C + n[3]};
    a.y = output(r, T * a.y_stride), a.x = input(r, T * a.x_stride), a.w = input(r, C);
    a.rstd = float_output(r, T), a.means = float_input(r, T, POSITIVE);
    r->ops->rmsnorm_forward(&a, r->dtype, r->stream);
}

static void rmsnorm_backward_means(run *r, const int64_t *n) {
    int64_t T = n[0], C = n[1] * n[2];
    mt_norm_args a = {.T = T, .H = 1, .C = C, .x_stride = C + n[4], .dy_stride = C + n[4], .dx_stride = C + n[3]};
    a.dx = output(r, T * a.dx_stride), a.dy = input(r, T * a.x_stride), a.x = input(r, T * a.x_stride);
    a.w = input(r, C), a.dw = float_changed(r, C, NORMAL), a.rstd = float_input(r, T, POSITIVE);
    a.means = float_input(r, T, NORMAL);
    r->ops->rmsnorm_backward(&a, r->dtype, r->stream);
}

static void row_means(run *r, const int64_t *n) {
    int64_t C = n[1] * n[2];
    mt_row_means_args a = {.T = n[0], .C = C, .a_stride = C + n[3], .b_stride = C + n[4], .w_offset = 1};
    a.means = float_output(r, a.T), a.a = input(r, a.T * a.a_stride), a.b = n[5] ? input(r, a.T * a.b_stride) : a.a;
    if (!n[5]) a.b_stride = a.a_stride;
    a.w = n[5] == 2 ? input(r, C) : NULL;
    r->ops->row_means(&a, r->dtype, r->stream);
}

/* Angles of R channels, for 50 positions. */
static mt_rotation rotation(run *r, int64_t T, int64_t R, bool interleaved) {
    mt_rotation rotation = {.R = R, .interleaved = interleaved};
    rotation.cos = float_input(r, 50 * R / 2 + 1, NORMAL), rotation.sin = float_input(r, 50 * R / 2 + 1, NORMAL);
    rotation.positions = integers(r, T, 0, 50, false);
    return rotation;
}

static void rope(run *r, const int64_t *n, mt_rope_forward_fn *rotate) { // T, H, D, R, y's gap, x's gap, interleaved
    mt_rope_args a = {.T = n[0], .H = n[1], .D = n[2]};
    a.y_stride = n[1] * n[2] + n[4], a.x_stride = n[1] * n[2] + n[5];
    a.x = n[5] < 0 ? NULL : input(r, n[0] * a.x_stride), a.y = a.x ? output(r, n[0] * a.y_stride) : NULL;
    if (!a.x) a.x = a.y = changed(r, n[0] * a.y_stride), a.x_stride = a.y_stride; // in place
    a.rotation = rotation(r, n[0], n[3], n[6]);
    rotate(&a, r->dtype, r->stream);
}
static void rope_forward(run *r, const int64_t *n) {
    rope(r, n, r->ops->rope_forward);
}
static void rope_backward(run *r, const int64_t *n) {
    rope(r, n, r->ops->rope_backward);
}

static void latent_heads_forward(run *r, const int64_t *n) { // T, H, N, R, Dv, interleaved
    int64_t heads = n[0] * n[1], width = n[2] + n[3];
    mt_latent_heads_args a = {.T = n[0], .H = n[1], .N = n[2], .Dv = n[4]};
    a.q = changed(r, heads * width), a.k = output(r, heads * width), a.v = output(r, heads * n[4]);
    a.kv = input(r, heads * (n[2] + n[4])), a.k_rope = input(r, n[0] * n[3]);
    a.rotation = rotation(r, n[0], n[3], n[5]);
    r->ops->latent_heads_forward(&a, r->dtype, r->stream);
}

static void latent_heads_backward(run *r, const int64_t *n) {
    int64_t heads = n[0] * n[1], width = n[2] + n[3];
    mt_latent_heads_args a = {.T = n[0], .H = n[1], .N = n[2], .Dv = n[4]};
    a.dq = changed(r, heads * width), a.dkv = output(r, heads * (n[2] + n[4])), a.dk_rope = output(r, n[0] * n[3]);
    a.dk = input(r, heads * width), a.dv = input(r, heads * n[4]);
    a.rotation = rotation(r, n[0], n[3], n[5]);
    r->ops->latent_heads_backward(&a, r->dtype, r->stream);
}

/* T, H, G, D, R, norm, interleaved, gap between rows; without norm and gap in place. */
static mt_qk_args make_qk(run *r, const int64_t *n) {
    mt_qk_args a = {.T = n[0], .H = n[1], .G = n[2], .D = n[3], .eps = 1e-5f, .w_offset = weight_offset};
    a.qkv_stride = a.dqkv_stride = (a.H + 2 * a.G) * a.D + n[7];
    a.qk_stride = a.dqk_stride = n[5] || n[7] ? (a.H + a.G) * a.D + 2 * n[7] : a.qkv_stride;
    a.rotation = rotation(r, n[0], n[4], n[6]);
    if (n[5]) a.q_w = input(r, a.D), a.k_w = input(r, a.D);
    return a;
}

static void qk_forward(run *r, const int64_t *n) {
    mt_qk_args a = make_qk(r, n);
    bool in_place = a.qk_stride == a.qkv_stride && !a.q_w;
    if (in_place)
        a.qkv = a.qk = changed(r, a.T * a.qkv_stride);
    else
        a.qkv = input(r, a.T * a.qkv_stride), a.qk = output(r, a.T * a.qk_stride);
    if (a.q_w) a.q_rstd = float_output(r, a.T * a.H), a.k_rstd = float_output(r, a.T * a.G);
    r->ops->qk_forward(&a, r->dtype, r->stream);
}

static void qk_forward_offset(run *r, const int64_t *n) {
    with_offset(qk_forward, r, n);
}

/* The same sizes with a cache. The part of k in qk is then not defined, so q is copied. */
static void qk_forward_to_cache(run *r, const int64_t *n) {
    mt_qk_args a = make_qk(r, n);
    int64_t rows = a.T + 3, q = a.H * a.D, kv = a.G * a.D;
    bool in_place = a.qk_stride == a.qkv_stride && !a.q_w;
    int32_t *to = integers(r, a.T, 0, rows, true);
    a.qkv = a.qk = input(r, a.T * a.qkv_stride);
    if (!in_place) a.qk = input(r, a.T * a.qk_stride);
    if (a.q_w) a.q_rstd = float_output(r, a.T * a.H), a.k_rstd = float_output(r, a.T * a.G);
    a.k_cache = changed(r, rows * kv), a.v_cache = changed(r, rows * kv), a.cache_rows = to;
    r->ops->qk_forward(&a, r->dtype, r->stream);
    r->ops->scatter_rows(
        &(mt_row_args){a.T, q, to, .from = a.qk, .to = changed(r, rows * q), .from_stride = a.qk_stride}, r->dtype,
        r->stream);
}

static void qk_backward(run *r, const int64_t *n) {
    mt_qk_args a = make_qk(r, n);
    bool in_place = a.qk_stride == a.qkv_stride && !a.q_w;
    a.dqk = in_place ? changed(r, a.T * a.qk_stride) : input(r, a.T * a.qk_stride);
    a.dqkv = in_place ? a.dqk : output(r, a.T * a.qkv_stride), a.qkv = input(r, a.T * a.qkv_stride);
    if (a.q_w) a.dq_w = float_changed(r, a.D, NORMAL), a.dk_w = float_changed(r, a.D, NORMAL);
    if (a.q_w) a.q_rstd = float_input(r, a.T * a.H, POSITIVE), a.k_rstd = float_input(r, a.T * a.G, POSITIVE);
    r->ops->qk_backward(&a, r->dtype, r->stream);
}

static void qk_backward_offset(run *r, const int64_t *n) {
    with_offset(qk_backward, r, n);
}

/* The clamp is within the values of the inputs. */
static mt_glu glu_of(const int64_t *n) {
    return n[5] ? (mt_glu){0.75f, n[5] > 1 ? 1 : 0} : (mt_glu){0, 0};
}

/* T, F, activation, weights, elements before the first, clamped (2: and an offset) */
static void activation_forward(run *r, const int64_t *n) {
    int64_t size = mt_dtype_size(r->dtype), width = mt_activation_rows[n[2]].gated ? 2 * n[1] : n[1];
    char *y = output(r, n[4] + n[0] * n[1]), *x = input(r, n[4] + n[0] * width);
    float *weights = n[3] ? float_input(r, n[0], NORMAL) : NULL;
    r->ops->activation_forward(&(mt_activation_args){n[0], n[1], (mt_activation)n[2], x + n[4] * size, weights,
                                                     .y = y + n[4] * size, .glu = glu_of(n)},
                               r->dtype, r->stream);
}

/* In place: of x if gated, else of dy. */
static void activation_backward(run *r, const int64_t *n) {
    bool gated = mt_activation_rows[n[2]].gated;
    int64_t at = n[4] * mt_dtype_size(r->dtype), count = n[0] * n[1];
    char *changes = changed(r, n[4] + (gated ? 2 * count : count)), *reads = input(r, n[4] + count);
    float *dweights = n[3] ? float_output(r, n[0]) : NULL, *weights = n[3] ? float_input(r, n[0], NORMAL) : NULL;
    const char *x = gated ? changes : reads, *dy = gated ? reads : changes;
    r->ops->activation_backward(&(mt_activation_args){n[0], n[1], (mt_activation)n[2], x + at, weights, .dy = dy + at,
                                                      .dx = changes + at, .dweights = dweights, .glu = glu_of(n)},
                                r->dtype, r->stream);
}

/* By the operations that they stand for where there is no fused one. */
static void linear_gelu_forward(run *r, const int64_t *n) { // T, N, K, bias
    void *y = output(r, n[0] * n[1]), *pre = output(r, n[0] * n[1]);
    void *x = input(r, n[0] * n[2]), *w = input(r, n[1] * n[2]), *bias = n[3] ? input(r, n[1]) : NULL;
    if (r->ops->linear_gelu_forward) {
        r->ops->linear_gelu_forward(
            &(mt_linear_args){n[0], n[1], n[2], .x = x, .w = w, .bias = bias, .pre = pre, .y = y}, r->dtype, r->stream);
        return;
    }
    r->ops->linear_forward(&(mt_linear_args){n[0], n[1], n[2], .x = x, .w = w, .bias = bias, .y = pre}, r->dtype,
                           r->stream);
    r->ops->activation_forward(&(mt_activation_args){n[0], n[1], MT_ACTIVATION_GELU_TANH, pre, NULL, .y = y}, r->dtype,
                               r->stream);
}

static void linear_backward_gelu(run *r, const int64_t *n) {
    void *dpre = output(r, n[0] * n[2]), *dy = input(r, n[0] * n[1]), *w = input(r, n[1] * n[2]);
    void *pre = input(r, n[0] * n[2]);
    if (r->ops->linear_backward_gelu) {
        r->ops->linear_backward_gelu(&(mt_linear_args){n[0], n[1], n[2], .x = pre, .w = w, .dy = dy, .dx = dpre},
                                     r->dtype, r->stream);
        return;
    }
    r->ops->linear_backward_input(&(mt_linear_args){n[0], n[1], n[2], .w = w, .dy = dy, .dx = dpre}, r->dtype,
                                  r->stream);
    r->ops->activation_backward(
        &(mt_activation_args){n[0], n[2], MT_ACTIVATION_GELU_TANH, pre, NULL, .dy = dpre, .dx = dpre}, r->dtype,
        r->stream);
}

static void dropout_add_forward(run *r, const int64_t *n) { // T, C, first channel, p in percent, residual
    mt_dropout dropout = {(double)n[3] / 100, 0x123456789abcdefull};
    void *out = output(r, n[0] * n[1]), *x = input(r, n[0] * n[1]), *residual = n[4] ? input(r, n[0] * n[1]) : NULL;
    r->ops->dropout_add_forward(
        &(mt_dropout_add_args){n[0], n[1], n[2], token_names(r, n[0]), x, residual, out, dropout}, r->dtype, r->stream);
}

static void dropout_add_backward(run *r, const int64_t *n) {
    mt_dropout dropout = {(double)n[3] / 100, 0x123456789abcdefull};
    void *dx = changed(r, n[0] * n[1]);
    r->ops->dropout_add_backward(
        &(mt_dropout_add_args){n[0], n[1], n[2], token_names(r, n[0]), dx, .out = dx, .dropout = dropout}, r->dtype,
        r->stream);
}

/* T, C, p in percent, sum (0 new, 1 in residual, 2 in x), LayerNorm; by the operations that it stands for if there is
 * no fused one. */
static void residual_norm_forward(run *r, const int64_t *n) {
    int64_t T = n[0], C = n[1];
    mt_norm_args a = {.T = T, .H = 1, .C = C, .eps = 1e-5f, .x_stride = C, .y_stride = C, .w_offset = weight_offset};
    void *x = n[3] == 2 ? changed(r, T * C) : input(r, T * C);
    void *residual = n[3] == 1 ? changed(r, T * C) : input(r, T * C);
    a.dropout = (mt_dropout){(double)n[2] / 100, 0x123456789abcdefull}, a.token_index = token_names(r, T);
    a.x = x, a.residual = residual;
    a.sum = n[3] == 2 ? x : n[3] == 1 ? residual : output(r, T * C), a.y = output(r, T * C);
    a.w = input(r, C), a.b = n[4] ? input(r, C) : NULL;
    a.mean = n[4] ? float_output(r, T) : NULL, a.rstd = float_output(r, T);
    if (r->ops->residual_norm_forward) {
        r->ops->residual_norm_forward(&a, r->dtype, r->stream);
        return;
    }
    r->ops->dropout_add_forward(&(mt_dropout_add_args){T, C, 0, a.token_index, x, residual, a.sum, a.dropout}, r->dtype,
                                r->stream);
    a.x = a.sum;
    (a.mean ? r->ops->layernorm_forward : r->ops->rmsnorm_forward)(&a, r->dtype, r->stream);
}

static void residual_norm_forward_offset(run *r, const int64_t *n) {
    with_offset(residual_norm_forward, r, n);
}

static void scale(run *r, const int64_t *n) { // elements, elements before the first
    char *x = changed(r, n[1] + n[0]);
    r->ops->scale(x + n[1] * mt_dtype_size(r->dtype), 1.7f, n[0], r->dtype, r->stream);
}

static void add(run *r, const int64_t *n) { // elements, elements before the first, y (0 new, 1 in a)
    int64_t size = mt_dtype_size(r->dtype);
    char *a = n[2] ? changed(r, n[1] + n[0]) : input(r, n[1] + n[0]), *b = input(r, n[1] + n[0]);
    char *y = n[2] ? a : (char *)output(r, n[1] + n[0]);
    r->ops->add(y + n[1] * size, a + n[1] * size, b + n[1] * size, n[0], r->dtype, r->stream);
}

static void position_scale(run *r, const int64_t *n) { // T, width, gap
    mt_position_scale_args a = {.T = n[0], .width = n[1], .x_stride = n[1] + n[2], .beta = 0.1, .context = 7};
    a.x = changed(r, n[0] * a.x_stride), a.positions = integers(r, n[0], 0, 100, false);
    r->ops->position_scale(&a, r->dtype, r->stream);
}

static void scatter_add_rows(run *r, const int64_t *n) { // T, C, -, rows of the sum, row numbers
    float *sum = float_changed(r, n[3] * n[1], NORMAL);
    void *from = input(r, n[0] * n[1]);
    int32_t *rows = integers(r, n[0], -1, n[4], false);
    r->ops->scatter_add_rows(&(mt_row_args){n[0], n[1], rows, .from = from, .to = sum, .count = n[3]}, r->dtype,
                             r->stream);
}

static void scatter_rows(run *r, const int64_t *n) { // T, width, to's gap, from's gap
    void *to = output(r, 2 * n[0] * (n[1] + n[2])), *from = input(r, n[0] * (n[1] + n[3]));
    int32_t *rows = integers(r, n[0], 0, 2 * n[0], true);
    r->ops->scatter_rows(
        &(mt_row_args){n[0], n[1], rows, .from = from, .to = to, .from_stride = n[1] + n[3], .to_stride = n[1] + n[2]},
        r->dtype, r->stream);
}

static void gather_rows(run *r, const int64_t *n) {
    void *to = output(r, n[0] * (n[1] + n[2])), *from = input(r, 2 * n[0] * (n[1] + n[3]));
    int32_t *rows = integers(r, n[0], -3, 2 * n[0], false); // some are zeros
    r->ops->gather_rows(
        &(mt_row_args){n[0], n[1], rows, .from = from, .to = to, .from_stride = n[1] + n[3], .to_stride = n[1] + n[2]},
        r->dtype, r->stream);
}

static void copy_rows(run *r, const int64_t *n) { // the first half through host memory
    int64_t size = mt_dtype_size(r->dtype), width = n[1] * size, gap = n[3] * size;
    void *to = output(r, n[0] * (n[1] + n[2])), *from = input(r, n[0] * (n[1] + n[3]));
    char *host = r->ops->memory_alloc_host(n[0] * (width + gap));
    r->ops->memory_copy_rows(host, width + gap, from, width + gap, n[0], width, r->stream);
    r->ops->memory_copy_rows(to, (n[1] + n[2]) * size, host, width + gap, n[0] / 2, width, r->stream);
    to = (char *)to + n[0] / 2 * (n[1] + n[2]) * size, from = (char *)from + n[0] / 2 * (width + gap);
    r->ops->memory_copy_rows(to, (n[1] + n[2]) * size, from, width + gap, n[0] - n[0] / 2, width, r->stream);
    r->ops->stream_synchronize(r->stream);
    r->ops->memory_free_host(host);
}

/* ---- mixture of experts ------------------------------------------------------------------------------------------ */

static int32_t *int_output(run *r, int64_t count) {
    int32_t *device = integers(r, count, -9, -8, false);
    r->buffers[r->num_buffers - 1].is_output = true;
    return device;
}

/* Sizes: T, E, k, how (bits below), groups, group_topk, S, group_best. */
enum {
    SIGMOID = 1,
    PRE_SOFTMAX = 2,
    BIASED = 4,
    EQUALS = 8,
    WRONG = 16,
    ONE_SEQUENCE = 32,
    PADDED = 64,
    SOFTPLUS = 128,
    OF_LOGITS = 256 // the bias
};

static mt_router router_of(const int64_t *n) {
    return (mt_router){.num_experts = n[1],
                       .topk = n[2],
                       .score = n[3] & SIGMOID    ? MT_SCORE_SIGMOID
                                : n[3] & SOFTPLUS ? MT_SCORE_SQRT_SOFTPLUS
                                                  : MT_SCORE_SOFTMAX,
                       .pre_softmax = (n[3] & PRE_SOFTMAX) != 0,
                       .num_groups = n[4],
                       .group_topk = n[5],
                       .group_best = n[7],
                       .bias_of_logits = (n[3] & OF_LOGITS) != 0,
                       .scaling = 1.5f};
}

/* logits[T, E]; with EQUALS multiples of 1/4, many of them equal; with WRONG some tokens have a NaN. */
static float *logits_of(run *r, const int64_t *n) {
    float *data = mt_malloc(n[0] * n[1] * 4);
    for (int64_t i = 0; i < n[0] * n[1]; i++) {
        uint32_t words[4];
        mt_philox(words, r->seed + 77, (uint64_t)i, 2);
        double normal = (words[0] + (words[1] + 0.0 + words[2] + words[3]) - 0x1p33) * 0x1p-32 * 3.5;
        data[i] = (float)(n[3] & EQUALS ? floor(normal * 4) / 4 : normal);
        bool wrong = (n[3] & WRONG) && i / n[1] % 5 == 2 && i % n[1] == i / n[1] % n[1];
        if (wrong) data[i] = i % 2 ? NAN : i % 3 ? INFINITY : -INFINITY;
    }
    float *device = upload(r, data, n[0] * n[1], MT_F32, false);
    free(data);
    return device;
}

/* k of E experts for each of T tokens, low numbers more often; one in `dropped` of them -1, or if it is negative those
 * of one token in -dropped. */
static int32_t *choices_of(run *r, int64_t T, int64_t E, int64_t k, int64_t dropped) {
    int32_t *data = mt_malloc(T * k * 4);
    for (int64_t i = 0; i < T * k; i++) {
        uint32_t words[4];
        mt_philox(words, r->seed + 99, (uint64_t)i, 3);
        double uniform = words[0] * 0x1p-32;
        int32_t expert = (int32_t)((double)E * uniform * uniform);
        for (int64_t j = i / k * k; j < i; j++)
            if (data[j] == expert) expert = (int32_t)((expert + 1) % E), j = i / k * k - 1;
        data[i] = expert;
    }
    for (int64_t i = 0; dropped > 0 && i < T * k; i++)
        if (i * 40503 % dropped == 0) data[i] = -1;
    for (int64_t i = 0; dropped < 0 && i < T * k; i++)
        if (i / k % -dropped == 0) data[i] = -1;
    int32_t *device = upload(r, data, T * k, MT_I32, false);
    free(data);
    return device;
}

/* Token indices, some negative, between others and at the end; NULL without PADDED. */
static int64_t *padding_of(run *r, const int64_t *n) {
    if (!(n[3] & PADDED)) return NULL;
    int64_t *data = mt_malloc(n[0] * 8);
    for (int64_t t = 0; t < n[0]; t++) data[t] = t % 3 == 1 || t >= n[0] - n[0] / 5 ? -1 - t % 2 : t;
    int64_t *device = upload(r, data, n[0], MT_I64, false);
    free(data);
    return device;
}

static int32_t *sequences_of(run *r, const int64_t *n) {
    return n[3] & ONE_SEQUENCE ? NULL : integers(r, n[0], 0, n[6], false);
}

static void router_logits(run *r, const int64_t *n) { // T, E, C, bias
    float *logits = float_output(r, n[0] * n[1]);
    void *x = input(r, n[0] * n[2]), *w = input(r, n[1] * n[2]);
    void *bias = n[3] ? input(r, n[1]) : NULL;
    r->ops->router_logits(&(mt_linear_args){n[0], n[1], n[2], .x = x, .w = w, .bias = bias, .y = logits}, r->dtype,
                          r->stream);
}

static void random_logits(run *r, const int64_t *n) {
    int64_t *index = token_names(r, n[0]);
    r->ops->random_logits(float_output(r, n[0] * n[1]), index, n[0], n[1], 77, r->stream);
}

static void route_forward(run *r, const int64_t *n) {
    mt_router router = router_of(n);
    float *probs = float_output(r, n[0] * n[2]), *logits = logits_of(r, n);
    float *bias = n[3] & BIASED ? float_input(r, n[1], POSITIVE) : NULL;
    int32_t *experts = int_output(r, n[0] * n[2]), *invalid = int_output(r, 1);
    r->ops->route_forward(&(mt_route_args){n[0], &router, logits, .bias = bias, .token_index = padding_of(r, n),
                                           .probs = probs, .experts = experts, .invalid = invalid},
                          r->stream);
}

static void route_sinkhorn(run *r, const int64_t *n) { // a part of the tokens
    mt_router router = {.num_experts = n[1],
                        .topk = n[2],
                        .score = n[2] == 1 ? MT_SCORE_SIGMOID : MT_SCORE_SOFTMAX,
                        .pre_softmax = n[2] > 1};
    router.scaling = 1.5f;
    int64_t first = n[0] / 3, count = n[0] - n[0] / 2;
    float *probs = float_output(r, count * n[2]), *logits = logits_of(r, n);
    int32_t *experts = int_output(r, count * n[2]), *invalid = int_output(r, 1);
    r->ops->route_sinkhorn(&(mt_route_args){n[0], &router, logits, .token_index = padding_of(r, n), .first = first,
                                            .count = count, .probs = probs, .experts = experts, .invalid = invalid},
                           r->stream);
}

static void route_backward(run *r, const int64_t *n) {
    mt_router router = router_of(n);
    float *dlogits = float_output(r, n[0] * n[1]), *dprobs = float_input(r, n[0] * n[2], NORMAL);
    float *logits = float_input(r, n[0] * n[1], NORMAL);
    int32_t *experts = choices_of(r, n[0], n[1], n[2], n[3] & PADDED ? -3 : 0);
    r->ops->route_backward(
        &(mt_route_args){n[0], &router, logits, .experts = experts, .dprobs = dprobs, .dlogits = dlogits}, r->stream);
}

static void aux_loss_forward(run *r, const int64_t *n) {
    mt_router router = router_of(n);
    float *sums = float_output(r, 2 * n[6] * n[1]), *logits = n[3] & WRONG ? NULL : logits_of(r, n);
    double *z_sum = numbers(r, MT_F64, 1, POSITIVE, true);
    if (!logits) logits = float_input(r, n[0] * n[1], NORMAL);
    r->ops->aux_loss_forward(
        &(mt_aux_loss_args){n[6], n[0], &router, logits, sequences_of(r, n), padding_of(r, n), sums, .z_sum = z_sum},
        r->stream);
}

static void aux_loss_value(run *r, const int64_t *n) { // of sequences without tokens too
    mt_router router = router_of(n);
    float *sums = float_output(r, 2 * n[6] * n[1]), *logits = float_input(r, n[0] * n[1], NORMAL);
    double *z_sum = numbers(r, MT_F64, 1, POSITIVE, false), *loss = numbers(r, MT_F64, 1, POSITIVE, true);
    r->ops->aux_loss_forward(
        &(mt_aux_loss_args){n[6], n[0], &router, logits, sequences_of(r, n), padding_of(r, n), sums, .z_sum = z_sum},
        r->stream);
    r->ops->aux_loss_value(loss, sums, n[6], n[1], r->stream);
}

static void aux_loss_backward(run *r, const int64_t *n) {
    mt_router router = router_of(n);
    float *dlogits = float_changed(r, n[0] * n[1], NORMAL), *logits = float_input(r, n[0] * n[1], NORMAL);
    float *counts = float_input(r, n[6] * n[1], ONES);
    r->ops->aux_loss_backward(&(mt_aux_loss_args){n[6], n[0], &router, logits, sequences_of(r, n), padding_of(r, n),
                                                  .counts = counts, .aux_scale = 0.7f, .z_scale = 0.3f,
                                                  .dlogits = dlogits},
                              r->stream);
}

static void count_experts(run *r, const int64_t *n) { // T, E, k
    float *loads = float_changed(r, n[1], ONES);
    r->ops->count_experts(loads, choices_of(r, n[0], n[1], n[2], 7), n[0] * n[2], n[1], r->stream);
}

static void drop_tokens(run *r, const int64_t *n) { // T, E, k, first, count, capacity, by position
    int64_t T = n[0], k = n[2], *index = mt_malloc(T * 8);
    float *probs = mt_malloc(T * k * 4);
    for (int64_t t = 0; t < T; t++) index[t] = ((int64_t)1 << 33) * (t % 3) + t * 40503 % T / 2; // pairs of equals
    for (int64_t i = 0; i < T * k; i++) probs[i] = (float)(i * 48271 % 11) / 16;
    int64_t *token_index = upload(r, index, T, MT_I64, false);
    float *weights = upload(r, probs, T * k, MT_F32, false);
    int32_t *kept = int_output(r, n[4] * k), *experts = choices_of(r, T, n[1], k, 13);
    mt_drop_args a = {T, k, n[3], n[4], n[5], experts, n[6] ? NULL : weights, token_index, kept};
    r->ops->drop_tokens(&a, r->stream);
    free(index), free(probs);
}

static void dispatch_plan(run *r, const int64_t *n) { // T, E, k, first, count, local, copies, capacity
    mt_dispatch dispatch = {n[2], n[3], n[4], n[5], n[6], n[7]};
    int64_t places = n[4] * n[6], choices = n[0] * n[2] * n[6], M = n[7] > 0 ? places * n[7] : choices + 5;
    int32_t *offsets = int_output(r, places + 1), *position = int_output(r, choices);
    int32_t *choice = int_output(r, M), *token = int_output(r, M), *experts = choices_of(r, n[0], n[1], n[2], 17);
    r->ops->dispatch_plan(&(mt_dispatch_args){n[0], M, &dispatch, .experts = experts, .offsets = offsets,
                                              .position = position, .row_choice = choice, .row_token = token},
                          r->stream);
}

static void exchange_order(run *r, const int64_t *n) { // sources, local, most rows
    int64_t segments = n[0] * n[1], M = 0;
    int32_t *counts = mt_malloc(segments * 4);
    for (int64_t i = 0; i < segments; i++) {
        counts[i] = (int32_t)(i % 5 == 2 ? 0 : i * 48271 % (n[2] + 1));
        M += counts[i];
    }
    int32_t *device = upload(r, counts, segments, MT_I32, false), *offsets = int_output(r, n[1] + 1);
    int32_t *to_expert = int_output(r, M + 1), *from_expert = int_output(r, M + 1);
    r->ops->exchange_order(to_expert, from_expert, offsets, device, n[0], n[1], M, r->stream);
    free(counts);
}

static void combine_rows(run *r, const int64_t *n) { // T, rows for each, C, base (0 none, 1, 2 in out)
    void *out = n[3] == 2 ? changed(r, n[0] * n[2]) : output(r, n[0] * n[2]);
    void *base = n[3] == 2 ? out : n[3] == 1 ? input(r, n[0] * n[2]) : NULL, *in = input(r, 50 * n[2]);
    int32_t *position = integers(r, n[0] * n[1], -9, 50, false);
    r->ops->combine_rows(&(mt_combine_args){n[0], n[1], n[2], .in = in, .position = position, .base = base, .out = out},
                         r->dtype, r->stream);
}

/* Offsets of E experts: few rows for the first, and a tenth of the M rows of no expert. */
static int32_t *expert_offsets(run *r, int64_t M, int64_t E) {
    int32_t *data = mt_malloc((E + 1) * 4);
    for (int64_t e = 0; e <= E; e++) data[e] = (int32_t)((M - M / 10) * e * e / (E * E));
    int32_t *device = upload(r, data, E + 1, MT_I32, false);
    free(data);
    return device;
}

static void grouped_bias_forward(run *r, const int64_t *n) { // M, N, E
    void *y = changed(r, n[0] * n[1]), *bias = input(r, n[2] * n[1]);
    r->ops->grouped_bias_forward(y, bias, expert_offsets(r, n[0], n[2]), n[0], n[1], n[2], r->dtype, r->stream);
}

static void grouped_bias_backward(run *r, const int64_t *n) {
    void *dy = input(r, n[0] * n[1]);
    float *dbias = float_changed(r, n[2] * n[1], NORMAL);
    r->ops->grouped_bias_backward(dbias, dy, expert_offsets(r, n[0], n[2]), n[0], n[1], n[2], r->dtype, r->stream);
}

static void scale_rows_forward(run *r, const int64_t *n) { // M, C, in place
    void *y = n[2] ? changed(r, n[0] * n[1]) : output(r, n[0] * n[1]), *x = n[2] ? y : input(r, n[0] * n[1]);
    r->ops->scale_rows_forward(&(mt_scale_rows_args){n[0], n[1], float_input(r, n[0], NORMAL), .x = x, .y = y},
                               r->dtype, r->stream);
}

static void scale_rows_backward(run *r, const int64_t *n) {
    void *dx = changed(r, n[0] * n[1]), *x = input(r, n[0] * n[1]);
    float *dweights = float_output(r, n[0]), *weights = float_input(r, n[0], NORMAL);
    r->ops->scale_rows_backward(
        &(mt_scale_rows_args){n[0], n[1], weights, .x = x, .dy = dx, .dx = dx, .dweights = dweights}, r->dtype,
        r->stream);
}

static void expert_bias_step(run *r, const int64_t *n) { // -, E
    float *bias = float_changed(r, n[1], NORMAL), *loads = float_changed(r, n[1], ONES);
    float *scale = float_changed(r, 1, ONES);
    r->ops->expert_bias_step(bias, loads, scale, n[1], 0.25f, r->stream);
}

/* Of a bad step the bias stays. */
static void quantile_bias_step(run *r, const int64_t *n) { // E, ema in percent, sign of the scale
    float *bias = float_changed(r, n[0], NORMAL), *sums = float_input(r, n[0] + 1, POSITIVE), sign = (float)n[2];
    float *scale = upload(r, &sign, 1, MT_F32, false);
    r->ops->quantile_bias_step(bias, sums, scale, n[0], (double)n[1] / 100, r->stream);
}

static void quantile_sums(run *r, const int64_t *n) { // as router_shapes, with k < E
    float *logits = logits_of(r, n), *bias = float_input(r, n[1], NORMAL), *sums = float_changed(r, n[1] + 1, NORMAL);
    int64_t *index = n[3] & PADDED ? padding_of(r, n) : token_names(r, n[0]);
    r->ops->quantile_sums(&(mt_quantile_args){n[0], n[1], n[2], logits, bias, index, sums}, r->stream);
}

static mt_cross_entropy_args tokens_of(const int64_t *n) { // T, stride, first, count, vocabulary, entropy
    bool scales = n[0] % 2;
    return (mt_cross_entropy_args){.T = n[0],
                                   .stride = n[1],
                                   .first = n[2],
                                   .count = n[3],
                                   .logit_scale = scales ? 0.75f : 0,
                                   .loss_scale = scales ? 1024 : 0};
}

/* The operation only asks for the presence of `entropy`. */
static float absent_entropy;

static void cross_entropy_forward(run *r, const int64_t *n) {
    mt_cross_entropy_args a = tokens_of(n);
    a.logits = input(r, n[0] * n[1]), a.labels = integers(r, n[0], 0, n[4], false);
    a.stats = float_output(r, (n[5] ? 4 : 3) * n[0]), a.entropy = n[5] ? &absent_entropy : NULL;
    r->ops->cross_entropy_forward(&a, r->dtype, r->stream);
}

static void cross_entropy_combine(run *r, const int64_t *n) {
    enum { SHARES = 3 };
    mt_cross_entropy_args a = tokens_of(n);
    int64_t numbers_a_row = n[5] ? 4 : 3;
    a.stats = float_output(r, numbers_a_row * n[0]), a.entropy = n[5] ? &absent_entropy : NULL;
    float *parts = float_input(r, SHARES * numbers_a_row * n[0], POSITIVE);
    r->ops->cross_entropy_combine(&a, parts, SHARES, r->stream);
}

static void cross_entropy_loss(run *r, const int64_t *n) {
    mt_cross_entropy_args a = tokens_of(n);
    a.logp = float_output(r, n[0]), a.entropy = n[5] ? float_output(r, n[0]) : NULL, a.lse = float_output(r, n[0]);
    a.stats = float_input(r, (n[5] ? 4 : 3) * n[0], POSITIVE);
    r->ops->cross_entropy_loss(&a, r->stream);
}

static void cross_entropy_backward(run *r, const int64_t *n) {
    mt_cross_entropy_args a = tokens_of(n);
    a.logits = a.dlogits = changed(r, n[0] * n[1]), a.labels = integers(r, n[0], 0, n[4], false);
    a.lse = float_input(r, n[0], POSITIVE), a.dlogp = float_input(r, n[0], NORMAL);
    a.entropy = n[5] ? float_input(r, n[0], POSITIVE) : NULL;
    a.dentropy = n[5] ? float_input(r, n[0], NORMAL) : NULL;
    r->ops->cross_entropy_backward(&a, r->dtype, r->stream);
}

static void nll_loss(run *r, const int64_t *n) {
    double *sums = numbers(r, MT_F64, 2, NORMAL, true);
    float *dlogp = float_output(r, n[0]);
    float *logp = float_input(r, n[0], POSITIVE), *weights = float_input(r, n[0], ONES);
    r->ops->nll_loss(sums, dlogp, logp, weights, n[0], r->stream);
}

/* The argmax, or a draw from one token, whose log-probability is 0: whole numbers. bf16 logits have equals. See
 * test_cuda_decode for other draws. */
static void sample(run *r, const int64_t *n) { // T, stride, -, columns, -, draws
    const mt_sampling sampling = {.temperature = (double)n[5], .top_k = 1, .top_p = 1};
    mt_sample_args a = {.T = n[0], .stride = n[1], .count = n[3], .sampling = &sampling};
    a.logits = input(r, n[0] * n[1]), a.uniforms = numbers(r, MT_F64, n[0], ONES, false);
    a.sampled = (mt_sampled *)integers(r, 3 * n[0], -9, -1, false);
    r->buffers[r->num_buffers - 1].is_output = true;
    r->ops->sample(&a, r->dtype, r->stream);
}

static void accumulate(run *r, const int64_t *n) { // elements, elements before the first
    char *sum = changed(r, n[1] + n[0]);
    float *x = float_input(r, n[1] + n[0], NORMAL);
    r->ops->accumulate(sum + n[1] * mt_dtype_size(r->dtype), x + n[1], n[0], r->dtype, r->stream);
}

static void squared_norm(run *r, const int64_t *n) { // elements, elements before the first
    double *sum = numbers(r, MT_F64, 1, POSITIVE, true);
    char *x = input(r, n[1] + n[0]);
    r->ops->squared_norm(sum, x + n[1] * mt_dtype_size(r->dtype), n[0], r->dtype, r->stream);
}

static void gradient_scale(run *r, const int64_t *n) { // clip in percent, loss scale, replicas are infinite
    double *sum = numbers(r, MT_F64, 1, POSITIVE, false), *tokens = numbers(r, MT_F64, 1, POSITIVE, false);
    double *replicas = numbers(r, MT_F64, 1, POSITIVE, false), infinity = INFINITY;
    float *scale = float_output(r, 1), *norm = float_output(r, 1);
    if (n[2]) r->ops->memory_copy(replicas, &infinity, sizeof infinity, r->stream);
    r->ops->gradient_scale(scale, norm, sum, replicas, tokens, (double)n[1], (float)n[0] / 100, r->stream);
}

static void step_guard(run *r, const int64_t *n) { // steps averaged, window, factor in percent, norm is inf, no tokens
    double *guard = numbers(r, MT_F64, MT_GUARD_NUMBERS, POSITIVE, true), steps = (double)n[0];
    double *loss = numbers(r, MT_F64, 1, POSITIVE, false), *tokens = numbers(r, MT_F64, 1, POSITIVE, false);
    float *scale = float_changed(r, 1, POSITIVE), *norm = float_input(r, 1, POSITIVE), infinity = INFINITY;
    mt_guard_rules rules = {.finite = true, .spike_factor = (double)n[2] / 100, .window = n[1], .copies = 2};
    r->ops->memory_copy(guard + MT_GUARD_STEPS, &steps, sizeof steps, r->stream);
    if (n[3]) r->ops->memory_copy(norm, &infinity, sizeof infinity, r->stream);
    if (n[4]) r->ops->memory_zero(tokens, 8, r->stream);
    r->ops->step_guard(guard, scale, loss, tokens, norm, &rules, r->stream);
}

typedef void update_operation(const mt_update_args *a, const mt_update *update, mt_stream *stream);

/* A step with one or two states; n: elements, elements before the first. */
static void update_step(run *r, const int64_t *n, update_operation *step, bool two_states) {
    int64_t first = n[1], room = n[0] + first;
    mt_update update = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 - 0.9f, 1 - 0.95f};
    bool is_half = r->dtype != MT_F32 || r->rounded != MT_F32;
    char *param = is_half ? output(r, room) : changed(r, room);
    float *master = is_half ? float_changed(r, room, NORMAL) : NULL;
    float *m = float_changed(r, room, NORMAL), *v = two_states ? float_changed(r, room, POSITIVE) : NULL;
    float *grad = float_input(r, room, NORMAL), *scale = float_input(r, 1, POSITIVE);
    mt_update_args a = {.n = n[0], .m = m + first, .v = v ? v + first : NULL, .grad = grad + first, .scale = scale};
    if (r->dtype == MT_F32 && is_half) { // the answer in fp32: the step on `master`, whose copy is the parameter
        a.param = master + first;
        step(&a, &update, r->stream);
        r->ops->memory_copy((float *)param + first, master + first, n[0] * 4, r->stream);
        return;
    }
    a.param = param + first * mt_dtype_size(r->dtype);
    a.dtype = r->dtype, a.master = master ? master + first : NULL;
    step(&a, &update, r->stream);
}

static void adamw_step(run *r, const int64_t *n) {
    update_step(r, n, r->ops->adamw_step, true);
}

static void sgd_step(run *r, const int64_t *n) {
    update_step(r, n, r->ops->sgd_step, false);
}

static void lion_step(run *r, const int64_t *n) {
    update_step(r, n, r->ops->lion_step, false);
}

static void random_normal(run *r, const int64_t *n) { // elements, elements before the first, first
    char *param = output(r, n[1] + n[0]);
    r->ops->random_normal(param + n[1] * mt_dtype_size(r->dtype), n[0], 0xfeedfacecafebeefull, n[2], 0.5f, 0.02f,
                          r->dtype, r->stream);
}

static void convert(run *r, const int64_t *n) { // elements, elements before the first
    float *wide = float_input(r, n[1] + n[0], NORMAL), *back = float_output(r, n[1] + n[0]);
    char *narrow = output(r, n[1] + n[0]);
    int64_t skipped = n[1] * mt_dtype_size(r->dtype);
    r->ops->convert(narrow + skipped, r->dtype, wide + n[1], MT_F32, n[0], r->stream);
    r->ops->convert(back + n[1], MT_F32, narrow + skipped, r->dtype, n[0], r->stream);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

typedef enum span_kind { ONE, FULL, PACKED, DECODE, SHARED_KEYS, FEW_KEYS, CONTINUED, PIECES, WINDOWS } span_kind;

/* Fills spans for about T queries; returns their number and the rows of q and of k. */
static int64_t make_spans(mt_span *spans, span_kind kind, int64_t T, int64_t *queries, int64_t *keys) {
    int64_t count = 0;
    *queries = *keys = T;
    if (kind == ONE || kind == FULL) spans[count++] = (mt_span){0, T, 0, T, kind == ONE};
    if (kind == PACKED) // lengths 1, 3, 9, 27, ... and the last two rows in no span
        for (int64_t start = 0, length = 1; start < T - 2; start += length, length *= 3) {
            if (length > T - 2 - start) length = T - 2 - start;
            spans[count++] = (mt_span){start, length, start, length, true};
        }
    if (kind == WINDOWS) // of images: of 1, 8, 27, ... patches, which see one another
        for (int64_t start = 0, side = 1, length = 1; start < T; start += length, side++) {
            length = side * side * side < T - start ? side * side * side : T - start;
            spans[count++] = (mt_span){start, length, start, length, false};
        }
    if (kind == DECODE) { // T sequences of one new token, keys in caches of 40 rows each
        *keys = 40 * T;
        for (int64_t t = 0; t < T; t++) spans[count++] = (mt_span){t, 1, 40 * t, 1 + t * 7 % 40, true};
    }
    if (kind == SHARED_KEYS) { // queries in two halves that see all keys of the first, as context parallelism has them
        int64_t half = T / 2;
        spans[count++] = (mt_span){0, half, 0, half, true};
        spans[count++] = (mt_span){half, T - half, 0, half, false};
        spans[count - 1].k_len = half;
    }
    if (kind == CONTINUED) { // two texts; the first has earlier tokens
        int64_t rows = T + 9, half = T / 2;
        *keys = 2 * rows;
        spans[count++] = (mt_span){0, half, 0, half + 9, true};
        spans[count++] = (mt_span){half, T - half, rows, T - half, true};
    }
    if (kind == PIECES) { // of a rank in context parallelism: the first and the last sequence go on elsewhere
        int64_t third = T / 3;
        spans[count++] = (mt_span){0, third, 0, third, true};
        spans[count++] = (mt_span){third, 1, third, 1, true};
        spans[count++] = (mt_span){third + 1, T - third - 1, third + 1, T - third - 1, true};
    }
    if (kind == FEW_KEYS) { // the first queries see nothing
        *keys = T / 2;
        spans[count++] = (mt_span){0, T, 0, T / 2, true};
    }
    return count;
}

static bool has_biases; // by distance: see attention_forward_biased

/* Sizes: T, heads, groups, D, Dv, window, spans, dropout in percent. */
typedef struct attention_case {
    mt_span spans[64];
    mt_attention call;
    int64_t queries, keys;
} attention_case;

static void make_attention(attention_case *a, run *r, const int64_t *n) {
    int64_t D = n[3], Dv = n[4], H = n[1], G = n[2];
    int64_t count = make_spans(a->spans, (span_kind)n[6], n[0], &a->queries, &a->keys);
    mt_span *spans = r->ops->memory_alloc(count * (int64_t)sizeof *spans);
    r->ops->memory_copy(spans, a->spans, count * (int64_t)sizeof *spans, r->stream);
    r->buffers[r->num_buffers++] = (buffer){spans, 0, MT_U8, false};
    bool latent = H == G && D != Dv; // whose q, k and v are arrays of their own; other layers have one for all
    bool fused = !latent && a->queries == a->keys;
    int64_t width = (H + G) * D + G * Dv, size = mt_dtype_size(r->dtype);
    a->call = (mt_attention){.num_heads = H,
                             .num_groups = G,
                             .head_size = D,
                             .value_size = Dv,
                             .q_stride = fused ? width : H * D,
                             .k_stride = fused ? width : G * D,
                             .v_stride = fused ? width : G * Dv,
                             .out_stride = H * Dv,
                             .window = has_biases ? 0 : n[5],
                             .spans = {a->spans, spans, count},
                             .scale = 1 / sqrtf((float)D),
                             .dropout = {(double)n[7] / 100, 0xabcdef0123ull}};
    if (n[7] > 0) {
        a->call.q_index = token_names(r, a->queries);
        a->call.k_index = token_names(r, a->keys);
        a->call.first_head = 3;
    }
    a->call.q = input(r, fused ? a->queries * width : a->queries * H * D);
    a->call.k = fused ? (const char *)a->call.q + H * D * size : input(r, a->keys * G * D);
    a->call.v = fused ? (const char *)a->call.q + (H + G) * D * size : input(r, a->keys * G * Dv);
    if (!has_biases) return;
    int64_t buckets = llabs(n[5]), most = buckets < 16 ? 20 : buckets > 32 ? 1000 : 128;
    a->call.bias = (mt_relative_bias){
        .w = input(r, buckets * H), .buckets = buckets, .max_distance = most, .bidirectional = n[5] > 0};
}

static void attention_forward(run *r, const int64_t *n) {
    attention_case a;
    make_attention(&a, r, n);
    a.call.out = output(r, a.queries * n[1] * n[4]);
    a.call.lse = float_output(r, a.queries * n[1]);
    r->ops->attention_forward(&a.call, r->dtype, r->stream);
}

static void attention_backward(run *r, const int64_t *n) {
    attention_case a;
    make_attention(&a, r, n);
    mt_attention *c = &a.call;
    c->out = numbers(r, r->dtype, a.queries * n[1] * n[4], POISON, false);
    c->dout = input(r, a.queries * n[1] * n[4]);
    c->lse = numbers(r, MT_F32, a.queries * n[1], POISON, false);
    c->row_dot = float_input(r, a.queries * n[1], NORMAL);
    int64_t size = mt_dtype_size(r->dtype);
    bool fused = c->q_stride != n[1] * n[3];
    char *dq = c->dq = output(r, a.queries * c->q_stride);
    c->dk = fused ? dq + n[1] * n[3] * size : output(r, a.keys * c->k_stride);
    c->dv = fused ? dq + (n[1] + n[2]) * n[3] * size : output(r, a.keys * c->v_stride);
    if (has_biases) c->bias.dw = float_changed(r, c->bias.buckets * n[1], NORMAL);
    r->ops->attention_forward(c, r->dtype, r->stream);
    r->ops->attention_backward(c, r->dtype, r->stream);
}

/* n[5]: buckets of distances; less than 0: those of a decoder, where later keys have none of their own. */
static void attention_forward_biased(run *r, const int64_t *n) {
    has_biases = true;
    attention_forward(r, n);
    has_biases = false;
}
static void attention_backward_biased(run *r, const int64_t *n) {
    has_biases = true;
    attention_backward(r, n);
    has_biases = false;
}

/* ---- sparse attention */

/* Keys that a query row sees; 0 without a span. */
static int64_t seen_by(const mt_spans *spans, int64_t t) {
    int64_t begin, end = 0;
    for (const mt_span *s = spans->host; s < spans->host + spans->count; s++)
        if (t >= s->q_start && t < s->q_start + s->q_len) mt_span_keys(s, 0, t - s->q_start, &begin, &end);
    return end;
}

/* selected[rows, topk]: of a query that sees more than topk keys some of each part of them. */
static int32_t *make_selected(run *r, const mt_spans *spans, int64_t rows, int64_t topk) {
    int32_t *data = mt_malloc(rows * topk * 4);
    for (int64_t t = 0; t < rows; t++) {
        int64_t seen = seen_by(spans, t);
        for (int64_t n = 0; n < topk; n++) {
            int64_t from = n * seen / topk, to = (n + 1) * seen / topk;
            data[t * topk + n] = (int32_t)(seen <= topk ? (n < seen ? n : -1) : from + (t * 7 + n * 3) % (to - from));
        }
    }
    int32_t *device = upload(r, data, rows * topk, MT_I32, false);
    free(data);
    return device;
}

/* Tables of pages of 8 rows in reverse for `rows` rows of keys. */
static mt_pages make_pages(run *r, int64_t rows) {
    enum { ROWS = 8 };
    int64_t count = mt_divide_up(rows, ROWS);
    int32_t *table = mt_malloc(count * 4);
    for (int64_t i = 0; i < count; i++) table[i] = (int32_t)(count - 1 - i);
    int32_t *device = upload(r, table, count, MT_I32, false);
    free(table);
    return (mt_pages){device, ROWS, count};
}

/* Whole numbers, with which sums are exact in any order, and many scores are equal. Sizes: T, H, D, topk, spans, ties,
 * pages, rows before those of this rank. */
static void indexer_forward(run *r, const int64_t *n) {
    attention_case c;
    int64_t H = n[1], D = n[2];
    make_attention(&c, r, (const int64_t[]){n[0], 1, 1, 8, 8, 0, n[4], 0});
    mt_indexer_args a = {.spans = &c.call.spans, .H = H, .D = D, .topk = n[3], .scale = 0.25f};
    a.ties = (mt_indexer_ties)n[5], a.first_row = n[7], a.rows = c.queries - n[7];
    int64_t page_rows = mt_divide_up(c.keys, 8) * 8;
    if (n[6]) a.pages = make_pages(r, page_rows);
    a.q = numbers(r, r->dtype, a.rows * H * D, SMALL, false), a.k = numbers(r, r->dtype, page_rows * D, SMALL, false);
    a.weights = numbers(r, r->dtype, a.rows * H, WHOLE, false), a.selected = int_output(r, a.rows * n[3]);
    r->ops->indexer_forward(&a, r->dtype, r->stream);
}

/* A block of 64 queries at most. Sizes: T, H, D, topk, spans, all keys, first row of this rank, first of the block. */
static void indexer_backward(run *r, const int64_t *n) {
    attention_case c;
    int64_t H = n[1], D = n[2], topk = n[3], T = n[0];
    make_attention(&c, r, (const int64_t[]){T, 1, 1, 8, 8, 0, n[4], 0});
    mt_indexer_args a = {.spans = &c.call.spans, .H = H, .D = D, .topk = topk, .scale = 0.125f, .coeff = 0.5f};
    a.first_row = n[6], a.rows = c.queries - n[6], a.block = n[7], a.all_keys = n[5];
    a.block_rows = mt_min(64, c.queries - a.block), a.width = a.all_keys ? c.keys : topk;
    a.q = input(r, a.rows * H * D), a.k = input(r, c.keys * D), a.weights = input(r, a.rows * H);
    a.selected = make_selected(r, &c.call.spans, c.queries, topk) + n[6] * topk;
    a.shares = float_input(r, a.block_rows * a.width, POSITIVE);
    a.slopes = float_input(r, a.block_rows * a.width, NORMAL);
    a.sums = numbers(r, MT_F64, 2, POSITIVE, true);
    // rows that are not of the block are left alone
    a.dq = changed(r, a.rows * H * D), a.dweights = changed(r, a.rows * H);
    a.dk = float_changed(r, c.keys * D, NORMAL);
    r->ops->indexer_backward(&a, r->dtype, r->stream);
}

/* Sizes: T, H, G, D, Dv, topk, spans, dropout; with a step of generation the keys are in pages. */
static mt_sparse_attention make_sparse(attention_case *c, run *r, const int64_t *n) {
    make_attention(c, r, (const int64_t[]){n[0], n[1], n[2], n[3], n[4], 0, n[6], n[7]});
    mt_sparse_attention a = {.topk = n[5]};
    a.selected = make_selected(r, &c->call.spans, c->queries, n[5]);
    return a;
}

static void sparse_attention_forward(run *r, const int64_t *n) {
    attention_case c;
    mt_sparse_attention a = make_sparse(&c, r, n);
    if (n[6] == DECODE) c.call.pages = make_pages(r, c.keys);
    c.call.out = output(r, c.queries * n[1] * n[4]), c.call.lse = float_output(r, c.queries * n[1]);
    a.attention = c.call;
    r->ops->sparse_attention_forward(&a, r->dtype, r->stream);
}

static void sparse_attention_backward(run *r, const int64_t *n) {
    attention_case c;
    mt_sparse_attention a = make_sparse(&c, r, n);
    mt_attention *call = &c.call;
    call->out = numbers(r, r->dtype, c.queries * n[1] * n[4], POISON, false);
    call->lse = numbers(r, MT_F32, c.queries * n[1], POISON, false);
    call->dout = input(r, c.queries * n[1] * n[4]), call->row_dot = float_input(r, c.queries * n[1], NORMAL);
    bool fused = call->q_stride != n[1] * n[3];
    int64_t size = mt_dtype_size(r->dtype);
    char *dq = call->dq = output(r, c.queries * call->q_stride);
    call->dk = fused ? dq + n[1] * n[3] * size : output(r, c.keys * call->k_stride);
    call->dv = fused ? dq + (n[1] + n[2]) * n[3] * size : output(r, c.keys * call->v_stride);
    a.attention = *call;
    r->ops->sparse_attention_forward(&a, r->dtype, r->stream);
    r->ops->sparse_attention_backward(&a, r->dtype, r->stream);
}

/* Sizes: T, H, G, D, first row of the block, topk, spans, all keys. */
static void sparse_attention_shares(run *r, const int64_t *n) {
    attention_case c;
    mt_sparse_attention a = make_sparse(&c, r, (const int64_t[]){n[0], n[1], n[2], n[3], n[3], n[5], n[6], 0});
    a.attention = c.call, a.block = n[4], a.block_rows = mt_min(64, c.queries - n[4]);
    a.all_keys = n[7], a.width = a.all_keys ? c.keys : n[5];
    a.shares = float_output(r, a.block_rows * a.width);
    r->ops->sparse_attention_shares(&a, r->dtype, r->stream);
}

/* Sizes: T, heads, first, -, Dv, -, spans, stride beyond the width. */
static mt_spans upload_spans(run *r, const int64_t *n, mt_span *host, int64_t *rows) {
    int64_t keys, count = make_spans(host, (span_kind)n[6], n[0], rows, &keys);
    mt_span *spans = r->ops->memory_alloc(count * (int64_t)sizeof *spans);
    r->ops->memory_copy(spans, host, count * (int64_t)sizeof *spans, r->stream);
    r->buffers[r->num_buffers++] = (buffer){spans, 0, MT_U8, false};
    return (mt_spans){host, spans, count};
}

static void attention_merge(run *r, const int64_t *n) {
    mt_span host[64];
    int64_t rows;
    mt_spans spans = upload_spans(r, n, host, &rows);
    float *out = float_changed(r, rows * n[1] * n[4], NORMAL), *lse = float_changed(r, rows * n[1], NORMAL);
    void *part = input(r, rows * n[1] * n[4]);
    float *part_lse = float_input(r, rows * n[1], NORMAL);
    const mt_merge_args a = {&spans, n[1], n[4], out, lse, part, part_lse, .first = n[2] != 0};
    r->ops->attention_merge(&a, r->dtype, r->stream);
}

/* -: whether heads have a sink other than 0; stride beyond the width. */
static void sink_forward(run *r, const int64_t *n) {
    mt_span host[64];
    int64_t rows, stride = n[1] * n[4] + n[7];
    mt_spans spans = upload_spans(r, n, host, &rows);
    mt_sink_args a = {.spans = &spans, .H = n[1], .Dv = n[4], .out_stride = stride};
    a.sinks = n[2] ? NULL : input(r, n[1]), a.out = changed(r, rows * stride);
    a.lse = float_changed(r, rows * n[1], NORMAL);
    r->ops->sink_forward(&a, r->dtype, r->stream);
}

static void sink_backward(run *r, const int64_t *n) {
    mt_span host[64];
    int64_t rows, stride = n[1] * n[4] + n[7];
    mt_spans spans = upload_spans(r, n, host, &rows);
    mt_sink_args a = {.spans = &spans, .H = n[1], .Dv = n[4], .out_stride = stride};
    a.sinks = input(r, n[1]), a.out = input(r, rows * stride), a.dout = input(r, rows * stride);
    a.lse = float_input(r, rows * n[1], NORMAL), a.dsinks = float_changed(r, n[1], NORMAL);
    r->ops->sink_backward(&a, r->dtype, r->stream);
}

static void accumulate_rows(run *r, const int64_t *n) {
    mt_span host[64];
    int64_t rows, width = n[1] * n[4], stride = width + n[7];
    mt_spans spans = upload_spans(r, n, host, &rows);
    float *sum = float_changed(r, rows * width, NORMAL);
    void *x = input(r, rows * stride);
    const mt_accumulate_args a = {&spans, n[3] != 0, sum, x, width, stride, .first = n[2] != 0};
    r->ops->accumulate_rows(&a, r->dtype, r->stream);
}

/* ---- linear attention -------------------------------------------------------------------------------------------- */

/* The spans of a recurrence, and its states of `elements` floats: those of texts in generation, or of pieces. */
typedef struct recurrence {
    mt_span host[64];
    mt_spans spans;
    int64_t rows, first[2], last[2];
    mt_states states;
    float *dstates;
} recurrence;

static void make_recurrence(recurrence *c, run *r, int64_t T, span_kind kind, int64_t elements) {
    int64_t keys;
    *c =
        (recurrence){.first = {0, -1}, .last = {0, 2}}; // slot 0: the first piece is a part in the middle of a sequence
    int64_t count = make_spans(c->host, kind, T, &c->rows, &keys), bytes = count * (int64_t)sizeof(mt_span);
    mt_span *spans = r->ops->memory_alloc(bytes);
    r->ops->memory_copy(spans, c->host, bytes, r->stream);
    r->buffers[r->num_buffers++] = (buffer){spans, 0, MT_U8, false};
    c->spans = (mt_spans){c->host, spans, count};
    if (kind == DECODE) c->states = (mt_states){.slot_rows = 40, .slots = T};
    if (kind == CONTINUED) c->states = (mt_states){.slot_rows = T + 9, .slots = 2};
    if (kind == PIECES) c->states = (mt_states){.slots = 2, .first = c->first, .last = c->last};
    if (c->states.slots > 0) c->states.memory = float_changed(r, c->states.slots * elements, NORMAL);
    if (kind == PIECES) c->dstates = float_input(r, c->states.slots * elements, NORMAL);
}

/* Sizes: T, C, K, spans, SiLU, bias, gap between rows. */
static mt_conv_args make_conv(recurrence *c, run *r, const int64_t *n) {
    int64_t C = n[1], K = n[2], stride = C + n[6];
    make_recurrence(c, r, n[0], (span_kind)n[3], (K - 1) * C);
    mt_conv_args a = {.spans = &c->spans, .C = C, .K = K, .silu = n[4], .states = c->states, .dstates = c->dstates};
    a.x = input(r, c->rows * stride), a.w = input(r, C * K), a.bias = n[5] ? input(r, C) : NULL;
    a.x_stride = stride, a.y_stride = a.dy_stride = C, a.dx_stride = C + 2 * n[6];
    return a;
}

static void short_conv_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_conv_args a = make_conv(&c, r, n);
    a.y = output(r, c.rows * a.y_stride);
    r->ops->short_conv_forward(&a, r->dtype, r->stream);
}

static void short_conv_backward(run *r, const int64_t *n) {
    recurrence c;
    mt_conv_args a = make_conv(&c, r, n);
    a.dy = input(r, c.rows * a.dy_stride), a.dx = output(r, c.rows * a.dx_stride);
    a.dw = float_changed(r, a.C * a.K, NORMAL), a.dbias = n[5] ? float_changed(r, a.C, NORMAL) : NULL;
    r->ops->short_conv_backward(&a, r->dtype, r->stream);
}

/* Of both slots; an operation that has nothing to do in one leaves its results there. */
static mt_carried_state carried_state(run *r, int64_t slot, int64_t elements) {
    mt_carried_state state = {.slot = slot};
    state.in = float_input(r, elements, NORMAL), state.out = float_output(r, elements);
    return state;
}

static void short_conv_carry_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_conv_args a = make_conv(&c, r, n);
    for (int64_t slot = 0; slot < 2; slot++) {
        mt_carried_state state = carried_state(r, slot, (a.K - 1) * a.C);
        r->ops->short_conv_carry_forward(&a, &state, r->dtype, r->stream);
    }
}

static void short_conv_carry_backward(run *r, const int64_t *n) {
    recurrence c;
    mt_conv_args a = make_conv(&c, r, n);
    a.dy = input(r, c.rows * a.dy_stride);
    mt_carried_state state = carried_state(r, 0, (a.K - 1) * a.C);
    r->ops->short_conv_carry_backward(&a, &state, r->dtype, r->stream);
}

/* Sizes: T, Hk, Hv, Dk, Dv, spans, gap between rows, a decay per channel of a key. q, k and v are columns of one
 * matrix, and so are b and a. */
static mt_delta_args make_delta(recurrence *c, run *r, const int64_t *n) {
    mt_delta_args a = {.Hk = n[1], .Hv = n[2], .Dk = n[3], .Dv = n[4], .decays = n[7] ? n[3] : 1};
    int64_t keys = a.Hk * a.Dk, width = 2 * keys + a.Hv * a.Dv + n[6];
    make_recurrence(c, r, n[0], (span_kind)n[5], a.Hv * a.Dk * a.Dv);
    a.spans = &c->spans, a.states = c->states;
    a.q_stride = a.k_stride = a.v_stride = a.dq_stride = a.dk_stride = a.dv_stride = width;
    a.b_stride = a.a_stride = a.db_stride = a.da_stride = (1 + a.decays) * a.Hv + n[6];
    a.q = input(r, c->rows * width), a.k = (const char *)a.q + keys * mt_dtype_size(r->dtype);
    a.v = (const char *)a.k + keys * mt_dtype_size(r->dtype);
    a.b = input(r, c->rows * a.b_stride), a.a = (const char *)a.b + a.Hv * mt_dtype_size(r->dtype);
    a.A_log = input(r, a.Hv), a.dt_bias = input(r, a.Hv * a.decays);
    return a;
}

static void delta_rule_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_delta_args a = make_delta(&c, r, n);
    a.out = output(r, c.rows * a.Hv * a.Dv);
    r->ops->delta_rule_forward(&a, r->dtype, r->stream);
}

/* The gradients of the tokens, or those of A_log and dt_bias: sums over all tokens in which most cancels. */
static void delta_backward(run *r, const int64_t *n, bool of_decays) {
    recurrence c;
    mt_delta_args a = make_delta(&c, r, n);
    int64_t size = mt_dtype_size(r->dtype), keys = a.Hk * a.Dk;
    a.dstates = c.dstates, a.dout = input(r, c.rows * a.Hv * a.Dv);
    a.dq = numbers(r, r->dtype, c.rows * a.dq_stride, POISON, !of_decays), a.dk = (char *)a.dq + keys * size;
    a.dv = (char *)a.dk + keys * size;
    a.db = numbers(r, r->dtype, c.rows * a.db_stride, POISON, !of_decays), a.da = (char *)a.db + a.Hv * size;
    if (of_decays) a.dA_log = float_changed(r, a.Hv, NORMAL), a.ddt_bias = float_changed(r, a.Hv * a.decays, NORMAL);
    r->ops->delta_rule_backward(&a, r->dtype, r->stream);
}
static void delta_rule_backward(run *r, const int64_t *n) {
    delta_backward(r, n, false);
}
static void delta_rule_backward_decays(run *r, const int64_t *n) {
    delta_backward(r, n, true);
}

static void delta_rule_map_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_delta_args a = make_delta(&c, r, n);
    a.maps = float_output(r, 2 * a.Hv * a.Dk * (a.Dv + a.Dk));
    r->ops->delta_rule_map_forward(&a, r->dtype, r->stream);
}

static void delta_rule_map_backward(run *r, const int64_t *n) {
    recurrence c;
    mt_delta_args a = make_delta(&c, r, n);
    a.dout = input(r, c.rows * a.Hv * a.Dv), a.dmaps = float_output(r, 2 * a.Hv * a.Dk * a.Dv);
    r->ops->delta_rule_map_backward(&a, r->dtype, r->stream);
}

static void delta_rule_carry_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_delta_args a = make_delta(&c, r, n);
    a.maps = float_input(r, 2 * a.Hv * a.Dk * (a.Dv + a.Dk), NORMAL);
    for (int64_t slot = 0; slot < 2; slot++) {
        mt_carried_state state = carried_state(r, slot, a.Hv * a.Dk * a.Dv);
        r->ops->delta_rule_carry_forward(&a, &state, r->dtype, r->stream);
    }
}

static void delta_rule_carry_backward(run *r, const int64_t *n) {
    recurrence c;
    mt_delta_args a = make_delta(&c, r, n);
    a.maps = float_input(r, 2 * a.Hv * a.Dk * (a.Dv + a.Dk), NORMAL);
    a.dmaps = float_input(r, 2 * a.Hv * a.Dk * a.Dv, NORMAL);
    for (int64_t slot = 0; slot < 2; slot++) {
        mt_carried_state state = carried_state(r, slot, a.Hv * a.Dk * a.Dv);
        r->ops->delta_rule_carry_backward(&a, &state, r->dtype, r->stream);
    }
}

/* Sizes: T, G, H, N, P, spans, gap between rows, range of the step. x, B and C are columns of one matrix. */
static mt_ssd_args make_ssd(recurrence *c, run *r, const int64_t *n) {
    mt_ssd_args a = {.G = n[1], .H = n[2], .N = n[3], .P = n[4], .dt_min = 0, .dt_max = INFINITY};
    int64_t inner = a.H * a.P, width = inner + 2 * a.G * a.N + n[6], size = mt_dtype_size(r->dtype);
    make_recurrence(c, r, n[0], (span_kind)n[5], a.H * a.N * a.P);
    a.spans = &c->spans, a.states = c->states, a.stride = a.dstride = width, a.dt_stride = a.ddt_stride = a.H + n[6];
    if (n[7]) a.dt_min = 0.5f, a.dt_max = 1.5f;
    a.x = input(r, c->rows * width), a.B = (const char *)a.x + inner * size;
    a.C = (const char *)a.B + a.G * a.N * size, a.dt = input(r, c->rows * a.dt_stride);
    a.A_log = input(r, a.H), a.D = input(r, a.H), a.dt_bias = input(r, a.H);
    return a;
}

static void ssd_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_ssd_args a = make_ssd(&c, r, n);
    a.out = output(r, c.rows * a.H * a.P);
    r->ops->ssd_forward(&a, r->dtype, r->stream);
}

/* The gradients of the tokens, or those of the heads' numbers: sums over all tokens in which most cancels. */
static void ssd_backward_of(run *r, const int64_t *n, bool of_heads) {
    recurrence c;
    mt_ssd_args a = make_ssd(&c, r, n);
    int64_t size = mt_dtype_size(r->dtype);
    a.dstates = c.dstates, a.dout = input(r, c.rows * a.H * a.P);
    a.dx = numbers(r, r->dtype, c.rows * a.dstride, POISON, !of_heads), a.dB = (char *)a.dx + a.H * a.P * size;
    a.dC = (char *)a.dB + a.G * a.N * size;
    a.ddt = numbers(r, r->dtype, c.rows * a.ddt_stride, POISON, !of_heads);
    if (of_heads) a.dA_log = float_changed(r, a.H, NORMAL), a.ddt_bias = float_changed(r, a.H, NORMAL);
    if (of_heads) a.dD = float_changed(r, a.H, NORMAL);
    r->ops->ssd_backward(&a, r->dtype, r->stream);
}
static void ssd_backward(run *r, const int64_t *n) {
    ssd_backward_of(r, n, false);
}
static void ssd_backward_heads(run *r, const int64_t *n) {
    ssd_backward_of(r, n, true);
}

static void ssd_map_forward(run *r, const int64_t *n) {
    recurrence c;
    mt_ssd_args a = make_ssd(&c, r, n);
    a.maps = float_output(r, 2 * a.H * (a.N * a.P + 1));
    r->ops->ssd_map_forward(&a, r->dtype, r->stream);
}

static void ssd_map_backward(run *r, const int64_t *n) {
    recurrence c;
    mt_ssd_args a = make_ssd(&c, r, n);
    a.dout = input(r, c.rows * a.H * a.P), a.dmaps = float_output(r, 2 * a.H * a.N * a.P);
    r->ops->ssd_map_backward(&a, r->dtype, r->stream);
}

static void ssd_carry(run *r, const int64_t *n, bool backward) {
    recurrence c;
    mt_ssd_args a = make_ssd(&c, r, n);
    a.maps = float_input(r, 2 * a.H * (a.N * a.P + 1), NORMAL);
    if (backward) a.dmaps = float_input(r, 2 * a.H * a.N * a.P, NORMAL);
    for (int64_t slot = 0; slot < 2; slot++) {
        mt_carried_state state = carried_state(r, slot, a.H * a.N * a.P);
        (backward ? r->ops->ssd_carry_backward : r->ops->ssd_carry_forward)(&a, &state, r->dtype, r->stream);
    }
}
static void ssd_carry_forward(run *r, const int64_t *n) {
    ssd_carry(r, n, false);
}
static void ssd_carry_backward(run *r, const int64_t *n) {
    ssd_carry(r, n, true);
}

/* Sizes: T, H, D, gap between rows of z; 0: SiLU behind the norm, 1: a sigmoid, 2: SiLU before it, weights of each
 * head. */
static mt_gated_norm_args make_gated_norm(run *r, const int64_t *n) {
    mt_gated_norm_args a = {.T = n[0], .H = n[1], .D = n[2], .eps = 1e-5f, .sigmoid = n[4] == 1};
    a.gate_first = a.weight_per_head = n[4] == 2;
    a.z_stride = n[1] * n[2] + n[3], a.dz_stride = n[1] * n[2] + 2 * n[3];
    a.x = input(r, a.T * a.H * a.D), a.z = input(r, a.T * a.z_stride);
    a.w = input(r, a.weight_per_head ? a.H * a.D : a.D);
    return a;
}

static void gated_norm_forward(run *r, const int64_t *n) {
    mt_gated_norm_args a = make_gated_norm(r, n);
    a.y = output(r, a.T * a.H * a.D), a.rstd = float_output(r, a.T * a.H);
    r->ops->gated_norm_forward(&a, r->dtype, r->stream);
}

static void gated_norm_backward(run *r, const int64_t *n) {
    mt_gated_norm_args a = make_gated_norm(r, n);
    a.rstd = float_input(r, a.T * a.H, POSITIVE), a.dy = input(r, a.T * a.H * a.D);
    a.dx = output(r, a.T * a.H * a.D), a.dz = output(r, a.T * a.dz_stride);
    a.dw = float_changed(r, a.weight_per_head ? a.H * a.D : a.D, NORMAL);
    r->ops->gated_norm_backward(&a, r->dtype, r->stream);
}

/* Of groups of heads that other ranks share: the means come from all ranks. */
static void gated_norm_forward_means(run *r, const int64_t *n) {
    mt_gated_norm_args a = make_gated_norm(r, n);
    a.y = output(r, a.T * a.H * a.D), a.rstd = float_output(r, a.T * a.H);
    a.means = float_input(r, a.T * a.H, POSITIVE);
    r->ops->gated_norm_forward(&a, r->dtype, r->stream);
}

static void gated_norm_backward_means(run *r, const int64_t *n) {
    mt_gated_norm_args a = make_gated_norm(r, n);
    a.rstd = float_input(r, a.T * a.H, POSITIVE), a.dy = input(r, a.T * a.H * a.D);
    a.dx = output(r, a.T * a.H * a.D), a.dz = output(r, a.T * a.dz_stride);
    a.dw = float_changed(r, a.H * a.D, NORMAL), a.means = float_input(r, a.T * a.H, NORMAL);
    r->ops->gated_norm_backward(&a, r->dtype, r->stream);
}

static void gated_norm_means(run *r, const int64_t *n) {
    mt_gated_norm_args a = make_gated_norm(r, n);
    r->ops->gated_norm_means(&a, float_output(r, a.T * a.H), r->dtype, r->stream);
    a.dy = input(r, a.T * a.H * a.D);
    r->ops->gated_norm_means(&a, float_output(r, a.T * a.H), r->dtype, r->stream);
}

/* Sizes: T, C, gap between rows of x and dz. */
static mt_multiply_args make_multiply(run *r, const int64_t *n) {
    mt_multiply_args a = {.T = n[0], .C = n[1], .x_stride = n[1] + n[2], .z_stride = n[1], .y_stride = n[1]};
    a.dx_stride = a.dy_stride = n[1], a.dz_stride = n[1] + n[2];
    a.x = input(r, a.T * a.x_stride), a.z = input(r, a.T * a.z_stride);
    return a;
}

static void multiply_forward(run *r, const int64_t *n) {
    mt_multiply_args a = make_multiply(r, n);
    a.y = output(r, a.T * a.y_stride);
    r->ops->multiply_forward(&a, r->dtype, r->stream);
}

static void multiply_backward(run *r, const int64_t *n) {
    mt_multiply_args a = make_multiply(r, n);
    a.dy = input(r, a.T * a.dy_stride), a.dx = output(r, a.T * a.dx_stride), a.dz = output(r, a.T * a.dz_stride);
    r->ops->multiply_backward(&a, r->dtype, r->stream);
}

static void scale_rows(run *r, const int64_t *n) {
    int64_t stride = n[1] + n[2];
    r->ops->scale_rows(changed(r, n[0] * stride), 0.707f, n[0], n[1], stride, r->dtype, r->stream);
}

/* The operands of a gate: elements, elements before the first. In the backward dx is dy. */
static void gate_forward(run *r, const int64_t *n) {
    int64_t before = n[1] * mt_dtype_size(r->dtype);
    char *y = output(r, n[0] + n[1]), *x = input(r, n[0] + n[1]), *z = input(r, n[0] + n[1]);
    r->ops->gate_forward(&(mt_gate_args){.n = n[0], .x = x + before, .z = z + before, .y = y + before}, r->dtype,
                         r->stream);
}

static void gate_backward(run *r, const int64_t *n) {
    int64_t before = n[1] * mt_dtype_size(r->dtype);
    char *dy = changed(r, n[0] + n[1]), *x = input(r, n[0] + n[1]), *z = input(r, n[0] + n[1]);
    char *dz = output(r, n[0] + n[1]);
    const mt_gate_args a = {.n = n[0], .x = x + before, .z = z + before, .dy = dy + before, dy + before, dz + before};
    r->ops->gate_backward(&a, r->dtype, r->stream);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* Errors are ||actual - answer|| / ||answer|| of each output. fp32 is right to 1e-5; a result rounded to bf16 once is
 * off by 2^-8 at most; where intermediate results pass through bf16 matrix products, `bf16_tolerance` is larger. */
#define ONCE 0.00392 // 2^-8, and a little for rounding in fp32
typedef struct operation {
    const char *name;
    void (*test)(run *r, const int64_t *sizes);
    double bf16_tolerance;
    const int64_t (*shapes)[MAX_SIZES]; // to the first whose first size is 0
    double worst[3];                    // errors found: fp32, bf16, fp16
} operation;

/* Sizes, which each test names above. */
/* T, N, K, bias, whether the weight's gradient is written rather than added to */
static const int64_t linear_shapes[][MAX_SIZES] = {{1, 8, 8, 1, 0},       {1, 24, 40, 0, 0},
                                                   {7, 33, 17, 1, 1},     {100, 1, 64, 0, 0},
                                                   {64, 64, 64, 0, 0},    {130, 257, 96, 1, 1},
                                                   {5, 1000, 64, 0, 0},   {200, 320, 136, 1, 0},
                                                   {333, 128, 512, 0, 1}, {1, 2304, 768, 1, 0},
                                                   {2, 768, 3072, 1, 1},  {4, 17001, 96, 0, 0},
                                                   {8, 520, 1032, 1, 1},  {0}};
/* Few rows and many, which are measured; N and K of whole vectors and not. */
static const int64_t linear_gelu_shapes[][MAX_SIZES] = {
    {1, 8, 8, 1},       {1, 3072, 768, 1},   {2, 768, 3072, 0},    {7, 33, 17, 1},      {8, 520, 1032, 1},
    {9, 64, 96, 1},     {100, 512, 128, 0},  {130, 257, 96, 1},    {129, 96, 257, 0},   {333, 128, 512, 1},
    {300, 999, 136, 1}, {301, 136, 1001, 0}, {1024, 3072, 768, 1}, {777, 640, 2560, 0}, {0}};
static const int64_t embedding_shapes[][MAX_SIZES] = {{1, 8, 0, 10, 10, 0},
                                                      {1, 24, 0, 10, 10, 1},
                                                      {100, 7, 0, 3, 3, 0},
                                                      {333, 64, 20, 30, 70, 1},
                                                      {1000, 96, 0, 1, 1, 0},
                                                      {257, 1600, 0, 17, 17, 1},
                                                      {300, 40, 50257, 11, 60000, 0},
                                                      {999, 264, 5, 900, 1000, 0},
                                                      {5000, 8, 7, 300000, 300000, 0},
                                                      {300000, 4, 0, 900, 1000, 0},
                                                      {0}};
static const int64_t add_shapes[][MAX_SIZES] = {{1, 0, 0}, {7, 1, 1}, {1024, 0, 1}, {4099, 3, 0}, {123456, 0, 0}, {0}};
static const int64_t scatter_add_shapes[][MAX_SIZES] = {
    {1, 8, 0, 10, 10}, {100, 7, 0, 3, 3}, {333, 64, 0, 50, 70}, {1000, 96, 0, 1, 1}, {257, 1600, 0, 17, 17}, {0}};
static const int64_t norm_shapes[][MAX_SIZES] = {{1, 1, 24, 0, 0, 0},
                                                 {1, 1, 1, 0, 0, 1},
                                                 {5, 3, 8, 16, 8, 1},
                                                 {33, 4, 64, 5, 3, 0},
                                                 {100, 32, 128, 0, 512, 0},
                                                 {17, 1, 768, 0, 0, 2},
                                                 {301, 1, 1600, 0, 0, 1},
                                                 {7, 1, 4096, 0, 0, 2},
                                                 {3, 1, 5001, 0, 0, 2},
                                                 {2, 1, 20000, 0, 0, 1},
                                                 {700, 1, 4104, 8, 24, 1},
                                                 {1000, 7, 24, 0, 0, 0},
                                                 {1300, 1, 1600, 0, 0, 2},
                                                 {2001, 1, 768, 0, 0, 0},
                                                 {133, 9, 256, 0, 0, 0},
                                                 {50, 1, 1280, 0, 0, 1},
                                                 {40, 1, 2048, 8, 0, 0},
                                                 {39, 1, 2056, 0, 0, 2},
                                                 {300, 1, 6152, 0, 0, 2},
                                                 {9, 1, 8200, 0, 16, 1},
                                                 {270, 1, 12288, 0, 0, 2},
                                                 {3, 1, 16384, 0, 0, 0},
                                                 {2, 1, 40008, 0, 0, 1},
                                                 {600, 1, 4096, 0, 0, 1},
                                                 {400, 1, 5120, 0, 0, 2},
                                                 {900, 1, 320, 0, 0, 1},
                                                 {1000, 6, 64, 0, 8, 0},
                                                 {77, 1, 14336, 0, 0, 1},
                                                 {0}};
static const int64_t rope_shapes[][MAX_SIZES] = {
    {1, 1, 8, 8, 0, 0, 0},      {1, 1, 8, 8, 0, -1, 1},      {7, 3, 16, 8, 0, 0, 0},
    {7, 3, 24, 6, 1, 2, 1},     {33, 32, 128, 128, 0, 0, 0}, {33, 8, 128, 128, 64, -1, 0},
    {19, 4, 256, 64, 16, 8, 1}, {5, 2, 64, 64, 8, -1, 1},    {0}};
static const int64_t qk_shapes[][MAX_SIZES] = {{1, 1, 1, 8, 8, 0, 0, 0},         {7, 3, 1, 16, 8, 1, 0, 0},
                                               {7, 2, 2, 24, 6, 1, 1, 3},        {33, 32, 8, 128, 128, 0, 0, 0},
                                               {33, 32, 8, 128, 128, 1, 0, 8},   {300, 5, 1, 64, 64, 1, 1, 0},
                                               {19, 4, 2, 256, 64, 0, 1, 16},    {41, 4, 2, 256, 256, 1, 0, 0},
                                               {5, 12, 12, 64, 16, 0, 0, 0},     {21, 4, 4, 96, 96, 1, 0, 0},
                                               {13, 2, 1, 80, 32, 1, 0, 0},      {29, 3, 3, 40, 0, 1, 0, 0},
                                               {1000, 16, 4, 128, 128, 1, 0, 0}, {9, 2, 1, 130, 64, 1, 0, 0},
                                               {6, 2, 1, 130, 64, 0, 1, 2},      {301, 6, 2, 64, 64, 1, 1, 8},
                                               {2500, 4, 2, 128, 128, 1, 1, 0},  {11, 5, 3, 128, 128, 0, 0, 0},
                                               {9, 12, 12, 64, 0, 0, 0, 0},      {0}};
static const int64_t latent_shapes[][MAX_SIZES] = {
    {1, 1, 4, 2, 3, 0},      {7, 3, 6, 4, 5, 1},    {33, 4, 128, 64, 128, 1}, {19, 16, 128, 64, 128, 0},
    {300, 5, 24, 16, 40, 1}, {9, 128, 8, 16, 8, 0}, {1000, 2, 20, 12, 17, 0}, {0}};
static const int64_t element_shapes[][MAX_SIZES] = {
    {1, 0, 0}, {3, 1, 1}, {8, 0, 1}, {1000, 0, 0}, {100003, 0, 1}, {100003, 64, 0}, {8192, 3, 1}, {300001, 0, 5}, {0}};
static const int64_t square_shapes[][MAX_SIZES] = {{1, 0}, {3, 1}, {1000, 0}, {100003, 64}, {5000001, 0}, {0}};
/* T, F, activation, weights, elements before the first, clamped: {elements} as one row, and rows of all activations */
#define ROWS_OF(activation, weights)                                                                                   \
    {1, 1, activation, weights, 0}, {1, 24, activation, weights, 0}, {7, 33, activation, weights, 0},                  \
        {129, 344, activation, weights, 0}, {33, 14336, activation, weights, 0}, {5, 4099, activation, weights, 0},    \
        {1001, 768, activation, weights, 0}, {                                                                         \
        35, 100, activation, weights, 0                                                                                \
    }
static const int64_t activation_shapes[][MAX_SIZES] = {{1, 100003, MT_ACTIVATION_GELU, 0, 64},
                                                       {1, 8192, MT_ACTIVATION_GELU_TANH, 0, 3},
                                                       ROWS_OF(MT_ACTIVATION_GELU, 0),
                                                       ROWS_OF(MT_ACTIVATION_GELU, 1),
                                                       ROWS_OF(MT_ACTIVATION_GELU_TANH, 0),
                                                       ROWS_OF(MT_ACTIVATION_GELU_TANH, 1),
                                                       ROWS_OF(MT_ACTIVATION_SQUARED_RELU, 0),
                                                       ROWS_OF(MT_ACTIVATION_SQUARED_RELU, 1),
                                                       ROWS_OF(MT_ACTIVATION_RELU, 0),
                                                       {33, 64, MT_ACTIVATION_RELU, 1, 0, 0},
                                                       ROWS_OF(MT_ACTIVATION_SWIGLU, 0),
                                                       ROWS_OF(MT_ACTIVATION_SWIGLU, 1),
                                                       ROWS_OF(MT_ACTIVATION_QUICK_GEGLU, 0),
                                                       ROWS_OF(MT_ACTIVATION_QUICK_GEGLU, 1),
                                                       {1, 24, MT_ACTIVATION_QUICK_GEGLU, 0, 0, 2},
                                                       {7, 33, MT_ACTIVATION_QUICK_GEGLU, 1, 0, 2},
                                                       {129, 344, MT_ACTIVATION_QUICK_GEGLU, 0, 0, 2},
                                                       {1001, 768, MT_ACTIVATION_QUICK_GEGLU, 1, 0, 2},
                                                       {129, 344, MT_ACTIVATION_SWIGLU, 1, 0, 1},
                                                       {33, 768, MT_ACTIVATION_SWIGLU, 0, 0, 1},
                                                       {33, 768, MT_ACTIVATION_GEGLU, 0, 0, 2},
                                                       {0}};
static const int64_t dropout_shapes[][MAX_SIZES] = {{1, 1, 0, 50, 1},      {1, 24, 0, 0, 1},        {33, 64, 64, 10, 1},
                                                    {129, 1600, 0, 50, 0}, {7, 33, 3, 30, 1},       {65, 128, 2, 20, 0},
                                                    {5, 5003, 0, 100, 1},  {9, 96, 1 << 20, 90, 1}, {0}};
static const int64_t residual_norm_shapes[][MAX_SIZES] = {
    {5, 8, 0, 0, 0},      {6, 24, 50, 1, 1},    {33, 33, 10, 0, 1},   {129, 64, 0, 2, 1},
    {100, 768, 10, 0, 1}, {1000, 768, 0, 1, 0}, {301, 1600, 0, 0, 1}, {40, 1600, 30, 2, 0},
    {65, 1280, 0, 1, 1},  {50, 4096, 0, 0, 0},  {50, 4096, 20, 1, 1}, {7, 5003, 40, 0, 1},
    {9, 12288, 0, 0, 1},  {5, 20000, 10, 0, 0}, {5, 40008, 0, 1, 1},  {0}};
static const int64_t row_shapes[][MAX_SIZES] = {{1, 1, 0, 0},
                                                {1, 24, 0, 8},
                                                {7, 33, 1, 2},
                                                {100, 1024, 0, 512},
                                                {65, 3000, 8, 16},
                                                {40, 20000, 0, 0},
                                                {5000, 1, 0, 0},
                                                {1001, 3, 1, 0},
                                                {517, 768, 0, 0},
                                                {4999, 600, 8, 0},
                                                {0}};
static const int64_t logit_shapes[][MAX_SIZES] = {{1, 1, 0, 1, 1, 1},
                                                  {1, 24, 0, 24, 24, 0},
                                                  {7, 33, 0, 31, 31, 1},
                                                  {30, 50304, 0, 50257, 50257, 1},
                                                  {33, 4096, 4096, 4000, 9000, 1},
                                                  {5, 128256, 0, 128256, 128256, 0},
                                                  {300, 1000, 100, 999, 2000, 1},
                                                  {5, 5003, 0, 5003, 5003, 1},
                                                  {0}};
static const int64_t guard_shapes[][MAX_SIZES] = {
    {1, 4, 0, 0}, {9, 4, 1, 0}, {9, 4, 1000000, 0}, {3, 4, 1, 0}, {5, 4, 1000000, 1}, {5, 4, 1000000, 0, 1}, {0}};
static const int64_t scale_shapes[][MAX_SIZES] = {{50, 1}, {1000, 1}, {-1, 1}, {50, 65536}, {50, 2, 1}, {0}};
static const int64_t attention_shapes[][MAX_SIZES] = {
    {1, 1, 1, 8, 8, 0, ONE, 0},           {7, 1, 1, 16, 16, 0, ONE, 0},
    {100, 4, 2, 64, 64, 0, ONE, 0},       {129, 4, 1, 128, 128, 0, ONE, 0},
    {65, 2, 2, 256, 256, 0, ONE, 0},      {200, 6, 2, 40, 40, 0, PACKED, 0},
    {130, 2, 2, 96, 96, 0, FULL, 0},      {333, 3, 3, 64, 64, 50, ONE, 0},
    {150, 2, 1, 128, 128, 17, PACKED, 0}, {20, 8, 2, 128, 128, 0, DECODE, 0},
    {33, 4, 4, 8, 8, 5, DECODE, 0},       {140, 4, 2, 64, 64, 0, SHARED_KEYS, 0},
    {77, 2, 2, 32, 32, 0, FEW_KEYS, 0},   {90, 2, 1, 24, 16, 0, ONE, 0},
    {50, 2, 2, 192, 128, 0, FULL, 0},     {70, 4, 2, 64, 64, 0, PACKED, 30},
    {40, 2, 1, 128, 128, 9, ONE, 50},     {300, 4, 2, 64, 64, 0, ONE, 10},
    {180, 2, 2, 192, 128, 0, ONE, 10},    {150, 4, 2, 24, 16, 0, PACKED, 0},
    {300, 8, 2, 192, 128, 0, PACKED, 0},  {260, 8, 1, 192, 128, 128, ONE, 0},
    {333, 4, 2, 128, 64, 50, ONE, 0},     {90, 6, 2, 12, 8, 8, ONE, 0},
    {33, 16, 2, 192, 128, 0, DECODE, 0},  {40, 8, 4, 64, 96, 7, DECODE, 0},
    {300, 3, 3, 80, 80, 0, WINDOWS, 0},   {200, 2, 2, 72, 72, 0, WINDOWS, 0},
    {100, 2, 2, 12, 12, 0, WINDOWS, 0},   {700, 4, 4, 64, 64, 0, WINDOWS, 0},
    {77, 4, 2, 40, 72, 0, FEW_KEYS, 0},   {0}};
/* More than two buckets: the gradients of two are opposite sums, in which the roundings of out in bf16 remain. */
static const int64_t bias_shapes[][MAX_SIZES] = {{1, 1, 1, 8, 8, 32, FULL, 0},
                                                 {7, 2, 2, 16, 16, 32, FULL, 0},
                                                 {300, 4, 4, 64, 64, 32, FULL, 0},
                                                 {300, 3, 3, 64, 64, -32, ONE, 0},
                                                 {129, 6, 2, 128, 128, 64, FULL, 0},
                                                 {200, 2, 1, 32, 16, -64, ONE, 0},
                                                 {500, 2, 2, 64, 64, 64, FULL, 0},
                                                 {400, 4, 2, 64, 64, -32, PACKED, 0},
                                                 {60, 4, 4, 64, 64, -32, DECODE, 0},
                                                 {77, 2, 2, 40, 40, -8, FEW_KEYS, 0},
                                                 {140, 4, 2, 64, 64, -32, SHARED_KEYS, 0},
                                                 {100, 2, 2, 24, 24, 4, FULL, 0},
                                                 {333, 4, 4, 64, 64, 32, FULL, 10},
                                                 {150, 2, 2, 64, 64, -32, ONE, 20},
                                                 {90, 4, 2, 64, 64, -32, CONTINUED, 0},
                                                 {0}};

static const int64_t indexer_shapes[][MAX_SIZES] = {
    {1, 1, 8, 1, ONE, MT_TIES_TORCH, 0, 0},           {40, 4, 16, 6, ONE, MT_TIES_TORCH, 0, 0},
    {40, 4, 16, 6, ONE, MT_TIES_FIRST, 0, 0},         {333, 6, 8, 5, ONE, MT_TIES_TORCH, 0, 0},
    {700, 64, 128, 64, ONE, MT_TIES_TORCH, 0},        {700, 64, 128, 64, ONE, MT_TIES_FIRST, 0, 333},
    {1500, 16, 64, 3, ONE, MT_TIES_TORCH, 0, 0},      {1025, 3, 24, 100, ONE, MT_TIES_FIRST, 0, 0},
    {300, 32, 128, 20, PACKED, MT_TIES_TORCH, 0, 0},  {300, 20, 40, 7, PACKED, MT_TIES_FIRST, 0, 11},
    {50, 8, 32, 9, DECODE, MT_TIES_TORCH, 0, 0},      {50, 64, 128, 12, DECODE, MT_TIES_FIRST, 1, 0},
    {90, 40, 96, 15, CONTINUED, MT_TIES_TORCH, 0, 0}, {90, 4, 33, 15, CONTINUED, MT_TIES_FIRST, 1, 0},
    {3000, 4, 16, 64, ONE, MT_TIES_TORCH, 0, 0},      {333, 64, 128, 17, CONTINUED, MT_TIES_FIRST, 0, 0},
    {333, 32, 128, 17, FULL, MT_TIES_TORCH, 0, 100},  {130, 65, 16, 8, ONE, MT_TIES_TORCH, 0, 0},
    {130, 2, 136, 8, FULL, MT_TIES_FIRST, 0, 2},      {0}};
static const int64_t indexer_loss_shapes[][MAX_SIZES] = {
    {1, 1, 8, 1, ONE, 1, 0, 0},          {40, 4, 16, 6, ONE, 1, 0, 0},
    {40, 4, 16, 6, ONE, 0, 0, 0},        {200, 64, 128, 32, ONE, 1, 0, 128},
    {200, 64, 128, 32, ONE, 0, 100, 64}, {300, 32, 128, 20, PACKED, 1, 0, 192},
    {200, 64, 64, 9, ONE, 1, 30, 64},    {90, 48, 128, 9, CONTINUED, 1, 0, 0},
    {150, 3, 33, 5, PACKED, 1, 0, 64},   {150, 3, 33, 5, PACKED, 0, 20, 0},
    {100, 130, 24, 7, ONE, 1, 30, 0},    {90, 20, 40, 9, CONTINUED, 1, 0, 0},
    {150, 16, 64, 5, PACKED, 1, 0, 0},   {0}};
static const int64_t sparse_shapes[][MAX_SIZES] = {{1, 1, 1, 8, 8, 1, ONE, 0},
                                                   {40, 2, 2, 16, 8, 6, ONE, 0},
                                                   {300, 4, 2, 64, 64, 40, ONE, 0},
                                                   {300, 2, 2, 192, 128, 33, ONE, 0},
                                                   {129, 2, 1, 128, 128, 17, ONE, 0},
                                                   {200, 2, 2, 256, 256, 20, ONE, 0},
                                                   {200, 6, 2, 40, 40, 9, PACKED, 0},
                                                   {150, 2, 2, 33, 20, 9, PACKED, 0},
                                                   {300, 4, 4, 64, 64, 40, PACKED, 0},
                                                   {90, 4, 2, 24, 16, 7, CONTINUED, 0},
                                                   {70, 4, 2, 64, 64, 12, ONE, 30},
                                                   {200, 2, 2, 96, 64, 500, ONE, 0},
                                                   {700, 2, 2, 192, 128, 90, ONE, 0},
                                                   {333, 4, 4, 192, 128, 50, PACKED, 0},
                                                   {450, 4, 2, 128, 128, 60, PACKED, 0},
                                                   {260, 3, 3, 64, 64, 30, PACKED, 0},
                                                   {150, 2, 2, 128, 128, 20, CONTINUED, 0},
                                                   {140, 4, 2, 64, 64, 30, SHARED_KEYS, 0},
                                                   {260, 2, 2, 64, 64, 40, FEW_KEYS, 0},
                                                   {0}};
static const int64_t sparse_decode_shapes[][MAX_SIZES] = {{1, 1, 1, 8, 8, 1, ONE, 0},
                                                          {300, 2, 2, 192, 128, 33, ONE, 0},
                                                          {200, 6, 2, 40, 40, 9, PACKED, 0},
                                                          {150, 2, 2, 33, 20, 9, PACKED, 0},
                                                          {200, 2, 2, 256, 256, 20, ONE, 0},
                                                          {40, 4, 4, 192, 128, 11, DECODE, 0},
                                                          {33, 4, 2, 24, 16, 5, DECODE, 0},
                                                          {90, 4, 2, 24, 16, 7, CONTINUED, 0},
                                                          {70, 4, 2, 64, 64, 12, ONE, 30},
                                                          {200, 2, 2, 96, 64, 500, ONE, 0},
                                                          {700, 2, 2, 192, 128, 90, ONE, 0},
                                                          {333, 4, 4, 192, 128, 50, PACKED, 0},
                                                          {450, 4, 2, 128, 128, 60, PACKED, 0},
                                                          {260, 3, 3, 64, 64, 30, PACKED, 0},
                                                          {150, 2, 2, 128, 128, 20, CONTINUED, 0},
                                                          {0}};
static const int64_t shares_shapes[][MAX_SIZES] = {
    {1, 1, 1, 8, 0, 1, ONE, 1},          {40, 4, 4, 24, 0, 6, ONE, 1},
    {40, 4, 2, 33, 0, 6, ONE, 0},        {200, 3, 3, 192, 128, 20, ONE, 1},
    {200, 3, 3, 192, 64, 20, ONE, 0},    {150, 2, 1, 40, 64, 5, PACKED, 1},
    {150, 2, 2, 64, 0, 5, PACKED, 0},    {90, 2, 2, 16, 10, 5, CONTINUED, 1},
    {150, 2, 1, 64, 64, 5, PACKED, 1},   {200, 4, 2, 128, 100, 20, PACKED, 1},
    {700, 3, 3, 128, 500, 20, ONE, 1},   {140, 2, 2, 64, 40, 5, SHARED_KEYS, 1},
    {100, 2, 2, 64, 30, 5, FEW_KEYS, 1}, {0}};

static const int64_t merge_shapes[][MAX_SIZES] = {
    {1, 1, 0, 0, 8, 0, ONE, 0},       {100, 4, 0, 1, 64, 0, ONE, 8},    {129, 3, 1, 0, 128, 0, PACKED, 0},
    {200, 5, 0, 0, 24, 0, PACKED, 3}, {65, 2, 0, 1, 20, 0, PACKED, 4},  {77, 2, 1, 1, 256, 0, ONE, 16},
    {33, 7, 0, 0, 33, 0, PACKED, 0},  {300, 16, 0, 0, 128, 0, ONE, 64}, {0}};

/* T, E, k, how, groups, groups chosen, sequences, scores of a group that are summed */
static const int64_t router_shapes[][MAX_SIZES] = {{1, 1, 1, PRE_SOFTMAX, 0, 0, 1},
                                                   {7, 8, 2, ONE_SEQUENCE, 0, 0, 1},
                                                   {130, 8, 2, EQUALS | WRONG, 0, 0, 3},
                                                   {101, 60, 4, PRE_SOFTMAX | EQUALS, 0, 0, 200},
                                                   {333, 128, 8, ONE_SEQUENCE | WRONG, 0, 0, 1},
                                                   {128, 128, 8, PRE_SOFTMAX, 0, 0, 5},
                                                   {65, 256, 8, SIGMOID | BIASED | WRONG, 8, 4, 2},
                                                   {77, 256, 8, SIGMOID, 8, 4, 2},
                                                   {76, 128, 6, SOFTPLUS | BIASED, 8, 4, 2},
                                                   {51, 33, 1, SOFTPLUS, 0, 0, 1},
                                                   {31, 64, 4, SOFTPLUS | PADDED, 0, 0, 3},
                                                   {78, 256, 6, SIGMOID | BIASED, 8, 4, 2, 2},
                                                   {79, 64, 8, PRE_SOFTMAX, 16, 4, 2, 9},
                                                   {200, 64, 6, PRE_SOFTMAX | EQUALS, 8, 3, 9},
                                                   {50, 33, 1, SIGMOID, 0, 0, 1},
                                                   {90, 96, 32, EQUALS, 3, 1, 4},
                                                   {99, 160, 6, PRE_SOFTMAX | EQUALS, 40, 2, 4},
                                                   {40, 500, 9, SIGMOID | EQUALS, 0, 0, 3},
                                                   {41, 520, 4, PRE_SOFTMAX | WRONG, 130, 2, 2},
                                                   {9, 1000, 16, SIGMOID | BIASED, 0, 0, 2},
                                                   {1000, 16, 4, ONE_SEQUENCE, 0, 0, 1},
                                                   {130, 8, 2, PADDED | EQUALS | WRONG, 0, 0, 3},
                                                   {333, 128, 8, PADDED | ONE_SEQUENCE, 0, 0, 1},
                                                   {65, 256, 8, PADDED | SIGMOID | BIASED | WRONG, 8, 4, 2},
                                                   {99, 160, 6, PADDED | PRE_SOFTMAX | EQUALS, 40, 2, 4},
                                                   {41, 520, 4, PADDED | PRE_SOFTMAX | WRONG, 130, 2, 2},
                                                   {50, 33, 1, PADDED | SIGMOID, 0, 0, 1},
                                                   {130, 8, 2, BIASED | OF_LOGITS | EQUALS | WRONG, 0, 0, 3},
                                                   {99, 128, 8, BIASED | OF_LOGITS | PRE_SOFTMAX | PADDED, 0, 0, 1},
                                                   {64, 600, 4, BIASED | OF_LOGITS | SIGMOID, 0, 0, 1},
                                                   {0}};
static const int64_t quantile_shapes[][MAX_SIZES] = {{1, 2, 1, 0},
                                                     {7, 8, 2, 0},
                                                     {130, 8, 2, EQUALS | WRONG},
                                                     {333, 128, 8, PADDED | WRONG},
                                                     {2049, 33, 4, EQUALS},
                                                     {5000, 256, 32, PADDED},
                                                     {90, 96, 95, WRONG},
                                                     {41, 520, 4, PADDED | WRONG},
                                                     {0}};
static const int64_t quantile_bias_shapes[][MAX_SIZES] = {{1, 0, 1},   {8, 50, 1},    {33, 90, -1},
                                                          {256, 0, 1}, {1000, 25, 1}, {0}};
static const int64_t router_logit_shapes[][MAX_SIZES] = {
    {1, 8, 16}, {7, 33, 17}, {130, 8, 96}, {333, 128, 512}, {1, 8, 16, 1}, {130, 33, 96, 1}, {333, 128, 512, 1}, {0}};
/* T, E, k, first, count, capacity, by position */
static const int64_t drop_shapes[][MAX_SIZES] = {{1, 1, 1, 0, 1, 1, 0},
                                                 {40, 4, 2, 0, 40, 5, 0},
                                                 {40, 4, 2, 10, 20, 5, 1},
                                                 {1000, 16, 4, 250, 500, 100, 0},
                                                 {999, 8, 2, 0, 999, 0, 1},
                                                 {513, 128, 8, 0, 100, 7, 0},
                                                 {3000, 8, 2, 1500, 1500, 400, 1},
                                                 {0}};
/* T, E, k, first, count, experts of one place, copies, capacity */
static const int64_t plan_shapes[][MAX_SIZES] = {{1, 1, 1, 0, 1, 1, 1, 0},
                                                 {40, 8, 2, 0, 8, 8, 1, 0},
                                                 {100, 8, 2, 4, 2, 2, 1, 0},
                                                 {333, 8, 2, 0, 8, 4, 2, 0},
                                                 {1000, 128, 8, 0, 128, 16, 1, 0},
                                                 {1001, 128, 8, 32, 64, 16, 3, 0},
                                                 {257, 16, 4, 0, 16, 4, 1, 100},
                                                 {300, 16, 4, 4, 8, 2, 2, 9},
                                                 {5000, 512, 3, 0, 512, 512, 1, 0},
                                                 {70, 3000, 6, 0, 3000, 100, 1, 0},
                                                 {9, 9000, 8, 0, 9000, 9000, 1, 2},
                                                 {140000, 64, 2, 0, 64, 32, 1, 0},
                                                 {0}};
/* sources, experts here, most rows */
static const int64_t order_shapes[][MAX_SIZES] = {{1, 1, 3},   {1, 8, 100}, {8, 1, 100}, {4, 32, 700},
                                                  {64, 40, 9}, {2, 3, 0},   {0}};
static const int64_t combine_shapes[][MAX_SIZES] = {{1, 1, 1, 0},
                                                    {1000, 1, 1, 0},
                                                    {7, 2, 24, 1},
                                                    {100, 8, 2048, 0},
                                                    {65, 9, 33, 2},
                                                    {33, 16, 264, 2},
                                                    {300, 3, 8, 1},
                                                    {3001, 4, 1, 2},
                                                    {5, 8, 20000, 1},
                                                    {300, 1, 64, 2},
                                                    {0}};
static const int64_t row_scale_shapes[][MAX_SIZES] = {{1, 1},    {1, 24},     {7, 33},   {129, 344},   {33, 14336},
                                                      {5, 4099}, {1001, 768}, {35, 100}, {300, 96, 1}, {0}};
static const int64_t grouped_bias_shapes[][MAX_SIZES] = {{1, 1, 1},       {7, 33, 2},      {129, 344, 8}, {3, 24, 64},
                                                         {5000, 4099, 3}, {1001, 768, 64}, {35, 100, 1},  {0}};

static const int64_t conv_shapes[][MAX_SIZES] = {{1, 1, 1, ONE, 0, 0, 0},
                                                 {5, 24, 4, ONE, 1, 1, 0},
                                                 {70, 33, 3, PACKED, 0, 0, 1},
                                                 {300, 264, 4, PACKED, 1, 0, 8},
                                                 {1000, 96, 4, ONE, 1, 1, 0},
                                                 {50, 40, 8, PACKED, 1, 1, 4},
                                                 {9, 264, 4, DECODE, 1, 0, 0},
                                                 {3, 7, 8, DECODE, 0, 1, 0},
                                                 {150, 48, 4, CONTINUED, 1, 0, 0},
                                                 {4, 48, 4, CONTINUED, 1, 0, 0},
                                                 {150, 48, 3, PIECES, 1, 1, 4},
                                                 {6, 20, 4, PIECES, 1, 0, 0},
                                                 {0}};
static const int64_t conv_backward_shapes[][MAX_SIZES] = {
    {1, 1, 1, ONE, 0, 0, 0},        {5, 24, 4, ONE, 1, 1, 0},    {70, 33, 3, PACKED, 0, 0, 1},
    {300, 264, 4, PACKED, 1, 0, 8}, {3000, 96, 4, ONE, 1, 1, 0}, {50, 40, 8, PACKED, 1, 1, 4},
    {150, 48, 3, PIECES, 1, 1, 4},  {6, 20, 4, PIECES, 1, 0, 0}, {0}};
static const int64_t conv_carry_shapes[][MAX_SIZES] = {
    {150, 48, 3, PIECES, 1, 1, 4}, {6, 20, 4, PIECES, 1, 0, 0}, {6, 5, 8, PIECES, 0, 0, 0}, {0}};
static const int64_t delta_shapes[][MAX_SIZES] = {{1, 1, 1, 16, 16, ONE, 0},           {7, 1, 2, 8, 24, ONE, 1},
                                                  {64, 1, 1, 64, 64, ONE, 0},          {131, 2, 2, 20, 36, ONE, 3},
                                                  {150, 2, 4, 16, 16, PACKED, 0},      {200, 1, 3, 128, 128, PACKED, 8},
                                                  {1000, 2, 4, 64, 128, ONE, 0},       {60, 2, 4, 32, 40, PACKED, 0},
                                                  {9, 2, 4, 128, 128, DECODE, 0},      {9, 2, 2, 33, 19, DECODE, 1},
                                                  {160, 2, 4, 128, 64, CONTINUED, 0},  {10, 1, 2, 64, 16, CONTINUED, 0},
                                                  {300, 2, 4, 64, 128, PIECES, 0},     {30, 1, 1, 16, 20, PIECES, 5},
                                                  {700, 2, 4, 128, 128, ONE, 0},       {300, 1, 2, 128, 128, PIECES, 8},
                                                  {160, 2, 4, 128, 128, CONTINUED, 0}, {0}};
static const int64_t delta_backward_shapes[][MAX_SIZES] = {
    {1, 1, 1, 16, 16, ONE, 0},       {7, 1, 2, 8, 24, ONE, 1},
    {64, 1, 1, 64, 64, ONE, 0},      {131, 2, 2, 20, 36, ONE, 3},
    {150, 2, 4, 16, 16, PACKED, 0},  {200, 1, 3, 128, 128, PACKED, 8},
    {1000, 2, 4, 64, 128, ONE, 0},   {60, 2, 4, 32, 40, PACKED, 0},
    {300, 2, 4, 64, 128, PIECES, 0}, {30, 1, 1, 16, 20, PIECES, 5},
    {700, 2, 4, 128, 128, ONE, 0},   {300, 1, 2, 128, 128, PIECES, 8},
    {64, 1, 1, 128, 128, ONE, 0},    {0}};
static const int64_t delta_map_shapes[][MAX_SIZES] = {
    {300, 2, 4, 64, 128, PIECES, 0}, {30, 1, 1, 16, 20, PIECES, 5}, {400, 1, 2, 128, 128, PIECES, 0}, {0}};
static const int64_t kda_shapes[][MAX_SIZES] = {{1, 1, 1, 16, 16, ONE, 0, 1},
                                                {7, 1, 2, 8, 24, ONE, 1, 1},
                                                {131, 2, 2, 20, 36, ONE, 3, 1},
                                                {150, 2, 4, 16, 16, PACKED, 0, 1},
                                                {200, 1, 3, 128, 128, PACKED, 8, 1},
                                                {400, 2, 2, 64, 128, ONE, 0, 1},
                                                {9, 2, 2, 128, 128, DECODE, 0, 1},
                                                {9, 2, 2, 33, 19, DECODE, 1, 1},
                                                {160, 2, 4, 128, 64, CONTINUED, 0, 1},
                                                {300, 2, 4, 64, 128, PIECES, 0, 1},
                                                {30, 1, 1, 16, 20, PIECES, 5, 1},
                                                {200, 8, 8, 128, 68, PACKED, 0, 1},
                                                {90, 4, 8, 40, 128, CONTINUED, 8, 1},
                                                {700, 4, 4, 128, 128, ONE, 0, 1},
                                                {300, 2, 2, 128, 128, PIECES, 8, 1},
                                                {160, 2, 4, 128, 128, CONTINUED, 0, 1},
                                                {0}};
static const int64_t kda_backward_shapes[][MAX_SIZES] = {
    {1, 1, 1, 16, 16, ONE, 0, 1},        {7, 1, 2, 8, 24, ONE, 1, 1},
    {131, 2, 2, 20, 36, ONE, 3, 1},      {150, 2, 4, 16, 16, PACKED, 0, 1},
    {200, 1, 3, 128, 128, PACKED, 8, 1}, {400, 2, 2, 64, 128, ONE, 0, 1},
    {300, 2, 4, 64, 128, PIECES, 0, 1},  {30, 1, 1, 16, 20, PIECES, 5, 1},
    {200, 8, 8, 128, 68, PACKED, 0, 1},  {150, 4, 8, 40, 128, PIECES, 8, 1},
    {700, 4, 4, 128, 128, ONE, 0, 1},    {300, 2, 2, 128, 128, PIECES, 8, 1},
    {64, 1, 1, 128, 128, ONE, 0, 1},     {0}};
/* Of the heads of {131, 2, 2, 20, 36} and {400, 2, 2, 64, 128} the sums over tokens nearly cancel: terms in fp32 leave
 * 1.6e-5 and 4.9e-5 of them, more than the limit, which is for the largest head. */
static const int64_t kda_decay_shapes[][MAX_SIZES] = {
    {1, 1, 1, 16, 16, ONE, 0, 1},        {7, 1, 2, 8, 24, ONE, 1, 1},
    {150, 2, 4, 16, 16, PACKED, 0, 1},   {200, 1, 3, 128, 128, PACKED, 8, 1},
    {300, 2, 4, 64, 128, PIECES, 0, 1},  {30, 1, 1, 16, 20, PIECES, 5, 1},
    {200, 8, 8, 128, 68, PACKED, 0, 1},  {150, 4, 8, 40, 128, PIECES, 8, 1},
    {300, 2, 2, 128, 128, PIECES, 8, 1}, {0}};
static const int64_t kda_map_shapes[][MAX_SIZES] = {
    {300, 2, 4, 64, 128, PIECES, 0, 1}, {30, 1, 1, 16, 20, PIECES, 5, 1}, {400, 1, 2, 128, 128, PIECES, 0, 1}, {0}};
static const int64_t ssd_shapes[][MAX_SIZES] = {{1, 1, 1, 16, 16, ONE, 0, 0},
                                                {7, 1, 2, 8, 24, ONE, 8, 0},
                                                {64, 1, 1, 128, 64, ONE, 0, 0},
                                                {131, 2, 4, 20, 36, ONE, 3, 0},
                                                {150, 2, 4, 16, 16, PACKED, 0, 1},
                                                {200, 1, 3, 128, 64, PACKED, 8, 0},
                                                {1000, 2, 8, 128, 64, ONE, 0, 0},
                                                {1000, 2, 2, 64, 48, ONE, 0, 1},
                                                {60, 2, 4, 32, 40, PACKED, 0, 0},
                                                {150, 1, 2, 256, 128, ONE, 0, 0},
                                                {9, 2, 4, 128, 64, DECODE, 0, 0},
                                                {9, 2, 2, 33, 19, DECODE, 1, 1},
                                                {160, 2, 4, 128, 64, CONTINUED, 0, 0},
                                                {10, 1, 2, 64, 16, CONTINUED, 0, 0},
                                                {300, 2, 4, 128, 64, PIECES, 0, 0},
                                                {30, 1, 1, 16, 20, PIECES, 5, 0},
                                                {0}};
static const int64_t ssd_backward_shapes[][MAX_SIZES] = {{1, 1, 1, 16, 16, ONE, 0, 0},
                                                         {7, 1, 2, 8, 24, ONE, 8, 0},
                                                         {64, 1, 1, 128, 64, ONE, 0, 0},
                                                         {131, 2, 4, 20, 36, ONE, 3, 0},
                                                         {150, 2, 4, 16, 16, PACKED, 0, 1},
                                                         {200, 1, 3, 128, 64, PACKED, 8, 0},
                                                         {1000, 2, 8, 128, 64, ONE, 0, 0},
                                                         {1000, 2, 2, 64, 48, ONE, 0, 1},
                                                         {60, 2, 4, 32, 40, PACKED, 0, 0},
                                                         {150, 1, 2, 256, 128, ONE, 0, 0},
                                                         {300, 2, 4, 128, 64, PIECES, 0, 0},
                                                         {30, 1, 4, 16, 20, PIECES, 5, 0},
                                                         {0}};
static const int64_t ssd_map_shapes[][MAX_SIZES] = {
    {300, 2, 4, 128, 64, PIECES, 0, 0}, {30, 1, 1, 16, 20, PIECES, 5, 0}, {400, 1, 2, 64, 32, PIECES, 0, 1}, {0}};
static const int64_t gated_norm_shapes[][MAX_SIZES] = {
    {1, 1, 8, 0},        {7, 3, 16, 0},       {33, 4, 128, 8},    {129, 5, 100, 3},    {500, 2, 256, 0},
    {2000, 8, 128, 4},   {33, 4, 128, 8, 1},  {90, 3, 50, 1, 1},  {1, 1, 8, 0, 2},     {33, 4, 24, 1, 2},
    {300, 8, 512, 8, 2}, {70, 1, 3072, 0, 2}, {5, 2, 1111, 3, 2}, {3000, 2, 64, 8, 2}, {0}};
static const int64_t group_norm_shapes[][MAX_SIZES] = {{1, 1, 8, 0, 2},     {33, 4, 24, 1, 2},  {300, 8, 512, 8, 2},
                                                       {70, 1, 3072, 0, 2}, {5, 2, 1111, 3, 2}, {0}};
static const int64_t multiply_shapes[][MAX_SIZES] = {{1, 1, 0},     {7, 33, 1},    {129, 344, 8},
                                                     {33, 4096, 0}, {500, 100, 4}, {0}};
static operation operations[] = {
    {"linear_forward", linear_forward, ONCE, linear_shapes, {0}},
    {"linear_backward_input", linear_backward_input, ONCE, linear_shapes, {0}},
    {"linear_backward_weight", linear_backward_weight, ONCE, linear_shapes, {0}},
    {"column_sums", column_sums, ONCE, linear_shapes, {0}},
    {"embedding_forward", embedding_forward, ONCE, embedding_shapes, {0}},
    {"embedding_backward", embedding_backward, ONCE, embedding_shapes, {0}},
    {"rmsnorm_forward", rmsnorm_forward, ONCE, norm_shapes, {0}},
    {"rmsnorm_backward", rmsnorm_backward, ONCE, norm_shapes, {0}},
    {"rmsnorm_forward with an offset", rmsnorm_forward_offset, ONCE, norm_shapes, {0}},
    {"rmsnorm_backward with an offset", rmsnorm_backward_offset, ONCE, norm_shapes, {0}},
    {"layernorm_forward with an offset", layernorm_forward_offset, ONCE, norm_shapes, {0}},
    {"layernorm_backward with an offset", layernorm_backward_offset, ONCE, norm_shapes, {0}},
    {"rmsnorm_forward with means", rmsnorm_forward_means, ONCE, norm_shapes, {0}},
    {"rmsnorm_backward with means", rmsnorm_backward_means, ONCE, norm_shapes, {0}},
    {"row_means", row_means, 1e-5, norm_shapes, {0}},
    {"layernorm_forward", layernorm_forward, ONCE, norm_shapes, {0}},
    {"layernorm_backward", layernorm_backward, ONCE, norm_shapes, {0}},
    {"rope_forward", rope_forward, ONCE, rope_shapes, {0}},
    {"rope_backward", rope_backward, ONCE, rope_shapes, {0}},
    {"latent_heads_forward", latent_heads_forward, ONCE, latent_shapes, {0}},
    {"latent_heads_backward", latent_heads_backward, ONCE, latent_shapes, {0}},
    {"qk_forward", qk_forward, ONCE, qk_shapes, {0}},
    {"qk_forward with an offset", qk_forward_offset, ONCE, qk_shapes, {0}},
    {"qk_backward with an offset", qk_backward_offset, ONCE, qk_shapes, {0}},
    {"qk_forward to a cache", qk_forward_to_cache, ONCE, qk_shapes, {0}},
    {"qk_backward", qk_backward, ONCE, qk_shapes, {0}},
    {"attention_forward", attention_forward, 5e-3, attention_shapes, {0}},
    {"attention_backward", attention_backward, 1e-2, attention_shapes, {0}},
    {"attention_forward with biases", attention_forward_biased, 5e-3, bias_shapes, {0}},
    {"attention_backward with biases", attention_backward_biased, 1e-2, bias_shapes, {0}},
    {"indexer_forward", indexer_forward, 0, indexer_shapes, {0}},
    {"indexer_backward", indexer_backward, ONCE, indexer_loss_shapes, {0}},
    {"sparse_attention_forward", sparse_attention_forward, 5e-3, sparse_decode_shapes, {0}},
    {"sparse_attention_backward", sparse_attention_backward, 1e-2, sparse_shapes, {0}},
    {"sparse_attention_shares", sparse_attention_shares, ONCE, shares_shapes, {0}},
    {"attention_merge", attention_merge, ONCE, merge_shapes, {0}},
    {"sink_forward", sink_forward, ONCE, merge_shapes, {0}},
    {"sink_backward", sink_backward, ONCE, merge_shapes, {0}},
    {"accumulate_rows", accumulate_rows, ONCE, merge_shapes, {0}},
    {"short_conv_forward", short_conv_forward, ONCE, conv_shapes, {0}},
    {"short_conv_backward", short_conv_backward, ONCE, conv_backward_shapes, {0}},
    {"short_conv_carry_forward", short_conv_carry_forward, 0, conv_carry_shapes, {0}},
    {"short_conv_carry_backward", short_conv_carry_backward, 1e-5, conv_carry_shapes, {0}},
    {"delta_rule_forward", delta_rule_forward, 1e-2, delta_shapes, {0}},
    {"delta_rule_backward", delta_rule_backward, 1e-2, delta_backward_shapes, {0}},
    {"delta_rule_backward of decays", delta_rule_backward_decays, 5e-2, delta_backward_shapes, {0}},
    {"delta_rule_map_forward", delta_rule_map_forward, 1e-2, delta_map_shapes, {0}},
    {"delta_rule_map_backward", delta_rule_map_backward, 1e-2, delta_map_shapes, {0}},
    {"delta_rule_carry_forward", delta_rule_carry_forward, 1e-5, delta_map_shapes, {0}},
    {"delta_rule_carry_backward", delta_rule_carry_backward, 1e-5, delta_map_shapes, {0}},
    {"delta_rule_forward of channels", delta_rule_forward, 1e-2, kda_shapes, {0}},
    {"delta_rule_backward of channels", delta_rule_backward, 1e-2, kda_backward_shapes, {0}},
    {"delta_rule_backward of decays of channels", delta_rule_backward_decays, 5e-2, kda_decay_shapes, {0}},
    {"delta_rule_map_forward of channels", delta_rule_map_forward, 1e-2, kda_map_shapes, {0}},
    {"delta_rule_map_backward of channels", delta_rule_map_backward, 1e-2, kda_map_shapes, {0}},
    {"ssd_forward", ssd_forward, 1e-2, ssd_shapes, {0}},
    {"ssd_backward", ssd_backward, 1e-2, ssd_backward_shapes, {0}},
    {"ssd_backward of heads", ssd_backward_heads, 5e-2, ssd_backward_shapes, {0}},
    {"ssd_map_forward", ssd_map_forward, 1e-2, ssd_map_shapes, {0}},
    {"ssd_map_backward", ssd_map_backward, 1e-2, ssd_map_shapes, {0}},
    {"ssd_carry_forward", ssd_carry_forward, 1e-5, ssd_map_shapes, {0}},
    {"ssd_carry_backward", ssd_carry_backward, 1e-5, ssd_map_shapes, {0}},
    {"gated_norm_forward", gated_norm_forward, ONCE, gated_norm_shapes, {0}},
    {"gated_norm_backward", gated_norm_backward, ONCE, gated_norm_shapes, {0}},
    {"gated_norm_forward with means", gated_norm_forward_means, ONCE, group_norm_shapes, {0}},
    {"gated_norm_backward with means", gated_norm_backward_means, ONCE, group_norm_shapes, {0}},
    {"gated_norm_means", gated_norm_means, 1e-5, group_norm_shapes, {0}},
    {"multiply_forward", multiply_forward, ONCE, multiply_shapes, {0}},
    {"multiply_backward", multiply_backward, ONCE, multiply_shapes, {0}},
    {"scale_rows", scale_rows, ONCE, multiply_shapes, {0}},
    {"gate_forward", gate_forward, ONCE, element_shapes, {0}},
    {"gate_backward", gate_backward, ONCE, element_shapes, {0}},
    {"activation_forward", activation_forward, ONCE, activation_shapes, {0}},
    {"activation_backward", activation_backward, ONCE, activation_shapes, {0}},
    {"linear_gelu_forward", linear_gelu_forward, ONCE, linear_gelu_shapes, {0}},
    {"linear_backward_gelu", linear_backward_gelu, ONCE, linear_gelu_shapes, {0}},
    {"dropout_add_forward", dropout_add_forward, ONCE, dropout_shapes, {0}},
    {"dropout_add_backward", dropout_add_backward, ONCE, dropout_shapes, {0}},
    {"residual_norm_forward", residual_norm_forward, ONCE, residual_norm_shapes, {0}},
    {"residual_norm_forward with an offset", residual_norm_forward_offset, ONCE, residual_norm_shapes, {0}},
    {"scale", scale, ONCE, add_shapes, {0}},
    {"add", add, ONCE, add_shapes, {0}},
    {"scatter_add_rows", scatter_add_rows, ONCE, scatter_add_shapes, {0}},
    {"position_scale", position_scale, ONCE, row_shapes, {0}},
    {"scatter_rows", scatter_rows, ONCE, row_shapes, {0}},
    {"gather_rows", gather_rows, ONCE, row_shapes, {0}},
    {"memory_copy_rows", copy_rows, ONCE, row_shapes, {0}},
    {"router_logits", router_logits, 1e-5, router_logit_shapes, {0}},
    {"random_logits", random_logits, 1e-5, router_shapes, {0}},
    {"route_forward", route_forward, 1e-5, router_shapes, {0}},
    {"route_sinkhorn", route_sinkhorn, 1e-5, router_shapes, {0}},
    {"route_backward", route_backward, 1e-5, router_shapes, {0}},
    {"aux_loss_forward", aux_loss_forward, 1e-5, router_shapes, {0}},
    {"aux_loss_value", aux_loss_value, 1e-5, router_shapes, {0}},
    {"aux_loss_backward", aux_loss_backward, 1e-5, router_shapes, {0}},
    {"count_experts", count_experts, 0, router_shapes, {0}},
    {"drop_tokens", drop_tokens, 0, drop_shapes, {0}},
    {"dispatch_plan", dispatch_plan, 0, plan_shapes, {0}},
    {"exchange_order", exchange_order, 0, order_shapes, {0}},
    {"combine_rows", combine_rows, ONCE, combine_shapes, {0}},
    {"grouped_bias_forward", grouped_bias_forward, ONCE, grouped_bias_shapes, {0}},
    {"grouped_bias_backward", grouped_bias_backward, ONCE, grouped_bias_shapes, {0}},
    {"scale_rows_forward", scale_rows_forward, ONCE, row_scale_shapes, {0}},
    {"scale_rows_backward", scale_rows_backward, ONCE, row_scale_shapes, {0}},
    {"expert_bias_step", expert_bias_step, 1e-5, router_shapes, {0}},
    {"quantile_sums", quantile_sums, 1e-5, quantile_shapes, {0}},
    {"quantile_bias_step", quantile_bias_step, 1e-5, quantile_bias_shapes, {0}},
    {"cross_entropy_forward", cross_entropy_forward, ONCE, logit_shapes, {0}},
    {"cross_entropy_combine", cross_entropy_combine, ONCE, logit_shapes, {0}},
    {"cross_entropy_loss", cross_entropy_loss, ONCE, logit_shapes, {0}},
    {"cross_entropy_backward", cross_entropy_backward, ONCE, logit_shapes, {0}},
    {"nll_loss", nll_loss, ONCE, element_shapes, {0}},
    {"sample", sample, 0, logit_shapes, {0}},
    {"accumulate", accumulate, ONCE, element_shapes, {0}},
    {"squared_norm", squared_norm, ONCE, square_shapes, {0}},
    {"gradient_scale", gradient_scale, ONCE, scale_shapes, {0}},
    {"step_guard", step_guard, ONCE, guard_shapes, {0}},
    {"adamw_step", adamw_step, ONCE, element_shapes, {0}},
    {"sgd_step", sgd_step, ONCE, element_shapes, {0}},
    {"lion_step", lion_step, ONCE, element_shapes, {0}},
    {"random_normal", random_normal, ONCE, element_shapes, {0}},
    {"convert", convert, ONCE, element_shapes, {0}},
};
enum { NUM_OPERATIONS = sizeof operations / sizeof *operations };

/* ---- comparing --------------------------------------------------------------------------------------------------- */

static const mt_ops *gpu;
static mt_ops gpu_unfused; // the same table without fused operations
static mt_stream *gpu_stream;
static mt_error no_gpu;

/* The outputs of one run, on the host. */
typedef struct results {
    int64_t count;
    buffer outputs[MAX_BUFFERS];
} results;

static void execute(results *out, const operation *op, const int64_t *sizes, const mt_ops *ops, mt_stream *stream,
                    mt_dtype dtype, mt_dtype rounded) {
    run r = {.ops = ops, .stream = stream, .dtype = dtype, .rounded = rounded, .seed = (uint64_t)sizes[0] << 8};
    op->test(&r, sizes);
    ops->stream_synchronize(stream);
    out->count = 0;
    for (int64_t i = 0; i < r.num_buffers; i++) {
        buffer *b = &r.buffers[i];
        if (b->is_output) {
            int64_t bytes = b->count * mt_dtype_size(b->dtype);
            void *host = mt_malloc(bytes);
            ops->memory_copy(host, b->device, bytes, stream);
            ops->stream_synchronize(stream);
            out->outputs[out->count++] = (buffer){host, b->count, b->dtype, true};
        }
        ops->memory_free(b->device);
    }
}

static void results_free(results *r) {
    for (int64_t i = 0; i < r->count; i++) free(r->outputs[i].device);
}

/* ||actual - answer|| / ||answer||; NaN where one was written and the other not. Infinities must be the same. */
static double relative_error(const buffer *actual, const buffer *answer) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < answer->count; i++) {
        double a = read_element(actual->device, i, actual->dtype), b = read_element(answer->device, i, answer->dtype);
        if (isnan(a) != isnan(b)) return NAN;
        if (isnan(b) || a == b) a = b = isfinite(b) ? b : 0;
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    return difference == 0 ? 0 : sqrt(difference / norm);
}

static int failures; // of an operation's test

/* Where the largest difference is. */
static int64_t farthest(const buffer *actual, const buffer *answer) {
    int64_t at = 0;
    double largest = -1;
    for (int64_t i = 0; i < answer->count; i++) {
        double a = read_element(actual->device, i, actual->dtype), b = read_element(answer->device, i, answer->dtype);
        double difference = isnan(a) != isnan(b) ? INFINITY : isnan(b) || a == b ? 0 : fabs(a - b);
        if (difference > largest) largest = difference, at = i;
    }
    return at;
}

/* Counts a failure unless each output of `actual` is within the operation's tolerance of the answer's; whole numbers
 * are the same.
 */
static void expect_close(operation *op, const results *actual, const results *answer, mt_dtype dtype,
                         const char *place) {
    double *worst = &op->worst[dtype], tolerance = dtype == MT_F32 ? 1e-5 : op->bf16_tolerance; // MT_F32 0, MT_BF16 1
    if (dtype == MT_F16) tolerance = fmax(tolerance / 4, 1e-5); // three more bits, and subnormal numbers cost some
    assert_int_equal(actual->count, answer->count);
    for (int64_t i = 0; i < answer->count; i++) {
        double error = relative_error(&actual->outputs[i], &answer->outputs[i]);
        if (!(error <= *worst)) *worst = error;
        if (error <= (answer->outputs[i].dtype == MT_I32 ? 0 : tolerance)) continue;
        const buffer *is = &actual->outputs[i], *wanted = &answer->outputs[i];
        int64_t at = farthest(is, wanted);
        print_error("%s: output %d of %lld elements is off by %g, most at %lld: %g, not %g\n", place, (int)i,
                    (long long)wanted->count, error, (long long)at, read_element(is->device, at, is->dtype),
                    read_element(wanted->device, at, wanted->dtype));
        failures++;
    }
}

static bool is_fused(const operation *op) {
    const char *tested = op->name;
#define SAME(name, ...)                                                                                                \
    if (strcmp(tested, #name) == 0) return true;
    MT_FUSED_OPERATIONS(SAME)
#undef SAME
    return false;
}

static void compare(operation *op, const int64_t *sizes, mt_dtype dtype) {
    results actual, again, answer;
    execute(&answer, op, sizes, &mt_cpu_ops, NULL, MT_F32, dtype);
    execute(&actual, op, sizes, gpu, gpu_stream, dtype, MT_F32);
    execute(&again, op, sizes, gpu, gpu_stream, dtype, MT_F32);
    char place[200];
    snprintf(place, sizeof place, "%s %s {%lld, %lld, %lld, %lld, %lld, %lld, %lld, %lld}", op->name,
             mt_dtype_name(dtype), (long long)sizes[0], (long long)sizes[1], (long long)sizes[2], (long long)sizes[3],
             (long long)sizes[4], (long long)sizes[5], (long long)sizes[6], (long long)sizes[7]);
    expect_close(op, &actual, &answer, dtype, place);
    for (int64_t i = 0; i < actual.count; i++) {
        const buffer *a = &actual.outputs[i];
        if (memcmp(a->device, again.outputs[i].device, (size_t)(a->count * mt_dtype_size(a->dtype))) != 0)
            failures++, print_error("%s: output %d differs between two runs\n", place, (int)i);
    }
    if (is_fused(op)) { // also against the operations that it stands for, on the GPU itself
        results unfused;
        execute(&unfused, op, sizes, &gpu_unfused, gpu_stream, dtype, MT_F32);
        expect_close(op, &actual, &unfused, dtype, place);
        results_free(&unfused);
    }
    results_free(&actual), results_free(&again), results_free(&answer);
}

/* False for heads that models of this GPU do not have: it refuses them by its limits. */
static bool has_heads(const operation *op, const int64_t *sizes) {
    const mt_limits *l = &gpu->limits;
    bool of_channels = strstr(op->name, "of channels") != NULL;
    if (strncmp(op->name, "delta_rule", 10) == 0 && !of_channels)
        return !l->no_delta && sizes[3] <= l->delta_channels && sizes[4] <= l->delta_channels;
    if (op->shapes == plan_shapes) return sizes[1] <= l->experts;
    if (strncmp(op->name, "ssd_", 4) == 0) return sizes[3] <= l->ssd_rows && sizes[4] <= l->ssd_columns;
    return true;
}

static void gpu_agrees_with_cpu(void **state) {
    operation *op = *state;
    if (!gpu) {
        print_message("skipped: %s\n", no_gpu.text);
        skip();
    }
    failures = 0;
    for (int64_t i = 0; op->shapes[i][0] != 0; i++) {
        if (!has_heads(op, op->shapes[i])) continue;
        compare(op, op->shapes[i], MT_F32);
        if (!gpu->limits.no_bf16) compare(op, op->shapes[i], MT_BF16);
        compare(op, op->shapes[i], MT_F16);
    }
    assert_int_equal(failures, 0);
}

/* Memory and streams are at work in every other test, events and AdamW with scales in tests of their own; graphs,
 * grouped products and fp8 have suites, and what ranks say to one another has two. Pipelines, whose first step asks
 * first_use_waits, are in cuda_layouts_mpi. */
static void every_operation_is_tested(void **state) {
    (void)state;
    static const char *const all[] = {
#define NAME(name, ...) #name,
        MT_CUDA_OPERATIONS(NAME)
#undef NAME
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        static const char *const elsewhere[] = {
            "all_",     "reduce_scatter", "broadcast",  "channel_", "mailbox_", "graph_",          "grouped_linear_",
            "quantize", "fp8_",           "adamw_amax", "reduce",   "muon_",    "batched_product", "dequantize"};
        bool found = strncmp(all[i], "memory_", 7) == 0 || strncmp(all[i], "stream_", 7) == 0 ||
                     strncmp(all[i], "event_", 6) == 0 || strcmp(all[i], "workspace_bytes") == 0 ||
                     strcmp(all[i], "delta_workspace_bytes") == 0 || strcmp(all[i], "ssd_workspace_bytes") == 0 ||
                     strcmp(all[i], "sparse_workspace_bytes") == 0 || strcmp(all[i], "first_use_waits") == 0;
        for (size_t j = 0; j < sizeof elsewhere / sizeof *elsewhere; j++)
            found |= strncmp(all[i], elsewhere[j], strlen(elsewhere[j])) == 0;
        for (size_t j = 0; j < NUM_OPERATIONS; j++) found |= strcmp(all[i], operations[j].name) == 0;
        if (!found) fail_msg("%s is not tested", all[i]);
    }
}

/* The copy behind which an event was recorded is done when the event has passed; one that was never recorded is not
 * waited for. */
static void an_event_has_passed_when_what_was_enqueued_before_is_done(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t count = (int64_t)1 << 26;
    int32_t *host = gpu->memory_alloc_host(count * 4), *device = gpu->memory_alloc(count * 4);
    mt_event *done = gpu->event_create(), *never = gpu->event_create();
    for (int32_t turn = 1; turn <= 3; turn++) {
        for (int64_t i = 0; i < count; i++) host[i] = turn + (int32_t)i;
        gpu->memory_copy(device, host, count * 4, gpu_stream);
        gpu->event_record(done, gpu_stream);
        gpu->event_synchronize(never);
        gpu->event_synchronize(done);
        memset(host, 0, (size_t)count * 4); // has left
        gpu->memory_copy(host, device, count * 4, gpu_stream);
        gpu->event_record(done, gpu_stream);
        gpu->event_synchronize(done);
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; i++) wrong += host[i] != turn + (int32_t)i;
        assert_int_equal(wrong, 0);
    }
    gpu->event_destroy(done), gpu->event_destroy(never);
    gpu->memory_free(device);
    gpu->memory_free_host(host);
}

/* The GPU's weight, master weight and states have the bits of the CPU's. Frees the operands, of `of` types. */
static void compare_and_free(int64_t n, const mt_dtype of[5], char *host[5], char *device[5], char *back, int types) {
    for (int k = 0; k < 4; k++) {
        int64_t bytes = n * mt_dtype_size(of[k]);
        gpu->memory_copy(back, device[k], bytes, gpu_stream);
        gpu->stream_synchronize(gpu_stream);
        if (memcmp(back, host[k], (size_t)bytes) != 0) fail_msg("types %d: operand %d differs", types, k);
    }
    for (int k = 0; k < 5; k++) free(host[k]), gpu->memory_free(device[k]);
}

/* Three AdamW steps with every combination of types that have scales: the GPU's states and scales have the bits of the
 * CPU's. The last step is skipped. */
static void adamw_with_scales_has_the_bits_of_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    enum { N = 100003 };
    static const mt_dtype moments[4] = {MT_F32, MT_BF16, MT_F16_SCALED, MT_F8_E4M3};
    for (int types = 0; types < 64; types++) {
        mt_dtype of[5] = {MT_BF16, types & 1 ? MT_F16_SCALED : MT_F32, moments[types >> 1 & 3], moments[types >> 3 & 3],
                          types >> 5 ? MT_BF16 : MT_F32}; // the copy, master, m, v, gradient
        char *host[5], *device[5], *back = mt_malloc(N * 4);
        float amax[6] = {0}, scale = 0.37f, *wide = mt_malloc(N * 4), *numbers = gpu->memory_alloc(7 * 4);
        gpu->memory_zero(numbers, 6 * 4, gpu_stream);
        mt_cpu_ops.random_normal(wide, N, 7, 0, 0, 1, MT_F32, NULL);
        for (int k = 0; k < 5; k++) {
            int64_t bytes = N * mt_dtype_size(of[k]);
            host[k] = mt_calloc(bytes), device[k] = gpu->memory_alloc(bytes);
            if (k == 4) mt_cpu_ops.convert(host[k], of[k], wide, MT_F32, N, NULL);
            gpu->memory_copy(device[k], host[k], bytes, gpu_stream);
        }
        for (int step = 1; step <= 3; step++) {
            float count = (float)step;
            mt_update adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 - powf(0.9f, count), 1 - powf(0.95f, count)};
            if (step == 3) scale = -1;
            gpu->memory_copy(numbers + 6, &scale, 4, gpu_stream);
            gpu->memory_zero(numbers + 3, 3 * 4, gpu_stream), memset(amax + 3, 0, 3 * 4);
            for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
                char **at = on_gpu ? device : host;
                mt_update_args a = {.n = N, .param = at[0], .master = at[1], .m = at[2], .v = at[3], .grad = at[4]};
                a.dtype = of[0], a.master_dtype = of[1], a.m_dtype = of[2], a.v_dtype = of[3], a.grad_dtype = of[4];
                a.scale = on_gpu ? numbers + 6 : &scale;
                a.amax = on_gpu ? numbers : amax, a.new_amax = on_gpu ? numbers + 3 : amax + 3;
                (on_gpu ? gpu : &mt_cpu_ops)->adamw_amax(&a, &adamw, on_gpu ? gpu_stream : NULL);
                (on_gpu ? gpu : &mt_cpu_ops)->adamw_step(&a, &adamw, on_gpu ? gpu_stream : NULL);
            }
            for (int k = 0; k < 3; k++) // of the others, only the CPU's are not used
                if (!mt_state_has_scale(of[k + 1])) amax[k + 3] = 0;
            gpu->memory_copy(numbers, numbers + 3, 3 * 4, gpu_stream), memcpy(amax, amax + 3, 3 * 4);
            float got[3];
            gpu->memory_copy(got, numbers, sizeof got, gpu_stream);
            gpu->stream_synchronize(gpu_stream);
            if (memcmp(got, amax, sizeof got) != 0) fail_msg("types %d, step %d: scales differ", types, step);
        }
        compare_and_free(N, of, host, device, back, types);
        free(back), free(wide), gpu->memory_free(numbers);
    }
}

/* Two AdamW steps with every combination of types: the GPU's results have the bits of the CPU's, so state that moves
 * between the two changes nothing. */
static void adamw_has_the_bits_of_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    enum { N = 100003 };
    for (int types = 0; types < 16; types++) {
        mt_dtype of[5] = {types & 1 ? MT_BF16 : MT_F32, MT_F32};
        for (int k = 2; k < 5; k++) of[k] = types >> (k - 1) & 1 ? MT_BF16 : MT_F32; // m, v, gradient
        char *host[5], *device[5], *back = mt_malloc(N * 4);
        float *wide = mt_malloc(N * 4), scale = 0.37f, *scale_on_gpu = gpu->memory_alloc(4);
        gpu->memory_copy(scale_on_gpu, &scale, 4, gpu_stream);
        for (int k = 0; k < 5; k++) {
            int64_t bytes = N * mt_dtype_size(of[k]);
            host[k] = mt_malloc(bytes), device[k] = gpu->memory_alloc(bytes);
            mt_cpu_ops.random_normal(wide, N, 7 + (uint64_t)k, 0, 0, k == 4 ? 1 : 0.1f, MT_F32, NULL);
            for (int64_t i = 0; k == 3 && i < N; i++) wide[i] = fabsf(wide[i]);
            mt_cpu_ops.convert(host[k], of[k], wide, MT_F32, N, NULL);
            gpu->memory_copy(device[k], host[k], bytes, gpu_stream);
        }
        for (int step = 1; step <= 2; step++) {
            float count = (float)step;
            mt_update adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 - powf(0.9f, count), 1 - powf(0.95f, count)};
            for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
                char **at = on_gpu ? device : host;
                mt_update_args a = {.n = N, .param = at[0], .m = at[2], .v = at[3], .grad = at[4], .dtype = of[0]};
                a.master = of[0] == MT_BF16 ? (float *)(void *)at[1] : NULL, a.scale = on_gpu ? scale_on_gpu : &scale;
                a.m_dtype = of[2], a.v_dtype = of[3], a.grad_dtype = of[4];
                (on_gpu ? gpu : &mt_cpu_ops)->adamw_step(&a, &adamw, on_gpu ? gpu_stream : NULL);
            }
        }
        compare_and_free(N, of, host, device, back, types);
        free(back), free(wide), gpu->memory_free(scale_on_gpu);
    }
}

enum { FEW = 48, MANY = 64 }; // tokens

/* In deterministic mode all numbers of tokens share an algorithm, and a product whose candidates another stream timed
 * before is no exception: the first rows of many tokens have the bits of few. */
static void a_deterministic_stream_takes_no_choice_that_was_timed(void **state) {
    (void)state;
    if (!gpu) skip();
    int64_t bytes = gpu->workspace_bytes(1024, 40960, 32, 256);
    void *room = gpu->memory_alloc(bytes);
    mt_stream *deterministic = gpu->stream_create(room, bytes, true);
    for (int64_t N = 8; N <= 512; N *= 4)
        for (int64_t K = 16; K <= 16384; K *= 4) {
            float *x = gpu->memory_alloc(MANY * K * 4), *w = gpu->memory_alloc(N * K * 4);
            float *few = gpu->memory_alloc(MANY * N * 4), *many = gpu->memory_alloc(MANY * N * 4);
            float *host[2] = {mt_malloc(FEW * N * 4), mt_malloc(FEW * N * 4)};
            gpu->random_normal(x, MANY * K, 1, 0, 0, 1, MT_F32, gpu_stream);
            gpu->random_normal(w, N * K, 2, 0, 0, 1, MT_F32, gpu_stream);
            gpu->linear_forward(&(mt_linear_args){MANY, N, K, .x = x, .w = w, .y = many}, MT_F32, gpu_stream);
            gpu->stream_synchronize(gpu_stream);
            gpu->linear_forward(&(mt_linear_args){MANY, N, K, .x = x, .w = w, .y = many}, MT_F32, deterministic);
            gpu->linear_forward(&(mt_linear_args){FEW, N, K, .x = x, .w = w, .y = few}, MT_F32, deterministic);
            gpu->memory_copy(host[0], many, FEW * N * 4, deterministic);
            gpu->memory_copy(host[1], few, FEW * N * 4, deterministic);
            gpu->stream_synchronize(deterministic);
            assert_memory_equal(host[0], host[1], (size_t)(FEW * N * 4));
            gpu->memory_free(x), gpu->memory_free(w), gpu->memory_free(few), gpu->memory_free(many);
            free(host[0]), free(host[1]);
        }
    gpu->stream_destroy(deterministic);
    gpu->memory_free(room);
}

/* ---- failures ---------------------------------------------------------------------------------------------------- */

/* The child process of a test: fails in the given way. */
static int fail_on_purpose(const char *how) {
    mt_error error;
    const mt_ops *ops = mt_cuda_open(0, &error);
    if (!ops) return 2;
    if (strcmp(how, "memory") == 0) ops->memory_alloc((int64_t)1 << 50);
    if (strcmp(how, "limit") == 0) ops->memory_limit((int64_t)2 << 30), ops->memory_alloc((int64_t)2 << 30);
    if (strcmp(how, "ordered limit") == 0) { // a block that was freed does not count
        ops->memory_limit((int64_t)5 << 30);
        ops->memory_free_ordered(ops->memory_alloc_ordered((int64_t)2 << 30, NULL), NULL);
        ops->memory_free_ordered(ops->memory_alloc_ordered((int64_t)3 << 30, NULL), NULL);
        ops->memory_alloc_ordered((int64_t)5 << 30, NULL);
    }
    if (strcmp(how, "copy") == 0) ops->memory_copy(NULL, NULL, 4096, NULL);
    return 0;
}

/* It ends with status 1 and one line, in which every one of `words` is. */
static void expect_failure(const char *how, const char *const *words) {
    char path[512], command[640], line[2048] = "";
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    assert_true(length > 0);
    path[length] = 0;
    snprintf(command, sizeof command, "OMPI_COMM_WORLD_RANK=3 '%s' %s 2>&1", path, how);
    FILE *output = popen(command, "r");
    assert_non_null(output);
    size_t bytes = fread(line, 1, sizeof line - 1, output);
    line[bytes] = 0;
    assert_int_equal(pclose(output), 1 << 8);
    assert_ptr_equal(strchr(line, '\n'), line + bytes - 1);
    for (; *words; words++)
        if (!strstr(line, *words)) fail_msg("'%s' is not in: %s", *words, line);
}

static void failures_name_place_operation_and_rank_and_what_to_change(void **state) {
    (void)state;
    static const char *const memory[] = {"cudaMalloc",   "cuda/device.cu:",        "memory_alloc",
                                         "rank 3",       "GiB are free",           "--micro-batch-size",
                                         "--seq-length", "1125899906842624 bytes", NULL};
    static const char *const copy[] = {"cudaMemcpyAsync", "cuda/device.cu:", "in memory_copy",
                                       "rank 3",          "invalid",         NULL};
    if (!gpu) {
        print_message("skipped: %s\n", no_gpu.text);
        skip();
    }
    static const char *const limit[] = {"2147483648 bytes", "of 2.00 GiB of --memory-limit are free", "rank 3", NULL};
    static const char *const ordered[] = {"5368709120 bytes", "of 5.00 GiB of --memory-limit are free", NULL};
    expect_failure("memory", memory);
    expect_failure("limit", limit);
    expect_failure("'ordered limit'", ordered);
    expect_failure("copy", copy);
}

static void a_limit_makes_a_smaller_gpu(void **state) {
    (void)state;
    const int64_t limit = (int64_t)4 << 30, mib = 1 << 20;
    if (!gpu) {
        print_message("skipped: %s\n", no_gpu.text);
        skip();
    }
    int64_t all = gpu->memory_available();
    gpu->memory_limit(limit);
    int64_t left = gpu->memory_available();
    assert_true(left > 0 && left < limit && left < all); // the context counts
    void *block = gpu->memory_alloc(512 * mib);
    assert_in_range(left - gpu->memory_available(), 512 * mib, 520 * mib);
    gpu->memory_free(block);
    assert_in_range(gpu->memory_available(), left - 8 * mib, left + 8 * mib);
    gpu->memory_limit(0);
    assert_in_range(gpu->memory_available(), all - 8 * mib, all + 8 * mib);
}

#ifdef MT_HAVE_CUDA
static void write_later(void *context) {
    usleep(200000);
    ((unsigned char *)context)[5] = 77;
}

/* Blocks that are not pinned, as most are not under WSL2, hold the same values; small ones are pinned. */
static void blocks_that_are_not_pinned_are_copied_too(void **state) {
    (void)state;
    const int64_t bytes = 24 << 20;
    struct cudaPointerAttributes attributes;
    if (!gpu) {
        print_message("skipped: %s\n", no_gpu.text);
        skip();
    }
    setenv("MT_CUDA_PINNED_MIB", "16", 1);
    unsigned char *from = gpu->memory_alloc_host(bytes), *to = gpu->memory_alloc_host(bytes);
    void *small = gpu->memory_alloc_host(4096), *device = gpu->memory_alloc(bytes);
    unsetenv("MT_CUDA_PINNED_MIB");
    assert_int_equal(cudaPointerGetAttributes(&attributes, from), cudaSuccess);
    assert_int_equal(attributes.type, cudaMemoryTypeUnregistered);
    assert_int_equal(cudaPointerGetAttributes(&attributes, small), cudaSuccess);
    assert_int_equal(attributes.type, cudaMemoryTypeHost);
    for (int64_t i = 0; i < bytes; i++) from[i] = (unsigned char)(i * 31 + i / 4099);
    gpu->memory_copy(device, from, bytes, gpu_stream);
    gpu->memory_copy(to, device, bytes, gpu_stream);
    gpu->stream_synchronize(gpu_stream);
    assert_memory_equal(from, to, bytes);
    // a copy that follows work of the stream on the host has its result
    gpu->stream_call_host(gpu_stream, write_later, from);
    gpu->memory_copy(device, from, bytes, gpu_stream);
    gpu->memory_copy(to, device, bytes, gpu_stream);
    gpu->stream_synchronize(gpu_stream);
    assert_true(from[5] == 77 && to[5] == 77);
    // zeros and random numbers, as the states of an optimizer on the host begin
    gpu->memory_zero(to + 1000, bytes - 1000, gpu_stream);
    gpu->random_normal(from, bytes / 4, 3, 5, 0.5f, 2, MT_F32, gpu_stream);
    gpu->random_normal(device, bytes / 4, 3, 5, 0.5f, 2, MT_F32, gpu_stream);
    gpu->stream_synchronize(gpu_stream);
    assert_true(to[999] != 0 && to[1000] == 0 && to[bytes - 1] == 0);
    gpu->memory_copy(to, device, bytes, gpu_stream);
    gpu->stream_synchronize(gpu_stream);
    assert_memory_equal(from, to, bytes);
    gpu->memory_free_host(from);
    gpu->memory_free_host(to);
    gpu->memory_free_host(small);
    gpu->memory_free(device);
}

static void facts_of_the_gpu_are_its_own(void **state) {
    (void)state;
    mt_gpu_facts facts;
    char line[400];
    if (!gpu) {
        print_message("skipped: %s\n", no_gpu.text);
        skip();
    }
    assert_true(mt_cuda_num_gpus() > 0);
    mt_cuda_gpu_facts(&facts, 1, 0);
    printf("GPU 0: %s, capability %d, kernels %d, %.2f of %.2f GiB free%s\n", facts.name, facts.capability,
           facts.kernels, (double)facts.free / 0x1p30, (double)facts.total / 0x1p30,
           facts.draws ? ", draws a screen" : "");
    assert_int_equal(facts.kernels, mt_cuda_kernel_arch());
    assert_true(facts.capability >= facts.kernels && facts.capability >= 75);
    assert_in_range(facts.free, 1, facts.total);
    mt_gpu_memory_note(line, sizeof line, &facts, 0);
    printf("%s\n", line);
}
#endif

static void *workspace;

static void open_gpu(void) {
    gpu = mt_cuda_open(0, &no_gpu);
    if (!gpu) return;
    gpu_unfused = *gpu;
#define UNFUSE(name, ...) gpu_unfused.name = NULL;
    MT_FUSED_OPERATIONS(UNFUSE)
#undef UNFUSE
    int64_t bytes = gpu->workspace_bytes(1024, 40960, 32, 256);
    workspace = gpu->memory_alloc(bytes);
    gpu_stream = gpu->stream_create(workspace, bytes, false);
}

static void close_gpu(void) {
    if (!gpu) return;
    gpu->stream_destroy(gpu_stream);
    gpu->memory_free(workspace);
    printf("\n%-26s %12s %12s %12s\n", "worst error", "fp32", "bf16", "fp16");
    for (size_t i = 0; i < NUM_OPERATIONS; i++)
        printf("%-26s %12.2e %12.2e %12.2e\n", operations[i].name, operations[i].worst[0], operations[i].worst[1],
               operations[i].worst[2]);
}

int main(int argc, char **argv) {
    const struct CMUnitTest others[] = {
        cmocka_unit_test(every_operation_is_tested),
        cmocka_unit_test(an_event_has_passed_when_what_was_enqueued_before_is_done),
        cmocka_unit_test(adamw_has_the_bits_of_the_cpu),
        cmocka_unit_test(adamw_with_scales_has_the_bits_of_the_cpu),
        cmocka_unit_test(a_deterministic_stream_takes_no_choice_that_was_timed),
        cmocka_unit_test(failures_name_place_operation_and_rank_and_what_to_change),
        cmocka_unit_test(a_limit_makes_a_smaller_gpu),
#ifdef MT_HAVE_CUDA
        cmocka_unit_test(blocks_that_are_not_pinned_are_copied_too),
        cmocka_unit_test(facts_of_the_gpu_are_its_own),
#endif
    };
    enum { NUM_OTHERS = sizeof others / sizeof *others };
    struct CMUnitTest tests[NUM_OTHERS + NUM_OPERATIONS];
    memcpy(tests, others, sizeof others);
    if (argc > 1) return fail_on_purpose(argv[1]);
    for (size_t i = 0; i < NUM_OPERATIONS; i++)
        tests[NUM_OTHERS + i] =
            (struct CMUnitTest){operations[i].name, gpu_agrees_with_cpu, NULL, NULL, &operations[i]};
    if (getenv("OPERATIONS")) cmocka_set_test_filter(getenv("OPERATIONS")); // such as delta_rule*
    open_gpu();
    int failed = cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
    close_gpu();
    return failed;
}
