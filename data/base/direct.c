/* direct.c: reads and writes past the page cache. */
#include "direct.h"

#include <fcntl.h>

char *mt_align_direct(char *memory) {
    return memory + (-(uintptr_t)memory & (MT_DIRECT - 1));
}

int mt_open_direct(const char *path, int flags) {
#ifdef O_DIRECT
    return open(path, flags | O_DIRECT | O_NONBLOCK | O_CLOEXEC); // a pipe in the file's place must not block
#else
    (void)path, (void)flags;
    return -1;
#endif
}
