/* megatron.h: the public interface of megatron.c.
 *
 * Notation, used in every shape comment:
 *   T  tokens of one micro-batch on this rank     C  hidden size
 *   H  query heads                                G  query groups (key and value heads)
 *   D  channels of one head                       F  feed-forward size
 *   V  padded vocabulary                          L  layers
 * A shape such as [T, C] is row-major; an operand whose rows are further apart than their width says "stride".
 * Sizes and offsets are int64_t. Functions that can fail on the user's input return 0, or -1 with one line in mt_error.
 */
#ifndef MEGATRON_H
#define MEGATRON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- §1 checks, arenas, random numbers ------------------------------------------------------------------------- */

/* One line for the user: what went wrong, where, and what to do. Parsers fill it and return -1; they never exit. */
typedef struct mt_error {
    char text[1024];
} mt_error;

/* Fills `error` as printf does and returns -1, so that a parser can `return mt_error_set(error, ...)`. */
int mt_error_set(mt_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints "PROGRAM: error: ..." on standard error and ends the job (MPI_Abort when several ranks run). Drivers only. */
_Noreturn void mt_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A broken invariant of this program itself (never the user's input): names file and line, then ends the job. */
#define MT_CHECK(condition)                                                                                            \
    ((condition) ? (void)0 : mt_die("internal check failed at %s:%d: %s", __FILE__, __LINE__, #condition))

/* malloc/calloc/realloc that end the program, saying how much was asked for, rather than return NULL. */
void *mt_malloc(int64_t bytes);
void *mt_calloc(int64_t bytes);
void *mt_realloc(void *memory, int64_t bytes);
char *mt_strdup(const char *text);

#ifdef __cplusplus
}
#endif
#endif
