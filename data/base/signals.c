/* signals.c: signals that request a stop. */
#include "signals.h"

#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Those of --exit-signal, and that of a terminal that is closed. */
static const int mt_signals[MT_NUM_SIGNALS] = {[MT_EXIT_SIGTERM] = SIGTERM,
                                               [MT_EXIT_SIGINT] = SIGINT,
                                               [MT_EXIT_SIGUSR1] = SIGUSR1,
                                               [MT_EXIT_SIGUSR2] = SIGUSR2,
                                               [MT_HANGUP] = SIGHUP};
static volatile sig_atomic_t mt_signal_counts[MT_NUM_SIGNALS];
static volatile sig_atomic_t mt_signal_ends;  // a first SIGTERM, SIGINT or SIGHUP came
static volatile sig_atomic_t mt_signal_noted; // its line is written
static bool mt_output_is_watched;             // a closed pipe of the standard output requests a stop
static double mt_signal_first;                // when it came
static double mt_signal_grace;                // mt_launch_grace's

/* The line of the first signal: for one that mpirun follows by a SIGKILL, and for all others. The handler reads the
 * pair that is not being written. */
static char mt_signal_notes[2][2][400];
static volatile sig_atomic_t mt_signal_note;

enum { MT_KILLED, MT_GRACEFUL };

double mt_launch_grace(void) {
    static const char *const names[] = {"OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"};
    if (!getenv("OMPI_COMM_WORLD_SIZE")) return INFINITY;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return atof(getenv(names[i]));
    return 1;
}

void mt_signals_note(const char *graceful, const char *killed) {
    int next = !mt_signal_note;
    char(*notes)[400] = mt_signal_notes[next];
    snprintf(notes[MT_GRACEFUL], sizeof notes[0], "%s", graceful);
    snprintf(notes[MT_KILLED], sizeof notes[0], "%s", killed);
    mt_signal_note = next;
}

/* Only async-signal-safe calls. timeout(1), a terminal whose launcher forwards Ctrl-C, and systemd send one request
 * twice within a moment. */
static void mt_signal_count(int number) {
    const double moment = 0.25;
    bool ends = number == SIGTERM || number == SIGINT || number == SIGHUP;
    int i = 0;
    while (mt_signals[i] != number) i++;
    mt_signal_counts[i] = mt_signal_counts[i] + 1;
    if (ends && !mt_signal_ends) {
        mt_signal_first = mt_time();
        mt_signal_ends = true;
    } else if (ends && mt_time() - mt_signal_first > moment) {
        sigset_t all;
        sigemptyset(&all);
        signal(number, SIG_DFL);
        sigprocmask(SIG_SETMASK, &all, NULL);
        raise(number);
        _exit(128 + number); // the first process of a container, which signals do not end
    }
    const char *note = mt_signal_notes[mt_signal_note][ends && isfinite(mt_signal_grace) ? MT_KILLED : MT_GRACEFUL];
    if (mt_signal_noted || !*note) return;
    mt_signal_noted = true;
    if (isatty(STDERR_FILENO)) (void)!write(STDERR_FILENO, "\n", 1);
    (void)!write(STDERR_FILENO, note, strlen(note));
}

/* On a stack of its own: oneDNN 2.6 keeps values of a product below the stack pointer, where the frame of a handler on
 * the stack of the thread would overwrite them; its next stores then went anywhere. */
static void mt_signal_catch(int number, int flags) {
    static char stack[1 << 16]; // a frame with all registers of AVX-512 and AMX takes 11 kB
    const stack_t apart = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = mt_signal_count, .sa_flags = flags | SA_ONSTACK};
    sigaltstack(&apart, NULL);
    for (int i = 0; i < MT_NUM_SIGNALS; i++) sigaddset(&action.sa_mask, mt_signals[i]);
    sigaction(number, &action, NULL);
}

/* True for the signal of a closed terminal under nohup. */
static bool mt_signal_is_ignored(int number) {
    struct sigaction action;
    return number == SIGHUP && sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

void mt_signals_hold(void) {
    mt_signal_grace = mt_launch_grace();
    for (int i = 0; i < MT_NUM_SIGNALS; i++)
        if (!mt_signal_is_ignored(mt_signals[i])) mt_signal_catch(mt_signals[i], SA_RESTART);
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit is then a write error
}

void mt_signals_keep(const bool stops[MT_NUM_SIGNALS]) {
    mt_output_is_watched = stops[MT_HANGUP] && !mt_signal_is_ignored(SIGHUP);
    if (stops[MT_HANGUP]) signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < MT_NUM_SIGNALS; i++) {
        if (mt_signal_is_ignored(mt_signals[i])) continue;
        if (stops[i]) {
            mt_signal_catch(mt_signals[i], 0); // ends a print to a terminal that an ending mpirun no longer reads
            continue;
        }
        signal(mt_signals[i], SIG_DFL);
        if (mt_signal_counts[i] > 0) raise(mt_signals[i]);
        mt_signal_counts[i] = 0;
    }
}

/* True once nobody reads the pipe of the standard output any more; the first time, says so. Not every closed pipe is
 * the user's wish to stop: Ctrl-C ends the tee behind a run before the run has saved. */
static bool mt_output_is_closed(void) {
    static bool closed;
    struct pollfd output = {.fd = STDOUT_FILENO};
    if (closed || !mt_output_is_watched) return closed;
    closed = poll(&output, 1, 0) > 0 && (output.revents & POLLERR) != 0;
    const char *note = mt_signal_notes[mt_signal_note][MT_GRACEFUL];
    if (!closed || mt_signal_noted || !*note) return closed;
    mt_signal_noted = true;
    fprintf(stderr, "nobody reads the standard output any more: %s", note);
    return true;
}

bool mt_stop_requested(void) {
    bool any = mt_output_is_closed();
    for (int i = 0; i < MT_NUM_SIGNALS; i++) any = any || mt_signal_counts[i] > 0;
    return any;
}
