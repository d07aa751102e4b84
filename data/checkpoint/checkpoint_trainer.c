/* checkpoint_trainer.c: reads trainer.json, with which a run continues bit for bit. */
#include "checkpoint_trainer.h"

#include "../base/file.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "checkpoint_folder.h"
#include "megatron_folder.h"
#include "resume.h"

#include <stdlib.h>
#include <string.h>

/* The most iterations and samples of a run, like --train-iters and --train-samples: sums of these do not overflow. */
static const int64_t MT_MOST_COUNTED = 1000000000000;

/* Reads a whole number of trainer.json in [0, high]. */
static int mt_trainer_int(const json_t *json, const char *key, int64_t high, const char *path, int64_t *value,
                          mt_error *error) {
    const json_t *item = json_object_get(json, key);
    if (mt_json_int(item, 0, high, value)) return 0;
    return mt_error_set(error, "%s: has no whole number \"%s\"%s; begin anew from these weights by --finetune", path,
                        key, json_is_integer(item) ? " in its range" : "");
}

/* The number and the order of samples depend on these options, so a run keeps them. */
static int mt_trainer_agrees(const char *path, const char *option, int64_t then, int64_t now, mt_error *error) {
    if (then == now) return 0;
    return mt_error_set(error, "%s: the run was begun with %s %lld, not %lld; give that, or begin anew by --finetune",
                        path, option, (long long)then, (long long)now);
}

/* Reads the sizes that the data were ordered for; older files lack them. */
static int mt_trainer_read_plans(const json_t *json, mt_run_state *state, const char *path, mt_error *error) {
    const json_t *plans = json_object_get(json, "data_plans"), *plan;
    size_t i;
    state->data.num_plans = 0;
    if (!plans) return 0;
    bool good = json_is_array(plans) && json_array_size(plans) <= MT_MAX_DATA_PLANS;
    json_array_foreach(plans, i, plan) {
        for (size_t k = 0; k < 2 && good; k++) {
            int64_t low = i > 0 ? state->data.plans[i - 1][k] : 0;
            good = mt_json_int(json_array_get(plan, k), low, MT_MOST_COUNTED, &state->data.plans[i][k]);
        }
        if (!good) break;
        state->data.num_plans++;
    }
    if (good) return 0;
    return mt_error_set(error,
                        "%s: \"data_plans\" is not a list of up to %d pairs of ascending sizes; begin anew from "
                        "these weights by --finetune",
                        path, MT_MAX_DATA_PLANS);
}

/* Reads what identifies the training data; older files lack it, and then all is 0. */
static int mt_trainer_read_data(const json_t *json, mt_run_state *state, const char *path, mt_error *error) {
    state->data.documents = state->data.tokens = state->data.fingerprint = state->data.group = 0;
    if (mt_trainer_read_plans(json, state, path, error) != 0) return -1;
    if (!json_object_get(json, "data_fingerprint")) return 0;
    if (mt_trainer_int(json, "data_documents", INT64_MAX, path, &state->data.documents, error) != 0) return -1;
    if (mt_trainer_int(json, "data_tokens", INT64_MAX, path, &state->data.tokens, error) != 0) return -1;
    if (mt_trainer_int(json, "data_group", INT64_MAX, path, &state->data.group, error) != 0) return -1;
    return mt_trainer_int(json, "data_fingerprint", INT64_MAX, path, &state->data.fingerprint, error);
}

/* The steps without an update, which older files lack; the scale of the loss, which runs in fp16 have, and the samples
 * that they skipped, which runs that began in fp16 keep. Scale 0: no step was made. */
static int mt_trainer_read_skips(const json_t *json, mt_run_state *state, const char *path, mt_error *error) {
    mt_loss_scaler *scaler = &state->loss_scaler;
    const json_t *trackers = json_object_get(json, "hysteresis_tracker"), *scale = json_object_get(json, "loss_scale");
    *scaler = (mt_loss_scaler){0}, state->skipped_samples = state->skipped_iterations = 0;
    if (json_object_get(json, "skipped_iterations") &&
        mt_trainer_int(json, "skipped_iterations", MT_MOST_COUNTED, path, &state->skipped_iterations, error) != 0)
        return -1;
    if (json_object_get(json, "skipped_samples") &&
        mt_trainer_int(json, "skipped_samples", state->consumed_train_samples, path, &state->skipped_samples, error) !=
            0)
        return -1;
    if (!scale) return 0;
    scaler->scale = json_number_value(scale);
    bool in_range = scaler->scale == 0 || (scaler->scale >= 1e-20 && scaler->scale <= 1e300);
    if (!json_is_number(scale) || !in_range)
        return mt_error_set(error,
                            "%s: has no number \"loss_scale\" in its range; begin anew from these weights by "
                            "--finetune",
                            path);
    if (mt_trainer_int(json, "growth_tracker", MT_MOST_COUNTED, path, &scaler->growth_tracker, error) != 0) return -1;
    if (!mt_json_int(trackers, -MT_MOST_COUNTED, MT_MOST_COUNTED, &scaler->hysteresis_tracker))
        return mt_error_set(error,
                            "%s: has no whole number \"hysteresis_tracker\"; begin anew from these weights by "
                            "--finetune",
                            path);
    return 0;
}

int mt_trainer_read(const mt_run_options *o, mt_run_state *state, mt_loss_average *average, const char *path,
                    mt_error *error) {
    int64_t version, seed, data_seed, seq_length, sft = o->sft, packed = o->sequence_packing, stage = o->stack.stage;
    int64_t prompts = o->rollout_batch_size, group = o->num_return_sequences;
    int64_t loader = o->dataloader_type;
    json_t *json = mt_json_read(path, error);
    int status = json ? mt_trainer_int(json, "version", INT64_MAX, path, &version, error) : -1;
#define MT_READ_STATE(field)                                                                                           \
    if (status == 0) status = mt_trainer_int(json, #field, MT_MOST_COUNTED, path, &state->field, error);
    MT_RUN_STATE_FIELDS(MT_READ_STATE)
#undef MT_READ_STATE
    if (status == 0) status = mt_trainer_read_skips(json, state, path, error);
    if (status == 0 && json_object_get(json, "loss_average")) {
        average->mean = json_number_value(json_object_get(json, "loss_average"));
        if (!json_is_number(json_object_get(json, "loss_average")))
            status = mt_error_set(
                error, "%s: has no number \"loss_average\"; begin anew from these weights by --finetune", path);
        if (status == 0)
            status = mt_trainer_int(json, "loss_average_steps", MT_MOST_COUNTED, path, &average->steps, error);
    }
    if (status == 0 && json_object_get(json, "stage"))
        status = mt_trainer_int(json, "stage", MT_STAGE_KD, path, &stage, error);
    if (status == 0 && json_object_get(json, "rollout_batch_size")) {
        status = mt_trainer_int(json, "rollout_batch_size", INT64_MAX, path, &prompts, error);
        if (status == 0) status = mt_trainer_int(json, "num_return_sequences", INT64_MAX, path, &group, error);
    }
    int64_t each = mt_max(o->rollout_batch_size, 1); // per iteration; older files lack the next two keys
    if (status == 0 && o->stack.stage == MT_STAGE_RL)
        state->consumed_prompts = mt_min(state->iteration, MT_MOST_COUNTED / each) * each;
    if (status == 0 && json_object_get(json, "consumed_prompts")) {
        status = mt_trainer_int(json, "consumed_prompts", MT_MOST_COUNTED, path, &state->consumed_prompts, error);
        if (status == 0)
            status = mt_trainer_int(json, "prompts_fingerprint", INT64_MAX, path, &state->prompts_fingerprint, error);
    }
    if (status == 0) status = mt_trainer_int(json, "seed", INT64_MAX, path, &seed, error);
    data_seed = status == 0 ? seed : 0; // older files lack it
    if (status == 0 && json_object_get(json, "data_seed"))
        status = mt_trainer_int(json, "data_seed", INT64_MAX, path, &data_seed, error);
    if (status == 0) status = mt_trainer_int(json, "seq_length", INT64_MAX, path, &seq_length, error);
    if (status == 0 && json_object_get(json, "sft")) { // older files lack these
        status = mt_trainer_int(json, "sft", 1, path, &sft, error);
        if (status == 0) status = mt_trainer_int(json, "sequence_packing", 1, path, &packed, error);
    }
    const json_t *named = json_object_get(json, "optimizer"); // older files lack it
    const char *optimizer = named ? json_string_value(named) : mt_optimizer_name(MT_OPTIMIZER_ADAMW);
    const char *own = mt_optimizer_name(o->stack.optimizer);
    if (status == 0 && !optimizer)
        status =
            mt_error_set(error, "%s: \"optimizer\" is not a name; begin anew from these weights by --finetune", path);
    if (status == 0 && state->iteration > 0 && !o->no_load_optim && strcmp(optimizer, own) != 0)
        status = mt_error_set(error,
                              "%s: the run was begun with --optimizer %s, not %s; give that, or begin with new states "
                              "by --no-load-optim",
                              path, optimizer, own);
    if (status == 0) status = mt_trainer_read_data(json, state, path, error);
    if (status == 0 && json_object_get(json, "dataloader_type"))
        status = mt_trainer_int(json, "dataloader_type", MT_DATALOADER_CYCLIC, path, &loader, error);
    json_decref(json);
    if (status != 0) return -1;
    if (version > MT_TRAINER_VERSION)
        return mt_error_set(error, "%s: version %lld was written by a later version of this program; update it", path,
                            (long long)version);
    if (state->iteration == 0) return 0; // converted weights: the order of samples begins here
    if (!o->no_load_rng && mt_trainer_agrees(path, "--seed", seed, o->stack.seed, error) != 0) return -1;
    int64_t orders = mt_options_data_seed(o);
    if (!o->no_load_rng && mt_trainer_agrees(path, "--data-seed", data_seed, orders, error) != 0) return -1;
    if (stage != (int64_t)o->stack.stage && (stage > MT_STAGE_SFT || o->stack.stage > MT_STAGE_SFT))
        return mt_error_set(error, "%s: the run was begun with another --stage; give that, or begin anew by --finetune",
                            path);
    bool writes = o->stack.stage == MT_STAGE_RL; // prompts and responses are numbered by these sizes
    if (writes && mt_trainer_agrees(path, "--rollout-batch-size", prompts, o->rollout_batch_size, error) != 0)
        return -1;
    if (writes && mt_trainer_agrees(path, "--num-return-sequences", group, o->num_return_sequences, error) != 0)
        return -1;
    if (mt_trainer_agrees(path, "--sft", sft, o->sft, error) != 0) return -1;
    bool reorders = !o->no_load_rng && loader != (int64_t)o->dataloader_type;
    if (reorders)
        return mt_error_set(error,
                            "%s: the run was begun with --dataloader-type %s; give that, or begin anew "
                            "by --finetune",
                            path, loader == MT_DATALOADER_CYCLIC ? "cyclic" : "single");
    if (!writes && mt_trainer_agrees(path, "--sequence-packing", packed, o->sequence_packing, error) != 0) return -1;
    return mt_trainer_agrees(path, "--seq-length", seq_length, o->stack.seq_length, error);
}

void mt_checkpoint_peek(const mt_run_options *options, mt_run_state *state) {
    mt_error ignored;
    const char *from = mt_options_adapts(options) ? options->load_adapter : options->load;
    if (!from || options->finetune) return;
    char *folder =
        mt_options_adapts(options) ? mt_checkpoint_resolve(from, &ignored) : mt_options_load_folder(options, &ignored);
    char *path = folder ? mt_path_join(folder, "trainer.json") : NULL;
    json_t *json = path ? mt_json_read(path, &ignored) : NULL;
    int64_t iteration, samples;
    if (json && mt_trainer_int(json, "iteration", MT_MOST_COUNTED, path, &iteration, &ignored) == 0 &&
        mt_trainer_int(json, "consumed_train_samples", MT_MOST_COUNTED, path, &samples, &ignored) == 0)
        state->iteration = iteration, state->consumed_train_samples = samples;
    json_decref(json);
    free(path), free(folder);
}

/* The numbers of a schedule, as Megatron-LM names them. */
typedef struct mt_stored_schedule {
    double max_lr, min_lr, decoupled_lr, decoupled_min_lr, lr_warmup_steps, lr_decay_steps, start_wd, end_wd,
        wd_incr_steps;
    int64_t lr_decay_style, wd_incr_style;
} mt_stored_schedule;

static const struct {
    const char *key;
    size_t offset;
    bool required; // the others are of newer versions
} mt_schedule_reals[] = {
    {"max_lr", offsetof(mt_stored_schedule, max_lr), true},
    {"min_lr", offsetof(mt_stored_schedule, min_lr), true},
    {"decoupled_lr", offsetof(mt_stored_schedule, decoupled_lr), false},
    {"decoupled_min_lr", offsetof(mt_stored_schedule, decoupled_min_lr), false},
    {"lr_warmup_steps", offsetof(mt_stored_schedule, lr_warmup_steps), true},
    {"lr_decay_steps", offsetof(mt_stored_schedule, lr_decay_steps), true},
    {"start_wd", offsetof(mt_stored_schedule, start_wd), true},
    {"end_wd", offsetof(mt_stored_schedule, end_wd), true},
    {"wd_incr_steps", offsetof(mt_stored_schedule, wd_incr_steps), true},
};

enum { MT_SCHEDULE_REALS = sizeof mt_schedule_reals / sizeof *mt_schedule_reals };

/* From trainer.json; false: a number is missing or no number. */
static bool mt_schedule_read_json(mt_stored_schedule *kept, const json_t *json) {
    for (int i = 0; i < MT_SCHEDULE_REALS; i++) {
        const json_t *value = json_object_get(json, mt_schedule_reals[i].key);
        if (!json_is_number(value) && (value || mt_schedule_reals[i].required)) return false;
        *(double *)((char *)kept + mt_schedule_reals[i].offset) = json_number_value(value);
    }
    return mt_json_int(json_object_get(json, "lr_decay_style"), 0, MT_LR_WSD, &kept->lr_decay_style) &&
           mt_json_int(json_object_get(json, "wd_incr_style"), 0, MT_WEIGHT_DECAY_COSINE, &kept->wd_incr_style);
}

/* The choice of an option that a text names. */
static bool mt_schedule_choice(const mt_pickled *value, size_t offset, int64_t *choice) {
    const char *text = mt_pickled_text(value);
    *choice = text ? mt_choice_index(mt_option_of(offset)->values, text) : -1;
    return *choice >= 0;
}

/* From a checkpoint of Megatron-LM. */
static bool mt_schedule_read_pickled(mt_stored_schedule *kept, const mt_pickled *schedule) {
    for (int i = 0; i < MT_SCHEDULE_REALS; i++) {
        const mt_pickled *value = mt_pickled_get(schedule, mt_schedule_reals[i].key);
        bool is_int = value && value->kind == MT_PICKLED_INT, is_real = value && value->kind == MT_PICKLED_REAL;
        if (!is_int && !is_real && mt_schedule_reals[i].required) return false;
        double number = is_int ? (double)value->number : is_real ? value->real : 0;
        *(double *)((char *)kept + mt_schedule_reals[i].offset) = number;
    }
    return mt_schedule_choice(mt_pickled_get(schedule, "lr_decay_style"), MT_AT(stack.lr_decay_style),
                              &kept->lr_decay_style) &&
           mt_schedule_choice(mt_pickled_get(schedule, "wd_incr_style"), MT_AT(stack.weight_decay_incr_style),
                              &kept->wd_incr_style);
}

static bool mt_schedule_read(mt_stored_schedule *kept, const char *folder) {
    mt_error ignored;
    bool good = false;
    mt_megatron *checkpoint = NULL;
    if (mt_folder_is_megatron(folder) && !mt_folder_has(folder, "trainer.json")) { // which has all digits
        if (mt_megatron_open_common(&checkpoint, folder, &ignored) != 0) return false;
        good = mt_schedule_read_pickled(kept, mt_megatron_schedule(checkpoint));
        mt_megatron_close(checkpoint);
        return good;
    }
    char *path = mt_path_join(folder, "trainer.json");
    json_t *json = mt_json_read(path, &ignored);
    good = json && mt_schedule_read_json(kept, json_object_get(json, "opt_param_scheduler"));
    json_decref(json);
    free(path);
    return good;
}

/* Numbers that options could have. */
static bool mt_schedule_is_sane(const mt_stored_schedule *k) {
    double most = (double)MT_MOST_COUNTED * 1048576;
    return k->max_lr > 0 && k->max_lr <= 1e6 && k->min_lr >= 0 && k->min_lr <= k->max_lr && k->decoupled_lr >= 0 &&
           k->decoupled_lr <= 1e6 && k->decoupled_min_lr >= 0 && k->decoupled_min_lr <= 1e6 &&
           k->lr_warmup_steps >= 0 && k->lr_warmup_steps < k->lr_decay_steps && k->lr_decay_steps <= most &&
           k->start_wd >= 0 && k->start_wd <= k->end_wd && k->end_wd <= 1e6 && k->wd_incr_steps > 0 &&
           k->wd_incr_steps <= most;
}

int mt_checkpoint_take_schedule(mt_run_options *o, mt_error *error) {
    const char *from = mt_options_adapts(o) ? o->load_adapter : o->load;
    bool continues = from && !o->finetune && !o->no_load_optim;
    if (!o->use_checkpoint_opt_param_scheduler || !continues) return 0;
    char *folder = mt_options_adapts(o) ? mt_checkpoint_resolve(from, error) : mt_options_load_folder(o, error);
    if (!folder) return -1;
    mt_stored_schedule kept = {0};
    bool begins = !mt_folder_is_megatron(folder) && !mt_folder_has(folder, "trainer.json"); // weights of a model
    bool good = begins || (mt_schedule_read(&kept, folder) && mt_schedule_is_sane(&kept));
    if (!good)
        mt_error_set(error,
                     "%s: has no schedule of learning rate and weight decay for --use-checkpoint-opt-param-scheduler; "
                     "leave that out and give the options of the schedule",
                     folder);
    free(folder);
    if (!good || begins) return good ? 0 : -1;
    mt_options *s = &o->stack;
    s->lr = kept.max_lr, s->min_lr = kept.min_lr, s->lr_decay_style = (mt_lr_decay_style)kept.lr_decay_style;
    if (kept.decoupled_lr > 0) s->decoupled_lr = kept.decoupled_lr, s->decoupled_min_lr = kept.decoupled_min_lr;
    s->start_weight_decay = kept.start_wd, s->end_weight_decay = kept.end_wd;
    s->weight_decay_incr_style = (mt_weight_decay_style)kept.wd_incr_style;
    s->kept_durations = (mt_durations){kept.wd_incr_steps, kept.lr_warmup_steps, kept.lr_decay_steps, 0};
    return 0;
}
