/* json.h: small texts of files, and what jansson leaves to be written. */
#ifndef MT_JSON_H
#define MT_JSON_H

#include "../megatron.h"

#include <jansson.h>

/* Reads a whole text file of at most `limit` bytes; NULL with error when that fails. Returns text to free. */
char *mt_options_read_text(const char *path, int64_t limit, int64_t *bytes, mt_error *error);

/* Sets a key of an object. */
void mt_json_set_int(json_t *object, const char *key, int64_t value);
void mt_json_set_real(json_t *object, const char *key, double value);
void mt_json_set_bool(json_t *object, const char *key, bool value);
void mt_json_set_string(json_t *object, const char *key, const char *value);

/* The text with the fewest digits that reads back as the same numbers: 0.1, not 0.10000000000000001. Free it. */
char *mt_json_print(const json_t *root);

#endif
