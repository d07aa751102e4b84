/* The rank grid: which ranks make a group, against coordinates counted out one by one and Megatron-LM's own example. */
// Sections of megatron.c: §4
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/report/report.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 512 };

typedef struct place {
    int64_t tp, cp, dp, pp, etp, ep, edp;
} place;

/* Ranks in the order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp, counted by nested loops. */
static void count_places(place *places, const mt_grid_shape *s) {
    int rank = 0;
    int64_t stages = s->pipeline, replicas = s->data, expert_replicas = s->expert_data;
    bool stages_first = s->pipeline_before_data;
    for (int64_t outer = 0; outer < (stages_first ? replicas : stages); outer++)
        for (int64_t inner = 0; inner < (stages_first ? stages : replicas); inner++)
            for (int64_t cp = 0; cp < s->context; cp++)
                for (int64_t tp = 0; tp < s->tensor; tp++, rank++) {
                    places[rank].pp = stages_first ? inner : outer, places[rank].dp = stages_first ? outer : inner;
                    places[rank].cp = cp, places[rank].tp = tp;
                }
    rank = 0;
    for (int64_t outer = 0; outer < (stages_first ? expert_replicas : stages); outer++)
        for (int64_t inner = 0; inner < (stages_first ? stages : expert_replicas); inner++)
            for (int64_t ep = 0; ep < s->expert; ep++)
                for (int64_t etp = 0; etp < s->expert_tensor; etp++, rank++) {
                    int64_t pp = stages_first ? inner : outer;
                    assert_int_equal(places[rank].pp, pp); // both grids have the same stages
                    places[rank].edp = stages_first ? outer : inner, places[rank].ep = ep, places[rank].etp = etp;
                }
}

static bool same_head(const mt_grid_shape *s, int64_t heads, int64_t tp, int64_t other) {
    if (heads == 0 || heads >= s->tensor) return tp == other;
    int64_t ranks_a_head = s->tensor / heads;
    return tp / ranks_a_head == other / ranks_a_head;
}

/* True if two ranks are in one group of a kind: by the coordinates that they share. */
static bool together(const mt_grid_shape *s, mt_group_kind kind, const place *a, const place *b) {
    bool tp = a->tp == b->tp, cp = a->cp == b->cp, dp = a->dp == b->dp, pp = a->pp == b->pp;
    bool ends = a == b || ((a->pp == 0 || a->pp == s->pipeline - 1) && (b->pp == 0 || b->pp == s->pipeline - 1));
    switch (kind) {
    case MT_GROUP_WORLD:
        return true;
    case MT_GROUP_TENSOR:
        return cp && dp && pp;
    case MT_GROUP_CONTEXT:
        return tp && dp && pp;
    case MT_GROUP_DATA:
        return tp && cp && pp;
    case MT_GROUP_DATA_CONTEXT:
        return tp && pp;
    case MT_GROUP_PIPELINE:
        return tp && cp && dp;
    case MT_GROUP_EMBEDDING:
        return tp && cp && dp && ends;
    case MT_GROUP_TENSOR_CONTEXT:
        return dp && pp;
    case MT_GROUP_STAGE:
        return pp;
    case MT_GROUP_EXPERT:
        return a->etp == b->etp && a->edp == b->edp && pp;
    case MT_GROUP_EXPERT_TENSOR:
        return a->ep == b->ep && a->edp == b->edp && pp;
    case MT_GROUP_EXPERT_DATA:
        return a->etp == b->etp && a->ep == b->ep && pp;
    case MT_GROUP_EXPERT_EXCHANGE:
        return a->edp == b->edp && pp;
    case MT_GROUP_KV_REPLICAS:
        return cp && dp && pp && same_head(s, s->num_query_groups, a->tp, b->tp);
    case MT_GROUP_KEY_REPLICAS:
        return cp && dp && pp && same_head(s, s->linear_key_heads, a->tp, b->tp);
    case MT_GROUP_CONTEXT_A2A:
        return tp && dp && pp && a->cp / s->context_a2a == b->cp / s->context_a2a;
    case MT_GROUP_CONTEXT_RING:
        return tp && dp && pp && a->cp % s->context_a2a == b->cp % s->context_a2a;
    case MT_GROUP_CONTEXT_2:
    case MT_GROUP_CONTEXT_4:
    case MT_GROUP_CONTEXT_8:
    case MT_GROUP_CONTEXT_16:
    case MT_GROUP_CONTEXT_32:
    case MT_GROUP_CONTEXT_64:
        if (!s->context_blocks || 2 << (kind - MT_GROUP_CONTEXT_2) >= s->context) return a == b;
        return tp && dp && pp && a->cp >> (kind - MT_GROUP_CONTEXT_2 + 1) == b->cp >> (kind - MT_GROUP_CONTEXT_2 + 1);
    default:
        fail_msg("a kind of group without words: %d", (int)kind);
        return false;
    }
}

static void check_shape(const mt_grid_shape *s) {
    static place places[RANKS];
    int members[RANKS], world = (int)(s->tensor * s->context * s->data * s->pipeline);
    count_places(places, s);
    for (int kind = 0; kind < MT_NUM_GROUP_KINDS; kind++)
        for (int rank = 0; rank < world; rank++) {
            int count = mt_grid_members(members, s, kind, rank), next = 0;
            for (int other = 0; other < world; other++)
                if (together(s, kind, &places[rank], &places[other])) {
                    if (next >= count || members[next] != other)
                        fail_msg("tp %d cp %d dp %d pp %d: kind %d of rank %d lacks %d", (int)s->tensor,
                                 (int)s->context, (int)s->data, (int)s->pipeline, kind, rank, other);
                    next++;
                }
            assert_int_equal(next, count);
        }
}

static void groups_are_those_of_the_coordinates_for_many_sizes(void **state) {
    (void)state;
    int shapes = 0;
    for (int64_t tp = 1; tp <= 8; tp *= 2)
        for (int64_t cp = 1; cp <= 4; cp++)
            for (int64_t dp = 1; dp <= 4; dp++)
                for (int64_t pp = 1; pp <= 4; pp++)
                    for (int64_t heads = 1; heads <= tp; heads *= 2)
                        for (int64_t ep = 1; ep <= 4; ep *= 2)
                            for (int64_t etp = 1; etp <= 2; etp++) {
                                int64_t stage = tp * cp * dp;
                                if (stage * pp > 96 || stage % (ep * etp) != 0) continue;
                                mt_grid_shape s = {tp,
                                                   cp,
                                                   dp,
                                                   pp,
                                                   etp,
                                                   ep,
                                                   stage / (ep * etp),
                                                   heads,
                                                   cp % 2 == 0 ? 2 : cp,
                                                   cp == 4,
                                                   pp % 2 ? 0 : heads,
                                                   false};
                                check_shape(&s);
                                shapes++;
                                if (pp > 1 && tp * cp != etp * ep) continue; // see mt_options_check_mapping
                                s.pipeline_before_data = true;
                                check_shape(&s);
                            }
    assert_true(shapes > 500);
}

static void expect_members(const mt_grid_shape *s, mt_group_kind kind, int rank, int count, const int *expected) {
    int members[RANKS];
    assert_int_equal(mt_grid_members(members, s, kind, rank), count);
    assert_memory_equal(members, expected, (size_t)count * sizeof(int));
}

/* The docstring of initialize_model_parallel: 16 GPUs, 2 tensor and 4 pipeline ranks. */
static void groups_are_those_of_megatrons_example(void **state) {
    (void)state;
    mt_grid_shape s = {2, 1, 2, 4, 1, 1, 4, 8, 1, false, 0, false};
    expect_members(&s, MT_GROUP_DATA, 0, 2, (int[]){0, 2});
    expect_members(&s, MT_GROUP_DATA, 7, 2, (int[]){5, 7});
    expect_members(&s, MT_GROUP_DATA, 12, 2, (int[]){12, 14});
    expect_members(&s, MT_GROUP_TENSOR, 9, 2, (int[]){8, 9});
    expect_members(&s, MT_GROUP_PIPELINE, 0, 4, (int[]){0, 4, 8, 12});
    expect_members(&s, MT_GROUP_PIPELINE, 11, 4, (int[]){3, 7, 11, 15});
    expect_members(&s, MT_GROUP_EMBEDDING, 15, 2, (int[]){3, 15});
    expect_members(&s, MT_GROUP_EMBEDDING, 7, 1, (int[]){7});
    expect_members(&s, MT_GROUP_STAGE, 6, 4, (int[]){4, 5, 6, 7});
}

/* The same ranks with --use-tp-pp-dp-mapping: RankGenerator with the order tp-cp-ep-pp-dp. */
static void stages_may_be_neighbours(void **state) {
    (void)state;
    mt_grid_shape s = {2, 1, 2, 4, 1, 1, 4, 8, 1, false, 0, true};
    expect_members(&s, MT_GROUP_TENSOR, 9, 2, (int[]){8, 9});
    expect_members(&s, MT_GROUP_PIPELINE, 0, 4, (int[]){0, 2, 4, 6});
    expect_members(&s, MT_GROUP_PIPELINE, 11, 4, (int[]){9, 11, 13, 15});
    expect_members(&s, MT_GROUP_DATA, 3, 2, (int[]){3, 11});
    expect_members(&s, MT_GROUP_EMBEDDING, 15, 2, (int[]){9, 15});
    expect_members(&s, MT_GROUP_STAGE, 6, 4, (int[]){6, 7, 14, 15});
}

/* The help of --hierarchical-context-parallel-sizes: with "2 4" two adjacent GPUs form the first level, and those with
 * the same odevity the second. */
static void the_levels_of_context_parallelism_are_megatrons(void **state) {
    (void)state;
    mt_grid_shape s = {1, 8, 1, 1, 1, 1, 8, 8, 2, false, 0, false};
    expect_members(&s, MT_GROUP_CONTEXT_A2A, 5, 2, (int[]){4, 5});
    expect_members(&s, MT_GROUP_CONTEXT_RING, 5, 4, (int[]){1, 3, 5, 7});
    s.context_a2a = 0; // p2p and all_gather: one level
    expect_members(&s, MT_GROUP_CONTEXT_A2A, 5, 1, (int[]){5});
    expect_members(&s, MT_GROUP_CONTEXT_RING, 5, 8, (int[]){0, 1, 2, 3, 4, 5, 6, 7});
}

/* Dynamic context parallelism: aligned blocks; none where they are not asked for, or as large as the whole group. */
static void blocks_of_a_context_group_are_aligned_neighbours(void **state) {
    (void)state;
    mt_grid_shape s = {1, 8, 2, 1, 1, 1, 16, 8, 1, true, 0, false};
    expect_members(&s, MT_GROUP_CONTEXT_2, 5, 2, (int[]){4, 5});
    expect_members(&s, MT_GROUP_CONTEXT_4, 13, 4, (int[]){12, 13, 14, 15});
    expect_members(&s, MT_GROUP_CONTEXT_8, 13, 1, (int[]){13});
    s.context_blocks = false;
    expect_members(&s, MT_GROUP_CONTEXT_2, 5, 1, (int[]){5});
}

/* With 2 heads over 8 tensor ranks, four neighbours hold the same one. */
static void ranks_with_the_same_key_head_are_neighbours(void **state) {
    (void)state;
    mt_grid_shape s = {8, 1, 2, 1, 1, 1, 16, 2, 1, false, 0, false};
    expect_members(&s, MT_GROUP_KV_REPLICAS, 5, 4, (int[]){4, 5, 6, 7});
    expect_members(&s, MT_GROUP_KV_REPLICAS, 8, 4, (int[]){8, 9, 10, 11});
    expect_members(&s, MT_GROUP_KEY_REPLICAS, 5, 1, (int[]){5});
    s.num_query_groups = 8, s.linear_key_heads = 4;
    expect_members(&s, MT_GROUP_KV_REPLICAS, 5, 1, (int[]){5});
    expect_members(&s, MT_GROUP_KEY_REPLICAS, 5, 2, (int[]){4, 5});
}

/* Gated delta nets have key heads of their own and Mamba-2 has groups; a short convolution shares channels. */
static void delta_nets_and_mamba_have_key_replicas(void **state) {
    (void)state;
    static const struct {
        mt_attention_variant variant;
        char *layers;
        int64_t heads;
    } models[] = {{MT_VARIANT_NONE, NULL, 0},
                  {MT_VARIANT_GATED_DELTA_NET, "10", 2},
                  {MT_VARIANT_SHORT_CONV, "10", 0},
                  {MT_VARIANT_MAMBA2, "10", 4}};
    for (int i = 0; i < 4; i++) {
        mt_options options = mt_options_plain(2, 32, 8, 64, 16);
        options.tensor_model_parallel_size = 8, options.linear_num_key_heads = 2, options.mamba_num_groups = 4;
        options.experimental_attention_variant = models[i].variant, options.linear_layers = models[i].layers;
        assert_int_equal(mt_grid_shape_of(&options, 8).linear_key_heads, models[i].heads);
    }
}

static void the_table_is_compact_for_64_ranks(void **state) {
    (void)state;
    mt_grid grid = mt_grid_of_one;
    mt_run_options options;
    char text[4096] = "", *line = text;
    mt_options_default(&options);
    options.stack.tensor_model_parallel_size = 4, options.stack.context_parallel_size = 2;
    options.stack.pipeline_model_parallel_size = 4, options.stack.num_query_groups = 2;
    grid.world.size = 64;
    FILE *file = fmemopen(text, sizeof text, "w");
    mt_grid_print(&grid, &options.stack, NULL, file);
    fclose(file);
    mt_options_free(&options);
    assert_non_null(strstr(text, "world               64      1  0-63\n"));
    assert_non_null(strstr(text, "tensor               4     16  0-3 4-7 8-11"));
    assert_non_null(strstr(text, "pipeline             4     16  0-48:16 1-49:16"));
    assert_non_null(strstr(text, "kv-replicas          2     32  0-1 2-3 4-5"));
    assert_non_null(strstr(text, "embedding            2     16  0,48 1,49"));
    assert_null(strstr(text, "expert")); // a dense model has none
    for (char *end; (end = strchr(line, '\n')); line = end + 1) assert_in_range(end - line, 1, 100);
}

static char *print_of(const mt_grid *grid, const mt_options *options, const int *hosts, char text[4096]) {
    FILE *file = fmemopen(memset(text, 0, 4096), 4096, "w");
    mt_grid_print(grid, options, hosts, file);
    fclose(file);
    return text;
}

/* The hosts of eight ranks: one after another, in turn (mpirun --map-by node), and of unequal sizes. */
static void tensor_groups_across_hosts_are_named(void **state) {
    (void)state;
    static const int blocks[8] = {0, 0, 0, 0, 4, 4, 4, 4}, turns[8] = {0, 1, 0, 1, 0, 1, 0, 1},
                     uneven[8] = {0, 0, 0, 3, 3, 3, 3, 3};
    mt_grid grid = mt_grid_of_one;
    mt_options options = mt_options_plain(2, 32, 8, 64, 16);
    char text[4096], layers[] = "11";
    options.tensor_model_parallel_size = 2;
    grid.world.size = 8;
    assert_null(strstr(print_of(&grid, &options, NULL, text), "cross"));
    assert_null(strstr(print_of(&grid, &options, blocks, text), "cross"));
    print_of(&grid, &options, turns, text);
    assert_non_null(strstr(text, "\n4 of 4 tensor groups of 2 ranks cross hosts, such as ranks 0-1: "));
    assert_non_null(strstr(text, "mpirun --map-by slot"));
    print_of(&grid, &options, uneven, text);
    assert_non_null(strstr(text, "\n1 of 4 tensor groups of 2 ranks cross hosts, such as ranks 2-3: "));
    assert_non_null(strstr(text, "take a --tensor-model-parallel-size that divides the ranks of each host"));
    options.tensor_model_parallel_size = 8;
    assert_non_null(strstr(print_of(&grid, &options, blocks, text), "\n1 of 1 tensor groups of 8 ranks cross hosts"));
    options.tensor_model_parallel_size = 1, options.num_experts = 4, options.expert_tensor_parallel_size = 2;
    options.moe_layers = layers;
    assert_null(strstr(print_of(&grid, &options, blocks, text), "cross"));
    print_of(&grid, &options, turns, text);
    assert_non_null(strstr(text, "\n4 of 4 expert-tensor groups of 2 ranks cross hosts, such as ranks 0-1: "));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_are_those_of_the_coordinates_for_many_sizes),
        cmocka_unit_test(groups_are_those_of_megatrons_example),
        cmocka_unit_test(stages_may_be_neighbours),
        cmocka_unit_test(the_levels_of_context_parallelism_are_megatrons),
        cmocka_unit_test(blocks_of_a_context_group_are_aligned_neighbours),
        cmocka_unit_test(ranks_with_the_same_key_head_are_neighbours),
        cmocka_unit_test(delta_nets_and_mamba_have_key_replicas),
        cmocka_unit_test(the_table_is_compact_for_64_ranks),
        cmocka_unit_test(tensor_groups_across_hosts_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
