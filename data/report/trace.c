/* trace.c: the timeline of some training steps on every rank. Every rank writes its part as text; rank 0 joins the
 * parts in a file. Invariants: boxes of one thread do not overlap, except phases, which lie inside their step; times
 * are those of rank 0's clock. */
#include "trace.h"

#include "../base/file.h"
#include "profile.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { TRACE_LANES = 64 };

/* A box of the timeline; a lane is a thread of the trace. Numbers are -1 where there is none. */
typedef struct trace_event {
    const char *name;
    int lane;
    double from, to;
    int64_t micro_batch, chunk, message, iteration;
    bool sends;
    double flops, bytes;
} trace_event;

typedef struct trace_lane {
    mt_traffic traffic;
    bool sends;
    const mt_stream *stream;
    double until; // end of its last box
} trace_lane;

static struct {
    const char *path; // NULL: no trace is open
    const mt_grid *grid;
    int64_t iteration;             // of the job, before this run
    int64_t step, first, last;     // steps of this run, from 1
    double clock_offset;           // to rank 0's clock
    int cores;                     // that the ranks share; 0: unknown, or the ranks are on several hosts
    trace_lane lanes[TRACE_LANES]; // lane 0 has the phases
    int num_lanes;
    trace_event *events;
    int64_t num_events, max_events;
} trace;

/* ---- clocks */

double mt_clock_offset(const mt_group *world, double (*clock)(void)) {
    enum { ROUNDS = 32 };
    double offset = 0, fastest = INFINITY;
    for (int rank = 1; rank < world->size; rank++)
        for (int round = 0; round < ROUNDS; round++) {
            double asked, answer = 0;
            if (world->rank == 0) {
                mt_receive(world, &asked, sizeof asked, rank);
                answer = clock();
                mt_send(world, &answer, sizeof answer, rank);
            } else if (world->rank == rank) {
                asked = clock();
                mt_send(world, &asked, sizeof asked, 0);
                mt_receive(world, &answer, sizeof answer, 0);
                double answered = clock();
                if (answered - asked >= fastest) continue;
                fastest = answered - asked;
                offset = answer - (asked + answered) / 2;
            }
        }
    return offset;
}

/* True if all ranks run on one kernel, and so share its clock. */
static bool clock_is_shared(const mt_group *world) {
    char own[64] = "", first[64];
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        if (!fgets(own, sizeof own, file)) own[0] = '\0';
        fclose(file);
    }
    memcpy(first, own, sizeof own);
    mt_broadcast(world, first, sizeof first, 0);
    return own[0] && strcmp(own, first) == 0;
}

/* The number of cores on which at least one rank of `world` may run, for ranks on one host; 0 if it is unknown. */
static int count_cores(const mt_group *world) {
#ifdef CPU_SETSIZE
    double mine[CPU_SETSIZE] = {0}; // 1: this rank may run on the core
    int cores = 0;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        for (int core = 0; core < CPU_SETSIZE; core++) mine[core] = CPU_ISSET(core, &allowed) != 0;
    mt_all_reduce_max(world, mine, CPU_SETSIZE, MT_F64);
    for (int core = 0; core < CPU_SETSIZE; core++) cores += mine[core] > 0;
    return cores;
#else
    (void)world;
    return 0;
#endif
}

/* ---- recording */

int mt_trace_open(const mt_run_options *options, const mt_grid *grid, const mt_run_state *state, mt_error *error) {
    int64_t steps = options->stack.num_iterations - state->iteration;
    MT_CHECK(mt_profile_read()->backend && options->trace);
    if (options->trace_first_step > steps)
        return mt_error_set(error, "--trace-first-step %lld comes after this run's last step (step %lld)",
                            (long long)options->trace_first_step, (long long)steps);
    mt_new_file file = {0};
    int status = grid->world.rank == 0 ? mt_new_file_open(&file, options->trace, "--trace", error) : 0;
    mt_error ignored;
    mt_new_file_close(&file, -1, &ignored); // removes it: only a test
    if (grid->world.rank == 0 && status == 0) mt_new_file_note(options->trace, "--trace");
    if (mt_agree(&grid->world, status != 0, error) != 0) return -1;
    double offset = mt_clock_offset(&grid->world, mt_time);
    trace.path = options->trace;
    trace.grid = grid;
    trace.iteration = state->iteration;
    trace.step = 0;
    trace.first = options->trace_first_step;
    trace.last = options->trace_last_step < steps ? options->trace_last_step : steps;
    bool one_host = clock_is_shared(&grid->world);
    int cores = count_cores(&grid->world);
    trace.clock_offset = one_host ? 0 : offset;
    trace.cores = one_host ? cores : 0;
    trace.num_lanes = 1;
    return 0;
}

bool mt_trace_is_open(void) {
    return trace.path != NULL;
}

bool mt_trace_is_complete(void) {
    return trace.path && trace.step >= trace.last;
}

/* The lane of a call: one for each kind of traffic on each stream, with sends apart. */
static int find_lane(const mt_profile_call *call) {
    trace_lane lane = {call->work.traffic, call->sends, call->stream, 0};
    for (int i = 1; i < trace.num_lanes; i++) {
        const trace_lane *other = &trace.lanes[i];
        if (other->traffic == lane.traffic && other->sends == lane.sends && other->stream == lane.stream) return i;
    }
    MT_CHECK(trace.num_lanes < TRACE_LANES);
    trace.lanes[trace.num_lanes] = lane;
    return trace.num_lanes++;
}

static trace_event *add_event(const char *name, int lane, double from, double to) {
    if (trace.num_events == trace.max_events) {
        trace.max_events = trace.max_events > 0 ? 2 * trace.max_events : 1024;
        trace.events = mt_realloc(trace.events, trace.max_events * (int64_t)sizeof *trace.events);
    }
    trace_event *event = &trace.events[trace.num_events++];
    *event = (trace_event){.name = name, .lane = lane};
    event->from = from + trace.clock_offset, event->to = to + trace.clock_offset;
    event->micro_batch = event->chunk = event->message = event->iteration = -1;
    return event;
}

bool mt_trace_step_begin(void) {
    if (!trace.path) return false;
    trace.step++;
    return trace.step >= trace.first - 1 && trace.step <= trace.last;
}

/* Adds the step, its phases and its calls. A message waits for earlier ones on its stream, so its box begins after
 * theirs. */
void mt_trace_step_end(void) {
    if (!trace.path || trace.step < trace.first || trace.step > trace.last) return;
    const mt_profile_step *step = mt_profile_last_step();
    int64_t whole = trace.num_events;
    double last = step->end;
    add_event("step", 0, step->begin, step->end)->iteration = trace.iteration + trace.step;
    for (int64_t i = 0; i < step->num_phases; i++) {
        const mt_profile_phase *phase = &step->phases[i];
        trace_event *event = add_event(phase->name, 0, phase->from, phase->to);
        event->micro_batch = phase->micro_batch, event->chunk = phase->chunk;
        last = fmax(last, phase->to);
    }
    for (int64_t i = 0; i < step->num_calls; i++) {
        const mt_profile_call *call = &step->calls[i];
        const mt_profile_phase *phase = call->phase >= 0 ? &step->phases[call->phase] : NULL;
        int lane = find_lane(call);
        double from = fmax(call->from, trace.lanes[lane].until), to = fmax(call->to, from);
        trace_event *event = add_event(mt_profile_read()->rows[call->operation].name, lane, from, to);
        if (phase) event->micro_batch = phase->micro_batch, event->chunk = phase->chunk;
        event->message = call->message, event->sends = call->sends;
        event->flops = call->work.flops, event->bytes = call->work.bytes;
        trace.lanes[lane].until = to;
        last = fmax(last, to);
    }
    trace.events[whole].to = last + trace.clock_offset; // a GPU's clock may be microseconds ahead of the host's
}

/* ---- writing */

/* Writes a name, or the place in the order of names, of a rank (process) or of one of its lanes (thread). */
static void write_name(FILE *text, int rank, int lane, const char *key, const char *name) {
    fprintf(text, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}},\n", rank, lane, key,
            name);
}

static void write_order(FILE *text, int rank, int lane, const char *key, int order) {
    fprintf(text, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"sort_index\":%d}},\n", rank, lane,
            key, order);
}

/* Names and order of a rank and its lanes, for viewers. */
static void write_names(FILE *text) {
    static const char *const names[MT_NUM_TRAFFICS] = {"compute",          "tensor communication", "gradient reduction",
                                                       "parameter gather", "context ring",         "pipeline receives",
                                                       "experts",          "loss and norm"};
    const mt_grid *grid = trace.grid;
    int rank = grid->world.rank;
    char name[128];
    snprintf(name, sizeof name, "rank %d: tp %d cp %d pp %d dp %d", rank, grid->tensor.rank, grid->context.rank,
             grid->pipeline.rank, grid->data.rank);
    write_name(text, rank, 0, "process_name", name);
    write_order(text, rank, 0, "process_sort_index", rank);
    write_name(text, rank, 0, "thread_name", "phases");
    for (int i = 1; i < trace.num_lanes; i++) {
        const trace_lane *lane = &trace.lanes[i];
        int number = 1;
        for (int k = 1; k < i; k++)
            number += trace.lanes[k].traffic == lane->traffic && trace.lanes[k].sends == lane->sends;
        bool pipeline = lane->traffic == MT_TRAFFIC_PIPELINE;
        int length =
            snprintf(name, sizeof name, "%s%s", lane->sends && pipeline ? "pipeline sends" : names[lane->traffic],
                     lane->sends && !pipeline ? " (sends)" : "");
        if (number > 1) snprintf(name + length, sizeof name - (size_t)length, ", stream %d", number);
        write_name(text, rank, i, "thread_name", name);
        write_order(text, rank, i, "thread_sort_index", 1 + TRACE_LANES * (2 * (int)lane->traffic + lane->sends) + i);
    }
}

/* A time in the format's microseconds, with nanoseconds as decimals. */
static void write_time(FILE *text, const char *key, int64_t nanoseconds) {
    fprintf(text, ",\"%s\":%lld.%03lld", key, (long long)(nanoseconds / 1000), (long long)(nanoseconds % 1000));
}

/* A box, and for a message one end of the arrow from the sender's box to the receiver's. */
static void write_event(const trace_event *event, int rank, double origin, FILE *text) {
    int64_t from = llround(1e9 * (event->from - origin)), to = llround(1e9 * (event->to - origin));
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"iteration", event->iteration}, {"micro_batch", event->micro_batch}, {"chunk", event->chunk}};
    const char *comma = "";
    fprintf(text, "{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\"", rank, event->lane, event->name);
    write_time(text, "ts", from);
    write_time(text, "dur", to - from);
    fprintf(text, ",\"args\":{");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].value >= 0)
            fprintf(text, "%s\"%s\":%lld", comma, numbers[i].name, (long long)numbers[i].value), comma = ",";
    if (event->flops > 0) fprintf(text, "%s\"flops\":%.17g", comma, event->flops), comma = ",";
    if (event->bytes > 0) fprintf(text, "%s\"bytes\":%.17g", comma, event->bytes);
    fprintf(text, "}},\n");
    bool waits_to_send = event->sends && strcmp(event->name, "channel_wait") == 0;
    if (event->message < 0 || waits_to_send) return;
    fprintf(text, "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"cat\":\"message\",\"name\":\"message\",\"id\":%lld",
            event->sends ? "s" : "f\",\"bp\":\"e", rank, event->lane, (long long)event->message);
    write_time(text, "ts", event->sends || from > to - 1 ? from : to - 1);
    fprintf(text, "},\n");
}

/* This rank's part of the file, to free; rank 0's has the beginning of the file. */
static char *print_part(double origin, size_t *bytes) {
    char *memory;
    FILE *text = open_memstream(&memory, bytes);
    int rank = trace.grid->world.rank;
    if (!text) mt_die("no memory for a trace");
    if (rank == 0) {
        fprintf(text, "{\"displayTimeUnit\":\"ms\",");
        if (trace.cores > 0) fprintf(text, "\"otherData\":{\"cores\":%d},", trace.cores);
        fprintf(text, "\"traceEvents\":[\n");
    }
    write_names(text);
    for (int64_t i = 0; i < trace.num_events; i++) write_event(&trace.events[i], rank, origin, text);
    if (fclose(text) != 0) mt_die("no memory for a trace");
    return memory;
}

/* On rank 0: writes its own part, then receives and writes the others' parts; receives them also if the disk is full.
 */
static int write_file(const char *text, size_t bytes, mt_error *error) {
    const mt_group *world = &trace.grid->world;
    mt_new_file file;
    char end[256];
    int status = mt_new_file_open(&file, trace.path, "--trace", error);
    if (status == 0) status = mt_new_file_write(&file, text, (int64_t)bytes, error);
    for (int rank = 1; rank < world->size; rank++) {
        int64_t length = 0;
        mt_receive(world, &length, sizeof length, rank);
        char *part = mt_malloc(length);
        mt_receive(world, part, length, rank);
        if (status == 0) status = mt_new_file_write(&file, part, length, error);
        free(part);
    }
    // the last part ends with a comma, so one more item follows: the backend
    int length =
        snprintf(end, sizeof end,
                 "{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"process_labels\",\"args\":{\"labels\":\"%s\"}}\n]}\n",
                 mt_profile_read()->backend);
    if (status == 0) status = mt_new_file_write(&file, end, length, error);
    return mt_new_file_close(&file, status, error);
}

int mt_trace_write(mt_error *error) {
    const mt_group *world = &trace.grid->world;
    double first = trace.num_events > 0 ? -trace.events[0].from : -INFINITY;
    size_t bytes;
    int status = 0;
    mt_all_reduce_max(world, &first, 1, MT_F64); // time 0 is the earliest begin of all ranks
    char *text = print_part(-first, &bytes);
    int64_t length = (int64_t)bytes;
    if (world->rank == 0)
        status = write_file(text, bytes, error);
    else {
        mt_send(world, &length, sizeof length, 0);
        mt_send(world, text, length, 0);
    }
    free(text);
    free(trace.events);
    memset(&trace, 0, sizeof trace);
    return mt_agree(world, status != 0, error);
}
