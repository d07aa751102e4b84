/* test_fp16.c: fp16 on one rank: its rounding, the scale of the loss beside Megatron-Core's, and
 * golden models. */
// Sections of megatron.c: §14
#include "golden.h"

/* ---- rounding */

/* The half that is nearest to a float, computed on numbers: multiples of a step of 2^-24 or of 2^-10 of the octave. */
static double nearest_half(double x) {
    if (isnan(x) || isinf(x) || x == 0) return x;
    int octave = ilogb(x), step = octave < -14 ? -24 : octave - 10;
    double rounded = ldexp(nearbyint(ldexp(x, -step)), step); // ties to even
    return fabs(rounded) > 65504 ? copysign(INFINITY, x) : rounded;
}

static void floats_round_to_the_nearest_half(void **state) {
    (void)state;
    uint32_t random = 1;
    for (uint32_t exponent = 0; exponent < 256; exponent++)
        for (int i = 0; i < 20000; i++) {
            random = random * 1664525 + 1013904223;
            uint32_t bits = (random & 0x80000000) | exponent << 23 | (random >> 5 & 0x7fffff);
            if (i % 4 == 0) bits &= ~0xfffu;            // often halfway between two halves, or one
            if (i % 4 == 1) bits |= i % 8 ? 1 : 0xfffu; // just beside
            float x;
            memcpy(&x, &bits, sizeof x);
            double want = nearest_half((double)x);
            uint16_t half = mt_f32_to_f16(x);
            float got = mt_f16_to_f32(half);
            if (isnan(x) ? !isnan(got) : got != want)
                fail_msg("%a in fp16 is %a, expected %a", (double)x, (double)got, want);
            assert_int_equal(half >> 15, bits >> 31); // also of zeros and NaN
        }
}

/* ---- the scale of the loss */

static void the_scale_is_megatron_cores_after_any_overflows(void **state) {
    (void)state;
    json_t *runs = json_load_file("tests/golden/fp16/loss_scale.json", 0, NULL), *run;
    size_t number;
    assert_true(json_array_size(runs) == 7);
    json_array_foreach(runs, number, run) {
        mt_options o = mt_options_plain(1, 8, 1, 8, 8);
        const char *overflows = json_string_value(json_object_get(run, "overflows"));
        const json_t *states = json_object_get(run, "states");
        o.fp16 = true;
        o.initial_loss_scale = json_number_value(json_object_get(run, "initial_loss_scale"));
        o.min_loss_scale = json_number_value(json_object_get(run, "min_loss_scale"));
        o.loss_scale_window = json_integer_value(json_object_get(run, "loss_scale_window"));
        o.hysteresis = json_integer_value(json_object_get(run, "hysteresis"));
        mt_loss_scaler scaler = {o.initial_loss_scale, 0, o.hysteresis};
        assert_int_equal(strlen(overflows), json_array_size(states));
        for (size_t i = 0; overflows[i]; i++) {
            const json_t *want = json_array_get(states, i);
            mt_loss_scaler_update(&scaler, &o, overflows[i] == '+');
            if (scaler.scale != json_number_value(json_array_get(want, 0)) ||
                scaler.growth_tracker != json_integer_value(json_array_get(want, 1)) ||
                scaler.hysteresis_tracker != json_integer_value(json_array_get(want, 2)))
                fail_msg("run %zu, step %zu: %g, %lld, %lld", number, i, scaler.scale, (long long)scaler.growth_tracker,
                         (long long)scaler.hysteresis_tracker);
        }
        mt_loss_scaler constant = {512, 0, 2}, begun = constant; // as ConstantGradScaler
        o.loss_scale = 512;
        for (size_t i = 0; overflows[i]; i++) mt_loss_scaler_update(&constant, &o, overflows[i] == '+');
        assert_memory_equal(&constant, &begun, sizeof begun);
    }
    json_decref(runs);
}

/* ---- golden models */

/* No gradient of the golden models overflows. */
static const char in_fp16[] = " --fp16 --initial-loss-scale 64";

static const char *const of_all_kinds[] = {"llama", "gpt2", "qwen3_moe"};

/* The logits of a family less those of float64: the sum of their squares. */
static double error_of_logits(const char *family, mt_dtype dtype) {
    double sum = 0;
    more_options = dtype == MT_F16 ? in_fp16 : "";
    fixture f = open_family(family, 4, 1, dtype == MT_BF16);
    more_options = "";
    create_model(&f, &mt_grid_of_one);
    int64_t count = TOKENS * f.options.stack.vocab_size;
    float *want = read_file(f.folder, "logits.f32", count * 4), *got = mt_malloc(count * 4);
    float logp[TOKENS], entropy[TOKENS];
    fill_batch(&f, 0, 0, SEQUENCES, &f.batch);
    mt_model_forward(f.model, &f.batch, false);
    mt_model_read(f.model, logp, entropy, got);
    for (int64_t i = 0; i < count; i++) {
        sum += pow((double)got[i] - (double)want[i], 2);
        if (dtype == MT_F16 && (double)got[i] != nearest_half((double)got[i]))
            fail_msg("a logit of %a", (double)got[i]);
    }
    free(want), free(got);
    close_family(&f);
    return sum;
}

/* A rounding to bf16, which has three bits less, is eight times as large; that of one model's sums varies. */
/* A run may go on with a smaller window than its tracker has counted. */
static void a_scale_grows_after_a_window_was_made_smaller(void **state) {
    (void)state;
    mt_options o = {.loss_scale_window = 3, .hysteresis = 2, .min_loss_scale = 1};
    mt_loss_scaler scaler = {.scale = 64, .growth_tracker = 6, .hysteresis_tracker = 2};
    mt_loss_scaler_update(&scaler, &o, false);
    assert_true(scaler.scale == 128 && scaler.growth_tracker == 0);
}

static void logits_are_eight_times_as_near_as_in_bf16(void **state) {
    (void)state;
    for (int k = 0; k < 3; k++) {
        double ratio = sqrt(error_of_logits(of_all_kinds[k], MT_BF16) / error_of_logits(of_all_kinds[k], MT_F16));
        if (!(ratio > 4 && ratio < 16)) fail_msg("%s: the error is %g times as large in bf16", of_all_kinds[k], ratio);
    }
}

/* Ten steps equal those of float64 up to rounding. A loss is a mean of many tokens, whose roundings of up to 2^-11
 * cancel in part. A gradient has passed about 20 results of each layer that were stored in fp16, half of them in the
 * forward, whose errors add up like independent ones: 2^-11 sqrt(20 L). */
static void ten_steps_are_those_of_float64_up_to_rounding(void **state) {
    (void)state;
    static const char *const gradients[] = {"", " --accumulate-allreduce-grads-in-fp32",
                                            " --use-precision-aware-optimizer --main-grads-dtype bf16"};
    for (int k = 0; k < 9; k++) {
        const char *family = of_all_kinds[k / 3];
        double losses[STEPS], norms[STEPS];
        char path[512], words[256];
        snprintf(path, sizeof path, "tests/golden/hf/%s/expected.json", family);
        snprintf(words, sizeof words, "%s%s", in_fp16, gradients[k % 3]);
        json_t *expected = json_load_file(path, 0, NULL);
        more_options = words;
        train_ten_steps(family, &mt_grid_of_one, 2, false, losses, norms);
        more_options = "";
        const double of_a_loss = 0x1p-11, of_a_norm = 0x1p-11 * sqrt(20 * 4);
        for (size_t i = 0; i < STEPS; i++) {
            double loss = json_real_value(json_array_get(json_object_get(expected, "losses"), i));
            double norm = json_real_value(json_array_get(json_object_get(expected, "grad_norms"), i));
            if (!(fabs(losses[i] / loss - 1) <= of_a_loss) || !(fabs(norms[i] / norm - 1) <= of_a_norm))
                fail_msg("%s%s step %zu: loss %.9f, expected %.9f; norm %.9f, expected %.9f", family, words, i + 1,
                         losses[i], loss, norms[i], norm);
        }
        json_decref(expected);
    }
}

/* Also those whose tokens or keys are chosen by scores, which rounding changes. */
static void every_family_trains_to_within_two_percent_of_fp32(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        double losses[STEPS], norms[STEPS], reference[STEPS];
        train_ten_steps(families[k], &mt_grid_of_one, 2, false, reference, norms);
        more_options = in_fp16;
        train_ten_steps(families[k], &mt_grid_of_one, 2, false, losses, norms);
        more_options = "";
        for (int i = 0; i < STEPS; i++)
            if (!(fabs(losses[i] / reference[i] - 1) <= 0.02) || !isfinite(norms[i]))
                fail_msg("%s step %d: loss %g in fp16, %g in fp32; gradient norm %g", families[k], i + 1, losses[i],
                         reference[i], norms[i]);
    }
}

/* Products in fp8 take fp16 operands as they take those of bf16. */
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(floats_round_to_the_nearest_half),
        cmocka_unit_test(the_scale_is_megatron_cores_after_any_overflows),
        cmocka_unit_test(a_scale_grows_after_a_window_was_made_smaller),
        cmocka_unit_test(logits_are_eight_times_as_near_as_in_bf16),
        cmocka_unit_test(ten_steps_are_those_of_float64_up_to_rounding),
        cmocka_unit_test(every_family_trains_to_within_two_percent_of_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
