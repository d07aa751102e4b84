/* balance.h: times of a model's layers on a machine, and stages of a pipeline that take equal times. */
#ifndef MT_BALANCE_H
#define MT_BALANCE_H

#include "../options/options.h"
#include "machine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cost of a layer depends on five properties: experts, a sliding window, linear attention, the halves that it has,
 * and whether it attends to keys of others: of the layer before, or of an encoder. */
enum { MT_LAYER_COSTS = 48 };
int mt_layer_cost(const mt_options *options, int64_t layer);

/* Seconds of a micro-batch in the parts of a model; [MT_LAYER_COSTS]: of a layer, 0 where the model has none of these.
 * least: the shortest of the simulated micro-batches, [forward, backward]. */
typedef struct mt_layer_seconds {
    double layer[MT_LAYER_COSTS], embedding, head; // means; head: all the rest
    double least[MT_LAYER_COSTS][2], least_rest;   // rest: all but the layers
    double least_head;                             // its matrix products, which are the head's
    double states[MT_LAYER_COSTS];                 // bytes of a layer: weights and gradients
    double saved[MT_LAYER_COSTS];                  // bytes of a layer: activations of a micro-batch
    double activations;                            // bytes of a model of one layer, one that costs as `single`
    int single;
} mt_layer_seconds;

/* From simulated models of one and two layers; `o`: finished for a pipeline of one rank, on `ranks` GPUs. Of two
 * micro-batches the shorter one neither gathers parameters once for all nor reduces gradients. If half of the
 * activations of one layer exceed the machine's memory, only they are counted. */
int mt_layer_seconds_of(mt_layer_seconds *seconds, const mt_options *o, int64_t ranks, int64_t micro_batches,
                        const mt_machine *machine, mt_error *error);

/* --pipeline-model-parallel-layout of pp ranks of vp stages that take equal times; to free. */
char *mt_balanced_letters(const mt_options *o, int64_t pp, int64_t vp, const mt_layer_seconds *seconds);

/* mt_options_finish of ./train, which also balances stages: --pipeline-model-parallel-layout auto, or auto*N for N
 * stages a rank. The ranks, or their stages where that is faster, take equal times on a GPU of options->gpu, embedding
 * and head included, as far as whole layers allow. Then single layers move to other stages as long as a simulated step
 * gets shorter and fits the GPU, or, without --gpu, needs no more memory. An encoder-decoder, which no GPU runs so far,
 * has stages of equal numbers of multiplications. */
int mt_train_options_finish(mt_run_options *options, int64_t world_size, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
