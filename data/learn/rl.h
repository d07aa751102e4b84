/* rl.h: reinforcement learning: the actor writes responses to prompts, rewards become advantages, and the actor (and a
 * critic) train on them. */
#ifndef MT_RL_H
#define MT_RL_H

#include "../tokens/tokenizer.h"
#include "../datasets/sft.h"
#include "../checkpoint/checkpoint_save.h"
#include "../report/report.h"
#include "rollout_ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_rl mt_rl;

/* The operands of mt_rl_open, which must outlive the mt_rl. */
typedef struct mt_rl_config {
    const mt_run_options *options;
    const mt_grid *grid;
    const mt_ops *ops;
    const mt_tokenizer *tokenizer;
    const char *tokenizer_path;
    FILE *log;                  // lines about the files; NULL: nowhere
    mt_checkpoint_extra *extra; // as for mt_saver_open, for the critic's checkpoints
    void *context;
    mt_samples prompts;        // of mt_rl_read_prompts; mt_rl_open takes them over
    mt_rollout_ranks *writers; // of --rollout-ranks; NULL: the ranks that train write
} mt_rl_config;

/* Reads the prompts of options->data_path, before a model exists. Every rank calls it. Errors: files or lines that
 * cannot be read, prompts that are too long. */
int mt_rl_read_prompts(mt_samples *prompts, const mt_rl_config *config, mt_error *error);

/* Adds the memory for responses to these prompts to the plan of an actor, before its creation. */
void mt_rl_plan(mt_model_plan *plan, const mt_run_options *options, const mt_samples *prompts);

/* The number of prompts of options->data_path; -1 with error. Every rank calls it, before a model exists. */
int64_t mt_rl_count_prompts(const mt_rl_config *config, mt_error *error);

/* Opens the reward, and creates and loads the models that work with the actor: the reference where a divergence from it
 * counts, the critic for gae, the reward model. `plan` is the actor's, whose weights are loaded; `state` is the run's,
 * and gets the fingerprint of the prompts. A run that resumes takes the critic from the folder critic of options->save.
 * Errors: folders that cannot be read, or other prompts than at the start of the run; rewards that cannot be computed;
 * prompts with pictures and a model that cannot read them; too little memory. Every rank calls it. */
int mt_rl_open(mt_rl **rl, const mt_rl_config *config, mt_model *actor, const mt_model_plan *plan, mt_run_state *state,
               mt_error *error);
void mt_rl_close(mt_rl *rl);

/* One iteration: responses to the next prompts, their rewards, and steps on all of them. Updates `state`; its iteration
 * counts these. metrics: of the actor's last step (NULL: not wanted). A pure function of weights, prompts, seed and
 * state. Every rank calls it. Errors: those of mt_train_step. Without rewards, all is as before the call: the reward
 * failed, which `error` describes, or a signal requested a stop while responses were written or rewards awaited. */
enum { MT_RL_UNREWARDED = 1, MT_RL_STOPPED = 2 };
int mt_rl_step(mt_rl *rl, mt_run_state *state, mt_batch *batch, mt_metrics *metrics, mt_error *error);

/* The numbers of the last iteration for a report. */
void mt_rl_report(const mt_rl *rl, mt_report *report);

/* Prints tokens, seconds, tokens/s and share of the time for each phase of the run's iterations, all but the first if
 * there are several; NULL: nowhere. The seconds are this rank's, the tokens those of all ranks. */
void mt_rl_print_times(const mt_rl *rl, FILE *file);

/* Saves the critic and a teacher that lags, if there are any, and with --rollout-lag keeps the bytes of the batches
 * that wait for mt_rl_write; to be called before the actor is saved, and not while its checkpoint is written. Every
 * rank calls it. */
int mt_rl_save(mt_rl *rl, const mt_run_state *state, mt_error *error);
/* Writes the batches that wait into the folder of the actor's checkpoint; part of an mt_checkpoint_extra. */
int mt_rl_write(const mt_rl *rl, const char *folder, mt_error *error);
/* Waits until they are saved. */
int mt_rl_finish(mt_rl *rl, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
