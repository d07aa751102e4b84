/* adapters.h: the low-rank adapters of --serve-adapter NAME=FOLDER: models of their own to clients, over one base. */
#ifndef MT_SERVE_ADAPTERS_H
#define MT_SERVE_ADAPTERS_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The adapters of a server, in the order of the options; adapter i of the model's table has names.items[i]. */
typedef struct mt_serve_adapters {
    mt_strings names, folders;
    mt_options *own; // [names.count] of a model with this adapter alone
} mt_serve_adapters;

/* Reads the options --serve-adapter and the files adapter_config.json of their folders. Sets lora_rank, lora_alpha and
 * lora_roles of the options to what holds each of the adapters; to be called before the model is created, on every
 * rank. `base` is the name of the base. Errors: no NAME=FOLDER, a name twice, no adapter in a folder, one of experts.
 */
int mt_serve_adapters_open(mt_serve_adapters *adapters, mt_run_options *options, const char *base, mt_error *error);
void mt_serve_adapters_close(mt_serve_adapters *adapters);

/* Loads the adapters into the table of a model with plan.num_adapters = names.count. Every rank calls it. */
int mt_serve_adapters_load(const mt_serve_adapters *adapters, mt_model *model, const mt_run_options *options,
                           mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
