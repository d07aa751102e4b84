/* option_typed.c: names of options in messages, as the user gave them. */
#include "option_typed.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

void mt_options_note_name(mt_run_options *options, const mt_option *row, const char *where, bool is_form) {
    const mt_option *option = mt_option_of(row->offset);
    const char *blank = strrchr(where, ' '), *name = blank ? blank + 1 : where + strlen("--");
    mt_strings *typed = &options->typed_names;
    int64_t i = 0;
    while (i < typed->count && strcmp(typed->items[i], option->name) != 0) i += 2;
    bool is_alias = !mt_option_named(option, name, strlen(name));
    if (i == typed->count && !is_alias) return;
    if (i == typed->count) mt_strings_add(typed, option->name), mt_strings_add(typed, where);
    char text[520];
    if (!is_alias)
        snprintf(text, sizeof text, "--%s", option->name);
    else if (is_form || row->type != option->type)
        snprintf(text, sizeof text, "--%s (by %s)", option->name, where);
    else
        snprintf(text, sizeof text, "%s", where);
    mt_string_set(&typed->items[i + 1], text);
}

/* True if `text` begins with the option of a pair, to be replaced by the text of the pair. */
static bool mt_option_is_renamed(const char *text, char *const pair[2]) {
    size_t length = strlen(pair[0]), typed = strlen(pair[1]);
    if (strncmp(text, "--", 2) != 0 || strncmp(text + 2, pair[0], length) != 0) return false;
    const char *end = text + 2 + length;
    bool is_longer = isalnum((unsigned char)*end) || (*end == '-' && isalnum((unsigned char)end[1]));
    bool is_replaced = typed > length + 2 && strncmp(text, pair[1], typed) == 0;
    return !is_longer && !is_replaced;
}

void mt_options_print_typed(const mt_run_options *options, const char *text, FILE *file) {
    const mt_strings *typed = &options->typed_names;
    while (*text) {
        int64_t i = 0;
        while (i < typed->count && !mt_option_is_renamed(text, &typed->items[i])) i += 2;
        if (i < typed->count)
            fputs(typed->items[i + 1], file);
        else
            fputc(*text, file);
        text += i < typed->count ? strlen(typed->items[i]) + 2 : 1;
    }
}

void mt_options_name_typed(const mt_run_options *options, mt_error *error) {
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    MT_CHECK(file);
    mt_options_print_typed(options, error->text, file);
    MT_CHECK(fclose(file) == 0);
    snprintf(error->text, sizeof error->text, "%s", text);
    free(text);
}
