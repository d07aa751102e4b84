/* report.h: what a run tells of its steps: on the terminal, in a metrics file, to TensorBoard. */
#ifndef MT_REPORT_H
#define MT_REPORT_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What rank 0 tells: a line an iteration on standard output, with --metrics an object a line in a file, and with
 * --tensorboard-dir events in a file of TensorBoard's. */
typedef struct mt_report {
    const mt_options *options;
    FILE *metrics, *events;
    bool prints;
    int world_size;
    int64_t first_iteration;
    int64_t device_bytes; // a GPU's memory that the run holds; 0 on the CPU, whose peak is asked for
    double peak_flops;    // of the device for this type, stated by its maker; 0: not known
    double start;
} mt_report;

/* Opens the files; a run that goes on from iteration > 0 appends to its metrics. An unwritable file is an error, here
 * and below. */
int mt_report_open(mt_report *report, const mt_model *model, const mt_run_state *state, mt_error *error);
void mt_report_close(mt_report *report);

/* Whether the step that ends at `iteration` is told: every --log-interval iterations, and the last. */
bool mt_report_is_due(const mt_report *report, int64_t iteration);

/* The step that `state` now counts, if it is due. */
int mt_report_iteration(const mt_report *report, const mt_run_state *state, const mt_metrics *metrics, mt_error *error);

/* The mean loss of "validation" or "test" after the steps that `state` counts. */
int mt_report_evaluation(const mt_report *report, const mt_run_state *state, const char *split, double loss,
                         mt_error *error);

/* --log-straggler, if the step that `state` now counts is due: of the slowest and the fastest rank in each part of the
 * step that the profile (profile.h) recorded last, and in waiting for samples. Every rank calls it. */
int mt_report_stragglers(const mt_report *report, const mt_grid *grid, const mt_run_state *state,
                         const mt_metrics *metrics, mt_error *error);

/* Any other line, on rank 0. */
void mt_report_line(const mt_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif
#endif
