/* profile.h: where the time of a training step goes. */
#ifndef MT_PROFILE_H
#define MT_PROFILE_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every operation of a backend, as MT_OPERATION_linear_forward. */
typedef enum mt_operation {
#define MT_OPERATION_NAME(name, ...) MT_OPERATION_##name,
    MT_ALL_OPERATIONS(MT_OPERATION_NAME)
#undef MT_OPERATION_NAME
        MT_NUM_OPERATIONS
} mt_operation;

/* Sums over the profiled steps for one operation: its time on the device, and its least work: floating-point operations
 * of matrix products and attention, bytes read and written of all others. */
typedef struct mt_profile_row {
    const char *name;
    int64_t calls;
    double seconds, flops, bytes;
} mt_profile_row;

/* The purpose of communication. */
typedef enum mt_traffic {
    MT_TRAFFIC_NONE,       // not communication: the operation computes
    MT_TRAFFIC_TENSOR,     // activations within the tensor group
    MT_TRAFFIC_GRADIENTS,  // gradients summed over replicas
    MT_TRAFFIC_PARAMETERS, // parameters gathered from shards
    MT_TRAFFIC_CONTEXT,    // keys, values and heads within the context group
    MT_TRAFFIC_PIPELINE,   // messages between pipeline stages
    MT_TRAFFIC_EXPERT,     // tokens dispatched to experts
    MT_TRAFFIC_SUMS,       // losses and norms: few bytes, but the slowest rank delays all
    MT_NUM_TRAFFICS
} mt_traffic;

/* A time interval in which an operation of some kind runs. */
typedef struct mt_busy {
    double from, to;
    mt_traffic traffic;
} mt_busy;

/* Adds to each kind its exposed time: MT_TRAFFIC_NONE (computation) hides all others, and of several kinds at once the
 * first in the enumeration counts. So every instant belongs to at most one kind. */
void mt_traffic_expose(double exposed[MT_NUM_TRAFFICS], const mt_busy *busy, int64_t count);

/* Sums for one kind of communication; row MT_TRAFFIC_NONE holds the computation. */
typedef struct mt_profile_traffic {
    int64_t calls;
    double seconds, exposed; // of all calls; the part of them that mt_traffic_expose counts
    double bytes;
} mt_profile_traffic;

typedef struct mt_profile {
    const char *backend; // name of the timed operations' backend; NULL: no profile was opened
    int64_t steps;       // without the first, which touches memory and selects algorithms
    double seconds;
    mt_profile_row rows[MT_NUM_OPERATIONS];      // by mt_operation
    mt_profile_traffic traffic[MT_NUM_TRAFFICS]; // by mt_traffic
} mt_profile;

/* Returns a table with the operations of `ops`, timed in the steps of the profile. There is one profile per process,
 * because operations have no context argument; opening it starts a new one. */
const mt_ops *mt_profile_open(const mt_ops *ops);
void mt_profile_close(void);

/* Around a training step that is to be recorded. The device is idle at its end; a GPU's times are read only then. */
void mt_profile_step_begin(void);
void mt_profile_step_end(void);

/* The sums so far. */
const mt_profile *mt_profile_read(void);

/* The least work of a call: floating-point operations of a product, or bytes read and written, or bytes sent. */
typedef struct mt_work {
    double flops, bytes;
    mt_traffic traffic;
    bool is_nothing;       // a collective of one rank: not recorded
    const mt_group *group; // of a collective or a message; else NULL
} mt_work;

/* The functions that the work of the operations in megatron.h calls. A product of M x K by K x N; elements read and
 * written; attention, whose pairs of a query and a key that it sees take over_d products of D channels and over_dv of
 * Dv; the heads of latent attention; the scores of an indexer, and attention over the keys that it selects; elements
 * that a rank sends. */
mt_work mt_work_product(int64_t M, int64_t N, int64_t K);
mt_work mt_work_bytes(int64_t elements, mt_dtype dtype);
mt_work mt_work_attention(const mt_attention *attention, int over_d, int over_dv);
mt_work mt_work_latent_heads(const mt_latent_heads_args *args, mt_dtype dtype);
mt_work mt_work_indexer(const mt_indexer_args *args, int passes);
mt_work mt_work_sparse_attention(const mt_sparse_attention *args, int over_d, int over_dv);
mt_work mt_work_sent(mt_operation operation, int64_t elements, mt_dtype dtype, const mt_group *group);

/* Key rows or query rows of all spans; elements of counts[group size] that go to other ranks. */
int64_t mt_span_rows(const mt_spans *spans, bool of_keys);
int64_t mt_sent_to_others(const int64_t *counts, const mt_group *group);

/* A recorded call of an operation. Times are those of mt_time(). */
typedef struct mt_profile_call {
    mt_operation operation;
    mt_work work;
    int64_t phase;           // index of its phase; -1: none
    const mt_stream *stream; // that it ended on
    int64_t message;         // of a channel: a number that both ends know; else -1
    bool sends;              // the message leaves this rank
    double from, to;
} mt_profile_call;

/* A recorded phase of a step (mt_phase_begin_fn). */
typedef struct mt_profile_phase {
    const char *name;
    int64_t micro_batch, chunk; // -1: none
    double from, to;
} mt_profile_phase;

/* The step that was recorded last; valid until the next one. */
typedef struct mt_profile_step {
    double begin, end;
    const mt_profile_call *calls;
    const mt_profile_phase *phases;
    int64_t num_calls, num_phases;
} mt_profile_step;
const mt_profile_step *mt_profile_last_step(void);

/* Prints the operations by time, with their work, and their rates relative to those of a large matrix product of this
 * type and of a large copy. A rate above 100% comes from a cache, or from an operation that only reads or only writes.
 * The two reference rates are measured now: every rank calls it at once, because all ranks shared the machine in
 * training; a rank whose `file` is NULL prints nothing. It takes 768 MiB of memory, so destroy the model first. */
void mt_profile_print(mt_dtype dtype, FILE *file);

/* Floating-point operations per second of an n x n matrix product on the CPU, best of a few runs. */
double mt_cpu_matmul_rate(int64_t n);

/* Prints the exposed communication of rank 0, and of the rank that computes longest, and the range of step times over
 * the ranks. Every rank calls it; a rank whose `file` is NULL prints nothing, and neither does a job of one rank. */
void mt_profile_print_communication(const mt_grid *grid, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
