/* Replay: a forward that is done again before its backward changes nothing that a step reports or learns. */
// Sections of megatron.c: §9b §9f §15c
#include "golden.h"

/* The model whose forward is replayed twice at the first operation of each backward; NULL: none. */
static mt_model *replayed;
static int64_t replays;

static void replaying_cross_entropy_backward(const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream) {
    for (int i = 0; replayed && i < 2; i++, replays++) mt_model_replay(replayed);
    mt_cpu_ops.cross_entropy_backward(a, dtype, stream);
}

/* Three steps of two micro-batches; their metrics, and the weights afterwards. */
static void train_steps(const char *family, bool replay, mt_metrics metrics[3], uint32_t *weights) {
    fixture f = open_family(family, 2, 1, false);
    mt_run_state run = {0};
    mt_error error;
    int64_t count;
    create_model(&f, &mt_grid_of_one);
    replayed = replay ? f.model : NULL;
    for (int64_t step = 0; step < 3; step++) {
        source from = {&f, step, 2, 0, 2};
        if (mt_train_step(f.model, &run, 2, next_micro_batch, &from, &f.batch, &metrics[step], &error) != 0)
            fail_msg("%s", error.text);
        metrics[step].seconds = metrics[step].data_seconds = 0;
    }
    replayed = NULL;
    mt_bucket *buckets = mt_model_buckets(f.model, &count);
    *weights = 0;
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *bytes = buckets[i].params;
        for (int64_t k = 0; k < buckets[i].count * 4; k++) *weights = *weights * 31 + bytes[k];
    }
    close_family(&f);
}

/* Losses, auxiliary losses, loads, drops, gradient norms and weights are the same to the bit. */
static void a_replayed_forward_counts_nothing(void **state) {
    static const struct {
        const char *family, *options;
    } cases[] = {
        {"gpt2", "--hidden-dropout 0.1 --attention-dropout 0.1"},
        {"qwen3", ""},
        {"qwen2_moe", "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"},
        {"qwen3_moe", "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 "
                      "--moe-expert-capacity-factor 1"},
        {"mixtral", ""},
        {"qwen3_moe", "--moe-router-load-balancing-type global_aux_loss aux_loss seq_aux_loss --moe-aux-loss-coeff "
                      "0.01 0.02 0.03 --moe-z-loss-coeff 0.001"},
        {"qwen3_moe", "--moe-router-force-load-balancing"},
        {"deepseek_v3", "--moe-router-bias-update-rate 0.01"},
        {"qwen2_moe", "--fine-grained-activation-offloading --offload-modules attn_norm qkv_linear core_attn attn_proj "
                      "mlp_norm expert_fc1 moe_act mlp"},
        {"llama", "--fine-grained-activation-offloading --offload-modules attn_norm,mlp --recompute-activations "
                  "--recompute-modules layernorm"},
    };
    (void)state;
    static mt_ops ops;
    ops = mt_cpu_ops;
    ops.cross_entropy_backward = replaying_cross_entropy_backward;
    backend = &ops;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_metrics once[3], again[3];
        uint32_t weights[2];
        more_options = cases[i].options;
        train_steps(cases[i].family, false, once, &weights[0]);
        replays = 0;
        train_steps(cases[i].family, true, again, &weights[1]);
        assert_true(replays >= 12);
        if (memcmp(once, again, sizeof once) != 0 || weights[0] != weights[1])
            fail_msg("%s: a replay changed the step: loss %.9f, %.9f; norm %.9f, %.9f; aux %g, %g; weights %08x, %08x",
                     cases[i].family, once[2].loss, again[2].loss, once[2].grad_norm, again[2].grad_norm,
                     once[2].load_balancing_loss, again[2].load_balancing_loss, weights[0], weights[1]);
    }
}

/* The first step reports for each of several losses the value that it has alone, and their sum. */
static void auxiliary_losses_are_reported_by_their_names(void **state) {
    (void)state;
    static const char *const cases[] = {
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.1",
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.1",
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.03 --moe-z-loss-coeff 0.1",
        ("--moe-router-load-balancing-type global_aux_loss seq_aux_loss aux_loss --moe-aux-loss-coeff 0.03 0.02 0.01 "
         "--moe-z-loss-coeff 0.1")};
    mt_metrics metrics[4][3];
    uint32_t weights;
    backend = &mt_cpu_ops;
    for (int i = 0; i < 4; i++) {
        more_options = cases[i];
        train_steps("qwen3_moe", false, metrics[i], &weights);
    }
    double sum = 0;
    for (int i = 0; i < 3; i++) {
        double alone = metrics[i][0].aux_losses[i], with_others = metrics[3][0].aux_losses[i];
        assert_true(alone > 0 && fabs(alone - with_others) <= 1e-6 * alone);
        assert_true(metrics[i][0].load_balancing_loss == alone);
        assert_true(metrics[i][0].aux_losses[(i + 1) % 3] == 0 && metrics[i][0].z_loss == metrics[3][0].z_loss);
        sum += with_others;
    }
    assert_true(fabs(metrics[3][0].load_balancing_loss - sum) <= 1e-12);
}

/* Sets the first weight of the first router to NaN. */
static void break_router(mt_model *model) {
    int64_t num_params, num_buckets;
    const mt_param *param = mt_model_params(model, &num_params);
    mt_bucket *buckets = mt_model_buckets(model, &num_buckets);
    while (param->role != MT_ROUTER) param++;
    ((float *)buckets[param->bucket].params)[param->offset] = NAN;
}

/* The error of a step whose router logits are not finite. */
static mt_error bad_step(const char *family, bool replay) {
    fixture f = open_family(family, 2, 1, false);
    mt_run_state run = {0};
    mt_error error;
    create_model(&f, &mt_grid_of_one);
    break_router(f.model);
    replayed = replay ? f.model : NULL;
    source from = {&f, 0, 2, 0, 2};
    assert_int_equal(mt_train_step(f.model, &run, 2, next_micro_batch, &from, &f.batch, NULL, &error), -1);
    replayed = NULL;
    close_family(&f);
    return error;
}

/* Both routings report each of the step's tokens once, however often its forward runs. */
static void a_replay_reports_no_token_twice(void **state) {
    static const char *const routings[] = {"", "--moe-router-load-balancing-type sinkhorn"};
    char expected[80];
    snprintf(expected, sizeof expected, "had %d tokens whose logits are not finite", TOKENS);
    (void)state;
    static mt_ops ops;
    ops = mt_cpu_ops;
    ops.cross_entropy_backward = replaying_cross_entropy_backward;
    backend = &ops;
    for (int i = 0; i < 2; i++) {
        more_options = routings[i];
        for (int replay = 0; replay < 2; replay++) {
            mt_error error = bad_step("qwen2_moe", replay);
            if (!strstr(error.text, expected)) fail_msg("replay %d: %s", replay, error.text);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_replayed_forward_counts_nothing),
                                       cmocka_unit_test(auxiliary_losses_are_reported_by_their_names),
                                       cmocka_unit_test(a_replay_reports_no_token_twice)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
