/* crash_shim.c: see crash_shim.h. */
#include "crash_shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

const char *const crash_kind_names[CRASH_NUM_KINDS] = {"open",   "pwrite",  "fflush", "fsync", "close",
                                                       "rename", "symlink", "unlink", "mkdir", "fallocate"};
crash_control *crash;
static char watched_root[512];

enum { MAX_FILES = 1024 };
static char *paths[MAX_FILES];  // of open files below the root, by descriptor
static bool written[MAX_FILES]; // opened for writing

/* The system's function of this name. ISO C knows no conversion from an object's address to a function's. */
#define REAL(name)                                                                                                     \
    static __typeof__(name) *real;                                                                                     \
    if (!real) {                                                                                                       \
        void *address = dlsym(RTLD_NEXT, #name);                                                                       \
        memcpy(&real, &address, sizeof real);                                                                          \
    }

static void lock(void) {
    while (__atomic_exchange_n(&crash->lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
}

static void unlock(void) {
    __atomic_store_n(&crash->lock, 0, __ATOMIC_RELEASE);
}

static bool is_watched(const char *path) {
    size_t length = strlen(watched_root);
    return crash && crash->how != CRASH_OFF && length > 0 && strncmp(path, watched_root, length) == 0;
}

/* The effect of a call: none of the shim's business; to be made, with the lock held until `leave`; one that fails or
 * is dropped. */
typedef enum effect { PASS, MAKE, FAIL, DROP } effect;

static effect enter(crash_kind kind, const char *path) {
    if (!path || !is_watched(path)) return PASS;
    lock();
    int64_t of_kind = crash->kinds[kind]++, of_all = crash->count++;
    bool hit = crash->kind < 0 ? of_all == crash->at : crash->kind == (int64_t)kind && of_kind == crash->at;
    if (!hit || crash->how == CRASH_RECORD) return MAKE;
    crash->hit = kind;
    unlock();
    if (crash->how == CRASH_KILL) kill(getpid(), SIGKILL);
    errno = crash->error_number;
    return crash->how == CRASH_FAIL ? FAIL : DROP;
}

/* Records a call that succeeded, and lets others go on. */
static void leave(bool good, crash_op op, const char *path, const char *other, const void *data) {
    int before = errno;
    op.path_bytes = (int64_t)strlen(path) + 1, op.other_bytes = other ? (int64_t)strlen(other) + 1 : 0;
    op.size = ((int64_t)sizeof op + op.path_bytes + op.other_bytes + op.data_bytes + 7) / 8 * 8;
    if (good && crash->how == CRASH_RECORD) {
        if (crash->used + op.size > CRASH_LOG_BYTES) abort();
        char *to = crash->log + crash->used;
        memcpy(to, &op, sizeof op);
        memcpy(to += sizeof op, path, (size_t)op.path_bytes);
        if (other) memcpy(to + op.path_bytes, other, (size_t)op.other_bytes);
        if (op.data_bytes > 0) memcpy(to + op.path_bytes + op.other_bytes, data, (size_t)op.data_bytes);
        crash->used += op.size;
    }
    unlock();
    errno = before;
}

static const char *path_of(int descriptor) {
    return descriptor >= 0 && descriptor < MAX_FILES ? paths[descriptor] : NULL;
}

static void remember(int descriptor, const char *path, bool writes) {
    if (descriptor < 0 || descriptor >= MAX_FILES) return;
    free(paths[descriptor]);
    paths[descriptor] = path ? strdup(path) : NULL;
    written[descriptor] = writes;
}

/* ---- the calls */

int open(const char *path, int flags, ...) {
    REAL(open)
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list arguments;
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    effect what = enter(CRASH_OPEN, path);
    if (what == FAIL || what == DROP) { // there is no descriptor to return without opening
        if (what == DROP) errno = EIO;
        return -1;
    }
    int descriptor = real(path, flags, mode);
    remember(descriptor, what == MAKE && descriptor >= 0 ? path : NULL, (flags & O_ACCMODE) != O_RDONLY);
    crash_op op = {.kind = CRASH_OPEN, .value = (flags & O_TRUNC) != 0};
    if (what == MAKE) leave(descriptor >= 0 && flags & O_CREAT, op, path, NULL, NULL);
    return descriptor;
}

FILE *fopen(const char *path, const char *mode) {
    REAL(fopen)
    effect what = *mode == 'r' ? PASS : enter(CRASH_OPEN, path);
    if (what == FAIL || what == DROP) {
        if (what == DROP) errno = EIO;
        return NULL;
    }
    FILE *stream = real(path, mode);
    if (stream) remember(fileno(stream), what == MAKE ? path : NULL, true);
    crash_op op = {.kind = CRASH_OPEN, .value = *mode == 'w'};
    if (what == MAKE) leave(stream != NULL, op, path, NULL, NULL);
    return stream;
}

/* Records the contents of a file, into which stdio writes by calls that the shim does not see. */
static void leave_contents(bool good, const char *path) {
    struct stat status = {0};
    REAL(open)
    int descriptor = good ? real(path, O_RDONLY) : -1;
    char *data = NULL;
    if (descriptor >= 0 && fstat(descriptor, &status) == 0 && (data = malloc((size_t)status.st_size + 1)))
        status.st_size = read(descriptor, data, (size_t)status.st_size);
    crash_op op = {.kind = CRASH_FLUSH, .data_bytes = data ? status.st_size : 0};
    leave(data != NULL, op, path, NULL, data);
    free(data);
    if (descriptor >= 0) close(descriptor);
}

int fflush(FILE *stream) {
    REAL(fflush)
    const char *path = stream ? path_of(fileno(stream)) : NULL;
    effect what = enter(CRASH_FLUSH, path);
    if (what == FAIL) return EOF;
    if (what == DROP) return 0;
    int status = real(stream);
    if (what == MAKE) leave_contents(status == 0, path);
    return status;
}

int fclose(FILE *stream) {
    REAL(fclose)
    int descriptor = fileno(stream);
    char *path = path_of(descriptor) ? strdup(path_of(descriptor)) : NULL;
    effect what = enter(CRASH_FLUSH, path);
    remember(descriptor, NULL, false);
    int status = real(stream), reason = errno;
    if (what == MAKE) leave_contents(status == 0, path);
    if (what == FAIL || what == DROP) { // the data was lost
        if (truncate(path, 0) == 0) reason = crash->error_number;
        status = what == FAIL ? EOF : 0;
    }
    free(path);
    errno = reason;
    return status;
}

ssize_t pwrite(int descriptor, const void *data, size_t bytes, off_t offset) {
    REAL(pwrite)
    const char *path = path_of(descriptor);
    effect what = enter(CRASH_WRITE, path);
    if (what == FAIL) return -1;
    if (what == DROP) return (ssize_t)bytes;
    ssize_t done = real(descriptor, data, bytes, offset);
    crash_op op = {.kind = CRASH_WRITE, .value = offset, .data_bytes = done};
    if (what == MAKE) leave(done > 0, op, path, NULL, data);
    return done;
}

int fsync(int descriptor) {
    REAL(fsync)
    const char *path = path_of(descriptor);
    effect what = enter(CRASH_SYNC, path);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(descriptor);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_SYNC}, path, NULL, NULL);
    return status;
}

int close(int descriptor) {
    REAL(close)
    const char *path = path_of(descriptor);
    effect what = path && written[descriptor] ? enter(CRASH_CLOSE, path) : PASS;
    char *name = path ? strdup(path) : NULL;
    remember(descriptor, NULL, false);
    int status = real(descriptor);
    if (what == MAKE) leave(false, (crash_op){.kind = CRASH_CLOSE}, name, NULL, NULL);
    free(name);
    if (what != FAIL) return status;
    errno = crash->error_number;
    return -1;
}

int rename(const char *from, const char *to) {
    REAL(rename)
    effect what = enter(CRASH_RENAME, from);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(from, to);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_RENAME}, from, to, NULL);
    return status;
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    REAL(renameat2)
    effect what = enter(CRASH_RENAME, from);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(from_folder, from, to_folder, to, flags);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_RENAME, .value = flags != 0}, from, to, NULL);
    return status;
}

int symlink(const char *target, const char *path) {
    REAL(symlink)
    effect what = enter(CRASH_LINK, path);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(target, path);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_LINK}, path, target, NULL);
    return status;
}

int unlink(const char *path) {
    REAL(unlink)
    effect what = enter(CRASH_UNLINK, path);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(path);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_UNLINK}, path, NULL, NULL);
    return status;
}

int remove(const char *path) {
    REAL(remove)
    effect what = enter(CRASH_UNLINK, path);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(path);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_UNLINK}, path, NULL, NULL);
    return status;
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir)
    effect what = enter(CRASH_MKDIR, path);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(path, mode);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_MKDIR}, path, NULL, NULL);
    return status;
}

int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
    REAL(fallocate)
    const char *path = path_of(descriptor);
    effect what = enter(CRASH_RESERVE, path);
    if (what == FAIL) return -1;
    if (what == DROP) return 0;
    int status = real(descriptor, mode, offset, bytes);
    if (what == MAKE) leave(status == 0, (crash_op){.kind = CRASH_RESERVE, .value = offset + bytes}, path, NULL, NULL);
    return status;
}

/* ---- control */

int crash_open(const char *shared, const char *root) {
    REAL(open)
    int descriptor = real(shared, O_RDWR | O_CREAT, 0600);
    if (descriptor < 0 || ftruncate(descriptor, sizeof *crash) != 0) return -1;
    void *memory = mmap(NULL, sizeof *crash, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (memory == MAP_FAILED) return -1;
    snprintf(watched_root, sizeof watched_root, "%s", root);
    crash = memory;
    return 0;
}

void crash_begin(crash_how how, int64_t kind, int64_t at, int error_number) {
    crash->kind = kind, crash->at = at, crash->count = 0, crash->hit = -1, crash->used = 0,
    crash->error_number = error_number;
    memset(crash->kinds, 0, sizeof crash->kinds);
    crash->how = how;
}

void crash_end(void) {
    crash->how = CRASH_OFF;
}

void crash_mark(int64_t value) {
    lock();
    leave(true, (crash_op){.kind = CRASH_MARK, .value = value}, "", NULL, NULL);
}

/* With LD_PRELOAD. Every rank sets the same values; none has made a call that counts. */
__attribute__((constructor)) static void crash_preload(void) {
    const char *shared = getenv("CRASH_SHARED"), *root = getenv("CRASH_ROOT"), *how = getenv("CRASH_HOW");
    const char *number = getenv("CRASH_AT"), *full = getenv("CRASH_ERROR");
    if (!shared || !root || !how || !number) return;
    if (crash_open(shared, root) != 0) abort();
    crash->at = atoll(number), crash->kind = -1;
    crash->error_number = full && strcmp(full, "ENOSPC") == 0 ? ENOSPC : EIO;
    crash->how = *how == 'f' ? CRASH_FAIL : *how == 'd' ? CRASH_DROP : CRASH_KILL;
}
