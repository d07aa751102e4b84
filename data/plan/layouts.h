/* layouts.h: finds the fastest layouts of a model by simulation. */
#ifndef MT_LAYOUTS_H
#define MT_LAYOUTS_H

#include "../options/options.h"
#include "simulate.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_BEST_LAYOUTS = 10, MT_LAYOUT_LINE = 4096 }; // bytes of a line: layouts of many unequal stages are long

/* A layout that was simulated. */
typedef struct mt_layout {
    char line[MT_LAYOUT_LINE]; // its options
    int64_t number;            // in the order of sizes
    mt_simulation simulation;
} mt_layout;

/* The fastest layouts, the first one fastest, and the work of the search. */
typedef struct mt_layouts {
    mt_layout best[MT_BEST_LAYOUTS];
    int64_t count;
    int64_t considered, illegal, too_large, bounded, simulated; // layouts; bounded: their least time is not among the
                                                                // best
    int64_t attempts; // simulations that were begun, of layouts and of models of one and two layers
    int64_t skipped;  // not simulated after the last attempt, although their least time is
    mt_error reason;  // why the last illegal layout was refused
} mt_layouts;

/* Searches layouts for the options `given`, which are parsed and not finished; layout options that the user gave are
 * kept. A layout is legal if mt_options_finish accepts it for given->gpus ranks, and fits if its memory plan does.
 * Ends after `most_attempts` simulations. Errors: no layout is legal or fits. Free the result in each case. */
int mt_layouts_search(mt_layouts *layouts, const mt_run_options *given, const mt_machine *machine,
                      int64_t most_attempts, mt_error *error);
void mt_layouts_free(mt_layouts *layouts);

/* A plan needs no data and no number of steps: sets these in parsed options if the user left them out. */
void mt_options_assume_run(mt_run_options *options);

#ifdef __cplusplus
}
#endif
#endif
