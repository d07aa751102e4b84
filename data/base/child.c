/* child.c: a program that runs beside this one and is asked over two pipes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // environ, waitid
#endif
#include "child.h"

#include "../../megatron.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

/* A pipe that other programs do not inherit; the end `own` does not block. */
static int open_pipe(int ends[2], int own) {
    if (pipe(ends) != 0) return -1;
    for (int i = 0; i < 2; i++)
        if (fcntl(ends[i], F_SETFD, FD_CLOEXEC) != 0) return -1;
    return fcntl(ends[own], F_SETFL, O_NONBLOCK);
}

static void close_end(int *end) {
    if (*end >= 0) close(*end);
    *end = -1;
}

/* posix_spawn, since fork copies the page tables of a large process and MPI warns of it. */
static int spawn(mt_child *child, const char *program, char *const *arguments, int input, int output) {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none, defaults;
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    sigaddset(&defaults, SIGXFSZ);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    int status = posix_spawnp(&child->process, program, &files, &attributes, arguments, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (status != 0) child->process = 0;
    return status;
}

int mt_child_start(mt_child *child, const char *program, char *const *arguments) {
    int input[2] = {-1, -1}, output[2] = {-1, -1};
    int status = open_pipe(input, 1) != 0 || open_pipe(output, 0) != 0
                     ? errno
                     : spawn(child, program, arguments, input[0], output[1]);
    close_end(&input[0]);
    close_end(&output[1]);
    child->to = input[1], child->from = output[0];
    return status;
}

void mt_child_close_input(mt_child *child) {
    close_end(&child->to);
}

/* SIGPIPE is blocked in this thread, and one that came is taken. */
ssize_t mt_child_write(mt_child *child, const char *bytes, size_t count) {
    sigset_t pipe_signal, before, pending;
    int number;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
    sigpending(&pending);
    bool was_pending = sigismember(&pending, SIGPIPE);
    ssize_t written = write(child->to, bytes, count);
    bool closed = written < 0 && errno != EAGAIN && errno != EINTR;
    sigpending(&pending);
    if (!was_pending && sigismember(&pending, SIGPIPE)) sigwait(&pipe_signal, &number);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (closed) close_end(&child->to);
    return mt_max(written, 0);
}

int mt_child_end(mt_child *child, double seconds) {
    double until = mt_time() + seconds;
    int status = -1;
    siginfo_t info = {0};
    close_end(&child->to);
    close_end(&child->from);
    if (child->process == 0) return -1;
    while (waitid(P_PID, (id_t)child->process, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0 &&
           mt_time() < until)
        poll(NULL, 0, 10);
    bool ended = info.si_pid != 0;
    kill(-child->process, SIGKILL); // before its number becomes free
    if (!ended) kill(child->process, SIGKILL);
    while (waitpid(child->process, &status, 0) < 0 && errno == EINTR) continue;
    child->process = 0;
    return ended ? status : -1;
}
