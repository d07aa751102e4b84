/* resume.h: the folder that a run continues. */
#ifndef MT_RESUME_H
#define MT_RESUME_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* True if the model has adapters: --lora-rank or --load-adapter. */
bool mt_options_adapts(const mt_run_options *options);

/* The folder that a run continues, an option's string: --load, or with adapters --load-adapter. */
char **mt_options_run_folder(mt_run_options *options);

/* True for a run that loads from its own --save: it continues from an older checkpoint if the last one is damaged. */
bool mt_options_falls_back(const mt_run_options *options);

/* True if the run loads from its own --save: from the folder, or from a checkpoint in it. */
bool mt_checkpoint_continues(const mt_run_options *options);

/* Resume from --save if it holds an intact checkpoint: for --auto-resume, or if --load is the same folder. Then
 * everything is resumed, also the parts that the run did not load at its start. */
int mt_options_find_checkpoint(mt_run_options *options, mt_error *error);

/* The folder that options->load means: itself, its latest checkpoint, or, if the run continues in options->save and the
 * latest is damaged, the one before. To free; NULL with error. */
char *mt_options_load_folder(const mt_run_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
