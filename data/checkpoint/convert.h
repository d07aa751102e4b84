/* convert.h: a model's weights from one format of folders into another, tensor by tensor, without a model. */
#ifndef MT_CONVERT_H
#define MT_CONVERT_H

#include "../options/options.h"
#include "../tokens/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the weights of options->load, a Hugging Face folder or a checkpoint of Megatron-LM, into options->convert in
 * the format of --ckpt-format: a Hugging Face folder, or torch_dist as DIR/release with its tracker, from which
 * Megatron-LM begins a run. In bf16 or fp16 with --bf16 or --fp16, or where all weights are stored so, else in fp32. It
 * takes memory for one tensor. `tokenizer`: NULL for none. Errors: a folder that holds a model, weights in fp8 or
 * MXFP4, a full disk; then DIR holds no model. For one rank. */
int mt_checkpoint_convert(const mt_run_options *options, const mt_tokenizer *tokenizer, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
