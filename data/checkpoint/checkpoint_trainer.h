/* checkpoint_trainer.h: reads trainer.json, with which a run continues bit for bit. */
#ifndef MT_CHECKPOINT_TRAINER_H
#define MT_CHECKPOINT_TRAINER_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads the run's state into `state`, and the loss's running average into `average`, which older files lack. */
int mt_trainer_read(const mt_run_options *options, mt_run_state *state, mt_loss_average *average, const char *path,
                    mt_error *error);

enum { MT_TRAINER_VERSION = 2 }; // of trainer.json; from version 2 on a checkpoint has checksums.json

/* The fields of mt_run_state, by their names in trainer.json. */
#define MT_RUN_STATE_FIELDS(FIELD)                                                                                     \
    FIELD(iteration)                                                                                                   \
    FIELD(consumed_train_samples)                                                                                      \
    FIELD(consumed_valid_samples)                                                                                      \
    FIELD(optimizer_step)

/* Iteration and samples of the run that the options continue, as its trainer.json has them. They stay as they are for a
 * run that begins, and for a file that loading will refuse. */
void mt_checkpoint_peek(const mt_run_options *options, mt_run_state *state);

/* --use-checkpoint-opt-param-scheduler: if the options continue a run, they take its learning rates, weight decays and
 * their schedules from its trainer.json, or from a checkpoint of Megatron-LM. Error: it has none. After
 * mt_options_finish. */
int mt_checkpoint_take_schedule(mt_run_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
