/* child.h: a program that runs beside this one and is asked over two pipes. */
#ifndef MT_CHILD_H
#define MT_CHILD_H

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Start it as {0, -1, -1}. */
typedef struct mt_child {
    pid_t process; // 0: none, or ended
    int to, from;  // its standard input and output, which do not block; -1: closed
} mt_child;

/* Starts a program, which is looked for in PATH unless it has a slash. `arguments` ends with NULL. Its standard error
 * is this program's. It belongs to a process group of its own, so that Ctrl-C reaches it only as the end of its input.
 * Returns 0, or a number of errno. */
int mt_child_start(mt_child *child, const char *program, char *const *arguments);

/* Close its standard input. */
void mt_child_close_input(mt_child *child);

/* Writes as much as the pipe takes; returns the number of bytes. An input that the child has closed is closed here too.
 * A write to a child that has died raises no signal. */
ssize_t mt_child_write(mt_child *child, const char *bytes, size_t count);

/* Closes the pipes, waits at most `seconds` for the child's end, then kills it. Returns its status, as of waitpid; -1:
 * it was killed here, or there was none. Processes in its group are killed as well. */
int mt_child_end(mt_child *child, double seconds);

#ifdef __cplusplus
}
#endif
#endif
