/* The speed of the GPU's recurrences on two texts of 8192 tokens in bf16: the median of some runs, in milliseconds.
 *
 *   usage: bench_cuda_linear */
#include "../megatron.h"

#include <stdio.h>

#ifndef MT_HAVE_CUDA
int main(void) {
    puts("recurrences on the GPU: skipped, built without CUDA");
    return 0;
}
#else
#include <stdlib.h>

enum { WARM_UPS = 3, ROUNDS = 20, TEXTS = 2, LENGTH = 8192, TOKENS = TEXTS * LENGTH };

#include "bench_call.h"

static mt_span spans_host[TEXTS];
static mt_spans spans = {.host = spans_host, .count = TEXTS};

static void ssd_forward(const void *args) {
    ops->ssd_forward(args, MT_BF16, stream);
}
static void ssd_backward(const void *args) {
    ops->ssd_backward(args, MT_BF16, stream);
}

static void bench_ssd(int64_t H, int64_t G, int64_t N, int64_t P) {
    int64_t width = H * P + 2 * G * N;
    mt_ssd_args a = {.spans = &spans, .G = G, .H = H, .N = N, .P = P, .dt_max = 1e30f};
    uint16_t *x = random_bf16(TOKENS * width), *dx = random_bf16(TOKENS * width);
    a.x = x, a.B = x + H * P, a.C = x + H * P + G * N, a.dx = dx, a.dB = dx + H * P, a.dC = dx + H * P + G * N;
    a.stride = a.dstride = width, a.dt_stride = a.ddt_stride = H;
    a.dt = random_bf16(TOKENS * H), a.ddt = random_bf16(TOKENS * H), a.A_log = random_bf16(H);
    a.D = random_bf16(H), a.dt_bias = random_bf16(H);
    a.out = random_bf16(TOKENS * H * P), a.dout = random_bf16(TOKENS * H * P);
    float *sums = ops->memory_alloc(3 * H * 4);
    ops->memory_zero(sums, 3 * H * 4, stream);
    a.dA_log = sums, a.dD = sums + H, a.ddt_bias = sums + 2 * H;
    int64_t bytes = ops->ssd_workspace_bytes(TOKENS, &a, true);
    void *workspace = ops->memory_alloc(bytes);
    stream = ops->stream_create(workspace, bytes, false);
    double forward = measure(ssd_forward, &a), backward = measure(ssd_backward, &a);
    printf("Mamba-2 of %lld heads of %lld, %lld groups, state %lld: forward %.3f ms, forward and backward %.3f ms, "
           "workspace %lld MiB\n",
           (long long)H, (long long)P, (long long)G, (long long)N, forward, forward + backward,
           (long long)(bytes >> 20));
    ops->stream_destroy(stream);
    stream = NULL;
    void *const memory[] = {workspace,
                            sums,
                            x,
                            dx,
                            (void *)(uintptr_t)a.dt,
                            a.ddt,
                            (void *)(uintptr_t)a.A_log,
                            (void *)(uintptr_t)a.D,
                            (void *)(uintptr_t)a.dt_bias,
                            a.out,
                            (void *)(uintptr_t)a.dout};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) ops->memory_free(memory[i]);
}

static void delta_forward(const void *args) {
    ops->delta_rule_forward(args, MT_BF16, stream);
}
static void delta_backward(const void *args) {
    ops->delta_rule_backward(args, MT_BF16, stream);
}

static void bench_delta(const char *name, int64_t Hk, int64_t Hv, int64_t D, int64_t decays) {
    int64_t keys = Hk * D, width = 2 * keys + Hv * D;
    mt_delta_args a = {.spans = &spans, .Hk = Hk, .Hv = Hv, .Dk = D, .Dv = D, .decays = decays};
    uint16_t *q = random_bf16(TOKENS * width), *dq = random_bf16(TOKENS * width);
    uint16_t *gates = random_bf16(2 * TOKENS * Hv * (1 + decays)), *heads = random_bf16(2 * Hv * (1 + decays));
    uint16_t *out = random_bf16(2 * TOKENS * Hv * D);
    float *sums = ops->memory_alloc(Hv * (1 + decays) * 4);
    ops->memory_zero(sums, Hv * (1 + decays) * 4, stream);
    a.q = q, a.k = q + keys, a.v = q + 2 * keys, a.dq = dq, a.dk = dq + keys, a.dv = dq + 2 * keys;
    a.q_stride = a.k_stride = a.v_stride = a.dq_stride = a.dk_stride = a.dv_stride = width;
    a.a = gates, a.da = gates + TOKENS * Hv * decays, a.a_stride = a.da_stride = Hv * decays;
    a.b = gates + 2 * TOKENS * Hv * decays, a.db = gates + TOKENS * Hv * (2 * decays + 1),
    a.b_stride = a.db_stride = Hv;
    a.A_log = heads, a.dt_bias = heads + Hv, a.out = out, a.dout = out + TOKENS * Hv * D;
    a.dA_log = sums, a.ddt_bias = sums + Hv;
    int64_t bytes = ops->delta_workspace_bytes(TOKENS, &a, MT_BF16, true);
    void *workspace = ops->memory_alloc(bytes);
    stream = ops->stream_create(workspace, bytes, false);
    double forward = measure(delta_forward, &a), backward = measure(delta_backward, &a);
    printf("%s of %lld heads of %lld: forward %.3f ms, forward and backward %.3f ms, workspace %lld MiB\n", name,
           (long long)Hv, (long long)D, forward, forward + backward, (long long)(bytes >> 20));
    ops->stream_destroy(stream);
    stream = NULL;
    void *const memory[] = {workspace, sums, q, dq, gates, heads, out};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) ops->memory_free(memory[i]);
}

int main(void) {
    mt_error error;
    ops = mt_cuda_open(0, &error);
    if (!ops) {
        printf("recurrences on the GPU: skipped, %s\n", error.text);
        return 0;
    }
    for (int64_t i = 0; i < TEXTS; i++)
        spans_host[i] = (mt_span){.q_start = i * LENGTH, .q_len = LENGTH, .k_start = i * LENGTH, .k_len = LENGTH};
    mt_span *device = ops->memory_alloc(sizeof spans_host);
    ops->memory_copy(device, spans_host, sizeof spans_host, NULL);
    spans.device = device;
    bench_ssd(64, 8, 128, 64);
    bench_ssd(128, 8, 128, 64);
    bench_delta("Gated delta rule", 16, 32, 128, 1);
    bench_delta("Kimi delta attention", 32, 32, 128, 128);
    ops->memory_free(device);
    return 0;
}
#endif
