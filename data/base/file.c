/* file.c: reading and writing whole files, folders, and JSON. */
#include "file.h"

#include "watchdog.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- paths and folders */

char *mt_path_join(const char *folder, const char *name) {
    char *path = mt_malloc((int64_t)(strlen(folder) + strlen(name)) + 2);
    sprintf(path, "%s/%s", folder, name);
    return path;
}

char *mt_path_folder(const char *path) {
    struct stat info;
    char *folder = mt_strdup(path), *slash = strrchr(folder, '/');
    bool is_file = stat(path, &info) == 0 && S_ISREG(info.st_mode);
    if (is_file) strcpy(slash ? slash : folder, slash ? "" : ".");
    if (!*folder) {
        free(folder);
        folder = mt_strdup("/");
    }
    return folder;
}

int mt_link_check(const char *folder, const char *name, mt_error *error) {
    char target[1024], *path = mt_path_join(folder, name);
    ssize_t length = readlink(path, target, sizeof target - 1);
    bool leads = length < 0 || access(path, F_OK) == 0;
    if (!leads) {
        target[length] = 0;
        mt_error_set(error, "%s: is a link to %.1000s: %s; get the file again", path, target, strerror(errno));
    }
    free(path);
    return leads ? 0 : -1;
}

bool mt_path_exists(const char *path, int64_t length, const char *end) {
    char *whole = mt_malloc(length + (int64_t)strlen(end) + 1);
    sprintf(whole, "%.*s%s", (int)length, path, end);
    bool exists = access(whole, F_OK) == 0;
    free(whole);
    return exists;
}

bool mt_folder_has(const char *folder, const char *name) {
    char *path = mt_path_join(folder, name);
    bool exists = access(path, F_OK) == 0;
    free(path);
    return exists;
}

bool mt_path_same(const char *a, const char *b) {
    struct stat x, y;
    if (stat(a, &x) == 0 && stat(b, &y) == 0) return x.st_dev == y.st_dev && x.st_ino == y.st_ino;
    size_t a_length = strlen(a), b_length = strlen(b);
    while (a_length > 1 && a[a_length - 1] == '/') a_length--;
    while (b_length > 1 && b[b_length - 1] == '/') b_length--;
    return a_length == b_length && memcmp(a, b, a_length) == 0;
}

int mt_folder_visit(const char *folder, mt_folder_visitor *visit, void *context) {
    DIR *directory = opendir(folder);
    int status = 0;
    if (!directory) return 0;
    for (struct dirent *entry; status == 0 && (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = visit(folder, entry->d_name, context);
    closedir(directory);
    return status;
}

/* The real path of the folder that a path is in, to free; NULL if there is none. */
static char *mt_real_folder(const char *path) {
    char *folder = mt_strdup(path), *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    char *real = realpath(slash ? folder : ".", NULL);
    free(folder);
    return real;
}

/* True if a real path lies in the folder that is `bytes` bytes of `folder` and then `below`. */
static bool mt_path_is_in(const char *path, const char *folder, size_t bytes, const char *below) {
    return strncmp(path, folder, bytes) == 0 && strncmp(path + bytes, below, strlen(below)) == 0;
}

char *mt_link_outside(const char *path) {
    char *real = realpath(path, NULL), *folder = mt_real_folder(path);
    const char *snapshot = folder ? strrchr(folder, '/') : NULL;
    bool inside = !real || !folder || mt_path_is_in(real, folder, strlen(folder), "/");
    // Hugging Face's cache: MODEL/snapshots/HASH/NAME is a link to MODEL/blobs/HASH
    const char below[] = "/snapshots";
    size_t model = snapshot ? (size_t)(snapshot - folder) : 0;
    if (!inside && model >= sizeof below && strncmp(snapshot - (sizeof below - 1), below, sizeof below - 1) == 0)
        inside = mt_path_is_in(real, folder, model - (sizeof below - 1), "/blobs/");
    free(folder);
    if (!inside) return real;
    free(real);
    return NULL;
}

bool mt_text_ends_with(const char *text, const char *end) {
    size_t length = strlen(text), end_length = strlen(end);
    return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

/* ---- reading */

/* A blend of data may have more files than the soft limit, which protects old programs that call select. */
static bool mt_raise_file_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return false;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

/* The file's kind is checked before it is opened, because opening a device can have effects, and again afterwards,
 * because a pipe may have taken its place: with O_NONBLOCK the call does not wait for the pipe's writer. */
int mt_file_open(const char *path, int64_t *bytes, mt_error *error) {
    const int flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    struct stat status;
    *bytes = 0;
    bool regular = stat(path, &status) != 0 || S_ISREG(status.st_mode);
    int descriptor = regular ? open(path, flags) : -1;
    if (descriptor < 0 && regular && errno == EMFILE && mt_raise_file_limit()) descriptor = open(path, flags);
    if (descriptor < 0 && regular)
        return mt_error_set(error, "%s: cannot be read: %s; check the path and its permissions", path, strerror(errno));
    if (regular) MT_CHECK(fstat(descriptor, &status) == 0);
    if (S_ISREG(status.st_mode)) {
        fcntl(descriptor, F_SETFL, 0);
        *bytes = status.st_size;
        return descriptor;
    }
    if (descriptor >= 0) close(descriptor);
    return mt_error_set(error, "%s: cannot be read: it is %s, not a file; check the path", path,
                        S_ISDIR(status.st_mode)    ? "a folder"
                        : S_ISFIFO(status.st_mode) ? "a pipe"
                        : S_ISSOCK(status.st_mode) ? "a socket"
                                                   : "a device");
}

int mt_file_read_at(int descriptor, void *to, int64_t bytes, int64_t offset) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t got = pread(descriptor, (char *)to + done, (size_t)(bytes - done), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = ENODATA; // mt_file_read_error explains it
        if (got <= 0) return -1;
        done += got;
    }
    return 0;
}

int mt_file_read_error(mt_error *error, const char *path) {
    bool shorter = errno == ENODATA;
    return mt_error_set(error, "%s: cannot be read: %s; %s", path,
                        shorter ? "it became shorter while it was in use" : strerror(errno),
                        shorter ? "get the file again" : "check the disk");
}

int mt_file_check_size(int descriptor, int64_t bytes, const char *path, mt_error *error) {
    struct stat status;
    if (fstat(descriptor, &status) == 0 && status.st_size >= bytes) return 0;
    errno = ENODATA;
    return mt_file_read_error(error, path);
}

char *mt_file_read(const char *path, int64_t limit, int64_t *bytes, mt_error *error) {
    int descriptor = mt_file_open(path, bytes, error);
    if (descriptor < 0) return NULL;
    char *text = NULL;
    if (*bytes > limit) {
        mt_error_set(error, "%s: is far too large, over %lld bytes; check the path", path, (long long)limit);
    } else {
        text = mt_malloc(*bytes + 1);
        text[*bytes] = 0;
        if (mt_file_read_at(descriptor, text, *bytes, 0) != 0) {
            mt_file_read_error(error, path);
            free(text);
            text = NULL;
        }
    }
    close(descriptor);
    return text;
}

/* ---- mapped files: reading a page that the file no longer has raises SIGBUS */

typedef struct mt_mapped_file {
    const uint8_t *bytes;
    int64_t size;
    char *path;
    struct mt_mapped_file *next;
} mt_mapped_file;

static mt_mapped_file *mt_mapped_files; // read by the handler
static pthread_mutex_t mt_mapped_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction mt_sigbus_before;

/* write(2), whose result cannot be reported here. */
static void mt_write_text(const char *text) {
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    (void)ignored;
}

/* Names the mapped file at the address and ends the program. Any other address is for the handler before. */
static void mt_sigbus(int number, siginfo_t *info, void *context) {
    const uint8_t *address = info->si_addr;
    (void)context;
    for (const mt_mapped_file *file = mt_mapped_files; file; file = file->next) {
        if (address < file->bytes || address >= file->bytes + file->size) continue;
        if (mt_launch_rank() > 0) sleep(2); // like mt_die: an error of all ranks is printed once
        mt_write_text("error: ");
        mt_write_text(file->path);
        mt_write_text(": cannot be read: it became shorter while it was in use, or its disk failed; get the file "
                      "again\n");
        _exit(1);
    }
    sigaction(number, &mt_sigbus_before, NULL); // the instruction runs again, and faults again
}

static void mt_sigbus_catch(void) {
    struct sigaction action = {.sa_sigaction = mt_sigbus, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &action, &mt_sigbus_before);
}

static void mt_mapping_register(const mt_mapping *mapping, const char *path) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    mt_mapped_file *file = mt_malloc(sizeof *file);
    pthread_once(&once, mt_sigbus_catch);
    pthread_mutex_lock(&mt_mapped_lock);
    *file = (mt_mapped_file){mapping->bytes, mapping->size, mt_strdup(path), mt_mapped_files};
    mt_mapped_files = file;
    pthread_mutex_unlock(&mt_mapped_lock);
}

static void mt_mapping_forget(const mt_mapping *mapping) {
    pthread_mutex_lock(&mt_mapped_lock);
    mt_mapped_file **link = &mt_mapped_files;
    while ((*link)->bytes != mapping->bytes) link = &(*link)->next;
    mt_mapped_file *file = *link;
    *link = file->next;
    pthread_mutex_unlock(&mt_mapped_lock);
    free(file->path);
    free(file);
}

int mt_mapping_make(mt_mapping *mapping, int descriptor, int64_t bytes, const char *path, mt_error *error) {
    *mapping = (mt_mapping){.size = bytes};
    if (bytes == 0) return 0; // mmap fails on empty files
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) return mt_error_set(error, "%s: cannot be mapped: %s", path, strerror(errno));
    mapping->bytes = memory;
    mt_mapping_register(mapping, path);
    return 0;
}

int mt_mapping_open(mt_mapping *mapping, const char *path, mt_error *error) {
    int64_t bytes;
    *mapping = (mt_mapping){0};
    int descriptor = mt_file_open(path, &bytes, error);
    if (descriptor < 0) return -1;
    int status = mt_mapping_make(mapping, descriptor, bytes, path, error);
    close(descriptor);
    return status;
}

void mt_mapping_release(const void *bytes, int64_t count) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)bytes / page * page;
    if (bytes && count > 0) (void)madvise((void *)begin, (uintptr_t)bytes + (uintptr_t)count - begin, MADV_DONTNEED);
}

void mt_mapping_close(mt_mapping *mapping) {
    if (mapping->bytes) {
        mt_mapping_forget(mapping);
        munmap((void *)mapping->bytes, (size_t)mapping->size);
    }
    *mapping = (mt_mapping){0};
}

/* ---- writing */

int mt_file_write_error(mt_error *error, const char *path, const char *option) {
    int reason = errno;
    bool full = reason == ENOSPC || reason == EDQUOT;
    if (reason == EFBIG)
        return mt_error_set(error, "%s: cannot be written: too large for the limit on file sizes; raise it (ulimit -f)",
                            path);
    return mt_error_set(error, "%s: cannot be written: %s; %schoose another %s", path, strerror(reason),
                        full ? "free some space or " : "", option ? option : "path");
}

int mt_file_flush_output(mt_error *error) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return mt_error_set(error, "standard output: cannot be written: %s", strerror(errno));
}

int mt_file_sync(const char *path, const char *option, mt_error *error) {
    int watched = mt_watch_file_begin(path, MT_FILE_SAVE);
    int descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    bool good = descriptor >= 0 && (fsync(descriptor) == 0 || errno == EINVAL); // EINVAL: nothing to bring to a disk
    int status = good ? 0 : mt_file_write_error(error, path, option);
    if (descriptor >= 0) close(descriptor);
    mt_watch_file_end(watched);
    return status;
}

static void mt_new_file_free(mt_new_file *file) {
    free(file->path);
    free(file->temporary);
    *file = (mt_new_file){0};
}

/* With `replace`, the new file takes the place of a link, a pipe or a device too, and of any leftover with the
 * temporary name. */
static int mt_new_file_open_as(mt_new_file *file, const char *path, bool replace, const char *option, mt_error *error) {
    struct stat status;
    int64_t length = (int64_t)strlen(path) + 32;
    bool exists = (replace ? lstat(path, &status) : stat(path, &status)) == 0;
    bool is_folder = exists && S_ISDIR(status.st_mode);
    *file = (mt_new_file){.path = mt_strdup(path), .option = option};
    if (!exists || S_ISREG(status.st_mode) || replace) {
        file->temporary = mt_malloc(length);
        snprintf(file->temporary, (size_t)length, "%s.tmp-%lld", path, (long long)getpid());
    }
    if (replace && !is_folder) unlink(file->temporary);
    errno = EISDIR;
    if (!is_folder) file->stream = fopen(file->temporary ? file->temporary : path, replace ? "wbx" : "wb");
    if (file->stream) return 0;
    mt_file_write_error(error, path, option);
    mt_new_file_free(file);
    return -1;
}

int mt_new_file_open(mt_new_file *file, const char *path, const char *option, mt_error *error) {
    return mt_new_file_open_as(file, path, false, option, error);
}

void mt_new_file_note(const char *path, const char *option) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) return;
    fprintf(stderr, "note: %s %s is there already; it will be replaced when the new file is whole\n", option, path);
}

/* Syncs the folder that a path is in, so that the path's new entry survives a crash. */
static int mt_file_sync_folder(const char *path, const char *option, mt_error *error) {
    const char *slash = strrchr(path, '/');
    char *folder = mt_strdup(slash ? path : ".");
    if (slash) folder[slash == path ? 1 : slash - path] = 0;
    int status = mt_file_sync(folder, option, error);
    free(folder);
    return status;
}

/* A power loss must not remove a new folder, whose contents were synced. Its parent is synced, unless it may only be
 * entered and not read. */
static int mt_folder_sync_parent(const char *path, const char *option, mt_error *error) {
    int status = mt_file_sync_folder(path, option, error);
    return status != 0 && errno == EACCES ? 0 : status;
}

int mt_folder_create(const char *folder, const char *option, mt_error *error) {
    char *path = mt_strdup(folder);
    struct stat status;
    int synced = 0, made = -1;
    for (char *slash = path + 1, end = *path; end && synced == 0; slash++) {
        if (*slash && *slash != '/') continue;
        end = *slash;
        *slash = 0;
        made = mkdir(path, 0777); // the last mkdir reports a failure of the ones before
        if (made == 0) synced = mt_folder_sync_parent(path, option, error);
        *slash = end;
    }
    int reason = errno;
    bool is_folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    free(path);
    if (synced != 0 || made == 0 || is_folder) return synced;
    return mt_error_set(error, "%s: the folder cannot be made: %s; choose another %s", folder, strerror(reason),
                        option ? option : "path");
}

int mt_new_file_write(mt_new_file *file, const void *data, int64_t bytes, mt_error *error) {
    if (!file->stream || bytes == 0 || fwrite(data, 1, (size_t)bytes, file->stream) == (size_t)bytes) return 0;
    return mt_file_write_error(error, file->path, file->option);
}

int mt_new_file_seal(mt_new_file *file, mt_error *error) {
    bool failed = ferror(file->stream) != 0; // of an earlier write: errno is still its reason, or the next flush fails
    int reason = errno, watched = mt_watch_file_begin(file->path, MT_FILE_SAVE);
    bool whole = fflush(file->stream) == 0 && (!file->temporary || fsync(fileno(file->stream)) == 0);
    if (!whole) reason = errno;
    if (fclose(file->stream) != 0 && whole) whole = false, reason = errno;
    file->stream = NULL;
    mt_watch_file_end(watched);
    errno = reason;
    return whole && !failed ? 0 : mt_file_write_error(error, file->path, file->option);
}

int mt_new_file_close(mt_new_file *file, int status, mt_error *error) {
    if (!file->path) return status;
    if (status == 0 && file->stream) status = mt_new_file_seal(file, error);
    if (file->stream) fclose(file->stream);
    if (status == 0 && file->temporary && rename(file->temporary, file->path) != 0)
        status = mt_file_write_error(error, file->path, file->option);
    if (status != 0 && file->temporary)
        unlink(file->temporary);
    else if (file->temporary)
        status = mt_file_sync_folder(file->path, file->option, error);
    mt_new_file_free(file);
    return status;
}

int mt_file_write(const char *path, const void *data, int64_t bytes, const char *option, mt_error *error) {
    mt_new_file file;
    if (mt_new_file_open_as(&file, path, true, option, error) != 0) return -1;
    return mt_new_file_close(&file, mt_new_file_write(&file, data, bytes, error), error);
}

/* ---- contents that must be equal on all ranks */

/* Mixes bytes into a hash, eight at a time: xor, then an odd multiplier (Steele and others, "Fast splittable
 * pseudorandom number generators"). */
static uint64_t mt_hash_add(uint64_t hash, const char *bytes, int64_t size) {
    for (int64_t i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, (size_t)mt_min(8, size - i));
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
    return hash;
}

uint64_t mt_contents_fingerprint(const void *bytes, int64_t size, bool whole) {
    enum { PIECE = 4096, PIECES = 1 << 14, WHOLE = 1 << 28 };
    uint64_t hash = (uint64_t)size + 1;
    if (whole || size <= WHOLE) return mt_hash_add(hash, bytes, size);
    for (int64_t i = 0; i < PIECES; i++)
        hash = mt_hash_add(hash, (const char *)bytes + (int64_t)((double)(size - PIECE) / (PIECES - 1) * (double)i),
                           PIECE);
    return hash;
}

int mt_fingerprints_agree(const uint64_t *prints, const char *const *names, int64_t count, const mt_group *world,
                          mt_error *error) {
    int64_t differs = 0;
    if (world->size == 1 || count == 0) return 0;
    uint64_t *theirs = mt_malloc(count * 8);
    memcpy(theirs, prints, (size_t)count * 8);
    mt_broadcast(world, theirs, count * 8, 0);
    while (differs < count && theirs[differs] == prints[differs]) differs++;
    if (differs < count)
        mt_error_set(error, "rank %d has another %s than rank 0; give every rank the same files", world->rank,
                     names[differs]);
    free(theirs);
    return mt_agree(world, differs < count, error);
}

/* ---- locks */

/* The folder may come from a stranger: a link must not lead to another file, whose contents would be lost. */
static int mt_lock_open(const char *path, const char *option, mt_error *error) {
    const int flags = O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    struct stat status;
    bool regular = lstat(path, &status) != 0 || S_ISREG(status.st_mode);
    int descriptor = regular ? open(path, flags, 0666) : -1;
    if (descriptor < 0 && regular && errno != ELOOP) return mt_file_write_error(error, path, option);
    if (descriptor >= 0 && fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode)) return descriptor;
    if (descriptor >= 0) close(descriptor);
    return mt_error_set(error, "%s: cannot be locked: it is not a regular file; remove it, or choose another %s", path,
                        option);
}

/* Names the holder, as the file of the lock does. */
static int mt_lock_refuse(int descriptor, const char *folder, const char *option, mt_error *error) {
    char text[300] = "";
    ssize_t length = pread(descriptor, text, sizeof text - 1, 0);
    text[length > 0 ? strcspn(text, "\n") : 0] = 0;
    return mt_error_set(error, "%s: is in use by another run, %s; wait for its end, or choose another %s", folder,
                        *text ? text : "whose process is unknown", option);
}

int mt_folder_check_lock(const char *folder, const char *name, const char *option, mt_error *error) {
    struct flock lock = {.l_type = F_RDLCK};
    struct stat file;
    char *path = mt_path_join(folder, name);
    int descriptor = lstat(path, &file) == 0 && S_ISREG(file.st_mode) ? mt_lock_open(path, option, error) : -1;
    bool held = descriptor >= 0 && fcntl(descriptor, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
    if (held) mt_lock_refuse(descriptor, folder, option, error);
    if (descriptor >= 0) close(descriptor);
    free(path);
    return held ? -1 : 0;
}

static int mt_note_other(const char *folder, const char *name, void *lock) {
    (void)folder;
    return strcmp(name, lock) != 0;
}

/* Cuts the last name of a path, with the slashes around it; false if there is no other. */
static bool mt_path_cut(char *path) {
    char *end = path + strlen(path);
    while (end > path && end[-1] == '/') end--;
    while (end > path && end[-1] != '/') end--;
    while (end > path && end[-1] == '/') end--;
    *end = 0;
    return end > path;
}

int mt_folder_missing(const char *folder) {
    char *path = mt_strdup(folder);
    int missing = 0;
    for (bool more = true; more && access(path, F_OK) != 0; more = mt_path_cut(path)) missing++;
    free(path);
    return missing;
}

void mt_folder_unlock(const char *folder, const char *name, int made) {
    if (mt_folder_visit(folder, mt_note_other, (void *)name) != 0) return;
    char *path = mt_path_join(folder, name);
    unlink(path);
    while (made-- > 0 && mt_path_cut(path) && rmdir(path) == 0) continue;
    free(path);
}

/* False if the holder before has removed the file, so that this lock of it would exclude no one. */
static bool mt_lock_is_placed(int descriptor, const char *path) {
    struct stat held, placed;
    return fstat(descriptor, &held) != 0 || (stat(path, &placed) == 0 && held.st_ino == placed.st_ino);
}

int mt_folder_lock(const char *folder, const char *name, const char *option, mt_error *error) {
    struct flock lock = {.l_type = F_WRLCK}; // from the start of the file to its end
    char host[256] = "", text[300];
    char *path = mt_path_join(folder, name);
    int descriptor = mt_lock_open(path, option, error), status = descriptor < 0 ? -1 : 0;
    if (status == 0 && fcntl(descriptor, F_SETLK, &lock) != 0) {
        bool held = errno == EACCES || errno == EAGAIN;
        int reason = errno;
        if (held)
            status = mt_lock_refuse(descriptor, folder, option, error);
        else
            fprintf(stderr, "warning: %s: cannot be locked: %s; a second run there would not be noticed\n", path,
                    strerror(reason));
    } else if (status == 0 && !mt_lock_is_placed(descriptor, path)) {
        status = mt_error_set(error, "%s: another run has just ended there; give the command again", folder);
    } else if (status == 0) { // on a full disk the holder stays unnamed
        gethostname(host, sizeof host - 1);
        int length = snprintf(text, sizeof text, "process %lld on host %s\n", (long long)getpid(), host);
        if (ftruncate(descriptor, 0) != 0 || pwrite(descriptor, text, (size_t)length, 0) != length) errno = 0;
    }
    free(path);
    if (status != 0 && descriptor >= 0) close(descriptor);
    return status == 0 ? descriptor : -1;
}

/* ---- JSON */

/* After the caller's name of the line. */
static void mt_json_describe_line(bool parsed, const json_error_t *detail, mt_error *error) {
    if (parsed)
        mt_error_set(error, "is not a JSON object; correct or remove the line");
    else if (json_error_code(detail) == json_error_premature_end_of_input)
        mt_error_set(error, "is cut short (%s); correct or remove the line", detail->text);
    else
        mt_error_set(error, "is not valid JSON at column %d: %s; correct or remove the line", detail->column,
                     detail->text);
}

/* The end of a number that begins at `text`; *is_int: it has neither a fraction nor an exponent. */
static const char *mt_json_number_end(const char *text, const char *end, bool *is_int) {
    *is_int = true;
    for (; text < end && (isalnum((unsigned char)*text) || *text == '.' || *text == '+' || *text == '-'); text++)
        if (*text == '.' || *text == 'e' || *text == 'E') *is_int = false;
    return text;
}

/* A copy of the text in which integers that int64_t cannot hold are real numbers, to free: transformers writes
 * int(1e30) where a length has no limit. */
static char *mt_json_widen(const char *text, int64_t bytes, int64_t *widened) {
    enum { DIGITS = 18 }; // fit in any case
    char *copy = mt_malloc(bytes + bytes / DIGITS * 2 + 1), *to = copy;
    const char *end = text + bytes;
    bool quoted = false, is_int = false;
    for (const char *from = text, *next; from < end; from = next) {
        bool begins = !quoted && (*from == '-' || isdigit((unsigned char)*from));
        next = begins ? mt_json_number_end(from, end, &is_int) : from + 1 + (quoted && *from == '\\' && from + 1 < end);
        if (*from == '"') quoted = !quoted;
        memcpy(to, from, (size_t)(next - from));
        to += next - from;
        if (!begins || !is_int || next - from <= DIGITS) continue;
        *to = 0;
        errno = 0;
        (void)strtoll(to - (next - from), NULL, 10);
        if (errno != ERANGE) continue;
        memcpy(to, ".0", 2);
        to += 2;
    }
    *to = 0;
    *widened = to - copy;
    return copy;
}

json_t *mt_json_parse(const char *text, int64_t bytes, size_t flags, const char *path, mt_error *error) {
    json_error_t detail;
    json_t *json = json_loadb(text, (size_t)bytes, flags, &detail);
    if (!json && json_error_code(&detail) == json_error_numeric_overflow) {
        json_error_t again;
        int64_t widened;
        char *copy = mt_json_widen(text, bytes, &widened);
        json = json_loadb(copy, (size_t)widened, flags, &again);
        free(copy);
        if (!json && json_error_code(&again) != json_error_numeric_overflow) detail = again;
    }
    if (json && json_is_object(json)) return json;
    if (!path)
        mt_json_describe_line(json, &detail, error);
    else if (json)
        mt_error_set(error, "%s: not a JSON object, between { and }; get the file again", path);
    else
        mt_error_set(error, "%s:%d: not JSON, or damaged: %s; get the file again", path, detail.line, detail.text);
    json_decref(json);
    return NULL;
}

json_t *mt_json_read(const char *path, mt_error *error) {
    int64_t bytes;
    char *text = mt_file_read(path, 100000000, &bytes, error);
    json_t *json = text ? mt_json_parse(text, bytes, JSON_REJECT_DUPLICATES, path, error) : NULL;
    free(text);
    return json;
}

bool mt_json_int(const json_t *item, int64_t low, int64_t high, int64_t *value) {
    *value = json_integer_value(item);
    return json_is_integer(item) && *value >= low && *value <= high;
}

int mt_json_check_fields(const json_t *object, const mt_json_field *fields, size_t count, const char *path,
                         mt_error *error) {
    for (const mt_json_field *field = fields; field < fields + count; field++) {
        const json_t *value = json_object_get(object, field->key);
        if (!value || json_is_null(value) || field->types >> json_typeof(value) & 1) continue;
        char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
        mt_error_set(error, "%s: \"%s\" must be %s, not %.60s; correct the file", path, field->key, field->wanted,
                     text ? text : "this");
        free(text);
        return -1;
    }
    return 0;
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

json_t *mt_json_real(double value) {
    return isfinite(value) ? json_real(value) : json_null();
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
