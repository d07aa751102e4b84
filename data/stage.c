/* stage.c: the losses of the stages after pre-training, the reference model of preferences and the teacher of
 * distillation. */
#include "stage.h"

#include "checkpoint.h"
#include "file.h"
#include "option_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- losses */

/* The metrics of a policy, without the divergence from a reference or the entropy where the loss has none. */
static void choose_policy_metrics(mt_stage_loss *stage) {
    int64_t count = 0;
    for (const mt_loss_metric *row = mt_policy.metrics; row->name; row++) {
        if (row->number == MT_POLICY_REF_KL && !(stage->loss.inputs & 1 << MT_REF_LOGP)) continue;
        if (row->number == MT_POLICY_ENTROPY && !stage->loss.uses_entropy) continue;
        stage->metrics[count++] = *row;
    }
    stage->loss.metrics = stage->metrics;
}

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
    stage->distillation = (mt_distillation_config){
        {o->kd_objective, o->kd_temperature, o->skew_lambda, o->adaptive_kl_alpha}, o->distill_loss_weight};
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
        choose_policy_metrics(stage);
        break;
    case MT_STAGE_KD:
        stage->loss = mt_distillation, stage->loss.config = stage->loss.distillation = &stage->distillation;
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

/* ---- the teacher: its options, and the greatest of its logits */

/* Options of the run that the teacher has too: its layout, and the batches. */
static const size_t of_the_run[] = {MT_AT(tensor_model_parallel_size),
                                    MT_AT(pipeline_model_parallel_size),
                                    MT_AT(context_parallel_size),
                                    MT_AT(sequence_parallel),
                                    MT_AT(cp_comm_type),
                                    MT_AT(hierarchical_context_parallel_sizes),
                                    MT_AT(dynamic_context_parallel),
                                    MT_AT(max_seqlen_per_dp_cp_rank),
                                    MT_AT(data_parallel_sharding_strategy),
                                    MT_AT(moe_token_dispatcher_type),
                                    MT_AT(make_vocab_size_divisible_by),
                                    MT_AT(bf16),
                                    MT_AT(device),
                                    MT_AT(attention_backend),
                                    MT_AT(sft),
                                    MT_AT(seq_length),
                                    MT_AT(micro_batch_size),
                                    MT_AT(global_batch_size),
                                    MT_AT(distributed_timeout_seconds)};

/* Options of the model in the folder --teacher-load, on the layout of the run. Its vocabulary is the student's. */
static int teacher_options(mt_options *t, const mt_options *o, const mt_grid *grid, mt_error *error) {
    mt_error cause;
    mt_options_default(t);
    for (size_t i = 0; i < sizeof of_the_run / sizeof *of_the_run; i++)
        mt_option_copy(t, o, mt_option_of(of_the_run[i]));
    t->train_iters = 1, t->lr = 1; // not used, but checked
    int status = mt_options_set(t, "load", o->teacher_load, error);
    if (status == 0) status = mt_options_read_shape(t, error);
    if (status != 0) return -1;
    if (t->num_experts > 0) t->expert_model_parallel_size = o->expert_model_parallel_size;
    if (t->head_type != MT_HEAD_LM)
        return mt_error_set(error, "--teacher-load %s: has a value head; take a language model's folder", t->load);
    if (t->vocab_size != o->vocab_size)
        return mt_error_set(error,
                            "--teacher-load %s: has a vocabulary of %lld tokens and the student one of %lld; take a "
                            "teacher with the student's tokenizer",
                            t->load, (long long)t->vocab_size, (long long)o->vocab_size);
    if (t->window_size != o->window_size && o->context_parallel_size > 1)
        return mt_error_set(error,
                            "--teacher-load %s: has --window-size %lld and the student %lld, which distribute tokens "
                            "otherwise; set --context-parallel-size to 1",
                            t->load, (long long)t->window_size, (long long)o->window_size);
    if (mt_options_finish(t, MT_PROGRAM_LIBRARY, grid->world.size, &cause) == 0) return 0;
    return mt_error_set(error, "--teacher-load %s: %s", t->load, cause.text);
}

/* A place in the vocabulary and its logit. */
typedef struct label {
    float logit;
    int32_t id;
} label;

static bool is_less(label a, label b) {
    return a.logit < b.logit || (a.logit == b.logit && a.id > b.id);
}

/* Moves heap[0] down to its place in a heap with the least label first. */
static void sift(label *heap, int64_t count) {
    label moved = heap[0];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && is_less(heap[child + 1], heap[child])) child++;
        if (!is_less(heap[child], moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static int compare_ids(const void *a, const void *b) {
    const label *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* The K greatest of logits[V], in the order of their ids; of equal logits the first. heap[K]. */
static void take_greatest(int32_t *ids, float *greatest, const float *logits, int64_t V, int64_t K, label *heap) {
    for (int64_t i = 0; i < K; i++) heap[i] = (label){-INFINITY, INT32_MAX};
    for (int64_t i = 0; i < V; i++) {
        label next = {logits[i], (int32_t)i};
        if (!is_less(heap[0], next)) continue;
        heap[0] = next;
        sift(heap, K);
    }
    qsort(heap, (size_t)K, sizeof *heap, compare_ids);
    for (int64_t i = 0; i < K; i++) ids[i] = heap[i].id, greatest[i] = heap[i].logit;
}

/* ---- the reference model */

/* Of a micro-batch, on the ranks with the loss: log-probabilities of its tokens, or logits of the teacher. */
typedef struct scores {
    int64_t num_tokens;
    float *logp;
    mt_teacher_logits teacher;
} scores;

struct mt_reference {
    mt_options options; // the trained model's, except the folder; shares their strings. Of a teacher: its own
    bool is_teacher;
    int64_t logits_topk;
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

static int load_teacher(mt_reference *r, mt_error *error) {
    mt_run_state unused = {0};
    return mt_checkpoint_load(r->model, &unused, r->options.load, error);
}

int mt_reference_open(mt_reference **reference, const mt_options *options, const mt_run_state *state,
                      const mt_grid *grid, const mt_ops *ops, const mt_model_plan *plan, mt_error *error) {
    *reference = NULL;
    if (options->stage != MT_STAGE_DPO && options->stage != MT_STAGE_KD) return 0;
    mt_reference *r = mt_calloc(sizeof *r);
    mt_model_plan scoring = *plan;
    int status = 0;
    r->is_teacher = options->stage == MT_STAGE_KD;
    r->logits_topk = options->logits_topk;
    scoring.train = false, scoring.loss = NULL;
    if (r->is_teacher)
        status = mt_agree(&grid->world, teacher_options(&r->options, options, grid, error) != 0, error);
    else
        r->options = *options, r->options.lora_rank = 0; // the reference of adapters is their base
    if (status == 0) status = mt_model_create(&r->model, &r->options, grid, ops, &scoring, error);
    if (status == 0) status = r->is_teacher ? load_teacher(r, error) : load_reference(r, options, state, error);
    if (status == 0)
        *reference = r;
    else
        mt_reference_close(r);
    return status;
}

static void clear_scores(mt_reference *r) {
    for (int64_t i = 0; i < r->capacity; i++) {
        mt_teacher_logits *teacher = &r->scores[i].teacher;
        free(r->scores[i].logp), free(teacher->tokens), free(teacher->ids), free(teacher->logits);
        r->scores[i] = (scores){0};
    }
}

void mt_reference_close(mt_reference *r) {
    if (!r) return;
    clear_scores(r);
    free(r->scores);
    mt_model_destroy(r->model);
    if (r->is_teacher) mt_options_free(&r->options);
    free(r);
}

/* The sinks of mt_score_tokens. */
static void keep_scores(void *context, int64_t micro_batch, const mt_batch *batch, const double *logp,
                        const double *entropy) {
    scores *kept = &((mt_reference *)context)->scores[micro_batch];
    (void)entropy;
    kept->num_tokens = batch->num_tokens;
    kept->logp = mt_malloc(batch->num_tokens * 4);
    for (int64_t t = 0; t < batch->num_tokens; t++) kept->logp[t] = (float)logp[t];
}

static void keep_logits(void *context, int64_t micro_batch, const mt_batch *batch, const double *logp,
                        const double *entropy) {
    mt_reference *r = context;
    mt_teacher_logits *kept = &r->scores[micro_batch].teacher;
    int64_t V = r->options.vocab_size, K = r->logits_topk > 0 ? r->logits_topk : V, position;
    (void)logp, (void)entropy;
    kept->K = K;
    for (int64_t t = 0; (position = mt_score_logits(r->model, t, NULL)) >= 0; t++)
        kept->count += batch->loss_mask[position] != 0;
    kept->tokens = mt_malloc(kept->count * 4), kept->logits = mt_malloc(kept->count * K * 4);
    if (K < V) kept->ids = mt_malloc(kept->count * K * 4);
    float *logits = K < V ? mt_malloc(V * 4) : NULL;
    label *heap = K < V ? mt_malloc(K * (int64_t)sizeof *heap) : NULL;
    for (int64_t t = 0, row = 0; (position = mt_score_logits(r->model, t, NULL)) >= 0; t++) {
        if (batch->loss_mask[position] == 0) continue;
        (void)mt_score_logits(r->model, t, K < V ? logits : kept->logits + row * K);
        if (K < V) take_greatest(kept->ids + row * K, kept->logits + row * K, logits, V, K, heap);
        kept->tokens[row++] = (int32_t)t;
    }
    free(logits);
    free(heap);
}

int mt_reference_score(mt_reference *r, mt_feed *feed, mt_batch *batch, mt_error *error) {
    clear_scores(r);
    if (feed->micro_batches > r->capacity) {
        r->scores = mt_realloc(r->scores, feed->micro_batches * (int64_t)sizeof *r->scores);
        memset(r->scores + r->capacity, 0, (size_t)(feed->micro_batches - r->capacity) * sizeof *r->scores);
        r->capacity = feed->micro_batches;
    }
    r->feed = feed;
    return mt_score_tokens(r->model, feed->micro_batches, mt_feed_batch, feed, batch,
                           r->is_teacher ? keep_logits : keep_scores, r, error);
}

int mt_reference_batch(void *reference, int64_t index, mt_batch *batch, mt_error *error) {
    mt_reference *r = reference;
    scores *kept = &r->scores[index];
    if (mt_feed_batch(r->feed, index, batch, error) != 0) return -1;
    batch->teacher = kept->teacher.K > 0 ? &kept->teacher : NULL;
    if (kept->logp) memcpy(batch->loss_inputs[MT_REF_LOGP], kept->logp, (size_t)kept->num_tokens * 4);
    return 0;
}
