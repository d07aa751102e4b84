/* test_fp8_kernels.c: the CPU's operations of fp8 against references in float64: codes and rounding by brute force,
 * quantization of all kinds of blocks, products of decoded operands, the steps of delayed scales. */
// Sections of megatron.c: §3b
#include "../megatron.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { UNTOUCHED = 0xA5 };

static const mt_ops *ops = &mt_cpu_ops;

static uint32_t random_bits(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* Uniform in [-1, 1). */
static float random_float(void) {
    return (float)((int32_t)random_bits() >> 8) * 0x1p-23f;
}

#include "rows_in_fp8.h"

/* ---- codes ------------------------------------------------------------------------------------------------------- */

/* The value of a code (Micikevicius et al., table 1). */
static double decode(int code, mt_dtype format) {
    int width = format == MT_F8_E4M3 ? 3 : 2, bias = format == MT_F8_E4M3 ? 7 : 15, exponents = 1 << (7 - width);
    int exponent = (code & 0x7F) >> width, mantissa = code & ((1 << width) - 1);
    double sign = code & 0x80 ? -1 : 1, fraction = (double)mantissa / (1 << width);
    if (format == MT_F8_E4M3 && (code & 0x7F) == 0x7F) return NAN;
    if (format == MT_F8_E5M2 && exponent == exponents - 1) return mantissa ? NAN : sign * INFINITY;
    return exponent ? sign * ldexp(1 + fraction, exponent - bias) : sign * ldexp(fraction, 1 - bias);
}

/* The code of the finite value that is nearest to x, the even one of two; found by looking at all. */
static int encode(double x, mt_dtype format) {
    int best = 0, largest = format == MT_F8_E4M3 ? 0x7E : 0x7B;
    if (isnan(x)) return 0x7F;
    if (fabs(x) > decode(largest, format)) return largest | (signbit(x) ? 0x80 : 0);
    for (int code = 0; code <= largest; code++) {
        double d = fabs(decode(code, format) - fabs(x)), least = fabs(decode(best, format) - fabs(x));
        if (d < least || (d == least && code % 2 == 0)) best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

static const mt_dtype formats[] = {MT_F8_E4M3, MT_F8_E5M2};

static void all_codes_have_the_values_of_their_format(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++) {
        assert_true(mt_f8_largest(formats[f]) == (f ? 57344 : 448));
        for (int code = 0; code < 256; code++) {
            double expected = decode(code, formats[f]), value = (double)mt_f8_to_f32((uint8_t)code, formats[f]);
            if (isnan(expected)) {
                assert_true(isnan(value));
                continue;
            }
            assert_true(value == expected && !signbit(value) == !(code & 0x80));
            if (!isinf(value)) assert_int_equal(mt_f32_to_f8((float)value, formats[f]), code);
        }
    }
}

static void assert_rounds(float x, mt_dtype format) {
    for (int sign = 0; sign < 2; sign++, x = -x) {
        int code = mt_f32_to_f8(x, format), expected = encode((double)x, format);
        if (code != expected) fail_msg("%s of %a is 0x%02x, expected 0x%02x", mt_dtype_name(format), x, code, expected);
    }
}

/* Each value, each midpoint of neighbours, and the floats beside these; what is beyond the largest; random floats. */
static void values_round_to_nearest_even(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++) {
        int largest = f ? 0x7B : 0x7E;
        for (int code = 0; code <= largest; code++) {
            double low = decode(code, formats[f]), high = decode(code + (code < largest), formats[f]);
            float points[] = {(float)low, (float)((low + high) / 2)};
            for (int i = 0; i < 2; i++) {
                assert_rounds(points[i], formats[f]);
                assert_rounds(nextafterf(points[i], INFINITY), formats[f]);
                if (points[i] > 0) assert_rounds(nextafterf(points[i], 0), formats[f]);
            }
        }
        const float odd[] = {449, 464, 1e6f, 65536, FLT_MAX, INFINITY, FLT_MIN, 1e-45f, 0};
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) assert_rounds(odd[i], formats[f]);
        assert_int_equal(mt_f32_to_f8(NAN, formats[f]) & 0x7F, 0x7F);
        for (int i = 0; i < 20000; i++) {
            uint32_t bits = random_bits();
            float x;
            memcpy(&x, &bits, 4);
            if (i % 2) x = ldexpf(random_float(), (int)(random_bits() % 40) - 20);
            if (!isnan(x)) assert_rounds(fabsf(x), formats[f]);
        }
    }
}

/* ---- quantize ---------------------------------------------------------------------------------------------------- */

typedef struct problem {
    mt_fp8_blocks blocks;
    mt_dtype dtype, format;
    int64_t count, R, C;
    bool given; // the scale
} problem;

static int64_t block_rows(mt_fp8_blocks blocks) {
    return blocks == MT_FP8_BLOCK_128 ? 128 : 1;
}

static int64_t block_columns(mt_fp8_blocks blocks) {
    return blocks == MT_FP8_VECTOR_32 ? 32 : 128;
}

/* Where the interface says that the scale of element (r, c) of the i-th matrix [R, C] is. */
static int64_t scale_place(mt_fp8_blocks blocks, int64_t i, int64_t R, int64_t C, int64_t r, int64_t c) {
    int64_t R4 = (R + 3) / 4 * 4, across = (C + 127) / 128, across4 = (across + 3) / 4 * 4;
    if (blocks == MT_FP8_TENSOR) return 0;
    if (blocks == MT_FP8_BLOCK_128) return i * ((R + 127) / 128) * across4 + r / 128 * across4 + c / 128;
    int64_t columns = block_columns(blocks);
    return i * ((C + columns - 1) / columns) * R4 + c / columns * R4 + r;
}

static mt_fp8_matrix matrix_new(mt_fp8_blocks blocks, mt_dtype format, int64_t count, int64_t R, int64_t C) {
    mt_fp8_matrix m = {.stride = mt_fp8_stride(C, blocks), .format = format, .blocks = blocks};
    int64_t scales = mt_fp8_num_scales(count, R, m.stride, blocks);
    assert_true(m.stride >= C && m.stride % 16 == 0 && m.stride < C + 128);
    m.data = mt_malloc(count * R * m.stride + 1);
    memset(m.data, UNTOUCHED, (size_t)(count * R * m.stride + 1));
    m.inverse_scales = mt_calloc(scales * 4);
    return m;
}

static void matrix_free(mt_fp8_matrix *m) {
    free(m->data), free(m->inverse_scales);
}

/* Element (r, c) of the i-th matrix of m. */
static double matrix_at(const mt_fp8_matrix *m, int64_t i, int64_t R, int64_t r, int64_t c) {
    return decode(m->data[(i * R + r) * m->stride + c], m->format) *
           (double)m->inverse_scales[scale_place(m->blocks, i, R, m->stride, r, c)];
}

static float scale_of(float amax, mt_dtype format, bool power_of_two) {
    float scale = mt_f8_largest(format) / amax;
    if (!(amax > 0) || isinf(amax)) return 1;
    if (isinf(scale)) scale = FLT_MAX;
    return power_of_two ? (float)exp2(floor(log2((double)scale))) : scale;
}

/* x[i, r, c], which begins every `R` rows. */
static float x_at(const float *x, int64_t R, int64_t C, int64_t i, int64_t r, int64_t c, bool transposed) {
    return transposed ? x[(i * C + c) * R + r] : x[(i * R + r) * C + c];
}

/* The largest |x| of the block of element (r, c); NaN if it has one. */
static float block_amax(const float *x, const mt_fp8_matrix *m, int64_t count, int64_t R, int64_t C, int64_t i,
                        int64_t r, int64_t c, bool transposed) {
    bool whole = m->blocks == MT_FP8_TENSOR;
    int64_t rows = whole ? R : block_rows(m->blocks), columns = whole ? C : block_columns(m->blocks);
    float amax = 0;
    for (int64_t k = whole ? 0 : i; k < (whole ? count : i + 1); k++)
        for (int64_t y = r / rows * rows; y < R && y < r / rows * rows + rows; y++)
            for (int64_t z = c / columns * columns; z < C && z < c / columns * columns + columns; z++) {
                float size = fabsf(x_at(x, R, C, k, y, z, transposed));
                if (isnan(size) || size > amax) amax = size;
                if (isnan(amax)) return amax;
            }
    return amax;
}

/* Every block of m[count, R, C] is x (or its transpose), rounded with the block's scale; what is behind is zero. */
static void assert_quantized(const mt_fp8_matrix *m, const float *x, const problem *p, int64_t R, int64_t C,
                             bool transposed, float given) {
    int64_t rows = block_rows(m->blocks), columns = block_columns(m->blocks);
    float scale = given;
    if (m->blocks == MT_FP8_TENSOR && given == 0)
        scale = scale_of(block_amax(x, m, p->count, R, C, 0, 0, 0, transposed), m->format, false);
    for (int64_t i = 0; i < p->count; i++)
        for (int64_t r0 = 0; r0 < R; r0 += rows)
            for (int64_t c0 = 0; c0 < C; c0 += columns) {
                if (m->blocks != MT_FP8_TENSOR)
                    scale = scale_of(block_amax(x, m, p->count, R, C, i, r0, c0, transposed), m->format, true);
                float inverse = m->inverse_scales[scale_place(m->blocks, i, R, m->stride, r0, c0)];
                if (inverse != 1 / scale)
                    fail_msg("kind %d: block (%d, %d) of matrix %d has the scale 1/%.9g, expected %.9g", m->blocks,
                             (int)r0, (int)c0, (int)i, 1 / inverse, scale);
                for (int64_t r = r0; r < R && r < r0 + rows; r++)
                    for (int64_t c = c0; c < C && c < c0 + columns; c++) {
                        int code = m->data[(i * R + r) * m->stride + c];
                        int expected = mt_f32_to_f8(x_at(x, R, C, i, r, c, transposed) * scale, m->format);
                        if (code != expected)
                            fail_msg("kind %d: element (%d, %d) is 0x%02x, expected 0x%02x", m->blocks, (int)r, (int)c,
                                     code, expected);
                    }
            }
    for (int64_t r = 0; r < p->count * R; r++)
        for (int64_t c = C; c < m->stride; c++) assert_int_equal(m->data[r * m->stride + c], 0);
    assert_int_equal(m->data[p->count * R * m->stride], UNTOUCHED);
}

/* Values over many octaves, a block of zeros and, if `odd`, values that are not finite. */
static void fill(float *x, const problem *p, bool odd) {
    for (int64_t i = 0; i < p->count * p->R * p->C; i++) {
        int64_t r = i / p->C, c = i % p->C;
        x[i] = ldexpf(random_float(), (int)((r / 128 * 7 + c / 32 * 5) % 30) - 20);
        if (r < 128 && c < 128 && p->R > 200) x[i] = 0;
        if (p->dtype == MT_BF16) x[i] = mt_bf16_to_f32(mt_f32_to_bf16(x[i]));
    }
    if (!odd) return;
    x[p->C / 2] = NAN;
    x[(p->R - 1) * p->C] = INFINITY;
    x[p->R / 2 * p->C] = -FLT_MAX;
    x[p->R / 3 * p->C] = 1e-40f;
}

static void quantize_and_check(const problem *p, bool odd) {
    int64_t n = p->count * p->R * p->C;
    float *x = mt_malloc(n * 4), amax = 0, given = p->given ? 3.7f : 0;
    uint16_t *half = mt_malloc(n * 2);
    fill(x, p, odd);
    for (int64_t i = 0; i < n; i++)
        half[i] = mt_f32_to_bf16(x[i]), x[i] = p->dtype == MT_BF16 ? mt_bf16_to_f32(half[i]) : x[i];
    mt_fp8_matrix rows = matrix_new(p->blocks, p->format, p->count, p->R, p->C);
    mt_fp8_matrix columns = matrix_new(p->blocks, p->format, p->count, p->C, p->R);
    for (int copies = 1; copies <= 3; copies++) {
        mt_quantize_args a = {.x = p->dtype == MT_BF16 ? (void *)half : x, .count = p->count, .R = p->R, .C = p->C};
        if (copies & 1) a.rows = rows;
        if (copies & 2) a.columns = columns;
        a.amax = &amax, a.scale = p->given ? &given : NULL;
        amax = p->given && copies == 1 ? 1e9f : 0;
        ops->quantize(&a, p->dtype, NULL);
        float largest = block_amax(x, &(mt_fp8_matrix){.blocks = MT_FP8_TENSOR}, p->count, p->R, p->C, 0, 0, 0, false);
        if (p->given && copies == 1 && !odd) assert_true(amax == 1e9f); // raised, not lowered
        if (p->given && copies > 1) assert_true(amax == largest || (isnan(amax) && isnan(largest)));
        if (copies & 1) assert_quantized(&rows, x, p, p->R, p->C, false, given);
        if (copies & 2) assert_quantized(&columns, x, p, p->C, p->R, true, given);
    }
    matrix_free(&rows), matrix_free(&columns);
    free(x), free(half);
}

static void quantize_rounds_every_block_with_its_scale(void **state) {
    (void)state;
    static const int64_t shapes[][3] = {{1, 1, 1},     {1, 5, 16},   {1, 128, 128},
                                        {1, 130, 300}, {3, 33, 131}, {2, 260, 64}};
    for (int kind = MT_FP8_TENSOR; kind <= MT_FP8_VECTOR_32; kind++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int variant = 0; variant < 8; variant++) {
                problem p = {
                    .blocks = (mt_fp8_blocks)kind, .count = shapes[s][0], .R = shapes[s][1], .C = shapes[s][2]};
                p.dtype = variant & 1 ? MT_BF16 : MT_F32, p.format = formats[variant >> 1 & 1];
                p.given = kind == MT_FP8_TENSOR && variant & 4;
                quantize_and_check(&p, variant & 4 && p.R * p.C > 1000);
            }
}

/* Rows of experts: in the transposed copy each expert begins at a multiple of 128, with zeros between. */
static void quantize_keeps_the_rows_of_experts_apart(void **state) {
    (void)state;
    enum { T = 400, C = 40, E = 5 };
    static const int32_t offsets[E + 1] = {3, 3, 140, 141, 141, 390}; // the first and the fourth are empty
    float *x = mt_malloc(T * C * 4), scale = 2.5f, amax = 0;
    for (int i = 0; i < T * C; i++) x[i] = ldexpf(random_float(), i / C % 9);
    for (int c = 0; c < C; c++) x[c] = x[(T - 1) * C + c] = NAN; // of no expert
    for (int kind = MT_FP8_TENSOR; kind <= MT_FP8_VECTOR_32; kind++) {
        if (kind == MT_FP8_BLOCK_128) continue; // of weights
        int64_t wide = T + E * (MT_FP8_EXPERT_ROWS - 1), begin = 0;
        mt_fp8_matrix rows = matrix_new((mt_fp8_blocks)kind, MT_F8_E5M2, 1, T, C);
        mt_fp8_matrix columns = matrix_new((mt_fp8_blocks)kind, MT_F8_E5M2, 1, C, wide);
        mt_quantize_args a = {.x = x, .count = 1, .R = T, .C = C, .rows = rows, .columns = columns, .amax = &amax};
        a.offsets = offsets, a.num_experts = E, a.scale = kind == MT_FP8_TENSOR ? &scale : NULL;
        ops->quantize(&a, MT_F32, NULL);
        assert_false(isnan(amax));
        for (int64_t r = 0; r < T; r++) {
            bool used = r >= offsets[0] && r < offsets[E];
            for (int64_t c = 0; c < C; c++) {
                double expected = used ? (double)x[r * C + c] : 0, off = 0;
                if (!used) assert_int_equal(rows.data[r * rows.stride + c], UNTOUCHED);
                if (used) off = fabs(matrix_at(&rows, 0, T, r, c) - expected);
                if (!(off <= 0.125 * fabs(expected) + 1e-3))
                    fail_msg("kind %d: element (%d, %d) is off by %g", kind, (int)r, (int)c, off);
            }
        }
        for (int e = 0; e < E; e++) {
            int64_t count = offsets[e + 1] - offsets[e], end = begin + (count + 127) / 128 * 128;
            for (int64_t t = begin; t < end; t++)
                for (int64_t c = 0; c < C; c++) {
                    double expected = t - begin < count ? (double)x[(offsets[e] + t - begin) * C + c] : 0;
                    assert_true(fabs(matrix_at(&columns, 0, C, c, t) - expected) <= 0.125 * fabs(expected) + 1e-3);
                    if (t - begin >= count) assert_int_equal(columns.data[c * columns.stride + t], 0);
                }
            begin = end;
        }
        for (int64_t c = 0; c < C; c++)
            for (int64_t t = begin; t < columns.stride; t++) assert_int_equal(columns.data[c * columns.stride + t], 0);
        matrix_free(&rows), matrix_free(&columns);
    }
    free(x);
}

static void operations_of_experts_quantize_what_they_compute(void **state) {
    (void)state;
    check_rows_in_place(ops, NULL);
}

static void norms_quantize_what_they_compute(void **state) {
    (void)state;
    check_norms_in_place(ops, NULL);
}

static void activations_quantize_what_they_compute(void **state) {
    (void)state;
    check_activations_in_place(ops, NULL);
}

/* Scales of mxfp8 are powers of two with which the largest value of 32 just fits. */
static void scales_of_mxfp8_are_powers_of_two(void **state) {
    (void)state;
    enum { R = 64, C = 96 };
    float *x = mt_malloc(R * C * 4);
    problem p = {.blocks = MT_FP8_VECTOR_32, .dtype = MT_F32, .format = MT_F8_E4M3, .count = 1, .R = R, .C = C};
    fill(x, &p, false);
    mt_fp8_matrix m = matrix_new(p.blocks, p.format, 1, R, C);
    mt_quantize_args a = {.x = x, .count = 1, .R = R, .C = C, .rows = m};
    ops->quantize(&a, MT_F32, NULL);
    for (int64_t r = 0; r < R; r++)
        for (int64_t c = 0; c < C; c += 32) {
            int exponent;
            double inverse = (double)m.inverse_scales[c / 32 * R + r];
            double amax = (double)block_amax(x, &m, 1, R, C, 0, r, c, false);
            assert_true(frexp(inverse, &exponent) == 0.5); // one bit: E8M0 holds it
            assert_true(amax / inverse <= 448 && amax / inverse > 224);
        }
    matrix_free(&m);
    free(x);
}

/* ---- values of codes --------------------------------------------------------------------------------------------- */

static void dequantize_multiplies_every_code_with_the_scale_of_its_block(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {128, 128}, {300, 7}, {129, 520}, {5, 1000}};
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    for (int i = 0; i < 15; i++) {
        int64_t R = shapes[i / 3][0], C = shapes[i / 3][1], columns = (C + 511) / 512 * 4, scales = (R + 127) / 128;
        mt_dtype dtype = types[i % 3];
        uint8_t *codes = mt_malloc(R * C);
        float *inverse_scales = mt_malloc(scales * columns * 4);
        char *out = mt_malloc(R * C * mt_dtype_size(dtype));
        for (int64_t k = 0; k < R * C; k++) codes[k] = (uint8_t)(k * 37 % 255); // no NaN of either sign but one
        for (int64_t k = 0; k < scales * columns; k++) inverse_scales[k] = 0.01f * (float)(k + 1);
        mt_dequantize_args a = {codes, inverse_scales, R, C, out};
        ops->dequantize(&a, dtype, NULL);
        for (int64_t k = 0; k < R * C; k++) {
            float scale = inverse_scales[k / C / 128 * columns + k % C / 128];
            float want = mt_f8_to_f32(codes[k], MT_F8_E4M3) * scale, got;
            uint16_t half;
            memcpy(dtype == MT_F32 ? (void *)&got : &half, out + k * mt_dtype_size(dtype), dtype == MT_F32 ? 4 : 2);
            if (dtype != MT_F32)
                got = mt_half_to_f32(half, dtype), want = mt_half_to_f32(mt_f32_to_half(want, dtype), dtype);
            assert_true(got == want || (isnan(got) && isnan(want)));
        }
        free(codes), free(inverse_scales), free(out);
    }
}

/* ---- a rank's part of weights ------------------------------------------------------------------------------------ */

/* Three ranks quantize a part of the weights each, cut within rows and blocks. Codes, scales and the transposes are
 * those of quantize on the whole, to the bit. */
static void assert_parts_equal_the_whole(const problem *p, int64_t first_cut, int64_t second_cut) {
    int64_t n = p->count * p->R * p->C, scales = mt_fp8_num_scales(p->count, p->R, p->C, p->blocks);
    const int64_t cuts[] = {0, first_cut, second_cut, n};
    float *x = mt_malloc(n * 4), *amaxes = mt_malloc(3 * scales * 4), amax = 0, scale = 2.5f;
    uint16_t *half = mt_malloc(n * 2);
    for (int64_t i = 0; i < n; i++) half[i] = mt_f32_to_bf16(ldexpf(random_float(), (int)(i / 500 % 9) - 4));
    for (int64_t i = 0; i < n; i++) x[i] = mt_bf16_to_f32(half[i]);
    mt_fp8_matrix rows = matrix_new(p->blocks, p->format, p->count, p->R, p->C);
    mt_fp8_matrix w = matrix_new(p->blocks, p->format, p->count, p->R, p->C);
    mt_fp8_matrix columns = matrix_new(p->blocks, p->format, p->count, p->C, p->R);
    mt_fp8_matrix transposed = matrix_new(p->blocks, p->format, p->count, p->C, p->R);
    mt_quantize_args whole = {.x = x, .count = p->count, .R = p->R, .C = p->C, .rows = rows, .columns = columns};
    whole.amax = &amax, whole.scale = p->given ? &scale : NULL;
    ops->quantize(&whole, MT_F32, NULL);
    for (int call = 0; call < 2; call++) {
        for (int rank = 0; rank < 3; rank++) {
            mt_fp8_shard_args a = {.count = p->count, .R = p->R, .C = p->C, .first = cuts[rank], .w = w};
            a.n = cuts[rank + 1] - a.first, a.scale = call ? whole.scale : NULL, a.amax = amaxes;
            a.x = p->dtype == MT_BF16 ? (void *)(half + a.first) : (void *)(x + a.first);
            if (call == 0) a.w.data = NULL, a.amax += rank * scales;
            ops->fp8_shard_quantize(&a, p->dtype, NULL);
        }
        for (int64_t i = 0; i < scales && call == 0; i++) {
            amaxes[i] = fmaxf(amaxes[i], fmaxf(amaxes[scales + i], amaxes[2 * scales + i]));
            if (p->given) assert_true(amaxes[i] == amax), amaxes[i] = 0; // the second call finds it again
        }
    }
    if (p->given) assert_true(amaxes[0] == amax);
    mt_quantize_args transposition = {.count = p->count, .R = p->R, .C = p->C, .rows = w, .columns = transposed};
    ops->fp8_transpose(&transposition, NULL);
    assert_memory_equal(w.data, rows.data, (size_t)n);
    assert_memory_equal(transposed.data, columns.data, (size_t)(p->count * p->C * columns.stride));
    for (int64_t i = 0; i < n; i++) {
        int64_t matrix = i / p->C / p->R, r = i / p->C % p->R, c = i % p->C;
        int64_t in_rows = scale_place(p->blocks, matrix, p->R, p->C, r, c);
        int64_t in_columns = scale_place(p->blocks, matrix, p->C, columns.stride, c, r);
        assert_true(w.inverse_scales[in_rows] == rows.inverse_scales[in_rows]);
        assert_true(transposed.inverse_scales[in_columns] == columns.inverse_scales[in_columns]);
    }
    matrix_free(&rows), matrix_free(&columns), matrix_free(&w), matrix_free(&transposed);
    free(x), free(half), free(amaxes);
}

static void parts_of_weights_are_quantized_like_the_whole(void **state) {
    (void)state;
    static const int64_t shapes[][3] = {{1, 128, 128}, {1, 200, 384}, {3, 80, 128}, {2, 272, 640}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int variant = 0; variant < 6; variant++) {
            problem p = {.format = MT_F8_E4M3, .count = shapes[s][0], .R = shapes[s][1], .C = shapes[s][2]};
            p.blocks = variant / 2 == 2 ? MT_FP8_BLOCK_128 : MT_FP8_TENSOR, p.given = variant / 2 == 1;
            p.dtype = variant % 2 ? MT_BF16 : MT_F32;
            int64_t n = p.count * p.R * p.C, parts = n / 64;
            assert_parts_equal_the_whole(&p, parts / 3 * 64, (parts / 2 + 3) * 64);
            assert_parts_equal_the_whole(&p, 64, 64); // the second rank has nothing
        }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* A random matrix [count, R, C], quantized. */
static mt_fp8_matrix random_matrix(mt_fp8_blocks blocks, mt_dtype format, int64_t count, int64_t R, int64_t C) {
    float *x = mt_malloc(count * R * C * 4), amax;
    for (int64_t i = 0; i < count * R * C; i++) x[i] = ldexpf(random_float(), (int)(i / 50 % 5));
    mt_fp8_matrix m = matrix_new(blocks, format, count, R, C);
    mt_quantize_args a = {.x = x, .count = count, .R = R, .C = C, .rows = m, .amax = &amax};
    ops->quantize(&a, MT_F32, NULL);
    free(x);
    return m;
}

/* Checks out[M, N], which held `before`, against sums in float64 over [k, k + K). */
static void assert_product(const mt_fp8_product_args *p, const void *out, const float *before, const mt_fp8_matrix *b,
                           int64_t expert, int64_t first, int64_t M, int64_t k, int64_t K) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < p->N; n++) {
            double sum = 0, size = 1e-30;
            for (int64_t i = k; i < k + K; i++) {
                double term = matrix_at(&p->a, 0, p->M, first + m, i) * matrix_at(b, expert, p->N, n, i);
                sum += term, size += fabs(term);
            }
            int64_t at = m * p->N + n;
            if (p->bias)
                sum += p->out_dtype == MT_F32 ? (double)((const float *)p->bias)[n]
                                              : (double)mt_bf16_to_f32(((const uint16_t *)p->bias)[n]);
            if (p->accumulate) sum += (double)before[at];
            double got = p->out_dtype == MT_F32 ? (double)((const float *)out)[at]
                                                : (double)mt_bf16_to_f32(((const uint16_t *)out)[at]);
            double tolerance = 1e-6 * size + (p->out_dtype == MT_F32 ? 1e-6 : 0x1p-8) * fabs(sum);
            if (!(fabs(got - sum) <= tolerance)) fail_msg("(%d, %d) is %g, expected %g", (int)m, (int)n, got, sum);
        }
}

static const mt_fp8_blocks operands[][2] = {{MT_FP8_TENSOR, MT_FP8_TENSOR},
                                            {MT_FP8_VECTOR_128, MT_FP8_BLOCK_128},
                                            {MT_FP8_VECTOR_128, MT_FP8_VECTOR_128},
                                            {MT_FP8_VECTOR_32, MT_FP8_VECTOR_32}};

static void products_equal_float64_of_the_decoded_operands(void **state) {
    (void)state;
    static const int64_t shapes[][3] = {{1, 1, 1}, {7, 130, 33}, {600, 20, 150}, {20, 1100, 300}};
    for (int kind = 0; kind < 4; kind++)
        for (int s = 0; s < 4; s++)
            for (int variant = 0; variant < 4; variant++) {
                int64_t M = shapes[s][0], N = shapes[s][1], K = shapes[s][2];
                mt_fp8_product_args p = {.M = M, .N = N, .K = K, .exact_sums = true};
                p.a = random_matrix(operands[kind][0], formats[variant & 1], 1, M, K);
                p.b = random_matrix(operands[kind][1], MT_F8_E4M3, 1, N, K);
                float *out = mt_malloc(M * N * 4), *before = mt_malloc(M * N * 4), *bias = mt_malloc(N * 4);
                for (int64_t i = 0; i < M * N; i++) out[i] = before[i] = random_float();
                for (int64_t i = 0; i < N; i++) bias[i] = random_float();
                p.out = out, p.out_dtype = variant & 2 ? MT_BF16 : MT_F32;
                p.accumulate = variant == 1, p.bias = variant == 1 ? NULL : bias;
                uint16_t *half = mt_malloc(N * 2);
                for (int64_t i = 0; i < N; i++) half[i] = mt_f32_to_bf16(bias[i]);
                if (variant & 2) p.bias = half;
                ops->fp8_product(&p, NULL);
                assert_product(&p, out, before, &p.b, 0, 0, M, 0, K);
                matrix_free(&p.a), matrix_free(&p.b);
                free(out), free(before), free(bias), free(half);
            }
}

/* Experts' products: of their rows with their weight; and sums over their rows. Some have none. */
static void products_of_experts_equal_float64(void **state) {
    (void)state;
    enum { T = 300, N = 24, K = 40, E = 4 };
    static const int32_t offsets[E + 1] = {2, 2, 135, 135, 298};
    for (int kind = 0; kind < 4; kind++) {
        mt_fp8_product_args p = {.M = T, .N = N, .K = K, .out_dtype = MT_F32, .offsets = offsets, .num_experts = E};
        float *out = mt_malloc(E * T * N * 4), *x = mt_malloc(T * K * 4), *before = mt_malloc(E * N * K * 4), amax;
        p.a = random_matrix(operands[kind][0], MT_F8_E4M3, 1, T, K);
        p.b = random_matrix(operands[kind][1], MT_F8_E4M3, E, N, K);
        memset(out, UNTOUCHED, T * N * 4);
        p.out = out;
        ops->fp8_product(&p, NULL);
        for (int e = 0; e < E; e++)
            assert_product(&p, out + offsets[e] * N, NULL, &p.b, e, offsets[e], offsets[e + 1] - offsets[e], 0, K);
        for (int r = 0; r < T; r++)
            for (int n = 0; n < N && (r < 2 || r >= 298); n++) {
                uint32_t bits;
                memcpy(&bits, &out[r * N + n], 4);
                assert_int_equal(bits, UNTOUCHED * 0x01010101u);
            }
        matrix_free(&p.a), matrix_free(&p.b);
        if (operands[kind][1] == MT_FP8_BLOCK_128) { // sums over rows: both operands are transposed activations
            free(out), free(x), free(before);
            continue;
        }
        int64_t wide = T + E * (MT_FP8_EXPERT_ROWS - 1);
        mt_fp8_matrix columns[2];
        for (int i = 0; i < 2; i++) { // dy [T, N], x [T, K]
            int64_t C = i ? K : N;
            for (int64_t k = 0; k < T * C; k++) x[k] = random_float();
            columns[i] = matrix_new(operands[kind][0], i ? MT_F8_E4M3 : MT_F8_E5M2, 1, C, wide);
            mt_quantize_args a = {.x = x, .count = 1, .R = T, .C = C, .columns = columns[i], .amax = &amax};
            a.offsets = offsets, a.num_experts = E;
            ops->quantize(&a, MT_F32, NULL);
        }
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            mt_fp8_product_args w = {.a = columns[0], .b = columns[1], .M = N, .N = K, .K = T, .out_dtype = MT_F32};
            w.offsets = offsets, w.num_experts = E, w.sums_rows = true, w.accumulate = accumulate, w.out = out;
            for (int i = 0; i < E * N * K; i++) out[i] = before[i] = random_float();
            ops->fp8_product(&w, NULL);
            for (int64_t e = 0, k = 0; e < E; e++) {
                int64_t count = offsets[e + 1] - offsets[e];
                assert_product(&w, out + e * N * K, before + e * N * K, &w.b, 0, 0, N, k, count);
                k += (count + 127) / 128 * 128;
            }
        }
        matrix_free(&columns[0]), matrix_free(&columns[1]);
        free(out), free(x), free(before);
    }
}

/* ---- delayed scales ---------------------------------------------------------------------------------------------- */

static void scales_follow_the_history(void **state) {
    (void)state;
    enum { N = 4, STEPS = 9 };
    static const float amaxes[STEPS][N] = {{1, 2, 1e-42f, 0},   {3, 0, 5, 1},     {2, NAN, 4, 1},
                                           {8, 6, INFINITY, 2}, {1, 1, 1, 1},     {1, 7, 1, 9},
                                           {1, 1, 1, 1},        {5, 1, 1, 1e30f}, {0, 3, 2, 1}};
    static const float largest[N] = {448, 448, 57344, 57344};
    for (int length = 1; length <= 4; length++)
        for (int recent = 0; recent < 2; recent++)
            for (int margin = 0; margin < 2; margin++) {
                float scale[N] = {1, 1, 1, 1}, history[4 * N] = {0}, expected[N] = {1, 1, 1, 1}, guard;
                float kept[STEPS][N]; // of good steps
                int good = 0;
                for (int step = 0; step < STEPS; step++) {
                    bool bad = step == 4;
                    memcpy(history, amaxes[step], sizeof amaxes[step]);
                    guard = bad ? -1 : 1;
                    mt_fp8_scale_args a = {.n = N, .length = length, .scale = scale, .history = history};
                    a.largest = largest, a.margin = (float)margin, a.most_recent = recent, a.guard = &guard;
                    ops->fp8_scale_step(&a, NULL);
                    if (!bad) memcpy(kept[good++], amaxes[step], sizeof kept[0]);
                    for (int i = 0; i < N && !bad; i++) {
                        float amax = kept[good - 1][i];
                        for (int t = 2; t <= length && t <= good && !recent; t++)
                            if (isnan(kept[good - t][i]) || kept[good - t][i] > amax) amax = kept[good - t][i];
                        for (int t = 1; t <= length && t <= good && !recent; t++)
                            if (isnan(kept[good - t][i])) amax = NAN;
                        float value = largest[i] / amax / (float)(1 << margin);
                        if (amax > 0 && isfinite(amax)) expected[i] = isinf(value) ? FLT_MAX : value;
                    }
                    for (int i = 0; i < N; i++) {
                        assert_true(scale[i] == expected[i]);
                        assert_true(history[i] == 0);
                        for (int t = 1; t < length; t++) { // entry length - t is t steps back
                            float past = t <= good ? kept[good - t][i] : 0, entry = history[(length - t) * N + i];
                            assert_true(entry == past || (isnan(entry) && isnan(past)));
                        }
                    }
                }
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_codes_have_the_values_of_their_format),
        cmocka_unit_test(values_round_to_nearest_even),
        cmocka_unit_test(quantize_rounds_every_block_with_its_scale),
        cmocka_unit_test(quantize_keeps_the_rows_of_experts_apart),
        cmocka_unit_test(operations_of_experts_quantize_what_they_compute),
        cmocka_unit_test(activations_quantize_what_they_compute),
        cmocka_unit_test(norms_quantize_what_they_compute),
        cmocka_unit_test(scales_of_mxfp8_are_powers_of_two),
        cmocka_unit_test(dequantize_multiplies_every_code_with_the_scale_of_its_block),
        cmocka_unit_test(parts_of_weights_are_quantized_like_the_whole),
        cmocka_unit_test(products_equal_float64_of_the_decoded_operands),
        cmocka_unit_test(products_of_experts_equal_float64),
        cmocka_unit_test(scales_follow_the_history),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
