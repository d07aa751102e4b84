/* planner.h: the layouts of a model on GPUs that are not there, timed by simulation (simulate.h). */
#ifndef MT_PLANNER_H
#define MT_PLANNER_H

#include "simulate.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --plan-explain: prints the step of finished options on options->gpus GPUs: its time by part, its memory, and its
 * operations by time: calls, shape, bytes, group, time of a call and of all, and for communication the operations
 * behind which it is hidden. */
int mt_plan_explain(const mt_options *options, FILE *file, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
