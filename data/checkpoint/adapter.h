/* adapter.h: low-rank adapters as folders of peft: adapter_config.json and adapter_model.safetensors. The tensors are
 * rows of the parameter table, so checkpoint_load.h and checkpoint_save.h have them too. */
#ifndef MT_ADAPTER_H
#define MT_ADAPTER_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes rank, alpha, dropout and targets of the adapter_config.json in options->load_adapter (NULL: does nothing),
 * except a dropout or targets that were given. Errors: a rank or alpha that was given and differs; a feature of peft
 * that this program does not have. */
int mt_adapter_read_options(mt_run_options *options, mt_error *error);

/* The folder whose tokenizer and chat template a run takes, to free: that of --load-adapter if it has a tokenizer, as
 * programs that save both write it beside the weights; else, and with --tokenizer-type, the model's. NULL with error:
 * their tokens differ. */
char *mt_adapter_tokenizer_folder(const mt_run_options *options, const char *model_folder, mt_error *error);

/* An adapter_config.json, with which adapters may differ from matrix to matrix (rank_pattern, alpha_pattern,
 * exclude_modules, layers_to_transform). Free it by mt_adapter_file_close. NULL with error. */
typedef struct mt_adapter_file mt_adapter_file;
mt_adapter_file *mt_adapter_file_open(const char *folder, mt_error *error);
void mt_adapter_file_close(mt_adapter_file *file);

/* The adapter that the file gives a matrix. */
typedef struct mt_adapter_shape {
    bool exists;
    int64_t rank;
    double scale; // of B A: alpha / rank, or alpha / sqrt(rank) with use_rslora
} mt_adapter_shape;

/* Finds the adapter of a row of the parameter table, a matrix or one of its adapter's halves. */
int mt_adapter_file_find(const mt_adapter_file *file, const mt_param *row, mt_adapter_shape *shape, mt_error *error);

/* adapter_config.json of finished options, to free: peft and this program load it. */
char *mt_adapter_print_config(const mt_run_options *options);

/* Prints to `out` the matrices of layers that all-linear leaves without adapters, if any: those of gated delta nets and
 * queries with an output gate, and experts stacked in one tensor. */
void mt_adapter_print_left_out(const mt_run_options *options, FILE *out);

/* Prints to `out` which adapters of a model with experts peft drops, if any. */
void mt_adapter_warn(const mt_options *options, FILE *out);

/* Sets lora_roles and lora_alpha. A target names the matrices whose modules have this name or end with it behind a dot,
 * as in peft; "all-linear" all matrices of attention, MLP and experts except routers; "regex:PATTERN" those whose whole
 * module names match. With the targets of options->load_adapter the rank is the largest of its matrices; a matrix whose
 * adapter is smaller or not there has zeros, which training leaves zeros. Errors: a name without a matrix, with the
 * nearest one; some of the matrices of a role only, unless the file of load_adapter says so. */
int mt_options_derive_adapters(mt_run_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
