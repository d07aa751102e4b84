/* option_agree.c: the options of all ranks are the same. */
#include "option_agree.h"

#include "option_table.h"

#include <stdlib.h>
#include <string.h>

/* Writes the values of all options as strings, one after another; returns their bytes. NULL only counts them. */
static int64_t mt_options_values(const mt_run_options *options, char *values) {
    int64_t bytes = 0;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_of(row->offset) != row) continue;
        char *text = mt_option_text(options, row);
        int64_t length = (int64_t)strlen(text) + 1;
        if (values) memcpy(values + bytes, text, (size_t)length);
        bytes += length;
        free(text);
    }
    return bytes;
}

/* Compares with the values of rank 0; true with error if one differs. */
static bool mt_options_differ(const mt_run_options *options, const char *values, int64_t bytes, int rank,
                              mt_error *error) {
    const char *end = values + bytes;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_of(row->offset) != row) continue;
        const char *theirs = values < end ? values : "";
        char *ours = mt_option_text(options, row);
        bool differs = strcmp(ours, theirs) != 0;
        if (differs)
            mt_error_set(error, "rank %d has --%s '%.200s' and rank 0 '%.200s'; give every rank the same options", rank,
                         row->name, ours, theirs);
        free(ours);
        if (differs) return true;
        values += strlen(theirs) + 1;
    }
    return false;
}

int mt_options_agree(const mt_run_options *options, const mt_group *world, mt_error *error) {
    if (world->size == 1) return 0;
    int64_t bytes = mt_options_values(options, NULL);
    mt_broadcast(world, &bytes, sizeof bytes, 0);
    char *values = mt_calloc(bytes + 1);
    if (world->rank == 0) mt_options_values(options, values);
    mt_broadcast(world, values, bytes, 0);
    bool differs = mt_options_differ(options, values, bytes, world->rank, error);
    free(values);
    return mt_agree(world, differs, error);
}
