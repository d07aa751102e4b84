/* How fast linear layers grouped by expert are: TFLOP/s of each rung that uses tensor cores, beside cuBLASLt's for one
 * dense product of as many operations, for one product after another with the rows of each expert (which takes a host
 * that knows them), and cuBLAS's own grouped product. The rows of experts are drawn, from half to one and a half times
 * the mean. Operands do not fit in the cache.
 *
 *   usage: bench_cuda_grouped [RUNG]
 */
#include "../megatron.h"

#ifndef MT_HAVE_CUDA
int main(void) {
    puts("grouped linear layers on the GPU: skipped, built without CUDA");
    return 0;
}
#else
#include "../cuda/grouped.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 9, MAX_EXPERTS = 128 };

typedef struct bench_shape {
    const char *name;
    int64_t E, M, N, K;
} bench_shape;

typedef struct bench {
    const mt_ops *ops;
    mt_stream *stream;
    mt_grouped_call call;
    int32_t offsets[MAX_EXPERTS + 1];
    cublasHandle_t cublas;
    void **pointers; // [3, E] on the device, a, b and out of each expert for cuBLAS, whose A is b
} bench;

static const char *const kinds[] = {"forward", "backward_input", "backward_weight"};

static void *random_bf16(const bench *b, int64_t n) {
    float *floats = b->ops->memory_alloc(n * 4);
    void *x = b->ops->memory_alloc(n * 2);
    b->ops->random_normal(floats, n, (uint64_t)n, 0, 0, 1, MT_F32, b->stream);
    b->ops->convert(x, MT_BF16, floats, MT_F32, n, b->stream);
    b->ops->stream_synchronize(b->stream);
    b->ops->memory_free(floats);
    return x;
}

/* The median of some runs in milliseconds after a warm-up, or a negative number where `run` does not serve. */
static double measure(bool (*run)(const bench *b, const void *with), const bench *b, const void *with,
                      mt_stream *stream) {
    double times[ROUNDS];
    if (!run(b, with)) return -1;
    mt_event *start = mt_cuda_event_create(), *end = mt_cuda_event_create();
    for (int i = 0; i < ROUNDS; i++) {
        mt_cuda_event_record(start, stream);
        run(b, with);
        mt_cuda_event_record(end, stream);
        times[i] = 1e3 * mt_cuda_event_seconds(start, end);
        for (int j = i; j > 0 && times[j] < times[j - 1]; j--) {
            double swap = times[j];
            times[j] = times[j - 1], times[j - 1] = swap;
        }
    }
    mt_cuda_event_destroy(start), mt_cuda_event_destroy(end);
    return times[ROUNDS / 2];
}

static bool run_rung(const bench *b, const void *rung) {
    return ((const mt_grouped_rung *)rung)->product(&b->call);
}

/* Rows [first, first + rows) with the weights of one expert. */
static void run_linear(const bench *b, int64_t first, int64_t rows, int64_t e) {
    const mt_grouped_call *c = &b->call;
    const int64_t N = c->N, K = c->K, a_width = c->kind == MT_GROUPED_FORWARD ? K : N;
    const char *a = (const char *)c->a + first * a_width * 2, *w = (const char *)c->b + e * N * K * 2;
    if (rows == 0) return;
    if (c->kind == MT_GROUPED_FORWARD)
        b->ops->linear_forward(&(mt_linear_args){rows, N, K, .x = a, .w = w, .y = (char *)c->out + first * N * 2},
                               MT_BF16, b->stream);
    else if (c->kind == MT_GROUPED_BACKWARD_INPUT)
        b->ops->linear_backward_input(
            &(mt_linear_args){rows, N, K, .w = w, .dy = a, .dx = (char *)c->out + first * K * 2}, MT_BF16, b->stream);
    else
        b->ops->linear_backward_weight(&(mt_linear_args){rows, N, K, .x = (const char *)c->b + first * K * 2, .dy = a,
                                                         .dw = (float *)c->out + e * N * K,
                                                         .accumulate = c->accumulate},
                                       MT_BF16, b->stream);
}
static bool run_dense(const bench *b, const void *unused) {
    (void)unused;
    run_linear(b, 0, b->call.M, 0);
    return true;
}
static bool run_loop(const bench *b, const void *unused) {
    (void)unused;
    for (int64_t e = 0; e < b->call.E; e++) run_linear(b, b->offsets[e], b->offsets[e + 1] - b->offsets[e], e);
    return true;
}

/* cuBLAS counts columns first; see gemm.cu. */
static bool run_cublas_grouped(const bench *b, const void *unused) {
    (void)unused;
#if CUBLAS_VERSION >= 120500
    const mt_grouped_call *c = &b->call;
    cublasOperation_t trans_a[MAX_EXPERTS], trans_b[MAX_EXPERTS];
    int m[MAX_EXPERTS], n[MAX_EXPERTS], k[MAX_EXPERTS], lda[MAX_EXPERTS], ldb[MAX_EXPERTS], ldc[MAX_EXPERTS];
    int ones[MAX_EXPERTS];
    float alpha[MAX_EXPERTS], beta[MAX_EXPERTS];
    const int N = (int)c->N, K = (int)c->K;
    for (int64_t e = 0; e < c->E; e++) {
        const int rows = b->offsets[e + 1] - b->offsets[e];
        trans_a[e] = c->kind == MT_GROUPED_FORWARD ? CUBLAS_OP_T : CUBLAS_OP_N;
        trans_b[e] = c->kind == MT_GROUPED_BACKWARD_WEIGHT ? CUBLAS_OP_T : CUBLAS_OP_N;
        m[e] = c->kind == MT_GROUPED_FORWARD ? N : K, n[e] = c->kind == MT_GROUPED_BACKWARD_WEIGHT ? N : rows;
        k[e] = c->kind == MT_GROUPED_FORWARD ? K : c->kind == MT_GROUPED_BACKWARD_INPUT ? N : rows;
        lda[e] = K, ldb[e] = c->kind == MT_GROUPED_FORWARD ? K : N, ldc[e] = m[e], ones[e] = 1;
        alpha[e] = 1, beta[e] = c->accumulate ? 1 : 0;
    }
    const cudaDataType_t out_type = c->kind == MT_GROUPED_BACKWARD_WEIGHT ? CUDA_R_32F : CUDA_R_16BF;
    return cublasGemmGroupedBatchedEx(b->cublas, trans_a, trans_b, m, n, k, alpha, (const void *const *)b->pointers,
                                      CUDA_R_16BF, lda, (const void *const *)(b->pointers + c->E), CUDA_R_16BF, ldb,
                                      beta, b->pointers + 2 * c->E, out_type, ldc, (int)c->E, ones,
                                      CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_SUCCESS;
#else
    (void)b;
    return false;
#endif
}

static void draw_offsets(bench *b, const bench_shape *s) {
    double weights[MAX_EXPERTS], sum = 0, upto = 0;
    uint64_t state = 88172645463325252u;
    for (int64_t e = 0; e < s->E; e++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += weights[e] = 0.5 + (double)(state >> 11) / (double)(1ull << 53);
    }
    b->offsets[0] = 0;
    for (int64_t e = 0; e < s->E; e++) {
        upto += weights[e] / sum;
        b->offsets[e + 1] = e + 1 == s->E ? (int32_t)s->M : (int32_t)(upto * (double)s->M);
    }
}

static void set_pointers(const bench *b) {
    const mt_grouped_call *c = &b->call;
    char *host[3 * MAX_EXPERTS];
    const int64_t N = c->N, K = c->K;
    for (int64_t e = 0; e < c->E; e++) {
        const int64_t first = b->offsets[e];
        host[e] = (char *)c->b + (c->kind == MT_GROUPED_BACKWARD_WEIGHT ? first * K : e * N * K) * 2;
        host[c->E + e] = (char *)c->a + first * (c->kind == MT_GROUPED_FORWARD ? K : N) * 2;
        host[2 * c->E + e] = (char *)c->out + (c->kind == MT_GROUPED_FORWARD          ? first * N * 2
                                               : c->kind == MT_GROUPED_BACKWARD_INPUT ? first * K * 2
                                                                                      : e * N * K * 4);
    }
    b->ops->memory_copy(b->pointers, host, 3 * c->E * (int64_t)sizeof *host, b->stream);
    b->ops->stream_synchronize(b->stream);
}

static void print_rate(const char *name, double flops, double milliseconds) {
    if (milliseconds < 0) return;
    printf("  %s %.3f ms %.1f", name, milliseconds, flops / milliseconds / 1e9);
}

static void bench_kind(bench *b, const bench_shape *s, const char *only) {
    const double flops = 2 * (double)s->M * (double)s->N * (double)s->K;
    printf("grouped %-12s %s%s: TFLOP/s", s->name, kinds[b->call.kind], b->call.accumulate ? " +=" : "");
    for (int r = 0; r < MT_NUM_GROUPED_RUNGS; r++) {
        const mt_grouped_rung *rung = &mt_grouped_rungs[r];
        if (only ? strcmp(only, rung->name) != 0 : r == 0) continue; // the definition takes long
        print_rate(rung->name, flops, measure(run_rung, b, rung, b->stream));
    }
    if (!only) {
        print_rate("| dense", flops, measure(run_dense, b, NULL, b->stream));
        print_rate("loop", flops, measure(run_loop, b, NULL, b->stream));
        set_pointers(b);
        print_rate("cublas grouped", flops, measure(run_cublas_grouped, b, NULL, NULL));
    }
    printf("\n");
    fflush(stdout);
}

static void bench_case(bench *b, const bench_shape *s, const char *only) {
    const mt_ops *ops = b->ops;
    const int64_t weights = s->E * s->N * s->K;
    void *x = random_bf16(b, s->M * s->K), *dy = random_bf16(b, s->M * s->N), *w = random_bf16(b, weights);
    void *y = ops->memory_alloc(s->M * (s->N > s->K ? s->N : s->K) * 2), *dw = ops->memory_alloc(weights * 4);
    int32_t *offsets = ops->memory_alloc((s->E + 1) * 4);
    draw_offsets(b, s);
    ops->memory_copy(offsets, b->offsets, (s->E + 1) * 4, b->stream);
    ops->memory_zero(dw, weights * 4, b->stream);
    const mt_grouped_call calls[] = {{MT_GROUPED_FORWARD, y, x, w, .accumulate = false},
                                     {MT_GROUPED_BACKWARD_INPUT, y, dy, w, .accumulate = false},
                                     {MT_GROUPED_BACKWARD_WEIGHT, dw, dy, x, .accumulate = false},
                                     {MT_GROUPED_BACKWARD_WEIGHT, dw, dy, x, .accumulate = true}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        b->call = calls[i], b->call.offsets = offsets, b->call.dtype = MT_BF16, b->call.stream = b->stream;
        b->call.M = s->M, b->call.N = s->N, b->call.K = s->K, b->call.E = s->E;
        bench_kind(b, s, only);
    }
    void *all[] = {x, dy, w, y, dw, offsets};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ops->memory_free(all[i]);
}

int main(int argc, char **argv) {
    static const bench_shape shapes[] = {{"Qwen3 fc1", 128, 131072, 1536, 2048},
                                         {"Qwen3 fc2", 128, 131072, 2048, 768},
                                         {"Mixtral fc1", 8, 8192, 28672, 4096},
                                         {"Mixtral fc2", 8, 8192, 4096, 14336}};
    mt_error error;
    bench b = {.ops = mt_cuda_open(0, &error)};
    if (!b.ops) {
        printf("grouped linear layers on the GPU: skipped, %s\n", error.text);
        return 0;
    }
    int64_t bytes = b.ops->workspace_bytes(8192, 4096, 32, 128);
    void *workspace = b.ops->memory_alloc(bytes);
    b.stream = b.ops->stream_create(workspace, bytes, false);
    b.pointers = b.ops->memory_alloc(3 * MAX_EXPERTS * (int64_t)sizeof *b.pointers);
    if (cublasCreate(&b.cublas) != CUBLAS_STATUS_SUCCESS) return 1;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) bench_case(&b, &shapes[i], argc > 1 ? argv[1] : NULL);
    cublasDestroy(b.cublas);
    b.ops->stream_destroy(b.stream);
    b.ops->memory_free(workspace), b.ops->memory_free(b.pointers);
    return 0;
}
#endif
