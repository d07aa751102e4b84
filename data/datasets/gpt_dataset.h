/* gpt_dataset.h: samples by index, in Megatron-LM's order, id for id; blends. */
#ifndef MT_GPT_DATASET_H
#define MT_GPT_DATASET_H

#include "dataset.h"
#include "indexed_dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies the tokens [seq_length + 1] of sample `index`, in [0, num_samples). A pure function of the index. */
int mt_dataset_get(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error);
void mt_dataset_free(mt_dataset *dataset);

/* ---- the parts of mt_data_open, for callers that build datasets themselves ----------------------------------------
 * Megatron-LM, megatron/core/datasets/gpt_dataset.py, blended_dataset.py, blended_megatron_dataset_builder.py.
 */

/* Samples of the sequences [begin, end) of an indexed dataset, which must stay open. Has whole epochs: as many as
 * num_samples needs, or one if num_samples is negative. `config` gives seq_length, seed and vocab_size. */
int mt_gpt_dataset_create(mt_dataset **dataset, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                          int64_t num_samples, const mt_data_config *config, mt_error *error);

/* The same for a run that was extended, of mt_t5_dataset_create with config->spans: sizes[i] samples, ascending, were
 * asked for at its start (i 0) and by its extensions. The samples of the first come in the order of a run of sizes[0]
 * samples, whole epochs of it; where these do not reach sizes[i], whole epochs with a shuffle of their own follow, so
 * no extension changes an earlier order. */
int mt_indexed_dataset_extend(mt_dataset **dataset, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                              const int64_t *sizes, int64_t count, const mt_data_config *config, mt_error *error);

/* Draws `size` samples from `sources` [num_sources] in proportion to `weights`. Takes ownership of the sources, even on
 * error. */
int mt_blended_dataset_create(mt_dataset **dataset, mt_dataset *const *sources, const double *weights,
                              int64_t num_sources, int64_t size, mt_error *error);

/* The source of sample `index` of a blend, and the index of the sample in that source. */
void mt_blended_dataset_locate(const mt_dataset *blend, int64_t index, int64_t *source, int64_t *source_index);

/* Returns the number of sources of a blend and sets `sources` to them; 0 for any other dataset. */
int64_t mt_blended_dataset_sources(const mt_dataset *dataset, mt_dataset *const **sources);

/* Samples of one epoch of a dataset of mt_gpt_dataset_create or mt_t5_dataset_create; and the prefix of the indexed
 * dataset that it samples, NULL for any other. */
int64_t mt_dataset_epoch(const mt_dataset *dataset);
const char *mt_gpt_dataset_prefix(const mt_dataset *dataset);

/* Samples that a source of normalized weight `weight` contributes to a blend of `size`; and the size to create its
 * dataset with: Megatron adds 0.5% so that rounding never exhausts it. */
int64_t mt_blend_target(double weight, int64_t size);
int64_t mt_blend_surplus(int64_t target);

/* weights / numpy.sum(weights), bit for bit. */
void mt_weights_normalize(double *normalized, const double *weights, int64_t count);

/* Parses shares such as "969,30,1" to fractions: split i is [edges[i], edges[i + 1]), empty if they are equal. */
int mt_split_parse(double edges[MT_NUM_SPLITS + 1], const char *split, mt_error *error);

/* A list of paths, with or without weights. `paths` point into `words`. */
typedef struct mt_blend {
    int64_t count;
    const char **paths;
    double *weights; // NULL: without weights
} mt_blend;

/* `option` is the name of the option with the value `words`, for messages. */
int mt_blend_parse(mt_blend *blend, const mt_strings *words, const char *option, mt_error *error);
void mt_blend_free(mt_blend *blend);

#ifdef __cplusplus
}
#endif
#endif
