/* folder.h: setup and teardown, in the form of cmocka, for an empty folder. The folder is in memory if possible, since
 * every save waits for the disk. */
#ifndef MT_TEST_FOLDER_H
#define MT_TEST_FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64];

/* root/NAME; the last eight results stay valid. */
static inline const char *at(const char *name) {
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

/* The name is new: a process that was killed may have left its folder. */
static inline int make_root(void **state) {
    (void)state;
    snprintf(root, sizeof root, "%s/mt-test-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (mkdtemp(root)) return 0;
    perror(root);
    return -1;
}

static inline int remove_root(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

#endif
