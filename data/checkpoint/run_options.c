/* run_options.c: the options of a run together with the folders of its model. */
#include "run_options.h"

#include "../base/file.h"
#include "../base/hf_cache.h"
#include "../models/special_tokens.h"
#include "../options/option_roles.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../options/option_typed.h"
#include "../models/hf_config.h"
#include "adapter.h"
#include "checkpoint_folder.h"
#include "megatron_args.h"
#include "megatron_tensors.h"
#include "resume.h"

#include <stdlib.h>
#include <string.h>

/* A conversion keeps the seed and the sequence length of the run that saved the folder, unless they are given. The
 * loader reports what is wrong with trainer.json. */
static void mt_options_take_run(mt_run_options *o, const char *folder) {
    static const struct {
        const char *key;
        size_t offset;
    } rows[] = {{"seed", MT_AT(stack.seed)}, {"data_seed", MT_AT(data_seed)}, {"seq_length", MT_AT(stack.seq_length)}};
    char *path = mt_path_join(folder, "trainer.json");
    mt_error ignored;
    json_t *json = mt_json_read(path, &ignored);
    for (size_t i = 0; json && i < sizeof rows / sizeof *rows; i++) {
        const mt_option *row = mt_option_of(rows[i].offset);
        const json_t *value = json_object_get(json, rows[i].key);
        bool good = json_is_integer(value) && mt_option_in_range(row, json_number_value(value));
        if (!good || mt_options_gave(o, row->offset)) continue;
        *mt_option_int(o, row) = json_integer_value(value);
        mt_option_set_origin(o, row, MT_ORIGIN_CHECKPOINT);
    }
    json_decref(json);
    free(path);
}

/* Takes the model of a config.json; if the options have the model of --load already, compares the two. */
static int mt_options_read_json(mt_run_options *options, const char *path, bool has_weights, mt_error *error) {
    int64_t bytes;
    char *json = mt_file_read(path, MT_CONFIG_BYTES, &bytes, error);
    int status = !json ? -1
                 : options->load && !has_weights
                     ? mt_options_check_shape(options, json, bytes, "--hf-config", path, NULL, error)
                     : mt_options_take_shape(options, json, bytes, path, has_weights, error);
    free(json);
    return status;
}

/* KEY=ORG/NAME */
static int find_teacher(char **word, mt_error *error) {
    char *equals = strchr(*word, '=');
    if (!equals) return 0; // reported by the rules
    char *folder = mt_strdup(equals + 1);
    int status = mt_hf_cache_find(&folder, NULL, "--teachers", error);
    char *found = mt_malloc((int64_t)(equals - *word) + 2 + (int64_t)strlen(folder));
    sprintf(found, "%.*s=%s", (int)(equals - *word), *word, folder);
    free(folder), free(*word);
    *word = found;
    return status;
}

/* Models named ORG/NAME, where the local cache of Hugging Face has them. */
static int mt_options_find_models(mt_run_options *o, mt_error *error) {
    if (mt_hf_cache_find(&o->load, NULL, "--load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->hf_config, "config.json", "--hf-config", error) != 0) return -1;
    if (mt_hf_cache_find(&o->load_adapter, NULL, "--load-adapter", error) != 0) return -1;
    if (mt_hf_cache_find(&o->ref_load, NULL, "--ref-load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->teacher_load, NULL, "--teacher-load", error) != 0) return -1;
    for (int64_t i = 0; i < o->teachers.count; i++)
        if (find_teacher(&o->teachers.items[i], error) != 0) return -1;
    if (mt_hf_cache_find(&o->export_kd_teacher_load, NULL, "--export-kd-teacher-load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->reward_load, NULL, "--reward-load", error) != 0) return -1;
    if (mt_hf_cache_find(&o->critic_load, NULL, "--critic-load", error) != 0) return -1;
    return mt_hf_cache_find(&o->tokenizer_model, NULL, "--tokenizer-model", error);
}

int mt_options_read_shape(mt_run_options *options, mt_error *error) {
    if (mt_options_find_models(options, error) != 0) return -1;
    char *folder = options->load ? mt_options_load_folder(options, error) : NULL;
    if (options->load && !folder) return -1;
    if (folder && mt_options_converts(options)) mt_options_take_run(options, folder);
    char *path = folder ? mt_path_join(folder, "config.json") : NULL;
    int status = 0;
    bool foreign = folder && !mt_folder_has(folder, "config.json") && mt_folder_is_megatron(folder);
    if (foreign) {
        free(path);
        path = NULL;
        status = mt_options_read_megatron(options, folder, error);
    } else if (folder && !mt_folder_has(folder, "config.json"))
        status = options->auto_resume && mt_options_falls_back(options)
                     ? mt_error_set(error,
                                    "--auto-resume: the run of --save %s has adapters; give its --lora-rank and "
                                    "--lora-target to continue it, or another --save",
                                    options->save)
                     : mt_error_set(error,
                                    "--load %s: holds an adapter; name its base by --load and this folder by "
                                    "--load-adapter",
                                    options->load);
    if (status == 0 && path) status = mt_options_read_json(options, path, true, error);
    if (status == 0 && path) status = mt_generation_config_read(options, folder, error);
    if (status == 0 && options->hf_config) status = mt_options_read_json(options, options->hf_config, false, error);
    if (status == 0) status = mt_adapter_read_options(options, error);
    if (status == 0) mt_options_yield_experts(options);
    free(path), free(folder);
    return status;
}

int mt_options_parse(mt_run_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    if (mt_options_read(options, program, argc, argv, error) != 0) return -1;
    if (options->print_config) return 0;
    if (program == MT_PROGRAM_TRAIN && mt_options_find_checkpoint(options, error) != 0) return -1;
    return mt_options_read_shape(options, error);
}

int mt_options_finish(mt_run_options *options, mt_program program, int64_t world_size, mt_error *error) {
    return mt_options_finish_by(options, program, world_size, NULL, error);
}

int mt_options_finish_by(mt_run_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                         mt_error *error) {
    int status = mt_options_complete(options, program, world_size, balance, error);
    if (status == 0 && !mt_options_draws_schedule(options)) {
        mt_hf_family stored = options->stack.hf_family;
        mt_options_derive_family(options);
        status = mt_options_check_names(options, stored, error);
        if (status == 0) status = mt_options_derive_adapters(options, error);
        if (status == 0) status = mt_options_check_run(options, program, error);
        bool writes = options->save || options->convert;
        if (status == 0 && writes && options->ckpt_format == MT_CHECKPOINT_TORCH_DIST)
            status = mt_core_check(options, options->save && !options->no_save_optim, error);
    }
    if (status != 0) mt_options_name_typed(options, error);
    return status;
}
