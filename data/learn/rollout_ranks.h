/* rollout_ranks.h: ranks that write responses while the others train (--rollout-ranks). The last ranks of the job hold
 * the generator, on a grid of their own, and follow commands of the first rank: take the present weights of the actor,
 * write responses, end. They have no part in anything else. */
#ifndef MT_ROLLOUT_RANKS_H
#define MT_ROLLOUT_RANKS_H

#include "../options/options.h"
#include "../tokens/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_rollout_ranks mt_rollout_ranks;

/* Adds the memory for the responses of an iteration to the plan of a model with `options`. */
void mt_rollout_plan(mt_model_plan *plan, const mt_run_options *options);

/* Divides the ranks of a started grid: its last options->rollout_ranks write. Every rank calls it, and on the writing
 * ones `writes` is true. An error: no other rank is left. */
int mt_rollout_ranks_split(mt_rollout_ranks **ranks, mt_grid *grid, const mt_run_options *options, bool *writes,
                           mt_error *error);

/* On the ranks that write: serves the others until these end. Options are those of the others, finished. */
void mt_rollout_ranks_serve(mt_rollout_ranks *ranks, const mt_run_options *options, const mt_grid *grid,
                            const mt_tokenizer *tokenizer);

/* ---- on the ranks that train; all of them call each function */

/* Creates the generator for an actor. Errors: its layout, or too little memory. */
int mt_rollout_ranks_open(mt_rollout_ranks *ranks, mt_model *actor, const mt_sampling *sampling, const mt_stops *stops,
                          mt_error *error);

/* The generator gets the actor's weights. Not while it writes, nor between mt_train_step and mt_train_finish. */
void mt_rollout_ranks_update(mt_rollout_ranks *ranks);

/* Begins `each` responses to each of prompts[count], whose lengths are lengths[count]; their ids begin with first_id.
 * Returns at once. One request at a time. */
typedef struct mt_rollout_request {
    const int32_t **prompts;
    const int64_t *lengths;
    int64_t count, each, first_id;
} mt_rollout_request;
void mt_rollout_ranks_write(mt_rollout_ranks *ranks, const mt_rollout_request *request);

/* Waits for the responses, sequences[count * each] without their prompts; end each by mt_sequence_end. Adds to
 * drafts[2] as mt_rollout does, and to *seconds the time of the writing. Errors: those of mt_rollout_generate. */
int mt_rollout_ranks_collect(mt_rollout_ranks *ranks, mt_sequence *sequences, double *drafts, double *seconds,
                             mt_error *error);

/* Ends the service of the writing ranks, after what they write. Every rank that trains calls it; NULL: nothing. */
void mt_rollout_ranks_close(mt_rollout_ranks *ranks);

#ifdef __cplusplus
}
#endif
#endif
