/* checkpoint_save.c: writes checkpoints. The whole model's parameter table gives the file position of every byte before
 * the first one is written, so every rank knows it: rank 0 writes the headers, each rank its own share at computed
 * offsets, and no rank waits for another. Data passes through host memory, and threads write it from there: a small
 * ring while training waits, or room for the whole share, so that training continues during the writes and, on a GPU,
 * during the copies. The threads call no MPI; of the device they only wait for the copies. A checkpoint is written into
 * a folder with a temporary name beside its final one, brought to the disk, and renamed. Invariant: nothing
 * half-written ever replaces something whole. */
#include "checkpoint_save.h"

#include "../base/direct.h"
#include "../base/file.h"
#include "../base/watchdog.h"
#include "../models/hf_config.h"
#include "../models/special_tokens.h"
#include "../options/option_rules.h"
#include "adapter.h"
#include "checkpoint_folder.h"
#include "checkpoint_fp8.h"
#include "checkpoint_load.h"
#include "checkpoint_plan.h"
#include "checkpoint_tensors.h"
#include "checkpoint_trainer.h"
#include "megatron_save.h"
#include "resume.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* ---- output files */

/* A file that several threads and ranks write at computed offsets. */
typedef struct mt_output_file {
    int descriptor, direct; // direct: past the page cache, -1 where that is not possible
    const char *path, *option;
    mt_error *error;
} mt_output_file;

/* `option` names its folder; `flags`: O_EXCL for a file that must not exist. */
static int mt_output_file_open(mt_output_file *out, const char *path, const char *option, int flags, mt_error *error) {
    int watched = mt_watch_file_begin(path, MT_FILE_SAVE);
    *out = (mt_output_file){.path = path, .option = option, .error = error, .direct = -1};
    out->descriptor = open(path, O_CREAT | O_WRONLY | O_CLOEXEC | flags, 0666);
    mt_watch_file_end(watched);
    if (out->descriptor < 0 && errno == ENOENT && !(flags & O_EXCL))
        return mt_error_set(error, "%s: rank 0 made its folder, which is not here; choose a %s that every host sees",
                            path, option);
    if (out->descriptor < 0) return mt_file_write_error(error, path, option);
    if (!(flags & O_EXCL)) out->direct = mt_open_direct(path, O_WRONLY);
    return 0;
}

static int mt_output_file_write_by(const mt_output_file *out, int descriptor, int64_t offset, const char *data,
                                   int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t wrote = pwrite(descriptor, data + done, (size_t)(bytes - done), offset + done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote < 0 && errno == EINVAL && descriptor != out->descriptor) { // the disk needs a larger alignment
            descriptor = out->descriptor;
            continue;
        }
        if (wrote < 0) return mt_file_write_error(out->error, out->path, out->option);
        done += wrote;
    }
    return 0;
}

/* Long writes bypass the page cache if memory and file are aligned alike. Their ends go through it: the rest of these
 * pages may be another rank's. */
static int mt_output_file_write(const mt_output_file *out, int64_t offset, const void *data, int64_t bytes) {
    enum { LONG = 64 << 10 };
    const char *from = data;
    int64_t head = -offset & (MT_DIRECT - 1), tail = (offset + bytes) & (MT_DIRECT - 1);
    if (out->direct >= 0 && bytes >= LONG && (uintptr_t)(from + head) % MT_DIRECT == 0) {
        if (mt_output_file_write_by(out, out->descriptor, offset, from, head) != 0) return -1;
        if (mt_output_file_write_by(out, out->direct, offset + head, from + head, bytes - head - tail) != 0) return -1;
        offset += bytes - tail, from += bytes - tail, bytes = tail;
    }
    return mt_output_file_write_by(out, out->descriptor, offset, from, bytes);
}

/* Closes the file; brings it to the disk first if `sync` and status is 0. Returns the status, or -1 with error. */
static int mt_output_file_close(const mt_output_file *out, bool sync, int status) {
    int watched = mt_watch_file_begin(out->path, MT_FILE_SAVE);
    if (status == 0 && sync && fsync(out->descriptor) != 0)
        status = mt_file_write_error(out->error, out->path, out->option);
    if (close(out->descriptor) != 0 && status == 0) status = mt_file_write_error(out->error, out->path, out->option);
    if (out->direct >= 0) close(out->direct);
    mt_watch_file_end(watched);
    return status;
}

/* Writes a file's header and reserves the file's space. `alone`: no other rank writes yet, so a file that exists is an
 * error. */
static int mt_saved_begin_file(const mt_saved_file *file, const char *folder, const char *option, bool alone,
                               mt_error *error) {
    mt_output_file out;
    char *path = mt_path_join(folder, file->name);
    int status = mt_output_file_open(&out, path, option, alone ? O_EXCL : 0, error);
    if (status == 0) {
        status = mt_output_file_write_by(&out, out.descriptor, 0, file->header, file->header_bytes);
#ifdef FALLOC_FL_KEEP_SIZE // other errors: the file system cannot reserve space, and makes room as it goes
        if (status == 0 && fallocate(out.descriptor, 0, 0, file->bytes) != 0 && (errno == ENOSPC || errno == EFBIG))
            status = mt_file_write_error(error, path, option);
#endif
        status = mt_output_file_close(&out, false, status);
    }
    free(path);
    return status;
}

/* Writes a file and reads it again, because its checksum is computed from the file: a write that was lost would count
 * as right. */
static int mt_small_file_write(const char *folder, const char *name, const char *data, int64_t length,
                               const char *option, mt_error *error) {
    char *path = mt_path_join(folder, name), *again = NULL;
    int64_t bytes;
    int watched = mt_watch_file_begin(path, MT_FILE_SAVE);
    int status = mt_file_write(path, data, length, option, error);
    if (status == 0 && !(again = mt_file_read(path, length, &bytes, error))) status = -1;
    if (again && (bytes != length || memcmp(again, data, (size_t)length) != 0))
        status = mt_error_set(error, "%s: does not hold what was written to it; check the disk", path);
    mt_watch_file_end(watched);
    free(again);
    free(path);
    return status;
}

static int mt_text_write(const char *folder, const char *name, const char *text, mt_error *error) {
    return mt_small_file_write(folder, name, text, (int64_t)strlen(text), "--save", error);
}

static int mt_json_write(const char *folder, const char *name, const json_t *json, const char *option,
                         mt_error *error) {
    char *text = mt_json_print(json);
    text = mt_realloc(text, (int64_t)strlen(text) + 2);
    strcat(text, "\n");
    int status = mt_small_file_write(folder, name, text, (int64_t)strlen(text), option, error);
    free(text);
    return status;
}

/* Begins a set's files and writes their index: for a single file too, as loaders that take every *.safetensors of a
 * folder then know the model's. */
static int mt_saved_begin(const mt_saved_set *set, const char *folder, bool alone, mt_error *error) {
    int status = 0;
    for (int64_t i = 0; i < set->num_files && status == 0; i++)
        status = mt_saved_begin_file(&set->files[i], folder, set->option, alone, error);
    if (status != 0 || set->dist || strcmp(set->stem, "adapter_model") == 0) return status; // peft reads no index
    char name[64];
    json_t *map = json_object();
    for (int64_t i = 0; i < set->count; i++)
        mt_json_set_string(map, set->tensors[i].name, set->files[set->tensors[i].file].name);
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)set->bytes, "weight_map", map);
    snprintf(name, sizeof name, "%s.safetensors.index.json", set->stem);
    status = mt_json_write(folder, name, index, set->option, error);
    json_decref(index);
    return status;
}

/* ---- the writer: threads that write pieces of host memory to files */

/* Elements in host memory that belong to a rectangle of a file's matrix, whose lines begin `pitch` bytes apart there.
 * `transposed`: memory holds [parts, rows, cols], the file cols lines, in which the parts take turns: row r of part p
 * is element r stride + p. */
typedef struct mt_piece {
    int64_t file, offset, pitch; // offset of the first line
    int64_t rows, cols, size;    // size: bytes of an element
    int64_t parts, stride;       // parts: stride, or 1, whose lines have gaps if the stride is above 1
    bool transposed;
    uint32_t *sum; // of the archive's entry whose data end at sum_end in the file; NULL: none
    int64_t sum_end;
    const char *data;
    int64_t end; // where its memory ends, in bytes ever reserved
    bool done;
} mt_piece;

/* Bytes of a piece in memory. */
static int64_t mt_piece_size(const mt_piece *piece) {
    return piece->parts * piece->rows * piece->cols * piece->size;
}

/* MT_PIECE_BYTES: most bytes of a piece, unless a line is longer. MT_RING_PIECES: pieces that the ring holds. */
enum { MT_PIECE_BYTES = 8 << 20, MT_RING_PIECES = 4, MT_WRITERS = 2 };

/* A copy to the writer's memory that is still to be made. */
typedef struct mt_copy {
    char *to;
    const char *from;
    int64_t bytes;
} mt_copy;

typedef struct mt_writer {
    const mt_ops *ops;
    char *block, *memory;       // as allocated; aligned
    int64_t capacity;           // of the memory, which is a ring
    int64_t reserved, released; // bytes ever given out, and given back
    mt_piece *pieces;
    int64_t num_pieces, room; // submitted so far
    int64_t next, held;       // the first piece that no thread has taken; the first that still needs its memory
    bool closed;              // no more pieces will be submitted
    bool holds_all;           // the memory has room for everything: copies are collected and made together
    mt_copy *copies;
    int64_t num_copies, copy_room;
    mt_stream *stream;           // of the copies, with holds_all; NULL on the CPU
    mt_event *copied;            // the copies are made
    const char *folder, *option; // option: the one that names the folder
    mt_checksums sums;           // of the files, which they name
    mt_zip_sums zip_sums;        // for the archives' entries
    bool started;
    int busy; // threads that are not at their end
    int status;
    mt_error error;
    pthread_t threads[MT_WRITERS];
    pthread_mutex_t lock;
    pthread_cond_t changed;
} mt_writer;

/* The most memory that a piece takes: it begins at the same offset in a page as in its file. */
static int64_t mt_piece_bytes(int64_t bytes) {
    return mt_divide_up(bytes, MT_DIRECT) * MT_DIRECT + MT_DIRECT;
}

/* Memory of the ring: the largest piece fits wherever the one before it ends; or everything if that is less. */
static int64_t mt_ring_bytes(int64_t total, int64_t largest) {
    int64_t most = mt_max(MT_RING_PIECES * mt_piece_bytes(MT_PIECE_BYTES), 2 * mt_piece_bytes(largest));
    return mt_max(mt_min(total, most), mt_piece_bytes(0));
}

static void mt_writer_open(mt_writer *w, const mt_ops *ops, int64_t capacity, bool holds_all) {
    *w = (mt_writer){.ops = ops, .capacity = mt_divide_up(capacity, MT_DIRECT) * MT_DIRECT, .holds_all = holds_all};
    if (holds_all) w->stream = ops->stream_create(NULL, 0, false), w->copied = ops->event_create();
    mt_zip_sums_init(&w->zip_sums);
    w->block = ops->memory_alloc_host(w->capacity + MT_DIRECT);
    w->memory = mt_align_direct(w->block);
    memset(w->memory, 0, (size_t)w->capacity); // touches the pages now, so that the first save does not
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
}

static void mt_writer_close(mt_writer *w) {
    if (w->holds_all) w->ops->stream_destroy(w->stream), w->ops->event_destroy(w->copied);
    w->ops->memory_free_host(w->block);
    mt_checksums_free(&w->sums);
    free(w->pieces);
    free(w->copies);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
}

/* Host memory for a piece at an offset of a file, aligned like it; waits until the ring has room. */
static char *mt_writer_reserve(mt_writer *w, int64_t offset, int64_t bytes) {
    int64_t at = w->reserved + ((offset - w->reserved) & (MT_DIRECT - 1));
    MT_CHECK(mt_piece_bytes(bytes) <= w->capacity);
    if (at % w->capacity + bytes > w->capacity) // a piece does not wrap around
        at = mt_divide_up(at, w->capacity) * w->capacity + (offset & (MT_DIRECT - 1));
    pthread_mutex_lock(&w->lock);
    while (at + bytes - w->released > w->capacity) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
    w->reserved = at + bytes;
    return w->memory + at % w->capacity;
}

/* True if `next` only makes `piece` longer, in memory and in the file. */
static bool mt_piece_continues(const mt_piece *piece, const mt_piece *next) {
    int64_t bytes = mt_piece_size(piece), more = mt_piece_size(next);
    bool lines = piece->cols * piece->size != piece->pitch || next->cols * next->size != next->pitch;
    return !piece->transposed && !next->transposed && !lines && piece->file == next->file && piece->sum == next->sum &&
           bytes + more <= MT_PIECE_BYTES && piece->offset + bytes == next->offset && piece->data + bytes == next->data;
}

static void mt_writer_submit(mt_writer *w, mt_piece piece) {
    piece.end = w->reserved;
    pthread_mutex_lock(&w->lock);
    mt_piece *last = w->num_pieces > w->next ? &w->pieces[w->num_pieces - 1] : NULL;
    if (last && mt_piece_continues(last, &piece)) {
        int64_t bytes = mt_piece_size(last) + mt_piece_size(&piece);
        last->rows = 1, last->cols = bytes, last->size = 1, last->pitch = bytes, last->end = piece.end;
    } else {
        if (w->num_pieces == w->room) {
            w->room = mt_max(2 * w->room, 256);
            w->pieces = mt_realloc(w->pieces, w->room * (int64_t)sizeof piece);
        }
        w->pieces[w->num_pieces++] = piece;
    }
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* No more pieces will be submitted. */
static void mt_writer_end(mt_writer *w) {
    pthread_mutex_lock(&w->lock);
    w->closed = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* to[cols, rows, parts] = from[parts, rows, cols], elements of 2 or 4 bytes; blocks of 64 rows stay in the cache. */
static void mt_transpose(void *to, const void *from, int64_t parts, int64_t rows, int64_t cols, int64_t size) {
    int64_t lines = parts * rows; // of `from`
    for (int64_t first = 0; first < lines; first += 64)
        for (int64_t c = 0; c < cols; c++)
            for (int64_t i = first; i < lines && i < first + 64; i++) {
                int64_t at = c * lines + i % rows * parts + i / rows;
                if (size == 4)
                    ((uint32_t *)to)[at] = ((const uint32_t *)from)[i * cols + c];
                else
                    ((uint16_t *)to)[at] = ((const uint16_t *)from)[i * cols + c];
            }
}

/* A thread's memory for transposed pieces; it grows to the largest. */
typedef struct mt_transposed {
    char *memory;
    int64_t bytes;
} mt_transposed;

/* An address in it that is aligned like `offset` in the file. */
static char *mt_transposed_at(mt_transposed *room, int64_t bytes, int64_t offset) {
    if (room->bytes < bytes) {
        free(room->memory);
        room->memory = mt_malloc(bytes + 2 * MT_DIRECT), room->bytes = bytes;
    }
    return mt_align_direct(room->memory) + (offset & (MT_DIRECT - 1));
}

/* Writes lines of `line` bytes that begin `pitch` bytes apart in the file. */
static int mt_lines_write(mt_writer *w, const mt_output_file *out, const mt_piece *piece, int64_t offset, int64_t pitch,
                          const char *data, int64_t line, int64_t lines) {
    int status = 0;
    if (line == pitch) line *= lines, lines = 1;
    mt_checksums_add_lines(&w->sums.files[piece->file], offset, pitch, data, line, lines);
    if (piece->sum) {
        int64_t left = piece->sum_end - (offset + (lines - 1) * pitch + line);
        uint32_t sum = mt_zip_sum_lines(&w->zip_sums, data, line, lines, pitch, left);
        __atomic_fetch_xor(piece->sum, sum, __ATOMIC_RELAXED);
    }
    for (int64_t i = 0; i < lines && status == 0; i++)
        status = mt_output_file_write(out, offset + i * pitch, data + i * line, line);
    return status;
}

static int mt_piece_write(mt_writer *w, const mt_output_file *out, const mt_piece *piece, mt_transposed *room) {
    int64_t lines = piece->transposed ? piece->cols : piece->rows;
    int64_t bytes = mt_piece_size(piece), line = bytes / lines;
    const char *data = piece->data;
    if (piece->transposed) {
        char *transposed = mt_transposed_at(room, bytes, piece->offset);
        mt_transpose(transposed, piece->data, piece->parts, piece->rows, piece->cols, piece->size);
        data = transposed;
    }
    bool gaps = piece->transposed && piece->stride > piece->parts; // elements of other pieces, perhaps of other ranks
    int status = 0, watched = mt_watch_file_begin(out->path, MT_FILE_SAVE);
    if (!gaps) status = mt_lines_write(w, out, piece, piece->offset, piece->pitch, data, line, lines);
    for (int64_t i = 0; i < lines && status == 0 && gaps; i++)
        status = mt_lines_write(w, out, piece, piece->offset + i * piece->pitch, piece->stride * piece->size,
                                data + i * line, piece->size, piece->rows);
#ifdef SYNC_FILE_RANGE_WRITE // starts the page cache's writes to the disk now; the fsync at the end then waits less
    int64_t span = (lines - 1) * piece->pitch + line;
    if (status == 0 && bytes >= MT_SUM_BLOCK && (lines > 1 || out->direct < 0))
        (void)!sync_file_range(out->descriptor, piece->offset, span, SYNC_FILE_RANGE_WRITE);
#endif
    mt_watch_file_end(watched);
    return status;
}

/* Takes the next piece; returns its number, or -1 at the end. *status: nonzero if any thread has failed. */
static int64_t mt_writer_next(mt_writer *w, mt_piece *piece, int *status) {
    pthread_mutex_lock(&w->lock);
    while (w->next == w->num_pieces && !w->closed) pthread_cond_wait(&w->changed, &w->lock);
    int64_t number = w->next < w->num_pieces ? w->next++ : -1;
    if (number >= 0) *piece = w->pieces[number];
    *status = w->status;
    pthread_mutex_unlock(&w->lock);
    return number;
}

/* A piece is written, or failed. Memory is released in the order of its reservation. */
static void mt_writer_release(mt_writer *w, int64_t number, int status, const mt_error *error) {
    pthread_mutex_lock(&w->lock);
    if (status != 0 && w->status == 0) w->status = status, w->error = *error;
    w->pieces[number].done = true;
    while (w->held < w->next && w->pieces[w->held].done) w->released = w->pieces[w->held++].end;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* A thread: writes pieces in their order; brings a file to the disk when it goes on to the next. */
static void *mt_writer_run(void *context) {
    mt_writer *w = context;
    mt_error error;
    mt_output_file out = {.descriptor = -1};
    mt_transposed room = {0};
    mt_piece piece;
    char *path = NULL;
    int64_t open = -1, number;
    int status;
    if (w->holds_all) w->ops->event_synchronize(w->copied);
    while ((number = mt_writer_next(w, &piece, &status)) >= 0) {
        if (status == 0 && piece.file != open) {
            if (out.descriptor >= 0) status = mt_output_file_close(&out, true, 0);
            free(path);
            path = mt_path_join(w->folder, w->sums.files[open = piece.file].name);
            out.descriptor = -1;
            if (status == 0) status = mt_output_file_open(&out, path, w->option, 0, &error);
        }
        if (status == 0) status = mt_piece_write(w, &out, &piece, &room);
        mt_writer_release(w, number, status, &error); // after an error too: the copies wait for room
    }
    if (out.descriptor >= 0) status = mt_output_file_close(&out, true, status);
    free(path);
    free(room.memory);
    pthread_mutex_lock(&w->lock);
    if (status != 0 && w->status == 0) w->status = status, w->error = error;
    w->busy--;
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Before the first piece of a save. */
static void mt_writer_begin(mt_writer *w) {
    w->status = 0, w->num_pieces = w->next = w->held = 0;
    w->reserved = w->released = 0;
    w->closed = false;
}

/* Starts the threads, which write into the files that w->sums names. */
static void mt_writer_start(mt_writer *w, const char *folder) {
    w->folder = folder, w->started = true, w->busy = MT_WRITERS;
    for (int i = 0; i < MT_WRITERS; i++)
        if (pthread_create(&w->threads[i], NULL, mt_writer_run, w) != 0)
            mt_die("cannot start a thread; raise ulimit -u");
}

/* Waits for the copies and the threads; returns the threads' status, with their error. */
static int mt_writer_wait(mt_writer *w, mt_error *error) {
    if (!w->started) return 0;
    if (w->holds_all) w->ops->event_synchronize(w->copied);
    for (int i = 0; i < MT_WRITERS; i++) pthread_join(w->threads[i], NULL);
    w->started = false;
    if (w->status != 0) *error = w->error;
    return w->status;
}

static bool mt_writer_is_done(mt_writer *w) {
    pthread_mutex_lock(&w->lock);
    bool done = !w->started || w->busy == 0;
    pthread_mutex_unlock(&w->lock);
    return done;
}

/* ---- this rank's share */

/* The elements [*begin, *end) of this rank's part of a parameter that this rank writes. If the data group shards the
 * state: its shard. If every rank of the group has all: its part of the rows; but where rows are the file's columns,
 * parts would be short lines, so one rank writes the whole parameter. Where they are every second column, only both
 * parameters together are a line. Returns the address of the first element, or NULL if there is none. */
static const char *mt_param_share(const mt_model *m, const mt_param *param, const mt_saved_tensor *tensor,
                                  int64_t *begin, int64_t *end) {
    const mt_bucket *b = mt_bucket_get(m, param->bucket);
    const mt_group *group = b->group;
    mt_shard shard = mt_state_shard(m, param, tensor->state);
    int64_t rows = mt_param_rows_stored(param), cols = param->cols;
    mt_placement place = mt_saved_place(tensor, param, mt_model_options(m));
    bool has_all = b->strategy == MT_NO_SHARD || (place.stride > 1 && b->strategy != MT_SHARD_PARAMS);
    if (!param->counted) return NULL;
    if (has_all && place.transposed) { // by role and layer, or expert, so that ranks have equal shares
        int64_t number = (place.stride > 1 ? param->expert : (int64_t)param->role) + param->layer;
        *begin = 0, *end = number % group->size == group->rank ? rows * cols : 0;
    } else if (b->strategy == MT_NO_SHARD) {
        *begin = rows * group->rank / group->size * cols, *end = rows * (group->rank + 1) / group->size * cols;
    } else {
        *begin = mt_max(b->shard_first - param->offset, 0);
        *end = mt_min(b->shard_first + b->shard_count - param->offset, rows * cols);
    }
    if (*begin >= *end) return NULL;
    return (const char *)shard.data + (param->offset + *begin - shard.first) * mt_dtype_size(shard.dtype);
}

/* memcpy with stores that bypass the caches, so that lines are not read before they are written. The C library does
 * this for far longer copies only. */
static void mt_copy_past_cache(char *to, const char *from, int64_t bytes) {
    int64_t done = 0;
#ifdef __SSE2__
    done = mt_min((int64_t)(-(uintptr_t)to & 15), bytes);
    memcpy(to, from, (size_t)done);
    for (; done + 64 <= bytes; done += 64)
        for (int64_t i = done; i < done + 64; i += 16)
            _mm_stream_si128((__m128i *)(void *)(to + i), _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
    _mm_sfence();
#endif
    memcpy(to + done, from + done, (size_t)(bytes - done));
}

/* Copies to the writer's memory. With holds_all the copy is only noted: on the CPU a parallel region for each of many
 * small copies would cost more than it gains. */
static void mt_copy_to_host(mt_model *m, mt_writer *w, char *to, const char *from, int64_t bytes) {
    if (w->holds_all) {
        if (w->num_copies == w->copy_room) {
            w->copy_room = mt_max(2 * w->copy_room, 256);
            w->copies = mt_realloc(w->copies, w->copy_room * (int64_t)sizeof *w->copies);
        }
        w->copies[w->num_copies++] = (mt_copy){to, from, bytes};
    } else if (!mt_model_ops(m)->on_device) {
        memcpy(to, from, (size_t)bytes);
    } else {
        mt_model_ops(m)->memory_copy(to, from, bytes, mt_model_stream(m));
        mt_model_ops(m)->stream_synchronize(mt_model_stream(m));
    }
}

/* The bytes of the first *count of these copies, which continue one another: a GPU queues only so many operations
 * before the host has to wait. At most 32 MiB, because other copies to the host wait for the one under way. */
static int64_t mt_copies_merge(const mt_copy *copies, int64_t num_copies, int64_t *count) {
    enum { MOST = 32 << 20 };
    int64_t bytes = copies->bytes, i = 1;
    for (; i < num_copies && bytes + copies[i].bytes <= MOST; bytes += copies[i++].bytes)
        if (copies[i].to != copies->to + bytes || copies[i].from != copies->from + bytes) break;
    *count = i;
    return bytes;
}

/* Makes the noted copies. On the CPU: now, with all threads. On a GPU: on the writer's stream, behind all work enqueued
 * so far; later work overlaps with them until it changes a parameter. */
static void mt_copies_make(mt_model *m, mt_writer *w) {
    const mt_copy *copies = w->copies;
    if (!mt_model_ops(m)->on_device) {
#ifdef MT_HAVE_OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
        for (int64_t i = 0; i < w->num_copies; i++) mt_copy_past_cache(copies[i].to, copies[i].from, copies[i].bytes);
    } else {
        mt_model_ops(m)->stream_wait_stream(w->stream, mt_model_stream(m));
        for (int64_t i = 0, count; i < w->num_copies; i += count) {
            int64_t bytes = mt_copies_merge(copies + i, w->num_copies - i, &count);
            mt_model_ops(m)->memory_copy(copies[i].to, copies[i].from, bytes, w->stream);
        }
        mt_model_ops(m)->event_record(w->copied, w->stream);
        mt_model_set_reader(m, w->stream);
    }
    w->num_copies = 0;
}

/* Elements [begin, end) of a parameter, and their addresses; `parts`: of so many parameters, one after another in the
 * table, that take turns in the file. */
typedef struct mt_saved_part {
    const mt_param *param;
    int64_t begin, end;
    const char *from[2];
    int64_t parts;
} mt_saved_part;

/* The most bytes of a part's pieces: whole lines, if all rows are on this rank. */
static int64_t mt_part_most(const mt_saved_part *own, mt_placement place, int64_t size) {
    return mt_max(MT_PIECE_BYTES, own->param->cols * size * (place.transposed ? place.width : 1));
}

/* to = the first n elements of a part, in the tensor's type, each with `shift` added. */
static void mt_part_read(mt_model *m, mt_saved_part own, const mt_saved_tensor *tensor, float shift, char *to,
                         int64_t n) {
    bool is_half = mt_dtype_is_half(tensor->dtype);
    float *values = is_half ? mt_malloc(n * (int64_t)sizeof *values) : (float *)(void *)to;
    MT_CHECK(own.parts == 1 && (is_half || tensor->dtype == MT_F32));
    mt_state_read(m, own.param, tensor->state, own.begin, values, n);
    for (int64_t i = 0; shift != 0 && i < n; i++) values[i] += shift;
    if (!is_half) return;
    for (int64_t i = 0; i < n; i++) ((uint16_t *)(void *)to)[i] = mt_f32_to_half(values[i], tensor->dtype);
    free(values);
}

/* Copies a part to host memory and submits it as rectangles of its tensor. A state with scales is converted there at
 * once. Returns the host memory that this takes; without a writer it only counts. */
static int64_t mt_part_copy(mt_model *m, mt_writer *w, mt_saved_part own, mt_saved_tensor *tensor, int64_t file) {
    const mt_param *param = own.param;
    int64_t cols = param->cols, size = mt_dtype_size(tensor->dtype), taken = 0;
    mt_placement place = mt_saved_place(tensor, param, mt_model_options(m));
    int64_t most = mt_max(mt_part_most(&own, place, size) / (own.parts * cols * size), 1);
    int64_t slice = tensor->offset + place.slice * (tensor->bytes / place.slices);
    bool has_scale = param->in_fp8 || (param->trained && mt_state_has_scale(mt_state_dtype(m, tensor->state)));
    while (own.begin < own.end) {
        int64_t row = own.begin / cols, col = own.begin % cols, width = cols;
        int64_t rows = mt_min((own.end - own.begin) / cols, most);
        if (col > 0 || rows == 0) rows = 1, width = mt_min(cols - col, own.end - own.begin);
        rows = mt_min(rows, place.group_rows - (param->first_row + row) % place.group_rows);
        int64_t to_row = mt_placement_row(&place, param->first_row + row), to_col = param->first_col + col;
        mt_piece piece = {.file = file, .rows = rows, .cols = width, .size = size, .transposed = place.transposed};
        piece.parts = own.parts, piece.stride = place.stride, piece.pitch = place.width * size;
        if (tensor->chunk.num_dims > 0) piece.sum = &tensor->sum, piece.sum_end = tensor->offset + tensor->bytes;
        piece.offset =
            slice + (piece.transposed ? to_col * piece.pitch + to_row * size : to_row * piece.pitch + to_col * size);
        int64_t bytes = mt_piece_size(&piece), each = bytes / own.parts;
        char *to = w ? mt_writer_reserve(w, piece.offset, bytes) : NULL;
        bool is_read = has_scale || place.shift != 0;
        if (to && is_read) mt_part_read(m, own, tensor, place.shift, to, rows * width);
        for (int64_t i = 0; i < own.parts && to && !is_read; i++)
            mt_copy_to_host(m, w, to + i * each, own.from[i], each);
        piece.data = to;
        if (w) mt_writer_submit(w, piece);
        taken += mt_piece_bytes(bytes);
        for (int64_t i = 0; i < own.parts; i++) own.from[i] += each;
        own.begin += rows * width;
    }
    return taken;
}

/* This rank's share of the tensor's parameter k, and of the next one if both take turns in the file and it has the same
 * elements of both. */
static mt_saved_part mt_part_of(const mt_model *m, const mt_saved_tensor *tensor, int64_t k) {
    mt_saved_part own = {.param = &tensor->params[k], .parts = 1};
    const mt_param *next = own.param + 1;
    int64_t begin, end;
    own.from[0] = mt_param_share(m, own.param, tensor, &own.begin, &own.end);
    mt_placement place = mt_saved_place(tensor, own.param, mt_model_options(m));
    if (!own.from[0] || place.stride == 1 || place.row > 0 || k + 1 == tensor->num_params) return own;
    own.from[1] = mt_param_share(m, next, tensor, &begin, &end);
    if (own.from[1] && begin == own.begin && end == own.end) own.parts = 2;
    return own;
}

/* Submits this rank's share of a set. Returns the host memory that this takes, and in *largest that of the largest
 * piece; without a writer it only counts. */
static int64_t mt_set_copy(mt_saved_set *set, mt_model *m, mt_writer *w, int64_t *largest) {
    int64_t taken = 0;
    *largest = 0;
    for (int64_t i = 0; i < set->count; i++) {
        mt_saved_tensor *tensor = &set->tensors[i];
        int64_t size = mt_dtype_size(tensor->dtype);
        for (int64_t k = 0, parts; k < tensor->num_params; k += parts) {
            mt_saved_part own = mt_part_of(m, tensor, k);
            parts = own.parts;
            if (!own.from[0]) continue;
            int64_t most = mt_part_most(&own, mt_saved_place(tensor, own.param, mt_model_options(m)), size);
            *largest = mt_max(*largest, mt_min(most, mt_piece_bytes(parts * (own.end - own.begin) * size)));
            taken += mt_part_copy(m, w, own, tensor, set->first_file + tensor->file);
        }
    }
    return taken;
}

/* ---- the small files of a checkpoint */

/* The schedules of learning rate and weight decay, with Megatron-LM's names, for a run that continues with
 * --use-checkpoint-opt-param-scheduler. Steps are samples. */
static json_t *mt_schedule_write(const mt_options *o) {
    mt_durations d = mt_options_durations(o);
    json_t *json = json_object();
    mt_json_set_real(json, "max_lr", o->lr);
    mt_json_set_real(json, "min_lr", o->min_lr);
    mt_json_set_real(json, "decoupled_lr", o->decoupled_lr);
    mt_json_set_real(json, "decoupled_min_lr", o->decoupled_min_lr);
    mt_json_set_real(json, "lr_warmup_steps", d.warmup);
    mt_json_set_real(json, "lr_decay_steps", d.decay);
    mt_json_set_int(json, "lr_decay_style", o->lr_decay_style);
    mt_json_set_real(json, "start_wd", o->start_weight_decay);
    mt_json_set_real(json, "end_wd", o->end_weight_decay);
    mt_json_set_real(json, "wd_incr_steps", d.total);
    mt_json_set_int(json, "wd_incr_style", o->weight_decay_incr_style);
    return json;
}

/* Where the run stands, and the settings that it must continue with. */
static int mt_trainer_write(const mt_model *m, const mt_run_options *o, const mt_run_state *state,
                            const mt_loss_average *average, const char *folder, mt_error *error) {
    json_t *json = json_object();
    mt_json_set_int(json, "version", MT_TRAINER_VERSION);
#define MT_SET_STATE(field) mt_json_set_int(json, #field, state->field);
    MT_RUN_STATE_FIELDS(MT_SET_STATE)
#undef MT_SET_STATE
    mt_json_set_real(json, "loss_average", average->mean);
    mt_json_set_int(json, "loss_average_steps", average->steps);
    mt_json_set_int(json, "skipped_iterations", state->skipped_iterations);
    if (o->stack.fp16 || state->skipped_samples > 0) mt_json_set_int(json, "skipped_samples", state->skipped_samples);
    if (o->stack.fp16) {
        mt_json_set_real(json, "loss_scale", state->loss_scaler.scale);
        mt_json_set_int(json, "growth_tracker", state->loss_scaler.growth_tracker);
        mt_json_set_int(json, "hysteresis_tracker", state->loss_scaler.hysteresis_tracker);
    }
    mt_json_set_string(json, "optimizer", mt_optimizer_name(o->stack.optimizer));
    mt_json_set_int(json, "seed", o->stack.seed);
    mt_json_set_int(json, "data_seed", mt_options_data_seed(o));
    mt_json_set_int(json, "seq_length", o->stack.seq_length);
    mt_json_set_int(json, "sft", o->sft);
    mt_json_set_int(json, "stage", o->stack.stage);
    mt_json_set_int(json, "rollout_batch_size", o->rollout_batch_size);
    mt_json_set_int(json, "num_return_sequences", o->num_return_sequences);
    if (o->stack.stage == MT_STAGE_RL) {
        mt_json_set_int(json, "consumed_prompts", state->consumed_prompts);
        mt_json_set_int(json, "prompts_fingerprint", state->prompts_fingerprint);
    }
    if (state->data.fingerprint != 0) {
        mt_json_set_int(json, "data_documents", state->data.documents);
        mt_json_set_int(json, "data_tokens", state->data.tokens);
        mt_json_set_int(json, "data_fingerprint", state->data.fingerprint);
        mt_json_set_int(json, "data_group", state->data.group);
        mt_json_set_int(json, "dataloader_type", o->dataloader_type);
    }
    if (state->data.num_plans > 0) {
        json_t *plans = json_array();
        for (int64_t i = 0; i < state->data.num_plans; i++) {
            json_t *plan = json_array();
            for (int k = 0; k < 2; k++) json_array_append_new(plan, json_integer(state->data.plans[i][k]));
            json_array_append_new(plans, plan);
        }
        json_object_set_new(json, "data_plans", plans);
    }
    mt_json_set_int(json, "sequence_packing", o->sequence_packing);
    mt_json_set_int(json, "global_batch_size", o->stack.global_batch_size);
    mt_json_set_int(json, "micro_batch_size", o->stack.micro_batch_size);
    mt_json_set_int(json, "world_size", mt_model_grid(m)->world.size);
    mt_json_set_string(json, "dtype", mt_dtype_name(mt_model_dtype(m)));
    json_object_set_new(json, "opt_param_scheduler", mt_schedule_write(&o->stack));
    mt_json_set_real(json, "learning_rate",
                     o->stack.lr > 0 ? mt_learning_rate(&o->stack, mt_scheduled_samples(state)) : 0);
    int status = mt_json_write(folder, "trainer.json", json, "--save", error);
    json_decref(json);
    return status;
}

/* Everything that rank 0 writes besides tensors. */
static int mt_small_files_write(const mt_model *m, const mt_run_options *o, const mt_run_state *state,
                                const mt_loss_average *average, const char *folder, mt_checkpoint_extra *extra,
                                void *context, mt_error *error) {
    bool adapts = o->stack.lora_rank > 0;
    char *config = adapts ? mt_adapter_print_config(o) : mt_options_write_hf_config(o);
    int status = mt_text_write(folder, adapts ? "adapter_config.json" : "config.json", config, error);
    free(config);
    bool ends = !adapts || o->generation_config; // an adapter's: the base's, and the end of a turn that it learned
    if (status == 0 && ends) status = mt_generation_config_write(o, folder, error);
    if (status == 0) status = mt_trainer_write(m, o, state, average, folder, error);
    if (status == 0 && extra) status = extra(context, folder, error);
    return status;
}

/* ---- folders */

static int mt_remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk) {
    (void)status, (void)type, (void)walk;
    return remove(path);
}

static void mt_folder_remove(const char *folder) {
    nftw(folder, mt_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* Removes the temporary files of a run that was killed while it saved. */
static int mt_remove_leftover(const char *folder, const char *name, void *context) {
    static const char *const patterns[] = {"iter_%*[0-9].tmp-%*[0-9]%n", "latest.tmp-%*[0-9]%n",
                                           "latest_checkpointed_iteration.txt.tmp-%*[0-9]%n"};
    (void)context;
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        int length = 0;
        sscanf(name, patterns[i], &length);
        if (length == 0 || name[length]) continue;
        char *path = mt_path_join(folder, name);
        mt_folder_remove(path);
        free(path);
    }
    return 0;
}

static int mt_sync_entry(const char *folder, const char *name, void *error) {
    char *path = mt_path_join(folder, name);
    int status = mt_file_sync(path, "--save", error);
    free(path);
    return status;
}

/* Exchanges two folders: in one step where the system can, else through a third name. */
static int mt_folder_exchange(const char *a, const char *b) {
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return -1;
#endif
    char *aside = mt_malloc((int64_t)strlen(b) + 8);
    sprintf(aside, "%s.old", b);
    int status = rename(b, aside);
    if (status == 0 && (status = rename(a, b)) != 0) rename(aside, b);
    if (status == 0) status = rename(aside, a);
    free(aside);
    return status;
}

/* Renames the whole folder `fresh` to `path`; then removes the folder that had this name. */
static int mt_folder_rename(const char *fresh, const char *path, mt_error *error) {
    int watched = mt_watch_file_begin(path, MT_FILE_SAVE);
    bool exists = access(path, F_OK) == 0;
    int status = exists ? mt_folder_exchange(fresh, path) : rename(fresh, path);
    if (status != 0) mt_file_write_error(error, path, "--save");
    mt_watch_file_end(watched);
    if (status != 0) return -1;
    if (exists) mt_folder_remove(fresh);
    return 0;
}

/* Makes folder/name a link to `target`, in one step; false where the file system has no links. */
static bool mt_link_replace(const char *folder, const char *name, const char *target) {
    char temporary[300];
    snprintf(temporary, sizeof temporary, "%s.tmp-%lld", name, (long long)getpid());
    char *from = mt_path_join(folder, temporary), *to = mt_path_join(folder, name);
    unlink(from);
    bool placed = symlink(target, from) == 0 && rename(from, to) == 0;
    if (!placed) unlink(from);
    free(from);
    free(to);
    return placed;
}

/* True when folder/name exists, if only as a link that leads nowhere. */
static bool mt_entry_exists(const char *folder, const char *name) {
    struct stat status;
    char *path = mt_path_join(folder, name);
    bool exists = lstat(path, &status) == 0;
    free(path);
    return exists;
}

/* Links a file of the latest iteration from the folder above, unless only this program reads it or the name is taken.
 */
static int mt_link_file(const char *iteration, const char *name, void *folder) {
    char target[300];
    (void)iteration;
    if (strncmp(name, "optimizer", 9) == 0 || strcmp(name, "trainer.json") == 0 ||
        strcmp(name, "checksums.json") == 0 || strcmp(name, MT_FP8_FILE) == 0)
        return 0;
    if (mt_entry_exists(folder, name) || strlen(name) > 255) return 0;
    snprintf(target, sizeof target, "latest/%s", name);
    mt_link_replace(folder, name, target);
    return 0;
}

/* Removes a link to a file that the latest iteration does not have, or with `iteration` the folder itself each link. */
static int mt_unlink_stale(const char *folder, const char *name, void *iteration) {
    if (!mt_is_own_link(folder, name) || (iteration != folder && mt_entry_exists(iteration, name))) return 0;
    char *path = mt_path_join(folder, name);
    unlink(path);
    free(path);
    return 0;
}

/* Makes an iteration the folder's latest. Links serve other loaders: a file system without them is no error. */
static int mt_checkpoint_publish(const char *folder, const char *iteration, int64_t number, mt_error *error) {
    char text[32];
    int length = snprintf(text, sizeof text, "%lld\n", (long long)number);
    char *path = mt_path_join(folder, "latest_checkpointed_iteration.txt");
    int status = mt_file_write(path, text, length, "--save", error);
    free(path);
    if (status != 0) return status;
    if (mt_link_replace(folder, "latest", iteration)) {
        path = mt_path_join(folder, iteration);
        bool is_foreign = mt_folder_is_megatron(path); // no other loader takes the folder above for its own
        mt_folder_visit(folder, mt_unlink_stale, is_foreign ? (void *)folder : path);
        if (!is_foreign) mt_folder_visit(path, mt_link_file, (void *)folder);
        free(path);
    }
    return mt_file_sync(folder, "--save", error);
}

static bool mt_saves_optimizer(const mt_model *m, const mt_run_options *o) {
    return mt_model_get_plan(m)->train && !o->no_save_optim;
}

/* Bytes of a checkpoint's weights, of the model or of its adapters, and of the optimizer's states. */
static double mt_saved_bytes(const mt_model *m, const mt_run_options *o) {
    mt_param *rows;
    double total = 0;
    int64_t count = mt_params_build(&rows, &o->stack, NULL);
    int first = mt_model_dtype(m) == MT_F32 ? MT_STATE_EXP_AVG : MT_STATE_MASTER;
    for (int64_t i = 0; i < count; i++) {
        if (!mt_stem_holds(o->stack.lora_rank > 0 ? "adapter_model" : "model", &rows[i])) continue;
        int64_t each = mt_dtype_size(mt_model_dtype(m));
        for (int state = first; state < mt_num_states(rows[i].optimizer) && mt_saves_optimizer(m, o); state++)
            each += mt_dtype_size(mt_saved_dtype(m, (mt_param_state)state));
        total += (double)(rows[i].rows_stored * rows[i].whole_cols * each);
    }
    free(rows);
    return total;
}

/* Refuses a folder that is a model of its own, and one without space for a checkpoint. */
static int mt_checkpoint_check_folder(const mt_model *m, const mt_run_options *o, const char *folder, mt_error *error) {
    static const char *const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json",
                                        "adapter_config.json", "adapter_model.safetensors"};
    struct statvfs disk;
    char target[8];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (mt_entry_exists(folder, names[i]) && !mt_is_own_link(folder, names[i]))
            return mt_error_set(error,
                                "%s: is a model's own folder (its %s was not put there by --save); choose another "
                                "--save",
                                folder, names[i]);
    struct stat entry;
    char *tracker = mt_path_join(folder, "latest_checkpointed_iteration.txt");
    bool taken = stat(tracker, &entry) == 0 && S_ISDIR(entry.st_mode);
    free(tracker);
    if (taken)
        return mt_error_set(error, "%s/latest_checkpointed_iteration.txt: is a folder; choose another --save", folder);
    char *latest = mt_path_join(folder, "latest");
    taken = mt_entry_exists(folder, "latest") && readlink(latest, target, sizeof target) < 0;
    free(latest);
    if (taken) return mt_error_set(error, "%s/latest: is not a link of --save; choose another --save", folder);
    if (access(folder, W_OK) != 0) return mt_file_write_error(error, folder, "--save");
    if (statvfs(folder, &disk) != 0 || disk.f_blocks == 0)
        return 0; // unknown: a write will fail if there is too little
    double bytes = mt_saved_bytes(m, o), room = (double)disk.f_bavail * (double)disk.f_frsize;
    if (room >= bytes) return 0;
    return mt_error_set(error,
                        "%s: a checkpoint takes %.1f MB and the disk has %.1f MB left; free some or choose another "
                        "--save",
                        folder, bytes / 1e6, room / 1e6);
}

/* The first iteration of a run that loads from its own --save; INT64_MAX: after the newest whole checkpoint. */
static int64_t mt_options_start(const mt_run_options *o) {
    if (o->finetune) return 0;
    const char *folder = o->stack.lora_rank > 0 ? o->load_adapter : o->load;
    char *path = folder && !mt_options_falls_back(o) ? realpath(folder, NULL) : NULL; // it may be a link
    int64_t number = path ? mt_iteration_of(strrchr(path, '/') + 1) : -1;
    free(path);
    return number >= 0 ? number : INT64_MAX;
}

/* An error if the folder of --save holds checkpoints that this run would not continue. */
static int mt_checkpoint_check_owner(const mt_run_options *o, mt_error *error) {
    mt_iterations found = mt_iterations_list(o->save);
    int64_t latest = found.count > 0 ? found.numbers[0] : -1;
    char *newest = mt_iteration_path(o->save, latest);
    bool holds_adapters = mt_folder_has(newest, "adapter_config.json");
    free(found.numbers), free(newest);
    bool is_another = !o->overwrite && !mt_checkpoint_continues(o);
    if (o->auto_resume && !mt_options_falls_back(o) && mt_checkpoint_exists(o->save))
        return mt_error_set(error,
                            "%s: held no checkpoint when this run chose to start from the beginning, but another run "
                            "has saved there since; give the same command again, which resumes",
                            o->save);
    if (latest < 0 && is_another && mt_folder_has(o->save, "latest_checkpointed_iteration.txt"))
        return mt_error_set(error,
                            "%s: its latest_checkpointed_iteration.txt names a checkpoint that --save did not write; "
                            "choose another --save, or replace it by --overwrite",
                            o->save);
    if (latest >= 0 && is_another && o->finetune)
        return mt_error_set(
            error,
            "%s: holds checkpoints up to iteration %lld, and --finetune begins anew; continue their run "
            "by --auto-resume, replace it by --overwrite, or choose another --save",
            o->save, (long long)latest);
    if (latest >= 0 && is_another)
        return mt_error_set(error,
                            "%s: holds checkpoints of another run, up to iteration %lld; continue that run by --%s "
                            "%s, replace it by --overwrite, or choose another --save",
                            o->save, (long long)latest, holds_adapters ? "load-adapter" : "load", o->save);
    if (mt_options_start(o) < latest && !o->overwrite && o->finetune)
        return mt_error_set(error,
                            "%s: holds checkpoints up to iteration %lld, but this run begins anew; continue theirs by "
                            "--auto-resume or by setting --finetune to false, replace them by --overwrite, or choose "
                            "another --save",
                            o->save, (long long)latest);
    if (mt_options_start(o) < latest && !o->overwrite)
        return mt_error_set(error,
                            "%s: holds checkpoints up to iteration %lld, but this run would start at iteration %lld; "
                            "replace those checkpoints by --overwrite, or choose another --save",
                            o->save, (long long)latest, (long long)mt_options_start(o));
    return 0;
}

static char *mt_claimed;    // the folder that this process holds
static int mt_claimed_made; // folders of its path that the process has made
static pid_t mt_claimed_by;

/* A run that ends before its first checkpoint, as by an error in its data, leaves no lock behind. */
static void mt_checkpoint_release(void) {
    if (getpid() == mt_claimed_by) mt_folder_unlock(mt_claimed, ".lock", mt_claimed_made); // not in a child
}

/* Checks the folder again under the lock: another run may have saved there since, and ended. */
static int mt_checkpoint_claim_alone(const mt_run_options *o, mt_error *error) {
    if (mt_checkpoint_check_owner(o, error) != 0) return -1;
    int missing = mt_folder_missing(o->save);
    if (mt_folder_create(o->save, "--save", error) != 0) return -1;
    if (mt_folder_lock(o->save, ".lock", "--save", error) < 0) return -1; // open until the process ends
    if (!mt_claimed) atexit(mt_checkpoint_release);
    free(mt_claimed);
    mt_claimed = mt_strdup(o->save), mt_claimed_made = missing, mt_claimed_by = getpid();
    return mt_checkpoint_check_owner(o, error);
}

int mt_checkpoint_claim(const mt_run_options *o, const mt_group *world, mt_error *error) {
    if (!o->save) return 0;
    return mt_agree(world, world->rank == 0 && mt_checkpoint_claim_alone(o, error) != 0, error);
}

int mt_checkpoint_prepare(const mt_model *m, const mt_run_options *o, const char *folder, mt_error *error) {
    if (mt_folder_create(folder, "--save", error) != 0) return -1;
    mt_folder_visit(folder, mt_remove_leftover, NULL);
    return mt_checkpoint_check_folder(m, o, folder, error);
}

/* Removes a checkpoint; renames it first, so that it is never visible in part. */
static void mt_iteration_remove(const char *folder, int64_t number) {
    char *path = mt_iteration_path(folder, number);
    char *aside = mt_malloc((int64_t)strlen(path) + 32);
    sprintf(aside, "%s.tmp-%lld", path, (long long)getpid());
    if (rename(path, aside) == 0) mt_folder_remove(aside);
    free(aside);
    free(path);
}

/* Once `latest` is whole: removes the earlier checkpoints, except the last --keep-checkpoints and those at a multiple
 * of --save-retain-interval; or, with `replaces`, all others: they are those of the run that --overwrite replaces. */
static void mt_checkpoint_retain(const mt_run_options *o, const char *folder, int64_t latest, bool replaces) {
    int64_t keep = o->keep_checkpoints > 0 ? o->keep_checkpoints : o->save_retain_interval > 0 ? 1 : INT64_MAX;
    int64_t kept = 0;
    mt_iterations found = mt_iterations_list(folder);
    for (int64_t i = 0; i < found.count; i++) {
        int64_t number = found.numbers[i];
        bool retained =
            number > latest || kept++ < keep || (o->save_retain_interval > 0 && number % o->save_retain_interval == 0);
        if (replaces ? number != latest : !retained) mt_iteration_remove(folder, number);
    }
    free(found.numbers);
}

/* ---- checksums of a folder */

/* The sums of a folder that are being added to. */
typedef struct mt_summed {
    mt_checksums *sums;
    const char *folder;
    const mt_strings *others; // names in the folder that are left out, or NULL
    mt_error *error;
} mt_summed;

static int mt_sums_add(const char *folder, const char *name, void *context);

/* Adds a file of a folder in the summed folder. */
static int mt_sums_add_below(const char *folder, const char *name, void *context) {
    mt_summed *s = context;
    char *inner = mt_path_join(folder + strlen(s->folder) + 1, name);
    int status = mt_sums_add(s->folder, inner, s);
    free(inner);
    return status;
}

/* Adds a file of the folder that has no sums yet, or those of a folder in it. */
static int mt_sums_add(const char *folder, const char *name, void *context) {
    mt_summed *s = context;
    int64_t bytes;
    struct stat entry;
    if (mt_checksums_find(s->sums, name)) return 0;
    for (int64_t i = 0; s->others && i < s->others->count; i++)
        if (strcmp(name, s->others->items[i]) == 0) return 0;
    char *path = mt_path_join(folder, name);
    if (stat(path, &entry) == 0 && S_ISDIR(entry.st_mode)) {
        int status = mt_folder_visit(path, mt_sums_add_below, s);
        free(path);
        return status;
    }
    int descriptor = mt_file_open(path, &bytes, s->error);
    if (descriptor < 0) {
        free(path);
        return -1;
    }
    mt_file_checksums *file = mt_checksums_append(s->sums, name, bytes);
    char *buffer = mt_malloc(MT_SUM_BLOCK);
    int status = 0;
    for (int64_t first = 0, n; first < bytes && status == 0; first += n) {
        n = mt_min(MT_SUM_BLOCK, bytes - first);
        status = mt_file_read_at(descriptor, buffer, n, first);
        if (status == 0) mt_checksums_add(file, first, buffer, n);
    }
    if (status != 0) mt_file_read_error(s->error, path);
    mt_checksums_finish(file);
    free(buffer);
    free(path);
    close(descriptor);
    return status;
}

static int mt_checksums_compare(const void *a, const void *b) {
    return strcmp(((const mt_file_checksums *)a)->name, ((const mt_file_checksums *)b)->name);
}

int mt_checksums_write(mt_checksums *sums, const char *folder, const mt_strings *others, const char *option,
                       mt_error *error) {
    mt_summed summed = {sums, folder, others, error};
    int status = mt_folder_visit(folder, mt_sums_add, &summed);
    if (sums->count > 0) qsort(sums->files, (size_t)sums->count, sizeof *sums->files, mt_checksums_compare);
    char *text = mt_checksums_print(sums);
    if (status == 0) status = mt_small_file_write(folder, "checksums.json", text, (int64_t)strlen(text), option, error);
    free(text);
    return status;
}

/* Begins the sums of a set's files; on rank 0 with those of the headers, which it writes. */
static void mt_set_begin_sums(const mt_saved_set *set, bool first, mt_checksums *sums) {
    for (int64_t k = 0; k < set->num_files; k++) {
        const mt_saved_file *file = &set->files[k];
        mt_file_checksums *of_file = mt_checksums_append(sums, file->name, file->bytes);
        if (first) mt_checksums_add(of_file, 0, file->header, file->header_bytes);
    }
}

/* Rank 0 combines its sums with those of all ranks. */
static void mt_sums_collect(const mt_group *world, mt_checksums *sums) {
    for (int64_t i = 0; i < sums->count; i++) {
        mt_file_checksums *file = &sums->files[i];
        if (world->rank != 0) mt_send(world, file->sums, file->count * 4, 0);
        uint32_t *theirs = world->rank == 0 ? mt_malloc(file->count * 4) : NULL;
        for (int rank = 1; rank < world->size && theirs; rank++) {
            mt_receive(world, theirs, file->count * 4, rank);
            for (int64_t block = 0; block < file->count; block++) file->sums[block] ^= theirs[block];
        }
        free(theirs);
        mt_checksums_finish(file);
    }
}

/* ---- one save of some stems: the plan, host memory, threads */

typedef struct mt_save {
    mt_model *model;
    mt_saved_set sets[2];
    int64_t num_sets;
    mt_writer writer;
} mt_save;

/* Allocates host memory for the planned sets: for everything with `holds_all`, else a ring. */
static void mt_save_begin_writer(mt_save *s, mt_model *m, const char *option, bool holds_all) {
    int64_t total = 0, largest = 0, one;
    s->model = m;
    for (int64_t i = 0; i < s->num_sets; i++) {
        total += mt_set_copy(&s->sets[i], m, NULL, &one);
        largest = mt_max(largest, one);
    }
    total = holds_all ? mt_max(total, mt_piece_bytes(0)) : mt_ring_bytes(total, largest);
    mt_writer_open(&s->writer, mt_model_ops(m), total, holds_all);
    s->writer.option = option;
}

/* Plans stems[num_stems] of a Hugging Face folder. */
static void mt_save_open(mt_save *s, mt_model *m, const char *option, const char *const *stems, int64_t num_stems,
                         int64_t max_shard_bytes, bool holds_all) {
    int64_t num_files = 0;
    s->num_sets = num_stems;
    for (int64_t i = 0; i < num_stems; num_files += s->sets[i++].num_files)
        mt_saved_plan(&s->sets[i], m, stems[i], num_files, max_shard_bytes, option);
    mt_save_begin_writer(s, m, option, holds_all);
}

/* Plans a folder torch_dist. */
static void mt_save_open_dist(mt_save *s, mt_model *m, const mt_run_options *o, bool states, int64_t max_shard_bytes,
                              bool holds_all) {
    s->num_sets = 1;
    mt_saved_plan_dist(&s->sets[0], m, o, states, max_shard_bytes, "--save");
    mt_save_begin_writer(s, m, "--save", holds_all);
}

static void mt_save_close(mt_save *s) {
    mt_writer_close(&s->writer);
    for (int64_t i = 0; i < s->num_sets; i++) mt_saved_free(&s->sets[i]);
}

/* Begins the sums of all files; rank 0 adds those of the headers, which it writes. */
static void mt_save_begin_sums(mt_save *s) {
    for (int64_t i = 0; i < s->num_sets; i++)
        mt_set_begin_sums(&s->sets[i], mt_model_grid(s->model)->world.rank == 0, &s->writer.sums);
    for (int64_t i = 0; i < s->num_sets; i++)
        for (int64_t k = 0; k < s->sets[i].count; k++) s->sets[i].tensors[k].sum = 0;
}

/* On rank 0: writes headers and indices. */
static int mt_save_begin_files(const mt_save *s, const char *folder, bool alone, mt_error *error) {
    int status = 0;
    for (int64_t i = 0; i < s->num_sets && status == 0; i++) status = mt_saved_begin(&s->sets[i], folder, alone, error);
    return status;
}

/* Copies this rank's share and starts the threads that write it: they make room in a ring, so they start before the
 * copies; or they wait for all copies, so they start after these. */
static void mt_save_start(mt_save *s, const char *folder) {
    mt_writer *w = &s->writer;
    int64_t largest;
    mt_writer_begin(w);
    if (!w->holds_all) mt_writer_start(w, folder);
    for (int64_t i = 0; i < s->num_sets; i++) mt_set_copy(&s->sets[i], s->model, w, &largest);
    if (w->holds_all) mt_copies_make(s->model, w);
    mt_writer_end(w);
    if (w->holds_all) mt_writer_start(w, folder);
}

int mt_safetensors_save_folder(mt_model *m, const char *folder, const char *stem, int64_t max_shard_bytes,
                               const char *option, mt_checksums *sums, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_save s = {0};
    MT_CHECK(strcmp(stem, "optimizer") != 0 || mt_model_get_plan(m)->train);
    mt_save_open(&s, m, option, &stem, 1, max_shard_bytes, false);
    mt_save_begin_sums(&s);
    int status = mt_agree(world, world->rank == 0 && mt_save_begin_files(&s, folder, true, error) != 0, error);
    if (status == 0) {
        mt_save_start(&s, folder);
        status = mt_agree(world, mt_writer_wait(&s.writer, error) != 0, error);
    }
    if (sums) {
        mt_sums_collect(world, &s.writer.sums);
        *sums = s.writer.sums;
        s.writer.sums = (mt_checksums){0};
    }
    mt_save_close(&s);
    return status;
}

/* The files of a folder torch_dist that hold no values. metadata.json marks it as one. */
static int mt_dist_files_write(const mt_saved_set *set, const mt_run_options *o, const mt_grid *grid,
                               const mt_run_state *state, bool states, mt_dtype dtype, const char *folder,
                               mt_error *error) {
    static const char mark[] = "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1}\n";
    mt_bytes files[4] = {{0}};
    const char *const names[] = {MT_DIST_OBJECTS, "common.pt", ".metadata", "metadata.json"};
    mt_dist_objects_make(&files[0]);
    mt_dist_common_make(o, grid, state, states, dtype, &files[1]);
    mt_dist_metadata_make(set, states, &files[2]);
    mt_bytes_add(&files[3], mark, (int64_t)strlen(mark));
    int status = 0;
    for (int i = 0; i < 4; i++) {
        if (status == 0)
            status = mt_small_file_write(folder, names[i], files[i].data, files[i].count, set->option, error);
        free(files[i].data);
    }
    return status;
}

/* Writes the archives around the values, whose sums are complete: on rank 0, after all ranks have written. `all`: the
 * sums of the files. */
static int mt_dist_archives_write(const mt_saved_set *set, mt_checksums *all, const char *folder, bool syncs,
                                  mt_error *error) {
    mt_output_file out;
    int status = 0;
    for (int64_t i = 0, file = -1; i < set->count && status == 0; i++) {
        const mt_saved_tensor *tensor = &set->tensors[i];
        mt_archive archive;
        mt_saved_archive(tensor, &archive);
        const mt_bytes *ends[] = {&archive.head, &archive.tail};
        int64_t at[] = {tensor->offset - archive.head.count, tensor->offset + tensor->bytes};
        char *path = mt_path_join(folder, set->files[tensor->file].name);
        if (tensor->file != file) status = mt_output_file_open(&out, path, set->option, 0, error);
        file = tensor->file;
        for (int k = 0; k < 2 && status == 0; k++) {
            mt_checksums_add(&all->files[file], at[k], ends[k]->data, ends[k]->count);
            status = mt_output_file_write(&out, at[k], ends[k]->data, ends[k]->count);
            if (status != 0) mt_output_file_close(&out, false, -1);
        }
        bool last = i + 1 == set->count || set->tensors[i + 1].file != file;
        if (status == 0 && last) status = mt_output_file_close(&out, syncs, 0);
        free(path);
        mt_archive_free(&archive);
    }
    return status;
}

/* ---- saving a run's checkpoints, at once or in the background */

struct mt_saver {
    mt_save save;
    const mt_run_options *options;
    const char *folder;
    mt_checkpoint_extra *extra;
    void *context;
    bool async;
    char *temporary;    // the folder being written; NULL: no save is under way
    char name[64];      // its later name
    mt_run_state state; // of the save that is under way, as the next three
    mt_loss_average loss_average;
    char *fp8; // contents of MT_FP8_FILE, on rank 0; NULL: none
    int64_t fp8_bytes;
    int64_t published; // the iteration of the last whole checkpoint with its final name, or -1
    bool publishes;    // rank 0's thread: false: writes headers and small files; true: gives the folder its final name
    bool worked;       // that thread is at its end, with
    int work_status;
    mt_error work_error;
    pthread_t worker;
    pthread_mutex_t lock; // of worked
};

static const mt_group *mt_saver_world(const mt_saver *s) {
    return &mt_model_grid(s->save.model)->world;
}

void mt_saver_open(mt_saver **out, mt_model *m, const mt_run_options *o, const char *folder, mt_checkpoint_extra *extra,
                   void *context, bool async) {
    bool adapts = o->stack.lora_rank > 0;
    const char *const stems[] = {adapts ? "adapter_model" : "model", "optimizer"};
    // the default of transformers' save_pretrained before version 5; peft reads one file
    const int64_t max_shard_bytes = adapts ? INT64_MAX : 5000000000;
    mt_saver *s = mt_calloc(sizeof *s);
    *s =
        (mt_saver){.options = o, .folder = folder, .extra = extra, .context = context, .async = async, .published = -1};
    bool states = mt_saves_optimizer(m, o);
    if (o->ckpt_format == MT_CHECKPOINT_TORCH_DIST)
        mt_save_open_dist(&s->save, m, o, states, max_shard_bytes, async);
    else
        mt_save_open(&s->save, m, "--save", stems, states ? 2 : 1, max_shard_bytes, async);
    pthread_mutex_init(&s->lock, NULL);
    *out = s;
}

void mt_saver_close(mt_saver *s) {
    if (!s) return;
    MT_CHECK(!s->temporary); // mt_saver_finish
    mt_save_close(&s->save);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* Ends a thread of rank 0. */
static void *mt_saver_worked(mt_saver *s, int status) {
    pthread_mutex_lock(&s->lock);
    s->work_status = status, s->worked = true;
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Rank 0's thread while all ranks write tensors: headers and small files. */
static void *mt_saver_begin(void *context) {
    mt_saver *s = context;
    int status = mt_save_begin_files(&s->save, s->temporary, false, &s->work_error);
    mt_model *m = s->save.model;
    if (status == 0 && s->save.sets[0].dist)
        status =
            mt_dist_files_write(&s->save.sets[0], s->options, mt_model_grid(m), &s->state,
                                mt_saves_optimizer(m, s->options), mt_model_dtype(m), s->temporary, &s->work_error);
    if (status == 0)
        status = mt_small_files_write(s->save.model, s->options, &s->state, &s->loss_average, s->temporary, s->extra,
                                      s->context, &s->work_error);
    if (status == 0 && s->fp8)
        status = mt_small_file_write(s->temporary, MT_FP8_FILE, s->fp8, s->fp8_bytes, "--save", &s->work_error);
    return mt_saver_worked(s, status);
}

/* Rank 0 combines its sums of the archives' entries with those of all ranks. */
static void mt_saver_collect_entries(const mt_group *world, mt_saved_set *set) {
    uint32_t *sums = mt_malloc(mt_max(set->count, 1) * 4);
    for (int64_t i = 0; i < set->count; i++) sums[i] = set->tensors[i].sum;
    if (world->rank != 0) mt_send(world, sums, set->count * 4, 0);
    for (int rank = 1; rank < world->size && world->rank == 0; rank++) {
        mt_receive(world, sums, set->count * 4, rank);
        for (int64_t i = 0; i < set->count; i++) set->tensors[i].sum ^= sums[i];
    }
    free(sums);
}

/* Rank 0's thread after all tensors are written: writes the checksums, syncs the folder, renames it, updates the
 * tracker, and removes old checkpoints. */
static void *mt_saver_publish(void *context) {
    mt_saver *s = context;
    const mt_run_options *o = s->options;
    mt_error *error = &s->work_error;
    mt_checksums *sums = &s->save.writer.sums;
    char *path = mt_path_join(s->folder, s->name);
    int status = s->save.sets[0].dist ? mt_dist_archives_write(&s->save.sets[0], sums, s->temporary, false, error) : 0;
    if (status == 0) status = mt_checksums_write(sums, s->temporary, NULL, "--save", error);
    if (status == 0) status = mt_folder_visit(s->temporary, mt_sync_entry, error);
    if (status == 0) status = mt_file_sync(s->temporary, "--save", error);
    if (status == 0) status = mt_folder_rename(s->temporary, path, error);
    if (status == 0) status = mt_file_sync(s->folder, "--save", error); // the tracker must not reach the disk first
    if (status == 0) status = mt_checkpoint_publish(s->folder, s->name, s->state.iteration, error);
    if (status == 0) mt_checkpoint_retain(o, s->folder, s->state.iteration, o->overwrite && s->published < 0);
    free(path);
    return mt_saver_worked(s, status);
}

/* Starts rank 0's thread. */
static void mt_saver_work(mt_saver *s, bool publishes, void *(*work)(void *)) {
    bool works = mt_saver_world(s)->rank == 0;
    s->publishes = publishes, s->worked = !works, s->work_status = 0;
    if (works && pthread_create(&s->worker, NULL, work, s) != 0) mt_die("cannot start a thread; raise ulimit -u");
}

/* Ends a save, whose threads are at their ends. */
static int mt_saver_end(mt_saver *s, int status) {
    mt_model_set_reader(s->save.model, NULL);
    if (status != 0 && mt_saver_world(s)->rank == 0) mt_folder_remove(s->temporary);
    if (status == 0) s->published = s->state.iteration;
    free(s->temporary);
    free(s->fp8);
    s->temporary = s->fp8 = NULL;
    mt_checksums_free(&s->save.writer.sums);
    return status;
}

/* Waits for this rank's threads; if a thread of any rank failed, all ranks return its error. */
static int mt_saver_wait(mt_saver *s, mt_error *error) {
    int status = mt_writer_wait(&s->save.writer, error);
    if (mt_saver_world(s)->rank == 0) pthread_join(s->worker, NULL);
    if (s->work_status != 0) status = s->work_status, *error = s->work_error;
    return mt_agree(mt_saver_world(s), status != 0, error);
}

/* Waits for the threads and takes the save's next step: placing the folder, then the end. */
static int mt_saver_advance(mt_saver *s, mt_error *error) {
    int status = mt_saver_wait(s, error);
    if (status != 0 || s->publishes) return mt_saver_end(s, status);
    mt_sums_collect(mt_saver_world(s), &s->save.writer.sums);
    if (s->save.sets[0].dist) mt_saver_collect_entries(mt_saver_world(s), &s->save.sets[0]);
    mt_saver_work(s, true, mt_saver_publish);
    return 0;
}

int mt_saver_poll(mt_saver *s, mt_error *error) {
    if (!s || !s->temporary) return 0;
    pthread_mutex_lock(&s->lock);
    double busy = !s->worked || !mt_writer_is_done(&s->save.writer);
    pthread_mutex_unlock(&s->lock);
    mt_all_reduce_max(mt_saver_world(s), &busy, 1, MT_F64);
    return busy > 0 ? 0 : mt_saver_advance(s, error);
}

int64_t mt_saver_in_place(const mt_saver *s) {
    return s ? s->published : -1;
}

int mt_saver_finish(mt_saver *s, mt_error *error) {
    int status = 0;
    mt_watch_phase phase = mt_watch_enter(MT_WATCH_SAVE);
    while (s && s->temporary && status == 0) status = mt_saver_advance(s, error);
    mt_watch_enter(phase);
    return status;
}

/* Rank 0 makes the folder; all ranks write into it. */
static int mt_saver_make_folder(mt_saver *s, mt_error *error) {
    if (mt_saver_world(s)->rank != 0) return 0;
    if (mt_checkpoint_prepare(s->save.model, s->options, s->folder, error) != 0) return -1;
    // without a sync: only the folder's last name must reach the disk
    return mkdir(s->temporary, 0777) == 0 ? 0 : mt_file_write_error(error, s->temporary, "--save");
}

static int mt_saver_begin_save(mt_saver *s, const mt_run_state *state, mt_error *error) {
    char temporary_name[128];
    if (mt_saver_finish(s, error) != 0) return -1; // the save before
    s->state = *state;
    if (mt_model_get_plan(s->save.model)->train) {
        s->loss_average = mt_train_loss_average(s->save.model);
        s->state.optimizer_step = mt_train_updates(s->save.model, state);
        s->state.skipped_iterations = mt_train_skipped(s->save.model, state);
    }
    s->fp8 = mt_fp8_collect(s->save.model, &s->fp8_bytes);
    snprintf(s->name, sizeof s->name, "iter_%07lld", (long long)state->iteration);
    snprintf(temporary_name, sizeof temporary_name, "%s.tmp-%lld", s->name, (long long)getpid());
    mt_broadcast(mt_saver_world(s), temporary_name, sizeof temporary_name, 0);
    s->temporary = mt_path_join(s->folder, temporary_name);
    int status = mt_agree(mt_saver_world(s), mt_saver_make_folder(s, error) != 0, error);
    if (status != 0) return mt_saver_end(s, status);
    mt_save_begin_sums(&s->save);
    mt_saver_work(s, false, mt_saver_begin);
    mt_save_start(&s->save, s->temporary);
    return s->async ? 0 : mt_saver_finish(s, error);
}

int mt_saver_save(mt_saver *s, const mt_run_state *state, mt_error *error) {
    mt_watch_phase phase = mt_watch_enter(MT_WATCH_SAVE);
    int status = mt_saver_begin_save(s, state, error);
    mt_watch_enter(phase);
    return status;
}

int mt_checkpoint_save(mt_model *m, const mt_run_options *o, const mt_run_state *state, const char *folder,
                       mt_checkpoint_extra *extra, void *context, mt_error *error) {
    mt_saver *s;
    mt_saver_open(&s, m, o, folder, extra, context, false);
    int status = mt_saver_save(s, state, error);
    mt_saver_close(s);
    return status;
}

/* ---- weights without a model */

int mt_saved_write(mt_saved_set *set, const mt_run_options *o, mt_dtype dtype, const char *folder,
                   mt_tensor_source *source, void *context, mt_checksums *sums, mt_error *error) {
    const mt_run_state state = {0};
    mt_zip_sums entry;
    mt_output_file out = {.descriptor = -1};
    char *path = NULL, *values = NULL;
    int64_t room = 0, open = -1;
    mt_zip_sums_init(&entry);
    mt_set_begin_sums(set, true, sums);
    int status = mt_saved_begin(set, folder, true, error);
    for (int64_t i = 0; i < set->count && status == 0; i++) {
        mt_saved_tensor *t = &set->tensors[i];
        if (t->bytes > room) free(values), values = mt_malloc(room = t->bytes);
        memset(values, 0, (size_t)t->bytes);
        if (t->file != open) {
            if (out.descriptor >= 0) status = mt_output_file_close(&out, true, 0);
            free(path);
            path = mt_path_join(folder, set->files[open = t->file].name);
            out.descriptor = -1;
            if (status == 0) status = mt_output_file_open(&out, path, set->option, 0, error);
        }
        if (status == 0) status = source(context, t, values, error);
        if (status == 0) status = mt_output_file_write(&out, t->offset, values, t->bytes);
        if (status == 0) mt_checksums_add(&sums->files[t->file], t->offset, values, t->bytes);
        if (set->dist) t->sum = mt_zip_sum_lines(&entry, values, t->bytes, 1, t->bytes, 0);
    }
    if (out.descriptor >= 0) status = mt_output_file_close(&out, true, status);
    if (status == 0 && set->dist) status = mt_dist_archives_write(set, sums, folder, true, error);
    if (status == 0 && set->dist)
        status = mt_dist_files_write(set, o, &mt_grid_of_one, &state, false, dtype, folder, error);
    for (int64_t i = 0; i < sums->count; i++) mt_checksums_finish(&sums->files[i]);
    free(path), free(values);
    return status;
}

/* ---- going back */

int mt_checkpoint_rewind(mt_model *m, const mt_run_options *o, mt_run_state *state, mt_saver *saver, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    const mt_data_state data = state->data; // as this run reads them, also where an older checkpoint does not know
    const int64_t skipped = state->skipped_iterations; // also of the steps that are run again
    if (mt_saver_finish(saver, error) != 0) return -1; // it must not replace or remove the one that is loaded
    bool replaces = o->overwrite && saver && mt_saver_in_place(saver) < 0; // the folder still holds another run's
    bool saved = o->save && !replaces && mt_folder_has(o->save, "latest_checkpointed_iteration.txt");
    mt_broadcast(world, &saved, sizeof saved, 0);
    if (!saved && !o->load)
        return mt_error_set(error,
                            "--bad-step-policy rewind: iteration %lld is bad, and there is no checkpoint yet to "
                            "go back to; lower --save-interval",
                            (long long)mt_train_bad_iteration(m));
    if (mt_checkpoint_load_found(m, o, state, saved ? o->save : o->load, saved, NULL, error) != 0) return -1;
    state->data = data, state->skipped_iterations = skipped;
    mt_train_rewound(m);
    if (world->rank == 0) fprintf(stderr, "warning: went back to iteration %lld\n", (long long)state->iteration);
    return 0;
}
