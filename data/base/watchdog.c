/* watchdog.c: a thread that checks how long this rank has waited for an operation or a file. If one rank hangs, all
 * others wait; each prints a line and ends the job, so the rank without a line is the faulty one. A rank whose disk
 * hangs names the file. A static object, because ops have no context. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // clock_gettime
#endif
#include "watchdog.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MT_WATCHED_FILES = 16 }; // at once; more are not watched

static const struct {
    const char *during, *option;
} mt_watchdog_phases[] = {[MT_WATCH_START] = {"the start", "distributed-timeout-minutes"},
                          [MT_WATCH_STEP] = {"a step", "distributed-timeout-seconds"},
                          [MT_WATCH_SAVE] = {"a save", "save-timeout-seconds"}};

static struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t stops;
    bool running, stopping;
    int grids; // of several ranks that are built
    int rank;
    mt_watch_phase phase;
    double limits[MT_WATCH_PHASES], since;   // seconds
    char options[MT_WATCH_PHASES][300];      // that set the limits, as the user named them
    const char *operation, *group;           // that this rank waits for; NULL: none
    const char *last_operation, *last_group; // enqueued last on a device
    struct {
        const char *path; // NULL: unused
        mt_file_use use;
        double since;
    } files[MT_WATCHED_FILES];
} mt_watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER, .stops = PTHREAD_COND_INITIALIZER};

static void mt_watchdog_begin(const char *operation, const char *group) {
    if (!mt_watchdog.running) return;
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watchdog.operation = operation, mt_watchdog.group = group;
    mt_watchdog.since = mt_time();
    pthread_mutex_unlock(&mt_watchdog.lock);
}

static void mt_watchdog_end(void) {
    if (!mt_watchdog.running) return;
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watchdog.operation = NULL;
    pthread_mutex_unlock(&mt_watchdog.lock);
}

static void mt_watchdog_note(const char *operation, const char *group) {
    if (!mt_watchdog.running) return;
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watchdog.last_operation = operation, mt_watchdog.last_group = group;
    pthread_mutex_unlock(&mt_watchdog.lock);
}

/* Ends the job after a message. Other ranks get a second to print theirs. */
static void mt_watchdog_abort(void) {
    sleep(1);
    alarm(10); // in case MPI_Abort hangs
    mt_job_abort();
    _exit(1);
}

/* An operation took too long: prints it and ends the job. */
static void mt_watchdog_expire(void) {
    char last[160] = "";
    if (mt_watchdog.last_operation)
        snprintf(last, sizeof last, " (enqueued last: %s in group %s)", mt_watchdog.last_operation,
                 mt_watchdog.last_group);
    fprintf(stderr,
            "error: rank %d waited more than %g s for %s%s%s%s during %s: a rank without this message %shangs or is "
            "far behind; %s sets the limit\n",
            mt_watchdog.rank, mt_watchdog.limits[mt_watchdog.phase], mt_watchdog.operation,
            mt_watchdog.group ? " in group " : "", mt_watchdog.group ? mt_watchdog.group : "", last,
            mt_watchdog_phases[mt_watchdog.phase].during,
            mt_watchdog.phase == MT_WATCH_START ? "has not started, " : "", mt_watchdog.options[mt_watchdog.phase]);
    mt_watchdog_abort();
}

static void mt_watchdog_check_files(double now) {
    for (int i = 0; i < MT_WATCHED_FILES; i++) {
        mt_file_use use = mt_watchdog.files[i].use;
        mt_watch_phase phase = use == MT_FILE_SAVE ? MT_WATCH_SAVE : mt_watchdog.phase;
        if (!mt_watchdog.files[i].path || now - mt_watchdog.files[i].since <= mt_watchdog.limits[phase]) continue;
        fprintf(stderr,
                "error: rank %d waited more than %g s for the disk to %s %s during %s: the disk hangs or is very slow; "
                "%s sets the limit\n",
                mt_watchdog.rank, mt_watchdog.limits[phase], use == MT_FILE_READ ? "read" : "write",
                mt_watchdog.files[i].path, mt_watchdog_phases[phase].during, mt_watchdog.options[phase]);
        mt_watchdog_abort();
    }
}

static void *mt_watchdog_run(void *unused) {
    (void)unused;
    double looked = mt_time();
    pthread_mutex_lock(&mt_watchdog.lock);
    while (!mt_watchdog.stopping) {
        struct timespec next;
        clock_gettime(CLOCK_REALTIME, &next);
        next.tv_nsec += 250000000;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&mt_watchdog.stops, &mt_watchdog.lock, &next);
        double now = mt_time(), slept = now - looked;
        looked = now;
        if (slept > 1) { // this process was suspended
            mt_watchdog.since = fmin(now, mt_watchdog.since + slept);
            for (int i = 0; i < MT_WATCHED_FILES; i++)
                mt_watchdog.files[i].since = fmin(now, mt_watchdog.files[i].since + slept);
        }
        mt_watchdog_check_files(now);
        if (mt_watchdog.operation && now - mt_watchdog.since > mt_watchdog.limits[mt_watchdog.phase])
            mt_watchdog_expire();
    }
    pthread_mutex_unlock(&mt_watchdog.lock);
    return NULL;
}

/* Sets the limits, and starts the thread in a phase if it does not run. */
static void mt_watchdog_open(const mt_options *o, int rank, mt_watch_phase phase) {
    sigset_t all, old; // signals go to the main thread
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watchdog.rank = rank;
    mt_watchdog.limits[MT_WATCH_START] = 60 * o->distributed_timeout_minutes;
    mt_watchdog.limits[MT_WATCH_STEP] = (double)o->distributed_timeout_seconds;
    mt_watchdog.limits[MT_WATCH_SAVE] = (double)o->save_timeout_seconds;
    pthread_mutex_unlock(&mt_watchdog.lock);
    if (mt_watchdog.running) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    mt_watchdog.phase = phase, mt_watchdog.stopping = false;
    mt_watchdog.operation = mt_watchdog.last_operation = NULL;
    mt_watchdog.running = pthread_create(&mt_watchdog.thread, NULL, mt_watchdog_run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!mt_watchdog.running) mt_die("the watchdog's thread cannot be started");
}

/* Stops the thread once no grid is left. */
static void mt_watchdog_stop(bool built) {
    if (built) mt_watchdog.grids--;
    if (!mt_watchdog.running || mt_watchdog.grids > 0) return;
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watchdog.stopping = true;
    pthread_cond_signal(&mt_watchdog.stops);
    pthread_mutex_unlock(&mt_watchdog.lock);
    pthread_join(mt_watchdog.thread, NULL);
    mt_watchdog.running = false;
}

/* From mt_grid_build, with several ranks. The first grid's options set the limits. */
static void mt_watchdog_grid(const mt_options *options, int rank) {
    if (mt_watchdog.grids++ == 0) mt_watchdog_open(options, rank, MT_WATCH_STEP);
}

/* The names of the options that set the limits, as the user typed them. */
static void mt_watchdog_name_options(const mt_strings *typed) {
    pthread_mutex_lock(&mt_watchdog.lock);
    for (int p = 0; p < MT_WATCH_PHASES; p++) {
        const char *option = mt_watchdog_phases[p].option, *name = NULL;
        for (int64_t i = 0; i < typed->count; i += 2)
            if (strcmp(typed->items[i], option) == 0) name = typed->items[i + 1];
        snprintf(mt_watchdog.options[p], sizeof mt_watchdog.options[p], "%s%.280s", name ? "" : "--",
                 name ? name : option);
    }
    pthread_mutex_unlock(&mt_watchdog.lock);
}

void mt_watch_start(const mt_options *options, const mt_strings *typed_names) {
    static const mt_watch_hooks hooks = {mt_watchdog_grid, mt_watchdog_stop, mt_watchdog_begin, mt_watchdog_end,
                                         mt_watchdog_note};
    bool limited = options->distributed_timeout_minutes > 0; // mt_options_finish will refuse other values
    mt_watch = &hooks;
    mt_watchdog_name_options(typed_names);
    if (limited && mt_launched_by_mpi()) mt_watchdog_open(options, mt_launch_rank(), MT_WATCH_START);
}

int mt_watch_file_begin(const char *path, mt_file_use use) {
    int file = 0;
    if (!mt_watchdog.running) return MT_WATCHED_FILES;
    pthread_mutex_lock(&mt_watchdog.lock);
    while (file < MT_WATCHED_FILES && mt_watchdog.files[file].path) file++;
    if (file < MT_WATCHED_FILES) {
        mt_watchdog.files[file].path = path, mt_watchdog.files[file].use = use;
        mt_watchdog.files[file].since = mt_time();
    }
    pthread_mutex_unlock(&mt_watchdog.lock);
    return file;
}

void mt_watch_file_end(int file) {
    if (file >= MT_WATCHED_FILES) return;
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watchdog.files[file].path = NULL;
    pthread_mutex_unlock(&mt_watchdog.lock);
}

mt_watch_phase mt_watch_enter(mt_watch_phase phase) {
    pthread_mutex_lock(&mt_watchdog.lock);
    mt_watch_phase before = mt_watchdog.phase;
    mt_watchdog.phase = phase;
    pthread_mutex_unlock(&mt_watchdog.lock);
    return before;
}
