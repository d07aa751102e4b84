/* stage.c: the losses of the stages after pre-training, the reference model of preferences and the teacher of
 * distillation. */
#include "stage.h"

#include "../base/file.h"
#include "../options/hidden_pairs.h"
#include "../options/option_reader.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../models/hf_config.h"
#include "../models/model_role.h"
#include "../checkpoint/checkpoint_folder.h"
#include "../checkpoint/checkpoint_load.h"
#include "../checkpoint/run_options.h"
#include "../report/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- losses */

/* The metrics of a policy, without the divergence from a reference where the loss has none, and without the entropy,
 * which is a number of the whole iteration (rl.c). */
static void choose_policy_metrics(mt_stage_loss *stage) {
    int64_t count = 0;
    for (const mt_loss_metric *row = mt_policy.metrics; row->name; row++) {
        if (row->number == MT_POLICY_REF_KL && !(stage->loss.inputs & 1 << MT_REF_LOGP)) continue;
        if (row->number == MT_POLICY_ENTROPY) continue;
        if (row->number == MT_POLICY_DISTILLATION && stage->policy.distillation.in == MT_DISTILL_IN_NONE) continue;
        stage->metrics[count++] = *row;
    }
    stage->loss.metrics = stage->metrics;
}

/* The metrics of a distillation: without hidden states their loss is none. */
static void choose_distillation_metrics(mt_stage_loss *stage) {
    int64_t count = 0;
    for (const mt_loss_metric *row = mt_distillation.metrics; row->name; row++)
        if (row->number != MT_DISTILLATION_HIDDEN || stage->distillation.num_pairs > 0) stage->metrics[count++] = *row;
    stage->loss.metrics = stage->metrics;
}

const mt_loss *mt_stage_loss_of(mt_stage_loss *stage, const mt_run_options *o) {
    mt_aggregation mean = {.mode = o->loss_agg_mode, .norm_length = (double)o->max_new_tokens};
    *stage = (mt_stage_loss){
        .preference = {o->preference_loss, o->beta, o->label_smoothing, o->kl_loss_coef, o->kl_loss_type}};
    stage->policy = (mt_policy_config){.variant = o->pg_variant,
                                       .aggregation = mean,
                                       .clip_ratio_low = o->clip_ratio_low,
                                       .clip_ratio_high = o->clip_ratio_high,
                                       .clip_ratio_c = o->clip_ratio_c,
                                       .kl_coef = o->kl_loss_coef,
                                       .entropy_coef = o->entropy_coeff,
                                       .kl_type = o->kl_loss_type,
                                       .tau_pos = o->tau_pos,
                                       .tau_neg = o->tau_neg,
                                       .weight_pos = o->topr_positive_weight,
                                       .weight_neg = o->topr_negative_weight,
                                       .kl_cov_coef = o->ppo_kl_coef,
                                       .cov_low = o->clip_cov_lb,
                                       .cov_high = o->clip_cov_ub};
    mt_policy_config *policy = &stage->policy;
    bool is_tis = o->pg_variant == MT_POLICY_TIS;
    if (is_tis) policy->clip_ratio_low = 1 - o->tis_lower_bound, policy->clip_ratio_high = o->tis_upper_bound - 1;
    bool in_loss = o->distillation_in == MT_DISTILL_IN_LOSS || o->distillation_in == MT_DISTILL_IN_POLICY_GRADIENT;
    if (in_loss)
        policy->distillation = (mt_distill_policy_config){
            .in = o->distillation_in,
            .type = o->distillation_loss_mode,
            .coef = o->distillation_loss_coef,
            .max_clamp = o->distillation_max_clamp,
            .clip_ratio_low = o->distillation_clip_ratio_low,
            .clip_ratio_high = o->distillation_clip_ratio_high,
            .clip_ratio_c = 3, // verl's
            .alone = !o->use_task_rewards,
            .min_clamp = MT_GIVEN(o, distillation_min_clamp) ? o->distillation_min_clamp : -INFINITY};
    bool topk = in_loss && o->distillation_loss_mode == MT_KL_FORWARD_TOPK;
    policy->cov_share = o->pg_variant == MT_POLICY_KL_COV ? o->kl_cov_ratio : o->clip_cov_ratio;
    policy->beta = o->pg_variant == MT_POLICY_DRO      ? o->dro_beta
                   : o->pg_variant == MT_POLICY_KIMI15 ? o->kimi15_tau
                                                       : o->opmd_tau;
    stage->distillation =
        (mt_distillation_config){{o->kd_objective, o->kd_temperature, o->skew_lambda, o->adaptive_kl_alpha},
                                 .weight = o->distill_loss_weight,
                                 .balance = o->kd_balance,
                                 .hidden_weight = o->kd_hidden_weight,
                                 .scale = o->kd_loss_scale};
    mt_error unused; // the options are checked
    (void)mt_options_hidden_pairs(&stage->distillation, o, &unused);
    stage->value = (mt_value_config){.aggregation = mean, .clip = o->value_clip};
    switch (o->stack.stage) {
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
        if (o->rollout_is != MT_ROLLOUT_IS_NONE) stage->loss.inputs |= 1 << MT_ROLLOUT_WEIGHTS;
        if (in_loss && !topk) stage->loss.inputs |= 1 << MT_TEACHER_LOGP;
        if (topk) stage->loss.topk = &stage->policy.distillation;
        if (mt_policy_kind_of(o->pg_variant)->selects) stage->loss.inputs |= 1 << MT_SELECTED;
        choose_policy_metrics(stage);
        break;
    case MT_STAGE_KD:
        stage->loss = mt_distillation, stage->loss.config = stage->loss.distillation = &stage->distillation;
        choose_distillation_metrics(stage);
        break;
    }
    return &stage->loss;
}

const mt_loss *mt_stage_critic_loss(mt_stage_loss *stage, const mt_run_options *o) {
    (void)mt_stage_loss_of(stage, o);
    stage->loss = mt_value, stage->loss.config = &stage->value;
    return &stage->loss;
}

/* Models beside the one that trains are whole. */
static int refuse_adapter(const char *folder, mt_error *error) {
    char *found = mt_checkpoint_resolve(folder, error);
    bool whole = found && (mt_folder_has(found, "config.json") || mt_folder_is_megatron(found));
    if (found && !whole)
        mt_error_set(error,
                     "%s: holds an adapter; take a whole model, which infer --merge-adapter makes of an adapter and "
                     "its base",
                     folder);
    free(found);
    return whole ? 0 : -1;
}

int mt_options_check_folder(const mt_run_options *options, const char *folder, const char *option, mt_head_type *head,
                            mt_error *error) {
    if (refuse_adapter(folder, error) != 0) return -1;
    char *found = mt_checkpoint_resolve(folder, error), *path = found ? mt_path_join(found, "config.json") : NULL;
    int64_t bytes;
    char *json = path ? mt_file_read(path, 1 << 22, &bytes, error) : NULL;
    int status = json ? mt_options_check_shape(options, json, bytes, option, path, head, error) : -1;
    free(found), free(path), free(json);
    return status;
}

/* ---- models of another shape: the teacher, the reward model, the critic */

/* Options of the run that such a model has too: its layout, and the batches. */
static const size_t of_the_run[] = {MT_AT(stack.tensor_model_parallel_size),
                                    MT_AT(stack.pipeline_model_parallel_size),
                                    MT_AT(stack.context_parallel_size),
                                    MT_AT(stack.sequence_parallel),
                                    MT_AT(stack.cp_comm_type),
                                    MT_AT(hierarchical_context_parallel_sizes),
                                    MT_AT(stack.dynamic_context_parallel),
                                    MT_AT(max_seqlen_per_dp_cp_rank),
                                    MT_AT(stack.data_parallel_sharding_strategy),
                                    MT_AT(stack.moe_token_dispatcher_type),
                                    MT_AT(make_vocab_size_divisible_by),
                                    MT_AT(stack.bf16),
                                    MT_AT(stack.fp16),
                                    MT_AT(stack.fp32_residual_connection),
                                    MT_AT(device),
                                    MT_AT(stack.attention_backend),
                                    MT_AT(sft),
                                    MT_AT(stack.seq_length),
                                    MT_AT(stack.micro_batch_size),
                                    MT_AT(stack.global_batch_size),
                                    MT_AT(stack.distributed_timeout_seconds)};

int mt_options_of_model(mt_run_options *t, const mt_run_options *o, const char *folder, mt_error *error) {
    mt_options_default(t);
    for (size_t i = 0; i < sizeof of_the_run / sizeof *of_the_run; i++)
        mt_option_copy(t, o, mt_option_of(of_the_run[i]));
    t->stack.train_iters = 1, t->stack.lr = 1; // not used, but checked
    if (refuse_adapter(folder, error) != 0) return -1;
    if (mt_options_set(t, "load", folder, error) != 0 || mt_options_read_shape(t, error) != 0) return -1;
    if (t->stack.num_experts > 0) t->stack.expert_model_parallel_size = o->stack.expert_model_parallel_size;
    return 0;
}

/* Options of the run that such a model does not have: folders, adapters, how the run's own layers and experts are
 * divided, and its batches. */
static const size_t not_of_a_learner[] = {MT_AT(load),
                                          MT_AT(load_adapter),
                                          MT_AT(merge_adapter),
                                          MT_AT(hf_config),
                                          MT_AT(save),
                                          MT_AT(value_head),
                                          MT_AT(stack.lora_rank),
                                          MT_AT(stack.expert_model_parallel_size),
                                          MT_AT(stack.expert_tensor_parallel_size),
                                          MT_AT(stack.num_virtual_stages_per_pipeline_rank),
                                          MT_AT(num_layers_per_virtual_pipeline_stage),
                                          MT_AT(stack.microbatch_group_size_per_virtual_pipeline_stage),
                                          MT_AT(pipeline_model_parallel_layout),
                                          MT_AT(stack.pipeline_schedule),
                                          MT_AT(stack.decoder_first_pipeline_num_layers),
                                          MT_AT(stack.decoder_last_pipeline_num_layers),
                                          MT_AT(stack.account_for_embedding_in_pipeline_split),
                                          MT_AT(stack.account_for_loss_in_pipeline_split),
                                          MT_AT(gradient_accumulation_steps),
                                          MT_AT(stack.global_batch_size)};

static bool is_of_a_learner(const mt_option *row) {
    bool is_taken = row->name && row->origin == MT_OF_RUN && mt_option_of(row->offset) == row;
    for (size_t i = 0; i < sizeof not_of_a_learner / sizeof *not_of_a_learner && is_taken; i++)
        is_taken = row->offset != not_of_a_learner[i];
    return is_taken;
}

/* True for an option of the run that is for a part of a model, such as experts, that this one does not have. */
static bool lacks_part(const mt_run_options *t, const mt_option *row) {
    mt_option_rule rule;
    bool lacks = false;
    for (const char *column = row->needs; !lacks && mt_option_next_rule(&column, &rule);)
        lacks = rule.other->origin != MT_OF_RUN && !mt_option_has(t, rule.other, rule.choices);
    return lacks;
}

/* Gives a model the run's value of an option of training, where the user gave that. */
static void keep_given(mt_run_options *t, const mt_run_options *o, size_t offset) {
    if (!mt_options_gave(o, offset)) return;
    mt_option_copy(t, o, mt_option_of(offset));
    t->given[offset / 64] |= (uint64_t)1 << offset % 64;
}

int mt_options_of_learner(mt_run_options *t, const mt_run_options *o, const char *folder, mt_error *error) {
    mt_options_default(t);
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (is_of_a_learner(row)) mt_option_copy(t, o, row);
    if (refuse_adapter(folder, error) != 0) return -1;
    if (mt_options_set(t, "load", folder, error) != 0 || mt_options_read_shape(t, error) != 0) return -1;
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (is_of_a_learner(row) && lacks_part(t, row)) mt_option_reset(t, row);
    t->stack.stage = MT_STAGE_RM; // whose models have value heads
    t->value_head = t->stack.head_type == MT_HEAD_LM;
    t->stack.train_iters = mt_max(t->stack.train_iters, 1); // a conversion has none
    keep_given(t, o, MT_AT(stack.hidden_dropout)), keep_given(t, o, MT_AT(stack.attention_dropout));
    keep_given(t, o, MT_AT(stack.init_method_std));
    keep_given(t, o, MT_AT(stack.start_weight_decay)), keep_given(t, o, MT_AT(stack.end_weight_decay));
    if (t->stack.num_experts > 0) keep_given(t, o, MT_AT(stack.moe_aux_loss_coeff));
    if (t->stack.num_experts > 0) t->stack.expert_model_parallel_size = o->stack.expert_model_parallel_size;
    return 0;
}

int mt_options_check_expert_ranks(const mt_options *options, int64_t expert, const char *role, mt_error *error) {
    if (options->num_experts > 0 || expert <= 1) return 0;
    return mt_error_set(error, "--%s-expert-model-parallel-size %lld: the %s%s has no experts; leave it out", role,
                        (long long)expert, role, strcmp(role, "reward") == 0 ? " model" : "");
}

int mt_options_finish_model(mt_run_options *t, const mt_options *o, const char *option, const char *role,
                            int64_t world_size, mt_error *error) {
    mt_error cause;
    char advice[120] = "";
    bool as_run = t->stack.tensor_model_parallel_size == o->tensor_model_parallel_size &&
                  t->stack.pipeline_model_parallel_size == o->pipeline_model_parallel_size;
    if (t->stack.vocab_size != o->vocab_size)
        return mt_error_set(error,
                            "%s %s: has a vocabulary of %lld tokens and the trained model one of %lld; take a model "
                            "with the same tokenizer",
                            option, t->load, (long long)t->stack.vocab_size, (long long)o->vocab_size);
    int64_t window = mt_options_common_window(&t->stack), of_run = mt_options_common_window(o);
    if (window != of_run && t->stack.context_parallel_size > 1)
        return mt_error_set(error,
                            "%s %s: all its layers have --window-size %lld (0: none) and the trained model's %lld, "
                            "which distribute tokens "
                            "otherwise; set --context-parallel-size to 1",
                            option, t->load, (long long)window, (long long)of_run);
    if (mt_options_finish(t, MT_PROGRAM_LIBRARY, world_size, &cause) == 0) return 0;
    if (as_run && world_size > o->data_parallel_size)
        snprintf(advice, sizeof advice, "; or give it a layout of its own by --%s-*-model-parallel-size", role);
    return mt_error_set(error, "%s %s: %s%s", option, t->load, cause.text, advice);
}

int mt_options_of_teacher(mt_run_options *t, const mt_run_options *o, const char *folder, const char *option,
                          const mt_grid *grid, bool *apart, mt_error *error) {
    mt_model_role_sizes sizes = mt_model_role_sizes_of_teacher(o);
    if (mt_options_of_model(t, o, folder, error) != 0) return -1;
    if (t->stack.head_type != MT_HEAD_LM)
        return mt_error_set(error, "%s %s: has a value head; take a language model's folder", option, t->load);
    if (mt_options_check_expert_ranks(&t->stack, sizes.expert, "teacher", error) != 0) return -1;
    if (o->kd_hidden_layers.count > 0 && t->stack.hidden_size != o->stack.hidden_size)
        return mt_error_set(error,
                            "--teacher-load %s: has hidden states of %lld channels and the student of %lld; "
                            "--kd-hidden-layers compares states of the same width (no projection is trained): leave it "
                            "out, or take a student of this width",
                            t->load, (long long)t->stack.hidden_size, (long long)o->stack.hidden_size);
    *apart = mt_model_role_sizes_apply(t, sizes);
    return mt_options_finish_model(t, &o->stack, option, "teacher", grid->world.size, error);
}

/* ---- the greatest of the teacher's logits */

/* A place in the vocabulary and its logit. */
typedef struct label {
    float logit;
    int32_t id;
} label;

/* NaN is the greatest, so that it stays among the K and reaches the loss. */
static bool is_less(label a, label b) {
    if (isnan(a.logit) != isnan(b.logit)) return isnan(b.logit);
    return a.logit < b.logit || (!(a.logit > b.logit) && a.id > b.id);
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

void mt_take_greatest(int32_t *ids, float *greatest, const float *logits, int64_t V, int64_t K) {
    label *heap = mt_malloc(K * (int64_t)sizeof *heap);
    for (int64_t i = 0; i < K; i++) heap[i] = (label){-INFINITY, INT32_MAX};
    for (int64_t i = 0; i < V; i++) {
        label next = {logits[i], (int32_t)i};
        if (!is_less(heap[0], next)) continue;
        heap[0] = next;
        sift(heap, K);
    }
    qsort(heap, (size_t)K, sizeof *heap, compare_ids);
    for (int64_t i = 0; i < K; i++) ids[i] = heap[i].id, greatest[i] = heap[i].logit;
    free(heap);
}

/* ---- the reference model */

/* The log-probabilities of a micro-batch's tokens, or the teacher's logits, on the ranks with the loss. */
typedef struct scores {
    int64_t num_tokens;
    float *logp;
    mt_teacher_logits teacher;
} scores;

struct mt_reference {
    mt_model_role role, trained;
    bool is_teacher, owns_options;
    int64_t logits_topk, num_hidden;
    mt_feed *feed;
    scores *scores; // [capacity] of the feed's micro-batches
    int64_t capacity;
    /* of a role apart: its replicas score micro-batches of any rank, and send the results */
    scores *found; // [found_capacity] of the micro-batches that this rank's replica scores
    int64_t found_capacity;
    int *owners;  // [data-parallel ranks of the role] the rank that sends
    int *readers; // [world size] the data-parallel rank in the trained model of a rank with its loss, or -1
};

static int load_reference(mt_reference *r, const mt_run_options *options, const mt_run_state *state, mt_error *error) {
    const mt_group *world = &r->role.grid->world;
    mt_run_state unused = {0};
    if (!options->ref_load && state->iteration > 0 && options->stack.lora_rank == 0)
        return mt_error_set(error,
                            "--stage dpo: the run resumes at iteration %lld; name the model that it started "
                            "from by --ref-load",
                            (long long)state->iteration);
    if (!options->ref_load && !options->load) {
        mt_model_init(r->role.model);
        return 0;
    }
    mt_head_type head;
    int checked =
        options->ref_load ? mt_options_check_folder(options, options->ref_load, "--ref-load", &head, error) : 0;
    if (mt_agree(world, checked != 0, error) != 0) return -1;
    if (options->ref_load && head != MT_HEAD_LM)
        return mt_error_set(error, "--ref-load %s: is a model with a value head; take a language model's folder",
                            options->ref_load);
    return mt_checkpoint_load(r->role.model, &r->role.options, &unused,
                              options->ref_load ? options->ref_load : options->load, error);
}

static int load_teacher(mt_reference *r, mt_error *error) {
    mt_run_state unused = {0};
    return mt_checkpoint_load(r->role.model, &r->role.options, &unused, r->role.options.load, error);
}

/* The ranks of the trained model that read scores: those with its loss. */
static int *find_readers(const mt_grid *grid) {
    const mt_group *world = &grid->world;
    double *numbers = mt_calloc(world->size * 8);
    int *readers = mt_malloc(world->size * (int64_t)sizeof *readers);
    if (grid->pipeline.rank == grid->pipeline.size - 1) numbers[world->rank] = grid->data.rank + 1;
    mt_all_reduce_sum(world, numbers, world->size, MT_F64);
    for (int rank = 0; rank < world->size; rank++) readers[rank] = (int)numbers[rank] - 1;
    free(numbers);
    return readers;
}

/* The options of the role, and its grid. */
static int place_role(mt_reference *r, const mt_ops *ops, mt_error *error) {
    const mt_run_options *o = &r->trained.options;
    const mt_grid *grid = r->trained.grid;
    bool apart = false;
    int status;
    mt_model_role_begin(&r->role, r->is_teacher ? "teacher" : "reference", o, grid, ops);
    r->role.options.stack.lora_rank = 0; // the reference of adapters is their base
    if (r->is_teacher) {
        r->owns_options = true;
        status = mt_options_of_teacher(&r->role.options, o, o->teacher_load, "--teacher-load", grid, &apart, error);
        status = mt_agree(&grid->world, status != 0, error);
        if (status == 0 && apart) status = mt_model_role_build_grid(&r->role, error);
    } else {
        status =
            mt_model_role_place(&r->role, mt_model_role_sizes_of_reference(o), "--ref-*-model-parallel-size", error);
    }
    if (status == 0 && mt_model_role_is_apart(&r->role) && o->stack.dynamic_context_parallel)
        return mt_error_set(error,
                            "--dynamic-context-parallel and a %s on another layout exclude each other; leave one "
                            "out",
                            r->role.name);
    return status;
}

/* An error unless the other model takes the pictures of the run. */
static int check_pictures(const mt_reference *r, const mt_run_options *options, mt_error *error) {
    mt_image_reader reader;
    int status = mt_image_reader_open(&reader, options, options->load, error);
    const char *folder = options->ref_load && !r->is_teacher ? options->ref_load : r->role.options.load;
    if (status == 0) status = mt_model_role_check_pictures(&r->role, folder, &reader, error);
    return mt_agree(&r->role.grid->world, status != 0, error);
}

int mt_reference_open(mt_reference **reference, mt_model *trained, const mt_run_options *options, const mt_ops *ops,
                      const mt_run_state *state, FILE *log, mt_error *error) {
    *reference = NULL;
    if (options->stack.stage != MT_STAGE_DPO && options->stack.stage != MT_STAGE_KD) return 0;
    if (options->ref_logps_in_data) return 0; // mt_step_plan_fill
    mt_reference *r = mt_calloc(sizeof *r);
    r->is_teacher = options->stack.stage == MT_STAGE_KD;
    r->logits_topk = options->logits_topk;
    mt_model_role_lend(&r->trained, r->is_teacher ? "student" : "trained model", options, trained);
    if (!r->is_teacher && mt_options_refer_to_base(options)) {
        r->trained.rests = 0; // no other model works
        mt_model_role_lend_base(&r->role, "reference", &r->trained);
        mt_report_role(&r->role, log);
        *reference = r;
        return 0;
    }
    mt_report_role(&r->trained, log);
    int status = place_role(r, ops, error);
    mt_model_plan plan = mt_model_role_plan(&r->role, mt_model_get_plan(trained), options->stack.context_parallel_size);
    if (r->is_teacher && status == 0) {
        mt_distillation_config c = {0};
        (void)mt_options_hidden_pairs(&c, options, error);
        r->num_hidden = plan.num_taps = c.num_pairs;
        for (int64_t k = 0; k < c.num_pairs; k++) plan.taps[k] = c.pairs[k].teacher;
    }
    if (status == 0 && plan.max_patches > 0) status = check_pictures(r, options, error);
    if (status == 0) status = mt_model_role_use(&r->trained, MT_USE_NOTHING, error); // room for the other
    if (status == 0) status = mt_model_role_create(&r->role, &plan, error);
    if (status == 0) status = r->is_teacher ? load_teacher(r, error) : load_reference(r, options, state, error);
    if (status == 0) mt_report_role(&r->role, log);
    if (status == 0) status = mt_model_role_use(&r->role, MT_USE_NOTHING, error);
    if (status == 0) status = mt_model_role_use(&r->trained, MT_USE_TRAINING, error);
    if (status == 0 && mt_model_role_is_apart(&r->role))
        r->owners = mt_grid_owners(r->role.grid), r->readers = find_readers(r->trained.grid);
    if (status == 0)
        *reference = r;
    else
        mt_reference_close(r);
    return status;
}

static void clear_score(scores *s) {
    free(s->logp), free(s->teacher.tokens), free(s->teacher.ids), free(s->teacher.logits), free(s->teacher.hidden);
    *s = (scores){0};
}

/* Empties a list and gives it room for `count` micro-batches. */
static void clear_scores(scores **list, int64_t *capacity, int64_t count) {
    for (int64_t i = 0; i < *capacity; i++) clear_score(&(*list)[i]);
    if (count <= *capacity) return;
    *list = mt_realloc(*list, count * (int64_t)sizeof **list);
    memset(*list + *capacity, 0, (size_t)(count - *capacity) * sizeof **list);
    *capacity = count;
}

void mt_reference_close(mt_reference *r) {
    if (!r) return;
    clear_scores(&r->scores, &r->capacity, 0), clear_scores(&r->found, &r->found_capacity, 0);
    free(r->scores), free(r->found), free(r->owners), free(r->readers);
    mt_run_options options = r->role.options;
    mt_model_role_close(&r->role);
    if (r->owns_options) mt_options_free(&options);
    free(r);
}

/* ---- scores of a step */

/* The place of the scores of micro-batch `number` of the run, on the ranks that compute them. */
static scores *scores_of(const mt_reference *r, int64_t number) {
    return &(mt_model_role_is_apart(&r->role) ? r->found : r->scores)[number / r->role.grid->data.size];
}

/* The sinks of mt_model_role_score. */
static void keep_scores(void *context, int64_t number, const mt_batch *batch, const double *logp,
                        const double *entropy) {
    scores *kept = scores_of(context, number);
    (void)entropy;
    kept->num_tokens = batch->num_tokens;
    kept->logp = mt_malloc(batch->num_tokens * 4);
    for (int64_t t = 0; t < batch->num_tokens; t++) kept->logp[t] = (float)logp[t];
}

/* The teacher's hidden states of the tokens that are kept; the ranks of a tensor group come together. */
static void keep_hidden(const mt_reference *r, mt_teacher_logits *kept) {
    int64_t P = r->num_hidden, C = r->role.options.stack.hidden_size, T = 0;
    if (P == 0) return;
    while (mt_score_logits(r->role.model, T, NULL) >= 0) T++;
    float *rows = mt_malloc(mt_max(T, 1) * C * 4);
    kept->num_hidden = P, kept->width = C;
    kept->hidden = mt_malloc(mt_max(kept->count, 1) * P * C * 4);
    for (int64_t k = 0; k < P; k++) {
        mt_score_hidden(r->role.model, k, rows);
        for (int64_t i = 0; i < kept->count; i++)
            memcpy(kept->hidden + (i * P + k) * C, rows + kept->tokens[i] * C, (size_t)C * 4);
    }
    free(rows);
}

static void keep_logits(void *context, int64_t number, const mt_batch *batch, const double *logp,
                        const double *entropy) {
    mt_reference *r = context;
    mt_teacher_logits *kept = &scores_of(r, number)->teacher;
    mt_model *model = r->role.model;
    int64_t V = r->role.options.stack.vocab_size, K = r->logits_topk > 0 ? r->logits_topk : V, position;
    (void)logp, (void)entropy;
    kept->K = K;
    for (int64_t t = 0; (position = mt_score_logits(model, t, NULL)) >= 0; t++)
        kept->count += batch->loss_mask[position] != 0;
    kept->tokens = mt_malloc(kept->count * 4), kept->logits = mt_malloc(kept->count * K * 4);
    if (K < V) kept->ids = mt_malloc(kept->count * K * 4);
    float *logits = K < V ? mt_malloc(V * 4) : NULL;
    for (int64_t t = 0, row = 0; (position = mt_score_logits(model, t, NULL)) >= 0; t++) {
        if (batch->loss_mask[position] == 0) continue;
        (void)mt_score_logits(model, t, K < V ? logits : kept->logits + row * K);
        if (K < V) mt_take_greatest(kept->ids + row * K, kept->logits + row * K, logits, V, K);
        kept->tokens[row++] = (int32_t)t;
    }
    keep_hidden(r, kept);
    free(logits);
}

/* The source of scoring: a micro-batch of this rank, or for a role apart of any rank. */
static int read_batch(void *context, int64_t slot, int64_t rank, mt_batch *batch, mt_error *error) {
    mt_reference *r = context;
    return mt_model_role_is_apart(&r->role) ? mt_feed_batch_of(r->feed, slot, rank, batch, error)
                                            : mt_feed_batch(r->feed, slot, batch, error);
}

/* Sends `bytes` bytes from world rank `from` to rank `to`, which gets a copy to free; NULL elsewhere. Both call it. */
static void *move(const mt_group *world, const void *sent, int64_t bytes, int from, int to) {
    void *received = world->rank == to && bytes > 0 ? mt_malloc(bytes) : NULL;
    if (bytes > 0 && from == to)
        memcpy(received, sent, (size_t)bytes);
    else if (bytes > 0 && world->rank == from)
        mt_send(world, sent, bytes, to);
    else if (bytes > 0)
        mt_receive(world, received, bytes, from);
    return received;
}

/* Gives rank `to` the scores `found` of rank `from`, as *kept there; both call it. Elsewhere the pointers are NULL. */
static void move_scores(const mt_group *world, const scores *found, scores *kept, int from, int to) {
    static const scores none = {0};
    const scores *s = found ? found : &none;
    const mt_teacher_logits *t = &s->teacher;
    int64_t sizes[] = {s->logp ? s->num_tokens : 0, t->count, t->K, t->ids ? t->K : 0, t->num_hidden, t->width};
    int64_t *received = move(world, sizes, sizeof sizes, from, to);
    if (received) memcpy(sizes, received, sizeof sizes);
    free(received);
    scores got = {.num_tokens = sizes[0], .teacher = {.count = sizes[1], .K = sizes[2], .of_whole = true}};
    got.teacher.num_hidden = sizes[4], got.teacher.width = sizes[5];
    got.logp = move(world, s->logp, sizes[0] * 4, from, to);
    got.teacher.tokens = move(world, t->tokens, sizes[1] * 4, from, to);
    got.teacher.ids = move(world, t->ids, sizes[1] * sizes[3] * 4, from, to);
    got.teacher.logits = move(world, t->logits, sizes[1] * sizes[2] * 4, from, to);
    got.teacher.hidden = move(world, t->hidden, sizes[1] * sizes[4] * sizes[5] * 4, from, to);
    if (kept) *kept = got;
}

/* Gives the scores that the replicas of a role apart computed to the ranks that read them. All ranks go through the
 * messages in one order, so none waits for ever. */
static void deliver_scores(mt_reference *r) {
    const mt_group *world = &r->role.grid->world;
    int64_t ranks = r->trained.grid->data.size, replicas = r->role.grid->data.size;
    int64_t count = r->feed->micro_batches * ranks;
    for (int64_t number = 0; number < count; number++) {
        int from = r->owners[number % replicas];
        scores *found = world->rank == from ? &r->found[number / replicas] : NULL;
        for (int to = 0; to < world->size; to++) {
            if (r->readers[to] != number % ranks || (world->rank != from && world->rank != to)) continue;
            move_scores(world, found, world->rank == to ? &r->scores[number / ranks] : NULL, from, to);
        }
        if (found) clear_score(found);
    }
}

int mt_reference_score(mt_reference *r, mt_feed *feed, mt_batch *batch, mt_error *error) {
    int64_t slots = feed->micro_batches, ranks = r->trained.grid->data.size;
    bool apart = mt_model_role_is_apart(&r->role);
    clear_scores(&r->scores, &r->capacity, slots);
    if (apart) clear_scores(&r->found, &r->found_capacity, mt_divide_up(slots * ranks, r->role.grid->data.size));
    r->feed = feed;
    if (mt_model_role_use(&r->trained, MT_USE_NOTHING, error) != 0) return -1;
    mt_model_role_scoring scoring = {.slots = slots, .ranks = ranks, .source = read_batch, .context = r};
    scoring.batch = batch, scoring.sink = r->is_teacher ? keep_logits : keep_scores, scoring.sink_context = r;
    if (mt_model_role_score(&r->role, &scoring, error) != 0) return -1;
    if (apart) deliver_scores(r);
    return mt_model_role_use(&r->trained, MT_USE_TRAINING, error);
}

/* ---- batches with scores */

int mt_reference_batch(void *reference, int64_t index, mt_batch *batch, mt_error *error) {
    mt_reference *r = reference;
    scores *kept = &r->scores[index];
    if (mt_feed_batch(r->feed, index, batch, error) != 0) return -1;
    bool apart = mt_model_role_is_apart(&r->role);
    batch->teacher = kept->teacher.K > 0 ? &kept->teacher : NULL;
    int64_t tokens = apart ? mt_min(kept->num_tokens, batch->num_tokens) : kept->num_tokens;
    if (kept->logp) memcpy(batch->loss_inputs[MT_REF_LOGP], kept->logp, (size_t)tokens * 4);
    return 0;
}
