/* limits.h: the limits of the CUDA backend's table, which its kernels' shared memory and registers set. Plain C: a
 * simulated GPU has them too (data/plan/simulate.c). */
#ifndef MT_CUDA_LIMITS_H
#define MT_CUDA_LIMITS_H

#include "../megatron.h"

/* attention.cu keeps a head in the registers of a warp, and the gradients of biases by distance;
 * moe.cu has a lane per choice, and a router's values in 48 KiB of shared memory, fourfold for the auxiliary loss;
 * sinkhorn.cu keeps a factor per expert and a partial sum per thread in 40 KiB;
 * cuBLASLt multiplies fp8 matrices whose rows are multiples of 16 bytes;
 * delta_rule.cu has the keys of a chunk in 160 KiB, and half as many channels in 99 KiB;
 * ssd.cu has a state in the registers of a block, or in shared memory in fp32, and half its columns where a block has
 * less than those 160 KiB, and half its rows too below 99; tensor cores multiply states of one size;
 * cuDNN's attention takes whole tiles, and heads wider than 128 in DeepSeek-V3's sizes, and on Hopper GPUs up to 256.
 */
enum {
    MT_CUDNN_TOKENS = 128,
    MT_CUDNN_CHANNELS = 128,
    MT_CUDNN_HOPPER_CHANNELS = 256,
    MT_CUDNN_LATENT_CHANNELS = 192,
    MT_CUDA_FP8_MULTIPLE = 16,
    MT_CUDA_HEAD_CHANNELS = 256,
    MT_CUDA_BIAS_BUCKETS = 64,
    MT_CUDA_ROUTER_TOPK = 32,
    MT_CUDA_EXPERTS = 48 * 1024 / 4,
    MT_CUDA_AUX_LOSS_EXPERTS = 48 * 1024 / 16,
    MT_CUDA_DELTA_CHANNELS = 128,
    MT_CUDA_DELTA_SHARED = 160 * 1024,
    MT_CUDA_DELTA_LEAST_SHARED = 99 * 1024,
    MT_CUDA_SSD_ROWS = 256,
    MT_CUDA_SSD_COLUMNS = 128,
    MT_CUDA_SSD_TILE_ROWS = 128,
    MT_CUDA_SSD_TILE_COLUMNS = 64,
    MT_CUDA_SINKHORN_EXPERTS = 40 * 1024 / 8 - 1024
};

/* Products of fp8 matrices by cuBLASLt, by a GPU's compute capability times 10: with a scale for a matrix from 8.9, by
 * blocks of 128 on 9.0 alone (cuBLAS manual, cublasLtMatmulMatrixScale_t); 7.5's kernels write no fp8. */
static inline bool mt_cuda_has_fp8(int capability, int kernels) {
    return capability >= 89 && kernels >= 80;
}

static inline bool mt_cuda_has_fp8_blocks(int capability) {
    return capability == 90;
}

/* shared: bytes of shared memory of a block; has_fp8, has_fp8_blocks: the GPU multiplies fp8 matrices, also with scales
 * for blocks. No kernel has scales per 32 elements. */
static inline void mt_cuda_set_limits(mt_limits *limits, int64_t shared, bool has_fp8, bool has_fp8_blocks,
                                      bool has_cudnn) {
    int64_t sorted = shared / 12 / 32 * 32 - 32; // counting_sort.cuh has three numbers of each expert for one warp
    limits->one_attention = false;
    limits->head_channels = MT_CUDA_HEAD_CHANNELS;
    limits->bias_buckets = MT_CUDA_BIAS_BUCKETS;
    limits->router_topk = MT_CUDA_ROUTER_TOPK;
    limits->experts = sorted < MT_CUDA_EXPERTS ? sorted : MT_CUDA_EXPERTS;
    limits->aux_loss_experts = MT_CUDA_AUX_LOSS_EXPERTS;
    limits->sinkhorn_experts = MT_CUDA_SINKHORN_EXPERTS;
    limits->fp8_multiple = MT_CUDA_FP8_MULTIPLE;
    limits->cudnn_tokens = has_cudnn ? MT_CUDNN_TOKENS : 0;
    limits->cudnn_channels = has_cudnn ? MT_CUDNN_CHANNELS : 0;
    limits->cudnn_head_channels = !has_cudnn       ? 0
                                  : has_fp8_blocks ? MT_CUDNN_HOPPER_CHANNELS // they too are Hopper's alone
                                                   : MT_CUDNN_CHANNELS;
    limits->cudnn_latent_channels = has_cudnn ? MT_CUDNN_LATENT_CHANNELS : 0;
    limits->no_fp8 = !has_fp8, limits->no_fp8_blocks = !has_fp8_blocks, limits->no_mxfp8 = true;
    bool half = shared < MT_CUDA_DELTA_SHARED, least = shared < MT_CUDA_DELTA_LEAST_SHARED;
    limits->flash_channels = least ? 64 : 0;
    limits->delta_channels = half ? MT_CUDA_DELTA_CHANNELS / 2 : MT_CUDA_DELTA_CHANNELS, limits->no_delta = least;
    limits->ssd_rows = least ? MT_CUDA_SSD_ROWS / 2 : MT_CUDA_SSD_ROWS;
    limits->ssd_columns = half ? MT_CUDA_SSD_COLUMNS / 2 : MT_CUDA_SSD_COLUMNS;
    limits->no_plain = true;
}

/* Bytes of the arrays of delta_rule.cu for some chunks of 64 tokens and value heads. */
static inline int64_t mt_cuda_delta_bytes(int64_t chunks, int64_t heads, const mt_delta_args *a, mt_dtype dtype,
                                          bool train) {
    int64_t size = mt_dtype_size(dtype), Dk = mt_divide_up(a->Dk, 16) * 16, Dv = mt_divide_up(a->Dv, 32) * 32;
    int64_t each = 2 * 64 * 64 * size + 4 * 64 * 4;                                     // A and P, gates and lengths
    if (train) each += (2 * Dk * Dv + 64 * Dv) * size + (Dk / 16 * 4 + 1) * 64 * 4 + 8; // states, U, partial sums
    return chunks * (heads * each + 16) + 16 * 256; // the table of chunks; alignment
}

/* For all heads, up to some MiB, where groups of them take turns; at least for one group. */
static inline int64_t mt_cuda_workspace_of_groups(int64_t all, int64_t one, int64_t mebibytes) {
    int64_t most = mebibytes << 20;
    return all < most ? all : one > most ? one : most;
}

/* The same of kda.cu, which has arrays for each block of columns; the states of a chunk's tokens of up to 16 spans. */
static inline int64_t mt_cuda_kda_bytes(int64_t chunks, int64_t heads, const mt_delta_args *a, bool train) {
    int64_t V = a->Dk % 4 == 0 && a->Dv % 4 == 0 ? 4 : 1, blocks = mt_divide_up(a->Dv, 8 * V);
    int64_t lines = a->Dk <= 32 ? 1 : a->Dk <= 64 ? 2 : 4, spans = chunks < 16 ? chunks : 16;
    int64_t each = a->Dk * a->Dv + 64 * blocks * (3 * a->Dk + 1) + 1 + a->Dk;
    if (!train) return 0;
    return heads * (chunks * each + spans * blocks * 64 * lines * 256 * V) * 4 + chunks * 16 + 16 * 256;
}

/* The same of delta_chunks.cu, whose matrices have 64 tokens and 128 channels, two states, and A or P. */
static inline int64_t mt_cuda_delta_chunks_bytes(int64_t chunks, int64_t heads, bool train) {
    int64_t rows = 64 * 128 * 2, state = 128 * 128 * 2, square = 64 * 64 * 2;
    int64_t each = 4 * rows + state + square + 128 * 4 + (train ? rows + state + 4 + 128 * 4 : 0);
    return chunks * (heads * each + 16) + 16 * 256;
}

/* delta_rule.cu and kda.cu take what delta_chunks.cu does not, of such heads too, in groups that fit. */
static inline int64_t mt_cuda_delta_workspace(int64_t T, const mt_delta_args *a, mt_dtype dtype, bool train) {
    int64_t chunks = mt_divide_up(T, 64) + 16, heads = a->Hv / a->Hk;
    bool in_chunks = dtype != MT_F32 && a->Dk == MT_CUDA_DELTA_CHANNELS && a->Dv == MT_CUDA_DELTA_CHANNELS;
    int64_t all = a->decays > 1 ? mt_cuda_kda_bytes(chunks, a->Hv, a, train)
                                : mt_cuda_delta_bytes(chunks, a->Hv, a, dtype, train);
    int64_t one = a->decays > 1 ? mt_cuda_kda_bytes(chunks, heads, a, train)
                                : mt_cuda_delta_bytes(chunks, heads, a, dtype, train);
    if (in_chunks) {
        int64_t of_group = mt_cuda_delta_chunks_bytes(chunks, heads, train);
        all = mt_cuda_delta_chunks_bytes(chunks, a->Hv, train), one = one > of_group ? one : of_group;
        return mt_cuda_workspace_of_groups(all > one ? all : one, one, 1280);
    }
    return mt_cuda_workspace_of_groups(all, one, a->decays > 1 ? 1536 : 768);
}

/* Bytes of the arrays of ssd.cu for some chunks of 64 tokens and groups: states and gates of the kernels on tensor
 * cores, or those of the recurrence, which only the backward has. */
static inline int64_t mt_cuda_ssd_bytes(int64_t chunks, int64_t groups, const mt_ssd_args *a, bool train) {
    int64_t heads = a->H / a->G, state = MT_CUDA_SSD_TILE_ROWS * MT_CUDA_SSD_TILE_COLUMNS * 2;
    int64_t tiles = heads * (4 * 64 * 4 + (train ? 2 : 1) * state);
    int64_t recurrence = train ? heads * 2 * a->N * a->P * 4 + 2 * 64 * a->N * 4 : 0;
    return chunks * (groups * ((tiles > recurrence ? tiles : recurrence) + heads * 12) + 16) + 16 * 256;
}

static inline int64_t mt_cuda_ssd_workspace(int64_t T, const mt_ssd_args *a, bool train) {
    int64_t chunks = mt_divide_up(T, 64) + 16;
    return mt_cuda_workspace_of_groups(mt_cuda_ssd_bytes(chunks, a->G, a, train),
                                       mt_cuda_ssd_bytes(chunks, 1, a, train), 768);
}

/* The arrays of sparse_attention.cu share one memory, one operation after another: scores of some query rows, with four
 * numbers a key for each block that selects keys as torch does; a bit for each pair of a query and a key; the logits of
 * a block of the indexer's loss. */
enum { MT_CUDA_INDEXER_ROWS = 1024, MT_CUDA_INDEXER_BLOCKS = 128, MT_CUDA_LOSS_ROWS = 64 };

/* Floats of a row of scores, and words of a row of bits. */
static inline int64_t mt_cuda_score_columns(int64_t longest) {
    return mt_divide_up(longest, 64) * 64;
}
static inline int64_t mt_cuda_selection_words(int64_t longest) {
    return mt_divide_up(longest, 64);
}

static inline int64_t mt_cuda_sparse_workspace(int64_t T, int64_t longest, int64_t topk) {
    int64_t rows = T < MT_CUDA_INDEXER_ROWS ? T : MT_CUDA_INDEXER_ROWS;
    int64_t blocks = rows < MT_CUDA_INDEXER_BLOCKS ? rows : MT_CUDA_INDEXER_BLOCKS;
    int64_t scores = (rows + 4 * blocks) * mt_cuda_score_columns(longest) * 4;
    int64_t bits = T * mt_cuda_selection_words(longest) * 8;
    int64_t width = mt_cuda_score_columns(longest > topk ? longest : topk);
    int64_t loss = MT_CUDA_LOSS_ROWS * width * 4 + MT_CUDA_LOSS_ROWS * 16;
    int64_t largest = scores > bits ? scores : bits;
    return (largest > loss ? largest : loss) + 256;
}

#endif
