/* writer.h: the thread that writes answers: texts, stop strings, JSON, streams. The thread that owns the generator
 * gives it tokens, and never waits for it or for a client: where the writer holds the lock, tokens stay with their
 * owner until the next step. So an answer of a thousand log-probabilities, or a connection's thread that the system
 * stopped with a lock, costs no stream a step.
 *
 * A job belongs to the writer from mt_writer_end on. Before, its owner may read of it no more than its choices' `job`,
 * `index`, `seen` and `is_live`, its `number`, `arrived`, `num_choices` and `num_live`, and its exchange. */
#ifndef MT_WRITER_H
#define MT_WRITER_H

#include "counters.h"
#include "job.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_writer mt_writer;

/* NULL: no thread can be started. */
mt_writer *mt_writer_open(mt_counters *counters, mt_error *error);

/* Writes what it has, and ends. NULL is allowed. */
void mt_writer_close(mt_writer *writer);

/* The owner's calls; they take effect with mt_writer_flush. */

/* A new token of a choice, -1: none, and its end, if it ends. */
void mt_writer_token(mt_writer *writer, mt_choice *choice, int32_t token, mt_finish finish);

/* All of a job is given, or it ends before: 200, or the status and sentence of an error; 499: its client has gone. The
 * sentence is a literal, or lives as long as the writer. */
void mt_writer_end(mt_writer *writer, mt_job *job, int status, const char *message);

/* The seconds of a step, before its tokens, and the state after it, for the counters. */
void mt_writer_step(mt_writer *writer, double seconds);
void mt_writer_state(mt_writer *writer, const mt_gauges *gauges);

/* Hands all over. False: the writer holds the lock, and it stays here; with `waits`, or if too much stays, it waits. */
bool mt_writer_flush(mt_writer *writer, bool waits);

/* A choice that came to a stop string, by its job's number; index -1: nobody reads any choice of the job. */
typedef struct mt_stopped {
    int64_t number, index;
} mt_stopped;

/* Those since the last call of a flush that returned true; valid until the next flush. */
const mt_stopped *mt_writer_stopped(const mt_writer *writer, int64_t *count);

#ifdef __cplusplus
}
#endif
#endif
