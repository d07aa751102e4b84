/* checkpoint_reader.h: reads files of tensors: each byte once for all ranks of a host, and checked against its sum. */
#ifndef MT_CHECKPOINT_READER_H
#define MT_CHECKPOINT_READER_H

#include "../base/safetensors.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Files are read in segments, through slots of memory that all ranks of a host share. Any free thread of any rank reads
 * the next segment; its slot is free again when every rank has copied its part. Waiting threads sleep: cores may be
 * fewer than ranks and threads. MT_STAGED: elements of a conversion buffer. MT_SPARES: kept buffers. */
enum { MT_SEGMENT = 2 << 20, MT_SLOTS = 12, MT_READERS = 4, MT_STAGED = 1 << 18, MT_SPARES = 8 };

/* At the start of the shared memory. */
typedef struct mt_segment_slots {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t claimed;         // segments of the file that threads have taken on
    int64_t ready[MT_SLOTS]; // 1 + the segment in the slot
    int64_t taken[MT_SLOTS]; // ranks that are done with it
    int64_t uses[MT_SLOTS];  // segments that all ranks are done with
} mt_segment_slots;

/* Memory that all ranks of one host share, on the CPU; `host` is their group. Every rank of `world` calls these; writes
 * before a barrier are seen by all ranks after it. */
typedef struct mt_shared_memory {
    mt_group host;
    char *memory; // [bytes]
    void *window; // of MPI; NULL for one rank
} mt_shared_memory;

typedef struct mt_reader {
    mt_model *model;
    const mt_checksums *sums;  // NULL: nothing is checked
    const int64_t *block_size; // [2] rows, columns per scale of tensors in fp8
    mt_shared_memory shared;   // slots, then window
    mt_segment_slots *slots;
    char *window;            // [MT_SLOTS, MT_SEGMENT]
    float *spare[MT_SPARES]; // buffers for transposed tensors
    int64_t spare_bytes[MT_SPARES];
    unsigned next_spare;
    float *staged; // [MT_STAGED] converted elements, and in bf16 or fp16
    uint16_t *staged_half;
    float *decoded;       // [MT_STAGED] elements of a tensor in fp8
    float f8_values[256]; // of the codes of e4m3
    const mt_safetensors_file *file;
    const mt_file_checksums *file_sums;
    int descriptor, direct; // direct: past the page cache, or -1
    int status;             // under the slots' lock, like the next two
    bool damaged;           // a sum differs
    mt_error error;
} mt_reader;

/* Prepares for the files of a folder; its checksums `sums` may be NULL. Every rank calls it. */
void mt_reader_open(mt_reader *r, mt_model *m, const mt_checksums *sums);

/* Frees the memory of a reader. Every rank calls it. */
void mt_reader_close(mt_reader *r);

/* Waits for segment i, which any rank may read; the watchdog reports a wait that does not end. */
const char *mt_reader_get(mt_reader *r, int64_t i);

/* This rank is done with segment i. */
void mt_reader_give_back(mt_reader *r, int64_t i);

/* Begins a file: empties the slots and starts threads; returns their number. */
int mt_reader_begin(mt_reader *r, const mt_safetensors_file *file, pthread_t threads[MT_READERS]);

/* A buffer for a transposed tensor: a kept one of this size, as touching new pages costs more than filling it. */
float *mt_reader_borrow(mt_reader *r, int64_t bytes);

/* Keeps a buffer, instead of the oldest if there are MT_SPARES. */
void mt_reader_return(mt_reader *r, float *memory, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
