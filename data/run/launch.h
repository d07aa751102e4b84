/* launch.h: how a run starts and stops: other launchers, the ranks that launch.sh starts, signals. */
#ifndef MT_LAUNCH_H
#define MT_LAUNCH_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first call of a program: starts it anew, once, so that OpenMP threads without work sleep soon. Not if the user
 * set OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME, or OMP_NUM_THREADS=1. `argv` is main's. */
void mt_launch_threads(char **argv);

/* An error with the command to use if torchrun or its like started several processes of this program, which would not
 * know one another, or if OMP_NUM_THREADS is out of all proportion. `argv` is main's. */
int mt_launch_check(char **argv, mt_error *error);

/* Prints one line with the answer to each variable NVTE_* of Transformer Engine that is set. */
void mt_launch_answer_environment(FILE *file);

/* For launch.sh: prints "ranks N", the largest number up to options->print_launch that can run these parsed options,
 * and with --gpu fits its memory by the simulated plan, then global_batch_size, device, exit_signal and save, a line
 * each. Without --global-batch-size other numbers would be another run, so only print_launch itself is tried. Returns
 * the error of that number if none can. */
int mt_launch_print(mt_run_options *options, FILE *file, mt_error *error);

/* A paragraph on that for a run with --save under mpirun, unless --exit-signal already is a signal that mpirun passes
 * on without killing. */
void mt_launch_print_grace(const mt_run_options *options, FILE *file);

/* Once options are parsed: SIGTERM, SIGINT, SIGHUP and --exit-signal request a stop, under mpirun also SIGUSR1 if
 * --exit-signal is absent. All other signals have their default effect again, also one that has come already. So have
 * these with --no-exit-signal-handler and in a run that only prints. In other runs a pipe of the standard output that
 * nobody reads any more (of head, or of a tee that Ctrl-C ended) requests a stop, as a closed terminal does; under
 * nohup such a run goes on without output. */
void mt_signals_select(const mt_run_options *options);

/* For the line that the first signal writes on standard error of rank 0: the iteration of the last checkpoint, -1: none
 * yet. */
void mt_signals_set_saved(const mt_run_options *options, int64_t iteration);

#ifdef __cplusplus
}
#endif
#endif
