/* engine.h: the sequences that a server generates, on all of its ranks. Rank 0 decides which sequences begin and end;
 * before each step it sends these changes to the others, so that all ranks hold the same list and take the same step.
 * One thread of each rank, that of MPI, owns its engine. */
#ifndef MT_ENGINE_H
#define MT_ENGINE_H

#include "../models/text_images.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_engine mt_engine;

/* A sequence that is to begin. */
typedef struct mt_engine_request {
    int64_t id; // of its random draws, with sampling.seed
    const int32_t *prompt;
    int64_t num_prompt;     // at least 1
    int64_t max_new_tokens; // 0: only reads the prompt
    mt_sampling sampling;
    mt_logits_view *view; // on rank 0; NULL: nobody sees logits
    void *view_context;
    bool views_prompt;
    int64_t adapter;        // mt_sequence.adapter
    mt_text_images *images; // the engine shares them; NULL: none
    void *owner;            // of rank 0: see mt_engine_owner
} mt_engine_request;

/* Every rank of the generator's grid opens its engine. The generator is one of mt_generator_create_mixed; both must
 * outlive the engine. */
mt_engine *mt_engine_open(mt_generator *generator, const mt_grid *grid);
void mt_engine_close(mt_engine *engine);

/* Rank 0, between steps: begin a sequence, which the generator reads in the order of these calls; end the sequence at
 * an index of the list. Both take effect with the next step. */
void mt_engine_add(mt_engine *engine, const mt_engine_request *request);
void mt_engine_end(mt_engine *engine, int64_t index);

/* Rank 0, between steps: the most work on prompts in a step, from the next one on; at first as the generator has it. */
void mt_engine_limit_prefill(mt_engine *engine, const mt_prefill *limit);

/* Rank 0: takes a step; on several ranks these follow it. Sequences that had ended before are no longer in the list.
 * Without a sequence it only shows other ranks that this one is alive. Returns the number of sequences in the list, or
 * -1 if logits are not finite. */
int64_t mt_engine_step(mt_engine *engine, mt_error *error);

/* Rank 0: the list after a step, in the order of arrival, and the owner of a sequence. */
const mt_sequence *mt_engine_sequences(const mt_engine *engine, int64_t *count);
void *mt_engine_owner(const mt_engine *engine, int64_t index);

/* Rank 0: owners in [from, to) are about to be freed; their sequences, which have ended, have none. */
void mt_engine_disown(mt_engine *engine, const void *from, const void *to);

/* Rank 0: releases the other ranks. Others: follow rank 0 until then; -1 on the error that rank 0 also got. */
void mt_engine_stop(mt_engine *engine);
int mt_engine_follow(mt_engine *engine, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
