/* bench_transfer.c: moves the weights of one model to another on another layout of the same ranks and back, and
 * compares the time with that of the fewest bytes at the measured rate of a plain all-to-all. Also checks that the
 * weights come back bit for bit, from device memory and from the host's, where the source rests.
 *
 *   usage: [mpirun -np N] bench_transfer [train|score] [SOURCE'S LAYOUT] [TARGET'S LAYOUT] [OPTIONS OF train...]
 *
 * train: the source has gradients and an optimizer, which --data-parallel-sharding-strategy shards; score: weights
 * only. The default is a small model on the CPU. 8B on four GPUs:
 *
 *   mpirun -np 4 bench_transfer score "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2" "" --bf16 \
 *       --device cuda --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention \
 *       --num-query-groups 8 --ffn-hidden-size 14336 --vocab-size 128256
 */
#include "../data/options/option_rules.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/transfer.h"
#include "../data/checkpoint/run_options.h"

#include <stdlib.h>
#include <string.h>

enum { RUNS = 5, TOKENS = 64, PLAIN_BYTES = 64 << 20 };

typedef struct role {
    mt_run_options options;
    mt_grid grid;
    const mt_ops *ops;
    mt_model *model;
} role;

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

static void role_open(role *r, const mt_grid *job, const char *layout, bool train, int argc, char **argv) {
    char line[2048], *words[128];
    mt_error error;
    int count = 0;
    snprintf(line, sizeof line,
             "bench --mock-data --seq-length %d --micro-batch-size 1 --global-batch-size %d --train-iters 1 --lr 1e-4 "
             "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
             "--untie-embeddings-and-output-weights %s %s",
             TOKENS, job->world.size,
             argc > 4 ? "" : "--device cpu --num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 8192",
             layout);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    for (int i = 4; i < argc && count < 128; i++) words[count++] = argv[i];
    r->grid = mt_grid_new(job);
    check(mt_options_parse(&r->options, MT_PROGRAM_TRAIN, count, words, &error), &error);
    check(mt_options_finish(&r->options, MT_PROGRAM_TRAIN, job->world.size, &error), &error);
    check(mt_grid_build(&r->grid, &r->options.stack, &error), &error);
    r->ops = mt_backend_open(r->options.device, &r->grid, &error);
    mt_model_plan plan = {.max_tokens = TOKENS, .max_logits = 1, .max_position = TOKENS, .train = train};
    check(r->ops ? mt_model_create(&r->model, &r->options.stack, &r->grid, r->ops, &plan, &error) : -1, &error);
    mt_model_init(r->model);
    r->ops->stream_synchronize(mt_model_stream(r->model));
}

static void role_close(role *r) {
    mt_model_destroy(r->model);
    mt_options_free(&r->options);
    mt_grid_clear(&r->grid);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median time of RUNS runs, of the slowest rank. */
static double seconds_of(const role *r, void (*run)(void *context), void *context) {
    double times[RUNS];
    for (int i = -1; i < RUNS; i++) { // the first one connects ranks
        mt_barrier(&r->grid.world);
        double start = mt_time();
        run(context);
        r->ops->stream_synchronize(mt_model_stream(r->model));
        if (i >= 0) times[i] = mt_time() - start;
    }
    mt_all_reduce_max(&r->grid.world, times, RUNS, MT_F64);
    qsort(times, RUNS, sizeof *times, compare);
    return times[RUNS / 2];
}

static void run_transfer(void *transfer) {
    mt_transfer_run(transfer);
}

typedef struct plain {
    const role *role;
    char *in, *out;
} plain;

static void run_plain(void *context) {
    const plain *p = context;
    const mt_group *world = &p->role->grid.world;
    p->role->ops->all_to_all(p->out, p->in, PLAIN_BYTES / world->size, MT_U8, world, mt_model_stream(p->role->model));
}

/* Bytes per second that a rank sends to the others in a plain all-to-all. */
static double plain_rate(const role *r) {
    plain p = {r, r->ops->memory_alloc(PLAIN_BYTES), r->ops->memory_alloc(PLAIN_BYTES)};
    r->ops->memory_zero(p.in, PLAIN_BYTES, mt_model_stream(r->model));
    double seconds = seconds_of(r, run_plain, &p), size = r->grid.world.size;
    r->ops->memory_free(p.in);
    r->ops->memory_free(p.out);
    return PLAIN_BYTES * (size - 1) / size / seconds;
}

/* This rank's weights in host memory; to free. */
static char *weights_of(const role *r, int64_t *bytes) {
    int64_t count;
    char *all = NULL;
    mt_model_buckets(r->model, &count);
    *bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        mt_shard shard = mt_bucket_shard(r->model, i, MT_STATE_WEIGHTS);
        int64_t size = shard.count * mt_dtype_size(shard.dtype);
        all = mt_realloc(all, *bytes + size);
        r->ops->memory_copy(all + *bytes, shard.data, size, mt_model_stream(r->model));
        r->ops->stream_synchronize(mt_model_stream(r->model));
        *bytes += size;
    }
    return all;
}

/* The source's weights survive the way there and back. */
static void check_bits(role *source, mt_transfer *there, mt_transfer *back, bool rests) {
    mt_error error;
    int64_t bytes, same;
    char *before = weights_of(source, &bytes);
    if (rests) check(mt_model_rest(source->model, 1 << MT_PART_PARAMS, &error), &error);
    mt_transfer_run(there);
    if (rests) check(mt_model_wake(source->model, 1 << MT_PART_PARAMS, &error), &error);
    int64_t count;
    mt_model_buckets(source->model, &count);
    for (int64_t i = 0; i < count; i++) { // or a way back that does nothing would pass
        mt_shard shard = mt_bucket_shard(source->model, i, MT_STATE_WEIGHTS);
        mt_shard_write(source->model, &shard, shard.first, NULL, shard.count);
    }
    mt_transfer_run(back);
    source->ops->stream_synchronize(mt_model_stream(source->model));
    char *after = weights_of(source, &same);
    if (same != bytes || memcmp(before, after, (size_t)bytes) != 0)
        mt_die("rank %d: the weights are not the same after the way there and back", source->grid.world.rank);
    free(before);
    free(after);
}

static void print_transfer(const role *r, const char *name, mt_transfer *t, double rate) {
    mt_transfer_counts counts = mt_transfer_get_counts(t);
    double most[3] = {(double)counts.sent, (double)counts.received, (double)counts.scratch};
    double seconds = seconds_of(r, run_transfer, t);
    mt_all_reduce_max(&r->grid.world, most, 3, MT_F64);
    if (r->grid.world.rank != 0) return;
    double least = (most[0] > most[1] ? most[0] : most[1]) / rate;
    printf("%s: %.1f ms; a rank sends up to %.1f MB and receives up to %.1f MB in %lld rounds, scratch %.0f MB", name,
           seconds * 1e3, most[0] / 1e6, most[1] / 1e6, (long long)counts.rounds, most[2] / 1e6);
    printf(least > 0 ? "; %.2f times the bytes at the plain rate\n" : "\n", seconds / least);
}

int main(int argc, char **argv) {
    mt_grid job;
    role source, target;
    mt_transfer *there, *back;
    mt_error error;
    mt_grid_start(&job, &argc, &argv);
    int size = job.world.size;
    bool train = argc > 1 && strcmp(argv[1], "train") == 0;
    const char *layout = size % 4 == 0   ? "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
                         : size % 2 == 0 ? "--tensor-model-parallel-size 2"
                                         : "";
    if (argc > 2) layout = argv[2];
    role_open(&source, &job, layout, train, argc, argv);
    role_open(&target, &job, argc > 3 ? argv[3] : "", false, argc, argv);
    double start = mt_time();
    check(mt_transfer_open(&there, target.model, source.model, false, 0, &error), &error);
    double planned = mt_time() - start;
    check(mt_transfer_open(&back, source.model, target.model, false, 0, &error), &error);
    check_bits(&source, there, back, false);
    check_bits(&source, there, back, true);
    double rate = plain_rate(&source);
    if (job.world.rank == 0)
        printf("bench_transfer: %.0f M parameters, %d ranks, '%s' to '%s'; plan %.0f ms; plain all-to-all %.1f GB/s a "
               "rank; there and back bit for bit\n",
               (double)mt_num_parameters(&source.options.stack) / 1e6, size, layout, argc > 3 ? argv[3] : "",
               planned * 1e3, rate / 1e9);
    print_transfer(&source, "there", there, rate);
    print_transfer(&source, "back", back, rate);
    mt_transfer_close(there), mt_transfer_close(back);
    role_close(&target), role_close(&source);
    mt_grid_stop(&job);
    return 0;
}
