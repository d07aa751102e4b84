/* comm.cu: the collectives and channels of megatron.c on GPUs through NCCL, and mailboxes without NCCL. The first rank
 * of a group creates a communicator id and broadcasts it through MPI. NCCL operations are enqueued on a stream like
 * kernels. The host waits only in mt_cuda_comm_wait, which also detects errors of other ranks. */
#include "cuda.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef MT_HAVE_NCCL
#include <nccl.h>

static void mt_nccl_check(ncclResult_t status, const char *call, const mt_group *group, const char *file, int line) {
    if (status == ncclSuccess) return;
    mt_die("NCCL: %s at %s:%d in group %s on its rank %d: %s: %s", call, file, line, group->name, group->rank,
           ncclGetErrorString(status), ncclGetLastError(NULL));
}
#define MT_NCCL(group, call) mt_nccl_check((call), #call, group, __FILE__, __LINE__)

/* ---- communicators, and waiting for them ------------------------------------------------------------------------- */

/* All communicators ever created. Groups with the same members, of one grid or several, share one; a channel has its
 * own. A closed one is reused for the next group, or the next channel, with the same members, because creating one
 * takes NCCL most of a second. All its ranks open and close communicators in the same order, so they agree which one to
 * reuse; each closes independently, at any time. */
typedef struct mt_comm_record {
    ncclComm_t comm;
    mt_group group;     // a copy, for messages: the group may end before the others that share this
    int users;          // 0: closed
    bool shared;        // by groups; false: a channel's
    int *members, size; // world ranks; NULL: not reusable by another group
} mt_comm_record;
static mt_comm_record *mt_comms;
static int mt_num_comms, mt_num_open;

/* Opens a closed or, if `shares`, a shared communicator of these members for the group; NULL if there is none. */
static ncclComm_t mt_comm_reopen(const int *members, int size, const mt_group *group, bool shares) {
    for (int i = 0; members && i < mt_num_comms; i++) {
        mt_comm_record *record = &mt_comms[i];
        if (record->size != size || !record->members || record->shared != shares) continue;
        if (record->users > 0 && !shares) continue;
        if (memcmp(record->members, members, (size_t)size * sizeof *members) != 0) continue;
        if (record->users++ == 0) record->group = *group;
        mt_num_open++;
        return record->comm;
    }
    return NULL;
}

/* Thread blocks of a channel's kernel, in pipelines and in rings of context ranks. A posted receive occupies their
 * multiprocessors until its message comes, and each needs 12 MiB of device memory; NCCL's default between two GPUs of a
 * host is 32. */
enum { CHANNEL_BLOCKS = 4 };

static ncclComm_t mt_comm_open(const ncclUniqueId *id, const int *members, int size, int rank, const mt_group *group,
                               bool shares) {
    mt_comm_record record = {.group = *group, .users = 1, .shared = shares, .size = size};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (!shares) config.maxCTAs = CHANNEL_BLOCKS;
    mt_watch_begin("opening a communicator", group->name);
    MT_NCCL(group, ncclCommInitRankConfig(&record.comm, size, *id, rank, &config));
    mt_watch_end();
    if (members) {
        record.members = (int *)mt_malloc(size * (int64_t)sizeof *members);
        memcpy(record.members, members, (size_t)size * sizeof *members);
    }
    mt_comms = (mt_comm_record *)mt_realloc(mt_comms, (mt_num_comms + 1) * (int64_t)sizeof *mt_comms);
    mt_comms[mt_num_comms++] = record;
    mt_num_open++;
    return record.comm;
}

static void mt_comm_close(ncclComm_t comm) {
    int i = 0;
    while (mt_comms[i].comm != comm) i++;
    mt_comms[i].users--;
    mt_num_open--;
}

extern "C" int mt_cuda_group_open(mt_group *group, mt_error *error) {
    if (group->size == 1) return 0;
    if (!group->comm)
        return mt_error_set(error, "group %s has no MPI communicator, through which NCCL starts", group->name);
    group->nccl = mt_comm_reopen(group->members, group->size, group, true);
    if (group->nccl) return 0;
    ncclUniqueId id;
    if (group->rank == 0) MT_NCCL(group, ncclGetUniqueId(&id));
    mt_broadcast(group, &id, sizeof id, 0);
    group->nccl = mt_comm_open(&id, group->members, group->size, group->rank, group, true);
    return 0;
}

extern "C" void mt_cuda_group_close(mt_group *group) {
    if (group->nccl) mt_comm_close((ncclComm_t)group->nccl);
    group->nccl = NULL;
}

/* Destroys them in order of creation: NCCL may wait for the other ranks. */
extern "C" void mt_cuda_groups_end(void) {
    mt_group nobody = {};
    nobody.name = "(closed)";
    if (mt_num_open > 0) return; // after an error other ranks may not close theirs
    for (int i = 0; i < mt_num_comms; i++) {
        mt_watch_begin("closing a communicator", nobody.name);
        MT_NCCL(&nobody, ncclCommDestroy(mt_comms[i].comm));
        mt_watch_end();
        free(mt_comms[i].members);
    }
    free(mt_comms);
    mt_comms = NULL;
    mt_num_comms = 0;
}

/* When a peer fails, kernels here never end; NCCL reports it as an asynchronous error. */
static void mt_comms_check(void) {
    for (int i = 0; i < mt_num_comms; i++) {
        ncclResult_t state = ncclSuccess;
        const mt_group *group = &mt_comms[i].group;
        if (mt_comms[i].users == 0) continue;
        MT_NCCL(group, ncclCommGetAsyncError(mt_comms[i].comm, &state));
        if (state != ncclInProgress) mt_nccl_check(state, "an earlier operation", group, __FILE__, __LINE__);
    }
}

bool mt_cuda_comm_is_open(void) {
    return mt_num_open > 0;
}

/* Polls query() until it reports completion on the device. */
template <class Query> static void mt_comm_wait(const char *operation, const char *group, Query query) {
    double checked = mt_time();
    mt_watch_begin(operation, group);
    for (;;) {
        cudaError_t status = query();
        if (status == cudaSuccess) break;
        if (status != cudaErrorNotReady) MT_CUDA(status);
        if (mt_time() - checked < 0.01) continue;
        mt_comms_check();
        checked = mt_time();
    }
    mt_watch_end();
}

void mt_cuda_comm_wait(cudaStream_t stream) {
    mt_comm_wait("the GPU", NULL, [stream] { return cudaStreamQuery(stream); });
}

static ncclComm_t mt_comm(const mt_group *group) {
    MT_CHECK(group->nccl); // created by mt_backend_open
    return (ncclComm_t)group->nccl;
}

static ncclDataType_t mt_nccl_type(mt_dtype dtype) {
    MT_CHECK(dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16 || dtype == MT_F64);
    return dtype == MT_F32    ? ncclFloat32
           : dtype == MT_BF16 ? ncclBfloat16
           : dtype == MT_F16  ? ncclFloat16
                              : ncclFloat64;
}
#else
extern "C" int mt_cuda_group_open(mt_group *group, mt_error *error) {
    return mt_error_set(error, "group %s: this build has no NCCL", group->name);
}

extern "C" void mt_cuda_group_close(mt_group *group) {
    group->nccl = NULL;
}

extern "C" void mt_cuda_groups_end(void) {
}

bool mt_cuda_comm_is_open(void) {
    return false;
}

void mt_cuda_comm_wait(cudaStream_t stream) {
    MT_CUDA(cudaStreamSynchronize(stream));
}
#endif

/* ---- collectives ------------------------------------------------------------------------------------------------- */

/* A group of one rank: copies `in` to `out`. */
static void mt_copy_alone(void *out, const void *in, int64_t bytes, mt_stream *stream) {
    if (out == in || bytes == 0) return;
    MT_CUDA(cudaMemcpyAsync(out, in, (size_t)bytes, cudaMemcpyDeviceToDevice, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype,
                                   const mt_group *group, mt_stream *stream) {
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_NCCL
    mt_watch_note("all_reduce", group->name);
    MT_NCCL(group, ncclAllReduce(buffer, buffer, (size_t)count, mt_nccl_type(dtype),
                                 reduction == MT_SUM ? ncclSum : ncclMax, mt_comm(group), mt_cuda_stream(stream)));
#endif
}

extern "C" void mt_cuda_all_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                   mt_stream *stream) {
    int64_t bytes = count * mt_dtype_size(dtype);
    if (group->size == 1) mt_copy_alone(out, in, bytes, stream);
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_NCCL
    mt_watch_note("all_gather", group->name);
    MT_NCCL(group, ncclAllGather(in, out, (size_t)bytes, ncclInt8, mt_comm(group), mt_cuda_stream(stream)));
#endif
}

extern "C" void mt_cuda_reduce_scatter(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                       mt_stream *stream) {
    if (group->size == 1) mt_copy_alone(out, in, count * mt_dtype_size(dtype), stream);
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_NCCL
    mt_watch_note("reduce_scatter", group->name);
    MT_NCCL(group, ncclReduceScatter(in, out, (size_t)count, mt_nccl_type(dtype), ncclSum, mt_comm(group),
                                     mt_cuda_stream(stream)));
#endif
}

extern "C" void mt_cuda_reduce(void *out, const void *in, int64_t count, mt_dtype dtype, int root,
                               const mt_group *group, mt_stream *stream) {
    if (group->size == 1) mt_copy_alone(out, in, count * mt_dtype_size(dtype), stream);
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_NCCL
    mt_watch_note("reduce", group->name);
    MT_NCCL(group, ncclReduce(in, out, (size_t)count, mt_nccl_type(dtype), ncclSum, root, mt_comm(group),
                              mt_cuda_stream(stream)));
#else
    (void)root;
#endif
}

extern "C" void mt_cuda_all_to_all_v(void *out, const int64_t *out_counts, const void *in, const int64_t *in_counts,
                                     mt_dtype dtype, const mt_group *group, mt_stream *stream) {
    int64_t width = mt_dtype_size(dtype);
    if (group->size == 1) {
        mt_copy_alone(out, in, in_counts[0] * width, stream);
        return;
    }
#ifdef MT_HAVE_NCCL
    const char *from = (const char *)in;
    char *to = (char *)out;
    mt_watch_note("all_to_all", group->name);
    MT_NCCL(group, ncclGroupStart());
    for (int rank = 0; rank < group->size; rank++) {
        size_t sent = (size_t)(in_counts[rank] * width), received = (size_t)(out_counts[rank] * width);
        if (sent) MT_NCCL(group, ncclSend(from, sent, ncclInt8, rank, mt_comm(group), mt_cuda_stream(stream)));
        if (received) MT_NCCL(group, ncclRecv(to, received, ncclInt8, rank, mt_comm(group), mt_cuda_stream(stream)));
        from += sent, to += received;
    }
    MT_NCCL(group, ncclGroupEnd());
#else
    (void)out_counts;
#endif
}

extern "C" void mt_cuda_all_to_all(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                   mt_stream *stream) {
    int64_t bytes = count * mt_dtype_size(dtype);
    if (group->size == 1) mt_copy_alone(out, in, bytes, stream);
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_NCCL
    mt_watch_note("all_to_all", group->name);
    MT_NCCL(group, ncclGroupStart());
    for (int rank = 0; rank < group->size; rank++) {
        cudaStream_t on = mt_cuda_stream(stream);
        MT_NCCL(group, ncclSend((const char *)in + rank * bytes, (size_t)bytes, ncclInt8, rank, mt_comm(group), on));
        MT_NCCL(group, ncclRecv((char *)out + rank * bytes, (size_t)bytes, ncclInt8, rank, mt_comm(group), on));
    }
    MT_NCCL(group, ncclGroupEnd());
#endif
}

extern "C" void mt_cuda_broadcast(void *buffer, int64_t count, mt_dtype dtype, int root, const mt_group *group,
                                  mt_stream *stream) {
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_NCCL
    mt_watch_note("broadcast", group->name);
    MT_NCCL(group, ncclBroadcast(buffer, buffer, (size_t)(count * mt_dtype_size(dtype)), ncclInt8, root, mt_comm(group),
                                 mt_cuda_stream(stream)));
#else
    (void)buffer, (void)dtype, (void)root, (void)stream;
#endif
}

/* A wait uses the event as last recorded before the wait was enqueued, so one event per stream can be reused. */
static void mt_wait_event(cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
    MT_CUDA(cudaEventRecord(event, other));
    MT_CUDA(cudaStreamWaitEvent(stream, event, 0));
}

extern "C" void mt_cuda_stream_wait_stream(mt_stream *stream, mt_stream *other) {
    MT_CHECK(stream && other);
    if (stream == other) return;
    mt_wait_event(stream->stream, other->stream, other->wait_event);
}

/* ---- channels ---------------------------------------------------------------------------------------------------- */

#ifdef MT_HAVE_NCCL
/* Messages from one rank to another. Each channel has its own communicator and stream, so that no other operation
 * delays a message. */
typedef struct mt_cuda_channel {
    mt_channel head;
    ncclComm_t comm;
    cudaStream_t stream;
    mt_stream timed;                      // wraps `stream`, for head.stream
    cudaEvent_t ready;                    // recorded on the caller's stream when a message is enqueued
    cudaEvent_t done[MT_CHANNEL_TICKETS]; // ticket i uses entry i % MT_CHANNEL_TICKETS
    struct mt_cuda_channel *next;         // in the list of open channels
} mt_cuda_channel;
static mt_cuda_channel *mt_open_channels;

bool mt_cuda_messages_pending(void) {
    for (const mt_cuda_channel *channel = mt_open_channels; channel; channel = channel->next) {
        if (channel->head.next == 0 || strcmp(channel->head.group->name, "pipeline") != 0) continue;
        cudaError_t status = cudaEventQuery(channel->done[(channel->head.next - 1) % MT_CHANNEL_TICKETS]);
        if (status == cudaSuccess) continue;
        if (status != cudaErrorNotReady) MT_CUDA(status);
        cudaGetLastError(); // not an error
        return true;
    }
    return false;
}

/* NCCL connects two ranks when their first message is enqueued, and blocks the host until the peer does the same.
 * Sending one byte here connects them while both ranks are in this function. Later, a receive is enqueued long before
 * its sender reaches the send. */
static void mt_channel_connect(mt_cuda_channel *channel) {
    const mt_group *group = channel->head.group;
    void *byte;
    MT_CUDA(cudaMalloc(&byte, 1));
    if (group->rank == channel->head.from)
        MT_NCCL(group, ncclSend(byte, 1, ncclInt8, 1, channel->comm, channel->stream));
    else
        MT_NCCL(group, ncclRecv(byte, 1, ncclInt8, 0, channel->comm, channel->stream));
    mt_cuda_comm_wait(channel->stream);
    MT_CUDA(cudaFree(byte));
}

extern "C" mt_channel *mt_cuda_channel_open(const mt_group *group, int from, int to, int id) {
    MT_CHECK(from != to && from < group->size && to < group->size && id >= 0);
    if (group->rank != from && group->rank != to) return NULL;
    mt_cuda_channel *channel = (mt_cuda_channel *)mt_calloc(sizeof *channel);
    channel->head = {.group = group, .from = from, .to = to, .id = id};
    const int members[] = {group->members ? group->members[from] : 0, group->members ? group->members[to] : 0};
    channel->comm = mt_comm_reopen(group->members ? members : NULL, 2, group, false);
    if (!channel->comm) {
        ncclUniqueId unique;
        if (group->rank == from) {
            MT_NCCL(group, ncclGetUniqueId(&unique));
            mt_send(group, &unique, sizeof unique, to);
        } else
            mt_receive(group, &unique, sizeof unique, from);
        channel->comm = mt_comm_open(&unique, group->members ? members : NULL, 2, group->rank == to, group, false);
    }
    int least, greatest; // messages take precedence over queued kernels
    MT_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    MT_CUDA(cudaStreamCreateWithPriority(&channel->stream, cudaStreamNonBlocking, greatest));
    channel->timed.stream = channel->stream;
    channel->head.stream = &channel->timed;
    MT_CUDA(cudaEventCreateWithFlags(&channel->ready, cudaEventDisableTiming));
    for (cudaEvent_t &event : channel->done) MT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    mt_channel_connect(channel);
    channel->next = mt_open_channels;
    mt_open_channels = channel;
    return &channel->head;
}

/* Takes the next ticket, waits until its entry is free, and makes the channel's stream wait for the caller's stream. */
static int64_t mt_channel_begin(mt_channel *head, int64_t bytes, const char *operation, mt_stream *stream) {
    mt_cuda_channel *channel = (mt_cuda_channel *)head;
    int64_t ticket = head->next++, place = ticket % MT_CHANNEL_TICKETS;
    cudaEvent_t oldest = channel->done[place];
    if (ticket >= MT_CHANNEL_TICKETS)
        mt_comm_wait(operation, head->group->name, [oldest] { return cudaEventQuery(oldest); });
    head->bytes[place] = bytes;
    mt_wait_event(channel->stream, mt_cuda_stream(stream), channel->ready);
    mt_watch_note(operation, head->group->name);
    return ticket;
}

extern "C" int64_t mt_cuda_channel_send(mt_channel *head, const void *buffer, int64_t count, mt_dtype dtype,
                                        mt_stream *stream) {
    mt_cuda_channel *channel = (mt_cuda_channel *)head;
    MT_CHECK(head->group->rank == head->from);
    int64_t bytes = count * mt_dtype_size(dtype), ticket = mt_channel_begin(head, bytes, "channel_send", stream);
    if (bytes > 0) MT_NCCL(head->group, ncclSend(buffer, (size_t)bytes, ncclInt8, 1, channel->comm, channel->stream));
    MT_CUDA(cudaEventRecord(channel->done[ticket % MT_CHANNEL_TICKETS], channel->stream));
    return ticket;
}

extern "C" int64_t mt_cuda_channel_recv(mt_channel *head, void *buffer, int64_t count, mt_dtype dtype,
                                        mt_stream *stream) {
    mt_cuda_channel *channel = (mt_cuda_channel *)head;
    MT_CHECK(head->group->rank == head->to);
    int64_t bytes = count * mt_dtype_size(dtype), ticket = mt_channel_begin(head, bytes, "channel_recv", stream);
    if (bytes > 0) MT_NCCL(head->group, ncclRecv(buffer, (size_t)bytes, ncclInt8, 0, channel->comm, channel->stream));
    MT_CUDA(cudaEventRecord(channel->done[ticket % MT_CHANNEL_TICKETS], channel->stream));
    return ticket;
}

extern "C" void mt_cuda_channel_wait(mt_channel *head, int64_t ticket, mt_stream *stream) {
    MT_CHECK(ticket >= 0 && ticket < head->next);
    if (ticket + MT_CHANNEL_TICKETS < head->next) return; // its entry was reused, and that waited for it
    cudaEvent_t done = ((mt_cuda_channel *)head)->done[ticket % MT_CHANNEL_TICKETS];
    MT_CUDA(cudaStreamWaitEvent(mt_cuda_stream(stream), done, 0));
}

extern "C" void mt_cuda_channel_close(mt_channel *head) {
    if (!head) return;
    mt_cuda_channel *channel = (mt_cuda_channel *)head, **at = &mt_open_channels;
    while (*at != channel) at = &(*at)->next;
    *at = channel->next;
    mt_cuda_comm_wait(channel->stream);
    mt_comm_close(channel->comm);
    for (cudaEvent_t event : channel->done) MT_CUDA(cudaEventDestroy(event));
    MT_CUDA(cudaEventDestroy(channel->ready));
    MT_CUDA(cudaStreamDestroy(channel->stream));
    free(channel);
}
#else
bool mt_cuda_messages_pending(void) {
    return false;
}

/* Without NCCL no group has two ranks, so there is no pair to connect. */
extern "C" mt_channel *mt_cuda_channel_open(const mt_group *group, int, int, int) {
    MT_CHECK(group->size > 1);
    return NULL;
}

extern "C" int64_t mt_cuda_channel_send(mt_channel *, const void *, int64_t, mt_dtype, mt_stream *) {
    mt_die("a channel needs NCCL, which this build does not have");
}

extern "C" int64_t mt_cuda_channel_recv(mt_channel *, void *, int64_t, mt_dtype, mt_stream *) {
    mt_die("a channel needs NCCL, which this build does not have");
}

extern "C" void mt_cuda_channel_wait(mt_channel *, int64_t, mt_stream *) {
    mt_die("a channel needs NCCL, which this build does not have");
}

extern "C" void mt_cuda_channel_close(mt_channel *channel) {
    MT_CHECK(!channel);
}
#endif

/* ---- mailboxes --------------------------------------------------------------------------------------------------- */

/* Each rank maps the memory of all other ranks; its stream copies to them with the copy engines. Two counters per peer,
 * at the end of the mailbox, order the copies: `ready` counts how often this mailbox has been free for the peer's data,
 * `arrived` counts how often the data has arrived. The peers write the counters and this rank's streams wait for them;
 * no kernel is involved. */
struct mt_cuda_mailbox {
    mt_mailbox head;
    void *mapped[MT_MAILBOX_RANKS]; // base of the mapping here; NULL for this rank
    char *memory[MT_MAILBOX_RANKS]; // the mailbox of each rank
    uint32_t sent[MT_MAILBOX_RANKS], received[MT_MAILBOX_RANKS];
};

/* Sent by each rank to the others. */
struct mt_mailbox_export {
    cudaIpcMemHandle_t handle;
    int64_t offset; // of the mailbox in its allocation
    char host[128];
    bool good;
};

/* A driver function, looked up at run time so that programs need not link to the driver. */
template <class Function> static Function mt_driver_function(const char *name) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    MT_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
    MT_CHECK(found == cudaDriverEntryPointSuccess && function);
    return (Function)function;
}

static void mt_driver_check(CUresult status, const char *call, const mt_group *group) {
    if (status == CUDA_SUCCESS) return;
    mt_die("CUDA: %s in group %s on its rank %d: error %d", call, group->name, group->rank, (int)status);
}

static mt_mailbox_export mt_mailbox_describe(void *memory) {
    static CUresult (*range)(CUdeviceptr *, size_t *, CUdeviceptr);
    if (!range) range = mt_driver_function<decltype(range)>("cuMemGetAddressRange");
    mt_mailbox_export own = {};
    CUdeviceptr base = 0;
    size_t bytes = 0;
    gethostname(own.host, sizeof own.host - 1);
    own.good = range(&base, &bytes, (CUdeviceptr)memory) == CUDA_SUCCESS &&
               cudaIpcGetMemHandle(&own.handle, (void *)base) == cudaSuccess;
    own.offset = (int64_t)((CUdeviceptr)memory - base);
    return own;
}

/* Maps the memory of rank r. */
static int mt_mailbox_map(mt_cuda_mailbox *mailbox, int r, const mt_mailbox_export *theirs, const char *host,
                          mt_error *error) {
    const mt_group *group = mailbox->head.group;
    if (strcmp(theirs->host, host) != 0)
        return mt_error_set(error, "rank %d of the %s group is on host %s and rank %d on %s", group->rank, group->name,
                            host, r, theirs->host);
    cudaError_t status = cudaErrorNotSupported;
    if (theirs->good)
        status = cudaIpcOpenMemHandle(&mailbox->mapped[r], theirs->handle, cudaIpcMemLazyEnablePeerAccess);
    if (status != cudaSuccess) {
        cudaGetLastError();
        mailbox->mapped[r] = NULL;
        return mt_error_set(error, "the GPU of rank %d of the %s group cannot access the memory of rank %d: %s",
                            group->rank, group->name, r, cudaGetErrorString(status));
    }
    mailbox->memory[r] = (char *)mailbox->mapped[r] + theirs->offset;
    return 0;
}

extern "C" int mt_cuda_mailbox_open(mt_mailbox **out, const mt_group *group, void *memory, int64_t bytes,
                                    mt_error *error) {
    *out = NULL;
    if (group->size > MT_MAILBOX_RANKS)
        return mt_error_set(error, "group %s has %d ranks; at most %d ranks can copy into each other's memory",
                            group->name, group->size, MT_MAILBOX_RANKS);
    mt_cuda_mailbox *mailbox = (mt_cuda_mailbox *)mt_calloc(sizeof *mailbox);
    mailbox->head = {group, (char *)memory, bytes};
    MT_CUDA(cudaMemset((char *)memory + bytes - MT_MAILBOX_OWN, 0, MT_MAILBOX_OWN));
    MT_CUDA(cudaDeviceSynchronize()); // before other ranks learn about this memory
    mt_mailbox_export own = mt_mailbox_describe(memory);
    int status = 0;
    for (int r = 0; r < group->size; r++) {
        mt_mailbox_export theirs = own;
        mt_broadcast(group, &theirs, sizeof theirs, r);
        if (r == group->rank)
            mailbox->memory[r] = (char *)memory;
        else if (status == 0)
            status = mt_mailbox_map(mailbox, r, &theirs, own.host, error);
    }
    *out = &mailbox->head;
    return status;
}

/* The counter that rank `of` writes in the mailbox of rank `owner`. */
static CUdeviceptr mt_mailbox_counter(const mt_cuda_mailbox *mailbox, int owner, int of, bool arrived) {
    int64_t own = mailbox->head.bytes - MT_MAILBOX_OWN;
    return (CUdeviceptr)(mailbox->memory[owner] + own + 4 * (arrived ? MT_MAILBOX_RANKS + of : of));
}

/* A stream wait returns when the counter is at least the value; writes enqueued before the counter's write are visible
 * then. */
extern "C" void mt_cuda_mailbox_exchange(const mt_mailbox_args *a, mt_dtype dtype, mt_stream *stream) {
    static CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    static CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    if (!write) write = mt_driver_function<decltype(write)>("cuStreamWriteValue32");
    if (!wait) wait = mt_driver_function<decltype(wait)>("cuStreamWaitValue32");
    mt_cuda_mailbox *mailbox = (mt_cuda_mailbox *)a->mailbox;
    const mt_group *group = a->mailbox->group;
    int rank = group->rank, to = a->to, from = a->from;
    int64_t width = mt_dtype_size(dtype);
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t last = a->first + (rank > from ? rank : from) * a->stride + a->count;
    MT_CHECK(to != rank && from != rank && last * width <= a->mailbox->bytes - MT_MAILBOX_OWN);
    mt_watch_note("mailbox_exchange", group->name);
    uint32_t sent = ++mailbox->sent[to], received = ++mailbox->received[from];
    const char *call = "stream memory operation";
    mt_driver_check(write(on, mt_mailbox_counter(mailbox, from, rank, false), received, 0), call, group);
    mt_driver_check(wait(on, mt_mailbox_counter(mailbox, rank, to, false), sent, CU_STREAM_WAIT_VALUE_GEQ), call,
                    group);
    MT_CUDA(cudaMemcpyAsync(mailbox->memory[to] + (a->first + rank * a->stride) * width, a->in,
                            (size_t)(a->count * width), cudaMemcpyDefault, on));
    mt_driver_check(write(on, mt_mailbox_counter(mailbox, to, rank, true), sent, 0), call, group);
    mt_driver_check(wait(on, mt_mailbox_counter(mailbox, rank, from, true), received, CU_STREAM_WAIT_VALUE_GEQ), call,
                    group);
}

/* No rank frees memory that another rank still maps. */
extern "C" void mt_cuda_mailbox_close(mt_mailbox *head) {
    if (!head) return;
    mt_cuda_mailbox *mailbox = (mt_cuda_mailbox *)head;
    MT_CUDA(cudaDeviceSynchronize());
    mt_barrier(head->group); // all copies are complete
    for (int r = 0; r < head->group->size; r++)
        if (mailbox->mapped[r]) MT_CUDA(cudaIpcCloseMemHandle(mailbox->mapped[r]));
    mt_barrier(head->group);
    free(mailbox);
}
