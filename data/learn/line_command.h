/* line_command.h: a program of the user's that answers requests: it reads a line for each and writes a line for each.
 */
#ifndef MT_LINE_COMMAND_H
#define MT_LINE_COMMAND_H

#include "../base/child.h"
#include "../tokens/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A command that runs. Start it as {0} with child {0, -1, -1}. */
typedef struct mt_line_command {
    const char *name; // of its kind in messages, such as "reward command"
    char *text;       // that a shell runs
    double seconds;   // of an exchange
    mt_child child;
    mt_text repaired, request; // scratch; the line that is being sent
    mt_text received;          // output without its whole lines
    int64_t lines;             // of output, since the start
} mt_line_command;

/* Runs `sh -c text`. Its standard error is this program's. It belongs to a process group of its own, so that Ctrl-C
 * reaches it only as the end of its input. */
int mt_line_command_open(mt_line_command *command, const char *name, const char *text, double seconds, mt_error *error);

/* Closes its input, waits for two seconds, then kills it and the processes of its group. */
void mt_line_command_close(mt_line_command *command);

/* Appends a text of JSON in quotes to the request; bytes that are no UTF-8 become U+FFFD. */
void mt_line_command_append_string(mt_line_command *command, const char *text, int64_t bytes);

/* Requests and their answers. */
typedef struct mt_line_exchange {
    int64_t count;        // requests; each gets one line
    const char *requests; // their name in messages, "responses"
    const char *answer;   // the name of an answer, "one number"
    int64_t longest;      // bytes of a line
    void *context;
    // Appends request i and its line end to command->request
    void (*write)(void *context, int64_t i);
    // Takes answer i, which is command->lines in number, without its line end; it has `sent` requests before it
    int (*read)(void *context, int64_t i, int64_t sent, const char *line, int64_t bytes, mt_error *error);
} mt_line_exchange;

/* Sends all requests and takes all answers. The command may read ahead, but must write out its lines without waiting
 * for more input, within command->seconds. Errors are one line that names the command: it ended, took too long, or
 * wrote more lines than it got; or those of `read`. Returns MT_LINE_COMMAND_STOPPED if a signal requests a stop
 * (mt_stop_requested) before all answers have come. After that or an error the command has been ended, and further
 * calls fail. */
enum { MT_LINE_COMMAND_STOPPED = 1 };
int mt_line_command_exchange(mt_line_command *command, const mt_line_exchange *exchange, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
