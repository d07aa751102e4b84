/* The speed of the GPU's sparse attention in bf16 on one text, in the sizes of DeepSeek-V3.2, beside that of attention
 * over all keys: the median of some runs, in milliseconds. The keys that are selected are those of random numbers, so
 * that neighbours share none: the worst case for kernels that pass over tiles.
 *
 *   usage: bench_cuda_sparse [TOKENS...] (8192 32768) */
#include "../cuda/attention.h"
#include "../megatron.h"

#include <stdio.h>

#ifndef MT_HAVE_CUDA
int main(void) {
    puts("sparse attention on the GPU: skipped, built without CUDA");
    return 0;
}
#else
#include <stdlib.h>

enum {
    WARM_UPS = 1,
    ROUNDS = 5,
    HEADS = 128,
    D = 192,
    DV = 128,
    INDEXER_HEADS = 64,
    INDEXER_D = 128,
    TOPK = 2048,
    ROWS = 64
};

#include "bench_call.h"

static void indexer_forward(const void *args) {
    ops->indexer_forward(args, MT_BF16, stream);
}
static void indexer_backward(const void *args) {
    ops->indexer_backward(args, MT_BF16, stream);
}
static void sparse_forward(const void *args) {
    ops->sparse_attention_forward(args, MT_BF16, stream);
}
static void sparse_backward(const void *args) {
    ops->sparse_attention_backward(args, MT_BF16, stream);
}
static void sparse_shares(const void *args) {
    ops->sparse_attention_shares(args, MT_BF16, stream);
}
static void dense_forward(const void *args) {
    ops->attention_forward(args, MT_BF16, stream);
}
static void dense_backward(const void *args) {
    ops->attention_backward(args, MT_BF16, stream);
}

static void bench(int64_t T) {
    mt_span host = {.q_len = T, .k_len = T, .causal = true}, *device = ops->memory_alloc(sizeof host);
    ops->memory_copy(device, &host, sizeof host, NULL);
    mt_spans spans = {&host, device, 1};
    int64_t bytes = ops->workspace_bytes(T, HEADS * D, HEADS, D);
    bytes = mt_max(bytes, ops->sparse_workspace_bytes(T, T, TOPK));
    void *workspace = ops->memory_alloc(bytes);
    stream = ops->stream_create(workspace, bytes, false);
    int64_t heads = T * HEADS;
    void *q = random_bf16(heads * D), *k = random_bf16(heads * D), *v = random_bf16(heads * DV);
    void *dq = random_bf16(heads * D), *dk = random_bf16(heads * D), *dv = random_bf16(heads * DV);
    void *out = random_bf16(heads * DV), *dout = random_bf16(heads * DV);
    float *lse = ops->memory_alloc(heads * 4), *row_dot = ops->memory_alloc(heads * 4);
    void *index_q = random_bf16(T * INDEXER_HEADS * INDEXER_D), *index_k = random_bf16(T * INDEXER_D);
    void *index_dq = random_bf16(T * INDEXER_HEADS * INDEXER_D), *index_dw = random_bf16(T * INDEXER_HEADS);
    void *weights = random_bf16(T * INDEXER_HEADS);
    int32_t *selected = ops->memory_alloc(T * TOPK * 4);
    float *shares = ops->memory_alloc(ROWS * T * 4), *slopes = ops->memory_alloc(ROWS * T * 4);
    float *index_dk = ops->memory_alloc(T * INDEXER_D * 4);
    double *sums = ops->memory_alloc(2 * 8);
    ops->memory_zero(index_dk, T * INDEXER_D * 4, stream), ops->memory_zero(sums, 2 * 8, stream);
    mt_indexer_args indexer = {.spans = &spans, .rows = T, .H = INDEXER_HEADS, .D = INDEXER_D, .topk = TOPK};
    indexer.scale = 0.011f, indexer.q = index_q, indexer.k = index_k, indexer.weights = weights;
    indexer.selected = selected, indexer.shares = shares, indexer.slopes = slopes, indexer.coeff = 1;
    indexer.sums = sums, indexer.dq = index_dq, indexer.dweights = index_dw, indexer.dk = index_dk;
    mt_attention dense = {.num_heads = HEADS, .num_groups = HEADS, .head_size = D, .value_size = DV, .q = q, .k = k};
    dense.v = v, dense.out = out, dense.lse = lse, dense.dout = dout, dense.dq = dq, dense.dk = dk, dense.dv = dv;
    dense.row_dot = row_dot, dense.q_stride = dense.k_stride = HEADS * D, dense.v_stride = HEADS * DV;
    dense.out_stride = HEADS * DV, dense.spans = spans, dense.scale = 0.072f;
    double dense_ms = measure(dense_forward, &dense), dense_back = measure(dense_backward, &dense);
    mt_sparse_attention sparse = {.attention = dense, .selected = selected, .topk = TOPK};
    printf("%lld tokens, %d keys: dense forward %.2f ms, backward %.2f ms\n", (long long)T, TOPK, dense_ms, dense_back);
    for (int hopper = 0; hopper < 2; hopper++) {
        mt_cuda_select_on_hopper(hopper);
        indexer.ties = MT_TIES_FIRST;
        double first_ms = measure(indexer_forward, &indexer);
        indexer.ties = MT_TIES_TORCH;
        double indexer_ms = measure(indexer_forward, &indexer);
        printf("  %s: indexer %.2f ms, %.2f ms with the first of equal scores\n", hopper ? "wgmma" : "mma.sync",
               indexer_ms, first_ms);
        double sparse_ms = measure(sparse_forward, &sparse), sparse_back = measure(sparse_backward, &sparse);
        printf(
            "  %s: sparse forward %.2f ms, backward %.2f ms; forward %.2f times dense, with the indexer %.2f times\n",
            hopper ? "wgmma" : "mma.sync", sparse_ms, sparse_back, dense_ms / sparse_ms,
            dense_ms / (indexer_ms + sparse_ms));
    }
    fflush(stdout);
    for (int all = 0; all < 2; all++) { // the last block, which sees the most keys
        sparse.block = indexer.block = T - ROWS, sparse.block_rows = indexer.block_rows = ROWS;
        sparse.all_keys = indexer.all_keys = all, sparse.width = indexer.width = all ? T : TOPK;
        sparse.shares = shares;
        for (int tensor_cores = 0; tensor_cores < 2; tensor_cores++) { // which serve all keys
            mt_cuda_loss_on_tensor_cores(tensor_cores);
            double shares_ms = measure(sparse_shares, &sparse), loss_ms = measure(indexer_backward, &indexer);
            printf("  the loss of the last %d queries over %s keys%s: target %.3f ms, gradients %.3f ms\n", ROWS,
                   all ? "all" : "selected", tensor_cores ? ", on tensor cores" : "", shares_ms, loss_ms);
        }
        fflush(stdout);
    }
    ops->stream_destroy(stream);
    stream = NULL;
    void *const memory[] = {device,  workspace, q,      k,       v,        dq,      dk,       dv,
                            out,     dout,      lse,    row_dot, index_q,  index_k, index_dq, index_dw,
                            weights, selected,  shares, slopes,  index_dk, sums};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) ops->memory_free(memory[i]);
}

int main(int argc, char **argv) {
    mt_error error;
    ops = mt_cuda_open(0, &error);
    if (!ops) {
        printf("sparse attention on the GPU: skipped, %s\n", error.text);
        return 0;
    }
    for (int i = 1; i < argc; i++) bench(atoll(argv[i]));
    if (argc < 2) bench(8192), bench(32768);
    return 0;
}
#endif
