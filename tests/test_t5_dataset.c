/* test_t5_dataset.c: samples with masked spans equal those of Megatron-Core's T5 dataset, token for token. */
#include "data/base/file.h"
#include "data/datasets/gpt_dataset.h"
#include "data/datasets/loader.h"
#include "data/datasets/t5_dataset.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char prefix[] = "/tmp/test_t5_dataset.XXXXXX";
static json_t *golden;
static int vocabulary, num_sentinels, num_documents;

/* The sentences of tests/golden/make_t5_samples.py. */
static int32_t write_sentence(int document, int number, int32_t *tokens) {
    int length = document == 4 && number == 1   ? 600
                 : document == 6 && number == 0 ? 700
                                                : 1 + (document * 7 + number * 11) % 29;
    for (int i = 0; i < length; i++)
        tokens[i] = 2 + (document * 131 + number * 37 + i * i * 3 + i * 17) % (vocabulary - num_sentinels - 2);
    return length;
}

static int write_files(void **state) {
    (void)state;
    mt_error error;
    mt_indexed_writer *writer;
    int32_t tokens[10 * 700], lengths[10];
    golden = json_load_file("tests/golden/megatron/t5_samples.json", 0, NULL);
    vocabulary = (int)json_integer_value(json_object_get(golden, "vocabulary"));
    num_sentinels = (int)json_integer_value(json_object_get(golden, "sentinels"));
    num_documents = (int)json_integer_value(json_object_get(golden, "documents"));
    int file = mkstemp(prefix);
    if (file < 0 || mt_indexed_writer_open(&writer, prefix, MT_U16, &error) != 0) return -1;
    close(file);
    for (int document = 0; document < num_documents; document++) {
        int count = document == 6 || document == 11 ? 1 : document * 5 % 9, at = 0;
        for (int number = 0; number < count; at += lengths[number++])
            lengths[number] = write_sentence(document, number, tokens + at);
        if (mt_indexed_writer_add_document(writer, tokens, lengths, count, &error) != 0) return -1;
    }
    int status = mt_indexed_writer_seal(writer, &error);
    if (status == 0) status = mt_indexed_writer_publish(writer, &error);
    mt_indexed_writer_close(writer);
    return status;
}

static int remove_files(void **state) {
    (void)state;
    char path[sizeof prefix + 8];
    static const char *const ends[] = {"", ".bin", ".idx"};
    for (int i = 0; i < 3; i++) snprintf(path, sizeof path, "%s%s", prefix, ends[i]), unlink(path);
    json_decref(golden);
    return 0;
}

typedef struct fixture {
    mt_indexed_dataset *indexed;
    mt_span_masking masking;
    mt_data_config config;
    int32_t sentinels[100];
    uint8_t continues[1000];
} fixture;

static int64_t integer_of(const json_t *c, const char *key) {
    return json_integer_value(json_object_get(c, key));
}

static void open_fixture(fixture *f, const json_t *c) {
    mt_error error;
    *f = (fixture){.masking = {.mask_prob = json_number_value(json_object_get(c, "mask_prob")),
                               .short_seq_prob = json_number_value(json_object_get(c, "short_seq_prob")),
                               .input_length = integer_of(c, "encoder"),
                               .num_sentinels = num_sentinels,
                               .sentinels = f->sentinels}};
    for (int i = 0; i < num_sentinels; i++) f->sentinels[i] = vocabulary - num_sentinels + i;
    for (int i = 7; i < vocabulary; i += 10) f->continues[i] = 1;
    if (json_is_true(json_object_get(c, "words"))) f->masking.continues = f->continues;
    f->config = (mt_data_config){.seq_length = integer_of(c, "decoder"),
                                 .seed = integer_of(c, "seed"),
                                 .vocab_size = vocabulary,
                                 .eod_id = 1,
                                 .spans = &f->masking};
    if (mt_indexed_dataset_open(&f->indexed, prefix, &error) != 0) fail_msg("%s", error.text);
}

static void assert_tokens(const char *name, size_t sample, const int32_t *tokens, int64_t count, const json_t *list) {
    if ((size_t)count != json_array_size(list))
        fail_msg("sample %d: %d %s instead of %d", (int)sample, (int)count, name, (int)json_array_size(list));
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] != json_integer_value(json_array_get(list, (size_t)i)))
            fail_msg("sample %d: %s %d is %d, not %d", (int)sample, name, (int)i, tokens[i],
                     (int)json_integer_value(json_array_get(list, (size_t)i)));
}

static void samples_equal_those_of_megatron_core(void **state) {
    (void)state;
    size_t k, i;
    const json_t *c, *expected;
    json_array_foreach(json_object_get(golden, "cases"), k, c) {
        fixture f;
        mt_error error;
        mt_dataset *dataset;
        const json_t *samples = json_object_get(c, "samples");
        open_fixture(&f, c);
        if (mt_t5_dataset_create(&dataset, f.indexed, integer_of(c, "begin"), integer_of(c, "end"),
                                 (int64_t)json_array_size(samples), &f.config, &error) != 0)
            fail_msg("%s", error.text);
        assert_int_equal(dataset->num_samples, integer_of(c, "num_samples"));
        int32_t *numbers = mt_malloc((dataset->seq_length + 1) * 4);
        json_array_foreach(samples, i, expected) {
            if (mt_dataset_get(dataset, (int64_t)i, numbers, &error) != 0) fail_msg("%s", error.text);
            mt_t5_sample sample = mt_t5_sample_of(numbers);
            assert_tokens("inputs", i, sample.inputs, sample.num_inputs, json_array_get(expected, 0));
            assert_tokens("targets", i, sample.targets, sample.num_targets, json_array_get(expected, 1));
            assert_tokens("labels", i, sample.targets + 1, sample.num_targets, json_array_get(expected, 2));
        }
        free(numbers);
        mt_dataset_free(dataset);
        mt_indexed_dataset_close(f.indexed);
    }
}

/* The first case again, with too few sentinels, too short a decoder, and documents without samples. */
static void samples_that_do_not_fit_are_refused(void **state) {
    (void)state;
    static const struct {
        int64_t sentinels, decoder, begin, end;
        const char *message;
    } cases[] = {{1, 24, 0, 30, "more than 1 masked spans, the number of sentinels"},
                 {40, 3, 0, 30, "are longer than --decoder-seq-length 3"},
                 {40, 24, 0, 1, "documents 0 to 1 make no sample"},
                 {40, 24, 4, 5, "a sentence of over 512 tokens beside others"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        fixture f;
        mt_error error = {{0}};
        mt_dataset *dataset;
        int32_t numbers[200];
        open_fixture(&f, json_array_get(json_object_get(golden, "cases"), 0));
        f.masking.num_sentinels = cases[k].sentinels, f.config.seq_length = cases[k].decoder;
        int status = mt_t5_dataset_create(&dataset, f.indexed, cases[k].begin, cases[k].end, 20, &f.config, &error);
        for (int64_t i = 0; i < 20 && status == 0; i++) status = mt_dataset_get(dataset, i, numbers, &error);
        assert_int_equal(status, -1);
        if (!strstr(error.text, cases[k].message)) fail_msg("'%s' instead of '%s'", error.text, cases[k].message);
        mt_dataset_free(dataset);
        mt_indexed_dataset_close(f.indexed);
    }
}

/* Two data-parallel ranks read the samples in turn, whole or masked behind the last one. */
static void ranks_read_samples_in_order(void **state) {
    (void)state;
    fixture f;
    mt_error error;
    mt_dataset *dataset;
    mt_batch batch;
    int32_t numbers[200];
    open_fixture(&f, json_array_get(json_object_get(golden, "cases"), 0));
    assert_int_equal(mt_t5_dataset_create(&dataset, f.indexed, 0, 30, 20, &f.config, &error), 0);
    mt_batch_alloc(&batch, 200), mt_batch_alloc_encoder(&batch, 200);
    for (int64_t rank = 0; rank < 2; rank++) {
        mt_loader *loader;
        assert_int_equal(mt_loader_open_whole(&loader, dataset, &f.config, 2, rank, 2, &error), 0);
        if (mt_loader_fill(loader, 4, &batch, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(batch.num_spans, 2);
        assert_int_equal(batch.encoder.num_spans, 2);
        for (int64_t row = 0; row < 2; row++) {
            int64_t index = 4 + 2 * rank + row;
            assert_int_equal(mt_dataset_get(dataset, index, numbers, &error), 0);
            mt_t5_sample sample = mt_t5_sample_of(numbers);
            mt_span q = batch.spans[row], k = batch.encoder.spans[row];
            assert_true(q.causal && !k.causal && q.q_len == sample.num_targets && k.q_len == sample.num_inputs);
            assert_memory_equal(batch.tokens + q.q_start, sample.targets, (size_t)sample.num_targets * 4);
            assert_memory_equal(batch.labels + q.q_start, sample.targets + 1, (size_t)sample.num_targets * 4);
            assert_memory_equal(batch.encoder.tokens + k.q_start, sample.inputs, (size_t)sample.num_inputs * 4);
            assert_int_equal(batch.token_index[q.q_start], index * f.config.seq_length);
            assert_int_equal(batch.encoder.token_index[k.q_start], index * f.masking.input_length);
            assert_true(batch.loss_mask[q.q_start] == 1);
        }
        if (mt_loader_fill(loader, dataset->num_samples - 1, &batch, &error) != 0) fail_msg("%s", error.text);
        assert_true(batch.loss_mask[batch.num_tokens - 1] == 0); // behind the last sample
        mt_loader_close(loader);
    }
    mt_batch_free(&batch);
    mt_dataset_free(dataset);
    mt_indexed_dataset_close(f.indexed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_equal_those_of_megatron_core),
        cmocka_unit_test(samples_that_do_not_fit_are_refused),
        cmocka_unit_test(ranks_read_samples_in_order),
    };
    return cmocka_run_group_tests_name("samples of T5", tests, write_files, remove_files);
}
