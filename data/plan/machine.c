/* machine.c: a machine's file, and the times that follow from its numbers. Every time is a rate of the file applied to
 * a count of operations or bytes; no number belongs to one model or one layout. */
#include "machine.h"

#include "../base/file.h"
#include "../options/option_finish.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the file */

typedef struct mt_machine_row {
    const char *key;
    size_t offset;
    double unit, low, high;
    bool whole;
    double times; // most times of the number `of`; NULL: none
    const char *of;
} mt_machine_row;

#define MT_MACHINE_ROW(key, unit, low, high, whole, times, of, meaning)                                                \
    {#key, offsetof(mt_machine, key), unit, low, high, whole, times, of},
static const mt_machine_row mt_machine_rows[] = {MT_MACHINE_NUMBERS(MT_MACHINE_ROW)};
enum { MT_NUM_MACHINE_ROWS = sizeof mt_machine_rows / sizeof *mt_machine_rows };

static const mt_machine_row *mt_machine_row_find(const char *key) {
    for (int i = 0; i < MT_NUM_MACHINE_ROWS; i++)
        if (strcmp(mt_machine_rows[i].key, key) == 0) return &mt_machine_rows[i];
    return NULL;
}

static double mt_machine_value(const json_t *root, const char *key) {
    return json_number_value(json_object_get(json_object_get(root, key), "value"));
}

/* Takes one number of the file. */
static int mt_machine_take(mt_machine *machine, const char *key, const json_t *item, const char *path,
                           mt_error *error) {
    const mt_machine_row *row = mt_machine_row_find(key);
    const json_t *number = json_object_get(item, "value"), *source = json_object_get(item, "source");
    double value = json_number_value(number);
    if (!row) return mt_error_set(error, "%s: \"%s\" is not a number of a machine; see data/plan/machine.h", path, key);
    if (!json_is_number(number) || !json_is_string(source) || json_string_length(source) == 0 ||
        json_object_size(item) != 2)
        return mt_error_set(error, "%s: \"%s\" must be {\"value\": number, \"source\": \"where it comes from\"}", path,
                            key);
    if (!(value >= row->low && value <= row->high) || (row->whole && value != floor(value)))
        return mt_error_set(error, "%s: \"%s\" is %.10g; it must be %s from %g to %g", path, key, value,
                            row->whole ? "a whole number" : "a number", row->low, row->high);
    memcpy((char *)machine + row->offset, &(double){value * row->unit}, sizeof(double));
    return 0;
}

/* Compares rates with the peak, and a part with the whole. */
static int mt_machine_compare(const json_t *root, const char *path, mt_error *error) {
    for (const mt_machine_row *row = mt_machine_rows; row < mt_machine_rows + MT_NUM_MACHINE_ROWS; row++) {
        if (!row->of) continue;
        double value = mt_machine_value(root, row->key), most = row->times * mt_machine_value(root, row->of);
        if (value > most)
            return mt_error_set(error, "%s: \"%s\" is %.10g; it must be at most %.10g, %s\"%s\"", path, row->key, value,
                                most, row->times == 2 ? "twice " : "", row->of);
    }
    return 0;
}

static int mt_machine_parse(mt_machine *machine, json_t *root, const char *path, mt_error *error) {
    const char *key;
    json_t *item;
    *machine = (mt_machine){.gpus_per_host = 8};
    snprintf(machine->name, sizeof machine->name, "%.79s", path);
    if (!json_is_object(root)) return mt_error_set(error, "%s: must be a JSON object", path);
    json_object_foreach(root, key, item) {
        bool is_name = strcmp(key, "name") == 0;
        if (is_name && !json_is_string(item)) return mt_error_set(error, "%s: \"name\" must be a text", path);
        if (is_name)
            snprintf(machine->name, sizeof machine->name, "%s", json_string_value(item));
        else if (mt_machine_take(machine, key, item, path, error) != 0)
            return -1;
    }
    for (int i = 0; i < MT_NUM_MACHINE_ROWS; i++)
        if (!json_object_get(root, mt_machine_rows[i].key))
            return mt_error_set(error, "%s: \"%s\" is missing; see data/plan/machine.h", path, mt_machine_rows[i].key);
    mt_text_clean(machine->name, false);
    return mt_machine_compare(root, path, error);
}

/* The path of a machine's file, or of a named machine: in the current folder, beside the program or the folder of the
 * build above it, or where `make install` puts it. False: no folder has the name. */
static bool mt_machine_path(char path[4200], const char *gpu) {
    static const char *const folders[] = {"/data", "/../data", "/../../data", "/../../../data", "/../share/megatron"};
    char program[4000];
    size_t length = strlen(gpu);
    if (length > 5 && strcmp(gpu + length - 5, ".json") == 0) {
        snprintf(path, 4200, "%s", gpu);
        return true;
    }
    snprintf(path, 4200, "data/machines/%.100s.json", gpu);
    if (access(path, R_OK) == 0) return true;
    ssize_t count = readlink("/proc/self/exe", program, sizeof program - 1);
    program[count > 0 ? count : 0] = 0;
    if (strrchr(program, '/')) *strrchr(program, '/') = 0;
    for (size_t i = 0; count > 0 && i < sizeof folders / sizeof *folders; i++) {
        char candidate[4200];
        snprintf(candidate, sizeof candidate, "%s%s/machines/%.100s.json", program, folders[i], gpu);
        if (access(candidate, R_OK) != 0) continue;
        memcpy(path, candidate, sizeof candidate);
        return true;
    }
    return false;
}

int mt_machine_read(mt_machine *machine, const char *gpu, mt_error *error) {
    char path[4200];
    if (!mt_machine_path(path, gpu))
        return mt_error_set(error,
                            "--gpu %.100s: there is no %.200s; take a name in that folder, such as h200, or a path "
                            "that ends in .json",
                            gpu, path);
    json_t *root = mt_json_read(path, error);
    if (!root) return -1;
    int status = mt_machine_parse(machine, root, path, error);
    json_decref(root);
    return status;
}

int mt_machine_of_options(mt_machine *machine, const mt_run_options *options, mt_error *error) {
    int64_t limit;
    if (mt_machine_read(machine, options->gpu, error) != 0 || mt_options_memory_limit(options, &limit, error) != 0)
        return -1;
    machine->gpus_per_host = options->gpus_per_host;
    machine->is_limited = limit > 0 && (double)limit < machine->memory_gib;
    if (machine->is_limited) machine->memory_gib = (double)limit;
    return 0;
}

/* ---- times */

/* Tiles of products, and the rate of their inner loop relative to the largest tile's. */
static const struct {
    int64_t rows, columns;
    double rate;
} mt_tiles[] = {{128, 256, 1}, {256, 128, 1}, {128, 128, 0.93}, {64, 128, 0.75}, {128, 64, 0.75}, {64, 64, 0.5}};

/* Results are written after the inner loop, which does not overlap with it within a tile. */
double mt_machine_product_seconds(const mt_machine *machine, int64_t M, int64_t N, int64_t K, double written,
                                  bool fp8) {
    double rate = fp8 ? machine->fp8_product_tflops : machine->bf16_product_tflops, best = 0, size = fp8 ? 1 : 2;
    double sms = machine->multiprocessors, depth = (double)K + machine->product_depth;
    for (size_t i = 0; i < sizeof mt_tiles / sizeof *mt_tiles; i++) {
        int64_t down = mt_divide_up(M, mt_tiles[i].rows), across = mt_divide_up(N, mt_tiles[i].columns);
        double tiles = (double)down * (double)across, waves = ceil(tiles / sms);
        // the last wave of many is filled by splitting sums or by other shapes: half of its idle part counts
        double padded = (waves * sms + tiles) / 2 * (double)(mt_tiles[i].rows * mt_tiles[i].columns);
        double seconds = 2 * padded * depth / (rate * mt_tiles[i].rate);
        if (i == 0 || seconds < best) best = seconds;
    }
    double read = size * ((double)M * (double)K + (double)N * (double)K);
    return machine->kernel_us + fmax(best + written / machine->copy_gbs, (read + written) / machine->copy_gbs);
}

double mt_machine_attention_seconds(const mt_machine *machine, double flops, double length, int64_t channels,
                                    bool backward) {
    double narrow = backward ? machine->attention_64_backward_tflops : machine->attention_64_forward_tflops;
    double wide = backward ? machine->attention_128_backward_tflops : machine->attention_128_forward_tflops;
    double share = fmin(fmax(((double)channels - 64) / 64, 0), 1), rate = narrow + (wide - narrow) * share;
    if (channels < 64) rate *= (double)channels / 64;
    return machine->kernel_us + flops / (rate * length / (length + machine->attention_tokens));
}

double mt_machine_memory_seconds(const mt_machine *machine, double bytes) {
    return machine->kernel_us + bytes / (machine->copy_gbs * machine->memory_share);
}

/* The group of ranks first, first + stride, ...: its hosts, and the fewest ranks on one of them. */
static mt_span_of_hosts mt_span_from(int64_t first, int64_t stride, int64_t ranks, int64_t per_host) {
    mt_span_of_hosts span = {ranks, ranks, 0};
    for (int64_t i = 0, here; i < ranks; i += here, span.hosts++) {
        int64_t host = (first + i * stride) / per_host;
        for (here = 1; i + here < ranks && (first + (i + here) * stride) / per_host == host;) here++;
        span.per_host = mt_min(span.per_host, here);
    }
    return span;
}

double mt_machine_context(const mt_machine *machine, double communicators) {
    if (communicators <= 0) return machine->context_gib;
    return machine->context_gib + machine->ranks_context_gib + communicators * machine->communicator_gib;
}

/* All groups of a kind wait for the one that spans most hosts. They are equal where hosts and groups nest; else the
 * first rank's may lie within a host while others do not: with 8 GPUs a host, ranks 0 to 2 do, 6 to 8 do not. */
mt_span_of_hosts mt_machine_span(const mt_machine *machine, const mt_group *group) {
    int64_t n = group->size, per_host = machine->gpus_per_host;
    if (!group->members || n == 1 || machine->gpus <= per_host) return (mt_span_of_hosts){n, n, 1};
    int64_t stride = group->members[1] - group->members[0], block = n * stride;
    mt_span_of_hosts most = mt_span_from(group->members[0], stride, n, per_host);
    bool nests = (per_host % block == 0 || block % per_host == 0) && (per_host % stride == 0 || stride % per_host == 0);
    if (nests || group->members[n - 1] - group->members[0] != block - stride) return most;
    for (int64_t first = 0; first + block - stride < machine->gpus; first++) {
        if (first % block >= stride) continue;
        mt_span_of_hosts span = mt_span_from(first, stride, n, per_host);
        if (span.hosts > most.hosts || (span.hosts == most.hosts && span.per_host < most.per_host)) most = span;
    }
    return most;
}

/* Seconds that the links take: a ring passes every boundary between hosts once for each of the host's ranks, by all
 * their network cards; an all-to-all and a message leave by the rank's own. */
static double mt_link_seconds(const mt_machine *m, mt_collective kind, double bytes, const mt_span_of_hosts *span) {
    const double rates[] = {[MT_RING_REDUCE] = m->nvlink_reduce_gbs,
                            [MT_RING_GATHER] = m->nvlink_gather_gbs,
                            [MT_EXCHANGE] = m->nvlink_exchange_gbs,
                            [MT_MESSAGE] = m->nvlink_message_gbs,
                            [MT_COPY_ENGINE] = m->nvlink_copy_gbs};
    double within = bytes / rates[kind], ranks = (double)span->ranks, per_host = (double)span->per_host;
    if (span->hosts == 1) return within;
    if (kind == MT_RING_REDUCE || kind == MT_RING_GATHER) return fmax(within, bytes / (per_host * m->network_gbs));
    if (kind == MT_EXCHANGE) return fmax(within, bytes * (ranks - per_host) / (ranks - 1) / m->network_gbs);
    return fmax(within, bytes / m->network_gbs);
}

double mt_machine_collective_seconds(const mt_machine *m, mt_collective kind, double bytes,
                                     const mt_span_of_hosts *span) {
    double link = mt_link_seconds(m, kind, bytes, span), ranks = (double)span->ranks;
    if (kind == MT_MESSAGE || kind == MT_COPY_ENGINE)
        return link + (span->hosts > 1 ? m->network_us : m->nvlink_us) + m->kernel_us;
    double ring = link + (ranks - (double)span->hosts) * m->nvlink_us + (double)(span->hosts - 1) * m->network_us;
    double steps = ceil(log2(ranks)), hops = span->hosts > 1 ? ceil(log2((double)span->hosts)) : 0;
    double tree = 2 * link + 2 * ((steps - hops) * m->nvlink_us + hops * m->network_us); // for short messages
    return m->collective_us + fmin(ring, tree);
}
