/* report.c: reports of a training run: lines on the terminal, a metrics file, event files for TensorBoard. */
#include "report.h"

#include "../base/file.h"
#include "../base/safetensors.h"
#include "../base/signals.h"
#include "../base/watchdog.h"
#include "../options/option_rules.h"
#include "../options/option_typed.h"
#include "../datasets/gpt_dataset.h"
#include "../datasets/packing.h"
#include "../models/hf_config.h"
#include "../checkpoint/resume.h"
#include "profile.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#endif

/* A number of a report, with its TensorBoard tag, as Megatron names it, and its key in the metrics file. */
typedef struct scalar {
    char tag[160], key[160];
    double value;
} scalar;

typedef struct scalar_list {
    scalar items[21 + MT_MAX_MTP_LAYERS + MT_MAX_LOSS_METRICS + MT_MAX_REPORT_NUMBERS];
    int64_t count;
} scalar_list;

static void add_scalar(scalar_list *list, const char *tag, const char *key, double value) {
    scalar *item = &list->items[list->count++];
    snprintf(item->tag, sizeof item->tag, "%s", tag);
    snprintf(item->key, sizeof item->key, "%s", key);
    item->value = value;
}

/* ---- files that grow while the run trains
 *
 * A record is a line of the metrics or an event. It is written at once, for programs that read while the run trains. A
 * full disk must not end a run: the first failure is reported, a record that was written in part is cut off again, and
 * the next record is tried as before. */

static void report_file_close(mt_report_file *file) {
    if (file->option) close(file->descriptor);
    file->option = NULL;
}

/* Waits until a full pipe or device takes more; false if nobody reads it for ten seconds, or once it has failed. */
static bool report_file_wait(const mt_report_file *file) {
    struct pollfd writable = {.fd = file->descriptor, .events = POLLOUT};
    const int milliseconds = file->failed ? 0 : 10000;
    int ready = poll(&writable, 1, milliseconds);
    if (ready < 0 && errno == EINTR) ready = poll(&writable, 1, 0); // a signal that stops the run
    errno = EAGAIN;
    return ready > 0;
}

/* Writes one record. */
static void report_file_write(mt_report_file *file, const void *data, int64_t bytes) {
    struct stat before;
    if (!file->option) return;
    int watched = mt_watch_file_begin(file->path, MT_FILE_WRITE);
    bool regular = fstat(file->descriptor, &before) == 0 && S_ISREG(before.st_mode);
    for (int64_t done = 0; done < bytes;) {
        ssize_t wrote = write(file->descriptor, (const char *)data + done, (size_t)(bytes - done));
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote < 0 && errno == EAGAIN && report_file_wait(file)) continue;
        if (wrote > 0) {
            done += wrote;
            continue;
        }
        mt_error error;
        if (errno == EAGAIN)
            mt_error_set(&error, "%s: cannot be written: nobody reads this pipe", file->path);
        else
            mt_file_write_error(&error, file->path, file->option);
        if (!file->failed) fprintf(stderr, "warning: %s; training goes on without these records\n", error.text);
        file->failed = true;
        if (regular && ftruncate(file->descriptor, before.st_size) != 0) // a torn record would spoil the next one
            report_file_close(file);
        break;
    }
    mt_watch_file_end(watched);
}

static int report_file_open(mt_report_file *file, const char *path, const char *option, int flags, mt_error *error) {
    snprintf(file->path, sizeof file->path, "%s", path);
    int watched = mt_watch_file_begin(file->path, MT_FILE_WRITE);
    file->descriptor = open(path, O_CREAT | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | flags, 0666);
    mt_watch_file_end(watched);
    if (file->descriptor < 0) return mt_file_write_error(error, path, option);
    file->option = option;
    return 0;
}

static const char record_start[] = "{\"iteration\":";

/* The iteration of a record of the metrics; -1 for a line that is none. */
static int64_t record_iteration(const char *record) {
    char *end;
    if (strncmp(record, record_start, sizeof record_start - 1) != 0) return -1;
    long long iteration = strtoll(record + sizeof record_start - 1, &end, 10);
    return *end == ',' || *end == '}' ? iteration : -1;
}

/* True if the end of a file may be a record that a crash cut off; bytes that never reached the disk are zero. */
static bool record_is_torn(const char *end, int64_t bytes) {
    size_t length = strnlen(end, (size_t)bytes);
    return strncmp(end, record_start, length < sizeof record_start - 1 ? length : sizeof record_start - 1) == 0;
}

/* Keeps the whole records of iterations up to `last` in a metrics file of `size` bytes. Unless the file is the run's
 * own, it must end with iteration `last`: another run's records stay. */
static int metrics_keep(mt_report_file *file, int64_t size, int64_t last, bool is_own, mt_error *error) {
    char *text = mt_malloc(size + 1), *record = text, *end;
    int64_t kept = 0, unchanged = 0, number = 1, latest = 0; // number: of the line
    int status = mt_file_read_at(file->descriptor, text, size, 0);
    bool is_record = true;
    if (status != 0) mt_file_read_error(error, file->path);
    text[size] = '\0';
    for (; status == 0 && (end = memchr(record, '\n', (size_t)(text + size - record))) != NULL;
         record = end + 1, number++) {
        int64_t iteration = record_iteration(record), bytes = end + 1 - record;
        is_record = iteration >= 0;
        if (!is_record) break;
        latest = mt_max(latest, iteration);
        if (iteration > last) continue;
        if (record == text + kept) unchanged += bytes;
        memmove(text + kept, record, (size_t)bytes);
        kept += bytes;
    }
    if (status == 0 && (!is_record || !record_is_torn(record, text + size - record)))
        status = mt_error_set(error, "%s: line %lld is no record of --metrics; choose another --metrics%s", file->path,
                              (long long)number, number > 1 ? ", or replace it by --overwrite" : "");
    if (status == 0 && !is_own && latest != last)
        status = mt_error_set(error,
                              "%s: holds metrics up to iteration %lld, and this run, which does not load from its own "
                              "--save, starts after iteration %lld; choose another --metrics, or replace it by "
                              "--overwrite",
                              file->path, (long long)latest, (long long)last);
    if (status == 0 && unchanged < size) {
        if (ftruncate(file->descriptor, unchanged) != 0)
            status = mt_file_write_error(error, file->path, "--metrics");
        else
            report_file_write(file, text + unchanged, kept - unchanged);
    }
    free(text);
    return status;
}

/* Renames the file of --metrics to the first free name of FILE.1, FILE.2, ... and opens a new one. */
static int metrics_set_aside(mt_report *report, mt_error *error) {
    const char *path = report->options->metrics;
    char aside[4096];
    int number = 1;
    do snprintf(aside, sizeof aside, "%s.%d", path, number);
    while (number++ < 10000 && access(aside, F_OK) == 0);
    if (rename(path, aside) != 0) return mt_file_write_error(error, aside, "--metrics");
    report_file_close(&report->metrics);
    mt_report_line(report, "%s is now %s: this run starts at iteration 0", path, aside);
    return report_file_open(&report->metrics, path, "--metrics", O_RDWR, error);
}

/* Empties a file of metrics; a file that begins otherwise may be the user's only copy of something. */
static int metrics_empty(const mt_report_file *file, mt_error *error) {
    char start[64];
    ssize_t bytes = pread(file->descriptor, start, sizeof start - 1, 0);
    start[bytes > 0 ? bytes : 0] = '\0';
    if (bytes > 0 && record_iteration(start) < 0 && !record_is_torn(start, bytes))
        return mt_error_set(error,
                            "%s: line 1 is no record of --metrics, so --overwrite does not replace the file; choose "
                            "another --metrics",
                            file->path);
    return bytes < 0 || ftruncate(file->descriptor, 0) != 0 ? mt_file_write_error(error, file->path, "--metrics") : 0;
}

/* Opens --metrics. A run that continues appends, after the records of later iterations, which it repeats, and a line
 * that a crash left torn are removed. Another run's lines stay: the file is refused, unless --overwrite is given. With
 * --auto-resume, a run that failed before its first checkpoint starts anew, and its file is set aside. */
static int metrics_open(mt_report *report, const mt_run_state *state, mt_error *error) {
    const mt_run_options *o = report->options;
    struct stat status;
    if (report_file_open(&report->metrics, o->metrics, "--metrics", O_RDWR, error) != 0) return -1;
    int descriptor = report->metrics.descriptor;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) return 0;
    bool is_own = !o->save || mt_checkpoint_continues(o); // without --save: the run that is loaded
    if (state->iteration > 0 && (is_own || !o->overwrite))
        return metrics_keep(&report->metrics, status.st_size, state->iteration, is_own, error);
    if (!o->auto_resume && !o->overwrite)
        return mt_error_set(error,
                            "%s: holds the metrics of another run; choose another --metrics, replace it by "
                            "--overwrite, or continue that run by --load",
                            o->metrics);
    if (!o->overwrite) return metrics_set_aside(report, error);
    return metrics_empty(&report->metrics, error);
}

/* ---- TensorBoard
 *
 * An event file is a list of TFRecords (TensorFlow, "TFRecord and tf.train.Example"). Each holds a message of
 * event.proto in the wire format of protocol buffers: a key with field number and kind, then a varint, 4 or 8 bytes, or
 * a length and as many bytes. Few fields are needed, so this code writes them itself. */

/* CRC-32C, masked as the format demands. */
static uint32_t masked_crc(const void *data, int64_t bytes) {
    uint32_t crc = mt_crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* A message under construction; an event takes much less than 4096 bytes. */
typedef struct message {
    int64_t bytes;
    uint8_t data[4096];
} message;

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

static void message_bytes(message *to, const void *data, int64_t bytes) {
    MT_CHECK(to->bytes + bytes <= (int64_t)sizeof to->data);
    memcpy(to->data + to->bytes, data, (size_t)bytes);
    to->bytes += bytes;
}

static void message_varint(message *to, uint64_t value) {
    do {
        uint8_t byte = (uint8_t)(value & 127) | (uint8_t)(value > 127 ? 128 : 0);
        message_bytes(to, &byte, 1);
    } while ((value >>= 7) > 0);
}

/* A field of fixed size or of bytes. Numbers are little-endian, as are the machines that this runs on. */
static void message_field(message *to, int field, int wire, const void *data, int64_t bytes) {
    message_varint(to, (uint64_t)(field << 3 | wire));
    if (wire == WIRE_BYTES) message_varint(to, (uint64_t)bytes);
    message_bytes(to, data, bytes);
}

/* Event.wall_time = 1, step = 2. */
static message event_begin(int64_t step) {
    message event = {0};
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double wall_time = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    message_field(&event, 1, WIRE_64, &wall_time, 8);
    message_varint(&event, 2 << 3 | WIRE_VARINT);
    message_varint(&event, (uint64_t)step);
    return event;
}

/* Writes a record: length, its checksum, message, its checksum. */
static void event_write(mt_report *report, const message *event) {
    uint64_t length = (uint64_t)event->bytes;
    uint32_t of_length = masked_crc(&length, 8), of_data = masked_crc(event->data, event->bytes);
    uint8_t record[sizeof event->data + 16];
    memcpy(record, &length, 8);
    memcpy(record + 8, &of_length, 4);
    memcpy(record + 12, event->data, (size_t)event->bytes);
    memcpy(record + 12 + event->bytes, &of_data, 4);
    report_file_write(&report->events, record, event->bytes + 16);
}

/* Every start of a run has a file of its own; TensorBoard joins the files of a folder. */
static int tensorboard_open(mt_report *report, mt_error *error) {
    static const char version[] = "brain.Event:2";
    const char *folder = report->options->tensorboard_dir;
    char host[64] = "host", path[4096];
    struct timespec now;
    gethostname(host, sizeof host - 1);
    clock_gettime(CLOCK_REALTIME, &now);
    if (mt_folder_create(folder, "--tensorboard-dir", error) != 0) return -1;
    snprintf(path, sizeof path, "%s/events.out.tfevents.%lld.%s.%lld.%09ld", folder, (long long)now.tv_sec, host,
             (long long)getpid(), now.tv_nsec);
    if (report_file_open(&report->events, path, "--tensorboard-dir", O_WRONLY | O_EXCL, error) != 0) return -1;
    message event = event_begin(0);
    message_field(&event, 3, WIRE_BYTES, version, (int64_t)strlen(version)); // Event.file_version
    event_write(report, &event);
    return 0;
}

/* Event.summary = 5, Summary.value = 1, Value.tag = 1 and simple_value = 2. */
static void tensorboard_write(mt_report *report, int64_t step, const scalar_list *scalars) {
    message event = event_begin(step), summary = {0};
    for (int64_t i = 0; i < scalars->count; i++) {
        message value = {0};
        const char *tag = scalars->items[i].tag;
        float number = (float)scalars->items[i].value;
        message_field(&value, 1, WIRE_BYTES, tag, (int64_t)strlen(tag));
        message_field(&value, 2, WIRE_32, &number, 4);
        message_field(&summary, 1, WIRE_BYTES, value.data, value.bytes);
    }
    message_field(&event, 5, WIRE_BYTES, summary.data, summary.bytes);
    event_write(report, &event);
}

/* ---- iterations and evaluations */

int mt_report_open(mt_report *report, const mt_model *model, const mt_run_options *options, const mt_run_state *state,
                   mt_error *error) {
    const mt_group *world = &mt_model_grid(model)->world;
    *report = (mt_report){.options = options, .first_iteration = state->iteration};
    report->world_size = world->size;
    report->prints = world->rank == 0;
    report->loss_metrics = mt_model_get_plan(model)->loss->metrics;
#ifdef MT_HAVE_CUDA
    if (mt_model_ops(model)->on_device) {
        report->device_bytes = mt_model_bytes(model);
        report->peak_flops = mt_cuda_peak_flops(mt_model_dtype(model));
    }
#endif
    report->start = mt_time();
    if (!report->prints) return 0;
    if (options->tensorboard_dir && tensorboard_open(report, error) != 0) return -1;
    return options->metrics ? metrics_open(report, state, error) : 0;
}

void mt_report_close(mt_report *report) {
    report_file_close(&report->metrics);
    report_file_close(&report->events);
}

void mt_report_refusal(mt_grid *grid, const mt_run_options *options, int status, mt_error *error) {
    if (mt_agree(&grid->world, status != 0, error) == 0) return;
    mt_signals_note("", ""); // the first rank that ends has mpirun send the others a SIGTERM
    fflush(stdout);
    mt_options_name_typed(options, error);
    if (grid->world.rank == 0) fprintf(stderr, "error: %s\n", error->text);
    mt_grid_stop(grid);
    exit(1);
}

void mt_report_flush(void) {
    static bool failed;
    mt_error error;
    if (mt_file_flush_output(&error) == 0) return;
    bool stops = errno == EINTR || mt_stop_requested(); // then a line of its own has said so
    if (!failed && !stops)
        fprintf(stderr, "warning: %s; training goes on without the lines that it prints\n", error.text);
    failed = failed || !stops;
    clearerr(stdout); // there may be room for later lines
}

void mt_report_line(const mt_report *report, const char *format, ...) {
    if (!report->prints) return;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    mt_report_flush();
}

/* A line under construction. */
typedef struct line {
    char text[4096];
    int length;
} line;

static void append(line *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(line *to, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    to->length += vsnprintf(to->text + to->length, sizeof to->text - (size_t)to->length, format, arguments);
    va_end(arguments);
    MT_CHECK(to->length < (int)sizeof to->text);
}

/* Writes scalars as TensorBoard events and as a line of the metrics file, where JSON has null for infinities and NaN.
 */
static void write_scalars(mt_report *report, int64_t iteration, const scalar_list *scalars) {
    line text = {.length = 0};
    if (report->events.option) tensorboard_write(report, iteration, scalars);
    append(&text, "{\"iteration\": %lld", (long long)iteration);
    for (int64_t i = 0; i < scalars->count; i++) {
        const scalar *item = &scalars->items[i];
        char number[32] = "null";
        if (isfinite(item->value)) snprintf(number, sizeof number, "%.17g", item->value);
        append(&text, ", \"%s\": %s", item->key, number);
    }
    append(&text, "}\n");
    report_file_write(&report->metrics, text.text, text.length);
}

bool mt_report_is_due(const mt_report *report, int64_t iteration) {
    return iteration % report->options->log_interval == 0 || iteration == report->options->stack.num_iterations;
}

static double mean_mtp_loss(const mt_options *o, const mt_metrics *metrics) {
    double sum = 0;
    for (int64_t k = 0; k < o->mtp_num_layers; k++) sum += metrics->mtp_losses[k];
    return sum / (double)o->mtp_num_layers;
}

static double loss_metric(const mt_loss_metric *row, const mt_metrics *metrics) {
    double divisor = row->divisor < 0 ? metrics->loss_count : metrics->loss_metrics[row->divisor];
    return metrics->loss_metrics[row->number] / divisor;
}

/* The auxiliary losses, with the names of Megatron's scalars. */
static const struct {
    const char *on_line, *name;
} aux_losses[MT_NUM_AUX_LOSSES] = {{"aux loss", "load_balancing_loss"},
                                   {"seq aux loss", "seq_load_balancing_loss"},
                                   {"global aux loss", "global_load_balancing_loss"}};

static bool has_aux_loss(const mt_options *o, int i) {
    return mt_aux_loss_coeff(o, (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i)) > 0;
}

/* Appends the values that only some models have: those of the loss; the loss of multi-token prediction; that of the
 * indexers of sparse attention; with experts the auxiliary losses that are on, the balance of the loads, and the
 * dropped tokens. */
static void append_parts(line *to, const mt_report *report, const mt_metrics *metrics) {
    const mt_options *o = &report->options->stack;
    for (int64_t i = 0; i < report->num_numbers; i++)
        if (report->numbers[i].on_line) append(to, "  %s %.4g", report->numbers[i].name, report->numbers[i].value);
    if (report->untrained) return;
    for (const mt_loss_metric *row = report->loss_metrics; row && row->name; row++)
        append(to, "  %s %.4g", row->name, loss_metric(row, metrics));
    if (o->mtp_num_layers > 0) append(to, "  mtp loss %.4f", mean_mtp_loss(o, metrics));
    if (o->dsa_indexer_loss_coeff > 0) append(to, "  indexer loss %.3g", metrics->indexer_loss);
    if (mt_num_expert_layers(o) == 0) return;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++)
        if (has_aux_loss(o, i)) append(to, "  %s %.3g", aux_losses[i].on_line, metrics->aux_losses[i]);
    if (o->moe_z_loss_coeff > 0) append(to, "  z loss %.3g", metrics->z_loss);
    append(to, "  load %.2f (worst %.2f)", metrics->imbalance, metrics->worst_imbalance);
    if (o->moe_expert_capacity_factor > 0) append(to, "  dropped %.1f%%", 100 * metrics->dropped);
}

/* Its key has underscores for blanks. */
static void add_named(scalar_list *list, const char *name, double value) {
    char key[40];
    snprintf(key, sizeof key, "%s", name);
    for (char *c = key; *c; c++) *c = *c == ' ' ? '_' : *c;
    add_scalar(list, name, key, value);
}

/* Peak memory of this process, in bytes. */
static int64_t peak_memory(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (int64_t)usage.ru_maxrss * 1024;
}

/* Memory of this process that is in use, in bytes; 0: unknown. */
static int64_t resident_memory(void) {
    long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%*s %lld", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

/* `flops` are those of one rank per second. */
static void collect_scalars(scalar_list *all, const mt_report *report, const mt_run_state *state,
                            const mt_metrics *metrics, double flops) {
    int64_t bytes = report->device_bytes > 0 ? report->device_bytes : peak_memory();
    all->count = 0;
    if (!report->untrained) add_scalar(all, "lm loss", "lm_loss", metrics->loss);
    for (int64_t k = 1; k <= report->options->stack.mtp_num_layers; k++) {
        char tag[40], key[40];
        snprintf(tag, sizeof tag, "mtp_%lld loss", (long long)k);
        snprintf(key, sizeof key, "mtp_%lld_loss", (long long)k);
        add_scalar(all, tag, key, metrics->mtp_losses[k - 1]);
    }
    for (int64_t i = 0; i < report->num_numbers; i++) add_named(all, report->numbers[i].name, report->numbers[i].value);
    for (const mt_loss_metric *row = report->loss_metrics; row && row->name && !report->untrained; row++)
        add_named(all, row->name, loss_metric(row, metrics));
    if (!report->untrained) add_scalar(all, "grad-norm", "grad_norm", metrics->grad_norm);
    const mt_options *o = &report->options->stack;
    if (!report->untrained && o->fp16) add_scalar(all, "loss-scale", "loss_scale", metrics->loss_scale);
    if (!report->untrained && o->log_num_zeros_in_grad) add_scalar(all, "num-zeros", "num_zeros", metrics->num_zeros);
    if (!report->untrained && o->log_params_norm) add_scalar(all, "params-norm", "params_norm", metrics->params_norm);
    add_scalar(all, "learning-rate", "learning_rate", metrics->learning_rate);
    add_scalar(all, "weight-decay", "weight_decay", metrics->weight_decay);
    bool writes = report->options->stack.stage == MT_STAGE_RL; // its samples are the responses of the generator
    int64_t consumed =
        writes ? state->consumed_prompts * report->options->num_return_sequences : state->consumed_train_samples;
    add_scalar(all, "consumed-samples", "consumed_samples", (double)consumed);
    add_scalar(all, "tokens-per-second", "tokens_per_second", metrics->tokens / metrics->seconds);
    add_scalar(all, "throughput", "tflops_per_device", flops * 1e-12);
    add_scalar(all, "iteration-time-ms", "iteration_ms", 1e3 * metrics->seconds);
    add_scalar(all, "mem-max-allocated-bytes", "peak_memory_bytes", (double)bytes);
    if (report->options->log_memory_to_tensorboard)
        add_scalar(all, "mem-allocated-bytes", "memory_bytes",
                   (double)(report->device_bytes > 0 ? report->device_bytes : resident_memory()));
    add_scalar(all, "skipped-iterations", "skipped_iterations", (double)metrics->skipped);
    if (report->options->stack.dsa_indexer_loss_coeff > 0)
        add_scalar(all, "indexer loss", "indexer_loss", metrics->indexer_loss);
    if (mt_num_expert_layers(&report->options->stack) == 0) return;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++) // the first one always, for all that read it
        if (i == 0 || has_aux_loss(&report->options->stack, i))
            add_scalar(all, aux_losses[i].name, aux_losses[i].name, metrics->aux_losses[i]);
    add_scalar(all, "z_loss", "z_loss", metrics->z_loss);
    add_scalar(all, "load imbalance", "load_imbalance", metrics->imbalance);
    add_scalar(all, "worst load imbalance", "worst_load_imbalance", metrics->worst_imbalance);
    add_scalar(all, "dropped", "dropped", metrics->dropped);
}

static void append_rates(line *to, const mt_report *report, const mt_metrics *metrics, double flops) {
    const mt_options *o = &report->options->stack;
    append(to, "  grad norm %.3f", metrics->grad_norm);
    if (o->fp16) append(to, "  loss scale %.6g", metrics->loss_scale);
    if (o->log_num_zeros_in_grad) append(to, "  num zeros %.0f", metrics->num_zeros);
    if (o->log_params_norm) append(to, "  params norm %.3f", metrics->params_norm);
    append(to, "  lr %.2e  %.0f tokens/s", metrics->learning_rate, metrics->tokens / metrics->seconds);
    if (report->peak_flops > 0)
        append(to, "  %.1f%% MFU", 100 * flops / report->peak_flops);
    else
        append(to, "  %.1f GFLOP/s", flops * 1e-9);
}

/* Attention in plain C is slower than a product, so on the CPU the time is a lower bound. */
void mt_report_long_step(const mt_report *report, const mt_run_state *state) {
    const double few = 1e12, long_seconds = 60;
    const mt_run_options *o = report->options;
    if (!report->prints || state->iteration >= o->stack.num_iterations) return;
    int64_t samples = o->stack.stage == MT_STAGE_RL ? o->rollout_batch_size * o->num_return_sequences
                                                    : mt_global_batch_size(o, state->consumed_train_samples);
    double operations = mt_flops(&o->stack, samples) / report->world_size;
    if (operations < few) return;
    double rate = report->peak_flops > 0 ? report->peak_flops : mt_cpu_matmul_rate(512);
    double seconds = operations / rate;
    if (seconds < long_seconds) return;
    mt_report_line(report,
                   "long step: %s %.1e operations on each rank, %.1f %s at %.0f GFLOP/s, the rate of a matrix product "
                   "here; a signal that stops the run takes effect after a step",
                   o->sft || o->stack.stage == MT_STAGE_RL ? "up to" : "about", operations,
                   seconds / (seconds < 7200 ? 60 : 3600), seconds < 7200 ? "minutes" : "hours", rate * 1e-9);
}

void mt_report_iteration(mt_report *report, const mt_run_state *state, const mt_metrics *metrics) {
    const mt_options *o = &report->options->stack;
    long long iteration = state->iteration, total = o->num_iterations;
    if (!report->prints || !mt_report_is_due(report, iteration)) return;
    double flops =
        report->step_flops > 0 ? report->step_flops : mt_flops(o, 1) * metrics->tokens / (double)o->seq_length;
    flops /= metrics->seconds * report->world_size;
    double pace = (mt_time() - report->start) / (double)(iteration - report->first_iteration);
    long long left = (long long)(pace * (double)(total - iteration) + 0.5);
    line text = {.length = 0};
    append(&text, "%6lld/%lld %3d%%", iteration, total, (int)(100 * iteration / total));
    if (report->untrained)
        append(&text, "  no step: %s", report->untrained);
    else
        append(&text, "  loss %.4f", metrics->loss);
    append_parts(&text, report, metrics);
    if (!report->untrained) append_rates(&text, report, metrics, flops);
    if (metrics->skipped > 0) append(&text, "  %lld skipped", (long long)metrics->skipped);
    mt_report_line(report, "%s  %lld:%02lld left", text.text, left / 60, left % 60);
    scalar_list all;
    collect_scalars(&all, report, state, metrics, flops);
    write_scalars(report, iteration, &all);
}

void mt_report_evaluation(mt_report *report, const mt_run_state *state, const char *split, double loss) {
    scalar_list all = {.count = 0};
    bool of_tokens = !report->loss_metrics; // the mean negative log-probability
    if (of_tokens)
        mt_report_line(report, "%6lld  %s loss %.4f  perplexity %.2f", (long long)state->iteration, split, loss,
                       exp(loss));
    else
        mt_report_line(report, "%6lld  %s loss %.4f", (long long)state->iteration, split, loss);
    char names[4][160];
    snprintf(names[0], sizeof names[0], "lm loss %.100s", split);
    snprintf(names[1], sizeof names[1], "%.100s_loss", split);
    snprintf(names[2], sizeof names[2], "lm loss %.100s ppl", split);
    snprintf(names[3], sizeof names[3], "%.100s_perplexity", split);
    add_scalar(&all, names[0], names[1], loss);
    if (of_tokens) add_scalar(&all, names[2], names[3], exp(loss));
    write_scalars(report, state->iteration, &all);
}

/* ---- stragglers: the slow ranks, and the slow part of the step
 *
 * Forward and backward count only operations that compute, because communication includes waiting for other ranks: its
 * time is shortest on the rank that the others wait for. */

enum { PART_DATA, PART_FORWARD, PART_BACKWARD, PART_OPTIMIZER, PART_COMMUNICATION, NUM_PARTS };

/* Adds this rank's seconds in the step that was recorded last. */
static void add_part_seconds(double parts[NUM_PARTS]) {
    const mt_profile_step *step = mt_profile_last_step();
    for (int64_t i = 0; i < step->num_calls; i++) {
        const mt_profile_call *call = &step->calls[i];
        const char *phase = call->phase >= 0 ? step->phases[call->phase].name : "";
        int part = call->work.traffic != MT_TRAFFIC_NONE ? PART_COMMUNICATION
                   : strncmp(phase, "forward", 7) == 0   ? PART_FORWARD
                   : strncmp(phase, "backward", 8) == 0  ? PART_BACKWARD
                                                         : PART_OPTIMIZER;
        parts[part] += call->to - call->from;
    }
}

/* The seconds of the parts of the last step on every rank [world, parts], to free. Every rank calls it. */
static double *collect_parts(const mt_grid *grid, const mt_metrics *metrics) {
    int64_t size = grid->world.size;
    double *all = mt_calloc(size * NUM_PARTS * 8), *own = all + (int64_t)grid->world.rank * NUM_PARTS;
    add_part_seconds(own);
    own[PART_DATA] = metrics->data_seconds;
    mt_all_reduce_sum(&grid->world, all, size * NUM_PARTS, MT_F64);
    return all;
}

/* The timers of --timing-log-level, with Megatron's names where it has the part: each is the sum of some parts. */
static const struct {
    const char *name;
    int level;
    unsigned parts;
} timers[] = {
    {"forward-backward", 1, 1u << PART_FORWARD | 1u << PART_BACKWARD},
    {"communication", 1, 1u << PART_COMMUNICATION},
    {"optimizer", 1, 1u << PART_OPTIMIZER},
    {"batch-generator", 2, 1u << PART_DATA},
    {"forward-compute", 2, 1u << PART_FORWARD},
    {"backward-compute", 2, 1u << PART_BACKWARD},
};

void mt_report_times(mt_report *report, const mt_grid *grid, const mt_run_state *state, const mt_metrics *metrics) {
    const mt_run_options *o = report->options;
    int size = grid->world.size;
    if (o->timing_log_level == 0 || !mt_report_is_due(report, state->iteration)) return;
    double *all = collect_parts(grid, metrics);
    static const char *const options[] = {"max", "min, max", "all ranks"};
    mt_report_line(report, "%6lld  %s time in ms:", (long long)state->iteration, options[o->timing_log_option]);
    scalar_list scalars = {.count = 0};
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++) {
        if (timers[i].level > o->timing_log_level) continue;
        line text = {.length = 0};
        double least = INFINITY, most = 0;
        for (int rank = 0; rank < size; rank++) {
            double ms = 0;
            for (int part = 0; part < NUM_PARTS; part++)
                if (timers[i].parts >> part & 1) ms += 1e3 * all[rank * NUM_PARTS + part];
            least = fmin(least, ms), most = fmax(most, ms);
            bool fits = text.length < (int)sizeof text.text - 32;
            if (o->timing_log_option == MT_TIMING_ALL && fits) append(&text, " %.2f", ms);
        }
        if (o->timing_log_option == MT_TIMING_MINMAX) append(&text, " (%.2f, %.2f)", least, most);
        if (o->timing_log_option == MT_TIMING_MAX) append(&text, " %.2f", most);
        mt_report_line(report, "    %-18s%s", timers[i].name, text.text);
        char tag[40], key[40];
        snprintf(tag, sizeof tag, "%s-time", timers[i].name);
        snprintf(key, sizeof key, "%s_ms", timers[i].name);
        for (char *c = key; *c; c++) *c = *c == '-' ? '_' : *c;
        add_scalar(&scalars, tag, key, most);
    }
    free(all);
    if (report->prints) write_scalars(report, state->iteration, &scalars);
}

void mt_report_stragglers(mt_report *report, const mt_grid *grid, const mt_run_state *state,
                          const mt_metrics *metrics) {
    static const char *const names[] = {"data", "forward", "backward", "optimizer", "communication"};
    if (!report->options->log_straggler || !mt_report_is_due(report, state->iteration)) return;
    int size = grid->world.size;
    line text = {.length = 0}, record = {.length = 0};
    double *all = collect_parts(grid, metrics);
    append(&record, "{\"iteration\": %lld", (long long)state->iteration);
    for (int part = 0; part < NUM_PARTS; part++) {
        int slow = 0, fast = 0;
        for (int rank = 1; rank < size; rank++) {
            if (all[rank * NUM_PARTS + part] > all[slow * NUM_PARTS + part]) slow = rank;
            if (all[rank * NUM_PARTS + part] < all[fast * NUM_PARTS + part]) fast = rank;
        }
        double most = 1e3 * all[slow * NUM_PARTS + part], least = 1e3 * all[fast * NUM_PARTS + part];
        append(&text, "%s%s %.1f ms (rank %d) to %.1f (rank %d)", part ? ", " : "", names[part], most, slow, least,
               fast);
        append(&record,
               ", \"straggler_%s\": {\"slowest_rank\": %d, \"slowest_ms\": %.6g, \"fastest_rank\": %d, "
               "\"fastest_ms\": %.6g}",
               names[part], slow, most, fast, least);
    }
    free(all);
    mt_report_line(report, "%6lld  slowest to fastest: %s", (long long)state->iteration, text.text);
    append(&record, "}\n");
    report_file_write(&report->metrics, record.text, record.length);
}

/* ---- the grid of ranks */

/* Appends ranks to a line as runs: "3", "0-3", or "0-24:8" for every eighth. Returns the new length. */
static int write_members(char *line, int length, int room, const int *members, int count) {
    for (int i = 0, next; i < count; i = next) {
        int step = i + 1 < count ? members[i + 1] - members[i] : 1;
        for (next = i + 1; next < count && members[next] - members[next - 1] == step;) next++;
        if (next - i == 2 && step > 1) next--; // two ranks far apart are no run
        length += snprintf(line + length, (size_t)mt_max(0, room - length), "%s%d", i > 0 ? "," : "", members[i]);
        if (next - i == 1) continue;
        length += snprintf(line + length, (size_t)mt_max(0, room - length), "-%d", members[next - 1]);
        if (step > 1) length += snprintf(line + length, (size_t)mt_max(0, room - length), ":%d", step);
    }
    return length;
}

/* A line if the ranks of a tensor group are on several hosts: their messages are the most of all. */
static void print_crossing(const mt_grid_shape *shape, mt_group_kind kind, int world, const int *hosts, FILE *file) {
    bool of_experts = kind == MT_GROUP_EXPERT_TENSOR;
    int64_t size = of_experts ? shape->expert_tensor : shape->tensor;
    int *members = mt_malloc(world * (int64_t)sizeof(int)), crossing = 0, groups = 0, fits = 1;
    char text[60] = "", advice[200];
    for (int rank = 0; rank < world; rank++) {
        int here = 0, count = mt_grid_members(members, shape, kind, rank);
        bool crosses = false;
        for (int i = 0; i < count; i++) crosses |= hosts[members[i]] != hosts[rank];
        for (int i = 0; i < world; i++) here += hosts[i] == hosts[rank];
        fits = fits && here % size == 0;
        groups += members[0] == rank;
        if (!crosses || members[0] != rank) continue;
        if (crossing++ == 0) write_members(text, 0, sizeof text, members, count);
    }
    free(members);
    if (crossing == 0) return;
    const char *name = of_experts ? "expert-tensor-parallel-size" : "tensor-model-parallel-size";
    if (fits)
        snprintf(advice, sizeof advice,
                 "fill one host after another (mpirun --map-by slot, srun --distribution=block; launch.sh does)");
    else
        snprintf(advice, sizeof advice, "take a --%s that divides the ranks of each host", name);
    fprintf(file,
            "%d of %d %stensor groups of %lld ranks cross hosts, such as ranks %s: their messages, the most of all, go "
            "over the network; %s\n",
            crossing, groups, of_experts ? "expert-" : "", (long long)size, text, advice);
}

void mt_grid_print(const mt_grid *grid, const mt_options *options, const int *hosts, FILE *file) {
    enum { WIDTH = 68 };
    int world = grid->world.size, *members = mt_malloc(world * (int64_t)sizeof(int));
    mt_grid_shape shape = mt_grid_shape_of(options, world);
    fprintf(file, "%-16s %5s %6s  ranks (0-6:2 is 0,2,4,6)\n", "group", "size", "groups");
    for (int kind = 0; kind < MT_NUM_GROUP_KINDS; kind++) {
        char line[WIDTH + 1] = "";
        int length = 0, groups = 0, size = 1;
        for (int rank = 0; rank < world; rank++) {
            char text[WIDTH + 1];
            int count = mt_grid_members(members, &shape, kind, rank);
            if (members[0] != rank || count == 1) continue; // each group once, at its first rank
            int added = write_members(text, 0, sizeof text, members, count);
            groups++, size = count;
            if (length >= WIDTH - 3) continue; // the line is full
            if (length + added + 1 > WIDTH - 4 || added >= WIDTH)
                length = WIDTH - 3, strcat(line, " ...");
            else
                length += snprintf(line + length, sizeof line - (size_t)length, "%s%s", length ? " " : "", text);
        }
        const char *name = mt_grid_group((mt_grid *)grid, kind)->name;
        bool is_absent = strncmp(name, "expert", 6) == 0 && !mt_has_experts(options);
        if (groups > 0 && !is_absent) fprintf(file, "%-16s %5d %6d  %s\n", name, size, groups, line);
    }
    if (hosts) print_crossing(&shape, MT_GROUP_TENSOR, world, hosts, file);
    if (hosts && mt_has_experts(options)) print_crossing(&shape, MT_GROUP_EXPERT_TENSOR, world, hosts, file);
    free(members);
}

/* ---- the beginning of a run */

/* "868 thousand", "1.24 billion". */
static const char *print_count(char out[32], double count) {
    static const struct {
        double unit;
        const char *name;
    } units[] = {{1e12, "trillion"}, {1e9, "billion"}, {1e6, "million"}, {1e3, "thousand"}};
    snprintf(out, 32, "%.0f", count);
    for (size_t i = sizeof units / sizeof *units; i-- > 0;) // 999.5 thousand and more are a million
        if (count >= 0.9995 * units[i].unit)
            snprintf(out, 32, "%.*f %s",
                     count < 9.995 * units[i].unit   ? 2
                     : count < 99.95 * units[i].unit ? 1
                                                     : 0,
                     count / units[i].unit, units[i].name);
    return out;
}

/* "llama model: 4 layers, hidden size 128, 868 thousand parameters". */
static void print_model(const mt_options *o, FILE *file) {
    char parameters[32];
    fprintf(file, "%s model: ", mt_hf_family_name(o->hf_family));
    if (o->decoder_num_layers > 0)
        fprintf(file, "%lld and %lld layers of encoder and decoder", (long long)o->encoder_num_layers,
                (long long)o->decoder_num_layers);
    else
        fprintf(file, "%lld layer%s", (long long)o->num_layers, o->num_layers == 1 ? "" : "s");
    fprintf(file, ", hidden size %lld, ", (long long)o->hidden_size);
    if (mt_num_expert_layers(o) > 0)
        fprintf(file, "%lld experts with top-%lld routing, ", (long long)o->num_experts, (long long)o->moe_router_topk);
    fprintf(file, "%s parameters", print_count(parameters, (double)mt_num_parameters(o)));
}

/* "CPU in fp32, 4 ranks with 1 thread each: TP 2 x PP 2 x CP 1 x DP 1". EP divides the ranks of a stage anew. */
static void print_device(const mt_options *o, const mt_ops *ops, const mt_grid *grid, FILE *file) {
    bool cuda = ops->on_device;
    int ranks = grid->world.size, threads = 1;
    mt_grid_shape shape = mt_grid_shape_of(o, ranks);
#ifdef MT_HAVE_OPENMP
    threads = omp_get_max_threads();
#endif
    fprintf(file, "%s in %s, ", cuda ? "CUDA" : "CPU", o->bf16 ? "bf16" : o->fp16 ? "fp16" : "fp32");
    fprintf(file, "%d rank%s with %d %s%s%s", ranks, ranks == 1 ? "" : "s", cuda ? 1 : threads, cuda ? "GPU" : "thread",
            threads == 1 || cuda ? "" : "s", ranks == 1 ? "" : " each");
    if (ranks == 1) return;
    fprintf(file, ": TP %lld x PP %lld x CP %lld x DP %lld", (long long)shape.tensor, (long long)shape.pipeline,
            (long long)shape.context, (long long)shape.data);
    if (shape.expert * shape.expert_tensor > 1)
        fprintf(file, "; experts: ETP %lld x EP %lld x EDP %lld", (long long)shape.expert_tensor,
                (long long)shape.expert, (long long)shape.expert_data);
}

/* "1.64 million tokens in 400 iterations: 3.2 epochs of corpus_text_document, which has 510 thousand". */
static void print_data(const mt_run_options *o, const mt_run_state *start, const mt_dataset *data, FILE *file) {
    char wanted[32], tokens[32];
    int64_t samples =
        mt_consumed_samples_from(o, start->iteration, start->consumed_train_samples, o->stack.num_iterations);
    double total = (double)samples * (double)o->stack.seq_length;
    if (data->packing) { // rows, which are not full
        bool ends = samples >= mt_packing_last(data->packing);
        double epochs =
            ends ? (double)mt_max(o->train_epochs, 1) : (double)samples / (double)mt_packing_count(data->packing, 1);
        if (data->num_tokens > 0) total = epochs * (double)data->num_tokens;
    }
    mt_blend blend = {0};
    mt_error ignored;
    fprintf(file, "%s tokens in %lld iteration%s: ", print_count(wanted, total), (long long)o->stack.num_iterations,
            o->stack.num_iterations == 1 ? "" : "s");
    if (data->num_tokens == 0) {
        fprintf(file, "synthetic");
        return;
    }
    fprintf(file, "%.*f epochs of ", total < 10 * (double)data->num_tokens ? 2 : 0, total / (double)data->num_tokens);
    const mt_strings *words = o->data_path.count > 0 ? &o->data_path : &o->train_data_path;
    if (words->count > 0) mt_blend_parse(&blend, words, "", &ignored);
    if (blend.count > 1)
        fprintf(file, "%lld datasets, which have", (long long)blend.count);
    else
        fprintf(file, "%s, which has", blend.count == 1 ? blend.paths[0] : o->tokens_file);
    fprintf(file, " %s to train on", print_count(tokens, (double)data->num_tokens));
    mt_blend_free(&blend);
}

/* The fast attention kernels of a GPU serve bf16 and fp16, and on small GPUs narrow heads. */
static void print_slow_attention(const mt_options *o, const mt_ops *ops, FILE *file) {
    int64_t widest = mt_is_latent(o) ? o->kv_channels + o->qk_pos_emb_head_dim : o->kv_channels;
    if (ops->on_device && !o->bf16 && !o->fp16)
        fprintf(file, "\nAttention in fp32 takes plain kernels on a GPU, which are many times slower; add %s",
                ops->limits.no_bf16 ? "--fp16" : "--bf16");
    else if (ops->limits.flash_channels > 0 && widest > ops->limits.flash_channels)
        fprintf(file,
                "\nAttention of heads over %lld channels takes plain kernels on this GPU, which are many times slower",
                (long long)ops->limits.flash_channels);
}

void mt_report_opening(const mt_run_options *o, const mt_run_state *start, const mt_ops *ops, const mt_grid *grid,
                       const mt_dataset *data, FILE *file) {
    print_model(&o->stack, file);
    fprintf(file, o->load ? ", loaded from %s.\nDevice: " : ", random weights.\nDevice: ", o->load);
    print_device(&o->stack, ops, grid, file);
    print_slow_attention(&o->stack, ops, file);
    fprintf(file, ".\nData: ");
    if (data)
        print_data(o, start, data, file);
    else if (o->stack.stage == MT_STAGE_RL)
        fprintf(file, "%lld responses to each of %lld prompts in each of %lld iterations",
                (long long)o->num_return_sequences, (long long)o->rollout_batch_size,
                (long long)o->stack.num_iterations);
    else
        fprintf(file, "none, the weights stay as they are");
    fprintf(file, ".\n");
    if (o->save && o->save_interval > 0)
        fprintf(file, "Checkpoints: %s, every %lld iterations and at the end.\n", o->save, (long long)o->save_interval);
    else
        fprintf(file, "Checkpoints: %s%s.\n", o->save ? o->save : "none, because there is no --save",
                o->save ? ", at the end" : "");
    const char *products = ops->on_device ? NULL : mt_cpu_products_note(mt_options_dtype(&o->stack));
    if (products) fprintf(file, "%s.\n", products);
    fprintf(file, "\n");
}

void mt_report_backend(const mt_grid *grid) {
    if (*mt_backend_note() == 0) return;
    if (grid->world.size > 1) fprintf(stderr, "rank %d: ", grid->world.rank);
    fprintf(stderr, "%s\n", mt_backend_note());
}

void mt_report_plan(const mt_model *model, FILE *file) {
    static const char *const names[MT_NUM_PLAN_ROWS] = {[MT_PLAN_WEIGHTS] = "weights",
                                                        [MT_PLAN_GRADIENTS] = "gradients",
                                                        [MT_PLAN_OPTIMIZER] = "optimizer state",
                                                        [MT_PLAN_BUFFERS] = "whole buckets",
                                                        [MT_PLAN_ACTIVATIONS] = "activations",
                                                        [MT_PLAN_CACHE] = "KV cache",
                                                        [MT_PLAN_FP8] = "fp8 operands",
                                                        [MT_PLAN_EXPERTS] = "expert rows",
                                                        [MT_PLAN_TOTAL] = "total",
                                                        [MT_PLAN_HOST] = "host memory"};
    int64_t count;
    const mt_param *params = mt_model_params(model, &count);
    double parameters = 0; // of this rank
    for (int64_t i = 0; i < count; i++) parameters += (double)(params[i].rows * params[i].cols);
    fprintf(file, "memory plan          MiB   bytes per parameter\n");
    for (int row = 0; row < MT_NUM_PLAN_ROWS; row++) {
        double bytes = (double)mt_model_planned_bytes(model, (mt_plan_row)row);
        if (bytes > 0) fprintf(file, "  %-15s %9.1f   %6.2f\n", names[row], bytes / 1048576, bytes / parameters);
    }
}

void mt_report_role(const mt_model_role *role, FILE *file) {
    static const struct {
        const char *name, *place;
        mt_plan_row row;
    } parts[MT_NUM_PARTS] = {[MT_PART_PARAMS] = {"weights", "on the host", MT_PLAN_WEIGHTS},
                             [MT_PART_GRADS] = {"gradients", "not kept", MT_PLAN_GRADIENTS},
                             [MT_PART_OPTIMIZER] = {"optimizer state", "on the host", MT_PLAN_OPTIMIZER},
                             [MT_PART_CACHE] = {"KV cache", "not kept", MT_PLAN_CACHE}};
    const mt_options *o = &role->options.stack;
    if (!file || !role->model) return;
    if (role->adapted) fprintf(file, "%s: the %s with its adapters switched off\n", role->name, role->adapted->name);
    if (!role->is_lent && !mt_model_role_is_apart(role))
        fprintf(file, "%s: a model of its own, %.1f MiB\n", role->name,
                (double)mt_model_planned_bytes(role->model, MT_PLAN_TOTAL) / 1048576);
    if (mt_model_role_is_apart(role)) {
        fprintf(file, "%s: a model of its own on tensor %lld x pipeline %lld x data %lld ranks", role->name,
                (long long)o->tensor_model_parallel_size, (long long)o->pipeline_model_parallel_size,
                (long long)o->data_parallel_size);
        if (mt_has_experts(o)) fprintf(file, ", experts on %lld", (long long)o->expert_model_parallel_size);
        fprintf(file, "\n");
        mt_report_plan(role->model, file);
    }
    for (int part = 0; part < MT_NUM_PARTS; part++) {
        double bytes = (double)mt_model_planned_bytes(role->model, parts[part].row);
        if (bytes > 0 && role->rests >> part & 1)
            fprintf(file, "%s: %s, %.1f MiB: %s while other models work\n", role->name, parts[part].name,
                    bytes / 1048576, parts[part].place);
    }
}

void mt_report_inference(const mt_model *model, const mt_run_options *o, int64_t context, FILE *file) {
    print_model(&o->stack, file);
    fprintf(file, ", loaded from %s; ", o->load);
    print_device(&o->stack, mt_model_ops(model), mt_model_grid(model), file);
    fprintf(file, "; texts of at most %lld tokens\n", (long long)context);
}
