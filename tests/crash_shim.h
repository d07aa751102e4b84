/* crash_shim.h: fails, drops or records the calls that change the files below one folder. The shim defines these calls
 * itself (open, pwrite, fsync, rename, ...), for the program that it is linked into, or by LD_PRELOAD for any program.
 * Its state is in memory that all ranks of a job share, so "the N-th call" counts the calls of all ranks and threads.
 *
 * For LD_PRELOAD: CRASH_SHARED=FILE (created), CRASH_ROOT=FOLDER, CRASH_HOW=fail|drop|kill, CRASH_AT=N; with
 * CRASH_ERROR=ENOSPC instead of EIO. A job's first call is number 0. */
#ifndef MT_CRASH_SHIM_H
#define MT_CRASH_SHIM_H

#include <stdbool.h>
#include <stdint.h>

typedef enum crash_kind {
    CRASH_OPEN,   // open or fopen
    CRASH_WRITE,  // pwrite
    CRASH_FLUSH,  // fflush or fclose of a stream that writes
    CRASH_SYNC,   // fsync of a file or a folder
    CRASH_CLOSE,  // of a file that was written
    CRASH_RENAME, // also renameat2 that exchanges two names
    CRASH_LINK,   // symlink
    CRASH_UNLINK, // unlink or remove
    CRASH_MKDIR,
    CRASH_RESERVE, // fallocate
    CRASH_NUM_KINDS,
    CRASH_MARK = CRASH_NUM_KINDS // a note of the test in the record
} crash_kind;

extern const char *const crash_kind_names[CRASH_NUM_KINDS];

typedef enum crash_how {
    CRASH_OFF,
    CRASH_RECORD,
    CRASH_FAIL, // the call has no effect and returns an error
    CRASH_DROP, // the call has no effect and returns success
    CRASH_KILL  // the process ends before the call
} crash_how;

/* A recorded call: this struct, the path and a second name with their zeros, the data; padded to 8 bytes. */
typedef struct crash_op {
    int64_t kind, size; // size: of the whole record
    int64_t value; // offset of a write; size reserved; 1: an open that truncates, or a rename that exchanges; a mark
    int64_t path_bytes, other_bytes, data_bytes; // names with their zeros
} crash_op;

enum { CRASH_LOG_BYTES = 16 << 20 };

typedef struct crash_control {
    int lock, how, error_number;
    int64_t kind, at; // the call: number `at` of a kind, or with kind -1 of all
    int64_t count;    // calls so far
    int64_t hit;      // kind of the call that was failed or dropped, or -1
    int64_t kinds[CRASH_NUM_KINDS];
    int64_t used; // bytes of the record
    char log[CRASH_LOG_BYTES];
} crash_control;

extern crash_control *crash;

/* Maps the shared memory, a file that is created if need be, and watches a folder. Returns 0, or -1 with errno. */
int crash_open(const char *shared, const char *root);

/* Starts counting at 0. The call that is hit is number `at` of its kind (of all kinds: -1), as threads and ranks make
 * calls of several kinds in no fixed order. On one rank, while no rank calls anything that is watched. */
void crash_begin(crash_how how, int64_t kind, int64_t at, int error_number);

/* Ends it. */
void crash_end(void);

/* Adds a mark to the record. */
void crash_mark(int64_t value);

#endif
