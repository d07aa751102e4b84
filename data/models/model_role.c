/* model_role.c: models that take turns on the ranks of a job: their layouts, their rest, their scores. */
#include "model_role.h"

#include "../base/file.h"
#include "../options/option_rules.h"
#include "../options/options.h"

#include <stdlib.h>
#include <string.h>

/* ---- roles */

void mt_model_role_begin(mt_model_role *role, const char *name, const mt_run_options *options, const mt_grid *grid,
                         const mt_ops *ops) {
    *role = (mt_model_role){
        .name = name, .options = *options, .grid = grid, .ops = ops, .awake = MT_USE_TRAINING | MT_USE_GENERATION};
    if (options->param_offload) role->rests |= MT_USE_GENERATION;
    if (options->grad_offload) role->rests |= 1u << MT_PART_GRADS;
    if (options->optimizer_offload) role->rests |= 1u << MT_PART_OPTIMIZER;
}

void mt_model_role_lend(mt_model_role *role, const char *name, const mt_run_options *options, mt_model *trained) {
    mt_model_role_begin(role, name, options, mt_model_grid(trained), mt_model_ops(trained));
    role->model = trained, role->is_lent = true;
}

void mt_model_role_lend_base(mt_model_role *role, const char *name, mt_model_role *adapted) {
    mt_model_role_lend(role, name, &adapted->options, adapted->model);
    role->adapted = adapted, role->rests = 0;
}

bool mt_model_role_is_apart(const mt_model_role *role) {
    return role->grid == &role->own_grid;
}

int mt_model_role_build_grid(mt_model_role *role, mt_error *error) {
    role->own_grid = mt_grid_new(role->grid);
    role->grid = &role->own_grid;
    if (mt_grid_build(&role->own_grid, &role->options.stack, error) != 0) return -1;
    role->ops = mt_backend_open(role->options.device, &role->own_grid, error);
    return role->ops ? 0 : -1;
}

/* Derives the options of another layout, and builds its grid. batch: the samples of a step, which stay the run's; they
 * need not divide by these data-parallel ranks. */
static int derive_layout(mt_model_role *role, int64_t batch, const char *option, mt_error *error) {
    mt_run_options *o = &role->options;
    mt_training_stage stage = o->stack.stage;
    mt_error cause;
    o->stack.stage = MT_STAGE_PT; // the sizes of an iteration are the run's
    int status = mt_options_derive(o, MT_PROGRAM_INFER, role->grid->world.size, &cause);
    o->stack.stage = stage, o->stack.global_batch_size = batch;
    if (status != 0) return mt_error_set(error, "%s: %s", option, cause.text);
    return mt_model_role_build_grid(role, error);
}

int mt_model_role_place(mt_model_role *role, mt_model_role_sizes sizes, const char *option, mt_error *error) {
    int64_t batch = role->options.stack.global_batch_size; // the sizes leave it open
    return mt_model_role_sizes_apply(&role->options, sizes) ? derive_layout(role, batch, option, error) : 0;
}

int mt_model_role_place_apart(mt_model_role *role, mt_model_role_sizes sizes, const char *option, mt_error *error) {
    int64_t batch = role->options.stack.global_batch_size;
    role->options.stack.tensor_model_parallel_size = 0; // differs from any size
    MT_CHECK(mt_model_role_sizes_apply(&role->options, sizes));
    return derive_layout(role, batch, option, error);
}

mt_model_plan mt_model_role_plan(const mt_model_role *role, const mt_model_plan *of_run, int64_t context_size) {
    mt_model_plan plan = {.max_position = of_run->max_position, .host_memory = of_run->host_memory};
    plan.max_tokens = plan.max_logits = of_run->max_tokens;
    if (mt_model_role_is_apart(role))
        plan.max_tokens = plan.max_logits = mt_rank_tokens(&role->options.stack, of_run->max_tokens * context_size);
    plan.max_patches = of_run->max_patches;
    return plan;
}

/* True if a picture's patches are the same numbers for both. The folder of the role has its processor's file, or the
 * patches are those of its family. */
static bool patches_agree(const mt_image_config *run, const mt_image_config *role, bool has_file) {
    bool agree = run->patch_size == role->patch_size && run->temporal_patch_size == role->temporal_patch_size &&
                 run->merge_size == role->merge_size;
    for (int c = 0; c < MT_IMAGE_CHANNELS && has_file; c++)
        agree = agree && run->mean[c] == role->mean[c] && run->std[c] == role->std[c];
    return agree;
}

int mt_model_role_check_pictures(const mt_model_role *role, const char *folder, const mt_image_reader *reader,
                                 mt_error *error) {
    const mt_options *o = &role->options.stack;
    mt_image_config config;
    if (o->vision.tower == MT_VISION_NONE)
        return mt_error_set(error,
                            "%.400s: the %s has no vision tower, and the data have pictures; take a model with one",
                            folder ? folder : "", role->name);
    bool has_file =
        folder && (mt_folder_has(folder, "processor_config.json") || mt_folder_has(folder, "preprocessor_config.json"));
    if (mt_image_config_read(&config, o, has_file ? folder : NULL, error) != 0) return -1;
    if (o->vision.image_token_id == reader->image_token_id && patches_agree(&reader->config, &config, has_file))
        return 0;
    return mt_error_set(error,
                        "%.400s: the %s takes other patches or another image token than the trained model (sizes, "
                        "means and deviations of the processor's file); take a model with the same ones",
                        folder ? folder : "", role->name);
}

int mt_model_role_create(mt_model_role *role, const mt_model_plan *plan, mt_error *error) {
    if (mt_model_create(&role->model, &role->options.stack, role->grid, role->ops, plan, error) != 0) return -1;
    if (mt_model_role_is_apart(role)) mt_batch_alloc(&role->batch, plan->max_tokens * role->grid->context.size);
    if (mt_model_role_is_apart(role) && plan->max_patches > 0)
        mt_batch_alloc_images(&role->batch, &role->options.stack, plan->max_patches);
    if (!plan->train) role->rests &= MT_USE_GENERATION;
    return 0;
}

void mt_model_role_close(mt_model_role *role) {
    if (!role->is_lent) mt_model_destroy(role->model);
    mt_batch_free(&role->batch);
    if (mt_model_role_is_apart(role)) mt_grid_clear(&role->own_grid);
    *role = (mt_model_role){0};
}

int mt_model_role_use(mt_model_role *role, unsigned parts, mt_error *error) {
    unsigned rest = role->rests & role->awake & ~parts, wake = parts & ~role->awake;
    if (!role->model) return 0;
    if (rest && mt_model_rest(role->model, rest, error) != 0) return -1;
    if (wake && mt_model_wake(role->model, wake, error) != 0) return -1;
    role->awake = (role->awake & ~rest) | wake;
    return 0;
}

/* ---- scores */

/* Micro-batches of a run that a role scores. */
typedef struct turn {
    const mt_model_role *role;
    int64_t count, ranks;
    mt_model_role_source *source;
    mt_score_sink *sink;
    void *context, *sink_context;
} turn;

/* The number in the run of micro-batch `index` of this rank's replica. */
static int64_t number_of(const turn *t, int64_t index) {
    return index * t->role->grid->data.size + t->role->grid->data.rank;
}

/* A replica without a micro-batch scores one token of padding: its ranks may share experts with others. */
static int read_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const turn *t = context;
    int64_t number = number_of(t, index);
    if (number < t->count) return t->source(t->context, number / t->ranks, number % t->ranks, batch, error);
    batch->num_tokens = batch->num_spans = 1, batch->images.num_images = 0;
    batch->spans[0] = (mt_span){0, 1, 0, 1, true};
    batch->tokens[0] = batch->labels[0] = batch->positions[0] = 0;
    batch->loss_mask[0] = 0, batch->token_index[0] = -1;
    return 0;
}

static void pass_scores(void *context, int64_t index, const mt_batch *batch, const double *numbers,
                        const double *entropy) {
    const turn *t = context;
    int64_t number = number_of(t, index);
    if (number < t->count) t->sink(t->sink_context, number, batch, numbers, entropy);
}

int mt_model_role_score(mt_model_role *role, const mt_model_role_scoring *s, mt_error *error) {
    turn t = {role, s->slots * s->ranks, s->ranks, s->source, s->sink, s->context, s->sink_context};
    mt_batch *batch = s->batch;
    int64_t here = mt_divide_up(t.count, role->grid->data.size);
    mt_model_role *owner = role->adapted ? role->adapted : role;
    if (mt_model_role_use(owner, MT_USE_SCORING, error) != 0) return -1;
    if (mt_model_role_is_apart(role)) batch = &role->batch;
    mt_model_use_adapters(role->model, !role->adapted);
    int status = mt_score_tokens(role->model, here, read_batch, &t, batch, pass_scores, &t, error);
    mt_model_use_adapters(role->model, true);
    return status == 0 ? mt_model_role_use(owner, MT_USE_NOTHING, error) : -1;
}

int *mt_grid_owners(const mt_grid *grid) {
    bool owns = grid->pipeline.rank == grid->pipeline.size - 1 && grid->tensor.rank == 0 && grid->context.rank == 0;
    double *numbers = mt_calloc(grid->data.size * 8);
    int *owners = mt_malloc(grid->data.size * (int64_t)sizeof *owners);
    if (owns) numbers[grid->data.rank] = grid->world.rank;
    mt_all_reduce_sum(&grid->world, numbers, grid->data.size, MT_F64);
    for (int i = 0; i < grid->data.size; i++) owners[i] = (int)numbers[i];
    free(numbers);
    return owners;
}
