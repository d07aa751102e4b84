/* hf_config.h: the model of a Hugging Face config.json. */
#ifndef MT_HF_CONFIG_H
#define MT_HF_CONFIG_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes the model from the text of a Hugging Face config.json, except the options that were given; `path` is for
 * messages. */
int mt_options_read_hf_config(mt_run_options *options, const char *json, int64_t bytes, const char *path,
                              mt_error *error);

/* config.json of finished options, to free: transformers and this program load it; only this program loads the family
 * "megatron". */
char *mt_options_write_hf_config(const mt_run_options *options);

/* The "model_type" of a family; and the family of a name, or MT_HF_UNKNOWN. */
const char *mt_hf_family_name(mt_hf_family family);
mt_hf_family mt_hf_family_find(const char *name);

/* Copies the model of config.json into the options that were not given. With weights, a given value that they do not
 * have is an error. */
int mt_options_take_shape(mt_run_options *options, const char *json, int64_t bytes, const char *path, bool has_weights,
                          mt_error *error);

/* Compares the model of a config.json at `path`, which `option` names, with that of the loaded weights, which the
 * options have: every option that was not given must have the same value in both, after derived sizes are filled in.
 * *head (NULL: not wanted) is that model's head. */
int mt_options_check_shape(const mt_run_options *options, const char *json, int64_t bytes, const char *option,
                           const char *path, mt_head_type *head, mt_error *error);

/* Keeps the family of config.json if it computes this model, otherwise takes the first family that does. */
void mt_options_derive_family(mt_run_options *options);

/* Refuses options that give a model loaded by --load, of the family `stored`, a family whose tensors have other names.
 */
int mt_options_check_names(const mt_run_options *options, mt_hf_family stored, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
