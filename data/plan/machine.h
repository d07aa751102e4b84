/* machine.h: a machine's file: the few numbers that the planner needs to predict times. */
#ifndef MT_MACHINE_H
#define MT_MACHINE_H

#include "../options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers of a GPU and of its links, one row each: key of the file and field; the factor from the file's unit to
 * bytes, seconds and operations; least and most in the file's unit; whether it is a whole number; the number that it
 * may not exceed so many times (0, NULL: none); meaning. */
#define MT_MACHINE_NUMBERS(X)                                                                                          \
    X(memory_gib, 0x1p30, 1, 1e4, false, 0, NULL, "memory of the GPU that programs can use")                           \
    X(context_gib, 0x1p30, 0, 100, false, 1, "memory_gib", "its part that CUDA and libraries take beside the model")   \
    X(ranks_context_gib, 0x1p30, 0, 100, false, 1, "memory_gib",                                                       \
      "more of it with several ranks, beside communicators")                                                           \
    X(communicator_gib, 0x1p30, 0, 10, false, 1, "memory_gib", "memory of a communicator of NCCL")                     \
    X(multiprocessors, 1, 1, 1000, true, 0, NULL, "multiprocessors: tiles of a product that run at once")              \
    X(bf16, 1, 0, 1, true, 0, NULL, "1: the GPU has bf16; 0: the rates below are those of fp16")                       \
    X(bf16_peak_tflops, 1e12, 1, 1e5, false, 0, NULL, "data sheet's rate of dense products in bf16, for MFU")          \
    X(bf16_product_tflops, 1e12, 0.1, 1e5, false, 1, "bf16_peak_tflops",                                               \
      "rate of the inner loop of a large product in bf16")                                                             \
    X(fp8_product_tflops, 1e12, 0, 1e5, false, 2, "bf16_peak_tflops", "the same in fp8; 0: the GPU has none")          \
    X(fp8_exact_share, 1, 0.01, 1.5, false, 0, NULL, "rate of fp8 products that sum in fp32, relative to others")      \
    X(fp8_blocks_share, 1, 0, 1.5, false, 0, NULL, "rate of fp8 products with scales for blocks; 0: there are none")   \
    X(product_depth, 1, 0, 1e4, false, 0, NULL, "sum of a product at which its inner loop reaches half of that rate")  \
    X(grouped_share, 1, 0.01, 1.5, false, 0, NULL, "rate of grouped products relative to dense ones")                  \
    X(attention_64_forward_tflops, 1e12, 0.1, 1e5, false, 1, "bf16_peak_tflops",                                       \
      "attention of long sequences, heads of 64 channels")                                                             \
    X(attention_64_backward_tflops, 1e12, 0.1, 1e5, false, 1, "bf16_peak_tflops", "its backward")                      \
    X(attention_128_forward_tflops, 1e12, 0.1, 1e5, false, 1, "bf16_peak_tflops",                                      \
      "attention, heads of 128 channels and more")                                                                     \
    X(attention_128_backward_tflops, 1e12, 0.1, 1e5, false, 1, "bf16_peak_tflops", "its backward")                     \
    X(attention_tokens, 1, 0, 1e5, false, 0, NULL, "length of a sequence at which attention reaches half of its rate") \
    X(copy_gbs, 1e9, 1, 1e5, false, 0, NULL, "bytes read and written by a large copy")                                 \
    X(memory_share, 1, 0.01, 1.5, false, 0, NULL, "rate of kernels limited by memory, relative to the copy")           \
    X(kernel_us, 1e-6, 0, 1000, false, 0, NULL, "start and end of a kernel")                                           \
    X(launch_us, 1e-6, 0, 1000, false, 0, NULL, "time in which the host enqueues an operation")                        \
    X(nvlink_reduce_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "bytes that a GPU sends in an all-reduce within a host")      \
    X(nvlink_gather_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "the same in an all-gather or a reduce-scatter")              \
    X(nvlink_message_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "the same in a message")                                     \
    X(nvlink_exchange_gbs, 1e9, 0.01, 1e4, false, 0, NULL,                                                             \
      "the same in an all-to-all of ranks that are not equally fast")                                                  \
    X(nvlink_copy_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "the same by copy engines, which use no multiprocessor")        \
    X(nvlink_us, 1e-6, 0, 1e4, false, 0, NULL, "latency of one step of a ring within a host")                          \
    X(network_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "bytes that a GPU sends to other hosts")                            \
    X(network_us, 1e-6, 0, 1e4, false, 0, NULL, "latency of one step of a ring between hosts")                         \
    X(collective_slowdown, 1, 0, 5, false, 0, NULL,                                                                    \
      "share of its time that computation loses while a collective runs beside it")                                    \
    X(receive_slowdown, 1, 0, 5, false, 0, NULL, "the same while a posted receive waits for its message")              \
    X(collective_us, 1e-6, 0, 1e4, false, 0, NULL, "start of a collective, its ranks' differences included")           \
    X(host_copy_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "bytes copied between the GPU and its host, in each direction")   \
    X(host_update_gbs, 1e9, 0.01, 1e4, false, 0, NULL, "bytes that AdamW on the host reads and writes, for each GPU")

typedef struct mt_machine {
    char name[80];
#define MT_MACHINE_FIELD(key, ...) double key; // in bytes, seconds, operations per second
    MT_MACHINE_NUMBERS(MT_MACHINE_FIELD)
#undef MT_MACHINE_FIELD
    int64_t gpus_per_host, gpus; // not of the file: GPUs of a host; of the job, which mt_simulate sets
    bool is_limited;             // memory_gib is that of --memory-limit
} mt_machine;

/* Reads a machine's file: `gpu` is its path if it ends in ".json", else a name in data/machines, looked for in the
 * current folder, beside the program, and where it was installed. Every number is an object {"value": ..., "source":
 * ...}. Errors: a file that cannot be read, an unknown or missing number, one out of its range, above the
 * number that limits it, or without a source. */
int mt_machine_read(mt_machine *machine, const char *gpu, mt_error *error);

/* Reads the machine of --gpu, with --gpus-per-host and no more memory than --memory-limit. */
int mt_machine_of_options(mt_machine *machine, const mt_run_options *options, mt_error *error);

/* Bytes that CUDA and libraries take of a rank with so many communicators of NCCL, 0 with one rank. */
double mt_machine_context(const mt_machine *machine, double communicators);

/* The group of a kind that spans most hosts: its ranks, the fewest of them on one host, and its hosts. */
typedef struct mt_span_of_hosts {
    int64_t ranks, per_host, hosts;
} mt_span_of_hosts;
mt_span_of_hosts mt_machine_span(const mt_machine *machine, const mt_group *group);

/* Seconds of a product with M x N results, each a sum of K terms; `written`: bytes of results written, and read where
 * they accumulate. */
double mt_machine_product_seconds(const mt_machine *machine, int64_t M, int64_t N, int64_t K, double written, bool fp8);

/* Seconds of attention with `flops` operations over sequences of `length` tokens, heads of `channels` channels. */
double mt_machine_attention_seconds(const mt_machine *machine, double flops, double length, int64_t channels,
                                    bool backward);

/* Seconds of a kernel that moves `bytes`. */
double mt_machine_memory_seconds(const mt_machine *machine, double bytes);

/* Collectives as a link sees them. */
typedef enum mt_collective { MT_RING_REDUCE, MT_RING_GATHER, MT_EXCHANGE, MT_MESSAGE, MT_COPY_ENGINE } mt_collective;

/* Seconds of a collective in which every rank sends `bytes`. */
double mt_machine_collective_seconds(const mt_machine *machine, mt_collective kind, double bytes,
                                     const mt_span_of_hosts *span);

#ifdef __cplusplus
}
#endif
#endif
