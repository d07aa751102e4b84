/* bench_call.h: times one operation of the GPU; for bench_cuda_linear and bench_cuda_sparse. */
#ifndef MT_BENCH_CALL_H
#define MT_BENCH_CALL_H

#include "../megatron.h"

#include <stdlib.h>

static const mt_ops *ops;
static mt_stream *stream;

static void *random_bf16(int64_t n) {
    void *x = ops->memory_alloc(n * 2);
    ops->random_normal(x, n, (uint64_t)n, 0, 0, 1, MT_BF16, stream);
    return x;
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Milliseconds of a call: the median of ROUNDS, behind WARM_UPS, which the program defines. */
static double measure(void (*call)(const void *args), const void *args) {
    double times[ROUNDS];
    mt_event *from = mt_cuda_event_create(), *to = mt_cuda_event_create();
    for (int i = -WARM_UPS; i < ROUNDS; i++) {
        ops->event_record(from, stream);
        call(args);
        ops->event_record(to, stream);
        ops->stream_synchronize(stream);
        if (i >= 0) times[i] = 1e3 * mt_cuda_event_seconds(from, to);
    }
    ops->event_destroy(from), ops->event_destroy(to);
    qsort(times, ROUNDS, sizeof *times, order);
    return times[ROUNDS / 2];
}
#endif
