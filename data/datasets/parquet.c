/* parquet.c: files of Parquet, read by pyarrow or duckdb in a process of its own. */
#include "parquet.h"

#include "../base/file.h"
#include "../base/python.h"
#include "../base/signals.h"
#include "../tokens/tokenizer_vocab.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* data/datasets/parquet.py. C11 promises 4095 characters of a string only; gcc and clang take more. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverlength-strings"
static const char program[] =
#if __has_include("data/datasets/parquet_program.h") // make writes it into its build folder
#include "data/datasets/parquet_program.h"
#else
    ""
#endif
    ;
#pragma GCC diagnostic pop

enum {
    LONGEST_ROW = 1 << 29 // bytes
};

typedef struct rows {
    const char *path;
    mt_child child;
    mt_text received; // bytes of the process; those from `taken` on are left
    int64_t taken, searched;
} rows;

bool mt_is_parquet(const char *path, const void *bytes, int64_t size) {
    return (size >= 4 && memcmp(bytes, "PAR1", 4) == 0) || mt_text_ends_with(path, ".parquet");
}

/* The process ended, or does not answer. */
static int report_end(rows *r, bool hangs, mt_error *error) {
    int status = mt_child_end(&r->child, hangs ? 0 : 1);
    char how[96] = "does not answer";
    if (status != -1 && WIFEXITED(status))
        snprintf(how, sizeof how, "ended with exit status %d before the end of the file", WEXITSTATUS(status));
    else if (status != -1 && WIFSIGNALED(status))
        snprintf(how, sizeof how, "was ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return mt_error_set(error, "%s: the program that reads it, python3 with pyarrow or duckdb, %s", r->path, how);
}

/* A signal requests a stop while the process is awaited. */
static int report_stop(rows *r, mt_error *error) {
    mt_child_end(&r->child, 0);
    return mt_error_set(error,
                        "%s: a signal ended the run while the program that reads the file, python3 with pyarrow or "
                        "duckdb, was awaited",
                        r->path);
}

/* Waits for a line, which ends with a 0 in place of its line feed. Returns its bytes; -1 with error. */
static int64_t next_line(rows *r, char **line, mt_error *error) {
    mt_text *text = &r->received;
    double until = mt_time() + MT_PYTHON_WAIT;
    while (true) {
        char *begin = text->data + r->taken, *end = NULL;
        if (text->bytes > r->searched)
            end = memchr(text->data + r->searched, '\n', (size_t)(text->bytes - r->searched));
        r->searched = text->bytes;
        if (end) {
            *end = 0;
            *line = begin;
            r->taken = r->searched = end + 1 - text->data;
            return end - begin;
        }
        if (r->taken > 0) memmove(text->data, begin, (size_t)(text->bytes - r->taken));
        text->bytes -= r->taken, r->searched -= r->taken, r->taken = 0;
        struct pollfd from = {r->child.from, POLLIN, 0};
        double left = until - mt_time();
        if (left <= 0) return report_end(r, true, error);
        int ready = poll(&from, 1, left < 1 ? (int)(1000 * left) + 1 : 1000);
        if (ready <= 0 && mt_stop_requested()) return report_stop(r, error);
        if (ready <= 0) continue;
        mt_text_reserve(text, 1 << 20);
        ssize_t count = read(r->child.from, text->data + text->bytes, 1 << 20);
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (count <= 0) return report_end(r, false, error);
        text->bytes += count;
        if (text->bytes > LONGEST_ROW) return mt_error_set(error, "%s: has a row of over 512 MiB", r->path);
    }
}

/* The names of a list in JSON, with ", " between them. */
static char *list_names(const char *line, int64_t bytes) {
    json_t *names = json_loadb(line, (size_t)bytes, 0, NULL), *name;
    size_t i;
    mt_text text = {0};
    json_array_foreach(names, i, name) {
        if (i > 0) mt_text_append(&text, ", ", 2);
        if (json_is_string(name)) mt_text_append(&text, json_string_value(name), (int64_t)json_string_length(name));
    }
    mt_text_append(&text, "", 1);
    json_decref(names);
    return text.data;
}

static int read_rows(rows *r, char **columns, mt_parquet_visit *visit, void *context, mt_error *error) {
    char *line = NULL;
    bool begun = false;
    for (int64_t number = 0;;) {
        int64_t bytes = next_line(r, &line, error);
        if (bytes < 0) return -1;
        if (*line == '!') return mt_error_set(error, "%s: cannot be read as a Parquet file: %s", r->path, line + 1);
        if (*line == '=' && begun) return 0;
        if (*line == '=' && columns) *columns = list_names(line + 1, bytes - 1);
        if (*line == '=') {
            begun = true;
            continue;
        }
        if (!begun || *line != '{')
            return mt_error_set(error, "%s: the program that reads it wrote something else than rows", r->path);
        int status = visit(line, bytes, ++number, context);
        if (status != 0) return status;
    }
}

int mt_parquet_read(const char *path, char **columns, mt_parquet_visit *visit, void *context, mt_error *error) {
    rows r = {.path = path, .child = {0, -1, -1}};
    char choice[200];
    if (columns) *columns = NULL;
    if (program[0] == '\0')
        return mt_error_set(error,
                            "%s: is a Parquet file, and data/datasets/parquet.c was compiled without "
                            "parquet_program.h, which make writes; compile it with that, or write the rows as JSON "
                            "Lines",
                            path);
    int status = mt_python_start(&r.child, program, path, path, "read the file", error);
    if (status == 1)
        status = mt_error_set(error,
                              "%s: is a Parquet file, which needs pyarrow or duckdb in Python%s; install one (pip "
                              "install pyarrow), or write the rows as JSON Lines",
                              path, mt_python_choice(choice));
    else if (status == 0)
        status = read_rows(&r, columns, visit, context, error);
    mt_child_end(&r.child, 0);
    free(r.received.data);
    return status;
}
