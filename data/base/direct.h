/* direct.h: reads and writes past the page cache. */
#ifndef MT_DIRECT_H
#define MT_DIRECT_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_DIRECT = 4096 }; // alignment of memory, offsets and lengths for reads and writes past the page cache

/* The first aligned address from `memory` on. */
char *mt_align_direct(char *memory);

/* Opens a file for reads or writes past the page cache (O_DIRECT), which saves a copy and the cost of new cache pages.
 * -1 where the system or the file system cannot. */
int mt_open_direct(const char *path, int flags);

#ifdef __cplusplus
}
#endif
#endif
