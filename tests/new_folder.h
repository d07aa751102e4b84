/* new_folder.h: a folder for the files of a test. */
#ifndef MT_TEST_NEW_FOLDER_H
#define MT_TEST_NEW_FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Creates a folder and writes its name to `path`; -1: failed. It is in memory if possible, since every save waits for
 * the disk. mkdtemp replaces the letters X, so that the name is new: a killed process may have left its folder. */
static inline int new_folder(char path[64]) {
    snprintf(path, 64, "%s/mt-test-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (mkdtemp(path)) return 0;
    perror(path);
    return -1;
}

#endif
