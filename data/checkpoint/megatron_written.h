/* megatron_written.h: the arguments of Megatron-LM that a written torch_dist folder has. */
#ifndef MT_MEGATRON_WRITTEN_H
#define MT_MEGATRON_WRITTEN_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* When an argument of Megatron-LM has the value of the option. */
typedef enum mt_arg_when {
    MT_ARG_ALWAYS,
    MT_ARG_UNLESS_0, // else None
    MT_ARG_EXPERTS,  // with experts
    MT_ARG_LATENT,   // with latent attention
    MT_ARG_LINEAR,   // with layers of linear attention
    MT_ARG_HYBRID,   // with layers that have one half
} mt_arg_when;

typedef struct mt_written_arg {
    const char *key;
    size_t offset; // of the option's field in mt_run_options
    mt_arg_when when;
} mt_written_arg;

/* The arguments that have an option's value, ended by a key of NULL. */
extern const mt_written_arg mt_written_args[];

/* True if an argument holds the option of this field as it is. */
bool mt_dist_holds(size_t offset);

#ifdef __cplusplus
}
#endif
#endif
