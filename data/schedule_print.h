/* schedule_print.h: pipeline schedules as text and as pictures. */
#ifndef MT_SCHEDULE_PRINT_H
#define MT_SCHEDULE_PRINT_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --print-schedule: for finished options, prints the pipeline layout, the schedule in characters (one row per rank; a
 * forward and each part of a backward take one unit), peak live micro-batches and bubble. Draws the schedule into the
 * option's SVG file unless that is "-". An unwritable file is an error. */
int mt_schedule_print(const mt_options *options, FILE *file, mt_error *error);

/* Draws a timeline as SVG elements with its corner at (x, y) and `unit` pixels per unit of time: one row per rank, with
 * the rank on the left and its peak of live micro-batches on the right. */
void mt_timeline_draw(const mt_timeline *timeline, FILE *svg, double x, double y, double unit);

#ifdef __cplusplus
}
#endif
#endif
