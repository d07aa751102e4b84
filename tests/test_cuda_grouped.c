/* Every rung of the GPU's grouped linear layers against float64 on the same inputs, which are bf16 values where the
 * type is bf16. Rows that are no expert's hold NaN, and outputs a pattern that has to stay wherever nothing may be
 * written.
 *
 * Tolerances, of norms: what is rounded to bf16 once is off by about 1.6e-3, 4e-3 allowed; sums in fp32 by about the
 * square root of their length times 6e-8, 1e-5 allowed. A row too many, one too few or a NaN is far more. */
#include "cuda_harness.h"

#ifdef MT_HAVE_CUDA
#include "../cuda/grouped.h"

#include <cuda_runtime_api.h>

static float *new_random(int64_t n, mt_dtype dtype) {
    float *x = mt_malloc((n + 1) * 4);
    for (int64_t i = 0; i < n; i++) {
        x[i] = random_float();
        if (dtype != MT_F32) x[i] = mt_half_to_f32(mt_f32_to_half(x[i], dtype), dtype);
    }
    return x;
}

/* ==== one problem ================================================================================================ */

enum { MAX_EXPERTS = 1024, GUARD = 64 };
static const float POISON = -7.0f; // exact in bf16 and fp16
static const mt_dtype types[3] = {MT_F32, MT_BF16, MT_F16};

/* bf16, or fp16 where it is missing. */
static mt_dtype usual_type(void) {
    return gpu_has_bf16() ? MT_BF16 : MT_F16;
}

typedef struct problem {
    mt_dtype dtype;
    int64_t M, N, K, E;
    int64_t shift; // elements that operands begin behind what an allocation gives
    bool accumulate;
    int32_t offsets[MAX_EXPERTS + 1];
} problem;

/* Rows for each expert, with `before` and `behind` rows of no expert around them. */
static problem problem_of(mt_dtype dtype, int64_t N, int64_t K, int64_t E, const int64_t *rows, int64_t before,
                          int64_t behind) {
    problem p = {.dtype = dtype, .N = N, .K = K, .E = E};
    p.offsets[0] = (int32_t)before;
    for (int64_t e = 0; e < E; e++) p.offsets[e + 1] = p.offsets[e] + (int32_t)rows[e];
    p.M = p.offsets[E] + behind;
    return p;
}

/* In host memory, as floats. */
typedef struct operands {
    float *x, *dy, *w;
    int64_t sizes[3]; // of out for each kind
} operands;

static operands operands_of(const problem *p) {
    operands o = {new_random(p->M * p->K, p->dtype),
                  new_random(p->M * p->N, p->dtype),
                  new_random(p->E * p->N * p->K, p->dtype),
                  {p->M * p->N, p->M * p->K, p->E * p->N * p->K}};
    for (int64_t m = 0; m < p->M; m++) {
        if (m >= p->offsets[0] && m < p->offsets[p->E]) continue;
        for (int64_t k = 0; k < p->K; k++) o.x[m * p->K + k] = NAN;
        for (int64_t n = 0; n < p->N; n++) o.dy[m * p->N + n] = NAN;
    }
    return o;
}

static void operands_free(operands *o) {
    free(o->x), free(o->dy), free(o->w);
}

static void add_scaled(double *to, const float *x, double scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += scale * (double)x[i];
}

/* The expected `out`: POISON where nothing may be written, its former contents where gradients accumulate. */
static double *answer_of(const problem *p, const operands *o, mt_grouped_kind kind) {
    const int64_t N = p->N, K = p->K, size = o->sizes[kind];
    double *out = mt_malloc((size + GUARD) * 8);
    for (int64_t i = 0; i < size + GUARD; i++) out[i] = (double)POISON;
    if (kind == MT_GROUPED_BACKWARD_WEIGHT)
        for (int64_t i = 0; i < size && !p->accumulate; i++) out[i] = 0;
    for (int64_t e = 0; e < p->E; e++)
        for (int64_t m = p->offsets[e]; m < p->offsets[e + 1]; m++) {
            const float *x = o->x + m * K, *dy = o->dy + m * N, *w = o->w + e * N * K;
            if (kind == MT_GROUPED_BACKWARD_INPUT) memset(out + m * K, 0, (size_t)K * 8);
            for (int64_t n = 0; n < N; n++) {
                if (kind == MT_GROUPED_BACKWARD_INPUT) add_scaled(out + m * K, w + n * K, (double)dy[n], K);
                if (kind == MT_GROUPED_BACKWARD_WEIGHT) add_scaled(out + (e * N + n) * K, x, (double)dy[n], K);
                if (kind != MT_GROUPED_FORWARD) continue;
                double sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t k = 0; k < K; k++) sum += (double)x[k] * (double)w[n * K + k];
                out[m * N + n] = sum;
            }
        }
    return out;
}

/* n floats in memory of the GPU, as `dtype`, `shift` elements in. */
static char *floats_to_gpu(const float *from, int64_t n, int64_t shift, mt_dtype dtype) {
    int64_t size = mt_dtype_size(dtype);
    char *bytes = mt_calloc((n + shift) * size + 16);
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = mt_f32_to_half(from[i], dtype);
        memcpy(bytes + (i + shift) * size, dtype == MT_F32 ? (const void *)&from[i] : (const void *)&half,
               (size_t)size);
    }
    char *to = to_gpu(bytes, (n + shift) * size + 16);
    free(bytes);
    return to;
}

/* Runs a rung, or with rung NULL what the table has; the output as floats, NULL where the rung does not serve. */
static float *run(const mt_grouped_rung *rung, const problem *p, const operands *o, mt_grouped_kind kind) {
    const float *as[] = {o->x, o->dy, o->dy}, *bs[] = {o->w, o->w, o->x};
    const int64_t a_sizes[] = {p->M * p->K, p->M * p->N, p->M * p->N};
    const int64_t b_sizes[] = {p->E * p->N * p->K, p->E * p->N * p->K, p->M * p->K};
    mt_dtype out_dtype = kind == MT_GROUPED_BACKWARD_WEIGHT ? MT_F32 : p->dtype;
    int64_t n = o->sizes[kind] + GUARD, size = mt_dtype_size(p->dtype), out_size = mt_dtype_size(out_dtype);
    float *out = mt_malloc(n * 4);
    for (int64_t i = 0; i < n; i++) out[i] = POISON;
    char *a = floats_to_gpu(as[kind], a_sizes[kind], p->shift, p->dtype);
    char *b = floats_to_gpu(bs[kind], b_sizes[kind], p->shift, p->dtype),
         *d = floats_to_gpu(out, n, p->shift, out_dtype);
    int32_t *offsets = to_gpu(p->offsets, (p->E + 1) * 4);
    mt_grouped_call call = {kind, .M = p->M, .N = p->N, .K = p->K, .E = p->E, .offsets = offsets, .stream = stream};
    call.out = d + p->shift * out_size, call.a = a + p->shift * size, call.b = b + p->shift * size;
    call.accumulate = p->accumulate, call.dtype = p->dtype;
    bool served = true;
    if (rung)
        served = rung->product(&call);
    else if (kind == MT_GROUPED_FORWARD)
        gpu->grouped_linear_forward(&(mt_grouped_args){p->M, p->N, p->K, p->E, offsets, call.a, call.b, .y = call.out},
                                    p->dtype, stream);
    else if (kind == MT_GROUPED_BACKWARD_INPUT)
        gpu->grouped_linear_backward_input(
            &(mt_grouped_args){p->M, p->N, p->K, p->E, offsets, .w = call.b, .dy = call.a, .dx = call.out}, p->dtype,
            stream);
    else
        gpu->grouped_linear_backward_weight(&(mt_grouped_args){p->M, p->N, p->K, p->E, offsets, call.b, .dy = call.a,
                                                               .dw = call.out, .accumulate = p->accumulate},
                                            p->dtype, stream);
    char *bytes = mt_malloc(n * out_size);
    from_gpu(bytes, call.out, n * out_size);
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(out_dtype == MT_F32 ? (void *)&out[i] : (void *)&half, bytes + i * out_size, (size_t)out_size);
        if (out_dtype != MT_F32) out[i] = mt_half_to_f32(half, out_dtype);
    }
    gpu->memory_free(a), gpu->memory_free(b), gpu->memory_free(d), gpu->memory_free(offsets), free(bytes);
    if (served) return out;
    free(out);
    return NULL;
}

static void check_output(const char *name, const problem *p, mt_grouped_kind kind, const float *out,
                         const double *answer, int64_t n) {
    double error = 0, norm = 0, largest = 0, worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double difference = fabs((double)out[i] - answer[i]);
        if (!(difference >= 0)) fail_msg("%s, kind %d: element %lld is not a number", name, kind, (long long)i);
        if (answer[i] == (double)POISON && difference > 0)
            fail_msg("%s, kind %d: element %lld was written", name, kind, (long long)i);
        error += difference * difference, norm += answer[i] * answer[i];
        largest = fmax(largest, fabs(answer[i])), worst = fmax(worst, difference);
    }
    bool rounded = p->dtype != MT_F32 && kind != MT_GROUPED_BACKWARD_WEIGHT;
    double relative = sqrt(error / (norm + 1e-30)), allowed = rounded ? 4e-3 : 1e-5;
    if (relative > allowed || worst > (rounded ? 2e-2 : 1e-4) * largest)
        fail_msg("%s, kind %d, M %lld N %lld K %lld E %lld: off by %.2e in norm, by %.2e of the largest at worst", name,
                 kind, (long long)p->M, (long long)p->N, (long long)p->K, (long long)p->E, relative, worst / largest);
}

/* All rungs, and the table. `least` rungs have to serve. */
static void check(problem *p, int least) {
    operands o = operands_of(p);
    for (int kind = 0; kind < 3; kind++)
        for (int accumulate = 0; accumulate <= (kind == MT_GROUPED_BACKWARD_WEIGHT); accumulate++) {
            p->accumulate = accumulate;
            double *answer = answer_of(p, &o, (mt_grouped_kind)kind);
            int served = 0;
            for (int r = 0; r <= MT_NUM_GROUPED_RUNGS; r++) {
                const mt_grouped_rung *rung = r < MT_NUM_GROUPED_RUNGS ? &mt_grouped_rungs[r] : NULL;
                float *out = run(rung, p, &o, (mt_grouped_kind)kind);
                if (!out) continue;
                served += rung != NULL;
                check_output(rung ? rung->name : "table", p, (mt_grouped_kind)kind, out, answer, o.sizes[kind] + GUARD);
                free(out);
            }
            assert_true(served >= least);
            free(answer);
        }
    operands_free(&o);
}

/* ==== tests ====================================================================================================== */

static void every_number_of_rows_around_a_tile_matches_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[] = {1, 0, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 0, 255, 256, 257, 3};
    static const int64_t sizes[][2] = {{264, 136}, {8, 8}, {128, 64}, {384, 256}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int type = 0; type < 3; type += gpu_has_bf16() ? 1 : 2) {
            problem p = problem_of(types[type], sizes[i][0], sizes[i][1], sizeof rows / sizeof *rows, rows, 0, 0);
            check(&p, type ? 2 : 1);
        }
}

static void rows_of_no_expert_are_neither_read_nor_written(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[][4] = {{70, 3, 0, 58}, {0, 0, 0, 1}, {0, 0, 0, 0}, {128, 128, 64, 16}};
    static const int64_t around[][2] = {{0, 200}, {5, 1}, {130, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t j = 0; j < sizeof around / sizeof *around; j++)
            for (int type = 0; type < 3; type += gpu_has_bf16() ? 1 : 2) {
                problem p = problem_of(types[type], 136, 328, 4, rows[i], around[j][0], around[j][1]);
                check(&p, type ? 2 : 1);
            }
}

static void any_width_and_any_address_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[] = {37, 0, 129, 1};
    static const int64_t sizes[][2] = {{1, 1}, {37, 53}, {130, 7}, {129, 257}, {12, 20}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int type = 0; type < 3; type += gpu_has_bf16() ? 1 : 2) {
            problem p = problem_of(types[type], sizes[i][0], sizes[i][1], 4, rows, 0, 9);
            check(&p, type ? 2 : 1);
            p.shift = 1;
            check(&p, type ? 2 : 1);
        }
    problem odd = problem_of(usual_type(), 64, 128, 4, rows, 0, 0);
    odd.shift = 1;
    check(&odd, 2);
}

static void hundreds_of_experts_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t experts[] = {200, 512, 700};
    int64_t rows[MAX_EXPERTS];
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        for (int64_t e = 0; e < experts[i]; e++) rows[e] = random_below(3) ? random_below(20) : 0;
        problem p = problem_of(usual_type(), 72, 40, experts[i], rows, 0, 20);
        check(&p, 2);
    }
}

/* Of every block several tiles, with sums from none to many stages. */
static void many_tiles_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][2] = {{520, 264}, {264, 520}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t rows[120];
        for (int e = 0; e < 120; e++) rows[e] = e % 5 == 3 ? 0 : random_below(24);
        rows[7] = 900, rows[60] = 300;
        problem p = problem_of(usual_type(), sizes[i][0], sizes[i][1], 120, rows, 0, 50);
        check(&p, 2);
    }
}

static void random_problems_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int i = 0; i < 21; i++) {
        int64_t rows[40], E = 1 + random_below(40);
        for (int64_t e = 0; e < E; e++) rows[e] = random_below(4) ? random_below(90) : 0;
        problem p = problem_of(i % 3 == 1 ? usual_type() : types[i % 3], 8 * (1 + random_below(50)),
                               8 * (1 + random_below(50)), E, rows, 0, random_below(100));
        check(&p, i % 3 ? 2 : 1);
    }
}

static void two_runs_repeat_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[] = {700, 0, 33, 900, 128, 64, 511, 1};
    problem p = problem_of(usual_type(), 776, 520, 8, rows, 0, 40);
    p.accumulate = true;
    operands o = operands_of(&p);
    for (int kind = 0; kind < 3; kind++)
        for (int r = 0; r < MT_NUM_GROUPED_RUNGS; r++) {
            float *first = run(&mt_grouped_rungs[r], &p, &o, (mt_grouped_kind)kind);
            for (int again = 0; again < 3 && first; again++) {
                float *out = run(&mt_grouped_rungs[r], &p, &o, (mt_grouped_kind)kind);
                assert_memory_equal(first, out, (size_t)(o.sizes[kind] + GUARD) * 4);
                free(out);
            }
            free(first);
        }
    operands_free(&o);
}

/* The tests above would pass without it. */
static void hopper_serves_where_it_can(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t rows[] = {100, 28};
    const mt_grouped_rung *hopper = &mt_grouped_rungs[MT_NUM_GROUPED_RUNGS - 1];
    problem p = problem_of(usual_type(), 64, 128, 2, rows, 0, 0);
    operands o = operands_of(&p);
    int major = 0;
    bool built = false;
#ifdef MT_HAVE_SM90A
    built = true;
#endif
    assert_int_equal(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    for (int kind = 0; kind < 3; kind++) {
        float *out = run(hopper, &p, &o, (mt_grouped_kind)kind);
        assert_int_equal(out != NULL, built && major == 9);
        free(out);
        p.shift = 1; // TMA reads whole sixteen bytes
        assert_null(run(hopper, &p, &o, (mt_grouped_kind)kind));
        p.shift = 0;
    }
    operands_free(&o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number_of_rows_around_a_tile_matches_float64),
        cmocka_unit_test(rows_of_no_expert_are_neither_read_nor_written),
        cmocka_unit_test(any_width_and_any_address_match_float64),
        cmocka_unit_test(hundreds_of_experts_match_float64),
        cmocka_unit_test(many_tiles_match_float64),
        cmocka_unit_test(random_problems_match_float64),
        cmocka_unit_test(two_runs_repeat_bit_for_bit),
        cmocka_unit_test(hopper_serves_where_it_can),
    };
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
#endif
