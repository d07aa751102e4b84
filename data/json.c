/* json.c: small texts of files, and what jansson leaves to be written. */
#include "json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

char *mt_options_read_text(const char *path, int64_t limit, int64_t *bytes, mt_error *error) {
    struct stat status;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &status) != 0 || S_ISDIR(status.st_mode)) {
        mt_error_set(error, "%s: cannot be read: %s", path, file ? "it is a folder" : strerror(errno));
        if (file) fclose(file);
        return NULL;
    }
    char *text = mt_malloc(limit + 1);
    *bytes = (int64_t)fread(text, 1, (size_t)limit + 1, file);
    bool failed = ferror(file) != 0;
    fclose(file);
    if (failed || *bytes > limit) {
        mt_error_set(error, "%s: %s", path, failed ? strerror(errno) : "is far too large for a configuration");
        free(text);
        return NULL;
    }
    text[*bytes] = 0;
    return text;
}

void mt_json_set_int(json_t *object, const char *key, int64_t value) {
    json_object_set_new(object, key, json_integer(value));
}

void mt_json_set_real(json_t *object, const char *key, double value) {
    json_object_set_new(object, key, json_real(value));
}

void mt_json_set_bool(json_t *object, const char *key, bool value) {
    json_object_set_new(object, key, json_boolean(value));
}

void mt_json_set_string(json_t *object, const char *key, const char *value) {
    json_object_set_new(object, key, json_string(value));
}

char *mt_json_print(const json_t *root) {
    for (size_t digits = 15;; digits++) {
        char *text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(digits));
        json_t *again = json_loads(text, 0, NULL);
        bool same = json_equal(root, again);
        json_decref(again);
        if (same || digits == 17) return text;
        free(text);
    }
}
