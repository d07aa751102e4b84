/* timeline.h: pipeline schedules in simulated time, as text and as pictures. */
#ifndef MT_TIMELINE_H
#define MT_TIMELINE_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Durations of the actions of one chunk, in any unit of time; `send`: from a send to the moment when its receiver may
 * continue. A whole backward takes both parts. */
typedef struct mt_action_costs {
    double forward, backward_input, backward_weight, send;
} mt_action_costs;

/* A simulation: the lists of all ranks, each action run as early as possible. Rank r has actions [first[r], first[r +
 * 1]). */
typedef struct mt_timeline {
    mt_schedule schedule;
    int64_t *first; // [pp + 1]
    mt_action *actions;
    double *start, *end; // of each action; a receive lasts while the rank waits, a send takes no time
    int64_t *live;       // [pp] peak number of (micro-batch, chunk) pairs whose activations the rank holds: from the
                         // forward to the end of the backward, including its weights' part; 0 for forward-only
    double span;         // end of the last action
    double bubble;       // idle time divided by work, over all ranks
} mt_timeline;

/* Simulates a schedule. Each rank has at most `in_flight` messages per direction that are sent and not yet received;
 * the next send waits (0: no limit). Returns -1 on a deadlock. There is none with in_flight == 0, with in_flight >= 1
 * (vp == 1), or with in_flight >= group - pp + 1 (vp > 1): senders' buffers and posted receives together must hold that
 * many messages. Free the timeline in either case. */
int mt_timeline_create(mt_timeline *timeline, const mt_schedule *schedule, const mt_action_costs *costs,
                       int64_t in_flight);
/* The same with costs[rank * vp + chunk] for every stage; `send` is that of the sender's stage. */
int mt_timeline_create_uneven(mt_timeline *timeline, const mt_schedule *schedule, const mt_action_costs *costs,
                              int64_t in_flight);
void mt_timeline_free(mt_timeline *timeline);

/* --print-schedule: for finished options, prints the pipeline layout, the schedule in characters (one row per rank; a
 * forward and each part of a backward take one unit), peak live micro-batches and bubble. Draws the schedule into the
 * option's SVG file unless that is "-". An unwritable file is an error. */
int mt_schedule_print(const mt_run_options *options, FILE *file, mt_error *error);

/* Draws a timeline as SVG elements with its corner at (x, y) and `unit` pixels per unit of time: one row per rank, with
 * the rank on the left and its peak of live micro-batches on the right. */
void mt_timeline_draw(const mt_timeline *timeline, FILE *svg, double x, double y, double unit);

#ifdef __cplusplus
}
#endif
#endif
