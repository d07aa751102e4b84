/* simulate.h: the time and the memory of a training step, on a machine that is not there. */
#ifndef MT_SIMULATE_H
#define MT_SIMULATE_H

#include "machine.h"
#include "../report/profile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The parts of a step's time. The first three and the last are computation; the sum of all is the step. */
typedef enum mt_step_part {
    MT_STEP_PART_PRODUCTS,
    MT_STEP_PART_ATTENTION,
    MT_STEP_PART_MEMORY,        // operations limited by memory, without the optimizer's
    MT_STEP_PART_OPTIMIZER,     // the optimizer, and the gradients' norm
    MT_STEP_PART_COMMUNICATION, // exposed: no computation runs beside it
    MT_STEP_PART_IDLE,          // the rank waits for its host, or its device has no work
    MT_STEP_PART_BUBBLE,        // the rank waits for other pipeline stages
    MT_NUM_STEP_PARTS
} mt_step_part;

/* A call of the simulated step. */
typedef struct mt_simulated_call {
    mt_operation operation;
    mt_work work;      // without its group
    const char *group; // of a collective or a message; else NULL
    int ranks;         // of the group
    int64_t shape[3];  // of a product: results' rows and columns, terms of each sum; else 0
    int64_t phase;     // index of its phase; -1: none
    int message;       // of a message of the pipeline: its mt_action_kind; else 0
    int stream;        // 0 is the one that computes; -1: none, for a message of the pipeline, which takes no time here
    bool on_host;      // a stream waits for the host's work
    double from, to;   // seconds from the begin of the step
} mt_simulated_call;

/* The step of one pipeline rank, if its messages arrive at once. */
typedef struct mt_simulated_rank {
    int64_t rank, ranks;             // of the pipeline; ranks with equal stages, which this one stands for
    int64_t last;                    // of these ranks the one that ends its step last
    int64_t bytes[MT_NUM_PLAN_ROWS]; // its memory plan
    double seconds;
    double parts[MT_NUM_STEP_PARTS];
    double exposed[MT_NUM_TRAFFICS];
    double flops;       // of products and attention, recomputation included
    double *forward;    // [chunks] seconds of a micro-batch
    double *backward;   // [chunks] its backward, or only the input's part
    double *weights;    // [chunks] the weights' part of a split backward
    double idle_before; // with messages: idle time up to the last action of its schedule
} mt_simulated_rank;

/* Messages of one kind of a pipeline rank, by the schedule of all ranks: means of one message. */
typedef struct mt_simulated_message {
    double seconds;                               // from its send to the moment when its receiver has it
    double behind[MT_ACTION_BACKWARD_WEIGHT + 1]; // of them beside forwards and backwards of this rank
} mt_simulated_message;

/* A step of a layout. */
typedef struct mt_simulation {
    double seconds;
    int64_t pipeline_ranks, *of;                // of the layout; [pipeline_ranks] the index of each in `pipeline`
    int64_t num_ranks, slowest;                 // distinct pipeline ranks; the one that determines the step
    mt_simulated_rank *pipeline;                // [num_ranks]
    double bubble;                              // idle time of all pipeline ranks divided by their work
    int64_t micro_batches, micro_batches_shown; // of the step; of the step whose calls are kept
    int64_t bytes[MT_NUM_PLAN_ROWS];            // memory plan of the rank that needs most
    double needed;                              // bytes of the GPU, with those of CUDA and libraries
    double model_flops;                         // of the model, as mt_flops counts them
    double mfu, tokens_per_second;              // of all GPUs
} mt_simulation;

/* Errors of mt_simulate, apart from those of options. */
enum { MT_SIMULATION_FAILED = -1, MT_DOES_NOT_FIT = 1 };

/* Refuses finished options whose step cannot be timed, on any layout. Returns 0, or -1 with error. */
int mt_simulate_check(const mt_options *options, mt_error *error);

/* Refuses finished options that the GPU's kernels do not compute, on any layout. Returns 0, or -1 with error. */
int mt_simulate_check_device(const mt_options *options, const mt_machine *machine, mt_error *error);

/* Simulates a training step of finished options on `ranks` GPUs of a machine. Every distinct pipeline rank runs
 * mt_train_step on a backend that computes nothing: its operations advance the clocks of streams by the times that the
 * machine's numbers give. The ranks' times are joined by their schedule (mt_timeline). Returns 0; MT_DOES_NOT_FIT if a
 * GPU has too little memory (bytes and needed are set); or MT_SIMULATION_FAILED with error, for options that are not
 * timed, or a model that cannot be created. Free it in each case. */
int mt_simulate(mt_simulation *simulation, const mt_options *options, int64_t ranks, const mt_machine *machine,
                mt_error *error);
void mt_simulation_free(mt_simulation *simulation);

/* Simulates the step of pipeline rank rank->rank again, after mt_simulate with the same arguments: its calls are then
 * those of mt_simulated_calls. Sets the rank's parts, whose sum is the step of the simulation, and messages[kind] for
 * every mt_action_kind of a send or a receive. Returns 0, or -1 with error. */
int mt_simulate_rank(mt_simulated_rank *rank, mt_simulated_message messages[MT_ACTION_RECV_BACKWARD + 1],
                     const mt_simulation *simulation, const mt_options *options, int64_t ranks,
                     const mt_machine *machine, mt_error *error);

/* The calls and phases of the step that was simulated last, after mt_simulate of pipeline rank 0; valid until the next
 * simulation. */
const mt_simulated_call *mt_simulated_calls(int64_t *count);
const mt_profile_phase *mt_simulated_phases(int64_t *count);

/* The name of an operation: "linear_forward". */
const char *mt_operation_name(mt_operation operation);

#ifdef __cplusplus
}
#endif
#endif
