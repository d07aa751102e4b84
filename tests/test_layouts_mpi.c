/* test_layouts_mpi.c: checkpoints on every layout. Any layout loads the checkpoint of any other, bit for bit, and
 * continues the run. Run by mpirun on four ranks. */
// Sections of megatron.c: §6 §7 §7a §8 §9h §10c §11 §12 §15 §15b §5
#include "golden.h"
#include "new_folder.h"
#include "../data/checkpoint/checkpoint_save.h"

#include <mpi.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NUM_RANKS = 4, SAVED_STEPS = 2, RESUMED_STEPS = 3 };

/* A layout of four ranks; `is_alone`: rank 0 has the whole model and batch. */
typedef struct layout {
    const char *words;
    bool is_alone;
} layout;

static const layout layouts[] = {
    {.words = "", .is_alone = true},
    {.words = "--tensor-model-parallel-size 4"},
    {.words = "--pipeline-model-parallel-size 4"},
    {.words = "--tensor-model-parallel-size 2 --use-distributed-optimizer"},
    {.words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"},
    {.words = "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim"},
    {.words = "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather"},
    {.words = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
              "--num-virtual-stages-per-pipeline-rank 2"},
    {.words = "--tensor-model-parallel-size 2 --sequence-parallel "
              "--data-parallel-sharding-strategy optim_grads_params"},
    {.words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"},
    {.words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
              "--pipeline-schedule zb-h1"},
    {.words = "--tensor-model-parallel-size 4 --sequence-parallel"},
    {.words = "--tensor-model-parallel-size 2 --context-parallel-size 2 --use-distributed-optimizer"},
};
enum { NUM_LAYOUTS = sizeof layouts / sizeof *layouts };

static mt_grid world;
static char root[64];                   // the same on all ranks
static int64_t max_tokens = SEQ_LENGTH; // of the plan of models

static bool is_in_layout(const layout *l) {
    return !l->is_alone || world.world.rank == 0;
}

/* A model of a family on a layout, and its run. */
typedef struct trainee {
    fixture f;
    const layout *layout;
    mt_grid grid;
    mt_run_state state;
} trainee;

static void open_trainee(trainee *t, const char *family, const layout *l, const char *words) {
    char all[512];
    mt_error error = {{0}};
    mt_model_plan plan = {
        .max_tokens = max_tokens, .max_logits = max_tokens, .max_position = SEQ_LENGTH, .train = true};
    snprintf(all, sizeof all, "tests/golden/hf/%s", family);
    bool has_experts = folder_names(all, ".experts.0.");
    bool cuts_rows = strstr(l->words, "tensor") &&
                     !strstr(l->words, "sequence"); // experts need sequence parallelism with tensor parallelism
    const char *rows = has_experts && cuts_rows ? " --sequence-parallel" : "";
    const char *shares = has_experts && !l->is_alone && !strstr(l->words, "pipeline-model-parallel-size 4")
                             ? " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
                             : "";
    snprintf(all, sizeof all, "%s%s%s %s", l->words, rows, shares, words);
    *t = (trainee){.layout = l, .grid = mt_grid_of_one};
    more_options = all;
    t->f = open_family(family, 1, l->is_alone ? 1 : NUM_RANKS, false);
    more_options = "";
    if (!l->is_alone) t->grid.world = world.world;
    if (!l->is_alone && mt_grid_build(&t->grid, &t->f.options.stack, &error) != 0) fail_msg("%s", error.text);
    if (mt_model_create(&t->f.model, &t->f.options.stack, &t->grid, backend, &plan, &error) != 0)
        fail_msg("%s: %s", all, error.text);
}

static void close_grid(mt_grid *grid) {
    for (int kind = MT_GROUP_WORLD + 1; kind < MT_NUM_GROUP_KINDS; kind++) {
        mt_group *group = mt_grid_group(grid, kind);
        if (group->comm) MPI_Comm_free(group->comm);
        free(group->comm);
        free(group->members);
    }
}

static void close_trainee(trainee *t) {
    close_family(&t->f);
    close_grid(&t->grid);
}

static void load(trainee *t, const char *folder) {
    mt_error error = {{0}};
    if (mt_checkpoint_load(t->f.model, &t->f.options, &t->state, folder, &error) != 0)
        fail_msg("%s: %s", t->layout->words, error.text);
}

static void save(trainee *t, const char *folder) {
    mt_error error = {{0}};
    if (mt_checkpoint_save(t->f.model, &t->f.options, &t->state, folder, NULL, NULL, &error) != 0)
        fail_msg("%s: %s", t->layout->words, error.text);
}

static void train(trainee *t, int64_t steps, double *losses) {
    const mt_group *data = &t->grid.data;
    mt_error error;
    for (int64_t i = 0; i < steps; i++) {
        source from = {&t->f, t->state.iteration, 1, data->rank, data->size};
        mt_metrics metrics;
        if (mt_train_step(t->f.model, &t->state, SEQUENCES / data->size, next_micro_batch, &from, &t->f.batch, &metrics,
                          &error) != 0)
            fail_msg("%s: %s", t->layout->words, error.text);
        if (losses) losses[i] = metrics.loss + metrics.mtp_losses[0]; // mtp_losses: 0 without multi-token prediction
    }
}

/* Fails unless the losses of steps [first, first + count) equal PyTorch's. */
static void assert_pytorch(const char *what, const char *family, const double *losses, int64_t first, int64_t count) {
    char path[512];
    snprintf(path, sizeof path, "tests/golden/hf/%s/expected.json", family);
    json_t *expected = json_load_file(path, 0, NULL);
    assert_non_null(expected);
    for (int64_t i = 0; i < count; i++) {
        double loss = json_real_value(json_array_get(json_object_get(expected, "losses"), (size_t)(first + i)));
        if (!(fabs(losses[i] - loss) <= 1e-5 * loss))
            fail_msg("%s, %s, step %d: loss %.9f and PyTorch's %.9f", what, family, (int)(first + i) + 1, losses[i],
                     loss);
    }
    json_decref(expected);
}

/* Rank 0 runs a shell command, which must succeed; the other ranks wait. */
static void rank_0_runs(const char *format, const char *a, const char *b) {
    char command[1200];
    int status = 0;
    mt_barrier(&world.world);
    snprintf(command, sizeof command, format, a, b);
    if (world.world.rank == 0) status = system(command);
    mt_broadcast(&world.world, &status, sizeof status, 0);
    if (status != 0) fail_msg("failed: %s", command);
}

static const char *in_root(char path[512], const char *name) {
    snprintf(path, 512, "%s/%s", root, name);
    return path;
}

/* ---- from layout to layout */

/* Two steps on one layout, a checkpoint, three steps on another layout; all losses equal PyTorch's. */
static void save_and_resume(const char *family, const layout *saves, const layout *loads) {
    char folder[512], what[600];
    double losses[SAVED_STEPS + RESUMED_STEPS];
    trainee first, second;
    in_root(folder, "run");
    snprintf(what, sizeof what, "from '%s' to '%s'", saves->words, loads->words);
    if (is_in_layout(saves)) {
        char golden[512];
        snprintf(golden, sizeof golden, "tests/golden/hf/%s", family);
        open_trainee(&first, family, saves, "");
        load(&first, golden);
        train(&first, SAVED_STEPS, losses);
        assert_pytorch(what, family, losses, 0, SAVED_STEPS);
        save(&first, folder);
        close_trainee(&first);
    }
    mt_barrier(&world.world);
    if (is_in_layout(loads)) {
        open_trainee(&second, family, loads, "");
        load(&second, folder);
        assert_int_equal(second.state.iteration, SAVED_STEPS);
        train(&second, RESUMED_STEPS, losses);
        assert_pytorch(what, family, losses, SAVED_STEPS, RESUMED_STEPS);
        close_trainee(&second);
    }
    rank_0_runs("rm -r '%s'%s", folder, "");
}

/* The full layers of MiMo-V2-Flash have two key heads, which no more tensor-parallel ranks share. */
static bool takes_layout(const char *family, const layout *l) {
    bool has_four = strstr(l->words, "--tensor-model-parallel-size 4");
    if (strcmp(family, "mimo_v2_flash") == 0 && has_four) return false;
    if (has_indexer(family) && strstr(l->words, "--cp-comm-type") && !strstr(l->words, "all_gather")) return false;
    // Every second layer of glm_moe_dsa_shared has an indexer, and a stage begins with one.
    bool begins_without = strstr(l->words, "--pipeline-model-parallel-size 4") || strstr(l->words, "virtual") ||
                          strstr(l->words, "--decoder-first-pipeline-num-layers 1");
    if (strcmp(family, "glm_moe_dsa_shared") == 0 && begins_without) return false;
    // Nemotron-H has six layers, which four stages do not share.
    bool has_four_stages = strstr(l->words, "--pipeline-model-parallel-size 4") || strstr(l->words, "virtual");
    return strncmp(family, "nemotron_h", 10) != 0 || !has_four_stages;
}

static void a_run_continues_from_any_layout_on_any_other(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++)
        for (int i = k % 2; i < NUM_LAYOUTS; i += 2) { // every layout saves and loads; 46 pairs
            const layout *loads = &layouts[(i + 1 + 2 * k) % NUM_LAYOUTS];
            if (takes_layout(families[k], &layouts[i]) && takes_layout(families[k], loads))
                save_and_resume(families[k], &layouts[i], loads);
        }
}

/* Opens a family with a randomly initialized module of multi-token prediction. */
static void open_with_module(trainee *t, const layout *l) {
    open_trainee(t, "deepseek_v3", l, "--mtp-num-layers 1");
    mt_model_init(t->f.model);
}

static void assert_losses(const layout *l, const double *losses, const double *expected, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(losses[i] - expected[i]) <= 1e-5 * expected[i]))
            fail_msg("%s: loss %.9f, on one rank %.9f", l->words, losses[i], expected[i]);
}

static void a_run_with_multi_token_prediction_continues_from_any_layout_on_any_other(void **state) {
    (void)state;
    char folder[512];
    double expected[SAVED_STEPS + RESUMED_STEPS], losses[SAVED_STEPS + RESUMED_STEPS];
    trainee t;
    in_root(folder, "run");
    if (world.world.rank == 0) {
        open_with_module(&t, &layouts[0]);
        train(&t, SAVED_STEPS + RESUMED_STEPS, expected);
        close_trainee(&t);
    }
    mt_broadcast(&world.world, expected, sizeof expected, 0);
    for (int i = 0; i < NUM_LAYOUTS; i++) {
        const layout *saves = &layouts[i], *loads = &layouts[(i + 5) % NUM_LAYOUTS];
        if (strstr(saves->words, "zb-h1") || strstr(loads->words, "zb-h1"))
            continue; // zb-h1 splits the backward, which MTP does not support
        if (is_in_layout(saves)) {
            open_with_module(&t, saves);
            train(&t, SAVED_STEPS, losses);
            assert_losses(saves, losses, expected, SAVED_STEPS);
            save(&t, folder);
            close_trainee(&t);
        }
        mt_barrier(&world.world);
        if (is_in_layout(loads)) {
            open_with_module(&t, loads);
            load(&t, folder);
            assert_int_equal(t.state.iteration, SAVED_STEPS);
            train(&t, RESUMED_STEPS, losses);
            assert_losses(loads, losses, expected + SAVED_STEPS, RESUMED_STEPS);
            close_trainee(&t);
        }
        rank_0_runs("rm -r '%s'%s", folder, "");
    }
}

#define DELAYED "--fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max"

/* Trains, saves and continues; a second model loads and gives the same losses. */
static void continues_bit_for_bit(const char *family, const layout *l, const char *words) {
    char folder[512];
    trainee first, second;
    in_root(folder, "run");
    if (is_in_layout(l)) {
        double losses[RESUMED_STEPS], resumed[RESUMED_STEPS];
        char golden[512];
        snprintf(golden, sizeof golden, "tests/golden/hf/%s", family);
        open_trainee(&first, family, l, words);
        load(&first, golden);
        train(&first, SAVED_STEPS, NULL);
        save(&first, folder);
        train(&first, RESUMED_STEPS, losses);
        mt_loss_scaler scaler = first.state.loss_scaler;
        close_trainee(&first);
        open_trainee(&second, family, l, words);
        load(&second, folder);
        train(&second, RESUMED_STEPS, resumed);
        assert_memory_equal(&scaler, &second.state.loss_scaler, sizeof scaler);
        close_trainee(&second);
        assert_memory_equal(losses, resumed, sizeof losses);
    }
    rank_0_runs("rm -r '%s'%s", folder, "");
}

/* `words` of even and odd layouts. */
static void every_layout_continues_bit_for_bit(const char *even, const char *odd) {
    for (int i = 0; i < NUM_LAYOUTS; i++)
        continues_bit_for_bit(families[i % NUM_FAMILIES], &layouts[i], i % 2 ? odd : even);
}

static void the_same_layout_continues_bit_for_bit(void **state) {
    (void)state;
    every_layout_continues_bit_for_bit("", "--bf16");
}

/* The first steps overflow, so the scale falls, and it and its trackers are saved. */
static void the_same_layout_continues_bit_for_bit_in_fp16(void **state) {
    (void)state;
    every_layout_continues_bit_for_bit("--fp16 --initial-loss-scale 1e9 --accumulate-allreduce-grads-in-fp32",
                                       "--fp16 --initial-loss-scale 1e9 --hysteresis 1");
}

static void the_same_layout_continues_bit_for_bit_in_fp8(void **state) {
    (void)state;
    every_layout_continues_bit_for_bit(DELAYED " --tp-only-amax-red", DELAYED " --bf16");
}

static void models_with_states_continue_bit_for_bit_in_fp8(void **state) {
    (void)state;
    static const char *const subjects[] = {"qwen3_next", "kimi_linear", "nemotron_h", "granitemoehybrid", "lfm2"};
    static const layout l = {.words = "--context-parallel-size 2 --pipeline-model-parallel-size 2"};
    for (size_t k = 0; k < sizeof subjects / sizeof *subjects; k++)
        continues_bit_for_bit(subjects[k], &l, k % 2 ? DELAYED : DELAYED " --bf16");
}

/* ---- the bytes of the files */

/* Every layout loads the checkpoint of one rank and saves it again: the same bytes, except for trainer.json. */
static void every_layout_saves_the_same_bytes(const char *family, const char *words) {
    char reference[512], folder[512], golden[512];
    trainee t;
    in_root(reference, "reference"), in_root(folder, "again");
    snprintf(golden, sizeof golden, "tests/golden/hf/%s", family);
    if (world.world.rank == 0) {
        open_trainee(&t, family, &layouts[0], words);
        load(&t, golden);
        train(&t, 1, NULL);
        save(&t, reference);
        close_trainee(&t);
    }
    mt_barrier(&world.world);
    for (int i = 0; i < NUM_LAYOUTS; i++) {
        if (!takes_layout(family, &layouts[i])) continue;
        if (is_in_layout(&layouts[i])) {
            open_trainee(&t, family, &layouts[i], words);
            load(&t, reference);
            save(&t, folder);
            close_trainee(&t);
        }
        rank_0_runs("diff -r -x trainer.json -x checksums.json '%s' '%s'", reference, folder);
        rank_0_runs("rm -r '%s'%s", folder, "");
    }
    rank_0_runs("rm -r '%s'%s", reference, "");
}

static void every_layout_saves_the_bytes_of_one_rank(void **state) {
    (void)state;
    static const char in_fp16[] = "--fp16 --accumulate-allreduce-grads-in-fp32";
    for (int k = 0; k < NUM_FAMILIES; k++)
        every_layout_saves_the_same_bytes(families[k], k % 3 == 2 ? in_fp16 : k % 3 ? "--bf16" : "");
}

/* Scales of fp8 too. */
static void every_layout_saves_the_scales_of_one_rank(void **state) {
    (void)state;
    every_layout_saves_the_same_bytes("llama", DELAYED);
    every_layout_saves_the_same_bytes("deepseek_v3", DELAYED " --bf16");
}

/* Opens a llama and loads the folder in fp8, whose blocks are 32 x 32. */
static void open_fp8_folder(trainee *t, const layout *l) {
    open_trainee(t, "llama", l, "");
    t->f.options.weight_block_size[0] = t->f.options.weight_block_size[1] = 32;
    load(t, "tests/golden/tune/fp8");
}

/* Ranks load parts of blocks: rows or columns that begin within one, and shards. */
static void a_folder_in_fp8_loads_on_every_layout_as_on_one_rank(void **state) {
    (void)state;
    char reference[512], folder[512];
    trainee t;
    in_root(reference, "reference"), in_root(folder, "again");
    for (int i = 0; i < NUM_LAYOUTS; i++) {
        if (is_in_layout(&layouts[i])) {
            open_fp8_folder(&t, &layouts[i]);
            save(&t, i == 0 ? reference : folder);
            close_trainee(&t);
        }
        mt_barrier(&world.world);
        if (i == 0) continue;
        rank_0_runs("diff -r -x trainer.json -x checksums.json '%s' '%s'", reference, folder);
        rank_0_runs("rm -r '%s'%s", folder, "");
    }
    rank_0_runs("! grep -q quantization_config '%s'/latest/config.json%s", reference, "");
    rank_0_runs("rm -r '%s'%s", reference, "");
}

/* Files so small that some ranks have nothing to write. */
static void small_files_have_the_same_bytes(void **state) {
    (void)state;
    char reference[512], folder[512];
    mt_error error;
    in_root(reference, "reference"), in_root(folder, "again");
    for (int i = 0; i < NUM_LAYOUTS; i++) {
        const char *to = i == 0 ? reference : folder;
        rank_0_runs("mkdir '%s'%s", to, "");
        if (is_in_layout(&layouts[i])) {
            trainee t;
            open_trainee(&t, "gpt2", &layouts[i], "");
            load(&t, "tests/golden/hf/gpt2");
            if (mt_safetensors_save_folder(t.f.model, to, "model", 20000, "--save", NULL, &error) != 0)
                fail_msg("%s", error.text);
            close_trainee(&t);
        }
        if (i == 0) rank_0_runs("test -f '%s'/model-00003-of-*.safetensors%s", to, "");
        rank_0_runs("diff -r '%s' '%s'", reference, to);
        if (i > 0) rank_0_runs("rm -r '%s'%s", to, "");
    }
    rank_0_runs("rm -r '%s'%s", reference, "");
}

/* ---- Muon */

/* The values of a parameter's state on this rank, where nothing is sharded; free them. */
static float *own_state(const mt_model *model, const mt_param *param, mt_param_state state) {
    int64_t n = param->rows * param->cols;
    mt_shard shard = mt_bucket_shard(model, param->bucket, state);
    float *values = mt_malloc(n * 4);
    backend->memory_copy(values, (const float *)shard.data + param->offset, n * 4, mt_model_stream(model));
    if (mt_model_stream(model)) backend->stream_synchronize(mt_model_stream(model));
    return values;
}

/* A matrix [rows, cols] after a step: before - lr (decay before + factor orthogonalised momentum). */
static void muon_expected(float *w, const float *momentum, int64_t rows, int64_t cols, const mt_run_options *o,
                          float lr) {
    int64_t side = mt_min(rows, cols), n = rows * cols;
    double squares = 0;
    float *memory = mt_malloc((2 * n + 2 * side * side) * 4), factor = mt_muon_factor(&o->stack.muon, rows, cols);
    for (int64_t i = 0; i < n; i++) squares += (double)momentum[i] * (double)momentum[i];
    for (int64_t i = 0; i < n; i++) memory[i] = momentum[i] / (float)sqrt(squares);
    mt_iterate x = {1, rows, cols, rows, .transposed = rows > cols, .x = memory, .next = memory + n};
    x.squares = memory + 2 * n, x.polynomial = memory + 2 * n + side * side;
    mt_newton_schulz(&mt_cpu_ops, &o->stack.muon, &x, NULL);
    for (int64_t i = 0; i < n; i++)
        w[i] = w[i] * (1 - lr * (float)o->weight_decay) - lr * factor * ((const float *)x.x)[i];
    free(memory);
}

/* With --muon-tp-mode blockwise, the part of a matrix on a rank is a matrix of its own: gate and up one, q, k and v one
 * each. */
static void blockwise_muon_takes_each_part_for_a_matrix(void **state) {
    (void)state;
    static const layout two = {.words = "--tensor-model-parallel-size 2"};
    const char *words = "--optimizer muon --muon-fp32-matmul-prec highest --weight-decay 0.1 --lr 1e-2 --min-lr 1e-2";
    trainee t;
    int64_t count, checked = 0;
    open_trainee(&t, "llama", &two, words);
    load(&t, "tests/golden/hf/llama");
    const mt_param *params = mt_model_params(t.f.model, &count);
    float **before = mt_calloc(count * (int64_t)sizeof *before);
    for (int64_t i = 0; i < count; i++) before[i] = own_state(t.f.model, &params[i], MT_STATE_WEIGHTS);
    float lr = (float)mt_learning_rate(&t.f.options.stack, 0);
    train(&t, 1, NULL);
    for (int64_t i = 0, next; i < count; i = next) {
        int64_t rows = params[i].rows, cols = params[i].cols, n = 0;
        for (next = i + 1; next < count && params[next].joins;) rows += params[next++].rows;
        if (params[i].optimizer != MT_OPTIMIZER_MUON) continue;
        float *w = mt_malloc(3 * rows * cols * 4), *momentum = w + rows * cols, *after = momentum + rows * cols;
        for (int64_t k = i; k < next; k++) {
            size_t bytes = (size_t)(params[k].rows * cols) * 4;
            float *m = own_state(t.f.model, &params[k], MT_STATE_EXP_AVG);
            float *now = own_state(t.f.model, &params[k], MT_STATE_WEIGHTS);
            memcpy(w + n, before[k], bytes), memcpy(momentum + n, m, bytes), memcpy(after + n, now, bytes);
            n += params[k].rows * cols;
            free(m), free(now);
        }
        muon_expected(w, momentum, rows, cols, &t.f.options, lr);
        float bound = 1e-4f * lr * mt_muon_factor(&t.f.options.stack.muon, rows, cols);
        for (int64_t k = 0; k < n; k++)
            if (!(fabsf(w[k] - after[k]) <= bound))
                fail_msg("%s: element %d is %.9g, not %.9g", params[i].hf_name, (int)k, (double)after[k], (double)w[k]);
        free(w);
        checked++;
    }
    assert_int_equal(checked, 6 * t.f.options.stack.num_layers); // q, k, v, o, gate with up, down
    for (int64_t i = 0; i < count; i++) free(before[i]);
    free(before);
    close_trainee(&t);
}

/* ---- scratch */

static int read_some_tokens(void *context, int64_t micro_batch, mt_batch *batch, mt_error *error) {
    (void)context, (void)micro_batch, (void)error;
    batch->num_tokens = SEQ_LENGTH, batch->num_spans = 1;
    batch->spans[0] = (mt_span){.q_len = SEQ_LENGTH, .k_len = SEQ_LENGTH, .causal = true};
    for (int64_t t = 0; t < SEQ_LENGTH; t++) {
        batch->tokens[t] = (int32_t)(t * t % 61), batch->labels[t] = (int32_t)((t + 1) * (t + 1) % 61);
        batch->loss_mask[t] = 1, batch->positions[t] = (int32_t)t, batch->token_index[t] = t;
    }
    return 0;
}

/* The gradient norm of the first step of a new model. */
static double first_norm(const mt_options *o, const mt_grid *grid) {
    mt_model_plan plan = {
        .max_tokens = SEQ_LENGTH, .max_logits = SEQ_LENGTH, .max_position = SEQ_LENGTH, .train = true};
    mt_run_state state = {0};
    mt_model *model;
    mt_metrics metrics;
    mt_batch batch;
    mt_error error;
    if (mt_model_create(&model, o, grid, backend, &plan, &error) != 0) fail_msg("%s", error.text);
    mt_model_init(model);
    mt_batch_alloc(&batch, SEQ_LENGTH);
    if (mt_train_step(model, &state, 1, read_some_tokens, NULL, &batch, &metrics, &error) != 0)
        fail_msg("%s", error.text);
    mt_batch_free(&batch);
    mt_model_destroy(model);
    return metrics.grad_norm;
}

/* A model whose heads and MLP are narrower on a rank than its hidden states: a second gradient of a mixer's input, as
 * wide as these, has room beside the values that the mixer reads later. */
static void narrow_shares_leave_room_for_gradients_of_the_input(void **state) {
    (void)state;
    mt_options o = mt_options_plain(2, 64, 4, 61, SEQ_LENGTH);
    mt_error error;
    o.kv_channels = 8, o.ffn_hidden_size = 16, o.hidden_dropout = o.attention_dropout = 0, o.init_method_std = 0.2;
    o.linear_num_key_heads = o.linear_num_value_heads = 4, o.linear_key_head_dim = o.linear_value_head_dim = 8;
    o.experimental_attention_variant = MT_VARIANT_KDA;
    o.lr = 1e-3, o.train_iters = o.num_iterations = 1;
    o.seed = 106; // of eight others each is as near as 1e-6; weights of seed 0 carry a rounding on to 1e-5
    char all[] = "11";
    o.linear_layers = all;
    double alone = first_norm(&o, &mt_grid_of_one);
    trainee t = {.grid = mt_grid_of_one};
    o.tensor_model_parallel_size = NUM_RANKS;
    t.grid.world = world.world;
    if (mt_grid_build(&t.grid, &o, &error) != 0) fail_msg("%s", error.text);
    double norm = first_norm(&o, &t.grid);
    if (!(fabs(norm - alone) <= 1e-5 * alone)) fail_msg("%.9g on 4 ranks, %.9g on one", norm, alone);
    close_grid(&t.grid);
}

/* ---- errors */

/* Only one stage needs the missing tensor. */
static void a_missing_tensor_is_an_error_on_every_rank(void **state) {
    (void)state;
    for (int i = 1; i < NUM_LAYOUTS; i++) {
        trainee t;
        mt_error error = {{0}};
        open_trainee(&t, "llama", &layouts[i], "");
        assert_int_equal(
            mt_checkpoint_load(t.f.model, &t.f.options, &t.state, "tests/golden/hf/llama3_rope_tied", &error), -1);
        if (!strstr(error.text, "\"lm_head.weight\"")) fail_msg("%s", error.text);
        close_trainee(&t);
    }
}

/* A limit on the size of files, on the last rank only, simulates a full disk. */
static void a_failed_write_is_an_error_on_every_rank(void **state) {
    (void)state;
    char folder[512];
    struct rlimit old, small;
    in_root(folder, "run");
    for (int i = 1; i < 5; i++) {
        trainee t;
        mt_error error = {{0}};
        open_trainee(&t, "llama", &layouts[i], "");
        load(&t, "tests/golden/hf/llama");
        t.state.iteration = 1;
        save(&t, folder);
        t.state.iteration = 2;
        assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
        small = old, small.rlim_cur = 16384;
        signal(SIGXFSZ, SIG_IGN);
        if (world.world.rank == NUM_RANKS - 1) assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        int status = mt_checkpoint_save(t.f.model, &t.f.options, &t.state, folder, NULL, NULL, &error);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_equal(status, -1);
        if (!strstr(error.text, "ulimit")) fail_msg("%s", error.text);
        rank_0_runs("ls '%s' | grep -c iter_ | grep -qx 1 && [ -f '%s'/iter_0000001/model.safetensors ]", folder,
                    folder); // the previous checkpoint is intact, the failed one removed
        load(&t, folder);
        assert_int_equal(t.state.iteration, 1);
        close_trainee(&t);
        rank_0_runs("rm -r '%s'%s", folder, "");
    }
}

/* ---- channels ---------------------------------------------------------------------------------------------------- */

enum { MAX_CHANNELS = 8 };
static mt_channel *opened[MAX_CHANNELS];
static int num_opened, num_closed;

static mt_channel *recorded_open(const mt_group *group, int from, int to, int id) {
    mt_channel *channel = mt_cpu_ops.channel_open(group, from, to, id);
    assert_true(num_opened < MAX_CHANNELS);
    if (channel) opened[num_opened++] = channel;
    return channel;
}

static void recorded_close(mt_channel *channel) {
    if (channel) assert_ptr_equal(channel, opened[num_closed++]);
    mt_cpu_ops.channel_close(channel);
}

/* On a GPU, open and close wait for the other end, so another order could deadlock a ring of ranks. */
static void channels_close_in_the_order_of_opening(void **state) {
    (void)state;
    static const layout rings[] = {
        {.words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"},
        {.words = "--pipeline-model-parallel-size 4"},
        {.words = "--context-parallel-size 4"},
    };
    const mt_ops *usual = backend;
    mt_ops recording = *backend;
    recording.channel_open = recorded_open, recording.channel_close = recorded_close;
    for (size_t i = 0; i < sizeof rings / sizeof *rings; i++) {
        trainee t;
        num_opened = num_closed = 0;
        backend = &recording;
        open_trainee(&t, "llama", &rings[i], "");
        close_trainee(&t);
        backend = usual;
        assert_true(num_opened > 0);
        assert_int_equal(num_closed, num_opened);
    }
}

static double sent_minus_received, num_received;

static int64_t counted_send(mt_channel *channel, const void *buffer, int64_t count, mt_dtype dtype, mt_stream *stream) {
    sent_minus_received += (double)count;
    return mt_cpu_ops.channel_send(channel, buffer, count, dtype, stream);
}

static int64_t counted_recv(mt_channel *channel, void *buffer, int64_t count, mt_dtype dtype, mt_stream *stream) {
    sent_minus_received -= (double)count, num_received++;
    return mt_cpu_ops.channel_recv(channel, buffer, count, dtype, stream);
}

/* Unlike MPI, NCCL hangs if a message is shorter than its receive. */
static void every_message_has_the_length_of_its_receive(void **state) {
    (void)state;
    static const layout pipelines[] = {
        {.words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"},
        {.words = "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1"},
    };
    const mt_ops *usual = backend;
    mt_ops counting = *backend;
    counting.channel_send = counted_send, counting.channel_recv = counted_recv;
    for (size_t i = 0; i < sizeof pipelines / sizeof *pipelines; i++) {
        trainee t;
        sent_minus_received = num_received = 0;
        backend = &counting, max_tokens = 3 * SEQ_LENGTH; // more than the tokens of a micro-batch
        open_trainee(&t, "llama", &pipelines[i], "");
        mt_model_init(t.f.model);
        train(&t, 2, NULL);
        close_trainee(&t);
        backend = usual, max_tokens = SEQ_LENGTH;
        mt_all_reduce_sum(&world.world, &sent_minus_received, 1, MT_F64);
        mt_all_reduce_sum(&world.world, &num_received, 1, MT_F64);
        assert_true(num_received > 0);
        assert_true(sent_minus_received == 0);
    }
}

static int half_open(mt_mailbox **mailbox, const mt_group *group, void *memory, int64_t bytes, mt_error *error) {
    int status = mt_cpu_ops.mailbox_open(mailbox, group, memory, bytes, error);
    return group->rank == 1 ? mt_error_set(error, "rank 1 has no peers") : status;
}

static void a_failed_mailbox_is_an_error_on_every_rank(void **state) {
    (void)state;
    mt_ops closed = *backend;
    mt_error error = {{0}};
    mt_grid grid = mt_grid_of_one;
    mt_model_plan plan = {
        .max_tokens = max_tokens, .max_logits = max_tokens, .max_position = SEQ_LENGTH, .train = true};
    closed.mailbox_open = half_open;
    more_options = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap";
    fixture f = open_family("llama", 1, NUM_RANKS, false);
    more_options = "";
    grid.world = world.world;
    if (mt_grid_build(&grid, &f.options.stack, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(mt_model_create(&f.model, &f.options.stack, &grid, &closed, &plan, &error), -1);
    assert_string_equal(error.text, "--tp-comm-overlap is not possible: rank 1 has no peers; leave it out");
    close_trainee(&(trainee){.f = f, .grid = grid});
}

enum { ENTROPY_T = 5, ENTROPY_V = 13, ENTROPY_STRIDE = 8 };

/* sum_t(dlogp logp + dentropy entropy) of whole logits, in float64. */
static double entropy_loss(const double *logits, const int32_t *labels, const float *dlogp, const float *dentropy) {
    double loss = 0;
    for (int t = 0; t < ENTROPY_T; t++) {
        const double *x = logits + t * ENTROPY_V;
        double sum = 0, weighted = 0;
        for (int i = 0; i < ENTROPY_V; i++) sum += exp(x[i]), weighted += exp(x[i]) * x[i];
        loss += (double)dlogp[t] * (x[labels[t]] - log(sum)) + (double)dentropy[t] * (log(sum) - weighted / sum);
    }
    return loss;
}

/* The logits' gradient of log-probabilities and entropies, the vocabulary cut over two ranks, against central
 * differences in float64. The last column of the second rank is padding. */
static void entropies_of_a_cut_vocabulary_have_gradients(void **state) {
    (void)state;
    static const int32_t labels[ENTROPY_T] = {0, 12, 6, 7, 3};
    static const float dlogp[ENTROPY_T] = {-1, -0.5f, 0.25f, 0, -2}, dentropy[ENTROPY_T] = {-0.7f, 2, 0, 1, -1.5f};
    double whole[ENTROPY_T * ENTROPY_V];
    float logits[ENTROPY_T * ENTROPY_STRIDE], stats[4 * ENTROPY_T], parts[2 * 4 * ENTROPY_T];
    float logp[ENTROPY_T], entropy[ENTROPY_T], lse[ENTROPY_T], loss = 0;
    static const layout pairs = {.words = "--tensor-model-parallel-size 2"};
    trainee pair;
    open_trainee(&pair, "llama", &pairs, "");
    const mt_group *tensor = &pair.grid.tensor;
    int64_t first = tensor->rank * 7, count = tensor->rank ? 6 : 7;
    for (int i = 0; i < ENTROPY_T * ENTROPY_V; i++) whole[i] = (double)(float)(4 * sin(1 + i * i));
    for (int t = 0; t < ENTROPY_T; t++)
        for (int64_t i = 0; i < ENTROPY_STRIDE; i++)
            logits[t * ENTROPY_STRIDE + i] = i < count ? (float)whole[t * ENTROPY_V + first + i] : 1e9f;
    mt_tensor_parallel tp = {.ops = backend, .group = tensor, .dtype = MT_F32, .T = ENTROPY_T, .rows = ENTROPY_T};
    mt_cross_entropy_args a = {.T = ENTROPY_T, .stride = ENTROPY_STRIDE, .first = first, .count = count};
    a.logits = a.dlogits = logits, a.labels = labels, a.stats = stats, a.parts = parts;
    a.logp = logp, a.entropy = entropy, a.lse = lse, a.dlogp = dlogp, a.dentropy = dentropy;
    mt_vocab_cross_entropy_forward(&tp, &a);
    for (int t = 0; t < ENTROPY_T; t++) loss += dlogp[t] * logp[t] + dentropy[t] * entropy[t];
    assert_true(fabs((double)loss - entropy_loss(whole, labels, dlogp, dentropy)) < 1e-5);
    backend->cross_entropy_backward(&a, MT_F32, NULL);
    for (int t = 0; t < ENTROPY_T; t++)
        for (int64_t i = 0; i < ENTROPY_STRIDE; i++) {
            const double step = 1e-5;
            double *x = &whole[t * ENTROPY_V + (i < count ? first + i : 0)], before = *x, losses[2];
            for (int sign = 0; sign < 2 && i < count; sign++) {
                *x = before + (sign ? step : -step);
                losses[sign] = entropy_loss(whole, labels, dlogp, dentropy);
            }
            *x = before;
            double want = i < count ? (losses[1] - losses[0]) / (2 * step) : 0;
            double got = (double)logits[t * ENTROPY_STRIDE + i];
            if (!(fabs(got - want) <= 2e-6))
                fail_msg("token %d, column %d: %.9g, should be %.9g", t, (int)i, got, want);
        }
    close_trainee(&pair);
}

const char long_test[] = "a_run_continues_from_any_layout_on_any_other"; // of every family

int main(int argc, char **argv) {
    mt_run_options options;
    mt_error error;
    mt_grid_start(&world, &argc, &argv);
    if (world.world.size != NUM_RANKS) mt_die("run it on %d ranks", NUM_RANKS);
    mt_options_default(&options);
    if (mt_grid_build(&world, &options.stack, &error) != 0) mt_die("%s", error.text);
    mt_options_free(&options);
    MT_CHECK(world.world.rank != 0 || new_folder(root) == 0);
    mt_broadcast(&world.world, root, sizeof root, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(channels_close_in_the_order_of_opening),
        cmocka_unit_test(every_message_has_the_length_of_its_receive),
        cmocka_unit_test(entropies_of_a_cut_vocabulary_have_gradients),
        cmocka_unit_test(a_failed_mailbox_is_an_error_on_every_rank),
        cmocka_unit_test(a_run_continues_from_any_layout_on_any_other),
        cmocka_unit_test(a_run_with_multi_token_prediction_continues_from_any_layout_on_any_other),
        cmocka_unit_test(the_same_layout_continues_bit_for_bit),
        cmocka_unit_test(every_layout_saves_the_bytes_of_one_rank),
        cmocka_unit_test(the_same_layout_continues_bit_for_bit_in_fp16),
        cmocka_unit_test(the_same_layout_continues_bit_for_bit_in_fp8),
        cmocka_unit_test(models_with_states_continue_bit_for_bit_in_fp8),
        cmocka_unit_test(every_layout_saves_the_scales_of_one_rank),
        cmocka_unit_test(a_folder_in_fp8_loads_on_every_layout_as_on_one_rank),
        cmocka_unit_test(small_files_have_the_same_bytes),
        cmocka_unit_test(blockwise_muon_takes_each_part_for_a_matrix),
        cmocka_unit_test(narrow_shares_leave_room_for_gradients_of_the_input),
        cmocka_unit_test(a_missing_tensor_is_an_error_on_every_rank),
        cmocka_unit_test(a_failed_write_is_an_error_on_every_rank),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    if (world.world.rank == 0) rmdir(root);
    mt_grid_stop(&world);
    return failures;
}
