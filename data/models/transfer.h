/* transfer.h: weights from model to model, in memory: resharding without a file. A role, such as the actor that trains
 * or the one that generates, is a model on a layout of its own over the same ranks. */
#ifndef MT_TRANSFER_H
#define MT_TRANSFER_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- parts of parameters on layouts, for checkpoints and transfers */

/* Rows [row, row + rows) and columns [col, col + cols) of a matrix. */
typedef struct mt_rectangle {
    int64_t row, rows, col, cols;
} mt_rectangle;

/* The part of both; without rows or columns: none. */
mt_rectangle mt_rectangle_intersect(mt_rectangle a, mt_rectangle b);

/* This rank's part of the whole parameter, without the vocabulary's padding. */
mt_rectangle mt_param_rectangle(const mt_param *param);

/* Elements [begin, end) of a row-major matrix of `width` columns, as at most three rectangles in their order: the end
 * of a row, whole rows, the start of a row. Returns the number of rectangles. */
int mt_rectangles_of_run(mt_rectangle out[3], int64_t begin, int64_t end, int64_t width);

/* ---- transfers */

/* The weights of `to` become those of `from`, bit for bit as by a checkpoint: models of one shape on different layouts
 * of the same ranks. Weights of another type, and master weights, come from the master weights of `from`, or from its
 * weights if it has none. Moments stay as they were. Modules of multi-token prediction that `to` does not have are left
 * out; any other difference is an error, the same on every rank. Models with adapters both have them; adapters_only
 * leaves out the base, which training does not change after a first transfer.
 *
 * The plan is made once for a pair of models and used again. Each element reaches a rank once, from one of the ranks
 * that have it; elements that the rank has itself stay on it. Device memory for messages: at most scratch_bytes (0:
 * MT_TRANSFER_BYTES), or a row of a parameter for each message if that is more. Every rank calls the functions. */
typedef struct mt_transfer mt_transfer;
enum { MT_TRANSFER_BYTES = 256 << 20 };
int mt_transfer_open(mt_transfer **transfer, mt_model *to, mt_model *from, bool adapters_only, int64_t scratch_bytes,
                     mt_error *error);

/* The same between models of different ranks of `ranks`, the groups of mt_grid_split: each rank has one of both models,
 * and NULL for the other one. */
int mt_transfer_open_between(mt_transfer **transfer, mt_model *to, mt_model *from, const mt_group *ranks,
                             mt_error *error);
void mt_transfer_close(mt_transfer *transfer);

/* Enqueues a transfer on `to`'s stream; `from`'s stream waits for it. Parts of either model may rest: their copies on
 * the host are read and written. Not between mt_train_step and mt_train_finish of `from`. */
void mt_transfer_run(mt_transfer *transfer);

/* Bytes of weights in each run: of this rank to and from other ranks, and within the rank. */
typedef struct mt_transfer_counts {
    int64_t sent, received, kept;
    int64_t rounds;  // exchanges among all ranks
    int64_t scratch; // bytes of device memory
} mt_transfer_counts;
mt_transfer_counts mt_transfer_get_counts(const mt_transfer *transfer);

#ifdef __cplusplus
}
#endif
#endif
