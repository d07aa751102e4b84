/* Context parallelism: attention of sequences that lie over several ranks is that of one rank, whichever way the ranks
 * get one another's keys, and so is training. Run by mpirun on a power of two of ranks, which form groups of every size
 * up to their number. */
#include "golden.h"

#include <mpi.h>

static mt_grid grid;
static const mt_ops *const ops = &mt_cpu_ops;

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* The ranks of the world that have this one's `color`. */
static mt_group group_split(int color) {
    mt_group group = {.name = "test", .comm = mt_malloc(sizeof(MPI_Comm))};
    MPI_Comm_split(MPI_COMM_WORLD, color, grid.world.rank, group.comm);
    MPI_Comm_size(*(MPI_Comm *)group.comm, &group.size);
    MPI_Comm_rank(*(MPI_Comm *)group.comm, &group.rank);
    return group;
}

static void group_free(mt_group *group) {
    MPI_Comm_free(group->comm);
    free(group->comm);
}

/* ---- a batch and an attention over it ---------------------------------------------------------------------------- */

enum { MAX_TOKENS = 512 };

/* A kind of attention: heads, groups, channels and what else it has. */
typedef struct attention_case {
    int64_t H, G, D, Dv, window;
    double dropout;
} attention_case;

/* How ranks are grouped: `a2a` neighbours trade, `ring` such groups have the other keys. */
typedef struct layout {
    mt_cp_comm_type type;
    int a2a, ring;
} layout;

static float random_number(uint64_t key, int64_t i) {
    uint32_t words[4];
    mt_philox(words, key, (uint64_t)i, 7);
    return mt_bf16_to_f32(mt_f32_to_bf16((float)words[0] * 0x1p-31f - 1)); // so that both types hold it
}

/* Sequences of 9, 1, 2 and 5 times 2 cp tokens, with indices far apart. */
static void fill_whole_batch(mt_batch *batch, int64_t cp) {
    static const int64_t lengths[] = {9, 1, 2, 5};
    batch->num_tokens = 0;
    batch->num_spans = 4;
    for (int64_t s = 0; s < 4; s++) {
        int64_t start = batch->num_tokens, length = lengths[s] * 2 * cp;
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

/* Operands and results for some rows, q, k and v side by side, elements of one type. */
typedef struct operands {
    int64_t rows, width;
    mt_dtype dtype;
    void *qkv, *dqkv, *out, *dout;
    float *lse, *row_dot;
    mt_attention shape;
} operands;

static void *at(void *base, int64_t elements, mt_dtype dtype) {
    return (char *)base + elements * mt_dtype_size(dtype);
}

static double element(const void *base, int64_t i, mt_dtype dtype) {
    return dtype == MT_F32 ? ((const float *)base)[i] : mt_bf16_to_f32(((const uint16_t *)base)[i]);
}

/* Rows of these numbers in the whole batch; gradients begin as NaN, so that rows that nothing wrote show. */
static operands operands_new(const attention_case *c, const mt_batch *batch, const int64_t *rows, mt_dtype dtype) {
    int64_t T = batch->num_tokens, q = c->H * c->D, kv = c->G * (c->D + c->Dv), out = c->H * c->Dv;
    operands o = {.rows = T, .width = q + kv + 3, .dtype = dtype}; // rows are further apart than they are wide
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
    o.shape = (mt_attention){.num_heads = c->H,
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

/* The one-rank operation on the whole sequences. */
static operands run_reference(const attention_case *c, const mt_batch *batch, mt_dtype dtype) {
    int64_t rows[MAX_TOKENS];
    for (int64_t t = 0; t < batch->num_tokens; t++) rows[t] = t;
    operands o = operands_new(c, batch, rows, dtype);
    mt_spans spans = {batch->spans, batch->spans, batch->num_spans};
    int64_t k = c->H * c->D, v = k + c->G * c->D;
    ops->attention_forward(o.out, o.lse, o.qkv, at(o.qkv, k, dtype), at(o.qkv, v, dtype), &spans, &o.shape, dtype,
                           NULL);
    ops->attention_backward(o.dqkv, at(o.dqkv, k, dtype), at(o.dqkv, v, dtype), o.row_dot, o.dout, o.qkv,
                            at(o.qkv, k, dtype), at(o.qkv, v, dtype), o.out, o.lse, &spans, &o.shape, dtype, NULL);
    return o;
}

/* The largest difference of columns [first, first + width) of `rows` rows from those rows of the whole, which is in
 * fp32, as a share of the largest element. NaN where something was not written. */
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

/* Fails unless this rank's rows of every result are those of the whole. */
static void compare(const attention_case *c, const layout *l, const operands *o, const operands *whole,
                    const int64_t *rows) {
    int64_t q = c->H * c->D, k = c->G * c->D, v = c->G * c->Dv, n = whole->rows;
    double tolerance = o->dtype == MT_F32 ? 1e-5 : 1.0 / 64; // bf16: a few roundings of 1/256 of the largest
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
    for (int64_t t = 0; t < o->rows; t++) // between the rows nothing was written
        for (int64_t i = q + k + v; i < o->width; i++) assert_true(isnan(element(o->dqkv, t * o->width + i, o->dtype)));
}

/* One micro-batch, whose sequences are cut over `cp` ranks, through a context. */
static void check_batch(mt_context *context, const attention_case *c, const layout *l, mt_batch *whole, mt_batch *local,
                        mt_dtype dtype) {
    int64_t cp = l->a2a * l->ring, rows[MAX_TOKENS];
    mt_error error;
    if (mt_batch_context_shard(local, whole, cp, grid.world.rank % cp, &error) != 0) fail_msg("%s", error.text);
    for (int64_t t = 0; t < local->num_tokens; t++) // the row of the whole batch by its index, which no other has
        for (int64_t from = 0; from < whole->num_tokens; from++)
            if (whole->token_index[from] == local->token_index[t]) rows[t] = from;
    operands o = operands_new(c, local, rows, dtype), expected = run_reference(c, whole, MT_F32);
    int64_t k = c->H * c->D, v = k + c->G * c->D;
    mt_context_load(context, whole, NULL);
    mt_context_attention_forward(context, o.out, o.lse, o.qkv, at(o.qkv, k, dtype), at(o.qkv, v, dtype), &o.shape,
                                 NULL);
    mt_context_attention_backward(context, o.dqkv, at(o.dqkv, k, dtype), at(o.dqkv, v, dtype), o.row_dot, o.dout, o.qkv,
                                  at(o.qkv, k, dtype), at(o.qkv, v, dtype), o.out, o.lse, &o.shape, NULL);
    compare(c, l, &o, &expected, rows);
    operands_free(&o), operands_free(&expected);
}

static void check_layout(const layout *l, const attention_case *c, mt_dtype dtype) {
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
    unsigned char *memory = mt_malloc(bytes + 64);
    memset(memory, 0xff, (size_t)bytes + 64); // NaN, and guards behind
    mt_context *context = mt_context_create(&plan, ops, memory, NULL);
    int64_t all = whole.num_spans, tokens = whole.num_tokens;
    check_batch(context, c, l, &whole, &local, dtype);
    for (int again = 0; again < 2 && dtype == MT_F32; again++) { // fewer sequences, then all again
        whole.num_spans = again ? all : 2, whole.num_tokens = again ? tokens : whole.spans[2].q_start;
        check_batch(context, c, l, &whole, &local, dtype);
    }
    mt_context_destroy(context);
    for (int i = 0; i < 64; i++) assert_int_equal(memory[bytes + i], 0xff);
    free(memory);
    mt_batch_free(&whole), mt_batch_free(&local);
    group_free(&a2a), group_free(&ring);
}

/* Every way in which up to `world` ranks can share a sequence, and one rank alone. */
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

/* Awkward heads where heads are not shared out; else as many as eight ranks can share. */
static void check_every_layout(mt_dtype dtype) {
    static const attention_case whole_heads[] = {
        {4, 2, 24, 16, 0, 0}, {3, 1, 40, 40, 0, 0.3}, {5, 5, 7, 9, 11, 0}, {6, 2, 20, 20, 3, 0.5}};
    static const attention_case shared_heads[] = {
        {8, 8, 24, 16, 0, 0}, {16, 8, 9, 9, 0, 0.3}, {24, 8, 7, 9, 11, 0}, {16, 8, 20, 20, 3, 0.5}};
    layout layouts[32];
    int64_t count = all_layouts(layouts);
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < 4; k++) {
            const attention_case *c = layouts[i].a2a > 1 ? &shared_heads[k] : &whole_heads[k];
            bool ring = layouts[i].ring > 1 && layouts[i].type != MT_CP_ALL_GATHER;
            if (ring && c->window > 0) continue; // refused by mt_options_finish
            check_layout(&layouts[i], c, dtype);
        }
}

static void every_way_is_attention_of_one_rank(void **state) {
    (void)state;
    check_every_layout(MT_F32);
}

static void every_way_is_attention_of_one_rank_to_the_rounding_of_bf16(void **state) {
    (void)state;
    check_every_layout(MT_BF16);
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

static void shards_hold_every_token_once_in_order(void **state) {
    (void)state;
    mt_batch whole, local;
    mt_batch_alloc(&whole, MAX_TOKENS), mt_batch_alloc(&local, MAX_TOKENS);
    for (int64_t cp = 1; cp <= 8; cp *= 2) {
        mt_error error;
        int seen[MAX_TOKENS] = {0};
        fill_whole_batch(&whole, cp);
        for (int64_t rank = 0; rank < cp; rank++) {
            assert_int_equal(mt_batch_context_shard(&local, &whole, cp, rank, &error), 0);
            assert_int_equal(local.num_tokens, whole.num_tokens / cp);
            assert_int_equal(local.num_spans, whole.num_spans);
            for (int64_t s = 0; s < whole.num_spans; s++) {
                mt_span *part = &local.spans[s], *of = &whole.spans[s];
                int64_t chunk = of->q_len / (2 * cp);
                assert_true(part->q_start == of->q_start / cp && part->q_len == 2 * chunk && part->causal);
                assert_true(part->k_start == part->q_start && part->k_len == part->q_len);
                for (int64_t i = 0; i < part->q_len; i++) {
                    int64_t t = part->q_start + i;
                    int64_t position = i < chunk ? rank * chunk + i : (2 * cp - 1 - rank) * chunk + i - chunk;
                    int64_t from = of->q_start + position;
                    assert_int_equal(local.positions[t], position);
                    assert_int_equal(local.tokens[t], whole.tokens[from]);
                    assert_int_equal(local.labels[t], whole.labels[from]);
                    assert_int_equal(local.token_index[t], whole.token_index[from]);
                    assert_true(local.loss_mask[t] == whole.loss_mask[from]);
                    seen[from]++;
                }
            }
        }
        for (int64_t t = 0; t < whole.num_tokens; t++) assert_int_equal(seen[t], 1);
    }
    mt_batch_free(&whole), mt_batch_free(&local);
}

static void sequences_that_cannot_be_shared_out_are_refused(void **state) {
    (void)state;
    mt_batch whole, local;
    mt_error error;
    mt_batch_alloc(&whole, MAX_TOKENS), mt_batch_alloc(&local, MAX_TOKENS);
    fill_whole_batch(&whole, 2);
    assert_int_equal(mt_batch_context_shard(&local, &whole, 4, 0, &error), -1);
    assert_non_null(strstr(error.text, "a sequence of 36 tokens does not divide into the 2 x 4 chunks"));
    assert_non_null(strstr(error.text, "pad it to a multiple of 8"));
    whole.num_spans--;
    assert_int_equal(mt_batch_context_shard(&local, &whole, 2, 0, &error), -1);
    assert_non_null(strstr(error.text, "20 tokens of the micro-batch are in no sequence"));
    whole.num_spans++;
    whole.spans[1].causal = false;
    assert_int_equal(mt_batch_context_shard(&local, &whole, 2, 0, &error), -1);
    assert_non_null(strstr(error.text, "sequence 1 of the micro-batch is not a whole causal sequence"));
    mt_batch_free(&whole), mt_batch_free(&local);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

static void grid_free(mt_grid *built) {
    for (int kind = MT_GROUP_WORLD + 1; kind < MT_NUM_GROUP_KINDS; kind++) {
        mt_group *group = mt_grid_group(built, kind);
        if (group->comm) MPI_Comm_free(group->comm);
        free(group->comm);
        free(group->members);
    }
}

/* Ten steps of a family over 2 x 4, 4 x 2 or 8 x 1 context and data ranks are PyTorch's on one. */
static void train_over(const char *family, int cp, const char *type) {
    char text[200];
    snprintf(text, sizeof text, "--context-parallel-size %d --cp-comm-type %s", cp, type);
    more_options = text;
    fixture f = open_family(family, 1, grid.world.size, false);
    mt_grid built = grid; // the world alone is shared
    mt_error error;
    double losses[STEPS], norms[STEPS];
    if (mt_grid_build(&built, &f.options, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(built.context.size, cp);
    mt_options_free(&f.options), mt_batch_free(&f.batch), free(f.tokens);
    train_ten_steps(family, &built, SEQUENCES / built.data.size, false, losses, norms);
    assert_expected(family, losses, norms);
    grid_free(&built);
    more_options = "";
}

static void every_way_trains_like_pytorch_on_one_rank(void **state) {
    (void)state;
    if (grid.world.size != 8) skip();
    for (int k = 0; k < NUM_FAMILIES; k++) train_over(families[k], 4, "p2p");
    train_over("llama", 8, "p2p");
    train_over("gpt2", 8, "all_gather");
    train_over("qwen3", 4, "all_gather");
    train_over("gpt2", 4, "a2a");
    train_over("llama", 2, "a2a");
    train_over("qwen3", 4, "a2a+p2p --hierarchical-context-parallel-sizes 2 2");
    train_over("gpt2", 8, "a2a+p2p --hierarchical-context-parallel-sizes 4 2");
    train_over("llama", 8, "a2a+p2p --hierarchical-context-parallel-sizes 2 4");
}

static int batch_of_odd_length(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)index, (void)error;
    fill_batch(context, 0, 0, 1, batch);
    batch->spans[0].q_len = batch->spans[0].k_len = 15;
    batch->spans[1] = (mt_span){15, 17, 15, 17, true};
    batch->num_spans = 2;
    return 0;
}

/* A document of 15 tokens over 8 ranks stops training in words. */
static void training_names_a_sequence_that_cannot_be_shared_out(void **state) {
    (void)state;
    if (grid.world.size != 8) skip();
    more_options = "--context-parallel-size 8";
    fixture f = open_family("llama", 4, grid.world.size, false);
    mt_grid built = grid;
    mt_run_state run = {0};
    mt_metrics metrics;
    mt_error error;
    if (mt_grid_build(&built, &f.options, &error) != 0) fail_msg("%s", error.text);
    create_model(&f, &built);
    assert_int_equal(mt_train_step(f.model, &run, 1, batch_of_odd_length, &f, &f.batch, &metrics, &error), -1);
    assert_non_null(strstr(error.text, "a sequence of 15 tokens does not divide into the 2 x 8 chunks"));
    close_family(&f);
    grid_free(&built);
    more_options = "";
}

int main(int argc, char **argv) {
    mt_grid_start(&grid, &argc, &argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_hold_every_token_once_in_order),
        cmocka_unit_test(sequences_that_cannot_be_shared_out_are_refused),
        cmocka_unit_test(every_way_is_attention_of_one_rank),
        cmocka_unit_test(every_way_is_attention_of_one_rank_to_the_rounding_of_bf16),
        cmocka_unit_test(every_way_trains_like_pytorch_on_one_rank),
        cmocka_unit_test(training_names_a_sequence_that_cannot_be_shared_out),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
