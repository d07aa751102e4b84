/* tensor_stream.h: the whole tensors of a model one after another, under their Hugging Face names, from ranks that hold
 * parts of them. For programs that read weights or gradients without a folder in between. */
#ifndef MT_TENSOR_STREAM_H
#define MT_TENSOR_STREAM_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The values of a stream. Gradients are those of the last mt_train_step, of the sum of the loss over tokens: divide by
 * mt_metrics.loss_count (with fp16 also by the scale of the loss) for those of the mean. Clipping does not change them.
 */
typedef enum mt_streamed { MT_STREAM_WEIGHTS, MT_STREAM_GRADIENTS } mt_streamed;

/* A tensor as a Hugging Face folder has it: GPT-2's matrices are transposed, stacked experts are one tensor. */
typedef struct mt_whole_tensor {
    const char *name; // "model.layers.0.mlp.up_proj.weight"; valid as long as the stream
    int64_t num_dims, shape[MT_PARAM_DIMS];
    int64_t count;       // of elements
    const float *values; // [shape], the last dimension fastest; until the next call. NULL on ranks other than the root
} mt_whole_tensor;

typedef struct mt_tensor_stream mt_tensor_stream;

/* Opens a stream of the tensors that a save would write as weights, by name. Gradients: of the trained ones alone, and
 * with adapters of these. `root`: the world rank that receives values. Every rank calls the three functions, and trains
 * no step in between. Fails on every rank if there is no rank `root`, or for gradients if the model has none: it is not
 * for training, no step has run, or its gradients rest. */
int mt_tensor_stream_open(mt_tensor_stream **stream, mt_model *model, mt_streamed streamed, int root, mt_error *error);

/* The next tensor, on every rank the same: true; false after the last one. Host memory on the root: the tensor, and the
 * largest part of it that another rank has; on other ranks their part. */
bool mt_tensor_stream_next(mt_tensor_stream *stream, mt_whole_tensor *tensor);

/* Closes a stream, whether or not all of its tensors were read; NULL: nothing. */
void mt_tensor_stream_close(mt_tensor_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
