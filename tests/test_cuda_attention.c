/* Every rung of the GPU's attention and cuDNN's against the CPU's in fp32, on the same inputs: values of bf16, or fp16.
 * Rows stand in a fused q, k, v buffer as a model's do, and what lies between and around them must stay as it was.
 *
 * Tolerances, of norms: a bf16 keeps 8 bits, so rounding is 2^-9 of an element at most and about 1.1e-3 in norm.
 * Outputs are rounded once, and weights before they meet values: 1.6e-3 expected, 4e-3 allowed. Gradients are rounded
 * once, gradients of scores before they meet queries and keys, and once more a span where spans share keys: 1.6e-3 to
 * 5e-3 expected, 8e-3 allowed. A wrong element or a key too few is far more. No single element is off by 2e-2 of the
 * largest. Where everything cancels, as for a sequence of one token, 1e-5 is the rounding of fp32 sums. Gradients of
 * biases are sums in fp32 of numbers that nothing rounds before: 1e-3 allowed, and 1e-4 where they cancel. */
#include "cuda_harness.h"

#ifdef MT_HAVE_CUDA
#include "../cuda/attention.h"

#include <cuda_runtime.h>

static const uint16_t POISON = 0xF5A5; // in outputs, before anything is written; far from every answer
static mt_dtype type = MT_BF16;        // of the operands; fp16 where the kernels have no bf16

static int in_fp16(void **state) {
    (void)state;
    type = MT_F16;
    return 0;
}

static int in_bf16(void **state) {
    (void)state;
    type = gpu && gpu->limits.no_bf16 ? MT_F16 : MT_BF16;
    return 0;
}

static int open_all(void **state) {
    return open_gpu(state) != 0 || in_bf16(state) != 0;
}

static uint16_t *new_poisoned(int64_t n) {
    uint16_t *x = mt_malloc(n * 2);
    for (int64_t i = 0; i < n; i++) x[i] = POISON;
    return x;
}

static uint16_t *new_random(int64_t n) {
    uint16_t *x = mt_malloc(n * 2);
    for (int64_t i = 0; i < n; i++) x[i] = mt_f32_to_half(random_float(), type);
    return x;
}

static float *as_floats(const uint16_t *x, int64_t n) {
    float *y = mt_malloc(n * 4);
    for (int64_t i = 0; i < n; i++) y[i] = mt_half_to_f32(x[i], type);
    return y;
}

/* ==== one problem ================================================================================================ */

enum { MAX_SPANS = 100 };

typedef struct problem {
    int64_t H, G, D, Dv, window;  // Dv 0: as many value channels as channels
    mt_attention_backend backend; // for calls through the table
    bool deterministic;
    double dropout;
    int64_t first_head;
    int64_t (*index_of)(int64_t row); // with dropout: the token numbers of rows
    int64_t buckets, max_distance;    // of biases by distance; 0: none
    bool bidirectional;
    int64_t Tq, Tk, count;
    mt_span spans[MAX_SPANS];
} problem;

static int64_t values_of(const problem *p) {
    return p->Dv ? p->Dv : p->D;
}

/* Where keys and values begin in a row of q, k and v, and where padding does. */
static int64_t k_at(const problem *p) {
    return p->H * p->D;
}
static int64_t v_at(const problem *p) {
    return (p->H + p->G) * p->D;
}
static int64_t end_at(const problem *p) {
    return v_at(p) + p->G * values_of(p);
}

/* NaN in `width` columns of the rows of x that are in no span: they must not count, even with a weight of 0. */
static void spoil_other_rows(const problem *p, bool keys, uint16_t *x, int64_t stride, int64_t width) {
    int64_t rows = keys ? p->Tk : p->Tq;
    for (int64_t row = 0; row < rows; row++) {
        bool used = false;
        for (int64_t i = 0; i < p->count; i++) {
            const mt_span *s = &p->spans[i];
            int64_t start = keys ? s->k_start : s->q_start, length = keys ? s->k_len : s->q_len;
            used = used || (row >= start && row < start + length);
        }
        for (int64_t c = 0; c < width && !used; c++) x[row * stride + c] = 0x7FC0;
    }
}

/* In host memory, with guard elements at the end of each buffer. q, k and v are columns of `qkv`, their gradients of
 * `dqkv`; out and dout have a stride of their own. */
typedef struct operands {
    int64_t stride, out_stride, num_qkv, num_out, num_lse;
    uint16_t *qkv, *dout, *out, *dqkv;
    float *lse;
    int64_t *q_index, *k_index; // NULL without dropout
    uint16_t *biases;           // [buckets, H], and their gradients
    float *dbiases;
} operands;

enum { GUARD = 64, PADDING = 8 };
static const float NO_LSE = 12345;

static int64_t *new_indices(const problem *p, int64_t rows) {
    int64_t *index = p->dropout > 0 ? mt_malloc((rows + 1) * 8) : NULL;
    for (int64_t row = 0; index && row < rows; row++) index[row] = p->index_of(row);
    return index;
}

static operands operands_new(const problem *p) {
    operands o = {.stride = end_at(p) + PADDING, .out_stride = p->H * values_of(p) + 2 * PADDING};
    int64_t rows = p->Tq > p->Tk ? p->Tq : p->Tk;
    o.num_qkv = rows * o.stride + GUARD;
    o.num_out = p->Tq * o.out_stride + GUARD;
    o.num_lse = p->Tq * p->H + GUARD;
    o.qkv = new_random(o.num_qkv);
    o.dout = new_random(o.num_out);
    spoil_other_rows(p, false, o.qkv, o.stride, k_at(p));
    spoil_other_rows(p, true, o.qkv + k_at(p), o.stride, end_at(p) - k_at(p));
    spoil_other_rows(p, false, o.dout, o.out_stride, p->H * values_of(p));
    o.q_index = new_indices(p, p->Tq), o.k_index = new_indices(p, p->Tk);
    o.biases = new_random(p->buckets * p->H + 1), o.dbiases = mt_calloc((p->buckets * p->H + 1) * 4);
    o.out = new_poisoned(o.num_out);
    o.dqkv = new_poisoned(o.num_qkv);
    o.lse = mt_malloc(o.num_lse * 4);
    for (int64_t i = 0; i < o.num_lse; i++) o.lse[i] = NO_LSE;
    return o;
}

/* The arguments of a call without its operands. */
static mt_attention shape_of(const problem *p, const operands *o) {
    return (mt_attention){
        .num_heads = p->H,
        .num_groups = p->G,
        .head_size = p->D,
        .value_size = values_of(p),
        .q_stride = o->stride,
        .k_stride = o->stride,
        .v_stride = o->stride,
        .out_stride = o->out_stride,
        .spans = {.host = p->spans, .device = p->spans, .count = p->count},
        .window = p->window,
        .backend = p->backend,
        .dropout = {p->dropout, 0xabcdef0123ull},
        .first_head = p->first_head,
        .q_index = o->q_index,
        .k_index = o->k_index,
        .bias = {.buckets = p->buckets, .max_distance = p->max_distance, .bidirectional = p->bidirectional},
        .scale = 2.5f / sqrtf((float)p->D)};
}

/* The same in fp32 by the CPU. The backward starts from the out and lse that it is given, as a rung's backward starts
 * from its own: their rounding is the forward's error, which the forward's check bounds. */
typedef struct answer {
    float *out, *lse, *dqkv, *dbiases;
} answer;

static answer answer_of(const problem *p, const operands *given) {
    mt_attention call = shape_of(p, given);
    float *qkv = as_floats(given->qkv, given->num_qkv), *k = qkv + k_at(p), *v = qkv + v_at(p);
    float *dout = as_floats(given->dout, given->num_out), *out = as_floats(given->out, given->num_out);
    uint16_t *untouched_out = new_poisoned(given->num_out), *untouched = new_poisoned(given->num_qkv);
    answer a = {.out = as_floats(untouched_out, given->num_out), .dqkv = as_floats(untouched, given->num_qkv)};
    float *row_dot = mt_malloc(given->num_lse * 4), *dk = a.dqkv + k_at(p), *dv = a.dqkv + v_at(p);
    a.lse = mt_malloc(given->num_lse * 4);
    float *biases = as_floats(given->biases, p->buckets * p->H + 1);
    a.dbiases = mt_calloc((p->buckets * p->H + 1) * 4);
    if (p->buckets > 0) call.bias.w = biases, call.bias.dw = a.dbiases;
    for (int64_t i = 0; i < given->num_lse; i++) a.lse[i] = NO_LSE;
    call.q = qkv, call.k = k, call.v = v, call.out = a.out, call.lse = a.lse;
    mt_cpu_ops.attention_forward(&call, MT_F32, NULL);
    call.dq = a.dqkv, call.dk = dk, call.dv = dv, call.row_dot = row_dot, call.dout = dout;
    call.out = out, call.lse = given->lse;
    mt_cpu_ops.attention_backward(&call, MT_F32, NULL);
    free(qkv), free(dout), free(out), free(row_dot), free(untouched_out), free(untouched), free(biases);
    return a;
}

/* The operations of the table, which choose an implementation themselves, in the form of a rung. */
static bool table_forward(const mt_attention *a, mt_dtype dtype, mt_stream *on) {
    gpu->attention_forward(a, dtype, on);
    return true;
}
static bool table_backward(const mt_attention *a, mt_dtype dtype, mt_stream *on) {
    gpu->attention_backward(a, dtype, on);
    return true;
}
static const mt_attention_rung table = {"the table", table_forward, table_backward};

/* Runs a rung over `o`, whose outputs it fills. False where the rung does not serve the problem. */
static bool run_rung(const mt_attention_rung *rung, const problem *p, operands *o, mt_stream *on) {
    mt_attention call = shape_of(p, o);
    mt_span *device_spans = to_gpu(p->spans, (p->count + 1) * (int64_t)sizeof(mt_span));
    uint16_t *qkv = to_gpu(o->qkv, o->num_qkv * 2), *dqkv = to_gpu(o->dqkv, o->num_qkv * 2);
    float *row_dot = to_gpu(o->lse, o->num_lse * 4);
    int64_t k = k_at(p), v = v_at(p), num_biases = p->buckets * p->H;
    uint16_t *biases = to_gpu(o->biases, num_biases * 2 + 2);
    float *dbiases = to_gpu(o->dbiases, num_biases * 4 + 4);
    if (num_biases > 0) call.bias.w = biases, call.bias.dw = dbiases;
    call.spans.device = device_spans;
    if (p->dropout > 0) call.q_index = to_gpu(o->q_index, p->Tq * 8), call.k_index = to_gpu(o->k_index, p->Tk * 8);
    call.q = qkv, call.k = qkv + k, call.v = qkv + v;
    call.out = to_gpu(o->out, o->num_out * 2), call.lse = to_gpu(o->lse, o->num_lse * 4);
    bool served = rung->forward(&call, type, on);
    call.dq = dqkv, call.dk = dqkv + k, call.dv = dqkv + v, call.row_dot = row_dot;
    call.dout = to_gpu(o->dout, o->num_out * 2);
    if (served) served = rung->backward(&call, type, on);
    gpu->stream_synchronize(on);
    from_gpu(o->out, call.out, o->num_out * 2);
    from_gpu(o->lse, call.lse, o->num_lse * 4);
    from_gpu(o->dqkv, dqkv, o->num_qkv * 2);
    from_gpu(o->dbiases, dbiases, num_biases * 4);
    void *all[] = {device_spans, qkv, dqkv, row_dot, call.out, call.lse, (void *)call.dout, biases, dbiases};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu->memory_free(all[i]);
    if (p->dropout > 0) gpu->memory_free((void *)call.q_index), gpu->memory_free((void *)call.k_index);
    return served;
}

/* ==== comparing ================================================================================================== */

static void describe(const problem *p) {
    print_error("H %d G %d D %d/%d window %d Tq %d Tk %d", (int)p->H, (int)p->G, (int)p->D, (int)values_of(p),
                (int)p->window, (int)p->Tq, (int)p->Tk);
    if (p->dropout > 0)
        print_error(" dropout %g, rows 0 and 1 are tokens %lld and %lld", p->dropout, (long long)p->index_of(0),
                    (long long)p->index_of(1));
    print_error("\n");
    if (p->buckets > 0)
        print_error("%d buckets to distance %d%s\n", (int)p->buckets, (int)p->max_distance,
                    p->bidirectional ? ", bidirectional" : "");
    for (int64_t i = 0; i < p->count; i++)
        print_error("  queries %d + %d, keys %d + %d%s\n", (int)p->spans[i].q_start, (int)p->spans[i].q_len,
                    (int)p->spans[i].k_start, (int)p->spans[i].k_len, p->spans[i].causal ? ", causal" : "");
}

/* Columns [first, first + width) of rows `stride` apart: near `want` where it was written, and untouched elsewhere. */
static void assert_columns(const char *what, const problem *p, const uint16_t *got, const float *want, int64_t n,
                           int64_t stride, int64_t first, int64_t width, double tolerance) {
    const float poison = mt_half_to_f32(POISON, type);
    double error = 0, size = 0, worst = 0, largest = 0;
    int64_t worst_at = -1, count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t column = i % stride;
        if (column < first || column >= first + width) continue;
        if (want[i] == poison) {
            if (got[i] == POISON) continue;
            describe(p);
            fail_msg("%s: row %d column %d was written", what, (int)(i / stride), (int)column);
        }
        double w = (double)want[i], difference = fabs((double)mt_half_to_f32(got[i], type) - w);
        if (!(difference <= worst)) worst = difference, worst_at = i; // NaN too
        error += difference * difference;
        size += w * w;
        largest = fmax(largest, fabs(w));
        count++;
    }
    if (sqrt(error) <= tolerance * sqrt(size) + 1e-5 * sqrt((double)count) && worst <= 2e-2 * largest + 1e-5) return;
    describe(p);
    fail_msg("%s: error %.3g of norm %.3g; at row %d column %d %.5g, should be %.5g", what, sqrt(error), sqrt(size),
             (int)(worst_at / stride), (int)(worst_at % stride), (double)mt_half_to_f32(got[worst_at], type),
             (double)want[worst_at]);
}

static void assert_answer(const char *rung, const problem *p, const operands *o, const answer *a) {
    char what[64];
    const struct {
        const char *name;
        int64_t first, width;
    } parts[] = {{"dq", 0, k_at(p)},
                 {"dk", k_at(p), p->G * p->D},
                 {"dv", v_at(p), p->G * values_of(p)},
                 {"padding", end_at(p), PADDING}};
    snprintf(what, sizeof what, "%s: out", rung);
    assert_columns(what, p, o->out, a->out, o->num_out, o->out_stride, 0, o->out_stride, 4e-3);
    for (int i = 0; i < 4; i++) {
        snprintf(what, sizeof what, "%s: %s", rung, parts[i].name);
        assert_columns(what, p, o->dqkv, a->dqkv, o->num_qkv, o->stride, parts[i].first, parts[i].width, 8e-3);
    }
    double error = 0, size = 0, count = (double)(p->buckets * p->H);
    for (int64_t i = 0; i < p->buckets * p->H; i++) {
        double w = (double)a->dbiases[i], difference = (double)o->dbiases[i] - w;
        error += difference * difference, size += w * w;
    }
    if (!(sqrt(error) <= 1e-3 * sqrt(size) + 1e-4 * sqrt(count))) {
        describe(p);
        fail_msg("%s: gradients of biases: error %.3g of norm %.3g", rung, sqrt(error), sqrt(size));
    }
    for (int64_t i = 0; i < o->num_lse; i++) {
        bool near = a->lse[i] == o->lse[i] || fabsf(a->lse[i] - o->lse[i]) <= 1e-4f * (1 + fabsf(a->lse[i]));
        if (near) continue;
        describe(p);
        fail_msg("%s: lse[%d] is %.7g, should be %.7g", rung, (int)i, (double)o->lse[i], (double)a->lse[i]);
    }
}

/* Fresh outputs for the same inputs. */
static operands operands_again(const problem *p, const operands *from) {
    operands o = *from;
    o.out = new_poisoned(o.num_out);
    o.dqkv = new_poisoned(o.num_qkv);
    o.lse = mt_malloc(o.num_lse * 4);
    for (int64_t i = 0; i < o.num_lse; i++) o.lse[i] = NO_LSE;
    o.dbiases = mt_calloc((p->buckets * p->H + 1) * 4);
    return o;
}

static void outputs_free(operands *o) {
    free(o->out), free(o->dqkv), free(o->lse), free(o->dbiases);
}

static void inputs_free(operands *o) {
    free(o->qkv), free(o->dout), free(o->q_index), free(o->k_index), free(o->biases);
}

static void check_rung(const mt_attention_rung *rung, const problem *p, const operands *inputs, bool must) {
    operands o = operands_again(p, inputs);
    if (run_rung(rung, p, &o, p->deterministic ? deterministic_stream : stream)) {
        answer a = answer_of(p, &o);
        assert_answer(rung->name, p, &o, &a);
        free(a.out), free(a.lse), free(a.dqkv), free(a.dbiases);
    } else if (must) {
        describe(p);
        fail_msg("%s does not serve it", rung->name);
    }
    outputs_free(&o);
}

static bool is_hopper(void) {
    int device, major;
    if (cudaGetDevice(&device) != cudaSuccess) fail_msg("no device");
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) fail_msg("no answer");
    return major == 9;
}

/* The rungs from the first on that have to serve a problem. The Hopper rung has the two usual head sizes and latent
 * attention's, without dropout and biases, and the next one only decodes; 256, and 128 or dropout where a block has 64
 * KiB, a GPU with little shared memory may leave to the definition. */
static int must_serve(const problem *p) {
    int64_t Dv = values_of(p);
    bool latent = p->D == 192 && Dv == 128;
    if (p->buckets > 0) return !gpu->limits.no_delta && p->D <= 128 && Dv <= 128 && p->max_distance <= 128 ? 2 : 1;
    if (gpu->limits.no_delta) return p->D <= 64 && Dv <= 64 && p->dropout <= 0 ? 2 : 1; // 64 KiB of shared memory
    if (p->dropout > 0) return (p->D <= 128 && Dv <= 128) || latent ? 2 : 1;
#ifdef MT_HAVE_SM90A
    bool usual = p->D == Dv && (Dv == 64 || Dv == 128);
    if (is_hopper() && type == MT_BF16 && (usual || latent)) return MT_NUM_ATTENTION_RUNGS - 1;
#endif
    return (p->D <= 128 && Dv <= 128) || latent ? 2 : 1;
}

/* The rungs, and the implementations outside of the ladder after them. */
static const mt_attention_rung *implementation(int r) {
    if (r < MT_NUM_ATTENTION_RUNGS) return &mt_attention_rungs[r];
    return r == MT_NUM_ATTENTION_RUNGS ? &mt_attention_cudnn : &mt_attention_unordered;
}

/* By all rungs. cuDNN is checked where it serves the problem. Those without dropout or biases leave them to others. */
static void check(const problem *p) {
    operands inputs = operands_new(p);
    for (int r = 0; r < MT_NUM_ATTENTION_RUNGS; r++) check_rung(&mt_attention_rungs[r], p, &inputs, r < must_serve(p));
    check_rung(&mt_attention_cudnn, p, &inputs, false);
    check_rung(&mt_attention_unordered, p, &inputs, must_serve(p) > 2 && p->D == 128 && values_of(p) == 128);
    for (int r = 2; r <= MT_NUM_ATTENTION_RUNGS + 1 && (p->dropout > 0 || p->buckets > 0); r++)
        assert_false(run_rung(implementation(r), p, &inputs, stream));
    inputs_free(&inputs);
    outputs_free(&inputs);
}

/* The same for one implementation alone, which has to serve it. */
static void check_one(const mt_attention_rung *rung, const problem *p) {
    operands inputs = operands_new(p);
    check_rung(rung, p, &inputs, true);
    inputs_free(&inputs);
    outputs_free(&inputs);
}

/* ==== tests ====================================================================================================== */

static void check_one_span(int64_t H, int64_t G, int64_t D, int64_t q_len, int64_t k_len, bool causal, int64_t window) {
    problem p = {.H = H, .G = G, .D = D, .window = window, .Tq = q_len, .Tk = k_len, .count = 1};
    p.spans[0] = (mt_span){0, q_len, 0, k_len, causal};
    check(&p);
}

/* The same with the heads of DeepSeek-V3's latent attention. */
static void check_latent_span(int64_t H, int64_t G, int64_t q_len, int64_t k_len, bool causal, int64_t window) {
    problem p = {.H = H, .G = G, .D = 192, .Dv = 128, .window = window, .Tq = q_len, .Tk = k_len, .count = 1};
    p.spans[0] = (mt_span){0, q_len, 0, k_len, causal};
    check(&p);
}

static void every_head_size_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int64_t D = 8; D <= 256; D += 8) check_one_span(2, 1, D, 150, 150, true, 0);
}

static void values_narrower_or_wider_than_keys_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t sizes[][2] = {{192, 128}, {48, 32},  {24, 16},  {64, 128}, {128, 64}, {8, 256},
                                {256, 8},   {200, 96}, {136, 72}, {192, 64}, {96, 136}, {192, 136}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        problem p = {.H = 4, .G = 2, .D = sizes[i][0], .Dv = sizes[i][1], .Tq = 150, .Tk = 150, .count = 1};
        p.spans[0] = (mt_span){0, 150, 0, 150, true};
        check(&p);
    }
}

static void every_length_around_a_tile_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t lengths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 400};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (int64_t D = 64; D <= 256; D *= 2) check_one_span(1, 1, D, lengths[i], lengths[i], true, 0);
        check_latent_span(1, 1, lengths[i], lengths[i], true, 0);
    }
}

static void queries_fewer_or_more_than_keys_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t lengths[][2] = {{1, 1}, {1, 700}, {2, 129}, {64, 300}, {130, 131}, {200, 70}, {129, 1}, {140, 0}};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int causal = 0; causal < 2; causal++) {
            check_one_span(4, 2, 64, lengths[i][0], lengths[i][1], causal, 0);
            check_one_span(2, 2, 128, lengths[i][0], lengths[i][1], causal, 0);
            check_one_span(1, 1, 192, lengths[i][0], lengths[i][1], causal, 0);
            check_latent_span(3, 3, lengths[i][0], lengths[i][1], causal, 0);
        }
}

static void windows_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t windows[] = {1, 7, 32, 64, 100, 128, 250, 1000};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        check_one_span(2, 1, 64, 300, 300, true, windows[i]);
        check_one_span(2, 1, 128, 300, 420, true, windows[i]);
        check_one_span(1, 1, 128, 200, 170, false, windows[i]);
        check_one_span(1, 1, 256, 200, 200, true, windows[i]);
        check_latent_span(2, 2, 300, 420, true, windows[i]);
    }
}

static void grouped_heads_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int64_t heads = 1; heads <= 8; heads *= 2) {
        check_one_span(heads, 1, 64, 140, 140, true, 0);
        check_one_span(3 * heads, 3, 128, 140, 140, true, 0);
        check_latent_span(2 * heads, 2, 140, 140, true, 0);
    }
}

/* Queries of spans are disjoint, with gaps; keys are too, or are shared as context parallelism shares them. */
static problem random_problem(void) {
    static const int64_t sizes[] = {8, 40, 64, 72, 96, 128, 136, 256};
    problem p = {.G = 1 + random_below(3), .D = sizes[random_below(8)], .count = 1 + random_below(12)};
    if (random_below(3) == 0) p.D = 192, p.Dv = 128;
    p.H = p.G * (1 << random_below(3));
    p.window = random_below(3) == 0 ? 1 + random_below(200) : 0;
    bool shared = random_below(4) == 0;
    for (int64_t i = 0; i < p.count; i++) {
        int64_t longest = random_below(3) == 0 ? 200 : 40;
        mt_span s = {
            .q_start = p.Tq + random_below(3), .q_len = 1 + random_below(longest), .causal = random_below(3) > 0};
        s.k_len = random_below(2) ? s.q_len : 1 + random_below(longest);
        s.k_start = shared ? random_below(30) : p.Tk + random_below(3);
        p.Tq = s.q_start + s.q_len;
        if (s.k_start + s.k_len > p.Tk) p.Tk = s.k_start + s.k_len;
        p.spans[i] = s;
    }
    p.Tq += random_below(3), p.Tk += random_below(3);
    return p;
}

static void random_spans_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int i = 0; i < 60; i++) {
        problem p = random_problem();
        check(&p);
    }
}

static void more_spans_than_a_warp_has_lanes_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    problem p = {.H = 2, .G = 1, .D = 64, .count = MAX_SPANS};
    for (int64_t i = 0; i < p.count; i++) {
        int64_t length = i % 7 == 0 ? 0 : 1 + random_below(20);
        p.spans[i] = (mt_span){p.Tq, length, p.Tk, length, true};
        p.Tq += length, p.Tk += length;
    }
    check(&p);
    p.D = 192, p.Dv = 128;
    check(&p);
}

static void long_sequences_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_one_span(4, 1, 128, 2000, 2000, true, 0);
    check_one_span(2, 1, 128, 700, 2000, true, 0); // a chunk of queries, as in context parallelism
    check_one_span(2, 2, 128, 1000, 1000, false, 0);
    check_one_span(2, 1, 128, 1500, 1500, true, 300);
    check_one_span(3, 3, 64, 2048, 2048, true, 0);
    check_latent_span(3, 3, 2000, 2000, true, 0);
}

/* ---- dropout ----------------------------------------------------------------------------------------------------- */

/* The token numbers of a sample: four keys share a call of the generator. */
static int64_t from_a_multiple_of_4(int64_t row) {
    return 4096 + row;
}
static int64_t from_an_odd_number(int64_t row) {
    return 4099 + row;
}
static int64_t of_short_documents(int64_t row) {
    return row / 23 * 1001 + row % 23;
}
static int64_t of_padding(int64_t row) {
    return row < 70 ? 100 + row : -1;
}
static int64_t of_padding_before(int64_t row) {
    return row - 37 < -1 ? -1 : row - 37; // -1 and 0 are neighbours, and their counters are not
}
static int64_t scattered(int64_t row) {
    return row % 11 == 8 ? -1 : (int64_t)1 << 33 | (row * 3 % 64 + row / 64 * 64);
}
static int64_t around_a_counter_of_32_bits(int64_t row) {
    return ((int64_t)1 << 34) - 101 + row;
}

static int64_t (*const token_numbers[])(int64_t) = {
    from_a_multiple_of_4, from_an_odd_number, of_short_documents,         of_padding,
    of_padding_before,    scattered,          around_a_counter_of_32_bits};
enum { NUM_TOKEN_NUMBERS = sizeof token_numbers / sizeof *token_numbers };

static void check_dropped(problem p, double dropout, int64_t (*index_of)(int64_t)) {
    p.dropout = dropout, p.index_of = index_of, p.first_head = random_below(3) * 5;
    check(&p);
}

static void dropout_of_all_token_numbers_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t sizes[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < NUM_TOKEN_NUMBERS; k++)
            for (int causal = 0; causal < 2; causal++) {
                problem p = {.H = 2, .G = 1, .D = sizes[i][0], .Dv = sizes[i][1], .Tq = 150, .Tk = 150, .count = 1};
                p.spans[0] = (mt_span){0, 150, 0, 150, causal};
                check_dropped(p, 0.25, token_numbers[k]);
            }
}

static void dropout_of_every_length_around_a_tile_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t lengths[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int64_t D = 64; D <= 128; D *= 2)
            for (int k = 0; k < 2; k++) {
                problem p = {.H = 1, .G = 1, .D = D, .Tq = lengths[i], .Tk = lengths[i], .count = 1};
                p.spans[0] = (mt_span){0, lengths[i], 0, lengths[i], true};
                check_dropped(p, 0.1, token_numbers[k]);
                p.Tk += 77, p.spans[0].k_len += 77;
                check_dropped(p, 0.9, token_numbers[k]);
            }
}

static void dropout_with_windows_and_grouped_heads_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t windows[] = {1, 7, 33, 64, 100};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        for (int64_t D = 64; D <= 128; D *= 2) {
            problem p = {.H = 4, .G = 2, .D = D, .window = windows[i], .Tq = 200, .Tk = 260, .count = 1};
            p.spans[0] = (mt_span){0, 200, 0, 260, true};
            check_dropped(p, 0.5, token_numbers[i % NUM_TOKEN_NUMBERS]);
        }
}

static void dropout_of_random_spans_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int i = 0; i < 40; i++) check_dropped(random_problem(), 0.3, token_numbers[random_below(NUM_TOKEN_NUMBERS)]);
}

static void dropout_of_long_sequences_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    problem p = {.H = 3, .G = 3, .D = 64, .Tq = 1024, .Tk = 1024, .count = 1};
    p.spans[0] = (mt_span){0, 1024, 0, 1024, true};
    check_dropped(p, 0.1, from_a_multiple_of_4);
    p.D = 128;
    check_dropped(p, 0.1, from_an_odd_number);
}

/* ---- biases by distance ------------------------------------------------------------------------------------------ */

static void check_biased(int64_t H, int64_t G, int64_t D, int64_t q_len, int64_t k_len, int64_t buckets, int64_t most,
                         bool bidirectional) {
    problem p = {.H = H, .G = G, .D = D, .Tq = q_len, .Tk = k_len, .count = 1};
    p.buckets = buckets, p.max_distance = most, p.bidirectional = bidirectional;
    p.spans[0] = (mt_span){0, q_len, 0, k_len, !bidirectional};
    check(&p);
}

static void biases_of_every_length_around_a_tile_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t lengths[] = {1, 2, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 400};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int both = 0; both < 2; both++) {
            check_biased(2, 2, 64, lengths[i], lengths[i], 32, 128, both);
            check_biased(2, 1, 128, lengths[i], lengths[i], 32, 128, both);
            check_biased(2, 1, 40, lengths[i], 150, 32, 128, both); // also more queries than keys
        }
}

static void biases_of_any_buckets_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t buckets[][2] = {{4, 3}, {6, 128}, {4, 20}, {8, 16}, {64, 33}, {64, 128}, {32, 1000}, {62, 100}};
    for (size_t i = 0; i < sizeof buckets / sizeof *buckets; i++)
        for (int both = 0; both < 2; both++) check_biased(4, 2, 64, 600, 600, buckets[i][0], buckets[i][1], both);
}

static void biases_of_random_spans_match_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int i = 0; i < 30; i++) {
        problem p = random_problem();
        p.buckets = 32, p.max_distance = 128, p.bidirectional = random_below(2);
        if (i % 2 == 0)
            check(&p);
        else
            check_dropped(p, 0.3, token_numbers[random_below(NUM_TOKEN_NUMBERS)]);
    }
}

/* ---- repeats, cuDNN and the table ------------------------------------------------------------------------------- */

/* Several runs with a workspace, and, unless the backward takes another kernel then, one without. */
static void check_repeats(problem p, bool without_workspace) {
    p.Tq = p.Tk = 3000, p.count = 2;
    p.spans[0] = (mt_span){0, 1900, 0, 1900, true};
    p.spans[1] = (mt_span){1900, 1100, 1900, 1100, true};
    for (int r = 0; r < MT_NUM_ATTENTION_RUNGS; r++) {
        operands first = operands_new(&p);
        bool served = run_rung(&mt_attention_rungs[r], &p, &first, stream);
        assert_true(served || r >= must_serve(&p));
        for (int i = 0; i < 4 && served; i++) {
            operands again = operands_again(&p, &first);
            assert_true(run_rung(&mt_attention_rungs[r], &p, &again, i == 3 && without_workspace ? NULL : stream));
            assert_memory_equal(first.out, again.out, (size_t)first.num_out * 2);
            assert_memory_equal(first.lse, again.lse, (size_t)first.num_lse * 4);
            assert_memory_equal(first.dqkv, again.dqkv, (size_t)first.num_qkv * 2);
            outputs_free(&again);
        }
        inputs_free(&first);
        outputs_free(&first);
    }
}

static void two_runs_repeat_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    check_repeats((problem){.H = 8, .G = 2, .D = 128}, false);
    check_repeats((problem){.H = 4, .G = 4, .D = 128, .window = 500}, false);
    check_repeats((problem){.H = 4, .G = 4, .D = 192, .Dv = 128}, true);
    check_repeats((problem){.H = 4, .G = 2, .D = 64}, true);
    check_repeats((problem){.H = 4, .G = 2, .D = 64, .dropout = 0.1, .index_of = from_an_odd_number}, true);
}

/* More tiles of keys than multiprocessors, so that blocks take several and wait for the additions of others. */
static void ordered_sums_of_many_tiles_repeat_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    problem p = {.H = 8, .G = 8, .D = 128, .Tq = 3000, .Tk = 4000, .count = 1};
    p.spans[0] = (mt_span){0, 3000, 0, 4000, true};
    operands first = operands_new(&p);
    assert_true(run_rung(&table, &p, &first, deterministic_stream));
    for (int i = 0; i < 5; i++) {
        operands again = operands_again(&p, &first);
        assert_true(run_rung(&table, &p, &again, deterministic_stream));
        assert_memory_equal(first.dqkv, again.dqkv, (size_t)first.num_qkv * 2);
        outputs_free(&again);
    }
    inputs_free(&first);
    outputs_free(&first);
}

/* Without a workspace the backward takes two kernels. */
static void no_workspace_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu || !is_hopper()) skip();
    problem p = {.H = 4, .G = 2, .D = 128, .Tq = 300, .Tk = 300, .count = 1};
    p.spans[0] = (mt_span){0, 300, 0, 300, true};
    operands o = operands_new(&p);
    bool served = run_rung(&mt_attention_rungs[2], &p, &o, NULL);
    assert_true(served || must_serve(&p) <= 2);
    if (served) {
        answer a = answer_of(&p, &o);
        assert_answer("two kernels", &p, &o, &a);
        free(a.out), free(a.lse), free(a.dqkv), free(a.dbiases);
    }
    inputs_free(&o);
    outputs_free(&o);
}

/* `count` sequences of q_len queries and k_len keys, `gap` rows apart. */
static problem batch(int64_t count, int64_t q_len, int64_t k_len, int64_t gap, bool causal) {
    problem p = {.H = 4, .G = 2, .D = 128, .count = count};
    for (int64_t i = 0; i < count; i++) {
        p.spans[i] = (mt_span){gap + i * (q_len + gap), q_len, gap + i * (k_len + gap), k_len, causal};
        p.Tq = p.spans[i].q_start + q_len + gap, p.Tk = p.spans[i].k_start + k_len + gap;
    }
    return p;
}

static void skip_without_cudnn(void) {
    if (!gpu) skip();
#ifndef MT_HAVE_CUDNN
    print_message("skipped: built without cuDNN\n");
    skip();
#endif
}

static void cudnn_serves_batches_and_matches_the_cpu(void **state) {
    (void)state;
    skip_without_cudnn();
    const problem problems[] = {batch(1, 128, 128, 0, true),  batch(1, 1024, 1024, 0, true),
                                batch(3, 256, 256, 0, true),  batch(4, 384, 384, 5, true),
                                batch(2, 256, 256, 0, false), batch(2, 128, 384, 3, false),
                                batch(2, 512, 128, 0, false), batch(1, 640, 640, 7, true)};
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (int64_t G = 1; G <= 4; G *= 2) {
            problem p = problems[i];
            p.G = G;
            check_one(&mt_attention_cudnn, &p);
            p.D = 64, p.H = 12, p.G = 3 * G;
            check_one(&mt_attention_cudnn, &p);
        }
    for (int64_t D = 8; D <= 128; D += 8) {
        problem p = batch(2, 256, 256, 1, true);
        p.D = D, p.H = 5, p.G = 5;
        check_one(&mt_attention_cudnn, &p);
    }
    for (int64_t D = 136; is_hopper() && D <= 256; D += 40) {
        problem p = batch(2, 256, 256, 1, true);
        p.D = D, p.H = 6, p.G = 2;
        check_one(&mt_attention_cudnn, &p);
    }
    for (size_t i = 0; is_hopper() && i < sizeof problems / sizeof *problems; i++) {
        problem p = problems[i];
        p.D = 192, p.Dv = 128, p.H = 3, p.G = 3;
        check_one(&mt_attention_cudnn, &p);
    }
}

static void cudnn_leaves_to_others_what_is_no_batch(void **state) {
    (void)state;
    skip_without_cudnn();
    problem problems[] = {batch(1, 100, 100, 0, true), batch(1, 128, 256, 0, true), batch(2, 128, 128, 0, true),
                          batch(3, 128, 128, 0, true), batch(2, 128, 128, 0, true), batch(1, 128, 128, 0, true),
                          batch(1, 128, 128, 0, true), batch(1, 128, 128, 0, true)};
    problems[2].spans[1].causal = false;
    problems[3].spans[2].q_start++, problems[3].Tq++;
    problems[4].spans[1].k_start = 0; // both would write the gradients of these keys
    problems[5].D = is_hopper() ? 264 : 136;
    problems[6].Dv = 64;
    problems[7].D = 192, problems[7].Dv = 128; // gradients of shared keys would take more workspace
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
        operands o = operands_new(&problems[i]);
        assert_false(run_rung(&mt_attention_cudnn, &problems[i], &o, stream));
        inputs_free(&o);
        outputs_free(&o);
    }
}

/* The workspace that a model of the same tokens and heads would plan is enough for cuDNN's plans. */
static void cudnn_works_in_the_planned_workspace(void **state) {
    (void)state;
    skip_without_cudnn();
    const int64_t sizes[] = {8, 48, 88, 128, 192, 256};
    for (int i = 0; i < (is_hopper() ? 6 : 4); i++)
        for (int64_t G = sizes[i] == 192 ? 16 : 4; G <= 16; G *= 4) {
            problem p = batch(4, 2048, 2048, 0, true);
            int64_t D = sizes[i];
            p.D = D, p.G = G, p.H = 16, p.Dv = D == 192 ? 128 : D;
            int64_t bytes = gpu->workspace_bytes(p.Tq, p.H * D, p.H, D);
            void *planned = gpu->memory_alloc(bytes);
            mt_stream *on = gpu->stream_create(planned, bytes, false);
            operands o = operands_new(&p);
            bool served = run_rung(&mt_attention_cudnn, &p, &o, on);
            gpu->stream_destroy(on);
            gpu->memory_free(planned);
            inputs_free(&o);
            outputs_free(&o);
            if (!served) describe(&p);
            assert_true(served);
        }
}

/* A NaN in a query, a key or a value of group 1 makes NaN of every output that sees it, and one in a query or a key of
 * no other: the maximum of scores and the division by their sum drop none. cuDNN's kernels are not this program's. */
static void check_not_a_number(const mt_attention_rung *rung, const problem *p, int operand, int64_t at) {
    const int64_t per_group = p->H / p->G, D = p->D, columns[] = {per_group * D, k_at(p) + D, v_at(p) + D};
    operands o = operands_new(p);
    o.qkv[at * o.stride + columns[operand] + 3] = 0x7FC0;
    bool served = run_rung(rung, p, &o, stream);
    for (int64_t i = 0; served && i < p->Tq * p->H * D; i++) {
        int64_t row = i / (p->H * D), head = i / D % p->H;
        bool sees = operand == 0 ? row == at && head == per_group : row >= at && head / per_group == 1;
        if (operand == 2) sees &= i % D == 3;
        bool wrong = isnan(mt_half_to_f32(o.out[row * o.out_stride + i % (p->H * D)], type)) != sees;
        if (operand < 2) wrong |= isnan(o.lse[row * p->H + head]) != sees;
        if (!wrong || (operand == 2 && !sees)) continue; // 0 times the NaN of a later value is NaN too
        describe(p);
        fail_msg("%s: a NaN in operand %d, row %d: out[%d] of head %d %s NaN", rung->name, operand, (int)at, (int)row,
                 (int)head, sees ? "is not" : "is");
    }
    inputs_free(&o);
    outputs_free(&o);
}

static void a_nan_in_attention_stays_a_nan(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[] = {8, 64, 128}, rows[] = {0, 39, 150};
    for (int i = 0; i < 3; i++) {
        problem p = {.H = 4, .G = 2, .D = sizes[i], .Tq = 200, .Tk = 200, .count = 1};
        p.spans[0] = (mt_span){0, 200, 0, 200, true};
        for (int r = 0; r <= MT_NUM_ATTENTION_RUNGS + 1; r++)
            for (int k = 0; k < 3 * 3 && r != MT_NUM_ATTENTION_RUNGS; k++)
                check_not_a_number(implementation(r), &p, k / 3, rows[k % 3]);
    }
}

/* A batch long enough for `auto` to measure, one that is too short for it, spans that are no batch, and a long batch of
 * latent attention's heads. */
static void every_backend_of_the_table_matches_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    problem problems[] = {batch(2, 512, 512, 0, true), batch(2, 128, 128, 0, true), batch(2, 100, 100, 0, true),
                          batch(2, 512, 512, 0, true)};
    problems[3].D = 192, problems[3].Dv = 128, problems[3].G = problems[3].H;
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (int b = MT_ATTENTION_AUTO; b <= MT_ATTENTION_UNFUSED; b++)
            for (int deterministic = 0; deterministic < 2; deterministic++) {
                problems[i].backend = (mt_attention_backend)b, problems[i].deterministic = deterministic;
                check_one(&table, &problems[i]); // measures
                check_one(&table, &problems[i]);
            }
}

static void deterministic_auto_repeats_bit_for_bit(void **state) {
    (void)state;
    if (!gpu) skip();
    problem p = batch(2, 1024, 1024, 0, true);
    mt_stream *on = deterministic_stream;
    operands first = operands_new(&p), again = operands_again(&p, &first), flash = operands_again(&p, &first);
    assert_true(run_rung(&table, &p, &first, on) && run_rung(&table, &p, &again, on));
    p.backend = MT_ATTENTION_FLASH;
    assert_true(run_rung(&table, &p, &flash, on));
    const operands *others[] = {&again, &flash};
    for (int i = 0; i < 2; i++) {
        assert_memory_equal(first.out, others[i]->out, (size_t)first.num_out * 2);
        assert_memory_equal(first.lse, others[i]->lse, (size_t)first.num_lse * 4);
        assert_memory_equal(first.dqkv, others[i]->dqkv, (size_t)first.num_qkv * 2);
    }
    inputs_free(&first);
    outputs_free(&first), outputs_free(&again), outputs_free(&flash);
}

#define IN_FP16(test)                                                                                                  \
    { #test " in fp16", test, in_fp16, in_bf16, NULL }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_matches_the_cpu),
        cmocka_unit_test(values_narrower_or_wider_than_keys_match_the_cpu),
        cmocka_unit_test(every_length_around_a_tile_matches_the_cpu),
        cmocka_unit_test(queries_fewer_or_more_than_keys_match_the_cpu),
        cmocka_unit_test(windows_match_the_cpu),
        cmocka_unit_test(grouped_heads_match_the_cpu),
        cmocka_unit_test(random_spans_match_the_cpu),
        cmocka_unit_test(more_spans_than_a_warp_has_lanes_match_the_cpu),
        cmocka_unit_test(long_sequences_match_the_cpu),
        cmocka_unit_test(dropout_of_all_token_numbers_matches_the_cpu),
        cmocka_unit_test(dropout_of_every_length_around_a_tile_matches_the_cpu),
        cmocka_unit_test(dropout_with_windows_and_grouped_heads_matches_the_cpu),
        cmocka_unit_test(dropout_of_random_spans_matches_the_cpu),
        cmocka_unit_test(dropout_of_long_sequences_matches_the_cpu),
        cmocka_unit_test(biases_of_every_length_around_a_tile_match_the_cpu),
        cmocka_unit_test(biases_of_any_buckets_match_the_cpu),
        cmocka_unit_test(biases_of_random_spans_match_the_cpu),
        cmocka_unit_test(two_runs_repeat_bit_for_bit),
        cmocka_unit_test(ordered_sums_of_many_tiles_repeat_bit_for_bit),
        cmocka_unit_test(no_workspace_matches_the_cpu),
        cmocka_unit_test(cudnn_serves_batches_and_matches_the_cpu),
        cmocka_unit_test(cudnn_leaves_to_others_what_is_no_batch),
        cmocka_unit_test(cudnn_works_in_the_planned_workspace),
        cmocka_unit_test(a_nan_in_attention_stays_a_nan),
        cmocka_unit_test(every_backend_of_the_table_matches_the_cpu),
        cmocka_unit_test(deterministic_auto_repeats_bit_for_bit),
        IN_FP16(every_head_size_matches_the_cpu),
        IN_FP16(values_narrower_or_wider_than_keys_match_the_cpu),
        IN_FP16(queries_fewer_or_more_than_keys_match_the_cpu),
        IN_FP16(windows_match_the_cpu),
        IN_FP16(grouped_heads_match_the_cpu),
        IN_FP16(random_spans_match_the_cpu),
        IN_FP16(dropout_of_random_spans_matches_the_cpu),
        IN_FP16(biases_of_random_spans_match_the_cpu),
        IN_FP16(two_runs_repeat_bit_for_bit),
        IN_FP16(cudnn_serves_batches_and_matches_the_cpu),
        IN_FP16(a_nan_in_attention_stays_a_nan),
        IN_FP16(every_backend_of_the_table_matches_the_cpu),
        IN_FP16(deterministic_auto_repeats_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, open_all, close_gpu);
}
#endif
