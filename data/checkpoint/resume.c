/* resume.c: the folder that a run continues. */
#include "resume.h"

#include "../base/file.h"
#include "../options/option_table.h"
#include "checkpoint_folder.h"

#include <stdio.h>
#include <stdlib.h>

bool mt_options_adapts(const mt_run_options *options) {
    return options->stack.lora_rank > 0 || options->load_adapter;
}

char **mt_options_run_folder(mt_run_options *options) {
    return mt_options_adapts(options) ? &options->load_adapter : &options->load;
}

bool mt_options_falls_back(const mt_run_options *options) {
    const char *folder = mt_options_adapts(options) ? options->load_adapter : options->load;
    return folder && options->save && mt_path_same(folder, options->save);
}

bool mt_checkpoint_continues(const mt_run_options *o) {
    if (o->auto_resume || mt_options_falls_back(o)) return true;
    const char *folder = o->stack.lora_rank > 0 ? o->load_adapter : o->load;
    char *parent = folder && o->save ? mt_path_join(folder, "..") : NULL;
    bool continues = parent && mt_path_same(parent, o->save);
    free(parent);
    return continues;
}

/* The model of --load, before it gives way to the checkpoint of --save, is the reference of a run that has one. */
static void mt_options_keep_reference(mt_run_options *o) {
    bool diverges = o->stack.stage == MT_STAGE_RL &&
                    (o->kl_loss_coef > 0 || o->kl_in_reward || o->self_distillation == MT_SELF_DISTILL_INITIAL);
    bool refers = diverges || (o->stack.stage == MT_STAGE_DPO && !o->ref_logps_in_data);
    if (refers && !o->ref_load && o->stack.lora_rank == 0) mt_string_set(&o->ref_load, o->load);
}

int mt_options_find_checkpoint(mt_run_options *o, mt_error *error) {
    bool same = mt_options_falls_back(o);
    if (same && o->overwrite && !o->finetune)
        return mt_error_set(error, "--%s %s continues the run that --overwrite would replace; leave one out",
                            mt_options_adapts(o) ? "load-adapter" : "load", *mt_options_run_folder(o));
    if (!o->save || (!same && !o->auto_resume)) return 0;
    if (mt_folder_check_lock(o->save, ".lock", "--save", error) != 0) return -1; // its checkpoints come and go
    if (mt_checkpoint_exists(o->save)) {
        char *path = mt_checkpoint_resolve_whole(o->save, error);
        free(path);
        if (!path) return -1;
        if (o->auto_resume) o->finetune = false;
        o->stack.moe_use_upcycling = false;      // the run has begun with it
        if (!o->finetune) o->value_head = false; // the run has given the model its head
        if (!same) {
            o->no_load_optim = o->no_load_rng = false;
            mt_string_set(&o->hf_config, NULL);
            mt_options_keep_reference(o);
        }
        mt_string_set(mt_options_run_folder(o), o->save);
        return 0;
    }
    if (o->exit_on_missing_checkpoint)
        return mt_error_set(error,
                            "%s: holds no checkpoint to resume from; check --save, or leave out "
                            "--exit-on-missing-checkpoint",
                            o->save);
    if (same) {
        mt_string_set(mt_options_run_folder(o), NULL);
        o->finetune = o->no_load_optim = o->no_load_rng = false; // nothing is loaded
        o->auto_resume = true;                                   // a start of the same run, whose metrics start anew
    }
    if (mt_launch_rank() == 0) printf("%s holds no checkpoint: the run starts from the beginning\n", o->save);
    return 0;
}

char *mt_options_load_folder(const mt_run_options *options, mt_error *error) {
    return mt_options_falls_back(options) && !mt_options_adapts(options)
               ? mt_checkpoint_resolve_whole(options->load, error)
               : mt_checkpoint_resolve(options->load, error);
}
