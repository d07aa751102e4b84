/* pending.h: batches of rollouts that wait to be trained on (--rollout-lag), in memory, and in a checkpoint's file with
 * the responses in progress (partial.h). */
#ifndef MT_PENDING_H
#define MT_PENDING_H

#include "mismatch.h"
#include "partial.h"
#include "rollouts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The file of a checkpoint's folder. */
#define MT_PENDING_FILE "rollouts.bin"

/* Versions of the weights that wrote the tokens which count. */
typedef struct mt_versions {
    double mean;
    int64_t oldest;
    double continued; // share of responses with tokens of several versions
} mt_versions;

/* A batch with its scores and the numbers of the policy that wrote it. */
typedef struct mt_pending {
    mt_rollouts rollouts; // after mt_rollouts_select, with MT_OLD_LOGP, MT_ROLLOUT_WEIGHTS and squares
    mt_routes routes;     // a row for each of rollouts.T positions; experts NULL: none
    int64_t iteration;    // whose weights wrote it: the iterations before
    int64_t rounds;       // of responses
    mt_mismatch mismatch; // of generator and training, then
    double generation_gap, cut, rejected, entropy;
    mt_versions versions;
    bool is_unscored; // its scores are not computed yet
} mt_pending;

/* Frees its memory; it is empty then. */
void mt_pending_free(mt_pending *batch);

/* All rollouts of a run that wait for an iteration. */
typedef struct mt_waiting {
    mt_pending *batches; // [most]
    int64_t count, most;
    mt_partials partials;
} mt_waiting;

/* Frees the batches and the responses in progress; there are none then. */
void mt_waiting_clear(mt_waiting *w);

/* All of it as bytes[*size], to free. row: elements of a row of `routes`, 0 without. Numbers are in the order of bytes
 * of the machine. */
char *mt_waiting_write(const mt_waiting *w, int64_t row, int64_t *size);

/* Reads it into `w`, which has `most`, room for as many batches, and partials.each, and no rollouts; returns 0, or -1
 * with the error of a file that was written for other prompts, for another model or for groups of another size, or is
 * damaged. `prompts` and `config` are those of mt_rollouts_begin and mt_rollouts_select. */
int mt_waiting_read(mt_waiting *w, const char *bytes, int64_t size, int64_t row, const mt_samples *prompts,
                    const mt_rollout_config *config, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
