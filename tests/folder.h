/* folder.h: setup and teardown, in the form of cmocka, for an empty folder. */
#ifndef MT_TEST_FOLDER_H
#define MT_TEST_FOLDER_H

#include "new_folder.h"

#include <sys/stat.h>

static char root[64];

/* root/NAME; the last eight results stay valid. */
static inline const char *at(const char *name) {
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

static inline int make_root(void **state) {
    (void)state;
    return new_folder(root);
}

static inline int remove_root(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

#endif
