/* attention.h: the implementations of attention, as a ladder. Each rung computes the same result faster than the one
 * below it. The first, the definition, takes any operands; the others need certain hardware and shapes. */
#ifndef MT_ATTENTION_H
#define MT_ATTENTION_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each returns false and enqueues nothing if the rung does not support these operands on this GPU. */
typedef bool mt_attention_direction(const mt_attention *a, mt_dtype dtype, mt_stream *stream);
typedef struct mt_attention_rung {
    const char *name;
    mt_attention_direction *forward, *backward;
} mt_attention_rung;

/* Ordered from the definition to the fastest; a call uses the last rung that supports it. */
enum { MT_NUM_ATTENTION_RUNGS = 4 };
extern const mt_attention_rung mt_attention_rungs[MT_NUM_ATTENTION_RUNGS];

/* cuDNN, outside of the ladder. It serves spans that form a batch of sequences, in a stream with a workspace; nothing
 * in a build without cuDNN. Its backward does not repeat bit for bit. */
extern const mt_attention_rung mt_attention_cudnn;

/* The Hopper rung whose backward sums dq in no fixed order, which is faster for most shapes; outside of the ladder,
 * since it does not repeat bit for bit. It serves heads of 128 channels in a stream with a workspace. */
extern const mt_attention_rung mt_attention_unordered;

/* For measurements: with false, sparse attention and its indexer multiply by mma.sync on a Hopper GPU too. */
void mt_cuda_select_on_hopper(bool on);
/* Likewise: the indexer's loss over all keys, its target and its gradients, takes the kernels of lists. */
void mt_cuda_loss_on_tensor_cores(bool on);

#ifdef __cplusplus
}
#endif
#endif
