/* report.h: reports of a training run: lines on the terminal, a metrics file, event files for TensorBoard. */
#ifndef MT_REPORT_H
#define MT_REPORT_H

#include "../datasets/dataset.h"
#include "../models/model_role.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file of records, opened for appending. */
typedef struct mt_report_file {
    int descriptor;
    bool failed;        // a failure was reported
    const char *option; // that named it; NULL: not open
    char path[4096];
} mt_report_file;

/* A further number of an iteration. */
enum { MT_MAX_REPORT_NUMBERS = 32 };
typedef struct mt_report_number {
    const char *name; // of a few words
    double value;
    bool on_line; // also on the terminal; false: in files only
} mt_report_number;

/* Rank 0 reports: one line per reported iteration on standard output; with --metrics one JSON object per line in a
 * file; with --tensorboard-dir events in a TensorBoard file. */
typedef struct mt_report {
    const mt_run_options *options;
    mt_report_file metrics, events;
    bool prints; // rank 0
    int world_size;
    int64_t first_iteration;
    int64_t device_bytes; // GPU memory that the model holds; 0 on the CPU, which reports the peak of the process
    double step_flops;    // of the samples of the last step; 0: those of mt_flops for sequences of --seq-length
    const mt_report_number *numbers; // [num_numbers] set by the caller; of each iteration
    int64_t num_numbers;
    const char *untrained;              // why the iteration has trained on nothing; NULL: it has
    const mt_loss_metric *loss_metrics; // of the model's loss; NULL: none
    double peak_flops;                  // of the device for the model's type, as its maker states; 0: unknown
    double start;
} mt_report;

/* Opens the files. A run that continues (state->iteration > 0) appends to its metrics file, after removing the records
 * of later iterations and a last line without an end. A new run refuses a file with content, unless options->overwrite
 * or options->auto_resume replaces it. Errors: that, a file with other lines than records, and a file that cannot be
 * opened. A later failure to write, such as a full disk, is reported once on standard error, and ends nothing. */
int mt_report_open(mt_report *report, const mt_model *model, const mt_run_options *options, const mt_run_state *state,
                   mt_error *error);
void mt_report_close(mt_report *report);

/* Before the first step, on rank 0: the operations of a step, if they would take longer than a minute at the rate of a
 * large matrix product, which is measured here on the CPU. */
void mt_report_long_step(const mt_report *report, const mt_run_state *state);

/* True if the step that ends at `iteration` is reported: every --log-interval iterations, and the last one. */
bool mt_report_is_due(const mt_report *report, int64_t iteration);

/* Reports the step that `state` counts as the last, if it is due. */
void mt_report_iteration(mt_report *report, const mt_run_state *state, const mt_metrics *metrics);

/* Reports the mean loss of "validation" or "test" after the steps that `state` counts. */
void mt_report_evaluation(mt_report *report, const mt_run_state *state, const char *split, double loss);

/* --log-straggler: if the step that `state` counts as the last is due, reports the slowest and the fastest rank in each
 * part of the step that the profile (profile.h) recorded last, and in waiting for samples. Every rank calls it. */
void mt_report_stragglers(mt_report *report, const mt_grid *grid, const mt_run_state *state, const mt_metrics *metrics);

/* --timing-log-level: if the step that `state` counts as the last is due, prints the times of its parts, and writes the
 * largest of all ranks as numbers. Every rank calls it. */
void mt_report_times(mt_report *report, const mt_grid *grid, const mt_run_state *state, const mt_metrics *metrics);

/* Ends the program on all ranks if one of them has refused the command: rank 0 prints the error of the first such rank,
 * with the options as the user named them. Every rank calls it with the status of the same check. */
void mt_report_refusal(mt_grid *grid, const mt_run_options *options, int status, mt_error *error);

/* Brings what was printed to the standard output. A full disk or closed pipe there must not end a run: the first
 * failure is reported on standard error. */
void mt_report_flush(void);

/* Prints a line on rank 0. */
void mt_report_line(const mt_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the paragraph at the start of a run: its model, weights, device, ranks, data (NULL: it trains no step), and
 * where it saves. `start`: where it begins (mt_checkpoint_peek). The options are finished, and `ops` is the backend
 * that will compute. */
void mt_report_opening(const mt_run_options *options, const mt_run_state *start, const mt_ops *ops, const mt_grid *grid,
                       const mt_dataset *data, FILE *file);

/* Prints the note of mt_backend_open, if there is one, on stderr of each rank. */
void mt_report_backend(const mt_grid *grid);

/* Prints the memory plan as a table: weights, gradients, optimizer, activations, caches. */
void mt_report_plan(const mt_model *model, FILE *file);

/* Prints the layout and memory plan of a role with a grid of its own, and the resting parts of any role; NULL: nowhere.
 */
void mt_report_role(const mt_model_role *role, FILE *file);

/* The first line of `infer`: the model, its folder, device and ranks, and the longest text. */
void mt_report_inference(const mt_model *model, const mt_run_options *options, int64_t context, FILE *file);

/* Prints one line per kind of group, and one for tensor groups, of attention and MLPs or of experts, that cross hosts.
 * hosts [world size]: the host of each rank, as of mt_grid_hosts; NULL: unknown. */
void mt_grid_print(const mt_grid *grid, const mt_options *options, const int *hosts, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
