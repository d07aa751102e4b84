/* pending.h: batches of rollouts that wait to be trained on (--rollout-lag), in memory and in a checkpoint's file. */
#ifndef MT_PENDING_H
#define MT_PENDING_H

#include "mismatch.h"
#include "rollouts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The file of a checkpoint's folder. */
#define MT_PENDING_FILE "rollouts.bin"

/* A batch with its scores and the numbers of the policy that wrote it. */
typedef struct mt_pending {
    mt_rollouts rollouts; // after mt_rollouts_select, with MT_OLD_LOGP, MT_ROLLOUT_WEIGHTS and squares
    mt_routes routes;     // a row for each of rollouts.T positions; experts NULL: none
    int64_t iteration;    // whose weights wrote it: the iterations before
    int64_t rounds;       // of responses
    mt_mismatch mismatch; // of generator and training, then
    double generation_gap, cut, rejected, entropy;
} mt_pending;

/* Frees its memory; it is empty then. */
void mt_pending_free(mt_pending *batch);

/* The batches as bytes[*size], to free. row: elements of a row of `routes`, 0 without. Numbers are in the order of
 * bytes of the machine. */
char *mt_pending_write(const mt_pending *batches, int64_t count, int64_t row, int64_t *size);

/* Reads them into batches[most]; returns their number, or -1 with the error of a file that was written for other
 * prompts, for another model, or is damaged. `prompts` and `config` are those of mt_rollouts_begin and
 * mt_rollouts_select. */
int64_t mt_pending_read(mt_pending *batches, int64_t most, const char *bytes, int64_t size, int64_t row,
                        const mt_samples *prompts, const mt_rollout_config *config, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
