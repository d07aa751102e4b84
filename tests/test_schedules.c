/* Learning rate, weight decay, batch ramp, operation counts and pipeline schedules, compared with Megatron-LM's
 * results.
 */
// Sections of megatron.c: §13
#include "../data/base/file.h"
#include "../data/options/option_reader.h"
#include "../data/options/option_rules.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/report.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

static json_t *read_golden(const char *path) {
    json_error_t problem;
    json_t *root = json_load_file(path, 0, &problem);
    if (!root) fail_msg("%s: %s", path, problem.text);
    return root;
}

static double number(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key));
}

static void set_option(mt_run_options *options, const char *name, const json_t *value) {
    mt_error error;
    if (mt_options_set(options, name, json_string_value(value), &error)) fail_msg("%s", error.text);
}

static void assert_near(double value, double expected, double tolerance) {
    if (!(fabs(value - expected) <= tolerance * fabs(expected)))
        fail_msg("%.17g is not %.17g to %g", value, expected, tolerance);
}

static void learning_rate_and_weight_decay_equal_megatron(void **state) {
    (void)state;
    json_t *cases = read_golden("tests/golden/megatron/lr_schedules.json"), *item;
    size_t index, step;
    assert_int_equal(json_array_size(cases), 16);
    json_array_foreach(cases, index, item) {
        const json_t *args = json_object_get(item, "args"), *value;
        mt_run_options options;
        mt_options_default(&options);
        options.stack.lr = number(args, "max_lr");
        options.stack.min_lr = number(args, "min_lr");
        options.stack.lr_warmup_init = number(args, "init_lr");
        options.stack.lr_warmup_samples = (int64_t)number(args, "lr_warmup_steps");
        options.stack.lr_decay_samples = (int64_t)number(args, "lr_decay_steps");
        options.stack.lr_wsd_decay_samples = (int64_t)number(args, "wsd_decay_steps");
        options.stack.train_samples = (int64_t)number(args, "wd_incr_steps");
        options.stack.start_weight_decay = number(args, "start_wd");
        options.stack.end_weight_decay = number(args, "end_wd");
        set_option(&options, "lr_decay_style", json_object_get(args, "lr_decay_style"));
        set_option(&options, "weight_decay_incr_style", json_object_get(args, "wd_incr_style"));
        if (json_is_string(json_object_get(item, "wsd")))
            set_option(&options, "lr_wsd_decay_style", json_object_get(item, "wsd"));
        assert_int_equal(json_array_size(json_object_get(item, "lr")), 221);
        json_array_foreach(json_object_get(item, "lr"), step, value)
            assert_near(mt_learning_rate(&options.stack, (int64_t)step), json_number_value(value), 1e-12);
        json_array_foreach(json_object_get(item, "wd"), step, value)
            assert_near(mt_weight_decay(&options.stack, (int64_t)step), json_number_value(value), 1e-12);
        mt_options_free(&options);
    }
    json_decref(cases);
}

static void schedules_by_iterations_equal_those_by_samples(void **state) {
    (void)state;
    mt_run_options by_iters, by_samples;
    mt_options_default(&by_iters);
    mt_options_default(&by_samples);
    by_iters.stack.lr = by_samples.stack.lr = 1e-3;
    by_iters.stack.global_batch_size = by_samples.stack.global_batch_size = 8;
    by_iters.stack.train_iters = 100, by_samples.stack.train_samples = 800;
    by_iters.stack.lr_decay_iters = 90, by_samples.stack.lr_decay_samples = 720;
    by_iters.stack.lr_warmup_iters = 10, by_samples.stack.lr_warmup_samples = 80;
    for (int64_t consumed = 0; consumed <= 800; consumed += 8)
        assert_true(mt_learning_rate(&by_iters.stack, consumed) == mt_learning_rate(&by_samples.stack, consumed));
    assert_near(mt_learning_rate(&by_iters.stack, 40), 0.5e-3, 1e-12);
    by_iters.stack.lr_warmup_iters = 0;
    by_iters.stack.lr_warmup_fraction = 0.5; // of the decay: 45 iterations
    assert_near(mt_learning_rate(&by_iters.stack, 180), 0.5e-3, 1e-12);
    mt_options_free(&by_iters);
    mt_options_free(&by_samples);
}

static void batch_ramp_grows_by_increments_as_megatron_counts(void **state) {
    (void)state;
    char *arguments[] = {"train",
                         "--num-layers",
                         "1",
                         "--hidden-size",
                         "8",
                         "--vocab-size",
                         "8",
                         "--mock-data",
                         "--seq-length",
                         "8",
                         "--lr",
                         "1",
                         "--num-attention-heads",
                         "1",
                         "--train-samples",
                         "1000",
                         "--global-batch-size",
                         "32",
                         "--rampup-batch-size",
                         "8",
                         "8",
                         "300"};
    mt_run_options options;
    mt_error error;
    assert_int_equal(mt_options_parse(&options, MT_PROGRAM_TRAIN, 22, arguments, &error), 0);
    if (mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error)) fail_msg("%s", error.text);
    assert_int_equal(mt_global_batch_size(&options, 0), 8);
    assert_int_equal(mt_global_batch_size(&options, 99), 8); // 300 samples over three increments
    assert_int_equal(mt_global_batch_size(&options, 100), 16);
    assert_int_equal(mt_global_batch_size(&options, 200), 24);
    assert_int_equal(mt_global_batch_size(&options, 300), 32);
    assert_int_equal(mt_global_batch_size(&options, 301), 32);
    int64_t iterations = 0, consumed = 0; // Megatron's update_train_iters
    while (consumed <= 300) consumed += mt_global_batch_size(&options, consumed), iterations++;
    iterations += (1000 - consumed) / 32;
    assert_int_equal(options.stack.num_iterations, iterations);
    mt_options_free(&options);
}

static void operation_count_of_dense_models_equals_megatron(void **state) {
    (void)state;
    json_t *cases = read_golden("tests/golden/megatron/flops.json");
    const json_t *item = json_array_get(cases, 0), *args = json_object_get(item, "args");
    mt_run_options options;
    mt_options_default(&options);
    assert_string_equal(json_string_value(json_object_get(item, "name")), "llama3-8b");
    options.stack.num_layers = (int64_t)number(args, "num_layers");
    options.stack.hidden_size = (int64_t)number(args, "hidden_size");
    options.stack.ffn_hidden_size = (int64_t)number(args, "ffn_hidden_size");
    options.stack.num_attention_heads = (int64_t)number(args, "num_attention_heads");
    options.stack.num_query_groups = (int64_t)number(args, "num_query_groups");
    options.stack.kv_channels = (int64_t)number(args, "kv_channels");
    options.stack.seq_length = (int64_t)number(args, "seq_length");
    options.stack.padded_vocab_size = (int64_t)number(args, "padded_vocab_size");
    options.stack.swiglu = json_is_true(json_object_get(args, "swiglu"));
    assert_true(mt_flops(&options.stack, (int64_t)number(item, "batch")) == number(item, "flops"));
    mt_options_free(&options);
    json_decref(cases);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(learning_rate_and_weight_decay_equal_megatron),
        cmocka_unit_test(schedules_by_iterations_equal_those_by_samples),
        cmocka_unit_test(batch_ramp_grows_by_increments_as_megatron_counts),
        cmocka_unit_test(operation_count_of_dense_models_equals_megatron),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
