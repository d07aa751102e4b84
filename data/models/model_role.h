/* model_role.h: models that take turns on the ranks of a job, such as an actor and its reference. A role is a model,
 * its layout of the ranks, and the parts of it that rest on the host while others work. */
#ifndef MT_MODEL_ROLE_H
#define MT_MODEL_ROLE_H

#include "../datasets/image_chat.h"
#include "../options/role_sizes.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A role stays at its address, since `grid` may point into it. A struct of zeros is a role without a model. */
typedef struct mt_model_role {
    const char *name;       // for reports
    mt_run_options options; // the run's with its own layout, folder and head; shares their strings
    const mt_grid *grid;    // the run's, or own_grid
    mt_grid own_grid;       // of another layout
    const mt_ops *ops;      // the run's, or those of own_grid
    mt_model *model;        // NULL: there is none
    mt_batch batch;         // with own_grid: scratch
    unsigned rests, awake;  // parts (bits 1 << mt_part) that rest while others work; parts in use
    bool is_lent;           // the model is another owner's
    /* NULL, or this role is the base of that one's adapters */
    struct mt_model_role *adapted;
} mt_model_role;

/* A role with the options and the layout of a run, whose grid is given. */
void mt_model_role_begin(mt_model_role *role, const char *name, const mt_run_options *options, const mt_grid *grid,
                         const mt_ops *ops);

/* The trained model of a run as a role, all of it awake. The caller destroys the model. */
void mt_model_role_lend(mt_model_role *role, const char *name, const mt_run_options *options, mt_model *trained);

/* The base of a role's adapters as another role: the same model, with its adapters switched off while it scores.
 * `adapted` says which parts rest. */
void mt_model_role_lend_base(mt_model_role *role, const char *name, mt_model_role *adapted);

/* Gives the role the layout: derives its options and makes its grid, if it is another than the run's. The batch of a
 * step stays the run's. `option` names the layout in errors. Every rank calls it. */
int mt_model_role_place(mt_model_role *role, mt_model_role_sizes sizes, const char *option, mt_error *error);

/* The same for ranks on which the run has no model: also if the layout is the run's. */
int mt_model_role_place_apart(mt_model_role *role, mt_model_role_sizes sizes, const char *option, mt_error *error);

/* Makes the grid for role->options of another layout, which are derived already. Every rank calls it. */
int mt_model_role_build_grid(mt_model_role *role, mt_error *error);

/* The plan for scoring the micro-batches of a run, whose plan and context size are given. */
mt_model_plan mt_model_role_plan(const mt_model_role *role, const mt_model_plan *of_run, int64_t context_size);

/* An error unless the role's model, of a folder (NULL: none), takes the pictures that the reader of a run reads: it has
 * a tower, and the same patches and image token. */
int mt_model_role_check_pictures(const mt_model_role *role, const char *folder, const mt_image_reader *reader,
                                 mt_error *error);

/* Creates the model, and for a role apart its batch. Every rank calls it. */
int mt_model_role_create(mt_model_role *role, const mt_model_plan *plan, mt_error *error);

/* Frees the role, and its model and grid unless they are the run's. Every rank calls it. */
void mt_model_role_close(mt_model_role *role);

/* True if the role has another layout than the run. */
bool mt_model_role_is_apart(const mt_model_role *role);

/* The parts that work next are woken (bits 1 << mt_part), the others rest if the options say so: the cache with the
 * parameters. Without --param-offload and its kin nothing happens. Between two steps; every rank calls it. */
enum {
    MT_USE_NOTHING = 0,
    MT_USE_SCORING = 1 << MT_PART_PARAMS,
    MT_USE_GENERATION = MT_USE_SCORING | 1 << MT_PART_CACHE,
    MT_USE_TRAINING = MT_USE_SCORING | 1 << MT_PART_GRADS | 1 << MT_PART_OPTIMIZER
};
int mt_model_role_use(mt_model_role *role, unsigned parts, mt_error *error);

/* Fills `batch` with micro-batch `slot` of data-parallel rank `rank` of the run's grid. Every rank can. */
typedef int mt_model_role_source(void *context, int64_t slot, int64_t rank, mt_batch *batch, mt_error *error);

/* Micro-batches of a run to score: `slots` of each of `ranks` data-parallel ranks. `batch` is scratch of the run. */
typedef struct mt_model_role_scoring {
    int64_t slots, ranks;
    mt_model_role_source *source;
    void *context;
    mt_batch *batch;
    mt_score_sink *sink;
    void *sink_context;
} mt_model_role_scoring;

/* Scores them by mt_score_tokens. Their numbers are slot * ranks + rank, and replica r of the role's n has the numbers
 * r, r + n, r + 2 n and so on: on its ranks with the loss `sink` receives them. Wakes the parameters, and lets them
 * rest again. */
int mt_model_role_score(mt_model_role *role, const mt_model_role_scoring *scoring, mt_error *error);

/* The world ranks [data-parallel ranks] that send the results of their replicas: the first with the loss. To free.
 * Every rank calls it. */
int *mt_grid_owners(const mt_grid *grid);

#ifdef __cplusplus
}
#endif
#endif
