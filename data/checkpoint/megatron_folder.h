/* megatron_folder.h: a checkpoint of Megatron-LM as matrices: of the format torch_dist (.metadata and *.distcp), or of
 * the older torch (mp_rank_XX[_YYY]/model_optim_rng.pt), written by any layout of ranks. */
#ifndef MT_MEGATRON_FOLDER_H
#define MT_MEGATRON_FOLDER_H

#include "../base/safetensors.h"
#include "../models/transfer.h"
#include "torch_pickle.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A rectangle of a matrix, row after row in a file. */
typedef struct mt_megatron_piece {
    mt_tensor_info tensor;
    mt_rectangle part;
} mt_megatron_piece;

/* A matrix of the whole model, or a vector as one column: all its elements are in pieces, each in one. */
typedef struct mt_megatron_matrix {
    const char *name;      // of Megatron-Core without the numbers of the layer and of the expert
    int64_t layer, expert; // -1: none. Layers of multi-token prediction are counted from 0
    mt_param_state state;  // MT_STATE_EXP_AVG, MT_STATE_EXP_AVG_SQ: Adam's moments
    int64_t rows, cols;
    const mt_megatron_piece *pieces;
    int64_t count;
} mt_megatron_matrix;

/* The numbers of the run that wrote it. */
typedef struct mt_megatron_run {
    int64_t iteration, consumed_train_samples, consumed_valid_samples, optimizer_step;
    int64_t skipped_samples;     // that its schedule of learning rates did not count, because fp16 overflowed
    bool has_optimizer;          // in a form that is read here
    const char *other_optimizer; // "torch", or the part of a model whose buckets are not read, or NULL
} mt_megatron_run;

typedef struct mt_megatron mt_megatron;

/* The format of a folder iter_NNNNNNN or release, as Megatron-LM's --ckpt-format names it: "torch_dist" or "torch";
 * NULL if it holds none. */
const char *mt_megatron_format(const char *folder);

/* Opens such a folder: the weights, or the optimizer's state; all its numbers are checked. Errors: a part that is
 * missing, damaged, or of another form. */
int mt_megatron_open(mt_megatron **checkpoint, const char *folder, bool weights, mt_error *error);

/* Opens it for mt_megatron_args and mt_megatron_run alone. */
int mt_megatron_open_common(mt_megatron **checkpoint, const char *folder, mt_error *error);
void mt_megatron_close(mt_megatron *checkpoint);

/* Refuses tensors whose bytes do not have the sums that their archives store: rank `rank` reads its share of all. */
int mt_megatron_verify(const mt_megatron *checkpoint, int64_t rank, int64_t ranks, mt_error *error);

/* The files, in the order of their opening; a piece's tensor.file is the same pointer as its file's path. */
const mt_safetensors_file *mt_megatron_files(const mt_megatron *checkpoint, int64_t *count);

/* The matrices, by name, state, layer and expert. */
int64_t mt_megatron_count(const mt_megatron *checkpoint);

/* Matrix `index` of these. */
const mt_megatron_matrix *mt_megatron_get(const mt_megatron *checkpoint, int64_t index);

/* The matrix of a state, a name and numbers; NULL: none. */
const mt_megatron_matrix *mt_megatron_find(const mt_megatron *checkpoint, mt_param_state state, const char *name,
                                           int64_t layer, int64_t expert);

/* The arguments of the run (an argparse.Namespace), or NULL. */
const mt_pickled *mt_megatron_args(const mt_megatron *checkpoint);

/* The state of the schedules of learning rate and weight decay (a dictionary), or NULL. */
const mt_pickled *mt_megatron_schedule(const mt_megatron *checkpoint);
mt_megatron_run mt_megatron_read_run(const mt_megatron *checkpoint);

#ifdef __cplusplus
}
#endif
#endif
