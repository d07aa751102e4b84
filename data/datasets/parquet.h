/* parquet.h: files of Parquet, whose rows are read as lines of JSON. There is no small library for the format, so
 * pyarrow or duckdb reads it, in a process of Python of its own. */
#ifndef MT_PARQUET_H
#define MT_PARQUET_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* True if a file has Parquet's mark at its beginning, or a name that ends with .parquet. `bytes` are the file's first
 * `size` bytes. */
bool mt_is_parquet(const char *path, const void *bytes, int64_t size);

/* Takes a row, a JSON object of `bytes` bytes that names its columns; `number` counts rows from 1. The rest are read as
 * long as it returns 0. */
typedef int mt_parquet_visit(const char *row, int64_t bytes, int64_t number, void *context);

/* Reads the rows of a file in order. Lists, structs and maps of a column are arrays and objects; nulls and NaN are
 * null; bytes are a text if they are UTF-8, those of a PNG or JPEG data:image/...;base64,..., and else {"bytes": N};
 * times, decimals and infinities are texts. Returns the status of the last visit, or -1 with error: neither pyarrow nor
 * duckdb is there, the file is damaged or has two columns of one name. `columns`, if not NULL, gets the names of the
 * columns, with ", " between them, to free. */
int mt_parquet_read(const char *path, char **columns, mt_parquet_visit *visit, void *context, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
