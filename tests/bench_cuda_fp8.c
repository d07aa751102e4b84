/* How fast products in fp8 are: TFLOP/s of every implementation, beside the same product in bf16. Shapes: the linear
 * layers of Llama 3 8B with 8192 tokens, forward, the input's gradient and the weight's, which accumulates in fp32.
 * Operands are random. Several sets of operands do not fit in the cache.
 *
 *   usage: bench_cuda_fp8 [RUNG]
 */
#include "../megatron.h"

#ifndef MT_HAVE_CUDA
int main(void) {
    puts("fp8 products on the GPU: skipped, built without CUDA");
    return 0;
}
#else
#include "../cuda/fp8.h"

#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 9, SETS = 3, TOKENS = 8192 };

typedef struct bench {
    const mt_ops *ops;
    mt_stream *stream;
    mt_event *start, *end;
    mt_fp8_product_args products[SETS];
    void *a[SETS], *b[SETS]; // in bf16
} bench;

static void *random_bf16(const bench *b, int64_t n, uint64_t key) {
    void *x = b->ops->memory_alloc(n * 2);
    b->ops->random_normal(x, n, key, 0, 0, 1, MT_BF16, b->stream);
    return x;
}

/* x[R, C] in fp8. */
static mt_fp8_matrix quantized(const bench *b, const void *x, int64_t R, int64_t C, mt_dtype format,
                               mt_fp8_blocks blocks) {
    mt_fp8_matrix matrix = {.stride = mt_fp8_stride(C, blocks), .format = format, .blocks = blocks};
    matrix.data = b->ops->memory_alloc(R * matrix.stride);
    matrix.inverse_scales = b->ops->memory_alloc(4 * mt_fp8_num_scales(R, matrix.stride, blocks));
    float *amax = b->ops->memory_alloc(4);
    mt_quantize_args a = {.x = x, .count = 1, .R = R, .C = C, .rows = matrix};
    if (blocks == MT_FP8_TENSOR) a.amax = amax;
    b->ops->quantize(&a, MT_BF16, b->stream);
    b->ops->stream_synchronize(b->stream);
    b->ops->memory_free(amax);
    return matrix;
}

/* Runs the product of a set: with a rung, or in bf16 if it is NULL. */
static bool run(const bench *b, const mt_fp8_rung *rung, int set) {
    const mt_fp8_product_args *p = &b->products[set];
    if (rung) return rung->product(p, b->stream);
    if (p->out_dtype == MT_F32) // [K, M]^T [K, N], as stored for the gradient of a weight
        b->ops->linear_backward_weight(p->out, NULL, b->a[set], b->b[set], p->K, p->M, p->N, true, MT_BF16, b->stream);
    else
        b->ops->linear_forward(p->out, b->a[set], b->b[set], NULL, p->M, p->N, p->K, MT_BF16, b->stream);
    return true;
}

/* Median seconds, or a negative number where the rung does not serve. */
static double measure(const bench *b, const mt_fp8_rung *rung) {
    double times[ROUNDS];
    for (int set = 0; set < SETS; set++)
        if (!run(b, rung, set)) return -1;
    for (int i = 0; i < ROUNDS; i++) {
        mt_cuda_event_record(b->start, b->stream);
        for (int set = 0; set < SETS; set++) run(b, rung, set);
        mt_cuda_event_record(b->end, b->stream);
        times[i] = mt_cuda_event_seconds(b->start, b->end) / SETS;
        for (int j = i; j > 0 && times[j] < times[j - 1]; j--) {
            double swap = times[j];
            times[j] = times[j - 1], times[j - 1] = swap;
        }
    }
    return times[ROUNDS / 2];
}

static void print_rate(const char *name, double flops, double seconds) {
    if (seconds > 0) printf(" | %s %.3f ms %.0f", name, 1e3 * seconds, flops / seconds * 1e-12);
}

typedef struct bench_case {
    const char *name;
    int64_t M, N, K;
    mt_dtype out_dtype;
} bench_case;

/* Scales of the tensor, summed in few bits and in fp32; of blocks. */
static void bench_shape(bench *b, const bench_case *c, const char *only) {
    static const char *const recipes[] = {"tensor", "tensor, exact", "blocks"};
    const double flops = 2.0 * (double)c->M * (double)c->N * (double)c->K;
    const bool of_weight = c->out_dtype == MT_F32;
    for (int recipe = 0; recipe < 3; recipe++) {
        mt_fp8_blocks a_blocks = recipe < 2 ? MT_FP8_TENSOR : MT_FP8_VECTOR_128;
        mt_fp8_blocks b_blocks = recipe < 2 ? MT_FP8_TENSOR : of_weight ? MT_FP8_VECTOR_128 : MT_FP8_BLOCK_128;
        for (int set = 0; set < SETS; set++) {
            mt_fp8_product_args p = {.M = c->M, .N = c->N, .K = c->K, .out_dtype = c->out_dtype};
            b->a[set] = random_bf16(b, c->M * c->K, (uint64_t)set), b->b[set] = random_bf16(b, c->N * c->K, 9);
            p.a = quantized(b, b->a[set], c->M, c->K, MT_F8_E4M3, a_blocks);
            p.b = quantized(b, b->b[set], c->N, c->K, MT_F8_E4M3, b_blocks);
            p.exact_sums = recipe > 0, p.accumulate = of_weight;
            p.out = b->ops->memory_alloc(c->M * c->N * mt_dtype_size(c->out_dtype));
            b->ops->memory_zero(p.out, c->M * c->N * mt_dtype_size(c->out_dtype), b->stream);
            b->products[set] = p;
        }
        printf("%-10s %5lld x %5lld x %5lld, %-13s: TFLOP/s", c->name, (long long)c->M, (long long)c->N,
               (long long)c->K, recipes[recipe]);
        for (int rung = 0; rung < MT_NUM_FP8_RUNGS; rung++) {
            const char *name = mt_fp8_rungs[rung].name;
            if (only ? strcmp(only, name) == 0 : rung > 0) print_rate(name, flops, measure(b, &mt_fp8_rungs[rung]));
        }
        if (recipe == 0) print_rate("bf16", flops, measure(b, NULL));
        printf("\n");
        fflush(stdout);
        for (int set = 0; set < SETS; set++) {
            mt_fp8_product_args *p = &b->products[set];
            void *all[] = {b->a[set], b->b[set],           p->a.data, p->a.inverse_scales,
                           p->b.data, p->b.inverse_scales, p->out};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++) b->ops->memory_free(all[i]);
        }
    }
}

int main(int argc, char **argv) {
    static const int64_t layers[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}; // N, K
    mt_error error;
    bench b = {.ops = mt_cuda_open(0, &error)};
    if (!b.ops) {
        printf("fp8 products on the GPU: skipped, %s\n", error.text);
        return 0;
    }
    int64_t bytes = b.ops->workspace_bytes(TOKENS, 4096, 32, 128);
    void *workspace = b.ops->memory_alloc(bytes);
    b.stream = b.ops->stream_create(workspace, bytes, false);
    b.start = mt_cuda_event_create(), b.end = mt_cuda_event_create();
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const int64_t N = layers[i][0], K = layers[i][1];
        const bench_case cases[] = {
            {"forward", TOKENS, N, K, MT_BF16}, {"input", TOKENS, K, N, MT_BF16}, {"weight", N, K, TOKENS, MT_F32}};
        for (int k = 0; k < 3; k++) bench_shape(&b, &cases[k], argc > 1 ? argv[1] : NULL);
    }
    mt_cuda_event_destroy(b.start), mt_cuda_event_destroy(b.end);
    b.ops->stream_destroy(b.stream);
    b.ops->memory_free(workspace);
    return 0;
}
#endif
