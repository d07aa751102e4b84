/* job.h: a request at work: its choices, their texts and scores as tokens come, and the answers in the shapes that
 * clients of this interface expect. A thread of HTTP opens a job, the thread that owns the generator begins it, and the
 * writer's does all else (writer.h). */
#ifndef MT_JOB_H
#define MT_JOB_H

#include "../tokens/response.h"
#include "engine.h"
#include "http.h"
#include "request.h"
#include "scores.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A continuation of one of the request's prompts. */
typedef struct mt_choice {
    struct mt_job *job;
    int64_t index;
    mt_scores scores; // with mt_request.num_rivals >= 0
    int64_t *ends;    // [num_tokens] bytes of the text up to each token's end; NULL without a tokenizer
    int64_t ends_capacity;
    int64_t num_tokens; // of the prompt and new ones so far
    int32_t *tokens;    // [num_tokens]
    int64_t tokens_capacity;
    bool has_begun;                  // its prompt is read
    int64_t sent_tokens, sent_bytes; // of a stream: sent
    const char *finish;              // "stop", "length", "tool_calls"; NULL: it runs
    bool is_cut;                     // it ends before a stop string
    int64_t seen;                    // of the generator's owner: tokens of its sequence that the writer has got
    bool is_live;                    // likewise: the engine has its sequence
} mt_choice;

typedef struct mt_job {
    struct mt_job *next; // in a queue
    mt_exchange *exchange;
    mt_request request;
    const mt_service *service;
    mt_responses responses; // of the choices; without a tokenizer none
    mt_choice *choices;     // [num_choices]
    int64_t num_choices, num_finished;
    int64_t num_live;             // of the generator's owner: choices that the engine has
    int64_t number;               // in the answer's id
    int64_t created;              // seconds since 1970
    double arrived, began, first; // seconds of mt_time: of the request, its first step, its first token; 0: not yet
    int64_t new_tokens, prompt_tokens;
    bool has_news; // since the last mt_job_answer
    bool is_over;  // answered, or its client has gone
    bool has_head; // a stream has begun
} mt_job;

/* Takes over the exchange and the request, and makes the text of the prompts. */
mt_job *mt_job_open(mt_exchange *exchange, mt_request *request, const mt_service *service, int64_t number);
void mt_job_close(mt_job *job);

/* Gives its choices to the engine. */
void mt_job_begin(mt_job *job, mt_engine *engine);

/* Takes a new token of a choice, -1: none, and its end, if it ends. Returns true if the choice has ended, perhaps by a
 * stop string. Tokens behind its end have no effect. */
bool mt_job_advance(mt_choice *choice, int32_t token, mt_finish finish);

/* Sends what a stream is due, and the answer when all choices have ended. */
void mt_job_answer(mt_job *job);

/* Ends it with an error, in the stream if that has begun. */
void mt_job_fail(mt_job *job, int status, const char *message);

#ifdef __cplusplus
}
#endif
#endif
