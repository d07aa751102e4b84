/* context_parallel.h: attention with context parallelism equals attention on one rank, for every communication type, on
 * the CPU and on GPUs. */
#ifndef MT_TESTS_CONTEXT_PARALLEL_H
#define MT_TESTS_CONTEXT_PARALLEL_H

#include "../data/options/options.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <mpi.h>

static mt_grid grid;      // its world
static const mt_ops *ops; // under test
static mt_stream *ops_stream;

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* The group of the ranks with the same `color`. */
static mt_group group_split(int color) {
    mt_group group = {.name = "test", .comm = mt_malloc(sizeof(MPI_Comm))};
    MPI_Comm_split(MPI_COMM_WORLD, color, grid.world.rank, group.comm);
    MPI_Comm_size(*(MPI_Comm *)group.comm, &group.size);
    MPI_Comm_rank(*(MPI_Comm *)group.comm, &group.rank);
    group.members = mt_malloc(group.size * (int64_t)sizeof(int));
    MPI_Allgather(&grid.world.rank, 1, MPI_INT, group.members, 1, MPI_INT, *(MPI_Comm *)group.comm);
    mt_error error;
    if (ops != &mt_cpu_ops && group.size > 1 && mt_cuda_group_open(&group, &error) != 0) fail_msg("%s", error.text);
    return group;
}

static void group_free(mt_group *group) {
    if (group->nccl) mt_cuda_group_close(group);
    MPI_Comm_free(group->comm);
    free(group->comm);
    free(group->members);
}

/* ---- a batch and an attention over it ---------------------------------------------------------------------------- */

enum { MAX_TOKENS = 512 };

/* One attention: heads H, query groups G, channels D of keys and Dv of values, window, dropout. */
typedef struct attention_case {
    int64_t H, G, D, Dv, window;
    double dropout;
} attention_case;

/* `a2a` adjacent ranks exchange heads; `ring` such groups pass keys around. */
typedef struct layout {
    mt_cp_comm_type type;
    int a2a, ring;
} layout;

static float random_number(uint64_t key, int64_t i) {
    uint32_t words[4];
    mt_philox(words, key, (uint64_t)i, 7);
    return mt_bf16_to_f32(mt_f32_to_bf16((float)words[0] * 0x1p-31f - 1)); // exact in both types
}

/* Sequences of 9, 1, 2 and 5 times 2 * cp tokens, with distant token indices. */
static void fill_whole_batch(mt_batch *batch, int64_t cp) {
    const int64_t lengths[] = {18 * cp - 3, 10 * cp + 3, 4 * cp - 3, 3};
    batch->num_tokens = 0;
    batch->num_spans = 4;
    for (int64_t s = 0; s < 4; s++) {
        int64_t start = batch->num_tokens, length = lengths[s];
        batch->spans[s] = (mt_span){start, length, start, length, true};
        for (int64_t t = start; t < start + length; t++) {
            batch->tokens[t] = (int32_t)(t * 7 % 50), batch->labels[t] = (int32_t)(t * 11 % 50);
            batch->loss_mask[t] = t % 3 != 0, batch->positions[t] = (int32_t)(t - start);
            batch->token_index[t] = ((int64_t)1 << 33) * (s % 2) + 1000 * s + t - start;
        }
        batch->num_tokens += length;
    }
    assert_true(batch->num_tokens <= MAX_TOKENS);
}

/* Operands and results of some rows; q, k and v are columns of one matrix. */
typedef struct operands {
    int64_t rows, width;
    mt_dtype dtype;
    void *qkv, *dqkv, *out, *dout;
    float *lse, *row_dot;
    mt_attention call;
} operands;

static void *at(void *base, int64_t elements, mt_dtype dtype) {
    return (char *)base + elements * mt_dtype_size(dtype);
}

static double element(const void *base, int64_t i, mt_dtype dtype) {
    return dtype == MT_F32 ? ((const float *)base)[i] : mt_bf16_to_f32(((const uint16_t *)base)[i]);
}

/* Operands of `rows` of the whole batch. Results begin as NaN, which exposes unwritten rows. */
static operands operands_new(const attention_case *c, const mt_batch *batch, const int64_t *rows, mt_dtype dtype) {
    int64_t T = batch->num_tokens, q = c->H * c->D, kv = c->G * (c->D + c->Dv), out = c->H * c->Dv;
    operands o = {.rows = T, .width = q + kv + 3, .dtype = dtype}; // the row stride exceeds the row width
    int64_t size = mt_dtype_size(dtype);
    o.qkv = mt_malloc(T * o.width * size), o.dqkv = mt_malloc(T * o.width * size);
    o.out = mt_malloc(T * out * size), o.dout = mt_malloc(T * out * size);
    o.lse = mt_malloc(T * c->H * 4), o.row_dot = mt_malloc(T * c->H * 4);
    memset(o.dqkv, 0xff, (size_t)(T * o.width * size));
    memset(o.out, 0xff, (size_t)(T * out * size));
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < o.width; i++) {
            float value = random_number(1, rows[t] * o.width + i);
            mt_cpu_ops.convert(at(o.qkv, t * o.width + i, dtype), dtype, &value, MT_F32, 1, NULL);
        }
        for (int64_t i = 0; i < out; i++) {
            float value = random_number(2, rows[t] * out + i);
            mt_cpu_ops.convert(at(o.dout, t * out + i, dtype), dtype, &value, MT_F32, 1, NULL);
        }
    }
    o.call = (mt_attention){.num_heads = c->H,
                            .num_groups = c->G,
                            .head_size = c->D,
                            .value_size = c->Dv,
                            .q_stride = o.width,
                            .k_stride = o.width,
                            .v_stride = o.width,
                            .out_stride = out,
                            .window = c->window,
                            .scale = 2 / sqrtf((float)c->D),
                            .dropout = {c->dropout, 0xfeed},
                            .first_head = 5,
                            .q_index = batch->token_index,
                            .k_index = batch->token_index};
    return o;
}

static void operands_free(operands *o) {
    free(o->qkv), free(o->dqkv), free(o->out), free(o->dout), free(o->lse), free(o->row_dot);
}

/* The call with q, k, v and their gradients as columns of qkv and dqkv. */
static mt_attention call_on(const attention_case *c, const mt_attention *from, mt_dtype dtype, void *qkv, void *dqkv) {
    int64_t k = c->H * c->D, v = k + c->G * c->D;
    mt_attention call = *from;
    call.q = qkv, call.k = at(qkv, k, dtype), call.v = at(qkv, v, dtype);
    call.dq = dqkv, call.dk = at(dqkv, k, dtype), call.dv = at(dqkv, v, dtype);
    return call;
}

/* The CPU operation on the whole sequences on one rank. */
static operands run_reference(const attention_case *c, const mt_batch *batch, mt_dtype dtype) {
    int64_t rows[MAX_TOKENS];
    for (int64_t t = 0; t < batch->num_tokens; t++) rows[t] = t;
    operands o = operands_new(c, batch, rows, dtype);
    o.call.spans = (mt_spans){batch->spans, batch->spans, batch->num_spans};
    mt_attention call = call_on(c, &o.call, dtype, o.qkv, o.dqkv);
    call.out = o.out, call.lse = o.lse, call.dout = o.dout, call.row_dot = o.row_dot;
    mt_cpu_ops.attention_forward(&call, dtype, NULL);
    mt_cpu_ops.attention_backward(&call, dtype, NULL);
    return o;
}

/* The largest difference of columns [first, first + width) from the same rows of the whole (fp32), relative to the
 * largest element. NaN if an element is unwritten. */
static double worst_difference(const void *actual, const operands *o, const void *expected, const int64_t *rows,
                               int64_t whole_rows, int64_t stride, int64_t first, int64_t width) {
    double worst = 0, largest = 0;
    for (int64_t t = 0; t < o->rows; t++)
        for (int64_t i = first; i < first + width; i++) {
            double want = element(expected, rows[t] * stride + i, MT_F32);
            double got = element(actual, t * stride + i, o->dtype);
            if (isnan(got)) return NAN;
            worst = fmax(worst, fabs(got - want));
        }
    for (int64_t t = 0; t < whole_rows; t++)
        for (int64_t i = first; i < first + width; i++)
            largest = fmax(largest, fabs(element(expected, t * stride + i, MT_F32)));
    return worst / largest;
}

/* ---- attention over a layout ------------------------------------------------------------------------------------- */

static const char *const type_names[] = {"p2p", "all_gather", "a2a", "a2a+p2p"};

/* Fails unless this rank's rows of every result equal those of the reference. */
static void compare(const attention_case *c, const layout *l, const operands *o, const operands *whole,
                    const int64_t *rows) {
    int64_t q = c->H * c->D, k = c->G * c->D, v = c->G * c->Dv, n = whole->rows;
    double tolerance = o->dtype == MT_F32 ? 1e-5 : 1.0 / 64; // bf16: a few roundings of 1/256 relative to the largest
    struct {
        const char *name;
        double error;
    } results[] = {
        {"out", worst_difference(o->out, o, whole->out, rows, n, c->H * c->Dv, 0, c->H * c->Dv)},
        {"dq", worst_difference(o->dqkv, o, whole->dqkv, rows, n, o->width, 0, q)},
        {"dk", worst_difference(o->dqkv, o, whole->dqkv, rows, n, o->width, q, k)},
        {"dv", worst_difference(o->dqkv, o, whole->dqkv, rows, n, o->width, q + k, v)},
    };
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (!(results[i].error <= tolerance))
            fail_msg("%s over %d x %d ranks, %lld heads, window %lld, dropout %g: %s is off by %g on rank %d",
                     type_names[l->type], l->a2a, l->ring, (long long)c->H, (long long)c->window, c->dropout,
                     results[i].name, results[i].error, grid.world.rank);
    for (int64_t t = 0; t < o->rows; t++) // nothing is written between the rows
        for (int64_t i = q + k + v; i < o->width; i++) assert_true(isnan(element(o->dqkv, t * o->width + i, o->dtype)));
}

/* Copies host data to memory of the backend; free it with download. */
static void *upload(const void *data, int64_t bytes) {
    void *memory = ops->memory_alloc(bytes);
    ops->memory_copy(memory, data, bytes, ops_stream);
    ops->stream_synchronize(ops_stream);
    return memory;
}

/* Copies backend memory to the host (unless `data` is NULL) and frees it. */
static void download(void *data, void *memory, int64_t bytes) {
    if (data) ops->memory_copy(data, memory, bytes, ops_stream);
    ops->stream_synchronize(ops_stream);
    ops->memory_free(memory);
}

/* Forward and backward of host operands through a context that has loaded their batch. */
static void run_context(mt_context *context, const attention_case *c, const operands *o) {
    mt_dtype dtype = o->dtype;
    int64_t T = o->rows, size = mt_dtype_size(dtype), wide = T * o->width * size, out_bytes = T * c->H * c->Dv * size;
    void *index = upload(o->call.q_index, T * 8), *qkv = upload(o->qkv, wide), *dqkv = upload(o->dqkv, wide);
    void *out = upload(o->out, out_bytes), *dout = upload(o->dout, out_bytes);
    float *lse = upload(o->lse, T * c->H * 4), *row_dot = upload(o->row_dot, T * c->H * 4);
    mt_attention call = call_on(c, &o->call, dtype, qkv, dqkv);
    call.out = out, call.lse = lse, call.dout = dout, call.row_dot = row_dot;
    call.q_index = call.k_index = index;
    mt_context_attention_forward(context, &call, ops_stream);
    mt_context_attention_backward(context, &call, ops_stream);
    download(o->out, out, out_bytes), download(o->dqkv, dqkv, wide);
    download(NULL, qkv, 0), download(NULL, dout, 0), download(NULL, index, 0);
    download(NULL, lse, 0), download(NULL, row_dot, 0);
}

/* One micro-batch, with sequences sharded over `cp` ranks, through a context. */
static void check_batch(mt_context *context, const attention_case *c, const layout *l, mt_batch *whole, mt_batch *local,
                        mt_dtype dtype) {
    int64_t rows[MAX_TOKENS];
    mt_context_shard(context, local, whole, NULL);
    for (int64_t t = 0; t < local->num_tokens; t++) // find the row of the whole batch by its unique index
        for (int64_t from = 0; from < whole->num_tokens; from++)
            if (whole->token_index[from] == local->token_index[t]) rows[t] = from;
    operands o = operands_new(c, local, rows, dtype), expected = run_reference(c, whole, MT_F32);
    mt_context_load(context, whole, ops_stream);
    run_context(context, c, &o);
    compare(c, l, &o, &expected, rows);
    operands_free(&o), operands_free(&expected);
}

static void check_layout(const layout *l, const attention_case *c, mt_dtype dtype, bool changes) {
    int cp = l->a2a * l->ring, rank = grid.world.rank, block = rank / cp * cp;
    mt_group a2a = group_split(block + rank % cp / l->a2a * l->a2a), ring = group_split(block + rank % cp % l->a2a);
    assert_int_equal(a2a.size, l->a2a);
    assert_int_equal(ring.size, l->ring);
    mt_batch whole, local;
    mt_batch_alloc(&whole, MAX_TOKENS), mt_batch_alloc(&local, MAX_TOKENS);
    fill_whole_batch(&whole, cp);
    mt_context_plan plan = {.comm_type = l->type,
                            .a2a = &a2a,
                            .ring = &ring,
                            .max_tokens = whole.num_tokens / cp,
                            .num_heads = c->H,
                            .num_groups = c->G,
                            .head_size = c->D,
                            .value_size = c->Dv,
                            .dtype = dtype,
                            .train = true};
    int64_t bytes = mt_context_bytes(&plan);
    unsigned char *poison = mt_malloc(bytes + 64);
    memset(poison, 0xff, (size_t)bytes + 64); // NaN, and guard bytes at the end
    void *memory = upload(poison, bytes + 64);
    mt_context *context = mt_context_create(&plan, ops, memory, ops_stream);
    int64_t all = whole.num_spans, tokens = whole.num_tokens;
    check_batch(context, c, l, &whole, &local, dtype);
    for (int again = 0; again < 2 && changes; again++) { // fewer sequences, then all again
        whole.num_spans = again ? all : 2, whole.num_tokens = again ? tokens : whole.spans[2].q_start;
        check_batch(context, c, l, &whole, &local, dtype);
    }
    mt_context_destroy(context);
    download(poison, memory, bytes + 64);
    for (int i = 0; i < 64; i++) assert_int_equal(poison[bytes + i], 0xff);
    free(poison);
    mt_batch_free(&whole), mt_batch_free(&local);
    group_free(&a2a), group_free(&ring);
}

/* Every communication type on every number of ranks up to the world's, and one rank alone. */
static int64_t all_layouts(layout *layouts) {
    int64_t count = 0;
    layouts[count++] = (layout){MT_CP_P2P, 1, 1};
    for (int cp = 2; cp <= grid.world.size; cp *= 2) {
        layouts[count++] = (layout){MT_CP_P2P, 1, cp};
        layouts[count++] = (layout){MT_CP_ALL_GATHER, 1, cp};
        layouts[count++] = (layout){MT_CP_A2A, cp, 1};
        for (int a2a = 2; a2a < cp; a2a *= 2) layouts[count++] = (layout){MT_CP_A2A_P2P, a2a, cp / a2a};
    }
    return count;
}

/* Odd numbers of heads if heads stay whole on a rank; else multiples of 8, to exchange over up to 8 ranks. */
static void check_every_layout(mt_dtype dtype) {
    static const attention_case whole_heads[] = {{4, 2, 24, 16, 0, 0},
                                                 {3, 1, 40, 40, 0, 0.3},
                                                 {5, 5, 7, 9, 11, 0},
                                                 {6, 2, 20, 20, 3, 0.5},
                                                 {4, 2, 64, 64, 0, 0}};
    static const attention_case shared_heads[] = {{8, 8, 24, 16, 0, 0},
                                                  {16, 8, 9, 9, 0, 0.3},
                                                  {24, 8, 7, 9, 11, 0},
                                                  {16, 8, 20, 20, 3, 0.5},
                                                  {16, 8, 64, 64, 0, 0}};
    layout layouts[32];
    int64_t count = all_layouts(layouts);
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < 5; k++) {
            const attention_case *c = layouts[i].a2a > 1 ? &shared_heads[k] : &whole_heads[k];
            bool ring = layouts[i].ring > 1 && layouts[i].type != MT_CP_ALL_GATHER;
            if (ring && c->window > 0) continue; // an error in mt_options_finish
            if (dtype == MT_F32 ? k == 4 : k == 2 || k == 3)
                continue; // bf16: head sizes of the GPU kernels; saves time
            check_layout(&layouts[i], c, dtype, dtype == MT_F32 && k == 0);
        }
}

static void every_comm_type_equals_attention_on_one_rank(void **state) {
    (void)state;
    check_every_layout(MT_F32);
}

static void every_comm_type_equals_attention_on_one_rank_to_bf16_rounding(void **state) {
    (void)state;
    check_every_layout(MT_BF16);
}

#endif
