/* How fast the GPU's memory-bound operations are: the bytes that each must move, over its time, against the rate of a
 * large copy in the same run. The shapes are those of Llama 3 8B (8192 tokens) and GPT-2 (small and XL). Each operation
 * cycles through several sets of buffers that are larger than any cache together.
 *
 *   usage: bench_cuda [WORD]      only the operations whose name holds the word */
#include "../megatron.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef MT_HAVE_CUDA
int main(void) {
    printf("bench_cuda: skipped: this build has no CUDA\n");
    return 0;
}
#else

/* AHEAD calls before those of a batch keep the GPU at work while the host enqueues, as in a training step. */
enum { MAX_TOKENS = 65536, WORDS = 50257, BATCHES = 9, BATCH = 6, AHEAD = 3 };
static const int64_t pool_bytes = (int64_t)9 << 30, rotated_bytes = (int64_t)1 << 30;

typedef struct bench {
    const mt_ops *ops;
    mt_stream *stream;
    char *pool;
    mt_arena arena; // over the set of buffers in use; while base is NULL, an operation only counts its memory
    mt_dtype dtype;
    int32_t *words, *positions, *rows; // [MAX_TOKENS] ids as frequent as in text, 0 ... 1023 in turn, a permutation
    int64_t different[MAX_TOKENS];     // the number of different ids up to each of `words`
    int64_t *names;                    // [MAX_TOKENS]
    double *uniforms;                  // [MAX_TOKENS] in [0, 1)
    struct {
        int32_t *experts, *position, *token; // [T k] choices and their rows, and the rows' tokens
    } plans[2];                              // for 8 experts, and for more
    mt_event *from, *to;
    double copy_rate; // bytes a second
} bench;

static void *elements(bench *b, int64_t count) {
    return mt_arena_alloc(&b->arena, count * mt_dtype_size(b->dtype));
}
static float *floats(bench *b, int64_t count) {
    return mt_arena_alloc(&b->arena, count * 4);
}

/* Each operation below enqueues itself once, unless memory is only counted, and returns the bytes it must move. */
typedef double bench_fn(bench *b, const int64_t *n);
#define ENQUEUE(operation, ...)                                                                                        \
    do {                                                                                                               \
        if (b->arena.base) b->ops->operation(__VA_ARGS__, b->stream);                                                  \
    } while (0)

static double size(const bench *b) {
    return (double)mt_dtype_size(b->dtype);
}

static double rmsnorm_forward(bench *b, const int64_t *n) { // T, H, C
    int64_t width = n[1] * n[2];
    mt_norm_args a = {.T = n[0], .H = n[1], .C = n[2], .x_stride = width, .y_stride = width, .eps = 1e-5f};
    a.y = elements(b, n[0] * width), a.x = elements(b, n[0] * width), a.w = elements(b, n[2]);
    a.rstd = floats(b, n[0] * n[1]);
    ENQUEUE(rmsnorm_forward, &a, b->dtype);
    return 2 * size(b) * (double)(n[0] * width);
}

static double rmsnorm_backward(bench *b, const int64_t *n) { // and the residual's gradient, for H = 1
    int64_t width = n[1] * n[2];
    mt_norm_args a = {.T = n[0], .H = n[1], .C = n[2], .dx_stride = width, .dy_stride = width, .x_stride = width};
    a.dx = elements(b, n[0] * width), a.dy = elements(b, n[0] * width), a.x = elements(b, n[0] * width);
    a.dresidual = n[1] == 1 ? a.dx : NULL, a.w = elements(b, n[2]);
    a.dw = floats(b, n[2]), a.rstd = floats(b, n[0] * n[1]);
    ENQUEUE(rmsnorm_backward, &a, b->dtype);
    return (n[1] == 1 ? 4 : 3) * size(b) * (double)(n[0] * width);
}

static double layernorm_forward(bench *b, const int64_t *n) { // T, C
    mt_norm_args a = {.T = n[0], .H = 1, .C = n[1], .eps = 1e-5f};
    a.y = elements(b, n[0] * n[1]), a.x = elements(b, n[0] * n[1]), a.w = elements(b, n[1]), a.b = elements(b, n[1]);
    a.mean = floats(b, n[0]), a.rstd = floats(b, n[0]);
    ENQUEUE(layernorm_forward, &a, b->dtype);
    return 2 * size(b) * (double)(n[0] * n[1]);
}

static double layernorm_backward(bench *b, const int64_t *n) {
    mt_norm_args a = {.T = n[0], .H = 1, .C = n[1]};
    void *dx = elements(b, n[0] * n[1]);
    a.dx = dx, a.dresidual = dx, a.dy = elements(b, n[0] * n[1]), a.x = elements(b, n[0] * n[1]);
    a.w = elements(b, n[1]);
    a.dw = floats(b, n[1]), a.db = floats(b, n[1]), a.mean = floats(b, n[0]), a.rstd = floats(b, n[0]);
    ENQUEUE(layernorm_backward, &a, b->dtype);
    return 4 * size(b) * (double)(n[0] * n[1]);
}

static double linear_forward(bench *b, const int64_t *n) { // T, N, K
    void *y = elements(b, n[0] * n[1]), *x = elements(b, n[0] * n[2]), *w = elements(b, n[1] * n[2]);
    ENQUEUE(linear_forward, &(mt_linear_args){n[0], n[1], n[2], .x = x, .w = w, .y = y}, b->dtype);
    return size(b) * (double)(n[0] * n[1] + n[0] * n[2] + n[1] * n[2]);
}

/* D channels, all rotated. */
static mt_rotation rotation(bench *b, int64_t D) {
    mt_rotation rotation = {.positions = b->positions, .R = D};
    rotation.cos = floats(b, 1024 * D / 2), rotation.sin = floats(b, 1024 * D / 2);
    return rotation;
}

static double rope_forward(bench *b, const int64_t *n) { // T, H, D, the fused product's width; in place
    mt_rope_args a = {.T = n[0], .H = n[1], .D = n[2], .x_stride = n[3], .y_stride = n[3]};
    a.x = a.y = elements(b, n[0] * n[3]), a.rotation = rotation(b, n[2]);
    ENQUEUE(rope_forward, &a, b->dtype);
    return 2 * size(b) * (double)(n[0] * n[1] * n[2]);
}

/* The operands of both directions. */
static mt_qk_args qk_of(bench *b, const int64_t *n) { // T, H, G, norm; D = 128
    mt_qk_args a = {.T = n[0], .H = n[1], .G = n[2], .D = 128, .eps = 1e-5f};
    a.qkv_stride = a.dqkv_stride = (a.H + 2 * a.G) * a.D;
    a.qk_stride = a.dqk_stride = n[3] ? (a.H + a.G) * a.D : a.qkv_stride;
    a.rotation = rotation(b, a.D);
    if (n[3]) a.q_w = a.k_w = elements(b, a.D), a.q_rstd = floats(b, a.T * a.H), a.k_rstd = floats(b, a.T * a.G);
    return a;
}

static double qk_forward(bench *b, const int64_t *n) {
    mt_qk_args a = qk_of(b, n);
    void *qkv = elements(b, a.T * a.qkv_stride);
    a.qkv = qkv, a.qk = n[3] ? elements(b, a.T * a.qk_stride) : qkv;
    ENQUEUE(qk_forward, &a, b->dtype);
    return 2 * size(b) * (double)(a.T * (a.H + a.G) * a.D);
}

static double qk_backward(bench *b, const int64_t *n) {
    mt_qk_args a = qk_of(b, n);
    a.dqkv = elements(b, a.T * a.qkv_stride), a.dqk = n[3] ? elements(b, a.T * a.qk_stride) : a.dqkv;
    if (n[3]) a.qkv = elements(b, a.T * a.qkv_stride), a.dq_w = floats(b, a.D), a.dk_w = floats(b, a.D);
    ENQUEUE(qk_backward, &a, b->dtype);
    return (n[3] ? 3 : 2) * size(b) * (double)(a.T * (a.H + a.G) * a.D);
}

static double gelu_forward(bench *b, const int64_t *n) { // elements, activation
    void *y = elements(b, n[0]), *x = elements(b, n[0]);
    ENQUEUE(activation_forward, &(mt_activation_args){1, n[0], (mt_activation)n[1], x, NULL, .y = y}, b->dtype);
    return 2 * size(b) * (double)n[0];
}

static double gelu_backward(bench *b, const int64_t *n) {
    void *dx = elements(b, n[0]), *dy = elements(b, n[0]), *x = elements(b, n[0]);
    ENQUEUE(activation_backward, &(mt_activation_args){1, n[0], (mt_activation)n[1], x, NULL, .dy = dy, .dx = dx},
            b->dtype);
    return 3 * size(b) * (double)n[0];
}

/* Rows [R, C] that an operation stores in fp8 instead of its result, if asked to. */
static mt_quantize_args stored_rows(bench *b, int64_t R, int64_t C, bool wanted) {
    mt_quantize_args a = {.count = 1, .R = R, .C = C};
    if (!wanted) return a;
    a.scale = floats(b, 1), a.amax = floats(b, 1);
    a.rows = (mt_fp8_matrix){mt_arena_alloc(&b->arena, R * C), floats(b, 1), C, MT_F8_E4M3, MT_FP8_TENSOR};
    return a;
}

static double swiglu_forward(bench *b, const int64_t *n) { // T, F, in fp8
    void *y = elements(b, n[0] * n[1]), *gate_up = elements(b, n[0] * 2 * n[1]);
    mt_activation_args a = {n[0], n[1], MT_ACTIVATION_SWIGLU, gate_up, NULL, .y = y};
    a.quantize = stored_rows(b, n[0], n[1], n[2]);
    ENQUEUE(activation_forward, &a, b->dtype);
    return (3 * size(b) - (double)n[2]) * (double)(n[0] * n[1]);
}

static double swiglu_backward(bench *b, const int64_t *n) {
    void *d = elements(b, n[0] * 2 * n[1]), *dy = elements(b, n[0] * n[1]), *gate_up = elements(b, n[0] * 2 * n[1]);
    mt_activation_args a = {n[0], n[1], MT_ACTIVATION_SWIGLU, gate_up, NULL, .dy = dy, .dx = d};
    a.quantize = stored_rows(b, n[0], 2 * n[1], n[2]);
    ENQUEUE(activation_backward, &a, b->dtype);
    return (5 * size(b) - 2 * (double)n[2]) * (double)(n[0] * n[1]);
}

static double dropout_add(bench *b, const int64_t *n) { // T, C, p in percent
    mt_dropout dropout = {(double)n[2] / 100, 7};
    void *out = elements(b, n[0] * n[1]), *x = elements(b, n[0] * n[1]), *residual = elements(b, n[0] * n[1]);
    ENQUEUE(dropout_add_forward, &(mt_dropout_add_args){n[0], n[1], 0, b->names, x, residual, out, dropout}, b->dtype);
    return 3 * size(b) * (double)(n[0] * n[1]);
}

static double residual_norm(bench *b, const int64_t *n) { // T, C, p in percent, LayerNorm (1), in fp8 (2)
    mt_norm_args a = {.T = n[0], .H = 1, .C = n[1], .eps = 1e-5f, .dropout = {(double)n[2] / 100, 7}};
    a.y = elements(b, n[0] * n[1]), a.sum = elements(b, n[0] * n[1]), a.x = elements(b, n[0] * n[1]);
    a.residual = elements(b, n[0] * n[1]), a.w = elements(b, n[1]), a.rstd = floats(b, n[0]);
    if (n[3] & 1) a.b = elements(b, n[1]), a.mean = floats(b, n[0]);
    a.token_index = b->names, a.quantize = stored_rows(b, n[0], n[1], n[3] & 2);
    ENQUEUE(residual_norm_forward, &a, b->dtype);
    return (4 * size(b) - (double)(n[3] / 2)) * (double)(n[0] * n[1]);
}

/* The scale of a quantization: given, with amax recorded; computed, which reads x twice; per vector; per block. */
enum { DELAYED = 1, CURRENT, VECTORS, BLOCKS };

static double quantize(bench *b, const int64_t *n) { // R, C, scale, copies
    static const mt_fp8_blocks blocks[] = {0, MT_FP8_TENSOR, MT_FP8_TENSOR, MT_FP8_VECTOR_128, MT_FP8_BLOCK_128};
    mt_quantize_args a = {.count = 1, .R = n[0], .C = n[1], .x = elements(b, n[0] * n[1]), .amax = floats(b, 1)};
    mt_fp8_matrix *copies[] = {&a.rows, &a.columns};
    for (int i = 0; i < n[3]; i++) {
        int64_t R = n[i], C = n[1 - i];
        copies[i]->blocks = blocks[n[2]], copies[i]->format = MT_F8_E4M3, copies[i]->stride = C;
        copies[i]->data = mt_arena_alloc(&b->arena, R * C);
        copies[i]->inverse_scales = floats(b, mt_fp8_num_scales(1, R, C, blocks[n[2]]));
    }
    if (n[2] == DELAYED) a.scale = floats(b, 1);
    if (n[2] > CURRENT) a.amax = NULL;
    ENQUEUE(quantize, &a, b->dtype);
    return ((n[2] == CURRENT ? 2 : 1) * size(b) + (double)n[3]) * (double)(n[0] * n[1]);
}

static double transpose_codes(bench *b, const int64_t *n) { // R, C
    mt_quantize_args a = stored_rows(b, n[0], n[1], true);
    a.columns = (mt_fp8_matrix){mt_arena_alloc(&b->arena, n[0] * n[1]), floats(b, 1), n[0], MT_F8_E4M3, MT_FP8_TENSOR};
    ENQUEUE(fp8_transpose, &a);
    return 2 * (double)(n[0] * n[1]);
}

static double scatter_rows(bench *b, const int64_t *n) { // T, width
    void *to = elements(b, MAX_TOKENS * n[1]), *from = elements(b, n[0] * n[1]);
    ENQUEUE(scatter_rows, &(mt_row_args){n[0], n[1], b->rows, .from = from, .to = to}, b->dtype);
    return 2 * size(b) * (double)(n[0] * n[1]);
}

static double embedding_forward(bench *b, const int64_t *n) { // T, C, vocabulary
    void *out = elements(b, n[0] * n[1]), *w = elements(b, n[2] * n[1]);
    ENQUEUE(embedding_forward, &(mt_embedding_args){n[0], n[1], 0, n[2], b->words, w, out, .accumulate = false},
            b->dtype);
    return 2 * size(b) * (double)(n[0] * n[1]);
}

/* Beside dout, the rows of dw that occur are read and written once each: 8 bytes an element, which a sum in fp32 costs
 * whatever adds it. Ids, their order and sums of parts are not counted. */
static double embedding_backward(bench *b, const int64_t *n) { // T, C, vocabulary; 1024 of them are positions
    float *dw = floats(b, n[2] * n[1]);
    void *dout = elements(b, n[0] * n[1]);
    ENQUEUE(embedding_backward,
            &(mt_embedding_args){n[0], n[1], 0, n[2], n[2] == 1024 ? b->positions : b->words, .dout = dout, .dw = dw},
            b->dtype);
    int64_t rows = n[2] == 1024 ? 1024 : b->different[n[0] - 1];
    return size(b) * (double)(n[0] * n[1]) + 8 * (double)(rows * n[1]);
}

/* Mixtures of experts: T, C, k, E; `plans` holds the choices. The bytes count a token's row once, however often it is
 * copied. */

static double router_logits(bench *b, const int64_t *n) {
    void *x = elements(b, n[0] * n[1]), *w = elements(b, n[3] * n[1]);
    float *logits = floats(b, n[0] * n[3]);
    ENQUEUE(router_logits, &(mt_linear_args){n[0], n[3], n[1], .x = x, .w = w, .y = logits}, b->dtype);
    return size(b) * (double)(n[0] * n[1] + n[3] * n[1]) + 4 * (double)(n[0] * n[3]);
}

static double route_forward(bench *b, const int64_t *n) {
    mt_router router = {.num_experts = n[3], .topk = n[2], .scaling = 1};
    float *probs = floats(b, n[0] * n[2]), *logits = floats(b, n[0] * n[3]);
    int32_t *experts = mt_arena_alloc(&b->arena, n[0] * n[2] * 4), *invalid = mt_arena_alloc(&b->arena, 4);
    ENQUEUE(route_forward,
            &(mt_route_args){n[0], &router, logits, .probs = probs, .experts = experts, .invalid = invalid});
    return 4 * (double)(n[0] * (n[3] + 2 * n[2]));
}

static double route_backward(bench *b, const int64_t *n) {
    mt_router router = {.num_experts = n[3], .topk = n[2], .scaling = 1};
    float *dlogits = floats(b, n[0] * n[3]), *logits = floats(b, n[0] * n[3]), *dprobs = floats(b, n[0] * n[2]);
    ENQUEUE(route_backward, &(mt_route_args){n[0], &router, logits, .experts = b->plans[n[3] > 8].experts,
                                             .dprobs = dprobs, .dlogits = dlogits});
    return 4 * (double)(n[0] * (n[3] + 3 * n[2])); // of the logits only those chosen
}

static double aux_loss_forward(bench *b, const int64_t *n) {
    mt_router router = {.num_experts = n[3], .topk = n[2], .scaling = 1};
    float *sums = floats(b, 2 * n[3]), *logits = floats(b, n[0] * n[3]);
    double *z_sum = mt_arena_alloc(&b->arena, 8);
    ENQUEUE(aux_loss_forward, &(mt_aux_loss_args){1, n[0], &router, logits, NULL, NULL, sums, .z_sum = z_sum});
    return 4 * (double)(n[0] * n[3]);
}

static double aux_loss_backward(bench *b, const int64_t *n) {
    mt_router router = {.num_experts = n[3], .topk = n[2], .scaling = 1};
    float *dlogits = floats(b, n[0] * n[3]), *logits = floats(b, n[0] * n[3]), *counts = floats(b, n[3]);
    ENQUEUE(aux_loss_backward, &(mt_aux_loss_args){1, n[0], &router, logits, NULL, .counts = counts, .aux_scale = 1,
                                                   .z_scale = 1, .dlogits = dlogits});
    return 12 * (double)(n[0] * n[3]);
}

static double dispatch_plan(bench *b, const int64_t *n) {
    mt_dispatch dispatch = {.topk = n[2], .count = n[3], .num_local = n[3], .copies = 1};
    int64_t M = n[0] * n[2];
    int32_t *offsets = mt_arena_alloc(&b->arena, (n[3] + 1) * 4), *position = mt_arena_alloc(&b->arena, M * 4);
    int32_t *choice = mt_arena_alloc(&b->arena, M * 4), *token = mt_arena_alloc(&b->arena, M * 4);
    ENQUEUE(dispatch_plan,
            &(mt_dispatch_args){n[0], M, &dispatch, .experts = b->plans[n[3] > 8].experts, .offsets = offsets,
                                .position = position, .row_choice = choice, .row_token = token});
    return 16 * (double)M;
}

static double drop_tokens(bench *b, const int64_t *n) {
    int32_t *kept = mt_arena_alloc(&b->arena, n[0] * n[2] * 4);
    float *probs = floats(b, n[0] * n[2]);
    mt_drop_args a = {.T = n[0], .k = n[2], .count = n[0], .capacity = n[0] * n[2] / n[3]};
    a.experts = b->plans[n[3] > 8].experts, a.probs = probs, a.token_index = b->names, a.kept = kept;
    ENQUEUE(drop_tokens, &a);
    return 12 * (double)(n[0] * n[2]) + 8 * (double)n[0];
}

static double permute(bench *b, const int64_t *n) {
    void *rows = elements(b, n[0] * n[2] * n[1]), *x = elements(b, n[0] * n[1]);
    ENQUEUE(gather_rows, &(mt_row_args){n[0] * n[2], n[1], b->plans[n[3] > 8].token, .from = x, .to = rows}, b->dtype);
    return size(b) * (double)(n[0] * (n[2] + 1) * n[1]);
}

static double permute_weights(bench *b, const int64_t *n) {
    float *rows = floats(b, n[0] * n[2]), *probs = floats(b, n[0] * n[2]);
    ENQUEUE(gather_rows, &(mt_row_args){n[0] * n[2], 1, b->plans[n[3] > 8].position, .from = probs, .to = rows},
            MT_F32);
    return 12 * (double)(n[0] * n[2]);
}

static double combine_rows(bench *b, const int64_t *n) {
    void *out = elements(b, n[0] * n[1]), *rows = elements(b, n[0] * n[2] * n[1]);
    ENQUEUE(combine_rows,
            &(mt_combine_args){n[0], n[2], n[1], .in = rows, .position = b->plans[n[3] > 8].position, .out = out},
            b->dtype);
    return size(b) * (double)(n[0] * (n[2] + 1) * n[1]);
}

static double expert_swiglu_forward(bench *b, const int64_t *n) { // M, F
    void *y = elements(b, n[0] * n[1]), *gate_up = elements(b, n[0] * 2 * n[1]);
    float *weights = floats(b, n[0]);
    ENQUEUE(activation_forward, &(mt_activation_args){n[0], n[1], MT_ACTIVATION_SWIGLU, gate_up, weights, .y = y},
            b->dtype);
    return 3 * size(b) * (double)(n[0] * n[1]);
}

static double expert_swiglu_backward(bench *b, const int64_t *n) {
    void *d = elements(b, n[0] * 2 * n[1]), *dy = elements(b, n[0] * n[1]), *gate_up = elements(b, n[0] * 2 * n[1]);
    float *weights = floats(b, n[0]), *dweights = floats(b, n[0]);
    ENQUEUE(activation_backward,
            &(mt_activation_args){n[0], n[1], MT_ACTIVATION_SWIGLU, gate_up, weights, .dy = dy, .dx = d,
                                  .dweights = dweights},
            b->dtype);
    return 5 * size(b) * (double)(n[0] * n[1]);
}

static double cross_entropy_forward(bench *b, const int64_t *n) { // T, stride, vocabulary
    mt_cross_entropy_args a = {.T = n[0], .stride = n[1], .count = n[2], .labels = b->words};
    a.logits = elements(b, n[0] * n[1]), a.stats = floats(b, 3 * n[0]);
    ENQUEUE(cross_entropy_forward, &a, b->dtype);
    return size(b) * (double)(n[0] * n[1]);
}

static double sample(bench *b, const int64_t *n) { // T, vocabulary, kind; temperature 0.1 makes the deviation 2.5
    static const mt_sampling samplings[] = {{.top_p = 1},
                                            {.temperature = 0.1, .top_p = 1},
                                            {.temperature = 0.1, .top_k = 50, .top_p = 0.95},
                                            {.temperature = 0.1, .top_p = 0.95},
                                            {.temperature = 0.1, .top_p = 1, .logprobs = true}};
    mt_sample_args a = {.T = n[0], .stride = n[1], .count = n[1], .sampling = &samplings[n[2]]};
    a.logits = elements(b, n[0] * n[1]), a.sampled = mt_arena_alloc(&b->arena, n[0] * (int64_t)sizeof *a.sampled);
    a.uniforms = b->uniforms;
    ENQUEUE(sample, &a, b->dtype);
    return size(b) * (double)(n[0] * n[1]);
}

static double cross_entropy_backward(bench *b, const int64_t *n) {
    mt_cross_entropy_args a = {.T = n[0], .stride = n[1], .count = n[2], .labels = b->words};
    a.logits = a.dlogits = elements(b, n[0] * n[1]), a.lse = floats(b, n[0]), a.dlogp = floats(b, n[0]);
    ENQUEUE(cross_entropy_backward, &a, b->dtype);
    return 2 * size(b) * (double)(n[0] * n[1]);
}

static double squared_norm(bench *b, const int64_t *n) { // elements
    double *sum = mt_arena_alloc(&b->arena, 8);
    float *x = floats(b, n[0]);
    ENQUEUE(squared_norm, sum, x, n[0], MT_F32);
    return 4 * (double)n[0];
}

static double adamw_step(bench *b, const int64_t *n) {
    mt_update adamw = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f};
    void *param = elements(b, n[0]);
    float *master = b->dtype == MT_BF16 ? floats(b, n[0]) : NULL, *m = floats(b, n[0]), *v = floats(b, n[0]);
    float *grad = floats(b, n[0]), *scale = floats(b, 1);
    mt_update_args a = {.n = n[0], .param = param, .master = master, .m = m, .v = v, .grad = grad, .scale = scale};
    a.dtype = b->dtype;
    ENQUEUE(adamw_step, &a, &adamw);
    return (b->dtype == MT_BF16 ? 30 : 28) * (double)n[0];
}

static double convert(bench *b, const int64_t *n) {
    void *narrow = elements(b, n[0]);
    float *wide = floats(b, n[0]);
    ENQUEUE(convert, narrow, b->dtype, wide, MT_F32, n[0]);
    return (4 + size(b)) * (double)n[0];
}

static double random_normal(bench *b, const int64_t *n) {
    void *param = elements(b, n[0]);
    ENQUEUE(random_normal, param, n[0], 1, 0, 1, 0.25f, b->dtype);
    return size(b) * (double)n[0];
}

static const struct {
    const char *name;
    bench_fn *enqueue;
    mt_dtype dtype;
    int64_t sizes[4];
} cases[] = {
    {"rmsnorm_forward", rmsnorm_forward, MT_BF16, {8192, 1, 4096}},
    {"rmsnorm_backward", rmsnorm_backward, MT_BF16, {8192, 1, 4096}},
    {"rmsnorm_forward", rmsnorm_forward, MT_F32, {8192, 1, 4096}},
    {"rmsnorm_backward", rmsnorm_backward, MT_F32, {8192, 1, 4096}},
    {"rmsnorm_forward of q", rmsnorm_forward, MT_BF16, {8192, 32, 128}},
    {"rmsnorm_backward of q", rmsnorm_backward, MT_BF16, {8192, 32, 128}},
    {"layernorm_forward", layernorm_forward, MT_BF16, {65536, 768}},
    {"layernorm_backward", layernorm_backward, MT_BF16, {65536, 768}},
    {"layernorm_forward", layernorm_forward, MT_BF16, {32768, 1024}},
    {"layernorm_backward", layernorm_backward, MT_BF16, {32768, 1024}},
    {"layernorm_forward", layernorm_forward, MT_BF16, {16384, 1600}},
    {"layernorm_backward", layernorm_backward, MT_BF16, {16384, 1600}},
    {"layernorm_forward", layernorm_forward, MT_BF16, {32768, 1280}},
    {"layernorm_backward", layernorm_backward, MT_BF16, {32768, 1280}},
    {"layernorm_forward", layernorm_forward, MT_BF16, {4096, 12288}},
    {"layernorm_backward", layernorm_backward, MT_BF16, {4096, 12288}},
    {"rmsnorm_forward", rmsnorm_forward, MT_BF16, {16384, 1, 2048}},
    {"rmsnorm_backward", rmsnorm_backward, MT_BF16, {16384, 1, 2048}},
    {"rmsnorm_forward", rmsnorm_forward, MT_BF16, {8192, 1, 5120}},
    {"rmsnorm_backward", rmsnorm_backward, MT_BF16, {8192, 1, 5120}},
    {"rmsnorm_forward", rmsnorm_forward, MT_BF16, {8192, 1, 8192}},
    {"rmsnorm_backward", rmsnorm_backward, MT_BF16, {8192, 1, 8192}},
    {"rope_forward of q", rope_forward, MT_BF16, {8192, 32, 128, 6144}},
    {"rope_forward of k", rope_forward, MT_BF16, {8192, 8, 128, 6144}},
    {"rotate q and k", qk_forward, MT_BF16, {8192, 32, 8, 0}},
    {"norm, rotate q and k", qk_forward, MT_BF16, {8192, 32, 8, 1}},
    {"their backward", qk_backward, MT_BF16, {8192, 32, 8, 1}},
    {"swiglu_forward", swiglu_forward, MT_BF16, {8192, 14336}},
    {"swiglu_backward", swiglu_backward, MT_BF16, {8192, 14336}},
    {"swiglu_forward, in fp8", swiglu_forward, MT_BF16, {8192, 14336, 1}},
    {"swiglu_backward, in fp8", swiglu_backward, MT_BF16, {8192, 14336, 1}},
    {"gelu_forward, tanh", gelu_forward, MT_BF16, {65536ll * 3072, MT_ACTIVATION_GELU_TANH}},
    {"gelu_backward, tanh", gelu_backward, MT_BF16, {65536ll * 3072, MT_ACTIVATION_GELU_TANH}},
    {"gelu_forward, exact", gelu_forward, MT_BF16, {65536ll * 3072, MT_ACTIVATION_GELU}},
    {"gelu_backward, exact", gelu_backward, MT_BF16, {65536ll * 3072, MT_ACTIVATION_GELU}},
    {"residual without dropout", dropout_add, MT_BF16, {8192, 4096, 0}},
    {"residual and dropout", dropout_add, MT_BF16, {65536, 768, 10}},
    {"residual and RMSNorm", residual_norm, MT_BF16, {8192, 4096, 0, 0}},
    {"residual and LayerNorm", residual_norm, MT_BF16, {65536, 768, 0, 1}},
    {"residual and LayerNorm", residual_norm, MT_BF16, {16384, 1600, 0, 1}},
    {"with dropout", residual_norm, MT_BF16, {65536, 768, 10, 1}},
    {"RMSNorm, in fp8", residual_norm, MT_BF16, {8192, 4096, 0, 2}},
    {"LayerNorm, in fp8", residual_norm, MT_BF16, {65536, 768, 0, 3}},
    {"fp8_transpose", transpose_codes, MT_BF16, {8192, 4096}},
    {"fp8_transpose", transpose_codes, MT_BF16, {8192, 14336}},
    {"fp8_transpose", transpose_codes, MT_BF16, {8192, 28672}},
    {"quantize, given scale", quantize, MT_BF16, {8192, 4096, DELAYED, 1}},
    {"quantize, given scale", quantize, MT_BF16, {8192, 4096, DELAYED, 2}},
    {"quantize, computed scale", quantize, MT_BF16, {8192, 4096, CURRENT, 1}},
    {"quantize, computed scale", quantize, MT_BF16, {8192, 4096, CURRENT, 2}},
    {"quantize, per vector", quantize, MT_BF16, {8192, 4096, VECTORS, 1}},
    {"quantize, per vector", quantize, MT_BF16, {8192, 4096, VECTORS, 2}},
    {"quantize, per block", quantize, MT_BF16, {8192, 4096, BLOCKS, 1}},
    {"quantize, per block", quantize, MT_BF16, {8192, 4096, BLOCKS, 2}},
    {"quantize, given scale", quantize, MT_BF16, {8192, 14336, DELAYED, 1}},
    {"quantize, given scale", quantize, MT_BF16, {8192, 14336, DELAYED, 2}},
    {"quantize, computed scale", quantize, MT_BF16, {8192, 14336, CURRENT, 1}},
    {"quantize, computed scale", quantize, MT_BF16, {8192, 14336, CURRENT, 2}},
    {"quantize, per vector", quantize, MT_BF16, {8192, 14336, VECTORS, 1}},
    {"quantize, per vector", quantize, MT_BF16, {8192, 14336, VECTORS, 2}},
    {"quantize, per block", quantize, MT_BF16, {8192, 14336, BLOCKS, 1}},
    {"quantize, per block", quantize, MT_BF16, {8192, 14336, BLOCKS, 2}},
    {"quantize, given scale", quantize, MT_F32, {8192, 4096, DELAYED, 2}},
    {"quantize, per vector", quantize, MT_F32, {8192, 4096, VECTORS, 2}},
    {"scatter_rows", scatter_rows, MT_BF16, {8192, 1024}},
    {"embedding_forward", embedding_forward, MT_BF16, {8192, 4096, 128256}},
    {"embedding_backward", embedding_backward, MT_BF16, {8192, 4096, 128256}},
    {"embedding_backward", embedding_backward, MT_BF16, {65536, 768, 50257}},
    {"embedding_backward", embedding_backward, MT_BF16, {65536, 768, 1024}},
    {"cross_entropy_forward", cross_entropy_forward, MT_BF16, {8192, 128256, 128256}},
    {"cross_entropy_backward", cross_entropy_backward, MT_BF16, {8192, 128256, 128256}},
    {"sample, argmax", sample, MT_BF16, {256, 128256, 0}},
    {"sample, temperature", sample, MT_BF16, {256, 128256, 1}},
    {"sample, top-k 50, top-p", sample, MT_BF16, {256, 128256, 2}},
    {"sample, top-p", sample, MT_BF16, {256, 128256, 3}},
    {"sample, log-probability", sample, MT_BF16, {256, 128256, 4}},
    {"sample, temperature", sample, MT_BF16, {1, 128256, 1}},
    {"sample, top-k 50, top-p", sample, MT_BF16, {1, 128256, 2}},
    {"cross_entropy_forward", cross_entropy_forward, MT_BF16, {16384, 50304, 50257}},
    {"cross_entropy_backward", cross_entropy_backward, MT_BF16, {16384, 50304, 50257}},
    // Qwen3-30B-A3B, 4 sequences of 4096 tokens
    {"router_logits", router_logits, MT_BF16, {16384, 2048, 8, 128}},
    {"route_forward", route_forward, MT_BF16, {16384, 2048, 8, 128}},
    {"route_backward", route_backward, MT_BF16, {16384, 2048, 8, 128}},
    {"aux_loss_forward", aux_loss_forward, MT_BF16, {16384, 2048, 8, 128}},
    {"aux_loss_backward", aux_loss_backward, MT_BF16, {16384, 2048, 8, 128}},
    {"drop_tokens", drop_tokens, MT_BF16, {16384, 2048, 8, 128}},
    {"dispatch_plan", dispatch_plan, MT_BF16, {16384, 2048, 8, 128}},
    {"permute", permute, MT_BF16, {16384, 2048, 8, 128}},
    {"permute the weights", permute_weights, MT_BF16, {16384, 2048, 8, 128}},
    {"combine_rows", combine_rows, MT_BF16, {16384, 2048, 8, 128}},
    {"expert_swiglu_forward", expert_swiglu_forward, MT_BF16, {131072, 768}},
    {"expert_swiglu_backward", expert_swiglu_backward, MT_BF16, {131072, 768}},
    // a layer of Mixtral
    {"router_logits", router_logits, MT_BF16, {4096, 4096, 2, 8}},
    {"route_forward", route_forward, MT_BF16, {4096, 4096, 2, 8}},
    {"route_backward", route_backward, MT_BF16, {4096, 4096, 2, 8}},
    {"aux_loss_forward", aux_loss_forward, MT_BF16, {4096, 4096, 2, 8}},
    {"aux_loss_backward", aux_loss_backward, MT_BF16, {4096, 4096, 2, 8}},
    {"drop_tokens", drop_tokens, MT_BF16, {4096, 4096, 2, 8}},
    {"dispatch_plan", dispatch_plan, MT_BF16, {4096, 4096, 2, 8}},
    {"permute", permute, MT_BF16, {4096, 4096, 2, 8}},
    {"permute the weights", permute_weights, MT_BF16, {4096, 4096, 2, 8}},
    {"combine_rows", combine_rows, MT_BF16, {4096, 4096, 2, 8}},
    {"expert_swiglu_forward", expert_swiglu_forward, MT_BF16, {8192, 14336}},
    {"expert_swiglu_backward", expert_swiglu_backward, MT_BF16, {8192, 14336}},
    // decoding with Llama 3 8B: qkv, output, up with gate, down, head
    {"linear_forward", linear_forward, MT_BF16, {1, 6144, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {1, 4096, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {1, 28672, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {1, 4096, 14336}},
    {"linear_forward", linear_forward, MT_BF16, {1, 128256, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {8, 6144, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {8, 4096, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {8, 28672, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {8, 4096, 14336}},
    {"linear_forward", linear_forward, MT_BF16, {8, 128256, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {16, 6144, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {16, 4096, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {16, 28672, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {16, 4096, 14336}},
    {"linear_forward", linear_forward, MT_BF16, {16, 128256, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {64, 6144, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {64, 4096, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {64, 28672, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {64, 4096, 14336}},
    {"linear_forward", linear_forward, MT_BF16, {64, 128256, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {256, 6144, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {256, 4096, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {256, 28672, 4096}},
    {"linear_forward", linear_forward, MT_BF16, {256, 4096, 14336}},
    {"linear_forward", linear_forward, MT_BF16, {256, 128256, 4096}},
    {"squared_norm", squared_norm, MT_F32, {218112000}},
    {"adamw_step", adamw_step, MT_BF16, {218112000}}, // a layer of Llama 3 8B
    {"adamw_step", adamw_step, MT_F32, {124475904}},
    {"convert", convert, MT_BF16, {218112000}},
    {"random_normal", random_normal, MT_BF16, {218112000}},
};

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of one call over batches, each call on the next of `sets` sets of buffers. */
static double measure(bench *b, bench_fn *enqueue, const int64_t *sizes, int64_t set_bytes) {
    int64_t sets = rotated_bytes / set_bytes + 1, set = 0;
    double seconds[BATCHES];
    for (int batch = -1; batch < BATCHES; batch++) { // the first warms up
        for (int i = -AHEAD; i < BATCH; i++, set = (set + 1) % sets) {
            if (i == 0) mt_cuda_event_record(b->from, b->stream);
            b->arena = (mt_arena){b->pool + set * set_bytes, 0, set_bytes};
            enqueue(b, sizes);
        }
        mt_cuda_event_record(b->to, b->stream);
        double total = mt_cuda_event_seconds(b->from, b->to);
        if (batch >= 0) seconds[batch] = total / BATCH;
    }
    qsort(seconds, BATCHES, sizeof *seconds, compare_doubles);
    return seconds[BATCHES / 2];
}

static double copy(bench *b, const int64_t *n) {
    char *to = mt_arena_alloc(&b->arena, n[0]), *from = mt_arena_alloc(&b->arena, n[0]);
    ENQUEUE(memory_copy, to, from, n[0]);
    return 2 * (double)n[0];
}

/* Bytes of one set of buffers. */
static int64_t count_bytes(bench *b, bench_fn *enqueue, const int64_t *sizes) {
    b->arena = (mt_arena){0};
    enqueue(b, sizes);
    if (b->arena.used + rotated_bytes > pool_bytes) mt_die("bench_cuda: a case is larger than the pool");
    return b->arena.used;
}

static void *upload(bench *b, const void *data, int64_t bytes) {
    void *device = b->ops->memory_alloc(bytes);
    b->ops->memory_copy(device, data, bytes, b->stream);
    b->ops->stream_synchronize(b->stream);
    return device;
}

static void make_indices(bench *b) {
    int32_t *words = mt_malloc(3 * MAX_TOKENS * 4), *positions = words + MAX_TOKENS, *rows = positions + MAX_TOKENS;
    int64_t *names = mt_malloc(MAX_TOKENS * 8);
    double *uniforms = mt_malloc(MAX_TOKENS * 8);
    bool *seen = mt_calloc(WORDS);
    for (int64_t t = 0; t < MAX_TOKENS; t++) {
        uint32_t random[4];
        mt_philox(random, 1, (uint64_t)t, 0);
        words[t] = (int32_t)(exp(random[0] * 0x1p-32 * log(WORDS)) - 1); // the k-th word is 1 / k times as frequent
        b->different[t] = (t > 0 ? b->different[t - 1] : 0) + !seen[words[t]];
        seen[words[t]] = true;
        positions[t] = (int32_t)(t % 1024);
        rows[t] = (int32_t)(t * 40503 % MAX_TOKENS);
        names[t] = t, uniforms[t] = random[1] * 0x1p-32;
    }
    b->words = upload(b, words, MAX_TOKENS * 4);
    b->positions = upload(b, positions, MAX_TOKENS * 4);
    b->rows = upload(b, rows, MAX_TOKENS * 4);
    b->names = upload(b, names, MAX_TOKENS * 8);
    b->uniforms = upload(b, uniforms, MAX_TOKENS * 8);
    free(words), free(names), free(uniforms), free(seen);
}

/* Possible choices of a router with T tokens and k of E experts, and the CPU's order of their rows. */
static void make_plan(bench *b, int64_t which, int64_t T, int64_t k, int64_t E) {
    mt_dispatch dispatch = {.topk = k, .count = E, .num_local = E, .copies = 1};
    int64_t M = T * k;
    int32_t *experts = mt_malloc(4 * M * 4), *position = experts + M, *token = position + M, *choice = token + M;
    int32_t *offsets = mt_malloc((E + 1) * 4);
    for (int64_t i = 0; i < M; i++) {
        uint32_t random[4];
        mt_philox(random, 2, (uint64_t)i, 0);
        experts[i] = (int32_t)(random[0] % (uint32_t)E);
        for (int64_t j = i / k * k; j < i; j++)
            if (experts[j] == experts[i]) experts[i] = (int32_t)((experts[i] + 1) % E), j = i / k * k - 1;
    }
    mt_cpu_ops.dispatch_plan(&(mt_dispatch_args){T, M, &dispatch, .experts = experts, .offsets = offsets,
                                                 .position = position, .row_choice = choice, .row_token = token},
                             NULL);
    b->plans[which].experts = upload(b, experts, M * 4);
    b->plans[which].position = upload(b, position, M * 4);
    b->plans[which].token = upload(b, token, M * 4);
    free(experts), free(offsets);
}

int main(int argc, char **argv) {
    mt_error error;
    bench b = {.ops = mt_cuda_open(0, &error)};
    if (!b.ops) {
        printf("bench_cuda: skipped: %s\n", error.text);
        return 0;
    }
    int64_t workspace_bytes = b.ops->workspace_bytes(MAX_TOKENS, 4096, 32, 128);
    void *workspace = b.ops->memory_alloc(workspace_bytes);
    b.stream = b.ops->stream_create(workspace, workspace_bytes, false);
    b.pool = b.ops->memory_alloc(pool_bytes);
    b.ops->random_normal(b.pool, pool_bytes / 2, 1, 0, 1, 0.25f, MT_BF16, b.stream); // as fp32 also normal
    make_indices(&b);
    make_plan(&b, 0, 4096, 2, 8);
    make_plan(&b, 1, 16384, 8, 128);
    b.from = mt_cuda_event_create();
    b.to = mt_cuda_event_create();

    const int64_t copied[] = {pool_bytes / 5 * 2 / 256 * 256};
    int64_t bytes = 2 * copied[0];
    b.copy_rate = 2 * (double)copied[0] / measure(&b, copy, copied, bytes);
    printf("a copy of %.1f GB moves %.3f TB/s (read and written)\n\n", (double)copied[0] * 1e-9, b.copy_rate * 1e-12);
    printf("%-26s %-26s %10s %8s %8s\n", "operation", "sizes", "time, us", "TB/s", "of copy");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t *n = cases[i].sizes;
        char sizes[64];
        if (argc > 1 && !strstr(cases[i].name, argv[1])) continue;
        b.dtype = cases[i].dtype;
        int used = snprintf(sizes, sizeof sizes, "%s %lld", mt_dtype_name(b.dtype), (long long)n[0]);
        for (int k = 1; k < 4 && n[k] > 0; k++)
            used += snprintf(sizes + used, sizeof sizes - (size_t)used, " x %lld", (long long)n[k]);
        bytes = count_bytes(&b, cases[i].enqueue, n);
        double moved = cases[i].enqueue(&b, n), seconds = measure(&b, cases[i].enqueue, n, bytes);
        printf("%-26s %-26s %10.1f %8.3f %7.1f%%\n", cases[i].name, sizes, seconds * 1e6, moved / seconds * 1e-12,
               100 * moved / seconds / b.copy_rate);
    }
    b.ops->stream_destroy(b.stream);
    return 0;
}
#endif
