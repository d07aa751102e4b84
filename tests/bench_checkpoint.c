/* Measures saving and loading of a checkpoint against dd with the same block size, on the same disk in the same run;
 * the time that an asynchronous save adds to a step, against a plain copy; and how often each byte is read.
 *
 *   usage: [mpirun -np N] bench_checkpoint [FOLDER [LAYERS [ROUNDS [OPTIONS...]]]]
 *
 * FOLDER (build/checkpoint) is on the disk to measure. The model is GPT-2's with LAYERS layers (12: 124M, in fp32 with
 * its moments 1.5 GB). OPTIONS are options of a layout; or --device cuda, where the plain copy is one from the device
 * to pinned memory; or --hf-config with another model. With 0 ROUNDS a checkpoint is saved and loaded once; one that
 * already exists in FOLDER is loaded and kept. Each of ROUNDS (5) rounds does everything once, in alternating order.
 * Shown are medians, with the fastest and slowest round and the time of all processors (user and system). Writes end
 * with fsync, for dd as for a save. Before reads the file's pages leave the cache, for dd as for a load. dd runs
 * through the page cache and past it (oflag=direct, iflag=direct); the comparison is with its better median. */
#include "../data/options/option_rules.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/checkpoint_folder.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct bench {
    mt_run_options options;
    mt_grid grid;
    const mt_ops *ops;
    mt_model *model;
    const char *folder;
    int64_t rounds;
    bool is_there; // a checkpoint to load
    double bytes;  // of the checkpoint's tensors
} bench;

enum { DD_BLOCK = 8 << 20, MOST_ROUNDS = 64 }; // the size of a piece that a save writes

/* One measurement in every round: seconds, and processor seconds of all ranks and their children. */
typedef struct series {
    double seconds[MOST_ROUNDS], cpu[MOST_ROUNDS], start, cpu_start;
    int64_t count;
} series;

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

static double now(const bench *b) {
    mt_barrier(&b->grid.world);
    return mt_time();
}

/* Runs a shell command on rank 0. */
static void run(const bench *b, const char *format, const char *folder, long long number) {
    char command[1024];
    snprintf(command, sizeof command, format, folder, number);
    if (b->grid.world.rank == 0 && system(command) != 0) mt_die("failed: %s", command);
    mt_barrier(&b->grid.world);
}

/* The same while the other ranks sleep: ranks that wait in a barrier would compete for the processors. */
static void run_alone(const bench *b, const char *format, long long number) {
    static int turn;
    char done[1024], command[1024];
    snprintf(done, sizeof done, "%s/done-%d", b->folder, turn++);
    if (b->grid.world.rank != 0) {
        while (access(done, F_OK) != 0) usleep(500);
        return;
    }
    snprintf(command, sizeof command, format, b->folder, number);
    if (system(command) != 0) mt_die("failed: %s", command);
    FILE *file = fopen(done, "w");
    if (!file || fclose(file) != 0) mt_die("%s cannot be written", done);
}

/* Bytes that this process has read by system calls; 0 where the system does not count them. */
static double bytes_read(void) {
    FILE *file = fopen("/proc/self/io", "r");
    double value = 0;
    if (!file) return 0;
    if (fscanf(file, "rchar: %lf", &value) != 1) value = 0;
    fclose(file);
    return value;
}

/* Drops the files of a folder from the page cache, so that they are read from the disk. */
static void forget(const bench *b, const char *folder) {
    DIR *directory = b->grid.world.rank == 0 ? opendir(folder) : NULL;
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char path[2048];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        int descriptor = open(path, O_RDONLY);
        if (descriptor < 0) continue;
        fsync(descriptor);
        posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
        close(descriptor);
    }
    if (directory) closedir(directory);
    mt_barrier(&b->grid.world);
}

/* The words of the command line of the model; with --hf-config the file gives the shape. */
static int list_words(char **words, int room, int argc, char **argv) {
    static char shape[] =
        "--hidden-size 768 --num-attention-heads 12 --vocab-size 50257 --swiglu --disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope";
    static char run[] = "bench --seq-length 64 --mock-data --train-iters 10 --lr 1e-4 --device cpu";
    int count = 0;
    bool has_shape = false;
    for (char *word = strtok(run, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    for (int i = 4; i < argc; i++) has_shape |= strcmp(argv[i], "--hf-config") == 0;
    for (char *word = has_shape ? NULL : strtok(shape, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    if (!has_shape) words[count++] = "--num-layers", words[count++] = argc > 2 ? argv[2] : "12";
    for (int i = 4; i < argc && count < room; i++) words[count++] = argv[i];
    return count;
}

static void open_model(bench *b, int argc, char **argv) {
    char *words[64];
    int count = list_words(words, 64, argc, argv);
    mt_error error;
    check(mt_options_parse(&b->options, MT_PROGRAM_TRAIN, count, words, &error), &error);
    check(mt_options_finish(&b->options, MT_PROGRAM_TRAIN, b->grid.world.size, &error), &error);
    check(mt_grid_build(&b->grid, &b->options.stack, &error), &error);
    b->ops = mt_backend_open(b->options.device, &b->grid, &error);
    mt_model_plan plan = {.max_tokens = 64, .max_logits = 64, .max_position = 64, .train = true};
    check(b->ops ? mt_model_create(&b->model, &b->options.stack, &b->grid, b->ops, &plan, &error) : -1, &error);
    mt_model_init(b->model);
    b->ops->stream_synchronize(mt_model_stream(b->model));
    b->bytes = (double)mt_num_parameters(&b->options.stack) * (b->options.stack.bf16 ? 14 : 12);
}

static double cpu_seconds(void) {
    double total = 0;
    for (int i = 0; i < 2; i++) {
        struct rusage u;
        getrusage(i ? RUSAGE_CHILDREN : RUSAGE_SELF, &u);
        total += (double)u.ru_utime.tv_sec + (double)u.ru_stime.tv_sec;
        total += (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
    }
    return total;
}

static void begin(const bench *b, series *s) {
    s->start = now(b);
    s->cpu_start = cpu_seconds();
}

static void end(const bench *b, series *s) {
    double cpu = cpu_seconds() - s->cpu_start;
    s->seconds[s->count] = now(b) - s->start;
    mt_all_reduce_sum(&b->grid.world, &cpu, 1, MT_F64);
    s->cpu[s->count++] = cpu;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values and returns the median. */
static double median(double *values, int64_t count) {
    qsort(values, (size_t)count, sizeof *values, ascending);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/* Prints one line, where `reference` seconds are 100%; returns the median. */
static double print(const bench *b, const char *what, series *s, double reference, const char *of) {
    double seconds = median(s->seconds, s->count), mb = b->bytes / 1e6;
    if (b->grid.world.rank != 0) return seconds;
    printf("%-30s %8.3f s %7.0f MB/s (%.0f to %.0f)  cpu %6.3f s", what, seconds, mb / seconds,
           mb / s->seconds[s->count - 1], mb / s->seconds[0], median(s->cpu, s->count));
    if (reference > 0) printf("  %4.0f%% of %s", 100 * reference / seconds, of);
    printf("\n");
    fflush(stdout);
    return seconds;
}

static void dd_write(const bench *b, series *s, const char *command) {
    begin(b, s);
    run_alone(b, command, (long long)(b->bytes / DD_BLOCK));
    end(b, s);
}

static void dd_read(const bench *b, series *s, const char *command) {
    forget(b, b->folder);
    begin(b, s);
    run_alone(b, command, 0);
    end(b, s);
}

static void save(const bench *b, mt_saver *saver, series *s) {
    mt_run_state state = {.iteration = 1};
    mt_error error;
    begin(b, s);
    check(mt_saver_save(saver, &state, &error), &error);
    end(b, s);
}

/* Returns the bytes that this rank has read. */
static double load(bench *b, series *s) {
    mt_run_state state;
    mt_error error;
    char *latest = mt_checkpoint_resolve(b->folder, &error);
    check(latest ? 0 : -1, &error);
    forget(b, latest);
    free(latest);
    double counted = -bytes_read();
    begin(b, s);
    check(mt_checkpoint_load(b->model, &b->options, &state, b->folder, &error), &error);
    end(b, s);
    return counted + bytes_read();
}

static void print_counted(const bench *b, double counted) {
    mt_all_reduce_sum(&b->grid.world, &counted, 1, MT_F64);
    if (b->grid.world.rank != 0) return;
    if (counted > 0)
        printf("%-30s %8.3f times\n", "bytes read by all ranks / saved", counted / b->bytes);
    else
        printf("%-30s not reported by the system\n", "bytes read by all ranks");
}

/* With 0 rounds: for models that are too large to write often. */
static void bench_once(bench *b) {
    series write = {0}, read = {0};
    if (!b->is_there) {
        mt_saver *saver;
        mt_saver_open(&saver, b->model, &b->options, b->folder, NULL, NULL, false);
        save(b, saver, &write);
        mt_saver_close(saver);
        print(b, "save", &write, 0, NULL);
    }
    double counted = load(b, &read);
    print(b, "load", &read, 0, NULL);
    print_counted(b, counted);
}

/* Writes and reads, in alternating order, because one may leave work to the next. */
static void bench_save_and_load(bench *b) {
    series cached = {0}, direct = {0}, write = {0}, cached_read = {0}, direct_read = {0}, read = {0};
    double counted = 0;
    mt_saver *saver;
    mt_saver_open(&saver, b->model, &b->options, b->folder, NULL, NULL, false);
    for (int64_t round = 0; round < b->rounds; round++) {
        run(b, "cd %s && rm -rf iter_* dd; sync", b->folder, 0);
        for (int i = 0; i < 3; i++) {
            int turn = round % 2 ? 2 - i : i;
            if (turn == 0)
                dd_write(b, &cached, "dd if=/dev/zero of=%s/dd bs=8388608 count=%lld conv=fsync 2>/dev/null");
            if (turn == 1)
                dd_write(b, &direct,
                         "dd if=/dev/zero of=%s/dd bs=8388608 count=%lld conv=fsync oflag=direct 2>/dev/null");
            if (turn == 2) save(b, saver, &write);
        }
        for (int i = 0; i < 3; i++) {
            int turn = round % 2 ? 2 - i : i;
            if (turn == 0) dd_read(b, &cached_read, "dd if=%s/dd of=/dev/null bs=8388608 2>/dev/null");
            if (turn == 1) dd_read(b, &direct_read, "dd if=%s/dd of=/dev/null bs=8388608 iflag=direct 2>/dev/null");
            if (turn == 2) counted = load(b, &read);
        }
    }
    mt_saver_close(saver);
    double dd = print(b, "dd, write and fsync", &cached, 0, NULL);
    dd = fmin(dd, print(b, "  oflag=direct", &direct, 0, NULL));
    print(b, "save", &write, dd, "dd's speed");
    dd = print(b, "dd, read", &cached_read, 0, NULL);
    dd = fmin(dd, print(b, "  iflag=direct", &direct_read, 0, NULL));
    print(b, "load", &read, dd, "dd's speed");
    print_counted(b, counted);
}

/* One plain copy of `bytes` to host memory. */
static void copy_plainly(const bench *b, series *s, char *to, const char *from, int64_t bytes) {
    mt_stream *stream = mt_model_stream(b->model);
    begin(b, s);
    if (!b->ops->on_device)
        memcpy(to, from, (size_t)bytes);
    else
        b->ops->memory_copy(to, from, bytes, stream), b->ops->stream_synchronize(stream);
    end(b, s);
}

/* Prints one line in milliseconds, against `reference` seconds. */
static void print_wait(const bench *b, const char *what, series *s, double reference) {
    double seconds = median(s->seconds, s->count);
    if (b->grid.world.rank != 0) return;
    printf("%-30s %8.3f ms (%.3f to %.3f)  %5.1f%% of the copy's time\n", what, seconds * 1e3, s->seconds[0] * 1e3,
           s->seconds[s->count - 1] * 1e3, 100 * seconds / reference);
    fflush(stdout);
}

/* The time that a step waits for an asynchronous save, against a plain copy of as much memory, from the device if there
 * is one. On a device the copies continue after the call: work that `follows` should find the model's stream free; work
 * that changes the model waits until it is `copied`. */
static void bench_stall(bench *b) {
    mt_error error;
    mt_saver *saver;
    mt_stream *stream = mt_model_stream(b->model);
    bool on_cpu = !b->ops->on_device;
    int64_t share = (int64_t)(b->bytes / b->grid.world.size), num_buckets;
    series stall = {0}, copy = {0}, follows = {0}, copied = {0}, finish = {0};
    char *from = b->ops->memory_alloc(share), *to = b->ops->memory_alloc_host(share);
    b->ops->memory_zero(from, share, stream);
    memset(to, 2, (size_t)share);
    mt_saver_open(&saver, b->model, &b->options, b->folder, NULL, NULL, true);
    for (int64_t round = 0; round < b->rounds; round++) {
        mt_run_state state = {.iteration = 2};
        copy_plainly(b, &copy, to, from, share);
        begin(b, &finish);
        begin(b, &copied);
        begin(b, &stall);
        check(mt_saver_save(saver, &state, &error), &error);
        end(b, &stall);
        begin(b, &follows);
        b->ops->stream_synchronize(stream);
        end(b, &follows);
        mt_model_buckets(b->model, &num_buckets); // a caller may change buckets, so the stream waits for the copies
        b->ops->stream_synchronize(stream);
        end(b, &copied);
        check(mt_saver_finish(saver, &error), &error);
        end(b, &finish);
    }
    mt_saver_close(saver);
    double seconds = print(b, on_cpu ? "copy of memory" : "copy to pinned memory", &copy, 0, NULL);
    print_wait(b, "stall of an asynchronous save", &stall, seconds);
    if (!on_cpu) {
        print_wait(b, "  then the stream is free in", &follows, seconds);
        print_wait(b, "  all is copied after", &copied, seconds);
    }
    print(b, "until it is on disk", &finish, 0, NULL);
    b->ops->memory_free(from), b->ops->memory_free_host(to);
}

/* Other work on the machine spoils the measurement. */
static void print_load(const bench *b, const char *when) {
    double load = 0;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (b->grid.world.rank != 0 || getloadavg(&load, 1) != 1) return;
    printf("load average %s: %.1f, on %ld cores%s\n", when, load, cores,
           load > 0.5 * (double)cores ? "; WARNING: others compute too, so figures say little" : "");
}

int main(int argc, char **argv) {
    bench b = {.folder = argc > 1 ? argv[1] : "build/checkpoint", .rounds = argc > 3 ? atoi(argv[3]) : 5};
    if (b.rounds < 0 || b.rounds > MOST_ROUNDS) mt_die("from 0 to %d rounds", MOST_ROUNDS);
    mt_grid_start(&b.grid, &argc, &argv);
    open_model(&b, argc, argv);
    if (b.grid.world.rank == 0)
        printf("%d rank%s, %.1f MB%s", b.grid.world.size, b.grid.world.size > 1 ? "s" : "", b.bytes / 1e6,
               argc > 4 ? "," : "\n");
    for (int i = 4; i < argc && b.grid.world.rank == 0; i++) printf(" %s%s", argv[i], i + 1 < argc ? "" : "\n");
    b.is_there = b.rounds == 0 && mt_checkpoint_exists(b.folder);
    run(&b, "mkdir -p %s", b.folder, 0);
    print_load(&b, "before");
    if (b.rounds > 0)
        bench_save_and_load(&b), bench_stall(&b);
    else
        bench_once(&b);
    if (!b.is_there) run(&b, "rm -r %s", b.folder, 0);
    mt_model_destroy(b.model);
    mt_options_free(&b.options);
    mt_grid_stop(&b.grid);
    return 0;
}
