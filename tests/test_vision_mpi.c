/* test_vision_mpi.c: models with a vision tower on four ranks train as transformers does on one, whatever the layout;
 * and again on four GPUs where they answer. */
// Sections of megatron.c: §12 §21
#include "vision.h"

enum { NUM_RANKS = 4 };

static mt_grid world;

#define TP       " --tensor-model-parallel-size 2"
#define SP       " --sequence-parallel"
#define PP       " --pipeline-model-parallel-size 2"
#define CP       " --context-parallel-size 2"
#define STRATEGY " --data-parallel-sharding-strategy "
#define OVERLAP  " --overlap-grad-reduce --overlap-param-gather"

/* Sequences of a micro-batch, each with an image; options. */
static const struct {
    int64_t micro_batch_size;
    const char *words;
} layouts[] = {
    {1, TP},
    {1, " --tensor-model-parallel-size 4" SP},
    {2, " --tensor-model-parallel-size 4"},
    {1, PP},
    {1, TP PP},
    {2, TP SP PP},
    {1, PP " --pipeline-schedule zb-h1"},
    {1, TP PP " --num-layers-per-virtual-pipeline-stage 1"},
    {1, TP SP PP " --recompute-granularity full"},
    {1, TP SP " --tp-comm-overlap"},
    {1, TP " --use-distributed-optimizer" OVERLAP},
    {1, PP STRATEGY "optim_grads"},
    {1, TP STRATEGY "optim_grads_params"},
    {1, TP SP STRATEGY "optim_grads_params --recompute-granularity full" OVERLAP},
    {1, CP " --cp-comm-type p2p"},
    {1, CP " --cp-comm-type all_gather" STRATEGY "optim_grads_params" OVERLAP},
    {1, CP " --cp-comm-type a2a" STRATEGY "optim_grads"},
    {2, " --context-parallel-size 4"},
    {2, TP SP CP},
    {2, TP CP " --cp-comm-type all_gather --use-distributed-optimizer"},
    {2, CP PP " --recompute-granularity full"},
    {1, CP PP " --pipeline-schedule zb-h1"},
};

/* Of models with experts. */
#define EP " --expert-model-parallel-size 2"
static const struct {
    int64_t micro_batch_size;
    const char *words;
} expert_layouts[] = {
    {1, TP SP EP},
    {1, TP SP PP " --expert-tensor-parallel-size 2"},
    {1, PP EP " --moe-token-dispatcher-type alltoall"},
    {1, CP EP STRATEGY "optim_grads"},
    {2, CP PP EP " --recompute-granularity full"},
    {2, TP SP CP " --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"},
    {1, TP SP EP STRATEGY "optim_grads_params" OVERLAP},
};

/* The grid of a layout on all ranks; free it with mt_grid_clear. */
static mt_grid grid_of(const char *model, const char *words) {
    fixture f;
    char folder[256];
    mt_grid grid = mt_grid_new(&world);
    snprintf(folder, sizeof folder, "tests/golden/vision/%s", model);
    open_options(&f, folder, 1, NUM_RANKS, words);
    build_grid(&grid, &f.options.stack);
    mt_options_free(&f.options);
    return grid;
}

static void five_steps_equal_pytorch_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            double losses[STEPS], norms[STEPS];
            const char *words = layouts[i].words;
            if (strstr(words, "virtual") && strcmp(models[k].name, "qwen3_vl") == 0) continue; // see deepstack
            if (strstr(models[k].name, "moe")) continue;                                       // the next test
            mt_grid grid = grid_of(models[k].name, words);
            train_five_steps(models[k].name, &grid, layouts[i].micro_batch_size, words, losses, norms);
            assert_expected(k, words, losses, norms);
            mt_grid_clear(&grid);
        }
}

static void five_steps_with_experts_equal_pytorch_on_every_layout(void **state) {
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof expert_layouts / sizeof *expert_layouts && strstr(models[k].name, "moe"); i++) {
            double losses[STEPS], norms[STEPS];
            const char *words = expert_layouts[i].words;
            mt_grid grid = grid_of(models[k].name, words);
            train_five_steps(models[k].name, &grid, expert_layouts[i].micro_batch_size, words, losses, norms);
            assert_expected(k, words, losses, norms);
            mt_grid_clear(&grid);
        }
}

/* Sequences with several images each, of unlike sizes: rows and columns of patches; 0 ends a sequence. */
static const mt_image_grid album[SEQUENCES][4] = {{{2, 2}, {8, 4}, {4, 4}}, {{4, 6}, {2, 8}}};
enum { ALBUM_TEXT = 3 }; // tokens before each image, and behind the last

/* Albums of a step: this rank's first one. Album 0 has all images, the next one leaves out two of each sequence. */
typedef struct album_source {
    const fixture *fixture;
    int64_t first;
} album_source;

static int next_album(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const album_source *from = context;
    const fixture *f = from->fixture;
    mt_image_batch *images = &batch->images;
    int64_t patches = 0, skipped = 2 * (from->first + index);
    (void)error;
    batch->num_tokens = batch->num_spans = images->num_images = 0;
    for (int s = 0; s < SEQUENCES; s++) {
        int64_t first = batch->num_tokens;
        for (const mt_image_grid *grid = album[s] + skipped;; grid++) {
            int64_t tokens = grid->height * grid->width / 4;
            for (int64_t i = 0; i < ALBUM_TEXT + tokens; i++, batch->num_tokens++) {
                int64_t t = batch->num_tokens;
                bool is_text = i < ALBUM_TEXT;
                batch->tokens[t] =
                    is_text ? (int32_t)(5 + 3 * t % 40) : (int32_t)f->options.stack.vision.image_token_id;
                batch->labels[t] = (int32_t)(7 + 5 * t % 40), batch->loss_mask[t] = is_text;
                batch->positions[t] = (int32_t)(t - first), batch->token_index[t] = s * LENGTH + t - first;
            }
            if (tokens == 0) break;
            for (int64_t i = 0; i < 4 * tokens * PATCH_VALUES; i++) // values of the reference, in another order
                images->patches[patches * PATCH_VALUES + i] =
                    f->patches[(patches * PATCH_VALUES + 7 * i) % (PATCHES * PATCH_VALUES)];
            images->grids[images->num_images++] = *grid, patches += 4 * tokens;
        }
        int64_t length = batch->num_tokens - first;
        batch->spans[batch->num_spans++] = (mt_span){first, length, first, length, true};
    }
    return 0;
}

/* Two steps on albums, each a micro-batch, one on each replica or all on the only one: losses, gradient norms, and this
 * rank's patches. */
static void train_albums(const char *name, const mt_grid *grid, int64_t albums, const char *words, double numbers[4],
                         int64_t *patches) {
    fixture f;
    mt_run_state run = {0};
    mt_error error;
    open_model(&f, name, grid, grid->data.size > 1 ? 1 : SEQUENCES, words);
    for (int step = 0; step < 2; step++) {
        mt_metrics metrics;
        album_source from = {&f, grid->data.rank};
        if (mt_train_step(f.model, &run, albums, next_album, &from, &f.batch, &metrics, &error) != 0)
            fail_msg("%s%s: %s", name, words, error.text);
        numbers[2 * step] = metrics.loss, numbers[2 * step + 1] = metrics.grad_norm;
    }
    *patches = mt_model_patches(f.model);
    close_model(&f);
}

/* Each patch of an album is computed by one of the ranks that share the micro-batch, none by two, and the most of a
 * rank are at most the mean and the largest image. All of it equals one rank. */
static void images_are_divided_among_the_ranks_of_a_replica(void **state) {
    static const char *const words[] = {
        " --tensor-model-parallel-size 4",
        " --tensor-model-parallel-size 4" SP,
        " --context-parallel-size 4",
        TP CP,
        TP SP CP " --cp-comm-type all_gather",
        CP PP " --cp-comm-type a2a --recompute-granularity full",
        TP SP PP,
        CP PP " --pipeline-schedule zb-h1",
    };
    int64_t total = 0, largest = 0;
    (void)state;
    for (int s = 0; s < SEQUENCES; s++)
        for (const mt_image_grid *grid = album[s]; grid->height > 0; grid++)
            total += grid->height * grid->width, largest = mt_max(largest, grid->height * grid->width);
    for (int k = 0; k < NUM_MODELS; k++) {
        double alone[4], numbers[4];
        int64_t patches;
        train_albums(models[k].name, &mt_grid_of_one, 1, "", alone, &patches);
        assert_int_equal(patches, 2 * total); // of two steps
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            mt_grid grid = grid_of(models[k].name, words[i]);
            train_albums(models[k].name, &grid, 1, words[i], numbers, &patches);
            for (int n = 0; n < 4; n++) // Adam's first update divides each gradient by its size, and its error too
                if (!(fabs(numbers[n] - alone[n]) <= (n < 2 ? 1e-5 : models[k].tolerance) * alone[n]))
                    fail_msg("%s%s, number %d: %.9f, on one rank %.9f", models[k].name, words[i], n, numbers[n],
                             alone[n]);
            assert_true(patches / 2 <= total / grid.tensor_context.size + largest);
            assert_true(patches < 2 * total);
            float sum = (float)patches;
            mt_all_reduce_sum(&grid.tensor_context, &sum, 1, MT_F32);
            if (grid.pipeline.rank == 0) assert_int_equal((int64_t)sum, 2 * total);
            if (grid.pipeline.rank > 0) assert_int_equal((int64_t)sum, 0);
            mt_grid_clear(&grid);
        }
    }
}

/* The replica whose album has more images leaves some of them to the other one: the most patches of a rank are at most
 * the mean over all ranks and the largest image, and each patch is computed once. All of it equals one rank. */
static void images_are_spread_over_the_replicas(void **state) {
    static const char *const words[] = {
        TP,
        TP SP " --recompute-granularity full",
        CP " --cp-comm-type all_gather" STRATEGY "optim_grads",
        TP STRATEGY "optim_grads_params" OVERLAP,
        PP,
        PP " --pipeline-schedule zb-h1",
        PP " --freeze-vision",
        TP " --freeze-vision --freeze-projector",
    };
    enum { ALBUMS = 2 };
    int64_t total = 0, largest = 0;
    (void)state;
    for (int n = 0; n < ALBUMS; n++)
        for (int s = 0; s < SEQUENCES; s++)
            for (const mt_image_grid *grid = album[s] + 2 * n; grid->height > 0; grid++)
                total += grid->height * grid->width, largest = mt_max(largest, grid->height * grid->width);
    for (int k = 0; k < NUM_MODELS; k++)
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            double alone[4], numbers[4];
            int64_t patches;
            const char *freezes = strstr(words[i], " --freeze");
            train_albums(models[k].name, &mt_grid_of_one, ALBUMS, freezes ? freezes : "", alone, &patches);
            assert_int_equal(patches, 2 * total); // of two steps
            mt_grid grid = grid_of(models[k].name, words[i]);
            assert_int_equal(grid.data.size, ALBUMS);
            train_albums(models[k].name, &grid, 1, words[i], numbers, &patches);
            for (int n = 0; n < 4; n++)
                if (!(fabs(numbers[n] - alone[n]) <= (n < 2 ? 1e-5 : models[k].tolerance) * alone[n]))
                    fail_msg("%s%s, number %d: %.9f, on one rank %.9f", models[k].name, words[i], n, numbers[n],
                             alone[n]);
            assert_true(patches / 2 <= total / (ALBUMS * grid.tensor_context.size) + largest);
            assert_true(grid.pipeline.rank > 0 || grid.data.rank == 0 || patches / 2 > 0);
            float sum[] = {(float)patches, grid.data.rank > 0 ? (float)patches : 0};
            mt_all_reduce_sum(&world.world, sum, 2, MT_F32);
            assert_int_equal((int64_t)sum[0], 2 * total);
            int64_t own = 0; // of the second album, which its replica would compute without the other's
            for (int s = 0; s < SEQUENCES; s++)
                for (const mt_image_grid *g = album[s] + 2; g->height > 0; g++) own += g->height * g->width;
            assert_true(sum[1] > 2 * (float)own);
            mt_grid_clear(&grid);
        }
}

/* Frozen buckets stand behind those of the decoder, and are gathered alike. */
static void frozen_towers_train_alike_on_every_layout(void **state) {
    static const char *const words[] = {PP, TP SP STRATEGY "optim_grads_params" OVERLAP};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        double losses[2][STEPS], norms[2][STEPS];
        for (int i = 0; i < 2; i++) {
            char line[256];
            snprintf(line, sizeof line, "%s --freeze-vision", words[i]);
            mt_grid grid = grid_of(models[k].name, line);
            train_five_steps(models[k].name, &grid, 1, line, losses[i], norms[i]);
            mt_grid_clear(&grid);
        }
        for (int step = 0; step < STEPS; step++) {
            double tolerance = models[k].tolerance;
            assert_true(fabs(losses[0][step] - losses[1][step]) <= tolerance * losses[0][step]);
            if (step >= models[k].norm_steps) continue;
            assert_true(fabs(norms[0][step] - norms[1][step]) <= tolerance * norms[0][step]);
        }
    }
}

/* Adapters of every linear layer: of the decoder, of the tower, and of its mergers. */
static void adapters_of_the_tower_train_as_those_of_peft(void **state) {
    static const char *const words[] = {
        "",
        TP SP,
        " --tensor-model-parallel-size 4",
        CP PP,
        TP STRATEGY "optim_grads_params" OVERLAP,
        CP SP TP " --recompute-granularity full",
    };
    (void)state;
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            double losses[STEPS], norms[STEPS];
            char line[256];
            snprintf(line, sizeof line, "%s --load-adapter tests/golden/vision/lora/%s", words[i], models[k].name);
            mt_grid grid = *words[i] ? grid_of(models[k].name, words[i]) : mt_grid_of_one;
            train_five_steps(models[k].name, &grid, grid.data.size == 1 ? 2 : 1, line, losses, norms);
            assert_five_steps("tests/golden/vision/lora", models[k].name, words[i], 1e-5, STEPS, losses, norms);
            if (*words[i]) mt_grid_clear(&grid);
        }
}

/* The factors of a patch do not depend on the rank that computes it. */
static void dropout_of_the_towers_adapters_is_that_of_one_rank(void **state) {
    static const char *const words[] = {TP, TP SP " --recompute-granularity full", CP,
                                        PP STRATEGY "optim_grads_params"};
    (void)state;
    for (int k = 0; k < NUM_MODELS; k++) {
        double alone[4], numbers[4];
        int64_t patches;
        char line[256];
        const char *target = strstr(models[k].name, "2_5") ? "qkv,mlp.0,mlp.2" : "qkv,linear_fc1,linear_fc2";
        snprintf(line, sizeof line, " --lora-rank 2 --lora-target %s --lora-dropout 0.3", target);
        train_albums(models[k].name, &mt_grid_of_one, 2, line, alone, &patches);
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            snprintf(line, sizeof line, "%s --lora-rank 2 --lora-target %s --lora-dropout 0.3", words[i], target);
            mt_grid grid = grid_of(models[k].name, line);
            train_albums(models[k].name, &grid, 1, line, numbers, &patches);
            for (int n = 0; n < 4; n++)
                if (!(fabs(numbers[n] - alone[n]) <= (n < 2 ? 1e-5 : models[k].tolerance) * alone[n]))
                    fail_msg("%s%s, number %d: %.9f, on one rank %.9f", models[k].name, line, n, numbers[n], alone[n]);
            mt_grid_clear(&grid);
        }
    }
}

/* Products of the decoder's layers in fp8, none of the tower's; or its residual stream in fp32. The ranks of a pipeline
 * and of a data group compute as one rank, operation by operation; a sum over ranks has two terms. */
static void decoders_in_other_types_train_alike(void **state) {
    static const char *const recipes[] = {" --bf16 --fp8-format hybrid",
                                          " --bf16 --fp8-format e4m3 --fp8-recipe blockwise",
                                          " --bf16 --fp32-residual-connection"};
    (void)state;
    if (backend != &mt_cpu_ops) return; // the bound is for one order of sums
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++) {
            double alone[2][STEPS], losses[STEPS], norms[STEPS];
            char words[256];
            fixture f;
            int64_t count, in_fp8 = 0;
            train_five_steps(models[k].name, &mt_grid_of_one, 1, recipes[i], alone[0], norms);
            train_five_steps(models[k].name, &mt_grid_of_one, 1, " --bf16", alone[1], norms);
            snprintf(words, sizeof words, PP "%s", recipes[i]);
            mt_grid grid = grid_of(models[k].name, words);
            train_five_steps(models[k].name, &grid, 1, words, losses, norms);
            mt_grid_clear(&grid);
            for (int step = 0; step < STEPS; step++)
                if (!(fabs(losses[step] - alone[0][step]) <= 1e-5 * alone[0][step]))
                    fail_msg("%s%s step %d: loss %.9f, on one rank %.9f", models[k].name, words, step + 1, losses[step],
                             alone[0][step]);
            assert_true(alone[0][0] != alone[1][0]); // the decoder rounds otherwise
            open_model(&f, models[k].name, &mt_grid_of_one, 1, recipes[i]);
            const mt_param *params = mt_model_params(f.model, &count);
            for (int64_t p = 0; p < count; p++) {
                assert_false(params[p].vision_part >= 0 && params[p].takes_fp8);
                in_fp8 += params[p].takes_fp8;
            }
            assert_true(in_fp8 > 0);
            close_model(&f);
        }
}

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&world, &argc, &argv);
    if (world.world.size != NUM_RANKS) mt_die("run it on %d ranks", NUM_RANKS);
    mt_options_default(&options);
    if (mt_grid_build(&world, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(five_steps_equal_pytorch_on_every_layout),
        cmocka_unit_test(five_steps_with_experts_equal_pytorch_on_every_layout),
        cmocka_unit_test(images_are_divided_among_the_ranks_of_a_replica),
        cmocka_unit_test(images_are_spread_over_the_replicas),
        cmocka_unit_test(decoders_in_other_types_train_alike),
        cmocka_unit_test(adapters_of_the_tower_train_as_those_of_peft),
        cmocka_unit_test(dropout_of_the_towers_adapters_is_that_of_one_rank),
        cmocka_unit_test(frozen_towers_train_alike_on_every_layout),
    };
    int failures = cmocka_run_group_tests_name("vision on ranks", tests, NULL, NULL);
    if (take_gpus(&world.world)) failures += cmocka_run_group_tests_name("vision on GPUs", tests, NULL, NULL);
    mt_grid_stop(&world);
    return failures;
}
