/* host_memory.c: the memory of the machine that a run may use, from /proc and /sys.
 *
 * Linux, Documentation/filesystems/proc.rst (MemAvailable), Documentation/admin-guide/cgroup-v2.rst (memory.max,
 * memory.current) and cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes).
 */
#include "host_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 4096 };

/* The number after `key` and blanks at the begin of a line of a file, or with key "" the file's first number; -1 if
 * there is none ("max": no limit). */
static int64_t number_in(const char *path, const char *key) {
    char line[512];
    size_t length = strlen(key);
    int64_t value = -1;
    FILE *file = fopen(path, "r");
    while (file && value < 0 && fgets(line, sizeof line, file)) {
        char *end, *text = line + length;
        if (strncmp(line, key, length) != 0) continue;
        long long number = strtoll(text, &end, 10);
        if (end != text) value = number;
    }
    if (file) fclose(file);
    return value;
}

/* The names of one version's files. Usage includes the page cache, which the kernel frees before it refuses memory. */
typedef struct control_files {
    const char *mount, *limit, *usage, *cached[2];
} control_files;

static const control_files version1 = {"/sys/fs/cgroup/memory",
                                       "memory.limit_in_bytes",
                                       "memory.usage_in_bytes",
                                       {"total_inactive_file ", "total_active_file "}};
static const control_files version2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file ", "active_file "}};

/* Bytes that a control group's limit leaves; INT64_MAX if the group has no limit. */
static int64_t left_in_group(const control_files *files, const char *root, const char *group) {
    char path[PATH_BYTES + 64];
    snprintf(path, sizeof path, "%.1000s%s%.2000s/%s", root, files->mount, group, files->limit);
    int64_t limit = number_in(path, "");
    if (limit < 0) return INT64_MAX;
    snprintf(path, sizeof path, "%.1000s%s%.2000s/%s", root, files->mount, group, files->usage);
    int64_t used = mt_max(number_in(path, ""), 0);
    snprintf(path, sizeof path, "%.1000s%s%.2000s/memory.stat", root, files->mount, group);
    for (int i = 0; i < 2; i++) used -= mt_max(number_in(path, files->cached[i]), 0);
    return mt_max(limit - mt_max(used, 0), 1);
}

/* The memory that a control group may still use: the minimum over its own limit and its parents'. In a container the
 * path may be the host's, with groups that do not exist here; a group that is not found has no limit. */
static int64_t left_in_groups(const control_files *files, const char *root, char *group) {
    int64_t left = INT64_MAX;
    for (;;) {
        left = mt_min(left, left_in_group(files, root, group));
        char *slash = strrchr(group, '/');
        if (!slash) return left;
        *slash = 0;
    }
}

int64_t mt_host_memory_available(const char *root) {
    char path[PATH_BYTES], line[PATH_BYTES];
    snprintf(path, sizeof path, "%.1000s/proc/meminfo", root);
    int64_t kilobytes = number_in(path, "MemAvailable:");
    if (kilobytes < 0) return 0;
    int64_t left = 1024 * kilobytes;
    snprintf(path, sizeof path, "%.1000s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) { // "0::/path", or of version 1 "4:memory:/path"
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        bool is_version2 = controllers[1] == 0, has_memory = strcmp(controllers, ":memory") == 0;
        if (is_version2 || has_memory)
            left = mt_min(left, left_in_groups(is_version2 ? &version2 : &version1, root, group));
    }
    if (file) fclose(file);
    return left;
}
