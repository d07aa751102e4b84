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

/* Prints an option's name that `text` begins with, and its origin if that is a file and not there already.
 * Returns the bytes of the name; 0: there is none. */
static size_t mt_option_print_origin(const mt_run_options *options, const char *text, FILE *file) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789-";
    size_t length = strncmp(text, "--", 2) == 0 ? strspn(text, letters) : 0;
    while (length > 2 && text[length - 1] == '-') length--;
    const mt_option *row = length > 2 ? mt_option_find(text + 2, length - 2) : NULL;
    if (!row) return 0;
    char *origin = mt_option_origin_text(options, row), place[320];
    snprintf(place, sizeof place, " (%.300s)", origin);
    bool is_there = strncmp(text + length, place, strlen(place)) == 0;
    bool is_named = strcmp(origin, "config.json") == 0 || strcmp(origin, "checkpoint") == 0 || strchr(origin, ':');
    fprintf(file, "%.*s%s", (int)length, text, is_named && !is_there ? place : "");
    free(origin);
    return length;
}

void mt_options_print_typed(const mt_run_options *options, const char *text, FILE *file) {
    const mt_strings *typed = &options->typed_names;
    bool begins = true; // a word
    while (*text) {
        int64_t i = 0;
        while (i < typed->count && !mt_option_is_renamed(text, &typed->items[i])) i += 2;
        size_t length = i < typed->count ? strlen(typed->items[i]) + 2 : 0;
        if (length > 0)
            fputs(typed->items[i + 1], file);
        else if (begins)
            length = mt_option_print_origin(options, text, file);
        if (length == 0) fputc(*text, file);
        begins = length == 0 && !isalnum((unsigned char)*text) && *text != '-';
        text += length > 0 ? length : 1;
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
