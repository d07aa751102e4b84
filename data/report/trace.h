/* trace.h: the timeline of some training steps on every rank, as a file for chrome://tracing and ui.perfetto.dev
 * (Google, "Trace event format"). A rank is a process of the trace. Its threads are the phases of the step,
 * computation, and each kind of communication, with one more thread for each further stream. Times are those of rank
 * 0's clock. Where all ranks run on one host, "otherData" has the number of cores that they share. */
#ifndef MT_TRACE_H
#define MT_TRACE_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Begins the trace that options->trace and its steps describe, of the open profile (profile.h); `state` is the start of
 * the run. Errors: an unwritable file, a run that ends before the first step of the trace. Every rank calls it. There
 * is one trace per process. */
int mt_trace_open(const mt_run_options *options, const mt_grid *grid, const mt_run_state *state, mt_error *error);

/* Around every training step of the run; begin returns true if the profile must record this step: a step of the trace,
 * or the one before it, where the records get their memory. End keeps the step that the profile recorded. Both do
 * nothing where no trace is open. */
bool mt_trace_step_begin(void);
void mt_trace_step_end(void);

/* True from mt_trace_open to mt_trace_write; true once the last step of the trace is over. */
bool mt_trace_is_open(void);
bool mt_trace_is_complete(void);

/* Writes the records of all ranks to the file, and closes the trace. Every rank calls it. */
int mt_trace_write(mt_error *error);

/* Seconds to add to this rank's `clock` for rank 0's, from the fastest of several round trips of a message (Cristian,
 * "Probabilistic clock synchronization"); the error is less than half of that round trip. Every rank calls it. */
double mt_clock_offset(const mt_group *world, double (*clock)(void));

#ifdef __cplusplus
}
#endif
#endif
