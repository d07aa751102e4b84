/* python.c: starts programs in Python. */
#include "python.h"
#include "signals.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Starts the program in this Python. Returns 1 where that lacks a package or is absent. */
static int start_in(mt_child *child, const char *python, const char *program, const char *argument, const char *path,
                    const char *purpose, mt_error *error) {
    char *const arguments[] = {(char *)python, "-c", (char *)program, (char *)argument, NULL};
    int number = mt_child_start(child, python, arguments);
    if (number != 0) mt_child_end(child, 0);
    if (number == ENOENT || number == ENOTDIR || number == EACCES) return 1;
    if (number != 0)
        return mt_error_set(error, "%s: %s cannot be started to %s: %s", path, python, purpose, strerror(number));
    char first = 0;
    struct pollfd from = {child->from, POLLIN, 0};
    double until = mt_time() + MT_PYTHON_WAIT;
    while (mt_time() < until && !mt_stop_requested() && poll(&from, 1, 1000) <= 0) continue;
    if (mt_stop_requested()) {
        mt_child_end(child, 0);
        return mt_error_set(error, "%s: a signal ended the run while %s was to %s", path, python, purpose);
    }
    if (read(child->from, &first, 1) == 1 && first == '\n') return 0;
    int status = mt_child_end(child, 1);
    if (status != -1 && WIFEXITED(status) && (WEXITSTATUS(status) == MT_PYTHON_LACKS || WEXITSTATUS(status) == 127))
        return 1;
    return mt_error_set(error, "%s: %s ended before it could %s; see its messages above", path, python, purpose);
}

int mt_python_start(mt_child *child, const char *program, const char *argument, const char *path, const char *purpose,
                    mt_error *error) {
    const char *const usual[] = {"python3", "/usr/bin/python3"}, *chosen = getenv("MT_PYTHON");
    int status = 1;
    for (int i = 0; i < (chosen ? 1 : 2) && status == 1; i++)
        status = start_in(child, chosen ? chosen : usual[i], program, argument, path, purpose, error);
    return status;
}

const char *mt_python_choice(char text[200]) {
    const char *chosen = getenv("MT_PYTHON");
    snprintf(text, 200, "%s%.150s", chosen ? " for MT_PYTHON=" : "", chosen ? chosen : "");
    return text;
}
