/* --profile: timed operations change no result, count the work of the model, and add up to the time of the step. */
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/profile.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { STEPS = 4, MICRO_BATCHES = 2, SEQUENCES = 2, SEQ_LENGTH = 32, TOKENS = SEQUENCES * SEQ_LENGTH };

static char *llama[] = {"train",
                        "--num-layers",
                        "2",
                        "--hidden-size",
                        "64",
                        "--num-attention-heads",
                        "4",
                        "--group-query-attention",
                        "--num-query-groups",
                        "2",
                        "--vocab-size",
                        "300",
                        "--normalization",
                        "RMSNorm",
                        "--position-embedding-type",
                        "rope",
                        "--disable-bias-linear",
                        "--untie-embeddings-and-output-weights",
                        "--seq-length",
                        "32",
                        "--micro-batch-size",
                        "2",
                        "--global-batch-size",
                        "4",
                        "--train-iters",
                        "4",
                        "--lr",
                        "1e-2",
                        "--hidden-dropout",
                        "0.1",
                        "--attention-dropout",
                        "0",
                        "--deterministic-mode",
                        "--mock-data"};

static int random_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const mt_options *options = context;
    batch->num_tokens = TOKENS;
    batch->num_spans = SEQUENCES;
    for (int64_t s = 0; s < SEQUENCES; s++)
        batch->spans[s] = (mt_span){s * SEQ_LENGTH, SEQ_LENGTH, s * SEQ_LENGTH, SEQ_LENGTH, true};
    for (int64_t t = 0; t < TOKENS; t++) {
        uint32_t words[4];
        mt_philox(words, 1, (uint64_t)t, (uint64_t)index);
        batch->tokens[t] = (int32_t)(words[0] % (uint64_t)options->vocab_size);
        batch->labels[t] = (int32_t)(words[1] % (uint64_t)options->vocab_size);
        batch->positions[t] = (int32_t)(t % SEQ_LENGTH);
        batch->loss_mask[t] = 1;
        batch->token_index[t] = index * TOKENS + t;
    }
    return 0;
}

static void read_options(mt_run_options *options, char *activation) {
    enum { COUNT = sizeof llama / sizeof *llama };
    char *arguments[COUNT + 1];
    mt_error error;
    memcpy(arguments, llama, sizeof llama);
    arguments[COUNT] = activation;
    if (mt_options_parse(options, MT_PROGRAM_TRAIN, COUNT + 1, arguments, &error) != 0 ||
        mt_options_finish(options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        fail_msg("%s", error.text);
}

/* Trains a few steps, profiled or not; returns the metrics of each step. */
static void train_with(const mt_ops *ops, char *activation, bool profiled, mt_metrics *metrics) {
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = TOKENS, .max_position = SEQ_LENGTH, .train = true};
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    mt_run_state state = {0};
    mt_error error;
    read_options(&options, activation);
    if (profiled) ops = mt_profile_open(ops);
    if (mt_model_create(&model, &options.stack, &mt_grid_of_one, ops, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_model_init(model);
    mt_batch_alloc(&batch, TOKENS);
    for (int i = 0; i < STEPS; i++) {
        if (profiled) mt_profile_step_begin();
        if (mt_train_step(model, &state, MICRO_BATCHES, random_micro_batch, &options, &batch, &metrics[i], &error) != 0)
            fail_msg("%s", error.text);
        if (profiled) mt_profile_step_end();
    }
    mt_batch_free(&batch);
    mt_model_destroy(model);
    mt_options_free(&options);
}

static void train(const mt_ops *ops, bool profiled, mt_metrics *metrics) {
    train_with(ops, "--swiglu", profiled, metrics);
}

/* A backend with a fused operation, which calls the operations that define it. */
static void residual_norm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_norm_args norm = *a;
    mt_cpu_ops.dropout_add_forward(
        &(mt_dropout_add_args){a->T, a->C, 0, a->token_index, a->x, a->residual, a->sum, a->dropout}, dtype, stream);
    norm.x = a->sum, norm.x_stride = norm.y_stride = a->C;
    (a->mean ? mt_cpu_ops.layernorm_forward : mt_cpu_ops.rmsnorm_forward)(&norm, dtype, stream);
}

static void linear_gelu_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_linear_args linear = *a;
    linear.y = a->pre;
    mt_cpu_ops.linear_forward(&linear, dtype, stream);
    mt_cpu_ops.activation_forward(&(mt_activation_args){a->T, a->N, MT_ACTIVATION_GELU_TANH, a->pre, NULL, .y = a->y},
                                  dtype, stream);
}

static void linear_backward_gelu(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_linear_args linear = *a;
    linear.dx = mt_malloc(a->T * a->K * mt_dtype_size(dtype));
    mt_cpu_ops.linear_backward_input(&linear, dtype, stream);
    mt_cpu_ops.activation_backward(
        &(mt_activation_args){a->T, a->K, MT_ACTIVATION_GELU_TANH, a->x, NULL, .dy = linear.dx, .dx = a->dx}, dtype,
        stream);
    free(linear.dx);
}

static void expect_same(const mt_metrics *a, const mt_metrics *b) {
    for (int i = 0; i < STEPS; i++) {
        assert_true(a[i].loss == b[i].loss);
        assert_true(a[i].grad_norm == b[i].grad_norm);
    }
}

/* Where the backend has the fused operation, the layer calls it and none of its parts; results have the same bits. */
static void fused_operations_take_the_place_of_those_they_stand_for(void **state) {
    (void)state;
    mt_metrics plain[STEPS], fused[STEPS];
    mt_ops ops = mt_cpu_ops;
    ops.residual_norm_forward = residual_norm_forward;
    train(&mt_cpu_ops, true, plain);
    const double passes = (STEPS - 1) * MICRO_BATCHES;
    const mt_profile_row *rows = mt_profile_read()->rows;
    assert_int_equal(rows[MT_OPERATION_residual_norm_forward].calls, 0);
    assert_true(rows[MT_OPERATION_rmsnorm_forward].calls == passes * 5);     // two per layer and the final norm
    assert_true(rows[MT_OPERATION_dropout_add_forward].calls == passes * 5); // two per layer and the embedding
    mt_profile_close();
    train(&ops, true, fused);
    assert_true(rows[MT_OPERATION_residual_norm_forward].calls == passes * 3);
    assert_true(rows[MT_OPERATION_rmsnorm_forward].calls == passes * 2);
    assert_true(rows[MT_OPERATION_dropout_add_forward].calls == passes * 2);
    mt_profile_close();
    expect_same(plain, fused);
}

/* The same for linear layers fused with the tanh approximation of GELU. */
static void gelu_is_fused_with_the_products_on_either_side(void **state) {
    (void)state;
    mt_metrics plain[STEPS], fused[STEPS];
    mt_ops ops = mt_cpu_ops;
    ops.linear_gelu_forward = linear_gelu_forward, ops.linear_backward_gelu = linear_backward_gelu;
    train_with(&mt_cpu_ops, "--openai-gelu", true, plain);
    const double layers = (STEPS - 1) * MICRO_BATCHES * 2;
    const mt_profile_row *rows = mt_profile_read()->rows;
    assert_int_equal(rows[MT_OPERATION_linear_gelu_forward].calls + rows[MT_OPERATION_linear_backward_gelu].calls, 0);
    assert_true(rows[MT_OPERATION_activation_forward].calls == layers &&
                rows[MT_OPERATION_activation_backward].calls == layers);
    double products = rows[MT_OPERATION_linear_forward].calls, flops = rows[MT_OPERATION_linear_forward].flops;
    mt_profile_close();
    train_with(&ops, "--openai-gelu", true, fused);
    assert_true(rows[MT_OPERATION_linear_gelu_forward].calls == layers);
    assert_true(rows[MT_OPERATION_linear_backward_gelu].calls == layers);
    assert_true(rows[MT_OPERATION_linear_forward].calls == products - layers);
    assert_true(rows[MT_OPERATION_linear_forward].flops + rows[MT_OPERATION_linear_gelu_forward].flops == flops);
    assert_int_equal(rows[MT_OPERATION_activation_forward].calls + rows[MT_OPERATION_activation_backward].calls, 0);
    mt_profile_close();
    expect_same(plain, fused);
}

static const mt_ops *cuda_or_skip(void) {
    mt_error error;
    const mt_ops *ops = mt_cuda_open(0, &error);
    if (!ops) {
        print_message("skipped: %s\n", error.text);
        skip();
    }
    return ops;
}

static void expect_same_steps_and_all_time(const mt_ops *ops) {
    mt_metrics plain[STEPS], profiled[STEPS];
    train(ops, false, plain);
    train(ops, true, profiled);
    for (int i = 0; i < STEPS; i++) {
        assert_true(plain[i].loss == profiled[i].loss);
        assert_true(plain[i].grad_norm == profiled[i].grad_norm);
    }
    assert_true(plain[STEPS - 1].loss != plain[0].loss);
    const mt_profile *profile = mt_profile_read();
    double sum = 0;
    assert_int_equal(profile->steps, STEPS - 1);
    for (int i = 0; i < MT_NUM_OPERATIONS; i++) {
        assert_true(profile->rows[i].seconds >= 0);
        assert_true((profile->rows[i].calls > 0) == (profile->rows[i].flops + profile->rows[i].bytes > 0));
        assert_true(profile->rows[i].calls == 0 || profile->rows[i].seconds > 0);
        sum += profile->rows[i].seconds;
    }
    assert_true(sum > 0 && sum <= profile->seconds); // the host or another process may take any share of a step
    mt_profile_close();
}

static void profiled_steps_have_the_same_losses_and_their_times_sum_to_no_more(void **state) {
    (void)state;
    expect_same_steps_and_all_time(&mt_cpu_ops);
}

static void so_they_do_on_a_gpu(void **state) {
    (void)state;
    expect_same_steps_and_all_time(cuda_or_skip());
}

/* Elements of all matrices that multiply every token. */
static double product_weights(const mt_options *options) {
    mt_param *params;
    int64_t count = mt_params_build(&params, options, NULL);
    double weights = 0;
    for (int64_t i = 0; i < count; i++)
        if (!params[i].is_vector && params[i].role != MT_WORD_EMBEDDING)
            weights += (double)params[i].rows * (double)params[i].cols;
    free(params);
    return weights;
}

static void work_equals_the_count_from_the_parameter_table(void **state) {
    (void)state;
    mt_metrics metrics[STEPS];
    mt_run_options options;
    read_options(&options, "--swiglu");
    train(&mt_cpu_ops, true, metrics);
    const mt_profile_row *rows = mt_profile_read()->rows;
    const double passes = (STEPS - 1) * MICRO_BATCHES, linear = passes * 2 * TOKENS * product_weights(&options.stack);
    assert_true(rows[MT_OPERATION_linear_forward].flops == linear);
    assert_true(rows[MT_OPERATION_linear_backward_input].flops == linear);
    assert_true(rows[MT_OPERATION_linear_backward_weight].flops == linear);
    /* forward 2 and backward 5 products of D channels, for each head and each pair of a query and a key that it sees */
    double seen = passes * 2 * SEQUENCES * (SEQ_LENGTH * (SEQ_LENGTH + 1) / 2) * 64; // two layers; 64 = H D
    assert_true(rows[MT_OPERATION_attention_forward].flops == 4 * seen);
    assert_true(rows[MT_OPERATION_attention_backward].flops == 10 * seen);
    assert_true(rows[MT_OPERATION_activation_forward].bytes ==
                passes * 2 * TOKENS * (double)options.stack.ffn_hidden_size * 3 * 4);
    assert_true(rows[MT_OPERATION_squared_norm].calls == (STEPS - 1) * 4); // one per bucket
    assert_true(rows[MT_OPERATION_adamw_step].bytes == 7 * rows[MT_OPERATION_squared_norm].bytes);
    assert_int_equal(rows[MT_OPERATION_random_normal].calls, 0); // parameters are drawn before the steps
    mt_profile_close();
    mt_options_free(&options);
}

/* The text that mt_profile_print prints, to free. */
static char *print_table(void) {
    char *text;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    mt_profile_print(MT_F32, file);
    fclose(file);
    return text;
}

static void table_lists_the_operations_by_time_and_what_is_left(void **state) {
    (void)state;
    mt_metrics metrics[STEPS];
    train(&mt_cpu_ops, true, metrics);
    char *text = print_table(), *rest = NULL;
    const mt_profile_row *counted = mt_profile_read()->rows;
    double last = 1e30, sum = 0, flops = counted[MT_OPERATION_linear_forward].flops,
           bytes = counted[MT_OPERATION_adamw_step].bytes;
    int rows = 0, compared = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char name[32], rate[16], unit[16], work_unit[16];
        double calls, ms, share, of_ceiling, work;
        if (sscanf(line, "%31s %lf %lf %lf%% %15s %15s %lf%% %lf %15s", name, &calls, &ms, &share, rate, unit,
                   &of_ceiling, &work, work_unit) == 9) {
            rows++;
            assert_true(ms <= last && calls > 0 && of_ceiling >= 0);
            last = ms, sum += share;
            bool is_product = strcmp(name, "linear_forward") == 0, is_update = strcmp(name, "adamw_step") == 0;
            if (is_product) {
                assert_non_null(strstr(unit, "FLOP/s"));
                assert_string_equal(work_unit, "GFLOP");
                assert_float_equal(work, flops / (STEPS - 1) * 1e-9, 1e-5 * work); // six digits, whatever the time was
            } else if (is_update) {
                assert_non_null(strstr(unit, "B/s"));
                assert_string_equal(work_unit, "MB");
                assert_float_equal(work, bytes / (STEPS - 1) * 1e-6, 1e-5 * work);
            }
            compared += is_product + is_update;
        } else if (sscanf(line, " outside of operations %lf %lf%%", &ms, &share) == 2)
            sum += share;
    }
    assert_true(rows >= 18);
    assert_int_equal(compared, 2);
    assert_true(sum > 98 && sum < 102); // each share is rounded
    free(text);
    mt_profile_close();
}

static void one_step_alone_leaves_nothing_to_show(void **state) {
    (void)state;
    mt_profile_open(&mt_cpu_ops);
    mt_profile_step_begin();
    mt_profile_step_end();
    char *text = print_table();
    assert_non_null(strstr(text, "raise --train-iters"));
    free(text);
    mt_profile_close();
}

/* Compares mt_traffic_expose with counting: intervals begin and end at whole numbers, instants lie halfway between. */
static void exposed_time_is_what_nothing_hides(void **state) {
    (void)state;
    enum { INTERVALS = 40, END = 60 };
    for (uint64_t round = 0; round < 200; round++) {
        mt_busy busy[INTERVALS];
        double exposed[MT_NUM_TRAFFICS] = {0}, counted[MT_NUM_TRAFFICS] = {0};
        int64_t count = (int64_t)(round % INTERVALS);
        for (int64_t i = 0; i < count; i++) {
            uint32_t words[4];
            mt_philox(words, 7, round, (uint64_t)i);
            double from = words[0] % END;
            busy[i] = (mt_busy){from, from + words[1] % 6, (mt_traffic)(words[2] % MT_NUM_TRAFFICS)};
        }
        for (double now = 0.5; now < 2 * END; now++) {
            int first = MT_NUM_TRAFFICS;
            for (int64_t i = 0; i < count; i++)
                if (busy[i].from < now && now < busy[i].to && (int)busy[i].traffic < first) first = busy[i].traffic;
            if (first < MT_NUM_TRAFFICS) counted[first]++;
        }
        mt_traffic_expose(exposed, busy, count);
        for (int i = 0; i < MT_NUM_TRAFFICS; i++) assert_true(exposed[i] == counted[i]);
    }
}

static mt_graph *end_no_graph(mt_stream *stream) {
    (void)stream;
    return NULL;
}

/* Whoever asks the profiled table where memory lies or what its limits are gets the backend's answer. */
static void profiled_backend_keeps_what_is_no_operation(void **state) {
    (void)state;
    mt_ops device = mt_cpu_ops;
    device.name = "device";
    device.on_device = true;
    device.is_imagined = true;
    device.graph_end = end_no_graph;
    const mt_ops *timed = mt_profile_open(&device);
    assert_string_equal(timed->name, "device");
    assert_true(timed->on_device && timed->is_imagined);
    assert_memory_equal(&timed->limits, &device.limits, sizeof device.limits);
    assert_true(timed->rmsnorm_forward != device.rmsnorm_forward);
#define SAME_ENTRY(name, ...) assert_true(timed->name == device.name);
#define NO_ENTRY(name, ...)   assert_null(timed->name);
    MT_DEVICE_OPERATIONS(SAME_ENTRY)
    MT_GRAPH_OPERATIONS(NO_ENTRY)
#undef SAME_ENTRY
#undef NO_ENTRY
    mt_profile_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(profiled_backend_keeps_what_is_no_operation),
        cmocka_unit_test(exposed_time_is_what_nothing_hides),
        cmocka_unit_test(profiled_steps_have_the_same_losses_and_their_times_sum_to_no_more),
        cmocka_unit_test(so_they_do_on_a_gpu),
        cmocka_unit_test(fused_operations_take_the_place_of_those_they_stand_for),
        cmocka_unit_test(gelu_is_fused_with_the_products_on_either_side),
        cmocka_unit_test(work_equals_the_count_from_the_parameter_table),
        cmocka_unit_test(table_lists_the_operations_by_time_and_what_is_left),
        cmocka_unit_test(one_step_alone_leaves_nothing_to_show),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
