/* GELU in the epilogue of a product: linear_gelu_forward and linear_backward_gelu beside a product and a
 * separate GELU kernel, for the MLP's matrices of GPT-2 and a larger model, in bf16.
 *
 *   usage: bench_cuda_gelu [deterministic]
 *
 * The first call of a shape times both ways and keeps the faster one; with the word the epilogue is always used, as
 * with --deterministic-mode. */
#include "../megatron.h"

#include <stdlib.h>
#include <string.h>

#ifndef MT_HAVE_CUDA
int main(void) {
    printf("bench_cuda_gelu: skipped: this build has no CUDA\n");
    return 0;
}
#else

enum { BATCHES = 9, CALLS = 6, AHEAD = 3, WORKSPACE_BYTES = 32 << 20 };

typedef struct bench {
    const mt_ops *ops;
    mt_stream *stream;
    mt_event *from, *to;
    int64_t T, C, F;   // fc1: x[T, C] to pre[T, F]; fc2: y[T, F] to [T, C]
    void *x, *pre, *y; // x is also the gradient of fc2's result, y that of pre
    void *w1, *w2;     // [F, C], [C, F]
} bench;

static void forward_separate(const bench *b) {
    mt_activation_args a = {.T = b->T, .F = b->F, .activation = MT_ACTIVATION_GELU_TANH, .x = b->pre, .y = b->y};
    b->ops->linear_forward(&(mt_linear_args){b->T, b->F, b->C, .x = b->x, .w = b->w1, .y = b->pre}, MT_BF16, b->stream);
    b->ops->activation_forward(&a, MT_BF16, b->stream);
}

static void forward(const bench *b) {
    b->ops->linear_gelu_forward(&(mt_linear_args){b->T, b->F, b->C, .x = b->x, .w = b->w1, .pre = b->pre, .y = b->y},
                                MT_BF16, b->stream);
}

static void backward_separate(const bench *b) {
    mt_activation_args a = {.T = b->T, .F = b->F, .activation = MT_ACTIVATION_GELU_TANH, .x = b->pre};
    a.dy = a.dx = b->y;
    b->ops->linear_backward_input(&(mt_linear_args){b->T, b->C, b->F, .w = b->w2, .dy = b->x, .dx = b->y}, MT_BF16,
                                  b->stream);
    b->ops->activation_backward(&a, MT_BF16, b->stream);
}

static void backward(const bench *b) {
    b->ops->linear_backward_gelu(&(mt_linear_args){b->T, b->C, b->F, .x = b->pre, .w = b->w2, .dy = b->x, .dx = b->y},
                                 MT_BF16, b->stream);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median microseconds of a call. Calls before the timed ones keep the GPU at work while the host enqueues. */
static double measure(const bench *b, void (*run)(const bench *b)) {
    double seconds[BATCHES];
    for (int batch = -1; batch < BATCHES; batch++) { // the first warms up
        for (int i = -AHEAD; i < CALLS; i++) {
            if (i == 0) mt_cuda_event_record(b->from, b->stream);
            run(b);
        }
        mt_cuda_event_record(b->to, b->stream);
        double total = mt_cuda_event_seconds(b->from, b->to);
        if (batch >= 0) seconds[batch] = total / CALLS;
    }
    qsort(seconds, BATCHES, sizeof *seconds, compare_doubles);
    return seconds[BATCHES / 2] * 1e6;
}

static void *random_bf16(const bench *b, int64_t count, float deviation) {
    void *x = b->ops->memory_alloc(count * 2);
    b->ops->random_normal(x, count, 1, 0, 0, deviation, MT_BF16, b->stream);
    return x;
}

int main(int argc, char **argv) {
    static const int64_t shapes[][3] = {{65536, 768, 3072},  {16384, 1280, 5120}, {16384, 1600, 6400},
                                        {8192, 4096, 16384}, {65536, 768, 768},   {256, 768, 3072}};
    bool deterministic = argc > 1 && strcmp(argv[1], "deterministic") == 0;
    mt_error error;
    bench b = {.ops = mt_cuda_open(0, &error)};
    if (!b.ops) {
        printf("bench_cuda_gelu: skipped: %s\n", error.text);
        return 0;
    }
    b.stream = b.ops->stream_create(b.ops->memory_alloc(WORKSPACE_BYTES), WORKSPACE_BYTES, deterministic);
    b.from = mt_cuda_event_create(), b.to = mt_cuda_event_create();
    printf("us, separate kernels and %s\n%-24s %20s %20s\n", deterministic ? "the epilogue" : "the faster way",
           "product", "forward", "backward");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        char name[64];
        b.T = shapes[i][0], b.C = shapes[i][1], b.F = shapes[i][2];
        b.x = random_bf16(&b, b.T * b.C, 1), b.pre = random_bf16(&b, b.T * b.F, 1), b.y = random_bf16(&b, b.T * b.F, 1);
        b.w1 = random_bf16(&b, b.F * b.C, 0.02f), b.w2 = random_bf16(&b, b.C * b.F, 0.02f);
        snprintf(name, sizeof name, "%lld x %lld by %lld", (long long)b.T, (long long)b.C, (long long)b.F);
        printf("%-24s %9.1f %10.1f %9.1f %10.1f\n", name, measure(&b, forward_separate), measure(&b, forward),
               measure(&b, backward_separate), measure(&b, backward));
        void *memory[] = {b.x, b.pre, b.y, b.w1, b.w2};
        for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) b.ops->memory_free(memory[m]);
    }
    b.ops->stream_destroy(b.stream);
    return 0;
}
#endif
