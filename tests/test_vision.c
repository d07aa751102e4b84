/* test_vision.c: tiny models with a vision tower equal Hugging Face transformers in float64: logits, every gradient,
 * five steps; and again on a GPU where one answers. */
// Sections of megatron.c: §8 §9a §10c §21
#include "folder.h"
#include "vision.h"

/* The relative error of a model's logits and gradients; on a GPU at least that of the suite golden. */
static double tolerance_of(int model) {
    return backend == &mt_cpu_ops ? models[model].tolerance : fmax(models[model].tolerance, 1e-4);
}

static void logits_equal_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        fixture f;
        open_model(&f, models[k].name, &mt_grid_of_one, SEQUENCES, "");
        float *logits = mt_malloc((int64_t)sizeof f.logits), tolerance = (float)tolerance_of(k);
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        mt_error error = {{0}};
        if (mt_batch_check(f.model, &f.batch, &error) != 0) fail_msg("%s", error.text);
        mt_model_forward(f.model, &f.batch, false);
        mt_model_read(f.model, NULL, NULL, logits);
        for (int64_t t = 0; t < f.batch.num_tokens; t++)
            for (int64_t v = 0; v < VOCABULARY; v++) {
                float ours = logits[t * VOCABULARY + v], theirs = f.logits[f.batch.token_index[t] * VOCABULARY + v];
                if (!(fabsf(ours - theirs) <= tolerance * (1 + fabsf(theirs))))
                    fail_msg("%s: logit %d of token %d is %.8f, expected %.8f", models[k].name, (int)v, (int)t,
                             (double)ours, (double)theirs);
            }
        free(logits);
        close_model(&f);
    }
}

/* The name of a parameter in the reference's gradients: transformers' own, which for Qwen2.5-VL is not that of files.
 */
static const char *name_in_model(char name[200], const mt_options *o, const char *hf_name) {
    bool is_text = strncmp(hf_name, "model.", 6) == 0, is_visual = strncmp(hf_name, "visual.", 7) == 0;
    bool moves = o->vision.tower == MT_VISION_QWEN2_5 && (is_text || is_visual);
    snprintf(name, 200, "%s%s",
             !moves    ? ""
             : is_text ? "model.language_model."
                       : "model.",
             hf_name + (moves && is_text ? 6 : 0));
    return name;
}

static void every_gradient_equals_transformers(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        fixture f;
        mt_error error;
        mt_safetensors *reference;
        int64_t num_params, num_buckets;
        open_model(&f, models[k].name, &mt_grid_of_one, SEQUENCES, "");
        assert_int_equal(mt_safetensors_open_folder(&reference, f.folder, "grads", &error), 0);
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        mt_model_forward(f.model, &f.batch, true);
        mt_model_backward(f.model);
        const mt_param *params = mt_model_params(f.model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
        double largest = 0;
        int64_t found = 0;
        for (int64_t i = 0; i < num_params; i++) {
            char name[200];
            const mt_tensor_info *tensor =
                mt_safetensors_find(reference, name_in_model(name, &f.options.stack, params[i].hf_name));
            double distance = 0, norm = 0;
            if (!tensor) fail_msg("%s: no reference gradient of %s", models[k].name, params[i].hf_name);
            add_gradient_error(&f, &params[i], buckets[params[i].bucket].grads, tensor, &distance, &norm);
            largest = fmax(largest, norm);
            found += params[i].hf_row == 0;
            if (!(sqrt(distance) <= tolerance_of(k) * sqrt(norm)))
                fail_msg("%s: gradient of %s is off by %g of its norm %g", models[k].name, params[i].hf_name,
                         sqrt(distance / norm), sqrt(norm));
        }
        assert_true(largest > 0.1);
        assert_int_equal(found, mt_safetensors_count(reference)); // each of them
        mt_safetensors_close(reference);
        close_model(&f);
    }
}

static void five_steps_equal_pytorch_for_any_micro_batch_size_and_recomputation(void **state) {
    static const char *const words[] = {"", " --recompute-granularity full",
                                        " --recompute-granularity full --recompute-num-layers 2"};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            double losses[STEPS], norms[STEPS];
            train_five_steps(models[k].name, &mt_grid_of_one, i == 0 ? 2 : 1, words[i], losses, norms);
            assert_expected(k, words[i], losses, norms);
        }
}

static void bf16_trains_to_within_two_percent_of_fp32(void **state) {
    (void)state;
    if (backend->limits.no_bf16) skip();
    for (int k = 0; k < NUM_MODELS; k++) {
        double losses[2][STEPS], norms[STEPS], reference[STEPS];
        train_five_steps(models[k].name, &mt_grid_of_one, 2, "", reference, norms);
        train_five_steps(models[k].name, &mt_grid_of_one, 2, " --bf16", losses[0], norms);
        train_five_steps(models[k].name, &mt_grid_of_one, 2, " --bf16 --fp32-residual-connection", losses[1], norms);
        for (int i = 0; i < STEPS; i++)
            for (int wide = 0; wide < 2; wide++)
                if (!(fabs(losses[wide][i] - reference[i]) <= 0.02 * reference[i]))
                    fail_msg("%s step %d: loss %g in bf16, %g in fp32", models[k].name, i + 1, losses[wide][i],
                             reference[i]);
        assert_true(losses[0][STEPS - 1] != reference[STEPS - 1]); // bf16 does round
        assert_true(losses[1][STEPS - 1] != losses[0][STEPS - 1]); // the residual stream less
    }
}

/* The loss of the batch with dropout, whose factors are those of the tokens. */
static double dropped_loss(fixture *f, float *logp) {
    double sum = 0;
    mt_model_forward(f->model, &f->batch, true);
    mt_model_read(f->model, logp, NULL, NULL);
    for (int64_t t = 0; t < f->batch.num_tokens; t++) sum -= (double)(f->batch.loss_mask[t] * logp[t]);
    return sum;
}

/* Along the gradients of the tower's adapters, and of its mergers', the loss rises by their norm. The difference of two
 * losses of about 300 has an error of 1e-4 in fp32, of 2 h times the norm, which is above 1, 1 in 200; terms of third
 * order of the loss are h^2 of it. */
static void dropout_of_the_towers_adapters_has_the_slope_of_the_loss(void **state) {
    const double h = 0.01;
    (void)state;
    if (backend != &mt_cpu_ops) skip(); // the values move in host memory
    for (int k = 0; k < 2; k++) {
        fixture f;
        char words[128];
        int64_t num_params, num_buckets;
        snprintf(words, sizeof words, " --lora-dropout 0.3 --load-adapter tests/golden/vision/lora/%s", models[k].name);
        open_model(&f, models[k].name, &mt_grid_of_one, SEQUENCES, words);
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        float *logp = mt_malloc(f.batch.num_tokens * 4);
        double at_rest = dropped_loss(&f, logp), norm = 0, losses[2];
        mt_model_backward(f.model);
        const mt_param *params = mt_model_params(f.model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
        for (int pass = 0; pass < 4; pass++) { // the norm; above; below; back
            double step = (const double[]){0, h, -2 * h, h}[pass] / (pass > 0 ? sqrt(norm) : 1);
            for (int64_t i = 0; i < num_params; i++) {
                if (params[i].vision_part < 0 || !mt_param_is_adapter(&params[i])) continue;
                const mt_bucket *b = &buckets[params[i].bucket];
                for (int64_t e = params[i].offset; e < params[i].offset + params[i].rows * params[i].cols; e++) {
                    double g = (double)b->grads[e];
                    if (pass == 0) norm += g * g;
                    ((float *)b->params)[e] += (float)(step * g);
                }
            }
            if (pass == 1 || pass == 2) losses[pass - 1] = dropped_loss(&f, logp);
        }
        double slope = (losses[0] - losses[1]) / (2 * h);
        assert_true(norm > 1);
        if (!(fabs(slope - sqrt(norm)) <= 0.01 * sqrt(norm)))
            fail_msg("%s: the loss rises by %g, and the gradient is %g", models[k].name, slope, sqrt(norm));
        mt_model_forward(f.model, &f.batch, false); // without dropout
        mt_model_read(f.model, logp, NULL, NULL);
        double sum = 0;
        for (int64_t t = 0; t < f.batch.num_tokens; t++) sum -= (double)(f.batch.loss_mask[t] * logp[t]);
        assert_true(fabs(sum - at_rest) > 1e-3 * sum);
        free(logp);
        close_model(&f);
    }
}

/* Sequence 1 without its image: its image tokens become text. */
static void drop_second_image(mt_batch *batch, bool alone) {
    for (int64_t t = alone ? 0 : batch->spans[0].q_len; t < batch->num_tokens; t++)
        if (batch->tokens[t] == 150) batch->tokens[t] = 7;
    batch->images.num_images--;
}

static int next_with_one_image(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const source *from = context;
    next_micro_batch(context, index, batch, error);
    if (from->micro_batch_size == 2 || index == 1) drop_second_image(batch, from->micro_batch_size == 1);
    return 0;
}

/* Micro-batches with images and without add up, in either order of a step's two. */
static void a_micro_batch_without_images_adds_nothing_to_the_tower(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        double losses[2][2], norms[2][2];
        for (int size = 1; size <= 2; size++) {
            fixture f;
            mt_run_state run = {0};
            mt_error error;
            open_model(&f, models[k].name, &mt_grid_of_one, size, "");
            for (int step = 0; step < 2; step++) {
                source from = {&f, size, 0, size};
                mt_metrics metrics;
                if (mt_train_step(f.model, &run, 2 / size, next_with_one_image, &from, &f.batch, &metrics, &error) != 0)
                    fail_msg("%s", error.text);
                losses[size - 1][step] = metrics.loss, norms[size - 1][step] = metrics.grad_norm;
            }
            close_model(&f);
        }
        for (int step = 0; step < 2; step++) {
            assert_true(fabs(losses[0][step] - losses[1][step]) <= 1e-5 * losses[1][step]);
            assert_true(fabs(norms[0][step] - norms[1][step]) <= 1e-5 * norms[1][step]);
        }
    }
}

/* The element of y for element e of x: the same, or of matrices that a file stacks the other way. */
static int64_t element_in(const mt_tensor_info *x, const mt_tensor_info *y, int64_t e) {
    if (x->num_dims != 3 || x->shape[1] == y->shape[1]) return e;
    int64_t rows = x->shape[1], cols = x->shape[2], matrix = e / (rows * cols), at = e % (rows * cols);
    return matrix * rows * cols + at % cols * rows + at / cols;
}

/* The sum of the squares of the differences between two folders' weights whose names contain `part`. */
static double distance_of(const char *folder, const char *other, const char *part, const char *but) {
    mt_error error;
    mt_safetensors *a, *b;
    double sum = 0;
    assert_int_equal(mt_safetensors_open_folder(&a, folder, "model", &error), 0);
    assert_int_equal(mt_safetensors_open_folder(&b, other, "model", &error), 0);
    for (int64_t i = 0; i < mt_safetensors_count(a); i++) {
        const mt_tensor_info *x = mt_safetensors_get(a, i), *y = mt_safetensors_find(b, x->name);
        if (!y) fail_msg("%s has no %s", other, x->name);
        assert_int_equal(x->num_dims, y->num_dims);
        bool swapped = strstr(x->name, ".experts.") && x->num_dims == 3 && x->shape[1] != y->shape[1];
        for (int d = 0; d < x->num_dims; d++) assert_int_equal(x->shape[d], y->shape[swapped && d > 0 ? 3 - d : d]);
        bool counts = strstr(x->name, part) && !(*but && strstr(x->name, but));
        for (int64_t e = 0; e < x->bytes / 4 && counts; e++) {
            double d = (double)((const float *)x->data)[e] - (double)((const float *)y->data)[element_in(x, y, e)];
            sum += d * d;
        }
    }
    assert_int_equal(mt_safetensors_count(a), mt_safetensors_count(b));
    mt_safetensors_close(a), mt_safetensors_close(b);
    return sum;
}

/* Trains a step of a folder's model and saves it. */
static void train_and_save(const char *name, const char *from_folder, const char *words, int steps, const char *to) {
    fixture f;
    mt_run_state run = {0};
    mt_error error;
    open_folder(&f, name, from_folder, &mt_grid_of_one, 2, words);
    for (int step = 0; step < steps; step++) {
        source from = {&f, 2, 0, 2};
        mt_metrics metrics;
        if (mt_train_step(f.model, &run, 1, next_micro_batch, &from, &f.batch, &metrics, &error) != 0)
            fail_msg("%s", error.text);
    }
    if (mt_checkpoint_save(f.model, &f.options, &run, to, NULL, NULL, &error) != 0) fail_msg("%s", error.text);
    close_model(&f);
}

static void folders_are_read_and_written_with_the_tower(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        char original[256], again[64];
        snprintf(original, sizeof original, "tests/golden/vision/%s", models[k].name);
        snprintf(again, sizeof again, "%s_again", models[k].name);
        train_and_save(models[k].name, original, "", 0, at(models[k].name));
        assert_true(distance_of(original, at(models[k].name), "", "") == 0);
        train_and_save(models[k].name, at(models[k].name), "", 0, at(again)); // its config.json has the same model
        assert_true(distance_of(original, at(again), "", "") == 0);
    }
}

static void frozen_parts_stay_and_the_others_train(void **state) {
    static const struct {
        const char *words;
        bool tower, mergers;
    } cases[] = {{" --freeze-vision", false, true},
                 {" --freeze-projector", true, false},
                 {" --freeze-vision --freeze-projector", false, false}};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            char original[256], name[32];
            snprintf(name, sizeof name, "frozen_%d_%d", k, (int)i);
            const char *saved = at(name);
            snprintf(original, sizeof original, "tests/golden/vision/%s", models[k].name);
            train_and_save(models[k].name, original, cases[i].words, 1, saved);
            assert_true((distance_of(original, saved, "visual.blocks", "") > 0) == cases[i].tower);
            assert_true((distance_of(original, saved, "patch_embed", "") > 0) == cases[i].tower);
            assert_true((distance_of(original, saved, "merger", "") > 0) == cases[i].mergers);
            assert_true(distance_of(original, saved, "layers.0", "visual") > 0);
        }
}

/* --language-model-only: the decoder computes what it did for text. */
static void the_decoder_alone_equals_the_model_on_text(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        float *logits[2];
        for (int alone = 0; alone < 2; alone++) {
            fixture f;
            open_model(&f, models[k].name, &mt_grid_of_one, 2,
                       alone ? " --deterministic-mode --language-model-only" : " --deterministic-mode");
            assert_int_equal(f.options.stack.vision.tower == MT_VISION_NONE, alone);
            if (alone)
                mt_batch_alloc_images(
                    &f.batch,
                    &(mt_options){
                        .vision = {.tower = 2, .patch_size = 4, .temporal_patch_size = 2, .spatial_merge_size = 2}},
                    SEQUENCES * LENGTH * 4);
            fill_batch(&f, 0, SEQUENCES, &f.batch);
            for (int64_t t = 0; t < f.batch.num_tokens; t++)
                if (f.batch.tokens[t] == 150) f.batch.tokens[t] = 7;
            f.batch.images.num_images = 0;
            logits[alone] = mt_malloc((int64_t)sizeof f.logits);
            mt_model_forward(f.model, &f.batch, false);
            mt_model_read(f.model, NULL, NULL, logits[alone]);
            close_model(&f);
        }
        assert_memory_equal(logits[0], logits[1], SEQUENCES * LENGTH * VOCABULARY * 4);
        free(logits[0]), free(logits[1]);
    }
}

typedef struct bad_batch {
    void (*damage)(mt_batch *batch);
    const char *message;
} bad_batch;

static void with_one_token_less(mt_batch *b) {
    b->tokens[8] = 7;
}
static void with_one_token_more(mt_batch *b) {
    b->tokens[b->num_tokens - 1] = 150;
}
static void with_one_image_less(mt_batch *b) {
    b->images.num_images = 1;
}
static void with_one_image_more(mt_batch *b) {
    b->images.grids[b->images.num_images++] = (mt_image_grid){2, 2};
}
static void with_an_odd_image(mt_batch *b) {
    b->images.grids[1].width = 3;
}
static void with_an_empty_image(mt_batch *b) {
    b->images.grids[0].height = 0;
}
static void with_an_absurd_image(mt_batch *b) {
    b->images.grids[0] = (mt_image_grid){(int64_t)1 << 40, (int64_t)1 << 40};
}
static void with_more_patches_than_planned(mt_batch *b) {
    b->images.grids[0] = (mt_image_grid){16, 16}, b->images.grids[1] = (mt_image_grid){16, 16};
}

static void a_bad_batch_is_refused(void **state) {
    static const bad_batch cases[] = {
        {with_one_token_less, "image 0 needs 8 image tokens together, and there are 2 from token 6 on"},
        {with_one_token_more, "token 95 is an image token, and all 2 images have theirs before it"},
        {with_one_image_less, "token 54 is an image token, and all 1 images have theirs before it"},
        {with_one_image_more, "3 images, and image tokens (150) of 2"},
        {with_an_odd_image, "image 1 has 8 x 3 patches; rows and columns must be multiples of 2"},
        {with_an_empty_image, "image 0 has 0 x 8 patches"},
        {with_an_absurd_image, "the model is planned for 384 patches in a micro-batch"},
        {with_more_patches_than_planned, "the first 2 of 2 images have 512 patches"},
    };
    (void)state;
    fixture f;
    open_model(&f, "qwen3_vl", &mt_grid_of_one, SEQUENCES, "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_error error = {{0}};
        fill_batch(&f, 0, SEQUENCES, &f.batch);
        assert_int_equal(mt_batch_check(f.model, &f.batch, &error), 0);
        cases[i].damage(&f.batch);
        assert_int_equal(mt_batch_check(f.model, &f.batch, &error), -1);
        if (!strstr(error.text, cases[i].message)) fail_msg("'%s' instead of '%s'", error.text, cases[i].message);
    }
    close_model(&f);
}

static void impossible_options_are_refused(void **state) {
    static const struct {
        const char *words, *message;
    } cases[] = {
        {"--context-parallel-size 2 --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64 --sequence-packing --sft",
         "--dynamic-context-parallel: the images of a model with a vision tower are divided among all ranks"},
        {"--mtp-num-layers 1", "--mtp-num-layers 1: modules of multi-token prediction do not know images"},
        {"--pipeline-model-parallel-size 4", "adds to the first 2 layers of the decoder, and "
                                             "the first pipeline stage has 1"},
        {"--vision-num-layers 5", "--vision-num-layers is 5, but the weights have 3"},
        {"--mrope-section 4 4 0", "--mrope-section is 4 4 0, but the weights have 4 2 2"},
        {"--language-model-only --freeze-vision", "--freeze-vision needs --vision-tower"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[512], *arguments[64], *rest = line;
        int count = 0;
        mt_run_options o;
        mt_error error = {{0}};
        snprintf(line, sizeof line,
                 "train --load tests/golden/vision/qwen3_vl --data-path none --seq-length 48 --train-iters 1 --lr 1e-3 "
                 "--device cpu %s",
                 cases[i].words);
        for (char *word; (word = strtok_r(rest, " ", &rest));) arguments[count++] = word;
        int status = mt_options_parse(&o, MT_PROGRAM_TRAIN, count, arguments, &error);
        if (status == 0) status = mt_options_finish(&o, MT_PROGRAM_TRAIN, 4, &error);
        if (status == 0 || !strstr(error.text, cases[i].message))
            fail_msg("%s: '%s' instead of '%s'", cases[i].words, error.text, cases[i].message);
        mt_options_free(&o);
    }
}

static void without_a_gpu(void **state) {
    (void)state;
    mt_error error;
    mt_cuda_open(0, &error);
    print_message("skipped on a GPU: %s\n", error.text);
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_equal_transformers),
        cmocka_unit_test(every_gradient_equals_transformers),
        cmocka_unit_test(five_steps_equal_pytorch_for_any_micro_batch_size_and_recomputation),
        cmocka_unit_test(bf16_trains_to_within_two_percent_of_fp32),
        cmocka_unit_test(dropout_of_the_towers_adapters_has_the_slope_of_the_loss),
        cmocka_unit_test(a_micro_batch_without_images_adds_nothing_to_the_tower),
        cmocka_unit_test(folders_are_read_and_written_with_the_tower),
        cmocka_unit_test(frozen_parts_stay_and_the_others_train),
        cmocka_unit_test(the_decoder_alone_equals_the_model_on_text),
        cmocka_unit_test(a_bad_batch_is_refused),
        cmocka_unit_test(impossible_options_are_refused),
    };
    const struct CMUnitTest none[] = {cmocka_unit_test(without_a_gpu)};
    mt_error error;
    int failures = cmocka_run_group_tests_name("vision", tests, make_root, remove_root);
    backend = mt_cuda_open(0, &error);
    if (!backend) return failures + cmocka_run_group_tests_name("vision on cuda", none, NULL, NULL);
    return failures + cmocka_run_group_tests_name("vision on cuda", tests, make_root, remove_root);
}
