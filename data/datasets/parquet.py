"""Writes the rows of a file of Parquet as lines of JSON, for parquet.c, which starts it once for each file.

The argument is the path. A line feed comes when a package was found; then a line "=" and the names of the columns, a
list in JSON; a line for each row; and a last line, "=" or "!" and an error. Columns of bytes become texts of UTF-8, or
objects that no reader takes for a text; those of a picture, PNG or JPEG, the address data:image/...;base64,... Numbers that JSON has not are null or texts.
"""
import sys
sys.path = [p for p in sys.path if p]  # no module of the current folder
import base64, datetime, json, math, os
try:
    import pyarrow.parquet
    duckdb = None
except ImportError:
    try:
        import duckdb
    except ImportError:
        sys.exit(3)

ROWS = 1000  # that are in memory at once
PICTURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}  # by their first bytes


def plain(value):
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            for begin, kind in PICTURES.items():
                if bytes(value).startswith(begin):
                    return "data:image/%s;base64,%s" % (kind, base64.b64encode(value).decode())
            return {"bytes": len(value)}
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)  # Decimal, UUID, timedelta


# The names of the columns, then rows, each a list of values. Of a path, pyarrow reads a scheme such as s3:.
def by_pyarrow(path):
    with open(path, "rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
        yield list(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=ROWS, use_threads=False):
            columns = [values_of(column) for column in batch.columns]
            yield from zip(*columns)


# Python has no values for some columns, such as times in nanoseconds or maps that have a key twice. They are lists of
# pairs or texts, or else "<TYPE>".
def values_of(column):
    for convert in (lambda: column.to_pylist(maps_as_pydicts="strict"),
                    lambda: column.to_pylist(),  # also where pyarrow is older
                    lambda: column.cast("string").to_pylist()):
        try:
            return convert()
        except (TypeError, ValueError, KeyError, NotImplementedError):
            pass
    return ["<%s>" % column.type] * len(column)


# duckdb gives other names to columns whose names differ in upper case alone, or not at all.
def names_by_duckdb(connection, source):
    elements = connection.execute("SELECT name, num_children FROM parquet_schema(?)", [source]).fetchall()
    names, skipped = [], 0  # skipped: elements of the last column that are left
    for name, children in elements[1:]:
        if skipped == 0:
            names.append(name)
        skipped += (children or 0) - (skipped > 0)
    return names


# The file is named by its descriptor, since duckdb reads * ? and [ in a path as a pattern.
def by_duckdb(path):
    with open(path, "rb") as file:
        connection = duckdb.connect()
        connection.execute("SET threads = 1")
        source = "/dev/fd/%d" % file.fileno()
        yield names_by_duckdb(connection, source)
        rows = connection.execute("SELECT * FROM read_parquet(?)", [source])
        while True:
            batch = rows.fetchmany(ROWS)
            if not batch:
                return
            yield from batch


def write(text):
    sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")


def main(path):
    write("")
    sys.stdout.buffer.flush()
    try:
        rows = by_duckdb(path) if duckdb else by_pyarrow(path)
        names = next(rows)
        repeated = [name for i, name in enumerate(names) if name in names[:i]]
        if repeated:
            raise ValueError("two columns have the name %s" % repeated[0])
        write("=" + json.dumps(names))
        for row in rows:
            write(json.dumps(dict(zip(names, map(plain, row))), ensure_ascii=False))
        write("=")
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        write("!" + " ".join(str(error).split())[:1000])
    sys.stdout.buffer.flush()


main(sys.argv[1])
