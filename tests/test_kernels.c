/* The CPU's kernels against independent references in float64: every forward by value, every backward by central finite
 * differences of the float64 forward. */
// Sections of megatron.c: §1 §3 §3a §3b §3c §3d §3e §3f §3g §3i §7
#include "../megatron.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#endif

static const mt_ops *ops = &mt_cpu_ops;

/* ==== operands with guard values around and between their rows =================================================== */

enum { GUARD = 64, GUARD_BYTE = 0xA5 };

typedef struct matrix {
    mt_dtype dtype;
    int64_t rows, width, stride, bytes;
    char *memory, *data;
} matrix;

static matrix matrix_new(int64_t rows, int64_t width, int64_t stride, mt_dtype dtype) {
    matrix m = {.dtype = dtype, .rows = rows, .width = width, .stride = stride};
    int64_t size = mt_dtype_size(dtype);
    m.bytes = (rows * stride + 2 * GUARD) * size;
    m.memory = mt_malloc(m.bytes);
    m.data = m.memory + GUARD * size;
    memset(m.memory, GUARD_BYTE, (size_t)m.bytes);
    return m;
}

static double matrix_read(const matrix *m, int64_t row, int64_t column) {
    int64_t i = row * m->stride + column;
    if (m->dtype == MT_F32) return ((float *)m->data)[i];
    if (m->dtype == MT_F64) return ((double *)m->data)[i];
    return mt_half_to_f32(((uint16_t *)m->data)[i], m->dtype);
}

/* Stores values[rows, width]. */
static void matrix_write(matrix *m, const double *values) {
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->width; c++) {
            double value = values[r * m->width + c];
            if (m->dtype == MT_F32)
                ((float *)m->data)[r * m->stride + c] = (float)value;
            else
                ((uint16_t *)m->data)[r * m->stride + c] = mt_f32_to_half((float)value, m->dtype);
        }
}

static matrix matrix_from(const double *values, int64_t rows, int64_t width, int64_t stride, mt_dtype dtype) {
    matrix m = matrix_new(rows, width, stride, dtype);
    matrix_write(&m, values);
    return m;
}

/* Reads values[rows, width], proves that nothing outside the rows was written, and frees. */
static void matrix_take(matrix *m, double *values) {
    int64_t size = mt_dtype_size(m->dtype);
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->width; c++) {
            if (values) values[r * m->width + c] = matrix_read(m, r, c);
            memset(m->data + (r * m->stride + c) * size, GUARD_BYTE, (size_t)size);
        }
    for (int64_t i = 0; i < m->bytes; i++) assert_int_equal((unsigned char)m->memory[i], GUARD_BYTE);
    free(m->memory);
}

/* The same where only the rows that `written` marks may have been written; others read as 0. */
static void matrix_take_rows(matrix *m, double *values, const bool *written) {
    int64_t size = mt_dtype_size(m->dtype);
    double *all = mt_malloc(m->rows * m->width * 8);
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t i = 0; !written[r] && i < m->width * size; i++)
            assert_int_equal((unsigned char)m->data[r * m->stride * size + i], GUARD_BYTE);
    int64_t rows = m->rows, width = m->width;
    matrix_take(m, all);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) values[r * width + c] = written[r] ? all[r * width + c] : 0;
    free(all);
}

/* ==== numbers ==================================================================================================== */

static uint64_t random_state = 1;

static uint64_t random_word(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Uniform in [-1, 1), rounded to bf16 and to multiples of 2^-24, so that every element type holds it exactly. */
static double random_value(void) {
    double uniform = (double)(random_word() >> 11) / (double)(1ull << 52) - 1.0;
    return nearbyint(ldexp((double)mt_bf16_to_f32(mt_f32_to_bf16((float)uniform)), 24)) / (1 << 24);
}

static double *random_values(int64_t n) {
    double *values = mt_malloc((n + 1) * 8);
    for (int64_t i = 0; i < n; i++) values[i] = random_value();
    return values;
}

static double *zeros(int64_t n) {
    return mt_calloc(n * 8);
}

static double norm_of(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

/* |got - want| <= tolerance |want| as vectors. */
static void assert_near(const char *what, const double *got, const double *want, int64_t n, double tolerance) {
    double size = norm_of(want, n), error = 0;
    for (int64_t i = 0; i < n; i++) error += (got[i] - want[i]) * (got[i] - want[i]);
    error = sqrt(error);
    if (!(error <= tolerance * size + 1e-30)) {
        for (int64_t i = 0, shown = 0; i < n && shown < 5; i++)
            if (!(fabs(got[i] - want[i]) <= tolerance * size)) {
                print_error("%s[%lld]: %.9g, should be %.9g\n", what, (long long)i, got[i], want[i]);
                shown++;
            }
        fail_msg("%s: error %g of norm %g", what, error, size);
    }
}

/* The largest relative error of a rounding to 16 bits. */
static double half_error(mt_dtype dtype) {
    return dtype == MT_F16 ? 0x1p-11 : 0x1p-8;
}

/* Outputs of a forward: fp32 to a few roundings; 16 bits to one rounding of each element. */
static void assert_forward(const char *what, const double *got, const double *want, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) {
        assert_near(what, got, want, n, 1e-6);
        return;
    }
    double scale = norm_of(want, n) / sqrt((double)n);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(got[i] - want[i]) <= fabs(want[i]) * half_error(dtype) * 1.001 + 1e-6 * scale))
            fail_msg("%s[%lld] in %s: %.9g, should be %.9g", what, (long long)i, mt_dtype_name(dtype), got[i], want[i]);
}

/* Gradients: fp32 to 1e-5, 16 bits to the rounding of the stored values. */
static double gradient_tolerance(mt_dtype dtype) {
    return dtype == MT_F32 ? 1e-5 : half_error(dtype);
}

/* out[n_out] of in[n_in], in float64. */
typedef void reference_fn(double *out, const double *in, const void *shape);

/* Inputs up to which every element of a gradient is checked by itself. Of more, each element is in one of these sums.
 */
enum { FEW = 600, SUMS_OF_MANY = 48 };

/* Central differences of sum(dout out) by every input, or by directions: direction n has +1 or -1 at every input of
 * which the number is n modulo SUMS_OF_MANY. */
static void assert_gradient(const char *what, const double *got, reference_fn *reference, const void *shape,
                            const double *in, int64_t n_in, const double *dout, int64_t n_out, mt_dtype dtype) {
    int64_t count = n_in <= FEW ? n_in : SUMS_OF_MANY;
    const double h = n_in <= FEW ? 1e-4 : 1e-5;
    double *point = mt_malloc(n_in * 8), *high = mt_malloc(n_out * 8), *low = mt_malloc(n_out * 8);
    double *want = zeros(count), *have = zeros(count), *sign = mt_malloc(n_in * 8);
    for (int64_t i = 0; i < n_in; i++) {
        uint32_t words[4];
        mt_philox(words, 5, (uint64_t)i, 0);
        sign[i] = n_in <= FEW || words[0] & 1 ? 1 : -1;
    }
    memcpy(point, in, (size_t)n_in * 8);
    for (int64_t n = 0; n < count; n++) {
        for (int64_t i = n; i < n_in; i += count) point[i] = in[i] + h * sign[i];
        reference(high, point, shape);
        for (int64_t i = n; i < n_in; i += count) point[i] = in[i] - h * sign[i];
        reference(low, point, shape);
        for (int64_t i = n; i < n_in; i += count) point[i] = in[i], have[n] += sign[i] * got[i];
        for (int64_t o = 0; o < n_out; o++) want[n] += dout[o] != 0 ? dout[o] * (high[o] - low[o]) / (2 * h) : 0;
    }
    assert_near(what, have, want, count, gradient_tolerance(dtype));
    free(point), free(high), free(low), free(want), free(have), free(sign);
}

/* The tests run for fp32 and bf16, then for fp16; a test with one type a case then takes fp32 and fp16 in turn. */
static mt_dtype both[2] = {MT_F32, MT_BF16};
static int first_type = 0; // of both

/* ==== §1: conversions and random numbers ========================================================================= */

static void philox_gives_the_known_answers_of_random123(void **state) {
    (void)state;
    static const struct {
        uint64_t low, high, key;
        uint32_t out[4];
    } known[3] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x85a308d3243f6a88, 0x0370734413198a2e, 0x299f31d0a4093822, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        mt_philox(out, known[i].key, known[i].low, known[i].high);
        assert_memory_equal(out, known[i].out, sizeof out);
    }
}

/* The float of a small format, computed with ldexp. */
static double decode_small(uint32_t bits, int exponent_bits, int mantissa_bits) {
    int exponent = (int)(bits >> mantissa_bits & ((1u << exponent_bits) - 1)), bias = (1 << (exponent_bits - 1)) - 1;
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
}

static void small_floats_convert_exactly_and_round_to_nearest_even(void **state) {
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        double half = decode_small(bits, 5, 10), brain = decode_small(bits, 8, 7);
        assert_true(isnan(half) ? isnan(mt_f16_to_f32((uint16_t)bits)) : half == mt_f16_to_f32((uint16_t)bits));
        assert_true(isnan(brain) ? isnan(mt_bf16_to_f32((uint16_t)bits)) : brain == mt_bf16_to_f32((uint16_t)bits));
        if (isnan(half))
            assert_true(isnan(mt_f16_to_f32(mt_f32_to_f16((float)half))));
        else
            assert_int_equal(mt_f32_to_f16((float)half), bits);
        if (isnan(brain))
            assert_true(isnan(mt_bf16_to_f32(mt_f32_to_bf16((float)brain))));
        else
            assert_int_equal(mt_f32_to_bf16((float)brain), bits);
        if ((bits & 0x7fff) >= 0x7bff) continue; // the next one up is infinite, or nothing
        double next = decode_small(bits + 1, 5, 10), middle = (half + next) / 2;
        assert_int_equal(mt_f32_to_f16((float)middle), bits + (bits & 1));
        assert_int_equal(mt_f32_to_f16(nextafterf((float)middle, (float)half)), bits);
        assert_int_equal(mt_f32_to_f16(nextafterf((float)middle, (float)next)), bits + 1);
    }
    for (uint32_t bits = 0; bits < 0x7f7f; bits++) {
        double low = decode_small(bits, 8, 7), high = decode_small(bits + 1, 8, 7), middle = (low + high) / 2;
        assert_int_equal(mt_f32_to_bf16((float)middle), bits + (bits & 1));
        assert_int_equal(mt_f32_to_bf16(nextafterf((float)middle, (float)low)), bits);
        assert_int_equal(mt_f32_to_bf16(nextafterf((float)middle, (float)high)), bits + 1);
    }
}

static void convert_matches_the_scalar_conversions_on_every_pattern(void **state) {
    (void)state;
    uint16_t *bits = mt_malloc(65536 * 2), *back = mt_malloc(65536 * 2);
    float *values = mt_malloc(65536 * 4);
    for (int i = 0; i < 65536; i++) bits[i] = (uint16_t)i;
    ops->convert(values, MT_F32, bits, both[1], 65536, NULL);
    for (int i = 0; i < 65536; i++) {
        float want = mt_half_to_f32((uint16_t)i, both[1]);
        assert_memory_equal(&values[i], &want, 4);
    }
    ops->convert(back, both[1], values, MT_F32, 65536, NULL);
    for (int i = 0; i < 65536; i++) assert_int_equal(back[i], mt_f32_to_half(values[i], both[1]));
    ops->convert(back, both[1], bits, both[1], 65535, NULL);
    for (int i = 0; i < 65535; i++)
        if (!isnan(values[i])) assert_int_equal(back[i], i);
    free(bits), free(back), free(values);
}

static void exp_is_within_two_units_in_the_last_place(void **state) {
    (void)state; // softmax's numerator over a sum of one is exp itself
    enum { N = 400000 };
    float *x = mt_malloc(N * 4), *y = mt_malloc(N * 4), zero = 0, minus_one = -1;
    int32_t label = -1;
    for (int64_t i = 0; i < N; i++) x[i] = -103.9f + 192.6f * (float)i / N;
    x[0] = 0.0f, x[1] = -INFINITY, x[2] = NAN, x[3] = INFINITY, x[4] = 1e30f, x[5] = -1e30f, x[6] = 88.8f;
    mt_cross_entropy_args a = {.T = 1, .stride = N, .count = N, .logits = x, .labels = &label};
    a.lse = &zero, a.dlogp = &minus_one, a.dlogits = y;
    ops->cross_entropy_backward(&a, MT_F32, NULL);
    assert_true(y[0] == 1.0f && y[1] == 0.0f && isnan(y[2]) && y[3] == INFINITY && y[4] == INFINITY && y[5] == 0.0f);
    assert_true(y[6] == INFINITY);
    for (int64_t i = 7; i < N; i++) {
        double want = exp((double)x[i]), unit = fmax(ldexp(1, ilogb(want) - 23), ldexp(1, -149));
        if (!(fabs((double)y[i] - want) <= 2 * unit)) fail_msg("exp(%.9g) = %.9g", (double)x[i], (double)y[i]);
    }
    free(x), free(y);
}

static void random_normal_depends_on_key_and_element_alone(void **state) {
    (void)state;
    enum { N = 5001 };
    float whole[N], part[N];
    ops->random_normal(whole, N, 77, 0, 0.5f, 2.0f, MT_F32, NULL);
    for (int64_t first = 1; first < N; first += 997) {
        ops->random_normal(part, N - first, 77, first, 0.5f, 2.0f, MT_F32, NULL);
        assert_memory_equal(part, whole + first, (size_t)(N - first) * 4);
    }
    uint16_t rounded[N];
    ops->random_normal(rounded, N, 77, 0, 0.5f, 2.0f, both[1], NULL);
    for (int i = 0; i < N; i++) assert_int_equal(rounded[i], mt_f32_to_half(whole[i], both[1]));
    ops->random_normal(part, N, 78, 0, 0.5f, 2.0f, MT_F32, NULL);
    assert_memory_not_equal(part, whole, sizeof whole);
    uint32_t words[4]; // number 5 is the second of counter 1
    mt_philox(words, 77, 1, 0);
    double radius = sqrt(-2 * log((words[0] + 0.5) / 4294967296.0));
    double want = 0.5 + 2 * radius * sin(2 * M_PI * ((words[1] + 0.5) / 4294967296.0));
    assert_true(fabs((double)whole[5] - want) < 1e-5);
}

static void random_normal_has_the_moments_and_tail_of_a_normal(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    float *x = mt_malloc(N * 4);
    ops->random_normal(x, N, 1234, 0, 0, 1, MT_F32, NULL);
    double moments[5] = {0}, tail = 0, neighbours = 0;
    for (int64_t i = 0; i < N; i++) {
        double power = 1;
        for (int k = 1; k <= 4; k++) moments[k] += power *= (double)x[i];
        tail += fabsf(x[i]) > 3;
        if (i) neighbours += (double)x[i] * (double)x[i - 1];
    }
    double error = 1 / sqrt(N); // five standard errors of each
    assert_true(fabs(moments[1] / N) < 5 * error);
    assert_true(fabs(moments[2] / N - 1) < 5 * sqrt(2) * error);
    assert_true(fabs(moments[3] / N) < 5 * sqrt(15) * error);
    assert_true(fabs(moments[4] / N - 3) < 5 * sqrt(96) * error);
    assert_true(fabs(tail / N - 0.0026998) < 5 * sqrt(0.0027) * error);
    assert_true(fabs(neighbours / N) < 5 * error);
    free(x);
}

/* ==== linear ===================================================================================================== */

typedef struct linear_shape {
    int64_t T, N, K;
    bool bias;
} linear_shape;

static void linear_reference(double *y, const double *in, const void *shape) {
    const linear_shape *s = shape;
    const double *x = in, *w = x + s->T * s->K, *bias = w + s->N * s->K;
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t n = 0; n < s->N; n++) {
            double sum = s->bias ? bias[n] : 0;
            for (int64_t k = 0; k < s->K; k++) sum += x[t * s->K + k] * w[n * s->K + k];
            y[t * s->N + n] = sum;
        }
}

static void check_linear(const linear_shape *s, mt_dtype dtype) {
    int64_t T = s->T, N = s->N, K = s->K, n_in = T * K + N * K + N;
    double *in = random_values(n_in), *dy = random_values(T * N), *start = random_values(N * K + N);
    double *y = zeros(T * N), *want = zeros(T * N), *grad = zeros(n_in);
    matrix x_m = matrix_from(in, T, K, K, dtype), w_m = matrix_from(in + T * K, N, K, K, dtype);
    matrix b_m = matrix_from(in + T * K + N * K, 1, N, N, dtype), y_m = matrix_new(T, N, N, dtype);
    ops->linear_forward(
        &(mt_linear_args){T, N, K, .x = x_m.data, .w = w_m.data, .bias = s->bias ? b_m.data : NULL, .y = y_m.data},
        dtype, NULL);
    matrix_take(&y_m, y);
    linear_reference(want, in, s);
    assert_forward("y", y, want, T * N, dtype);
    matrix dy_m = matrix_from(dy, T, N, N, dtype), dx_m = matrix_new(T, K, K, dtype);
    matrix dw_m = matrix_from(start, N, K, K, MT_F32), db_m = matrix_from(start + N * K, 1, N, N, MT_F32);
    ops->linear_backward_input(&(mt_linear_args){T, N, K, .w = w_m.data, .dy = dy_m.data, .dx = dx_m.data}, dtype,
                               NULL);
    ops->linear_backward_weight(&(mt_linear_args){T, N, K, .x = x_m.data, .dy = dy_m.data, .dw = (float *)dw_m.data,
                                                  .dbias = s->bias ? (float *)db_m.data : NULL, .accumulate = true},
                                dtype, NULL);
    matrix_take(&dx_m, grad);
    matrix_take(&dw_m, grad + T * K);
    matrix_take(&db_m, grad + T * K + N * K);
    for (int64_t i = 0; i < N * K + N; i++) grad[T * K + i] -= start[i]; // it was added to
    assert_gradient("linear", grad, linear_reference, s, in, n_in, dy, T * N, dtype);
    matrix_take(&x_m, NULL), matrix_take(&w_m, NULL), matrix_take(&b_m, NULL), matrix_take(&dy_m, NULL);
    free(in), free(dy), free(start), free(y), free(want), free(grad);
}

static void linear_matches_float64_and_finite_differences(void **state) {
    (void)state;
    static const linear_shape shapes[] = {{1, 1, 1, true},   {1, 37, 19, true},  {3, 5, 64, false}, {8, 6, 7, true},
                                          {9, 33, 17, true}, {17, 70, 5, false}, {5, 130, 33, true}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = first_type; d < 2; d++) check_linear(&shapes[i], both[d]);
}

/* Sizes past every block: exact products of small integers, so that no order of summation matters. */
static void linear_is_exact_on_integers_past_every_block(void **state) {
    (void)state;
    static const int64_t sizes[2][3] = {{521, 1031, 259}, {63, 264, 20}}; // the second: see mt_matmul_bf16
    for (int run = 0; run < 4; run++) {
        int64_t T = sizes[run / 2][0], N = sizes[run / 2][1], K = sizes[run / 2][2];
        int d = run % 2;
        double *x = zeros(T * K), *w = zeros(N * K), *dy = zeros(T * N), *zero = zeros(N * K);
        for (int64_t i = 0; i < T * K; i++) x[i] = (double)(random_word() % 3) - 1;
        for (int64_t i = 0; i < N * K; i++) w[i] = (double)(random_word() % 3) - 1;
        for (int64_t i = 0; i < T * N; i++) dy[i] = (double)(random_word() % 3) - 1;
        matrix x_m = matrix_from(x, T, K, K, both[d]), w_m = matrix_from(w, N, K, K, both[d]);
        matrix dy_m = matrix_from(dy, T, N, N, both[d]), y_m = matrix_new(T, N, N, both[d]);
        matrix dx_m = matrix_new(T, K, K, both[d]), dw_m = matrix_from(zero, N, K, K, MT_F32);
        ops->linear_forward(&(mt_linear_args){T, N, K, .x = x_m.data, .w = w_m.data, .y = y_m.data}, both[d], NULL);
        ops->linear_backward_input(&(mt_linear_args){T, N, K, .w = w_m.data, .dy = dy_m.data, .dx = dx_m.data}, both[d],
                                   NULL);
        for (int64_t i = 0; i < N * K; i++) ((float *)dw_m.data)[i] = NAN; // is written, not added to
        ops->linear_backward_weight(
            &(mt_linear_args){T, N, K, .x = x_m.data, .dy = dy_m.data, .dw = (float *)dw_m.data}, both[d], NULL);
        for (int64_t i = 0; i < 3000; i++) {
            int64_t t = (int64_t)(random_word() % (uint64_t)T), n = (int64_t)(random_word() % (uint64_t)N);
            int64_t k = (int64_t)(random_word() % (uint64_t)K);
            double y = 0, dx = 0, dw = 0;
            for (int64_t j = 0; j < K; j++) y += x[t * K + j] * w[n * K + j];
            for (int64_t j = 0; j < N; j++) dx += dy[t * N + j] * w[j * K + k];
            for (int64_t j = 0; j < T; j++) dw += dy[j * N + n] * x[j * K + k];
            assert_true(matrix_read(&y_m, t, n) == y && matrix_read(&dx_m, t, k) == dx);
            assert_true(matrix_read(&dw_m, n, k) == dw);
        }
        matrix_take(&x_m, NULL), matrix_take(&w_m, NULL), matrix_take(&dy_m, NULL), matrix_take(&y_m, NULL);
        matrix_take(&dx_m, NULL), matrix_take(&dw_m, NULL);
        free(x), free(w), free(dy), free(zero);
    }
}

/* ==== embedding and norms ======================================================================================== */

typedef struct embedding_shape {
    int64_t T, C, first, count;
    bool accumulate;
    int32_t ids[8];
} embedding_shape;

/* in = w[count, C], then what out held before [T, C]. */
static void embedding_reference(double *out, const double *in, const void *shape) {
    const embedding_shape *s = shape;
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t c = 0; c < s->C; c++) {
            int64_t id = s->ids[t] - s->first;
            double row = id >= 0 && id < s->count ? in[id * s->C + c] : 0;
            out[t * s->C + c] = row + (s->accumulate ? in[(s->count + t) * s->C + c] : 0);
        }
}

static void embedding_matches_float64_and_finite_differences(void **state) {
    (void)state;
    static const embedding_shape shapes[] = {
        {1, 1, 0, 1, false, {0}},
        {8, 67, 0, 5, false, {0, 4, 4, 2, 4, 0, 1, 3}},
        {8, 130, 10, 3, false, {9, 10, 12, 13, 12, 12, 2000000000, 0}},
        {7, 9, 10, 3, true, {9, 10, 12, 13, 12, 12, -1}},
    };
    for (int i = 0; i < 8; i++) {
        const embedding_shape *s = &shapes[i / 2];
        mt_dtype dtype = both[i % 2];
        int64_t T = s->T, C = s->C, n_w = s->count * C;
        double *in = random_values(n_w + T * C), *dout = random_values(T * C), *start = random_values(n_w);
        double *out = zeros(T * C), *want = zeros(T * C), *grad = zeros(n_w + T * C);
        matrix w = matrix_from(in, s->count, C, C, dtype), out_m = matrix_new(T, C, C, dtype);
        if (s->accumulate) matrix_write(&out_m, in + n_w);
        ops->embedding_forward(
            &(mt_embedding_args){T, C, s->first, s->count, s->ids, w.data, out_m.data, .accumulate = s->accumulate},
            dtype, NULL);
        matrix_take(&out_m, out);
        embedding_reference(want, in, s);
        assert_forward("out", out, want, T * C, dtype);
        matrix dw = matrix_from(start, s->count, C, C, MT_F32), dout_m = matrix_from(dout, T, C, C, dtype);
        ops->embedding_backward(
            &(mt_embedding_args){T, C, s->first, s->count, s->ids, .dout = dout_m.data, .dw = (float *)dw.data}, dtype,
            NULL);
        matrix_take(&dw, grad);
        for (int64_t j = 0; j < n_w; j++) grad[j] -= start[j];
        if (s->accumulate) memcpy(grad + n_w, dout, (size_t)(T * C) * 8); // the former contents are added unchanged
        assert_gradient("embedding", grad, embedding_reference, s, in, n_w + T * C, dout, T * C, dtype);
        matrix_take(&w, NULL), matrix_take(&dout_m, NULL);
        free(in), free(dout), free(start), free(out), free(want), free(grad);
    }
}

typedef struct norm_shape {
    int64_t T, H, C, x_stride, y_stride;
    bool layer;   // LayerNorm: H == 1, no strides
    int residual; // 0 none, 1 its own, 2 in dx
} norm_shape;

/* in = x[T, H, C], w[C], b[C]; out = y. eps is 1e-5. */
static void norm_reference(double *y, const double *in, const void *shape) {
    const norm_shape *s = shape;
    const double *w = in + s->T * s->H * s->C, *b = w + s->C;
    for (int64_t r = 0; r < s->T * s->H; r++) {
        const double *x = in + r * s->C;
        double mean = 0, square = 0;
        for (int64_t c = 0; c < s->C && s->layer; c++) mean += x[c] / (double)s->C;
        for (int64_t c = 0; c < s->C; c++) square += (x[c] - mean) * (x[c] - mean) / (double)s->C;
        for (int64_t c = 0; c < s->C; c++)
            y[r * s->C + c] = (x[c] - mean) / sqrt(square + 1e-5) * w[c] + (s->layer ? b[c] : 0);
    }
}

static void check_norm(const norm_shape *s, mt_dtype dtype) {
    int64_t T = s->T, H = s->H, C = s->C, n = T * H * C, n_in = n + 2 * C, width = H * C;
    double *in = random_values(n_in), *dy = random_values(n), *res = random_values(n), *start = random_values(2 * C);
    double *y = zeros(n), *want = zeros(n), *grad = zeros(n_in);
    matrix x = matrix_from(in, T, width, s->x_stride, dtype), w = matrix_from(in + n, 1, C, C, dtype);
    matrix b = matrix_from(in + n + C, 1, C, C, dtype), y_m = matrix_new(T, width, s->y_stride, dtype);
    matrix mean = matrix_new(1, T, T, MT_F32), rstd = matrix_new(1, T * H, T * H, MT_F32);
    matrix dy_m = matrix_from(dy, T, width, s->y_stride, dtype), dx = matrix_new(T, width, s->x_stride, dtype);
    matrix dw = matrix_from(start, 1, C, C, MT_F32), db = matrix_from(start + C, 1, C, C, MT_F32);
    matrix residual = matrix_from(res, T, width, s->x_stride, dtype);
    if (s->residual == 2) matrix_write(&dx, res);
    const void *r = s->residual == 0 ? NULL : s->residual == 1 ? residual.data : dx.data;
    mt_norm_args norm = {.T = T, .H = H, .C = C, .x = x.data, .w = w.data, .b = b.data, .eps = 1e-5f, .y = y_m.data};
    norm.rstd = (float *)rstd.data, norm.dy = dy_m.data, norm.dresidual = r, norm.dx = dx.data;
    norm.dw = (float *)dw.data;
    norm.x_stride = norm.dx_stride = s->x_stride, norm.y_stride = norm.dy_stride = s->y_stride;
    if (s->layer) {
        norm.mean = (float *)mean.data, norm.db = (float *)db.data;
        ops->layernorm_forward(&norm, dtype, NULL);
        ops->layernorm_backward(&norm, dtype, NULL);
    } else {
        ops->rmsnorm_forward(&norm, dtype, NULL);
        ops->rmsnorm_backward(&norm, dtype, NULL);
    }
    matrix_take(&y_m, y);
    norm_reference(want, in, s);
    assert_forward("y", y, want, n, dtype);
    matrix_take(&dx, grad), matrix_take(&dw, grad + n), matrix_take(&db, grad + n + C);
    for (int64_t i = 0; i < 2 * C; i++) grad[n + i] -= start[i];
    for (int64_t i = 0; i < n && s->residual; i++) grad[i] -= res[i];
    assert_gradient("norm", grad, norm_reference, s, in, n_in, dy, n, dtype);
    matrix_take(&x, NULL), matrix_take(&w, NULL), matrix_take(&b, NULL), matrix_take(&dy_m, NULL);
    matrix_take(&mean, NULL), matrix_take(&rstd, NULL), matrix_take(&residual, NULL);
    free(in), free(dy), free(res), free(start), free(y), free(want), free(grad);
}

static void norms_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const norm_shape shapes[] = {
        {1, 1, 8, 8, 8, false, 0},       {5, 1, 67, 67, 67, false, 1},  {3, 4, 16, 80, 64, false, 2},
        {2, 3, 130, 401, 390, false, 0}, {1, 1, 8, 8, 8, true, 0},      {5, 1, 67, 67, 67, true, 1},
        {7, 1, 130, 130, 130, true, 2},  {300, 1, 96, 96, 96, true, 1}, {90, 3, 64, 200, 192, false, 1},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = first_type; d < 2; d++) check_norm(&shapes[i], both[d]);
}

/* ==== rotary positions =========================================================================================== */

typedef struct rope_shape {
    int64_t T, H, D, R;
    bool interleaved, in_place;
} rope_shape;

static double rope_angle(int64_t t, int64_t i) {
    return (double)(t * 3 % 7) * pow(0.3, (double)i);
}

static void rope_reference(double *y, const double *x, const void *shape) {
    const rope_shape *s = shape;
    memcpy(y, x, (size_t)(s->T * s->H * s->D) * 8);
    for (int64_t r = 0; r < s->T * s->H; r++)
        for (int64_t i = 0; i < s->R / 2; i++) {
            int64_t a = r * s->D + (s->interleaved ? 2 * i : i), b = s->interleaved ? a + 1 : a + s->R / 2;
            double c = cos(rope_angle(r / s->H, i)), n = sin(rope_angle(r / s->H, i));
            y[a] = x[a] * c - x[b] * n;
            y[b] = x[a] * n + x[b] * c;
        }
}

static void rope_matches_float64_and_finite_differences(void **state) {
    (void)state;
    static const rope_shape shapes[] = {{1, 1, 8, 8, false, false},  {5, 3, 24, 24, false, true},
                                        {4, 2, 10, 6, false, false}, {5, 3, 24, 24, true, false},
                                        {4, 2, 10, 6, true, true},   {3, 1, 256, 128, false, false}};
    for (int k = 0; k < 12; k++) {
        const rope_shape *s = &shapes[k / 2];
        mt_dtype dtype = both[k % 2];
        int64_t width = s->H * s->D, n = s->T * width, half = s->R / 2, stride = width + 5;
        float cosines[7 * 128], sines[7 * 128];
        int32_t positions[8];
        for (int64_t t = 0; t < s->T; t++) positions[t] = (int32_t)(t * 3 % 7);
        for (int64_t t = 0; t < s->T; t++)
            for (int64_t i = 0; i < half; i++) {
                cosines[positions[t] * half + i] = (float)cos(rope_angle(t, i));
                sines[positions[t] * half + i] = (float)sin(rope_angle(t, i));
            }
        double *x = random_values(n), *dy = random_values(n), *y = zeros(n), *want = zeros(n), *dx = zeros(n);
        matrix x_m = matrix_from(x, s->T, width, stride, dtype), y_m = matrix_new(s->T, width, stride, dtype);
        if (s->in_place) matrix_write(&y_m, x);
        mt_rope_args rope = {.T = s->T, .H = s->H, .D = s->D, .x_stride = stride, .y_stride = stride};
        rope.rotation = (mt_rotation){cosines, sines, positions, s->R, s->interleaved};
        rope.x = s->in_place ? y_m.data : x_m.data, rope.y = y_m.data;
        ops->rope_forward(&rope, dtype, NULL);
        matrix_take(&y_m, y);
        rope_reference(want, x, s);
        assert_forward("rope", y, want, n, dtype);
        matrix dy_m = matrix_from(dy, s->T, width, stride, dtype), dx_m = matrix_new(s->T, width, width, dtype);
        rope.x = dy_m.data, rope.y = dx_m.data, rope.y_stride = width;
        ops->rope_backward(&rope, dtype, NULL);
        matrix_take(&dx_m, dx);
        assert_gradient("rope", dx, rope_reference, s, x, n, dy, n, dtype);
        matrix_take(&x_m, NULL), matrix_take(&dy_m, NULL);
        free(x), free(dy), free(y), free(want), free(dx);
    }
}

typedef struct position_shape {
    int64_t T, width;
    const int32_t *positions;
} position_shape;

/* y = x (1 + 0.3 log(1 + floor(position / 5))). */
static void position_scale_reference(double *y, const double *x, const void *shape) {
    const position_shape *s = shape;
    for (int64_t i = 0; i < s->T * s->width; i++)
        y[i] = x[i] * (1 + 0.3 * log(1 + floor((double)s->positions[i / s->width] / 5)));
}

static void queries_scaled_by_position_match_float64(void **state) {
    (void)state;
    static const int32_t positions[6] = {0, 4, 5, 9, 10, 123};
    enum { T = 6, WIDTH = 7, STRIDE = 11 };
    for (int d = first_type; d < 2; d++) {
        mt_dtype dtype = both[d];
        double *x = random_values(T * WIDTH), *y = mt_malloc(T * WIDTH * 8), *want = mt_malloc(T * WIDTH * 8);
        const position_shape shape = {T, WIDTH, positions};
        matrix m = matrix_from(x, T, WIDTH, STRIDE, dtype);
        const mt_position_scale_args a = {
            .T = T, .width = WIDTH, .x = m.data, .x_stride = STRIDE, .positions = positions, .beta = 0.3, .context = 5};
        ops->position_scale(&a, dtype, NULL);
        matrix_take(&m, y);
        position_scale_reference(want, x, &shape);
        assert_forward("queries", y, want, T * WIDTH, dtype);
        free(x), free(y), free(want);
    }
}

/* ==== heads of latent attention ================================================================================== */

typedef struct latent_shape {
    int64_t T, H, N, R, Dv;
    bool interleaved;
} latent_shape;

/* y = q, k, v of x = q, kv, k_rope. */
static void latent_reference(double *y, const double *x, const void *shape) {
    const latent_shape *s = shape;
    int64_t D = s->N + s->R, heads = s->T * s->H;
    const double *kv = x + heads * D, *k_rope = kv + heads * (s->N + s->Dv);
    double *k = y + heads * D, *v = k + heads * D;
    memcpy(y, x, (size_t)(heads * D) * 8);
    for (int64_t r = 0; r < heads; r++) {
        for (int64_t i = 0; i < s->R / 2; i++) {
            int64_t a = r * D + s->N + (s->interleaved ? 2 * i : i), b = s->interleaved ? a + 1 : a + s->R / 2;
            double c = cos(rope_angle(r / s->H, i)), n = sin(rope_angle(r / s->H, i));
            y[a] = x[a] * c - x[b] * n;
            y[b] = x[a] * n + x[b] * c;
        }
        for (int64_t i = 0; i < s->N; i++) k[r * D + i] = kv[r * (s->N + s->Dv) + i];
        for (int64_t i = 0; i < s->R; i++) k[r * D + s->N + i] = k_rope[r / s->H * s->R + i];
        for (int64_t i = 0; i < s->Dv; i++) v[r * s->Dv + i] = kv[r * (s->N + s->Dv) + s->N + i];
    }
}

static void check_latent_heads(const latent_shape *s, mt_dtype dtype) {
    int64_t heads = s->T * s->H, D = s->N + s->R, n_q = heads * D, n_kv = heads * (s->N + s->Dv), n_rope = s->T * s->R;
    int64_t n_v = heads * s->Dv, n_in = n_q + n_kv + n_rope, n_out = 2 * n_q + n_v, half = s->R / 2;
    float cosines[7 * 128], sines[7 * 128];
    int32_t positions[8];
    for (int64_t t = 0; t < s->T; t++) positions[t] = (int32_t)(t * 3 % 7);
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t i = 0; i < half; i++) {
            cosines[positions[t] * half + i] = (float)cos(rope_angle(t, i));
            sines[positions[t] * half + i] = (float)sin(rope_angle(t, i));
        }
    double *in = random_values(n_in), *dout = random_values(n_out), *out = zeros(n_out), *want = zeros(n_out);
    double *grad = zeros(n_in);
    matrix q = matrix_from(in, 1, n_q, n_q, dtype), kv = matrix_from(in + n_q, 1, n_kv, n_kv, dtype);
    matrix k_rope = matrix_from(in + n_q + n_kv, 1, n_rope, n_rope, dtype);
    matrix k = matrix_new(1, n_q, n_q, dtype), v = matrix_new(1, n_v, n_v, dtype);
    mt_latent_heads_args args = {.T = s->T, .H = s->H, .N = s->N, .Dv = s->Dv};
    args.rotation = (mt_rotation){cosines, sines, positions, s->R, s->interleaved};
    args.q = q.data, args.k = k.data, args.v = v.data, args.kv = kv.data, args.k_rope = k_rope.data;
    ops->latent_heads_forward(&args, dtype, NULL);
    matrix_take(&q, out), matrix_take(&k, out + n_q), matrix_take(&v, out + 2 * n_q);
    latent_reference(want, in, s);
    assert_forward("heads of latent attention", out, want, n_out, dtype);
    matrix dq = matrix_from(dout, 1, n_q, n_q, dtype), dk = matrix_from(dout + n_q, 1, n_q, n_q, dtype);
    matrix dv = matrix_from(dout + 2 * n_q, 1, n_v, n_v, dtype);
    matrix dkv = matrix_new(1, n_kv, n_kv, dtype), dk_rope = matrix_new(1, n_rope, n_rope, dtype);
    args.dq = dq.data, args.dkv = dkv.data, args.dk_rope = dk_rope.data, args.dk = dk.data, args.dv = dv.data;
    ops->latent_heads_backward(&args, dtype, NULL);
    matrix_take(&dq, grad), matrix_take(&dkv, grad + n_q), matrix_take(&dk_rope, grad + n_q + n_kv);
    assert_gradient("heads of latent attention", grad, latent_reference, s, in, n_in, dout, n_out, dtype);
    matrix_take(&kv, NULL), matrix_take(&k_rope, NULL), matrix_take(&dk, NULL), matrix_take(&dv, NULL);
    free(in), free(dout), free(out), free(want), free(grad);
}

static void latent_heads_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const latent_shape shapes[] = {
        {1, 1, 4, 2, 3, false}, {5, 3, 6, 4, 9, true}, {7, 4, 24, 16, 20, false}, {3, 16, 128, 64, 128, true}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = first_type; d < 2; d++) check_latent_heads(&shapes[i], both[d]);
}

/* ==== attention ================================================================================================== */

typedef struct attention_shape {
    int64_t H, G, D, Dv, Tq, Tk, num_spans;
    mt_span spans[4];
    double dropout;
    int64_t first_head;
    int64_t window;
    int64_t buckets, max_distance; // of a bias by distance; 0: none
    bool bidirectional;
} attention_shape;

/* The bucket of a distance by its definition, in float64: the first `exact` distances each have one. */
static int64_t bucket_reference(const attention_shape *s, int64_t distance) {
    int64_t count = s->bidirectional ? s->buckets / 2 : s->buckets, exact = count / 2, first = 0;
    int64_t from = distance < 0 ? -distance : s->bidirectional ? distance : 0;
    if (s->bidirectional && distance > 0) first = count;
    if (from < exact) return first + from;
    double place = log((double)from / (double)exact) / log((double)s->max_distance / (double)exact);
    int64_t shared = exact + (int64_t)(place * (double)(count - exact) + 1e-9);
    return first + (shared < count ? shared : count - 1);
}

static int64_t query_name(int64_t row) {
    return 1000 + row * 7;
}

static int64_t key_name(int64_t row) {
    if (row == 8 || row == 9) return -1;                 // padding
    return row < 6 ? 3 + row : 1ll << 33 | row * 3 % 64; // neighbours at first, scattered later
}

static double attention_kept(const attention_shape *s, int64_t head, int64_t q_row, int64_t k_row) {
    uint32_t words[4];
    if (s->dropout == 0) return 1;
    uint64_t key = (uint64_t)key_name(k_row);
    mt_philox(words, 99, (uint64_t)query_name(q_row), (uint64_t)(s->first_head + head) << 48 | key >> 2);
    return words[key & 3] >= s->dropout * 4294967296.0 ? 1 / (1 - s->dropout) : 0;
}

/* in = q[Tq, H, D], k[Tk, G, D], v[Tk, G, Dv], bias[buckets, H]; out[Tq, H, Dv], then lse[Tq, H]; 0 for rows in no
 * span. scale 0.3. */
static void attention_reference(double *out, const double *in, const void *shape) {
    const attention_shape *s = shape;
    const double *q = in, *k = q + s->Tq * s->H * s->D, *v = k + s->Tk * s->G * s->D;
    const double *bias = v + s->Tk * s->G * s->Dv;
    double *lse = out + s->Tq * s->H * s->Dv, scores[1024];
    memset(out, 0, (size_t)(s->Tq * s->H * (s->Dv + 1)) * 8);
    for (int64_t n = 0; n < s->num_spans; n++)
        for (int64_t i = 0; i < s->spans[n].q_len; i++)
            for (int64_t h = 0; h < s->H; h++) {
                const mt_span *span = &s->spans[n];
                int64_t row = span->q_start + i, g = h / (s->H / s->G), last = i + span->k_len - span->q_len;
                double sum = 0;
                for (int64_t j = 0; j < span->k_len; j++) {
                    bool seen = (!span->causal || j <= last) && (s->window == 0 || j > last - s->window);
                    double dot = 0;
                    for (int64_t d = 0; d < s->D && seen; d++)
                        dot += q[(row * s->H + h) * s->D + d] * k[((span->k_start + j) * s->G + g) * s->D + d];
                    double added = s->buckets > 0 ? bias[bucket_reference(s, j - last) * s->H + h] : 0;
                    scores[j] = seen ? exp(0.3 * dot + added) : 0;
                    sum += scores[j];
                }
                lse[row * s->H + h] = log(sum);
                for (int64_t j = 0; j < span->k_len; j++) {
                    if (scores[j] == 0) continue;
                    double p = scores[j] / sum * attention_kept(s, h, row, span->k_start + j);
                    for (int64_t d = 0; d < s->Dv; d++)
                        out[(row * s->H + h) * s->Dv + d] += p * v[((span->k_start + j) * s->G + g) * s->Dv + d];
                }
            }
}

/* Keeps the rows that spans cover. */
static void attention_rows(const attention_shape *s, bool *queries, bool *keys) {
    memset(queries, 0, (size_t)s->Tq);
    memset(keys, 0, (size_t)s->Tk);
    for (int64_t n = 0; n < s->num_spans; n++) {
        const mt_span *span = &s->spans[n];
        for (int64_t i = 0; i < span->q_len; i++) queries[span->q_start + i] = true;
        for (int64_t j = 0; j < span->k_len; j++) keys[span->k_start + j] = true;
    }
}

/* lse against the reference (-inf where nothing is seen). */
static void assert_lse(const attention_shape *s, matrix *lse, const double *want, const bool *queries) {
    double *got = zeros(s->Tq * s->H);
    matrix_take_rows(lse, got, queries);
    for (int64_t i = 0; i < s->Tq * s->H; i++)
        assert_true(isinf(want[i]) ? got[i] == want[i] : fabs(got[i] - want[i]) < 2e-6 * (1 + fabs(want[i])));
    free(got);
}

static void check_attention(const attention_shape *s, mt_dtype dtype) {
    int64_t n_q = s->Tq * s->H * s->D, n_k = s->Tk * s->G * s->D, n_v = s->Tk * s->G * s->Dv;
    int64_t n_bias = s->buckets * s->H, n_in = n_q + n_k + n_v + n_bias;
    int64_t n_out = s->Tq * s->H * s->Dv, n_lse = s->Tq * s->H, *names = mt_malloc((s->Tq + s->Tk) * 8);
    double *in = random_values(n_in), *dout = random_values(n_out + n_lse), *got = zeros(n_out), *grad = zeros(n_in);
    double *want = zeros(n_out + n_lse);
    bool *queries = mt_malloc(s->Tq), *keys = mt_malloc(s->Tk);
    memset(dout + n_out, 0, (size_t)n_lse * 8); // the loss depends on out alone
    attention_rows(s, queries, keys);
    for (int64_t i = 0; i < s->Tq; i++) names[i] = query_name(i);
    for (int64_t j = 0; j < s->Tk; j++) names[s->Tq + j] = key_name(j);
    mt_attention call = {.num_heads = s->H,
                         .window = s->window,
                         .num_groups = s->G,
                         .head_size = s->D,
                         .value_size = s->Dv,
                         .q_stride = s->H * s->D + 3,
                         .k_stride = s->G * s->D + 8,
                         .v_stride = s->G * s->Dv + 1,
                         .out_stride = s->H * s->Dv + 2,
                         .spans = {s->spans, s->spans, s->num_spans},
                         .scale = 0.3f,
                         .dropout = {s->dropout, 99},
                         .first_head = s->first_head,
                         .q_index = names,
                         .k_index = names + s->Tq,
                         .bias = {NULL, NULL, s->buckets, s->max_distance, s->bidirectional}};
    matrix q = matrix_from(in, s->Tq, s->H * s->D, call.q_stride, dtype);
    matrix k = matrix_from(in + n_q, s->Tk, s->G * s->D, call.k_stride, dtype);
    matrix v = matrix_from(in + n_q + n_k, s->Tk, s->G * s->Dv, call.v_stride, dtype);
    matrix out = matrix_new(s->Tq, s->H * s->Dv, call.out_stride, dtype), lse = matrix_new(s->Tq, s->H, s->H, MT_F32);
    matrix bias = matrix_from(in + n_q + n_k + n_v, s->buckets, s->H, s->H, dtype);
    matrix dbias = matrix_new(s->buckets, s->H, s->H, MT_F32);
    call.q = q.data, call.k = k.data, call.v = v.data, call.out = out.data, call.lse = (float *)lse.data;
    if (n_bias > 0) call.bias.w = bias.data, call.bias.dw = (float *)dbias.data;
    memset(dbias.data, 0, (size_t)n_bias * 4);
    ops->attention_forward(&call, dtype, NULL);
    matrix dout_m = matrix_from(dout, s->Tq, s->H * s->Dv, call.out_stride, dtype);
    matrix dq = matrix_new(s->Tq, s->H * s->D, call.q_stride, dtype);
    matrix dk = matrix_new(s->Tk, s->G * s->D, call.k_stride, dtype);
    matrix dv = matrix_new(s->Tk, s->G * s->Dv, call.v_stride, dtype), row_dot = matrix_new(s->Tq, s->H, s->H, MT_F32);
    call.dq = dq.data, call.dk = dk.data, call.dv = dv.data, call.dout = dout_m.data;
    call.row_dot = (float *)row_dot.data;
    ops->attention_backward(&call, dtype, NULL);
    attention_reference(want, in, s);
    matrix_take_rows(&out, got, queries);
    assert_forward("out", got, want, n_out, dtype);
    assert_lse(s, &lse, want + n_out, queries);
    matrix_take_rows(&dq, grad, queries);
    matrix_take_rows(&dk, grad + n_q, keys);
    matrix_take_rows(&dv, grad + n_q + n_k, keys);
    matrix_take(&dbias, n_bias > 0 ? grad + n_q + n_k + n_v : NULL);
    assert_gradient("attention", grad, attention_reference, s, in, n_in, dout, n_out + n_lse, dtype);
    matrix_take(&q, NULL), matrix_take(&k, NULL), matrix_take(&v, NULL), matrix_take(&dout_m, NULL);
    matrix_take(&row_dot, NULL), matrix_take(&bias, NULL);
    free(names), free(in), free(dout), free(got), free(grad), free(want), free(queries), free(keys);
}

static void attention_matches_float64_and_finite_differences(void **state) {
    (void)state;
    static const attention_shape shapes[] = {
        {1, 1, 8, 8, 1, 1, 1, {{0, 1, 0, 1, true}}, 0, 0, 0, 0, 0, false},
        {3, 3, 16, 16, 13, 13, 1, {{0, 13, 0, 13, true}}, 0, 0, 0, 0, 0, false},
        {4, 2, 8, 8, 15, 15, 3, {{0, 5, 0, 5, true}, {5, 7, 5, 7, true}, {13, 1, 13, 1, true}}, 0, 0, 0, 0, 0, false},
        {4, 1, 8, 8, 11, 11, 1, {{0, 11, 0, 11, true}}, 0, 0, 3, 0, 0, false},
        {2, 1, 8, 8, 2, 20, 2, {{0, 1, 0, 9, true}, {1, 1, 10, 7, true}}, 0, 0, 4, 0, 0, false}, // decoding
        {2, 1, 8, 8, 7, 12, 1, {{1, 5, 1, 10, true}}, 0, 0, 0, 0, 0, false},  // prefill after a prefix
        {2, 2, 24, 16, 9, 6, 1, {{0, 9, 0, 6, false}}, 0, 0, 0, 0, 0, false}, // Dv != D, all see all
        {2, 1, 8, 12, 8, 8, 2, {{0, 4, 0, 4, true}, {4, 4, 0, 8, true}}, 0, 0, 0, 0, 0, false}, // spans that share keys
        {2, 1, 8, 8, 8, 8, 2, {{4, 4, 2, 6, true}, {0, 4, 0, 4, false}}, 0, 0, 2, 0, 0, false}, // the same, out of
                                                                                                // order
        {1, 1, 8, 8, 9, 4, 1, {{0, 9, 0, 4, true}}, 0, 0, 0, 0, 0, false},                      // rows that see no key
        {1,
         1,
         8,
         8,
         4,
         6,
         3,
         {{0, 3, 0, 3, true}, {3, 0, 3, 2, true}, {3, 1, 6, 0, true}},
         0,
         0,
         0,
         0,
         0,
         false}, // empty
        {2, 2, 256, 256, 3, 3, 1, {{0, 3, 0, 3, true}}, 0, 0, 0, 0, 0, false},
        {3, 1, 8, 8, 12, 12, 1, {{0, 12, 0, 12, true}}, 0.3, 5, 0, 0, 0, false},
        {2, 2, 8, 8, 10, 10, 2, {{0, 3, 0, 3, true}, {3, 7, 3, 7, false}}, 0.5, 0, 0, 0, 0, false},
        {2, 1, 8, 8, 299, 299, 2, {{0, 160, 0, 160, true}, {163, 136, 163, 136, true}}, 0, 0, 0, 0, 0, false},
        {1, 1, 16, 8, 200, 333, 1, {{0, 200, 0, 333, true}}, 0.1, 0, 0, 0, 0, false},
        {2, 1, 8, 8, 300, 300, 1, {{0, 300, 0, 300, true}}, 0, 0, 70, 0, 0, false},
        {1, 1, 8, 8, 70, 200, 1, {{0, 70, 0, 200, false}}, 0, 0, 30, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = first_type; d < 2; d++) check_attention(&shapes[i], both[d]);
}

/* Relative biases of T5: both directions and one, distances beyond the last bucket, keys before the queries as in
 * decoding, blocks of queries and keys, dropout, windows. */
static void biases_by_distance_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const attention_shape shapes[] = {
        {2, 2, 8, 8, 13, 13, 1, {{0, 13, 0, 13, false}}, 0, 0, 0, 8, 7, true},
        {2, 2, 8, 8, 13, 13, 1, {{0, 13, 0, 13, true}}, 0, 0, 0, 8, 7, false},
        {4,
         2,
         8,
         12,
         15,
         15,
         3,
         {{0, 5, 0, 5, false}, {5, 7, 5, 7, false}, {13, 1, 13, 1, false}},
         0,
         0,
         0,
         6,
         9,
         true},
        {2, 1, 8, 8, 2, 20, 2, {{0, 1, 0, 9, true}, {1, 1, 10, 7, true}}, 0, 0, 0, 8, 24, false}, // decoding
        {3, 3, 8, 8, 12, 12, 1, {{0, 12, 0, 12, true}}, 0.3, 5, 4, 4, 5, false},
        {1, 1, 8, 8, 150, 150, 1, {{0, 150, 0, 150, false}}, 0, 0, 0, 32, 128, true},
        {1, 1, 8, 8, 70, 200, 1, {{0, 70, 0, 200, true}}, 0, 0, 0, 32, 128, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = first_type; d < 2; d++) check_attention(&shapes[i], both[d]);
}

/* Runs of distances in one bucket, by transformers' T5Attention. */
typedef struct bucket_runs {
    int64_t buckets, max_distance;
    bool bidirectional;
    int count;
    struct {
        int64_t first, bucket;
    } runs[64];
} bucket_runs;

static void buckets_of_distances_equal_transformers(void **state) {
    static const bucket_runs cases[] = {
#include "golden/t5/buckets.h"
    };
    (void)state;
    for (const bucket_runs *c = cases; c < cases + sizeof cases / sizeof *cases; c++) {
        mt_relative_bias bias = {NULL, NULL, c->buckets, c->max_distance, c->bidirectional};
        int run = 0;
        for (int64_t distance = -200; distance <= 200; distance++) {
            if (run + 1 < c->count && c->runs[run + 1].first == distance) run++;
            int64_t got = mt_relative_bucket(&bias, distance), want = c->runs[run].bucket;
            if (got != want)
                fail_msg("%lld buckets up to %lld: distance %lld is in %lld, not %lld", (long long)c->buckets,
                         (long long)c->max_distance, (long long)distance, (long long)got, (long long)want);
        }
    }
}

/* Keys in pages, shuffled and shared by two spans, give the attention of the same keys in order. Rows of the cache that
 * no page holds are NaN. */
static void attention_over_pages_equals_attention_over_rows(void **state) {
    (void)state;
    enum { H = 4, G = 2, D = 16, QUERIES = 40, KEYS = 300, MOST_PAGES = 100 };
    const int64_t page_rows[] = {4, 64, 128};
    for (int k = 0; k < 6; k++) {
        mt_dtype dtype = both[k % 2];
        int64_t rows = page_rows[k / 2], per_span = (KEYS + rows - 1) / rows, size = mt_dtype_size(dtype);
        int64_t num_pages = per_span + 3, bytes = G * D * size;
        double *values = random_values((QUERIES * H + 2 * KEYS * G) * D);
        matrix q = matrix_from(values, QUERIES, H * D, H * D, dtype);
        matrix keys[2], paged[2], out[2], lse[2];
        int32_t table[2 * MOST_PAGES];
        while (num_pages % 7 == 0) num_pages++;
        for (int64_t i = 0; i < 2 * per_span; i++) table[i] = (int32_t)((i % per_span * 7 + 2) % num_pages);
        for (int i = 0; i < 2; i++) {
            keys[i] = matrix_from(values + (QUERIES * H + i * KEYS * G) * D, KEYS, G * D, G * D, dtype);
            paged[i] = matrix_new(num_pages * rows, G * D, G * D, dtype);
            memset(paged[i].data, 0xff, (size_t)(num_pages * rows * bytes));
            for (int64_t j = 0; j < KEYS; j++)
                memcpy((char *)paged[i].data + (table[j / rows] * rows + j % rows) * bytes,
                       (char *)keys[i].data + j * bytes, (size_t)bytes);
            out[i] = matrix_new(QUERIES, H * D, H * D, dtype), lse[i] = matrix_new(QUERIES, H, H, MT_F32);
        }
        for (int i = 0; i < 2; i++) {
            const mt_span spans[] = {{0, 30, 0, KEYS, true}, {30, 10, i * per_span * rows, KEYS - 7, true}};
            mt_attention call = {.num_heads = H, .num_groups = G, .head_size = D, .value_size = D};
            call.q_stride = call.out_stride = H * D, call.k_stride = call.v_stride = G * D;
            call.spans = (mt_spans){spans, spans, 2}, call.scale = 0.3f, call.window = k / 2 == 1 ? 90 : 0;
            call.q = q.data, call.out = out[i].data, call.lse = (float *)lse[i].data;
            call.k = (i ? paged : keys)[0].data, call.v = (i ? paged : keys)[1].data;
            if (i) call.pages = (mt_pages){table, rows, num_pages};
            ops->attention_forward(&call, dtype, NULL);
        }
        double *want = zeros(QUERIES * H * D), *got = zeros(QUERIES * H * D);
        matrix_take(&out[0], want), matrix_take(&out[1], got);
        for (int64_t i = 0; i < QUERIES * H * D; i++)
            if (!(fabs(got[i] - want[i]) <= (dtype == MT_F32 ? 1e-6 : 8e-3)))
                fail_msg("pages of %d: element %d is %g, should be %g", (int)rows, (int)i, got[i], want[i]);
        for (int i = 0; i < 2; i++)
            matrix_take(&keys[i], NULL), matrix_take(&paged[i], NULL), matrix_take(&lse[i], NULL);
        matrix_take(&q, NULL);
        free(values), free(want), free(got);
    }
}

enum { MERGE_ROWS = 40, MERGE_HEADS = 3, MERGE_VALUES = 20, MERGE_ALL = MERGE_ROWS * MERGE_HEADS };

/* Adds what a part says of one query and head to what is there, in float64. */
static void merge_reference(double *out, double *lse, const double *part, double part_lse, bool first) {
    double top = first || part_lse > *lse ? part_lse : *lse;
    double keep = first || top == -INFINITY ? 0 : exp(*lse - top), add = top == -INFINITY ? 0 : exp(part_lse - top);
    for (int64_t c = 0; c < MERGE_VALUES; c++)
        out[c] = first ? part[c] : keep + add == 0 ? 0 : (keep * out[c] + add * part[c]) / (keep + add);
    *lse = first || top == -INFINITY ? top : top + log(keep + add);
}

/* Parts of spans that leave rows out; a query that saw nothing (lse -inf, out 0) before, in the part, or in both. */
/* One NaN in a query, key or value makes NaN of every output that sees it; one in a query or key of no other (a value's
 * is multiplied by 0 there). */
static void a_nan_in_attention_stays_a_nan(void **state) {
    (void)state;
    enum { T = 40, H = 4, G = 2, D = 8 };
    static const mt_span span = {0, T, 0, T, true};
    for (int k = 0; k < 2 * 3 * 2; k++) {
        mt_dtype dtype = both[k % 2];
        int64_t operand = k / 2 % 3, at = k < 6 ? 0 : T - 1; // q, k, v; row
        double *in[] = {random_values(T * H * D), random_values(T * G * D), random_values(T * G * D)};
        in[operand][at * (operand == 0 ? H : G) * D + D + 3] = NAN; // of head or group 1
        matrix q = matrix_from(in[0], T, H * D, H * D, dtype), key = matrix_from(in[1], T, G * D, G * D, dtype);
        matrix v = matrix_from(in[2], T, G * D, G * D, dtype), out = matrix_new(T, H * D, H * D, dtype);
        matrix lse = matrix_new(T, H, H, MT_F32);
        mt_attention call = {.num_heads = H, .num_groups = G, .head_size = D, .value_size = D};
        call.q_stride = call.out_stride = H * D, call.k_stride = call.v_stride = G * D;
        call.spans = (mt_spans){&span, &span, 1}, call.scale = 0.3f;
        call.q = q.data, call.k = key.data, call.v = v.data, call.out = out.data, call.lse = (float *)lse.data;
        ops->attention_forward(&call, dtype, NULL);
        double *got = zeros(T * H * D), *got_lse = zeros(T * H);
        matrix_take(&out, got), matrix_take(&lse, got_lse);
        for (int64_t i = 0; i < T * H * D; i++) {
            int64_t row = i / (H * D), head = i / D % H;
            bool sees = operand == 0 ? row == at && head == 1 : row >= at && head / (H / G) == 1;
            if (operand == 2) sees &= i % D == 3;
            assert_true(sees ? isnan(got[i]) : operand == 2 || isfinite(got[i]));
            if (operand < 2) assert_true(sees ? isnan(got_lse[row * H + head]) : isfinite(got_lse[row * H + head]));
        }
        matrix_take(&q, NULL), matrix_take(&key, NULL), matrix_take(&v, NULL);
        free(got), free(got_lse), free(in[0]), free(in[1]), free(in[2]);
    }
}

/* Products of queries and keys that no number of fp16 can hold, before and after --softmax-scale: scores are fp32, so
 * Megatron's --apply-query-key-layer-scaling would change nothing. */
static void scores_beyond_fp16_have_their_softmax(void **state) {
    (void)state;
    enum { T = 24, H = 2, D = 8 };
    static const mt_span span = {0, T, 0, T, true};
    for (int k = 0; k < 2 * 2; k++) {
        mt_dtype dtype = both[k % 2];
        double scale = k / 2 ? 1 : 1e-5, *in[] = {zeros(T * H * D), zeros(T * H * D), random_values(T * H * D)};
        for (int64_t i = 0; i < T * H * D; i++) // whole numbers, exact in all types
            in[0][i] = 200 + (double)(i * 5 % 32), in[1][i] = 200 + (double)(i * 11 % 47);
        matrix q = matrix_from(in[0], T, H * D, H * D, dtype), key = matrix_from(in[1], T, H * D, H * D, dtype);
        matrix v = matrix_from(in[2], T, H * D, H * D, dtype), out = matrix_new(T, H * D, H * D, dtype);
        matrix lse = matrix_new(T, H, H, MT_F32);
        mt_attention call = {.num_heads = H, .num_groups = H, .head_size = D, .value_size = D};
        call.q_stride = call.out_stride = call.k_stride = call.v_stride = H * D;
        call.spans = (mt_spans){&span, &span, 1}, call.scale = (float)scale;
        call.q = q.data, call.k = key.data, call.v = v.data, call.out = out.data, call.lse = (float *)lse.data;
        ops->attention_forward(&call, dtype, NULL);
        double *got = zeros(T * H * D), *got_lse = zeros(T * H);
        matrix_take(&out, got), matrix_take(&lse, got_lse);
        for (int64_t i = 0; i < T * H; i++) {
            double scores[T], greatest = 0, total = 0, sum[D] = {0};
            for (int64_t j = 0; j <= i / H; j++) {
                scores[j] = 0;
                for (int64_t c = 0; c < D; c++) scores[j] += in[0][i * D + c] * in[1][(j * H + i % H) * D + c];
                assert_true(scores[j] > 65504);
                greatest = fmax(greatest, scores[j]);
            }
            for (int64_t j = 0; j <= i / H; j++) {
                double p = exp(scale * (scores[j] - greatest));
                total += p;
                for (int64_t c = 0; c < D; c++) sum[c] += p * in[2][(j * H + i % H) * D + c];
            }
            double want = scale * greatest + log(total), most = dtype == MT_F32 ? 1e-5 : 2 * half_error(dtype);
            assert_true(fabs(got_lse[i] - want) <= 1e-4 + 1e-6 * want);
            for (int64_t c = 0; c < D; c++)
                assert_true(fabs(got[i * D + c] - sum[c] / total) <= most * fmax(fabs(sum[c] / total), 0.1));
        }
        matrix_take(&q, NULL), matrix_take(&key, NULL), matrix_take(&v, NULL);
        free(got), free(got_lse), free(in[0]), free(in[1]), free(in[2]);
    }
}

/* Attention with a sink equals the softmax over one column more, whose value is 0; lse counts that column. */
static void a_sink_is_a_column_without_a_value(void **state) {
    (void)state;
    enum { T = 24, H = 4, G = 2, D = 8 };
    static const mt_span span = {0, T, 0, T, true};
    for (int k = 0; k < 2 * 2; k++) {
        mt_dtype dtype = both[k % 2];
        bool learnable = k / 2; // else off by one: the column's logit is 0
        double *in[] = {random_values(T * H * D), random_values(T * G * D), random_values(T * G * D), random_values(H)};
        matrix q = matrix_from(in[0], T, H * D, H * D, dtype), key = matrix_from(in[1], T, G * D, G * D, dtype);
        matrix v = matrix_from(in[2], T, G * D, G * D, dtype), out = matrix_new(T, H * D, H * D, dtype);
        matrix lse = matrix_new(T, H, H, MT_F32), sinks = matrix_from(in[3], 1, H, H, dtype);
        mt_attention call = {.num_heads = H, .num_groups = G, .head_size = D, .value_size = D};
        call.q_stride = call.out_stride = H * D, call.k_stride = call.v_stride = G * D;
        call.spans = (mt_spans){&span, &span, 1}, call.scale = 0.3f;
        call.q = q.data, call.k = key.data, call.v = v.data, call.out = out.data, call.lse = (float *)lse.data;
        ops->attention_forward(&call, dtype, NULL);
        mt_sink_args sink = {.spans = &call.spans, .H = H, .Dv = D, .out_stride = H * D, .out = out.data};
        sink.lse = call.lse, sink.sinks = learnable ? sinks.data : NULL;
        ops->sink_forward(&sink, dtype, NULL);
        double *got = zeros(T * H * D), *got_lse = zeros(T * H);
        matrix_take(&out, got), matrix_take(&lse, got_lse);
        for (int64_t i = 0; i < T * H; i++) {
            int64_t t = i / H, h = i % H, g = h / (H / G);
            double total = exp(learnable ? in[3][h] : 0), sum[D] = {0};
            for (int64_t j = 0; j <= t; j++) {
                double dot = 0;
                for (int64_t c = 0; c < D; c++) dot += in[0][i * D + c] * in[1][(j * G + g) * D + c];
                double p = exp(0.3 * dot);
                total += p;
                for (int64_t c = 0; c < D; c++) sum[c] += p * in[2][(j * G + g) * D + c];
            }
            double most = dtype == MT_F32 ? 1e-5 : 2 * 0x1p-8; // out is rounded twice
            assert_true(fabs(got_lse[i] - log(total)) <= 1e-4);
            for (int64_t c = 0; c < D; c++)
                assert_true(fabs(got[i * D + c] - sum[c] / total) <= most * fmax(fabs(sum[c] / total), 0.1));
        }
        matrix_take(&q, NULL), matrix_take(&key, NULL), matrix_take(&v, NULL), matrix_take(&sinks, NULL);
        free(got), free(got_lse), free(in[0]), free(in[1]), free(in[2]), free(in[3]);
    }
}

/* A NaN of either side of a merge of attention reaches out and lse. */
static void a_nan_in_merged_attention_stays_a_nan(void **state) {
    (void)state;
    static const mt_span list[] = {{0, 1, 0, 0, false}};
    const mt_spans spans = {list, list, 1};
    for (int k = 0; k < 4; k++) {
        float out[2] = {1, 2}, part[2] = {3, 4}, lse = k == 0 ? NAN : k == 2 ? -INFINITY : 1;
        float part_lse = k == 0 ? 1 : NAN;
        mt_merge_args a = {.spans = &spans, .H = 1, .Dv = 2, .out = out, .lse = &lse, .part = part};
        a.part_lse = &part_lse, a.first = k == 3;
        if (k == 3) part[0] = part[1] = NAN;
        ops->attention_merge(&a, MT_F32, NULL);
        assert_true(isnan(out[0]) && isnan(out[1]) && isnan(lse));
    }
}

static void attention_merge_matches_float64(void **state) {
    (void)state;
    static const mt_span list[] = {{3, 10, 0, 0, false}, {13, 1, 0, 0, false}, {20, 18, 0, 0, false}};
    const mt_spans spans = {list, list, 3};
    for (int k = 0; k < 4; k++) {
        mt_dtype dtype = both[k % 2];
        bool first = k >= 2, in_span[MERGE_ROWS] = {false};
        double *out = random_values(MERGE_ALL * MERGE_VALUES), *part = random_values(MERGE_ALL * MERGE_VALUES);
        double *lse = random_values(MERGE_ALL), *part_lse = random_values(MERGE_ALL), *got = zeros(MERGE_ALL * 20);
        for (int64_t i = 0; i < MERGE_ALL; i++) {
            lse[i] = i % 5 == 0 ? -INFINITY : 90 * lse[i], part_lse[i] = i % 7 == 0 ? -INFINITY : 90 * part_lse[i];
            if (i % 11 == 0) lse[i] = part_lse[i];
            for (int64_t c = 0; c < MERGE_VALUES; c++) {
                if (lse[i] == -INFINITY) out[i * MERGE_VALUES + c] = 0;
                if (part_lse[i] == -INFINITY) part[i * MERGE_VALUES + c] = 0;
            }
        }
        int64_t width = MERGE_HEADS * MERGE_VALUES;
        matrix out_m = matrix_from(out, MERGE_ROWS, width, width, MT_F32);
        matrix part_m = matrix_from(part, MERGE_ROWS, width, width, dtype);
        matrix lse_m = matrix_from(lse, MERGE_ROWS, MERGE_HEADS, MERGE_HEADS, MT_F32);
        matrix part_lse_m = matrix_from(part_lse, MERGE_ROWS, MERGE_HEADS, MERGE_HEADS, MT_F32);
        for (int64_t i = 0; i < MERGE_ALL; i++)
            lse[i] = ((float *)lse_m.data)[i], part_lse[i] = ((float *)part_lse_m.data)[i];
        const mt_merge_args a = {.spans = &spans,
                                 .H = MERGE_HEADS,
                                 .Dv = MERGE_VALUES,
                                 .out = (float *)out_m.data,
                                 .lse = (float *)lse_m.data,
                                 .part = part_m.data,
                                 .part_lse = (float *)part_lse_m.data,
                                 .first = first};
        ops->attention_merge(&a, dtype, NULL);
        for (int64_t s = 0; s < spans.count; s++)
            for (int64_t t = list[s].q_start; t < list[s].q_start + list[s].q_len; t++) in_span[t] = true;
        for (int64_t i = 0; i < MERGE_ALL; i++)
            if (in_span[i / MERGE_HEADS])
                merge_reference(out + i * MERGE_VALUES, &lse[i], part + i * MERGE_VALUES, part_lse[i], first);
        matrix_take(&out_m, got);
        assert_near("merged out", got, out, MERGE_ALL * MERGE_VALUES, 1e-6);
        matrix_take(&lse_m, got);
        for (int64_t i = 0; i < MERGE_ALL; i++)
            if (got[i] != lse[i] && !(fabs(got[i] - lse[i]) <= 1e-6 * fabs(lse[i]) + 1e-6))
                fail_msg("merged lse[%lld]: %.9g, should be %.9g", (long long)i, got[i], lse[i]);
        matrix_take(&part_m, NULL), matrix_take(&part_lse_m, NULL);
        free(out), free(part), free(lse), free(part_lse), free(got);
    }
}

static void accumulate_rows_adds_the_rows_of_the_spans_alone(void **state) {
    (void)state;
    static const mt_span list[] = {{0, 2, 3, 10, false}, {2, 30, 20, 18, false}};
    const mt_spans spans = {list, list, 2};
    enum { ROWS = 40, WIDTH = 21, STRIDE = 25 };
    for (int k = 0; k < 8; k++) {
        mt_dtype dtype = both[k % 2];
        bool first = k / 2 % 2, of_keys = k / 4;
        double *sum = random_values(ROWS * WIDTH), *x = random_values(ROWS * WIDTH), *got = zeros(ROWS * WIDTH);
        matrix sum_m = matrix_from(sum, ROWS, WIDTH, WIDTH, MT_F32), x_m = matrix_from(x, ROWS, WIDTH, STRIDE, dtype);
        const mt_accumulate_args a = {.spans = &spans,
                                      .of_keys = of_keys,
                                      .sum = (float *)sum_m.data,
                                      .x = x_m.data,
                                      .width = WIDTH,
                                      .x_stride = STRIDE,
                                      .first = first};
        ops->accumulate_rows(&a, dtype, NULL);
        for (int s = 0; s < 2; s++) {
            int64_t start = of_keys ? list[s].k_start : list[s].q_start, n = of_keys ? list[s].k_len : list[s].q_len;
            for (int64_t i = start * WIDTH; i < (start + n) * WIDTH; i++) sum[i] = (first ? 0 : sum[i]) + x[i];
        }
        matrix_take(&sum_m, got);
        assert_near("accumulated rows", got, sum, ROWS * WIDTH, 1e-7);
        matrix_take(&x_m, NULL);
        free(sum), free(x), free(got);
    }
}

/* y = a + b, in place as well, and rows added at their numbers; -1: none. */
static void sums_of_elements_and_of_rows_match_float64(void **state) {
    (void)state;
    enum { ROWS = 37, WIDTH = 70, SUMS = 5 };
    int32_t rows[ROWS];
    for (int t = 0; t < ROWS; t++) rows[t] = t % (SUMS + 1) - 1;
    for (int d = first_type; d < 2; d++) {
        int64_t n = ROWS * WIDTH;
        double *a = random_values(n), *b = random_values(n), *sum = random_values(SUMS * WIDTH), *got = zeros(n);
        matrix a_m = matrix_from(a, ROWS, WIDTH, WIDTH, both[d]), b_m = matrix_from(b, ROWS, WIDTH, WIDTH, both[d]);
        matrix y = matrix_new(ROWS, WIDTH, WIDTH, both[d]), sum_m = matrix_from(sum, SUMS, WIDTH, WIDTH, MT_F32);
        ops->scatter_add_rows(
            &(mt_row_args){ROWS, WIDTH, rows, .from = b_m.data, .to = (float *)sum_m.data, .count = SUMS}, both[d],
            NULL);
        for (int64_t i = 0; i < n; i++)
            if (rows[i / WIDTH] >= 0) sum[rows[i / WIDTH] * WIDTH + i % WIDTH] += b[i];
        matrix_take(&sum_m, got);
        assert_near("sums of rows", got, sum, SUMS * WIDTH, 1e-6);
        ops->add(y.data, a_m.data, b_m.data, n, both[d], NULL);
        ops->add(b_m.data, a_m.data, b_m.data, n, both[d], NULL);
        for (int64_t i = 0; i < n; i++) a[i] += b[i];
        matrix_take(&y, got);
        assert_forward("sum", got, a, n, both[d]);
        matrix_take(&b_m, got);
        assert_forward("sum in place", got, a, n, both[d]);
        matrix_take(&a_m, NULL);
        free(a), free(b), free(sum), free(got);
    }
}

/* ==== activations ================================================================================================ */

typedef struct activation_case {
    mt_activation activation;
    int64_t T, F;
    bool weighted;
    mt_glu glu;
} activation_case;

/* out: y[T, F]; in: x[T, F or 2F] and weights[T]. */
static void activation_reference(double *y, const double *in, const void *shape) {
    const activation_case *s = shape;
    int64_t F = s->F, width = mt_activation_rows[s->activation].gated ? 2 * F : F;
    for (int64_t i = 0; i < s->T * F; i++) {
        int64_t t = i / F;
        double x = in[t * width + i % F], up = width > F ? in[t * width + F + i % F] : 1;
        double high = s->glu.clamp > 0 ? (double)s->glu.clamp : INFINITY;
        if (width > F) x = fmin(x, high), up = fmax(-high, fmin(up, high)) + (double)s->glu.offset;
        double weight = s->weighted ? in[s->T * width + t] : 1, u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
        double f = 0;
        switch (s->activation) {
        case MT_ACTIVATION_GELU:
            f = 0.5 * x * erfc(-x / sqrt(2));
            break;
        case MT_ACTIVATION_GELU_TANH:
        case MT_ACTIVATION_GEGLU:
            f = 0.5 * x * (1 + tanh(u));
            break;
        case MT_ACTIVATION_RELU:
            f = x > 0 ? x : 0;
            break;
        case MT_ACTIVATION_SQUARED_RELU:
            f = x > 0 ? x * x : 0;
            break;
        case MT_ACTIVATION_SWIGLU:
            f = x / (1 + exp(-x));
            break;
        case MT_ACTIVATION_QUICK_GEGLU:
            f = x / (1 + exp(-1.702 * x));
            break;
        default:
            fail_msg("an activation without a reference: %d", (int)s->activation);
        }
        y[i] = weight * f * up;
    }
}

/* assert_gradient for activations, whose rows are functions of their own: the differences are those of one row. */
static void assert_activation_gradient(const activation_case *s, const double *got, const double *in, int64_t inputs,
                                       int64_t slopes, const double *dy, mt_dtype dtype) {
    int64_t step = slopes <= FEW ? 1 : slopes / FEW | 1, count = 0, width = inputs / s->T;
    const double h = 1e-4;
    activation_case row_case = *s;
    row_case.T = 1;
    double *row = zeros(width + 1), *high = zeros(s->F), *low = zeros(s->F), *want = zeros(slopes),
           *have = zeros(slopes);
    for (int64_t i = 0; i < slopes; i += step) {
        int64_t t = i < inputs ? i / width : i - inputs, at = i < inputs ? i % width : width;
        memcpy(row, in + t * width, (size_t)width * sizeof *row);
        row[width] = in[inputs + t];
        double x = row[at];
        row[at] = x + h;
        activation_reference(high, row, &row_case);
        row[at] = x - h;
        activation_reference(low, row, &row_case);
        for (int64_t f = 0; f < s->F; f++) want[count] += dy[t * s->F + f] * (high[f] - low[f]) / (2 * h);
        have[count++] = got[i];
    }
    assert_near(mt_activation_rows[s->activation].config_names, have, want, count, gradient_tolerance(dtype));
    free(row), free(high), free(low), free(want), free(have);
}

static void expect_activation(const activation_case *s, mt_dtype dtype) {
    const char *name = mt_activation_rows[s->activation].config_names;
    bool gated = mt_activation_rows[s->activation].gated;
    int64_t T = s->T, n = T * s->F, inputs = gated ? 2 * n : n, slopes = s->weighted ? inputs + T : inputs;
    double *in = random_values(inputs + T), *dy = random_values(n), *y = zeros(n), *want = zeros(n), *got;
    got = zeros(inputs + T);
    float *weights = malloc((size_t)T * 4), *dweights = malloc((size_t)T * 4), *again = malloc((size_t)T * 4);
    for (int64_t i = 0; i < inputs; i++) in[i] *= i % 2 ? 8 : 2;
    for (int64_t t = 0; t < T; t++) weights[t] = (float)in[inputs + t], in[inputs + t] = (double)weights[t];
    const float *w = s->weighted ? weights : NULL;
    float *dw = s->weighted ? dweights : NULL, *dw_again = s->weighted ? again : NULL;
    matrix x_m = matrix_from(in, 1, inputs, inputs, dtype), y_m = matrix_new(1, n, n, dtype);
    matrix dy_m = matrix_from(dy, 1, n, n, dtype), dx_m = matrix_new(1, inputs, inputs, dtype);
    mt_activation_args a = {T, s->F, s->activation, x_m.data, w, .y = y_m.data, .glu = s->glu};
    ops->activation_forward(&a, dtype, NULL);
    a.dy = dy_m.data, a.dx = dx_m.data, a.dweights = dw;
    ops->activation_backward(&a, dtype, NULL);
    if (!gated) { // in place of dy, which is as wide
        matrix d = matrix_from(dy, 1, n, n, dtype);
        ops->activation_backward(&(mt_activation_args){T, s->F, s->activation, x_m.data, w, .dy = d.data, .dx = d.data,
                                                       .dweights = dw_again},
                                 dtype, NULL);
        assert_memory_equal(dx_m.data, d.data, (size_t)(n * mt_dtype_size(dtype)));
        matrix_take(&d, NULL);
    }
    a.dx = x_m.data, a.dweights = dw_again;
    ops->activation_backward(&a, dtype, NULL);
    assert_memory_equal(dx_m.data, x_m.data, (size_t)(inputs * mt_dtype_size(dtype)));
    if (s->weighted) assert_memory_equal(dweights, again, (size_t)T * 4);
    matrix_take(&y_m, y);
    activation_reference(want, in, s);
    assert_forward(name, y, want, n, dtype);
    matrix_take(&dx_m, got);
    for (int64_t t = 0; s->weighted && t < T; t++) got[inputs + t] = (double)dweights[t];
    assert_activation_gradient(s, got, in, inputs, slopes, dy, dtype);
    matrix_take(&x_m, NULL), matrix_take(&dy_m, NULL);
    free(in), free(dy), free(y), free(want), free(got), free(weights), free(dweights), free(again);
}

static void activations_match_float64_and_finite_differences(void **state) {
    (void)state;
    static const int64_t shapes[4][2] = {{1, 1}, {3, 37}, {70, 301}, {2, 1300}};
    for (int activation = 0; activation < MT_NUM_ACTIVATIONS; activation++)
        for (int k = both[1] == MT_F16; k < 16; k += 1 + (both[1] == MT_F16)) { // fp32 once: they take long
            activation_case s = {(mt_activation)activation, shapes[k / 4][0], shapes[k / 4][1], k / 2 % 2, {0, 0}};
            expect_activation(&s, both[k % 2]);
            // no value is as near to the clamp as the step of finite differences
            s.glu = (mt_glu){k % 3 > 0 ? 1.252f : 0, k % 3 > 1 ? 0 : 1};
            if (mt_activation_rows[activation].gated) expect_activation(&s, both[k % 2]);
        }
}

/* Values at a clamp have the slope of values within it, as in PyTorch; NaN is no value within a clamp. */
static void a_clamped_activation_keeps_nan_and_has_no_gradient_beyond_the_clamp(void **state) {
    (void)state;
    enum { F = 6 };
    const float x[2 * F] = {7, 8, -90, NAN, 1, 1, /* up */ 1, 7.5f, -7.5f, 1, NAN, -7}, dy[F] = {1, 1, 1, 1, 1, 1};
    float y[F], dx[2 * F];
    mt_activation_args a = {1, F, MT_ACTIVATION_QUICK_GEGLU, x, NULL, .y = y, .dy = dy, .dx = dx, .glu = {7, 1}};
    ops->activation_forward(&a, MT_F32, NULL);
    ops->activation_backward(&a, MT_F32, NULL);
    assert_true(fabsf(y[0] - 14) < 1e-3f && fabsf(y[1] - 56) < 1e-3f && isnan(y[3]) && isnan(y[4]));
    assert_true(dx[0] > 1.9f && dx[1] == 0 && isnan(dx[3]) && isnan(dx[4]));
    assert_true(dx[F] > 6 && dx[F + 1] == 0 && dx[F + 2] == 0 && isnan(dx[F + 3]) && dx[F + 5] > 0.5f);
}

/* ==== residual stream and rows =================================================================================== */

typedef struct dropout_shape {
    int64_t T, C, first_channel;
    bool residual;
    double p;
} dropout_shape;

/* in = x[T, C], residual[T, C]; token t is named 5 t + 2^40. */
static void dropout_reference(double *out, const double *in, const void *shape) {
    const dropout_shape *s = shape;
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t c = 0; c < s->C; c++) {
            uint32_t words[4];
            uint64_t channel = (uint64_t)(s->first_channel + c);
            mt_philox(words, 4321, (uint64_t)(5 * t + (1ll << 40)), channel >> 2);
            double factor = words[channel & 3] >= s->p * 4294967296.0 ? 1 / (1 - s->p) : 0;
            if (s->p == 0) factor = 1;
            out[t * s->C + c] = in[t * s->C + c] * factor + (s->residual ? in[(s->T + t) * s->C + c] : 0);
        }
}

static void dropout_add_matches_float64_and_finite_differences(void **state) {
    (void)state;
    static const dropout_shape shapes[] = {{1, 1, 0, true, 0},
                                           {5, 37, 0, true, 0.1},
                                           {3, 66, 31, false, 0.5},
                                           {4, 7, 2, true, 0.9},
                                           {300, 70, 0, true, 0}};
    for (int k = 0; k < 10; k++) {
        const dropout_shape *s = &shapes[k / 2];
        mt_dtype dtype = both[k % 2];
        int64_t T = s->T, C = s->C, n = T * C, *names = mt_malloc(T * 8);
        for (int64_t t = 0; t < T; t++) names[t] = 5 * t + (1ll << 40);
        mt_dropout dropout = {s->p, 4321};
        double *in = random_values(2 * n), *dout = random_values(n), *got = zeros(2 * n), *want = zeros(n);
        matrix x = matrix_from(in, T, C, C, dtype), r = matrix_from(in + n, T, C, C, dtype);
        matrix out = matrix_new(T, C, C, dtype), dout_m = matrix_from(dout, T, C, C, dtype);
        matrix dx = matrix_new(T, C, C, dtype);
        ops->dropout_add_forward(&(mt_dropout_add_args){T, C, s->first_channel, names, x.data,
                                                        s->residual ? r.data : NULL, out.data, dropout},
                                 dtype, NULL);
        ops->dropout_add_backward(
            &(mt_dropout_add_args){T, C, s->first_channel, names, dout_m.data, .out = dx.data, .dropout = dropout},
            dtype, NULL);
        void *target = s->residual ? r.data : x.data; // in place
        ops->dropout_add_forward(
            &(mt_dropout_add_args){T, C, s->first_channel, names, x.data, s->residual ? r.data : NULL, target, dropout},
            dtype, NULL);
        assert_memory_equal(target, out.data, (size_t)(n * mt_dtype_size(dtype)));
        matrix_take(&out, got);
        dropout_reference(want, in, s);
        assert_forward("dropout", got, want, n, dtype);
        matrix_take(&dx, got);
        if (s->residual) memcpy(got + n, dout, (size_t)n * 8); // the residual's gradient is dout itself
        assert_gradient("dropout", got, dropout_reference, s, in, 2 * n, dout, n, dtype);
        matrix_take(&x, NULL), matrix_take(&r, NULL), matrix_take(&dout_m, NULL);
        free(names), free(in), free(dout), free(got), free(want);
    }
}

static void dropout_keeps_its_share_and_does_not_depend_on_where_a_row_lies(void **state) {
    (void)state;
    enum { T = 200, C = 1024 };
    float *x = mt_malloc(T * C * 4), *y = mt_malloc(T * C * 4), part[C];
    int64_t names[T], kept = 0;
    for (int64_t i = 0; i < T * C; i++) x[i] = 1;
    for (int64_t t = 0; t < T; t++) names[t] = t;
    mt_dropout dropout = {0.2, 7};
    ops->dropout_add_forward(&(mt_dropout_add_args){T, C, 0, names, x, NULL, y, dropout}, MT_F32, NULL);
    for (int64_t i = 0; i < T * C; i++) {
        assert_true(y[i] == 0 || y[i] == 1.25f);
        kept += y[i] != 0;
    }
    assert_true(fabs((double)kept / (T * C) - 0.8) < 5 * 0.4 / sqrt(T * C));
    ops->dropout_add_forward(&(mt_dropout_add_args){1, C - 333, 333, names + 41, x, NULL, part, dropout}, MT_F32, NULL);
    assert_memory_equal(part, y + 41 * C + 333, (C - 333) * 4);
    free(x), free(y);
}

static void rows_scatter_and_gather_within_their_width(void **state) {
    (void)state;
    static const int32_t rows[4] = {6, 0, 3, 2};
    for (int d = first_type; d < 2; d++) {
        double *from = random_values(4 * 5), *got = zeros(8 * 5);
        bool written[8] = {true, false, true, true, false, false, true, false};
        matrix a = matrix_from(from, 4, 5, 7, both[d]), b = matrix_new(8, 5, 9, both[d]),
               c = matrix_new(4, 5, 6, both[d]);
        ops->scatter_rows(&(mt_row_args){4, 5, rows, .from = a.data, .to = b.data, .from_stride = 7, .to_stride = 9},
                          both[d], NULL);
        ops->gather_rows(&(mt_row_args){4, 5, rows, .from = b.data, .to = c.data, .from_stride = 9, .to_stride = 6},
                         both[d], NULL);
        matrix_take_rows(&b, got, written);
        for (int t = 0; t < 4; t++) assert_memory_equal(got + rows[t] * 5, from + t * 5, 5 * 8);
        matrix_take(&c, got);
        assert_memory_equal(got, from, 4 * 5 * 8);
        matrix_take(&a, NULL);
        free(from), free(got);
    }
}

/* ==== cross-entropy ============================================================================================== */

typedef struct loss_shape {
    int64_t T, V, stride;
    const int32_t *labels;
    double scale; // of the logits
} loss_shape;

/* out = loss[T], entropy[T] of in = logits[T, V]. */
static void loss_reference(double *out, const double *in, const void *shape) {
    const loss_shape *s = shape;
    for (int64_t t = 0; t < s->T; t++) {
        const double *x = in + t * s->V, k = s->scale;
        double sum = 0, weighted = 0, max = k * x[0];
        for (int64_t i = 1; i < s->V; i++) max = fmax(max, k * x[i]); // so that a vocabulary of 1 has exactly no loss
        for (int64_t i = 0; i < s->V; i++) sum += exp(k * x[i] - max), weighted += exp(k * x[i] - max) * k * x[i];
        out[t] = max + log(sum) - (s->labels[t] >= 0 && s->labels[t] < s->V ? k * x[s->labels[t]] : 0);
        out[s->T + t] = max + log(sum) - weighted / sum;
    }
}

/* Runs the forward over `parts` ranks that share the vocabulary, combines their four numbers a row, and the loss. */
static void loss_over_parts(const matrix *logits, const loss_shape *s, int64_t parts, float *logp, float *entropy,
                            float *lse) {
    float all[4 * 64], packed[8 * 4 * 64];
    int64_t size = mt_dtype_size(logits->dtype), each = (s->V + parts - 1) / parts, n = 0;
    mt_cross_entropy_args a = {.T = s->T, .stride = logits->stride, .labels = s->labels};
    a.logit_scale = (float)s->scale, a.logp = logp, a.entropy = entropy, a.lse = lse;
    for (; a.first < s->V; a.first += each, n++) {
        a.count = a.first + each < s->V ? each : s->V - a.first;
        a.logits = logits->data + a.first * size, a.stats = packed + n * 4 * s->T;
        ops->cross_entropy_forward(&a, logits->dtype, NULL);
    }
    a.stats = all;
    ops->cross_entropy_combine(&a, packed, n, NULL);
    ops->cross_entropy_loss(&a, NULL);
}

static void check_cross_entropy(const loss_shape *s, int64_t parts, mt_dtype dtype) {
    int64_t T = s->T, V = s->V, n = T * V, size = mt_dtype_size(dtype), each = (V + parts - 1) / parts;
    double *x = random_values(n), *dout = random_values(2 * T), *got = zeros(n + 2 * T), *want = zeros(2 * T);
    float logp[64], entropy[64], lse[64], dlogp[64], dentropy[64];
    for (int64_t i = 0; i < n; i++) x[i] *= 8;
    for (int64_t t = 0; t < T; t++) dlogp[t] = -(float)dout[t], dentropy[t] = (float)dout[T + t];
    matrix logits = matrix_from(x, T, V, s->stride, dtype), dlogits = matrix_new(T, s->stride, s->stride, dtype);
    loss_over_parts(&logits, s, parts, logp, entropy, lse);
    loss_reference(want, x, s);
    for (int64_t t = 0; t < T; t++) got[t] = -(double)logp[t], got[T + t] = (double)entropy[t];
    assert_near("loss", got, want, T, 1e-6);
    assert_near("entropy", got + T, want + T, T, 2e-6);
    mt_cross_entropy_args a = {.T = T, .stride = s->stride, .labels = s->labels, .entropy = entropy, .lse = lse};
    a.logit_scale = (float)s->scale, a.dlogp = dlogp, a.dentropy = dentropy;
    for (; a.first < V; a.first += each) {
        matrix part = matrix_new(T, s->stride, s->stride, dtype); // the last ranks' columns are padding
        double *values = zeros(T * s->stride);
        a.count = a.first + each < V ? each : V - a.first;
        a.logits = logits.data + a.first * size, a.dlogits = part.data;
        ops->cross_entropy_backward(&a, dtype, NULL);
        matrix_take(&part, values);
        for (int64_t t = 0; t < T; t++) {
            memcpy(got + t * V + a.first, values + t * s->stride, (size_t)a.count * 8);
            for (int64_t i = a.count; i < s->stride; i++) assert_true(values[t * s->stride + i] == 0);
        }
        free(values);
    }
    assert_gradient("cross-entropy", got, loss_reference, s, x, n, dout, 2 * T, dtype);
    matrix scaled = matrix_new(T, s->stride, s->stride, dtype);
    a.first = 0, a.count = V, a.logits = logits.data, a.dlogits = dlogits.data;
    ops->cross_entropy_backward(&a, dtype, NULL);
    a.dlogits = scaled.data, a.loss_scale = 4;
    ops->cross_entropy_backward(&a, dtype, NULL);
    a.dlogits = logits.data, a.loss_scale = 0;
    ops->cross_entropy_backward(&a, dtype, NULL);
    assert_memory_equal(logits.data, dlogits.data, (size_t)(T * s->stride * size)); // in place
    double *once = zeros(T * s->stride), *times = zeros(T * s->stride);
    logits.width = s->stride;
    matrix_take(&logits, NULL), matrix_take(&dlogits, once), matrix_take(&scaled, times);
    // A power of two is exact, except for subnormal numbers, which fp16 reaches.
    double bound = dtype == MT_F16 ? 5 * 0x1p-25 : 1e-37;
    for (int64_t i = 0; i < T * s->stride; i++) assert_true(fabs(times[i] - 4 * once[i]) <= bound);
    free(x), free(dout), free(got), free(want), free(once), free(times);
}

static void cross_entropy_matches_float64_and_finite_differences(void **state) {
    (void)state;
    static const int32_t few[] = {0, 12, 3, -100, 6, 13}, many[] = {1024, 0, 2068, 1023};
    static const loss_shape shapes[] = {
        {1, 1, 1, few, 1}, {6, 13, 16, few, 1}, {6, 13, 13, few, 1}, {4, 2069, 2080, many, 1}, {6, 13, 16, few, 1.25}};
    for (int k = 0; k < 10; k++) {
        check_cross_entropy(&shapes[k / 2], 1, both[k % 2]);
        check_cross_entropy(&shapes[k / 2], 3, both[k % 2]);
    }
}

static void cross_entropy_survives_large_logits_and_minus_infinity(void **state) {
    (void)state;
    float logits[2][4] = {{30000, 29999, -30000, -INFINITY}, {-INFINITY, -INFINITY, -1e30f, 5}};
    float stats[4 * 2], logp[2], entropy[2], lse[2];
    int32_t labels[2] = {1, 3};
    mt_cross_entropy_args a = {.T = 2, .stride = 4, .count = 4, .logits = logits, .labels = labels, .stats = stats};
    a.logp = logp, a.entropy = entropy, a.lse = lse;
    ops->cross_entropy_forward(&a, MT_F32, NULL);
    ops->cross_entropy_loss(&a, NULL);
    assert_true(fabs((double)logp[0] + (1 + log1p(exp(-1)))) < 5e-3 && logp[1] == 0 && entropy[1] == 0);
    a.entropy = NULL;
    ops->cross_entropy_forward(&a, MT_F32, NULL);
    ops->cross_entropy_loss(&a, NULL);
    assert_true(logp[1] == 0);
}

static void nll_loss_sums_under_its_weights(void **state) {
    (void)state;
    double sums[2] = {10, 1};
    float logp[3] = {-0.5f, -100, -2}, weights[3] = {1, 0, 0.5f}, dlogp[3];
    ops->nll_loss(sums, dlogp, logp, weights, 3, NULL);
    assert_true(sums[0] == 11.5 && sums[1] == 2.5);
    assert_true(dlogp[0] == -1 && dlogp[1] == 0 && dlogp[2] == -0.5f);
}

/* ==== optimizer ================================================================================================== */

static void accumulate_adds_every_element_once(void **state) {
    (void)state;
    const int64_t lengths[] = {1, 64, 100003};
    for (int k = 0; k < 6; k++) {
        int64_t n = lengths[k % 3];
        mt_dtype dtype = both[k / 3];
        float *start = mt_malloc(n * 4), *x = mt_malloc(n * 4), *got = mt_malloc(n * 4), *sum = mt_malloc(n * 4);
        for (int64_t i = 0; i < n; i++) start[i] = (float)(i % 256), x[i] = (float)(i % 7) + 0.5f;
        ops->convert(sum, dtype, start, MT_F32, n, NULL);
        ops->accumulate(sum, x, n, dtype, NULL);
        ops->accumulate(sum, x, n, dtype, NULL);
        ops->convert(got, MT_F32, sum, dtype, n, NULL);
        for (int64_t i = 0; i < n; i++) {
            float want = start[i] + x[i]; // each sum is rounded
            if (dtype != MT_F32) want = mt_half_to_f32(mt_f32_to_half(want, dtype), dtype);
            want += x[i];
            if (dtype != MT_F32) want = mt_half_to_f32(mt_f32_to_half(want, dtype), dtype);
            assert_true(got[i] == want);
        }
        free(start), free(x), free(got), free(sum);
    }
}

static void squared_norm_sums_in_float64(void **state) {
    (void)state;
    static const int64_t lengths[] = {0, 1, 1023, 1025, 70001, 262144 + 5};
    for (int k = 0; k < 12; k++) {
        int64_t n = lengths[k % 6];
        double *x = random_values(n), want = 3, sum = 3;
        matrix m = matrix_from(x, 1, n, n, both[k / 6]);
        for (int64_t i = 0; i < n; i++) {
            double value = k < 6 ? x[i] : (double)mt_half_to_f32(mt_f32_to_half((float)x[i], both[1]), both[1]);
            want += value * value;
        }
        ops->squared_norm(&sum, m.data, n, both[k / 6], NULL);
        assert_true(fabs(sum - want) <= 1e-12 * want);
        matrix_take(&m, NULL);
        free(x);
    }
}

static void gradient_scale_clips_and_divides_by_the_tokens(void **state) {
    (void)state;
    double squares = 400, tokens = 4, none = 0;
    float scale, norm;
    ops->gradient_scale(&scale, &norm, &squares, &squares, &tokens, 1, 1.0f, NULL); // norm 5, clipped to 1
    assert_true(norm == 5 && fabs((double)scale - 1 / (5 + 1e-6) / 4) < 1e-8);
    ops->gradient_scale(&scale, &norm, &squares, &squares, &tokens, 1, 6.0f, NULL);
    assert_true(norm == 5 && scale == 0.25f);
    ops->gradient_scale(&scale, &norm, &squares, &squares, &tokens, 1, 0.0f, NULL);
    assert_true(norm == 5 && scale == 0.25f);
    ops->gradient_scale(&scale, &norm, &squares, &squares, &tokens, 2, 1.0f, NULL); // gradients of the doubled loss
    assert_true(norm == 2.5f && fabs((double)scale - 1 / (2.5 + 1e-6) / 8) < 1e-8);
    ops->gradient_scale(&scale, &norm, &squares, &squares, &tokens, 2, 6.0f, NULL);
    assert_true(norm == 2.5f && scale == 0.125f);
    const double overflows[] = {INFINITY, NAN};
    for (int i = 0; i < 2; i++) {
        ops->gradient_scale(&scale, &norm, &squares, &overflows[i], &tokens, 1, 1.0f, NULL);
        assert_true(isnan(norm));
    }
    squares = 0;
    ops->gradient_scale(&scale, &norm, &squares, &squares, &none, 1, 1.0f, NULL); // no unmasked token
    assert_true(norm == 0 && scale == 1);
}

/* The check of a loss (of a sum over tokens, added up twice) and a norm; checks scale and average. */
static int check_step(double guard[MT_GUARD_NUMBERS], double loss, float norm, bool finite, double factor) {
    double sum = 2 * 4 * loss, tokens = 4, average = guard[MT_GUARD_AVERAGE], steps = guard[MT_GUARD_STEPS];
    float scale = 0.5f;
    mt_guard_rules rules = {.finite = finite, .spike_factor = factor, .window = 3, .copies = 2};
    ops->step_guard(guard, &scale, &sum, &tokens, &norm, &rules, NULL);
    bool good = guard[MT_GUARD_CHECK] == MT_STEP_PASSED;
    assert_true(scale == (good ? 0.5f : -1.0f));
    bool counts = good && isfinite(loss);
    assert_true(guard[MT_GUARD_STEPS] == steps + counts);
    double n = steps + 1 < 3 ? steps + 1 : 3, want = counts ? average * (n - 1) / n + loss / n : average;
    assert_true(fabs(guard[MT_GUARD_AVERAGE] - want) <= 1e-15 * fabs(want));
    return (int)guard[MT_GUARD_CHECK];
}

static void step_guard_refuses_what_is_not_finite_and_what_spikes(void **state) {
    (void)state;
    double guard[MT_GUARD_NUMBERS] = {0};
    assert_int_equal(check_step(guard, 8, 1, true, 1.5), MT_STEP_PASSED);
    assert_int_equal(check_step(guard, 100, 1, true, 1.5), MT_STEP_PASSED); // no average of three steps yet
    assert_int_equal(check_step(guard, 6, 1, true, 1.5), MT_STEP_PASSED);
    assert_true(fabs(guard[MT_GUARD_AVERAGE] - 38) < 1e-12);
    assert_int_equal(check_step(guard, 56, 1, true, 1.5), MT_STEP_PASSED);
    assert_int_equal(check_step(guard, 67, 1, true, 1.5), MT_LOSS_SPIKES); // the average is 44
    assert_int_equal(check_step(guard, 65, 1, true, 1.5), MT_STEP_PASSED);
    assert_int_equal(check_step(guard, 1e9, 1, true, 0), MT_STEP_PASSED);
    assert_int_equal(check_step(guard, NAN, 1, true, 0), MT_LOSS_NOT_FINITE);
    assert_int_equal(check_step(guard, INFINITY, NAN, true, 2), MT_LOSS_NOT_FINITE);
    assert_int_equal(check_step(guard, 3, NAN, true, 2), MT_NORM_NOT_FINITE);
    assert_int_equal(check_step(guard, 3, INFINITY, true, 0), MT_NORM_NOT_FINITE);
    assert_int_equal(check_step(guard, NAN, NAN, false, 2), MT_STEP_PASSED);
    assert_int_equal(check_step(guard, 3, 1, true, 2), MT_STEP_PASSED);
}

static void step_guard_refuses_a_step_without_tokens(void **state) {
    (void)state;
    double guard[MT_GUARD_NUMBERS] = {0}, sum = 0, none = 0;
    float scale = 0.5f, norm = 0;
    mt_guard_rules rules = {.finite = true, .spike_factor = 1.5, .window = 3, .copies = 2};
    assert_int_equal(check_step(guard, 8, 1, true, 1.5), MT_STEP_PASSED);
    ops->step_guard(guard, &scale, &sum, &none, &norm, &rules, NULL);
    assert_int_equal((int)guard[MT_GUARD_CHECK], MT_NO_TOKENS);
    assert_true(scale == -1 && guard[MT_GUARD_AVERAGE] == 8 && guard[MT_GUARD_STEPS] == 1);
}

static void adamw_with_a_negative_scale_changes_nothing(void **state) {
    (void)state;
    enum { N = 5003 };
    for (int d = first_type; d < 2; d++) {
        double *w = random_values(N), *g = zeros(N);
        for (int i = 0; i < N; i++) g[i] = i % 2 ? (double)NAN : 1;
        matrix all[5] = {matrix_from(w, 1, N, N, both[d]), matrix_from(w, 1, N, N, MT_F32),
                         matrix_from(w, 1, N, N, MT_F32), matrix_from(w, 1, N, N, MT_F32),
                         matrix_from(g, 1, N, N, MT_F32)};
        mt_update adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f};
        float scale = -1;
        char *before[4];
        for (int k = 0; k < 4; k++) {
            int64_t bytes = N * (k == 0 ? mt_dtype_size(both[d]) : 4);
            before[k] = memcpy(mt_malloc(bytes), all[k].data, (size_t)bytes);
        }
        mt_update_args a = {.n = N, .param = all[0].data, .m = all[2].data, .v = all[3].data, .grad = all[4].data};
        a.scale = &scale, a.dtype = both[d], a.master = both[d] == MT_F32 ? NULL : (float *)all[1].data;
        ops->adamw_step(&a, &adamw, NULL);
        for (int k = 0; k < 4; k++) {
            assert_memory_equal(all[k].data, before[k], (size_t)(N * (k == 0 ? mt_dtype_size(both[d]) : 4)));
            free(before[k]);
        }
        for (int k = 0; k < 5; k++) matrix_take(&all[k], NULL);
        free(w), free(g);
    }
}

static void adamw_follows_its_formula_for_several_steps(void **state) {
    (void)state;
    enum { N = 40003 };
    for (int d = first_type; d < 2; d++) {
        double *w = random_values(N), *g = random_values(N), *m = zeros(N), *v = zeros(N), *got = zeros(N);
        matrix param = matrix_from(w, 1, N, N, both[d]), master = matrix_from(w, 1, N, N, MT_F32);
        matrix m_m = matrix_from(m, 1, N, N, MT_F32), v_m = matrix_from(v, 1, N, N, MT_F32);
        for (int step = 1; step <= 3; step++) {
            for (int i = 0; i < N; i++) g[i] = random_value();
            matrix grad = matrix_from(g, 1, N, N, MT_F32);
            mt_update adamw = {
                1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 - powf(0.9f, (float)step), 1 - powf(0.95f, (float)step)};
            float scale = 0.5f;
            for (int i = 0; i < N; i++) {
                m[i] = 0.9 * m[i] + 0.1 * g[i] / 2;
                v[i] = 0.95 * v[i] + 0.05 * g[i] * g[i] / 4;
                double update = m[i] / (1 - pow(0.9, step)) / (sqrt(v[i] / (1 - pow(0.95, step))) + 1e-8);
                w[i] -= 1e-2 * (update + 0.1 * w[i]);
            }
            mt_update_args a = {.n = N, .param = param.data, .m = m_m.data, .v = v_m.data, .grad = grad.data};
            a.scale = &scale, a.dtype = both[d], a.master = both[d] == MT_F32 ? NULL : (float *)master.data;
            ops->adamw_step(&a, &adamw, NULL);
            matrix_take(&grad, NULL);
        }
        for (int i = 0; i < N && d == 1; i++)
            assert_int_equal(((uint16_t *)param.data)[i], mt_f32_to_half(((float *)master.data)[i], both[d]));
        matrix_take(d == 0 ? &param : &master, got), matrix_take(d == 0 ? &master : &param, NULL);
        assert_near("weights", got, w, N, 2e-6);
        matrix_take(&m_m, got);
        assert_near("m", got, m, N, 2e-6);
        matrix_take(&v_m, got);
        assert_near("v", got, v, N, 2e-6);
        free(w), free(g), free(m), free(v), free(got);
    }
}

/* Element i of x; what the type keeps of a number. */
static double stored(const void *x, int i, mt_dtype dtype) {
    return dtype == MT_F32 ? (double)((const float *)x)[i] : (double)mt_half_to_f32(((const uint16_t *)x)[i], dtype);
}

static double rounded(double x, mt_dtype dtype) {
    return dtype == MT_F32 ? (double)(float)x : (double)mt_half_to_f32(mt_f32_to_half((float)x, dtype), dtype);
}

/* `got` is the rounding of a number within fp32's errors of `want`, a sum of terms of this size. */
static void assert_rounded(const char *name, double got, double want, double size, mt_dtype dtype) {
    double error = 2e-6 * size, low = rounded(want - error, dtype), high = rounded(want + error, dtype);
    if (!(got >= low && got <= high)) fail_msg("%s: %.9g is not %.9g in %s", name, got, want, mt_dtype_name(dtype));
}

/* Every combination of types of the gradient and both moments: a step equals one in float64 from the same stored
 * numbers, rounded to the stored types. */
static void adamw_rounds_each_operand_to_its_type(void **state) {
    (void)state;
    enum { N = 2077, STEPS = 4 };
    for (int types = 0; types < 16; types++) {
        mt_dtype dtype = both[types & 1], types_of[3] = {both[types >> 1 & 1], both[types >> 2 & 1], both[types >> 3]};
        double *w = random_values(N), *zero = zeros(N);
        matrix param = matrix_from(w, 1, N, N, dtype), master = matrix_from(w, 1, N, N, MT_F32);
        matrix m = matrix_from(zero, 1, N, N, types_of[1]), v = matrix_from(zero, 1, N, N, types_of[2]);
        const float *weights = (const float *)(dtype == MT_F32 ? param.data : master.data);
        for (int step = 1; step <= STEPS; step++) {
            double *g = random_values(N), want_w[N], want_m[N], want_v[N], size_m[N], c1 = 1 - pow(0.9, step),
                   c2 = 1 - pow(0.95, step);
            matrix grad = matrix_from(g, 1, N, N, types_of[0]);
            for (int i = 0; i < N; i++) {
                double scaled = stored(grad.data, i, types_of[0]) / 2;
                double old = 0.9 * stored(m.data, i, types_of[1]), new = 0.1 * scaled;
                want_m[i] = old + new, size_m[i] = fabs(old) + fabs(new);
                want_v[i] = 0.95 * stored(v.data, i, types_of[2]) + 0.05 * scaled * scaled;
                double update = want_m[i] / c1 / (sqrt(want_v[i] / c2) + 1e-8);
                want_w[i] = (double)weights[i] - 1e-2 * (update + 0.1 * (double)weights[i]);
            }
            mt_update adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, (float)c1, (float)c2};
            float scale = 0.5f;
            mt_update_args a = {.n = N, .param = param.data, .m = m.data, .v = v.data, .grad = grad.data};
            a.scale = &scale, a.dtype = dtype, a.master = dtype == MT_F32 ? NULL : (float *)master.data;
            a.grad_dtype = types_of[0], a.m_dtype = types_of[1], a.v_dtype = types_of[2];
            ops->adamw_step(&a, &adamw, NULL);
            for (int i = 0; i < N; i++) {
                assert_rounded("m", stored(m.data, i, types_of[1]), want_m[i], size_m[i], types_of[1]);
                assert_rounded("v", stored(v.data, i, types_of[2]), want_v[i], want_v[i], types_of[2]);
                if (fabs((double)weights[i] - want_w[i]) > 1e-6)
                    fail_msg("weight %g, not %g", (double)weights[i], want_w[i]);
                assert_true(stored(param.data, i, dtype) == rounded((double)weights[i], dtype));
            }
            matrix_take(&grad, NULL);
            free(g);
        }
        matrix_take(&param, NULL), matrix_take(&master, NULL), matrix_take(&m, NULL), matrix_take(&v, NULL);
        free(w), free(zero);
    }
}

/* x rounded in float64 to the nearest number of a format with this many bits of mantissa and least normal exponent. */
static double on_grid(double x, int bits, int least) {
    int exponent;
    frexp(x, &exponent);
    double spacing = ldexp(1, (exponent - 1 < least ? least : exponent - 1) - bits);
    return nearbyint(x / spacing) * spacing;
}

/* The values of a state that is stored with a scale, or without. */
static void decode_state(double *values, const void *x, int n, mt_dtype dtype, float amax) {
    double scale = mt_state_has_scale(dtype) ? (double)mt_state_scale(amax, dtype) : 1;
    for (int i = 0; i < n; i++)
        values[i] = scale * (dtype == MT_F16_SCALED ? (double)mt_f16_to_f32(((const uint16_t *)x)[i])
                             : dtype == MT_F8_E4M3  ? (double)mt_f8_to_f32(((const uint8_t *)x)[i], dtype)
                                                    : stored(x, i, dtype));
}

/* A state equals `want` rounded to its type, on the grid that its own largest value sets; sizes: of the summed terms.
 */
static void assert_state(const char *name, const void *x, const double *want, const double *sizes, int n,
                         mt_dtype dtype, float amax) {
    double *got = zeros(n), largest = 0, range = dtype == MT_F16_SCALED ? 65504 / 2 : 448, scale;
    int bits = dtype == MT_F16_SCALED ? 10 : 3, least = dtype == MT_F16_SCALED ? -14 : -6;
    decode_state(got, x, n, dtype, amax);
    for (int i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
    for (int i = 0; i < n && !mt_state_has_scale(dtype); i++) assert_rounded(name, got[i], want[i], sizes[i], dtype);
    if (mt_state_has_scale(dtype)) {
        scale = (double)mt_state_scale(amax, dtype);
        assert_near(name, &(double){(double)amax}, &largest, 1, 1e-6);
        assert_true(scale >= (double)amax / range * (1 - 1e-7) && scale <= (double)amax / range * (1 + 0x1p-12));
        largest = 0;
        for (int i = 0; i < n; i++) {
            double error = 2e-6 * sizes[i], low = on_grid((want[i] - error) / scale, bits, least);
            double high = on_grid((want[i] + error) / scale, bits, least);
            if (!(got[i] >= low * scale && got[i] <= high * scale))
                fail_msg("%s %d: %.9g is not %.9g in %s", name, i, got[i], want[i], mt_dtype_name(dtype));
            assert_true(got[i] == (double)(float)got[i]); // exact in fp32, so a checkpoint keeps the codes
            largest = fmax(largest, fabs(got[i]));
        }
        assert_true(largest == range * scale && mt_state_scale((float)largest, dtype) == (float)scale);
    }
    free(got);
}

/* Every combination of types with a scale: steps equal those in float64 from the same stored numbers, rounded to the
 * stored types. Weights of several magnitudes, so that some states are subnormal. A skipped step changes nothing. */
static void adamw_scales_fp16_and_fp8_states(void **state) {
    (void)state;
    enum { N = 2077, STEPS = 4 };
    static const mt_dtype moments[4] = {MT_F32, MT_BF16, MT_F16_SCALED, MT_F8_E4M3};
    for (int types = 0; types < 64; types++) {
        mt_dtype of[4] = {types & 1 ? MT_F16_SCALED : MT_F32, moments[types >> 1 & 3], moments[types >> 3 & 3],
                          both[types >> 5]};
        double *now[3], *want[3], *sizes[3], *g;
        float amax[6] = {0}, scale = 0.5f;
        void *states[3];
        uint16_t *param = mt_calloc(N * 2);
        for (int k = 0; k < 3; k++) {
            now[k] = zeros(N), want[k] = zeros(N), sizes[k] = zeros(N);
            states[k] = mt_calloc(N * mt_dtype_size(of[k]));
        }
        for (int step = 1; step <= STEPS; step++) {
            double c1 = 1 - pow(0.9, step), c2 = 1 - pow(0.95, step);
            g = random_values(N);
            for (int i = 0; i < N; i++) g[i] *= pow(10, -(i % 5));
            matrix grad = matrix_from(g, 1, N, N, of[3]);
            for (int k = 0; k < 3; k++) decode_state(now[k], states[k], N, of[k], amax[k]);
            for (int i = 0; i < N; i++) {
                double scaled = stored(grad.data, i, of[3]) / 2;
                want[1][i] = 0.9 * now[1][i] + 0.1 * scaled;
                sizes[1][i] = 0.9 * fabs(now[1][i]) + 0.1 * fabs(scaled);
                sizes[2][i] = want[2][i] = 0.95 * now[2][i] + 0.05 * scaled * scaled;
                double update = 1e-2 * want[1][i] / c1 / (sqrt(want[2][i] / c2) + 1e-8);
                want[0][i] = now[0][i] * (1 - 1e-3) - update;
                double share = want[1][i] == 0 ? 1 : sizes[1][i] / fabs(want[1][i]); // of the error of m
                sizes[0][i] = fabs(now[0][i]) + fabs(update) * share;
            }
            mt_update adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, (float)c1, (float)c2};
            mt_update_args a = {.n = N, .param = param, .master = states[0], .m = states[1], .v = states[2]};
            a.grad = grad.data, a.scale = &scale, a.dtype = both[1], a.amax = amax, a.new_amax = amax + 3;
            a.master_dtype = of[0], a.m_dtype = of[1], a.v_dtype = of[2], a.grad_dtype = of[3];
            memset(amax + 3, 0, 3 * sizeof *amax);
            ops->adamw_amax(&a, &adamw, NULL);
            ops->adamw_step(&a, &adamw, NULL);
            memcpy(amax, amax + 3, 3 * sizeof *amax);
            static const char *const names[3] = {"master", "m", "v"};
            for (int k = 0; k < 3; k++) assert_state(names[k], states[k], want[k], sizes[k], N, of[k], amax[k]);
            for (int i = 0; i < N; i++)
                assert_rounded("weight", stored(param, i, both[1]), want[0][i], sizes[0][i], both[1]);
            uint8_t *before = mt_malloc(N);
            memcpy(before, states[1], N);
            memset(amax + 3, 0, 3 * sizeof *amax), scale = -1;
            ops->adamw_amax(&a, &adamw, NULL);
            ops->adamw_step(&a, &adamw, NULL);
            for (int k = 0; k < 3; k++)
                assert_true(!mt_state_has_scale(of[k]) || memcmp(&amax[k], &amax[3 + k], sizeof *amax) == 0);
            assert_memory_equal(before, states[1], N);
            scale = 0.5f;
            matrix_take(&grad, NULL);
            free(g), free(before);
        }
        for (int k = 0; k < 3; k++) free(now[k]), free(want[k]), free(sizes[k]), free(states[k]);
        free(param);
    }
}

static void memory_is_zeroed_and_copied_whole(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 4097, (1 << 20) + 3, (5 << 20) + 17};
    for (int k = 0; k < 4; k++) {
        char *a = ops->memory_alloc(sizes[k]), *b = ops->memory_alloc(sizes[k] + 1);
        memset(b, 7, (size_t)sizes[k] + 1);
        ops->memory_zero(a, sizes[k], NULL);
        for (int64_t i = 0; i < sizes[k]; i++) assert_int_equal(a[i], 0);
        for (int64_t i = 0; i < sizes[k]; i++) a[i] = (char)(i * 31);
        mt_stream *stream = ops->stream_create(NULL, 0, false);
        ops->memory_copy(b, a, sizes[k], stream);
        ops->stream_synchronize(stream);
        ops->stream_destroy(stream);
        assert_memory_equal(a, b, (size_t)sizes[k]);
        assert_int_equal(b[sizes[k]], 7);
        ops->memory_free(a);
        ops->memory_free(b);
    }
}

static void rows_are_copied_between_strides(void **state) {
    (void)state;
    char from[4 * 7], to[4 * 9], expected[4 * 9];
    for (int i = 0; i < 4 * 7; i++) from[i] = (char)(i + 1);
    memset(to, 0, sizeof to), memset(expected, 0, sizeof expected);
    ops->memory_copy_rows(to, 9, from, 7, 4, 5, NULL);
    for (int row = 0; row < 4; row++) memcpy(expected + row * 9, from + row * 7, 5);
    assert_memory_equal(to, expected, sizeof to);
}

/* ==== the same bits every time =================================================================================== */

static uint64_t hash_bytes(uint64_t hash, const void *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3;
    return hash;
}

/* Operands of a medium shape for every operation, and room for their results. */
typedef struct operands {
    mt_dtype dtype;
    char *in[6];  // [T, 4 C] elements each
    char *out[6]; // the same
    float *stats[6], *grads[3];
    int32_t ids[300];
    int64_t names[300];
} operands;

enum { REPEAT_T = 300, REPEAT_C = 192, REPEAT_N = REPEAT_T * 4 * REPEAT_C };

static void operands_fill(operands *o, mt_dtype dtype) {
    random_state = 42;
    o->dtype = dtype;
    for (int i = 0; i < 6; i++) {
        float *values = mt_malloc(REPEAT_N * 4);
        ops->random_normal(values, REPEAT_N, (uint64_t)i, 0, 0, 1, MT_F32, NULL);
        o->in[i] = mt_malloc(REPEAT_N * mt_dtype_size(dtype));
        ops->convert(o->in[i], dtype, values, MT_F32, REPEAT_N, NULL);
        o->out[i] = mt_calloc(REPEAT_N * mt_dtype_size(dtype));
        o->stats[i] = mt_calloc(REPEAT_T * REPEAT_C * 4);
        if (i < 3) o->grads[i] = mt_calloc(REPEAT_N * 4);
        free(values);
    }
    for (int i = 0; i < REPEAT_T; i++) o->ids[i] = (int32_t)(random_word() % 100), o->names[i] = i;
}

static uint64_t operands_take(operands *o, uint64_t hash) {
    for (int i = 0; i < 6; i++) {
        hash = hash_bytes(hash, o->out[i], REPEAT_N * mt_dtype_size(o->dtype));
        hash = hash_bytes(hash, o->stats[i], REPEAT_T * REPEAT_C * 4);
        if (i < 3) hash = hash_bytes(hash, o->grads[i], REPEAT_N * 4), free(o->grads[i]);
        free(o->in[i]), free(o->out[i]), free(o->stats[i]);
    }
    return hash;
}

static uint64_t hash_linear(mt_dtype dtype) {
    operands o;
    int64_t T = REPEAT_T, C = REPEAT_C;
    operands_fill(&o, dtype);
    ops->linear_forward(&(mt_linear_args){T, 3 * C + 5, C, .x = o.in[0], .w = o.in[1], .bias = o.in[2], .y = o.out[0]},
                        dtype, NULL);
    ops->linear_forward(&(mt_linear_args){2, 3 * C + 5, C, .x = o.in[0], .w = o.in[1], .bias = o.in[2], .y = o.out[1]},
                        dtype, NULL);
    ops->linear_backward_input(&(mt_linear_args){T, 3 * C + 5, C, .w = o.in[1], .dy = o.in[0], .dx = o.out[2]}, dtype,
                               NULL);
    ops->linear_backward_weight(&(mt_linear_args){T, 3 * C + 5, C, .x = o.in[2], .dy = o.in[0], .dw = o.grads[0],
                                                  .dbias = o.grads[1], .accumulate = true},
                                dtype, NULL);
    return operands_take(&o, 1);
}

static uint64_t hash_rows(mt_dtype dtype) {
    operands o;
    int64_t T = REPEAT_T, C = REPEAT_C;
    mt_dropout dropout = {0.1, 5};
    operands_fill(&o, dtype);
    ops->embedding_forward(&(mt_embedding_args){T, C, 0, 100, o.ids, o.in[0], o.out[0], .accumulate = false}, dtype,
                           NULL);
    ops->embedding_backward(&(mt_embedding_args){T, C, 0, 100, o.ids, .dout = o.in[1], .dw = o.grads[0]}, dtype, NULL);
    mt_norm_args layer = {.T = T, .H = 1, .C = C, .x = o.in[0], .w = o.in[1], .b = o.in[2], .eps = 1e-5f};
    layer.y = o.out[1], layer.mean = o.stats[0], layer.rstd = o.stats[1];
    layer.dy = o.in[3], layer.dresidual = o.in[4], layer.dx = o.out[2], layer.dw = o.grads[1], layer.db = o.grads[2];
    ops->layernorm_forward(&layer, dtype, NULL);
    ops->layernorm_backward(&layer, dtype, NULL);
    mt_norm_args rms = {.T = T, .H = 3, .C = C / 3, .x = o.in[0], .w = o.in[1], .eps = 1e-5f, .y = o.out[3]};
    rms.rstd = o.stats[2], rms.dy = o.in[3], rms.dx = o.out[4], rms.dw = o.grads[2];
    rms.x_stride = rms.y_stride = rms.dx_stride = rms.dy_stride = C;
    ops->rmsnorm_forward(&rms, dtype, NULL);
    ops->rmsnorm_backward(&rms, dtype, NULL);
    ops->dropout_add_forward(&(mt_dropout_add_args){T, C, 0, o.names, o.in[0], o.in[1], o.out[5], dropout}, dtype,
                             NULL);
    return operands_take(&o, 2);
}

static uint64_t hash_attention(mt_dtype dtype) {
    operands o;
    int64_t C = REPEAT_C;
    mt_span list[3] = {{0, 150, 0, 150, true}, {150, 30, 100, 130, false}, {200, 100, 200, 100, true}};
    operands_fill(&o, dtype);
    mt_attention call = {.num_heads = 6,
                         .window = 90,
                         .num_groups = 2,
                         .head_size = 32,
                         .value_size = 32,
                         .q_stride = C,
                         .k_stride = C,
                         .v_stride = C,
                         .out_stride = C,
                         .spans = {list, list, 3},
                         .scale = 0.2f,
                         .dropout = {0.1, 3},
                         .q_index = o.names,
                         .k_index = o.names};
    call.q = o.in[0], call.k = o.in[1], call.v = o.in[2], call.out = o.out[0], call.lse = o.stats[0];
    call.dq = o.out[1], call.dk = o.out[2], call.dv = o.out[3], call.dout = o.in[3], call.row_dot = o.stats[1];
    ops->attention_forward(&call, dtype, NULL);
    ops->attention_backward(&call, dtype, NULL);
    return operands_take(&o, 3);
}

static uint64_t hash_loss_and_optimizer(mt_dtype dtype) {
    operands o;
    int64_t T = REPEAT_T, V = 4 * REPEAT_C;
    double sum = 0;
    operands_fill(&o, dtype);
    for (int i = 0; i < T; i++) o.stats[4][i] = 1;
    mt_cross_entropy_args a = {.T = T, .stride = V, .count = V - 3, .logits = o.in[0], .labels = o.ids};
    a.stats = a.lse = o.stats[0], a.entropy = o.stats[5], a.dlogp = o.stats[4], a.dlogits = o.out[0];
    ops->cross_entropy_forward(&a, dtype, NULL);
    ops->cross_entropy_backward(&a, dtype, NULL);
    ops->activation_forward(&(mt_activation_args){T, V / 2, MT_ACTIVATION_SWIGLU, o.in[0], NULL, .y = o.out[1]}, dtype,
                            NULL);
    ops->activation_forward(&(mt_activation_args){T, V, MT_ACTIVATION_GELU_TANH, o.in[0], NULL, .y = o.out[2]}, dtype,
                            NULL);
    ops->activation_backward(
        &(mt_activation_args){T, V, MT_ACTIVATION_GELU, o.in[0], NULL, .dy = o.in[1], .dx = o.out[3]}, dtype, NULL);
    ops->random_normal(o.grads[0], T * V, 1, 3, 0, 1, MT_F32, NULL);
    ops->squared_norm(&sum, o.grads[0], T * V, MT_F32, NULL);
    return operands_take(&o, hash_bytes(4, &sum, 8));
}

static uint64_t hash_everything(mt_dtype dtype) {
    return hash_linear(dtype) ^ hash_rows(dtype) * 3 ^ hash_attention(dtype) * 5 ^ hash_loss_and_optimizer(dtype) * 7;
}

static void runs_repeat_bit_for_bit(void **state) {
    (void)state;
    for (int d = first_type; d < 2; d++) assert_true(hash_everything(both[d]) == hash_everything(both[d]));
}

static void the_number_of_threads_changes_no_bit(void **state) {
    (void)state;
#ifdef MT_HAVE_OPENMP
    static uint64_t (*const parts[4])(mt_dtype) = {hash_linear, hash_rows, hash_attention, hash_loss_and_optimizer};
    int threads = omp_get_max_threads();
    for (int part = 0; part < 4; part++)
        for (int d = first_type; d < 2; d++) {
            omp_set_num_threads(1);
            uint64_t want = parts[part](both[d]);
            for (int n = 2; n <= 3; n++) {
                omp_set_num_threads(n);
                if (parts[part](both[d]) != want) fail_msg("part %d differs on %d threads", part, n);
            }
        }
    omp_set_num_threads(threads);
#else
    skip();
#endif
}

static void argmax_is_the_first_maximum_and_needs_numbers(void **state) {
    (void)state;
    enum { T = 5, STRIDE = 6, COUNT = 5 };
    const float logits[T][STRIDE] = {{1, 3, 2, 3, 0, 9}, // the last column is padding
                                     {-INFINITY, -5, -7, -INFINITY, -6, 0},
                                     {1, NAN, 2, 0, 0, 0},
                                     {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, 0},
                                     {0, 0, 0, 0, INFINITY, 0}};
    const int32_t expected[T] = {1, 1, -1, -1, -1};
    const mt_sampling greedy = {.top_p = 1};
    const double uniforms[T] = {0};
    uint16_t rounded[T * STRIDE];
    mt_sampled sampled[T];
    ops->convert(rounded, both[1], logits, MT_F32, T * STRIDE, NULL);
    for (int d = first_type; d < 2; d++) {
        const void *rows = d ? (const void *)rounded : logits;
        memset(sampled, 0xff, sizeof sampled);
        ops->sample(&(mt_sample_args){T, STRIDE, COUNT, &greedy, rows, uniforms, sampled}, both[d], NULL);
        for (int t = 0; t < T; t++) {
            assert_int_equal(sampled[t].token, expected[t]);
            assert_true(sampled[t].logp == 0 && sampled[t].sampled_logp == 0);
        }
    }
}

/* dw of linears that share a flag: the first product overwrites what dw holds, every later one adds to it. Without a
 * flag each product overwrites. Experts without rows count as products: their gradient becomes 0. */
static void the_first_product_of_a_step_overwrites_a_gradient(void **state) {
    enum { T = 6, N = 3, K = 4, E = 3 };
    const mt_group alone = {.size = 1};
    const mt_tensor_parallel tp = {.ops = ops, .group = &alone, .dtype = MT_F32, .T = T, .rows = T};
    const int32_t offsets[E + 1] = {0, 4, 4, T}; // the second expert has no rows
    float x[T * K], dy[T * N], once[E * N * K], dw[E * N * K];
    (void)state;
    ops->random_normal(x, T * K, 1, 0, 0, 1, MT_F32, NULL);
    ops->random_normal(dy, T * N, 2, 0, 0, 1, MT_F32, NULL);
    for (int kind = MT_LINEAR_REPLICATED; kind <= MT_LINEAR_GROUPED + 1; kind++) { // the last: one product an expert
        int64_t size = kind >= MT_LINEAR_GROUPED ? E * N * K : N * K;
        bool has_gradient = false;
        mt_linear first = {.weight = {.dw = once}, .N = N, .K = K, .num_experts = E}, second;
        mt_row_groups groups = {.offsets = offsets, .num_rows = T};
        mt_linear_io io = {.x = x, .dy = dy, .groups = kind >= MT_LINEAR_GROUPED ? &groups : NULL};
        first.kind = kind >= MT_LINEAR_GROUPED ? MT_LINEAR_GROUPED : (mt_linear_kind)kind;
        if (kind > MT_LINEAR_GROUPED) groups.host_offsets = offsets;
        for (int i = 0; i < E * N * K; i++) once[i] = dw[i] = 1000;
        for (int i = 0; i < 2; i++) mt_linear_backward_weight((mt_linear_pass){.tp = &tp}, &first, &io);
        first.weight = (mt_weight){.dw = dw, .has_gradient = &has_gradient};
        second = first;
        for (int uses = 1; uses <= 3; uses++) {
            mt_linear_backward_weight((mt_linear_pass){.tp = &tp}, uses == 2 ? &second : &first, &io);
            assert_true(has_gradient);
            for (int64_t i = 0; i < size; i++)
                if (fabsf(dw[i] - (float)uses * once[i]) > 1e-4f || fabsf(once[i]) > 100)
                    fail_msg("kind %d, %d uses: dw[%lld] is %g, once %g", kind, uses, (long long)i, (double)dw[i],
                             (double)once[i]);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_known_answers_of_random123),
        cmocka_unit_test(small_floats_convert_exactly_and_round_to_nearest_even),
        cmocka_unit_test(convert_matches_the_scalar_conversions_on_every_pattern),
        cmocka_unit_test(exp_is_within_two_units_in_the_last_place),
        cmocka_unit_test(random_normal_depends_on_key_and_element_alone),
        cmocka_unit_test(random_normal_has_the_moments_and_tail_of_a_normal),
        cmocka_unit_test(linear_matches_float64_and_finite_differences),
        cmocka_unit_test(linear_is_exact_on_integers_past_every_block),
        cmocka_unit_test(embedding_matches_float64_and_finite_differences),
        cmocka_unit_test(norms_match_float64_and_finite_differences),
        cmocka_unit_test(rope_matches_float64_and_finite_differences),
        cmocka_unit_test(queries_scaled_by_position_match_float64),
        cmocka_unit_test(attention_matches_float64_and_finite_differences),
        cmocka_unit_test(activations_match_float64_and_finite_differences),
        cmocka_unit_test(a_clamped_activation_keeps_nan_and_has_no_gradient_beyond_the_clamp),
        cmocka_unit_test(sums_of_elements_and_of_rows_match_float64),
        cmocka_unit_test(dropout_add_matches_float64_and_finite_differences),
        cmocka_unit_test(dropout_keeps_its_share_and_does_not_depend_on_where_a_row_lies),
        cmocka_unit_test(rows_scatter_and_gather_within_their_width),
        cmocka_unit_test(cross_entropy_matches_float64_and_finite_differences),
        cmocka_unit_test(cross_entropy_survives_large_logits_and_minus_infinity),
        cmocka_unit_test(nll_loss_sums_under_its_weights),
        cmocka_unit_test(argmax_is_the_first_maximum_and_needs_numbers),
        cmocka_unit_test(accumulate_adds_every_element_once),
        cmocka_unit_test(the_first_product_of_a_step_overwrites_a_gradient),
        cmocka_unit_test(squared_norm_sums_in_float64),
        cmocka_unit_test(gradient_scale_clips_and_divides_by_the_tokens),
        cmocka_unit_test(step_guard_refuses_what_is_not_finite_and_what_spikes),
        cmocka_unit_test(step_guard_refuses_a_step_without_tokens),
        cmocka_unit_test(adamw_with_a_negative_scale_changes_nothing),
        cmocka_unit_test(adamw_follows_its_formula_for_several_steps),
        cmocka_unit_test(adamw_rounds_each_operand_to_its_type),
        cmocka_unit_test(adamw_scales_fp16_and_fp8_states),
        cmocka_unit_test(memory_is_zeroed_and_copied_whole),
        cmocka_unit_test(rows_are_copied_between_strides),
        cmocka_unit_test(biases_by_distance_match_float64_and_finite_differences),
        cmocka_unit_test(buckets_of_distances_equal_transformers),
        cmocka_unit_test(attention_over_pages_equals_attention_over_rows),
        cmocka_unit_test(attention_merge_matches_float64),
        cmocka_unit_test(a_nan_in_attention_stays_a_nan),
        cmocka_unit_test(scores_beyond_fp16_have_their_softmax),
        cmocka_unit_test(a_sink_is_a_column_without_a_value),
        cmocka_unit_test(a_nan_in_merged_attention_stays_a_nan),
        cmocka_unit_test(accumulate_rows_adds_the_rows_of_the_spans_alone),
        cmocka_unit_test(latent_heads_match_float64_and_finite_differences),
        cmocka_unit_test(runs_repeat_bit_for_bit),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
    };
    int failures = cmocka_run_group_tests_name("fp32 and bf16", tests, NULL, NULL);
    both[1] = MT_F16, first_type = 1;
    return failures + cmocka_run_group_tests_name("fp32 and fp16", tests, NULL, NULL);
}
