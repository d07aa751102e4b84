/* How near each kernel of the CPU is to what this machine can do: bytes against the copy and read rates, products
 * against the sgemm rate, all measured here. Shapes: one training step of GPT-2 124M on 4 x 64 tokens in one
 * micro-batch, and the decoding of one token by llama2.c's 110M model. */
#include "../data/report/profile.h"

#ifndef MT_HAVE_OPENMP
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // one thread then does it all
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { T = 256, C = 768, F = 3072, V = 50304, H = 12, D = 64, LAYERS = 12, SEQ = 64, PARAMS = 124475904 };

static const mt_ops *ops = &mt_cpu_ops;

/* Buffers that every benchmark uses as it likes; filled with small normal numbers. */
static void *buffers[8];
static float stats[4][T * H];
static int32_t ids[T], positions[T];
static int64_t names[T];
static mt_span span_list[T / SEQ];
static mt_spans spans = {span_list, span_list, T / SEQ};
static mt_dtype dtype = MT_F32;
static double copy_rate, read_rate, matmul_rate;

typedef void bench_fn(void);

/* Seconds of the fastest of several runs: the machine may be shared. */
static double best_time(bench_fn *function) {
    double best = 1e30, begin = mt_time();
    for (int run = 0; run < 5 || (run < 200 && mt_time() - begin < 0.4); run++) {
        double start = mt_time();
        function();
        best = fmin(best, mt_time() - start);
    }
    return best;
}

static void linear_fc1(void) {
    ops->linear_forward(
        &(mt_linear_args){T, F, C, .x = buffers[1], .w = buffers[2], .bias = buffers[3], .y = buffers[0]}, dtype, NULL);
}
static void linear_fc1_backward_input(void) {
    ops->linear_backward_input(&(mt_linear_args){T, F, C, .w = buffers[2], .dy = buffers[1], .dx = buffers[0]}, dtype,
                               NULL);
}
static void linear_fc1_backward_weight(void) {
    ops->linear_backward_weight(&(mt_linear_args){T, F, C, .x = buffers[2], .dy = buffers[1], .dw = buffers[0],
                                                  .dbias = buffers[4], .accumulate = true},
                                dtype, NULL);
}
static void linear_head(void) {
    ops->linear_forward(&(mt_linear_args){T, V, C, .x = buffers[1], .w = buffers[2], .y = buffers[0]}, dtype, NULL);
}
static void embedding_forward(void) {
    ops->embedding_forward(&(mt_embedding_args){T, C, 0, V, ids, buffers[1], buffers[0], .accumulate = false}, dtype,
                           NULL);
}
static void embedding_backward(void) {
    ops->embedding_backward(&(mt_embedding_args){T, C, 0, V, ids, .dout = buffers[1], .dw = buffers[0]}, dtype, NULL);
}
/* The operands of the norms: a LayerNorm has a mean and biases too. */
static mt_norm_args norm_of(bool layer) {
    mt_norm_args a = {.T = T, .H = 1, .C = C, .x = buffers[1], .w = buffers[2], .eps = 1e-5f, .y = buffers[0]};
    a.x_stride = a.y_stride = C, a.rstd = stats[1];
    if (layer) a.b = buffers[3], a.mean = stats[0];
    return a;
}
static mt_norm_args norm_backward_of(bool layer) {
    mt_norm_args a = {.T = T, .H = 1, .C = C, .x = buffers[2], .w = buffers[3], .dy = buffers[1], .dx = buffers[0]};
    a.x_stride = a.dy_stride = a.dx_stride = C, a.rstd = stats[1], a.dresidual = buffers[6], a.dw = buffers[4];
    if (layer) a.db = buffers[5], a.mean = stats[0];
    return a;
}
static void layernorm_forward(void) {
    mt_norm_args a = norm_of(true);
    ops->layernorm_forward(&a, dtype, NULL);
}
static void layernorm_backward(void) {
    mt_norm_args a = norm_backward_of(true);
    ops->layernorm_backward(&a, dtype, NULL);
}
static void rmsnorm_forward(void) {
    mt_norm_args a = norm_of(false);
    ops->rmsnorm_forward(&a, dtype, NULL);
}
static void rmsnorm_backward(void) {
    mt_norm_args a = norm_backward_of(false);
    ops->rmsnorm_backward(&a, dtype, NULL);
}
static void rope_forward(void) {
    mt_rope_args a = {.T = T, .H = H, .D = D, .x = buffers[0], .y = buffers[0], .x_stride = 3 * C, .y_stride = 3 * C};
    a.rotation = (mt_rotation){.cos = stats[2], .sin = stats[3], .positions = positions, .R = D};
    ops->rope_forward(&a, dtype, NULL);
}

static mt_attention attention_of(mt_spans list) {
    mt_attention a = {.num_heads = H, .num_groups = H, .head_size = D, .value_size = D, .spans = list};
    a.q_stride = a.k_stride = a.v_stride = 3 * C, a.out_stride = C;
    a.q = buffers[1], a.k = buffers[2], a.v = buffers[3], a.out = buffers[0], a.lse = stats[0];
    a.dq = buffers[4], a.dk = buffers[5], a.dv = buffers[6], a.dout = buffers[7], a.row_dot = stats[1];
    a.scale = 0.125f, a.q_index = a.k_index = names;
    return a;
}
static void attention_forward(void) {
    mt_attention a = attention_of(spans);
    ops->attention_forward(&a, dtype, NULL);
}
static void attention_backward(void) {
    mt_attention a = attention_of(spans);
    ops->attention_backward(&a, dtype, NULL);
}
static void gelu_forward(void) {
    ops->activation_forward(&(mt_activation_args){T, F, MT_ACTIVATION_GELU_TANH, buffers[1], NULL, .y = buffers[0]},
                            dtype, NULL);
}
static void gelu_backward(void) {
    ops->activation_backward(
        &(mt_activation_args){T, F, MT_ACTIVATION_GELU_TANH, buffers[2], NULL, .dy = buffers[1], .dx = buffers[0]},
        dtype, NULL);
}
static void gelu_erf_forward(void) {
    ops->activation_forward(&(mt_activation_args){T, F, MT_ACTIVATION_GELU, buffers[1], NULL, .y = buffers[0]}, dtype,
                            NULL);
}
static void swiglu_forward(void) {
    ops->activation_forward(&(mt_activation_args){T, F, MT_ACTIVATION_SWIGLU, buffers[1], NULL, .y = buffers[0]}, dtype,
                            NULL);
}
static void swiglu_backward(void) {
    ops->activation_backward(
        &(mt_activation_args){T, F, MT_ACTIVATION_SWIGLU, buffers[2], NULL, .dy = buffers[1], .dx = buffers[0]}, dtype,
        NULL);
}
static void residual_add(void) {
    mt_dropout off = {0};
    ops->dropout_add_forward(&(mt_dropout_add_args){T, C, 0, names, buffers[1], buffers[2], buffers[0], off}, dtype,
                             NULL);
}
static void dropout_add(void) {
    mt_dropout tenth = {0.1, 1};
    ops->dropout_add_forward(&(mt_dropout_add_args){T, C, 0, names, buffers[1], buffers[2], buffers[0], tenth}, dtype,
                             NULL);
}
static void cross_entropy_forward(void) {
    ops->cross_entropy_forward(&(mt_cross_entropy_args){.T = T,
                                                        .stride = V,
                                                        .count = V - 47,
                                                        .logits = buffers[1],
                                                        .labels = ids,
                                                        .stats = stats[2],
                                                        .entropy = stats[0]},
                               dtype, NULL);
}
static void cross_entropy_backward(void) {
    ops->cross_entropy_backward(&(mt_cross_entropy_args){.T = T,
                                                         .stride = V,
                                                         .count = V - 47,
                                                         .logits = buffers[1],
                                                         .labels = ids,
                                                         .lse = stats[0],
                                                         .dlogp = stats[1],
                                                         .dlogits = buffers[0]},
                                dtype, NULL);
}
static void zero_gradients(void) {
    ops->memory_zero(buffers[0], (int64_t)PARAMS * 4, NULL);
}
static void squared_norm(void) {
    double sum = 0;
    ops->squared_norm(&sum, buffers[1], PARAMS, MT_F32, NULL);
    stats[0][0] = (float)sum;
}
static void adamw_step(void) {
    mt_update adamw = {1e-9f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f};
    mt_update_args a = {.n = PARAMS, .param = buffers[4], .m = buffers[5], .v = buffers[6], .grad = buffers[7]};
    a.scale = stats[3], a.dtype = dtype;
    if (dtype == MT_BF16) a.param = buffers[0], a.master = buffers[4];
    ops->adamw_step(&a, &adamw, NULL);
}
static void adamw_bf16_step(void) { // gradient and moments in bf16
    mt_update adamw = {1e-9f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f};
    mt_update_args a = {.n = PARAMS, .param = buffers[4], .m = buffers[0], .v = buffers[6], .grad = buffers[2]};
    a.scale = stats[3], a.grad_dtype = a.m_dtype = a.v_dtype = MT_BF16;
    ops->adamw_step(&a, &adamw, NULL);
}
static void random_normal(void) {
    ops->random_normal(buffers[0], PARAMS / 16, 1, 0, 0, 0.02f, dtype, NULL);
}
static void decode_token(void) { // the linear layers of one token, dim 768, hidden 2048, 12 layers, vocabulary 32000
    int64_t size = mt_dtype_size(dtype);
    char *w = buffers[1];
    for (int layer = 0; layer < 12; layer++, w += (int64_t)(4 * 768 * 768 + 3 * 768 * 2048) * size) {
        ops->linear_forward(&(mt_linear_args){1, 3 * 768, 768, .x = buffers[2], .w = w, .y = buffers[0]}, dtype, NULL);
        ops->linear_forward(
            &(mt_linear_args){1, 768, 768, .x = buffers[2], .w = w + 3 * 768 * 768 * size, .y = buffers[0]}, dtype,
            NULL);
        ops->linear_forward(
            &(mt_linear_args){1, 2 * 2048, 768, .x = buffers[2], .w = w + 4 * 768 * 768 * size, .y = buffers[0]}, dtype,
            NULL);
        ops->linear_forward(&(mt_linear_args){1, 768, 2048, .x = buffers[2], .w = w + (4 * 768 + 2 * 2048) * 768 * size,
                                              .y = buffers[0]},
                            dtype, NULL);
    }
    ops->linear_forward(&(mt_linear_args){1, 32000, 768, .x = buffers[2], .w = w, .y = buffers[0]}, dtype, NULL);
}
static void decode_attention(void) { // one query of every sequence against 1024 cached keys a layer
    mt_span span = {0, 1, 0, 1024, true};
    mt_attention one = attention_of((mt_spans){&span, &span, 1});
    one.k_stride = one.v_stride = C;
    ops->attention_forward(&one, dtype, NULL);
}
static void copy_memory(void) {
    ops->memory_copy(buffers[0], buffers[1], (int64_t)PARAMS * 4, NULL);
}
static void read_memory(void) {
    const uint64_t *words = buffers[1];
    uint64_t sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int64_t i = 0; i < PARAMS / 2; i++) sum += words[i];
    names[0] = (int64_t)(sum & 1);
}

/* Each benchmark: bytes of operands that it must move (in elements of the run's type and of 4 bytes), or operations. */
typedef struct bench {
    const char *name;
    bench_fn *function;
    double elements, floats, operations; // one of bytes and operations is what it is measured by
    int64_t count;                       // times in a training step of GPT-2
} bench;

static const bench benches[] = {
    {"linear 256x3072x768", linear_fc1, 0, 0, 2.0 * T *F *C, 0},
    {"linear backward input", linear_fc1_backward_input, 0, 0, 2.0 * T *F *C, 0},
    {"linear backward weight", linear_fc1_backward_weight, 0, 0, 2.0 * T *F *C, 0},
    {"linear 256x50304x768", linear_head, 0, 0, 2.0 * T *V *C, 0},
    {"embedding", embedding_forward, 2.0 * T *C, 0, 0, 2},
    {"embedding backward", embedding_backward, T *C, 2.0 * T *C, 0, 2},
    {"layernorm", layernorm_forward, 2.0 * T *C, 0, 0, 2 * LAYERS + 1},
    {"layernorm backward", layernorm_backward, 4.0 * T *C, 0, 0, 2 * LAYERS + 1},
    {"rmsnorm", rmsnorm_forward, 2.0 * T *C, 0, 0, 0},
    {"rmsnorm backward", rmsnorm_backward, 4.0 * T *C, 0, 0, 0},
    {"rope (in place)", rope_forward, 2.0 * T *C, 0, 0, 0},
    {"attention", attention_forward, 0, 0, 4.0 * T *SEQ *C, LAYERS},
    {"attention backward", attention_backward, 0, 0, 10.0 * T *SEQ *C, LAYERS},
    {"gelu (tanh)", gelu_forward, 2.0 * T *F, 0, 0, LAYERS},
    {"gelu backward (tanh)", gelu_backward, 3.0 * T *F, 0, 0, LAYERS},
    {"gelu (erf)", gelu_erf_forward, 2.0 * T *F, 0, 0, 0},
    {"swiglu", swiglu_forward, 3.0 * T *F, 0, 0, 0},
    {"swiglu backward", swiglu_backward, 5.0 * T *F, 0, 0, 0},
    {"residual add", residual_add, 3.0 * T *C, 0, 0, 2 * LAYERS},
    {"residual add, dropout", dropout_add, 3.0 * T *C, 0, 0, 0},
    {"cross-entropy", cross_entropy_forward, (double)T *V, 0, 0, 1},
    {"cross-entropy backward", cross_entropy_backward, 2.0 * T *V, 0, 0, 1},
    {"zero the gradients", zero_gradients, 0, PARAMS, 0, 1},
    {"squared norm", squared_norm, 0, PARAMS, 0, 1},
    {"adamw", adamw_step, 0, 7.0 * PARAMS, 0, 1},
    {"adamw, bf16 moments", adamw_bf16_step, 0, 4.5 * PARAMS, 0, 0},
    {"random normal, 7.8M", random_normal, PARAMS / 16, 0, 0, 0},
    {"decode 110M, all linears", decode_token, 12.0 * (4 * 768 * 768 + 3 * 768 * 2048) + 32000 * 768, 0, 0, 0},
    {"decode attention, 1024 keys", decode_attention, 2.0 * 1024 * C, 0, 0, 0},
};

static void run_all(void) {
    double rest = 0;
    printf("\n%-28s %10s %12s %8s\n", mt_dtype_name(dtype), "ms", "rate", "of best");
    for (size_t i = 0; i < sizeof benches / sizeof *benches; i++) {
        const bench *b = &benches[i];
        for (int t = 0; t < T * H; t++) stats[0][t] = 10, stats[1][t] = 1;
        double seconds = best_time(b->function);
        double bytes = b->elements * (double)mt_dtype_size(dtype) + b->floats * 4;
        bool reads = b->function == decode_token || b->function == decode_attention || b->function == squared_norm;
        if (b->operations > 0)
            printf("%-28s %10.3f %5.0f GFLOP/s %7.0f%% of sgemm\n", b->name, seconds * 1e3,
                   b->operations / seconds / 1e9, 100 * b->operations / seconds / matmul_rate);
        else
            printf("%-28s %10.3f %7.1f GB/s %8.0f%% of %s\n", b->name, seconds * 1e3, bytes / seconds / 1e9,
                   100 * bytes / seconds / (reads ? read_rate : copy_rate), reads ? "read" : "copy");
        rest += seconds * (double)b->count;
    }
    printf("GPT-2 124M, 4 x 64 tokens: everything but the linear layers takes %.1f ms a step\n", rest * 1e3);
}

int main(void) {
    for (int i = 0; i < 8; i++) {
        buffers[i] = ops->memory_alloc((int64_t)PARAMS * 4);
        ops->random_normal(buffers[i], PARAMS, (uint64_t)i, 0, 0, 0.1f, MT_F32, NULL);
    }
    ops->memory_zero(buffers[6], (int64_t)PARAMS * 4, NULL); // AdamW's v is not negative
    for (int t = 0; t < T; t++) ids[t] = t * 191 % 1000, positions[t] = t % SEQ, names[t] = t;
    for (int s = 0; s < T / SEQ; s++) span_list[s] = (mt_span){s * SEQ, SEQ, s * SEQ, SEQ, true};
    copy_rate = 8.0 * PARAMS / best_time(copy_memory);
    read_rate = 4.0 * PARAMS / best_time(read_memory);
    matmul_rate = mt_cpu_matmul_rate(2048);
    printf("copy %.1f GB/s (read and write), read %.1f GB/s, sgemm %.0f GFLOP/s\n", copy_rate / 1e9, read_rate / 1e9,
           matmul_rate / 1e9);
    run_all();
    dtype = MT_BF16;
    for (int i = 0; i < 4; i++) ops->random_normal(buffers[i], PARAMS, (uint64_t)i, 0, 0, 0.1f, MT_BF16, NULL);
    run_all();
    for (int i = 0; i < 8; i++) ops->memory_free(buffers[i]);
    return 0;
}
