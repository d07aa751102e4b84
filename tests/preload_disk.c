/* Loaded by LD_PRELOAD into a program: a disk that is slow or hangs, and events while the program starts. Settings:
 *
 *   SLOW_FSYNC=SECONDS      the first fsync of a safetensors file takes this long
 *   HANGING_MAP=TEXT        reading a mapped file with TEXT in its path never ends; with HANGS_AFTER_SAVE set, only
 *                           after the first fsync of a safetensors file
 *   HANGING_FSYNC=TEXT      the fsync of a file with TEXT in its path never ends, and says so on standard error
 *   HANGING_WRITE=TEXT      writing a file with TEXT in its path never ends
 *   SIGNAL_AT_START=NUMBER  statvfs, which train calls before the first step, raises this signal twice, as timeout(1)
 *                           may: to the process and to its group
 *   SIGNAL_IN_WRITE=NUMBER  an fwrite of a mebibyte or more raises this signal
 *   BEFORE_LOCK=COMMAND     a shell runs this before the program locks a file
 *   ONLY_RANK=N             all of this on one rank only */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char *setting(const char *name) {
    const char *only = getenv("ONLY_RANK"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!rank) rank = getenv("PMI_RANK");
    return only && (!rank || strcmp(only, rank) != 0) ? NULL : getenv(name);
}

/* The next definition of a function: the C library's. */
static void find(void *function, const char *name) {
    void *address = dlsym(RTLD_NEXT, name);
    memcpy(function, &address, sizeof address);
}

/* True if the file of a descriptor has a text in its path. */
static int is_file(int descriptor, const char *part) {
    char link[64], path[4096];
    if (!part || descriptor < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return strstr(path, part) != NULL;
}

static void *map;
static size_t map_bytes;

static void wait_for_ever(int number) {
    (void)number;
    for (;;) pause();
}

static void make_map_hang(void) {
    signal(SIGSEGV, wait_for_ever);
    if (map) mprotect(map, map_bytes, PROT_NONE);
}

int fsync(int descriptor) {
    static int calls;
    int (*real)(int);
    const char *seconds = setting("SLOW_FSYNC");
    if (is_file(descriptor, "safetensors") && __sync_fetch_and_add(&calls, 1) == 0) {
        if (seconds) sleep((unsigned)atoi(seconds));
        if (setting("HANGS_AFTER_SAVE")) make_map_hang();
    }
    if (is_file(descriptor, setting("HANGING_FSYNC"))) {
        fprintf(stderr, "fsync hangs\n");
        for (;;) pause();
    }
    find(&real, "fsync");
    return real(descriptor);
}

ssize_t write(int descriptor, const void *data, size_t bytes) {
    ssize_t (*real)(int, const void *, size_t);
    while (is_file(descriptor, setting("HANGING_WRITE"))) pause();
    find(&real, "write");
    return real(descriptor, data, bytes);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    size_t (*real)(const void *, size_t, size_t, FILE *);
    const char *number = size * count >= 1 << 20 ? setting("SIGNAL_IN_WRITE") : NULL;
    if (number) raise(atoi(number));
    find(&real, "fwrite");
    return real(data, size, count, file);
}

int statvfs(const char *path, struct statvfs *buffer) {
    int (*real)(const char *, struct statvfs *);
    const char *number = setting("SIGNAL_AT_START");
    for (int i = 0; number && i < 2; i++) raise(atoi(number));
    find(&real, "statvfs");
    return real(path, buffer);
}

int fcntl(int descriptor, int request, ...) {
    int (*real)(int, int, ...);
    va_list arguments;
    const char *command = request == F_SETLK ? setting("BEFORE_LOCK") : NULL;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (command && system(command) != 0) abort();
    find(&real, "fcntl");
    return real(descriptor, request, argument);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
    void *(*real)(void *, size_t, int, int, int, off_t);
    find(&real, "mmap");
    void *memory = real(address, bytes, protection, flags, descriptor, offset);
    if (memory == MAP_FAILED || !is_file(descriptor, setting("HANGING_MAP"))) return memory;
    map = memory, map_bytes = bytes;
    if (!setting("HANGS_AFTER_SAVE")) make_map_hang();
    return memory;
}
