/* decode.h: the layers of a decode step as one kernel. While a step is captured into a graph, decode_record.cu collects
 * its operations; if they are the layers of a dense model, one kernel of decode.cu or decode_cluster.cu takes their
 * place. */
#ifndef MT_CUDA_DECODE_H
#define MT_CUDA_DECODE_H

#include "../megatron.h"

#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_DECODE_ROWS = 4 }; // texts of a step at most

/* The same for a model of C channels. For four texts of Llama 3 8B (C 4096) arithmetic takes longer than reading the
 * weights, and separate kernels are faster; for four of GPT-2 (C 768) they are not. On Hopper GPUs models whose
 * C x C matrices gemv_hopper.cu serves use separate kernels, which are as fast for one text and faster for several. */
int64_t mt_decode_most_rows(int64_t C);

/* The fields of an attention call that the kernels honour, or that have no meaning for them: lse, which only a backward
 * reads, and those of dropout, which the kernels refuse. */
#define MT_DECODE_ATTENTION_FIELDS(X)                                                                                  \
    X(num_heads)                                                                                                       \
    X(num_groups)                                                                                                      \
    X(head_size)                                                                                                       \
    X(value_size)                                                                                                      \
    X(q)                                                                                                               \
    X(k)                                                                                                               \
    X(v)                                                                                                               \
    X(out)                                                                                                             \
    X(lse)                                                                                                             \
    X(q_stride)                                                                                                        \
    X(k_stride)                                                                                                        \
    X(v_stride)                                                                                                        \
    X(out_stride)                                                                                                      \
    X(spans)                                                                                                           \
    X(pages)                                                                                                           \
    X(window)                                                                                                          \
    X(scale)                                                                                                           \
    X(backend)                                                                                                         \
    X(dropout)                                                                                                         \
    X(first_head)                                                                                                      \
    X(q_index)                                                                                                         \
    X(k_index)

/* True if everything else in the call is zero. A field that is added to mt_attention, where zero is without it, is
 * refused until the kernels know it. So is padding that is not zero: the operations then run one by one. */
static inline bool mt_decode_knows_attention(const mt_attention *a) {
    static const unsigned char zeros[sizeof *a] = {0};
    mt_attention rest = *a;
#define MT_DECODE_KNOWN(field) memset(&rest.field, 0, sizeof rest.field);
    MT_DECODE_ATTENTION_FIELDS(MT_DECODE_KNOWN)
#undef MT_DECODE_KNOWN
    return memcmp(&rest, zeros, sizeof rest) == 0;
}

/* Switches the one kernel on, as it is at first, or off for the graphs that are captured from now on. */
void mt_cuda_decode_fuse(bool on);

/* The number of graphs captured with it so far, and how many of these have the kernel of decode_cluster.cu. */
int64_t mt_cuda_decode_fused(void);
int64_t mt_cuda_decode_in_clusters(void);

#ifdef __cplusplus
}

#include "cuda.h"

/* The products of a layer, in order: qkv, attention's output, the MLP's first, the MLP's second. */
enum { MT_DECODE_QKV, MT_DECODE_OUT, MT_DECODE_FC1, MT_DECODE_FC2, MT_DECODE_PRODUCTS };

enum {
    MT_DECODE_LAYERS = 128,
    MT_DECODE_WARPS = 16,
    MT_DECODE_LOADERS = MT_DECODE_WARPS - 1,        // warps with weights
    MT_DECODE_WIDTH = 2 * 8 * 32 * MT_DECODE_WARPS, // maximum of C: a thread keeps two packs of a row
    MT_DECODE_CHANNELS = 256,                       // maximum of a head
    MT_DECODE_MAP_BYTES = 128,                      // of a tensor map
    MT_DECODE_HEADS = 4,                            // heads of a group that a block attends for
    MT_DECODE_SPLITS = 64                           // parts of a sequence's keys, at most
};

/* Pointers of a layer: weights [N, K] and biases [N] of the products, of the two norms before QKV and FC1, and of the
 * norms of q and k; NULL: none. The residual stream is read from `input`, middle = input + attention and output =
 * middle + MLP. */
struct mt_decode_layer {
    const __nv_bfloat16 *w[MT_DECODE_PRODUCTS], *bias[MT_DECODE_PRODUCTS];
    const __nv_bfloat16 *norm_w[2], *norm_b[2], *q_norm, *k_norm, *input;
    __nv_bfloat16 *middle, *output, *k_cache, *v_cache;
};

/* A product's rows of w are computed in pairs, unit u: rows u * step and u * step + apart. The rows are cut into chunks
 * of 256 channels, which 2^team_bits warps share. With a team of several warps, no team has more than one unit. */
struct mt_decode_product {
    int units, step, apart, K, chunks, team_bits;
};

/* Arguments of the kernel. The layers have one shape. */
struct mt_decode_task {
    const mt_decode_layer *layers; // [num_layers]
    uint32_t *arrived;             // counter of the grid's barrier, 0 at first
    const void *maps;              // [num_layers, products] tensor maps, for decode_cluster.cu
    int num_layers, T, C, H, G, D, F, splits;
    int ring_bytes, layer_bytes; // of shared memory
    bool layernorm;
    mt_activation activation;
    float eps, qk_eps, scale;
    int64_t window;
    mt_decode_product products[MT_DECODE_PRODUCTS];
    __nv_bfloat16 *qkv, *attended, *active; // [T, (H + 2 G) D], [T, H D], [T, F]
    float *sums;                            // [T, H, splits, D] sum 2^(x - max) v over the keys of a split
    float2 *maxima;                         // [T, H, splits] max, and sum of 2^(x - max)
    const mt_span *spans;                   // [T]
    const int32_t *cache_rows;              // [T]
    mt_pages pages;
    mt_rotation rotation;
};

typedef void mt_decode_kernel(const mt_decode_task);

/* The kernel for T rows and the slots of its ring of weights: 1 KiB of shared memory per slot and warp. */
mt_decode_kernel *mt_decode_kernel_of(int64_t T, int *slots);

/* Enqueues the kernel of decode_cluster.cu. Sets `sums`, and on the host what `maps` of the task must hold before the
 * kernel runs. False: it does not serve this model or GPU. */
bool mt_decode_launch_clusters(mt_decode_task *task, const mt_decode_layer *layers, void *maps, mt_stream *stream);

/* A recording begins before the capture of a stream and ends after it, when it returns memory that the graph needs
 * while it lives, or NULL. */
struct mt_decode_record;
void mt_decode_begin(mt_stream *stream);
void *mt_decode_end(mt_stream *stream);
void mt_decode_free(void *memory);

/* Enqueues what was recorded, before an operation that is not. */
void mt_decode_flush(mt_stream *stream);

/* True if a recording has taken over the operation `name`. */
#define MT_DECODE_OPERATIONS(X)                                                                                        \
    X(all_reduce)                                                                                                      \
    X(linear_forward)                                                                                                  \
    X(linear_gelu_forward)                                                                                             \
    X(layernorm_forward)                                                                                               \
    X(rmsnorm_forward)                                                                                                 \
    X(residual_norm_forward)                                                                                           \
    X(qk_forward)                                                                                                      \
    X(attention_forward)                                                                                               \
    X(activation_forward)                                                                                              \
    X(dropout_add_forward)
template <class Function> struct mt_decode_recorder;
template <class... P> struct mt_decode_recorder<void(P...)> { typedef bool function(P...); };
#define MT_DECODE_PROTOTYPE(name) mt_decode_recorder<mt_##name##_fn>::function mt_decode_record_##name;
MT_DECODE_OPERATIONS(MT_DECODE_PROTOTYPE)
#undef MT_DECODE_PROTOTYPE

static inline void mt_decode_flush_if(mt_stream *stream) {
    if (stream && stream->record) mt_decode_flush(stream);
}
template <class T> static inline void mt_decode_flush_if(const T &) {
}

/* Called with every operation of the table before it is enqueued; true: a recording has taken it over. */
template <auto *operation> struct mt_decode_hook {
    template <class... P> static bool takes(P... arguments) {
        (mt_decode_flush_if(arguments), ...);
        return false;
    }
};
#define MT_DECODE_HOOK(name)                                                                                           \
    template <> struct mt_decode_hook<mt_cuda_##name> {                                                                \
        template <class... P> static bool takes(P... arguments) {                                                      \
            return mt_decode_record_##name(arguments...);                                                              \
        }                                                                                                              \
    };
MT_DECODE_OPERATIONS(MT_DECODE_HOOK)
#undef MT_DECODE_HOOK

#endif
#endif
