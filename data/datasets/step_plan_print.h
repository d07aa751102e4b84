/* step_plan_print.h: the blocks of dynamic context parallelism, as text and as a picture. */
#ifndef MT_STEP_PLAN_PRINT_H
#define MT_STEP_PLAN_PRINT_H

#include "packing.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --print-schedule with --dynamic-context-parallel: prints the blocks of ranks of a step, one row per rank and time
 * from left to right. Draws the step into an SVG file, unless `path` is "-": a box for each sample, as high as its
 * ranks. */
int mt_step_plan_print(const mt_step_plan *plan, bool meets, const char *path, FILE *file, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
