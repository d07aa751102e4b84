/* file.h: reading and writing whole files, folders, and JSON. Every other file of data/ that needs one of these calls
 * it here. */
#ifndef MT_FILE_H
#define MT_FILE_H

#include "../../megatron.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- paths and folders */

/* "FOLDER/NAME"; free it. */
char *mt_path_join(const char *folder, const char *name);

/* The folder of a file, or the path itself if it is no file; free it. */
char *mt_path_folder(const char *path);

/* True if a file exists whose path is `length` bytes of `path` and then `end`. */
bool mt_path_exists(const char *path, int64_t length, const char *end);

/* True when folder/name exists; links are followed. */
bool mt_folder_has(const char *folder, const char *name);

/* True when two paths name the same file or folder, or are the same text up to slashes at the end. */
bool mt_path_same(const char *a, const char *b);

/* Creates a folder and its parents, and brings their names to the disk; no error if it exists. `option` (such as
 * "--save", or NULL) named the folder. */
int mt_folder_create(const char *folder, const char *option, mt_error *error);

/* Calls `visit` with every name in a folder, in no order, until a call returns other than 0; returns that status. */
typedef int mt_folder_visitor(const char *folder, const char *name, void *context);
int mt_folder_visit(const char *folder, mt_folder_visitor *visit, void *context);

/* The file that a path leads to by a link out of its folder, to free; NULL if it stays inside, or in the same model of
 * a Hugging Face cache, whose snapshots are links. */
char *mt_link_outside(const char *path);

/* An error if FOLDER/NAME is a link to a file that is not there, as a download that broke off leaves it in Hugging
 * Face's cache; no error without that name. */
int mt_link_check(const char *folder, const char *name, mt_error *error);

/* True when `text` ends with `end`. */
bool mt_text_ends_with(const char *text, const char *end);

/* ---- reading */

/* Opens a regular file for reading and gets its size; returns a descriptor, or -1 with error. A pipe, a device or a
 * folder is an error, found without waiting. Every file that is read is opened here, except the --input of
 * data/preprocess, which may be a pipe. */
int mt_file_open(const char *path, int64_t *bytes, mt_error *error);

/* Reads exactly `bytes` bytes from `offset`; -1 with errno, for mt_file_read_error. */
int mt_file_read_at(int descriptor, void *to, int64_t bytes, int64_t offset);

/* Sets the error of a file that mt_file_read_at failed to read, from errno: the file may have become shorter; returns
 * -1. */
int mt_file_read_error(mt_error *error, const char *path);

/* An error if an open file has fewer than `bytes` bytes. For mapped files: the end of the last page of a file that
 * became shorter reads as zeros. */
int mt_file_check_size(int descriptor, int64_t bytes, const char *path, mt_error *error);

/* Reads a whole regular file of at most `limit` bytes; returns it with a 0 behind its end, to free, or NULL with
 * error. */
char *mt_file_read(const char *path, int64_t limit, int64_t *bytes, mt_error *error);

/* A regular file mapped read-only; `bytes` is NULL if the file is empty. If the file becomes shorter while it is
 * mapped, a read of the lost part ends the program with an error that names the file. */
typedef struct mt_mapping {
    const uint8_t *bytes;
    int64_t size;
} mt_mapping;

/* Map and unmap a file. mt_mapping_make maps one that mt_file_open opened, which stays open. */
int mt_mapping_open(mt_mapping *mapping, const char *path, mt_error *error);
int mt_mapping_make(mt_mapping *mapping, int descriptor, int64_t bytes, const char *path, mt_error *error);
void mt_mapping_close(mt_mapping *mapping);

/* Gives back the memory of bytes of a mapping that were read; they are read again where they are used again. */
void mt_mapping_release(const void *bytes, int64_t count);

/* ---- writing */

/* Sets the error of a file that cannot be written, from errno; returns -1. `option` (such as "--save", or NULL) is the
 * one that named the file. */
int mt_file_write_error(mt_error *error, const char *path, const char *option);

/* Brings what was printed to standard output, which may be a file on a full disk. */
int mt_file_flush_output(mt_error *error);

/* Brings a file or a folder's entries to the disk. */
int mt_file_sync(const char *path, const char *option, mt_error *error);

/* A file that takes its place only when it is whole and on the disk. Write to `stream`; stdio remembers its errors.
 * Checkpoints are written otherwise (checkpoint_save.c): all ranks write their shares of each file at computed offsets,
 * from several threads and without stdio, while training goes on; and the files take their place together, by one
 * rename of their folder after the last rank is done. A stream of one process that renames its file can do neither. */
typedef struct mt_new_file {
    FILE *stream;           // NULL: not open, or sealed
    char *path, *temporary; // temporary NULL: written in place
    const char *option;
} mt_new_file;

/* Opens PATH.tmp-PID, or the path itself where it is a device or a pipe, which no file must replace. */
int mt_new_file_open(mt_new_file *file, const char *path, const char *option, mt_error *error);

/* Before the work: notes on standard error that a file with contents will be replaced by the new one. Until that is
 * whole it stays, so that an interrupted program loses nothing. `option`: the one that names the path. */
void mt_new_file_note(const char *path, const char *option);

/* Writes to an open file; does nothing for a file that is not open. */
int mt_new_file_write(mt_new_file *file, const void *data, int64_t bytes, mt_error *error);

/* Optional, where several files take their places together: brings the file to the disk and closes `stream`, so that
 * mt_new_file_close only renames it. */
int mt_new_file_seal(mt_new_file *file, mt_error *error);

/* With status 0: seals the file, renames it to its path, and syncs the folder. Else, or where one of these fails:
 * removes the temporary file, and an older file at the path stays. Returns the status, or -1 with error. Does nothing
 * for a file that is not open. */
int mt_new_file_close(mt_new_file *file, int status, mt_error *error);

/* Writes a whole file in this way. A link, a pipe or a device at the path is replaced by the file: this is for names in
 * a folder that the program manages, not for an output that the user named. */
int mt_file_write(const char *path, const void *data, int64_t bytes, const char *option, mt_error *error);

/* ---- contents that must be equal on all ranks */

/* A hash of a file's size and of all its bytes. If the file has more than 256 MiB and `whole` is false, it reads only
 * 16,384 pieces of 4 KiB at even distances, the first and the last among them. */
uint64_t mt_contents_fingerprint(const void *bytes, int64_t size, bool whole);

/* If a fingerprint of a rank differs from rank 0's, all ranks return an error with that rank and the name that belongs
 * to it. `count` is the same on all ranks. Every rank calls it. */
int mt_fingerprints_agree(const uint64_t *prints, const char *const *names, int64_t count, const mt_group *world,
                          mt_error *error);

/* ---- locks */

/* Opens FOLDER/NAME and takes a lock on it that ends with this process or when the descriptor is closed. Returns a
 * descriptor, or -1 with an error that names the holder's process and host. A link, a pipe or a device with that name
 * is an error, and stays as it is. This is a lock of fcntl, which NFS version 3 (with its lock daemon) and version 4,
 * Lustre (mounted with flock) and GPFS keep for all hosts; a server frees it when the holder's host is gone. Where the
 * file system has no locks, the call warns on standard error and succeeds: a second holder is then not noticed. The
 * file stays, as removing it could leave two holders with a file each. */
int mt_folder_lock(const char *folder, const char *name, const char *option, mt_error *error);

/* The folders of a path, from the last one on, that mt_folder_create would make. */
int mt_folder_missing(const char *folder);

/* Removes the file of a lock that this process holds, and of the folders of the path the last `made`, which this
 * process has made: unless a folder holds anything else. */
void mt_folder_unlock(const char *folder, const char *name, int made);

/* An error, as mt_folder_lock's, if another process holds the lock; takes no lock. A process that holds it itself must
 * not call this: closing the file would release the lock. */
int mt_folder_check_lock(const char *folder, const char *name, const char *option, mt_error *error);

/* ---- JSON */

/* Parses JSON that must be an object; NULL with error, which names the file and line. `path` NULL: a line of a file;
 * the caller puts its name before the error. `flags` are jansson's: with JSON_REJECT_DUPLICATES a key may not come
 * twice, as readers would disagree on its value. An integer that int64_t cannot hold is read as a real number, so that
 * readers of an integer refuse it and others need not care. */
json_t *mt_json_parse(const char *text, int64_t bytes, size_t flags, const char *path, mt_error *error);

/* The same, with JSON_REJECT_DUPLICATES, for a file of at most 100,000,000 bytes. */
json_t *mt_json_read(const char *path, mt_error *error);

/* True if the item is an integer of [low, high]; *value is set to it. */
bool mt_json_int(const json_t *item, int64_t low, int64_t high, int64_t *value);

/* Types of a JSON value, as bits. */
enum {
    MT_JSON_BOOL = 1 << JSON_TRUE | 1 << JSON_FALSE,
    MT_JSON_INT = 1 << JSON_INTEGER,
    MT_JSON_NUMBER = 1 << JSON_INTEGER | 1 << JSON_REAL,
    MT_JSON_STRING = 1 << JSON_STRING,
    MT_JSON_LIST = 1 << JSON_ARRAY,
    MT_JSON_OBJECT = 1 << JSON_OBJECT
};

/* A key, the types that its value may have, and their names for the message. */
typedef struct mt_json_field {
    const char *key;
    unsigned types;
    const char *wanted;
} mt_json_field;

/* An error that names file, key and value if a value of the object has another type; null counts as absent. So readers
 * behind it may take what has another type for absent. */
int mt_json_check_fields(const json_t *object, const mt_json_field *fields, size_t count, const char *path,
                         mt_error *error);

/* Sets object[key]. */
void mt_json_set_int(json_t *object, const char *key, int64_t value);
void mt_json_set_real(json_t *object, const char *key, double value);
void mt_json_set_bool(json_t *object, const char *key, bool value);
void mt_json_set_string(json_t *object, const char *key, const char *value);

/* A number; null if it is not finite, which JSON does not have. */
json_t *mt_json_real(double value);

/* Indented text, to free, with the fewest digits that read back as the same numbers: 0.1, not 0.10000000000000001. */
char *mt_json_print(const json_t *root);

#ifdef __cplusplus
}
#endif
#endif
