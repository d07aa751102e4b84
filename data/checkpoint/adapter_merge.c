/* adapter_merge.c: the product of adapters is added to their matrices, and the merged model is a Hugging Face folder.
 */
#include "adapter_merge.h"

#include "../base/file.h"
#include "../models/hf_config.h"
#include "../models/special_tokens.h"
#include "../options/option_table.h"
#include "checkpoint_folder.h"
#include "checkpoint_save.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The row of this bucket with a role, an adapter's half and an expert. Matrices of one tensor share A. */
static const mt_param *mt_bucket_find(const mt_param *params, const mt_bucket *b, mt_role role, const mt_param *of) {
    size_t module = strlen(of->hf_name) - strlen("B.weight"); // "....lora_"
    for (const mt_param *p = params + b->first_param; p < params + b->first_param + b->num_params; p++)
        if (p->role == role && p->expert == of->expert &&
            (role != MT_LORA_A || strncmp(p->hf_name, of->hf_name, module) == 0))
            return p;
    return NULL;
}

void mt_model_merge_adapters(mt_model *m) {
    int64_t num_buckets, num_params;
    const mt_options *o = mt_model_options(m);
    const mt_ops *ops = mt_model_ops(m);
    mt_dtype dtype = mt_model_dtype(m);
    const mt_bucket *buckets = mt_model_buckets(m, &num_buckets);
    const mt_param *params = mt_model_params(m, &num_params);
    for (const mt_param *b = params; b < params + num_params; b++) {
        if (b->role != MT_LORA_B) continue;
        const mt_bucket *adapters = &buckets[b->bucket], *base = buckets;
        const mt_param *a = mt_bucket_find(params, adapters, MT_LORA_A, b), *w = NULL;
        for (;; base++) {
            const mt_param *first = &params[base->first_param];
            bool same = first->layer == b->layer && first->vision_part == b->vision_part;
            if (!same || mt_param_is_adapter(first) || (first->expert < 0) != (b->expert < 0)) continue;
            if ((w = mt_bucket_find(params, base, b->adapts, b))) break;
        }
        MT_CHECK(a && w && adapters->params && base->params && base->num_scales == 0);
        char *b_values = (char *)adapters->params + b->offset * mt_dtype_size(dtype);
        mt_grouped_args product = {.M = b->rows, .N = o->lora_rank, .K = w->cols, .E = 1, .accumulate = true};
        product.dy = b_values, product.w = (char *)adapters->params + a->offset * mt_dtype_size(dtype);
        product.dx = (char *)base->params + w->offset * mt_dtype_size(dtype);
        product.scale = (float)(o->lora_alpha / (double)o->lora_rank);
        ops->grouped_linear_backward_input(&product, dtype, mt_model_stream(m));
    }
    for (const mt_param *b = params; b < params + num_params; b++) {
        if (b->role != MT_LORA_B) continue;
        mt_shard shard = mt_bucket_shard(m, b->bucket, MT_STATE_WEIGHTS);
        mt_shard_write(m, &shard, b->offset, NULL, b->rows * b->cols);
    }
}

int mt_model_files_write(const mt_run_options *o, const char *folder, const char *option, const mt_tokenizer *tokenizer,
                         mt_error *error) {
    char *config = mt_options_write_hf_config(o), *path = mt_path_join(folder, "config.json");
    int status = mt_generation_config_write(o, folder, error);
    if (status == 0 && tokenizer) status = mt_tokenizer_save(tokenizer, folder, error);
    if (status == 0) status = mt_file_write(path, config, (int64_t)strlen(config), option, error);
    free(config), free(path);
    return status;
}

/* True for the names of weights and of their index. */
static bool mt_is_merged(const char *name) {
    return strncmp(name, "model", 5) == 0 && strstr(name, ".safetensors");
}

static int mt_merged_refuse(const char *folder, const char *name, void *error) {
    if (!mt_is_merged(name)) return 0;
    return mt_error_set(error,
                        "--merge-adapter %s: holds %s but no config.json, as after a merge that was killed; "
                        "remove it, or name another folder",
                        folder, name);
}

/* The names of a folder before the merge. */
static int mt_merged_note(const char *folder, const char *name, void *others) {
    (void)folder;
    mt_strings_add(others, name);
    return 0;
}

/* Removes what the merge wrote. */
static int mt_merged_remove(const char *folder, const char *name, void *context) {
    const mt_strings *others = context;
    for (int64_t i = 0; i < others->count; i++)
        if (strcmp(name, others->items[i]) == 0) return 0;
    char *path = mt_path_join(folder, name);
    unlink(path);
    free(path);
    return 0;
}

int mt_adapter_merge(mt_model *m, const mt_run_options *o, const mt_tokenizer *tokenizer, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_checksums sums = {0};
    mt_strings others = {0};
    int status = 0;
    if (world->rank == 0) status = mt_folder_create(o->merge_adapter, "--merge-adapter", error);
    if (world->rank == 0 && status == 0 && mt_folder_has_weights(o->merge_adapter))
        status =
            mt_error_set(error, "--merge-adapter %s: holds a model already; name another folder", o->merge_adapter);
    if (world->rank == 0 && status == 0) status = mt_folder_visit(o->merge_adapter, mt_merged_refuse, error);
    if (world->rank == 0 && status == 0) status = mt_folder_visit(o->merge_adapter, mt_merged_note, &others);
    if (mt_agree(world, status != 0, error) != 0) {
        mt_strings_free(&others);
        return -1;
    }
    mt_model_merge_adapters(m);
    status = mt_safetensors_save_folder(m, o->merge_adapter, "model", 5000000000, "--merge-adapter", &sums, error);
    bool failed = status == 0 && world->rank == 0 &&
                  (mt_model_files_write(o, o->merge_adapter, "--merge-adapter", tokenizer, error) != 0 ||
                   mt_checksums_write(&sums, o->merge_adapter, &others, "--merge-adapter", error) != 0);
    if (status == 0) status = mt_agree(world, failed, error);
    if (status != 0 && world->rank == 0)
        mt_folder_visit(o->merge_adapter, mt_merged_remove, &others); // for another try
    mt_checksums_free(&sums);
    mt_strings_free(&others);
    return status;
}
