/* simulate.c: a training step on a machine that is not there. The backend below has every operation of megatron.h, but
 * computes nothing: an operation takes the time that its shape needs on the machine, and moves the clock of its stream.
 * mt_train_step runs on it unchanged, so recomputation, overlap, sharding and fp8 cost what their operations cost, and
 * nothing of the model is described twice. Addresses of device memory are never read.
 *
 * Operations have no context argument, so the simulated device is a static object, for one thread. Invariants: a
 * stream's clock never runs backwards; an operation starts when its stream is free and the host has enqueued it. */
#include "simulate.h"

#include "../options/flops.h"
#include "../options/option_rules.h"
#include "../report/timeline.h"
#include "../../cuda/limits.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"           // operations that compute nothing
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // constraints without numbers

/* ---- the device */

struct mt_stream {
    int number;
    double clock; // end of its last operation
};

struct mt_event {
    double clock;
};

/* Device memory lies between these addresses, where a program of 64-bit machines has none. */
static const uintptr_t mt_device_begin = (uintptr_t)1 << 52, mt_device_end = (uintptr_t)1 << 60;

/* Collectives that a computation may still run beside. */
enum { MT_BUSY_INTERVALS = 64 };

static struct {
    const mt_machine *machine;
    mt_ops ops;
    double host; // the host's clock
    uintptr_t next_address;
    int num_streams;
    int64_t num_calls, max_calls, num_phases, max_phases, phase;
    mt_simulated_call *calls;
    mt_profile_phase *phases;
    double busy[MT_BUSY_INTERVALS][2]; // the last collectives, a ring: begin and end
    int64_t num_busy, num_receives;    // receives of a pipeline that wait for their message
    /* row offsets of experts on the device: where they are, of how many ranks, their number and their last value */
    const void *offsets, *all_offsets;
    int64_t num_offsets, num_choices, num_sources;
    int64_t num_experts; // of a layer, on all ranks
} mt_device_model;

static void *mt_sim_grow(void *records, int64_t count, int64_t *room, size_t size) {
    if (count < *room) return records;
    *room = *room > 0 ? 2 * *room : 4096;
    return mt_realloc(records, *room * (int64_t)size);
}

/* Seconds of a computation that would take `seconds` alone: collectives and posted receives are kernels too, and take
 * multiprocessors and memory bandwidth from it. Copy engines do not. */
static double mt_sim_slowed(double from, double seconds) {
    const mt_machine *machine = mt_device_model.machine;
    double beside = 0, slowed = mt_device_model.num_receives > 0 ? seconds * (1 + machine->receive_slowdown) : seconds;
    for (int64_t i = 0; i < mt_min(mt_device_model.num_busy, MT_BUSY_INTERVALS); i++) {
        const double *busy = mt_device_model.busy[i];
        if (busy[1] > from && busy[0] < from + slowed) beside += fmin(from + slowed, busy[1]) - fmax(from, busy[0]);
    }
    return slowed + fmin(beside, slowed) * machine->collective_slowdown;
}

/* Enqueues an operation of `seconds` on a stream. */
static mt_simulated_call *mt_sim_enqueue(mt_operation operation, mt_work work, double seconds, mt_stream *stream) {
    static mt_simulated_call nothing;
    if (work.is_nothing) return &nothing;
    mt_device_model.calls = mt_sim_grow(mt_device_model.calls, mt_device_model.num_calls, &mt_device_model.max_calls,
                                        sizeof(mt_simulated_call));
    mt_simulated_call *call = &mt_device_model.calls[mt_device_model.num_calls++];
    mt_device_model.host += mt_device_model.machine->launch_us;
    double from = fmax(stream->clock, mt_device_model.host);
    bool computes = work.traffic == MT_TRAFFIC_NONE && operation != MT_OPERATION_memory_copy;
    bool by_kernels = work.traffic != MT_TRAFFIC_NONE && operation != MT_OPERATION_mailbox_exchange;
    stream->clock = from + (computes ? mt_sim_slowed(from, seconds) : seconds);
    if (by_kernels) {
        double *busy = mt_device_model.busy[mt_device_model.num_busy++ % MT_BUSY_INTERVALS];
        busy[0] = from, busy[1] = stream->clock;
    }
    *call = (mt_simulated_call){.operation = operation, .work = work, .phase = mt_device_model.phase};
    call->stream = stream->number, call->from = from, call->to = stream->clock;
    if (work.group) call->group = work.group->name, call->ranks = work.group->size, call->work.group = NULL;
    return call;
}

static bool mt_sim_on_device(const void *memory) {
    return (uintptr_t)memory >= mt_device_begin && (uintptr_t)memory < mt_device_end;
}

static int64_t mt_sim_memory_available(void) {
    return INT64_MAX / 4; // the caller compares the plan with the machine
}

static void mt_sim_memory_limit(int64_t bytes) {
}

static void *mt_sim_memory_alloc(int64_t bytes) {
    uintptr_t address = mt_device_model.next_address;
    mt_device_model.next_address += (uintptr_t)mt_divide_up(bytes + 1, 4096) * 4096;
    return (void *)address;
}

static void *mt_sim_memory_alloc_cache(int64_t bytes) {
    return mt_sim_memory_alloc(bytes);
}

static void mt_sim_memory_free(void *memory) {
}

static void *mt_sim_memory_alloc_ordered(int64_t bytes, mt_stream *stream) {
    return mt_sim_memory_alloc(bytes);
}

static void mt_sim_memory_free_ordered(void *memory, mt_stream *stream) {
}

/* A block of host memory, kept for the next model of the same need: a search creates thousands, and their pages would
 * be fetched again for each. */
typedef struct mt_sim_block {
    struct mt_sim_block *next;
    int power; // its bytes: 2^power
} mt_sim_block;

enum { MT_SIM_KEPT_POWER = 26, MT_SIM_BLOCK_HEAD = 4096 };
static mt_sim_block *mt_sim_kept[MT_SIM_KEPT_POWER + 1];

/* Without pages until they are touched: a plan may offload more than this machine has. */
static void *mt_sim_memory_alloc_host(int64_t bytes) {
    int power = 16;
    while ((int64_t)1 << power < bytes + MT_SIM_BLOCK_HEAD) power++;
    mt_sim_block *block = power <= MT_SIM_KEPT_POWER ? mt_sim_kept[power] : NULL;
    if (block) {
        mt_sim_kept[power] = block->next;
    } else {
        block =
            mmap(NULL, (size_t)1 << power, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (block == MAP_FAILED) mt_die("out of memory: %lld bytes for a simulated step", (long long)bytes);
        block->power = power;
    }
    return (char *)block + MT_SIM_BLOCK_HEAD;
}

static void mt_sim_memory_free_host(void *memory) {
    if (!memory) return;
    mt_sim_block *block = (mt_sim_block *)(void *)((char *)memory - MT_SIM_BLOCK_HEAD);
    if (block->power <= MT_SIM_KEPT_POWER)
        block->next = mt_sim_kept[block->power], mt_sim_kept[block->power] = block;
    else
        munmap(block, (size_t)1 << block->power);
}

static bool mt_sim_first_use_waits(void) {
    return true;
}

/* As mt_cuda_workspace_bytes of cuda/device.cu. */
static int64_t mt_sim_workspace_bytes(int64_t T, int64_t C, int64_t H, int64_t D) {
    int64_t products = 32 << 20, sums = 4 * (int64_t)mt_device_model.machine->multiprocessors * 2 * C * 4;
    int64_t dq = T * H * (D + D / 8 + 4) * 4, embedding = T * (C / 4 + 32) + 8 * C + (4 << 20);
    return mt_max(mt_max(products, sums), mt_max(dq, embedding));
}

static int64_t mt_sim_delta_workspace_bytes(int64_t T, const mt_delta_args *a, mt_dtype dtype, bool train) {
    return mt_cuda_delta_workspace(T, a, dtype, train);
}

static int64_t mt_sim_ssd_workspace_bytes(int64_t T, const mt_ssd_args *a, bool train) {
    return mt_cuda_ssd_workspace(T, a, train);
}

static int64_t mt_sim_sparse_workspace_bytes(int64_t T, int64_t longest, int64_t topk) {
    return mt_cuda_sparse_workspace(T, longest, topk);
}

static mt_stream *mt_sim_stream_create(void *workspace, int64_t bytes, bool deterministic) {
    mt_stream *stream = mt_calloc(sizeof *stream);
    stream->number = mt_device_model.num_streams++;
    stream->clock = mt_device_model.host;
    return stream;
}

static void mt_sim_stream_destroy(mt_stream *stream) {
    free(stream);
}

static void mt_sim_stream_synchronize(mt_stream *stream) {
    mt_device_model.host = fmax(mt_device_model.host, stream->clock);
}

static void mt_sim_stream_wait_stream(mt_stream *stream, mt_stream *other) {
    stream->clock = fmax(stream->clock, other->clock);
}

/* The optimizer on the host, the only function that a model's streams call; its context begins with the operands. */
static void mt_sim_stream_call_host(mt_stream *stream, mt_host_function *function, void *context) {
    mt_work work = mt_work_bytes(mt_update_bytes(context), MT_U8);
    double seconds = work.bytes / mt_device_model.machine->host_update_gbs;
    mt_sim_enqueue(MT_OPERATION_adamw_step, work, seconds, stream)->on_host = true;
}

static mt_event *mt_sim_event_create(void) {
    return mt_calloc(sizeof(mt_event));
}

static void mt_sim_event_destroy(mt_event *event) {
    free(event);
}

static void mt_sim_event_record(mt_event *event, mt_stream *stream) {
    event->clock = stream->clock;
}

static void mt_sim_event_synchronize(mt_event *event) {
    mt_device_model.host = fmax(mt_device_model.host, event->clock);
}

/* ---- messages. Those of a ring take their time after both ends are ready, which all ranks are at once; those of a
 * pipeline arrive at once, and mt_timeline adds their time. */

typedef struct mt_sim_channel {
    mt_channel head;
    double clock, done[MT_CHANNEL_TICKETS];
} mt_sim_channel;

static mt_channel *mt_sim_channel_open(const mt_group *group, int from, int to, int id) {
    if (group->rank != from && group->rank != to) return NULL;
    mt_sim_channel *channel = mt_calloc(sizeof *channel);
    channel->head = (mt_channel){.group = group, .from = from, .to = to, .id = id};
    return &channel->head;
}

static bool mt_sim_of_pipeline(const mt_channel *channel) {
    return strcmp(channel->group->name, "pipeline") == 0;
}

static int64_t mt_sim_channel_start(mt_channel *channel, int64_t bytes, mt_stream *stream) {
    mt_sim_channel *c = (mt_sim_channel *)channel;
    mt_span_of_hosts span = mt_machine_span(mt_device_model.machine, channel->group);
    int64_t ticket = channel->next++, slot = ticket % MT_CHANNEL_TICKETS;
    double seconds = mt_machine_collective_seconds(mt_device_model.machine, MT_MESSAGE, (double)bytes, &span);
    if (mt_sim_of_pipeline(channel)) seconds = 0;
    mt_device_model.host += mt_device_model.machine->launch_us;
    double from = fmax(fmax(c->clock, stream->clock), mt_device_model.host);
    c->clock = from + seconds;
    if (seconds > 0) {
        double *busy = mt_device_model.busy[mt_device_model.num_busy++ % MT_BUSY_INTERVALS];
        busy[0] = from, busy[1] = c->clock;
    }
    channel->bytes[slot] = bytes, c->done[slot] = c->clock;
    return ticket;
}

/* Records a message of the pipeline as a call without a time. */
static void mt_sim_record_message(mt_operation operation, const mt_channel *channel, int64_t bytes,
                                  const mt_stream *stream) {
    bool receives = operation == MT_OPERATION_channel_recv, gradients = channel->id == 1;
    if (!mt_sim_of_pipeline(channel)) return;
    mt_device_model.calls = mt_sim_grow(mt_device_model.calls, mt_device_model.num_calls, &mt_device_model.max_calls,
                                        sizeof(mt_simulated_call));
    mt_simulated_call *call = &mt_device_model.calls[mt_device_model.num_calls++];
    *call = (mt_simulated_call){.operation = operation, .phase = mt_device_model.phase, .stream = -1};
    call->work = mt_work_sent(operation, bytes, MT_U8, channel->group), call->work.group = NULL;
    call->group = channel->group->name, call->ranks = channel->group->size;
    call->message = gradients ? (receives ? MT_ACTION_RECV_BACKWARD : MT_ACTION_SEND_BACKWARD)
                              : (receives ? MT_ACTION_RECV_FORWARD : MT_ACTION_SEND_FORWARD);
    call->from = call->to = stream->clock;
}

static int64_t mt_sim_channel_send(mt_channel *channel, const void *buffer, int64_t count, mt_dtype dtype,
                                   mt_stream *stream) {
    mt_sim_record_message(MT_OPERATION_channel_send, channel, count * mt_dtype_size(dtype), stream);
    return mt_sim_channel_start(channel, count * mt_dtype_size(dtype), stream);
}

static int64_t mt_sim_channel_recv(mt_channel *channel, void *buffer, int64_t count, mt_dtype dtype,
                                   mt_stream *stream) {
    mt_device_model.num_receives += mt_sim_of_pipeline(channel);
    mt_sim_record_message(MT_OPERATION_channel_recv, channel, count * mt_dtype_size(dtype), stream);
    return mt_sim_channel_start(channel, count * mt_dtype_size(dtype), stream);
}

/* Records the part of a message's time that the stream waits for. */
static void mt_sim_channel_wait(mt_channel *channel, int64_t ticket, mt_stream *stream) {
    int64_t slot = ticket % MT_CHANNEL_TICKETS, bytes = channel->bytes[slot];
    double waits = ((mt_sim_channel *)channel)->done[slot] - stream->clock;
    mt_work work = mt_work_sent(MT_OPERATION_channel_wait, bytes, MT_U8, channel->group);
    if (mt_sim_of_pipeline(channel) && channel->group->rank == channel->to) mt_device_model.num_receives--;
    if (waits > 0) mt_sim_enqueue(MT_OPERATION_channel_wait, work, waits, stream);
}

static void mt_sim_channel_close(mt_channel *channel) {
    free(channel);
}

/* As mt_cuda_mailbox_open of cuda/comm.cu: the ranks must be few, and on one host. */
static int mt_sim_mailbox_open(mt_mailbox **mailbox, const mt_group *group, void *memory, int64_t bytes,
                               mt_error *error) {
    int64_t hosts = mt_machine_span(mt_device_model.machine, group).hosts;
    if (group->size > MT_MAILBOX_RANKS)
        return mt_error_set(error, "group %s has %d ranks; at most %d ranks can copy into each other's memory",
                            group->name, group->size, MT_MAILBOX_RANKS);
    if (hosts > 1)
        return mt_error_set(error, "%d ranks of the %s group are on %lld hosts of %lld GPUs", group->size, group->name,
                            (long long)hosts, (long long)mt_device_model.machine->gpus_per_host);
    *mailbox = mt_malloc(sizeof **mailbox);
    **mailbox = (mt_mailbox){group, memory, bytes};
    return 0;
}

static void mt_sim_mailbox_close(mt_mailbox *mailbox) {
    free(mailbox);
}

/* ---- times of operations */

static mt_collective mt_sim_collective(mt_operation operation) {
    if (operation == MT_OPERATION_all_reduce || operation == MT_OPERATION_broadcast) return MT_RING_REDUCE;
    if (operation == MT_OPERATION_mailbox_exchange) return MT_COPY_ENGINE;
    bool gathers = operation == MT_OPERATION_all_gather || operation == MT_OPERATION_reduce_scatter;
    gathers |= operation == MT_OPERATION_reduce;
    return gathers ? MT_RING_GATHER : MT_EXCHANGE;
}

/* Operations that are not products or attention: communication by its group, the others by their bytes. */
static void mt_sim_call(mt_operation operation, mt_work work, mt_stream *stream) {
    const mt_machine *machine = mt_device_model.machine;
    double seconds = mt_machine_memory_seconds(machine, work.bytes);
    if (work.flops > 0) seconds = machine->kernel_us + work.flops / machine->bf16_product_tflops;
    if (work.group && !work.is_nothing) {
        mt_span_of_hosts span = mt_machine_span(machine, work.group);
        seconds = mt_machine_collective_seconds(machine, mt_sim_collective(operation), work.bytes, &span);
    }
    mt_sim_enqueue(operation, work, seconds, stream);
}

#define MT_SIM_FUNCTION(name, work, arguments, ...)                                                                    \
    static void mt_sim_##name(__VA_ARGS__) {                                                                           \
        mt_sim_call(MT_OPERATION_##name, work, stream);                                                                \
    }
MT_TIMED_OPERATIONS(MT_SIM_FUNCTION)
MT_FUSED_OPERATIONS(MT_SIM_FUNCTION)
#undef MT_SIM_FUNCTION

/* A product of `count` equal matrices of M x N results with sums of K terms; `written` bytes of each. */
static void mt_sim_product(mt_operation operation, int64_t M, int64_t N, int64_t K, double written, bool fp8,
                           mt_stream *stream) {
    double seconds = mt_machine_product_seconds(mt_device_model.machine, M, N, K, written, fp8);
    mt_simulated_call *call = mt_sim_enqueue(operation, mt_work_product(M, N, K), seconds, stream);
    call->shape[0] = M, call->shape[1] = N, call->shape[2] = K;
}

static void mt_product_linear_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_product(MT_OPERATION_linear_forward, a->T, a->N, a->K, 2 * (double)(a->T * a->N), false, stream);
}

static void mt_product_linear_backward_input(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_product(MT_OPERATION_linear_backward_input, a->T, a->K, a->N, 2 * (double)(a->T * a->K), false, stream);
}

static void mt_product_linear_backward_weight(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    double written = (a->accumulate ? 8 : 4) * (double)(a->N * a->K);
    mt_sim_product(MT_OPERATION_linear_backward_weight, a->N, a->K, a->T, written, false, stream);
    if (a->dbias) mt_sim_column_sums(a->dbias, a->dy, a->T, a->N, dtype, stream);
}

/* GELU in the epilogue: both results are written, or the argument of GELU is read as well. */
static void mt_product_linear_gelu_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_product(MT_OPERATION_linear_gelu_forward, a->T, a->N, a->K, 4 * (double)(a->T * a->N), false, stream);
}

static void mt_product_linear_backward_gelu(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_product(MT_OPERATION_linear_backward_gelu, a->T, a->K, a->N, 4 * (double)(a->T * a->K), false, stream);
}

/* Grouped products: half a tile of 128 rows of each expert is empty. */
static void mt_sim_grouped(mt_operation operation, const mt_grouped_args *a, int64_t columns, int64_t terms,
                           mt_stream *stream) {
    const mt_machine *machine = mt_device_model.machine;
    int64_t rows = a->M + (a->E > 1 || a->offsets ? 64 * a->E : 0);
    double seconds = mt_machine_product_seconds(machine, rows, columns, terms, 2 * (double)(a->M * columns), false);
    mt_simulated_call *call =
        mt_sim_enqueue(operation, mt_work_product(a->M, columns, terms), seconds / machine->grouped_share, stream);
    call->shape[0] = a->M, call->shape[1] = columns, call->shape[2] = terms;
}

static void mt_product_grouped_linear_forward(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_grouped(MT_OPERATION_grouped_linear_forward, a, a->N, a->K, stream);
}

static void mt_product_grouped_linear_backward_input(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_grouped(MT_OPERATION_grouped_linear_backward_input, a, a->K, a->N, stream);
}

/* The experts' results side by side: E N x K, each a sum over the rows of its expert. */
static void mt_product_grouped_linear_backward_weight(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    const mt_machine *machine = mt_device_model.machine;
    int64_t E = mt_max(a->E, 1), terms = mt_divide_up(a->M, E) + 64;
    double written = (a->accumulate ? 8 : 4) * (double)(E * a->N * a->K);
    double seconds = mt_machine_product_seconds(machine, E * a->N, a->K, terms, written, false);
    mt_simulated_call *call =
        mt_sim_enqueue(MT_OPERATION_grouped_linear_backward_weight, mt_work_product(a->M, a->N, a->K),
                       seconds / machine->grouped_share, stream);
    call->shape[0] = E * a->N, call->shape[1] = a->K, call->shape[2] = a->M / E;
}

/* Operands of fp32 take about 8 times as long as in bf16 or fp16, of TF32 twice. */
static void mt_product_batched_product(const mt_product_args *a, mt_dtype dtype, mt_stream *stream) {
    double slower = a->tf32 ? 2 : 8, size = (double)mt_dtype_size(dtype) * (a->add ? 2 : 1);
    if (mt_dtype_is_half(dtype)) slower = 1;
    double written = size * (double)(a->count * a->M * a->N);
    double seconds = mt_machine_product_seconds(mt_device_model.machine, a->count * a->M, a->N, a->K, written, false);
    mt_simulated_call *call = mt_sim_enqueue(MT_OPERATION_batched_product, mt_work_product(a->count * a->M, a->N, a->K),
                                             seconds * slower, stream);
    call->shape[0] = a->count * a->M, call->shape[1] = a->N, call->shape[2] = a->K;
}

static void mt_product_fp8_product(const mt_fp8_product_args *a, mt_stream *stream) {
    const mt_machine *machine = mt_device_model.machine;
    int64_t E = mt_max(a->num_experts, 1), rows = a->sums_rows ? E * a->M : a->M;
    int64_t terms = a->sums_rows ? mt_divide_up(a->K, E) : a->K;
    double element = (double)mt_dtype_size(a->out_dtype) * (a->accumulate ? 2 : 1);
    double seconds =
        mt_machine_product_seconds(machine, rows, a->N, terms, element * (double)rows * (double)a->N, true);
    if (E > 1) seconds /= machine->grouped_share;
    if (a->a.blocks != MT_FP8_TENSOR)
        seconds /= machine->fp8_blocks_share;
    else if (a->exact_sums)
        seconds /= machine->fp8_exact_share;
    mt_simulated_call *call =
        mt_sim_enqueue(MT_OPERATION_fp8_product, mt_work_product(a->M, a->N, a->K), seconds, stream);
    call->shape[0] = rows, call->shape[1] = a->N, call->shape[2] = terms;
}

static void mt_sim_attention(mt_operation operation, mt_work work, const mt_attention *a, bool backward,
                             mt_stream *stream) {
    double rows = 0, keys = 0;
    for (int64_t s = 0; s < a->spans.count; s++)
        rows += (double)a->spans.host[s].q_len, keys += (double)(a->spans.host[s].q_len * a->spans.host[s].k_len);
    double length = rows > 0 ? keys / rows : 1;
    if (a->window > 0) length = fmin(length, (double)a->window);
    double seconds = mt_machine_attention_seconds(mt_device_model.machine, work.flops, length, a->value_size, backward);
    mt_sim_enqueue(operation, work, work.flops > 0 ? seconds : 0, stream);
}

static void mt_product_attention_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_attention(MT_OPERATION_attention_forward, mt_work_attention(a, 1, 1), a, false, stream);
}

static void mt_product_attention_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    mt_sim_attention(MT_OPERATION_attention_backward, mt_work_attention(a, 3, 2), a, true, stream);
}

/* ---- values that the host reads from the device: the rows of experts, spread evenly */

static void mt_product_dispatch_plan(const mt_dispatch_args *a, mt_stream *stream) {
    mt_device_model.offsets = a->offsets;
    mt_device_model.num_offsets = a->dispatch->count * a->dispatch->copies + 1;
    mt_device_model.num_choices = a->M * a->dispatch->count / mt_device_model.num_experts;
    mt_sim_dispatch_plan(a, stream);
}

static void mt_product_all_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                  mt_stream *stream) {
    if (in == mt_device_model.offsets) mt_device_model.all_offsets = out, mt_device_model.num_sources = group->size;
    mt_sim_all_gather(out, in, count, dtype, group, stream);
}

enum { MT_SIM_RESULT_BYTES = 1 << 20 };

static void mt_sim_write_offsets(int32_t *to, int64_t sources) {
    int64_t count = mt_device_model.num_offsets, last = mt_device_model.num_choices;
    for (int64_t i = 0; i < count; i++) to[i] = (int32_t)(last * i / (count - 1));
    for (int64_t source = 1; source < sources; source++) memcpy(to + source * count, to, (size_t)count * sizeof *to);
}

/* Between host and device at the rate of their link; within the device by reading and writing. Device memory has no
 * values, so results that the host reads are zeros; offloaded activations are larger, and get no pages. */
static void mt_product_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    bool to_device = mt_sim_on_device(to), from_device = mt_sim_on_device(from);
    mt_work work = mt_work_bytes(2 * bytes, MT_U8);
    double seconds = mt_machine_memory_seconds(mt_device_model.machine, work.bytes);
    if (!to_device && !from_device) {
        memmove(to, from, (size_t)bytes);
        return;
    }
    if (!to_device && from && from == mt_device_model.all_offsets)
        mt_sim_write_offsets(to, mt_device_model.num_sources);
    else if (!to_device && from && from == mt_device_model.offsets)
        mt_sim_write_offsets(to, 1);
    else if (!to_device && bytes <= MT_SIM_RESULT_BYTES)
        memset(to, 0, (size_t)bytes);
    if (to_device != from_device)
        seconds = mt_device_model.machine->kernel_us + (double)bytes / mt_device_model.machine->host_copy_gbs;
    mt_sim_enqueue(MT_OPERATION_memory_copy, work, seconds, stream);
}

static void mt_sim_phase_begin(const char *name, int64_t micro_batch, int64_t chunk, mt_stream *stream) {
    mt_device_model.phases = mt_sim_grow(mt_device_model.phases, mt_device_model.num_phases,
                                         &mt_device_model.max_phases, sizeof(mt_profile_phase));
    mt_device_model.phase = mt_device_model.num_phases++;
    mt_device_model.phases[mt_device_model.phase] = (mt_profile_phase){name, micro_batch, chunk, stream->clock, 0};
}

static void mt_sim_phase_end(mt_stream *stream) {
    mt_device_model.phases[mt_device_model.phase].to = stream->clock;
    mt_device_model.phase = -1;
}

/* The limits of the kernels on such a machine. */
static mt_limits mt_sim_limits(const mt_machine *machine) {
    mt_limits limits = {0};
    bool has_fp8 = machine->fp8_product_tflops > 0;
    mt_cuda_set_limits(&limits, MT_CUDA_DELTA_SHARED, has_fp8, has_fp8 && machine->fp8_blocks_share > 0, true);
    limits.no_bf16 = machine->bf16 == 0;
    return limits;
}

/* The table. The operations of graphs, which no training step calls, are absent. */
static const mt_ops *mt_sim_ops(const mt_machine *machine) {
#define MT_SIM_ENTRY(name, ...) .name = mt_sim_##name,
    mt_device_model.ops = (mt_ops){MT_OPERATIONS(MT_SIM_ENTRY) MT_FUSED_OPERATIONS(MT_SIM_ENTRY)};
#undef MT_SIM_ENTRY
    mt_ops *ops = &mt_device_model.ops;
    ops->name = "cuda", ops->on_device = ops->is_imagined = true;
    ops->limits = mt_sim_limits(machine);
    ops->linear_forward = mt_product_linear_forward, ops->linear_backward_input = mt_product_linear_backward_input;
    ops->linear_backward_weight = mt_product_linear_backward_weight;
    ops->linear_gelu_forward = mt_product_linear_gelu_forward;
    ops->linear_backward_gelu = mt_product_linear_backward_gelu;
    ops->grouped_linear_forward = mt_product_grouped_linear_forward;
    ops->grouped_linear_backward_input = mt_product_grouped_linear_backward_input;
    ops->grouped_linear_backward_weight = mt_product_grouped_linear_backward_weight;
    ops->fp8_product = mt_product_fp8_product, ops->batched_product = mt_product_batched_product;
    ops->attention_forward = mt_product_attention_forward, ops->attention_backward = mt_product_attention_backward;
    ops->dispatch_plan = mt_product_dispatch_plan, ops->all_gather = mt_product_all_gather;
    ops->memory_copy = mt_product_memory_copy;
    ops->phase_begin = mt_sim_phase_begin, ops->phase_end = mt_sim_phase_end;
    mt_device_model.machine = machine;
    mt_device_model.host = 0, mt_device_model.num_streams = 0, mt_device_model.next_address = mt_device_begin;
    mt_device_model.num_calls = mt_device_model.num_phases = 0, mt_device_model.phase = -1;
    mt_device_model.offsets = mt_device_model.all_offsets = NULL;
    mt_device_model.num_busy = mt_device_model.num_receives = 0;
    return ops;
}

/* ---- the step of one pipeline rank */

/* Batches of sequences of --seq-length, all of token 0. */
static int mt_sim_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    const mt_options *o = context;
    int64_t rows = o->micro_batch_size, length = mt_row_length(o);
    batch->num_tokens = rows * length, batch->num_spans = rows, batch->context_size = 0;
    for (int64_t row = 0; row < rows; row++)
        batch->spans[row] = (mt_span){row * length, length, row * length, length, true};
    return 0;
}

/* The arrays of the batch, which keep their contents, in memory that all simulations share. */
static mt_batch *mt_sim_batch_fill(const mt_options *o) {
    static mt_batch batch;
    static int64_t room;
    int64_t length = mt_row_length(o);
    int64_t tokens = mt_rank_tokens(o, o->micro_batch_size * length) * o->context_parallel_size;
    if (tokens > room) {
        mt_batch_free(&batch);
        mt_batch_alloc(&batch, room = tokens);
    }
    for (int64_t t = 0; t < o->micro_batch_size * length; t++) {
        batch.tokens[t] = batch.labels[t] = 0, batch.loss_mask[t] = 1;
        batch.positions[t] = 0, batch.token_index[t] = t;
    }
    return &batch;
}

static mt_step_part mt_step_part_of(const mt_simulated_call *call) {
    switch (call->operation) {
    case MT_OPERATION_attention_forward:
    case MT_OPERATION_attention_backward:
        return MT_STEP_PART_ATTENTION;
#define MT_OPTIMIZER_CASE(name, step, ...) case MT_OPERATION_##step##_step:
        MT_OPTIMIZERS(MT_OPTIMIZER_CASE)
#undef MT_OPTIMIZER_CASE
    case MT_OPERATION_adamw_amax:
    case MT_OPERATION_muon_momentum:
    case MT_OPERATION_muon_normalize:
    case MT_OPERATION_batched_product:
    case MT_OPERATION_squared_norm:
        return MT_STEP_PART_OPTIMIZER;
    default:
        return call->work.flops > 0 ? MT_STEP_PART_PRODUCTS : MT_STEP_PART_MEMORY;
    }
}

/* True for work of the host, and for copies and sums of gradients on other streams, beside the computation: while the
 * device waits for them, it is idle. */
static bool mt_sim_waits_only(const mt_simulated_call *call) {
    return call->on_host || call->stream != 0;
}

/* The parts of the step whose calls were recorded last. */
static void mt_sim_count(mt_simulated_rank *r, double seconds) {
    int64_t count = mt_device_model.num_calls;
    mt_busy *busy = mt_malloc(mt_max(count, 1) * (int64_t)sizeof *busy);
    memset(r->parts, 0, sizeof r->parts), memset(r->exposed, 0, sizeof r->exposed);
    r->flops = 0;
    for (int64_t i = 0; i < count; i++) {
        const mt_simulated_call *call = &mt_device_model.calls[i];
        busy[i] = (mt_busy){call->from, call->to, call->work.traffic};
        r->flops += call->work.flops;
        if (call->work.traffic == MT_TRAFFIC_NONE && !mt_sim_waits_only(call))
            r->parts[mt_step_part_of(call)] += call->to - call->from;
    }
    mt_traffic_expose(r->exposed, busy, count);
    free(busy);
    r->seconds = seconds;
    double known = 0;
    for (int i = 1; i < MT_NUM_TRAFFICS; i++) r->parts[MT_STEP_PART_COMMUNICATION] += r->exposed[i];
    for (int i = 0; i < MT_STEP_PART_IDLE; i++) known += r->parts[i];
    r->parts[MT_STEP_PART_IDLE] = fmax(seconds - known, 0);
}

/* Mean seconds of a kind of phase on a chunk, without the first and the last micro-batch where there are others. */
static double mt_sim_phase_seconds(const char *name, int64_t chunk, int64_t micro_batches) {
    double sum[2] = {0};
    int64_t count[2] = {0};
    for (int64_t i = 0; i < mt_device_model.num_phases; i++) {
        const mt_profile_phase *phase = &mt_device_model.phases[i];
        if (phase->chunk != chunk || strcmp(phase->name, name) != 0) continue;
        bool inner = phase->micro_batch > 0 && phase->micro_batch + 1 < micro_batches;
        sum[inner] += phase->to - phase->from, count[inner]++;
    }
    int kind = count[1] > 0;
    return count[kind] > 0 ? sum[kind] / (double)count[kind] : 0;
}

/* Runs a step of `micro_batches`; counts it unless it only warms up. */
static int mt_sim_step(mt_simulated_rank *r, mt_model *model, mt_batch *batch, int64_t micro_batches, bool warms_up,
                       mt_error *error) {
    mt_run_state state = {0};
    const mt_options *o = mt_model_options(model);
    mt_stream *stream = mt_model_stream(model);
    double begin = stream->clock;
    mt_device_model.num_calls = mt_device_model.num_phases = 0, mt_device_model.phase = -1;
    mt_device_model.num_experts = o->num_experts;
    if (mt_train_step(model, &state, micro_batches, mt_sim_batch, (void *)o, batch, NULL, error) != 0) return -1;
    if (warms_up) return 0;
    mt_sim_count(r, stream->clock - begin);
    for (int64_t chunk = 0; chunk < o->num_virtual_stages_per_pipeline_rank; chunk++) {
        bool split = o->pipeline_schedule == MT_SCHEDULE_ZB_H1 && o->pipeline_model_parallel_size > 1;
        r->forward[chunk] = mt_sim_phase_seconds("forward", chunk, micro_batches);
        r->backward[chunk] = mt_sim_phase_seconds(split ? "backward of the input" : "backward", chunk, micro_batches);
        r->weights[chunk] = mt_sim_phase_seconds("backward of the weights", chunk, micro_batches);
    }
    return 0;
}

static int64_t mt_num_micro_batches(const mt_options *o) {
    return o->global_batch_size / (o->micro_batch_size * o->data_parallel_size);
}

/* A step of all micro-batches, after one that warms up. Every number of a step grows by the same amount with each
 * further group of micro-batches, so a step of many is computed from two of few. */
static int mt_sim_run(mt_simulated_rank *r, mt_model *model, int64_t *shown, mt_error *error) {
    const mt_options *o = mt_model_options(model);
    int64_t all = mt_num_micro_batches(o), few = o->num_virtual_stages_per_pipeline_rank > 1 ? 1 : 2;
    if (few == 1) few = mt_schedule_of(o, all).group;
    int64_t some = *shown = all > 2 * few ? 2 * few : all;
    mt_simulated_rank first = *r;
    mt_batch *batch = mt_sim_batch_fill(o);
    int status = mt_sim_step(&first, model, batch, some < all ? few : all, true, error);
    if (status == 0 && some < all) status = mt_sim_step(&first, model, batch, few, false, error);
    if (status == 0) status = mt_sim_step(r, model, batch, some, false, error);
    if (status != 0 || some == all) return status;
    double more = (double)(all - some) / (double)(some - few);
    r->seconds += more * (r->seconds - first.seconds), r->flops += more * (r->flops - first.flops);
    for (int i = 0; i < MT_NUM_STEP_PARTS; i++) r->parts[i] += more * (r->parts[i] - first.parts[i]);
    for (int i = 0; i < MT_NUM_TRAFFICS; i++) r->exposed[i] += more * (r->exposed[i] - first.exposed[i]);
    return 0;
}

/* The grid of the first rank of a stage. Its groups have members but no library; the world is one rank, so that nothing
 * waits for others. */
static int mt_sim_grid(mt_grid *grid, const mt_options *o, int64_t ranks, int64_t stage, mt_error *error) {
    *grid = mt_grid_of_one;
    int64_t between = ranks / o->pipeline_model_parallel_size; // ranks from a stage to the next
    if (o->use_tp_pp_dp_mapping) between = o->tensor_model_parallel_size * o->context_parallel_size;
    grid->world.size = (int)ranks, grid->world.rank = (int)(stage * between);
    int status = mt_grid_build(grid, o, error);
    grid->world.size = 1, grid->world.rank = 0;
    return status;
}

/* Rotary tables of one position: they are small, and filling them would take longer than the simulation. */
static mt_model_plan mt_sim_plan(const mt_options *o) {
    int64_t tokens = mt_rank_tokens(o, mt_largest_micro_batch_size(o) * mt_row_length(o));
    return (mt_model_plan){
        .max_tokens = tokens, .max_logits = tokens, .max_position = 1, .host_memory = INT64_MAX / 4, .train = true};
}

/* Creates the model of a pipeline rank, or with `counts` only its memory plan. Clear the grid in each case. */
static int mt_sim_create(mt_model **model, mt_grid *grid, const mt_simulated_rank *r, const mt_options *o,
                         int64_t ranks, const mt_machine *machine, bool counts, mt_error *error) {
    mt_model_plan plan = mt_sim_plan(o);
    plan.counts = counts;
    int status = mt_sim_grid(grid, o, ranks, r->rank, error);
    return status != 0 ? status : mt_model_create(model, o, grid, mt_sim_ops(machine), &plan, error);
}

static bool mt_sim_same_members(const mt_group *a, const mt_group *b) {
    return a->size == b->size && memcmp(a->members, b->members, (size_t)a->size * sizeof(int)) == 0;
}

/* True if training has no collective in groups of a kind: others serve it, or only the size is used. */
static bool mt_sim_group_is_unused(mt_group_kind kind, const mt_options *o) {
    const bool delayed = o->fp8_recipe == MT_FP8_DELAYED && o->fp8_format != MT_FP8_OFF;
    switch (kind) {
    case MT_GROUP_CONTEXT:
    case MT_GROUP_CONTEXT_RING:
        return o->cp_comm_type != MT_CP_ALL_GATHER;
    case MT_GROUP_EMBEDDING:
        return o->untie_embeddings_and_output_weights && o->mtp_num_layers == 0;
    case MT_GROUP_EXPERT:
        return true;
    case MT_GROUP_DATA:
    case MT_GROUP_EXPERT_TENSOR:
    case MT_GROUP_EXPERT_DATA:
    case MT_GROUP_EXPERT_EXCHANGE:
        return !mt_has_experts(o);
    case MT_GROUP_TENSOR_CONTEXT:
        return !mt_has_experts(o) && !(delayed && o->tp_only_amax_red);
    case MT_GROUP_STAGE:
        return !delayed || o->tp_only_amax_red;
    default:
        return false;
    }
}

/* The communicators of a rank, as the CUDA backend opens them: one for all groups with the same members, and one for
 * each channel of a pipeline or of a context-parallel ring. NCCL allocates buffers at the first use, so that an unused
 * one counts half; one of a channel, which has few thread blocks, an eighth (notes/lab.md, Memory of several ranks). */
static double mt_sim_communicators(mt_grid *grid, const mt_options *o, int64_t ranks) {
    const int64_t pp = grid->pipeline.size, rank = grid->pipeline.rank;
    double count = ranks > 1;
    int channels = grid->context_ring.size > 1 && o->cp_comm_type != MT_CP_ALL_GATHER ? 4 : 0;
    for (int kind = MT_GROUP_WORLD + 1; kind < MT_NUM_GROUP_KINDS; kind++) {
        const mt_group *group = mt_grid_group(grid, kind);
        bool is_new = group->size > 1 && group->size < ranks, is_unused = true;
        for (int k = MT_GROUP_WORLD + 1; k < MT_NUM_GROUP_KINDS && is_new; k++) {
            if (!mt_sim_same_members(group, mt_grid_group(grid, k))) continue;
            is_new = k >= kind, is_unused &= mt_sim_group_is_unused(k, o);
        }
        if (is_new) count += is_unused ? 0.5 : 1;
    }
    const bool is_end = rank == 0 || rank == pp - 1;
    if (pp > 1)
        channels += is_end && o->num_virtual_stages_per_pipeline_rank == 1 ? 2 : 4; // both ways, both neighbours
    return count + channels / 8.0;
}

/* The memory of a rank, and whether the GPU has room for it. */
static int mt_sim_measure(mt_simulation *simulation, mt_simulated_rank *r, const mt_options *o, int64_t ranks,
                          const mt_machine *machine, mt_error *error) {
    mt_grid grid;
    mt_model *model = NULL;
    int status = mt_sim_create(&model, &grid, r, o, ranks, machine, true, error);
    if (status == 0) {
        for (int row = 0; row < MT_NUM_PLAN_ROWS; row++)
            r->bytes[row] = mt_model_planned_bytes(model, (mt_plan_row)row);
        double context = mt_machine_context(machine, mt_sim_communicators(&grid, o, ranks));
        double needed = (double)r->bytes[MT_PLAN_TOTAL] + context;
        if (needed > simulation->needed) memcpy(simulation->bytes, r->bytes, sizeof r->bytes);
        simulation->needed = fmax(simulation->needed, needed);
        if (simulation->needed > machine->memory_gib) status = MT_DOES_NOT_FIT;
        mt_model_destroy(model);
    }
    mt_grid_clear(&grid);
    return status;
}

/* The step of a rank. */
static int mt_sim_rank(mt_simulation *simulation, mt_simulated_rank *r, const mt_options *o, int64_t ranks,
                       const mt_machine *machine, mt_error *error) {
    mt_grid grid;
    mt_model *model = NULL;
    int64_t chunks = o->num_virtual_stages_per_pipeline_rank;
    r->forward = mt_calloc(3 * chunks * (int64_t)sizeof(double));
    r->backward = r->forward + chunks, r->weights = r->backward + chunks;
    int status = mt_sim_create(&model, &grid, r, o, ranks, machine, false, error);
    if (status == 0) {
        status = mt_sim_run(r, model, &simulation->micro_batches_shown, error);
        mt_model_destroy(model);
    }
    mt_grid_clear(&grid);
    return status;
}

/* ---- all ranks together */

/* True if two pipeline ranks have equal chunks. */
static bool mt_stages_equal(const mt_options *o, const mt_stage *stages, int64_t a, int64_t b) {
    int64_t pp = o->pipeline_model_parallel_size;
    for (int64_t chunk = 0; chunk < o->num_virtual_stages_per_pipeline_rank; chunk++, a += pp, b += pp) {
        const mt_stage *x = &stages[a], *y = &stages[b];
        if (x->num_layers != y->num_layers || x->num_mtp != y->num_mtp) return false;
        if (x->embedding != y->embedding || x->loss != y->loss) return false;
        for (int64_t i = 0; i < x->num_layers; i++)
            if (!mt_layer_kinds_equal(mt_layer_kind_of(o, x->first_layer + i), mt_layer_kind_of(o, y->first_layer + i)))
                return false;
    }
    return true;
}

/* Lists the distinct pipeline ranks. The first of equal ranks stands for all: it holds most micro-batches. */
static void mt_sim_list_ranks(mt_simulation *simulation, const mt_options *o) {
    int64_t pp = o->pipeline_model_parallel_size, vp = o->num_virtual_stages_per_pipeline_rank;
    mt_stage *stages = mt_calloc(pp * vp * (int64_t)sizeof *stages);
    simulation->pipeline = mt_calloc(pp * (int64_t)sizeof *simulation->pipeline);
    simulation->pipeline_ranks = pp, simulation->of = mt_calloc(pp * (int64_t)sizeof *simulation->of);
    mt_pipeline_layout_build(stages, o);
    for (int64_t rank = 0; rank < pp; rank++) {
        int64_t i = 0;
        while (i < simulation->num_ranks && !mt_stages_equal(o, stages, simulation->pipeline[i].rank, rank)) i++;
        if (i == simulation->num_ranks) simulation->num_ranks++, simulation->pipeline[i].rank = rank;
        if (simulation->pipeline[i].ranks++ == 0) simulation->pipeline[i].last = rank;
        simulation->of[rank] = i;
    }
    free(stages);
}

/* Seconds from a send of activations to the moment when its receiver has them. */
static double mt_sim_send_seconds(const mt_options *o, int64_t ranks, const mt_machine *machine) {
    int64_t pp = o->pipeline_model_parallel_size, tokens = mt_sim_plan(o).max_tokens;
    if (o->sequence_parallel) tokens /= o->tensor_model_parallel_size;
    mt_span_of_hosts span = {2, 2, 1};
    if (ranks / pp * (pp - 1) >= machine->gpus_per_host) span = (mt_span_of_hosts){2, 1, 2};
    return mt_machine_collective_seconds(machine, MT_MESSAGE, 2 * (double)(tokens * o->hidden_size), &span);
}

/* The schedule of all ranks, with the times of each. One of many micro-batches waits as long as one of a few rounds. */
static mt_timeline mt_sim_timeline(const mt_simulation *simulation, const mt_options *o, double send) {
    int64_t pp = o->pipeline_model_parallel_size, vp = o->num_virtual_stages_per_pipeline_rank;
    mt_schedule schedule = mt_schedule_of(o, mt_num_micro_batches(o));
    int64_t round = vp > 1 ? schedule.group : 1, most = mt_divide_up(4 * pp, round) * round;
    if (schedule.micro_batches > most) schedule.micro_batches = most;
    mt_action_costs *costs = mt_calloc(pp * vp * (int64_t)sizeof *costs);
    for (int64_t rank = 0; rank < pp; rank++)
        for (int64_t chunk = 0; chunk < vp; chunk++) {
            const mt_simulated_rank *r = &simulation->pipeline[simulation->of[rank]];
            costs[rank * vp + chunk] =
                (mt_action_costs){r->forward[chunk], r->backward[chunk], r->weights[chunk], send};
        }
    mt_timeline timeline;
    MT_CHECK(mt_timeline_create_uneven(&timeline, &schedule, costs, 0) == 0);
    free(costs);
    return timeline;
}

/* Joins the ranks by their schedule. */
static void mt_sim_join(mt_simulation *simulation, const mt_options *o, int64_t ranks, const mt_machine *machine) {
    mt_timeline timeline = mt_sim_timeline(simulation, o, mt_sim_send_seconds(o, ranks, machine));
    // Idle time does not grow with the micro-batches left out, work does.
    simulation->bubble = timeline.bubble * (double)timeline.schedule.micro_batches / (double)mt_num_micro_batches(o);
    for (int64_t rank = 0; rank < simulation->pipeline_ranks; rank++) {
        mt_simulated_rank *r = &simulation->pipeline[simulation->of[rank]];
        int64_t last = timeline.first[rank + 1] - 1;
        double work = 0;
        for (int64_t i = timeline.first[rank]; i <= last; i++) {
            const mt_action *action = &timeline.actions[i];
            if (action->peer < 0) work += timeline.end[i] - timeline.start[i];
        }
        if (timeline.end[last] - work > r->idle_before) r->idle_before = timeline.end[last] - work, r->last = rank;
    }
    mt_timeline_free(&timeline);
}

/* Adds the computation of a rank beside a message of `seconds` from `at`: from action i on, or before it. */
static void mt_sim_add_behind(double *behind, const mt_timeline *t, int64_t rank, int64_t i, bool before, double at,
                              double seconds) {
    for (int64_t step = before ? -1 : 1; i >= t->first[rank] && i < t->first[rank + 1]; i += step) {
        double from = fmax(t->start[i], at), to = fmin(t->end[i], at + seconds);
        if (before ? t->end[i] < at : t->start[i] > at + seconds) return;
        if (t->actions[i].kind <= MT_ACTION_BACKWARD_WEIGHT && to > from) behind[t->actions[i].kind] += to - from;
    }
}

/* Messages of a rank, and the computation of this rank while they are under way. A receive is of a message that its
 * peer sent earlier, in the same order. */
static void mt_sim_count_messages(mt_simulated_message *messages, const mt_timeline *t, int64_t rank, double seconds) {
    int64_t sent[2] = {-1, -1}, count[MT_ACTION_RECV_BACKWARD + 1] = {0};
    for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
        const mt_action *action = &t->actions[i];
        if (action->kind <= MT_ACTION_BACKWARD_WEIGHT) continue;
        bool gradients = action->kind == MT_ACTION_SEND_BACKWARD || action->kind == MT_ACTION_RECV_BACKWARD;
        mt_action_kind send = gradients ? MT_ACTION_SEND_BACKWARD : MT_ACTION_SEND_FORWARD;
        double at = t->end[i];
        if (action->kind != send) {
            int64_t *j = &sent[gradients];
            for (*j = *j < 0 ? t->first[action->peer] : *j + 1; t->actions[*j].kind != send;) ++*j;
            at = t->end[*j];
        }
        messages[action->kind].seconds = seconds, count[action->kind]++;
        mt_sim_add_behind(messages[action->kind].behind, t, rank, i, action->kind != send, at, seconds);
    }
    for (int kind = MT_ACTION_SEND_FORWARD; kind <= MT_ACTION_RECV_BACKWARD; kind++)
        for (int i = 0; i <= MT_ACTION_BACKWARD_WEIGHT && count[kind] > 0; i++)
            messages[kind].behind[i] /= (double)count[kind];
}

int mt_simulate_check(const mt_options *o, mt_error *error) {
    const mt_constraint rules[] = {
        {!o->bf16 && !o->fp16, "a step is timed in bf16 or fp16, or in fp8 beside it: take --bf16"},
        {o->stage > MT_STAGE_SFT, "only --stage pt and sft are timed"},
        {o->rerun_mode != MT_RERUN_DISABLED, "--rerun-mode is not timed; leave it out"},
        {o->attention_backend == MT_ATTENTION_UNFUSED, "--attention-backend unfused is not timed; leave it out"},
        {o->attention_backend == MT_ATTENTION_CUDNN, "--attention-backend cudnn is not timed; leave it out"},
        {o->fp8_format && o->fp8_recipe == MT_FP8_MXFP8,
         "--fp8-recipe mxfp8 is not timed; take blockwise, whose scales are in blocks too"},
        {o->dynamic_context_parallel,
         "--dynamic-context-parallel is not timed, as its time depends on the samples; leave it out to time rows of "
         "--seq-length on --context-parallel-size ranks"},
        {o->encoder_num_layers > 0, "an encoder-decoder is not timed so far: the planner has no inputs of an encoder"},
        {o->vision.tower != MT_VISION_NONE,
         "a vision tower is not timed so far: the planner has no images; plan the decoder by --language-model-only"},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

int mt_simulate_check_device(const mt_options *o, const mt_machine *machine, mt_error *error) {
    mt_limits limits = mt_sim_limits(machine);
    return mt_options_check_limits(o, &limits, error);
}

int mt_simulate(mt_simulation *simulation, const mt_options *o, int64_t ranks, const mt_machine *machine,
                mt_error *error) {
    mt_machine job = *machine;
    job.gpus = ranks;
    *simulation = (mt_simulation){.model_flops = mt_flops(o, o->global_batch_size)};
    if (mt_simulate_check(o, error) != 0) return MT_SIMULATION_FAILED;
    simulation->micro_batches = mt_num_micro_batches(o);
    int status = 0;
    mt_sim_list_ranks(simulation, o);
    bool limited = machine->memory_gib < INFINITY;
    for (int64_t i = 0; i < simulation->num_ranks && limited && status == 0; i++) // the first needs most as a rule
        status = mt_sim_measure(simulation, &simulation->pipeline[i], o, ranks, &job, error);
    for (int64_t i = simulation->num_ranks - 1; i >= 0 && status == 0; i--) // rank 0 last: its calls remain
        status = mt_sim_rank(simulation, &simulation->pipeline[i], o, ranks, &job, error);
    if (status == 0 && o->pipeline_model_parallel_size > 1) mt_sim_join(simulation, o, ranks, &job);
    for (int64_t i = 0; i < simulation->num_ranks && status == 0; i++) {
        mt_simulated_rank *r = &simulation->pipeline[i];
        r->parts[MT_STEP_PART_BUBBLE] = r->idle_before;
        if (r->seconds + r->idle_before > simulation->seconds)
            simulation->seconds = r->seconds + r->idle_before, simulation->slowest = i;
    }
    if (status != 0) return status;
    double tokens = (double)(o->global_batch_size * mt_row_length(o));
    simulation->tokens_per_second = tokens / simulation->seconds;
    simulation->mfu = simulation->model_flops / simulation->seconds / (double)ranks / machine->bf16_peak_tflops;
    return 0;
}

int mt_simulate_rank(mt_simulated_rank *r, mt_simulated_message messages[MT_ACTION_RECV_BACKWARD + 1],
                     const mt_simulation *simulation, const mt_options *o, int64_t ranks, const mt_machine *machine,
                     mt_error *error) {
    mt_machine job = *machine;
    mt_simulation unused = {0};
    job.gpus = ranks;
    memset(messages, 0, (MT_ACTION_RECV_BACKWARD + 1) * sizeof *messages);
    int status = mt_sim_rank(&unused, r, o, ranks, &job, error);
    free(r->forward), r->forward = r->backward = r->weights = NULL;
    if (status != 0) return -1;
    r->parts[MT_STEP_PART_BUBBLE] = fmax(simulation->seconds - r->seconds, 0);
    if (simulation->pipeline_ranks == 1) return 0;
    double send = mt_sim_send_seconds(o, ranks, &job);
    mt_timeline timeline = mt_sim_timeline(simulation, o, send);
    mt_sim_count_messages(messages, &timeline, r->rank, send);
    mt_timeline_free(&timeline);
    return 0;
}

void mt_simulation_free(mt_simulation *simulation) {
    for (int64_t i = 0; i < simulation->num_ranks; i++) free(simulation->pipeline[i].forward);
    free(simulation->pipeline), free(simulation->of);
    *simulation = (mt_simulation){0};
}

const mt_simulated_call *mt_simulated_calls(int64_t *count) {
    *count = mt_device_model.num_calls;
    return mt_device_model.calls;
}

const mt_profile_phase *mt_simulated_phases(int64_t *count) {
    *count = mt_device_model.num_phases;
    return mt_device_model.phases;
}

const char *mt_operation_name(mt_operation operation) {
#define MT_OPERATION_TEXT(name, ...) #name,
    static const char *const names[] = {MT_ALL_OPERATIONS(MT_OPERATION_TEXT)};
#undef MT_OPERATION_TEXT
    return names[operation];
}
