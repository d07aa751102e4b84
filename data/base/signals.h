/* signals.h: signals that request a stop. */
#ifndef MT_SIGNALS_H
#define MT_SIGNALS_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The signals by the values of mt_exit_signal, and SIGHUP, that of a terminal that is closed. */
enum { MT_HANGUP = 4, MT_NUM_SIGNALS };

/* Seconds from a SIGTERM or SIGINT to Open MPI's mpirun until it kills its ranks; INFINITY if another launcher, or
 * none, started this process. A setting in mpirun's parameter files is not seen. */
double mt_launch_grace(void);

/* Catches SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and, unless nohup ignores it, SIGHUP from here on; before options are
 * parsed, so that none is lost. The second SIGTERM, SIGINT or SIGHUP, in any pair, ends the program at once; two within
 * a quarter of a second count as one. SIGXFSZ is ignored. */
void mt_signals_hold(void);

/* Sets the line that the first signal writes on standard error: for one that mpirun follows by a SIGKILL (`killed`),
 * and for all others. At first there is none. */
void mt_signals_note(const char *graceful, const char *killed);

/* Keeps catching the signals that request a stop. All others have their default effect again, also one that has come
 * already. If SIGHUP is among those kept, SIGPIPE is ignored, and a pipe of the standard output that nobody reads any
 * more requests a stop too; under nohup it requests none. */
void mt_signals_keep(const bool stops[MT_NUM_SIGNALS]);

/* True after a signal or a closed pipe that requests a stop. */
bool mt_stop_requested(void);

#ifdef __cplusplus
}
#endif
#endif
