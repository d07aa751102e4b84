/* The speed of each rung of the GPU's attention and of cuDNN's: milliseconds and TFLOP/s, forward and backward. A
 * causal forward takes 2 T T / 2 H (D + Dv) flops a sequence (two products, each entry a multiply and an add), the
 * backward 2 T T / 2 H (3 D + 2 Dv). Products that a rung repeats are not counted.
 *
 *   usage: bench_cuda_attention [RUNG | unordered | cudnn | --rows] [DROPOUT]
 *
 * --rows prints a row for each shape as if it had taken 1 ms, in any build: tests/test_bench_gpu.sh checks with them
 * that tests/bench_gpu.sh reads the rows and that the shapes of tests/bench_gpu.txt are among them.
 */
#include "../megatron.h"

#include <string.h>

typedef struct bench_shape {
    int64_t T, sequences, H, G, D, Dv;
} bench_shape;

/* Short ones first: after a second of D 128 a GPU at its power limit stays slower for a while. */
static const bench_shape shapes[] = {
    {1024, 64, 12, 12, 64, 64},  {1024, 16, 25, 25, 64, 64},    {8192, 1, 32, 8, 64, 64},
    {4096, 2, 32, 8, 128, 128},  {8192, 1, 32, 8, 128, 128},    {8192, 2, 32, 32, 128, 128},
    {32768, 1, 32, 8, 128, 128}, {4096, 1, 128, 128, 192, 128}, {8192, 2, 16, 2, 256, 256}};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

/* tests/bench_gpu.sh reads this row. */
static void print_row(const char *rung, const bench_shape *s, double forward_ms, double backward_ms) {
    double pairs = (double)s->T * (double)s->T / 2 * (double)(s->H * s->sequences);
    double forward = 2 * pairs * (double)(s->D + s->Dv), backward = 2 * pairs * (double)(3 * s->D + 2 * s->Dv);
    printf("attention %-6s T %6lld x %-3lld H %3lld/%-3lld D %3lld/%-3lld: forward %8.3f ms %6.1f TFLOP/s, "
           "backward %8.3f ms %6.1f TFLOP/s\n",
           rung, (long long)s->T, (long long)s->sequences, (long long)s->H, (long long)s->G, (long long)s->D,
           (long long)s->Dv, forward_ms, forward / forward_ms / 1e9, backward_ms, backward / backward_ms / 1e9);
    fflush(stdout);
}

static bool wants_rows(int argc, char **argv) {
    if (argc < 2 || strcmp(argv[1], "--rows") != 0) return false;
    for (int i = 0; i < NUM_SHAPES; i++) print_row("rung", &shapes[i], 1, 1);
    return true;
}

#ifndef MT_HAVE_CUDA
int main(int argc, char **argv) {
    if (!wants_rows(argc, argv)) puts("attention on the GPU: skipped, built without CUDA");
    return 0;
}
#else
#include "../cuda/attention.h"

#include <stdlib.h>

enum { ROUNDS = 10 };

static const mt_ops *ops;
static mt_stream *stream;
static double dropout;

static void *random_bf16(int64_t n) {
    float *floats = ops->memory_alloc(n * 4);
    void *x = ops->memory_alloc(n * 2);
    ops->random_normal(floats, n, (uint64_t)n, 0, 0, 1, MT_F32, stream);
    ops->convert(x, MT_BF16, floats, MT_F32, n, stream);
    ops->stream_synchronize(stream);
    ops->memory_free(floats);
    return x;
}

/* 0, 1, ... on the device. */
static int64_t *token_numbers(int64_t n) {
    int64_t *host = mt_malloc(n * 8), *device = ops->memory_alloc(n * 8);
    for (int64_t i = 0; i < n; i++) host[i] = i;
    ops->memory_copy(device, host, n * 8, stream);
    ops->stream_synchronize(stream);
    free(host);
    return device;
}

/* The median of some runs in milliseconds after a warm-up, or a negative number where the rung does not serve. */
static float measure(mt_attention_direction *direction, const mt_attention *call, int rounds) {
    float times[ROUNDS];
    if (!direction(call, MT_BF16, stream)) return -1;
    mt_event *start = mt_cuda_event_create(), *end = mt_cuda_event_create();
    for (int i = 0; i < rounds; i++) {
        mt_cuda_event_record(start, stream);
        direction(call, MT_BF16, stream);
        mt_cuda_event_record(end, stream);
        times[i] = (float)(1e3 * mt_cuda_event_seconds(start, end));
        for (int j = i; j > 0 && times[j] < times[j - 1]; j--) {
            float swap = times[j];
            times[j] = times[j - 1], times[j - 1] = swap;
        }
    }
    mt_cuda_event_destroy(start), mt_cuda_event_destroy(end);
    return times[rounds / 2];
}

static void bench(const bench_shape *s, const char *only) {
    int64_t rows = s->T * s->sequences, k = s->H * s->D, v = k + s->G * s->D, *numbers = token_numbers(rows);
    int64_t width = v + s->G * s->Dv, out_width = s->H * s->Dv;
    mt_span *host = mt_malloc(s->sequences * (int64_t)sizeof *host);
    for (int64_t i = 0; i < s->sequences; i++) host[i] = (mt_span){i * s->T, s->T, i * s->T, s->T, true};
    mt_span *device = ops->memory_alloc(s->sequences * (int64_t)sizeof *host);
    ops->memory_copy(device, host, s->sequences * (int64_t)sizeof *host, stream);
    uint16_t *qkv = random_bf16(rows * width), *dqkv = ops->memory_alloc(rows * width * 2);
    mt_attention forward = {.num_heads = s->H,
                            .num_groups = s->G,
                            .head_size = s->D,
                            .value_size = s->Dv,
                            .q = qkv,
                            .k = qkv + k,
                            .v = qkv + v,
                            .out = ops->memory_alloc(rows * out_width * 2),
                            .lse = ops->memory_alloc(rows * s->H * 4),
                            .q_stride = width,
                            .k_stride = width,
                            .v_stride = width,
                            .out_stride = out_width,
                            .spans = {.host = host, .device = device, .count = s->sequences},
                            .dropout = {dropout, 1},
                            .q_index = numbers,
                            .k_index = numbers,
                            .scale = 0.088f};
    mt_attention backward = forward;
    backward.dq = dqkv, backward.dk = dqkv + k, backward.dv = dqkv + v;
    backward.row_dot = ops->memory_alloc(rows * s->H * 4);
    backward.dout = random_bf16(rows * out_width);
    for (int r = 0; r <= MT_NUM_ATTENTION_RUNGS + 1; r++) {
        const mt_attention_rung *rung = r < MT_NUM_ATTENTION_RUNGS    ? &mt_attention_rungs[r]
                                        : r == MT_NUM_ATTENTION_RUNGS ? &mt_attention_unordered
                                                                      : &mt_attention_cudnn;
        if (only ? strcmp(only, rung->name) != 0 : r == 0) continue; // the definition takes seconds
        double f = (double)measure(rung->forward, &forward, ROUNDS),
               b = (double)measure(rung->backward, &backward, ROUNDS);
        if (f < 0 || b < 0) continue;
        print_row(rung->name, s, f, b);
    }
    ops->memory_free(qkv), ops->memory_free(dqkv), ops->memory_free(forward.out), ops->memory_free(forward.lse);
    ops->memory_free(backward.row_dot), ops->memory_free((void *)backward.dout), ops->memory_free(device);
    ops->memory_free(numbers);
    free(host);
}

int main(int argc, char **argv) {
    if (wants_rows(argc, argv)) return 0;
    mt_error error;
    ops = mt_cuda_open(0, &error);
    if (!ops) {
        printf("attention on the GPU: skipped, %s\n", error.text);
        return 0;
    }
    int64_t workspace_bytes = 0;
    for (int i = 0; i < NUM_SHAPES; i++) {
        const bench_shape *s = &shapes[i];
        int64_t bytes = ops->workspace_bytes(s->T * s->sequences, s->H * s->D, s->H, s->D);
        if (bytes > workspace_bytes) workspace_bytes = bytes;
    }
    void *workspace = ops->memory_alloc(workspace_bytes);
    stream = ops->stream_create(workspace, workspace_bytes, false);
    dropout = argc > 2 ? atof(argv[2]) : 0;
    for (int i = 0; i < NUM_SHAPES; i++) bench(&shapes[i], argc > 1 ? argv[1] : NULL);
    ops->stream_destroy(stream);
    ops->memory_free(workspace);
    return 0;
}
#endif
