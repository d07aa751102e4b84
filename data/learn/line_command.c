/* line_command.c: a program of the user's that answers requests, a line for each. */
#include "line_command.h"

#include "../base/signals.h"
#include "../tokens/tokenizer_vocab.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int mt_line_command_open(mt_line_command *c, const char *name, const char *text, double seconds, mt_error *error) {
    *c = (mt_line_command){.name = name, .text = mt_strdup(text), .seconds = seconds, .child = {0, -1, -1}};
    char *arguments[] = {"sh", "-c", c->text, NULL};
    int status = mt_child_start(&c->child, "/bin/sh", arguments);
    if (status == 0) return 0;
    return mt_error_set(error, "the %s \"%s\" cannot be started: %s", name, text, strerror(status));
}

void mt_line_command_close(mt_line_command *c) {
    mt_child_end(&c->child, 2);
    free(c->text);
    free(c->repaired.data);
    free(c->request.data);
    free(c->received.data);
    *c = (mt_line_command){.child = {0, -1, -1}};
}

void mt_line_command_append_string(mt_line_command *c, const char *text, int64_t bytes) {
    mt_text *to = &c->request;
    char escape[8];
    c->repaired.bytes = 0;
    mt_utf8_repair(&c->repaired, text, bytes);
    mt_text_append(to, "\"", 1);
    for (int64_t i = 0; i < c->repaired.bytes; i++) {
        unsigned char byte = (unsigned char)c->repaired.data[i];
        if (byte == '"' || byte == '\\')
            snprintf(escape, sizeof escape, "\\%c", byte);
        else if (byte < 32)
            snprintf(escape, sizeof escape, "\\u%04x", byte);
        else
            escape[0] = (char)byte, escape[1] = 0;
        mt_text_append(to, escape, (int64_t)strlen(escape));
    }
    mt_text_append(to, "\"", 1);
}

/* An exchange that runs; `sent` bytes of the request of item `next` - 1 are sent. */
typedef struct progress {
    const mt_line_exchange *exchange;
    int64_t next, sent, answered;
} progress;

/* The command's output ended. */
static int report_end(mt_line_command *c, const progress *p, mt_error *error) {
    int status = mt_child_end(&c->child, 1);
    char how[96] = "closed its output";
    if (status != -1 && WIFEXITED(status))
        snprintf(how, sizeof how, "ended with exit status %d%s", WEXITSTATUS(status),
                 WEXITSTATUS(status) == 127 ? " (the shell did not find it)" : "");
    else if (status != -1 && WIFSIGNALED(status))
        snprintf(how, sizeof how, "was ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return mt_error_set(error,
                        "the %s \"%s\" %s after %lld answers to %lld %s; its own messages, if any, "
                        "stand above; it must read until the end of its input",
                        c->name, c->text, how, (long long)p->answered, (long long)p->exchange->count,
                        p->exchange->requests);
}

static int report_surplus(const mt_line_command *c, const progress *p, mt_error *error) {
    return mt_error_set(error,
                        "the %s \"%s\" wrote more lines than it got %s; it must write %s for "
                        "each, and other messages to standard error",
                        c->name, c->text, p->exchange->requests, p->exchange->answer);
}

/* Takes the whole lines of `received`. A line for a request that is not wholly sent is no answer. */
static int take_lines(mt_line_command *c, progress *p, mt_error *error) {
    const mt_line_exchange *e = p->exchange;
    mt_text *text = &c->received;
    int64_t taken = 0, asked = p->next - (p->sent < c->request.bytes);
    for (const char *end; (end = memchr(text->data + taken, '\n', (size_t)(text->bytes - taken)));) {
        const char *line = text->data + taken;
        if (p->answered == asked) return report_surplus(c, p, error);
        c->lines++;
        if (e->read(e->context, p->answered, asked, line, end - line, error) != 0) return -1;
        p->answered++;
        taken = end + 1 - text->data;
    }
    text->bytes -= taken;
    memmove(text->data, text->data + taken, (size_t)text->bytes);
    if (text->bytes > 0 && p->answered == e->count) return report_surplus(c, p, error);
    if (text->bytes <= e->longest) return 0;
    c->lines++;
    return e->read(e->context, p->answered, asked, text->data, text->bytes, error);
}

/* Reads the bytes that are available. */
static int receive(mt_line_command *c, progress *p, mt_error *error) {
    char piece[65536];
    ssize_t bytes = read(c->child.from, piece, sizeof piece);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (bytes <= 0) return report_end(c, p, error);
    mt_text_append(&c->received, piece, bytes);
    return take_lines(c, p, error);
}

/* Writes as much as the pipe takes. A command that reads no more is noticed where its output ends. */
static void send_request(mt_line_command *c, progress *p) {
    p->sent += mt_child_write(&c->child, c->request.data + p->sent, (size_t)(c->request.bytes - p->sent));
}

/* A signal that comes just before poll is seen after this time. */
enum { STOP_MILLISECONDS = 200 };

/* 0, -1 or MT_LINE_COMMAND_STOPPED. */
static int exchange_lines(mt_line_command *c, progress *p, mt_error *error) {
    const mt_line_exchange *e = p->exchange;
    double until = mt_time() + c->seconds;
    struct pollfd from = {c->child.from, POLLIN, 0};
    char surplus;
    p->sent = c->request.bytes = 0;
    if (c->child.to < 0) return report_end(c, p, error);
    if (poll(&from, 1, 0) > 0) { // before anything was asked
        ssize_t bytes = read(c->child.from, &surplus, 1);
        if (bytes > 0) return report_surplus(c, p, error);
        if (bytes == 0) return report_end(c, p, error);
    }
    while (p->answered < e->count) {
        if (p->sent == c->request.bytes && p->next < e->count) {
            c->request.bytes = 0;
            e->write(e->context, p->next++);
            p->sent = 0;
        }
        bool sends = p->sent < c->request.bytes && c->child.to >= 0;
        struct pollfd ends[] = {{c->child.from, POLLIN, 0}, {sends ? c->child.to : -1, POLLOUT, 0}};
        double left = until - mt_time();
        if (left <= 0)
            return mt_error_set(error,
                                "the %s \"%s\" wrote %lld answers to %lld %s in %g s; it hangs, is "
                                "too slow, or waits for more input: it must answer each line and flush (python3 -u)",
                                c->name, c->text, (long long)p->answered, (long long)e->count, e->requests, c->seconds);
        if (mt_stop_requested()) return MT_LINE_COMMAND_STOPPED;
        if (poll(ends, 2, (int)fmin(1000 * left + 1, STOP_MILLISECONDS)) < 0) continue; // a signal
        if (ends[0].revents && receive(c, p, error) != 0) return -1;
        if (ends[1].revents) send_request(c, p);
    }
    return 0;
}

int mt_line_command_exchange(mt_line_command *c, const mt_line_exchange *exchange, mt_error *error) {
    progress p = {.exchange = exchange};
    if (c->child.process == 0) return mt_error_set(error, "the %s \"%s\" has ended", c->name, c->text);
    int status = exchange_lines(c, &p, error);
    if (status != 0) mt_child_end(&c->child, 0);
    return status;
}
