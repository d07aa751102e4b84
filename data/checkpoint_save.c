/* checkpoint_save.c: writes checkpoints. The place of every byte follows from the whole model's table before the first
 * is written, so every rank knows it: rank 0 writes the headers, each rank its own share at computed offsets, and no
 * rank waits for another. What is written passes through host memory, from which threads write it: a small ring when
 * training waits, or room for all of it, so that training goes on while it is written, and on a GPU while it is copied
 * too. The threads call no MPI, and of the device nothing but the wait for the copies. A checkpoint is written into a
 * folder of a temporary name beside its place, brought to disk, and renamed. Invariant: nothing half-written ever
 * stands where something good stood. */
#include "checkpoint_internal.h"

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

/* ---- the files of a checkpoint */

/* A Hugging Face tensor that is to be written: one parameter, or several that it holds one after another. */
typedef struct mt_saved {
    char name[192];
    const mt_param *params; // rows of this rank's table, NULL: nothing of it lies here
    int64_t num_params;
    mt_param_state state;
    mt_dtype dtype;
    int64_t shape[2], num_dims;
    int64_t shard, offset, bytes; // offset in the shard's data
} mt_saved;

/* All tensors of a stem, in order, and the files they go to. */
typedef struct mt_saved_set {
    mt_saved *tensors;
    int64_t count, num_shards, bytes;
    const char *stem;
} mt_saved_set;

static int mt_saved_compare(const void *a, const void *b) {
    return strcmp(((const mt_saved *)a)->name, ((const mt_saved *)b)->name);
}

/* The rows of a table from i on that one tensor holds: the first row behind them. */
static int64_t mt_params_together(const mt_param *rows, int64_t count, int64_t i) {
    int64_t next = i + 1;
    while (next < count && strcmp(rows[next].hf_name, rows[i].hf_name) == 0) next++;
    return next;
}

/* Appends one kind of value of every parameter of the whole model. */
static void mt_saved_add(mt_saved_set *set, const mt_param *rows, int64_t count, mt_param_state state, mt_dtype dtype) {
    for (int64_t i = 0; i < count; i = mt_params_together(rows, count, i)) {
        const mt_param *param = &rows[i];
        bool trained = param->trained; // what is not has no moments, and stays fp32
        if (!trained && state != MT_STATE_WEIGHTS) continue;
        mt_saved *saved = &set->tensors[set->count++];
        *saved = (mt_saved){.state = state, .dtype = state == MT_STATE_WEIGHTS && trained ? dtype : MT_F32};
        saved->num_dims = mt_param_shape(param, saved->shape);
        saved->bytes = param->hf_rows_total * param->whole_cols * mt_dtype_size(saved->dtype);
        snprintf(saved->name, sizeof saved->name, "%s%s", mt_state_prefix[state], param->hf_name);
    }
}

/* Finds what lies here of every tensor of a set. */
static void mt_saved_find_params(mt_saved_set *set, const mt_model *m) {
    int first = set->tensors[0].state == MT_STATE_WEIGHTS ? MT_STATE_WEIGHTS : MT_STATE_MASTER;
    int end = first == MT_STATE_WEIGHTS ? MT_STATE_MASTER : MT_NUM_STATES;
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    for (int64_t i = 0, next; i < num_params; i = next) {
        next = mt_params_together(params, num_params, i);
        for (int state = first; state < end; state++) {
            mt_saved key;
            snprintf(key.name, sizeof key.name, "%s%s", mt_state_prefix[state], params[i].hf_name);
            mt_saved *saved = bsearch(&key, set->tensors, (size_t)set->count, sizeof key, mt_saved_compare);
            if (saved) saved->params = &params[i], saved->num_params = next - i;
        }
    }
}

/* What a stem holds, in the order of names as upstream writes it, cut into files of at most max_shard_bytes. */
static void mt_saved_plan(mt_saved_set *set, const mt_model *m, const char *stem, int64_t max_shard_bytes) {
    mt_param *rows;
    int64_t filled = 0, count = mt_params_build(&rows, mt_model_options(m), NULL);
    bool weights = strcmp(stem, "model") == 0;
    *set = (mt_saved_set){.stem = stem, .num_shards = 1};
    set->tensors = mt_malloc(MT_NUM_STATES * count * (int64_t)sizeof(mt_saved));
    for (int state = 0; state < MT_NUM_STATES; state++)
        if (weights == (state == MT_STATE_WEIGHTS) && (state != MT_STATE_MASTER || mt_model_dtype(m) != MT_F32))
            mt_saved_add(set, rows, count, (mt_param_state)state, mt_model_dtype(m));
    free(rows);
    qsort(set->tensors, (size_t)set->count, sizeof *set->tensors, mt_saved_compare);
    for (int64_t i = 0; i < set->count; i++) {
        mt_saved *saved = &set->tensors[i];
        if (filled > 0 && filled + saved->bytes > max_shard_bytes) set->num_shards++, filled = 0;
        saved->shard = set->num_shards - 1, saved->offset = filled;
        filled += saved->bytes, set->bytes += saved->bytes;
    }
    mt_saved_find_params(set, m);
}

/* "model.safetensors", or "model-00001-of-00002.safetensors". */
static void mt_shard_name(char name[64], const mt_saved_set *set, int64_t shard) {
    if (set->num_shards == 1)
        snprintf(name, 64, "%s.safetensors", set->stem);
    else
        snprintf(name, 64, "%s-%05lld-of-%05lld.safetensors", set->stem, (long long)shard + 1,
                 (long long)set->num_shards);
}

/* ---- files */

/* A file being written, around the page cache too where `direct` is not -1, and where its errors go. */
typedef struct mt_output {
    int descriptor, direct;
    const char *path;
    mt_error *error;
} mt_output;

static int mt_output_open(mt_output *out, const char *path, mt_error *error) {
    *out = (mt_output){.path = path, .error = error, .direct = -1};
    out->descriptor = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    return out->descriptor < 0 ? mt_file_write_error(error, path, "--save") : 0;
}

/* The same for a file that others write too: who comes first makes it. */
static int mt_output_join(mt_output *out, const char *path, mt_error *error) {
    *out = (mt_output){.path = path, .error = error, .direct = -1};
    out->descriptor = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (out->descriptor < 0 && errno == ENOENT)
        return mt_error_set(
            error, "%s: rank 0 made its folder, which is not here; choose a --save that every host sees", path);
    if (out->descriptor < 0) return mt_file_write_error(error, path, "--save");
    out->direct = mt_open_direct(path, O_WRONLY);
    return 0;
}

static int mt_output_write_by(const mt_output *out, int descriptor, int64_t offset, const char *data, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t wrote = pwrite(descriptor, data + done, (size_t)(bytes - done), offset + done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote < 0 && errno == EINVAL && descriptor != out->descriptor) { // it wants other places after all
            descriptor = out->descriptor;
            continue;
        }
        if (wrote < 0) return mt_file_write_error(out->error, out->path, "--save");
        done += wrote;
    }
    return 0;
}

/* Long stretches go around the page cache if memory and file are aligned alike, their ends through it: the rest of
 * those pages may be another rank's. */
static int mt_output_write(const mt_output *out, int64_t offset, const void *data, int64_t bytes) {
    enum { LONG = 64 << 10 };
    const char *from = data;
    int64_t head = -offset & (MT_DIRECT - 1), tail = (offset + bytes) & (MT_DIRECT - 1);
    if (out->direct >= 0 && bytes >= LONG && (uintptr_t)(from + head) % MT_DIRECT == 0) {
        if (mt_output_write_by(out, out->descriptor, offset, from, head) != 0) return -1;
        if (mt_output_write_by(out, out->direct, offset + head, from + head, bytes - head - tail) != 0) return -1;
        offset += bytes - tail, from += bytes - tail, bytes = tail;
    }
    return mt_output_write_by(out, out->descriptor, offset, from, bytes);
}

/* Closes the file, whole and on disk when `status` was 0 and this returns 0. */
static int mt_output_close(const mt_output *out, int status) {
    if (status == 0 && fsync(out->descriptor) != 0) status = mt_file_write_error(out->error, out->path, "--save");
    if (close(out->descriptor) != 0 && status == 0) status = mt_file_write_error(out->error, out->path, "--save");
    if (out->direct >= 0) close(out->direct);
    return status;
}

/* Not yet on disk: what comes after brings it there together with all else. */
static int mt_text_write(const char *folder, const char *name, const char *text, mt_error *error) {
    mt_output out;
    char *path = mt_path_join(folder, name);
    int status = mt_output_open(&out, path, error);
    if (status == 0) status = mt_output_write(&out, 0, text, (int64_t)strlen(text));
    if (out.descriptor >= 0 && close(out.descriptor) != 0 && status == 0)
        status = mt_file_write_error(error, path, "--save");
    free(path);
    return status;
}

static int mt_json_write(const char *folder, const char *name, const json_t *json, mt_error *error) {
    char *text = mt_json_print(json);
    text = mt_realloc(text, (int64_t)strlen(text) + 2);
    int status = mt_text_write(folder, name, strcat(text, "\n"), error);
    free(text);
    return status;
}

/* ---- tensors */

/* Length, JSON and padding of a file's header, to free; tensors[count] are the file's. */
static char *mt_saved_header(const mt_saved *tensors, int64_t count, int64_t *bytes) {
    char *text = mt_malloc(128 + count * 384);
    int64_t used = 8 + sprintf(text + 8, "{\"__metadata__\":{\"format\":\"pt\"}"), length;
    for (int64_t i = 0; i < count; i++) {
        const mt_saved *saved = &tensors[i];
        used += sprintf(text + used, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", saved->name,
                        mt_dtype_name(saved->dtype), (long long)saved->shape[0]);
        if (saved->num_dims == 2) used += sprintf(text + used, ",%lld", (long long)saved->shape[1]);
        used += sprintf(text + used, "],\"data_offsets\":[%lld,%lld]}", (long long)saved->offset,
                        (long long)(saved->offset + saved->bytes));
    }
    text[used++] = '}';
    while (used % 8) text[used++] = ' '; // the data then begins aligned
    length = used - 8;
    memcpy(text, &length, 8);
    *bytes = used;
    return text;
}

/* ---- the writer */

/* Numbers in host memory on their way to a file: a rectangle [rows, cols] of a matrix whose lines lie `pitch` bytes
 * apart there; a turned one is stored as [cols, rows]. */
typedef struct mt_piece {
    int64_t file, offset, pitch; // of the first line
    int64_t rows, cols, size;    // bytes of an element
    bool turned;
    const char *data;
    int64_t end; // of its place among all bytes that passed through the memory
    bool done;
} mt_piece;

/* Pieces of so many bytes, and as many of them in the ring. */
enum { MT_PIECE_BYTES = 8 << 20, MT_RING_PIECES = 4, MT_WRITERS = 2 };

/* A copy that is still to be made. */
typedef struct mt_copy {
    char *to;
    const char *from;
    int64_t bytes;
} mt_copy;

typedef struct mt_writer {
    const mt_ops *ops;
    char *block, *memory;                 // as it was allocated; aligned
    int64_t capacity, reserved, released; // bytes that were ever given out and came back: a ring
    mt_piece *pieces;
    int64_t num_pieces, room; // submitted so far
    int64_t next, held;       // the first piece that no thread has taken; that still has its memory
    mt_copy *copies;
    int64_t num_copies, copy_room;
    bool closed;        // no more will come
    bool holds_all;     // everything is copied at once, for which the threads wait
    mt_stream *stream;  // the copies, where it holds all; NULL on the CPU
    mt_event *copied;   // the moment when they are made
    bool runs;          // threads were started
    int busy;           // of them, those that have something left to do
    const char *folder; // they write into the files of `sums`
    mt_checksums sums;
    int status; // of the threads
    mt_error error;
    pthread_t threads[MT_WRITERS];
    pthread_mutex_t lock;
    pthread_cond_t changed;
} mt_writer;

/* The most that a piece takes of the ring, where it lies as aligned as in its file. */
static int64_t mt_piece_bytes(int64_t bytes) {
    return mt_divide_up(bytes, MT_DIRECT) * MT_DIRECT + MT_DIRECT;
}

static void mt_writer_open(mt_writer *w, const mt_ops *ops, int64_t capacity, bool holds_all) {
    *w = (mt_writer){.ops = ops, .capacity = mt_divide_up(capacity, MT_DIRECT) * MT_DIRECT, .holds_all = holds_all};
    if (holds_all) w->stream = ops->stream_create(NULL, 0, false), w->copied = ops->event_create();
    w->block = ops->memory_alloc_host(w->capacity + MT_DIRECT);
    w->memory = mt_align_direct(w->block);
    memset(w->memory, 0, (size_t)w->capacity); // the system gives pages when they are touched: now, not in training
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
}

static void mt_writer_close(mt_writer *w) {
    if (!w->block) return;
    if (w->holds_all) w->ops->stream_destroy(w->stream), w->ops->event_destroy(w->copied);
    w->ops->memory_free_host(w->block);
    mt_checksums_free(&w->sums);
    free(w->pieces);
    free(w->copies);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    *w = (mt_writer){0};
}

/* Host memory for a piece that goes to a place of a file, aligned like it; waits until the ring has room. */
static char *mt_writer_reserve(mt_writer *w, int64_t offset, int64_t bytes) {
    int64_t at = w->reserved + ((offset - w->reserved) & (MT_DIRECT - 1));
    MT_CHECK(mt_piece_bytes(bytes) <= w->capacity);
    if (at % w->capacity + bytes > w->capacity) // a piece is not cut in two
        at = mt_divide_up(at, w->capacity) * w->capacity + (offset & (MT_DIRECT - 1));
    pthread_mutex_lock(&w->lock);
    while (at + bytes - w->released > w->capacity) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
    w->reserved = at + bytes;
    return w->memory + at % w->capacity;
}

/* Whether `next` only makes a piece longer, in memory and in the file. */
static bool mt_piece_continues(const mt_piece *piece, const mt_piece *next) {
    int64_t bytes = piece->rows * piece->cols * piece->size, more = next->rows * next->cols * next->size;
    bool lines = piece->cols * piece->size != piece->pitch || next->cols * next->size != next->pitch;
    return !piece->turned && !next->turned && !lines && piece->file == next->file && bytes + more <= MT_PIECE_BYTES &&
           piece->offset + bytes == next->offset && piece->data + bytes == next->data;
}

static void mt_writer_submit(mt_writer *w, mt_piece piece) {
    piece.end = w->reserved;
    pthread_mutex_lock(&w->lock);
    mt_piece *last = w->num_pieces > w->next ? &w->pieces[w->num_pieces - 1] : NULL;
    if (last && mt_piece_continues(last, &piece)) {
        int64_t bytes = last->rows * last->cols * last->size + piece.rows * piece.cols * piece.size;
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

static void mt_writer_end(mt_writer *w) {
    pthread_mutex_lock(&w->lock);
    w->closed = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* to[cols, rows] = from[rows, cols] transposed, elements of 2 or 4 bytes; 64 rows at a time stay in the cache. */
static void mt_transpose(void *to, const void *from, int64_t rows, int64_t cols, int64_t size) {
    for (int64_t first = 0; first < rows; first += 64)
        for (int64_t c = 0; c < cols; c++)
            for (int64_t r = first; r < rows && r < first + 64; r++)
                if (size == 4)
                    ((uint32_t *)to)[c * rows + r] = ((const uint32_t *)from)[r * cols + c];
                else
                    ((uint16_t *)to)[c * rows + r] = ((const uint16_t *)from)[r * cols + c];
}

/* Memory of a thread for a turned piece, with a place in it that is aligned like the piece's in the file. */
typedef struct mt_turned {
    char *memory;
    int64_t bytes;
} mt_turned;

static char *mt_turned_at(mt_turned *room, int64_t bytes, int64_t offset) {
    if (room->bytes < bytes) {
        free(room->memory);
        room->memory = mt_malloc(bytes + 2 * MT_DIRECT), room->bytes = bytes;
    }
    return mt_align_direct(room->memory) + (offset & (MT_DIRECT - 1));
}

static int mt_piece_write(mt_writer *w, const mt_output *out, const mt_piece *piece, mt_turned *room) {
    int64_t lines = piece->turned ? piece->cols : piece->rows;
    int64_t bytes = piece->rows * piece->cols * piece->size, line = bytes / lines;
    const char *data = piece->data;
    if (piece->turned) {
        char *turned = mt_turned_at(room, bytes, piece->offset);
        mt_transpose(turned, piece->data, piece->rows, piece->cols, piece->size);
        data = turned;
    }
    if (line == piece->pitch) lines = 1, line = bytes;
    int64_t end = piece->offset + (lines - 1) * piece->pitch + line;
    int status = 0;
    mt_checksums_add_lines(&w->sums.files[piece->file], piece->offset, piece->pitch, data, line, lines);
    for (int64_t i = 0; i < lines && status == 0; i++)
        status = mt_output_write(out, piece->offset + i * piece->pitch, data + i * line, line);
#ifdef SYNC_FILE_RANGE_WRITE // what is in the page cache begins its way to the disk now, not when all is there
    if (status == 0 && bytes >= MT_SUM_BLOCK && (lines > 1 || out->direct < 0))
        (void)!sync_file_range(out->descriptor, piece->offset, end - piece->offset, SYNC_FILE_RANGE_WRITE);
#else
    (void)end;
#endif
    return status;
}

/* The number of the next piece, or -1 when there will be none; *status: whether anything has failed. */
static int64_t mt_writer_next(mt_writer *w, mt_piece *piece, int *status) {
    pthread_mutex_lock(&w->lock);
    while (w->next == w->num_pieces && !w->closed) pthread_cond_wait(&w->changed, &w->lock);
    int64_t number = w->next < w->num_pieces ? w->next++ : -1;
    if (number >= 0) *piece = w->pieces[number];
    *status = w->status;
    pthread_mutex_unlock(&w->lock);
    return number;
}

/* A piece is written, or failed: memory comes back in the order in which it was given. */
static void mt_writer_release(mt_writer *w, int64_t number, int status, const mt_error *error) {
    pthread_mutex_lock(&w->lock);
    if (status != 0 && w->status == 0) w->status = status, w->error = *error;
    w->pieces[number].done = true;
    while (w->held < w->next && w->pieces[w->held].done) w->released = w->pieces[w->held++].end;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Nothing that was copied for a writer that holds all is under way any more. */
static void mt_copies_wait(const mt_writer *w) {
    if (w->holds_all) w->ops->event_wait(w->copied);
}

/* A thread: pieces in their order, file after file, each of which is brought to disk when its last piece is in. */
static void *mt_writer_run(void *context) {
    mt_writer *w = context;
    mt_error error;
    mt_output out = {.descriptor = -1};
    mt_turned room = {0};
    mt_piece piece;
    char *path = NULL;
    int64_t open = -1, number;
    int status;
    mt_copies_wait(w);
    while ((number = mt_writer_next(w, &piece, &status)) >= 0) {
        if (status == 0 && piece.file != open) {
            if (out.descriptor >= 0) status = mt_output_close(&out, 0);
            free(path);
            path = mt_path_join(w->folder, w->sums.files[open = piece.file].name);
            out.descriptor = -1;
            if (status == 0) status = mt_output_join(&out, path, &error);
        }
        if (status == 0) status = mt_piece_write(w, &out, &piece, &room);
        mt_writer_release(w, number, status, &error); // after an error too: the copy waits for room
    }
    if (out.descriptor >= 0) status = mt_output_close(&out, status);
    free(path);
    free(room.memory);
    pthread_mutex_lock(&w->lock);
    if (status != 0 && w->status == 0) w->status = status, w->error = error;
    w->busy--;
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Before the first piece. */
static void mt_writer_begin(mt_writer *w) {
    w->status = 0, w->num_pieces = w->next = w->held = 0;
    w->reserved = w->released = 0;
    w->closed = false;
}

/* Starts threads that write into the files of a folder, of which w->sums has the names and sizes. */
static void mt_writer_start(mt_writer *w, const char *folder) {
    w->folder = folder, w->runs = true, w->busy = MT_WRITERS;
    for (int i = 0; i < MT_WRITERS; i++)
        if (pthread_create(&w->threads[i], NULL, mt_writer_run, w) != 0)
            mt_die("cannot start a thread; raise ulimit -u");
}

/* Waits for the threads; their status, with their error. */
static int mt_writer_wait(mt_writer *w, mt_error *error) {
    if (!w->runs) return 0;
    for (int i = 0; i < MT_WRITERS; i++) pthread_join(w->threads[i], NULL);
    w->runs = false;
    if (w->status != 0) *error = w->error;
    return w->status;
}

static bool mt_writer_is_done(mt_writer *w) {
    pthread_mutex_lock(&w->lock);
    bool done = !w->runs || w->busy == 0;
    pthread_mutex_unlock(&w->lock);
    return done;
}

/* A ring in which the largest piece finds room wherever the one before it ends, or all of it where that is less. */
static int64_t mt_ring_bytes(int64_t total, int64_t largest) {
    int64_t most = mt_max(MT_RING_PIECES * mt_piece_bytes(MT_PIECE_BYTES), 2 * mt_piece_bytes(largest));
    return mt_max(mt_min(total, most), mt_piece_bytes(0));
}

/* ---- this rank's share */

/* Elements [*begin, *end) of what lies here of a parameter, in its own order, are this rank's to write: its shard where
 * the data group shares them out, else a part of the rows, or all where rows are the file's columns, whose parts would
 * be short lines. Returns where the first is, or NULL: none is. */
static const char *mt_param_share(const mt_model *m, const mt_param *param, mt_param_state state, int64_t *begin,
                                  int64_t *end) {
    const mt_bucket *b = mt_bucket_get(m, param->bucket);
    const mt_group *group = b->group;
    mt_part part = mt_bucket_part(m, param->bucket, state);
    int64_t rows = mt_param_rows_stored(param), cols = param->cols;
    if (!param->counted) return NULL;
    if (b->strategy == MT_NO_SHARD && param->hf_transposed) { // in turns, so that all get as much of every role
        *begin = 0, *end = (param->role + param->layer) % group->size == group->rank ? rows * cols : 0;
    } else if (b->strategy == MT_NO_SHARD) {
        *begin = rows * group->rank / group->size * cols, *end = rows * (group->rank + 1) / group->size * cols;
    } else {
        *begin = mt_max(b->shard_first - param->offset, 0);
        *end = mt_min(b->shard_first + b->shard_count - param->offset, rows * cols);
    }
    if (*begin >= *end) return NULL;
    return (const char *)part.data + (param->offset + *begin - part.first) * mt_dtype_size(part.dtype);
}

/* memcpy past the caches: what is read again only much later need not be fetched before it is written. The C library
 * does so too, but for far longer copies than a parameter's. */
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

/* To the writer's memory. Copies for a writer that holds all are made together, later: on a processor, threads that
 * meet after each of many small copies cost more than they bring. */
static void mt_copy_to_host(mt_model *m, mt_writer *w, char *to, const char *from, int64_t bytes) {
    if (w->holds_all) {
        if (w->num_copies == w->copy_room) {
            w->copy_room = mt_max(2 * w->copy_room, 256);
            w->copies = mt_realloc(w->copies, w->copy_room * (int64_t)sizeof *w->copies);
        }
        w->copies[w->num_copies++] = (mt_copy){to, from, bytes};
    } else if (strcmp(mt_model_ops(m)->name, "cpu") == 0) {
        memcpy(to, from, (size_t)bytes);
    } else {
        mt_model_ops(m)->memory_copy(to, from, bytes, mt_model_stream(m));
        mt_model_ops(m)->stream_wait(mt_model_stream(m));
    }
}

/* The bytes of the first of these copies with those that go on where it ends, *count in all: a GPU takes only so many
 * operations before the host waits for it. Not all of them, as other copies to the host wait for one under way. */
static int64_t mt_copies_together(const mt_copy *copies, int64_t num_copies, int64_t *count) {
    enum { MOST = 32 << 20 };
    int64_t bytes = copies->bytes, i = 1;
    for (; i < num_copies && bytes + copies[i].bytes <= MOST; bytes += copies[i++].bytes)
        if (copies[i].to != copies->to + bytes || copies[i].from != copies->from + bytes) break;
    *count = i;
    return bytes;
}

/* Makes a processor's copies, by all threads. A GPU's are enqueued on a stream of their own, after all that was
 * computed so far: what comes next runs beside them, up to the next change of
 * what they read. */
static void mt_copies_begin(mt_model *m, mt_writer *w) {
    const mt_copy *copies = w->copies;
    if (strcmp(mt_model_ops(m)->name, "cpu") == 0) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t i = 0; i < w->num_copies; i++) mt_copy_past_cache(copies[i].to, copies[i].from, copies[i].bytes);
    } else {
        mt_model_ops(m)->stream_follow(w->stream, mt_model_stream(m));
        for (int64_t i = 0, count; i < w->num_copies; i += count) {
            int64_t bytes = mt_copies_together(copies + i, w->num_copies - i, &count);
            mt_model_ops(m)->memory_copy(copies[i].to, copies[i].from, bytes, w->stream);
        }
        mt_model_ops(m)->event_record(w->copied, w->stream);
        mt_model_set_reader(m, w->stream);
    }
    w->num_copies = 0;
}

/* Copies elements [begin, end) of a parameter to host memory and hands them on, in rectangles; `start` is where its
 * tensor's data begins in the file. Without a writer it only counts the host memory that this takes. */
static int64_t mt_share_copy(mt_model *m, mt_writer *w, const mt_param *param, int64_t file, int64_t start,
                             int64_t size, const char *from, int64_t begin, int64_t end) {
    int64_t cols = param->cols, taken = 0;
    int64_t most = mt_max(MT_PIECE_BYTES / (cols * size), 1);
    if (param->hf_transposed) most = mt_max(most, param->hf_rows_total); // whole lines, where all rows lie here
    while (begin < end) {
        int64_t row = begin / cols, col = begin % cols, rows = mt_min((end - begin) / cols, most), width = cols;
        if (col > 0 || rows == 0) rows = 1, width = mt_min(cols - col, end - begin);
        int64_t bytes = rows * width * size;
        int64_t to_row = param->hf_row + param->first_row + row, to_col = param->first_col + col;
        mt_piece piece = {.file = file, .rows = rows, .cols = width, .size = size, .turned = param->hf_transposed};
        piece.pitch = (piece.turned ? param->hf_rows_total : param->whole_cols) * size;
        piece.offset =
            start + (piece.turned ? to_col * piece.pitch + to_row * size : to_row * piece.pitch + to_col * size);
        if (w) {
            char *to = mt_writer_reserve(w, piece.offset, bytes);
            mt_copy_to_host(m, w, to, from, bytes);
            piece.data = to;
            mt_writer_submit(w, piece);
        }
        taken += mt_piece_bytes(bytes);
        from += bytes, begin += rows * width;
    }
    return taken;
}

/* Tensors [*first, the result) of a set go to a file. */
static int64_t mt_shard_tensors(const mt_saved_set *set, int64_t shard, int64_t *first) {
    int64_t end = 0;
    while (set->tensors[end].shard < shard) end++;
    *first = end;
    while (end < set->count && set->tensors[end].shard == shard) end++;
    return end;
}

/* Hands on what this rank has of a set, whose first file has a number; returns the host memory that this takes, of
 * which *largest is one piece's. Without a writer it only counts. */
static int64_t mt_set_copy(const mt_saved_set *set, mt_model *m, mt_writer *w, int64_t file, int64_t *largest) {
    int64_t taken = 0;
    *largest = 0;
    for (int64_t shard = 0; shard < set->num_shards; shard++) {
        int64_t first, header_bytes, end = mt_shard_tensors(set, shard, &first);
        free(mt_saved_header(set->tensors + first, end - first, &header_bytes));
        for (int64_t i = first; i < end; i++) {
            const mt_saved *saved = &set->tensors[i];
            int64_t size = mt_dtype_size(saved->dtype);
            for (int64_t k = 0; k < saved->num_params; k++) {
                int64_t from, to;
                const mt_param *param = &saved->params[k];
                const char *data = mt_param_share(m, param, saved->state, &from, &to);
                int64_t most =
                    mt_max(MT_PIECE_BYTES, param->cols * size * (param->hf_transposed ? param->hf_rows_total : 1));
                if (!data) continue;
                *largest = mt_max(*largest, mt_min(most, mt_piece_bytes((to - from) * size)));
                taken += mt_share_copy(m, w, param, file + shard, header_bytes + saved->offset, size, data, from, to);
            }
        }
    }
    return taken;
}

/* Writes a file's header, and makes room for all that is written into it at any place in any order. `alone`: no other
 * rank writes yet, so that a file which is there is somebody's. */
static int mt_shard_begin(const char *header, int64_t header_bytes, int64_t bytes, const char *path, bool alone,
                          mt_error *error) {
    mt_output out;
    if ((alone ? mt_output_open : mt_output_join)(&out, path, error) != 0) return -1;
    int status = mt_output_write_by(&out, out.descriptor, 0, header, header_bytes);
#ifdef FALLOC_FL_KEEP_SIZE // a file system that has no such thing makes room as it goes
    if (status == 0 && fallocate(out.descriptor, 0, 0, bytes) != 0 && (errno == ENOSPC || errno == EFBIG))
        status = mt_file_write_error(error, path, "--save");
#else
    (void)bytes;
#endif
    if (close(out.descriptor) != 0 && status == 0) status = mt_file_write_error(error, path, "--save");
    if (out.direct >= 0) close(out.direct);
    return status;
}

/* Written for a single file too: loaders that take every *.safetensors of a folder then know the model's. */
static int mt_saved_write_index(const mt_saved_set *set, const char *folder, mt_error *error) {
    char name[64];
    json_t *map = json_object();
    for (int64_t i = 0; i < set->count; i++) {
        mt_shard_name(name, set, set->tensors[i].shard);
        mt_json_set_string(map, set->tensors[i].name, name);
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)set->bytes, "weight_map", map);
    snprintf(name, sizeof name, "%s.safetensors.index.json", set->stem);
    int status = mt_json_write(folder, name, index, error);
    json_decref(index);
    return status;
}

/* A file's name and bytes; returns its header, to free. */
static char *mt_saved_file(const mt_saved_set *set, int64_t shard, char *name, int64_t *header_bytes, int64_t *bytes) {
    int64_t first, end = mt_shard_tensors(set, shard, &first);
    char *header = mt_saved_header(set->tensors + first, end - first, header_bytes);
    mt_shard_name(name, set, shard);
    *bytes = *header_bytes + set->tensors[end - 1].offset + set->tensors[end - 1].bytes;
    return header;
}

/* Adds a set's files to `sums`, with the sums of their headers where this rank is to write these. */
static void mt_saved_note(const mt_saved_set *set, bool begins, mt_checksums *sums) {
    for (int64_t shard = 0, header_bytes, bytes; shard < set->num_shards; shard++) {
        char name[64], *header = mt_saved_file(set, shard, name, &header_bytes, &bytes);
        mt_file_checksums *file = mt_checksums_append(sums, name, bytes);
        if (begins) mt_checksums_add(file, 0, header, header_bytes);
        free(header);
    }
}

/* Begins a set's files, and writes their index. */
static int mt_saved_begin(const mt_saved_set *set, const char *folder, bool alone, mt_error *error) {
    int status = 0;
    for (int64_t shard = 0, header_bytes, bytes; shard < set->num_shards && status == 0; shard++) {
        char name[64], *header = mt_saved_file(set, shard, name, &header_bytes, &bytes);
        char *path = mt_path_join(folder, name);
        status = mt_shard_begin(header, header_bytes, bytes, path, alone, error);
        free(path);
        free(header);
    }
    return status == 0 ? mt_saved_write_index(set, folder, error) : status;
}

/* ---- folders */

static const int64_t mt_max_shard_bytes = 5000000000; // as save_pretrained's default was for long

/* Where the run stands, and what it was begun with. */
static int mt_trainer_write(const mt_model *m, const mt_run_state *state, const char *folder, mt_error *error) {
    const mt_options *o = mt_model_options(m);
    json_t *json = json_object();
    mt_json_set_int(json, "version", MT_TRAINER_VERSION);
    mt_json_set_int(json, "iteration", state->iteration);
    mt_json_set_int(json, "consumed_train_samples", state->consumed_train_samples);
    mt_json_set_int(json, "consumed_valid_samples", state->consumed_valid_samples);
    mt_json_set_int(json, "optimizer_step", state->optimizer_step);
    mt_json_set_int(json, "seed", o->seed);
    mt_json_set_int(json, "seq_length", o->seq_length);
    mt_json_set_int(json, "global_batch_size", o->global_batch_size);
    mt_json_set_int(json, "micro_batch_size", o->micro_batch_size);
    mt_json_set_int(json, "world_size", mt_model_grid(m)->world.size);
    mt_json_set_string(json, "dtype", mt_dtype_name(mt_model_dtype(m)));
    mt_json_set_real(json, "learning_rate", o->lr > 0 ? mt_learning_rate(o, state->consumed_train_samples) : 0);
    int status = mt_json_write(folder, "trainer.json", json, error);
    json_decref(json);
    return status;
}

static int mt_generation_config_write(const mt_options *options, const char *folder, mt_error *error) {
    if (options->bos_token_id < 0 && options->eos_token_id < 0) return 0;
    json_t *json = json_object();
    if (options->bos_token_id >= 0) mt_json_set_int(json, "bos_token_id", options->bos_token_id);
    if (options->eos_token_id >= 0) mt_json_set_int(json, "eos_token_id", options->eos_token_id);
    int status = mt_json_write(folder, "generation_config.json", json, error);
    json_decref(json);
    return status;
}

static int mt_remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk) {
    (void)status, (void)type, (void)walk;
    return remove(path);
}

static void mt_folder_remove(const char *folder) {
    nftw(folder, mt_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* What a run that was killed while it saved left behind. */
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

static int mt_fsync_entry(const char *folder, const char *name, void *error) {
    char *path = mt_path_join(folder, name);
    int status = mt_file_sync(path, "--save", error);
    free(path);
    return status;
}

/* Exchanges two folders at once where the system can do that, else by way of a third name. */
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

/* Puts the whole folder `fresh` in its place; what was there goes only then. */
static int mt_folder_place(const char *fresh, const char *place, mt_error *error) {
    bool exists = access(place, F_OK) == 0;
    int status = exists ? mt_folder_exchange(fresh, place) : rename(fresh, place);
    if (status != 0) return mt_file_write_error(error, place, "--save");
    if (exists) mt_folder_remove(fresh);
    return 0;
}

/* Replaces folder/name by a text or by a link, all at once. */
static int mt_file_replace(const char *folder, const char *name, const char *text, bool link, mt_error *error) {
    char temporary[300];
    snprintf(temporary, sizeof temporary, "%s.tmp-%lld", name, (long long)getpid());
    char *from = mt_path_join(folder, temporary), *to = mt_path_join(folder, name);
    unlink(from);
    int status = link ? symlink(text, from) : mt_text_write(folder, temporary, text, error);
    if (link && status != 0) mt_file_write_error(error, to, "--save");
    if (!link && status == 0) status = mt_file_sync(from, "--save", error);
    if (status == 0 && rename(from, to) != 0) {
        status = mt_file_write_error(error, to, "--save");
        unlink(from);
    }
    free(from);
    free(to);
    return status;
}

/* Whether folder/name is one of the links that lead into the latest iteration. */
static bool mt_is_own_link(const char *folder, const char *name) {
    static const char start[] = "latest/";
    char target[sizeof start - 1];
    char *path = mt_path_join(folder, name);
    ssize_t length = readlink(path, target, sizeof target);
    free(path);
    return length == (ssize_t)sizeof target && memcmp(target, start, sizeof target) == 0;
}

static bool mt_path_exists(const char *folder, const char *name) {
    struct stat status;
    char *path = mt_path_join(folder, name);
    bool exists = lstat(path, &status) == 0;
    free(path);
    return exists;
}

/* Links a file of the iteration from the folder above, unless it is our own affair or something else has the name. */
static int mt_link_file(const char *iteration, const char *name, void *folder) {
    char target[300];
    mt_error ignored;
    (void)iteration;
    if (strncmp(name, "optimizer", 9) == 0 || strcmp(name, "trainer.json") == 0 || strcmp(name, "checksums.json") == 0)
        return 0;
    if (mt_path_exists(folder, name) || strlen(name) > 255) return 0;
    snprintf(target, sizeof target, "latest/%s", name);
    mt_file_replace(folder, name, target, true, &ignored);
    return 0;
}

/* Removes links whose file the latest iteration does not have under their name. */
static int mt_unlink_stale(const char *folder, const char *name, void *iteration) {
    if (!mt_is_own_link(folder, name) || mt_path_exists(iteration, name)) return 0;
    char *path = mt_path_join(folder, name);
    unlink(path);
    free(path);
    return 0;
}

/* The folder's latest is `iteration`. Links are a service to other loaders: a file system without them is no error. */
static int mt_checkpoint_publish(const char *folder, const char *iteration, int64_t number, mt_error *error) {
    char text[32];
    mt_error ignored;
    snprintf(text, sizeof text, "%lld\n", (long long)number);
    if (mt_file_replace(folder, "latest_checkpointed_iteration.txt", text, false, error) != 0) return -1;
    if (mt_file_replace(folder, "latest", iteration, true, &ignored) == 0) {
        char *path = mt_path_join(folder, iteration);
        mt_folder_visit(folder, mt_unlink_stale, path);
        mt_folder_visit(path, mt_link_file, (void *)folder);
        free(path);
    }
    return mt_file_sync(folder, "--save", error);
}

/* Bytes of the safetensors of a checkpoint. */
static int64_t mt_checkpoint_bytes(const mt_model *m) {
    int64_t each = mt_dtype_size(mt_model_dtype(m));
    if (mt_model_get_plan(m)->train && !mt_model_options(m)->no_save_optim)
        each += mt_model_dtype(m) == MT_F32 ? 8 : 12;
    return mt_num_parameters(mt_model_options(m)) * each;
}

/* Refuses a folder that is a model of its own, and one that cannot take `bytes`. */
static int mt_checkpoint_check_folder(const char *folder, int64_t bytes, mt_error *error) {
    static const char *const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json"};
    struct statvfs disk;
    char target[8];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (mt_path_exists(folder, names[i]) && !mt_is_own_link(folder, names[i]))
            return mt_error_set(error,
                                "%s: is a model's own folder (its %s was not put there by --save); choose another "
                                "--save",
                                folder, names[i]);
    char *latest = mt_path_join(folder, "latest");
    bool taken = mt_path_exists(folder, "latest") && readlink(latest, target, sizeof target) < 0;
    free(latest);
    if (taken) return mt_error_set(error, "%s/latest: is not a link of --save; choose another --save", folder);
    if (access(folder, W_OK) != 0) return mt_file_write_error(error, folder, "--save");
    if (statvfs(folder, &disk) != 0 || disk.f_blocks == 0) return 0; // the disk does not tell: writing will
    double room = (double)disk.f_bavail * (double)disk.f_frsize;
    if (room >= (double)bytes) return 0;
    return mt_error_set(error,
                        "%s: a checkpoint takes %.1f MB and the disk has %.1f MB left; free some or choose another "
                        "--save",
                        folder, (double)bytes / 1e6, room / 1e6);
}

int mt_checkpoint_prepare(const mt_model *m, const char *folder, mt_error *error) {
    if (mt_folder_create(folder, "--save", error) != 0) return -1;
    mt_folder_visit(folder, mt_remove_leftover, NULL);
    return mt_checkpoint_check_folder(folder, mt_checkpoint_bytes(m), error);
}

/* ---- which checkpoints stay */

/* Once `latest` is whole: removes those before it that are neither among the last --keep-checkpoints nor at a multiple
 * of --save-retain-interval. Under another name first, so that none is ever there in part. */
static void mt_checkpoint_retain(const mt_options *o, const char *folder, int64_t latest) {
    int64_t keep = o->keep_checkpoints > 0       ? o->keep_checkpoints
                   : o->save_retain_interval > 0 ? 1
                                                 : INT64_MAX,
            kept = 0;
    mt_iterations found = mt_iterations_list(folder);
    for (int64_t i = 0; i < found.count; i++) {
        int64_t number = found.numbers[i];
        if (number > latest || kept++ < keep) continue;
        if (o->save_retain_interval > 0 && number % o->save_retain_interval == 0) continue;
        char *path = mt_iteration_path(folder, number);
        char *aside = mt_malloc((int64_t)strlen(path) + 32);
        sprintf(aside, "%s.tmp-%lld", path, (long long)getpid());
        if (rename(path, aside) == 0) mt_folder_remove(aside);
        free(aside);
        free(path);
    }
    free(found.numbers);
}

/* ---- saving, at once or in the background */

enum { MT_NUM_STEMS = 2 };

struct mt_saver {
    mt_model *model;
    const char *folder;
    mt_checkpoint_extra *extra;
    void *context;
    bool async;
    mt_saved_set sets[MT_NUM_STEMS];
    int64_t num_sets;
    mt_writer writer;
    char *temporary;    // the folder being written; NULL: none is
    char name[64];      // what it will be called
    mt_run_state state; // of the one being written
    int64_t in_place;   // the iteration of the last one that took its place, or -1
    bool places;        // all is written, and rank 0 puts the folder in its place; before, it writes what is small
    bool worked;        // the thread of rank 0 that does either is done, with
    int work_status;
    mt_error work_error;
    pthread_t worker;
    pthread_mutex_t lock; // of worked
};

void mt_saver_open(mt_saver **out, mt_model *m, const char *folder, mt_checkpoint_extra *extra, void *context,
                   bool async) {
    static const char *const stems[MT_NUM_STEMS] = {"model", "optimizer"};
    mt_saver *s = mt_calloc(sizeof *s);
    int64_t total = 0, largest = 0, one = 0;
    *s = (mt_saver){.model = m, .folder = folder, .extra = extra, .context = context, .async = async, .in_place = -1};
    s->num_sets = mt_model_get_plan(m)->train && !mt_model_options(m)->no_save_optim ? 2 : 1;
    for (int64_t i = 0; i < s->num_sets; i++) {
        mt_saved_plan(&s->sets[i], m, stems[i], mt_max_shard_bytes);
        total += mt_set_copy(&s->sets[i], m, NULL, 0, &one);
        largest = mt_max(largest, one);
    }
    total = async ? mt_max(total, mt_piece_bytes(0)) : mt_ring_bytes(total, largest);
    mt_writer_open(&s->writer, mt_model_ops(m), total, async);
    pthread_mutex_init(&s->lock, NULL);
    *out = s;
}

void mt_saver_close(mt_saver *s) {
    if (!s) return;
    MT_CHECK(!s->temporary); // mt_saver_finish
    mt_writer_close(&s->writer);
    for (int64_t i = 0; i < s->num_sets; i++) free(s->sets[i].tensors);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* Everything on rank 0 that is small. */
static int mt_saver_write_small(mt_saver *s, mt_error *error) {
    const mt_model *m = s->model;
    char *config = mt_options_write_hf_config(mt_model_options(m));
    int status = mt_text_write(s->temporary, "config.json", config, error);
    free(config);
    if (status == 0) status = mt_generation_config_write(mt_model_options(m), s->temporary, error);
    if (status == 0) status = mt_trainer_write(m, &s->state, s->temporary, error);
    if (status == 0 && s->extra) status = s->extra(s->context, s->temporary, error);
    return status;
}

/* A thread of rank 0 is at its end. */
static void *mt_saver_worked(mt_saver *s, int status) {
    pthread_mutex_lock(&s->lock);
    s->work_status = status, s->worked = true;
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Rank 0's first steps, while all write tensors: the headers of their files, and all that is small. */
static void *mt_saver_begin(void *context) {
    mt_saver *s = context;
    int status = 0;
    for (int64_t i = 0; i < s->num_sets && status == 0; i++)
        status = mt_saved_begin(&s->sets[i], s->temporary, false, &s->work_error);
    if (status == 0) status = mt_saver_write_small(s, &s->work_error);
    return mt_saver_worked(s, status);
}

/* Rank 0's sums become those of what all ranks wrote. */
static void mt_saver_collect_sums(mt_saver *s) {
    const mt_group *world = &mt_model_grid(s->model)->world;
    for (int64_t i = 0; i < s->writer.sums.count; i++) {
        mt_file_checksums *file = &s->writer.sums.files[i];
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

/* Adds a file of the folder that has no sums yet. */
static int mt_checksums_add_file(const char *folder, const char *name, void *context) {
    mt_saver *s = context;
    int64_t bytes;
    if (mt_checksums_find(&s->writer.sums, name)) return 0;
    char *path = mt_path_join(folder, name);
    int descriptor = mt_file_open(path, &bytes, &s->work_error);
    free(path);
    if (descriptor < 0) return -1;
    mt_file_checksums *file = mt_checksums_append(&s->writer.sums, name, bytes);
    char *buffer = mt_malloc(MT_SUM_BLOCK);
    int status = 0;
    for (int64_t first = 0, n; first < bytes && status == 0; first += n) {
        n = mt_min(MT_SUM_BLOCK, bytes - first);
        status = mt_file_read_at(descriptor, buffer, n, first);
        if (status == 0) mt_checksums_add(file, first, buffer, n);
    }
    mt_checksums_finish(file);
    free(buffer);
    close(descriptor);
    return status == 0 ? 0
                       : mt_error_set(&s->work_error, "%s/%s: cannot be read again: %s", folder, name, strerror(errno));
}

static int mt_checksums_compare(const void *a, const void *b) {
    return strcmp(((const mt_file_checksums *)a)->name, ((const mt_file_checksums *)b)->name);
}

/* Rank 0's last steps: a folder that is whole and on disk takes its place, becomes the latest, and others go. */
static void *mt_saver_place(void *context) {
    mt_saver *s = context;
    mt_error *error = &s->work_error;
    char *place = mt_path_join(s->folder, s->name);
    int status = mt_folder_visit(s->temporary, mt_checksums_add_file, s);
    qsort(s->writer.sums.files, (size_t)s->writer.sums.count, sizeof *s->writer.sums.files, mt_checksums_compare);
    char *text = mt_checksums_print(&s->writer.sums);
    if (status == 0) status = mt_text_write(s->temporary, "checksums.json", text, error);
    if (status == 0) status = mt_folder_visit(s->temporary, mt_fsync_entry, error);
    if (status == 0) status = mt_file_sync(s->temporary, "--save", error);
    if (status == 0) status = mt_folder_place(s->temporary, place, error);
    if (status == 0) status = mt_checkpoint_publish(s->folder, s->name, s->state.iteration, error);
    if (status == 0) mt_checkpoint_retain(mt_model_options(s->model), s->folder, s->state.iteration);
    free(text);
    free(place);
    return mt_saver_worked(s, status);
}

/* Nothing is under way any more. */
static int mt_saver_end(mt_saver *s, int status) {
    mt_model_set_reader(s->model, NULL);
    if (status != 0 && mt_model_grid(s->model)->world.rank == 0) mt_folder_remove(s->temporary);
    if (status == 0) s->in_place = s->state.iteration;
    free(s->temporary);
    s->temporary = NULL;
    mt_checksums_free(&s->writer.sums);
    return status;
}

/* Begins what is rank 0's to do, in a thread. */
static void mt_saver_work(mt_saver *s, bool places, void *(*work)(void *)) {
    bool works = mt_model_grid(s->model)->world.rank == 0;
    s->places = places, s->worked = !works, s->work_status = 0;
    if (works && pthread_create(&s->worker, NULL, work, s) != 0) mt_die("cannot start a thread; raise ulimit -u");
}

/* Waits for the threads of this rank, and tells every rank what became of all of them. */
static int mt_saver_wait(mt_saver *s, mt_error *error) {
    mt_copies_wait(&s->writer);
    int status = mt_writer_wait(&s->writer, error);
    if (mt_model_grid(s->model)->world.rank == 0) pthread_join(s->worker, NULL);
    if (s->work_status != 0) status = s->work_status, *error = s->work_error;
    return mt_agree(&mt_model_grid(s->model)->world, status != 0, error);
}

/* Goes on from the threads' work, for which it waits: to the folder's place, and from there to the end. */
static int mt_saver_advance(mt_saver *s, mt_error *error) {
    int status = mt_saver_wait(s, error);
    if (status != 0 || s->places) return mt_saver_end(s, status);
    mt_saver_collect_sums(s);
    mt_saver_work(s, true, mt_saver_place);
    return 0;
}

int mt_saver_poll(mt_saver *s, mt_error *error) {
    if (!s || !s->temporary) return 0;
    pthread_mutex_lock(&s->lock);
    double busy = !s->worked || !mt_writer_is_done(&s->writer);
    pthread_mutex_unlock(&s->lock);
    mt_all_reduce_max(&mt_model_grid(s->model)->world, &busy, 1, MT_F64);
    return busy > 0 ? 0 : mt_saver_advance(s, error);
}

int64_t mt_saver_in_place(const mt_saver *s) {
    return s ? s->in_place : -1;
}

int mt_saver_finish(mt_saver *s, mt_error *error) {
    int status = 0;
    while (s && s->temporary && status == 0) status = mt_saver_advance(s, error);
    return status;
}

/* Hands on what this rank has of all sets. */
static void mt_saver_copy(mt_saver *s) {
    int64_t file = 0, largest;
    for (int64_t i = 0; i < s->num_sets; file += s->sets[i++].num_shards)
        mt_set_copy(&s->sets[i], s->model, &s->writer, file, &largest);
    if (s->async) mt_copies_begin(s->model, &s->writer);
    mt_writer_end(&s->writer);
}

/* Rank 0's folder, in which all ranks then make files. */
static int mt_saver_make_folder(mt_saver *s, mt_error *error) {
    if (mt_model_grid(s->model)->world.rank != 0) return 0;
    if (mt_checkpoint_prepare(s->model, s->folder, error) != 0) return -1;
    return mt_folder_create(s->temporary, "--save", error);
}

/* In the background nothing is waited for but a processor's copies, and a checkpoint before. */
int mt_saver_save(mt_saver *s, const mt_run_state *state, mt_error *error) {
    char temporary_name[128];
    mt_model *m = s->model;
    if (mt_saver_finish(s, error) != 0) return -1; // the one before
    s->state = *state;
    snprintf(s->name, sizeof s->name, "iter_%07lld", (long long)state->iteration);
    snprintf(temporary_name, sizeof temporary_name, "%s.tmp-%lld", s->name, (long long)getpid());
    mt_broadcast(&mt_model_grid(m)->world, temporary_name, sizeof temporary_name, 0);
    s->temporary = mt_path_join(s->folder, temporary_name);
    mt_writer_begin(&s->writer);
    int status = mt_agree(&mt_model_grid(m)->world, (mt_saver_make_folder(s, error)) != 0, error);
    if (status != 0) return mt_saver_end(s, status);
    for (int64_t i = 0; i < s->num_sets; i++)
        mt_saved_note(&s->sets[i], mt_model_grid(m)->world.rank == 0, &s->writer.sums);
    mt_saver_work(s, false, mt_saver_begin);
    if (!s->async) mt_writer_start(&s->writer, s->temporary); // which make room for what is copied next
    mt_saver_copy(s);
    if (s->async) mt_writer_start(&s->writer, s->temporary); // which wait for what is copied
    return s->async ? 0 : mt_saver_finish(s, error);
}

int mt_checkpoint_save(mt_model *m, const mt_run_state *state, const char *folder, mt_checkpoint_extra *extra,
                       void *context, mt_error *error) {
    mt_saver *s;
    mt_saver_open(&s, m, folder, extra, context, false);
    int status = mt_saver_save(s, state, error);
    mt_saver_close(s);
    return status;
}

int mt_safetensors_save_folder(mt_model *m, const char *folder, const char *stem, int64_t max_shard_bytes,
                               mt_error *error) {
    mt_saved_set set;
    mt_writer w;
    int64_t largest = 0;
    bool begins = mt_model_grid(m)->world.rank == 0;
    MT_CHECK(strcmp(stem, "model") == 0 || (strcmp(stem, "optimizer") == 0 && mt_model_get_plan(m)->train));
    mt_saved_plan(&set, m, stem, max_shard_bytes);
    mt_writer_open(&w, mt_model_ops(m), mt_ring_bytes(mt_set_copy(&set, m, NULL, 0, &largest), largest), false);
    mt_saved_note(&set, begins, &w.sums);
    int status =
        mt_agree(&mt_model_grid(m)->world, (begins ? mt_saved_begin(&set, folder, true, error) : 0) != 0, error);
    if (status == 0) {
        mt_writer_begin(&w);
        mt_writer_start(&w, folder);
        mt_set_copy(&set, m, &w, 0, &largest);
        mt_writer_end(&w);
        status = mt_agree(&mt_model_grid(m)->world, (mt_writer_wait(&w, error)) != 0, error);
    }
    mt_writer_close(&w);
    free(set.tensors);
    return status;
}
