/* hf_folder.c: opens a folder of Hugging Face in one call, to generate. */
#include "hf_folder.h"

#include "../base/watchdog.h"
#include "../models/special_tokens.h"
#include "../options/option_agree.h"
#include "../options/option_reader.h"
#include "../options/option_table.h"
#include "../models/generate.h"
#include "checkpoint_buckets.h"
#include "checkpoint_load.h"
#include "run_options.h"

#include <stdlib.h>

/* The options of a folder: its shape, then the caller's settings. */
static int mt_hf_read_options(mt_hf *hf, const char *folder, const char *const *settings, mt_error *error) {
    mt_run_options *o = &hf->options;
    const mt_group *world = &hf->grid->world;
    mt_options_default(o);
    for (; settings && settings[0]; settings += 2)
        if (mt_options_set(o, settings[0], settings[1], error) != 0) return -1;
    if (mt_options_set(o, "load", folder, error) != 0 || mt_options_read_shape(o, error) != 0) return -1;
    if (mt_options_finish(o, MT_PROGRAM_INFER, world->size, error) != 0) return -1;
    return mt_stops_of_options(&hf->stops, o, error);
}

static int mt_hf_create(mt_hf *hf, int64_t count, int64_t max_tokens, mt_error *error) {
    enum { CONTEXT = 4096 };
    const mt_run_options *o = &hf->options;
    int64_t context = o->stack.max_position_embeddings;
    if (max_tokens > context)
        return mt_error_set(error, "%s: the model's context is %lld tokens; ask for at most so many, not %lld", o->load,
                            (long long)context, (long long)max_tokens);
    if (max_tokens == 0) max_tokens = mt_min(context, CONTEXT);
    mt_model_plan plan = mt_generator_plan(count, max_tokens, count * max_tokens);
    mt_run_state ignored;
    const mt_ops *ops = mt_backend_open(o->device, hf->grid, error);
    const mt_group *world = &hf->grid->world;
    if (mt_agree(world, world->rank == 0 && mt_checkpoint_check(o, o->load, error) != 0, error) != 0) return -1;
    if (!ops || mt_model_create(&hf->model, &o->stack, hf->grid, ops, &plan, error) != 0) return -1;
    return mt_checkpoint_load(hf->model, o, &ignored, o->load, error);
}

int mt_hf_open(mt_hf **out, const char *folder, const char *const *settings, int64_t count, int64_t max_tokens,
               mt_grid *grid, mt_error *error) {
    mt_hf *hf = mt_calloc(sizeof *hf);
    hf->grid = grid;
    int status = mt_agree(&grid->world, mt_hf_read_options(hf, folder, settings, error) != 0, error);
    if (status == 0) status = mt_options_agree(&hf->options, &grid->world, error);
    if (status == 0) mt_watch_start(&hf->options.stack, &hf->options.typed_names);
    if (status == 0) status = mt_grid_build(grid, &hf->options.stack, error);
    if (status == 0) status = mt_hf_create(hf, count, max_tokens, error);
    mt_watch_enter(MT_WATCH_STEP);
    if (status != 0) mt_hf_close(hf);
    *out = status == 0 ? hf : NULL;
    return status;
}

void mt_hf_close(mt_hf *hf) {
    if (!hf) return;
    mt_model_destroy(hf->model);
    mt_grid_clear(hf->grid);
    mt_options_free(&hf->options);
    free(hf);
}
