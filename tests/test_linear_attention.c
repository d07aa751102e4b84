/* The kernels of linear attention against their definitions, token by token in float64. */
// Sections of megatron.c: §3f §17 §17a §18 §18a
#include "megatron.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const mt_ops *const ops = &mt_cpu_ops;

/* The same numbers everywhere. */
static double uniform(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) / 9007199254740992.0 * 2 - 1;
}

enum { MAX_OPERANDS = 8 };

/* Operands of an operation in float64, all in one array, and their gradients. */
typedef struct operands {
    int64_t counts[MAX_OPERANDS], starts[MAX_OPERANDS], total;
    int num;
    double *values;
} operands;

static operands operands_new(int num, const int64_t *counts) {
    operands o = {.num = num};
    for (int i = 0; i < num; i++) o.counts[i] = counts[i], o.starts[i] = o.total, o.total += counts[i];
    o.values = calloc((size_t)o.total, sizeof *o.values);
    for (int64_t i = 0; i < o.total; i++) o.values[i] = (double)(float)uniform();
    return o;
}

static double *part(const operands *o, int i) {
    return o->values + o->starts[i];
}

/* out[count] of the operands, by definition. */
typedef void definition(const void *shape, const operands *o, double *out);

static double weighted(definition *define, const void *shape, const operands *o, const double *weights, int64_t count,
                       double *out) {
    double sum = 0;
    define(shape, o, out);
    for (int64_t i = 0; i < count; i++) sum += weights[i] * out[i];
    return sum;
}

/* got, the gradients of all operands, against central differences of sum(weights out); every `step`th element. */
static void expect_gradients(definition *define, const void *shape, operands *o, const double *weights, int64_t count,
                             const float *got, int64_t step) {
    double *out = calloc((size_t)count, sizeof *out);
    const double h = 1e-5;
    for (int i = 0; i < o->num; i++) {
        double largest = 0;
        for (int64_t k = 0; k < o->counts[i]; k++) largest = fmax(largest, fabs((double)got[o->starts[i] + k]));
        assert_true(largest > 0);
        for (int64_t k = 0; k<o->counts[i]; k += o->counts[i]> 100 ? step : 1) {
            double *value = &part(o, i)[k], before = *value;
            *value = before + h;
            double above = weighted(define, shape, o, weights, count, out);
            *value = before - h;
            double below = weighted(define, shape, o, weights, count, out);
            *value = before;
            double wanted = (above - below) / (2 * h), actual = (double)got[o->starts[i] + k];
            if (!(fabs(wanted - actual) <= 1e-4 * largest))
                fail_msg("operand %d, element %lld: gradient %g, wanted %g", i, (long long)k, actual, wanted);
        }
    }
    free(out);
}

static void expect_equal(const float *actual, const double *wanted, int64_t count, double most) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(wanted[i]));
    for (int64_t i = 0; i < count; i++)
        if (!(fabs((double)actual[i] - wanted[i]) <= most * largest))
            fail_msg("element %lld: %g, wanted %g", (long long)i, (double)actual[i], wanted[i]);
}

static float *floats_of(const double *values, int64_t count) {
    float *floats = calloc((size_t)count, sizeof *floats);
    for (int64_t i = 0; i < count; i++) floats[i] = (float)values[i];
    return floats;
}

/* Values rounded to bf16, and back. */
static uint16_t *bf16_of(float *values, int64_t count) {
    uint16_t *bits = calloc((size_t)count, sizeof *bits);
    ops->convert(bits, MT_BF16, values, MT_F32, count, NULL);
    ops->convert(values, MT_F32, bits, MT_BF16, count, NULL);
    return bits;
}

/* ---- the gated delta rule. Operands: q, k, v, b, a, A_log, dt_bias. Tokens beyond the spans do not exist. */

typedef struct delta_shape {
    int64_t T, Hk, Hv, Dk, Dv, decays;
    int num_spans;
    mt_span spans[4];
} delta_shape;

static const delta_shape delta_shapes[] = {
    {7, 1, 1, 4, 4, 1, 1, {{0, 7, 0, 7, true}}},
    {150, 2, 4, 8, 6, 1, 3, {{0, 65, 0, 65, true}, {65, 1, 65, 1, true}, {66, 84, 66, 84, true}}},
    {64, 3, 3, 5, 16, 1, 1, {{0, 64, 0, 64, true}}},
    {131, 1, 4, 16, 8, 1, 2, {{0, 128, 0, 128, true}, {128, 3, 128, 3, true}}},
    {150, 2, 2, 8, 6, 8, 3, {{0, 65, 0, 65, true}, {65, 1, 65, 1, true}, {66, 84, 66, 84, true}}},
    {20, 3, 3, 16, 4, 16, 1, {{0, 20, 0, 20, true}}},
};
enum { NUM_DELTA_SHAPES = sizeof delta_shapes / sizeof *delta_shapes };

static operands delta_operands(const delta_shape *s) {
    int64_t keys = s->T * s->Hk * s->Dk, gates = s->T * s->Hv;
    operands o = operands_new(
        7, (int64_t[]){keys, keys, s->T * s->Hv * s->Dv, gates, gates * s->decays, s->Hv, s->Hv * s->decays});
    for (int64_t i = 0; i < s->Hv; i++) part(&o, 5)[i] = (double)(float)(part(&o, 5)[i] - 1); // slow and fast decays
    return o;
}

static void unit(double *to, const double *x, int64_t n, double scale) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (int64_t i = 0; i < n; i++) to[i] = x[i] / sqrt(sum + 1e-6) * scale;
}

static void delta_definition(const void *shape, const operands *o, double *out) {
    const delta_shape *s = shape;
    double S[16 * 16], q[16], k[16];
    for (const mt_span *span = s->spans; span < s->spans + s->num_spans; span++)
        for (int64_t h = 0; h < s->Hv; h++) {
            int64_t key_head = h / (s->Hv / s->Hk);
            memset(S, 0, sizeof S);
            for (int64_t t = span->q_start; t < span->q_start + span->q_len; t++) {
                double beta = 1 / (1 + exp(-part(o, 3)[t * s->Hv + h])), decay[16];
                for (int64_t i = 0; i < s->Dk; i++) {
                    int64_t channel = h * s->decays + i % s->decays;
                    double a = part(o, 4)[t * s->Hv * s->decays + channel] + part(o, 6)[channel];
                    decay[i] = exp(-exp(part(o, 5)[h]) * log1p(exp(a)));
                }
                const double *v = part(o, 2) + (t * s->Hv + h) * s->Dv;
                unit(q, part(o, 0) + (t * s->Hk + key_head) * s->Dk, s->Dk, 1 / sqrt((double)s->Dk));
                unit(k, part(o, 1) + (t * s->Hk + key_head) * s->Dk, s->Dk, 1);
                for (int64_t j = 0; j < s->Dv; j++) {
                    double read = 0, result = 0;
                    for (int64_t i = 0; i < s->Dk; i++) read += (S[i * 16 + j] *= decay[i]) * k[i];
                    for (int64_t i = 0; i < s->Dk; i++) S[i * 16 + j] += k[i] * beta * (v[j] - read);
                    for (int64_t i = 0; i < s->Dk; i++) result += S[i * 16 + j] * q[i];
                    out[(t * s->Hv + h) * s->Dv + j] = result;
                }
            }
        }
}

/* The operation's operands and gradients at `in` and `gradients`, in the order of `o`. */
static mt_delta_args delta_args(const delta_shape *s, const mt_spans *spans, const operands *o, mt_dtype dtype,
                                const void *in, void *gradients, float *dA_log, float *ddt_bias) {
    int64_t size = mt_dtype_size(dtype);
    mt_delta_args a = {.spans = spans, .Hk = s->Hk, .Hv = s->Hv, .Dk = s->Dk, .Dv = s->Dv};
#define IN(i)  ((const char *)in + o->starts[i] * size)
#define OUT(i) ((char *)gradients + o->starts[i] * size)
    a.q = IN(0), a.k = IN(1), a.v = IN(2), a.b = IN(3), a.a = IN(4), a.A_log = IN(5), a.dt_bias = IN(6);
    if (gradients) a.dq = OUT(0), a.dk = OUT(1), a.dv = OUT(2), a.db = OUT(3), a.da = OUT(4);
#undef IN
#undef OUT
    a.q_stride = a.k_stride = a.dq_stride = a.dk_stride = s->Hk * s->Dk, a.v_stride = a.dv_stride = s->Hv * s->Dv;
    a.decays = s->decays, a.b_stride = a.db_stride = s->Hv, a.a_stride = a.da_stride = s->Hv * s->decays,
    a.dA_log = dA_log, a.ddt_bias = ddt_bias;
    return a;
}

static void the_delta_rule_equals_its_recurrence_in_float64(void **state) {
    (void)state;
    for (int n = 0; n < NUM_DELTA_SHAPES; n++) {
        const delta_shape *s = &delta_shapes[n];
        const mt_spans spans = {s->spans, s->spans, s->num_spans};
        operands o = delta_operands(s);
        int64_t count = s->T * s->Hv * s->Dv;
        float *in = floats_of(o.values, o.total), *gradients = calloc((size_t)o.total, sizeof *gradients);
        float *out = calloc((size_t)count, sizeof *out);
        double *wanted = calloc((size_t)count, sizeof *wanted), *weights = calloc((size_t)count, sizeof *weights);
        for (int64_t i = 0; i < count; i++) weights[i] = (double)(float)uniform();
        float *dout = floats_of(weights, count);
        mt_delta_args a =
            delta_args(s, &spans, &o, MT_F32, in, gradients, gradients + o.starts[5], gradients + o.starts[6]);
        a.out = out, a.dout = dout;
        ops->delta_rule_forward(&a, MT_F32, NULL);
        delta_definition(s, &o, wanted);
        expect_equal(out, wanted, count, 1e-5);
        ops->delta_rule_backward(&a, MT_F32, NULL);
        expect_gradients(delta_definition, s, &o, weights, count, gradients, 37);
        free(in), free(gradients), free(out), free(wanted), free(weights), free(dout), free(o.values);
    }
}

/* bf16 operands: as fp32 of the same values, rounded once. */
static void the_delta_rule_rounds_its_results_once(void **state) {
    (void)state;
    const delta_shape *s = &delta_shapes[1];
    const mt_spans spans = {s->spans, s->spans, s->num_spans};
    operands o = delta_operands(s);
    int64_t count = s->T * s->Hv * s->Dv, trained = o.starts[5];
    float *in = floats_of(o.values, o.total), *gradients = calloc((size_t)o.total, sizeof *gradients);
    float *out = calloc((size_t)count, sizeof *out), *dout = floats_of(o.values, count), vectors[2][2][4] = {{{0}}};
    uint16_t *in_bits = bf16_of(in, o.total), *dout_bits = bf16_of(dout, count);
    uint16_t *gradient_bits = calloc((size_t)o.total, 2), *out_bits = calloc((size_t)count, 2);
    mt_delta_args a = delta_args(s, &spans, &o, MT_F32, in, gradients, vectors[0][0], vectors[0][1]);
    a.out = out, a.dout = dout;
    ops->delta_rule_forward(&a, MT_F32, NULL), ops->delta_rule_backward(&a, MT_F32, NULL);
    mt_delta_args b = delta_args(s, &spans, &o, MT_BF16, in_bits, gradient_bits, vectors[1][0], vectors[1][1]);
    b.out = out_bits, b.dout = dout_bits;
    ops->delta_rule_forward(&b, MT_BF16, NULL), ops->delta_rule_backward(&b, MT_BF16, NULL);
    uint16_t *wanted = calloc((size_t)o.total, 2);
    ops->convert(wanted, MT_BF16, out, MT_F32, count, NULL);
    assert_memory_equal(wanted, out_bits, (size_t)count * 2);
    ops->convert(wanted, MT_BF16, gradients, MT_F32, trained, NULL);
    assert_memory_equal(wanted, gradient_bits, (size_t)trained * 2);
    assert_memory_equal(vectors[0], vectors[1], sizeof vectors[0]);
    free(in), free(gradients), free(out), free(dout), free(in_bits), free(dout_bits), free(gradient_bits);
    free(out_bits), free(wanted), free(o.values);
}

/* A span read in pieces, whose state waits in a slot between them. */
static void a_state_continues_a_text(void **state) {
    (void)state;
    enum { T = 100, SLOTS = 3 };
    static const int64_t ends[] = {1, 2, 66, 70, T};
    const delta_shape s = {T, 2, 4, 8, 6, 1, 1, {{0, T, 0, T, true}}};
    const mt_spans spans = {s.spans, s.spans, 1};
    operands o = delta_operands(&s);
    int64_t row = s.Hv * s.Dv, conv_width = 9;
    float *in = floats_of(o.values, o.total), whole[T * 4 * 6], pieces[T * 4 * 6], memory[SLOTS * 4 * 8 * 6];
    float conv_whole[T * 9], conv_pieces[T * 9], conv_memory[SLOTS * 3 * 9];
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) memory[i] = NAN; // of another text
    for (size_t i = 0; i < sizeof conv_memory / sizeof *conv_memory; i++) conv_memory[i] = NAN;
    mt_delta_args a = delta_args(&s, &spans, &o, MT_F32, in, NULL, NULL, NULL);
    mt_conv_args c = {.spans = &spans, .C = conv_width, .K = 4, .x = in, .w = in + o.starts[2], .silu = true};
    c.x_stride = c.y_stride = conv_width, c.y = conv_whole, a.out = whole;
    ops->delta_rule_forward(&a, MT_F32, NULL), ops->short_conv_forward(&c, MT_F32, NULL);
    a.out = pieces, a.states = (mt_states){.memory = memory, .slot_rows = T, .slots = SLOTS}, c.y = conv_pieces,
    c.states = (mt_states){.memory = conv_memory, .slot_rows = T, .slots = SLOTS};
    for (int i = 0; i < 5; i++) {
        int64_t begin = i > 0 ? ends[i - 1] : 0;
        const mt_span span = {begin, ends[i] - begin, T, ends[i], true};
        const mt_spans piece = {&span, &span, 1};
        a.spans = c.spans = &piece;
        ops->delta_rule_forward(&a, MT_F32, NULL), ops->short_conv_forward(&c, MT_F32, NULL);
    }
    for (int64_t i = 0; i < T * row; i++) assert_true(fabsf(whole[i] - pieces[i]) <= 1e-5f);
    assert_memory_equal(conv_whole, conv_pieces, sizeof conv_whole);
    assert_true(isnan(memory[0]) && isnan(memory[2 * 4 * 8 * 6])); // others' slots
    free(in), free(o.values);
}

/* A NaN in an operand of token 3 reaches every output of its head from there on, in its span, and no other: tokens
 * before it may multiply it by 0. */
static void a_nan_in_the_delta_rule_stays_a_nan(void **state) {
    (void)state;
    const delta_shape s = {80, 2, 2, 4, 4, 1, 2, {{0, 70, 0, 70, true}, {70, 10, 70, 10, true}}};
    const mt_spans spans = {s.spans, s.spans, s.num_spans};
    for (int operand = 0; operand < 5; operand++) {
        operands o = delta_operands(&s);
        float *in = floats_of(o.values, o.total), out[80 * 2 * 4];
        in[o.starts[operand] + (operand < 3 ? 3 * 8 + 4 : 3 * 2 + 1)] = NAN; // of head 1
        mt_delta_args a = delta_args(&s, &spans, &o, MT_F32, in, NULL, NULL, NULL);
        a.out = out;
        ops->delta_rule_forward(&a, MT_F32, NULL);
        for (int64_t i = 0; i < 80 * 2 * 4; i++) {
            int64_t t = i / 8, last = operand == 0 ? 4 : 70; // q is in no state
            bool reached = i / 4 % 2 == 1 && t >= 3 && t < last;
            if (operand == 2 && i % 4 != 0) reached = false; // v: one channel
            assert_true(reached ? isnan(out[i]) : t < 3 || isfinite(out[i]));
        }
        free(in), free(o.values);
    }
}

/* ---- pieces of a sequence, as context parallelism cuts it */

/* The tokens of three sequences, 70, 5 and 61, in pieces: a rank's slots hold two pieces each, and a piece may be one
 * token or none. */
enum { PIECES_T = 136, PIECES = 8 };
static const mt_span sequences[] = {{0, 70, 0, 70, true}, {70, 5, 70, 5, true}, {75, 61, 75, 61, true}};
static const int64_t piece_ends[PIECES] = {1, 3, 3, 40, 72, 75, 77, PIECES_T};

/* A piece's spans, and its lists of borders: see mt_states. */
typedef struct piece {
    mt_span spans[3];
    mt_spans list;
    int64_t first, last;
    bool continues, goes_on, empty;
} piece;

static piece piece_of(int n) {
    piece p = {.first = -1, .last = -1};
    int64_t begin = n > 0 ? piece_ends[n - 1] : 0, end = piece_ends[n];
    for (int s = 0; s < 3; s++) {
        int64_t from = sequences[s].q_start, to = from + sequences[s].q_len;
        int64_t start = begin > from ? begin : from, tokens = (end < to ? end : to) - start;
        p.continues |= from < begin && begin < to, p.goes_on |= from < end && end < to;
        if (tokens > 0) p.spans[p.list.count++] = (mt_span){start, tokens, start, tokens, true};
    }
    p.empty = p.list.count == 0;
    if (p.continues && !p.empty) p.first = 0;
    if (p.goes_on && !p.empty) p.last = p.list.count - 1;
    return p;
}

/* A step over the pieces: forward in their order, then backward in reverse. */
typedef struct piece_step {
    piece p;
    bool backward;
    float *before, *after; // the state before the piece, and the gradient of the one after it
    mt_states states;
    mt_carried_state carried;
} piece_step;

/* Step n of 2 PIECES. states[PIECES + 1][elements] are those before the pieces, dstates those after them. Returns false
 * after passing the state on if the piece has no tokens. */
static bool piece_step_begin(piece_step *step, int n, float *states, float *dstates, int64_t elements) {
    step->backward = n >= PIECES;
    n = step->backward ? 2 * PIECES - 1 - n : n;
    piece *p = &step->p;
    *p = piece_of(n);
    p->list.host = p->list.device = p->spans;
    step->before = states + n * elements, step->after = dstates + n * elements;
    step->states = (mt_states){.memory = step->before, .slots = 1, .first = &p->first, .last = &p->last};
    const float *in = step->backward ? step->after : step->before;
    float *out = step->backward ? step->after - elements : step->before + elements;
    if (p->empty) memcpy(out, in, (size_t)elements * sizeof *in);
    bool arrives = step->backward ? p->goes_on : p->continues;
    step->carried = (mt_carried_state){0, arrives ? in : NULL, out};
    return !p->empty;
}

/* Piece after piece by the operations of context parallelism, and back. */
static void carry_delta(mt_delta_args a, float *states, float *dstates, int64_t elements, int64_t map_elements) {
    float *maps = calloc((size_t)map_elements, sizeof *maps), *dmaps = calloc((size_t)elements, sizeof *dmaps);
    piece_step step;
    for (int n = 0; n < 2 * PIECES; n++) {
        if (!piece_step_begin(&step, n, states, dstates, elements)) continue;
        a.spans = &step.p.list, a.states = step.states, a.maps = maps, a.dmaps = dmaps, a.dstates = NULL;
        ops->delta_rule_map_forward(&a, MT_F32, NULL);
        if (!step.backward) {
            if (step.p.goes_on) ops->delta_rule_carry_forward(&a, &step.carried, MT_F32, NULL);
            ops->delta_rule_forward(&a, MT_F32, NULL);
            continue;
        }
        ops->delta_rule_map_backward(&a, MT_F32, NULL);
        if (step.p.continues) ops->delta_rule_carry_backward(&a, &step.carried, MT_F32, NULL);
        a.dstates = step.after;
        ops->delta_rule_backward(&a, MT_F32, NULL);
    }
    free(maps), free(dmaps);
}

static void the_delta_rule_in_pieces_equals_that_of_whole_sequences(void **state) {
    (void)state;
    static const int64_t decays[] = {1, 8};
    for (int n = 0; n < 2; n++) {
        const delta_shape s = {PIECES_T, decays[n] > 1 ? 4 : 2, 4, 8, 6, decays[n], 3, {{0}}};
        const mt_spans spans = {sequences, sequences, 3};
        operands o = delta_operands(&s);
        int64_t count = s.T * s.Hv * s.Dv, elements = s.Hv * s.Dk * s.Dv, all = o.total + count;
        float *in = floats_of(o.values, o.total), *dout = floats_of(o.values, count);
        float *results = calloc((size_t)(2 * all), sizeof *results); // gradients, then out: of the whole, of the pieces
        float *states = calloc((size_t)((2 * PIECES + 2) * elements), sizeof *states);
        for (int64_t i = 0; i < (2 * PIECES + 2) * elements; i++) states[i] = NAN; // must not be read unless written
        for (int pieces = 0; pieces < 2; pieces++) {
            float *got = results + pieces * all;
            mt_delta_args a = delta_args(&s, &spans, &o, MT_F32, in, got, got + o.starts[5], got + o.starts[6]);
            a.out = got + o.total, a.dout = dout;
            if (pieces) carry_delta(a, states, states + (PIECES + 2) * elements, elements, s.Hv * s.Dk * (s.Dk + s.Dv));
            if (!pieces) ops->delta_rule_forward(&a, MT_F32, NULL), ops->delta_rule_backward(&a, MT_F32, NULL);
        }
        double *wanted = calloc((size_t)all, sizeof *wanted);
        for (int64_t i = 0; i < all; i++) wanted[i] = (double)results[i];
        for (int i = 0; i < o.num; i++)
            expect_equal(results + all + o.starts[i], wanted + o.starts[i], o.counts[i], 1e-5);
        expect_equal(results + all + o.total, wanted + o.total, count, 1e-5);
        free(in), free(dout), free(results), free(states), free(wanted), free(o.values);
    }
}

static void carry_conv(mt_conv_args a, float *states, float *dstates, int64_t elements) {
    piece_step step;
    for (int n = 0; n < 2 * PIECES; n++) {
        if (!piece_step_begin(&step, n, states, dstates, elements)) continue;
        a.spans = &step.p.list, a.states = step.states, a.dstates = NULL;
        if (!step.backward) {
            if (step.p.goes_on) ops->short_conv_carry_forward(&a, &step.carried, MT_F32, NULL);
            ops->short_conv_forward(&a, MT_F32, NULL);
            continue;
        }
        if (step.p.continues) ops->short_conv_carry_backward(&a, &step.carried, MT_F32, NULL);
        a.dstates = step.after;
        ops->short_conv_backward(&a, MT_F32, NULL);
    }
}

static void a_short_convolution_in_pieces_equals_that_of_whole_sequences(void **state) {
    (void)state;
    enum { C = 70, K = 4, COUNT = PIECES_T * C, STATE = (K - 1) * C, ALL = 2 * COUNT + C * K + C };
    const mt_spans spans = {sequences, sequences, 3};
    operands o = operands_new(4, (int64_t[]){COUNT, C * K, C, COUNT});
    float *in = floats_of(o.values, o.total), *results = calloc(2 * ALL, sizeof *results);
    float *states = calloc((2 * PIECES + 2) * STATE, sizeof *states);
    double *wanted = calloc(ALL, sizeof *wanted);
    for (int64_t i = 0; i < (2 * PIECES + 2) * STATE; i++) states[i] = NAN;
    for (int pieces = 0; pieces < 2; pieces++) {
        float *got = results + pieces * ALL; // dx, y, dw, dbias
        mt_conv_args a = {.spans = &spans, .C = C, .K = K, .x = in, .w = in + o.starts[1], .bias = in + o.starts[2]};
        a.dy = in + o.starts[3], a.dx = got, a.y = got + COUNT, a.dw = got + 2 * COUNT, a.dbias = a.dw + C * K;
        a.x_stride = a.y_stride = a.dx_stride = a.dy_stride = C, a.silu = true;
        if (pieces) carry_conv(a, states, states + (PIECES + 2) * STATE, STATE);
        if (!pieces) ops->short_conv_forward(&a, MT_F32, NULL), ops->short_conv_backward(&a, MT_F32, NULL);
    }
    for (int64_t i = 0; i < ALL; i++) wanted[i] = (double)results[i];
    expect_equal(results + ALL, wanted, 2 * COUNT, 1e-5);
    expect_equal(results + ALL + 2 * COUNT, wanted + 2 * COUNT, C * K + C, 1e-5);
    free(in), free(results), free(states), free(wanted), free(o.values);
}

/* ---- the scan of Mamba-2. Operands: x, B, C, dt, A_log, D, dt_bias. */

typedef struct ssd_shape {
    int64_t T, G, H, N, P;
    double dt_min, dt_max;
    int num_spans;
    mt_span spans[4];
} ssd_shape;

static const ssd_shape ssd_shapes[] = {
    {7, 1, 1, 4, 4, 0, INFINITY, 1, {{0, 7, 0, 7, true}}},
    {150, 2, 4, 8, 6, 0, INFINITY, 3, {{0, 65, 0, 65, true}, {65, 1, 65, 1, true}, {66, 84, 66, 84, true}}},
    {64, 3, 3, 5, 16, 0.3, 0.9, 1, {{0, 64, 0, 64, true}}},
    {131, 1, 4, 16, 8, 0, 0.8, 2, {{0, 128, 0, 128, true}, {128, 3, 128, 3, true}}},
};
enum { NUM_SSD_SHAPES = sizeof ssd_shapes / sizeof *ssd_shapes };

static operands ssd_operands(const ssd_shape *s) {
    int64_t states = s->T * s->G * s->N, heads = s->T * s->H;
    operands o = operands_new(7, (int64_t[]){heads * s->P, states, states, heads, s->H, s->H, s->H});
    for (int64_t i = 0; i < s->H; i++) part(&o, 4)[i] = (double)(float)(2 * part(&o, 4)[i]); // slow and fast decays
    return o;
}

static void ssd_definition(const void *shape, const operands *o, double *out) {
    const ssd_shape *s = shape;
    double S[16 * 16];
    for (const mt_span *span = s->spans; span < s->spans + s->num_spans; span++)
        for (int64_t h = 0; h < s->H; h++) {
            int64_t group = h / (s->H / s->G);
            memset(S, 0, sizeof S);
            for (int64_t t = span->q_start; t < span->q_start + span->q_len; t++) {
                double step = log1p(exp(part(o, 3)[t * s->H + h] + part(o, 6)[h]));
                step = fmin(fmax(step, s->dt_min), s->dt_max);
                double decay = exp(-exp(part(o, 4)[h]) * step);
                const double *x = part(o, 0) + (t * s->H + h) * s->P;
                const double *B = part(o, 1) + (t * s->G + group) * s->N, *C = part(o, 2) + (t * s->G + group) * s->N;
                for (int64_t j = 0; j < s->P; j++) {
                    double sum = part(o, 5)[h] * x[j];
                    for (int64_t i = 0; i < s->N; i++) {
                        S[i * 16 + j] = decay * S[i * 16 + j] + step * B[i] * x[j];
                        sum += S[i * 16 + j] * C[i];
                    }
                    out[(t * s->H + h) * s->P + j] = sum;
                }
            }
        }
}

/* The operation's operands and gradients at `in` and `gradients`, in the order of `o`; x, B and C have one stride,
 * as in the model, so they are copied into rows [x, B, C] of `rows`. */
static mt_ssd_args ssd_args(const ssd_shape *s, const mt_spans *spans, const operands *o, mt_dtype dtype,
                            const void *in, void *rows) {
    int64_t size = mt_dtype_size(dtype), widths[3] = {s->H * s->P, s->G * s->N, s->G * s->N}, column = 0;
    mt_ssd_args a = {.spans = spans, .G = s->G, .H = s->H, .N = s->N, .P = s->P};
    const void **const places[] = {&a.x, &a.B, &a.C};
    a.stride = a.dstride = widths[0] + 2 * widths[1], a.dt_stride = a.ddt_stride = s->H;
    for (int i = 0; i < 3; column += widths[i++]) {
        *places[i] = (char *)rows + column * size;
        for (int64_t t = 0; t < s->T; t++)
            memcpy((char *)rows + (t * a.stride + column) * size,
                   (const char *)in + (o->starts[i] + t * widths[i]) * size, (size_t)(widths[i] * size));
    }
    const void **const rest[] = {&a.dt, &a.A_log, &a.D, &a.dt_bias};
    for (int i = 0; i < 4; i++) *rest[i] = (const char *)in + o->starts[3 + i] * size;
    a.dt_min = (float)s->dt_min, a.dt_max = (float)s->dt_max;
    return a;
}

/* Gradients in the order of the operands, from rows [x, B, C]. */
static void ssd_gather(const ssd_shape *s, const operands *o, float *gradients, const float *rows) {
    int64_t widths[3] = {s->H * s->P, s->G * s->N, s->G * s->N}, stride = widths[0] + 2 * widths[1], column = 0;
    for (int i = 0; i < 3; column += widths[i++])
        for (int64_t t = 0; t < s->T; t++)
            memcpy(gradients + o->starts[i] + t * widths[i], rows + t * stride + column,
                   (size_t)widths[i] * sizeof *rows);
}

/* Sets where the gradients go: dx, dB and dC to `rows`, ddt, and those of the vectors. */
static void ssd_gradients(const ssd_shape *s, mt_ssd_args *a, void *rows, mt_dtype dtype, void *ddt, float *vectors) {
    int64_t size = mt_dtype_size(dtype);
    a->dx = rows, a->dB = (char *)rows + s->H * s->P * size;
    a->dC = (char *)rows + (s->H * s->P + s->G * s->N) * size, a->ddt = ddt;
    a->dA_log = vectors, a->dD = vectors + s->H, a->ddt_bias = vectors + 2 * s->H;
}

static void the_scan_equals_its_recurrence_in_float64(void **state) {
    (void)state;
    for (int n = 0; n < NUM_SSD_SHAPES; n++) {
        const ssd_shape *s = &ssd_shapes[n];
        const mt_spans spans = {s->spans, s->spans, s->num_spans};
        operands o = ssd_operands(s);
        int64_t count = s->T * s->H * s->P;
        float *in = floats_of(o.values, o.total), *gradients = calloc((size_t)o.total, sizeof *gradients);
        float *out = calloc((size_t)count, sizeof *out);
        float *rows = calloc((size_t)o.total, sizeof *rows), *drows = calloc((size_t)o.total, sizeof *drows);
        double *wanted = calloc((size_t)count, sizeof *wanted), *weights = calloc((size_t)count, sizeof *weights);
        for (int64_t i = 0; i < count; i++) weights[i] = (double)(float)uniform();
        float *dout = floats_of(weights, count);
        mt_ssd_args a = ssd_args(s, &spans, &o, MT_F32, in, rows);
        ssd_gradients(s, &a, drows, MT_F32, gradients + o.starts[3], gradients + o.starts[4]);
        a.out = out, a.dout = dout;
        ops->ssd_forward(&a, MT_F32, NULL);
        ssd_definition(s, &o, wanted);
        expect_equal(out, wanted, count, 1e-5);
        ops->ssd_backward(&a, MT_F32, NULL);
        ssd_gather(s, &o, gradients, drows);
        expect_gradients(ssd_definition, s, &o, weights, count, gradients, 37);
        free(in), free(gradients), free(out), free(rows), free(drows);
        free(wanted), free(weights), free(dout), free(o.values);
    }
}

/* bf16 operands: as fp32 of the same values, rounded once. */
static void the_scan_rounds_its_results_once(void **state) {
    (void)state;
    const ssd_shape *s = &ssd_shapes[1];
    const mt_spans spans = {s->spans, s->spans, s->num_spans};
    operands o = ssd_operands(s);
    int64_t count = s->T * s->H * s->P, width = s->H * s->P + 2 * s->G * s->N;
    float *in = floats_of(o.values, o.total), *dout = floats_of(o.values, count), vectors[2][12] = {{0}};
    uint16_t *in_bits = bf16_of(in, o.total), *dout_bits = bf16_of(dout, count);
    float *rows = calloc((size_t)o.total, sizeof *rows), *out = calloc((size_t)count, sizeof *out);
    float *got = calloc((size_t)(s->T * (width + s->H)), sizeof *got);
    uint16_t *row_bits = calloc((size_t)o.total, 2), *out_bits = calloc((size_t)count, 2);
    uint16_t *got_bits = calloc((size_t)(s->T * (width + s->H)), 2), *wanted = calloc((size_t)o.total, 2);
    mt_ssd_args a = ssd_args(s, &spans, &o, MT_F32, in, rows);
    ssd_gradients(s, &a, got, MT_F32, got + s->T * width, vectors[0]);
    a.out = out, a.dout = dout;
    ops->ssd_forward(&a, MT_F32, NULL), ops->ssd_backward(&a, MT_F32, NULL);
    mt_ssd_args b = ssd_args(s, &spans, &o, MT_BF16, in_bits, row_bits);
    ssd_gradients(s, &b, got_bits, MT_BF16, got_bits + s->T * width, vectors[1]);
    b.out = out_bits, b.dout = dout_bits;
    ops->ssd_forward(&b, MT_BF16, NULL), ops->ssd_backward(&b, MT_BF16, NULL);
    ops->convert(wanted, MT_BF16, out, MT_F32, count, NULL);
    assert_memory_equal(wanted, out_bits, (size_t)count * 2);
    ops->convert(wanted, MT_BF16, got, MT_F32, s->T * (width + s->H), NULL);
    assert_memory_equal(wanted, got_bits, (size_t)(s->T * (width + s->H)) * 2);
    assert_memory_equal(vectors[0], vectors[1], sizeof vectors[0]);
    free(in), free(dout), free(in_bits), free(dout_bits), free(rows), free(out), free(got), free(row_bits);
    free(out_bits), free(got_bits), free(wanted), free(o.values);
}

/* As carry_delta. */
static void carry_scan(mt_ssd_args a, float *states, float *dstates, int64_t elements) {
    float *maps = calloc((size_t)(elements + a.H), sizeof *maps), *dmaps = calloc((size_t)elements, sizeof *dmaps);
    piece_step step;
    for (int n = 0; n < 2 * PIECES; n++) {
        if (!piece_step_begin(&step, n, states, dstates, elements)) continue;
        a.spans = &step.p.list, a.states = step.states, a.maps = maps, a.dmaps = dmaps, a.dstates = NULL;
        ops->ssd_map_forward(&a, MT_F32, NULL);
        if (!step.backward) {
            if (step.p.goes_on) ops->ssd_carry_forward(&a, &step.carried, MT_F32, NULL);
            ops->ssd_forward(&a, MT_F32, NULL);
            continue;
        }
        ops->ssd_map_backward(&a, MT_F32, NULL);
        if (step.p.continues) ops->ssd_carry_backward(&a, &step.carried, MT_F32, NULL);
        a.dstates = step.after;
        ops->ssd_backward(&a, MT_F32, NULL);
    }
    free(maps), free(dmaps);
}

static void the_scan_in_pieces_equals_that_of_whole_sequences(void **state) {
    (void)state;
    const ssd_shape s = {PIECES_T, 2, 4, 8, 6, 0, INFINITY, 3, {{0}}};
    const mt_spans spans = {sequences, sequences, 3};
    operands o = ssd_operands(&s);
    int64_t count = s.T * s.H * s.P, elements = s.H * s.N * s.P, all = o.total + count;
    float *in = floats_of(o.values, o.total), *dout = floats_of(o.values, count);
    float *rows = calloc((size_t)o.total, sizeof *rows), *drows = calloc((size_t)o.total, sizeof *drows);
    float *results = calloc((size_t)(2 * all), sizeof *results); // gradients, then out: of the whole, of the pieces
    float *states = calloc((size_t)((2 * PIECES + 2) * elements), sizeof *states);
    double *wanted = calloc((size_t)all, sizeof *wanted);
    for (int64_t i = 0; i < (2 * PIECES + 2) * elements; i++) states[i] = NAN; // must not be read unless written
    for (int pieces = 0; pieces < 2; pieces++) {
        float *got = results + pieces * all;
        mt_ssd_args a = ssd_args(&s, &spans, &o, MT_F32, in, rows);
        ssd_gradients(&s, &a, drows, MT_F32, got + o.starts[3], got + o.starts[4]);
        a.out = got + o.total, a.dout = dout;
        if (pieces) carry_scan(a, states, states + (PIECES + 2) * elements, elements);
        if (!pieces) ops->ssd_forward(&a, MT_F32, NULL), ops->ssd_backward(&a, MT_F32, NULL);
        ssd_gather(&s, &o, got, drows);
    }
    for (int64_t i = 0; i < all; i++) wanted[i] = (double)results[i];
    for (int i = 0; i < o.num; i++) expect_equal(results + all + o.starts[i], wanted + o.starts[i], o.counts[i], 1e-5);
    expect_equal(results + all + o.total, wanted + o.total, count, 1e-5);
    free(in), free(dout), free(rows), free(drows), free(results), free(states), free(wanted), free(o.values);
}

/* As a_state_continues_a_text. */
static void a_state_of_the_scan_continues_a_text(void **state) {
    (void)state;
    enum { T = 100, SLOTS = 3, STATE = 4 * 8 * 6 };
    static const int64_t ends[] = {1, 2, 66, 70, T};
    const ssd_shape s = {T, 2, 4, 8, 6, 0, INFINITY, 1, {{0, T, 0, T, true}}};
    const mt_spans spans = {s.spans, s.spans, 1};
    operands o = ssd_operands(&s);
    float *in = floats_of(o.values, o.total), whole[T * 4 * 6], pieces[T * 4 * 6], memory[SLOTS * STATE];
    float *rows = calloc((size_t)o.total, sizeof *rows);
    for (size_t i = 0; i < SLOTS * STATE; i++) memory[i] = NAN; // of another text
    mt_ssd_args a = ssd_args(&s, &spans, &o, MT_F32, in, rows);
    a.out = whole;
    ops->ssd_forward(&a, MT_F32, NULL);
    a.out = pieces, a.states = (mt_states){.memory = memory, .slot_rows = T, .slots = SLOTS};
    for (int i = 0; i < 5; i++) {
        int64_t begin = i > 0 ? ends[i - 1] : 0;
        const mt_span span = {begin, ends[i] - begin, T, ends[i], true};
        const mt_spans piece = {&span, &span, 1};
        a.spans = &piece;
        ops->ssd_forward(&a, MT_F32, NULL);
    }
    for (int64_t i = 0; i < T * 4 * 6; i++) assert_true(fabsf(whole[i] - pieces[i]) <= 1e-4f);
    assert_true(isnan(memory[0]) && isnan(memory[2 * STATE])); // others' slots
    free(in), free(rows), free(o.values);
}

/* A NaN in x, B, C or dt of token 3 reaches every output of its heads from there on, in its span (C: of its token
 * alone), and no other head or span. */
static void a_nan_in_the_scan_stays_a_nan(void **state) {
    (void)state;
    const ssd_shape s = {80, 2, 2, 4, 4, 0, INFINITY, 2, {{0, 70, 0, 70, true}, {70, 10, 70, 10, true}}};
    const mt_spans spans = {s.spans, s.spans, s.num_spans};
    for (int operand = 0; operand < 4; operand++) {
        operands o = ssd_operands(&s);
        float *in = floats_of(o.values, o.total), out[80 * 2 * 4], *rows = calloc((size_t)o.total, sizeof *rows);
        in[o.starts[operand] + (operand < 3 ? 3 * 8 + 4 : 3 * 2 + 1)] = NAN; // of head 1
        mt_ssd_args a = ssd_args(&s, &spans, &o, MT_F32, in, rows);
        a.out = out;
        ops->ssd_forward(&a, MT_F32, NULL);
        for (int64_t i = 0; i < 80 * 2 * 4; i++) {
            int64_t t = i / 8, last = operand == 2 ? 4 : 70; // C is in no state
            bool reached = i / 4 % 2 == 1 && t >= 3 && t < last;
            if (operand == 0 && i % 4 != 0) reached = false; // x: one channel
            bool is_other = i / 4 % 2 == 0 || t >= 70;       // another head or span
            assert_true(reached ? isnan(out[i]) : !is_other || isfinite(out[i]));
        }
        free(in), free(rows), free(o.values);
    }
}

/* ---- short convolution. Operands: x, w, bias. */

typedef struct conv_shape {
    int64_t T, C, K;
    bool silu, bias;
    int num_spans;
    mt_span spans[3];
} conv_shape;

static void conv_definition(const void *shape, const operands *o, double *out) {
    const conv_shape *s = shape;
    for (const mt_span *span = s->spans; span < s->spans + s->num_spans; span++)
        for (int64_t t = 0; t < span->q_len; t++)
            for (int64_t c = 0; c < s->C; c++) {
                double sum = s->bias ? part(o, 2)[c] : 0;
                for (int64_t j = 0; j < s->K; j++) {
                    int64_t row = t - (s->K - 1) + j;
                    if (row >= 0) sum += part(o, 1)[c * s->K + j] * part(o, 0)[(span->q_start + row) * s->C + c];
                }
                out[(span->q_start + t) * s->C + c] = s->silu ? sum / (1 + exp(-sum)) : sum;
            }
}

static void a_short_convolution_equals_its_definition(void **state) {
    (void)state;
    static const conv_shape shapes[] = {{20, 5, 4, true, false, 2, {{0, 17, 0, 17, true}, {17, 3, 17, 3, true}}},
                                        {9, 3, 3, false, false, 1, {{0, 9, 0, 9, true}}},
                                        {40, 70, 2, true, true, 1, {{0, 40, 0, 40, true}}},
                                        {3, 2, 8, true, true, 2, {{0, 2, 0, 2, true}, {2, 1, 2, 1, true}}}};
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
        const conv_shape *s = &shapes[n];
        const mt_spans spans = {s->spans, s->spans, s->num_spans};
        int64_t count = s->T * s->C;
        operands o = operands_new(s->bias ? 3 : 2, (int64_t[]){count, s->C * s->K, s->C});
        float *in = floats_of(o.values, o.total), *gradients = calloc((size_t)o.total, sizeof *gradients);
        double *wanted = calloc((size_t)count, sizeof *wanted), *weights = calloc((size_t)count, sizeof *weights);
        for (int64_t i = 0; i < count; i++) weights[i] = (double)(float)uniform();
        float *dy = floats_of(weights, count), *y = calloc((size_t)count, sizeof *y);
        mt_conv_args a = {.spans = &spans, .C = s->C, .K = s->K, .x = in, .w = in + o.starts[1], .y = y, .dy = dy};
        a.x_stride = a.y_stride = a.dx_stride = a.dy_stride = s->C, a.silu = s->silu;
        a.dx = gradients, a.dw = gradients + o.starts[1];
        if (s->bias) a.bias = in + o.starts[2], a.dbias = gradients + o.starts[2];
        ops->short_conv_forward(&a, MT_F32, NULL);
        conv_definition(s, &o, wanted);
        expect_equal(y, wanted, count, 1e-6);
        ops->short_conv_backward(&a, MT_F32, NULL);
        expect_gradients(conv_definition, s, &o, weights, count, gradients, 7);
        free(in), free(gradients), free(wanted), free(weights), free(dy), free(y), free(o.values);
    }
}

/* ---- gated norm. Operands: x, z, w. */

typedef struct norm_shape {
    int64_t T, H, D;
    bool gate_first, weight_per_head, sigmoid;
} norm_shape;

static void gated_norm_definition(const void *shape, const operands *o, double *out) {
    const norm_shape *s = shape;
    for (int64_t r = 0; r < s->T * s->H; r++) {
        const double *x = part(o, 0) + r * s->D, *z = part(o, 1) + r * s->D;
        const double *w = part(o, 2) + (s->weight_per_head ? r % s->H * s->D : 0);
        double sum = 0;
        for (int64_t c = 0; c < s->D; c++) {
            double gate = (s->sigmoid ? 1 : z[c]) / (1 + exp(-z[c])), value = s->gate_first ? x[c] * gate : x[c];
            sum += value * value;
            out[r * s->D + c] = x[c] * w[c] * gate;
        }
        for (int64_t c = 0; c < s->D; c++) out[r * s->D + c] /= sqrt(sum / (double)s->D + 1e-5);
    }
}

static void a_gated_norm_equals_its_definition(void **state) {
    (void)state;
    static const norm_shape shapes[] = {{13, 3, 6, false, false, false},
                                        {13, 3, 6, true, true, false},
                                        {9, 1, 20, true, false, false},
                                        {13, 3, 6, false, false, true}};
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
        const norm_shape s = shapes[n];
        int64_t count = s.T * s.H * s.D;
        operands o = operands_new(3, (int64_t[]){count, count, s.weight_per_head ? s.H * s.D : s.D});
        float *in = floats_of(o.values, o.total), *gradients = calloc((size_t)o.total, sizeof *gradients);
        double *wanted = calloc((size_t)count, sizeof *wanted), *weights = calloc((size_t)count, sizeof *weights);
        for (int64_t i = 0; i < count; i++) weights[i] = (double)(float)uniform();
        float *dy = floats_of(weights, count), *y = calloc((size_t)count, sizeof *y), rstd[13 * 3];
        mt_gated_norm_args a = {.T = s.T, .H = s.H, .D = s.D, .x = in, .z = in + o.starts[1], .w = in + o.starts[2]};
        a.rstd = rstd, a.y = y, a.dy = dy, a.dx = gradients, a.dz = gradients + o.starts[1];
        a.dw = gradients + o.starts[2], a.z_stride = a.dz_stride = s.H * s.D, a.eps = 1e-5f;
        a.gate_first = s.gate_first, a.weight_per_head = s.weight_per_head, a.sigmoid = s.sigmoid;
        ops->gated_norm_forward(&a, MT_F32, NULL);
        gated_norm_definition(&s, &o, wanted);
        expect_equal(y, wanted, count, 1e-6);
        ops->gated_norm_backward(&a, MT_F32, NULL);
        expect_gradients(gated_norm_definition, &s, &o, weights, count, gradients, 1);
        free(in), free(gradients), free(wanted), free(weights), free(dy), free(y), free(o.values);
    }
}

/* ---- products. Operands: x, z. */

static void product_definition(const void *shape, const operands *o, double *out) {
    const norm_shape *s = shape;
    for (int64_t i = 0; i < s->T * s->D; i++) out[i] = part(o, 0)[i] * part(o, 1)[i];
}

static void a_product_equals_its_definition(void **state) {
    (void)state;
    const norm_shape s = {13, 1, 6, false, false, false};
    enum { COUNT = 13 * 6, STRIDE = 8 };
    operands o = operands_new(2, (int64_t[]){COUNT, COUNT});
    double wanted[COUNT], weights[COUNT];
    float x[13 * STRIDE], dx[13 * STRIDE], dy[COUNT], y[COUNT], gradients[2 * COUNT];
    for (int64_t i = 0; i < COUNT; i++) weights[i] = (double)(float)uniform(), dy[i] = (float)weights[i];
    for (int64_t i = 0; i < 13 * STRIDE; i++) x[i] = NAN, dx[i] = 7;
    float *in = floats_of(o.values, o.total);
    for (int64_t i = 0; i < COUNT; i++) x[i / 6 * STRIDE + i % 6] = in[i];
    mt_multiply_args a = {.T = s.T, .C = s.D, .x = x, .z = in + COUNT, .y = y, .dy = dy, .dx = dx};
    a.x_stride = a.dx_stride = STRIDE, a.z_stride = a.y_stride = a.dy_stride = a.dz_stride = s.D;
    a.dz = gradients + COUNT;
    ops->multiply_forward(&a, MT_F32, NULL);
    product_definition(&s, &o, wanted);
    expect_equal(y, wanted, COUNT, 1e-6);
    ops->multiply_backward(&a, MT_F32, NULL);
    for (int64_t i = 0; i < COUNT; i++) gradients[i] = dx[i / 6 * STRIDE + i % 6];
    for (int64_t i = 0; i < 13 * STRIDE; i++) assert_true(i % STRIDE < 6 || dx[i] == 7);
    expect_gradients(product_definition, &s, &o, weights, COUNT, gradients, 1);
    free(in), free(o.values);
}

static void rows_are_scaled_in_place_within_their_columns(void **state) {
    (void)state;
    float x[3 * 5], wanted[3 * 5];
    for (int i = 0; i < 15; i++) x[i] = (float)uniform(), wanted[i] = i % 5 < 4 && i % 5 > 0 ? 0.75f * x[i] : x[i];
    ops->scale_rows(x + 1, 0.75f, 3, 3, 5, MT_F32, NULL);
    for (int i = 0; i < 15; i++) assert_true(x[i] == wanted[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_delta_rule_equals_its_recurrence_in_float64),
        cmocka_unit_test(the_delta_rule_rounds_its_results_once),
        cmocka_unit_test(a_state_continues_a_text),
        cmocka_unit_test(a_nan_in_the_delta_rule_stays_a_nan),
        cmocka_unit_test(the_delta_rule_in_pieces_equals_that_of_whole_sequences),
        cmocka_unit_test(a_short_convolution_in_pieces_equals_that_of_whole_sequences),
        cmocka_unit_test(the_scan_equals_its_recurrence_in_float64),
        cmocka_unit_test(the_scan_rounds_its_results_once),
        cmocka_unit_test(the_scan_in_pieces_equals_that_of_whole_sequences),
        cmocka_unit_test(a_state_of_the_scan_continues_a_text),
        cmocka_unit_test(a_nan_in_the_scan_stays_a_nan),
        cmocka_unit_test(a_short_convolution_equals_its_definition),
        cmocka_unit_test(a_gated_norm_equals_its_definition),
        cmocka_unit_test(a_product_equals_its_definition),
        cmocka_unit_test(rows_are_scaled_in_place_within_their_columns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
