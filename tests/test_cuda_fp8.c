/* fp8 on the GPU against the CPU's operations: quantization and the scales of delayed scaling bit for bit, every rung
 * of products within a tolerance. Buffers begin with a pattern that has to stay wherever nothing may be written; rows
 * that are no expert's hold NaN.
 *
 * Tolerances of products, of norms: what is rounded to bf16 once is off by about 1.6e-3, 4e-3 allowed; sums in fp32 by
 * 1e-5. Hopper's tensor cores keep 14 bits of fraction: exact sums leave them every 128 elements, 5e-4 allowed; else
 * they sum everything, 1e-2 allowed. */
#include "cuda_harness.h"

#ifdef MT_HAVE_CUDA
#include "../cuda/fp8.h"

#include <cuda_runtime_api.h>

#include "rows_in_fp8.h"

enum { MAX_EXPERTS = 64, PATTERN = 0xA5 };

/* ==== quantize ==================================================================================================== */

typedef enum scaling { COMPUTED, GIVEN, RECORDED } scaling; // with one scale; RECORDED: given, and amax is raised

typedef struct quantization {
    mt_dtype dtype, format;
    mt_fp8_blocks blocks;
    scaling scaling;
    int64_t count, R, C, wider; // columns of the transposed copy in excess of those needed
    bool rows, columns, odd;    // odd: with infinite values, NaN, subnormal numbers and blocks of zeros
    int64_t num_experts;
    int32_t offsets[MAX_EXPERTS + 1];
} quantization;

/* Written by quantize, on the host. */
typedef struct quantized {
    mt_fp8_matrix rows, columns;
    int64_t rows_bytes, columns_bytes, rows_scales, columns_scales;
    float amax;
} quantized;

static void quantized_free(quantized *q) {
    free(q->rows.data), free(q->rows.inverse_scales), free(q->columns.data), free(q->columns.inverse_scales);
}

static bool is_of_expert(const quantization *p, int64_t row) {
    return p->num_experts == 0 || (row >= p->offsets[0] && row < p->offsets[p->num_experts]);
}

/* Magnitudes over many octaves, some exactly where the exponent of a scale changes. */
static float draw(const quantization *p, int64_t matrix, int64_t r, int64_t c) {
    static const float odd[] = {INFINITY, -INFINITY, NAN, 1e-40f, -0.0f, 3e38f};
    float x = ldexpf(random_float(), (int)((r / 128 + c / 128 + matrix) % 24) - 12);
    if (random_below(50) == 0) x = ldexpf(1.75f, (int)random_below(12) - 6);
    if (!p->odd) return x;
    if ((r / 128 + c / 128) % 5 == 4) return 0;
    if (random_below(4000) == 0) x = odd[random_below(sizeof odd / sizeof *odd)];
    return x;
}

/* x[count, R, C] in the problem's type. */
static void *draw_input(const quantization *p, uint64_t seed) {
    int64_t size = mt_dtype_size(p->dtype), n = p->count * p->R * p->C;
    char *x = mt_malloc(n * size + 16);
    random_state = seed;
    for (int64_t i = 0; i < n; i++) {
        int64_t r = i / p->C % p->R;
        float value = draw(p, i / p->C / p->R, r, i % p->C);
        if (!is_of_expert(p, r)) value = NAN;
        uint16_t half = mt_f32_to_bf16(value);
        memcpy(x + i * size, p->dtype == MT_F32 ? (const void *)&value : (const void *)&half, (size_t)size);
    }
    return x;
}

/* Memory of `ops` with the pattern, and its copy to the host. */
static void *patterned(const mt_ops *ops, mt_stream *on, int64_t bytes) {
    void *host = mt_malloc(bytes + 16), *memory = ops->memory_alloc(bytes + 16);
    memset(host, PATTERN, (size_t)bytes + 16);
    ops->memory_copy(memory, host, bytes + 16, on);
    ops->stream_synchronize(on);
    free(host);
    return memory;
}
static void *fetched(const mt_ops *ops, mt_stream *on, void *memory, int64_t bytes) {
    void *host = mt_malloc(bytes + 16);
    ops->memory_copy(host, memory, bytes + 16, on);
    ops->stream_synchronize(on);
    ops->memory_free(memory);
    return host;
}

static void open_matrix(const mt_ops *ops, mt_stream *on, mt_fp8_matrix *matrix, const quantization *p, int64_t R,
                        int64_t C, int64_t *bytes, int64_t *scales) {
    *matrix = (mt_fp8_matrix){.stride = mt_fp8_stride(C, p->blocks), .format = p->format, .blocks = p->blocks};
    *scales = mt_fp8_num_scales(p->count, R, matrix->stride, p->blocks);
    *bytes = p->count * R * matrix->stride;
    matrix->data = patterned(ops, on, *bytes);
    matrix->inverse_scales = patterned(ops, on, *scales * 4);
}

static quantized run_quantize(const mt_ops *ops, mt_stream *on, const quantization *p, uint64_t seed) {
    const float scale = 3.7f;
    int64_t bytes = p->count * p->R * p->C * mt_dtype_size(p->dtype), experts = (p->num_experts + 1) * 4;
    quantized q = {.amax = 0.125f};
    void *host = draw_input(p, seed), *x = ops->memory_alloc(bytes + 16);
    float *numbers = ops->memory_alloc(16);
    int32_t *offsets = ops->memory_alloc(experts);
    ops->memory_copy(x, host, bytes, on);
    ops->memory_copy(offsets, p->offsets, experts, on);
    ops->memory_copy(numbers, &scale, 4, on);
    ops->memory_copy(numbers + 1, &q.amax, 4, on);
    mt_quantize_args a = {.x = x, .count = p->count, .R = p->R, .C = p->C};
    if (p->num_experts) a.offsets = offsets, a.num_experts = p->num_experts;
    if (p->scaling != COMPUTED) a.scale = numbers;
    if (p->scaling != GIVEN) a.amax = numbers + 1;
    if (p->rows) open_matrix(ops, on, &q.rows, p, p->R, p->C, &q.rows_bytes, &q.rows_scales);
    int64_t width = p->R + p->num_experts * (MT_FP8_EXPERT_ROWS - 1) + p->wider;
    if (p->columns) open_matrix(ops, on, &q.columns, p, p->C, width, &q.columns_bytes, &q.columns_scales);
    a.rows = q.rows, a.columns = q.columns;
    ops->quantize(&a, p->dtype, on);
    ops->memory_copy(&q.amax, numbers + 1, 4, on);
    ops->stream_synchronize(on);
    mt_fp8_matrix *matrices[] = {&q.rows, &q.columns};
    for (int i = 0; i < 2; i++) {
        if (!matrices[i]->data) continue;
        matrices[i]->data = fetched(ops, on, matrices[i]->data, i ? q.columns_bytes : q.rows_bytes);
        matrices[i]->inverse_scales =
            fetched(ops, on, matrices[i]->inverse_scales, 4 * (i ? q.columns_scales : q.rows_scales));
    }
    ops->memory_free(x), ops->memory_free(numbers), ops->memory_free(offsets), free(host);
    return q;
}

static bool is_nan(uint8_t bits, mt_dtype format) {
    return (bits & 0x7F) > (format == MT_F8_E4M3 ? 0x7E : 0x7C);
}

/* NaN may have either sign. */
static void check_bytes(const char *copy, const quantization *p, const mt_fp8_matrix *got, const mt_fp8_matrix *want,
                        int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) {
        uint8_t g = got->data[i], w = want->data[i];
        if (g != w && !(is_nan(g, p->format) && is_nan(w, p->format)))
            fail_msg("%s, blocks %d, format %d, %lld x %lld x %lld: row %lld, column %lld is %02x, not %02x", copy,
                     p->blocks, p->format, (long long)p->count, (long long)p->R, (long long)p->C,
                     (long long)(i / got->stride), (long long)(i % got->stride), g, w);
    }
}

static void check_scales(const char *copy, const quantization *p, const mt_fp8_matrix *got, const mt_fp8_matrix *want,
                         int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(&got->inverse_scales[i], &want->inverse_scales[i], 4) != 0)
            fail_msg("%s, blocks %d, format %d, %lld x %lld x %lld: scale %lld of %lld is %g, not %g", copy, p->blocks,
                     p->format, (long long)p->count, (long long)p->R, (long long)p->C, (long long)i, (long long)count,
                     (double)got->inverse_scales[i], (double)want->inverse_scales[i]);
}

static void check_quantize(const quantization *p) {
    uint64_t seed = random_word();
    quantized want = run_quantize(&mt_cpu_ops, NULL, p, seed), got = run_quantize(gpu, stream, p, seed);
    if (p->rows) check_bytes("rows", p, &got.rows, &want.rows, got.rows_bytes);
    if (p->columns) check_bytes("columns", p, &got.columns, &want.columns, got.columns_bytes);
    if (p->rows) check_scales("rows", p, &got.rows, &want.rows, got.rows_scales);
    if (p->columns) check_scales("columns", p, &got.columns, &want.columns, got.columns_scales);
    if (p->blocks == MT_FP8_TENSOR && !(isnan(got.amax) && isnan(want.amax))) {
        if (memcmp(&got.amax, &want.amax, 4) != 0) fail_msg("amax is %g, not %g", (double)got.amax, (double)want.amax);
    }
    quantized_free(&want), quantized_free(&got);
}

/* Both input types, formats, and each choice of copies; scales of the tensor in each way. */
static void check_quantize_all(quantization p) {
    static const mt_fp8_blocks blocks[] = {MT_FP8_TENSOR, MT_FP8_VECTOR_128, MT_FP8_BLOCK_128};
    for (int i = 0; i < 3 * 2 * 2 * 3; i++) {
        p.blocks = blocks[i % 3], p.dtype = i / 3 % 2 ? MT_F32 : MT_BF16;
        p.format = i / 6 % 2 ? MT_F8_E5M2 : MT_F8_E4M3;
        p.rows = i / 12 % 3 != 1, p.columns = i / 12 % 3 != 0, p.odd = (i / 3 + i / 6 + i / 12) % 2;
        if (p.blocks == MT_FP8_BLOCK_128 && p.num_experts) continue; // not for activations
        for (int scaling = 0; scaling < (p.blocks == MT_FP8_TENSOR ? 3 : 1); scaling++) {
            p.scaling = (enum scaling)scaling;
            check_quantize(&p);
        }
    }
}

static void quantized_matrices_match_the_cpu_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][2] = {{1, 16},   {128, 128}, {7, 48},     {129, 144},
                                       {300, 80}, {515, 528}, {1000, 640}, {256, 1024}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_quantize_all((quantization){.count = 1, .R = sizes[i][0], .C = sizes[i][1]});
}

static void several_matrices_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = {{3, 128, 256}, {5, 48, 144}, {2, 272, 528}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_quantize_all((quantization){.count = sizes[i][0], .R = sizes[i][1], .C = sizes[i][2]});
}

static void padding_of_the_transpose_is_zero(void **state) {
    (void)state;
    if (!gpu) skip();
    check_quantize_all((quantization){.count = 1, .R = 200, .C = 272, .wider = 384});
}

/* Offsets from the rows of each expert. */
static int64_t set_offsets(int32_t *offsets, const int64_t *rows, int64_t E, int64_t before) {
    offsets[0] = (int32_t)before;
    for (int64_t e = 0; e < E; e++) offsets[e + 1] = offsets[e] + (int32_t)rows[e];
    return offsets[E];
}

static void segments_of_experts_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[][8] = {{100, 0, 128, 129, 1, 0, 300, 17}, {0, 0, 0, 0, 0, 0, 0, 5}, {256, 128}};
    static const int64_t experts[] = {8, 8, 2};
    for (int i = 0; i < 3; i++)
        for (int around = 0; around < 2; around++) {
            quantization p = {.count = 1, .C = 144, .num_experts = experts[i]};
            p.R = set_offsets(p.offsets, rows[i], experts[i], around * 9) + around * 70;
            check_quantize_all(p);
        }
    int64_t many[MAX_EXPERTS];
    for (int e = 0; e < MAX_EXPERTS; e++) many[e] = random_below(3) ? random_below(150) : 0;
    quantization p = {.count = 1, .C = 48, .num_experts = MAX_EXPERTS};
    p.R = set_offsets(p.offsets, many, MAX_EXPERTS, 0);
    check_quantize_all(p);
}

static void operations_of_experts_quantize_what_they_compute(void **state) {
    (void)state;
    if (gpu) check_rows_in_place(gpu, stream);
}

static void norms_quantize_what_they_compute(void **state) {
    (void)state;
    if (!gpu) skip();
    check_norms_in_place(gpu, stream);
}

static void activations_quantize_what_they_compute(void **state) {
    (void)state;
    if (!gpu) skip();
    check_activations_in_place(gpu, stream);
}

/* ==== products ==================================================================================================== */

typedef struct problem {
    int64_t M, N, K;
    mt_dtype a_format, b_format, out_dtype;
    mt_fp8_blocks a_blocks, b_blocks;
    bool bias, accumulate, exact;
    int64_t scales_at;   // floats before the scales in the GPU's memory, which begins at a multiple of 16 bytes
    int64_t num_experts; // 0: none
    bool sums_rows;
    int32_t offsets[MAX_EXPERTS + 1];
} problem;

/* Random matrices in fp8 on the host, [count, R, C], or with experts whose rows are summed the transpose of x[C, R]. */
static mt_fp8_matrix random_matrices(const problem *p, int64_t count, int64_t R, int64_t C, mt_dtype format,
                                     mt_fp8_blocks blocks, int64_t *bytes, int64_t *scales) {
    bool transposed = p->num_experts && p->sums_rows;
    int64_t width = C + (transposed ? p->num_experts * (MT_FP8_EXPERT_ROWS - 1) : 0), n = count * R * C;
    mt_fp8_matrix matrix = {.stride = mt_fp8_stride(width, blocks), .format = format, .blocks = blocks};
    *bytes = count * R * matrix.stride;
    *scales = mt_fp8_num_scales(count, R, matrix.stride, blocks);
    matrix.data = mt_malloc(*bytes + 16), matrix.inverse_scales = mt_calloc(*scales * 4);
    float *x = mt_malloc(n * 4 + 4), amax;
    for (int64_t i = 0; i < n; i++) x[i] = ldexpf(random_float(), (int)(i / C / 64 % 4) * 2);
    mt_quantize_args a = {.x = x, .count = count, .R = R, .C = C, .amax = &amax};
    if (transposed) a.R = C, a.C = R, a.offsets = p->offsets, a.num_experts = p->num_experts;
    *(transposed ? &a.columns : &a.rows) = matrix;
    mt_cpu_ops.quantize(&a, MT_F32, NULL);
    free(x);
    return matrix;
}

static mt_fp8_matrix matrix_to_gpu(const problem *p, mt_fp8_matrix matrix, int64_t bytes, int64_t scales) {
    float *all = mt_calloc((p->scales_at + scales) * 4);
    memcpy(all + p->scales_at, matrix.inverse_scales, (size_t)scales * 4);
    matrix.data = to_gpu(matrix.data, bytes);
    matrix.inverse_scales = (float *)to_gpu(all, (p->scales_at + scales) * 4) + p->scales_at;
    free(all);
    return matrix;
}

/* n floats as `dtype`. */
static void *as_dtype(const float *from, int64_t n, mt_dtype dtype) {
    void *to = mt_malloc(n * mt_dtype_size(dtype) + 16);
    for (int64_t i = 0; i < n; i++)
        if (dtype == MT_F32)
            ((float *)to)[i] = from[i];
        else
            ((uint16_t *)to)[i] = mt_f32_to_bf16(from[i]);
    return to;
}

static double value_at(const void *data, int64_t i, mt_dtype dtype) {
    return dtype == MT_F32 ? (double)((const float *)data)[i] : (double)mt_bf16_to_f32(((const uint16_t *)data)[i]);
}

static void check_output(const char *name, const problem *p, const void *got, const void *want, int64_t n,
                         double allowed) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = value_at(got, i, p->out_dtype), y = value_at(want, i, p->out_dtype);
        if (isnan(x)) fail_msg("%s: element %lld is not a number", name, (long long)i);
        error += (x - y) * (x - y), norm += y * y;
    }
    if (sqrt(error / (norm + 1e-30)) > allowed)
        fail_msg("%s, M %lld N %lld K %lld, %lld experts, formats %d %d, blocks %d %d, out %d%s%s%s%s: off by %.2e",
                 name, (long long)p->M, (long long)p->N, (long long)p->K, (long long)p->num_experts, p->a_format,
                 p->b_format, p->a_blocks, p->b_blocks, p->out_dtype, p->bias ? ", bias" : "",
                 p->accumulate ? ", +=" : "", p->exact ? ", exact" : "", p->sums_rows ? ", sums rows" : "",
                 sqrt(error / (norm + 1e-30)));
}

static double allowed_error(const problem *p, const char *rung) {
    double rounding = p->out_dtype == MT_BF16 ? 4e-3 : 1e-5;
    if (strcmp(rung, "definition") == 0) return rounding;
    return rounding + (p->exact || p->a_blocks != MT_FP8_TENSOR ? 5e-4 : 1e-2);
}

/* Makes the rows of no expert NaN, and the scales of their vectors. */
static void spoil_other_rows(const problem *p, mt_fp8_matrix *rows) {
    int64_t width = mt_divide_up(p->M, 4) * 4;
    for (int64_t m = 0; m < p->M; m++) {
        if (m >= p->offsets[0] && m < p->offsets[p->num_experts]) continue;
        memset(rows->data + m * rows->stride, 0x7F, (size_t)rows->stride);
        for (int64_t block = 0; rows->blocks == MT_FP8_VECTOR_128 && block < rows->stride / 128; block++)
            rows->inverse_scales[block * width + m] = NAN;
    }
}

/* All rungs, and the table. Returns the number of rungs that served. */
static int check_product(const problem *p) {
    int64_t outs = p->num_experts && p->sums_rows ? p->num_experts : 1, n = outs * p->M * p->N + 16, bytes[2],
            scales[2];
    int64_t size = mt_dtype_size(p->out_dtype), weights = p->num_experts && !p->sums_rows ? p->num_experts : 1;
    mt_fp8_product_args a = {.M = p->M, .N = p->N, .K = p->K, .out_dtype = p->out_dtype, .exact_sums = p->exact};
    a.accumulate = p->accumulate, a.sums_rows = p->sums_rows, a.num_experts = p->num_experts;
    a.a = random_matrices(p, 1, p->M, p->K, p->a_format, p->a_blocks, &bytes[0], &scales[0]);
    a.b = random_matrices(p, weights, p->N, p->K, p->b_format, p->b_blocks, &bytes[1], &scales[1]);
    if (p->num_experts && !p->sums_rows) spoil_other_rows(p, &a.a);
    float *floats = mt_malloc((n + p->N) * 4);
    for (int64_t i = 0; i < n + p->N; i++) floats[i] = 3 * random_float();
    void *before = as_dtype(floats, n, p->out_dtype), *bias = as_dtype(floats + n, p->N, p->out_dtype);
    void *want = as_dtype(floats, n, p->out_dtype), *got = mt_malloc(n * size);
    mt_fp8_product_args on_gpu = a;
    a.out = want, a.bias = p->bias ? bias : NULL, a.offsets = p->num_experts ? p->offsets : NULL;
    mt_cpu_ops.fp8_product(&a, NULL);
    on_gpu.a = matrix_to_gpu(p, a.a, bytes[0], scales[0]), on_gpu.b = matrix_to_gpu(p, a.b, bytes[1], scales[1]);
    void *gpu_bias = to_gpu(bias, p->N * size);
    int32_t *offsets = to_gpu(p->offsets, (p->num_experts + 1) * 4);
    on_gpu.bias = p->bias ? gpu_bias : NULL, on_gpu.offsets = p->num_experts ? offsets : NULL;
    int served = 0;
    for (int rung = 0; rung <= MT_NUM_FP8_RUNGS; rung++) {
        const char *name = rung < MT_NUM_FP8_RUNGS ? mt_fp8_rungs[rung].name : "table";
        on_gpu.out = to_gpu(before, n * size);
        bool serves = true;
        if (rung < MT_NUM_FP8_RUNGS)
            served += serves = mt_fp8_rungs[rung].product(&on_gpu, stream);
        else
            gpu->fp8_product(&on_gpu, stream);
        from_gpu(got, on_gpu.out, n * size);
        if (serves) check_output(name, p, got, want, n, allowed_error(p, name));
        gpu->memory_free(on_gpu.out);
    }
    gpu->memory_free(on_gpu.a.data), gpu->memory_free(on_gpu.a.inverse_scales - p->scales_at);
    gpu->memory_free(on_gpu.b.data), gpu->memory_free(on_gpu.b.inverse_scales - p->scales_at);
    gpu->memory_free(gpu_bias), gpu->memory_free(offsets);
    free(a.a.data), free(a.a.inverse_scales), free(a.b.data), free(a.b.inverse_scales), free(floats);
    free(before), free(bias), free(want), free(got);
    return served;
}

/* Scales of a and b that occur together. */
static const mt_fp8_blocks kinds_of_blocks[][2] = {
    {MT_FP8_TENSOR, MT_FP8_TENSOR}, {MT_FP8_VECTOR_128, MT_FP8_BLOCK_128}, {MT_FP8_VECTOR_128, MT_FP8_VECTOR_128}};

static bool is_hopper(void) {
    int major = 0, minor = 0;
    assert_int_equal(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    assert_int_equal(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
    assert_int_equal(gpu->limits.no_fp8, major * 10 + minor < 89);
    return major == 9;
}

/* True if the rung "hopper" has to serve. */
static bool is_for_hopper(const problem *p) {
#ifndef MT_HAVE_SM90A
    return false;
#endif
    mt_fp8_blocks b_blocks = p->a_blocks == MT_FP8_TENSOR ? MT_FP8_TENSOR
                             : p->sums_rows               ? MT_FP8_VECTOR_128
                                                          : MT_FP8_BLOCK_128;
    return is_hopper() && p->num_experts > 0 && p->b_format == MT_F8_E4M3 && p->b_blocks == b_blocks &&
           (p->sums_rows ? p->out_dtype == MT_F32 : !p->accumulate);
}

/* All types of the result, blocks and formats. `least`: rungs that must serve where a GPU multiplies in fp8; the one
 * for Hopper's products of experts is added. */
static void check_product_all(problem p, int least) {
    static const mt_dtype formats[][2] = {{MT_F8_E4M3, MT_F8_E4M3}, {MT_F8_E5M2, MT_F8_E4M3}, {MT_F8_E4M3, MT_F8_E5M2}};
    for (int i = 0; i < 3 * 3 * 2 * 3; i++) {
        int result = i / 9 % 3; // stored, with bias, added
        p.a_format = formats[i % 3][0], p.b_format = formats[i % 3][1];
        p.a_blocks = kinds_of_blocks[i / 3 % 3][0], p.b_blocks = kinds_of_blocks[i / 3 % 3][1];
        if (p.sums_rows && p.b_blocks == MT_FP8_BLOCK_128) continue;
        p.exact = i / 27 || p.a_blocks != MT_FP8_TENSOR;
        p.bias = result == 1 && !p.num_experts, p.accumulate = result == 2;
        for (int wide = result == 2; wide < 2; wide++) {
            p.out_dtype = wide ? MT_F32 : MT_BF16;
            int served = check_product(&p);
            if (served < least + is_for_hopper(&p))
                fail_msg("%d rungs served, M %lld N %lld K %lld, formats %d %d, blocks %d %d, out %d", served,
                         (long long)p.M, (long long)p.N, (long long)p.K, p.a_format, p.b_format, p.a_blocks, p.b_blocks,
                         p.out_dtype);
        }
    }
}

static void products_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = {{128, 128, 128}, {256, 384, 512},   {8, 16, 16},
                                       {200, 48, 272},  {520, 1040, 1168}, {64, 272, 640}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_product_all((problem){.M = sizes[i][0], .N = sizes[i][1], .K = sizes[i][2]}, is_hopper() ? 2 : 1);
}

/* Sums over rows of activations, whose number is any; results with rows and columns in any number. */
static void products_of_any_size_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = {{256, 128, 100}, {48, 144, 333}, {33, 64, 48}, {1, 16, 16}, {130, 70, 90}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_product_all((problem){.M = sizes[i][0], .N = sizes[i][1], .K = sizes[i][2]}, 1);
}

/* cuBLASLt reads scales at multiples of 16 bytes; at others only the definition serves. */
static void products_take_scales_at_any_address(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int64_t at = 0; at <= 8; at++)
        for (int blocks = 0; blocks < (is_hopper() ? 3 : 1); blocks++) {
            problem p = {.M = 256, .N = 384, .K = 512, .a_format = MT_F8_E4M3, .b_format = MT_F8_E4M3};
            p.out_dtype = MT_BF16, p.exact = true, p.scales_at = at;
            p.a_blocks = kinds_of_blocks[blocks][0], p.b_blocks = kinds_of_blocks[blocks][1];
            int served = check_product(&p), least = is_hopper() && at % 4 == 0 ? 2 : 1;
            if (served < least || (at % 4 != 0 && served > 1))
                fail_msg("%d rungs served scales at float %d, blocks %d", served, (int)at, blocks);
        }
}

/* Products of N x K matrices for the given rows of experts, `before` and `after` which are rows of no expert, and the
 * gradients of these matrices. */
static void check_experts(const int64_t *rows, int64_t E, int64_t before, int64_t after, int64_t N, int64_t K) {
    problem p = {.N = N, .K = K, .num_experts = E};
    p.M = set_offsets(p.offsets, rows, E, before) + after;
    check_product_all(p, 1);
    problem of_weight = {.M = N, .N = K, .K = p.M, .num_experts = E, .sums_rows = true};
    memcpy(of_weight.offsets, p.offsets, sizeof p.offsets);
    check_product_all(of_weight, 1);
}

static void products_of_experts_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[][8] = {{100, 0, 128, 129, 1, 0, 300, 17}, {0, 0, 0, 0, 0, 0, 0, 5}, {256, 128}};
    static const int64_t experts[] = {8, 8, 2}, none[3] = {0};
    for (int i = 0; i < 3; i++)
        for (int around = 0; around < 2; around++)
            check_experts(rows[i], experts[i], around * 9, around * 70, 144, 272);
    check_experts(none, 3, 9, 70, 144, 272);
}

/* More tiles than a GPU has multiprocessors; sums longer and shorter than a kernel's buffers; several tiles of rows and
 * columns per expert, the last ones partial. */
static void products_of_many_experts_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t few[] = {127, 0, 900, 128, 1, 1500, 640, 513};
    int64_t many[MAX_EXPERTS];
    check_experts(few, 8, 3, 2, 1040, 528);
    for (int e = 0; e < MAX_EXPERTS; e++) many[e] = random_below(4) ? random_below(60) : 0;
    many[5] = 127, many[6] = 260, many[MAX_EXPERTS - 1] = 0;
    check_experts(many, MAX_EXPERTS, 1, 1, 784, 48);
}

/* ==== a rank's part of weights ==================================================================================== */

/* Codes, scales and largest values of two calls, on the host. */
typedef struct parts {
    uint8_t *codes, *transposed;
    float *scales, *transposed_scales, *amax;
} parts;

static void parts_free(parts *p) {
    free(p->codes), free(p->transposed), free(p->scales), free(p->transposed_scales), free(p->amax);
}

/* Quantizes elements [first, first + n) of x, and transposes all codes; the others are a pattern. */
static parts run_shard(const mt_ops *ops, mt_stream *on, const quantization *p, int64_t first, int64_t n,
                       uint64_t seed) {
    int64_t size = mt_dtype_size(p->dtype), all = p->count * p->R * p->C, bytes, scales, columns_bytes, columns_scales;
    const float scale = 3.7f;
    char *host = draw_input(p, seed), *x = ops->memory_alloc(n * size + 16);
    mt_fp8_matrix w, columns;
    float *given = ops->memory_alloc(16);
    parts result;
    open_matrix(ops, on, &w, p, p->R, p->C, &bytes, &scales);
    open_matrix(ops, on, &columns, p, p->C, p->R, &columns_bytes, &columns_scales);
    assert_int_equal(bytes, all);
    ops->memory_copy(x, host + first * size, n * size, on);
    ops->memory_copy(given, &scale, 4, on);
    mt_fp8_shard_args a = {.x = x, .w = w, .count = p->count, .R = p->R, .C = p->C, .first = first, .n = n};
    a.amax = ops->memory_alloc(scales * 4 + 16), a.w.data = NULL;
    ops->fp8_shard_quantize(&a, p->dtype, on);
    a.w = w, a.scale = p->scaling == COMPUTED ? NULL : given;
    ops->fp8_shard_quantize(&a, p->dtype, on);
    mt_quantize_args t = {.count = p->count, .R = p->R, .C = p->C, .rows = w, .columns = columns};
    ops->fp8_transpose(&t, on);
    result.codes = fetched(ops, on, w.data, bytes), result.scales = fetched(ops, on, w.inverse_scales, scales * 4);
    result.transposed = fetched(ops, on, columns.data, columns_bytes);
    result.transposed_scales = fetched(ops, on, columns.inverse_scales, columns_scales * 4);
    result.amax = fetched(ops, on, a.amax, scales * 4);
    ops->memory_free(x), ops->memory_free(given), free(host);
    return result;
}

static void check_codes(const char *copy, const uint8_t *got, const uint8_t *want, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        if (got[i] != want[i] && !(is_nan(got[i], MT_F8_E4M3) && is_nan(want[i], MT_F8_E4M3)))
            fail_msg("%s: element %lld is %02x, not %02x", copy, (long long)i, got[i], want[i]);
}

static void check_floats(const char *what, const float *got, const float *want, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(got + i, want + i, 4) != 0 && !(isnan(got[i]) && isnan(want[i])))
            fail_msg("%s: %lld of %lld is %g, not %g", what, (long long)i, (long long)count, (double)got[i],
                     (double)want[i]);
}

static void check_shard(const quantization *p, int64_t first, int64_t n) {
    uint64_t seed = random_word();
    parts want = run_shard(&mt_cpu_ops, NULL, p, first, n, seed), got = run_shard(gpu, stream, p, first, n, seed);
    int64_t stride = mt_fp8_stride(p->R, p->blocks), scales = mt_fp8_num_scales(p->count, p->R, p->C, p->blocks);
    check_codes("codes", got.codes, want.codes, p->count * p->R * p->C);
    check_codes("transposed codes", got.transposed, want.transposed, p->count * p->C * stride);
    check_floats("scales", got.scales, want.scales, scales);
    check_floats("transposed scales", got.transposed_scales, want.transposed_scales,
                 mt_fp8_num_scales(p->count, p->C, stride, p->blocks));
    check_floats("largest values", got.amax, want.amax, scales);
    parts_free(&want), parts_free(&got);
}

/* Parts that begin and end within rows and blocks, the whole, and nothing. */
static void parts_of_weights_match_the_cpu_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = {{1, 128, 128}, {1, 272, 384}, {3, 144, 256}, {2, 1040, 640}, {1, 16, 128}};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int i = 0; i < 12; i++) {
            quantization p = {.format = MT_F8_E4M3, .count = sizes[k][0], .R = sizes[k][1], .C = sizes[k][2]};
            int64_t all = p.count * p.R * p.C, first = all / 3 / 64 * 64;
            p.dtype = i % 2 ? MT_F32 : MT_BF16, p.odd = i / 2 % 2;
            p.blocks = i / 4 == 2 ? MT_FP8_BLOCK_128 : MT_FP8_TENSOR, p.scaling = i / 4 == 1 ? RECORDED : COMPUTED;
            check_shard(&p, 0, all);
            check_shard(&p, first, (all - first) / 2 / 64 * 64);
            check_shard(&p, first, all - first);
            check_shard(&p, 64, 0);
        }
}

/* ==== values of codes ============================================================================================= */

/* Rows of any width, also where codes or values begin between the words that a thread loads. */
static void values_of_codes_match_the_cpu_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][2] = {{1, 1}, {128, 128}, {300, 7}, {129, 520}, {1000, 1024}, {5, 1000}};
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    for (int i = 0; i < 36; i++) {
        int64_t R = sizes[i / 6][0], C = sizes[i / 6][1], n = R * C, scales = (R + 127) / 128 * ((C + 511) / 512 * 4);
        int64_t odd = i / 3 % 2, size = mt_dtype_size(types[i % 3]), bytes = n * size;
        uint8_t *codes = mt_malloc(n + odd);
        float *inverse_scales = mt_malloc(scales * 4);
        char *want = mt_malloc(bytes), *got = mt_malloc(bytes), *out = gpu->memory_alloc(bytes + size);
        for (int64_t k = 0; k < n + odd; k++) codes[k] = (uint8_t)(random_below(127) | random_below(2) << 7);
        for (int64_t k = 0; k < scales; k++) inverse_scales[k] = 1 + random_float() / 2;
        mt_dequantize_args a = {codes + odd, inverse_scales, R, C, want};
        mt_cpu_ops.dequantize(&a, types[i % 3], NULL);
        uint8_t *on_gpu = to_gpu(codes, n + odd);
        float *scales_on_gpu = to_gpu(inverse_scales, scales * 4);
        a = (mt_dequantize_args){on_gpu + odd, scales_on_gpu, R, C, out + odd * size};
        gpu->dequantize(&a, types[i % 3], stream);
        from_gpu(got, a.out, bytes);
        assert_memory_equal(got, want, (size_t)bytes);
        gpu->memory_free(on_gpu), gpu->memory_free(scales_on_gpu), gpu->memory_free(out);
        free(codes), free(inverse_scales), free(want), free(got);
    }
}

/* ==== delayed scaling ============================================================================================= */

static void scales_of_delayed_scaling_match_the_cpu_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    enum { N = 300, LONGEST = 5 };
    for (int i = 0; i < LONGEST * 2 * 2; i++) {
        float scale[N], history[LONGEST * N], largest[N], got[2][LONGEST * N], guard = i / 2 % 2 ? -1 : 1;
        for (int k = 0; k < N; k++) scale[k] = 1 + random_float() / 2, largest[k] = k % 2 ? 448 : 57344;
        for (int k = 0; k < LONGEST * N; k++)
            history[k] = random_below(8) ? fabsf(random_float()) : random_below(2) ? 0 : k % 3 ? INFINITY : 1e-38f;
        history[7] = NAN;
        mt_fp8_scale_args a = {N, i / 4 + 1, NULL, NULL, NULL, 1, i % 2, NULL};
        float *on_gpu[] = {to_gpu(scale, sizeof scale), to_gpu(history, sizeof history),
                           to_gpu(largest, sizeof largest), to_gpu(&guard, 4)};
        a.scale = on_gpu[0], a.history = on_gpu[1], a.largest = on_gpu[2], a.guard = on_gpu[3];
        gpu->fp8_scale_step(&a, stream);
        from_gpu(got[0], a.scale, sizeof scale), from_gpu(got[1], a.history, sizeof history);
        a.scale = scale, a.history = history, a.largest = largest, a.guard = &guard;
        mt_cpu_ops.fp8_scale_step(&a, NULL);
        assert_memory_equal(got[0], scale, sizeof scale);
        assert_memory_equal(got[1], history, sizeof history);
        for (int k = 0; k < 4; k++) gpu->memory_free(on_gpu[k]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantized_matrices_match_the_cpu_bit_for_bit),
        cmocka_unit_test(several_matrices_match_the_cpu),
        cmocka_unit_test(padding_of_the_transpose_is_zero),
        cmocka_unit_test(segments_of_experts_match_the_cpu),
        cmocka_unit_test(operations_of_experts_quantize_what_they_compute),
        cmocka_unit_test(activations_quantize_what_they_compute),
        cmocka_unit_test(norms_quantize_what_they_compute),
        cmocka_unit_test(products_match_the_cpu),
        cmocka_unit_test(products_of_any_size_match_the_cpu),
        cmocka_unit_test(products_take_scales_at_any_address),
        cmocka_unit_test(products_of_experts_match_the_cpu),
        cmocka_unit_test(products_of_many_experts_match_the_cpu),
        cmocka_unit_test(parts_of_weights_match_the_cpu_bit_for_bit),
        cmocka_unit_test(values_of_codes_match_the_cpu_bit_for_bit),
        cmocka_unit_test(scales_of_delayed_scaling_match_the_cpu_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
#endif
