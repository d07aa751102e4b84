/* stage.c: the losses of the stages after pre-training, and the reference model of preferences. */
#include "stage.h"

#include "checkpoint.h"
#include "file.h"
#include "option_table.h"

#include <stdlib.h>
#include <string.h>

/* ---- losses */

const mt_loss *mt_stage_loss_of(mt_stage_loss *stage, const mt_options *o) {
    mt_aggregation mean = {.mode = o->loss_agg_mode, .norm_length = (double)o->max_new_tokens};
    *stage = (mt_stage_loss){.preference = {o->preference_loss, o->beta, o->label_smoothing}};
    stage->policy = (mt_policy_config){.variant = o->pg_variant,
                                       .aggregation = mean,
                                       .clip_ratio_low = o->clip_ratio_low,
                                       .clip_ratio_high = o->clip_ratio_high,
                                       .clip_ratio_c = o->clip_ratio_c,
                                       .kl_coef = o->kl_loss_coef,
                                       .entropy_coef = o->entropy_coeff,
                                       .kl_type = o->kl_loss_type};
    stage->value = (mt_value_config){.aggregation = mean, .clip = o->value_clip};
    switch (o->stage) {
    case MT_STAGE_PT:
    case MT_STAGE_SFT:
        return NULL;
    case MT_STAGE_RM:
        stage->loss = mt_reward, stage->loss.config = &stage->reward;
        break;
    case MT_STAGE_DPO:
        stage->loss = mt_preference, stage->loss.config = &stage->preference;
        break;
    case MT_STAGE_RL:
        stage->loss = mt_policy, stage->loss.config = &stage->policy;
        stage->loss.uses_entropy = o->entropy_coeff > 0;
        if (o->kl_loss_coef > 0) stage->loss.inputs |= 1 << MT_REF_LOGP;
        break;
    }
    return &stage->loss;
}

const mt_loss *mt_stage_critic_loss(mt_stage_loss *stage, const mt_options *o) {
    (void)mt_stage_loss_of(stage, o);
    stage->loss = mt_value, stage->loss.config = &stage->value;
    return &stage->loss;
}

int mt_options_check_folder(const mt_options *options, const char *folder, const char *option, mt_head_type *head,
                            mt_error *error) {
    char *found = mt_checkpoint_resolve(folder, error), *path = found ? mt_path_join(found, "config.json") : NULL;
    int64_t bytes;
    char *json = path ? mt_file_read(path, 1 << 22, &bytes, error) : NULL;
    int status = json ? mt_options_check_shape(options, json, bytes, option, path, head, error) : -1;
    free(found), free(path), free(json);
    return status;
}

/* ---- the reference model */

/* Log-probabilities of a micro-batch's tokens; NULL on ranks without the loss. */
typedef struct scores {
    int64_t num_tokens;
    float *logp;
} scores;

struct mt_reference {
    mt_options options; // the trained model's, except the folder; shares their strings
    mt_model *model;
    mt_feed *feed;
    scores *scores; // [capacity] of the feed's micro-batches
    int64_t capacity;
};

static int load_reference(mt_reference *r, const mt_options *options, const mt_run_state *state, mt_error *error) {
    const mt_group *world = &mt_model_grid(r->model)->world;
    mt_run_state unused = {0};
    if (!options->ref_load && state->iteration > 0 && options->lora_rank == 0)
        return mt_error_set(error,
                            "--stage dpo: the run resumes at iteration %lld; name the model with which it began "
                            "by --ref-load",
                            (long long)state->iteration);
    if (!options->ref_load && !options->load) {
        mt_model_init(r->model);
        return 0;
    }
    mt_head_type head;
    int checked =
        options->ref_load ? mt_options_check_folder(options, options->ref_load, "--ref-load", &head, error) : 0;
    if (mt_agree(world, checked != 0, error) != 0) return -1;
    if (options->ref_load && head != MT_HEAD_LM)
        return mt_error_set(error, "--ref-load %s: is a model with a value head; take a language model's folder",
                            options->ref_load);
    return mt_checkpoint_load(r->model, &unused, options->ref_load ? options->ref_load : options->load, error);
}

int mt_reference_open(mt_reference **reference, const mt_options *options, const mt_run_state *state,
                      const mt_grid *grid, const mt_ops *ops, const mt_model_plan *plan, mt_error *error) {
    *reference = NULL;
    if (options->stage != MT_STAGE_DPO) return 0;
    mt_reference *r = mt_calloc(sizeof *r);
    mt_model_plan scoring = *plan;
    r->options = *options, r->options.lora_rank = 0; // the reference of adapters is their base
    scoring.train = false, scoring.loss = NULL;
    int status = mt_model_create(&r->model, &r->options, grid, ops, &scoring, error);
    if (status == 0) status = load_reference(r, options, state, error);
    if (status == 0)
        *reference = r;
    else
        mt_reference_close(r);
    return status;
}

static void clear_scores(mt_reference *r) {
    for (int64_t i = 0; i < r->capacity; i++) free(r->scores[i].logp), r->scores[i].logp = NULL;
}

void mt_reference_close(mt_reference *r) {
    if (!r) return;
    clear_scores(r);
    free(r->scores);
    mt_model_destroy(r->model);
    free(r);
}

/* The sink of mt_score_tokens. */
static void keep_scores(void *context, int64_t micro_batch, const mt_batch *batch, const double *logp,
                        const double *entropy) {
    scores *kept = &((mt_reference *)context)->scores[micro_batch];
    (void)entropy;
    kept->num_tokens = batch->num_tokens;
    kept->logp = mt_malloc(batch->num_tokens * 4);
    for (int64_t t = 0; t < batch->num_tokens; t++) kept->logp[t] = (float)logp[t];
}

int mt_reference_score(mt_reference *r, mt_feed *feed, mt_batch *batch, mt_error *error) {
    clear_scores(r);
    if (feed->micro_batches > r->capacity) {
        r->scores = mt_realloc(r->scores, feed->micro_batches * (int64_t)sizeof *r->scores);
        memset(r->scores + r->capacity, 0, (size_t)(feed->micro_batches - r->capacity) * sizeof *r->scores);
        r->capacity = feed->micro_batches;
    }
    r->feed = feed;
    return mt_score_tokens(r->model, feed->micro_batches, mt_feed_batch, feed, batch, keep_scores, r, error);
}

int mt_reference_batch(void *reference, int64_t index, mt_batch *batch, mt_error *error) {
    mt_reference *r = reference;
    const scores *kept = &r->scores[index];
    if (mt_feed_batch(r->feed, index, batch, error) != 0) return -1;
    if (kept->logp) memcpy(batch->loss_inputs[MT_REF_LOGP], kept->logp, (size_t)kept->num_tokens * 4);
    return 0;
}
