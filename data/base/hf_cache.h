/* hf_cache.h: models of the Hugging Face Hub in the local cache, where `hf download` and transformers put them. Nothing
 * is downloaded here. */
#ifndef MT_HF_CACHE_H
#define MT_HF_CACHE_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* If *path has the form ORG/NAME and no file or folder has this path, replaces it by the model's folder in the cache,
 * or, unless `file` is NULL, by that file of the folder. Otherwise leaves it as it is. The cache is HF_HUB_CACHE, else
 * HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub; refs/main of a model names its
 * folder. Error: the cache does not have the model, or not the file; `option`, such as "--load", named it. */
int mt_hf_cache_find(char **path, const char *file, const char *option, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
