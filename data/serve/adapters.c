/* adapters.c: the low-rank adapters of --serve-adapter. */
#include "adapters.h"

#include "../base/hf_cache.h"
#include "../checkpoint/adapter.h"
#include "../checkpoint/checkpoint_load.h"
#include "../options/option_table.h"
#include "../tokens/tokenizer.h"
#include "../tokens/tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

/* NAME=FOLDER, also ORG/NAME of a folder in the cache of Hugging Face. */
static int add_place(mt_serve_adapters *a, const char *text, const char *base, mt_error *error) {
    const char *equals = strchr(text, '=');
    if (!equals || equals == text || !equals[1] || !mt_utf8_is_valid(text, equals - text))
        return mt_error_set(error, "--serve-adapter %.200s: expects NAME=FOLDER", text);
    char *name = strndup(text, (size_t)(equals - text)), *folder = strdup(equals + 1);
    int status = strcmp(name, base) == 0 ? -1 : 0;
    for (int64_t i = 0; i < a->names.count && status == 0; i++) status = strcmp(name, a->names.items[i]) == 0 ? -1 : 0;
    if (status != 0)
        mt_error_set(error, "--serve-adapter %.200s: another model has the name %.100s; give each its own", text, name);
    if (status == 0) status = mt_hf_cache_find(&folder, NULL, "--serve-adapter", error);
    if (status == 0) mt_strings_add(&a->names, name), mt_strings_add(&a->folders, folder);
    free(name), free(folder);
    return status;
}

/* The run's options with another adapter. They share all texts with `options` but the targets, which are to be freed
 * by mt_strings_free. */
static mt_run_options with_adapter(const mt_run_options *options, char *folder) {
    mt_run_options own = *options;
    own.load_adapter = folder, own.lora_target = (mt_strings){0};
    return own;
}

/* The options of a model with one adapter alone: as infer --load-adapter has them. */
static int read_own(mt_options *own, const mt_run_options *options, const char *name, char *folder, mt_error *error) {
    mt_run_options run = with_adapter(options, folder);
    mt_error why;
    int status = mt_adapter_read_options(&run, &why);
    if (status == 0) status = mt_options_derive_adapters(&run, &why);
    mt_strings_free(&run.lora_target);
    if (status != 0) return mt_error_set(error, "--serve-adapter %.100s: %.2000s", name, why.text);
    *own = run.stack;
    mt_param *rows;
    int64_t count = mt_params_build(&rows, own, NULL);
    for (int64_t i = 0; i < count && status == 0; i++)
        if (mt_param_is_adapter(&rows[i]) && rows[i].expert >= 0)
            status = mt_error_set(error,
                                  "--serve-adapter %.100s: %s has adapters of experts, which are not served beside "
                                  "others; merge it into its base (--merge-adapter) and serve that, or serve it alone "
                                  "by --load-adapter",
                                  name, folder);
    for (int64_t i = 0; i < count && status == 0; i++)
        if (mt_param_is_adapter(&rows[i]) && rows[i].vision_part >= 0)
            status = mt_error_set(error,
                                  "--serve-adapter %.100s: %s has adapters of the vision tower, which are not served "
                                  "beside others; merge it into its base (--merge-adapter) and serve that, or serve it "
                                  "alone by --load-adapter",
                                  name, folder);
    free(rows);
    return status;
}

int mt_serve_adapters_open(mt_serve_adapters *a, mt_run_options *o, const char *base, mt_error *error) {
    *a = (mt_serve_adapters){.own = mt_calloc(mt_max(o->serve_adapter.count, 1) * (int64_t)sizeof *a->own)};
    mt_options all = o->stack;
    int status = 0;
    for (int64_t i = 0; i < o->serve_adapter.count && status == 0; i++) {
        mt_options *own = &a->own[i];
        status = add_place(a, o->serve_adapter.items[i], base, error);
        if (status == 0) status = read_own(own, o, a->names.items[i], a->folders.items[i], error);
        if (status != 0) break;
        all.lora_rank = mt_max(all.lora_rank, own->lora_rank), all.lora_alpha = (double)all.lora_rank;
        for (int word = 0; word < 2; word++) all.lora_roles[word] |= own->lora_roles[word];
    }
    if (status == 0) o->stack = all;
    return status;
}

void mt_serve_adapters_close(mt_serve_adapters *a) {
    mt_strings_free(&a->names), mt_strings_free(&a->folders);
    free(a->own);
}

int mt_serve_adapters_load(const mt_serve_adapters *a, mt_model *model, const mt_run_options *o, mt_error *error) {
    int status = 0;
    for (int64_t i = 0; i < a->names.count && status == 0; i++) {
        const mt_options *own = &a->own[i];
        mt_run_options run = with_adapter(o, a->folders.items[i]);
        mt_run_state state = {0};
        mt_error why;
        run.stack.lora_alpha = own->lora_alpha / (double)own->lora_rank * (double)run.stack.lora_rank; // one scale
        status = mt_checkpoint_load_adapter(model, &run, &state, run.load_adapter, false, &why);
        if (status != 0) return mt_error_set(error, "--serve-adapter %.100s: %.2000s", a->names.items[i], why.text);
        mt_model_keep_adapter(model, i, own);
    }
    return status;
}
