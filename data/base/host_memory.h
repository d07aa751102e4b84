/* host_memory.h: the memory of the machine that a run may use. */
#ifndef MT_HOST_MEMORY_H
#define MT_HOST_MEMORY_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that this process and others of its container can still allocate: MemAvailable of /proc/meminfo, or less if a
 * memory limit of a control group (version 1 or 2) leaves less; 0 if the system does not say. `root` precedes the paths
 * of /proc and /sys; "" is the machine. */
int64_t mt_host_memory_available(const char *root);

#ifdef __cplusplus
}
#endif
#endif
