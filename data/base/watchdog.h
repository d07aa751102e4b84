/* watchdog.h: ends the job if a rank waits too long for other ranks or for a file. The limit depends on the phase:
 * START: options->distributed_timeout_minutes; STEP: distributed_timeout_seconds; SAVE: save_timeout_seconds. */
#ifndef MT_WATCHDOG_H
#define MT_WATCHDOG_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_watch_phase { MT_WATCH_START, MT_WATCH_STEP, MT_WATCH_SAVE, MT_WATCH_PHASES } mt_watch_phase;

/* Sets megatron.h's mt_watch; before mt_grid_start, with parsed options. train, infer and mt_hf_open call it. In a job
 * of several ranks the watchdog runs until mt_grid_clear of the last grid: with a launcher of MPI from here on, in
 * phase START, else from mt_grid_build on, in phase STEP. */
void mt_watch_start(const mt_options *options, const mt_strings *typed_names);

/* Sets the phase of this rank and returns the one before; for the main thread. */
mt_watch_phase mt_watch_enter(mt_watch_phase phase);

/* Called around reading or writing a file, by any thread. Saving has its own limit, also where it overlaps with steps;
 * other reads and writes have that of the phase. The path must stay valid. */
typedef enum mt_file_use { MT_FILE_READ, MT_FILE_WRITE, MT_FILE_SAVE } mt_file_use;
int mt_watch_file_begin(const char *path, mt_file_use use);
void mt_watch_file_end(int file);

#ifdef __cplusplus
}
#endif
#endif
