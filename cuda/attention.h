/* attention.h: the ladder of attention. Each rung computes the same thing, faster and for less: the definition takes
 * any operands, the rungs above it what their hardware is good at. */
#ifndef MT_ATTENTION_H
#define MT_ATTENTION_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each returns whether the rung serves these operands on this GPU; where it does not, nothing was enqueued. */
typedef bool mt_attention_direction(const mt_attention *a, mt_dtype dtype, mt_stream *stream);
typedef struct mt_attention_rung {
    const char *name;
    mt_attention_direction *forward, *backward;
} mt_attention_rung;

/* From the definition up: the last that serves a call is the fastest. */
enum { MT_NUM_ATTENTION_RUNGS = 4 };
extern const mt_attention_rung mt_attention_rungs[MT_NUM_ATTENTION_RUNGS];

/* cuDNN beside the ladder: serves spans that are a batch of sequences, in a stream with a workspace, and nothing in a
 * build without cuDNN. Its backward does not repeat bit for bit. */
extern const mt_attention_rung mt_attention_cudnn;

#ifdef __cplusplus
}
#endif
#endif
