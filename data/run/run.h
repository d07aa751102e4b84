/* run.h: start, checkpoints and end of a run of train. */
#ifndef MT_RUN_H
#define MT_RUN_H

#include "../tokens/tokenizer.h"
#include "../datasets/dataset.h"
#include "../report/report.h"
#include "../learn/rl.h"
#include "../learn/stage.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_run {
    mt_run_options options;
    mt_grid grid;
    const mt_ops *ops; // of the device
    mt_tokenizer *tokenizer;
    mt_tokenizer *kept; // files of a tokenizer that this program cannot open, to be saved; NULL: none
    mt_error kept_note; // a line on the tokenizer that checkpoints will have; empty: nothing to say
    // The program of the template of conversations, which the tokenizer's folder lacks. NULL: there is none to save.
    const char *chat_program;
    bool drops_template;    // that of the tokenizer's folder: another one was trained with
    char *tokenizer_folder; // of the checkpoint that has it; NULL: --tokenizer-type
    mt_data_config data_config;
    struct mt_fim *fim;            // of data_config
    struct mt_span_masking *spans; // likewise
    mt_data *data;
    mt_loader *loaders[MT_NUM_SPLITS];
    mt_loader **more_loaders; // of --multiple-validation-sets, after the first
    int64_t num_more_loaders;
    mt_stage_loss loss;
    mt_model *model;
    mt_reference *reference;   // NULL: the stage has none
    mt_rl *rl;                 // NULL: not --stage rl
    mt_rollout_ranks *writers; // of --rollout-ranks; NULL: none
    mt_saver *saver;
    mt_batch batch;
    mt_run_state state;
    mt_run_state begin; // iteration and samples of the run that goes on (mt_checkpoint_peek)
    mt_report report;
    int64_t saved;      // iteration of the last checkpoint that was reported as saved
    int64_t last_saved; // of the last one that was saved, perhaps still under way; -1: none
    double start;
} mt_run;

/* Opens what the command line asks for, up to the first step: ranks, tokenizer, data, models, reports. Returns false
 * if it asked to print something instead (--print-config, --print-launch, --print-schedule, --plan, --explain),
 * which is done then. Ends the program with one line of error if something is wrong, before anything is saved. Every
 * rank calls each function of this file. */
bool mt_run_open(mt_run *run, int *argc, char ***argv);
void mt_run_close(mt_run *run); // waits for the save under way, and reports it

/* Ends the program with the error, after the save under way, if status is not 0. It must be the same on every rank. */
void mt_run_check(mt_run *run, int status, mt_error *error);

/* Saves a checkpoint if --save is given; not after a bad step, because the run returns to the checkpoint before it.
 * _progress: only if this run has trained since its last checkpoint. */
void mt_run_save(mt_run *run);
void mt_run_save_progress(mt_run *run);

/* Prints a line if the run has no step left when it begins. Returns true if --save holds the loaded checkpoint already,
 * so that a run without a step has none to save. */
bool mt_run_is_finished(mt_run *run);

/* Reports the last checkpoint that came into its place. */
void mt_run_report_saved(mt_run *run);

#ifdef __cplusplus
}
#endif
#endif
