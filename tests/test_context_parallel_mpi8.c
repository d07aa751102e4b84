/* test_context_parallel_mpi8.c: attention and training with context parallelism equal those of one rank, for every
 * communication type. Run by mpirun on a power of two of ranks; tests groups of every size up to the world's. */
// Sections of megatron.c: §9h
#include "context_parallel.h"

#include "golden.h"

/* ---- batches ----------------------------------------------------------------------------------------------------- */

/* The rank of each token by the zig-zag of one sequence. */
static int64_t zigzag_owner(int64_t t, int64_t T, int64_t cp) {
    int64_t chunk = t / (T / (2 * cp));
    return chunk < cp ? chunk : 2 * cp - 1 - chunk;
}

static void one_sequence_is_cut_in_a_zigzag(void **state) {
    (void)state;
    mt_batch whole;
    mt_batch_alloc(&whole, MAX_TOKENS);
    for (int64_t cp = 1; cp <= 8; cp *= 2) {
        int64_t cuts[17], T = 26 * cp;
        int32_t rows[26];
        whole.num_tokens = T, whole.num_spans = 1, whole.spans[0] = (mt_span){0, T, 0, T, true};
        mt_context_cut(cuts, &whole, cp, 0);
        for (int64_t rank = 0; rank < cp; rank++) {
            mt_context_tokens(rows, cuts, cp, rank);
            for (int i = 0; i < 26; i++) assert_int_equal(zigzag_owner(rows[i], T, cp), rank);
        }
    }
    mt_batch_free(&whole);
}

/* Of sequences of any length, every rank has the same number of tokens, each token is on one rank, and no rank's
 * queries see many more keys than another's. */
static void cuts_share_tokens_and_keys(void **state) {
    (void)state;
    mt_batch whole, local;
    mt_batch_alloc(&whole, MAX_TOKENS), mt_batch_alloc(&local, MAX_TOKENS);
    for (int64_t cp = 1; cp <= 8; cp *= 2) {
        int seen[MAX_TOKENS] = {0};
        int64_t cuts[17], T, most = 0, all = 0;
        int32_t rows[MAX_TOKENS];
        fill_whole_batch(&whole, cp);
        T = whole.num_tokens / cp;
        mt_context_cut(cuts, &whole, cp, 0);
        for (int64_t rank = 0; rank < cp; rank++) {
            int64_t keys = 0;
            mt_context_tokens(rows, cuts, cp, rank);
            mt_batch_take(&local, &whole, rows, T);
            assert_int_equal(local.num_tokens, T);
            for (int64_t t = 0; t < T; t++) {
                int64_t from = rows[t];
                assert_true(t == 0 || rows[t - 1] < from);
                assert_int_equal(local.positions[t], whole.positions[from]);
                assert_int_equal(local.tokens[t], whole.tokens[from]);
                assert_int_equal(local.labels[t], whole.labels[from]);
                assert_int_equal(local.token_index[t], whole.token_index[from]);
                assert_true(local.loss_mask[t] == whole.loss_mask[from]);
                keys += whole.positions[from] + 1;
                seen[from]++;
            }
            most = mt_max(most, keys), all += keys;
        }
        for (int64_t t = 0; t < whole.num_tokens; t++) assert_int_equal(seen[t], 1);
        assert_true((double)most * (double)cp < 1.25 * (double)all);
    }
    mt_batch_free(&whole), mt_batch_free(&local);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* Ten steps of a family on 2 x 4, 4 x 2 or 8 x 1 context x data ranks equal PyTorch's on one. */
static void train_over(const char *family, int cp, const char *type) {
    char text[200];
    snprintf(text, sizeof text, "--context-parallel-size %d --cp-comm-type %s", cp, type);
    more_options = text;
    fixture f = open_family(family, 1, grid.world.size, false);
    mt_grid built = grid; // a new grid on the same world
    mt_error error;
    double losses[STEPS], norms[STEPS];
    if (mt_grid_build(&built, &f.options.stack, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(built.context.size, cp);
    mt_options_free(&f.options), mt_batch_free(&f.batch), free(f.tokens);
    train_ten_steps(family, &built, SEQUENCES / built.data.size, false, losses, norms);
    assert_expected(family, losses, norms);
    mt_grid_clear(&built);
    more_options = "";
}

static bool has_windows(const char *family) {
    char path[300];
    json_t *type;
    size_t i;
    bool found = false;
    snprintf(path, sizeof path, "tests/golden/hf/%s/config.json", family);
    json_t *config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    json_array_foreach(json_object_get(config, "layer_types"), i, type) {
        found |= strcmp(json_string_value(type), "sliding_attention") == 0;
    }
    json_decref(config);
    return found;
}

static void every_comm_type_trains_like_pytorch_on_one_rank(void **state) {
    (void)state;
    if (grid.world.size != 8) skip();
    for (int k = 0; k < NUM_FAMILIES; k++) { // a ring has neither windows nor selected keys
        bool gathers = has_windows(families[k]) || has_indexer(families[k]);
        train_over(families[k], 4, gathers ? "all_gather" : "p2p");
    }
    train_over("qwen3_next", 8, "p2p");
    train_over("qwen3_5", 2, "a2a");
    train_over("nemotron_h", 8, "all_gather");
    train_over("granitemoehybrid", 2, "a2a");
    train_over("kimi_linear", 8, "p2p");
    train_over("gemma3", 2, "a2a");
    train_over("llama", 8, "p2p");
    train_over("gpt2", 8, "all_gather");
    train_over("qwen3", 4, "all_gather");
    train_over("gpt2", 4, "a2a");
    train_over("llama", 2, "a2a");
    train_over("qwen3", 4, "a2a+p2p --hierarchical-context-parallel-sizes 2 2");
    train_over("gpt2", 8, "a2a+p2p --hierarchical-context-parallel-sizes 4 2");
    train_over("llama", 8, "a2a+p2p --hierarchical-context-parallel-sizes 2 4");
}

int main(int argc, char **argv) {
    mt_grid_start(&grid, &argc, &argv);
    if (!grid.world.comm) mt_die("start me with mpirun");
    ops = &mt_cpu_ops;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_sequence_is_cut_in_a_zigzag),
        cmocka_unit_test(cuts_share_tokens_and_keys),
        cmocka_unit_test(every_comm_type_equals_attention_on_one_rank),
        cmocka_unit_test(every_comm_type_equals_attention_on_one_rank_to_bf16_rounding),
        cmocka_unit_test(every_comm_type_trains_like_pytorch_on_one_rank),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
