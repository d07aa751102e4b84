/* test_context_parallel_mpi8.c: attention and training with context parallelism equal those of one rank, for every
 * communication type. Run by mpirun on a power of two of ranks; tests groups of every size up to the world's. */
#include "context_parallel.h"

#include "golden.h"

/* ---- batches ----------------------------------------------------------------------------------------------------- */

static void shards_have_every_token_once_in_order(void **state) {
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

static void sequences_that_cannot_be_sharded_are_refused(void **state) {
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

/* Ten steps of a family on 2 x 4, 4 x 2 or 8 x 1 context x data ranks equal PyTorch's on one. */
static void train_over(const char *family, int cp, const char *type) {
    char text[200];
    snprintf(text, sizeof text, "--context-parallel-size %d --cp-comm-type %s", cp, type);
    more_options = text;
    fixture f = open_family(family, 1, grid.world.size, false);
    mt_grid built = grid; // a new grid on the same world
    mt_error error;
    double losses[STEPS], norms[STEPS];
    if (mt_grid_build(&built, &f.options, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(built.context.size, cp);
    mt_options_free(&f.options), mt_batch_free(&f.batch), free(f.tokens);
    train_ten_steps(family, &built, SEQUENCES / built.data.size, false, losses, norms);
    assert_expected(family, losses, norms);
    mt_grid_clear(&built);
    more_options = "";
}

static void every_comm_type_trains_like_pytorch_on_one_rank(void **state) {
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

/* A document of 15 tokens on 8 ranks ends training with an error. */
static void training_names_a_sequence_that_cannot_be_sharded(void **state) {
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
    mt_grid_clear(&built);
    more_options = "";
}

int main(int argc, char **argv) {
    mt_grid_start(&grid, &argc, &argv);
    if (!grid.world.comm) mt_die("start me with mpirun");
    ops = &mt_cpu_ops;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_have_every_token_once_in_order),
        cmocka_unit_test(sequences_that_cannot_be_sharded_are_refused),
        cmocka_unit_test(every_comm_type_equals_attention_on_one_rank),
        cmocka_unit_test(every_comm_type_equals_attention_on_one_rank_to_bf16_rounding),
        cmocka_unit_test(every_comm_type_trains_like_pytorch_on_one_rank),
        cmocka_unit_test(training_names_a_sequence_that_cannot_be_sharded),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&grid);
    return failures;
}
