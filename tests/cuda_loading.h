/* cuda_loading.h: a pipeline whose ranks load kernels while messages are pending. To be the first that a process runs,
 * while cuBLASLt has loaded no kernel. */
#ifndef MT_CUDA_LOADING_H
#define MT_CUDA_LOADING_H

#include "layouts.h"

/* As make_batch, with fewer rows in most micro-batches. */
static int make_shorter_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    sequence_source from = *(const sequence_source *)context;
    from.rows >>= index % 6;
    return make_batch(&from, index, batch, error);
}

/* Runs first, while cuBLASLt has loaded no kernel: a load waits for pending messages. Messages of 32 and 64 MiB are
 * longer than the buffers of a channel, and groups of 6 micro-batches need receives that are posted early. Later steps
 * have numbers of tokens for which no algorithm is chosen. A rank that waits for ever is ended by
 * --distributed-timeout-seconds. `more`: options. */
static void train_while_kernels_load(const char *more) {
    static const char *const schedules[] = {VP "2" GROUP "6", ""}; // in bf16, then in fp32, by other kernels
    if (world.world.size < 2) skip();
    for (int i = 0; i < 2 && world.world.rank < 2; i++) {
        trainee t = {.sequences = 1, .grid = grid_of_job(2)};
        mt_error error;
        char words[256];
        snprintf(words, sizeof words, PP "2 --hidden-size 4096 --micro-batch-size 256 --global-batch-size 3072%s %s",
                 schedules[i], more);
        assert_int_equal(trainee_parse(&t.options, LLAMA, words, i == 0 ? MT_BF16 : MT_F32, 2, &error), 0);
        assert_int_equal(trainee_open(&t, &error), 0);
        for (int step = 0; step < 3; step++) {
            sequence_source from = source_of(&t, t.state.consumed_train_samples, false);
            mt_metrics metrics;
            mt_batch_source *source = step == 0 ? make_batch : make_shorter_batch;
            int64_t count = step == 0 && i == 1 ? 1 : 12; // one micro-batch accumulates no gradients
            assert_int_equal(mt_train_step(t.model, &t.state, count, source, &from, &t.batch, &metrics, &error), 0);
            assert_true(isfinite(metrics.loss) && isfinite(metrics.grad_norm));
        }
        trainee_close(&t);
    }
}

/* Starts the ranks; false without a GPU for each, which rank 0 says. */
static bool start_on_gpus(int argc, char **argv) {
    mt_error error;
    mt_grid_start(&world, &argc, &argv);
    if (!world.world.comm) mt_die("start me with mpirun");
    int answers = mt_cuda_open(world.world.rank, &error) != NULL;
    mt_broadcast(&world.world, &answers, sizeof answers, 0); // without one for every rank some layouts are tried
    if (!answers) {
        printf("skipped: %s\n", error.text);
        mt_grid_stop(&world);
        return false;
    }
    backend_name = "cuda";
    jobs_open();
    return true;
}

#endif
