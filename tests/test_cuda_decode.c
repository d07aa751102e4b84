/* Decoding on the GPU: attention of few queries over many keys, and linear layers of few rows, against float64;
 * sampling against the CPU; steps in graphs against steps whose operations are enqueued one by one, the CPU and Hugging
 * Face transformers.
 *
 * Tolerances, of norms: fp32 sums are right to 1e-5; a result rounded to bf16 once is off by 2^-9 of an element at most
 * and about 1.7e-3 in norm, so 4e-3 is allowed. A key too few or too many is far more. */
#include "cuda_harness.h"

#ifdef MT_HAVE_CUDA
#include "../cuda/attention.h"
#include "../cuda/decode.h"
#include "../data/base/file.h"
#include "../data/tokens/prompts.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/generate.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/run_options.h"
#include "families.h"

#include <inttypes.h>
#include <jansson.h>

static const double POISON = -776; // in outputs, before anything is written; a bf16 holds it

/* A buffer on the host and its copy on the GPU. */
typedef struct buffer {
    int64_t count;
    mt_dtype dtype;
    void *host, *device;
} buffer;

static mt_dtype half = MT_BF16; // of operands; fp16 where the kernels have no bf16, with the same tolerances

static int open_all(void **state) {
    int status = open_gpu(state);
    if (gpu && !gpu_has_bf16()) half = MT_F16;
    return status;
}

static uint16_t to_half(mt_dtype dtype, float x) {
    return dtype == MT_F16 ? mt_f32_to_f16(x) : mt_f32_to_bf16(x);
}

static double element(const buffer *b, int64_t i) {
    if (b->dtype == MT_F32) return (double)((float *)b->host)[i];
    uint16_t bits = ((uint16_t *)b->host)[i];
    return (double)(b->dtype == MT_F16 ? mt_f16_to_f32(bits) : mt_bf16_to_f32(bits));
}

static void set_element(const buffer *b, int64_t i, double x) {
    if (b->dtype == MT_F32)
        ((float *)b->host)[i] = (float)x;
    else
        ((uint16_t *)b->host)[i] = to_half(b->dtype, (float)x);
}

static int64_t buffer_bytes(const buffer *b) {
    return b->count * mt_dtype_size(b->dtype);
}

/* Numbers in [-1, 1) that `seed` names, or POISON for seed 0. */
static buffer new_buffer(mt_dtype dtype, int64_t count, uint64_t seed) {
    buffer b = {.count = count, .dtype = dtype};
    b.host = mt_malloc(buffer_bytes(&b));
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];
        mt_philox(words, seed, (uint64_t)i, 0);
        set_element(&b, i, seed ? words[0] * 0x1p-31 - 1 : POISON);
    }
    b.device = to_gpu(b.host, buffer_bytes(&b));
    return b;
}

static void fetch(buffer *b) {
    from_gpu(b->host, b->device, buffer_bytes(b));
}

static void free_buffer(buffer *b) {
    gpu->memory_free(b->device);
    free(b->host);
}

/* ==== attention ================================================================================================== */

enum { MAX_SPANS = 40 };

typedef struct problem {
    int64_t H, G, D, Dv, window, Tq, Tk, count; // Dv 0: as many value channels as channels
    mt_span spans[MAX_SPANS];
} problem;

static int64_t values_of(const problem *p) {
    return p->Dv ? p->Dv : p->D;
}

typedef struct operands {
    buffer q, k, v, out, lse;
} operands;

static operands new_operands(const problem *p, mt_dtype dtype) {
    int64_t Dv = values_of(p);
    return (operands){new_buffer(dtype, p->Tq * (p->H * p->D + 8), 1), new_buffer(dtype, p->Tk * (p->G * p->D + 16), 2),
                      new_buffer(dtype, p->Tk * p->G * Dv, 3), new_buffer(dtype, p->Tq * (p->H * Dv + 8), 0),
                      new_buffer(MT_F32, p->Tq * p->H, 0)};
}

static void free_operands(operands *o) {
    free_buffer(&o->q), free_buffer(&o->k), free_buffer(&o->v), free_buffer(&o->out), free_buffer(&o->lse);
}

static mt_attention shape_of(const problem *p) {
    return (mt_attention){.num_heads = p->H,
                          .num_groups = p->G,
                          .head_size = p->D,
                          .value_size = values_of(p),
                          .q_stride = p->H * p->D + 8,
                          .k_stride = p->G * p->D + 16,
                          .v_stride = p->G * values_of(p),
                          .out_stride = p->H * values_of(p) + 8,
                          .window = p->window,
                          .scale = 2.5f / sqrtf((float)p->D)};
}

static const mt_attention_rung *rung_named(const char *name) {
    for (int i = 0; i < MT_NUM_ATTENTION_RUNGS; i++)
        if (strcmp(mt_attention_rungs[i].name, name) == 0) return &mt_attention_rungs[i];
    fail_msg("there is no rung %s", name);
    return NULL;
}

/* Runs a rung. `bound`: the host's list says that every span has so many keys (0: what is true). */
static void run_rung(const char *name, const problem *p, operands *o, int64_t bound) {
    mt_span host[MAX_SPANS], *device = to_gpu(p->spans, sizeof host);
    mt_attention call = shape_of(p);
    memcpy(host, p->spans, sizeof host);
    for (int64_t i = 0; bound > 0 && i < p->count; i++) host[i].k_len = bound;
    call.spans = (mt_spans){.host = host, .device = device, .count = p->count};
    call.q = o->q.device, call.k = o->k.device, call.v = o->v.device;
    call.out = o->out.device, call.lse = o->lse.device;
    if (!rung_named(name)->forward(&call, o->q.dtype, deterministic_stream))
        fail_msg("%s does not serve D %d", name, (int)p->D);
    fetch(&o->out), fetch(&o->lse);
    gpu->memory_free(device);
}

/* One query and head in float64, out [Dv]; returns the log-sum-exp. */
static double answer_of(const problem *p, const operands *o, const mt_span *s, int64_t i, int64_t head, double *out) {
    mt_attention shape = shape_of(p);
    int64_t group = head / (p->H / p->G), last = i + s->k_len - s->q_len, Dv = values_of(p);
    double max = -INFINITY, sum = 0, *scores = mt_malloc((s->k_len + 1) * 8);
    for (int64_t j = 0; j < s->k_len; j++) {
        bool seen = (!s->causal || j <= last) && (p->window == 0 || j > last - p->window);
        double dot = 0;
        for (int64_t c = 0; c < p->D; c++)
            dot += element(&o->q, (s->q_start + i) * shape.q_stride + head * p->D + c) *
                   element(&o->k, (s->k_start + j) * shape.k_stride + group * p->D + c);
        scores[j] = seen ? dot * (double)shape.scale : -INFINITY;
        max = fmax(max, scores[j]);
    }
    for (int64_t c = 0; c < Dv; c++) out[c] = 0;
    for (int64_t j = 0; j < s->k_len && isfinite(max); j++) {
        double weight = exp(scores[j] - max);
        sum += weight;
        for (int64_t c = 0; c < Dv; c++)
            out[c] += weight * element(&o->v, (s->k_start + j) * shape.v_stride + group * Dv + c);
    }
    for (int64_t c = 0; c < Dv && sum > 0; c++) out[c] /= sum;
    free(scores);
    return max + log(sum);
}

/* Elements beside the heads and in rows of no span are still POISON; every span's rows are near float64. */
static void assert_attention(const char *what, const problem *p, const operands *o, double tolerance) {
    int64_t Dv = values_of(p), stride = p->H * Dv + 8, untouched = 0, expected = p->Tq * stride;
    double error = 0, size = 0, want[256];
    for (int64_t n = 0; n < p->count; n++)
        for (int64_t i = 0; i < p->spans[n].q_len; i++)
            for (int64_t head = 0; head < p->H; head++) {
                int64_t query = p->spans[n].q_start + i;
                double lse = answer_of(p, o, &p->spans[n], i, head, want), got = element(&o->lse, query * p->H + head);
                if (!(got == lse || fabs(got - lse) <= 1e-5 * (1 + fabs(lse))))
                    fail_msg("%s D %d: lse of query %d head %d is %.8g, should be %.8g", what, (int)p->D, (int)query,
                             (int)head, got, lse);
                for (int64_t c = 0; c < Dv; c++) {
                    double difference = element(&o->out, query * stride + head * Dv + c) - want[c];
                    error += difference * difference, size += want[c] * want[c];
                }
                expected -= Dv;
            }
    for (int64_t i = 0; i < o->out.count; i++) untouched += element(&o->out, i) == POISON;
    if (!(sqrt(error) <= tolerance * sqrt(size)))
        fail_msg("%s H %d G %d D %d window %d: error %.3g of norm %.3g", what, (int)p->H, (int)p->G, (int)p->D,
                 (int)p->window, sqrt(error), sqrt(size));
    assert_int_equal(untouched, expected);
}

static void check_attention(const problem *p) {
    const mt_dtype dtypes[] = {half, MT_F32};
    for (int d = 0; d < 2; d++) {
        operands o = new_operands(p, dtypes[d]);
        double tolerance = dtypes[d] == MT_F32 ? 1e-5 : 4e-3;
        run_rung("split", p, &o, 0);
        assert_attention("split", p, &o, tolerance);
        operands again = new_operands(p, dtypes[d]);
        run_rung("naive", p, &again, 0);
        assert_attention("naive", p, &again, tolerance);
        run_rung("split", p, &again, 5000);
        assert_memory_equal(o.out.host, again.out.host, (size_t)buffer_bytes(&o.out));
        assert_memory_equal(o.lse.host, again.lse.host, (size_t)buffer_bytes(&o.lse));
        free_operands(&o), free_operands(&again);
    }
}

static problem one_span(int64_t H, int64_t G, int64_t D, int64_t q_len, int64_t k_len, bool causal, int64_t window) {
    problem p = {.H = H, .G = G, .D = D, .window = window, .Tq = q_len + 1, .Tk = k_len + 3, .count = 1};
    p.spans[0] = (mt_span){1, q_len, 3, k_len, causal};
    return p;
}

static void few_queries_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t heads[][2] = {{1, 1}, {4, 1}, {8, 2}, {7, 1}, {12, 12}, {24, 2}};
    const int64_t lengths[][2] = {{1, 1}, {1, 64}, {1, 65}, {1, 700}, {2, 129}, {8, 333}, {5, 3}, {1, 4500}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
            problem p = one_span(heads[i][0], heads[i][1], 64, lengths[j][0], lengths[j][1], j % 3 != 2, 0);
            check_attention(&p);
        }
}

static void every_head_size_matches_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int64_t D = 8; D <= 256; D += 8) {
        problem p = one_span(4, 2, D, 1 + D / 8 % 3, 150, true, 0);
        check_attention(&p);
    }
}

static void values_narrower_or_wider_than_keys_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t sizes[][2] = {{192, 128}, {48, 32}, {24, 16}, {8, 256}, {256, 8}, {64, 136}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int64_t heads = 2; heads <= 8; heads *= 4) {
            problem p = one_span(heads, 2, sizes[i][0], 1 + (int64_t)i % 3, 150, true, 0);
            p.Dv = sizes[i][1];
            check_attention(&p);
        }
}

static void windows_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t windows[] = {1, 7, 64, 100, 1000};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        for (int64_t queries = 1; queries <= 8; queries += 7) {
            problem p = one_span(4, 2, 128, queries, 420, i != 2, windows[i]);
            check_attention(&p);
        }
}

/* As a generator's batch: a span a sequence, lengths as they come, some with no key. */
static problem many_sequences(int64_t count) {
    problem p = {.H = 8, .G = 2, .D = 128, .count = count};
    for (int64_t i = 0; i < count; i++) {
        int64_t keys = i % 9 == 5 ? 0 : 1 + i * i * 37 % 1100;
        p.spans[i] = (mt_span){p.Tq + 1, 1, p.Tk, keys, true};
        p.Tq += 1 + i % 2, p.Tk += keys;
    }
    p.Tq += 1, p.Tk += 1;
    return p;
}

/* The same spans with keys in shuffled pages of 128 rows, on every rung, give the bits of keys in order. */
static void keys_in_pages_give_the_bits_of_keys_in_order(void **state) {
    (void)state;
    enum { PAGE = 128, PAGES = 11 }; // of them 9 in use
    static const char *const rungs[] = {"naive", "split", "mma", "hopper"};
    if (!gpu) skip();
    for (int k = 0; k < 8; k++) {
        bool decodes = k % 2 == 0;
        mt_dtype dtype = half;
        const char *rung = rungs[k / 2];
        problem p = {.H = 8, .G = 2, .D = 128, .Tq = decodes ? 2 : 300, .Tk = PAGES * PAGE, .count = 2};
        if (!decodes && k / 2 == 1) continue;
        p.spans[0] = (mt_span){0, decodes ? 1 : 200, 0, 700, true};
        p.spans[1] = (mt_span){p.spans[0].q_len, decodes ? 1 : 100, 6 * PAGE, 333, true};
        int32_t table[PAGES];
        for (int32_t i = 0; i < PAGES; i++) table[i] = (i * 4 + 3) % PAGES;
        operands rows = new_operands(&p, dtype), pages = new_operands(&p, dtype);
        buffer *of_rows[] = {&rows.k, &rows.v}, *of_pages[] = {&pages.k, &pages.v};
        for (int i = 0; i < 2; i++) {
            int64_t bytes = buffer_bytes(of_rows[i]) / p.Tk;
            for (int64_t j = 0; j < p.Tk; j++)
                memcpy((char *)of_pages[i]->host + (table[j / PAGE] * PAGE + j % PAGE) * bytes,
                       (char *)of_rows[i]->host + j * bytes, (size_t)bytes);
            gpu->memory_free(of_pages[i]->device);
            of_pages[i]->device = to_gpu(of_pages[i]->host, buffer_bytes(of_pages[i]));
        }
        mt_attention call = shape_of(&p);
        mt_span *device = to_gpu(p.spans, sizeof p.spans);
        int32_t *device_table = to_gpu(table, sizeof table);
        call.spans = (mt_spans){.host = p.spans, .device = device, .count = p.count};
        bool serves = true, serves_rows = false; // mma needs more than 64 KiB of shared memory for these heads
        for (int i = 0; i < 2 && serves; i++) {
            operands *o = i ? &pages : &rows;
            call.q = o->q.device, call.k = o->k.device, call.v = o->v.device;
            call.out = o->out.device, call.lse = o->lse.device;
            if (i) call.pages = (mt_pages){device_table, PAGE, PAGES};
            serves = rung_named(rung)->forward(&call, dtype, deterministic_stream);
            serves_rows |= serves;
            fetch(&o->out), fetch(&o->lse);
        }
        if (!serves && (k / 2 < 2 || (k / 2 < 3 && serves_rows))) fail_msg("%s does not serve pages", rung);
        if (serves) assert_memory_equal(rows.out.host, pages.out.host, (size_t)buffer_bytes(&rows.out));
        if (serves) assert_memory_equal(rows.lse.host, pages.lse.host, (size_t)buffer_bytes(&rows.lse));
        gpu->memory_free(device), gpu->memory_free(device_table);
        free_operands(&rows), free_operands(&pages);
    }
}

static void batches_of_sequences_match_float64(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int64_t count = 2; count <= MAX_SPANS; count += 19) {
        problem p = many_sequences(count);
        check_attention(&p);
    }
}

/* The number of sequences decides how keys are divided; the lengths of the others do not. */
static void a_sequence_has_the_same_bits_beside_any_others(void **state) {
    (void)state;
    if (!gpu) skip();
    problem all = many_sequences(MAX_SPANS / 2);
    int64_t width = all.H * values_of(&all) + 8;
    operands together = new_operands(&all, half), beside = new_operands(&all, half);
    run_rung("split", &all, &together, 0);
    for (int64_t i = 0; i < all.count; i++) {
        problem others_short = all;
        const mt_span *own = &all.spans[i];
        for (int64_t j = 0; j < all.count; j++)
            if (j != i) others_short.spans[j].k_len = all.spans[j].q_len;
        run_rung("split", &others_short, &beside, 0);
        assert_memory_equal((char *)together.out.host + own->q_start * width * 2,
                            (char *)beside.out.host + own->q_start * width * 2, (size_t)(own->q_len * width * 2));
        assert_memory_equal((float *)together.lse.host + own->q_start * all.H,
                            (float *)beside.lse.host + own->q_start * all.H, (size_t)(own->q_len * all.H * 4));
    }
    free_operands(&together), free_operands(&beside);
}

static void what_decoding_does_not_ask_for_is_left_to_other_rungs(void **state) {
    (void)state;
    if (!gpu) skip();
    problem p = one_span(2, 1, 64, 9, 100, true, 0); // too many queries
    mt_attention call = shape_of(&p);
    call.spans = (mt_spans){.host = p.spans, .device = NULL, .count = 1};
    assert_false(rung_named("split")->forward(&call, half, deterministic_stream));
    p.spans[0].q_len = 1;
    call.dropout.p = 0.1;
    assert_false(rung_named("split")->forward(&call, half, deterministic_stream));
    assert_false(rung_named("split")->backward(&call, half, deterministic_stream));
}

/* ==== linear layers ============================================================================================== */

/* y of T rows; the elements after it stay POISON. */
static buffer linear(const buffer *x, const buffer *w, const buffer *bias, int64_t T, int64_t N, int64_t K) {
    buffer y = new_buffer(x->dtype, T * N + 64, 0);
    gpu->linear_forward(
        &(mt_linear_args){T, N, K, .x = x->device, .w = w->device, .bias = bias ? bias->device : NULL, .y = y.device},
        x->dtype, deterministic_stream);
    fetch(&y);
    for (int64_t i = T * N; i < y.count; i++) assert_true(element(&y, i) == POISON);
    return y;
}

static void assert_linear(const buffer *y, const buffer *x, const buffer *w, const buffer *bias, int64_t T, int64_t N,
                          int64_t K) {
    double error = 0, size = 0, tolerance = x->dtype == MT_F32 ? 1e-5 : 4e-3;
    for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < N; n++) {
            double sum = bias ? element(bias, n) : 0;
            for (int64_t k = 0; k < K; k++) sum += element(x, t * K + k) * element(w, n * K + k);
            double difference = element(y, t * N + n) - sum;
            error += difference * difference, size += sum * sum;
        }
    if (!(sqrt(error) <= tolerance * sqrt(size)))
        fail_msg("T %d N %d K %d: error %.3g of norm %.3g", (int)T, (int)N, (int)K, sqrt(error), sqrt(size));
}

static void linear_layers_of_few_rows_match_float64_and_do_not_mix_rows(void **state) {
    (void)state;
    if (!gpu) skip();
    const int64_t shapes[][2] = {{1, 8}, {33, 40}, {768, 768}, {300, 3072}, {17000, 64}, {20001, 24}, {50, 4096}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = 0; d < 4; d++) {
            mt_dtype dtype = d % 2 ? MT_F32 : half;
            int64_t N = shapes[i][0], K = shapes[i][1], same = dtype == MT_F32 ? 8 : 1; // rows without tensor cores
            buffer x = new_buffer(dtype, 8 * K, 5), w = new_buffer(dtype, N * K, 6), b = new_buffer(dtype, N, 7);
            const buffer *bias = d / 2 ? &b : NULL;
            buffer all = linear(&x, &w, bias, 8, N, K);
            assert_linear(&all, &x, &w, bias, 8, N, K);
            buffer few = linear(&x, &w, bias, same, N, K);
            for (int64_t T = 1; T < 8; T++) {
                buffer y = linear(&x, &w, bias, T, N, K);
                if (T < same) assert_memory_equal(y.host, few.host, (size_t)(T * N * mt_dtype_size(dtype)));
                assert_linear(&y, &x, &w, bias, T, N, K);
                free_buffer(&y);
            }
            free_buffer(&few);
            free_buffer(&x), free_buffer(&w), free_buffer(&b), free_buffer(&all);
        }
}

/* On Hopper GPUs blocks mark the sums that they leave for others. Repeated calls check that each call clears its marks.
 */
static void linear_layers_of_up_to_32_rows_match_float64_and_repeat(void **state) {
    (void)state;
    if (!gpu) skip();
    enum { MOST = 33 };
    const int64_t shapes[][2] = {{4104, 2112}, {72, 131072}, {140000, 64}, {200, 192}},
                  rows[] = {1, 8, 9, 16, 17, 32, MOST};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t N = shapes[i][0], K = shapes[i][1];
        buffer x = new_buffer(half, MOST * K, 5), w = new_buffer(half, N * K, 6), b = new_buffer(half, N, 7);
        double *sums = mt_calloc(MOST * N * 8), *row = mt_malloc(K * 8), *inputs = mt_malloc(MOST * K * 8);
        for (int64_t k = 0; k < MOST * K; k++) inputs[k] = element(&x, k);
        for (int64_t n = 0; n < N; n++) {
            for (int64_t k = 0; k < K; k++) row[k] = element(&w, n * K + k);
            for (int64_t t = 0; t < MOST; t++)
                for (int64_t k = 0; k < K; k++) sums[t * N + n] += inputs[t * K + k] * row[k];
        }
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
            int64_t T = rows[j];
            bool biased = (j + i) % 2; // of neighbouring shapes both
            double error = 0, size = 0;
            buffer y = linear(&x, &w, biased ? &b : NULL, T, N, K);
            for (int64_t at = 0; at < T * N; at++) {
                double sum = sums[at] + (biased ? element(&b, at % N) : 0), off = element(&y, at) - sum;
                error += off * off, size += sum * sum;
            }
            if (!(sqrt(error) <= 4e-3 * sqrt(size)))
                fail_msg("T %d N %d K %d: error %.3g of norm %.3g", (int)T, (int)N, (int)K, sqrt(error), sqrt(size));
            for (int again = 0; again < 5; again++) {
                buffer same = linear(&x, &w, biased ? &b : NULL, T, N, K);
                assert_memory_equal(y.host, same.host, (size_t)buffer_bytes(&y));
                free_buffer(&same);
            }
            free_buffer(&y);
        }
        free(sums), free(row), free(inputs);
        free_buffer(&x), free_buffer(&w), free_buffer(&b);
    }
}

/* ==== sampling =================================================================================================== */

/* A logit of a row. Rows differ in their kind; most have equal logits. */
static float logit_of(int64_t row, int64_t i, int64_t V) {
    uint32_t words[4];
    mt_philox(words, 11, (uint64_t)row, (uint64_t)i);
    float normal = (float)((words[0] + 0.0 + words[1] + words[2] + words[3]) * 0x1p-32 - 2) * 1.7320508f;
    switch (row) {
    case 0:
        return 3 * normal; // bf16 rounds these to equals
    case 1:
        return roundf(24 * normal) / 8;
    case 2:
        return 2.5f;
    case 3:
        return 4 * normal - 30;
    case 4:
        return words[0] % 2 ? -INFINITY : 3 * normal;
    case 5:
        return i % (V / 3 + 1) == 0 ? normal : -INFINITY;
    case 6:
        return words[0] % 5 ? normal / 100 : words[1] % 2 ? 0.0f : -0.0f;
    case 7:
        return i == V / 7 ? 20 : 2 * normal;
    case 8:
        return i == V - 1 ? NAN : normal;
    case 9:
        return i == V / 2 ? INFINITY : normal;
    default:
        return -INFINITY;
    }
}
enum { SAMPLE_ROWS = 11 };

/* Rows of logits on both backends, their random numbers, and the samples. */
typedef struct sampling_case {
    mt_dtype dtype;
    mt_sample_args cpu, gpu;
    mt_sampled by_cpu[SAMPLE_ROWS], by_gpu[SAMPLE_ROWS];
    double uniforms[SAMPLE_ROWS];
} sampling_case;

static void open_sampling(sampling_case *c, mt_dtype dtype, int64_t V, int64_t stride) {
    int64_t bytes = SAMPLE_ROWS * stride * mt_dtype_size(dtype);
    char *logits = mt_malloc(bytes);
    memset(logits, 0xff, (size_t)bytes); // the padding is NaN
    for (int64_t row = 0; row < SAMPLE_ROWS; row++)
        for (int64_t i = 0; i < V; i++) {
            float x = logit_of(row, i, V);
            if (dtype == MT_F32)
                ((float *)logits)[row * stride + i] = x;
            else
                ((uint16_t *)logits)[row * stride + i] = to_half(dtype, x);
        }
    for (int64_t row = 0; row < SAMPLE_ROWS; row++) c->uniforms[row] = (random_float() + 1) / 2;
    c->uniforms[2] = V % 2 ? 0 : 1 - 0x1p-53; // all weights are 1: every sum is exact
    c->dtype = dtype;
    c->cpu = (mt_sample_args){.T = SAMPLE_ROWS, .stride = stride, .count = V, .logits = logits, .sampled = c->by_cpu};
    c->cpu.uniforms = c->uniforms, c->gpu = c->cpu;
    c->gpu.logits = to_gpu(logits, bytes), c->gpu.uniforms = to_gpu(c->uniforms, sizeof c->uniforms);
    c->gpu.sampled = to_gpu(c->by_gpu, sizeof c->by_gpu);
}

static void close_sampling(sampling_case *c) {
    void *device[] = {(void *)c->gpu.logits, (void *)c->gpu.uniforms, c->gpu.sampled};
    for (int i = 0; i < 3; i++) gpu->memory_free(device[i]);
    free((void *)c->cpu.logits);
}

static bool is_near(float x, float y) {
    return fabsf(x - y) <= 1e-5f * fmaxf(1, fabsf(y));
}

/* The same tokens as on the CPU, and the same bits again. */
static void check_sampling(sampling_case *c, const mt_sampling *s) {
    mt_sampled again[SAMPLE_ROWS];
    c->cpu.sampling = c->gpu.sampling = s;
    mt_cpu_ops.sample(&c->cpu, c->dtype, NULL);
    gpu->sample(&c->gpu, c->dtype, deterministic_stream);
    from_gpu(c->by_gpu, c->gpu.sampled, sizeof again);
    gpu->sample(&c->gpu, c->dtype, deterministic_stream);
    from_gpu(again, c->gpu.sampled, sizeof again);
    assert_memory_equal(again, c->by_gpu, sizeof again);
    for (int row = 0; row < SAMPLE_ROWS; row++) {
        mt_sampled x = c->by_gpu[row], y = c->by_cpu[row];
        if (x.token != y.token || !is_near(x.logp, y.logp) || !is_near(x.sampled_logp, y.sampled_logp))
            fail_msg(
                "%s V %d row %d, temperature %g top-k %d top-p %g min-p %g uniform %.17g: token %d logp %.7g %.7g, "
                "on the CPU %d %.7g %.7g",
                mt_dtype_name(c->dtype), (int)c->cpu.count, row, s->temperature, (int)s->top_k, s->top_p, s->min_p,
                c->uniforms[row], x.token, (double)x.logp, (double)x.sampled_logp, y.token, (double)y.logp,
                (double)y.sampled_logp);
        if (row > 7) assert_int_equal(x.token, -1);
    }
}

static void samples_are_those_of_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const double temperatures[] = {0, 0.7, 1}, top_ps[] = {1, 0.95, 0.1}, min_ps[] = {0, 0.05};
    static const int64_t shapes[][2] = {
        {1, 1},         {1, 8},           {7, 13},          {33, 40},      {1000, 1000},
        {50257, 50304}, {128256, 128256}, {151936, 151936}, {50257, 50257}}; // V, stride
    for (size_t shape = 0; shape < sizeof shapes / sizeof *shapes; shape++)
        for (int d = 0; d < 2; d++) {
            sampling_case c;
            int64_t V = shapes[shape][0], top_ks[] = {0, 1, 50, V};
            open_sampling(&c, d ? MT_F32 : half, V, shapes[shape][1]);
            for (int i = 0; i < 3 * 4 * 3 * 2; i++) {
                mt_sampling s = {.temperature = temperatures[i % 3], .top_k = top_ks[i / 3 % 4]};
                s.top_p = top_ps[i / 12 % 3], s.min_p = min_ps[i / 36], s.logprobs = i % 5 < 3;
                s.logp_scale = i % 7 < 4 ? 1 / 0.7f : 0;
                check_sampling(&c, &s);
            }
            close_sampling(&c);
        }
}

/* ==== graphs ===================================================================================================== */

enum { SEQUENCES = 3, STEPS = 14, HALF = STEPS / 2, CONTEXT = 64 };

static int64_t launches; // of graphs

static void count_launch(const mt_graph *graph, mt_stream *on) {
    launches++;
    gpu->graph_launch(graph, on);
}

/* The GPU's table with its launches counted, and without graphs. */
static mt_ops counted_ops(void) {
    mt_ops ops = *gpu;
    ops.graph_launch = count_launch;
    return ops;
}

static mt_ops plain_ops(void) {
    mt_ops ops = *gpu;
    ops.graph_begin = NULL;
    return ops;
}

static mt_run_options read_options(int count, char **arguments) {
    mt_run_options options;
    mt_error error = {{0}};
    if (mt_options_parse(&options, MT_PROGRAM_INFER, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_INFER, 1, &error) != 0)
        fail_msg("%s", error.text);
    return options;
}

/* A family in fp32, or in the type of two bytes that the GPU multiplies. */
static mt_run_options read_family(int family, bool in_half) {
    char folder[256];
    snprintf(folder, sizeof folder, "tests/golden/hf/%s", families[family]);
    char *arguments[] = {"infer", "--load", folder, "--max-new-tokens", "24", half == MT_F16 ? "--fp16" : "--bf16"};
    return read_options(in_half ? 6 : 5, arguments);
}

static mt_model *create_model(const mt_run_options *options, const mt_ops *ops, const mt_model_plan *plan) {
    mt_model *model;
    mt_error error = {{0}};
    mt_run_state state = {0};
    if (mt_model_create(&model, &options->stack, &mt_grid_of_one, ops, plan, &error) != 0 ||
        mt_checkpoint_load(model, options, &state, options->load, &error) != 0)
        fail_msg("%s", error.text);
    return model;
}

/* One pass that adds counts[s] tokens to each of the first n sequences, which hold `held` already. */
static void decode_pass(mt_model *model, mt_batch *batch, int64_t n, int64_t *held, const int64_t *counts,
                        float *logits) {
    int32_t cache_rows[CONTEXT], rows[SEQUENCES];
    int64_t V = mt_model_options(model)->vocab_size;
    batch->num_tokens = 0, batch->num_spans = n;
    for (int64_t s = 0; s < n; s++) {
        int64_t start = batch->num_tokens;
        for (int64_t i = 0; i < counts[s]; i++) {
            int64_t t = start + i, position = held[s] + i;
            batch->tokens[t] = (int32_t)((position * 37 + s * 11 + 5) % V);
            batch->positions[t] = (int32_t)position;
            cache_rows[t] = (int32_t)(s * CONTEXT + position);
        }
        held[s] += counts[s];
        batch->num_tokens += counts[s];
        batch->spans[s] = (mt_span){start, counts[s], s * CONTEXT, held[s], true};
        rows[s] = (int32_t)batch->num_tokens - 1;
    }
    mt_model_decode(model, batch, cache_rows, rows, n, logits);
}

/* When adapters are switched off: in two steps of each half, NUM_OFF in all. */
typedef enum switching { NEVER_OFF, OFF_BETWEEN, ALWAYS_OFF } switching;
enum { NUM_OFF = 4 };

static bool is_off(switching off, int step) {
    return off == ALWAYS_OFF || (off == OFF_BETWEEN && step >= 0 && step % HALF >= 2 && step % HALF < 4);
}

/* Logits of three prompts, of HALF steps of the three sequences, and of as many of two of them; to free. */
static float *decode_switched(const mt_run_options *options, const mt_ops *ops, switching off, int64_t *count) {
    const int64_t prompts[SEQUENCES] = {3, 1, 9}, one[SEQUENCES] = {1, 1, 1};
    mt_model_plan plan = {
        .max_tokens = CONTEXT, .max_logits = SEQUENCES, .cache_rows = SEQUENCES * CONTEXT, .max_position = CONTEXT};
    mt_model *model = create_model(options, ops, &plan);
    mt_batch batch;
    mt_batch_alloc(&batch, CONTEXT);
    int64_t held[SEQUENCES] = {0}, V = options->stack.vocab_size;
    float *logits = mt_malloc((STEPS + 1) * SEQUENCES * V * 4), *to = logits;
    for (int step = -1; step < STEPS; step++) {
        int64_t n = step < HALF ? SEQUENCES : SEQUENCES - 1;
        mt_model_use_adapters(model, !is_off(off, step));
        decode_pass(model, &batch, n, held, step < 0 ? prompts : one, to);
        to += n * V;
    }
    *count = to - logits;
    mt_batch_free(&batch);
    mt_model_destroy(model);
    return logits;
}

static float *decode_logits(const mt_run_options *options, const mt_ops *ops, int64_t *count) {
    return decode_switched(options, ops, NEVER_OFF, count);
}

/* False for a family that this GPU refuses, such as gated delta nets with 64 KiB of shared memory a block. */
static bool takes_family(const mt_run_options *options) {
    mt_error error = {{0}};
    if (mt_options_check_limits(&options->stack, &gpu->limits, &error) == 0) return true;
    print_message("left out: %s: %s\n", options->load, error.text);
    return false;
}

/* Distance of logits from others, relative to their norm. */
static double distance(const float *logits, const float *from, int64_t count) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        double difference = (double)logits[i] - (double)from[i];
        error += difference * difference, size += (double)from[i] * (double)from[i];
    }
    return sqrt(error / size);
}

static void assert_near(const char *family, const float *logits, const float *answer, int64_t count) {
    double off = distance(logits, answer, count);
    if (!(off <= 1e-5)) fail_msg("%s: logits are off by %.3g of their norm", family, off);
}

static void steps_in_graphs_have_the_bits_of_plain_steps_and_the_logits_of_the_cpu(void **state) {
    (void)state;
    if (!gpu) skip();
    const mt_ops counted = counted_ops(), plain = plain_ops();
    for (int k = 0; k < NUM_FAMILIES; k++)
        for (int in_half = 0; in_half < 2; in_half++) {
            mt_run_options options = read_family(k, in_half);
            if (!takes_family(&options)) {
                mt_options_free(&options);
                continue;
            }
            int64_t count, again, sizes = 2; // numbers of sequences, whose first steps take no graph with states
            int64_t wanted = is_linear_family(families[k]) ? STEPS - sizes : STEPS;
            launches = 0;
            mt_cuda_decode_fuse(false);
            float *in_graphs = decode_logits(&options, &counted, &count);
            assert_int_equal(launches, wanted);
            float *one_by_one = decode_logits(&options, &plain, &again);
            assert_int_equal(launches, wanted);
            assert_int_equal(count, again);
            assert_memory_equal(in_graphs, one_by_one, (size_t)count * 4);
            mt_cuda_decode_fuse(true);
            if (!in_half) {
                float *answer = decode_logits(&options, &mt_cpu_ops, &again);
                assert_near(families[k], in_graphs, answer, count);
                free(answer);
            }
            free(in_graphs), free(one_by_one);
            mt_options_free(&options);
        }
}

/* A loop over experts needs to know on the host how many rows each has, which a graph cannot wait for. */
static void experts_one_by_one_take_no_graph(void **state) {
    (void)state;
    if (!gpu) skip();
    const mt_ops counted = counted_ops();
    mt_run_options options = read_family(5, false);
    int64_t count, again;
    assert_string_equal(families[5], "mixtral");
    float *grouped = decode_logits(&options, gpu, &count);
    options.stack.moe_grouped_gemm = false;
    launches = 0;
    float *looped = decode_logits(&options, &counted, &again);
    assert_int_equal(launches, 0);
    assert_int_equal(count, again);
    assert_near("mixtral", looped, grouped, count);
    free(grouped), free(looped);
    mt_options_free(&options);
}

/* A graph keeps the adapters that it was captured with. */
static void steps_without_adapters_take_no_graph(void **state) {
    (void)state;
    if (!gpu) skip();
    const mt_ops counted = counted_ops(), plain = plain_ops();
    char *arguments[] = {"infer", "--load", "tests/golden/hf/llama", "--load-adapter", "tests/golden/tune/lora"};
    mt_run_options options = read_options(5, arguments), base = read_options(3, arguments);
    int64_t count, again;
    launches = 0;
    float *in_graphs = decode_switched(&options, &counted, OFF_BETWEEN, &count);
    assert_int_equal(launches, STEPS - NUM_OFF);
    float *one_by_one = decode_switched(&options, &plain, OFF_BETWEEN, &again);
    float *answer = decode_switched(&options, &mt_cpu_ops, OFF_BETWEEN, &again);
    float *adapted = decode_logits(&options, &plain, &again);
    assert_memory_equal(in_graphs, one_by_one, (size_t)count * 4);
    assert_near("llama", in_graphs, answer, count);
    assert_memory_not_equal(in_graphs, adapted, (size_t)count * 4);
    float *off = decode_switched(&options, &plain, ALWAYS_OFF, &again), *bare = decode_logits(&base, &plain, &again);
    assert_int_equal(count, again);
    assert_memory_equal(off, bare, (size_t)count * 4);
    free(in_graphs), free(one_by_one), free(answer), free(adapted), free(off), free(bare);
    mt_options_free(&options), mt_options_free(&base);
}

/* ==== one kernel for the layers of a step ======================================================================== */

/* True if all layers are dense, with norms before them and attention over all that came before. */
static bool is_dense(const char *family) {
    static const char *const dense[] = {"gpt2", "llama", "llama3_rope_tied", "qwen2", "qwen3", "seed_oss"};
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++)
        if (strcmp(family, dense[i]) == 0) return true;
    return false;
}

/* In bf16 the one kernel's sums have another order than those of the separate kernels, so that roundings differ: its
 * logits are as near to fp32. Other models have the bits of the separate kernels. */
static void one_kernel_serves_dense_models_and_no_others(void **state) {
    (void)state;
    if (!gpu_has_bf16()) skip();
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_run_options options = read_family(k, true), exact = read_family(k, false);
        int64_t count, before = mt_cuda_decode_fused();
        float *answer = decode_logits(&exact, gpu, &count);
        assert_int_equal(mt_cuda_decode_fused() - before, 0); // in fp32
        float *fused = decode_logits(&options, gpu, &count), *again = decode_logits(&options, gpu, &count);
        int64_t steps = mt_cuda_decode_fused() - before, wanted = is_dense(families[k]) ? 4 : 0; // of three, two, twice
        if (steps != wanted) fail_msg("%s: %" PRId64 " steps in one kernel, not %" PRId64, families[k], steps, wanted);
        assert_memory_equal(fused, again, (size_t)count * 4);
        mt_cuda_decode_fuse(false);
        float *separate = decode_logits(&options, gpu, &count);
        mt_cuda_decode_fuse(true);
        double error = distance(fused, answer, count), usual = distance(separate, answer, count);
        if (!is_dense(families[k])) assert_memory_equal(fused, separate, (size_t)count * 4);
        if (!(error <= 1.5 * usual)) fail_msg("%s: logits are off by %.3g, usually %.3g", families[k], error, usual);
        free(answer), free(fused), free(again), free(separate);
        mt_options_free(&options), mt_options_free(&exact);
    }
}

enum { PAGED_STEPS = 24, PAGE = 16, PAGED_CONTEXT = 640, LONG_CONTEXT = 1200, MAX_WORDS = 8, MAX_TEXTS = 20 };

/* A model of a shape in data/configs with random weights, and texts with prompts of these lengths, 0 like 1; the last
 * text ends after half of the steps. */
typedef struct paged_case {
    char *config, *layers;
    int64_t texts, prompts[MAX_TEXTS];
    char *words[MAX_WORDS]; // options that differ from the shape's, up to NULL
    bool in_clusters;       // decode_cluster.cu must serve it on a Hopper GPU; it may serve others of one text
} paged_case;

/* Tokens that a text of the case has room for; more than 64 pages if its prompt is long. */
static int64_t context_of(const paged_case *c) {
    return c->prompts[0] > PAGED_CONTEXT - PAGED_STEPS ? LONG_CONTEXT : PAGED_CONTEXT;
}

/* One pass over a cache in pages, whose table is in reverse order: counts[s] new tokens of each of n texts. */
static void paged_pass(mt_model *model, mt_batch *batch, const paged_case *c, int64_t n, int64_t *held,
                       const int64_t *counts, float *logits) {
    const int64_t each = context_of(c) / PAGE;
    int32_t cache_rows[LONG_CONTEXT], rows[MAX_TEXTS], table[MAX_TEXTS * LONG_CONTEXT / PAGE + 1] = {0};
    for (int64_t i = 0; i < c->texts * each; i++) table[i] = (int32_t)(c->texts * each - 1 - i);
    batch->num_tokens = 0, batch->num_spans = n, batch->pages = table;
    for (int64_t s = 0; s < n; s++) {
        int64_t start = batch->num_tokens;
        for (int64_t i = 0; i < counts[s]; i++) {
            int64_t t = start + i, position = held[s] + i, row = s * each * PAGE + position;
            batch->tokens[t] = (int32_t)((position * 37 + s * 11 + 5) % mt_model_options(model)->vocab_size);
            batch->positions[t] = (int32_t)position;
            cache_rows[t] = table[row / PAGE] * PAGE + (int32_t)(row % PAGE);
        }
        held[s] += counts[s], batch->num_tokens += counts[s];
        batch->spans[s] = (mt_span){start, counts[s], s * each * PAGE, held[s], true};
        rows[s] = (int32_t)batch->num_tokens - 1;
    }
    mt_model_decode(model, batch, cache_rows, rows, n, logits);
    batch->pages = NULL;
}

/* The logits of all steps, to free. */
static float *paged_logits(const mt_options *options, const mt_ops *ops, const paged_case *c, int64_t *count) {
    const int64_t context = context_of(c);
    int64_t one[MAX_TEXTS], prompts[MAX_TEXTS];
    for (int s = 0; s < MAX_TEXTS; s++) one[s] = 1, prompts[s] = c->prompts[s] > 0 ? c->prompts[s] : 1;
    mt_model_plan plan = {.max_tokens = context,
                          .max_logits = c->texts,
                          .cache_rows = c->texts * context,
                          .page_rows = PAGE,
                          .cache_sequences = c->texts,
                          .max_position = context};
    mt_model *model;
    mt_error error = {{0}};
    if (mt_model_create(&model, options, &mt_grid_of_one, ops, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_model_init(model);
    mt_batch batch;
    mt_batch_alloc(&batch, context);
    int64_t held[MAX_TEXTS] = {0}, V = options->vocab_size;
    float *logits = mt_malloc((PAGED_STEPS + 1) * c->texts * V * 4), *to = logits;
    for (int step = -1; step < PAGED_STEPS; step++) {
        int64_t n = step >= PAGED_STEPS / 2 && c->texts > 1 ? c->texts - 1 : c->texts;
        paged_pass(model, &batch, c, n, held, step < 0 ? prompts : one, to);
        to += n * V;
    }
    *count = to - logits;
    mt_batch_free(&batch);
    mt_model_destroy(model);
    return logits;
}

static const paged_case paged_cases[] = {
    {"data/configs/gpt2-124m.json", "3", 1, {1}, {NULL}, true},
    {"data/configs/gpt2-124m.json", "2", 1, {600}, {NULL}, true},
    {"data/configs/gpt2-124m.json", "2", 1, {110}, {NULL}, true}, // one and several parts of keys
    {"data/configs/gpt2-124m.json", "2", 1, {110}, {"--window-size", "37"}, true},
    {"data/configs/gpt2-355m.json", "2", 1, {30}, {NULL}, false},
    {"data/configs/gpt2-124m.json", "2", 1, {60}, {"--openai-gelu=false"}, true},
    {"data/configs/gpt2-124m.json", "2", 1, {60}, {"--openai-gelu=false", "--squared-relu"}, true},
    {"data/configs/llama2c-110m.json", "2", 1, {60}, {"--swiglu=false", "--squared-relu"}, false},
    {"data/configs/qwen3-0.6b.json", // more than 64 pages
     "2",
     1,
     {1100},
     {"--hidden-size", "512", "--num-attention-heads", "8", "--num-query-groups", "4"},
     false},
    {"data/configs/llama2c-110m.json", "2", 1, {500}, {"--window-size", "200"}, false},
    {"data/configs/llama2c-110m.json", "2", 1, {60}, {"--rotary-interleaved"}, false},
    {"data/configs/llama2c-110m.json", "2", 1, {60}, {"--rotary-percent", "0.5"}, false},
    {"data/configs/llama2c-110m.json", "2", 1, {60}, {"--rotary-percent", "0.5", "--rotary-interleaved"}, false},
    {"data/configs/llama2c-110m.json", "2", 1, {60}, {"--ffn-hidden-size", "512"}, false},
    {"data/configs/llama2c-110m.json", "2", 1, {9}, {"--num-query-groups", "4"}, false},
    {"data/configs/qwen3-0.6b.json",
     "2",
     1,
     {50},
     {"--hidden-size", "512", "--num-attention-heads", "8", "--num-query-groups", "4"},
     false},
    {"data/configs/qwen3-0.6b.json",
     "2",
     1,
     {70},
     {"--hidden-size", "704", "--num-attention-heads", "12", "--num-query-groups", "2"},
     false},
    {"data/configs/gpt2-124m.json", "2", 4, {15, 100, 16, 300}, {NULL}, false},
    {"data/configs/gpt2-124m.json", "2", 5, {15, 100, 16, 300, 3}, {NULL}, false},
    {"data/configs/tiny-llama.json", "6", 2, {63, 64}, {NULL}, false},
    {"data/configs/qwen3-0.6b.json", "2", 3, {127, 1, 250}, {NULL}, false},
    {"data/configs/llama3-8b.json", "2", 1, {70}, {"--hidden-size", "2048", "--num-attention-heads", "16"}, false},
    {"data/configs/llama3-8b.json", "2", 2, {70, 9}, {"--hidden-size", "2048", "--num-attention-heads", "16"}, false},
    {"data/configs/llama3-8b.json", "2", 1, {70}, {NULL}, false},
    {"data/configs/llama3-8b.json", "2", 2, {40, 500}, {NULL}, false},
    {"data/configs/llama3-8b.json", "2", 4, {31, 9, 200, 300}, {NULL}, false},
    {"data/configs/llama3-8b.json", "2", 9, {31, 9, 200}, {NULL}, false},
    {"data/configs/llama3-8b.json", "2", 20, {31, 9, 200, 300}, {NULL}, false},
    {"data/configs/qwen3-8b.json", "2", 2, {40, 50}, {NULL}, false},
    {"data/configs/gpt2-124m.json", // LayerNorm, biases and GELU
     "2",
     3,
     {40, 50},
     {"--hidden-size", "3072", "--num-attention-heads", "24", "--ffn-hidden-size", "12288"},
     false}};

static void one_kernel_is_near_separate_kernels_over_pages(void **state) {
    (void)state;
    if (!gpu_has_bf16()) skip();
    const mt_ops plain = plain_ops();
    for (size_t i = 0; i < sizeof paged_cases / sizeof *paged_cases; i++) {
        const paged_case *c = &paged_cases[i];
        char *arguments[19 + MAX_WORDS] = {
            "train",       "--hf-config",         c->config, "--num-layers", c->layers, "--bf16",
            "--mock-data", "--train-iters",       "1",       "--lr",         "1e-3",    "--micro-batch-size",
            "1",           "--global-batch-size", "1",       "--seq-length", "64",      "--vocab-size",
            "1024"};
        int words = 0;
        for (; words < MAX_WORDS && c->words[words]; words++) arguments[19 + words] = c->words[words];
        mt_run_options options;
        mt_error error = {{0}};
        int64_t count, before = mt_cuda_decode_fused(), before_in_clusters = mt_cuda_decode_in_clusters();
        if (mt_options_parse(&options, MT_PROGRAM_TRAIN, 19 + words, arguments, &error) != 0 ||
            mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
            fail_msg("%s", error.text);
        float *fused = paged_logits(&options.stack, gpu, c, &count),
              *again = paged_logits(&options.stack, gpu, c, &count);
        int64_t most = mt_decode_most_rows(options.stack.hidden_size);
        int64_t graphs = (c->texts <= most) + (c->texts > 1 && c->texts - 1 <= most); // of each number of texts
        // Two rows of a wide model need more shared memory than some other GPUs have.
        bool may_not_fit = mt_cuda_kernel_arch() != 90 && options.stack.hidden_size >= 3072 && c->texts > 1;
        if (!may_not_fit) assert_int_equal(mt_cuda_decode_fused() - before, 2 * graphs);
        int64_t in_clusters = mt_cuda_decode_in_clusters() - before_in_clusters;
        if (c->texts > 1) assert_int_equal(in_clusters, 0);
        if (c->in_clusters && mt_cuda_kernel_arch() == 90) assert_int_equal(in_clusters, 2 * graphs);
        assert_memory_equal(fused, again, (size_t)count * 4);
        mt_cuda_decode_fuse(false);
        float *separate = paged_logits(&options.stack, gpu, c, &count);
        mt_cuda_decode_fuse(true);
        double error_of = distance(fused, separate, count);
        if (!(error_of <= 2e-2)) fail_msg("%s, %d texts: logits are off by %.3g", c->config, (int)c->texts, error_of);
        if (most == 0) { // products read weights ahead in graphs only
            float *one_by_one = paged_logits(&options.stack, &plain, c, &count);
            assert_memory_equal(separate, one_by_one, (size_t)count * 4);
            free(one_by_one);
        }
        free(fused), free(again), free(separate);
        mt_options_free(&options);
    }
}

/* Sequences of unequal prompts that end at different steps; sequence 0 continues the family's golden text. */
static void generate(const mt_run_options *options, const mt_ops *ops, const mt_sampling *sampling,
                     const int32_t *golden, int64_t count, mt_sequence *sequences) {
    const mt_stops stops = {.count = 0};
    mt_error error = {{0}};
    for (int64_t s = 0; s < count; s++) {
        int32_t prompt[CONTEXT];
        for (int64_t i = 0; i < 8 + 3 * s; i++)
            prompt[i] = s == 0 ? golden[i] : (int32_t)((i * 31 + 7 * s) % options->stack.vocab_size);
        if (mt_sequence_begin(&sequences[s], s, prompt, 8 + 3 * s, CONTEXT, options->max_new_tokens, &options->stack,
                              &error) != 0)
            fail_msg("%s", error.text);
        sequences[s].max_tokens -= 5 * s;
    }
    mt_model_plan plan = mt_generator_plan(count, CONTEXT, 16); // prompts in pieces
    mt_model *model = create_model(options, ops, &plan);
    mt_generator *generator = mt_generator_create(model, sampling, &stops);
    int64_t unfinished = count;
    while (unfinished > 0) {
        unfinished = mt_generator_step(generator, sequences, count, &error);
        if (unfinished < 0) fail_msg("%s", error.text);
    }
    mt_generator_destroy(generator);
    mt_model_destroy(model);
}

static void generated_tokens_are_those_of_plain_steps_and_of_transformers(void **state) {
    (void)state;
    if (!gpu) skip();
    const mt_ops counted = counted_ops(), plain = plain_ops();
    const mt_sampling samplings[] = {{.temperature = 0, .top_p = 1},
                                     {.temperature = 0.8, .top_p = 0.95, .top_k = 40, .seed = 3}};
    for (int k = 0; k < NUM_FAMILIES; k++)
        for (int drawn = 0; drawn < 2; drawn++) {
            mt_run_options options = read_family(k, false);
            if (!takes_family(&options)) {
                mt_options_free(&options);
                continue;
            }
            mt_sequence a[SEQUENCES], b[SEQUENCES];
            char path[512];
            snprintf(path, sizeof path, "%s/expected.json", options.load);
            json_t *root = json_load_file(path, 0, NULL), *item;
            int32_t golden[CONTEXT];
            size_t i;
            json_array_foreach(json_object_get(root, "greedy_ids"), i, item) golden[i] =
                (int32_t)json_integer_value(item);
            launches = 0;
            generate(&options, &counted, &samplings[drawn], golden, SEQUENCES, a);
            assert_in_range(launches, 10, 24);
            generate(&options, &plain, &samplings[drawn], golden, SEQUENCES, b);
            for (int64_t s = 0; s < SEQUENCES; s++) {
                assert_int_equal(a[s].num_tokens, b[s].num_tokens);
                assert_memory_equal(a[s].tokens, b[s].tokens, (size_t)a[s].num_tokens * 4);
            }
            for (int64_t t = 0; !drawn && !has_equal_scores(families[k]) && t < 32; t++)
                if (a[0].tokens[t] != golden[t])
                    fail_msg("%s: token %lld is %d, not transformers' %d", families[k], (long long)t, a[0].tokens[t],
                             golden[t]);
            for (int64_t s = 0; s < SEQUENCES; s++) mt_sequence_end(&a[s]), mt_sequence_end(&b[s]);
            json_decref(root);
            mt_options_free(&options);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_queries_match_float64),
        cmocka_unit_test(every_head_size_matches_float64),
        cmocka_unit_test(values_narrower_or_wider_than_keys_match_float64),
        cmocka_unit_test(windows_match_float64),
        cmocka_unit_test(keys_in_pages_give_the_bits_of_keys_in_order),
        cmocka_unit_test(batches_of_sequences_match_float64),
        cmocka_unit_test(a_sequence_has_the_same_bits_beside_any_others),
        cmocka_unit_test(what_decoding_does_not_ask_for_is_left_to_other_rungs),
        cmocka_unit_test(linear_layers_of_few_rows_match_float64_and_do_not_mix_rows),
        cmocka_unit_test(linear_layers_of_up_to_32_rows_match_float64_and_repeat),
        cmocka_unit_test(samples_are_those_of_the_cpu),
        cmocka_unit_test(steps_in_graphs_have_the_bits_of_plain_steps_and_the_logits_of_the_cpu),
        cmocka_unit_test(one_kernel_serves_dense_models_and_no_others),
        cmocka_unit_test(one_kernel_is_near_separate_kernels_over_pages),
        cmocka_unit_test(experts_one_by_one_take_no_graph),
        cmocka_unit_test(steps_without_adapters_take_no_graph),
        cmocka_unit_test(generated_tokens_are_those_of_plain_steps_and_of_transformers),
    };
    return cmocka_run_group_tests(tests, open_all, close_gpu);
}
#endif
