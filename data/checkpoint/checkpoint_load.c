/* checkpoint_load.c: loads checkpoints and Hugging Face folders. Each row of the parameter table says which rows of
 * which tensor it is. Invariants: every rank checks the whole folder before anything is set; a tensor that no row takes
 * is refused unless it is known to hold no weights. */
#include "checkpoint_load.h"

#include "../base/file.h"
#include "checkpoint_buckets.h"
#include "checkpoint_folder.h"
#include "checkpoint_fp8.h"
#include "checkpoint_trainer.h"
#include "megatron_folder.h"
#include "resume.h"

#include <stdlib.h>
#include <string.h>

/* A checkpoint of --save, unlike a Hugging Face folder, must have the run's state and the optimizer's: without them
 * training would begin anew in silence. */
static int mt_run_check(const char *folder, bool has_state, bool has_optimizer, bool *damaged, mt_error *error) {
    const char *name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    *damaged = !has_state && mt_iteration_of(name) >= 0;
    if (*damaged)
        return mt_error_set(
            error, "%s: damaged: its trainer.json is not there (--finetune begins anew from its weights)", folder);
    if (!has_state || has_optimizer) return 0;
    return mt_error_set(
        error,
        "%s: was saved without the optimizer's state; continue with a new optimizer by --no-load-optim, "
        "or begin anew from these weights by --finetune",
        folder);
}

/* Clears the moments: a damaged checkpoint, or the steps before a rewind, may have set some. */
static void mt_optimizer_zero(mt_model *m) {
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    for (int64_t i = 0; i < num_params && mt_model_get_plan(m)->train; i++)
        for (int state = MT_STATE_EXP_AVG; state < mt_num_states(params[i].optimizer) && params[i].trained; state++) {
            mt_shard shard = mt_bucket_shard(m, params[i].bucket, (mt_param_state)state);
            mt_shard_write(m, &shard, params[i].offset, NULL, params[i].rows * params[i].cols);
        }
}

/* The numbers of the run that wrote a checkpoint of Megatron-LM, on rank 0. */
static int mt_megatron_run_read(const mt_run_options *o, const char *folder, bool no_optimizer, mt_run_state *state,
                                mt_error *error) {
    mt_megatron *checkpoint;
    if (mt_megatron_open_common(&checkpoint, folder, error) != 0) return -1;
    mt_megatron_run run = mt_megatron_read_run(checkpoint);
    mt_megatron_close(checkpoint);
    *state = (mt_run_state){.iteration = run.iteration, .consumed_train_samples = run.consumed_train_samples};
    state->consumed_valid_samples = run.consumed_valid_samples, state->optimizer_step = run.optimizer_step;
    state->skipped_samples = run.skipped_samples;
    if (no_optimizer || run.iteration == 0) return 0;
    if (o->stack.optimizer != MT_OPTIMIZER_ADAMW)
        return mt_error_set(
            error,
            "%s: the optimizer's state of a checkpoint of Megatron-LM is read for --optimizer adam; give "
            "that, or continue with a new optimizer by --no-load-optim",
            folder);
    if (run.other_optimizer && strcmp(run.other_optimizer, "torch") != 0)
        return mt_error_set(error,
                            "%s: the optimizer's state is in buckets (dp_reshardable), which are not read for %s; "
                            "save it by Megatron-LM with --dist-ckpt-optim-fully-reshardable, or continue with a new "
                            "optimizer by --no-load-optim",
                            folder, run.other_optimizer);
    if (run.has_optimizer) return 0;
    return mt_error_set(error,
                        "%s: %s; continue with a new optimizer by --no-load-optim, or begin anew from these weights by "
                        "--finetune",
                        folder,
                        run.other_optimizer ? "the optimizer's state of the format torch is not read"
                                            : "was saved without the optimizer's state");
}

/* Loads the run's state and the optimizer from a checkpoint of Megatron-LM. */
static int mt_megatron_run_load(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder, bool own,
                                bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    bool begins = o->finetune && !own, no_optimizer = o->no_load_optim && !own;
    mt_loss_average average = {0};
    int status = 0;
    if (world->rank == 0 && !begins) status = mt_megatron_run_read(o, folder, no_optimizer, state, error);
    if (mt_agree(world, status != 0, error) != 0) return -1;
    mt_broadcast(world, state, sizeof *state, 0);
    mt_train_set_loss_average(m, &average);
    status = mt_fp8_state_load(m, folder, false, error);
    if (status == 0 && state->iteration > 0 && !no_optimizer)
        return mt_megatron_load(m, o, folder, false, NULL, damaged, error);
    mt_optimizer_zero(m);
    state->optimizer_step = 0; // like the moments
    return status;
}

/* True if a folder torch_dist that --save wrote holds the optimizer's state. */
static bool mt_dist_has_optimizer(const char *folder) {
    mt_megatron *checkpoint;
    mt_error ignored;
    if (mt_megatron_open_common(&checkpoint, folder, &ignored) != 0) return false;
    bool has = mt_megatron_read_run(checkpoint).has_optimizer;
    mt_megatron_close(checkpoint);
    return has;
}

/* Loads the run's state and the optimizer from one iteration's folder, if the run continues from it. `own`: it is this
 * run's checkpoint, and --finetune and --no-load-optim do not apply. */
static int mt_run_load(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder, bool own,
                       const mt_checksums *sums, bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_loss_average average = {0};
    if (!mt_model_get_plan(m)->train) return 0;
    bool no_optimizer = o->no_load_optim && !own, has_state = mt_folder_has(folder, "trainer.json");
    bool has_optimizer =
        mt_folder_has(folder, "optimizer.safetensors") || mt_folder_has(folder, "optimizer.safetensors.index.json");
    bool is_dist = mt_folder_is_megatron(folder);
    if (is_dist && !has_state) return mt_megatron_run_load(m, o, state, folder, own, damaged, error);
    if (is_dist) has_optimizer = mt_dist_has_optimizer(folder);
    bool continues = has_state && (own || !o->finetune), begins = o->finetune && !own;
    int status = world->rank == 0 && !begins
                     ? mt_run_check(folder, has_state, has_optimizer || no_optimizer, damaged, error)
                     : 0;
    if (mt_agree(world, status != 0, error) != 0) return -1;
    mt_broadcast(world, &continues, sizeof continues, 0); // rank 0's folder decides
    if (continues) {
        char *path = mt_path_join(folder, "trainer.json");
        status = mt_agree(world, mt_trainer_read(o, state, &average, path, error) != 0, error);
        free(path);
    }
    mt_train_set_loss_average(m, &average);
    if (status == 0) status = mt_fp8_state_load(m, folder, continues, error);
    if (status == 0 && continues && !no_optimizer)
        return is_dist ? mt_megatron_load(m, o, folder, false, sums, damaged, error)
                       : mt_stem_load(m, o, folder, "optimizer", sums, damaged, error);
    mt_optimizer_zero(m);
    state->optimizer_step = 0; // like the moments
    return status;
}

/* Loads one folder: weights of a stem, and the run's state unless they are the base of adapters. *damaged: its files
 * differ from the saved ones. If loading fails for another reason, such as the name of a tensor, rank 0 first looks for
 * damage in all files. */
static int mt_folder_load(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder,
                          const char *stem, bool own, bool *damaged, mt_error *error) {
    bool is_base = o->stack.lora_rank > 0 && strcmp(stem, "model") == 0;
    bool continues = mt_model_get_plan(m)->train && !is_base && (own || !(o->finetune || o->no_load_optim));
    int parts = continues ? MT_VERIFY_OPTIMIZER : 0;
    const mt_group *world = &mt_model_grid(m)->world;
    mt_checksums sums = {0};
    *damaged = world->rank == 0 && mt_checkpoint_verify(folder, parts, error) != 0;
    int status = mt_agree(world, *damaged, error);
    if (status == 0) status = mt_agree(world, mt_checksums_read(&sums, folder, error) != 0, error);
    const mt_checksums *checked = sums.count > 0 ? &sums : NULL;
    if (status == 0 && strcmp(stem, "model") == 0 && mt_folder_is_megatron(folder))
        status = mt_megatron_load(m, o, folder, true, checked, damaged, error);
    else if (status == 0)
        status = mt_stem_load(m, o, folder, stem, checked, damaged, error);
    if (status == 0 && !is_base) status = mt_run_load(m, o, state, folder, own, checked, damaged, error);
    if (status != 0 && checked) {
        mt_error found;
        if (world->rank == 0 && !*damaged && mt_checkpoint_verify(folder, parts | MT_VERIFY_TENSORS, &found) != 0)
            *damaged = true, *error = found;
        mt_broadcast(world, error, sizeof *error, 0);
    }
    mt_broadcast(world, damaged, sizeof *damaged, 0);
    mt_checksums_free(&sums);
    return status;
}

/* Reports the damage of a checkpoint; returns the iteration of the one before, the same on every rank, or -1. */
static int64_t mt_checkpoint_fall_back(const mt_group *world, const char *folder, int64_t from,
                                       const mt_error *damage) {
    int64_t number = -1;
    mt_error ignored;
    if (world->rank == 0) {
        number = mt_checkpoint_whole_before(folder, from, &ignored);
        if (number >= 0)
            fprintf(stderr, "warning: %s; going on from iteration %lld\n", damage->text, (long long)number);
    }
    mt_broadcast(world, &number, sizeof number, 0);
    return number;
}

/* mt_checkpoint_locate on rank 0, for all ranks: between the calls of two ranks a save could publish another latest.
 * *number: the iteration, or -1 for a folder that is no checkpoint's. */
static int mt_checkpoint_choose(const mt_group *world, const char *folder, char **path, int64_t *number,
                                mt_error *error) {
    char *found = world->rank == 0 ? mt_checkpoint_locate(folder, error) : NULL;
    *number = found && strrchr(found, '/') ? mt_iteration_of(strrchr(found, '/') + 1) : -1;
    *path = NULL;
    bool is_latest = found && strcmp(found, folder) != 0; // not the folder itself
    bool is_release = is_latest && *number < 0;           // Megatron-LM's converted weights
    free(found);
    if (mt_agree(world, world->rank == 0 && !found, error) != 0) return -1;
    mt_broadcast(world, &is_latest, sizeof is_latest, 0);
    mt_broadcast(world, &is_release, sizeof is_release, 0);
    mt_broadcast(world, number, sizeof *number, 0);
    if (world->rank == 0 && is_latest && !mt_folder_has(folder, "latest_checkpointed_iteration.txt"))
        fprintf(stderr,
                "warning: %s: has no latest_checkpointed_iteration.txt; going on from iteration %lld, the newest whole "
                "checkpoint there\n",
                folder, (long long)*number);
    *path = is_release  ? mt_path_join(folder, "release")
            : is_latest ? mt_iteration_path(folder, *number)
                        : mt_strdup(folder);
    bool sees = mt_folder_has_weights(*path);
    if (!sees)
        mt_error_set(error, "%s: rank 0 sees it, rank %d does not; on several hosts it must be a folder of all", *path,
                     world->rank);
    return mt_agree(world, !sees, error);
}

/* Loads the latest checkpoint of a folder; if it is damaged and the run's own, the one before. */
static int mt_latest_load(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder,
                          const char *stem, bool own, char **found, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    bool falls_back = own || (mt_options_falls_back(o) && mt_path_same(folder, o->save));
    bool damaged = false;
    char *path;
    int64_t number;
    int status = mt_checkpoint_choose(world, folder, &path, &number, error);
    *state = (mt_run_state){0};
    if (status != 0 && falls_back) number = INT64_MAX, damaged = true;
    if (status == 0) status = mt_folder_load(m, o, state, path, stem, own, &damaged, error);
    while (status != 0 && damaged && falls_back && number >= 0) {
        number = mt_checkpoint_fall_back(world, folder, number, error);
        if (number < 0) break;
        free(path);
        path = mt_iteration_path(folder, number);
        *state = (mt_run_state){0};
        mt_optimizer_zero(m);
        status = mt_folder_load(m, o, state, path, stem, own, &damaged, error);
    }
    if (status != 0 && damaged && path) {
        if (world->rank == 0) mt_checkpoint_advise(path, error);
        mt_broadcast(world, error, sizeof *error, 0);
    }
    if (status == 0 && found)
        *found = path;
    else
        free(path);
    return status;
}

/* The adapters of a new run; also in place of trained ones, whose B are not zero. */
static void mt_adapters_init(mt_model *m) {
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    for (const mt_param *param = params; param < params + num_params; param++) {
        if (!mt_param_is_adapter(param)) continue;
        for (int state = MT_STATE_WEIGHTS; state <= MT_STATE_MASTER; state++) {
            mt_shard shard = mt_state_shard(m, param, (mt_param_state)state);
            if (shard.data) mt_shard_write(m, &shard, param->offset, NULL, param->rows * param->cols);
        }
        mt_param_init(m, param);
    }
}

int mt_checkpoint_load_adapter(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder, bool own,
                               mt_error *error) {
    if (folder) return mt_latest_load(m, o, state, folder, "adapter_model", own, NULL, error);
    mt_adapters_init(m);
    *state = (mt_run_state){0};
    if (!mt_model_get_plan(m)->train) return 0;
    mt_optimizer_zero(m);
    mt_train_set_loss_average(m, &(mt_loss_average){0});
    return mt_fp8_state_load(m, "", false, error);
}

int mt_checkpoint_load_found(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder, bool own,
                             char **found, mt_error *error) {
    bool adapts = o->stack.lora_rank > 0;
    if (adapts && own) return mt_checkpoint_load_adapter(m, o, state, folder, own, error);
    int status = mt_latest_load(m, o, state, folder, "model", own, found, error);
    return status == 0 && adapts ? mt_checkpoint_load_adapter(m, o, state, o->load_adapter, false, error) : status;
}

int mt_checkpoint_load(mt_model *m, const mt_run_options *o, mt_run_state *state, const char *folder, mt_error *error) {
    return mt_checkpoint_load_found(m, o, state, folder, false, NULL, error);
}
