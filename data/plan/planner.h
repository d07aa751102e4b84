/* planner.h: the layouts of a model on GPUs that are not there, timed by simulation (simulate.h). */
#ifndef MT_PLANNER_H
#define MT_PLANNER_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --plan: prints the ten fastest layouts for parsed options, not finished, on options->gpus GPUs: time by part, memory
 * by row, speed, and the options to add. */
int mt_plan_print(const mt_run_options *options, FILE *file, mt_error *error);

/* False with error if finished options need more memory than a GPU of options->gpu has. True also where this cannot be
 * known: in fp32, or for a machine's file that cannot be read. */
bool mt_plan_has_room(const mt_run_options *options, int64_t ranks, mt_error *error);

/* --explain: prints the step of options that are finished for so many ranks, each with a GPU of options->gpu: the time
 * by part of a pipeline rank (--explain-rank), memory, options without an effect, and the rank's operations by time:
 * calls, shape, bytes, group, time of a call and of all, and for communication the operations that hide it. */
int mt_plan_explain(const mt_run_options *options, int64_t ranks, FILE *file, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
