/* Saving and loading a checkpoint against dd with the same block size, on the same disk in the same run; what an
 * asynchronous save costs a step against a plain copy; and how often each byte is read.
 *
 *   usage: [mpirun -np N] bench_checkpoint [FOLDER [LAYERS [ROUNDS [OPTIONS...]]]]
 *
 * FOLDER is on the disk to be measured (build/checkpoint); the model is GPT-2's with so many layers (12: 124M, which in
 * fp32 with its moments is 1.5 GB). OPTIONS are a layout's. The best of ROUNDS (3) is shown for each, in turns. */
#include "../megatron.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct bench {
    mt_options options;
    mt_grid grid;
    mt_model *model;
    const char *folder;
    int64_t rounds;
    double bytes; // of the checkpoint's tensors
} bench;

enum { DD_BLOCK = 8 << 20 }; // as the pieces that are saved

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

static double now(const bench *b) {
    mt_barrier(&b->grid.world);
    return mt_time();
}

/* A shell command on rank 0. */
static void run(const bench *b, const char *format, const char *folder, long long number) {
    char command[1024];
    snprintf(command, sizeof command, format, folder, number);
    if (b->grid.world.rank == 0 && system(command) != 0) mt_die("failed: %s", command);
    mt_barrier(&b->grid.world);
}

/* What this process has read by system calls; 0 where the system does not tell. */
static double bytes_read(void) {
    FILE *file = fopen("/proc/self/io", "r");
    double value = 0;
    if (!file) return 0;
    if (fscanf(file, "rchar: %lf", &value) != 1) value = 0;
    fclose(file);
    return value;
}

/* Files of a folder leave the page cache, so that they are read from the disk. */
static void forget(const bench *b, const char *folder) {
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors", "dd"};
    for (int i = 0; i < 3 && b->grid.world.rank == 0; i++) {
        char path[2048];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        int descriptor = open(path, O_RDONLY);
        if (descriptor < 0) continue;
        fsync(descriptor);
        posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
        close(descriptor);
    }
    mt_barrier(&b->grid.world);
}

static void open_model(bench *b, int argc, char **argv) {
    char *words[64] = {"bench",
                       "--num-layers",
                       argc > 2 ? argv[2] : "12",
                       "--hidden-size",
                       "768",
                       "--num-attention-heads",
                       "12",
                       "--vocab-size",
                       "50257",
                       "--seq-length",
                       "64",
                       "--mock-data",
                       "--train-iters",
                       "10",
                       "--lr",
                       "1e-4",
                       "--swiglu",
                       "--disable-bias-linear",
                       "--normalization",
                       "RMSNorm",
                       "--position-embedding-type",
                       "rope",
                       "--device",
                       "cpu"};
    int count = 0;
    mt_error error;
    while (words[count]) count++;
    for (int i = 4; i < argc && count < 63; i++) words[count++] = argv[i];
    check(mt_options_parse(&b->options, MT_PROGRAM_TRAIN, count, words, &error), &error);
    check(mt_options_finish(&b->options, MT_PROGRAM_TRAIN, b->grid.world.size, &error), &error);
    check(mt_grid_build(&b->grid, &b->options, &error), &error);
    const mt_ops *ops = mt_backend_open(b->options.device, &b->grid, &error);
    mt_model_plan plan = {.max_tokens = 64, .max_logits = 64, .max_position = 64, .train = true};
    check(ops ? mt_model_create(&b->model, &b->options, &b->grid, ops, &plan, &error) : -1, &error);
    mt_model_init(b->model);
    b->bytes = (double)mt_num_parameters(&b->options) * (b->options.bf16 ? 14 : 12);
}

static double best_of(double best, double seconds) {
    return best > 0 && best < seconds ? best : seconds;
}

static void print(const bench *b, const char *what, double seconds, double dd) {
    if (b->grid.world.rank != 0) return;
    printf("%-34s %8.3f s %9.1f MB/s", what, seconds, b->bytes / seconds / 1e6);
    if (dd > 0) printf("  %5.1f%% of dd", 100 * dd / seconds);
    printf("\n");
    fflush(stdout);
}

static void bench_save_and_load(bench *b) {
    double dd_write = 0, write = 0, dd_read = 0, read = 0, start, counted = 0;
    mt_error error;
    char latest[1024];
    mt_saver *saver;
    mt_saver_open(&saver, b->model, b->folder, NULL, NULL, false);
    snprintf(latest, sizeof latest, "%s/iter_0000001", b->folder);
    for (int64_t round = 0; round < b->rounds; round++) {
        mt_run_state state = {.iteration = 1};
        run(b, "cd %s && rm -rf iter_* dd; sync", b->folder, 0);
        start = now(b);
        run(b, "dd if=/dev/zero of=%s/dd bs=8388608 count=%lld conv=fsync 2>/dev/null", b->folder,
            (long long)(b->bytes / DD_BLOCK));
        dd_write = best_of(dd_write, now(b) - start);
        start = now(b);
        check(mt_saver_save(saver, &state, &error), &error);
        write = best_of(write, now(b) - start);
        forget(b, b->folder);
        start = now(b);
        run(b, "dd if=%s/dd of=/dev/null bs=8388608 2>/dev/null", b->folder, 0);
        dd_read = best_of(dd_read, now(b) - start);
        forget(b, latest);
        counted = -bytes_read();
        start = now(b);
        check(mt_checkpoint_load(b->model, &state, b->folder, &error), &error);
        read = best_of(read, now(b) - start);
        counted += bytes_read();
    }
    mt_saver_close(saver);
    mt_all_reduce_sum(&b->grid.world, &counted, 1, MT_F64);
    print(b, "dd, write and fsync", dd_write, 0);
    print(b, "save", write, dd_write);
    print(b, "dd, read", dd_read, 0);
    print(b, "load", read, dd_read);
    if (b->grid.world.rank == 0)
        printf("%-34s %8.3f times\n", "bytes read by all ranks / bytes saved", counted / b->bytes);
}

/* What a step waits for an asynchronous save, against copying as much memory. */
static void bench_stall(bench *b) {
    mt_error error;
    mt_saver *saver;
    int64_t share = (int64_t)(b->bytes / b->grid.world.size);
    double stall = 0, copy = 0, finish = 0;
    char *from = malloc((size_t)share), *to = malloc((size_t)share);
    memset(from, 1, (size_t)share), memset(to, 2, (size_t)share);
    mt_saver_open(&saver, b->model, b->folder, NULL, NULL, true);
    for (int64_t round = 0; round < b->rounds; round++) {
        mt_run_state state = {.iteration = 2};
        double start = now(b);
        memcpy(to, from, (size_t)share);
        copy = best_of(copy, now(b) - start);
        start = now(b);
        check(mt_saver_save(saver, &state, &error), &error);
        stall = best_of(stall, now(b) - start);
        check(mt_saver_finish(saver, &error), &error);
        finish = best_of(finish, now(b) - start);
    }
    mt_saver_close(saver);
    print(b, "copy of memory", copy, 0);
    print(b, "stall of an asynchronous save", stall, 0);
    print(b, "until it is on disk", finish, 0);
    free(from), free(to);
}

int main(int argc, char **argv) {
    bench b = {.folder = argc > 1 ? argv[1] : "build/checkpoint", .rounds = argc > 3 ? atoi(argv[3]) : 3};
    mt_grid_start(&b.grid, &argc, &argv);
    open_model(&b, argc, argv);
    if (b.grid.world.rank == 0)
        printf("%d rank%s, %.1f MB%s%s\n", b.grid.world.size, b.grid.world.size > 1 ? "s" : "", b.bytes / 1e6,
               argc > 4 ? ", " : "", argc > 4 ? argv[4] : "");
    run(&b, "mkdir -p %s", b.folder, 0);
    bench_save_and_load(&b);
    bench_stall(&b);
    run(&b, "rm -r %s", b.folder, 0);
    mt_model_destroy(b.model);
    mt_options_free(&b.options);
    mt_grid_stop(&b.grid);
    return 0;
}
