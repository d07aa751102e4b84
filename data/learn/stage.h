/* stage.h: the stage of a run (--stage): its loss, with preferences the reference model, with distillation the teacher.
 */
#ifndef MT_STAGE_H
#define MT_STAGE_H

#include "../datasets/loader.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The loss of a stage and its configuration, which live as long as the model. */
typedef struct mt_stage_loss {
    mt_loss loss;
    mt_preference_config preference;
    mt_reward_config reward;
    mt_policy_config policy;
    mt_value_config value;
    mt_distillation_config distillation;
    mt_loss_metric metrics[MT_MAX_LOSS_METRICS + 1]; // of the loss that it measures; ends with a name of NULL
} mt_stage_loss;

/* The loss of finished options, for mt_model_plan.loss; NULL: that of pre-training. */
const mt_loss *mt_stage_loss_of(mt_stage_loss *stage, const mt_run_options *options);

/* The loss of the critic beside an actor. */
const mt_loss *mt_stage_critic_loss(mt_stage_loss *stage, const mt_run_options *options);

/* Options of the teacher in a folder, which `option` names, on the layout of --teacher-* or that of the run; *apart: it
 * has a layout of its own. */
int mt_options_of_teacher(mt_run_options *teacher, const mt_run_options *options, const char *folder,
                          const char *option, const mt_grid *grid, bool *apart, mt_error *error);

/* Checks that the model of a folder, which `option` names, has the shape of a finished one; *head is its head. */
int mt_options_check_folder(const mt_run_options *options, const char *folder, const char *option, mt_head_type *head,
                            mt_error *error);

/* Options of the model of any shape in a folder, for a run with options `of_run`: the model's shape, the run's layout
 * and batches. Their strings are the caller's to free, also after an error. */
int mt_options_of_model(mt_run_options *options, const mt_run_options *of_run, const char *folder, mt_error *error);

/* The same for a model that trains beside the run's: it also has the run's options of training, but neither its
 * adapters nor its folders. A model without a value head gets one. */
int mt_options_of_learner(mt_run_options *options, const mt_run_options *of_run, const char *folder, mt_error *error);

/* An error if `expert`, the size of --ROLE-expert-model-parallel-size, is for a model without experts. */
int mt_options_check_expert_ranks(const mt_options *options, int64_t expert, const char *role, mt_error *error);

/* Derives and checks them, once the caller has set the model's layout and stage. `option` names the folder in errors,
 * and --ROLE-*-model-parallel-size the layout: another size of vocabulary than the run's; a shape that the layout
 * cannot hold. */
int mt_options_finish_model(mt_run_options *options, const mt_options *of_run, const char *option, const char *role,
                            int64_t world_size, mt_error *error);

/* The K <= V greatest of logits[V], in the order of their ids; of equal logits the first, and NaN before all. */
void mt_take_greatest(int32_t *ids, float *greatest, const float *logits, int64_t V, int64_t K);

/* A model that stays as it is and scores the samples of another one: its own log-probabilities, or the logits of a
 * teacher, go into the batches of a training step or of an evaluation. */
typedef struct mt_reference mt_reference;

/* Opens the reference of a stage that has one, for a model that trains; else *reference is NULL. The reference
 * of --stage dpo has the weights of options->ref_load, or else those at the start of the run (`state` says if it has
 * started). The
 * teacher of --stage kd is the model of options->teacher_load, in its own shape. Either may have a layout of its own
 * (mt_model_role_sizes_of_reference, mt_model_role_sizes_of_teacher). Lines about it go to `log` (NULL: nowhere).
 * Errors: a folder with another shape of model, of a teacher with another vocabulary; a run that resumes without
 * --ref-load; too little memory. Every rank calls it. */
int mt_reference_open(mt_reference **reference, mt_model *trained, const mt_run_options *options, const mt_ops *ops,
                      const mt_run_state *state, FILE *log, mt_error *error);
void mt_reference_close(mt_reference *reference);

/* Scores all micro-batches of a feed; the trained model rests meanwhile if its options say so. `batch` is scratch. Then
 * mt_reference_batch with `reference` as its context is the source of the same micro-batches with MT_REF_LOGP or
 * `teacher` filled in, once for a teacher. Every rank calls it. */
int mt_reference_score(mt_reference *reference, mt_feed *feed, mt_batch *batch, mt_error *error);
int mt_reference_batch(void *reference, int64_t index, mt_batch *batch, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
