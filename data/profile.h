/* profile.h: where the time of a training step goes, as a table and as a timeline. */
#ifndef MT_PROFILE_H
#define MT_PROFILE_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_operation {
#define MT_OPERATION_NAME(operation) MT_OPERATION_##operation,
    MT_ALL_OPERATIONS(MT_OPERATION_NAME)
#undef MT_OPERATION_NAME
        MT_NUM_OPERATIONS
} mt_operation;

/* Sums over the profiled steps for one operation: time on the device, and the least work that the arguments ask for,
 * which is floating-point operations for matrix products and attention and bytes read and written for the others. */
typedef struct mt_profile_row {
    const char *name;
    int64_t calls;
    double seconds, flops, bytes;
} mt_profile_row;

/* What communication is for. */
typedef enum mt_traffic {
    MT_TRAFFIC_NONE,       // an operation that computes
    MT_TRAFFIC_TENSOR,     // activations within the tensor group
    MT_TRAFFIC_GRADIENTS,  // sums over replicas
    MT_TRAFFIC_PARAMETERS, // shards to wholes
    MT_TRAFFIC_CONTEXT,    // keys, values and heads within the context group
    MT_TRAFFIC_PIPELINE,   // messages between stages
    MT_TRAFFIC_EXPERT,     // tokens to experts
    MT_TRAFFIC_SUMS,       // losses and norms: a few bytes, and waiting for the slowest rank
    MT_NUM_TRAFFICS
} mt_traffic;

/* An operation of some kind, from when to when. */
typedef struct mt_busy {
    double from, to;
    mt_traffic traffic;
} mt_busy;

/* Adds to each kind the time in which nothing hides it: MT_TRAFFIC_NONE, what computes, hides all the others, and of
 * several kinds at once the first one counts. So no instant is in two kinds. */
void mt_traffic_expose(double exposed[MT_NUM_TRAFFICS], const mt_busy *busy, int64_t count);

/* Sums for one kind of communication; the row of MT_TRAFFIC_NONE is for what computes. */
typedef struct mt_profile_traffic {
    int64_t calls;
    double seconds, exposed; // of all calls together; of that, what mt_traffic_expose says
    double bytes;
} mt_profile_traffic;

typedef struct mt_profile {
    int64_t steps; // without the first, in which memory is touched and algorithms are chosen
    double seconds;
    mt_profile_row rows[MT_NUM_OPERATIONS];      // by mt_operation
    mt_profile_traffic traffic[MT_NUM_TRAFFICS]; // by mt_traffic
} mt_profile;

/* A table whose operations are those of `ops` and are timed in the steps of the profile. There is one profile a
 * process, because operations have no context; to open begins it anew. */
const mt_ops *mt_profile_open(const mt_ops *ops);
void mt_profile_close(void);

/* Around one training step, at whose end the device is idle. A GPU's times are read only then. */
void mt_profile_step_begin(void);
void mt_profile_step_end(void);

/* This rank's seconds in the step that was recorded last, by part of the step: an operation that communicates counts as
 * communication, any other by its phase. MT_PART_DATA is not measured here and stays as it is. */
typedef enum mt_profile_part {
    MT_PART_DATA,
    MT_PART_FORWARD,
    MT_PART_BACKWARD,
    MT_PART_OPTIMIZER,
    MT_PART_COMMUNICATION,
    MT_NUM_PARTS
} mt_profile_part;
void mt_profile_parts(double parts[MT_NUM_PARTS]);

/* The sums so far. */
const mt_profile *mt_profile_read(void);

/* Prints the operations by time, with their rates as parts of what a large matrix product of this type and a large copy
 * reach; over 100% works in a cache, or spares a copy's reading of what it overwrites. These are measured now: with
 * several ranks, all call it at once, as they trained at once, and those whose `file` is NULL print nothing. It takes
 * 768 MiB of memory for the moment, so the model is better gone. */
void mt_profile_print(mt_dtype dtype, FILE *file);

/* Prints how much of the communication of rank 0, and of the rank that computes longest, is exposed, and how far step
 * times differ between ranks. Every rank calls it; those whose `file` is NULL print nothing, and neither does a job of
 * one rank. */
void mt_profile_print_communication(const mt_grid *grid, FILE *file);

/* ---- a trace: the timeline of some steps on every rank, in the format of chrome://tracing and ui.perfetto.dev
 * (Google, "Trace event format"). A process is a rank; its threads are the step's phases, what computes, and each kind
 * of communication, one more for every further stream. Times are those of rank 0's clock. */

/* Begins the trace that the options ask for of a profile that is open; `state` is where the run starts. Without
 * --profile only the trace's steps, and one to warm up, are timed. Errors: a file that cannot be written, a run that
 * ends before the first step. Every rank calls it. */
int mt_trace_open(const mt_options *options, const mt_grid *grid, const mt_run_state *state, mt_error *error);

/* Whether steps are still to be recorded or written, so that each goes between mt_profile_step_begin and _end; and
 * whether the last one was recorded. */
bool mt_trace_is_open(void);
bool mt_trace_is_complete(void);

/* Writes what was recorded, of all ranks, to the file, which takes its place when it is whole. Every rank calls it. */
int mt_trace_write(mt_error *error);

/* Seconds to add to this rank's `clock` to have rank 0's, by the quickest of several messages there and back; all ranks
 * call it (Cristian, "Probabilistic clock synchronization"). Wrong by less than half the time of that message. */
double mt_clock_offset(const mt_group *world, double (*clock)(void));

#ifdef __cplusplus
}
#endif
#endif
