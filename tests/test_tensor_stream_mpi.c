/* test_tensor_stream_mpi.c: whole tensors from four ranks. On every layout the weights that a stream gives are those of
 * the folder that was loaded, bit for bit, and gradients after a step those of Hugging Face transformers. Run by
 * mpirun. */
#include "golden.h"

#include "../data/checkpoint/tensor_stream.h"

enum { NUM_RANKS = 4 };

static mt_grid world;

static const struct {
    const char *family, *words;
} cases[] = {
    {"llama", "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"},
    {"gpt2", "--tensor-model-parallel-size 4"},
    {"gpt2", "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim"},
    {"qwen3", "--data-parallel-sharding-strategy optim_grads --overlap-grad-reduce"},
    {"llama3_rope_tied", "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params"},
    {"llama", "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather"},
    {"qwen2", "--context-parallel-size 2 --tensor-model-parallel-size 2"},
    {"mixtral", "--expert-model-parallel-size 4"},
    {"gpt_oss", "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"},
    {"qwen3_moe", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --data-parallel-sharding-strategy "
                  "optim_grads_params"},
    {"deepseek_v3", "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"},
    {"qwen3_next", "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"},
};

/* Compares a stream to `root` with a folder's tensors by the norm of the difference, or bit for bit.
 * Returns the number of tensors. */
static int64_t compare(fixture *f, mt_streamed streamed, int root, const char *folder, const char *words, bool exact) {
    mt_error error = {{0}};
    mt_tensor_stream *stream;
    mt_whole_tensor tensor;
    mt_safetensors *set;
    int64_t count = 0;
    char before[160] = "";
    if (mt_safetensors_open_folder(&set, folder, "model", &error) != 0) fail_msg("%s", error.text);
    if (mt_tensor_stream_open(&stream, f->model, streamed, root, &error) != 0) fail_msg("%s", error.text);
    for (; mt_tensor_stream_next(stream, &tensor); count++) {
        assert_true(strcmp(before, tensor.name) < 0); // by name, each once
        snprintf(before, sizeof before, "%s", tensor.name);
        const mt_tensor_info *info = mt_safetensors_find(set, tensor.name);
        if (!info) fail_msg("%s, %s: %s is not in the folder", f->folder, words, tensor.name);
        assert_int_equal(info->dtype, MT_F32);
        assert_int_equal(info->num_dims, tensor.num_dims);
        assert_memory_equal(info->shape, tensor.shape, (size_t)tensor.num_dims * sizeof *tensor.shape);
        assert_int_equal(tensor.values != NULL, world.world.rank == root);
        if (!tensor.values) continue;
        const float *expected = info->data;
        if (exact && memcmp(expected, tensor.values, (size_t)tensor.count * 4) != 0)
            fail_msg("%s, %s: other weights of %s", f->folder, words, tensor.name);
        double distance = 0, norm = 0;
        for (int64_t i = 0; i < tensor.count; i++) {
            double e = (double)expected[i];
            double d = (double)tensor.values[i] / (streamed == MT_STREAM_GRADIENTS ? TOKENS : 1) - e;
            distance += d * d, norm += e * e;
        }
        if (!(sqrt(distance) <=
              linear_attention_error(f->folder + strlen("tests/golden/hf/"), 1e-4) * sqrt(norm) + 1e-20))
            fail_msg("%s, %s: %s is off by %g of its norm", f->folder, words, tensor.name, sqrt(distance / norm));
    }
    mt_tensor_stream_close(stream);
    mt_safetensors_close(set);
    return count;
}

static int64_t tensors_of(const char *folder) {
    mt_error error;
    mt_safetensors *set;
    assert_int_equal(mt_safetensors_open_folder(&set, folder, "model", &error), 0);
    int64_t count = mt_safetensors_count(set);
    mt_safetensors_close(set);
    return count;
}

static void open_case(fixture *f, mt_grid *grid, const char *family, const char *words) {
    mt_error error = {{0}};
    char all[512];
    snprintf(all, sizeof all, "%s --lr 1e-30 --min-lr 1e-30", words);
    more_options = all;
    *f = open_family(family, 1, NUM_RANKS, false);
    more_options = "";
    *grid = mt_grid_of_one;
    grid->world = world.world;
    if (mt_grid_build(grid, &f->options.stack, &error) != 0) fail_msg("%s, %s: %s", family, words, error.text);
    create_model(f, grid);
}

static void close_case(fixture *f, mt_grid *grid) {
    close_family(f);
    grid->world = (mt_group){.name = "world", .size = 1}; // `world` keeps the job's
    mt_grid_clear(grid);
}

static void step(fixture *f, const mt_grid *grid) {
    mt_error error;
    mt_run_state state = {0};
    mt_metrics metrics;
    source from = {f, 0, 1, grid->data.rank, grid->data.size};
    if (mt_train_step(f->model, &state, SEQUENCES / grid->data.size, next_micro_batch, &from, &f->batch, &metrics,
                      &error) != 0)
        fail_msg("%s", error.text);
}

static void weights_are_those_of_the_folder(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        mt_grid grid;
        open_case(&f, &grid, cases[i].family, cases[i].words);
        int64_t count = compare(&f, MT_STREAM_WEIGHTS, (int)i % NUM_RANKS, f.folder, cases[i].words, true);
        assert_int_equal(count, tensors_of(f.folder));
        step(&f, &grid); // of hardly any length; weights may have to be gathered again
        compare(&f, MT_STREAM_WEIGHTS, 0, f.folder, cases[i].words, false);
        close_case(&f, &grid);
    }
}

static void gradients_are_those_of_transformers(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        mt_grid grid;
        char folder[320];
        open_case(&f, &grid, cases[i].family, cases[i].words);
        snprintf(folder, sizeof folder, "%s/grads", f.folder);
        step(&f, &grid);
        int64_t count = compare(&f, MT_STREAM_GRADIENTS, (int)i % NUM_RANKS, folder, cases[i].words, false);
        assert_int_equal(count, tensors_of(folder));
        close_case(&f, &grid);
    }
}

static void streams_are_refused_on_every_rank(void **state) {
    (void)state;
    fixture f;
    mt_grid grid;
    mt_error error = {{0}};
    mt_tensor_stream *stream = NULL;
    open_case(&f, &grid, "llama", "--data-parallel-sharding-strategy optim_grads_params");
    assert_int_equal(mt_tensor_stream_open(&stream, f.model, MT_STREAM_WEIGHTS, NUM_RANKS, &error), -1);
    assert_string_equal(error.text, "a stream of tensors to rank 4: the job has ranks 0 to 3");
    step(&f, &grid);
    assert_int_equal(mt_model_rest(f.model, 1u << MT_PART_GRADS, &error), 0);
    assert_int_equal(mt_tensor_stream_open(&stream, f.model, MT_STREAM_GRADIENTS, 0, &error), -1);
    assert_non_null(strstr(error.text, "mt_model_wake"));
    assert_null(stream);
    close_case(&f, &grid);
}

int main(int argc, char **argv) {
    mt_error error;
    mt_run_options options;
    mt_grid_start(&world, &argc, &argv);
    if (world.world.size != NUM_RANKS) mt_die("run it on %d ranks", NUM_RANKS);
    mt_options_default(&options);
    if (mt_grid_build(&world, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_those_of_the_folder),
        cmocka_unit_test(gradients_are_those_of_transformers),
        cmocka_unit_test(streams_are_refused_on_every_rank),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
