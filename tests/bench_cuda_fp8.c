/* How fast products in fp8 are: TFLOP/s of every implementation, beside the same product in bf16. Shapes: the linear
 * layers of Llama 3 8B with 8192 tokens, and of the experts of Qwen3 30B-A3B with 16384 tokens; forward, the input's
 * gradient and the weight's, which is added or stored in fp32. Experts get half to one and a half times the mean of
 * rows. Operands are random. Several sets of operands do not fit in the cache.
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

enum { ROUNDS = 9, SETS = 3, TOKENS = 8192, EXPERTS = 128, EXPERT_ROWS = 16384 * 8 };

typedef struct bench {
    const mt_ops *ops;
    mt_stream *stream;
    mt_event *start, *end;
    mt_fp8_product_args products[SETS];
    void *a[SETS], *b[SETS]; // in bf16
    int32_t *offsets;        // of the rows of experts
    bool is_gradient;        // of an input
} bench;

static void *random_bf16(const bench *b, int64_t n, uint64_t key) {
    void *x = b->ops->memory_alloc(n * 2);
    b->ops->random_normal(x, n, key, 0, 0, 1, MT_BF16, b->stream);
    return x;
}

/* x[count, R, C] in fp8, or the transpose of x[C, R], whose rows are those of experts. */
static mt_fp8_matrix quantized(const bench *b, const void *x, int64_t count, int64_t R, int64_t C, bool transposed,
                               mt_fp8_blocks blocks) {
    int64_t width = C + (transposed ? EXPERTS * (MT_FP8_EXPERT_ROWS - 1) : 0);
    mt_fp8_matrix matrix = {.stride = mt_fp8_stride(width, blocks), .format = MT_F8_E4M3, .blocks = blocks};
    matrix.data = b->ops->memory_alloc(count * R * matrix.stride);
    matrix.inverse_scales = b->ops->memory_alloc(4 * mt_fp8_num_scales(count, R, matrix.stride, blocks));
    float *amax = b->ops->memory_alloc(4);
    mt_quantize_args a = {.x = x, .count = count, .R = R, .C = C};
    if (transposed) a.R = C, a.C = R, a.offsets = b->offsets, a.num_experts = EXPERTS;
    *(transposed ? &a.columns : &a.rows) = matrix;
    if (blocks == MT_FP8_TENSOR) a.amax = amax;
    b->ops->quantize(&a, MT_BF16, b->stream);
    b->ops->stream_synchronize(b->stream);
    b->ops->memory_free(amax);
    return matrix;
}

/* Runs the product of a set: with a rung, or in bf16 if it is NULL. The gradient of a weight is [K, M]^T [K, N], with
 * both operands as stored; the input's gradient multiplies by a matrix [K, N]. */
static bool run(const bench *b, const mt_fp8_rung *rung, int set) {
    const mt_fp8_product_args *p = &b->products[set];
    const int64_t M = p->M, N = p->N, K = p->K, E = p->num_experts;
    const void *x = b->a[set], *y = b->b[set];
    if (rung) return rung->product(p, b->stream);
    if (p->sums_rows)
        b->ops->grouped_linear_backward_weight(
            &(mt_grouped_args){K, M, N, E, p->offsets, y, .dy = x, .dw = p->out, .accumulate = p->accumulate}, MT_BF16,
            b->stream);
    else if (p->offsets && b->is_gradient)
        b->ops->grouped_linear_backward_input(&(mt_grouped_args){M, K, N, E, p->offsets, .w = y, .dy = x, .dx = p->out},
                                              MT_BF16, b->stream);
    else if (p->offsets)
        b->ops->grouped_linear_forward(&(mt_grouped_args){M, N, K, E, p->offsets, x, y, .y = p->out}, MT_BF16,
                                       b->stream);
    else if (p->out_dtype == MT_F32)
        b->ops->linear_backward_weight(&(mt_linear_args){K, M, N, .x = y, .dy = x, .dw = p->out, .accumulate = true},
                                       MT_BF16, b->stream);
    else if (b->is_gradient)
        b->ops->linear_backward_input(&(mt_linear_args){M, K, N, .w = y, .dy = x, .dx = p->out}, MT_BF16, b->stream);
    else
        b->ops->linear_forward(&(mt_linear_args){M, N, K, .x = x, .w = y, .y = p->out}, MT_BF16, b->stream);
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

/* Offsets of EXPERT_ROWS rows. */
static int32_t *draw_offsets(const mt_ops *ops, mt_stream *stream) {
    double upto[EXPERTS + 1] = {0};
    uint64_t state = 88172645463325252u;
    int32_t offsets[EXPERTS + 1], *on_gpu = ops->memory_alloc(sizeof offsets);
    for (int e = 0; e < EXPERTS; e++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        upto[e + 1] = upto[e] + 0.5 + (double)(state >> 11) / (double)(1ull << 53);
    }
    for (int e = 0; e <= EXPERTS; e++) offsets[e] = (int32_t)(upto[e] / upto[EXPERTS] * EXPERT_ROWS);
    ops->memory_copy(on_gpu, offsets, sizeof offsets, stream);
    ops->stream_synchronize(stream);
    return on_gpu;
}

static void print_rate(const char *name, double flops, double seconds) {
    if (seconds > 0) printf(" | %s %.3f ms %.0f", name, 1e3 * seconds, flops / seconds * 1e-12);
}

typedef struct bench_case {
    const char *name;
    int64_t M, N, K, num_experts; // 0: no experts
    enum { FORWARD, INPUT, WEIGHT_ADDED, WEIGHT } kind;
} bench_case;

/* The operands of a set. */
static void open_set(bench *b, const bench_case *c, int set, mt_fp8_blocks a_blocks, mt_fp8_blocks b_blocks) {
    const bool of_weight = c->kind >= WEIGHT_ADDED, sums_rows = of_weight && c->num_experts;
    const int64_t E = c->num_experts ? c->num_experts : 1, matrices = of_weight ? 1 : E, outs = of_weight ? E : 1;
    mt_fp8_product_args p = {.M = c->M, .N = c->N, .K = c->K, .out_dtype = of_weight ? MT_F32 : MT_BF16};
    const int64_t bytes = outs * c->M * c->N * mt_dtype_size(p.out_dtype);
    b->a[set] = random_bf16(b, c->M * c->K, (uint64_t)set), b->b[set] = random_bf16(b, matrices * c->N * c->K, 9);
    p.a = quantized(b, b->a[set], 1, c->M, c->K, sums_rows, a_blocks);
    p.b = quantized(b, b->b[set], matrices, c->N, c->K, sums_rows, b_blocks);
    p.accumulate = c->kind == WEIGHT_ADDED, p.sums_rows = sums_rows;
    if (c->num_experts) p.offsets = b->offsets, p.num_experts = c->num_experts;
    p.out = b->ops->memory_alloc(bytes);
    b->ops->memory_zero(p.out, bytes, b->stream);
    b->products[set] = p;
}

/* Scales of the tensor, summed in few bits and in fp32; of blocks. */
static void bench_shape(bench *b, const bench_case *c, const char *only) {
    static const char *const recipes[] = {"tensor", "tensor, exact", "blocks"};
    const double flops = 2.0 * (double)c->M * (double)c->N * (double)c->K;
    b->is_gradient = c->kind == INPUT;
    for (int recipe = 0; recipe < 3; recipe++) {
        mt_fp8_blocks a_blocks = recipe < 2 ? MT_FP8_TENSOR : MT_FP8_VECTOR_128;
        mt_fp8_blocks b_blocks = recipe < 2                ? MT_FP8_TENSOR
                                 : c->kind >= WEIGHT_ADDED ? MT_FP8_VECTOR_128
                                                           : MT_FP8_BLOCK_128;
        for (int set = 0; set < SETS; set++) {
            open_set(b, c, set, a_blocks, b_blocks);
            b->products[set].exact_sums = recipe > 0;
        }
        printf("%-13s %6lld x %5lld x %6lld, %3lld experts, %-13s: TFLOP/s", c->name, (long long)c->M, (long long)c->N,
               (long long)c->K, (long long)c->num_experts, recipes[recipe]);
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
    static const int64_t of_experts[][2] = {{1536, 2048}, {2048, 768}};
    const bool dense = argc < 2 || strcmp(argv[1], "hopper") != 0; // which serves experts only
    const char *only = argc > 1 ? argv[1] : NULL;
    mt_error error;
    bench b = {.ops = mt_cuda_open(0, &error)};
    if (!b.ops) {
        printf("fp8 products on the GPU: skipped, %s\n", error.text);
        return 0;
    }
    int64_t bytes = b.ops->workspace_bytes(TOKENS, 4096, 32, 128);
    void *workspace = b.ops->memory_alloc(bytes);
    b.stream = b.ops->stream_create(workspace, bytes, false);
    b.offsets = draw_offsets(b.ops, b.stream);
    b.start = mt_cuda_event_create(), b.end = mt_cuda_event_create();
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const int64_t N = layers[i][0], K = layers[i][1];
        const bench_case cases[] = {{"forward", TOKENS, N, K, 0, FORWARD},
                                    {"input", TOKENS, K, N, 0, INPUT},
                                    {"weight, added", N, K, TOKENS, 0, WEIGHT_ADDED}};
        for (int k = 0; k < 3 && dense; k++) bench_shape(&b, &cases[k], only);
    }
    for (size_t i = 0; i < sizeof of_experts / sizeof *of_experts; i++) {
        const int64_t N = of_experts[i][0], K = of_experts[i][1];
        const bench_case cases[] = {{"forward", EXPERT_ROWS, N, K, EXPERTS, FORWARD},
                                    {"input", EXPERT_ROWS, K, N, EXPERTS, INPUT},
                                    {"weight, added", N, K, EXPERT_ROWS, EXPERTS, WEIGHT_ADDED},
                                    {"weight", N, K, EXPERT_ROWS, EXPERTS, WEIGHT}};
        for (int k = 0; k < 4; k++) bench_shape(&b, &cases[k], only);
    }
    b.ops->memory_free(b.offsets);
    mt_cuda_event_destroy(b.start), mt_cuda_event_destroy(b.end);
    b.ops->stream_destroy(b.stream);
    b.ops->memory_free(workspace);
    return 0;
}
#endif
