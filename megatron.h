/* megatron.h: the public interface of megatron.c.
 *
 * Notation, used in every shape comment:
 *   T  tokens of one micro-batch on this rank     C  hidden size
 *   H  query heads                                G  query groups (key and value heads)
 *   D  channels of one head                       F  feed-forward size
 *   V  padded vocabulary                          L  layers
 * An axis that ranks share is divided by their group: w[N/tp, K] is N/tp of w's N rows. y[T, C]+tp is a sum: each rank
 * of the group has one summand. Groups are tp, cp, dp, pp and ep; notes/steps/README.md derives all messages from this.
 * A shape such as [T, C] is row-major; an operand whose rows are further apart than they are wide has a stride, counted
 * in elements. Sizes and offsets are int64_t. Functions that can fail on the user's input return 0, or -1 with one line
 * in mt_error.
 *
 * megatron.c compiles without any of these macros, links with -lm alone, and then computes on one CPU thread of one
 * rank. Each of them adds a library; `make` defines the macros of the libraries that it finds. This header does not
 * depend on them.
 *
 *   MT_HAVE_MPI       several ranks, started by mpirun, and their collectives on CPUs. Link MPI (mpicc --showme:link).
 *   MT_HAVE_BLAS      large matrix products on the CPU by cblas_sgemm (plain C otherwise). Link -lopenblas.
 *   MT_HAVE_OPENMP    threads within a rank. Compile and link with -fopenmp.
 *   MT_HAVE_DNNL      larger products by oneDNN's dnnl_sgemm; needs the two above. Link -ldnnl. A handler of signals
 *                     then needs a stack of its own (sigaltstack and SA_ONSTACK): oneDNN 2.6 writes below the stack
 *                     pointer, where a handler's frame would be.
 *   MT_HAVE_CUDA      mt_cuda_open and --device cuda. Link the objects of cuda/, -lcublasLt -lcublas -lcudart -lstdc++.
 *                     The next three are for nvcc and cuda/ as well:
 *   MT_HAVE_NCCL      several GPUs. Link -lnccl.
 *   MT_HAVE_CUDNN     --attention-backend cudnn. Link -lcudnn (9.10 or later).
 *   MT_HAVE_SM90A     kernels with wgmma and TMA. nvcc compiles for sm_90a.
 *
 * and in data/, whose files need -D_GNU_SOURCE and jansson:
 *   MT_HAVE_YAML      --config FILE.yaml (data/options/yaml.c). Link -lyaml.
 *   MT_HAVE_PCRE2     tokenizers that split text by a pattern (data/tokens/tokenizer_encode.c). Link -lpcre2-8.
 *   MT_HAVE_UTF8PROC  tokenizers with a Unicode normal form (data/tokens/tokenizer_encode.c). Link -lutf8proc.
 */
#ifndef MEGATRON_H
#define MEGATRON_H

/* The version of this header; mt_version() is that of the library. The major number changes with the ABI. "-dev":
 * before that version, so the ABI may still change. */
#define MT_VERSION_MAJOR 2
#define MT_VERSION_MINOR 0
#define MT_VERSION_PATCH 0
#define MT_VERSION       "2.0.0"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ==== §1 checks, arenas, random numbers =========================================================================== */

/* The version of the library that is linked: its MT_VERSION. */
const char *mt_version(void);

/* For the user: what went wrong, where, and what to do; one line, or a line per reason where many options are refused.
 * Parsers fill it and return -1; they never exit. */
typedef struct mt_error {
    char text[4096];
} mt_error;

/* Fills `error` as printf does and returns -1, so that a parser can `return mt_error_set(error, ...)`. */
int mt_error_set(mt_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Replaces control characters by '?': a name from a file must not break a line or move the cursor. keeps_lines: line
 * breaks stay. */
void mt_text_clean(char *text, bool keeps_lines);

/* Prints "error: ..." on standard error and ends the job (MPI_Abort when several ranks run). For drivers. */
void mt_die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Ends all ranks of the job if MPI has started; otherwise returns. */
void mt_job_abort(void);

/* This process's rank from the launcher's environment, 0 without a launcher. For messages before MPI starts. */
int mt_launch_rank(void);

/* True if mpirun, srun or another launcher of MPI started this process. */
bool mt_launched_by_mpi(void);

/* A broken invariant of this program itself (never the user's input): names file and line, then ends the job. */
#define MT_CHECK(condition)                                                                                            \
    ((condition) ? (void)0 : mt_die("internal check failed at %s:%d: %s", __FILE__, __LINE__, #condition))

/* malloc, calloc, realloc and strdup that end the program with a message if memory runs out; never NULL. */
void *mt_malloc(int64_t bytes);
void *mt_calloc(int64_t bytes);
void *mt_realloc(void *memory, int64_t bytes);
char *mt_strdup(const char *text);

/* The smaller and the greater of two. */
static inline int64_t mt_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t mt_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* x cut to [low, high]. */
static inline int64_t mt_clamp(int64_t x, int64_t low, int64_t high) {
    return mt_min(mt_max(x, low), high);
}

/* The smaller and the larger of two numbers, and x cut to [low, high]. NaN if an argument is NaN (mt_bounded: if x is
 * not finite), so that it reaches the check of the step; fmin, fmax and a comparison drop it. */
static inline double mt_minimum(double a, double b) {
    return a < b || a != a ? a : b;
}

static inline double mt_maximum(double a, double b) {
    return a > b || a != a ? a : b;
}

/* x; NaN if it is infinite: what overflowed must not be cut to a number either. */
static inline double mt_finite(double x) {
    return isfinite(x) ? x : NAN;
}

static inline double mt_bounded(double x, double low, double high) {
    return mt_minimum(mt_maximum(mt_finite(x), low), high);
}

/* a / b rounded up, for a >= 0 and b > 0. */
static inline int64_t mt_divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Seconds of a monotonic clock. */
double mt_time(void);

/* Element types, named as safetensors names them. Arithmetic operands are MT_F32, MT_BF16 or MT_F16. */
typedef enum mt_dtype {
    MT_F32,
    MT_BF16,
    MT_F16,
    MT_F64,
    MT_I8,
    MT_U8,
    MT_I16,
    MT_U16,
    MT_I32,
    MT_U32,
    MT_I64,
    MT_U64,
    MT_BOOL,
    MT_F8_E4M3,
    MT_F8_E5M2,
    MT_F16_SCALED, // a state of the optimizer in fp16, times its parameter's scale: see mt_state_has_scale
    MT_NUM_DTYPES
} mt_dtype;

/* Bytes of one element. */
int64_t mt_dtype_size(mt_dtype dtype);

/* The safetensors name: "F32", "BF16", ... */
const char *mt_dtype_name(mt_dtype dtype);

/* bf16 and fp16 to float and back, rounding to nearest even. */
float mt_bf16_to_f32(uint16_t bits);
uint16_t mt_f32_to_bf16(float value);
float mt_f16_to_f32(uint16_t bits);
uint16_t mt_f32_to_f16(float value);
/* The same for either type; is_half: it is one of them. */
bool mt_dtype_is_half(mt_dtype dtype);
float mt_half_to_f32(uint16_t bits, mt_dtype dtype);
uint16_t mt_f32_to_half(float value, mt_dtype dtype);

/* fp8 in either format; rounds to nearest even, saturates beyond the largest finite number, and keeps NaN. */
float mt_f8_to_f32(uint8_t bits, mt_dtype format);
uint8_t mt_f32_to_f8(float value, mt_dtype format);
/* The largest finite number: 448 in e4m3, 57344 in e5m2. */
float mt_f8_largest(mt_dtype format);

/* A bump allocator. With base == NULL it only counts bytes: the code that lays out buffers also plans their memory. */
typedef struct mt_arena {
    char *base;
    int64_t used;
    int64_t capacity;
} mt_arena;

/* Returns `bytes` of the arena, aligned to 256; NULL if it only counts. Ends the program past capacity. */
void *mt_arena_alloc(mt_arena *arena, int64_t bytes);

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): four words, a pure
 * function of key and counter, so that the number for a coordinate is the same on every layout. */
void mt_philox(uint32_t out[4], uint64_t key, uint64_t counter_low, uint64_t counter_high);

/* A key from the run's seed, a purpose and an index (a layer, a parameter). */
uint64_t mt_random_key(uint64_t seed, uint64_t purpose, uint64_t index);

/* ==== §2 options ================================================================================================== */

/* A list of words: --data-path a b c. */
typedef struct mt_strings {
    int64_t count;
    char **items;
} mt_strings;

/* A list of a few numbers: --rampup-batch-size 32 32 100000. */
enum { MT_MAX_INTS = 3 };
typedef struct mt_ints {
    int64_t count, items[MT_MAX_INTS];
} mt_ints;

/* As many real numbers: --moe-aux-loss-coeff 0.01 0.001. */
typedef struct mt_reals {
    double items[MT_MAX_INTS]; // first: its address is that of the first number
    int64_t count;
} mt_reals;

/* Choices: an enum's values stand in the order of the choices in the option's row (data/options/option_table.c). */
typedef enum mt_normalization { MT_LAYERNORM, MT_RMSNORM } mt_normalization;
typedef enum mt_position_embedding {
    MT_POSITION_LEARNED_ABSOLUTE,
    MT_POSITION_ROPE,
    MT_POSITION_NONE,
    MT_POSITION_RELATIVE // of an encoder-decoder: see mt_relative_bias
} mt_position_embedding;
/* Places of norms in a layer, which has a set of them (mt_layer_kind.norms), bits 1 << mt_norm_place. */
typedef enum mt_norm_place {
    MT_NORM_MIXER_IN,         // the residual stream, as the mixer reads it
    MT_NORM_MIXER_OUT,        // the mixer's output, before it is added to the stream
    MT_NORM_FEED_FORWARD_IN,  // the same of the feed-forward
    MT_NORM_FEED_FORWARD_OUT, // likewise
    MT_NORM_HEADS,            // each head of queries and of keys
    MT_NORM_ALL_HEADS,        // all heads of queries, and all of keys
    MT_NUM_NORM_PLACES
} mt_norm_place;
enum {
    MT_NORMS_IN = 1 << MT_NORM_MIXER_IN | 1 << MT_NORM_FEED_FORWARD_IN,
    MT_NORMS_OUT = 1 << MT_NORM_MIXER_OUT | 1 << MT_NORM_FEED_FORWARD_OUT
};
/* Placements of norms on the residual stream, one row each: the choice of --norm-placement, and the set. */
#define MT_NORM_PLACEMENTS(X)                                                                                          \
    X(BEFORE, "before", MT_NORMS_IN)            /* x + block(norm(x)) */                                               \
    X(AFTER, "after", MT_NORMS_OUT)             /* x + norm(block(x)), as in OLMo 2 and 3 */                           \
    X(BOTH, "both", MT_NORMS_IN | MT_NORMS_OUT) /* x + norm(block(norm(x))), as in Gemma 3 */
#define MT_NORM_PLACEMENT_NAME(name, ...) MT_NORM_##name,
typedef enum mt_norm_placement { MT_NORM_PLACEMENTS(MT_NORM_PLACEMENT_NAME) MT_NUM_NORM_PLACEMENTS } mt_norm_placement;
typedef enum mt_rope_scaling {
    MT_ROPE_SCALING_NONE,
    MT_ROPE_SCALING_LINEAR,
    MT_ROPE_SCALING_LLAMA3,
    MT_ROPE_SCALING_YARN
} mt_rope_scaling;
/* The denominator of attention's softmax: the sum of exponentials; that plus 1 (Miller, "Attention is off by one"); or
 * plus exp(sink) of a parameter of each head (OpenAI, gpt-oss; Xiao et al., "attention sinks"). */
typedef enum mt_softmax_type { MT_SOFTMAX_VANILLA, MT_SOFTMAX_OFF_BY_ONE, MT_SOFTMAX_LEARNABLE } mt_softmax_type;
typedef enum mt_score_function { MT_SCORE_SOFTMAX, MT_SCORE_SIGMOID, MT_SCORE_SQRT_SOFTPLUS } mt_score_function;
typedef enum mt_load_balancing {
    MT_BALANCING_NONE,
    MT_BALANCING_AUX_LOSS,        // over a micro-batch
    MT_BALANCING_SEQ_AUX_LOSS,    // over each sequence
    MT_BALANCING_GLOBAL_AUX_LOSS, // over the micro-batches of the global batch so far
    MT_BALANCING_SINKHORN,        // no loss: the choice of experts is balanced
    MT_BALANCING_QUANTILE         // no loss: a bias of each expert's logits from quantiles of the last step
} mt_load_balancing;
enum { MT_NUM_AUX_LOSSES = 3 }; // from MT_BALANCING_AUX_LOSS on
typedef enum mt_token_dispatcher {
    MT_DISPATCHER_ALLTOALL,
    MT_DISPATCHER_ALLGATHER,
    MT_DISPATCHER_FLEX
} mt_token_dispatcher;
typedef enum mt_token_drop_policy { MT_DROP_PROBS, MT_DROP_POSITION } mt_token_drop_policy;
typedef enum mt_lr_decay_style {
    MT_LR_CONSTANT,
    MT_LR_LINEAR,
    MT_LR_COSINE,
    MT_LR_INVERSE_SQUARE_ROOT,
    MT_LR_WSD
} mt_lr_decay_style;
typedef enum mt_wsd_decay_style {
    MT_WSD_EXPONENTIAL,
    MT_WSD_LINEAR,
    MT_WSD_COSINE,
    MT_WSD_MINUS_SQRT
} mt_wsd_decay_style;
typedef enum mt_weight_decay_style {
    MT_WEIGHT_DECAY_CONSTANT,
    MT_WEIGHT_DECAY_LINEAR,
    MT_WEIGHT_DECAY_COSINE
} mt_weight_decay_style;
typedef enum mt_exit_signal { MT_EXIT_SIGTERM, MT_EXIT_SIGINT, MT_EXIT_SIGUSR1, MT_EXIT_SIGUSR2 } mt_exit_signal;
typedef enum mt_bad_step_policy { MT_BAD_STEP_STOP, MT_BAD_STEP_SKIP, MT_BAD_STEP_REWIND } mt_bad_step_policy;
typedef enum mt_rerun_mode { MT_RERUN_DISABLED, MT_RERUN_VALIDATE_RESULTS } mt_rerun_mode;
/* Faults for tests of reruns: a wrong result that a rerun does not repeat, one that it does, a good one that is
 * rejected. */
typedef enum mt_injected_error {
    MT_INJECT_TRANSIENT,
    MT_INJECT_PERSISTENT,
    MT_INJECT_CORRECT_RESULT
} mt_injected_error;
typedef enum mt_device { MT_DEVICE_AUTO, MT_DEVICE_CPU, MT_DEVICE_CUDA } mt_device;
/* The implementation of attention (--attention-backend). AUTO: the fastest one for the call. FLASH: the fused kernels
 * of cuda/. CUDNN: cuDNN's for a batch of equally long sequences, else FLASH. UNFUSED: the definition. The CPU has one.
 */
typedef enum { MT_GRAPHS_NONE, MT_GRAPHS_LOCAL } mt_graph_impl;
typedef enum { MT_ATTENTION_AUTO, MT_ATTENTION_FLASH, MT_ATTENTION_CUDNN, MT_ATTENTION_UNFUSED } mt_attention_backend;
typedef enum mt_cp_comm_type {
    MT_CP_P2P,        // keys and values pass around a ring while attention to the previous ones runs
    MT_CP_ALL_GATHER, // every rank gets all keys
    MT_CP_A2A,        // all-to-all: ranks exchange tokens for heads
    MT_CP_A2A_P2P     // a2a within groups of neighbours, a ring across them
} mt_cp_comm_type;
/* Optimizers, one row each: its operation, OPERATION_step; what a step updates, ELEMENTS or whole MATRICES; its name as
 * --optimizer; the names of an element's states in checkpoints, where NULL is none. */
#define MT_ELEMENT_OPTIMIZERS(X)                                                                                       \
    X(ADAMW, adamw, ELEMENTS, "adam", "exp_avg", "exp_avg_sq")                                                         \
    X(SGD, sgd, ELEMENTS, "sgd", "momentum_buffer", NULL)                                                              \
    X(LION, lion, ELEMENTS, "lion", "exp_avg", NULL)
#define MT_OPTIMIZERS(X)                                                                                               \
    MT_ELEMENT_OPTIMIZERS(X)                                                                                           \
    X(MUON, muon, MATRICES, "muon", "momentum_buffer", NULL)
#define MT_OPTIMIZER_NAME(name, ...)                   MT_OPTIMIZER_##name,
#define MT_OPTIMIZER_TEXT(name, step, unit, text, ...) text "|"
#define MT_OPTIMIZER_NAMES                             MT_ELEMENT_OPTIMIZERS(MT_OPTIMIZER_TEXT) "muon"
typedef enum mt_optimizer { MT_OPTIMIZERS(MT_OPTIMIZER_NAME) MT_NUM_OPTIMIZERS } mt_optimizer;

/* Muon: factor of the update of a matrix of `out` rows and `in` columns: the root of max(out, in); of out / in; of
 * max(1, out / in). */
typedef enum mt_muon_scale { MT_MUON_SPECTRAL, MT_MUON_UNIT_RMS_NORM, MT_MUON_SHAPE_SCALING } mt_muon_scale;
/* Operands of its products: bf16, fp32 with products in TF32 (on a GPU), or fp32. */
typedef enum mt_muon_precision { MT_MUON_MEDIUM, MT_MUON_HIGH, MT_MUON_HIGHEST } mt_muon_precision;
/* Coefficients of its polynomials; mt_muon_coefficients has the numbers. */
typedef enum mt_muon_type {
    MT_MUON_QUINTIC,
    MT_MUON_SIMPLE,
    MT_MUON_POLAR_EXPRESS,
    MT_MUON_CANS,
    MT_MUON_AOL,
    MT_MUON_DEEPSEEKV4
} mt_muon_type;
/* A matrix that tensor-parallel ranks share: each orthogonalises its part as a matrix of its own; each gathers the
 * whole and computes everything; or each computes its part from sums over all. */
typedef enum mt_muon_tp_mode { MT_MUON_BLOCKWISE, MT_MUON_DUPLICATED, MT_MUON_DISTRIBUTED } mt_muon_tp_mode;
typedef enum mt_muon_scalar { MT_MUON_ADAM, MT_MUON_LION } mt_muon_scalar;

typedef struct mt_muon_options {
    double momentum, extra_scale_factor;
    bool split_qkv, nesterov;
    mt_muon_scale scale_mode;
    mt_muon_precision fp32_matmul_prec;
    mt_muon_type coefficient_type;
    int64_t num_ns_steps;
    mt_muon_tp_mode tp_mode;
    mt_muon_scalar scalar_optimizer; // of all that is no matrix of a layer
} mt_muon_options;

/* Types of gradients and moments between steps. */
typedef enum mt_optimizer_dtype {
    MT_OPTIMIZER_FP32,
    MT_OPTIMIZER_BF16,
    MT_OPTIMIZER_FP16, // moments: with a scale, like fp8
    MT_OPTIMIZER_FP8
} mt_optimizer_dtype;
/* Type of master weights. */
typedef enum mt_main_params_dtype { MT_MAIN_PARAMS_FP32, MT_MAIN_PARAMS_FP16 } mt_main_params_dtype;
/* Activation recomputation: values that the backward needs are computed again instead of kept (Chen et al., "Training
 * deep nets with sublinear memory cost"). FULL: of every unit of layers only the input is kept. SELECTIVE: the values
 * of some modules are not kept (Korthikanti et al., "Reducing activation recomputation in large transformer models").
 */
typedef enum mt_recompute_granularity {
    MT_RECOMPUTE_NONE,
    MT_RECOMPUTE_FULL,
    MT_RECOMPUTE_SELECTIVE
} mt_recompute_granularity;
typedef enum mt_recompute_method {
    MT_RECOMPUTE_DEFAULT,
    MT_RECOMPUTE_UNIFORM, // units of recompute_num_layers layers
    MT_RECOMPUTE_BLOCK    // the first recompute_num_layers layers of a stage, each a unit; the others are kept
} mt_recompute_method;
/* Modules whose input is offloaded: it waits in host memory from the forward to the backward. A set of bits. */
enum {
    MT_OFFLOAD_ATTN_NORM = 1,   // the norm before attention: the layer's input
    MT_OFFLOAD_QKV_LINEAR = 2,  // its output; of latent attention also the latents
    MT_OFFLOAD_CORE_ATTN = 4,   // queries, keys and values
    MT_OFFLOAD_ATTN_PROJ = 8,   // attention's output
    MT_OFFLOAD_MLP_NORM = 16,   // the residual stream between attention and MLP
    MT_OFFLOAD_EXPERT_FC1 = 32, // the rows of the experts, if their number does not depend on the data
    MT_OFFLOAD_MOE_ACT = 64,    // the same, before the activation
    MT_OFFLOAD_MLP = 128        // of layers without experts: the MLP's input, and its values around the activation
};
/* Modules of selective recomputation, one row each: the name and the choice of --recompute-modules. The values of a
 * module are the slots (mt_slot) that name it. */
#define MT_RECOMPUTE_MODULES(X)                                                                                        \
    X(CORE_ATTN, "core_attn")     /* nothing: attention never keeps its probabilities */                               \
    X(MOE_ACT, "moe_act")         /* the activation of the experts */                                                  \
    X(LAYERNORM, "layernorm")     /* the norms before attention and MLP */                                             \
    X(MLA_UP_PROJ, "mla_up_proj") /* queries, keys and values of latent attention, from the latents */                 \
    X(MLP, "mlp")                 /* MLPs of layers without experts */                                                 \
    X(MOE, "moe")                 /* router, experts and shared expert */                                              \
    X(SHARED_EXPERTS, "shared_experts")
/* A set of bits, MT_MODULE_<name>. */
#define MT_MODULE_NUMBER(name, choice) MT_MODULE_NUMBER_##name,
#define MT_MODULE_BIT(name, choice)    MT_MODULE_##name = 1 << MT_MODULE_NUMBER_##name,
enum { MT_RECOMPUTE_MODULES(MT_MODULE_NUMBER) };
enum { MT_RECOMPUTE_MODULES(MT_MODULE_BIT) };
/* Products of layers in fp8. HYBRID: e4m3 for activations and weights, e5m2 for gradients. */
typedef enum mt_fp8_format { MT_FP8_OFF, MT_FP8_E4M3, MT_FP8_HYBRID } mt_fp8_format;
typedef enum mt_fp8_recipe {
    MT_FP8_DELAYED,    // a scale per tensor, from the largest values of earlier steps
    MT_FP8_TENSORWISE, // a scale per tensor, from its own largest value
    MT_FP8_BLOCKWISE,  // 1 x 128 of activations and gradients, 128 x 128 of weights (DeepSeek-AI, "DeepSeek-V3")
    MT_FP8_MXFP8       // 1 x 32
} mt_fp8_recipe;
typedef enum mt_fp8_amax_algo { MT_AMAX_MOST_RECENT, MT_AMAX_MAX } mt_fp8_amax_algo;
/* The frozen matrices of layers below adapters: in the model's type, or in e4m3 with a scale for 128 x 128. */
typedef enum mt_base_dtype { MT_BASE_AS_MODEL, MT_BASE_FP8 } mt_base_dtype;
typedef enum mt_schedule_kind {
    MT_SCHEDULE_1F1B,
    MT_SCHEDULE_INTERLEAVED,
    MT_SCHEDULE_ZB_H1,
    MT_SCHEDULE_FORWARD_ONLY // not an option: scoring and generation
} mt_schedule_kind;
/* The state that data-parallel ranks shard: none; the optimizer's; also gradients; also parameters (Rajbhandari et al.,
 * "ZeRO", stages 0 to 3). */
typedef enum mt_strategy { MT_NO_SHARD, MT_SHARD_OPTIM, MT_SHARD_GRADS, MT_SHARD_PARAMS } mt_strategy;
typedef enum mt_tokenizer_type {
    MT_TOKENIZER_AUTO, // the one in the --load folder
    MT_TOKENIZER_HUGGINGFACE,
    MT_TOKENIZER_SENTENCEPIECE,
    MT_TOKENIZER_GPT2_BPE,
    MT_TOKENIZER_BYTE_LEVEL,
    MT_TOKENIZER_TIKTOKEN
} mt_tokenizer_type;
typedef enum mt_tiktoken_pattern { MT_TIKTOKEN_V1, MT_TIKTOKEN_V2 } mt_tiktoken_pattern;
typedef enum mt_chat_template {
    MT_CHAT_AUTO, // that of the tokenizer's folder
    MT_CHAT_CHATML,
    MT_CHAT_QWEN2_5,
    MT_CHAT_QWEN3,
    MT_CHAT_LLAMA3,
    MT_CHAT_MISTRAL,
    MT_CHAT_DEEPSEEK3,
    MT_CHAT_PLAIN
} mt_chat_template;
/* The mean that is taken of the tokens' losses (verl's loss_agg_mode). A sequence without counted tokens does not
 * count. */
typedef enum mt_loss_aggregation {
    MT_TOKEN_MEAN,              // over all counted tokens
    MT_SEQ_MEAN_TOKEN_SUM,      // over sequences, of the sum over their tokens
    MT_SEQ_MEAN_TOKEN_MEAN,     // over sequences, of the mean over their tokens
    MT_SEQ_MEAN_TOKEN_SUM_NORM, // the sum over tokens divided by norm_length ("Understanding R1-Zero-Like Training")
} mt_loss_aggregation;
/* Policy losses, with the ratio r = exp(logp - old_logp) and the advantage A. */
typedef enum mt_policy_variant {
    MT_POLICY_PPO,     // max(-A r, -A clip(r)), for A < 0 at most -A clip_ratio_c (arXiv 1707.06347, 1912.09729)
    MT_POLICY_VANILLA, // verl's name of the same
    MT_POLICY_GSPO,    // the same without clip_ratio_c, and r is exp of the sequence's mean log-ratio (2507.18071)
    MT_POLICY_CISPO,   // -A logp clip(r), without a gradient by r (2506.13585)
    MT_POLICY_GMPO,    // -A r, r the geometric mean of the sequence's clipped ratios (2507.20673); verl: geo_mean
    MT_POLICY_GPG,     // -A logp (2504.02546)
    MT_POLICY_SAPO,    // -A 4 / tau sigmoid(tau (r - 1)), tau by the sign of A (2511.20347)
    MT_POLICY_DPPO_TV, // -A logp min(r, clip_ratio_c) without a gradient by r, 0 where the probability of the token has
                       // moved on by more than clip_ratio_low or clip_ratio_high (2602.04879)
    MT_POLICY_DPPO_KL, // the same, by the divergence between "this token" and "another" of old and new policy
    MT_POLICY_DRO,     // -A logp + beta / 2 (log r)^2 (2405.19107)
    MT_POLICY_KIMI15,  // the same, by ROLL's name (2501.12599)
    MT_POLICY_KL_COV,  // -A r, for selected tokens + kl_cov_coef |log r| (2505.22617)
    MT_POLICY_CLIP_COV, // PPO's without clip_ratio_c, 0 for selected tokens (2505.22617)
    MT_POLICY_TIS,      // CISPO's, by ROLL's name
    MT_POLICY_TOPR,     // -A logp for selected tokens, those of rewarded responses, else -A logp min(r, 1), without a
                        // gradient by r (2503.14286)
    MT_POLICY_OPMD,     // -A logp / (1 + beta) (Trinity-RFT)
    MT_POLICY_SPPO,     // -A log r, r clipped (Trinity-RFT; 2108.05828)
    MT_POLICY_SAPO_DETACHED, // -A logp 4 / tau sigmoid(tau (r - 1)), without a gradient by r (Trinity-RFT's sapo)
} mt_policy_variant;
/* Estimators of KL(policy | reference) from one sample (Schulman, "Approximating KL divergence"); x = ref_logp - logp.
 */
typedef enum mt_kl_type {
    MT_KL_K1,          // -x
    MT_KL_ABS,         // |x|
    MT_KL_K2,          // x^2 / 2
    MT_KL_K3,          // exp(x) - x - 1, at most 10; x within +-20
    MT_KL_FORWARD_TOPK // no estimator: KL(teacher | policy) over the teacher's k most probable labels, of distillation
} mt_kl_type;
/* Preferences, with h = (logp - ref_logp of chosen) - (logp - ref_logp of rejected), sums over counted tokens. */
typedef enum mt_preference_variant {
    MT_PREFERENCE_SIGMOID, // -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h) (DPO, arXiv 2305.18290)
    MT_PREFERENCE_IPO,     // (h - 1 / (2 beta))^2 (2310.12036)
    MT_PREFERENCE_HINGE,   // max(0, 1 - beta h) (SLiC-HF, 2305.10425)
} mt_preference_variant;
/* Estimators of advantages: see data/learn/advantages.h. */
typedef enum mt_adv_estimator {
    MT_ADV_GAE,                          // arXiv 1506.02438; with a critic
    MT_ADV_GRPO,                         // score - the group's mean, also divided by its deviation (2402.03300)
    MT_ADV_RLOO,                         // score - the mean of the group's others (2402.14740)
    MT_ADV_REINFORCE,                    // the discounted return
    MT_ADV_REINFORCE_PLUS_PLUS,          // the same, whitened (2501.03262)
    MT_ADV_REINFORCE_PLUS_PLUS_BASELINE, // score - the group's mean, whitened (2501.03262)
    MT_ADV_OPO,                          // score - the group's mean weighted by the responses' lengths (2505.23585)
    MT_ADV_GPG,        // (score - the group's mean) times all responses by those with a score (2504.02546)
    MT_ADV_GRPO_PASSK, // the group's best: its lead, also divided by the deviation; others 0 (2503.19595)
    MT_ADV_REMAX,      // the discounted return - the score of a greedy response (2310.10505)
    MT_ADV_GDPO,       // the weighted sum of GRPO's for each of several rewards, whitened (2601.05242)
    MT_ADV_GIGPO,      // GRPO's of whole responses and of their steps, each with a weight (2505.10978); with one turn,
                       // a response is its step
    MT_ADV_STEP_REINFORCE,         // ROLL: REINFORCE's of the steps
    MT_ADV_OPTIMAL_TOKEN_BASELINE, // the return - at each step, the mean of those of the group's responses, weighted by
                                   // the squared norms of their gradients by the logits so far (verl)
} mt_adv_estimator;
/* Divergences of the student p from the teacher q, softmaxes of K logits. */
typedef enum mt_divergence_type {
    MT_FORWARD_KL,        // KL(q | p)
    MT_REVERSE_KL,        // KL(p | q)
    MT_ADAPTIVE_KL,       // both, weighted by the gaps |p - q| of the teacher's head and tail (arXiv 2404.02657)
    MT_SKEWED_FORWARD_KL, // KL(q | lambda q + (1 - lambda) p) (DistiLLM, 2402.03898)
    MT_SKEWED_REVERSE_KL, // KL(p | lambda p + (1 - lambda) q)
    MT_JS_DIVERGENCE,     // (KL(q | m) + KL(p | m)) / 2 with m = (p + q) / 2
} mt_divergence_type;

/* --kd-hidden-layers: the loss of a student's hidden state x[C] against the teacher's y[C]. */
typedef enum mt_hidden_loss_type {
    MT_HIDDEN_COSINE, // 1 - x y / (|x| |y|), with 1e-12 beside both squares, as torch's cosine_embedding_loss
    MT_HIDDEN_MSE     // |x - y|^2 / C
} mt_hidden_loss_type;

/* --kd-balance: the factors of the parts of a distillation loss. */
typedef enum mt_distillation_balance {
    MT_DISTILL_FIXED,          // (1 - w) cross-entropy + w (divergence + v hidden), w, v: options
    MT_DISTILL_BALANCE_HIDDEN, // divergence + hidden, which is scaled to the divergence's size
    MT_DISTILL_BALANCE_ALL     // cross-entropy + s of that sum, which is scaled to the cross-entropy's size
} mt_distillation_balance;
/* --distillation-in: the place of the divergence from a teacher in reinforcement learning. */
typedef enum mt_distillation_in {
    MT_DISTILL_IN_NONE,
    MT_DISTILL_IN_LOSS,            // a term of the loss
    MT_DISTILL_IN_POLICY_GRADIENT, // a policy loss of its own whose advantages are the negative divergences
    MT_DISTILL_IN_ADVANTAGES       // subtracted from the advantages, by the old policy's log-probabilities
} mt_distillation_in;
/* Rewards of responses: see data/learn/rewards.h; MODEL: by a reward model. */
typedef enum mt_reward_kind {
    MT_REWARD_EXACT,   // 1 if the response is the answer, apart from white space around them; else 0
    MT_REWARD_NUMBER,  // 1 if the response's number is the answer's; else 0
    MT_REWARD_REGEX,   // 1 if a pattern matches in the response; else 0
    MT_REWARD_COMMAND, // a program's number
    MT_REWARD_MODEL,   // the value of a reward model
    MT_REWARD_ENV,     // the sum of the rewards of the environment that holds the conversation
    MT_REWARD_NONE     // 0
} mt_reward_kind;
/* The stage of training (--stage). */
typedef enum mt_training_stage {
    MT_STAGE_PT,  // pre-training
    MT_STAGE_SFT, // fine-tuning on conversations
    MT_STAGE_RM,  // a reward model, on pairs of responses
    MT_STAGE_DPO, // preferences, on pairs of responses
    MT_STAGE_RL,  // reinforcement learning, on the model's own responses to prompts
    MT_STAGE_KD   // distillation from a teacher, on the samples of fine-tuning
} mt_training_stage;
typedef enum mt_loss_on { MT_LOSS_ON_RESPONSES, MT_LOSS_ON_LAST, MT_LOSS_ON_ALL } mt_loss_on;
typedef enum mt_long_samples { MT_LONG_TRUNCATE, MT_LONG_DROP } mt_long_samples;
typedef enum mt_dataloader_type { MT_DATALOADER_SINGLE, MT_DATALOADER_CYCLIC } mt_dataloader_type;

/* Activations f of the MLP and of experts, one row each: the name; the functions of f in both backends; gated: the
 * layer computes f(gate) * up; the flag of mt_options that selects it, which this list declares; its names in
 * config.json, the first of them written. GELU is the default. */
#define MT_CHOSEN_ACTIVATIONS(X)                                                                                       \
    X(GELU_TANH, gelu_tanh, false, openai_gelu, "gelu_new|gelu_pytorch_tanh")                                          \
    X(RELU, relu, false, relu, "relu")                                                                                 \
    X(SQUARED_RELU, squared_relu, false, squared_relu, "relu2")                                                        \
    X(GEGLU, gelu_tanh, true, geglu, "gelu_pytorch_tanh|gelu_new")                                                     \
    X(SWIGLU, silu, true, swiglu, "silu|swish")                                                                        \
    X(QUICK_GEGLU, quick_gelu, true, quick_geglu, "quick_gelu")
#define MT_ACTIVATION_FLAG(name, function, gated, flag, names) bool flag;
#define MT_ACTIVATIONS(X)                                                                                              \
    X(GELU, gelu, false, no_flag, "gelu")                                                                              \
    MT_CHOSEN_ACTIVATIONS(X)
#define MT_ACTIVATION_NAME(name, ...) MT_ACTIVATION_##name,
typedef enum mt_activation { MT_ACTIVATIONS(MT_ACTIVATION_NAME) MT_NUM_ACTIVATIONS } mt_activation;

/* Families of Hugging Face transformers, one row each: "model_type" of config.json, its class, and of its tensors the
 * column of names in the parameter table, the prefix of a layer's names, and true if a layer's matrices are stored
 * [in, out]; data/models/hf_config.c has the keys of config.json. A model belongs to the first family whose file can
 * hold it; MEGATRON, for which transformers has no class, holds every model. */
#define MT_HF_FAMILIES(X)                                                                                              \
    X(GPT2, "gpt2", "GPT2LMHeadModel", GPT2, "transformer.h.", true)                                                   \
    X(LLAMA, "llama", "LlamaForCausalLM", LLAMA, "model.layers.", false)                                               \
    X(MISTRAL, "mistral", "MistralForCausalLM", LLAMA, "model.layers.", false)                                         \
    X(QWEN2, "qwen2", "Qwen2ForCausalLM", LLAMA, "model.layers.", false)                                               \
    X(QWEN3, "qwen3", "Qwen3ForCausalLM", LLAMA, "model.layers.", false)                                               \
    X(MIXTRAL, "mixtral", "MixtralForCausalLM", MIXTRAL, "model.layers.", false)                                       \
    X(QWEN2_MOE, "qwen2_moe", "Qwen2MoeForCausalLM", QWEN2_MOE, "model.layers.", false)                                \
    X(QWEN3_MOE, "qwen3_moe", "Qwen3MoeForCausalLM", LLAMA, "model.layers.", false)                                    \
    X(DEEPSEEK_V3, "deepseek_v3", "DeepseekV3ForCausalLM", LLAMA, "model.layers.", false)                              \
    X(SMOLLM3, "smollm3", "SmolLM3ForCausalLM", LLAMA, "model.layers.", false)                                         \
    X(GEMMA3, "gemma3_text", "Gemma3ForCausalLM", LLAMA, "model.layers.", false)                                       \
    X(OLMO3, "olmo3", "Olmo3ForCausalLM", LLAMA, "model.layers.", false)                                               \
    X(GPT_OSS, "gpt_oss", "GptOssForCausalLM", GPT_OSS, "model.layers.", false)                                        \
    X(SEED_OSS, "seed_oss", "SeedOssForCausalLM", LLAMA, "model.layers.", false)                                       \
    X(DOTS1, "dots1", "Dots1ForCausalLM", LLAMA, "model.layers.", false)                                               \
    X(EXAONE4, "exaone4", "Exaone4ForCausalLM", LLAMA, "model.layers.", false)                                         \
    X(GLM4_MOE, "glm4_moe", "Glm4MoeForCausalLM", LLAMA, "model.layers.", false)                                       \
    X(MINIMAX_M2, "minimax_m2", "MiniMaxM2ForCausalLM", MIXTRAL, "model.layers.", false)                               \
    X(HY_V3, "hy_v3", "HYV3ForCausalLM", HY_V3, "model.layers.", false)                                                \
    X(SOLAR_OPEN, "solar_open", "SolarOpenForCausalLM", LLAMA, "model.layers.", false)                                 \
    X(EXAONE_MOE, "exaone_moe", "ExaoneMoeForCausalLM", EXAONE_MOE, "model.layers.", false)                            \
    X(MINISTRAL3, "ministral3", "Ministral3ForCausalLM", LLAMA, "model.layers.", false)                                \
    X(ERNIE4_5_MOE, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ERNIE4_5_MOE, "model.layers.", false)                   \
    X(MIMO, "mimo", "MiMoForCausalLM", MIMO, "model.layers.", false)                                                   \
    X(GLM4_MOE_LITE, "glm4_moe_lite", "Glm4MoeLiteForCausalLM", LLAMA, "model.layers.", false)                         \
    X(QWEN3_NEXT, "qwen3_next", "Qwen3NextForCausalLM", QWEN3_NEXT, "model.layers.", false)                            \
    X(QWEN3_5, "qwen3_5_text", "Qwen3_5ForCausalLM", LLAMA, "model.layers.", false)                                    \
    X(QWEN3_5_MOE, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN2_MOE, "model.layers.", false)                     \
    X(LFM2, "lfm2", "Lfm2ForCausalLM", LFM2, "model.layers.", false)                                                   \
    X(NEMOTRON_H, "nemotron_h", "NemotronHForCausalLM", NEMOTRON_H, "backbone.layers.", false)                         \
    X(GRANITE, "granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE, "model.layers.", false)                     \
    X(KIMI_LINEAR, "kimi_linear", "KimiLinearForCausalLM", KIMI_LINEAR, "model.layers.", false)                        \
    X(MIMO_V2_FLASH, "mimo_v2_flash", "MiMoV2FlashForCausalLM", MIMO_V2, "model.layers.", false)                       \
    X(DEEPSEEK_V32, "deepseek_v32", "DeepseekV32ForCausalLM", LLAMA, "model.layers.", false)                           \
    X(GLM_MOE_DSA, "glm_moe_dsa", "GlmMoeDsaForCausalLM", LLAMA, "model.layers.", false)                               \
    X(T5, "t5", "T5ForConditionalGeneration", T5, "", false)                                                           \
    X(MEGATRON, "megatron", "MegatronForCausalLM", LLAMA, "model.layers.", false)
#define MT_HF_FAMILY_NAME(name, ...) MT_HF_##name,
typedef enum mt_hf_family { MT_HF_UNKNOWN, MT_HF_FAMILIES(MT_HF_FAMILY_NAME) MT_NUM_HF_FAMILIES } mt_hf_family;

typedef struct mt_hf_family_row {
    const char *model_type, *model_class, *layers;
    bool transposed;
    int names;
} mt_hf_family_row;
extern const mt_hf_family_row mt_hf_families[MT_NUM_HF_FAMILIES];

/* The head: logits of the next token, or one value (num_labels 1) from `score`. */
typedef enum mt_head_type {
    MT_HEAD_LM,
    MT_HEAD_SEQUENCE, // of a sequence, at its last token: *ForSequenceClassification, a reward model
    MT_HEAD_TOKEN     // of every token: *ForTokenClassification, a critic
} mt_head_type;

/* Mixers of layers, one row each: the name; its row mt_NAME_kind of megatron.c; its letter in
 * --hybrid-override-pattern, 0: none; its type of layer in config.json; the option that decides on it, for messages;
 * and the name of the
 * --experimental-attention-variant that the layers of --linear-attention-freq have. */
#define MT_VARIANT_MIXERS(X)                                                                                           \
    X(GATED_DELTA_NET, delta, 0, "linear_attention", "--linear-attention-freq", "gated_delta_net")                     \
    X(SHORT_CONV, short, 0, "conv", "--linear-attention-freq", "short_conv") /* gated, as in LFM2 */                   \
    X(MAMBA2, mamba, 'M', "linear_attention", "--hybrid-override-pattern", "mamba2")                                   \
    X(KDA, kda, 0, "linear_attention", "--linear-attention-freq", "kda") /* Kimi delta attention */
#define MT_MIXERS(X)                                                                                                   \
    X(ATTENTION, attention, '*', "full_attention", "--hybrid-override-pattern", "")                                    \
    X(LATENT_ATTENTION, latent, 0, "full_attention", "--multi-latent-attention", "")                                   \
    MT_VARIANT_MIXERS(X)                                                                                               \
    X(SPARSE_ATTENTION, sparse, 0, "indexed_attention", "--experimental-attention-variant", "")                        \
    X(CROSS_ATTENTION, cross, 0, "", "--decoder-num-layers", "") /* of a decoder, over the output of the encoder */    \
    X(NONE, no, 0, "", "--hybrid-override-pattern", "")
#define MT_MIXER_NAME(name, ...) MT_MIXER_##name,
typedef enum mt_mixer_kind { MT_MIXERS(MT_MIXER_NAME) MT_NUM_MIXERS } mt_mixer_kind;

/* Feed-forwards of layers, likewise. The type of layer is that of a layer without a mixer. */
#define MT_FEED_FORWARDS(X)                                                                                            \
    X(DENSE, mlp, '-', "mlp", "--moe-layer-freq")                                                                      \
    X(EXPERTS, experts, 'E', "moe", "--moe-layer-freq")                                                                \
    X(NONE, no, 0, "", "--hybrid-override-pattern")
#define MT_FEED_FORWARD_NAME(name, ...) MT_FEED_FORWARD_##name,
typedef enum mt_feed_forward_kind { MT_FEED_FORWARDS(MT_FEED_FORWARD_NAME) MT_NUM_FEED_FORWARDS } mt_feed_forward_kind;

/* Mixers in place of attention (--experimental-attention-variant), in the order of MT_VARIANT_NAMES. */
#define MT_VARIANT_NAME(name, ...)                                MT_VARIANT_##name,
#define MT_VARIANT_TEXT(name, row, letter, type, option, variant) variant "|"
#define MT_VARIANT_NAMES                                          MT_VARIANT_MIXERS(MT_VARIANT_TEXT) "gdn"
typedef enum mt_attention_variant {
    MT_VARIANT_NONE,
    MT_VARIANT_DSA, // sparse attention: latent attention over keys that an indexer selects; all layers have it
    MT_VARIANT_MIXERS(MT_VARIANT_NAME)
        MT_VARIANT_GDN // the gated delta net's other name in Megatron-LM, until options are finished
} mt_attention_variant;

/* Lengths of the schedules of learning rate and weight decay, in samples. */
typedef struct mt_durations {
    double total, warmup, decay, wsd_decay;
} mt_durations;

/* Of keys with equal scores, which the indexer of sparse attention selects (--dsa-indexer-ties). */
typedef enum mt_indexer_ties {
    MT_TIES_TORCH, // as torch.topk on a CPU: see mt_select_as_torch
    MT_TIES_FIRST  // the earlier ones
} mt_indexer_ties;

/* The vision tower before a decoder: of Qwen2.5-VL (Bai et al., "Qwen2.5-VL technical report"), or of Qwen3-VL and
 * Qwen3.5 (Bai et al., "Qwen3-VL technical report"). */
typedef enum mt_vision_tower { MT_VISION_NONE, MT_VISION_QWEN2_5, MT_VISION_QWEN3 } mt_vision_tower;

enum { MT_MAX_VISION_LAYERS = 64, MT_IMAGE_CHANNELS = 3 };

typedef struct mt_vision_options {
    mt_vision_tower tower;
    int64_t num_layers, hidden_size, ffn_hidden_size, num_attention_heads;
    int64_t patch_size;          // pixels of a side
    int64_t temporal_patch_size; // frames of a patch; an image is repeated
    int64_t spatial_merge_size;  // side of the square of patches that becomes one token
    int64_t num_positions;       // QWEN3: learned positions, a square that is stretched over each image
    int64_t window_size;         // QWEN2_5: pixels of the side of a window
    uint64_t full_layers;        // QWEN2_5: bits of the layers whose patches see the whole image; others see a window
    uint64_t deepstack_layers;   // QWEN3: bits of the layers whose outputs are added behind the decoder's first layers
    int64_t image_token_id;      // stands for a merged patch in the text
    int64_t video_token_id, start_token_id, end_token_id; // not read by the stack: videos are not
    bool freeze, freeze_projector;                        // the tower without its mergers; its mergers
} mt_vision_options;

/* The options that the stack reads: the model's shape, training, the grid, memory. They have their Megatron names, with
 * underscores. mt_run_options (data/options/options.h) holds this struct and the options that only files, terminals,
 * reports and rewards need, and data/options/option_table.c each one's default, range and help. A number 0 and a string
 * NULL mean "not given"; mt_options_finish (data/checkpoint/run_options.h) derives such values and checks all rules. */
typedef struct mt_options {
    /* model */
    int64_t num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups, kv_channels;
    int64_t max_position_embeddings, vocab_size;
    MT_CHOSEN_ACTIVATIONS(MT_ACTIVATION_FLAG)
    double activation_func_clamp_value, glu_linear_offset; // of gated activations; 0: none
    bool qk_layernorm, qk_layernorm_all_heads, untie_embeddings_and_output_weights;
    bool add_qkv_bias;
    bool multi_latent_attention;
    int64_t q_lora_rank, kv_lora_rank;                    // widths of the latents; q_lora_rank 0: queries have none
    int64_t qk_head_dim, qk_pos_emb_head_dim, v_head_dim; // channels of a head: without RoPE, with RoPE, of values
    mt_normalization normalization;
    mt_norm_placement norm_placement;
    bool layernorm_zero_centered_gamma; // norms scale by 1 + weight
    double embedding_multiplier;        // of the embedding's output; 1: none
    double residual_multiplier;         // of the outputs that blocks add to the residual stream; 1: none
    double logits_scaling;              // divides the logits; 1: none
    double softmax_scale;               // of q k^T; 0: 1 / sqrt(channels of a head)
    mt_softmax_type softmax_type;
    bool sinks_in_windows_only;      // softmax_type is of layers with a window only
    int64_t window_num_query_groups; // of layers with a window; 0: as in other layers
    int64_t value_channels;          // of a head, where these are not kv_channels, without latent attention; else 0
    double attention_value_scale;    // of values; 1: none
    bool attention_output_gate;      // attention's output times the sigmoid of a product with the layer's input
    mt_attention_variant experimental_attention_variant; // of the layers in linear_layers
    int64_t linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim;
    int64_t linear_conv_kernel_dim;
    int64_t mamba_state_dim, mamba_head_dim, mamba_num_groups, mamba_num_heads;
    double mamba_dt_limit_low, mamba_dt_limit_high; // of a step; high 0: none
    bool mamba_conv_bias;
    // the indexer of sparse attention: heads, their channels, and the keys that it selects for a query; with
    // dsa_indexer_topk_freq above 1 see mt_layer_kind.shares_indices
    int64_t dsa_indexer_n_heads, dsa_indexer_head_dim, dsa_indexer_topk;
    int64_t dsa_indexer_topk_freq, dsa_indexer_skip_topk_offset;
    bool dsa_indexer_rope_interleaved;
    double dsa_indexer_k_norm_epsilon;
    double dsa_indexer_loss_coeff;    // of the indexer's loss; 0: the indexer is not trained
    bool dsa_indexer_use_sparse_loss; // over the selected keys; else over all that a query sees
    mt_indexer_ties dsa_indexer_ties;
    mt_position_embedding position_embedding_type;
    // an encoder-decoder; decoder_num_layers 0: a decoder alone. num_layers is that of the string of layers: those of
    // the encoder, then two for each of the decoder, self-attention alone and cross attention with the MLP
    int64_t encoder_num_layers, decoder_num_layers;
    int64_t encoder_seq_length; // seq_length is the decoder's
    int64_t relative_attention_num_buckets, relative_attention_max_distance;
    double latent_norm_epsilon; // of the norms of latents, with qk_layernorm; 0: norm_epsilon
    double norm_epsilon, init_method_std, hidden_dropout, attention_dropout;
    int64_t window_size; // sliding window: keys that a query sees, its own included; 0: all
    double rotary_base, rotary_percent;
    double window_rotary_base; // of layers with a window, whose RoPE is not scaled; 0: as other layers
    // RoPE of tokens with three coordinates (frame, row, column): pairs of channels that rotate by each; count 0: all
    // tokens have one. Interleaved: pairs 1, 4, 7 ... rotate by the row and 2, 5, 8 ... by the column; else in sections
    mt_ints mrope_section;
    bool mrope_interleaved;
    mt_vision_options vision;
    bool rotary_interleaved;
    mt_rope_scaling rope_scaling_type;
    double rope_scaling_factor, rope_low_freq_factor, rope_high_freq_factor, yarn_beta_fast, yarn_beta_slow;
    double yarn_mscale_all_dim, yarn_attention_factor;
    bool yarn_correction_range_round_to_int;
    int64_t original_max_position_embeddings;
    double llama_4_scaling_beta; // queries are scaled by their position; 0: not
    /* mixture of experts; num_experts 0: none */
    int64_t num_experts, moe_router_topk, moe_router_num_groups, moe_router_group_topk;
    int64_t moe_ffn_hidden_size, moe_shared_expert_intermediate_size;
    int64_t moe_latent_size; // channels of the experts' rows; 0: hidden_size
    mt_score_function moe_router_score_function;
    mt_ints moe_router_load_balancing_type; // of mt_load_balancing: one, or several auxiliary losses
    mt_reals moe_aux_loss_coeff;            // of those auxiliary losses, in their order
    mt_token_dispatcher moe_token_dispatcher_type;
    mt_token_drop_policy moe_token_drop_policy;
    bool moe_router_linear_bias;
    bool moe_router_pre_softmax, moe_router_enable_expert_bias, moe_pad_expert_input_to_capacity, moe_grouped_gemm;
    bool moe_permute_fusion, moe_shared_expert_gate;
    bool moe_router_force_load_balancing; // random logits, for benchmarks
    bool moe_use_upcycling;               // the weights to load are those of a dense model (data/checkpoint/upcycle.h)
    int64_t moe_upcycling_granularity;    // parts of its MLP, an expert each
    double moe_router_topk_scaling_factor, moe_router_bias_update_rate, moe_z_loss_coeff;
    double moe_router_quantile_balancing_ema;
    bool moe_router_quantile_bias; // the bias of the choice is added to logits, not to scores
    double moe_expert_capacity_factor;
    /* multi-token prediction; mtp_num_layers 0: none */
    int64_t mtp_num_layers;
    bool mtp_use_repeated_layer; // one module, whose parameters every depth has
    double mtp_loss_scaling_factor;
    /* training */
    int64_t micro_batch_size, global_batch_size, seq_length, train_iters, train_samples;
    int64_t eval_micro_batch_size; // of evaluations; 0: micro_batch_size
    double lr, min_lr, lr_warmup_fraction, lr_warmup_init;
    mt_lr_decay_style lr_decay_style;
    mt_wsd_decay_style lr_wsd_decay_style;
    int64_t lr_decay_iters, lr_decay_samples, lr_warmup_iters, lr_warmup_samples, lr_wsd_decay_iters,
        lr_wsd_decay_samples;
    bool apply_wd_to_qk_layernorm;         // the norms of query and key heads decay, unlike other vectors
    double decoupled_lr, decoupled_min_lr; // of the word embedding and the output layer; decoupled_lr 0: as the others
    double start_weight_decay, end_weight_decay, clip_grad;
    mt_optimizer optimizer;
    double adam_beta1, adam_beta2, adam_eps, sgd_momentum, lion_beta1, lion_beta2;
    mt_muon_options muon;
    mt_optimizer_dtype main_grads_dtype, exp_avg_dtype, exp_avg_sq_dtype;
    mt_main_params_dtype main_params_dtype;
    bool optimizer_cpu_offload, overlap_cpu_optimizer_d2h_h2d;
    double optimizer_offload_fraction;
    mt_weight_decay_style weight_decay_incr_style;
    int64_t seed;
    mt_training_stage stage;
    double temperature; // of generation, and of the log-probabilities of responses in MT_STAGE_RL
    /* bad steps */
    bool check_for_nan_in_loss_and_grad, check_for_spiky_loss;
    double loss_spike_factor;
    int64_t loss_spike_window, max_bad_steps_in_a_row;
    mt_bad_step_policy bad_step_policy;
    mt_rerun_mode rerun_mode;
    int64_t error_injection_rate; // of so many micro-batches of a rank one makes its step faulty, on average; 0: none
    mt_injected_error error_injection_type;
    bool bf16, fp16;               // the type of weights and activations; neither: fp32
    bool fp32_residual_connection; // the residual stream is fp32 beside them
    double loss_scale;             // of fp16; 0: found by each step, by the numbers below
    double initial_loss_scale, min_loss_scale;
    int64_t loss_scale_window, hysteresis;
    int64_t memory_limit; // bytes of a rank's device (mt_ops.memory_limit), which mt_model_create sets; 0: all of it
    bool deterministic_mode;
    mt_graph_impl cuda_graph_impl; // of training steps
    mt_attention_backend attention_backend;
    /* parallelism */
    int64_t tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size;
    int64_t expert_model_parallel_size, expert_tensor_parallel_size;
    bool sequence_parallel, tp_comm_overlap;
    mt_cp_comm_type cp_comm_type;
    bool dynamic_context_parallel;
    double distributed_timeout_minutes; // while the job starts
    int64_t distributed_timeout_seconds, save_timeout_seconds;
    int64_t num_virtual_stages_per_pipeline_rank;
    int64_t microbatch_group_size_per_virtual_pipeline_stage;
    int64_t decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers;
    bool account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split;
    mt_schedule_kind pipeline_schedule;
    bool log_num_zeros_in_grad, log_params_norm; // see mt_metrics
    bool use_tp_pp_dp_mapping;                   // neighbouring ranks are stages, not data-parallel ranks
    bool overlap_grad_reduce, overlap_param_gather;
    int64_t ddp_bucket_size; // parameters of layers whose gradients are reduced together; 0: each layer alone
    mt_strategy data_parallel_sharding_strategy;
    /* recomputation */
    mt_recompute_granularity recompute_granularity;
    mt_recompute_method recompute_method;
    int64_t recompute_num_layers;
    unsigned recompute_modules; // MT_MODULE_*
    bool distribute_saved_activations;
    /* fp8 */
    mt_fp8_format fp8_format;
    mt_fp8_recipe fp8_recipe;
    mt_fp8_amax_algo fp8_amax_compute_algo;
    int64_t fp8_margin, fp8_amax_history_len;
    bool fp8_wgrad, fp8_param_gather, tp_only_amax_red, first_last_layers_bf16;
    int64_t num_layers_at_start_in_bf16, num_layers_at_end_in_bf16;
    /* offloading */
    bool fine_grained_activation_offloading;
    unsigned offload_modules; // MT_OFFLOAD_*
    /* adapters; lora_rank 0: none */
    int64_t lora_rank;
    double lora_alpha, lora_dropout;
    mt_base_dtype lora_base_dtype;
    /* derived values, which have no option */
    int64_t data_parallel_size; // ranks / (tensor x pipeline x context size)
    int64_t context_a2a_size;   // ranks of the context group that exchange tokens for heads; 1: none
    int64_t padded_vocab_size;
    int64_t moe_router_group_best; // best scores of a group of experts whose sum ranks the group; 2 for deepseek_v3
    char *moe_layers;        // [num_layers] letters, '1' for a layer with experts and '0' for one without; NULL: none
    char *window_layers;     // [num_layers] letters, '1' for a layer with the sliding window; NULL: all or, without
                             // window_size, none
    char *rope_layers;       // [num_layers] letters, '1' for a layer with RoPE; NULL: all have it, or none
    char *linear_layers;     // [num_layers] letters, '1' for a layer of experimental_attention_variant; NULL: none
    char *hybrid_layers;     // [num_layers] letters of layers with one half: M Mamba-2, * attention, - MLP, E experts;
                             // NULL: every layer has a mixer and a feed-forward
    char *mtp_hybrid_layers; // with hybrid_layers: the letters of a module's layer, * or none, then -, E or none
    char *pipeline_letters;  // the stages: E embedding, t layer, m MTP module, L loss, | between stages; NULL: none
    int64_t num_iterations;  // steps of the run, from train_iters or train_samples
    mt_durations kept_durations;          // of the run that a checkpoint continues; decay 0: those of the options
    bool attention_output_bias, mlp_bias; // biases of o_proj (c_proj) and of the MLP
    mt_hf_family hf_family;               // whose names the parameters have
    mt_head_type head_type;
    uint64_t lora_roles[2]; // the matrices with adapters, a bit each: see mt_role_has_adapters
} mt_options;

/* For programs without data/: a dense decoder on one rank, with Megatron's defaults (LayerNorm, learned positions,
 * biases, GELU, dropout of 0.1) and every derived value, as mt_options_finish leaves them. The vocabulary is padded to
 * a multiple of 128. Set `lr`, `train_iters`, `num_iterations` and `global_batch_size` next; for other widths of heads
 * or of the MLP also kv_channels, num_query_groups and ffn_hidden_size, for experts also moe_layers.
 * mt_model_create refuses sizes of 0 by their names; rules between options are those of data/options. */
mt_options mt_options_plain(int64_t num_layers, int64_t hidden_size, int64_t num_attention_heads, int64_t vocab_size,
                            int64_t seq_length);

/* The operands of a gated activation: f(min(gate, clamp)) (max(-clamp, min(up, clamp)) + offset), as in gpt-oss. NaN
 * stays NaN. The gradient of an operand beyond the clamp is 0. */
typedef struct mt_glu {
    float clamp;  // 0: none
    float offset; // 0: none
} mt_glu;

/* The row of an activation, and the activation of a model. */
typedef struct mt_activation_row {
    bool gated;
    size_t field;
    const char *config_names;
} mt_activation_row;
extern const mt_activation_row mt_activation_rows[MT_NUM_ACTIVATIONS];
mt_activation mt_options_activation(const mt_options *options);
mt_glu mt_options_glu(const mt_options *options);

/* True if a gated activation multiplies other values than f(gate) and up. */
static inline bool mt_glu_bounds(const mt_glu *glu) {
    return glu->clamp > 0 || glu->offset != 0;
}

/* True if the embedding is the head's weight too. */
bool mt_options_tied(const mt_options *options);

/* A constraint between options, and its message with a %lld for each number. The first broken one is the error. */
typedef struct mt_constraint {
    bool broken;
    const char *message;
    long long numbers[5];
} mt_constraint;
int mt_constraints_check(const mt_constraint *constraints, size_t count, mt_error *error);
#define MT_CHECK_CONSTRAINTS(rows, error) mt_constraints_check(rows, sizeof rows / sizeof *rows, error)

/* `a` must be a multiple of `b`, or where a row allows it a divisor; messages show both with their names. */
typedef struct mt_multiple {
    const char *a_name;
    int64_t a;
    const char *b_name; // NULL: a plain number
    int64_t b;
    const char *advice; // NULL: none
    bool or_divisor;
} mt_multiple;
int mt_multiples_check(const mt_multiple *rows, size_t count, mt_error *error);
#define MT_CHECK_MULTIPLES(rows, error) mt_multiples_check(rows, sizeof rows / sizeof *rows, error)

/* From the options, or from the checkpoint that a run continues. */
mt_durations mt_options_durations(const mt_options *options);

/* YaRN's g(m), which determines the scale of attention (Peng et al., "YaRN"; DeepSeek's two factors). */
double mt_yarn_mscale(double factor, double mscale);

/* Channels of a head's value. */
int64_t mt_value_channels(const mt_options *options);

/* True if --moe-router-load-balancing-type names this; the coefficient of an auxiliary loss, 0 if it does not. */
bool mt_balances_by(const mt_options *options, mt_load_balancing type);
double mt_aux_loss_coeff(const mt_options *options, mt_load_balancing type);

/* Layers with experts. */
int64_t mt_num_expert_layers(const mt_options *options);

typedef enum mt_layer_rope {
    MT_ROPE_NONE,
    MT_ROPE_MODEL, // --rotary-base with the model's scaling
    MT_ROPE_WINDOW // --window-rotary-base, not scaled
} mt_layer_rope;
/* A layer: which mixer and feed-forward it has, and the numbers that are its own. */
typedef struct mt_layer_kind {
    mt_mixer_kind mixer;
    mt_feed_forward_kind feed_forward;
    mt_layer_rope rope;
    int64_t window; // keys that a query sees, its own included; 0: all
    int64_t groups; // heads of keys and values, in the whole model
    mt_softmax_type softmax;
    bool shares_indices; // sparse attention without an indexer: over the keys that the layer before has selected
    bool of_encoder;
    unsigned norms; // bits 1 << mt_norm_place
} mt_layer_kind;

/* Frequency of channel pair i of R rotary channels, after the model's scaling; as Hugging Face computes it. */
double mt_rope_frequency(const mt_options *options, mt_layer_rope which, int64_t i, int64_t R);

/* The kind of a layer. Modules of multi-token prediction are numbered from num_layers on, and are as the last layer,
 * but with attention even if that one has another mixer; or, with hybrid_layers, what mtp_hybrid_layers says. */
mt_layer_kind mt_layer_kind_of(const mt_options *options, int64_t layer);
/* The row of --norm-placement: the norms of a layer that has a mixer and a feed-forward, without those of heads. */
unsigned mt_placed_norms(const mt_options *options);
/* The mixer and the feed-forward of `count` letters of a hybrid pattern: one letter for each half that the layer has,
 * the mixer's first. Returns false if they are not. */
bool mt_layer_kind_read(mt_layer_kind *kind, const char *letters, int64_t count);
/* Its type in config.json, a window apart. */
const char *mt_layer_type(const mt_layer_kind *kind);
/* True if `layers`, a list of letters '0' and '1' as moe_layers, names this layer; NULL names none. */
bool mt_layer_listed(const char *layers, int64_t layer);
/* The type of weights and activations. */
mt_dtype mt_options_dtype(const mt_options *options);

/* True if queries, keys and values of the model's attention come from latents. */
bool mt_is_latent(const mt_options *options);
/* Keys of its sequence that a query of the model's attention selects, wherever they are; 0: it selects none. */
int64_t mt_num_selected_keys(const mt_options *options);
/* True if --linear-attention-freq lists the layers that have it. */
bool mt_variant_is_listed(mt_attention_variant variant);
/* Sets the sizes of mixers that are not given, before the layers are listed. has_letters: a pattern of letters will
 * list them. */
void mt_mixers_derive(mt_options *options, bool has_letters);
/* True if some layer has this mixer. */
bool mt_has_mixer(const mt_options *options, mt_mixer_kind mixer);
/* Their names in messages. */
const char *mt_mixer_name(mt_mixer_kind mixer);
const char *mt_feed_forward_name(mt_feed_forward_kind feed_forward);
/* True if a mixer attends to keys and values; others have states, or are none. */
bool mt_mixer_attends(mt_mixer_kind mixer);
/* True if a feed-forward sends tokens to experts. */
bool mt_feed_forward_routes(mt_feed_forward_kind feed_forward);
/* True if generation computes a token by the same sums as training, bit for bit on the CPU. */
bool mt_mixer_is_bitwise(mt_mixer_kind mixer);
/* Multiplications per token of a layer in a forward, over sequences of --seq-length, as Megatron counts them. */
double mt_layer_multiplications(const mt_options *options, int64_t layer);
/* True if some layer has a state in generation instead of keys and values; the mixer of the first such layer, or
 * MT_MIXER_NONE. */
bool mt_has_states(const mt_options *options);
mt_mixer_kind mt_first_with_states(const mt_options *options);
/* Why --cuda-graph-impl local has no effect with finished options: the host takes part in a pass. NULL: it has. */
const char *mt_options_without_graphs(const mt_options *options);
/* Modules of multi-token prediction that have parameters of their own: --mtp-num-layers, or one repeated module. */
int64_t mt_num_mtp_modules(const mt_options *options);
/* Layers whose feed-forward is one MLP for every token. */
int64_t mt_num_dense_layers(const mt_options *options);
/* True if the layer's feed-forward sends tokens to experts; if that of some layer or module of multi-token prediction
 * does. Before layers are listed, see num_experts. */
bool mt_layer_has_experts(const mt_options *options, int64_t layer);
bool mt_has_experts(const mt_options *options);
bool mt_layer_kinds_equal(mt_layer_kind a, mt_layer_kind b);
/* The window that all layers have, or else 0: some see all keys. */
int64_t mt_options_common_window(const mt_options *options);

/* ==== §3 kernels ====================================================================================================
 *
 * A backend implements the operations below. The CPU's, in plain C, defines each result; the GPU's is in cuda/. Each
 * family of operations is a list of rows. The list generates everything that exists once per operation: the type
 * mt_NAME_fn, the entry of the table mt_ops, a backend's prototypes, and the timed copies of data/report/profile.c. A
 * row has one of two forms:
 *
 *   OP(name, result, parameters...)             is not timed
 *   OP(name, work, (arguments), parameters...)  enqueues work on the stream, and is timed; returns nothing
 *
 * `work` is the least work of the call, an expression of its parameters that only a profile evaluates:
 * mt_work_product(M, N, K): floating-point operations of an M x K by K x N product; mt_work_bytes(elements, type):
 * bytes read and written, each operand once, without small ones (indices, weights of norms, statistics); mt_work_sent:
 * bytes that a rank sends.
 *
 * On a GPU, pointers are device pointers unless a comment names the host, and operations are enqueued on `stream`. An
 * activation's gradient is written (=), a parameter's gradient accumulates (+=). Every sum has a fixed order. */

/* The queue of a device's work. On the CPU operations run at once and the stream is NULL. */
typedef struct mt_stream mt_stream;

/* Dropout depends on coordinates, never on the order of evaluation. `key` identifies the run, the layer and the dropout
 * within the layer; p == 0: off. */
typedef struct mt_dropout {
    double p;
    uint64_t key;
} mt_dropout;

/* ---- memory and streams of a device; events: points on a stream that the host can wait for */

typedef struct mt_event mt_event;

/* A function that a stream calls on the host. It calls no operation of the stream's device. */
typedef void mt_host_function(void *context);

#define MT_DEVICE_OPERATIONS(OP)                                                                                       \
    /* Bytes that a model may use: the GPU's free memory, or all of the host's, or less by memory_limit. */            \
    OP(memory_available, int64_t, void)                                                                                \
    /* From now on the device is one of so many bytes: what is in use already counts, an allocation beyond them ends   \
     * the program as on a smaller device. On the CPU they are those of memory_alloc on this rank. 0: no limit. */     \
    OP(memory_limit, void, int64_t bytes)                                                                              \
    /* True if the first use of an operation may wait for all work of the device, messages included. The CPU returns   \
     * true as well: its pipelines then run in a GPU's order. */                                                       \
    OP(first_use_waits, bool, void)                                                                                    \
    OP(memory_alloc, void *, int64_t bytes)                                                                            \
    OP(memory_free, void, void *memory)                                                                                \
    /* For a cache of keys and values, which fills token by token: on the CPU in small pages, since the first use of a \
     * huge one waits until all of it is zero. memory_free accepts it. */                                              \
    OP(memory_alloc_cache, void *, int64_t bytes)                                                                      \
    /* Stream-ordered, for memory that grows during a step, when memory_free could deadlock: it may wait for the whole \
     * device, and so for a message whose sender waits for this rank. memory_free accepts such memory too. */          \
    OP(memory_alloc_ordered, void *, int64_t bytes, mt_stream *stream)                                                 \
    OP(memory_free_ordered, void, void *memory, mt_stream *stream)                                                     \
    /* Host memory for copies that run beside the host: pinned for a GPU, plain on the CPU. */                         \
    OP(memory_alloc_host, void *, int64_t bytes)                                                                       \
    OP(memory_free_host, void, void *memory)                                                                           \
    /* Bytes of workspace that one stream needs for T tokens, rows of C channels, and attention with H heads of D      \
     * channels. 0 on the CPU. */                                                                                      \
    OP(workspace_bytes, int64_t, int64_t T, int64_t C, int64_t H, int64_t D)                                           \
    /* The same for the gated delta rule of T tokens, with the heads and channels of `a`; `train`: its backward too.   \
     * And for Mamba-2's scan. */                                                                                      \
    OP(delta_workspace_bytes, int64_t, int64_t T, const mt_delta_args *a, mt_dtype dtype, bool train)                  \
    OP(ssd_workspace_bytes, int64_t, int64_t T, const mt_ssd_args *a, bool train)                                      \
    /* And for sparse attention of T tokens in spans of at most `longest` keys, whose indexer selects topk. */         \
    OP(sparse_workspace_bytes, int64_t, int64_t T, int64_t longest, int64_t topk)                                      \
    /* A stream whose operations use `workspace`, which outlives it. NULL on the CPU. `deterministic`: no algorithm is \
     * chosen by measuring, so two runs have the same bits; on the CPU they always do. */                              \
    OP(stream_create, mt_stream *, void *workspace, int64_t workspace_bytes, bool deterministic)                       \
    OP(stream_destroy, void, mt_stream *stream)                                                                        \
    /* The host waits for all work on the stream. */                                                                   \
    OP(stream_synchronize, void, mt_stream *stream)                                                                    \
    /* Operations enqueued on `stream` after this call wait for those enqueued on `other` before it. */                \
    OP(stream_wait_stream, void, mt_stream *stream, mt_stream *other)                                                  \
    /* Calls function(context) on the host, in stream order; the context must live until then. */                      \
    OP(stream_call_host, void, mt_stream *stream, mt_host_function *function, void *context)                           \
    /* NULL on the CPU. */                                                                                             \
    OP(event_create, mt_event *, void)                                                                                 \
    OP(event_destroy, void, mt_event *event)                                                                           \
    /* Marks the end of all work that `stream` holds now. */                                                           \
    OP(event_record, void, mt_event *event, mt_stream *stream)                                                         \
    /* The host waits for the point recorded last; returns at once if none was. Any thread may call it. */             \
    OP(event_synchronize, void, mt_event *event)

#define MT_MEMORY_OPERATIONS(OP)                                                                                       \
    /* Copies between any two of host and device memory. */                                                            \
    OP(memory_copy, mt_work_bytes(2 * bytes, MT_U8), (to, from, bytes, stream), void *to, const void *from,            \
       int64_t bytes, mt_stream *stream)                                                                               \
    /* The same for rows of `bytes`, whose strides are in bytes. */                                                    \
    OP(memory_copy_rows, mt_work_bytes(2 * rows * bytes, MT_U8),                                                       \
       (to, to_stride, from, from_stride, rows, bytes, stream), void *to, int64_t to_stride, const void *from,         \
       int64_t from_stride, int64_t rows, int64_t bytes, mt_stream *stream)                                            \
    OP(memory_zero, mt_work_bytes(bytes, MT_U8), (memory, bytes, stream), void *memory, int64_t bytes,                 \
       mt_stream *stream)

/* ---- linear layers; weights are [N, K] as torch.nn.Linear stores them */

/* Operands of a linear layer. The comment of an operation names its operands; it does not read the others. */
typedef struct mt_linear_args {
    int64_t T, N, K;
    const void *x;    // [T, K]
    const void *w;    // [N, K]
    const void *bias; // [N]; NULL: none
    void *y;          // [T, N]: the forward's result
    const void *dy;   // [T, N]: gradient of y
    void *dx;         // [T, K]: gradient of x, the result of backward_input
    float *dw;        // [N, K]: gradient of w, a result of backward_weight
    float *dbias;     // [N] +=: gradient of bias; NULL: none
    bool accumulate;  // dw +=
    void *pre;        // [T, N]: y before GELU, a result of linear_gelu_forward
} mt_linear_args;

#define MT_LINEAR_OPERATIONS(OP)                                                                                       \
    /* y[T, N] = x[T, K] w^T + bias[N]. */                                                                             \
    OP(linear_forward, mt_work_product(a->T, a->N, a->K), (a, dtype, stream), const mt_linear_args *a, mt_dtype dtype, \
       mt_stream *stream)                                                                                              \
    /* dx[T, K] = dy[T, N] w. */                                                                                       \
    OP(linear_backward_input, mt_work_product(a->T, a->N, a->K), (a, dtype, stream), const mt_linear_args *a,          \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* dw[N, K] = dy^T x, or += when accumulate, and dbias[N] += column sums of dy, both in fp32. Separate from the    \
     * input's gradient so that a zero-bubble schedule can move it. */                                                 \
    OP(linear_backward_weight, mt_work_product(a->T, a->N, a->K), (a, dtype, stream), const mt_linear_args *a,         \
       mt_dtype dtype, mt_stream *stream)

/* ---- fp8 products: operands in eight bits with scales (Micikevicius et al., "FP8 formats for deep learning") */

/* The elements of a matrix [R, C] that share a scale, and the layout of its scales; R4 is R rounded up to 4. */
typedef enum mt_fp8_blocks {
    MT_FP8_TENSOR,     // all: one scale
    MT_FP8_VECTOR_128, // 128 along a row: [ceil(C / 128), R4], scales are powers of two
    MT_FP8_BLOCK_128,  // 128 x 128: [ceil(R / 128), ceil(C / 128) rounded up to 4], powers of two (DeepSeek-V3)
    MT_FP8_VECTOR_32   // 32 along a row: [ceil(C / 32), R4], powers of two (OCP microscaling formats, mxfp8)
} mt_fp8_blocks;

/* A matrix [R, C] in fp8, or several of one shape in succession. Element (r, c) is data[r * stride + c] times the
 * inverse scale of its block. Elements from C to stride are zero; stride is a multiple of 16, and of the block. */
typedef struct mt_fp8_matrix {
    uint8_t *data;         // [R, stride]; NULL: absent
    float *inverse_scales; // 1 / scale of each block
    int64_t stride;
    mt_dtype format; // MT_F8_E4M3 or MT_F8_E5M2
    mt_fp8_blocks blocks;
} mt_fp8_matrix;

/* Elements of a row of C elements in fp8, and the number of scales of `count` matrices. */
int64_t mt_fp8_stride(int64_t C, mt_fp8_blocks blocks);
int64_t mt_fp8_num_scales(int64_t count, int64_t R, int64_t C, mt_fp8_blocks blocks);

/* Rows per expert in a transposed copy are rounded up to MT_FP8_EXPERT_ROWS, so that no block spans two experts. Rows
 * of a matrix in fp8 are multiples of MT_FP8_WIDTH wide. */
enum { MT_FP8_EXPERT_ROWS = 128, MT_FP8_WIDTH = 16 };

/* The operands of quantize. x[count, R, C] is `count` matrices in succession, which with MT_FP8_TENSOR share one
 * scale. A scale is the format's largest number / the largest absolute value of the block; 1 if that is 0 or not
 * finite. Values beyond the format's largest number saturate; NaN stays NaN. */
typedef struct mt_quantize_args {
    const void *x;
    int64_t count, R, C;
    mt_fp8_matrix rows;    // [count, R, C]; either copy may be absent
    mt_fp8_matrix columns; // [count, C, R]: the transposes
    const float *scale;    // [1]: the scale of both copies, MT_FP8_TENSOR only (delayed scaling); NULL: computed from x
    float *amax;           // [1]: the largest |x|. With `scale`: raised to it (NULL: not wanted); else scratch, written
    /* rows of experts: x[R, C] is sorted by expert, and expert e's rows [offsets[e], offsets[e + 1]) begin in `columns`
     * at the sum of the rounded counts (MT_FP8_EXPERT_ROWS) of the experts before it; count is 1. The columns between
     * experts, and from the last one to `columns.stride`, are zero. Rows before offsets[0] and from
     * offsets[num_experts] on are neither read nor written. NULL: none */
    const int32_t *offsets;
    int64_t num_experts;
    /* copies of rows, where a token goes to several experts; NULL: row r is row r. quantize: row r of x[R, C] goes to
     * the rows position[r * copies + i] of `rows`, i < copies, as far as these are not negative, and with compact > 0
     * to row compact + r too; amax is that of the rows with such a place. With `scale`, without `columns`; count is 1.
     * fp8_transpose reads a row that has copies once, where it is compact: row m is compact + source[m] of `rows` */
    const int32_t *position, *source;
    int64_t copies, compact;
} mt_quantize_args;

/* A rank's part of weights: elements [first, first + n) of w[count, R, C], whose rows are C wide. Other ranks have the
 * rest, also of blocks that the part cuts, so that quantization takes two calls. Without w.data: amax = the largest |x|
 * of each block in the part, 0 of the others; their maximum over the ranks gives the scales. With it: the part of w,
 * and the inverse scales of all of w. Delayed scaling needs the second call only, which raises amax. */
typedef struct mt_fp8_shard_args {
    const void *x;   // [n]; first and n are multiples of MT_FP8_WIDTH
    mt_fp8_matrix w; // MT_FP8_TENSOR or MT_FP8_BLOCK_128
    int64_t count, R, C, first, n;
    float *amax;        // of each block, in the layout of the scales
    const float *scale; // [1]: of delayed scaling; NULL: amax gives the scales
} mt_fp8_shard_args;

/* The operands of dequantize: out[R, C] = the values of codes[R, C] in e4m3, without gaps between rows; scales as those
 * of MT_FP8_BLOCK_128. */
typedef struct mt_dequantize_args {
    const uint8_t *codes;
    const float *inverse_scales; // [ceil(R / 128), ceil(C / 128) rounded up to 4]
    int64_t R, C;
    void *out;
} mt_dequantize_args;

/* out[M, N] = a[M, K] b[N, K]^T + bias[N]. */
typedef struct mt_fp8_product_args {
    mt_fp8_matrix a, b;
    int64_t M, N, K;
    void *out;
    mt_dtype out_dtype;
    const void *bias; // [N] of out_dtype, or NULL
    bool accumulate;  // out +=; fp32 only, without bias
    bool exact_sums;  // sum in fp32; false: the backend may sum in fewer bits (Hopper: 14 bits of fraction), faster
    /* experts. Without `sums_rows` the rows of a and out are sorted by expert, expert e has rows [offsets[e],
     * offsets[e + 1]) and the e-th b of [num_experts, N, K]. With it the sum is over rows: a[M, stride] and b[N,
     * stride] are transposed copies with rounded segments (mt_quantize_args), and expert e's product goes to the e-th
     * out of [num_experts, M, N]; K is the upper bound of all rows. NULL: none */
    const int32_t *offsets;
    int64_t num_experts;
    bool sums_rows;
} mt_fp8_product_args;

/* Delayed scaling of n tensors: entry 0 of the history belongs to this step, the others to the steps
 * before, the oldest first. */
typedef struct mt_fp8_scale_args {
    int64_t n, length;    // tensors; history[length, n]
    float *scale;         // [n]
    float *history;       // [length, n]
    const float *largest; // [n] the largest number of each tensor's format
    float margin;         // scale = largest / amax / 2^margin
    bool most_recent;     // amax: of this step; else the maximum of the history
    const float *guard;   // [1] < 0: the step was bad, and only entry 0 is cleared
} mt_fp8_scale_args;

#define MT_FP8_OPERATIONS(OP)                                                                                          \
    OP(quantize,                                                                                                       \
       mt_work_bytes(                                                                                                  \
           a->count * a->R * a->C *                                                                                    \
               (mt_dtype_size(dtype) + (a->rows.data ? mt_max(a->copies, 1) : 0) + (a->columns.data != NULL)),         \
           MT_U8),                                                                                                     \
       (a, dtype, stream), const mt_quantize_args *a, mt_dtype dtype, mt_stream *stream)                               \
    OP(fp8_product, mt_work_product(a->M, a->N, a->K), (a, stream), const mt_fp8_product_args *a, mt_stream *stream)   \
    /* columns = the transposes of `rows`, with its scales: MT_FP8_TENSOR or MT_FP8_BLOCK_128; rows of experts with    \
     * MT_FP8_TENSOR only. */                                                                                          \
    OP(fp8_transpose, mt_work_bytes(2 * a->count * a->R * a->C, MT_U8), (a, stream), const mt_quantize_args *a,        \
       mt_stream *stream)                                                                                              \
    OP(fp8_shard_quantize, mt_work_bytes(a->n *(mt_dtype_size(dtype) + 1), MT_U8), (a, dtype, stream),                 \
       const mt_fp8_shard_args *a, mt_dtype dtype, mt_stream *stream)                                                  \
    OP(dequantize, mt_work_bytes(a->R * a->C * (1 + mt_dtype_size(dtype)), MT_U8), (a, dtype, stream),                 \
       const mt_dequantize_args *a, mt_dtype dtype, mt_stream *stream)                                                 \
    /* column_sums: sums[C] += the sums over the rows of x[R, C]: a bias's gradient. */                                \
    OP(column_sums, mt_work_bytes(R *C, dtype), (sums, x, R, C, dtype, stream), float *sums, const void *x, int64_t R, \
       int64_t C, mt_dtype dtype, mt_stream *stream)                                                                   \
    /* After a step: scale from the history, which then moves on by one entry; entry 0 becomes 0. A tensor keeps its   \
     * scale while its amax is 0 or not finite. */                                                                     \
    OP(fp8_scale_step, mt_work_bytes(a->n *(2 * a->length + 1), MT_F32), (a, stream), const mt_fp8_scale_args *a,      \
       mt_stream *stream)

/* ---- embedding */

/* The table of an embedding holds rows [first, first + count) of the vocabulary. */
typedef struct mt_embedding_args {
    int64_t T, C, first, count;
    const int32_t *ids; // [T]
    const void *w;      // [count, C]: the forward's table
    void *out;          // [T, C]: its result
    bool accumulate;    // out +=
    const void *dout;   // [T, C]: gradient of out
    float *dw;          // [count, C] +=: gradient of w
} mt_embedding_args;

#define MT_EMBEDDING_OPERATIONS(OP)                                                                                    \
    /* out[T, C] = w[ids - first], zero for ids outside the table; or += when accumulate. */                           \
    OP(embedding_forward, mt_work_bytes((a->accumulate ? 3 : 2) * a->T * a->C, dtype), (a, dtype, stream),             \
       const mt_embedding_args *a, mt_dtype dtype, mt_stream *stream)                                                  \
    /* dw[ids - first] += dout, in token order. The work counts dout only: the host does not know the rows of dw that  \
     * occur, which move 8 bytes an element. */                                                                        \
    OP(embedding_backward, mt_work_bytes((a->T * a->C), dtype), (a, dtype, stream), const mt_embedding_args *a,        \
       mt_dtype dtype, mt_stream *stream)

/* ---- norms over the last dimension of x[T, H, C]: H = 1 for hidden states, heads for q/k norm */

/* The operands of a norm. Fields that an operation does not use are zero. */
typedef struct mt_norm_args {
    int64_t T, H, C;            // LayerNorm: H = 1
    const void *x;              // [T, H, C]
    const void *w, *b;          // [C]; b: LayerNorm only
    float w_offset;             // added to each weight: 0, or 1 where weights are stored less 1
    float eps;                  // forward only
    void *y;                    // [T, H, C]: the forward's result
    float *mean, *rstd;         // [T, H]: the forward writes them, the backward reads them; mean: LayerNorm only
    const void *dy;             // [T, H, C]: the gradient of y
    const void *dresidual;      // [T, H, C], added to the gradient; may be NULL or dx; it has dx's stride
    void *dx;                   // [T, H, C]: the backward's result
    float *dw, *db;             // [C] +=; db: LayerNorm only
    int64_t x_stride, y_stride; // elements between tokens. LayerNorm: y_stride and dy_stride, 0: C; x and dx are packed
    int64_t dx_stride, dy_stride;
    const float *means; // rmsnorm, H = 1, where other ranks have more channels of the row: [T], over all channels,
                        // of x^2 (forward) or dy (w + w_offset) x (backward); NULL: computed here
    /* residual_norm_forward only */
    void *sum;                  // [T, C] = residual + dropout(x), which is normalized; may be x or residual
    const void *residual;       // [T, C]
    const int64_t *token_index; // [T]: see dropout_add_forward
    mt_dropout dropout;
    /* forward, H = 1 and rows packed, if quantize.rows is set: y goes to these rows in e4m3 instead, as in
     * mt_activation_args */
    mt_quantize_args quantize;
} mt_norm_args;

/* Elements between the tokens of LayerNorm's y or dy. */
static inline int64_t mt_layernorm_stride(int64_t stride, int64_t C) {
    return stride > 0 ? stride : C;
}

/* Bytes that a forward of norms writes less if y is in fp8. */
static inline int64_t mt_norm_saved_bytes(const mt_norm_args *a, mt_dtype dtype) {
    return a->quantize.rows.data ? a->T * a->C * (mt_dtype_size(dtype) - 1) : 0;
}

typedef struct mt_row_means_args {
    int64_t T, C;
    float *means;          // [T]
    const void *a, *b, *w; // [T, C], [T, C], [C]
    float w_offset;
    int64_t a_stride, b_stride; // elements between tokens
} mt_row_means_args;

#define MT_NORM_OPERATIONS(OP)                                                                                         \
    /* y = x rstd (w + w_offset), rstd = 1 / sqrt(mean(x^2) + eps) (Zhang & Sennrich, "Root mean square layer          \
     * normalization"). */                                                                                             \
    OP(rmsnorm_forward,                                                                                                \
       mt_work_bytes(2 * a->T * a->H * a->C * mt_dtype_size(dtype) - mt_norm_saved_bytes(a, dtype), MT_U8),            \
       (a, dtype, stream), const mt_norm_args *a, mt_dtype dtype, mt_stream *stream)                                   \
    /* means[T] of a[t, c] b[t, c] (w[c] + w_offset) over C channels; without the last factor where w is NULL. */      \
    OP(row_means, mt_work_bytes((a->a == a->b ? 1 : 2) * a->T * a->C, dtype), (a, dtype, stream),                      \
       const mt_row_means_args *a, mt_dtype dtype, mt_stream *stream)                                                  \
    /* dx = dresidual + gradient through the norm; dw +=. */                                                           \
    OP(rmsnorm_backward, mt_work_bytes((a->dresidual ? 4 : 3) * a->T * a->H * a->C, dtype), (a, dtype, stream),        \
       const mt_norm_args *a, mt_dtype dtype, mt_stream *stream)                                                       \
    /* y = (x - mean) rstd (w + w_offset) + b (Ba et al., "Layer normalization"). */                                   \
    OP(layernorm_forward,                                                                                              \
       mt_work_bytes(2 * a->T * a->C * mt_dtype_size(dtype) - mt_norm_saved_bytes(a, dtype), MT_U8),                   \
       (a, dtype, stream), const mt_norm_args *a, mt_dtype dtype, mt_stream *stream)                                   \
    /* dx = dresidual + gradient through the norm; dw +=, db +=. */                                                    \
    OP(layernorm_backward, mt_work_bytes((a->dresidual ? 4 : 3) * a->T * a->C, dtype), (a, dtype, stream),             \
       const mt_norm_args *a, mt_dtype dtype, mt_stream *stream)

/* ---- rotary positions (Su et al., "RoFormer"), and the heads of multi-head latent attention (DeepSeek-AI,
 * "DeepSeek-V2") */

/* Rotates the first R channels of a head by its token's angle; copies the other channels. */
typedef struct mt_rotation {
    const float *cos, *sin;   // [max_position, R / 2]
    const int32_t *positions; // [T]
    int64_t R;                // even; 0: no channel rotates
    bool interleaved;         // pairs are (2i, 2i + 1), else (i, i + R / 2)
} mt_rotation;

typedef struct mt_rope_args {
    int64_t T, H, D;
    const void *x;              // [T, H, D]
    void *y;                    // [T, H, D]; may be x
    int64_t x_stride, y_stride; // elements between tokens
    mt_rotation rotation;
} mt_rope_args;

/* A query or key has N nope channels, which do not rotate, then R = rotation.R rope channels; a value has Dv. All heads
 * of a token share the rope channels of its key. */
typedef struct mt_latent_heads_args {
    int64_t T, H, N, Dv;
    mt_rotation rotation;
    /* forward */
    void *q;            // [T, H, N + R]: the rope channels of every head are rotated in place
    const void *kv;     // [T, H, N + Dv]: each head's nope channels of the key, then its value
    const void *k_rope; // [T, R], rotated already
    void *k, *v;        // [T, H, N + R], [T, H, Dv]: results
    /* backward */
    void *dq;            // [T, H, N + R]: rotated back in place
    const void *dk, *dv; // [T, H, N + R], [T, H, Dv]
    void *dkv, *dk_rope; // [T, H, N + Dv], [T, R]: results; dk_rope is the sum over the heads, in order, in fp32
} mt_latent_heads_args;

/* The operands of q/k norm with rotation: every row of qkv begins with H heads of q, then G of k. Without the norm, the
 * weights and rstd are NULL. */
typedef struct mt_qk_args {
    int64_t T, H, G, D;
    const void *qkv;        // [T, (H + G) D ...]: the fused product
    const void *q_w, *k_w;  // [D]: RMSNorm's weights
    float w_offset;         // added to each weight
    float *q_rstd, *k_rstd; // [T, H], [T, G]: the forward writes them, the backward reads them
    float eps;              // forward only
    mt_rotation rotation;   // after the norm
    void *qk;               // [T, (H + G) D]: the forward's result; may be qkv without the norm
    void *dqk;              // [T, (H + G) D]: the gradient of qk; scratch afterwards
    void *dqkv;             // [T, (H + G) D ...]: the backward's result; may be dqk without the norm
    float *dq_w, *dk_w;     // [D] +=
    int64_t qkv_stride;     // elements between tokens
    int64_t qk_stride, dqk_stride, dqkv_stride;
    /* Generation only, else NULL: the forward writes k, and the v after it in qkv, to rows cache_rows[t] of the caches;
     * k in qk is then undefined. */
    void *k_cache, *v_cache;   // [rows, G D]
    const int32_t *cache_rows; // [T]
} mt_qk_args;

/* The scale of queries by their position: 1 + beta log(1 + floor(position / context)) (Llama 4, Ministral 3). */
typedef struct mt_position_scale_args {
    int64_t T, width;         // channels of all heads
    void *x;                  // [T, width]: queries, or their gradients
    int64_t x_stride;         // elements between tokens
    const int32_t *positions; // [T]
    double beta;
    int64_t context;
} mt_position_scale_args;

#define MT_ROPE_OPERATIONS(OP)                                                                                         \
    /* y = x rotated. In place, the channels that do not rotate are neither read nor written. */                       \
    OP(rope_forward, mt_work_bytes(2 * a->T * a->H * (a->y == a->x ? a->rotation.R : a->D), dtype),                    \
       (a, dtype, stream), const mt_rope_args *a, mt_dtype dtype, mt_stream *stream)                                   \
    /* y, the gradient of the input, = x, the gradient of the output, rotated back. */                                 \
    OP(rope_backward, mt_work_bytes(2 * a->T * a->H * (a->y == a->x ? a->rotation.R : a->D), dtype),                   \
       (a, dtype, stream), const mt_rope_args *a, mt_dtype dtype, mt_stream *stream)                                   \
    /* x scaled in place; the backward is the same. */                                                                 \
    OP(position_scale, mt_work_bytes(2 * a->T * a->width, dtype), (a, dtype, stream), const mt_position_scale_args *a, \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* RMSNorm over D of each head, then the rotation. */                                                              \
    OP(qk_forward,                                                                                                     \
       mt_work_bytes(2 * a->T *                                                                                        \
                         ((a->H + (a->k_cache ? 0 : a->G)) * (a->qk == a->qkv ? a->rotation.R : a->D) +                \
                          (a->k_cache ? 2 * a->G * a->D : 0)),                                                         \
                     dtype),                                                                                           \
       (a, dtype, stream), const mt_qk_args *a, mt_dtype dtype, mt_stream *stream)                                     \
    OP(qk_backward,                                                                                                    \
       mt_work_bytes((a->q_w ? 3 : 2) * a->T * (a->H + a->G) * (a->dqkv == a->dqk ? a->rotation.R : a->D), dtype),     \
       (a, dtype, stream), const mt_qk_args *a, mt_dtype dtype, mt_stream *stream)                                     \
    OP(latent_heads_forward, mt_work_latent_heads(a, dtype), (a, dtype, stream), const mt_latent_heads_args *a,        \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    OP(latent_heads_backward, mt_work_latent_heads(a, dtype), (a, dtype, stream), const mt_latent_heads_args *a,       \
       mt_dtype dtype, mt_stream *stream)

/* ---- attention over spans (Dao et al., "FlashAttention", for the saved log-sum-exp and the blockwise backward) */

/* A range of queries that attends to a range of keys. Row i of the queries sees key j of the span if
 * j <= i + (k_len - q_len) when causal, and all keys otherwise. Packed sequences, context parallelism and decoding with
 * a key/value cache are all lists of spans. */
typedef struct mt_span {
    int64_t q_start, q_len, k_start, k_len;
    bool causal;
} mt_span;

/* The keys [*begin, *end) of the span that its query i sees; window: see mt_attention. */
void mt_span_keys(const mt_span *span, int64_t window, int64_t i, int64_t *begin, int64_t *end);

/* The spans of one micro-batch: the same list on the host and on the device. Query rows of different spans are
 * disjoint; rows in no span are not touched. On the device a copy from the host writes them, and positions and numbers
 * of cache rows, never a kernel: CUDA kernels read them before they wait for the kernel before. */
typedef struct mt_spans {
    const mt_span *host;
    const mt_span *device;
    int64_t count;
} mt_spans;

/* Keys in pages (Kwon et al., "Efficient memory management for large language model serving with PagedAttention"): key
 * row j of a span, j counted from row 0 of k and v, is row table[j / rows] * rows + j % rows of them. A span's keys are
 * one range of j, wherever its pages are, and spans may share pages. The first key of a span with more than one key
 * begins a page. */
typedef struct mt_pages {
    const int32_t *table; // on the device; NULL: key row j is row j
    int64_t rows;         // of a page: a power of two
    int64_t count;        // pages in k and v
} mt_pages;

/* A bias of scores by the distance of key and query (Raffel et al., "Exploring the limits of transfer learning with a
 * unified text-to-text transformer", 2.1): near distances have a bucket each, others share buckets by their logarithm,
 * and all from max_distance on share the last one. */
typedef struct mt_relative_bias {
    const void *w;                 // [buckets, H] in the type of q; NULL: no bias
    float *dw;                     // [buckets, H] +=; NULL: frozen
    int64_t buckets, max_distance; // max_distance is more than the distances that have a bucket each
    bool bidirectional;            // later keys have half of the buckets; else they are in that of distance 0
} mt_relative_bias;

/* The bucket of a key `distance` tokens behind its query (negative: before it). */
int64_t mt_relative_bucket(const mt_relative_bias *bias, int64_t distance);

/* One attention call. With a window > 0, row i sees only keys j > i + (k_len - q_len) - window (Mistral's sliding
 * window; 0 is none). Dropout keeps the probability of head h, query i and key j when word k_index[j] % 4 of Philox at
 * (q_index[i], (first_head + h) << 48 | k_index[j] / 4) is at least the integer part of p 2^32. */
typedef struct mt_attention {
    int64_t num_heads, num_groups; // H, G: heads of q, heads of k and v
    int64_t head_size, value_size; // D, Dv: channels of a head of q and k, of v
    const void *q, *k, *v;         // [Tq, H, D], [Tk, G, D], [Tk, G, Dv]
    void *out;                     // [Tq, H, Dv]: the forward writes it, the backward reads it
    float *lse;                    // [Tq, H]: log of the sum of exponentials, likewise
    const void *dout;              // [Tq, H, Dv]: gradient of out
    void *dq, *dk, *dv;            // gradients of q, k, v: the backward's results
    float *row_dot;                // [Tq, H]: scratch of the backward, sum(out dout)
    int64_t q_stride, k_stride;    // elements between tokens; a gradient has its operand's stride
    int64_t v_stride, out_stride;
    mt_spans spans; // of queries and keys
    mt_pages pages; // of the keys; the forward only
    int64_t window;
    float scale;           // of q k^T
    mt_relative_bias bias; // added to scale q k^T: row j - (i + k_len - q_len) of key j and query i of a span
    mt_attention_backend backend;
    mt_dropout dropout;
    bool has_sink;                    // these three are not for the operations: see mt_attend_forward
    const void *sinks;                // [H], or NULL: 0
    float *dsinks;                    // [H] +=
    int64_t first_head;               // number of head 0 in the whole model, where ranks share the heads
    const int64_t *q_index, *k_index; // [Tq], [Tk]: global token numbers for dropout; NULL without it
} mt_attention;

/* The operands of attention_merge. */
typedef struct mt_merge_args {
    const mt_spans *spans;
    int64_t H, Dv;
    float *out, *lse;      // [Tq, H, Dv], [Tq, H]
    const void *part;      // [Tq, H, Dv] of `dtype`
    const float *part_lse; // [Tq, H]
    bool first;
} mt_merge_args;

/* The operands of a sink: a column of the softmax without a value, whose logit is the same for all queries of a head.
 */
typedef struct mt_sink_args {
    const mt_spans *spans;
    int64_t H, Dv, out_stride;
    const void *sinks; // [H] logits of `dtype`; NULL: all 0
    void *out;         // [Tq, H, Dv]: the forward scales it
    float *lse;        // [Tq, H]: the forward adds the sink
    const void *dout;  // [Tq, H, Dv], of the backward
    float *dsinks;     // [H] +=; NULL: frozen
} mt_sink_args;

/* The operands of accumulate_rows. */
typedef struct mt_accumulate_args {
    const mt_spans *spans;
    bool of_keys;  // the key rows of the spans; false: the query rows
    float *sum;    // [T, width]
    const void *x; // [T, width] of `dtype`
    int64_t width, x_stride;
    bool first;
} mt_accumulate_args;

#define MT_ATTENTION_OPERATIONS(OP)                                                                                    \
    /* out = softmax(scale q k^T) v per head, and lse. A query row of a span that sees no key gets out = 0 and lse =   \
     * -inf. */                                                                                                        \
    OP(attention_forward, mt_work_attention(a, 1, 1), (a, dtype, stream), const mt_attention *a, mt_dtype dtype,       \
       mt_stream *stream)                                                                                              \
    /* Writes dq, dk, dv for all rows of the spans; a key row of several spans receives the sum. Rows in no span are   \
     * not touched. */                                                                                                 \
    OP(attention_backward, mt_work_attention(a, 3, 2), (a, dtype, stream), const mt_attention *a, mt_dtype dtype,      \
       mt_stream *stream)                                                                                              \
    /* Context parallelism attends to blocks of keys one after another. Merges attention to some keys, out and lse,    \
     * with attention of the same queries to others, part and part_lse: with s = log(exp(lse) + exp(part_lse)), out =  \
     * exp(lse - s) out + exp(part_lse - s) part and lse = s; when `first`, out = part and lse = part_lse. For the     \
     * query rows of `spans` (Liu et al., "Ring attention with blockwise transformers"). */                            \
    OP(attention_merge,                                                                                                \
       mt_work_bytes(((a->first ? 4 : 8) + mt_dtype_size(dtype)) * mt_span_rows(a->spans, false) * a->H * a->Dv,       \
                     MT_U8),                                                                                           \
       (a, dtype, stream), const mt_merge_args *a, mt_dtype dtype, mt_stream *stream)                                  \
    /* Adds a sink to attention that ran without: with s = log(exp(lse) + exp(sink)), out *= exp(lse - s) and lse = s, \
     * for the query rows of `spans`, each in one span. attention_backward needs no more than this lse and out. */     \
    OP(sink_forward, mt_work_bytes(2 * mt_span_rows(a->spans, false) * a->H * a->Dv, dtype), (a, dtype, stream),       \
       const mt_sink_args *a, mt_dtype dtype, mt_stream *stream)                                                       \
    /* dsinks -= sum over queries of exp(sink - lse) (out dout). */                                                    \
    OP(sink_backward, mt_work_bytes(2 * mt_span_rows(a->spans, false) * a->H * a->Dv, dtype), (a, dtype, stream),      \
       const mt_sink_args *a, mt_dtype dtype, mt_stream *stream)                                                       \
    /* sum[t] += x[t], or = when `first`, for the key rows of `spans`, or their query rows. A key row is in one span   \
     * only. */                                                                                                        \
    OP(accumulate_rows,                                                                                                \
       mt_work_bytes(((a->first ? 4 : 8) + mt_dtype_size(dtype)) * mt_span_rows(a->spans, a->of_keys) * a->width,      \
                     MT_U8),                                                                                           \
       (a, dtype, stream), const mt_accumulate_args *a, mt_dtype dtype, mt_stream *stream)

/* ---- linear attention: short convolutions, the gated delta rule, the norm behind it */

/* States that a recurrence keeps between calls. In generation the slot of a span is k_start / slot_rows: a span that
 * has earlier tokens (k_len > q_len) begins with the state of its slot, another one with zeros; each leaves its last
 * state there. In context parallelism slot i has the state before span first[i], whose sequence begins on another rank,
 * and the state after span last[i] goes to another rank; -1: no span. Other spans begin with zeros, and none is kept.
 */
typedef struct mt_states {
    float *memory; // [slots, elements of a state]; NULL: no span has earlier tokens, and no state is kept
    int64_t slot_rows, slots;
    const int64_t *first, *last; // [slots] spans; NULL: generation
} mt_states;

/* One state that context parallelism passes on: `in` comes before the span last[slot] of mt_states and `out` is after
 * it; in the backward gradients, `in` of the state after first[slot] and `out` of the one before it. in NULL: the span
 * begins its sequence; in the backward: no rank continues it. */
typedef struct mt_carried_state {
    int64_t slot;
    const float *in;
    float *out;
} mt_carried_state;

/* The operands of a causal convolution over the tokens of a span, channel by channel (depthwise). */
typedef struct mt_conv_args {
    const mt_spans *spans;
    int64_t C, K;      // channels; taps, at most MT_MAX_TAPS
    const void *x;     // [T, C]
    const void *w;     // [C, K], the last tap is the token's own
    const void *bias;  // [C] or NULL
    void *y;           // [T, C]
    const void *dy;    // of the backward
    void *dx;          // [T, C]
    float *dw, *dbias; // [C, K] +=, [C] +=; NULL: frozen, or without bias
    int64_t x_stride, y_stride, dx_stride, dy_stride;
    bool silu;            // of the sum
    mt_states states;     // a state is [K - 1, C]: x of the tokens before; the backward reads those of other ranks only
    const float *dstates; // [slots, K - 1, C] of the states after the spans states.last, of the backward
} mt_conv_args;

enum { MT_MAX_TAPS = 8 };

/* The operands of the gated delta rule (Yang et al., "Gated delta networks"), and of Kimi delta attention (Kimi Team,
 * "Kimi Linear"), which has a decay for each channel of a key. A key head serves Hv / Hk adjacent value heads. */
typedef struct mt_delta_args {
    const mt_spans *spans;
    int64_t Hk, Hv, Dk, Dv;               // heads of q and k, and of v; their channels
    int64_t decays;                       // of a value head: 1, or Dk
    const void *q, *k, *v;                // [T, Hk, Dk], [T, Hk, Dk], [T, Hv, Dv]
    const void *b, *a;                    // [T, Hv] of beta, [T, Hv, decays]
    const void *A_log, *dt_bias;          // [Hv], [Hv, decays]
    void *out;                            // [T, Hv, Dv], without gaps
    const void *dout;                     // likewise
    void *dq, *dk, *dv, *db, *da;         // gradients of q, k, v, b, a
    float *dA_log, *ddt_bias;             // [Hv] +=, [Hv, decays] +=; NULL: frozen
    int64_t q_stride, k_stride, v_stride; // elements between tokens
    int64_t dq_stride, dk_stride, dv_stride;
    int64_t b_stride, a_stride, db_stride, da_stride;
    mt_states states;     // a state is [Hv, Dk, Dv]; the backward reads those of other ranks only
    const float *dstates; // [slots, Hv, Dk, Dv] of the states after the spans states.last, of the backward
    float *maps;          // [slots, Hv, Dk, Dv + Dk]: see delta_rule_map_forward
    float *dmaps;         // [slots, Hv, Dk, Dv]: see delta_rule_map_backward
} mt_delta_args;

/* The operands of the scan of Mamba-2 (Dao & Gu, "Transformers are SSMs"). A group's B and C serve H / G adjacent
 * heads. */
typedef struct mt_ssd_args {
    const mt_spans *spans;
    int64_t G, H, N, P;              // groups; heads; rows and columns of a head's state
    const void *x, *B, *C;           // [T, H, P], [T, G, N], [T, G, N], `stride` between tokens
    const void *dt;                  // [T, H] of the step, dt_stride between tokens
    const void *A_log, *D, *dt_bias; // [H]
    float dt_min, dt_max;            // the step is cut to [dt_min, dt_max]
    void *out;                       // [T, H, P], without gaps
    const void *dout;                // likewise
    void *dx, *dB, *dC;              // gradients of x, B and C, dstride between tokens
    void *ddt;                       // [T, H] of dt, ddt_stride between tokens
    float *dA_log, *dD, *ddt_bias;   // [H] +=; NULL: frozen
    int64_t stride, dstride, dt_stride, ddt_stride;
    mt_states states;     // a state is [H, N, P]; the backward reads those of other ranks only
    const float *dstates; // [slots, H, N, P] of the states after the spans states.last, of the backward
    float *maps;          // [slots, H, N P + 1]: see ssd_map_forward
    float *dmaps;         // [slots, H, N, P]: see ssd_map_backward
} mt_ssd_args;

/* The operands of a norm of the heads of linear attention, gated. */
typedef struct mt_gated_norm_args {
    int64_t T, H, D; // tokens, heads (or groups of heads), channels of a head
    const void *x;   // [T, H, D]
    const void *z;   // [T, H, D], z_stride between tokens
    const void *w;   // [D], or with weight_per_head [H, D]
    float *rstd;     // [T, H]: the forward writes it, the backward reads it
    void *y;         // [T, H, D]
    const void *dy;  // [T, H, D]
    void *dx, *dz;   // [T, H, D]; of z with dz_stride
    float *dw;       // as w, +=; NULL: frozen
    int64_t z_stride, dz_stride;
    float eps;
    bool gate_first, weight_per_head;
    bool sigmoid;       // the gate is sigmoid(z), behind the norm; else SiLU
    const float *means; // gate_first, where other ranks have more channels of a head: [T, H], over all channels, of u^2
                        // (forward) or dy w u (backward) with u = x silu(z); NULL: computed here
} mt_gated_norm_args;

/* The operands of a product, element by element. */
typedef struct mt_multiply_args {
    int64_t T, C;      // tokens, channels
    const void *x, *z; // [T, C]
    void *y;
    const void *dy; // of the backward
    void *dx, *dz;
    int64_t x_stride, z_stride, y_stride;    // elements between tokens
    int64_t dx_stride, dz_stride, dy_stride; // likewise
} mt_multiply_args;

/* The operands of a gate on attention's output. */
typedef struct mt_gate_args {
    int64_t n;         // elements of each
    const void *x, *z; // attention's output, and the gate
    void *y;
    const void *dy;
    void *dx, *dz; // dx may be dy
} mt_gate_args;

#define MT_LINEAR_ATTENTION_OPERATIONS(OP)                                                                             \
    /* y[t, c] = f(bias[c] + sum over j of w[c, j] x[t - (K - 1) + j, c]), where x before the span is 0 or its state;  \
     * f is SiLU or nothing. */                                                                                        \
    OP(short_conv_forward, mt_work_bytes(2 * mt_span_rows(a->spans, false) * a->C, dtype), (a, dtype, stream),         \
       const mt_conv_args *a, mt_dtype dtype, mt_stream *stream)                                                       \
    OP(short_conv_backward, mt_work_bytes(3 * mt_span_rows(a->spans, false) * a->C, dtype), (a, dtype, stream),        \
       const mt_conv_args *a, mt_dtype dtype, mt_stream *stream)                                                       \
    /* The state after a slot's last span from the one before it, and the gradient of the state before its first span  \
     * from that after it. */                                                                                          \
    OP(short_conv_carry_forward, mt_work_bytes(2 * (a->K - 1) * a->C, MT_F32), (a, state, dtype, stream),              \
       const mt_conv_args *a, const mt_carried_state *state, mt_dtype dtype, mt_stream *stream)                        \
    OP(short_conv_carry_backward, mt_work_bytes(2 * (a->K - 1) * a->C, MT_F32), (a, state, dtype, stream),             \
       const mt_conv_args *a, const mt_carried_state *state, mt_dtype dtype, mt_stream *stream)                        \
    /* Of each value head, token by token from S = 0 before a span: S = exp(g) S; S += k (beta (v - S^T k))^T; out =   \
     * S^T q, where g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), and q and k are divided by their length, \
     * sqrt(sum of squares + 1e-6), q by sqrt(Dk) too. With Dk decays, each is that of a row of S. */                  \
    OP(delta_rule_forward, mt_work_product(mt_span_rows(a->spans, false) * a->Hv, a->Dk, 3 * a->Dv),                   \
       (a, dtype, stream), const mt_delta_args *a, mt_dtype dtype, mt_stream *stream)                                  \
    OP(delta_rule_backward, mt_work_product(mt_span_rows(a->spans, false) * a->Hv, a->Dk, 6 * a->Dv),                  \
       (a, dtype, stream), const mt_delta_args *a, mt_dtype dtype, mt_stream *stream)                                  \
    /* The states of context parallelism. A span maps the state S before it to S_local + M S after it: writes          \
     * [S_local, M] of each slot's last span to `maps`; M = 0 where that span begins its sequence. */                  \
    OP(delta_rule_map_forward, mt_work_product(mt_span_rows(a->spans, false) * a->Hv, a->Dk, 2 * (a->Dv + a->Dk)),     \
       (a, dtype, stream), const mt_delta_args *a, mt_dtype dtype, mt_stream *stream)                                  \
    /* The gradient of the state before each slot's first span, as far as its own outputs give it, to dmaps. */        \
    OP(delta_rule_map_backward, mt_work_product(mt_span_rows(a->spans, false) * a->Hv, a->Dk, 3 * a->Dv),              \
       (a, dtype, stream), const mt_delta_args *a, mt_dtype dtype, mt_stream *stream)                                  \
    /* out = S_local + M in; out = dmaps + M^T in, the latter if one span is the slot's first and last. */             \
    OP(delta_rule_carry_forward, mt_work_product(a->Hv * a->Dk, a->Dk, a->Dv), (a, state, dtype, stream),              \
       const mt_delta_args *a, const mt_carried_state *state, mt_dtype dtype, mt_stream *stream)                       \
    OP(delta_rule_carry_backward, mt_work_product(a->Hv * a->Dk, a->Dk, a->Dv), (a, state, dtype, stream),             \
       const mt_delta_args *a, const mt_carried_state *state, mt_dtype dtype, mt_stream *stream)                       \
    /* y = x / sqrt(mean(x^2) + eps) w silu(z), each head by itself; gate_first: u / sqrt(mean(u^2) + eps) w, where    \
     * u = x silu(z). */                                                                                               \
    OP(gated_norm_forward, mt_work_bytes(3 * a->T * a->H * a->D, dtype), (a, dtype, stream),                           \
       const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream)                                                 \
    OP(gated_norm_backward, mt_work_bytes(5 * a->T * a->H * a->D, dtype), (a, dtype, stream),                          \
       const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream)                                                 \
    /* means[T, H] of u^2, or with dy of dy w u, over these channels: see mt_gated_norm_args. */                       \
    OP(gated_norm_means, mt_work_bytes(2 * a->T * a->H * a->D, dtype), (a, means, dtype, stream),                      \
       const mt_gated_norm_args *a, float *means, mt_dtype dtype, mt_stream *stream)                                   \
    /* y = x z. */                                                                                                     \
    OP(multiply_forward, mt_work_bytes(3 * a->T * a->C, dtype), (a, dtype, stream), const mt_multiply_args *a,         \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    OP(multiply_backward, mt_work_bytes(5 * a->T * a->C, dtype), (a, dtype, stream), const mt_multiply_args *a,        \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* x[t, c] *= factor, of T rows of C that are `stride` apart. */                                                   \
    OP(scale_rows, mt_work_bytes(2 * T * C, dtype), (x, factor, T, C, stride, dtype, stream), void *x, float factor,   \
       int64_t T, int64_t C, int64_t stride, mt_dtype dtype, mt_stream *stream)                                        \
    /* y = x sigmoid(z). */                                                                                            \
    OP(gate_forward, mt_work_bytes(3 * a->n, dtype), (a, dtype, stream), const mt_gate_args *a, mt_dtype dtype,        \
       mt_stream *stream)                                                                                              \
    OP(gate_backward, mt_work_bytes(5 * a->n, dtype), (a, dtype, stream), const mt_gate_args *a, mt_dtype dtype,       \
       mt_stream *stream)

/* ---- Mamba-2 */

#define MT_SSD_OPERATIONS(OP)                                                                                          \
    /* Of each head, token by token from S = 0 before a span: S = exp(step A) S + step B x^T; out = S^T C + D x, where \
     * A = -exp(A_log) and step = softplus(dt + dt_bias), cut to its range, which gives no gradient beyond. */         \
    OP(ssd_forward, mt_work_product(mt_span_rows(a->spans, false) * a->H, a->N, 2 * a->P), (a, dtype, stream),         \
       const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream)                                                        \
    OP(ssd_backward, mt_work_product(mt_span_rows(a->spans, false) * a->H, a->N, 4 * a->P), (a, dtype, stream),        \
       const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream)                                                        \
    /* The states of context parallelism. A span maps the state S before it to S_local + f S after it: writes S_local  \
     * and the factor f of each slot's last span to `maps`. */                                                         \
    OP(ssd_map_forward, mt_work_product(mt_span_rows(a->spans, false) * a->H, a->N, a->P), (a, dtype, stream),         \
       const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream)                                                        \
    /* The gradient of the state before each slot's first span, as far as its own outputs give it, to dmaps. */        \
    OP(ssd_map_backward, mt_work_product(mt_span_rows(a->spans, false) * a->H, a->N, a->P), (a, dtype, stream),        \
       const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream)                                                        \
    /* out = S_local + f in; out = dmaps + f in, the latter if one span is the slot's first and last. */               \
    OP(ssd_carry_forward, mt_work_bytes(3 * a->H * a->N * a->P, MT_F32), (a, state, dtype, stream),                    \
       const mt_ssd_args *a, const mt_carried_state *state, mt_dtype dtype, mt_stream *stream)                         \
    OP(ssd_carry_backward, mt_work_bytes(3 * a->H * a->N * a->P, MT_F32), (a, state, dtype, stream),                   \
       const mt_ssd_args *a, const mt_carried_state *state, mt_dtype dtype, mt_stream *stream)

/* The indexer of sparse attention (DeepSeek-AI, "DeepSeek-V3.2"). Query row t and key j of its span have the score
 *
 *   I[t, j] = scale sum_h weights[t, h] max(q[t, h] . k[j], 0)
 *
 * and the query attends to the keys of the topk greatest scores that it sees; `ties` selects among equal scores. A
 * query row is one of the spans' rows [first_row, first_row + rows): those of this rank. */
typedef struct mt_indexer_args {
    const mt_spans *spans;
    mt_pages pages;          // of the keys; the forward only
    int64_t first_row, rows; // of queries
    int64_t H, D, topk;
    mt_indexer_ties ties;
    const int64_t *lengths; // [spans] keys of the whole sequence of a span, which MT_TIES_TORCH counts; NULL: k_len
    int64_t longest;        // of `lengths`
    float scale;
    const void *q;       // [rows, H, D]
    const void *k;       // [Tk, D]
    const void *weights; // [rows, H]
    int32_t *selected;   // [rows, topk]: the forward's result: numbers of keys in the span, ascending, then -1
    /* Attention's queries [Tq, attention_q_stride]. No number passes from scores to attention but the choice, so where
     * a score that decides is not a number, the forward makes the first element of the query NaN. NULL: not. */
    void *attention_q;
    int64_t attention_q_stride;
    /* the loss of a block of query rows: see mt_sparse_attention.shares */
    int64_t block, block_rows;  // [block, block + block_rows): those of other ranks are left out
    int64_t width;              // columns of shares and slopes
    bool all_keys;              // column j is key j; else the j-th selected key
    const int64_t *token_index; // [Tq] negative: padding, which is left out
    const float *shares;        // [block_rows, width]: the target, times the number of heads
    float *slopes;              // [block_rows, width]: scratch
    float coeff;                // of the loss
    double *sums;               // [2] += the loss without coeff, and the number of its queries
    void *dq, *dweights;        // gradients, as their operands
    float *dk;                  // [Tk, D] +=
} mt_indexer_args;

/* Attention of each query over the keys selected[Tq, topk] of its span, as in mt_indexer_args. */
typedef struct mt_sparse_attention {
    mt_attention attention;
    const int32_t *selected;
    int64_t topk;
    /* sparse_attention_shares: of query rows [block, block + block_rows), as in mt_indexer_args */
    int64_t block, block_rows, width;
    bool all_keys;
    float *shares; // [block_rows, width]: sums over the heads here of the probabilities of the keys
} mt_sparse_attention;

/* Operations of layers in plain C alone, for the check_limits of a kind to refuse on other devices: none now. */
#define MT_PLAIN_LAYER_OPERATIONS(OP)

#define MT_SPARSE_ATTENTION_OPERATIONS(OP)                                                                             \
    OP(indexer_forward, mt_work_indexer(a, 1), (a, dtype, stream), const mt_indexer_args *a, mt_dtype dtype,           \
       mt_stream *stream)                                                                                              \
    /* The loss of each query is the Kullback-Leibler divergence of its shares, divided by their sum, from the softmax \
     * of its scores, over the same keys. */                                                                           \
    OP(indexer_backward, mt_work_indexer(a, 3), (a, dtype, stream), const mt_indexer_args *a, mt_dtype dtype,          \
       mt_stream *stream)                                                                                              \
    OP(sparse_attention_forward, mt_work_sparse_attention(a, 1, 1), (a, dtype, stream), const mt_sparse_attention *a,  \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* dq of all query rows, dk and dv of the key rows, in spans; the keys of two spans begin with the same row, or    \
     * are disjoint. */                                                                                                \
    OP(sparse_attention_backward, mt_work_sparse_attention(a, 3, 2), (a, dtype, stream), const mt_sparse_attention *a, \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    OP(sparse_attention_shares, mt_work_sparse_attention(a, 1, 0), (a, dtype, stream), const mt_sparse_attention *a,   \
       mt_dtype dtype, mt_stream *stream)

/* ---- activations */

/* A gated activation has x[T, 2F]: the gate, then up. */
typedef struct mt_activation_args {
    int64_t T, F;
    mt_activation activation;
    const void *x;        // [T, F] or [T, 2F]
    const float *weights; // [T], which scale y; NULL: none
    void *y;              // [T, F]: the forward's result
    const void *dy;       // [T, F]: gradient of y
    void *dx;             // as x: the backward's result
    float *dweights;      // [T]; NULL without weights
    /* if quantize.rows is set: the result, rounded to the dtype first, goes to these rows in fp8 instead of y or dx,
     * and the memory of y or dx may have room for them only. bf16; quantize has a scale; dx is not x then */
    mt_quantize_args quantize;
    mt_glu glu; // of a gated activation
} mt_activation_args;

#define MT_ACTIVATION_OPERATIONS(OP)                                                                                   \
    /* y[T, F] = f(x[T, F]); gated: f(gate) * up, with x[T, 2F] = gate, then up (Shazeer, "GLU variants improve        \
     * transformer"). Unless weights[T] is NULL it scales y: an expert's probabilities, so that the backward does not  \
     * need the expert's output. GELU is exact (erf), GELU_TANH its approximation (Hendrycks & Gimpel);                \
     * QUICK_GEGLU has f(x) = x sigmoid(1.702 x). */                                                                   \
    OP(activation_forward,                                                                                             \
       mt_work_bytes((mt_activation_rows[a->activation].gated ? 3 : 2) * a->T * a->F * mt_dtype_size(dtype) -          \
                         (a->quantize.rows.data ? a->quantize.R * a->quantize.C : 0),                                  \
                     MT_U8),                                                                                           \
       (a, dtype, stream), const mt_activation_args *a, mt_dtype dtype, mt_stream *stream)                             \
    /* dx may be x, or dy where that is as wide. dweights[T] = sum(dy f(x)), of the unscaled result; NULL without      \
     * weights. */                                                                                                     \
    OP(activation_backward,                                                                                            \
       mt_work_bytes((mt_activation_rows[a->activation].gated ? 5 : 3) * a->T * a->F * mt_dtype_size(dtype) -          \
                         (a->quantize.rows.data ? a->quantize.R * a->quantize.C : 0),                                  \
                     MT_U8),                                                                                           \
       (a, dtype, stream), const mt_activation_args *a, mt_dtype dtype, mt_stream *stream)

/* ---- residual stream, and rows: key/value caches, packing, the last tokens of prompts */

typedef struct mt_dropout_add_args {
    int64_t T, C, first_channel;
    const int64_t *token_index; // [T]
    const void *x, *residual;   // [T, C]; residual may be NULL, and is in a backward
    void *out;                  // [T, C]; may be x or residual
    mt_dropout dropout;
} mt_dropout_add_args;

/* T rows of `width` elements that move between `from` and `to`. index[T] numbers the rows of `to` in a scatter, and
 * those of `from` in a gather. */
typedef struct mt_row_args {
    int64_t T, width;
    const int32_t *index;
    const void *from;
    void *to;
    int64_t from_stride, to_stride; // elements between rows; 0: width
    int64_t count;                  // rows of `to`; scatter_add_rows only
} mt_row_args;

#define MT_ROW_OPERATIONS(OP)                                                                                          \
    /* out[T, C] = residual + dropout(x). With i = first_channel + c, element (t, c) is kept when word i % 4 of Philox \
     * at (token_index[t], i / 4) is at least the integer part of p 2^32, and then scaled by 1 / (1 - p). */           \
    OP(dropout_add_forward, mt_work_bytes((a->residual ? 3 : 2) * a->T * a->C, dtype), (a, dtype, stream),             \
       const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream)                                                \
    /* out = dropout(x): x is the gradient of the sum and of the residual, out that of the forward's x. */             \
    OP(dropout_add_backward, mt_work_bytes(2 * a->T * a->C, dtype), (a, dtype, stream), const mt_dropout_add_args *a,  \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* y[n] = a[n] + b[n], in fp32 and rounded once; y may be a or b. */                                               \
    OP(add, mt_work_bytes(3 * n, dtype), (y, a, b, n, dtype, stream), void *y, const void *a, const void *b,           \
       int64_t n, mt_dtype dtype, mt_stream *stream)                                                                   \
    /* x[n] *= factor, in fp32 and rounded once. */                                                                    \
    OP(scale, mt_work_bytes(2 * n, dtype), (x, factor, n, dtype, stream), void *x, float factor, int64_t n,            \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* to[index[t]] = from[t]. */                                                                                      \
    OP(scatter_rows, mt_work_bytes(2 * a->T * a->width, dtype), (a, dtype, stream), const mt_row_args *a,              \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* to[index[t]] += from[t] in a fixed order; to[count, width] is fp32. index[t] < 0 adds nothing. Rows are packed: \
     * no strides. */                                                                                                  \
    OP(scatter_add_rows, mt_work_bytes((a->T * a->width), dtype), (a, dtype, stream), const mt_row_args *a,            \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* to[t] = from[index[t]], or zeros where index[t] < 0. */                                                         \
    OP(gather_rows, mt_work_bytes(2 * a->T * a->width, dtype), (a, dtype, stream), const mt_row_args *a,               \
       mt_dtype dtype, mt_stream *stream)

/* ---- mixture of experts: a router chooses k of E experts for every token. Each choice becomes a row; rows are sorted
 * by expert and pass through linear layers grouped by expert; every token sums its rows. Choice -1: dropped. */

/* The choice of experts and their weights, as Megatron's topk_routing_with_score_function. Scores are the softmax of
 * the logits, or with pre_softmax false the logits themselves, with the softmax over the chosen ones; or each expert's
 * own: sigmoids, or square roots of softplus(x) = log(1 + exp(x)), which are then divided by the sum of the chosen
 * ones + 1e-20 where topk > 1. A bias is added to such scores, or to the softmax of all logits, and decides on the
 * choice alone. With num_groups > 0 only experts of the group_topk groups whose group_best best scores have the
 * greatest sums can be chosen (DeepSeek-AI, "DeepSeek-V3"). Among equals the lowest number wins. */
typedef struct mt_router {
    int64_t num_experts, topk; // E, k
    mt_score_function score;
    bool pre_softmax;
    int64_t num_groups, group_topk;
    int64_t group_best;  // scores of a group that are summed; 0: topk / group_topk
    float scaling;       // of the probabilities; 1: none
    bool bias_of_logits; // the bias of the choice is added to the logits: experts are chosen by these sums; no groups
} mt_router;

/* Operands of a router. The comment of an operation names its operands; it does not read the others. */
typedef struct mt_route_args {
    int64_t T;
    const mt_router *router;
    const float *logits;        // [T, E]
    const float *bias;          // [E], added to the scores (or logits) for the choice only; NULL: none
    const int64_t *token_index; // [T] negative: padding, whose k choices are -1 with probability 0; NULL: none
    int64_t first, count;       // route_sinkhorn: the tokens of the result
    float *probs;               // [T, k], of route_sinkhorn [count, k]: a result of the forward
    int32_t *experts;           // as probs, the greatest score first: a result of the forward, read by the backward
    int32_t *invalid;           // [1] += tokens of the result whose logits are not all finite
    const float *dprobs;        // [T, k]: gradient of probs
    float *dlogits;             // [T, E]: gradient of logits, the backward's result
} mt_route_args;

/* The choices of tokens; an expert keeps at most `capacity` of them. */
typedef struct mt_drop_args {
    int64_t T, k, first, count, capacity;
    const int32_t *experts;     // [T, k] choices
    const float *probs;         // [T, k]; NULL: by position
    const int64_t *token_index; // [T]
    int32_t *kept;              // [count, k]
} mt_drop_args;

/* The auxiliary loss of S sequences; token t is in sequence[t], or in the only one where that is NULL. */
typedef struct mt_aux_loss_args {
    int64_t S, T;
    const mt_router *router;
    const float *logits;        // [T, E]
    const int32_t *sequence;    // [T]
    const int64_t *token_index; // [T] negative: padding, which is left out; NULL: none
    float *sums;                // [2, S, E]: the forward's results
    double *z_sum;              // [1] +=
    const float *counts;        // [S, E]: sums[1], constants of the backward
    float aux_scale, z_scale;
    float *dlogits; // [T, E] +=: gradient of logits
} mt_aux_loss_args;

/* Operands of quantile_sums; see quantile_bias_step. */
typedef struct mt_quantile_args {
    int64_t T, E, k;
    const float *logits;        // [T, E]
    const float *bias;          // [E]
    const int64_t *token_index; // [T] negative: padding, which is left out
    float *sums;                // [E + 1] +=: quantiles, and 1
} mt_quantile_args;

/* The most rounds of Sinkhorn's iteration (route_sinkhorn). */
enum { MT_SINKHORN_ROUNDS = 1000 };

#define MT_ROUTER_OPERATIONS(OP)                                                                                       \
    /* As linear_forward, in fp32 for any type of x, w and bias: y[T, N] is fp32. Its backward is that of a linear     \
     * layer. */                                                                                                       \
    OP(router_logits, mt_work_product(a->T, a->N, a->K), (a, dtype, stream), const mt_linear_args *a, mt_dtype dtype,  \
       mt_stream *stream)                                                                                              \
    /* logits[T, E]: normal numbers in place of the router's, for benchmarks (as Megatron's RandomSTE: the gradient of \
     * the drawn ones goes to the router's). Number e of a token is number e % 4 of the Philox counter                 \
     * (token_index[t], e / 4), converted as in random_normal. */                                                      \
    OP(random_logits, mt_work_bytes(T *E, MT_F32), (logits, token_index, T, E, key, stream), float *logits,            \
       const int64_t *token_index, int64_t T, int64_t E, uint64_t key, mt_stream *stream)                              \
    /* probs and experts from logits. Tokens whose logits are not all finite choose experts 0 to k - 1 with NaN        \
     * probabilities. */                                                                                               \
    OP(route_forward, mt_work_bytes((a->router->num_experts + 2 * a->router->topk) * a->T, MT_F32), (a, stream),       \
       const mt_route_args *a, mt_stream *stream)                                                                      \
    /* The same for rows [first, first + count) of T, with a choice that balances all T tokens: the rows and columns   \
     * of cost = exp(logits) are scaled in turn until they sum to 1 / T and 1 / E, and a token's experts are those of  \
     * its k greatest scaled costs (Sinkhorn & Knopp, "Concerning nonnegative matrices and doubly stochastic           \
     * matrices"; as Megatron's sinkhorn, with its 1e-8 beside every sum, until the columns' factors change by 1e-4 at \
     * most on the mean, or MT_SINKHORN_ROUNDS times). Sums are in float64: the order of tokens does not matter.       \
     * Tokens that are not finite, and padding, are left out. No groups, no bias; sigmoids with topk 1, or             \
     * pre_softmax. */                                                                                                 \
    OP(route_sinkhorn, mt_work_bytes(2 * a->count * a->router->topk + a->T * a->router->num_experts, MT_F32),          \
       (a, stream), const mt_route_args *a, mt_stream *stream)                                                         \
    /* dlogits from dprobs, experts and logits: zero where an expert neither was chosen nor takes part in the softmax; \
     * a token of choices -1 has none. */                                                                              \
    OP(route_backward, mt_work_bytes(2 * a->T * (a->router->num_experts + a->router->topk), MT_F32), (a, stream),      \
       const mt_route_args *a, mt_stream *stream)                                                                      \
    /* The numbers of the auxiliary loss. sums[0, S, E] = sums over tokens of the scores (softmax of the logits, or    \
     * own scores divided by their sum + 1e-20), sums[1, S, E] = number of tokens that have expert e among their k     \
     * greatest scores, without groups and bias. z_sum[0] += sum of logsumexp(logits)^2. Sums are in float64. */       \
    OP(aux_loss_forward, mt_work_bytes((a->T + 2 * a->S) * a->router->num_experts, MT_F32), (a, stream),               \
       const mt_aux_loss_args *a, mt_stream *stream)                                                                   \
    /* loss[0] += sum over sequences of E (sum_e sums[0, s, e] sums[1, s, e]) / (sum_e sums[1, s, e]): the tokens of a \
     * sequence times its auxiliary loss (Fedus et al., "Switch transformers"). Sequences without tokens add           \
     * nothing. */                                                                                                     \
    OP(aux_loss_value, mt_work_bytes(2 * S * E, MT_F32), (loss, sums, S, E, stream), double *loss, const float *sums,  \
       int64_t S, int64_t E, mt_stream *stream)                                                                        \
    /* dlogits[T, E] += aux_scale times the gradient of that loss, for counts[S, E] as constants, and z_scale times    \
     * that of z_sum. */                                                                                               \
    OP(aux_loss_backward, mt_work_bytes(3 * a->T * a->router->num_experts, MT_F32), (a, stream),                       \
       const mt_aux_loss_args *a, mt_stream *stream)                                                                   \
    /* loads[E] += occurrences of each expert in experts[n]; -1 is none. Whole numbers, exact below 2^24. */           \
    OP(count_experts, mt_work_bytes(n, MT_F32), (loads, experts, n, E, stream), float *loads, const int32_t *experts,  \
       int64_t n, int64_t E, mt_stream *stream)                                                                        \
    /* kept for rows [first, first + count): the choice, or -1 where `capacity` others of the same expert precede it:  \
     * those of greater probability, or all without probs; equals are ordered by token_index, then by row. */          \
    OP(drop_tokens, mt_work_bytes((a->probs ? 2 : 1) * a->T * a->k + 2 * a->T + a->count * a->k, MT_F32), (a, stream), \
       const mt_drop_args *a, mt_stream *stream)                                                                       \
    /* bias[E] += rate sign(mean of loads - loads[e]) (Wang et al., "Auxiliary-loss-free load balancing"), unless      \
     * scale[0] < 0: the step was bad. */                                                                              \
    OP(expert_bias_step, mt_work_bytes(3 * E, MT_F32), (bias, loads, scale, E, rate, stream), float *bias,             \
       const float *loads, const float *scale, int64_t E, float rate, mt_stream *stream)                               \
    /* Quantile balancing, as Megatron's qb_dual_update: with alpha = the (k + 1)-th greatest of a token's logits +    \
     * bias, sums[e] += the (T k / E + 1)-th greatest of logits[e] - alpha over the tokens, and sums[E] += 1. A bias   \
     * of minus this quantile gives every expert T k / E tokens, if alpha stays. Tokens that are not finite, and       \
     * padding, are left out. */                                                                                       \
    OP(quantile_sums, mt_work_bytes(3 * a->T * a->E, MT_F32), (a, stream), const mt_quantile_args *a,                  \
       mt_stream *stream)                                                                                              \
    /* bias[E] = ema bias - (1 - ema) sums / sums[E], less its mean, unless scale[0] < 0: the step was bad. */         \
    OP(quantile_bias_step, mt_work_bytes(3 * E, MT_F32), (bias, sums, scale, E, ema, stream), float *bias,             \
       const float *sums, const float *scale, int64_t E, double ema, mt_stream *stream)

/* The order of rows, for experts [first, first + count). num_local consecutive experts are on one rank, or on `copies`
 * ranks that share them and all receive every choice. Rows are sorted by destination, a pair of expert e and copy:
 * d = ((e - first) / num_local copies + copy) num_local + (e - first) % num_local, 0 <= d < count copies. With capacity
 * > 0 each destination has room for that many rows, else rows are packed. */
typedef struct mt_dispatch {
    int64_t topk, first, count, num_local, copies, capacity;
} mt_dispatch;

/* The rows of T tokens' choices: M rows, sorted by destination. */
typedef struct mt_dispatch_args {
    int64_t T, M;
    const mt_dispatch *dispatch;
    const int32_t *experts;          // [T, k] choices
    int32_t *offsets;                // [count copies + 1]: the first row of each destination
    int32_t *position;               // [T, k copies]: the row of (token, choice, copy); -1: none
    int32_t *row_choice, *row_token; // [M]: of each row, t k + j and t; -1: a row without token
} mt_dispatch_args;

/* Sums of n rows a token. */
typedef struct mt_combine_args {
    int64_t T, n, C;
    const void *in;          // [rows, C]
    const int32_t *position; // [T, n] rows of `in`; negative: adds nothing
    const void *base;        // [T, C], may be out; NULL: zeros
    void *out;               // [T, C]
} mt_combine_args;

/* M rows of C elements, each with a weight. */
typedef struct mt_scale_rows_args {
    int64_t M, C;
    const float *weights; // [M]
    const void *x;        // [M, C]
    void *y;              // [M, C], may be x: the forward's result
    const void *dy;       // [M, C]: gradient of y
    void *dx;             // [M, C], may be dy or x: gradient of x
    float *dweights;      // [M]: gradient of weights
} mt_scale_rows_args;

/* Linear layers of E experts: rows [offsets[e], offsets[e + 1]) with w[e]. offsets[E + 1] is on the device, ascends,
 * and offsets[E] <= M, the allocated rows. Rows of no expert are not written, and their contents do not affect results.
 * Without offsets E is 1: one weight for all M rows. */
typedef struct mt_grouped_args {
    int64_t M, N, K, E;
    const int32_t *offsets;
    const void *x, *w;           // [M, K], [E, N, K]
    void *y;                     // [M, N]: the forward's result
    const void *dy;              // [M, N]: gradient of y
    void *dx;                    // [M, K]: the result of backward_input
    float *dw;                   // [E, N, K]: the result of backward_weight
    bool accumulate;             // the result +=; y and dx only with strides
    float scale;                 // of the product, for y and dx; 0: 1
    int64_t x_stride;            // elements between rows of x and dx; 0: K
    int64_t y_stride;            // of y and dy; 0: N
    const int32_t *host_offsets; // offsets on the host too: one product per expert; NULL: one for all
} mt_grouped_args;

#define MT_EXPERT_OPERATIONS(OP)                                                                                       \
    /* offsets, position, row_choice and row_token from experts. position is -1 where the choice is -1 or not of these \
     * experts, or without room. The rows of a destination are in token order. M is count copies capacity, or at least \
     * the number of choices. */                                                                                       \
    OP(dispatch_plan, mt_work_bytes((1 + a->dispatch->copies) * a->T * a->dispatch->topk + 2 * a->M, MT_F32),          \
       (a, stream), const mt_dispatch_args *a, mt_stream *stream)                                                      \
    /* For rows that arrive from `sources` ranks, counts[sources, local] for each expert here, one source after        \
     * another and within it sorted by expert: to_expert[m] is the arrived row that is row m when all are sorted by    \
     * expert, then source; from_expert is the inverse; offsets[local + 1], the first row of each expert. M is the sum \
     * of counts. */                                                                                                   \
    OP(exchange_order, mt_work_bytes(2 * M, MT_F32),                                                                   \
       (to_expert, from_expert, offsets, counts, sources, local, M, stream), int32_t *to_expert, int32_t *from_expert, \
       int32_t *offsets, const int32_t *counts, int64_t sources, int64_t local, int64_t M, mt_stream *stream)          \
    /* out[T, C] = base[T, C] + the sum of rows in[position[t, i]] for i < n, in fp32 and in this order. The backward  \
     * of gather_rows, and gather_rows is its backward. The work counts every position as a row: the host does not     \
     * know their number. */                                                                                           \
    OP(combine_rows, mt_work_bytes((a->n + (a->base ? 2 : 1)) * a->T * a->C, dtype), (a, dtype, stream),               \
       const mt_combine_args *a, mt_dtype dtype, mt_stream *stream)                                                    \
    /* y = x w^T; the work counts M rows. */                                                                           \
    OP(grouped_linear_forward, mt_work_product(a->M, a->N, a->K), (a, dtype, stream), const mt_grouped_args *a,        \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* dx = dy w. */                                                                                                   \
    OP(grouped_linear_backward_input, mt_work_product(a->M, a->N, a->K), (a, dtype, stream), const mt_grouped_args *a, \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* dw = dy^T x of each expert's rows, in fp32, or +=; zero for an expert without rows. */                          \
    OP(grouped_linear_backward_weight, mt_work_product(a->M, a->N, a->K), (a, dtype, stream),                          \
       const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream)                                                    \
    /* y[M, N] += bias[E, N] of each row's expert. */                                                                  \
    OP(grouped_bias_forward, mt_work_bytes(2 * M * N, dtype), (y, bias, offsets, M, N, E, dtype, stream), void *y,     \
       const void *bias, const int32_t *offsets, int64_t M, int64_t N, int64_t E, mt_dtype dtype, mt_stream *stream)   \
    /* dbias[E, N] += column sums of dy over each expert's rows, in fp32. */                                           \
    OP(grouped_bias_backward, mt_work_bytes(M *N, dtype), (dbias, dy, offsets, M, N, E, dtype, stream), float *dbias,  \
       const void *dy, const int32_t *offsets, int64_t M, int64_t N, int64_t E, mt_dtype dtype, mt_stream *stream)     \
    /* y[M, C] = weights[M] x[M, C]. The activation's weights replace it where possible. */                            \
    OP(scale_rows_forward, mt_work_bytes(2 * a->M * a->C, dtype), (a, dtype, stream), const mt_scale_rows_args *a,     \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* dx[M, C] = weights dy and dweights[M] = sum(dy x). */                                                           \
    OP(scale_rows_backward, mt_work_bytes(3 * a->M * a->C, dtype), (a, dtype, stream), const mt_scale_rows_args *a,    \
       mt_dtype dtype, mt_stream *stream)

/* ---- cross-entropy of a vocabulary that ranks may share; sampling, for generation */

/* The cross-entropy of T tokens over logits [T, stride]. This rank's first `count` columns are rows [first, first +
 * count) of the vocabulary; columns past them are padding without probability. */
typedef struct mt_cross_entropy_args {
    int64_t T, stride, first, count;
    float logit_scale;             // of the logits below, before all else: 1 / temperature; 0: 1
    float loss_scale;              // of dlogp and dentropy; 0: 1
    const void *logits;            // [T, stride]
    const int32_t *labels;         // [T]
    float *stats;                  // [4, T] of a row: the maximum, sum exp(x - max), the label's logit (0 where another
                                   // rank holds it), sum exp(x - max) x; [3, T] without entropy
    float *logp;                   // [T] log-probability of the label
    float *entropy;                // [T] of the distribution, in nats; NULL: not wanted
    bool squares;                  // on the CPU, without dentropy: `entropy` is the sum of p^2 instead
    float *lse;                    // [T] log-sum-exp of the logits: the backward reads it, and entropy with dentropy
    const float *dlogp, *dentropy; // [T] derivatives of the loss by logp and entropy; dentropy NULL: 0
    void *dlogits;                 // [T, stride]: the backward's result; may be logits
    float *parts;                  // [ranks, 4, T] scratch of mt_vocab_cross_entropy_forward, with several ranks
} mt_cross_entropy_args;

/* How a token is sampled. The scores are the logits; temperature 0 takes their argmax. top_k 0, top_p 1, min_p 0 and
 * repetition_penalty 0 or 1 change nothing. */
typedef struct mt_sampling {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
    uint64_t seed;
    bool logprobs;    // compute mt_sampled.logp
    float logp_scale; // of the logits in it: 1 / temperature where training scales them so; 0: 1
    /* on the CPU: mt_sampled.logp has the bits of a cross-entropy over ranks with this number of columns of the
     * vocabulary each; 0: it is nearer to the exact value */
    int64_t training_columns;
} mt_sampling;

/* A sampled token. Training needs `logp`, the model's own log-probability: log softmax(logp_scale logits)[token].
 * sampled_logp is that of the distribution of the draw: after repetition penalty, temperature, top-k, top-p and min-p.
 */
typedef struct mt_sampled {
    int32_t token;      // -1: a logit is not a number, or the largest is not finite
    float logp;         // 0 without mt_sampling.logprobs
    float sampled_logp; // 0 with temperature 0
} mt_sampled;

/* A token is sampled from each of T rows of logits [T, stride], whose first `count` columns are the vocabulary, as
 * mt_sample does without a repetition penalty. */
typedef struct mt_sample_args {
    int64_t T, stride, count;
    const mt_sampling *sampling; // on the host
    const void *logits;          // [T, stride]
    const double *uniforms;      // [T] random numbers in [0, 1)
    mt_sampled *sampled;         // [T]
} mt_sample_args;

#define MT_LOSS_OPERATIONS(OP)                                                                                         \
    /* One pass: stats of this rank's columns. Ranks combine these numbers of a row, never logits. */                  \
    OP(cross_entropy_forward, mt_work_bytes((a->T * a->count), dtype), (a, dtype, stream),                             \
       const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream)                                              \
    /* stats over the whole vocabulary, from the stats of its `n` parts: parts[n, 4, T], or [n, 3, T]. */              \
    OP(cross_entropy_combine, mt_work_bytes((n + 1) * a->T * (a->entropy ? 4 : 3), MT_F32), (a, parts, n, stream),     \
       const mt_cross_entropy_args *a, const float *parts, int64_t n, mt_stream *stream)                               \
    /* From stats: lse = max + log(sum), logp = target - lse, entropy = lse - weighted / sum. */                       \
    OP(cross_entropy_loss, mt_work_bytes((a->entropy ? 7 : 5) * a->T, MT_F32), (a, stream),                            \
       const mt_cross_entropy_args *a, mt_stream *stream)                                                              \
    /* With p = exp(x - lse): dx = (onehot(label) - p) dlogp - p (x - lse + entropy) dentropy, and dlogits = dx times  \
     * logit_scale and loss_scale; zero in the padding. */                                                             \
    OP(cross_entropy_backward, mt_work_bytes((a->count + a->stride) * a->T, dtype), (a, dtype, stream),                \
       const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream)                                              \
    /* Negative log-likelihood: sums[0] -= sum(logp weights), sums[1] += sum(weights), in float64 and in token order;  \
     * and dlogp[T] = -weights. */                                                                                     \
    OP(nll_loss, mt_work_bytes(3 * T, MT_F32), (sums, dlogp, logp, weights, T, stream), double *sums, float *dlogp,    \
       const float *logp, const float *weights, int64_t T, mt_stream *stream)                                          \
    /* The same logits and uniforms give the same tokens on every backend. */                                          \
    OP(sample, mt_work_bytes((a->T * a->count), dtype), (a, dtype, stream), const mt_sample_args *a, mt_dtype dtype,   \
       mt_stream *stream)

/* ---- optimizer, over any range of a bucket; initialisation and conversion */

/* The numbers of an optimizer's step. `beta1` and `beta2` are those of AdamW or Lion; beta1 is SGD's or Muon's
 * momentum.
 */
typedef struct mt_update {
    float lr, beta1, beta2, eps, weight_decay;
    float bias_correction1, bias_correction2; // AdamW: 1 - beta^updates, unless mt_update_args.corrections has them
} mt_update;

/* The matrices of a step on whole matrices: `count` of one shape, their parts here [rows, cols], one matrix `stride`
 * elements after another in the parameters and in the state. The values that are orthogonalised lie elsewhere. */
typedef struct mt_matrices {
    int64_t count, rows, cols, stride;
    void *x; // the first element here of the first matrix's values
    mt_dtype dtype;
    int64_t x_stride, row_stride; // between two matrices' values; between their rows
    double *sums;                 // [count] sums of squares of the momentum
    bool counted;                 // this part adds to them
    float factor;                 // of the update
    bool nesterov;                // orthogonalises the momentum of the next step, if its gradient is this one's
} mt_matrices;

/* The operands of a step on n elements: gradient in MT_F32 or 16 bits, master weights in MT_F32 or MT_F16_SCALED,
 * moments in any of these or in MT_F8_E4M3. A state is rounded to nearest even after the step, which itself uses the
 * fp32 value. States in fp16 and fp8, which AdamW alone has, have a scale, as in Transformer Engine's FusedAdam: the
 * elements of an operation are one tensor, whose values are code * mt_state_scale(amax). */
typedef struct mt_update_args {
    int64_t n;
    void *param;               // [n] the weights in fp32, or the copy of `master` in bf16 or fp16
    void *master;              // [n] weights of parameters in 16 bits, NULL for fp32 ones
    void *m, *v;               // [n] the states of MT_OPTIMIZERS; v NULL: the optimizer has one state
    const void *grad;          // [n]
    const float *scale;        // the gradient is grad * scale[0]; a negative scale changes nothing
    const double *corrections; // [2] the bias corrections where the device counts updates; NULL: of mt_update
    const float *amax;         // [3] the largest absolute value of master, m and v; NULL: no state has a scale
    float *new_amax;           // [3] the same after the step, which adamw_amax computes
    mt_dtype dtype;            // of param
    mt_dtype master_dtype, m_dtype, v_dtype, grad_dtype;
    const mt_matrices *matrices; // of a step on matrices, whose operands begin at the first matrix; n is not read
} mt_update_args;

/* True if a state of this type has a scale; the scale of a tensor with this largest absolute value (0 if that is 0):
 * the largest value has the largest code. For fp16 that is half of its range, as in Transformer Engine. The scale has
 * 13 significant bits, so that code * scale is exact in fp32, and values written to a checkpoint are read back as the
 * same codes. */
static inline bool mt_state_has_scale(mt_dtype dtype) {
    return dtype == MT_F16_SCALED || dtype == MT_F8_E4M3;
}
float mt_state_scale(float amax, mt_dtype dtype);

static inline int64_t mt_update_bytes(const mt_update_args *a) {
    int64_t weights = a->master ? 2 * mt_dtype_size(a->master_dtype) + mt_dtype_size(a->dtype) : 8;
    int64_t moments = 2 * (mt_dtype_size(a->m_dtype) + (a->v ? mt_dtype_size(a->v_dtype) : 0));
    return a->n * (weights + mt_dtype_size(a->grad_dtype) + moments);
}

/* The same of steps on matrices: of the momentum; of the values to orthogonalise, read or written, and `other` bytes of
 * each element. */
static inline int64_t mt_matrices_bytes(const mt_update_args *a, int64_t other, bool values) {
    const mt_matrices *x = a->matrices;
    return x->count * x->rows * x->cols * (other + (values ? mt_dtype_size(x->dtype) : 0));
}

/* Products of `count` pairs of matrices, each without gaps, one after another: out[M, N] = scale a b + add_scale add.
 * Operands: a[M, K], or [K, M] if transposed; b[K, N], or [N, K]. add NULL: none; out is none of the operands. tf32: a
 * GPU may round operands in MT_F32 to TF32. */
typedef struct mt_product_args {
    int64_t M, N, K, count;
    const void *a, *b, *add;
    void *out;
    bool a_transposed, b_transposed, tf32;
    float scale, add_scale;
} mt_product_args;

/* The rules of step_guard; a step that violates one is bad. */
typedef struct mt_guard_rules {
    bool finite;         // loss and gradient norm must be finite
    double spike_factor; // the loss is at most this many times its running average; 0: no rule
    int64_t window;      // steps of that average; earlier steps are never spikes
    int64_t copies;      // number of ranks whose equal losses loss_sum adds up
    double beta1, beta2; // of AdamW
} mt_guard_rules;

/* The result of a step's check: the first violated rule. */
typedef enum mt_guard_check {
    MT_STEP_PASSED,
    MT_LOSS_NOT_FINITE,
    MT_NORM_NOT_FINITE,
    MT_LOSS_SPIKES,
    MT_NO_TOKENS // every token is masked: not bad, but there is nothing to learn
} mt_guard_check;

/* Indices into a guard's numbers, which last over steps: the last check, the average loss of good steps, their number,
 * the updates made, and AdamW's two bias corrections for the last one. */
enum {
    MT_GUARD_CHECK,
    MT_GUARD_AVERAGE,
    MT_GUARD_STEPS,
    MT_GUARD_UPDATES,
    MT_GUARD_CORRECTIONS,
    MT_GUARD_NUMBERS = MT_GUARD_CORRECTIONS + 2
};

/* Steps of optimizers that the plain C backend alone has, for mt_options_check_limits to refuse elsewhere: none now. */
#define MT_PLAIN_STEPS(OP)

#define MT_OPTIMIZER_OPERATIONS(OP)                                                                                    \
    /* sum[n] += x[n]; dtype: of sum, which bf16 rounds. */                                                            \
    OP(accumulate, mt_work_bytes((4 + 2 * mt_dtype_size(dtype)) * n, MT_U8), (sum, x, n, dtype, stream), void *sum,    \
       const float *x, int64_t n, mt_dtype dtype, mt_stream *stream)                                                   \
    /* sum[0] += sum of squares of x[n]. */                                                                            \
    OP(squared_norm, mt_work_bytes(n, dtype), (sum, x, n, dtype, stream), double *sum, const void *x, int64_t n,       \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* norm[0] = sqrt(sum_of_squares) / d, the gradient's norm, with d = denominator (the batch's tokens) loss_scale;  \
     * NaN if the sum of the replicas' squares is not finite. scale[0], the factor of every gradient, = clip / (norm + \
     * 1e-6), if below 1 and clip > 0, over d. */                                                                      \
    OP(gradient_scale, mt_work_bytes(32, MT_U8),                                                                       \
       (scale, norm, sum_of_squares, replicas, denominator, loss_scale, clip, stream), float *scale, float *norm,      \
       const double *sum_of_squares, const double *replicas, const double *denominator, double loss_scale, float clip, \
       mt_stream *stream)                                                                                              \
    /* Checks a step on the device: guard[MT_GUARD_CHECK] = MT_NO_TOKENS if tokens[0] is 0, else the first rule that   \
     * the loss loss_sum[0] / (tokens[0] copies) or norm[0] violates. If the check fails, scale[0] = -1. A good step's \
     * loss l updates the average a over n steps: a += (l - a) / min(n + 1, window). A step that passes is an update:  \
     * guard[MT_GUARD_UPDATES] counts it, and 1 - beta^updates become the bias corrections. */                         \
    OP(step_guard, mt_work_bytes(104, MT_U8), (guard, scale, loss_sum, tokens, norm, rules, stream), double *guard,    \
       float *scale, const double *loss_sum, const double *tokens, const float *norm, const mt_guard_rules *rules,     \
       mt_stream *stream)                                                                                              \
    /* Raises a->new_amax[k] to the largest absolute value that master, m or v will have after the step, or if the     \
     * step changes nothing, to that before it. Only where the state has a scale. The work: all operands are read. */  \
    OP(adamw_amax, mt_work_bytes(mt_update_bytes(a) / 2, MT_U8), (a, update, stream), const mt_update_args *a,         \
       const mt_update *update, mt_stream *stream)                                                                     \
    /* The next three are one step of an optimizer, computed in fp32, on weights w with gradient g. The work: the      \
     * gradient is read, moments and master weights are read and written, their copy is written. AdamW (Loshchilov     \
     * & Hutter, "Decoupled weight decay regularization"): m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, \
     * w -= lr (weight_decay w + (m / bias_correction1) / (sqrt(v / bias_correction2) + eps)). */                      \
    OP(adamw_step, mt_work_bytes(mt_update_bytes(a), MT_U8), (a, update, stream), const mt_update_args *a,             \
       const mt_update *update, mt_stream *stream)                                                                     \
    /* SGD with momentum, as torch.optim.SGD: g += weight_decay w, m = beta1 m + g, w -= lr m. */                      \
    OP(sgd_step, mt_work_bytes(mt_update_bytes(a), MT_U8), (a, update, stream), const mt_update_args *a,               \
       const mt_update *update, mt_stream *stream)                                                                     \
    /* Lion (Chen et al., "Symbolic discovery of optimization algorithms"): w -= lr (weight_decay w + sign(beta1 m +   \
     * (1 - beta1) g)), m = beta2 m + (1 - beta2) g. */                                                                \
    OP(lion_step, mt_work_bytes(mt_update_bytes(a), MT_U8), (a, update, stream), const mt_update_args *a,              \
       const mt_update *update, mt_stream *stream)                                                                     \
    /* Muon on a->matrices, in three operations around matrix products. The first: m = momentum m + (1 - momentum) g;  \
     * sums[i] += the squares of matrix i of u, which is m, or with Nesterov's rule momentum m + (1 - momentum) g. */  \
    OP(muon_momentum, mt_work_bytes(mt_matrices_bytes(a, 8 + mt_dtype_size(a->grad_dtype), false), MT_U8),             \
       (a, update, stream), const mt_update_args *a, const mt_update *update, mt_stream *stream)                       \
    /* The second: x = u / max(sqrt(sums[i]), 1e-7). */                                                                \
    OP(muon_normalize,                                                                                                 \
       mt_work_bytes(mt_matrices_bytes(a, 4 + (a->matrices->nesterov ? mt_dtype_size(a->grad_dtype) : 0), true),       \
                     MT_U8),                                                                                           \
       (a, update, stream), const mt_update_args *a, const mt_update *update, mt_stream *stream)                       \
    /* The last, on the orthogonalised x: w -= lr (weight_decay w + factor x). */                                      \
    OP(muon_step, mt_work_bytes(mt_matrices_bytes(a, a->master ? 10 : 8, true), MT_U8), (a, update, stream),           \
       const mt_update_args *a, const mt_update *update, mt_stream *stream)                                            \
    /* The sums are fp32; out is rounded once. */                                                                      \
    OP(batched_product, mt_work_product(a->count * a->M, a->N, a->K), (a, dtype, stream), const mt_product_args *a,    \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* param[i] = mean + std * normal(key, first + i) with Box-Muller on Philox: the same on every layout. */          \
    OP(random_normal, mt_work_bytes(n, dtype), (param, n, key, first, mean, std, dtype, stream), void *param,          \
       int64_t n, uint64_t key, int64_t first, float mean, float std, mt_dtype dtype, mt_stream *stream)               \
    /* Converts n elements between MT_F32 and MT_BF16. */                                                              \
    OP(convert, mt_work_bytes((mt_dtype_size(to_dtype) + mt_dtype_size(from_dtype)) * n, MT_U8),                       \
       (to, to_dtype, from, from_dtype, n, stream), void *to, mt_dtype to_dtype, const void *from,                     \
       mt_dtype from_dtype, int64_t n, mt_stream *stream)

/* ---- collectives (§5) on the backend's device memory, enqueued as other operations are. All ranks of the group call
 * in the same order with the same count. A group of one returns at once, or copies if `out` is not `in`. Counts are
 * elements and may exceed 2^31. Sums have the same bits on every rank and in every run: the CPU adds in rank order;
 * NCCL has a fixed order of its own. The work: the fewest bytes that each rank must send. */

/* A group of ranks, ordered by world rank. A group of one needs no library. */
typedef struct mt_group {
    const char *name; // in messages: "world", "data"
    int size, rank;   // of this process in the group
    int *members;     // [size] world ranks; NULL: rank 0 alone
    void *comm;       // MPI_Comm *, NULL for a group of one
    void *nccl;       // the CUDA backend's ncclComm_t, NULL otherwise
} mt_group;

typedef enum mt_reduction { MT_SUM, MT_MAX } mt_reduction;

/* Memory that ranks of one host write into directly. A GPU's copy engines write it while a matrix product occupies all
 * multiprocessors. A channel's messages could not: they are NCCL kernels, which need a multiprocessor. */
typedef struct mt_mailbox {
    const mt_group *group;
    char *memory;
    int64_t bytes;
} mt_mailbox;
enum { MT_MAILBOX_RANKS = 64, MT_MAILBOX_OWN = 8 * MT_MAILBOX_RANKS }; // maximum number of ranks; bytes of counters

/* A block of `count` elements for another rank's mailbox, and one from another rank. Every rank writes into a place of
 * its own: rank r's block is at element first + r * stride of the mailbox that receives it. */
typedef struct mt_mailbox_args {
    mt_mailbox *mailbox;
    const void *in; // [count]
    int64_t count, first, stride;
    int to, from; // ranks of the group
} mt_mailbox_args;

#define MT_COLLECTIVE_OPERATIONS(OP)                                                                                   \
    /* buffer[count] = its sum or maximum over the group; MT_F32, MT_BF16, MT_F16 or MT_F64. The CPU sums 16 bits in   \
     * fp32 and rounds once. */                                                                                        \
    OP(all_reduce, mt_work_sent(MT_OPERATION_all_reduce, count, dtype, group),                                         \
       (buffer, count, reduction, dtype, group, stream), void *buffer, int64_t count, mt_reduction reduction,          \
       mt_dtype dtype, const mt_group *group, mt_stream *stream)                                                       \
    /* out[size, count] = in[count] of every rank, in rank order; `in` may be out + rank * count. Any type. */         \
    OP(all_gather, mt_work_sent(MT_OPERATION_all_gather, (group->size - 1) * count, dtype, group),                     \
       (out, in, count, dtype, group, stream), void *out, const void *in, int64_t count, mt_dtype dtype,               \
       const mt_group *group, mt_stream *stream)                                                                       \
    /* out[count] = the sum over the group of row `rank` of in[size, count]; `out` may be that row. Types and sums as  \
     * in all_reduce. */                                                                                               \
    OP(reduce_scatter, mt_work_sent(MT_OPERATION_reduce_scatter, (group->size - 1) * count, dtype, group),             \
       (out, in, count, dtype, group, stream), void *out, const void *in, int64_t count, mt_dtype dtype,               \
       const mt_group *group, mt_stream *stream)                                                                       \
    /* out[size, count]: row r is row `rank` of rank r's in[size, count]. `out` and `in` do not overlap. Any type. */  \
    OP(all_to_all, mt_work_sent(MT_OPERATION_all_to_all, (group->size - 1) * count, dtype, group),                     \
       (out, in, count, dtype, group, stream), void *out, const void *in, int64_t count, mt_dtype dtype,               \
       const mt_group *group, mt_stream *stream)                                                                       \
    /* The same with in_counts[r] elements to rank r and out_counts[r] from it, packed without gaps. The counts are    \
     * in host memory and may be reused when the call returns. */                                                      \
    OP(all_to_all_v, mt_work_sent(MT_OPERATION_all_to_all_v, mt_sent_to_others(in_counts, group), dtype, group),       \
       (out, out_counts, in, in_counts, dtype, group, stream), void *out, const int64_t *out_counts, const void *in,   \
       const int64_t *in_counts, mt_dtype dtype, const mt_group *group, mt_stream *stream)                             \
    /* out[count] of rank `root` = the sum over the group of in[count]; `out` may be `in`, and is not read on others.  \
     * Types and sums as in all_reduce. */                                                                             \
    OP(reduce, mt_work_sent(MT_OPERATION_reduce, count, dtype, group), (out, in, count, dtype, root, group, stream),   \
       void *out, const void *in, int64_t count, mt_dtype dtype, int root, const mt_group *group, mt_stream *stream)   \
    /* buffer[count] = the buffer of rank `root`. Any type. */                                                         \
    OP(broadcast, mt_work_sent(MT_OPERATION_broadcast, count, dtype, group),                                           \
       (buffer, count, dtype, root, group, stream), void *buffer, int64_t count, mt_dtype dtype, int root,             \
       const mt_group *group, mt_stream *stream)                                                                       \
    /* Writes in[count] into rank `to`'s mailbox; meanwhile rank `from` writes count elements into this rank's. They   \
     * arrive after the earlier operations of `stream` and before its later ones. Ranks call in one order, in matching \
     * pairs, on one stream. */                                                                                        \
    OP(mailbox_exchange, mt_work_sent(MT_OPERATION_mailbox_exchange, a->count, dtype, a->mailbox->group),              \
       (a, dtype, stream), const mt_mailbox_args *a, mt_dtype dtype, mt_stream *stream)

/* ---- channels: ordered messages from one rank of a group to another, for pipelines and rings. Channels never wait for
 * each other: each has its own tag on the CPU, its own stream and communicator on a GPU. */

enum { MT_CHANNEL_TICKETS = 64 }; // messages of a channel that may be under way at once

/* The first member of a backend's channel. */
typedef struct mt_channel {
    const mt_group *group;
    int from, to, id;                  // ranks of the group; a number that is unique between them
    mt_stream *stream;                 // of the messages, for timing; NULL on the CPU
    int64_t next;                      // ticket of the next message
    int64_t finished;                  // of the caller: messages that it has waited for, if it waits in order
    int64_t bytes[MT_CHANNEL_TICKETS]; // of ticket i at i % MT_CHANNEL_TICKETS
} mt_channel;

#define MT_CHANNEL_OPERATIONS(OP)                                                                                      \
    /* Both ends call it with the same arguments; other ranks get NULL. It may wait for the other end, so all ranks    \
     * open their channels in one order: by ascending id, then ascending `from`. `group` must outlive the channel. */  \
    OP(channel_open, mt_channel *, const mt_group *group, int from, int to, int id)                                    \
    /* Sends or receives buffer[count] after the operations now on `stream`; returns the message's ticket, 0, 1, 2,    \
     * ... The buffer must not be used until channel_wait. The n-th receive takes the n-th message, of the same        \
     * count and type. With MT_CHANNEL_TICKETS messages under way, the host first waits for the oldest. */             \
    OP(channel_send, int64_t, mt_channel *channel, const void *buffer, int64_t count, mt_dtype dtype,                  \
       mt_stream *stream)                                                                                              \
    OP(channel_recv, int64_t, mt_channel *channel, void *buffer, int64_t count, mt_dtype dtype, mt_stream *stream)     \
    /* Operations enqueued on `stream` after this call run when the message is complete: sent and its buffer free,     \
     * or received. */                                                                                                 \
    OP(channel_wait, void, mt_channel *channel, int64_t ticket, mt_stream *stream)                                     \
    /* Waits for messages under way and frees the channel, which may be NULL. */                                       \
    OP(channel_close, void, mt_channel *channel)                                                                       \
    /* Makes memory[bytes], a multiple of 4, a mailbox of the group, whose ranks all call it. The last                 \
     * MT_MAILBOX_OWN bytes hold its counters. -1 with an error if a rank cannot reach another's memory; this may      \
     * be so on some ranks only, so callers use mt_agree. */                                                           \
    OP(mailbox_open, int, mt_mailbox **mailbox, const mt_group *group, void *memory, int64_t bytes, mt_error *error)   \
    /* Waits for the other ranks; the memory may be freed afterwards. NULL is allowed. */                              \
    OP(mailbox_close, void, mt_mailbox *mailbox)

/* ---- graphs: one call enqueues many operations, for operations shorter than the time to enqueue them. The CPU has no
 * graphs: these entries of its table are NULL.
 *
 * Between begin and end, operations on the stream are recorded with their arguments rather than run; a launch runs
 * them. Values that change between launches are in memory that the operations read: a span's k_start and k_len too, in
 * the device's list, while the host's list holds an upper bound of k_len. Every operation must have run with the same
 * sizes before. With `decodes` the operations are those of a decode step, whose weights do not change in the graph, and
 * whose layers may run as one kernel. */
typedef struct mt_graph mt_graph;

#define MT_GRAPH_OPERATIONS(OP)                                                                                        \
    OP(graph_begin, void, mt_stream *stream, bool decodes)                                                             \
    OP(graph_end, mt_graph *, mt_stream *stream)                                                                       \
    OP(graph_launch, void, const mt_graph *graph, mt_stream *stream)                                                   \
    OP(graph_destroy, void, mt_graph *graph)

/* ---- fused operations: several of the above in one pass over memory. Where an entry is NULL, as on the CPU, layers
 * call the separate operations, which define the result. */

#define MT_FUSED_OPERATIONS(OP)                                                                                        \
    /* With the tanh approximation: pre[T, N] = x[T, K] w^T + bias[N] and y = gelu(pre). */                            \
    OP(linear_gelu_forward, mt_work_product(a->T, a->N, a->K), (a, dtype, stream), const mt_linear_args *a,            \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* dx[T, K] from dy[T, N], for y = gelu(x) w^T: x is the argument of GELU. */                                      \
    OP(linear_backward_gelu, mt_work_product(a->T, a->N, a->K), (a, dtype, stream), const mt_linear_args *a,           \
       mt_dtype dtype, mt_stream *stream)                                                                              \
    /* sum = residual + dropout(x), then y = LayerNorm(sum), or RMSNorm(sum) where mean is NULL. */                    \
    OP(residual_norm_forward,                                                                                          \
       mt_work_bytes(4 * a->T * a->C * mt_dtype_size(dtype) - mt_norm_saved_bytes(a, dtype), MT_U8),                   \
       (a, dtype, stream), const mt_norm_args *a, mt_dtype dtype, mt_stream *stream)

/* ---- the lists together, and the types that they generate */

/* Rows (name, result, parameters...) that a backend must have. */
#define MT_UNTIMED_OPERATIONS(OP)                                                                                      \
    MT_DEVICE_OPERATIONS(OP)                                                                                           \
    MT_CHANNEL_OPERATIONS(OP)

/* Rows (name, work, (arguments), parameters...) that a backend must have. */
#define MT_TIMED_OPERATIONS(OP)                                                                                        \
    MT_MEMORY_OPERATIONS(OP)                                                                                           \
    MT_LINEAR_OPERATIONS(OP)                                                                                           \
    MT_FP8_OPERATIONS(OP)                                                                                              \
    MT_EMBEDDING_OPERATIONS(OP)                                                                                        \
    MT_NORM_OPERATIONS(OP)                                                                                             \
    MT_ROPE_OPERATIONS(OP)                                                                                             \
    MT_ATTENTION_OPERATIONS(OP)                                                                                        \
    MT_LINEAR_ATTENTION_OPERATIONS(OP)                                                                                 \
    MT_SSD_OPERATIONS(OP)                                                                                              \
    MT_SPARSE_ATTENTION_OPERATIONS(OP)                                                                                 \
    MT_ACTIVATION_OPERATIONS(OP)                                                                                       \
    MT_ROW_OPERATIONS(OP)                                                                                              \
    MT_ROUTER_OPERATIONS(OP)                                                                                           \
    MT_EXPERT_OPERATIONS(OP)                                                                                           \
    MT_LOSS_OPERATIONS(OP)                                                                                             \
    MT_OPTIMIZER_OPERATIONS(OP)                                                                                        \
    MT_COLLECTIVE_OPERATIONS(OP)

#define MT_OPERATIONS(OP)                                                                                              \
    MT_UNTIMED_OPERATIONS(OP)                                                                                          \
    MT_TIMED_OPERATIONS(OP)

#define MT_CUDA_OPERATIONS(OP)                                                                                         \
    MT_OPERATIONS(OP)                                                                                                  \
    MT_GRAPH_OPERATIONS(OP)                                                                                            \
    MT_FUSED_OPERATIONS(OP)

#define MT_PLAIN_OPERATIONS(OP)                                                                                        \
    MT_PLAIN_LAYER_OPERATIONS(OP)                                                                                      \
    MT_PLAIN_STEPS(OP)

#define MT_ALL_OPERATIONS(OP)                                                                                          \
    MT_CUDA_OPERATIONS(OP)                                                                                             \
    MT_PLAIN_OPERATIONS(OP)

#define MT_UNTIMED_TYPE(name, result, ...)        typedef result mt_##name##_fn(__VA_ARGS__);
#define MT_TIMED_TYPE(name, work, arguments, ...) typedef void mt_##name##_fn(__VA_ARGS__);
MT_UNTIMED_OPERATIONS(MT_UNTIMED_TYPE)
MT_TIMED_OPERATIONS(MT_TIMED_TYPE)
MT_GRAPH_OPERATIONS(MT_UNTIMED_TYPE)
MT_FUSED_OPERATIONS(MT_TIMED_TYPE)
MT_PLAIN_OPERATIONS(MT_TIMED_TYPE)
#undef MT_UNTIMED_TYPE
#undef MT_TIMED_TYPE

/* The limits of a backend; 0: none. mt_options_check_limits compares options with them. */
typedef struct mt_limits {
    bool one_attention;       // a single implementation of attention
    int64_t head_channels;    // channels of a head, of q and k or of v
    int64_t bias_buckets;     // buckets of distances, each with a bias of attention's scores
    int64_t router_topk;      // experts of a token
    int64_t experts;          // experts of a router, plus its groups, each rounded up to a multiple of 32
    int64_t aux_loss_experts; // experts of a router with an auxiliary loss or z-loss
    int64_t sinkhorn_experts; // experts of a router that balances by Sinkhorn's iteration
    int64_t fp8_multiple;     // N and K of an fp8 product are multiples of this
    /* cuDNN's attention: sequences of whole tiles of tokens, heads of at most cudnn_head_channels, or DeepSeek-V3's
     * keys of cudnn_latent_channels with values of cudnn_channels. All 0: a build without cuDNN. */
    int64_t cudnn_tokens, cudnn_head_channels, cudnn_channels, cudnn_latent_channels;
    bool no_fp8, no_mxfp8;         // without fp8 products; without those of MT_FP8_VECTOR_32
    bool no_fp8_blocks;            // without those of MT_FP8_VECTOR_128 and MT_FP8_BLOCK_128
    bool no_bf16, no_delta;        // without products of bf16; without the gated delta rule
    int64_t flash_channels;        // of a head in fused attention; wider ones take plain kernels
    int64_t delta_channels;        // channels of a head of the gated delta rule, of keys or of values
    int64_t ssd_rows, ssd_columns; // of a head's state in Mamba-2
    bool no_plain;                 // without MT_PLAIN_OPERATIONS, which an extension may add (notes/extending.md)
} mt_limits;

/* Phases are the parts of a training step, for a profile: the forward or backward of a micro-batch on a chunk (-1: of
 * none), the optimizer. `name` is a string literal; `stream` is the one that computes. Phases do not nest. */
typedef void mt_phase_begin_fn(const char *name, int64_t micro_batch, int64_t chunk, mt_stream *stream);
typedef void mt_phase_end_fn(mt_stream *stream);

typedef struct mt_ops {
    const char *name; // "cpu", "cuda"
    bool on_device;   // operations run beside the host, on memory of a device; else at once, on the host's memory
    bool is_imagined; // operations compute nothing: no values are loaded for them
    mt_limits limits;
#define MT_OPERATION_FIELD(name, ...) mt_##name##_fn *name;
    MT_ALL_OPERATIONS(MT_OPERATION_FIELD)
#undef MT_OPERATION_FIELD
    mt_phase_begin_fn *phase_begin; // both NULL unless a profile records the step (data/report/profile.h)
    mt_phase_end_fn *phase_end;
} mt_ops;

/* The rules between options that the mixers of their layers have. Returns -1 with the first broken one. */
int mt_mixers_check(const mt_options *options, mt_error *error);

/* Compares finished options with a backend's limits. Returns -1 with the option, its value and the limit.
 * mt_model_create calls it before it allocates anything. */
int mt_options_check_limits(const mt_options *options, const mt_limits *limits, mt_error *error);

/* Fails, and names the field, if a size or factor that a model needs is 0 or less, as in options filled by hand;
 * mt_model_create asks. `train`: the sizes of batches too. */
int mt_options_check_sizes(const mt_options *options, bool train, mt_error *error);

/* The plain C backend, which defines the result of each operation. It needs no set-up. */
extern const mt_ops mt_cpu_ops;

/* A line for the user on products of `dtype`: if the processor itself multiplies bf16, or if the OpenBLAS found takes
 * kernels of a much older processor than this one; else NULL. */
const char *mt_cpu_products_note(mt_dtype dtype);

/* From now on (or no longer) the forwards of the CPU are batch-invariant: a token's numbers do not depend on the other
 * tokens of a batch, neither on their number. Attention with a cache has them with pages of 128 rows or a multiple.
 * Products are by this library's own kernels. Mixers with states and fp8 are as before. */
void mt_cpu_batch_invariant(bool invariant);

/* Before the other functions of CUDA: the ranks of the job. With several, all kernels but cuBLASLt's load when CUDA
 * starts: see first_use_waits. */
void mt_cuda_prepare(int num_ranks);

/* The CUDA backend on GPU `device` of this host; NULL with an error if there is none or the build has no CUDA. */
const mt_ops *mt_cuda_open(int device, mt_error *error);

/* Facts of a GPU that are known before it computes. */
typedef struct mt_gpu_facts {
    char name[80];
    int capability;      // times 10: 75, 86, 120
    int kernels;         // architecture of this build's kernels as loaded on it; 0: the build has none for it
    int64_t total, free; // bytes of memory, beside this program's context; free is -1 where it was not asked
    bool draws;          // a screen hangs on it
} mt_gpu_facts;

/* Fails if a GPU of this host, by its number, cannot be used: its capability is below 7.5, or this build has no kernels
 * for it. */
int mt_gpu_check(const mt_gpu_facts *gpu, int number, mt_error *error);

/* A line for the user if the GPUs of a host are of different kinds, else "". */
void mt_gpu_kinds_note(char *text, int64_t bytes, const mt_gpu_facts *gpus, int count);

/* A line for the user if others take memory of a GPU, or a screen hangs on it, else "". */
void mt_gpu_memory_note(char *text, int64_t bytes, const mt_gpu_facts *gpu, int number);

/* True if host memory that could not be pinned may be pageable: large blocks, which copies read and write. Then a line
 * for the user. `release`: of the kernel, by uname. */
bool mt_pageable_serves(char *text, int64_t bytes, int64_t size, const char *release);

/* A line about the GPUs that mt_backend_open found: about this rank's, on a host's first rank also about all of them;
 * "" if there is nothing to say. */
const char *mt_backend_note(void);

/* The GPUs that this host shows to the program; 0 in a build without CUDA. Facts of the first `count` of them; free
 * memory is asked of the current one, `device`, alone, since asking takes memory. */
int mt_cuda_num_gpus(void);
void mt_cuda_gpu_facts(mt_gpu_facts *gpus, int count, int device);

/* The architecture of the kernels of a build with CUDA, as loaded on this device: 90 on Hopper; 80 on Hopper if the
 * driver compiled them there from sm_80's PTX. */
int mt_cuda_kernel_arch(void);

/* Events of the CUDA backend, for timing; only in builds with CUDA. mt_cuda_event_seconds waits for `to` and returns
 * the seconds between the two. */
mt_event *mt_cuda_event_create(void);
void mt_cuda_event_destroy(mt_event *event);
void mt_cuda_event_record(mt_event *event, mt_stream *stream);
double mt_cuda_event_seconds(const mt_event *from, const mt_event *to);

/* The data sheet's rate of this GPU for dense matrix products of a type, in operations per second; 0: unlisted GPU. */
double mt_cuda_peak_flops(mt_dtype dtype);

/* ==== §4 the rank grid and its groups; §5 collectives ============================================================= */

/* The kinds of groups; a rank is in one group of each. Dense layers divide the world into tp x cp x dp x pp, experts
 * into etp x ep x edp x pp. The first dimension varies fastest. Pipeline groups are the same in both. */
typedef enum mt_group_kind {
    MT_GROUP_WORLD,
    MT_GROUP_TENSOR,
    MT_GROUP_CONTEXT,
    MT_GROUP_DATA,
    MT_GROUP_DATA_CONTEXT,
    MT_GROUP_PIPELINE,
    MT_GROUP_EMBEDDING,
    MT_GROUP_TENSOR_CONTEXT,
    MT_GROUP_STAGE,
    MT_GROUP_EXPERT,
    MT_GROUP_EXPERT_TENSOR,
    MT_GROUP_EXPERT_DATA,
    MT_GROUP_EXPERT_EXCHANGE,
    MT_GROUP_KV_REPLICAS,
    MT_GROUP_KEY_REPLICAS,
    MT_GROUP_CONTEXT_A2A,
    MT_GROUP_CONTEXT_RING,
    MT_GROUP_CONTEXT_2,
    MT_GROUP_CONTEXT_4,
    MT_GROUP_CONTEXT_8,
    MT_GROUP_CONTEXT_16,
    MT_GROUP_CONTEXT_32,
    MT_GROUP_CONTEXT_64,
    MT_NUM_GROUP_KINDS
} mt_group_kind;

/* Sizes of blocks that dynamic context parallelism has between one rank and the whole context group, at most. */
enum { MT_CONTEXT_BLOCKS = MT_NUM_GROUP_KINDS - MT_GROUP_CONTEXT_2 };

typedef struct mt_grid {
    mt_group world;          // all ranks of the job
    mt_group tensor;         // ranks that share each layer
    mt_group context;        // ranks that share each sequence
    mt_group data;           // ranks with the same parameters and different samples
    mt_group data_context;   // dp x cp: the sums of gradients and losses
    mt_group pipeline;       // the stages, first to last
    mt_group embedding;      // first and last stage, which share tied embeddings; other stages: alone
    mt_group tensor_context; // tp x cp
    mt_group stage;          // tp x cp x dp: the ranks with the same layers
    mt_group expert, expert_tensor, expert_data;
    mt_group expert_exchange; // etp x ep: the ranks that hold a layer's experts and dispatch tokens to each other
    mt_group context_a2a;     // neighbours in the context group that exchange tokens for heads (all-to-all)
    mt_group context_ring;    // ranks with the same index in their context_a2a groups: the ring of attention
    mt_group kv_replicas;     // ranks of the tensor group that hold the same key and value head
    mt_group key_replicas;    // the same of a key head of linear attention, or of a group of Mamba-2
    mt_group context_blocks[MT_CONTEXT_BLOCKS]; // dynamic context parallelism: 2, 4, 8 ... neighbours in `context`
} mt_grid;

/* The grid of a job of one rank without a launcher. */
extern const mt_grid mt_grid_of_one;

/* The sizes of the dimensions. World size = tensor * context * data * pipeline = expert_tensor * expert * expert_data *
 * pipeline. */
typedef struct mt_grid_shape {
    int64_t tensor, context, data, pipeline;
    int64_t expert_tensor, expert, expert_data;
    int64_t num_query_groups;
    int64_t context_a2a;       // size of that group; 0 means 1
    bool context_blocks;       // dynamic context parallelism; the size of `context` is then a power of two
    int64_t linear_key_heads;  // of gated delta nets, or groups of Mamba-2; 0: none
    bool pipeline_before_data; // --use-tp-pp-dp-mapping
} mt_grid_shape;

/* The shape that finished options give `world_size` ranks. */
mt_grid_shape mt_grid_shape_of(const mt_options *options, int64_t world_size);

/* Writes the world ranks of `rank`'s group of a kind into members[world size], ascending; returns their number. A pure
 * function, as Megatron-LM's RankGenerator with order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with pipeline_before_data. */
int mt_grid_members(int *members, const mt_grid_shape *shape, mt_group_kind kind, int rank);

/* The host of each rank, hosts[world size], as the lowest rank that shares its memory. All ranks of `world` call it. */
void mt_grid_hosts(const mt_group *world, int *hosts);

/* The group of a kind. */
mt_group *mt_grid_group(mt_grid *grid, mt_group_kind kind);

/* Joins the job that mpirun or srun started. Without a launcher the world is one rank and MPI is not called. All other
 * groups have one rank until mt_grid_build. */
void mt_grid_start(mt_grid *grid, int *argc, char ***argv);

/* A further grid over the ranks of the job, from any of its grids: for a model on another layout. Several grids may be
 * built at once. Each lives until its mt_grid_clear, and all end before mt_grid_stop:
 *
 *     mt_grid_start(&job, &argc, &argv);
 *     mt_grid actor = mt_grid_new(&job), generator = mt_grid_new(&job);
 *     mt_grid_build(&actor, &actor_options, &error), mt_grid_build(&generator, &generator_options, &error);
 *     const mt_ops *ops = mt_backend_open(device, &actor, &error); // and for the generator's grid
 *     ... models; mt_transfer_run of data/models/transfer.h moves weights between them
 *     mt_grid_clear(&generator), mt_grid_clear(&actor), mt_grid_stop(&job);
 *
 * All ranks work on the models in the same order. On GPUs, groups with the same members share a communicator. The
 * watchdog has the limits of the first grid's options. */
mt_grid mt_grid_new(const mt_grid *grid);

/* Divides the ranks of a started grid, before it is built: its last `last` ranks have a world of their own from now on,
 * and so have the others. all: the ranks of both, to free with mt_group_free before mt_grid_stop. Every rank calls it;
 * 0 < last < ranks. */
void mt_grid_split(mt_grid *grid, mt_group *all, int last);
void mt_group_free(mt_group *all);

/* Makes all groups for finished options. Every rank calls it. */
int mt_grid_build(mt_grid *grid, const mt_options *options, mt_error *error);

/* Undoes mt_grid_build and mt_backend_open; the grid may then be built for other options. Streams and channels must be
 * closed. Every rank calls it. */
void mt_grid_clear(mt_grid *grid);

/* Clears the grid and leaves the job. */
void mt_grid_stop(mt_grid *grid);

/* The backend that --device names, with communicators for the grid's groups; called after mt_grid_build. cuda: ranks of
 * a host use its GPUs in order, and NCCL connects several ranks. auto: cuda if every rank has a GPU, else cpu. NULL
 * with an error. */
const mt_ops *mt_backend_open(mt_device device, mt_grid *grid, mt_error *error);

/* Opens and closes the CUDA backend's communicator of a group of several ranks, which all call it; mt_backend_open and
 * mt_grid_clear do so for the groups of a grid. Groups with the same members may share one. Closed communicators are
 * kept and reused until mt_cuda_groups_end, which mt_grid_stop calls when no group and no channel is open. */
int mt_cuda_group_open(mt_group *group, mt_error *error);
void mt_cuda_group_close(mt_group *group);
void mt_cuda_groups_end(void);

/* Collectives on host memory, through MPI on every backend. buffer[count] = its sum (or maximum) over the group;
 * MT_F32, MT_BF16 or MT_F64. */
void mt_all_reduce_sum(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype);
void mt_all_reduce_max(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype);
void mt_broadcast(const mt_group *group, void *buffer, int64_t bytes, int root);
void mt_barrier(const mt_group *group);
/* If any rank failed, fails on every rank with the error of the lowest such rank; else returns 0. Every rank calls it.
 */
int mt_agree(const mt_group *world, bool failed, mt_error *error);
/* One message between two ranks of a group, in host memory. Messages from one rank to another arrive in order. Data on
 * a device goes by channels, or to ranks of one host by mailboxes (§3). */
void mt_send(const mt_group *group, const void *buffer, int64_t bytes, int to);
void mt_receive(const mt_group *group, void *buffer, int64_t bytes, int from);

/* The calls that a watchdog receives; mt_watch is NULL by default. mt_watch_start of data/base/watchdog.h sets it: a
 * program without that companion has no watchdog, and waits for a rank that hangs until it is ended from outside. */
typedef struct mt_watch_hooks {
    void (*start)(const mt_options *options, int rank); // mt_grid_build made the groups of several ranks
    void (*stop)(bool built); // mt_grid_clear; built: of such a grid. false: also mt_grid_build for one rank
    void (*begin)(const char *operation, const char *group);
    void (*end)(void);
    void (*note)(const char *operation, const char *group);
} mt_watch_hooks;

extern const mt_watch_hooks *mt_watch;

/* Called around an operation that may wait for other ranks: the watchdog measures the time between begin and end. Pairs
 * do not nest. mt_watch_note records the operation enqueued last on a device, for its message. `group` may be NULL; the
 * strings must stay valid. */
static inline void mt_watch_begin(const char *operation, const char *group) {
    if (mt_watch) mt_watch->begin(operation, group);
}

static inline void mt_watch_end(void) {
    if (mt_watch) mt_watch->end();
}

static inline void mt_watch_note(const char *operation, const char *group) {
    if (mt_watch) mt_watch->note(operation, group);
}

/* ==== §6 conjugate regions; §7 linear ============================================================================= */

/* Tensor parallelism over one micro-batch: T tokens. Outside the regions this rank has `rows` rows of
 * hidden states: all T, or with sequence parallelism T / group size. A group of one needs no buffers. The experts'
 * allgather dispatcher has an object of its own, for the second pair of regions over the ranks that exchange tokens. */
typedef struct mt_tensor_parallel {
    const mt_ops *ops;
    const mt_group *group;
    mt_stream *stream, *comm; // products; communication beside them (may be the same stream)
    mt_dtype dtype;           // of activations and weights
    bool sequence_parallel;
    bool overlaps; // one rank's rows are computed while those of the next are in transfer
    int64_t T, rows;
    /* sequence parallelism: [T, C or wider] a whole operand, and a partial sum before it is scattered */
    void *gathered, *partial;
    /* overlap only */
    mt_mailbox *mailbox; // the memory of `gathered`, and then of parts: [group size, max_rows, C or wider]
    int64_t first_part;  // elements before the parts, which are other ranks' parts of the sums of these rows
    int32_t *part_rows;  // [max_rows, group size] the rows of the parts that add up to each row's sum
    int64_t max_rows, mailbox_bytes;
} mt_tensor_parallel;

/* The four regions (Shoeybi et al., "Megatron-LM"; Korthikanti et al., "Reducing activation recomputation in large
 * transformer models"). A backward is its conjugate's forward.
 *
 * Copy: x[T, C] is whole on every rank; its gradients are partial sums, reduced in place. */
const void *mt_copy_to_tensor_region_forward(const void *x);
void mt_copy_to_tensor_region_backward(const mt_tensor_parallel *tp, void *dx, int64_t C, mt_stream *stream);
/* Reduce: x[T, C] is a partial sum on every rank, reduced in place; its gradient is whole. */
void mt_reduce_from_tensor_region_forward(const mt_tensor_parallel *tp, void *x, int64_t C);
const void *mt_reduce_from_tensor_region_backward(const void *dx);
/* Gather: x[rows, C] -> y[T, C]; dy[T, C], a partial sum on every rank -> dx[rows, C]. */
void mt_gather_from_sequence_region_forward(const mt_tensor_parallel *tp, void *y, const void *x, int64_t C,
                                            mt_stream *stream);
void mt_gather_from_sequence_region_backward(const mt_tensor_parallel *tp, void *dx, const void *dy, int64_t C,
                                             mt_stream *stream);
/* Reduce-scatter: x[T, C], a partial sum on every rank -> y[rows, C]; dy[rows, C] -> dx[T, C]. */
void mt_reduce_scatter_to_sequence_region_forward(const mt_tensor_parallel *tp, void *y, const void *x, int64_t C);
void mt_reduce_scatter_to_sequence_region_backward(const mt_tensor_parallel *tp, void *dx, const void *dy, int64_t C);

/* A parameter as the model's code sees it: its values and their gradient, NULL where the model has none. has_gradient
 * points to a flag of the gradient's owner: while it is false, the next product overwrites dw and sets the flag;
 * afterwards products add to dw. NULL: every product overwrites dw. */
typedef struct mt_weight {
    void *w;
    float *dw;
    bool *has_gradient;
    float w_offset; // of a norm: added to w, 0 or 1
} mt_weight;

/* How ranks share a weight, and the shapes of its products. */
typedef enum mt_linear_kind {
    MT_LINEAR_REPLICATED, // whole on every rank: x[rows, K] -> y[rows, N]
    MT_LINEAR_ROUTER,     // the same with fp32 products and outputs
    MT_LINEAR_COLUMN,     // w[N/tp, K]: x[rows, K] -> y[T, N/tp]
    MT_LINEAR_ROW,        // w[N, K/tp]: x[T, K/tp] -> y[T, N]+tp, whose sum is y[rows, N]
    MT_LINEAR_GROUPED,    // one weight per expert: rows sorted by expert
} mt_linear_kind;

/* An fp8 recipe: how operands of products are quantized. */
typedef struct mt_fp8 {
    mt_fp8_blocks blocks, weight_blocks; // of x and dy; of w
    bool delayed;                        // scales of earlier steps; else of the operand itself
    mt_dtype format, gradient_format;    // of x and w; of dy
    bool wgrad;                          // also the weights' gradients
    bool keeps_weights;                  // between calls: not where weights are sharded
    int64_t version;                     // number of changes of the weights
    mt_arena scratch;                    // operands of the product at hand
} mt_fp8;
extern const mt_fp8 mt_fp8_recipes[]; // by mt_fp8_recipe: the fields that --fp8-recipe sets

/* The fp8 state of one linear. With delayed scaling the operands x, w, dy have a scale each, and the largest absolute
 * values of this step. Lifetimes of quantized operands:
 *
 *   x, dy, dy^T   until the end of the call, in recipe->scratch. With in_place the operation that computes x or dy
 *                 stores it in fp8, in the memory that it would have in the type of activations
 *   x^T           the same, or with saved_x from the forward to the backward, in its layer's values
 *   w, w^T        until the end of the call, or with recipe->keeps_weights while `version` is recipe->version, which
 *                 counts the changes of the weights. With `gathered` w arrives in fp8, and only w^T is computed */
typedef enum mt_fp8_operand { MT_FP8_X, MT_FP8_W, MT_FP8_DY, MT_NUM_FP8_OPERANDS } mt_fp8_operand;
enum { MT_FP8_SCALE_STEP = 4 }; // floats between inverse scales: cuBLASLt reads scales at multiples of 16 bytes only
typedef struct mt_fp8_linear {
    mt_fp8 *recipe;
    float *scale, *amax; // [MT_NUM_FP8_OPERANDS]: delayed scaling's; else amax is scratch
    mt_fp8_matrix w, w_transposed;
    int64_t version;                    // of the weights that these are
    bool gathered;                      // --fp8-param-gather: w arrives in fp8
    bool in_place[MT_NUM_FP8_OPERANDS]; // delayed scaling: x or dy of a product holds rows in fp8
    size_t saved_x;                     // offset of the saved x^T in its layer's values; 0: x^T is not saved
    float *inverse_scales;              // [MT_NUM_FP8_OPERANDS, MT_FP8_SCALE_STEP] with in_place: the first of a row
    int64_t first_amax, num_amaxes;     // `gathered`: of w's in mt_bucket.fp8_amaxes
} mt_fp8_linear;

/* --lora-base-dtype fp8: the values of a frozen weight, which each use of its linear computes from codes into memory
 * that all linears share. Scales begin anew with each parameter; neighbours whose blocks do not cut them are one part.
 */
typedef struct mt_fp8_base {
    mt_dequantize_args *parts; // one after the other in the weight
    int64_t num_parts;
} mt_fp8_base;

/* Memory for the adapters of one product at a time. */
typedef struct mt_adapter_scratch {
    void *rows; // [2, T, widest R]
    void *x;    // [T, widest K]: with dropout
} mt_adapter_scratch;

/* Low-rank adapters of a linear with a frozen weight (Hu et al., "LoRA"): y += scale dropout(x) A^T B^T. A fused linear
 * has several: their A are one matrix, so that one product computes h[T, R] = scale dropout(x) a^T. */
typedef struct mt_adapter_part {
    mt_weight b;      // [N, rank], or [num_experts, N, rank]
    int64_t first, N; // outputs [first, first + N) of the linear; part i reads columns [i rank, (i + 1) rank) of h
} mt_adapter_part;
enum { MT_MAX_ADAPTER_PARTS = 4 }; // q, k, v and b of a linear attention's input; q, k and v
typedef struct mt_adapter {
    mt_weight a; // [R, K], or [num_experts, R, K]
    mt_adapter_part parts[MT_MAX_ADAPTER_PARTS];
    int64_t num_parts, rank, R;
    float scale;           // alpha / rank
    mt_dropout dropout;    // of x; not for experts
    int64_t first_channel; // of x, in the whole model
    const bool *off;       // the model's switch: true: y is that of the base
    const mt_adapter_scratch *scratch;
    /* [table_size], mt_model_plan.num_adapters: the table's adapters of this linear, R 0: none. Then this struct is
     * only the place where an adapter is loaded */
    struct mt_adapter *table;
    int64_t table_size;
} mt_adapter;

/* y = x w^T + bias. N and K are this rank's sizes. */
typedef struct mt_linear {
    mt_weight weight, bias; // [N, K] and [N], or [num_experts, N, K] and [num_experts, N] if grouped
    int64_t N, K;
    int64_t num_experts; // grouped
    mt_linear_kind kind;
    size_t field;       // its offset in the struct of its owner, such as a layer, where that looks for it
    bool omits_bias;    // grouped: y is a partial sum, and another rank adds the bias
    mt_fp8_linear *fp8; // NULL: products in the type of activations
    mt_fp8_base *base;  // of a weight that is stored in fp8, whose weight.w is NULL; NULL: it is not
    mt_adapter adapter; // R 0: none
} mt_linear;

/* The rows of a grouped linear: rows [offsets[e], offsets[e + 1]) are those of weight e; host_offsets: on the host too,
 * for one product per weight, or NULL. */
typedef struct mt_row_groups {
    const int32_t *offsets, *host_offsets;
    int64_t num_rows;
    /* With mt_fp8_linear.in_place, if rows of x, or of dy, are copies of fewer rows, which follow them once: row r is
     * that of source[r]. NULL: they are not */
    const int32_t *x_source, *dy_source;
} mt_row_groups;

/* The pass that a linear is used in. */
typedef struct mt_linear_pass {
    const mt_tensor_parallel *tp;
    bool training;               // delayed scaling records the largest values of operands; adapters drop out
    const int64_t *token_index;  // [T], for the adapters' dropout
    const int64_t *adapter_rows; // mt_batch.adapter_rows
} mt_linear_pass;

/* The operands of one use of a linear; a function reads those it needs. */
typedef struct mt_linear_io {
    const void *x;
    void *x_transposed; // fp8: the forward stores x^T here, and the backward reads it; NULL: neither
    void *y;
    const void *dy;
    void *dx;
    const mt_row_groups *groups; // of a grouped linear
} mt_linear_io;

/* The halves of a backward: gradient of the input, gradient of the weights, or both. */
enum { MT_BACKWARD_INPUT = 1, MT_BACKWARD_WEIGHT = 2, MT_BACKWARD_BOTH = 3 };

/* y from x. Communication of column- and row-parallel kinds is included: results are complete on tp->stream. */
void mt_linear_forward(mt_linear_pass pass, const mt_linear *linear, const mt_linear_io *io);
/* dx from dy. */
void mt_linear_backward_input(mt_linear_pass pass, const mt_linear *linear, const mt_linear_io *io);
/* dw and dbias from dy and x. */
void mt_linear_backward_weight(mt_linear_pass pass, const mt_linear *linear, const mt_linear_io *io);
/* Both, or the selected `halves`; the communication of one half overlaps the product of the other. */
void mt_linear_backward(mt_linear_pass pass, const mt_linear *linear, const mt_linear_io *io, int halves);

/* The one activation within a product: GELU's tanh approximation, where the backend has it and the linear allows it.
 * Forward: y and gelu = gelu(y); not for a row-parallel linear. Backward: x is gelu(gelu_of), and dx is the gradient of
 * gelu_of. */
bool mt_linear_fuses_gelu(const mt_ops *ops, const mt_linear *linear);
void mt_linear_gelu_forward(mt_linear_pass pass, const mt_linear *linear, const mt_linear_io *io, void *gelu);
void mt_linear_gelu_backward(mt_linear_pass pass, const mt_linear *linear, const mt_linear_io *io, const void *gelu_of,
                             int halves);

/* Vocabulary-parallel embedding: this rank holds w[V/tp, C], the table's rows [first, first + count). Its rows of
 * ids[T] are out[T, C]+tp, whose sum is out[rows, C]. The backward adds to w.dw[V/tp, C]. */
void mt_vocab_embedding_forward(const mt_tensor_parallel *tp, void *out, const int32_t *ids, mt_weight w, int64_t C,
                                int64_t first, int64_t count);
void mt_vocab_embedding_backward(const mt_tensor_parallel *tp, const void *dout, const int32_t *ids, mt_weight w,
                                 int64_t C, int64_t first, int64_t count);
/* Vocabulary-parallel cross-entropy: logp, entropy and lse of every token, from this rank's columns. Its backward,
 * cross_entropy_backward, needs no communication. */
void mt_vocab_cross_entropy_forward(const mt_tensor_parallel *tp, const mt_cross_entropy_args *a);

/* ==== §7b losses after pre-training =============================================================================== */

/* Losses of policies, critics, preferences and rewards, advantages, and divergences of distillation: pure functions on
 * the host, in float64. They equal verl's (verl/trainer/ppo/core_algos.py), whose names they keep, and TRL's DPO. */

/* Whole sequences of one micro-batch, or of several. Token t's values belong to the prediction of its label. */
typedef struct mt_loss_tokens {
    int64_t T, num_sequences;
    const mt_span
        *sequences;    // sequence s has the tokens [q_start, q_start + q_len); tokens in no sequence do not count
    const float *mask; // [T] not 0: the token's label counts (a response)
    const double *logp, *entropy, *values;                                 // [T] of the model; NULL where it has none
    const double *divergence, *hidden;                                     // [T] from the teacher; or NULL
    const double *old_logp, *ref_logp, *advantages, *returns, *old_values; // [T] operands; NULL where a loss has none
    const double *rollout_weights, *selected;                              // [T] of a policy loss; NULL: 1, none
    const double *teacher_logp;                                            // [T] on-policy distillation; or NULL
    double *dlogp, *dentropy, *dvalues; // [T] += derivatives of sums->loss; NULL where not wanted
    double *ddivergence;                // [T] the same, of a policy loss with MT_KL_FORWARD_TOPK
} mt_loss_tokens;

/* Sums over sequences; a loss adds to them. The loss of a step is loss / count, however its sequences are spread over
 * micro-batches and ranks. Metrics are sums too; each loss names their divisors. */
enum { MT_MAX_LOSS_METRICS = 8 };
typedef struct mt_loss_sums {
    double loss, count, metrics[MT_MAX_LOSS_METRICS];
    double divergence_factor, hidden_factor; // of distillation: set to the derivatives of the loss by a token's numbers
} mt_loss_sums;

typedef struct mt_aggregation {
    mt_loss_aggregation mode;
    double norm_length; // MT_SEQ_MEAN_TOKEN_SUM_NORM; verl: the padded length of responses
    /* MT_SEQ_MEAN_TOKEN_SUM_NORM: the counted sequences of the step, so that its count is 1 as in verl; 0: the loss is
     * the mean over sequences, as in the paper */
    int64_t norm_sequences;
    bool counts_empty; // means over sequences count those without counted tokens, as verl's geo_mean does
} mt_aggregation;

/* On-policy distillation: the divergence D of the policy from the teacher at the tokens that the policy wrote, by an
 * estimator of `type` or over the teacher's most probable labels, as verl's distillation_ppo_loss has it. */
typedef struct mt_distill_policy_config {
    mt_distillation_in in; // LOSS, POLICY_GRADIENT; otherwise the loss has no such term
    mt_kl_type type;
    double coef;                            // of the term
    double max_clamp;                       // D is clipped to +- this; 0: not
    double clip_ratio_low, clip_ratio_high; // POLICY_GRADIENT: PPO's range, apart from that of the policy loss
    double clip_ratio_c;                    // dual clipping; 0: none
    bool alone;                             // the loss has no other term
    double min_clamp;                       // MT_KL_FORWARD_TOPK: of log-probabilities; -INFINITY: none
} mt_distill_policy_config;

/* policy weight + kl_coef KL - entropy_coef entropy + distillation. */
typedef struct mt_policy_config {
    mt_policy_variant variant;
    mt_aggregation aggregation;    // GSPO, GMPO and SAPO always take MT_SEQ_MEAN_TOKEN_MEAN
    double clip_ratio_low;         // r is clipped to [1 - low, 1 + high]; GMPO: log r to [-low, high]; SPPO: log r to
    double clip_ratio_high;        // [-log(1 + low), log(1 + high)]; DPPO: bounds of the divergence
    double clip_ratio_c;           // dual clipping, above 1; DPPO: of the ratio; 0: none
    double beta;                   // DRO, KIMI15, OPMD
    double tau_pos, tau_neg;       // SAPO, SAPO_DETACHED: for A > 0, and others
    double weight_pos, weight_neg; // TOPR: of the two kinds of responses
    double kl_cov_coef;            // KL_COV
    double cov_share;              // KL_COV, CLIP_COV: the share of tokens that is selected, at least one
    double cov_low, cov_high;      // CLIP_COV: the range of covariances from which they are drawn
    double kl_coef, entropy_coef;  // 0: none, and ref_logp or entropy may be NULL
    mt_kl_type kl_type;
    mt_distill_policy_config distillation; // reads teacher_logp, or `divergence`
} mt_policy_config;

/* A row of the table of policy losses: operands that only some of them read. */
typedef struct mt_policy_kind {
    bool clips;          // clip_ratio_low and clip_ratio_high are a range that the user chooses
    bool selects;        // mt_loss_tokens.selected
    bool by_sequence;    // a ratio is that of a sequence, not of a token
    bool mean_of_means;  // always takes MT_SEQ_MEAN_TOKEN_MEAN
    bool kl_is_absolute; // MT_POLICY_PPO_KL sums |old_logp - logp|
} mt_policy_kind;
const mt_policy_kind *mt_policy_kind_of(mt_policy_variant variant);

/* Metrics of mt_policy_loss; divisor: MT_POLICY_TOKENS. */
enum {
    MT_POLICY_TOKENS,
    MT_POLICY_CLIPFRAC,       // the clipped loss replaced the plain one (verl's pg_clipfrac)
    MT_POLICY_CLIPFRAC_LOWER, // dual clipping replaced that one; GMPO: clipped with A < 0
    MT_POLICY_PPO_KL,         // old_logp - logp
    MT_POLICY_REF_KL,         // by kl_type; 0 without ref_logp
    MT_POLICY_ENTROPY,
    MT_POLICY_DISTILLATION, // D before it is clipped; 0 without distillation
};

/* Adds to sums and to t->dlogp, t->dentropy. Reads logp, old_logp (NULL: the policy is the old one, r = 1), advantages
 * (NULL: no policy loss), rollout_weights (a sequence's geometric mean with GMPO), selected (KL_COV, CLIP_COV, TOPR),
 * with their coefficients ref_logp and entropy, and with distillation teacher_logp, or with MT_KL_FORWARD_TOPK the
 * divergence, where a sum below 0 counts as 0. */
void mt_policy_loss(const mt_loss_tokens *t, const mt_policy_config *c, mt_loss_sums *sums);

/* KL's estimate for one token, by any type but MT_KL_FORWARD_TOPK; *dlogp: its derivative by logp. */
double mt_kl_estimate(mt_kl_type type, double logp, double ref_logp, double *dlogp);

/* MT_KL_FORWARD_TOPK of one token: the sum of q (log q - log p) over K labels, with log-probabilities log p of the
 * policy and log q of the teacher in the whole vocabulary, each at least min_clamp; labels with q = 0 add nothing. The
 * probabilities of K labels do not add up to 1, so that the sum can be negative. dlogp[K]: its derivatives by log p,
 * -q, or 0 where log p is not above min_clamp; may be teacher_logp. */
double mt_topk_divergence(double min_clamp, const double *logp, const double *teacher_logp, int64_t K, double *dlogp);

/* The value loss max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2. */
typedef struct mt_value_config {
    mt_aggregation aggregation;
    double clip; // 0: none, and old_values may be NULL
} mt_value_config;

/* Metrics of mt_value_loss; divisor: MT_VALUE_TOKENS. Explained variance comes from the last four. */
enum {
    MT_VALUE_TOKENS,
    MT_VALUE_CLIPFRAC,
    MT_VALUE_VALUES,
    MT_VALUE_RETURNS,
    MT_VALUE_RETURNS_SQUARED,
    MT_VALUE_ERRORS_SQUARED,
};

/* Adds to sums and to t->dvalues; reads values, returns and old_values. */
void mt_value_loss(const mt_loss_tokens *t, const mt_value_config *c, mt_loss_sums *sums);

typedef struct mt_preference_config {
    mt_preference_variant variant;
    double beta, label_smoothing; // label_smoothing: s of MT_PREFERENCE_SIGMOID
    double kl_coef;               // of the divergence from the reference, the mean over the tokens of the pair; 0: none
    mt_kl_type kl_type;           // its estimator
} mt_preference_config;

/* Metrics of mt_preference_loss and mt_reward_loss; divisor: the count. */
enum {
    MT_PAIR_ACCURACY, // the chosen reward is the greater one
    MT_PAIR_CHOSEN,   // rewards: beta (logp - ref_logp), or values
    MT_PAIR_REJECTED,
    MT_PAIR_MARGIN,
};

/* Sequences 2i are chosen, 2i + 1 rejected; a last one without a partner and a pair without counted tokens are padding.
 * The count is the number of pairs. Adds to sums and to t->dlogp; ref_logp NULL: 0, without a reference. */
void mt_preference_loss(const mt_loss_tokens *t, const mt_preference_config *c, mt_loss_sums *sums);

/* -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2 (Bradley and Terry, 1952; the second
 * term keeps rewards around 0: "Helping or Herding?", arXiv 2312.09244). */
typedef struct mt_reward_config {
    double margin, center_coef; // 0: none
} mt_reward_config;

/* On values at the last token of each sequence, in pairs as in mt_preference_loss. Adds to sums and to t->dvalues. */
void mt_reward_loss(const mt_loss_tokens *t, const mt_reward_config *c, mt_loss_sums *sums);

/* ---- distillation */

typedef struct mt_divergence_config {
    mt_divergence_type type;
    double temperature;    // divides both logits
    double skew_lambda;    // of [0, 1)
    double adaptive_alpha; // the tail: the teacher's least probable labels, with at most this probability in all
} mt_divergence_config;

/* The divergence of one token's K logits, and its derivative dstudent[K] by the student's. A label with an infinite
 * logit adds nothing. Not scaled by the squared temperature. */
double mt_divergence(const mt_divergence_config *c, const double *student, const double *teacher, int64_t K,
                     double *dstudent);

/* The loss of one token's hidden state student[C] against the teacher's; dstudent[C], which may be `teacher`, gets the
 * derivative by the student's. */
double mt_hidden_loss(mt_hidden_loss_type type, const float *student, const float *teacher, int64_t C, float *dstudent);

enum { MT_MAX_HIDDEN_PAIRS = 16, MT_TAP_FINAL_NORM = -1 };

/* A pair of outputs: of layers, counted from 0, or of the final norms (MT_TAP_FINAL_NORM). */
typedef struct mt_hidden_pair {
    int64_t student, teacher;
    mt_hidden_loss_type type;
} mt_hidden_pair;

/* With D, H and E the sums of divergence, hidden-state loss (the mean of the pairs) and cross-entropy over the counted
 * tokens of a micro-batch, the loss is the sum of `balance`. Scales are constants of the gradient: that of H is D / H,
 * or 0 where H is 0, and that of K = D + scaled H is E / K, or 1 where one of them is 0 (nvidia-modelopt 0.47,
 * LogitsAndIntermediatesLossBalancer). They depend on the
 * samples that share a micro-batch, so on its size and on the number of data-parallel ranks, but on no other layout. */
typedef struct mt_distillation_config {
    mt_divergence_config divergence;
    double weight; // w
    mt_distillation_balance balance;
    double hidden_weight, scale; // v, s
    int64_t num_pairs;
    mt_hidden_pair pairs[MT_MAX_HIDDEN_PAIRS];
} mt_distillation_config;

/* Metrics of mt_distillation_loss; divisor: the count. */
enum { MT_DISTILLATION_CROSS_ENTROPY, MT_DISTILLATION_DIVERGENCE, MT_DISTILLATION_HIDDEN };

/* The mean over counted tokens. Adds to sums and to t->dlogp. Reads logp, divergence, and hidden with pairs. */
void mt_distillation_loss(const mt_loss_tokens *t, const mt_distillation_config *c, mt_loss_sums *sums);

/* ==== §8 the parameter table ====================================================================================== */

/* The roles of parameters. A role's number is part of random keys, and so of every model's initial weights: new roles
 * go to the end. */
typedef enum mt_role {
    MT_WORD_EMBEDDING,
    MT_POSITION_EMBEDDING,
    MT_INPUT_NORM,
    MT_INPUT_NORM_BIAS,
    MT_Q,
    MT_K,
    MT_V,
    MT_Q_BIAS,
    MT_K_BIAS,
    MT_V_BIAS,
    MT_Q_NORM,
    MT_K_NORM,
    MT_Q_A, // this and the next five: multi-head latent attention; without a q latent, MT_Q replaces MT_Q_B
    MT_KV_A,
    MT_Q_B,
    MT_KV_B,
    MT_Q_A_NORM,
    MT_KV_A_NORM,
    MT_O,
    MT_O_BIAS,
    MT_MLP_NORM,
    MT_MLP_NORM_BIAS,
    MT_GATE,
    MT_GATE_BIAS,
    MT_UP, // without a gate, the MLP's only first linear
    MT_UP_BIAS,
    MT_DOWN,
    MT_DOWN_BIAS,
    MT_FINAL_NORM,
    MT_FINAL_NORM_BIAS,
    MT_LM_HEAD,
    MT_ROUTER,
    MT_ROUTER_BIAS, // added to scores for the choice of experts; updated towards equal loads, not trained
    MT_EXPERT_GATE,
    MT_EXPERT_UP, // without a gate, an expert's only first linear
    MT_EXPERT_DOWN,
    MT_SHARED_GATE, // this and the next two: the shared expert, which every token visits
    MT_SHARED_UP,
    MT_SHARED_DOWN,
    MT_SHARED_EXPERT_GATE, // a token's weight of the shared expert, before the sigmoid
    MT_MTP_EMBEDDING_NORM, // this and the next three: a module of multi-token prediction, around its layer
    MT_MTP_HIDDEN_NORM,
    MT_MTP_PROJECTION,
    MT_MTP_FINAL_NORM,
    MT_EXPERT_GATE_BIAS,
    MT_EXPERT_UP_BIAS,
    MT_EXPERT_DOWN_BIAS,
    MT_SCORE, // this and the next: the head of a model that computes values, instead of MT_LM_HEAD
    MT_SCORE_BIAS,
    MT_LORA_A, // this and the next one: of the matrix of role mt_param.adapts
    MT_LORA_B,
    MT_ATTENTION_OUT_NORM, // this and the next three: norms after the blocks of a layer
    MT_ATTENTION_OUT_NORM_BIAS,
    MT_MLP_OUT_NORM,
    MT_MLP_OUT_NORM_BIAS,
    MT_SINKS,              // a logit of each head
    MT_ROUTER_LINEAR_BIAS, // of the router's logits, trained; MT_ROUTER_BIAS is of the choice alone
    MT_ATTENTION_GATE,     // of attention's output
    MT_SHORT_B,            // this and the next two: of a gated short convolution's input: its gate,
    MT_SHORT_C,            // the gate of its output,
    MT_SHORT_X,            // and its values
    MT_DELTA_Q,            // this and the next eleven: a gated delta net; to MT_DELTA_A: of its input
    MT_DELTA_K,
    MT_DELTA_V,
    MT_DELTA_Z, // gate of the output
    MT_DELTA_B, // beta of each value head, before the sigmoid
    MT_DELTA_A, // decay of each value head
    MT_CONV_Q,  // taps of the short convolutions
    MT_CONV_K,
    MT_CONV_V,
    MT_DELTA_NORM,
    MT_A_LOG, // log of the decay of each value head
    MT_DT_BIAS,
    MT_SHORT_TAPS,
    MT_MAMBA_Z, // this and the next twelve: Mamba-2; to MT_MAMBA_DT: of its input
    MT_MAMBA_X,
    MT_MAMBA_B,
    MT_MAMBA_C,
    MT_MAMBA_DT, // step of each head
    MT_CONV_X,   // taps of the short convolution, then its biases
    MT_CONV_B,
    MT_CONV_C,
    MT_CONV_X_BIAS,
    MT_CONV_B_BIAS,
    MT_CONV_C_BIAS,
    MT_MAMBA_NORM,
    MT_MAMBA_D, // factor of x in each head's output
    MT_KDA_F_A, // this and the next three: of Kimi delta attention: its decays in two products,
    MT_KDA_F_B,
    MT_KDA_G_A, // and the gate of its output
    MT_KDA_G_B,
    MT_EXPERTS_IN, // this and the next three: of latent experts: into their width and back
    MT_EXPERTS_OUT,
    MT_EXPERTS_IN_BIAS,
    MT_EXPERTS_OUT_BIAS,
    MT_INDEXER_Q,       // this and the next four: the indexer of sparse attention: its queries, from the latent,
    MT_INDEXER_K,       // its keys,
    MT_INDEXER_WEIGHTS, // the weights of its heads,
    MT_INDEXER_K_NORM,  // and the norm of its keys
    MT_INDEXER_K_NORM_BIAS,
    MT_MTP_EMBEDDING_NORM_BIAS, // this and the next two: of the norms of such a module
    MT_MTP_HIDDEN_NORM_BIAS,
    MT_MTP_FINAL_NORM_BIAS,
    MT_ENCODER_RELATIVE, // this and the next one: biases by distance, which all layers of the encoder, or decoder,
                         // share
    MT_DECODER_RELATIVE,
    MT_ENCODER_NORM, // after the last layer of the encoder
    MT_VISION_PATCH, // this and the next twenty-two: the vision tower: patches into its width,
    MT_VISION_PATCH_BIAS,
    MT_VISION_POSITIONS,
    MT_VISION_NORM1, // its layers, to MT_VISION_DOWN_BIAS,
    MT_VISION_NORM1_BIAS,
    MT_VISION_QKV,
    MT_VISION_QKV_BIAS,
    MT_VISION_O,
    MT_VISION_O_BIAS,
    MT_VISION_NORM2,
    MT_VISION_NORM2_BIAS,
    MT_VISION_GATE,
    MT_VISION_GATE_BIAS,
    MT_VISION_UP,
    MT_VISION_UP_BIAS,
    MT_VISION_DOWN,
    MT_VISION_DOWN_BIAS,
    MT_MERGER_NORM, // and its mergers
    MT_MERGER_NORM_BIAS,
    MT_MERGER_FC1,
    MT_MERGER_FC1_BIAS,
    MT_MERGER_FC2,
    MT_MERGER_FC2_BIAS,
    MT_NUM_ROLES
} mt_role;

/* Parts of the model, each in one bucket. */
typedef enum mt_unit {
    MT_UNIT_WORDS,     // the word embedding
    MT_UNIT_POSITIONS, // learned positions
    MT_UNIT_LAYER,
    MT_UNIT_EXPERTS, // of a layer
    MT_UNIT_OUTPUT,  // final norm and an output layer that is not tied
    MT_UNIT_UNTRAINED,
    MT_UNIT_ENCODER_RELATIVE, // these two: biases by distance
    MT_UNIT_DECODER_RELATIVE,
    MT_UNIT_ENCODER_OUTPUT, // the norm of the encoder's output
    MT_UNIT_ADAPTERS,       // of a layer
    MT_UNIT_EXPERT_ADAPTERS,
    MT_UNIT_VISION_INPUT, // these four, of a vision tower: patch embedding and positions,
    MT_UNIT_VISION_LAYER, // each layer,
    MT_UNIT_MERGER,       // the merger behind the last one,
    MT_UNIT_DEEPSTACK,    // and each of the mergers behind others
} mt_unit;

/* Initial values; OUTPUT: normal with init_method_std / sqrt(2 num_layers) (Radford et al., GPT-2). */
typedef enum mt_init {
    MT_INIT_NORMAL,
    MT_INIT_OUTPUT,
    MT_INIT_ONES,
    MT_INIT_GAIN, // of a norm: ones, or zeros where norms scale by 1 + weight
    MT_INIT_ZEROS,
    MT_INIT_TAPS,      // normal with the variance of PyTorch's convolutions, 1 / (3 taps)
    MT_INIT_LOG_DECAY, // log of uniform numbers in [1, 16)
    MT_INIT_TIME_STEP  // x of softplus(x) that is uniform in its logarithm, from 1e-3 to 0.1
} mt_init;

/* The content of a parameter's gradient on one rank after the backward, and so the sum that completes it. */
typedef enum mt_gradient {
    MT_GRADIENT_WHOLE,       // complete
    MT_GRADIENT_ROWS,        // from this rank's rows under sequence parallelism: sum over the tensor group
    MT_GRADIENT_HEADS,       // from this rank's heads, or images: sum over the tensor group
    MT_GRADIENT_REPLICA,     // of a kv head on several ranks, from this rank's query heads: sum over kv_replicas
    MT_GRADIENT_KEY_REPLICA, // the same of a key head of linear attention or a group of Mamba-2: over key_replicas
} mt_gradient;

enum { MT_PARAM_DIMS = 5 }; // the most that a tensor of a parameter has

/* One row per parameter. Allocation, initialisation, gradients, decay and checkpoints read only this. */
typedef struct mt_param {
    mt_role role;
    mt_role adapts; // MT_LORA_A, MT_LORA_B: the role of the matrix that they add to
    mt_unit unit;
    int64_t layer;         // number in the whole model; -1: outside the layers
    int64_t expert;        // number in the layer; -1: none
    int64_t vision_part;   // of a vision tower: the layer of the tower, or the merger: 0 behind the last layer, from 1
                           // on those of deepstack; -1: not of a tower. `layer` is -1 then
    char hf_name[160];     // the Hugging Face tensor that holds it
    int64_t hf_row;        // its first row in that tensor (GPT-2 stores q, k and v as one)
    int64_t hf_rows_total; // rows of that whole tensor
    int64_t hf_groups;   // the tensor's rows are so many groups, one after the other, each with a part of the parameter
    bool hf_has_channel; // the tensor is [rows, 1, cols]
    bool hf_is_column;   // the tensor of a vector is [1, 1, rows, 1]
    int64_t hf_cols[4];  // the tensor is [rows, these]: of a convolution over patches; 0: [rows, cols]
    bool hf_transposed;  // GPT-2 stores linear weights [in, out]
    bool hf_either;      // stacked matrices that files store [in, out], as hf_transposed says, or [out, in]
    bool hf_moved;       // Qwen2.5-VL: transformers' module has another name than its tensor: mt_param_module
    int64_t hf_stack;  // experts in that tensor, each with as many rows, as in gpt-oss; 0: it is of one expert, or none
    int64_t hf_stride; // rows of that tensor from a row of the parameter to its next one: 2 for gpt-oss's gate and up
    int64_t rows, cols;             // shape on this rank; cols == 1 and is_vector for one-dimensional parameters
    int64_t whole_rows, whole_cols; // shape in the whole model
    int64_t first_row, first_col;   // of this rank's part in the whole
    int64_t rows_stored;            // of whole_rows, the rows in Hugging Face: the vocabulary without its padding
    const char *rows_option, *cols_option, *exists_option; // the options that determine these, for messages; or NULL
    bool is_vector;
    bool is_linear;        // of a matrix product, which writes the gradient first; others only add to it
    bool is_head;          // of logits or values
    bool can_adapt;        // a matrix that can have adapters: of attention, an MLP or an expert
    bool takes_fp8;        // the first parameter of a linear whose products --fp8-format computes in fp8
    bool trained;          // by the optimizer
    mt_linear_kind linear; // of a matrix
    mt_init init;
    double init_std;
    float w_offset; // of a norm, which scales by w + w_offset: 0 or 1
    bool weight_decay;
    mt_optimizer optimizer; // that steps it
    bool joins;             // a step on matrices: it and the parameter before it are one matrix
    int64_t bucket, offset; // of its first element in the bucket
    int64_t place;          // its first byte in mt_bucket.params
    bool in_fp8;            // of a frozen matrix: codes in e4m3
    int64_t first_scale;    // in_fp8: of its blocks in mt_bucket.scales
    bool continues;         // the parameter before it in the bucket, without a gap: both are one operand
    size_t field;           // private: where the model's code finds it
    const char *field_name; // private: its name there
    int64_t first_output;   // private: MT_LORA_B: mt_adapter_part.first
    int shard_dim;          // dimension that tensor parallelism shards: 0 rows, 1 columns, -1 none
    mt_gradient gradient;
    bool counted; // in the global norm and in checkpoints: exactly one rank's copy of every element is
} mt_param;

/* Elements of a bucket. */
typedef struct mt_share {
    int64_t first, count;
} mt_share;

/* The parameters of a unit in one flat array: matrices, which decay, before vectors, which do not. If data-parallel
 * ranks shard it (--data-parallel-sharding-strategy), this rank's shard is the elements [shard_first, shard_first +
 * shard_count), else the whole. Shards are equal, unless the optimizer steps whole matrices: then each begins and ends
 * at one, and a rank's may be empty. */
typedef struct mt_bucket {
    int64_t count;        // elements, padded
    int64_t decay_count;  // the leading elements with weight decay
    int64_t matrix_count; // the leading elements of matrices that a step takes whole: all with weight decay, or 0
    int64_t shard_first, shard_count;
    mt_share *shares; // [group->size] the shards of all ranks; NULL: equal ones, or one
    void *params;     // [count] bf16, fp16 or fp32; NULL while this rank has the shard only
    int64_t bytes;    // of params: count elements, or the places of parameters if some are in fp8
    float *scales;    // [num_scales] inverse ones, of the parameters in fp8
    int64_t num_scales;
    float *grads;        // [count] fp32; products add to them; NULL while only main_grads or the shard exist
    void *main_grads;    // [count] summed over micro-batches: grads itself if fp32; NULL with a shard only
    void *param_shard;   // [shard_count], inside params where those always exist
    void *grad_shard;    // [shard_count], inside main_grads where those exist; the sum over ranks
    void *master;        // [shard_count] fp32 or fp16 weights of parameters in 16 bits, else NULL
    void *m, *v;         // [shard_count], [v_count] the optimizer's states; v NULL: it has one
    int64_t v_count;     // the last elements of the shard, whose optimizer has two
    int64_t first_param; // rows [first_param, first_param + num_params) of the table
    int64_t num_params;
    mt_strategy strategy;  // MT_NO_SHARD for a group of one
    const mt_group *group; // the ranks with the same parameters, which add their gradients
    mt_dtype dtype;        // of params
    mt_dtype grad_dtype;   // of main_grads and grad_shard: --main-grads-dtype
    bool on_host;          // master, m and v are in host memory, updated there: --optimizer-cpu-offload
    bool trained;          // false: no gradients, no moments
    /* --fp8-param-gather: the weights of linears in fp8 */
    uint8_t *fp8_params;    // [count] like params; if these are sharded, fp8_first bytes behind them in their buffer
    int64_t fp8_first;      // the bytes of params, or 0 if the parameters in bf16 are all in the second half
    int64_t num_fp8_amaxes; // blocks of these weights; 0: none is gathered in fp8
    float *fp8_amaxes;      // [num_fp8_amaxes] the largest values of the blocks; not with delayed scaling
} mt_bucket;

/* A virtual stage: which part of the model one chunk of a pipeline rank holds. */
typedef struct mt_stage {
    int64_t first_layer, num_layers;
    bool embedding, loss; // the embeddings before the layers; the final norm and the output layer after them
    int64_t num_mtp;      // depths of multi-token prediction, beside the loss; their layers are numbered on
} mt_stage;

/* The part of the model that a rank holds: its chunks in order, its share of the tensor-parallel parameters, its
 * experts, and its share of each expert. */
typedef struct mt_partition {
    const mt_stage *stages; // [num_stages]
    int64_t num_stages;
    int64_t tp, tp_rank;
    int64_t ep, ep_rank, etp, etp_rank;
} mt_partition;

/* Fills `params` (to free) with the rows of a partition, or of the whole model if `partition` is NULL; returns their
 * number. Order of buckets, as far as the partition has them: word embedding; learned positions; each layer and its
 * experts; modules of multi-token prediction likewise; the word embedding again, for these modules or a tied output
 * layer on a rank without the embedding; final norm and output layer; untrained parameters. The word embedding has a
 * bucket of its own so that its two copies are sharded alike. With adapters (options->lora_rank > 0), those of each
 * layer and of each layer's experts have a bucket before all of these, and only adapters are trained. */
int64_t mt_params_build(mt_param **params, const mt_options *options, const mt_partition *partition);

/* The tensor that holds the values of the one called `name`, if that is the embedding or the output layer (a tied one:
 * the embedding), which modules of multi-token prediction share with the model; otherwise NULL. With `is_copy`, `name`
 * is that of a module's copy behind the layer's prefix: DeepSeek's files hold both again in every module. */
const char *mt_shared_tensor(const mt_options *options, const char *name, bool is_copy);

/* True for MT_LORA_A and MT_LORA_B. */
bool mt_param_is_adapter(const mt_param *param);

/* The module of a matrix in transformers' model: its name in peft's files. */
void mt_param_module(char name[160], const mt_param *param);

/* True if an option of its part of the model, such as --freeze-vision, keeps a parameter as it is. */
bool mt_param_is_frozen(const mt_options *options, const mt_param *param);

/* True if the matrices of a role have adapters. */
bool mt_role_has_adapters(const mt_options *options, mt_role role);

/* A parameter's rows on this rank, without the vocabulary's padding. */
int64_t mt_param_rows_stored(const mt_param *param);

/* ==== §9 layers; §15 the model ==================================================================================== */

/* Numbers of a token that a loss reads besides those of the model. */
typedef enum mt_loss_input {
    MT_OLD_LOGP,        // log-probability by the policy that generated the token
    MT_REF_LOGP,        // by the reference model
    MT_ADVANTAGES,      // of the token
    MT_RETURNS,         // the target of its value
    MT_OLD_VALUES,      // its value when it was generated
    MT_ROLLOUT_WEIGHTS, // its weight in a policy loss, where generator and training differ
    MT_SELECTED,        // 1 for tokens that a policy loss treats apart, else 0
    MT_TEACHER_LOGP,    // by the teacher of on-policy distillation
    MT_NUM_LOSS_INPUTS
} mt_loss_input;

/* Distillation: logits of the teacher for the tokens of a rank whose label counts, and its hidden states. They stay in
 * memory until the step ends. The student's forward replaces logits and hidden states by derivatives.
 * mt_loss.topk reads log-probabilities of K - 1 labels; the last id of a token is its label's, or -1 where that is
 * among the others. */
typedef struct mt_teacher_logits {
    int64_t K, count; // K is at most the vocabulary, and one more with mt_loss.topk
    bool of_whole;    // tokens number those of the whole micro-batch: a forward keeps the rank's own, and clears this
    int32_t *tokens;  // [count] numbers of these tokens among those of this rank, ascending
    int32_t *ids;     // [count, K] places in the vocabulary, all of a token different; NULL: 0 to K - 1
    float *logits;    // [count, K]
    int64_t num_hidden, width;
    float *hidden; // [count, num_hidden, width] of the pairs of the loss, as wide as the student; or NULL
} mt_teacher_logits;

/* The encoder's part of a micro-batch: sequence s of the batch attends to the sequence of span s; further spans are
 * padding. */
typedef struct mt_encoder_batch {
    int64_t num_tokens;   // 0: the model has no encoder
    int32_t *tokens;      // [num_tokens]
    int64_t *token_index; // [num_tokens] as that of mt_batch, with the encoder's sequence length
    int64_t num_spans;
    mt_span *spans; // not causal; room for one a token
} mt_encoder_batch;

/* Rows and columns of an image's patches, both multiples of spatial_merge_size. */
typedef struct mt_image_grid {
    int64_t height, width;
} mt_image_grid;

/* The images of a micro-batch, in the order of their image tokens: an image has one token image_token_id for each
 * square of spatial_merge_size^2 patches, and these stand together in one sequence. */
typedef struct mt_image_batch {
    int64_t num_images, max_patches; // max_patches: the room of the arrays
    mt_image_grid *grids;            // [num_images]
    float *patches; // [patches, channels, frames, patch_size, patch_size] of one image after the other: square by
                    // square, and within a square row by row
} mt_image_batch;

/* Decoding with images whose features the model keeps (mt_model_see). */
typedef struct mt_image_rows {
    bool any;             // false: no token is of a text with images, and the arrays are not read
    int32_t *features;    // [T] the row of features that takes the place of a token's embedding; -1: none
    int32_t *coordinates; // [T, 3] frame, row and column of a token; those of a text's token are equal
} mt_image_rows;

/* One micro-batch on this rank, in host memory: flat tokens and the spans of their sequences. */
typedef struct mt_batch {
    int64_t num_tokens;   // T
    int32_t *tokens;      // [T]
    int32_t *labels;      // [T]
    float *loss_mask;     // [T] 1 where the label counts
    int32_t *positions;   // [T] within the sequence
    int64_t *token_index; // [T] sample * seq_length + offset: names the token in the whole run, for dropout;
                          // negative: padding, which visits no expert and is in no auxiliary loss
    int64_t num_spans;
    mt_span *spans;        // room for one span a token
    int32_t *pages;        // decoding over a cache in pages: the page table, memory of the caller
    int64_t *adapter_rows; // decoding with mt_model_plan.num_adapters: tokens [adapter_rows[i], adapter_rows[i + 1])
                           // have adapter i of the table, others none; memory of the caller. NULL: all have none
    float *loss_inputs[MT_NUM_LOSS_INPUTS]; // [T] or NULL: operands of a loss on the host
    mt_teacher_logits *teacher;             // distillation, on the ranks with the loss; or NULL
    mt_encoder_batch encoder;               // of an encoder-decoder, whose decoder has the other fields
    mt_image_batch images;                  // of a model with a vision tower
    mt_image_rows image_rows;               // decoding with such a model; memory of the caller
    int64_t context_size; // dynamic context parallelism: ranks that share the batch, a block of neighbours in the
                          // context group that all fill the same; 0: the whole group
} mt_batch;

/* Allocates a batch for up to max_tokens tokens in one block; free it with mt_batch_free. */
void mt_batch_alloc(mt_batch *batch, int64_t max_tokens);
void mt_batch_free(mt_batch *batch);

/* Gives an allocated batch room for up to max_tokens tokens of an encoder; mt_batch_free frees them too. */
void mt_batch_alloc_encoder(mt_batch *batch, int64_t max_tokens);

/* Gives an allocated batch room for images of up to max_patches patches; mt_batch_free frees them too. */
void mt_batch_alloc_images(mt_batch *batch, const mt_options *options, int64_t max_patches);

/* Divides images among ranks: from the one with most patches on, each goes to the rank with the fewest patches so far,
 * the first of such. owner[num_images]: the rank of each. */
void mt_images_divide(int32_t *owner, const mt_image_grid *grids, int64_t num_images, int64_t ranks);

/* The numbers of a patch; the most patches that the images of a micro-batch of `tokens` tokens have, for
 * mt_model_plan.max_patches; 0 without a vision tower. */
int64_t mt_patch_values(const mt_options *options);
int64_t mt_max_patches(const mt_options *options, int64_t tokens);

/* Rules between the options of a vision tower and others, and between it and the layout. */
int mt_vision_check(const mt_options *options, mt_error *error);

/* The sequences of a micro-batch of an evaluation, and the most that a micro-batch has, for which memory is planned. */
int64_t mt_eval_micro_batch_size(const mt_options *options);
int64_t mt_largest_micro_batch_size(const mt_options *options);

/* The tokens of a rank's share of a micro-batch of `tokens` tokens, after mt_batch_pad. */
int64_t mt_rank_tokens(const mt_options *options, int64_t tokens);

/* Appends padding until the number of tokens is a multiple of `multiple`: sequences of at most 64 copies of token 0,
 * masked and with a negative token_index. `batch` has room for them. mt_train_step and mt_evaluate do so where the
 * ranks of a layout share tokens evenly. */
void mt_batch_pad(mt_batch *batch, int64_t multiple);

/* Writes the tokens token_of_row[T] of `whole`, ascending, and their sequences to `part`, which has room for them. The
 * spans of `whole` are adjacent causal sequences. */
void mt_batch_take(mt_batch *part, const mt_batch *whole, const int32_t *token_of_row, int64_t T);

/* ---- context parallelism: the tokens of a micro-batch are distributed over the ranks of the context group */

/* Cuts a micro-batch for `ranks` ranks into 2 ranks chunks, wherever its sequences begin and end: chunk c has the
 * tokens [cuts[c], cuts[c + 1]), and rank r owns chunks r and 2 ranks - 1 - r, together num_tokens / ranks tokens (a
 * multiple is required). With the mask, the queries of each rank see as nearly as possible the same number of keys. One
 * sequence is cut into equal chunks (Zhu's ring-flash-attention calls this zig-zag). window: see mt_attention. */
void mt_context_cut(int64_t *cuts, const mt_batch *whole, int64_t ranks, int64_t window);

/* The tokens of rank `rank`, ascending: tokens[num_tokens / ranks]. */
void mt_context_tokens(int32_t *tokens, const int64_t *cuts, int64_t ranks, int64_t rank);

/* The spans of rank `rank` of a ring in the step in which it holds the keys of rank `source`: at most one per sequence
 * of `whole`; queries are rows of its own tokens, keys rows of the source's. Returns their number. Over all sources,
 * each query meets each of its keys once. */
int64_t mt_ring_spans(mt_span *spans, const mt_batch *whole, const int64_t *cuts, int64_t ranks, int64_t rank,
                      int64_t source);

/* The plan of a rank's attention. The context group is a2a->size x ring->size ranks, neighbours in a2a: for
 * p2p and all_gather `a2a` is a group of one and `ring` the context group, for a2a it is the other way round. Both
 * outlive the context; heads and groups divide by a2a->size. */
typedef struct mt_context_plan {
    mt_cp_comm_type comm_type;
    const mt_group *a2a, *ring;
    int64_t max_tokens;            // T, of this rank
    int64_t num_heads, num_groups; // of this rank: H, G
    int64_t head_size, value_size;
    int64_t window; // for mt_context_cut
    mt_dtype dtype;
    bool train;
    bool recurs; // some layers pass states from rank to rank; not with both groups
} mt_context_plan;

/* The attention of context parallelism over one micro-batch after another. Nothing is allocated after its creation. */
typedef struct mt_context mt_context;

/* Bytes of device memory that a context needs. */
int64_t mt_context_bytes(const mt_context_plan *plan);

/* Creates a context in `memory` of mt_context_bytes, which outlives it. Every rank of both groups calls it. */
mt_context *mt_context_create(const mt_context_plan *plan, const mt_ops *ops, void *memory, mt_stream *stream);
void mt_context_destroy(mt_context *context);

/* This rank's part of a micro-batch: of the cut for the ring, the a2a group's ranks take equal consecutive parts of the
 * rank's tokens. sequence[T]: the index of each token's sequence in `whole`; or NULL. `local` has room for
 * plan->max_tokens tokens. */
void mt_context_shard(const mt_context *context, mt_batch *local, const mt_batch *whole, int32_t *sequence);

/* Sets the micro-batch of the next calls. */
void mt_context_load(mt_context *context, const mt_batch *whole, mt_stream *stream);

/* attention_forward over the whole sequences of the loaded micro-batch of S tokens. q[S/cp, H D], k[S/cp, G D] and
 * v[S/cp, G Dv] are the T = S/cp rows of this rank; out_stride is H Dv; `spans` and the index arrays are not read.
 * lse[T, H] is that of attention_forward without an a2a group; with one its order is private to
 * mt_context_attention_backward. A window needs all_gather or a2a. */
void mt_context_attention_forward(mt_context *context, const mt_attention *a, mt_stream *stream);
/* attention_backward: dq, dk, dv of this rank's rows, summed over all ranks whose queries saw them. */
void mt_context_attention_backward(mt_context *context, const mt_attention *a, mt_stream *stream);

typedef struct mt_model mt_model;

/* A loss maps numbers of each token to a scalar and to the coefficients of d logp and d entropy. With these
 * cross_entropy_backward computes the gradient of the logits. */
typedef struct mt_loss_args {
    const mt_cross_entropy_args *cross_entropy; // T, logp, lse, and entropy for a loss that uses it, are read
    const float *weights;                       // [T] of each token in the sums
    double *sums;                               // sums[0] += the loss, sums[1] += the weights
    float *dlogp, *dentropy;                    // [T] results; dentropy only for a loss that uses entropy
} mt_loss_args;

/* A metric of a loss: mt_loss_sums.metrics[number] divided by metrics[divisor], or by the count where divisor is -1. */
typedef struct mt_loss_metric {
    const char *name;
    int number, divisor;
} mt_loss_metric;

/* A loss has one of two functions. `forward` runs on the device. `host` runs on the host, on whole sequences in
 * float64, on every rank that shares a micro-batch; the device waits for it, so it is for losses that are small beside
 * the model (§7b). */
typedef struct mt_loss {
    bool uses_entropy;
    bool of_values;  // reads values; false: log-probabilities
    unsigned inputs; // bits 1 << mt_loss_input: the arrays of mt_loss_tokens that `host` reads; the others are NULL
    void (*forward)(const mt_ops *ops, const mt_loss_args *a, mt_stream *stream);
    void (*host)(const void *config, const mt_loss_tokens *tokens, mt_loss_sums *sums);
    const void *config;                         // of `host`
    const mt_loss_metric *metrics;              // of `host`, ended by a row without a name; NULL: none
    const mt_distillation_config *distillation; // of `host`, which then reads the divergence; or NULL
    const mt_distill_policy_config *topk;       // the same, by mt_topk_divergence
} mt_loss;

/* Pre-training: the weighted sum of negative log-probabilities. */
extern const mt_loss mt_nll;

/* Losses on the host; to be copied, with the config that is named here. */
extern const mt_loss mt_preference; // mt_preference_config
extern const mt_loss mt_reward;     // mt_reward_config
extern const mt_loss mt_policy; // mt_policy_config; with a KL coefficient add MT_REF_LOGP, with entropy uses_entropy
extern const mt_loss mt_value;  // mt_value_config
extern const mt_loss mt_distillation; // mt_distillation_config, also to be set as `distillation`

/* The sizes that determine a model's memory, and its loss. */
typedef struct mt_model_plan {
    int64_t max_tokens;       // tokens of the largest micro-batch or prefill, of the encoder too
    int64_t max_logits;       // rows of logits held at once
    int64_t cache_rows;       // key/value cache rows a layer; 0: none
    int64_t page_rows;        // rows of a page of the cache, a power of two; 0: no pages
    int64_t max_inputs;       // of an encoder-decoder with a cache: tokens of a sequence for the encoder
    int64_t max_patches;      // of the images of a micro-batch, in generation of one image; 0: none has any
    int64_t max_image_tokens; // generation: of the images whose features are kept at once
    int64_t cache_sequences;  // with pages: sequences whose keys are in the page table at once
    int64_t num_drafts;       // with pages: tokens that modules of multi-token prediction draft for a sequence; 0: none
    int64_t max_position;     // positions that tokens may have (rotary tables)
    int64_t num_adapters; // of a table, for mt_model_keep_adapter; decoding alone; 0: the model's own adapter, if any
    int64_t host_memory;  // bytes of this host that all its ranks may use together; 0: the machine's memory
    bool train;           // gradients, optimizer state and saved activations
    bool counts;          // only counts bytes: no memory is allocated, and the model can do nothing
    const mt_loss *loss;  // of the head and of modules of multi-token prediction; NULL: mt_nll
    int64_t num_taps;     // outputs of layers that a loss or a score sink reads, on the host
    int64_t taps[MT_MAX_HIDDEN_PAIRS]; // layers from 0, all on the stage with the loss, or MT_TAP_FINAL_NORM
} mt_model_plan;

/* Lays out and allocates a model; parameters are not yet set. The plan is checked against memory first. Options, grid,
 * and the plan's loss with its config must outlive the model, which reads them again in every step. */
int mt_model_create(mt_model **model, const mt_options *options, const mt_grid *grid, const mt_ops *ops,
                    const mt_model_plan *plan, mt_error *error);
void mt_model_destroy(mt_model *model);

/* Rows of this rank's memory plan; 0 bytes where a model has none. The number of received expert rows may depend on the
 * data: their row is an estimate then. */
typedef enum mt_plan_row {
    MT_PLAN_WEIGHTS,
    MT_PLAN_GRADIENTS,
    MT_PLAN_OPTIMIZER,
    MT_PLAN_BUFFERS, // of whole buckets
    MT_PLAN_ACTIVATIONS,
    MT_PLAN_CACHE,
    MT_PLAN_FP8, // operands
    MT_PLAN_EXPERTS,
    MT_PLAN_TOTAL, // of the device
    MT_PLAN_HOST,
    MT_NUM_PLAN_ROWS
} mt_plan_row;

/* The bytes of a row. */
int64_t mt_model_planned_bytes(const mt_model *model, mt_plan_row row);

/* Draws the initial values of all parameters, or of one row of the model's table, by coordinate from options->seed; A
 * of an adapter is normal with the variance of peft's uniform distribution, 1 / (3 K). Zeros are not written. */
void mt_model_init(mt_model *model);
void mt_param_init(mt_model *model, const mt_param *param);

/* The tables, for checkpoints and tests. mt_model_buckets first gathers parameters that an optimizer step changed, so
 * every rank of the data group calls it; and because the caller may change them, the model's stream waits for a reader
 * (mt_model_set_reader). */
const mt_param *mt_model_params(const mt_model *model, int64_t *count);
mt_bucket *mt_model_buckets(mt_model *model, int64_t *count);
const mt_options *mt_model_options(const mt_model *model);
const mt_model_plan *mt_model_get_plan(const mt_model *model);
const mt_ops *mt_model_ops(const mt_model *model);
mt_stream *mt_model_stream(const mt_model *model);
mt_dtype mt_model_dtype(const mt_model *model);
const mt_grid *mt_model_grid(const mt_model *model);
int64_t mt_model_bytes(const mt_model *model); // bytes of device memory in its plan

/* The parts of a model that can rest while another model works on the same device. */
typedef enum mt_part { MT_PART_PARAMS, MT_PART_GRADS, MT_PART_OPTIMIZER, MT_PART_CACHE, MT_NUM_PARTS } mt_part;

/* Releases the device memory of the parts (bits 1 << mt_part) between two steps, and allocates it again. Parameters and
 * optimizer state wait in pinned host memory. Gradients, which the next step overwrites, and the cache, which no
 * generator may use then, are discarded. While a part rests, nothing may use it: addresses in buckets are NULL, and a
 * training step is an error unless the cache alone rests. Every rank calls
 * them; too little memory on any rank is every rank's error, and changes nothing. Parts that rest already, or are
 * awake, stay as they are. */
int mt_model_rest(mt_model *model, unsigned parts, mt_error *error);
int mt_model_wake(mt_model *model, unsigned parts, mt_error *error);

/* Lends the parameters and the optimizer's state to `stream`, which may belong to another model, until mt_model_return:
 * mt_bucket_shard then gives whole, current weights, or shards of optim_grads_params; of parts that rest, the copies on
 * the host. Operations enqueued on `stream` between the two calls read them, and write them if `writes`. Every rank
 * calls both. */
void mt_model_lend(mt_model *model, bool writes, mt_stream *stream);
void mt_model_return(mt_model *model, mt_stream *stream);

/* Sets a stream that still reads parameters or optimizer state, such as the stream of a save's copies: the model's
 * stream waits for its present work before it changes them. NULL: nothing reads any more. */
void mt_model_set_reader(mt_model *model, mt_stream *reader);

/* Checks a batch of a training step, an evaluation or mt_model_forward against the model: the number of tokens, spans
 * inside them with a query for each, tokens and positions in range, labels in range where loss_mask is not 0; with
 * context parallelism also the rules of mt_context_cut. The error names index, value and limit. */
int mt_batch_check(const mt_model *model, const mt_batch *batch, mt_error *error);

/* Forward over a batch that passes mt_batch_check, through the loss; adds to the step's loss sums. `training` enables
 * dropout. With context parallelism `batch` is the whole batch, and results are those of this rank's shard. Every rank
 * of a pipeline calls it, and none with `training`: mt_train_step runs the schedule. */
void mt_model_forward(mt_model *model, const mt_batch *batch, bool training);

/* Switches the adapters of a model off (`used` false) or on again: the forwards between, which do not train, are those
 * of its base and leave no trace. Decoding does so without a graph. */
void mt_model_use_adapters(mt_model *model, bool used);

/* Several adapters over one base. Copies the adapter that the model holds, as it was loaded, to row `index` of the
 * table that plan.num_adapters asked for. `own` are the options of a model with this adapter alone: its lora_rank, at
 * most the model's, lora_alpha and lora_roles, which the model's include. Decoding multiplies a token's rows by the
 * matrices of its adapter (mt_batch.adapter_rows, mt_sequence.adapter) and by no other, in the products of that model.
 * Adapters of experts have no table. */
void mt_model_keep_adapter(mt_model *model, int64_t index, const mt_options *own);

/* Repeats the last forward of a model on one pipeline rank, between that forward and its backward: writes the same
 * activations and changes nothing else. No loss, load, auxiliary loss or gradient counts twice. Recomputation replays
 * layers in this way. */
void mt_model_replay(mt_model *model);

/* Backward of the last forward: parameter gradients accumulate, for a loss that is the sum over unmasked tokens, plus
 * the losses of multi-token prediction. */
void mt_model_backward(mt_model *model);

/* From now on (or no longer) scoring yields the sum of the squared probabilities of each token's distribution in place
 * of its entropy. On the CPU. */
void mt_model_score_squares(mt_model *model, bool squares);

/* Copies results of the last forward to the host: logp[T], the log-probability of every token's label; entropy[T]; and
 * logits as fp32 [T, vocab_size] without padding. NULL: not wanted. Every rank of a model calls it and gets them. */
void mt_model_read(mt_model *model, float *logp, float *entropy, float *logits);

/* Forward for generation: writes keys and values into cache rows cache_rows[T], attends over `batch->spans` whose k
 * rows are cache rows, and returns fp32 logits [num_rows, vocab_size] of the batch rows asked for. labels, loss_mask
 * and token_index are not read. With plan->page_rows the k rows are rows of mt_pages with the table batch->pages, of
 * cache_sequences * ceil(max_position / page_rows) + 1 entries. */
void mt_model_decode(mt_model *model, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                     int64_t num_rows, float *logits);

/* Of an encoder-decoder: computes the memory of inputs[n], n <= plan->max_inputs, and what the layers of cross
 * attention make of it, and keeps that in place `slot` of cache_sequences. In mt_model_decode sequence s of the batch
 * attends to the k rows of span s of batch->encoder, which begin at slot * max_inputs. */
void mt_model_encode(mt_model *model, int64_t slot, const int32_t *inputs, int64_t n);

/* Of a model with a vision tower: computes the features of an image's tokens from its patches, as those of
 * mt_image_batch, and keeps them in rows [row, row + tokens of the image) of plan->max_image_tokens, for
 * mt_batch.image_rows. Ranks without the embedding do nothing. grid NULL: no image; with optim_grads_params a rank then
 * gathers the tower's weights with the ranks that have one. */
void mt_model_see(mt_model *model, int64_t row, const mt_image_grid *grid, const float *patches);

/* The patches whose features this rank has computed since the model was created, without recomputation. */
int64_t mt_model_patches(const mt_model *model);

/* As mt_model_decode, but the device samples a token from each row, with the random number uniforms[num_rows] in
 * [0, 1) and no repetition penalty: logits stay there. Every rank of the model gets sampled[num_rows]. */
void mt_model_decode_sample(mt_model *model, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                            int64_t num_rows, const mt_sampling *sampling, const double *uniforms, mt_sampled *sampled);

/* Routing replay, on the CPU: the experts of a token, chosen in one pass, are used in others. The probabilities of the
 * chosen experts are those of the pass at hand. */
typedef struct mt_routes {
    int64_t num_layers, topk; // of the whole model; layers without experts, and those of other ranks, are not touched
    float *experts;           // [rows, num_layers, topk] row token_index of a token; -1: none
    double replayed;          // choices of a token and a layer that training has replayed, not counting recomputation
    double differing;         // replayed choices that are not the router's own
} mt_routes;

/* Elements of mt_routes.experts for `rows` rows; 0: no layer has experts. */
int64_t mt_routes_size(const mt_options *options, int64_t rows);

/* From now on, all forwards but generation's write the chosen experts to `routes` (replay false), or take the experts
 * of that table; NULL: neither. */
void mt_model_use_routes(mt_model *model, mt_routes *routes, bool replay);

/* From now on, generation keeps the experts of the tokens in the cache, for mt_sequence.routes. */
void mt_model_keep_routes(mt_model *model);

/* Copies rows of the cache, in all layers, before the next forward. */
typedef struct mt_cache_copy {
    int64_t from, to, rows;
} mt_cache_copy;
void mt_model_cache_copy(mt_model *model, const mt_cache_copy *copy);

/* Copies the states of a slot, in all layers that have them, before the next forward. A slot has the state of the text
 * that runs in it, and one that is kept for texts with the same beginning. */
typedef struct mt_state_copy {
    int64_t from, to; // slots
    bool from_kept, to_kept;
} mt_state_copy;
void mt_model_state_copy(mt_model *model, const mt_state_copy *copy);

/* ==== §11 schedules =============================================================================================== */

/* An action of a schedule: what a rank does next. Forwards and backwards process one micro-batch on one chunk (virtual
 * stage) of this rank. A backward is whole, or in two parts that a zero-bubble schedule may separate. */
typedef enum mt_action_kind {
    MT_ACTION_FORWARD,
    MT_ACTION_BACKWARD,        // gradients of the input and of the weights
    MT_ACTION_BACKWARD_INPUT,  // gradients of the input only; BACKWARD_WEIGHT follows later
    MT_ACTION_BACKWARD_WEIGHT, // gradients of the weights; afterwards the micro-batch's activations are free
    MT_ACTION_SEND_FORWARD,    // starts to send the chunk's output; the buffer is free when the send completes
    MT_ACTION_RECV_FORWARD,    // waits for the chunk's input
    MT_ACTION_SEND_BACKWARD,   // starts to send the gradient of the chunk's input
    MT_ACTION_RECV_BACKWARD,   // waits for the gradient of the chunk's output
} mt_action_kind;

typedef struct mt_action {
    mt_action_kind kind;
    int64_t micro_batch;
    int64_t chunk; // of this rank, 0..vp - 1; also for sends and receives
    int peer;      // pipeline rank of a send or receive, else -1
} mt_action;

/* Legal schedules: 1F1B and ZB-H1 with vp == 1; interleaved with pp > 1, vp > 1, pp <= group <= micro_batches, and
 * micro_batches % group either 0 or at least pp; forward-only with any of these sizes, but vp > 1 needs pp > 1. */
typedef struct mt_schedule {
    mt_schedule_kind kind;
    int64_t pp;            // pipeline ranks
    int64_t vp;            // chunks (virtual stages) per rank
    int64_t micro_batches; // per training step
    int64_t group;         // consecutive micro-batches on one chunk before the next chunk runs; unused with vp == 1
} mt_schedule;

/* Writes the actions of pipeline rank `rank` and returns their number; `actions` may be NULL to count. A pure function.
 *
 * Virtual stage chunk * pp + rank feeds the next one: the same chunk of the next rank, or chunk + 1 of rank 0 after the
 * last rank. A send follows the action that computes the tensor; a receive precedes the action that needs it. A send
 * only starts the transfer. A runner posts receives early, by looking ahead in the list, so that transfers overlap with
 * computation. From rank a to rank b, a's sends of one direction (forward: activations; backward: gradients) are in the
 * order of b's receives, so messages need no names. With pp == 2 and vp > 1 both directions go from a to b, in
 * different orders: give each direction a channel of its own (an MPI tag, an NCCL communicator).
 *
 * 1F1B: Narayanan et al., "PipeDream-Flush": pp - rank - 1 forwards of warm-up, then one forward and one backward
 * alternately, then the remaining backwards. Interleaved: Narayanan et al., "Efficient large-scale language model
 * training on GPU clusters using Megatron-LM": 2 (pp - rank - 1) + (vp - 1) group forwards of warm-up, in the order of
 * Megatron's get_schedule_table. ZB-H1: Qi et al., "Zero bubble pipeline parallelism": as 1F1B, with the weights'
 * gradients `rank` micro-batches late, where they fill idle time. Forward-only: evaluation. */
int64_t mt_schedule_actions(mt_action *actions, const mt_schedule *schedule, int64_t rank);

/* Fills stages[chunk * pp + rank] from finished options, whose layers data/options/option_rules.c has checked: equal
 * stages; first and last stages of other sizes; equal stages with the embedding and the loss counted as layers; or the
 * stages of pipeline_letters. */
void mt_pipeline_layout_build(mt_stage *stages, const mt_options *options);

/* Number of virtual stages in the letters of a layout. */
int64_t mt_pipeline_layout_count(const char *letters);

/* The schedule of finished options for training steps of `micro_batches` micro-batches. */
mt_schedule mt_schedule_of(const mt_options *options, int64_t micro_batches);

/* ==== §12 gradient buckets ======================================================================================== */

/* Enclose every use of a bucket's weights, in forward and backward: between the two calls, the weights' pointers are
 * bound and their values whole and current. All ranks of the data group make the same calls in the same order, because
 * an acquire may gather the bucket, and may begin to gather the next one: the neighbour in the direction of the last
 * calls, ascending in a forward and descending in a backward. */
void mt_bucket_acquire(mt_model *model, int64_t bucket);
void mt_bucket_release(mt_model *model, int64_t bucket);

/* Enclose the part of a micro-batch's backward that adds to a bucket's gradients. A bucket that is used twice, such as
 * a tied embedding, is acquired twice and released once. The step's first acquire discards the gradients of the step
 * before; with sharded gradients each micro-batch begins anew. `last`: no other micro-batch of this step adds to these
 * gradients, so their sum over the ranks can begin. */
void mt_bucket_gradients_acquire(mt_model *model, int64_t bucket);
void mt_bucket_gradients_release(mt_model *model, int64_t bucket, bool last);

/* The states of a parameter. The master weights of an fp32 model are its weights. */
typedef enum mt_param_state {
    MT_STATE_WEIGHTS,
    MT_STATE_MASTER,
    MT_STATE_EXP_AVG,    // the first state of MT_OPTIMIZERS
    MT_STATE_EXP_AVG_SQ, // the second one, which only AdamW has
    MT_NUM_STATES
} mt_param_state;

/* Muon's factor of the update of a matrix; and its iterations on matrices x, each [rows, cols], of MT_BF16 or MT_F32 as
 * fp32_matmul_prec says. x and next change places in each. `squares` and `polynomial` are [count, side, side], where
 * side is cols if transposed, which is for the shorter side, else rows. With a group, ranks have different rows (if
 * transposed, else columns) of the same matrices; counted_rows first ones are no copies of another rank's. */
typedef struct mt_iterate {
    int64_t count, rows, cols, counted_rows;
    bool transposed;
    void *x, *next, *squares, *polynomial;
    const mt_group *group; // NULL: none
} mt_iterate;
float mt_muon_factor(const mt_muon_options *o, int64_t rows, int64_t cols);
void mt_newton_schulz(const mt_ops *ops, const mt_muon_options *o, mt_iterate *x, mt_stream *stream);

/* The name of an optimizer as --optimizer. With it parameters have the states [0, mt_num_states), and in files these
 * names: "" for the weights. */
int mt_num_states(mt_optimizer optimizer);
const char *mt_optimizer_name(mt_optimizer optimizer);
const char *mt_state_name(mt_optimizer optimizer, mt_param_state state);

/* All `count` elements of one state of a bucket, on the device, in the type that mt_bucket_shard gives; not of a state
 * with scales. Every rank of the data group calls it. Valid until the next call. Not during a step: it may overwrite
 * gradients. */
const void *mt_bucket_gather_state(mt_model *model, int64_t bucket, mt_param_state state);

/* The type of a trained parameter's state. */
mt_dtype mt_state_dtype(const mt_model *model, mt_param_state state);

/* A bucket's sizes, shard, group and strategy. Unlike mt_model_buckets, this gathers no parameters. */
const mt_bucket *mt_bucket_get(const mt_model *model, int64_t bucket);

/* This rank's elements of one state of a bucket: [first, first + count), at `data` (NULL: none on this rank). The
 * weights of a bucket that has some in fp8 are no shard: see mt_state_shard. */
typedef struct mt_shard {
    void *data;
    int64_t first, count;
    mt_dtype dtype;
} mt_shard;
mt_shard mt_bucket_shard(const mt_model *model, int64_t bucket, mt_param_state state);

/* The same for a parameter: the shard of its bucket, or where that has weights in fp8, the parameter's own. */
mt_shard mt_state_shard(const mt_model *model, const mt_param *param, mt_param_state state);

/* Sets the shard's part of elements [at, at + n) of its bucket from host memory of the shard's type, or to zero if
 * `from` is NULL. Enqueued on the model's stream; invalidates gathered copies. */
void mt_shard_write(mt_model *model, const mt_shard *shard, int64_t at, const void *from, int64_t n);

/* Elements [*begin, *end) of the parameter are in a shard of its bucket; *begin >= *end: none. */
void mt_param_part(const mt_param *param, const mt_shard *shard, int64_t *begin, int64_t *end);

/* Sets this rank's part of a state with scales, which mt_param_part gives and is not empty, from its values in host
 * memory, and its scale; weights in fp8: those of all blocks. Reads n elements of that part of any state, from element
 * `at` of the parameter on. Both wait for the device. */
void mt_state_write(mt_model *model, const mt_param *param, mt_param_state state, const float *values);
void mt_state_read(mt_model *model, const mt_param *param, mt_param_state state, int64_t at, float *values, int64_t n);

/* ==== §13 optimizer; §14 the training step ======================================================================== */

/* The run's learning rate and weight decay after `consumed_samples` samples (Megatron's OptimizerParamScheduler). */
double mt_learning_rate(const mt_options *options, int64_t consumed_samples);

/* The same of the word embedding and the output layer: with --decoupled-lr between its own maximum and minimum. */
double mt_decoupled_learning_rate(const mt_options *options, int64_t consumed_samples);
double mt_weight_decay(const mt_options *options, int64_t consumed_samples);

/* The most sizes that the data of a run can have been ordered for: that of its start and those of its extensions. */
enum { MT_MAX_DATA_PLANS = 64 };

/* The training data of a run and the sizes that they were ordered for. */
typedef struct mt_data_state {
    int64_t documents, tokens, fingerprint; // documents or samples; fingerprint 0: unknown
    int64_t group;                          // samples that a cyclic loader draws at once; 0: unknown
    int64_t num_plans;                      // 0: unknown
    int64_t plans[MT_MAX_DATA_PLANS][2];    // samples to train on and to validate with, ascending
} mt_data_state;

/* The scale of the loss in fp16, as Megatron's DynamicGradScaler: options->hysteresis steps that overflow halve it, and
 * then each such step does, until options->loss_scale_window steps in succession have not and double it. */
typedef struct mt_loss_scaler {
    double scale; // 0: the next step begins with options->initial_loss_scale
    int64_t growth_tracker, hysteresis_tracker;
} mt_loss_scaler;

/* After a step whose gradients overflow, or do not. With options->loss_scale the scale is constant. */
void mt_loss_scaler_update(mt_loss_scaler *scaler, const mt_options *options, bool overflows);

/* The state of a run besides parameters and moments; with these, a run continues bit for bit. */
typedef struct mt_run_state {
    int64_t iteration;              // steps done
    int64_t consumed_train_samples; // sequences trained on
    int64_t consumed_valid_samples;
    int64_t optimizer_step;     // updates by AdamW, for its bias correction, up to the last step that was checked
    int64_t skipped_iterations; // steps without an update, up to the last step that was checked
    /* fp16 */
    mt_loss_scaler loss_scaler;
    int64_t skipped_samples; // of the steps that it skipped, which the schedules of learning rates do not count
    /* reinforcement learning */
    int64_t consumed_prompts;    // prompts that got responses
    int64_t prompts_fingerprint; // of all prompts of the run; 0: unknown
    mt_data_state data;
} mt_run_state;

/* The samples that schedules of learning rate and weight decay count. */
static inline int64_t mt_scheduled_samples(const mt_run_state *state) {
    return state->consumed_train_samples - state->skipped_samples;
}

/* Maximum number of multi-token prediction modules. */
enum { MT_MAX_MTP_LAYERS = 8 };

/* The metrics of a step; sums and norms over the whole job. */
typedef struct mt_metrics {
    double loss;                          // mean over unmasked tokens; NaN if all are masked
    double mtp_losses[MT_MAX_MTP_LAYERS]; // mean loss of each module, before --mtp-loss-scaling-factor
    double grad_norm;                     // before clipping
    double learning_rate, weight_decay;
    double tokens;       // tokens in the step, masked or not
    double seconds;      // time for these tokens, at the mean rate of all steps since metrics were last read
    int64_t skipped;     // steps of this run without an update, up to and including this one, also before a resume
    double data_seconds; // this rank waited for the samples of this step
    double loss_scale;   // in fp16, of this step; else 0
    double num_zeros;    // elements of the gradients that are 0, if options->log_num_zeros_in_grad
    double params_norm;  // root of the sum of the squared parameters after the step, if options->log_params_norm
    /* 0 without experts */
    double load_balancing_loss, z_loss;   // times their coefficients; means over tokens and over layers with experts
    double aux_losses[MT_NUM_AUX_LOSSES]; // the parts of load_balancing_loss: aux_loss, seq_aux_loss, global_aux_loss
    double imbalance, worst_imbalance;    // greatest load of an expert / mean load: mean and maximum over layers
    double dropped;                       // fraction of the choices of experts that capacities dropped
    double indexer_loss; // of sparse attention, times its coefficient: mean over tokens and layers with an indexer
    double loss_metrics[MT_MAX_LOSS_METRICS]; // sums of a loss on the host: mt_loss_sums
    double loss_count;                        // of that loss
} mt_metrics;

/* Fills `batch` with micro-batch `index` of this step. Calls come in the order of this rank's schedule, in the first
 * step of a pipeline those of its first micro-batches before, one for each of its virtual stages. Ranks of one model
 * replica fill in the same batch, which must pass mt_batch_check. Returns 0, or -1 with error. */
typedef int mt_batch_source(void *context, int64_t index, mt_batch *batch, mt_error *error);

/* Receives the results of a micro-batch, on the ranks with the loss: log-probabilities of the labels and entropies of
 * all its tokens [batch->num_tokens], padding included; or with a value head the values, and entropy NULL. */
typedef void mt_score_sink(void *context, int64_t micro_batch, const mt_batch *batch, const double *logp,
                           const double *entropy);

/* A forward pass without dropout over `micro_batches` micro-batches per rank. `sink` receives each of them, in the
 * order of their numbers. For models without `train` in their plan, or with a loss on the host. Every rank calls it;
 * data-parallel ranks with the same number of micro-batches, which may be empty of unmasked tokens. */
int mt_score_tokens(mt_model *model, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                    mt_score_sink *sink, void *sink_context, mt_error *error);

/* In a sink: the place in the batch of token t of this rank, counted from 0; -1 after the last one. logits[vocab_size]
 * (NULL: not wanted) become its logits. All ranks of a tensor group ask for the same. */
int64_t mt_score_logits(mt_model *model, int64_t t, float *logits);

/* In a sink: hidden[T, hidden_size] of this rank's tokens at plan->taps[tap]. All ranks of a tensor group call it. */
void mt_score_hidden(mt_model *model, int64_t tap, float *hidden);

/* One training step over `micro_batches` micro-batches per rank: forwards and backwards in the order of the schedule
 * (in the first step of a pipeline its first micro-batches one at a time before the others), gradients summed over the
 * data group, their norm and clipping, AdamW. Updates `state`. With metrics == NULL the host only enqueues the step,
 * and waits if two enqueued steps are unfinished. Reading metrics waits for the device. All ranks pass metrics in the
 * same steps.
 *
 * Bad steps. step_guard checks each step by options->check_for_nan_in_loss_and_grad and check_for_spiky_loss. A bad
 * step changes no weight and no moment, and does not count in AdamW's bias correction; its samples are consumed. All
 * ranks decide alike, because the checked numbers are sums over all ranks. If the values that are not finite began in a
 * router, the message names its rank and layer. options->bad_step_policy says what follows. Because steps are enqueued,
 * it may follow in one of the next two calls, or in mt_train_finish: stop    an error. skip    a warning; an error
 * after more than options->max_bad_steps_in_a_row bad steps in succession. rewind  mt_train_step returns MT_REWIND, and
 * the device is idle. The caller restores parameters, optimizer and `state` from a checkpoint and calls
 * mt_train_rewound; mt_checkpoint_rewind (data/checkpoint/checkpoint_save.h) does both. Until then every call
 * returns MT_REWIND. Afterwards, bad steps up to this iteration are skipped.
 *
 * In fp16 the loss is scaled by state->loss_scaler, and the host waits for each step. A step that is not finite makes
 * no update and changes the scale; with options->check_for_nan_in_loss_and_grad it is bad if the scale cannot fall: if
 * it is constant, or options->min_loss_scale.
 *
 * A step whose tokens are all masked makes no update either. It is not bad: a warning reports it, at once or in the
 * same later calls.
 *
 * With options->rerun_mode "validate_results" the host waits for every step and repeats a bad step with the same
 * parameters. If some rank's result differs, the fault is transient: a warning names the rank, and the second result
 * counts. If all ranks have equal results, the fault is repeatable. options->error_injection_rate makes steps after the
 * first of a run faulty, on ranks that depend on the seed and the iteration alone: the loss of such a rank is NaN, or,
 * as correct_result, its good result is rejected. */
enum { MT_REWIND = 1 };
int mt_train_step(mt_model *model, mt_run_state *state, int64_t micro_batches, mt_batch_source *source, void *context,
                  mt_batch *batch, mt_metrics *metrics, mt_error *error);

/* Compares the bytes of every parameter with those of the first data-parallel rank that has it. An error on all ranks
 * names a parameter and a rank that differ. Not for parameters that are sharded. Waits for the device. */
int mt_train_check_replicas(mt_model *model, mt_error *error);

/* Waits for the enqueued steps and checks them. Call it before their result is saved, evaluated or timed. */
int mt_train_finish(mt_model *model, mt_error *error);

/* The iteration of a bad step that the next mt_train_step answers with MT_REWIND; 0: none. While it is not 0, the model
 * must not be saved or evaluated. The same on every rank. */
int64_t mt_train_bad_iteration(const mt_model *model);

/* Ends MT_REWIND, after parameters, optimizer and state were restored. */
void mt_train_rewound(mt_model *model);

/* The running average of the loss; options->check_for_spiky_loss compares each loss with it. A checkpoint has it, so
 * that spikes are found after a restart or a rewind too. Both functions wait for the device. */
typedef struct mt_loss_average {
    double mean;
    int64_t steps; // good steps that it averages
} mt_loss_average;
mt_loss_average mt_train_loss_average(mt_model *model);

/* The operand of the next steps that is not finite, for the message about a bad step, as "the values of the critic";
 * NULL: nothing known. Must live as long as the model. */
void mt_train_name_fault(mt_model *model, const char *operand);

/* state->optimizer_step with the steps that are enqueued, for a checkpoint: mt_train_step sees later which of them made
 * an update. Waits for the device. */
int64_t mt_train_updates(mt_model *model, const mt_run_state *state);

/* state->skipped_iterations with the steps that were checked since, for a checkpoint: after mt_train_finish all. */
int64_t mt_train_skipped(const mt_model *model, const mt_run_state *state);
void mt_train_set_loss_average(mt_model *model, const mt_loss_average *average);

/* The state of delayed scaling of this rank's linears. A checkpoint has it, so that a run continues bit for bit. The
 * functions wait for the device. */
typedef struct mt_fp8_key {
    int64_t layer;   // number in the whole model
    char linear[16]; // "qkv", "down", ...
} mt_fp8_key;
typedef struct mt_fp8_state {
    int64_t num_linears, history_length; // history_length 0: the model has no delayed scaling
    const mt_fp8_key *keys;              // [num_linears], the model's
    float *scale;                        // [num_linears, MT_NUM_FP8_OPERANDS]
    float *history;                      // [history_length, num_linears, MT_NUM_FP8_OPERANDS], see mt_fp8_scale_args
    float largest[MT_NUM_FP8_OPERANDS];  // largest number of each operand's format
} mt_fp8_state;
mt_fp8_state mt_train_fp8_state(mt_model *model); // to free; entry 0 of the history is 0
void mt_train_set_fp8_state(mt_model *model, const mt_fp8_state *state);

/* Mean loss of `micro_batches` micro-batches per rank, without training. mt_evaluate_sums adds its numerator and
 * denominator to sums[2], for an evaluation of several calls. */
int mt_evaluate_sums(mt_model *model, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                     double *sums, mt_error *error);
int mt_evaluate(mt_model *model, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                double *loss, mt_error *error);

/* ==== §16 generation ============================================================================================== */

typedef enum mt_finish { MT_UNFINISHED, MT_FINISH_STOP, MT_FINISH_LENGTH } mt_finish;

/* Sees the model's logits [vocab_size] after sequence->tokens[position], on the host. The token that follows is in
 * `tokens` already, unless the sequence ends before it. Several threads call it at once, each for another position. */
struct mt_sequence;
typedef void mt_logits_view(void *context, const struct mt_sequence *sequence, int64_t position, const float *logits);

/* The images of a sequence, each in the place of a run of its prompt's tokens. `read` gives the patches of one, as
 * mt_image_batch has them, when its text is admitted; an error ends the generation. */
typedef struct mt_sequence_image {
    int64_t first;      // its first token
    mt_image_grid grid; // height width / spatial_merge_size^2 tokens
    uint64_t key;       // a fingerprint of its contents: texts whose images have equal grids and keys share prefixes
} mt_sequence_image;

typedef struct mt_sequence_images {
    int64_t count;
    const mt_sequence_image *items; // [count] in the order of their tokens
    int (*read)(void *context, int64_t image, float *patches, mt_error *error);
    void *context;
} mt_sequence_images;

/* A sequence being generated. The last fields are for generators of mt_generator_create_mixed. */
typedef struct mt_sequence {
    int64_t id;         // part of the key of its random draws
    int32_t *tokens;    // [max_tokens] the prompt, then the generated tokens
    int64_t num_prompt; // tokens of the prompt, at least one
    int64_t num_tokens; // of prompt and generated tokens so far
    int64_t max_tokens; // the sequence ends at this length
    float *logps;       // [max_tokens - num_prompt] of the generated tokens: mt_sampled.logp; NULL: not kept
    float *sampled_logps;
    float *routes; // mt_routes.experts of all tokens but the last, written at the end on ranks that computed it, for
                   // their layers; NULL: not kept
    int64_t slot;  // of the cache while it runs; -1: it waits or has ended
    mt_finish finish;
    const mt_sampling *sampling; // its own; NULL: the generator's
    mt_logits_view *view;        // sees the logits of every new token; NULL: none
    void *view_context;
    bool views_prompt; // ... and those after each token of the prompt, which shares no prefix then
    int32_t *inputs;   // [num_inputs] tokens for the encoder of an encoder-decoder; else NULL
    int64_t num_inputs;
    int64_t adapter;                  // of the model's table, from 1; 0: none
    const mt_sequence_images *images; // of a model with a vision tower, as long as it runs; NULL: none
    int64_t num_drafts;               // private: drafted tokens behind num_tokens, which the next forward checks
} mt_sequence;

/* Samples the token that follows `sequence` from logits[vocab_size], in this order:
 *   - repetition penalty r (Keskar et al., "CTRL"): x = x / r if x > 0, else x r, for the logit x of every token of the
 *     prompt and the generated text (as Hugging Face transformers' RepetitionPenaltyLogitsProcessor);
 *   - temperature 0: the argmax, the lowest id among equals. Else p = softmax(x / temperature), restricted to
 *   - the top_k most probable tokens, then
 *   - the smallest set of these that holds top_p of their probability (Holtzman et al., "The curious case of neural
 *     text degeneration"), then
 *   - those with p >= min_p max(p) (Nguyen et al., "Min-p sampling"; as transformers' MinPLogitsWarper).
 * Philox at (id, num_tokens) of the sequence gives the random number, so the draw does not depend on the rest of the
 * batch. `scratch` has room for 2 vocab_size. */
mt_sampled mt_sample(const float *logits, int64_t vocab_size, const mt_sampling *sampling, const mt_sequence *sequence,
                     int32_t *scratch);

/* log softmax(logits)[token], of logits[vocab_size] whose largest is finite; NaN if none is. */
float mt_logits_logp(const float *logits, int64_t vocab_size, int32_t token);

/* The ends of a sequence: tokens, and a function that sees every new token. */
enum { MT_MAX_STOPS = 256 };
typedef struct mt_stops {
    int32_t ids[MT_MAX_STOPS];
    int64_t count;
    bool (*ends_text)(void *context, const mt_sequence *sequence); // true: it ends with this token; NULL: none
    void *context;
} mt_stops;

/* Rows of a page of the cache where a plan does not say: a tile of keys in the kernels of attention. Tokens of a
 * forward with prompts: enough for fast matrix products, little memory. */
enum { MT_PAGE_ROWS = 128, MT_PREFILL_TOKENS = 512 };

/* Adds to a plan, such as a training model's, a cache for `count` sequences of at most max_tokens tokens at once.
 * cache_tokens > 0: with memory for so many tokens only, at least one sequence; sequences that find no page wait.
 * plan->num_drafts is set before. */
void mt_plan_generation(mt_model_plan *plan, int64_t count, int64_t max_tokens, int64_t cache_tokens);

/* Number of unfinished sequences. */
int64_t mt_sequences_unfinished(const mt_sequence *sequences, int64_t count);

/* Generates several sequences as one batch, with a key/value cache. */
typedef struct mt_generator mt_generator;

/* A generator for a model whose plan has mt_generator_plan or mt_plan_generation. Every rank creates it; the model's
 * weights do not change while it lives. */
mt_generator *mt_generator_create(mt_model *model, const mt_sampling *sampling, const mt_stops *stops);

/* The same for sequences with settings of their own: samplings that differ, and views of logits. A forward whose
 * sequences agree and that nobody views samples on the device; any other takes its logits to the host, where they have
 * memory. max_viewed: rows of logits of prompts in a forward at most; the plan's max_logits is at least its
 * cache_sequences + max_viewed, and max_viewed at least 1. */
mt_generator *mt_generator_create_mixed(mt_model *model, const mt_sampling *sampling, const mt_stops *stops,
                                        int64_t max_viewed);
void mt_generator_destroy(mt_generator *generator);

/* One forward: the next token of each running sequence, and as many tokens of the prompts of others as the plan's
 * max_tokens leaves room for. With the plan's num_drafts, modules of multi-token prediction then draft so many tokens
 * for each running sequence (Leviathan et al., "Fast inference from transformers via speculative decoding"), and the
 * next forward reads them too: a sequence gets the tokens that sampling gives behind them, as far as the drafts are
 * these very tokens, and one more. So tokens are those without drafts, up to the rounding of larger batches. Sequences
 * wait until one of the plan's cache_sequences is free and the cache has pages for their tokens; the first ones in
 * sequences[count] run first. If the cache is full, the last running one waits again, and its tokens are computed anew.
 * A sequence ends at a stop token, which it includes, or at its max_tokens. Between steps the caller may append
 * sequences, end some by setting `finish`, and leave out ended ones, in the same order on every rank. A prompt that
 * begins as a previous one shares its pages, or what is left of them. Returns the number of unfinished sequences, or -1
 * with error if logits are not finite. Where data-parallel ranks share experts or the shards of parameters, each calls
 * it with its own sequences, perhaps none, until it returns 0: the number is the sum. */
int64_t mt_generator_step(mt_generator *generator, mt_sequence *sequences, int64_t count, mt_error *error);

/* The work that a forward does on prompts: their tokens; the keys that these attend to in a layer that sees all of
 * them, t + 1 for the token at position t; tokens whose logits are viewed although the next token is known; patches of
 * images, and the sum of their squares: a layer of the tower that sees a whole image has so many pairs of them. */
typedef struct mt_prefill {
    int64_t tokens, keys, viewed, patches, patch_pairs;
} mt_prefill;

/* Limits the work on prompts in a forward from now on, the same on every rank: less lets running sequences wait less
 * for their next token, and prompts longer. With `tokens` 0 a forward reads none; otherwise it may read one token of a
 * prompt that has more keys than the limit, or beside the first prompt's tokens one image of more patches. As created:
 * the rest of the plan's max_tokens. */
void mt_generator_limit_prefill(mt_generator *generator, const mt_prefill *limit);

/* The work on prompts in the last forward. */
mt_prefill mt_generator_read_prefill(const mt_generator *generator);

/* The sequences whose next forward is a decode step: their number, and the keys that their tokens attend to. */
typedef struct mt_streams {
    int64_t count, keys;
} mt_streams;

/* Of sequences[count], between steps. */
mt_streams mt_generator_streams(const mt_generator *generator, const mt_sequence *sequences, int64_t count);

/* True if `wanted` is true on any of the ranks that step together; each of them calls it after the same step. */
bool mt_generator_agree(const mt_generator *generator, bool wanted);

/* Totals of a generator: a step that computes prompts is a prefill, any other a decode step. */
typedef struct mt_generator_totals {
    int64_t prefill_tokens, decode_tokens;   // tokens of prompts; tokens generated by decode steps
    int64_t new_tokens;                      // generated in all: the first of each sequence comes from its prefill
    int64_t drafted_tokens, accepted_tokens; // drafts that forwards have read; of these, sampled too
    double prefill_seconds, decode_seconds;
} mt_generator_totals;
mt_generator_totals mt_generator_read_totals(const mt_generator *generator);

/* Pages of the cache: all, and the ones with keys and values, of ended sequences too until their pages are needed.
 */
void mt_generator_read_pages(const mt_generator *generator, int64_t *all, int64_t *used);

/* ---- continuous batching over a cache in pages (Kwon et al., see mt_pages): the tokens of the next forward, their
 * sequences, and the pages of their keys and values. It knows no model. */

typedef struct mt_batcher_plan {
    int64_t max_sequences; // at once
    int64_t max_length;    // tokens of a sequence
    int64_t max_tokens;    // of a forward
    int64_t page_rows;
    int64_t num_pages;        // for at least one sequence of max_length; the page after them is for mt_batcher_pad
    bool has_states;          // layers keep states: a text shares a prefix only where a state stands
    int64_t max_viewed;       // rows of logits in a forward that are viewed and give no token; 0: none
    int64_t num_adapters;     // mt_model_plan.num_adapters; sequences share prefixes with those of their adapter alone
    int64_t max_inputs;       // tokens of a sequence for the encoder; 0: the model has none
    int64_t max_image_tokens; // whose features are kept at once, at least those of one sequence; 0: no images
    int64_t merge_size;       // of images: side of the square of patches that becomes a token
    int64_t num_drafts;       // mt_model_plan.num_drafts
} mt_batcher_plan;

/* An image of a sequence, and the row of its features. */
typedef struct mt_seen_image {
    int64_t sequence, image, row;
} mt_seen_image;

typedef struct mt_batcher {
    mt_batcher_plan plan;
    /* the forward at hand */
    mt_batch batch;           // with its page table
    int32_t *cache_rows;      // [num_tokens] where keys and values are written
    int64_t num_logits;       // rows whose logits are needed
    int32_t *logit_rows;      // [num_logits]
    int64_t *logit_sequences; // [num_logits] the sequence of each
    int64_t num_copies;       // of cache rows, before the forward
    mt_cache_copy *copies;
    int64_t num_state_copies; // in their order, before the forward
    mt_state_copy *state_copies;
    mt_prefill prefill;     // of prompts, and of sequences that were put back
    mt_prefill max_prefill; // of a forward; the caller may change it between forwards; at first as much as fits
    int64_t num_begun;      // sequences whose memory is computed before the forward (mt_model_encode)
    int64_t *begun;         // their slots
    int64_t num_seen;       // images whose features are computed before the forward (mt_model_see)
    mt_seen_image *seen;
    /* private */
    struct mt_cache_slot *slots;
    struct mt_added *added;           // with num_adapters: the forward as it was filled, before its order by adapter
    int32_t *references, *free_pages; // [num_pages] users of each page; the pages without one
    int64_t num_free, num_forwards;
} mt_batcher;

/* Creates a batcher with an empty cache, and frees it. */
mt_batcher *mt_batcher_create(const mt_batcher_plan *plan);
void mt_batcher_destroy(mt_batcher *batcher);

/* Fills the next forward, and sets the slots of sequences; returns its number of tokens, 0 if no sequence is
 * unfinished. The caller appends a token to the sequence of each row of logits that is not viewed only, and with drafts
 * to those rows only that mt_batcher_row_follows; then it calls mt_batcher_settle. See mt_generator_step. */
int64_t mt_batcher_next(mt_batcher *batcher, mt_sequence *sequences, int64_t count);

/* True for a row of logits behind all tokens of its sequence, none of them a draft that was not accepted. */
bool mt_batcher_row_follows(const mt_batcher *batcher, const mt_sequence *sequences, int64_t logit_row);

/* Drops the drafts that were not accepted from the cache, after the forward's tokens were appended. */
void mt_batcher_settle(mt_batcher *batcher, mt_sequence *sequences);

/* Of the sequences, between forwards: see mt_streams. */
mt_streams mt_batcher_streams(const mt_batcher *batcher, const mt_sequence *sequences, int64_t count);

/* True for a row of logits of a token within a prompt: the token that follows is known. */
bool mt_batcher_row_is_viewed(const mt_batcher *batcher, const mt_sequence *sequences, int64_t logit_row);

/* Fills the batch up to num_tokens tokens, at most page_rows more, with tokens whose results nobody reads. */
void mt_batcher_pad(mt_batcher *batcher, int64_t num_tokens);

#ifdef __cplusplus
}
#endif
#endif
