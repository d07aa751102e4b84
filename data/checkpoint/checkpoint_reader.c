/* checkpoint_reader.c: reads files of tensors: each byte once for all ranks of a host, and checked against its sum. */
#include "checkpoint_reader.h"

#include "../base/direct.h"
#include "../base/file.h"
#include "../base/watchdog.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef MT_HAVE_MPI
#include <mpi.h>
#endif

static void mt_shared_memory_open(mt_shared_memory *shared, const mt_group *world, int64_t bytes) {
    *shared = (mt_shared_memory){.host = {.name = "host", .size = 1}};
#ifdef MT_HAVE_MPI
    if (world->size > 1) {
        MPI_Comm *comm = mt_malloc(sizeof *comm);
        MPI_Comm_split_type(*(MPI_Comm *)world->comm, MPI_COMM_TYPE_SHARED, world->rank, MPI_INFO_NULL, comm);
        MPI_Comm_size(*comm, &shared->host.size);
        MPI_Comm_rank(*comm, &shared->host.rank);
        shared->host.comm = comm;
    }
    if (shared->host.size > 1) {
        MPI_Aint size;
        int unit;
        MPI_Win *window = mt_malloc(sizeof *window);
        MT_CHECK(MPI_Win_allocate_shared(shared->host.rank == 0 ? (MPI_Aint)bytes : 0, 1, MPI_INFO_NULL,
                                         *(MPI_Comm *)shared->host.comm, &shared->memory, window) == MPI_SUCCESS);
        MPI_Win_shared_query(*window, 0, &size, &unit, &shared->memory);
        MPI_Win_lock_all(MPI_MODE_NOCHECK, *window);
        shared->window = window;
    }
#else
    (void)world;
#endif
    if (shared->host.size == 1) shared->memory = mt_malloc(bytes);
}

static void mt_shared_memory_barrier(mt_shared_memory *shared) {
#ifdef MT_HAVE_MPI
    if (shared->window) MPI_Win_sync(*(MPI_Win *)shared->window);
    mt_barrier(&shared->host);
    if (shared->window) MPI_Win_sync(*(MPI_Win *)shared->window);
#else
    (void)shared;
#endif
}

static void mt_shared_memory_close(mt_shared_memory *shared) {
    if (shared->host.size == 1) free(shared->memory);
#ifdef MT_HAVE_MPI
    if (shared->window) {
        MPI_Win_unlock_all(*(MPI_Win *)shared->window);
        MPI_Win_free(shared->window);
    }
    if (shared->host.comm) MPI_Comm_free(shared->host.comm);
    free(shared->window);
    free(shared->host.comm);
#endif
}

static void mt_segment_slots_init(mt_segment_slots *slots) {
    pthread_mutexattr_t lock;
    pthread_condattr_t changed;
    memset(slots, 0, sizeof *slots);
    pthread_mutexattr_init(&lock);
    pthread_condattr_init(&changed);
    pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&slots->lock, &lock);
    pthread_cond_init(&slots->changed, &changed);
    pthread_mutexattr_destroy(&lock);
    pthread_condattr_destroy(&changed);
}

void mt_reader_open(mt_reader *r, mt_model *m, const mt_checksums *sums) {
    const int64_t bytes = 2 * MT_DIRECT + (int64_t)MT_SLOTS * MT_SEGMENT;
    _Static_assert(sizeof(mt_segment_slots) <= MT_DIRECT && MT_SEGMENT % MT_SUM_BLOCK == 0,
                   "layout of the shared memory");
    *r = (mt_reader){.model = m, .sums = sums, .descriptor = -1, .direct = -1};
    r->staged = mt_malloc(MT_STAGED * 4), r->staged_half = mt_malloc(MT_STAGED * 2);
    r->decoded = mt_malloc(MT_STAGED * 4);
    for (int code = 0; code < 256; code++) r->f8_values[code] = mt_f8_to_f32((uint8_t)code, MT_F8_E4M3);
    mt_shared_memory_open(&r->shared, &mt_model_grid(m)->world, bytes);
    r->slots = (mt_segment_slots *)mt_align_direct(r->shared.memory); // mapped by pages: the same offset on every rank
    r->window = (char *)r->slots + MT_DIRECT;
    if (r->shared.host.rank == 0) mt_segment_slots_init(r->slots);
    mt_shared_memory_barrier(&r->shared);
}

void mt_reader_close(mt_reader *r) {
    for (int i = 0; i < MT_SPARES; i++) free(r->spare[i]);
    free(r->staged);
    free(r->staged_half);
    free(r->decoded);
    mt_shared_memory_barrier(&r->shared);
    if (r->shared.host.rank == 0) {
        pthread_mutex_destroy(&r->slots->lock);
        pthread_cond_destroy(&r->slots->changed);
    }
    mt_shared_memory_close(&r->shared);
}

static void mt_reader_fail(mt_reader *r, const mt_error *error, bool damaged) {
    pthread_mutex_lock(&r->slots->lock);
    if (r->status == 0) r->status = -1, r->error = *error;
    r->damaged = r->damaged || damaged;
    pthread_mutex_unlock(&r->slots->lock);
}

/* Takes on the next segment of the file once its slot is free; -1 at the end. */
static int64_t mt_reader_claim(mt_reader *r) {
    mt_segment_slots *slots = r->slots;
    int64_t count = mt_divide_up(r->file->bytes, MT_SEGMENT);
    pthread_mutex_lock(&slots->lock);
    while (slots->claimed < count && slots->uses[slots->claimed % MT_SLOTS] != slots->claimed / MT_SLOTS)
        pthread_cond_wait(&slots->changed, &slots->lock);
    int64_t i = slots->claimed < count ? slots->claimed++ : -1;
    pthread_mutex_unlock(&slots->lock);
    return i;
}

/* Reads bytes [offset, offset + bytes) of the file to aligned memory, in whole pages if possible. */
static int mt_reader_read(const mt_reader *r, char *to, int64_t offset, int64_t bytes) {
    ssize_t got = -1;
    if (r->direct >= 0) got = pread(r->direct, to, (size_t)(mt_divide_up(bytes, MT_DIRECT) * MT_DIRECT), offset);
    int64_t done = mt_max(got, 0);
    return done >= bytes ? 0 : mt_file_read_at(r->descriptor, to + done, bytes - done, offset + done);
}

/* Reads segment i into its slot, through the memory `own` unless that is NULL, and checks its blocks. */
static void mt_reader_fill(mt_reader *r, int64_t i, char *own) {
    int64_t offset = i * MT_SEGMENT, bytes = mt_min(MT_SEGMENT, r->file->bytes - offset);
    char *slot = r->window + i % MT_SLOTS * MT_SEGMENT;
    const char *from = own ? own : slot;
    mt_error error;
    int watched = mt_watch_file_begin(r->file->path, MT_FILE_READ);
    int status = mt_reader_read(r, own ? own : slot, offset, bytes);
    mt_watch_file_end(watched);
    if (status != 0) {
        mt_file_read_error(&error, r->file->path);
        mt_reader_fail(r, &error, false);
        return;
    }
    for (int64_t first = 0; first < bytes; first += MT_SUM_BLOCK) {
        int64_t block = (offset + first) / MT_SUM_BLOCK, n = mt_min(MT_SUM_BLOCK, bytes - first);
        if (own) memcpy(slot + first, own + first, (size_t)n);
        if (!r->file_sums) continue;
        if (block < r->file_sums->count && mt_crc32c(from + first, n) == r->file_sums->sums[block]) continue;
        char *folder = mt_strdup(r->file->path), *slash = strrchr(folder, '/');
        if (slash) *slash = 0;
        mt_checksums_damaged(&error, folder, r->file_sums->name, block, r->file->bytes);
        mt_reader_fail(r, &error, true);
        free(folder);
        return;
    }
}

/* A thread: reads segments to the end of the file. A segment that cannot be read is announced too, so that no rank
 * waits for it. Memory that processes share has small pages, which a direct read fills one by one: slower than to read
 * into own memory and copy. */
static void *mt_reader_run(void *context) {
    mt_reader *r = context;
    char *own = r->shared.host.size > 1 ? mt_cpu_ops.memory_alloc(MT_SEGMENT) : NULL;
    for (int64_t i; (i = mt_reader_claim(r)) >= 0;) {
        if (r->descriptor >= 0) mt_reader_fill(r, i, own);
        pthread_mutex_lock(&r->slots->lock);
        r->slots->ready[i % MT_SLOTS] = i + 1;
        pthread_cond_broadcast(&r->slots->changed);
        pthread_mutex_unlock(&r->slots->lock);
    }
    if (own) mt_cpu_ops.memory_free(own);
    return NULL;
}

const char *mt_reader_get(mt_reader *r, int64_t i) {
    mt_watch_begin("reading a checkpoint", r->shared.host.name);
    pthread_mutex_lock(&r->slots->lock);
    while (r->slots->ready[i % MT_SLOTS] != i + 1) pthread_cond_wait(&r->slots->changed, &r->slots->lock);
    pthread_mutex_unlock(&r->slots->lock);
    mt_watch_end();
    return r->window + i % MT_SLOTS * MT_SEGMENT;
}

void mt_reader_give_back(mt_reader *r, int64_t i) {
    mt_segment_slots *slots = r->slots;
    int64_t slot = i % MT_SLOTS;
    pthread_mutex_lock(&slots->lock);
    if (++slots->taken[slot] == r->shared.host.size) {
        slots->taken[slot] = 0, slots->uses[slot]++;
        pthread_cond_broadcast(&slots->changed);
    }
    pthread_mutex_unlock(&slots->lock);
}

int mt_reader_begin(mt_reader *r, const mt_safetensors_file *file, pthread_t threads[MT_READERS]) {
    const char *slash = strrchr(file->path, '/');
    int count = (int)mt_max(MT_READERS / r->shared.host.size, 1);
    int64_t bytes;
    mt_error error;
    r->file = file;
    r->file_sums = r->sums ? mt_checksums_find(r->sums, slash ? slash + 1 : file->path) : NULL;
    r->descriptor = mt_file_open(file->path, &bytes, &error);
    r->direct = r->descriptor >= 0 ? mt_open_direct(file->path, O_RDONLY) : -1;
    if (r->descriptor < 0) mt_reader_fail(r, &error, false);
    mt_shared_memory_barrier(&r->shared); // all ranks are done with the file before
    if (r->shared.host.rank == 0) {
        mt_segment_slots *slots = r->slots;
        slots->claimed = 0;
        memset(slots->ready, 0, sizeof slots->ready);
        memset(slots->taken, 0, sizeof slots->taken);
        memset(slots->uses, 0, sizeof slots->uses);
    }
    mt_shared_memory_barrier(&r->shared);
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, mt_reader_run, r) != 0) mt_die("cannot start a thread; raise ulimit -u");
    return count;
}

float *mt_reader_borrow(mt_reader *r, int64_t bytes) {
    for (int i = 0; i < MT_SPARES; i++)
        if (r->spare[i] && r->spare_bytes[i] == bytes) {
            float *memory = r->spare[i];
            r->spare[i] = NULL;
            return memory;
        }
    return mt_malloc(bytes);
}

void mt_reader_return(mt_reader *r, float *memory, int64_t bytes) {
    int at = r->next_spare++ % MT_SPARES;
    for (int i = 0; i < MT_SPARES; i++)
        if (!r->spare[i]) at = i;
    free(r->spare[at]);
    r->spare[at] = memory, r->spare_bytes[at] = bytes;
}
