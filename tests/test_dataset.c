/* test_dataset.c: indexed datasets, Megatron's order of samples, samplers and batches. */
#include "data/base/file.h"
#include "data/datasets/dataset.h"
#include "data/datasets/gpt_dataset.h"
#include "data/datasets/random_order.h"
#include "data/datasets/loader.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define GOLDEN "tests/golden/megatron/"

/* ---- helpers ----------------------------------------------------------------------------------------------------- */

/* A temporary directory for the files of a test. */
typedef struct scratch {
    char path[64];
} scratch;

static scratch scratch_create(void) {
    scratch directory = {"/tmp/mt-test-XXXXXX"};
    assert_non_null(mkdtemp(directory.path));
    return directory;
}

static char *scratch_file(const scratch *directory, const char *name) {
    char *path = mt_malloc(256);
    snprintf(path, 256, "%s/%s", directory->path, name);
    return path;
}

static void scratch_remove(const scratch *directory) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", directory->path);
    assert_int_equal(system(command), 0);
}

static void *read_file(const char *path, int64_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s is absent", path);
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    void *bytes = mt_malloc(*size);
    assert_int_equal(fread(bytes, 1, (size_t)*size, file), *size);
    fclose(file);
    return bytes;
}

static void write_file(const char *path, const void *bytes, int64_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, (size_t)size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void assert_same_file(const char *one, const char *other) {
    int64_t one_size, other_size;
    void *one_bytes = read_file(one, &one_size), *other_bytes = read_file(other, &other_size);
    assert_int_equal(one_size, other_size);
    assert_memory_equal(one_bytes, other_bytes, (size_t)one_size);
    free(one_bytes);
    free(other_bytes);
}

static void assert_ok(int result, const mt_error *error) {
    if (result != 0) fail_msg("%s", error->text);
}

static void assert_refused(int result, const mt_error *error, const char *words) {
    assert_int_equal(result, -1);
    if (!strstr(error->text, words)) fail_msg("\"%s\" does not say \"%s\"", error->text, words);
    assert_null(strchr(error->text, '\n'));
}

/* A configuration of the golden files: seq 32, seed 1234, tokens up to 70,000. */
static mt_data_config golden_config(void) {
    return (mt_data_config){.seq_length = 32, .seed = 1234, .vocab_size = 70001, .eod_id = -1};
}

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

static void mt19937_is_the_published_generator(void **state) {
    (void)state;
    mt_mt19937 random;
    mt_mt19937_seed(&random, 1234); // numpy.random.RandomState(1234).randint(0, 2**32, dtype=uint32)
    const uint32_t numpy[] = {822569775, 2137449171, 2671936806, 3512589365};
    for (int i = 0; i < 4; i++) assert_int_equal(mt_mt19937_next(&random), numpy[i]);
    mt_mt19937_seed(&random, 5489); // the C++ standard gives the 10,000th number of std::mt19937
    for (int i = 0; i < 9999; i++) mt_mt19937_next(&random);
    assert_int_equal(mt_mt19937_next(&random), 4123659995u);
}

static void shuffle_equals_numpy_random_state(void **state) {
    (void)state;
    const uint32_t expected[] = {3, 13, 2, 16, 14, 5, 4, 0, 8, 18, 17, 11, 10, 9, 7, 1, 19, 12, 6, 15};
    const uint32_t expected_next[] = {6, 4, 1, 5, 3, 0, 2};
    uint32_t items[20], next[7], *many = mt_malloc(70000 * (int64_t)sizeof *many);
    for (uint32_t i = 0; i < 20; i++) items[i] = i;
    for (uint32_t i = 0; i < 7; i++) next[i] = i;
    mt_mt19937 random;
    mt_mt19937_seed(&random, 1234);
    mt_numpy_shuffle(&random, items, 20);
    mt_numpy_shuffle(&random, next, 7);
    assert_memory_equal(items, expected, sizeof items);
    assert_memory_equal(next, expected_next, sizeof next);

    for (uint32_t i = 0; i < 70000; i++) many[i] = i;
    mt_mt19937_seed(&random, 42);
    mt_numpy_shuffle(&random, many, 70000);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 70000; i++) sum += many[i] * i % 1000003;
    assert_int_equal(many[0], 46730);
    assert_int_equal(many[69999], 15795);
    assert_true(sum == 34960201271u);
    free(many);
}

static void randperm_equals_torch(void **state) {
    (void)state;
    uint32_t permutation[10];
    const uint32_t seed_0[] = {4, 1, 7, 5, 3, 9, 0, 8, 6, 2}, seed_42[] = {2, 6, 1, 8, 4, 5, 0, 9, 3, 7};
    mt_torch_randperm(permutation, 10, 0);
    assert_memory_equal(permutation, seed_0, sizeof seed_0);
    mt_torch_randperm(permutation, 10, 42);
    assert_memory_equal(permutation, seed_42, sizeof seed_42);
}

static void weights_are_normalized_in_numpys_order_of_summation(void **state) {
    (void)state;
    double weights[300], normalized[300];
    for (int i = 0; i < 300; i++) weights[i] = 0.1 + 1.0 / (3 + i);
    mt_weights_normalize(normalized, weights, 300);
    assert_true(normalized[0] == weights[0] / 34.78929739771387);
    mt_weights_normalize(normalized, weights, 100);
    assert_true(normalized[0] == weights[0] / 13.707082429307258);
}

/* ---- Megatron's order -------------------------------------------------------------------------------------------- */

static void check_samples(const mt_dataset *dataset, const json_t *samples) {
    int32_t tokens[33];
    mt_error error;
    for (size_t i = 0; i < json_array_size(samples); i++) {
        const json_t *sample = json_array_get(samples, i), *ids = json_object_get(sample, "tokens");
        assert_ok(mt_dataset_get(dataset, (int64_t)i, tokens, &error), &error);
        assert_int_equal(json_array_size(ids), 32);
        for (size_t t = 0; t < 32; t++) assert_int_equal(tokens[t], json_integer_value(json_array_get(ids, t)));
        assert_int_equal(tokens[32], json_integer_value(json_object_get(sample, "label_last")));
    }
}

static void check_blend(const mt_dataset *dataset, const json_t *sources, const json_t *indices) {
    for (size_t i = 0; i < json_array_size(sources); i++) {
        int64_t source, index;
        mt_blended_dataset_locate(dataset, (int64_t)i, &source, &index);
        assert_int_equal(source, json_integer_value(json_array_get(sources, i)));
        assert_int_equal(index, json_integer_value(json_array_get(indices, i)));
    }
}

/* The words of --data-path for a golden case. */
static mt_strings golden_words(const json_t *test) {
    const json_t *paths = json_object_get(test, "paths"), *weights = json_object_get(test, "weights");
    mt_strings words = {0, mt_calloc(16 * (int64_t)sizeof *words.items)};
    for (size_t i = 0; i < json_array_size(paths); i++) {
        char word[128];
        if (json_is_array(weights)) {
            snprintf(word, sizeof word, "%.17g", json_number_value(json_array_get(weights, i)));
            words.items[words.count++] = mt_strdup(word);
        }
        snprintf(word, sizeof word, GOLDEN "%s", json_string_value(json_array_get(paths, i)));
        words.items[words.count++] = mt_strdup(word);
    }
    return words;
}

static void check_golden_case(size_t number) {
    json_error_t json_error;
    json_t *root = json_load_file(GOLDEN "gpt_dataset.json", 0, &json_error);
    if (!root) fail_msg("%s", json_error.text);
    const json_t *test = json_array_get(root, number), *splits = json_object_get(test, "splits");
    mt_data_config config = golden_config();
    config.data_path = golden_words(test);
    config.split = json_string_value(json_object_get(test, "split"));
    config.seed = json_integer_value(json_object_get(test, "seed"));
    assert_int_equal(json_integer_value(json_object_get(test, "seq")), 32);
    for (int s = 0; s < MT_NUM_SPLITS; s++)
        config.sizes[s] = json_integer_value(json_array_get(json_object_get(test, "sizes"), (size_t)s));
    mt_data *data;
    mt_error error;
    assert_ok(mt_data_open(&data, &config, &error), &error);
    for (int s = 0; s < MT_NUM_SPLITS; s++) {
        const json_t *expected = json_array_get(splits, (size_t)s);
        const mt_dataset *dataset = mt_data_split(data, s);
        if (json_is_null(expected)) {
            assert_null(dataset);
            continue;
        }
        assert_int_equal(dataset->num_samples, json_integer_value(json_object_get(expected, "len")));
        assert_true(json_array_size(json_object_get(expected, "samples")) > 0);
        check_samples(dataset, json_object_get(expected, "samples"));
        if (json_object_get(expected, "dataset_index"))
            check_blend(dataset, json_object_get(expected, "dataset_index"),
                        json_object_get(expected, "dataset_sample_index"));
    }
    mt_data_close(data);
    for (int64_t i = 0; i < config.data_path.count; i++) free(config.data_path.items[i]);
    free(config.data_path.items);
    json_decref(root);
}

static void several_epochs_equal_megatrons_order(void **state) {
    (void)state;
    check_golden_case(0);
}

static void a_partial_epoch_equals_megatrons_order(void **state) {
    (void)state;
    check_golden_case(1);
}

static void a_weighted_blend_equals_megatrons_order(void **state) {
    (void)state;
    check_golden_case(2);
}

static void paths_without_weights_are_read_once_in_proportion_to_their_size(void **state) {
    (void)state;
    char *words[] = {GOLDEN "alpha", GOLDEN "beta", GOLDEN "alpha"};
    mt_data_config config = golden_config();
    config.data_path = (mt_strings){3, words};
    config.split = "100";
    config.sizes[MT_SPLIT_TRAIN] = 1000;
    mt_data *data;
    mt_error error;
    assert_refused(mt_data_open(&data, &config, &error), &error, "hold 211 samples");
    config.dataloader_type = MT_DATALOADER_CYCLIC;
    assert_ok(mt_data_open(&data, &config, &error), &error);
    const mt_dataset *train = mt_data_split(data, MT_SPLIT_TRAIN);
    int64_t taken[3] = {0}, source, index;
    for (int64_t i = 0; i < train->num_samples; i++) {
        mt_blended_dataset_locate(train, i, &source, &index);
        assert_int_equal(index, taken[source]++);
    }
    assert_int_equal(taken[0], (2817 - 1) / 32); // all of one epoch
    assert_int_equal(taken[1], (1128 - 1) / 32);
    assert_int_equal(taken[2], (2817 - 1) / 32);
    mt_data_close(data);
}

static void splits_may_have_their_own_paths(void **state) {
    (void)state;
    char *train_words[] = {GOLDEN "alpha"}, *valid_words[] = {"0.5", GOLDEN "beta"};
    mt_data_config config = golden_config();
    config.split_data_path[MT_SPLIT_TRAIN] = (mt_strings){1, train_words};
    config.split_data_path[MT_SPLIT_VALID] = (mt_strings){2, valid_words};
    config.sizes[MT_SPLIT_TRAIN] = 30;
    config.sizes[MT_SPLIT_VALID] = config.sizes[MT_SPLIT_TEST] = 10;
    mt_data *data;
    mt_error error;
    assert_ok(mt_data_open(&data, &config, &error), &error);
    assert_int_equal(mt_data_split(data, MT_SPLIT_TRAIN)->num_samples, 88);
    assert_int_equal(mt_data_split(data, MT_SPLIT_VALID)->num_samples, (1128 - 1) / 32);
    assert_null(mt_data_split(data, MT_SPLIT_TEST));
    mt_data_close(data);
}

static void splits_and_blends_are_parsed_as_megatron_does(void **state) {
    (void)state;
    double edges[4];
    mt_error error;
    assert_ok(mt_split_parse(edges, "969, 30, 1", &error), &error);
    assert_true(edges[0] == 0 && edges[1] == 0.969 && edges[2] == 0.969 + 0.03 && fabs(edges[3] - 1) < 1e-15);
    assert_ok(mt_split_parse(edges, "1", &error), &error);
    assert_true(edges[1] == 1 && edges[2] == 1 && edges[3] == 1);
    const char *bad_splits[] = {"", "0,0,0", "-1,2", "a", "1,2,3,4", "90;10", "1,,nan", "1e999"};
    for (size_t i = 0; i < sizeof bad_splits / sizeof *bad_splits; i++)
        assert_refused(mt_split_parse(edges, bad_splits[i], &error), &error, "--split");

    mt_blend blend;
    char *pairs[] = {"30", "a", "7e1", "b"}, *paths[] = {"a", "b"}, *mixed[] = {"1", "a", "b", "c"},
         *negative[] = {"-1", "a"}, *huge[] = {"1e308", "a", "1e308", "b"};
    assert_ok(mt_blend_parse(&blend, &(mt_strings){4, pairs}, "--data-path", &error), &error);
    assert_int_equal(blend.count, 2);
    assert_string_equal(blend.paths[1], "b");
    assert_true(blend.weights[0] == 30 && blend.weights[1] == 70);
    mt_blend_free(&blend);
    assert_ok(mt_blend_parse(&blend, &(mt_strings){2, paths}, "--data-path", &error), &error);
    assert_int_equal(blend.count, 2);
    assert_null(blend.weights);
    mt_blend_free(&blend);
    char *odd[] = {"0.7", "x", "0.3"}, *behind[] = {"a", "0.5", "b", "0.5"}, *two[] = {"0.7", "0.3", "a"};
    const struct {
        mt_strings words;
        const char *expected;
    } faults[] = {{{4, mixed}, "--data-path: b has no weight before it; give one path, several paths, or a weight"},
                  {{3, odd}, "--data-path: the weight 0.3 has no path after it; give one path"},
                  {{4, behind}, "--data-path: a has no weight before it"},
                  {{2, odd + 1}, "--data-path: x has no weight before it"},
                  {{1, odd}, "--data-path: the weight 0.7 has no path after it"},
                  {{3, two}, "--data-path: the weight 0.7 has no path after it"}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        assert_refused(mt_blend_parse(&blend, &faults[i].words, "--data-path", &error), &error, faults[i].expected);
    assert_refused(mt_blend_parse(&blend, &(mt_strings){2, negative}, "--data-path", &error), &error, "positive");
    assert_refused(mt_blend_parse(&blend, &(mt_strings){4, huge}, "--data-path", &error), &error, "sum of the weights");
}

static void only_the_training_split_must_have_documents(void **state) {
    (void)state;
    char *words[] = {GOLDEN "beta"};
    mt_data_config config = golden_config();
    config.data_path = (mt_strings){1, words};
    config.split = "999,1,0";
    config.sizes[MT_SPLIT_TRAIN] = config.sizes[MT_SPLIT_VALID] = config.sizes[MT_SPLIT_TEST] = 10;
    mt_data *data;
    mt_error error;
    assert_ok(mt_data_open(&data, &config, &error), &error);
    assert_null(mt_data_split(data, MT_SPLIT_VALID));
    mt_data_close(data);
    config.split = "1,999,0";
    assert_refused(mt_data_open(&data, &config, &error), &error, "hold no tokens");
    config.split = "0,1,0";
    assert_refused(mt_data_open(&data, &config, &error), &error, "--split 0,1,0 leaves no data for training");
    config.split = "0,0,1";
    assert_refused(mt_data_open(&data, &config, &error), &error, "--split 0,0,1 leaves no data for training");
}

static void exactly_one_source_must_be_named(void **state) {
    (void)state;
    char *words[] = {GOLDEN "alpha"};
    mt_data_config config = golden_config();
    mt_data *data;
    mt_error error;
    assert_refused(mt_data_open(&data, &config, &error), &error, "exactly one");
    config.data_path = (mt_strings){1, words};
    config.mock_data = true;
    assert_refused(mt_data_open(&data, &config, &error), &error, "exactly one");
}

/* ---- indexed files ----------------------------------------------------------------------------------------------- */

/* Copies a dataset through the reader and the writer. */
static void rewrite(const char *prefix, const char *copy) {
    mt_indexed_dataset *dataset;
    mt_indexed_writer *writer;
    mt_error error;
    assert_ok(mt_indexed_dataset_open(&dataset, prefix, &error), &error);
    const mt_indexed_index *index = mt_indexed_dataset_index(dataset);
    assert_ok(mt_indexed_writer_open(&writer, copy, index->dtype, &error), &error);
    int32_t *tokens = mt_malloc(1 << 20);
    for (int64_t i = 0; i < index->num_sequences; i++) {
        int32_t length = (int32_t)mt_indexed_dataset_length(dataset, i);
        assert_ok(mt_indexed_dataset_get(dataset, i, 0, length, 70001, tokens, &error), &error);
        assert_ok(mt_indexed_writer_add_document(writer, tokens, &length, 1, &error), &error);
    }
    assert_ok(mt_indexed_writer_seal(writer, &error), &error);
    assert_ok(mt_indexed_writer_publish(writer, &error), &error);
    mt_indexed_writer_close(writer);
    mt_indexed_dataset_close(dataset);
    free(tokens);
}

static void check_rewritten(const char *prefix) {
    scratch directory = scratch_create();
    char *copy = scratch_file(&directory, "copy"), one[256], other[256];
    rewrite(prefix, copy);
    for (int i = 0; i < 2; i++) {
        snprintf(one, sizeof one, "%s.%s", prefix, i ? "idx" : "bin");
        snprintf(other, sizeof other, "%s.%s", copy, i ? "idx" : "bin");
        assert_same_file(one, other);
    }
    free(copy);
    scratch_remove(&directory);
}

static void rewritten_u16_and_i32_files_are_megatrons_byte_for_byte(void **state) {
    (void)state;
    check_rewritten(GOLDEN "alpha");
    check_rewritten(GOLDEN "beta");
}

static void a_dataset_written_by_megatron_is_read_and_rewritten(void **state) {
    (void)state;
    const char *shared = getenv("MT_SHARED") ? getenv("MT_SHARED") : "../shared";
    char prefix[512], path[600];
    snprintf(prefix, sizeof prefix, "%s/indexed/bigscience_meg-gpt2-openwebtext_text_document", shared);
    snprintf(path, sizeof path, "%s.idx", prefix);
    if (access(path, R_OK) != 0) {
        print_message("skipped: %s is absent\n", path);
        skip();
    }
    mt_indexed_dataset *dataset;
    mt_error error;
    assert_ok(mt_indexed_dataset_open(&dataset, prefix, &error), &error);
    const mt_indexed_index *index = mt_indexed_dataset_index(dataset);
    int64_t tokens = 0;
    for (int64_t i = 0; i < index->num_sequences; i++) tokens += mt_indexed_dataset_length(dataset, i);
    assert_int_equal(index->num_documents, 1000);
    assert_int_equal(tokens, 1361845);
    mt_indexed_dataset_close(dataset);
    check_rewritten(prefix);
}

static void documents_may_have_several_sequences_or_none(void **state) {
    (void)state;
    scratch directory = scratch_create();
    char *prefix = scratch_file(&directory, "d");
    mt_indexed_writer *writer;
    mt_indexed_dataset *dataset;
    mt_error error;
    const int32_t tokens[] = {1, 2, 3, 4, 5, 70000}, lengths[] = {2, 0, 4};
    assert_ok(mt_indexed_writer_open(&writer, prefix, mt_indexed_dtype_for_vocab(70001), &error), &error);
    assert_ok(mt_indexed_writer_add_document(writer, tokens, lengths, 3, &error), &error);
    assert_ok(mt_indexed_writer_add_document(writer, NULL, NULL, 0, &error), &error);
    assert_ok(mt_indexed_writer_add_document(writer, tokens + 1, lengths, 1, &error), &error);
    assert_ok(mt_indexed_writer_seal(writer, &error), &error);
    assert_ok(mt_indexed_writer_publish(writer, &error), &error);
    mt_indexed_writer_close(writer);

    assert_ok(mt_indexed_dataset_open(&dataset, prefix, &error), &error);
    assert_int_equal(mt_indexed_dataset_index(dataset)->num_sequences, 4);
    assert_int_equal(mt_indexed_dataset_index(dataset)->num_documents, 3);
    int32_t read[4];
    assert_ok(mt_indexed_dataset_get(dataset, 2, 1, 3, 70001, read, &error), &error);
    assert_memory_equal(read, tokens + 3, sizeof(int32_t) * 3);
    assert_refused(mt_indexed_dataset_get(dataset, 2, 0, 4, 70000, read, &error), &error,
                   "document 0 holds token 70000");
    assert_non_null(strstr(error.text, prefix));
    mt_indexed_dataset_close(dataset);
    free(prefix);
    scratch_remove(&directory);
}

static void u16_is_chosen_below_65500(void **state) {
    (void)state;
    assert_int_equal(mt_indexed_dtype_for_vocab(65499), MT_U16);
    assert_int_equal(mt_indexed_dtype_for_vocab(65500), MT_I32);
}

static void an_unpublished_writer_leaves_nothing_behind(void **state) {
    (void)state;
    scratch directory = scratch_create();
    char *prefix = scratch_file(&directory, "d");
    mt_indexed_writer *writer;
    mt_error error;
    const int32_t tokens[] = {1, 2}, lengths[] = {2};
    assert_ok(mt_indexed_writer_open(&writer, prefix, MT_U16, &error), &error);
    assert_ok(mt_indexed_writer_add_document(writer, tokens, lengths, 1, &error), &error);
    assert_ok(mt_indexed_writer_seal(writer, &error), &error);
    mt_indexed_writer_close(writer);
    assert_int_equal(rmdir(directory.path), 0); // fails unless the directory is empty
    assert_refused(mt_indexed_writer_open(&writer, prefix, MT_U16, &error), &error, "cannot be written");
    free(prefix);
}

static void put(uint8_t *bytes, int64_t offset, uint64_t value, int64_t size) {
    memcpy(bytes + offset, &value, (size_t)size);
}

static void hostile_indices_are_refused_in_one_line(void **state) {
    (void)state;
    int64_t size, bin_size = 2817 * 2;
    uint8_t *good = read_file(GOLDEN "alpha.idx", &size), *bad = mt_malloc(size);
    const int64_t lengths = 34, offsets = lengths + 57 * 4, documents = offsets + 57 * 8;
    const struct {
        int64_t offset;
        uint64_t value;
        int64_t bytes;
        const char *words;
    } damage[] = {
        {0, 'X', 1, "MMIDIDX"},
        {9, 2, 8, "version"},
        {17, 0, 1, "token type"},
        {17, 9, 1, "token type"},
        {17, 6, 1, "floating-point"},
        {17, 5, 1, "outside the .bin"}, // i64 needs four times the bytes of the .bin
        {18, 58, 8, "cannot hold"},
        {18, UINT64_MAX, 8, "cannot hold"},
        {18, UINT64_MAX / 12 + 2, 8, "cannot hold"},
        {26, 0, 8, "cannot hold"},
        {26, UINT64_C(1) << 61, 8, "cannot hold"},
        {lengths + 4, (uint32_t)-1, 4, "negative length"},
        {lengths + 4, INT32_MAX, 4, "outside the .bin"},
        {offsets + 8, (uint64_t)-2, 8, "outside the .bin"},
        {offsets + 8, INT64_MAX, 8, "outside the .bin"},
        {offsets + 56 * 8, 2817 * 2 - 2, 8, "outside the .bin"},
        {offsets + 8, 3, 8, "inside of a token"},
        {documents, 1, 8, "document index"},
        {documents + 8, (uint64_t)-1, 8, "document index"},
        {documents + 16, 0, 8, "document index"},
        {documents + 57 * 8, 58, 8, "document index"},
        {documents + 57 * 8, 56, 8, "ends at sequence 56"},
    };
    mt_indexed_index index;
    mt_error error;
    assert_ok(mt_indexed_index_parse(&index, good, size, bin_size, "x.idx", &error), &error);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        memcpy(bad, good, (size_t)size);
        put(bad, damage[i].offset, damage[i].value, damage[i].bytes);
        assert_refused(mt_indexed_index_parse(&index, bad, size, bin_size, "x.idx", &error), &error, damage[i].words);
        assert_non_null(strstr(error.text, "x.idx"));
    }
    for (int64_t cut = 0; cut < size; cut++)
        assert_refused(mt_indexed_index_parse(&index, good, cut, bin_size, "x.idx", &error), &error,
                       "cut short: copy it again, or make it again with data/preprocess");
    assert_refused(mt_indexed_index_parse(&index, good, size, bin_size - 1, "x.idx", &error), &error, "outside");
    free(good);
    free(bad);
}

/* An .idx of multimodal data ends with a mode for each sequence. */
static void modes_of_text_are_read_and_others_refused(void **state) {
    (void)state;
    int64_t size, bin_size = 2817 * 2, sequences = 57;
    uint8_t *text = read_file(GOLDEN "alpha.idx", &size), *modes = mt_calloc(size + sequences);
    memcpy(modes, text, (size_t)size);
    mt_indexed_index index;
    mt_error error;
    assert_ok(mt_indexed_index_parse(&index, modes, size + sequences, bin_size, "x.idx", &error), &error);
    assert_int_equal(index.num_sequences, sequences);
    for (int64_t more = 1; more < sequences; more++)
        assert_refused(mt_indexed_index_parse(&index, modes, size + more, bin_size, "x.idx", &error), &error,
                       "cannot hold");
    modes[size + sequences - 1] = 1;
    assert_refused(mt_indexed_index_parse(&index, modes, size + sequences, bin_size, "x.idx", &error), &error,
                   "x.idx: sequence 56 has mode 1: multimodal data");
    free(text);
    free(modes);
}

/* Writers put sequences one after another; a selection of sequences has gaps too, so that these are counted only. */
static void gaps_overlaps_and_trailing_bytes_are_counted(void **state) {
    (void)state;
    int64_t size, bin_size = 2817 * 2;
    uint8_t *bytes = read_file(GOLDEN "alpha.idx", &size);
    const int64_t lengths = 34, offsets = lengths + 57 * 4;
    mt_indexed_index index;
    mt_error error;
    assert_ok(mt_indexed_index_parse(&index, bytes, size, bin_size, "x.idx", &error), &error);
    assert_true(index.gaps == 0 && index.overlaps == 0 && index.trailing == 0 && index.first_odd == -1);
    assert_ok(mt_indexed_index_parse(&index, bytes, size, bin_size + 1, "x.idx", &error), &error);
    assert_true(index.gaps == 0 && index.overlaps == 0 && index.trailing == 1);
    int32_t length;
    memcpy(&length, bytes + lengths + 4 * 4, 4);
    put(bytes, lengths + 4 * 4, (uint64_t)length - 1, 4);
    assert_ok(mt_indexed_index_parse(&index, bytes, size, bin_size, "x.idx", &error), &error);
    assert_true(index.gaps == 1 && index.overlaps == 0 && index.trailing == 0 && index.first_odd == 5);
    put(bytes, lengths + 4 * 4, (uint64_t)length, 4);
    put(bytes, offsets + 9 * 8, 0, 8); // sequence 9 is also read from the start; sequence 10 begins after a gap
    assert_ok(mt_indexed_index_parse(&index, bytes, size, bin_size, "x.idx", &error), &error);
    assert_true(index.gaps == 1 && index.overlaps == 1 && index.trailing == 0 && index.first_odd == 9);
    free(bytes);
}

static int32_t *read_all(const mt_dataset *dataset, int64_t count) {
    int64_t row = dataset->seq_length + 1;
    int32_t *tokens = mt_malloc(count * row * 4);
    mt_error error;
    for (int64_t i = 0; i < count; i++) assert_ok(mt_dataset_get(dataset, i, tokens + i * row, &error), &error);
    return tokens;
}

/* A run of 20 samples that is extended to 50 and 400, of one path and of a blend: what it was to read stays, and no
 * sample of its first epoch comes twice before each came once. */
static void an_extension_changes_no_earlier_order(void **state) {
    (void)state;
    static char *one[] = {GOLDEN "alpha"}, *two[] = {"0.3", GOLDEN "alpha", "0.7", GOLDEN "beta"};
    const int64_t sizes[] = {20, 50, 400};
    for (int blended = 0; blended < 2; blended++) {
        mt_data_config config = golden_config();
        config.data_path = blended ? (mt_strings){4, two} : (mt_strings){1, one};
        config.split = "100,0,0";
        int32_t *before = NULL;
        int64_t row = config.seq_length + 1;
        for (int k = 0; k < 3; k++) {
            mt_data *data;
            mt_error error;
            config.sizes[0] = config.plans[k][0] = sizes[k];
            config.num_plans = k + 1;
            assert_ok(mt_data_open(&data, &config, &error), &error);
            const mt_dataset *train = mt_data_split(data, MT_SPLIT_TRAIN);
            assert_true(train->num_samples >= sizes[k]);
            int32_t *now = read_all(train, sizes[k]);
            if (before) assert_memory_equal(now, before, (size_t)(sizes[k - 1] * row * 4));
            free(before);
            before = now;
            mt_data_close(data);
        }
        free(before);
    }
    // the start of an extended run is Megatron's order of the run before
    mt_data_config config = golden_config();
    mt_indexed_dataset *indexed;
    mt_dataset *plain, *extended;
    mt_error error;
    assert_ok(mt_indexed_dataset_open(&indexed, GOLDEN "alpha", &error), &error);
    assert_ok(mt_gpt_dataset_create(&plain, indexed, 0, 57, 20, &config, &error), &error);
    assert_ok(mt_indexed_dataset_extend(&extended, indexed, 0, 57, sizes, 3, &config, &error), &error);
    int32_t *want = read_all(plain, plain->num_samples), *got = read_all(extended, plain->num_samples);
    assert_memory_equal(want, got, (size_t)(plain->num_samples * (config.seq_length + 1) * 4));
    free(want), free(got);
    mt_dataset_free(plain);
    mt_dataset_free(extended);
    mt_indexed_dataset_close(indexed);
}

static void absent_files_are_named(void **state) {
    (void)state;
    mt_indexed_dataset *dataset;
    mt_error error;
    assert_refused(mt_indexed_dataset_open(&dataset, GOLDEN "gamma", &error), &error, GOLDEN "gamma.idx");
    assert_refused(mt_indexed_dataset_open(&dataset, "/tmp", &error), &error, "/tmp.idx");
}

/* ---- samplers and batches ---------------------------------------------------------------------------------------- */

/* A dataset for tests of samplers: sample i has the tokens i, i, i, ... */
static int counting_get(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error) {
    (void)error;
    for (int64_t i = 0; i <= dataset->seq_length; i++) tokens[i] = (int32_t)index;
    return 0;
}

static void counting_free(mt_dataset *dataset) {
    (void)dataset;
}

static mt_dataset counting_dataset(int64_t num_samples) {
    return (mt_dataset){.num_samples = num_samples, .seq_length = 4, .get = counting_get, .free = counting_free};
}

/* Reads an epoch on every rank and counts the reads of each sample. */
static void read_epoch(const mt_dataset *dataset, const mt_data_config *config, int64_t mbs, int64_t dp_size,
                       int64_t epoch, int *count) {
    int64_t step = mbs * dp_size, per_epoch = dataset->num_samples / step * step;
    mt_error error;
    memset(count, 0, (size_t)dataset->num_samples * sizeof *count);
    for (int64_t rank = 0; rank < dp_size; rank++) {
        mt_loader *loader;
        assert_ok(mt_loader_open(&loader, dataset, config, mbs, rank, dp_size, &error), &error);
        for (int64_t done = 0; done < per_epoch; done += step)
            for (int64_t row = 0; row < mbs; row++) {
                int64_t sample;
                assert_ok(mt_loader_sample(loader, epoch * per_epoch + done, row, &sample, &error), &error);
                assert_true(sample >= 0 && sample < dataset->num_samples);
                count[sample]++;
            }
        mt_loader_close(loader);
    }
}

static void ranks_partition_the_samples_under_every_sampler(void **state) {
    (void)state;
    const mt_data_config configs[] = {{.dataloader_type = MT_DATALOADER_SINGLE},
                                      {.dataloader_type = MT_DATALOADER_CYCLIC},
                                      {.dataloader_type = MT_DATALOADER_CYCLIC, .no_data_sharding = true}};
    mt_dataset dataset = counting_dataset(101);
    int count[101];
    for (int c = 0; c < 3; c++)
        for (int64_t dp_size = 1; dp_size <= 8; dp_size++)
            for (int64_t mbs = 1; mbs <= 4; mbs++) {
                read_epoch(&dataset, &configs[c], mbs, dp_size, c == 0 ? 0 : 2, count);
                int64_t read = 0;
                for (int i = 0; i < 101; i++) {
                    assert_true(count[i] <= 1);
                    read += count[i];
                }
                assert_int_equal(read, 101 / (mbs * dp_size) * mbs * dp_size);
            }
}

static void single_takes_rows_of_each_group_in_order(void **state) {
    (void)state;
    mt_dataset dataset = counting_dataset(20);
    mt_data_config config = {0};
    mt_loader *loader;
    mt_error error;
    int64_t sample;
    assert_ok(mt_loader_open(&loader, &dataset, &config, 3, 1, 2, &error), &error);
    const int64_t expected[] = {3, 4, 5, 9, 10, 11, 15, 16, 17};
    for (int64_t i = 0; i < 9; i++) {
        assert_ok(mt_loader_sample(loader, i / 3 * 6, i % 3, &sample, &error), &error);
        assert_int_equal(sample, expected[i]);
    }
    assert_refused(mt_loader_sample(loader, 18, 0, &sample, &error), &error, "ends after 20 samples");
    mt_loader_close(loader);
}

/* Expected values: torch.randperm(8, generator=Generator().manual_seed(epoch)) and the sampler by hand. */
static void cyclic_follows_megatrons_random_sampler(void **state) {
    (void)state;
    mt_dataset dataset = counting_dataset(19);
    mt_data_config config = {.dataloader_type = MT_DATALOADER_CYCLIC};
    uint32_t permutation[18];
    mt_error error;
    for (int64_t epoch = 0; epoch < 3; epoch++)
        for (int64_t rank = 0; rank < 2; rank++) {
            mt_loader *loader; // 19 samples in groups of 4: 16 per epoch, 8 per rank
            assert_ok(mt_loader_open(&loader, &dataset, &config, 2, rank, 2, &error), &error);
            mt_torch_randperm(permutation, 8, (uint64_t)epoch);
            for (int64_t i = 0; i < 8; i++) {
                int64_t sample;
                assert_ok(mt_loader_sample(loader, epoch * 16 + i / 2 * 4, i % 2, &sample, &error), &error);
                assert_int_equal(sample, rank * 8 + permutation[i]);
            }
            mt_loader_close(loader);
        }
    config.no_data_sharding = true; // 18 samples permuted; the ranks take turns
    mt_loader *loader;
    int64_t sample;
    assert_ok(mt_loader_open(&loader, &dataset, &config, 2, 1, 2, &error), &error);
    mt_torch_randperm(permutation, 18, 1);
    assert_ok(mt_loader_sample(loader, 16 + 4, 1, &sample, &error), &error);
    assert_int_equal(sample, permutation[4 + 3]);
    assert_refused(mt_loader_sample(loader, 3, 0, &sample, &error), &error, "multiple of 4");
    mt_loader_close(loader);
    config.dataloader_type = MT_DATALOADER_SINGLE;
    assert_refused(mt_loader_open(&loader, &dataset, &config, 10, 1, 2, &error), &error, "--micro-batch-size");
}

/* One sample by hand: tokens 5 9 6 7 9 9 8 and the last label 3; 9 is EOD. */
static int handmade_get(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error) {
    (void)dataset;
    (void)error;
    const int32_t rows[2][8] = {{5, 9, 6, 7, 9, 9, 8, 3}, {1, 2, 3, 4, 5, 6, 9, 8}};
    memcpy(tokens, rows[index], sizeof rows[0]);
    return 0;
}

static void fill_handmade(mt_batch *batch, const mt_data_config *config) {
    mt_dataset dataset = {.num_samples = 2, .seq_length = 7, .get = handmade_get, .free = counting_free};
    mt_loader *loader;
    mt_error error;
    assert_ok(mt_loader_open(&loader, &dataset, config, 2, 0, 1, &error), &error);
    mt_batch_alloc(batch, 14);
    assert_ok(mt_loader_fill(loader, 0, batch, &error), &error);
    mt_loader_close(loader);
    assert_int_equal(batch->num_tokens, 14);
}

static void assert_spans(const mt_batch *batch, const int64_t *starts, int64_t count) {
    assert_int_equal(batch->num_spans, count);
    for (int64_t i = 0; i < count; i++) {
        const mt_span *span = &batch->spans[i];
        int64_t end = i + 1 < count ? starts[i + 1] : batch->num_tokens;
        assert_int_equal(span->q_start, starts[i]);
        assert_int_equal(span->q_len, end - starts[i]);
        assert_int_equal(span->k_start, span->q_start);
        assert_int_equal(span->k_len, span->q_len);
        assert_true(span->causal);
    }
}

static void a_plain_batch_is_two_whole_sequences(void **state) {
    (void)state;
    mt_data_config config = {.eod_id = 9};
    mt_batch batch;
    fill_handmade(&batch, &config);
    const int32_t tokens[] = {5, 9, 6, 7, 9, 9, 8, 1, 2, 3, 4, 5, 6, 9},
                  labels[] = {9, 6, 7, 9, 9, 8, 3, 2, 3, 4, 5, 6, 9, 8};
    const int64_t starts[] = {0, 7};
    assert_memory_equal(batch.tokens, tokens, sizeof tokens);
    assert_memory_equal(batch.labels, labels, sizeof labels);
    for (int64_t t = 0; t < 14; t++) {
        assert_int_equal(batch.positions[t], t % 7);
        assert_int_equal(batch.token_index[t], t);
        assert_true(batch.loss_mask[t] == 1);
    }
    assert_spans(&batch, starts, 2);
    mt_batch_free(&batch);
}

static void ends_of_documents_reset_positions_attention_and_loss(void **state) {
    (void)state;
    mt_data_config config = {
        .eod_id = 9, .reset_position_ids = true, .reset_attention_mask = true, .eod_mask_loss = true};
    mt_batch batch;
    fill_handmade(&batch, &config);
    const int32_t positions[] = {0, 1, 0, 1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6};
    const float loss_mask[] = {1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0};
    const int64_t starts[] = {0, 2, 5, 6, 7};
    assert_memory_equal(batch.positions, positions, sizeof positions);
    assert_memory_equal(batch.loss_mask, loss_mask, sizeof loss_mask);
    assert_spans(&batch, starts, 5);
    mt_batch_free(&batch);
}

static void each_reset_option_works_alone(void **state) {
    (void)state;
    mt_data_config config = {.eod_id = 9, .reset_attention_mask = true};
    mt_batch batch;
    fill_handmade(&batch, &config);
    const int64_t starts[] = {0, 2, 5, 6, 7};
    assert_spans(&batch, starts, 5);
    assert_int_equal(batch.positions[6], 6);
    assert_true(batch.loss_mask[1] == 1);
    mt_batch_free(&batch);
    config = (mt_data_config){.eod_id = 9, .reset_position_ids = true};
    fill_handmade(&batch, &config);
    assert_int_equal(batch.num_spans, 2);
    assert_int_equal(batch.positions[6], 0);
    mt_batch_free(&batch);
}

static void a_resumed_loader_reads_the_samples_of_an_uninterrupted_one(void **state) {
    (void)state;
    const mt_dataloader_type types[] = {MT_DATALOADER_SINGLE, MT_DATALOADER_CYCLIC};
    for (int type = 0; type < 2; type++) {
        mt_dataset dataset = counting_dataset(64);
        mt_data_config config = {.dataloader_type = types[type], .eod_id = -1};
        mt_loader *unbroken, *resumed;
        mt_batch one, other;
        mt_error error;
        mt_batch_alloc(&one, 8);
        mt_batch_alloc(&other, 8);
        assert_ok(mt_loader_open(&unbroken, &dataset, &config, 2, 1, 3, &error), &error);
        int64_t end = type == 0 ? 60 : 600;
        for (int64_t consumed = 0; consumed < end; consumed += 6) {
            assert_ok(mt_loader_fill(unbroken, consumed, &one, &error), &error);
            assert_ok(mt_loader_open(&resumed, &dataset, &config, 2, 1, 3, &error), &error);
            assert_ok(mt_loader_fill(resumed, consumed, &other, &error), &error);
            assert_memory_equal(one.tokens, other.tokens, 8 * sizeof *one.tokens);
            assert_memory_equal(one.token_index, other.token_index, 8 * sizeof *one.token_index);
            assert_int_equal(one.token_index[0], (consumed + 2) * 4);
            mt_loader_close(resumed);
        }
        mt_loader_close(unbroken);
        mt_batch_free(&one);
        mt_batch_free(&other);
    }
}

/* ---- other sources ----------------------------------------------------------------------------------------------- */

static void mock_data_counts_upwards_and_is_reproducible(void **state) {
    (void)state;
    mt_data_config config = {
        .mock_data = true, .seq_length = 1000, .vocab_size = 50, .eod_id = 7, .seed = 3, .sizes = {9, 9, 0}};
    mt_data *data;
    mt_error error;
    int32_t tokens[1001], again[1001], valid[1001];
    assert_ok(mt_data_open(&data, &config, &error), &error);
    assert_int_equal(mt_data_split(data, MT_SPLIT_TRAIN)->num_samples, 9);
    assert_null(mt_data_split(data, MT_SPLIT_TEST));
    assert_ok(mt_dataset_get(mt_data_split(data, MT_SPLIT_TRAIN), 8, tokens, &error), &error);
    assert_ok(mt_dataset_get(mt_data_split(data, MT_SPLIT_VALID), 8, valid, &error), &error);
    mt_data_close(data);
    int64_t successors = 0, ends = 0;
    for (int i = 1; i <= 1000; i++) {
        assert_true(tokens[i] >= 0 && tokens[i] < 50);
        successors += tokens[i] == (tokens[i - 1] + 1) % 50;
        ends += tokens[i] == 7;
    }
    assert_in_range(successors, 800, 950);
    assert_in_range(ends, 30, 120);
    assert_memory_not_equal(tokens, valid, sizeof tokens);
    assert_ok(mt_data_open(&data, &config, &error), &error);
    assert_ok(mt_dataset_get(mt_data_split(data, MT_SPLIT_TRAIN), 8, again, &error), &error);
    assert_memory_equal(tokens, again, sizeof tokens);
    mt_data_close(data);
    config.sizes[MT_SPLIT_TRAIN] = 2000000000000;
    assert_int_equal(mt_data_open(&data, &config, &error), -1);
    assert_non_null(strstr(error.text, "lower --train-iters"));
}

static void a_tokens_file_is_read_in_order_and_checked(void **state) {
    (void)state;
    scratch directory = scratch_create();
    char *path = scratch_file(&directory, "t.i32");
    int32_t rows[6][5];
    for (int i = 0; i < 30; i++) rows[i / 5][i % 5] = i;
    write_file(path, rows, sizeof rows);
    mt_data_config config = {.tokens_file = path, .seq_length = 4, .vocab_size = 30, .sizes = {6, 2, 0}};
    mt_data *data;
    mt_error error;
    int32_t tokens[5];
    assert_ok(mt_data_open(&data, &config, &error), &error);
    assert_null(mt_data_split(data, MT_SPLIT_VALID));
    assert_ok(mt_dataset_get(mt_data_split(data, MT_SPLIT_TRAIN), 5, tokens, &error), &error);
    assert_memory_equal(tokens, rows[5], sizeof tokens);
    mt_data_close(data);
    config.sizes[0] = 7;
    assert_refused(mt_data_open(&data, &config, &error), &error, "holds 6 sequences, training needs 7");
    config.sizes[0] = 1;
    config.seq_length = 6;
    assert_refused(mt_data_open(&data, &config, &error), &error, "not whole sequences of 7");
    config.seq_length = 4;
    config.vocab_size = 29;
    assert_ok(mt_data_open(&data, &config, &error), &error);
    assert_refused(mt_dataset_get(mt_data_split(data, MT_SPLIT_TRAIN), 5, tokens, &error), &error, "token 29");
    mt_data_close(data);
    config.tokens_file = directory.path;
    assert_refused(mt_data_open(&data, &config, &error), &error, "it is a folder");
    free(path);
    scratch_remove(&directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mt19937_is_the_published_generator),
        cmocka_unit_test(shuffle_equals_numpy_random_state),
        cmocka_unit_test(randperm_equals_torch),
        cmocka_unit_test(weights_are_normalized_in_numpys_order_of_summation),
        cmocka_unit_test(several_epochs_equal_megatrons_order),
        cmocka_unit_test(a_partial_epoch_equals_megatrons_order),
        cmocka_unit_test(a_weighted_blend_equals_megatrons_order),
        cmocka_unit_test(paths_without_weights_are_read_once_in_proportion_to_their_size),
        cmocka_unit_test(splits_may_have_their_own_paths),
        cmocka_unit_test(splits_and_blends_are_parsed_as_megatron_does),
        cmocka_unit_test(only_the_training_split_must_have_documents),
        cmocka_unit_test(exactly_one_source_must_be_named),
        cmocka_unit_test(rewritten_u16_and_i32_files_are_megatrons_byte_for_byte),
        cmocka_unit_test(a_dataset_written_by_megatron_is_read_and_rewritten),
        cmocka_unit_test(documents_may_have_several_sequences_or_none),
        cmocka_unit_test(u16_is_chosen_below_65500),
        cmocka_unit_test(an_unpublished_writer_leaves_nothing_behind),
        cmocka_unit_test(hostile_indices_are_refused_in_one_line),
        cmocka_unit_test(modes_of_text_are_read_and_others_refused),
        cmocka_unit_test(gaps_overlaps_and_trailing_bytes_are_counted),
        cmocka_unit_test(an_extension_changes_no_earlier_order),
        cmocka_unit_test(absent_files_are_named),
        cmocka_unit_test(ranks_partition_the_samples_under_every_sampler),
        cmocka_unit_test(single_takes_rows_of_each_group_in_order),
        cmocka_unit_test(cyclic_follows_megatrons_random_sampler),
        cmocka_unit_test(a_plain_batch_is_two_whole_sequences),
        cmocka_unit_test(ends_of_documents_reset_positions_attention_and_loss),
        cmocka_unit_test(each_reset_option_works_alone),
        cmocka_unit_test(a_resumed_loader_reads_the_samples_of_an_uninterrupted_one),
        cmocka_unit_test(mock_data_counts_upwards_and_is_reproducible),
        cmocka_unit_test(a_tokens_file_is_read_in_order_and_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
