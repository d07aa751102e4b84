/* role_sizes.h: layouts of models beside the one that trains. */
#ifndef MT_ROLE_SIZES_H
#define MT_ROLE_SIZES_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A layout that options name for a role. 0: not given. Then tensor and pipeline sizes are the run's; expert and context
 * sizes are the run's if all given sizes are, otherwise 1. The other ranks are data-parallel. */
typedef struct mt_model_role_sizes {
    int64_t tensor, pipeline, expert, context;
    bool whole;  // weights are not sharded over data-parallel ranks
    bool trains; // data-parallel ranks shard what the run's shard
} mt_model_role_sizes;

/* The layouts of --rollout-*, --teacher-*, --ref-*, --critic-* and --reward-*. Without one of its options, the
 * generator is the actor. */
mt_model_role_sizes mt_model_role_sizes_of_generator(const mt_run_options *options);
mt_model_role_sizes mt_model_role_sizes_of_teacher(const mt_run_options *options);
mt_model_role_sizes mt_model_role_sizes_of_reference(const mt_run_options *options);
mt_model_role_sizes mt_model_role_sizes_of_critic(const mt_run_options *options);
mt_model_role_sizes mt_model_role_sizes_of_reward(const mt_run_options *options);

/* Gives options the layout, if it is another than they have; returns true then. They must be derived again. A model
 * that trains keeps the sharding of its weights, gradients and optimizer. */
bool mt_model_role_sizes_apply(mt_run_options *options, mt_model_role_sizes sizes);

/* True if the options' reference is the base of the trained model's adapters on the trained model's layout. */
bool mt_options_refer_to_base(const mt_run_options *options);

#ifdef __cplusplus
}
#endif
#endif
