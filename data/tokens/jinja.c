/* jinja.c: chat templates that are programs in Jinja, rendered by python3-jinja2 in a process of its own. */
#include "jinja.h"

#include "../base/file.h"
#include "../base/python.h"
#include "tokenizer.h"
#include "tokenizer_vocab.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* data/tokens/jinja.py. C11 promises 4095 characters of a string only; gcc and clang take more. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverlength-strings"
static const char program[] =
#if __has_include("data/tokens/jinja_program.h") // make writes it into its build folder
#include "data/tokens/jinja_program.h"
#else
    ""
#endif
    ;
#pragma GCC diagnostic pop

enum {
    LONGEST_REPLY = 1 << 29 // bytes
};

struct mt_jinja {
    json_t *templates, *tokens;
    char *path;
    double seconds;
    mt_child child;
    mt_text received;
};

mt_jinja *mt_jinja_open(json_t *templates, json_t *tokens, const char *path, double seconds) {
    mt_jinja *jinja = mt_calloc(sizeof *jinja);
    *jinja = (mt_jinja){.templates = json_incref(templates),
                        .tokens = json_incref(tokens),
                        .path = mt_strdup(path),
                        .seconds = seconds,
                        .child = {0, -1, -1}};
    return jinja;
}

void mt_jinja_close(mt_jinja *jinja) {
    if (!jinja) return;
    mt_child_end(&jinja->child, 2);
    json_decref(jinja->templates);
    json_decref(jinja->tokens);
    free(jinja->received.data);
    free(jinja->path);
    free(jinja);
}

/* The process ended or hangs. */
static int report_end(mt_jinja *jinja, bool hangs, mt_error *error) {
    int status = mt_child_end(&jinja->child, hangs ? 0 : 1);
    char how[96] = "does not answer";
    jinja->received.bytes = 0;
    if (status != -1 && WIFEXITED(status))
        snprintf(how, sizeof how, "ended with exit status %d", WEXITSTATUS(status));
    else if (status != -1 && WIFSIGNALED(status) && WTERMSIG(status) == SIGPROF)
        return mt_error_set(error,
                            "%s: the template takes more than %g s of processor time for this conversation; correct "
                            "it, or choose another with --chat-template",
                            jinja->path, jinja->seconds);
    else if (status != -1 && WIFSIGNALED(status))
        snprintf(how, sizeof how, "was ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return mt_error_set(error, "%s: the program that renders the template, python3 with jinja2, %s", jinja->path, how);
}

/* Sends a line and waits for another, which stands in `received` without its end. Returns its bytes; -1 with error. */
static int64_t exchange(mt_jinja *jinja, const char *line, int64_t bytes, mt_error *error) {
    double until = mt_time() + jinja->seconds + MT_PYTHON_WAIT;
    mt_child *child = &jinja->child;
    mt_text *to = &jinja->received;
    int64_t sent = 0;
    to->bytes = 0;
    while (true) {
        bool sends = sent < bytes && child->to >= 0;
        struct pollfd ends[] = {{child->from, POLLIN, 0}, {sends ? child->to : -1, POLLOUT, 0}};
        double left = until - mt_time();
        if (left <= 0) return report_end(jinja, true, error);
        if (poll(ends, 2, (int)(1000 * left) + 1) < 0) continue; // a signal
        if (ends[1].revents) sent += mt_child_write(child, line + sent, (size_t)(bytes - sent));
        if (!ends[0].revents) continue;
        mt_text_reserve(to, 65536);
        ssize_t count = read(child->from, to->data + to->bytes, 65536);
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (count <= 0 || to->bytes > LONGEST_REPLY) return report_end(jinja, count > 0, error);
        to->bytes += count;
        if (to->data[to->bytes - 1] == '\n') return to->bytes - 1;
    }
}

/* Sends a request; the reply's error is an error. */
static json_t *ask(mt_jinja *jinja, const json_t *request, mt_error *error) {
    char *text = json_dumps(request, JSON_COMPACT);
    int64_t bytes = (int64_t)strlen(text);
    text[bytes] = '\n'; // for the 0
    int64_t received = exchange(jinja, text, bytes + 1, error);
    free(text);
    if (received < 0) return NULL;
    json_t *reply = mt_json_parse(jinja->received.data, received, JSON_ALLOW_NUL, NULL, error);
    const char *refusal = json_string_value(json_object_get(reply, "error"));
    if (!refusal) return reply;
    mt_error_set(error, "%s: %s", jinja->path, refusal);
    json_decref(reply);
    return NULL;
}

static int start(mt_jinja *jinja, mt_error *error) {
    char seconds[32], choice[200];
    snprintf(seconds, sizeof seconds, "%g", jinja->seconds);
    if (program[0] == '\0')
        return mt_error_set(error,
                            "%s: the chat template is a program in Jinja, and data/tokens/jinja.c was compiled without "
                            "jinja_program.h, which make writes; compile it with that, or choose a template with "
                            "--chat-template",
                            jinja->path);
    int status = mt_python_start(&jinja->child, program, seconds, jinja->path, "render the template", error);
    if (status <= 0) return status;
    return mt_error_set(error,
                        "%s: the chat template is a program in Jinja, which needs python3-jinja2%s; install that "
                        "package, or choose a template with --chat-template",
                        jinja->path, mt_python_choice(choice));
}

json_t *mt_jinja_ask(mt_jinja *jinja, const json_t *request, mt_error *error) {
    if (jinja->child.process == 0) {
        if (start(jinja, error) != 0) return NULL;
        json_t *opening = json_pack("{s:O, s:O}", "templates", jinja->templates, "tokens", jinja->tokens);
        json_t *reply = ask(jinja, opening, error);
        json_decref(opening);
        if (!reply) mt_child_end(&jinja->child, 2);
        if (!reply) return NULL;
        json_decref(reply);
    }
    return ask(jinja, request, error);
}
