/* option_agree.h: the options of all ranks are the same. */
#ifndef MT_OPTION_AGREE_H
#define MT_OPTION_AGREE_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* If the options of a rank differ from rank 0's, all ranks return an error with that rank and option. Every rank calls
 * it, after mt_options_finish. */
int mt_options_agree(const mt_run_options *options, const mt_group *world, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
