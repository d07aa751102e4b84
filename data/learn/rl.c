/* rl.c: an iteration of reinforcement learning. All ranks hold all responses and their numbers in host memory, so that
 * each computes the same advantages; models score and train micro-batches that are dealt to data-parallel ranks. The
 * models are roles (model_role.h), which take turns.
 *
 *   transfer  weights of the actor to the generator, if that has a layout of its own
 *   generate  responses of the actor             generate.c
 *   reward    scores of the responses            rewards.c, or a reward model
 *   score     log-probabilities of the actor and of the reference, values of the critic
 *   train     ppo_epochs x mini-batches: steps of the actor and of the critic
 */
#include "rl.h"

#include "../base/file.h"
#include "../base/signals.h"
#include "../tokens/chat.h"
#include "../tokens/prompts.h"
#include "../tokens/response.h"
#include "../tokens/tokenizer_vocab.h"
#include "../models/special_tokens.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../models/generate.h"
#include "../models/model_role.h"
#include "../models/text_images.h"
#include "../models/transfer.h"
#include "../checkpoint/checkpoint_folder.h"
#include "../checkpoint/checkpoint_load.h"
#include "../checkpoint/resume.h"
#include "../report/report.h"
#include "environment.h"
#include "mismatch.h"
#include "pending.h"
#include "rollouts.h"
#include "stage.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A model beside the actor. */
typedef struct partner {
    mt_model_role role;
    char *folder;        // NULL: role.options.load
    bool owns_options;   // role.options, strings too, are not the actor's
    mt_plan_shape shape; // of the micro-batches that it trains on
    mt_stage_loss loss;
} partner;

/* The phases of an iteration, and their costs: seconds of this rank, and tokens of all ranks. A response that is
 * written or rewarded counts its own tokens; a model that scores or trains counts those of its sequences, each time. */
enum { TRANSFER, GENERATION, REWARDS, SCORING, TRAINING, NUM_PHASES };
static const struct {
    const char *name, *seconds, *tokens; // tokens NULL: has none
} phases[NUM_PHASES] = {[TRANSFER] = {"transfer", "transfer seconds", NULL},
                        [GENERATION] = {"generation", "generation seconds", "generation tokens"},
                        [REWARDS] = {"reward", "reward seconds", "reward tokens"},
                        [SCORING] = {"scoring", "scoring seconds", "scoring tokens"},
                        [TRAINING] = {"training", "training seconds", "training tokens"}};
typedef struct phase_times {
    double seconds[NUM_PHASES], tokens[NUM_PHASES];
    double all_seconds; // of the iteration
} phase_times;

/* The teacher's K most probable labels of each position that counts, with forward_kl_topk. */
typedef struct teacher_topk {
    int64_t K;                  // 0: none
    float *ids, *logps;         // [T, K] 0 until stored; ids ascend
    double mass;                // of these labels, the mean over positions
    mt_teacher_logits *batches; // [num_batches] of the micro-batches of the step, once they are filled
    int64_t num_batches;
} teacher_topk;

struct mt_rl {
    mt_rl_config config;
    mt_model_role actor, generator;
    partner reference, critic, reward_model;
    partner *teachers; // [num_teachers] of on-policy distillation; none of their own: the reference teaches
    int64_t num_teachers;
    int64_t teacher_age;  // of a lagging one: iterations since it was the actor
    teacher_topk topk;    // of the batch at hand
    mt_transfer *renewal; // from actor to teacher, with --self-distillation lagging
    mt_saver *teacher_saver;
    char *teacher_folder;  // that it saves to
    mt_transfer *transfer; // from actor to generator; NULL: the actor generates
    mt_saver *critic_saver;
    char *critic_folder;       // that it saves to
    mt_run_state critic_state; // its numbers of take_trained
    mt_samples prompts;
    mt_image_reader reader;                   // how their pictures were read
    mt_text_images **pictures;                // [prompts.count] of each prompt, or NULL; NULL: no prompt has pictures
    int64_t *quotas;                          // prompts of an iteration of each of --prompt-shares
    mt_stops stops;                           // tokens that end a response
    mt_reward_function *rewards[MT_MAX_INTS]; // of rank 0; NULL: a model's, the environment's, or another rank
    mt_environment *environment;              // of rank 0; NULL: none, or another rank
    int32_t end;                              // the token behind which the chat template can have another message
    mt_rollouts rollouts;
    mt_rollout_config rollout_config;
    mt_policy_config policy;
    mt_correction correction;
    mt_plan_shape shape; // of micro-batches on the actor's grid
    /* --rollout-lag: batches that wait for their iteration, the next one first; responses in progress; the file of rank
     * 0's next checkpoint */
    mt_waiting waiting;
    char *saved_waiting;
    int64_t saved_bytes;
    /* --rollout-ranks: the batch that they write, its prompts and iteration; the seconds that they took for the batches
     * since the last report, and those in which this rank waited for them */
    int64_t *written_prompts; // [rollout_batch_size]; NULL: they write none
    int64_t written_iteration;
    double writing, waited;
    double staleness; // of the counted tokens of the batch at hand: iterations since the weights that wrote them
    int64_t most_staleness;
    double continued; // share of its responses that weights of several iterations wrote
    /* of the iteration */
    // The generator's log-probabilities of all tokens of the responses, one after another, at --temperature and of all
    // tokens of the vocabulary; NULL: none
    float *generated;
    // Of the same tokens, with --partial-rollout-max-split: versions of the weights that wrote them, and the
    // log-probabilities that training gave those of earlier iterations then
    int64_t *versions;
    double *old_logps;
    int64_t phases;        // of generation, with --partial-rollout-max-split
    int64_t rounds;        // of responses
    double drafts[2];      // drafted tokens; those accepted
    mt_mismatch mismatch;  // of generator and training, before the correction
    double generation_gap; // the largest difference of their log-probabilities
    double cut, rejected;  // shares of counted tokens: with a bounded weight, left out
    mt_routes routes;      // --router-replay: a row for each of rollouts.T positions
    double reroutes;       // the share of its choices that training would not have made
    double value_loss;
    phase_times times;
    double entropy; // of the actor, summed over the tokens that count
    mt_report_number numbers[MT_MAX_REPORT_NUMBERS];
    int64_t num_numbers;
    mt_step_plan plan; // the micro-batches at hand
    /* of the run */
    int64_t num_iterations;
    phase_times total; // of the iterations first_timed to last_timed
    int64_t first_timed, last_timed;
};

/* ---- models */

/* Adds the memory for pictures in generation: of --max-image-tokens, or of the prompt with the most of them. */
static void plan_pictures(mt_model_plan *plan, const mt_run_options *o, const mt_samples *prompts) {
    int64_t patches_of_token = prompts->image_config.merge_size * prompts->image_config.merge_size, most = 0;
    for (int64_t i = 0; i < prompts->count && prompts->images.count > 0; i++) {
        int64_t tokens = 0;
        for (int64_t k = prompts->image_offsets[i]; k < prompts->image_offsets[i + 1]; k++) {
            int64_t patches = prompts->images.items[k].grid.height * prompts->images.items[k].grid.width;
            tokens += patches / patches_of_token, plan->max_patches = mt_max(plan->max_patches, patches);
        }
        most = mt_max(most, tokens);
    }
    plan->max_image_tokens = mt_max(most, mt_min(o->max_image_tokens, most * plan->cache_sequences));
}

void mt_rl_plan(mt_model_plan *plan, const mt_run_options *o, const mt_samples *prompts) {
    mt_run_options apart = *o;
    int64_t tokens = plan->max_tokens * o->stack.context_parallel_size; // of a micro-batch
    plan->max_patches = mt_samples_max_patches(prompts, tokens);
    if (o->rollout_ranks > 0 || mt_model_role_sizes_apply(&apart, mt_model_role_sizes_of_generator(o))) return;
    mt_rollout_plan(plan, o), plan_pictures(plan, o, prompts);
}

static int load_partner(mt_rl *rl, partner *p, mt_run_state *state, mt_error *error) {
    const char *folder = p->folder ? p->folder : p->role.options.load;
    if (!folder) mt_model_init(p->role.model);
    if (folder && mt_checkpoint_load(p->role.model, &p->role.options, state, folder, error) != 0) return -1;
    mt_report_role(&p->role, rl->config.log);
    return 0;
}

/* Creates a model for scoring, or with a loss for training. */
static int create_partner(mt_rl *rl, partner *p, const mt_model_plan *actor_plan, const mt_loss *loss,
                          mt_error *error) {
    mt_model_plan plan = mt_model_role_plan(&p->role, actor_plan, rl->config.options->stack.context_parallel_size);
    plan.train = loss != NULL, plan.loss = loss;
    const char *folder = p->folder ? p->folder : p->role.options.load;
    int status = rl->pictures ? mt_model_role_check_pictures(&p->role, folder, &rl->reader, error) : 0;
    if (mt_agree(&rl->config.grid->world, status != 0, error) != 0) return -1;
    return mt_model_role_create(&p->role, &plan, error);
}

/* Opens a partner that only scores. */
static int open_partner(mt_rl *rl, partner *p, const mt_model_plan *actor_plan, mt_error *error) {
    mt_run_state unused = {0};
    if (create_partner(rl, p, actor_plan, NULL, error) != 0) return -1;
    return load_partner(rl, p, &unused, error);
}

/* Begins a partner with its folder. */
static void begin_partner(mt_rl *rl, partner *p, const char *name, const char *folder) {
    const mt_rl_config *c = &rl->config;
    mt_model_role_begin(&p->role, name, c->options, c->grid, c->ops);
    p->role.options.stack.lora_rank = 0; // only the actor has adapters
    p->folder = folder ? mt_strdup(folder) : NULL;
}

/* Micro-batches of a model with these options. */
static mt_plan_shape plan_shape_of(const mt_options *o) {
    return (mt_plan_shape){.num_ranks = o->data_parallel_size,
                           .micro_batch_size = o->micro_batch_size,
                           .row_length = o->seq_length,
                           .regroups = true,
                           .work = mt_token_work_of(o),
                           .slot_group = o->microbatch_group_size_per_virtual_pipeline_stage,
                           .slot_rest = o->pipeline_model_parallel_size};
}

/* The reference has the actor's shape. */
static int open_reference(mt_rl *rl, const mt_model_plan *plan, const mt_run_state *state, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    partner *p = &rl->reference;
    bool teaches = o->self_distillation == MT_SELF_DISTILL_INITIAL;
    if (o->kl_loss_coef == 0 && !o->kl_in_reward && !teaches) return 0;
    if (mt_options_refer_to_base(o)) {
        mt_model_role_lend_base(&p->role, "reference", &rl->actor);
        mt_report_role(&p->role, rl->config.log);
        return 0;
    }
    if (!o->ref_load && state->iteration > 0 && o->stack.lora_rank == 0)
        return mt_error_set(error,
                            "the run resumes at iteration %lld; name the model that it started from by --ref-load",
                            (long long)state->iteration);
    begin_partner(rl, p, "reference", o->ref_load);
    int status = o->ref_load
                     ? mt_options_check_folder(o, o->ref_load, "--ref-load", &p->role.options.stack.head_type, error)
                     : 0;
    if (mt_agree(&rl->config.grid->world, status != 0, error) != 0) return -1;
    if (p->role.options.stack.head_type != MT_HEAD_LM)
        return mt_error_set(error, "--ref-load %s: is a model with a value head; take a language model's folder",
                            o->ref_load);
    if (mt_model_role_place(&p->role, mt_model_role_sizes_of_reference(o), "--ref-*-model-parallel-size", error) != 0)
        return -1;
    return open_partner(rl, p, plan, error);
}

/* The folder of a role that was saved with the actor's checkpoint of an iteration, beside it; to free. The run's folder
 * is loaded, or that of one checkpoint. */
static char *saved_beside(const mt_rl *rl, const char *role, int64_t iteration) {
    const mt_run_options *o = rl->config.options;
    const char *loaded = o->stack.lora_rank > 0 ? o->load_adapter : o->load;
    char *whole = realpath(loaded, NULL), *name = whole ? strrchr(whole, '/') : NULL;
    bool is_checkpoint = name && mt_iteration_of(name + 1) >= 0;
    if (is_checkpoint) *name = 0;
    char *all = mt_path_join(is_checkpoint ? whole : loaded, role);
    char *path = mt_iteration_path(all, iteration);
    free(whole), free(all);
    return path;
}

static char *saved_critic(const mt_rl *rl, int64_t iteration) {
    return saved_beside(rl, "critic", iteration);
}

static int verify_critic(const mt_rl *rl, int64_t iteration, bool whole, mt_error *error) {
    char *path = saved_critic(rl, iteration);
    bool exists = mt_folder_has_weights(path);
    int status = mt_checkpoint_verify(path, MT_VERIFY_OPTIMIZER | (whole ? MT_VERIFY_TENSORS : 0), error);
    if (!exists)
        status = mt_error_set(error, "%s: the critic that was saved with iteration %lld is not there", path,
                              (long long)iteration);
    free(path);
    return status;
}

/* The iteration of the newest checkpoint, up to `number`, whose actor and critic are intact, on every rank; -1 with the
 * damage of the critic of `number` if there is none. Only a run that loads from its own --save goes back. whole: all
 * bytes of the critics are compared. */
static int64_t choose_critic(const mt_rl *rl, int64_t number, bool whole, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const mt_group *world = &rl->config.grid->world;
    mt_error damage, ignored;
    int64_t chosen = number;
    if (world->rank == 0 && verify_critic(rl, number, whole, &damage) != 0) {
        do chosen = mt_options_falls_back(o) ? mt_checkpoint_whole_before(o->save, chosen, &ignored) : -1;
        while (chosen >= 0 && verify_critic(rl, chosen, whole, &ignored) != 0);
        if (chosen >= 0) fprintf(stderr, "warning: %s; going on from iteration %lld\n", damage.text, (long long)chosen);
    }
    mt_broadcast(world, &chosen, sizeof chosen, 0);
    if (chosen < 0) mt_error_set(error, "%s; name a critic by --critic-load", world->rank == 0 ? damage.text : "");
    return mt_agree(world, chosen < 0, error) == 0 ? chosen : -1;
}

/* Takes a resumed run to the newest checkpoint, up to the loaded one, with an intact critic. */
static int settle_critic(mt_rl *rl, mt_run_state *state, bool whole, mt_error *error) {
    const mt_run_state before = *state;
    const mt_run_options *o = rl->config.options;
    mt_model *actor = rl->actor.model;
    int64_t chosen = choose_critic(rl, state->iteration, whole, error);
    if (chosen < 0 || chosen == state->iteration) return chosen < 0 ? -1 : 0;
    if (mt_model_role_use(&rl->actor, MT_USE_TRAINING, error) != 0) return -1;
    char *path = mt_iteration_path(o->save, chosen);
    int status = o->stack.lora_rank > 0 ? mt_checkpoint_load_adapter(actor, o, state, path, false, error)
                                        : mt_checkpoint_load(actor, o, state, path, error);
    free(path);
    state->prompts_fingerprint = before.prompts_fingerprint;
    return status == 0 ? mt_model_role_use(&rl->actor, MT_USE_NOTHING, error) : -1;
}

/* Loads the critic; one whose files turn out to be damaged is followed by the one before, with its actor. */
static int load_critic(mt_rl *rl, mt_run_state *state, bool is_saved, mt_error *error) {
    partner *p = &rl->critic;
    mt_run_state loaded = {0};
    int64_t iteration = state->iteration;
    int status = load_partner(rl, p, &loaded, error);
    if (status != 0 && is_saved) {
        mt_error cause = *error;
        if (mt_model_role_use(&p->role, MT_USE_NOTHING, error) != 0) return -1;
        if (settle_critic(rl, state, true, error) != 0) return -1;
        if (mt_model_role_use(&p->role, MT_USE_TRAINING, error) != 0) return -1;
        if (state->iteration == iteration) { // its files are as they were saved
            *error = cause;
            return -1;
        }
        free(p->folder);
        p->folder = saved_critic(rl, state->iteration);
        status = load_partner(rl, p, &loaded, error);
    }
    rl->critic_state = loaded;
    return status;
}

/* The critic's options in another shape than the actor's: the folder's model, which trains as the run does. */
static int take_critic_shape(mt_run_options *own, const mt_run_options *o, const char *folder, const char *option,
                             int64_t world_size, mt_error *error) {
    mt_model_role_sizes sizes = mt_model_role_sizes_of_critic(o);
    if (mt_options_of_learner(own, o, folder, error) != 0) return -1;
    if (mt_options_check_expert_ranks(&own->stack, sizes.expert, "critic", error) != 0) return -1;
    mt_head_type head = own->stack.head_type;
    own->stack.lr = o->critic_lr, own->stack.min_lr = fmin(o->stack.min_lr, o->critic_lr);
    (void)mt_model_role_sizes_apply(own, sizes);
    if (mt_options_finish_model(own, &o->stack, option, "critic", world_size, error) != 0) return -1;
    own->stack.head_type = head;
    own->stack.stage = o->stack.stage,
    own->stack.global_batch_size = o->stack.global_batch_size; // an iteration is the run's
    own->stack.train_iters = o->stack.train_iters, own->stack.num_iterations = o->stack.num_iterations;
    return 0;
}

/* Options and grid of the critic of a folder, which `option` names, or of the model that the run begins with. In
 * another shape than the actor's it has a grid of its own. */
static int place_critic(mt_rl *rl, const char *folder, const char *option, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const mt_group *world = &rl->config.grid->world;
    partner *p = &rl->critic;
    mt_run_options *own = &p->role.options;
    mt_model_role_sizes sizes = mt_model_role_sizes_of_critic(o);
    mt_error difference;
    begin_partner(rl, p, "critic", folder);
    bool fits = !folder || mt_options_check_folder(o, folder, option, &own->stack.head_type, &difference) == 0;
    p->owns_options = !fits;
    int status = fits ? mt_options_check_expert_ranks(&own->stack, sizes.expert, "critic", error)
                      : take_critic_shape(own, o, folder, option, world->size, error);
    if (mt_agree(world, status != 0, error) != 0) return -1;
    status = fits ? mt_model_role_place(&p->role, sizes, "--critic-*-model-parallel-size", error)
                  : mt_model_role_build_grid(&p->role, error);
    p->shape = plan_shape_of(&own->stack);
    own->value_head = own->stack.head_type != MT_HEAD_TOKEN; // a reward model's has no bias
    own->finetune = own->finetune || own->value_head;        // it becomes a critic, and its own run does not go on
    if (o->keep_checkpoints > 0) own->keep_checkpoints++;    // it is saved before the actor
    own->stack.head_type = MT_HEAD_TOKEN;
    own->stack.lr = o->critic_lr, own->stack.min_lr = fmin(o->stack.min_lr, o->critic_lr);
    return status;
}

/* The critic of a run that resumes is the one that was saved with the actor, beside its checkpoints; --critic-load is
 * for a run that begins, or resumes elsewhere than in its own --save. */
static int open_critic(mt_rl *rl, const mt_model_plan *plan, mt_run_state *state, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    partner *p = &rl->critic;
    bool again = o->critic_load && mt_options_falls_back(o); // a restart repeats the whole command
    bool is_saved = state->iteration > 0 && (!o->critic_load || again);
    if (o->adv_estimator != MT_ADV_GAE) return 0;
    if (is_saved && settle_critic(rl, state, false, error) != 0) {
        if (!again) return -1;
        is_saved = false;
    }
    char *folder = rl->critic_folder = o->save ? mt_path_join(o->save, "critic") : NULL;
    char *saved = is_saved ? saved_critic(rl, state->iteration) : NULL;
    int status = place_critic(rl, saved ? saved : o->critic_load, saved ? "--load" : "--critic-load", error);
    if (status == 0) status = create_partner(rl, p, plan, mt_stage_critic_loss(&p->loss, o), error);
    if (status == 0) status = load_critic(rl, state, is_saved, error);
    if (status == 0 && o->save && rl->config.grid->world.rank == 0)
        status = mt_checkpoint_prepare(p->role.model, &p->role.options, folder, error);
    status = mt_agree(&rl->config.grid->world, status != 0, error);
    if (status == 0 && o->save)
        mt_saver_open(&rl->critic_saver, p->role.model, &p->role.options, folder, rl->config.extra, rl->config.context,
                      false);
    free(saved);
    return status;
}

/* The reward model may have another shape than the actor, and another layout. */
static int open_reward_model(mt_rl *rl, const mt_model_plan *plan, mt_error *error) {
    const mt_rl_config *c = &rl->config;
    partner *p = &rl->reward_model;
    mt_run_options *own = &p->role.options;
    mt_model_role_sizes sizes = mt_model_role_sizes_of_reward(c->options);
    mt_model_role_begin(&p->role, "reward model", c->options, c->grid, c->ops);
    p->owns_options = true;
    int status = mt_options_of_model(own, c->options, c->options->reward_load, error);
    if (status == 0) status = mt_options_check_expert_ranks(&own->stack, sizes.expert, "reward", error);
    if (status == 0 && own->stack.head_type == MT_HEAD_LM)
        status = mt_error_set(error, "--reward-load %s: is a language model; --stage rm makes a reward model of one",
                              own->load);
    own->stack.stage = MT_STAGE_RM; // whose models have value heads
    bool apart = status == 0 && mt_model_role_sizes_apply(own, sizes);
    if (own->stack.num_experts > 0 && !apart) // on the actor's grid, also if the actor has none
        own->stack.expert_model_parallel_size = c->grid->expert.size,
        own->stack.expert_tensor_parallel_size = c->grid->expert_tensor.size;
    if (status == 0)
        status =
            mt_options_finish_model(own, &c->options->stack, "--reward-load", "reward", c->grid->world.size, error);
    if (mt_agree(&c->grid->world, status != 0, error) != 0) return -1;
    if (apart && mt_model_role_build_grid(&p->role, error) != 0) return -1;
    return open_partner(rl, p, plan, error);
}

/* ---- teachers of on-policy distillation */

/* A teacher of a folder, which `option` names: of any shape. */
static int open_teacher(mt_rl *rl, partner *p, const char *folder, const char *option, const mt_model_plan *plan,
                        mt_error *error) {
    const mt_rl_config *c = &rl->config;
    mt_run_options *own = &p->role.options;
    bool apart = false;
    mt_model_role_begin(&p->role, "teacher", c->options, c->grid, c->ops);
    p->owns_options = true;
    int status = mt_options_of_teacher(own, c->options, folder, option, c->grid, &apart, error);
    if (mt_agree(&c->grid->world, status != 0, error) != 0) return -1;
    own->stack.stage = MT_STAGE_RL,
    own->stack.temperature = c->options->stack.temperature; // its logits are divided too
    if (own->stack.num_experts > 0 && !apart)               // on the actor's grid, also if the actor has none
        own->stack.expert_model_parallel_size = c->grid->expert.size,
        own->stack.expert_tensor_parallel_size = c->grid->expert_tensor.size;
    if (apart && mt_model_role_build_grid(&p->role, error) != 0) return -1;
    return open_partner(rl, p, plan, error);
}

/* The copy of the actor that teaches it, and its saver. A run that resumes has the copy that was saved with it, unless
 * it renews it at once. */
static int open_lagging_teacher(mt_rl *rl, partner *p, const mt_model_plan *plan, const mt_run_state *state,
                                mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_run_state unused = {0};
    begin_partner(rl, p, "teacher", NULL);
    p->role.options.no_save_optim = true;
    if (o->keep_checkpoints > 0) p->role.options.keep_checkpoints++; // it is saved before the actor
    if (mt_model_role_place(&p->role, mt_model_role_sizes_of_teacher(o), "--teacher-*-model-parallel-size", error) != 0)
        return -1;
    if (create_partner(rl, p, plan, NULL, error) != 0) return -1;
    mt_report_role(&p->role, rl->config.log);
    int status = 0;
    if (state->iteration % o->teacher_interval != 0) {
        char *folder = saved_beside(rl, "teacher", state->iteration);
        bool exists = mt_folder_has_weights(folder);
        if (exists) status = mt_checkpoint_load(p->role.model, &p->role.options, &unused, folder, error);
        if (!exists)
            status = mt_error_set(error,
                                  "%s: the teacher that was saved with iteration %lld is not there; begin anew "
                                  "by --finetune",
                                  folder, (long long)state->iteration);
        free(folder);
    }
    if (mt_agree(&rl->config.grid->world, status != 0, error) != 0) return -1;
    if (mt_transfer_open(&rl->renewal, p->role.model, rl->actor.model, false, 0, error) != 0) return -1;
    if (!o->save) return 0;
    rl->teacher_folder = mt_path_join(o->save, "teacher");
    if (rl->config.grid->world.rank == 0)
        status = mt_checkpoint_prepare(p->role.model, &p->role.options, rl->teacher_folder, error);
    if (mt_agree(&rl->config.grid->world, status != 0, error) != 0) return -1;
    mt_saver_open(&rl->teacher_saver, p->role.model, &p->role.options, rl->teacher_folder, rl->config.extra,
                  rl->config.context, false);
    return 0;
}

static int open_teachers(mt_rl *rl, const mt_model_plan *plan, const mt_run_state *state, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    int status = 0;
    bool lags = o->self_distillation == MT_SELF_DISTILL_LAGGING;
    if (o->distillation_in == MT_DISTILL_IN_NONE || o->self_distillation == MT_SELF_DISTILL_INITIAL) return 0;
    rl->num_teachers = mt_max(o->teachers.count, 1);
    rl->teachers = mt_calloc(rl->num_teachers * (int64_t)sizeof *rl->teachers);
    for (int64_t i = 0; i < rl->num_teachers && status == 0; i++) {
        partner *p = &rl->teachers[i];
        if (lags)
            status = open_lagging_teacher(rl, p, plan, state, error);
        else if (o->teachers.count > 0)
            status = open_teacher(rl, p, strchr(o->teachers.items[i], '=') + 1, "--teachers", plan, error);
        else
            status = open_teacher(rl, p, o->teacher_load, "--teacher-load", plan, error);
        if (status == 0) status = mt_model_role_use(&p->role, MT_USE_NOTHING, error);
    }
    return status;
}

/* A lagging teacher becomes the actor in every --teacher-interval-th iteration. */
static int renew_teacher(mt_rl *rl, const mt_run_state *state, mt_error *error) {
    if (!rl->renewal) return 0;
    rl->teacher_age = state->iteration % rl->config.options->teacher_interval;
    if (rl->teacher_age != 0) return 0;
    mt_model_role *teacher = &rl->teachers[0].role;
    if (mt_train_finish(rl->actor.model, error) != 0 || mt_model_role_use(&rl->actor, MT_USE_NOTHING, error) != 0 ||
        mt_model_role_use(teacher, MT_USE_SCORING, error) != 0)
        return -1;
    mt_transfer_run(rl->renewal);
    teacher->ops->stream_synchronize(mt_model_stream(teacher->model));
    return mt_model_role_use(teacher, MT_USE_NOTHING, error);
}

/* ---- rewards */

static int open_reward(mt_rl *rl, const mt_model_plan *plan, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const mt_group *world = &rl->config.grid->world;
    int status = mt_options_rewards(o, MT_REWARD_MODEL) ? open_reward_model(rl, plan, error) : 0;
    for (int64_t i = 0; i < o->reward.count && status == 0 && world->rank == 0; i++) {
        mt_reward_kind kind = (mt_reward_kind)o->reward.items[i];
        const char *argument = kind == MT_REWARD_REGEX ? o->reward_pattern : o->reward_command;
        if (kind != MT_REWARD_MODEL && kind != MT_REWARD_ENV && kind != MT_REWARD_NONE)
            status = mt_reward_open(&rl->rewards[i], kind, argument, o->reward_timeout_seconds, error);
    }
    const mt_environment_config environment = {.command = o->env_command,
                                               .seconds = o->env_timeout_seconds,
                                               .tokenizer = rl->config.tokenizer,
                                               .tokenizer_path = rl->config.tokenizer_path,
                                               .chat_template = o->chat_template,
                                               .chat_template_kwargs = o->chat_template_kwargs};
    if (status == 0 && o->env_command && rl->end < 0)
        status = mt_error_set(error, "--env-command: the chat template has no token that ends a response, so that "
                                     "nothing can follow one; take another --chat-template");
    if (status == 0 && o->env_command && world->rank == 0)
        status = mt_environment_open(&rl->environment, &environment, error);
    return mt_agree(world, status != 0, error);
}

static mt_sampling sampling_of(const mt_run_options *o);

/* The generator on ranks of its own. */
static int open_writers(mt_rl *rl, mt_error *error) {
    const mt_rl_config *c = &rl->config;
    mt_sampling sampling = sampling_of(c->options);
    if (c->ops != &mt_cpu_ops) return mt_error_set(error, "--rollout-ranks is for the CPU so far: give --device cpu");
    if (rl->pictures)
        return mt_error_set(error, "--rollout-ranks: the ranks that write read no pictures; leave it out");
    if (c->log) fprintf(c->log, "generator: a model on %lld ranks of its own\n", (long long)c->options->rollout_ranks);
    return mt_rollout_ranks_open(c->writers, rl->actor.model, &sampling, &rl->stops, error);
}

/* The generator of another layout than the actor's: a model that gets the actor's weights in each iteration, with
 * adapters its base once. */
static int open_generator(mt_rl *rl, const mt_model_plan *actor_plan, mt_error *error) {
    const mt_rl_config *c = &rl->config;
    mt_model_role *role = &rl->generator;
    bool adapts = c->options->stack.lora_rank > 0;
    mt_model_plan plan = {.max_tokens = mt_min(c->options->stack.seq_length, MT_PREFILL_TOKENS)};
    mt_transfer *base = NULL;
    if (c->writers) return open_writers(rl, error);
    mt_model_role_begin(role, "generator", c->options, c->grid, c->ops);
    mt_model_role_sizes sizes = mt_model_role_sizes_of_generator(c->options);
    if (mt_model_role_place(role, sizes, "--rollout-tensor-model-parallel-size", error) != 0) return -1;
    if (!mt_model_role_is_apart(role)) return 0;
    mt_rollout_plan(&plan, &role->options), plan_pictures(&plan, &role->options, &rl->prompts);
    plan.host_memory = actor_plan->host_memory;
    if (mt_model_role_create(role, &plan, error) != 0) return -1;
    mt_report_role(role, c->log);
    if (adapts && mt_transfer_open(&base, role->model, rl->actor.model, false, 0, error) != 0) return -1;
    if (adapts) mt_transfer_run(base);
    mt_transfer_close(base);
    if (mt_transfer_open(&rl->transfer, role->model, rl->actor.model, adapts, 0, error) != 0) return -1;
    return mt_model_role_use(role, MT_USE_NOTHING, error);
}

/* ---- opening */

/* Every rank has the same prompts, and a run that resumes has those of its start. */
static int check_prompts(mt_rl *rl, mt_run_state *state, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const char *name = "prompts";
    uint64_t print = mt_samples_fingerprint(&rl->prompts);
    for (int64_t i = 0; i < o->prompt_shares.count; i++) {
        const char *share = o->prompt_shares.items[i];
        uint64_t both[] = {print, mt_contents_fingerprint(share, (int64_t)strlen(share), true)};
        print = mt_contents_fingerprint(both, sizeof both, true);
    }
    if (mt_fingerprints_agree(&print, &name, 1, &rl->config.grid->world, error) != 0) return -1;
    int64_t before = state->iteration > 0 && !o->no_load_rng ? state->prompts_fingerprint : 0;
    state->prompts_fingerprint = (int64_t)(print >> 1); // as JSON holds it
    if (before == 0 || before == state->prompts_fingerprint) return 0;
    return mt_error_set(error, "--data-path: the prompts are not those of the start of the run (their texts, tokens "
                               "and answers); give these, go on with others by --no-load-rng, or begin anew by "
                               "--finetune");
}

int mt_rl_read_prompts(mt_samples *prompts, const mt_rl_config *c, mt_error *error) {
    const mt_run_options *o = c->options;
    bool has_number = mt_options_rewards(o, MT_REWARD_NUMBER), sees = o->stack.vision.tower != MT_VISION_NONE;
    mt_image_reader reader;
    int64_t *quotas = mt_calloc((o->prompt_shares.count + 1) * 8); // a wrong share is an error before any line is read
    *prompts = (mt_samples){0};
    int status = mt_prompt_quotas(quotas, &o->prompt_shares, o->rollout_batch_size, error);
    free(quotas);
    if (status == 0 && sees) status = mt_image_reader_open(&reader, o, c->tokenizer_path, error);
    mt_sft_config files = {.paths = o->data_path,
                           .tokenizer_path = c->tokenizer_path,
                           .vocab_size = o->stack.vocab_size,
                           .seq_length = o->stack.seq_length - o->max_new_tokens,
                           .chat_template = o->chat_template,
                           .chat_template_kwargs = o->chat_template_kwargs,
                           .skip_bad_samples = o->skip_bad_samples,
                           .messages_key = o->messages_key,
                           .prompt_key = o->prompt_key,
                           .query_key = o->query_key,
                           .prompts = true,
                           .shares = o->prompt_shares,
                           .tag_key = o->tag_key,
                           .teachers = o->teachers,
                           .teacher_key = o->teacher_key,
                           .answer_key = o->answer_key,
                           .conversations = o->env_command != NULL,
                           .needs_answer = mt_options_rewards(o, MT_REWARD_EXACT) || has_number,
                           .check_answer = has_number ? mt_reward_check_number : NULL,
                           .image_key = o->image_key,
                           .image_folder = o->image_folder,
                           .images = sees ? &reader : NULL,
                           .log = c->log};
    if (status == 0) status = mt_samples_read(prompts, &files, c->tokenizer, error);
    return mt_agree(&c->grid->world, status != 0, error);
}

int64_t mt_rl_count_prompts(const mt_rl_config *config, mt_error *error) {
    mt_samples prompts;
    mt_rl_config silent = *config;
    silent.log = NULL;
    int status = mt_rl_read_prompts(&prompts, &silent, error);
    int64_t count = prompts.count;
    mt_samples_free(&prompts);
    return status == 0 ? count : -1;
}

/* The pictures of each prompt. */
static int open_pictures(mt_rl *rl, mt_error *error) {
    const mt_rl_config *c = &rl->config;
    const mt_samples *prompts = &rl->prompts;
    if (prompts->images.count == 0) return 0;
    int status = mt_image_reader_open(&rl->reader, c->options, c->tokenizer_path, error);
    if (mt_agree(&c->grid->world, status != 0, error) != 0) return -1;
    rl->pictures = mt_calloc(prompts->count * (int64_t)sizeof *rl->pictures);
    for (int64_t i = 0; i < prompts->count; i++) {
        int64_t first = prompts->image_offsets[i], token = prompts->offsets[i];
        mt_images images = {0};
        mt_images_borrow(&images, &prompts->images, first, prompts->image_offsets[i + 1] - first);
        rl->pictures[i] =
            mt_text_images_open(&images, &rl->reader, prompts->tokens + token, prompts->offsets[i + 1] - token);
    }
    return 0;
}

static void configure_rollouts(mt_rl *rl) {
    const mt_run_options *o = rl->config.options;
    double penalty = o->overlong_buffer_length > 0 ? o->overlong_penalty_factor : o->overlong_penalty;
    rl->rollout_config =
        (mt_rollout_config){.overlong = penalty > 0        ? MT_OVERLONG_PENALTY
                                        : o->overlong_mask ? MT_OVERLONG_MASK
                                                           : MT_OVERLONG_KEEP,
                            .overlong_penalty = penalty,
                            .overlong_buffer = o->overlong_buffer_length,
                            .max_new_tokens = o->max_new_tokens,
                            .reward_clip = o->reward_clip,
                            .dynamic_sampling = o->dynamic_sampling,
                            .kl_type = o->kl_loss_type,
                            .kl_in_reward = o->kl_in_reward ? o->kl_coef : 0,
                            .advantage = {.estimator = o->adv_estimator,
                                          .gamma = o->gamma,
                                          .lambda = o->lam,
                                          .norm_by_std = o->norm_adv_by_std,
                                          .whiten = o->whiten_advantages,
                                          .advantage_clip = o->advantage_clip,
                                          .step_weights = o->episode_reward_weight + o->step_reward_weight},
                            .norm_mean = o->norm_mean_type,
                            .norm_std = o->norm_std_type,
                            .weights = o->reward_weights,
                            .weighs_rollouts = o->rollout_is != MT_ROLLOUT_IS_NONE};
    if (o->distillation_in == MT_DISTILL_IN_ADVANTAGES) {
        rl->rollout_config.distill_type = o->distillation_loss_mode;
        rl->rollout_config.distill_coef = o->distillation_loss_coef;
        rl->rollout_config.distill_max_clamp = o->distillation_max_clamp;
        rl->rollout_config.advantage.only_divergences = !o->use_task_rewards;
    }
    if (o->distillation_in != MT_DISTILL_IN_NONE && o->distillation_loss_mode == MT_KL_FORWARD_TOPK)
        rl->topk.K = o->distillation_topk;
    for (int64_t i = rl->rollout_config.weights.count; i < o->reward.count; i++)
        rl->rollout_config.weights.items[rl->rollout_config.weights.count++] = 1;
    rl->shape = plan_shape_of(&o->stack);
    mt_error none;
    mt_stage_loss stage;
    (void)mt_stage_loss_of(&stage, o);
    rl->policy = stage.policy;
    MT_CHECK(mt_options_correction(&rl->correction, o, &none) == 0); // option_rules.c did it too
}

/* The tokens that end a response: of the model's folder, of the tokenizer, and of the chat template; the image token.
 */
static int find_stops(mt_rl *rl, mt_stops *stops, mt_error *error) {
    const mt_rl_config *c = &rl->config;
    mt_chat *chat;
    if (mt_chat_open(&chat, c->options->chat_template, c->tokenizer, c->tokenizer_path, error) != 0) return -1;
    int status = mt_chat_set_variables(chat, c->options->chat_template_kwargs, error);
    if (status == 0) status = mt_chat_prepare(chat, error);
    // a response has no picture, so that an image token can only end it: nothing follows that would read it
    bool sees = c->options->stack.vision.tower != MT_VISION_NONE;
    const int32_t ends[] = {mt_tokenizer_eod(c->tokenizer), status == 0 ? mt_chat_end(chat) : -1,
                            sees ? (int32_t)c->options->stack.vision.image_token_id : -1};
    mt_chat_close(chat);
    rl->end = ends[1];
    if (status != 0 || mt_stops_of_options(stops, c->options, error) != 0) return -1;
    for (int i = 0; i < 3; i++)
        if (ends[i] >= 0 && !mt_stops_add(stops, ends[i]))
            return mt_error_set(error,
                                "--load %s: \"eos_token_id\" leaves no room for the end of a response; shorten "
                                "the list",
                                c->options->load);
    return 0;
}

/* ---- batches that wait */

/* Elements of a row of routes; 0: none are replayed. */
static int64_t routes_row(const mt_rl *rl) {
    const mt_run_options *o = rl->config.options;
    return o->router_replay != MT_ROUTER_REPLAY_DISABLED ? mt_routes_size(&o->stack, 1) : 0;
}

/* The folder of a run's checkpoint of an iteration, where the run or this checkpoint is loaded; to free. */
static char *own_checkpoint(const char *loaded, int64_t iteration) {
    char *whole = realpath(loaded, NULL), *name = whole ? strrchr(whole, '/') : NULL;
    bool is_checkpoint = name && mt_iteration_of(name + 1) >= 0;
    free(whole);
    return is_checkpoint ? mt_strdup(loaded) : mt_iteration_path(loaded, iteration);
}

/* True if prompts are answered in several iterations. */
static bool is_partial(const mt_run_options *o) {
    return o->partial_rollout_max_split > 1;
}

/* The rollouts that were saved with the checkpoint of an iteration; a run that began without --rollout-lag and
 * --partial-rollout-max-split has none. */
static int load_waiting(mt_rl *rl, const mt_run_state *state, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const char *loaded = o->stack.lora_rank > 0 ? o->load_adapter : o->load;
    mt_waiting *w = &rl->waiting;
    int64_t bytes;
    w->most = mt_max(o->rollout_lag, MT_MAX_ROLLOUT_LAG) + 1, w->partials.each = o->num_return_sequences;
    w->batches = mt_calloc(w->most * (int64_t)sizeof *w->batches);
    if (state->iteration == 0) return 0;
    char *folder = own_checkpoint(loaded, state->iteration), *path = mt_path_join(folder, MT_PENDING_FILE);
    bool exists = mt_folder_has(folder, MT_PENDING_FILE);
    char *data = exists ? mt_file_read(path, INT64_C(1) << 40, &bytes, error) : NULL;
    int status = exists && !data ? -1 : 0;
    if (data) {
        mt_error cause;
        if (mt_waiting_read(w, data, bytes, routes_row(rl), &rl->prompts, &rl->rollout_config, &cause) != 0)
            status = mt_error_set(error, "%s: %s; remove it to write the next responses anew", path, cause.text);
        for (int64_t i = 0; i < w->count; i++)
            w->batches[i].routes.num_layers = o->stack.num_layers, w->batches[i].routes.topk = o->stack.moe_router_topk;
    }
    if (w->partials.count > 0 && !is_partial(o))
        status =
            mt_error_set(error,
                         "%s has responses in progress to %lld prompts: go on with --partial-rollout-max-split, or "
                         "remove the file to write them anew",
                         path, (long long)w->partials.count);
    if (o->rollout_lag == 0 && !is_partial(o)) mt_waiting_clear(w);
    free(data), free(path), free(folder);
    return status;
}

static int64_t *response_indices(const mt_rl *rl);

/* The versions of the weights that wrote the batch at hand: those of an iteration, unless responses went on. */
static mt_versions measure_versions(const mt_rl *rl, int64_t iteration) {
    const mt_rollouts *r = &rl->rollouts;
    mt_versions v = {.mean = (double)iteration, .oldest = iteration};
    double sum = 0, counted = 0, continued = 0;
    if (!rl->versions) return v;
    int64_t *indices = response_indices(rl), token = 0;
    for (int64_t t = 0; t < r->T; t++) {
        if (indices[t] < 0) continue;
        int64_t version = rl->versions[indices[t]];
        sum += (double)version, counted += 1, v.oldest = mt_min(v.oldest, version);
    }
    for (int64_t s = 0; s < r->count; token += r->response_tokens[s++])
        continued += rl->versions[token] != rl->versions[token + r->response_tokens[s] - 1];
    if (counted > 0) v.mean = sum / counted;
    v.continued = continued / (double)r->count;
    free(indices);
    return v;
}

/* Appends the batch at hand to the pending ones. */
static void push_batch(mt_rl *rl, int64_t iteration) {
    rl->waiting.batches[rl->waiting.count++] = (mt_pending){.rollouts = rl->rollouts,
                                                            .routes = rl->routes,
                                                            .iteration = iteration,
                                                            .rounds = rl->rounds,
                                                            .mismatch = rl->mismatch,
                                                            .generation_gap = rl->generation_gap,
                                                            .cut = rl->cut,
                                                            .rejected = rl->rejected,
                                                            .entropy = rl->entropy,
                                                            .versions = measure_versions(rl, iteration)};
    rl->rollouts = (mt_rollouts){0}, rl->routes = (mt_routes){0};
}

/* The first pending batch becomes the batch at hand. */
static void pop_batch(mt_rl *rl, int64_t iteration) {
    mt_waiting *w = &rl->waiting;
    mt_pending b = w->batches[0];
    mt_rollouts_free(&rl->rollouts), free(rl->routes.experts);
    memmove(w->batches, w->batches + 1, (size_t)--w->count * sizeof b);
    rl->rollouts = b.rollouts, rl->routes = b.routes, rl->rounds = b.rounds, rl->mismatch = b.mismatch;
    rl->generation_gap = b.generation_gap, rl->cut = b.cut, rl->rejected = b.rejected, rl->entropy = b.entropy;
    rl->staleness = (double)iteration - b.versions.mean, rl->most_staleness = iteration - b.versions.oldest;
    rl->continued = b.versions.continued;
}

int mt_rl_write(const mt_rl *rl, const char *folder, mt_error *error) {
    if (!rl->saved_waiting) return 0;
    char *path = mt_path_join(folder, MT_PENDING_FILE);
    int status = mt_file_write(path, rl->saved_waiting, rl->saved_bytes, "--save", error);
    free(path);
    return status;
}

int mt_rl_open(mt_rl **out, const mt_rl_config *config, mt_model *actor, const mt_model_plan *plan, mt_run_state *state,
               mt_error *error) {
    mt_rl *rl = mt_calloc(sizeof *rl);
    rl->config = *config, rl->prompts = config->prompts;
    mt_model_role_lend(&rl->actor, "actor", config->options, actor);
    mt_report_role(&rl->actor, config->log);
    configure_rollouts(rl);
    const mt_run_options *o = config->options;
    rl->quotas = mt_calloc((o->prompt_shares.count + 1) * 8);
    bool on_cpu = config->ops == &mt_cpu_ops;
    const char *of_cpu = o->bitwise_rollouts                                 ? "--bitwise-rollouts"
                         : o->router_replay != MT_ROUTER_REPLAY_DISABLED     ? "--router-replay"
                         : o->adv_estimator == MT_ADV_OPTIMAL_TOKEN_BASELINE ? "--adv-estimator optimal_token_baseline"
                                                                             : NULL;
    mt_cpu_batch_invariant(o->bitwise_rollouts);
    int status = 0;
    if (of_cpu && !on_cpu)
        status = mt_error_set(error, "%s is for the CPU: give --device cpu, or correct the difference by --rollout-is",
                              of_cpu);
    if (status == 0) status = mt_prompt_quotas(rl->quotas, &o->prompt_shares, o->rollout_batch_size, error);
    if (status == 0) status = open_pictures(rl, error);
    if (status == 0) status = check_prompts(rl, state, error);
    if (status == 0) status = find_stops(rl, &rl->stops, error);
    if (status == 0) status = mt_model_role_use(&rl->actor, MT_USE_NOTHING, error); // room for the others
    if (status == 0) status = open_reference(rl, plan, state, error);
    if (status == 0) status = mt_model_role_use(&rl->reference.role, MT_USE_NOTHING, error);
    if (status == 0) status = open_critic(rl, plan, state, error);
    if (status == 0) status = mt_model_role_use(&rl->critic.role, MT_USE_NOTHING, error);
    if (status == 0) status = open_reward(rl, plan, error);
    if (status == 0) status = mt_model_role_use(&rl->reward_model.role, MT_USE_NOTHING, error);
    if (status == 0) status = open_teachers(rl, plan, state, error);
    if (status == 0) status = open_generator(rl, plan, error);
    if (status == 0) status = mt_agree(&config->grid->world, load_waiting(rl, state, error) != 0, error);
    if (status == 0) status = mt_model_role_use(&rl->actor, MT_USE_TRAINING, error);
    *out = status == 0 ? rl : NULL;
    if (status != 0) mt_rl_close(rl);
    return status;
}

/* Frees the teacher's labels of micro-batches, and makes room for those of `count`. */
static void begin_teacher_batches(teacher_topk *topk, int64_t count) {
    for (int64_t i = 0; i < topk->num_batches; i++)
        free(topk->batches[i].tokens), free(topk->batches[i].ids), free(topk->batches[i].logits);
    free(topk->batches);
    topk->batches = count > 0 ? mt_calloc(count * (int64_t)sizeof *topk->batches) : NULL;
    topk->num_batches = count;
}

static void close_partner(partner *p) {
    mt_run_options options = p->role.options;
    mt_model_role_close(&p->role);
    if (p->owns_options) mt_options_free(&options);
    free(p->folder);
}

void mt_rl_close(mt_rl *rl) {
    if (!rl) return;
    mt_saver_close(rl->critic_saver), mt_saver_close(rl->teacher_saver);
    mt_step_plan_free(&rl->plan);
    free(rl->critic_folder), free(rl->teacher_folder);
    for (int i = 0; i < MT_MAX_INTS; i++) mt_reward_close(rl->rewards[i]);
    mt_environment_close(rl->environment);
    mt_transfer_close(rl->transfer), mt_transfer_close(rl->renewal);
    mt_model_role_close(&rl->generator);
    for (int64_t i = 0; i < rl->num_teachers; i++) close_partner(&rl->teachers[i]);
    free(rl->teachers);
    close_partner(&rl->reward_model), close_partner(&rl->critic), close_partner(&rl->reference);
    mt_rollouts_free(&rl->rollouts);
    free(rl->generated), free(rl->versions), free(rl->old_logps), free(rl->routes.experts);
    begin_teacher_batches(&rl->topk, 0);
    free(rl->topk.ids), free(rl->topk.logps);
    mt_waiting_clear(&rl->waiting);
    free(rl->written_prompts);
    free(rl->waiting.batches), free(rl->saved_waiting);
    for (int64_t i = 0; i < rl->prompts.count && rl->pictures; i++) mt_text_images_close(rl->pictures[i]);
    free(rl->pictures);
    mt_samples_free(&rl->prompts);
    free(rl->quotas);
    free(rl);
}

static int collect_written(mt_rl *rl, mt_error *error);

/* The numbers that each role that trains has of its own. */
static void take_trained(mt_run_state *to, const mt_run_state *from) {
    to->optimizer_step = from->optimizer_step, to->loss_scaler = from->loss_scaler;
    to->skipped_samples = from->skipped_samples, to->skipped_iterations = from->skipped_iterations;
}

/* Saves a role whose parts `parts` are needed, while the actor rests. */
static int save_role(mt_rl *rl, mt_model_role *role, mt_saver *saver, unsigned parts, const mt_run_state *state,
                     mt_error *error) {
    if (mt_model_role_use(&rl->actor, MT_USE_NOTHING, error) != 0 || mt_model_role_use(role, parts, error) != 0)
        return -1;
    if (mt_saver_save(saver, state, error) != 0) return -1;
    if (mt_model_role_use(role, MT_USE_NOTHING, error) != 0) return -1;
    return mt_model_role_use(&rl->actor, MT_USE_TRAINING, error);
}

int mt_rl_save(mt_rl *rl, const mt_run_state *state, mt_error *error) {
    mt_model_role *critic = &rl->critic.role;
    mt_run_state own = *state;
    if (collect_written(rl, error) != 0) return -1;
    bool waits = rl->config.options->rollout_lag > 0 || is_partial(rl->config.options);
    if (waits && rl->config.grid->world.rank == 0) {
        free(rl->saved_waiting);
        rl->saved_waiting = mt_waiting_write(&rl->waiting, routes_row(rl), &rl->saved_bytes);
    }
    if (rl->teacher_saver) {
        if (mt_train_finish(rl->actor.model, error) != 0) return -1;
        if (save_role(rl, &rl->teachers[0].role, rl->teacher_saver, MT_USE_SCORING, state, error) != 0) return -1;
    }
    if (!rl->critic_saver) return 0;
    take_trained(&own, &rl->critic_state);
    if (mt_train_finish(critic->model, error) != 0) return -1;
    return save_role(rl, critic, rl->critic_saver, MT_USE_TRAINING, &own, error);
}

int mt_rl_finish(mt_rl *rl, mt_error *error) {
    int status = mt_saver_finish(rl->teacher_saver, error);
    return mt_saver_finish(rl->critic_saver, error) != 0 ? -1 : status;
}

/* ---- generation and rewards */

/* Adds the seconds since *then, which becomes now, to a phase. */
static void lap(mt_rl *rl, int phase, double *then) {
    double now = mt_time();
    rl->times.seconds[phase] += now - *then;
    *then = now;
}

static mt_sampling sampling_of(const mt_run_options *o) {
    int64_t columns = o->stack.padded_vocab_size / o->stack.tensor_model_parallel_size; // of a rank
    return (mt_sampling){.temperature = o->stack.temperature,
                         .top_p = o->top_p,
                         .top_k = o->top_k,
                         .min_p = o->min_p,
                         .repetition_penalty = o->repetition_penalty,
                         .seed = (uint64_t)o->stack.seed,
                         .logprobs = true,
                         .logp_scale = (float)(1 / o->stack.temperature), // as in training
                         .training_columns = o->bitwise_rollouts ? columns : 0};
}

/* Takes a response and its log-probabilities; `tokens` come before it. */
static void take_response(mt_rl *rl, int64_t s, mt_sequence *q, int64_t tokens) {
    int64_t written = q->num_tokens - q->num_prompt;
    mt_rollouts_set(&rl->rollouts, s, q->tokens + q->num_prompt, written, q->finish == MT_FINISH_LENGTH);
    memcpy(rl->generated + tokens, q->logps, (size_t)written * 4);
    rl->rollouts.routes[s] = q->routes, q->routes = NULL;
}

/* The model that writes responses. */
static mt_model_role *generator_of(mt_rl *rl) {
    return rl->transfer ? &rl->generator : &rl->actor;
}

/* Gives a generator apart the actor's present weights; parts of the actor rest. */
static int prepare_generator(mt_rl *rl, mt_error *error) {
    mt_model_role *actor = &rl->actor, *generator = &rl->generator;
    if (!rl->transfer) return mt_model_role_use(actor, MT_USE_GENERATION, error);
    if (mt_train_finish(actor->model, error) != 0) return -1;
    if (mt_model_role_use(actor, MT_USE_NOTHING, error) != 0) return -1;
    if (mt_model_role_use(generator, MT_USE_GENERATION, error) != 0) return -1;
    mt_transfer_run(rl->transfer);
    generator->ops->stream_synchronize(mt_model_stream(generator->model));
    return 0;
}

/* Texts to continue. */
typedef struct texts {
    const int32_t **tokens;            // [count]
    int64_t *lengths;                  // [count]
    const mt_sequence_images **images; // [count] of each, or NULL; NULL: none has any
    int64_t count, each;               // continuations of each
    int64_t first_id;                  // of the continuations
    bool greedy;                       // the most probable tokens
    const int64_t *ids, *limits;       // mt_rollout's; NULL: none
} texts;

/* Generates sequences[count, each]. Returns MT_RL_STOPPED if a signal requests a stop. */
static int write_responses(mt_rl *rl, const texts *t, mt_sequence *sequences, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_rollout rollout = {.num_return_sequences = t->each,
                          .max_new_tokens = o->max_new_tokens,
                          .first_id = t->first_id,
                          .ids = t->ids,
                          .limits = t->limits,
                          .images = t->images,
                          .sampling = sampling_of(o),
                          .stops = rl->stops,
                          .is_stopped = mt_stop_requested,
                          .drafts = rl->drafts,
                          .keeps_routes = !t->greedy && o->router_replay == MT_ROUTER_REPLAY_R3};
    mt_responses responses = mt_responses_open(rl->config.tokenizer, &o->stop, t->first_id, t->count * t->each);
    if (t->greedy) rollout.sampling.temperature = 0;
    if (o->stop.count > 0) rollout.stops.ends_text = mt_responses_end, rollout.stops.context = &responses;
    int status =
        mt_rollout_generate(generator_of(rl)->model, &rollout, t->tokens, t->lengths, t->count, sequences, error);
    mt_responses_close(&responses);
    return status == MT_GENERATION_STOPPED ? MT_RL_STOPPED : status;
}

/* ---- conversations with the environment */

/* A conversation: what follows the prompt. */
typedef struct talk {
    mt_ids tokens;
    uint8_t *is_written; // [tokens.count]: by the model
    float *logps;        // [tokens.count]: the generator's; 0 of others
    float *routes;       // of the first num_routes positions, as first computed; NULL: not kept
    int64_t num_routes;
    mt_turns turns; // without is_written
    bool overlong;  // the tokens ended before the conversation
    bool goes_on;
} talk;

static void push_tokens(talk *t, const int32_t *tokens, const float *logps, int64_t count) {
    int64_t before = t->tokens.count, after = before + count;
    t->is_written = mt_realloc(t->is_written, mt_max(after, 1));
    t->logps = mt_realloc(t->logps, mt_max(after, 1) * 4);
    for (int64_t i = 0; i < count; i++) {
        mt_ids_push(&t->tokens, tokens[i]);
        t->is_written[before + i] = logps != NULL, t->logps[before + i] = logps ? logps[i] : 0;
    }
}

/* Takes the model's next response, and ends its sequence. A response that ends with another token than the template's
 * is the last one. */
static void take_turn(const mt_rl *rl, talk *t, mt_sequence *q) {
    int64_t width = mt_routes_size(&rl->config.options->stack, 1), rows = q->num_tokens - 1;
    t->turns.last = t->tokens.count, t->turns.count++;
    push_tokens(t, q->tokens + q->num_prompt, q->logps, q->num_tokens - q->num_prompt);
    t->overlong = q->finish == MT_FINISH_LENGTH;
    t->goes_on = !t->overlong && q->tokens[q->num_tokens - 1] == rl->end;
    if (q->routes) {
        t->routes = mt_realloc(t->routes, mt_max(rows * width, 1) * 4);
        memcpy(t->routes + t->num_routes * width, q->routes + t->num_routes * width,
               (size_t)((rows - t->num_routes) * width) * 4);
        t->num_routes = rows;
    }
    mt_sequence_end(q);
}

static void free_talks(talk *talks, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        free(talks[i].tokens.data), free(talks[i].is_written), free(talks[i].logps), free(talks[i].routes);
    free(talks);
}

/* Rank 0 asks the environment about the last responses of conversations active[count]; all ranks get the rewards and
 * the tokens that follow. Sets goes_on. MT_RL_STOPPED, or MT_RL_UNREWARDED if the environment failed. */
static int answer_turns(mt_rl *rl, talk *talks, const int64_t *active, int64_t count, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const mt_group *world = &rl->config.grid->world;
    mt_env_turn *turns = mt_calloc(count * (int64_t)sizeof *turns);
    int64_t *lengths = mt_calloc(count * 8), total = 0;
    double *rewards = mt_calloc(count * 8);
    for (int64_t k = 0; k < count; k++) {
        const talk *t = &talks[active[k]];
        turns[k] = (mt_env_turn){.conversation = active[k],
                                 .tokens = t->tokens.data + t->turns.last,
                                 .count = t->tokens.count - t->turns.last,
                                 .turns_left = t->goes_on ? o->env_max_turns - t->turns.count : 0};
    }
    int status = world->rank == 0 ? mt_environment_step(rl->environment, turns, count, error) : 0;
    mt_broadcast(world, &status, sizeof status, 0);
    if (status == MT_ENVIRONMENT_STOPPED)
        status = MT_RL_STOPPED;
    else if (mt_agree(world, status != 0, error) != 0)
        status = MT_RL_UNREWARDED;
    if (status == 0) {
        for (int64_t k = 0; k < count; k++) lengths[k] = turns[k].next.count, rewards[k] = turns[k].reward;
        mt_broadcast(world, lengths, count * 8, 0);
        mt_broadcast(world, rewards, count * 8, 0);
        for (int64_t k = 0; k < count; k++) total += lengths[k];
        int32_t *next = mt_malloc(mt_max(total, 1) * 4), *at = next;
        for (int64_t k = 0; k < count && world->rank == 0; at += lengths[k++])
            if (lengths[k] > 0) memcpy(at, turns[k].next.data, (size_t)lengths[k] * 4);
        mt_broadcast(world, next, total * 4, 0);
        at = next;
        for (int64_t k = 0; k < count; at += lengths[k++]) {
            talk *t = &talks[active[k]];
            bool fits = t->tokens.count + lengths[k] < o->max_new_tokens;
            t->turns.reward += rewards[k];
            t->goes_on = lengths[k] > 0 && fits;
            t->overlong |= lengths[k] > 0 && !fits;
            if (t->goes_on) push_tokens(t, at, NULL, lengths[k]);
        }
        free(next);
    }
    for (int64_t k = 0; k < count; k++) free(turns[k].next.data);
    free(turns), free(lengths), free(rewards);
    return status;
}

/* The next responses of conversations active[count], whose prompts are prompts[] and whose first id is first_id. The
 * draws of a conversation depend on its id and the token's position, as without turns. */
static int write_turns(mt_rl *rl, talk *talks, const int64_t *active, int64_t count, const texts *prompts,
                       mt_error *error) {
    int64_t *ids = mt_malloc(count * 8), *limits = mt_malloc(count * 8), *lengths = mt_malloc(count * 8);
    int32_t **tokens = mt_malloc(count * (int64_t)sizeof *tokens);
    mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
    for (int64_t k = 0; k < count; k++) {
        const talk *t = &talks[active[k]];
        int64_t prompt = active[k] / prompts->each, first = prompts->lengths[prompt];
        ids[k] = prompts->first_id + active[k];
        limits[k] = rl->config.options->max_new_tokens - t->tokens.count;
        lengths[k] = first + t->tokens.count;
        tokens[k] = mt_malloc(lengths[k] * 4);
        memcpy(tokens[k], prompts->tokens[prompt], (size_t)first * 4);
        memcpy(tokens[k] + first, t->tokens.data, (size_t)t->tokens.count * 4);
    }
    const texts whole = {.tokens = (const int32_t **)tokens,
                         .lengths = lengths,
                         .count = count,
                         .each = 1,
                         .first_id = prompts->first_id,
                         .ids = ids,
                         .limits = limits};
    int status = write_responses(rl, &whole, sequences, error);
    for (int64_t k = 0; k < count && status == 0; k++) take_turn(rl, &talks[active[k]], &sequences[k]);
    for (int64_t k = 0; k < count; k++) free(tokens[k]);
    free(ids), free(limits), free(lengths), free(tokens), free(sequences);
    return status;
}

/* Holds the conversations that began with sequences[count, each] of the prompts to their ends. */
static int converse(mt_rl *rl, talk *talks, mt_sequence *sequences, const texts *prompts, const int64_t *order,
                    mt_error *error) {
    int64_t all = prompts->count * prompts->each, count = all, status = 0, *active = mt_malloc(all * 8);
    const mt_question **questions = mt_malloc(all * (int64_t)sizeof *questions);
    for (int64_t i = 0; i < all; i++) {
        take_turn(rl, &talks[i], &sequences[i]);
        active[i] = i, questions[i] = &rl->prompts.questions[order[i / prompts->each]];
    }
    if (rl->environment) mt_environment_begin(rl->environment, prompts->first_id, questions, all);
    while (count > 0 && status == 0) {
        int64_t going = 0;
        status = answer_turns(rl, talks, active, count, error);
        for (int64_t k = 0; k < count && status == 0; k++)
            if (talks[active[k]].goes_on) active[going++] = active[k];
        count = going;
        if (status == 0 && count > 0) status = write_turns(rl, talks, active, count, prompts, error);
    }
    free(active), free(questions);
    return (int)status;
}

/* Takes a conversation as response s; `tokens` come before it. */
static void take_talk(mt_rl *rl, int64_t s, talk *t, int64_t tokens) {
    mt_turns turns = t->turns;
    mt_rollouts_set(&rl->rollouts, s, t->tokens.data, t->tokens.count, t->overlong);
    memcpy(rl->generated + tokens, t->logps, (size_t)t->tokens.count * 4);
    turns.is_written = t->is_written, t->is_written = NULL;
    mt_rollouts_set_turns(&rl->rollouts, s, turns);
    rl->rollouts.routes[s] = t->routes, t->routes = NULL;
}

/* order[prompts]: the prompts at positions `position` and following of the run. */
static void order_prompts(const mt_rl *rl, int64_t position, int64_t prompts, int64_t *order) {
    const mt_run_options *o = rl->config.options;
    if (o->prompt_shares.count > 0)
        mt_prompts_order_shares(&rl->prompts, rl->quotas, o->prompt_shares.count, o->shuffle_prompts,
                                mt_options_data_seed(o), position, prompts, order);
    else
        mt_prompts_order(rl->prompts.count, o->shuffle_prompts, mt_options_data_seed(o), position, prompts, order);
}

/* Responses to the next `prompts` prompts of the run, which has used `position` prompts before. With remax, a greedy
 * one follows those of each prompt. */
static int generate(mt_rl *rl, int64_t position, int64_t prompts, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_rollouts *r = &rl->rollouts;
    bool has_baselines = o->adv_estimator == MT_ADV_REMAX;
    int64_t each = o->num_return_sequences, group = each + has_baselines, count = prompts * each, first = r->count;
    int64_t tokens = 0, more = 0, written = 0;
    int64_t *order = mt_malloc(prompts * 8);
    texts own = {.count = prompts, .each = each, .first_id = position * each};
    own.tokens = mt_malloc(prompts * (int64_t)sizeof *own.tokens), own.lengths = mt_malloc(prompts * 8);
    own.images = rl->pictures ? mt_malloc(prompts * (int64_t)sizeof *own.images) : NULL;
    talk *talks = o->env_command ? mt_calloc(count * (int64_t)sizeof *talks) : NULL;
    mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
    mt_sequence *greedy = mt_calloc(prompts * (int64_t)sizeof *greedy);
    order_prompts(rl, position, prompts, order);
    for (int64_t i = 0; i < prompts; i++) {
        own.tokens[i] = rl->prompts.tokens + rl->prompts.offsets[order[i]];
        own.lengths[i] = rl->prompts.offsets[order[i] + 1] - rl->prompts.offsets[order[i]];
        if (rl->pictures) own.images[i] = mt_text_images_list(rl->pictures[order[i]]);
    }
    mt_model_role *generator = generator_of(rl);
    int status = mt_model_role_use(generator, MT_USE_GENERATION, error);
    if (status == 0) status = write_responses(rl, &own, sequences, error);
    if (status == 0 && talks) status = converse(rl, talks, sequences, &own, order, error);
    if (status == 0 && has_baselines) {
        texts baselines = own;
        baselines.each = 1, baselines.first_id = position, baselines.greedy = true;
        status = write_responses(rl, &baselines, greedy, error);
        for (int64_t i = 0; i < count && status != 0; i++) mt_sequence_end(&sequences[i]);
    }
    if (status == 0) {
        if (first == 0) {
            mt_rollouts_begin(r, &rl->prompts, order, prompts, group);
            r->has_baselines = has_baselines;
        } else
            mt_rollouts_extend(r, order, prompts);
        for (int64_t s = 0; s < first; s++) tokens += r->response_tokens[s];
        for (int64_t i = 0; i < count && !talks; i++) more += sequences[i].num_tokens - sequences[i].num_prompt;
        for (int64_t i = 0; i < prompts && has_baselines; i++) more += greedy[i].num_tokens - greedy[i].num_prompt;
        written = more;
        for (int64_t i = 0; i < count && talks; i++) {
            more += talks[i].tokens.count;
            for (int64_t k = 0; k < talks[i].tokens.count; k++) written += talks[i].is_written[k];
        }
        rl->generated = mt_realloc(rl->generated, mt_max(tokens + more, 1) * 4);
        for (int64_t s = 0; s < prompts * group; s++) {
            mt_sequence *q = s % group < each ? &sequences[s / group * each + s % group] : &greedy[s / group];
            if (talks)
                take_talk(rl, first + s, &talks[s], tokens);
            else
                take_response(rl, first + s, q, tokens);
            tokens += r->response_tokens[first + s];
            mt_sequence_end(q);
        }
        rl->times.tokens[GENERATION] += (double)written;
    }
    if (talks) free_talks(talks, count);
    free(order), free(own.lengths), free(own.tokens), free(own.images), free(sequences), free(greedy);
    return status >= 0 && mt_model_role_use(generator, MT_USE_NOTHING, error) != 0 ? -1 : status;
}

/* ---- responses of several iterations */

/* Copies the routes of further positions of a sequence. */
static void take_routes(const mt_rl *rl, mt_partial *r, const mt_sequence *q) {
    int64_t width = mt_routes_size(&rl->config.options->stack, 1), rows = q->num_tokens - 1;
    r->routes = mt_realloc(r->routes, mt_max(rows * width, 1) * 4);
    float *next = r->routes + r->num_routes * width;
    int64_t elements = (rows - r->num_routes) * width;
    memcpy(next, q->routes + r->num_routes * width, (size_t)elements * 4);
    mt_all_reduce_max(&rl->config.grid->world, next, elements, MT_F32); // a rank has those of its layers and texts
    r->num_routes = rows;
}

/* A phase: every unfinished response grows by at most --max-new-tokens / --partial-rollout-max-split tokens, which
 * weights of `version` write. Its draws depend on its id and the token's position, as if it was written at once. */
static int continue_partials(mt_rl *rl, int64_t version, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_partials *p = &rl->waiting.partials;
    int64_t count = mt_partials_unfinished(p), most = mt_divide_up(o->max_new_tokens, o->partial_rollout_max_split);
    int64_t *ids = mt_malloc(count * 8), *limits = mt_malloc(count * 8), *lengths = mt_malloc(count * 8), k = 0;
    int32_t **tokens = mt_malloc(count * (int64_t)sizeof *tokens);
    const mt_sequence_images **images = rl->pictures ? mt_malloc(count * (int64_t)sizeof *images) : NULL;
    mt_partial **responses = mt_malloc(count * (int64_t)sizeof *responses);
    mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
    for (int64_t i = 0; i < p->count * p->each; i++) {
        const mt_partial_group *group = &p->groups[i / p->each];
        mt_partial *r = &group->responses[i % p->each];
        if (r->ended) continue;
        int64_t first = rl->prompts.offsets[group->prompt], prompt = rl->prompts.offsets[group->prompt + 1] - first;
        ids[k] = group->position * p->each + i % p->each, limits[k] = mt_min(most, o->max_new_tokens - r->count);
        lengths[k] = prompt + r->count, tokens[k] = mt_malloc(lengths[k] * 4);
        memcpy(tokens[k], rl->prompts.tokens + first, (size_t)prompt * 4);
        if (r->count > 0) memcpy(tokens[k] + prompt, r->tokens, (size_t)r->count * 4);
        if (images) images[k] = mt_text_images_list(rl->pictures[group->prompt]);
        responses[k++] = r;
    }
    const texts t = {.tokens = (const int32_t **)tokens,
                     .lengths = lengths,
                     .images = images,
                     .count = count,
                     .each = 1,
                     .ids = ids,
                     .limits = limits};
    int status = write_responses(rl, &t, sequences, error);
    for (k = 0; k < count && status == 0; k++) {
        mt_sequence *q = &sequences[k];
        mt_partial *r = responses[k];
        int64_t written = q->num_tokens - q->num_prompt;
        mt_partial_append(r, q->tokens + q->num_prompt, q->logps, written, version);
        if (q->routes) take_routes(rl, r, q);
        r->overlong = q->finish == MT_FINISH_LENGTH && r->count == o->max_new_tokens;
        r->ended = q->finish == MT_FINISH_STOP || r->overlong;
        rl->times.tokens[GENERATION] += (double)written;
        mt_sequence_end(q);
    }
    for (k = 0; k < count; k++) free(tokens[k]);
    free(ids), free(limits), free(lengths), free(tokens), free(images), free(responses), free(sequences);
    return status;
}

/* Adds the responses to groups[prompts], which have ended, to the rollouts, and frees the groups. */
static void take_groups(mt_rl *rl, mt_partial_group *groups, int64_t prompts) {
    mt_rollouts *r = &rl->rollouts;
    int64_t each = rl->waiting.partials.each, first = r->count, tokens = 0, more = 0;
    int64_t *order = mt_malloc(prompts * 8);
    for (int64_t g = 0; g < prompts; g++) {
        order[g] = groups[g].prompt;
        for (int64_t i = 0; i < each; i++) more += groups[g].responses[i].count;
    }
    if (first == 0)
        mt_rollouts_begin(r, &rl->prompts, order, prompts, each);
    else
        mt_rollouts_extend(r, order, prompts);
    for (int64_t s = 0; s < first; s++) tokens += r->response_tokens[s];
    rl->generated = mt_realloc(rl->generated, (tokens + more) * 4);
    rl->versions = mt_realloc(rl->versions, (tokens + more) * 8);
    rl->old_logps = mt_realloc(rl->old_logps, (tokens + more) * 8);
    for (int64_t s = 0; s < prompts * each; s++) {
        mt_partial *p = &groups[s / each].responses[s % each];
        mt_rollouts_set(r, first + s, p->tokens, p->count, p->overlong);
        memcpy(rl->generated + tokens, p->logps, (size_t)p->count * 4);
        memcpy(rl->versions + tokens, p->versions, (size_t)p->count * 8);
        for (int64_t i = 0; i < p->count; i++) rl->old_logps[tokens + i] = i < p->num_scored ? p->old_logps[i] : NAN;
        r->routes[first + s] = p->routes, p->routes = NULL;
        tokens += p->count;
    }
    for (int64_t g = 0; g < prompts; g++) mt_partial_group_free(&groups[g], each);
    free(order);
}

/* Responses to `prompts` prompts, the oldest in progress that end first. Others begin, so that up to
 * --over-sampling-batch-size - --rollout-batch-size remain in progress; the run has begun `position` prompts before. A
 * batch that was wanted --max-head-offpolicyness - --rollout-lag iterations ago is waited for. */
static int generate_partly(mt_rl *rl, int64_t position, int64_t prompts, int64_t version, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_partials *p = &rl->waiting.partials;
    int64_t batch = version + rl->waiting.count, most_age = o->max_head_offpolicyness - o->rollout_lag;
    int64_t begun = mt_max(prompts + o->over_sampling_batch_size - o->rollout_batch_size - p->count, 0);
    int64_t *order = mt_malloc(mt_max(begun, 1) * 8);
    order_prompts(rl, position, begun, order);
    for (int64_t i = 0; i < begun; i++) mt_partials_begin(p, position + i, order[i], batch);
    free(order);
    mt_model_role *generator = generator_of(rl);
    int status = mt_model_role_use(generator, MT_USE_GENERATION, error);
    while (status == 0 && !mt_partials_suffice(p, prompts, batch, most_age))
        status = continue_partials(rl, version, error), rl->phases++;
    if (status == 0) {
        mt_partial_group *taken = mt_malloc(prompts * (int64_t)sizeof *taken);
        mt_partials_take(p, prompts, taken);
        take_groups(rl, taken, prompts);
        free(taken);
    }
    return status >= 0 && mt_model_role_use(generator, MT_USE_NOTHING, error) != 0 ? -1 : status;
}

/* ---- micro-batches */

static void plan_batches(mt_rl *rl, const int64_t *sequences, int64_t count, const mt_plan_shape *shape) {
    mt_step_plan_free(&rl->plan);
    mt_rollouts_plan(&rl->plan, &rl->rollouts, sequences, count, rl->config.options->sequence_packing, shape);
}

/* The source of scoring: a planned micro-batch of any data-parallel rank. */
static int fill_batch_of(void *context, int64_t slot, int64_t rank, mt_batch *batch, mt_error *error) {
    const mt_rl *rl = context;
    if (mt_step_plan_fill(&rl->plan, slot, rank, &rl->rollouts.samples, 0, batch, error) != 0) return -1;
    mt_rollouts_load(&rl->rollouts, batch);
    return 0;
}

/* The teacher's labels of micro-batch `index`, and behind them its own. */
static mt_teacher_logits *teacher_of_batch(mt_rl *rl, int64_t index, const mt_batch *batch) {
    const teacher_topk *topk = &rl->topk;
    mt_teacher_logits *t = &topk->batches[index];
    int64_t K = topk->K, rows = mt_max(batch->num_tokens, 1), position;
    if (t->tokens) return t; // another chunk of the pipeline has it
    *t = (mt_teacher_logits){.K = K + 1, .of_whole = true};
    t->tokens = mt_malloc(rows * 4), t->ids = mt_malloc(rows * (K + 1) * 4), t->logits = mt_calloc(rows * (K + 1) * 4);
    for (int64_t i = 0; i < batch->num_tokens; i++) {
        if ((position = mt_rollouts_position(&rl->rollouts, batch, i)) < 0) continue;
        int32_t *ids = t->ids + t->count * (K + 1);
        t->tokens[t->count] = (int32_t)i, ids[K] = batch->labels[i];
        for (int64_t k = 0; k < K; k++) {
            ids[k] = (int32_t)topk->ids[position * K + k];
            if (ids[k] == batch->labels[i]) ids[K] = -1;
        }
        memcpy(t->logits + t->count++ * (K + 1), topk->logps + position * K, (size_t)K * 4);
    }
    return t;
}

/* The source of training: a micro-batch of this rank in the grid of the role that trains. */
typedef struct learner {
    mt_rl *rl;
    const mt_model_role *role;
} learner;

static int fill_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const learner *l = context;
    const mt_group *pipeline = &l->role->grid->pipeline;
    bool is_taught = l->role == &l->rl->actor && l->rl->topk.K > 0 && pipeline->rank == pipeline->size - 1;
    if (fill_batch_of(l->rl, index, l->role->grid->data.rank, batch, error) != 0) return -1;
    batch->teacher = is_taught ? teacher_of_batch(l->rl, index, batch) : NULL;
    return 0;
}

/* The numbers that a role computes of all sequences. */
typedef struct scoring {
    mt_rollouts *rollouts;
    mt_loss_input input;
    const mt_grid *grid;
    double entropy;     // summed over the tokens that count
    bool squares;       // the sink gets sums of squared probabilities in its place
    teacher_topk *topk; // of store_topk, as the next two
    mt_model *model;
    const mt_options *options; // of the model
} scoring;

/* The sink of scoring, on the ranks with the loss: one of each replica keeps the numbers. */
static void store(void *context, int64_t micro_batch, const mt_batch *batch, const double *numbers,
                  const double *entropy) {
    scoring *s = context;
    (void)micro_batch;
    if (s->grid->tensor.rank > 0 || s->grid->context.rank > 0) return;
    mt_rollouts_store(s->rollouts, s->input, batch, numbers);
    if (s->squares) mt_rollouts_store_squares(s->rollouts, batch, entropy);
    for (int64_t t = 0; t < batch->num_tokens && entropy; t++) s->entropy += batch->loss_mask[t] != 0 ? entropy[t] : 0;
}

/* The sink of a teacher with forward_kl_topk; the ranks of a tensor group come together, those of a context group have
 * different tokens. */
static void store_topk(void *context, int64_t micro_batch, const mt_batch *batch, const double *numbers,
                       const double *entropy) {
    const scoring *s = context;
    int64_t V = s->options->vocab_size, K = s->topk->K, of_batch;
    double scale = 1 / s->options->temperature;
    float *logits = mt_malloc(V * 4);
    int32_t *ids = mt_malloc(K * 4);
    (void)micro_batch, (void)numbers, (void)entropy;
    for (int64_t t = 0; (of_batch = mt_score_logits(s->model, t, NULL)) >= 0; t++) {
        int64_t position = mt_rollouts_position(s->rollouts, batch, of_batch);
        if (position < 0) continue;
        (void)mt_score_logits(s->model, t, logits);
        if (s->grid->tensor.rank > 0) continue;
        float *logps = s->topk->logps + position * K;
        double greatest = -INFINITY, sum = 0;
        mt_take_greatest(ids, logps, logits, V, K);
        for (int64_t i = 0; i < V; i++) greatest = fmax(greatest, (double)logits[i]);
        for (int64_t i = 0; i < V; i++) sum += exp(scale * ((double)logits[i] - greatest));
        for (int64_t k = 0; k < K; k++) {
            s->topk->ids[position * K + k] = (float)ids[k];
            logps[k] = (float)(scale * ((double)logps[k] - greatest) - log(sum));
        }
    }
    free(logits), free(ids);
}

static int64_t *all_sequences(const mt_rl *rl) {
    int64_t *sequences = mt_malloc(mt_max(rl->rollouts.samples.count, 1) * 8);
    for (int64_t i = 0; i < rl->rollouts.samples.count; i++) sequences[i] = i;
    return sequences;
}

/* Tokens of the sequences. */
static double sequence_tokens(const mt_rl *rl) {
    return (double)rl->rollouts.samples.offsets[rl->rollouts.samples.count];
}

/* The planned micro-batches, whose scores s receives. */
static mt_model_role_scoring planned_scoring(mt_rl *rl, mt_batch *batch, scoring *s) {
    return (mt_model_role_scoring){.slots = rl->plan.num_slots,
                                   .ranks = rl->plan.num_ranks,
                                   .source = fill_batch_of,
                                   .context = rl,
                                   .batch = batch,
                                   .sink = store,
                                   .sink_context = s};
}

/* Scores sequences[count] by a teacher, which one rank of each replica stores: its log-probabilities, or those of its
 * most probable labels. */
static int score_by_teacher(mt_rl *rl, mt_model_role *role, const int64_t *sequences, int64_t count, mt_batch *batch,
                            mt_error *error) {
    scoring s = {.rollouts = &rl->rollouts, .input = MT_TEACHER_LOGP, .grid = role->grid, .topk = &rl->topk};
    const int64_t *offsets = rl->rollouts.samples.offsets;
    s.model = role->model, s.options = &role->options.stack;
    for (int64_t i = 0; i < count; i++)
        rl->times.tokens[SCORING] += (double)(offsets[sequences[i] + 1] - offsets[sequences[i]]);
    plan_batches(rl, sequences, count, &rl->shape);
    mt_model_role_scoring planned = planned_scoring(rl, batch, &s);
    if (rl->topk.K > 0) planned.sink = store_topk;
    return mt_model_role_score(role, &planned, error);
}

/* Makes the table of the teacher's labels. */
static void begin_topk(mt_rl *rl) {
    int64_t numbers = mt_max(rl->rollouts.T * rl->topk.K, 1);
    free(rl->topk.ids), free(rl->topk.logps);
    rl->topk.ids = mt_calloc(numbers * 4), rl->topk.logps = mt_calloc(numbers * 4);
}

/* Every rank gets the labels that some rank has. */
static void share_topk(mt_rl *rl) {
    const mt_rollouts *r = &rl->rollouts;
    teacher_topk *topk = &rl->topk;
    mt_all_reduce_sum(&rl->config.grid->world, topk->ids, r->T * topk->K, MT_F32);
    mt_all_reduce_sum(&rl->config.grid->world, topk->logps, r->T * topk->K, MT_F32);
    topk->mass = 0;
    for (int64_t t = 0; t < r->T; t++)
        for (int64_t k = 0; k < topk->K && r->mask[t] != 0; k++)
            topk->mass += exp((double)topk->logps[t * topk->K + k]);
    topk->mass /= (double)mt_max(mt_rollouts_count(r), 1);
}

/* The log-probabilities of each sequence by the teacher of its prompt. Plans other micro-batches. */
static int score_by_teachers(mt_rl *rl, mt_batch *batch, mt_error *error) {
    mt_rollouts *r = &rl->rollouts;
    int status = 0;
    bool topk = rl->topk.K > 0;
    if (rl->config.options->distillation_in == MT_DISTILL_IN_NONE) return 0;
    if (topk) begin_topk(rl);
    if (rl->num_teachers == 0 && topk) {
        int64_t *all = all_sequences(rl);
        status = score_by_teacher(rl, &rl->reference.role, all, r->samples.count, batch, error);
        free(all);
        if (status == 0) share_topk(rl);
        return status;
    }
    if (rl->num_teachers == 0) {
        memcpy(r->inputs[MT_TEACHER_LOGP], r->inputs[MT_REF_LOGP], (size_t)r->T * 8);
        return 0;
    }
    int64_t *sequences = mt_malloc(mt_max(r->samples.count, 1) * 8);
    for (int64_t i = 0; i < rl->num_teachers && status == 0; i++) {
        int64_t count = 0;
        for (int64_t k = 0; k < r->samples.count; k++)
            if (rl->prompts.questions[r->prompt_of[r->response_of[k]]].teacher == i) sequences[count++] = k;
        if (count > 0) status = score_by_teacher(rl, &rl->teachers[i].role, sequences, count, batch, error);
    }
    free(sequences);
    if (status == 0 && topk) share_topk(rl);
    if (status == 0 && !topk) mt_all_reduce_sum(&rl->config.grid->world, r->inputs[MT_TEACHER_LOGP], r->T, MT_F64);
    return status;
}

/* Scores the planned micro-batches by a role; afterwards all ranks have the numbers of all sequences. */
static int score(mt_rl *rl, mt_model_role *role, mt_loss_input input, mt_batch *batch, mt_error *error) {
    bool squares = input == MT_OLD_LOGP && rl->config.options->adv_estimator == MT_ADV_OPTIMAL_TOKEN_BASELINE;
    scoring s = {.rollouts = &rl->rollouts, .input = input, .grid = role->grid, .squares = squares};
    if (!role->model) return 0;
    if (squares) mt_model_score_squares(role->model, true);
    rl->times.tokens[role == &rl->reward_model.role ? REWARDS : SCORING] += sequence_tokens(rl);
    mt_model_role_scoring planned = planned_scoring(rl, batch, &s);
    if (mt_model_role_score(role, &planned, error) != 0) return -1;
    mt_all_reduce_sum(&rl->config.grid->world, rl->rollouts.inputs[input], rl->rollouts.T, MT_F64);
    mt_all_reduce_sum(&rl->config.grid->world, &s.entropy, 1, MT_F64);
    if (squares) mt_all_reduce_sum(&rl->config.grid->world, rl->rollouts.squares, rl->rollouts.T, MT_F64);
    if (squares) mt_model_score_squares(role->model, false);
    if (input == MT_OLD_LOGP) rl->entropy = s.entropy;
    return 0;
}

/* The reward model's value of each response from `first` on, at its last token. */
static int score_by_model(mt_rl *rl, int64_t first, mt_batch *batch, mt_error *error) {
    mt_rollouts *r = &rl->rollouts;
    mt_rollout_config later = {.max_new_tokens = rl->config.options->max_new_tokens, .first = first, .whole = true};
    later.image_token_id = rl->config.options->stack.vision.image_token_id;
    mt_rollouts_select(r, &later);
    int64_t *sequences = all_sequences(rl);
    plan_batches(rl, sequences, r->samples.count, &rl->shape);
    int status = score(rl, &rl->reward_model.role, MT_OLD_VALUES, batch, error);
    for (int64_t s = 0; s < r->samples.count && status == 0; s++)
        r->scores[r->response_of[s]] = r->inputs[MT_OLD_VALUES][r->spans[s].q_start + r->spans[s].q_len - 1];
    free(sequences);
    return status;
}

/* Scores of the responses from `first` on by rank 0's reward function, for all ranks; MT_RL_STOPPED or MT_RL_UNREWARDED
 * if it gave none. */
static int score_by_function(mt_rl *rl, int64_t first, mt_reward_function *reward, mt_error *error) {
    mt_rollouts *r = &rl->rollouts;
    const mt_group *world = &rl->config.grid->world;
    const mt_strings *stops = &rl->config.options->stop;
    int status = world->rank == 0 ? mt_rollouts_score(r, first, reward, rl->config.tokenizer, stops, error) : 0;
    mt_broadcast(world, &status, sizeof status, 0);
    if (status == MT_REWARD_STOPPED) return MT_RL_STOPPED;
    if (mt_agree(world, status != 0, error) != 0) return MT_RL_UNREWARDED;
    mt_broadcast(world, r->scores, r->count * 8, 0);
    for (int64_t s = first; s < r->count; s++) rl->times.tokens[REWARDS] += (double)r->response_tokens[s];
    return 0;
}

/* Scores of the responses from `first` on, by all rewards. */
static int score_responses(mt_rl *rl, int64_t first, mt_batch *batch, mt_error *error) {
    const mt_ints *kinds = &rl->config.options->reward;
    int status = 0;
    for (int64_t i = 0; i < kinds->count && status == 0; i++) {
        if (kinds->items[i] == MT_REWARD_NONE)
            memset(rl->rollouts.scores + first, 0, (size_t)(rl->rollouts.count - first) * 8);
        else if (kinds->items[i] == MT_REWARD_ENV)
            mt_rollouts_score_turns(&rl->rollouts, first);
        else if (kinds->items[i] == MT_REWARD_MODEL)
            status = score_by_model(rl, first, batch, error);
        else
            status = score_by_function(rl, first, rl->rewards[i], error);
        if (status == 0) mt_rollouts_keep_part(&rl->rollouts, first, i);
    }
    if (status == 0) mt_rollouts_add_parts(&rl->rollouts, first, &rl->rollout_config.weights);
    return status;
}

/* Prompts that wait: of batches, and in progress. */
static int64_t waiting_prompts(const mt_rl *rl) {
    int64_t prompts = 0;
    for (int64_t i = 0; i < rl->waiting.count; i++) prompts += rl->waiting.batches[i].rollouts.num_prompts;
    return prompts + rl->waiting.partials.count;
}

/* Responses and their rewards. With dynamic sampling other prompts replace the dropped ones, in a number of rounds. */
static int roll_out(mt_rl *rl, const mt_run_state *state, mt_batch *batch, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_rollouts *r = &rl->rollouts;
    int64_t most = o->dynamic_sampling ? o->dynamic_sampling_max_rounds : 1, missing = o->rollout_batch_size;
    double then = mt_time();
    int status = prepare_generator(rl, error);
    lap(rl, TRANSFER, &then);
    mt_rollouts_free(r);
    for (rl->rounds = 0; missing > 0 && rl->rounds < most && status == 0; rl->rounds++) {
        int64_t first = r->count;
        int64_t position = state->consumed_prompts + waiting_prompts(rl) + r->num_prompts;
        status = is_partial(o) ? generate_partly(rl, position, missing, state->iteration, error)
                               : generate(rl, position, missing, error);
        lap(rl, GENERATION, &then);
        if (status == 0) status = score_responses(rl, first, batch, error);
        if (status == 0) mt_rollouts_select(r, &rl->rollout_config);
        lap(rl, REWARDS, &then);
        missing = o->rollout_batch_size - (r->num_prompts - r->stats.groups_dropped);
    }
    return status;
}

/* ---- an iteration */

/* indices[T]: of each counted token among the tokens of all responses; -1: not counted. To free. */
static int64_t *response_indices(const mt_rl *rl) {
    const mt_rollouts *r = &rl->rollouts;
    int64_t *first = mt_malloc((r->count + 1) * 8), *indices = mt_malloc(mt_max(r->T, 1) * 8);
    first[0] = 0;
    for (int64_t s = 0; s < r->count; s++) first[s + 1] = first[s] + r->response_tokens[s];
    for (int64_t t = 0; t < r->T; t++) indices[t] = -1;
    for (int64_t k = 0; k < r->samples.count; k++) {
        int64_t response = r->response_of[k], n = r->response_tokens[response];
        int64_t begin = r->spans[k].q_start + r->spans[k].q_len - n;
        for (int64_t i = 0; i < n; i++)
            if (r->mask[begin + i] != 0) indices[begin + i] = first[response] + i;
    }
    free(first);
    return indices;
}

/* x[T] = the generator's log-probability of each counted token. */
static void generated_logps(const mt_rl *rl, double *x) {
    int64_t *indices = response_indices(rl);
    for (int64_t t = 0; t < rl->rollouts.T; t++)
        if (indices[t] >= 0) x[t] = (double)rl->generated[indices[t]];
    free(indices);
}

/* Tokens of earlier iterations get the log-probabilities that training gave them then. */
static void restore_old_logps(mt_rl *rl, int64_t version) {
    int64_t *indices = response_indices(rl);
    for (int64_t t = 0; t < rl->rollouts.T && rl->versions; t++)
        if (indices[t] >= 0 && rl->versions[indices[t]] < version)
            rl->rollouts.inputs[MT_OLD_LOGP][t] = rl->old_logps[indices[t]];
    free(indices);
}

/* Measures the mismatch of generator and training, weighs tokens by it and leaves tokens out, as options say. */
static void correct(mt_rl *rl) {
    mt_rollouts *r = &rl->rollouts;
    double *x = mt_calloc(r->T * 8);
    mt_mismatch_tokens tokens = {r->T, r->samples.count, r->spans, r->mask, x};
    generated_logps(rl, x);
    for (int64_t i = 0; i < r->T; i++)
        if (r->mask[i] != 0) x[i] = r->inputs[MT_OLD_LOGP][i] - x[i];
    rl->mismatch = mt_mismatch_measure(&tokens);
    rl->generation_gap = rl->cut = rl->rejected = 0;
    for (int64_t i = 0; i < r->T; i++) rl->generation_gap = mt_maximum(rl->generation_gap, fabs(x[i]));
    if (rl->correction.is != MT_ROLLOUT_IS_NONE)
        rl->cut = mt_correction_weights(r->inputs[MT_ROLLOUT_WEIGHTS], &tokens, &rl->correction);
    if (rl->correction.num_rules > 0) {
        float *keeps = mt_malloc(mt_max(r->T, 1) * 4);
        rl->rejected = mt_correction_keeps(keeps, &tokens, &rl->correction);
        mt_rollouts_keep(r, keeps);
        free(keeps);
    }
    free(x);
}

/* The tokens of sequences[count] that the policy loss treats apart. key: of a draw. */
static void select_tokens(mt_rl *rl, const int64_t *sequences, int64_t count, uint64_t key) {
    mt_rollouts *r = &rl->rollouts;
    if (rl->policy.variant != MT_POLICY_TOPR) {
        mt_loss_tokens tokens = {.T = r->T, .num_sequences = r->samples.count, .sequences = r->spans, .mask = r->mask};
        tokens.logp = r->inputs[MT_OLD_LOGP], tokens.advantages = r->inputs[MT_ADVANTAGES];
        mt_select_tokens(r->inputs[MT_SELECTED], &tokens, sequences, count, &rl->policy, key);
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        const mt_span *span = &r->spans[sequences[k]];
        for (int64_t i = span->q_start; i < span->q_start + span->q_len; i++)
            r->inputs[MT_SELECTED][i] = r->scores[r->response_of[sequences[k]]] > 0;
    }
}

/* Steps of a role on all mini-batches, in micro-batches of `shape`. own: what it has of its own, which may be `state`.
 * Schedules do not count an iteration whose steps were all skipped in fp16. metrics: of the last one (NULL: not
 * wanted). */
static int train_role(mt_rl *rl, mt_model_role *role, const mt_plan_shape *shape, const mt_run_state *state,
                      mt_run_state *own, mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    const mt_rollouts *r = &rl->rollouts;
    int64_t mini_batches = mt_divide_up(r->samples.count, o->stack.global_batch_size), *sequences = all_sequences(rl);
    int64_t steps = o->ppo_epochs * mini_batches, skipped = own->skipped_samples, updates = own->optimizer_step;
    learner source = {rl, role};
    if (mt_model_role_is_apart(role)) batch = &role->batch;
    int status = mt_model_role_use(role, MT_USE_TRAINING, error);
    for (int64_t i = 0; i < steps && status == 0; i++) {
        int64_t count = mt_rollouts_mini_batch(r, o->shuffle_mini_batches, mt_options_data_seed(o), state->iteration,
                                               i / mini_batches, i % mini_batches, mini_batches, sequences);
        if (role == &rl->actor && mt_policy_kind_of(rl->policy.variant)->selects) {
            uint64_t of_run = mt_random_key((uint64_t)mt_options_data_seed(o), UINT64_C(0x636f76), 0); // "cov"
            select_tokens(rl, sequences, count, mt_random_key(of_run, (uint64_t)state->iteration, (uint64_t)i));
        }
        mt_run_state inner = *state;
        take_trained(&inner, own);
        plan_batches(rl, sequences, count, shape);
        begin_teacher_batches(&rl->topk, rl->topk.K > 0 ? rl->plan.num_slots : 0);
        status = mt_train_step(role->model, &inner, rl->plan.num_slots, fill_batch, &source, batch,
                               i + 1 == steps ? metrics : NULL, error);
        own->optimizer_step = inner.optimizer_step, own->loss_scaler = inner.loss_scaler;
        own->skipped_iterations = inner.skipped_iterations;
    }
    if (o->stack.fp16 && steps > 0 && status == 0 && own->optimizer_step == updates)
        own->skipped_samples = skipped + o->stack.global_batch_size;
    if (status == 0) role->ops->stream_synchronize(mt_model_stream(role->model)); // its seconds end here
    rl->times.tokens[TRAINING] += (double)o->ppo_epochs * sequence_tokens(rl);
    free(sequences);
    return status;
}

/* The critic first: the actor stays awake for the end of the iteration. */
static int train(mt_rl *rl, mt_run_state *state, mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    mt_model_role *critic = &rl->critic.role;
    mt_metrics of_critic = {0};
    int status = 0;
    if (critic->model) {
        status = train_role(rl, critic, &rl->critic.shape, state, &rl->critic_state, batch, metrics ? &of_critic : NULL,
                            error);
        if (status == 0) status = mt_model_role_use(critic, MT_USE_NOTHING, error);
    }
    if (status == 0) status = train_role(rl, &rl->actor, &rl->shape, state, state, batch, metrics, error);
    rl->value_loss = of_critic.loss;
    return status;
}

static bool are_finite(const double *numbers, const float *mask, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++) finite &= (mask && mask[i] == 0) || isfinite(numbers[i]);
    return finite;
}

/* The first of the numbers of all sequences that is not finite, for the message about the step that reads it. NULL:
 * none, or the actor's own. */
static const char *name_fault(const mt_rl *rl) {
    const mt_rollouts *r = &rl->rollouts;
    if (!are_finite(r->inputs[MT_OLD_LOGP], r->mask, r->T)) return NULL;
    if (!are_finite(r->rewards, NULL, r->samples.count)) return "the rewards";
    if (!are_finite(r->inputs[MT_REF_LOGP], r->mask, r->T))
        return "the log-probabilities of the reference model (--ref-load)";
    if (!are_finite(r->inputs[MT_TEACHER_LOGP], r->mask, r->T)) return "the log-probabilities of the teacher";
    return are_finite(r->inputs[MT_OLD_VALUES], r->mask, r->T) ? NULL : "the values of the critic";
}

/* ---- routing replay */

/* Every rank gets the routes that some rank has. */
static void share_routes(mt_rl *rl) {
    int64_t elements = mt_routes_size(&rl->config.options->stack, rl->rollouts.T);
    mt_all_reduce_max(&rl->config.grid->world, rl->routes.experts, elements, MT_F32);
}

/* Makes the table of routes; with R3 it has those of the generator. */
static void begin_routes(mt_rl *rl) {
    const mt_run_options *o = rl->config.options;
    const mt_rollouts *r = &rl->rollouts;
    int64_t elements = mt_routes_size(&o->stack, r->T), width = mt_routes_size(&o->stack, 1);
    free(rl->routes.experts);
    rl->routes = (mt_routes){.num_layers = o->stack.num_layers, .topk = o->stack.moe_router_topk};
    rl->routes.experts = mt_malloc(elements * 4);
    for (int64_t i = 0; i < elements; i++) rl->routes.experts[i] = -1;
    if (o->router_replay != MT_ROUTER_REPLAY_R3) return;
    for (int64_t k = 0; k < r->samples.count; k++)
        memcpy(rl->routes.experts + r->spans[k].q_start * width, r->routes[r->response_of[k]],
               (size_t)(r->spans[k].q_len * width) * 4);
    share_routes(rl);
}

/* The log-probabilities of the old policy, with the generator's routes or while its own are written. */
static int score_actor(mt_rl *rl, mt_batch *batch, mt_error *error) {
    mt_router_replay replay = rl->config.options->router_replay;
    bool has_routes = replay != MT_ROUTER_REPLAY_DISABLED;
    if (has_routes) begin_routes(rl);
    if (has_routes) mt_model_use_routes(rl->actor.model, &rl->routes, replay == MT_ROUTER_REPLAY_R3);
    int status = score(rl, &rl->actor, MT_OLD_LOGP, batch, error);
    if (has_routes) mt_model_use_routes(rl->actor.model, NULL, false); // the reference may be its base
    if (status == 0 && replay == MT_ROUTER_REPLAY_R2) share_routes(rl);
    return status;
}

/* Trains with the routes of the table. */
static int train_on_routes(mt_rl *rl, mt_run_state *state, mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    if (rl->config.options->router_replay == MT_ROUTER_REPLAY_DISABLED) return train(rl, state, batch, metrics, error);
    mt_model_use_routes(rl->actor.model, &rl->routes, true);
    int status = train(rl, state, batch, metrics, error);
    double sums[] = {rl->routes.differing, rl->routes.replayed};
    mt_model_use_routes(rl->actor.model, NULL, false);
    if (status == 0) mt_all_reduce_sum(&rl->config.grid->world, sums, 2, MT_F64);
    rl->reroutes = sums[1] > 0 ? sums[0] / sums[1] : 0;
    return status;
}

static void plan_all(mt_rl *rl) {
    int64_t *sequences = all_sequences(rl);
    plan_batches(rl, sequences, rl->rollouts.samples.count, &rl->shape);
    free(sequences);
}

/* The log-probabilities of the policy that has just written the sequences, and their correction. */
static int score_writer(mt_rl *rl, const mt_run_state *state, mt_batch *batch, mt_error *error) {
    double then = mt_time();
    bool bypasses = rl->config.options->bypass_mode;
    int status = 0;
    rl->rejected = 0;
    if (mt_rollouts_count(&rl->rollouts) == 0) return 0;
    plan_all(rl);
    if (bypasses) generated_logps(rl, rl->rollouts.inputs[MT_OLD_LOGP]);
    if (bypasses && rl->config.options->router_replay == MT_ROUTER_REPLAY_R3) begin_routes(rl);
    if (!bypasses) status = score_actor(rl, batch, error);
    if (status == 0 && !bypasses) restore_old_logps(rl, state->iteration);
    if (status == 0 && !bypasses) correct(rl);
    lap(rl, SCORING, &then);
    return status;
}

/* Responses in progress whose last tokens have no log-probabilities of training. To free. */
static mt_partial **unscored_partials(mt_partials *p, int64_t *prompts, int64_t *count) {
    mt_partial **unscored = mt_malloc(mt_max(p->count * p->each, 1) * (int64_t)sizeof *unscored);
    *count = 0;
    for (int64_t i = 0; i < p->count * p->each; i++) {
        mt_partial *r = &p->groups[i / p->each].responses[i % p->each];
        if (r->num_scored == r->count) continue;
        prompts[*count] = p->groups[i / p->each].prompt, unscored[(*count)++] = r;
    }
    return unscored;
}

/* The log-probabilities of training of the tokens in progress that the present weights have written, before these
 * move on. The generator's are there already. */
static int score_partials(mt_rl *rl, mt_batch *batch, mt_error *error) {
    double then = mt_time();
    mt_partials *p = &rl->waiting.partials;
    const mt_rollout_config all = {.max_new_tokens = rl->config.options->max_new_tokens};
    int64_t *prompts = mt_malloc(mt_max(p->count * p->each, 1) * 8), count = 0;
    mt_partial **responses = unscored_partials(p, prompts, &count);
    int status = 0;
    if (count > 0 && !rl->config.options->bypass_mode) {
        mt_rollouts *r = &rl->rollouts; // the batch at hand waits already
        mt_rollouts_begin(r, &rl->prompts, prompts, count, 1);
        for (int64_t s = 0; s < count; s++) {
            mt_rollouts_set(r, s, responses[s]->tokens, responses[s]->count, false);
            r->routes[s] = responses[s]->routes;
        }
        mt_rollouts_select(r, &all);
        plan_all(rl);
        status = score_actor(rl, batch, error);
        for (int64_t s = 0; s < count; s++) {
            mt_partial *to = responses[s];
            const double *logps = r->inputs[MT_OLD_LOGP] + r->spans[s].q_start + r->spans[s].q_len - to->count;
            r->routes[s] = NULL;
            if (status != 0) continue;
            to->old_logps = mt_realloc(to->old_logps, to->count * 8);
            memcpy(to->old_logps + to->num_scored, logps + to->num_scored, (size_t)(to->count - to->num_scored) * 8);
            to->num_scored = to->count;
        }
        mt_rollouts_free(r);
        free(rl->routes.experts);
        rl->routes = (mt_routes){0};
    }
    free(prompts), free(responses);
    lap(rl, SCORING, &then);
    return status;
}

/* Writes a batch with the present weights, and its log-probabilities by these. Unless a batch is written, the responses
 * in progress are as they were before. */
static int write_batch(mt_rl *rl, const mt_run_state *state, mt_batch *batch, mt_error *error) {
    mt_waiting before = {.partials = rl->waiting.partials}, restored = {.partials = {.each = before.partials.each}};
    int64_t row = routes_row(rl), bytes = 0;
    char *copy = is_partial(rl->config.options) ? mt_waiting_write(&before, row, &bytes) : NULL;
    int status = roll_out(rl, state, batch, error);
    if (status > 0 && copy) {
        mt_error none;
        MT_CHECK(mt_waiting_read(&restored, copy, bytes, row, &rl->prompts, &rl->rollout_config, &none) == 0);
        mt_partials_free(&rl->waiting.partials);
        rl->waiting.partials = restored.partials;
    }
    free(copy);
    if (status == 0) status = score_writer(rl, state, batch, error);
    if (status == 0) push_batch(rl, state->iteration);
    return status == 0 ? score_partials(rl, batch, error) : status;
}

/* ---- batches that other ranks write */

/* The ranks that write get the present weights. */
static int update_writers(mt_rl *rl, mt_error *error) {
    double then = mt_time();
    if (mt_train_finish(rl->actor.model, error) != 0) return -1;
    mt_rollout_ranks_update(rl->config.writers);
    lap(rl, TRANSFER, &then);
    return 0;
}

/* Begins the next batch on the ranks that write, which have the present weights. */
static void begin_written(mt_rl *rl, const mt_run_state *state) {
    const mt_run_options *o = rl->config.options;
    int64_t prompts = o->rollout_batch_size, position = state->consumed_prompts + waiting_prompts(rl);
    int64_t *lengths = mt_malloc(prompts * 8), *order = rl->written_prompts = mt_malloc(prompts * 8);
    const int32_t **texts = mt_malloc(prompts * (int64_t)sizeof *texts);
    order_prompts(rl, position, prompts, order);
    for (int64_t i = 0; i < prompts; i++) {
        texts[i] = rl->prompts.tokens + rl->prompts.offsets[order[i]];
        lengths[i] = rl->prompts.offsets[order[i] + 1] - rl->prompts.offsets[order[i]];
    }
    rl->written_iteration = state->iteration;
    const mt_rollout_request request = {.prompts = texts,
                                        .lengths = lengths,
                                        .count = prompts,
                                        .each = o->num_return_sequences,
                                        .first_id = position * o->num_return_sequences};
    mt_rollout_ranks_write(rl->config.writers, &request);
    free(lengths), free(texts);
}

/* Waits for the batch that other ranks write, if there is one; it is then the last that waits. Its scores are computed
 * when it is trained on, so that rewards that fail, or are stopped, do not lose it. */
static int collect_written(mt_rl *rl, mt_error *error) {
    const mt_run_options *o = rl->config.options;
    mt_rollouts *r = &rl->rollouts;
    int64_t each = o->num_return_sequences, count = o->rollout_batch_size * each, tokens = 0;
    double then = mt_time();
    if (!rl->written_prompts) return 0;
    mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
    int status = mt_rollout_ranks_collect(rl->config.writers, sequences, rl->drafts, &rl->writing, error);
    rl->waited += mt_time() - then;
    lap(rl, GENERATION, &then);
    if (status == 0) {
        mt_rollouts_free(r);
        mt_rollouts_begin(r, &rl->prompts, rl->written_prompts, o->rollout_batch_size, each);
        for (int64_t s = 0; s < count; s++) tokens += sequences[s].num_tokens;
        rl->generated = mt_realloc(rl->generated, mt_max(tokens, 1) * 4);
        rl->times.tokens[GENERATION] += (double)tokens;
        tokens = 0;
        for (int64_t s = 0; s < count; s++) {
            take_response(rl, s, &sequences[s], tokens);
            tokens += r->response_tokens[s];
        }
        mt_rollouts_select(r, &rl->rollout_config);
        generated_logps(rl, r->inputs[MT_OLD_LOGP]);
        rl->rounds = 1;
        push_batch(rl, rl->written_iteration);
        rl->waiting.batches[rl->waiting.count - 1].is_unscored = true;
    }
    for (int64_t s = 0; s < count; s++) mt_sequence_end(&sequences[s]);
    free(sequences), free(rl->written_prompts);
    rl->written_prompts = NULL;
    return status;
}

/* Scores the next batch that waits, whose old log-probabilities are known. Without rewards it goes on waiting. */
static int score_written(mt_rl *rl, mt_batch *batch, mt_error *error) {
    mt_pending *next = &rl->waiting.batches[0];
    mt_rollouts *r = &rl->rollouts;
    double then = mt_time();
    mt_rollouts_free(r);
    *r = next->rollouts;
    double *old_logps = r->inputs[MT_OLD_LOGP];
    int64_t T = r->T;
    r->inputs[MT_OLD_LOGP] = NULL;
    int status = score_responses(rl, 0, batch, error);
    mt_rollouts_select(r, &rl->rollout_config);
    MT_CHECK(r->T == T); // no group is dropped
    free(r->inputs[MT_OLD_LOGP]);
    r->inputs[MT_OLD_LOGP] = old_logps;
    next->rollouts = *r, next->is_unscored = status != 0;
    *r = (mt_rollouts){0};
    lap(rl, REWARDS, &then);
    return status;
}

/* Responses of the present weights for the iteration after --rollout-lag others; the first iteration writes those of
 * all of these too. The batch of this iteration is then at hand, and the last one may be under way on other ranks. */
static int next_batch(mt_rl *rl, const mt_run_state *state, mt_batch *batch, mt_error *error) {
    int64_t lag = rl->config.options->rollout_lag;
    int status = collect_written(rl, error);
    if (rl->config.writers && rl->waiting.count <= lag && status == 0) status = update_writers(rl, error);
    while (rl->config.writers && rl->waiting.count <= lag - (rl->written_prompts != NULL) && status == 0) {
        status = collect_written(rl, error);
        if (status == 0) begin_written(rl, state);
    }
    while (!rl->config.writers && rl->waiting.count <= lag && status == 0)
        status = write_batch(rl, state, batch, error);
    if (status == 0 && rl->waiting.batches[0].is_unscored) status = score_written(rl, batch, error);
    if (status == 0) pop_batch(rl, state->iteration);
    return status;
}

/* Scores the sequences by the other models and trains on them. */
static int learn(mt_rl *rl, mt_run_state *state, mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    double then = mt_time();
    int status = renew_teacher(rl, state, error);
    plan_all(rl);
    if (status == 0) status = score(rl, &rl->reference.role, MT_REF_LOGP, batch, error);
    if (status == 0) status = score(rl, &rl->critic.role, MT_OLD_VALUES, batch, error);
    if (status == 0) status = score_by_teachers(rl, batch, error);
    if (status == 0) mt_rollouts_advantages(&rl->rollouts, &rl->rollout_config);
    const char *fault = status == 0 ? name_fault(rl) : NULL;
    mt_train_name_fault(rl->actor.model, fault);
    if (rl->critic.role.model) mt_train_name_fault(rl->critic.role.model, fault);
    lap(rl, SCORING, &then);
    if (status == 0) status = train_on_routes(rl, state, batch, metrics, error);
    lap(rl, TRAINING, &then);
    return status;
}

/* The first phase that takes time: with one layout and without rest, nothing is transferred. */
static int first_phase(const mt_rl *rl) {
    return rl->transfer || rl->config.writers || rl->actor.rests ? TRANSFER : GENERATION;
}

/* Adds up the times of the run. The first iteration counts only if it is the last: a device loads kernels in it. */
static void add_times(mt_rl *rl, int64_t iteration) {
    if (rl->num_iterations++ <= 1) rl->total = (phase_times){0}, rl->first_timed = iteration;
    for (int i = 0; i < NUM_PHASES; i++)
        rl->total.seconds[i] += rl->times.seconds[i], rl->total.tokens[i] += rl->times.tokens[i];
    rl->total.all_seconds += rl->times.all_seconds;
    rl->last_timed = iteration;
}

static void print_row(FILE *file, const char *name, double tokens, double seconds, double all_seconds) {
    fprintf(file, "  %-10s", name);
    if (tokens > 0)
        fprintf(file, " %12.0f %10.3f %12.0f", tokens, seconds, tokens / seconds);
    else
        fprintf(file, " %12s %10.3f %12s", "", seconds, "");
    fprintf(file, " %6.1f%%\n", 100 * seconds / all_seconds);
}

void mt_rl_print_times(const mt_rl *rl, FILE *file) {
    const phase_times *t = &rl->total;
    double other = t->all_seconds;
    if (!file || rl->num_iterations == 0) return;
    fprintf(file, "phases of iterations %lld to %lld\n  %-10s %12s %10s %12s %7s\n", (long long)rl->first_timed,
            (long long)rl->last_timed, "", "tokens", "seconds", "tokens/s", "share");
    for (int i = first_phase(rl); i < NUM_PHASES; i++) {
        print_row(file, phases[i].name, t->tokens[i], t->seconds[i], t->all_seconds);
        other -= t->seconds[i];
    }
    print_row(file, "other", 0, other, t->all_seconds);
    print_row(file, "iteration", 0, t->all_seconds, t->all_seconds);
}

static void add_number(mt_rl *rl, const char *name, double value, bool on_line) {
    MT_CHECK(rl->num_numbers < MT_MAX_REPORT_NUMBERS);
    rl->numbers[rl->num_numbers++] = (mt_report_number){name, value, on_line};
}

/* The numbers that the iteration has. */
static void collect_numbers(mt_rl *rl) {
    const mt_rollout_stats *stats = &rl->rollouts.stats;
    const mt_run_options *o = rl->config.options;
    double counted = (double)mt_rollouts_count(&rl->rollouts);
    bool trained = counted > 0, samples = o->dynamic_sampling, compared = trained && !o->bypass_mode;
    bool has_entropy = o->adv_estimator != MT_ADV_OPTIMAL_TOKEN_BASELINE; // it is scored in place of that
    rl->num_numbers = 0;
    add_number(rl, "reward", stats->score, true);
    add_number(rl, "reward deviation", stats->score_deviation, true);
    add_number(rl, "response tokens", stats->response_tokens, true);
    add_number(rl, "overlong", stats->overlong, true);
    if (o->env_command) add_number(rl, "turns", stats->turns, true);
    if (o->rollout_lag > 0 || is_partial(o)) add_number(rl, "staleness", rl->staleness, true);
    if (rl->config.writers)
        add_number(rl, "generation seconds overlapped", mt_maximum(rl->writing - rl->waited, 0), true);
    if (is_partial(o)) add_number(rl, "staleness at most", (double)rl->most_staleness, false);
    if (is_partial(o)) add_number(rl, "responses continued", rl->continued, true);
    if (is_partial(o)) add_number(rl, "generation phases", (double)rl->phases, false);
    if (is_partial(o)) add_number(rl, "prompts in progress", (double)rl->waiting.partials.count, false);
    if (samples) add_number(rl, "groups dropped", (double)stats->groups_dropped, true);
    if (samples) add_number(rl, "sampling rounds", (double)rl->rounds, false);
    if (rl->drafts[0] > 0) add_number(rl, "drafts accepted", rl->drafts[1] / rl->drafts[0], true);
    if (compared) add_number(rl, "generation gap", rl->generation_gap, true);
    if (compared) add_number(rl, "mismatch kl", rl->mismatch.kl, false);
    if (compared) add_number(rl, "mismatch k3", rl->mismatch.k3, false);
    if (compared) add_number(rl, "mismatch chi2", rl->mismatch.chi2, false);
    if (compared) add_number(rl, "mismatch chi2 of sequences", rl->mismatch.chi2_sequence, false);
    if (compared) add_number(rl, "mismatch perplexity ratio", rl->mismatch.perplexity_ratio, false);
    if (trained && rl->correction.is != MT_ROLLOUT_IS_NONE) add_number(rl, "rollout weights cut", rl->cut, true);
    if (trained && rl->correction.num_rules > 0) add_number(rl, "rollout tokens rejected", rl->rejected, true);
    if (trained && o->router_replay != MT_ROUTER_REPLAY_DISABLED) add_number(rl, "routes replaced", rl->reroutes, true);
    if (trained && rl->critic.role.model) add_number(rl, "value loss", rl->value_loss, true);
    if (trained && rl->critic.role.model) add_number(rl, "value target", stats->value_target, false);
    if (trained) add_number(rl, "advantage", stats->advantage, false);
    if (compared && has_entropy) add_number(rl, "entropy", rl->entropy / counted, false);
    if (trained && rl->rollout_config.distill_coef != 0) add_number(rl, "distillation", stats->distillation, true);
    if (trained && rl->config.options->self_distillation == MT_SELF_DISTILL_LAGGING)
        add_number(rl, "teacher age", (double)rl->teacher_age, false);
    if (trained && rl->topk.K > 0) add_number(rl, "teacher mass", rl->topk.mass, false);
    if (trained && rl->rollout_config.kl_in_reward != 0) add_number(rl, "kl in reward", stats->kl, false);
    for (int i = first_phase(rl); i < NUM_PHASES; i++) {
        add_number(rl, phases[i].seconds, rl->times.seconds[i], false);
        if (phases[i].tokens) add_number(rl, phases[i].tokens, rl->times.tokens[i], false);
    }
}

void mt_rl_report(const mt_rl *rl, mt_report *report) {
    report->numbers = rl->numbers, report->num_numbers = rl->num_numbers;
    report->untrained = mt_rollouts_count(&rl->rollouts) > 0 ? NULL
                        : rl->rejected > 0                   ? "--rollout-rs leaves out all tokens"
                        : rl->rollouts.samples.count > 0     ? "all responses are overlong"
                                                             : "no prompt has rewards that differ";
}

int mt_rl_step(mt_rl *rl, mt_run_state *state, mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    const mt_rollouts *r = &rl->rollouts;
    double begin = mt_time();
    rl->times = (phase_times){0};
    rl->drafts[0] = rl->drafts[1] = 0, rl->phases = 0;
    state->consumed_train_samples = state->iteration * rl->config.options->stack.global_batch_size; // that of schedules
    if (metrics) *metrics = (mt_metrics){.loss = NAN};
    if (metrics) metrics->learning_rate = mt_learning_rate(&rl->config.options->stack, mt_scheduled_samples(state));
    int status = next_batch(rl, state, batch, error);
    if (status == 0 && mt_rollouts_count(r) > 0) status = learn(rl, state, batch, metrics, error);
    mt_error cause;
    if (status >= 0 && mt_model_role_use(&rl->actor, MT_USE_TRAINING, &cause) != 0) // also without rewards or steps
        return mt_error_set(error, "%s", cause.text);
    if (status != 0) return status;
    bool trains = mt_rollouts_count(r) > 0;
    if (!trains) state->skipped_iterations++;
    rl->times.all_seconds = mt_time() - begin;
    add_times(rl, state->iteration + 1);
    collect_numbers(rl);
    rl->writing = rl->waited = 0;
    if (metrics) { // of the iteration, not of its last step
        metrics->tokens = sequence_tokens(rl), metrics->seconds = rl->times.all_seconds;
        metrics->skipped = mt_train_skipped(rl->actor.model, state);
    }
    state->iteration++;
    state->consumed_train_samples = state->iteration * rl->config.options->stack.global_batch_size;
    state->consumed_prompts += r->num_prompts;
    return 0;
}
