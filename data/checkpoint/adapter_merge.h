/* adapter_merge.h: the product of adapters is added to their matrices, and the merged model is a Hugging Face folder.
 */
#ifndef MT_ADAPTER_MERGE_H
#define MT_ADAPTER_MERGE_H

#include "../tokens/tokenizer.h"
#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the product of each adapter to its matrix, in fp32 and rounded once, and clears its B: the model computes the
 * same. Not for parameters that data-parallel ranks shard, and not between a forward and its backward. */
void mt_model_merge_adapters(mt_model *model);

/* Writes a model's files besides its weights: settings of generation, the tokenizer (NULL: none), and last config.json,
 * by which a folder holds a model. `option` names the folder. */
int mt_model_files_write(const mt_run_options *options, const char *folder, const char *option,
                         const mt_tokenizer *tokenizer, mt_error *error);

/* Writes the whole model with its adapters merged, a Hugging Face folder, to options->merge_adapter, and merges them in
 * `model` too. Every rank calls it; rank 0 writes the files of the tokenizer (NULL: none). */
int mt_adapter_merge(mt_model *model, const mt_run_options *options, const mt_tokenizer *tokenizer, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
