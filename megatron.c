/* megatron.c: trains and runs GPT-family transformers.
 *
 * Contents
 *   §1   checks, arenas, random numbers
 *   §2   options
 *   §3   kernels
 *   §3a  threads, elements, memory
 *   §3b  linear layers
 *   §3c  embedding and norms
 *   §3d  rotary positions
 *   §3e  attention
 *   §3f  activations, residual stream, rows
 *   §3g  cross-entropy, sampling
 *   §3h  mixture of experts
 *   §3i  optimizer and conversions
 *   §4   the rank grid and its groups
 *   §5   collectives
 *   §6   conjugate regions
 *   §7   linear
 *   §7a  vocabulary-parallel embedding and loss
 *   §7b  losses after pre-training
 *   §8   the parameter table
 *   §9   layers
 *   §9a  rotary tables
 *   §9b  saved values
 *   §9c  norms and the residual stream
 *   §9d  attention
 *   §9e  MLP
 *   §9f  mixture of experts
 *   §9g  layer
 *   §9h  context parallelism
 *   §10  a pipeline stage
 *   §10a embedding, head, layers
 *   §10b multi-token prediction
 *   §10c a stage's forward and backward
 *   §11  schedules
 *   §11a lists
 *   §11b layouts
 *   §12  gradient buckets
 *   §12a gather and reduce
 *   §12b access to sharded values
 *   §13  optimizer
 *   §14  the training step
 *   §15  the model
 *   §15a memory
 *   §15b creation
 *   §15c forward, backward, decoding
 *   §16  generation
 *   §17  gated delta net
 *   §17a its kernels
 *   §17b the mixer
 *   §17c the gated short convolution
 *   §18  Mamba-2
 *   §18a its kernels
 *   §18b the mixer
 *   §19  sparse attention
 *   §19a its kernels
 *   §19b the mixer
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // clock_gettime, madvise
#endif
#include "megatron.h"

#include <ctype.h>
#include <float.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef MT_HAVE_BLAS
#include <cblas.h>
#endif
#ifdef MT_HAVE_DNNL
#include <dnnl.h>
#endif
#ifdef MT_HAVE_MPI
#include <mpi.h>
#endif
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#else // one thread
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#define omp_get_max_threads()        1
#define omp_get_thread_num()         0
#define omp_set_num_threads(threads) (void)(threads)
#endif

/* ==== §1 checks, arenas, random numbers ========================================================================== */
/* The base of all other sections. Invariants: library code never exits on the user's input; host memory is allocated
 * here only; a random number is a pure function of its key and coordinate. */

const char *mt_version(void) {
    return MT_VERSION;
}

void mt_text_clean(char *text, bool keeps_lines) {
    for (char *c = text; *c; c++)
        if (iscntrl((unsigned char)*c) && !(keeps_lines && *c == '\n')) *c = '?';
}

int mt_error_set(mt_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    mt_text_clean(error->text, false);
    return -1;
}

int mt_launch_rank(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return 0;
}

void mt_job_abort(void) {
#ifdef MT_HAVE_MPI
    int started = 0;
    MPI_Initialized(&started);
    if (started) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
}

/* One thread ends the program: a second exit() could end the process while the first one's atexit functions run. */
static void die_alone(void) {
    static bool dying;
    static _Thread_local bool is_mine;
    if (is_mine) _exit(1); // from an atexit function
    if (__atomic_exchange_n(&dying, true, __ATOMIC_SEQ_CST))
        for (;;) sleep(1);
    is_mine = true;
}

void mt_die(const char *format, ...) {
    va_list arguments;
    die_alone();
    va_start(arguments, format);
    fflush(stdout);
    signal(SIGTERM, SIG_DFL);           // mpirun ends the other ranks by it
    if (mt_launch_rank() > 0) sleep(2); // an error of all ranks is printed once: rank 0's exit ends the others
    fprintf(stderr, "error: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    mt_job_abort();
    exit(1);
}

void *mt_malloc(int64_t bytes) {
    return mt_realloc(NULL, bytes);
}

void *mt_calloc(int64_t bytes) {
    void *memory = calloc(1, bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: cannot allocate %lld bytes", (long long)bytes);
    return memory;
}

void *mt_realloc(void *memory, int64_t bytes) {
    memory = realloc(memory, bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: cannot allocate %lld bytes", (long long)bytes);
    return memory;
}

char *mt_strdup(const char *text) {
    return strcpy(mt_malloc((int64_t)strlen(text) + 1), text);
}

double mt_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const struct {
    const char *name;
    int64_t size;
} mt_dtypes[MT_NUM_DTYPES] = {
    [MT_F32] = {"F32", 4},   [MT_BF16] = {"BF16", 2},       [MT_F16] = {"F16", 2},         [MT_F64] = {"F64", 8},
    [MT_I8] = {"I8", 1},     [MT_U8] = {"U8", 1},           [MT_I16] = {"I16", 2},         [MT_U16] = {"U16", 2},
    [MT_I32] = {"I32", 4},   [MT_U32] = {"U32", 4},         [MT_I64] = {"I64", 8},         [MT_U64] = {"U64", 8},
    [MT_BOOL] = {"BOOL", 1}, [MT_F8_E4M3] = {"F8_E4M3", 1}, [MT_F8_E5M2] = {"F8_E5M2", 1}, [MT_F16_SCALED] = {"F16", 2},
};

int64_t mt_dtype_size(mt_dtype dtype) {
    return mt_dtypes[dtype].size;
}

const char *mt_dtype_name(mt_dtype dtype) {
    return mt_dtypes[dtype].name;
}

float mt_bf16_to_f32(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

uint16_t mt_f32_to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16 | 0x40); // NaN stays NaN when its low bits go
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

float mt_f16_to_f32(uint16_t bits) {
    uint32_t exponent = bits & 0x7c00, sign = (uint32_t)(bits & 0x8000) << 16;
    float subnormal = (float)(bits & 0x3ff) * 0x1p-24f, value;
    uint32_t word, small;
    memcpy(&small, &subnormal, sizeof small);
    word = ((uint32_t)(bits & 0x7fff) << 13) + (112 << 23); // the biases of the exponents differ by 112
    word = exponent == 0x7c00 ? word | 0x7f800000 : word;   // infinity and NaN keep the largest exponent
    word = (exponent == 0 ? small : word) | sign;
    memcpy(&value, &word, sizeof value);
    return value;
}

uint16_t mt_f32_to_f16(float value) {
    uint32_t word, small;
    memcpy(&word, &value, sizeof word);
    uint32_t sign = word >> 16 & 0x8000, magnitude = word & 0x7fffffff, half;
    float shifted = fabsf(value) + 0.5f; // whose last bit is 2^-24, the step of subnormal numbers
    memcpy(&small, &shifted, sizeof small);
    half = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13; // a carry increments the exponent
    half = magnitude < 113 << 23 ? small - (126 << 23) : half;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half; // 65520 rounds to more than the largest half, 65504
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(sign | half);
}

bool mt_dtype_is_half(mt_dtype dtype) {
    return dtype == MT_BF16 || dtype == MT_F16;
}

float mt_half_to_f32(uint16_t bits, mt_dtype dtype) {
    return dtype == MT_F16 ? mt_f16_to_f32(bits) : mt_bf16_to_f32(bits);
}

uint16_t mt_f32_to_half(float value, mt_dtype dtype) {
    return dtype == MT_F16 ? mt_f32_to_f16(value) : mt_f32_to_bf16(value);
}

/* The address of element `index` of x; NULL where x is, as while an arena only counts. */
static void *mt_at(const void *x, int64_t index, mt_dtype dtype) {
    return x ? (char *)(uintptr_t)x + index * mt_dtype_size(dtype) : NULL;
}

void *mt_arena_alloc(mt_arena *arena, int64_t bytes) {
    int64_t start = arena->used;
    arena->used += (bytes + 255) / 256 * 256;
    if (!arena->base) return NULL;
    MT_CHECK(arena->used <= arena->capacity);
    return arena->base + start;
}

void mt_philox(uint32_t out[4], uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter_low, c1 = (uint32_t)(counter_low >> 32);
    uint32_t c2 = (uint32_t)counter_high, c3 = (uint32_t)(counter_high >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53 * c0, product1 = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

uint64_t mt_random_key(uint64_t seed, uint64_t purpose, uint64_t index) {
    uint32_t words[4];
    mt_philox(words, seed, purpose, index);
    return (uint64_t)words[0] << 32 | words[1];
}

/* ==== §2 options ================================================================================================== */
/* One flat struct describes the model, its training and the grid. data/options/ reads and writes it as text (command
 * line, YAML, --help) within the options of a run; data/options/option_rules.c derives the values that were left open
 * and checks the rules between values. This section has the questions that layers ask about the struct, and the limits
 * of backends. */

mt_options mt_options_plain(int64_t num_layers, int64_t hidden_size, int64_t num_attention_heads, int64_t vocab_size,
                            int64_t seq_length) {
    return (mt_options){
        .num_layers = num_layers,
        .hidden_size = hidden_size,
        .ffn_hidden_size = 4 * hidden_size,
        .num_attention_heads = num_attention_heads,
        .num_query_groups = num_attention_heads,
        .kv_channels = num_attention_heads > 0 ? hidden_size / num_attention_heads : 0,
        .max_position_embeddings = seq_length,
        .seq_length = seq_length,
        .vocab_size = vocab_size,
        .padded_vocab_size = (vocab_size + 127) / 128 * 128,
        .add_qkv_bias = true,
        .attention_output_bias = true,
        .mlp_bias = true,
        .norm_epsilon = 1e-5,
        .embedding_multiplier = 1,
        .attention_value_scale = 1,
        .init_method_std = 0.02,
        .hidden_dropout = 0.1,
        .attention_dropout = 0.1,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .rope_low_freq_factor = 1,
        .rope_high_freq_factor = 4,
        .yarn_beta_fast = 32,
        .yarn_beta_slow = 1,
        .yarn_correction_range_round_to_int = true,
        .kv_lora_rank = 32,
        .qk_head_dim = 128,
        .qk_pos_emb_head_dim = 64,
        .v_head_dim = 128,
        .linear_num_key_heads = 16,
        .linear_num_value_heads = 32,
        .linear_key_head_dim = 128,
        .linear_value_head_dim = 128,
        .linear_conv_kernel_dim = 4,
        .dsa_indexer_n_heads = 64,
        .dsa_indexer_head_dim = 128,
        .dsa_indexer_topk = 2048,
        .dsa_indexer_topk_freq = 1,
        .dsa_indexer_k_norm_epsilon = 1e-6,
        .mamba_state_dim = 128,
        .mamba_head_dim = 64,
        .mamba_num_groups = 8,
        .mamba_conv_bias = true,
        .residual_multiplier = 1,
        .logits_scaling = 1,
        .moe_router_topk = 2,
        .moe_router_load_balancing_type = {.count = 1, .items = {MT_BALANCING_AUX_LOSS}},
        .moe_aux_loss_coeff = {.count = 1},
        .moe_router_topk_scaling_factor = 1,
        .moe_router_bias_update_rate = 1e-3,
        .moe_upcycling_granularity = 1,
        .moe_grouped_gemm = true,
        .moe_permute_fusion = true,
        .mtp_loss_scaling_factor = 0.1,
        .micro_batch_size = 1,
        .global_batch_size = 1,
        .seed = 1234,
        .lr_decay_style = MT_LR_LINEAR,
        .start_weight_decay = 0.01,
        .end_weight_decay = 0.01,
        .adam_beta1 = 0.9,
        .adam_beta2 = 0.999,
        .adam_eps = 1e-8,
        .sgd_momentum = 0.9,
        .lion_beta1 = 0.9,
        .lion_beta2 = 0.99,
        .muon = {.momentum = 0.95, .extra_scale_factor = 1, .split_qkv = true, .num_ns_steps = 5},
        .clip_grad = 1,
        .optimizer_offload_fraction = 1,
        .check_for_nan_in_loss_and_grad = true,
        .loss_spike_factor = 10,
        .loss_spike_window = 100,
        .initial_loss_scale = 4294967296,
        .min_loss_scale = 1,
        .loss_scale_window = 1000,
        .hysteresis = 2,
        .max_bad_steps_in_a_row = 3,
        .tensor_model_parallel_size = 1,
        .pipeline_model_parallel_size = 1,
        .context_parallel_size = 1,
        .expert_model_parallel_size = 1,
        .data_parallel_size = 1,
        .context_a2a_size = 1,
        .num_virtual_stages_per_pipeline_rank = 1,
        .distributed_timeout_minutes = 10,
        .distributed_timeout_seconds = 600,
        .save_timeout_seconds = 1800,
        .fp8_wgrad = true,
        .fp8_amax_history_len = 1,
        .num_layers_at_start_in_bf16 = 1,
        .num_layers_at_end_in_bf16 = 1,
        .temperature = 1,
    };
}

#define MT_ACTIVATION_ROW(name, function, ...) {__VA_ARGS__},
const mt_activation_row mt_activation_rows[MT_NUM_ACTIVATIONS] = {MT_ACTIVATIONS(MT_ACTIVATION_ROW)};

mt_activation mt_options_activation(const mt_options *o) {
    int activation = MT_NUM_ACTIVATIONS - 1;
    for (; activation > 0; activation--) {
        size_t field = mt_activation_rows[activation].field; // of its option
        if (field > 0 && *(const bool *)((const char *)o + field)) break;
    }
    return (mt_activation)activation;
}

mt_glu mt_options_glu(const mt_options *o) {
    return (mt_glu){(float)o->activation_func_clamp_value, (float)o->glu_linear_offset};
}

static bool mt_options_gated(const mt_options *o) {
    return mt_activation_rows[mt_options_activation(o)].gated;
}

int mt_constraints_check(const mt_constraint *constraints, size_t count, mt_error *error) {
    for (const mt_constraint *c = constraints; c < constraints + count; c++) {
        const long long *n = c->numbers;
        if (c->broken) return mt_error_set(error, c->message, n[0], n[1], n[2], n[3], n[4]);
    }
    return 0;
}

/* A limit of 0 is none. */
static bool mt_exceeds(int64_t value, int64_t limit) {
    return limit > 0 && value > limit;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most constraints have no numbers
/* In scoring and generation, sequences that cuDNN cannot take go to flash. */
static int mt_options_check_cudnn(const mt_options *o, const mt_limits *l, mt_error *error) {
    int64_t D = o->kv_channels, Dv = o->v_head_dim;
    bool trains = o->num_iterations > 0, latent = o->multi_latent_attention;
    bool deepseek = latent && D == l->cudnn_latent_channels && Dv == l->cudnn_channels;
    const mt_constraint rules[] = {
        {l->cudnn_tokens == 0, "--attention-backend cudnn: built without cuDNN; install it and make, or use flash"},
        {latent && Dv != D && !deepseek,
         "--attention-backend cudnn needs values as wide as keys, or keys of %lld and values of %lld, and --v-head-dim "
         "is %lld, --qk-head-dim + --qk-pos-emb-head-dim %lld; leave it out",
         {l->cudnn_latent_channels, l->cudnn_channels, Dv, D}},
        {D % 8 != 0 || (D > l->cudnn_channels && !deepseek),
         "--attention-backend cudnn needs heads of a multiple of 8 channels, at most %lld, and --kv-channels is %lld; "
         "use flash",
         {l->cudnn_channels, D}},
        {trains && l->cudnn_tokens > 0 && o->seq_length % l->cudnn_tokens != 0,
         "--attention-backend cudnn needs a --seq-length that is a multiple of %lld, not %lld; use flash",
         {l->cudnn_tokens, o->seq_length}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

bool mt_balances_by(const mt_options *o, mt_load_balancing type) {
    const mt_ints *types = &o->moe_router_load_balancing_type;
    for (int64_t i = 0; i < types->count; i++)
        if (types->items[i] == (int64_t)type) return true;
    return false;
}

double mt_aux_loss_coeff(const mt_options *o, mt_load_balancing type) {
    const mt_ints *types = &o->moe_router_load_balancing_type;
    for (int64_t i = 0; i < types->count; i++)
        if (types->items[i] == (int64_t)type) return o->moe_aux_loss_coeff.items[i];
    return 0;
}

/* True if the loss of any router is in use: an auxiliary loss, or the z-loss. */
static bool mt_has_router_loss(const mt_options *o) {
    bool has = o->moe_z_loss_coeff > 0;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++)
        has |= mt_aux_loss_coeff(o, (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i)) > 0;
    return has;
}

int64_t mt_value_channels(const mt_options *o) {
    return o->multi_latent_attention ? o->v_head_dim : o->value_channels > 0 ? o->value_channels : o->kv_channels;
}

int mt_options_check_sizes(const mt_options *o, bool train, mt_error *error) {
    bool has_attention = mt_has_mixer(o, MT_MIXER_ATTENTION);
    const struct {
        const char *name;
        bool needed;
        double value;
    } sizes[] = {{"num_layers", true, (double)o->num_layers},
                 {"hidden_size", true, (double)o->hidden_size},
                 {"num_attention_heads", true, (double)o->num_attention_heads},
                 {"num_query_groups", has_attention, (double)o->num_query_groups},
                 {"kv_channels", has_attention, (double)o->kv_channels},
                 {"ffn_hidden_size", mt_num_dense_layers(o) > 0, (double)o->ffn_hidden_size},
                 {"vocab_size", true, (double)o->vocab_size},
                 {"padded_vocab_size", true, (double)o->padded_vocab_size},
                 {"tensor_model_parallel_size", true, (double)o->tensor_model_parallel_size},
                 {"pipeline_model_parallel_size", true, (double)o->pipeline_model_parallel_size},
                 {"num_virtual_stages_per_pipeline_rank", true, (double)o->num_virtual_stages_per_pipeline_rank},
                 {"context_parallel_size", true, (double)o->context_parallel_size},
                 {"context_a2a_size", true, (double)o->context_a2a_size},
                 {"expert_model_parallel_size", true, (double)o->expert_model_parallel_size},
                 {"data_parallel_size", true, (double)o->data_parallel_size},
                 {"micro_batch_size", train, (double)o->micro_batch_size},
                 {"global_batch_size", train, (double)o->global_batch_size},
                 {"norm_epsilon", true, o->norm_epsilon},
                 {"embedding_multiplier", true, o->embedding_multiplier},
                 {"residual_multiplier", true, o->residual_multiplier},
                 {"logits_scaling", true, o->logits_scaling}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].needed && !(sizes[i].value > 0))
            return mt_error_set(error,
                                "mt_options.%s is %g, and must be above 0: set it, or begin with mt_options_plain",
                                sizes[i].name, sizes[i].value);
    return 0;
}

int mt_options_check_limits(const mt_options *o, const mt_limits *l, mt_error *error) {
    int64_t D = o->kv_channels, E = o->num_experts, k = o->moe_router_topk;
    int64_t groups = mt_divide_up(o->moe_router_num_groups, 32) * 32;
    bool latent = o->multi_latent_attention, has_aux_loss = mt_has_router_loss(o);
    bool sinkhorn = mt_balances_by(o, MT_BALANCING_SINKHORN);
    bool delta = mt_has_mixer(o, MT_MIXER_GATED_DELTA_NET) || mt_has_mixer(o, MT_MIXER_KDA);
    bool mamba = mt_has_mixer(o, MT_MIXER_MAMBA2);
    const mt_constraint rules[] = {
        {l->one_attention && o->attention_backend == MT_ATTENTION_CUDNN,
         "--attention-backend cudnn needs a GPU, and this run is on the CPU; leave it out"},
        {l->one_attention && o->attention_backend == MT_ATTENTION_UNFUSED,
         "--attention-backend unfused needs a GPU, and this run is on the CPU; leave it out"},
        {!latent && mt_exceeds(D, l->head_channels),
         "--kv-channels is %lld, and attention on this device takes heads of at most %lld channels",
         {D, l->head_channels}},
        {latent && mt_exceeds(D, l->head_channels),
         "--qk-head-dim + --qk-pos-emb-head-dim is %lld, and attention on this device takes heads of at most %lld "
         "channels",
         {D, l->head_channels}},
        {latent && mt_exceeds(o->v_head_dim, l->head_channels),
         "--v-head-dim is %lld, and attention on this device takes heads of at most %lld channels",
         {o->v_head_dim, l->head_channels}},
        {E > 0 && mt_exceeds(k, l->router_topk),
         "--moe-router-topk is %lld, and routers on this device choose at most %lld experts per token",
         {k, l->router_topk}},
        {mt_exceeds(mt_divide_up(E, 32) * 32 + groups, l->experts),
         "--num-experts is %lld, and routers on this device have at most %lld experts with --moe-router-num-groups "
         "%lld",
         {E, l->experts - groups, o->moe_router_num_groups}},
        {has_aux_loss && mt_exceeds(E, l->aux_loss_experts),
         "--num-experts is %lld, and --moe-aux-loss-coeff and --moe-z-loss-coeff on this device take at most %lld "
         "experts",
         {E, l->aux_loss_experts}},
        {l->no_fp8 && o->fp8_format, "--fp8-format needs a GPU of compute capability 8.9 or more; leave it out"},
        {l->no_mxfp8 && o->fp8_format && mt_fp8_recipes[o->fp8_recipe].blocks == MT_FP8_VECTOR_32,
         "--fp8-recipe mxfp8 needs a GPU of compute capability 10.0 (Blackwell) or --device cpu; take blockwise"},
        {l->no_bf16 && o->bf16, "--bf16 needs a GPU of compute capability 8.0 or more; take --fp16"},
        {l->no_bf16 && o->optimizer == MT_OPTIMIZER_MUON && o->muon.fp32_matmul_prec == MT_MUON_MEDIUM,
         "--muon-fp32-matmul-prec medium needs a GPU of compute capability 8.0 or more; take high"},
        {l->no_delta && mt_has_mixer(o, MT_MIXER_GATED_DELTA_NET),
         "the gated delta rule needs a GPU with 99 KiB of shared memory per block; take --device cpu"},
        {delta && mt_exceeds(o->linear_key_head_dim, l->delta_channels),
         "--linear-key-head-dim is %lld, and the gated delta rule on this device takes heads of at most %lld channels",
         {o->linear_key_head_dim, l->delta_channels}},
        {delta && mt_exceeds(o->linear_value_head_dim, l->delta_channels),
         "--linear-value-head-dim is %lld, and the gated delta rule on this device takes heads of at most %lld "
         "channels",
         {o->linear_value_head_dim, l->delta_channels}},
        {mamba && mt_exceeds(o->mamba_state_dim, l->ssd_rows),
         "--mamba-state-dim is %lld, and Mamba-2 on this device takes states of at most %lld",
         {o->mamba_state_dim, l->ssd_rows}},
        {mamba && mt_exceeds(o->mamba_head_dim, l->ssd_columns),
         "--mamba-head-dim is %lld, and Mamba-2 on this device takes heads of at most %lld channels",
         {o->mamba_head_dim, l->ssd_columns}},
        {l->no_plain && !o->multi_latent_attention && mt_value_channels(o) != o->kv_channels,
         "--value-channels other than --kv-channels runs on the CPU only so far; take --device cpu"},
        {l->no_plain && o->moe_router_quantile_bias,
         "--moe-router-load-balancing-type quantile_balancing, and a model with its bias, run on the CPU only so far; "
         "take --device cpu"},
        {l->no_plain && o->window_num_query_groups > 0,
         "--window-num-query-groups runs on the CPU only so far; take --device cpu"},
        {sinkhorn && mt_exceeds(E, l->sinkhorn_experts),
         "--num-experts is %lld, and --moe-router-load-balancing-type sinkhorn on this device takes at most %lld "
         "experts",
         {E, l->sinkhorn_experts}},
    };
    if (MT_CHECK_CONSTRAINTS(rules, error)) return -1;
    return o->attention_backend == MT_ATTENTION_CUDNN ? mt_options_check_cudnn(o, l, error) : 0;
}
#pragma GCC diagnostic pop

/* The parts that a step updates: a column of MT_OPTIMIZERS. */
enum { MT_STEPS_ELEMENTS, MT_STEPS_MATRICES };

static const struct {
    int steps;
    const char *name, *states[2];
} mt_optimizer_rows[] = {
#define MT_OPTIMIZER_ROW(name, step, unit, option, first, second) {MT_STEPS_##unit, option, {first, second}},
    MT_OPTIMIZERS(MT_OPTIMIZER_ROW)
#undef MT_OPTIMIZER_ROW
};

const char *mt_optimizer_name(mt_optimizer optimizer) {
    return mt_optimizer_rows[optimizer].name;
}

int mt_num_states(mt_optimizer optimizer) {
    return mt_optimizer_rows[optimizer].states[1] ? MT_NUM_STATES : MT_STATE_EXP_AVG_SQ;
}

const char *mt_state_name(mt_optimizer optimizer, mt_param_state state) {
    if (state == MT_STATE_WEIGHTS) return "";
    return state == MT_STATE_MASTER ? "master" : mt_optimizer_rows[optimizer].states[state - MT_STATE_EXP_AVG];
}

/* The optimizer of all that is no matrix of a layer. */
static mt_optimizer mt_element_optimizer(const mt_options *o) {
    if (mt_optimizer_rows[o->optimizer].steps == MT_STEPS_ELEMENTS) return o->optimizer;
    return o->muon.scalar_optimizer == MT_MUON_LION ? MT_OPTIMIZER_LION : MT_OPTIMIZER_ADAMW;
}

/* ==== §3 kernels ================================================================================================== */
/* The CPU backend defines the result of each operation; forward and backward stand side by side. Elements are stored as
 * fp32, bf16 or fp16, all arithmetic is fp32, and long sums are summed in blocks or in fp64. Invariants: exactly one
 * task writes each output element and every sum has a fixed order, so results do not depend on the number of threads;
 * an activation's gradient is written (=), a parameter's gradient accumulates (+=). The only state is a scratch buffer
 * per calling thread. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // streams of the CPU; without MPI, messages to other ranks
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wpass-failed" // a loop that was not vectorized is slower, not wrong
#endif

/* The prototype of each operation, from the lists that also make the table at the end of this section. */
#define MT_CPU_PROTOTYPE(name, ...) static mt_##name##_fn mt_cpu_##name;
MT_OPERATIONS(MT_CPU_PROTOTYPE)
MT_PLAIN_OPERATIONS(MT_CPU_PROTOTYPE)

/* ==== §3a threads, elements, memory ============================================================================== */
/* Rows are computed as floats: an fp32 row in place, others in scratch. One body serves all types: mt_row_load for
 * inputs, mt_row_open for outputs, compute, mt_row_close. */

enum {
    MT_BLOCK = 1024,      // elements of one task of an elementwise operation, and of one partial sum
    MT_COLUMNS = 64,      // columns of one task of a reduction over rows
    MT_PARALLEL = 1 << 14 // elements below which one thread is faster than several
};

/* Scratch of the calling thread. It grows to the largest request and is kept, so later training steps allocate nothing.
 * The next call may move it. */
static float *mt_scratch_grow(int64_t floats) {
    static _Thread_local float *memory;
    static _Thread_local int64_t capacity;
    if (floats > capacity || !memory) {
        free(memory);
        capacity = floats;
        memory = mt_malloc(capacity * (int64_t)sizeof(float));
    }
    return memory;
}

/* The same, divided among the threads of a parallel region: `floats` for each. */
typedef struct mt_scratch {
    float *memory;
    int64_t floats;
} mt_scratch;

static mt_scratch mt_scratch_reserve(int64_t floats) {
    floats = mt_divide_up(floats, 16) * 16; // whole cache lines, which threads do not share
    return (mt_scratch){mt_scratch_grow(omp_get_max_threads() * floats), floats};
}

/* The slice of the calling thread. */
static float *mt_scratch_slice(mt_scratch scratch) {
    return scratch.memory + omp_get_thread_num() * scratch.floats;
}

/* The n elements of x from `offset` on, as floats. */
static inline const float *mt_row_load(float *scratch, const void *x, int64_t offset, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) return (const float *)x + offset;
    const uint16_t *bits = (const uint16_t *)x + offset;
    if (dtype == MT_F16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) scratch[i] = mt_f16_to_f32(bits[i]);
        return scratch;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) scratch[i] = mt_bf16_to_f32(bits[i]);
    return scratch;
}

/* Memory to compute the row of y at `offset` as floats; mt_row_close stores it. */
static inline float *mt_row_open(float *scratch, void *y, int64_t offset, mt_dtype dtype) {
    return dtype == MT_F32 ? (float *)y + offset : scratch;
}

static inline void mt_row_close(void *y, int64_t offset, const float *row, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) return; // it was computed in place
    uint16_t *bits = (uint16_t *)y + offset;
    if (dtype == MT_F16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) bits[i] = mt_f32_to_f16(row[i]);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) bits[i] = mt_f32_to_bf16(row[i]);
}

/* Stores a row that was computed in scratch. */
static inline void mt_row_store(void *y, int64_t offset, const float *row, int64_t n, mt_dtype dtype) {
    if (dtype == MT_F32) memcpy((float *)y + offset, row, (size_t)n * sizeof *row);
    mt_row_close(y, offset, row, n, dtype);
}

/* The maximum of x[n], -inf when n == 0. In lanes: compilers do not vectorize a maximum that may meet a NaN. */
static inline float mt_row_max(const float *x, int64_t n) {
    enum { LANES = 16 };
    float lanes[LANES], max = -INFINITY;
    int64_t i = 0;
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = -INFINITY;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int64_t lane = 0; lane < LANES; lane++)
            lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    }
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t lane = 0; lane < LANES; lane++) max = lanes[lane] > max ? lanes[lane] : max;
    return max;
}

/* exp(x) to about one unit in the last place, without a branch, so that loops over it are vectorized: 2^n e^r with |r|
 * <= ln(2) / 2 and Cephes' polynomial for e^r. Correct at both infinities, at NaN and below 2^-126. */
static inline float mt_exp(float x) {
    const float shift = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + shift, n = shifted - shift, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        float value;
        uint32_t bits;
    } whole = {shifted}, low, high;
    uint32_t power = whole.bits - 0x4b400000 + 256; // n + 256, in two halves: 2^n may overflow or be subnormal
    low.bits = (power / 2 - 1) << 23;
    high.bits = (power - power / 2 - 1) << 23;
    return p * low.value * high.value;
}

/* Dropout factors, 0 or 1 / (1 - p), for the coordinates (low, high + first ... first + n - 1). Four consecutive
 * indices use the four words of one Philox counter, (low, high | index >> 2). Padding has the index -1. */
static void mt_dropout_factors(float *factors, int64_t n, const mt_dropout *dropout, uint64_t low, uint64_t high,
                               int64_t first) {
    enum { COUNTERS = 16 }; // per vectorized loop
    uint32_t words[4 * COUNTERS], threshold = dropout->p < 1 ? (uint32_t)(dropout->p * 4294967296.0) : UINT32_MAX;
    float kept = dropout->p < 1 ? (float)(1.0 / (1.0 - dropout->p)) : 0.0f;
    for (int64_t start = first & ~(int64_t)3; start < first + n; start += 4 * COUNTERS) {
#pragma omp simd
        for (int64_t c = 0; c < COUNTERS; c++)
            mt_philox(words + 4 * c, dropout->key, low, high | (uint64_t)(start + 4 * c) >> 2);
        int64_t begin = mt_max(start, first), end = mt_min(start + 4 * COUNTERS, first + n);
        for (int64_t i = begin; i < end; i++) factors[i - first] = words[i - start] >= threshold ? kept : 0.0f;
    }
}

/* Two normal numbers from two uniform words (Box & Muller, "A note on the generation of random normal deviates"). */
static void mt_box_muller(float normal[2], uint32_t word0, uint32_t word1) {
    double uniform0 = ((double)word0 + 0.5) * 0x1p-32, uniform1 = ((double)word1 + 0.5) * 0x1p-32;
    float radius = sqrtf(-2.0f * logf((float)uniform0)), angle = (float)(uniform1 * 6.283185307179586);
    normal[0] = radius * cosf(angle);
    normal[1] = radius * sinf(angle);
}

static int64_t mt_cpu_memory_available(void) {
    return (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

static void *mt_cpu_memory_alloc(int64_t bytes) {
    const int64_t page = 1 << 21; // huge pages: fewer TLB misses while weights stream
    if (bytes < page) return mt_malloc(bytes);
    void *memory;
    if (posix_memalign(&memory, (size_t)page, (size_t)bytes) != 0) return mt_malloc(bytes); // or ends
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
    return memory;
}

static void mt_cpu_memory_free(void *memory) {
    free(memory);
}

static void *mt_cpu_memory_alloc_ordered(int64_t bytes, mt_stream *stream) {
    return mt_cpu_memory_alloc(bytes);
}

static void mt_cpu_memory_free_ordered(void *memory, mt_stream *stream) {
    free(memory);
}

static void *mt_cpu_memory_alloc_host(int64_t bytes) {
    return mt_cpu_memory_alloc(bytes);
}

static void mt_cpu_memory_free_host(void *memory) {
    free(memory);
}

static void mt_cpu_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    const int64_t piece = 1 << 18;
#pragma omp parallel for if (bytes > 4 * piece)
    for (int64_t i = 0; i < mt_divide_up(bytes, piece); i++)
        memcpy((char *)to + i * piece, (const char *)from + i * piece, (size_t)mt_min(piece, bytes - i * piece));
}

static void mt_cpu_memory_copy_rows(void *to, int64_t to_stride, const void *from, int64_t from_stride, int64_t rows,
                                    int64_t bytes, mt_stream *stream) {
    for (int64_t row = 0; row < rows; row++)
        memcpy((char *)to + row * to_stride, (const char *)from + row * from_stride, (size_t)bytes);
}

static void mt_cpu_memory_zero(void *memory, int64_t bytes, mt_stream *stream) {
    const int64_t piece = 1 << 18;
#pragma omp parallel for if (bytes > 4 * piece)
    for (int64_t i = 0; i < mt_divide_up(bytes, piece); i++)
        memset((char *)memory + i * piece, 0, (size_t)mt_min(piece, bytes - i * piece));
}

static bool mt_cpu_first_use_waits(void) {
    return true;
}

static int64_t mt_cpu_workspace_bytes(int64_t T, int64_t C, int64_t H, int64_t D) {
    return 0;
}

static int64_t mt_cpu_delta_workspace_bytes(int64_t T, const mt_delta_args *a, mt_dtype dtype, bool train) {
    return 0;
}

static int64_t mt_cpu_ssd_workspace_bytes(int64_t T, const mt_ssd_args *a, bool train) {
    return 0;
}

static int64_t mt_cpu_sparse_workspace_bytes(int64_t T, int64_t longest, int64_t topk) {
    return 0;
}

static mt_stream *mt_cpu_stream_create(void *workspace, int64_t workspace_bytes, bool deterministic) {
    return NULL;
}

static void mt_cpu_stream_destroy(mt_stream *stream) {
}

static void mt_cpu_stream_synchronize(mt_stream *stream) {
}

static void mt_cpu_stream_call_host(mt_stream *stream, mt_host_function *function, void *context) {
    function(context);
}

static mt_event *mt_cpu_event_create(void) {
    return NULL;
}

static void mt_cpu_event_destroy(mt_event *event) {
}

static void mt_cpu_event_record(mt_event *event, mt_stream *stream) {
}

static void mt_cpu_event_synchronize(mt_event *event) {
}

/* ==== §3b linear layers ========================================================================================== */
/* Three matrix products: y = x w^T, dx = dy w and dw += dy^T x. */

/* A matrix of floats, or a block of one: stored rows are `stride` apart. As an operand it may be transposed: then the
 * stored rows are its columns. */
typedef struct mt_matrix {
    const float *data;
    int64_t stride;
    bool transposed;
} mt_matrix;

static mt_matrix mt_transposed(mt_matrix matrix) {
    matrix.transposed = true;
    return matrix;
}

/* The block that starts at an element of an operand. */
static mt_matrix mt_matrix_at(mt_matrix matrix, int64_t row, int64_t column) {
    matrix.data += matrix.transposed ? column * matrix.stride + row : row * matrix.stride + column;
    return matrix;
}

/* Vectors as wide as those of the compiler's target, and a tile of c whose sums stay in its registers. */
#if defined __AVX512F__
enum { MT_LANES = 16, MT_TILE = 8, MT_PANEL = 32 };
#elif defined __AVX__
enum { MT_LANES = 8, MT_TILE = 6, MT_PANEL = 16 };
#else
enum { MT_LANES = 4, MT_TILE = 4, MT_PANEL = 8 };
#endif
enum { MT_VECTORS = MT_PANEL / MT_LANES, MT_DEPTH = 128, MT_ROWS = 480 }; // MT_ROWS: a multiple of each MT_TILE

typedef float mt_lanes __attribute__((vector_size(MT_LANES * sizeof(float))));

#ifdef __clang__
#define MT_UNROLL _Pragma("unroll")
#else
#define MT_UNROLL _Pragma("GCC unroll 8")
#endif

/* Copies b[depth, width] into consecutive memory, padded with zeros. */
static void mt_matmul_pack(float panel[MT_DEPTH][MT_PANEL], mt_matrix b, int64_t depth, int64_t width) {
    if (b.transposed) {
        for (int64_t n = 0; n < width; n++)
            for (int64_t k = 0; k < depth; k++) panel[k][n] = b.data[n * b.stride + k];
    } else {
        for (int64_t k = 0; k < depth; k++) memcpy(panel[k], b.data + k * b.stride, (size_t)width * sizeof(float));
    }
    if (width == MT_PANEL) return;
    for (int64_t k = 0; k < depth; k++)
        for (int64_t n = width; n < MT_PANEL; n++) panel[k][n] = 0.0f;
}

/* Sums products for MT_TILE rows of c and one panel of its columns, in registers. Rows past `rows` repeat the last. */
static void mt_matmul_tile(float sums[MT_TILE][MT_PANEL], mt_matrix a, int64_t rows, float panel[MT_DEPTH][MT_PANEL],
                           int64_t depth) {
    const float *row[MT_TILE];
    int64_t step = a.transposed ? a.stride : 1; // between elements of a row
    mt_lanes s[MT_TILE][MT_VECTORS] = {{{0}}}, b[MT_VECTORS];
    for (int64_t t = 0; t < MT_TILE; t++) row[t] = mt_matrix_at(a, mt_min(t, rows - 1), 0).data;
    for (int64_t k = 0; k < depth; k++) {
        MT_UNROLL
        for (int64_t v = 0; v < MT_VECTORS; v++) memcpy(&b[v], &panel[k][v * MT_LANES], sizeof b[v]);
        MT_UNROLL
        for (int64_t t = 0; t < MT_TILE; t++) {
            float factor = row[t][k * step];
            MT_UNROLL
            for (int64_t v = 0; v < MT_VECTORS; v++) s[t][v] += factor * b[v];
        }
    }
    MT_UNROLL
    for (int64_t t = 0; t < MT_TILE; t++) {
        MT_UNROLL
        for (int64_t v = 0; v < MT_VECTORS; v++) memcpy(&sums[t][v * MT_LANES], &s[t][v], sizeof s[t][v]);
    }
}

/* c[M, width] = a b, or += when accumulate, for one panel of b's columns. */
static void mt_matmul_panel(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t width, int64_t K,
                            bool accumulate) {
    float panel[MT_DEPTH][MT_PANEL], sums[MT_TILE][MT_PANEL];
    for (int64_t m = 0; m < M && !accumulate; m++) memset(c + m * stride, 0, (size_t)width * sizeof *c);
    for (int64_t k = 0; k < K; k += MT_DEPTH) {
        int64_t depth = mt_min(MT_DEPTH, K - k);
        mt_matmul_pack(panel, mt_matrix_at(b, k, 0), depth, width);
        for (int64_t m0 = 0; m0 < M; m0 += MT_TILE) {
            int64_t rows = mt_min(MT_TILE, M - m0);
            mt_matmul_tile(sums, mt_matrix_at(a, m0, k), rows, panel, depth);
            for (int64_t m = 0; m < rows; m++)
                for (int64_t n = 0; n < width; n++) c[(m0 + m) * stride + n] += sums[m][n];
        }
    }
}

/* The product without a library: panels of b's columns by depths of K that fit in the first-level cache. Sums are in
 * the order of k, whatever the number of threads. */
static void mt_matmul_plain(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t N, int64_t K,
                            bool accumulate) {
#pragma omp parallel for collapse(2) if (M * N * K > 1 << 18)
    for (int64_t n = 0; n < N; n += MT_PANEL)
        for (int64_t m = 0; m < M; m += MT_ROWS)
            mt_matmul_panel(c + m * stride + n, stride, mt_matrix_at(a, m, 0), mt_matrix_at(b, 0, n),
                            mt_min(MT_ROWS, M - m), mt_min(MT_PANEL, N - n), K, accumulate);
}

#ifdef MT_HAVE_BLAS
/* OpenBLAS knows the processors of its time. On a later one it may take the kernels of a processor without AVX. */
static bool mt_openblas_is_old(void) {
#ifdef OPENBLAS_THREAD
    static const char old[] =
        " Katmai Coppermine Northwood Prescott Banias Atom Core2 Penryn Dunnington Nehalem Athlon "
        "Opteron Opteron_SSE3 Barcelona Bobcat Nano Generic ";
    char core[32];
    snprintf(core, sizeof core, " %s ", openblas_get_corename());
    return strstr(old, core) != NULL;
#else
    return false;
#endif
}

static int64_t mt_halve(int64_t n) {
    return mt_divide_up(n, 128) * 64;
}

/* Sets OpenBLAS to one thread before the parallel region; workers must not set it concurrently. */
static void mt_matmul_prepare(void) {
#ifdef OPENBLAS_THREAD
    if (openblas_get_parallel() == OPENBLAS_THREAD && openblas_get_num_threads() > 1) openblas_set_num_threads(1);
#endif
}

#ifdef MT_HAVE_DNNL
/* oneDNN 2.6 keeps values of a product below the stack pointer. A signal that interrupts it would overwrite them,
 * unless its handler has a stack of its own. The main thread's handlers have (data/run/launch.c); other threads take no
 * signals but those of faults. */
static void mt_shelter_from_signals(void) {
    static _Thread_local bool sheltered;
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    if (sheltered || omp_get_thread_num() == 0) return;
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&set, faults[i]);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    sheltered = true;
}
#endif

/* Small products are this file's own where it is compiled for AVX: oneDNN would start threads for them outside of
 * parallel regions, and their rounding would depend on the number of threads; OpenBLAS may be old. */
static bool mt_matmul_is_plain(bool is_small) {
#ifdef MT_HAVE_DNNL
    return is_small && MT_LANES > 4;
#else
    static _Atomic int old = -1; // not yet known
    if (old < 0) old = mt_openblas_is_old();
    return MT_LANES > 4 && (is_small || old);
#endif
}

/* One tile of a product, by one thread. oneDNN is faster than OpenBLAS. */
static void mt_matmul_library(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t N, int64_t K,
                              bool accumulate, bool is_small) {
#ifdef MT_HAVE_DNNL
    if (!is_small) {
        mt_shelter_from_signals();
        dnnl_status_t status = dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', M, N, K, 1.0f, a.data,
                                          a.stride, b.data, b.stride, accumulate ? 1.0f : 0.0f, c, stride);
        if (status != dnnl_success) mt_die("dnnl_sgemm failed with status %d; out of memory?", (int)status);
        return;
    }
#endif
    cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans,
                (int)M, (int)N, (int)K, 1.0f, a.data, (int)a.stride, b.data, (int)b.stride, accumulate ? 1.0f : 0.0f, c,
                (int)stride);
}

/* A library's product is in tiles that depend on the shape only, each computed by one thread. The library itself would
 * tile by the number of threads, and the edges of its tiles round differently. Below 2^18 products OpenBLAS uses one
 * thread anyway. */
static void mt_matmul_tiles(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t N, int64_t K,
                            bool accumulate) {
    int64_t rows = M, columns = N;
    bool is_small = M * N * K <= 1 << 18;
    if (mt_matmul_is_plain(is_small)) {
        mt_matmul_plain(c, stride, a, b, M, N, K, accumulate);
        return;
    }
    while (rows > 512) rows = mt_halve(rows);
    while (columns > 768 || (columns > 192 && mt_divide_up(M, rows) * mt_divide_up(N, columns) < 4))
        columns = mt_halve(columns);
    mt_matmul_prepare();
#pragma omp parallel for collapse(2) schedule(dynamic) if (!is_small)
    for (int64_t n = 0; n < N; n += columns)
        for (int64_t m = 0; m < M; m += rows)
            mt_matmul_library(c + m * stride + n, stride, mt_matrix_at(a, m, 0), mt_matrix_at(b, 0, n),
                              mt_min(rows, M - m), mt_min(columns, N - n), K, accumulate, is_small);
}
#else
static void mt_matmul_prepare(void) {
}

static void mt_matmul_tiles(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t N, int64_t K,
                            bool accumulate) {
    mt_matmul_plain(c, stride, a, b, M, N, K, accumulate);
}
#endif

const char *mt_cpu_products_note(void) {
#if defined MT_HAVE_BLAS && defined OPENBLAS_THREAD && (defined __x86_64__ || defined __i386__)
    static char note[256];
    if (!__builtin_cpu_supports("avx2") || !mt_openblas_is_old()) return NULL;
#ifdef MT_HAVE_DNNL
    const char *instead = MT_LANES > 4 ? "oneDNN and kernels of megatron.c" : "oneDNN, small ones by these kernels";
#else
    const char *instead = MT_LANES > 4 ? "kernels of megatron.c" : "these slow kernels; set OPENBLAS_CORETYPE=Haswell";
#endif
    snprintf(note, sizeof note,
             "OpenBLAS does not know this processor and takes kernels of %s: products are computed by %s",
             openblas_get_corename(), instead);
    return note;
#else
    return NULL;
#endif
}

/* The products of one row x[K] with four rows of weights, stored in `dtype`. Four independent sums hide the
 * latency of additions. */
static inline void mt_dot_four(float sums[4], const float *x, const void *const w[4], int64_t K, mt_dtype dtype) {
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    if (dtype == MT_F32) {
        const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t k = 0; k < K; k++) {
            s0 += x[k] * w0[k];
            s1 += x[k] * w1[k];
            s2 += x[k] * w2[k];
            s3 += x[k] * w3[k];
        }
    } else if (dtype == MT_F16) {
        const uint16_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t k = 0; k < K; k++) {
            s0 += x[k] * mt_f16_to_f32(w0[k]);
            s1 += x[k] * mt_f16_to_f32(w1[k]);
            s2 += x[k] * mt_f16_to_f32(w2[k]);
            s3 += x[k] * mt_f16_to_f32(w3[k]);
        }
    } else {
        const uint16_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t k = 0; k < K; k++) {
            s0 += x[k] * mt_bf16_to_f32(w0[k]);
            s1 += x[k] * mt_bf16_to_f32(w1[k]);
            s2 += x[k] * mt_bf16_to_f32(w2[k]);
            s3 += x[k] * mt_bf16_to_f32(w3[k]);
        }
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

/* The product for a few rows. It reads b once; a gemm would pack b first. */
static void mt_matmul_few_rows(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t N, int64_t K,
                               bool accumulate) {
    for (int64_t m = 0; m < M && !accumulate; m++) memset(c + m * stride, 0, (size_t)N * sizeof *c);
    for (int64_t n = 0; n < N && b.transposed; n += 4) {
        const void *rows[4];
        for (int64_t i = 0; i < 4; i++) rows[i] = b.data + mt_min(n + i, N - 1) * b.stride;
        for (int64_t m = 0; m < M; m++) {
            float sums[4];
            mt_dot_four(sums, a.data + m * a.stride, rows, K, MT_F32);
            for (int64_t i = 0; i < mt_min(4, N - n); i++) c[m * stride + n + i] += sums[i];
        }
    }
    for (int64_t k = 0; k < K && !b.transposed; k++)
        for (int64_t m = 0; m < M; m++) {
            float factor = a.data[m * a.stride + k];
            const float *row = b.data + k * b.stride;
#pragma omp simd
            for (int64_t n = 0; n < N; n++) c[m * stride + n] += factor * row[n];
        }
}

/* c[M, N] = a b, or += when accumulate, with a [M, K] and b [K, N]; rows of c are `stride` apart. */
static void mt_matmul(float *c, int64_t stride, mt_matrix a, mt_matrix b, int64_t M, int64_t N, int64_t K,
                      bool accumulate) {
    if (M <= 4 && !a.transposed)
        mt_matmul_few_rows(c, stride, a, b, M, N, K, accumulate);
    else
        mt_matmul_tiles(c, stride, a, b, M, N, K, accumulate);
}

/* A block of x as floats: in place for fp32, else converted into scratch. */
static mt_matrix mt_matrix_load(float *scratch, const void *x, int64_t offset, int64_t rows, int64_t columns,
                                int64_t stride, mt_dtype dtype) {
    if (dtype == MT_F32) return (mt_matrix){.data = (const float *)x + offset, .stride = stride};
#pragma omp parallel for if (rows * columns > MT_PARALLEL)
    for (int64_t r = 0; r < rows; r++) mt_row_load(scratch + r * columns, x, offset + r * stride, columns, dtype);
    return (mt_matrix){.data = scratch, .stride = columns};
}

/* Few rows, as in decoding: one thread reads each weight, once. */
static void mt_linear_forward_small(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N,
                                    int64_t K, mt_dtype dtype) {
    mt_matrix tokens = mt_matrix_load(mt_scratch_grow(T * K), x, 0, T, K, K, dtype);
#pragma omp parallel for if (N * K > MT_PARALLEL)
    for (int64_t n = 0; n < N; n += 4) {
        const void *rows[4];
        int64_t count = mt_min(4, N - n);
        for (int64_t i = 0; i < 4; i++) rows[i] = mt_at(w, mt_min(n + i, N - 1) * K, dtype);
        for (int64_t t = 0; t < T; t++) {
            float sums[4], scratch[4];
            mt_dot_four(sums, tokens.data + t * K, rows, K, dtype);
            const float *add = bias ? mt_row_load(scratch, bias, n, count, dtype) : NULL;
            float *out = mt_row_open(scratch, y, t * N + n, dtype);
            for (int64_t i = 0; i < count; i++) out[i] = sums[i] + (add ? add[i] : 0.0f);
            mt_row_close(y, t * N + n, out, count, dtype);
        }
    }
}

static void mt_cpu_batched_product(const mt_product_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t M = a->M, N = a->N, K = a->K;
    bool converts = dtype != MT_F32;
    float *sums = mt_scratch_grow(M * N + (converts ? (M + N) * K : 0)), *left = sums + M * N, *right = left + M * K;
    for (int64_t i = 0; i < a->count; i++) {
        int64_t x_cols = a->a_transposed ? M : K, y_cols = a->b_transposed ? K : N;
        mt_matrix x = mt_matrix_load(left, a->a, i * M * K, a->a_transposed ? K : M, x_cols, x_cols, dtype);
        mt_matrix y = mt_matrix_load(right, a->b, i * K * N, a->b_transposed ? N : K, y_cols, y_cols, dtype);
        x.transposed = a->a_transposed, y.transposed = a->b_transposed;
        mt_matmul(sums, N, x, y, M, N, K, false);
#pragma omp parallel for if (M * N > MT_PARALLEL)
        for (int64_t block = 0; block < M * N; block += MT_BLOCK) {
            float scratch[MT_BLOCK];
            int64_t n = mt_min(MT_BLOCK, M * N - block), at = i * M * N + block;
            const float *add = a->add ? mt_row_load(scratch, a->add, at, n, dtype) : NULL;
            for (int64_t k = 0; k < n; k++)
                sums[block + k] = a->scale * sums[block + k] + (add ? a->add_scale * add[k] : 0);
            mt_row_store(a->out, at, sums + block, n, dtype);
        }
    }
}

/* Number of the n tokens or features in one matrix product: all in fp32; of other types one block, converted first. */
static int64_t mt_linear_block(int64_t n, int64_t block, mt_dtype dtype) {
    return mt_max(1, dtype == MT_F32 ? n : mt_min(n, block));
}

/* Floats of scratch for a block of a matrix. */
static int64_t mt_matrix_scratch(int64_t rows, int64_t columns, mt_dtype dtype) {
    return dtype == MT_F32 ? 0 : rows * columns;
}

/* Stores rows that were computed in scratch, at the stride of y, with a->scale and a->accumulate; a NULL: neither. */
static void mt_matrix_store(void *y, int64_t offset, float *block, int64_t rows, int64_t columns, int64_t stride,
                            const mt_grouped_args *a, mt_dtype dtype) {
    float scale = a && a->scale != 0 ? a->scale : 1;
#pragma omp parallel for if (rows * columns > MT_PARALLEL)
    for (int64_t r = 0; r < rows; r++) {
        float *row = block + r * columns, old;
        for (int64_t i = 0; i < columns && a && (a->scale != 0 || a->accumulate); i++)
            row[i] = scale * row[i] + (a->accumulate ? *mt_row_load(&old, y, offset + r * stride + i, 1, dtype) : 0);
        mt_row_store(y, offset + r * stride, row, columns, dtype);
    }
}

/* Blocks of tokens and of features, and scratch for one of each: what the three products of a linear share. */
typedef struct mt_linear_blocks {
    int64_t T, N, x_stride, y_stride; // T and N of a block
    bool in_place;                    // results are computed where they are stored: fp32, not scaled
    float *x, *w, *y, *row;           // scratch
} mt_linear_blocks;

static mt_linear_blocks mt_linear_blocks_of(const mt_grouped_args *a, mt_dtype dtype) {
    mt_linear_blocks b = {.x_stride = a->x_stride ? a->x_stride : a->K, .y_stride = a->y_stride ? a->y_stride : a->N};
    b.T = mt_linear_block(a->M, 512, dtype), b.N = mt_linear_block(a->N, 1024, dtype);
    b.in_place = dtype == MT_F32 && a->scale == 0;
    int64_t x_floats = b.in_place ? 0 : b.T * a->K, y_floats = b.in_place ? 0 : b.T * b.N;
    int64_t w_floats = mt_matrix_scratch(b.N, a->K, dtype);
    b.x = mt_scratch_grow(x_floats + w_floats + y_floats + mt_max(b.N, a->K));
    b.w = b.x + x_floats, b.y = b.w + w_floats, b.row = b.y + y_floats;
    return b;
}

/* y = x w^T + bias of a->M rows; a->offsets and a->E are not read, here and in the two functions below. */
static void mt_linear_product_forward(const mt_grouped_args *a, const void *bias, mt_dtype dtype) {
    int64_t K = a->K;
    if (a->M <= 8 && a->x_stride == 0) {
        mt_linear_forward_small(a->y, a->x, a->w, bias, a->M, a->N, K, dtype);
        return;
    }
    mt_linear_blocks b = mt_linear_blocks_of(a, dtype);
    for (int64_t t = 0; t < a->M; t += b.T) {
        int64_t rows = mt_min(b.T, a->M - t);
        mt_matrix x = mt_matrix_load(b.x, a->x, t * b.x_stride, rows, K, b.x_stride, dtype);
        for (int64_t n = 0; n < a->N; n += b.N) {
            int64_t columns = mt_min(b.N, a->N - n), at = t * b.y_stride + n,
                    stride = b.in_place ? b.y_stride : columns;
            mt_matrix w = mt_matrix_load(b.w, a->w, n * K, columns, K, K, dtype);
            float *y = b.in_place ? (float *)a->y + at : b.y;
            const float *add = bias ? mt_row_load(b.row, bias, n, columns, dtype) : NULL;
#pragma omp parallel for if (rows * columns > MT_PARALLEL)
            for (int64_t r = 0; r < (add ? rows : 0); r++) memcpy(y + r * stride, add, (size_t)columns * sizeof *add);
            mt_matmul(y, stride, x, mt_transposed(w), rows, columns, K, add || (b.in_place && a->accumulate));
            if (!b.in_place) mt_matrix_store(a->y, at, y, rows, columns, b.y_stride, a, dtype);
        }
    }
}

/* dx = dy w. */
static void mt_linear_product_backward_input(const mt_grouped_args *a, mt_dtype dtype) {
    mt_linear_blocks b = mt_linear_blocks_of(a, dtype);
    int64_t K = a->K;
    for (int64_t t = 0; t < a->M; t += b.T) {
        int64_t rows = mt_min(b.T, a->M - t), stride = b.in_place ? b.x_stride : K;
        float *dx = b.in_place ? (float *)a->dx + t * b.x_stride : b.x;
        for (int64_t n = 0; n < a->N; n += b.N) {
            int64_t columns = mt_min(b.N, a->N - n);
            mt_matrix w = mt_matrix_load(b.w, a->w, n * K, columns, K, K, dtype);
            mt_matrix dy = mt_matrix_load(b.y, a->dy, t * b.y_stride + n, rows, columns, b.y_stride, dtype);
            mt_matmul(dx, stride, dy, w, rows, K, columns, (b.in_place && a->accumulate) || n > 0);
        }
        if (!b.in_place) mt_matrix_store(a->dx, t * b.x_stride, dx, rows, K, b.x_stride, a, dtype);
    }
}

/* dw = dy^T x. */
static void mt_linear_product_backward_weight(const mt_grouped_args *a, mt_dtype dtype) {
    mt_linear_blocks b = mt_linear_blocks_of(a, dtype);
    int64_t K = a->K;
    for (int64_t t = 0; t < a->M; t += b.T) {
        int64_t rows = mt_min(b.T, a->M - t);
        mt_matrix x = mt_matrix_load(b.x, a->x, t * b.x_stride, rows, K, b.x_stride, dtype);
        for (int64_t n = 0; n < a->N; n += b.N) {
            int64_t columns = mt_min(b.N, a->N - n);
            mt_matrix dy = mt_matrix_load(b.y, a->dy, t * b.y_stride + n, rows, columns, b.y_stride, dtype);
            mt_matmul(a->dw + n * K, K, mt_transposed(dy), x, columns, K, rows, a->accumulate || t > 0);
        }
    }
}

static void mt_cpu_linear_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_linear_product_forward(&(mt_grouped_args){a->T, a->N, a->K, .x = a->x, .w = a->w, .y = a->y}, a->bias, dtype);
}

static void mt_cpu_linear_backward_input(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_linear_product_backward_input(&(mt_grouped_args){a->T, a->N, a->K, .w = a->w, .dy = a->dy, .dx = a->dx}, dtype);
}

/* out[C] += column sums of x[T, C], each in token order. */
static void mt_cpu_column_sums(float *out, const void *x, int64_t T, int64_t C, mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t c = 0; c < C; c += MT_COLUMNS) {
        float scratch[MT_COLUMNS], sums[MT_COLUMNS] = {0};
        int64_t width = mt_min(MT_COLUMNS, C - c);
        for (int64_t t = 0; t < T; t++) {
            const float *row = mt_row_load(scratch, x, t * C + c, width, dtype);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sums[i] += row[i];
        }
        for (int64_t i = 0; i < width; i++) out[c + i] += sums[i];
    }
}

static void mt_cpu_linear_backward_weight(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    const mt_grouped_args product = {
        a->T, a->N, a->K, .x = a->x, .dy = a->dy, .dw = a->dw, .accumulate = a->accumulate};
    mt_linear_product_backward_weight(&product, dtype);
    if (a->dbias) mt_cpu_column_sums(a->dbias, a->dy, a->T, a->N, dtype, stream);
}

/* ---- fp8: operands are rounded to the grid of e4m3 or e5m2, and their products summed in fp32 */

float mt_f8_largest(mt_dtype format) {
    return format == MT_F8_E4M3 ? 448.0f : 57344.0f;
}

/* A normal result has the float's exponent and upper bits of its mantissa. Subnormal results are evenly spaced: a power
 * of two is added whose unit in the last place is that spacing, so that the sum is rounded to it. */
static inline uint8_t mt_f8_encode(float value, bool e4m3) {
    const float largest = e4m3 ? 448.0f : 57344.0f, least_normal = e4m3 ? 0x1p-6f : 0x1p-14f;
    const uint32_t shift = e4m3 ? 20 : 21, bias = e4m3 ? 120u << 3 : 112u << 2; // (127 - the format's bias) << mantissa
    float size = fabsf(value), sum;
    size = size > largest ? largest : size;
    sum = size + (e4m3 ? 0x1p14f : 0x1p7f);
    uint32_t bits, normal, subnormal;
    memcpy(&bits, &size, sizeof bits);
    memcpy(&subnormal, &sum, sizeof subnormal);
    normal = ((bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift) - bias;
    normal = value != value ? 0x7F : size < least_normal ? subnormal & 0x7F : normal;
    memcpy(&bits, &value, sizeof bits);
    return (uint8_t)(normal | (bits >> 24 & 0x80));
}

uint8_t mt_f32_to_f8(float value, mt_dtype format) {
    return mt_f8_encode(value, format == MT_F8_E4M3);
}

float mt_f8_to_f32(uint8_t bits, mt_dtype format) {
    bool e4m3 = format == MT_F8_E4M3;
    uint32_t size = bits & 0x7F, word = size << (e4m3 ? 20 : 21);
    float value;
    memcpy(&value, &word, sizeof value);
    value *= e4m3 ? 0x1p120f : 0x1p112f; // the difference of the biases; this also normalises subnormal numbers
    if (e4m3 ? size == 0x7F : size > 0x7C) value = NAN;
    if (!e4m3 && size == 0x7C) value = INFINITY;
    return bits & 0x80 ? -value : value;
}

/* The transpose of a weight with one scale, or one for 128 x 128, has the same codes and scales. */
const mt_fp8 mt_fp8_recipes[] = {
    [MT_FP8_DELAYED] = {.blocks = MT_FP8_TENSOR, .weight_blocks = MT_FP8_TENSOR, .delayed = true},
    [MT_FP8_TENSORWISE] = {.blocks = MT_FP8_TENSOR, .weight_blocks = MT_FP8_TENSOR},
    [MT_FP8_BLOCKWISE] = {.blocks = MT_FP8_VECTOR_128, .weight_blocks = MT_FP8_BLOCK_128},
    [MT_FP8_MXFP8] = {.blocks = MT_FP8_VECTOR_32, .weight_blocks = MT_FP8_VECTOR_32},
};

/* Columns of the elements that share a scale. A whole matrix counts as its rows, which have equal scales. */
static int64_t mt_fp8_block_columns(mt_fp8_blocks blocks) {
    return blocks == MT_FP8_TENSOR ? INT64_MAX : blocks == MT_FP8_VECTOR_32 ? 32 : 128;
}

int64_t mt_fp8_stride(int64_t C, mt_fp8_blocks blocks) {
    int64_t multiple = blocks == MT_FP8_TENSOR ? MT_FP8_WIDTH : mt_fp8_block_columns(blocks);
    return mt_divide_up(C, multiple) * multiple;
}

int64_t mt_fp8_num_scales(int64_t count, int64_t R, int64_t C, mt_fp8_blocks blocks) {
    if (blocks == MT_FP8_TENSOR) return 1;
    if (blocks == MT_FP8_BLOCK_128) return count * mt_divide_up(R, 128) * mt_divide_up(mt_divide_up(C, 128), 4) * 4;
    return count * mt_divide_up(C, mt_fp8_block_columns(blocks)) * mt_divide_up(R, 4) * 4;
}

/* Index of the scale of element (r, c); rows of several matrices are numbered on. */
static int64_t mt_fp8_scale_index(int64_t R, int64_t C, mt_fp8_blocks blocks, int64_t r, int64_t c) {
    if (blocks == MT_FP8_TENSOR) return 0;
    int64_t first = mt_fp8_num_scales(r / R, R, C, blocks);
    if (blocks == MT_FP8_BLOCK_128) return first + r % R / 128 * mt_divide_up(mt_divide_up(C, 128), 4) * 4 + c / 128;
    return first + c / mt_fp8_block_columns(blocks) * mt_divide_up(R, 4) * 4 + r % R;
}

/* Matrix i of several [R, C]; those with one scale share it. */
static mt_fp8_matrix mt_fp8_matrix_at(const mt_fp8_matrix *matrices, int64_t i, int64_t R) {
    mt_fp8_matrix matrix = *matrices;
    if (!matrix.data) return matrix;
    matrix.data += i * R * matrix.stride;
    if (matrix.blocks != MT_FP8_TENSOR) matrix.inverse_scales += mt_fp8_num_scales(i, R, matrix.stride, matrix.blocks);
    return matrix;
}

/* The scale of a block with this largest absolute value. */
static float mt_fp8_scale(float amax, mt_dtype format, bool power_of_two) {
    if (!(amax > 0) || isinf(amax)) return 1.0f;
    float scale = mt_f8_largest(format) / amax;
    if (isinf(scale)) scale = FLT_MAX;
    return power_of_two ? ldexpf(1.0f, ilogbf(scale)) : scale;
}

/* The largest absolute value of x[n], NaN if x has one. */
static float mt_amax(const float *x, int64_t n) {
    float amax = 0, nan = 0;
#pragma omp simd reduction(max : amax) reduction(+ : nan)
    for (int64_t i = 0; i < n; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        nan += x[i] != x[i] ? 1.0f : 0.0f;
    }
    return nan > 0 ? NAN : amax;
}

static float mt_amax_merge(float a, float b) {
    return (float)mt_maximum(a, b);
}

/* Quantizes rows [begin, end) of x[R, C]; scale NULL: of each block. */
static void mt_quantize_matrix(const mt_fp8_matrix *to, const float *x, int64_t R, int64_t begin, int64_t end,
                               int64_t C, const float *scale) {
    int64_t rows = to->blocks == MT_FP8_BLOCK_128 ? 128 : 1, columns = mt_fp8_block_columns(to->blocks);
    bool e4m3 = to->format == MT_F8_E4M3;
    if (to->blocks == MT_FP8_TENSOR) to->inverse_scales[0] = 1.0f / *scale;
#pragma omp parallel for if (R * C > MT_PARALLEL)
    for (int64_t r0 = begin; r0 < end; r0 += rows) {
        int64_t r_end = mt_min(r0 + rows, end);
        for (int64_t c0 = 0; c0 < C; c0 += mt_min(columns, C)) {
            int64_t count = mt_min(columns, C - c0);
            float amax = 0, factor = scale ? *scale : 1;
            for (int64_t r = r0; r < r_end && !scale; r++) amax = mt_amax_merge(amax, mt_amax(x + r * C + c0, count));
            if (!scale) factor = mt_fp8_scale(amax, to->format, true);
            if (!scale) to->inverse_scales[mt_fp8_scale_index(R, C, to->blocks, r0, c0)] = 1.0f / factor;
            for (int64_t r = r0; r < r_end; r++) {
                const float *from = x + r * C + c0;
                uint8_t *bits = to->data + r * to->stride + c0;
#pragma omp simd
                for (int64_t c = 0; c < count; c++) bits[c] = mt_f8_encode(from[c] * factor, e4m3);
            }
        }
        for (int64_t r = r0; r < r_end; r++) memset(to->data + r * to->stride + C, 0, (size_t)(to->stride - C));
    }
}

/* to[C, stride] = the transpose of x, floats or codes in rows x_stride apart, with the segments of experts apart. */
static void mt_transpose_segments(void *to, int64_t stride, const void *x, int64_t x_stride, bool codes,
                                  const mt_quantize_args *a) {
    int64_t C = a->C;
    memset(to, 0, (size_t)(C * stride * (codes ? 1 : 4)));
    for (int64_t e = 0, first = 0; e < (a->offsets ? a->num_experts : 1); e++) {
        int64_t begin = a->offsets ? a->offsets[e] : 0, end = a->offsets ? a->offsets[e + 1] : a->R;
#pragma omp parallel for if (a->R * C > MT_PARALLEL)
        for (int64_t c0 = 0; c0 < C; c0 += 16) // whole cache lines of floats
            for (int64_t r = begin; r < end; r++)
                for (int64_t c = c0; c < mt_min(c0 + 16, C); c++) {
                    int64_t i = c * stride + first + r - begin;
                    int64_t j = (a->source ? a->compact + a->source[r] : r) * x_stride + c;
                    if (codes)
                        ((uint8_t *)to)[i] = ((const uint8_t *)x)[j];
                    else
                        ((float *)to)[i] = ((const float *)x)[j];
                }
        first += mt_divide_up(end - begin, MT_FP8_EXPERT_ROWS) * MT_FP8_EXPERT_ROWS;
    }
}

static void mt_cpu_quantize(const mt_quantize_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_quantize_args one = *a; // row
    one.R = 1, one.position = NULL;
    for (int64_t i = 0; a->position && i < a->R * a->copies; i++) {
        if (a->position[i] < 0) continue;
        one.x = mt_at(a->x, i / a->copies * a->C, dtype);
        one.rows.data = a->rows.data + a->position[i] * a->rows.stride;
        mt_cpu_quantize(&one, dtype, stream);
        if (a->compact == 0) continue;
        memcpy(a->rows.data + (a->compact + i / a->copies) * a->rows.stride, one.rows.data, (size_t)a->C);
    }
    if (a->position) return;
    int64_t R = a->R, C = a->C, n = R * C, x_floats = mt_matrix_scratch(R, C, dtype), stride = a->columns.stride;
    int64_t begin = a->offsets ? a->offsets[0] : 0, end = a->offsets ? a->offsets[a->num_experts] : R;
    bool one_scale = (a->rows.data ? a->rows : a->columns).blocks == MT_FP8_TENSOR;
    float *scratch = mt_scratch_grow(x_floats + (a->columns.data ? C * stride : 0)), *transposed = scratch + x_floats;
    float amax = 0, scale;
    for (int64_t i = 0; i < (one_scale && (!a->scale || a->amax) ? a->count : 0); i++)
        for (int64_t r = begin; r < end; r++) {
            const float *row = mt_row_load(scratch, a->x, i * n + r * C, C, dtype);
            amax = mt_amax_merge(amax, mt_amax(row, C));
        }
    if (one_scale && a->amax) *a->amax = a->scale ? mt_amax_merge(*a->amax, amax) : amax;
    scale = a->scale ? *a->scale : mt_fp8_scale(amax, (a->rows.data ? a->rows : a->columns).format, false);
    for (int64_t i = 0; i < a->count; i++) {
        mt_matrix x = mt_matrix_load(scratch, a->x, i * n, R, C, C, dtype);
        mt_fp8_matrix rows = mt_fp8_matrix_at(&a->rows, i, a->R), columns = mt_fp8_matrix_at(&a->columns, i, C);
        if (rows.data) mt_quantize_matrix(&rows, x.data, a->R, begin, end, C, one_scale ? &scale : NULL);
        if (!columns.data) continue;
        mt_transpose_segments(transposed, stride, x.data, C, false, a);
        mt_quantize_matrix(&columns, transposed, C, 0, C, stride, one_scale ? &scale : NULL);
    }
}

/* Returns memory for `count` elements: `result` itself, or a new buffer if the operation stores its result in fp8. */
static void *mt_result_open(const mt_quantize_args *q, void *result, int64_t count, mt_dtype dtype) {
    return q->rows.data ? mt_malloc(count * mt_dtype_size(dtype)) : result;
}

/* Quantizes and frees the new buffer, if there is one. */
static void mt_result_close(const mt_quantize_args *q, void *result, mt_dtype dtype, mt_stream *stream) {
    mt_quantize_args rounded = *q;
    rounded.x = result;
    if (!q->rows.data) return;
    mt_cpu_quantize(&rounded, dtype, stream);
    free(result);
}

static void mt_cpu_fp8_transpose(const mt_quantize_args *a, mt_stream *stream) {
    int64_t R = a->R, C = a->C, rows = a->rows.stride, columns = a->columns.stride;
    for (int64_t i = 0; i < a->count; i++)
        for (int64_t r = 0; r < R; r += 128)
            for (int64_t c = 0; c < C; c += 128)
                a->columns.inverse_scales[mt_fp8_scale_index(C, columns, a->columns.blocks, i * C + c, r)] =
                    a->rows.inverse_scales[mt_fp8_scale_index(R, rows, a->rows.blocks, i * R + r, c)];
    for (int64_t i = 0; i < a->count; i++)
        mt_transpose_segments(a->columns.data + i * C * columns, columns, a->rows.data + i * R * rows, rows, true, a);
}

static void mt_cpu_fp8_shard_quantize(const mt_fp8_shard_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t scales = mt_fp8_num_scales(a->count, a->R, a->C, a->w.blocks), width = mt_fp8_block_columns(a->w.blocks);
    float *scratch = mt_scratch_grow(a->C + scales), *scale = scratch + a->C;
    for (int64_t i = 0; i < scales; i++) {
        if (!a->w.data) a->amax[i] = 0;
        scale[i] = a->scale ? *a->scale : mt_fp8_scale(a->amax[i], a->w.format, a->w.blocks != MT_FP8_TENSOR);
        if (a->w.data) a->w.inverse_scales[i] = 1 / scale[i];
    }
    for (int64_t i = a->first, end = i + a->n, n; i < end; i += n) { // n elements of a row and a block
        int64_t block = mt_fp8_scale_index(a->R, a->C, a->w.blocks, i / a->C, i % a->C);
        n = mt_min(mt_min(width - i % a->C % width, a->C - i % a->C), end - i);
        const float *x = mt_row_load(scratch, a->x, i - a->first, n, dtype);
        if (a->scale || !a->w.data) a->amax[block] = mt_amax_merge(a->amax[block], mt_amax(x, n));
        for (int64_t k = 0; k < n && a->w.data; k++) a->w.data[i + k] = mt_f32_to_f8(x[k] * scale[block], a->w.format);
    }
}

/* to[rows, C] = the values of rows [first, first + rows) of a matrix [R, ...], columns [c0, c0 + C). */
static void mt_fp8_load(float *to, const mt_fp8_matrix *matrix, int64_t R, int64_t first, int64_t rows, int64_t c0,
                        int64_t C) {
    float values[256];
    int64_t columns = mt_fp8_block_columns(matrix->blocks);
    for (int code = 0; code < 256; code++) values[code] = mt_f8_to_f32((uint8_t)code, matrix->format);
#pragma omp parallel for if (rows * C > MT_PARALLEL)
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *bits = matrix->data + (first + r) * matrix->stride;
        for (int64_t c = c0, end; c < c0 + C; c = end) {
            end = columns == INT64_MAX ? c0 + C : mt_min((c / columns + 1) * columns, c0 + C);
            float scale = matrix->inverse_scales[mt_fp8_scale_index(R, matrix->stride, matrix->blocks, first + r, c)];
            for (int64_t i = c; i < end; i++) to[r * C + i - c0] = values[bits[i]] * scale;
        }
    }
}

/* out[M, N] (+)= rows [first, first + M) of p->a times w^T, over K elements from column k on. */
static void mt_fp8_multiply(const mt_fp8_product_args *p, const mt_fp8_matrix *w, void *out, int64_t first, int64_t M,
                            int64_t k, int64_t K) {
    int64_t N = p->N, M_block = mt_max(1, mt_min(M, 512)), N_block = mt_min(N, 1024);
    int64_t out_floats = mt_matrix_scratch(M_block, N_block, p->out_dtype);
    float *a_floats = mt_scratch_grow((M_block + N_block) * K + out_floats + N_block);
    float *b_floats = a_floats + M_block * K, *scratch = b_floats + N_block * K, *bias_scratch = scratch + out_floats;
    mt_matrix a = {.data = a_floats, .stride = K}, b = {.data = b_floats, .stride = K};
    for (int64_t m = 0; m < M; m += M_block) {
        int64_t rows = mt_min(M_block, M - m);
        mt_fp8_load(a_floats, &p->a, p->M, first + m, rows, k, K);
        for (int64_t n = 0; n < N; n += N_block) {
            int64_t columns = mt_min(N_block, N - n), stride = p->out_dtype == MT_F32 ? N : columns;
            mt_fp8_load(b_floats, w, N, n, columns, k, K);
            const float *bias = p->bias ? mt_row_load(bias_scratch, p->bias, n, columns, p->out_dtype) : NULL;
            float *block = mt_row_open(scratch, out, m * N + n, p->out_dtype);
            for (int64_t r = 0; r < (bias ? rows : 0); r++)
                memcpy(block + r * stride, bias, (size_t)columns * sizeof *bias);
            mt_matmul(block, stride, a, mt_transposed(b), rows, columns, K, bias || p->accumulate);
            if (p->out_dtype != MT_F32) mt_matrix_store(out, m * N + n, block, rows, columns, N, NULL, p->out_dtype);
        }
    }
}

static void mt_cpu_fp8_product(const mt_fp8_product_args *p, mt_stream *stream) {
    int64_t size = mt_dtype_size(p->out_dtype);
    if (!p->offsets) mt_fp8_multiply(p, &p->b, p->out, 0, p->M, 0, p->K);
    for (int64_t e = 0, k = 0; e < (p->offsets ? p->num_experts : 0); e++) {
        int64_t begin = p->offsets[e], count = p->offsets[e + 1] - begin;
        mt_fp8_matrix b = mt_fp8_matrix_at(&p->b, p->sums_rows ? 0 : e, p->N);
        char *out = (char *)p->out + (p->sums_rows ? e * p->M : begin) * p->N * size;
        if (!p->sums_rows && count > 0) mt_fp8_multiply(p, &b, out, begin, count, 0, p->K);
        if (!p->sums_rows) continue;
        if (count == 0 && !p->accumulate) memset(out, 0, (size_t)(p->M * p->N * size));
        if (count > 0) mt_fp8_multiply(p, &b, out, 0, p->M, k, count);
        k += mt_divide_up(count, MT_FP8_EXPERT_ROWS) * MT_FP8_EXPERT_ROWS;
    }
}

static void mt_cpu_fp8_scale_step(const mt_fp8_scale_args *a, mt_stream *stream) {
    for (int64_t i = 0; i < a->n; i++) {
        float current = a->history[i], amax = current, scale;
        for (int64_t t = 1; t < a->length && !a->most_recent; t++) amax = mt_amax_merge(amax, a->history[t * a->n + i]);
        a->history[i] = 0;
        if (a->guard[0] < 0) continue; // a bad step
        scale = a->largest[i] / amax / ldexpf(1.0f, (int)a->margin);
        if (amax > 0 && isfinite(amax)) a->scale[i] = isinf(scale) ? FLT_MAX : scale;
        for (int64_t t = 1; t + 1 < a->length; t++) a->history[t * a->n + i] = a->history[(t + 1) * a->n + i];
        if (a->length > 1) a->history[(a->length - 1) * a->n + i] = current;
    }
}

/* ==== §3c embedding and norms ==================================================================================== */

static void mt_cpu_embedding_forward(const mt_embedding_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C;
    mt_scratch scratch = mt_scratch_reserve(2 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        int64_t id = a->ids[t] - a->first;
        bool held = id >= 0 && id < a->count;
        if (a->accumulate && !held) continue;
        float *row = mt_row_open(slice, a->out, t * C, dtype);
        const float *before = a->accumulate ? mt_row_load(slice, a->out, t * C, C, dtype) : NULL;
        const float *from = held ? mt_row_load(slice + C, a->w, id * C, C, dtype) : NULL;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) row[c] = (before ? before[c] : 0.0f) + (from ? from[c] : 0.0f);
        mt_row_close(a->out, t * C, row, C, dtype);
    }
}

/* Tasks are columns: one thread adds all rows, in order. */
static void mt_cpu_embedding_backward(const mt_embedding_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C;
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t c = 0; c < C; c += MT_COLUMNS) {
        float scratch[MT_COLUMNS];
        int64_t width = mt_min(MT_COLUMNS, C - c);
        for (int64_t t = 0; t < T; t++) {
            int64_t to = a->ids[t] - a->first;
            if (to < 0 || to >= a->count) continue;
            const float *row = mt_row_load(scratch, a->dout, t * C + c, width, dtype);
            float *sum = a->dw + to * C + c;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sum[i] += row[i];
        }
    }
}

static void mt_cpu_rmsnorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, H = a->H, C = a->C;
    mt_scratch scratch = mt_scratch_reserve(3 * C);
    void *y = mt_result_open(&a->quantize, a->y, T * C, dtype);
#pragma omp parallel for if (T * H * C > MT_PARALLEL)
    for (int64_t r = 0; r < T * H; r++) {
        int64_t t = r / H, h = r % H;
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, a->x, t * a->x_stride + h * C, C, dtype);
        const float *weight = mt_row_load(slice + C, a->w, 0, C, dtype);
        float *out = mt_row_open(slice + 2 * C, y, t * a->y_stride + h * C, dtype), sum = 0, offset = a->w_offset;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += in[c] * in[c];
        float factor = 1.0f / sqrtf((a->means ? a->means[t] : sum / (float)C) + a->eps);
        a->rstd[r] = factor;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out[c] = in[c] * factor * (weight[c] + offset);
        mt_row_close(y, t * a->y_stride + h * C, out, C, dtype);
    }
    mt_result_close(&a->quantize, y, dtype, stream);
}

static void mt_cpu_row_means(const mt_row_means_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C;
    mt_scratch scratch = mt_scratch_reserve(3 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch), sum = 0, offset = a->w_offset;
        const float *x = mt_row_load(slice, a->a, t * a->a_stride, C, dtype);
        const float *y = mt_row_load(slice + C, a->b, t * a->b_stride, C, dtype);
        const float *w = a->w ? mt_row_load(slice + 2 * C, a->w, 0, C, dtype) : NULL;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += x[c] * y[c] * (w ? w[c] + offset : 1.0f);
        a->means[t] = sum / (float)C;
    }
}

/* dw[C] += sum over rows of dy (x - mean) rstd, and db[C] += that of dy (db may be NULL); mean may be NULL: 0. Tasks
 * are columns, so each sum has one order. */
static void mt_norm_backward_weight(const mt_norm_args *a, int64_t dy_stride, int64_t x_stride, mt_dtype dtype) {
    int64_t H = a->H, C = a->C, rows = a->T * H;
    if (!a->dw) return; // frozen
#pragma omp parallel for if (rows * C > MT_PARALLEL)
    for (int64_t c = 0; c < C; c += MT_COLUMNS) {
        float dy_scratch[MT_COLUMNS], x_scratch[MT_COLUMNS], w_sums[MT_COLUMNS] = {0}, b_sums[MT_COLUMNS] = {0};
        int64_t width = mt_min(MT_COLUMNS, C - c);
        for (int64_t r = 0; r < rows; r++) {
            int64_t t = r / H, h = r % H;
            const float *d = mt_row_load(dy_scratch, a->dy, t * dy_stride + h * C + c, width, dtype);
            const float *in = mt_row_load(x_scratch, a->x, t * x_stride + h * C + c, width, dtype);
            float center = a->mean ? a->mean[r] : 0.0f, factor = a->rstd[r];
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                w_sums[i] += d[i] * (in[i] - center) * factor;
                b_sums[i] += d[i];
            }
        }
        for (int64_t i = 0; i < width; i++) a->dw[c + i] += w_sums[i];
        for (int64_t i = 0; i < width && a->db; i++) a->db[c + i] += b_sums[i];
    }
}

/* With n = x rstd and g = dy w, dx = rstd (g - n mean(g n)). */
static void mt_cpu_rmsnorm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, H = a->H, C = a->C, dx_stride = a->dx_stride;
    mt_norm_backward_weight(a, a->dy_stride, a->x_stride, dtype);
    mt_scratch scratch = mt_scratch_reserve(5 * C);
#pragma omp parallel for if (T * H * C > MT_PARALLEL)
    for (int64_t r = 0; r < T * H; r++) {
        int64_t t = r / H, h = r % H;
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, a->x, t * a->x_stride + h * C, C, dtype);
        const float *weight = mt_row_load(slice + C, a->w, 0, C, dtype);
        const float *d = mt_row_load(slice + 2 * C, a->dy, t * a->dy_stride + h * C, C, dtype), *residual = NULL;
        if (a->dresidual) residual = mt_row_load(slice + 3 * C, a->dresidual, t * dx_stride + h * C, C, dtype);
        float *out = mt_row_open(slice + 4 * C, a->dx, t * dx_stride + h * C, dtype);
        float sum = 0, factor = a->rstd[r], offset = a->w_offset;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += d[c] * (weight[c] + offset) * in[c];
        float projection = a->means ? a->means[t] * factor * factor : sum * factor * factor / (float)C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            out[c] = (residual ? residual[c] : 0.0f) + factor * (d[c] * (weight[c] + offset) - in[c] * projection);
        mt_row_close(a->dx, t * dx_stride + h * C, out, C, dtype);
    }
}

static void mt_cpu_layernorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C, y_stride = mt_layernorm_stride(a->y_stride, C);
    mt_scratch scratch = mt_scratch_reserve(4 * C);
    void *y = mt_result_open(&a->quantize, a->y, T * C, dtype);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, a->x, t * C, C, dtype);
        const float *weight = mt_row_load(slice + C, a->w, 0, C, dtype);
        const float *bias = mt_row_load(slice + 2 * C, a->b, 0, C, dtype);
        float *out = mt_row_open(slice + 3 * C, y, t * y_stride, dtype), sum = 0, squares = 0, offset = a->w_offset;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += in[c];
        float center = sum / (float)C;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < C; c++) squares += (in[c] - center) * (in[c] - center);
        float factor = 1.0f / sqrtf(squares / (float)C + a->eps);
        a->mean[t] = center, a->rstd[t] = factor;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out[c] = (in[c] - center) * factor * (weight[c] + offset) + bias[c];
        mt_row_close(y, t * y_stride, out, C, dtype);
    }
    mt_result_close(&a->quantize, y, dtype, stream);
}

/* With n = (x - mean) rstd and g = dy w, dx = rstd (g - mean(g) - n mean(g n)). */
static void mt_cpu_layernorm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C, dy_stride = mt_layernorm_stride(a->dy_stride, C);
    mt_norm_backward_weight(a, dy_stride, C, dtype);
    mt_scratch scratch = mt_scratch_reserve(5 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, a->x, t * C, C, dtype);
        const float *weight = mt_row_load(slice + C, a->w, 0, C, dtype);
        const float *d = mt_row_load(slice + 2 * C, a->dy, t * dy_stride, C, dtype);
        const float *residual = a->dresidual ? mt_row_load(slice + 3 * C, a->dresidual, t * C, C, dtype) : NULL;
        float *out = mt_row_open(slice + 4 * C, a->dx, t * C, dtype);
        float center = a->mean[t], factor = a->rstd[t], offset = a->w_offset, sum = 0, projection = 0;
#pragma omp simd reduction(+ : sum, projection)
        for (int64_t c = 0; c < C; c++) {
            sum += d[c] * (weight[c] + offset);
            projection += d[c] * (weight[c] + offset) * (in[c] - center);
        }
        sum /= (float)C;
        projection *= factor * factor / (float)C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            out[c] = (residual ? residual[c] : 0.0f) +
                     factor * (d[c] * (weight[c] + offset) - sum - (in[c] - center) * projection);
        mt_row_close(a->dx, t * C, out, C, dtype);
    }
}

/* ==== §3d rotary positions ======================================================================================= */

/* Rotates the `half` pairs of one head by a token's angles; back when direction is -1. out may be in. */
static void mt_rope_pairs(float *out, const float *in, const float *token_cos, const float *token_sin, float direction,
                          int64_t half, bool interleaved) {
    int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = in[i * step], b = in[i * step + partner], s = direction * token_sin[i];
        out[i * step] = a * token_cos[i] - b * s;
        out[i * step + partner] = b * token_cos[i] + a * s;
    }
}

static void mt_rope_rotate(const mt_rope_args *a, float direction, mt_dtype dtype) {
    const mt_rotation *rotation = &a->rotation;
    int64_t T = a->T, H = a->H, D = a->D, half = rotation->R / 2;
    mt_scratch scratch = mt_scratch_reserve(2 * D);
#pragma omp parallel for if (T * H * D > MT_PARALLEL)
    for (int64_t r = 0; r < T * H; r++) {
        int64_t t = r / H, h = r % H, angle = rotation->positions[t] * half;
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, a->x, t * a->x_stride + h * D, D, dtype);
        float *out = mt_row_open(slice + D, a->y, t * a->y_stride + h * D, dtype);
        mt_rope_pairs(out, in, rotation->cos + angle, rotation->sin + angle, direction, half, rotation->interleaved);
        for (int64_t i = rotation->R; i < D; i++) out[i] = in[i];
        mt_row_close(a->y, t * a->y_stride + h * D, out, D, dtype);
    }
}

static void mt_cpu_rope_forward(const mt_rope_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_rope_rotate(a, 1.0f, dtype);
}

static void mt_cpu_rope_backward(const mt_rope_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_rope_rotate(a, -1.0f, dtype);
}

static void mt_cpu_position_scale(const mt_position_scale_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_scratch scratch = mt_scratch_reserve(a->width);
#pragma omp parallel for if (a->T * a->width > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float scale = (float)(1 + a->beta * log(1 + (double)(a->positions[t] / a->context)));
        float *slice = mt_scratch_slice(scratch);
        const float *in = mt_row_load(slice, a->x, t * a->x_stride, a->width, dtype);
        float *out = mt_row_open(slice, a->x, t * a->x_stride, dtype);
        for (int64_t i = 0; i < a->width; i++) out[i] = scale * in[i];
        mt_row_close(a->x, t * a->x_stride, out, a->width, dtype);
    }
}

/* The norm of q's heads (k 0) or of k's, forward and backward. */
static mt_norm_args mt_qk_norm(const mt_qk_args *a, int k, mt_dtype dtype) {
    int64_t skip = k * a->H * a->D;
    mt_norm_args norm = {.T = a->T, .H = k ? a->G : a->H, .C = a->D, .w = k ? a->k_w : a->q_w, .eps = a->eps};
    norm.w_offset = a->w_offset;
    norm.x = mt_at(a->qkv, skip, dtype), norm.y = mt_at(a->qk, skip, dtype), norm.rstd = k ? a->k_rstd : a->q_rstd;
    norm.dy = mt_at(a->dqk, skip, dtype), norm.dx = mt_at(a->dqkv, skip, dtype);
    norm.dw = k ? a->dk_w : a->dq_w, norm.x_stride = a->qkv_stride, norm.y_stride = a->qk_stride;
    norm.dy_stride = a->dqk_stride, norm.dx_stride = a->dqkv_stride;
    return norm;
}

static void mt_cpu_qk_forward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_rope_args rope = {.T = a->T, .H = a->H + a->G, .D = a->D, .y = a->qk, .rotation = a->rotation};
    rope.x = a->q_w ? a->qk : a->qkv, rope.x_stride = a->q_w ? a->qk_stride : a->qkv_stride;
    rope.y_stride = a->qk_stride;
    for (int k = 0; k < 2 && a->q_w; k++) {
        mt_norm_args norm = mt_qk_norm(a, k, dtype);
        mt_cpu_rmsnorm_forward(&norm, dtype, stream);
    }
    if (a->rotation.R > 0) mt_cpu_rope_forward(&rope, dtype, stream);
    if (!a->cache_rows) return;
    int64_t width = a->G * a->D;
    mt_row_args k = {a->T, width, a->cache_rows, .from = mt_at(a->qk, a->H * a->D, dtype), .to = a->k_cache};
    mt_row_args v = {a->T, width, a->cache_rows, .from = mt_at(a->qkv, (a->H + a->G) * a->D, dtype), .to = a->v_cache};
    k.from_stride = a->qk_stride, v.from_stride = a->qkv_stride;
    mt_cpu_scatter_rows(&k, dtype, stream);
    mt_cpu_scatter_rows(&v, dtype, stream);
}

static void mt_cpu_qk_backward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_rope_args rope = {.T = a->T, .H = a->H + a->G, .D = a->D, .x = a->dqk, .rotation = a->rotation};
    rope.y = a->q_w ? a->dqk : a->dqkv, rope.y_stride = a->q_w ? a->dqk_stride : a->dqkv_stride;
    rope.x_stride = a->dqk_stride;
    if (a->rotation.R > 0) mt_cpu_rope_backward(&rope, dtype, stream);
    for (int k = 0; k < 2 && a->q_w; k++) {
        mt_norm_args norm = mt_qk_norm(a, k, dtype);
        mt_cpu_rmsnorm_backward(&norm, dtype, stream);
    }
}

/* Rotates the rope channels, the last R of N + R, of all H heads of x's row t in place. */
static void mt_latent_rotate(void *x, const mt_rotation *rotation, float direction, int64_t t, int64_t H, int64_t N,
                             mt_dtype dtype, mt_scratch scratch) {
    int64_t R = rotation->R, angle = rotation->positions[t] * (R / 2);
    float *slice = mt_scratch_slice(scratch);
    for (int64_t h = 0; h < H; h++) {
        int64_t offset = (t * H + h) * (N + R) + N;
        const float *in = mt_row_load(slice, x, offset, R, dtype);
        float *out = mt_row_open(slice + R, x, offset, dtype);
        mt_rope_pairs(out, in, rotation->cos + angle, rotation->sin + angle, direction, R / 2, rotation->interleaved);
        mt_row_close(x, offset, out, R, dtype);
    }
}

/* to[to_at...] = from[from_at...], n elements of `size` bytes. */
static void mt_copy_elements(void *to, int64_t to_at, const void *from, int64_t from_at, int64_t n, int64_t size) {
    memcpy((char *)to + to_at * size, (const char *)from + from_at * size, (size_t)(n * size));
}

static void mt_cpu_latent_heads_forward(const mt_latent_heads_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, H = a->H, N = a->N, R = a->rotation.R, Dv = a->Dv, size = mt_dtype_size(dtype);
    mt_scratch scratch = mt_scratch_reserve(2 * R);
#pragma omp parallel for if (T * H * (N + R) > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        mt_latent_rotate(a->q, &a->rotation, 1.0f, t, H, N, dtype, scratch);
        for (int64_t r = t * H; r < (t + 1) * H; r++) {
            mt_copy_elements(a->k, r * (N + R), a->kv, r * (N + Dv), N, size);
            mt_copy_elements(a->k, r * (N + R) + N, a->k_rope, t * R, R, size);
            mt_copy_elements(a->v, r * Dv, a->kv, r * (N + Dv) + N, Dv, size);
        }
    }
}

static void mt_cpu_latent_heads_backward(const mt_latent_heads_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, H = a->H, N = a->N, R = a->rotation.R, Dv = a->Dv, size = mt_dtype_size(dtype);
    mt_scratch scratch = mt_scratch_reserve(2 * R);
#pragma omp parallel for if (T * H * (N + R) > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        mt_latent_rotate(a->dq, &a->rotation, -1.0f, t, H, N, dtype, scratch);
        float *slice = mt_scratch_slice(scratch), *sum = slice + R;
        memset(sum, 0, (size_t)R * 4);
        for (int64_t r = t * H; r < (t + 1) * H; r++) {
            mt_copy_elements(a->dkv, r * (N + Dv), a->dk, r * (N + R), N, size);
            mt_copy_elements(a->dkv, r * (N + Dv) + N, a->dv, r * Dv, Dv, size);
            const float *part = mt_row_load(slice, a->dk, r * (N + R) + N, R, dtype);
            for (int64_t i = 0; i < R; i++) sum[i] += part[i];
        }
        mt_row_store(a->dk_rope, t * R, sum, R, dtype);
    }
}

/* ==== §3e attention ============================================================================================== */
/* Blocks of queries by blocks of keys: the scores of a long sequence are never all in memory. The forward keeps a
 * running maximum and sum per query; the backward recomputes the probabilities from the saved lse. The backward has two
 * halves, so that each output has one owner: a task of the first half owns rows of dq, a task of the second rows of dk
 * and dv. */

enum { MT_QUERIES = 64, MT_KEYS = 128 };

/* One head of one span of an attention call. */
typedef struct mt_attention_task {
    const mt_attention *call;
    const mt_span *span;
    int64_t head;
    mt_dtype dtype;
} mt_attention_task;

/* Multiplies the probabilities p[rows, columns] of queries i0... and keys j0... by their dropout factors: word k_index
 * % 4 of Philox at (q_index, head << 48 | k_index / 4). */
static void mt_attention_dropout(float *p, const mt_attention_task *task, int64_t i0, int64_t j0, int64_t rows,
                                 int64_t columns) {
    const mt_attention *call = task->call;
    const int64_t *q_index = call->q_index + task->span->q_start + i0;
    const int64_t *k_index = call->k_index + task->span->k_start + j0;
    uint64_t high = (uint64_t)(call->first_head + task->head) << 48;
    for (int64_t j = 0, run; j < columns; j += run) {
        float factors[MT_KEYS];
        for (run = 1; j + run < columns && k_index[j + run] == k_index[j] + run;) run++; // these share counters
        for (int64_t i = 0; i < rows; i++) {
            mt_dropout_factors(factors, run, &call->dropout, (uint64_t)q_index[i], high, k_index[j]);
            for (int64_t r = 0; r < run; r++) p[i * columns + j + r] *= factors[r];
        }
    }
}

void mt_span_keys(const mt_span *span, int64_t window, int64_t i, int64_t *begin, int64_t *end) {
    int64_t last = i + span->k_len - span->q_len;
    *begin = window > 0 ? mt_max(0, last - window + 1) : 0;
    *end = span->causal ? mt_max(0, mt_min(span->k_len, last + 1)) : span->k_len;
    if (*begin > *end) *begin = *end;
}

/* The queries [*begin, *end) of the span; all others see no key in [j0, j1). */
static void mt_span_queries(const mt_span *span, int64_t window, int64_t j0, int64_t j1, int64_t *begin, int64_t *end) {
    int64_t shift = span->k_len - span->q_len;
    *begin = span->causal ? mt_max(0, j0 - shift) : 0;
    *end = window > 0 ? mt_min(span->q_len, j1 - 1 - shift + window) : span->q_len;
}

/* The greatest q_len of a span, the end of all key rows, and the sum of q_len k_len. */
typedef struct mt_spans_extent {
    int64_t max_queries, key_rows, products;
} mt_spans_extent;

static mt_spans_extent mt_spans_measure(const mt_spans *spans) {
    mt_spans_extent extent = {0};
    for (const mt_span *span = spans->host; span < spans->host + spans->count; span++) {
        extent.max_queries = mt_max(extent.max_queries, span->q_len);
        extent.key_rows = mt_max(extent.key_rows, span->k_start + span->k_len);
        extent.products += span->q_len * span->k_len;
    }
    return extent;
}

/* Queries [i0, i0 + rows) and keys [j0, j0 + columns) of a task's head, as floats; dout in the backward. */
typedef struct mt_attention_block {
    int64_t i0, j0, rows, columns;
    mt_matrix q, k, v, dout;
} mt_attention_block;

/* Loads q, and in the backward dout behind it. */
static void mt_attention_load_queries(mt_attention_block *b, const mt_attention_task *task, bool backward,
                                      float *scratch) {
    const mt_attention *call = task->call;
    int64_t D = call->head_size, Dv = call->value_size, row = task->span->q_start + b->i0;
    b->q = mt_matrix_load(scratch, call->q, row * call->q_stride + task->head * D, b->rows, D, call->q_stride,
                          task->dtype);
    if (backward)
        b->dout = mt_matrix_load(scratch + MT_QUERIES * D, call->dout, row * call->out_stride + task->head * Dv,
                                 b->rows, Dv, call->out_stride, task->dtype);
}

/* Loads k, and v behind it. */
static void mt_attention_load_keys(mt_attention_block *b, const mt_attention_task *task, float *scratch) {
    const mt_attention *call = task->call;
    const mt_pages *pages = &call->pages;
    int64_t D = call->head_size, Dv = call->value_size, row = task->span->k_start + b->j0;
    int64_t group = task->head / (call->num_heads / call->num_groups);
    if (pages->table) row = pages->table[row / pages->rows] * pages->rows + row % pages->rows;
    b->k =
        mt_matrix_load(scratch, call->k, row * call->k_stride + group * D, b->columns, D, call->k_stride, task->dtype);
    b->v = mt_matrix_load(scratch + MT_KEYS * D, call->v, row * call->v_stride + group * Dv, b->columns, Dv,
                          call->v_stride, task->dtype);
}

/* A step of the online softmax over a query's scores p[columns], [begin, end) of them visible: raises the running max,
 * p = exp(scale score - max), adds p to the running sum. Returns the factor that rescales the sums so far. */
static float mt_softmax_running(float *p, int64_t columns, int64_t begin, int64_t end, float scale, float *max,
                                float *sum) {
    float before = *max, top, total = 0;
    begin = mt_max(0, mt_min(begin, columns));
    end = mt_max(begin, mt_min(end, columns));
#pragma omp simd
    for (int64_t j = begin; j < end; j++) p[j] *= scale;
    top = mt_row_max(p + begin, end - begin);
    top = top > before ? top : before;
    for (int64_t j = 0; j < begin; j++) p[j] = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = begin; j < end; j++) {
        p[j] = mt_exp(p[j] - top);
        total += p[j];
    }
    for (int64_t j = end; j < columns; j++) p[j] = 0;
    float factor = before == -INFINITY ? 0.0f : mt_exp(before - top);
    *max = top;
    *sum = *sum * factor + total;
    return factor;
}

/* One block of queries of one head, over all of its keys. */
static void mt_attention_forward_block(const mt_attention_task *task, int64_t i0, float *scratch) {
    const mt_attention *call = task->call;
    const mt_span *span = task->span;
    int64_t D = call->head_size, Dv = call->value_size, rows = mt_min(MT_QUERIES, span->q_len - i0);
    float max[MT_QUERIES], sum[MT_QUERIES];
    float *sums = scratch, *p = sums + MT_QUERIES * Dv, *q_scratch = p + MT_QUERIES * MT_KEYS;
    for (int64_t i = 0; i < rows; i++) max[i] = -INFINITY, sum[i] = 0;
    memset(sums, 0, (size_t)(rows * Dv) * sizeof *sums);
    mt_attention_block b = {.i0 = i0, .rows = rows};
    mt_attention_load_queries(&b, task, false, q_scratch);
    int64_t first, last, begin, end;
    mt_span_keys(span, call->window, i0, &first, &end);
    mt_span_keys(span, call->window, i0 + rows - 1, &begin, &last);
    for (int64_t j0 = first, columns; j0 < last; j0 += columns) {
        columns = mt_min(MT_KEYS, last - j0);
        if (call->pages.table) // a block lies in one page
            columns = mt_min(columns, call->pages.rows - (span->k_start + j0) % call->pages.rows);
        b.j0 = j0, b.columns = columns;
        mt_attention_load_keys(&b, task, q_scratch + MT_QUERIES * D);
        mt_matmul(p, columns, b.q, mt_transposed(b.k), rows, columns, D, false);
        for (int64_t i = 0; i < rows; i++) {
            mt_span_keys(span, call->window, i0 + i, &begin, &end);
            float factor =
                mt_softmax_running(p + i * columns, columns, begin - j0, end - j0, call->scale, &max[i], &sum[i]);
            for (int64_t c = 0; c < Dv && factor != 1.0f; c++) sums[i * Dv + c] *= factor;
        }
        if (call->dropout.p > 0) mt_attention_dropout(p, task, i0, j0, rows, columns);
        mt_matmul(sums, Dv, (mt_matrix){.data = p, .stride = columns}, b.v, rows, Dv, columns, true);
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t row = span->q_start + i0 + i, offset = row * call->out_stride + task->head * Dv;
        float *target = mt_row_open(p, call->out, offset, task->dtype);
        for (int64_t c = 0; c < Dv; c++) target[c] = sum[i] == 0 ? 0.0f : sums[i * Dv + c] / sum[i]; // 0: no key
        mt_row_close(call->out, offset, target, Dv, task->dtype);
        call->lse[row * call->num_heads + task->head] = max[i] + logf(sum[i]);
    }
}

/* Runs `run` on every block of queries of every head and span. */
static void mt_attention_each_block(const mt_attention *a, mt_dtype dtype, mt_scratch scratch,
                                    void (*run)(const mt_attention_task *task, int64_t i0, float *scratch)) {
    mt_spans_extent extent = mt_spans_measure(&a->spans);
    int64_t blocks = mt_divide_up(extent.max_queries, MT_QUERIES), heads = a->num_heads;
#pragma omp parallel for collapse(3) schedule(dynamic) if (extent.products * heads * a->head_size > MT_PARALLEL)
    for (int64_t s = 0; s < a->spans.count; s++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t block = 0; block < blocks; block++) {
                mt_attention_task task = {.call = a, .span = &a->spans.host[s], .head = head, .dtype = dtype};
                if (block * MT_QUERIES >= task.span->q_len) continue;
                run(&task, block * MT_QUERIES, mt_scratch_slice(scratch));
            }
}

static void mt_cpu_attention_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    int64_t widths = a->head_size + a->value_size;
    int64_t floats = (MT_QUERIES + MT_KEYS) * widths + MT_QUERIES * mt_max(MT_KEYS, a->value_size);
    mt_attention_each_block(a, dtype, mt_scratch_reserve(floats), mt_attention_forward_block);
}

/* For a block: ds[rows, columns], scale times the gradient of scale q k^T, and p[rows, columns], the probabilities
 * after dropout, the factors of v. */
static void mt_attention_backward_scores(float *p, float *ds, const mt_attention_task *task,
                                         const mt_attention_block *b) {
    const mt_attention *call = task->call;
    const mt_span *span = task->span;
    int64_t i0 = b->i0, j0 = b->j0, rows = b->rows, columns = b->columns;
    mt_matmul(p, columns, b->q, mt_transposed(b->k), rows, columns, call->head_size, false);
    mt_matmul(ds, columns, b->dout, mt_transposed(b->v), rows, columns, call->value_size, false);
    if (call->dropout.p > 0) mt_attention_dropout(ds, task, i0, j0, rows, columns);
    for (int64_t i = 0; i < rows; i++) {
        int64_t begin, end, row = (span->q_start + i0 + i) * call->num_heads + task->head;
        float *p_row = p + i * columns, *ds_row = ds + i * columns, lse = call->lse[row], dot = call->row_dot[row];
        mt_span_keys(span, call->window, i0 + i, &begin, &end);
        begin = mt_max(0, mt_min(begin - j0, columns));
        end = mt_max(begin, mt_min(end - j0, columns));
        for (int64_t j = 0; j < begin; j++) p_row[j] = ds_row[j] = 0;
#pragma omp simd
        for (int64_t j = begin; j < end; j++) {
            p_row[j] = mt_exp(p_row[j] * call->scale - lse);
            ds_row[j] = p_row[j] * (ds_row[j] - dot) * call->scale;
        }
        for (int64_t j = end; j < columns; j++) p_row[j] = ds_row[j] = 0;
    }
    if (call->dropout.p > 0) mt_attention_dropout(p, task, i0, j0, rows, columns);
}

/* row_dot = sum(out dout) of a block of queries, which the gradient of the softmax subtracts. */
static void mt_attention_row_dot(const mt_attention_task *task, mt_matrix dout, int64_t i0, int64_t rows,
                                 float *scratch) {
    const mt_attention *call = task->call;
    for (int64_t i = 0; i < rows; i++) {
        int64_t row = task->span->q_start + i0 + i, offset = row * call->out_stride + task->head * call->value_size;
        const float *out = mt_row_load(scratch, call->out, offset, call->value_size, task->dtype);
        const float *d = dout.data + i * dout.stride;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < call->value_size; c++) sum += out[c] * d[c];
        call->row_dot[row * call->num_heads + task->head] = sum;
    }
}

/* First half: dq of one block of queries of one head, and their row_dot. */
static void mt_attention_backward_queries(const mt_attention_task *task, int64_t i0, float *scratch) {
    const mt_attention *call = task->call;
    const mt_span *span = task->span;
    int64_t D = call->head_size, Dv = call->value_size, rows = mt_min(MT_QUERIES, span->q_len - i0);
    float *sums = scratch, *p = sums + MT_QUERIES * D, *ds = p + MT_QUERIES * MT_KEYS;
    float *q_scratch = ds + MT_QUERIES * MT_KEYS, *k_scratch = q_scratch + MT_QUERIES * (D + Dv);
    mt_attention_block b = {.i0 = i0, .rows = rows};
    mt_attention_load_queries(&b, task, true, q_scratch);
    mt_attention_row_dot(task, b.dout, i0, rows, k_scratch);
    memset(sums, 0, (size_t)(rows * D) * sizeof *sums);
    int64_t first, last, ignored;
    mt_span_keys(span, call->window, i0, &first, &ignored);
    mt_span_keys(span, call->window, i0 + rows - 1, &ignored, &last);
    for (b.j0 = first; b.j0 < last; b.j0 += MT_KEYS) {
        b.columns = mt_min(MT_KEYS, last - b.j0);
        mt_attention_load_keys(&b, task, k_scratch);
        mt_attention_backward_scores(p, ds, task, &b);
        mt_matmul(sums, D, (mt_matrix){.data = ds, .stride = b.columns}, b.k, rows, D, b.columns, true);
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t offset = (span->q_start + i0 + i) * call->q_stride + task->head * D;
        mt_row_store(call->dq, offset, sums + i * D, D, task->dtype);
    }
}

/* Adds to dk_sums[columns, D] and dv_sums[columns, Dv] the gradients of keys j0... from the queries of one span and
 * head. */
static void mt_attention_backward_keys(float *dk_sums, float *dv_sums, const mt_attention_task *task, int64_t j0,
                                       int64_t columns, float *scratch) {
    const mt_attention *call = task->call;
    int64_t D = call->head_size, Dv = call->value_size, begin, end;
    float *p = scratch, *ds = p + MT_QUERIES * MT_KEYS, *q_scratch = ds + MT_QUERIES * MT_KEYS;
    const mt_matrix p_columns = {p, columns, true}, ds_columns = {ds, columns, true};
    mt_attention_block b = {.j0 = j0, .columns = columns};
    mt_attention_load_keys(&b, task, q_scratch + MT_QUERIES * (D + Dv));
    mt_span_queries(task->span, call->window, j0, j0 + columns, &begin, &end);
    for (b.i0 = begin; b.i0 < end; b.i0 += MT_QUERIES) {
        b.rows = mt_min(MT_QUERIES, end - b.i0);
        mt_attention_load_queries(&b, task, true, q_scratch);
        mt_attention_backward_scores(p, ds, task, &b);
        mt_matmul(dv_sums, Dv, p_columns, b.dout, columns, Dv, b.rows, true);
        mt_matmul(dk_sums, D, ds_columns, b.q, columns, D, b.rows, true);
    }
}

/* Second half: dk and dv of the key rows [k0, k0 + MT_KEYS) of one group, summed over the spans with such rows and the
 * heads of the group, in order. Rows in no span are not written. */
static void mt_attention_backward_group(mt_attention_task *task, int64_t group, int64_t k0, float *scratch) {
    const mt_attention *call = task->call;
    int64_t D = call->head_size, Dv = call->value_size, heads = call->num_heads / call->num_groups;
    float *dk_sums = scratch, *dv_sums = dk_sums + MT_KEYS * D;
    bool covered[MT_KEYS] = {false};
    memset(scratch, 0, (size_t)(MT_KEYS * (D + Dv)) * sizeof *scratch);
    for (int64_t s = 0; s < call->spans.count; s++) {
        const mt_span *span = task->span = &call->spans.host[s];
        int64_t begin = mt_max(k0, span->k_start), end = mt_min(k0 + MT_KEYS, span->k_start + span->k_len);
        if (begin >= end) continue;
        for (int64_t j = begin; j < end; j++) covered[j - k0] = true;
        for (task->head = group * heads; task->head < (group + 1) * heads; task->head++)
            mt_attention_backward_keys(dk_sums + (begin - k0) * D, dv_sums + (begin - k0) * Dv, task,
                                       begin - span->k_start, end - begin, dv_sums + MT_KEYS * Dv);
    }
    for (int64_t j = 0; j < MT_KEYS; j++) {
        if (!covered[j]) continue;
        mt_row_store(call->dk, (k0 + j) * call->k_stride + group * D, dk_sums + j * D, D, task->dtype);
        mt_row_store(call->dv, (k0 + j) * call->v_stride + group * Dv, dv_sums + j * Dv, Dv, task->dtype);
    }
}

static void mt_cpu_attention_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    int64_t D = a->head_size, Dv = a->value_size;
    mt_spans_extent extent = mt_spans_measure(&a->spans);
    mt_scratch scratch = mt_scratch_reserve((2 * MT_QUERIES + 2 * MT_KEYS) * (D + Dv) + 2 * MT_QUERIES * MT_KEYS);
    mt_attention_each_block(a, dtype, scratch, mt_attention_backward_queries);
#pragma omp parallel for collapse(2) schedule(dynamic) if (extent.products * a->num_heads * D > MT_PARALLEL)
    for (int64_t k0 = 0; k0 < extent.key_rows; k0 += MT_KEYS)
        for (int64_t group = 0; group < a->num_groups; group++) {
            mt_attention_task task = {.call = a, .dtype = dtype};
            mt_attention_backward_group(&task, group, k0, mt_scratch_slice(scratch));
        }
}

/* out = exp(lse - s) out + exp(part_lse - s) part with s = log(exp(lse) + exp(part_lse)), of one query and head. */
static float mt_merge_head(float *out, const float *part, float lse, float part_lse, int64_t Dv, bool first) {
    float before = first ? -INFINITY : lse, top = (float)mt_maximum(before, part_lse);
    float total = first || top == -INFINITY ? part_lse : top + log1pf(expf((float)mt_minimum(before, part_lse) - top));
    float keep = total == -INFINITY ? 0.0f : expf(before - total);
    float add = total == -INFINITY ? 0.0f : expf(part_lse - total);
    if (first)
        for (int64_t c = 0; c < Dv; c++) out[c] = part[c];
    else
#pragma omp simd
        for (int64_t c = 0; c < Dv; c++) out[c] = keep * out[c] + add * part[c];
    return total;
}

static void mt_cpu_attention_merge(const mt_merge_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t H = a->H, Dv = a->Dv;
    mt_scratch scratch = mt_scratch_reserve(Dv);
    for (const mt_span *span = a->spans->host; span < a->spans->host + a->spans->count; span++) {
#pragma omp parallel for if (span->q_len * H * Dv > MT_PARALLEL)
        for (int64_t i = span->q_start * H; i < (span->q_start + span->q_len) * H; i++) {
            const float *row = mt_row_load(mt_scratch_slice(scratch), a->part, i * Dv, Dv, dtype);
            a->lse[i] = mt_merge_head(a->out + i * Dv, row, a->lse[i], a->part_lse[i], Dv, a->first);
        }
    }
}

/* Sink of head h, in fp32. */
static float mt_sink_of(const mt_sink_args *a, int64_t h, mt_dtype dtype) {
    float value;
    return a->sinks ? *mt_row_load(&value, a->sinks, h, 1, dtype) : 0;
}

static void mt_cpu_sink_forward(const mt_sink_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t H = a->H, Dv = a->Dv;
    mt_scratch scratch = mt_scratch_reserve(2 * Dv);
    for (const mt_span *span = a->spans->host; span < a->spans->host + a->spans->count; span++) {
#pragma omp parallel for if (span->q_len * H * Dv > MT_PARALLEL)
        for (int64_t i = span->q_start * H; i < (span->q_start + span->q_len) * H; i++) {
            float *slice = mt_scratch_slice(scratch), sink = mt_sink_of(a, i % H, dtype), lse = a->lse[i];
            float top = (float)mt_maximum(lse, sink), both = top + log1pf(expf((float)mt_minimum(lse, sink) - top));
            float factor = expf(lse - both);
            int64_t at = i / H * a->out_stride + i % H * Dv;
            const float *in = mt_row_load(slice, a->out, at, Dv, dtype);
            float *out = mt_row_open(slice + Dv, a->out, at, dtype);
#pragma omp simd
            for (int64_t c = 0; c < Dv; c++) out[c] = in[c] * factor;
            mt_row_close(a->out, at, out, Dv, dtype);
            a->lse[i] = both;
        }
    }
}

/* Tasks are heads: one thread adds all queries, in order. */
static void mt_cpu_sink_backward(const mt_sink_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t H = a->H, Dv = a->Dv;
    mt_scratch scratch = mt_scratch_reserve(2 * Dv);
    if (!a->dsinks) return;
#pragma omp parallel for
    for (int64_t h = 0; h < H; h++) {
        float *slice = mt_scratch_slice(scratch), sink = mt_sink_of(a, h, dtype), sum = 0;
        for (const mt_span *span = a->spans->host; span < a->spans->host + a->spans->count; span++)
            for (int64_t t = span->q_start; t < span->q_start + span->q_len; t++) {
                const float *out = mt_row_load(slice, a->out, t * a->out_stride + h * Dv, Dv, dtype);
                const float *dout = mt_row_load(slice + Dv, a->dout, t * a->out_stride + h * Dv, Dv, dtype);
                float dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t c = 0; c < Dv; c++) dot += out[c] * dout[c];
                sum += expf(sink - a->lse[t * H + h]) * dot;
            }
        a->dsinks[h] -= sum;
    }
}

static void mt_cpu_accumulate_rows(const mt_accumulate_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t width = a->width;
    bool first = a->first;
    mt_scratch scratch = mt_scratch_reserve(width);
    for (const mt_span *span = a->spans->host; span < a->spans->host + a->spans->count; span++) {
        int64_t start = a->of_keys ? span->k_start : span->q_start, length = a->of_keys ? span->k_len : span->q_len;
#pragma omp parallel for if (length * width > MT_PARALLEL)
        for (int64_t t = start; t < start + length; t++) {
            const float *row = mt_row_load(mt_scratch_slice(scratch), a->x, t * a->x_stride, width, dtype);
            float *to = a->sum + t * width;
#pragma omp simd
            for (int64_t c = 0; c < width; c++) to[c] = (first ? 0.0f : to[c]) + row[c];
        }
    }
}

/* ==== §3f activations, residual stream, rows ===================================================================== */

/* 1 / (1 + exp(-x)) */
static inline float mt_sigmoid(float x) {
    return 1.0f / (1.0f + mt_exp(-x));
}

/* log(1 + exp(x)). */
static inline float mt_softplus(float x) {
    return x > 20 ? x : log1pf(expf(x));
}

/* The normal distribution function, erfc(-x / sqrt(2)) / 2, by the Chebyshev fit of Press et al., "Numerical recipes"
 * (erfcc), with a relative error below 1.2e-7. */
static inline float mt_normal_cdf(float x) {
    float z = fabsf(x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z), p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    float tail = 0.5f * t * mt_exp(-z * z - 1.26551223f + t * p);
    return x < 0 ? tail : 1.0f - tail;
}

/* Each activation f as a f(x) and its slope as a f'(x), multiplied from the left. gelu(x) = x cdf(x), with slope
 * cdf(x) + x density(x). The approximation (1 + tanh(u)) / 2 of cdf is s = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715
 * x^3); its slope is s + x s (1 - s) 2 u'. silu(x) = x sigmoid(x). quick_gelu(x) = x sigmoid(1.702 x).
 * squared_relu(x) = max(0, x)^2. */
static inline float mt_gelu(float a, float x) {
    return a * x * mt_normal_cdf(x);
}

static inline float mt_gelu_slope(float a, float x) {
    float density = 0.39894228f * mt_exp(-0.5f * x * x);
    return a * (mt_normal_cdf(x) + x * density);
}

static inline float mt_gelu_u2(float x) {
    return 1.59576912f * (x + 0.044715f * x * x * x);
}

static inline float mt_gelu_tanh(float a, float x) {
    return a * x * mt_sigmoid(mt_gelu_u2(x));
}

static inline float mt_gelu_tanh_slope(float a, float x) {
    float s = mt_sigmoid(mt_gelu_u2(x)), slope = 1.59576912f * (1.0f + 3.0f * 0.044715f * x * x);
    return a * (s + x * s * (1.0f - s) * slope);
}

static inline float mt_squared_relu(float a, float x) {
    float relu = x < 0 ? 0 : x; // NaN stays
    return a * relu * relu;
}

static inline float mt_squared_relu_slope(float a, float x) {
    return a * (x < 0 ? 0 : 2 * x);
}

static inline float mt_silu(float a, float x) {
    return a * x * mt_sigmoid(x);
}

static inline float mt_silu_slope(float a, float x) {
    float s = mt_sigmoid(x);
    return a * s * (1.0f + x * (1.0f - s));
}

static inline float mt_quick_gelu(float a, float x) {
    return a * x * mt_sigmoid(1.702f * x);
}

static inline float mt_quick_gelu_slope(float a, float x) {
    float s = mt_sigmoid(1.702f * x);
    return a * s * (1.0f + 1.702f * x * (1.0f - s));
}

/* The loops over n elements of a row: y = weight f(x) up; dx, dup and sum(dy f(x) up). No `up` unless gated. */
#define MT_CPU_ACTIVATION(name, f, gated, ...)                                                                         \
    static void mt_row_##name(float *y, const float *x, const float *up, float weight, int64_t n) {                    \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] =                                                     \
            weight * (gated ? mt_##f(1, x[i]) * up[i] : mt_##f(1, x[i]));                                              \
    }                                                                                                                  \
    static float mt_row_##name##_backward(float *dx, float *dup, const float *dy, const float *x, const float *up,     \
                                          float weight, int64_t n) {                                                   \
        float sum = 0;                                                                                                 \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) {                                       \
            float in = x[i], u = gated ? up[i] : 1, d = weight * dy[i];                                                \
            sum += dy[i] * (mt_##f(1, in) * u);                                                                        \
            dx[i] = mt_##f##_slope(d * u, in);                                                                         \
            if (gated) dup[i] = mt_##f(d, in);                                                                         \
        }                                                                                                              \
        return sum;                                                                                                    \
    }
#define MT_CPU_ACTIVATION_ROW(name, ...) {mt_row_##name, mt_row_##name##_backward},

MT_ACTIVATIONS(MT_CPU_ACTIVATION)

static const struct {
    void (*forward)(float *y, const float *x, const float *up, float weight, int64_t n);
    float (*backward)(float *dx, float *dup, const float *dy, const float *x, const float *up, float weight, int64_t n);
} mt_cpu_activations[MT_NUM_ACTIVATIONS] = {MT_ACTIVATIONS(MT_CPU_ACTIVATION_ROW)};

/* Replaces rows = {gate, up} of a gated activation by the bounded operands, which `to` holds. Unless NULL, slopes[2]
 * are their derivatives, 0 or 1. Comparisons with NaN are false, so that NaN stays. */
static void mt_glu_rows(const mt_glu *glu, const float *rows[2], float to[2][MT_BLOCK], float slopes[2][MT_BLOCK],
                        int64_t n) {
    float high = glu->clamp > 0 ? glu->clamp : INFINITY, offset = glu->offset;
    const float *gate = rows[0], *up = rows[1];
    for (int64_t i = 0; i < n; i++) {
        bool gate_beyond = gate[i] > high, up_above = up[i] > high, up_below = up[i] < -high;
        if (slopes) slopes[0][i] = !gate_beyond, slopes[1][i] = !(up_above || up_below);
        to[0][i] = gate_beyond ? high : gate[i];
        to[1][i] = (up_above ? high : up_below ? -high : up[i]) + offset;
    }
    rows[0] = to[0], rows[1] = to[1];
}

static void mt_cpu_activation_forward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, F = a->F;
    void *y = mt_result_open(&a->quantize, a->y, T * F, dtype);
    bool gated = mt_activation_rows[a->activation].gated;
    int64_t blocks = mt_divide_up(F, MT_BLOCK), width = gated ? 2 * F : F;
    MT_CHECK(gated || !mt_glu_bounds(&a->glu));
#pragma omp parallel for if (T * F > MT_PARALLEL)
    for (int64_t i = 0; i < T * blocks; i++) {
        float scratch[3][MT_BLOCK], bounded[2][MT_BLOCK];
        int64_t t = i / blocks, f = i % blocks * MT_BLOCK, n = mt_min(MT_BLOCK, F - f);
        const float *in[2] = {mt_row_load(scratch[0], a->x, t * width + f, n, dtype), NULL};
        if (gated) in[1] = mt_row_load(scratch[1], a->x, t * width + F + f, n, dtype);
        float *out = mt_row_open(scratch[2], y, t * F + f, dtype);
        if (mt_glu_bounds(&a->glu)) mt_glu_rows(&a->glu, in, bounded, NULL, n);
        mt_cpu_activations[a->activation].forward(out, in[0], in[1], a->weights ? a->weights[t] : 1, n);
        mt_row_close(y, t * F + f, out, n, dtype);
    }
    mt_result_close(&a->quantize, y, dtype, stream);
}

static void mt_cpu_activation_backward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, F = a->F;
    bool gated = mt_activation_rows[a->activation].gated;
    bool bounds = mt_glu_bounds(&a->glu);
    int64_t width = gated ? 2 * F : F;
    MT_CHECK(gated || !bounds);
    void *dx = mt_result_open(&a->quantize, a->dx, T * width, dtype);
#pragma omp parallel for if (T * F > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float scratch[5][MT_BLOCK], bounded[2][MT_BLOCK], slopes[2][MT_BLOCK];
        double dweight = 0;
        for (int64_t f = 0; f < F; f += MT_BLOCK) {
            int64_t n = mt_min(MT_BLOCK, F - f), at = t * width + f;
            const float *in[2] = {mt_row_load(scratch[0], a->x, at, n, dtype), NULL};
            if (gated) in[1] = mt_row_load(scratch[1], a->x, at + F, n, dtype);
            if (bounds) mt_glu_rows(&a->glu, in, bounded, slopes, n);
            const float *d = mt_row_load(scratch[2], a->dy, t * F + f, n, dtype);
            float *out = mt_row_open(scratch[3], dx, at, dtype);
            float *dup = gated ? mt_row_open(scratch[4], dx, at + F, dtype) : NULL;
            dweight += (double)mt_cpu_activations[a->activation].backward(out, dup, d, in[0], in[1],
                                                                          a->weights ? a->weights[t] : 1, n);
            for (int64_t i = 0; bounds && i < n; i++) out[i] *= slopes[0][i], dup[i] *= slopes[1][i];
            mt_row_close(dx, at, out, n, dtype);
            if (gated) mt_row_close(dx, at + F, dup, n, dtype);
        }
        if (a->dweights) a->dweights[t] = (float)dweight;
    }
    mt_result_close(&a->quantize, dx, dtype, stream);
}

static void mt_cpu_dropout_add_forward(const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t T = a->T, C = a->C;
    mt_scratch scratch = mt_scratch_reserve(4 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch), *factors = slice + 3 * C;
        const float *in = mt_row_load(slice, a->x, t * C, C, dtype);
        const float *add = a->residual ? mt_row_load(slice + C, a->residual, t * C, C, dtype) : NULL;
        float *row = mt_row_open(slice + 2 * C, a->out, t * C, dtype);
        bool drop = a->dropout.p > 0;
        if (drop) mt_dropout_factors(factors, C, &a->dropout, (uint64_t)a->token_index[t], 0, a->first_channel);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) row[c] = (add ? add[c] : 0.0f) + (drop ? in[c] * factors[c] : in[c]);
        mt_row_close(a->out, t * C, row, C, dtype);
    }
}

static void mt_cpu_dropout_add_backward(const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_cpu_dropout_add_forward(a, dtype, stream);
}

static void mt_cpu_add(void *y, const void *a, const void *b, int64_t n, mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float a_scratch[MT_BLOCK], b_scratch[MT_BLOCK], y_scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        const float *in = mt_row_load(a_scratch, a, block, count, dtype);
        const float *more = mt_row_load(b_scratch, b, block, count, dtype);
        float *out = mt_row_open(y_scratch, y, block, dtype);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) out[i] = in[i] + more[i];
        mt_row_close(y, block, out, count, dtype);
    }
}

static void mt_cpu_scale(void *x, float factor, int64_t n, mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float scratch[MT_BLOCK], out_scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        const float *in = mt_row_load(scratch, x, block, count, dtype);
        float *out = mt_row_open(out_scratch, x, block, dtype);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) out[i] = factor * in[i];
        mt_row_close(x, block, out, count, dtype);
    }
}

static void mt_cpu_scatter_add_rows(const mt_row_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_embedding_args sums = {a->T, a->width, 0, a->count, a->index, .dout = a->from, .dw = a->to};
    mt_cpu_embedding_backward(&sums, dtype, stream);
}

static void mt_cpu_scatter_rows(const mt_row_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t size = mt_dtype_size(dtype), width = a->width;
    int64_t to_stride = a->to_stride ? a->to_stride : width, from_stride = a->from_stride ? a->from_stride : width;
#pragma omp parallel for if (a->T * width > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++)
        mt_copy_elements(a->to, a->index[t] * to_stride, a->from, t * from_stride, width, size);
}

static void mt_cpu_gather_rows(const mt_row_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t size = mt_dtype_size(dtype), width = a->width;
    int64_t to_stride = a->to_stride ? a->to_stride : width, from_stride = a->from_stride ? a->from_stride : width;
#pragma omp parallel for if (a->T * width > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++)
        if (a->index[t] < 0)
            memset((char *)a->to + t * to_stride * size, 0, (size_t)(width * size));
        else
            mt_copy_elements(a->to, t * to_stride, a->from, a->index[t] * from_stride, width, size);
}

/* ==== §3g cross-entropy, sampling ================================================================================ */

static void mt_cpu_cross_entropy_forward(const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream) {
    const int64_t T = a->T, count = a->count;
    const float k = a->logit_scale > 0 ? a->logit_scale : 1;
    mt_scratch scratch = mt_scratch_reserve(count);
#pragma omp parallel for if (T * count > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        const float *x = mt_row_load(mt_scratch_slice(scratch), a->logits, t * a->stride, count, dtype);
        float max = k * mt_row_max(x, count), *row = a->stats + t;
        double sum = 0, weighted = 0;
        for (int64_t block = 0; block < count; block += MT_BLOCK) {
            float block_sum = 0, block_weighted = 0;
#pragma omp simd reduction(+ : block_sum, block_weighted)
            for (int64_t i = block; i < mt_min(block + MT_BLOCK, count); i++) {
                float e = mt_exp(k * x[i] - max);
                block_sum += e;
                block_weighted += e == 0 ? 0.0f : e * (k * x[i]); // exp(-inf) * -inf counts as 0
            }
            sum += block_sum;
            weighted += block_weighted;
        }
        int64_t label = a->labels[t] - a->first;
        row[0] = max, row[T] = (float)sum;
        row[2 * T] = label >= 0 && label < count ? k * x[label] : 0.0f;
        if (a->entropy) row[3 * T] = (float)weighted;
    }
}

static void mt_cpu_cross_entropy_combine(const mt_cross_entropy_args *a, const float *parts, int64_t n,
                                         mt_stream *stream) {
    const int64_t T = a->T, part = (a->entropy ? 4 : 3) * T;
    for (int64_t t = 0; t < T; t++) {
        float max = -INFINITY, *row = a->stats + t;
        double sum = 0, target = 0, weighted = 0;
        for (int64_t i = 0; i < n; i++) max = (float)mt_maximum(max, parts[i * part + t]);
        for (int64_t i = 0; i < n; i++) {
            const float *share = parts + i * part + t;
            double scale = exp((double)share[0] - (double)max); // 0 for a part without vocabulary
            sum += scale * (double)share[T];
            target += (double)share[2 * T];
            if (a->entropy) weighted += scale * (double)share[3 * T];
        }
        row[0] = max, row[T] = (float)sum, row[2 * T] = (float)target;
        if (a->entropy) row[3 * T] = (float)weighted;
    }
}

static void mt_cpu_cross_entropy_loss(const mt_cross_entropy_args *a, mt_stream *stream) {
    for (int64_t t = 0; t < a->T; t++) {
        const float *row = a->stats + t;
        double log_sum = (double)row[0] + log((double)row[a->T]);
        a->lse[t] = (float)log_sum, a->logp[t] = (float)((double)row[2 * a->T] - log_sum);
        if (a->entropy) a->entropy[t] = (float)(log_sum - (double)row[3 * a->T] / (double)row[a->T]);
    }
}

static void mt_cpu_cross_entropy_backward(const mt_cross_entropy_args *a, mt_dtype dtype, mt_stream *stream) {
    const int64_t count = a->count, stride = a->stride;
    const float k = a->logit_scale > 0 ? a->logit_scale : 1, loss_scale = a->loss_scale > 0 ? a->loss_scale : 1;
    mt_scratch scratch = mt_scratch_reserve(count + stride);
#pragma omp parallel for if (a->T * count > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch), log_sum = a->lse[t], scale = -k * (a->dlogp[t] * loss_scale);
        const float *x = mt_row_load(slice, a->logits, t * stride, count, dtype);
        float *d = mt_row_open(slice + count, a->dlogits, t * stride, dtype); // may be x
        int64_t label = a->labels[t] - a->first;
        if (a->dentropy) {
            float dentropy = k * (a->dentropy[t] * loss_scale), entropy = a->entropy[t];
            for (int64_t i = 0; i < count; i++) {
                float log_p = k * x[i] - log_sum, p = mt_exp(log_p);
                d[i] = p == 0 ? 0.0f : p * (scale - dentropy * (log_p + entropy));
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < count; i++) d[i] = mt_exp(k * x[i] - log_sum) * scale;
        }
        if (label >= 0 && label < count) d[label] -= scale;
        for (int64_t i = count; i < stride; i++) d[i] = 0.0f;
        mt_row_close(a->dlogits, t * stride, d, stride, dtype);
    }
}

static void mt_cpu_nll_loss(double *sums, float *dlogp, const float *logp, const float *weights, int64_t T,
                            mt_stream *stream) {
    for (int64_t t = 0; t < T; t++) {
        sums[0] -= (double)logp[t] * (double)weights[t];
        sums[1] += (double)weights[t];
        dlogp[t] = -weights[t];
    }
}

/* The index of the maximum of x[n], the first among equals. */
static int64_t mt_row_greatest(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* The same; -1 if an element is NaN or the maximum is not finite. */
static int32_t mt_row_argmax(const float *x, int64_t n) {
    int64_t best = mt_row_greatest(x, n);
    bool numbers = true;
    for (int64_t i = 0; i < n; i++) numbers &= !isnan(x[i]);
    return numbers && isfinite(x[best]) ? (int32_t)best : -1;
}

/* ---- sampling, for generation */

/* Unnormalised softmax weight of a token; 1 for `best`, the argmax. */
static double mt_token_weight(const float *logits, int32_t token, int32_t best, double temperature) {
    return exp(((double)logits[token] - (double)logits[best]) / temperature);
}

/* Order of tokens: higher logit first, then lower id. */
static bool mt_token_before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

/* Sifts element i down in a heap of tokens (a parent comes before its children). */
static void mt_token_heap_sift(int32_t *heap, int64_t count, int64_t i, const float *logits) {
    int32_t token = heap[i];
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && mt_token_before(logits, heap[child + 1], heap[child])) child++;
        if (!mt_token_before(logits, heap[child], token)) break;
        heap[i] = heap[child];
    }
    heap[i] = token;
}

/* Moves the first token of the heap order[0, count) to order[count - 1]. */
static int32_t mt_token_heap_pop(int32_t *order, int64_t count, const float *logits) {
    int32_t first = order[0];
    order[0] = order[count - 1];
    order[count - 1] = first;
    mt_token_heap_sift(order, count - 1, 0, logits);
    return first;
}

/* Moves the tokens that top-k, top-p and min-p keep to the end of order[V], in ascending order. Returns their number,
 * and in `total` the sum of their weights. Building the heap is O(V); usually few tokens are popped. */
static int64_t mt_tokens_keep(int32_t *order, int64_t V, const float *logits, int32_t best, const mt_sampling *sampling,
                              double *total) {
    double t = sampling->temperature, all = 0, sum = 0;
    for (int64_t i = V / 2 - 1; i >= 0; i--) mt_token_heap_sift(order, V, i, logits);
    int64_t most = sampling->top_k > 0 && sampling->top_k < V ? sampling->top_k : V, popped = 0, kept = 0;
    if (most == V)
        for (int64_t i = 0; i < V; i++) all += mt_token_weight(logits, order[i], best, t);
    else
        while (popped < most) all += mt_token_weight(logits, mt_token_heap_pop(order, V - popped++, logits), best, t);
    for (; kept < most && (kept == 0 || sum < sampling->top_p * all); kept++) {
        if (kept == popped) mt_token_heap_pop(order, V - popped++, logits);
        double weight = mt_token_weight(logits, order[V - 1 - kept], best, t);
        if (kept > 0 && weight < sampling->min_p) break; // the first weight is 1
        sum += weight;
    }
    *total = sum;
    return kept;
}

/* Draws a token from the softmax of scores[V] / temperature, whose argmax is `best`; order[V] is scratch. */
static mt_sampled mt_token_draw(const float *scores, int64_t V, int32_t best, const mt_sampling *sampling,
                                double uniform, int32_t *order) {
    int64_t kept = V, i = V;
    double total = 0, sum = 0, t = sampling->temperature;
    for (int32_t token = 0; token < V; token++) order[token] = token;
    if (sampling->top_k > 0 || sampling->top_p < 1 || sampling->min_p > 0)
        kept = mt_tokens_keep(order, V, scores, best, sampling, &total);
    else
        while (--i >= 0) total += mt_token_weight(scores, order[i], best, t);
    for (i = V - 1; i > V - kept; i--) {
        sum += mt_token_weight(scores, order[i], best, t);
        if (sum > uniform * total) break;
    }
    double weight = mt_token_weight(scores, order[i], best, t);
    return (mt_sampled){.token = order[i], .sampled_logp = (float)log(weight / total)};
}

/* log softmax(scale logits[V])[token], with scale 1 for 0; `best` is the argmax. */
static float mt_token_logp(const float *logits, int64_t V, int32_t best, int32_t token, float scale) {
    double sum = 0, times = scale > 0 ? (double)scale : 1;
    for (int64_t first = 0; first < V; first += MT_COLUMNS) {
        float part = 0, k = (float)times;
        for (int64_t i = first; i < mt_min(first + MT_COLUMNS, V); i++) part += mt_exp(k * (logits[i] - logits[best]));
        sum += (double)part;
    }
    return (float)(times * ((double)logits[token] - (double)logits[best]) - log(sum));
}

/* Samples from scores[V]: the logits, or the logits after penalties. */
static mt_sampled mt_row_sample(const float *logits, const float *scores, int64_t V, const mt_sampling *sampling,
                                double uniform, int32_t *order) {
    int32_t greatest = mt_row_argmax(logits, V), best = scores == logits ? greatest : mt_row_argmax(scores, V);
    if (greatest < 0 || best < 0) return (mt_sampled){.token = -1};
    mt_sampled drawn = {.token = best};
    if (sampling->temperature > 0) drawn = mt_token_draw(scores, V, best, sampling, uniform, order);
    if (sampling->logprobs) drawn.logp = mt_token_logp(logits, V, greatest, drawn.token, sampling->logp_scale);
    return drawn;
}

static void mt_cpu_sample(const mt_sample_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_scratch scratch = mt_scratch_reserve(2 * a->count);
#pragma omp parallel for schedule(dynamic) if (a->T * a->count > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *row = mt_row_load(slice, a->logits, t * a->stride, a->count, dtype);
        a->sampled[t] = mt_row_sample(row, row, a->count, a->sampling, a->uniforms[t], (int32_t *)(slice + a->count));
    }
}

/* ==== §3h mixture of experts ===================================================================================== */
/* Invariant: a token's choices and weights depend on its own row only, so all layouts of ranks route alike. All scores
 * keep the order of the logits: where nothing is added to the scores, experts are chosen by logits, because rounding
 * can make different scores equal. */

/* The score of a logit by itself, and its derivative divided by it. */
static inline float mt_score(mt_score_function score, float x) {
    return score == MT_SCORE_SIGMOID ? mt_sigmoid(x) : sqrtf(mt_softplus(x));
}

static inline float mt_score_slope(mt_score_function score, float x) {
    if (score == MT_SCORE_SIGMOID) return mt_sigmoid(-x);
    float softplus = mt_softplus(x);
    return softplus > 0 ? 0.5f * mt_sigmoid(x) / softplus : 0.5f; // 1 / 2 where both are about exp(x), which underflows
}

/* Every sum runs over the channels in order, for any number of rows. */
static void mt_cpu_router_logits(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    enum { TOKENS = 16 }; // per read of the weights
    int64_t T = a->T, E = a->N, C = a->K;
    float *logits = a->y;
    mt_scratch scratch = mt_scratch_reserve(mt_max(mt_matrix_scratch(TOKENS, C, dtype), E));
#pragma omp parallel for if (T * E * C > MT_PARALLEL)
    for (int64_t first = 0; first < T; first += TOKENS) {
        int64_t tokens = mt_min(TOKENS, T - first);
        const float *rows[TOKENS];
        for (int64_t t = 0; t < tokens; t++)
            rows[t] = mt_row_load(mt_scratch_slice(scratch) + t * C, a->x, (first + t) * C, C, dtype);
        for (int64_t e = 0; e < E; e += 4) {
            const void *weights[4];
            for (int64_t i = 0; i < 4; i++) weights[i] = mt_at(a->w, mt_min(e + i, E - 1) * C, dtype);
            for (int64_t t = 0; t < tokens; t++) {
                float sums[4];
                mt_dot_four(sums, rows[t], weights, C, dtype);
                for (int64_t i = 0; i < mt_min(4, E - e); i++) logits[(first + t) * E + e + i] = sums[i];
            }
        }
        if (!a->bias) continue;
        const float *add = mt_row_load(mt_scratch_slice(scratch), a->bias, 0, E, dtype); // the tokens are read
        for (int64_t i = first * E; i < (first + tokens) * E; i++) logits[i] += add[i % E];
    }
}

static void mt_cpu_random_logits(float *logits, const int64_t *token_index, int64_t T, int64_t E, uint64_t key,
                                 mt_stream *stream) {
#pragma omp parallel for if (T * E > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++)
        for (int64_t e = 0; e < E; e += 4) {
            uint32_t words[4];
            float normal[4];
            mt_philox(words, key, (uint64_t)token_index[t], (uint64_t)(e / 4));
            mt_box_muller(normal, words[0], words[1]);
            mt_box_muller(normal + 2, words[2], words[3]);
            for (int64_t i = e; i < mt_min(e + 4, E); i++) logits[t * E + i] = normal[i - e];
        }
}

static bool mt_row_is_finite(const float *x, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++) finite &= isfinite(x[i]) != 0;
    return finite;
}

/* out[n] = softmax of x[n], which may be out; returns log(sum(exp(x))). */
static double mt_row_softmax(float *out, const float *x, int64_t n) {
    float max = mt_row_max(x, n), sum = 0;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = mt_exp(x[i] - max);
    for (int64_t i = 0; i < n; i++) sum += out[i];
    for (int64_t i = 0; i < n; i++) out[i] /= sum;
    return (double)max + log((double)sum);
}

/* Divides x[n] by its sum + 1e-20. */
static void mt_row_normalize(float *x, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    for (int64_t i = 0; i < n; i++) x[i] /= sum + 1e-20f;
}

/* keys[E] = -inf for experts outside the group_topk groups whose best group_best scores have the greatest sums. `spare`
 * has 2 E floats. */
static void mt_route_limit_groups(float *keys, const float *scores, float *spare, const mt_router *router) {
    int64_t E = router->num_experts, groups = router->num_groups, size = E / groups;
    int64_t best = router->group_best > 0 ? router->group_best : router->topk / router->group_topk;
    float *sums = spare + E;
    memcpy(spare, scores, (size_t)E * sizeof *spare);
    for (int64_t g = 0; g < groups; g++) {
        float *group = spare + g * size;
        sums[g] = 0;
        for (int64_t i = 0; i < mt_min(best, size); i++) {
            int64_t greatest = mt_row_greatest(group, size);
            sums[g] += group[greatest];
            group[greatest] = -INFINITY;
        }
    }
    for (int64_t i = 0; i < router->group_topk; i++) sums[mt_row_greatest(sums, groups)] = -INFINITY;
    for (int64_t e = 0; e < E; e++)
        if (sums[e / size] > -INFINITY) keys[e] = -INFINITY; // its group was not chosen
}

/* experts[k] for finite logits[E]; `slice` has 4 E floats. */
static void mt_route_choose(int32_t *experts, const float *logits, const float *bias, float *slice,
                            const mt_router *router) {
    int64_t E = router->num_experts;
    float *keys = slice, *scores = slice + E, *spare = slice + 2 * E;
    bool of_scores = bias && !router->bias_of_logits;
    for (int64_t e = 0; e < E; e++) {
        scores[e] = router->score ? mt_score(router->score, logits[e]) : logits[e];
        keys[e] = logits[e];
    }
    if (!router->score && (router->pre_softmax || of_scores)) mt_row_softmax(scores, logits, E);
    for (int64_t e = 0; e < E && of_scores; e++) keys[e] = scores[e] += bias[e];
    for (int64_t e = 0; e < E && bias && !of_scores; e++) keys[e] += bias[e];
    if (router->num_groups > 0) mt_route_limit_groups(keys, scores, spare, router);
    for (int64_t i = 0; i < router->topk; i++) {
        experts[i] = (int32_t)mt_row_greatest(keys, E);
        keys[experts[i]] = -INFINITY;
    }
}

/* probs[k] of experts[k], before the scaling; `slice` has E floats. */
static void mt_route_weigh(float *probs, const int32_t *experts, const float *logits, float *slice,
                           const mt_router *router) {
    int64_t k = router->topk;
    if (!router->score && router->pre_softmax) {
        mt_row_softmax(slice, logits, router->num_experts);
        for (int64_t j = 0; j < k; j++) probs[j] = slice[experts[j]];
        return;
    }
    for (int64_t j = 0; j < k; j++) {
        float x = logits[experts[j]];
        probs[j] = router->score ? mt_score(router->score, x) : x;
    }
    if (!router->score)
        mt_row_softmax(probs, probs, k);
    else if (k > 1)
        mt_row_normalize(probs, k);
}

/* Padding has negative token indices. */
static bool mt_is_padding(const int64_t *token_index, int64_t t) {
    return token_index && token_index[t] < 0;
}

static void mt_cpu_route_forward(const mt_route_args *a, mt_stream *stream) {
    const mt_router *router = a->router;
    int64_t E = router->num_experts, k = router->topk;
    int32_t wrong = 0;
    bool finite = !a->bias || mt_row_is_finite(a->bias, E);
    mt_scratch scratch = mt_scratch_reserve(4 * E);
#pragma omp parallel for reduction(+ : wrong) if (a->T * E > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch), *p = a->probs + t * k;
        const float *x = a->logits + t * E;
        int32_t *chosen = a->experts + t * k;
        bool padding = mt_is_padding(a->token_index, t);
        if (!padding && finite && mt_row_is_finite(x, E)) {
            mt_route_choose(chosen, x, a->bias, slice, router);
            mt_route_weigh(p, chosen, x, slice, router);
            for (int64_t j = 0; j < k; j++) p[j] *= router->scaling;
        } else {
            wrong += !padding;
            for (int64_t j = 0; j < k; j++) chosen[j] = padding ? -1 : (int32_t)j, p[j] = padding ? 0 : NAN;
        }
    }
    a->invalid[0] += wrong;
}

/* One round: factors weight[T] for row sums of 1 / tokens, then scale[E], previously `old`, for column sums of 1 / E.
 * Returns the mean change of scale. */
static double mt_sinkhorn_round(double *scale, double *old, double *weight, const double *cost, const double *guard,
                                int64_t tokens, int64_t T, int64_t E) {
    double change = 0;
    memcpy(old, scale, (size_t)E * sizeof *old);
#pragma omp parallel for if (T * E > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        double sum = 0;
        for (int64_t e = 0; e < E; e++) sum += scale[e] * cost[t * E + e];
        weight[t] = 1 / ((double)tokens * (sum + guard[t]));
    }
#pragma omp parallel for if (T * E > MT_PARALLEL)
    for (int64_t column = 0; column < E; column += MT_COLUMNS) {
        int64_t end = mt_min(column + MT_COLUMNS, E);
        for (int64_t e = column; e < end; e++) scale[e] = 0;
        for (int64_t t = 0; t < T; t++)
            for (int64_t e = column; e < end; e++) scale[e] += weight[t] * cost[t * E + e];
        for (int64_t e = column; e < end; e++) scale[e] = 1 / ((double)E * (scale[e] + 1e-8));
    }
    for (int64_t e = 0; e < E; e++) change += fabs(scale[e] - old[e]);
    return change / (double)E;
}

static void mt_cpu_route_sinkhorn(const mt_route_args *a, mt_stream *stream) {
    const mt_router *router = a->router;
    int64_t T = a->T, E = router->num_experts, k = router->topk;
    double *cost = (double *)mt_scratch_grow(2 * (T * E + 2 * T + 2 * E) + E), *guard = cost + T * E;
    double *weight = guard + T, *scale = weight + T, *old = scale + E;
    float *slice = (float *)(old + E);
    MT_CHECK(router->score ? k == 1 : router->pre_softmax);
    // cost = exp(logits - max), with the maximum of each row against overflow; guard = 1e-8 / exp(max). A row that is
    // not finite, or padding, has cost 0.
    int64_t tokens = 0;
#pragma omp parallel for reduction(+ : tokens) if (T * E > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        const float *x = a->logits + t * E;
        bool counts = mt_row_is_finite(x, E) && !mt_is_padding(a->token_index, t);
        double max = counts ? (double)mt_row_max(x, E) : 0;
        for (int64_t e = 0; e < E; e++) cost[t * E + e] = counts ? exp((double)x[e] - max) : 0;
        guard[t] = counts ? 1e-8 * exp(-max) : INFINITY;
        tokens += counts;
    }
    for (int64_t e = 0; e < E; e++) scale[e] = 1;
    for (int round = 0; round < MT_SINKHORN_ROUNDS && tokens > 0; round++)
        if (mt_sinkhorn_round(scale, old, weight, cost, guard, tokens, T, E) <= 1e-4) break;
    for (int64_t t = 0; t < a->count; t++) {
        double *keys = cost + (a->first + t) * E;
        const float *x = a->logits + (a->first + t) * E;
        float *p = a->probs + t * k;
        int32_t *chosen = a->experts + t * k;
        bool padding = mt_is_padding(a->token_index, a->first + t), finite = !padding && mt_row_is_finite(x, E);
        a->invalid[0] += !finite && !padding;
        for (int64_t e = 0; e < E; e++) keys[e] *= scale[e];
        for (int64_t j = 0; j < k; j++) {
            int64_t best = finite ? 0 : j;
            for (int64_t e = 1; e < E && finite; e++)
                if (keys[e] > keys[best]) best = e;
            chosen[j] = padding ? -1 : (int32_t)best;
            keys[best] = -1;
        }
        if (finite) mt_route_weigh(p, chosen, x, slice, router);
        for (int64_t j = 0; j < k; j++) p[j] = finite ? p[j] * router->scaling : padding ? 0 : NAN;
    }
}

/* From probabilities q over some experts and their gradients g, the gradient of the logits: q (g - sum(g q)) for a
 * softmax; the same times s' / s for scores s of their own divided by their sum; g s' for a single one. */
static void mt_cpu_route_backward(const mt_route_args *a, mt_stream *stream) {
    const mt_router *router = a->router;
    int64_t E = router->num_experts, k = router->topk;
    bool all = !router->score && router->pre_softmax; // the softmax includes experts that were not chosen
    mt_scratch scratch = mt_scratch_reserve(E + k);
#pragma omp parallel for if (a->T * E > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch), *q = slice + E, *d = a->dlogits + t * E, mean = 0;
        const float *x = a->logits + t * E, *g = a->dprobs + t * k;
        const int32_t *chosen = a->experts + t * k;
        for (int64_t e = 0; e < E; e++) d[e] = 0;
        if (chosen[0] < 0) continue; // padding
        mt_route_weigh(q, chosen, x, slice, router);
        for (int64_t j = 0; j < k; j++) mean += g[j] * q[j];
        if (router->score && k == 1) mean = 0;
        for (int64_t e = 0; e < E && all; e++) d[e] = -router->scaling * slice[e] * mean;
        for (int64_t j = 0; j < k; j++) {
            float slope = router->score ? mt_score_slope(router->score, x[chosen[j]]) : 1.0f;
            d[chosen[j]] = router->scaling * q[j] * (g[j] - mean) * slope;
        }
    }
}

/* The scores of a token for the auxiliary loss; returns log(sum(exp(logits))). */
static double mt_route_shares(float *shares, const float *logits, const mt_router *router) {
    int64_t E = router->num_experts;
    double lse = mt_row_softmax(shares, logits, E);
    if (router->score) {
        for (int64_t e = 0; e < E; e++) shares[e] = mt_score(router->score, logits[e]);
        mt_row_normalize(shares, E);
    }
    return lse;
}

/* picked[E] = 1 for the k greatest logits, as route_forward without groups and bias, else 0. */
static void mt_route_pick(float *picked, const float *logits, int64_t E, int64_t k) {
    bool finite = mt_row_is_finite(logits, E);
    memcpy(picked, logits, (size_t)E * sizeof *picked);
    for (int64_t i = 0; i < k; i++) picked[finite ? mt_row_greatest(picked, E) : i] = -INFINITY;
    for (int64_t e = 0; e < E; e++) picked[e] = (finite ? picked[e] == -INFINITY : e < k) ? 1.0f : 0.0f;
}

static void mt_cpu_aux_loss_forward(const mt_aux_loss_args *a, mt_stream *stream) {
    enum { TOKENS = 512 }; // rows kept between the two passes
    int64_t S = a->S, T = a->T, E = a->router->num_experts, k = a->router->topk;
    double *totals = (double *)mt_scratch_grow(2 * (2 * S * E + TOKENS) + 2 * TOKENS * E), *lse = totals + 2 * S * E;
    float *shares = (float *)(lse + TOKENS), *picked = shares + TOKENS * E;
    memset(totals, 0, (size_t)(2 * S * E) * sizeof *totals);
    for (int64_t first = 0; first < T; first += TOKENS) {
        int64_t tokens = mt_min(TOKENS, T - first);
        const float *x = a->logits + first * E;
#pragma omp parallel for if (tokens * E > MT_PARALLEL)
        for (int64_t t = 0; t < tokens; t++) {
            lse[t] = 0;
            if (mt_is_padding(a->token_index, first + t)) continue;
            lse[t] = mt_route_shares(shares + t * E, x + t * E, a->router);
            mt_route_pick(picked + t * E, x + t * E, E, k);
        }
#pragma omp parallel for if (tokens * E > MT_PARALLEL)
        for (int64_t column = 0; column < E; column += MT_COLUMNS)
            for (int64_t t = 0; t < tokens; t++) {
                if (mt_is_padding(a->token_index, first + t)) continue;
                double *total = totals + (a->sequence ? a->sequence[first + t] : 0) * E;
                for (int64_t e = column; e < mt_min(column + MT_COLUMNS, E); e++) {
                    total[e] += (double)shares[t * E + e];
                    total[S * E + e] += (double)picked[t * E + e];
                }
            }
        for (int64_t t = 0; t < tokens; t++) a->z_sum[0] += lse[t] * lse[t];
    }
    for (int64_t i = 0; i < 2 * S * E; i++) a->sums[i] = (float)totals[i];
}

static void mt_cpu_aux_loss_value(double *loss, const float *sums, int64_t S, int64_t E, mt_stream *stream) {
    for (int64_t s = 0; s < S; s++) {
        const float *shares = sums + s * E, *counts = shares + S * E;
        double products = 0, total = 0;
        for (int64_t e = 0; e < E; e++) {
            products += (double)shares[e] * (double)counts[e];
            total += (double)counts[e];
        }
        if (total > 0) loss[0] += (double)E * products / total;
    }
}

/* The loss is a sum of scores times E counts / sum(counts); the gradient is as in mt_cpu_route_backward. */
static void mt_cpu_aux_loss_backward(const mt_aux_loss_args *a, mt_stream *stream) {
    int64_t T = a->T, E = a->router->num_experts;
    mt_scratch scratch = mt_scratch_reserve(E);
#pragma omp parallel for if (T * E > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        if (mt_is_padding(a->token_index, t)) continue;
        float *shares = mt_scratch_slice(scratch), *d = a->dlogits + t * E;
        const float *x = a->logits + t * E, *n = a->counts + (a->sequence ? a->sequence[t] : 0) * E;
        float lse = (float)mt_route_shares(shares, x, a->router);
        double total = 0, mean = 0;
        for (int64_t e = 0; e < E; e++) {
            total += (double)n[e];
            mean += (double)n[e] * (double)shares[e];
        }
        double factor = total > 0 ? (double)a->aux_scale * (double)E / total : 0;
        for (int64_t e = 0; e < E; e++) {
            float slope = a->router->score ? mt_score_slope(a->router->score, x[e]) : 1.0f;
            d[e] += (float)(factor * ((double)n[e] - mean)) * shares[e] * slope;
            d[e] += 2.0f * a->z_scale * lse * mt_exp(x[e] - lse);
        }
    }
}

static void mt_cpu_count_experts(float *loads, const int32_t *experts, int64_t n, int64_t E, mt_stream *stream) {
    for (int64_t i = 0; i < n; i++)
        if (experts[i] >= 0) loads[experts[i]]++;
}

/* A choice that competes for the capacity of its expert. */
typedef struct mt_queued {
    int64_t token_index, choice;
    float prob;
    int32_t expert;
} mt_queued;

/* Orders choices by expert, then by priority. No two compare equal, so every sort gives the same order. */
static int mt_queued_compare(const void *left, const void *right) {
    const mt_queued *a = left, *b = right;
    if (a->expert != b->expert) return a->expert < b->expert ? -1 : 1;
    if (a->prob != b->prob) return a->prob > b->prob ? -1 : 1;
    if (a->token_index != b->token_index) return a->token_index < b->token_index ? -1 : 1;
    return a->choice < b->choice ? -1 : a->choice > b->choice;
}

static void mt_cpu_drop_tokens(const mt_drop_args *a, mt_stream *stream) {
    mt_queued *queue = (mt_queued *)mt_scratch_grow(a->T * a->k * (int64_t)(sizeof *queue / sizeof(float)));
    int64_t n = 0, before = 0, rows = a->count * a->k;
    for (int64_t i = 0; i < a->T * a->k; i++) {
        if (a->experts[i] < 0) continue;
        float prob = a->probs ? a->probs[i] : 0.0f;
        queue[n++] = (mt_queued){a->token_index[i / a->k], i, isnan(prob) ? INFINITY : prob, a->experts[i]};
    }
    qsort(queue, (size_t)n, sizeof *queue, mt_queued_compare);
    for (int64_t i = 0; i < rows; i++) a->kept[i] = -1;
    for (int64_t i = 0; i < n; i++) {
        before = i > 0 && queue[i].expert == queue[i - 1].expert ? before + 1 : 0;
        int64_t at = queue[i].choice - a->first * a->k;
        if (before < a->capacity && at >= 0 && at < rows) a->kept[at] = queue[i].expert;
    }
}

/* The destination (see mt_dispatch) of an expert's first copy; the next copy's is num_local further. -1 for an expert
 * out of range. */
static int64_t mt_dispatch_destination(int32_t expert, const mt_dispatch *d) {
    int64_t e = expert - d->first;
    if (expert < 0 || e < 0 || e >= d->count) return -1;
    return e / d->num_local * d->copies * d->num_local + e % d->num_local;
}

static void mt_cpu_dispatch_plan(const mt_dispatch_args *a, mt_stream *stream) {
    const mt_dispatch *dispatch = a->dispatch;
    int64_t k = dispatch->topk, copies = dispatch->copies, destinations = dispatch->count * copies;
    int64_t capacity = dispatch->capacity;
    int32_t *offsets = a->offsets, *next = (int32_t *)mt_scratch_grow(destinations); // next free row
    memset(next, 0, (size_t)destinations * sizeof *next);
    for (int64_t i = 0; i < a->T * k; i++) {
        int64_t first = mt_dispatch_destination(a->experts[i], dispatch);
        for (int64_t copy = 0; first >= 0 && copy < copies; copy++) next[first + copy * dispatch->num_local]++;
    }
    offsets[0] = 0;
    for (int64_t d = 0; d < destinations; d++) {
        offsets[d + 1] = offsets[d] + (capacity > 0 ? (int32_t)capacity : next[d]);
        next[d] = offsets[d];
    }
    for (int64_t m = 0; m < a->M; m++) a->row_choice[m] = a->row_token[m] = -1;
    for (int64_t i = 0; i < a->T * k; i++) {
        int64_t first = mt_dispatch_destination(a->experts[i], dispatch);
        for (int64_t copy = 0; copy < copies; copy++) {
            int64_t d = first + copy * dispatch->num_local;
            bool room = first >= 0 && next[d] < offsets[d + 1]; // rows past the capacity belong to the next expert
            int32_t row = room ? next[d]++ : -1;
            a->position[i * copies + copy] = row;
            if (room) a->row_choice[row] = (int32_t)i, a->row_token[row] = (int32_t)(i / k);
        }
    }
}

static void mt_cpu_exchange_order(int32_t *to_expert, int32_t *from_expert, int32_t *offsets, const int32_t *counts,
                                  int64_t sources, int64_t local, int64_t M, mt_stream *stream) {
    int32_t *begins = (int32_t *)mt_scratch_grow(sources * local), row = 0; // first row of [source, expert]
    for (int64_t i = 0; i < sources * local; i++) {
        begins[i] = row;
        row += counts[i];
    }
    row = 0;
    for (int64_t e = 0; e < local; e++) {
        offsets[e] = row;
        for (int64_t s = 0; s < sources; s++)
            for (int32_t i = 0; i < counts[s * local + e]; i++) {
                int32_t arrived = begins[s * local + e] + i;
                to_expert[row] = arrived;
                from_expert[arrived] = row++;
            }
    }
    offsets[local] = row;
}

static void mt_cpu_combine_rows(const mt_combine_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t n = a->n, C = a->C;
    mt_scratch scratch = mt_scratch_reserve(3 * C);
#pragma omp parallel for if (a->T * n * C > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch), *sum = mt_row_open(slice, a->out, t * C, dtype);
        const float *first = a->base ? mt_row_load(slice + C, a->base, t * C, C, dtype) : NULL;
        for (int64_t c = 0; c < C; c++) sum[c] = first ? first[c] : 0.0f;
        for (int64_t i = 0; i < n; i++) {
            int64_t from = a->position[t * n + i];
            if (from < 0) continue;
            const float *row = mt_row_load(slice + 2 * C, a->in, from * C, C, dtype);
#pragma omp simd
            for (int64_t c = 0; c < C; c++) sum[c] += row[c];
        }
        mt_row_close(a->out, t * C, sum, C, dtype);
    }
}

/* A product for the rows of each expert that has rows. Each thread computes whole experts, or if there are few experts,
 * all threads share every product; the results are the same. */
static void mt_grouped_product(const mt_grouped_args *a, mt_dtype dtype,
                               void (*product)(const mt_grouped_args *a, mt_dtype dtype)) {
    int64_t x_stride = a->x_stride ? a->x_stride : a->K, y_stride = a->y_stride ? a->y_stride : a->N;
    int64_t weight = a->N * a->K;
    mt_matmul_prepare();
#pragma omp parallel for schedule(dynamic) if (a->E >= 2 * omp_get_max_threads())
    for (int64_t e = 0; e < a->E; e++) {
        int64_t begin = a->offsets ? a->offsets[e] : 0;
        mt_grouped_args own = *a;
        own.M = (a->offsets ? a->offsets[e + 1] : a->M) - begin;
        own.w = mt_at(a->w, e * weight, dtype), own.dw = mt_at(a->dw, e * weight, MT_F32);
        own.x = mt_at(a->x, begin * x_stride, dtype), own.dx = mt_at(a->dx, begin * x_stride, dtype);
        own.y = mt_at(a->y, begin * y_stride, dtype), own.dy = mt_at(a->dy, begin * y_stride, dtype);
        if (own.M > 0) product(&own, dtype);
    }
}

static void mt_expert_product_forward(const mt_grouped_args *a, mt_dtype dtype) {
    mt_linear_product_forward(a, NULL, dtype);
}

static void mt_cpu_grouped_linear_forward(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_grouped_product(a, dtype, mt_expert_product_forward);
}

static void mt_cpu_grouped_linear_backward_input(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_grouped_product(a, dtype, mt_linear_product_backward_input);
}

/* An expert without rows has the gradient 0. */
static void mt_cpu_grouped_linear_backward_weight(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t weight = a->N * a->K;
    for (int64_t e = 0; e < (a->accumulate ? 0 : a->E); e++)
        if (a->offsets ? a->offsets[e] == a->offsets[e + 1] : a->M == 0)
            memset(a->dw + e * weight, 0, (size_t)weight * sizeof *a->dw);
    mt_grouped_product(a, dtype, mt_linear_product_backward_weight);
}

static void mt_cpu_grouped_bias_forward(void *y, const void *bias, const int32_t *offsets, int64_t M, int64_t N,
                                        int64_t E, mt_dtype dtype, mt_stream *stream) {
    mt_scratch scratch = mt_scratch_reserve(3 * N);
#pragma omp parallel for if (M * N > MT_PARALLEL)
    for (int64_t m = 0; m < mt_min(M, offsets[E]); m++) {
        float *slice = mt_scratch_slice(scratch), *out = mt_row_open(slice, y, m * N, dtype);
        int64_t e = 0;
        while (offsets[e + 1] <= m) e++;
        const float *in = mt_row_load(slice + N, y, m * N, N, dtype);
        const float *own = mt_row_load(slice + 2 * N, bias, e * N, N, dtype);
#pragma omp simd
        for (int64_t n = 0; n < N; n++) out[n] = in[n] + own[n];
        mt_row_close(y, m * N, out, N, dtype);
    }
}

static void mt_cpu_grouped_bias_backward(float *dbias, const void *dy, const int32_t *offsets, int64_t M, int64_t N,
                                         int64_t E, mt_dtype dtype, mt_stream *stream) {
    for (int64_t e = 0; e < E; e++) {
        int64_t rows = offsets[e + 1] - offsets[e];
        if (rows > 0) mt_cpu_column_sums(dbias + e * N, mt_at(dy, offsets[e] * N, dtype), rows, N, dtype, stream);
    }
}

static void mt_cpu_scale_rows_forward(const mt_scale_rows_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t C = a->C;
    mt_scratch scratch = mt_scratch_reserve(2 * C);
#pragma omp parallel for if (a->M * C > MT_PARALLEL)
    for (int64_t m = 0; m < a->M; m++) {
        float *slice = mt_scratch_slice(scratch), *out = mt_row_open(slice, a->y, m * C, dtype), weight = a->weights[m];
        const float *in = mt_row_load(slice + C, a->x, m * C, C, dtype);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out[c] = weight * in[c];
        mt_row_close(a->y, m * C, out, C, dtype);
    }
}

static void mt_cpu_scale_rows_backward(const mt_scale_rows_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t C = a->C;
    mt_scratch scratch = mt_scratch_reserve(3 * C);
#pragma omp parallel for if (a->M * C > MT_PARALLEL)
    for (int64_t m = 0; m < a->M; m++) {
        float *slice = mt_scratch_slice(scratch), *out = mt_row_open(slice, a->dx, m * C, dtype),
              weight = a->weights[m];
        const float *d = mt_row_load(slice + C, a->dy, m * C, C, dtype);
        const float *in = mt_row_load(slice + 2 * C, a->x, m * C, C, dtype);
        double dweight = 0;
        for (int64_t block = 0; block < C; block += MT_BLOCK) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = block; c < mt_min(block + MT_BLOCK, C); c++) {
                sum += d[c] * in[c];
                out[c] = weight * d[c];
            }
            dweight += (double)sum;
        }
        a->dweights[m] = (float)dweight;
        mt_row_close(a->dx, m * C, out, C, dtype);
    }
}

static void mt_cpu_expert_bias_step(float *bias, const float *loads, const float *scale, int64_t E, float rate,
                                    mt_stream *stream) {
    if (scale[0] < 0) return;
    double sum = 0;
    for (int64_t e = 0; e < E; e++) sum += (double)loads[e];
    for (int64_t e = 0; e < E; e++) {
        double missing = sum - (double)E * (double)loads[e]; // times E: whole numbers stay exact
        bias[e] += missing > 0 ? rate : missing < 0 ? -rate : 0.0f;
    }
}

/* The n-th greatest of x[count], n >= 0, whose order changes (Hoare, "Algorithm 65: find"). */
static float mt_select(float *x, int64_t count, int64_t n) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        float pivot = x[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            float swapped = x[i];
            x[i++] = x[j], x[j--] = swapped;
        }
        if (n <= j)
            high = j;
        else if (n >= i)
            low = i;
        else
            break;
    }
    return x[n];
}

static void mt_cpu_quantile_sums(const mt_quantile_args *a, mt_stream *stream) {
    int64_t T = a->T, E = a->E, tokens = 0;
    float *columns = mt_scratch_grow(E * T + E); // of tokens that count, logits - alpha
    for (int64_t t = 0; t < T; t++) {
        const float *x = a->logits + t * E;
        float *sums = columns + E * T;
        if (mt_is_padding(a->token_index, t) || !mt_row_is_finite(x, E)) continue;
        for (int64_t e = 0; e < E; e++) sums[e] = x[e] + a->bias[e];
        float alpha = mt_select(sums, E, a->k);
        for (int64_t e = 0; e < E; e++) columns[e * T + tokens] = x[e] - alpha;
        tokens++;
    }
    int64_t share = tokens * a->k / E;
    if (share >= tokens) return;
#pragma omp parallel for if (T * E > MT_PARALLEL)
    for (int64_t e = 0; e < E; e++) a->sums[e] += mt_select(columns + e * T, tokens, share);
    a->sums[E] += 1;
}

static void mt_cpu_quantile_bias_step(float *bias, const float *sums, const float *scale, int64_t E, double ema,
                                      mt_stream *stream) {
    if (scale[0] < 0 || sums[E] == 0) return;
    double mean = 0;
    for (int64_t e = 0; e < E; e++) {
        bias[e] = (float)(ema * (double)bias[e] - (1 - ema) * (double)sums[e] / (double)sums[E]);
        mean += (double)bias[e] / (double)E;
    }
    for (int64_t e = 0; e < E; e++) bias[e] = (float)((double)bias[e] - mean);
}

/* ==== §3i optimizer and conversions ============================================================================== */

static void mt_cpu_squared_norm(double *sum, const void *x, int64_t n, mt_dtype dtype, mt_stream *stream) {
    enum { PARTS = 256 }; // for any number of threads
    double parts[PARTS] = {0};
    int64_t length = mt_divide_up(n, (int64_t)PARTS * MT_BLOCK) * MT_BLOCK;
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t block = part * length; block < mt_min((part + 1) * length, n); block += MT_BLOCK) {
            float scratch[MT_BLOCK];
            int64_t count = mt_min(MT_BLOCK, n - block);
            const float *row = mt_row_load(scratch, x, block, count, dtype);
            double squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < count; i++) squares += (double)row[i] * (double)row[i];
            parts[part] += squares;
        }
    double total = 0;
    for (int64_t part = 0; part < PARTS; part++) total += parts[part];
    sum[0] += total;
}

static void mt_cpu_accumulate(void *sum, const float *x, int64_t n, mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float scratch[MT_BLOCK], *row = mt_row_open(scratch, sum, block, dtype);
        int64_t count = mt_min(MT_BLOCK, n - block);
        mt_row_load(scratch, sum, block, count, dtype);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) row[i] += x[block + i];
        mt_row_close(sum, block, row, count, dtype);
    }
}

static void mt_cpu_gradient_scale(float *scale, float *norm, const double *sum_of_squares, const double *replicas,
                                  const double *denominator, double loss_scale, float clip, mt_stream *stream) {
    double tokens = (denominator[0] > 0 ? denominator[0] : 1.0) * loss_scale; // all tokens masked: no gradient
    double size = sqrt(sum_of_squares[0] + 0 * replicas[0]) / tokens,
           factor = clip > 0 ? (double)clip / (size + 1e-6) : 1.0;
    norm[0] = (float)size;
    scale[0] = (float)((factor < 1.0 ? factor : 1.0) / tokens);
}

static void mt_cpu_step_guard(double *guard, float *scale, const double *loss_sum, const double *tokens,
                              const float *norm, const mt_guard_rules *rules, mt_stream *stream) {
    double loss = loss_sum[0] / ((tokens[0] > 0 ? tokens[0] : 1.0) * (double)rules->copies);
    double average = guard[MT_GUARD_AVERAGE], steps = guard[MT_GUARD_STEPS], window = (double)rules->window;
    mt_guard_check check = MT_STEP_PASSED;
    if (tokens[0] == 0)
        check = MT_NO_TOKENS;
    else if (rules->finite && !isfinite(loss))
        check = MT_LOSS_NOT_FINITE;
    else if (rules->finite && !isfinite(norm[0]))
        check = MT_NORM_NOT_FINITE;
    else if (rules->spike_factor > 0 && steps >= window && loss > rules->spike_factor * average)
        check = MT_LOSS_SPIKES;
    guard[MT_GUARD_CHECK] = check;
    if (check != MT_STEP_PASSED) {
        scale[0] = -1;
        return;
    }
    guard[MT_GUARD_UPDATES]++;
    guard[MT_GUARD_CORRECTIONS] = 1 - pow(rules->beta1, guard[MT_GUARD_UPDATES]);
    guard[MT_GUARD_CORRECTIONS + 1] = 1 - pow(rules->beta2, guard[MT_GUARD_UPDATES]);
    if (isfinite(loss)) {
        guard[MT_GUARD_AVERAGE] = average + (loss - average) / (steps + 1 < window ? steps + 1 : window);
        guard[MT_GUARD_STEPS] = steps + 1;
    }
}

/* a * b + c, rounded once where the processor can: the same bits as on a GPU, whatever the compiler would fuse. */
static inline float mt_fma(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

float mt_state_scale(float amax, mt_dtype dtype) {
    float scale = amax / (dtype == MT_F16_SCALED ? 32752.0f : 448.0f);
    uint32_t bits;
    if (!isfinite(scale)) return NAN;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x7ff) & ~0x7ffu; // rounded up
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* row[n] = elements of a state from `first` on. amax: of a type with a scale. */
static void mt_state_load(float *row, const void *x, int64_t first, int64_t n, mt_dtype dtype, float amax) {
    float scale = mt_state_scale(amax, dtype);
    if (dtype == MT_F32) memcpy(row, (const float *)x + first, (size_t)n * sizeof *row);
    if (mt_dtype_is_half(dtype)) mt_row_load(row, x, first, n, dtype);
    for (int64_t i = 0; i < n && dtype == MT_F16_SCALED; i++)
        row[i] = mt_f16_to_f32(((const uint16_t *)x)[first + i]) * scale;
    for (int64_t i = 0; i < n && dtype == MT_F8_E4M3; i++)
        row[i] = mt_f8_to_f32(((const uint8_t *)x)[first + i], dtype) * scale;
}

static void mt_state_store(void *x, int64_t first, const float *row, int64_t n, mt_dtype dtype, float amax) {
    float scale = mt_state_scale(amax, dtype);
    if (dtype == MT_F32 || mt_dtype_is_half(dtype)) mt_row_store(x, first, row, n, dtype);
    for (int64_t i = 0; i < n && mt_state_has_scale(dtype); i++) {
        float code = scale == 0 ? 0 : row[i] / scale;
        if (dtype == MT_F16_SCALED) ((uint16_t *)x)[first + i] = mt_f32_to_f16(code);
        if (dtype == MT_F8_E4M3) ((uint8_t *)x)[first + i] = mt_f8_encode(code, true);
    }
}

/* The arithmetic of an optimizer's step on n elements: the gradient times `grad_scale`, weights, and the optimizer's
 * states. The sums are those of cuda/optimizer.cu, so that a step has the same bits on both. */
typedef void mt_update_rule(const mt_update *u, float grad_scale, int64_t n, const float *grad, float *w, float *m,
                            float *v);

static void mt_adamw_elements(const mt_update *u, float grad_scale, int64_t n, const float *grad, float *w, float *m,
                              float *v) {
    float beta1 = u->beta1, beta2 = u->beta2, eps = u->eps, root = 1.0f / sqrtf(u->bias_correction2);
    float step = u->lr / u->bias_correction1, shrink = mt_fma(-u->lr, u->weight_decay, 1.0f);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * grad_scale;
        m[i] = mt_fma(beta1, m[i], (1.0f - beta1) * g);
        v[i] = mt_fma(beta2, v[i], (1.0f - beta2) * g * g);
        w[i] = mt_fma(w[i], shrink, -(step * m[i] / mt_fma(sqrtf(v[i]), root, eps)));
    }
}

static void mt_sgd_elements(const mt_update *u, float grad_scale, int64_t n, const float *grad, float *w, float *m,
                            float *v) {
    float momentum = u->beta1, decay = u->weight_decay, lr = u->lr;
    (void)v;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float g = mt_fma(decay, w[i], grad[i] * grad_scale);
        m[i] = mt_fma(momentum, m[i], g);
        w[i] = mt_fma(-lr, m[i], w[i]);
    }
}

static void mt_lion_elements(const mt_update *u, float grad_scale, int64_t n, const float *grad, float *w, float *m,
                             float *v) {
    float beta1 = u->beta1, beta2 = u->beta2, lr = u->lr, shrink = mt_fma(-u->lr, u->weight_decay, 1.0f);
    (void)v;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * grad_scale, c = mt_fma(beta1, m[i], (1.0f - beta1) * g);
        float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c; // 0 and NaN stay
        w[i] = mt_fma(w[i], shrink, -(lr * sign));
        m[i] = mt_fma(beta2, m[i], (1.0f - beta2) * g);
    }
}

/* A step by a rule; if it does not store, only the largest absolute values that states with scales would have. */
static void mt_update_run(const mt_update_args *a, const mt_update *update, mt_update_rule *rule, bool stores) {
    mt_update u = *update;
    if (a->corrections) u.bias_correction1 = (float)a->corrections[0], u.bias_correction2 = (float)a->corrections[1];
    void *const states[3] = {a->master ? a->master : a->param, a->m, a->v};
    const mt_dtype dtypes[3] = {a->master ? a->master_dtype : a->dtype, a->m_dtype, a->v_dtype};
    int count_states = a->v ? 3 : 2;
#pragma omp parallel for if (a->n > MT_PARALLEL)
    for (int64_t block = 0; block < a->n; block += MT_BLOCK) {
        float scratch[4][MT_BLOCK], *rows[3] = {NULL}; // fp32 is updated in place
        int64_t count = mt_min(MT_BLOCK, a->n - block);
        const float *grad = mt_row_load(scratch[3], a->grad, block, count, a->grad_dtype);
        for (int k = 0; k < count_states; k++) {
            rows[k] = stores && dtypes[k] == MT_F32 ? (float *)states[k] + block : scratch[k];
            if (rows[k] == scratch[k])
                mt_state_load(rows[k], states[k], block, count, dtypes[k], a->amax ? a->amax[k] : 0);
        }
        rule(&u, a->scale[0], count, grad, rows[0], rows[1], rows[2]);
        for (int k = 0; k < count_states; k++)
            if (stores && rows[k] == scratch[k]) {
                mt_state_store(states[k], block, rows[k], count, dtypes[k], a->amax ? a->new_amax[k] : 0);
            } else if (!stores && mt_state_has_scale(dtypes[k])) {
#pragma omp critical(new_amax)
                a->new_amax[k] = mt_amax_merge(a->new_amax[k], mt_amax(rows[k], count));
            }
        if (stores && a->master) mt_state_store(a->param, block, rows[0], count, a->dtype, 0);
    }
}

static void mt_cpu_adamw_amax(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    for (int k = 0; k < 3 && a->scale[0] < 0; k++) a->new_amax[k] = mt_amax_merge(a->new_amax[k], a->amax[k]);
    if (a->scale[0] >= 0) mt_update_run(a, update, mt_adamw_elements, false);
}

static void mt_cpu_adamw_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    if (a->scale[0] >= 0) mt_update_run(a, update, mt_adamw_elements, true);
}

static void mt_cpu_sgd_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    if (a->scale[0] >= 0) mt_update_run(a, update, mt_sgd_elements, true);
}

static void mt_cpu_lion_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    if (a->scale[0] >= 0) mt_update_run(a, update, mt_lion_elements, true);
}

/* Values u of a step on matrices: the momentum, or Nesterov's rule. */
static inline float mt_muon_value(const mt_update *u, bool nesterov, float momentum, float grad) {
    return nesterov ? mt_fma(u->beta1, momentum, (1.0f - u->beta1) * grad) : momentum;
}

static void mt_cpu_muon_momentum(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    enum { PARTS = 64 }; // for any number of threads
    const mt_matrices *x = a->matrices;
    int64_t n = x->rows * x->cols, length = mt_divide_up(n, (int64_t)PARTS * MT_BLOCK) * MT_BLOCK;
    const mt_update u = *update;
    for (int64_t i = 0; i < x->count && a->scale[0] >= 0; i++) {
        double parts[PARTS] = {0};
        float *m = (float *)a->m + i * x->stride;
#pragma omp parallel for if (n > MT_PARALLEL)
        for (int64_t part = 0; part < PARTS; part++)
            for (int64_t block = part * length; block < mt_min((part + 1) * length, n); block += MT_BLOCK) {
                float scratch[MT_BLOCK];
                int64_t count = mt_min(MT_BLOCK, n - block);
                const float *grad = mt_row_load(scratch, a->grad, i * x->stride + block, count, a->grad_dtype);
                for (int64_t k = 0; k < count; k++) {
                    float g = grad[k] * a->scale[0];
                    m[block + k] = mt_fma(u.beta1, m[block + k], (1.0f - u.beta1) * g);
                    double value = (double)mt_muon_value(&u, x->nesterov, m[block + k], g);
                    parts[part] += value * value;
                }
            }
        for (int64_t part = 0; part < PARTS && x->counted; part++) x->sums[i] += parts[part];
    }
}

static void mt_cpu_muon_normalize(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    const mt_matrices *x = a->matrices;
    const mt_update u = *update;
#pragma omp parallel for if (x->count * x->rows * x->cols > MT_PARALLEL)
    for (int64_t row = 0; row < x->count * x->rows; row++) {
        int64_t i = row / x->rows, r = row % x->rows, from = i * x->stride + r * x->cols;
        int64_t to = i * x->x_stride + r * x->row_stride;
        float norm = (float)sqrt(x->sums[i]), least = 1e-7f, divisor = norm < least ? least : norm;
        for (int64_t block = 0; block < x->cols; block += MT_BLOCK) {
            float scratch[MT_BLOCK], values[MT_BLOCK];
            int64_t count = mt_min(MT_BLOCK, x->cols - block);
            const float *m = (const float *)a->m + from + block;
            const float *grad = x->nesterov ? mt_row_load(scratch, a->grad, from + block, count, a->grad_dtype) : m;
            for (int64_t k = 0; k < count; k++)
                values[k] = mt_muon_value(&u, x->nesterov, m[k], grad[k] * a->scale[0]) / divisor;
            mt_row_store(x->x, to + block, values, count, x->dtype);
        }
    }
}

static void mt_cpu_muon_step(const mt_update_args *a, const mt_update *update, mt_stream *stream) {
    const mt_matrices *x = a->matrices;
    float shrink = mt_fma(-update->lr, update->weight_decay, 1.0f), rate = update->lr * x->factor;
    float *weights = a->master ? a->master : a->param;
#pragma omp parallel for if (x->count * x->rows * x->cols > MT_PARALLEL)
    for (int64_t row = 0; row < (a->scale[0] < 0 ? 0 : x->count * x->rows); row++) {
        int64_t i = row / x->rows, r = row % x->rows, to = i * x->stride + r * x->cols;
        int64_t from = i * x->x_stride + r * x->row_stride;
        for (int64_t block = 0; block < x->cols; block += MT_BLOCK) {
            float scratch[MT_BLOCK], *w = weights + to + block;
            int64_t count = mt_min(MT_BLOCK, x->cols - block);
            const float *direction = mt_row_load(scratch, x->x, from + block, count, x->dtype);
            for (int64_t k = 0; k < count; k++) w[k] = mt_fma(w[k], shrink, -(rate * direction[k]));
            if (a->master) mt_row_store(a->param, to + block, w, count, a->dtype);
        }
    }
}

/* Normal numbers first ... first + n - 1 of a key: number i is number i % 4 of counter i / 4. */
static void mt_cpu_random_normal(void *param, int64_t n, uint64_t key, int64_t first, float mean, float std,
                                 mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float scratch[MT_BLOCK], normal[4];
        int64_t count = mt_min(MT_BLOCK, n - block);
        float *out = mt_row_open(scratch, param, block, dtype);
        for (int64_t i = 0; i < count; i++) {
            int64_t index = first + block + i;
            if (i == 0 || index % 4 == 0) {
                uint32_t words[4];
                mt_philox(words, key, (uint64_t)(index / 4), 0);
                mt_box_muller(normal, words[0], words[1]);
                mt_box_muller(normal + 2, words[2], words[3]);
            }
            out[i] = mean + std * normal[index % 4];
        }
        mt_row_close(param, block, out, count, dtype);
    }
}

static void mt_cpu_convert(void *to, mt_dtype to_dtype, const void *from, mt_dtype from_dtype, int64_t n,
                           mt_stream *stream) {
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        const float *row = mt_row_load(scratch, from, block, count, from_dtype);
        mt_row_store(to, block, row, count, to_dtype);
    }
}

#define MT_CPU_ENTRY(name, ...) .name = mt_cpu_##name,
const mt_ops mt_cpu_ops = {
    .name = "cpu", .limits = {.one_attention = true}, MT_OPERATIONS(MT_CPU_ENTRY) MT_PLAIN_OPERATIONS(MT_CPU_ENTRY)};

#ifndef MT_HAVE_CUDA
const mt_ops *mt_cuda_open(int device, mt_error *error) {
    mt_error_set(error, "this build has no CUDA; make compiles it for the GPU that it finds, or for CUDA_ARCH=90a; "
                        "or take --device cpu");
    return NULL;
}

int mt_cuda_group_open(mt_group *group, mt_error *error) {
    return mt_error_set(error, "group %s: this build has no CUDA", group->name);
}

void mt_cuda_group_close(mt_group *group) {
    group->nccl = NULL;
}

void mt_cuda_groups_end(void) {
}
#endif

/* ==== §4 the rank grid and its groups ============================================================================ */
/* Ranks and their groups. One process is one rank. Invariants: a group of one rank needs no library and no call; all
 * ranks of a group list its members in the same order, by world rank; the members of a group are a pure function of the
 * grid's sizes. */

bool mt_launched_by_mpi(void) {
    static const char *const signs[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK", "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (getenv(signs[i])) return true;
    return false;
}

/* This rank's index among the ranks of its host, and their number. Unless NULL, `needed` becomes the sum of the host's
 * ranks and `available` their minimum. All ranks of `world` call it alike. */
static void mt_host_ranks(const mt_group *world, int *rank, int *size, int64_t *needed, int64_t *available) {
    *rank = 0, *size = 1;
#ifdef MT_HAVE_MPI
    if (!world->comm) return;
    MPI_Comm host;
    MPI_Comm_split_type(*(MPI_Comm *)world->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, rank);
    MPI_Comm_size(host, size);
    if (needed) MPI_Allreduce(MPI_IN_PLACE, needed, 1, MPI_INT64_T, MPI_SUM, host);
    if (available) MPI_Allreduce(MPI_IN_PLACE, available, 1, MPI_INT64_T, MPI_MIN, host);
    MPI_Comm_free(&host);
#endif
}

void mt_grid_hosts(const mt_group *world, int *hosts) {
    hosts[0] = 0; // of a world of one
#ifdef MT_HAVE_MPI
    if (!world->comm) return;
    MPI_Comm host;
    int lowest = world->rank;
    MPI_Comm_split_type(*(MPI_Comm *)world->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Allreduce(MPI_IN_PLACE, &lowest, 1, MPI_INT, MPI_MIN, host);
    MPI_Comm_free(&host);
    MPI_Allgather(&lowest, 1, MPI_INT, hosts, 1, MPI_INT, *(MPI_Comm *)world->comm);
#endif
}

#ifdef MT_HAVE_MPI
/* Divides the cores of a host among its ranks; by default, each rank would start a thread per core. */
static void mt_share_threads(const mt_group *world) {
#ifdef MT_HAVE_OPENMP
    if (getenv("OMP_NUM_THREADS")) return;
    int local_rank, local_ranks;
    mt_host_ranks(world, &local_rank, &local_ranks, NULL, NULL);
    int cores = omp_get_num_procs(), all_cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (cores == all_cores) cores /= local_ranks; // else mpirun has bound this rank to a subset of the cores
    omp_set_num_threads(cores > 1 ? cores : 1);
#endif
}
#endif

/* Kind, field of mt_grid, name, 1 for groups of experts, and 1 for each dimension in which members differ: tp, cp, dp,
 * pp, or for groups of experts etp, ep, edp, pp. */
#define MT_GROUPS(X)                                                                                                   \
    X(WORLD, world, "world", 0, 1, 1, 1, 1)                                                                            \
    X(TENSOR, tensor, "tensor", 0, 1, 0, 0, 0)                                                                         \
    X(CONTEXT, context, "context", 0, 0, 1, 0, 0)                                                                      \
    X(DATA, data, "data", 0, 0, 0, 1, 0)                                                                               \
    X(DATA_CONTEXT, data_context, "data-context", 0, 0, 1, 1, 0)                                                       \
    X(PIPELINE, pipeline, "pipeline", 0, 0, 0, 0, 1)                                                                   \
    X(EMBEDDING, embedding, "embedding", 0, 0, 0, 0, 1)                                                                \
    X(TENSOR_CONTEXT, tensor_context, "tensor-context", 0, 1, 1, 0, 0)                                                 \
    X(STAGE, stage, "stage", 0, 1, 1, 1, 0)                                                                            \
    X(EXPERT, expert, "expert", 1, 0, 1, 0, 0)                                                                         \
    X(EXPERT_TENSOR, expert_tensor, "expert-tensor", 1, 1, 0, 0, 0)                                                    \
    X(EXPERT_DATA, expert_data, "expert-data", 1, 0, 0, 1, 0)                                                          \
    X(EXPERT_EXCHANGE, expert_exchange, "expert-exchange", 1, 1, 1, 0, 0)                                              \
    X(KV_REPLICAS, kv_replicas, "kv-replicas", 0, 1, 0, 0, 0)                                                          \
    X(KEY_REPLICAS, key_replicas, "key-replicas", 0, 1, 0, 0, 0)                                                       \
    X(CONTEXT_A2A, context_a2a, "context-a2a", 0, 0, 1, 0, 0)                                                          \
    X(CONTEXT_RING, context_ring, "context-ring", 0, 0, 1, 0, 0)                                                       \
    X(CONTEXT_2, context_blocks[0], "context-2", 0, 0, 1, 0, 0)                                                        \
    X(CONTEXT_4, context_blocks[1], "context-4", 0, 0, 1, 0, 0)                                                        \
    X(CONTEXT_8, context_blocks[2], "context-8", 0, 0, 1, 0, 0)                                                        \
    X(CONTEXT_16, context_blocks[3], "context-16", 0, 0, 1, 0, 0)                                                      \
    X(CONTEXT_32, context_blocks[4], "context-32", 0, 0, 1, 0, 0)                                                      \
    X(CONTEXT_64, context_blocks[5], "context-64", 0, 0, 1, 0, 0)

#define MT_GROUP_ALONE(kind, field, its_name, ...) .field = {.name = its_name, .size = 1},
#define MT_GROUP_ROW(kind, field, name, experts, ...)                                                                  \
    [MT_GROUP_##kind] = {offsetof(mt_grid, field), experts, {__VA_ARGS__}},

const mt_watch_hooks *mt_watch;

const mt_grid mt_grid_of_one = {MT_GROUPS(MT_GROUP_ALONE)};

static const struct {
    size_t offset;
    bool of_experts, is_free[4];
} mt_group_kinds[MT_NUM_GROUP_KINDS] = {MT_GROUPS(MT_GROUP_ROW)};

mt_group *mt_grid_group(mt_grid *grid, mt_group_kind kind) {
    return (mt_group *)((char *)grid + mt_group_kinds[kind].offset);
}

mt_grid_shape mt_grid_shape_of(const mt_options *options, int64_t world_size) {
    bool has_delta = mt_has_mixer(options, MT_MIXER_GATED_DELTA_NET) || mt_has_mixer(options, MT_MIXER_KDA);
    mt_grid_shape shape = {.tensor = options->tensor_model_parallel_size,
                           .context = options->context_parallel_size,
                           .pipeline = options->pipeline_model_parallel_size,
                           .expert = 1,
                           .expert_tensor = 1,
                           .num_query_groups = options->num_query_groups,
                           .context_a2a = options->context_a2a_size,
                           .context_blocks = options->dynamic_context_parallel,
                           .linear_key_heads = has_delta ? options->linear_num_key_heads : 0,
                           .pipeline_before_data = options->use_tp_pp_dp_mapping};
    if (options->num_experts > 0)
        shape.expert = options->expert_model_parallel_size, shape.expert_tensor = options->expert_tensor_parallel_size;
    shape.data = world_size / (shape.tensor * shape.context * shape.pipeline);
    shape.expert_data = world_size / (shape.expert_tensor * shape.expert * shape.pipeline);
    MT_CHECK(shape.tensor * shape.context * shape.data * shape.pipeline == world_size);
    MT_CHECK(shape.expert_tensor * shape.expert * shape.expert_data * shape.pipeline == world_size);
    return shape;
}

/* The ranks that differ from `rank` in free dimensions only. The first dimension varies fastest; the last, or with
 * `last_before_third` the third, slowest. */
static int mt_grid_free_dimensions(int *members, const int64_t sizes[4], bool last_before_third, const bool is_free[4],
                                   int rank) {
    int64_t stride[4] = {1, sizes[0], sizes[0] * sizes[1], sizes[0] * sizes[1]};
    stride[last_before_third ? 2 : 3] *= sizes[last_before_third ? 3 : 2];
    int64_t world = sizes[0] * sizes[1] * sizes[2] * sizes[3];
    int count = 0;
    for (int64_t other = 0; other < world; other++) {
        bool is_member = true;
        for (int d = 0; d < 4 && is_member; d++)
            is_member = is_free[d] || other / stride[d] % sizes[d] == rank / stride[d] % sizes[d];
        if (is_member) members[count++] = (int)other;
    }
    return count;
}

/* Keeps the first and the last member if `rank` is one of them, else `rank` alone. */
static int mt_grid_keep_ends(int *members, int count, int rank) {
    int last = members[count - 1];
    if (count == 1 || (rank != members[0] && rank != last)) {
        members[0] = rank;
        return 1;
    }
    members[1] = last;
    return 2;
}

/* Splits a group into runs of `neighbours` ranks. Keeps the run of `rank`, or of every run the rank with its index. */
static int mt_grid_keep_level(int *members, int count, int neighbours, bool within_run, int rank) {
    int index = 0, kept = within_run ? neighbours : count / neighbours;
    while (members[index] != rank) index++;
    int first = within_run ? index / neighbours * neighbours : index % neighbours, step = within_run ? 1 : neighbours;
    for (int i = 0; i < kept; i++) members[i] = members[first + i * step];
    return kept;
}

int mt_grid_members(int *members, const mt_grid_shape *s, mt_group_kind kind, int rank) {
    const int64_t dense[4] = {s->tensor, s->context, s->data, s->pipeline};
    const int64_t expert[4] = {s->expert_tensor, s->expert, s->expert_data, s->pipeline};
    const int64_t *sizes = mt_group_kinds[kind].of_experts ? expert : dense;
    int count = mt_grid_free_dimensions(members, sizes, s->pipeline_before_data, mt_group_kinds[kind].is_free, rank);
    if (kind == MT_GROUP_EMBEDDING) return mt_grid_keep_ends(members, count, rank);
    if (kind == MT_GROUP_CONTEXT_A2A || kind == MT_GROUP_CONTEXT_RING)
        return mt_grid_keep_level(members, count, (int)mt_max(1, s->context_a2a), kind == MT_GROUP_CONTEXT_A2A, rank);
    if (kind >= MT_GROUP_CONTEXT_2) { // blocks of one rank and of the whole group need no group of their own
        int block = 2 << (kind - MT_GROUP_CONTEXT_2);
        return mt_grid_keep_level(members, count, s->context_blocks && block < count ? block : 1, true, rank);
    }
    if (kind != MT_GROUP_KV_REPLICAS && kind != MT_GROUP_KEY_REPLICAS) return count;
    int64_t heads = kind == MT_GROUP_KV_REPLICAS ? s->num_query_groups : s->linear_key_heads;
    int64_t copies = heads > 0 && heads < count ? count / heads : 1; // ranks that hold the same head are adjacent
    return mt_grid_keep_level(members, count, (int)copies, true, rank);
}

void mt_grid_start(mt_grid *grid, int *argc, char ***argv) {
    *grid = mt_grid_of_one;
    if (!mt_launched_by_mpi()) return;
#ifdef MT_HAVE_MPI
    MPI_Comm *world = mt_malloc(sizeof *world);
    // Ranks that poll for messages would take the cores from ranks that compute. Open MPI reads this in MPI_Init.
    const char *local_ranks = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (local_ranks && atoi(local_ranks) >= sysconf(_SC_NPROCESSORS_ONLN))
        setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    mt_watch_begin("MPI_Init", NULL);
    MPI_Init(argc, argv);
    mt_watch_end();
    *world = MPI_COMM_WORLD;
    grid->world.comm = world;
    MPI_Comm_size(*world, &grid->world.size);
    MPI_Comm_rank(*world, &grid->world.rank);
    grid->world.members = mt_malloc(grid->world.size * (int64_t)sizeof(int));
    for (int i = 0; i < grid->world.size; i++) grid->world.members[i] = i;
    mt_share_threads(&grid->world);
    // For ops->first_use_waits: CUDA then loads the kernels of this program and of NCCL when it starts. Those of
    // cuBLASLt still load at their first use.
    if (grid->world.size > 1) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
#else
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    if (!size) size = getenv("PMI_SIZE");
    if (size && atoi(size) > 1)
        mt_die("this build has no MPI, so mpirun cannot give it %s ranks; install MPI (make deps), then make", size);
#endif
}

mt_grid mt_grid_new(const mt_grid *grid) {
    mt_grid further = mt_grid_of_one;
    further.world = grid->world, further.world.nccl = NULL; // mt_backend_open opens one for each grid
    return further;
}

/* Makes one group. All ranks of the world call it: each is in one group of every kind. */
static void mt_group_make(mt_group *group, const mt_group *world, const int *members, int count) {
    group->size = count, group->rank = 0, group->members = mt_malloc(count * (int64_t)sizeof(int));
    memcpy(group->members, members, (size_t)count * sizeof(int));
    while (members[group->rank] != world->rank) group->rank++;
#ifdef MT_HAVE_MPI
    if (!world->comm) return;
    MPI_Comm comm;
    MPI_Comm_split(*(MPI_Comm *)world->comm, count > 1 ? members[0] : MPI_UNDEFINED, world->rank, &comm);
    if (count == 1) return;
    group->comm = mt_malloc(sizeof comm);
    *(MPI_Comm *)group->comm = comm;
#endif
}

int mt_grid_build(mt_grid *grid, const mt_options *options, mt_error *error) {
    int64_t model_ranks =
        options->tensor_model_parallel_size * options->context_parallel_size * options->pipeline_model_parallel_size;
    if (model_ranks < 1 || grid->world.size % model_ranks != 0)
        return mt_error_set(error, "%d ranks are not a multiple of the %lld ranks of one model", grid->world.size,
                            (long long)model_ranks);
    mt_grid_shape shape = mt_grid_shape_of(options, grid->world.size);
    int *members = mt_malloc(grid->world.size * (int64_t)sizeof(int));
    for (int kind = MT_GROUP_WORLD + 1; kind < MT_NUM_GROUP_KINDS; kind++) {
        int count = mt_grid_members(members, &shape, kind, grid->world.rank);
        mt_group_make(mt_grid_group(grid, kind), &grid->world, members, count);
    }
    free(members);
    if (mt_watch && grid->world.size > 1) mt_watch->start(options, grid->world.rank);
    if (mt_watch && grid->world.size == 1) mt_watch->stop(false);
    return 0;
}

/* The first group with the same members, or NULL. Such groups share a communicator. */
static mt_group *mt_grid_same_members(mt_grid *grid, mt_group_kind kind) {
    const mt_group *group = mt_grid_group(grid, kind);
    for (int k = 0; k < (int)kind; k++) {
        mt_group *other = mt_grid_group(grid, k);
        if (other->size != group->size) continue;
        if (memcmp(other->members, group->members, (size_t)group->size * sizeof(int)) == 0) return other;
    }
    return NULL;
}

const mt_ops *mt_backend_open(mt_device device, mt_grid *grid, mt_error *error) {
    if (device == MT_DEVICE_CPU) return &mt_cpu_ops;
    int local_rank, local_ranks;
    mt_host_ranks(&grid->world, &local_rank, &local_ranks, NULL, NULL);
    const mt_ops *ops = mt_cuda_open(local_rank, error);
#ifndef MT_HAVE_NCCL
    if (ops && grid->world.size > 1) {
        mt_error_set(error, "several GPUs need NCCL, which this build does not have; install it and run make again, "
                            "start one rank, or take --device cpu");
        ops = NULL;
    }
#endif
    if (mt_agree(&grid->world, ops == NULL, error) != 0) // the CPU backend if any rank has no GPU
        return device == MT_DEVICE_AUTO ? &mt_cpu_ops : NULL;
    for (int kind = 0; ops && kind < MT_NUM_GROUP_KINDS; kind++) {
        mt_group *group = mt_grid_group(grid, kind);
        if (group->size == 1 || group->nccl) continue;
        const mt_group *same = mt_grid_same_members(grid, kind);
        if (same)
            group->nccl = same->nccl;
        else if (mt_cuda_group_open(group, error) != 0)
            return NULL;
    }
    return ops;
}

static void mt_grid_close_groups(mt_grid *grid) {
    for (int kind = MT_NUM_GROUP_KINDS - 1; kind >= 0; kind--) {
        mt_group *group = mt_grid_group(grid, kind);
        if (group->nccl && !mt_grid_same_members(grid, kind)) mt_cuda_group_close(group);
        group->nccl = NULL;
    }
}

void mt_grid_clear(mt_grid *grid) {
    mt_grid_close_groups(grid);
    if (mt_watch) mt_watch->stop(grid->world.size > 1 && grid->tensor.members);
    for (int kind = MT_NUM_GROUP_KINDS - 1; kind > MT_GROUP_WORLD; kind--) {
        mt_group *group = mt_grid_group(grid, kind);
#ifdef MT_HAVE_MPI
        if (group->comm) MPI_Comm_free(group->comm);
#endif
        free(group->comm);
        free(group->members);
    }
    *grid = mt_grid_new(grid);
}

void mt_grid_stop(mt_grid *grid) {
    mt_grid_close_groups(grid);
    mt_cuda_groups_end(); // may hang, so before the watchdog stops
    mt_grid_clear(grid);
#ifdef MT_HAVE_MPI
    if (grid->world.comm) MPI_Finalize();
#endif
    free(grid->world.comm);
    free(grid->world.members);
    *grid = mt_grid_of_one;
}

/* ==== §5 collectives ============================================================================================= */
/* Collective operations and messages on the CPU, with MPI; cuda/comm.cu has those on GPUs, with NCCL. Invariants: all
 * ranks of a group make the same calls in the same order; sums are in rank order, so they have the same bits on every
 * rank and in every run; a group of one returns at once. */

/* Message tags of collectives, mt_send, and channels. */
enum { MT_TAG_COLLECTIVE, MT_TAG_HOST, MT_TAG_CHANNEL, MT_TAGS = 32768 };

/* ---- messages: mt_send, collectives, channels and mailboxes start and wait for their messages here; MPI's own
 * collectives do a barrier, a broadcast and the all-gather of few elements. Without MPI no group has another rank. */

#ifdef MT_HAVE_MPI
typedef MPI_Request mt_message; // under way

static void mt_mpi_check(int status, const char *call, const mt_group *group) {
    if (status != MPI_SUCCESS) mt_die("%s failed in group %s on its rank %d", call, group->name, group->rank);
}

/* MPI counts are int; a derived type represents any number of bytes as `count` elements of `type`. mt_mpi_bytes_free
 * may be called while a message uses the type. */
typedef struct mt_mpi_bytes {
    MPI_Datatype type;
    int count;
} mt_mpi_bytes;

static mt_mpi_bytes mt_mpi_bytes_of(int64_t bytes) {
    const int64_t piece = 1 << 30;
    if (bytes <= piece) return (mt_mpi_bytes){MPI_BYTE, (int)bytes};
    MPI_Datatype whole, types[2], both;
    int lengths[2] = {(int)(bytes / piece), (int)(bytes % piece)};
    MPI_Aint offsets[2] = {0, (MPI_Aint)(bytes / piece * piece)};
    MPI_Type_contiguous((int)piece, MPI_BYTE, &whole);
    types[0] = whole, types[1] = MPI_BYTE;
    MPI_Type_create_struct(2, lengths, offsets, types, &both);
    MPI_Type_commit(&both);
    MPI_Type_free(&whole);
    return (mt_mpi_bytes){both, 1};
}

static void mt_mpi_bytes_free(mt_mpi_bytes *bytes) {
    if (bytes->type != MPI_BYTE) MPI_Type_free(&bytes->type);
}

static MPI_Comm mt_mpi_comm(const mt_group *group) {
    return *(MPI_Comm *)group->comm;
}

#else
typedef int mt_message;
#endif

/* Starts to send `out` to rank `peer`, or to receive `in` from it (the other is NULL). The buffer is in use until
 * mt_message_wait. */
static void mt_message_start(mt_message *message, const mt_group *group, int tag, const void *out, void *in,
                             int64_t bytes, int peer) {
#ifdef MT_HAVE_MPI
    mt_mpi_bytes length = mt_mpi_bytes_of(bytes);
    MPI_Comm comm = mt_mpi_comm(group);
    if (in)
        mt_mpi_check(MPI_Irecv(in, length.count, length.type, peer, tag, comm, message), "MPI_Irecv", group);
    else
        mt_mpi_check(MPI_Isend(out, length.count, length.type, peer, tag, comm, message), "MPI_Isend", group);
    mt_mpi_bytes_free(&length);
#endif
}

/* May be called again. */
static void mt_message_wait(mt_message *message, const mt_group *group) {
#ifdef MT_HAVE_MPI
    mt_mpi_check(MPI_Wait(message, MPI_STATUS_IGNORE), "MPI_Wait", group);
#endif
}

/* Sends to one rank while it receives from another. 0 bytes: no message. */
static void mt_message_exchange(const mt_group *group, int tag, const void *out, int64_t out_bytes, int to, void *in,
                                int64_t in_bytes, int from) {
    mt_message sent, received;
    if (in_bytes > 0) mt_message_start(&received, group, tag, NULL, in, in_bytes, from);
    if (out_bytes > 0) mt_message_start(&sent, group, tag, out, NULL, out_bytes, to);
    if (in_bytes > 0) mt_message_wait(&received, group);
    if (out_bytes > 0) mt_message_wait(&sent, group);
}

void mt_send(const mt_group *group, const void *buffer, int64_t bytes, int to) {
    MT_CHECK(to != group->rank && to >= 0 && to < group->size);
    mt_watch_begin("send", group->name);
    mt_message_exchange(group, MT_TAG_HOST, buffer, bytes, to, NULL, 0, to);
    mt_watch_end();
}

void mt_receive(const mt_group *group, void *buffer, int64_t bytes, int from) {
    MT_CHECK(from != group->rank && from >= 0 && from < group->size);
    mt_watch_begin("receive", group->name);
    mt_message_exchange(group, MT_TAG_HOST, NULL, 0, from, buffer, bytes, from);
    mt_watch_end();
}

void mt_barrier(const mt_group *group) {
    if (group->size == 1) return;
#ifdef MT_HAVE_MPI
    mt_watch_begin("barrier", group->name);
    mt_mpi_check(MPI_Barrier(mt_mpi_comm(group)), "MPI_Barrier", group);
    mt_watch_end();
#endif
}

/* ---- sums in rank order */

#ifdef MT_HAVE_MPI
static void mt_reduce_doubles(double *out, const double *rows, int size, int64_t stride, int64_t n,
                              mt_reduction reduction) {
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t i = 0; i < n; i++) {
        double value = rows[i];
        for (int r = 1; r < size; r++) {
            double x = rows[r * stride + i];
            value = reduction == MT_SUM ? value + x : mt_maximum(x, value);
        }
        out[i] = value;
    }
}

/* out[n] = the sum or maximum of rows[size, n], row 0 first; rows are `stride` elements apart. */
static void mt_reduce_rows(void *out, const void *rows, int size, int64_t stride, int64_t n, mt_reduction reduction,
                           mt_dtype dtype) {
    if (dtype == MT_F64) {
        mt_reduce_doubles(out, rows, size, stride, n, reduction);
        return;
    }
#pragma omp parallel for if (n > MT_PARALLEL)
    for (int64_t block = 0; block < n; block += MT_BLOCK) {
        float sums[MT_BLOCK], scratch[MT_BLOCK];
        int64_t count = mt_min(MT_BLOCK, n - block);
        memcpy(sums, mt_row_load(scratch, rows, block, count, dtype), (size_t)count * sizeof(float));
        for (int r = 1; r < size; r++) {
            const float *x = mt_row_load(scratch, rows, r * stride + block, count, dtype);
            if (reduction == MT_SUM)
                for (int64_t i = 0; i < count; i++) sums[i] += x[i];
            else
                for (int64_t i = 0; i < count; i++) sums[i] = (float)mt_maximum(x[i], sums[i]);
        }
        mt_row_store(out, block, sums, count, dtype);
    }
}

/* Elements per slice of a reduction. Bounds the scratch for the rows of all ranks. */
static int64_t mt_reduce_slice(const mt_group *group) {
    return mt_max(1024, (1 << 20) / group->size);
}

/* out = the reduction of slice `rank` over the group. Slice r is in[r * stride, r * stride + n), cut at `end`. Ranks
 * send before they reduce, so `out` may be inside this rank's own slice. */
static void mt_mpi_reduce_slices(void *out, const char *in, int64_t stride, int64_t n, int64_t end,
                                 const mt_group *group, mt_reduction reduction, mt_dtype dtype) {
    int size = group->size, rank = group->rank;
    int64_t width = mt_dtype_size(dtype), own = mt_clamp(end - rank * stride, 0, n);
    char *rows = (char *)mt_scratch_grow(mt_divide_up(size * n * width, 4));
    memcpy(rows + rank * n * width, in + rank * stride * width, (size_t)(own * width));
    for (int step = 1; step < size; step++) {
        int to = (rank + step) % size, from = (rank - step + size) % size;
        mt_message_exchange(group, MT_TAG_COLLECTIVE, in + to * stride * width,
                            mt_clamp(end - to * stride, 0, n) * width, to, rows + from * n * width, own * width, from);
    }
    mt_reduce_rows(out, rows, size, n, own, reduction, dtype);
}

/* Every rank reduces one slice and sends the result to all: each rank sends 2 (size - 1) / size of the buffer. */
static void mt_mpi_all_reduce(char *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype,
                              const mt_group *group) {
    int size = group->size, rank = group->rank;
    int64_t width = mt_dtype_size(dtype), part = mt_reduce_slice(group) * size;
    if (count * width <= 1 << 14) { // few elements: one all-gather, then every rank computes the same sum
        int bytes = (int)(count * width);
        char *rows = (char *)mt_scratch_grow(mt_divide_up(size * (int64_t)bytes, 4));
        mt_mpi_check(MPI_Allgather(buffer, bytes, MPI_BYTE, rows, bytes, MPI_BYTE, mt_mpi_comm(group)), "MPI_Allgather",
                     group);
        mt_reduce_rows(buffer, rows, size, count, count, reduction, dtype);
        return;
    }
    for (int64_t start = 0; start < count; start += part) {
        char *piece = buffer + start * width;
        int64_t end = mt_min(part, count - start), n = mt_divide_up(end, size), own = mt_clamp(end - rank * n, 0, n);
        mt_mpi_reduce_slices(piece + rank * n * width, piece, n, n, end, group, reduction, dtype);
        for (int step = 1; step < size; step++) {
            int to = (rank + step) % size, from = (rank - step + size) % size;
            mt_message_exchange(group, MT_TAG_COLLECTIVE, piece + rank * n * width, own * width, to,
                                piece + from * n * width, mt_clamp(end - from * n, 0, n) * width, from);
        }
    }
}
#endif

/* The types of a reduction's operands. */
static bool mt_is_reduced(mt_dtype dtype) {
    return dtype == MT_F32 || dtype == MT_F64 || mt_dtype_is_half(dtype);
}

static void mt_cpu_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype,
                              const mt_group *group, mt_stream *stream) {
    MT_CHECK(mt_is_reduced(dtype));
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_MPI
    mt_watch_begin("all_reduce", group->name);
    mt_mpi_all_reduce(buffer, count, reduction, dtype, group);
    mt_watch_end();
#endif
}

static void mt_cpu_reduce_scatter(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                                  mt_stream *stream) {
    MT_CHECK(mt_is_reduced(dtype));
    int64_t width = mt_dtype_size(dtype);
    if (group->size == 1 && out != in) memmove(out, in, (size_t)(count * width));
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_MPI
    int64_t slice = mt_reduce_slice(group);
    mt_watch_begin("reduce_scatter", group->name);
    for (int64_t start = 0; start < count; start += slice)
        mt_mpi_reduce_slices((char *)out + start * width, (const char *)in + start * width, count,
                             mt_min(slice, count - start), group->size * count - start, group, MT_SUM, dtype);
    mt_watch_end();
#endif
}

static void mt_cpu_reduce(void *out, const void *in, int64_t count, mt_dtype dtype, int root, const mt_group *group,
                          mt_stream *stream) {
    MT_CHECK(mt_is_reduced(dtype));
    int64_t width = mt_dtype_size(dtype);
    if (group->size == 1 && out != in) memmove(out, in, (size_t)(count * width));
    if (group->size == 1 || count == 0) return;
#ifdef MT_HAVE_MPI
    int64_t slice = mt_reduce_slice(group);
    mt_watch_begin("reduce", group->name);
    for (int64_t start = 0; start < count; start += slice) {
        int64_t n = mt_min(slice, count - start);
        const char *own = (const char *)in + start * width;
        if (group->rank != root) {
            mt_message_exchange(group, MT_TAG_COLLECTIVE, own, n * width, root, NULL, 0, root);
            continue;
        }
        char *rows = (char *)mt_scratch_grow(mt_divide_up(group->size * n * width, 4));
        memcpy(rows + root * n * width, own, (size_t)(n * width));
        for (int from = 0; from < group->size; from++)
            if (from != root)
                mt_message_exchange(group, MT_TAG_COLLECTIVE, NULL, 0, from, rows + from * n * width, n * width, from);
        mt_reduce_rows((char *)out + start * width, rows, group->size, n, n, MT_SUM, dtype);
    }
    mt_watch_end();
#endif
}

void mt_all_reduce_sum(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype) {
    mt_cpu_all_reduce(buffer, count, MT_SUM, dtype, group, NULL);
}

void mt_all_reduce_max(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype) {
    mt_cpu_all_reduce(buffer, count, MT_MAX, dtype, group, NULL);
}

/* ---- data movement */

/* All-to-all: sends `bytes` at in + r * stride to rank r, and receives from rank r into out + r * bytes. */
static void mt_cpu_exchange_all(const char *operation, char *out, const char *in, int64_t stride, int64_t bytes,
                                const mt_group *group) {
    int size = group->size, rank = group->rank;
    if (out + rank * bytes != in + rank * stride) memmove(out + rank * bytes, in + rank * stride, (size_t)bytes);
    if (size == 1 || bytes == 0) return;
    mt_watch_begin(operation, group->name);
    for (int step = 1; step < size; step++) {
        int to = (rank + step) % size, from = (rank - step + size) % size;
        mt_message_exchange(group, MT_TAG_COLLECTIVE, in + to * stride, bytes, to, out + from * bytes, bytes, from);
    }
    mt_watch_end();
}

static void mt_cpu_all_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                              mt_stream *stream) {
    mt_cpu_exchange_all("all_gather", out, in, 0, count * mt_dtype_size(dtype), group);
}

static void mt_cpu_all_to_all(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                              mt_stream *stream) {
    MT_CHECK(out != in || group->size == 1 || count == 0);
    mt_cpu_exchange_all("all_to_all", out, in, count * mt_dtype_size(dtype), count * mt_dtype_size(dtype), group);
}

static int64_t mt_prefix_sum(const int64_t *counts, int end) {
    int64_t sum = 0;
    for (int i = 0; i < end; i++) sum += counts[i];
    return sum;
}

static void mt_cpu_all_to_all_v(void *out, const int64_t *out_counts, const void *in, const int64_t *in_counts,
                                mt_dtype dtype, const mt_group *group, mt_stream *stream) {
    int rank = group->rank;
    int64_t width = mt_dtype_size(dtype);
    MT_CHECK(out_counts[rank] == in_counts[rank]);
    if (out != in)
        memmove((char *)out + mt_prefix_sum(out_counts, rank) * width,
                (const char *)in + mt_prefix_sum(in_counts, rank) * width, (size_t)(in_counts[rank] * width));
    if (group->size == 1) return;
    mt_watch_begin("all_to_all_v", group->name);
    for (int step = 1; step < group->size; step++) {
        int to = (rank + step) % group->size, from = (rank - step + group->size) % group->size;
        mt_message_exchange(group, MT_TAG_COLLECTIVE, (const char *)in + mt_prefix_sum(in_counts, to) * width,
                            in_counts[to] * width, to, (char *)out + mt_prefix_sum(out_counts, from) * width,
                            out_counts[from] * width, from);
    }
    mt_watch_end();
}

void mt_broadcast(const mt_group *group, void *buffer, int64_t bytes, int root) {
    if (group->size == 1) return;
#ifdef MT_HAVE_MPI
    const int64_t piece = 1 << 30;
    mt_watch_begin("broadcast", group->name);
    for (int64_t start = 0; start < bytes; start += piece)
        mt_mpi_check(
            MPI_Bcast((char *)buffer + start, (int)mt_min(piece, bytes - start), MPI_BYTE, root, mt_mpi_comm(group)),
            "MPI_Bcast", group);
    mt_watch_end();
#endif
}

static void mt_cpu_broadcast(void *buffer, int64_t count, mt_dtype dtype, int root, const mt_group *group,
                             mt_stream *stream) {
    mt_broadcast(group, buffer, count * mt_dtype_size(dtype), root);
}

static void mt_cpu_stream_wait_stream(mt_stream *stream, mt_stream *other) {
}

/* ---- channels */

typedef struct mt_cpu_channel {
    mt_channel head;
    mt_message messages[MT_CHANNEL_TICKETS]; // of ticket i at i % MT_CHANNEL_TICKETS
} mt_cpu_channel;

static mt_channel *mt_cpu_channel_open(const mt_group *group, int from, int to, int id) {
    MT_CHECK(from != to && from < group->size && to < group->size && id >= 0 && id < MT_TAGS - MT_TAG_CHANNEL);
    if (group->rank != from && group->rank != to) return NULL;
    mt_cpu_channel *channel = mt_calloc(sizeof *channel);
    channel->head = (mt_channel){.group = group, .from = from, .to = to, .id = id};
    return &channel->head;
}

static void mt_cpu_channel_wait(mt_channel *channel, int64_t ticket, mt_stream *stream) {
    MT_CHECK(ticket >= 0 && ticket < channel->next);
    if (ticket + MT_CHANNEL_TICKETS < channel->next) return; // its place was reused, so the message is complete
    mt_watch_begin(channel->group->rank == channel->from ? "channel_send" : "channel_recv", channel->group->name);
    mt_message_wait(&((mt_cpu_channel *)channel)->messages[ticket % MT_CHANNEL_TICKETS], channel->group);
    mt_watch_end();
}

/* Starts the next message: sends `out` or receives into `in` (the other is NULL). Returns its ticket. */
static int64_t mt_cpu_channel_start(mt_channel *channel, const void *out, void *in, int64_t bytes) {
    int64_t ticket = channel->next, slot = ticket % MT_CHANNEL_TICKETS;
    if (ticket >= MT_CHANNEL_TICKETS) mt_cpu_channel_wait(channel, ticket - MT_CHANNEL_TICKETS, NULL);
    channel->bytes[slot] = bytes;
    channel->next++;
    mt_message_start(&((mt_cpu_channel *)channel)->messages[slot], channel->group, MT_TAG_CHANNEL + channel->id, out,
                     in, bytes, in ? channel->from : channel->to);
    return ticket;
}

static int64_t mt_cpu_channel_send(mt_channel *channel, const void *buffer, int64_t count, mt_dtype dtype,
                                   mt_stream *stream) {
    MT_CHECK(channel->group->rank == channel->from);
    return mt_cpu_channel_start(channel, buffer, NULL, count * mt_dtype_size(dtype));
}

static int64_t mt_cpu_channel_recv(mt_channel *channel, void *buffer, int64_t count, mt_dtype dtype,
                                   mt_stream *stream) {
    MT_CHECK(channel->group->rank == channel->to);
    return mt_cpu_channel_start(channel, NULL, buffer, count * mt_dtype_size(dtype));
}

static void mt_cpu_channel_close(mt_channel *channel) {
    if (!channel) return;
    for (int64_t i = mt_max(0, channel->next - MT_CHANNEL_TICKETS); i < channel->next; i++)
        mt_cpu_channel_wait(channel, i, NULL);
    free(channel);
}

/* ---- mailboxes: on the CPU, every copy is a message */

static int mt_cpu_mailbox_open(mt_mailbox **mailbox, const mt_group *group, void *memory, int64_t bytes,
                               mt_error *error) {
    *mailbox = mt_malloc(sizeof **mailbox);
    **mailbox = (mt_mailbox){group, memory, bytes};
    return 0;
}

static void mt_cpu_mailbox_exchange(const mt_mailbox_args *a, mt_dtype dtype, mt_stream *stream) {
    const mt_mailbox *mailbox = a->mailbox;
    int64_t bytes = a->count * mt_dtype_size(dtype), at = (a->first + a->from * a->stride) * mt_dtype_size(dtype);
    MT_CHECK(at + bytes <= mailbox->bytes - MT_MAILBOX_OWN);
    mt_watch_begin("mailbox_exchange", mailbox->group->name);
    mt_message_exchange(mailbox->group, MT_TAG_COLLECTIVE, a->in, bytes, a->to, mailbox->memory + at, bytes, a->from);
    mt_watch_end();
}

static void mt_cpu_mailbox_close(mt_mailbox *mailbox) {
    free(mailbox);
}

/* ---- agreement on errors */

int mt_agree(const mt_group *world, bool failed, mt_error *error) {
    double first = failed ? world->size - world->rank : 0; // the maximum comes from the lowest rank that failed
    mt_all_reduce_max(world, &first, 1, MT_F64);
    if (first == 0) return 0;
    mt_broadcast(world, error->text, sizeof error->text, world->size - (int)first);
    return -1;
}

/* ---- messages of the stack: pipeline stages and the ring of context parallelism start them in one order and wait for
 * them in the same order, so a channel's end needs no tickets. */

/* Starts the end's next message of buffer[count]: sends it, or posts its receive. */
static void mt_channel_start(const mt_ops *ops, mt_channel *channel, void *buffer, int64_t count, mt_dtype dtype,
                             mt_stream *stream) {
    if (channel->group->rank == channel->from)
        ops->channel_send(channel, buffer, count, dtype, stream);
    else
        ops->channel_recv(channel, buffer, count, dtype, stream);
}

/* Makes `stream` wait for the oldest message that it has not waited for; then its buffer is free, or filled. */
static void mt_channel_finish(const mt_ops *ops, mt_channel *channel, mt_stream *stream) {
    ops->channel_wait(channel, channel->finished++, stream);
}

/* Messages started and not waited for. */
static int64_t mt_channel_pending(const mt_channel *channel) {
    return channel->next - channel->finished;
}

/* Closes a rank's channels (some may be NULL) in the order of opening, which all ranks share: by id, then by sender. A
 * backend may wait for the other end; any other order could deadlock the ranks of a ring. */
static void mt_channels_close(const mt_ops *ops, mt_channel **channels, int count) {
    for (int closed = 0; closed < count; closed++) {
        int first = closed;
        for (int i = closed + 1; i < count; i++) {
            const mt_channel *a = channels[i], *b = channels[first];
            if (a && (!b || a->id < b->id || (a->id == b->id && a->from < b->from))) first = i;
        }
        mt_channel *channel = channels[first];
        channels[first] = channels[closed];
        if (!channel) return;
        ops->channel_close(channel);
    }
}

#pragma GCC diagnostic pop // pushed in §3

/* ==== §6 conjugate regions ======================================================================================= */
/* The borders of tensor parallelism (Shoeybi et al., "Megatron-LM"; Korthikanti et al., "Reducing activation
 * recomputation in large transformer models"). Between a column- and a row-parallel product, each rank of the tensor
 * group has a share of the heads or of the width. Outside, each rank has all rows of the hidden states, or with
 * sequence parallelism a share of the rows. Regions come in conjugate pairs: the backward of one is the forward of the
 * other:
 *
 *   copy_to_tensor_region               forward: nothing              backward: all-reduce
 *   reduce_from_tensor_region           forward: all-reduce           backward: nothing
 *   gather_from_sequence_region         forward: all-gather rows      backward: reduce-scatter rows
 *   reduce_scatter_to_sequence_region   forward: reduce-scatter rows  backward: all-gather rows
 *
 * Both pairs move the same number of bytes; the second leaves each rank 1/tp of the rows. With --tp-comm-overlap
 * the second pair transfers one rank's rows at a time, overlapped with products. Invariant: results are complete on the
 * stream of the call. */

/* Forward: x[T, C] -> x. Backward: dx[T, C]+tp -> dx[T, C], in place. */
const void *mt_copy_to_tensor_region_forward(const void *x) {
    return x;
}
void mt_copy_to_tensor_region_backward(const mt_tensor_parallel *tp, void *dx, int64_t C, mt_stream *stream) {
    tp->ops->all_reduce(dx, tp->T * C, MT_SUM, tp->dtype, tp->group, stream);
}

/* Forward: x[T, C]+tp -> x[T, C], in place. Backward: dx[T, C], unchanged. */
void mt_reduce_from_tensor_region_forward(const mt_tensor_parallel *tp, void *x, int64_t C) {
    tp->ops->all_reduce(x, tp->T * C, MT_SUM, tp->dtype, tp->group, tp->stream);
}
const void *mt_reduce_from_tensor_region_backward(const void *dx) {
    return dx;
}

/* own[T/tp, C] -> all[T, C], in rank order. */
static void mt_all_gather_rows(const mt_tensor_parallel *tp, void *all, const void *own, int64_t C, mt_stream *stream) {
    tp->ops->all_gather(all, own, tp->rows * C, tp->dtype, tp->group, stream);
}

/* partial[T, C]+tp -> own[T/tp, C]. */
static void mt_reduce_scatter_rows(const mt_tensor_parallel *tp, void *own, const void *partial, int64_t C,
                                   mt_stream *stream) {
    tp->ops->reduce_scatter(own, partial, tp->rows * C, tp->dtype, tp->group, stream);
}

/* Forward: x[T/tp, C] -> y[T, C]. Backward: dy[T, C]+tp -> dx[T/tp, C]. */
void mt_gather_from_sequence_region_forward(const mt_tensor_parallel *tp, void *y, const void *x, int64_t C,
                                            mt_stream *stream) {
    mt_all_gather_rows(tp, y, x, C, stream);
}
void mt_gather_from_sequence_region_backward(const mt_tensor_parallel *tp, void *dx, const void *dy, int64_t C,
                                             mt_stream *stream) {
    mt_reduce_scatter_rows(tp, dx, dy, C, stream);
}

/* Forward: x[T, C]+tp -> y[T/tp, C]. Backward: dy[T/tp, C] -> dx[T, C]. */
void mt_reduce_scatter_to_sequence_region_forward(const mt_tensor_parallel *tp, void *y, const void *x, int64_t C) {
    mt_reduce_scatter_rows(tp, y, x, C, tp->stream);
}
void mt_reduce_scatter_to_sequence_region_backward(const mt_tensor_parallel *tp, void *dx, const void *dy, int64_t C) {
    mt_all_gather_rows(tp, dx, dy, C, tp->stream);
}

/* ---- the first pair, or with sequence parallelism the second */

/* Into the region: hidden states [rows, C] -> all rows, for a column-parallel product. */
static const void *mt_region_enter_forward(const mt_tensor_parallel *tp, const void *x, int64_t C, mt_stream *stream) {
    if (!tp->sequence_parallel) return mt_copy_to_tensor_region_forward(x);
    mt_gather_from_sequence_region_forward(tp, tp->gathered, x, C, stream);
    return tp->gathered;
}

/* partial[T, C]+tp -> dx[rows, C]. */
static void mt_region_enter_backward(const mt_tensor_parallel *tp, void *dx, const void *partial, int64_t C,
                                     mt_stream *stream) {
    if (!tp->sequence_parallel)
        mt_copy_to_tensor_region_backward(tp, dx, C, stream); // dx is `partial` here
    else
        mt_gather_from_sequence_region_backward(tp, dx, partial, C, stream);
}

/* Buffer for a product's partial sum of `out`, or of its gradient. */
static void *mt_region_partial(const mt_tensor_parallel *tp, void *out) {
    return tp->sequence_parallel ? tp->partial : out;
}

/* Out of the region: partial sums in mt_region_partial(out) -> out[rows, C]. */
static void mt_region_leave_forward(const mt_tensor_parallel *tp, void *out, int64_t C) {
    if (!tp->sequence_parallel)
        mt_reduce_from_tensor_region_forward(tp, out, C);
    else
        mt_reduce_scatter_to_sequence_region_forward(tp, out, tp->partial, C);
}

/* dout[rows, C] -> the gradient of all rows. */
static const void *mt_region_leave_backward(const mt_tensor_parallel *tp, const void *dout, int64_t C) {
    if (!tp->sequence_parallel) return mt_reduce_from_tensor_region_backward(dout);
    mt_reduce_scatter_to_sequence_region_backward(tp, tp->gathered, dout, C);
    return tp->gathered;
}

/* ---- the second pair, one rank's rows at a time, through a mailbox, overlapped with products. In step s of t - 1,
 * rank r sends to rank r + s and receives from rank r - s: each link carries one piece at a time. */

/* The rows of x[T, C] that rank `owner` has outside the region. */
static void *mt_rows_of_rank(const mt_tensor_parallel *tp, const void *x, int owner, int64_t C) {
    return mt_at(x, owner * tp->rows * C, tp->dtype);
}

/* The rank at distance `step` in the group; negative: before this rank. */
static int mt_tensor_rank_after(const mt_tensor_parallel *tp, int step) {
    return (tp->group->rank + step + tp->group->size) % tp->group->size;
}

/* Sends `sent`[rows, C] to the rank at distance `step`: into its mailbox, which has `stride` rows per rank from row
 * `first` on. Runs on tp->comm, as all mailbox transfers. */
static void mt_mailbox_send(const mt_tensor_parallel *tp, const void *sent, int64_t first, int64_t stride, int64_t C,
                            int step) {
    tp->ops->mailbox_exchange(&(mt_mailbox_args){tp->mailbox, sent, .count = tp->rows * C, .first = first,
                                                 .stride = stride * C, .to = mt_tensor_rank_after(tp, step),
                                                 .from = mt_tensor_rank_after(tp, -step)},
                              tp->dtype, tp->comm);
}

/* Gathers x[rows, C] of all ranks in t steps. Each step returns the rows of one rank, `owner`, while those of the next
 * rank are in transfer. Step 0 returns x itself; later steps return rows of `gathered`. */
static const void *mt_gather_step(const mt_tensor_parallel *tp, const void *x, int64_t C, int step, int *owner) {
    if (step == 0)
        tp->ops->stream_wait_stream(tp->comm, tp->stream);
    else
        tp->ops->stream_wait_stream(tp->stream, tp->comm);
    if (step + 1 < tp->group->size) mt_mailbox_send(tp, x, 0, tp->rows, C, step + 1);
    *owner = mt_tensor_rank_after(tp, -step);
    return step == 0 ? x : mt_rows_of_rank(tp, tp->gathered, *owner, C);
}

/* Completes a gather: copies this rank's rows to `gathered`, which then has all rows. Runs on tp->comm. */
static const void *mt_gather_own(const mt_tensor_parallel *tp, const void *x, int64_t C) {
    tp->ops->memory_copy(mt_rows_of_rank(tp, tp->gathered, tp->group->rank, C), x,
                         tp->rows * C * mt_dtype_size(tp->dtype), tp->comm);
    return tp->gathered;
}

/* The whole gather on tp->comm, overlapped with the caller's work. */
static const void *mt_gather_overlapped(const mt_tensor_parallel *tp, const void *x, int64_t C) {
    if (!tp->overlaps) return mt_region_enter_forward(tp, x, C, tp->comm);
    for (int step = 1; step < tp->group->size; step++) mt_mailbox_send(tp, x, 0, tp->rows, C, step);
    return mt_gather_own(tp, x, C);
}

/* One step of the reduce-scatter: sends this rank's partial sums [rows, C] for the rank at distance `step`. */
static void mt_scatter_step(const mt_tensor_parallel *tp, int64_t C, int step) {
    const void *sent = mt_rows_of_rank(tp, tp->partial, mt_tensor_rank_after(tp, step), C);
    mt_mailbox_send(tp, sent, tp->first_part, tp->max_rows, C, step);
}

/* After all steps: out[rows, C] = the fp32 sum of this rank's part and all received parts. */
static void mt_scatter_sum(const mt_tensor_parallel *tp, void *out, int64_t C) {
    const void *own = mt_rows_of_rank(tp, tp->partial, tp->group->rank, C);
    tp->ops->stream_wait_stream(tp->stream, tp->comm);
    const void *parts = mt_at(tp->gathered, tp->first_part, tp->dtype);
    tp->ops->combine_rows(&(mt_combine_args){tp->rows, tp->group->size, C, .in = parts, .position = tp->part_rows,
                                             .base = own, .out = out},
                          tp->dtype, tp->stream);
}

/* Backward of mt_region_enter on tp->comm, from `partial` or dx, overlapped with the caller's work; and its end. */
static void mt_scatter_begin(const mt_tensor_parallel *tp, void *dx, int64_t C) {
    tp->ops->stream_wait_stream(tp->comm, tp->stream);
    if (!tp->overlaps) mt_region_enter_backward(tp, dx, tp->partial, C, tp->comm);
    for (int step = 1; tp->overlaps && step < tp->group->size; step++) mt_scatter_step(tp, C, step);
}
static void mt_scatter_end(const mt_tensor_parallel *tp, void *dx, int64_t C) {
    if (tp->overlaps)
        mt_scatter_sum(tp, dx, C);
    else
        tp->ops->stream_wait_stream(tp->stream, tp->comm);
}

/* ==== §7 linear ================================================================================================== */
/* Every matrix product with a parameter. A column-parallel weight is w[N/tp, K]: each tensor-parallel rank computes a
 * share of the outputs, y[T, N/tp]. A row-parallel weight is w[N, K/tp]: each rank computes a summand, y[T, N]+tp. With
 * a group of one both are plain products. Experts use grouped products. This section handles communication, its
 * overlap, fp8, adapters, and accumulation of gradients; layers know none of them. fp8 stands before the product,
 * adapters after it. Invariants: gradients of weights need no communication; a step's first product overwrites dw,
 * later ones add to it. */

/* ---- fp8: quantizes the operands of a product. Products need both operands with the summed dimension contiguous:
 *
 *   y[T, N] = x w^T          from x [T, K] and w [N, K]
 *   dx[T, K] = dy w          from dy [T, N] and w^T [K, N]
 *   dw[N, K] = dy^T x        from dy^T [N, T] and x^T [K, T]
 *
 * so that all three are quantized as they are and transposed, in one pass. See mt_fp8_linear for their lifetimes. */

/* Space for x[R, C] in fp8; of experts' rows, or `count` matrices. */
static mt_fp8_matrix mt_fp8_allocate(mt_arena *arena, int64_t count, int64_t R, int64_t C, mt_dtype format,
                                     mt_fp8_blocks blocks) {
    mt_fp8_matrix matrix = {.stride = mt_fp8_stride(C, blocks), .format = format, .blocks = blocks};
    matrix.data = mt_arena_alloc(arena, count * R * matrix.stride);
    matrix.inverse_scales = mt_arena_alloc(arena, mt_fp8_num_scales(count, R, matrix.stride, blocks) * 4);
    return matrix;
}

/* The transpose of T rows: experts' rows are rounded up, so that no block spans two experts. */
static mt_fp8_matrix mt_fp8_allocate_columns(mt_arena *arena, const mt_linear *l, int64_t T, int64_t C, mt_dtype to) {
    int64_t padding = l->num_experts * (MT_FP8_EXPERT_ROWS - 1);
    return mt_fp8_allocate(arena, 1, C, T + padding, to, l->fp8->recipe->blocks);
}

/* The copies of a weight that its products read. */
static void mt_fp8_allocate_weight(mt_arena *arena, const mt_linear *l, mt_fp8_matrix *w, mt_fp8_matrix *transposed) {
    const mt_fp8 *recipe = l->fp8->recipe;
    int64_t count = mt_max(l->num_experts, 1);
    if (w) *w = mt_fp8_allocate(arena, count, l->N, l->K, recipe->format, recipe->weight_blocks);
    if (transposed) *transposed = mt_fp8_allocate(arena, count, l->K, l->N, recipe->format, recipe->weight_blocks);
}

/* Bytes of scratch that the products of one call need, for T rows in `pieces`. */
static int64_t mt_fp8_scratch_bytes(const mt_linear *l, int64_t T, int64_t pieces) {
    const mt_fp8 *recipe = l->fp8->recipe;
    mt_arena forward = {0}, backward = {0};
    mt_fp8_matrix w;
    for (int64_t i = 0; i < pieces; i++) {
        int64_t rows = mt_divide_up(T, pieces);
        if (!l->fp8->in_place[MT_FP8_X]) mt_fp8_allocate(&forward, 1, rows, l->K, recipe->format, recipe->blocks);
        if (!l->fp8->in_place[MT_FP8_DY])
            mt_fp8_allocate(&backward, 1, rows, l->N, recipe->gradient_format, recipe->blocks);
    }
    mt_fp8_allocate_columns(&backward, l, T, l->N, recipe->gradient_format);
    if (!l->fp8->saved_x) mt_fp8_allocate_columns(&backward, l, T, l->K, recipe->format);
    if (!recipe->keeps_weights && !l->fp8->gathered) mt_fp8_allocate_weight(&forward, l, &w, NULL);
    if (!recipe->keeps_weights) mt_fp8_allocate_weight(&backward, l, NULL, &w);
    return mt_max(forward.used, backward.used);
}

/* A product of a linear: a use of the linear, or a part of its rows, which a step of an overlapped region computes. */
typedef struct mt_product {
    mt_linear_pass pass;
    const mt_tensor_parallel *tp;
    const mt_linear *l;
    mt_linear_io io;             // of these rows
    int64_t T, first_row;        // rows, and the index of the first of them in the micro-batch
    bool omits_bias;             // forward: y is a partial sum; another rank adds the bias
    void *gelu;                  // forward: gelu(y), or NULL
    const void *gelu_of;         // backward: x is gelu(gelu_of), and dx the gradient of gelu_of; or NULL
    mt_fp8_matrix left, right;   // fp8: the operands of the product at hand
    mt_fp8_matrix dy_transposed; // fp8: of the product of the weight
} mt_product;

/* Offsets of the rows of each weight; NULL: there is one weight. */
static const int32_t *mt_row_offsets(const mt_product *p) {
    return p->io.groups ? p->io.groups->offsets : NULL;
}

/* True if a product adds to dw, which holds a gradient afterwards. */
static bool mt_weight_accumulates(const mt_weight *weight) {
    bool accumulates = weight->has_gradient && *weight->has_gradient;
    if (weight->has_gradient) *weight->has_gradient = true;
    return accumulates;
}

/* ---- before a product in fp8 */

/* Begins a call: its operands overwrite those of the call before. Only experts' rows can need more than was planned. */
static void mt_fp8_begin(const mt_linear_pass *pass, const mt_linear *l, const mt_linear_io *io) {
    if (!l->fp8) return;
    const mt_ops *ops = pass->tp->ops;
    mt_arena *scratch = &l->fp8->recipe->scratch;
    int64_t bytes = io->groups ? mt_fp8_scratch_bytes(l, io->groups->num_rows, 1) : 0;
    scratch->used = 0;
    if (!l->fp8->recipe->keeps_weights) l->fp8->w_transposed.data = NULL;
    if (!l->fp8->recipe->keeps_weights && !l->fp8->gathered) l->fp8->w.data = NULL;
    if (bytes <= scratch->capacity) return;
    if (scratch->base) ops->memory_free_ordered(scratch->base, pass->tp->stream);
    scratch->capacity = bytes * 9 / 8, scratch->base = ops->memory_alloc_ordered(scratch->capacity, pass->tp->stream);
}

/* How x, w or dy of a linear is quantized; R: rows of x. Where it returns rows, which lie in x, the operation that
 * computes x stores them; else the linear quantizes x. */
static mt_quantize_args mt_fp8_args(bool training, const mt_linear *l, mt_fp8_operand operand, const void *x, int64_t R,
                                    const int32_t *offsets) {
    const mt_fp8_linear *f = l ? l->fp8 : NULL;
    bool is_dy = operand == MT_FP8_DY;
    if (!f) return (mt_quantize_args){0};
    mt_quantize_args a = {x, 1, R, is_dy ? l->N : l->K, .offsets = offsets, .num_experts = l->num_experts};
    if (f->in_place[operand]) {
        float *inverse_scale = f->inverse_scales + operand * MT_FP8_SCALE_STEP;
        a.rows = (mt_fp8_matrix){(uint8_t *)(uintptr_t)x, inverse_scale, a.C, .blocks = MT_FP8_TENSOR};
        a.rows.format = is_dy ? f->recipe->gradient_format : f->recipe->format;
    }
    if (f->recipe->delayed) a.scale = f->scale + operand;
    // not recorded in an evaluation; but a weight that it quantized serves the next step too
    if (!f->recipe->delayed || training || operand == MT_FP8_W) a.amax = f->amax + operand;
    return a;
}

/* w, or its transpose. */
static mt_fp8_matrix mt_fp8_weight(const mt_product *p, bool transposed) {
    const mt_linear *l = p->l;
    mt_fp8_linear *f = l->fp8;
    mt_fp8_matrix *w = transposed ? &f->w_transposed : &f->w;
    mt_quantize_args a = mt_fp8_args(p->pass.training, l, MT_FP8_W, l->weight.w, l->N, NULL);
    a.count = mt_max(l->num_experts, 1);
    if (f->recipe->keeps_weights ? f->version == f->recipe->version : w->data != NULL) return *w;
    f->version = f->recipe->version;
    if (!f->recipe->keeps_weights) // the first product of this call
        mt_fp8_allocate_weight(&f->recipe->scratch, l, transposed ? NULL : w, transposed ? w : NULL);
    if (f->recipe->keeps_weights || !transposed || f->gathered) a.rows = f->w;
    if (f->recipe->keeps_weights || transposed) a.columns = f->w_transposed;
    if (f->gathered)
        p->tp->ops->fp8_transpose(&a, p->tp->stream);
    else
        p->tp->ops->quantize(&a, p->tp->dtype, p->tp->stream);
    return *w;
}

/* The rows of x or dy in fp8, and their transpose, which for x may be the saved one. */
static mt_quantize_args mt_fp8_rows(const mt_product *p, mt_fp8_operand operand, bool rows, bool columns) {
    const mt_linear *l = p->l;
    const mt_row_groups *groups = p->io.groups;
    mt_fp8 *recipe = l->fp8->recipe;
    mt_arena saved = {.base = p->io.x_transposed, .capacity = INT64_MAX};
    bool is_dy = operand == MT_FP8_DY, in_place = l->fp8->in_place[operand], is_saved = !is_dy && saved.base;
    mt_dtype format = is_dy ? recipe->gradient_format : recipe->format;
    mt_quantize_args a = mt_fp8_args(p->pass.training, l, operand, is_dy ? p->io.dy : p->io.x, p->T, mt_row_offsets(p));
    if (rows && !in_place) a.rows = mt_fp8_allocate(&recipe->scratch, 1, p->T, a.C, format, recipe->blocks);
    if (columns) a.columns = mt_fp8_allocate_columns(is_saved ? &saved : &recipe->scratch, l, p->T, a.C, format);
    if (is_saved && !rows) return a; // the forward stored it
    if (in_place) a.compact = p->T;
    if (in_place && groups) a.source = is_dy ? groups->dy_source : groups->x_source;
    if (in_place && columns) p->tp->ops->fp8_transpose(&a, p->tp->stream);
    if (!in_place && (rows || columns)) p->tp->ops->quantize(&a, p->tp->dtype, p->tp->stream);
    return a;
}

static void mt_fp8_before_forward(mt_product *p) {
    if (!p->l->fp8) return;
    p->right = mt_fp8_weight(p, false);
    p->left = mt_fp8_rows(p, MT_FP8_X, true, p->io.x_transposed).rows;
}

/* Quantizes dy for the products of the selected halves of the backward, in one pass. */
static void mt_fp8_before_backward(mt_product *p, int halves) {
    if (!p->l->fp8) return;
    bool weight = (halves & MT_BACKWARD_WEIGHT) && p->l->fp8->recipe->wgrad && p->l->weight.dw;
    mt_quantize_args a = mt_fp8_rows(p, MT_FP8_DY, halves & MT_BACKWARD_INPUT, weight);
    p->left = a.rows, p->dy_transposed = a.columns;
}

static void mt_fp8_before_backward_input(mt_product *p) {
    if (p->l->fp8) p->right = mt_fp8_weight(p, true);
}

static void mt_fp8_before_backward_weight(mt_product *p) {
    if (p->dy_transposed.data) p->right = mt_fp8_rows(p, MT_FP8_X, false, true).columns;
}

/* The product of quantized operands. Scales per block need sums in fp32. */
static void mt_fp8_run_product(const mt_product *p, mt_fp8_product_args a) {
    a.b = p->right;
    a.exact_sums = a.exact_sums || p->l->fp8->recipe->blocks != MT_FP8_TENSOR;
    a.offsets = mt_row_offsets(p), a.num_experts = p->l->num_experts;
    p->tp->ops->fp8_product(&a, p->tp->stream);
}

/* ---- after a product: adapters. h = scale dropout(x) a^T, and y += h b^T; backward: dh = scale dy b, dx += dropout(dh
 * a), da += dh^T dropout(x), db += dy^T h. The backward computes h again. If x is cut among ranks, h and db are partial
 * sums over them; otherwise da is. */

/* True if a linear has adapters that are switched on. */
static bool mt_linear_adapts(const mt_linear *l) {
    return l->adapter.R > 0 && !*l->adapter.off;
}

/* The operands of the products with b of a part, or with a (part -1); x of a is io.x. */
static mt_grouped_args mt_adapter_args(const mt_product *p, int64_t part) {
    const mt_adapter *adapter = &p->l->adapter;
    const mt_adapter_part *b = &adapter->parts[mt_max(part, 0)];
    mt_dtype dtype = p->tp->dtype;
    void *h = adapter->scratch->rows, *dh = mt_at(h, p->T * adapter->R, dtype);
    mt_grouped_args a = {p->T, adapter->R, p->l->K, mt_max(p->l->num_experts, 1), mt_row_offsets(p), .x = p->io.x};
    a.y = h, a.dy = dh, a.dx = p->io.dx, a.w = adapter->a.w, a.dw = adapter->a.dw;
    if (part >= 0) {
        int64_t column = part * adapter->rank;
        a.N = b->N, a.K = adapter->rank, a.w = b->b.w, a.dw = b->b.dw;
        a.x = mt_at(h, column, dtype), a.dx = mt_at(dh, column, dtype);
        a.y = mt_at(p->io.y, b->first, dtype), a.dy = mt_at(p->io.dy, b->first, dtype);
    }
    a.x_stride = part < 0 ? p->l->K : adapter->R, a.y_stride = part < 0 ? adapter->R : p->l->N;
    return a;
}

static bool mt_adapter_drops(const mt_product *p) {
    return p->pass.training && p->l->adapter.dropout.p > 0;
}

/* out = residual + dropout(x), for rows of l->K elements; returns out. */
static void *mt_adapter_dropout(const mt_product *p, void *out, const void *x, const void *residual) {
    const mt_tensor_parallel *tp = p->tp;
    bool is_part = p->l->kind == MT_LINEAR_REPLICATED && tp->sequence_parallel;
    mt_dropout_add_args a = {p->T, p->l->K, p->l->adapter.first_channel, .x = x, .residual = residual, .out = out};
    a.token_index = p->pass.token_index + (is_part ? tp->group->rank * tp->rows : p->first_row);
    a.dropout = p->l->adapter.dropout;
    tp->ops->dropout_add_forward(&a, tp->dtype, tp->stream);
    return out;
}

/* Computes h; returns dropout(x). */
static const void *mt_adapter_down(const mt_product *p) {
    mt_grouped_args a = mt_adapter_args(p, -1);
    a.scale = p->l->adapter.scale;
    if (mt_adapter_drops(p)) a.x = mt_adapter_dropout(p, p->l->adapter.scratch->x, p->io.x, NULL);
    p->tp->ops->grouped_linear_forward(&a, p->tp->dtype, p->tp->stream);
    return a.x;
}

/* y += the adapters' outputs. */
static void mt_adapter_forward(const mt_product *p) {
    mt_adapter_down(p);
    for (int64_t part = 0; part < p->l->adapter.num_parts; part++) {
        mt_grouped_args a = mt_adapter_args(p, part);
        a.accumulate = true;
        p->tp->ops->grouped_linear_forward(&a, p->tp->dtype, p->tp->stream);
    }
}

/* Computes dh. */
static void mt_adapter_up_backward(const mt_product *p) {
    for (int64_t part = 0; part < p->l->adapter.num_parts; part++) {
        mt_grouped_args a = mt_adapter_args(p, part);
        a.scale = p->l->adapter.scale;
        p->tp->ops->grouped_linear_backward_input(&a, p->tp->dtype, p->tp->stream);
    }
}

/* dx += the gradient through the adapters. */
static void mt_adapter_backward_input(const mt_product *p) {
    mt_grouped_args a = mt_adapter_args(p, -1);
    void *dropped = p->l->adapter.scratch->x;
    bool drops = mt_adapter_drops(p);
    mt_adapter_up_backward(p);
    a.dx = drops ? dropped : p->io.dx, a.accumulate = !drops;
    p->tp->ops->grouped_linear_backward_input(&a, p->tp->dtype, p->tp->stream);
    if (drops) mt_adapter_dropout(p, p->io.dx, dropped, p->io.dx);
}

/* The gradients of a and b. */
static void mt_adapter_backward_weight(const mt_product *p) {
    const mt_adapter *adapter = &p->l->adapter;
    const void *x = mt_adapter_down(p);
    mt_adapter_up_backward(p);
    for (int64_t part = -1; part < adapter->num_parts; part++) {
        mt_grouped_args a = mt_adapter_args(p, part);
        a.accumulate = mt_weight_accumulates(part < 0 ? &adapter->a : &adapter->parts[part].b);
        if (part < 0) a.x = x;
        p->tp->ops->grouped_linear_backward_weight(&a, p->tp->dtype, p->tp->stream);
    }
}

/* ---- the product alone */

bool mt_linear_fuses_gelu(const mt_ops *ops, const mt_linear *l) {
    bool plain = (l->kind == MT_LINEAR_COLUMN || l->kind == MT_LINEAR_ROW || l->kind == MT_LINEAR_REPLICATED) &&
                 !l->fp8 && !mt_linear_adapts(l);
    return plain && ops->linear_gelu_forward && ops->linear_backward_gelu;
}

/* The operands of a grouped product in the type of activations. */
static mt_grouped_args mt_product_groups(const mt_product *p) {
    const mt_row_groups *groups = p->io.groups;
    return (mt_grouped_args){.M = p->T,
                             .N = p->l->N,
                             .K = p->l->K,
                             .E = p->l->num_experts,
                             .offsets = groups->offsets,
                             .host_offsets = groups->host_offsets,
                             .x = p->io.x,
                             .y = p->io.y,
                             .dy = p->io.dy,
                             .dx = p->io.dx,
                             .w = p->l->weight.w,
                             .dw = p->l->weight.dw};
}

static void mt_multiply_forward(const mt_product *p) {
    const mt_ops *ops = p->tp->ops;
    const mt_linear *l = p->l;
    const mt_linear_io *io = &p->io;
    const void *bias = p->omits_bias ? NULL : l->bias.w;
    mt_dtype dtype = p->tp->dtype;
    mt_stream *stream = p->tp->stream;
    if (l->fp8) {
        mt_fp8_product_args a = {.a = p->left, .M = p->T, .N = l->N, .K = l->K, .out = io->y, .out_dtype = dtype};
        a.bias = io->groups ? NULL : bias;
        mt_fp8_run_product(p, a);
    } else if (io->groups) {
        mt_grouped_args a = mt_product_groups(p);
        ops->grouped_linear_forward(&a, dtype, stream);
    } else {
        mt_linear_args a = {p->T, l->N, l->K, .x = io->x, .w = l->weight.w, .bias = bias, .y = io->y};
        if (p->gelu) {
            a.pre = io->y, a.y = p->gelu;
            ops->linear_gelu_forward(&a, dtype, stream);
        } else {
            ops->linear_forward(&a, dtype, stream);
        }
    }
    if (io->groups && bias)
        ops->grouped_bias_forward(io->y, bias, io->groups->offsets, p->T, l->N, l->num_experts, dtype, stream);
}

static void mt_multiply_backward_input(const mt_product *p) {
    const mt_ops *ops = p->tp->ops;
    const mt_linear *l = p->l;
    const mt_linear_io *io = &p->io;
    mt_dtype dtype = p->tp->dtype;
    mt_stream *stream = p->tp->stream;
    if (l->fp8) {
        mt_fp8_product_args a = {.a = p->left, .M = p->T, .N = l->K, .K = l->N, .out = io->dx, .out_dtype = dtype};
        a.exact_sums = true;
        mt_fp8_run_product(p, a);
    } else if (io->groups) {
        mt_grouped_args a = mt_product_groups(p);
        ops->grouped_linear_backward_input(&a, dtype, stream);
    } else {
        mt_linear_args a = {p->T, l->N, l->K, .x = p->gelu_of, .w = l->weight.w, .dy = io->dy, .dx = io->dx};
        (p->gelu_of ? ops->linear_backward_gelu : ops->linear_backward_input)(&a, dtype, stream);
    }
}

static void mt_multiply_backward_weight(const mt_product *p) {
    const mt_ops *ops = p->tp->ops;
    const mt_linear *l = p->l;
    const mt_linear_io *io = &p->io;
    mt_dtype dtype = p->tp->dtype;
    mt_stream *stream = p->tp->stream;
    bool accumulate = mt_weight_accumulates(&l->weight);
    if (p->dy_transposed.data) { // in fp8
        mt_fp8_product_args a = {.a = p->dy_transposed, .M = l->N, .N = l->K, .K = p->T, .out = l->weight.dw};
        a.out_dtype = MT_F32, a.accumulate = accumulate, a.exact_sums = a.sums_rows = true;
        mt_fp8_run_product(p, a);
        if (l->bias.dw && !io->groups) ops->column_sums(l->bias.dw, io->dy, p->T, l->N, dtype, stream);
    } else if (io->groups) {
        mt_grouped_args a = mt_product_groups(p);
        a.accumulate = accumulate;
        ops->grouped_linear_backward_weight(&a, dtype, stream);
    } else {
        mt_linear_args a = {p->T, l->N, l->K, .x = io->x, .dy = io->dy, .dw = l->weight.dw, .dbias = l->bias.dw};
        a.accumulate = accumulate;
        ops->linear_backward_weight(&a, dtype, stream);
    }
    if (io->groups && l->bias.dw)
        ops->grouped_bias_backward(l->bias.dw, io->dy, io->groups->offsets, p->T, l->N, l->num_experts, dtype, stream);
}

/* ---- quantization, the product, adapters */

/* y = x w^T + bias. */
static void mt_product_forward(mt_product p) {
    mt_fp8_before_forward(&p);
    mt_multiply_forward(&p);
    if (mt_linear_adapts(p.l)) mt_adapter_forward(&p);
}

/* dx = dy w. */
static void mt_product_backward_input(mt_product p) {
    mt_fp8_before_backward_input(&p);
    mt_multiply_backward_input(&p);
    if (mt_linear_adapts(p.l)) mt_adapter_backward_input(&p);
}

/* dw = dy^T x, or += if dw holds a gradient; dbias += column sums of dy; frozen: only the adapters' gradients. */
static void mt_product_backward_weight(mt_product p) {
    if (p.l->weight.dw) {
        mt_fp8_before_backward_weight(&p);
        mt_multiply_backward_weight(&p);
    }
    if (mt_linear_adapts(p.l)) mt_adapter_backward_weight(&p);
}

/* ---- column parallel: x[rows, K] -> y[T, N/tp] */

static void mt_column_forward(const mt_product *whole) {
    const mt_tensor_parallel *tp = whole->tp;
    const mt_linear *l = whole->l;
    const mt_linear_io *io = &whole->io;
    mt_product part = *whole;
    part.T = tp->overlaps ? tp->rows : tp->T;
    if (!tp->overlaps) {
        part.io.x = mt_region_enter_forward(tp, io->x, l->K, tp->stream);
        mt_product_forward(part);
        return;
    }
    for (int step = 0, owner; step < tp->group->size; step++) { // overlaps the transfer of the next rank's rows
        part.io.x = mt_gather_step(tp, io->x, l->K, step, &owner);
        part.io.y = mt_rows_of_rank(tp, io->y, owner, l->N), part.first_row = owner * tp->rows;
        if (whole->gelu) part.gelu = mt_rows_of_rank(tp, whole->gelu, owner, l->N);
        mt_product_forward(part);
    }
}

/* The gather of x overlaps the input's product; the reduction of dx overlaps the weight's product. */
static void mt_column_backward(const mt_product *whole, int halves) {
    const mt_tensor_parallel *tp = whole->tp;
    const mt_linear *l = whole->l;
    const mt_linear_io *io = &whole->io;
    mt_product p = *whole;
    bool parallel = tp->group->size > 1;
    p.T = tp->T;
    if (parallel && (halves & MT_BACKWARD_WEIGHT)) {
        tp->ops->stream_wait_stream(tp->comm, tp->stream);
        p.io.x = mt_gather_overlapped(tp, io->x, l->K);
    }
    mt_fp8_before_backward(&p, halves);
    p.io.dx = mt_region_partial(tp, io->dx);
    if (halves & MT_BACKWARD_INPUT) mt_product_backward_input(p);
    if (parallel && (halves & MT_BACKWARD_WEIGHT)) tp->ops->stream_wait_stream(tp->stream, tp->comm);
    if (parallel && (halves & MT_BACKWARD_INPUT)) mt_scatter_begin(tp, io->dx, l->K);
    if (halves & MT_BACKWARD_WEIGHT) mt_product_backward_weight(p);
    if (parallel && (halves & MT_BACKWARD_INPUT)) mt_scatter_end(tp, io->dx, l->K);
}

/* ---- row parallel: x[T, K/tp] -> y[T, N]+tp -> y[rows, N] */

/* Only the first rank adds the bias. */
static void mt_row_forward(const mt_product *whole) {
    const mt_tensor_parallel *tp = whole->tp;
    const mt_linear *l = whole->l;
    const mt_linear_io *io = &whole->io;
    mt_product part = *whole;
    part.T = tp->overlaps ? tp->rows : tp->T, part.omits_bias = tp->group->rank > 0;
    if (!tp->overlaps) {
        part.io.y = mt_region_partial(tp, io->y);
        mt_product_forward(part);
        mt_region_leave_forward(tp, io->y, l->N);
        return;
    }
    for (int step = 1; step <= tp->group->size; step++) { // the transfer of one rank's part overlaps the next product
        int owner = mt_tensor_rank_after(tp, step);
        part.io.y = mt_rows_of_rank(tp, tp->partial, owner, l->N), part.io.x = mt_rows_of_rank(tp, io->x, owner, l->K);
        part.first_row = owner * tp->rows;
        mt_product_forward(part);
        if (step == tp->group->size) break; // this rank's own
        tp->ops->stream_wait_stream(tp->comm, tp->stream);
        mt_scatter_step(tp, l->N, step);
    }
    mt_scatter_sum(tp, io->y, l->N);
}

/* dx from dy[rows, N], one rank's rows at a time; returns dy of all rows. */
static const void *mt_row_backward_input_overlapped(const mt_product *whole) {
    const mt_tensor_parallel *tp = whole->tp;
    const mt_linear *l = whole->l;
    const mt_linear_io *io = &whole->io;
    mt_product part = *whole;
    part.T = tp->rows;
    for (int step = 0, owner; step < tp->group->size; step++) {
        part.io.dy = mt_gather_step(tp, io->dy, l->N, step, &owner);
        part.io.dx = mt_rows_of_rank(tp, io->dx, owner, l->K), part.first_row = owner * tp->rows;
        if (whole->gelu_of) part.gelu_of = mt_rows_of_rank(tp, whole->gelu_of, owner, l->K);
        mt_fp8_before_backward(&part, MT_BACKWARD_INPUT);
        mt_product_backward_input(part);
    }
    const void *dy = mt_gather_own(tp, io->dy, l->N);
    tp->ops->stream_wait_stream(tp->stream, tp->comm);
    return dy;
}

/* Every rank computes the same dbias over all rows. */
static void mt_row_backward(const mt_product *whole, int halves) {
    const mt_tensor_parallel *tp = whole->tp;
    const void *dy = whole->io.dy;
    mt_product p = *whole;
    bool in_steps = tp->overlaps && (halves & MT_BACKWARD_INPUT);
    p.T = tp->T;
    p.io.dy = in_steps ? mt_row_backward_input_overlapped(whole) : mt_region_leave_backward(tp, dy, whole->l->N);
    if (in_steps) halves &= ~MT_BACKWARD_INPUT;
    mt_fp8_before_backward(&p, halves);
    if (halves & MT_BACKWARD_WEIGHT) mt_product_backward_weight(p);
    if (halves & MT_BACKWARD_INPUT) mt_product_backward_input(p);
}

/* ---- the functions for layers */

/* A use of a linear; T is that of one that is not cut among ranks. */
static mt_product mt_linear_use(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io) {
    return (mt_product){.pass = pass,
                        .tp = pass.tp,
                        .l = l,
                        .io = *io,
                        .T = l->kind == MT_LINEAR_GROUPED ? io->groups->num_rows : pass.tp->rows,
                        .omits_bias = l->omits_bias};
}

static void mt_use_forward(const mt_product *p) {
    const mt_tensor_parallel *tp = p->tp;
    const mt_linear *l = p->l;
    mt_fp8_begin(&p->pass, l, &p->io);
    if (l->kind == MT_LINEAR_ROUTER)
        tp->ops->router_logits(
            &(mt_linear_args){tp->rows, l->N, l->K, .x = p->io.x, .w = l->weight.w, .bias = l->bias.w, .y = p->io.y},
            tp->dtype, tp->stream);
    else if (l->kind == MT_LINEAR_COLUMN)
        mt_column_forward(p);
    else if (l->kind == MT_LINEAR_ROW)
        mt_row_forward(p);
    else
        mt_product_forward(*p);
}

/* True if a backward computes gradients of parameters. */
static bool mt_linear_trains(const mt_linear *l) {
    return l->weight.dw || mt_linear_adapts(l);
}

static void mt_use_backward(const mt_product *use, int halves) {
    mt_product p = *use;
    if (!mt_linear_trains(p.l)) halves &= MT_BACKWARD_INPUT;
    if (halves == 0) return;
    mt_fp8_begin(&p.pass, p.l, &p.io);
    if (p.l->kind == MT_LINEAR_COLUMN) {
        mt_column_backward(use, halves);
    } else if (p.l->kind == MT_LINEAR_ROW) {
        mt_row_backward(use, halves);
    } else {
        mt_fp8_before_backward(&p, halves);
        if (halves & MT_BACKWARD_INPUT) mt_product_backward_input(p);
        if (halves & MT_BACKWARD_WEIGHT) mt_product_backward_weight(p);
    }
}

void mt_linear_forward(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io) {
    mt_product use = mt_linear_use(pass, l, io);
    mt_use_forward(&use);
}

void mt_linear_gelu_forward(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io, void *gelu) {
    mt_product use = mt_linear_use(pass, l, io);
    use.gelu = gelu;
    mt_use_forward(&use);
}

void mt_linear_backward(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io, int halves) {
    mt_product use = mt_linear_use(pass, l, io);
    mt_use_backward(&use, halves);
}

void mt_linear_gelu_backward(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io, const void *gelu_of,
                             int halves) {
    mt_product use = mt_linear_use(pass, l, io);
    use.gelu_of = gelu_of;
    mt_use_backward(&use, halves);
}

void mt_linear_backward_input(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io) {
    mt_linear_backward(pass, l, io, MT_BACKWARD_INPUT);
}

void mt_linear_backward_weight(mt_linear_pass pass, const mt_linear *l, const mt_linear_io *io) {
    mt_linear_backward(pass, l, io, MT_BACKWARD_WEIGHT);
}

/* ==== §7a vocabulary-parallel embedding and loss ================================================================= */
void mt_vocab_embedding_forward(const mt_tensor_parallel *tp, void *out, const int32_t *ids, mt_weight w, int64_t C,
                                int64_t first, int64_t count) {
    mt_embedding_args a = {tp->T, C, first, count, ids, w.w, .out = mt_region_partial(tp, out)};
    tp->ops->embedding_forward(&a, tp->dtype, tp->stream);
    mt_region_leave_forward(tp, out, C);
}

void mt_vocab_embedding_backward(const mt_tensor_parallel *tp, const void *dout, const int32_t *ids, mt_weight w,
                                 int64_t C, int64_t first, int64_t count) {
    mt_embedding_args a = {tp->T, C, first, count, ids, .dw = w.dw};
    if (!w.dw) return; // frozen
    a.dout = mt_region_leave_backward(tp, dout, C);
    tp->ops->embedding_backward(&a, tp->dtype, tp->stream);
}

void mt_vocab_cross_entropy_forward(const mt_tensor_parallel *tp, const mt_cross_entropy_args *a) {
    const mt_ops *ops = tp->ops;
    ops->cross_entropy_forward(a, tp->dtype, tp->stream);
    if (tp->group->size > 1) { // ranks exchange 3 or 4 numbers of a row instead of logits
        ops->all_gather(tp->loss_parts, a->stats, (a->entropy ? 4 : 3) * a->T, MT_F32, tp->group, tp->stream);
        ops->cross_entropy_combine(a, tp->loss_parts, tp->group->size, tp->stream);
    }
    ops->cross_entropy_loss(a, tp->stream);
}

/* ==== §7b losses after pre-training =============================================================================== */
/* Losses of policies, critics, preferences and rewards on the numbers that a model yields per token, on the host. A
 * loss is a sum over tokens, each with a weight that depends on its sequence alone, and a count over sequences: so
 * micro-batches and layouts do not change loss / count. Invariant: tokens that do not count are neither read nor
 * written. */

#define MT_MEAN_EPSILON 1e-8 // verl's, in denominators of means; a sequence of one token would show its absence

/* log sigmoid(x) without overflow. */
static double mt_log_sigmoid(double x) {
    return mt_minimum(x, 0) - log1p(exp(-fabs(x)));
}

/* The first token of sequence s; *end: the one behind its last. */
static int64_t mt_sequence_tokens(const mt_span *s, int64_t *end) {
    *end = s->q_start + s->q_len;
    return s->q_start;
}

static int64_t mt_counted_tokens(const mt_span *sequence, const float *mask) {
    int64_t end, counted = 0;
    for (int64_t t = mt_sequence_tokens(sequence, &end); t < end; t++) counted += mask[t] != 0;
    return counted;
}

/* Adds a sequence of `counted` tokens to the count of a loss; returns the weight of its tokens. */
static double mt_loss_weight(const mt_aggregation *a, int64_t counted, mt_loss_sums *sums) {
    if (a->mode == MT_TOKEN_MEAN) {
        sums->count += (double)counted;
        return 1;
    }
    bool norm = a->mode == MT_SEQ_MEAN_TOKEN_SUM_NORM;
    if (counted > 0 || a->counts_empty) sums->count += norm && a->norm_sequences ? 1.0 / (double)a->norm_sequences : 1;
    if (norm) return 1 / a->norm_length;
    return a->mode == MT_SEQ_MEAN_TOKEN_SUM ? 1 : 1 / ((double)counted + MT_MEAN_EPSILON);
}

/* ---- policies */

/* The policy loss of one token and its derivative by logp. */
typedef struct mt_policy_term {
    double loss, dlogp;
    bool clipped, clipped_lower;
} mt_policy_term;

/* PPO's clipped surrogate; clip_ratio_c 0: without dual clipping. d ratio / d logp = ratio. */
static mt_policy_term mt_clipped_surrogate(const mt_policy_config *c, double clip_ratio_c, double ratio,
                                           double advantage) {
    double plain = -advantage * ratio, bound = -advantage * clip_ratio_c;
    double clipped = -advantage * mt_bounded(ratio, 1 - c->clip_ratio_low, 1 + c->clip_ratio_high);
    mt_policy_term term = {.loss = plain, .dlogp = plain};
    if (clipped > plain) term = (mt_policy_term){.loss = clipped, .clipped = true};
    if (clip_ratio_c > 0 && advantage < 0 && term.loss > bound)
        term.loss = bound, term.dlogp = 0, term.clipped_lower = true;
    return term;
}

/* The ratio that all tokens of a sequence share, and its derivative's factors. */
typedef struct mt_policy_sequence {
    double ratio, dratio, advantage; // dratio: d ratio / d logp times the tokens; advantage: the mean
    double weight;                   // GMPO: the geometric mean of the rollout weights
} mt_policy_sequence;

static double mt_log_ratio(const mt_loss_tokens *t, int64_t i) {
    return t->old_logp ? mt_finite(t->logp[i] - t->old_logp[i]) : 0;
}

/* GMPO clips a token's log-ratio only where that lowers the objective: above for A > 0, below for A < 0. A = 0: 0. */
static double mt_gmpo_log_ratio(const mt_policy_config *c, double x, double advantage) {
    if (advantage > 0) return mt_minimum(x, c->clip_ratio_high);
    if (advantage < 0) return mt_maximum(x, -c->clip_ratio_low);
    return isnan(x) ? x : 0;
}

static mt_policy_sequence mt_policy_sequence_ratio(const mt_loss_tokens *t, const mt_policy_config *c,
                                                   const mt_span *sequence, int64_t counted) {
    bool gmpo = c->variant == MT_POLICY_GMPO;
    double sum = 0, advantages = 0, weights = 0, tokens = (double)counted + (gmpo ? MT_MEAN_EPSILON : 0);
    int64_t end;
    for (int64_t i = mt_sequence_tokens(sequence, &end); i < end; i++) {
        if (t->mask[i] == 0) continue;
        double x = mt_log_ratio(t, i);
        sum += gmpo ? mt_gmpo_log_ratio(c, x, t->advantages[i]) : x;
        advantages += t->advantages[i];
        if (t->rollout_weights) weights += log(t->rollout_weights[i] + 1e-10); // verl's, for weights of 0
    }
    double mean = sum / tokens, ratio = exp(gmpo ? mean : mt_minimum(mean, 10));
    return (mt_policy_sequence){ratio, gmpo || !(mean > 10) ? ratio : 0, advantages / tokens, exp(weights / tokens)};
}

/* A loss -A w logp whose weight w has no gradient; w is changed from r: `clipped`. */
static mt_policy_term mt_weighted_logp(double advantage, double weight, double logp, bool clipped) {
    double dlogp = -weight * advantage;
    return (mt_policy_term){.loss = dlogp * logp, .dlogp = dlogp, .clipped = clipped};
}

/* True if DPPO leaves a token out: the policy has moved by more than its bound in the direction of its advantage. */
static bool mt_dppo_masks(const mt_policy_config *c, double logp, double x, double advantage) {
    double p = exp(logp), old_logp = logp - x, old = exp(old_logp), moved = p - old;
    if (c->variant == MT_POLICY_DPPO_TV)
        return !(advantage > 0 ? moved <= c->clip_ratio_high : moved >= -c->clip_ratio_low);
    double divergence = old * -x + (1 - old) * log((1 - old + MT_MEAN_EPSILON) / (1 - p + MT_MEAN_EPSILON));
    return !(advantage > 0 ? divergence <= c->clip_ratio_high || moved <= 0
                           : divergence <= c->clip_ratio_low || moved >= 0);
}

static mt_policy_term mt_policy_token(const mt_loss_tokens *t, const mt_policy_config *c, int64_t i,
                                      const mt_policy_sequence *sequence) {
    double advantage = t->advantages[i], x = mt_log_ratio(t, i), ratio = exp(mt_bounded(x, -20, 20));
    bool selected = t->selected && t->selected[i] != 0;
    mt_policy_term term = {0};
    switch (c->variant) {
    case MT_POLICY_PPO:
    case MT_POLICY_VANILLA:
        term = mt_clipped_surrogate(c, c->clip_ratio_c, ratio, advantage);
        if (fabs(x) > 20) term.dlogp = 0;
        break;
    case MT_POLICY_GSPO: // the gradient of a token has its own advantage (GSPO-token)
        term = mt_clipped_surrogate(c, 0, sequence->ratio, advantage);
        if (sequence->dratio == 0) term.dlogp = 0;
        break;
    case MT_POLICY_CISPO:
    case MT_POLICY_TIS: {
        double clipped = mt_bounded(ratio, 1 - c->clip_ratio_low, 1 + c->clip_ratio_high);
        term = mt_weighted_logp(advantage, clipped, t->logp[i], ratio != clipped);
        break;
    }
    case MT_POLICY_TOPR: {
        double weight = selected ? c->weight_pos : c->weight_neg * mt_minimum(ratio, 1);
        term = mt_weighted_logp(advantage, weight, t->logp[i], !selected && ratio > 1);
        break;
    }
    case MT_POLICY_DPPO_TV:
    case MT_POLICY_DPPO_KL: {
        double bounded = c->clip_ratio_c > 0 ? mt_minimum(ratio, c->clip_ratio_c) : ratio;
        bool masked = mt_dppo_masks(c, t->logp[i], x, advantage);
        term = mt_weighted_logp(advantage, masked ? 0 * ratio : bounded, t->logp[i], masked); // NaN stays
        term.clipped_lower = !masked && ratio != bounded;
        break;
    }
    case MT_POLICY_SAPO: {
        double tau = advantage > 0 ? c->tau_pos : c->tau_neg, gate = 1 / (1 + exp(-tau * (ratio - 1)));
        term.loss = -advantage * gate * 4 / tau;
        term.dlogp = fabs(x) > 20 ? 0 : -advantage * 4 * gate * (1 - gate) * ratio;
        break;
    }
    case MT_POLICY_DRO:
    case MT_POLICY_KIMI15:
        term.loss = -advantage * t->logp[i] + c->beta / 2 * x * x, term.dlogp = -advantage + c->beta * x;
        break;
    case MT_POLICY_OPMD:
        term = mt_weighted_logp(advantage, 1 / (1 + c->beta), t->logp[i], false);
        break;
    case MT_POLICY_SPPO: {
        double clipped = mt_bounded(x, -log1p(c->clip_ratio_low), log1p(c->clip_ratio_high));
        term.clipped = x != clipped;
        term.loss = -advantage * clipped, term.dlogp = term.clipped ? 0 * x : -advantage;
        break;
    }
    case MT_POLICY_KL_COV:
        term.loss = -advantage * ratio, term.dlogp = fabs(x) > 20 ? 0 : term.loss;
        if (selected) term.loss += c->kl_cov_coef * fabs(x), term.dlogp += c->kl_cov_coef * ((x > 0) - (x < 0));
        break;
    case MT_POLICY_CLIP_COV:
        term = mt_clipped_surrogate(c, 0, ratio, advantage);
        if (fabs(x) > 20) term.dlogp = 0;
        if (selected) term = (mt_policy_term){.loss = 0 * term.loss, .dlogp = 0 * term.loss, .clipped = true};
        break;
    case MT_POLICY_GMPO:
        term.loss = -advantage * sequence->ratio;
        if (advantage != 0 && mt_gmpo_log_ratio(c, x, advantage) == x)
            term.dlogp = -sequence->advantage * sequence->dratio;
        term.clipped = advantage > 0 && (x < -c->clip_ratio_low || x > c->clip_ratio_high);
        term.clipped_lower = advantage < 0 && (x < -c->clip_ratio_low || x > c->clip_ratio_high);
        break;
    case MT_POLICY_GPG:
        term = mt_weighted_logp(advantage, 1, t->logp[i], false);
        break;
    }
    if (t->rollout_weights) {
        double weight = c->variant == MT_POLICY_GMPO ? sequence->weight : t->rollout_weights[i];
        term.loss *= weight, term.dlogp *= weight;
    }
    return term;
}

double mt_kl_estimate(mt_kl_type type, double logp, double ref_logp, double *dlogp) {
    double x = mt_finite(ref_logp - logp), clamped = mt_bounded(x, -20, 20), k3 = exp(clamped) - clamped - 1;
    bool k1 = type == MT_KL_K1, k2 = type == MT_KL_K2, absolute = type == MT_KL_ABS;
    double slope = fabs(x) > 20 || k3 > 10 ? 0 : 1 - exp(x); // of k3
    *dlogp = k1 ? 1 : k2 ? -x : absolute ? (x < 0) - (x > 0) : slope;
    return k1 ? -x : k2 ? x * x / 2 : absolute ? fabs(x) : mt_minimum(k3, 10);
}

/* Adds token i, whose loss has weight `weight`. */
static void mt_policy_add(const mt_loss_tokens *t, const mt_policy_config *c, int64_t i, double weight,
                          const mt_policy_sequence *sequence, mt_loss_sums *sums) {
    mt_policy_term term = {0};
    double dkl = 0, kl = t->ref_logp ? mt_kl_estimate(c->kl_type, t->logp[i], t->ref_logp[i], &dkl) : 0;
    double entropy = t->entropy ? t->entropy[i] : 0;
    if (t->advantages) term = mt_policy_token(t, c, i, sequence);
    sums->loss += weight * (term.loss + c->kl_coef * kl - c->entropy_coef * entropy);
    if (t->dlogp) t->dlogp[i] += weight * (term.dlogp + c->kl_coef * dkl);
    if (t->dentropy) t->dentropy[i] -= weight * c->entropy_coef;
    sums->metrics[MT_POLICY_TOKENS] += 1;
    sums->metrics[MT_POLICY_CLIPFRAC] += term.clipped;
    sums->metrics[MT_POLICY_CLIPFRAC_LOWER] += term.clipped_lower;
    double x = mt_bounded(mt_log_ratio(t, i), -20, 20);
    sums->metrics[MT_POLICY_PPO_KL] += c->variant == MT_POLICY_KL_COV ? fabs(x) : -x;
    sums->metrics[MT_POLICY_REF_KL] += kl;
    sums->metrics[MT_POLICY_ENTROPY] += entropy;
}

void mt_policy_loss(const mt_loss_tokens *t, const mt_policy_config *c, mt_loss_sums *sums) {
    bool by_sequence = c->variant == MT_POLICY_GSPO || c->variant == MT_POLICY_GMPO;
    mt_aggregation aggregation = c->aggregation;
    if (by_sequence || c->variant == MT_POLICY_SAPO) aggregation.mode = MT_SEQ_MEAN_TOKEN_MEAN;
    MT_CHECK((t->ref_logp || c->kl_coef == 0) && (t->entropy || c->entropy_coef == 0));
    for (const mt_span *span = t->sequences; span < t->sequences + t->num_sequences; span++) {
        int64_t end, counted = mt_counted_tokens(span, t->mask);
        double weight = mt_loss_weight(&aggregation, counted, sums);
        mt_policy_sequence sequence = {0};
        if (by_sequence && t->advantages && counted > 0) sequence = mt_policy_sequence_ratio(t, c, span, counted);
        for (int64_t i = mt_sequence_tokens(span, &end); i < end; i++)
            if (t->mask[i] != 0) mt_policy_add(t, c, i, weight, &sequence, sums);
    }
}

/* ---- critics */

void mt_value_loss(const mt_loss_tokens *t, const mt_value_config *c, mt_loss_sums *sums) {
    for (const mt_span *span = t->sequences; span < t->sequences + t->num_sequences; span++) {
        int64_t end, counted = mt_counted_tokens(span, t->mask);
        double weight = mt_loss_weight(&c->aggregation, counted, sums);
        for (int64_t i = mt_sequence_tokens(span, &end); i < end; i++) {
            if (t->mask[i] == 0) continue;
            double value = t->values[i], target = t->returns[i], error = value - target, clipped = value;
            if (c->clip > 0) clipped = mt_bounded(value, t->old_values[i] - c->clip, t->old_values[i] + c->clip);
            double plain = error * error, other = (clipped - target) * (clipped - target);
            sums->loss += weight * mt_maximum(plain, other) / 2;
            if (t->dvalues && plain >= other) t->dvalues[i] += weight * error;
            sums->metrics[MT_VALUE_TOKENS] += 1;
            sums->metrics[MT_VALUE_CLIPFRAC] += other > plain;
            sums->metrics[MT_VALUE_VALUES] += value;
            sums->metrics[MT_VALUE_RETURNS] += target;
            sums->metrics[MT_VALUE_RETURNS_SQUARED] += target * target;
            sums->metrics[MT_VALUE_ERRORS_SQUARED] += plain;
        }
    }
}

/* ---- preferences and rewards */

static bool mt_pair_counts(const mt_loss_tokens *t, int64_t pair) {
    const mt_span *chosen = &t->sequences[2 * pair];
    return mt_counted_tokens(chosen, t->mask) + mt_counted_tokens(chosen + 1, t->mask) > 0;
}

static void mt_pair_metrics(mt_loss_sums *sums, double chosen, double rejected) {
    sums->count += 1;
    sums->metrics[MT_PAIR_ACCURACY] += chosen > rejected;
    sums->metrics[MT_PAIR_CHOSEN] += chosen;
    sums->metrics[MT_PAIR_REJECTED] += rejected;
    sums->metrics[MT_PAIR_MARGIN] += chosen - rejected;
}

/* The loss of h; *dh: its derivative. */
static double mt_preference_of_margin(const mt_preference_config *c, double h, double *dh) {
    double x = c->beta * h, s = c->label_smoothing, distance = h - 1 / (2 * c->beta);
    switch (c->variant) {
    case MT_PREFERENCE_SIGMOID:
        *dh = c->beta * (s * exp(mt_log_sigmoid(x)) - (1 - s) * exp(mt_log_sigmoid(-x)));
        return -(1 - s) * mt_log_sigmoid(x) - s * mt_log_sigmoid(-x);
    case MT_PREFERENCE_IPO:
        *dh = 2 * distance;
        return distance * distance;
    case MT_PREFERENCE_HINGE:
        break;
    }
    *dh = x >= 1 ? 0 : -c->beta;
    return mt_maximum(0, 1 - x);
}

void mt_preference_loss(const mt_loss_tokens *t, const mt_preference_config *c, mt_loss_sums *sums) {
    for (int64_t pair = 0; pair < t->num_sequences / 2; pair++) {
        double log_ratio[2] = {0}, dh;
        int64_t end;
        if (!mt_pair_counts(t, pair)) continue;
        for (int side = 0; side < 2; side++)
            for (int64_t i = mt_sequence_tokens(&t->sequences[2 * pair + side], &end); i < end; i++)
                if (t->mask[i] != 0) log_ratio[side] += t->logp[i] - (t->ref_logp ? t->ref_logp[i] : 0);
        sums->loss += mt_preference_of_margin(c, mt_finite(log_ratio[0] - log_ratio[1]), &dh);
        mt_pair_metrics(sums, c->beta * log_ratio[0], c->beta * log_ratio[1]);
        for (int side = 0; side < 2 && t->dlogp; side++)
            for (int64_t i = mt_sequence_tokens(&t->sequences[2 * pair + side], &end); i < end; i++)
                if (t->mask[i] != 0) t->dlogp[i] += side ? -dh : dh;
    }
}

void mt_reward_loss(const mt_loss_tokens *t, const mt_reward_config *c, mt_loss_sums *sums) {
    for (int64_t pair = 0; pair < t->num_sequences / 2; pair++) {
        int64_t end[2];
        if (!mt_pair_counts(t, pair)) continue;
        for (int side = 0; side < 2; side++) mt_sequence_tokens(&t->sequences[2 * pair + side], &end[side]);
        double chosen = t->values[end[0] - 1], rejected = t->values[end[1] - 1];
        double x = mt_finite(chosen - rejected - c->margin);
        sums->loss += c->center_coef * (chosen + rejected) * (chosen + rejected) - mt_log_sigmoid(x);
        mt_pair_metrics(sums, chosen, rejected);
        if (!t->dvalues) continue;
        t->dvalues[end[0] - 1] += 2 * c->center_coef * (chosen + rejected) - exp(mt_log_sigmoid(-x));
        t->dvalues[end[1] - 1] += 2 * c->center_coef * (chosen + rejected) + exp(mt_log_sigmoid(-x));
    }
}

/* ---- distillation */

static double mt_log_sum_exp(const double *logits, int64_t K, double temperature) {
    double greatest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < K; i++) greatest = mt_maximum(greatest, logits[i] / temperature);
    for (int64_t i = 0; i < K; i++) sum += exp(logits[i] / temperature - greatest);
    return greatest + log(sum);
}

/* log((1 - weight) exp(a) + weight exp(b)) */
static double mt_log_mix(double weight, double a, double b) {
    double x = log1p(-weight) + a, y = log(weight) + b;
    return mt_maximum(x, y) + log1p(exp(mt_minimum(x, y) - mt_maximum(x, y)));
}

static int mt_compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The share of forward KL in adaptive KL: the gap of the head divided by that of all labels. `scratch` [K]. */
static double mt_adaptive_share(const mt_divergence_config *c, const double *student, double student_lse,
                                const double *teacher, double teacher_lse, int64_t K, double *scratch) {
    double tail = 0, gaps[2] = {0};
    int64_t count = 0;
    for (int64_t i = 0; i < K; i++) scratch[i] = exp(teacher[i] / c->temperature - teacher_lse);
    qsort(scratch, (size_t)K, sizeof *scratch, mt_compare_doubles);
    while (count < K && tail + scratch[count] <= c->adaptive_alpha) tail += scratch[count++];
    double limit = count < K ? scratch[count] : INFINITY; // the head begins here; of equal labels the first are tail
    int64_t equal = 0;
    for (int64_t i = count; i-- > 0 && scratch[i] == limit;) equal++;
    for (int64_t i = 0; i < K; i++) {
        double q = exp(teacher[i] / c->temperature - teacher_lse), p = exp(student[i] / c->temperature - student_lse);
        gaps[q > limit || (q == limit && equal-- <= 0)] += fabs(q - p);
    }
    return gaps[0] + gaps[1] > 0 ? gaps[1] / (gaps[0] + gaps[1]) : 1;
}

double mt_divergence(const mt_divergence_config *c, const double *student, const double *teacher, int64_t K,
                     double *dstudent) {
    double student_lse = mt_log_sum_exp(student, K, c->temperature), sum = 0, value = 0, lambda = c->skew_lambda;
    double teacher_lse = mt_log_sum_exp(teacher, K, c->temperature), forward = c->type == MT_FORWARD_KL;
    if (c->type == MT_ADAPTIVE_KL)
        forward = mt_adaptive_share(c, student, student_lse, teacher, teacher_lse, K, dstudent);
    for (int64_t i = 0; i < K; i++) { // dstudent: p times the derivative by p
        double lp = student[i] / c->temperature - student_lse, lq = teacher[i] / c->temperature - teacher_lse, mix;
        double p = exp(lp), q = exp(lq);
        dstudent[i] = 0;
        if (isinf(lp) || isinf(lq)) continue;
        switch (c->type) {
        case MT_FORWARD_KL:
        case MT_REVERSE_KL:
        case MT_ADAPTIVE_KL:
            value += (forward * q - (1 - forward) * p) * (lq - lp);
            dstudent[i] = (1 - forward) * p * (lp - lq + 1) - forward * q;
            break;
        case MT_SKEWED_FORWARD_KL:
            mix = mt_log_mix(lambda, lp, lq);
            value += q * (lq - mix);
            dstudent[i] = -(1 - lambda) * q * exp(lp - mix);
            break;
        case MT_SKEWED_REVERSE_KL:
            mix = mt_log_mix(lambda, lq, lp);
            value += p * (lp - mix);
            dstudent[i] = p * (lp - mix + 1 - lambda * exp(lp - mix));
            break;
        case MT_JS_DIVERGENCE:
            mix = mt_log_mix(0.5, lp, lq);
            value += (q * (lq - mix) + p * (lp - mix)) / 2;
            dstudent[i] = p * (lp - mix) / 2;
            break;
        }
        sum += dstudent[i];
    }
    for (int64_t i = 0; i < K; i++)
        dstudent[i] = (dstudent[i] - exp(student[i] / c->temperature - student_lse) * sum) / c->temperature;
    return value;
}

void mt_distillation_loss(const mt_loss_tokens *t, const mt_distillation_config *c, mt_loss_sums *sums) {
    for (int64_t i = 0; i < t->T; i++) {
        if (t->mask[i] == 0) continue;
        sums->loss += c->weight * t->divergence[i] - (1 - c->weight) * t->logp[i], sums->count += 1;
        sums->metrics[MT_DISTILLATION_CROSS_ENTROPY] -= t->logp[i];
        sums->metrics[MT_DISTILLATION_DIVERGENCE] += t->divergence[i];
        t->dlogp[i] -= 1 - c->weight;
    }
}

/* ==== §8 the parameter table ===================================================================================== */
/* One row per role of a parameter: shape, sharding, gradient, initial values, conditions, names, and the field of the
 * model's code. mt_params_build expands these rows into a table of parameters. To add a role: append it to mt_role and
 * add one row here. Invariants: rows stand in the order of a bucket, matrices (which decay) before vectors (which do
 * not); a fused row continues the row above without a gap, so that one matrix product computes both; names are those of
 * Hugging Face. */

/* A norm's parameters, [C] each; RMSNorm has no bias. */
typedef struct mt_norm {
    mt_weight weight, bias;
    const mt_linear *reader; // reads the norm's output in fp8, as the norm stores it; NULL: none
} mt_norm;

/* A layer's parameters. Fused matrices are one linear because their rows are neighbours in the bucket. */
typedef struct mt_layer {
    int64_t number;         // in the whole model
    int64_t index;          // in its chunk
    struct mt_slots *slots; // saved by its forward
    int64_t recompute_unit; // index in its chunk of the first layer of its unit of recomputation: mt_layers_forward
    bool recomputed;        // full recomputation: of a unit only the input is kept
    int64_t offload_bytes;  // of its offloaded slots
    int offload_buffer;     // that they lie in
    /* from here on, all depths of a repeated module are equal: see mt_mtp_share */
    int64_t bucket;
    int64_t expert_bucket; // -1: an MLP, no experts
    int64_t moe_index;     // among this rank's layers with experts
    int64_t F;             // width here of the MLP or the shared expert; 0: none
    int64_t G;             // heads here of keys and values
    mt_layer_kind kind;
    mt_norm input_norm;
    mt_linear qkv; // C -> (H + 2G) D
    mt_weight q_norm, k_norm;
    mt_weight sinks;               // [H]
    mt_linear latent;              // C -> q_lora_rank + kv_lora_rank + R: q_a_proj, then kv_a_proj_with_mqa
    mt_weight q_a_norm, kv_a_norm; // [q_lora_rank], [kv_lora_rank]
    mt_linear q_b, kv_b;           // q_lora_rank (C without a latent) -> H D; kv_lora_rank -> H (D - R + Dv)
    mt_linear indexer_q;           // q_lora_rank -> heads and channels of the indexer of sparse attention
    mt_linear indexer_k;           // C -> channels of its keys
    mt_linear indexer_weights;     // C -> its heads
    mt_norm indexer_k_norm;
    mt_linear gate;               // C -> H D: of attention's output
    mt_linear delta_in;           // C -> q, k, v, z, b, a of a gated delta net; q, k, v, b of Kimi delta attention
    mt_linear f_a, g_a, f_b, g_b; // Kimi delta attention: C -> D -> decays of each channel, gate of the output
    mt_weight conv;               // [q, k and v, taps]
    mt_weight A_log, dt_bias;     // [value heads]; Kimi delta attention: dt_bias of each channel of a key
    mt_weight delta_norm;         // [channels of a value head]
    mt_linear short_in;           // C -> B, C, x of a gated short convolution
    mt_linear mamba_in;           // C -> z, x, B, C, dt of Mamba-2, which has A_log and dt_bias of its heads too
    mt_weight mamba_conv;         // [x, B and C, taps]
    mt_weight mamba_conv_bias;    // [x, B and C]
    mt_weight mamba_norm;         // [heads, channels]
    mt_weight mamba_d;            // [heads]
    mt_linear o;                  // H Dv -> C
    mt_norm attention_out_norm;   // of the output of attention
    mt_norm mlp_norm;
    mt_linear fc1, down;  // C -> 2F, gate then up, or F; F -> C; of the MLP or the shared expert
    mt_norm mlp_out_norm; // of the output of the MLP or the experts
    mt_linear router;     // C -> E
    mt_weight router_bias;
    mt_linear shared_gate;             // C -> 1
    mt_linear expert_fc1, expert_down; // of the experts here: C -> 2F, F -> C; latent ones have L in place of C
    mt_linear experts_in, experts_out; // of latent experts: C -> L, L -> C
    mt_norm mtp_embedding_norm, mtp_hidden_norm, mtp_final_norm;
    mt_linear mtp_projection; // 2C -> C
} mt_layer;

/* Parameters outside the layers. With tied embeddings, the head is word_embedding. */
typedef struct mt_outer {
    mt_weight word_embedding, position_embedding;
    mt_norm final_norm;
    mt_linear head; // C -> V, the vocabulary; or C -> 1, a value
} mt_outer;

/* Norms before and after each block of a layer. */
static bool mt_norms_before(const mt_options *o) {
    return o->norm_placement != MT_NORM_AFTER;
}
static bool mt_norms_after(const mt_options *o) {
    return o->norm_placement != MT_NORM_BEFORE;
}

/* True if query and key heads are normalised (q/k norm), each or, with qk_layernorm_all_heads, together. */
static bool mt_norms_heads(const mt_options *o) {
    return o->qk_layernorm && !o->multi_latent_attention;
}

/* True if RoPE rotates queries and keys. Latent attention has it beside learned positions too, as in Megatron-Core. */
static bool mt_has_rope(const mt_options *o) {
    bool is_learned = o->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE;
    return o->position_embedding_type == MT_POSITION_ROPE || (is_learned && o->multi_latent_attention);
}

bool mt_options_tied(const mt_options *o) {
    return o->head_type == MT_HEAD_LM && !o->untie_embeddings_and_output_weights;
}

static bool mt_mixer_is_latent(mt_mixer_kind mixer) {
    return mixer == MT_MIXER_LATENT_ATTENTION || mixer == MT_MIXER_SPARSE_ATTENTION;
}

static bool mt_mixer_attends(mt_mixer_kind mixer) {
    return mixer == MT_MIXER_ATTENTION || mt_mixer_is_latent(mixer);
}

/* The first --dsa-indexer-skip-topk-offset layers of sparse attention have an indexer, and every
 * --dsa-indexer-topk-freq-th from the last of these on, as in Megatron. */
static bool mt_shares_indices(const mt_options *o, int64_t layer) {
    int64_t after = layer + 1 - mt_max(o->dsa_indexer_skip_topk_offset, 1);
    return o->experimental_attention_variant == MT_VARIANT_DSA && layer < o->num_layers && after > 0 &&
           after % mt_max(o->dsa_indexer_topk_freq, 1) != 0;
}

/* The mixer of the layers in linear_layers. */
static const mt_mixer_kind mt_variant_mixers[] = {
    [MT_VARIANT_GATED_DELTA_NET] = MT_MIXER_GATED_DELTA_NET,
    [MT_VARIANT_GDN] = MT_MIXER_GATED_DELTA_NET,
    [MT_VARIANT_SHORT_CONV] = MT_MIXER_SHORT_CONV,
    [MT_VARIANT_MAMBA2] = MT_MIXER_MAMBA2,
    [MT_VARIANT_KDA] = MT_MIXER_KDA,
};

mt_layer_kind mt_layer_kind_of(const mt_options *o, int64_t layer) {
    int64_t letter = mt_min(layer, o->num_layers - 1);
    bool of_module = o->hybrid_layers && o->mtp_hybrid_layers && layer >= o->num_layers;
    char half = o->hybrid_layers && !of_module ? o->hybrid_layers[letter] : 0;
    bool has_experts = o->moe_layers && o->moe_layers[letter] == '1';
    bool has_window = o->window_size > 0 && (!o->window_layers || o->window_layers[letter] == '1');
    bool has_rope = mt_has_rope(o) && (!o->rope_layers || o->rope_layers[letter] == '1');
    bool is_linear = o->linear_layers && layer < o->num_layers && o->linear_layers[layer] == '1'; // modules attend
    mt_layer_kind kind = {.mixer = o->multi_latent_attention ? MT_MIXER_LATENT_ATTENTION : MT_MIXER_ATTENTION};
    if (is_linear) kind.mixer = mt_variant_mixers[o->experimental_attention_variant];
    if (o->experimental_attention_variant == MT_VARIANT_DSA) kind.mixer = MT_MIXER_SPARSE_ATTENTION;
    kind.shares_indices = mt_shares_indices(o, layer);
    if (half && half != '*') kind.mixer = half == 'M' ? MT_MIXER_MAMBA2 : MT_MIXER_NONE;
    if (!mt_mixer_attends(kind.mixer)) has_window = has_rope = false;
    kind.feed_forward = has_experts ? MT_FEED_FORWARD_EXPERTS : MT_FEED_FORWARD_DENSE;
    if (half && half != '-') kind.feed_forward = half == 'E' ? MT_FEED_FORWARD_EXPERTS : MT_FEED_FORWARD_NONE;
    if (of_module) { // its halves
        bool has_mlp = strchr(o->mtp_hybrid_layers, '-') != NULL, visits = strchr(o->mtp_hybrid_layers, 'E') != NULL;
        if (*o->mtp_hybrid_layers != '*') kind.mixer = MT_MIXER_NONE, has_rope = false;
        kind.feed_forward = visits ? MT_FEED_FORWARD_EXPERTS : has_mlp ? MT_FEED_FORWARD_DENSE : MT_FEED_FORWARD_NONE;
    }
    kind.window = has_window ? o->window_size : 0;
    kind.groups = has_window && o->window_num_query_groups > 0 ? o->window_num_query_groups : o->num_query_groups;
    kind.softmax = has_window || !o->sinks_in_windows_only ? o->softmax_type : MT_SOFTMAX_VANILLA;
    kind.rope = !has_rope ? MT_ROPE_NONE : has_window && o->window_rotary_base > 0 ? MT_ROPE_WINDOW : MT_ROPE_MODEL;
    return kind;
}

mt_dtype mt_options_dtype(const mt_options *o) {
    return o->bf16 ? MT_BF16 : o->fp16 ? MT_F16 : MT_F32;
}

bool mt_has_mixer(const mt_options *o, mt_mixer_kind mixer) {
    for (int64_t i = 0; i < o->num_layers; i++)
        if (mt_layer_kind_of(o, i).mixer == mixer) return true;
    return false;
}

bool mt_has_states(const mt_options *o) {
    for (int64_t i = 0; i < o->num_layers; i++) {
        mt_mixer_kind mixer = mt_layer_kind_of(o, i).mixer;
        if (!mt_mixer_attends(mixer) && mixer != MT_MIXER_NONE) return true;
    }
    return false;
}

int64_t mt_num_mtp_modules(const mt_options *o) {
    return o->mtp_use_repeated_layer ? mt_min(o->mtp_num_layers, 1) : o->mtp_num_layers;
}

int64_t mt_num_dense_layers(const mt_options *o) {
    int64_t layers = 0;
    for (int64_t i = 0; i < o->num_layers; i++) layers += mt_layer_kind_of(o, i).feed_forward == MT_FEED_FORWARD_DENSE;
    return layers;
}

bool mt_layer_has_experts(const mt_options *o, int64_t layer) {
    return mt_layer_kind_of(o, layer).feed_forward == MT_FEED_FORWARD_EXPERTS;
}

bool mt_layer_kinds_equal(mt_layer_kind a, mt_layer_kind b) {
    return a.mixer == b.mixer && a.feed_forward == b.feed_forward && a.rope == b.rope && a.window == b.window &&
           a.groups == b.groups && a.softmax == b.softmax && a.shares_indices == b.shares_indices;
}

int64_t mt_options_common_window(const mt_options *o) {
    return o->window_layers && strchr(o->window_layers, '0') ? 0 : o->window_size;
}

/* May be 0 in a model with experts whose first layers have none. */
int64_t mt_num_expert_layers(const mt_options *o) {
    int64_t layers = 0;
    for (int64_t i = 0; i < o->num_layers; i++) layers += mt_layer_has_experts(o, i);
    return layers;
}

/* Channels of a row of the experts. */
static int64_t mt_expert_channels(const mt_options *o) {
    return o->moe_latent_size > 0 ? o->moe_latent_size : o->hidden_size;
}

/* Rows and columns: name, size in the whole model, and the options that decide on it (for messages). */
#define MT_DIMENSIONS(X)                                                                                               \
    X(ONE, 1, NULL)                                                                                                    \
    X(C, o->hidden_size, "--hidden-size")                                                                              \
    X(2C, 2 * o->hidden_size, "--hidden-size")                                                                         \
    X(VOCAB, o->padded_vocab_size, "--vocab-size")                                                                     \
    X(POSITIONS, o->max_position_embeddings, "--max-position-embeddings")                                              \
    X(H, o->num_attention_heads, "--num-attention-heads")                                                              \
    X(D, o->kv_channels, "--kv-channels")                                                                              \
    X(HD, o->num_attention_heads * o->kv_channels, "--num-attention-heads and --kv-channels")                          \
    X(GD, groups * o->kv_channels, "--num-query-groups and --kv-channels")                                             \
    X(GDV, groups *mt_value_channels(o), "--num-query-groups and --kv-channels")                                       \
    X(HDV, o->num_attention_heads *mt_value_channels(o), "--num-attention-heads and --kv-channels")                    \
    X(Q_LORA, o->q_lora_rank, "--q-lora-rank")                                                                         \
    X(KV_LORA, o->kv_lora_rank, "--kv-lora-rank")                                                                      \
    X(KV_LORA_ROPE, o->kv_lora_rank + o->qk_pos_emb_head_dim, "--kv-lora-rank and --qk-pos-emb-head-dim")              \
    X(H_NOPE_DV, o->num_attention_heads *(o->qk_head_dim + o->v_head_dim), "--qk-head-dim and --v-head-dim")           \
    X(INDEXER_HEADS, o->dsa_indexer_n_heads, "--dsa-indexer-n-heads")                                                  \
    X(INDEXER_D, o->dsa_indexer_head_dim, "--dsa-indexer-head-dim")                                                    \
    X(INDEXER_HD, o->dsa_indexer_n_heads * o->dsa_indexer_head_dim,                                                    \
      "--dsa-indexer-n-heads and --dsa-indexer-head-dim")                                                              \
    X(F, o->ffn_hidden_size, "--ffn-hidden-size")                                                                      \
    X(SHARED_F, o->moe_shared_expert_intermediate_size, "--moe-shared-expert-intermediate-size")                       \
    X(EXPERT_F, o->moe_ffn_hidden_size, "--moe-ffn-hidden-size")                                                       \
    X(E, o->num_experts, "--num-experts")                                                                              \
    X(EXPERT_C, mt_expert_channels(o), "--moe-latent-size and --hidden-size")                                          \
    X(KEYS, o->linear_num_key_heads * o->linear_key_head_dim, "--linear-num-key-heads and --linear-key-head-dim")      \
    X(VALUES, o->linear_num_value_heads * o->linear_value_head_dim,                                                    \
      "--linear-num-value-heads and --linear-value-head-dim")                                                          \
    X(VALUE_HEADS, o->linear_num_value_heads, "--linear-num-value-heads")                                              \
    X(VALUE_CHANNELS, o->linear_value_head_dim, "--linear-value-head-dim")                                             \
    X(TAPS, o->linear_conv_kernel_dim, "--linear-conv-kernel-dim")                                                     \
    X(MAMBA_HEADS, o->mamba_num_heads, "--mamba-num-heads")                                                            \
    X(MAMBA_INNER, o->mamba_num_heads * o->mamba_head_dim, "--mamba-num-heads and --mamba-head-dim")                   \
    X(MAMBA_STATES, o->mamba_num_groups * o->mamba_state_dim, "--mamba-num-groups and --mamba-state-dim")

#define MT_DIMENSION_NAME(name, size, option)   MT_DIM_##name,
#define MT_DIMENSION_SIZE(name, size, option)   size,
#define MT_DIMENSION_OPTION(name, size, option) option,

typedef enum mt_dimension { MT_DIMENSIONS(MT_DIMENSION_NAME) MT_NUM_DIMENSIONS } mt_dimension;

static const char *const mt_dimension_option[MT_NUM_DIMENSIONS] = {MT_DIMENSIONS(MT_DIMENSION_OPTION)};

/* Of a layer; -1: outside the layers. */
static int64_t mt_dimension_size(const mt_options *o, int64_t layer, mt_dimension dimension) {
    int64_t groups = layer < 0 ? 0 : mt_layer_kind_of(o, layer).groups;
    const int64_t sizes[MT_NUM_DIMENSIONS] = {MT_DIMENSIONS(MT_DIMENSION_SIZE)};
    return sizes[dimension];
}

/* Conditions on which a layer (with layer -1: the model outside its layers) has a parameter, and the option that
 * decides on each. A message about a parameter with several names the first one's. */
#define MT_CONDITIONS(X)                                                                                               \
    X(LEARNED_POSITIONS, o->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE, "--position-embedding-type")      \
    X(LM_HEAD, o->untie_embeddings_and_output_weights && o->head_type == MT_HEAD_LM,                                   \
      "--untie-embeddings-and-output-weights")                                                                         \
    X(SEQUENCE_HEAD, o->head_type == MT_HEAD_SEQUENCE, "--value-head")                                                 \
    X(TOKEN_HEAD, o->head_type == MT_HEAD_TOKEN, "--value-head")                                                       \
    X(LAYERNORM, o->normalization == MT_LAYERNORM, "--normalization")                                                  \
    X(NORMS_BEFORE, mt_norms_before(o), "--norm-placement")                                                            \
    X(NORMS_AFTER, mt_norms_after(o), "--norm-placement")                                                              \
    X(NO_ATTENTION, !attends, "--linear-attention-freq") /* than attention */                                          \
    X(DELTA, mixer == MT_MIXER_GATED_DELTA_NET, "--linear-attention-freq")                                             \
    X(SHORT_CONV, mixer == MT_MIXER_SHORT_CONV, "--linear-attention-freq")                                             \
    X(KDA, mixer == MT_MIXER_KDA, "--linear-attention-freq")                                                           \
    X(MAMBA, mixer == MT_MIXER_MAMBA2, "--hybrid-override-pattern")                                                    \
    X(CONV_BIAS, o->mamba_conv_bias, "--disable-mamba-conv-bias")                                                      \
    X(NO_MIXER, mixer == MT_MIXER_NONE, "--hybrid-override-pattern")                                                   \
    X(NO_MLP, kind.feed_forward != MT_FEED_FORWARD_DENSE, "--moe-layer-freq") /* but experts or nothing */             \
    X(NO_FEED_FORWARD, layer >= 0 && kind.feed_forward == MT_FEED_FORWARD_NONE, "--hybrid-override-pattern")           \
    X(LATENT, attends && o->multi_latent_attention, "--multi-latent-attention")                                        \
    X(Q_LATENT, attends && o->multi_latent_attention && o->q_lora_rank > 0, "--q-lora-rank")                           \
    X(LATENT_NORMS, attends && o->multi_latent_attention && o->qk_layernorm, "--qk-layernorm")                         \
    X(INDEXER, mixer == MT_MIXER_SPARSE_ATTENTION && !kind.shares_indices, "--experimental-attention-variant")         \
    X(HEAD_NORMS, attends &&mt_norms_heads(o) && !o->qk_layernorm_all_heads, "--qk-layernorm")                         \
    X(ALL_HEADS_NORMS, attends &&mt_norms_heads(o) && o->qk_layernorm_all_heads, "--qk-layernorm-all-heads")           \
    X(SINKS, attends &&has_sinks, "--softmax-type")                                                                    \
    X(OUTPUT_GATE, attends && o->attention_output_gate, "--attention-output-gate")                                     \
    X(QKV_BIAS, attends && o->add_qkv_bias, "--add-qkv-bias")                                                          \
    X(O_BIAS, attends && o->attention_output_bias, "--disable-bias-linear")                                            \
    X(MLP_BIAS, o->mlp_bias, "--disable-bias-linear")                                                                  \
    X(ROUTER, has_experts, "--moe-layer-freq")                                                                         \
    X(ROUTER_BIAS, has_experts && o->moe_router_enable_expert_bias, "--moe-router-enable-expert-bias")                 \
    X(ROW_OF_BIAS, o->hf_family == MT_HF_ERNIE4_5_MOE, NULL) /* that bias is [1, E] */                                 \
    X(ROUTER_LINEAR_BIAS, has_experts && o->moe_router_linear_bias, "--moe-router-linear-bias")                        \
    X(EXPERTS, has_experts, "--num-experts")                                                                           \
    X(LATENT_EXPERTS, has_experts && o->moe_latent_size > 0, "--moe-latent-size")                                      \
    X(SHARED, has_experts && o->moe_shared_expert_intermediate_size > 0, "--moe-shared-expert-intermediate-size")      \
    X(SHARED_GATE, has_experts && o->moe_shared_expert_gate, "--moe-shared-expert-gate")                               \
    X(GATED, mt_options_gated(o), "--swiglu")                                                                          \
    X(MTP, layer >= o->num_layers, "--mtp-num-layers")

#define MT_CONDITION_NAME(name, test, option)   MT_CONDITION_##name,
#define MT_CONDITION_BIT(name, test, option)    | (uint64_t)(test) << MT_CONDITION_##name
#define MT_CONDITION_OPTION(name, test, option) option,

enum { MT_CONDITIONS(MT_CONDITION_NAME) MT_NUM_CONDITIONS };

static const char *const mt_condition_option[MT_NUM_CONDITIONS] = {MT_CONDITIONS(MT_CONDITION_OPTION)};

/* A bit for each condition that holds. */
static uint64_t mt_layer_conditions(const mt_options *o, int64_t layer) {
    mt_layer_kind kind = layer >= 0 ? mt_layer_kind_of(o, layer) : (mt_layer_kind){0};
    mt_mixer_kind mixer = kind.mixer;
    bool has_experts = kind.feed_forward == MT_FEED_FORWARD_EXPERTS, attends = mt_mixer_attends(mixer);
    bool has_sinks = kind.softmax == MT_SOFTMAX_LEARNABLE && layer >= 0;
    return 0 MT_CONDITIONS(MT_CONDITION_BIT);
}

/* The columns of tensor names, and each family's. REPEATED: of the copy that DeepSeek's files have in each module of
 * multi-token prediction. */
enum {
    MT_NAMES_LLAMA,
    MT_NAMES_GPT2,
    MT_NAMES_MIXTRAL,
    MT_NAMES_QWEN2_MOE,
    MT_NAMES_REPEATED,
    MT_NAMES_GPT_OSS,
    MT_NAMES_HY_V3,
    MT_NAMES_EXAONE_MOE,
    MT_NAMES_ERNIE4_5_MOE,
    MT_NAMES_MIMO,
    MT_NAMES_QWEN3_NEXT,
    MT_NAMES_LFM2,
    MT_NAMES_NEMOTRON_H,
    MT_NAMES_GRANITE,
    MT_NAMES_MIMO_V2,
    MT_NAMES_KIMI_LINEAR,
    MT_NUM_NAMES
};

#define MT_HF_FAMILY_ROW(family, type, class, names, layers, transposed)                                               \
    {type, class, layers, transposed, MT_NAMES_##names},
const mt_hf_family_row mt_hf_families[] = {{"", "", "model.layers.", false, MT_NAMES_LLAMA},
                                           MT_HF_FAMILIES(MT_HF_FAMILY_ROW)};

/* How tensor-parallel ranks divide a parameter. With fewer kv heads, or key heads of linear attention, than ranks,
 * neighbours hold the same one. */
typedef enum mt_cut { MT_CUT_NONE, MT_CUT_ROWS, MT_CUT_COLS, MT_CUT_KV_HEADS, MT_CUT_KEY_HEADS } mt_cut;

/* Kinds of parameters. */
typedef enum mt_param_kind {
    MT_EMBEDDING,         // rows of the vocabulary
    MT_COLUMN,            // column-parallel linear: a share of the outputs
    MT_COLUMN_KV,         // the same for key and value heads
    MT_COLUMN_KEYS,       // the same for key heads of linear attention
    MT_ROW,               // row-parallel linear: a share of the inputs
    MT_REPLICATED,        // whole on every rank
    MT_REPLICATED_OUTPUT, // the same of a product that is added to the residual stream
    MT_ROUTING,           // the same in fp32
    MT_COLUMN_BIAS,
    MT_COLUMN_KV_BIAS,
    MT_ROW_BIAS,
    MT_NORM,
    MT_NORM_BIAS,
    MT_HEAD_NORM,    // one weight for all heads
    MT_HEAD_LOGITS,  // a number of each query head
    MT_Q_HEADS_NORM, // of all query heads together
    MT_KV_HEADS_NORM,
    MT_TAPS,         // of a convolution, channel by channel
    MT_KEY_TAPS,     // the same for channels of key heads
    MT_LOG_DECAYS,   // a number of each value head
    MT_DECAY_BIASES, // likewise
    MT_GATED_NORM,   // one weight for all value heads, never 1 + weight
    MT_CHANNEL_NORM, // a number of each channel of the heads, likewise
    MT_SKIPS,        // a number of each head
    MT_TIME_STEPS    // likewise
} mt_param_kind;

static const struct {
    mt_cut cut;
    mt_init init;
    mt_gradient gradient;
    mt_linear_kind linear; // of matrices; experts' are grouped
} mt_param_kinds[] = {
    [MT_EMBEDDING] = {MT_CUT_ROWS, MT_INIT_NORMAL, MT_GRADIENT_WHOLE, MT_LINEAR_COLUMN}, // also a tied output layer
    [MT_COLUMN] = {MT_CUT_ROWS, MT_INIT_NORMAL, MT_GRADIENT_WHOLE, MT_LINEAR_COLUMN},
    [MT_COLUMN_KV] = {MT_CUT_KV_HEADS, MT_INIT_NORMAL, MT_GRADIENT_REPLICA, MT_LINEAR_COLUMN},
    [MT_COLUMN_KEYS] = {MT_CUT_KEY_HEADS, MT_INIT_NORMAL, MT_GRADIENT_KEY_REPLICA, MT_LINEAR_COLUMN},
    [MT_ROW] = {MT_CUT_COLS, MT_INIT_OUTPUT, MT_GRADIENT_WHOLE, MT_LINEAR_ROW},
    [MT_REPLICATED] = {MT_CUT_NONE, MT_INIT_NORMAL, MT_GRADIENT_ROWS, MT_LINEAR_REPLICATED},
    [MT_REPLICATED_OUTPUT] = {MT_CUT_NONE, MT_INIT_OUTPUT, MT_GRADIENT_ROWS, MT_LINEAR_REPLICATED},
    [MT_ROUTING] = {MT_CUT_NONE, MT_INIT_NORMAL, MT_GRADIENT_ROWS, MT_LINEAR_ROUTER},
    [MT_COLUMN_BIAS] = {MT_CUT_ROWS, MT_INIT_ZEROS, MT_GRADIENT_WHOLE, 0},
    [MT_COLUMN_KV_BIAS] = {MT_CUT_KV_HEADS, MT_INIT_ZEROS, MT_GRADIENT_REPLICA, 0},
    [MT_ROW_BIAS] = {MT_CUT_NONE, MT_INIT_ZEROS, MT_GRADIENT_WHOLE, 0},
    [MT_NORM] = {MT_CUT_NONE, MT_INIT_GAIN, MT_GRADIENT_ROWS, 0},
    [MT_NORM_BIAS] = {MT_CUT_NONE, MT_INIT_ZEROS, MT_GRADIENT_ROWS, 0},
    [MT_HEAD_NORM] = {MT_CUT_NONE, MT_INIT_GAIN, MT_GRADIENT_HEADS, 0},
    [MT_HEAD_LOGITS] = {MT_CUT_ROWS, MT_INIT_NORMAL, MT_GRADIENT_WHOLE, 0},
    [MT_Q_HEADS_NORM] = {MT_CUT_ROWS, MT_INIT_GAIN, MT_GRADIENT_WHOLE, 0},
    [MT_KV_HEADS_NORM] = {MT_CUT_KV_HEADS, MT_INIT_GAIN, MT_GRADIENT_REPLICA, 0},
    [MT_TAPS] = {MT_CUT_ROWS, MT_INIT_TAPS, MT_GRADIENT_WHOLE, 0},
    [MT_KEY_TAPS] = {MT_CUT_KEY_HEADS, MT_INIT_TAPS, MT_GRADIENT_KEY_REPLICA, 0},
    [MT_LOG_DECAYS] = {MT_CUT_ROWS, MT_INIT_LOG_DECAY, MT_GRADIENT_WHOLE, 0},
    [MT_DECAY_BIASES] = {MT_CUT_ROWS, MT_INIT_ONES, MT_GRADIENT_WHOLE, 0},
    [MT_GATED_NORM] = {MT_CUT_NONE, MT_INIT_ONES, MT_GRADIENT_HEADS, 0},
    [MT_CHANNEL_NORM] = {MT_CUT_ROWS, MT_INIT_ONES, MT_GRADIENT_WHOLE, 0},
    [MT_SKIPS] = {MT_CUT_ROWS, MT_INIT_ONES, MT_GRADIENT_WHOLE, 0},
    [MT_TIME_STEPS] = {MT_CUT_ROWS, MT_INIT_TIME_STEP, MT_GRADIENT_WHOLE, 0},
};

typedef struct mt_role_row {
    mt_role role;
    mt_unit unit;
    mt_param_kind kind;
    mt_dimension rows, cols; // in the whole model; cols MT_DIM_ONE: a vector, which does not decay
    const char *field_name;
    size_t field;                    // of its mt_weight in mt_layer, or in mt_outer for units outside the layers
    uint64_t when, unless;           // conditions: all of `when` and none of `unless`
    bool fused;                      // continues the row above, if that exists, and is found by that one's field
    const char *names[MT_NUM_NAMES]; // after the layer's prefix; # is the expert's number, without which a tensor holds
                                     // all experts of a layer; NULL: as Llama
} mt_role_row;

/* MT_ROLE: a parameter of a layer; MT_FUSED: one that may continue the row above; MT_OUTSIDE: outside the layers. */
#define MT_HAS(name) ((uint64_t)1 << MT_CONDITION_##name)
#define MT_ANY_ROLE(owner, role, unit, kind, rows, cols, field, when, unless, fused, ...)                              \
    {                                                                                                                  \
        MT_##role, MT_UNIT_##unit, MT_##kind, MT_DIM_##rows, MT_DIM_##cols, #field, offsetof(owner, field), when,      \
            unless, fused, {                                                                                           \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }
#define MT_ROLE(role, unit, kind, rows, cols, field, when, unless, ...)                                                \
    MT_ANY_ROLE(mt_layer, role, unit, kind, rows, cols, field, when, unless, false, __VA_ARGS__)
#define MT_FUSED(role, unit, kind, rows, cols, field, when, unless, ...)                                               \
    MT_ANY_ROLE(mt_layer, role, unit, kind, rows, cols, field, when, unless, true, __VA_ARGS__)
#define MT_OUTSIDE(role, unit, kind, rows, cols, field, when, unless, ...)                                             \
    MT_ANY_ROLE(mt_outer, role, unit, kind, rows, cols, field, when, unless, false, __VA_ARGS__)

static const mt_role_row mt_role_rows[] = {
    MT_OUTSIDE(WORD_EMBEDDING, WORDS, EMBEDDING, VOCAB, C, word_embedding, 0, 0,
               "model.embed_tokens.weight", [MT_NAMES_GPT2] = "transformer.wte.weight",
               [MT_NAMES_REPEATED] = "embed_tokens.weight", [MT_NAMES_NEMOTRON_H] = "backbone.embeddings.weight"),
    MT_OUTSIDE(POSITION_EMBEDDING, POSITIONS, REPLICATED, POSITIONS, C, position_embedding, MT_HAS(LEARNED_POSITIONS),
               0, "model.embed_positions.weight", [MT_NAMES_GPT2] = "transformer.wpe.weight"),
    /* attention; latent attention without a q latent has q_proj in place of q_b_proj */
    MT_ROLE(Q_A, LAYER, REPLICATED, Q_LORA, C, latent.weight, MT_HAS(Q_LATENT), 0, "self_attn.q_a_proj.weight"),
    MT_FUSED(KV_A, LAYER, REPLICATED, KV_LORA_ROPE, C, latent.weight, MT_HAS(LATENT), 0,
             "self_attn.kv_a_proj_with_mqa.weight"),
    MT_ROLE(Q_B, LAYER, COLUMN, HD, Q_LORA, q_b.weight, MT_HAS(Q_LATENT), 0, "self_attn.q_b_proj.weight"),
    MT_ROLE(Q, LAYER, COLUMN, HD, C, q_b.weight, MT_HAS(LATENT), MT_HAS(Q_LATENT), "self_attn.q_proj.weight"),
    MT_ROLE(KV_B, LAYER, COLUMN, H_NOPE_DV, KV_LORA, kv_b.weight, MT_HAS(LATENT), 0, "self_attn.kv_b_proj.weight"),
    MT_ROLE(INDEXER_Q, LAYER, REPLICATED, INDEXER_HD, Q_LORA, indexer_q.weight, MT_HAS(INDEXER), 0,
            "self_attn.indexer.wq_b.weight"),
    MT_ROLE(INDEXER_K, LAYER, REPLICATED, INDEXER_D, C, indexer_k.weight, MT_HAS(INDEXER), 0,
            "self_attn.indexer.wk.weight"),
    MT_ROLE(INDEXER_WEIGHTS, LAYER, REPLICATED, INDEXER_HEADS, C, indexer_weights.weight, MT_HAS(INDEXER), 0,
            "self_attn.indexer.weights_proj.weight"),
    MT_ROLE(ATTENTION_GATE, LAYER, COLUMN, HD, C, gate.weight, MT_HAS(OUTPUT_GATE), 0, "self_attn.q_proj.weight"),
    MT_ROLE(Q, LAYER, COLUMN, HD, C, qkv.weight, 0, MT_HAS(LATENT) | MT_HAS(NO_ATTENTION), "self_attn.q_proj.weight",
            [MT_NAMES_GPT2] = "attn.c_attn.weight", [MT_NAMES_NEMOTRON_H] = "mixer.q_proj.weight"),
    MT_FUSED(K, LAYER, COLUMN_KV, GD, C, qkv.weight, 0, MT_HAS(LATENT) | MT_HAS(NO_ATTENTION),
             "self_attn.k_proj.weight", [MT_NAMES_GPT2] = "attn.c_attn.weight",
             [MT_NAMES_NEMOTRON_H] = "mixer.k_proj.weight"),
    MT_FUSED(V, LAYER, COLUMN_KV, GDV, C, qkv.weight, 0, MT_HAS(LATENT) | MT_HAS(NO_ATTENTION),
             "self_attn.v_proj.weight", [MT_NAMES_GPT2] = "attn.c_attn.weight",
             [MT_NAMES_NEMOTRON_H] = "mixer.v_proj.weight"),
    MT_ROLE(O, LAYER, ROW, C, HDV, o.weight, 0, MT_HAS(NO_ATTENTION),
            "self_attn.o_proj.weight", [MT_NAMES_GPT2] = "attn.c_proj.weight",
            [MT_NAMES_LFM2] = "self_attn.out_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.o_proj.weight"),
    /* gated delta net */
    MT_ROLE(DELTA_Q, LAYER, COLUMN_KEYS, KEYS, C, delta_in.weight, MT_HAS(DELTA), 0,
            "linear_attn.in_proj_qkv.weight", [MT_NAMES_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight"),
    MT_FUSED(DELTA_K, LAYER, COLUMN_KEYS, KEYS, C, delta_in.weight, MT_HAS(DELTA), 0,
             "linear_attn.in_proj_qkv.weight", [MT_NAMES_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight"),
    MT_FUSED(DELTA_V, LAYER, COLUMN, VALUES, C, delta_in.weight, MT_HAS(DELTA), 0,
             "linear_attn.in_proj_qkv.weight", [MT_NAMES_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight"),
    MT_FUSED(DELTA_Z, LAYER, COLUMN, VALUES, C, delta_in.weight, MT_HAS(DELTA), 0,
             "linear_attn.in_proj_z.weight", [MT_NAMES_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight"),
    MT_FUSED(DELTA_B, LAYER, COLUMN, VALUE_HEADS, C, delta_in.weight, MT_HAS(DELTA), 0,
             "linear_attn.in_proj_b.weight", [MT_NAMES_QWEN3_NEXT] = "linear_attn.in_proj_ba.weight"),
    MT_FUSED(DELTA_A, LAYER, COLUMN, VALUE_HEADS, C, delta_in.weight, MT_HAS(DELTA), 0,
             "linear_attn.in_proj_a.weight", [MT_NAMES_QWEN3_NEXT] = "linear_attn.in_proj_ba.weight"),
    MT_ROLE(O, LAYER, ROW, C, VALUES, o.weight, MT_HAS(DELTA), 0, "linear_attn.out_proj.weight"),
    /* Kimi delta attention */
    MT_ROLE(DELTA_Q, LAYER, COLUMN_KEYS, KEYS, C, delta_in.weight, MT_HAS(KDA), 0, "self_attn.q_proj.weight"),
    MT_FUSED(DELTA_K, LAYER, COLUMN_KEYS, KEYS, C, delta_in.weight, MT_HAS(KDA), 0, "self_attn.k_proj.weight"),
    MT_FUSED(DELTA_V, LAYER, COLUMN, VALUES, C, delta_in.weight, MT_HAS(KDA), 0, "self_attn.v_proj.weight"),
    MT_FUSED(DELTA_B, LAYER, COLUMN, VALUE_HEADS, C, delta_in.weight, MT_HAS(KDA), 0, "self_attn.b_proj.weight"),
    MT_ROLE(KDA_F_A, LAYER, REPLICATED, VALUE_CHANNELS, C, f_a.weight, MT_HAS(KDA), 0, "self_attn.f_a_proj.weight"),
    MT_ROLE(KDA_F_B, LAYER, COLUMN, KEYS, VALUE_CHANNELS, f_b.weight, MT_HAS(KDA), 0, "self_attn.f_b_proj.weight"),
    MT_ROLE(KDA_G_A, LAYER, REPLICATED, VALUE_CHANNELS, C, g_a.weight, MT_HAS(KDA), 0, "self_attn.g_a_proj.weight"),
    MT_ROLE(KDA_G_B, LAYER, COLUMN, VALUES, VALUE_CHANNELS, g_b.weight, MT_HAS(KDA), 0, "self_attn.g_b_proj.weight"),
    MT_ROLE(O, LAYER, ROW, C, VALUES, o.weight, MT_HAS(KDA), 0, "self_attn.o_proj.weight"),
    /* gated short convolution */
    MT_ROLE(SHORT_B, LAYER, COLUMN, C, C, short_in.weight, MT_HAS(SHORT_CONV), 0, "conv.in_proj.weight"),
    MT_FUSED(SHORT_C, LAYER, COLUMN, C, C, short_in.weight, MT_HAS(SHORT_CONV), 0, "conv.in_proj.weight"),
    MT_FUSED(SHORT_X, LAYER, COLUMN, C, C, short_in.weight, MT_HAS(SHORT_CONV), 0, "conv.in_proj.weight"),
    MT_ROLE(O, LAYER, ROW, C, C, o.weight, MT_HAS(SHORT_CONV), 0, "conv.out_proj.weight"),
    /* Mamba-2 */
    MT_ROLE(MAMBA_Z, LAYER, COLUMN, MAMBA_INNER, C, mamba_in.weight, MT_HAS(MAMBA), 0,
            "mamba.in_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.in_proj.weight"),
    MT_FUSED(MAMBA_X, LAYER, COLUMN, MAMBA_INNER, C, mamba_in.weight, MT_HAS(MAMBA), 0,
             "mamba.in_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.in_proj.weight"),
    MT_FUSED(MAMBA_B, LAYER, COLUMN, MAMBA_STATES, C, mamba_in.weight, MT_HAS(MAMBA), 0,
             "mamba.in_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.in_proj.weight"),
    MT_FUSED(MAMBA_C, LAYER, COLUMN, MAMBA_STATES, C, mamba_in.weight, MT_HAS(MAMBA), 0,
             "mamba.in_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.in_proj.weight"),
    MT_FUSED(MAMBA_DT, LAYER, COLUMN, MAMBA_HEADS, C, mamba_in.weight, MT_HAS(MAMBA), 0,
             "mamba.in_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.in_proj.weight"),
    MT_ROLE(O, LAYER, ROW, C, MAMBA_INNER, o.weight, MT_HAS(MAMBA), 0,
            "mamba.out_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.out_proj.weight"),
    /* MLP, or shared expert and router */
    MT_ROLE(GATE, LAYER, COLUMN, F, C, fc1.weight, MT_HAS(GATED), MT_HAS(NO_MLP), "mlp.gate_proj.weight",
            [MT_NAMES_LFM2] = "feed_forward.w1.weight", [MT_NAMES_GRANITE] = "shared_mlp.input_linear.weight",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.gate_proj.weight"),
    MT_FUSED(UP, LAYER, COLUMN, F, C, fc1.weight, 0, MT_HAS(NO_MLP),
             "mlp.up_proj.weight", [MT_NAMES_GPT2] = "mlp.c_fc.weight", [MT_NAMES_LFM2] = "feed_forward.w3.weight",
             [MT_NAMES_NEMOTRON_H] = "mixer.up_proj.weight", [MT_NAMES_GRANITE] = "shared_mlp.input_linear.weight",
             [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.up_proj.weight"),
    MT_ROLE(DOWN, LAYER, ROW, C, F, down.weight, 0, MT_HAS(NO_MLP),
            "mlp.down_proj.weight", [MT_NAMES_GPT2] = "mlp.c_proj.weight", [MT_NAMES_LFM2] = "feed_forward.w2.weight",
            [MT_NAMES_NEMOTRON_H] = "mixer.down_proj.weight", [MT_NAMES_GRANITE] = "shared_mlp.output_linear.weight",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.down_proj.weight"),
    MT_ROLE(SHARED_GATE, LAYER, COLUMN, SHARED_F, C, fc1.weight, MT_HAS(SHARED) | MT_HAS(GATED), 0,
            "mlp.shared_experts.gate_proj.weight", [MT_NAMES_QWEN2_MOE] = "mlp.shared_expert.gate_proj.weight",
            [MT_NAMES_HY_V3] = "mlp.shared_mlp.gate_proj.weight",
            [MT_NAMES_QWEN3_NEXT] = "mlp.shared_expert.gate_proj.weight",
            [MT_NAMES_GRANITE] = "shared_mlp.input_linear.weight",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.shared_experts.gate_proj.weight"),
    MT_FUSED(
        SHARED_UP, LAYER, COLUMN, SHARED_F, C, fc1.weight, MT_HAS(SHARED), 0,
        "mlp.shared_experts.up_proj.weight", [MT_NAMES_QWEN2_MOE] = "mlp.shared_expert.up_proj.weight",
        [MT_NAMES_HY_V3] = "mlp.shared_mlp.up_proj.weight", [MT_NAMES_QWEN3_NEXT] = "mlp.shared_expert.up_proj.weight",
        [MT_NAMES_NEMOTRON_H] = "mixer.shared_experts.up_proj.weight",
        [MT_NAMES_GRANITE] = "shared_mlp.input_linear.weight",
        [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.shared_experts.up_proj.weight"),
    MT_ROLE(SHARED_DOWN, LAYER, ROW, C, SHARED_F, down.weight, MT_HAS(SHARED), 0,
            "mlp.shared_experts.down_proj.weight", [MT_NAMES_QWEN2_MOE] = "mlp.shared_expert.down_proj.weight",
            [MT_NAMES_HY_V3] = "mlp.shared_mlp.down_proj.weight",
            [MT_NAMES_QWEN3_NEXT] = "mlp.shared_expert.down_proj.weight",
            [MT_NAMES_NEMOTRON_H] = "mixer.shared_experts.down_proj.weight",
            [MT_NAMES_GRANITE] = "shared_mlp.output_linear.weight",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.shared_experts.down_proj.weight"),
    MT_ROLE(ROUTER, LAYER, ROUTING, E, C, router.weight, MT_HAS(ROUTER), 0,
            "mlp.gate.weight", [MT_NAMES_MIXTRAL] = "block_sparse_moe.gate.weight",
            [MT_NAMES_GPT_OSS] = "mlp.router.weight", [MT_NAMES_HY_V3] = "mlp.router.gate.weight",
            [MT_NAMES_NEMOTRON_H] = "mixer.gate.weight", [MT_NAMES_GRANITE] = "block_sparse_moe.router.layer.weight",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.gate.weight"),
    MT_ROLE(SHARED_EXPERT_GATE, LAYER, ROUTING, ONE, C, shared_gate.weight, MT_HAS(SHARED_GATE), 0,
            "mlp.shared_expert_gate.weight"),
    MT_ROLE(EXPERTS_IN, LAYER, REPLICATED, EXPERT_C, C, experts_in.weight, MT_HAS(LATENT_EXPERTS), 0,
            "mlp.fc1_latent_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.fc1_latent_proj.weight"),
    MT_ROLE(EXPERTS_OUT, LAYER, REPLICATED_OUTPUT, C, EXPERT_C, experts_out.weight, MT_HAS(LATENT_EXPERTS), 0,
            "mlp.fc2_latent_proj.weight", [MT_NAMES_NEMOTRON_H] = "mixer.fc2_latent_proj.weight"),
    /* multi-token prediction; its norms are the first vectors */
    MT_ROLE(MTP_PROJECTION, LAYER, REPLICATED, C, 2C, mtp_projection.weight, MT_HAS(MTP), 0,
            "eh_proj.weight", [MT_NAMES_MIMO] = "input_proj.weight"),
    /* taps, which no optimizer of matrices steps, behind the matrices */
    MT_ROLE(CONV_Q, LAYER, KEY_TAPS, KEYS, TAPS, conv, MT_HAS(DELTA), 0, "linear_attn.conv1d.weight"),
    MT_FUSED(CONV_K, LAYER, KEY_TAPS, KEYS, TAPS, conv, MT_HAS(DELTA), 0, "linear_attn.conv1d.weight"),
    MT_FUSED(CONV_V, LAYER, TAPS, VALUES, TAPS, conv, MT_HAS(DELTA), 0, "linear_attn.conv1d.weight"),
    MT_ROLE(CONV_Q, LAYER, KEY_TAPS, KEYS, TAPS, conv, MT_HAS(KDA), 0, "self_attn.q_conv1d.weight"),
    MT_FUSED(CONV_K, LAYER, KEY_TAPS, KEYS, TAPS, conv, MT_HAS(KDA), 0, "self_attn.k_conv1d.weight"),
    MT_FUSED(CONV_V, LAYER, TAPS, VALUES, TAPS, conv, MT_HAS(KDA), 0, "self_attn.v_conv1d.weight"),
    MT_ROLE(SHORT_TAPS, LAYER, TAPS, C, TAPS, conv, MT_HAS(SHORT_CONV), 0, "conv.conv.weight"),
    MT_ROLE(CONV_X, LAYER, TAPS, MAMBA_INNER, TAPS, mamba_conv, MT_HAS(MAMBA), 0,
            "mamba.conv1d.weight", [MT_NAMES_NEMOTRON_H] = "mixer.conv1d.weight"),
    MT_FUSED(CONV_B, LAYER, TAPS, MAMBA_STATES, TAPS, mamba_conv, MT_HAS(MAMBA), 0,
             "mamba.conv1d.weight", [MT_NAMES_NEMOTRON_H] = "mixer.conv1d.weight"),
    MT_FUSED(CONV_C, LAYER, TAPS, MAMBA_STATES, TAPS, mamba_conv, MT_HAS(MAMBA), 0,
             "mamba.conv1d.weight", [MT_NAMES_NEMOTRON_H] = "mixer.conv1d.weight"),
    MT_ROLE(MTP_EMBEDDING_NORM, LAYER, NORM, C, ONE, mtp_embedding_norm.weight, MT_HAS(MTP), 0,
            "enorm.weight", [MT_NAMES_MIMO] = "token_layernorm.weight"),
    MT_ROLE(MTP_HIDDEN_NORM, LAYER, NORM, C, ONE, mtp_hidden_norm.weight, MT_HAS(MTP), 0,
            "hnorm.weight", [MT_NAMES_MIMO] = "hidden_layernorm.weight"),
    MT_ROLE(MTP_FINAL_NORM, LAYER, NORM, C, ONE, mtp_final_norm.weight, MT_HAS(MTP), 0, "shared_head.norm.weight",
            [MT_NAMES_MIMO] = "final_layernorm.weight", [MT_NAMES_NEMOTRON_H] = "final_layernorm.weight"),
    MT_ROLE(MTP_EMBEDDING_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, mtp_embedding_norm.bias, MT_HAS(MTP) | MT_HAS(LAYERNORM),
            0, "enorm.bias"),
    MT_ROLE(MTP_HIDDEN_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, mtp_hidden_norm.bias, MT_HAS(MTP) | MT_HAS(LAYERNORM), 0,
            "hnorm.bias"),
    MT_ROLE(MTP_FINAL_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, mtp_final_norm.bias, MT_HAS(MTP) | MT_HAS(LAYERNORM), 0,
            "shared_head.norm.bias"),
    /* vectors */
    MT_ROLE(INPUT_NORM, LAYER, NORM, C, ONE, input_norm.weight, MT_HAS(NORMS_BEFORE), MT_HAS(NO_MIXER),
            "input_layernorm.weight", [MT_NAMES_GPT2] = "ln_1.weight", [MT_NAMES_LFM2] = "operator_norm.weight",
            [MT_NAMES_NEMOTRON_H] = "norm.weight"),
    MT_ROLE(INPUT_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, input_norm.bias, MT_HAS(NORMS_BEFORE) | MT_HAS(LAYERNORM),
            MT_HAS(NO_MIXER), "input_layernorm.bias", [MT_NAMES_GPT2] = "ln_1.bias"),
    MT_ROLE(ATTENTION_OUT_NORM, LAYER, NORM, C, ONE, attention_out_norm.weight, MT_HAS(NORMS_AFTER), MT_HAS(NO_MIXER),
            "post_attention_layernorm.weight"),
    MT_ROLE(ATTENTION_OUT_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, attention_out_norm.bias,
            MT_HAS(NORMS_AFTER) | MT_HAS(LAYERNORM), MT_HAS(NO_MIXER), "post_attention_layernorm.bias"),
    MT_ROLE(MLP_NORM, LAYER, NORM, C, ONE, mlp_norm.weight, MT_HAS(NORMS_BEFORE),
            MT_HAS(NORMS_AFTER) | MT_HAS(NO_FEED_FORWARD),
            "post_attention_layernorm.weight", [MT_NAMES_GPT2] = "ln_2.weight", [MT_NAMES_LFM2] = "ffn_norm.weight",
            [MT_NAMES_NEMOTRON_H] = "norm.weight"),
    MT_ROLE(MLP_NORM, LAYER, NORM, C, ONE, mlp_norm.weight, MT_HAS(NORMS_BEFORE) | MT_HAS(NORMS_AFTER),
            MT_HAS(NO_FEED_FORWARD), "pre_feedforward_layernorm.weight"),
    MT_ROLE(MLP_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, mlp_norm.bias, MT_HAS(NORMS_BEFORE) | MT_HAS(LAYERNORM),
            MT_HAS(NORMS_AFTER) | MT_HAS(NO_FEED_FORWARD),
            "post_attention_layernorm.bias", [MT_NAMES_GPT2] = "ln_2.bias"),
    MT_ROLE(MLP_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, mlp_norm.bias,
            MT_HAS(NORMS_BEFORE) | MT_HAS(NORMS_AFTER) | MT_HAS(LAYERNORM), MT_HAS(NO_FEED_FORWARD),
            "pre_feedforward_layernorm.bias"),
    MT_ROLE(MLP_OUT_NORM, LAYER, NORM, C, ONE, mlp_out_norm.weight, MT_HAS(NORMS_AFTER), MT_HAS(NO_FEED_FORWARD),
            "post_feedforward_layernorm.weight"),
    MT_ROLE(MLP_OUT_NORM_BIAS, LAYER, NORM_BIAS, C, ONE, mlp_out_norm.bias, MT_HAS(NORMS_AFTER) | MT_HAS(LAYERNORM),
            MT_HAS(NO_FEED_FORWARD), "post_feedforward_layernorm.bias"),
    MT_ROLE(Q_A_NORM, LAYER, NORM, Q_LORA, ONE, q_a_norm, MT_HAS(Q_LATENT) | MT_HAS(LATENT_NORMS), 0,
            "self_attn.q_a_layernorm.weight"),
    MT_ROLE(KV_A_NORM, LAYER, NORM, KV_LORA, ONE, kv_a_norm, MT_HAS(LATENT) | MT_HAS(LATENT_NORMS), 0,
            "self_attn.kv_a_layernorm.weight"),
    MT_ROLE(INDEXER_K_NORM, LAYER, NORM, INDEXER_D, ONE, indexer_k_norm.weight, MT_HAS(INDEXER), 0,
            "self_attn.indexer.k_norm.weight"),
    MT_ROLE(INDEXER_K_NORM_BIAS, LAYER, NORM_BIAS, INDEXER_D, ONE, indexer_k_norm.bias, MT_HAS(INDEXER), 0,
            "self_attn.indexer.k_norm.bias"),
    MT_ROLE(Q_NORM, LAYER, HEAD_NORM, D, ONE, q_norm, MT_HAS(HEAD_NORMS), 0,
            "self_attn.q_norm.weight", [MT_NAMES_LFM2] = "self_attn.q_layernorm.weight"),
    MT_ROLE(K_NORM, LAYER, HEAD_NORM, D, ONE, k_norm, MT_HAS(HEAD_NORMS), 0,
            "self_attn.k_norm.weight", [MT_NAMES_LFM2] = "self_attn.k_layernorm.weight"),
    MT_ROLE(Q_NORM, LAYER, Q_HEADS_NORM, HD, ONE, q_norm, MT_HAS(ALL_HEADS_NORMS), 0, "self_attn.q_norm.weight"),
    MT_ROLE(K_NORM, LAYER, KV_HEADS_NORM, GD, ONE, k_norm, MT_HAS(ALL_HEADS_NORMS), 0, "self_attn.k_norm.weight"),
    MT_ROLE(DELTA_NORM, LAYER, GATED_NORM, VALUE_CHANNELS, ONE, delta_norm, MT_HAS(DELTA), 0,
            "linear_attn.norm.weight"),
    MT_ROLE(A_LOG, LAYER, LOG_DECAYS, VALUE_HEADS, ONE, A_log, MT_HAS(DELTA), 0, "linear_attn.A_log"),
    MT_ROLE(DT_BIAS, LAYER, DECAY_BIASES, VALUE_HEADS, ONE, dt_bias, MT_HAS(DELTA), 0, "linear_attn.dt_bias"),
    MT_ROLE(DELTA_NORM, LAYER, GATED_NORM, VALUE_CHANNELS, ONE, delta_norm, MT_HAS(KDA), 0, "self_attn.o_norm.weight"),
    MT_ROLE(A_LOG, LAYER, LOG_DECAYS, VALUE_HEADS, ONE, A_log, MT_HAS(KDA), 0, "self_attn.A_log"),
    MT_ROLE(DT_BIAS, LAYER, TIME_STEPS, KEYS, ONE, dt_bias, MT_HAS(KDA), 0, "self_attn.dt_bias"),
    MT_ROLE(MAMBA_NORM, LAYER, CHANNEL_NORM, MAMBA_INNER, ONE, mamba_norm, MT_HAS(MAMBA), 0,
            "mamba.norm.weight", [MT_NAMES_NEMOTRON_H] = "mixer.norm.weight"),
    MT_ROLE(A_LOG, LAYER, LOG_DECAYS, MAMBA_HEADS, ONE, A_log, MT_HAS(MAMBA), 0,
            "mamba.A_log", [MT_NAMES_NEMOTRON_H] = "mixer.A_log"),
    MT_ROLE(MAMBA_D, LAYER, SKIPS, MAMBA_HEADS, ONE, mamba_d, MT_HAS(MAMBA), 0,
            "mamba.D", [MT_NAMES_NEMOTRON_H] = "mixer.D"),
    MT_ROLE(DT_BIAS, LAYER, TIME_STEPS, MAMBA_HEADS, ONE, dt_bias, MT_HAS(MAMBA), 0,
            "mamba.dt_bias", [MT_NAMES_NEMOTRON_H] = "mixer.dt_bias"),
    MT_ROLE(CONV_X_BIAS, LAYER, COLUMN_BIAS, MAMBA_INNER, ONE, mamba_conv_bias, MT_HAS(MAMBA) | MT_HAS(CONV_BIAS), 0,
            "mamba.conv1d.bias", [MT_NAMES_NEMOTRON_H] = "mixer.conv1d.bias"),
    MT_FUSED(CONV_B_BIAS, LAYER, COLUMN_BIAS, MAMBA_STATES, ONE, mamba_conv_bias, MT_HAS(MAMBA) | MT_HAS(CONV_BIAS), 0,
             "mamba.conv1d.bias", [MT_NAMES_NEMOTRON_H] = "mixer.conv1d.bias"),
    MT_FUSED(CONV_C_BIAS, LAYER, COLUMN_BIAS, MAMBA_STATES, ONE, mamba_conv_bias, MT_HAS(MAMBA) | MT_HAS(CONV_BIAS), 0,
             "mamba.conv1d.bias", [MT_NAMES_NEMOTRON_H] = "mixer.conv1d.bias"),
    MT_ROLE(SINKS, LAYER, HEAD_LOGITS, H, ONE, sinks, MT_HAS(SINKS), 0,
            "self_attn.sinks", [MT_NAMES_MIMO_V2] = "self_attn.attention_sink_bias"),
    MT_ROLE(Q_BIAS, LAYER, COLUMN_BIAS, HD, ONE, qkv.bias, MT_HAS(QKV_BIAS), 0,
            "self_attn.q_proj.bias", [MT_NAMES_GPT2] = "attn.c_attn.bias"),
    MT_FUSED(K_BIAS, LAYER, COLUMN_KV_BIAS, GD, ONE, qkv.bias, MT_HAS(QKV_BIAS), 0,
             "self_attn.k_proj.bias", [MT_NAMES_GPT2] = "attn.c_attn.bias"),
    MT_FUSED(V_BIAS, LAYER, COLUMN_KV_BIAS, GDV, ONE, qkv.bias, MT_HAS(QKV_BIAS), 0,
             "self_attn.v_proj.bias", [MT_NAMES_GPT2] = "attn.c_attn.bias"),
    MT_ROLE(O_BIAS, LAYER, ROW_BIAS, C, ONE, o.bias, MT_HAS(O_BIAS), 0,
            "self_attn.o_proj.bias", [MT_NAMES_GPT2] = "attn.c_proj.bias"),
    MT_ROLE(GATE_BIAS, LAYER, COLUMN_BIAS, F, ONE, fc1.bias, MT_HAS(MLP_BIAS) | MT_HAS(GATED), MT_HAS(NO_MLP),
            "mlp.gate_proj.bias"),
    MT_FUSED(UP_BIAS, LAYER, COLUMN_BIAS, F, ONE, fc1.bias, MT_HAS(MLP_BIAS), MT_HAS(NO_MLP),
             "mlp.up_proj.bias", [MT_NAMES_GPT2] = "mlp.c_fc.bias"),
    MT_ROLE(DOWN_BIAS, LAYER, ROW_BIAS, C, ONE, down.bias, MT_HAS(MLP_BIAS), MT_HAS(NO_MLP),
            "mlp.down_proj.bias", [MT_NAMES_GPT2] = "mlp.c_proj.bias"),
    MT_ROLE(ROUTER_LINEAR_BIAS, LAYER, NORM_BIAS, E, ONE, router.bias, MT_HAS(ROUTER_LINEAR_BIAS), 0,
            "mlp.gate.bias", [MT_NAMES_MIXTRAL] = "block_sparse_moe.gate.bias", [MT_NAMES_GPT_OSS] = "mlp.router.bias"),
    MT_ROLE(EXPERTS_IN_BIAS, LAYER, NORM_BIAS, EXPERT_C, ONE, experts_in.bias,
            MT_HAS(LATENT_EXPERTS) | MT_HAS(MLP_BIAS), 0, "mlp.fc1_latent_proj.bias"),
    MT_ROLE(EXPERTS_OUT_BIAS, LAYER, NORM_BIAS, C, ONE, experts_out.bias, MT_HAS(LATENT_EXPERTS) | MT_HAS(MLP_BIAS), 0,
            "mlp.fc2_latent_proj.bias"),
    /* experts: gate and up of each in turn, then down of each, so that each is one operand of a grouped product; then
     * their biases in the same order */
    MT_ROLE(
        EXPERT_GATE, EXPERTS, COLUMN, EXPERT_F, EXPERT_C, expert_fc1.weight, MT_HAS(EXPERTS) | MT_HAS(GATED), 0,
        "mlp.experts.#.gate_proj.weight", [MT_NAMES_MIXTRAL] = "block_sparse_moe.experts.#.w1.weight",
        [MT_NAMES_GPT_OSS] = "mlp.experts.gate_up_proj", [MT_NAMES_GRANITE] = "block_sparse_moe.input_linear.weight",
        [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.experts.#.w1.weight"),
    MT_FUSED(EXPERT_UP, EXPERTS, COLUMN, EXPERT_F, EXPERT_C, expert_fc1.weight, MT_HAS(EXPERTS), 0,
             "mlp.experts.#.up_proj.weight", [MT_NAMES_MIXTRAL] = "block_sparse_moe.experts.#.w3.weight",
             [MT_NAMES_GPT_OSS] = "mlp.experts.gate_up_proj", [MT_NAMES_NEMOTRON_H] = "mixer.experts.#.up_proj.weight",
             [MT_NAMES_GRANITE] = "block_sparse_moe.input_linear.weight",
             [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.experts.#.w3.weight"),
    MT_ROLE(EXPERT_DOWN, EXPERTS, ROW, EXPERT_C, EXPERT_F, expert_down.weight, MT_HAS(EXPERTS), 0,
            "mlp.experts.#.down_proj.weight", [MT_NAMES_MIXTRAL] = "block_sparse_moe.experts.#.w2.weight",
            [MT_NAMES_GPT_OSS] = "mlp.experts.down_proj", [MT_NAMES_NEMOTRON_H] = "mixer.experts.#.down_proj.weight",
            [MT_NAMES_GRANITE] = "block_sparse_moe.output_linear.weight",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.experts.#.w2.weight"),
    MT_ROLE(EXPERT_GATE_BIAS, EXPERTS, COLUMN_BIAS, EXPERT_F, ONE, expert_fc1.bias,
            MT_HAS(EXPERTS) | MT_HAS(MLP_BIAS) | MT_HAS(GATED), 0,
            "mlp.experts.#.gate_proj.bias", [MT_NAMES_GPT_OSS] = "mlp.experts.gate_up_proj_bias"),
    MT_FUSED(EXPERT_UP_BIAS, EXPERTS, COLUMN_BIAS, EXPERT_F, ONE, expert_fc1.bias, MT_HAS(EXPERTS) | MT_HAS(MLP_BIAS),
             0, "mlp.experts.#.up_proj.bias", [MT_NAMES_GPT_OSS] = "mlp.experts.gate_up_proj_bias"),
    MT_ROLE(EXPERT_DOWN_BIAS, EXPERTS, ROW_BIAS, EXPERT_C, ONE, expert_down.bias, MT_HAS(EXPERTS) | MT_HAS(MLP_BIAS), 0,
            "mlp.experts.#.down_proj.bias", [MT_NAMES_GPT_OSS] = "mlp.experts.down_proj_bias"),
    /* output */
    MT_OUTSIDE(LM_HEAD, OUTPUT, COLUMN, VOCAB, C, head.weight, MT_HAS(LM_HEAD), 0,
               "lm_head.weight", [MT_NAMES_REPEATED] = "shared_head.head.weight"),
    MT_OUTSIDE(SCORE, OUTPUT, REPLICATED, ONE, C, head.weight, MT_HAS(SEQUENCE_HEAD), 0, "score.weight"),
    MT_OUTSIDE(SCORE, OUTPUT, REPLICATED, ONE, C, head.weight, MT_HAS(TOKEN_HEAD), 0,
               "score.weight", [MT_NAMES_GPT2] = "classifier.weight"),
    MT_OUTSIDE(FINAL_NORM, OUTPUT, NORM, C, ONE, final_norm.weight, 0, 0,
               "model.norm.weight", [MT_NAMES_GPT2] = "transformer.ln_f.weight",
               [MT_NAMES_LFM2] = "model.embedding_norm.weight", [MT_NAMES_NEMOTRON_H] = "backbone.norm_f.weight"),
    MT_OUTSIDE(FINAL_NORM_BIAS, OUTPUT, NORM_BIAS, C, ONE, final_norm.bias, MT_HAS(LAYERNORM), 0,
               "model.norm.bias", [MT_NAMES_GPT2] = "transformer.ln_f.bias"),
    MT_OUTSIDE(SCORE_BIAS, OUTPUT, NORM_BIAS, ONE, ONE, head.bias, MT_HAS(TOKEN_HEAD), 0,
               "score.bias", [MT_NAMES_GPT2] = "classifier.bias"),
    /* not trained by the optimizer: moved towards equal loads */
    MT_ROLE(ROUTER_BIAS, UNTRAINED, ROW_BIAS, E, ONE, router_bias, MT_HAS(ROUTER_BIAS), MT_HAS(ROW_OF_BIAS),
            "mlp.gate.e_score_correction_bias", [MT_NAMES_MIXTRAL] = "block_sparse_moe.e_score_correction_bias",
            [MT_NAMES_HY_V3] = "mlp.expert_bias", [MT_NAMES_EXAONE_MOE] = "mlp.e_score_correction_bias",
            [MT_NAMES_NEMOTRON_H] = "mixer.gate.e_score_correction_bias",
            [MT_NAMES_KIMI_LINEAR] = "block_sparse_moe.gate.e_score_correction_bias"),
    MT_ROLE(ROUTER_BIAS, UNTRAINED, ROW_BIAS, ONE, E, router_bias, MT_HAS(ROUTER_BIAS) | MT_HAS(ROW_OF_BIAS), 0,
            "mlp.moe_statics.e_score_correction_bias"),
};

enum { MT_NUM_ROLE_ROWS = sizeof mt_role_rows / sizeof *mt_role_rows };

/* The table as it grows, and the inputs of every new row. */
typedef struct mt_param_table {
    mt_param *rows;
    int64_t count, bucket;
    const mt_options *options;
    const mt_hf_family_row *family;
    mt_partition partition;
} mt_param_table;

static const char *mt_role_row_name(const mt_role_row *row, int names) {
    return row->names[names] ? row->names[names] : row->names[MT_NAMES_LLAMA];
}

const char *mt_shared_tensor(const mt_options *options, const char *name, bool is_copy) {
    int names = mt_hf_families[options->hf_family].names;
    for (const mt_role_row *row = mt_role_rows; row < mt_role_rows + MT_NUM_ROLE_ROWS; row++) {
        const char *copy = row->names[MT_NAMES_REPEATED];
        if (!copy || strcmp(name, is_copy ? copy : mt_role_row_name(row, names)) != 0) continue;
        bool exists = (row->when & ~mt_layer_conditions(options, -1)) == 0;
        return mt_role_row_name(exists ? row : mt_role_rows, names);
    }
    return NULL;
}

/* The names that Qwen3-Next and Qwen3.5 give the parameters around the layer of their one module of multi-token
 * prediction; the layer's own are in mtp.layers. */
static const struct {
    mt_role role;
    const char *name;
} mt_qwen_module_names[] = {
    {MT_MTP_PROJECTION, "mtp.fc.weight"},
    {MT_MTP_EMBEDDING_NORM, "mtp.pre_fc_norm_embedding.weight"},
    {MT_MTP_HIDDEN_NORM, "mtp.pre_fc_norm_hidden.weight"},
    {MT_MTP_FINAL_NORM, "mtp.norm.weight"},
};

/* The number of the layer with one half, in which Nemotron-H has a parameter of a module: the first one begins with the
 * projection, the last one ends with the norm. */
static int64_t mt_module_half(const mt_options *o, const mt_role_row *row, int64_t module) {
    int64_t halves = o->mtp_hybrid_layers ? (int64_t)strlen(o->mtp_hybrid_layers) : 1;
    bool of_feed_forward =
        row->field >= offsetof(mt_layer, mlp_norm) && row->field < offsetof(mt_layer, mtp_embedding_norm);
    bool is_last = of_feed_forward || row->role == MT_MTP_FINAL_NORM || row->role == MT_MTP_FINAL_NORM_BIAS;
    return module * halves + (is_last ? halves - 1 : 0);
}

static void mt_param_set_name(const mt_param_table *table, const mt_role_row *row, mt_param *param) {
    const char *name = mt_role_row_name(row, table->family->names), *number = strchr(name, '#');
    mt_hf_family family = table->options->hf_family;
    bool of_qwen = family == MT_HF_QWEN3_NEXT || family == MT_HF_QWEN3_5 || family == MT_HF_QWEN3_5_MOE;
    char layer[64] = "", expert[32] = "";
    int64_t module = param->layer - table->options->num_layers; // of multi-token prediction
    if (module >= 0 && table->family->names == MT_NAMES_MIMO)
        snprintf(layer, sizeof layer, "model.mtp_layers.%lld.", (long long)module);
    else if (module >= 0 && of_qwen)
        snprintf(layer, sizeof layer, "mtp.layers.%lld.", (long long)module);
    else if (module >= 0 && table->family->names == MT_NAMES_NEMOTRON_H)
        snprintf(layer, sizeof layer, "mtp.layers.%lld.", (long long)mt_module_half(table->options, row, module));
    else if (param->layer >= 0)
        snprintf(layer, sizeof layer, "%s%lld.", table->family->layers, (long long)param->layer);
    if (number) snprintf(expert, sizeof expert, "%lld", (long long)param->expert);
    for (size_t i = 0; i < sizeof mt_qwen_module_names / sizeof *mt_qwen_module_names && of_qwen; i++)
        if (mt_qwen_module_names[i].role == row->role) name = mt_qwen_module_names[i].name, *layer = 0;
    snprintf(param->hf_name, sizeof param->hf_name, "%s%.*s%s%s", layer, (int)strcspn(name, "#"), name, expert,
             number ? number + 1 : "");
}

/* An expert's part of the tensor that holds all experts. Granite: matrices [out, in], gate above up. Others: [in, out];
 * gate and up take turns, output by output. */
static void mt_param_stack(const mt_param_table *table, const mt_role_row *row, mt_param *param) {
    const mt_role_row *other = row->fused ? row - 1 : row + 1;
    int names = table->family->names;
    bool paired = strcmp(mt_role_row_name(row, names), mt_role_row_name(other, names)) == 0;
    int64_t parts = paired ? 2 : 1;
    param->hf_stack = table->options->num_experts, param->hf_transposed = names != MT_NAMES_GRANITE;
    param->hf_stride = param->hf_transposed ? parts : 1;
    param->hf_row = param->expert * parts * param->whole_rows;
    if (row->fused) param->hf_row += param->hf_transposed ? 1 : param->whole_rows;
    param->hf_rows_total = param->hf_stack * parts * param->whole_rows;
}

/* True for the matrices of a gated delta net's input, which are one linear. */
static bool mt_is_delta_in(mt_role role) {
    return role >= MT_DELTA_Q && role <= MT_DELTA_A;
}

/* Groups of rows in the Hugging Face tensor of a role: one for each head, with all that the head has, or 1. */
static int64_t mt_hf_groups(const mt_options *o, mt_role role) {
    if (mt_is_delta_in(role) && o->hf_family == MT_HF_QWEN3_NEXT) return o->linear_num_key_heads;
    return o->attention_output_gate && (role == MT_Q || role == MT_ATTENTION_GATE) ? o->num_attention_heads : 1;
}

/* Rows with one name are parts of one Hugging Face tensor, in the order of their roles: GPT-2's q, k and v. */
static void mt_param_join_tensor(mt_param_table *table) {
    mt_param *param = &table->rows[table->count - 1], *first = param;
    while (first > table->rows && strcmp(first[-1].hf_name, param->hf_name) == 0) first--;
    mt_role role = param->adapts ? param->adapts : param->role;
    for (mt_param *other = first; other < param; other++) {
        other->hf_rows_total += param->whole_rows;
        param->hf_rows_total += other->whole_rows;
        if ((other->adapts ? other->adapts : other->role) < role)
            param->hf_row += other->whole_rows / other->hf_groups;
        else
            other->hf_row += param->whole_rows / param->hf_groups;
    }
}

/* Leaves of a parameter the share `index` of `parts` equal ones of its dimension `dim`. */
static void mt_param_shard(mt_param *param, int dim, int64_t parts, int64_t index) {
    int64_t *size = dim == 0 ? &param->rows : &param->cols;
    MT_CHECK(*size % parts == 0);
    *size /= parts;
    *(dim == 0 ? &param->first_row : &param->first_col) = index * *size;
    param->shard_dim = dim, param->counted = true;
}

static void mt_param_cut(const mt_param_table *table, mt_cut cut, mt_param *param) {
    const mt_partition *at = &table->partition;
    int64_t parts = param->expert >= 0 ? at->etp : at->tp, rank = param->expert >= 0 ? at->etp_rank : at->tp_rank;
    param->counted = rank == 0;
    if (cut == MT_CUT_ROWS) mt_param_shard(param, 0, parts, rank);
    if (cut == MT_CUT_COLS) mt_param_shard(param, 1, parts, rank);
    if (cut != MT_CUT_KV_HEADS && cut != MT_CUT_KEY_HEADS) return;
    const mt_options *o = table->options;
    int64_t heads = cut == MT_CUT_KV_HEADS ? mt_layer_kind_of(o, param->layer).groups : o->linear_num_key_heads;
    int64_t head_parts = mt_min(heads, parts), replicas = parts / head_parts;
    mt_param_shard(param, 0, head_parts, rank / replicas);
    param->counted = rank % replicas == 0;
    if (replicas == 1) param->gradient = MT_GRADIENT_WHOLE;
}

/* True for a matrix that an optimizer steps whole, as Megatron-Core chooses: of linears in layers, the router's too. */
static bool mt_param_is_matrix(const mt_param *param) {
    return mt_optimizer_rows[param->optimizer].steps == MT_STEPS_MATRICES;
}

/* True if a parameter and the one before it are one matrix to such an optimizer, as in Megatron-Core: gate and up, and
 * without --muon-split-qkv q, k and v. */
static bool mt_param_joins(const mt_options *o, const mt_param *param) {
    if (!mt_param_is_matrix(param) || !param->continues || param[-1].expert != param->expert) return false;
    if (param->role == MT_K || param->role == MT_V) return !o->muon.split_qkv;
    return param->role == MT_UP || param->role == MT_SHARED_UP || param->role == MT_EXPERT_UP;
}

/* True for parameters with weight decay: matrices, and with --apply-wd-to-qk-layernorm the norms of heads. */
static bool mt_row_decays(const mt_options *o, const mt_role_row *row) {
    bool is_head_norm = row->role == MT_Q_NORM || row->role == MT_K_NORM;
    return row->cols != MT_DIM_ONE || (is_head_norm && o->apply_wd_to_qk_layernorm);
}

/* Appends a row. `continues`: it follows the one before without a gap. */
static void mt_param_add(mt_param_table *table, const mt_role_row *row, int64_t layer, int64_t expert, bool continues) {
    const mt_options *o = table->options;
    mt_param *param = &table->rows[table->count++];
    *param = (mt_param){.role = row->role, .unit = row->unit, .layer = layer, .expert = expert, .shard_dim = -1};
    param->rows = param->whole_rows = mt_dimension_size(o, layer, row->rows);
    param->cols = param->whole_cols = mt_dimension_size(o, layer, row->cols);
    param->rows_stored = param->hf_rows_total = row->rows == MT_DIM_VOCAB ? o->vocab_size : param->rows;
    param->is_vector = row->cols == MT_DIM_ONE, param->weight_decay = mt_row_decays(o, row);
    param->trained = row->unit != MT_UNIT_UNTRAINED, param->init = mt_param_kinds[row->kind].init;
    param->is_linear = !param->is_vector && param->trained && row->unit != MT_UNIT_WORDS &&
                       row->unit != MT_UNIT_POSITIONS && row->kind != MT_TAPS && row->kind != MT_KEY_TAPS;
    param->hf_groups = mt_hf_groups(o, row->role),
    param->hf_has_channel = row->kind == MT_TAPS || row->kind == MT_KEY_TAPS;
    param->hf_is_column = row->role == MT_A_LOG && row->when & MT_HAS(KDA);
    if (param->init == MT_INIT_GAIN) param->init = o->layernorm_zero_centered_gamma ? MT_INIT_ZEROS : MT_INIT_ONES;
    param->init_std = o->init_method_std / (param->init == MT_INIT_OUTPUT ? sqrt(2.0 * (double)o->num_layers) : 1);
    if (param->init == MT_INIT_TAPS) param->init_std = 1 / sqrt(3 * (double)param->cols);
    param->gradient = mt_param_kinds[row->kind].gradient;
    param->linear = row->unit == MT_UNIT_EXPERTS ? MT_LINEAR_GROUPED : mt_param_kinds[row->kind].linear;
    param->rows_option = mt_dimension_option[row->rows], param->cols_option = mt_dimension_option[row->cols];
    for (int i = MT_NUM_CONDITIONS - 1; i >= 0; i--)
        if (row->when >> i & 1) param->exists_option = mt_condition_option[i];
    param->bucket = table->bucket, param->continues = continues;
    bool in_layer = row->unit == MT_UNIT_LAYER || row->unit == MT_UNIT_EXPERTS;
    param->optimizer = in_layer && param->is_linear ? o->optimizer : mt_element_optimizer(o);
    param->joins = mt_param_joins(o, param);
    param->field = row->field, param->field_name = row->field_name;
    mt_param_set_name(table, row, param);
    param->hf_transposed = table->family->transposed && layer >= 0 && !param->is_vector;
    param->hf_stride = 1;
    param->is_head = row->when & (MT_HAS(LM_HEAD) | MT_HAS(SEQUENCE_HEAD) | MT_HAS(TOKEN_HEAD));
    bool stacked = row->unit == MT_UNIT_EXPERTS && !strchr(mt_role_row_name(row, table->family->names), '#');
    bool of_layer = param->is_linear && layer >= 0 && param->linear != MT_LINEAR_ROUTER &&
                    !(row->when & (MT_HAS(MTP) | MT_HAS(INDEXER)));
    // the products of narrow matrices of Kimi delta attention, and of the indexer, stay in bf16
    param->takes_fp8 = of_layer && !continues && !(row->role >= MT_KDA_F_A && row->role <= MT_KDA_G_B);
    param->can_adapt = of_layer && !stacked && param->hf_groups == 1; // an adapter's file names modules
    if (stacked)
        mt_param_stack(table, row, param);
    else
        mt_param_join_tensor(table);
    mt_param_cut(table, mt_param_kinds[row->kind].cut, param);
}

/* The rows [row, end) of this rank's experts, expert by expert and without a gap. */
static void mt_params_add_experts(mt_param_table *table, const mt_role_row *row, const mt_role_row *end,
                                  int64_t layer) {
    int64_t count = table->options->num_experts / table->partition.ep, first = table->partition.ep_rank * count;
    for (int64_t expert = first; expert < first + count; expert++)
        for (const mt_role_row *next = row; next < end; next++)
            mt_param_add(table, next, layer, expert, expert > first || next > row);
}

/* Appends the rows of a unit that exist in a layer (-1: outside the layers) and returns their number. */
static int64_t mt_params_add_unit(mt_param_table *table, mt_unit unit, int64_t layer) {
    const mt_role_row *end = mt_role_rows + MT_NUM_ROLE_ROWS, *before = NULL, *next;
    uint64_t has = mt_layer_conditions(table->options, layer);
    int64_t count = table->count;
    for (int pass = 0; pass < 2; pass++) // parameters with weight decay come first
        for (const mt_role_row *row = mt_role_rows; row < end; row = next) {
            next = row + 1;
            if (row->unit != unit || (row->when & ~has) || (row->unless & has)) continue;
            while (unit == MT_UNIT_EXPERTS && next < end && next->fused) next++;
            if (mt_row_decays(table->options, row) != (pass == 0)) continue;
            if (unit == MT_UNIT_EXPERTS)
                mt_params_add_experts(table, row, next, layer);
            else
                mt_param_add(table, row, layer, -1, row->fused && before == row - 1);
            before = row;
        }
    return table->count - count;
}

/* A unit in a bucket of its own. */
static void mt_params_add_bucket(mt_param_table *table, mt_unit unit, int64_t layer) {
    if (mt_params_add_unit(table, unit, layer) > 0) table->bucket++;
}

/* Layers of a chunk that have parameters of their own: a repeated module is one. */
static int64_t mt_stage_own_layers(const mt_options *o, const mt_stage *stage) {
    return stage->num_layers + mt_min(stage->num_mtp, mt_num_mtp_modules(o));
}

/* One chunk's rows. */
static void mt_params_add_stage(mt_param_table *table, const mt_stage *stage, bool has_embedding) {
    if (stage->embedding) {
        mt_params_add_bucket(table, MT_UNIT_WORDS, -1);
        mt_params_add_bucket(table, MT_UNIT_POSITIONS, -1);
    }
    for (int64_t i = 0; i < mt_stage_own_layers(table->options, stage); i++) {
        mt_params_add_bucket(table, MT_UNIT_LAYER, stage->first_layer + i);
        mt_params_add_bucket(table, MT_UNIT_EXPERTS, stage->first_layer + i);
    }
    if (!stage->loss) return;
    if (!has_embedding && (mt_options_tied(table->options) || stage->num_mtp > 0)) {
        mt_params_add_bucket(table, MT_UNIT_WORDS, -1);
        table->rows[table->count - 1].counted = false;
    }
    mt_params_add_bucket(table, MT_UNIT_OUTPUT, -1);
}

/* Elements between the starts of parameters: 16-byte loads of bf16 and whole cache lines. */
enum { MT_PARAM_ALIGNMENT = 64 };

static int64_t mt_align(int64_t value) {
    return (value + MT_PARAM_ALIGNMENT - 1) / MT_PARAM_ALIGNMENT * MT_PARAM_ALIGNMENT;
}

/* Gives every parameter its offset: the table's order within each bucket. */
static void mt_params_set_offsets(mt_param_table *table) {
    int64_t end = 0;
    for (int64_t i = 0; i < table->count; i++) {
        mt_param *param = &table->rows[i];
        if (i > 0 && param->bucket != param[-1].bucket) end = 0;
        MT_CHECK(end == 0 || param[-1].weight_decay >= param->weight_decay);
        param->offset = param->continues ? end : mt_align(end);
        end = param->offset + param->rows * param->cols;
    }
}

/* ---- adapters, from the rows of the matrices that they add to. All A of a linear come first, as one operand, then
 * each B. */

bool mt_param_is_adapter(const mt_param *param) {
    return param->role == MT_LORA_A || param->role == MT_LORA_B;
}

/* Appends A or B of a matrix. A keeps the cut of its columns, B that of its rows; the gradient of the other one, which
 * all ranks hold, is a partial sum over them. */
static void mt_param_add_adapter(mt_param_table *table, const mt_param *base, mt_role role, bool continues) {
    bool is_a = role == MT_LORA_A, keeps_cut = base->shard_dim == is_a;
    const mt_partition *at = &table->partition;
    mt_param *param = &table->rows[table->count++];
    *param = *base;
    param->role = role, param->adapts = base->role;
    param->unit = base->unit == MT_UNIT_EXPERTS ? MT_UNIT_EXPERT_ADAPTERS : MT_UNIT_ADAPTERS;
    *(is_a ? &param->rows : &param->cols) = *(is_a ? &param->whole_rows : &param->whole_cols) =
        table->options->lora_rank;
    *(is_a ? &param->rows_option : &param->cols_option) = "--lora-rank";
    param->exists_option = "--lora-target", param->rows_stored = param->hf_rows_total = param->whole_rows;
    param->hf_row = 0, param->trained = true;
    param->hf_transposed = param->can_adapt = param->takes_fp8 = false;
    snprintf(param->hf_name, sizeof param->hf_name, "base_model.model.%.*s.lora_%c.weight",
             (int)(strlen(base->hf_name) - strlen(".weight")), base->hf_name, is_a ? 'A' : 'B');
    param->init = is_a ? MT_INIT_NORMAL : MT_INIT_ZEROS, param->init_std = 1 / sqrt(3 * (double)base->whole_cols);
    param->bucket = table->bucket, param->continues = continues, param->field += offsetof(mt_linear, adapter);
    *(is_a ? &param->first_row : &param->first_col) = 0;
    if (!keeps_cut) {
        param->shard_dim = -1, param->counted = (base->expert >= 0 ? at->etp_rank : at->tp_rank) == 0;
        param->gradient = base->shard_dim < 0 ? base->gradient : MT_GRADIENT_HEADS;
    }
    mt_param_join_tensor(table);
}

bool mt_role_has_adapters(const mt_options *o, mt_role role) {
    return o->lora_roles[role / 64] >> role % 64 & 1;
}

/* Appends the adapters of rows[count], the matrices of one linear. Matrices of one tensor share A (GPT-2's q, k, v). */
static void mt_params_add_linear_adapters(mt_param_table *table, const mt_param *rows, int64_t count) {
    const mt_options *o = table->options;
    int64_t first = table->count, output = 0;
    size_t parts = 0;
    for (const mt_param *base = rows; base < rows + count; base++)
        if (mt_role_has_adapters(o, base->role) && base->hf_row == 0)
            mt_param_add_adapter(table, base, MT_LORA_A, table->count > first);
    for (const mt_param *base = rows; base < rows + count && base->expert == rows->expert; output += base++->rows)
        for (const mt_param *other = base; other < rows + count; other++) { // of all experts
            if (!mt_role_has_adapters(o, base->role) || other->role != base->role) continue;
            bool continues = other > base || base->hf_row > 0;
            mt_param_add_adapter(table, other, MT_LORA_B, continues);
            parts += !continues;
            table->rows[table->count - 1].field += offsetof(mt_adapter, parts) + (parts - 1) * sizeof(mt_adapter_part);
            table->rows[table->count - 1].first_output = output;
        }
}

/* Freezes the rows of the table, and puts those of the adapters before them. */
static void mt_params_add_adapters(mt_param_table *table) {
    mt_param *rows = table->rows;
    int64_t count = table->count;
    table->rows = mt_calloc(3 * count * (int64_t)sizeof *rows), table->count = table->bucket = 0;
    for (int64_t i = 0, next; i < count; i = next) {
        for (next = i + 1; next < count && rows[next].continues;) next++;
        mt_params_add_linear_adapters(table, rows + i, next - i);
        bool ends = next == count || rows[next].bucket != rows[i].bucket;
        if (ends && table->count > 0 && table->rows[table->count - 1].bucket == table->bucket) table->bucket++;
    }
    for (int64_t i = 0; i < count; i++) {
        rows[i].trained = false, rows[i].bucket += table->bucket;
        table->rows[table->count++] = rows[i];
    }
    free(rows);
}

int64_t mt_params_build(mt_param **params, const mt_options *options, const mt_partition *partition) {
    mt_stage whole_model = {.num_layers = options->num_layers, .embedding = true, .loss = true};
    whole_model.num_mtp = options->mtp_num_layers;
    mt_partition whole = {.stages = &whole_model, .num_stages = 1, .tp = 1, .ep = 1, .etp = 1};
    mt_param_table table = {.options = options, .family = &mt_hf_families[options->hf_family]};
    const mt_partition *at = &table.partition;
    table.partition = partition ? *partition : whole;
    int64_t layers = 0;
    for (int64_t i = 0; i < at->num_stages; i++) layers += mt_stage_own_layers(options, &at->stages[i]);
    int64_t rows = (layers + 2) * MT_NUM_ROLES + layers * 6 * options->num_experts / at->ep;
    table.rows = mt_calloc(rows * (int64_t)sizeof(mt_param));
    bool has_embedding = false;
    for (int64_t i = 0; i < at->num_stages; i++) {
        has_embedding |= at->stages[i].embedding;
        mt_params_add_stage(&table, &at->stages[i], has_embedding);
    }
    for (int64_t i = 0; i < at->num_stages; i++) // the untrained of all layers share one bucket
        for (int64_t k = 0; k < mt_stage_own_layers(options, &at->stages[i]); k++)
            mt_params_add_unit(&table, MT_UNIT_UNTRAINED, at->stages[i].first_layer + k);
    if (options->lora_rank > 0) mt_params_add_adapters(&table);
    mt_params_set_offsets(&table);
    *params = table.rows;
    return table.count;
}

/* ==== §9 layers =================================================================================================== */
/* A transformer layer, forward and backward. Invariants: hidden states are [T, C] throughout; a backward is its forward
 * in reverse order; a backward overwrites gradients of activations and accumulates gradients of parameters in fp32. */

/* The arrays of a micro-batch in one block of memory. The blocks of host and device have the same offsets, so one copy
 * transfers all inputs of a pass. */
typedef struct mt_batch_block {
    int32_t *cache_rows, *logit_rows; // these three: for decoding
    int32_t *pages;                   // [mt_page_entries]
    mt_span *spans;                   // these three: for every pass
    int32_t *tokens, *positions;
    int32_t *labels; // from here on: for training and evaluation
    float *loss_mask;
    int64_t *token_index;
    int32_t *sequence;                // [T] index of each token's span
    int32_t *mtp_tokens, *mtp_labels; // [modules, T] of multi-token prediction
    float *mtp_weights;               // [modules, T] weights of the tokens' losses
} mt_batch_block;

/* One forward or backward of one micro-batch: built once, then passed to every function below. */
typedef struct mt_pass {
    struct mt_micro_batch *mb;   // its saved activations
    const mt_batch_block *batch; // its inputs, on the device
    mt_tensor_parallel tp;
    mt_stream *stream;
    mt_spans spans;
    mt_context *context;     // attention with context parallelism, or NULL
    const mt_batch *whole;   // forward: the micro-batch as its source gave it
    int64_t num_sequences;   // of the micro-batch, on all ranks that share it
    int64_t unpadded;        // its tokens on them, without padding; not when decoding
    int64_t T;               // tokens
    int64_t rows, first_row; // this rank's rows of hidden states: [first_row, first_row + rows) of the T tokens
    int64_t message_rows;    // of a message between pipeline stages
    bool training;           // dropout is on, and the forward adds to the step's statistics
    bool replay;             // a recomputed forward: it writes activations only
    bool decode;             // attention reads the KV cache
    int halves;              // of the backward to run: MT_BACKWARD_*
    bool last;               // the last backward of this chunk in this step
} mt_pass;

/* States at the borders of this rank's pieces in context parallelism: see mt_context_carry. */
enum { MT_PIECES = 2 };
typedef struct mt_carry {
    int64_t elements; // of a state
    float *states;    // [MT_PIECES, elements] before the pieces
    float *dstates;   // [MT_PIECES, elements] gradients of the states after them
    float *sent;      // [elements]
} mt_carry;

/* Buffers that all layers share. A union names the values that a buffer holds one after the other. */
typedef struct mt_layer_scratch {
    void *dresidual; // [R, C] gradient of the residual stream
    void *dmiddle;   // [R, C] split backward: that between the blocks of a layer; both are read until the layer's end
    void *block_out; // [R, C] a block's output before it is added to the residual stream, and its gradient
    void *dout;      // [R, C] gradient of a block's output before the norm after it
    void *dnormed;   // [R, C] gradient of a norm's output
    union {
        void *dqkv;        // [T, (H + 2G) D]; latent attention: dq, then dkv
        void *dmlp_hidden; // [T, 2F] or [T, F]
    };
    union {
        void *dattended;   // [T, H Dv]
        void *dmlp_active; // [T, F]
        void *dinput;      // [R, C] a second gradient of a norm's output
    };
    void *dqk;                       // [T, (H + G) D], with q/k norm
    float *means;                    // [2, T], with q/k norm over all heads
    float *row_dot;                  // [T, H]
    void *dgate;                     // [T, H Dv] gradient of the output gate
    void *dconv, *ddelta;            // gradients of conv and of delta_out or mamba_out
    void *ddecays, *dgates, *dlow;   // Kimi delta attention: gradients of kda_f, kda_g, and of kda_f_a or kda_g_a
    void *dshort_x;                  // [T, C / tp] gradient of a short convolution's input
    mt_carry conv_carry, rule_carry; // context parallelism: states of a mixer's convolution, of its rule or scan
    float *rule_maps, *drule_maps;   // [MT_PIECES, ...] maps, dmaps of mt_delta_args or mt_ssd_args
    /* latent attention */
    void *kv_b_out;     // [T, H (D - rotary + Dv)] output of kv_b, and its gradient
    void *k_rope;       // [T, rotary] rotary channels of the keys, and their gradient
    void *dlatent;      // [R, q_lora_rank + kv_lora_rank + rotary]
    void *dlatent_norm; // [R, q_lora_rank or kv_lora_rank] gradient of a latent norm's output
    /* sparse attention */
    void *indexer_keys;     // [T, D] of the indexer, of all tensor-parallel ranks
    void *indexer_whole;    // context parallelism: [T of all ranks, D], in order of position
    void *indexer_by_rank;  // likewise, in order of ranks; gradients too, in fp32
    float *dindexer_local;  // [T, D], with context parallelism
    int32_t *selected;      // [T, topk] the last layer's, for layers that share it
    float *shares, *slopes; // [MT_INDEXER_ROWS, width] of a block of queries: see mt_indexer_args
    float *dindexer_keys;   // [T, D]; with context parallelism of all ranks
    float *dindexer_own;    // [R, D], with sequence parallelism
    void *dindexer_q;       // [R, H D]
    void *dindexer_k;       // [R, D] of keys, before RoPE and then before the norm
    void *dindexer_k_in;    // [R, D]
    void *dindexer_weights; // [R, H]
} mt_layer_scratch;

/* [max_position, R / 2] each. */
typedef struct mt_rope_table {
    float *cos, *sin;
} mt_rope_table;

/* This rank's part of a model. */
struct mt_model {
    const mt_options *options;
    const mt_grid *grid;
    const mt_ops *ops;
    mt_stream *stream;
    mt_dtype dtype;
    float loss_scale; // of the gradients of this step: 1 but in fp16
    mt_model_plan plan;
    int64_t C, D, Dv;                 // as in megatron.h; Dv: value channels per head
    int64_t H, G, F, V;               // this rank's share of heads, groups, widest MLP and padded vocabulary
    int64_t vocab_first, vocab_count; // rows of the vocabulary in that share, without padding
    int64_t head_width;               // columns of the head's output: V, or 1 for values
    int64_t max_rows;                 // R of the largest micro-batch
    /* this rank's part of the model */
    mt_stage *stages;     // [num_chunks]
    int64_t num_chunks;   // virtual stages of this rank
    int64_t *first_local; // [num_chunks + 1] index of each chunk's first layer in `layers`
    int64_t num_layers;   // of this rank
    bool has_embedding, has_loss;
    /* parameters */
    mt_param *params;
    int64_t num_params, num_buckets;
    int64_t num_trained_buckets; // the first buckets; the others hold no gradients
    mt_bucket *buckets;
    mt_layer *layers;                                                 // [num_layers]
    int64_t word_bucket, position_bucket, head_bucket, output_bucket; // -1: not on this rank
    struct mt_sharding *sharding;
    mt_outer outer;
    mt_rope_table rope_tables[3]; // by mt_layer_rope; MT_ROPE_NONE has none
    int64_t rotary_dim;           // R
    /* memory */
    mt_arena arena;
    mt_arena parts[MT_NUM_PARTS]; // of the device; base NULL while the part rests
    void *resting[MT_NUM_PARTS];  // its contents on the host
    unsigned resting_parts;       // bits 1 << mt_part
    unsigned lent_parts;          // that rest, and whose copies on the host are lent
    void **host_memory;           // [num_host_memory] freed with the model
    int64_t num_host_memory;
    void *workspace; // of the stream
    int64_t workspace_bytes, bytes[MT_PLAN_TOTAL];
    struct mt_micro_batch *micro_batches; // all live micro-batches, sorted by chunk
    int64_t num_micro_batches;
    int64_t batch_bytes;   // of a micro-batch's block
    char *staged_batch[2]; // two blocks on the host: one is filled while the other is copied
    mt_event *copied[2];   // end of the copy of each
    int staged;            // index of the block filled last
    mt_batch local_batch;  // this rank's shard of a batch, with context parallelism
    mt_layer_scratch scratch;
    mt_tensor_parallel tp;
    mt_adapter_scratch adapter_scratch; // of all linears but experts'
    bool adapters_off;                  // see mt_model_use_adapters
    /* recomputation */
    unsigned recompute_modules;                    // MT_MODULE_*: of selective recomputation
    struct mt_recompute_buffer *recompute_buffers; // [num_recompute_buffers] one for each layer of a unit
    int64_t num_recompute_buffers;
    const struct mt_activations *recomputed; // the layer whose values the buffers hold, the last one of its unit
    /* offloading */
    struct mt_offload *offload;               // of activations; NULL: none
    struct mt_host_optimizer *host_optimizer; // NULL: none
    struct mt_muon *muon;                     // NULL: no step on matrices
    mt_arena host;                            // pinned host memory of all offloaded values
    struct mt_experts *experts;
    struct mt_mtp *mtp;
    struct mt_fp8_model *fp8;              // NULL: no products in fp8
    struct mt_link *links;                 // [MT_NUM_LINKS]
    bool runs_alone;                       // one micro-batch passes through the pipeline at a time
    float *row_stats, *logp, *entropy;     // [4, max_logits], [max_logits]; with a value head, logp is the values
    struct mt_host_loss *host_loss;        // of a loss on the host, and of mt_score_tokens
    void *gathered_logits, *whole_logits;  // [tensor ranks, rows, V] and [rows, tensor ranks, V], to copy or to sample
    void *staged_logits;                   // host: a copy of MT_STAGED_ROWS rows, or of sampled
    double *uniforms;                      // [max_logits] of mt_sample_args
    mt_sampled *sampled;                   // [max_logits]
    struct mt_decode_graph *decode_graphs; // [max_logits + 1], indexed by number of sequences
    mt_span *step_spans;                   // [max_logits] longest spans of a decode step
    void **k_cache, **v_cache;             // [num_layers] of [cache_rows, G D] and [cache_rows, G Dv]
    void **indexer_cache;                  // [num_layers] of [cache_rows, D] of layers with an indexer
    float **rule_states, **conv_states;    // [num_layers] of [slots, state] of mixers that have them
    double *indexer_sums;                  // [4] loss of indexers and its queries; two numbers that are discarded
    struct mt_step_numbers *numbers;       // on the device
    struct mt_trainer *trainer;
    float (*state_amax)[3]; // [2, num_params] amax and new_amax of mt_update_args; NULL: no state has a scale
    bool reruns;            // --rerun-mode validate_results
    mt_stream *reader;      // mt_model_set_reader
    mt_pass last_forward;
    /* context parallelism: one context for batches of all ranks; with dynamic sizes one each for 1, 2, 4 ... ranks */
    mt_context *contexts[2 + MT_CONTEXT_BLOCKS];
    int num_contexts;
    void *context_memory;                    // that they share: one is in use
    const struct mt_micro_batch *in_context; // the micro-batch that is loaded
    int32_t *local_sequence;                 // [max_tokens] of local_batch: see mt_batch_block
};

/* Later work on `stream` waits for the current work of `other`, as PyTorch's Stream.wait_stream. */
static void mt_wait_stream(const mt_model *m, mt_stream *stream, mt_stream *other) {
    if (stream != other) m->ops->stream_wait_stream(stream, other);
}

/* A copy whose result the host reads, or whose source it frees, at once. */
static void mt_copy_wait(const mt_model *m, void *to, const void *from, int64_t bytes) {
    m->ops->memory_copy(to, from, bytes, m->stream);
    m->ops->stream_synchronize(m->stream);
}

/* Zeroed host memory that lives as long as the model. */
static void *mt_model_calloc(mt_model *m, int64_t bytes) {
    m->host_memory = mt_realloc(m->host_memory, (m->num_host_memory + 1) * (int64_t)sizeof(void *));
    return m->host_memory[m->num_host_memory++] = mt_calloc(bytes);
}

/* ==== §9a rotary tables =========================================================================================== */

/* Tables that some layer of the model reads. */
static bool mt_rope_table_used(const mt_options *o, mt_layer_rope which) {
    int64_t layers = o->num_layers + mt_min(o->mtp_num_layers, 1); // modules are alike
    for (int64_t layer = 0; layer < layers && which != MT_ROPE_NONE; layer++)
        if (mt_layer_kind_of(o, layer).rope == which) return true;
    for (int64_t layer = 0; layer < layers && which == MT_ROPE_MODEL; layer++)
        if (mt_mixer_is_latent(mt_layer_kind_of(o, layer).mixer)) return true;
    return false;
}

/* YaRN's boundary: index of the channel pair that rotates `rotations` times over the original context (Peng et al.). */
static double mt_yarn_pair(const mt_options *o, double rotations, int64_t R) {
    double context = (double)o->original_max_position_embeddings;
    return (double)R * log(context / (rotations * 2 * M_PI)) / (2 * log(o->rotary_base));
}

double mt_rope_frequency(const mt_options *o, mt_layer_rope which, int64_t i, int64_t R) {
    if (!mt_has_rope(o)) return 0; // latent attention without RoPE
    if (which == MT_ROPE_WINDOW) return pow(o->window_rotary_base, -2.0 * (double)i / (double)R);
    double frequency = pow(o->rotary_base, -2.0 * (double)i / (double)R), factor = o->rope_scaling_factor;
    if (o->rope_scaling_type == MT_ROPE_SCALING_LINEAR) return frequency / factor;
    if (o->rope_scaling_type == MT_ROPE_SCALING_LLAMA3) {
        double rotations = (double)o->original_max_position_embeddings * frequency / (2 * M_PI);
        double low = o->rope_low_freq_factor, high = o->rope_high_freq_factor;
        double smooth = fmin(fmax((rotations - low) / (high - low), 0), 1); // 0: low frequency, scaled; 1: unchanged
        return (1 - smooth) * frequency / factor + smooth * frequency;
    }
    if (o->rope_scaling_type == MT_ROPE_SCALING_YARN) {
        double low = mt_yarn_pair(o, o->yarn_beta_fast, R), high = mt_yarn_pair(o, o->yarn_beta_slow, R);
        if (o->yarn_correction_range_round_to_int) low = floor(low), high = ceil(high);
        low = fmax(low, 0), high = fmin(high, (double)R - 1);
        if (low == high) high += 0.001;
        double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1); // 0: extrapolate, 1: interpolate
        return frequency * (1 - ramp) + frequency / factor * ramp;
    }
    return frequency;
}

/* Computes a table in double on the host, then copies it to the device. */
static void mt_rope_table_fill(mt_model *model, mt_layer_rope which) {
    int64_t R = model->rotary_dim, half = R / 2, count = model->plan.max_position * half;
    float *cosines = mt_malloc(count * 4), *sines = mt_malloc(count * 4);
    bool yarn = which == MT_ROPE_MODEL && model->options->rope_scaling_type == MT_ROPE_SCALING_YARN;
    double amplitude = yarn ? model->options->yarn_attention_factor : 1; // makes attention slightly sharper
    for (int64_t i = 0; i < half; i++) {
        double frequency = mt_rope_frequency(model->options, which, i, R);
        for (int64_t position = 0; position < model->plan.max_position; position++) {
            cosines[position * half + i] = (float)(amplitude * cos((double)position * frequency));
            sines[position * half + i] = (float)(amplitude * sin((double)position * frequency));
        }
    }
    model->ops->memory_copy(model->rope_tables[which].cos, cosines, count * 4, model->stream);
    mt_copy_wait(model, model->rope_tables[which].sin, sines, count * 4);
    free(cosines);
    free(sines);
}

/* ==== §9b saved values ============================================================================================ */
/* Each layer, and each output, has a list of slots: the values that its forward saves for its backward. Memory plan,
 * arena and the stash of a split backward derive from the list. With pass->replay a forward writes the same slots again
 * and changes nothing else. Recomputed slots (Chen et al., "Training deep nets with sublinear memory cost") lie in
 * buffers that all micro-batches share; a replay restores them before the backward reads them. Offloaded slots lie in
 * such buffers too; copies to and from host memory preserve them. */

/* Saved values of a norm: y[R, C], mean[R] (LayerNorm only), rstd[R]. */
typedef struct mt_normed {
    void *y;
    float *mean, *rstd;
} mt_normed;

/* A product whose weight gradient a split backward computes later. */
typedef struct mt_deferred {
    const mt_linear *linear;
    const void *x, *dy;
} mt_deferred;

enum { MT_MAX_DEFERRED = 8 };

/* The operands of the backward of a block of a layer, a mixer or a feed-forward: dx from dout and x. */
typedef struct mt_block_gradients {
    const void *x;     // [R, C] the forward's operand
    size_t x_field;    // its offset in mt_activations
    const void *dout;  // [R, C]
    bool gathered;     // the dispatcher of experts has gathered dout
    void *dx;          // [R, C]
    mt_deferred *left; // not NULL: the caller computes the gradient of the weight that reads x, by this product
} mt_block_gradients;

/* Saved values of a layer. R: the micro-batch's T tokens, or with sequence parallelism this rank's share of them. H, G
 * and F: this rank's share. The slots of a layer define its fields and their sizes; other fields are NULL. */
typedef struct mt_activations {
    void *input;            // [R, C] the residual stream
    void *input_part;       // [R, C / tp] this rank's part of it, with --distribute-saved-activations
    mt_normed input_norm;   // [R, C]
    void *qkv;              // [T, (H + 2G) D]; without q/k norm, rotated in place
    void *qk;               // [T, (H + G) D] normalised and rotated q and k, with q/k norm
    float *q_rstd, *k_rstd; // [T, H], [T, G]
    /* latent attention, in place of qkv */
    void *q, *kv;                          // [T, H D]; [T, H D] of k, then [T, H Dv] of v
    void *latent;                          // [R, q_lora_rank + kv_lora_rank + rotary] before norms and rotation
    void *q_latent, *kv_latent;            // [R, q_lora_rank], [R, kv_lora_rank] normalised
    float *q_latent_rstd, *kv_latent_rstd; // [R]
    /* sparse attention */
    void *indexer_q, *indexer_k;            // [R, H D], [R, D] of the indexer, rotated
    void *indexer_k_in, *indexer_weights;   // [R, D] before the norm, [R, H]
    float *indexer_k_mean, *indexer_k_rstd; // [R]
    int32_t *selected;                      // [T, topk] keys: see mt_indexer_args
    void *attended;                         // [T, H Dv]
    float *lse;                             // [T, H]
    void *gate, *gated;                     // [T, H Dv] the output gate, and attended times its sigmoid
    void *delta_in;                         // [T, q, k, v, z, b, a] of a gated delta net
    void *kda_f_a, *kda_g_a;                // [R, channels] of Kimi delta attention: narrow products,
    void *kda_f, *kda_g;                    // and decays [T, heads, channels] and gates of the output likewise
    void *conv;                             // [T, q, k, v] after the short convolution
    void *delta_out;                        // [T, value heads, channels] of the delta rule
    float *delta_rstd;                      // [T, value heads] of its norm
    void *short_in, *short_x;               // [T, B, C, x] of a gated short convolution, and its input B x
    void *mamba_in;                         // [T, z, x, B, C, dt] of Mamba-2; conv: its x, B, C
    void *mamba_out;                        // [T, heads, channels] of the scan
    float *mamba_rstd;                      // [T, groups] of its norm
    void *attention_out;                    // [R, C] before the norm after it
    mt_normed attention_out_norm;           // its y is not kept, as that of mlp_out_norm
    void *middle;                           // [R, C] residual stream between attention and MLP
    mt_normed mlp_norm;                     // [R, C]
    void *mlp_hidden;                       // [T, 2F] or [T, F] before the activation
    void *mlp_active;                       // [T, F] after it
    void *mlp_out;                          // [R, C] of the MLP or the experts, before the norm after it
    mt_normed mlp_out_norm;
    struct mt_routing *routing;            // of a layer with experts
    void *experts_out;                     // [R, L] sums of latent experts' results
    mt_deferred deferred[MT_MAX_DEFERRED]; // between the two halves of a split backward
    int64_t num_deferred;
    void *x_transposed[MT_MAX_DEFERRED]; // of linears in fp8
    void *host; // copy of the offloaded slots; NULL: they stay in their buffer until the backward
} mt_activations;

/* Location of a saved value between forward and backward: its own memory, or a buffer that others overwrite and into
 * which the value is computed again, or copied from host memory. */
typedef enum mt_residency { MT_KEEP, MT_RECOMPUTE, MT_OFFLOAD } mt_residency;

typedef struct mt_slot {
    const char *name;
    size_t field; // offset of a pointer in mt_activations, mt_routing or mt_output
    int64_t rows, width;
    mt_dtype dtype;
    unsigned modules; // MT_MODULE_*: selective recomputation of any of these computes the value again
    unsigned input;   // MT_OFFLOAD_*: the module whose input this is, 0: none that can be offloaded
    bool once;        // depends on the state of the step: a replay cannot compute it, so it is kept
    bool passing;     // x of a linear in fp8 that saves x^T: no backward reads it, so it shares a buffer
    mt_residency residency;
    size_t stash_of; // a split backward overwrites the value with dy of this linear: its offset in mt_layer; 0: of none
} mt_slot;

enum { MT_MAX_SLOTS = 40 };
typedef struct mt_slots {
    mt_slot slots[MT_MAX_SLOTS];
    int64_t count;
} mt_slots;

static mt_slot *mt_slot_add(mt_slots *list, const char *name, size_t field, int64_t rows, int64_t width,
                            mt_dtype dtype) {
    for (mt_slot *slot = list->slots; slot < list->slots + list->count; slot++) { // of another mixer of the model
        if (slot->field != field) continue;
        if (mt_dtype_size(dtype) * rows * width > mt_dtype_size(slot->dtype) * slot->rows * slot->width)
            slot->rows = rows, slot->width = width, slot->dtype = dtype;
        return slot;
    }
    MT_CHECK(list->count < MT_MAX_SLOTS);
    list->slots[list->count] = (mt_slot){.name = name, .field = field, .rows = rows, .width = width, .dtype = dtype};
    return &list->slots[list->count++];
}
#define MT_SLOT_OF(type, list, member, rows, width, dtype)                                                             \
    mt_slot_add(list, #member, offsetof(type, member), rows, width, dtype)
#define MT_SLOT(list, ...)         MT_SLOT_OF(mt_activations, list, __VA_ARGS__)
#define MT_ROUTING_SLOT(list, ...) MT_SLOT_OF(mt_routing, list, __VA_ARGS__)
#define MT_OUTPUT_SLOT(list, ...)  MT_SLOT_OF(mt_output, list, __VA_ARGS__)

/* The pointer of a slot in the struct at `base`. */
static void *mt_slot_read(const void *base, const mt_slot *slot) {
    void *value;
    memcpy(&value, (const char *)base + slot->field, sizeof value);
    return value;
}

/* ---- offloading (Yuan et al., "Accelerating the training of large language models using efficient activation
 * rematerialization and optimal hybrid parallelism"): layers use two buffers in turn. The offloaded slots of a layer
 * are one block, so one copy moves them. The copy out runs during the next layer's forward, the copy in during the
 * previous layer's backward; both on one stream, so a copy in finds the block that was copied out. Invariants: a copy
 * starts after all computation enqueued so far; before a layer writes or reads its buffer, the computation waits for
 * the copies that use it, and then no later copy has been enqueued. */

enum { MT_OFFLOAD_BUFFERS = 2 };

typedef struct mt_offload_buffer {
    void *memory;
    const mt_activations *holds; // the layer whose values the buffer holds, or will hold after the copy
    bool copying;                // the computation has not waited for the last copy from or to the buffer
} mt_offload_buffer;

typedef struct mt_offload {
    unsigned modules;
    mt_stream *stream; // of the copies
    mt_offload_buffer buffers[MT_OFFLOAD_BUFFERS];
} mt_offload;

static mt_offload_buffer *mt_offload_buffer_of(const mt_model *m, const mt_layer *w) {
    return &m->offload->buffers[w->offload_buffer];
}

/* The computation from here on waits for the copies that use a layer's buffer, and so for all others. */
static void mt_offload_wait(const mt_model *m, const mt_pass *p, const mt_layer *w) {
    if (!mt_offload_buffer_of(m, w)->copying) return;
    mt_wait_stream(m, p->stream, m->offload->stream);
    for (int i = 0; i < MT_OFFLOAD_BUFFERS; i++) m->offload->buffers[i].copying = false;
}

/* Enqueues a copy of a layer's offloaded slots, behind the computation enqueued so far. */
static void mt_offload_copy(const mt_model *m, const mt_pass *p, const mt_layer *w, void *to, const void *from) {
    mt_wait_stream(m, m->offload->stream, p->stream);
    m->ops->memory_copy(to, from, w->offload_bytes, m->offload->stream);
    mt_offload_buffer_of(m, w)->copying = true;
}

/* Before the first write of a layer's slots in a forward. */
static void mt_offload_claim(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    if (!m->offload || w->offload_bytes == 0) return;
    mt_offload_wait(m, p, w);
    mt_offload_buffer_of(m, w)->holds = a;
}

/* After a layer's forward: copies its offloaded slots to the host. A replay writes the same values again. */
static void mt_offload_store(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    if (a->host && p->training && !p->replay) mt_offload_copy(m, p, w, a->host, mt_offload_buffer_of(m, w)->memory);
}

/* Copies the offloaded slots of a layer back, unless its buffer holds them. */
static void mt_offload_load(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    mt_offload_buffer *buffer = mt_offload_buffer_of(m, w);
    if (w->offload_bytes == 0 || buffer->holds == a) return;
    MT_CHECK(a->host);
    mt_offload_copy(m, p, w, buffer->memory, a->host);
    buffer->holds = a;
}

/* Sets the residency of a layer's slots; w NULL: all are kept. */
static void mt_slots_place(const mt_model *m, mt_slots *list, const mt_layer *w) {
    for (mt_slot *slot = list->slots; w && slot < list->slots + list->count; slot++) {
        bool recompute = w->recomputed || (slot->modules & m->recompute_modules) || slot->passing;
        bool offload = m->offload && (slot->input & m->offload->modules);
        slot->residency = recompute && !slot->once ? MT_RECOMPUTE : offload ? MT_OFFLOAD : MT_KEEP;
    }
}

/* Adds the slot of x^T of a linear in fp8, unless x is computed or gathered again for the backward or arrives in parts,
 * or the weight is frozen below adapters. read_later: the backward also reads x. */
static void mt_slot_add_transposed(const mt_model *m, mt_slots *list, size_t x, const mt_linear *l, size_t field,
                                   bool read_later) {
    mt_slot *slot = list->slots;
    if (!l->fp8 || !l->fp8->recipe->wgrad || l->fp8->in_place[MT_FP8_X] || m->options->lora_rank > 0) return;
    while (slot->field != x) slot++;
    bool gathers = m->tp.sequence_parallel && l->kind == MT_LINEAR_COLUMN;
    bool recomputes = m->options->recompute_granularity == MT_RECOMPUTE_FULL || (slot->modules & m->recompute_modules);
    if (gathers || recomputes || m->tp.overlaps) return;
    mt_arena bytes = {0};
    mt_fp8_allocate_columns(&bytes, l, slot->rows, l->K, l->fp8->recipe->format);
    mt_slot_add(list, "x_transposed", field, 1, bytes.used, MT_U8)->input = slot->input;
    l->fp8->saved_x = field, slot->passing = !read_later;
}

/* x^T that the forward of a linear saves in the struct at `base`, or NULL. */
static void *mt_saved_x(const void *base, const mt_linear *l) {
    return l->fp8 && l->fp8->saved_x ? mt_slot_read(base, &(mt_slot){.field = l->fp8->saved_x}) : NULL;
}

/* Allocates the slots of one residency and stores their pointers in the struct at `base`. */
static void mt_slots_allocate(const mt_slots *list, mt_residency residency, void *base, mt_arena *arena) {
    for (const mt_slot *slot = list->slots; slot < list->slots + list->count; slot++) {
        if (slot->residency != residency) continue;
        void *value = mt_arena_alloc(arena, slot->rows * slot->width * mt_dtype_size(slot->dtype));
        memcpy((char *)base + slot->field, &value, sizeof value);
    }
}

/* The buffer of the recomputed values of one layer of a unit. All units and micro-batches share it. */
typedef struct mt_recompute_buffer {
    void *memory;
    int64_t bytes;
    struct mt_expert_rows *rows; // recomputed rows of experts, if their number depends on the data
} mt_recompute_buffer;

static mt_recompute_buffer *mt_recompute_buffer_of(const mt_model *m, const mt_layer *w) {
    return &m->recompute_buffers[w->recomputed ? w->index - w->recompute_unit : 0];
}

/* The pass as linears see it. */
static mt_linear_pass mt_linears(const mt_pass *p) {
    return (mt_linear_pass){.tp = &p->tp, .training = p->training, .token_index = p->batch->token_index};
}

/* ---- split backward (Qi et al., "Zero bubble pipeline parallelism"): the weights' half needs x and dy of every
 * product. x is saved in any case. dy overwrites a slot that only the input's half reads, so a split backward needs no
 * extra memory. */

/* The slot of a layer's saved value, by its offset in mt_activations. */
static const mt_slot *mt_slot_of(const mt_layer *w, size_t field) {
    const mt_slot *slot = w->slots->slots, *end = slot + w->slots->count;
    while (slot < end && slot->field != field) slot++;
    MT_CHECK(slot < end);
    return slot;
}

/* The slot in which a split backward keeps dy of a linear. */
static const mt_slot *mt_stash_slot(const mt_layer *w, const mt_linear *linear) {
    const mt_slot *slot = w->slots->slots, *end = slot + w->slots->count;
    size_t offset = (size_t)((const char *)linear - (const char *)w);
    while (slot < end && slot->stash_of != offset) slot++;
    MT_CHECK(slot < end);
    return slot;
}

/* The halves of a linear's backward to compute now. A split backward defers the weights' half if x, which is `field` of
 * mt_activations, and the stash keep their values until then. */
static int mt_layer_linear_halves(const mt_pass *p, const mt_layer *w, const mt_linear *linear, size_t field) {
    if (p->halves != MT_BACKWARD_INPUT) return p->halves;
    if (linear->fp8 && linear->fp8->saved_x) field = linear->fp8->saved_x;
    bool kept = mt_slot_of(w, field)->residency == MT_KEEP && mt_stash_slot(w, linear)->residency == MT_KEEP;
    return kept ? MT_BACKWARD_INPUT : MT_BACKWARD_BOTH;
}

/* Defers the gradient of a weight: copies dy to the linear's stash slot. */
static void mt_defer_weight(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                            const mt_linear *linear, const void *x, const void *dy) {
    if (!mt_linear_trains(linear)) return;
    MT_CHECK(a->num_deferred < MT_MAX_DEFERRED);
    void *stash = mt_slot_read(a, mt_stash_slot(w, linear));
    int64_t rows = linear->kind == MT_LINEAR_COLUMN ? p->T : p->rows;
    int64_t size = linear->fp8 && linear->fp8->in_place[MT_FP8_DY] ? 1 : mt_dtype_size(m->dtype);
    m->ops->memory_copy(stash, dy, rows * linear->N * size, p->stream);
    a->deferred[a->num_deferred++] = (mt_deferred){linear, x, stash};
}

/* Where a forward stores x^T of a linear, or NULL. */
static void *mt_stored_x(const mt_pass *p, const mt_activations *a, const mt_linear *linear) {
    return p->training && !p->replay ? mt_saved_x(a, linear) : NULL;
}

/* y NULL: nothing reads it, in a replay of a unit's last block. */
static void mt_layer_linear_forward(const mt_pass *p, const mt_activations *a, const mt_linear *linear, const void *x,
                                    void *y) {
    if (!y) return;
    void *x_transposed = mt_stored_x(p, a, linear);
    mt_linear_forward(mt_linears(p), linear, &(mt_linear_io){.x = x, .x_transposed = x_transposed, .y = y});
}

/* Backward of a linear in a layer, whose io->x is `field` of mt_activations; MT_BACKWARD_INPUT alone defers the
 * weight's gradient. */
static void mt_layer_linear_backward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                     const mt_linear *linear, size_t field, mt_linear_io *io) {
    int halves = mt_layer_linear_halves(p, w, linear, field);
    io->x_transposed = mt_saved_x(a, linear);
    mt_linear_backward(mt_linears(p), linear, io, halves);
    if (halves == MT_BACKWARD_INPUT) mt_defer_weight(m, p, w, a, linear, io->x, io->dy);
}

/* The weights' half of a split backward. */
static void mt_layer_backward_weight(const mt_pass *p, mt_activations *a) {
    for (const mt_deferred *d = a->deferred; d < a->deferred + a->num_deferred; d++)
        mt_linear_backward_weight(mt_linears(p), d->linear,
                                  &(mt_linear_io){.x = d->x, .x_transposed = mt_saved_x(a, d->linear), .dy = d->dy});
    a->num_deferred = 0;
}

/* ==== §9c norms and the residual stream =========================================================================== */

/* x[R, C] *= factor. */
static void mt_scale(const mt_model *m, const mt_pass *p, void *x, double factor) {
    if (factor != 1) m->ops->scale(x, (float)factor, p->rows * m->C, m->dtype, p->stream);
}

/* The dropouts of a layer; each has a key of its own. */
enum { MT_DROP_EMBEDDING, MT_DROP_ATTENTION, MT_DROP_ATTENTION_OUT, MT_DROP_MLP_OUT, MT_NUM_DROPS };
enum {
    MT_RANDOM_PARAMETER = 1,
    MT_RANDOM_DROPOUT = 2,
    MT_RANDOM_SAMPLE = 3,
    MT_RANDOM_ADAPTER = 4,
    MT_RANDOM_ROUTER = 5,
    MT_RANDOM_INJECTION = 6
};

static mt_dropout mt_model_dropout(const mt_model *m, const mt_pass *p, int64_t layer, int which) {
    double rate = which == MT_DROP_ATTENTION ? m->options->attention_dropout : m->options->hidden_dropout;
    uint64_t index = (uint64_t)((layer + 1) * MT_NUM_DROPS + which);
    return (mt_dropout){.p = p->training ? rate : 0,
                        .key = mt_random_key((uint64_t)m->options->seed, MT_RANDOM_DROPOUT, index)};
}

/* sum[rows, C] += x, in the model's type. */
static void mt_add_to(const mt_model *m, const mt_pass *p, void *sum, const void *x) {
    m->ops->add(sum, sum, x, p->rows * m->C, m->dtype, p->stream);
}

/* Statistics of a norm. */
static void mt_norm_statistics_slots(mt_slots *s, const mt_model *m, const char *name, size_t field) {
    if (m->options->normalization == MT_LAYERNORM)
        mt_slot_add(s, name, field + offsetof(mt_normed, mean), m->max_rows, 1, MT_F32);
    mt_slot_add(s, name, field + offsetof(mt_normed, rstd), m->max_rows, 1, MT_F32);
}

/* input: MT_OFFLOAD_* of the module that reads the norm's output. w may be NULL. */
static void mt_norm_slots(mt_slots *s, const mt_model *m, const char *name, size_t field, unsigned input,
                          const mt_norm *w) {
    mt_dtype dtype = w && w->reader ? MT_U8 : m->dtype;
    mt_slot *y = mt_slot_add(s, name, field + offsetof(mt_normed, y), m->max_rows, m->C, dtype);
    y->modules = MT_MODULE_LAYERNORM, y->input = input;
    mt_norm_statistics_slots(s, m, name, field);
}

/* The number added to the weights of all norms of the model. */
static float mt_norm_offset(const mt_options *o) {
    return o->layernorm_zero_centered_gamma ? 1 : 0;
}

static mt_norm_args mt_norm_operands(const mt_model *m, const mt_pass *p, const mt_norm *w, const mt_normed *n) {
    mt_norm_args a = {.T = p->rows, .H = 1, .C = m->C, .w = w->weight.w, .b = w->bias.w, .y = n->y};
    a.mean = n->mean, a.rstd = n->rstd, a.dw = w->weight.dw, a.db = w->bias.dw;
    a.w_offset = mt_norm_offset(m->options);
    a.quantize = mt_fp8_args(p->training, w->reader, MT_FP8_X, n->y, p->rows, NULL);
    a.x_stride = a.y_stride = a.dx_stride = a.dy_stride = m->C, a.eps = (float)m->options->norm_epsilon;
    return a;
}

/* The operation of the model's kind of norm, RMSNorm or LayerNorm. */
static void mt_norm_forward_of(const mt_model *m, const mt_pass *p, const mt_norm_args *a) {
    (a->mean ? m->ops->layernorm_forward : m->ops->rmsnorm_forward)(a, m->dtype, p->stream);
}
static void mt_norm_backward_of(const mt_model *m, const mt_pass *p, const mt_norm_args *a) {
    (a->mean ? m->ops->layernorm_backward : m->ops->rmsnorm_backward)(a, m->dtype, p->stream);
}

/* n = norm(x[rows, C]). */
static void mt_norm_forward(const mt_model *m, const mt_pass *p, const mt_norm *w, const mt_normed *n, const void *x) {
    mt_norm_args a = mt_norm_operands(m, p, w, n);
    a.x = x;
    mt_norm_forward_of(m, p, &a);
}

/* dx = dresidual + gradient of x through the norm, from dy, that of its output; dresidual may be NULL, or dx. */
static void mt_norm_backward(const mt_model *m, const mt_pass *p, const mt_norm *w, const mt_normed *n, void *dx,
                             const void *dresidual, const void *dy, const void *x) {
    mt_norm_args a = mt_norm_operands(m, p, w, n);
    a.x = x, a.dy = dy, a.dresidual = dresidual, a.dx = dx;
    mt_norm_backward_of(m, p, &a);
}

/* The operands of a dropout, except x, residual and out. */
static mt_dropout_add_args mt_dropout_operands(const mt_model *m, const mt_pass *p, int64_t layer, int which) {
    return (mt_dropout_add_args){p->rows, m->C, .token_index = p->batch->token_index + p->first_row,
                                 .dropout = mt_model_dropout(m, p, layer, which)};
}

/* The norm after a block, and its results. */
typedef struct mt_next_norm {
    const mt_norm *w;
    const mt_normed *n;
    const mt_layer *layer; // of the norm, if it is to be acquired before the norm
} mt_next_norm;

/* out = residual + dropout(x), then the next norm of out (w NULL: none); one operation if the backend has it. */
static void mt_residual_forward(const mt_model *m, const mt_pass *p, void *out, const void *residual, const void *x,
                                int64_t number, int which, mt_next_norm next) {
    mt_dropout_add_args sum = mt_dropout_operands(m, p, number, which);
    sum.x = x, sum.residual = residual, sum.out = out;
    // a replayed norm runs alone, and the two may sum in different orders
    bool fuses = m->ops->residual_norm_forward && !(m->recompute_modules & MT_MODULE_LAYERNORM);
    if (next.w && fuses) {
        mt_norm_args a = mt_norm_operands(m, p, next.w, next.n);
        a.x = sum.x, a.residual = residual, a.sum = out, a.token_index = sum.token_index, a.dropout = sum.dropout;
        m->ops->residual_norm_forward(&a, m->dtype, p->stream);
        return;
    }
    m->ops->dropout_add_forward(&sum, m->dtype, p->stream);
    if (next.w) mt_norm_forward(m, p, next.w, next.n, out);
}

/* Returns dx, the gradient of x, from dout; without dropout they are the same, and it returns dout. */
static const void *mt_residual_backward(const mt_model *m, const mt_pass *p, const void *dout, void *dx, int64_t number,
                                        int which) {
    mt_dropout_add_args a = mt_dropout_operands(m, p, number, which);
    if (a.dropout.p == 0) return dout;
    a.x = dout, a.out = dx;
    m->ops->dropout_add_backward(&a, m->dtype, p->stream);
    return dx;
}

/* ==== §9d attention =============================================================================================== */

/* Heads here of a layer's keys and values; w NULL: the most of any layer. */
static int64_t mt_layer_groups(const mt_model *m, const mt_layer *w) {
    return w ? w->G : m->G;
}

/* Elements of a token's q, k and v; w NULL: the most of any layer. */
static int64_t mt_qkv_width(const mt_model *m, const mt_layer *w) {
    return m->H * m->D + mt_layer_groups(m, w) * (m->D + m->Dv);
}

/* Elements of a token's latents and of the rope channels of its key. */
static int64_t mt_latent_width(const mt_options *o) {
    return o->q_lora_rank + o->kv_lora_rank + o->qk_pos_emb_head_dim;
}

/* ---- attention with a sink: the softmax has one more column, without a value. It is added after attention, on every
 * path; with its share in lse and out, attention's backward is that of the whole softmax. */

static mt_sink_args mt_sink_of_call(const mt_attention *call) {
    return (mt_sink_args){.spans = &call->spans,
                          .H = call->num_heads,
                          .Dv = call->value_size,
                          .out_stride = call->out_stride,
                          .sinks = call->sinks,
                          .out = call->out,
                          .lse = call->lse,
                          .dout = call->dout,
                          .dsinks = call->dsinks};
}

static void mt_attend_sink_forward(const mt_ops *ops, const mt_attention *call, mt_dtype dtype, mt_stream *stream) {
    mt_sink_args sink = mt_sink_of_call(call);
    if (call->has_sink) ops->sink_forward(&sink, dtype, stream);
}

static void mt_attend_sink_backward(const mt_ops *ops, const mt_attention *call, mt_dtype dtype, mt_stream *stream) {
    mt_sink_args sink = mt_sink_of_call(call);
    if (call->dsinks) ops->sink_backward(&sink, dtype, stream);
}

static void mt_attend_forward(const mt_ops *ops, const mt_attention *call, mt_dtype dtype, mt_stream *stream) {
    ops->attention_forward(call, dtype, stream);
    mt_attend_sink_forward(ops, call, dtype, stream);
}

static void mt_attend_backward(const mt_ops *ops, const mt_attention *call, mt_dtype dtype, mt_stream *stream) {
    ops->attention_backward(call, dtype, stream);
    mt_attend_sink_backward(ops, call, dtype, stream);
}

/* Values of attention between q, k, v and the output, of both mixers. */
static void mt_core_attention_slots(const mt_model *m, mt_slots *s) {
    int64_t T = m->plan.max_tokens;
    MT_SLOT(s, attended, T, m->H * m->Dv, m->dtype)->input = MT_OFFLOAD_ATTN_PROJ;
    MT_SLOT(s, lse, T, m->H, MT_F32)->input = MT_OFFLOAD_CORE_ATTN;
}

/* Rows of the cache between the first keys of two sequences, whole pages, and the number of such places, the last for
 * padding. */
static int64_t mt_text_rows(int64_t max_length, int64_t page_rows) {
    return mt_divide_up(max_length, page_rows) * page_rows;
}
static int64_t mt_cache_slot_rows(const mt_model_plan *plan) {
    return mt_text_rows(plan->max_position, mt_max(plan->page_rows, 1));
}
static int64_t mt_cache_slots(const mt_model_plan *plan) {
    return mt_max(plan->cache_sequences, plan->cache_rows / mt_cache_slot_rows(plan)) + 1;
}

/* The sizes of a gated delta net on this rank. */
typedef struct mt_delta_sizes {
    int64_t Hk, Hv, Dk, Dv; // heads and their channels
    int64_t conv, in;       // channels of q, k and v; columns of delta_in
    int64_t b;              // column of b in delta_in
    bool by_channel;        // Kimi delta attention
} mt_delta_sizes;

static mt_delta_sizes mt_delta_sizes_of(const mt_model *m) {
    const mt_options *o = m->options;
    int64_t ranks = m->grid->tensor.size;
    bool by_channel = mt_has_mixer(o, MT_MIXER_KDA);
    if (!by_channel && !mt_has_mixer(o, MT_MIXER_GATED_DELTA_NET)) return (mt_delta_sizes){0};
    mt_delta_sizes z = {.Hk = mt_max(o->linear_num_key_heads / ranks, 1), .Hv = o->linear_num_value_heads / ranks};
    z.Dk = o->linear_key_head_dim, z.Dv = o->linear_value_head_dim;
    z.conv = 2 * z.Hk * z.Dk + z.Hv * z.Dv, z.by_channel = by_channel;
    z.b = by_channel ? z.conv : z.conv + z.Hv * z.Dv;
    z.in = z.b + (by_channel ? 1 : 2) * z.Hv;
    return z;
}

/* Channels of a gated short convolution on this rank; 0: the model has none. */
static int64_t mt_short_channels(const mt_model *m) {
    return m->options->experimental_attention_variant == MT_VARIANT_SHORT_CONV ? m->C / m->grid->tensor.size : 0;
}

/* The sizes of Mamba-2 on this rank. */
typedef struct mt_mamba_sizes {
    int64_t G, H, N, P; // groups, heads, rows and columns of a head's state
    int64_t inner;      // channels of x, and of z
    int64_t conv, in;   // channels of x, B and C; columns of mamba_in
} mt_mamba_sizes;

static mt_mamba_sizes mt_mamba_sizes_of(const mt_model *m) {
    const mt_options *o = m->options;
    int64_t ranks = m->grid->tensor.size;
    if (!mt_has_mixer(o, MT_MIXER_MAMBA2)) return (mt_mamba_sizes){0};
    mt_mamba_sizes z = {.G = o->mamba_num_groups / ranks, .H = o->mamba_num_heads / ranks};
    z.N = o->mamba_state_dim, z.P = o->mamba_head_dim, z.inner = z.H * z.P;
    z.conv = z.inner + 2 * z.G * z.N, z.in = z.inner + z.conv + z.H;
    return z;
}

/* Elements of a layer's states in generation: of the delta rule or the scan, and of the short convolution. */
typedef struct mt_state_sizes {
    int64_t rule, conv;
} mt_state_sizes;

static mt_state_sizes mt_state_sizes_of(const mt_model *m) {
    mt_delta_sizes d = mt_delta_sizes_of(m);
    mt_mamba_sizes y = mt_mamba_sizes_of(m);
    int64_t channels = y.conv + d.conv + mt_short_channels(m);
    return (mt_state_sizes){.rule = y.H * y.N * y.P + d.Hv * d.Dk * d.Dv,
                            .conv = (m->options->linear_conv_kernel_dim - 1) * channels};
}

/* Query rows whose targets of the indexer's loss are in memory at a time. */
enum { MT_INDEXER_ROWS = 64 };

/* Columns of mt_activations.selected: keys that a query attends to, at most. */
static int64_t mt_selected_keys(const mt_model *m) {
    return mt_min(m->options->dsa_indexer_topk, m->plan.max_position);
}

/* True if training computes the indexer's loss. */
static bool mt_has_indexer_loss(const mt_model *m) {
    return m->plan.train && mt_has_mixer(m->options, MT_MIXER_SPARSE_ATTENTION) &&
           m->options->dsa_indexer_loss_coeff > 0;
}

static void mt_latent_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    const mt_options *o = m->options;
    (void)w;
    int64_t T = m->plan.max_tokens, R = m->max_rows;
    mt_slot *q = MT_SLOT(s, q, T, m->H * m->D, m->dtype), *kv = MT_SLOT(s, kv, T, m->H * (m->D + m->Dv), m->dtype);
    q->stash_of = offsetof(mt_layer, q_b), kv->stash_of = offsetof(mt_layer, kv_b);
    q->modules = kv->modules = MT_MODULE_MLA_UP_PROJ, q->input = kv->input = MT_OFFLOAD_CORE_ATTN;
    mt_slot *latent = MT_SLOT(s, latent, R, mt_latent_width(o), m->dtype);
    latent->stash_of = offsetof(mt_layer, latent), latent->input = MT_OFFLOAD_QKV_LINEAR;
    MT_SLOT(s, q_latent, R, o->q_lora_rank, m->dtype)->input = MT_OFFLOAD_QKV_LINEAR;
    MT_SLOT(s, kv_latent, R, o->kv_lora_rank, m->dtype)->input = MT_OFFLOAD_QKV_LINEAR;
    if (o->qk_layernorm && o->q_lora_rank > 0) MT_SLOT(s, q_latent_rstd, R, 1, MT_F32);
    if (o->qk_layernorm) MT_SLOT(s, kv_latent_rstd, R, 1, MT_F32);
    mt_core_attention_slots(m, s);
}

static void mt_attention_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    int64_t T = m->plan.max_tokens;
    (void)w;
    mt_slot *qkv = MT_SLOT(s, qkv, T, mt_qkv_width(m, w), m->dtype);
    qkv->stash_of = offsetof(mt_layer, qkv), qkv->input = MT_OFFLOAD_CORE_ATTN;
    if (mt_norms_heads(m->options)) {
        MT_SLOT(s, qk, T, (m->H + mt_layer_groups(m, w)) * m->D, m->dtype)->input = MT_OFFLOAD_CORE_ATTN;
        bool together = m->options->qk_layernorm_all_heads;
        MT_SLOT(s, q_rstd, T, together ? 1 : m->H, MT_F32);
        MT_SLOT(s, k_rstd, T, together ? 1 : mt_layer_groups(m, w), MT_F32);
    }
    mt_core_attention_slots(m, s);
    if (!m->options->attention_output_gate) return;
    MT_SLOT(s, gate, T, m->H * m->Dv, m->dtype)->stash_of = offsetof(mt_layer, gate);
    MT_SLOT(s, gated, T, m->H * m->Dv, m->dtype)->input = MT_OFFLOAD_ATTN_PROJ;
}

/* q, k and v of attention, or their gradients, with the strides between tokens. */
typedef struct mt_qkv_view {
    void *q, *k, *v;
    int64_t qk_stride, v_stride;
} mt_qkv_view;

/* q, k and v lie in the fused product; with q/k norm, q and k lie in `qk` instead. */
static mt_qkv_view mt_fused_view(const mt_model *m, const mt_layer *w, void *qkv, void *qk) {
    int64_t q_width = m->H * m->D, k_width = w->G * m->D, stride = mt_qkv_width(m, w);
    mt_qkv_view view = {qkv, mt_at(qkv, q_width, m->dtype), mt_at(qkv, q_width + k_width, m->dtype), stride, stride};
    if (mt_norms_heads(m->options))
        view.q = qk, view.k = mt_at(qk, q_width, m->dtype), view.qk_stride = q_width + k_width;
    return view;
}

/* Latent attention: q, k and v are separate arrays. */
static mt_qkv_view mt_latent_view(const mt_model *m, const mt_pass *p, void *q, void *kv) {
    return (mt_qkv_view){q, kv, mt_at(kv, p->T * m->H * m->D, m->dtype), m->H * m->D, m->H * m->Dv};
}

double mt_yarn_mscale(double factor, double mscale) {
    return 0.1 * mscale * log(factor) + 1;
}

/* 1 / sqrt(D) unless the model has its own. YaRN scales the softmax in DeepSeek's models, cos and sin in others. */
static float mt_attention_scale(const mt_options *o) {
    double scale = o->softmax_scale > 0 ? o->softmax_scale : 1 / sqrt((double)o->kv_channels);
    bool yarn = o->multi_latent_attention && o->rope_scaling_type == MT_ROPE_SCALING_YARN;
    if (!yarn || o->yarn_mscale_all_dim == 0) return (float)scale;
    double mscale = mt_yarn_mscale(o->rope_scaling_factor, o->yarn_mscale_all_dim);
    return (float)(scale * mscale * mscale);
}

/* The attention call of a layer, with the operands of the forward; the backward adds its own. */
static mt_attention mt_attention_call(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                      mt_qkv_view qkv) {
    mt_attention call = {.num_heads = m->H, .num_groups = w->G, .head_size = m->D, .value_size = m->Dv};
    call.q = qkv.q, call.k = qkv.k, call.v = qkv.v, call.out = a->attended, call.lse = a->lse;
    call.q_stride = call.k_stride = qkv.qk_stride, call.v_stride = qkv.v_stride, call.out_stride = m->H * m->Dv;
    call.spans = p->spans, call.window = w->kind.window, call.scale = mt_attention_scale(m->options);
    call.dropout = mt_model_dropout(m, p, w->number, MT_DROP_ATTENTION);
    call.q_index = call.k_index = p->batch->token_index, call.first_head = m->grid->tensor.rank * m->H;
    call.backend = m->options->attention_backend;
    call.has_sink = w->kind.softmax != MT_SOFTMAX_VANILLA;
    call.sinks = w->sinks.w, call.dsinks = w->sinks.dw;
    return call;
}

/* Generation: attention reads the cache. With `writes` k and v are written to it here. */
static void mt_cache_update(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_attention *call, bool writes) {
    int64_t k_width = w->G * m->D, v_width = w->G * m->Dv, layer = w - m->layers;
    if (writes) {
        m->ops->scatter_rows(&(mt_row_args){p->T, k_width, p->batch->cache_rows, .from = call->k,
                                            .to = m->k_cache[layer], .from_stride = call->k_stride},
                             m->dtype, p->stream);
        m->ops->scatter_rows(&(mt_row_args){p->T, v_width, p->batch->cache_rows, .from = call->v,
                                            .to = m->v_cache[layer], .from_stride = call->v_stride},
                             m->dtype, p->stream);
    }
    call->k = m->k_cache[layer], call->k_stride = k_width, call->v = m->v_cache[layer], call->v_stride = v_width;
    if (m->plan.page_rows > 0)
        call->pages = (mt_pages){p->batch->pages, m->plan.page_rows, m->plan.cache_rows / m->plan.page_rows};
}

/* a->attended from q, k and v; writes_cache: see mt_cache_update. */
static void mt_core_attention_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                      mt_qkv_view qkv, bool writes_cache) {
    mt_attention call = mt_attention_call(m, p, w, a, qkv);
    if (p->decode) mt_cache_update(m, p, w, &call, writes_cache);
    if (p->context)
        mt_context_attention_forward(p->context, &call, p->stream);
    else
        mt_attend_forward(m->ops, &call, m->dtype, p->stream);
}

/* Gradients d of q, k and v, from dattended. */
static void mt_core_attention_backward(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                       mt_qkv_view qkv, mt_qkv_view d, const void *dattended) {
    mt_attention call = mt_attention_call(m, p, w, a, qkv);
    call.dq = d.q, call.dk = d.k, call.dv = d.v, call.row_dot = m->scratch.row_dot, call.dout = dattended;
    if (p->context)
        mt_context_attention_backward(p->context, &call, p->stream);
    else
        mt_attend_backward(m->ops, &call, m->dtype, p->stream);
}

/* Backward of the output linear, which reads the value of a field of mt_activations: dx from dout. Returns the product
 * that the caller defers. */
static mt_deferred mt_attention_out_backward(const mt_pass *p, const mt_layer *w, mt_activations *a, size_t field,
                                             const void *dout, void *dx) {
    const void *x = mt_slot_read(a, mt_slot_of(w, field));
    int halves = mt_layer_linear_halves(p, w, &w->o, field);
    mt_linear_io o = {.x = x, .x_transposed = mt_saved_x(a, &w->o), .dy = dout, .dx = dx};
    mt_linear_backward(mt_linears(p), &w->o, &o, halves);
    return halves == MT_BACKWARD_INPUT ? (mt_deferred){&w->o, x, dout} : (mt_deferred){0};
}

/* RoPE of a layer for the tokens from `first_row` on. */
static mt_rotation mt_layer_rotation(const mt_model *m, const mt_pass *p, const mt_layer *w, int64_t first_row) {
    bool latent = mt_mixer_is_latent(w->kind.mixer); // without RoPE the angles of its table are 0
    mt_layer_rope which = latent ? MT_ROPE_MODEL : w->kind.rope;
    const mt_rope_table *table = &m->rope_tables[which];
    return (mt_rotation){.cos = table->cos,
                         .sin = table->sin,
                         .positions = p->batch->positions + first_row,
                         .R = which == MT_ROPE_NONE ? 0 : m->rotary_dim,
                         .interleaved = m->options->rotary_interleaved};
}

/* Operands of q/k norm and RoPE that forward and backward share. */
static mt_qk_args mt_qk_operands(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    mt_qk_args qk = {.T = p->T, .H = m->H, .G = w->G, .D = m->D, .rotation = mt_layer_rotation(m, p, w, 0)};
    qk.w_offset = mt_norm_offset(m->options);
    qk.qkv = a->qkv, qk.qkv_stride = qk.dqkv_stride = mt_qkv_width(m, w);
    qk.q_w = w->q_norm.w, qk.k_w = w->k_norm.w, qk.q_rstd = a->q_rstd, qk.k_rstd = a->k_rstd;
    qk.dq_w = w->q_norm.dw, qk.dk_w = w->k_norm.dw, qk.eps = (float)m->options->norm_epsilon;
    return qk;
}

/* True if q/k norm and RoPE write k and v to the cache in generation: in one kernel, for values as keys. */
static bool mt_qk_writes_cache(const mt_model *m) {
    const mt_options *o = m->options;
    return !o->qk_layernorm_all_heads && m->Dv == m->D && o->attention_value_scale == 1;
}

/* q/k norm, then RoPE, of q and k in the fused product; without q/k norm in place. */
static void mt_qk_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a) {
    mt_qk_args qk = mt_qk_operands(m, p, w, a);
    mt_qkv_view view = mt_fused_view(m, w, a->qkv, a->qk);
    bool writes = p->decode && mt_qk_writes_cache(m);
    qk.qk = view.q, qk.qk_stride = view.qk_stride;
    if (writes) qk.cache_rows = p->batch->cache_rows;
    if (writes) qk.k_cache = m->k_cache[w - m->layers], qk.v_cache = m->v_cache[w - m->layers];
    if (qk.rotation.R > 0 || qk.q_w || writes) m->ops->qk_forward(&qk, m->dtype, p->stream);
}

/* Gradients of rotated q and k (in dqkv; with q/k norm in dqk) -> gradients of the fused product, dqkv. */
static void mt_qk_backward(const mt_model *m, const mt_pass *p, mt_layer *w, const mt_activations *a, void *dqk,
                           void *dqkv) {
    mt_qk_args qk = mt_qk_operands(m, p, w, a);
    mt_qkv_view d = mt_fused_view(m, w, dqkv, dqk);
    if (qk.rotation.R == 0 && !qk.q_w) return;
    qk.dqkv = dqkv, qk.dqk = d.q, qk.dqk_stride = d.qk_stride;
    m->ops->qk_backward(&qk, m->dtype, p->stream);
}

/* ---- q/k norm over all heads, of this rank and of the other tensor-parallel ranks (OLMo 2). Each rank has as many
 * channels, so the mean over a row is the mean of the ranks' means. */

/* The norm of q (k false) or of k. The backward adds dy and dx. */
static mt_norm_args mt_all_heads_norm(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                      bool k) {
    const mt_weight *weight = k ? &w->k_norm : &w->q_norm;
    int64_t skip = k ? m->H * m->D : 0;
    mt_norm_args n = {.T = p->T, .H = 1, .C = (k ? w->G : m->H) * m->D, .w = weight->w, .dw = weight->dw};
    n.eps = (float)m->options->norm_epsilon, n.w_offset = mt_norm_offset(m->options);
    n.x = mt_at(a->qkv, skip, m->dtype), n.y = mt_at(a->qk, skip, m->dtype), n.rstd = k ? a->k_rstd : a->q_rstd;
    n.x_stride = n.dx_stride = mt_qkv_width(m, w), n.y_stride = n.dy_stride = (m->H + w->G) * m->D;
    return n;
}

/* Gives the norms of q and of k the means of their rows, averaged over the ranks. */
static void mt_all_heads_means(const mt_model *m, const mt_pass *p, mt_norm_args norms[2], bool backward) {
    const mt_group *tensor = &m->grid->tensor;
    float *means = m->scratch.means;
    if (tensor->size == 1) return;
    for (int k = 0; k < 2; k++) {
        mt_norm_args *n = &norms[k];
        mt_row_means_args args = {.T = n->T, .C = n->C, .means = means + k * p->T, .a = n->x, .b = n->x};
        n->means = args.means;
        args.a_stride = args.b_stride = n->x_stride, args.w_offset = n->w_offset;
        if (backward) args.b = n->dy, args.b_stride = n->dy_stride, args.w = n->w;
        m->ops->row_means(&args, m->dtype, p->stream);
    }
    m->ops->all_reduce(means, 2 * p->T, MT_SUM, MT_F32, tensor, p->stream);
    m->ops->scale(means, 1.0f / (float)tensor->size, 2 * p->T, MT_F32, p->stream);
}

/* RoPE of q and k after the norm, in place. */
static mt_rope_args mt_all_heads_rope(const mt_model *m, const mt_pass *p, const mt_layer *w, void *qk) {
    int64_t heads = m->H + w->G;
    return (mt_rope_args){.T = p->T,
                          .H = heads,
                          .D = m->D,
                          .x = qk,
                          .y = qk,
                          .x_stride = heads * m->D,
                          .y_stride = heads * m->D,
                          .rotation = mt_layer_rotation(m, p, w, 0)};
}

static void mt_all_heads_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a) {
    mt_norm_args norms[2] = {mt_all_heads_norm(m, p, w, a, false), mt_all_heads_norm(m, p, w, a, true)};
    mt_rope_args rope = mt_all_heads_rope(m, p, w, a->qk);
    mt_all_heads_means(m, p, norms, false);
    for (int k = 0; k < 2; k++) m->ops->rmsnorm_forward(&norms[k], m->dtype, p->stream);
    if (rope.rotation.R > 0) m->ops->rope_forward(&rope, m->dtype, p->stream);
}

/* Gradients of q and k in dqkv from those of the rotated ones in dqk. */
static void mt_all_heads_backward(const mt_model *m, const mt_pass *p, mt_layer *w, const mt_activations *a, void *dqk,
                                  void *dqkv) {
    mt_norm_args norms[2] = {mt_all_heads_norm(m, p, w, a, false), mt_all_heads_norm(m, p, w, a, true)};
    mt_rope_args rope = mt_all_heads_rope(m, p, w, dqk);
    for (int k = 0; k < 2; k++) {
        int64_t skip = k ? m->H * m->D : 0;
        norms[k].dy = mt_at(dqk, skip, m->dtype), norms[k].dx = mt_at(dqkv, skip, m->dtype);
    }
    if (rope.rotation.R > 0) m->ops->rope_backward(&rope, m->dtype, p->stream);
    mt_all_heads_means(m, p, norms, true);
    for (int k = 0; k < 2; k++) m->ops->rmsnorm_backward(&norms[k], m->dtype, p->stream);
}

/* ---- the output gate (Qiu et al., "Gated attention for large language models"): a->gated = a->attended sigmoid(x
 * w_gate) */

static void mt_output_gate_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                   const void *x) {
    mt_layer_linear_forward(p, a, &w->gate, x, a->gate);
    mt_gate_args gate = {.n = p->T * m->H * m->Dv, .x = a->attended, .z = a->gate, .y = a->gated};
    m->ops->gate_forward(&gate, m->dtype, p->stream);
}

/* d: the gradient of a->gated in, of a->attended out; and that of the gate. */
static void mt_output_gate_backward(const mt_model *m, const mt_pass *p, const mt_activations *a, void *d,
                                    void *dgate) {
    mt_gate_args gate = {.n = p->T * m->H * m->Dv, .x = a->attended, .z = a->gate, .dy = d, .dx = d, .dz = dgate};
    m->ops->gate_backward(&gate, m->dtype, p->stream);
}

/* The field of mt_activations that the output linear reads. */
static size_t mt_attention_out_x(const mt_model *m) {
    return m->options->attention_output_gate ? offsetof(mt_activations, gated) : offsetof(mt_activations, attended);
}

/* Queries, or their gradients, scaled by their position, where the model does so. */
static void mt_scale_queries(const mt_model *m, const mt_pass *p, mt_qkv_view view) {
    mt_position_scale_args a = {.T = p->T, .width = m->H * m->D, .x = view.q, .x_stride = view.qk_stride};
    a.positions = p->batch->positions, a.beta = m->options->llama_4_scaling_beta;
    a.context = m->options->original_max_position_embeddings;
    if (a.beta != 0) m->ops->position_scale(&a, m->dtype, p->stream);
}

/* ---- the mixer */

/* Values, or their gradients, times their scale. */
static void mt_scale_values(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_qkv_view view) {
    float scale = (float)m->options->attention_value_scale;
    if (scale != 1) m->ops->scale_rows(view.v, scale, p->T, w->G * m->Dv, view.v_stride, m->dtype, p->stream);
}

/* out = attention(x[R, C]). */
static void mt_attention_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                                 void *out) {
    mt_layer_linear_forward(p, a, &w->qkv, x, a->qkv);
    bool together = m->options->qk_layernorm_all_heads;
    (together ? mt_all_heads_forward : mt_qk_forward)(m, p, w, a);
    mt_qkv_view view = mt_fused_view(m, w, a->qkv, a->qk);
    mt_scale_queries(m, p, view);
    mt_scale_values(m, p, w, view);
    mt_core_attention_forward(m, p, w, a, view, !mt_qk_writes_cache(m));
    if (m->options->attention_output_gate) mt_output_gate_forward(m, p, w, a, x);
    mt_layer_linear_forward(p, a, &w->o, m->options->attention_output_gate ? a->gated : a->attended, out);
}

static mt_deferred mt_attention_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                         const mt_block_gradients *d) {
    void *dqkv = m->scratch.dqkv, *dqk = m->scratch.dqk, *dattended = m->scratch.dattended;
    bool has_gate = m->options->attention_output_gate;
    mt_deferred out = mt_attention_out_backward(p, w, a, mt_attention_out_x(m), d->dout, dattended);
    if (has_gate) mt_output_gate_backward(m, p, a, dattended, m->scratch.dgate);
    mt_qkv_view gradients = mt_fused_view(m, w, dqkv, dqk);
    mt_core_attention_backward(m, p, w, a, mt_fused_view(m, w, a->qkv, a->qk), gradients, dattended);
    mt_scale_queries(m, p, gradients);
    mt_scale_values(m, p, w, gradients);
    (m->options->qk_layernorm_all_heads ? mt_all_heads_backward : mt_qk_backward)(m, p, w, a, dqk, dqkv);
    mt_linear_io qkv = {.x = d->x, .dy = dqkv, .dx = d->dx};
    if (d->left) {
        mt_linear_backward_input(mt_linears(p), &w->qkv, &qkv);
        *d->left = (mt_deferred){&w->qkv, d->x, dqkv};
    } else {
        mt_layer_linear_backward(m, p, w, a, &w->qkv, d->x_field, &qkv);
    }
    if (!has_gate) return out;
    mt_linear_io gate = {.x = d->x, .dy = m->scratch.dgate, .dx = m->scratch.dinput};
    mt_layer_linear_backward(m, p, w, a, &w->gate, d->x_field, &gate);
    mt_add_to(m, p, d->dx, m->scratch.dinput);
    return out;
}

/* ---- multi-head latent attention (DeepSeek-AI, "DeepSeek-V2"): a down-projection maps hidden states to a query
 * latent, a key/value latent, and the rope channels of the key, which all heads share. Up-projections map the latents
 * to heads. Each tensor-parallel rank computes the latents of its rows and then its share of the heads, so the latents,
 * not the hidden states, enter the tensor-parallel region. */

/* The norm of the query's latent (kv 0), or of the key's and value's, which follows it in a row. The backward adds dy
 * and dx. */
static mt_norm_args mt_latent_norm(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                   int kv) {
    const mt_weight *weight = kv ? &w->kv_a_norm : &w->q_a_norm;
    int64_t q_rank = m->options->q_lora_rank, rank = kv ? m->options->kv_lora_rank : q_rank, column = kv ? q_rank : 0;
    double own = m->options->latent_norm_epsilon, epsilon = own > 0 ? own : m->options->norm_epsilon;
    mt_norm_args n = {.T = p->rows, .H = 1, .C = rank, .w = weight->w, .dw = weight->dw, .eps = (float)epsilon};
    n.x = mt_at(a->latent, column, m->dtype);
    n.y = kv ? a->kv_latent : a->q_latent, n.rstd = kv ? a->kv_latent_rstd : a->q_latent_rstd;
    n.w_offset = mt_norm_offset(m->options);
    n.y_stride = n.dy_stride = rank;
    n.x_stride = n.dx_stride = mt_latent_width(m->options);
    return n;
}

/* The latent behind its norm, packed; without qk_layernorm the latent itself. */
static void mt_latent_norm_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                   int kv) {
    mt_norm_args norm = mt_latent_norm(m, p, w, a, kv);
    int64_t size = mt_dtype_size(m->dtype);
    if (m->options->qk_layernorm)
        m->ops->rmsnorm_forward(&norm, m->dtype, p->stream);
    else
        m->ops->memory_copy_rows(norm.y, norm.C * size, norm.x, norm.x_stride * size, norm.T, norm.C * size, p->stream);
}

/* dlatent, the gradient of the latents before the norm, from dy, that of the latent after it. */
static void mt_latent_norm_backward(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                    int kv, const void *dy, void *dlatent) {
    mt_norm_args norm = mt_latent_norm(m, p, w, a, kv);
    int64_t size = mt_dtype_size(m->dtype);
    norm.dy = dy, norm.dx = mt_at(dlatent, kv ? m->options->q_lora_rank : 0, m->dtype);
    if (m->options->qk_layernorm)
        m->ops->rmsnorm_backward(&norm, m->dtype, p->stream);
    else
        m->ops->memory_copy_rows(norm.dx, norm.dx_stride * size, dy, norm.C * size, norm.T, norm.C * size, p->stream);
}

/* RoPE of the shared rope channels of the keys; and the assembly of the heads. */
static mt_rope_args mt_latent_rope(const mt_model *m, const mt_pass *p, const mt_layer *w) {
    mt_rotation rotation = mt_layer_rotation(m, p, w, p->first_row);
    return (mt_rope_args){.T = p->rows, .H = 1, .D = m->rotary_dim, .rotation = rotation};
}
static mt_latent_heads_args mt_latent_heads(const mt_model *m, const mt_pass *p, const mt_layer *w) {
    return (mt_latent_heads_args){
        .T = p->T, .H = m->H, .N = m->options->qk_head_dim, .Dv = m->Dv, .rotation = mt_layer_rotation(m, p, w, 0)};
}

/* First column of the key's rope channels in the latents. */
static int64_t mt_rope_column(const mt_options *o) {
    return o->q_lora_rank + o->kv_lora_rank;
}

/* x[R, C] -> latents, normalised with qk_layernorm. */
static void mt_latent_down_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                   const void *x) {
    mt_layer_linear_forward(p, a, &w->latent, x, a->latent);
    if (m->options->q_lora_rank > 0) mt_latent_norm_forward(m, p, w, a, 0);
    mt_latent_norm_forward(m, p, w, a, 1);
}

/* Latents -> q, k and v; without a latent of q, q from x. */
static void mt_latent_up_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                 const void *x) {
    const mt_layer_scratch *s = &m->scratch;
    int64_t R = m->rotary_dim;
    const void *q_input = m->options->q_lora_rank > 0 ? a->q_latent : x;
    mt_layer_linear_forward(p, a, &w->q_b, q_input, a->q);
    mt_layer_linear_forward(p, a, &w->kv_b, a->kv_latent, s->kv_b_out);
    mt_rope_args rope = mt_latent_rope(m, p, w);
    rope.x = mt_at(a->latent, mt_rope_column(m->options), m->dtype), rope.x_stride = mt_latent_width(m->options);
    rope.y = s->k_rope, rope.y_stride = R;
    m->ops->rope_forward(&rope, m->dtype, p->stream);
    mt_qkv_view view = mt_latent_view(m, p, a->q, a->kv);
    mt_latent_heads_args heads = mt_latent_heads(m, p, w);
    heads.k_rope = mt_region_enter_forward(&p->tp, s->k_rope, R, p->stream);
    heads.q = view.q, heads.kv = s->kv_b_out, heads.k = view.k, heads.v = view.v;
    m->ops->latent_heads_forward(&heads, m->dtype, p->stream);
}

/* The block's dx from the gradients d of q, k and v. */
static void mt_latent_qkv_backward(const mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a, mt_qkv_view d,
                                   const mt_block_gradients *block) {
    const mt_layer_scratch *s = &m->scratch;
    const void *x = block->x;
    void *dx = block->dx;
    bool has_q_latent = m->options->q_lora_rank > 0;
    int64_t R = m->rotary_dim;
    mt_latent_heads_args heads = mt_latent_heads(m, p, w);
    heads.dq = d.q, heads.dk = d.k, heads.dv = d.v;
    heads.dkv = s->kv_b_out, heads.dk_rope = mt_region_partial(&p->tp, s->k_rope);
    m->ops->latent_heads_backward(&heads, m->dtype, p->stream);
    mt_region_enter_backward(&p->tp, s->k_rope, p->tp.partial, R, p->stream);
    mt_rope_args rope = mt_latent_rope(m, p, w);
    rope.x = s->k_rope, rope.x_stride = R;
    rope.y = mt_at(s->dlatent, mt_rope_column(m->options), m->dtype), rope.y_stride = mt_latent_width(m->options);
    m->ops->rope_backward(&rope, m->dtype, p->stream);

    mt_linear_io kv_b = {.x = a->kv_latent, .dy = s->kv_b_out, .dx = s->dlatent_norm};
    mt_layer_linear_backward(m, p, w, a, &w->kv_b, offsetof(mt_activations, kv_latent), &kv_b);
    mt_latent_norm_backward(m, p, w, a, 1, s->dlatent_norm, s->dlatent);
    mt_linear_io q_b = {.x = has_q_latent ? a->q_latent : x, .dy = d.q};
    q_b.dx = has_q_latent ? s->dlatent_norm : dx;
    size_t q_field = has_q_latent ? offsetof(mt_activations, q_latent) : block->x_field;
    mt_layer_linear_backward(m, p, w, a, &w->q_b, q_field, &q_b);
    if (has_q_latent) mt_latent_norm_backward(m, p, w, a, 0, s->dlatent_norm, s->dlatent);
    mt_linear_io latent = {.x = x, .dy = s->dlatent, .dx = has_q_latent ? dx : s->dinput};
    mt_layer_linear_backward(m, p, w, a, &w->latent, block->x_field, &latent);
    if (!has_q_latent) mt_add_to(m, p, dx, s->dinput);
}

/* out = attention(x[R, C]). */
static void mt_latent_attention_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                        const void *x, void *out) {
    mt_latent_down_forward(m, p, w, a, x);
    mt_latent_up_forward(m, p, w, a, x);
    mt_core_attention_forward(m, p, w, a, mt_latent_view(m, p, a->q, a->kv), true);
    mt_layer_linear_forward(p, a, &w->o, a->attended, out);
}

/* Selective recomputation: q, k and v. */
static void mt_latent_attention_replay(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                       const void *x) {
    if (m->recompute_modules & MT_MODULE_MLA_UP_PROJ) mt_latent_up_forward(m, p, w, a, x);
}

static mt_deferred mt_latent_attention_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                                const mt_block_gradients *d) {
    void *dattended = m->scratch.dattended, *dq = m->scratch.dqkv;
    mt_qkv_view dqkv = mt_latent_view(m, p, dq, mt_at(dq, p->T * m->H * m->D, m->dtype));
    MT_CHECK(!d->left);
    mt_deferred out = mt_attention_out_backward(p, w, a, offsetof(mt_activations, attended), d->dout, dattended);
    mt_core_attention_backward(m, p, w, a, mt_latent_view(m, p, a->q, a->kv), dqkv, dattended);
    mt_latent_qkv_backward(m, p, w, a, dqkv, d);
    return out;
}

/* ==== §9e MLP ===================================================================================================== */

/* Outputs of fc1 for a width F: gate and up, or up alone. */
static int64_t mt_fc1_width(const mt_model *m, int64_t F) {
    return mt_options_gated(m->options) ? 2 * F : F;
}

/* Slots of the MLP or of the shared expert. */
static void mt_mlp_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    int64_t T = m->plan.max_tokens, F = w ? w->F : m->F;
    bool is_shared_expert = w && w->expert_bucket >= 0, in_fp8 = w && w->down.fp8 && w->down.fp8->in_place[MT_FP8_X];
    unsigned modules = is_shared_expert ? MT_MODULE_SHARED_EXPERTS | MT_MODULE_MOE : MT_MODULE_MLP;
    unsigned input = is_shared_expert ? 0 : MT_OFFLOAD_MLP;
    mt_slot *hidden = MT_SLOT(s, mlp_hidden, T, mt_fc1_width(m, F), m->dtype);
    mt_slot *active = MT_SLOT(s, mlp_active, T, F, in_fp8 ? MT_U8 : m->dtype);
    hidden->stash_of = offsetof(mt_layer, fc1);
    hidden->modules = active->modules = modules, hidden->input = active->input = input;
}

/* a->y = activation(a->x), stored as `reader` reads its x. offsets: of experts' rows. */
static void mt_activation_forward(const mt_model *m, const mt_pass *p, const mt_linear *reader, const int32_t *offsets,
                                  mt_activation_args *a) {
    a->activation = mt_options_activation(m->options), a->glu = mt_options_glu(m->options);
    a->quantize = mt_fp8_args(p->training, reader, MT_FP8_X, a->y, a->T, offsets);
    m->ops->activation_forward(a, m->dtype, p->stream);
}

/* a->dx = the gradient of a->x, stored as `reader` reads its dy. */
static void mt_activation_backward(const mt_model *m, const mt_pass *p, const mt_linear *reader, const int32_t *offsets,
                                   mt_activation_args *a) {
    a->activation = mt_options_activation(m->options), a->glu = mt_options_glu(m->options);
    a->quantize = mt_fp8_args(p->training, reader, MT_FP8_DY, a->dx, a->T, offsets);
    m->ops->activation_backward(a, m->dtype, p->stream);
}

/* True if the product before the activation, or in the backward the one behind it, computes the activation. */
static bool mt_fuses_activation(const mt_model *m, const mt_linear *linear, const float *gates) {
    bool is_gelu = mt_options_activation(m->options) == MT_ACTIVATION_GELU_TANH && !gates;
    return is_gelu && mt_linear_fuses_gelu(m->ops, linear);
}

/* out = down(activation(fc1(x[R, C]))); out NULL: only the values that the backward reads. gates[T] scale a shared
 * expert's activation, or NULL. */
static void mt_scaled_mlp_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                  const void *x, const float *gates, void *out) {
    mt_linear_io fc1 = {.x = x, .x_transposed = mt_stored_x(p, a, &w->fc1), .y = a->mlp_hidden};
    mt_activation_args activation = {.T = p->T, .F = w->F, .x = a->mlp_hidden, .weights = gates, .y = a->mlp_active};
    if (mt_fuses_activation(m, &w->fc1, gates)) {
        mt_linear_gelu_forward(mt_linears(p), &w->fc1, &fc1, a->mlp_active);
    } else {
        mt_linear_forward(mt_linears(p), &w->fc1, &fc1);
        mt_activation_forward(m, p, &w->down, NULL, &activation);
    }
    if (out) mt_layer_linear_forward(p, a, &w->down, a->mlp_active, out);
}

/* d->dx, and dgates[T], from d->dout, the gradient of the MLP's output. In a split backward `halves` are those of
 * `down`, and the caller defers its weights' half: the stash is still in use here. */
static void mt_scaled_mlp_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                   const mt_block_gradients *d, const float *gates, float *dgates, int halves) {
    mt_layer_scratch *s = &m->scratch;
    mt_linear_io down = {.x = a->mlp_active, .x_transposed = mt_saved_x(a, &w->down), .dy = d->dout};
    mt_activation_args activation = {.T = p->T, .F = w->F, .x = a->mlp_hidden, .weights = gates, .dy = s->dmlp_active};
    activation.dx = s->dmlp_hidden, activation.dweights = gates ? dgates : NULL;
    if (mt_fuses_activation(m, &w->down, gates)) {
        down.dx = s->dmlp_hidden;
        mt_linear_gelu_backward(mt_linears(p), &w->down, &down, a->mlp_hidden, halves);
    } else {
        down.dx = s->dmlp_active;
        mt_linear_backward(mt_linears(p), &w->down, &down, halves);
        mt_activation_backward(m, p, &w->fc1, NULL, &activation);
    }
    mt_linear_io fc1 = {.x = d->x, .dy = s->dmlp_hidden, .dx = d->dx};
    mt_layer_linear_backward(m, p, w, a, &w->fc1, d->x_field, &fc1);
}

/* The MLP of a layer without experts. */
static void mt_mlp_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                           void *out) {
    mt_scaled_mlp_forward(m, p, w, a, x, NULL, out);
}

static void mt_mlp_replay(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x) {
    if (m->recompute_modules & MT_MODULE_MLP) mt_mlp_forward(m, p, w, a, x, NULL);
}

static mt_deferred mt_mlp_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                   const mt_block_gradients *d) {
    int halves = mt_layer_linear_halves(p, w, &w->down, offsetof(mt_activations, mlp_active));
    MT_CHECK(!d->left);
    mt_scaled_mlp_backward(m, p, w, a, d, NULL, NULL, halves);
    return halves == MT_BACKWARD_INPUT ? (mt_deferred){&w->down, a->mlp_active, d->dout} : (mt_deferred){0};
}

/* ==== §9f mixture of experts ====================================================================================== */
/* A router sends every token to k of E small MLPs (Fedus et al., "Switch transformers"; Lepikhin et al., "GShard").
 * Each rank holds some experts. One row is one token for one chosen expert. A dispatcher (mt_dispatcher) is the way of
 * rows to the ranks of their experts, and of results back; its phases are Megatron's dispatch and combine. alltoall
 * sends each row to the ranks that hold its expert. allgather sends all tokens to all ranks, and each rank selects the
 * rows of its own experts; flex is the same by copies into other ranks' memory, overlapped with computation. A group of
 * one rank exchanges nothing. Invariants: routing is in fp32; the expert's activation is scaled by the row's
 * probability, so the backward needs no expert output (--no-moe-permute-fusion and experts with biases scale the output
 * instead, and save it); the results of a token are summed in one fixed order. */

/* M rows for the experts of this rank, sorted by expert, and their intermediate results. */
typedef struct mt_expert_rows {
    void *memory;                               // own allocation if M depends on the data; NULL: in the arena
    int64_t capacity;                           // allocated rows
    void *input;                                // [M, C]
    float *weights;                             // [M] probabilities
    void *hidden;                               // [M, 2F], or [M, F] without gates
    void *active;                               // [M, F]
    void *output;                               // [M, C] before scaling, if the output is scaled
    void *input_transposed, *active_transposed; // in fp8
    mt_adapter_scratch adapter;                 // of experts.rows
    int32_t *to_expert, *from_expert;           // [M] permutation from source order to expert order, and its inverse
} mt_expert_rows;

/* Results of routing that the backward needs. N: the R tokens of this rank, or if the dispatcher gathers, the tokens of
 * all ranks of the exchange group. */
typedef struct mt_routing {
    float *logits;            // [R, E]
    float *probs;             // [N, k]
    int32_t *experts;         // [N, k] chosen experts
    int32_t *kept;            // [N, k] the same, -1: dropped; equals `experts` without a capacity
    float *aux_stats;         // of each auxiliary loss [2, S, E]: summed scores and counts of each expert
    float *gate_logits;       // [R] logits of the shared expert's gate
    float *gates;             // [T] their sigmoids; NULL without a gate
    int32_t *position;        // [N, k copies] row of each choice
    int32_t *choice, *token;  // [P] choice and token of each row
    const int32_t *source;    // [M] token of each row, if every row here is a copy of a token of this rank; else NULL
    int32_t *offsets;         // [num_destinations + 1] first row of each destination
    int32_t *expert_offsets;  // [E/ep + 1] first received row of each local expert; without an exchange `offsets`
    int64_t num_choices;      // P, rows that the N tokens' choices make here
    int64_t num_rows;         // M, received rows
    int64_t *sent, *received; // [size] rows to and from every rank, on the host
    int32_t *host_offsets;    // [E/ep + 1] expert_offsets on the host, if the host waited for them
    mt_expert_rows rows;
} mt_routing;

/* Rows that are on this rank, in the order in which they arrived. */
typedef struct mt_arrived {
    const void *x; // [R, C]
    int64_t R;
    const float *weights;        // NULL: none
    const int32_t *row, *weight; // [M] the row of x, and the element of weights, of each row for the experts
    const int32_t *position;     // [R, copies] rows for the experts of each row of x
    int64_t copies;
} mt_arrived;

/* A dispatcher: how rows come to the ranks of their experts, and results to the ranks of their tokens. The phases are
 * in the order of a layer's forward; its backward runs them with gradients. x[R, C] are this rank's tokens, probs the
 * probabilities of their choices, NULL in the backward. NULL instead of a phase: the dispatcher has none. */
typedef struct mt_dispatcher {
    bool gathers;   // each rank has the tokens of all ranks, and permutes those for its own experts
    bool reorders;  // rows arrive in the order of their source ranks, in mt_experts.dispatched
    bool adds_base; // to sums in mt_experts.scattered, even if permutation is fused
    /* Starts to send all tokens, beside the router. */
    void (*gather)(mt_model *m, const mt_pass *p, const void *x);
    /* Number and order of the rows, from the choices; and room for the rows. Not in the backward. */
    void (*count)(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r);
    /* Starts to send rows and their probabilities, beside the shared expert. */
    void (*exchange)(mt_model *m, const mt_pass *p, const mt_routing *r, const void *x, const float *probs);
    /* Waits for the rows; mt_permute_to_experts then sorts them by expert. */
    mt_arrived (*arrive)(mt_model *m, const mt_pass *p, const mt_routing *r, const void *x, const float *probs);
    /* Starts to send the results[M, C] of the experts back; out and base as in `combine`. */
    void (*exchange_back)(mt_model *m, const mt_pass *p, const mt_routing *r, void *results, void *out,
                          const void *base);
    /* out[R, C] = base + the sum of each token's results; base may be NULL, or out. */
    void (*combine)(mt_model *m, const mt_pass *p, const mt_routing *r, const void *results, void *out,
                    const void *base);
    /* Backward: the part of dprobs[N, k] for this rank's tokens, from dweights[M], which is overwritten. */
    void (*combine_weights)(mt_model *m, const mt_pass *p, const mt_routing *r, float *dprobs, float *dweights);
} mt_dispatcher;

/* The experts of this rank, and buffers that all layers share. */
typedef struct mt_experts {
    const mt_dispatcher *dispatcher;
    mt_router router;
    mt_dispatch order;         // of rows; capacity: of the largest micro-batch, if experts' inputs are padded to it
    int64_t num_layers;        // layers of this rank that have experts
    int64_t C;                 // channels of a row: the model's, or L of latent experts
    int64_t num_local, F;      // experts of this rank, and this rank's share of their width
    int64_t num_sources;       // ranks whose tokens are permuted here: all of `group` if the dispatcher gathers, else 1
    int64_t tokens;            // N of the largest micro-batch
    int64_t num_choices;       // P of the largest micro-batch
    int64_t num_destinations;  // pairs of an expert and an expert-tensor rank
    int64_t sequences;         // S of seq_aux_loss, sequences with an auxiliary loss of their own; else 1
    const mt_group *group;     // ranks that exchange tokens
    mt_stream *comm;           // stream of the exchange
    mt_expert_rows rows;       // gradients, and rows before they are sent
    mt_expert_rows dispatched; // exchanged rows, sorted by source rank
    mt_expert_rows *results;   // whose input is the memory of the experts' results until they are combined
    mt_tensor_parallel exchange; // allgather and flex: rows of all ranks, `gathered` and `partial` are one [N, C]
    void *scattered;             // [R, C] sums to which a base is added
    float *sums;                 // [N, C], without permute fusion
    float *dprobs, *dlogits;     // [N, k]; [R, E]
    void *dlogits_rounded;       // [R, E] in the model's type
    void *router_dx;             // [R, C]
    float *dgates;               // [T]
    void *latent, *dlatent;      // [R, L] latent experts: their tokens or the gradients of these; gradients of sums
    void *wide;                  // [R, C] latent experts: their output beside that of the shared expert
    int32_t *gate_experts;       // [R] zeros: the gate is a router with a single expert
    int32_t *discarded;          // discarded counts of non-finite tokens: the layer's router counts them
    int32_t *all_offsets;        // [size, num_destinations + 1] offsets of all ranks
    int32_t *counts;             // [size, E/ep] received rows by source rank and expert
    int32_t *host_offsets, *host_counts; // the same on the host
    int32_t *no_choices;                 // allgather and flex: [R, k] of -1, on the host
    int64_t *out_counts, *in_counts;     // [size] elements received and sent, on the host
    float *all_logits;                   // [Tall, E] of the whole micro-batch, for Sinkhorn
    int32_t *all_experts;                // [Tall, k] of the whole micro-batch, for the capacity, as the next two
    float *all_probs;
    int64_t *all_index;
    float *loads, *kept; // [num_layers, E] tokens that chose each expert in this step; tokens that it kept
    float *global;       // [num_layers, E] loads of the global batch up to now
    float *rank_counts;  // [data ranks, E] loads of one micro-batch of each data rank
    int32_t *data_ranks; // [data ranks] 0, 1, ...
    double *losses;      // [MT_NUM_AUX_LOSSES + 2] auxiliary losses and z-loss, times tokens; a discarded number
    float *quantiles;    // [num_layers, E + 1] of quantile_sums
    int32_t *invalid;    // [num_layers] tokens with a logit that is not finite
    void *report_memory; // on the host: loads, kept and invalid of two steps
} mt_experts;

static bool mt_has_capacity(const mt_model *m) {
    return m->options->moe_expert_capacity_factor > 0;
}

static bool mt_has_aux_loss(const mt_model *m) {
    return m->plan.train && mt_has_router_loss(m->options);
}

/* The auxiliary losses of mt_routing.aux_stats: those with a coefficient. The z-loss alone has the sums of aux_loss. */
static bool mt_has_aux_stats(const mt_model *m, mt_load_balancing type) {
    bool others = false;
    if (!mt_has_aux_loss(m)) return false;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++)
        others |= mt_aux_loss_coeff(m->options, (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i)) > 0;
    return mt_aux_loss_coeff(m->options, type) > 0 || (!others && type == MT_BALANCING_AUX_LOSS);
}

/* Rows of E of an auxiliary loss in mt_routing.aux_stats. */
static int64_t mt_aux_stats_rows(const mt_model *m, mt_load_balancing type) {
    int64_t sequences = type == MT_BALANCING_SEQ_AUX_LOSS ? m->experts->sequences : 1;
    return mt_has_aux_stats(m, type) ? 2 * sequences : 0;
}

/* True if training measures the quantiles that set the routers' biases. */
static bool mt_has_quantiles(const mt_model *m) {
    return m->plan.train && mt_balances_by(m->options, MT_BALANCING_QUANTILE);
}

/* True if training routes by Sinkhorn's iteration. */
static bool mt_has_sinkhorn(const mt_model *m) {
    return m->plan.train && mt_balances_by(m->options, MT_BALANCING_SINKHORN);
}

/* True if experts compute in a width of their own (NVIDIA, "Nemotron 3"): a linear before all of them and one behind
 * their sum, so that rows are narrower in products and messages. Router and shared expert read the wide tokens. */
static bool mt_has_latent_experts(const mt_model *m) {
    return m->options->moe_latent_size > 0;
}

/* True if the probabilities scale the experts' outputs; else they scale the activation. */
static bool mt_scales_output(const mt_model *m) {
    return !m->options->moe_permute_fusion || m->options->mlp_bias;
}

/* Capacity of an expert for a micro-batch of T tokens: ceil(T k / E * factor). */
static int64_t mt_expert_capacity(const mt_model *m, int64_t tokens) {
    double share = (double)(tokens * m->experts->router.topk) / (double)m->experts->router.num_experts;
    return (int64_t)ceil(share * m->options->moe_expert_capacity_factor);
}

/* ---- slots of a layer with experts */

/* True if the number of received rows does not depend on the data. */
static bool mt_expert_rows_fixed(const mt_model *m) {
    return m->experts->group->size == 1 || m->experts->order.capacity > 0;
}

/* Slots of an mt_expert_rows at offset `at` of the struct, of a layer or of scratch (w NULL); with `dispatched` only
 * input and weights. If the number of rows depends on the data, they are not offloaded: host memory cannot grow during
 * a step. */
static void mt_expert_rows_slots(const mt_model *m, mt_slots *s, size_t at, int64_t M, bool dispatched,
                                 const mt_layer *w) {
    const mt_experts *e = m->experts;
    bool fixed = mt_expert_rows_fixed(m);
    mt_slot *input = mt_slot_add(s, "expert_input", at + offsetof(mt_expert_rows, input), M, e->C, m->dtype);
    input->input = fixed ? MT_OFFLOAD_EXPERT_FC1 : 0;
    mt_slot_add(s, "expert_weights", at + offsetof(mt_expert_rows, weights), M, 1, MT_F32);
    if (dispatched) return;
    int64_t hidden_width = mt_fc1_width(m, e->F);
    mt_slot *hidden = mt_slot_add(s, "expert_hidden", at + offsetof(mt_expert_rows, hidden), M, hidden_width, m->dtype);
    hidden->input = fixed ? MT_OFFLOAD_MOE_ACT : 0;
    mt_slot *active = mt_slot_add(s, "expert_active", at + offsetof(mt_expert_rows, active), M, e->F, m->dtype);
    active->modules = MT_MODULE_MOE_ACT;
    if (mt_scales_output(m)) mt_slot_add(s, "expert_output", at + offsetof(mt_expert_rows, output), M, e->C, m->dtype);
    if (e->dispatcher->reorders) {
        mt_slot_add(s, "to_expert", at + offsetof(mt_expert_rows, to_expert), M, 1, MT_I32);
        mt_slot_add(s, "from_expert", at + offsetof(mt_expert_rows, from_expert), M, 1, MT_I32);
    }
    for (int64_t i = 0; i < s->count; i++) s->slots[i].modules |= MT_MODULE_MOE;
    if (!w) return;
    mt_slot_add_transposed(m, s, input->field, &w->expert_fc1, at + offsetof(mt_expert_rows, input_transposed), false);
    mt_slot_add_transposed(m, s, active->field, &w->expert_down, at + offsetof(mt_expert_rows, active_transposed),
                           false);
}

/* Rows that the experts of this rank receive if each destination gets an equal share of the choices. */
static int64_t mt_expert_rows_received(const mt_experts *e) {
    int64_t size = e->group->size;
    return size == 1 ? e->num_choices : e->num_choices / e->num_destinations * e->num_local * size;
}

/* The slots of a layer's mt_routing. */
static void mt_routing_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    const mt_experts *e = m->experts;
    int64_t R = m->max_rows, N = e->tokens, E = e->router.num_experts, k = e->router.topk;
    s->count = 0;
    MT_ROUTING_SLOT(s, logits, R, E, MT_F32);
    MT_ROUTING_SLOT(s, probs, N, k, MT_F32);
    MT_ROUTING_SLOT(s, experts, N, k, MT_I32);
    if (mt_has_capacity(m)) MT_ROUTING_SLOT(s, kept, N, k, MT_I32);
    int64_t stats = 0;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++)
        stats += mt_aux_stats_rows(m, (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i));
    if (stats > 0) MT_ROUTING_SLOT(s, aux_stats, stats, E, MT_F32)->once = true;
    if (m->options->moe_shared_expert_gate) {
        MT_ROUTING_SLOT(s, gate_logits, R, 1, MT_F32);
        MT_ROUTING_SLOT(s, gates, m->plan.max_tokens, 1, MT_F32);
    }
    MT_ROUTING_SLOT(s, position, N, k * e->order.copies, MT_I32);
    MT_ROUTING_SLOT(s, choice, e->num_choices, 1, MT_I32);
    MT_ROUTING_SLOT(s, token, e->num_choices, 1, MT_I32);
    MT_ROUTING_SLOT(s, offsets, e->num_destinations + 1, 1, MT_I32);
    if (e->dispatcher->reorders) MT_ROUTING_SLOT(s, expert_offsets, e->num_local + 1, 1, MT_I32);
    for (int64_t i = 0; i < s->count; i++) s->slots[i].modules = MT_MODULE_MOE;
    if (mt_expert_rows_fixed(m))
        mt_expert_rows_slots(m, s, offsetof(mt_routing, rows), mt_expert_rows_received(e), false, w);
    mt_slots_place(m, s, w);
}

/* Allocates the slots of a routing; a field without a slot of its own points to the slot of another field. */
static void mt_routing_allocate(const mt_model *m, const mt_layer *w, mt_residency residency, mt_routing *r,
                                mt_arena *arena) {
    mt_slots slots;
    mt_routing_slots(m, &slots, w);
    mt_slots_allocate(&slots, residency, r, arena);
    if (!mt_has_capacity(m)) r->kept = r->experts;
    if (!m->experts->dispatcher->reorders) r->expert_offsets = r->offsets;
    if (mt_expert_rows_fixed(m)) r->rows.capacity = mt_expert_rows_received(m->experts);
}

/* ---- expert rows whose number depends on the data */

/* The values of M rows to allocate: those of a layer with this residency. layer NULL: all that experts.rows has, or
 * with `dispatched` only input and weights. */
typedef struct mt_expert_rows_plan {
    int64_t M;
    bool dispatched;
    const mt_layer *layer;
    mt_residency residency;
} mt_expert_rows_plan;

static void mt_expert_rows_allocate(const mt_model *m, mt_expert_rows *rows, mt_arena *arena,
                                    const mt_expert_rows_plan *plan) {
    mt_slots slots = {.count = 0};
    mt_expert_rows_slots(m, &slots, 0, plan->M, plan->dispatched, plan->layer);
    int64_t widest = 2 * MT_MAX_ADAPTER_PARTS * m->options->lora_rank;
    if (!plan->layer && !plan->dispatched)
        mt_slot_add(&slots, "adapter", offsetof(mt_expert_rows, adapter.rows), plan->M, widest, m->dtype);
    mt_slots_place(m, &slots, plan->layer);
    mt_slots_allocate(&slots, plan->residency, rows, arena);
    rows->capacity = plan->M;
}

/* Expected number of received rows: an even share of the choices of the tokens here and 25% more. */
static int64_t mt_expert_rows_expected(const mt_model *m) {
    const mt_experts *e = m->experts;
    return e->num_choices * 5 / 4 / (e->router.num_experts / e->order.count);
}

/* Grows `rows` to room for plan.M rows and 1/8 more; this happens in the first steps. The memory is freed and allocated
 * in the order of m->stream, which has waited for all work on these rows on other streams. The host must not wait: this
 * rank may grow while the others do not and already wait for it in a collective. */
static void mt_expert_rows_reserve(mt_model *m, mt_expert_rows *rows, mt_expert_rows_plan plan) {
    if (plan.M <= rows->capacity) return;
    if (rows->memory) m->ops->memory_free_ordered(rows->memory, m->stream);
    mt_arena arena = {0};
    plan.M = mt_max(plan.M * 9 / 8, mt_expert_rows_expected(m));
    mt_expert_rows_allocate(m, rows, &arena, &plan);
    rows->memory = arena.used > 0 ? m->ops->memory_alloc_ordered(arena.used, m->stream) : NULL;
    arena = (mt_arena){.base = rows->memory, .capacity = arena.used};
    mt_expert_rows_allocate(m, rows, &arena, &plan);
}

/* Plans the recomputed rows of the layers that share a buffer, plan->M of them: those of the layer with the most
 * values, which has those of all others. Layers differ if only some are in fp8. Returns their bytes. */
static int64_t mt_recomputed_rows_plan(const mt_model *m, const mt_recompute_buffer *buffer,
                                       mt_expert_rows_plan *plan) {
    mt_expert_rows rows;
    int64_t most = 0;
    for (const mt_layer *w = m->layers; w < m->layers + m->num_layers; w++) {
        mt_expert_rows_plan one = {.M = plan->M, .layer = w, .residency = MT_RECOMPUTE};
        mt_arena arena = {0};
        if (w->expert_bucket < 0 || mt_recompute_buffer_of(m, w) != buffer) continue;
        mt_expert_rows_allocate(m, &rows, &arena, &one);
        if (arena.used > most) most = arena.used, *plan = one;
    }
    return most;
}

/* Room for the rows that a layer received. Its recomputed values lie in the layer's recompute buffer. */
static void mt_layer_rows_reserve(mt_model *m, const mt_layer *w, mt_routing *r) {
    const mt_recompute_buffer *buffer = mt_recompute_buffer_of(m, w);
    mt_expert_rows *shared = buffer->rows;
    mt_expert_rows_plan plan = {.M = r->num_rows, .layer = w, .residency = MT_KEEP};
    if (mt_expert_rows_fixed(m)) return; // they are in the arena
    mt_slots slots = {.count = 0};
    mt_expert_rows_reserve(m, &r->rows, plan);
    mt_expert_rows_slots(m, &slots, 0, 0, false, w);
    mt_slots_place(m, &slots, w);
    if (plan.M > shared->capacity) mt_recomputed_rows_plan(m, buffer, &plan);
    for (const mt_slot *slot = slots.slots; slot < slots.slots + slots.count; slot++) {
        if (slot->residency != MT_RECOMPUTE) continue;
        mt_expert_rows_reserve(m, shared, plan); // for the first such slot
        memcpy((char *)&r->rows + slot->field, (const char *)shared + slot->field, sizeof(void *));
    }
}

static void mt_expert_rows_free(const mt_model *m, mt_expert_rows *rows) {
    if (rows->memory) m->ops->memory_free(rows->memory);
    rows->memory = NULL, rows->capacity = 0;
}

/* ---- the router */

/* Turns counts[E] of this rank's micro-batch into the counts of the global batch up to it, in the order of samples: the
 * counts of a single rank that computes all micro-batches. */
static void mt_aux_loss_global_counts(mt_model *m, const mt_pass *p, const mt_layer *w, float *counts) {
    const mt_experts *e = m->experts;
    const mt_group *data = &m->grid->data;
    int64_t E = e->router.num_experts;
    float *global = e->global + w->moe_index * E;
    m->ops->all_gather(e->rank_counts, counts, E, MT_F32, data, p->stream);
    m->ops->combine_rows(&(mt_combine_args){1, data->rank + 1, E, .in = e->rank_counts, .position = e->data_ranks,
                                            .base = global, .out = counts},
                         MT_F32, p->stream);
    m->ops->combine_rows(&(mt_combine_args){1, data->size, E, .in = e->rank_counts, .position = e->data_ranks,
                                            .base = global, .out = global},
                         MT_F32, p->stream);
}

/* Counter of a layer's tokens with logits that are not finite; a replay's counts are discarded. */
static int32_t *mt_invalid_count(const mt_experts *e, const mt_pass *p, const mt_layer *w) {
    return p->replay ? e->discarded : e->invalid + w->moe_index;
}

/* The rows of the whole micro-batch, from own[rows, width] of each rank that shares it: `all`, or `own` itself where
 * one rank has them all. */
static const void *mt_micro_batch_all_rows(const mt_model *m, const mt_pass *p, void *all, const void *own,
                                           int64_t width, mt_dtype dtype) {
    const mt_group *group = &m->grid->tensor_context;
    if (group->size == 1) return own;
    m->ops->all_gather(all, own, p->rows * width, dtype, group, p->stream);
    return all;
}

/* The operands of an auxiliary loss, except results and gradients. */
static mt_aux_loss_args mt_aux_loss_operands(const mt_model *m, const mt_pass *p, const mt_routing *r,
                                             mt_load_balancing type, float *sums) {
    bool by_sequence = type == MT_BALANCING_SEQ_AUX_LOSS && p->num_sequences > 1;
    const int32_t *sequence = by_sequence ? p->batch->sequence + p->first_row : NULL;
    const int64_t *index = p->batch->token_index + p->first_row;
    int64_t S = by_sequence ? p->num_sequences : 1;
    return (mt_aux_loss_args){S, p->rows, &m->experts->router, r->logits, sequence, index, .sums = sums};
}

/* Auxiliary losses, from the experts' scores and counts over all ranks that share the sequences. */
static void mt_aux_loss(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r) {
    mt_experts *e = m->experts;
    int64_t E = e->router.num_experts;
    const mt_group *group = &m->grid->tensor_context;
    float *sums = r->aux_stats;
    double *z_sum = e->losses + MT_NUM_AUX_LOSSES;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++) {
        mt_load_balancing type = (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i);
        if (!mt_has_aux_stats(m, type)) continue;
        mt_aux_loss_args a = mt_aux_loss_operands(m, p, r, type, sums);
        a.z_sum = z_sum;
        m->ops->aux_loss_forward(&a, p->stream);
        m->ops->all_reduce(sums, 2 * a.S * E, MT_SUM, MT_F32, group, p->stream);
        if (type == MT_BALANCING_GLOBAL_AUX_LOSS) mt_aux_loss_global_counts(m, p, w, sums + E);
        if (group->rank == 0) m->ops->aux_loss_value(e->losses + i, sums, a.S, E, p->stream);
        sums += mt_aux_stats_rows(m, type) * E;
        z_sum = e->losses + MT_NUM_AUX_LOSSES + 1; // discarded: the first loss has counted it
    }
}

/* e->dlogits += the gradients of the auxiliary losses and of the z-loss. A repeated module has the mean of its depths'
 * auxiliary losses, and the sum of their z-losses; in models of --hybrid-override-pattern the sums of both.
 * Megatron-Core 0.19 computes these. */
static void mt_aux_loss_backward(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_routing *r) {
    const mt_experts *e = m->experts;
    const mt_options *o = m->options;
    bool divides = w->number >= o->num_layers && o->mtp_use_repeated_layer && !o->hybrid_layers;
    float aux_scale = m->loss_scale / (float)(divides ? o->mtp_num_layers : 1);
    float *sums = r->aux_stats;
    float z_scale = (float)m->options->moe_z_loss_coeff * m->loss_scale;
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++) {
        mt_load_balancing type = (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i);
        if (!mt_has_aux_stats(m, type)) continue;
        mt_aux_loss_args a = mt_aux_loss_operands(m, p, r, type, sums);
        a.counts = sums + a.S * e->router.num_experts, a.dlogits = e->dlogits;
        a.aux_scale = (float)mt_aux_loss_coeff(m->options, type) * aux_scale, a.z_scale = z_scale;
        m->ops->aux_loss_backward(&a, p->stream);
        sums += mt_aux_stats_rows(m, type) * e->router.num_experts;
        z_scale = 0; // once
    }
}

/* Drops choices over the experts' capacity. The capacity counts the whole micro-batch without padding, so the result
 * does not depend on the layout. */
static void mt_drop_over_capacity(mt_model *m, const mt_pass *p, const mt_layer *w, int32_t *kept,
                                  const int32_t *experts, const float *probs) {
    mt_experts *e = m->experts;
    int64_t R = p->rows, k = e->router.topk, E = e->router.num_experts, tokens = R * m->grid->tensor_context.size;
    const int64_t *index = p->batch->token_index + p->first_row;
    mt_drop_args drop = {.T = tokens, .k = k, .first = m->grid->tensor_context.rank * R, .count = R, .kept = kept};
    drop.capacity = mt_expert_capacity(m, p->decode ? tokens : p->unpadded);
    drop.experts = mt_micro_batch_all_rows(m, p, e->all_experts, experts, k, MT_I32);
    drop.token_index = mt_micro_batch_all_rows(m, p, e->all_index, index, 1, MT_I64);
    if (m->options->moe_token_drop_policy != MT_DROP_POSITION)
        drop.probs = mt_micro_batch_all_rows(m, p, e->all_probs, probs, k, MT_F32);
    m->ops->drop_tokens(&drop, p->stream);
    if (p->training && !p->replay) m->ops->count_experts(e->kept + w->moe_index * E, kept, R * k, E, p->stream);
}

/* Tokens of each source. Ranks may have micro-batches of different lengths; an all-gather takes as many tokens of each
 * as the longest has. */
static int64_t mt_dispatched_rows(const mt_model *m, const mt_pass *p) {
    return m->experts->num_sources > 1 ? m->max_rows : p->rows;
}

/* Offset of this rank's tokens in arrays [N, k]. */
static int64_t mt_own_offset(const mt_model *m, const mt_pass *p) {
    const mt_experts *e = m->experts;
    return e->num_sources > 1 ? e->group->rank * mt_dispatched_rows(m, p) * e->router.topk : 0;
}

/* Chooses experts for logits[R, E] with Sinkhorn's iteration, which balances the loads of the whole micro-batch. */
static void mt_route_sinkhorn(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_routing *r) {
    mt_experts *e = m->experts;
    const mt_group *group = &m->grid->tensor_context;
    int64_t R = p->rows, own = mt_own_offset(m, p);
    const float *logits = mt_micro_batch_all_rows(m, p, e->all_logits, r->logits, e->router.num_experts, MT_F32);
    const int64_t *index = p->batch->token_index + p->first_row;
    index = mt_micro_batch_all_rows(m, p, e->all_index, index, 1, MT_I64);
    m->ops->route_sinkhorn(&(mt_route_args){group->size * R, &e->router, logits, .token_index = index,
                                            .first = group->rank * R, .count = R, .probs = r->probs + own,
                                            .experts = r->experts + own, .invalid = mt_invalid_count(e, p, w)},
                           p->stream);
}

/* Adds the quantiles of the whole micro-batch's logits, which every rank that shares it computes. */
static void mt_route_quantiles(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_routing *r) {
    mt_experts *e = m->experts;
    int64_t E = e->router.num_experts;
    const float *logits = mt_micro_batch_all_rows(m, p, e->all_logits, r->logits, E, MT_F32);
    const int64_t *index = p->batch->token_index + p->first_row;
    index = mt_micro_batch_all_rows(m, p, e->all_index, index, 1, MT_I64);
    m->ops->quantile_sums(&(mt_quantile_args){p->rows * m->grid->tensor_context.size, E, e->router.topk, logits,
                                              w->router_bias.w, index, e->quantiles + w->moe_index * (E + 1)},
                          p->stream);
}

/* Logits, probabilities and chosen experts of x[R, C]. */
static void mt_route_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r, const void *x) {
    mt_experts *e = m->experts;
    int64_t R = p->rows, E = e->router.num_experts, k = e->router.topk, own = mt_own_offset(m, p);
    mt_linear_forward(mt_linears(p), &w->router, &(mt_linear_io){.x = x, .y = r->logits});
    if (m->options->moe_router_force_load_balancing && !p->decode)
        m->ops->random_logits(r->logits, p->batch->token_index + p->first_row, R, E,
                              mt_random_key((uint64_t)m->options->seed, MT_RANDOM_ROUTER, (uint64_t)(w->number + 1)),
                              p->stream);
    if (p->training && mt_has_sinkhorn(m))
        mt_route_sinkhorn(m, p, w, r);
    else
        m->ops->route_forward(&(mt_route_args){R, &e->router, r->logits, .bias = w->router_bias.w,
                                               .token_index = p->decode ? NULL : p->batch->token_index + p->first_row,
                                               .probs = r->probs + own, .experts = r->experts + own,
                                               .invalid = mt_invalid_count(e, p, w)},
                              p->stream);
    if (p->training && !p->replay)
        m->ops->count_experts(e->loads + w->moe_index * E, r->experts + own, R * k, E, p->stream);
    if (p->training && !p->replay && mt_has_aux_loss(m)) mt_aux_loss(m, p, w, r);
    if (p->training && !p->replay && mt_has_quantiles(m)) mt_route_quantiles(m, p, w, r);
    if (mt_has_capacity(m)) mt_drop_over_capacity(m, p, w, r->kept + own, r->experts + own, r->probs + own);
}

/* dx[R, C] from dlogits, which the products take in the model's type. */
static void mt_router_linear_backward(mt_model *m, const mt_pass *p, const mt_linear *router, const void *x,
                                      const float *dlogits, void *dx) {
    void *rounded = m->experts->dlogits_rounded;
    mt_linear_io io = {.x = x, .dy = dlogits, .dx = dx};
    if (m->dtype != MT_F32) {
        m->ops->convert(rounded, m->dtype, dlogits, MT_F32, p->rows * router->N, p->stream);
        io.dy = rounded;
    }
    mt_linear_backward(mt_linears(p), router, &io, MT_BACKWARD_BOTH);
}

/* dx[R, C], from dprobs[N, k] and from the auxiliary losses. */
static void mt_route_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_routing *r, const void *x,
                              const float *dprobs, void *dx) {
    mt_experts *e = m->experts;
    int64_t own = mt_own_offset(m, p);
    m->ops->route_backward(&(mt_route_args){p->rows, &e->router, r->logits, .experts = r->experts + own,
                                            .dprobs = dprobs + own, .dlogits = e->dlogits},
                           p->stream);
    mt_aux_loss_backward(m, p, w, r);
    mt_router_linear_backward(m, p, &w->router, x, e->dlogits, dx);
}

/* ---- the shared expert's gate: a router with a single expert and a sigmoid score, which scales the activation as the
 * probability of any expert does. Each tensor-parallel rank has all tokens and some channels, so each has a partial sum
 * of the gate's gradient. */

static const mt_router mt_shared_gate_router = {.num_experts = 1, .topk = 1, .score = MT_SCORE_SIGMOID, .scaling = 1};

/* Offset of this rank's R rows in gates[T]. */
static int64_t mt_own_gate_offset(const mt_model *m, const mt_pass *p) {
    return p->tp.sequence_parallel ? m->grid->tensor.rank * p->rows : 0;
}

/* routing.gates[T] = sigmoid(x[R, C] w^T), gathered over the tensor group. */
static void mt_shared_gate_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r, const void *x) {
    const mt_experts *e = m->experts;
    float *own = r->gates + mt_own_gate_offset(m, p);
    mt_linear_forward(mt_linears(p), &w->shared_gate, &(mt_linear_io){.x = x, .y = r->gate_logits});
    m->ops->route_forward(&(mt_route_args){p->rows, &mt_shared_gate_router, r->gate_logits, .probs = own,
                                           .experts = e->gate_experts, .invalid = e->discarded},
                          p->stream);
    if (p->tp.sequence_parallel) m->ops->all_gather(r->gates, own, p->rows, MT_F32, &m->grid->tensor, p->stream);
}

/* dx[R, C] += gradient of x from dgates[T], which is overwritten. */
static void mt_shared_gate_backward(mt_model *m, const mt_pass *p, mt_layer *w, const mt_routing *r, const void *x,
                                    float *dgates, void *dx) {
    const mt_experts *e = m->experts;
    float *own = dgates + mt_own_gate_offset(m, p);
    void *own_dx = e->router_dx;
    if (p->tp.sequence_parallel) m->ops->reduce_scatter(own, dgates, p->rows, MT_F32, &m->grid->tensor, p->stream);
    m->ops->route_backward(&(mt_route_args){p->rows, &mt_shared_gate_router, r->gate_logits, .experts = e->gate_experts,
                                            .dprobs = own, .dlogits = e->dlogits},
                           p->stream);
    mt_router_linear_backward(m, p, &w->shared_gate, x, e->dlogits, own_dx);
    mt_add_to(m, p, dx, own_dx);
}

/* ---- dispatchers: operations of several */

static void mt_permute_rows(const mt_model *m, const mt_pass *p, void *to, const void *from, const int32_t *index,
                            int64_t count) {
    m->ops->gather_rows(&(mt_row_args){count, m->experts->C, index, .from = from, .to = to}, m->dtype, p->stream);
}

static void mt_permute_weights(const mt_model *m, const mt_pass *p, float *to, const float *from, const int32_t *index,
                               int64_t count) {
    m->ops->gather_rows(&(mt_row_args){count, 1, index, .from = from, .to = to}, MT_F32, p->stream);
}

/* The order of the rows that the choices of N tokens make. num_rows includes choices of nothing. */
static void mt_order_choices(mt_model *m, const mt_pass *p, mt_routing *r, const mt_dispatch *order) {
    const mt_experts *e = m->experts;
    int64_t N = mt_dispatched_rows(m, p) * e->num_sources;
    int64_t P = order->capacity > 0 ? e->num_destinations * order->capacity : N * order->topk * order->copies;
    m->ops->dispatch_plan(&(mt_dispatch_args){N, P, order, .experts = r->kept, .offsets = r->offsets,
                                              .position = r->position, .row_choice = r->choice, .row_token = r->token},
                          p->stream);
    r->num_rows = r->num_choices = P;
}

/* Waits for the offsets of the destinations, and copies them to the host. */
static void mt_offsets_to_host(mt_model *m, mt_routing *r) {
    mt_experts *e = m->experts;
    int64_t bytes = (e->num_destinations + 1) * 4;
    mt_copy_wait(m, e->host_offsets, r->offsets, bytes);
    memcpy(r->host_offsets, e->host_offsets, (size_t)bytes);
}

/* Room for the rows of a routing, sent and received. */
static void mt_routing_reserve(mt_model *m, const mt_layer *w, mt_routing *r) {
    mt_expert_rows_plan plan = {.M = mt_max(r->num_rows, r->num_choices)};
    mt_expert_rows_reserve(m, &m->experts->rows, plan);
    if (m->experts->dispatcher->reorders) {
        plan.dispatched = true;
        mt_expert_rows_reserve(m, &m->experts->dispatched, plan);
    }
    mt_layer_rows_reserve(m, w, r);
}

/* rows[M, C] and, if rows arrived with weights, weights[M]: the input of the experts, sorted by expert. In fp8 each row
 * that arrived is quantized once. */
static void mt_permute_to_experts(const mt_model *m, const mt_pass *p, const mt_routing *r, const mt_arrived *arrived,
                                  void *rows, float *weights, const mt_linear *reader, mt_fp8_operand kind) {
    mt_quantize_args a = mt_fp8_args(p->training, reader, kind, rows, arrived->R, NULL);
    a.x = arrived->x, a.position = arrived->position, a.copies = arrived->copies;
    a.compact = r->source ? r->num_rows : 0; // in the half of the rows' memory that fp8 leaves free
    if (a.rows.data)
        m->ops->quantize(&a, m->dtype, p->stream);
    else
        mt_permute_rows(m, p, rows, arrived->x, arrived->row, r->num_rows);
    if (arrived->weights) mt_permute_weights(m, p, weights, arrived->weights, arrived->weight, r->num_rows);
}

/* out[N, C] = base + the sum of the results of each of the tokens [first, first + N); base may be NULL, or out. Fused:
 * one gather per token. Unfused, for all tokens only: rows are added to zeros, in a fixed order. */
static void mt_combine_results(mt_model *m, const mt_pass *p, const mt_routing *r, const void *results, void *out,
                               const void *base, int64_t first, int64_t N) {
    mt_experts *e = m->experts;
    int64_t n = e->order.topk * e->order.copies;
    if (m->options->moe_permute_fusion) {
        m->ops->combine_rows(&(mt_combine_args){N, n, e->C, .in = results, .position = r->position + first * n,
                                                .base = base, .out = out},
                             m->dtype, p->stream);
        return;
    }
    void *sum = base ? e->scattered : out;
    m->ops->memory_zero(e->sums, N * e->C * 4, p->stream);
    m->ops->scatter_add_rows(&(mt_row_args){r->num_choices, e->C, r->token, .from = results, .to = e->sums, .count = N},
                             m->dtype, p->stream);
    m->ops->convert(sum, m->dtype, e->sums, MT_F32, N * e->C, p->stream);
    if (base) m->ops->add(out, base, sum, N * e->C, m->dtype, p->stream);
}

/* ---- one rank alone: nothing is exchanged, and the host does not wait */

static void mt_alone_count(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r) {
    const mt_experts *e = m->experts;
    mt_dispatch order = e->order;
    if (order.capacity > 0) order.capacity = mt_expert_capacity(m, p->rows * m->grid->tensor_context.size);
    mt_order_choices(m, p, r, &order);
    r->source = r->token;
    if (!m->options->moe_grouped_gemm) mt_offsets_to_host(m, r);
    mt_routing_reserve(m, w, r);
}

static mt_arrived mt_alone_arrive(mt_model *m, const mt_pass *p, const mt_routing *r, const void *x,
                                  const float *probs) {
    int64_t copies = m->experts->order.topk * m->experts->order.copies;
    return (mt_arrived){x, p->rows, probs, r->token, r->choice, r->position, copies};
}

static void mt_alone_combine(mt_model *m, const mt_pass *p, const mt_routing *r, const void *results, void *out,
                             const void *base) {
    mt_combine_results(m, p, r, results, out, base, 0, p->rows);
}

static void mt_alone_combine_weights(mt_model *m, const mt_pass *p, const mt_routing *r, float *dprobs,
                                     float *dweights) {
    const mt_dispatch *order = &m->experts->order;
    m->ops->combine_rows(&(mt_combine_args){p->rows * order->topk, order->copies, 1, .in = dweights,
                                            .position = r->position, .out = dprobs},
                         MT_F32, p->stream);
}

/* ---- alltoall: each row goes to the ranks that hold its expert */

/* Numbers of rows to and from every rank, and of each local expert. The host needs them for the all-to-all. */
static void mt_exchange_counts(mt_model *m, const mt_pass *p, mt_routing *r) {
    mt_experts *e = m->experts;
    int64_t size = e->group->size, rank = e->group->rank, local = e->num_local, stride = e->num_destinations + 1;
    m->ops->all_gather(e->all_offsets, r->offsets, stride, MT_I32, e->group, p->stream);
    mt_copy_wait(m, e->host_offsets, e->all_offsets, size * stride * 4);
    r->num_rows = 0;
    for (int64_t other = 0; other < size; other++) {
        const int32_t *here = e->host_offsets + other * stride + rank * local;
        const int32_t *there = e->host_offsets + rank * stride + other * local;
        for (int64_t i = 0; i < local; i++) e->host_counts[other * local + i] = here[i + 1] - here[i];
        r->received[other] = here[local] - here[0], r->sent[other] = there[local] - there[0];
        r->num_rows += r->received[other];
    }
    m->ops->memory_copy(e->counts, e->host_counts, size * local * 4, p->stream);
}

/* The same with --moe-pad-expert-input-to-capacity: every number is the capacity. */
static void mt_exchange_counts_padded(mt_model *m, const mt_pass *p, mt_routing *r, int64_t capacity) {
    mt_experts *e = m->experts;
    int64_t size = e->group->size, local = e->num_local;
    r->num_rows = size * local * capacity;
    for (int64_t other = 0; other < size; other++) r->sent[other] = r->received[other] = local * capacity;
    if (e->host_counts[0] == capacity) return;
    m->ops->stream_synchronize(p->stream); // for the copy of the previous host_counts
    for (int64_t i = 0; i < size * local; i++) e->host_counts[i] = (int32_t)capacity;
    m->ops->memory_copy(e->counts, e->host_counts, size * local * 4, p->stream);
}

/* Received rows are in the order of their source ranks; to_expert sorts them by expert. The capacity is that of the
 * largest micro-batch: other ranks' may have other lengths, but all ranks send as many rows. */
static void mt_alltoall_count(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r) {
    mt_experts *e = m->experts;
    mt_order_choices(m, p, r, &e->order);
    if (e->order.capacity > 0)
        mt_exchange_counts_padded(m, p, r, e->order.capacity);
    else
        mt_exchange_counts(m, p, r);
    mt_routing_reserve(m, w, r);
    m->ops->exchange_order(r->rows.to_expert, r->rows.from_expert, r->expert_offsets, e->counts, e->group->size,
                           e->num_local, r->num_rows, p->stream);
    r->host_offsets[0] = 0;
    for (int64_t i = 0; i < e->num_local; i++) {
        r->host_offsets[i + 1] = r->host_offsets[i];
        for (int64_t other = 0; other < e->group->size; other++)
            r->host_offsets[i + 1] += e->host_counts[other * e->num_local + i];
    }
}

/* All-to-all of rows of `width` elements: dispatch, or with `back` combine. */
static void mt_exchange_rows(mt_model *m, const mt_routing *r, void *to, const void *from, int64_t width,
                             mt_dtype dtype, bool back) {
    mt_experts *e = m->experts;
    const int64_t *out = back ? r->sent : r->received, *in = back ? r->received : r->sent;
    for (int i = 0; i < e->group->size; i++) e->out_counts[i] = out[i] * width, e->in_counts[i] = in[i] * width;
    m->ops->all_to_all_v(to, e->out_counts, from, e->in_counts, dtype, e->group, e->comm);
}

static void mt_alltoall_exchange(mt_model *m, const mt_pass *p, const mt_routing *r, const void *x,
                                 const float *probs) {
    mt_experts *e = m->experts;
    mt_permute_rows(m, p, e->rows.input, x, r->token, r->num_choices);
    if (probs) mt_permute_weights(m, p, e->rows.weights, probs, r->choice, r->num_choices);
    mt_wait_stream(m, e->comm, p->stream);
    mt_exchange_rows(m, r, e->dispatched.input, e->rows.input, e->C, m->dtype, false);
    if (probs) mt_exchange_rows(m, r, e->dispatched.weights, e->rows.weights, 1, MT_F32, false);
}

static mt_arrived mt_alltoall_arrive(mt_model *m, const mt_pass *p, const mt_routing *r, const void *x,
                                     const float *probs) {
    const mt_expert_rows *d = &m->experts->dispatched;
    const int32_t *to_expert = r->rows.to_expert;
    (void)x;
    mt_wait_stream(m, p->stream, m->experts->comm);
    return (mt_arrived){d->input, r->num_rows, probs ? d->weights : NULL, to_expert, to_expert, r->rows.from_expert, 1};
}

/* In place. */
static void mt_alltoall_exchange_back(mt_model *m, const mt_pass *p, const mt_routing *r, void *results, void *out,
                                      const void *base) {
    mt_experts *e = m->experts;
    (void)out, (void)base;
    mt_permute_rows(m, p, e->rows.input, results, r->rows.from_expert, r->num_rows);
    mt_wait_stream(m, e->comm, p->stream);
    mt_exchange_rows(m, r, results, e->rows.input, e->C, m->dtype, true);
}

static void mt_alltoall_combine(mt_model *m, const mt_pass *p, const mt_routing *r, const void *results, void *out,
                                const void *base) {
    mt_wait_stream(m, p->stream, m->experts->comm);
    mt_alone_combine(m, p, r, results, out, base);
}

static void mt_alltoall_combine_weights(mt_model *m, const mt_pass *p, const mt_routing *r, float *dprobs,
                                        float *dweights) {
    mt_experts *e = m->experts;
    mt_permute_weights(m, p, e->dispatched.weights, dweights, r->rows.from_expert, r->num_rows);
    mt_wait_stream(m, e->comm, p->stream);
    mt_exchange_rows(m, r, dweights, e->dispatched.weights, 1, MT_F32, true);
    mt_wait_stream(m, p->stream, e->comm);
    mt_alone_combine_weights(m, p, r, dprobs, dweights);
}

/* ---- allgather: all tokens go to all ranks, and each rank selects the rows of its own experts */

/* Starts to gather x[R, C] of all ranks on the stream `comm`, beside the router. */
static void mt_allgather_gather(mt_model *m, const mt_pass *p, const void *x) {
    mt_wait_stream(m, m->experts->comm, p->stream);
    mt_gather_overlapped(&m->experts->exchange, x, m->experts->C);
}

/* Choices of all ranks; rows after a rank's tokens choose nothing. The host learns how many chose an expert here. */
static void mt_allgather_count(mt_model *m, const mt_pass *p, const mt_layer *w, mt_routing *r) {
    mt_experts *e = m->experts;
    int64_t own = mt_own_offset(m, p), R = mt_dispatched_rows(m, p), k = e->order.topk;
    if (R > p->rows) m->ops->memory_copy(r->kept + own + p->rows * k, e->no_choices, (R - p->rows) * k * 4, p->stream);
    m->ops->all_gather(r->kept, r->kept + own, R * k, MT_I32, e->group, p->stream);
    m->ops->all_gather(r->probs, r->probs + own, R * k, MT_F32, e->group, p->stream);
    mt_order_choices(m, p, r, &e->order);
    mt_offsets_to_host(m, r);
    r->num_rows = r->num_choices = r->host_offsets[e->num_destinations];
    mt_routing_reserve(m, w, r);
}

static mt_arrived mt_allgather_arrive(mt_model *m, const mt_pass *p, const mt_routing *r, const void *x,
                                      const float *probs) {
    const mt_experts *e = m->experts;
    (void)x;
    mt_wait_stream(m, p->stream, e->comm);
    return (mt_arrived){e->exchange.gathered, e->exchange.T, probs, r->token, r->choice, r->position, e->order.topk};
}

/* The sums of the results here for each token; the ranks add them up in `out`, or beside it if there is a base. */
static void mt_allgather_exchange_back(mt_model *m, const mt_pass *p, const mt_routing *r, void *results, void *out,
                                       const void *base) {
    const mt_tensor_parallel *x = &m->experts->exchange;
    mt_combine_results(m, p, r, results, x->partial, NULL, 0, x->T);
    mt_scatter_begin(x, base ? m->experts->scattered : out, m->experts->C);
}

static void mt_allgather_combine(mt_model *m, const mt_pass *p, const mt_routing *r, const void *results, void *out,
                                 const void *base) {
    void *sum = base ? m->experts->scattered : out;
    (void)r, (void)results;
    mt_scatter_end(&m->experts->exchange, sum, m->experts->C);
    if (base) m->ops->add(out, base, sum, p->rows * m->experts->C, m->dtype, p->stream);
}

static void mt_allgather_combine_weights(mt_model *m, const mt_pass *p, const mt_routing *r, float *dprobs,
                                         float *dweights) {
    const mt_experts *e = m->experts;
    int64_t choices = mt_dispatched_rows(m, p) * e->order.topk;
    m->ops->combine_rows(
        &(mt_combine_args){e->group->size * choices, 1, 1, .in = dweights, .position = r->position, .out = dprobs},
        MT_F32, p->stream);
    m->ops->reduce_scatter(dprobs + mt_own_offset(m, p), dprobs, choices, MT_F32, e->group, p->stream);
}

/* ---- flex: allgather by copies into the other ranks' memory. Each rank's tokens are summed by themselves: the sums
 * for one rank are sent while the next are computed, and this rank's own, with the base, are computed last. */

static void mt_flex_exchange_back(mt_model *m, const mt_pass *p, const mt_routing *r, void *results, void *out,
                                  const void *base) {
    const mt_tensor_parallel *x = &m->experts->exchange;
    (void)out, (void)base;
    for (int step = 1; step < x->group->size; step++) {
        int owner = mt_tensor_rank_after(x, step);
        void *sums = mt_rows_of_rank(x, x->partial, owner, m->experts->C);
        mt_combine_results(m, p, r, results, sums, NULL, owner * x->rows, x->rows);
        mt_wait_stream(m, x->comm, p->stream);
        mt_scatter_step(x, m->experts->C, step);
    }
}

static void mt_flex_combine(mt_model *m, const mt_pass *p, const mt_routing *r, const void *results, void *out,
                            const void *base) {
    const mt_tensor_parallel *x = &m->experts->exchange;
    int own = x->group->rank;
    void *sums = mt_rows_of_rank(x, x->partial, own, m->experts->C);
    mt_combine_results(m, p, r, results, sums, base, own * x->rows, p->rows);
    mt_scatter_end(x, out, m->experts->C);
}

/* ---- the rows */

static const mt_dispatcher mt_dispatcher_alone = {.count = mt_alone_count,
                                                  .arrive = mt_alone_arrive,
                                                  .combine = mt_alone_combine,
                                                  .combine_weights = mt_alone_combine_weights};

static const mt_dispatcher mt_dispatchers[] = {
    [MT_DISPATCHER_ALLTOALL] = {.reorders = true,
                                .count = mt_alltoall_count,
                                .exchange = mt_alltoall_exchange,
                                .arrive = mt_alltoall_arrive,
                                .exchange_back = mt_alltoall_exchange_back,
                                .combine = mt_alltoall_combine,
                                .combine_weights = mt_alltoall_combine_weights},
    [MT_DISPATCHER_ALLGATHER] = {.gathers = true,
                                 .adds_base = true,
                                 .gather = mt_allgather_gather,
                                 .count = mt_allgather_count,
                                 .arrive = mt_allgather_arrive,
                                 .exchange_back = mt_allgather_exchange_back,
                                 .combine = mt_allgather_combine,
                                 .combine_weights = mt_allgather_combine_weights},
    [MT_DISPATCHER_FLEX] = {.gathers = true,
                            .gather = mt_allgather_gather,
                            .count = mt_allgather_count,
                            .arrive = mt_allgather_arrive,
                            .exchange_back = mt_flex_exchange_back,
                            .combine = mt_flex_combine,
                            .combine_weights = mt_allgather_combine_weights},
};

/* Without fused permutation flex is allgather with copies: its results are summed for all ranks at once. */
static const mt_dispatcher *mt_dispatcher_of(const mt_options *o, const mt_group *group) {
    mt_token_dispatcher type = o->moe_token_dispatcher_type;
    if (group->size == 1) return &mt_dispatcher_alone;
    if (type == MT_DISPATCHER_FLEX && !o->moe_permute_fusion) type = MT_DISPATCHER_ALLGATHER;
    return &mt_dispatchers[type];
}

/* Before the router, where the dispatcher gathers whole tokens. */
static void mt_dispatch_gather(mt_model *m, const mt_pass *p, const void *x) {
    const mt_dispatcher *d = m->experts->dispatcher;
    if (d->gather) d->gather(m, p, x);
}

/* The rows of a linear of the experts. */
static mt_row_groups mt_expert_groups(const mt_model *m, const mt_routing *r) {
    return (mt_row_groups){.offsets = r->expert_offsets,
                           .host_offsets = m->options->moe_grouped_gemm ? NULL : r->host_offsets,
                           .num_rows = r->num_rows};
}

/* ---- the experts' MLPs; probabilities scale the activation or the output */

/* rows.active = activation(rows.hidden), scaled by the probabilities unless they scale the output. */
static void mt_expert_activation_forward(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_routing *r) {
    const mt_expert_rows *rows = &r->rows;
    mt_activation_args a = {.T = r->num_rows, .F = m->experts->F, .x = rows->hidden, .y = rows->active};
    a.weights = mt_scales_output(m) ? NULL : rows->weights;
    mt_activation_forward(m, p, &w->expert_down, r->expert_offsets, &a);
}

/* results[M, C] = experts(rows.input), scaled by rows.weights; NULL: only the values that the backward reads. */
static void mt_expert_mlp_forward(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_routing *r,
                                  void *results) {
    const mt_expert_rows *rows = &r->rows;
    mt_row_groups groups = mt_expert_groups(m, r);
    mt_linear_io fc1 = {.groups = &groups}, down = fc1;
    fc1.x = rows->input, fc1.y = rows->hidden;
    down.x = rows->active;
    if (p->training) fc1.x_transposed = rows->input_transposed, down.x_transposed = rows->active_transposed;
    down.y = mt_scales_output(m) ? rows->output : results;
    mt_linear_forward(mt_linears(p), &w->expert_fc1, &fc1);
    mt_expert_activation_forward(m, p, w, r);
    if (results || mt_scales_output(m)) mt_linear_forward(mt_linears(p), &w->expert_down, &down);
    if (results && mt_scales_output(m))
        m->ops->scale_rows_forward(
            &(mt_scale_rows_args){r->num_rows, m->experts->C, rows->weights, .x = rows->output, .y = results}, m->dtype,
            p->stream);
}

/* dinput[M, C], the gradient of rows.input, from that of the results, d->input. The other gradients are stored in d. */
static void mt_expert_mlp_backward(mt_model *m, const mt_pass *p, mt_layer *w, const mt_routing *r,
                                   const mt_expert_rows *d, void *dinput) {
    const mt_expert_rows *rows = &r->rows;
    mt_row_groups groups = mt_expert_groups(m, r), copies = groups;
    mt_linear_io fc1 = {.groups = &groups}, down = {.groups = &copies};
    mt_activation_args activation = {.T = r->num_rows, .F = m->experts->F, .x = rows->hidden, .dy = d->active};
    activation.dx = d->hidden;
    down.x = rows->active, down.x_transposed = rows->active_transposed, down.dy = d->input, down.dx = d->active;
    copies.dy_source = r->source;
    if (mt_scales_output(m)) {
        m->ops->scale_rows_backward(&(mt_scale_rows_args){r->num_rows, m->experts->C, rows->weights, .x = rows->output,
                                                          .dy = d->input, .dx = d->output, .dweights = d->weights},
                                    m->dtype, p->stream);
        down.dy = d->output;
    } else {
        activation.weights = rows->weights, activation.dweights = d->weights;
    }
    mt_linear_backward(mt_linears(p), &w->expert_down, &down, MT_BACKWARD_BOTH);
    mt_activation_backward(m, p, &w->expert_fc1, r->expert_offsets, &activation);
    fc1.dy = d->hidden, fc1.dx = dinput;
    mt_linear_backward_input(mt_linears(p), &w->expert_fc1, &fc1);
}

/* ---- forward and backward */

/* Slots of a layer with experts besides those of its mt_routing. Only full recomputation computes the sums of latent
 * experts again: that takes another exchange. */
static void mt_experts_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    mt_mlp_slots(m, s, w);
    if (mt_has_latent_experts(m)) MT_SLOT(s, experts_out, m->max_rows, m->experts->C, m->dtype);
}

/* The tokens of the experts: x[R, C], or latent ones [R, L]. */
static const void *mt_experts_enter_forward(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                            const void *x) {
    if (!mt_has_latent_experts(m)) return x;
    mt_layer_linear_forward(p, a, &w->experts_in, x, m->experts->latent);
    return m->experts->latent;
}

/* dx[R, C] = the gradient of x through the latent tokens plus router_dx; without latent experts dx has it already. */
static void mt_experts_enter_backward(mt_model *m, const mt_pass *p, const mt_layer *w, const void *x, void *dx) {
    mt_linear_io in = {.x = x, .dy = m->experts->latent, .dx = dx};
    if (!mt_has_latent_experts(m)) return;
    mt_linear_backward(mt_linears(p), &w->experts_in, &in, MT_BACKWARD_BOTH);
    mt_add_to(m, p, dx, m->experts->router_dx);
}

/* out[R, C], which has the shared expert's output if there is one, from the sums of latent experts. */
static void mt_experts_leave_forward(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                     void *out) {
    void *sum = w->F > 0 ? m->experts->wide : out;
    if (!mt_has_latent_experts(m) || !out) return;
    mt_layer_linear_forward(p, a, &w->experts_out, a->experts_out, sum);
    if (w->F > 0) mt_add_to(m, p, out, sum);
}

/* The gradient of the experts' sums: dout[R, C], or that of latent ones [R, L]. */
static const void *mt_experts_leave_backward(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                             const void *dout) {
    mt_linear_io out = {.x = a->experts_out, .dy = dout, .dx = m->experts->dlatent};
    if (!mt_has_latent_experts(m)) return dout;
    mt_linear_backward(mt_linears(p), &w->experts_out, &out, MT_BACKWARD_BOTH);
    return m->experts->dlatent;
}

/* out NULL: only the values that the backward reads. */
static void mt_shared_expert_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                                     void *out) {
    if (w->F == 0) return;
    if (a->routing->gates) mt_shared_gate_forward(m, p, w, a->routing, x);
    mt_scaled_mlp_forward(m, p, w, a, x, a->routing->gates, out);
}

/* out = weighted sum of the chosen experts of each token of x[R, C], plus the shared expert, which computes during the
 * exchange. */
static void mt_experts_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                               void *out) {
    const mt_dispatcher *d = m->experts->dispatcher;
    mt_routing *r = a->routing;
    bool latent = mt_has_latent_experts(m);
    const void *tokens = mt_experts_enter_forward(m, p, w, a, x);
    void *base = w->F > 0 && !latent ? out : NULL, *sums = out, *results;
    if (latent) sums = out || w->recomputed ? a->experts_out : NULL;
    mt_dispatch_gather(m, p, tokens);
    mt_route_forward(m, p, w, r, x);
    d->count(m, p, w, r);
    if (d->exchange) d->exchange(m, p, r, tokens, r->probs);
    mt_shared_expert_forward(m, p, w, a, x, out);
    mt_arrived arrived = d->arrive(m, p, r, tokens, r->probs);
    mt_permute_to_experts(m, p, r, &arrived, r->rows.input, r->rows.weights, &w->expert_fc1, MT_FP8_X);
    results = sums ? m->experts->results->input : NULL; // whose memory d->count may have moved
    mt_expert_mlp_forward(m, p, w, r, results);
    if (!sums) return;
    if (d->exchange_back) d->exchange_back(m, p, r, results, sums, base);
    d->combine(m, p, r, results, sums, base);
    mt_experts_leave_forward(m, p, w, a, out);
}

/* Selective recomputation. */
static void mt_experts_replay(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x) {
    unsigned modules = m->recompute_modules;
    if (modules & MT_MODULE_MOE) {
        mt_experts_forward(m, p, w, a, x, NULL);
        return;
    }
    if (modules & MT_MODULE_SHARED_EXPERTS) mt_shared_expert_forward(m, p, w, a, x, NULL);
    if (!(modules & MT_MODULE_MOE_ACT)) return;
    mt_layer_rows_reserve(m, w, a->routing);
    mt_expert_activation_forward(m, p, w, a->routing);
}

/* A split backward computes the weights' half here too: its inputs are too large to keep. */
static mt_deferred mt_experts_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                       const mt_block_gradients *gradients) {
    mt_experts *e = m->experts;
    const mt_dispatcher *d = e->dispatcher;
    const void *x = gradients->x, *dout = gradients->dout;
    void *dx = gradients->dx, *router_dx = e->router_dx, *dinput = e->results->input;
    const mt_expert_rows *drows = &e->rows;
    mt_routing *r = a->routing;
    MT_CHECK(!gradients->left);
    const void *dsums = mt_experts_leave_backward(m, p, w, a, dout);
    void *dtokens = mt_has_latent_experts(m) ? e->latent : dx, *base = mt_has_latent_experts(m) ? NULL : router_dx;
    if (!gradients->gathered) mt_dispatch_gather(m, p, dsums);
    if (d->exchange) d->exchange(m, p, r, dsums, NULL);
    mt_pass both = *p;
    both.halves = MT_BACKWARD_BOTH;
    if (w->F > 0) mt_scaled_mlp_backward(m, &both, w, a, gradients, r->gates, e->dgates, MT_BACKWARD_BOTH);
    if (w->F > 0 && r->gates) mt_shared_gate_backward(m, p, w, r, x, e->dgates, dx);
    mt_arrived arrived = d->arrive(m, p, r, dsums, NULL);
    mt_permute_to_experts(m, p, r, &arrived, drows->input, NULL, &w->expert_down, MT_FP8_DY);
    mt_expert_mlp_backward(m, p, w, r, drows, dinput);
    if (d->exchange_back) d->exchange_back(m, p, r, dinput, dtokens, base);
    mt_row_groups groups = mt_expert_groups(m, r);
    groups.x_source = r->source;
    mt_linear_io fc1 = {.groups = &groups, .x = r->rows.input, .x_transposed = r->rows.input_transposed};
    fc1.dy = drows->hidden;
    mt_linear_backward_weight(mt_linears(p), &w->expert_fc1, &fc1);
    d->combine_weights(m, p, r, e->dprobs, drows->weights);
    mt_route_backward(m, p, w, r, x, e->dprobs, router_dx);
    if (w->F > 0) mt_add_to(m, p, router_dx, dx);
    d->combine(m, p, r, dinput, dtokens, base);
    mt_experts_enter_backward(m, p, w, x, dx);
    return (mt_deferred){0};
}

/* ==== §9g layer =================================================================================================== */
/* A layer is two blocks on the residual stream, a mixer and a feed-forward, or one of them, each a row of a table of
 * kinds. A block adds to its input x: x + dropout(after(kind(before(x)))), where `before` and `after` are norms that
 * the model has or not (--norm-placement). To add a kind: a section with its functions, and a row here. */

/* A kind of block. x[R, C] is its input, which the norm before has normalised; `out` and `dx` are its results. */
typedef struct mt_block_kind {
    const char *name;
    /* Adds the values that the forward saves for the backward. w NULL: of any layer of the model. */
    void (*slots)(const mt_model *m, mt_slots *s, const mt_layer *w);
    /* out NULL: only the values that the backward reads. */
    void (*forward)(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x, void *out);
    /* Computes the values that --recompute-modules does not keep; NULL: none. */
    void (*replay)(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x);
    /* Returns the product whose weight's gradient the caller defers: its stash is in use until the caller is done with
     * the block's input. */
    mt_deferred (*backward)(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a, const mt_block_gradients *d);
    bool may_leave_weight; // see mt_block_gradients
    size_t last;           // offset in mt_layer of the linear that a split backward defers: the last one
} mt_block_kind;

/* §17 */
static void mt_delta_slots(const mt_model *m, mt_slots *s, const mt_layer *w);
static void mt_delta_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                             void *out);
static mt_deferred mt_delta_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                     const mt_block_gradients *block);

static void mt_short_slots(const mt_model *m, mt_slots *s, const mt_layer *w);
static void mt_short_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                             void *out);
static mt_deferred mt_short_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                     const mt_block_gradients *block);

/* §18 */
static void mt_mamba_slots(const mt_model *m, mt_slots *s, const mt_layer *w);
static void mt_mamba_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                             void *out);
static mt_deferred mt_mamba_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                     const mt_block_gradients *block);

/* §19 */
static void mt_sparse_slots(const mt_model *m, mt_slots *s, const mt_layer *w);
static void mt_sparse_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                              void *out);
static mt_deferred mt_sparse_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                      const mt_block_gradients *block);

/* Of a layer without such a block. */
static void mt_no_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    (void)m, (void)s, (void)w;
}

static const mt_block_kind mt_mixer_kinds[] = {
    [MT_MIXER_ATTENTION] = {"attention", mt_attention_slots, mt_attention_forward, NULL, mt_attention_backward, true,
                            offsetof(mt_layer, o)},
    [MT_MIXER_LATENT_ATTENTION] = {"latent attention", mt_latent_slots, mt_latent_attention_forward,
                                   mt_latent_attention_replay, mt_latent_attention_backward, false,
                                   offsetof(mt_layer, o)},
    [MT_MIXER_KDA] = {"Kimi delta attention", mt_delta_slots, mt_delta_forward, NULL, mt_delta_backward, false,
                      offsetof(mt_layer, o)},
    [MT_MIXER_GATED_DELTA_NET] = {"gated delta net", mt_delta_slots, mt_delta_forward, NULL, mt_delta_backward, false,
                                  offsetof(mt_layer, o)},
    [MT_MIXER_SHORT_CONV] = {"gated short convolution", mt_short_slots, mt_short_forward, NULL, mt_short_backward,
                             false, offsetof(mt_layer, o)},
    [MT_MIXER_MAMBA2] = {"Mamba-2", mt_mamba_slots, mt_mamba_forward, NULL, mt_mamba_backward, false,
                         offsetof(mt_layer, o)},
    [MT_MIXER_SPARSE_ATTENTION] = {"sparse attention", mt_sparse_slots, mt_sparse_forward, mt_latent_attention_replay,
                                   mt_sparse_backward, false, offsetof(mt_layer, o)},
    [MT_MIXER_NONE] = {"none", mt_no_slots, NULL, NULL, NULL, false, 0},
};

static const mt_block_kind mt_feed_forward_kinds[] = {
    [MT_FEED_FORWARD_DENSE] = {"MLP", mt_mlp_slots, mt_mlp_forward, mt_mlp_replay, mt_mlp_backward, false,
                               offsetof(mt_layer, down)},
    [MT_FEED_FORWARD_EXPERTS] = {"experts", mt_experts_slots, mt_experts_forward, mt_experts_replay,
                                 mt_experts_backward, false, offsetof(mt_layer, down)},
    [MT_FEED_FORWARD_NONE] = {"none", mt_no_slots, NULL, NULL, NULL, false, 0},
};

/* A block of a layer: its kind, its parameters of norms, and the places of its values. */
typedef struct mt_block {
    const mt_block_kind *kind;
    const mt_norm *before, *after; // NULL: none
    const void *input;             // [R, C] the residual stream
    mt_normed normed;              // of `before`
    size_t x_field;                // offset in mt_activations of the operand of the kind
    void *out;                     // [R, C] of the kind, if a norm follows
    mt_normed out_normed;          // of `after`; y NULL
    int drop;                      // MT_DROP_*
} mt_block;

/* Offsets in mt_activations of the operands of the two blocks: of a norm's output, or of the residual stream. */
static size_t mt_mixer_x(const mt_model *m) {
    return mt_norms_before(m->options) ? offsetof(mt_activations, input_norm.y) : offsetof(mt_activations, input);
}
static size_t mt_feed_forward_x(const mt_model *m, const mt_layer *w) {
    if (mt_norms_before(m->options)) return offsetof(mt_activations, mlp_norm.y);
    return w->kind.mixer == MT_MIXER_NONE ? offsetof(mt_activations, input) : offsetof(mt_activations, middle);
}

static mt_block mt_mixer_block(const mt_model *m, const mt_layer *w, const mt_activations *a) {
    return (mt_block){.kind = &mt_mixer_kinds[w->kind.mixer],
                      .before = mt_norms_before(m->options) ? &w->input_norm : NULL,
                      .after = mt_norms_after(m->options) ? &w->attention_out_norm : NULL,
                      .input = a->input,
                      .normed = a->input_norm,
                      .x_field = mt_mixer_x(m),
                      .out = a->attention_out,
                      .out_normed = a->attention_out_norm,
                      .drop = MT_DROP_ATTENTION_OUT};
}

static mt_block mt_feed_forward_block(const mt_model *m, const mt_layer *w, const mt_activations *a) {
    return (mt_block){.kind = &mt_feed_forward_kinds[w->kind.feed_forward],
                      .before = mt_norms_before(m->options) ? &w->mlp_norm : NULL,
                      .after = mt_norms_after(m->options) ? &w->mlp_out_norm : NULL,
                      .input = w->kind.mixer == MT_MIXER_NONE ? a->input : a->middle,
                      .normed = a->mlp_norm,
                      .x_field = mt_feed_forward_x(m, w),
                      .out = a->mlp_out,
                      .out_normed = a->mlp_out_norm,
                      .drop = MT_DROP_MLP_OUT};
}

/* The blocks of a layer, in order; returns their number. */
static int mt_layer_blocks(const mt_model *m, const mt_layer *w, const mt_activations *a, mt_block blocks[2]) {
    int count = 0;
    if (w->kind.mixer != MT_MIXER_NONE) blocks[count++] = mt_mixer_block(m, w, a);
    if (w->kind.feed_forward != MT_FEED_FORWARD_NONE) blocks[count++] = mt_feed_forward_block(m, w, a);
    return count;
}

/* The norm of a layer's input. */
static mt_next_norm mt_first_norm(const mt_model *m, const mt_layer *w, const mt_activations *a) {
    bool is_mixer = w->kind.mixer != MT_MIXER_NONE;
    if (!mt_norms_before(m->options)) return (mt_next_norm){.layer = w};
    return (mt_next_norm){is_mixer ? &w->input_norm : &w->mlp_norm, is_mixer ? &a->input_norm : &a->mlp_norm, w};
}

/* The operand of the block's kind. */
static const void *mt_block_x(const mt_block *b) {
    return b->before ? b->normed.y : b->input;
}

/* ---- slots */

/* Slots of x^T of the linears in fp8. */
static void mt_transposed_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    bool has_q_latent = m->options->q_lora_rank > 0; // else latent and q_b read the same x
    bool up_again = m->recompute_modules & MT_MODULE_MLA_UP_PROJ, mlp_again = m->recompute_modules & MT_MODULE_MLP;
    bool normed = mt_norms_before(m->options); // else the residual stream, which others read too
    size_t x = mt_mixer_x(m), to = offsetof(mt_activations, x_transposed), step = sizeof(void *);
    mt_slot_add_transposed(m, s, x, &w->qkv, to, !normed);
    mt_slot_add_transposed(m, s, x, &w->gate, to + step, !normed);
    mt_slot_add_transposed(m, s, x, &w->delta_in, to, !normed || w->kind.mixer == MT_MIXER_KDA); // f_a, g_a read x
    mt_slot_add_transposed(m, s, x, &w->short_in, to, !normed);
    mt_slot_add_transposed(m, s, x, &w->mamba_in, to, !normed);
    bool has_indexer = mt_has_indexer_loss(m) && w->indexer_q.N > 0; // reads x and the latent of queries
    mt_slot_add_transposed(m, s, x, &w->latent, to, !normed || !has_q_latent || has_indexer);
    if (has_q_latent) x = offsetof(mt_activations, q_latent);
    mt_slot_add_transposed(m, s, x, &w->q_b, to + step, !has_q_latent || up_again || has_indexer);
    mt_slot_add_transposed(m, s, offsetof(mt_activations, kv_latent), &w->kv_b, to + 2 * step, up_again);
    size_t attended = w->kind.mixer == MT_MIXER_ATTENTION ? mt_attention_out_x(m) : offsetof(mt_activations, attended);
    mt_slot_add_transposed(m, s, attended, &w->o, to + 3 * step, true);
    mt_slot_add_transposed(m, s, mt_feed_forward_x(m, w), &w->fc1, to + 4 * step,
                           !normed || w->expert_bucket >= 0 || mlp_again);
    mt_slot_add_transposed(m, s, offsetof(mt_activations, mlp_active), &w->down, to + 5 * step, false);
}

/* The input of a layer. A recomputed unit keeps its first layer's input, or this rank's part of it. Without a norm
 * after the mixer, a split backward keeps dy of the mixer's last linear here: the norm before has read the input by
 * then. */
static void mt_input_slots(const mt_model *m, mt_slots *s, const mt_layer *w, size_t stash_of) {
    bool starts_unit = w && w->recomputed && w->index == w->recompute_unit,
         splits_input = m->options->distribute_saved_activations;
    mt_slot *input = MT_SLOT(s, input, m->max_rows, m->C, m->dtype), *kept = input;
    input->stash_of = stash_of, input->once = starts_unit && !splits_input;
    if (starts_unit && splits_input) kept = MT_SLOT(s, input_part, m->max_rows, m->C / m->grid->tensor.size, m->dtype);
    kept->once = starts_unit, kept->input = MT_OFFLOAD_ATTN_NORM;
}

/* The slots of a layer; w NULL: one list for all layers of this rank, if no layer saves anything. */
static void mt_layer_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    mt_layer_kind layer = w ? w->kind : mt_layer_kind_of(m->options, 0);
    const mt_block_kind *mixer = &mt_mixer_kinds[layer.mixer];
    const mt_block_kind *feed_forward = &mt_feed_forward_kinds[layer.feed_forward];
    bool before = mt_norms_before(m->options), after = mt_norms_after(m->options);
    bool is_mlp = layer.feed_forward == MT_FEED_FORWARD_DENSE;
    bool has_mixer = !w || layer.mixer != MT_MIXER_NONE, has_mlp = !w || layer.feed_forward != MT_FEED_FORWARD_NONE;
    s->count = 0;
    mt_input_slots(m, s, w, after ? 0 : has_mixer ? mixer->last : feed_forward->last);
    if (before && has_mixer)
        mt_norm_slots(s, m, "input_norm", offsetof(mt_activations, input_norm), MT_OFFLOAD_QKV_LINEAR,
                      w ? &w->input_norm : NULL);
    mixer->slots(m, s, w);
    if (after && has_mixer) {
        MT_SLOT(s, attention_out, m->max_rows, m->C, m->dtype)->stash_of = mixer->last;
        mt_norm_statistics_slots(s, m, "attention_out_norm", offsetof(mt_activations, attention_out_norm));
    }
    if (has_mixer && has_mlp) {
        mt_slot *middle = MT_SLOT(s, middle, m->max_rows, m->C, m->dtype);
        middle->stash_of = after ? 0 : feed_forward->last, middle->input = MT_OFFLOAD_MLP_NORM;
    }
    if (before && has_mlp)
        mt_norm_slots(s, m, "mlp_norm", offsetof(mt_activations, mlp_norm), is_mlp ? MT_OFFLOAD_MLP : 0,
                      w ? &w->mlp_norm : NULL);
    feed_forward->slots(m, s, w);
    for (int64_t i = 1; !w && i < m->options->num_layers; i++) { // the list is of layers of other kinds too
        mt_layer_kind other = mt_layer_kind_of(m->options, i);
        mt_mixer_kinds[other.mixer].slots(m, s, w);
        mt_feed_forward_kinds[other.feed_forward].slots(m, s, w);
    }
    if (after && has_mlp) {
        MT_SLOT(s, mlp_out, m->max_rows, m->C, m->dtype)->stash_of = feed_forward->last;
        mt_norm_statistics_slots(s, m, "mlp_out_norm", offsetof(mt_activations, mlp_out_norm));
    }
    if (m->fp8 && w) mt_transposed_slots(m, s, w);
    mt_slots_place(m, s, w);
}

/* ---- blocks */

/* The place of a result [R, C], and the layer whose input it is, with its saved values; reader NULL: of none. out NULL:
 * only the values that the backward reads are computed. */
typedef struct mt_layer_result {
    void *out;
    const mt_layer *reader;
    const mt_activations *reader_values;
} mt_layer_result;

/* result = input + dropout(after(kind(x))), and the next norm, if any. */
static void mt_block_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const mt_block *b,
                             mt_layer_result result, mt_next_norm next) {
    void *sum = m->scratch.block_out, *out = b->after ? b->out : result.out ? sum : NULL;
    b->kind->forward(m, p, w, a, mt_block_x(b), out);
    if (b->after) {
        mt_normed normed = b->out_normed;
        normed.y = sum;
        mt_norm_forward(m, p, b->after, &normed, out);
    }
    if (!result.out) return;
    mt_scale(m, p, sum, m->options->residual_multiplier);
    if (result.reader) mt_offload_claim(m, p, result.reader, result.reader_values);
    if (next.layer) mt_bucket_acquire(m, next.layer->bucket);
    mt_residual_forward(m, p, result.out, b->input, sum, w->number, b->drop, next);
}

/* Selective recomputation. */
static void mt_block_replay(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const mt_block *b) {
    if (b->before && m->recompute_modules & MT_MODULE_LAYERNORM) mt_norm_forward(m, p, b->before, &b->normed, b->input);
    if (b->kind->replay) b->kind->replay(m, p, w, a, mt_block_x(b));
}

/* d.dx, the gradient of the block's input, from d.dout, that of its output. They may be the same, but not in a split
 * backward: dout is dy of the block's last linear, which is deferred at the end. */
static void mt_block_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a, const mt_block *b,
                              mt_block_gradients d) {
    mt_layer_scratch *s = &m->scratch;
    const void *dout = mt_residual_backward(m, p, d.dout, s->block_out, w->number, b->drop);
    if (m->options->residual_multiplier != 1) {
        if (dout != s->block_out)
            m->ops->memory_copy(s->block_out, dout, p->rows * m->C * mt_dtype_size(m->dtype), p->stream);
        mt_scale(m, p, s->block_out, m->options->residual_multiplier);
        dout = s->block_out;
    }
    mt_block_gradients inner = {
        .x = mt_block_x(b), .x_field = b->x_field, .gathered = d.gathered, .dx = s->dnormed, .left = d.left};
    if (b->after) {
        mt_norm_backward(m, p, b->after, &b->out_normed, s->dout, NULL, dout, b->out);
        dout = s->dout;
    }
    inner.dout = dout;
    mt_deferred last = b->kind->backward(m, p, w, a, &inner);
    if (b->before)
        mt_norm_backward(m, p, b->before, &b->normed, d.dx, d.dout, inner.dx, b->input);
    else
        m->ops->add(d.dx, d.dout, inner.dx, p->rows * m->C, m->dtype, p->stream);
    if (last.linear) mt_defer_weight(m, p, w, a, last.linear, last.x, last.dy);
}

/* ---- the blocks of a layer */

/* The result of the layer, from the input and its norm, which are in `a`; and the next norm, if any. */
static void mt_layer_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                             mt_layer_result result, mt_next_norm next) {
    mt_block blocks[2];
    int count = mt_layer_blocks(m, w, a, blocks);
    mt_next_norm between = {.w = blocks[count - 1].before, .n = &a->mlp_norm};
    if (count > 1) mt_block_forward(m, p, w, a, &blocks[0], (mt_layer_result){.out = a->middle}, between);
    mt_block_forward(m, p, w, a, &blocks[count - 1], result, next);
    mt_offload_store(m, p, w, a);
}

/* True if layer w may gather the gradient for the experts of the layer below: nothing is computed before the gather,
 * and w's mixer can leave its first weight's gradient until then. */
static bool mt_gathers_ahead(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_layer *below) {
    bool gathers = below->expert_bucket >= 0 && m->experts->dispatcher->gathers;
    bool replays = m->recompute_modules || below->recomputed, whole = p->halves == MT_BACKWARD_BOTH && !m->fp8;
    bool leaves = mt_mixer_kinds[w->kind.mixer].may_leave_weight && !mt_norms_after(m->options) &&
                  !m->options->attention_output_gate;
    bool at_once =
        below->F == 0 && m->options->hidden_dropout == 0 && m->grid->tensor.size == 1 && !mt_has_latent_experts(m);
    return gathers && at_once && !replays && whole && leaves;
}

/* dresidual[R, C]: the gradient of the layer's output in, that of its input out. The values of modules that are
 * recomputed are in the layer's buffer, or else computed again. gathered: the layer above has gathered dresidual for
 * the experts. With `ahead` that is done here for the layer below, beside the gradient of the mixer's first weight. */
static void mt_layer_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a, void *dresidual,
                              bool gathered, bool ahead) {
    mt_block blocks[2];
    int count = mt_layer_blocks(m, w, a, blocks);
    bool splits = p->halves != MT_BACKWARD_BOTH, replays = m->recompute_modules && m->recomputed != a;
    void *dmiddle = splits ? m->scratch.dmiddle : dresidual;
    mt_pass replay = *p;
    mt_deferred left;
    replay.replay = true;
    for (int i = count - 1; i >= 0; i--) {
        bool last = i + 1 == count, apart = splits && count == 1; // apart: dx is not dout, see mt_block_backward
        mt_block_gradients d = {.dout = last ? dresidual : dmiddle, .gathered = last && gathered};
        d.dx = i > 0 || apart ? dmiddle : dresidual, d.left = i == 0 && ahead ? &left : NULL;
        if (replays) mt_block_replay(m, &replay, w, a, &blocks[i]);
        if (replays && i == 0) m->recomputed = a;
        mt_block_backward(m, p, w, a, &blocks[i], d);
    }
    if (splits && count == 1)
        m->ops->memory_copy(dresidual, dmiddle, p->rows * m->C * mt_dtype_size(m->dtype), p->stream);
    if (!ahead) return;
    mt_dispatch_gather(m, p, dresidual);
    mt_linear_backward_weight(mt_linears(p), left.linear, &(mt_linear_io){.x = left.x, .dy = left.dy});
}

/* ==== §9h context parallelism ===================================================================================== */
/* The tokens of a micro-batch are distributed over ranks, wherever its sequences begin and end: they are cut into 2 cp
 * chunks, and rank r owns chunks r and 2 cp - 1 - r. All ranks own equally many tokens, and the chunks are chosen so
 * that their queries see about equally many keys. Only attention needs rows of other ranks; --cp-comm-type selects one
 * of four ways to get them, built from two levels. Within the a2a group, ranks exchange tokens for heads: each gets all
 * tokens of the group and a share of the heads. Across the ring group, keys and values pass from rank to rank (p2p) or
 * are gathered (all_gather). The chunks are those of the ring; the adjacent ranks of an a2a group share the tokens of
 * their two chunks in equal consecutive parts. Invariants: local rows are in order of position; partial sums are fp32
 * and are added in a fixed order; the backward communicates again, so no more is saved than on one rank. */

/* Keys that the queries of tokens [begin, end) of a batch see; spans are adjacent causal sequences. */
static int64_t mt_keys_seen(const mt_batch *batch, int64_t begin, int64_t end, int64_t window) {
    int64_t keys = 0;
    for (int64_t s = 0; s < batch->num_spans; s++) {
        int64_t start = batch->spans[s].q_start, length = batch->spans[s].q_len, edges[2] = {begin, end};
        for (int e = 0; e < 2; e++) {
            int64_t n = mt_min(mt_max(edges[e] - start, 0), length);
            int64_t full = window > 0 ? mt_min(n, window) : n; // queries that see all keys before them
            int64_t before = full * (full + 1) / 2 + (n - full) * window;
            keys += e == 0 ? -before : before;
        }
    }
    return keys;
}

/* The span of token t, searched from span s on. */
static int64_t mt_span_of_token(const mt_batch *batch, int64_t s, int64_t t) {
    while (t >= batch->spans[s].q_start + batch->spans[s].q_len) s++;
    return s;
}

/* Tokens to the next place where a cut may be best: each of `most` adds `slope` to its error, and of equal errors that
 * nearest to the middle counts. */
static int64_t mt_cut_steps(int64_t error, int64_t slope, int64_t most, int64_t to_middle) {
    if (slope == 0) return to_middle > 0 ? mt_min(to_middle, most) : most;
    return (error < 0) == (slope < 0) ? most : mt_max(mt_min(-error / slope, most), 1);
}

/* Sequences a of 11 tokens and b of 13 on two ranks of 12 tokens. The queries of rank 0 see 79 keys, of rank 1 78:
 *
 *   sequence   a a a a a a a a a a a b b b b b b b b b b b b b
 *   chunk      0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2 3
 *   rank       0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1 0 */
void mt_context_cut(int64_t *cuts, const mt_batch *whole, int64_t ranks, int64_t window) {
    const mt_span *spans = whole->spans;
    int64_t begin = 0, end = whole->num_tokens, T = end / ranks, keys = mt_keys_seen(whole, 0, end, window);
    MT_CHECK(end % ranks == 0);
    cuts[0] = begin, cuts[2 * ranks] = end;
    for (int64_t r = 0; r < ranks; r++) { // the rank owns tokens at both ends of [begin, end): `left` and T - left
        int64_t mine = mt_keys_seen(whole, end - T, end, window), best = 0, chosen = 0, left = 0, least = INT64_MAX;
        int64_t first = mt_span_of_token(whole, 0, begin), last = mt_span_of_token(whole, first, end - T);
        for (;;) {
            int64_t over = mine * (ranks - r) - keys, from_middle = 2 * left > T ? 2 * left - T : T - 2 * left;
            int64_t error = over < 0 ? -over : over;
            if (error < least || (error == least && from_middle < (2 * best > T ? 2 * best - T : T - 2 * best)))
                least = error, best = left, chosen = mine;
            if (left == T) break;
            first = mt_span_of_token(whole, first, begin + left), last = mt_span_of_token(whole, last, end - T + left);
            int64_t gained = begin + left - spans[first].q_start + 1, lost = end - T + left - spans[last].q_start + 1;
            int64_t more = window > 0 ? mt_min(gained, window) - mt_min(lost, window) : gained - lost, steps = 1;
            int64_t ends = mt_min(spans[first].q_len - gained, spans[last].q_len - lost) + 1;
            if (window == 0) steps = mt_cut_steps(over, more * (ranks - r), mt_min(ends, T - left), T / 2 - left);
            mine += steps * more, left += steps;
        }
        begin += best, end -= T - best, keys -= chosen;
        cuts[r + 1] = begin, cuts[2 * ranks - 1 - r] = end;
    }
}

void mt_context_tokens(int32_t *tokens, const int64_t *cuts, int64_t ranks, int64_t rank) {
    int64_t owned[2] = {rank, 2 * ranks - 1 - rank};
    for (int half = 0; half < 2; half++)
        for (int64_t t = cuts[owned[half]]; t < cuts[owned[half] + 1]; t++) *tokens++ = (int32_t)t;
}

void mt_batch_take(mt_batch *part, const mt_batch *whole, const int32_t *token_of_row, int64_t T) {
    int64_t s = 0, of_span = -1;
    part->num_tokens = T, part->num_spans = 0;
    for (int64_t t = 0; t < T; t++) {
        int64_t from = token_of_row[t];
        part->tokens[t] = whole->tokens[from], part->labels[t] = whole->labels[from];
        part->loss_mask[t] = whole->loss_mask[from], part->positions[t] = whole->positions[from];
        part->token_index[t] = whole->token_index[from];
        s = mt_span_of_token(whole, s, from);
        if (s != of_span) part->spans[part->num_spans++] = (mt_span){.q_start = t, .k_start = t, .causal = true};
        of_span = s;
        part->spans[part->num_spans - 1].q_len = ++part->spans[part->num_spans - 1].k_len;
    }
}

/* Checks that the spans, which cover the batch, are adjacent whole causal sequences, and that the tokens divide. */
static int mt_batch_check_context(const mt_batch *batch, int64_t cp, mt_error *error) {
    int64_t end = 0;
    for (int64_t s = 0; s < batch->num_spans; s++) {
        const mt_span *span = &batch->spans[s];
        if (!span->causal || span->q_start != end || span->k_start != end || span->q_len != span->k_len)
            return mt_error_set(error,
                                "sequence %lld of the micro-batch is not a whole causal sequence adjacent to the "
                                "previous one; --context-parallel-size %lld cannot distribute it",
                                (long long)s, (long long)cp);
        end += span->q_len;
    }
    if (end % cp == 0) return 0;
    return mt_error_set(error, "%lld tokens do not divide by --context-parallel-size %lld; pad them (mt_batch_pad)",
                        (long long)end, (long long)cp);
}

/* One shift of the ring: a buffer is sent to the next rank while another arrives from the previous rank. */
typedef struct mt_ring_shift {
    mt_channel *to, *from;
} mt_ring_shift;

/* A piece of this rank: adjacent tokens, as many as there are between two cuts. */
typedef struct mt_piece {
    int64_t begin, end;      // in the whole micro-batch; they may be equal
    int before, after;       // ranks of the group with the adjacent pieces; -1: none
    bool continues, goes_on; // a sequence reaches over its begin, and over its end
} mt_piece;

/* Recurrences in context parallelism. With p2p and all_gather a rank has a piece on the way up the ranks of the ring
 * and one on the way down (the last rank has one, of both chunks), with a2a one piece. A group of both is refused. */
typedef struct mt_piece_list {
    const mt_group *group;
    int64_t count;
    mt_piece pieces[MT_PIECES];
    int64_t first[MT_PIECES], last[MT_PIECES]; // see mt_states
    mt_span *device, *host;                    // [max_tokens] pieces of sequences, a span each
    mt_spans spans;
    struct {
        mt_channel *to, *from;
    } lower, higher; // the ranks rank - 1 and rank + 1 of the group
} mt_piece_list;

struct mt_context {
    mt_context_plan plan;
    const mt_ops *ops;
    /* the micro-batch */
    int64_t T, M, N;       // rows of this rank, of its a2a group, of the whole batch
    int32_t *identity;     // 0, 1, 2, ...: see mt_context_copied_rows
    int32_t *token_of_row; // all_gather: [N] of received rows
    int64_t *index;        // token_index: [ring ranks, M]; with all_gather [N] in order of position
    int64_t *lengths;      // all_gather: [spans] tokens of a span's whole sequence
    mt_span *spans;        // the lists on the device, one after another
    mt_spans *lists;       // [ring ranks] spans of this rank's queries and a rank's keys; all_gather: one, of all keys
    int64_t *cuts;         // [2 ring ranks + 1]: see mt_context_cut
    int32_t *host_token_of_row; // [N]
    int64_t *host_index, *host_lengths;
    mt_span *host_spans;
    /* a2a: one operand [T, widest] by head; operands with all rows of the group and a share of the heads */
    void *by_head, *q, *k, *v, *out, *dout, *dq, *dk, *dv;
    /* ring: current and next keys and values [M, G (D + Dv)]; results of one block; sums */
    void *kv[2], *part, *dkv_part;
    float *part_lse, *sum, *dkv_sum[2];
    mt_ring_shift kv_shift, sum_shift;
    /* all_gather: keys and values of all ranks, ordered by rank and by position; gradients */
    void *gathered, *ordered, *dkv_ordered;
    float *wide;
    mt_piece_list pieces; // with plan.recurs
};

/* ---- memory */

static void mt_context_plan_ring(mt_context *c, mt_arena *arena) {
    const mt_context_plan *p = &c->plan;
    int64_t size = mt_dtype_size(p->dtype), heads = p->num_heads / p->a2a->size, M = c->M;
    int64_t kv = p->num_groups / p->a2a->size * (p->head_size + p->value_size); // a packed row
    int64_t widest = heads * mt_max(p->head_size, p->value_size);
    c->kv[0] = mt_arena_alloc(arena, M * kv * size);
    if (p->comm_type == MT_CP_ALL_GATHER) {
        c->gathered = mt_arena_alloc(arena, c->N * kv * size), c->ordered = mt_arena_alloc(arena, c->N * kv * size);
        if (!p->train) return;
        c->dkv_ordered = mt_arena_alloc(arena, c->N * kv * size);
        if (p->dtype != MT_F32) c->wide = mt_arena_alloc(arena, c->N * kv * 4);
    } else {
        c->kv[1] = mt_arena_alloc(arena, M * kv * size), c->part = mt_arena_alloc(arena, M * widest * size);
        c->part_lse = mt_arena_alloc(arena, M * heads * 4), c->sum = mt_arena_alloc(arena, M * widest * 4);
        if (!p->train) return;
        c->dkv_sum[1] = mt_arena_alloc(arena, M * kv * 4);
    }
    c->dkv_sum[0] = mt_arena_alloc(arena, M * kv * 4), c->dkv_part = mt_arena_alloc(arena, M * kv * size);
}

static void mt_context_plan_a2a(mt_context *c, mt_arena *arena) {
    const mt_context_plan *p = &c->plan;
    int64_t size = mt_dtype_size(p->dtype), T = p->max_tokens; // M rows of 1 / A of the heads are T rows of all
    int64_t D = p->head_size, Dv = p->value_size, H = p->num_heads, G = p->num_groups;
    c->by_head = mt_arena_alloc(arena, T * H * mt_max(D, Dv) * size), c->q = mt_arena_alloc(arena, T * H * D * size);
    c->k = mt_arena_alloc(arena, T * G * D * size), c->v = mt_arena_alloc(arena, T * G * Dv * size);
    c->out = mt_arena_alloc(arena, T * H * Dv * size);
    if (!p->train) return;
    c->dout = mt_arena_alloc(arena, T * H * Dv * size), c->dq = mt_arena_alloc(arena, T * H * D * size);
    c->dk = mt_arena_alloc(arena, T * G * D * size), c->dv = mt_arena_alloc(arena, T * G * Dv * size);
}

/* Lists of spans, each with at most one span for each of the M queries. */
static int64_t mt_context_num_lists(const mt_context_plan *plan) {
    return plan->comm_type == MT_CP_ALL_GATHER ? 1 : plan->ring->size;
}

/* Rows of the longest copy. Contexts that share memory for batches of 1, 2, 4 ... ranks have this number in common. */
static int64_t mt_context_copied_rows(const mt_context_plan *plan) {
    return plan->max_tokens * (plan->ring->size > 1 ? plan->a2a->size : 1);
}

static void mt_context_plan_memory(mt_context *c, mt_arena *arena) {
    c->M = c->plan.max_tokens * c->plan.a2a->size, c->N = c->M * c->plan.ring->size;
    c->identity = mt_arena_alloc(arena, mt_context_copied_rows(&c->plan) * 4);
    if (c->plan.comm_type == MT_CP_ALL_GATHER) {
        c->token_of_row = mt_arena_alloc(arena, c->N * 4);
        c->lengths = mt_arena_alloc(arena, c->M * 8);
    }
    c->index = mt_arena_alloc(arena, c->N * 8);
    c->spans = mt_arena_alloc(arena, mt_context_num_lists(&c->plan) * c->M * (int64_t)sizeof(mt_span));
    if (c->plan.recurs) c->pieces.device = mt_arena_alloc(arena, c->plan.max_tokens * (int64_t)sizeof(mt_span));
    if (c->plan.ring->size > 1) mt_context_plan_ring(c, arena);
    if (c->plan.a2a->size > 1) mt_context_plan_a2a(c, arena);
}

int64_t mt_context_bytes(const mt_context_plan *plan) {
    mt_context context = {.plan = *plan};
    mt_arena counting = {0};
    mt_context_plan_memory(&context, &counting);
    return counting.used;
}

/* All ranks of the ring open all channels in the same order; each rank keeps the two that it uses. */
static void mt_context_open_ring(mt_context *c) {
    const mt_group *ring = c->plan.ring;
    mt_ring_shift *shifts[] = {&c->kv_shift, &c->sum_shift};
    for (int id = 0; id < 2 && ring->size > 1 && c->plan.comm_type != MT_CP_ALL_GATHER; id++)
        for (int from = 0; from < ring->size; from++) {
            int to = (from + 1) % ring->size;
            mt_channel *channel = c->ops->channel_open(ring, from, to, id);
            if (from == ring->rank) shifts[id]->to = channel;
            if (to == ring->rank) shifts[id]->from = channel;
        }
}

/* Channels between ranks r and r + 1, both ways; opened as those of the ring. */
static void mt_context_open_pieces(mt_context *c) {
    mt_piece_list *p = &c->pieces;
    if (!c->plan.recurs) return;
    MT_CHECK(c->plan.ring->size == 1 || c->plan.a2a->size == 1);
    p->group = c->plan.ring->size > 1 ? c->plan.ring : c->plan.a2a;
    p->host = mt_malloc(c->plan.max_tokens * (int64_t)sizeof(mt_span));
    for (int up = 0; up < 2; up++)
        for (int from = !up; from < p->group->size - up; from++) {
            int to = up ? from + 1 : from - 1, rank = p->group->rank;
            mt_channel *channel = c->ops->channel_open(p->group, from, to, 2 + up);
            if (from == rank) *(up ? &p->higher.to : &p->lower.to) = channel;
            if (to == rank) *(up ? &p->lower.from : &p->higher.from) = channel;
        }
}

mt_context *mt_context_create(const mt_context_plan *plan, const mt_ops *ops, void *memory, mt_stream *stream) {
    mt_context *c = mt_calloc(sizeof *c);
    int64_t heads = plan->num_heads, groups = plan->num_groups, A = plan->a2a->size;
    MT_CHECK(heads % A == 0 && groups % A == 0);
    c->plan = *plan, c->ops = ops;
    mt_arena arena = {.base = memory, .capacity = mt_context_bytes(plan)};
    mt_context_plan_memory(c, &arena);
    c->host_token_of_row = mt_malloc(c->N * 4), c->host_index = mt_malloc(c->N * 8);
    c->host_spans = mt_malloc(mt_context_num_lists(plan) * c->M * (int64_t)sizeof(mt_span));
    c->lists = mt_calloc(mt_context_num_lists(plan) * (int64_t)sizeof(mt_spans)), c->host_lengths = mt_malloc(c->M * 8);
    c->cuts = mt_malloc((2 * plan->ring->size + 1) * 8);
    for (int64_t i = 0; i < c->M; i++) c->host_token_of_row[i] = (int32_t)i;
    ops->memory_copy(c->identity, c->host_token_of_row, mt_context_copied_rows(plan) * 4, stream);
    ops->stream_synchronize(stream);
    mt_context_open_ring(c);
    mt_context_open_pieces(c);
    return c;
}

void mt_context_destroy(mt_context *c) {
    if (!c) return;
    const mt_piece_list *p = &c->pieces;
    mt_channel *channels[] = {c->kv_shift.to, c->kv_shift.from, c->sum_shift.to, c->sum_shift.from,
                              p->lower.to,    p->lower.from,    p->higher.to,    p->higher.from};
    mt_channels_close(c->ops, channels, 8);
    free(c->pieces.host);
    free(c->host_token_of_row);
    free(c->host_index);
    free(c->host_spans);
    free(c->lists);
    free(c->host_lengths);
    free(c->cuts);
    free(c);
}

/* ---- the micro-batch: spans, and positions of rows */

/* Rows of a sequence on a rank: local rows [start, start + low + high), the first `low` of them in its first chunk.
 * They are contiguous, because a sequence with rows in both chunks fills everything between them. */
typedef struct mt_context_part {
    int64_t start, low, high;
} mt_context_part;

/* The part of tokens [begin, end) that rank `rank` owns. */
static mt_context_part mt_context_part_of(const int64_t *cuts, int64_t ranks, int64_t rank, int64_t begin,
                                          int64_t end) {
    const int64_t *low = &cuts[rank], *high = &cuts[2 * ranks - 1 - rank];
    int64_t first = mt_max(begin, low[0]), second = mt_max(begin, high[0]);
    mt_context_part part = {.low = mt_max(0, mt_min(end, low[1]) - first)};
    part.high = mt_max(0, mt_min(end, high[1]) - second);
    part.start = part.low > 0 ? first - low[0] : low[1] - low[0] + second - high[0];
    return part;
}

int64_t mt_ring_spans(mt_span *spans, const mt_batch *whole, const int64_t *cuts, int64_t ranks, int64_t rank,
                      int64_t source) {
    int64_t count = 0;
    for (int64_t s = 0; s < whole->num_spans; s++) {
        int64_t begin = whole->spans[s].q_start, end = begin + whole->spans[s].q_len;
        mt_context_part q = mt_context_part_of(cuts, ranks, rank, begin, end);
        mt_context_part k = mt_context_part_of(cuts, ranks, source, begin, end);
        if (source > rank) q.start += q.low, q.low = 0; // both of the source's chunks lie between this rank's chunks
        if (source < rank) k.high = 0;
        mt_span span = {q.start, q.low + q.high, k.start, k.low + k.high, source == rank};
        if (span.q_len > 0 && span.k_len > 0) spans[count++] = span;
    }
    return count;
}

/* all_gather: the queries of a sequence in one of the rank's chunks attend to all keys up to the last of them. lengths:
 * of the whole sequences. */
static int64_t mt_context_gather_spans(mt_span *spans, int64_t *lengths, const mt_batch *whole, const int64_t *cuts,
                                       int64_t ranks, int64_t rank) {
    const int64_t *chunks[2] = {&cuts[rank], &cuts[2 * ranks - 1 - rank]};
    int64_t count = 0, row = 0;
    for (int half = 0; half < 2; half++)
        for (int64_t s = 0; s < whole->num_spans; s++) {
            int64_t begin = whole->spans[s].q_start, end = mt_min(begin + whole->spans[s].q_len, chunks[half][1]);
            int64_t queries = end - mt_max(begin, chunks[half][0]);
            if (queries <= 0) continue;
            lengths[count] = whole->spans[s].q_len;
            spans[count++] = (mt_span){row, queries, begin, end - begin, true};
            row += queries;
        }
    return count;
}

/* Builds the lists of spans of a micro-batch. */
static void mt_context_list_spans(mt_context *c, const mt_batch *whole, mt_stream *stream) {
    int64_t P = c->plan.ring->size, rank = c->plan.ring->rank, count = 0;
    bool gather = c->plan.comm_type == MT_CP_ALL_GATHER;
    for (int64_t list = 0; list < mt_context_num_lists(&c->plan); list++) {
        mt_span *host = c->host_spans + count;
        c->lists[list] = (mt_spans){.host = host, .device = c->spans + count};
        c->lists[list].count = gather ? mt_context_gather_spans(host, c->host_lengths, whole, c->cuts, P, rank)
                                      : mt_ring_spans(host, whole, c->cuts, P, rank, list);
        count += c->lists[list].count;
    }
    c->ops->memory_copy(c->spans, c->host_spans, count * (int64_t)sizeof(mt_span), stream);
    if (gather) c->ops->memory_copy(c->lengths, c->host_lengths, count * 8, stream);
}

void mt_context_shard(const mt_context *c, mt_batch *local, const mt_batch *whole, int32_t *sequence) {
    int64_t P = c->plan.ring->size, T = whole->num_tokens / P / c->plan.a2a->size;
    MT_CHECK(T <= c->plan.max_tokens && T * P * c->plan.a2a->size == whole->num_tokens);
    mt_context_cut(c->cuts, whole, P, c->plan.window);
    mt_context_tokens(c->host_token_of_row, c->cuts, P, c->plan.ring->rank);
    const int32_t *token_of_row = c->host_token_of_row + c->plan.a2a->rank * T;
    mt_batch_take(local, whole, token_of_row, T);
    for (int64_t t = 0, s = 0; sequence && t < T; t++)
        sequence[t] = (int32_t)(s = mt_span_of_token(whole, s, token_of_row[t]));
}

/* True if a sequence has tokens on both sides of place `at`. */
static bool mt_context_inside(const mt_batch *whole, int64_t at) {
    if (at <= 0 || at >= whole->num_tokens) return false;
    return whole->spans[mt_span_of_token(whole, 0, at)].q_start < at;
}

/* The pieces of this rank, in order of position. */
static void mt_context_cut_pieces(mt_context *c, const mt_batch *whole) {
    mt_piece_list *p = &c->pieces;
    int ranks = p->group->size, r = p->group->rank;
    p->count = 1;
    if (c->plan.ring->size == 1) {
        p->pieces[0] = (mt_piece){.begin = r * c->T, .end = (r + 1) * c->T, .before = r - 1, .after = r + 1};
        if (r + 1 == ranks) p->pieces[0].after = -1;
    } else if (r + 1 == ranks) {
        p->pieces[0] = (mt_piece){.begin = c->cuts[r], .end = c->cuts[r + 2], .before = r - 1, .after = r - 1};
    } else {
        const int64_t *down = &c->cuts[2 * ranks - 1 - r];
        p->count = 2;
        p->pieces[0] = (mt_piece){.begin = c->cuts[r], .end = c->cuts[r + 1], .before = r - 1, .after = r + 1};
        p->pieces[1] = (mt_piece){.begin = down[0], .end = down[1], .before = r + 1, .after = r - 1};
    }
    for (mt_piece *piece = p->pieces; piece < p->pieces + p->count; piece++) {
        piece->continues = mt_context_inside(whole, piece->begin);
        piece->goes_on = mt_context_inside(whole, piece->end);
    }
}

/* Lists the spans of the pieces, and finds the spans whose sequence crosses the border of a piece. */
static void mt_context_list_pieces(mt_context *c, const mt_batch *whole, mt_stream *stream) {
    mt_piece_list *p = &c->pieces;
    int64_t count = 0, row = 0;
    if (!c->plan.recurs) return;
    mt_context_cut_pieces(c, whole);
    for (int64_t slot = 0; slot < MT_PIECES; slot++) {
        const mt_piece *piece = &p->pieces[slot];
        int64_t begun = count;
        p->first[slot] = p->last[slot] = -1;
        if (slot >= p->count) continue;
        for (int64_t s = 0; s < whole->num_spans; s++) {
            const mt_span *sequence = &whole->spans[s];
            int64_t begin = mt_max(sequence->q_start, piece->begin);
            int64_t tokens = mt_min(sequence->q_start + sequence->q_len, piece->end) - begin;
            if (tokens <= 0) continue;
            p->host[count++] = (mt_span){row, tokens, row, tokens, true};
            row += tokens;
        }
        if (count == begun) continue;
        if (piece->continues) p->first[slot] = begun;
        if (piece->goes_on) p->last[slot] = count - 1;
    }
    p->spans = (mt_spans){.host = p->host, .device = p->device, .count = count};
    c->ops->memory_copy(p->device, p->host, count * (int64_t)sizeof(mt_span), stream);
}

void mt_context_load(mt_context *c, const mt_batch *whole, mt_stream *stream) {
    int64_t P = c->plan.ring->size;
    bool gather = c->plan.comm_type == MT_CP_ALL_GATHER;
    c->N = whole->num_tokens, c->M = c->N / P, c->T = c->M / c->plan.a2a->size;
    MT_CHECK(c->T <= c->plan.max_tokens && c->T * c->plan.a2a->size * P == c->N);
    mt_context_cut(c->cuts, whole, P, c->plan.window);
    for (int64_t rank = 0; rank < P; rank++) mt_context_tokens(c->host_token_of_row + rank * c->M, c->cuts, P, rank);
    for (int64_t i = 0; i < c->N; i++) c->host_index[i] = whole->token_index[gather ? i : c->host_token_of_row[i]];
    c->ops->memory_copy(c->index, c->host_index, c->N * 8, stream);
    mt_context_list_spans(c, whole, stream);
    mt_context_list_pieces(c, whole, stream);
    if (gather) c->ops->memory_copy(c->token_of_row, c->host_token_of_row, c->N * 4, stream);
}

/* to[t] = from[t] for rows of `width` elements. */
static void mt_context_copy_rows(const mt_context *c, void *to, int64_t to_stride, const void *from,
                                 int64_t from_stride, int64_t rows, int64_t width, mt_stream *stream) {
    c->ops->gather_rows(&(mt_row_args){rows, width, c->identity, .from = from, .to = to, .from_stride = from_stride,
                                       .to_stride = to_stride},
                        c->plan.dtype, stream);
}

/* Packs keys and values of this rank into kv[0]: [M, G D + G Dv]. */
static void mt_context_pack_kv(const mt_context *c, const mt_attention *call, mt_stream *stream) {
    int64_t k_width = call->num_groups * call->head_size, v_width = call->num_groups * call->value_size;
    int64_t kv = k_width + v_width;
    mt_context_copy_rows(c, c->kv[0], kv, call->k, call->k_stride, c->M, k_width, stream);
    mt_context_copy_rows(c, mt_at(c->kv[0], k_width, c->plan.dtype), kv, call->v, call->v_stride, c->M, v_width,
                         stream);
}

/* Writes the summed gradients of this rank's keys and values to call->dk and call->dv. */
static void mt_context_store_dkv(const mt_context *c, const mt_attention *call, const float *sum, mt_stream *stream) {
    int64_t k_width = call->num_groups * call->head_size, v_width = call->num_groups * call->value_size;
    int64_t kv = k_width + v_width;
    const void *rounded = sum;
    if (c->plan.dtype != MT_F32) {
        c->ops->convert(c->dkv_part, c->plan.dtype, sum, MT_F32, c->M * kv, stream);
        rounded = c->dkv_part;
    }
    mt_context_copy_rows(c, call->dk, call->k_stride, rounded, kv, c->M, k_width, stream);
    mt_context_copy_rows(c, call->dv, call->v_stride, mt_at(rounded, k_width, c->plan.dtype), kv, c->M, v_width,
                         stream);
}

/* ---- p2p: ring attention (Liu et al., "Ring attention with blockwise transformers"; zig-zag from Zhu's
 * ring-flash-attention). In step i rank r holds the keys and values of rank r - i; the next ones arrive during the
 * computation. */

static void mt_ring_shift_begin(const mt_context *c, const mt_ring_shift *shift, void *coming, void *going,
                                int64_t count, mt_dtype dtype, mt_stream *stream) {
    mt_channel_start(c->ops, shift->from, coming, count, dtype, stream);
    mt_channel_start(c->ops, shift->to, going, count, dtype, stream);
}

/* Waits for both transfers: the caller may reuse both buffers. */
static void mt_ring_shift_end(const mt_context *c, const mt_ring_shift *shift, mt_stream *stream) {
    mt_channel_finish(c->ops, shift->from, stream);
    mt_channel_finish(c->ops, shift->to, stream);
}

/* The attention call of ring step i: its spans, with keys and values in kv[i % 2]. */
static mt_attention mt_ring_step(const mt_context *c, int64_t i, const mt_attention *call) {
    int64_t P = c->plan.ring->size, r = c->plan.ring->rank, source = (r + P - i) % P;
    mt_attention step = *call;
    step.k = c->kv[i % 2], step.v = mt_at(step.k, call->num_groups * call->head_size, c->plan.dtype);
    step.k_stride = step.v_stride = call->num_groups * (call->head_size + call->value_size);
    step.k_index = c->index + source * c->M, step.q_index = c->index + r * c->M, step.spans = c->lists[source];
    return step;
}

static void mt_ring_forward(mt_context *c, const mt_attention *call, mt_stream *stream) {
    mt_dtype dtype = c->plan.dtype;
    int64_t P = c->plan.ring->size, H = call->num_heads, Dv = call->value_size;
    float *sum = dtype == MT_F32 ? call->out : c->sum;
    MT_CHECK(call->window == 0 && call->out_stride == H * Dv);
    mt_context_pack_kv(c, call, stream);
    for (int64_t i = 0; i < P; i++) {
        mt_attention step = mt_ring_step(c, i, call);
        step.out = c->part, step.lse = c->part_lse;
        if (i + 1 < P)
            mt_ring_shift_begin(c, &c->kv_shift, c->kv[(i + 1) % 2], c->kv[i % 2], c->M * step.k_stride, dtype, stream);
        c->ops->attention_forward(&step, dtype, stream);
        mt_merge_args merge = {&step.spans, H, Dv, sum, call->lse, c->part, c->part_lse, .first = i == 0};
        c->ops->attention_merge(&merge, dtype, stream);
        if (i + 1 < P) mt_ring_shift_end(c, &c->kv_shift, stream);
    }
    if (dtype != MT_F32) c->ops->convert(call->out, dtype, sum, MT_F32, c->M * H * Dv, stream);
}

/* Each block computes its part of all gradients, because the final lse gives exact probabilities. The sums of dk and dv
 * follow their keys and values one step later and arrive at their owner after P steps. call->dq holds one block's part
 * until the final sum overwrites it. */
static void mt_ring_backward(mt_context *c, const mt_attention *call, mt_stream *stream) {
    mt_dtype dtype = c->plan.dtype;
    int64_t P = c->plan.ring->size, q_width = call->num_heads * call->head_size;
    mt_context_pack_kv(c, call, stream);
    for (int64_t i = 0; i < P; i++) {
        mt_attention step = mt_ring_step(c, i, call);
        int64_t kv = step.k_stride;
        float *dkv = c->dkv_sum[i % 2];
        step.dk = c->dkv_part, step.dv = mt_at(c->dkv_part, call->num_groups * call->head_size, c->plan.dtype);
        if (i + 1 < P) mt_ring_shift_begin(c, &c->kv_shift, c->kv[(i + 1) % 2], c->kv[i % 2], c->M * kv, dtype, stream);
        c->ops->attention_backward(&step, dtype, stream);
        mt_accumulate_args dq = {&step.spans, false, c->sum, call->dq, q_width, call->q_stride, .first = i == 0};
        mt_accumulate_args dk_dv = {&step.spans, true, dkv, c->dkv_part, kv, kv, .first = i == 0};
        c->ops->accumulate_rows(&dq, dtype, stream);
        if (i > 0) mt_ring_shift_end(c, &c->sum_shift, stream);
        c->ops->accumulate_rows(&dk_dv, dtype, stream);
        mt_ring_shift_begin(c, &c->sum_shift, c->dkv_sum[(i + 1) % 2], dkv, c->M * kv, MT_F32, stream);
        if (i + 1 < P) mt_ring_shift_end(c, &c->kv_shift, stream);
    }
    mt_ring_shift_end(c, &c->sum_shift, stream);
    mt_context_store_dkv(c, call, c->dkv_sum[P % 2], stream);
    const void *rounded = c->sum;
    if (dtype != MT_F32) {
        c->ops->convert(c->part, dtype, c->sum, MT_F32, c->M * q_width, stream);
        rounded = c->part;
    }
    mt_context_copy_rows(c, call->dq, call->q_stride, rounded, q_width, c->M, q_width, stream);
}

/* ---- all_gather: every rank gathers all keys and values, as for Llama 3 (Grattafiori et al., "The Llama 3 herd of
 * models") */

/* The call with the keys and values of all ranks, in order of position; q_index stays local. */
static mt_attention mt_context_gather_kv(mt_context *c, const mt_attention *call, mt_stream *stream) {
    int64_t k_width = call->num_groups * call->head_size, kv = k_width + call->num_groups * call->value_size;
    mt_context_pack_kv(c, call, stream);
    c->ops->all_gather(c->gathered, c->kv[0], c->M * kv, c->plan.dtype, c->plan.ring, stream);
    c->ops->scatter_rows(&(mt_row_args){c->N, kv, c->token_of_row, .from = c->gathered, .to = c->ordered},
                         c->plan.dtype, stream);
    mt_attention whole = *call;
    whole.k = c->ordered, whole.v = mt_at(c->ordered, k_width, c->plan.dtype), whole.k_stride = whole.v_stride = kv;
    whole.k_index = c->index, whole.spans = c->lists[0];
    return whole;
}

static void mt_context_gather_forward(mt_context *c, const mt_attention *call, mt_stream *stream) {
    mt_attention whole = mt_context_gather_kv(c, call, stream);
    c->ops->attention_forward(&whole, c->plan.dtype, stream);
}

/* Every rank has a partial gradient of all keys and values; a reduce-scatter sums them for their owners. sparse: its
 * selected keys; NULL: all. */
static void mt_context_gather_backward(mt_context *c, const mt_attention *call, const mt_sparse_attention *sparse,
                                       mt_stream *stream) {
    mt_dtype dtype = c->plan.dtype;
    mt_attention whole = mt_context_gather_kv(c, call, stream);
    int64_t kv = whole.k_stride, all = c->N * kv;
    whole.dk = c->dkv_ordered, whole.dv = mt_at(c->dkv_ordered, call->num_groups * call->head_size, c->plan.dtype);
    c->ops->memory_zero(c->dkv_ordered, all * mt_dtype_size(dtype), stream); // no span covers the last keys
    if (sparse) {
        mt_sparse_attention of_whole = *sparse;
        of_whole.attention = whole;
        c->ops->sparse_attention_backward(&of_whole, dtype, stream);
    } else {
        c->ops->attention_backward(&whole, dtype, stream);
    }
    c->ops->gather_rows(&(mt_row_args){c->N, kv, c->token_of_row, .from = c->dkv_ordered, .to = c->gathered}, dtype,
                        stream);
    if (dtype != MT_F32) c->ops->convert(c->wide, MT_F32, c->gathered, dtype, all, stream);
    c->ops->reduce_scatter(c->dkv_sum[0], dtype == MT_F32 ? c->gathered : c->wide, c->M * kv, MT_F32, c->plan.ring,
                           stream);
    mt_context_store_dkv(c, call, c->dkv_sum[0], stream);
}

/* ---- a2a: exchange of tokens for heads (Jacobs et al., "DeepSpeed Ulysses") */

/* from[T, width], all heads of this rank's tokens -> to[M, width / A], a share of the heads of all tokens. */
static void mt_a2a_to_heads(mt_context *c, void *to, const void *from, int64_t from_stride, int64_t width,
                            mt_stream *stream) {
    int64_t A = c->plan.a2a->size, share = width / A;
    for (int64_t a = 0; a < A; a++)
        mt_context_copy_rows(c, mt_at(c->by_head, a * c->T * share, c->plan.dtype), share,
                             mt_at(from, a * share, c->plan.dtype), from_stride, c->T, share, stream);
    c->ops->all_to_all(to, c->by_head, c->T * share, c->plan.dtype, c->plan.a2a, stream);
}

static void mt_a2a_to_tokens(mt_context *c, void *to, int64_t to_stride, const void *from, int64_t width,
                             mt_stream *stream) {
    int64_t A = c->plan.a2a->size, share = width / A;
    c->ops->all_to_all(c->by_head, from, c->T * share, c->plan.dtype, c->plan.a2a, stream);
    for (int64_t a = 0; a < A; a++)
        mt_context_copy_rows(c, mt_at(to, a * share, c->plan.dtype), to_stride,
                             mt_at(c->by_head, a * c->T * share, c->plan.dtype), share, c->T, share, stream);
}

/* The call for this rank's share of the heads, with q, k, v of all tokens of the group. lse and row_dot keep their
 * memory: [M, H / A] has as many elements as [T, H]. */
static mt_attention mt_a2a_begin(mt_context *c, const mt_attention *call, mt_stream *stream) {
    int64_t A = c->plan.a2a->size, H = call->num_heads, G = call->num_groups;
    int64_t D = call->head_size, Dv = call->value_size;
    mt_a2a_to_heads(c, c->q, call->q, call->q_stride, H * D, stream);
    mt_a2a_to_heads(c, c->k, call->k, call->k_stride, G * D, stream);
    mt_a2a_to_heads(c, c->v, call->v, call->v_stride, G * Dv, stream);
    mt_attention inner = *call;
    inner.q = c->q, inner.k = c->k, inner.v = c->v, inner.out = c->out;
    inner.dq = c->dq, inner.dk = c->dk, inner.dv = c->dv, inner.dout = c->dout;
    inner.num_heads = H / A, inner.num_groups = G / A, inner.q_stride = H / A * D, inner.k_stride = G / A * D;
    inner.v_stride = G / A * Dv, inner.out_stride = H / A * Dv;
    inner.first_head = call->first_head + c->plan.a2a->rank * (H / A);
    int64_t skip = c->plan.a2a->rank * (H / A);
    if (call->sinks) inner.sinks = mt_at(call->sinks, skip, c->plan.dtype);
    if (call->dsinks) inner.dsinks = call->dsinks + skip;
    return inner;
}

/* ---- states of recurrences, from piece to piece */

static const mt_spans *mt_context_pieces(const mt_context *c) {
    return &c->pieces.spans;
}

/* The states before the pieces, whose memory mt_context_carry fills. */
static mt_states mt_context_states(const mt_context *c, float *memory) {
    return (mt_states){.memory = memory, .slots = MT_PIECES, .first = c->pieces.first, .last = c->pieces.last};
}

/* Waits for one message of a state: sends it, or receives it. */
static void mt_context_message(const mt_context *c, mt_channel *channel, float *state, int64_t elements,
                               mt_stream *stream) {
    mt_channel_start(c->ops, channel, state, elements, MT_F32, stream);
    mt_channel_finish(c->ops, channel, stream);
}

/* Passes states along the pieces in order of position: carry->states receives the state before each piece, from which
 * `step` computes the state after it. Backward: carry->dstates receives the gradient of the state after each piece,
 * from which `step` computes the gradient of the state before it. A piece without tokens passes on the message. */
static void mt_context_carry(const mt_context *c, const mt_carry *carry,
                             void (*step)(const void *call, const mt_carried_state *state, bool backward),
                             const void *call, bool backward, mt_stream *stream) {
    const mt_piece_list *p = &c->pieces;
    for (int64_t n = 0; n < p->count; n++) {
        int64_t slot = backward ? p->count - 1 - n : n;
        const mt_piece *piece = &p->pieces[slot];
        bool arrives = backward ? piece->goes_on : piece->continues,
             leaves = backward ? piece->continues : piece->goes_on;
        int from = backward ? piece->after : piece->before, to = backward ? piece->before : piece->after;
        float *in = (backward ? carry->dstates : carry->states) + slot * carry->elements, *out = carry->sent;
        if (arrives)
            mt_context_message(c, from < p->group->rank ? p->lower.from : p->higher.from, in, carry->elements, stream);
        if (!leaves) continue;
        if (piece->begin == piece->end)
            out = in;
        else
            step(call, &(mt_carried_state){slot, arrives ? in : NULL, out}, backward);
        mt_context_message(c, to < p->group->rank ? p->lower.to : p->higher.to, out, carry->elements, stream);
    }
}

/* ---- numbers of tokens, in host memory */

/* Position in the loaded micro-batch of token t of this rank. */
static int64_t mt_context_position(const mt_context *c, int64_t t) {
    return c->host_token_of_row[c->plan.ring->rank * c->M + c->plan.a2a->rank * c->T + t];
}

/* whole[N] = local[T] of every rank. */
static void mt_context_gather_numbers(const mt_context *c, double *whole, const float *local) {
    memset(whole, 0, (size_t)c->N * 8);
    for (int64_t t = 0; t < c->T; t++) whole[mt_context_position(c, t)] = (double)local[t];
    mt_all_reduce_sum(c->plan.a2a, whole, c->N, MT_F64);
    mt_all_reduce_sum(c->plan.ring, whole, c->N, MT_F64);
}

/* ---- all four --cp-comm-type */

/* Attention of this rank's heads across the ring group; without one this rank has all tokens of the sequences. The
 * sink is added when all keys have been seen, and every query sees a key of its own block. */
static void mt_context_attention(mt_context *c, const mt_attention *call, bool backward, mt_stream *stream) {
    bool gathers = c->plan.comm_type == MT_CP_ALL_GATHER;
    mt_attention whole = *call, own = *call;
    whole.q_index = whole.k_index = c->index, whole.spans = c->lists[0];
    if (c->plan.ring->size == 1) {
        (backward ? mt_attend_backward : mt_attend_forward)(c->ops, &whole, c->plan.dtype, stream);
        return;
    }
    own.spans = c->lists[gathers ? 0 : c->plan.ring->rank];
    if (backward) {
        if (gathers)
            mt_context_gather_backward(c, call, NULL, stream);
        else
            mt_ring_backward(c, call, stream);
        mt_attend_sink_backward(c->ops, &own, c->plan.dtype, stream);
    } else {
        (gathers ? mt_context_gather_forward : mt_ring_forward)(c, call, stream);
        mt_attend_sink_forward(c->ops, &own, c->plan.dtype, stream);
    }
}

void mt_context_attention_forward(mt_context *c, const mt_attention *a, mt_stream *stream) {
    bool exchanges = c->plan.a2a->size > 1;
    mt_attention inner = exchanges ? mt_a2a_begin(c, a, stream) : *a;
    mt_context_attention(c, &inner, false, stream);
    if (exchanges) mt_a2a_to_tokens(c, a->out, a->out_stride, c->out, a->num_heads * a->value_size, stream);
}

void mt_context_attention_backward(mt_context *c, const mt_attention *a, mt_stream *stream) {
    if (c->plan.a2a->size == 1) {
        mt_context_attention(c, a, true, stream);
        return;
    }
    int64_t H = a->num_heads, G = a->num_groups, D = a->head_size, Dv = a->value_size;
    mt_attention inner = mt_a2a_begin(c, a, stream);
    mt_a2a_to_heads(c, c->out, a->out, a->out_stride, H * Dv, stream);
    mt_a2a_to_heads(c, c->dout, a->dout, a->out_stride, H * Dv, stream);
    mt_context_attention(c, &inner, true, stream);
    mt_a2a_to_tokens(c, a->dq, a->q_stride, c->dq, H * D, stream);
    mt_a2a_to_tokens(c, a->dk, a->k_stride, c->dk, G * D, stream);
    mt_a2a_to_tokens(c, a->dv, a->v_stride, c->dv, G * Dv, stream);
}

/* ---- sparse attention, with all_gather: a query may select any key of its sequence */

/* The call with the keys and values of all ranks. */
static mt_sparse_attention mt_context_sparse(mt_context *c, const mt_sparse_attention *a, mt_stream *stream) {
    mt_sparse_attention whole = *a;
    MT_CHECK(c->plan.comm_type == MT_CP_ALL_GATHER && c->plan.a2a->size == 1);
    if (c->plan.ring->size > 1) whole.attention = mt_context_gather_kv(c, &a->attention, stream);
    whole.attention.k_index = c->index, whole.attention.spans = c->lists[0];
    return whole;
}

static void mt_context_sparse_backward(mt_context *c, const mt_sparse_attention *a, mt_stream *stream) {
    mt_sparse_attention whole = *a;
    if (c->plan.ring->size > 1) {
        mt_context_gather_backward(c, &a->attention, a, stream);
        return;
    }
    whole.attention.k_index = c->index, whole.attention.spans = c->lists[0];
    c->ops->sparse_attention_backward(&whole, c->plan.dtype, stream);
}

/* ordered[N, width] = own[M, width] of every rank, in order of position. by_rank: scratch of as many elements. */
static void mt_context_gather_rows(const mt_context *c, void *ordered, void *by_rank, const void *own, int64_t width,
                                   mt_stream *stream) {
    c->ops->all_gather(by_rank, own, c->M * width, c->plan.dtype, c->plan.ring, stream);
    c->ops->scatter_rows(&(mt_row_args){c->N, width, c->token_of_row, .from = by_rank, .to = ordered}, c->plan.dtype,
                         stream);
}

/* own[M, width] = the sum over ranks of the rows of ordered[N, width] that this rank owns. by_rank: scratch. */
static void mt_context_sum_rows(const mt_context *c, float *own, float *by_rank, const float *ordered, int64_t width,
                                mt_stream *stream) {
    c->ops->gather_rows(&(mt_row_args){c->N, width, c->token_of_row, .from = ordered, .to = by_rank}, MT_F32, stream);
    c->ops->reduce_scatter(own, by_rank, c->M * width, MT_F32, c->plan.ring, stream);
}

/* ==== §10 a pipeline stage ======================================================================================== */
/* The layers of a stage, with embedding and head if it has them, on one micro-batch. Invariants: in a step only graphs
 * and expert rows allocate memory; a message is sent as soon as it is computed. */

/* An output of the model or of a multi-token prediction module: saved values of head and loss, and of the module's
 * input. Its slots define the fields. */
typedef struct mt_output {
    void *hidden;                       // [R, C] the residual stream
    mt_normed norm;                     // [R, C] its norm: the head's input
    void *logits;                       // [max_logits, V]
    float *lse, *dlogp;                 // [max_logits]: see mt_cross_entropy_args
    float *entropy, *dentropy;          // [max_logits]; NULL for a loss without entropy
    void *embedded;                     // [R, C] embedding of the module's token
    void *joined;                       // [R, 2C] normalised embedding and normalised hidden state
    float *embedded_rstd, *hidden_rstd; // [R]
    float *embedded_mean, *hidden_mean; // [R] with LayerNorm; else NULL
} mt_output;

/* A micro-batch on one chunk, from its forward to its backward: inputs and saved values. */
typedef struct mt_micro_batch {
    int64_t chunk, index; // index -1: free
    int64_t T, rows;      // tokens, and rows of hidden states on this rank
    int64_t unpadded;     // see mt_pass
    char *device_batch;   // memory of `batch`
    mt_batch_block batch; // on the device
    mt_span *host_spans;  // [num_spans]
    int64_t num_spans;
    mt_context *context;        // its attention with context parallelism, or NULL
    mt_batch whole;             // context parallelism: spans and token indices of the whole micro-batch
    mt_teacher_logits *teacher; // of its batch
    mt_activations *layers;     // of the chunk's layers, or one set that all share in generation; then of the modules
    mt_output outputs[1 + MT_MAX_MTP_LAYERS]; // of the chunk (with a head on the stage with the loss); of the modules
} mt_micro_batch;

/* The operands that a loss on the host reads per token, for the message about a step whose loss is not finite: the
 * operands of the batch, then these. */
enum { MT_OPERAND_TEACHER = MT_NUM_LOSS_INPUTS, MT_OPERAND_OWN, MT_NUM_OPERANDS };

/* The report of a loss on the host: sums. */
typedef struct mt_loss_report {
    double metrics[MT_MAX_LOSS_METRICS];
    double not_finite[MT_NUM_OPERANDS]; // tokens whose number is not finite
} mt_loss_report;
enum { MT_LOSS_REPORT_NUMBERS = sizeof(mt_loss_report) / sizeof(double) };

/* The numbers of a training step, on the device; one copy brings them to the host. */
typedef struct mt_step_numbers {
    double sums[5]; // loss, unmasked tokens, squared norm, the loss once more, squares of replicas' gradients
    double guard[MT_GUARD_NUMBERS];
    double replayed[2];                // sums of a replay, discarded
    double own[2];                     // with reruns: this rank's loss and squared norm before sums over ranks
    double mtp[2 * MT_MAX_MTP_LAYERS]; // [modules, 2] loss and sum of its weights
    mt_loss_report report;
    float grad_scale, grad_norm;
} mt_step_numbers;

/* ==== §10a embedding, head, layers ================================================================================ */
/* The parts of a stage. Multi-token prediction uses the same embedding and head with parameters of its own. */

/* Bucket of the word embedding, or of a tied head if the embedding is on another rank. */
static int64_t mt_word_bucket(const mt_model *m) {
    return m->word_bucket >= 0 ? m->word_bucket : m->head_bucket;
}
static mt_weight mt_word_embedding(const mt_model *m) {
    return m->word_bucket >= 0 ? m->outer.word_embedding : m->outer.head.weight;
}

/* Multiplies x[R, C] by the model's factor of embeddings, in the model's type, as transformers rounds it. */
static void mt_embedding_scale(const mt_model *m, const mt_pass *p, void *x) {
    float factor = (float)m->options->embedding_multiplier;
    if (mt_dtype_is_half(m->dtype)) factor = mt_half_to_f32(mt_f32_to_half(factor, m->dtype), m->dtype);
    mt_scale(m, p, x, factor);
}

/* x[R, C] = dropout(word embedding of tokens[T] + learned position embedding, if any). layer: -1, or the layer of a
 * multi-token prediction module. */
static void mt_embed_forward(mt_model *m, const mt_pass *p, void *x, const int32_t *tokens, int64_t layer) {
    mt_bucket_acquire(m, mt_word_bucket(m));
    mt_vocab_embedding_forward(&p->tp, x, tokens, mt_word_embedding(m), m->C, m->vocab_first, m->V);
    mt_bucket_release(m, mt_word_bucket(m));
    if (m->position_bucket >= 0 && layer < 0) {
        mt_bucket_acquire(m, m->position_bucket);
        mt_embedding_args a = {p->rows, m->C, .count = m->options->max_position_embeddings};
        a.ids = p->batch->positions + p->first_row, a.w = m->outer.position_embedding.w, a.out = x, a.accumulate = true;
        m->ops->embedding_forward(&a, m->dtype, p->stream);
        mt_bucket_release(m, m->position_bucket);
    }
    mt_embedding_scale(m, p, x);
    mt_dropout_add_args a = mt_dropout_operands(m, p, layer, MT_DROP_EMBEDDING);
    if (a.dropout.p > 0) {
        a.x = a.out = x;
        m->ops->dropout_add_forward(&a, m->dtype, p->stream);
    }
}

/* Adds dx[R, C] to the embedding's gradients. last: this completes the word embedding's gradient of the step. */
static void mt_embed_backward(mt_model *m, const mt_pass *p, void *dx, const int32_t *tokens, int64_t layer,
                              bool last) {
    mt_dropout_add_args a = mt_dropout_operands(m, p, layer, MT_DROP_EMBEDDING);
    if (a.dropout.p > 0) {
        a.x = a.out = dx;
        m->ops->dropout_add_backward(&a, m->dtype, p->stream);
    }
    mt_embedding_scale(m, p, dx);
    if (m->position_bucket >= 0 && layer < 0 && m->buckets[m->position_bucket].trained) {
        mt_bucket_gradients_acquire(m, m->position_bucket);
        mt_embedding_args a = {p->rows, m->C, .count = m->options->max_position_embeddings};
        a.ids = p->batch->positions + p->first_row, a.dout = dx, a.dw = m->outer.position_embedding.dw;
        m->ops->embedding_backward(&a, m->dtype, p->stream);
        mt_bucket_gradients_release(m, m->position_bucket, p->last);
    }
    mt_bucket_gradients_acquire(m, mt_word_bucket(m)); // a tied head may have acquired it already
    mt_vocab_embedding_backward(&p->tp, dx, tokens, mt_word_embedding(m), m->C, m->vocab_first, m->V);
    mt_bucket_gradients_release(m, mt_word_bucket(m), last);
}

/* The factor of the head's input that scales the logits; values have none. */
static double mt_head_scale(const mt_model *m) {
    return m->options->head_type == MT_HEAD_LM ? 1 / m->options->logits_scaling : 1;
}

/* Logits of the normalised hidden states. */
static void mt_head_forward(mt_model *m, const mt_pass *p, const mt_output *out) {
    mt_scale(m, p, out->norm.y, mt_head_scale(m));
    mt_bucket_acquire(m, m->head_bucket);
    mt_linear_forward(mt_linears(p), &m->outer.head, &(mt_linear_io){.x = out->norm.y, .y = out->logits});
    mt_bucket_release(m, m->head_bucket);
}

static void mt_nll_forward(const mt_ops *ops, const mt_loss_args *a, mt_stream *stream) {
    ops->nll_loss(a->sums, a->dlogp, a->cross_entropy->logp, a->weights, a->cross_entropy->T, stream);
}

const mt_loss mt_nll = {.forward = mt_nll_forward};

static const mt_loss_metric mt_pair_metric_rows[] = {{"accuracy", MT_PAIR_ACCURACY, -1},
                                                     {"chosen reward", MT_PAIR_CHOSEN, -1},
                                                     {"rejected reward", MT_PAIR_REJECTED, -1},
                                                     {"margin", MT_PAIR_MARGIN, -1},
                                                     {NULL, 0, 0}};

static const mt_loss_metric mt_policy_metrics[] = {{"clip fraction", MT_POLICY_CLIPFRAC, MT_POLICY_TOKENS},
                                                   {"ppo kl", MT_POLICY_PPO_KL, MT_POLICY_TOKENS},
                                                   {"ref kl", MT_POLICY_REF_KL, MT_POLICY_TOKENS},
                                                   {"entropy", MT_POLICY_ENTROPY, MT_POLICY_TOKENS},
                                                   {NULL, 0, 0}};
static const mt_loss_metric mt_value_metrics[] = {{"value", MT_VALUE_VALUES, MT_VALUE_TOKENS},
                                                  {"return", MT_VALUE_RETURNS, MT_VALUE_TOKENS},
                                                  {"clip fraction", MT_VALUE_CLIPFRAC, MT_VALUE_TOKENS},
                                                  {NULL, 0, 0}};
static const mt_loss_metric mt_distillation_metrics[] = {
    {"cross-entropy", MT_DISTILLATION_CROSS_ENTROPY, -1}, {"divergence", MT_DISTILLATION_DIVERGENCE, -1}, {NULL, 0, 0}};

/* A loss on the host, whose function has the loss's name and _loss. */
#define MT_HOST_LOSS(name, ...)                                                                                        \
    static void name##_host(const void *config, const mt_loss_tokens *tokens, mt_loss_sums *sums) {                    \
        name##_loss(tokens, config, sums);                                                                             \
    }                                                                                                                  \
    const mt_loss name = {.host = name##_host, __VA_ARGS__};
MT_HOST_LOSS(mt_preference, .inputs = 1 << MT_REF_LOGP, .metrics = mt_pair_metric_rows)
MT_HOST_LOSS(mt_reward, .of_values = true, .metrics = mt_pair_metric_rows)
MT_HOST_LOSS(mt_policy, .inputs = 1 << MT_OLD_LOGP | 1 << MT_ADVANTAGES, .metrics = mt_policy_metrics)
MT_HOST_LOSS(mt_value, .of_values = true, .inputs = 1 << MT_RETURNS | 1 << MT_OLD_VALUES, .metrics = mt_value_metrics)
MT_HOST_LOSS(mt_distillation, .metrics = mt_distillation_metrics)

/* The operands of the cross-entropy of an output's logits. Its backward overwrites the logits with their gradient. */
static mt_cross_entropy_args mt_head_cross_entropy(const mt_model *m, const mt_pass *p, const mt_output *out,
                                                   const int32_t *labels) {
    mt_cross_entropy_args a = {.T = p->T, .stride = m->V, .first = m->vocab_first, .count = m->vocab_count};
    a.logits = a.dlogits = out->logits, a.labels = labels, a.stats = m->row_stats;
    a.entropy = out->entropy, a.lse = out->lse, a.dlogp = out->dlogp, a.dentropy = out->dentropy;
    a.loss_scale = m->loss_scale;
    if (m->options->stage == MT_STAGE_RL) a.logit_scale = (float)(1 / m->options->temperature); // of the samples
    return a;
}

/* Log-probabilities logp[T] of labels[T], entropies unless `entropy` is NULL, and a loss on the device. */
static void mt_head_loss(mt_model *m, const mt_pass *p, const mt_output *out, const int32_t *labels,
                         const float *weights, double *sums, float *logp, float *entropy) {
    mt_cross_entropy_args cross_entropy = mt_head_cross_entropy(m, p, out, labels);
    mt_loss_args a = {&cross_entropy, weights, p->replay ? m->numbers->replayed : sums, out->dlogp, out->dentropy};
    cross_entropy.logp = logp;
    if (entropy) cross_entropy.entropy = entropy;
    mt_vocab_cross_entropy_forward(&p->tp, &cross_entropy);
    if (m->plan.loss->forward) m->plan.loss->forward(m->ops, &a, p->stream);
}

/* The values of all T tokens, from this rank's rows. */
static void mt_head_values(mt_model *m, const mt_pass *p, const mt_output *out) {
    float *own = m->logp + p->first_row;
    m->ops->convert(own, MT_F32, out->logits, m->dtype, p->rows, p->stream);
    if (p->rows < p->T) m->ops->all_gather(m->logp, own, p->rows, MT_F32, &m->grid->tensor, p->stream);
}

/* ---- losses on the host, and scores: functions of whole sequences. The ranks of a context group exchange their
 * tokens' numbers, and all compute the same. */

/* Whole sequences of a micro-batch: the numbers of mt_loss_tokens, each [tokens]. */
enum { MT_HOST_LOGP, MT_HOST_ENTROPY, MT_HOST_DLOGP, MT_HOST_DENTROPY, MT_HOST_DIVERGENCE, MT_NUM_HOST_NUMBERS };

/* Sums of the step so far. */
typedef struct mt_host_sums {
    double sums[2]; // loss and count
    mt_loss_report report;
} mt_host_sums;

typedef struct mt_host_loss {
    double *numbers[MT_NUM_HOST_NUMBERS]; // DLOGP: of values with a value head
    double *inputs[MT_NUM_LOSS_INPUTS];   // of the batch, in float64
    float *staged[MT_NUM_HOST_NUMBERS];   // [max_tokens] of this rank, pinned
    mt_host_sums *sums;                   // pinned
    mt_score_sink *sink;                  // of mt_score_tokens; NULL: a loss
    void *sink_context;
    int64_t micro_batch;
    const mt_pass *scored;         // that the sink reads
    int64_t capacity;              // of distillation: logits of the student at once; 0: none
    int32_t *index, *device_index; // [capacity] their places; -1: on another rank
    void *values, *device_values;  // [capacity] logits or gradients
    float *floats;                 // [capacity] the same
    double *doubles;               // [3, capacity] operands of mt_divergence
} mt_host_loss;

/* whole[n] = `local` of every rank that shares the micro-batch. */
static void mt_whole_gather(const mt_pass *p, double *whole, const float *local) {
    if (p->context)
        mt_context_gather_numbers(p->context, whole, local);
    else
        for (int64_t t = 0; t < p->T; t++) whole[t] = (double)local[t];
}

/* Copies logp[T] (or the values) and entropy[T] of the micro-batch to the host, as whole sequences. */
static void mt_host_loss_gather(mt_model *m, const mt_pass *p, const float *entropy) {
    mt_host_loss *h = m->host_loss;
    m->ops->memory_copy(h->staged[MT_HOST_LOGP], m->logp, p->T * 4, p->stream);
    if (entropy) m->ops->memory_copy(h->staged[MT_HOST_ENTROPY], entropy, p->T * 4, p->stream);
    m->ops->stream_synchronize(p->stream);
    mt_whole_gather(p, h->numbers[MT_HOST_LOGP], h->staged[MT_HOST_LOGP]);
    if (entropy) mt_whole_gather(p, h->numbers[MT_HOST_ENTROPY], h->staged[MT_HOST_ENTROPY]);
}

/* This rank's tokens of `whole`, to the device. */
static void mt_host_loss_scatter(mt_model *m, const mt_pass *p, int which, float *to) {
    const double *whole = m->host_loss->numbers[which];
    float *staged = m->host_loss->staged[which];
    for (int64_t t = 0; t < p->T; t++) staged[t] = (float)whole[p->context ? mt_context_position(p->context, t) : t];
    m->ops->memory_copy(to, staged, p->T * 4, p->stream);
}

/* Counts the tokens whose operand is not finite. `own`: the model's log-probabilities or values; where they are finite
 * and the divergence is not, the teacher's logits are at fault. */
static void mt_host_loss_suspect(double not_finite[MT_NUM_OPERANDS], const mt_loss_tokens *t, const double *own) {
    const double *const inputs[MT_NUM_LOSS_INPUTS] = {t->old_logp,   t->ref_logp,        t->advantages, t->returns,
                                                      t->old_values, t->rollout_weights, t->selected};
    for (int64_t i = 0; i < t->T; i++) {
        if (t->mask[i] == 0) continue;
        for (int k = 0; k < MT_NUM_LOSS_INPUTS; k++) not_finite[k] += inputs[k] && !isfinite(inputs[k][i]);
        not_finite[MT_OPERAND_OWN] += !isfinite(own[i]);
        not_finite[MT_OPERAND_TEACHER] += isfinite(own[i]) && t->divergence && !isfinite(t->divergence[i]);
    }
}

/* The loss of the gathered numbers. Sums count once: on the first of the ranks that share the micro-batch. */
static void mt_host_loss_forward(mt_model *m, const mt_pass *p, const mt_output *out) {
    mt_host_loss *h = m->host_loss;
    int64_t n = p->whole->num_tokens;
    bool has_values = m->options->head_type != MT_HEAD_LM, uses_entropy = out->dentropy && !has_values;
    mt_loss_sums sums = {0};
    mt_loss_tokens tokens = {.T = n, .num_sequences = p->whole->num_spans, .sequences = p->whole->spans};
    const double **inputs[MT_NUM_LOSS_INPUTS] = {&tokens.old_logp, &tokens.ref_logp,   &tokens.advantages,
                                                 &tokens.returns,  &tokens.old_values, &tokens.rollout_weights,
                                                 &tokens.selected};
    for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) {
        if (!(m->plan.loss->inputs & 1u << i)) continue;
        for (int64_t t = 0; t < n; t++) h->inputs[i][t] = (double)p->whole->loss_inputs[i][t];
        *inputs[i] = h->inputs[i];
    }
    memset(h->numbers[MT_HOST_DLOGP], 0, (size_t)n * 8);
    memset(h->numbers[MT_HOST_DENTROPY], 0, (size_t)n * 8);
    tokens.mask = p->whole->loss_mask;
    if (m->plan.loss->distillation) tokens.divergence = h->numbers[MT_HOST_DIVERGENCE];
    *(has_values ? &tokens.values : &tokens.logp) = h->numbers[MT_HOST_LOGP];
    *(has_values ? &tokens.dvalues : &tokens.dlogp) = h->numbers[MT_HOST_DLOGP];
    if (uses_entropy) tokens.entropy = h->numbers[MT_HOST_ENTROPY], tokens.dentropy = h->numbers[MT_HOST_DENTROPY];
    m->plan.loss->host(m->plan.loss->config, &tokens, &sums);
    mt_host_loss_scatter(m, p, MT_HOST_DLOGP, out->dlogp);
    if (uses_entropy) mt_host_loss_scatter(m, p, MT_HOST_DENTROPY, out->dentropy);
    if (p->replay || (p->context && p->context->plan.ring->rank + p->context->plan.a2a->rank > 0)) return;
    mt_host_sums *all = h->sums;
    all->sums[0] += sums.loss, all->sums[1] += sums.count;
    for (int i = 0; i < MT_MAX_LOSS_METRICS; i++) all->report.metrics[i] += sums.metrics[i];
    if (!isfinite(sums.loss)) mt_host_loss_suspect(all->report.not_finite, &tokens, h->numbers[MT_HOST_LOGP]);
    m->ops->memory_copy(m->numbers->sums, all->sums, (int64_t)sizeof all->sums, p->stream);
    m->ops->memory_copy(&m->numbers->report, &all->report, (int64_t)sizeof all->report, p->stream);
}

/* ---- distillation: the student's logits at the teacher's ids go to the host, in pieces, and derivatives of the
 * divergence are added to the gradients of these logits. A tensor-parallel rank has the ids of its share. */

/* A piece of a micro-batch's tokens: as many as the host has room for. */
typedef struct mt_distilled {
    const int32_t *tokens; // [rows] ascending
    int64_t rows, n;       // n: rows of K numbers
    float *own, *teacher;  // [rows, K] logits of the student at the teacher's ids, and the teacher's or derivatives
    void *logits;          // on the device, of the first token: those of h->index
} mt_distilled;

/* The piece after `piece` (zero: the first one); false: there is none. own: 0 at ids of other ranks. */
static bool mt_distill_next(mt_model *m, const mt_pass *p, const mt_output *out, mt_distilled *piece) {
    const mt_teacher_logits *teacher = p->mb->teacher;
    mt_host_loss *h = m->host_loss;
    MT_CHECK(teacher && teacher->K <= h->capacity && !p->replay);
    int64_t K = teacher->K, rows = 0, first = piece->tokens ? piece->tokens + piece->rows - teacher->tokens : 0;
    const int32_t *t = teacher->tokens + first, *end = teacher->tokens + teacher->count;
    if (t >= end) return false;
    for (; t + rows < end && (rows + 1) * K <= h->capacity && (t[rows] - t[0] + 1) * m->V < INT32_MAX; rows++)
        for (int64_t k = 0; k < K; k++) {
            int64_t id = (teacher->ids ? teacher->ids[(first + rows) * K + k] : k) - m->vocab_first;
            bool here = id >= 0 && id < m->vocab_count;
            h->index[rows * K + k] = here ? (int32_t)((t[rows] - t[0]) * m->V + id) : -1;
        }
    *piece = (mt_distilled){.tokens = t, .rows = rows, .n = rows * K, .teacher = teacher->logits + first * K};
    piece->own = mt_row_open(h->floats, h->values, 0, m->dtype);
    piece->logits = mt_at(out->logits, t[0] * m->V, m->dtype);
    m->ops->memory_copy(h->device_index, h->index, piece->n * 4, p->stream);
    m->ops->gather_rows(&(mt_row_args){piece->n, 1, h->device_index, .from = piece->logits, .to = h->device_values},
                        m->dtype, p->stream);
    mt_copy_wait(m, h->values, h->device_values, piece->n * mt_dtype_size(m->dtype));
    (void)mt_row_load(piece->own, h->values, 0, piece->n, m->dtype);
    return true;
}

/* The divergence of every token; its derivatives replace the teacher's logits. */
static void mt_distill_forward(mt_model *m, const mt_pass *p, const mt_output *out) {
    const mt_distillation_config *c = m->plan.loss->distillation;
    mt_host_loss *h = m->host_loss;
    mt_distilled piece = {0};
    memset(h->staged[MT_HOST_DIVERGENCE], 0, (size_t)p->T * 4);
    while (mt_distill_next(m, p, out, &piece)) {
        int64_t K = piece.n / piece.rows;
        mt_all_reduce_sum(&m->grid->tensor, piece.own, piece.n, MT_F32);
#pragma omp parallel for
        for (int64_t r = 0; r < piece.rows; r++) {
            const float *own = piece.own + r * K;
            float *other = piece.teacher + r * K;
            double *student = h->doubles + 3 * r * K, *taught = student + K, *dstudent = taught + K, divergence;
            for (int64_t k = 0; k < K; k++) student[k] = (double)own[k], taught[k] = (double)other[k];
            divergence = mt_divergence(&c->divergence, student, taught, K, dstudent);
            h->staged[MT_HOST_DIVERGENCE][piece.tokens[r]] = (float)divergence;
            for (int64_t k = 0; k < K; k++) other[k] = (float)(c->weight * dstudent[k]);
        }
    }
    mt_whole_gather(p, h->numbers[MT_HOST_DIVERGENCE], h->staged[MT_HOST_DIVERGENCE]);
}

/* Adds the derivatives to the gradients of the logits, which the backward of the cross-entropy has stored there. */
static void mt_distill_backward(mt_model *m, const mt_pass *p, const mt_output *out) {
    mt_host_loss *h = m->host_loss;
    mt_distilled piece = {0};
    while (mt_distill_next(m, p, out, &piece)) {
        int64_t n = 0; // those on this rank
        for (int64_t i = 0; i < piece.n; i++)
            if (h->index[i] >= 0)
                h->index[n] = h->index[i], piece.own[n++] = piece.own[i] + m->loss_scale * piece.teacher[i];
        mt_row_close(h->values, 0, piece.own, n, m->dtype);
        m->ops->memory_copy(h->device_index, h->index, n * 4, p->stream);
        m->ops->memory_copy(h->device_values, h->values, n * mt_dtype_size(m->dtype), p->stream);
        m->ops->scatter_rows(&(mt_row_args){n, 1, h->device_index, .from = h->device_values, .to = piece.logits},
                             m->dtype, p->stream);
        m->ops->stream_synchronize(p->stream);
    }
}

/* The gradients of the values, where the values were. */
static void mt_values_backward(const mt_model *m, const mt_pass *p, const mt_output *out) {
    float *own = out->dlogp + p->first_row;
    if (m->loss_scale != 1) m->ops->scale(own, m->loss_scale, p->rows, MT_F32, p->stream);
    m->ops->convert(out->logits, m->dtype, own, MT_F32, p->rows, p->stream);
}

/* dx = the gradient of the normalised hidden states. The head's gradients stay acquired. */
static void mt_head_backward(mt_model *m, const mt_pass *p, const mt_output *out, const int32_t *labels, void *dx) {
    const mt_linear_io head = {.x = out->norm.y, .dy = out->logits, .dx = dx};
    const mt_cross_entropy_args cross_entropy = mt_head_cross_entropy(m, p, out, labels);
    if (m->options->head_type == MT_HEAD_LM)
        m->ops->cross_entropy_backward(&cross_entropy, m->dtype, p->stream);
    else
        mt_values_backward(m, p, out);
    if (m->plan.loss->distillation) mt_distill_backward(m, p, out);
    mt_bucket_acquire(m, m->head_bucket);
    mt_bucket_gradients_acquire(m, m->head_bucket);
    mt_linear_backward(mt_linears(p), &m->outer.head, &head, MT_BACKWARD_BOTH);
    mt_scale(m, p, dx, mt_head_scale(m));
    mt_bucket_release(m, m->head_bucket);
}

/* Acquires and releases a layer's buckets around its backward; experts first, because the backward uses them first. */
static void mt_layer_acquire(mt_model *m, const mt_layer *w, bool params, bool gradients) {
    bool has_experts = w->expert_bucket >= 0;
    if (params && has_experts) mt_bucket_acquire(m, w->expert_bucket);
    if (gradients && has_experts) mt_bucket_gradients_acquire(m, w->expert_bucket);
    if (params) mt_bucket_acquire(m, w->bucket);
    if (gradients) mt_bucket_gradients_acquire(m, w->bucket);
}

static void mt_layer_release(mt_model *m, const mt_pass *p, const mt_layer *w, bool params, bool gradients) {
    bool has_experts = w->expert_bucket >= 0;
    if (gradients && has_experts) mt_bucket_gradients_release(m, w->expert_bucket, p->last);
    if (params && has_experts) mt_bucket_release(m, w->expert_bucket);
    if (gradients) mt_bucket_gradients_release(m, w->bucket, p->last);
    if (params) mt_bucket_release(m, w->bucket);
}

/* With --distribute-saved-activations a rank keeps its part of a unit's input; a replay gathers the whole. */
static void mt_recompute_unit_input(mt_model *m, const mt_pass *p, mt_activations *a) {
    const mt_group *tensor = &m->grid->tensor;
    int64_t count = p->rows * m->C / tensor->size;
    if (!a->input_part) return;
    if (p->replay)
        m->ops->all_gather(a->input, a->input_part, count, m->dtype, tensor, p->stream);
    else
        m->ops->memory_copy(a->input_part, mt_at(a->input, tensor->rank * count, m->dtype),
                            count * mt_dtype_size(m->dtype), p->stream);
}

/* The saved values of a layer of the chunk; in generation all layers share one set. */
static mt_activations *mt_values_of(const mt_model *m, const mt_pass *p, int64_t layer) {
    return &p->mb->layers[m->plan.train ? layer : 0];
}

/* The input of a layer of the chunk as the result of the layer before. */
static mt_layer_result mt_input_of(const mt_model *m, const mt_pass *p, int64_t layer) {
    const mt_activations *values = mt_values_of(m, p, layer);
    return (mt_layer_result){values->input, &m->layers[m->first_local[p->mb->chunk] + layer], values};
}

/* Layers [begin, end) of the chunk, from the first one's saved input to `result` and its norm, if any. Each layer also
 * computes the next layer's input norm; the first layer's is computed here, so that a forward of the whole unit and its
 * replay run the same operations. */
static void mt_layers_forward(mt_model *m, const mt_pass *p, int64_t begin, int64_t end, mt_layer_result result,
                              mt_next_norm result_norm) {
    mt_layer *layers = m->layers + m->first_local[p->mb->chunk];
    for (int64_t i = begin; i < end; i++) {
        mt_layer *w = &layers[i];
        mt_activations *a = mt_values_of(m, p, i);
        bool is_last = i + 1 == end;
        mt_next_norm next = result_norm;
        if (i == begin) {
            mt_bucket_acquire(m, w->bucket);
            mt_recompute_unit_input(m, p, a);
            mt_next_norm first = mt_first_norm(m, w, a);
            if (first.w) mt_norm_forward(m, p, first.w, first.n, a->input);
        }
        if (w->expert_bucket >= 0) mt_bucket_acquire(m, w->expert_bucket);
        if (!is_last) next = mt_first_norm(m, &layers[i + 1], mt_values_of(m, p, i + 1));
        mt_layer_forward(m, p, w, a, is_last ? result : mt_input_of(m, p, i + 1), next);
        if (w->expert_bucket >= 0) mt_bucket_release(m, w->expert_bucket);
        mt_bucket_release(m, w->bucket);
        m->recomputed = w->recomputed || m->recompute_modules ? a : m->recomputed;
    }
}

/* Full recomputation of the unit [begin, end), unless the buffers still hold its values. */
static void mt_recompute_unit_replay(mt_model *m, const mt_pass *p, int64_t begin, int64_t end) {
    mt_pass replay = *p;
    replay.replay = true;
    if (!m->layers[m->first_local[p->mb->chunk] + begin].recomputed || m->recomputed == &p->mb->layers[end - 1]) return;
    mt_layers_forward(m, &replay, begin, end, (mt_layer_result){0}, (mt_next_norm){0});
}

/* Starts the copy of the last offloaded values of the chunk's layers and modules [0, end) back to the device. */
static void mt_offload_prefetch(const mt_model *m, const mt_pass *p, int64_t end) {
    const mt_layer *layers = m->layers + m->first_local[p->mb->chunk];
    while (m->offload && end > 0 && layers[end - 1].offload_bytes == 0) end--;
    if (m->offload && end > 0) mt_offload_load(m, p, &layers[end - 1], &p->mb->layers[end - 1]);
}

/* Before the backward of a layer: its offloaded values, and a prefetch for the next layer of the backward. A recomputed
 * unit has offloaded values in its first layer only, and its replay reads them. */
static void mt_offload_fetch(const mt_model *m, const mt_pass *p, int64_t layer) {
    const mt_layer *layers = m->layers + m->first_local[p->mb->chunk];
    int64_t i = layers[layer].recomputed ? layers[layer].recompute_unit : layer;
    if (!m->offload) return;
    mt_offload_load(m, p, &layers[i], &p->mb->layers[i]);
    if (layers[i].offload_bytes > 0) mt_offload_wait(m, p, &layers[i]);
    mt_offload_prefetch(m, p, i);
}

/* ==== §10b multi-token prediction ================================================================================= */
/* Modules after the last layer; each predicts one token further ahead (DeepSeek-AI, "DeepSeek-V3", 2.2; Gloeckle et
 * al., "Better & faster large language models via multi-token prediction"). Module k concatenates the normalised hidden
 * state of position t and the normalised embedding of token t + k; its projection, transformer layer and norm follow;
 * the model's head predicts token t + k + 1. As in Megatron, the hidden state is the input of the previous head: that
 * of the main model for the first module, that of module k - 1 for the others. Modules share the model's embedding and
 * head, so the stage with the loss has a copy of the embedding, and both gradients are summed. With
 * --mtp-use-repeated-layer one module stands at every depth: each depth has saved values and random numbers of its own,
 * and all add to the same gradients. Invariants: the host
 * rolls tokens and labels within each whole sequence, so results do not depend on the layout; generation and evaluation
 * use no modules. */

/* Multi-token prediction on the rank with the loss. */
typedef struct mt_mtp {
    int64_t count;   // modules of this rank, or depths of its repeated module
    mt_batch rolled; // on the host: a micro-batch shifted by k tokens
    float *weights;  // on the host: weights of the tokens of `rolled`
    float *logp;     // [max_logits]
    void *dhidden;   // [R, C] gradient of a module's input hidden state
    void *djoined;   // [R, 2C]
} mt_mtp;

/* Shifts a micro-batch by one token within each sequence; the last token gets loss mask 0. */
static void mt_mtp_roll(mt_batch *rolled) {
    for (int64_t s = 0; s < rolled->num_spans; s++) {
        int64_t first = rolled->spans[s].q_start, rest = rolled->spans[s].q_len - 1;
        memmove(rolled->tokens + first, rolled->tokens + first + 1, (size_t)rest * 4);
        memmove(rolled->labels + first, rolled->labels + first + 1, (size_t)rest * 4);
        memmove(rolled->loss_mask + first, rolled->loss_mask + first + 1, (size_t)rest * 4);
        rolled->tokens[first + rest] = rolled->labels[first + rest] = 0, rolled->loss_mask[first + rest] = 0;
    }
}

/* weights of the tokens' losses: the module's share of the scaling factor. Rolling removes labels, so the remaining
 * ones count more: each sequence then has the same weight as in the main loss. */
static void mt_mtp_loss_weights(const mt_model *m, float *weights, const mt_batch *whole, const mt_batch *rolled) {
    double factor = m->options->mtp_loss_scaling_factor / (double)m->mtp->count;
    memset(weights, 0, (size_t)whole->num_tokens * 4);
    for (int64_t s = 0; s < whole->num_spans; s++) {
        int64_t first = whole->spans[s].q_start, end = first + whole->spans[s].q_len;
        double labels = 0, left = 0;
        for (int64_t t = first; t < end; t++)
            labels += (double)whole->loss_mask[t], left += (double)rolled->loss_mask[t];
        for (int64_t t = first; t < end && left > 0; t++)
            weights[t] = (float)(factor * labels / left * (double)rolled->loss_mask[t]);
    }
}

/* Writes tokens, labels and weights of this rank's shard, for every module, to the host's block, which already has the
 * rest of the micro-batch: local_batch is free. */
static void mt_mtp_load(mt_model *m, const mt_context *context, mt_batch_block *block, const mt_batch *whole) {
    mt_batch *rolled = &m->mtp->rolled;
    size_t T = (size_t)whole->num_tokens;
    if (m->mtp->count == 0) return;
    memcpy(rolled->tokens, whole->tokens, T * 4);
    memcpy(rolled->labels, whole->labels, T * 4);
    memcpy(rolled->loss_mask, whole->loss_mask, T * 4);
    memcpy(rolled->spans, whole->spans, (size_t)whole->num_spans * sizeof(mt_span));
    rolled->num_tokens = whole->num_tokens, rolled->num_spans = whole->num_spans;
    for (int64_t k = 0; k < m->mtp->count; k++) {
        mt_mtp_roll(rolled);
        mt_mtp_loss_weights(m, m->mtp->weights, whole, rolled);
        mt_batch part = *rolled;
        part.loss_mask = m->mtp->weights, part.positions = whole->positions, part.token_index = whole->token_index;
        if (context) {
            mt_context_shard(context, &m->local_batch, &part, NULL);
            part = m->local_batch;
        }
        int64_t at = k * part.num_tokens;
        memcpy(block->mtp_tokens + at, part.tokens, (size_t)part.num_tokens * 4);
        memcpy(block->mtp_labels + at, part.labels, (size_t)part.num_tokens * 4);
        memcpy(block->mtp_weights + at, part.loss_mask, (size_t)part.num_tokens * 4);
    }
}

/* Index of module k's layer in the chunk. */
static int64_t mt_mtp_index(const mt_model *m, const mt_pass *p, int64_t k) {
    return m->stages[p->mb->chunk].num_layers + k;
}
static mt_layer *mt_mtp_layer(const mt_model *m, const mt_pass *p, int64_t k) {
    return &m->layers[m->first_local[p->mb->chunk] + mt_mtp_index(m, p, k)];
}

/* True if this is a further depth of the module before it, with that module's parameters. */
static bool mt_mtp_repeats(const mt_model *m, const mt_layer *w) {
    return w->number > m->options->num_layers && m->options->mtp_use_repeated_layer;
}

/* Gives all depths of a repeated module the parameters of the first, whenever their pointers change. */
static void mt_mtp_share(const mt_model *m) {
    size_t first = offsetof(mt_layer, bucket);
    for (mt_layer *w = m->layers; w < m->layers + m->num_layers; w++)
        if (mt_mtp_repeats(m, w)) memcpy((char *)w + first, (const char *)(w - 1) + first, sizeof *w - first);
}

/* The first column of a half of joined[R, 2C]: 0: embedding, 1: hidden state, which comes first in MiMo. */
static int64_t mt_mtp_column(const mt_model *m, int half) {
    return (m->options->hf_family == MT_HF_MIMO ? !half : half) * m->C;
}

/* The norm that writes a half of joined. The backward adds dy and dx. */
static mt_norm_args mt_mtp_norm(const mt_model *m, const mt_pass *p, int64_t k, int half) {
    const mt_layer *w = mt_mtp_layer(m, p, k);
    const mt_output *a = &p->mb->outputs[1 + k];
    mt_normed n = {.mean = half ? a->hidden_mean : a->embedded_mean,
                   .rstd = half ? a->hidden_rstd : a->embedded_rstd,
                   .y = mt_at(a->joined, mt_mtp_column(m, half), m->dtype)};
    mt_norm_args norm = mt_norm_operands(m, p, half ? &w->mtp_hidden_norm : &w->mtp_embedding_norm, &n);
    norm.x = half ? p->mb->outputs[k].norm.y : a->embedded; // output 0 is the main model's
    norm.y_stride = norm.dy_stride = 2 * m->C;
    return norm;
}

/* out = eh_proj([norm(embedded); norm(hidden)]). */
static void mt_mtp_join_forward(mt_model *m, const mt_pass *p, int64_t k, void *out) {
    for (int half = 0; half < 2; half++) {
        mt_norm_args norm = mt_mtp_norm(m, p, k, half);
        mt_norm_forward_of(m, p, &norm);
    }
    mt_linear_io projection = {.x = p->mb->outputs[1 + k].joined, .y = out};
    mt_linear_forward(mt_linears(p), &mt_mtp_layer(m, p, k)->mtp_projection, &projection);
}

/* Gradients of the hidden state and of the embedding, from that of eh_proj's output; dembedded may be dout. */
static void mt_mtp_join_backward(mt_model *m, const mt_pass *p, int64_t k, const void *dout, void *dhidden,
                                 void *dembedded) {
    void *djoined = m->mtp->djoined;
    mt_linear_io projection = {.x = p->mb->outputs[1 + k].joined, .dy = dout, .dx = djoined};
    mt_linear_backward(mt_linears(p), &mt_mtp_layer(m, p, k)->mtp_projection, &projection, MT_BACKWARD_BOTH);
    for (int half = 1; half >= 0; half--) {
        mt_norm_args norm = mt_mtp_norm(m, p, k, half);
        norm.dy = mt_at(djoined, mt_mtp_column(m, half), m->dtype), norm.dx = half ? dhidden : dembedded;
        mt_norm_backward_of(m, p, &norm);
    }
}

/* Runs all modules, after the main model's output. */
static void mt_mtp_forward(mt_model *m, const mt_pass *p) {
    for (int64_t k = 0; k < m->mtp->count; k++) {
        mt_layer *w = mt_mtp_layer(m, p, k);
        mt_activations *a = &p->mb->layers[mt_mtp_index(m, p, k)];
        mt_output *out = &p->mb->outputs[1 + k];
        mt_embed_forward(m, p, out->embedded, p->batch->mtp_tokens + k * p->T, w->number);
        mt_bucket_acquire(m, w->bucket);
        mt_offload_claim(m, p, w, a);
        mt_mtp_join_forward(m, p, k, a->input);
        mt_layers_forward(m, p, mt_mtp_index(m, p, k), mt_mtp_index(m, p, k) + 1, (mt_layer_result){.out = out->hidden},
                          (mt_next_norm){.w = &w->mtp_final_norm, .n = &out->norm});
        mt_bucket_release(m, w->bucket);
        mt_head_forward(m, p, out);
        mt_head_loss(m, p, out, p->batch->mtp_labels + k * p->T, p->batch->mtp_weights + k * p->T,
                     m->numbers->mtp + 2 * k, m->mtp->logp, NULL);
    }
}

/* dhidden = gradient of the main model's hidden state from all modules. */
static void mt_mtp_backward(mt_model *m, const mt_pass *p, void *dhidden) {
    void *dnormed = m->scratch.dnormed, *dresidual = m->scratch.dresidual;
    int64_t word = mt_word_bucket(m);
    for (int64_t k = m->mtp->count - 1; k >= 0; k--) {
        mt_layer *w = mt_mtp_layer(m, p, k);
        mt_output *out = &p->mb->outputs[1 + k];
        mt_pass own = *p; // of the buckets of the module
        own.last = p->last && !mt_mtp_repeats(m, w);
        mt_head_backward(m, p, out, p->batch->mtp_labels + k * p->T, dnormed);
        if (word != m->head_bucket) mt_bucket_gradients_release(m, m->head_bucket, false);
        if (k + 1 < m->mtp->count) mt_add_to(m, p, dnormed, dhidden);
        mt_layer_acquire(m, w, true, true);
        mt_norm_backward(m, p, &w->mtp_final_norm, &out->norm, dresidual, NULL, dnormed, out->hidden);
        mt_offload_fetch(m, p, mt_mtp_index(m, p, k));
        mt_recompute_unit_replay(m, p, mt_mtp_index(m, p, k), mt_mtp_index(m, p, k) + 1);
        mt_layer_backward(m, p, w, &p->mb->layers[mt_mtp_index(m, p, k)], dresidual, false, false);
        mt_mtp_join_backward(m, p, k, dresidual, dhidden, dresidual);
        mt_layer_release(m, &own, w, true, true);
        bool last = p->last && k == 0 && !m->has_embedding && word != m->head_bucket;
        mt_embed_backward(m, p, dresidual, p->batch->mtp_tokens + k * p->T, w->number, last);
    }
}

/* ==== §10c a stage's forward and backward ========================================================================= */

/* Entries of a batch's page table: those of each sequence, and one for the page of the padding. */
static int64_t mt_page_entries(const mt_model_plan *plan) {
    return plan->page_rows > 0 ? plan->cache_sequences * mt_divide_up(plan->max_position, plan->page_rows) + 1 : 0;
}

/* The block of a micro-batch of T tokens and num_spans spans. Decoding reads one contiguous range of it, and so does
 * training. */
static mt_batch_block mt_batch_block_at(const mt_model *m, mt_arena *arena, int64_t T, int64_t num_spans) {
    mt_batch_block block;
    block.cache_rows = mt_arena_alloc(arena, T * 4), block.logit_rows = mt_arena_alloc(arena, T * 4);
    block.pages = mt_arena_alloc(arena, mt_page_entries(&m->plan) * 4);
    block.spans = mt_arena_alloc(arena, num_spans * (int64_t)sizeof(mt_span));
    block.tokens = mt_arena_alloc(arena, T * 4), block.positions = mt_arena_alloc(arena, T * 4);
    block.labels = mt_arena_alloc(arena, T * 4), block.loss_mask = mt_arena_alloc(arena, T * 4);
    block.token_index = mt_arena_alloc(arena, T * 8), block.sequence = mt_arena_alloc(arena, T * 4);
    block.mtp_tokens = mt_arena_alloc(arena, m->mtp->count * T * 4);
    block.mtp_labels = mt_arena_alloc(arena, m->mtp->count * T * 4);
    block.mtp_weights = mt_arena_alloc(arena, m->mtp->count * T * 4);
    return block;
}

void mt_batch_alloc(mt_batch *batch, int64_t max_tokens) {
    mt_arena arena = {0};
    *batch = (mt_batch){0};
    for (int pass = 0; pass < 2; pass++) { // the first pass counts
        batch->tokens = mt_arena_alloc(&arena, max_tokens * 4);
        batch->labels = mt_arena_alloc(&arena, max_tokens * 4);
        batch->loss_mask = mt_arena_alloc(&arena, max_tokens * 4);
        batch->positions = mt_arena_alloc(&arena, max_tokens * 4);
        batch->token_index = mt_arena_alloc(&arena, max_tokens * 8);
        batch->spans = mt_arena_alloc(&arena, max_tokens * (int64_t)sizeof(mt_span));
        for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) batch->loss_inputs[i] = mt_arena_alloc(&arena, max_tokens * 4);
        if (pass == 0) arena = (mt_arena){.base = mt_calloc(arena.used), .capacity = arena.used};
    }
}

void mt_batch_free(mt_batch *batch) {
    free(batch->tokens); // the block's start
    *batch = (mt_batch){0};
}

/* Ranks over which a micro-batch of all its context ranks is divided evenly. */
static int64_t mt_token_ranks(const mt_options *o, int64_t context_size) {
    return context_size * (o->sequence_parallel ? o->tensor_model_parallel_size : 1);
}

int64_t mt_eval_micro_batch_size(const mt_options *o) {
    return o->eval_micro_batch_size > 0 ? o->eval_micro_batch_size : o->micro_batch_size;
}

int64_t mt_largest_micro_batch_size(const mt_options *o) {
    return mt_max(o->micro_batch_size, o->eval_micro_batch_size);
}

int64_t mt_rank_tokens(const mt_options *options, int64_t tokens) {
    int64_t ranks = mt_token_ranks(options, options->context_parallel_size);
    return mt_divide_up(tokens, ranks) * ranks / options->context_parallel_size;
}

void mt_batch_pad(mt_batch *batch, int64_t multiple) {
    int64_t end = mt_divide_up(batch->num_tokens, multiple) * multiple, longest = 64;
    for (int64_t t = batch->num_tokens, first = t; t < end; t++) {
        if ((t - first) % longest == 0)
            batch->spans[batch->num_spans++] = (mt_span){.q_start = t, .k_start = t, .causal = true};
        mt_span *span = &batch->spans[batch->num_spans - 1];
        batch->tokens[t] = batch->labels[t] = 0, batch->loss_mask[t] = 0;
        batch->positions[t] = 0, batch->token_index[t] = -1; // any position: there may be few
        span->q_len = ++span->k_len;
    }
    batch->num_tokens = end;
}

/* Index of the first value outside [0, limit) whose weight is not 0 (weights NULL: of any); n: there is none. */
static int64_t mt_find_outside(const int32_t *values, const float *weights, int64_t n, int64_t limit) {
    int32_t end = (int32_t)mt_min(limit, INT32_MAX), outside = 0; // first without a branch: as a rule there is none
    for (int64_t t = 0; t < n; t++) outside |= (values[t] < 0) | (values[t] >= end);
    int64_t i = outside ? 0 : n;
    while (i < n && ((values[i] >= 0 && values[i] < limit) || (weights && weights[i] == 0))) i++;
    return i;
}

static bool mt_range_inside(int64_t start, int64_t length, int64_t T) {
    return start >= 0 && length >= 1 && length <= T && start <= T - length;
}

/* Positions index the rotary tables or the learned embedding. */
static int64_t mt_num_positions(const mt_model *m) {
    if (m->rotary_dim > 0) return m->plan.max_position;
    bool learned = m->options->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE;
    return learned ? m->options->max_position_embeddings : INT32_MAX;
}

/* Ranks that share a batch. */
static int64_t mt_context_ranks(const mt_model *m, const mt_batch *batch) {
    return batch->context_size > 0 ? batch->context_size : m->grid->context.size;
}

/* A batch for fewer ranks than --context-parallel-size needs dynamic context parallelism. */
static int mt_batch_check_ranks(const mt_model *m, const mt_batch *batch, mt_error *error) {
    int64_t ranks = mt_context_ranks(m, batch), cp = m->grid->context.size;
    if (ranks == cp || (m->num_contexts > 1 && ranks < cp && cp % ranks == 0)) return 0;
    return mt_error_set(error,
                        "a batch for %lld ranks; give 1, 2, 4 ... up to --context-parallel-size %lld, and "
                        "--dynamic-context-parallel for fewer ranks than that",
                        (long long)ranks, (long long)cp);
}

int mt_batch_check(const mt_model *m, const mt_batch *batch, mt_error *error) {
    int64_t T = batch->num_tokens, cp = mt_context_ranks(m, batch), V = m->options->vocab_size, t;
    int64_t room = cp * mt_min(m->plan.max_tokens, m->plan.max_logits), positions = mt_num_positions(m);
    int64_t parts = m->tp.sequence_parallel ? m->grid->tensor.size : 1, queries = 0;
    if (mt_batch_check_ranks(m, batch, error) != 0) return -1;
    if (T < 1 || T > room)
        return mt_error_set(error, "%lld tokens, and the model is planned for 1 to %lld", (long long)T,
                            (long long)room);
    if (batch->num_spans < 1 || batch->num_spans > T)
        return mt_error_set(error, "%lld spans for %lld tokens; give 1 to %lld", (long long)batch->num_spans,
                            (long long)T, (long long)T);
    if (m->experts->sequences > 1 && batch->num_spans > m->experts->sequences)
        return mt_error_set(error,
                            "%lld sequences, and --moe-router-load-balancing-type seq_aux_loss is planned for "
                            "%lld, the tokens of a rank; give fewer, or take aux_loss",
                            (long long)batch->num_spans, (long long)m->experts->sequences);
    for (int64_t s = 0; s < batch->num_spans; s++) {
        const mt_span *span = &batch->spans[s];
        if (!mt_range_inside(span->q_start, span->q_len, T) || !mt_range_inside(span->k_start, span->k_len, T))
            return mt_error_set(error,
                                "span %lld, %lld queries from %lld and %lld keys from %lld, is outside %lld tokens",
                                (long long)s, (long long)span->q_len, (long long)span->q_start, (long long)span->k_len,
                                (long long)span->k_start, (long long)T);
        queries += span->q_len;
    }
    if (queries != T) // attention would leave rows undefined, and their gradients reach all parameters
        return mt_error_set(error,
                            "the spans have %lld queries for %lld tokens; every token is in one span (padding: "
                            "mt_batch_pad)",
                            (long long)queries, (long long)T);
    if ((t = mt_find_outside(batch->tokens, NULL, T, V)) < T)
        return mt_error_set(error, "token %lld is %d, outside the vocabulary of %lld", (long long)t, batch->tokens[t],
                            (long long)V);
    if ((t = mt_find_outside(batch->labels, batch->loss_mask, T, V)) < T)
        return mt_error_set(error,
                            "the label of token %lld is %d, outside the vocabulary of %lld; set its loss_mask to 0 to "
                            "leave it out",
                            (long long)t, batch->labels[t], (long long)V);
    if ((t = mt_find_outside(batch->positions, NULL, T, positions)) < T)
        return mt_error_set(error, "the position of token %lld is %d, and the model has positions 0 to %lld",
                            (long long)t, batch->positions[t], (long long)(positions - 1));
    if (cp > 1 && mt_batch_check_context(batch, cp, error) != 0) return -1;
    if (T % (cp * parts) == 0) return 0;
    return mt_error_set(error, "%lld tokens do not divide by %lld, as --sequence-parallel requires", (long long)T,
                        (long long)(cp * parts));
}

/* A pass over a micro-batch on the device. The caller sets training, replay, decode, halves and last. */
static mt_pass mt_pass_begin(mt_model *m, mt_micro_batch *mb) {
    mt_pass p = {.mb = mb, .batch = &mb->batch, .tp = m->tp, .stream = m->stream, .T = mb->T, .rows = mb->rows};
    p.tp.T = mb->T, p.tp.rows = mb->rows;
    p.first_row = m->tp.sequence_parallel ? m->grid->tensor.rank * mb->rows : 0, p.message_rows = mb->rows;
    p.halves = MT_BACKWARD_BOTH, p.unpadded = mb->unpadded;
    p.spans = (mt_spans){.host = mb->host_spans, .device = mb->batch.spans, .count = mb->num_spans};
    p.context = mb->context, p.num_sequences = mb->context ? mb->whole.num_spans : mb->num_spans;
    if (mb->context && m->in_context != mb) mt_context_load(mb->context, &mb->whole, m->stream);
    m->in_context = mb;
    return p;
}

/* This rank's shard of a batch; with context parallelism saves spans and token indices of the whole for attention. */
static const mt_batch *mt_shard_batch(mt_model *m, mt_micro_batch *mb, const mt_batch *batch) {
    if (m->grid->context.size == 1) return batch;
    int level = 0; // index in m->contexts of the attention of the batch's ranks
    for (int64_t ranks = mt_context_ranks(m, batch); m->num_contexts > 1 && ranks > 1; ranks /= 2) level++;
    mb->context = m->contexts[level];
    mt_context_shard(mb->context, &m->local_batch, batch, m->local_sequence);
    mb->whole.num_tokens = batch->num_tokens, mb->whole.num_spans = batch->num_spans;
    memcpy(mb->whole.token_index, batch->token_index, (size_t)batch->num_tokens * 8);
    memcpy(mb->whole.spans, batch->spans, (size_t)batch->num_spans * sizeof(mt_span));
    m->in_context = NULL;
    return &m->local_batch;
}

/* Assigns a batch's arrays on the device; returns those in host block `staged` with spans, tokens and positions. */
static mt_batch_block mt_batch_block_open(mt_model *m, mt_micro_batch *mb, const mt_batch *batch, int staged) {
    int64_t T = batch->num_tokens, num_spans = batch->num_spans;
    MT_CHECK(T <= m->plan.max_tokens && num_spans <= T);
    mt_arena on_device = {.base = mb->device_batch, .capacity = m->batch_bytes};
    mt_arena on_host = {.base = m->staged_batch[staged], .capacity = m->batch_bytes};
    mb->batch = mt_batch_block_at(m, &on_device, T, num_spans);
    mb->T = mb->rows = T;
    mb->num_spans = num_spans;
    memcpy(mb->host_spans, batch->spans, (size_t)num_spans * sizeof(mt_span));
    m->staged = staged;
    m->ops->event_synchronize(m->copied[staged]); // until the block's previous contents are copied
    mt_batch_block block = mt_batch_block_at(m, &on_host, T, num_spans);
    memcpy(block.spans, batch->spans, (size_t)num_spans * sizeof(mt_span));
    memcpy(block.tokens, batch->tokens, (size_t)T * 4);
    memcpy(block.positions, batch->positions, (size_t)T * 4);
    return block;
}

/* Fills the host's block with the values of a batch that a loss needs. */
static void mt_batch_block_fill(mt_model *m, mt_micro_batch *mb, const mt_batch_block *block, const mt_batch *batch,
                                const mt_batch *whole) {
    size_t T = (size_t)batch->num_tokens;
    mb->unpadded = 0;
    for (int64_t t = 0; t < whole->num_tokens; t++) mb->unpadded += !mt_is_padding(whole->token_index, t);
    memcpy(block->labels, batch->labels, T * 4);
    memcpy(block->loss_mask, batch->loss_mask, T * 4);
    memcpy(block->token_index, batch->token_index, T * 8);
    memset(block->sequence, 0, T * 4);
    for (int64_t s = 0; s < batch->num_spans; s++)
        for (int64_t i = 0; i < batch->spans[s].q_len; i++) block->sequence[batch->spans[s].q_start + i] = (int32_t)s;
    if (mb->context) memcpy(block->sequence, m->local_sequence, T * 4);
}

/* Enqueues the copy of a micro-batch to the device and starts a pass over it. The caller may refill `whole` at once,
 * and load the next micro-batch while the device computes this one. */
static mt_pass mt_load_batch(mt_model *m, mt_micro_batch *mb, const mt_batch *whole, bool training) {
    const mt_batch *batch = mt_shard_batch(m, mb, whole);
    mt_batch_block block = mt_batch_block_open(m, mb, batch, !m->staged);
    size_t T = (size_t)batch->num_tokens, parts = m->tp.sequence_parallel ? (size_t)m->grid->tensor.size : 1;
    mb->rows = (int64_t)(T / parts), mb->unpadded = whole->num_tokens;
    MT_CHECK(T % parts == 0 && !(training && m->adapters_off));
    if (!m->ops->is_imagined) mt_batch_block_fill(m, mb, &block, batch, whole);
    if (training && m->stages[mb->chunk].loss) mt_mtp_load(m, mb->context, &block, whole);
    int64_t bytes = (char *)(block.mtp_weights + (size_t)m->mtp->count * T) - (char *)block.spans;
    m->ops->memory_copy(mb->batch.spans, block.spans, bytes, m->stream);
    m->ops->event_record(m->copied[m->staged], m->stream);
    mt_pass p = mt_pass_begin(m, mb);
    p.training = training, p.whole = whole;
    return p;
}

/* ---- a chunk's parts */

/* Final norm and logits of x[rows, C]. */
static void mt_output_forward(mt_model *m, const mt_pass *p, const void *x) {
    const mt_output *out = &p->mb->outputs[0];
    mt_bucket_acquire(m, m->output_bucket);
    mt_norm_forward(m, p, &m->outer.final_norm, &out->norm, x);
    mt_head_forward(m, p, out);
    mt_bucket_release(m, m->output_bucket);
}

/* Logits and the loss of every token. */
static void mt_loss_forward(mt_model *m, const mt_pass *p) {
    MT_CHECK(p->T <= m->plan.max_logits);
    const mt_output *out = &p->mb->outputs[0];
    mt_host_loss *h = m->host_loss;
    float *entropy = p->training ? out->entropy : m->entropy;
    bool scores = h && h->sink;
    mt_output_forward(m, p, out->hidden);
    if (m->options->head_type == MT_HEAD_LM)
        mt_head_loss(m, p, out, p->batch->labels, p->batch->loss_mask, m->numbers->sums, m->logp, entropy);
    else
        mt_head_values(m, p, out), entropy = NULL;
    if (m->plan.loss->host || scores) mt_host_loss_gather(m, p, entropy);
    p->mb->teacher = p->whole->teacher;
    if (m->plan.loss->distillation && !scores) mt_distill_forward(m, p, out);
    if (scores)
        h->sink(h->sink_context, h->micro_batch, p->whole, h->numbers[MT_HOST_LOGP],
                entropy ? h->numbers[MT_HOST_ENTROPY] : NULL);
    else if (m->plan.loss->host)
        mt_host_loss_forward(m, p, out);
    if (p->training) mt_mtp_forward(m, p);
}

/* dhidden = the gradient of the last layer's output. A tied head's gradient is complete only when the embedding has
 * added its own. */
static void mt_loss_backward(mt_model *m, const mt_pass *p, void *dhidden) {
    const mt_output *out = &p->mb->outputs[0];
    void *dnormed = m->scratch.dnormed, *dnormed_of_modules = m->mtp->dhidden;
    mt_mtp_backward(m, p, dnormed_of_modules);
    mt_bucket_acquire(m, m->output_bucket);
    mt_bucket_gradients_acquire(m, m->output_bucket);
    mt_head_backward(m, p, out, p->batch->labels, dnormed);
    if (m->mtp->count > 0) mt_add_to(m, p, dnormed, dnormed_of_modules);
    mt_norm_backward(m, p, &m->outer.final_norm, &out->norm, dhidden, NULL, dnormed, out->hidden);
    mt_bucket_gradients_release(m, m->output_bucket, p->last);
    if (m->head_bucket != m->output_bucket && m->head_bucket != m->word_bucket)
        mt_bucket_gradients_release(m, m->head_bucket, p->last);
    mt_bucket_release(m, m->output_bucket);
}

/* The end of the unit of a chunk's layer: of the layers that one replay restores, or of all. */
static int64_t mt_recompute_unit_end(const mt_model *m, int64_t chunk, int64_t layer) {
    const mt_layer *layers = m->layers + m->first_local[chunk];
    int64_t end = layer;
    while (end < m->stages[chunk].num_layers && layers[end].recompute_unit == layers[layer].recompute_unit) end++;
    return end;
}

/* The residual stream at the chunk's input. */
static void *mt_chunk_input(const mt_model *m, const mt_pass *p) {
    return m->stages[p->mb->chunk].num_layers > 0 ? p->mb->layers[0].input : p->mb->outputs[0].hidden;
}

/* Embedding, if the chunk has it, and layers. */
static void mt_chunk_forward(mt_model *m, const mt_pass *p) {
    const mt_stage *stage = &m->stages[p->mb->chunk];
    if (stage->embedding) mt_embed_forward(m, p, mt_chunk_input(m, p), p->batch->tokens, -1);
    for (int64_t begin = 0, end; begin < stage->num_layers; begin = end) {
        end = mt_recompute_unit_end(m, p->mb->chunk, begin);
        bool is_last = end == stage->num_layers;
        mt_layer_result result = {.out = p->mb->outputs[0].hidden};
        mt_layers_forward(m, p, begin, end, is_last ? result : mt_input_of(m, p, end), (mt_next_norm){0});
    }
}

/* dresidual[R, C]: the gradient of the chunk's output in, that of its input out. */
static void mt_chunk_backward(mt_model *m, const mt_pass *p, void *dresidual) {
    const mt_stage *stage = &m->stages[p->mb->chunk];
    mt_layer *layers = m->layers + m->first_local[p->mb->chunk];
    bool gathered = false; // dresidual, for the experts of the next layer
    for (int64_t i = stage->num_layers - 1; i >= 0; i--) {
        mt_layer *w = &m->layers[m->first_local[p->mb->chunk] + i];
        mt_offload_fetch(m, p, i);
        if (i + 1 == mt_recompute_unit_end(m, p->mb->chunk, i))
            mt_recompute_unit_replay(m, p, w->recompute_unit, i + 1);
        mt_layer_acquire(m, w, true, p->halves == MT_BACKWARD_BOTH);
        bool ahead = i > 0 && mt_gathers_ahead(m, p, w, &layers[i - 1]);
        mt_layer_backward(m, p, w, &p->mb->layers[i], dresidual, gathered, ahead);
        gathered = ahead;
        mt_layer_release(m, p, w, true, p->halves == MT_BACKWARD_BOTH);
    }
    if (stage->embedding) mt_embed_backward(m, p, dresidual, p->batch->tokens, -1, p->last);
}

static void mt_chunk_backward_weight(mt_model *m, const mt_pass *p) {
    for (int64_t i = m->stages[p->mb->chunk].num_layers - 1; i >= 0; i--) {
        mt_layer *w = &m->layers[m->first_local[p->mb->chunk] + i];
        mt_layer_acquire(m, w, false, true);
        mt_layer_backward_weight(p, &p->mb->layers[i]);
        mt_layer_release(m, p, w, false, true);
    }
}

/* ---- between chunks */

/* One end of a channel to a neighbour in the pipeline, with buffers for messages in flight. */
typedef struct mt_link {
    mt_channel *channel; // NULL: there is no such neighbour
    int64_t num_buffers;
    void **buffers; // [num_buffers] of [R, C]; message i uses buffer i % num_buffers
} mt_link;

enum { MT_LINK_RECV_FORWARD, MT_LINK_SEND_FORWARD, MT_LINK_RECV_BACKWARD, MT_LINK_SEND_BACKWARD, MT_NUM_LINKS };

/* Posts the receive of a link's next message of `rows` rows; false if no buffer is free. */
static bool mt_link_post(mt_model *m, mt_link *link, int64_t rows) {
    if (mt_channel_pending(link->channel) == link->num_buffers) return false;
    void *buffer = link->buffers[link->channel->next % link->num_buffers];
    mt_channel_start(m->ops, link->channel, buffer, rows * m->C, m->dtype, m->stream);
    return true;
}

/* to[rows, C] = the oldest message not taken yet. */
static void mt_link_receive(mt_model *m, const mt_pass *p, mt_link *link, void *to) {
    if (mt_channel_pending(link->channel) == 0) mt_link_post(m, link, p->message_rows);
    const void *buffer = link->buffers[link->channel->finished % link->num_buffers];
    mt_channel_finish(m->ops, link->channel, p->stream);
    m->ops->memory_copy(to, buffer, p->rows * m->C * mt_dtype_size(m->dtype), p->stream);
    if (m->runs_alone) m->ops->stream_synchronize(p->stream);
}

/* Sends a copy of from[rows, C]; the caller may overwrite `from` at once. */
static void mt_link_send(mt_model *m, const mt_pass *p, mt_link *link, const void *from) {
    void *buffer = link->buffers[link->channel->next % link->num_buffers];
    if (mt_channel_pending(link->channel) == link->num_buffers) mt_channel_finish(m->ops, link->channel, p->stream);
    m->ops->memory_copy(buffer, from, p->rows * m->C * mt_dtype_size(m->dtype), p->stream);
    mt_channel_start(m->ops, link->channel, buffer, p->message_rows * m->C, m->dtype, p->stream);
}

/* A chunk without the embedding receives its input; a chunk without the loss sends its output. */
static void mt_stage_forward(mt_model *m, const mt_pass *p) {
    const mt_stage *stage = &m->stages[p->mb->chunk];
    if (stage->num_layers > 0) mt_offload_claim(m, p, &m->layers[m->first_local[p->mb->chunk]], p->mb->layers);
    if (!stage->embedding) mt_link_receive(m, p, &m->links[MT_LINK_RECV_FORWARD], mt_chunk_input(m, p));
    mt_chunk_forward(m, p);
    if (!stage->loss) mt_link_send(m, p, &m->links[MT_LINK_SEND_FORWARD], p->mb->outputs[0].hidden);
}

static void mt_stage_backward(mt_model *m, const mt_pass *p) {
    const mt_stage *stage = &m->stages[p->mb->chunk];
    void *dresidual = m->scratch.dresidual;
    mt_offload_prefetch(m, p, stage->num_layers + stage->num_mtp);
    if (stage->loss)
        mt_loss_backward(m, p, dresidual);
    else
        mt_link_receive(m, p, &m->links[MT_LINK_RECV_BACKWARD], dresidual);
    mt_chunk_backward(m, p, dresidual);
    if (!stage->embedding) mt_link_send(m, p, &m->links[MT_LINK_SEND_BACKWARD], dresidual);
}

/* The live micro-batch `index` of a chunk, or with index -1 a free one. */
static mt_micro_batch *mt_micro_batch_find(mt_model *m, int64_t chunk, int64_t index) {
    mt_micro_batch *mb = m->micro_batches, *end = mb + m->num_micro_batches;
    while (mb < end && (mb->chunk != chunk || mb->index != index)) mb++;
    MT_CHECK(mb < end); // a backward follows its forward, and there is room for every live micro-batch
    return mb;
}

/* A zero-bubble schedule splits the backward into the input's and the weights' half. */
static bool mt_splits_backward(const mt_model *m) {
    return m->grid->pipeline.size > 1 && mt_schedule_of(m->options, 1).kind == MT_SCHEDULE_ZB_H1;
}

/* ==== §11 schedules =============================================================================================== */
/* The layers of each rank, and the order of its actions. Invariants: everything here is a pure function of options and
 * rank; a list has one forward and, except in evaluation, one backward per micro-batch and chunk; the lists of all
 * ranks run without deadlock; time and memory are computed from the lists. */

/* ==== §11a lists ================================================================================================== */

/* A list under construction; with actions == NULL it only counts. */
typedef struct mt_action_list {
    const mt_schedule *schedule;
    int64_t rank, count;
    mt_action *actions;
} mt_action_list;

static void mt_list_add(mt_action_list *list, mt_action_kind kind, int64_t micro_batch, int64_t chunk, int64_t peer) {
    if (list->actions) list->actions[list->count] = (mt_action){kind, micro_batch, chunk, (int)peer};
    list->count++;
}

/* Micro-batch and chunk of forward number `index`, equal on all ranks: the outer loop runs over groups, then over
 * chunks, then over micro-batches. Only the last group may be smaller. Backwards have the same order with reversed
 * chunks. */
static void mt_schedule_order(const mt_schedule *s, int64_t index, int64_t *micro_batch, int64_t *chunk) {
    int64_t group = s->vp == 1 ? s->micro_batches : s->group;
    int64_t first = index / (group * s->vp) * group, size = mt_min(s->micro_batches - first, group);
    index -= first * s->vp;
    *micro_batch = first + index % size;
    *chunk = index / size;
}

/* A forward, or a backward, after the receive of its input and before the send of its result. */
static void mt_list_compute(mt_action_list *list, mt_action_kind kind, int64_t index) {
    const mt_schedule *s = list->schedule;
    bool forward = kind == MT_ACTION_FORWARD;
    int64_t micro_batch, chunk, before = (list->rank + s->pp - 1) % s->pp, after = (list->rank + 1) % s->pp;
    mt_schedule_order(s, index, &micro_batch, &chunk);
    if (!forward) chunk = s->vp - 1 - chunk;
    int64_t stage = chunk * s->pp + list->rank, last = s->pp * s->vp - 1;
    if (forward && stage > 0) mt_list_add(list, MT_ACTION_RECV_FORWARD, micro_batch, chunk, before);
    if (!forward && stage < last) mt_list_add(list, MT_ACTION_RECV_BACKWARD, micro_batch, chunk, after);
    mt_list_add(list, kind, micro_batch, chunk, -1);
    if (forward && stage < last) mt_list_add(list, MT_ACTION_SEND_FORWARD, micro_batch, chunk, after);
    if (!forward && stage > 0) mt_list_add(list, MT_ACTION_SEND_BACKWARD, micro_batch, chunk, before);
}

/* Number of warm-up forwards: those before the first 1F1B pair. */
static int64_t mt_schedule_warmup(const mt_schedule *s, int64_t rank) {
    int64_t total = s->micro_batches * s->vp, ahead = s->pp - rank - 1;
    if (s->kind == MT_SCHEDULE_INTERLEAVED) ahead = 2 * ahead + (s->vp - 1) * s->group;
    return s->kind == MT_SCHEDULE_FORWARD_ONLY || ahead > total ? total : ahead;
}

static bool mt_schedule_is_legal(const mt_schedule *s) {
    if (s->pp < 1 || s->vp < 1 || s->micro_batches < 1 || (s->vp > 1 && (s->pp == 1 || s->group < 1))) return false;
    if (s->kind == MT_SCHEDULE_FORWARD_ONLY) return true;
    if (s->kind != MT_SCHEDULE_INTERLEAVED) return s->vp == 1;
    int64_t rest = s->micro_batches % s->group;
    return s->vp > 1 && s->group >= s->pp && s->group <= s->micro_batches && (rest == 0 || rest >= s->pp);
}

int64_t mt_schedule_actions(mt_action *actions, const mt_schedule *s, int64_t rank) {
    MT_CHECK(mt_schedule_is_legal(s) && rank >= 0 && rank < s->pp);
    mt_action_list list = {.schedule = s, .rank = rank, .actions = actions};
    int64_t total = s->micro_batches * s->vp, warmup = mt_schedule_warmup(s, rank), forward = 0, weight = 0;
    bool splits = s->kind == MT_SCHEDULE_ZB_H1;
    while (forward < warmup) mt_list_compute(&list, MT_ACTION_FORWARD, forward++);
    if (s->kind == MT_SCHEDULE_FORWARD_ONLY) return list.count;
    for (int64_t backward = 0; backward < total; backward++) {
        if (forward < total) mt_list_compute(&list, MT_ACTION_FORWARD, forward++);
        mt_list_compute(&list, splits ? MT_ACTION_BACKWARD_INPUT : MT_ACTION_BACKWARD, backward);
        if (splits && backward >= rank) mt_list_add(&list, MT_ACTION_BACKWARD_WEIGHT, weight++, 0, -1);
    }
    while (splits && weight < total) mt_list_add(&list, MT_ACTION_BACKWARD_WEIGHT, weight++, 0, -1);
    return list.count;
}

/* ==== §11b layouts ================================================================================================ */

int64_t mt_pipeline_layout_count(const char *letters) {
    int64_t count = 1;
    for (const char *at = letters; *at; at++) count += *at == '|';
    return count;
}

void mt_pipeline_layout_build(mt_stage *stages, const mt_options *o) {
    int64_t pp = o->pipeline_model_parallel_size, vp = o->num_virtual_stages_per_pipeline_rank, count = pp * vp;
    int64_t first = o->decoder_first_pipeline_num_layers, last = o->decoder_last_pipeline_num_layers, layer = 0, at = 0;
    bool embedding = o->account_for_embedding_in_pipeline_split, loss = o->account_for_loss_in_pipeline_split;
    int64_t rest = o->num_layers + embedding + loss - first - last, others = pp - (first > 0) - (last > 0);
    const char *letters = o->pipeline_letters;
    memset(stages, 0, (size_t)count * sizeof *stages);
    MT_CHECK(!letters || mt_pipeline_layout_count(letters) <= count);
    for (; letters && *letters; at += *letters++ == '|') stages[at].num_layers += *letters == 't';
    for (int64_t i = 0; i < count && !o->pipeline_letters; i++) {
        bool is_first = i % pp == 0 && first > 0, is_last = i % pp == pp - 1 && last > 0;
        stages[i].num_layers = is_first ? first / vp : is_last ? last / vp : rest / (others * vp);
    }
    stages[0].num_layers -= embedding, stages[count - 1].num_layers -= loss;
    stages[0].embedding = stages[count - 1].loss = true;
    stages[count - 1].num_mtp = o->mtp_num_layers;
    for (int64_t i = 0; i < count; layer += stages[i++].num_layers) stages[i].first_layer = layer;
    MT_CHECK(layer == o->num_layers);
}

mt_schedule mt_schedule_of(const mt_options *o, int64_t micro_batches) {
    mt_schedule s = {.pp = o->pipeline_model_parallel_size,
                     .vp = o->num_virtual_stages_per_pipeline_rank,
                     .micro_batches = micro_batches,
                     .group = o->microbatch_group_size_per_virtual_pipeline_stage};
    s.kind = s.vp > 1 ? MT_SCHEDULE_INTERLEAVED : o->pipeline_schedule;
    return s;
}

/* ==== §12 gradient buckets ======================================================================================== */
/* Data parallelism: every rank of the data group computes its own micro-batches, then all ranks make the same update.
 * Per bucket: one all-reduce of the gradients; or a reduce-scatter of the gradients, an update of one shard per rank,
 * and an all-gather of the parameters. The second moves the same number of bytes, and each rank stores only a shard of
 * AdamW's state (Rajbhandari et al., "ZeRO"). The higher strategies also shard gradients and parameters between uses.
 * Invariants: ranks make the same calls in the same order; streams order all transfers, and the host never waits;
 * padding has zero gradients. */

/* Buckets of one kind have similar sizes and share buffers: two for layers and two for their experts (current and
 * prefetched bucket), one for the larger matrices of the vocabulary. */
typedef enum { MT_BUCKET_LAYER, MT_BUCKET_EXPERTS, MT_BUCKET_VOCABULARY, MT_NUM_BUCKET_KINDS } mt_bucket_kind;

static const int mt_first_buffer[MT_NUM_BUCKET_KINDS + 1] = {0, 2, 4, 5};
static const mt_dtype mt_moment_dtypes[] = {MT_F32, MT_BF16, MT_F16_SCALED, MT_F8_E4M3}; // of mt_optimizer_dtype
static const mt_dtype mt_gradient_dtypes[] = {MT_F32, MT_BF16, MT_F16};
enum { MT_NUM_BUFFERS = 5 };

/* Room for one whole bucket whose values are sharded between uses. */
typedef struct mt_bucket_buffer {
    void *memory;
    int64_t bucket; // the bucket that it holds, -1: none
    int64_t users;  // number of acquires without a release; reused only at 0
    int64_t age;    // time of the last take; the oldest free buffer is reused first
} mt_bucket_buffer;

/* Progress of a bucket in the current step. */
typedef struct mt_bucket_progress {
    mt_bucket_kind kind;     // selects its buffers
    bool needs_gather;       // the optimizer's step changed the shards
    int64_t fp8_version;     // --fp8-param-gather: of the weights that amaxes belong to
    bool gradients_acquired; // between mt_bucket_gradients_acquire and _release
    bool has_gradients;      // from earlier micro-batches of this step
    bool complete;           // the step adds nothing more to its gradients
    bool reduced;            // the reduction over ranks has started
    int64_t reduction;       // buckets with the same number are reduced together
} mt_bucket_progress;

/* State of data parallelism. */
typedef struct mt_sharding {
    mt_strategy strategy;                  // of all trained buckets with more than one rank
    mt_stream *grad_stream, *param_stream; // the model's own without overlap
    bool prefetches;
    mt_bucket_buffer param_buffers[MT_NUM_BUFFERS], grad_buffers[MT_NUM_BUFFERS];
    mt_bucket_progress *progress;                          // [num_buckets]
    bool *has_gradient;                                    // [num_params] of mt_weight: products add to the gradient
    int64_t age;                                           // number of takes; the clock of mt_bucket_buffer.age
    int64_t last_bucket, direction;                        // last acquired bucket; 1: forward order, -1: backward order
    int64_t next_bucket;                                   // to prefetch as soon as a buffer is free; -1: unknown
    const mt_bucket_buffer *reducing[MT_NUM_BUCKET_KINDS]; // the reduction of its gradients may be running
    int64_t gathered_bucket; // its state, gathered by mt_bucket_gather_state, overwrites the gradients
    mt_param_state gathered_state;
} mt_sharding;

/* The layer with this number in the whole model; it must be on this rank. */
static mt_layer *mt_layer_find(mt_model *m, int64_t number) {
    mt_layer *layer = m->layers;
    while (layer->number != number) layer++;
    return layer;
}

/* The mt_weight that points to a parameter. NULL if the parameter continues the previous one: both form one operand. */
static mt_weight *mt_param_weight(mt_model *m, const mt_param *param) {
    if (param->continues) return NULL;
    char *fields = param->layer >= 0 ? (char *)mt_layer_find(m, param->layer) : (char *)&m->outer;
    return (mt_weight *)(void *)(fields + param->field);
}

/* fp8 of this rank's layers. Delayed scaling has one scale for every operand of every linear. */
typedef struct mt_fp8_model {
    mt_fp8 recipe;
    mt_fp8_linear *linears; // [num_linears]
    mt_fp8_key *keys;       // [num_linears]
    int64_t num_linears, history_length;
    float *scale, *history, *largest; // of mt_fp8_scale_args, for all operands: delayed scaling
} mt_fp8_model;

/* The fp8 linear that begins with this parameter, or NULL. */
static const mt_linear *mt_param_fp8_linear(mt_model *m, const mt_param *param) {
    if (!m->fp8 || !param->takes_fp8) return NULL;
    const mt_linear *linear = (const mt_linear *)(const void *)mt_param_weight(m, param);
    return linear->fp8 ? linear : NULL;
}

/* Sets the weights' pointers into a bucket; NULL while its values are sharded. */
static void mt_bucket_bind(mt_model *m, int64_t bucket) {
    const mt_bucket *b = &m->buckets[bucket];
    for (int64_t i = b->first_param; i < b->first_param + b->num_params; i++) {
        const mt_param *param = &m->params[i];
        mt_weight *weight = mt_param_weight(m, param);
        if (!weight) continue;
        weight->w = mt_at(b->params, param->offset, b->dtype);
        weight->dw = mt_at(b->grads, param->offset, MT_F32);
        weight->has_gradient = &m->sharding->has_gradient[i];
        const mt_linear *l = b->num_fp8_amaxes > 0 ? mt_param_fp8_linear(m, param) : NULL;
        if (l) l->fp8->w.data = mt_at(b->fp8_params, param->offset, MT_U8);
        if (param->unit == MT_UNIT_WORDS && bucket == m->head_bucket) m->outer.head.weight = *weight; // tied
    }
    if (m->params[b->first_param + b->num_params - 1].layer >= m->options->num_layers) mt_mtp_share(m);
}

/* True if micro-batches compute gradients in a shared fp32 buffer, which is added to the shard or to main_grads. */
static bool mt_bucket_buffers_gradients(const mt_bucket *b) {
    return b->strategy >= MT_SHARD_GRADS || b->grad_dtype != MT_F32;
}

/* The first elements of the matrices of a bucket that a step takes whole, then its end; returns their number. */
static int64_t mt_bucket_cuts(const mt_model *m, const mt_bucket *b, int64_t *cuts) {
    int64_t count = 0;
    for (const mt_param *param = m->params + b->first_param; param < m->params + b->first_param + b->num_params;
         param++)
        if (param->trained && mt_param_is_matrix(param) && !param->joins) cuts[count++] = param->offset;
    cuts[count] = b->count;
    return count;
}

/* Merges neighbours until `most` ranges of about equal size are left; returns their number. */
static int64_t mt_cuts_merge(int64_t *cuts, int64_t count, int64_t most) {
    int64_t end = cuts[count], at = 0;
    if (count <= most) return count;
    for (int64_t range = 0; range < most; range++) {
        int64_t begin = cuts[range], target = (end - begin) / (most - range), last = count - (most - range - 1);
        do at++;
        while (at < last && cuts[at + 1] - begin - target <= target - (cuts[at] - begin));
        cuts[range + 1] = range + 1 == most ? end : cuts[at];
    }
    return most;
}

/* Gives the ranks of a bucket's group shards that begin and end at matrices. The largest goes to the rank that has the
 * least in the buckets before: loads[size]. A rank has at most one range of each bucket. */
static void mt_bucket_share(mt_model *m, mt_bucket *b, int64_t *loads) {
    int64_t *cuts = mt_malloc((b->num_params + 1) * (int64_t)sizeof *cuts), size = b->group->size;
    int64_t count = mt_cuts_merge(cuts, mt_bucket_cuts(m, b, cuts), size);
    bool *given = mt_calloc(mt_max(count, 1));
    if (count > 0) b->shares = mt_model_calloc(m, size * (int64_t)sizeof *b->shares);
    for (int64_t left = count; left > 0; left--) {
        int64_t range = -1, rank = -1;
        for (int64_t i = 0; i < count; i++)
            if (!given[i] && (range < 0 || cuts[i + 1] - cuts[i] > cuts[range + 1] - cuts[range])) range = i;
        for (int64_t r = 0; r < size; r++)
            if (b->shares[r].count == 0 && (rank < 0 || loads[r] < loads[rank])) rank = r;
        b->shares[rank] = (mt_share){cuts[range], cuts[range + 1] - cuts[range]};
        loads[rank] += b->shares[rank].count, given[range] = true;
    }
    if (count > 0) b->shard_first = b->shares[b->group->rank].first, b->shard_count = b->shares[b->group->rank].count;
    free(cuts), free(given);
}

/* Sizes of buckets, from the parameter table. Parameters are padded to the alignment; a sharded bucket is padded to
 * aligned shards of equal size, unless these must begin and end at matrices. */
static void mt_buckets_size(mt_model *m) {
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        mt_bucket *b = &m->buckets[param->bucket];
        int64_t before = b->count;
        if (b->num_params++ == 0) b->first_param = i;
        b->count = mt_align(param->offset + param->rows * param->cols);
        if (param->weight_decay) b->decay_count = b->count;
        if (param->trained && mt_param_is_matrix(param)) b->matrix_count = b->count;
        if (mt_num_states(param->optimizer) == MT_NUM_STATES) b->v_count += b->count - before;
    }
    int64_t ranks = m->grid->data_context.size, expert_ranks = m->grid->expert_data.size;
    bool two_states = mt_num_states(mt_element_optimizer(m->options)) == MT_NUM_STATES;
    int64_t *loads = mt_calloc((ranks + expert_ranks) * (int64_t)sizeof *loads); // of each group
    for (mt_bucket *b = m->buckets; b < m->buckets + m->num_buckets; b++) {
        int64_t shards = b->strategy == MT_NO_SHARD ? 1 : b->group->size, multiple = shards * MT_PARAM_ALIGNMENT;
        // leading elements with one state: padding behind matrices is updated as other elements are
        int64_t with_one = two_states ? b->count - b->v_count : INT64_MAX;
        b->count = (b->count + multiple - 1) / multiple * multiple, b->shard_count = b->count / shards;
        b->shard_first = shards > 1 ? b->group->rank * b->shard_count : 0;
        bool has_experts = b->group == &m->grid->expert_data;
        if (shards > 1 && b->trained) mt_bucket_share(m, b, loads + has_experts * ranks);
        b->v_count = mt_clamp(b->shard_first + b->shard_count - with_one, 0, b->shard_count);
    }
    free(loads);
}

/* Finds the bucket of every unit. */
static void mt_buckets_find(mt_model *m) {
    bool tied = mt_options_tied(m->options);
    m->word_bucket = m->position_bucket = m->head_bucket = m->output_bucket = -1;
    for (int64_t i = 0; i < m->num_buckets; i++) {
        const mt_param *param = &m->params[m->buckets[i].first_param];
        if (param->unit == MT_UNIT_WORDS) *(m->has_embedding || !tied ? &m->word_bucket : &m->head_bucket) = i;
        if (param->unit == MT_UNIT_POSITIONS) m->position_bucket = i;
        if (param->unit == MT_UNIT_LAYER) mt_layer_find(m, param->layer)->bucket = i;
        if (param->unit == MT_UNIT_EXPERTS) mt_layer_find(m, param->layer)->expert_bucket = i;
        if (param->unit == MT_UNIT_OUTPUT) m->output_bucket = i;
    }
    if (!tied) m->head_bucket = m->output_bucket;
    if (tied && m->has_embedding && m->has_loss) m->head_bucket = m->word_bucket;
}

/* ==== §12a gather and reduce ====================================================================================== */

/* Kind, group, type and strategy of every bucket, before its size is known. */
static void mt_sharding_open(mt_model *m) {
    mt_sharding *s = m->sharding;
    s->strategy = m->plan.train ? m->options->data_parallel_sharding_strategy : MT_NO_SHARD; // generation: none
    s->progress = mt_model_calloc(m, m->num_buckets * (int64_t)sizeof *s->progress);
    s->has_gradient = mt_model_calloc(m, m->num_params * (int64_t)sizeof *s->has_gradient);
    for (const mt_param *param = m->params; param < m->params + m->num_params; param++) {
        mt_bucket *b = &m->buckets[param->bucket];
        mt_bucket_kind *kind = &s->progress[param->bucket].kind;
        bool has_head = param->unit == MT_UNIT_OUTPUT && m->options->untie_embeddings_and_output_weights;
        if (param->unit == MT_UNIT_WORDS || has_head) *kind = MT_BUCKET_VOCABULARY;
        if (param->expert >= 0) *kind = MT_BUCKET_EXPERTS;
        bool shards = param->unit != MT_UNIT_UNTRAINED && (param->trained || s->strategy == MT_SHARD_PARAMS);
        b->group = *kind == MT_BUCKET_EXPERTS ? &m->grid->expert_data : &m->grid->data_context;
        b->trained = param->trained, b->dtype = param->unit == MT_UNIT_UNTRAINED ? MT_F32 : m->dtype;
        b->grad_dtype = b->trained ? mt_gradient_dtypes[m->options->main_grads_dtype] : MT_F32;
        b->strategy = shards && b->group->size > 1 ? s->strategy : MT_NO_SHARD;
        if (mt_param_is_adapter(param) && b->strategy == MT_SHARD_PARAMS) b->strategy = MT_SHARD_GRADS; // small
        m->num_trained_buckets = mt_max(m->num_trained_buckets, b->trained ? param->bucket + 1 : 0);
    }
}

/* Buffers for whole buckets: each has the size of the largest bucket of its kind that needs one. */
static void mt_plan_bucket_buffers(mt_model *m, mt_arena *arena) {
    mt_sharding *s = m->sharding;
    int64_t params[MT_NUM_BUCKET_KINDS] = {0}, grads[MT_NUM_BUCKET_KINDS] = {0};
    for (int64_t i = 0; i < m->num_buckets; i++) {
        const mt_bucket *b = &m->buckets[i];
        mt_bucket_kind kind = s->progress[i].kind;
        int64_t bytes = mt_max(b->count * mt_dtype_size(m->dtype), b->num_fp8_amaxes > 0 ? b->fp8_first + b->count : 0);
        if (b->strategy == MT_SHARD_PARAMS) params[kind] = mt_max(params[kind], bytes);
        m->buckets[i].fp8_amaxes = mt_arena_alloc(arena, b->num_fp8_amaxes * 4);
        if (b->num_fp8_amaxes > 0 && b->strategy != MT_SHARD_PARAMS)
            m->buckets[i].fp8_params = mt_arena_alloc(arena, b->count);
        if (m->plan.train && b->trained && mt_bucket_buffers_gradients(b)) grads[kind] = mt_max(grads[kind], b->count);
    }
    for (int kind = 0; kind < MT_NUM_BUCKET_KINDS; kind++)
        for (int buffer = mt_first_buffer[kind]; buffer < mt_first_buffer[kind + 1]; buffer++) {
            s->param_buffers[buffer] = s->grad_buffers[buffer] = (mt_bucket_buffer){.bucket = -1};
            if (params[kind] > 0) s->param_buffers[buffer].memory = mt_arena_alloc(arena, params[kind]);
            if (grads[kind] > 0) s->grad_buffers[buffer].memory = mt_arena_alloc(arena, grads[kind] * 4);
        }
}

/* Groups neighbours of a kind, from the last, whose gradients are complete first, up to --ddp-bucket-size parameters.
 * Sharded gradients leave their buffer before the next bucket takes it, so their buckets stay alone. */
static void mt_buckets_group(mt_model *m) {
    mt_sharding *s = m->sharding;
    int64_t group[MT_NUM_BUCKET_KINDS], count[MT_NUM_BUCKET_KINDS] = {0}, limit = m->options->ddp_bucket_size;
    for (int64_t i = m->num_trained_buckets - 1; i >= 0; i--) {
        const mt_bucket *b = &m->buckets[i];
        mt_bucket_kind kind = s->progress[i].kind;
        if (count[kind] == 0 || count[kind] + b->count > limit || b->strategy >= MT_SHARD_GRADS)
            group[kind] = i, count[kind] = 0;
        count[kind] += b->count;
        s->progress[i].reduction = group[kind];
    }
}

/* After allocation: zeroes all buckets and creates the streams for overlap. */
static void mt_sharding_start(mt_model *m) {
    mt_sharding *s = m->sharding;
    const mt_options *o = m->options;
    bool alone = true, shares = false;
    for (int64_t i = 0; i < m->num_buckets && m->plan.train; i++) {
        alone &= m->buckets[i].group->size == 1;
        shares |= m->buckets[i].strategy != MT_NO_SHARD;
    }
    s->grad_stream = s->param_stream = m->stream;
    if (!alone && o->overlap_grad_reduce) s->grad_stream = m->ops->stream_create(NULL, 0, o->deterministic_mode);
    s->prefetches = shares && o->overlap_param_gather;
    if (s->prefetches) s->param_stream = m->ops->stream_create(NULL, 0, o->deterministic_mode);
    s->gathered_bucket = s->last_bucket = s->next_bucket = -1;
    mt_buckets_group(m);
    for (int64_t i = 0; i < m->num_buckets; i++) {
        mt_bucket *b = &m->buckets[i];
        if (b->params) m->ops->memory_zero(b->params, b->count * mt_dtype_size(b->dtype), m->stream);
        if (b->grads) m->ops->memory_zero(b->grads, b->count * 4, m->stream);
        for (int state = 0; state < MT_NUM_STATES; state++) {
            mt_shard shard = mt_bucket_shard(m, i, (mt_param_state)state);
            if (shard.data) mt_shard_write(m, &shard, 0, NULL, b->count);
        }
        mt_bucket_bind(m, i);
    }
    int64_t amax_bytes = 2 * m->num_params * (int64_t)sizeof *m->state_amax;
    if (m->state_amax) m->ops->memory_zero(m->state_amax, amax_bytes, m->stream);
}

/* The buffer that holds a bucket, or NULL. */
static mt_bucket_buffer *mt_buffer_find(mt_bucket_buffer *buffers, int64_t bucket) {
    for (int i = 0; i < MT_NUM_BUFFERS; i++)
        if (buffers[i].bucket == bucket) return &buffers[i];
    return NULL;
}

/* The oldest buffer of the bucket's kind without users, or NULL. */
static mt_bucket_buffer *mt_buffer_free(const mt_model *m, mt_bucket_buffer *buffers, int64_t bucket) {
    mt_bucket_kind kind = m->sharding->progress[bucket].kind;
    mt_bucket_buffer *oldest = NULL;
    for (int i = mt_first_buffer[kind]; i < mt_first_buffer[kind + 1]; i++)
        if (buffers[i].users == 0 && (!oldest || buffers[i].age < oldest->age)) oldest = &buffers[i];
    return oldest;
}

static mt_bucket_buffer *mt_buffer_take(mt_model *m, mt_bucket_buffer *buffers, int64_t bucket) {
    mt_bucket_buffer *buffer = mt_buffer_free(m, buffers, bucket);
    MT_CHECK(buffer);
    buffer->bucket = bucket, buffer->age = ++m->sharding->age;
    return buffer;
}

/* ---- parameters */

/* --fp8-param-gather: quantizes this rank's part of a linear's weight into the bucket's weights in fp8; without these:
 * finds the largest values of its blocks. */
static mt_fp8_shard_args mt_shard_quantize(mt_model *m, const mt_bucket *b, const mt_param *param,
                                           uint8_t *fp8_params) {
    const mt_linear *l = mt_param_fp8_linear(m, param);
    if (!l) return (mt_fp8_shard_args){0};
    const mt_fp8_linear *f = l->fp8;
    mt_fp8_shard_args a = {.w = f->w, .count = mt_max(l->num_experts, 1), .R = l->N, .C = l->K};
    int64_t at = param->offset, end = mt_min(at + a.count * l->N * l->K, b->shard_first + b->shard_count);
    a.w.data = mt_at(fp8_params, at, MT_U8);
    a.first = mt_max(b->shard_first - at, 0), a.n = mt_max(end - at - a.first, 0);
    if (a.n > 0) a.x = mt_at(b->param_shard, at + a.first - b->shard_first, b->dtype);
    if (f->recipe->delayed) a.scale = f->scale + MT_FP8_W;
    a.amax = f->recipe->delayed ? f->amax + MT_FP8_W : b->fp8_amaxes + f->first_amax;
    m->ops->fp8_shard_quantize(&a, b->dtype, m->sharding->param_stream);
    return a;
}

/* Sums over the ranks the bf16 parameters [begin, end) of a bucket, zero on all ranks but their owner. */
static void mt_bucket_gather_run(mt_model *m, const mt_bucket *b, char *params, int64_t begin, int64_t end) {
    mt_stream *stream = m->sharding->param_stream;
    int64_t size = mt_dtype_size(b->dtype), first = mt_min(mt_max(b->shard_first, begin), end);
    int64_t last = mt_min(mt_max(b->shard_first + b->shard_count, begin), end);
    if (first > begin) m->ops->memory_zero(params + begin * size, (first - begin) * size, stream);
    if (end > last) m->ops->memory_zero(params + last * size, (end - last) * size, stream);
    if (last > first && b->strategy == MT_SHARD_PARAMS)
        m->ops->memory_copy(params + first * size, (char *)b->param_shard + (first - b->shard_first) * size,
                            (last - first) * size, stream);
    m->ops->all_reduce(params + begin * size, end - begin, MT_SUM, b->dtype, b->group, stream);
}

/* whole[count] of a bucket = the shards of all ranks. This rank's is `own`, perhaps in its place in `whole`. */
static void mt_bucket_collect(mt_model *m, const mt_bucket *b, void *whole, const void *own, mt_dtype dtype,
                              mt_stream *stream) {
    void *place = mt_at(whole, b->shard_first, dtype);
    if (!b->shares) {
        m->ops->all_gather(whole, own, b->shard_count, dtype, b->group, stream);
        return;
    }
    if (own != place && b->shard_count > 0)
        m->ops->memory_copy(place, own, b->shard_count * mt_dtype_size(dtype), stream);
    for (int rank = 0; rank < b->group->size; rank++)
        if (b->shares[rank].count > 0)
            m->ops->broadcast(mt_at(whole, b->shares[rank].first, dtype), b->shares[rank].count, dtype, rank, b->group,
                              stream);
}

/* sum[shard_count] = this rank's shard of the sum over ranks of whole[count]; it may be in its place there. */
static void mt_bucket_scatter_sum(mt_model *m, const mt_bucket *b, void *sum, const void *whole, mt_dtype dtype,
                                  mt_stream *stream) {
    if (!b->shares) {
        m->ops->reduce_scatter(sum, whole, b->shard_count, dtype, b->group, stream);
        return;
    }
    for (int rank = 0; rank < b->group->size; rank++)
        if (b->shares[rank].count > 0)
            m->ops->reduce(sum, mt_at(whole, b->shares[rank].first, dtype), b->shares[rank].count, dtype, rank,
                           b->group, stream);
}

/* Starts the all-gather of a bucket's parameters, unless they are current or already on their way. */
static void mt_bucket_gather(mt_model *m, int64_t bucket) {
    mt_sharding *s = m->sharding;
    mt_bucket *b = &m->buckets[bucket];
    void *whole = b->params;
    if (b->strategy == MT_SHARD_PARAMS) {
        if (mt_buffer_find(s->param_buffers, bucket)) return;
        whole = mt_buffer_take(m, s->param_buffers, bucket)->memory;
        mt_wait_stream(m, s->param_stream, m->stream); // the buffer's last user may be reading
    } else if (!s->progress[bucket].needs_gather) {
        return;
    }
    s->progress[bucket].needs_gather = false;
    mt_bucket_collect(m, b, whole, b->param_shard, m->dtype, s->param_stream);
}

/* The same for products. --fp8-param-gather: gathers the weights of linears in fp8, the other parameters in bf16. */
static void mt_bucket_gather_products(mt_model *m, int64_t bucket) {
    mt_sharding *s = m->sharding;
    const mt_bucket *b = &m->buckets[bucket];
    if (b->num_fp8_amaxes == 0) mt_bucket_gather(m, bucket);
    if (b->num_fp8_amaxes == 0) return;
    int64_t *version = &s->progress[bucket].fp8_version, rest = 0; // begin of the parameters after the last fp8 linear
    mt_bucket_buffer *buffer = mt_buffer_find(s->param_buffers, bucket);
    bool stale = *version != m->fp8->recipe.version, needs_buffer = b->strategy == MT_SHARD_PARAMS && !buffer;
    if (!stale && !needs_buffer) return;
    if (needs_buffer) buffer = mt_buffer_take(m, s->param_buffers, bucket);
    char *params = buffer ? buffer->memory : b->params;
    uint8_t *fp8_params = buffer ? (uint8_t *)params + b->fp8_first : b->fp8_params;
    mt_wait_stream(m, s->param_stream, m->stream);
    if (m->reader) mt_wait_stream(m, s->param_stream, m->reader); // the sums below write this rank's parameters again
    if (stale && !m->fp8->recipe.delayed) {
        for (int64_t i = 0; i < b->num_params; i++) mt_shard_quantize(m, b, &m->params[b->first_param + i], NULL);
        m->ops->all_reduce(b->fp8_amaxes, b->num_fp8_amaxes, MT_MAX, MT_F32, b->group, s->param_stream);
    }
    *version = m->fp8->recipe.version;
    for (int64_t i = b->first_param; i < b->first_param + b->num_params; i++) {
        mt_fp8_shard_args a = mt_shard_quantize(m, b, &m->params[i], fp8_params);
        int64_t at = a.count > 0 ? m->params[i].offset : rest;
        if (at > rest) mt_bucket_gather_run(m, b, params, rest, at);
        rest = at + a.count * a.R * a.C;
    }
    if (b->count > rest) mt_bucket_gather_run(m, b, params, rest, b->count);
    mt_bucket_collect(m, b, fp8_params, fp8_params + b->shard_first, MT_U8, s->param_stream);
}

/* True if a forward and a backward acquire this bucket; adapters, the first buckets, are not acquired. */
static bool mt_bucket_is_acquired(const mt_model *m, int64_t bucket) {
    int64_t first = m->options->lora_rank > 0 ? m->num_trained_buckets : 0, end = m->num_buckets;
    return bucket >= first && bucket < end - (m->params[m->num_params - 1].unit == MT_UNIT_UNTRAINED);
}

/* Finds the bucket to prefetch after this one. Buckets are acquired in ascending order in a forward and in descending
 * order in a backward; the order reverses at both ends. A jump, as to a tied embedding, gives no direction. */
static void mt_bucket_follow(mt_model *m, int64_t bucket) {
    mt_sharding *s = m->sharding;
    int64_t distance = s->last_bucket < 0 ? 0 : bucket - s->last_bucket;
    if (distance == 1 || distance == -1) s->direction = distance;
    if (distance == 0 && !mt_bucket_is_acquired(m, bucket - 1)) s->direction = 1;
    if (distance == 0 && !mt_bucket_is_acquired(m, bucket + 1)) s->direction = -1;
    s->last_bucket = bucket;
    s->next_bucket = s->direction == 0 || distance > 1 || distance < -1 ? -1 : bucket + s->direction;
}

/* Starts to gather the next bucket, and the one after it if these are a layer and its experts. */
static void mt_buckets_prefetch(mt_model *m) {
    mt_sharding *s = m->sharding;
    int64_t first = s->next_bucket;
    for (int64_t next = first; s->prefetches && mt_bucket_is_acquired(m, next); next += s->direction) {
        const mt_bucket *b = &m->buckets[next], *first_bucket = &m->buckets[first];
        bool same_layer = m->params[b->first_param].layer == m->params[first_bucket->first_param].layer;
        if (next != first && (!same_layer || s->progress[next].kind == s->progress[first].kind)) return;
        if (b->strategy != MT_NO_SHARD && mt_buffer_free(m, s->param_buffers, next)) mt_bucket_gather_products(m, next);
    }
}

void mt_bucket_acquire(mt_model *m, int64_t bucket) {
    mt_sharding *s = m->sharding;
    MT_CHECK(!(m->resting_parts & 1u << MT_PART_PARAMS));
    if (s->strategy == MT_NO_SHARD) return;
    mt_strategy strategy = m->buckets[bucket].strategy;
    if (strategy != MT_NO_SHARD) mt_bucket_gather_products(m, bucket);
    mt_wait_stream(m, m->stream, s->param_stream); // before the prefetch below, for which it does not wait
    if (strategy == MT_SHARD_PARAMS) {
        mt_bucket_buffer *buffer = mt_buffer_find(s->param_buffers, bucket);
        buffer->users++;
        m->buckets[bucket].params = buffer->memory;
        m->buckets[bucket].fp8_params = (uint8_t *)buffer->memory + m->buckets[bucket].fp8_first;
        mt_bucket_bind(m, bucket);
    }
    mt_bucket_follow(m, bucket);
    mt_buckets_prefetch(m);
}

void mt_bucket_release(mt_model *m, int64_t bucket) {
    if (m->buckets[bucket].strategy != MT_SHARD_PARAMS ||
        --mt_buffer_find(m->sharding->param_buffers, bucket)->users > 0)
        return;
    m->buckets[bucket].params = m->buckets[bucket].fp8_params = NULL; // the buffer keeps them for the next acquire
    mt_bucket_bind(m, bucket);
    mt_buckets_prefetch(m);
}

/* Gathers all parameters that a step outdated, for readers outside a step. */
static void mt_params_gather_all(mt_model *m) {
    if (m->sharding->strategy == MT_NO_SHARD || m->sharding->strategy == MT_SHARD_PARAMS) return;
    for (int64_t i = 0; i < m->num_buckets; i++)
        if (m->buckets[i].strategy != MT_NO_SHARD) mt_bucket_gather(m, i);
    mt_wait_stream(m, m->stream, m->sharding->param_stream);
}

/* Call before parameters or optimizer state are written (always on m->stream): waits for the reader's stream. A gather
 * in the model's type needs no such wait: it leaves this rank's own shard unchanged. */
static void mt_wait_reader(mt_model *m) {
    if (m->reader) mt_wait_stream(m, m->stream, m->reader);
    m->reader = NULL;
}

void mt_model_set_reader(mt_model *m, mt_stream *reader) {
    if (reader) mt_wait_reader(m); // the previous reader
    m->reader = reader;
}

/* Call before parameters are set and after an update: invalidates gathered copies. */
static void mt_params_changed(mt_model *m) {
    mt_sharding *s = m->sharding;
    mt_wait_reader(m);
    mt_wait_stream(m, m->stream, s->param_stream);
    for (int i = 0; i < MT_NUM_BUFFERS; i++) s->param_buffers[i].bucket = -1;
    s->gathered_bucket = -1;
    if (m->fp8) m->fp8->recipe.version++;
}

/* ---- gradients */

/* Discards a bucket's gradients: zeroes padding and gradients that only accumulate; products overwrite the others. */
static void mt_bucket_zero_gradients(mt_model *m, const mt_bucket *b) {
    int64_t start = 0; // of the range to zero
    memset(m->sharding->has_gradient + b->first_param, false, (size_t)b->num_params);
    for (int64_t i = b->first_param; i < b->first_param + b->num_params; i++) {
        const mt_param *param = &m->params[i];
        if (!param->is_linear) continue;
        if (param->offset > start) m->ops->memory_zero(b->grads + start, (param->offset - start) * 4, m->stream);
        start = param->offset + param->rows * param->cols;
    }
    if (b->count > start) m->ops->memory_zero(b->grads + start, (b->count - start) * 4, m->stream);
}

/* The bucket that a backward through this one trains: itself or that of its adapters; -1: none. */
static int64_t mt_bucket_trained(const mt_model *m, int64_t bucket) {
    const mt_param *of = &m->params[m->buckets[bucket].first_param], *param;
    int64_t i = m->buckets[bucket].trained ? bucket : m->num_trained_buckets - 1;
    for (; i >= 0 && i != bucket; i--) {
        param = &m->params[m->buckets[i].first_param];
        if (param->layer == of->layer && (param->expert < 0) == (of->expert < 0)) break;
    }
    return i;
}

void mt_bucket_gradients_acquire(mt_model *m, int64_t bucket) {
    mt_sharding *s = m->sharding;
    bucket = mt_bucket_trained(m, bucket);
    if (bucket < 0) return;
    mt_bucket *b = &m->buckets[bucket];
    mt_bucket_progress *progress = &s->progress[bucket];
    if (progress->gradients_acquired) return;
    progress->gradients_acquired = true;
    if (mt_bucket_buffers_gradients(b)) {
        mt_bucket_buffer *buffer = mt_buffer_take(m, s->grad_buffers, bucket);
        buffer->users++;
        if (buffer == s->reducing[progress->kind]) mt_wait_stream(m, m->stream, s->grad_stream);
        b->grads = buffer->memory;
        mt_bucket_bind(m, bucket);
    }
    if (!progress->has_gradients || mt_bucket_buffers_gradients(b)) mt_bucket_zero_gradients(m, b);
}

/* Adds x[n] to the gradients of earlier micro-batches, or overwrites those of the last step. */
static void mt_gradients_add(mt_model *m, const mt_bucket *b, void *sum, const float *x, int64_t n, bool adds,
                             mt_stream *stream) {
    if (adds)
        m->ops->accumulate(sum, x, n, b->grad_dtype, stream);
    else
        m->ops->convert(sum, b->grad_dtype, x, MT_F32, n, stream);
}

/* Starts the reduction of whole gradients over ranks: of a bucket, or of buckets first .. end - 1, which are neighbours
 * in memory. */
static void mt_bucket_reduce(mt_model *m, int64_t first, int64_t end) {
    mt_sharding *s = m->sharding;
    mt_bucket *b = &m->buckets[first];
    bool shards = b->strategy >= MT_SHARD_GRADS, adds = shards && s->progress[first].has_gradients;
    bool in_place = !adds && (!shards || b->grad_dtype == MT_F32); // else added to the shard, where types differ too
    mt_dtype dtype = shards ? MT_F32 : b->grad_dtype;
    int64_t count = 0;
    for (int64_t i = first; i < end; i++) {
        const mt_bucket *part = &m->buckets[i];
        const void *own = shards ? part->grads : part->main_grads;
        if (m->reruns) m->ops->squared_norm(m->numbers->own + 1, own, part->count, dtype, m->stream);
        s->progress[i].reduced = true;
        count += part->count;
    }
    mt_wait_stream(m, s->grad_stream, m->stream);
    if (b->strategy == MT_NO_SHARD) {
        m->ops->all_reduce(b->main_grads, count, MT_SUM, dtype, b->group, s->grad_stream);
        return;
    }
    void *sum = in_place ? b->grad_shard : b->grads + b->shard_first;
    mt_bucket_scatter_sum(m, b, sum, shards ? b->grads : b->main_grads, dtype, s->grad_stream);
    if (!in_place && b->shard_count > 0)
        mt_gradients_add(m, b, b->grad_shard, sum, b->shard_count, adds, s->grad_stream);
}

/* Starts the reduction of all buckets that are reduced together with this one, once all are complete. */
static void mt_bucket_reduce_group(mt_model *m, int64_t bucket) {
    const mt_bucket_progress *progress = m->sharding->progress;
    int64_t group = progress[bucket].reduction, size = mt_dtype_size(m->buckets[bucket].grad_dtype);
    for (int64_t i = 0; i <= group; i++)
        if (progress[i].reduction == group && !progress[i].complete) return;
    for (int64_t i = 0, end; i <= group; i = end) {
        end = i + 1;
        if (progress[i].reduction != group) continue;
        while (end <= group && progress[end].reduction == group && m->buckets[i].strategy == MT_NO_SHARD &&
               m->buckets[end].main_grads == (char *)m->buckets[end - 1].main_grads + m->buckets[end - 1].count * size)
            end++;
        mt_bucket_reduce(m, i, end);
    }
}

void mt_bucket_gradients_release(mt_model *m, int64_t bucket, bool last) {
    mt_sharding *s = m->sharding;
    bucket = mt_bucket_trained(m, bucket);
    if (bucket < 0) return;
    mt_bucket_progress *progress = &s->progress[bucket];
    mt_bucket *b = &m->buckets[bucket];
    bool shards = b->strategy >= MT_SHARD_GRADS;
    progress->complete |= last;
    if (shards) {
        if (s->reducing[progress->kind]) { // the next bucket of this kind takes its buffer
            mt_wait_stream(m, m->stream, s->grad_stream);
            memset(s->reducing, 0, sizeof s->reducing);
        }
        mt_bucket_reduce(m, bucket, bucket + 1);
    } else if (mt_bucket_buffers_gradients(b)) {
        mt_gradients_add(m, b, b->main_grads, b->grads, b->count, progress->has_gradients, m->stream);
    }
    if (mt_bucket_buffers_gradients(b)) {
        mt_bucket_buffer *buffer = mt_buffer_find(s->grad_buffers, bucket);
        buffer->users = 0, buffer->bucket = -1;
        if (shards) s->reducing[progress->kind] = buffer;
        b->grads = NULL;
        mt_bucket_bind(m, bucket);
    }
    if (!shards && last && m->options->overlap_grad_reduce) mt_bucket_reduce_group(m, bucket);
    progress->gradients_acquired = false, progress->has_gradients = true;
}

/* Starts a step: no bucket has gradients. */
static void mt_gradients_begin(mt_model *m) {
    mt_sharding *s = m->sharding;
    s->gathered_bucket = -1;
    for (int64_t i = 0; i < m->num_trained_buckets; i++) {
        s->progress[i].has_gradients = s->progress[i].complete = s->progress[i].reduced = false;
        if (!mt_splits_backward(m)) continue;
        // a split backward reaches a bucket's weights in any order, so all products accumulate
        m->ops->memory_zero(m->buckets[i].grads, m->buckets[i].count * 4, m->stream);
        memset(s->has_gradient + m->buckets[i].first_param, true, (size_t)m->buckets[i].num_params);
        s->progress[i].has_gradients = true;
    }
}

/* Completes all reductions: every rank has the sum over ranks of its shard, or identical bits of the whole bucket. */
static void mt_gradients_finish(mt_model *m) {
    mt_sharding *s = m->sharding;
    for (int64_t i = 0; i < m->num_trained_buckets; i++) {
        MT_CHECK(s->progress[i].has_gradients && !s->progress[i].gradients_acquired);
        s->progress[i].complete = true;
    }
    for (int64_t i = 0; i < m->num_trained_buckets; i++)
        if (!s->progress[i].reduced) mt_bucket_reduce_group(m, i);
    mt_wait_stream(m, m->stream, s->grad_stream);
    mt_wait_stream(m, m->stream, s->param_stream); // a prefetch may be reading shards that the update writes
}

/* This rank's part of the gradients of parameters first .. last: elements [*begin, *begin + result) of grad_shard. */
static int64_t mt_gradient_run(const mt_model *m, const mt_param *first, const mt_param *last, int64_t *begin) {
    const mt_bucket *b = &m->buckets[first->bucket];
    int64_t end = mt_min(last->offset + last->rows * last->cols - b->shard_first, b->shard_count);
    *begin = mt_max(first->offset - b->shard_first, 0);
    return mt_max(end - *begin, 0);
}

/* The group whose ranks hold partial sums of a parameter's gradient, or NULL. */
static const mt_group *mt_gradient_group(const mt_model *m, const mt_param *param) {
    if (!param->trained) return NULL;
    if (param->gradient == MT_GRADIENT_REPLICA) return &m->grid->kv_replicas;
    if (param->gradient == MT_GRADIENT_KEY_REPLICA) return &m->grid->key_replicas;
    if (param->expert >= 0 && param->gradient == MT_GRADIENT_HEADS)
        return m->grid->expert_tensor.size > 1 ? &m->grid->expert_tensor : NULL;
    bool in_parts =
        param->gradient == MT_GRADIENT_HEADS || (param->gradient == MT_GRADIENT_ROWS && m->tp.sequence_parallel);
    return in_parts && m->grid->tensor.size > 1 ? &m->grid->tensor : NULL;
}

/* Sums gradients over the ranks of one model replica: parameters that all tensor-parallel ranks hold and apply to their
 * own rows or heads, and the copies of the word embedding on the first and last stage. Adjacent parameters share one
 * all-reduce. */
static void mt_gradients_reduce_model(mt_model *m) {
    for (int64_t i = 0, next; i < m->num_params; i = next) {
        const mt_param *param = &m->params[i];
        const mt_group *group = mt_gradient_group(m, param);
        int64_t begin, count;
        for (next = i + 1; next < m->num_params; next++)
            if (m->params[next].bucket != param->bucket || mt_gradient_group(m, &m->params[next]) != group) break;
        if (!group || (count = mt_gradient_run(m, param, &m->params[next - 1], &begin)) == 0) continue;
        const mt_bucket *b = &m->buckets[param->bucket];
        void *run = mt_at(b->grad_shard, begin, b->grad_dtype);
        m->ops->all_reduce(run, count, MT_SUM, b->grad_dtype, group, m->stream);
    }
    int64_t word = mt_word_bucket(m);
    bool has_copies = mt_options_tied(m->options) || m->options->mtp_num_layers > 0;
    if (has_copies && m->grid->embedding.size > 1 && word >= 0 && m->buckets[word].trained)
        m->ops->all_reduce(m->buckets[word].grad_shard, m->buckets[word].shard_count, MT_SUM,
                           m->buckets[word].grad_dtype, &m->grid->embedding, m->stream);
}

/* After the optimizer's step: gathers parameters now, or with prefetching each bucket before its first use. */
static void mt_params_finish(mt_model *m) {
    mt_sharding *s = m->sharding;
    mt_params_changed(m);
    bool adapts = m->options->lora_rank > 0, now = adapts || !s->prefetches; // adapters are not acquired
    if (s->strategy == MT_NO_SHARD || (s->strategy == MT_SHARD_PARAMS && !adapts)) return;
    mt_wait_stream(m, s->param_stream, m->stream);
    for (int64_t i = 0; i < m->num_buckets; i++) {
        mt_strategy strategy = m->buckets[i].strategy;
        s->progress[i].needs_gather = strategy == MT_SHARD_OPTIM || strategy == MT_SHARD_GRADS;
        if (s->progress[i].needs_gather && now) mt_bucket_gather_products(m, i);
    }
    if (now) mt_wait_stream(m, m->stream, s->param_stream);
}

mt_dtype mt_state_dtype(const mt_model *m, mt_param_state state) {
    if (state == MT_STATE_EXP_AVG) return mt_moment_dtypes[m->options->exp_avg_dtype];
    if (state == MT_STATE_EXP_AVG_SQ) return mt_moment_dtypes[m->options->exp_avg_sq_dtype];
    if (state == MT_STATE_MASTER && m->options->main_params_dtype == MT_MAIN_PARAMS_FP16) return MT_F16_SCALED;
    return state == MT_STATE_WEIGHTS ? m->dtype : MT_F32;
}

/* Bytes of a row of a layer's indexer_cache; 0: it has no indexer. */
static int64_t mt_indexer_key_bytes(const mt_model *m, int64_t layer) {
    mt_layer_kind kind = m->layers[layer].kind;
    bool has_indexer = kind.mixer == MT_MIXER_SPARSE_ATTENTION && !kind.shares_indices;
    return has_indexer ? m->options->dsa_indexer_head_dim * mt_dtype_size(m->dtype) : 0;
}

/* Memory of the parts that may rest: this rank's parameters, gradients and the optimizer's states, by bucket; and the
 * cache. */
static void mt_plan_buckets(mt_model *m) {
    const mt_options *o = m->options;
    mt_arena *arena = &m->parts[MT_PART_PARAMS], *grads = &m->parts[MT_PART_GRADS];
    mt_arena *optimizer = &m->parts[MT_PART_OPTIMIZER], *cache = &m->parts[MT_PART_CACHE];
    for (mt_bucket *b = m->buckets; b < m->buckets + m->num_buckets; b++) {
        int64_t size = mt_dtype_size(b->dtype);
        if (b->strategy < MT_SHARD_PARAMS) b->params = mt_arena_alloc(arena, b->count * size);
        b->param_shard = b->strategy < MT_SHARD_PARAMS ? mt_at(b->params, b->shard_first, b->dtype)
                                                       : mt_arena_alloc(arena, b->shard_count * size);
        if (!m->plan.train || !b->trained) continue;
        size = mt_dtype_size(b->grad_dtype);
        if (b->strategy < MT_SHARD_GRADS) b->main_grads = mt_arena_alloc(grads, b->count * size);
        if (!mt_bucket_buffers_gradients(b)) b->grads = b->main_grads;
        b->grad_shard = b->strategy < MT_SHARD_GRADS ? mt_at(b->main_grads, b->shard_first, b->grad_dtype)
                                                     : mt_arena_alloc(grads, b->shard_count * size);
        mt_arena *from = b->on_host ? &m->host : optimizer;
        if (m->dtype != MT_F32)
            b->master = mt_arena_alloc(from, b->shard_count * mt_dtype_size(mt_state_dtype(m, MT_STATE_MASTER)));
        b->m = mt_arena_alloc(from, b->shard_count * mt_dtype_size(mt_state_dtype(m, MT_STATE_EXP_AVG)));
        if (b->v_count > 0)
            b->v = mt_arena_alloc(from, b->v_count * mt_dtype_size(mt_state_dtype(m, MT_STATE_EXP_AVG_SQ)));
    }
    bool has_scales = o->main_params_dtype != MT_MAIN_PARAMS_FP32 || o->exp_avg_dtype >= MT_OPTIMIZER_FP16 ||
                      o->exp_avg_sq_dtype >= MT_OPTIMIZER_FP16;
    if (m->plan.train && has_scales)
        m->state_amax = mt_arena_alloc(optimizer, 2 * m->num_params * (int64_t)sizeof *m->state_amax);
    for (int64_t layer = 0; layer < m->num_layers && m->plan.cache_rows > 0; layer++) {
        int64_t heads_bytes = m->plan.cache_rows * m->layers[layer].G * mt_dtype_size(m->dtype);
        mt_mixer_kind mixer = m->layers[layer].kind.mixer;
        if (!mt_mixer_attends(mixer)) {
            mt_state_sizes z = mt_state_sizes_of(m);
            int64_t states = mixer == MT_MIXER_NONE ? 0 : 2 * mt_cache_slots(&m->plan); // running, then kept
            m->rule_states[layer] = mt_arena_alloc(cache, states * z.rule * 4);
            m->conv_states[layer] = mt_arena_alloc(cache, states * z.conv * 4);
            continue;
        }
        m->k_cache[layer] = mt_arena_alloc(cache, heads_bytes * m->D);
        m->v_cache[layer] = mt_arena_alloc(cache, heads_bytes * m->Dv);
        m->indexer_cache[layer] = mt_arena_alloc(cache, m->plan.cache_rows * mt_indexer_key_bytes(m, layer));
    }
    m->bytes[MT_PLAN_WEIGHTS] = arena->used, m->bytes[MT_PLAN_GRADIENTS] = grads->used;
    m->bytes[MT_PLAN_OPTIMIZER] = optimizer->used, m->bytes[MT_PLAN_CACHE] = cache->used;
}

/* ==== §12b access to sharded values =============================================================================== */
/* Initialisation and checkpoints work on whole parameters; these functions read and write this rank's part. */

const mt_bucket *mt_bucket_get(const mt_model *m, int64_t bucket) {
    return &m->buckets[bucket];
}

mt_shard mt_bucket_shard(const mt_model *m, int64_t bucket, mt_param_state state) {
    const mt_bucket *b = &m->buckets[bucket];
    MT_CHECK(!(m->resting_parts & (1u << MT_PART_PARAMS | (state != MT_STATE_WEIGHTS) << MT_PART_OPTIMIZER)));
    void *states[MT_NUM_STATES] = {NULL, b->master, b->m, b->v};
    if (state == MT_STATE_EXP_AVG_SQ)
        return (mt_shard){b->v, b->shard_first + b->shard_count - b->v_count, b->v_count, mt_state_dtype(m, state)};
    if (state != MT_STATE_WEIGHTS && (state != MT_STATE_MASTER || m->dtype != MT_F32 || !b->trained))
        return (mt_shard){states[state], b->shard_first, b->shard_count, mt_state_dtype(m, state)};
    if (b->strategy == MT_SHARD_PARAMS) return (mt_shard){b->param_shard, b->shard_first, b->shard_count, b->dtype};
    return (mt_shard){b->params, 0, b->count, b->dtype};
}

void mt_shard_write(mt_model *m, const mt_shard *shard, int64_t at, const void *from, int64_t n) {
    int64_t begin = mt_max(at, shard->first), end = mt_min(at + n, shard->first + shard->count);
    int64_t size = mt_dtype_size(shard->dtype);
    if (begin >= end) return;
    mt_params_changed(m);
    void *to = (char *)shard->data + (begin - shard->first) * size;
    if (from)
        m->ops->memory_copy(to, (const char *)from + (begin - at) * size, (end - begin) * size, m->stream);
    else
        m->ops->memory_zero(to, (end - begin) * size, m->stream);
}

void mt_param_part(const mt_param *param, const mt_shard *shard, int64_t *begin, int64_t *end) {
    *begin = mt_max(shard->first - param->offset, 0);
    *end = mt_min(shard->first + shard->count - param->offset, param->rows * param->cols);
}

void mt_state_write(mt_model *m, const mt_param *param, mt_param_state state, const float *values) {
    mt_shard shard = mt_bucket_shard(m, param->bucket, state);
    int64_t begin, end;
    mt_param_part(param, &shard, &begin, &end);
    float amax = mt_amax(values, end - begin);
    void *codes = mt_malloc((end - begin) * mt_dtype_size(shard.dtype));
    mt_state_store(codes, 0, values, end - begin, shard.dtype, amax);
    mt_shard_write(m, &shard, param->offset + begin, codes, end - begin);
    mt_copy_wait(m, &m->state_amax[param - m->params][state - MT_STATE_MASTER], &amax, sizeof amax);
    free(codes);
}

void mt_state_read(mt_model *m, const mt_param *param, mt_param_state state, int64_t at, float *values, int64_t n) {
    mt_shard shard = mt_bucket_shard(m, param->bucket, state);
    int64_t size = mt_dtype_size(shard.dtype), first = param->offset + at - shard.first;
    float amax = 0, (*all)[3] = m->state_amax + (param - m->params);
    void *codes = mt_malloc(n * size);
    if (mt_state_has_scale(shard.dtype))
        m->ops->memory_copy(&amax, &(*all)[state - MT_STATE_MASTER], sizeof amax, m->stream);
    mt_copy_wait(m, codes, (const char *)shard.data + first * size, n * size);
    mt_state_load(values, codes, 0, n, shard.dtype, amax);
    free(codes);
}

const void *mt_bucket_gather_state(mt_model *m, int64_t bucket, mt_param_state state) {
    mt_sharding *s = m->sharding;
    mt_bucket *b = &m->buckets[bucket];
    mt_shard shard = mt_bucket_shard(m, bucket, state);
    MT_CHECK(!mt_state_has_scale(shard.dtype) && (state != MT_STATE_EXP_AVG_SQ || b->matrix_count == 0));
    if (state == MT_STATE_WEIGHTS || (state == MT_STATE_MASTER && m->dtype == MT_F32)) {
        if (b->strategy != MT_NO_SHARD) mt_bucket_gather(m, bucket);
        mt_wait_stream(m, m->stream, s->param_stream);
        return b->strategy == MT_SHARD_PARAMS ? mt_buffer_find(s->param_buffers, bucket)->memory : b->params;
    }
    if (b->strategy == MT_NO_SHARD) return shard.data;
    int buffer = mt_first_buffer[s->progress[bucket].kind];
    void *whole = mt_bucket_buffers_gradients(b) ? s->grad_buffers[buffer].memory : b->grads;
    if (s->gathered_bucket == bucket && s->gathered_state == state) return whole;
    void *own = mt_at(whole, b->shard_first, shard.dtype);
    if (b->shard_count > 0)
        m->ops->memory_copy(mt_at(whole, shard.first, shard.dtype), shard.data,
                            shard.count * mt_dtype_size(shard.dtype),
                            m->stream); // from the host too
    mt_bucket_collect(m, b, whole, own, shard.dtype, m->stream);
    s->gathered_bucket = bucket, s->gathered_state = state;
    return whole;
}

/* ==== §13 optimizer =============================================================================================== */

/* A decay's factor of lr - min_lr: 1 at ratio 0. */
static double mt_decay_coefficient(mt_wsd_decay_style style, double ratio) {
    if (style == MT_WSD_LINEAR) return 1 - ratio;
    if (style == MT_WSD_COSINE) return 0.5 * (cos(M_PI * ratio) + 1);
    if (style == MT_WSD_MINUS_SQRT) return 1 - sqrt(ratio);
    return 2 * pow(0.5, ratio) - 1; // exponential
}

mt_durations mt_options_durations(const mt_options *o) {
    double batch = (double)o->global_batch_size;
    bool by_samples = o->train_samples > 0;
    mt_durations d;
    d.total = by_samples ? (double)o->train_samples : (double)o->train_iters * batch;
    d.decay = by_samples ? (double)o->lr_decay_samples : (double)o->lr_decay_iters * batch;
    if (d.decay == 0) d.decay = d.total;
    d.warmup = by_samples ? (double)o->lr_warmup_samples : (double)o->lr_warmup_iters * batch;
    if (o->lr_warmup_fraction > 0) d.warmup = o->lr_warmup_fraction * d.decay;
    d.wsd_decay = by_samples ? (double)o->lr_wsd_decay_samples : (double)o->lr_wsd_decay_iters * batch;
    const mt_durations *kept = &o->kept_durations;
    if (kept->decay > 0) d.total = kept->total, d.warmup = kept->warmup, d.decay = kept->decay;
    return d;
}

/* The rate between a maximum and a minimum. */
static double mt_scheduled_rate(const mt_options *options, double lr, double min_lr, int64_t consumed_samples) {
    mt_lr_decay_style style = options->lr_decay_style;
    double init = options->lr_warmup_init, at = (double)consumed_samples;
    mt_durations d = mt_options_durations(options);
    if (d.warmup > 0 && at <= d.warmup) return init + (lr - init) * at / d.warmup;
    if (style == MT_LR_CONSTANT) return lr;
    if (at > d.decay) return min_lr;
    if (style == MT_LR_INVERSE_SQUARE_ROOT) return fmax(min_lr, lr * sqrt(fmax(d.warmup, 1)) / sqrt(fmax(at, 1)));
    double ratio = (at - d.warmup) / (d.decay - d.warmup), stable = d.decay - d.wsd_decay;
    mt_wsd_decay_style decay = style == MT_LR_LINEAR ? MT_WSD_LINEAR : MT_WSD_COSINE;
    if (style == MT_LR_WSD) // warm-up, stable, decay (Hu et al., "MiniCPM")
        decay = options->lr_wsd_decay_style, ratio = at <= stable ? 0 : (at - stable) / d.wsd_decay;
    return min_lr + mt_decay_coefficient(decay, ratio) * (lr - min_lr);
}

double mt_learning_rate(const mt_options *options, int64_t consumed_samples) {
    return mt_scheduled_rate(options, options->lr, options->min_lr, consumed_samples);
}

double mt_decoupled_learning_rate(const mt_options *options, int64_t consumed_samples) {
    if (options->decoupled_lr == 0) return mt_learning_rate(options, consumed_samples);
    return mt_scheduled_rate(options, options->decoupled_lr, options->decoupled_min_lr, consumed_samples);
}

double mt_weight_decay(const mt_options *options, int64_t consumed_samples) {
    double start = options->start_weight_decay, end = options->end_weight_decay;
    double ratio = (double)consumed_samples / mt_options_durations(options).total;
    if (ratio > 1 || options->weight_decay_incr_style == MT_WEIGHT_DECAY_CONSTANT) return end;
    if (options->weight_decay_incr_style == MT_WEIGHT_DECAY_COSINE) ratio = 0.5 * (cos(M_PI * (1 - ratio)) + 1);
    return start + ratio * (end - start);
}

/* Phases of the step, for the profiler. */
static void mt_phase_begin(mt_model *m, const char *name, int64_t micro_batch, int64_t chunk) {
    if (m->ops->phase_begin) m->ops->phase_begin(name, micro_batch, chunk, m->stream);
}

static void mt_phase_end(mt_model *m) {
    if (m->ops->phase_end) m->ops->phase_end(m->stream);
}

/* sums[2] = squared norm of all gradients; replicated elements are counted on the first of their ranks, and the others'
 * in sums[4]. sums[3] = loss summed over all ranks: a non-finite value on any rank reaches every rank, so all ranks
 * come to the same check. */
static void mt_gradients_norm(mt_model *m) {
    double *sums = m->numbers->sums;
    m->ops->memory_copy(sums + 3, sums, 8, m->stream);
    m->ops->memory_zero(sums + 4, 8, m->stream);
    for (int64_t i = 0, next; i < m->num_params; i = next) {
        const mt_param *param = &m->params[i];
        const mt_bucket *b = &m->buckets[param->bucket];
        bool counts = b->trained && (b->strategy != MT_NO_SHARD || b->group->rank == 0);
        int64_t begin, count;
        for (next = i + 1; next < m->num_params; next++)
            if (m->params[next].bucket != param->bucket || m->params[next].counted != param->counted) break;
        if (!counts || (count = mt_gradient_run(m, param, &m->params[next - 1], &begin)) == 0) continue;
        const void *run = mt_at(b->grad_shard, begin, b->grad_dtype);
        m->ops->squared_norm(sums + (param->counted ? 2 : 4), run, count, b->grad_dtype, m->stream);
    }
    m->ops->all_reduce(sums + 2, 3, MT_SUM, MT_F64, &m->grid->world, m->stream);
}

/* Gradient norm, clipping factor, and the check that allows the update. */
static void mt_step_check_gradients(mt_model *m) {
    const mt_options *o = m->options;
    mt_guard_rules rules = {.finite = o->check_for_nan_in_loss_and_grad || o->fp16,
                            .spike_factor = o->check_for_spiky_loss ? o->loss_spike_factor : 0,
                            .window = o->loss_spike_window,
                            .copies = m->grid->world.size,
                            .beta1 = o->adam_beta1,
                            .beta2 = o->adam_beta2};
    mt_phase_begin(m, "norm", -1, -1);
    mt_gradients_norm(m);
    mt_step_numbers *n = m->numbers;
    m->ops->gradient_scale(&n->grad_scale, &n->grad_norm, n->sums + 2, n->sums + 4, n->sums + 1, (double)m->loss_scale,
                           (float)o->clip_grad, m->stream);
    m->ops->step_guard(n->guard, &n->grad_scale, n->sums + 3, n->sums + 1, &n->grad_norm, &rules, m->stream);
    mt_phase_end(m);
}

/* The operands of a step on a bucket's shard, without the second state. */
static mt_update_args mt_bucket_operands(const mt_model *m, const mt_bucket *b) {
    mt_update_args a = {.n = b->shard_count, .dtype = b->dtype, .grad_dtype = b->grad_dtype};
    a.param = b->param_shard, a.master = b->master, a.m = b->m, a.grad = b->grad_shard;
    a.corrections = m->numbers->guard + MT_GUARD_CORRECTIONS;
    a.scale = &m->numbers->grad_scale, a.master_dtype = mt_state_dtype(m, MT_STATE_MASTER);
    a.m_dtype = mt_state_dtype(m, MT_STATE_EXP_AVG), a.v_dtype = mt_state_dtype(m, MT_STATE_EXP_AVG_SQ);
    return a;
}

typedef void mt_update_operation(const mt_update_args *a, const mt_update *update, mt_stream *stream);

static mt_update_operation *mt_optimizer_operation(const mt_ops *ops, mt_optimizer optimizer) {
#define MT_OPTIMIZER_STEP(name, step, ...) [MT_OPTIMIZER_##name] = ops->step##_step,
    mt_update_operation *const steps[] = {MT_OPTIMIZERS(MT_OPTIMIZER_STEP)};
#undef MT_OPTIMIZER_STEP
    return steps[optimizer];
}

/* Elements [first, first + n) of `whole`. */
static mt_update_args mt_update_part(const mt_update_args *whole, int64_t first, int64_t n) {
    mt_update_args a = *whole;
    a.n = n, a.param = mt_at(a.param, first, a.dtype), a.master = mt_at(a.master, first, a.master_dtype);
    a.m = mt_at(a.m, first, a.m_dtype), a.v = a.v ? mt_at(a.v, first, a.v_dtype) : NULL;
    a.grad = mt_at(a.grad, first, a.grad_dtype);
    return a;
}

/* Elements [first, first + n) of a bucket's shard. */
static mt_update_args mt_bucket_update(const mt_model *m, const mt_bucket *b, int64_t first, int64_t n) {
    mt_update_args whole = mt_bucket_operands(m, b), a = mt_update_part(&whole, first, n);
    if (b->v) a.v = mt_at(b->v, first - (b->shard_count - b->v_count), a.v_dtype);
    return a;
}

/* ---- on the host */

/* --optimizer-cpu-offload: some buckets are updated on the host, in pieces. A piece's gradients and parameters are
 * copied to one of two slots, the host updates them there, and the parameters are copied back; with streams of its own,
 * piece i is copied while the host updates piece i - 1. Because parameters are copied both ways, a step that a failed
 * check skips leaves them unchanged. The same arithmetic on host and GPU: results do not depend on the fraction. */
enum { MT_HOST_PIECE = 1 << 22 }; // elements

typedef struct mt_host_task {
    mt_update_args args; // in a slot and in host memory; first, for data/plan/simulate.c
    mt_update update;
    mt_update_operation *step; // of the CPU
    void *param;               // on the device
    int threads;
} mt_host_task;

typedef struct mt_host_optimizer {
    mt_stream *in, *update, *out;   // gradients to the host, updates, parameters back; the model's without overlap
    char *slots[2];                 // [MT_HOST_PIECE] gradients, then parameters
    double *corrections;            // [2] as in mt_update_args, on the host
    float *scale;                   // of the gradients, on the host
    mt_host_task *tasks;            // [2, num_tasks] of two steps: the host enqueues one while another runs
    int64_t num_tasks, step, count; // count: tasks of this step so far
} mt_host_optimizer;

/* Elements [result[k], result[k + 1]) of a shard: decayed matrices, then the rest. */
static void mt_bucket_decays(const mt_bucket *b, int64_t start[3]) {
    start[0] = 0, start[2] = b->shard_count;
    start[1] = mt_min(mt_max(b->decay_count - b->shard_first, 0), b->shard_count);
}

/* Chooses the last trained buckets that hold at least --optimizer-offload-fraction of this rank's elements: gradients
 * of the last layers are complete first, and their parameters are needed last. */
static void mt_host_optimizer_open(mt_model *m) {
    double all = 0, chosen = 0, fraction = m->options->optimizer_offload_fraction;
    if (!m->plan.train || !m->options->optimizer_cpu_offload || fraction == 0 || m->num_trained_buckets == 0) return;
    mt_host_optimizer *h = m->host_optimizer = mt_model_calloc(m, (int64_t)sizeof *h);
    for (int64_t i = 0; i < m->num_trained_buckets; i++) all += (double)m->buckets[i].shard_count;
    for (int64_t i = m->num_trained_buckets - 1; i >= 0 && chosen < fraction * all; i--) {
        int64_t start[3];
        mt_bucket_decays(&m->buckets[i], start);
        m->buckets[i].on_host = true;
        for (int k = 0; k < 2; k++) h->num_tasks += mt_divide_up(start[k + 1] - start[k], MT_HOST_PIECE);
        chosen += (double)m->buckets[i].shard_count;
    }
    h->tasks = mt_model_calloc(m, 2 * h->num_tasks * (int64_t)sizeof *h->tasks);
}

/* Slots of the largest piece. */
static void mt_plan_host_optimizer(mt_model *m) {
    int64_t largest = 0;
    for (int64_t i = 0; i < m->num_trained_buckets; i++)
        if (m->buckets[i].on_host) largest = mt_max(largest, m->buckets[i].shard_count);
    m->host_optimizer->corrections = mt_arena_alloc(&m->host, 2 * 8);
    m->host_optimizer->scale = mt_arena_alloc(&m->host, 4);
    for (int k = 0; k < 2; k++)
        m->host_optimizer->slots[k] = mt_arena_alloc(&m->host, mt_min(largest, MT_HOST_PIECE) * 8);
}

static void mt_host_optimizer_start(mt_model *m) {
    mt_host_optimizer *h = m->host_optimizer;
    bool overlaps = m->options->overlap_cpu_optimizer_d2h_h2d;
    mt_stream **streams[] = {&h->in, &h->update, &h->out};
    for (int i = 0; i < 3; i++)
        *streams[i] = overlaps ? m->ops->stream_create(NULL, 0, m->options->deterministic_mode) : m->stream;
}

static void mt_host_optimizer_close(mt_model *m) {
    mt_host_optimizer *h = m->host_optimizer;
    if (!h || h->in == m->stream) return;
    m->ops->stream_synchronize(m->stream); // which waits for the others
    m->ops->stream_destroy(h->in);
    m->ops->stream_destroy(h->update);
    m->ops->stream_destroy(h->out);
}

/* Runs on a thread of the device's library, which has a number of OpenMP threads of its own. */
static void mt_host_task_run(void *context) {
    mt_host_task *task = context;
    omp_set_num_threads(task->threads);
    task->step(&task->args, &task->update, NULL);
}

/* Enqueues the update of a task whose copies to the host are enqueued, and the copy of its parameters back. */
static void mt_host_task_finish(mt_model *m, mt_host_task *task) {
    mt_host_optimizer *h = m->host_optimizer;
    int64_t bytes = task->args.n * mt_dtype_size(task->args.dtype);
    m->ops->stream_call_host(h->update, mt_host_task_run, task);
    mt_wait_stream(m, h->out, h->update);
    m->ops->memory_copy(task->param, task->args.param, bytes, h->out);
}

/* Enqueues a task's copies to the host, then finishes the task before it. */
static void mt_host_task_start(mt_model *m, const mt_update_args *a, const mt_update *update) {
    mt_host_optimizer *h = m->host_optimizer;
    mt_host_task *task = &h->tasks[h->step % 2 * h->num_tasks + h->count];
    int64_t grad_bytes = a->n * mt_dtype_size(a->grad_dtype), param_bytes = a->n * mt_dtype_size(a->dtype);
    char *grad = h->slots[h->count % 2], *param = grad + grad_bytes;
    *task = (mt_host_task){.args = *a,
                           .update = *update,
                           .step = mt_optimizer_operation(&mt_cpu_ops, m->options->optimizer),
                           .param = a->param,
                           .threads = omp_get_max_threads()};
    task->args.grad = grad, task->args.param = param;
    task->args.scale = h->scale, task->args.corrections = h->corrections;
    mt_wait_stream(m, h->update, h->in); // for the copies of the task before
    mt_wait_stream(m, h->in, h->out);    // the task before that one has left the slot
    m->ops->memory_copy(grad, a->grad, grad_bytes, h->in);
    m->ops->memory_copy(param, a->param, param_bytes, h->in);
    if (h->count++ > 0) mt_host_task_finish(m, task - 1);
}

static void mt_host_optimizer_begin(mt_model *m) {
    mt_host_optimizer *h = m->host_optimizer;
    h->step++, h->count = 0;
    mt_wait_stream(m, h->in, m->stream);
    m->ops->memory_copy(h->scale, &m->numbers->grad_scale, sizeof *h->scale, h->in);
    m->ops->memory_copy(h->corrections, m->numbers->guard + MT_GUARD_CORRECTIONS, 2 * 8, h->in);
}

/* Enqueues the update of a part of a bucket on the host. */
static void mt_host_optimizer_update(mt_model *m, const mt_update_args *part, const mt_update *update) {
    for (int64_t first = 0; first < part->n; first += MT_HOST_PIECE) {
        mt_update_args a = mt_update_part(part, first, mt_min(MT_HOST_PIECE, part->n - first));
        mt_host_task_start(m, &a, update);
    }
}

/* Later work of the model waits for the updates. */
static void mt_host_optimizer_finish(mt_model *m) {
    mt_host_optimizer *h = m->host_optimizer;
    mt_wait_stream(m, h->update, h->in);
    mt_host_task_finish(m, &h->tasks[h->step % 2 * h->num_tasks + h->count - 1]);
    mt_wait_stream(m, m->stream, h->out);
}

/* True for the matrices of the word embedding and the output layer, whose rate is --decoupled-lr. */
static bool mt_param_is_decoupled(const mt_param *param) {
    return !param->is_vector && (param->unit == MT_UNIT_WORDS || param->is_head);
}

/* AdamW for types of state with a scale per parameter: one parameter at a time. rates[1]: of decoupled parameters. */
static void mt_optimizer_step_scaled(mt_model *m, mt_update *update, const double rates[2], float weight_decay) {
    int64_t bytes = m->num_params * (int64_t)sizeof *m->state_amax, begin;
    float(*amax)[3] = m->state_amax, (*new_amax)[3] = amax + m->num_params;
    m->ops->memory_zero(new_amax, bytes, m->stream);
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        const mt_bucket *b = &m->buckets[param->bucket];
        int64_t count = mt_gradient_run(m, param, param, &begin);
        if (!b->trained || count == 0) continue;
        mt_update_args a = mt_bucket_update(m, b, begin, count);
        a.amax = amax[i], a.new_amax = new_amax[i], update->weight_decay = param->weight_decay ? weight_decay : 0;
        update->lr = (float)(mt_param_is_decoupled(param) ? rates[1] : rates[0]);
        m->ops->adamw_amax(&a, update, m->stream);
        m->ops->adamw_step(&a, update, m->stream);
    }
    m->ops->memory_copy(amax, new_amax, bytes, m->stream);
}

/* ---- Muon */

/* Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks") steps a matrix against its momentum U
 * S V^T as if all singular values were about 1: U V^T. Newton-Schulz iterations approximate that by products alone: X =
 * a X + (b A + c A A) X with A = X X^T maps each singular value s to a s + b s^3 + c s^5. All else, vectors, embeddings
 * and the head, has an optimizer of elements. */
enum { MT_MUON_SETS = 10, MT_MUON_BATCH = 1 << 26 };

/* (a, b, c) of each iteration; more iterations repeat the last, or all. */
static const struct {
    int count;
    bool repeats_last;
    float sets[MT_MUON_SETS][3];
} mt_muon_coefficients[] = {
    [MT_MUON_QUINTIC] = {5,
                         false,
                         {{4.0848f, -6.8946f, 2.9270f},
                          {3.9505f, -6.3029f, 2.6377f},
                          {3.7418f, -5.5913f, 2.3037f},
                          {2.8769f, -3.1427f, 1.2046f},
                          {2.8366f, -3.0525f, 1.2012f}}},
    [MT_MUON_SIMPLE] = {1, false, {{3.4445f, -4.7750f, 2.0315f}}},
    [MT_MUON_POLAR_EXPRESS] = {8,
                               true,
                               {{8.2051f, -22.9019f, 16.4607f},
                                {4.0664f, -2.8612f, 0.5184f},
                                {3.9096f, -2.8234f, 0.5250f},
                                {3.2856f, -2.4153f, 0.4853f},
                                {2.2779f, -1.6198f, 0.3985f},
                                {1.8726f, -1.2307f, 0.3585f},
                                {1.8564f, -1.2132f, 0.3568f},
                                {1.8750f, -1.2500f, 0.3750f}}},
    [MT_MUON_CANS] = {5,
                      true,
                      {{8.4703f, -25.1081f, 18.6293f},
                       {4.1828f, -3.1087f, 0.5806f},
                       {3.9619f, -2.9541f, 0.5630f},
                       {3.2866f, -2.4647f, 0.5074f},
                       {2.2737f, -1.6447f, 0.4162f}}},
    [MT_MUON_AOL] = {4,
                     false,
                     {{4.0098f, -7.0585f, 2.4635f},
                      {3.4585f, -5.5479f, 2.5959f},
                      {2.7573f, -3.2939f, 1.4254f},
                      {2.7215f, -3.0494f, 1.3169f}}},
    [MT_MUON_DEEPSEEKV4] = {10,
                            true,
                            {{3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {3.4445f, -4.7750f, 2.0315f},
                             {2.0f, -1.5f, 0.5f},
                             {2.0f, -1.5f, 0.5f}}},
};

static const float *mt_muon_set(mt_muon_type type, int64_t iteration) {
    int64_t count = mt_muon_coefficients[type].count, last = count - 1;
    int64_t set = mt_muon_coefficients[type].repeats_last ? mt_min(iteration, last) : iteration % count;
    return mt_muon_coefficients[type].sets[set];
}

float mt_muon_factor(const mt_muon_options *o, int64_t rows, int64_t cols) {
    double ratio = (double)rows / (double)cols, square = (double)mt_max(rows, cols); // spectral
    if (o->scale_mode == MT_MUON_UNIT_RMS_NORM) square = ratio;
    if (o->scale_mode == MT_MUON_SHAPE_SCALING) square = ratio > 1 ? ratio : 1;
    return (float)(sqrt(square) * o->extra_scale_factor);
}

void mt_newton_schulz(const mt_ops *ops, const mt_muon_options *o, mt_iterate *x, mt_stream *stream) {
    mt_dtype dtype = o->fp32_matmul_prec == MT_MUON_MEDIUM ? MT_BF16 : MT_F32;
    int64_t side = x->transposed ? x->cols : x->rows, summed = x->transposed ? x->counted_rows : x->cols;
    mt_product_args squares = {side, side, summed, x->count, .a_transposed = x->transposed, .scale = 1};
    squares.b_transposed = !x->transposed, squares.out = x->squares;
    mt_product_args polynomial = {side, side, side, x->count, .a = x->squares, .b = x->squares, .add = x->squares};
    polynomial.out = x->polynomial;
    mt_product_args next = {x->rows, x->cols, side, x->count, .scale = 1};
    squares.tf32 = polynomial.tf32 = next.tf32 = o->fp32_matmul_prec == MT_MUON_HIGH;
    for (int64_t i = 0; i < o->num_ns_steps; i++) {
        const float *set = mt_muon_set(o->coefficient_type, i);
        squares.a = squares.b = x->x;
        if (summed > 0)
            ops->batched_product(&squares, dtype, stream);
        else
            ops->memory_zero(x->squares, x->count * side * side * mt_dtype_size(dtype), stream);
        if (x->group) ops->all_reduce(x->squares, x->count * side * side, MT_SUM, dtype, x->group, stream);
        polynomial.add_scale = set[1], polynomial.scale = set[2];
        ops->batched_product(&polynomial, dtype, stream);
        next.a = x->transposed ? x->x : x->polynomial, next.b = x->transposed ? x->polynomial : x->x;
        next.add = x->x, next.add_scale = set[0], next.out = x->next;
        ops->batched_product(&next, dtype, stream);
        void *done = x->x;
        x->x = x->next, x->next = done;
    }
}

/* Matrices of one shape whose parts on this rank lie at equal distances: they are orthogonalised together. */
typedef struct mt_muon_batch {
    int64_t first, end;        // rows of the parameter table
    int64_t pieces;            // parameters of one matrix
    int64_t count, rows, cols; // matrices, as they are orthogonalised here
    int64_t stride;            // elements between two
    const mt_group *group;     // the ranks that share them; NULL: none, or each rank takes its part alone
    bool gathered;             // every rank computes the whole
    bool transposed;           // the products X^T X are the smaller ones, or sums over ranks
    int64_t counted_rows;      // the first rows here: no other rank has a copy of them
    int64_t out, in;           // the shape that determines the factor
    double *sums;              // [count]
} mt_muon_batch;

typedef struct mt_muon {
    double *sums[2]; // of the matrices here outside experts, and of experts
    int64_t num_sums[2];
    int64_t elements, sides; // the largest of a batch: of its matrices, of their squares
    void *x, *next, *squares, *polynomial;
} mt_muon;

/* True if two matrices, beginning at these parameters, have the same shape here. */
static bool mt_muon_alike(const mt_param *a, const mt_param *b, int64_t pieces) {
    for (int64_t i = 0; i < pieces; i++)
        if (a[i].rows != b[i].rows || a[i].cols != b[i].cols || a[i].shard_dim != b[i].shard_dim ||
            a[i].whole_rows != b[i].whole_rows || a[i].whole_cols != b[i].whole_cols || a[i].counted != b[i].counted ||
            b[i].joins != (i > 0))
            return false;
    return true;
}

/* The end of the matrix that begins at a parameter. */
static int64_t mt_matrix_end(const mt_model *m, int64_t first) {
    int64_t end = first + 1;
    while (end < m->num_params && m->params[end].joins) end++;
    return end;
}

/* The matrices of this rank's shards from parameter batch->end on; false: none is left. */
static bool mt_muon_next(const mt_model *m, mt_muon_batch *batch) {
    const mt_muon_options *o = &m->options->muon;
    int64_t first = batch->end;
    for (; first < m->num_params; first = mt_matrix_end(m, first)) {
        const mt_param *param = &m->params[first];
        const mt_bucket *b = &m->buckets[param->bucket];
        if (b->trained && mt_param_is_matrix(param) && param->offset >= b->shard_first &&
            param->offset < b->shard_first + b->shard_count)
            break;
    }
    if (first == m->num_params) return false;
    const mt_param *params = &m->params[first];
    const mt_bucket *b = &m->buckets[params->bucket];
    const mt_group *group = params->expert >= 0 ? &m->grid->expert_tensor : &m->grid->tensor;
    *batch = (mt_muon_batch){.first = first, .end = mt_matrix_end(m, first), .count = 1, .cols = params->cols};
    batch->pieces = batch->end - first;
    bool is_cut = false;
    for (const mt_param *piece = params; piece < params + batch->pieces; piece++) {
        batch->rows += piece->rows, batch->out += piece->whole_rows, is_cut |= piece->shard_dim >= 0;
        batch->counted_rows += piece->counted ? piece->rows : 0;
    }
    batch->in = params->whole_cols;
    if (is_cut && group->size > 1 && o->tp_mode != MT_MUON_BLOCKWISE) batch->group = group;
    batch->gathered = batch->group && o->tp_mode == MT_MUON_DUPLICATED;
    if (!batch->group) batch->out = batch->rows, batch->in = batch->cols, batch->counted_rows = batch->rows;
    if (batch->gathered) batch->rows = batch->counted_rows = batch->out, batch->cols = batch->in;
    batch->transposed = batch->rows > batch->cols;
    if (batch->group && !batch->gathered) batch->transposed = params->shard_dim == 0;
    while (batch->end < m->num_params) {
        const mt_param *next = &m->params[batch->end];
        int64_t distance = next->offset - next[-batch->pieces].offset;
        if (next->bucket != params->bucket || !mt_param_is_matrix(next) || batch->end + batch->pieces > m->num_params ||
            next->offset >= b->shard_first + b->shard_count || !mt_muon_alike(params, next, batch->pieces) ||
            mt_matrix_end(m, batch->end) != batch->end + batch->pieces ||
            (batch->count > 1 && distance != batch->stride) ||
            (batch->count + 1) * batch->rows * batch->cols > MT_MUON_BATCH)
            break;
        batch->stride = distance, batch->count++, batch->end += batch->pieces;
    }
    return true;
}

static void mt_muon_open(mt_model *m) {
    if (m->plan.train && mt_optimizer_rows[m->options->optimizer].steps == MT_STEPS_MATRICES)
        m->muon = mt_model_calloc(m, (int64_t)sizeof *m->muon);
}

/* Memory of the sums, and of the largest batch's values, squares and polynomials. */
static void mt_plan_muon(mt_model *m, mt_arena *arena) {
    mt_muon *muon = m->muon;
    int64_t size = m->options->muon.fp32_matmul_prec == MT_MUON_MEDIUM ? 2 : 4;
    memset(muon, 0, sizeof *muon);
    for (mt_muon_batch batch = {0}; mt_muon_next(m, &batch);) {
        int64_t side = batch.transposed ? batch.cols : batch.rows;
        muon->num_sums[m->params[batch.first].expert >= 0] += batch.count;
        muon->elements = mt_max(muon->elements, batch.count * batch.rows * batch.cols);
        muon->sides = mt_max(muon->sides, batch.count * side * side);
    }
    for (int kind = 0; kind < 2; kind++) muon->sums[kind] = mt_arena_alloc(arena, muon->num_sums[kind] * 8);
    muon->x = mt_arena_alloc(arena, muon->elements * size), muon->next = mt_arena_alloc(arena, muon->elements * size);
    muon->squares = mt_arena_alloc(arena, muon->sides * size);
    muon->polynomial = mt_arena_alloc(arena, muon->sides * size);
}

/* Calls an operation on each piece of a batch's matrices, whose values are at x. `counted`: only where this rank's copy
 * is the one that counts. */
static void mt_muon_pieces(mt_model *m, const mt_muon_batch *batch, mt_update_operation *operation, void *x,
                           const mt_update *update, bool counted) {
    const mt_muon_options *o = &m->options->muon;
    mt_dtype dtype = o->fp32_matmul_prec == MT_MUON_MEDIUM ? MT_BF16 : MT_F32;
    int64_t row = 0;
    for (int64_t i = batch->first; i < batch->first + batch->pieces; i++) {
        const mt_param *param = &m->params[i];
        const mt_bucket *b = &m->buckets[param->bucket];
        mt_matrices matrices = {batch->count, param->rows, param->cols, batch->stride, .dtype = dtype};
        int64_t at = row * batch->cols;
        if (batch->gathered) at += param->first_row * batch->cols + param->first_col;
        row += batch->gathered ? param->whole_rows : param->rows;
        if (counted && !param->counted) continue;
        matrices.x = mt_at(x, at, dtype), matrices.x_stride = batch->rows * batch->cols;
        matrices.row_stride = batch->cols, matrices.sums = batch->sums;
        matrices.counted = param->counted || o->tp_mode == MT_MUON_BLOCKWISE;
        matrices.factor = mt_muon_factor(o, batch->out, batch->in), matrices.nesterov = o->nesterov;
        mt_update_args a = mt_bucket_update(m, b, param->offset - b->shard_first, param->rows * param->cols);
        a.v = NULL, a.matrices = &matrices;
        operation(&a, update, m->stream);
    }
}

/* Gives each batch the sums of its matrices, one batch after another. */
static void mt_muon_set_sums(const mt_model *m, mt_muon_batch *batch, int64_t used[2]) {
    int kind = m->params[batch->first].expert >= 0;
    batch->sums = m->muon->sums[kind] + used[kind];
    used[kind] += batch->count;
}

static void mt_muon_run(mt_model *m, float lr, float weight_decay) {
    const mt_muon_options *o = &m->options->muon;
    mt_muon *muon = m->muon;
    mt_dtype dtype = o->fp32_matmul_prec == MT_MUON_MEDIUM ? MT_BF16 : MT_F32;
    mt_update update = {.lr = lr, .beta1 = (float)o->momentum, .weight_decay = weight_decay};
    const mt_group *groups[2] = {&m->grid->tensor, &m->grid->expert_tensor};
    for (int kind = 0; kind < 2; kind++)
        if (muon->num_sums[kind] > 0) m->ops->memory_zero(muon->sums[kind], muon->num_sums[kind] * 8, m->stream);
    int64_t used[2] = {0};
    for (mt_muon_batch batch = {0}; mt_muon_next(m, &batch);) {
        mt_muon_set_sums(m, &batch, used);
        mt_muon_pieces(m, &batch, m->ops->muon_momentum, muon->x, &update, false);
    }
    for (int kind = 0; kind < 2 && o->tp_mode != MT_MUON_BLOCKWISE; kind++)
        m->ops->all_reduce(muon->sums[kind], muon->num_sums[kind], MT_SUM, MT_F64, groups[kind], m->stream);
    memset(used, 0, sizeof used);
    for (mt_muon_batch batch = {0}; mt_muon_next(m, &batch);) {
        int64_t elements = batch.count * batch.rows * batch.cols;
        mt_muon_set_sums(m, &batch, used);
        if (batch.gathered) m->ops->memory_zero(muon->x, elements * mt_dtype_size(dtype), m->stream);
        mt_muon_pieces(m, &batch, m->ops->muon_normalize, muon->x, &update, batch.gathered);
        if (batch.gathered) m->ops->all_reduce(muon->x, elements, MT_SUM, dtype, batch.group, m->stream);
        mt_iterate iterate = {batch.count, batch.rows, batch.cols, batch.counted_rows, .transposed = batch.transposed};
        iterate.x = muon->x, iterate.next = muon->next;
        iterate.squares = muon->squares, iterate.polynomial = muon->polynomial;
        iterate.group = batch.gathered ? NULL : batch.group;
        mt_newton_schulz(m->ops, o, &iterate, m->stream);
        mt_muon_pieces(m, &batch, m->ops->muon_step, iterate.x, &update, false);
    }
}

/* The numbers of a step on elements except the weight decay, which vectors lack. */
static mt_update mt_update_of_step(const mt_options *o, const mt_run_state *state) {
    mt_update u = {.lr = (float)mt_learning_rate(o, mt_scheduled_samples(state))};
    switch (mt_element_optimizer(o)) {
    case MT_OPTIMIZER_SGD:
        u.beta1 = (float)o->sgd_momentum;
        break;
    case MT_OPTIMIZER_LION:
        u.beta1 = (float)o->lion_beta1, u.beta2 = (float)o->lion_beta2;
        break;
    default:
        u.beta1 = (float)o->adam_beta1, u.beta2 = (float)o->adam_beta2, u.eps = (float)o->adam_eps;
    }
    return u;
}

/* True if the decayed parameters of a bucket have the rate --decoupled-lr. */
static bool mt_bucket_is_decoupled(const mt_model *m, const mt_bucket *b) {
    return b->num_params > 0 && mt_param_is_decoupled(&m->params[b->first_param]);
}

/* The optimizer's step on the shards of this rank. A failed check makes grad_scale negative: no update. */
static void mt_optimizer_step(mt_model *m, const mt_run_state *state) {
    const mt_options *o = m->options;
    mt_update_operation *step = mt_optimizer_operation(m->ops, mt_element_optimizer(o));
    mt_phase_begin(m, "optimizer", -1, -1);
    mt_wait_reader(m);
    float weight_decay = (float)mt_weight_decay(o, mt_scheduled_samples(state));
    mt_update update = mt_update_of_step(o, state);
    double rates[2] = {mt_learning_rate(o, mt_scheduled_samples(state))};
    rates[1] = mt_decoupled_learning_rate(o, mt_scheduled_samples(state));
    if (m->muon) mt_muon_run(m, update.lr, weight_decay);
    if (m->host_optimizer) mt_host_optimizer_begin(m);
    if (m->state_amax) mt_optimizer_step_scaled(m, &update, rates, weight_decay);
    for (int64_t i = m->num_trained_buckets - 1; !m->state_amax && i >= 0; i--) { // the host's first
        int64_t start[3];
        mt_bucket_decays(&m->buckets[i], start);
        for (int k = m->buckets[i].matrix_count > 0; k < 2; k++) { // the decayed ones may be matrices
            mt_update_args a = mt_bucket_update(m, &m->buckets[i], start[k], start[k + 1] - start[k]);
            update.weight_decay = k == 0 ? weight_decay : 0;
            update.lr = (float)rates[k == 0 && mt_bucket_is_decoupled(m, &m->buckets[i])];
            if (m->buckets[i].on_host)
                mt_host_optimizer_update(m, &a, &update);
            else if (a.n > 0)
                step(&a, &update, m->stream);
        }
    }
    if (m->host_optimizer) mt_host_optimizer_finish(m);
    mt_params_finish(m);
    mt_phase_end(m);
}

/* ==== §14 the training step ======================================================================================= */
/* One step: zero gradients, run the schedule of forwards and backwards, sum over ranks, clip, update. Invariants: the
 * loss is a sum over tokens, divided once by the number of unmasked tokens of the global batch, so micro-batches and
 * ranks do not change it; the host waits for the device only to read metrics and to stay at most two steps ahead. */

/* Results of a training step, copied from the device. */
typedef struct mt_step_result {
    mt_step_numbers numbers;
    double indexer_sums[2];               // as in mt_model
    double losses[MT_NUM_AUX_LOSSES + 1]; // these fields: as in mt_experts
    float *loads, *kept;                  // [num_layers, E]
    int32_t *invalid;                     // [num_layers] of this rank
} mt_step_result;

/* Bad steps: not finite, or a loss spike. */
typedef struct mt_bad_steps {
    int64_t skipped, in_a_row; // skipped updates in total; consecutive ones up to now
    int64_t rewind;            // bad step that requires a rewind; 0: none
    int64_t rewound;           // bad step of the last rewind
} mt_bad_steps;

/* An enqueued training step. There are two entries, so the host is at most two steps ahead of the device. */
typedef struct mt_pending_step {
    int64_t iteration; // 0: none left to check
    const char *fault; // of mt_train_name_fault, or NULL
    mt_event *done;    // its result has arrived; NULL: the backend is synchronous
} mt_pending_step;

/* Training state that lasts over steps. */
typedef struct mt_trainer {
    mt_action *actions; // of the schedule, for this rank
    int64_t max_actions;
    mt_bad_steps bad_steps;
    int64_t num_steps;  // enqueued steps; step i uses entry i % 2
    const char *fault;  // of mt_train_name_fault, for the steps that follow
    int64_t updates;    // by AdamW, up to the last step that was checked
    int64_t reported;   // the number of updates that the caller's mt_run_state has from here; -1: it may have another
    bool is_warm[2][2]; // [adapters off][trains]: its kernels are loaded, those of gradients that accumulate too
    mt_pending_step pending[2];
    mt_step_result *results;              // [2] in host memory
    double unread_tokens, unread_seconds; // of the steps since metrics were last read
    double data_seconds;                  // of this step: the host waited for samples
    double loss_scale;                    // of this step in fp16
} mt_trainer;

/* ---- counts and metrics of the experts */

/* Zeroes the counters; called before each step and before the first forward. */
static void mt_experts_begin(mt_model *m) {
    mt_experts *e = m->experts;
    if (m->options->num_experts == 0) return;
    m->ops->memory_zero(e->losses, (MT_NUM_AUX_LOSSES + 2) * 8, m->stream);
    if (e->num_layers == 0) return;
    if (mt_has_quantiles(m))
        m->ops->memory_zero(e->quantiles, e->num_layers * (e->router.num_experts + 1) * 4, m->stream);
    m->ops->memory_zero(e->loads, 3 * e->num_layers * e->router.num_experts * 4, m->stream); // and `kept` and `global`
    m->ops->memory_zero(e->invalid, e->num_layers * 4, m->stream);
}

/* After a step's backwards: sums auxiliary losses and loads over all ranks. */
static void mt_experts_finish(mt_model *m) {
    mt_experts *e = m->experts;
    int64_t loads = 2 * e->num_layers * e->router.num_experts; // `loads` and `kept`
    if (m->options->num_experts == 0) return;
    m->ops->all_reduce(e->losses, MT_NUM_AUX_LOSSES + 1, MT_SUM, MT_F64, &m->grid->world, m->stream);
    if (e->num_layers == 0) return; // a pipeline stage may have no experts
    m->ops->all_reduce(e->loads, loads, MT_SUM, MT_F32, &m->grid->tensor_context, m->stream);
    m->ops->all_reduce(e->loads, loads, MT_SUM, MT_F32, &m->grid->data, m->stream);
    if (mt_has_quantiles(m))
        m->ops->all_reduce(e->quantiles, e->num_layers * (e->router.num_experts + 1), MT_SUM, MT_F32, &m->grid->data,
                           m->stream);
}

/* Aux-loss-free and quantile balancing: updates the router biases from the loads, or from the quantiles of the logits;
 * a bad step leaves them unchanged. A model with a bias from quantiles that is balanced otherwise keeps it. */
static void mt_experts_update_biases(mt_model *m) {
    mt_experts *e = m->experts;
    int64_t E = e->router.num_experts;
    for (int64_t i = 0; i < m->num_layers; i++) {
        if (!m->layers[i].router_bias.w || m->options->lora_rank > 0 || mt_mtp_repeats(m, &m->layers[i])) continue;
        if (m->options->moe_router_quantile_bias && !mt_has_quantiles(m)) continue;
        mt_wait_reader(m);
        if (mt_has_quantiles(m)) {
            m->ops->quantile_bias_step(m->layers[i].router_bias.w, e->quantiles + m->layers[i].moe_index * (E + 1),
                                       &m->numbers->grad_scale, E, m->options->moe_router_quantile_balancing_ema,
                                       m->stream);
            continue;
        }
        m->ops->expert_bias_step(m->layers[i].router_bias.w, e->loads + m->layers[i].moe_index * E,
                                 &m->numbers->grad_scale, E, (float)m->options->moe_router_bias_update_rate, m->stream);
    }
}

/* Before a step runs again: discards the largest values that it recorded, and quantizes the weights again. */
static void mt_fp8_discard_step(mt_model *m) {
    if (!m->fp8 || !m->fp8->recipe.delayed) return;
    m->ops->memory_zero(m->fp8->history, m->fp8->num_linears * MT_NUM_FP8_OPERANDS * 4, m->stream);
    m->fp8->recipe.version++;
}

/* Delayed scaling: the ranks agree on the largest values of the step, which set the scales of the next one; a bad step
 * leaves them unchanged. */
static void mt_fp8_update_scales(mt_model *m) {
    if (!m->fp8 || !m->fp8->recipe.delayed) return;
    mt_fp8_scale_args a = {.n = m->fp8->num_linears * MT_NUM_FP8_OPERANDS, .length = m->fp8->history_length};
    a.scale = m->fp8->scale, a.history = m->fp8->history, a.largest = m->fp8->largest;
    a.margin = (float)m->options->fp8_margin, a.guard = &m->numbers->grad_scale;
    a.most_recent = m->options->fp8_amax_compute_algo == MT_AMAX_MOST_RECENT;
    const mt_group *group = m->options->tp_only_amax_red ? &m->grid->tensor_context : &m->grid->stage;
    m->ops->all_reduce(a.history, a.n, MT_MAX, MT_F32, group, m->stream);
    m->ops->fp8_scale_step(&a, m->stream);
}

/* Metrics of the experts. Each pipeline stage adds its layers; all other ranks have equal numbers. */
static void mt_experts_report(const mt_model *m, const mt_step_result *result, mt_metrics *metrics) {
    const mt_experts *e = m->experts;
    const mt_options *o = m->options;
    int64_t E = e->router.num_experts;
    double sums[4] = {0}, worst = 0; // imbalances, choices, kept choices, layers
    if (mt_num_expert_layers(o) == 0) return;
    for (int64_t layer = 0; layer < e->num_layers; layer++) {
        double total = 0, greatest = 0;
        for (int64_t i = layer * E; i < (layer + 1) * E; i++) {
            total += (double)result->loads[i];
            greatest = fmax(greatest, (double)result->loads[i]);
            sums[2] += (double)(mt_has_capacity(m) ? result->kept[i] : result->loads[i]);
        }
        double imbalance = greatest * (double)E / fmax(total, 1);
        worst = fmax(worst, imbalance);
        sums[0] += imbalance, sums[1] += total, sums[3]++;
    }
    mt_all_reduce_sum(&m->grid->pipeline, sums, 4, MT_F64);
    mt_all_reduce_max(&m->grid->pipeline, &worst, 1, MT_F64);
    if (sums[1] == 0) return;                             // a step of padding
    double visits = sums[1] / (double)o->moe_router_topk; // tokens times layers
    for (int i = 0; i < MT_NUM_AUX_LOSSES; i++) {
        double coeff = mt_aux_loss_coeff(o, (mt_load_balancing)(MT_BALANCING_AUX_LOSS + i));
        metrics->aux_losses[i] = coeff * result->losses[i] / visits;
        metrics->load_balancing_loss += metrics->aux_losses[i];
    }
    metrics->z_loss = o->moe_z_loss_coeff * result->losses[MT_NUM_AUX_LOSSES] / visits;
    metrics->imbalance = sums[0] / sums[3], metrics->worst_imbalance = worst;
    metrics->dropped = 1 - sums[2] / sums[1];
}

/* Describes the origin of a bad step: the first layer with a router logit that is not finite, and its first rank. Every
 * rank calls this and writes the same text; `text` is unchanged if all router logits are finite. */
static void mt_experts_describe(char text[160], const mt_model *m, const mt_step_result *result, int64_t iteration) {
    const mt_group *world = &m->grid->world;
    double none = (double)((m->options->num_layers + m->options->mtp_num_layers) * world->size);
    double mine = none, first, count = 0;
    if (m->options->num_experts == 0) return;
    for (const mt_layer *w = m->layers; w < m->layers + m->num_layers; w++) {
        double key = (double)(w->number * world->size + world->rank);
        if (w->expert_bucket < 0 || result->invalid[w->moe_index] == 0 || key >= mine) continue;
        mine = key, count = (double)result->invalid[w->moe_index];
    }
    first = -mine;
    mt_all_reduce_max(world, &first, 1, MT_F64);
    first = -first;
    if (first == none) return;
    if (first != mine) count = 0;
    mt_all_reduce_max(world, &count, 1, MT_F64);
    snprintf(text, 160,
             "iteration %lld: rank %lld: the router of layer %lld had %lld tokens whose logits are not finite",
             (long long)iteration, (long long)first % world->size, (long long)first / world->size, (long long)count);
}

/* The micro-batches of a step, and the number of tokens that the first stage has read. */
typedef struct mt_source {
    int64_t micro_batches;
    mt_batch_source *read;
    void *context;
    mt_batch *batch;
    bool training; // a training step; false: an evaluation
    int64_t tokens;
} mt_source;

/* Pads a batch for its ranks; mt_batch_check refuses a batch without room or with an impossible number of ranks. */
static void mt_batch_pad_for_ranks(const mt_model *m, mt_batch *batch) {
    mt_error error;
    if (mt_batch_check_ranks(m, batch, &error) != 0) return;
    int64_t ranks = mt_context_ranks(m, batch), multiple = mt_token_ranks(m->options, ranks);
    if (mt_divide_up(batch->num_tokens, multiple) * multiple <= ranks * m->plan.max_tokens)
        mt_batch_pad(batch, multiple);
}

static int mt_action_forward(mt_model *m, const mt_action *action, mt_source *from, mt_error *error) {
    mt_micro_batch *mb = mt_micro_batch_find(m, action->chunk, -1);
    mt_error cause;
    double begin = mt_time();
    if (from->read(from->context, action->micro_batch, from->batch, error) != 0) return -1;
    m->trainer->data_seconds += mt_time() - begin;
    if (action->chunk == 0) from->tokens += from->batch->num_tokens;
    mt_batch_pad_for_ranks(m, from->batch);
    if (mt_batch_check(m, from->batch, &cause) != 0)
        return mt_error_set(error, "micro-batch %lld: %s", (long long)action->micro_batch, cause.text);
    mt_pass p = mt_load_batch(m, mb, from->batch, from->training);
    p.message_rows = m->max_rows;
    if (m->host_loss) m->host_loss->micro_batch = action->micro_batch, m->host_loss->scored = &p;
    if (p.training) mb->index = action->micro_batch;
    mt_stage_forward(m, &p);
    if (m->stages[action->chunk].loss) mt_loss_forward(m, &p);
    m->last_forward = p;
    return 0;
}

/* remaining[2][num_chunks]: micro-batches of this step whose backward of the input [0], or of the weights [1], is still
 * to come. */
static void mt_action_backward(mt_model *m, const mt_action *action, int64_t *remaining) {
    if (action->kind == MT_ACTION_BACKWARD_WEIGHT) remaining += m->num_chunks;
    mt_micro_batch *mb = mt_micro_batch_find(m, action->chunk, action->micro_batch);
    mt_pass p = mt_pass_begin(m, mb);
    p.training = true, p.message_rows = m->max_rows;
    p.halves = action->kind == MT_ACTION_BACKWARD ? MT_BACKWARD_BOTH : MT_BACKWARD_INPUT;
    p.last = --remaining[action->chunk] == 0;
    if (action->kind == MT_ACTION_BACKWARD_WEIGHT)
        mt_chunk_backward_weight(m, &p);
    else
        mt_stage_backward(m, &p);
    if (action->kind != MT_ACTION_BACKWARD_INPUT) mb->index = -1;
}

/* Posts the receives of later actions while buffers are free: messages arrive during this action's computation, and
 * senders find the buffers that they rely on (mt_model_links). next[direction]: first action not examined yet. */
static void mt_post_receives(mt_model *m, const mt_action *actions, int64_t count, int64_t now, int64_t next[2]) {
    static const mt_action_kind kinds[2] = {MT_ACTION_RECV_FORWARD, MT_ACTION_RECV_BACKWARD};
    static const int links[2] = {MT_LINK_RECV_FORWARD, MT_LINK_RECV_BACKWARD};
    for (int direction = 0; direction < 2; direction++)
        for (int64_t *at = &next[direction]; *at < count; ++*at) {
            if (*at < now || actions[*at].kind != kinds[direction]) continue;
            if (!mt_link_post(m, &m->links[links[direction]], m->max_rows)) break;
        }
}

/* Writes this rank's list to m->trainer->actions and returns its length. */
static int64_t mt_list_actions(mt_model *m, const mt_schedule *schedule) {
    int rank = m->grid->pipeline.rank;
    int64_t count = mt_schedule_actions(NULL, schedule, rank);
    if (count > m->trainer->max_actions) { // in the first two steps, and when the batch size ramps up
        m->trainer->actions = mt_realloc(m->trainer->actions, count * (int64_t)sizeof(mt_action));
        m->trainer->max_actions = count;
    }
    return mt_schedule_actions(m->trainer->actions, schedule, rank);
}

/* Runs a forward or backward with its sends and receives; does nothing for the other kinds. */
static int mt_run_action(mt_model *m, const mt_action *action, mt_source *from, int64_t *remaining, mt_error *error) {
    static const char *const phases[] = {[MT_ACTION_FORWARD] = "forward",
                                         [MT_ACTION_BACKWARD] = "backward",
                                         [MT_ACTION_BACKWARD_INPUT] = "backward of the input",
                                         [MT_ACTION_BACKWARD_WEIGHT] = "backward of the weights",
                                         [MT_ACTION_RECV_BACKWARD] = NULL};
    int status = 0;
    if (!phases[action->kind]) return 0;
    mt_phase_begin(m, phases[action->kind], action->micro_batch, action->chunk);
    if (action->kind == MT_ACTION_FORWARD)
        status = mt_action_forward(m, action, from, error);
    else
        mt_action_backward(m, action, remaining);
    mt_phase_end(m);
    return status;
}

/* Runs the first `count` micro-batches, one at a time: each passes through all stages, and back if it trains, before
 * the next. */
static int mt_run_alone(mt_model *m, int64_t count, mt_source *from, int64_t *remaining, mt_error *error) {
    const int halves = mt_splits_backward(m) ? 2 : 1;
    const mt_action_kind backwards[2] = {halves == 2 ? MT_ACTION_BACKWARD_INPUT : MT_ACTION_BACKWARD,
                                         MT_ACTION_BACKWARD_WEIGHT};
    int status = 0;
    m->runs_alone = true;
    for (int64_t i = 0; i < count && status == 0; i++) {
        for (int64_t chunk = 0; chunk < m->num_chunks && status == 0; chunk++)
            status = mt_run_action(m, &(mt_action){MT_ACTION_FORWARD, i, chunk, -1}, from, remaining, error);
        for (int64_t chunk = m->num_chunks - 1; chunk >= 0 && from->training; chunk--)
            for (int half = 0; half < halves && status == 0; half++)
                status = mt_run_action(m, &(mt_action){backwards[half], i, chunk, -1}, from, remaining, error);
    }
    m->runs_alone = false;
    return status;
}

/* Returns the number of micro-batches that run alone, and removes them from the schedule. Where the first use of an
 * operation waits for all work (ops->first_use_waits), these are, in the first step: two micro-batches; with
 * interleaving a group, so that no rank needs more live micro-batches afterwards; all of them if the others would be no
 * legal schedule.
 *
 * Two ranks that wait in a first use, each for a message to the other one, would wait forever. While a micro-batch runs
 * alone, a rank computes only after its message has arrived, and the receiver of its own message already waits for it.
 * Two micro-batches use all operations: the second one adds to the gradients of the first. */
static int64_t mt_count_alone(mt_schedule *schedule, const mt_ops *ops, bool is_warm) {
    int64_t alone = schedule->kind == MT_SCHEDULE_INTERLEAVED ? schedule->group : 2;
    if (schedule->pp == 1 || is_warm || !ops->first_use_waits()) return 0;
    schedule->micro_batches -= alone;
    if (mt_schedule_is_legal(schedule)) return alone;
    alone += schedule->micro_batches, schedule->micro_batches = 0;
    return alone;
}

/* Runs this rank's list of actions. */
static int mt_run_schedule(mt_model *m, mt_source *from, mt_error *error) {
    if (!from->training && from->micro_batches <= 0) return 0;
    bool *is_warm = m->trainer->is_warm[m->adapters_off];
    mt_schedule schedule = mt_schedule_of(m->options, from->micro_batches);
    if (!from->training) schedule.kind = MT_SCHEDULE_FORWARD_ONLY;
    MT_CHECK(mt_schedule_is_legal(&schedule));
    int64_t alone = mt_count_alone(&schedule, m->ops, is_warm[from->training]), ahead[2] = {0};
    int64_t count = schedule.micro_batches > 0 ? mt_list_actions(m, &schedule) : 0;
    int64_t *remaining = mt_malloc(2 * m->num_chunks * 8);
    for (int64_t i = 0; i < 2 * m->num_chunks; i++) remaining[i] = from->micro_batches;
    int status = mt_run_alone(m, alone, from, remaining, error);
    for (int64_t i = 0; i < count && status == 0; i++) {
        mt_action *action = &m->trainer->actions[i];
        action->micro_batch += alone;
        mt_post_receives(m, m->trainer->actions, count, i, ahead);
        status = mt_run_action(m, action, from, remaining, error);
    }
    is_warm[0] = true, is_warm[1] |= from->training && from->micro_batches > 1;
    free(remaining);
    return status;
}

/* Zeroes the sums of a step's losses, and the squared norm. */
static void mt_sums_begin(mt_model *m) {
    m->ops->memory_zero(m->numbers->sums, 3 * 8, m->stream);
    if (m->indexer_sums) m->ops->memory_zero(m->indexer_sums, 4 * 8, m->stream);
    m->ops->memory_zero(&m->numbers->report, (int64_t)sizeof m->numbers->report, m->stream);
    if (m->host_loss) *m->host_loss->sums = (mt_host_sums){0};
}

/* Sums losses and token counts over all ranks: samples, sequence parts, and the stage with the loss. */
static void mt_sums_finish(mt_model *m, bool training) {
    const mt_group *groups[] = {&m->grid->data_context, &m->grid->pipeline};
    int64_t modules = training ? m->options->mtp_num_layers : 0;
    for (int i = 0; i < 2; i++) {
        m->ops->all_reduce(m->numbers->sums, 2, MT_SUM, MT_F64, groups[i], m->stream);
        if (m->plan.loss->host)
            m->ops->all_reduce(&m->numbers->report, MT_LOSS_REPORT_NUMBERS, MT_SUM, MT_F64, groups[i], m->stream);
        if (modules > 0) m->ops->all_reduce(m->numbers->mtp, 2 * modules, MT_SUM, MT_F64, groups[i], m->stream);
    }
    if (training && m->indexer_sums) m->ops->all_reduce(m->indexer_sums, 2, MT_SUM, MT_F64, &m->grid->world, m->stream);
}

/* Forwards and backwards of all micro-batches, gradients summed over ranks, and their check. `spoils`: this rank's loss
 * becomes NaN, an injected fault. */
static int mt_step_gradients(mt_model *m, mt_source *from, bool spoils, mt_error *error) {
    from->tokens = 0;
    mt_gradients_begin(m);
    mt_experts_begin(m);
    mt_sums_begin(m);
    if (m->reruns) m->ops->memory_zero(m->numbers->own, 2 * 8, m->stream);
    if (m->options->mtp_num_layers > 0)
        m->ops->memory_zero(m->numbers->mtp, (int64_t)sizeof m->numbers->mtp, m->stream);
    if (mt_run_schedule(m, from, error) != 0) return -1;
    mt_phase_begin(m, "gradients", -1, -1);
    if (spoils) mt_copy_wait(m, m->numbers->sums, &(double){NAN}, 8);
    if (m->reruns) m->ops->memory_copy(m->numbers->own, m->numbers->sums, 8, m->stream);
    mt_sums_finish(m, true);
    mt_gradients_finish(m);
    mt_gradients_reduce_model(m);
    mt_experts_finish(m);
    mt_phase_end(m);
    mt_step_check_gradients(m);
    return 0;
}

/* Enqueues the copies of a step's results to the host. */
static void mt_step_report(mt_model *m, int entry, int64_t iteration) {
    mt_step_result *result = &m->trainer->results[entry];
    const mt_experts *e = m->experts;
    m->ops->memory_copy(&result->numbers, m->numbers, (int64_t)sizeof *m->numbers, m->stream);
    if (m->indexer_sums)
        m->ops->memory_copy(result->indexer_sums, m->indexer_sums, sizeof result->indexer_sums, m->stream);
    if (m->options->num_experts > 0) m->ops->memory_copy(result->losses, e->losses, sizeof result->losses, m->stream);
    if (e->num_layers > 0) {
        m->ops->memory_copy(result->loads, e->loads, 2 * e->num_layers * e->router.num_experts * 4, m->stream);
        m->ops->memory_copy(result->invalid, e->invalid, e->num_layers * 4, m->stream);
    }
    m->ops->event_record(m->trainer->pending[entry].done, m->stream);
    m->trainer->pending[entry].iteration = iteration;
    m->trainer->pending[entry].fault = m->trainer->fault;
}

void mt_train_name_fault(mt_model *m, const char *operand) {
    m->trainer->fault = operand;
}

/* ---- bad steps */

/* A warning on stderr of rank 0. */
static void mt_step_warn(const mt_model *m, const char *format, ...) {
    if (m->grid->world.rank != 0) return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "warning: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
}

/* sums: loss and token count. NaN without tokens. */
static double mt_mean_loss(const double sums[2]) {
    return sums[1] == 0 ? NAN : sums[0] / sums[1];
}

/* The operand of the loss that was not finite: those first from which others are computed. NULL: none, or the model's
 * own numbers. */
static const char *mt_step_operand(const mt_step_result *result, const char *fault) {
    static const struct {
        int operand;
        const char *name;
    } names[] = {{MT_REF_LOGP, "the log-probabilities of the reference model (--ref-load)"},
                 {MT_OPERAND_TEACHER, "the logits of the teacher (--teacher-load)"},
                 {MT_OLD_VALUES, "the values of the critic"},
                 {MT_OLD_LOGP, "the old log-probabilities"},
                 {MT_ROLLOUT_WEIGHTS, "the rollout weights"},
                 {MT_ADVANTAGES, "the advantages"},
                 {MT_RETURNS, "the returns"}};
    if (fault) return fault;
    if (result->numbers.report.not_finite[MT_OPERAND_OWN] > 0) return NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (result->numbers.report.not_finite[names[i].operand] > 0) return names[i].name;
    return NULL;
}

/* ---- loss scaling */

/* Gradients of activations in fp16 underflow below 2^-24, so the loss is multiplied by a scale and the update divides
 * it out (Micikevicius et al., "Mixed precision training"). A step whose gradients overflow is skipped on all ranks,
 * since the norm that shows it is a sum over all ranks. The host waits for each step, whose result sets the scale of
 * the next. */

void mt_loss_scaler_update(mt_loss_scaler *scaler, const mt_options *o, bool overflows) {
    if (o->loss_scale > 0) return;
    if (overflows) {
        scaler->growth_tracker = 0, scaler->hysteresis_tracker--;
        if (scaler->hysteresis_tracker <= 0) scaler->scale = fmax(scaler->scale / 2, o->min_loss_scale);
    } else if (++scaler->growth_tracker >= o->loss_scale_window) {
        scaler->growth_tracker = 0, scaler->hysteresis_tracker = o->hysteresis;
        scaler->scale *= 2;
    }
}

/* The scale of a step of `samples` sequences: of the mean loss over all its tokens, padding included, whatever the
 * layout; here the loss is a sum. */
static void mt_loss_scale_begin(mt_model *m, mt_run_state *state, int64_t samples) {
    const mt_options *o = m->options;
    mt_loss_scaler *scaler = &state->loss_scaler;
    if (!o->fp16) return;
    if (scaler->scale == 0) *scaler = (mt_loss_scaler){o->initial_loss_scale, 0, o->hysteresis};
    if (o->loss_scale > 0) scaler->scale = o->loss_scale;
    m->trainer->loss_scale = scaler->scale;
    m->loss_scale = (float)(scaler->scale / (double)(samples * o->seq_length));
}

/* True if a step that is not finite is the loss scale's concern: a smaller one may help, or the user wants no check. */
static bool mt_loss_scale_skips(const mt_model *m, const mt_step_numbers *step) {
    const mt_options *o = m->options;
    int check = (int)step->guard[MT_GUARD_CHECK];
    if (!o->fp16 || (check != MT_LOSS_NOT_FINITE && check != MT_NORM_NOT_FINITE)) return false;
    return !o->check_for_nan_in_loss_and_grad || (o->loss_scale == 0 && m->trainer->loss_scale > o->min_loss_scale);
}

/* The scale after a step, which has been checked. */
static void mt_loss_scale_finish(mt_model *m, mt_run_state *state, const mt_step_result *result, int64_t samples) {
    int check = (int)result->numbers.guard[MT_GUARD_CHECK];
    bool overflows = check == MT_LOSS_NOT_FINITE || check == MT_NORM_NOT_FINITE;
    if (!m->options->fp16 || (!overflows && check != MT_STEP_PASSED)) return;
    if (overflows) state->skipped_samples += samples;
    mt_loss_scaler_update(&state->loss_scaler, m->options, overflows);
}

/* Describes the failed check of a step, and what to do: the learning rate is at fault only if it has moved a weight. In
 * fp16 the scale of the loss could not fall. */
static void mt_step_describe(char text[160], char advice[160], const mt_options *o, int64_t iteration,
                             const mt_step_result *result, const char *fault) {
    const mt_step_numbers *step = &result->numbers;
    const char *operand = step->guard[MT_GUARD_CHECK] == MT_LOSS_SPIKES ? NULL : mt_step_operand(result, fault);
    bool moved = step->guard[MT_GUARD_UPDATES] > 0;
    if (operand)
        snprintf(advice, 160, "check the weights and the data that they come from");
    else if (o->fp16 && step->guard[MT_GUARD_CHECK] == MT_NORM_NOT_FINITE)
        snprintf(advice, 160, "lower %s or take --bf16", o->loss_scale > 0 ? "--loss-scale" : "--min-loss-scale");
    else if (step->guard[MT_GUARD_CHECK] == MT_LOSS_SPIKES || moved)
        snprintf(advice, 160, "lower --lr or check the data");
    else
        snprintf(advice, 160, "no update was made before: check the model's weights and the data");
    double loss = mt_mean_loss(step->sums);
    if (step->guard[MT_GUARD_CHECK] == MT_LOSS_SPIKES)
        snprintf(text, 160, "iteration %lld: the loss is %.4g, %.1f times its average", (long long)iteration, loss,
                 loss / step->guard[MT_GUARD_AVERAGE]);
    else if (step->guard[MT_GUARD_CHECK] == MT_NORM_NOT_FINITE)
        snprintf(text, 160, "iteration %lld: the gradient norm is %g", (long long)iteration,
                 fabs((double)step->grad_norm));
    else
        snprintf(text, 160, "iteration %lld: the loss is %g", (long long)iteration, isnan(loss) ? fabs(loss) : loss);
    if (operand) snprintf(text + strlen(text), 160 - strlen(text), ": %s are not finite", operand);
}

/* Applies --bad-step-policy to a bad step. */
static int mt_step_handle_bad(mt_model *m, int64_t iteration, const mt_step_result *result, const char *fault,
                              mt_error *error) {
    const mt_options *o = m->options;
    mt_bad_steps *bad = &m->trainer->bad_steps;
    char what[160], advice[160];
    mt_step_describe(what, advice, o, iteration, result, fault);
    if (result->numbers.guard[MT_GUARD_CHECK] != MT_LOSS_SPIKES) mt_experts_describe(what, m, result, iteration);
    if (o->bad_step_policy == MT_BAD_STEP_STOP)
        return mt_error_set(error, "%s; %s (nothing was saved since)", what, advice);
    bad->skipped++;
    if (++bad->in_a_row > o->max_bad_steps_in_a_row)
        return mt_error_set(error, "%s, after %lld bad steps in a row (--max-bad-steps-in-a-row); %s", what,
                            (long long)o->max_bad_steps_in_a_row, advice);
    bool goes_back = o->bad_step_policy == MT_BAD_STEP_REWIND && iteration > bad->rewound;
    if (goes_back && bad->rewind == 0) bad->rewind = iteration;
    mt_step_warn(m, "%s; %s", what, goes_back ? "going back to the last checkpoint" : "this step makes no update");
    return 0;
}

/* Waits for an entry's result and checks it. */
static int mt_step_check(mt_model *m, int entry, mt_error *error) {
    int64_t iteration = m->trainer->pending[entry].iteration;
    const mt_step_result *result = &m->trainer->results[entry];
    if (iteration == 0) return 0;
    m->ops->event_synchronize(m->trainer->pending[entry].done);
    m->trainer->updates = (int64_t)result->numbers.guard[MT_GUARD_UPDATES];
    m->trainer->pending[entry].iteration = 0;
    if (m->trainer->bad_steps.rewind > 0) return 0; // the rewind repeats this step
    mt_guard_check check = (mt_guard_check)result->numbers.guard[MT_GUARD_CHECK];
    if (check == MT_NO_TOKENS) {
        m->trainer->bad_steps.skipped++;
        mt_step_warn(m, "iteration %lld: every token is masked; this step makes no update", (long long)iteration);
        return 0;
    }
    if (mt_loss_scale_skips(m, &result->numbers)) {
        m->trainer->bad_steps.skipped++;
        return 0;
    }
    if (check != MT_STEP_PASSED)
        return mt_step_handle_bad(m, iteration, result, m->trainer->pending[entry].fault, error);
    m->trainer->bad_steps.in_a_row = 0;
    return 0;
}

/* Waits for both pending steps, the older one first, and checks them. */
static int mt_steps_check(mt_model *m, mt_error *error) {
    int older = (int)(m->trainer->num_steps % 2);
    return mt_step_check(m, older, error) != 0 ? -1 : mt_step_check(m, !older, error);
}

/* Completes all pending work, then requests a rewind from the caller. */
static int mt_step_rewind(mt_model *m, mt_error *error) {
    if (mt_steps_check(m, error) != 0) return -1;
    m->ops->stream_synchronize(m->stream);
    return MT_REWIND;
}

int64_t mt_train_bad_iteration(const mt_model *m) {
    return m->trainer->bad_steps.rewind;
}

void mt_train_rewound(mt_model *m) {
    mt_bad_steps *bad = &m->trainer->bad_steps;
    bad->rewound = bad->rewind, bad->rewind = 0;
}

mt_loss_average mt_train_loss_average(mt_model *m) {
    double guard[MT_GUARD_NUMBERS];
    mt_copy_wait(m, guard, m->numbers->guard, sizeof guard);
    return (mt_loss_average){guard[MT_GUARD_AVERAGE], (int64_t)guard[MT_GUARD_STEPS]};
}

void mt_train_set_loss_average(mt_model *m, const mt_loss_average *average) {
    double guard[MT_GUARD_NUMBERS] = {[MT_GUARD_AVERAGE] = average->mean, [MT_GUARD_STEPS] = (double)average->steps};
    mt_copy_wait(m, m->numbers->guard, guard, sizeof guard);
    m->trainer->reported = -1;
}

int64_t mt_train_updates(mt_model *m, const mt_run_state *state) {
    double updates;
    if (state->optimizer_step != m->trainer->reported) return state->optimizer_step; // no step began from it
    mt_copy_wait(m, &updates, m->numbers->guard + MT_GUARD_UPDATES, sizeof updates);
    return (int64_t)updates;
}

/* Gives the device the number of updates where the caller has set it: at the start of a run and after a load. */
static void mt_updates_set(mt_model *m, const mt_run_state *state) {
    double updates = (double)state->optimizer_step;
    if (state->optimizer_step == m->trainer->reported) return;
    mt_copy_wait(m, m->numbers->guard + MT_GUARD_UPDATES, &updates, sizeof updates);
    m->trainer->updates = m->trainer->reported = state->optimizer_step;
}

mt_fp8_state mt_train_fp8_state(mt_model *m) {
    const mt_fp8_model *f = m->fp8;
    mt_fp8_state s = {0};
    if (!f || !f->recipe.delayed) return s;
    int64_t n = f->num_linears * MT_NUM_FP8_OPERANDS;
    s = (mt_fp8_state){.num_linears = f->num_linears, .history_length = f->history_length, .keys = f->keys};
    for (int i = 0; i < MT_NUM_FP8_OPERANDS; i++)
        s.largest[i] = mt_f8_largest(i == MT_FP8_DY ? f->recipe.gradient_format : f->recipe.format);
    s.scale = mt_malloc(mt_max(n * 4, 4)), s.history = mt_malloc(mt_max(f->history_length * n * 4, 4));
    m->ops->memory_copy(s.scale, f->scale, n * 4, m->stream);
    mt_copy_wait(m, s.history, f->history, f->history_length * n * 4);
    memset(s.history, 0, (size_t)n * 4); // an evaluation may have quantized weights since the last step
    return s;
}

void mt_train_set_fp8_state(mt_model *m, const mt_fp8_state *s) {
    mt_fp8_model *f = m->fp8;
    int64_t n = s->num_linears * MT_NUM_FP8_OPERANDS;
    MT_CHECK(f && s->num_linears == f->num_linears && s->history_length == f->history_length);
    m->ops->memory_copy(f->scale, s->scale, n * 4, m->stream);
    mt_copy_wait(m, f->history, s->history, s->history_length * n * 4);
    f->recipe.version++; // weights are quantized anew
}

/* ---- re-running a bad step */

/* Writes "rank 2" or "ranks 0 1 4 ...", the ranks with a flag > 0; returns their number. */
static int mt_ranks_print(char text[160], const double *flags, int count) {
    int found = 0, length = 0;
    for (int i = 0; i < count; i++) found += flags[i] > 0;
    length = snprintf(text, 160, found == 1 ? "rank" : "ranks");
    for (int i = 0; i < count; i++) {
        if (flags[i] <= 0) continue;
        if (length > 140) {
            snprintf(text + length, (size_t)(160 - length), " ...");
            break;
        }
        length += snprintf(text + length, (size_t)(160 - length), " %d", i);
    }
    return found;
}

/* Classifies the fault as transient or repeatable, from both results of every rank. */
static void mt_rerun_report(const mt_model *m, int64_t iteration, const mt_step_numbers *first,
                            const mt_step_numbers *second) {
    const mt_group *world = &m->grid->world;
    char names[160];
    double *differs = mt_calloc(2 * (int64_t)world->size * 8), *not_finite = differs + world->size;
    for (int i = 0; i < 2; i++) {
        double a = first->own[i], b = second->own[i];
        if (a != b && !(isnan(a) && isnan(b))) differs[world->rank] = 1;
        if (!isfinite(a)) not_finite[world->rank] = 1;
    }
    mt_all_reduce_sum(world, differs, 2 * (int64_t)world->size, MT_F64);
    if (mt_ranks_print(names, differs, world->size) > 0)
        mt_step_warn(m, "iteration %lld ran again: a transient fault, %s had a different result; %s",
                     (long long)iteration, names,
                     second->guard[MT_GUARD_CHECK] == MT_STEP_PASSED ? "the second result is used"
                                                                     : "the second result is bad too");
    else if (first->guard[MT_GUARD_CHECK] == MT_STEP_PASSED)
        mt_step_warn(m, "iteration %lld ran again: a correct result, every rank had the same and it passes the check",
                     (long long)iteration);
    else if (mt_ranks_print(names, not_finite, world->size) > 0)
        mt_step_warn(m, "iteration %lld ran again: a repeatable fault, every rank had the same result; not finite: %s",
                     (long long)iteration, names);
    else
        mt_step_warn(m, "iteration %lld ran again: a repeatable fault, every rank had the same result",
                     (long long)iteration);
    free(differs);
}

int mt_train_finish(mt_model *m, mt_error *error) {
    double begin = mt_time();
    int status = mt_steps_check(m, error);
    m->trainer->unread_seconds += mt_time() - begin;
    return status;
}

enum { MT_MEASURED_PIECE = 1 << 20 }; // elements

/* Returns the number of zeros, or the sum of the squares, of device or host memory x[n]. `piece`: memory for copies. */
static double mt_measure(mt_model *m, const void *x, int64_t n, mt_dtype dtype, bool zeros, void *piece) {
    double sum = 0;
    for (int64_t first = 0; first < n; first += MT_MEASURED_PIECE) {
        int64_t count = mt_min(MT_MEASURED_PIECE, n - first);
        mt_copy_wait(m, piece, mt_at((void *)x, first, dtype), count * mt_dtype_size(dtype));
        if (!zeros) mt_cpu_ops.squared_norm(&sum, piece, count, dtype, NULL);
        for (int64_t i = 0; zeros && i < count; i++) {
            float value, scratch;
            value = *mt_row_load(&scratch, piece, i, 1, dtype);
            sum += value == 0;
        }
    }
    return sum;
}

/* Counts the zeros of the last step's gradients and the norm of the parameters, where the options ask for them: master
 * weights in fp32 where there are some, as Megatron-LM takes them. Elements on several ranks count once. */
static void mt_step_measure(mt_model *m, mt_metrics *metrics) {
    const mt_options *o = m->options;
    double sums[2] = {0};
    if (!o->log_num_zeros_in_grad && !o->log_params_norm) return;
    void *piece = mt_malloc(MT_MEASURED_PIECE * 4);
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        const mt_bucket *b = &m->buckets[param->bucket];
        bool counts = param->counted && (b->strategy != MT_NO_SHARD || b->group->rank == 0);
        int64_t begin, count = mt_gradient_run(m, param, param, &begin);
        if (!counts || count == 0) continue;
        bool is_exact = b->master && mt_state_dtype(m, MT_STATE_MASTER) == MT_F32;
        mt_dtype dtype = is_exact ? MT_F32 : b->dtype;
        const void *values = mt_at(is_exact ? b->master : b->param_shard, begin, dtype);
        const void *grads = b->trained ? mt_at(b->grad_shard, begin, b->grad_dtype) : NULL;
        if (o->log_num_zeros_in_grad && grads) sums[0] += mt_measure(m, grads, count, b->grad_dtype, true, piece);
        if (o->log_params_norm) sums[1] += mt_measure(m, values, count, dtype, false, piece);
    }
    free(piece);
    mt_all_reduce_sum(&m->grid->world, sums, 2, MT_F64);
    metrics->num_zeros = sums[0], metrics->params_norm = sqrt(sums[1]);
}

/* FNV-1a of a parameter's bytes, in the 52 bits that a double holds. */
static double mt_param_hash(mt_model *m, const mt_param *param, void *piece) {
    const mt_bucket *b = &m->buckets[param->bucket];
    int64_t n = param->rows * param->cols, size = mt_dtype_size(b->dtype);
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t first = 0; first < n; first += MT_MEASURED_PIECE) {
        int64_t bytes = mt_min(MT_MEASURED_PIECE, n - first) * size;
        mt_copy_wait(m, piece, mt_at(b->params, param->offset + first, b->dtype), bytes);
        for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)piece)[i]) * 0x100000001b3u;
    }
    return (double)(hash >> 12);
}

int mt_train_check_replicas(mt_model *m, mt_error *error) {
    double *hashes = mt_calloc(2 * m->num_params * 8), *first = hashes + m->num_params;
    void *piece = mt_malloc(MT_MEASURED_PIECE * 4);
    bool differs = false;
    for (int64_t i = 0; i < m->num_buckets; i++) {
        const mt_bucket *b = &m->buckets[i];
        mt_bucket_acquire(m, i);
        for (int64_t k = b->first_param; k < b->first_param + b->num_params; k++)
            first[k] = hashes[k] = mt_param_hash(m, &m->params[k], piece);
        mt_bucket_release(m, i);
        mt_broadcast(b->group, first + b->first_param, b->num_params * 8, 0);
        for (int64_t k = b->first_param; k < b->first_param + b->num_params && !differs; k++) {
            differs = hashes[k] != first[k];
            if (differs)
                mt_error_set(error, "rank %d has other values of %s than rank %d, which is to have the same",
                             m->grid->world.rank, m->params[k].hf_name, b->group->members[0]);
        }
    }
    free(piece), free(hashes);
    return mt_agree(&m->grid->world, differs, error);
}

/* A step's injected faults. */
typedef struct mt_injection {
    bool any, here; // on some rank; on this one
} mt_injection;

/* Each rank finds the draws of all. As in Megatron-LM, the first step of a run has none. */
static mt_injection mt_injection_draw(const mt_model *m, int64_t iteration, int64_t micro_batches) {
    static const char *const names[] = {"a transient error", "a persistent error", "a rejected result"};
    const mt_options *o = m->options;
    const mt_group *world = &m->grid->world;
    mt_injection injection = {false, false};
    char text[160];
    if (o->error_injection_rate == 0 || m->trainer->num_steps == 0) return injection;
    double chance = 1 - pow(1 - 1 / (double)o->error_injection_rate, (double)micro_batches);
    double *is_faulty = mt_calloc(world->size * 8);
    for (int rank = 0; rank < world->size; rank++) {
        uint32_t words[4];
        mt_philox(words, mt_random_key((uint64_t)o->seed, MT_RANDOM_INJECTION, 0), (uint64_t)iteration, (uint64_t)rank);
        is_faulty[rank] = (double)words[0] < chance * 4294967296.0;
    }
    injection.here = is_faulty[world->rank] > 0;
    injection.any = mt_ranks_print(text, is_faulty, world->size) > 0;
    if (injection.any)
        mt_step_warn(m, "iteration %lld: injecting %s on %s (--error-injection-rate)", (long long)iteration,
                     names[o->error_injection_type], text);
    free(is_faulty);
    return injection;
}

/* Gradients and their check. With --rerun-mode validate_results a bad step runs again with the same parameters and
 * samples; its second result replaces the first. */
static int mt_step_try(mt_model *m, int64_t iteration, mt_source *from, mt_error *error) {
    mt_injection injection = mt_injection_draw(m, iteration, from->micro_batches);
    mt_injected_error type = m->options->error_injection_type;
    bool rejects = injection.any && type == MT_INJECT_CORRECT_RESULT;
    bool spoils = injection.here && type != MT_INJECT_CORRECT_RESULT,
         spoils_again = spoils && type == MT_INJECT_PERSISTENT;
    double guard[MT_GUARD_NUMBERS];
    if (rejects) mt_copy_wait(m, guard, m->numbers->guard, sizeof guard);
    if (mt_step_gradients(m, from, spoils, error) != 0) return -1;
    if (!m->reruns) return 0;
    mt_step_numbers first, second;
    mt_copy_wait(m, &first, m->numbers, (int64_t)sizeof first);
    bool passed = first.guard[MT_GUARD_CHECK] == MT_STEP_PASSED;
    if ((passed && !rejects) || first.guard[MT_GUARD_CHECK] == MT_NO_TOKENS) return 0;
    if (mt_loss_scale_skips(m, &first)) return 0;
    mt_fp8_discard_step(m);
    if (passed) mt_copy_wait(m, m->numbers->guard, guard, sizeof guard); // it has counted the step
    if (mt_step_gradients(m, from, spoils_again, error) != 0) return -1;
    mt_copy_wait(m, &second, m->numbers, (int64_t)sizeof second);
    mt_rerun_report(m, iteration, &first, &second);
    return 0;
}

int mt_train_step(mt_model *m, mt_run_state *state, int64_t micro_batches, mt_batch_source *source, void *context,
                  mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    double begin = mt_time();
    int entry = (int)(m->trainer->num_steps % 2);
    int64_t samples = micro_batches * m->options->micro_batch_size * m->grid->data.size;
    mt_source from = {micro_batches, source, context, batch, .training = true};
    m->trainer->data_seconds = 0;
    if (m->resting_parts & ~(1u << MT_PART_CACHE)) return mt_error_set(error, "a part rests; call mt_model_wake");
    if (mt_step_check(m, entry, error) != 0) return -1; // the step before the last, which used this entry
    if (m->trainer->bad_steps.rewind > 0) return mt_step_rewind(m, error);
    mt_updates_set(m, state);
    mt_loss_scale_begin(m, state, samples);
    if (mt_step_try(m, state->iteration + 1, &from, error) != 0) return -1;
    mt_experts_update_biases(m);
    mt_fp8_update_scales(m);
    mt_optimizer_step(m, state);
    mt_step_report(m, entry, state->iteration + 1);
    m->trainer->num_steps++;
    if (metrics || !m->trainer->pending[entry].done || m->options->fp16)
        if (mt_steps_check(m, error) != 0) return -1;
    m->trainer->unread_tokens += (double)(from.tokens * m->grid->data.size);
    m->trainer->unread_seconds += mt_time() - begin;
    if (m->trainer->bad_steps.rewind > 0) return mt_step_rewind(m, error);
    if (metrics) {
        const mt_step_result *result = &m->trainer->results[entry];
        *metrics = (mt_metrics){.loss = mt_mean_loss(result->numbers.sums),
                                .grad_norm = fabs((double)result->numbers.grad_norm), // NaN without a sign
                                .learning_rate = mt_learning_rate(m->options, mt_scheduled_samples(state)),
                                .weight_decay = mt_weight_decay(m->options, mt_scheduled_samples(state)),
                                .tokens = (double)(from.tokens * m->grid->data.size),
                                .skipped = m->trainer->bad_steps.skipped,
                                .loss_scale = state->loss_scaler.scale,
                                .data_seconds = m->trainer->data_seconds};
        for (int64_t k = 0; k < m->options->mtp_num_layers; k++)
            metrics->mtp_losses[k] = mt_mean_loss(result->numbers.mtp + 2 * k);
        memcpy(metrics->loss_metrics, result->numbers.report.metrics, sizeof metrics->loss_metrics);
        metrics->loss_count = result->numbers.sums[1];
        metrics->seconds = m->trainer->unread_seconds * metrics->tokens / m->trainer->unread_tokens;
        mt_experts_report(m, result, metrics);
        mt_step_measure(m, metrics);
        if (m->indexer_sums)
            metrics->indexer_loss =
                m->options->dsa_indexer_loss_coeff * result->indexer_sums[0] / fmax(result->indexer_sums[1], 1);
        m->trainer->unread_tokens = m->trainer->unread_seconds = 0;
    }
    state->iteration++;
    state->optimizer_step = m->trainer->reported = m->trainer->updates;
    state->consumed_train_samples += samples;
    mt_loss_scale_finish(m, state, &m->trainer->results[entry], samples);
    return 0;
}

int mt_evaluate_sums(mt_model *m, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                     double *sums, mt_error *error) {
    double these[2];
    mt_source from = {micro_batches, source, context, batch, .training = false};
    mt_sums_begin(m);
    if (mt_run_schedule(m, &from, error) != 0) return -1;
    mt_sums_finish(m, false);
    mt_copy_wait(m, these, m->numbers->sums, 2 * 8);
    sums[0] += these[0], sums[1] += these[1];
    return 0;
}

int mt_evaluate(mt_model *m, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                double *loss, mt_error *error) {
    double sums[2] = {0};
    if (mt_evaluate_sums(m, micro_batches, source, context, batch, sums, error) != 0) return -1;
    *loss = mt_mean_loss(sums);
    return 0;
}

int mt_score_tokens(mt_model *m, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                    mt_score_sink *sink, void *sink_context, mt_error *error) {
    mt_source from = {micro_batches, source, context, batch, .training = false};
    if (m->has_loss) m->host_loss->sink = sink, m->host_loss->sink_context = sink_context;
    int status = mt_run_schedule(m, &from, error);
    if (m->has_loss) m->host_loss->sink = NULL;
    return status;
}

/* ==== §15 the model =============================================================================================== */
/* Embedding, layers and output: memory planned once, then forward, backward and decoding. Invariants: after
 * mt_model_create only graphs and the rows of experts allocate memory; the same code plans memory, in a counting arena,
 * and assigns it. */

/* ==== §15a memory ================================================================================================= */

/* Rows of logits in one copy to the host. */
enum { MT_STAGED_ROWS = 16 };

/* True if logits can share memory with scratch: the backward directly follows the loss of the same micro-batch. */
static bool mt_logits_overlap(const mt_model *m) {
    return m->num_micro_batches == 1 && m->has_loss && m->mtp->count == 0;
}

/* `gathered` of the second pair of regions, for rows of up to `widest` channels; if it overlaps, in a mailbox with
 * the parts. */
static void mt_plan_exchange(mt_tensor_parallel *tp, int64_t widest, mt_arena *arena) {
    tp->first_part = tp->group->size * tp->max_rows * widest;
    int64_t whole = tp->first_part * mt_dtype_size(tp->dtype);
    tp->mailbox_bytes = tp->overlaps ? 2 * whole + MT_MAILBOX_OWN : whole;
    tp->gathered = mt_arena_alloc(arena, tp->mailbox_bytes);
    if (tp->overlaps) tp->part_rows = mt_arena_alloc(arena, tp->max_rows * tp->group->size * 4);
}

/* Scratch and counters that the layers with experts share. No slots: no layer's value stays here until its backward. */
static void mt_plan_experts(mt_model *m, mt_arena *arena) {
    mt_experts *e = m->experts;
    int64_t R = m->max_rows, E = e->router.num_experts, k = e->router.topk, size = e->group->size;
    int64_t all = R * m->grid->tensor_context.size;
    if (m->options->num_experts > 0) e->losses = mt_arena_alloc(arena, (MT_NUM_AUX_LOSSES + 2) * 8);
    if (e->num_layers == 0) return;
    if (mt_expert_rows_fixed(m)) {
        int64_t M = mt_max(e->num_choices, mt_expert_rows_received(e));
        mt_expert_rows_plan plan = {.M = M}, dispatched = {.M = M, .dispatched = true};
        mt_expert_rows_allocate(m, &e->rows, arena, &plan);
        if (e->dispatcher->reorders) mt_expert_rows_allocate(m, &e->dispatched, arena, &dispatched);
    }
    e->loads = mt_arena_alloc(arena, 3 * e->num_layers * E * 4);
    e->kept = mt_at(e->loads, e->num_layers * E, MT_F32);
    e->global = mt_at(e->loads, 2 * e->num_layers * E, MT_F32);
    e->invalid = mt_arena_alloc(arena, e->num_layers * 4), e->discarded = mt_arena_alloc(arena, 4);
    if (mt_has_quantiles(m)) e->quantiles = mt_arena_alloc(arena, e->num_layers * (E + 1) * 4);
    if (mt_has_aux_stats(m, MT_BALANCING_GLOBAL_AUX_LOSS)) {
        e->rank_counts = mt_arena_alloc(arena, m->grid->data.size * E * 4);
        e->data_ranks = mt_arena_alloc(arena, m->grid->data.size * 4);
    }
    if (m->options->moe_shared_expert_gate)
        e->gate_experts = mt_arena_alloc(arena, R * 4), e->dgates = mt_arena_alloc(arena, m->plan.max_tokens * 4);
    if (m->plan.train) {
        e->dprobs = mt_arena_alloc(arena, e->tokens * k * 4), e->dlogits = mt_arena_alloc(arena, R * E * 4);
        e->dlogits_rounded = mt_arena_alloc(arena, R * E * mt_dtype_size(m->dtype));
        e->router_dx = mt_arena_alloc(arena, R * m->C * mt_dtype_size(m->dtype));
    }
    if (e->dispatcher->adds_base || !m->options->moe_permute_fusion)
        e->scattered = mt_arena_alloc(arena, R * e->C * mt_dtype_size(m->dtype));
    if (!m->options->moe_permute_fusion) e->sums = mt_arena_alloc(arena, e->tokens * e->C * 4);
    if (mt_has_latent_experts(m)) {
        e->latent = mt_arena_alloc(arena, R * e->C * mt_dtype_size(m->dtype));
        if (m->plan.train) e->dlatent = mt_arena_alloc(arena, R * e->C * mt_dtype_size(m->dtype));
        if (m->options->moe_shared_expert_intermediate_size > 0)
            e->wide = mt_arena_alloc(arena, R * m->C * mt_dtype_size(m->dtype));
    }
    if (e->dispatcher->gathers) {
        mt_plan_exchange(&e->exchange, e->C, arena);
        e->exchange.partial = e->exchange.gathered;
    }
    if (e->dispatcher->reorders) {
        e->all_offsets = mt_arena_alloc(arena, size * (e->num_destinations + 1) * 4);
        e->counts = mt_arena_alloc(arena, size * e->num_local * 4);
    }
    bool all_logits = mt_has_sinkhorn(m) || mt_has_quantiles(m);
    if ((!mt_has_capacity(m) && !all_logits) || all == R) return;
    e->all_index = mt_arena_alloc(arena, all * 8);
    if (all_logits) e->all_logits = mt_arena_alloc(arena, all * E * 4);
    if (!mt_has_capacity(m)) return;
    e->all_experts = mt_arena_alloc(arena, all * k * 4), e->all_probs = mt_arena_alloc(arena, all * k * 4);
}

/* The activations of a layer with one residency; w NULL: one set for this rank's layers, if none saves anything. */
static void mt_plan_layer(const mt_model *m, const mt_layer *w, mt_residency residency, mt_activations *a,
                          mt_arena *arena) {
    mt_slots any;
    if (!w) mt_layer_slots(m, &any, NULL);
    mt_slots_allocate(w ? w->slots : &any, residency, a, arena);
    bool has_experts = w ? w->expert_bucket >= 0 : m->experts->num_layers > 0;
    if (has_experts) mt_routing_allocate(m, w, residency, a->routing, arena);
}

/* The buffers of recomputed and of offloaded values: each as large as the largest layer's that uses it. Layers take
 * turns with those of offloaded values. */
static void mt_plan_value_buffers(mt_model *m, mt_arena *arena) {
    mt_routing routing = {0};
    mt_activations a = {.routing = &routing};
    int64_t largest = 0, count = 0;
    for (mt_layer *w = m->layers; w < m->layers + m->num_layers; w++) {
        mt_recompute_buffer *buffer = mt_recompute_buffer_of(m, w);
        mt_arena recomputed = {0}, offloaded = {0};
        mt_plan_layer(m, w, MT_RECOMPUTE, &a, &recomputed);
        mt_plan_layer(m, w, MT_OFFLOAD, &a, &offloaded);
        buffer->bytes = mt_max(buffer->bytes, recomputed.used), largest = mt_max(largest, offloaded.used);
        w->offload_bytes = offloaded.used, w->offload_buffer = (int)(count % MT_OFFLOAD_BUFFERS);
        count += offloaded.used > 0;
    }
    for (int64_t i = 0; i < m->num_recompute_buffers; i++)
        m->recompute_buffers[i].memory = mt_arena_alloc(arena, m->recompute_buffers[i].bytes);
    for (int i = 0; i < MT_OFFLOAD_BUFFERS && m->offload; i++)
        m->offload->buffers[i].memory = mt_arena_alloc(arena, largest);
}

/* Offloaded values of a micro-batch's layers: where they are computed, and their copy on the host. On a single stage
 * the backward follows the forward, so it finds the last layers' values in the buffers. */
static void mt_plan_offloaded(mt_model *m, const mt_micro_batch *mb, mt_arena *host) {
    const mt_stage *stage = &m->stages[mb->chunk];
    int64_t staying = m->grid->pipeline.size == 1 ? MT_OFFLOAD_BUFFERS : 0;
    for (int64_t i = stage->num_layers + stage->num_mtp - 1; i >= 0; i--) {
        const mt_layer *w = &m->layers[m->first_local[mb->chunk] + i];
        mt_arena buffer = {.base = mt_offload_buffer_of(m, w)->memory, .capacity = w->offload_bytes};
        mt_plan_layer(m, w, MT_OFFLOAD, &mb->layers[i], &buffer);
        if (w->offload_bytes > 0 && staying-- <= 0) mb->layers[i].host = mt_arena_alloc(host, w->offload_bytes);
    }
}

/* Sizes of context-parallel attention; with dynamic sizes, of the batches that 2^level ranks share. */
static mt_context_plan mt_model_context_plan(const mt_model *m, int level) {
    const mt_grid *grid = m->grid;
    const mt_group *a2a = &grid->context_a2a, *ring = &grid->context_ring;
    if (m->num_contexts > 1) {
        const mt_group *one = &mt_grid_of_one.context, *block = level > 0 ? &grid->context_blocks[level - 1] : one;
        bool by_head = m->options->cp_comm_type == MT_CP_A2A;
        if (level == m->num_contexts - 1) block = &grid->context;
        a2a = by_head ? block : one, ring = by_head ? one : block;
    }
    mt_context_plan plan = {.comm_type = m->options->cp_comm_type, .a2a = a2a, .ring = ring, .dtype = m->dtype};
    plan.window = mt_options_common_window(m->options);
    plan.max_tokens = m->plan.max_tokens, plan.train = m->plan.train;
    plan.num_heads = m->H, plan.num_groups = m->G, plan.head_size = m->D, plan.value_size = m->Dv;
    plan.recurs = mt_has_states(m->options);
    return plan;
}

/* Output i of a stage: 0: the chunk's, then the modules'. All slots are kept: nothing recomputes them, and a split
 * backward runs the head whole. */
static void mt_plan_output(const mt_model *m, mt_micro_batch *mb, int64_t i, mt_arena *arena) {
    int64_t R = m->max_rows, rows = m->plan.max_logits;
    mt_slots slots = {.count = 0}, *s = &slots;
    MT_OUTPUT_SLOT(s, hidden, R, m->C, m->dtype);
    if (i > 0) {
        MT_OUTPUT_SLOT(s, embedded, R, m->C, m->dtype), MT_OUTPUT_SLOT(s, joined, R, 2 * m->C, m->dtype);
        MT_OUTPUT_SLOT(s, embedded_rstd, R, 1, MT_F32), MT_OUTPUT_SLOT(s, hidden_rstd, R, 1, MT_F32);
        if (m->options->normalization == MT_LAYERNORM)
            MT_OUTPUT_SLOT(s, embedded_mean, R, 1, MT_F32), MT_OUTPUT_SLOT(s, hidden_mean, R, 1, MT_F32);
    }
    if (m->stages[mb->chunk].loss) {
        mt_norm_slots(s, m, "norm", offsetof(mt_output, norm), 0, NULL);
        MT_OUTPUT_SLOT(s, lse, rows, 1, MT_F32), MT_OUTPUT_SLOT(s, dlogp, rows, 1, MT_F32);
        if (m->plan.loss->uses_entropy)
            MT_OUTPUT_SLOT(s, entropy, rows, 1, MT_F32), MT_OUTPUT_SLOT(s, dentropy, rows, 1, MT_F32);
        if (!mt_logits_overlap(m)) MT_OUTPUT_SLOT(s, logits, rows, m->head_width, m->dtype);
    }
    mt_slots_allocate(s, MT_KEEP, &mb->outputs[i], arena);
}

/* Saved values of one micro-batch on one chunk. */
static void mt_plan_micro_batch(const mt_model *m, mt_micro_batch *mb, mt_arena *arena) {
    const mt_stage *stage = &m->stages[mb->chunk];
    mb->device_batch = mt_arena_alloc(arena, m->batch_bytes);
    for (int64_t i = 0; i < (m->plan.train ? stage->num_layers + stage->num_mtp : 1); i++) {
        const mt_layer *w = m->plan.train ? &m->layers[m->first_local[mb->chunk] + i] : NULL;
        mt_plan_layer(m, w, MT_KEEP, &mb->layers[i], arena);
        if (!w) continue;
        mt_recompute_buffer *buffer = mt_recompute_buffer_of(m, w);
        mt_arena recomputed = {.base = buffer->memory, .capacity = buffer->bytes};
        mt_plan_layer(m, w, MT_RECOMPUTE, &mb->layers[i], &recomputed);
    }
    for (int64_t i = 0; i <= stage->num_mtp; i++) mt_plan_output(m, mb, i, arena);
}

/* Communication buffers of tensor and pipeline parallelism. */
static void mt_plan_parallel(mt_model *m, mt_arena *arena) {
    int64_t T = m->plan.max_tokens, size = mt_dtype_size(m->dtype), ranks = m->grid->tensor.size;
    if (m->tp.sequence_parallel) {
        int64_t widest = m->options->multi_latent_attention ? mt_max(m->C, mt_latent_width(m->options)) : m->C;
        mt_plan_exchange(&m->tp, widest, arena), m->tp.partial = mt_arena_alloc(arena, T * widest * size);
    }
    if (ranks > 1 && m->has_loss) {
        m->tp.loss_parts = mt_arena_alloc(arena, ranks * 4 * m->plan.max_logits * 4);
        int64_t bytes = ranks * mt_max(MT_STAGED_ROWS, m->plan.cache_sequences) * m->V * size;
        m->gathered_logits = mt_arena_alloc(arena, bytes);
        if (m->plan.cache_sequences > 0) m->whole_logits = mt_arena_alloc(arena, bytes);
    }
    for (int i = 0; i < MT_NUM_LINKS; i++)
        for (int64_t k = 0; k < m->links[i].num_buffers; k++)
            m->links[i].buffers[k] = mt_arena_alloc(arena, m->max_rows * m->C * size);
}

static mt_carry mt_carry_plan(const mt_model *m, int64_t elements, mt_arena *arena) {
    mt_carry carry = {.elements = elements};
    carry.states = mt_arena_alloc(arena, MT_PIECES * elements * 4);
    carry.sent = mt_arena_alloc(arena, elements * 4);
    if (m->plan.train) carry.dstates = mt_arena_alloc(arena, MT_PIECES * elements * 4);
    return carry;
}

/* Scratch of sparse attention, and the sums of its loss. */
static void mt_plan_indexer(mt_model *m, mt_arena *arena) {
    const mt_options *o = m->options;
    mt_layer_scratch *s = &m->scratch;
    int64_t T = m->plan.max_tokens, R = m->max_rows, size = mt_dtype_size(m->dtype);
    int64_t H = o->dsa_indexer_n_heads, D = o->dsa_indexer_head_dim, topk = mt_selected_keys(m);
    int64_t cp = o->context_parallel_size, N = T * cp;
    if (m->tp.sequence_parallel) s->indexer_keys = mt_arena_alloc(arena, T * D * size);
    if (cp > 1) {
        s->indexer_whole = mt_arena_alloc(arena, N * D * size);
        s->indexer_by_rank = mt_arena_alloc(arena, N * D * (mt_has_indexer_loss(m) ? 4 : size));
    }
    if (o->dsa_indexer_topk_freq > 1) s->selected = mt_arena_alloc(arena, T * topk * 4); // for the layers behind
    if (!mt_has_indexer_loss(m)) return;
    int64_t width = o->dsa_indexer_use_sparse_loss ? topk : mt_min(N, m->plan.max_position);
    s->shares = mt_arena_alloc(arena, MT_INDEXER_ROWS * width * 4);
    s->slopes = mt_arena_alloc(arena, MT_INDEXER_ROWS * width * 4);
    s->dindexer_keys = mt_arena_alloc(arena, N * D * 4);
    if (cp > 1) s->dindexer_local = mt_arena_alloc(arena, T * D * 4);
    if (m->tp.sequence_parallel) s->dindexer_own = mt_arena_alloc(arena, R * D * 4);
    s->dindexer_q = mt_arena_alloc(arena, R * H * D * size);
    s->dindexer_k = mt_arena_alloc(arena, R * D * size);
    s->dindexer_k_in = mt_arena_alloc(arena, R * D * size);
    s->dindexer_weights = mt_arena_alloc(arena, R * H * size);
}

/* Scratch of the layers. If logits share memory with it (mt_logits_overlap), they take the buffers that hold no value
 * between the last layer's forward and its backward: only the output layer runs then, and it writes only dresidual and
 * dnormed. */
static void mt_plan_scratch(mt_model *m, mt_arena *arena) {
    int64_t T = m->plan.max_tokens, R = m->max_rows, size = mt_dtype_size(m->dtype);
    int64_t q_width = m->H * m->D, kv_width = m->G * m->D, out_width = m->H * m->Dv;
    const mt_options *o = m->options;
    mt_layer_scratch *s = &m->scratch;
    bool latent = o->multi_latent_attention;
    if (latent || o->attention_output_gate) out_width = mt_max(out_width, m->C); // a second gradient of the input
    mt_delta_sizes delta = mt_delta_sizes_of(m);
    mt_mamba_sizes mamba = mt_mamba_sizes_of(m);
    int64_t short_width = mt_short_channels(m), linear_out = mt_max(delta.Hv * delta.Dv, mamba.inner);
    int64_t in_width = mt_max(mt_qkv_width(m, NULL), mt_max(mt_max(delta.in, mamba.in), 3 * short_width));
    out_width = mt_max(out_width, mt_max(linear_out, short_width));
    if (m->plan.train) {
        s->dresidual = mt_arena_alloc(arena, R * m->C * size);
        if (mt_splits_backward(m)) s->dmiddle = mt_arena_alloc(arena, R * m->C * size);
        s->dnormed = mt_arena_alloc(arena, R * m->C * size);
        if (mt_norms_after(o)) s->dout = mt_arena_alloc(arena, R * m->C * size);
    }
    int64_t start = arena->used;
    s->block_out = mt_arena_alloc(arena, R * m->C * size);
    if (m->plan.train) {
        s->dqkv = mt_arena_alloc(arena, T * mt_max(mt_fc1_width(m, m->F), in_width) * size);
        s->dattended = mt_arena_alloc(arena, T * mt_max(m->F, out_width) * size);
        if (mt_norms_heads(o)) s->dqk = mt_arena_alloc(arena, T * (q_width + kv_width) * size);
        if (o->qk_layernorm_all_heads) s->means = mt_arena_alloc(arena, 2 * T * 4);
        s->row_dot = mt_arena_alloc(arena, T * m->H * 4);
        if (o->attention_output_gate) s->dgate = mt_arena_alloc(arena, T * m->H * m->Dv * size);
        s->dconv = mt_arena_alloc(arena, T * (delta.conv + mamba.conv + short_width) * size);
        s->ddelta = mt_arena_alloc(arena, T * linear_out * size);
        if (delta.by_channel) {
            s->ddecays = mt_arena_alloc(arena, T * delta.Hv * delta.Dk * size);
            s->dgates = mt_arena_alloc(arena, T * delta.Hv * delta.Dv * size);
            s->dlow = mt_arena_alloc(arena, R * delta.Dv * size);
        }
        s->dshort_x = mt_arena_alloc(arena, T * short_width * size);
    }
    int64_t conv_width = mt_max(mt_max(delta.conv, mamba.conv), short_width); // a model has states of one kind
    if (m->num_contexts > 0 && conv_width > 0)
        s->conv_carry = mt_carry_plan(m, (o->linear_conv_kernel_dim - 1) * conv_width, arena);
    if (m->num_contexts > 0 && delta.conv + mamba.conv > 0) {
        int64_t map = delta.Hv * delta.Dk * (delta.Dv + delta.Dk) + mamba.H * (mamba.N * mamba.P + 1);
        s->rule_carry = mt_carry_plan(m, delta.Hv * delta.Dk * delta.Dv + mamba.H * mamba.N * mamba.P, arena);
        s->rule_maps = mt_arena_alloc(arena, MT_PIECES * map * 4);
        if (m->plan.train) s->drule_maps = mt_arena_alloc(arena, MT_PIECES * s->rule_carry.elements * 4);
    }
    if (latent) {
        s->kv_b_out = mt_arena_alloc(arena, T * m->H * (o->qk_head_dim + m->Dv) * size);
        s->k_rope = mt_arena_alloc(arena, T * m->rotary_dim * size);
    }
    if (latent && m->plan.train) {
        s->dlatent = mt_arena_alloc(arena, R * mt_latent_width(o) * size);
        s->dlatent_norm = mt_arena_alloc(arena, R * mt_max(o->q_lora_rank, o->kv_lora_rank) * size);
    }
    if (mt_has_mixer(o, MT_MIXER_SPARSE_ATTENTION)) mt_plan_indexer(m, arena);
    int64_t end = arena->used;
    if (!mt_logits_overlap(m)) return;
    arena->used = start;
    m->micro_batches[0].outputs[0].logits = mt_arena_alloc(arena, m->plan.max_logits * m->head_width * size);
    arena->used = mt_max(arena->used, end);
}

/* Buffers that all micro-batches share. */
static void mt_plan_workspace(mt_model *m, mt_arena *arena) {
    int64_t T = m->plan.max_tokens, rows = m->plan.max_logits;
    mt_delta_sizes delta = mt_delta_sizes_of(m);
    mt_mamba_sizes mamba = mt_mamba_sizes_of(m);
    int64_t widest_row = m->options->multi_latent_attention ? mt_max(m->C, mt_latent_width(m->options)) : m->C;
    m->workspace_bytes = m->ops->workspace_bytes(T, widest_row, m->H, mt_max(m->D, m->Dv));
    if (m->experts->num_layers > 0 && !m->options->moe_permute_fusion) // see mt_combine_results
        m->workspace_bytes = mt_max(m->workspace_bytes, m->ops->workspace_bytes(m->experts->num_choices, m->C, 1, 1));
    if (delta.Hv > 0) {
        const mt_delta_args sizes = {
            .Hk = delta.Hk, .Hv = delta.Hv, .Dk = delta.Dk, .Dv = delta.Dv, .decays = delta.by_channel ? delta.Dk : 1};
        int64_t bytes = m->ops->delta_workspace_bytes(T, &sizes, m->dtype, m->plan.train);
        m->workspace_bytes = mt_max(m->workspace_bytes, bytes);
    }
    if (mamba.H > 0) {
        const mt_ssd_args sizes = {.G = mamba.G, .H = mamba.H, .N = mamba.N, .P = mamba.P};
        m->workspace_bytes = mt_max(m->workspace_bytes, m->ops->ssd_workspace_bytes(T, &sizes, m->plan.train));
    }
    if (mt_has_mixer(m->options, MT_MIXER_SPARSE_ATTENTION)) {
        int64_t bytes = m->ops->sparse_workspace_bytes(T, m->plan.max_position, mt_selected_keys(m));
        m->workspace_bytes = mt_max(m->workspace_bytes, bytes);
    }
    m->workspace = mt_arena_alloc(arena, m->workspace_bytes);
    for (int i = MT_ROPE_MODEL; i <= MT_ROPE_WINDOW; i++) {
        if (!mt_rope_table_used(m->options, (mt_layer_rope)i)) continue;
        m->rope_tables[i].cos = mt_arena_alloc(arena, m->plan.max_position * m->rotary_dim / 2 * 4);
        m->rope_tables[i].sin = mt_arena_alloc(arena, m->plan.max_position * m->rotary_dim / 2 * 4);
    }
    m->numbers = mt_arena_alloc(arena, (int64_t)sizeof *m->numbers);
    if (mt_has_indexer_loss(m)) m->indexer_sums = mt_arena_alloc(arena, 4 * 8);
    if (m->has_loss) {
        m->row_stats = mt_arena_alloc(arena, 4 * rows * 4), m->logp = mt_arena_alloc(arena, rows * 4);
        m->entropy = mt_arena_alloc(arena, rows * 4);
    }
    if (m->mtp->count > 0) {
        m->mtp->logp = mt_arena_alloc(arena, rows * 4);
        m->mtp->dhidden = mt_arena_alloc(arena, m->max_rows * m->C * mt_dtype_size(m->dtype));
        m->mtp->djoined = mt_arena_alloc(arena, m->max_rows * 2 * m->C * mt_dtype_size(m->dtype));
    }
    if (m->plan.cache_rows > 0) {
        m->uniforms = mt_arena_alloc(arena, rows * 8);
        m->sampled = mt_arena_alloc(arena, rows * (int64_t)sizeof *m->sampled);
    }
    int64_t widest = 0, size = mt_dtype_size(m->dtype), R = MT_MAX_ADAPTER_PARTS * m->options->lora_rank;
    for (const mt_param *param = m->params; param < m->params + m->num_params; param++)
        if (param->role == MT_LORA_A && m->options->lora_dropout > 0) widest = mt_max(widest, param->cols);
    m->adapter_scratch.rows = mt_arena_alloc(arena, 2 * T * R * size);
    m->adapter_scratch.x = mt_arena_alloc(arena, T * widest * size);
    mt_plan_scratch(m, arena);
    mt_plan_experts(m, arena);
    int64_t context_bytes = 0;
    for (int i = 0; i < m->num_contexts; i++) {
        mt_context_plan context = mt_model_context_plan(m, i);
        context_bytes = mt_max(context_bytes, mt_context_bytes(&context));
    }
    m->context_memory = mt_arena_alloc(arena, context_bytes);
}

/* fp8: quantized weights and the state of delayed scaling; the operands of the largest call in scratch of their own. */
static void mt_plan_fp8(mt_model *m, mt_arena *arena) {
    mt_fp8_model *f = m->fp8;
    int64_t start = arena->used, operands = f->num_linears * MT_NUM_FP8_OPERANDS;
    f->scale = mt_arena_alloc(arena, operands * 4);
    float *inverse_scales = mt_arena_alloc(arena, operands * MT_FP8_SCALE_STEP * 4);
    f->history = mt_arena_alloc(arena, f->history_length * operands * 4);
    f->largest = mt_arena_alloc(arena, operands * 4);
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_linear *l = mt_param_fp8_linear(m, &m->params[i]);
        if (!l) continue;
        int64_t operand = (l->fp8 - f->linears) * MT_NUM_FP8_OPERANDS, pieces = m->tp.overlaps ? m->tp.group->size : 1;
        int64_t rows = l->kind == MT_LINEAR_GROUPED ? mt_expert_rows_expected(m) : m->plan.max_tokens;
        l->fp8->scale = mt_at(f->scale, operand, MT_F32), l->fp8->amax = mt_at(f->history, operand, MT_F32);
        l->fp8->inverse_scales = mt_at(inverse_scales, operand * MT_FP8_SCALE_STEP, MT_F32);
        if (f->recipe.keeps_weights)
            mt_fp8_allocate_weight(arena, l, l->fp8->gathered ? NULL : &l->fp8->w, &l->fp8->w_transposed);
        if (l->fp8->gathered) l->fp8->w.inverse_scales = mt_arena_alloc(arena, l->fp8->num_amaxes * 4);
        f->recipe.scratch.capacity = mt_max(f->recipe.scratch.capacity, mt_fp8_scratch_bytes(l, rows, pieces));
    }
    m->bytes[MT_PLAN_FP8] = arena->used - start + f->recipe.scratch.capacity;
}

/* Assigns memory to everything from the arena; a counting arena measures the sizes. */
static void mt_plan_memory(mt_model *m, mt_arena *arena) {
    mt_plan_buckets(m); // first: they begin the host's memory too, also after a rest
    if (m->host_optimizer) mt_plan_host_optimizer(m);
    if (m->plan.train) mt_plan_bucket_buffers(m, arena);
    if (m->muon) mt_plan_muon(m, arena);
    m->bytes[MT_PLAN_BUFFERS] = arena->used;
    int64_t start = arena->used;
    if (m->plan.train) mt_plan_value_buffers(m, arena);
    for (int64_t i = 0; i < m->num_micro_batches; i++) {
        mt_plan_micro_batch(m, &m->micro_batches[i], arena);
        if (m->offload) mt_plan_offloaded(m, &m->micro_batches[i], &m->host);
    }
    mt_plan_workspace(m, arena);
    mt_plan_parallel(m, arena);
    m->bytes[MT_PLAN_ACTIVATIONS] = arena->used - start;
    if (m->fp8) mt_plan_fp8(m, arena);
}

int64_t mt_model_planned_bytes(const mt_model *m, mt_plan_row row) {
    int64_t apart =
        m->bytes[MT_PLAN_EXPERTS] + (m->fp8 ? m->fp8->recipe.scratch.capacity : 0); // grows with expert rows
    if (row == MT_PLAN_TOTAL) return mt_model_bytes(m) + apart;
    return row == MT_PLAN_HOST ? m->host.used : m->bytes[row];
}

/* ==== §15b creation =============================================================================================== */

/* Upper bound on sets of activations of a micro-batch on a chunk: its layers, modules, and one shared set. */
static int64_t mt_num_saved_layers(const mt_model *m, int64_t chunk) {
    return m->stages[chunk].num_layers + m->stages[chunk].num_mtp + 1;
}

/* Row indices 0, 1, ... into rank_counts, for combine_rows. */
static void mt_experts_fill_data_ranks(mt_model *m) {
    int64_t count = m->grid->data.size;
    if (!m->experts->data_ranks) return;
    int32_t *numbers = mt_malloc(count * 4);
    for (int64_t i = 0; i < count; i++) numbers[i] = (int32_t)i;
    mt_copy_wait(m, m->experts->data_ranks, numbers, count * 4);
    free(numbers);
}

/* The experts of this rank, from options and grid; after mt_model_stages. */
static void mt_experts_open(mt_model *m, const mt_options *o) {
    mt_experts *e = m->experts;
    const mt_grid *grid = m->grid;
    e->group = &grid->expert_exchange;
    if (o->num_experts == 0) return;
    int64_t k = o->moe_router_topk;
    e->router = (mt_router){.num_experts = o->num_experts, .topk = k, .pre_softmax = o->moe_router_pre_softmax};
    e->router.score = o->moe_router_score_function;
    e->router.num_groups = o->moe_router_num_groups, e->router.group_topk = o->moe_router_group_topk;
    e->router.group_best = o->moe_router_group_best, e->router.scaling = (float)o->moe_router_topk_scaling_factor;
    e->C = mt_expert_channels(o);
    e->num_local = o->num_experts / grid->expert.size, e->F = o->moe_ffn_hidden_size / grid->expert_tensor.size;
    e->dispatcher = mt_dispatcher_of(o, e->group), e->results = e->dispatcher->reorders ? &e->dispatched : &e->rows;
    e->num_sources = e->dispatcher->gathers ? e->group->size : 1;
    e->router.bias_of_logits = o->moe_router_quantile_bias;
    e->sequences = mt_balances_by(o, MT_BALANCING_SEQ_AUX_LOSS) ? m->plan.max_tokens : 1;
    e->tokens = e->num_sources * m->max_rows;
    e->order = (mt_dispatch){.topk = k, .count = o->num_experts, .num_local = e->num_local};
    e->order.copies = grid->expert_tensor.size;
    if (e->dispatcher->gathers)
        e->order.first = grid->expert.rank * e->num_local, e->order.count = e->num_local, e->order.copies = 1;
    else if (o->moe_pad_expert_input_to_capacity)
        e->order.capacity = mt_expert_capacity(m, m->max_rows * grid->tensor_context.size);
    e->num_destinations = e->order.count * e->order.copies;
    e->num_choices = e->order.capacity > 0 ? e->num_destinations * e->order.capacity : e->tokens * k * e->order.copies;
    e->exchange = (mt_tensor_parallel){.ops = m->ops, .group = e->group, .dtype = m->dtype, .T = e->tokens};
    e->exchange.sequence_parallel = e->dispatcher->gathers, e->exchange.rows = e->exchange.max_rows = m->max_rows;
    for (int64_t i = 0; i < m->num_layers; i++)
        if (mt_layer_has_experts(o, m->layers[i].number) && !mt_mtp_repeats(m, &m->layers[i]))
            m->layers[i].moe_index = e->num_layers++;
    bool copies = e->dispatcher->gathers && o->moe_token_dispatcher_type == MT_DISPATCHER_FLEX;
    e->exchange.overlaps = copies && e->num_layers > 0;
    int64_t size = e->group->size;
    e->out_counts = mt_model_calloc(m, 2 * size * 8), e->in_counts = e->out_counts + size;
    for (int64_t i = 0; i < m->num_micro_batches; i++)
        for (int64_t layer = 0; layer < mt_num_saved_layers(m, m->micro_batches[i].chunk); layer++) {
            mt_routing *r = mt_model_calloc(m, (int64_t)sizeof *r);
            m->micro_batches[i].layers[layer].routing = r;
            r->sent = mt_model_calloc(m, 2 * size * 8 + (e->num_destinations + 1) * 4), r->received = r->sent + size;
            r->host_offsets = (int32_t *)(r->received + size);
        }
}

/* Estimated bytes of expert rows whose number depends on the data. */
static int64_t mt_experts_expected_bytes(const mt_model *m) {
    const mt_experts *e = m->experts;
    mt_arena arena = {0};
    mt_expert_rows rows;
    if (e->num_layers == 0 || mt_expert_rows_fixed(m)) return 0;
    mt_expert_rows_plan plan = {.M = mt_expert_rows_expected(m)};
    mt_expert_rows_allocate(m, &rows, &arena, &plan);
    plan.dispatched = true;
    if (e->dispatcher->reorders) mt_expert_rows_allocate(m, &rows, &arena, &plan);
    plan.dispatched = false;
    for (int64_t i = 0; i < m->num_micro_batches; i++)
        for (int64_t layer = m->first_local[m->micro_batches[i].chunk];
             layer < m->first_local[m->micro_batches[i].chunk + 1]; layer++) {
            plan.layer = &m->layers[layer];
            if (plan.layer->expert_bucket >= 0 && m->plan.train) mt_expert_rows_allocate(m, &rows, &arena, &plan);
        }
    for (int64_t i = 0; i < m->num_recompute_buffers; i++)
        arena.used += mt_recomputed_rows_plan(m, &m->recompute_buffers[i], &plan);
    return arena.used;
}

static void mt_experts_close(mt_model *m) {
    mt_experts *e = m->experts;
    for (int64_t i = 0; i < m->num_micro_batches; i++)
        for (int64_t layer = 0; layer < mt_num_saved_layers(m, m->micro_batches[i].chunk); layer++) {
            mt_routing *r = m->micro_batches[i].layers[layer].routing;
            if (r) mt_expert_rows_free(m, &r->rows);
        }
    for (int64_t i = 0; i < m->num_recompute_buffers; i++) mt_expert_rows_free(m, m->recompute_buffers[i].rows);
    mt_expert_rows_free(m, &e->rows);
    mt_expert_rows_free(m, &e->dispatched);
    if (e->host_offsets) m->ops->memory_free_host(e->host_offsets);
    if (e->report_memory) m->ops->memory_free_host(e->report_memory);
    if (e->comm && e->comm != m->stream) m->ops->stream_destroy(e->comm);
}

/* Sizes of this rank's part of the model. */
static void mt_model_shape(mt_model *m, const mt_options *o) {
    int64_t tp = m->grid->tensor.size, rank = m->grid->tensor.rank;
    m->C = o->hidden_size, m->D = o->kv_channels, m->Dv = mt_value_channels(o);
    m->H = o->num_attention_heads / tp, m->G = mt_max(o->num_query_groups / tp, 1), m->V = o->padded_vocab_size / tp;
    m->head_width = o->head_type == MT_HEAD_LM ? m->V : 1, m->vocab_first = rank * m->V;
    m->vocab_count = mt_max(mt_min(o->vocab_size - m->vocab_first, m->V), 0), m->rotary_dim = 0;
    if (o->position_embedding_type == MT_POSITION_ROPE)
        m->rotary_dim = (int64_t)((double)m->D * o->rotary_percent) / 2 * 2;
    if (o->multi_latent_attention) m->rotary_dim = o->qk_pos_emb_head_dim;
    m->tp = (mt_tensor_parallel){.ops = m->ops, .group = &m->grid->tensor, .dtype = m->dtype};
    m->tp.sequence_parallel = o->sequence_parallel && m->plan.train; // see mt_decode_pass
    m->tp.overlaps = o->tp_comm_overlap && m->tp.sequence_parallel;
    m->max_rows = m->tp.max_rows = m->tp.sequence_parallel ? m->plan.max_tokens / tp : m->plan.max_tokens;
}

/* The chunks of this pipeline rank and their layers. */
static void mt_model_stages(mt_model *m, const mt_options *o) {
    int64_t pp = m->grid->pipeline.size, vp = o->num_virtual_stages_per_pipeline_rank, rank = m->grid->pipeline.rank;
    mt_stage *all = mt_malloc(pp * vp * (int64_t)sizeof *all);
    mt_pipeline_layout_build(all, o);
    m->num_chunks = vp, m->num_contexts = m->grid->context.size > 1;
    for (int size = m->grid->context.size; o->dynamic_context_parallel && size > 1; size /= 2) m->num_contexts++;
    m->stages = mt_model_calloc(m, vp * (int64_t)sizeof *all), m->first_local = mt_model_calloc(m, (vp + 1) * 8);
    for (int64_t chunk = 0; chunk < vp; chunk++) {
        m->stages[chunk] = all[chunk * pp + rank];
        if (!m->plan.train) m->stages[chunk].num_mtp = 0;
        m->mtp->count += m->stages[chunk].num_mtp;
        m->first_local[chunk + 1] = m->first_local[chunk] + m->stages[chunk].num_layers + m->stages[chunk].num_mtp;
        m->has_embedding |= m->stages[chunk].embedding;
        m->has_loss |= m->stages[chunk].loss;
    }
    m->num_layers = m->first_local[vp];
    free(all);
    m->layers = mt_model_calloc(m, m->num_layers * (int64_t)sizeof(mt_layer));
    for (int64_t chunk = 0; chunk < vp; chunk++)
        for (int64_t i = m->first_local[chunk]; i < m->first_local[chunk + 1]; i++) {
            mt_layer *w = &m->layers[i];
            w->index = i - m->first_local[chunk], w->number = m->stages[chunk].first_layer + w->index;
            w->kind = mt_layer_kind_of(o, w->number);
            w->G = mt_max(w->kind.groups / m->grid->tensor.size, 1), m->G = mt_max(m->G, w->G);
            w->F = mt_layer_has_experts(o, w->number) ? o->moe_shared_expert_intermediate_size : o->ffn_hidden_size;
            if (w->kind.feed_forward == MT_FEED_FORWARD_NONE) w->F = 0;
            w->F /= m->grid->tensor.size, w->expert_bucket = -1, m->F = mt_max(m->F, w->F);
        }
}

_Static_assert(offsetof(mt_linear, weight) == 0 && offsetof(mt_adapter, a) == 0,
               "the parameter table's weight is the first member of its linear, or of its adapter");

/* Kinds and sizes of the linears, from the parameter table. mt_bucket_bind sets the weights. */
static void mt_model_linears(mt_model *m) {
    mt_linear *linear = NULL;
    for (int64_t i = 0, expert = -1; i < m->num_params; i++) {
        mt_param *param = &m->params[i];
        bool is_tied_head = param->unit == MT_UNIT_WORDS && param->bucket == m->head_bucket;
        param->is_linear |= is_tied_head;
        if (!param->is_linear || mt_param_is_adapter(param)) continue;
        if (!param->continues) {
            linear = is_tied_head ? &m->outer.head : (mt_linear *)(void *)mt_param_weight(m, param);
            *linear = (mt_linear){.kind = param->linear, .K = param->cols};
            if (linear->kind == MT_LINEAR_GROUPED) {
                linear->num_experts = m->experts->num_local;
                linear->omits_bias = param->shard_dim == 1 && m->grid->expert_tensor.rank > 0;
            }
            expert = param->expert;
        }
        if (param->expert == expert) linear->N += param->rows; // grouped: rows of one expert
    }
}

/* Sizes and scales of the linears' adapters. */
static void mt_model_adapters(mt_model *m) {
    enum { STRIDE = MT_LORA_B + 1 }; // of random keys; later roles do not change it, but have keys of their own
    const mt_options *o = m->options;
    mt_adapter *adapter = NULL;
    for (int64_t i = 0, expert = -1; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        bool is_a = param->role == MT_LORA_A, is_b = param->role == MT_LORA_B;
        uint64_t index = param->adapts <= MT_LORA_B ? (uint64_t)param->layer * STRIDE + param->adapts
                                                    : (uint64_t)param->adapts << 40 | (uint64_t)param->layer;
        if (is_a && !param->continues) {
            adapter = (mt_adapter *)(void *)mt_param_weight(m, param), expert = param->expert;
            adapter->rank = o->lora_rank, adapter->scale = (float)(o->lora_alpha / (double)o->lora_rank);
            adapter->dropout.key = mt_random_key((uint64_t)o->seed, MT_RANDOM_ADAPTER, index);
            adapter->dropout.p = o->lora_dropout, adapter->first_channel = param->first_col;
            adapter->off = &m->adapters_off;
            adapter->scratch = param->expert >= 0 ? &m->experts->rows.adapter : &m->adapter_scratch;
        }
        if (is_a && param->expert == expert) adapter->R += param->rows;
        if (is_b && !param->continues) adapter->parts[adapter->num_parts++].first = param->first_output;
        if (is_b && param->expert == expert) adapter->parts[adapter->num_parts - 1].N += param->rows;
    }
}

/* True if the operation that computes x or dy of a layer's linear stores it in fp8, instead of in the model's type.
 * Then only products read it: no adapter, no gradient of a bias or of a weight in bf16, no exchange of rows between
 * ranks. field: the linear's offset in mt_layer. */
static bool mt_fp8_in_place(const mt_model *m, const mt_linear *l, const mt_layer *w, size_t field,
                            mt_fp8_operand operand) {
    const mt_fp8 *recipe = l->fp8->recipe;
    if (!recipe->delayed || !recipe->wgrad || m->dtype != MT_BF16 || mt_linear_adapts(l) || operand == MT_FP8_W)
        return false;
    if (l->N % MT_FP8_WIDTH != 0 || l->K % MT_FP8_WIDTH != 0) return false;
    if (l->kind == MT_LINEAR_GROUPED) return !mt_scales_output(m) && m->experts->order.capacity == 0;
    if (m->tp.overlaps) return false;                                                     // takes the rows in parts
    bool is_qkv = field == offsetof(mt_layer, qkv) && !m->options->attention_output_gate; // else the gate reads x too
    bool is_fc1 = field == offsetof(mt_layer, fc1);
    if (operand == MT_FP8_DY) return is_fc1 && !m->options->mlp_bias;
    bool follows = mt_norms_before(m->options); // a norm stores x; and no router reads it too
    bool is_normed = follows && (is_qkv || (is_fc1 && w->expert_bucket < 0));
    return field == offsetof(mt_layer, down) || (is_normed && !m->tp.sequence_parallel);
}

/* Gives the linears of layers their fp8 recipe. */
static int mt_model_fp8(mt_model *m, const mt_options *o, mt_error *error) {
    int64_t first = 0, end = INT64_MAX;
    if (!m->plan.train || o->fp8_format == MT_FP8_OFF) return 0;
    mt_fp8_model *f = m->fp8 = mt_model_calloc(m, (int64_t)sizeof *m->fp8);
    f->recipe = mt_fp8_recipes[o->fp8_recipe], f->recipe.wgrad = o->fp8_wgrad, f->recipe.version = 1;
    f->recipe.format = MT_F8_E4M3, f->recipe.gradient_format = o->fp8_format == MT_FP8_HYBRID ? MT_F8_E5M2 : MT_F8_E4M3;
    f->recipe.keeps_weights = m->sharding->strategy != MT_SHARD_PARAMS, f->history_length = o->fp8_amax_history_len;
    if (o->first_last_layers_bf16)
        first = o->num_layers_at_start_in_bf16, end = o->num_layers - o->num_layers_at_end_in_bf16;
    f->linears = mt_model_calloc(m, m->num_layers * MT_NUM_ROLES * (int64_t)sizeof *f->linears);
    f->keys = mt_model_calloc(m, m->num_layers * MT_NUM_ROLES * (int64_t)sizeof *f->keys);
    for (const mt_param *param = m->params; param < m->params + m->num_params; param++) {
        mt_bucket *b = &m->buckets[param->bucket];
        int64_t number = param->layer, size = mt_dtype_size(b->dtype);
        bool in_fp8 = param->takes_fp8 && number >= first && number < end;
        if (!in_fp8 && !param->continues && param->offset * size < b->count) b->fp8_first = b->count * size;
        if (!in_fp8) continue;
        mt_linear *l = (mt_linear *)(void *)mt_param_weight(m, param);
        mt_fp8_key *key = &f->keys[f->num_linears];
        key->layer = number;
        snprintf(key->linear, sizeof key->linear, "%.*s", (int)strcspn(param->field_name, "."), param->field_name);
        l->fp8 = &f->linears[f->num_linears++], l->fp8->recipe = &f->recipe;
        l->fp8->gathered = o->fp8_param_gather && b->strategy != MT_NO_SHARD;
        mt_layer *w = mt_layer_find(m, number);
        for (int i = 0; i < MT_NUM_FP8_OPERANDS; i++)
            l->fp8->in_place[i] = mt_fp8_in_place(m, l, w, param->field, (mt_fp8_operand)i);
        if (l->fp8->in_place[MT_FP8_X] && param->field == offsetof(mt_layer, qkv)) w->input_norm.reader = l;
        if (l->fp8->in_place[MT_FP8_X] && param->field == offsetof(mt_layer, fc1)) w->mlp_norm.reader = l;
        int64_t N_multiple = l->fp8->gathered ? MT_FP8_WIDTH : mt_max(m->ops->limits.fp8_multiple, 1);
        int64_t K_multiple = l->fp8->gathered ? mt_fp8_stride(1, f->recipe.weight_blocks) : N_multiple;
        if (l->N % N_multiple != 0 || l->K % K_multiple != 0)
            return mt_error_set(error,
                                "%s needs weights of multiples of %lld x %lld, and layer %lld has one of %lld x %lld; "
                                "change the model's widths or --tensor-model-parallel-size",
                                l->fp8->gathered ? "--fp8-param-gather" : "--fp8-format on this device",
                                (long long)N_multiple, (long long)K_multiple, (long long)number, (long long)l->N,
                                (long long)l->K);
        if (!l->fp8->gathered) continue;
        l->fp8->w = (mt_fp8_matrix){.stride = l->K, .format = f->recipe.format, .blocks = f->recipe.weight_blocks};
        l->fp8->num_amaxes = mt_fp8_num_scales(mt_max(l->num_experts, 1), l->N, l->K, f->recipe.weight_blocks);
        l->fp8->first_amax = b->num_fp8_amaxes, b->num_fp8_amaxes += l->fp8->num_amaxes;
    }
    return 0;
}

/* Scratch, and the first scales of delayed scaling: 1. */
static void mt_fp8_start(mt_model *m) {
    mt_fp8_model *f = m->fp8;
    int64_t operands = f->num_linears * MT_NUM_FP8_OPERANDS;
    f->recipe.scratch.base = m->ops->memory_alloc_ordered(f->recipe.scratch.capacity, m->stream);
    if (!f->recipe.delayed) return;
    float *values = mt_malloc(2 * operands * 4);
    mt_dtype formats[] = {f->recipe.format, f->recipe.format, f->recipe.gradient_format};
    for (int64_t i = 0; i < operands; i++)
        values[i] = 1, values[operands + i] = mt_f8_largest(formats[i % MT_NUM_FP8_OPERANDS]);
    m->ops->memory_zero(f->history, f->history_length * operands * 4, m->stream);
    m->ops->memory_copy(f->scale, values, operands * 4, m->stream);
    mt_copy_wait(m, f->largest, values + operands, operands * 4);
    free(values);
}

/* Units of recomputation, and the slots of all layers. A module of multi-token prediction is a unit of its own. */
static void mt_model_slots(mt_model *m, const mt_options *o) {
    bool full = m->plan.train && o->recompute_granularity == MT_RECOMPUTE_FULL;
    bool by_unit = o->recompute_method == MT_RECOMPUTE_UNIFORM;
    int64_t number = o->recompute_num_layers;
    m->num_recompute_buffers = full && by_unit ? number : 1;
    m->recompute_buffers = mt_model_calloc(m, m->num_recompute_buffers * (int64_t)sizeof *m->recompute_buffers);
    for (int64_t i = 0; i < m->num_recompute_buffers; i++)
        m->recompute_buffers[i].rows = mt_model_calloc(m, (int64_t)sizeof(mt_expert_rows));
    if (m->plan.train && o->recompute_granularity == MT_RECOMPUTE_SELECTIVE)
        m->recompute_modules = o->recompute_modules;
    if (m->plan.train && o->fine_grained_activation_offloading)
        m->offload = mt_model_calloc(m, (int64_t)sizeof *m->offload), m->offload->modules = o->offload_modules;
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++)
        for (int64_t i = 0; m->first_local[chunk] + i < m->first_local[chunk + 1]; i++) {
            mt_layer *w = &m->layers[m->first_local[chunk] + i];
            bool is_module = i >= m->stages[chunk].num_layers;
            w->recomputed = full && (by_unit || (i < number && !is_module));
            w->recompute_unit = is_module ? i : !full ? 0 : by_unit ? i / number * number : mt_min(i, number);
            w->slots = mt_model_calloc(m, (int64_t)sizeof *w->slots);
            mt_layer_slots(m, w->slots, w);
        }
}

/* live[chunk] = maximum number of micro-batches between forward and backward in a step; at least 1. */
static void mt_model_count_live(const mt_model *m, int64_t *live) {
    const mt_options *o = m->options;
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++) live[chunk] = 1;
    if (!m->plan.train || m->grid->pipeline.size == 1) return;
    int64_t batches = mt_divide_up(o->global_batch_size, o->micro_batch_size * o->data_parallel_size);
    int64_t group = mt_max(o->microbatch_group_size_per_virtual_pipeline_stage, 1); // below: any number, as it varies
    if (o->dynamic_context_parallel) batches = (mt_divide_up(4 * m->grid->pipeline.size, group) + 2) * group;
    mt_schedule schedule = mt_schedule_of(o, batches);
    int64_t count = mt_schedule_actions(NULL, &schedule, m->grid->pipeline.rank), *now = mt_calloc(m->num_chunks * 8);
    mt_action *actions = mt_malloc(count * (int64_t)sizeof *actions);
    mt_schedule_actions(actions, &schedule, m->grid->pipeline.rank);
    for (int64_t i = 0; i < count; i++) {
        int64_t chunk = actions[i].chunk;
        if (actions[i].kind == MT_ACTION_FORWARD) now[chunk]++;
        if (actions[i].kind == MT_ACTION_BACKWARD || actions[i].kind == MT_ACTION_BACKWARD_WEIGHT) now[chunk]--;
        live[chunk] = mt_max(live[chunk], now[chunk]);
    }
    free(now);
    free(actions);
}

/* Allocates the records of all live micro-batches. */
static void mt_model_micro_batches(mt_model *m) {
    int64_t *live = mt_calloc(m->num_chunks * 8);
    mt_model_count_live(m, live);
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++) m->num_micro_batches += live[chunk];
    m->micro_batches = mt_model_calloc(m, m->num_micro_batches * (int64_t)sizeof(mt_micro_batch));
    mt_micro_batch *mb = m->micro_batches;
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++)
        for (int64_t i = 0; i < live[chunk]; i++, mb++) {
            *mb = (mt_micro_batch){.chunk = chunk, .index = -1};
            mb->layers = mt_model_calloc(m, mt_num_saved_layers(m, chunk) * (int64_t)sizeof(mt_activations));
        }
    free(live);
    mt_arena batch = {0};
    mt_batch_block_at(m, &batch, m->plan.max_tokens, m->plan.max_tokens);
    m->batch_bytes = batch.used;
}

/* Opens the channels to both pipeline neighbours; with several chunks per rank they form a ring. All ranks open them in
 * the same order. The buffers of sender and receiver together hold all messages in flight of a schedule
 * (mt_timeline_create). */
static void mt_model_links(mt_model *m) {
    const mt_group *pipeline = &m->grid->pipeline;
    int pp = pipeline->size, rank = pipeline->rank;
    if (pp == 1) return;
    int64_t group = mt_schedule_of(m->options, 1).group, buffers = mt_max(2, (group - pp + 2) / 2);
    for (int direction = 0; direction < 2; direction++) // 0: activations to the next rank; 1: gradients back
        for (int from = 0; from < pp; from++) {
            int to = (from + (direction ? pp - 1 : 1)) % pp;
            bool wraps = direction ? from == 0 : to == 0;
            if ((wraps && m->num_chunks == 1) || (rank != from && rank != to)) continue;
            if (direction && !m->plan.train) continue;
            int kind = rank == from ? (direction ? MT_LINK_SEND_BACKWARD : MT_LINK_SEND_FORWARD)
                                    : (direction ? MT_LINK_RECV_BACKWARD : MT_LINK_RECV_FORWARD);
            m->links[kind] = (mt_link){m->ops->channel_open(pipeline, from, to, direction), buffers, NULL};
            m->links[kind].buffers = mt_model_calloc(m, buffers * (int64_t)sizeof(void *));
        }
}

/* Compares the bytes that this rank needs with its GPU's memory, and the bytes that all ranks of a host need there with
 * the host's memory. Every rank gets the same answer. */
static int mt_model_check_memory(const mt_model *m, int64_t needed, mt_error *error) {
    bool cpu = !m->ops->on_device;
    const double gib = 1 << 30;
    const char *fewer = m->plan.train ? "--seq-length" : "--max-new-tokens";
    int64_t host = m->plan.host_memory > 0 ? m->plan.host_memory : mt_cpu_ops.memory_available();
    int64_t available = cpu ? host : m->ops->memory_available(), on_host = m->host.used + (cpu ? needed : 0);
    int rank, ranks = 1;
    if (cpu || m->offload || m->host_optimizer) mt_host_ranks(&m->grid->world, &rank, &ranks, &on_host, &host);
    if (cpu) needed = on_host, available = host;
    bool refused = needed > available, host_refused = !cpu && on_host > host;
    static const char *const rows[MT_PLAN_TOTAL] = {
        [MT_PLAN_WEIGHTS] = "weights",           [MT_PLAN_GRADIENTS] = "gradients",
        [MT_PLAN_OPTIMIZER] = "optimizer state", [MT_PLAN_BUFFERS] = "buckets",
        [MT_PLAN_ACTIVATIONS] = "activations",   [MT_PLAN_CACHE] = "KV cache",
        [MT_PLAN_FP8] = "operands in fp8",       [MT_PLAN_EXPERTS] = "experts' tokens"};
    int largest = MT_PLAN_WEIGHTS;
    for (int row = 0; row < MT_PLAN_TOTAL; row++)
        if (rows[row] && mt_model_planned_bytes(m, row) > mt_model_planned_bytes(m, largest)) largest = row;
    double most = (double)mt_model_planned_bytes(m, largest) / gib;
    bool of_tokens = largest >= MT_PLAN_ACTIVATIONS; // these grow with the batch
    if (refused && (ranks == 1 || !cpu))
        mt_error_set(error,
                     "the model needs %.1f GiB of memory (%s: %.1f) and the %s has %.1f GiB available; %s%s, or take a "
                     "smaller model",
                     (double)needed / gib, rows[largest], most, cpu ? "machine" : "GPU", (double)available / gib,
                     of_tokens ? "lower --micro-batch-size or " : "split the model over more ranks",
                     of_tokens ? fewer : "");
    else if (refused)
        mt_error_set(error,
                     "the %d ranks of a machine need %.1f GiB of memory together (%s of one: %.1f) and it has %.1f GiB "
                     "available; start fewer ranks on it, lower --micro-batch-size or %s, or take a smaller model",
                     ranks, (double)needed / gib, rows[largest], most, (double)available / gib, fewer);
    else if (host_refused)
        mt_error_set(error,
                     "offloading needs %.1f GiB of host memory and the machine has %.1f GiB available (ranks on it: "
                     "%d); %s",
                     (double)on_host / gib, (double)host / gib, ranks,
                     m->offload ? "offload less, or lower --micro-batch-size or --seq-length"
                                : "lower --optimizer-offload-fraction");
    return mt_agree(&m->grid->world, refused || host_refused, error);
}

/* Memory for losses on the host and scores. */
static void mt_host_loss_open(mt_model *m) {
    int64_t T = m->plan.max_tokens, n = T * m->grid->context.size;
    mt_host_loss *h = m->host_loss = mt_model_calloc(m, (int64_t)sizeof *h);
    double *numbers = mt_model_calloc(m, (MT_NUM_HOST_NUMBERS + MT_NUM_LOSS_INPUTS) * n * 8);
    for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) h->inputs[i] = numbers + (MT_NUM_HOST_NUMBERS + i) * n;
    int64_t picked = h->capacity = m->plan.loss->distillation ? mt_max(1 << 18, m->options->vocab_size) : 0;
    h->sums = m->ops->memory_alloc_host((int64_t)sizeof *h->sums + MT_NUM_HOST_NUMBERS * T * 4 + picked * 8);
    for (int i = 0; i < MT_NUM_HOST_NUMBERS; i++)
        h->numbers[i] = numbers + i * n, h->staged[i] = (float *)(void *)(h->sums + 1) + i * T;
    *h->sums = (mt_host_sums){0};
    h->values = h->staged[0] + MT_NUM_HOST_NUMBERS * T, h->index = (int32_t *)h->values + picked;
    h->doubles = mt_model_calloc(m, 3 * picked * 8), h->floats = mt_model_calloc(m, picked * 4);
    h->device_values = m->ops->memory_alloc(picked * 8), h->device_index = (int32_t *)h->device_values + picked;
}

static int mt_model_allocate(mt_model *m, mt_error *error) {
    mt_arena counting = {0};
    mt_plan_memory(m, &counting);
    m->arena.capacity = counting.used;
    for (int part = 0; part < MT_NUM_PARTS; part++) m->parts[part].capacity = m->parts[part].used;
    m->bytes[MT_PLAN_EXPERTS] = mt_experts_expected_bytes(m);
    if (mt_model_check_memory(m, mt_model_planned_bytes(m, MT_PLAN_TOTAL), error) != 0) return -1;
    if (m->plan.counts) return 0;
    for (int64_t i = 0; i < m->num_micro_batches; i++)
        m->micro_batches[i].host_spans = mt_model_calloc(m, m->plan.max_tokens * (int64_t)sizeof(mt_span));
    int64_t staged_bytes = m->grid->tensor.size * MT_STAGED_ROWS * m->V * mt_dtype_size(m->dtype);
    m->staged_logits =
        m->ops->memory_alloc_host(mt_max(staged_bytes, m->plan.max_logits * (int64_t)sizeof *m->sampled));
    m->trainer->results = m->ops->memory_alloc_host(2 * (int64_t)sizeof(mt_step_result));
    if (m->has_loss && (m->plan.loss->host || !m->plan.train)) mt_host_loss_open(m);
    mt_experts *e = m->experts;
    if (e->num_layers > 0) {
        int64_t offsets = e->group->size * (e->num_destinations + 1);
        e->host_offsets = m->ops->memory_alloc_host((offsets + e->group->size * e->num_local) * 4);
        e->host_counts = e->host_offsets + offsets, e->host_counts[0] = -1;
        int64_t choices = e->dispatcher->gathers ? m->max_rows * e->router.topk : 0;
        e->no_choices = mt_model_calloc(m, choices * 4);
        for (int64_t i = 0; i < choices; i++) e->no_choices[i] = -1;
        int64_t loads = e->num_layers * e->router.num_experts, step = 2 * loads + e->num_layers; // of four bytes
        float *reported = e->report_memory = m->ops->memory_alloc_host(2 * step * 4);
        for (mt_step_result *result = m->trainer->results; result < m->trainer->results + 2; result++) {
            result->loads = reported, result->kept = result->loads + loads, reported += step;
            result->invalid = (int32_t *)(void *)(result->kept + loads);
        }
    }
    for (int i = 0; i < 2; i++) {
        m->staged_batch[i] = m->ops->memory_alloc_host(m->batch_bytes), m->copied[i] = m->ops->event_create();
        m->trainer->pending[i].done = m->ops->event_create();
    }
    m->arena.base = m->ops->memory_alloc(m->arena.capacity);
    for (int part = 0; part < MT_NUM_PARTS; part++) {
        m->parts[part].used = 0;
        if (m->parts[part].capacity > 0) m->parts[part].base = m->ops->memory_alloc(m->parts[part].capacity);
    }
    if (m->host.used > 0)
        m->host.capacity = m->host.used, m->host.used = 0, m->host.base = m->ops->memory_alloc_host(m->host.capacity);
    mt_plan_memory(m, &m->arena);
    return 0;
}

/* CUDA graph of a decode step for one number of sequences; captured in the first such step. */
typedef struct mt_decode_graph {
    bool has_run;
    mt_graph *graph;
} mt_decode_graph;

/* The next decode steps capture graphs again. */
static void mt_decode_graphs_destroy(mt_model *m) {
    for (int64_t i = 0; m->decode_graphs && i <= m->plan.max_logits; i++) {
        if (m->decode_graphs[i].graph) m->ops->graph_destroy(m->decode_graphs[i].graph);
        m->decode_graphs[i].graph = NULL;
    }
}

/* ---- rest between phases */

/* Sets every pointer into the parts. `lends`: parts that rest become their copies on the host, or rest again. */
static void mt_parts_bind(mt_model *m, bool lends) {
    int64_t on_host = m->host.used;
    unsigned swapped = lends ? m->resting_parts | m->lent_parts : 0; // one of them is 0
    for (int part = 0; part < MT_NUM_PARTS; part++) {
        void *host = m->resting[part];
        if (swapped >> part & 1) m->resting[part] = m->parts[part].base, m->parts[part].base = host;
        m->parts[part].used = 0;
    }
    m->resting_parts ^= swapped, m->lent_parts ^= swapped;
    m->host.used = 0;
    mt_plan_buckets(m);
    m->host.used = on_host;
    for (int64_t i = 0; i < m->num_buckets; i++) mt_bucket_bind(m, i);
}

/* Releases parts, or allocates them again, then sets every pointer into them. */
static int mt_parts_move(mt_model *m, unsigned parts, bool rest, mt_error *error) {
    int64_t needed = 0, available = rest ? mt_cpu_ops.memory_available() : m->ops->memory_available();
    const unsigned kept = 1u << MT_PART_PARAMS | 1u << MT_PART_OPTIMIZER; // of the others nothing is read again
    void *released[MT_NUM_PARTS] = {NULL};
    int rank, ranks = 1;
    parts &= (rest ? ~m->resting_parts : m->resting_parts) & ((1u << MT_NUM_PARTS) - 1);
    for (int part = 0; part < MT_NUM_PARTS; part++)
        if (parts >> part & 1 && (!rest || kept >> part & 1)) needed += m->parts[part].capacity;
    if (rest || !m->ops->on_device) mt_host_ranks(&m->grid->world, &rank, &ranks, &needed, &available);
    if (needed > available)
        mt_error_set(error, "a model cannot %s: %.1f GiB of memory are needed and %.1f GiB available (ranks: %d)",
                     rest ? "rest" : "wake", (double)needed / (1 << 30), (double)available / (1 << 30), ranks);
    if (mt_agree(&m->grid->world, needed > available, error) != 0) return -1;
    mt_wait_reader(m);
    if (rest && parts >> MT_PART_PARAMS & 1) mt_params_gather_all(m); // lent, they could not be gathered
    mt_wait_stream(m, m->stream, m->sharding->param_stream);
    for (int part = 0; part < MT_NUM_PARTS; part++) {
        mt_arena *arena = &m->parts[part];
        void **host = &m->resting[part], **from = rest ? (void **)&arena->base : host;
        if (!(parts >> part & 1) || arena->capacity == 0) continue;
        if (rest && kept >> part & 1) *host = m->ops->memory_alloc_host(arena->capacity);
        if (!rest) arena->base = m->ops->memory_alloc(arena->capacity);
        if (kept >> part & 1)
            m->ops->memory_copy(rest ? *host : arena->base, *from, arena->capacity, m->stream);
        else if (!rest)
            m->ops->memory_zero(arena->base, arena->capacity, m->stream);
        released[part] = *from, *from = NULL;
    }
    m->ops->stream_synchronize(m->stream);
    for (int part = 0; part < MT_NUM_PARTS; part++)
        if (released[part]) (rest ? m->ops->memory_free : m->ops->memory_free_host)(released[part]);
    mt_decode_graphs_destroy(m); // they hold addresses
    m->sharding->gathered_bucket = -1;
    m->resting_parts ^= parts;
    mt_parts_bind(m, false);
    return 0;
}

int mt_model_rest(mt_model *m, unsigned parts, mt_error *error) {
    return mt_parts_move(m, parts, true, error);
}

int mt_model_wake(mt_model *m, unsigned parts, mt_error *error) {
    return mt_parts_move(m, parts, false, error);
}

void mt_model_lend(mt_model *m, bool writes, mt_stream *stream) {
    if (!writes && !(m->resting_parts >> MT_PART_PARAMS & 1)) mt_params_gather_all(m);
    if (m->resting_parts | m->lent_parts) mt_parts_bind(m, true);
    if (writes) mt_params_changed(m);
    mt_wait_stream(m, stream, m->stream);
}

void mt_model_return(mt_model *m, mt_stream *stream) {
    if (m->resting_parts | m->lent_parts) mt_parts_bind(m, true);
    mt_wait_stream(m, m->stream, stream);
    mt_wait_stream(m, m->sharding->param_stream, stream);
}

/* The spans of a decode step's graph have the longest possible k_len, because a graph keeps its launch grids. */
static void mt_decode_create(mt_model *m) {
    int64_t longest = mt_min(m->plan.max_position, m->plan.cache_rows);
    m->decode_graphs = mt_model_calloc(m, (m->plan.max_logits + 1) * (int64_t)sizeof(mt_decode_graph));
    m->step_spans = mt_model_calloc(m, m->plan.max_logits * (int64_t)sizeof(mt_span));
    for (int64_t i = 0; i < m->plan.max_logits; i++)
        m->step_spans[i] = (mt_span){.q_start = i, .q_len = 1, .k_len = longest, .causal = true};
}

/* Context parallelism: attention and host batches. */
static void mt_context_open(mt_model *m) {
    int64_t cp = m->grid->context.size;
    if (cp == 1) return;
    for (int i = 0; i < m->num_contexts; i++) {
        mt_context_plan plan = mt_model_context_plan(m, i);
        m->contexts[i] = mt_context_create(&plan, m->ops, m->context_memory, m->stream);
    }
    mt_batch_alloc(&m->local_batch, m->plan.max_tokens);
    m->local_sequence = mt_model_calloc(m, m->plan.max_tokens * 4);
    for (int64_t i = 0; i < m->num_micro_batches; i++)
        mt_batch_alloc(&m->micro_batches[i].whole, cp * m->plan.max_tokens);
}

/* Opens the mailbox of overlapped regions and computes the positions of each row's partial sums in it. */
static int mt_mailbox_start(mt_model *m, mt_tensor_parallel *tp, mt_error *error) {
    int64_t ranks = tp->group->size, own = tp->group->rank;
    if (m->ops->mailbox_open(&tp->mailbox, tp->group, tp->gathered, tp->mailbox_bytes, error) != 0) return -1;
    int32_t *part_rows = mt_malloc(tp->max_rows * ranks * 4);
    for (int64_t row = 0; row < tp->max_rows; row++)
        for (int64_t r = 0; r < ranks; r++)
            part_rows[row * ranks + r] = r == own ? -1 : (int32_t)(r * tp->max_rows + row); // own part: in `partial`
    mt_copy_wait(m, tp->part_rows, part_rows, tp->max_rows * ranks * 4);
    free(part_rows);
    return 0;
}

/* --tp-comm-overlap, and --moe-token-dispatcher-type flex. Every rank calls it. */
static int mt_mailboxes_start(mt_model *m, mt_error *error) {
    mt_tensor_parallel *regions[] = {&m->tp, &m->experts->exchange};
    const char *advice[] = {"--tp-comm-overlap is not possible: %.200s; leave it out",
                            "--moe-token-dispatcher-type flex is not possible: %.200s; take allgather"};
    for (int i = 0; i < 2; i++) {
        mt_error reason;
        int status = regions[i]->overlaps ? mt_mailbox_start(m, regions[i], &reason) : 0;
        if (status != 0) mt_error_set(error, advice[i], reason.text);
        if (mt_agree(&m->grid->world, status != 0, error) != 0) return -1;
    }
    return 0;
}

/* The head must compute the numbers of the loss. */
static int mt_loss_check(const mt_model *m, mt_error *error) {
    bool has_values = m->options->head_type != MT_HEAD_LM, of_values = m->plan.loss->host && m->plan.loss->of_values;
    if (has_values && m->plan.cache_rows > 0)
        return mt_error_set(error, "a model with a value head generates no text; take the language model's folder");
    if (m->plan.train && of_values != has_values)
        return mt_error_set(error, has_values ? "the loss reads log-probabilities, and the model has a value head"
                                              : "the loss reads values, and the model has none; take --value-head");
    if (m->plan.train && m->plan.loss->host && m->options->mtp_num_layers > 0)
        return mt_error_set(error, "--mtp-num-layers trains with the loss of pre-training and fine-tuning only; set it "
                                   "to 0");
    return 0;
}

/* This rank's part of the model: sizes, layers, parameters, buckets, micro-batches and links, without device memory. */
static int mt_model_partition(mt_model *m, mt_error *error) {
    const mt_options *o = m->options;
    const mt_grid *grid = m->grid;
    m->experts = mt_model_calloc(m, (int64_t)sizeof *m->experts), m->mtp = mt_model_calloc(m, (int64_t)sizeof *m->mtp);
    m->sharding = mt_model_calloc(m, (int64_t)sizeof *m->sharding);
    m->links = mt_model_calloc(m, MT_NUM_LINKS * (int64_t)sizeof *m->links);
    m->trainer = mt_model_calloc(m, (int64_t)sizeof *m->trainer);
    m->trainer->reported = -1;
    if (mt_loss_check(m, error) != 0) return -1;
    mt_model_shape(m, o);
    mt_model_stages(m, o);
    mt_partition partition = {m->stages,         m->num_chunks,     grid->tensor.size,        grid->tensor.rank,
                              grid->expert.size, grid->expert.rank, grid->expert_tensor.size, grid->expert_tensor.rank};
    m->num_params = mt_params_build(&m->params, o, &partition);
    m->num_buckets = m->num_params > 0 ? m->params[m->num_params - 1].bucket + 1 : 0;
    m->buckets = mt_model_calloc(m, m->num_buckets * (int64_t)sizeof(mt_bucket));
    m->k_cache = mt_model_calloc(m, 3 * m->num_layers * (int64_t)sizeof(void *));
    m->v_cache = m->k_cache + m->num_layers, m->indexer_cache = m->v_cache + m->num_layers;
    m->rule_states = mt_model_calloc(m, 2 * m->num_layers * (int64_t)sizeof(float *));
    m->conv_states = m->rule_states + m->num_layers;
    mt_sharding_open(m);
    mt_buckets_size(m);
    mt_buckets_find(m);
    mt_host_optimizer_open(m);
    mt_muon_open(m);
    mt_model_micro_batches(m);
    mt_experts_open(m, o);
    mt_model_linears(m);
    mt_model_adapters(m);
    if (mt_agree(&grid->world, mt_model_fp8(m, o, error) != 0, error) != 0) return -1; // a stage has its own layers
    mt_mtp_share(m);
    mt_model_slots(m, m->options);
    mt_model_links(m);
    if (m->plan.cache_rows > 0) mt_decode_create(m);
    return 0;
}

/* Streams, and initial values of device memory. */
static int mt_model_start(mt_model *m, mt_error *error) {
    bool deterministic = m->options->deterministic_mode;
    m->stream = m->tp.stream = m->ops->stream_create(m->workspace, m->workspace_bytes, deterministic);
    m->tp.comm = m->experts->comm = m->stream;
    if (m->grid->tensor.size > 1) m->tp.comm = m->ops->stream_create(NULL, 0, deterministic);
    if (m->experts->num_layers > 0 && m->grid->expert_exchange.size > 1)
        m->experts->comm = m->ops->stream_create(NULL, 0, deterministic);
    m->experts->exchange.stream = m->stream, m->experts->exchange.comm = m->experts->comm;
    if (m->offload) m->offload->stream = m->ops->stream_create(NULL, 0, deterministic);
    mt_experts_fill_data_ranks(m);
    mt_experts_begin(m);
    mt_sharding_start(m);
    if (m->host_optimizer) mt_host_optimizer_start(m);
    if (m->fp8) mt_fp8_start(m);
    mt_context_open(m);
    if (m->mtp->count > 0) {
        mt_batch_alloc(&m->mtp->rolled, m->plan.max_tokens * m->grid->context.size);
        m->mtp->weights = mt_model_calloc(m, m->plan.max_tokens * m->grid->context.size * 4);
    }
    m->ops->memory_zero(m->numbers, (int64_t)sizeof *m->numbers, m->stream);
    for (int i = MT_ROPE_MODEL; i <= MT_ROPE_WINDOW; i++)
        if (mt_rope_table_used(m->options, (mt_layer_rope)i)) mt_rope_table_fill(m, (mt_layer_rope)i);
    return mt_mailboxes_start(m, error);
}

int mt_model_create(mt_model **out, const mt_options *options, const mt_grid *grid, const mt_ops *ops,
                    const mt_model_plan *plan, mt_error *error) {
    bool failed = mt_options_check_sizes(options, plan->train, error) != 0 ||
                  mt_options_check_limits(options, &ops->limits, error) != 0;
    if (mt_agree(&grid->world, failed, error) != 0) return -1;
    mt_model *m = mt_calloc(sizeof *m);
    m->options = options, m->grid = grid, m->ops = ops, m->plan = *plan;
    if (!m->plan.loss) m->plan.loss = &mt_nll;
    m->dtype = mt_options_dtype(options), m->loss_scale = 1;
    m->reruns = plan->train && options->rerun_mode == MT_RERUN_VALIDATE_RESULTS;
    if (mt_model_partition(m, error) == 0 && mt_model_allocate(m, error) == 0 &&
        (plan->counts || mt_model_start(m, error) == 0)) {
        *out = m;
        return 0;
    }
    mt_model_destroy(m);
    return -1;
}

static void mt_model_free_device(mt_model *m) {
    mt_decode_graphs_destroy(m);
    m->ops->mailbox_close(m->tp.mailbox);
    m->ops->mailbox_close(m->experts->exchange.mailbox);
    if (m->tp.comm != m->stream) m->ops->stream_destroy(m->tp.comm);
    if (m->offload) {
        m->ops->stream_synchronize(m->offload->stream);
        m->ops->stream_destroy(m->offload->stream);
    }
    mt_experts_close(m);
    if (m->sharding->grad_stream != m->stream) m->ops->stream_destroy(m->sharding->grad_stream);
    if (m->sharding->param_stream != m->stream) m->ops->stream_destroy(m->sharding->param_stream);
    mt_host_optimizer_close(m);
    if (m->fp8 && m->fp8->recipe.scratch.base) m->ops->memory_free(m->fp8->recipe.scratch.base);
    m->ops->stream_destroy(m->stream);
    if (m->host.base) m->ops->memory_free_host(m->host.base);
    m->ops->memory_free_host(m->staged_logits);
    m->ops->memory_free_host(m->trainer->results);
    if (m->host_loss) m->ops->memory_free_host(m->host_loss->sums);
    if (m->host_loss) m->ops->memory_free(m->host_loss->device_values);
    for (int i = 0; i < 2; i++) {
        m->ops->memory_free_host(m->staged_batch[i]);
        m->ops->event_destroy(m->copied[i]);
        m->ops->event_destroy(m->trainer->pending[i].done);
    }
    m->ops->memory_free(m->arena.base);
    for (int part = 0; part < MT_NUM_PARTS; part++) {
        if (m->parts[part].base) m->ops->memory_free(m->parts[part].base);
        if (m->resting[part]) m->ops->memory_free_host(m->resting[part]);
    }
}

void mt_model_destroy(mt_model *m) {
    if (!m) return;
    mt_channel *channels[MT_NUM_LINKS];
    for (int i = 0; i < MT_NUM_LINKS; i++) channels[i] = m->links[i].channel;
    mt_channels_close(m->ops, channels, MT_NUM_LINKS); // before their buffers go
    for (int i = 0; i < m->num_contexts; i++) mt_context_destroy(m->contexts[i]);
    if (m->arena.base) mt_model_free_device(m);
    for (int64_t i = 0; i < m->num_micro_batches; i++) mt_batch_free(&m->micro_batches[i].whole);
    mt_batch_free(&m->local_batch);
    mt_batch_free(&m->mtp->rolled);
    free(m->trainer->actions);
    free(m->params);
    for (int64_t i = m->num_host_memory - 1; i >= 0; i--) free(m->host_memory[i]);
    free(m->host_memory);
    free(m);
}

int64_t mt_param_rows_stored(const mt_param *param) {
    return mt_max(mt_min(param->rows_stored - param->first_row, param->rows), 0);
}

/* Initial values of decays and time steps, from a uniform number in [0, 1). */
static float mt_init_decay(mt_init init, float uniform) {
    if (init == MT_INIT_LOG_DECAY) return logf(1 + 15 * uniform);
    float step = expf(logf(1e-3f) + uniform * logf(100));
    return step + logf(-expm1f(-step)); // its softplus is the step
}

/* Draws decays or time steps for elements [begin, end) of a bucket, with indices from `first` on. */
static void mt_param_init_decays(mt_model *m, mt_init init, const mt_shard *shard, int64_t begin, int64_t end,
                                 uint64_t key, int64_t first) {
    void *values = mt_malloc((end - begin) * mt_dtype_size(shard->dtype));
    for (int64_t i = 0; i < end - begin; i++) {
        uint32_t words[4];
        mt_philox(words, key, (uint64_t)(first + i), 0);
        float value = mt_init_decay(init, (float)(words[0] >> 8) * 0x1p-24f);
        mt_row_store(values, i, &value, 1, shard->dtype);
    }
    mt_shard_write(m, shard, begin, values, end - begin);
    free(values);
}

/* Draws initial values for bucket elements [at, at + n), as far as `part` holds them. Element `at` has index `first` in
 * the whole parameter. */
static void mt_param_init_run(mt_model *m, const mt_param *param, const mt_shard *shard, int64_t at, int64_t n,
                              int64_t first) {
    int64_t begin = mt_max(at, shard->first), end = mt_min(at + n, shard->first + shard->count);
    if (begin >= end) return;
    float mean = param->init == MT_INIT_ONES ? 1 : 0, std = param->init == MT_INIT_ONES ? 0 : (float)param->init_std;
    uint64_t role = (uint64_t)param->role + (mt_param_is_adapter(param) ? 128 + (uint64_t)param->adapts : 0);
    uint64_t index = (uint64_t)(param->expert + 1) << 40 | (uint64_t)(param->layer + 1) << 8 | role;
    uint64_t key = mt_random_key((uint64_t)m->options->seed, MT_RANDOM_PARAMETER, index);
    if (param->init == MT_INIT_LOG_DECAY || param->init == MT_INIT_TIME_STEP) {
        mt_param_init_decays(m, param->init, shard, begin, end, key, first + begin - at);
        return;
    }
    m->ops->random_normal(mt_at(shard->data, begin - shard->first, shard->dtype), end - begin, key, first + begin - at,
                          mean, std, shard->dtype, m->stream);
}

/* Draws this rank's values of a parameter. Each value depends on its index in the whole parameter only, so all layouts
 * start with equal weights. */
static void mt_param_init_state(mt_model *m, const mt_param *param, mt_param_state state) {
    mt_shard shard = mt_bucket_shard(m, param->bucket, state);
    int64_t rows = mt_param_rows_stored(param); // padding rows stay 0
    int64_t first = param->first_row * param->whole_cols + param->first_col;
    // The parts of a dense MLP that is upcycled are chosen together: E / granularity rows, each repeated.
    int64_t repeats =
        param->role == MT_ROUTER && m->options->moe_use_upcycling ? m->options->moe_upcycling_granularity : 1;
    if (!shard.data) return;
    if (param->cols == param->whole_cols && repeats == 1)
        mt_param_init_run(m, param, &shard, param->offset, rows * param->cols, first);
    else
        for (int64_t row = 0; row < rows; row++)
            mt_param_init_run(m, param, &shard, param->offset + row * param->cols, param->cols,
                              first + row / repeats * param->whole_cols);
}

/* Master weights with a scale start as the weights, as in Transformer Engine. */
static void mt_master_init_scaled(mt_model *m, const mt_param *param) {
    mt_shard shard = mt_bucket_shard(m, param->bucket, MT_STATE_MASTER);
    int64_t begin, end;
    mt_param_part(param, &shard, &begin, &end);
    if (!shard.data || !mt_state_has_scale(shard.dtype) || begin >= end) return;
    float *values = mt_malloc((end - begin) * (int64_t)sizeof *values);
    mt_state_read(m, param, MT_STATE_WEIGHTS, begin, values, end - begin);
    mt_state_write(m, param, MT_STATE_MASTER, values);
    free(values);
}

void mt_param_init(mt_model *m, const mt_param *param) {
    mt_params_changed(m);
    if (param->init == MT_INIT_ZEROS) return;
    mt_param_init_state(m, param, MT_STATE_WEIGHTS);
    if (m->dtype != MT_F32 && !mt_state_has_scale(mt_state_dtype(m, MT_STATE_MASTER)))
        mt_param_init_state(m, param, MT_STATE_MASTER); // drawn again: a copy of the weights is rounded
    mt_master_init_scaled(m, param);
}

void mt_model_init(mt_model *m) {
    for (int64_t i = 0; i < m->num_params; i++) mt_param_init(m, &m->params[i]);
}

const mt_param *mt_model_params(const mt_model *m, int64_t *count) {
    *count = m->num_params;
    return m->params;
}

mt_bucket *mt_model_buckets(mt_model *m, int64_t *count) {
    mt_wait_reader(m); // the caller may write
    mt_params_gather_all(m);
    *count = m->num_buckets;
    return m->buckets;
}

const mt_options *mt_model_options(const mt_model *m) {
    return m->options;
}

const mt_model_plan *mt_model_get_plan(const mt_model *m) {
    return &m->plan;
}

const mt_ops *mt_model_ops(const mt_model *m) {
    return m->ops;
}

mt_stream *mt_model_stream(const mt_model *m) {
    return m->stream;
}

mt_dtype mt_model_dtype(const mt_model *m) {
    return m->dtype;
}

const mt_grid *mt_model_grid(const mt_model *m) {
    return m->grid;
}

int64_t mt_model_bytes(const mt_model *m) {
    int64_t bytes = m->arena.capacity;
    for (int part = 0; part < MT_NUM_PARTS; part++) bytes += m->parts[part].capacity;
    return bytes;
}

/* ==== §15c forward, backward, decoding ============================================================================ */

/* ---- a whole model's forward, and its backward on one rank */

void mt_model_forward(mt_model *m, const mt_batch *batch, bool training) {
    MT_CHECK(!training || m->grid->pipeline.size == 1);
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++) {
        m->last_forward = mt_load_batch(m, mt_micro_batch_find(m, chunk, -1), batch, training);
        mt_stage_forward(m, &m->last_forward);
        if (m->stages[chunk].loss) mt_loss_forward(m, &m->last_forward);
    }
}

void mt_model_use_adapters(mt_model *m, bool used) {
    m->adapters_off = !used;
}

void mt_model_replay(mt_model *m) {
    mt_pass p = m->last_forward;
    MT_CHECK(m->plan.train && m->grid->pipeline.size == 1);
    p.replay = true;
    mt_stage_forward(m, &p);
    mt_loss_forward(m, &p);
}

void mt_model_backward(mt_model *m) {
    MT_CHECK(m->plan.train && m->last_forward.training && m->grid->pipeline.size == 1);
    mt_stage_backward(m, &m->last_forward);
}

/* Broadcasts host memory of the last pipeline rank to its pipeline group. */
static void mt_broadcast_from_last_stage(const mt_model *m, void *buffer, int64_t bytes) {
    mt_broadcast(&m->grid->pipeline, buffer, bytes, m->grid->pipeline.size - 1);
}

/* Copies `count` rows of logits to whole[count, tensor ranks, V]; each tensor rank has a part of a row. */
static void mt_logits_gather(mt_model *m, void *whole, void *logits, int64_t count) {
    int64_t bytes = m->V * mt_dtype_size(m->dtype), ranks = m->grid->tensor.size;
    void *shares = ranks > 1 ? m->gathered_logits : logits;
    if (ranks > 1) m->ops->all_gather(shares, logits, count * m->V, m->dtype, &m->grid->tensor, m->stream);
    for (int64_t rank = 0; rank < ranks; rank++)
        m->ops->memory_copy_rows(mt_at(whole, rank * m->V, m->dtype), ranks * bytes,
                                 mt_at(shares, rank * count * m->V, m->dtype), bytes, count, bytes, m->stream);
}

/* Copies rows of logits to the host as fp32, without the padding columns; `share`: every rank gets them. */
static void mt_logits_to_host(mt_model *m, void *from, float *logits, int64_t rows, bool share) {
    int64_t V = m->grid->tensor.size * m->V, vocabulary = m->options->vocab_size;
    for (int64_t first = 0; first < rows && m->has_loss; first += MT_STAGED_ROWS) {
        int64_t count = mt_min(rows - first, MT_STAGED_ROWS);
        mt_logits_gather(m, m->staged_logits, mt_at(from, first * m->V, m->dtype), count);
        m->ops->stream_synchronize(m->stream);
        for (int64_t t = 0; t < count; t++)
            mt_cpu_convert(logits + (first + t) * vocabulary, MT_F32, mt_at(m->staged_logits, t * V, m->dtype),
                           m->dtype, vocabulary, NULL);
    }
    if (share) mt_broadcast_from_last_stage(m, logits, rows * vocabulary * 4);
}

int64_t mt_score_logits(mt_model *m, int64_t t, float *logits) {
    const mt_pass *p = m->host_loss->scored;
    if (t >= p->T) return -1;
    if (logits) mt_logits_to_host(m, mt_at(p->mb->outputs[0].logits, t * m->V, m->dtype), logits, 1, false);
    return p->context ? mt_context_position(p->context, t) : t;
}

void mt_model_read(mt_model *m, float *logp, float *entropy, float *logits) {
    int64_t T = m->last_forward.T;
    if (logp && m->has_loss) m->ops->memory_copy(logp, m->logp, T * 4, m->stream);
    if (entropy && m->has_loss) {
        MT_CHECK(!m->last_forward.training);
        m->ops->memory_copy(entropy, m->entropy, T * 4, m->stream);
    }
    m->ops->stream_synchronize(m->stream);
    if (logp) mt_broadcast_from_last_stage(m, logp, T * 4);
    if (entropy) mt_broadcast_from_last_stage(m, entropy, T * 4);
    if (logits) mt_logits_to_host(m, m->last_forward.mb->outputs[0].logits, logits, T, true);
}

/* Writes the inputs of a decode pass to the host's block 0: always the same block, because graphs keep its address. */
static void mt_decode_prepare(mt_model *m, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                              int64_t num_rows) {
    size_t T = (size_t)batch->num_tokens;
    MT_CHECK(!(m->resting_parts >> MT_PART_CACHE & 1));
    MT_CHECK(m->plan.cache_rows > 0 && num_rows <= mt_min(m->plan.max_logits, (int64_t)T) && (int64_t)T <= m->max_rows);
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++) {
        mt_micro_batch *mb = mt_micro_batch_find(m, chunk, -1);
        mb->context = NULL; // every context-parallel rank computes the whole batch
        mt_batch_block block = mt_batch_block_open(m, mb, batch, 0);
        memcpy(block.cache_rows, cache_rows, T * 4);
        memcpy(block.logit_rows, rows, (size_t)num_rows * 4);
        if (m->plan.page_rows > 0) memcpy(block.pages, batch->pages, (size_t)mt_page_entries(&m->plan) * 4);
    }
}

/* The micro-batch of the last chunk in a decode pass. */
static mt_micro_batch *mt_decode_output(mt_model *m) {
    return mt_micro_batch_find(m, m->num_chunks - 1, -1);
}

/* Computes `rows` rows of logits from the host's block: the operations of a decode graph. A step's row i is token i. */
static void mt_decode_pass(mt_model *m, int64_t rows, bool is_step) {
    mt_pass p;
    for (int64_t chunk = 0; chunk < m->num_chunks; chunk++) {
        mt_micro_batch *mb = mt_micro_batch_find(m, chunk, -1);
        p = mt_pass_begin(m, mb);
        p.decode = true;
        p.tp.sequence_parallel = p.tp.overlaps = false, p.first_row = 0; // too few rows to divide them
        int64_t bytes = (char *)mb->batch.labels - mb->device_batch;
        m->ops->memory_copy(mb->device_batch, m->staged_batch[0], bytes, m->stream);
        mt_stage_forward(m, &p);
    }
    if (rows == 0 || !m->has_loss) return; // part of a prompt, or the logits are on another rank
    void *hidden = p.mb->outputs[0].hidden;
    if (!is_step)
        m->ops->gather_rows(&(mt_row_args){rows, m->C, p.batch->logit_rows, .from = hidden, .to = m->scratch.block_out},
                            m->dtype, m->stream);
    p.T = p.tp.T = p.rows = p.tp.rows = rows;
    mt_output_forward(m, &p, is_step ? hidden : m->scratch.block_out);
}

/* True if forwards of one data-parallel replica do not wait for another replica. */
static bool mt_forward_is_own(const mt_model *m) {
    bool gathers = m->sharding->strategy == MT_SHARD_PARAMS;
    return !gathers && (m->experts->num_layers == 0 || m->grid->expert_exchange.size == 1);
}

/* True for a decode step: one token per sequence and its logits, on a rank that needs no other. Steps with equal
 * numbers of sequences run the same operations on the same memory, so a graph can replay them. Ungrouped experts
 * cannot: the host waits for their loads. */
static bool mt_decode_is_step(const mt_model *m, const mt_batch *batch, const int32_t *rows, int64_t num_rows) {
    if (m->grid->tensor.size > 1 || m->grid->pipeline.size > 1 || !mt_forward_is_own(m)) return false;
    if (batch->num_spans != batch->num_tokens || num_rows != batch->num_tokens) return false;
    if (m->experts->num_layers > 0 && !m->options->moe_grouped_gemm) return false;
    for (int64_t i = 0; i < batch->num_tokens; i++)
        if (batch->spans[i].q_len != 1 || rows[i] != i) return false;
    return true;
}

/* Enqueues a pass. Launching a step's operations one by one takes longer than running them, so one graph launches all
 * of them. The first step runs them without the graph too, to initialise them. Its results are those of the graph, so
 * that they do not depend on earlier steps: a graph may sum in another order. A state must not take a token twice: a
 * model that has one begins graphs in the second step, whose order of sums is that of single operations. */
static void mt_decode_enqueue(mt_model *m, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                              int64_t num_rows) {
    int64_t T = batch->num_tokens;
    mt_decode_prepare(m, batch, cache_rows, rows, num_rows);
    bool is_step = m->ops->graph_begin && !m->adapters_off && mt_decode_is_step(m, batch, rows, num_rows);
    mt_decode_graph *step = is_step ? &m->decode_graphs[T] : NULL;
    if (!is_step || !step->has_run) {
        mt_decode_pass(m, num_rows, is_step);
        if (!is_step) return;
        step->has_run = true;
        if (mt_has_states(m->options)) return;
    }
    for (int64_t i = 0; i < T; i++) MT_CHECK(batch->spans[i].k_len <= m->step_spans[i].k_len);
    if (!step->graph) {
        memcpy(mt_decode_output(m)->host_spans, m->step_spans, (size_t)T * sizeof(mt_span));
        m->ops->graph_begin(m->stream);
        mt_decode_pass(m, num_rows, true);
        step->graph = m->ops->graph_end(m->stream);
    }
    m->ops->graph_launch(step->graph, m->stream);
}

void mt_model_decode(mt_model *m, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                     int64_t num_rows, float *logits) {
    mt_decode_enqueue(m, batch, cache_rows, rows, num_rows);
    if (num_rows == 0) m->ops->stream_synchronize(m->stream);
    mt_logits_to_host(m, mt_decode_output(m)->outputs[0].logits, logits, num_rows, true);
}

void mt_model_decode_sample(mt_model *m, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                            int64_t num_rows, const mt_sampling *sampling, const double *uniforms,
                            mt_sampled *sampled) {
    int64_t ranks = m->grid->tensor.size, bytes = num_rows * (int64_t)sizeof *sampled;
    void *logits = mt_decode_output(m)->outputs[0].logits, *whole = ranks > 1 ? m->whole_logits : logits;
    MT_CHECK(ranks == 1 || num_rows <= m->plan.cache_sequences);
    if (sampling->temperature > 0) m->ops->memory_copy(m->uniforms, uniforms, num_rows * 8, m->stream);
    mt_decode_enqueue(m, batch, cache_rows, rows, num_rows);
    if (m->has_loss && num_rows > 0) {
        if (ranks > 1) mt_logits_gather(m, whole, logits, num_rows);
        mt_sample_args a = {num_rows, ranks * m->V, m->options->vocab_size, sampling, whole, m->uniforms, m->sampled};
        m->ops->sample(&a, m->dtype, m->stream);
    }
    mt_copy_wait(m, m->staged_logits, m->sampled, bytes); // pinned memory
    mt_broadcast_from_last_stage(m, memcpy(sampled, m->staged_logits, (size_t)bytes), bytes);
}

void mt_model_cache_copy(mt_model *m, const mt_cache_copy *copy) {
    for (int64_t layer = 0; layer < m->num_layers; layer++) {
        if (!mt_mixer_attends(m->layers[layer].kind.mixer)) continue;
        int64_t row = m->layers[layer].G * mt_dtype_size(m->dtype);
        char *caches[] = {m->k_cache[layer], m->v_cache[layer], m->indexer_cache[layer]};
        int64_t bytes[] = {row * m->D, row * m->Dv, mt_indexer_key_bytes(m, layer)};
        for (int i = 0; i < 3; i++)
            if (bytes[i] > 0)
                m->ops->memory_copy(caches[i] + copy->to * bytes[i], caches[i] + copy->from * bytes[i],
                                    copy->rows * bytes[i], m->stream);
    }
}

void mt_model_state_copy(mt_model *m, const mt_state_copy *copy) {
    int64_t slots = mt_cache_slots(&m->plan);
    mt_state_sizes z = mt_state_sizes_of(m);
    for (int64_t layer = 0; layer < m->num_layers; layer++) {
        mt_mixer_kind mixer = m->layers[layer].kind.mixer;
        if (mt_mixer_attends(mixer) || mixer == MT_MIXER_NONE) continue;
        float *states[] = {m->rule_states[layer], m->conv_states[layer]};
        int64_t elements[] = {z.rule, z.conv};
        for (int i = 0; i < 2; i++)
            m->ops->memory_copy(states[i] + (copy->to + (copy->to_kept ? slots : 0)) * elements[i],
                                states[i] + (copy->from + (copy->from_kept ? slots : 0)) * elements[i], elements[i] * 4,
                                m->stream);
    }
}

/* ==== §16 generation ============================================================================================== */
/* From logits to new tokens. Invariants: the random numbers of a sequence depend on the seed, its id and the position,
 * not on other sequences of the batch; prefill and decode step are the same operation: a forward of the tokens that are
 * not in the KV cache yet; a page of the cache that two sequences share is full and no longer written. A state of a
 * layer without keys and values stands after one number of tokens: a slot has that of its text and keeps another one,
 * where a text is known to begin as others; these wait for it, and begin with a copy. */

/* ---- sampling */

/* The random number in [0, 1) of the token that follows. */
static double mt_sequence_uniform(const mt_sequence *sequence, uint64_t seed) {
    uint32_t words[4];
    mt_philox(words, mt_random_key(seed, MT_RANDOM_SAMPLE, 0), (uint64_t)sequence->num_tokens, (uint64_t)sequence->id);
    return (double)((uint64_t)words[0] << 21 | words[1] >> 11) * 0x1p-53;
}

mt_sampled mt_sample(const float *logits, int64_t vocab_size, const mt_sampling *sampling, const mt_sequence *sequence,
                     int32_t *scratch) {
    double penalty = sampling->repetition_penalty > 0 ? sampling->repetition_penalty : 1;
    float *scores = memcpy(scratch + vocab_size, logits, (size_t)vocab_size * 4);
    for (int64_t i = 0; penalty != 1 && i < sequence->num_tokens; i++) {
        double x = logits[sequence->tokens[i]];
        scores[sequence->tokens[i]] = (float)(x < 0 ? x * penalty : x / penalty);
    }
    return mt_row_sample(logits, scores, vocab_size, sampling, mt_sequence_uniform(sequence, sampling->seed), scratch);
}

/* ---- sequences */

int64_t mt_sequences_unfinished(const mt_sequence *sequences, int64_t count) {
    int64_t unfinished = 0;
    for (int64_t s = 0; s < count; s++) unfinished += sequences[s].finish == MT_UNFINISHED;
    return unfinished;
}

/* ---- continuous batching over a cache in pages */

/* Memory for one sequence. The tokens of an ended sequence stay in its slot until another sequence needs the slot or a
 * page: the next one may begin alike. */
typedef struct mt_cache_slot {
    int32_t *tokens;      // [max_length] whose keys and values are cached
    int64_t num_cached;   // ... when the forward at hand has run
    int64_t num_computed; // ... already
    int64_t num_pages;
    int64_t used;     // number of the forward that used it last
    int64_t sequence; // index of the sequence that runs in it; -1: none
    /* with states, which stand after a number of tokens; 0: no state */
    int64_t state_tokens; // the running state, before the forward at hand
    int64_t kept_tokens;  // the kept state
    int64_t keep_at;      // after so many tokens the running state is to be kept: a forward ends there
} mt_cache_slot;

static int64_t mt_pages_per_slot(const mt_batcher_plan *plan) {
    return mt_text_rows(plan->max_length, plan->page_rows) / plan->page_rows;
}

mt_batcher *mt_batcher_create(const mt_batcher_plan *plan) {
    mt_batcher *b = mt_calloc(sizeof *b);
    int64_t slots = plan->max_sequences, per_slot = mt_pages_per_slot(plan);
    MT_CHECK(plan->num_pages >= per_slot && plan->num_pages * plan->page_rows <= INT32_MAX && plan->max_tokens > 0);
    mt_arena arena = {0};
    b->plan = *plan;
    mt_batch_alloc(&b->batch, plan->max_tokens);
    for (int pass = 0; pass < 2; pass++) { // the first pass counts
        b->slots = mt_arena_alloc(&arena, slots * (int64_t)sizeof *b->slots);
        b->batch.pages = mt_arena_alloc(&arena, (slots * per_slot + 1) * 4);
        b->cache_rows = mt_arena_alloc(&arena, plan->max_tokens * 4), b->logit_rows = mt_arena_alloc(&arena, slots * 4);
        b->logit_sequences = mt_arena_alloc(&arena, slots * 8);
        b->copies = mt_arena_alloc(&arena, slots * (int64_t)sizeof *b->copies);
        b->state_copies = mt_arena_alloc(&arena, 2 * slots * (int64_t)sizeof *b->state_copies);
        b->references = mt_arena_alloc(&arena, plan->num_pages * 4);
        b->free_pages = mt_arena_alloc(&arena, plan->num_pages * 4);
        int32_t *tokens = mt_arena_alloc(&arena, slots * plan->max_length * 4);
        if (pass == 0) arena = (mt_arena){.base = mt_calloc(arena.used), .capacity = arena.used};
        for (int64_t s = 0; s < slots && pass == 1; s++) b->slots[s].tokens = tokens + s * plan->max_length;
    }
    b->batch.pages[slots * per_slot] = (int32_t)plan->num_pages; // of tokens that fill a batch up
    for (int64_t page = plan->num_pages; page > 0; page--) b->free_pages[b->num_free++] = (int32_t)(page - 1);
    return b;
}

void mt_batcher_destroy(mt_batcher *b) {
    if (!b) return;
    free(b->slots); // the block's start
    mt_batch_free(&b->batch);
    free(b);
}

/* A slot's part of the page table. */
static int32_t *mt_cache_slot_pages(const mt_batcher *b, int64_t slot) {
    return b->batch.pages + slot * mt_pages_per_slot(&b->plan);
}

/* Keeps the pages of a slot's first `tokens` tokens and releases the others. */
static void mt_cache_slot_cut(mt_batcher *b, int64_t slot, int64_t tokens) {
    mt_cache_slot *s = &b->slots[slot];
    while (s->num_pages > mt_divide_up(tokens, b->plan.page_rows)) {
        int32_t page = mt_cache_slot_pages(b, slot)[--s->num_pages];
        if (--b->references[page] == 0) b->free_pages[b->num_free++] = page;
    }
    s->num_cached = mt_min(s->num_cached, tokens), s->num_computed = mt_min(s->num_computed, tokens);
    if (s->state_tokens > tokens) s->state_tokens = 0;
    if (s->kept_tokens > tokens) s->kept_tokens = 0;
    if (s->keep_at > tokens) s->keep_at = 0;
}

static void mt_cache_slot_add_page(mt_batcher *b, int64_t slot, int32_t page) {
    mt_cache_slot_pages(b, slot)[b->slots[slot].num_pages++] = page;
    b->references[page]++;
}

/* Frees pages of slots without a sequence, the one used least recently first, until `wanted` pages are free. */
static bool mt_pages_reserve(mt_batcher *b, int64_t wanted) {
    while (b->num_free < wanted) {
        int64_t oldest = -1;
        for (int64_t s = 0; s < b->plan.max_sequences; s++)
            if (b->slots[s].sequence < 0 && b->slots[s].num_pages > 0 &&
                (oldest < 0 || b->slots[s].used < b->slots[oldest].used))
                oldest = s;
        if (oldest < 0) return false;
        mt_cache_slot_cut(b, oldest, 0);
    }
    return true;
}

/* The page for the next token of running sequence i. Without a free one the youngest sequence is put back, its cache
 * dropped; false: that is i itself. */
static bool mt_batcher_grow(mt_batcher *b, mt_sequence *sequences, int64_t i) {
    int64_t slot = sequences[i].slot;
    if (b->slots[slot].num_cached < b->slots[slot].num_pages * b->plan.page_rows) return true;
    while (!mt_pages_reserve(b, 1)) {
        int64_t last = 0;
        for (int64_t s = 1; s < b->plan.max_sequences; s++)
            last = b->slots[s].sequence > b->slots[last].sequence ? s : last;
        int64_t youngest = b->slots[last].sequence;
        mt_cache_slot_cut(b, last, 0);
        b->slots[last].sequence = sequences[youngest].slot = -1;
        if (youngest == i) return false;
    }
    mt_cache_slot_add_page(b, slot, b->free_pages[--b->num_free]);
    return true;
}

/* The number of leading tokens that are the same, of at most `limit`. */
static int64_t mt_tokens_common(const int32_t *a, const int32_t *b, int64_t limit) {
    int64_t n = 0;
    while (n < limit && a[n] == b[n]) n++;
    return n;
}

/* Leading tokens of a sequence that it can take from a slot: whole pages, which both may read, or up to the last token
 * that is computed, which can be copied; with states, up to a state. At least one token is left, whose logits are
 * needed. */
static int64_t mt_cache_slot_common(const mt_batcher *b, const mt_cache_slot *s, const mt_sequence *sequence) {
    int64_t n = mt_tokens_common(s->tokens, sequence->tokens, mt_min(s->num_cached, sequence->num_tokens - 1));
    int64_t computed = mt_min(n, s->num_computed);
    int64_t kept = s->kept_tokens <= computed ? s->kept_tokens : 0;
    if (b->plan.has_states) return s->state_tokens <= computed ? mt_max(s->state_tokens, kept) : kept;
    return mt_max(computed, n / b->plan.page_rows * b->plan.page_rows);
}

/* After how many tokens the state of sequence i, which begins with `common` tokens of a slot, is worth keeping: where
 * most of it is the beginning of a cached text, or of one that waits; 0: nowhere. Its forward ends there, so that less
 * than a page is not worth it. */
static int64_t mt_batcher_keep_at(const mt_batcher *b, const mt_sequence *sequences, int64_t count, int64_t i,
                                  int64_t common) {
    const mt_sequence *own = &sequences[i];
    int64_t most = 0, seen = 0;
    for (const mt_cache_slot *s = b->slots; s < b->slots + b->plan.max_sequences; s++)
        most = mt_max(most, mt_tokens_common(s->tokens, own->tokens, mt_min(s->num_cached, own->num_tokens - 1)));
    for (int64_t j = i + 1; j < count && seen < b->plan.max_sequences; j++) {
        const mt_sequence *other = &sequences[j];
        if (other->slot >= 0 || other->finish != MT_UNFINISHED) continue;
        int64_t limit = mt_min(own->num_tokens, other->num_tokens - 1);
        most = mt_max(most, mt_tokens_common(own->tokens, other->tokens, limit)), seen++;
    }
    return most - common < b->plan.page_rows ? 0 : most;
}

/* True if sequence i is to wait for a state that a running sequence is about to leave. */
static bool mt_batcher_waits(const mt_batcher *b, const mt_sequence *sequences, int64_t i) {
    const mt_sequence *own = &sequences[i];
    for (const mt_cache_slot *s = b->slots; s < b->slots + b->plan.max_sequences; s++) {
        bool is_later = s->sequence >= 0 && s->keep_at > 0 && s->keep_at < own->num_tokens;
        if (is_later && mt_tokens_common(sequences[s->sequence].tokens, own->tokens, s->keep_at) == s->keep_at)
            return true;
    }
    return false;
}

/* Pages that running sequences are yet to need, at most one each: a newcomer leaves them free. */
static int64_t mt_pages_wanted(const mt_batcher *b, const mt_sequence *sequences) {
    int64_t wanted = 0;
    for (int64_t s = 0; s < b->plan.max_sequences; s++) {
        int64_t i = b->slots[s].sequence;
        wanted += i >= 0 && b->slots[s].num_pages < mt_divide_up(sequences[i].max_tokens, b->plan.page_rows);
    }
    return wanted;
}

/* Gives a slot the state of another, or its own, after `common` tokens. kept: its own kept state before. */
static void mt_batcher_take_state(mt_batcher *b, int64_t slot, int64_t source, int64_t common, bool from_kept,
                                  int64_t kept) {
    mt_cache_slot *s = &b->slots[slot];
    s->state_tokens = common, s->kept_tokens = slot == source && kept <= common ? kept : 0;
    if (common > 0 && (slot != source || from_kept))
        b->state_copies[b->num_state_copies++] = (mt_state_copy){source, slot, from_kept, false};
}

/* Gives sequence i a slot and pages for its tokens. It shares the full pages of the slot that has most of its leading
 * tokens, and copies the rows of that slot's next page, and its state. False: no slot or too few pages are free. */
static bool mt_batcher_admit(mt_batcher *b, mt_sequence *sequences, int64_t count, int64_t i) {
    mt_sequence *sequence = &sequences[i];
    int64_t rows = b->plan.page_rows, slot = -1, source = -1, common = 0, wanted = mt_pages_wanted(b, sequences);
    for (int64_t s = 0; s < b->plan.max_sequences; s++) {
        int64_t tokens = mt_cache_slot_common(b, &b->slots[s], sequence);
        if (tokens > common) common = tokens, source = s;
        if (b->slots[s].sequence < 0 && (slot < 0 || b->slots[s].used < b->slots[slot].used)) slot = s;
    }
    if (slot < 0) return false;
    if (source >= 0 && b->slots[source].sequence < 0) slot = source;
    int64_t full = common / rows, tail = common % rows, computed = source < 0 ? 0 : b->slots[source].num_computed;
    int32_t next = tail > 0 ? mt_cache_slot_pages(b, source)[full] : 0; // the page of the tail
    bool copies = tail > 0 && (slot != source || b->references[next] > 1);
    int64_t keep_at = b->plan.has_states ? mt_batcher_keep_at(b, sequences, count, i, common) : 0;
    int64_t kept = source < 0 ? 0 : b->slots[source].kept_tokens;
    bool from_kept = source >= 0 && b->slots[source].state_tokens != common;
    mt_cache_slot_cut(b, slot, slot != source ? 0 : copies ? full * rows : common);
    for (int64_t page = 0; page < full && slot != source; page++)
        mt_cache_slot_add_page(b, slot, mt_cache_slot_pages(b, source)[page]);
    mt_cache_slot *s = &b->slots[slot];
    s->num_cached = full * rows, s->num_computed = mt_min(computed, full * rows);
    memcpy(s->tokens, sequence->tokens, (size_t)common * 4);
    s->sequence = i; // from here on its pages are not freed
    int64_t needed = mt_divide_up(sequence->num_tokens, rows) - s->num_pages;
    if (!mt_pages_reserve(b, needed + wanted)) {
        s->sequence = -1;
        return false;
    }
    while (needed-- > 0) mt_cache_slot_add_page(b, slot, b->free_pages[--b->num_free]);
    if (copies)
        b->copies[b->num_copies++] = (mt_cache_copy){next * rows, mt_cache_slot_pages(b, slot)[full] * rows, tail};
    s->num_cached = common, s->num_computed = mt_min(computed, common);
    if (b->plan.has_states) mt_batcher_take_state(b, slot, source, common, from_kept, kept);
    s->keep_at = keep_at;
    sequence->slot = slot;
    return true;
}

/* Adds the uncached tokens of sequence i, as many as fit, as one span. */
static void mt_batcher_add(mt_batcher *b, const mt_sequence *sequence, int64_t i) {
    mt_cache_slot *s = &b->slots[sequence->slot];
    const int32_t *pages = mt_cache_slot_pages(b, sequence->slot);
    int64_t start = b->batch.num_tokens, cached = s->num_cached, rows = b->plan.page_rows;
    int64_t wanted = sequence->num_tokens - cached, count = mt_min(wanted, b->plan.max_tokens - start);
    if (s->keep_at > cached) count = mt_min(count, s->keep_at - cached);
    if (count == 0) return;
    for (int64_t t = start, at = cached; at < cached + count; t++, at++) {
        b->batch.tokens[t] = s->tokens[at] = sequence->tokens[at], b->batch.positions[t] = (int32_t)at;
        b->cache_rows[t] = (int32_t)(pages[at / rows] * rows + at % rows);
    }
    int64_t first_row = sequence->slot * mt_pages_per_slot(&b->plan) * rows;
    b->batch.spans[b->batch.num_spans++] = (mt_span){start, count, first_row, cached + count, true};
    b->batch.num_tokens += count;
    s->num_cached += count, s->used = b->num_forwards;
    if (wanted > 1 || cached < sequence->num_prompt) b->num_prefill += count;
    if (count < wanted) return;
    b->logit_rows[b->num_logits] = (int32_t)(start + count - 1), b->logit_sequences[b->num_logits++] = i;
}

/* The forward before has run: its tokens are computed, and states that were to be kept are copied. */
static void mt_batcher_end_forward(mt_batcher *b, int64_t slot) {
    mt_cache_slot *s = &b->slots[slot];
    if (b->plan.has_states && s->num_cached > s->num_computed) s->state_tokens = s->num_cached;
    s->sequence = -1, s->num_computed = s->num_cached;
    if (s->keep_at == 0 || s->state_tokens != s->keep_at) return;
    s->kept_tokens = s->keep_at, s->keep_at = 0;
    b->state_copies[b->num_state_copies++] = (mt_state_copy){slot, slot, false, true};
}

int64_t mt_batcher_next(mt_batcher *b, mt_sequence *sequences, int64_t count) {
    b->batch.num_tokens = b->batch.num_spans = b->num_logits = b->num_copies = b->num_prefill = 0;
    b->num_state_copies = 0;
    b->num_forwards++;
    for (int64_t s = 0; s < b->plan.max_sequences; s++) mt_batcher_end_forward(b, s);
    for (int64_t i = 0; i < count; i++) {
        MT_CHECK(sequences[i].num_tokens > 0 && sequences[i].max_tokens <= b->plan.max_length);
        if (sequences[i].finish != MT_UNFINISHED) sequences[i].slot = -1;
        if (sequences[i].slot >= 0) b->slots[sequences[i].slot].sequence = i;
    }
    for (int64_t i = 0; i < count; i++) // decode steps first: each is one token, and all of them wait for this forward
        if (sequences[i].slot >= 0 && b->slots[sequences[i].slot].num_cached + 1 == sequences[i].num_tokens &&
            mt_batcher_grow(b, sequences, i))
            mt_batcher_add(b, &sequences[i], i);
    for (int64_t i = 0; i < count; i++) // prompts that are partly read
        if (sequences[i].slot >= 0 && b->slots[sequences[i].slot].num_cached < sequences[i].num_tokens)
            mt_batcher_add(b, &sequences[i], i);
    for (int64_t i = 0; i < count && b->batch.num_tokens < b->plan.max_tokens; i++) {
        if (sequences[i].slot >= 0 || sequences[i].finish != MT_UNFINISHED || mt_batcher_waits(b, sequences, i))
            continue;
        if (!mt_batcher_admit(b, sequences, count, i)) break;
        mt_batcher_add(b, &sequences[i], i);
    }
    return b->batch.num_tokens;
}

void mt_batcher_pad(mt_batcher *b, int64_t num_tokens) {
    int64_t row = b->plan.num_pages * b->plan.page_rows; // of the page that no sequence has
    int64_t key = b->plan.max_sequences * mt_pages_per_slot(&b->plan) * b->plan.page_rows;
    MT_CHECK(num_tokens <= b->plan.max_tokens && num_tokens - b->batch.num_tokens <= b->plan.page_rows);
    for (int64_t t = b->batch.num_tokens; t < num_tokens; t++, row++, key++) {
        b->batch.tokens[t] = b->batch.positions[t] = 0, b->cache_rows[t] = (int32_t)row;
        b->batch.spans[b->batch.num_spans++] = (mt_span){t, 1, key, 1, true};
    }
    b->batch.num_tokens = mt_max(b->batch.num_tokens, num_tokens);
}

/* ---- a generator: a batcher and a model */

struct mt_generator {
    mt_model *model;
    mt_sampling sampling;
    mt_stops stops;
    mt_batcher *batcher;
    const mt_group *together; // replicas of the model whose forwards need each other; NULL: none
    float *logits;            // [max_sequences, vocab_size] for a repetition penalty; NULL: the device samples
    double *uniforms;         // [max_sequences]
    mt_sampled *sampled;      // [max_sequences]
    mt_generator_totals totals;
};

void mt_plan_generation(mt_model_plan *plan, int64_t count, int64_t max_tokens, int64_t cache_tokens) {
    if (plan->page_rows == 0) plan->page_rows = MT_PAGE_ROWS;
    plan->max_position = mt_max(plan->max_position, max_tokens), plan->cache_sequences = count;
    int64_t most = mt_divide_up(plan->max_position, plan->page_rows), pages = count * most;
    if (cache_tokens > 0) pages = mt_max(most, mt_min(mt_divide_up(cache_tokens, plan->page_rows), pages));
    plan->cache_rows = (pages + 1) * plan->page_rows; // the last page takes the padding of batches
    plan->max_tokens = mt_max(plan->max_tokens, count), plan->max_logits = mt_max(plan->max_logits, count);
}

mt_generator *mt_generator_create(mt_model *model, const mt_sampling *sampling, const mt_stops *stops) {
    mt_generator *g = mt_calloc(sizeof *g);
    const mt_model_plan *plan = &model->plan;
    int64_t most = plan->cache_sequences, together = model->grid->data.size;
    MT_CHECK(plan->page_rows > 0 && most <= plan->max_logits);
    *g = (mt_generator){.model = model, .sampling = *sampling, .stops = *stops};
    if (together > 1 && !mt_forward_is_own(model)) g->together = &model->grid->data;
    mt_batcher_plan batching = {.max_sequences = most, .max_length = plan->max_position, .page_rows = plan->page_rows};
    batching.max_tokens = model->max_rows, batching.num_pages = plan->cache_rows / plan->page_rows - 1;
    batching.has_states = mt_has_states(model->options);
    g->batcher = mt_batcher_create(&batching);
    if (sampling->repetition_penalty > 0 && sampling->repetition_penalty != 1)
        g->logits = mt_malloc(most * model->options->vocab_size * 4);
    g->uniforms = mt_calloc(most * 8);
    g->sampled = mt_malloc(most * (int64_t)sizeof *g->sampled);
    mt_params_gather_all(model); // an optimizer step may have left them sharded
    return g;
}

void mt_generator_destroy(mt_generator *g) {
    if (!g) return;
    mt_batcher_destroy(g->batcher);
    free(g->logits);
    free(g->uniforms);
    free(g->sampled);
    free(g);
}

/* Runs the model's forward and samples a token from each of `rows` rows of logits. */
static void mt_generator_sample(mt_generator *g, const mt_sequence *sequences, int64_t rows) {
    mt_batcher *b = g->batcher;
    int64_t V = g->model->options->vocab_size;
    for (int64_t row = 0; row < b->num_logits; row++)
        g->uniforms[row] = mt_sequence_uniform(&sequences[b->logit_sequences[row]], g->sampling.seed);
    if (!g->logits) {
        mt_model_decode_sample(g->model, &b->batch, b->cache_rows, b->logit_rows, rows, &g->sampling, g->uniforms,
                               g->sampled);
        return;
    }
    mt_model_decode(g->model, &b->batch, b->cache_rows, b->logit_rows, rows, g->logits);
    mt_scratch scratch = mt_scratch_reserve(2 * V);
#pragma omp parallel for schedule(dynamic) if (b->num_logits * V > MT_PARALLEL)
    for (int64_t row = 0; row < b->num_logits; row++)
        g->sampled[row] = mt_sample(g->logits + row * V, V, &g->sampling, &sequences[b->logit_sequences[row]],
                                    (int32_t *)mt_scratch_slice(scratch));
}

/* Appends a sampled token to its sequence. */
static int mt_generator_append(const mt_generator *g, mt_sequence *sequence, const mt_sampled *sampled,
                               mt_error *error) {
    int64_t at = sequence->num_tokens - sequence->num_prompt;
    if (sampled->token < 0)
        return mt_error_set(error,
                            "the model's logits after token %lld are not all numbers; its weights are damaged, or too "
                            "large for their precision",
                            (long long)sequence->num_tokens);
    if (sequence->logps) sequence->logps[at] = sampled->logp, sequence->sampled_logps[at] = sampled->sampled_logp;
    sequence->tokens[sequence->num_tokens++] = sampled->token;
    bool stops = g->stops.ends_text && g->stops.ends_text(g->stops.context, sequence);
    for (int64_t i = 0; i < g->stops.count; i++) stops |= sampled->token == g->stops.ids[i];
    if (stops)
        sequence->finish = MT_FINISH_STOP;
    else if (sequence->num_tokens >= sequence->max_tokens)
        sequence->finish = MT_FINISH_LENGTH;
    return 0;
}

/* Runs the batcher's forward and samples from its logits. */
static int mt_generator_forward(mt_generator *g, mt_sequence *sequences, mt_error *error) {
    mt_batcher *b = g->batcher;
    int status = 0;
    int64_t rows = b->num_logits;
    mt_batcher_pad(b, 1); // other replicas may have tokens or logits; the head's weights are gathered on all
    if (rows == 0 && g->together) b->logit_rows[0] = 0, rows = 1;
    for (int64_t i = 0; i < b->num_copies; i++) mt_model_cache_copy(g->model, &b->copies[i]);
    for (int64_t i = 0; i < b->num_state_copies; i++) mt_model_state_copy(g->model, &b->state_copies[i]);
    mt_generator_sample(g, sequences, rows);
    for (int64_t row = 0; row < b->num_logits && status == 0; row++)
        status = mt_generator_append(g, &sequences[b->logit_sequences[row]], &g->sampled[row], error);
    return status;
}

int64_t mt_generator_step(mt_generator *g, mt_sequence *sequences, int64_t count, mt_error *error) {
    double start = mt_time();
    mt_generator_totals *totals = &g->totals;
    if (mt_batcher_next(g->batcher, sequences, count) == 0 && !g->together) return 0;
    int status = mt_generator_forward(g, sequences, error);
    totals->prefill_tokens += g->batcher->num_prefill;
    totals->decode_tokens += g->batcher->num_prefill ? 0 : g->batcher->num_logits;
    totals->new_tokens += g->batcher->num_logits;
    *(g->batcher->num_prefill ? &totals->prefill_seconds : &totals->decode_seconds) += mt_time() - start;
    double sums[] = {(double)mt_sequences_unfinished(sequences, count), status != 0};
    if (g->together) mt_all_reduce_sum(g->together, sums, 2, MT_F64);
    if (sums[1] == 0) return (int64_t)sums[0];
    return g->together ? mt_agree(g->together, status != 0, error) : -1;
}

bool mt_generator_agree(const mt_generator *g, bool wanted) {
    double any = wanted;
    mt_all_reduce_max(&g->model->grid->tensor_context, &any, 1, MT_F64);
    mt_all_reduce_max(&g->model->grid->pipeline, &any, 1, MT_F64);
    if (g->together) mt_all_reduce_max(g->together, &any, 1, MT_F64);
    return any > 0;
}

mt_generator_totals mt_generator_read_totals(const mt_generator *generator) {
    return generator->totals;
}

/* ==== §17 gated delta net ========================================================================================= */
/* A mixer with a state of fixed size instead of keys and values of all tokens (Yang et al., "Gated delta networks:
 * improving Mamba2 with delta rule"; Qwen3-Next, Qwen3.5). One product gives q, k, v, the gate z of the output, and two
 * numbers a value head, b and a. A short convolution mixes each channel of q, k and v with the tokens just before it.
 * Each value head then has a matrix S[Dk, Dv], a memory that maps keys to values:
 *
 *   S_t = exp(g_t) S_t-1 + k_t u_t^T,  u_t = beta_t (v_t - exp(g_t) S_t-1^T k_t),  o_t = S_t^T q_t
 *
 * It forgets by exp(g), then replaces what it holds for the key k by the value v, as far as beta says. Invariant: a
 * state begins with zeros at each span, so packed sequences do not see one another. */

/* ==== §17a its kernels ============================================================================================ */
/* The recurrence in chunks of L tokens, so that most work is products of matrices. Let G_t be the sum of g from the
 * chunk's first token to t, and S the state before the chunk. Kimi delta attention has a g for each channel of the key
 * head: then e^G is the diagonal matrix of its channels, else the same number for all. Unrolled, with rows of Q, K,
 *
 *   q'_t = e^G_t q_t,   k'_t = e^G_t k_t,   k"_t = e^(G_L - G_t) k_t
 *   u_t = beta_t (v_t - S^T k'_t - sum over i < t of R_ti u_i),   R_ti = k_t . e^(G_t - G_i) k_i
 *   o_t = S^T q'_t + sum over i <= t of P_ti u_i,                 P_ti = q_t . e^(G_t - G_i) k_i
 *   S'  = e^G_L S + K"^T U
 *
 * The second line is a triangular system (I + beta R) U = beta (V - K' S) = B. No exponent is positive: with a decay
 * per channel R and P are made in blocks of tokens, whose products are e^(G_t - G_s) x e^(G_s - G_i) around the block's
 * first token s. Backward, from dO and dS':
 *
 *   dU = P^T dO + K" dS';   dB = (I + beta R)^-T dU
 *   dS = e^G_L dS' + Q'^T dO - K'^T (beta dB)
 *   dP = dO U^T;   dR = -beta dB U^T;   dQ' = dO S^T;   dK' = -beta dB S^T;   dK" = U dS'^T;   dV = beta dB
 *
 * and each passes its gradient on to its factors; the gradient of an e^(G_t - G_i) x is x times that of x, for G_t, and
 * its negative for G_i. The backward computes the states before all chunks of a span again, then takes the chunks in
 * reverse. A task is a key head with its value heads.
 *
 * Context parallelism cuts a sequence into pieces on several ranks. Over a piece the state S becomes S_local + M S: S'
 * is linear in U and U in S. Both are found without S, as the recurrence of [S_local, M] from [0, I] with values [V,
 * 0]; then states pass from piece to piece, a product of Dk x Dk by Dk x Dv a head each, and the outputs follow from
 * the state before the piece. The line for dS does not read S: dS before a piece is dS_local + M^T dS', where dS_local
 * follows from dO with dS' = 0, so that gradients pass the same way back, again after each rank's own work. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // streams
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wpass-failed" // as in §3
#endif

enum { MT_CHUNK = 64 };

/* ---- states */

/* The slot whose list has span s; -1: none. */
static int64_t mt_state_slot(const int64_t *list, int64_t slots, int64_t s) {
    for (int64_t slot = 0; slot < slots; slot++)
        if (list[slot] == s) return slot;
    return -1;
}

/* The state before span s; NULL: zeros. */
static const float *mt_state_before(const mt_states *states, const mt_spans *spans, int64_t s, int64_t elements) {
    const mt_span *span = &spans->host[s];
    if (!states->memory) return NULL;
    if (!states->first && span->k_len == span->q_len) return NULL;
    int64_t slot = states->first ? mt_state_slot(states->first, states->slots, s) : span->k_start / states->slot_rows;
    MT_CHECK(slot < states->slots);
    return slot < 0 ? NULL : states->memory + slot * elements;
}

/* Where a span leaves its last state; NULL: nowhere. */
static float *mt_state_kept(const mt_states *states, const mt_span *span, int64_t elements) {
    if (!states->memory || states->first) return NULL;
    int64_t slot = span->k_start / states->slot_rows;
    MT_CHECK(slot < states->slots);
    return states->memory + slot * elements;
}

/* The gradient of the state after span s; NULL: zeros. */
static const float *mt_dstate_after(const mt_states *states, const float *dstates, int64_t s, int64_t elements) {
    int64_t slot = dstates ? mt_state_slot(states->last, states->slots, s) : -1;
    return slot < 0 ? NULL : dstates + slot * elements;
}

/* True if one span is both the first and the last of a slot: the state before it reaches the one after it. */
static bool mt_state_crosses(const mt_states *states, int64_t slot) {
    return states->first[slot] >= 0 && states->first[slot] == states->last[slot];
}

/* ---- short convolution */

/* A channel block of row `row` of a span: of x, or of the state [K - 1, C] before it; NULL: zeros. */
static const float *mt_conv_row(float *scratch, const mt_conv_args *a, const mt_span *span, const float *state,
                                int64_t row, int64_t c, int64_t width, mt_dtype dtype) {
    if (row >= 0) return mt_row_load(scratch, a->x, (span->q_start + row) * a->x_stride + c, width, dtype);
    return state ? state + (a->K - 1 + row) * a->C + c : NULL;
}

/* sums[width] = bias + the taps' products, of channels c... of row t of a span. */
static void mt_conv_sum(float *sums, float *scratch, const mt_conv_args *a, const mt_span *span, const float *state,
                        const float *w, int64_t t, int64_t c, int64_t width, mt_dtype dtype) {
    const float *bias = a->bias ? mt_row_load(scratch, a->bias, c, width, dtype) : NULL;
    for (int64_t i = 0; i < width; i++) sums[i] = bias ? bias[i] : 0;
    for (int64_t j = 0; j < a->K; j++) {
        const float *x = mt_conv_row(scratch, a, span, state, t - (a->K - 1 - j), c, width, dtype);
        for (int64_t i = 0; i < width && x; i++) sums[i] += w[i * a->K + j] * x[i];
    }
}

/* after[K - 1, C] = the last rows of the state before a span and of x; the two states may be one. */
static void mt_conv_keep(float *after, float *scratch, const mt_conv_args *a, const mt_span *span, const float *before,
                         mt_dtype dtype) {
    int64_t C = a->C, rows = a->K - 1;
    for (int64_t j = 0; j < rows; j++) { // ascending: a row of the state moves towards the first
        const float *x = mt_conv_row(scratch, a, span, before, span->q_len - (rows - j), 0, C, dtype);
        for (int64_t i = 0; i < C; i++) after[j * C + i] = x ? x[i] : 0;
    }
}

static void mt_cpu_short_conv_forward(const mt_conv_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t C = a->C, K = a->K;
    mt_scratch scratch = mt_scratch_reserve(C * K + 2 * C);
    const float *w = mt_row_load(mt_scratch_slice(scratch), a->w, 0, C * K, dtype); // for all threads
    for (int64_t s = 0; s < a->spans->count; s++) {
        const mt_span *span = &a->spans->host[s];
        const float *before = mt_state_before(&a->states, a->spans, s, (K - 1) * C);
        float *kept = mt_state_kept(&a->states, span, (K - 1) * C);
#pragma omp parallel for if (span->q_len * C * K > MT_PARALLEL)
        for (int64_t t = 0; t < span->q_len; t++) {
            float *sums = mt_scratch_slice(scratch) + C * K;
            int64_t to = (span->q_start + t) * a->y_stride;
            mt_conv_sum(sums, sums + C, a, span, before, w, t, 0, C, dtype);
            for (int64_t i = 0; i < C && a->silu; i++) sums[i] = mt_silu(1, sums[i]);
            mt_row_store(a->y, to, sums, C, dtype);
        }
        if (kept) mt_conv_keep(kept, mt_scratch_slice(scratch) + C * K, a, span, before, dtype);
    }
}

/* Channels [c, c + width) of a span in the backward of a convolution. */
typedef struct mt_conv_channels {
    const mt_conv_args *a;
    const mt_span *span;
    const float *before, *dafter; // the state before the span, and the gradient of the one after it; NULL: zeros
    const float *w;               // [width, K]
    int64_t c, width;
    mt_dtype dtype;
} mt_conv_channels;

/* d[width] = the gradient of row t's sums, before SiLU. */
static void mt_conv_dsums(float *d, const mt_conv_channels *b, int64_t t) {
    const mt_conv_args *a = b->a;
    float sums[MT_COLUMNS], scratch[MT_COLUMNS];
    const float *dy = mt_row_load(scratch, a->dy, (b->span->q_start + t) * a->dy_stride + b->c, b->width, b->dtype);
    memcpy(d, dy, (size_t)b->width * sizeof *d);
    if (!a->silu) return;
    mt_conv_sum(sums, scratch, a, b->span, b->before, b->w, t, b->c, b->width, b->dtype);
    for (int64_t i = 0; i < b->width; i++) d[i] *= mt_silu_slope(1, sums[i]);
}

/* dx[width] of row `row`, which may be one of the state before the span; ring[t % K] has the gradients of the sums of
 * the rows t that read it, zeros for those behind the span. */
static void mt_conv_dx(float *dx, const mt_conv_channels *b, float ring[MT_MAX_TAPS][MT_COLUMNS], int64_t row) {
    int64_t K = b->a->K, later = row - b->span->q_len + K - 1; // its row in the state after the span
    for (int64_t i = 0; i < b->width; i++) dx[i] = b->dafter && later >= 0 ? b->dafter[later * b->a->C + b->c + i] : 0;
    for (int64_t j = 0; j < K; j++) {
        int64_t t = row + K - 1 - j;
        for (int64_t i = 0; i < b->width && t >= 0; i++) dx[i] += b->w[i * K + j] * ring[t % K][i];
    }
}

/* Row by row, dx as soon as all sums that read it are known. */
static void mt_conv_backward_channels(const mt_conv_channels *b, float *dw, float *dbias) {
    const mt_conv_args *a = b->a;
    int64_t K = a->K, width = b->width;
    float ring[MT_MAX_TAPS][MT_COLUMNS], dx[MT_COLUMNS], scratch[MT_COLUMNS];
    for (int64_t t = 0; t < b->span->q_len + K - 1; t++) {
        float *d = ring[t % K];
        memset(d, 0, sizeof *ring);
        if (t < b->span->q_len) {
            mt_conv_dsums(d, b, t);
            for (int64_t j = 0; j < K; j++) {
                const float *x = mt_conv_row(scratch, a, b->span, b->before, t - (K - 1 - j), b->c, width, b->dtype);
                for (int64_t i = 0; i < width && x; i++) dw[i * K + j] += d[i] * x[i];
            }
            for (int64_t i = 0; i < width; i++) dbias[i] += d[i];
        }
        int64_t row = t - (K - 1);
        if (row < 0) continue;
        mt_conv_dx(dx, b, ring, row);
        mt_row_store(a->dx, (b->span->q_start + row) * a->dx_stride + b->c, dx, width, b->dtype);
    }
}

static void mt_cpu_short_conv_backward(const mt_conv_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t C = a->C, K = a->K;
    MT_CHECK(K <= MT_MAX_TAPS);
#pragma omp parallel for
    for (int64_t c = 0; c < C; c += MT_COLUMNS) {
        float loaded[MT_COLUMNS * MT_MAX_TAPS], dw[MT_COLUMNS * MT_MAX_TAPS] = {0}, dbias[MT_COLUMNS] = {0};
        int64_t width = mt_min(MT_COLUMNS, C - c);
        const float *w = mt_row_load(loaded, a->w, c * K, width * K, dtype);
        for (int64_t s = 0; s < a->spans->count; s++) {
            mt_conv_channels b = {.a = a, .span = &a->spans->host[s], .w = w, .c = c, .width = width, .dtype = dtype};
            b.before = mt_state_before(&a->states, a->spans, s, (K - 1) * C);
            b.dafter = mt_dstate_after(&a->states, a->dstates, s, (K - 1) * C);
            mt_conv_backward_channels(&b, dw, dbias);
        }
        for (int64_t i = 0; i < width * K && a->dw; i++) a->dw[c * K + i] += dw[i];
        for (int64_t i = 0; i < width && a->dbias; i++) a->dbias[c + i] += dbias[i];
    }
}

static void mt_cpu_short_conv_carry_forward(const mt_conv_args *a, const mt_carried_state *state, mt_dtype dtype,
                                            mt_stream *stream) {
    mt_scratch scratch = mt_scratch_reserve(a->C);
    const float *before = mt_state_crosses(&a->states, state->slot) ? state->in : NULL;
    mt_conv_keep(state->out, mt_scratch_slice(scratch), a, &a->spans->host[a->states.last[state->slot]], before, dtype);
}

static void mt_cpu_short_conv_carry_backward(const mt_conv_args *a, const mt_carried_state *state, mt_dtype dtype,
                                             mt_stream *stream) {
    int64_t C = a->C, K = a->K, s = a->states.first[state->slot];
    mt_conv_channels b = {.a = a, .span = &a->spans->host[s], .dtype = dtype};
    b.before = mt_state_before(&a->states, a->spans, s, (K - 1) * C);
    b.dafter = mt_state_crosses(&a->states, state->slot) ? state->in : NULL;
    for (b.c = 0; b.c < C; b.c += MT_COLUMNS) {
        float loaded[MT_COLUMNS * MT_MAX_TAPS], ring[MT_MAX_TAPS][MT_COLUMNS] = {{0}};
        b.width = mt_min(MT_COLUMNS, C - b.c), b.w = mt_row_load(loaded, a->w, b.c * K, b.width * K, dtype);
        for (int64_t t = 0; t < mt_min(K - 1, b.span->q_len); t++) mt_conv_dsums(ring[t], &b, t);
        for (int64_t row = 1 - K; row < 0; row++) mt_conv_dx(state->out + (K - 1 + row) * C + b.c, &b, ring, row);
    }
}

/* ---- the delta rule */

enum { MT_DELTA_BLOCK = 16 }; // tokens around whose first one decays per channel are split

/* A chunk of one key head, and of one of its value heads at a time. Names as in the formulas above. */
typedef struct mt_delta_chunk {
    const mt_delta_args *a;
    mt_dtype dtype;
    int64_t row, L;             // its first token, and its tokens
    int64_t W;                  // columns of S, U and V: Dv, or with those of M
    float *q, *k;               // [L, Dk] as the rule takes them
    float *q_factor, *k_factor; // [L] 1 / length
    float *qk, *kk;             // [L, L] q_t.k_i and k_t.k_i; not with a decay per channel
    /* of the value head */
    float *v, *beta;                     // [L, W], [L]
    float *g, *G;                        // [L, decays]
    float *grown, *rest;                 // [L, Dk] e^G_t and e^(G_L - G_t)
    float *decays;                       // [L, L] e^(G_t - G_i), 0 above the diagonal; not with a decay per channel
    float *R, *P;                        // [L, L], 0 above the diagonal
    float *q_grown, *k_grown, *k_rest;   // [L, Dk] Q', K', K"
    float *U, *ks;                       // [L, W] U and K' S
    float *grown_in_block, *to_block;    // [L, Dk] e^(G_t - G_s), e^(G_s - G_i): see mt_delta_block
    float *q_block, *k_block, *k_before; // [L, Dk] q and k times the former, k times the latter
    /* of the backward */
    float *dq, *dk;                         // [L, Dk] sums over the value heads
    float *dR, *dP;                         // [L, L]
    float *dO, *dU, *dV;                    // [L, Dv]; dU becomes dB
    float *dq_grown, *dk_grown, *dk_rest;   // [L, Dk]
    float *dq_later, *dk_later, *dk_sooner; // [L, Dk] from P and R, as tokens t and i
    float *product;                         // [L, Dk]
    float *dbeta;                           // [L]
    double *dG;                             // [L, Dk] whose first `decays` columns are used; terms cancel in its sums
} mt_delta_chunk;

/* Lays the arrays of a chunk into scratch, dG first, and returns their floats; scratch NULL: only counts. */
static int64_t mt_delta_place(mt_delta_chunk *c, const mt_delta_args *a, int64_t W, float *scratch) {
    int64_t by_key = MT_CHUNK * a->Dk, by_value = MT_CHUNK * W, square = MT_CHUNK * MT_CHUNK;
    int64_t used = 2 * by_key;
    float **const keys[] = {&c->q,        &c->k,
                            &c->g,        &c->G,
                            &c->grown,    &c->rest,
                            &c->q_grown,  &c->k_grown,
                            &c->k_rest,   &c->q_block,
                            &c->k_block,  &c->k_before,
                            &c->dq,       &c->dk,
                            &c->dq_grown, &c->dk_grown,
                            &c->dk_rest,  &c->dq_later,
                            &c->dk_later, &c->product,
                            &c->to_block, &c->grown_in_block,
                            &c->dk_sooner};
    float **const values[] = {&c->v, &c->U, &c->ks, &c->dO, &c->dU, &c->dV};
    float **const squares[] = {&c->qk, &c->kk, &c->decays, &c->R, &c->P, &c->dR, &c->dP};
    float **const numbers[] = {&c->q_factor, &c->k_factor, &c->beta, &c->dbeta};
    const struct {
        float **const *arrays;
        size_t count;
        int64_t floats; // of each
    } kinds[] = {{keys, sizeof keys / sizeof *keys, by_key},
                 {values, sizeof values / sizeof *values, by_value},
                 {squares, sizeof squares / sizeof *squares, square},
                 {numbers, sizeof numbers / sizeof *numbers, MT_CHUNK}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (size_t n = 0; n < kinds[k].count; n++, used += kinds[k].floats)
            if (scratch) *kinds[k].arrays[n] = scratch + used;
    c->dG = (double *)(void *)scratch;
    c->W = W;
    return used;
}

static mt_matrix mt_delta_rows(const float *rows, int64_t stride) {
    return (mt_matrix){.data = rows, .stride = stride};
}

/* unit[L, Dk] = x / length, times `scale`; of one head of q or k. */
static void mt_delta_load_unit(const mt_delta_chunk *c, float *unit, float *factors, const void *x, int64_t stride,
                               int64_t head, float scale) {
    int64_t Dk = c->a->Dk;
    for (int64_t t = 0; t < c->L; t++) {
        const float *in = mt_row_load(unit + t * Dk, x, (c->row + t) * stride + head * Dk, Dk, c->dtype);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < Dk; i++) sum += in[i] * in[i];
        factors[t] = 1 / sqrtf(sum + 1e-6f);
        for (int64_t i = 0; i < Dk; i++) unit[t * Dk + i] = in[i] * factors[t] * scale;
    }
}

/* Chunk n of a span: its queries and keys. */
static void mt_delta_load(mt_delta_chunk *c, const mt_span *span, int64_t n, int64_t key_head) {
    const mt_delta_args *a = c->a;
    c->row = span->q_start + n * MT_CHUNK, c->L = mt_min(MT_CHUNK, span->q_len - n * MT_CHUNK);
    mt_delta_load_unit(c, c->k, c->k_factor, a->k, a->k_stride, key_head, 1);
    mt_delta_load_unit(c, c->q, c->q_factor, a->q, a->q_stride, key_head, 1 / sqrtf((float)a->Dk));
    if (a->decays > 1) return;
    mt_matrix q = mt_delta_rows(c->q, a->Dk), k = mt_delta_rows(c->k, a->Dk);
    mt_matmul(c->kk, c->L, k, mt_transposed(k), c->L, c->L, a->Dk, false);
    mt_matmul(c->qk, c->L, q, mt_transposed(k), c->L, c->L, a->Dk, false);
}

/* x[L, width] of a head, of rows with `stride` elements, to rows of `to_width`. */
static void mt_delta_load_rows(const mt_delta_chunk *c, float *to, int64_t to_width, const void *x, int64_t stride,
                               int64_t head, int64_t width) {
    for (int64_t t = 0; t < c->L; t++) {
        const float *row = mt_row_load(to + t * to_width, x, (c->row + t) * stride + head * width, width, c->dtype);
        if (row != to + t * to_width) memcpy(to + t * to_width, row, (size_t)width * sizeof *row);
    }
}

/* The parameters of a value head: A_log, and dt_bias[decays] at `scratch` or where it is. */
static float mt_delta_parameters(const mt_delta_args *a, int64_t head, mt_dtype dtype, float *scratch,
                                 const float **dt_bias) {
    float A_log;
    *dt_bias = mt_row_load(scratch, a->dt_bias, head * a->decays, a->decays, dtype);
    return *mt_row_load(&A_log, a->A_log, head, 1, dtype);
}

/* g, G and their exponentials. */
static void mt_delta_load_decays(const mt_delta_chunk *c, int64_t head) {
    const mt_delta_args *a = c->a;
    int64_t D = a->decays, Dk = a->Dk, L = c->L;
    const float *dt_bias;
    float rate = expf(mt_delta_parameters(a, head, c->dtype, c->product, &dt_bias));
    mt_delta_load_rows(c, c->g, D, a->a, a->a_stride, head, D);
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < D; i++) {
            c->g[t * D + i] = -rate * mt_softplus(c->g[t * D + i] + dt_bias[i]);
            c->G[t * D + i] = c->g[t * D + i] + (t > 0 ? c->G[(t - 1) * D + i] : 0);
        }
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < Dk; i++) {
            bool same = D == 1 && i > 0; // as of the channel before
            c->grown[t * Dk + i] = same ? c->grown[t * Dk] : expf(c->G[t * D + i]);
            c->rest[t * Dk + i] = same ? c->rest[t * Dk] : expf(c->G[(L - 1) * D + i] - c->G[t * D + i]);
        }
}

/* Decays per channel, of a block of `rows` tokens from s = begin on: q_block, k_block of its tokens, k_before of those
 * before it. */
static void mt_delta_block(const mt_delta_chunk *c, int64_t begin, int64_t rows) {
    int64_t Dk = c->a->Dk;
    const float *first = c->G + begin * Dk;
    for (int64_t n = 0; n < rows * Dk; n++) {
        float decay = c->grown_in_block[n] = mt_exp(c->G[begin * Dk + n] - first[n % Dk]);
        c->q_block[n] = decay * c->q[begin * Dk + n], c->k_block[n] = decay * c->k[begin * Dk + n];
    }
    for (int64_t n = 0; n < begin * Dk; n++) {
        c->to_block[n] = mt_exp(first[n % Dk] - c->G[n]);
        c->k_before[n] = c->to_block[n] * c->k[n];
    }
}

/* R and P with a decay per channel: a block with the tokens before it, then within it. */
static void mt_delta_score_channels(const mt_delta_chunk *c) {
    int64_t L = c->L, Dk = c->a->Dk;
    memset(c->R, 0, (size_t)(L * L) * sizeof *c->R), memset(c->P, 0, (size_t)(L * L) * sizeof *c->P);
    for (int64_t begin = 0; begin < L; begin += MT_DELTA_BLOCK) {
        int64_t rows = mt_min(MT_DELTA_BLOCK, L - begin);
        mt_matrix q = mt_delta_rows(c->q_block, Dk), k = mt_delta_rows(c->k_block, Dk);
        mt_matrix before = mt_transposed(mt_delta_rows(c->k_before, Dk));
        mt_delta_block(c, begin, rows);
        if (begin > 0) {
            mt_matmul(c->P + begin * L, L, q, before, rows, begin, Dk, false);
            mt_matmul(c->R + begin * L, L, k, before, rows, begin, Dk, false);
        }
        for (int64_t t = begin; t < begin + rows; t++)
            for (int64_t i = begin; i <= t; i++) {
                float of_q = 0, of_k = 0;
#pragma omp simd reduction(+ : of_q, of_k)
                for (int64_t d = 0; d < Dk; d++) {
                    float key = mt_exp(c->G[t * Dk + d] - c->G[i * Dk + d]) * c->k[i * Dk + d];
                    of_q += c->q[t * Dk + d] * key, of_k += c->k[t * Dk + d] * key;
                }
                c->P[t * L + i] = of_q;
                if (i < t) c->R[t * L + i] = of_k;
            }
    }
}

/* R and P with one decay. */
static void mt_delta_score(const mt_delta_chunk *c) {
    int64_t L = c->L;
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < L; i++) {
            float decay = c->decays[t * L + i] = i <= t ? expf(c->G[t] - c->G[i]) : 0;
            c->P[t * L + i] = i <= t ? decay * c->qk[t * L + i] : 0;
            c->R[t * L + i] = i < t ? decay * c->kk[t * L + i] : 0;
        }
}

/* All that the chunk of a value head has but the state: V (with zeros for M), beta, decays, R, P, Q', K' and K". */
static void mt_delta_load_head(const mt_delta_chunk *c, int64_t head) {
    const mt_delta_args *a = c->a;
    int64_t L = c->L, Dv = a->Dv;
    mt_delta_load_rows(c, c->v, c->W, a->v, a->v_stride, head, Dv);
    for (int64_t t = 0; t < L && c->W > Dv; t++) memset(c->v + t * c->W + Dv, 0, (size_t)(c->W - Dv) * sizeof *c->v);
    mt_delta_load_rows(c, c->beta, 1, a->b, a->b_stride, head, 1);
    for (int64_t t = 0; t < L; t++) c->beta[t] = 1 / (1 + expf(-c->beta[t]));
    mt_delta_load_decays(c, head);
    (a->decays > 1 ? mt_delta_score_channels : mt_delta_score)(c);
    for (int64_t n = 0; n < L * a->Dk; n++) {
        c->q_grown[n] = c->grown[n] * c->q[n], c->k_grown[n] = c->grown[n] * c->k[n];
        c->k_rest[n] = c->rest[n] * c->k[n];
    }
}

/* U, from the state S before the chunk. */
static void mt_delta_solve(const mt_delta_chunk *c, const float *S) {
    int64_t L = c->L, Dk = c->a->Dk, W = c->W;
    mt_matmul(c->ks, W, mt_delta_rows(c->k_grown, Dk), mt_delta_rows(S, W), L, W, Dk, false);
    for (int64_t t = 0; t < L; t++) {
        float *U = c->U + t * W;
        for (int64_t i = 0; i < W; i++) U[i] = c->beta[t] * (c->v[t * W + i] - c->ks[t * W + i]);
        for (int64_t s = 0; s < t; s++) {
            float factor = c->beta[t] * c->R[t * L + s];
#pragma omp simd
            for (int64_t i = 0; i < W; i++) U[i] -= factor * c->U[s * W + i];
        }
    }
}

/* S becomes the state after the chunk. */
static void mt_delta_advance(const mt_delta_chunk *c, float *S) {
    int64_t L = c->L, Dk = c->a->Dk, W = c->W;
    for (int64_t i = 0; i < Dk; i++)
        for (int64_t j = 0; j < W; j++) S[i * W + j] *= c->grown[(L - 1) * Dk + i];
    mt_matmul(S, W, mt_transposed(mt_delta_rows(c->k_rest, Dk)), mt_delta_rows(c->U, W), Dk, W, L, true);
}

/* out of the chunk, from the state S before it. */
static void mt_delta_read(const mt_delta_chunk *c, int64_t head, const float *S) {
    int64_t L = c->L, Dk = c->a->Dk, Dv = c->a->Dv;
    float *out = c->ks; // read
    mt_matmul(out, Dv, mt_delta_rows(c->q_grown, Dk), mt_delta_rows(S, Dv), L, Dv, Dk, false);
    mt_matmul(out, Dv, mt_delta_rows(c->P, L), mt_delta_rows(c->U, Dv), L, Dv, L, true);
    for (int64_t t = 0; t < L; t++)
        mt_row_store(c->a->out, ((c->row + t) * c->a->Hv + head) * Dv, out + t * Dv, Dv, c->dtype);
}

static void mt_cpu_delta_rule_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->Hv / a->Hk, size = a->Dk * a->Dv;
    mt_scratch scratch = mt_scratch_reserve(mt_delta_place(&(mt_delta_chunk){0}, a, a->Dv, NULL) + heads * size);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < a->spans->count; s++)
        for (int64_t key_head = 0; key_head < a->Hk; key_head++) {
            const mt_span *span = &a->spans->host[s];
            mt_delta_chunk c = {.a = a, .dtype = dtype};
            float *slice = mt_scratch_slice(scratch), *own = slice + mt_delta_place(&c, a, a->Dv, slice);
            const float *before = mt_state_before(&a->states, a->spans, s, a->Hv * size);
            float *kept = mt_state_kept(&a->states, span, a->Hv * size),
                  *S = kept ? kept + key_head * heads * size : own;
            if (before) before += key_head * heads * size;
            if (!before) memset(S, 0, (size_t)(heads * size) * sizeof *S);
            if (before && before != S) memcpy(S, before, (size_t)(heads * size) * sizeof *S);
            for (int64_t n = 0; n < mt_divide_up(span->q_len, MT_CHUNK); n++) {
                mt_delta_load(&c, span, n, key_head);
                for (int64_t h = 0; h < heads; h++) {
                    mt_delta_load_head(&c, key_head * heads + h);
                    mt_delta_solve(&c, S + h * size);
                    mt_delta_read(&c, key_head * heads + h, S + h * size);
                    mt_delta_advance(&c, S + h * size);
                }
            }
        }
}

/* dU becomes dB, dV is set, and dS of the state after the chunk becomes that of the state before it: from dO, without
 * states. */
static void mt_delta_state_backward(const mt_delta_chunk *c, float *dS) {
    int64_t L = c->L, Dk = c->a->Dk, Dv = c->a->Dv;
    const mt_matrix dO = mt_delta_rows(c->dO, Dv), dstate = mt_delta_rows(dS, Dv);
    mt_matmul(c->dU, Dv, mt_delta_rows(c->k_rest, Dk), dstate, L, Dv, Dk, false);
    mt_matmul(c->dU, Dv, mt_transposed(mt_delta_rows(c->P, L)), dO, L, Dv, L, true);
    for (int64_t t = L - 1; t > 0; t--)
        for (int64_t s = 0; s < t; s++) {
            float factor = c->beta[t] * c->R[t * L + s];
#pragma omp simd
            for (int64_t i = 0; i < Dv; i++) c->dU[s * Dv + i] -= factor * c->dU[t * Dv + i];
        }
    for (int64_t i = 0; i < Dk; i++)
        for (int64_t j = 0; j < Dv; j++) dS[i * Dv + j] *= c->grown[(L - 1) * Dk + i];
    mt_matmul(dS, Dv, mt_transposed(mt_delta_rows(c->q_grown, Dk)), dO, Dk, Dv, L, true);
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < Dv; i++) c->dV[t * Dv + i] = -c->beta[t] * c->dU[t * Dv + i];
    mt_matmul(dS, Dv, mt_transposed(mt_delta_rows(c->k_grown, Dk)), mt_delta_rows(c->dV, Dv), Dk, Dv, L, true);
    for (int64_t i = 0; i < L * Dv; i++) c->dV[i] = -c->dV[i];
}

/* dq_later, dk_later and dk_sooner from dP and dR: of the queries and keys of tokens t, and of the keys of tokens i.
 * Adds to dG the same number once for t and once, negative, for i: the sums of dG from a token on need that. */
static void mt_delta_score_backward(const mt_delta_chunk *c) {
    int64_t L = c->L, Dk = c->a->Dk;
    const mt_matrix q = mt_delta_rows(c->q, Dk), k = mt_delta_rows(c->k, Dk);
    const mt_matrix dP = mt_delta_rows(c->dP, L), dR = mt_delta_rows(c->dR, L);
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < L; i++) {
            int64_t n = t * L + i;
            double of_G = (double)(c->dP[n] * c->P[n] + c->dR[n] * c->R[n]);
            c->dG[t * Dk] += of_G, c->dG[i * Dk] -= of_G;
            c->dP[n] *= c->decays[n], c->dR[n] *= c->decays[n];
        }
    mt_matmul(c->dq_later, Dk, dP, k, L, Dk, L, false);
    mt_matmul(c->dk_later, Dk, dR, k, L, Dk, L, false);
    mt_matmul(c->dk_sooner, Dk, mt_transposed(dP), q, L, Dk, L, false);
    mt_matmul(c->dk_sooner, Dk, mt_transposed(dR), k, L, Dk, L, true);
}

/* The same with a decay per channel. */
static void mt_delta_score_channels_backward(const mt_delta_chunk *c) {
    int64_t L = c->L, Dk = c->a->Dk;
    memset(c->dq_later, 0, (size_t)(L * Dk) * sizeof *c->dq_later);
    memset(c->dk_later, 0, (size_t)(L * Dk) * sizeof *c->dk_later);
    memset(c->dk_sooner, 0, (size_t)(L * Dk) * sizeof *c->dk_sooner);
    for (int64_t begin = 0; begin < L; begin += MT_DELTA_BLOCK) {
        int64_t rows = mt_min(MT_DELTA_BLOCK, L - begin);
        const mt_matrix before = mt_delta_rows(c->k_before, Dk);
        const mt_matrix dP = mt_delta_rows(c->dP + begin * L, L), dR = mt_delta_rows(c->dR + begin * L, L);
        mt_delta_block(c, begin, rows);
        if (begin > 0) {
            mt_matmul(c->dq_later + begin * Dk, Dk, dP, before, rows, Dk, begin, false);
            mt_matmul(c->dk_later + begin * Dk, Dk, dR, before, rows, Dk, begin, false);
            mt_matmul(c->product, Dk, mt_transposed(dP), mt_delta_rows(c->q_block, Dk), begin, Dk, rows, false);
            mt_matmul(c->product, Dk, mt_transposed(dR), mt_delta_rows(c->k_block, Dk), begin, Dk, rows, true);
        }
        for (int64_t n = 0; n < begin * Dk; n++) c->dk_sooner[n] += c->to_block[n] * c->product[n];
        for (int64_t n = 0; n < rows * Dk; n++) {
            c->dq_later[begin * Dk + n] *= c->grown_in_block[n];
            c->dk_later[begin * Dk + n] *= c->grown_in_block[n];
        }
        for (int64_t t = begin; t < begin + rows; t++)
            for (int64_t i = begin; i <= t; i++) {
                float of_P = c->dP[t * L + i], of_R = c->dR[t * L + i];
#pragma omp simd
                for (int64_t d = 0; d < Dk; d++) {
                    float decay = mt_exp(c->G[t * Dk + d] - c->G[i * Dk + d]), key = decay * c->k[i * Dk + d];
                    c->dq_later[t * Dk + d] += of_P * key, c->dk_later[t * Dk + d] += of_R * key;
                    c->dk_sooner[i * Dk + d] += decay * (of_P * c->q[t * Dk + d] + of_R * c->k[t * Dk + d]);
                }
            }
    }
    for (int64_t n = 0; n < L * Dk; n++)
        c->dG[n] += (double)(c->q[n] * c->dq_later[n] + c->k[n] * (c->dk_later[n] - c->dk_sooner[n]));
}

/* dS of the state after the chunk becomes that of the state S before it. Adds to dq and dk, sets dV, dbeta and dG. */
static void mt_delta_chunk_backward(const mt_delta_chunk *c, const float *S, float *dS) {
    int64_t L = c->L, Dk = c->a->Dk, Dv = c->a->Dv;
    bool by_channel = c->a->decays > 1;
    const mt_matrix state = mt_transposed(mt_delta_rows(S, Dv)), U = mt_transposed(mt_delta_rows(c->U, Dv));
    double *last = c->dG + (L - 1) * Dk;
    memset(c->dG, 0, (size_t)(L * Dk) * sizeof *c->dG);
    mt_matmul(c->dk_rest, Dk, mt_delta_rows(c->U, Dv), mt_transposed(mt_delta_rows(dS, Dv)), L, Dk, Dv, false);
    for (int64_t i = 0; i < Dk; i++)
        for (int64_t j = 0; j < Dv; j++)
            last[by_channel ? i : 0] += (double)(c->grown[(L - 1) * Dk + i] * S[i * Dv + j] * dS[i * Dv + j]);
    mt_delta_state_backward(c, dS);
    mt_matmul(c->dP, L, mt_delta_rows(c->dO, Dv), U, L, L, Dv, false);
    mt_matmul(c->dR, L, mt_delta_rows(c->dU, Dv), U, L, L, Dv, false);
    mt_matmul(c->dq_grown, Dk, mt_delta_rows(c->dO, Dv), state, L, Dk, Dv, false);
    mt_matmul(c->dk_grown, Dk, mt_delta_rows(c->dV, Dv), state, L, Dk, Dv, false); // negative
    for (int64_t t = 0; t < L; t++) {
        c->dbeta[t] = 0;
        for (int64_t i = 0; i < Dv; i++) c->dbeta[t] += c->dU[t * Dv + i] * (c->v[t * Dv + i] - c->ks[t * Dv + i]);
        for (int64_t i = 0; i < L; i++) {
            c->dbeta[t] -= i < t ? c->dR[t * L + i] * c->R[t * L + i] : 0;
            c->dR[t * L + i] = i < t ? -c->beta[t] * c->dR[t * L + i] : 0;
            if (i > t) c->dP[t * L + i] = 0;
        }
    }
    (by_channel ? mt_delta_score_channels_backward : mt_delta_score_backward)(c);
    for (int64_t t = 0; t < L; t++) {
        double grown = 0, rest = 0;
        for (int64_t i = 0, n = t * Dk; i < Dk; i++, n++) {
            double of_grown = (double)(c->q_grown[n] * c->dq_grown[n] - c->k_grown[n] * c->dk_grown[n]);
            double of_rest = (double)(c->k_rest[n] * c->dk_rest[n]);
            c->dq[n] += c->grown[n] * c->dq_grown[n] + c->dq_later[n];
            c->dk[n] += c->rest[n] * c->dk_rest[n] - c->grown[n] * c->dk_grown[n] + c->dk_later[n] + c->dk_sooner[n];
            if (by_channel) c->dG[n] += of_grown - of_rest, last[i] += of_rest;
            grown += of_grown, rest += of_rest;
        }
        if (!by_channel) c->dG[t * Dk] += grown - rest, last[0] += rest;
    }
}

/* Stores dv, db and da of a value head, and adds to the gradients of its parameters; da is made where g was. */
static void mt_delta_store_head(const mt_delta_chunk *c, int64_t head, float *dA_log, float *ddt_bias) {
    const mt_delta_args *a = c->a;
    int64_t D = a->decays, Dk = a->Dk, L = c->L;
    const float *dt_bias;
    float rate = expf(mt_delta_parameters(a, head, c->dtype, c->product, &dt_bias));
    mt_delta_load_rows(c, c->G, D, a->a, a->a_stride, head, D);
    for (int64_t i = 0; i < D; i++) {
        double dg = 0, of_A_log = 0, of_dt_bias = 0; // dg: the sum of dG from t on
        for (int64_t t = L - 1; t >= 0; t--) {
            dg += c->dG[t * Dk + i];
            of_A_log += dg * (double)c->g[t * D + i];
            c->g[t * D + i] = -rate / (1 + expf(-c->G[t * D + i] - dt_bias[i])) * (float)dg;
            of_dt_bias += (double)c->g[t * D + i];
        }
        *dA_log += (float)of_A_log, ddt_bias[i] += (float)of_dt_bias;
    }
    for (int64_t t = 0; t < L; t++) {
        float db = c->dbeta[t] * c->beta[t] * (1 - c->beta[t]);
        int64_t row = c->row + t;
        mt_row_store(a->da, row * a->da_stride + head * D, c->g + t * D, D, c->dtype);
        mt_row_store(a->db, row * a->db_stride + head, &db, 1, c->dtype);
        mt_row_store(a->dv, row * a->dv_stride + head * a->Dv, c->dV + t * a->Dv, a->Dv, c->dtype);
    }
}

/* dx of x / length times `scale`, from d, the gradient of the result, which is `unit`. */
static void mt_delta_store_unit(const mt_delta_chunk *c, void *dx, int64_t stride, const float *unit,
                                const float *factors, float *d, int64_t head, float scale) {
    int64_t Dk = c->a->Dk;
    for (int64_t t = 0; t < c->L; t++) {
        const float *u = unit + t * Dk;
        float dot = 0, *row = d + t * Dk;
        for (int64_t i = 0; i < Dk; i++) dot += u[i] * row[i];
        for (int64_t i = 0; i < Dk; i++) row[i] = factors[t] * (scale * row[i] - u[i] / scale * dot);
        mt_row_store(dx, (c->row + t) * stride + head * Dk, row, Dk, c->dtype);
    }
}

/* Of one key head of span s. states: [chunks, value heads of the key head, Dk, Dv]; dS: [value heads, Dk, Dv]. */
static void mt_delta_span_backward(mt_delta_chunk *c, int64_t s, int64_t key_head, float *states, float *dS,
                                   float *dA_log, float *ddt_bias) {
    const mt_delta_args *a = c->a;
    const mt_span *span = &a->spans->host[s];
    int64_t heads = a->Hv / a->Hk, size = a->Dk * a->Dv, chunks = mt_divide_up(span->q_len, MT_CHUNK);
    size_t bytes = (size_t)(heads * size) * sizeof *dS;
    const float *before = mt_state_before(&a->states, a->spans, s, a->Hv * size);
    const float *after = mt_dstate_after(&a->states, a->dstates, s, a->Hv * size);
    memset(states, 0, bytes), memset(dS, 0, bytes);
    if (before) memcpy(states, before + key_head * heads * size, bytes);
    if (after) memcpy(dS, after + key_head * heads * size, bytes);
    for (int64_t step = 0; step < 2 * chunks - 1; step++) { // the states before all chunks; then the chunks in reverse
        bool forward = step < chunks - 1;
        int64_t n = forward ? step : 2 * chunks - 2 - step;
        mt_delta_load(c, span, n, key_head);
        memset(c->dq, 0, (size_t)(c->L * a->Dk) * sizeof *c->dq);
        memset(c->dk, 0, (size_t)(c->L * a->Dk) * sizeof *c->dk);
        for (int64_t h = 0; h < heads; h++) {
            int64_t head = key_head * heads + h;
            float *S = states + (n * heads + h) * size, *next = S + heads * size;
            mt_delta_load_head(c, head);
            mt_delta_solve(c, S);
            if (forward) {
                memcpy(next, S, (size_t)size * sizeof *S);
                mt_delta_advance(c, next);
                continue;
            }
            mt_delta_load_rows(c, c->dO, a->Dv, a->dout, a->Hv * a->Dv, head, a->Dv);
            mt_delta_chunk_backward(c, S, dS + h * size);
            mt_delta_store_head(c, head, &dA_log[h], &ddt_bias[h * a->decays]);
        }
        if (forward) continue;
        mt_delta_store_unit(c, a->dq, a->dq_stride, c->q, c->q_factor, c->dq, key_head, 1 / sqrtf((float)a->Dk));
        mt_delta_store_unit(c, a->dk, a->dk_stride, c->k, c->k_factor, c->dk, key_head, 1);
    }
}

static void mt_cpu_delta_rule_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->Hv / a->Hk, size = a->Dk * a->Dv, decays = heads * a->decays;
    int64_t chunks = mt_divide_up(mt_spans_measure(a->spans).max_queries, MT_CHUNK);
    int64_t floats = mt_delta_place(&(mt_delta_chunk){0}, a, a->Dv, NULL) + heads * size * (chunks + 1);
    mt_scratch scratch = mt_scratch_reserve(floats + heads + decays);
#pragma omp parallel for schedule(dynamic)
    for (int64_t key_head = 0; key_head < a->Hk; key_head++) { // one thread adds all spans, in order
        mt_delta_chunk c = {.a = a, .dtype = dtype};
        float *slice = mt_scratch_slice(scratch), *dS = slice + mt_delta_place(&c, a, a->Dv, slice);
        float *dA_log = dS + heads * size;
        float *ddt_bias = dA_log + heads, *states = ddt_bias + decays;
        memset(dA_log, 0, (size_t)(heads + decays) * sizeof *dA_log);
        for (int64_t s = 0; s < a->spans->count; s++)
            mt_delta_span_backward(&c, s, key_head, states, dS, dA_log, ddt_bias);
        for (int64_t h = 0; h < heads && a->dA_log; h++) a->dA_log[key_head * heads + h] += dA_log[h];
        for (int64_t i = 0; i < decays && a->ddt_bias; i++) a->ddt_bias[key_head * decays + i] += ddt_bias[i];
    }
}

/* ---- the delta rule over the pieces of context parallelism */

static void mt_cpu_delta_rule_map_forward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->Hv / a->Hk, W = a->Dv + a->Dk;
    mt_scratch scratch = mt_scratch_reserve(mt_delta_place(&(mt_delta_chunk){0}, a, W, NULL));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t slot = 0; slot < a->states.slots; slot++)
        for (int64_t key_head = 0; key_head < a->Hk; key_head++) {
            if (a->states.last[slot] < 0) continue;
            const mt_span *span = &a->spans->host[a->states.last[slot]];
            mt_delta_chunk c = {.a = a, .dtype = dtype};
            mt_delta_place(&c, a, W, mt_scratch_slice(scratch));
            float *S = a->maps + (slot * a->Hv + key_head * heads) * a->Dk * W;
            memset(S, 0, (size_t)(heads * a->Dk * W) * sizeof *S);
            for (int64_t i = 0; i < heads * a->Dk && mt_state_crosses(&a->states, slot); i++)
                S[i * W + a->Dv + i % a->Dk] = 1;
            for (int64_t n = 0; n < mt_divide_up(span->q_len, MT_CHUNK); n++) {
                mt_delta_load(&c, span, n, key_head);
                for (int64_t h = 0; h < heads; h++) {
                    mt_delta_load_head(&c, key_head * heads + h);
                    mt_delta_solve(&c, S + h * a->Dk * W);
                    mt_delta_advance(&c, S + h * a->Dk * W);
                }
            }
        }
}

static void mt_cpu_delta_rule_map_backward(const mt_delta_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->Hv / a->Hk, size = a->Dk * a->Dv;
    mt_scratch scratch = mt_scratch_reserve(mt_delta_place(&(mt_delta_chunk){0}, a, a->Dv, NULL));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t slot = 0; slot < a->states.slots; slot++)
        for (int64_t key_head = 0; key_head < a->Hk; key_head++) {
            if (a->states.first[slot] < 0) continue;
            const mt_span *span = &a->spans->host[a->states.first[slot]];
            mt_delta_chunk c = {.a = a, .dtype = dtype};
            mt_delta_place(&c, a, a->Dv, mt_scratch_slice(scratch));
            float *dS = a->dmaps + (slot * a->Hv + key_head * heads) * size;
            memset(dS, 0, (size_t)(heads * size) * sizeof *dS);
            for (int64_t n = mt_divide_up(span->q_len, MT_CHUNK) - 1; n >= 0; n--) {
                mt_delta_load(&c, span, n, key_head);
                for (int64_t h = 0; h < heads; h++) {
                    int64_t head = key_head * heads + h;
                    mt_delta_load_head(&c, head);
                    mt_delta_load_rows(&c, c.dO, a->Dv, a->dout, a->Hv * a->Dv, head, a->Dv);
                    mt_delta_state_backward(&c, dS + h * size);
                }
            }
        }
}

static void mt_cpu_delta_rule_carry_forward(const mt_delta_args *a, const mt_carried_state *state, mt_dtype dtype,
                                            mt_stream *stream) {
    int64_t Dk = a->Dk, Dv = a->Dv, W = Dv + Dk;
    for (int64_t h = 0; h < a->Hv; h++) {
        const float *map = a->maps + (state->slot * a->Hv + h) * Dk * W;
        float *out = state->out + h * Dk * Dv;
        for (int64_t i = 0; i < Dk; i++) memcpy(out + i * Dv, map + i * W, (size_t)Dv * sizeof *out);
        if (!mt_state_crosses(&a->states, state->slot)) continue;
        mt_matmul(out, Dv, mt_delta_rows(map + Dv, W), mt_delta_rows(state->in + h * Dk * Dv, Dv), Dk, Dv, Dk, true);
    }
}

static void mt_cpu_delta_rule_carry_backward(const mt_delta_args *a, const mt_carried_state *state, mt_dtype dtype,
                                             mt_stream *stream) {
    int64_t Dk = a->Dk, Dv = a->Dv, W = Dv + Dk, size = a->Hv * Dk * Dv;
    memcpy(state->out, a->dmaps + state->slot * size, (size_t)size * sizeof *state->out);
    for (int64_t h = 0; h < a->Hv && mt_state_crosses(&a->states, state->slot); h++) {
        const mt_matrix map = mt_delta_rows(a->maps + (state->slot * a->Hv + h) * Dk * W + Dv, W);
        mt_matmul(state->out + h * Dk * Dv, Dv, mt_transposed(map), mt_delta_rows(state->in + h * Dk * Dv, Dv), Dk, Dv,
                  Dk, true);
    }
}

/* ---- products */

static void mt_cpu_scale_rows(void *x, float factor, int64_t T, int64_t C, int64_t stride, mt_dtype dtype,
                              mt_stream *stream) {
    mt_scratch scratch = mt_scratch_reserve(2 * C);
#pragma omp parallel for if (T * C > MT_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
        float *slice = mt_scratch_slice(scratch), *to = slice + C;
        const float *from = mt_row_load(slice, x, t * stride, C, dtype);
        for (int64_t i = 0; i < C; i++) to[i] = factor * from[i];
        mt_row_store(x, t * stride, to, C, dtype);
    }
}

static void mt_cpu_multiply_forward(const mt_multiply_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t C = a->C;
    mt_scratch scratch = mt_scratch_reserve(3 * C);
#pragma omp parallel for if (a->T * C > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch), *y = mt_row_open(slice + 2 * C, a->y, t * a->y_stride, dtype);
        const float *x = mt_row_load(slice, a->x, t * a->x_stride, C, dtype),
                    *z = mt_row_load(slice + C, a->z, t * a->z_stride, C, dtype);
        for (int64_t i = 0; i < C; i++) y[i] = x[i] * z[i];
        mt_row_close(a->y, t * a->y_stride, y, C, dtype);
    }
}

static void mt_cpu_multiply_backward(const mt_multiply_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t C = a->C;
    mt_scratch scratch = mt_scratch_reserve(5 * C);
#pragma omp parallel for if (a->T * C > MT_PARALLEL)
    for (int64_t t = 0; t < a->T; t++) {
        float *slice = mt_scratch_slice(scratch);
        const float *x = mt_row_load(slice, a->x, t * a->x_stride, C, dtype),
                    *z = mt_row_load(slice + C, a->z, t * a->z_stride, C, dtype),
                    *dy = mt_row_load(slice + 2 * C, a->dy, t * a->dy_stride, C, dtype);
        float *dx = mt_row_open(slice + 3 * C, a->dx, t * a->dx_stride, dtype),
              *dz = mt_row_open(slice + 4 * C, a->dz, t * a->dz_stride, dtype);
        for (int64_t i = 0; i < C; i++) dx[i] = dy[i] * z[i], dz[i] = dy[i] * x[i];
        mt_row_close(a->dx, t * a->dx_stride, dx, C, dtype);
        mt_row_close(a->dz, t * a->dz_stride, dz, C, dtype);
    }
}

/* ---- gates */

static void mt_cpu_gate_forward(const mt_gate_args *a, mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (a->n > MT_PARALLEL)
    for (int64_t block = 0; block < a->n; block += MT_BLOCK) {
        float x_scratch[MT_BLOCK], z_scratch[MT_BLOCK], y_scratch[MT_BLOCK];
        int64_t n = mt_min(MT_BLOCK, a->n - block);
        const float *x = mt_row_load(x_scratch, a->x, block, n, dtype),
                    *z = mt_row_load(z_scratch, a->z, block, n, dtype);
        float *y = mt_row_open(y_scratch, a->y, block, dtype);
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * mt_sigmoid(z[i]);
        mt_row_close(a->y, block, y, n, dtype);
    }
}

static void mt_cpu_gate_backward(const mt_gate_args *a, mt_dtype dtype, mt_stream *stream) {
#pragma omp parallel for if (a->n > MT_PARALLEL)
    for (int64_t block = 0; block < a->n; block += MT_BLOCK) {
        float scratch[3][MT_BLOCK], dx[MT_BLOCK], dz[MT_BLOCK];
        int64_t n = mt_min(MT_BLOCK, a->n - block);
        const float *x = mt_row_load(scratch[0], a->x, block, n, dtype),
                    *z = mt_row_load(scratch[1], a->z, block, n, dtype);
        const float *dy = mt_row_load(scratch[2], a->dy, block, n, dtype);
        for (int64_t i = 0; i < n; i++) {
            float open = mt_sigmoid(z[i]);
            dz[i] = dy[i] * x[i] * open * (1 - open), dx[i] = dy[i] * open;
        }
        mt_row_store(a->dz, block, dz, n, dtype);
        mt_row_store(a->dx, block, dx, n, dtype);
    }
}

/* ---- gated norm */

/* Where head h of token t lies in a gate with this distance between tokens; the head's first weight. */
static int64_t mt_gated_norm_at(const mt_gated_norm_args *a, int64_t row, int64_t stride) {
    return row / a->H * stride + row % a->H * a->D;
}
static int64_t mt_gated_norm_weight_at(const mt_gated_norm_args *a, int64_t row) {
    return a->weight_per_head ? row % a->H * a->D : 0;
}

static float mt_gated_norm_gate(const mt_gated_norm_args *a, float z) {
    return a->sigmoid ? mt_sigmoid(z) : mt_silu(1, z);
}
static float mt_gated_norm_slope(const mt_gated_norm_args *a, float z) {
    float s = mt_sigmoid(z);
    return a->sigmoid ? s * (1 - s) : mt_silu_slope(1, z);
}

static void mt_cpu_gated_norm_forward(const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t H = a->H, D = a->D;
    mt_scratch scratch = mt_scratch_reserve(5 * D);
#pragma omp parallel for if (a->T * H * D > MT_PARALLEL)
    for (int64_t r = 0; r < a->T * H; r++) {
        float *slice = mt_scratch_slice(scratch), *gated = slice + 4 * D, sum = 0;
        const float *x = mt_row_load(slice, a->x, r * D, D, dtype);
        const float *w = mt_row_load(slice + D, a->w, mt_gated_norm_weight_at(a, r), D, dtype);
        const float *z = mt_row_load(slice + 2 * D, a->z, mt_gated_norm_at(a, r, a->z_stride), D, dtype);
        float *y = mt_row_open(slice + 3 * D, a->y, r * D, dtype);
        for (int64_t c = 0; c < D && a->gate_first; c++) gated[c] = x[c] * mt_silu(1, z[c]);
        if (a->gate_first) x = gated;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < D; c++) sum += x[c] * x[c];
        float factor = a->rstd[r] = 1 / sqrtf(sum / (float)D + a->eps);
        for (int64_t c = 0; c < D; c++) y[c] = x[c] * factor * w[c] * (a->gate_first ? 1 : mt_gated_norm_gate(a, z[c]));
        mt_row_close(a->y, r * D, y, D, dtype);
    }
}

/* dw += sum over its rows of dy x rstd silu(z). Tasks are columns, so each sum has one order. */
static void mt_gated_norm_weight(const mt_gated_norm_args *a, mt_dtype dtype) {
    enum { COLUMNS = 16 };
    int64_t D = a->D, heads = a->weight_per_head ? a->H : 1;
#pragma omp parallel for collapse(2) if (a->T * a->H * D > MT_PARALLEL)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < D; c += COLUMNS) {
            float x_scratch[COLUMNS], z_scratch[COLUMNS], dy_scratch[COLUMNS], sums[COLUMNS] = {0};
            int64_t width = mt_min(COLUMNS, D - c);
            for (int64_t r = h; r < a->T * a->H; r += heads) {
                const float *x = mt_row_load(x_scratch, a->x, r * D + c, width, dtype);
                const float *z = mt_row_load(z_scratch, a->z, mt_gated_norm_at(a, r, a->z_stride) + c, width, dtype);
                const float *dy = mt_row_load(dy_scratch, a->dy, r * D + c, width, dtype);
                for (int64_t i = 0; i < width; i++) sums[i] += dy[i] * x[i] * a->rstd[r] * mt_gated_norm_gate(a, z[i]);
            }
            for (int64_t i = 0; i < width; i++) a->dw[h * D + c + i] += sums[i];
        }
}

/* With n = x rstd and g = dy w silu(z), dx = rstd (g - n mean(g n)). With the gate first, n = u rstd and g = dy w give
 * du, and dx = du silu(z), dz = du x silu'(z). */
static void mt_cpu_gated_norm_backward(const mt_gated_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t H = a->H, D = a->D;
    if (a->dw) mt_gated_norm_weight(a, dtype);
    mt_scratch scratch = mt_scratch_reserve(7 * D);
#pragma omp parallel for if (a->T * H * D > MT_PARALLEL)
    for (int64_t r = 0; r < a->T * H; r++) {
        float *slice = mt_scratch_slice(scratch), *g = slice + 6 * D, dot = 0, factor = a->rstd[r];
        int64_t z_row = mt_gated_norm_at(a, r, a->z_stride), dz_row = mt_gated_norm_at(a, r, a->dz_stride);
        const float *x = mt_row_load(slice, a->x, r * D, D, dtype);
        const float *w = mt_row_load(slice + D, a->w, mt_gated_norm_weight_at(a, r), D, dtype);
        const float *z = mt_row_load(slice + 2 * D, a->z, z_row, D, dtype);
        const float *dy = mt_row_load(slice + 3 * D, a->dy, r * D, D, dtype);
        float *dx = mt_row_open(slice + 4 * D, a->dx, r * D, dtype);
        float *dz = mt_row_open(slice + 5 * D, a->dz, dz_row, dtype);
        for (int64_t c = 0; c < D; c++) {
            float open = mt_gated_norm_gate(a, z[c]);
            g[c] = dy[c] * w[c] * (a->gate_first ? 1 : open);
            dot += g[c] * x[c] * (a->gate_first ? open : 1);
        }
        float projection = dot * factor * factor / (float)D;
        for (int64_t c = 0; c < D; c++) {
            float open = mt_gated_norm_gate(a, z[c]), slope = mt_gated_norm_slope(a, z[c]), value = x[c];
            if (a->gate_first) {
                float du = factor * (g[c] - value * open * projection);
                dx[c] = du * open, dz[c] = du * value * slope;
            } else {
                dz[c] = dy[c] * value * factor * w[c] * slope;
                dx[c] = factor * (g[c] - value * projection);
            }
        }
        mt_row_close(a->dx, r * D, dx, D, dtype);
        mt_row_close(a->dz, dz_row, dz, D, dtype);
    }
}
#pragma GCC diagnostic pop

/* ==== §17b the mixer ============================================================================================== */
/* Tensor-parallel ranks share the heads: each has the same share of q, k, v, z, b, a, of the taps and of the state, and
 * the output linear sums over the ranks. With fewer key heads than ranks, neighbours compute the same q and k, for
 * value heads of their own. Context-parallel ranks pass states: first the convolution's K - 1 tokens, then, when each
 * has computed the map of its own pieces, the states of the rule. The backward computes maps and passes states again,
 * so that no more is saved than on one rank: the convolution's backward reads the tokens before a piece, the rule's the
 * state before it, and gradients pass through the map. These pass from the last piece to the first. Cost: the map is as
 * much work as another forward of the rule; a state of Hv Dk Dv floats goes over 2 cp - 2 links one after another. */

static void mt_delta_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    mt_delta_sizes z = mt_delta_sizes_of(m);
    int64_t T = m->plan.max_tokens;
    (void)w;
    if (z.by_channel) {
        MT_SLOT(s, kda_f_a, m->max_rows, z.Dv, m->dtype);
        MT_SLOT(s, kda_g_a, m->max_rows, z.Dv, m->dtype);
        MT_SLOT(s, kda_f, T, z.Hv * z.Dk, m->dtype)->stash_of = offsetof(mt_layer, f_b);
        MT_SLOT(s, kda_g, T, z.Hv * z.Dv, m->dtype)->stash_of = offsetof(mt_layer, g_b);
    }
    MT_SLOT(s, delta_in, T, z.in, m->dtype)->stash_of = offsetof(mt_layer, delta_in);
    MT_SLOT(s, conv, T, z.conv, m->dtype);
    MT_SLOT(s, delta_out, T, z.Hv * z.Dv, m->dtype);
    MT_SLOT(s, delta_rstd, T, z.Hv, MT_F32);
    MT_SLOT(s, attended, T, z.Hv * z.Dv, m->dtype)->input = MT_OFFLOAD_ATTN_PROJ;
}

/* The operands that forward and backward share. In generation the layer's caches are the states, a slot a sequence. */

static mt_states mt_states_of(const mt_model *m, float *memory) {
    return (mt_states){.memory = memory, .slot_rows = mt_cache_slot_rows(&m->plan), .slots = mt_cache_slots(&m->plan)};
}

static mt_conv_args mt_delta_conv(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    mt_delta_sizes z = mt_delta_sizes_of(m);
    mt_conv_args conv = {.C = z.conv, .K = m->options->linear_conv_kernel_dim, .silu = true};
    conv.spans = p->context ? mt_context_pieces(p->context) : &p->spans;
    conv.x = a->delta_in, conv.x_stride = conv.dx_stride = z.in, conv.y = a->conv;
    conv.y_stride = conv.dy_stride = z.conv, conv.w = w->conv.w, conv.dw = w->conv.dw;
    if (p->decode) conv.states = mt_states_of(m, m->conv_states[w - m->layers]);
    if (p->context) conv.states = mt_context_states(p->context, m->scratch.conv_carry.states);
    return conv;
}

static mt_delta_args mt_delta_rule(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    mt_delta_sizes z = mt_delta_sizes_of(m);
    int64_t keys = z.Hk * z.Dk;
    mt_delta_args d = {.Hk = z.Hk, .Hv = z.Hv, .Dk = z.Dk, .Dv = z.Dv, .decays = 1, .out = a->delta_out};
    d.spans = p->context ? mt_context_pieces(p->context) : &p->spans;
    d.q = a->conv, d.k = mt_at(a->conv, keys, m->dtype), d.v = mt_at(a->conv, 2 * keys, m->dtype);
    d.b = mt_at(a->delta_in, z.b, m->dtype), d.a = mt_at(a->delta_in, z.b + z.Hv, m->dtype);
    d.q_stride = d.k_stride = d.v_stride = d.dq_stride = d.dk_stride = d.dv_stride = z.conv;
    d.b_stride = d.a_stride = d.db_stride = d.da_stride = z.in;
    if (z.by_channel) d.decays = z.Dk, d.a = a->kda_f, d.a_stride = d.da_stride = z.Hv * z.Dk;
    d.A_log = w->A_log.w, d.dt_bias = w->dt_bias.w, d.dA_log = w->A_log.dw, d.ddt_bias = w->dt_bias.dw;
    if (p->decode) d.states = mt_states_of(m, m->rule_states[w - m->layers]);
    if (!p->context) return d;
    d.states = mt_context_states(p->context, m->scratch.rule_carry.states);
    d.maps = m->scratch.rule_maps, d.dmaps = m->scratch.drule_maps;
    return d;
}

static mt_gated_norm_args mt_delta_norm(const mt_model *m, const mt_pass *p, const mt_layer *w,
                                        const mt_activations *a) {
    mt_delta_sizes z = mt_delta_sizes_of(m);
    mt_gated_norm_args n = {.T = p->T, .H = z.Hv, .D = z.Dv, .x = a->delta_out, .y = a->attended};
    n.z = mt_at(a->delta_in, z.conv, m->dtype), n.z_stride = n.dz_stride = z.in;
    if (z.by_channel) n.z = a->kda_g, n.z_stride = n.dz_stride = z.Hv * z.Dv, n.sigmoid = true;
    n.rstd = a->delta_rstd, n.w = w->delta_norm.w, n.dw = w->delta_norm.dw, n.eps = (float)m->options->norm_epsilon;
    return n;
}

/* Steps of context parallelism: see mt_context_carry. */

typedef struct mt_carry_call {
    const mt_model *m;
    const mt_pass *p;
    const void *args; // of the mixer's operations
} mt_carry_call;

static void mt_conv_carry_step(const void *call, const mt_carried_state *state, bool backward) {
    const mt_carry_call *c = call;
    const mt_ops *ops = c->m->ops;
    (backward ? ops->short_conv_carry_backward : ops->short_conv_carry_forward)(c->args, state, c->m->dtype,
                                                                                c->p->stream);
}

static void mt_conv_carry_states(mt_model *m, const mt_pass *p, const mt_conv_args *args, bool backward) {
    mt_carry *carry = &m->scratch.conv_carry;
    if (!p->context) return;
    mt_context_carry(p->context, carry, mt_conv_carry_step, &(mt_carry_call){m, p, args}, backward, p->stream);
}

static void mt_delta_carry_step(const void *call, const mt_carried_state *state, bool backward) {
    const mt_carry_call *c = call;
    const mt_ops *ops = c->m->ops;
    (backward ? ops->delta_rule_carry_backward : ops->delta_rule_carry_forward)(c->args, state, c->m->dtype,
                                                                                c->p->stream);
}

static void mt_delta_carry_states(mt_model *m, const mt_pass *p, const mt_delta_args *args, bool backward) {
    mt_carry *carry = &m->scratch.rule_carry;
    if (!p->context) return;
    (backward ? m->ops->delta_rule_map_backward : m->ops->delta_rule_map_forward)(args, m->dtype, p->stream);
    mt_context_carry(p->context, carry, mt_delta_carry_step, &(mt_carry_call){m, p, args}, backward, p->stream);
}

/* Kimi delta attention: decays and gates of the output, each by two products through a narrow middle, which the
 * tensor-parallel ranks compute for their rows, as latent attention its latents. */
static void mt_kda_gates_forward(const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x) {
    mt_layer_linear_forward(p, a, &w->f_a, x, a->kda_f_a);
    mt_layer_linear_forward(p, a, &w->f_b, a->kda_f_a, a->kda_f);
    mt_layer_linear_forward(p, a, &w->g_a, x, a->kda_g_a);
    mt_layer_linear_forward(p, a, &w->g_b, a->kda_g_a, a->kda_g);
}

/* Adds their gradient to the block's dx. The first products are never split: no slot could keep their dy, for x of the
 * second products lies where it would. */
static void mt_kda_gates_backward(const mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a,
                                  const mt_block_gradients *block) {
    const mt_layer_scratch *s = &m->scratch;
    mt_linear_io f_b = {.x = a->kda_f_a, .dy = s->ddecays, .dx = s->dlow};
    mt_layer_linear_backward(m, p, w, a, &w->f_b, offsetof(mt_activations, kda_f_a), &f_b);
    mt_linear_io f_a = {.x = block->x, .dy = s->dlow, .dx = s->dinput};
    mt_linear_backward(mt_linears(p), &w->f_a, &f_a, MT_BACKWARD_BOTH);
    mt_add_to(m, p, block->dx, s->dinput);
    mt_linear_io g_b = {.x = a->kda_g_a, .dy = s->dgates, .dx = s->dlow};
    mt_layer_linear_backward(m, p, w, a, &w->g_b, offsetof(mt_activations, kda_g_a), &g_b);
    mt_linear_io g_a = {.x = block->x, .dy = s->dlow, .dx = s->dinput};
    mt_linear_backward(mt_linears(p), &w->g_a, &g_a, MT_BACKWARD_BOTH);
    mt_add_to(m, p, block->dx, s->dinput);
}

/* out = mixer(x[R, C]). */
static void mt_delta_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                             void *out) {
    mt_conv_args conv = mt_delta_conv(m, p, w, a);
    mt_delta_args rule = mt_delta_rule(m, p, w, a);
    mt_gated_norm_args norm = mt_delta_norm(m, p, w, a);
    mt_layer_linear_forward(p, a, &w->delta_in, x, a->delta_in);
    if (w->kind.mixer == MT_MIXER_KDA) mt_kda_gates_forward(p, w, a, x);
    mt_conv_carry_states(m, p, &conv, false);
    m->ops->short_conv_forward(&conv, m->dtype, p->stream);
    mt_delta_carry_states(m, p, &rule, false);
    m->ops->delta_rule_forward(&rule, m->dtype, p->stream);
    m->ops->gated_norm_forward(&norm, m->dtype, p->stream);
    mt_layer_linear_forward(p, a, &w->o, a->attended, out);
}

/* scratch.dqkv: the gradient of delta_in. */
static mt_deferred mt_delta_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                     const mt_block_gradients *block) {
    mt_layer_scratch *s = &m->scratch;
    mt_delta_sizes z = mt_delta_sizes_of(m);
    mt_conv_args conv = mt_delta_conv(m, p, w, a);
    mt_delta_args rule = mt_delta_rule(m, p, w, a);
    mt_gated_norm_args norm = mt_delta_norm(m, p, w, a);
    int64_t keys = z.Hk * z.Dk;
    MT_CHECK(!block->left);
    mt_deferred out = mt_attention_out_backward(p, w, a, offsetof(mt_activations, attended), block->dout, s->dattended);
    norm.dy = s->dattended, norm.dx = s->ddelta, norm.dz = z.by_channel ? s->dgates : mt_at(s->dqkv, z.conv, m->dtype);
    m->ops->gated_norm_backward(&norm, m->dtype, p->stream);
    rule.dout = s->ddelta, rule.dq = s->dconv, rule.dk = mt_at(s->dconv, keys, m->dtype);
    rule.dv = mt_at(s->dconv, 2 * keys, m->dtype);
    rule.db = mt_at(s->dqkv, z.b, m->dtype);
    rule.da = z.by_channel ? s->ddecays : mt_at(s->dqkv, z.b + z.Hv, m->dtype);
    mt_conv_carry_states(m, p, &conv, false);
    mt_delta_carry_states(m, p, &rule, false);
    mt_delta_carry_states(m, p, &rule, true);
    if (p->context) rule.dstates = s->rule_carry.dstates;
    m->ops->delta_rule_backward(&rule, m->dtype, p->stream);
    conv.dy = s->dconv, conv.dx = s->dqkv;
    mt_conv_carry_states(m, p, &conv, true);
    if (p->context) conv.dstates = s->conv_carry.dstates;
    m->ops->short_conv_backward(&conv, m->dtype, p->stream);
    mt_linear_io in = {.x = block->x, .dy = s->dqkv, .dx = block->dx};
    mt_layer_linear_backward(m, p, w, a, &w->delta_in, block->x_field, &in);
    if (z.by_channel) mt_kda_gates_backward(m, p, w, a, block);
    return out;
}

/* ==== §17c the gated short convolution ============================================================================ */
/* LFM2's mixer: one product gives B, C and x of each channel; out = o(C conv(B x)). Tensor-parallel ranks share the
 * channels: each has the same share of B, C, x and the taps, and the output linear sums over the ranks. */

static void mt_short_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    int64_t T = m->plan.max_tokens, width = mt_short_channels(m);
    (void)w;
    MT_SLOT(s, short_in, T, 3 * width, m->dtype)->stash_of = offsetof(mt_layer, short_in);
    MT_SLOT(s, short_x, T, width, m->dtype);
    MT_SLOT(s, conv, T, width, m->dtype);
    MT_SLOT(s, attended, T, width, m->dtype)->input = MT_OFFLOAD_ATTN_PROJ;
}

/* The operands that forward and backward share: of B x, of the convolution, and of the product with C. */

static mt_multiply_args mt_short_enter(const mt_model *m, const mt_pass *p, const mt_activations *a) {
    int64_t width = mt_short_channels(m);
    mt_multiply_args product = {.T = p->T, .C = width, .x = mt_at(a->short_in, 2 * width, m->dtype), .z = a->short_in};
    product.x_stride = product.z_stride = product.dx_stride = product.dz_stride = 3 * width;
    product.y = a->short_x, product.y_stride = product.dy_stride = width;
    return product;
}

static mt_conv_args mt_short_conv(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    int64_t width = mt_short_channels(m);
    mt_conv_args conv = {.C = width, .K = m->options->linear_conv_kernel_dim};
    conv.spans = p->context ? mt_context_pieces(p->context) : &p->spans;
    conv.x = a->short_x, conv.y = a->conv, conv.w = w->conv.w, conv.dw = w->conv.dw;
    conv.x_stride = conv.y_stride = conv.dx_stride = conv.dy_stride = width;
    if (p->decode) conv.states = mt_states_of(m, m->conv_states[w - m->layers]);
    if (p->context) conv.states = mt_context_states(p->context, m->scratch.conv_carry.states);
    return conv;
}

static mt_multiply_args mt_short_leave(const mt_model *m, const mt_pass *p, const mt_activations *a) {
    int64_t width = mt_short_channels(m);
    mt_multiply_args product = {.T = p->T, .C = width, .x = a->conv, .z = mt_at(a->short_in, width, m->dtype)};
    product.x_stride = product.y_stride = product.dx_stride = product.dy_stride = width;
    product.z_stride = product.dz_stride = 3 * width, product.y = a->attended;
    return product;
}

/* out = mixer(x[R, C]). */
static void mt_short_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                             void *out) {
    mt_multiply_args enter = mt_short_enter(m, p, a), leave = mt_short_leave(m, p, a);
    mt_conv_args conv = mt_short_conv(m, p, w, a);
    mt_layer_linear_forward(p, a, &w->short_in, x, a->short_in);
    m->ops->multiply_forward(&enter, m->dtype, p->stream);
    mt_conv_carry_states(m, p, &conv, false);
    m->ops->short_conv_forward(&conv, m->dtype, p->stream);
    m->ops->multiply_forward(&leave, m->dtype, p->stream);
    mt_layer_linear_forward(p, a, &w->o, a->attended, out);
}

/* scratch.dqkv: the gradient of short_in. */
static mt_deferred mt_short_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                     const mt_block_gradients *block) {
    mt_layer_scratch *s = &m->scratch;
    int64_t width = mt_short_channels(m);
    mt_multiply_args enter = mt_short_enter(m, p, a), leave = mt_short_leave(m, p, a);
    mt_conv_args conv = mt_short_conv(m, p, w, a);
    MT_CHECK(!block->left);
    mt_deferred out = mt_attention_out_backward(p, w, a, offsetof(mt_activations, attended), block->dout, s->dattended);
    leave.dy = s->dattended, leave.dx = s->dconv, leave.dz = mt_at(s->dqkv, width, m->dtype);
    m->ops->multiply_backward(&leave, m->dtype, p->stream);
    conv.dy = s->dconv, conv.dx = s->dshort_x;
    mt_conv_carry_states(m, p, &conv, false);
    mt_conv_carry_states(m, p, &conv, true);
    if (p->context) conv.dstates = s->conv_carry.dstates;
    m->ops->short_conv_backward(&conv, m->dtype, p->stream);
    enter.dy = s->dshort_x, enter.dx = mt_at(s->dqkv, 2 * width, m->dtype), enter.dz = s->dqkv;
    m->ops->multiply_backward(&enter, m->dtype, p->stream);
    mt_linear_io in = {.x = block->x, .dy = s->dqkv, .dx = block->dx};
    mt_layer_linear_backward(m, p, w, a, &w->short_in, block->x_field, &in);
    return out;
}

/* ==== §18 Mamba-2 ================================================================================================= */
/* A mixer with a state of fixed size, as §17's, but without its rule of replacement (Dao & Gu, "Transformers are SSMs:
 * generalized models and efficient algorithms through structured state space duality"; Nemotron-H, Granite 4). One
 * product gives the gate z, x, B, C, and a number dt for each head. A short convolution mixes each channel of x, B and
 * C with the tokens just before it. Each head then has a matrix S[N, P]:
 *
 *   step = softplus(dt + dt_bias), cut to its range;   A = -exp(A_log)
 *   S_t = exp(step_t A) S_t-1 + step_t B_t x_t^T;      y_t = S_t^T C_t + D x_t
 *
 * The norm of a group's heads follows, of y silu(z). Invariant: a state begins with zeros at each span. */

/* ==== §18a its kernels ============================================================================================ */
/* The recurrence in chunks of L tokens. Let g_t = step_t A, G_t the sum of g from the chunk's first token to t, X_t =
 * step_t x_t, and S the state before the chunk. Unrolled,
 *
 *   y_t = e^G_t S^T C_t + sum over i <= t of M_ti X_i + D x_t,   M_ti = e^(G_t - G_i) C_t.B_i
 *   S'  = e^G_L S + sum over i of B'_i X_i^T,                    B'_i = e^(G_L - G_i) B_i
 *
 * This is attention with C as queries, B as keys and X as values, whose softmax is replaced by the factors e^(G_t -
 * G_i): the duality of the title. Backward, from dY and dS':
 *
 *   dX = M^T dY + B' dS';       dM = dY X^T, 0 above the diagonal;    dB' = X dS'^T
 *   dS = e^G_L dS' + C^T (e^G dY);                                    d(C S) = e^G dY
 *   d(C_t.B_i) = e^(G_t - G_i) dM_ti, which the heads of a group sum
 *   dG_t = sum over i of (dM_ti M_ti - dM_it M_it) + e^G_t dY_t.(S^T C_t) - B'_t.dB'_t
 *   dG_L also gets e^G_L <S, dS'> + sum over i of B'_i.dB'_i
 *   dg_t = sum of dG from t on;   dstep_t = A dg_t + dX_t.x_t;   dx_t = step_t dX_t + D dY_t
 *   dA_log = sum of dg_t g_t;     dD = sum of dY_t.x_t
 *
 * Factors e^(G_t - G_i) are products of e^g, row by row, which are exact where a sum of large g would cancel. The
 * backward computes the states before all chunks of a span again, then takes the chunks in reverse. A task is a group
 * with its heads.
 *
 * Context parallelism, as in §17a: over a piece the state S becomes S_local + e^G S, where G is the sum of g over the
 * piece, and the line for dS does not read S. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // streams
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wpass-failed" // as in §3
#endif

/* A chunk of one group, and of one of its heads at a time. Names as in the formulas above. */
typedef struct mt_ssd_chunk {
    const mt_ssd_args *a;
    mt_dtype dtype;
    int64_t row, L; // its first token, and its tokens
    float *B, *C;   // [L, N]
    float *CB;      // [L, L] C_t.B_i
    /* of the head */
    float *x, *X;          // [L, P]
    float *raw, *step, *g; // [L] dt + dt_bias, and what follows from it
    float *decays;         // [L, L] e^(G_t - G_i), 0 above the diagonal
    float *grown;          // [L] e^G_t
    float *M;              // [L, L], 0 above the diagonal
    float *B_last;         // [L, N] B'
    float *product;        // [L, P] y, or C S
    /* of the backward */
    float *dB, *dC, *dCB; // [L, N], [L, N], [L, L] sums over the heads
    float *dM;            // [L, L]
    float *dY, *dX;       // [L, P]; dX becomes dx
    float *dB_last;       // [L, N]
    float *dstep;         // [L]
    double *dG;           // [L] terms cancel in its sums
} mt_ssd_chunk;

/* The parameters of a head, and their gradients. */
typedef struct mt_ssd_head {
    float A_log, D, dt_bias;
    float dA_log, dD, ddt_bias;
} mt_ssd_head;

/* Lays the arrays of a chunk into scratch, dG first, and returns their floats; scratch NULL: only counts. */
static int64_t mt_ssd_place(mt_ssd_chunk *c, const mt_ssd_args *a, float *scratch) {
    const struct {
        float **array;
        int64_t floats; // of a token
    } arrays[] = {{&c->B, a->N},     {&c->C, a->N},       {&c->CB, MT_CHUNK},  {&c->x, a->P},
                  {&c->X, a->P},     {&c->raw, 1},        {&c->step, 1},       {&c->g, 1},
                  {&c->grown, 1},    {&c->dB_last, a->N}, {&c->dstep, 1},      {&c->decays, MT_CHUNK},
                  {&c->M, MT_CHUNK}, {&c->B_last, a->N},  {&c->product, a->P}, {&c->dB, a->N},
                  {&c->dC, a->N},    {&c->dY, a->P},      {&c->dX, a->P},      {&c->dCB, MT_CHUNK},
                  {&c->dM, MT_CHUNK}};
    int64_t used = 2 * MT_CHUNK;
    c->dG = (double *)(void *)scratch;
    for (size_t n = 0; n < sizeof arrays / sizeof *arrays; n++) {
        if (scratch) *arrays[n].array = scratch + used;
        used += MT_CHUNK * arrays[n].floats;
    }
    return used;
}

/* rows[L, width] = a head's or group's part of the chunk's tokens. */
static void mt_ssd_load_rows(const mt_ssd_chunk *c, float *rows, const void *x, int64_t stride, int64_t first,
                             int64_t width) {
    for (int64_t t = 0; t < c->L; t++) {
        const float *row = mt_row_load(rows + t * width, x, (c->row + t) * stride + first, width, c->dtype);
        if (row != rows + t * width) memcpy(rows + t * width, row, (size_t)width * sizeof *row);
    }
}

/* The chunk from token t of a span on: B and C of a group and their products. */
static void mt_ssd_load_group(mt_ssd_chunk *c, const mt_span *span, int64_t t, int64_t group) {
    const mt_ssd_args *a = c->a;
    c->row = span->q_start + t, c->L = mt_min(MT_CHUNK, span->q_len - t);
    mt_matrix B = {.data = c->B, .stride = a->N}, C = {.data = c->C, .stride = a->N};
    mt_ssd_load_rows(c, c->B, a->B, a->stride, group * a->N, a->N);
    mt_ssd_load_rows(c, c->C, a->C, a->stride, group * a->N, a->N);
    mt_matmul(c->CB, c->L, C, mt_transposed(B), c->L, c->L, a->N, false);
}

static mt_ssd_head mt_ssd_load_parameters(const mt_ssd_args *a, int64_t head, mt_dtype dtype) {
    float scratch[3];
    return (mt_ssd_head){.A_log = *mt_row_load(&scratch[0], a->A_log, head, 1, dtype),
                         .D = *mt_row_load(&scratch[1], a->D, head, 1, dtype),
                         .dt_bias = *mt_row_load(&scratch[2], a->dt_bias, head, 1, dtype)};
}

/* A step within its range; NaN stays NaN. */
static float mt_ssd_cut(const mt_ssd_args *a, float step) {
    return step < a->dt_min ? a->dt_min : step > a->dt_max ? a->dt_max : step;
}

/* x, the steps, the decays, M and B' of a head. */
static void mt_ssd_load_head(mt_ssd_chunk *c, int64_t head, const mt_ssd_head *w) {
    const mt_ssd_args *a = c->a;
    int64_t L = c->L;
    float A = -expf(w->A_log);
    mt_ssd_load_rows(c, c->x, a->x, a->stride, head * a->P, a->P);
    mt_ssd_load_rows(c, c->raw, a->dt, a->dt_stride, head, 1);
    for (int64_t t = 0; t < L; t++) {
        c->raw[t] += w->dt_bias;
        c->step[t] = mt_ssd_cut(a, mt_softplus(c->raw[t]));
        c->g[t] = c->step[t] * A;
        float *row = c->decays + t * L, factor = expf(c->g[t]);
        c->grown[t] = factor * (t > 0 ? c->grown[t - 1] : 1);
        for (int64_t i = 0; i < L; i++) row[i] = i < t ? row[i - L] * factor : i == t;
        for (int64_t i = 0; i < L; i++) c->M[t * L + i] = i <= t ? row[i] * c->CB[t * L + i] : 0;
        for (int64_t i = 0; i < a->P; i++) c->X[t * a->P + i] = c->step[t] * c->x[t * a->P + i];
    }
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < a->N; i++) c->B_last[t * a->N + i] = c->decays[(L - 1) * L + t] * c->B[t * a->N + i];
}

/* S becomes the state after the chunk. */
static void mt_ssd_advance(const mt_ssd_chunk *c, float *S) {
    int64_t N = c->a->N, P = c->a->P;
    for (int64_t i = 0; i < N * P; i++) S[i] *= c->grown[c->L - 1];
    mt_matmul(S, P, mt_transposed((mt_matrix){.data = c->B_last, .stride = N}), (mt_matrix){.data = c->X, .stride = P},
              N, P, c->L, true);
}

/* out of the chunk, from the state S before it. */
static void mt_ssd_read(const mt_ssd_chunk *c, int64_t head, const mt_ssd_head *w, const float *S) {
    int64_t L = c->L, N = c->a->N, P = c->a->P;
    float *out = c->product;
    mt_matmul(out, P, (mt_matrix){.data = c->C, .stride = N}, (mt_matrix){.data = S, .stride = P}, L, P, N, false);
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < P; i++) out[t * P + i] = c->grown[t] * out[t * P + i] + w->D * c->x[t * P + i];
    mt_matmul(out, P, (mt_matrix){.data = c->M, .stride = L}, (mt_matrix){.data = c->X, .stride = P}, L, P, L, true);
    for (int64_t t = 0; t < L; t++)
        mt_row_store(c->a->out, ((c->row + t) * c->a->H + head) * P, out + t * P, P, c->dtype);
}

static void mt_cpu_ssd_forward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->H / a->G, size = a->N * a->P;
    mt_scratch scratch = mt_scratch_reserve(mt_ssd_place(&(mt_ssd_chunk){0}, a, NULL) + heads * size);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < a->spans->count; s++)
        for (int64_t group = 0; group < a->G; group++) {
            const mt_span *span = &a->spans->host[s];
            mt_ssd_chunk c = {.a = a, .dtype = dtype};
            float *slice = mt_scratch_slice(scratch), *own = slice + mt_ssd_place(&c, a, slice);
            const float *before = mt_state_before(&a->states, a->spans, s, a->H * size);
            float *kept = mt_state_kept(&a->states, span, a->H * size), *S = kept ? kept + group * heads * size : own;
            if (before) before += group * heads * size;
            if (!before) memset(S, 0, (size_t)(heads * size) * sizeof *S);
            if (before && before != S) memcpy(S, before, (size_t)(heads * size) * sizeof *S);
            for (int64_t t = 0; t < span->q_len; t += c.L) {
                mt_ssd_load_group(&c, span, t, group);
                for (int64_t h = 0; h < heads; h++) {
                    int64_t head = group * heads + h;
                    mt_ssd_head w = mt_ssd_load_parameters(a, head, dtype);
                    mt_ssd_load_head(&c, head, &w);
                    mt_ssd_read(&c, head, &w, S + h * size);
                    mt_ssd_advance(&c, S + h * size);
                }
            }
        }
}

/* dS of the state after the chunk becomes that of the state before it. Sets product = e^G dY. */
static void mt_ssd_state_backward(const mt_ssd_chunk *c, float *dS) {
    int64_t L = c->L, N = c->a->N, P = c->a->P;
    const mt_matrix C = {.data = c->C, .stride = N}, product = {.data = c->product, .stride = P};
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i < P; i++) c->product[t * P + i] = c->grown[t] * c->dY[t * P + i];
    for (int64_t i = 0; i < N * P; i++) dS[i] *= c->grown[L - 1];
    mt_matmul(dS, P, mt_transposed(C), product, N, P, L, true);
}

/* dS of the state after the chunk becomes that of the state S before it. Sets dX and dG, adds to dB, dC and dCB. */
static void mt_ssd_chunk_backward(const mt_ssd_chunk *c, const float *S, float *dS) {
    int64_t L = c->L, N = c->a->N, P = c->a->P;
    const mt_matrix B_last = {.data = c->B_last, .stride = N}, C = {.data = c->C, .stride = N};
    const mt_matrix M = {.data = c->M, .stride = L}, X = {.data = c->X, .stride = P}, dY = {.data = c->dY, .stride = P};
    const mt_matrix state = {.data = S, .stride = P}, dstate = {.data = dS, .stride = P};
    const mt_matrix product = {.data = c->product, .stride = P};
    double sum = 0;
    memset(c->dG, 0, (size_t)L * sizeof *c->dG);
    /* S' = e^G_L S + B'^T X */
    mt_matmul(c->dX, P, B_last, dstate, L, P, N, false);
    mt_matmul(c->dB_last, N, X, mt_transposed(dstate), L, N, P, false);
    for (int64_t t = 0; t < L; t++) {
        float factor = c->decays[(L - 1) * L + t];
        double dot = 0;
        for (int64_t i = 0; i < N; i++) {
            dot += (double)(c->B_last[t * N + i] * c->dB_last[t * N + i]);
            c->dB[t * N + i] += factor * c->dB_last[t * N + i];
        }
        c->dG[t] -= dot, c->dG[L - 1] += dot;
    }
    for (int64_t i = 0; i < N * P; i++) sum += (double)(S[i] * dS[i]);
    c->dG[L - 1] += (double)c->grown[L - 1] * sum;
    /* Y = e^G C S + M X */
    mt_matmul(c->dM, L, dY, mt_transposed(X), L, L, P, false);
    mt_matmul(c->dX, P, mt_transposed(M), dY, L, P, L, true);
    mt_matmul(c->product, P, C, state, L, P, N, false);
    for (int64_t t = 0; t < L; t++) {
        double dot = 0;
        for (int64_t i = 0; i < P; i++) dot += (double)(c->dY[t * P + i] * c->product[t * P + i]);
        c->dG[t] += (double)c->grown[t] * dot;
    }
    mt_ssd_state_backward(c, dS);
    mt_matmul(c->dC, N, product, mt_transposed(state), L, N, P, true);
    for (int64_t t = 0; t < L; t++)
        for (int64_t i = 0; i <= t; i++) {
            float of_M = c->dM[t * L + i], both = of_M * c->M[t * L + i];
            c->dG[t] += (double)both, c->dG[i] -= (double)both;
            c->dCB[t * L + i] += of_M * c->decays[t * L + i];
        }
}

/* Stores dx and ddt of a head, and adds to the gradients of its parameters. */
static void mt_ssd_store_head(const mt_ssd_chunk *c, int64_t head, mt_ssd_head *w) {
    const mt_ssd_args *a = c->a;
    double dg = 0, dA_log = 0; // dg: the sum of dG from t on
    float A = -expf(w->A_log);
    for (int64_t t = c->L - 1; t >= 0; t--) {
        float *x = c->x + t * a->P, *dX = c->dX + t * a->P, *dY = c->dY + t * a->P, dstep, of_D = 0;
        dg += c->dG[t], dstep = A * (float)dg;
        for (int64_t i = 0; i < a->P; i++) {
            dstep += dX[i] * x[i], of_D += dY[i] * x[i];
            dX[i] = c->step[t] * dX[i] + w->D * dY[i];
        }
        float step = mt_softplus(c->raw[t]), ddt = dstep / (1 + expf(-c->raw[t]));
        if (step < a->dt_min || step > a->dt_max) ddt = 0;
        dA_log += dg * (double)c->g[t], w->dD += of_D, w->ddt_bias += ddt;
        mt_row_store(a->dx, (c->row + t) * a->dstride + head * a->P, dX, a->P, c->dtype);
        mt_row_store(a->ddt, (c->row + t) * a->ddt_stride + head, &ddt, 1, c->dtype);
    }
    w->dA_log += (float)dA_log;
}

/* Stores dB and dC of a group, from dCB and what its heads added. */
static void mt_ssd_store_group(const mt_ssd_chunk *c, int64_t group) {
    const mt_ssd_args *a = c->a;
    int64_t L = c->L, N = a->N;
    const mt_matrix B = {.data = c->B, .stride = N}, C = {.data = c->C, .stride = N};
    const mt_matrix dCB = {.data = c->dCB, .stride = L};
    mt_matmul(c->dC, N, dCB, B, L, N, L, true);
    mt_matmul(c->dB, N, mt_transposed(dCB), C, L, N, L, true);
    for (int64_t t = 0; t < L; t++) {
        int64_t to = (c->row + t) * a->dstride + group * N;
        mt_row_store(a->dB, to, c->dB + t * N, N, c->dtype);
        mt_row_store(a->dC, to, c->dC + t * N, N, c->dtype);
    }
}

/* Of one group of span s. states: [chunks, heads of the group, N, P]; dS: [heads, N, P]; w: [heads]. */
static void mt_ssd_span_backward(mt_ssd_chunk *c, int64_t s, int64_t group, float *states, float *dS, mt_ssd_head *w) {
    const mt_ssd_args *a = c->a;
    const mt_span *span = &a->spans->host[s];
    int64_t heads = a->H / a->G, size = a->N * a->P, chunks = mt_divide_up(span->q_len, MT_CHUNK);
    size_t bytes = (size_t)(heads * size) * sizeof *dS;
    const float *before = mt_state_before(&a->states, a->spans, s, a->H * size);
    const float *after = mt_dstate_after(&a->states, a->dstates, s, a->H * size);
    memset(states, 0, bytes), memset(dS, 0, bytes);
    if (before) memcpy(states, before + group * heads * size, bytes);
    if (after) memcpy(dS, after + group * heads * size, bytes);
    for (int64_t step = 0; step < 2 * chunks - 1; step++) { // the states before all chunks; then the chunks in reverse
        bool forward = step < chunks - 1;
        int64_t n = forward ? step : 2 * chunks - 2 - step;
        mt_ssd_load_group(c, span, n * MT_CHUNK, group);
        memset(c->dB, 0, (size_t)(c->L * a->N) * sizeof *c->dB);
        memset(c->dC, 0, (size_t)(c->L * a->N) * sizeof *c->dC);
        memset(c->dCB, 0, (size_t)(c->L * c->L) * sizeof *c->dCB);
        for (int64_t h = 0; h < heads; h++) {
            int64_t head = group * heads + h;
            float *S = states + (n * heads + h) * size, *next = S + heads * size;
            mt_ssd_load_head(c, head, &w[h]);
            if (forward) {
                memcpy(next, S, (size_t)size * sizeof *S);
                mt_ssd_advance(c, next);
                continue;
            }
            mt_ssd_load_rows(c, c->dY, a->dout, a->H * a->P, head * a->P, a->P);
            mt_ssd_chunk_backward(c, S, dS + h * size);
            mt_ssd_store_head(c, head, &w[h]);
        }
        if (!forward) mt_ssd_store_group(c, group);
    }
}

static void mt_cpu_ssd_backward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->H / a->G, size = a->N * a->P, of_head = (int64_t)(sizeof(mt_ssd_head) / sizeof(float));
    int64_t chunks = mt_divide_up(mt_spans_measure(a->spans).max_queries, MT_CHUNK);
    int64_t floats = mt_ssd_place(&(mt_ssd_chunk){0}, a, NULL) + heads * (size * (chunks + 1) + of_head);
    mt_scratch scratch = mt_scratch_reserve(floats);
#pragma omp parallel for schedule(dynamic)
    for (int64_t group = 0; group < a->G; group++) { // one thread adds all spans, in order
        mt_ssd_chunk c = {.a = a, .dtype = dtype};
        float *slice = mt_scratch_slice(scratch), *dS = slice + mt_ssd_place(&c, a, slice);
        mt_ssd_head *w = (mt_ssd_head *)(void *)(dS + heads * size);
        float *states = dS + heads * (size + of_head);
        for (int64_t h = 0; h < heads; h++) w[h] = mt_ssd_load_parameters(a, group * heads + h, dtype);
        for (int64_t s = 0; s < a->spans->count; s++) mt_ssd_span_backward(&c, s, group, states, dS, w);
        for (int64_t h = 0; h < heads; h++) {
            if (a->dA_log) a->dA_log[group * heads + h] += w[h].dA_log;
            if (a->dD) a->dD[group * heads + h] += w[h].dD;
            if (a->ddt_bias) a->ddt_bias[group * heads + h] += w[h].ddt_bias;
        }
    }
}

/* ---- the scan over the pieces of context parallelism */

static void mt_cpu_ssd_map_forward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->H / a->G, size = a->N * a->P;
    mt_scratch scratch = mt_scratch_reserve(mt_ssd_place(&(mt_ssd_chunk){0}, a, NULL));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t slot = 0; slot < a->states.slots; slot++)
        for (int64_t group = 0; group < a->G; group++) {
            if (a->states.last[slot] < 0) continue;
            const mt_span *span = &a->spans->host[a->states.last[slot]];
            mt_ssd_chunk c = {.a = a, .dtype = dtype};
            mt_ssd_place(&c, a, mt_scratch_slice(scratch));
            float *maps = a->maps + (slot * a->H + group * heads) * (size + 1);
            for (int64_t i = 0; i < heads * (size + 1); i++) maps[i] = i % (size + 1) == size;
            for (int64_t t = 0; t < span->q_len; t += c.L) {
                mt_ssd_load_group(&c, span, t, group);
                for (int64_t h = 0; h < heads; h++) {
                    float *map = maps + h * (size + 1);
                    mt_ssd_head w = mt_ssd_load_parameters(a, group * heads + h, dtype);
                    mt_ssd_load_head(&c, group * heads + h, &w);
                    mt_ssd_advance(&c, map);
                    map[size] *= c.grown[c.L - 1];
                }
            }
        }
}

static void mt_cpu_ssd_map_backward(const mt_ssd_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t heads = a->H / a->G, size = a->N * a->P;
    mt_scratch scratch = mt_scratch_reserve(mt_ssd_place(&(mt_ssd_chunk){0}, a, NULL));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t slot = 0; slot < a->states.slots; slot++)
        for (int64_t group = 0; group < a->G; group++) {
            if (a->states.first[slot] < 0) continue;
            const mt_span *span = &a->spans->host[a->states.first[slot]];
            mt_ssd_chunk c = {.a = a, .dtype = dtype};
            mt_ssd_place(&c, a, mt_scratch_slice(scratch));
            float *dS = a->dmaps + (slot * a->H + group * heads) * size;
            memset(dS, 0, (size_t)(heads * size) * sizeof *dS);
            for (int64_t n = mt_divide_up(span->q_len, MT_CHUNK) - 1; n >= 0; n--) {
                mt_ssd_load_group(&c, span, n * MT_CHUNK, group);
                for (int64_t h = 0; h < heads; h++) {
                    int64_t head = group * heads + h;
                    mt_ssd_head w = mt_ssd_load_parameters(a, head, dtype);
                    mt_ssd_load_head(&c, head, &w);
                    mt_ssd_load_rows(&c, c.dY, a->dout, a->H * a->P, head * a->P, a->P);
                    mt_ssd_state_backward(&c, dS + h * size);
                }
            }
        }
}

/* out = local + factor in, of all heads; `local` has `stride` elements between heads. */
static void mt_ssd_carry(const mt_ssd_args *a, const mt_carried_state *state, const float *local, int64_t stride) {
    int64_t size = a->N * a->P;
    bool crosses = mt_state_crosses(&a->states, state->slot);
    for (int64_t h = 0; h < a->H; h++) {
        const float *in = state->in + h * size, *own = local + h * stride;
        float *out = state->out + h * size, factor = a->maps[(state->slot * a->H + h) * (size + 1) + size];
        for (int64_t i = 0; i < size; i++) out[i] = own[i] + (crosses ? factor * in[i] : 0);
    }
}

static void mt_cpu_ssd_carry_forward(const mt_ssd_args *a, const mt_carried_state *state, mt_dtype dtype,
                                     mt_stream *stream) {
    int64_t size = a->N * a->P;
    mt_ssd_carry(a, state, a->maps + state->slot * a->H * (size + 1), size + 1);
}

static void mt_cpu_ssd_carry_backward(const mt_ssd_args *a, const mt_carried_state *state, mt_dtype dtype,
                                      mt_stream *stream) {
    int64_t size = a->N * a->P;
    mt_ssd_carry(a, state, a->dmaps + state->slot * a->H * size, size);
}
#pragma GCC diagnostic pop

/* ==== §18b the mixer ============================================================================================== */
/* Tensor-parallel ranks share the groups with their heads: each has the same share of z, x, B, C, dt, of the taps, the
 * norm and the state, and the output linear sums over the ranks. Context-parallel ranks pass states as in §17b; the
 * map of a head is its local state and one number, so it costs half of a forward. */

static void mt_mamba_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    mt_mamba_sizes z = mt_mamba_sizes_of(m);
    int64_t T = m->plan.max_tokens;
    (void)w;
    MT_SLOT(s, mamba_in, T, z.in, m->dtype)->stash_of = offsetof(mt_layer, mamba_in);
    MT_SLOT(s, conv, T, z.conv, m->dtype);
    MT_SLOT(s, mamba_out, T, z.inner, m->dtype);
    MT_SLOT(s, mamba_rstd, T, z.G, MT_F32);
    MT_SLOT(s, attended, T, z.inner, m->dtype)->input = MT_OFFLOAD_ATTN_PROJ;
}

/* The operands that forward and backward share. */

static mt_conv_args mt_mamba_conv(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    mt_mamba_sizes z = mt_mamba_sizes_of(m);
    mt_conv_args conv = {.C = z.conv, .K = m->options->linear_conv_kernel_dim, .silu = true};
    conv.spans = p->context ? mt_context_pieces(p->context) : &p->spans;
    conv.x = mt_at(a->mamba_in, z.inner, m->dtype), conv.x_stride = conv.dx_stride = z.in, conv.y = a->conv;
    conv.y_stride = conv.dy_stride = z.conv, conv.w = w->mamba_conv.w, conv.dw = w->mamba_conv.dw;
    conv.bias = w->mamba_conv_bias.w, conv.dbias = w->mamba_conv_bias.dw;
    if (p->decode) conv.states = mt_states_of(m, m->conv_states[w - m->layers]);
    if (p->context) conv.states = mt_context_states(p->context, m->scratch.conv_carry.states);
    return conv;
}

static mt_ssd_args mt_mamba_scan(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    const mt_options *o = m->options;
    mt_mamba_sizes z = mt_mamba_sizes_of(m);
    mt_ssd_args s = {.G = z.G, .H = z.H, .N = z.N, .P = z.P, .out = a->mamba_out};
    s.spans = p->context ? mt_context_pieces(p->context) : &p->spans;
    s.x = a->conv, s.B = mt_at(a->conv, z.inner, m->dtype), s.C = mt_at(a->conv, z.inner + z.G * z.N, m->dtype);
    s.dt = mt_at(a->mamba_in, z.inner + z.conv, m->dtype);
    s.stride = s.dstride = z.conv, s.dt_stride = s.ddt_stride = z.in;
    s.A_log = w->A_log.w, s.D = w->mamba_d.w, s.dt_bias = w->dt_bias.w;
    s.dA_log = w->A_log.dw, s.dD = w->mamba_d.dw, s.ddt_bias = w->dt_bias.dw;
    s.dt_min = (float)o->mamba_dt_limit_low;
    s.dt_max = o->mamba_dt_limit_high > 0 ? (float)o->mamba_dt_limit_high : INFINITY;
    if (p->decode) s.states = mt_states_of(m, m->rule_states[w - m->layers]);
    if (!p->context) return s;
    s.states = mt_context_states(p->context, m->scratch.rule_carry.states);
    s.maps = m->scratch.rule_maps, s.dmaps = m->scratch.drule_maps;
    return s;
}

static mt_gated_norm_args mt_mamba_norm(const mt_model *m, const mt_pass *p, const mt_layer *w,
                                        const mt_activations *a) {
    mt_mamba_sizes z = mt_mamba_sizes_of(m);
    mt_gated_norm_args n = {.T = p->T, .H = z.G, .D = z.inner / z.G, .x = a->mamba_out, .y = a->attended};
    n.z = a->mamba_in, n.z_stride = n.dz_stride = z.in, n.rstd = a->mamba_rstd;
    n.w = w->mamba_norm.w, n.dw = w->mamba_norm.dw, n.eps = (float)m->options->norm_epsilon;
    n.gate_first = n.weight_per_head = true;
    return n;
}

static void mt_mamba_carry_step(const void *call, const mt_carried_state *state, bool backward) {
    const mt_carry_call *c = call;
    const mt_ops *ops = c->m->ops;
    (backward ? ops->ssd_carry_backward : ops->ssd_carry_forward)(c->args, state, c->m->dtype, c->p->stream);
}

static void mt_mamba_carry_states(mt_model *m, const mt_pass *p, const mt_ssd_args *args, bool backward) {
    mt_carry *carry = &m->scratch.rule_carry;
    if (!p->context) return;
    (backward ? m->ops->ssd_map_backward : m->ops->ssd_map_forward)(args, m->dtype, p->stream);
    mt_context_carry(p->context, carry, mt_mamba_carry_step, &(mt_carry_call){m, p, args}, backward, p->stream);
}

/* out = mixer(x[R, C]). */
static void mt_mamba_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                             void *out) {
    mt_conv_args conv = mt_mamba_conv(m, p, w, a);
    mt_ssd_args scan = mt_mamba_scan(m, p, w, a);
    mt_gated_norm_args norm = mt_mamba_norm(m, p, w, a);
    mt_layer_linear_forward(p, a, &w->mamba_in, x, a->mamba_in);
    mt_conv_carry_states(m, p, &conv, false);
    m->ops->short_conv_forward(&conv, m->dtype, p->stream);
    mt_mamba_carry_states(m, p, &scan, false);
    m->ops->ssd_forward(&scan, m->dtype, p->stream);
    m->ops->gated_norm_forward(&norm, m->dtype, p->stream);
    mt_layer_linear_forward(p, a, &w->o, a->attended, out);
}

/* scratch.dqkv: the gradient of mamba_in. */
static mt_deferred mt_mamba_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                     const mt_block_gradients *block) {
    mt_layer_scratch *s = &m->scratch;
    mt_mamba_sizes z = mt_mamba_sizes_of(m);
    mt_conv_args conv = mt_mamba_conv(m, p, w, a);
    mt_ssd_args scan = mt_mamba_scan(m, p, w, a);
    mt_gated_norm_args norm = mt_mamba_norm(m, p, w, a);
    MT_CHECK(!block->left);
    mt_deferred out = mt_attention_out_backward(p, w, a, offsetof(mt_activations, attended), block->dout, s->dattended);
    norm.dy = s->dattended, norm.dx = s->ddelta, norm.dz = s->dqkv;
    m->ops->gated_norm_backward(&norm, m->dtype, p->stream);
    scan.dout = s->ddelta, scan.dx = s->dconv, scan.dB = mt_at(s->dconv, z.inner, m->dtype);
    scan.dC = mt_at(s->dconv, z.inner + z.G * z.N, m->dtype), scan.ddt = mt_at(s->dqkv, z.inner + z.conv, m->dtype);
    mt_conv_carry_states(m, p, &conv, false);
    mt_mamba_carry_states(m, p, &scan, false);
    mt_mamba_carry_states(m, p, &scan, true);
    if (p->context) scan.dstates = s->rule_carry.dstates;
    m->ops->ssd_backward(&scan, m->dtype, p->stream);
    conv.dy = s->dconv, conv.dx = mt_at(s->dqkv, z.inner, m->dtype);
    mt_conv_carry_states(m, p, &conv, true);
    if (p->context) conv.dstates = s->conv_carry.dstates;
    m->ops->short_conv_backward(&conv, m->dtype, p->stream);
    mt_linear_io in = {.x = block->x, .dy = s->dqkv, .dx = block->dx};
    mt_layer_linear_backward(m, p, w, a, &w->mamba_in, block->x_field, &in);
    return out;
}

/* ==== §19 sparse attention ======================================================================================== */
/* Latent attention in which each query attends to at most k keys (DeepSeek-AI, "DeepSeek-V3.2"). A small network, the
 * indexer, gives each pair of a query and a key a score: of few heads, narrow, with one key for all heads. Attention
 * over T keys costs T k products of wide heads in place of T^2 / 2; what still grows as T^2 is the indexer. The choice
 * of keys has no gradient, so the indexer has a loss of its own: the Kullback-Leibler divergence of attention's
 * probabilities, their mean over the heads, from the softmax of the scores. This loss reads the layer's input and the
 * latent of queries but sends them no gradient, and the loss of the model sends none to the indexer. Invariants: of
 * equal scores the earlier keys are selected, so that a choice depends on nothing but the scores that the query sees,
 * unless --dsa-indexer-ties is torch; a query that sees at most k keys attends to all. */

/* ==== §19a its kernels ============================================================================================ */
/* A query is a task. Its keys, all that it sees or a list of them, are gathered in blocks, wherever their pages
 * are, so that a query's numbers depend neither on pages nor on the other queries of the call. With scores
 * I_j = scale sum_h w_h max(q_h.k_j, 0), target p and softmax s of I, over the same keys, the loss of a query is
 *
 *   sum_j p_j (log p_j - log s_j),   dI_j = s_j - p_j
 *   dw_h = scale sum_j dI_j max(q_h.k_j, 0)
 *   dq_h = scale w_h sum_j dI_j [q_h.k_j > 0] k_j,   dk_j likewise, summed over heads and queries */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // streams
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wpass-failed" // as in §3
#endif

/* The span of query row t; NULL: none. */
static const mt_span *mt_span_of_query(const mt_spans *spans, int64_t t) {
    for (const mt_span *span = spans->host; span < spans->host + spans->count; span++)
        if (t >= span->q_start && t < span->q_start + span->q_len) return span;
    return NULL;
}

/* Keys that query row t of a span sees. */
static int64_t mt_keys_of_query(const mt_span *span, int64_t t) {
    int64_t begin, end;
    mt_span_keys(span, 0, t - span->q_start, &begin, &end);
    return end;
}

/* The most keys of any span. */
static int64_t mt_longest_keys(const mt_spans *spans) {
    int64_t longest = 0;
    for (const mt_span *span = spans->host; span < spans->host + spans->count; span++)
        longest = mt_max(longest, span->k_len);
    return longest;
}

/* Keys of one query: number j is listed[j] of the span, or without a list j. */
typedef struct mt_key_list {
    const mt_span *span;
    mt_pages pages;
    const int32_t *listed;
    int64_t count;
} mt_key_list;

/* rows[count, D] = columns [column, column + D) of x, of keys number first and on. */
static void mt_gather_keys(float *rows, const mt_key_list *keys, int64_t first, int64_t count, const void *x,
                           int64_t stride, int64_t column, int64_t D, mt_dtype dtype) {
    const mt_pages *pages = &keys->pages;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = keys->span->k_start + (keys->listed ? keys->listed[first + i] : first + i);
        if (pages->table) row = pages->table[row / pages->rows] * pages->rows + row % pages->rows;
        const float *from = mt_row_load(rows + i * D, x, row * stride + column, D, dtype);
        if (from != rows + i * D) memcpy(rows + i * D, from, (size_t)D * sizeof *rows);
    }
}

/* ---- the choice of keys */

/* The k-th greatest of x[n], which is reordered (Hoare, "Algorithm 65: find"). */
static float mt_kth_greatest(float *x, int64_t n, int64_t k) {
    for (int64_t low = 0, high = n - 1; low < high;) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            float other = x[i];
            x[i++] = x[j], x[j--] = other;
        }
        if (k - 1 > j && k - 1 < i) break;
        if (k - 1 <= j)
            high = j;
        else
            low = i;
    }
    return x[k - 1];
}

/* selected[k] = numbers of the k greatest of scores[n], ascending, then -1; of equal scores the first. scratch: [n]. */
static void mt_select_greatest(int32_t *selected, const float *scores, int64_t n, int64_t k, float *scratch) {
    float bound = -INFINITY;
    int64_t equal = k, count = 0; // equal: places for scores that are the bound
    if (n > k) {
        memcpy(scratch, scores, (size_t)n * sizeof *scores);
        bound = mt_kth_greatest(scratch, n, k);
        for (int64_t j = 0; j < n; j++) equal -= scores[j] > bound;
    }
    for (int64_t j = 0; j < n; j++)
        if (scores[j] > bound || (scores[j] == bound && equal-- > 0)) selected[count++] = (int32_t)j;
    while (count < k) selected[count++] = -1;
}

/* ---- the same with the ties of torch.topk, which on a CPU is std::nth_element of libstdc++: quickselect whose pivot
 * is the median of the second, the middle and the last element, and insertion sort of the last three. Which of equal
 * elements it leaves in front depends on all n of them, keys behind the query included. A model as small as those of
 * tests, whose few heads give many scores of exactly 0, has the outputs of transformers only so. For n < 64 k; beyond,
 * torch has another algorithm, and the first are selected. libstdc++ takes a heap after 2 log2(n) splits, and this
 * splits on: then the ties may be others. */

/* A score and its key. */
typedef struct mt_scored_key {
    float score;
    int32_t key;
} mt_scored_key;

static void mt_scored_swap(mt_scored_key *x, int64_t i, int64_t j) {
    mt_scored_key other = x[i];
    x[i] = x[j], x[j] = other;
}

/* Splits x[first, last) by a pivot, which moves to x[first]: greater ones come first. Returns the start of the rest. */
static int64_t mt_scored_split(mt_scored_key *x, int64_t first, int64_t last) {
    int64_t a = first + 1, b = first + (last - first) / 2, c = last - 1;
    float of_a = x[a].score, of_b = x[b].score, of_c = x[c].score;
    int64_t middle = of_a > of_b ? (of_b > of_c ? b : of_a > of_c ? c : a) : of_a > of_c ? a : of_b > of_c ? c : b;
    mt_scored_swap(x, first, middle);
    float pivot = x[first].score;
    for (int64_t i = first + 1, j = last;; i++) {
        while (x[i].score > pivot) i++;
        do j--;
        while (pivot > x[j].score);
        if (i >= j) return i;
        mt_scored_swap(x, i, j);
    }
}

/* selected[k] of scores[n], n > k, as mt_select_greatest; scores behind the query are -inf. scratch: [3 n]. */
static void mt_select_as_torch(int32_t *selected, const float *scores, int64_t n, int64_t k, float *scratch) {
    mt_scored_key *x = (mt_scored_key *)scratch;
    int64_t first = 0, last = n, count = 0;
    for (int64_t j = 0; j < n; j++) x[j] = (mt_scored_key){scores[j], (int32_t)j};
    while (last - first > 3) {
        int64_t cut = mt_scored_split(x, first, last);
        if (cut <= k - 1)
            first = cut;
        else
            last = cut;
    }
    for (int64_t i = first + 1; i < last; i++)
        for (int64_t j = i; j > first && x[j].score > x[j - 1].score; j--) mt_scored_swap(x, j, j - 1);
    bool *is_selected = (bool *)(x + n);
    for (int64_t j = 0; j < n; j++) is_selected[j] = false;
    for (int64_t i = 0; i < k; i++) is_selected[x[i].key] = true;
    for (int64_t j = 0; j < n; j++)
        if (is_selected[j]) selected[count++] = (int32_t)j;
}

/* ---- the indexer */

/* One query row of the indexer, as floats, with its keys; and memory for a block of keys. */
typedef struct mt_indexer_query {
    const mt_indexer_args *a;
    mt_dtype dtype;
    mt_key_list keys;
    const float *q, *weights; // [H, D], [H]
    float *k;                 // [MT_KEYS, D]
    float *products;          // [H, MT_KEYS]
    float *slopes;            // [H, MT_KEYS] gradients of products
} mt_indexer_query;

/* Floats of its memory. */
static int64_t mt_indexer_query_floats(const mt_indexer_args *a) {
    return a->H * a->D + a->H + MT_KEYS * a->D + 2 * a->H * MT_KEYS;
}

/* Opens query row t in scratch, with all keys that it sees, or those of mt_indexer_args.selected; without keys if it is
 * in no span. */
static mt_indexer_query mt_indexer_open(const mt_indexer_args *a, int64_t t, bool all, float *scratch, mt_dtype dtype) {
    int64_t row = t - a->first_row, H = a->H, D = a->D;
    mt_indexer_query query = {.a = a, .dtype = dtype};
    query.keys =
        (mt_key_list){mt_span_of_query(a->spans, t), a->pages, .listed = all ? NULL : a->selected + row * a->topk};
    query.q = mt_row_load(scratch, a->q, row * H * D, H * D, dtype);
    query.weights = mt_row_load(scratch + H * D, a->weights, row * H, H, dtype);
    query.k = scratch + H * D + H, query.products = query.k + MT_KEYS * D;
    query.slopes = query.products + H * MT_KEYS;
    if (!query.keys.span) return query;
    query.keys.count = mt_keys_of_query(query.keys.span, t);
    if (!all) query.keys.count = mt_min(query.keys.count, a->topk);
    return query;
}

/* query->k and query->products[H, columns] for keys number j0 and on. */
static void mt_indexer_products(const mt_indexer_query *query, int64_t j0, int64_t columns) {
    int64_t H = query->a->H, D = query->a->D;
    mt_gather_keys(query->k, &query->keys, j0, columns, query->a->k, D, 0, D, query->dtype);
    mt_matrix q = {query->q, D, false}, k = {query->k, D, true};
    mt_matmul(query->products, columns, q, k, H, columns, D, false);
}

/* scores[count] of its keys; what is not a number is the least. */
static void mt_indexer_scores(float *scores, const mt_indexer_query *query) {
    for (int64_t j0 = 0, columns; j0 < query->keys.count; j0 += columns) {
        columns = mt_min(MT_KEYS, query->keys.count - j0);
        mt_indexer_products(query, j0, columns);
        float *row = scores + j0;
        for (int64_t j = 0; j < columns; j++) row[j] = 0;
        for (int64_t h = 0; h < query->a->H; h++) {
            const float *products = query->products + h * columns;
            float weight = query->a->scale * query->weights[h];
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) row[j] += weight * (products[j] > 0 ? products[j] : 0);
        }
        for (int64_t j = 0; j < columns; j++)
            if (isnan(row[j])) row[j] = -INFINITY;
    }
}

static void mt_cpu_indexer_forward(const mt_indexer_args *a, mt_dtype dtype, mt_stream *stream) {
    int64_t longest = mt_max(a->longest, mt_longest_keys(a->spans));
    mt_scratch scratch = mt_scratch_reserve(mt_indexer_query_floats(a) + 4 * longest);
#pragma omp parallel for schedule(dynamic) if (a->rows * longest * a->H * a->D > MT_PARALLEL)
    for (int64_t row = 0; row < a->rows; row++) {
        float *scores = mt_scratch_slice(scratch), *copy = scores + longest;
        int32_t *selected = a->selected + row * a->topk;
        mt_indexer_query query = mt_indexer_open(a, a->first_row + row, true, copy + 3 * longest, dtype);
        int64_t seen = query.keys.count, all = query.keys.span ? query.keys.span->k_len : 0;
        if (query.keys.span && a->lengths) all = a->lengths[query.keys.span - a->spans->host];
        if (seen > a->topk) mt_indexer_scores(scores, &query);
        for (int64_t j = 0; j < seen && seen <= a->topk; j++) scores[j] = 0; // all are selected
        for (int64_t j = seen; j < all; j++) scores[j] = -INFINITY;
        if (seen > a->topk && a->ties == MT_TIES_TORCH && all < 64 * a->topk)
            mt_select_as_torch(selected, scores, all, a->topk, copy);
        else
            mt_select_greatest(selected, scores, seen, a->topk, copy);
    }
}

/* slopes[count] = coeff (s - p) from shares, p times their sum; returns the loss of the query. scores: [count]. */
static double mt_indexer_divergence(float *slopes, const float *shares, const float *scores, int64_t count,
                                    float coeff) {
    double total = 0, sum = 0, loss = 0;
    float max = mt_row_max(scores, count);
    for (int64_t j = 0; j < count; j++) {
        total += (double)shares[j];
        sum += exp((double)(scores[j] - max));
    }
    for (int64_t j = 0; j < count; j++) {
        double target = total > 0 ? (double)shares[j] / total : 0, log_share = (double)(scores[j] - max) - log(sum);
        if (target > 0) loss += target * (log(target) - log_share);
        slopes[j] = (float)((double)coeff * (exp(log_share) - target));
    }
    return loss;
}

/* query->slopes[H, columns] from those of the scores, after mt_indexer_products. */
static void mt_indexer_product_slopes(const mt_indexer_query *query, const float *slopes, int64_t columns) {
    for (int64_t h = 0; h < query->a->H; h++) {
        const float *products = query->products + h * columns;
        float *to = query->slopes + h * columns, weight = query->a->scale * query->weights[h];
        for (int64_t j = 0; j < columns; j++) to[j] = products[j] > 0 ? weight * slopes[j] : 0;
    }
}

/* dq and dweights of a query, from the slopes of its scores. */
static void mt_indexer_backward_query(const mt_indexer_query *query, const float *slopes, int64_t row, float *scratch) {
    const mt_indexer_args *a = query->a;
    int64_t H = a->H, D = a->D;
    float *dq = scratch, *dweights = dq + H * D;
    memset(scratch, 0, (size_t)(H * D + H) * sizeof *scratch);
    for (int64_t j0 = 0, columns; j0 < query->keys.count; j0 += columns) {
        columns = mt_min(MT_KEYS, query->keys.count - j0);
        mt_indexer_products(query, j0, columns);
        mt_indexer_product_slopes(query, slopes + j0, columns);
        mt_matmul(dq, D, (mt_matrix){query->slopes, columns, false}, (mt_matrix){query->k, D, false}, H, D, columns,
                  true);
        for (int64_t h = 0; h < H; h++)
            for (int64_t j = 0; j < columns; j++) {
                float product = query->products[h * columns + j];
                if (product > 0) dweights[h] += a->scale * slopes[j0 + j] * product;
            }
    }
    mt_row_store(a->dq, row * H * D, dq, H * D, query->dtype);
    mt_row_store(a->dweights, row * H, dweights, H, query->dtype);
}

/* Number of the first key of a query that is row k0 or later. */
static int64_t mt_first_key(const mt_key_list *keys, int64_t k0) {
    int64_t first = 0, end = keys->count;
    if (!keys->listed) return mt_max(0, mt_min(k0 - keys->span->k_start, end));
    while (first < end) {
        int64_t middle = (first + end) / 2;
        if (keys->span->k_start + keys->listed[middle] < k0)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

/* dk of key rows [k0, k0 + MT_KEYS) += that of a query. scratch: [MT_KEYS, D]. */
static void mt_indexer_backward_keys(const mt_indexer_query *query, const float *slopes, int64_t k0, float *scratch) {
    const mt_indexer_args *a = query->a;
    int64_t H = a->H, D = a->D, j0 = mt_first_key(&query->keys, k0);
    int64_t columns = mt_first_key(&query->keys, k0 + MT_KEYS) - j0;
    if (columns == 0) return;
    mt_indexer_products(query, j0, columns);
    mt_indexer_product_slopes(query, slopes + j0, columns);
    mt_matmul(scratch, D, (mt_matrix){query->slopes, columns, true}, (mt_matrix){query->q, D, false}, columns, D, H,
              false);
    for (int64_t j = 0; j < columns; j++) {
        int64_t key = query->keys.listed ? query->keys.listed[j0 + j] : j0 + j;
        float *to = a->dk + (query->keys.span->k_start + key) * D;
        for (int64_t c = 0; c < D; c++) to[c] += scratch[j * D + c];
    }
}

/* Two passes over the rows of the block that are of this rank: the owners of the first are queries, those of the second
 * blocks of key rows. */
static void mt_cpu_indexer_backward(const mt_indexer_args *a, mt_dtype dtype, mt_stream *stream) {
    enum { ROWS = 64 };
    int64_t begin = mt_max(a->block, a->first_row), HD = a->H * a->D;
    int64_t end = mt_min(a->block + a->block_rows, a->first_row + a->rows);
    int64_t floats = mt_indexer_query_floats(a), key_rows = 0;
    double losses[ROWS] = {0};
    bool counted[ROWS] = {false};
    mt_scratch scratch = mt_scratch_reserve(floats + mt_max(HD + a->H + a->width, MT_KEYS * a->D));
    MT_CHECK(a->block_rows <= ROWS);
#pragma omp parallel for schedule(dynamic) if ((end - begin) * a->width * HD > MT_PARALLEL)
    for (int64_t t = begin; t < end; t++) {
        float *slice = mt_scratch_slice(scratch), *sums = slice + floats, *scores = sums + HD + a->H;
        float *slopes = a->slopes + (t - a->block) * a->width;
        mt_indexer_query query = mt_indexer_open(a, t, a->all_keys, slice, dtype);
        int64_t count = query.keys.count;
        bool padding = mt_is_padding(a->token_index, t);
        for (int64_t j = 0; j < a->width; j++) slopes[j] = 0;
        if (!padding && count > 0) {
            mt_indexer_scores(scores, &query);
            losses[t - begin] =
                mt_indexer_divergence(slopes, a->shares + (t - a->block) * a->width, scores, count, a->coeff);
            counted[t - begin] = true;
        }
        mt_indexer_backward_query(&query, slopes, t - a->first_row, sums);
    }
    for (int64_t i = 0; i < end - begin; i++) a->sums[0] += losses[i], a->sums[1] += counted[i];
    for (int64_t s = 0; s < a->spans->count; s++)
        key_rows = mt_max(key_rows, a->spans->host[s].k_start + a->spans->host[s].k_len);
#pragma omp parallel for schedule(dynamic) if ((end - begin) * a->width * HD > MT_PARALLEL)
    for (int64_t k0 = 0; k0 < key_rows; k0 += MT_KEYS)
        for (int64_t t = begin; t < end; t++) {
            float *slice = mt_scratch_slice(scratch);
            if (!counted[t - begin]) continue;
            mt_indexer_query query = mt_indexer_open(a, t, a->all_keys, slice, dtype);
            mt_indexer_backward_keys(&query, a->slopes + (t - a->block) * a->width, k0, slice + floats);
        }
}

/* ---- attention over listed keys */

/* logits[count] = scale q.k of one query and head with its keys. k_block: [MT_KEYS, D]. */
static void mt_sparse_logits(float *logits, const mt_attention *call, const mt_key_list *keys, const float *q,
                             int64_t head, float *k_block, mt_dtype dtype) {
    int64_t D = call->head_size, group = head / (call->num_heads / call->num_groups);
    for (int64_t j0 = 0, columns; j0 < keys->count; j0 += columns) {
        columns = mt_min(MT_KEYS, keys->count - j0);
        mt_gather_keys(k_block, keys, j0, columns, call->k, call->k_stride, group * D, D, dtype);
        mt_matmul(logits + j0, columns, (mt_matrix){q, D, false}, (mt_matrix){k_block, D, true}, 1, columns, D, false);
    }
    for (int64_t j = 0; j < keys->count; j++) logits[j] *= call->scale;
}

/* x[count] = exp(x - max); returns max + log(sum), -inf without keys. */
static float mt_sparse_softmax(float *x, int64_t count) {
    float max = mt_row_max(x, count), sum = 0;
    if (count == 0) return -INFINITY;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; j++) {
        x[j] = mt_exp(x[j] - max);
        sum += x[j];
    }
    for (int64_t j = 0; j < count; j++) x[j] /= sum;
    return max + logf(sum);
}

/* x[count] times the factors of dropout of a query row, head and its keys: see mt_attention. */
static void mt_sparse_dropout(float *x, const mt_attention *call, const mt_key_list *keys, int64_t t, int64_t head) {
    uint64_t high = (uint64_t)(call->first_head + head) << 48;
    for (int64_t j = 0; j < keys->count && call->dropout.p > 0; j++) {
        float factor;
        int64_t key = keys->span->k_start + (keys->listed ? keys->listed[j] : j);
        mt_dropout_factors(&factor, 1, &call->dropout, (uint64_t)call->q_index[t], high, call->k_index[key]);
        x[j] *= factor;
    }
}

/* The selected keys of query row t. */
static mt_key_list mt_sparse_keys(const mt_sparse_attention *a, const mt_span *span, int64_t t) {
    return (mt_key_list){span, a->attention.pages, a->selected + t * a->topk,
                         mt_min(mt_keys_of_query(span, t), a->topk)};
}

static void mt_cpu_sparse_attention_forward(const mt_sparse_attention *a, mt_dtype dtype, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    int64_t D = call->head_size, Dv = call->value_size, H = call->num_heads, most = a->topk;
    int64_t block = MT_KEYS * mt_max(D, Dv), heads = H / call->num_groups;
    mt_scratch scratch = mt_scratch_reserve(D + Dv + block + most);
    for (const mt_span *span = call->spans.host; span < call->spans.host + call->spans.count; span++) {
#pragma omp parallel for schedule(dynamic) if (span->q_len * H * most * D > MT_PARALLEL)
        for (int64_t i = 0; i < span->q_len * H; i++) {
            int64_t t = span->q_start + i / H, head = i % H, offset = t * call->out_stride + head * Dv;
            float *slice = mt_scratch_slice(scratch), *sums = slice + D, *rows = sums + Dv, *p = rows + block;
            mt_key_list keys = mt_sparse_keys(a, span, t);
            const float *q = mt_row_load(slice, call->q, t * call->q_stride + head * D, D, dtype);
            mt_sparse_logits(p, call, &keys, q, head, rows, dtype);
            call->lse[t * H + head] = mt_sparse_softmax(p, keys.count);
            mt_sparse_dropout(p, call, &keys, t, head);
            memset(sums, 0, (size_t)Dv * sizeof *sums);
            for (int64_t j0 = 0, columns; j0 < keys.count; j0 += columns) {
                columns = mt_min(MT_KEYS, keys.count - j0);
                mt_gather_keys(rows, &keys, j0, columns, call->v, call->v_stride, head / heads * Dv, Dv, dtype);
                mt_matmul(sums, Dv, (mt_matrix){p + j0, columns, false}, (mt_matrix){rows, Dv, false}, 1, Dv, columns,
                          true);
            }
            mt_row_store(call->out, offset, sums, Dv, dtype);
        }
    }
}

/* The backward of one query and head: dq is written, dk_sums[k_len, D] and dv_sums[k_len, Dv] of its span grow. */
static void mt_sparse_backward_query(const mt_sparse_attention *a, const mt_span *span, int64_t t, int64_t head,
                                     float *dk_sums, float *dv_sums, float *scratch, mt_dtype dtype) {
    const mt_attention *call = &a->attention;
    int64_t D = call->head_size, Dv = call->value_size, group = head / (call->num_heads / call->num_groups);
    int64_t most = a->topk, q_at = t * call->q_stride + head * D, out_at = t * call->out_stride + head * Dv;
    mt_key_list keys = mt_sparse_keys(a, span, t);
    int64_t n = keys.count;
    float *dq = scratch, *k = dq + D, *v = k + most * D, *p = v + most * Dv, *ds = p + most, *row = ds + most, dot = 0;
    const float *q = mt_row_load(row, call->q, q_at, D, dtype);
    const float *out = mt_row_load(row + D, call->out, out_at, Dv, dtype);
    const float *dout = mt_row_load(row + D + Dv, call->dout, out_at, Dv, dtype);
    for (int64_t c = 0; c < Dv; c++) dot += out[c] * dout[c];
    mt_gather_keys(k, &keys, 0, n, call->k, call->k_stride, group * D, D, dtype);
    mt_gather_keys(v, &keys, 0, n, call->v, call->v_stride, group * Dv, Dv, dtype);
    mt_matmul(p, n, (mt_matrix){q, D, false}, (mt_matrix){k, D, true}, 1, n, D, false);
    mt_matmul(ds, n, (mt_matrix){dout, Dv, false}, (mt_matrix){v, Dv, true}, 1, n, Dv, false);
    mt_sparse_dropout(ds, call, &keys, t, head);
    float lse = call->lse[t * call->num_heads + head];
    for (int64_t j = 0; j < n; j++) {
        p[j] = mt_exp(p[j] * call->scale - lse);
        ds[j] = p[j] * (ds[j] - dot) * call->scale;
    }
    mt_sparse_dropout(p, call, &keys, t, head);
    memset(dq, 0, (size_t)D * sizeof *dq);
    for (int64_t j = 0; j < n; j++) {
        float *dk = dk_sums + keys.listed[j] * D, *dv = dv_sums + keys.listed[j] * Dv;
#pragma omp simd
        for (int64_t c = 0; c < D; c++) {
            dq[c] += ds[j] * k[j * D + c];
            dk[c] += ds[j] * q[c];
        }
#pragma omp simd
        for (int64_t c = 0; c < Dv; c++) dv[c] += p[j] * dout[c];
    }
    mt_row_store(call->dq, q_at, dq, D, dtype);
}

/* Number of the first span after `s` that has other keys: those of one sequence begin with the same key and are
 * adjacent. *k_len: the most keys of one of them. */
static int64_t mt_spans_of_sequence(const mt_spans *spans, int64_t s, int64_t *k_len) {
    const mt_span *first = &spans->host[s];
    for (*k_len = 0; s < spans->count && spans->host[s].k_start == first->k_start; s++)
        *k_len = mt_max(*k_len, spans->host[s].k_len);
    return s;
}

/* A task is a group of the spans of one sequence: it owns their dk and dv. */
static void mt_cpu_sparse_attention_backward(const mt_sparse_attention *a, mt_dtype dtype, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    int64_t D = call->head_size, Dv = call->value_size, heads = call->num_heads / call->num_groups;
    int64_t longest = mt_longest_keys(&call->spans), own = (a->topk + 1) * (D + Dv) + 2 * a->topk + D + Dv;
    mt_scratch scratch = mt_scratch_reserve(longest * (D + Dv) + own);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < call->spans.count; s++)
        for (int64_t group = 0; group < call->num_groups; group++) {
            const mt_span *span = &call->spans.host[s];
            int64_t k_len, end = mt_spans_of_sequence(&call->spans, s, &k_len);
            if (s > 0 && span[-1].k_start == span->k_start) continue; // of the task before
            float *dk = mt_scratch_slice(scratch), *dv = dk + k_len * D;
            memset(dk, 0, (size_t)(k_len * (D + Dv)) * sizeof *dk);
            for (const mt_span *part = span; part < call->spans.host + end; part++)
                for (int64_t t = part->q_start; t < part->q_start + part->q_len; t++)
                    for (int64_t head = group * heads; head < (group + 1) * heads; head++)
                        mt_sparse_backward_query(a, part, t, head, dk, dv, dv + k_len * Dv, dtype);
            for (int64_t j = 0; j < k_len; j++) {
                int64_t row = span->k_start + j;
                mt_row_store(call->dk, row * call->k_stride + group * D, dk + j * D, D, dtype);
                mt_row_store(call->dv, row * call->v_stride + group * Dv, dv + j * Dv, Dv, dtype);
            }
        }
}

static void mt_cpu_sparse_attention_shares(const mt_sparse_attention *a, mt_dtype dtype, mt_stream *stream) {
    const mt_attention *call = &a->attention;
    int64_t D = call->head_size, H = call->num_heads;
    mt_scratch scratch = mt_scratch_reserve(D + MT_KEYS * D + a->width);
#pragma omp parallel for schedule(dynamic) if (a->block_rows * a->width * H * D > MT_PARALLEL)
    for (int64_t t = a->block; t < a->block + a->block_rows; t++) {
        float *slice = mt_scratch_slice(scratch), *rows = slice + D, *p = rows + MT_KEYS * D;
        float *shares = a->shares + (t - a->block) * a->width;
        const mt_span *span = mt_span_of_query(&call->spans, t);
        for (int64_t j = 0; j < a->width; j++) shares[j] = 0;
        for (int64_t head = 0; span && head < H; head++) {
            mt_key_list keys = mt_sparse_keys(a, span, t);
            if (a->all_keys) keys.listed = NULL, keys.count = mt_keys_of_query(span, t);
            const float *q = mt_row_load(slice, call->q, t * call->q_stride + head * D, D, dtype);
            mt_sparse_logits(p, call, &keys, q, head, rows, dtype);
            mt_sparse_softmax(p, keys.count);
            for (int64_t j = 0; j < keys.count; j++) shares[j] += p[j];
        }
    }
}
#pragma GCC diagnostic pop

/* ==== §19b the mixer ============================================================================================== */
/* With sequence parallelism each tensor-parallel rank scores the queries of its rows against all keys, and the ranks
 * exchange the choices; else every rank scores all. All ranks then attend to the same keys with their heads. The target
 * of the indexer's loss is a mean over all heads, so the ranks sum it, for a block of queries at a time; the loss is
 * computed where its gradient is, in the backward. With context parallelism a rank gathers the indexer's keys, and k
 * and v, of all ranks, and sums their gradients. A layer that shares indices copies the choice of the layer before; its
 * copy is kept where its forward is computed again. */

static void mt_sparse_slots(const mt_model *m, mt_slots *s, const mt_layer *w) {
    int64_t R = m->max_rows, H = m->options->dsa_indexer_n_heads, D = m->options->dsa_indexer_head_dim;
    bool shares = w && w->kind.shares_indices, read_later = mt_has_indexer_loss(m);
    mt_latent_slots(m, s, w);
    MT_SLOT(s, selected, m->plan.max_tokens, mt_selected_keys(m), MT_I32)->once = shares;
    if (shares) return;
    MT_SLOT(s, indexer_q, R, H * D, m->dtype)->passing = !read_later;
    MT_SLOT(s, indexer_k_in, R, D, m->dtype)->passing = !read_later;
    MT_SLOT(s, indexer_k, R, D, m->dtype)->passing = !read_later;
    MT_SLOT(s, indexer_weights, R, H, m->dtype)->passing = !read_later;
    MT_SLOT(s, indexer_k_mean, R, 1, MT_F32)->passing = !read_later;
    MT_SLOT(s, indexer_k_rstd, R, 1, MT_F32)->passing = !read_later;
}

/* The operands that forward and backward share; of this rank's rows. */
static mt_indexer_args mt_indexer_call(const mt_model *m, const mt_pass *p, const mt_activations *a) {
    const mt_options *o = m->options;
    mt_indexer_args call = {.spans = &p->spans, .first_row = p->first_row, .rows = p->rows};
    call.H = o->dsa_indexer_n_heads, call.D = o->dsa_indexer_head_dim, call.topk = mt_selected_keys(m);
    call.scale = (float)(1 / sqrt((double)(call.H * call.D))), call.ties = o->dsa_indexer_ties;
    call.q = a->indexer_q, call.weights = a->indexer_weights, call.k = a->indexer_k;
    call.selected = a->selected + p->first_row * call.topk;
    if (p->context) {
        call.spans = &p->context->lists[0], call.lengths = p->context->lengths;
        call.longest = mt_min(p->context->N, m->plan.max_position);
    }
    return call;
}

static mt_norm_args mt_indexer_norm(const mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    const mt_norm *norm = &w->indexer_k_norm;
    mt_norm_args n = {.T = p->rows, .H = 1, .C = m->options->dsa_indexer_head_dim, .x = a->indexer_k_in};
    n.w = norm->weight.w, n.b = norm->bias.w, n.dw = norm->weight.dw, n.db = norm->bias.dw, n.y = a->indexer_k;
    n.mean = a->indexer_k_mean, n.rstd = a->indexer_k_rstd, n.eps = (float)m->options->dsa_indexer_k_norm_epsilon;
    n.w_offset = mt_norm_offset(m->options);
    return n;
}

/* RoPE of the first channels of H heads of the indexer, in place. */
static mt_rope_args mt_indexer_rope(const mt_model *m, const mt_pass *p, const mt_layer *w, void *x, int64_t H) {
    int64_t D = m->options->dsa_indexer_head_dim;
    mt_rope_args rope = {.T = p->rows, .H = H, .D = D, .x = x, .y = x, .x_stride = H * D, .y_stride = H * D};
    rope.rotation = mt_layer_rotation(m, p, w, p->first_row);
    rope.rotation.interleaved = m->options->dsa_indexer_rope_interleaved;
    return rope;
}

/* The indexer's keys of all rows. */
static const void *mt_indexer_all_keys(const mt_model *m, const mt_pass *p, const mt_activations *a) {
    const mt_layer_scratch *s = &m->scratch;
    int64_t D = m->options->dsa_indexer_head_dim;
    const void *keys = a->indexer_k;
    if (p->tp.sequence_parallel) {
        mt_all_gather_rows(&p->tp, s->indexer_keys, a->indexer_k, D, p->stream);
        keys = s->indexer_keys;
    }
    if (!p->context) return keys;
    mt_context_gather_rows(p->context, s->indexer_whole, s->indexer_by_rank, keys, D, p->stream);
    return s->indexer_whole;
}

/* a->selected from x[R, C] and the latent of queries. */
static void mt_indexer_select(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x) {
    int64_t D = m->options->dsa_indexer_head_dim, layer = w - m->layers;
    mt_norm_args norm = mt_indexer_norm(m, p, w, a);
    mt_rope_args q_rope = mt_indexer_rope(m, p, w, a->indexer_q, m->options->dsa_indexer_n_heads);
    mt_rope_args k_rope = mt_indexer_rope(m, p, w, a->indexer_k, 1);
    mt_layer_linear_forward(p, a, &w->indexer_q, a->q_latent, a->indexer_q);
    mt_layer_linear_forward(p, a, &w->indexer_k, x, a->indexer_k_in);
    mt_layer_linear_forward(p, a, &w->indexer_weights, x, a->indexer_weights);
    m->ops->layernorm_forward(&norm, m->dtype, p->stream);
    m->ops->rope_forward(&q_rope, m->dtype, p->stream);
    m->ops->rope_forward(&k_rope, m->dtype, p->stream);
    mt_indexer_args call = mt_indexer_call(m, p, a);
    if (p->decode) {
        m->ops->scatter_rows(&(mt_row_args){p->T, D, p->batch->cache_rows, .from = a->indexer_k,
                                            .to = m->indexer_cache[layer], .from_stride = D},
                             m->dtype, p->stream);
        call.k = m->indexer_cache[layer];
        if (m->plan.page_rows > 0)
            call.pages = (mt_pages){p->batch->pages, m->plan.page_rows, m->plan.cache_rows / m->plan.page_rows};
    } else {
        call.k = mt_indexer_all_keys(m, p, a);
    }
    m->ops->indexer_forward(&call, m->dtype, p->stream);
    if (p->tp.sequence_parallel)
        m->ops->all_gather(a->selected, call.selected, p->rows * call.topk, MT_I32, p->tp.group, p->stream);
}

/* a->selected, by the layer's indexer or from the layer before. */
static void mt_sparse_select(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x) {
    int64_t bytes = p->T * mt_selected_keys(m) * 4;
    if (!w->kind.shares_indices) {
        mt_indexer_select(m, p, w, a, x);
        if (m->options->dsa_indexer_topk_freq > 1)
            m->ops->memory_copy(m->scratch.selected, a->selected, bytes, p->stream);
    } else if (!p->replay) {
        m->ops->memory_copy(a->selected, m->scratch.selected, bytes, p->stream);
    }
}

static mt_sparse_attention mt_sparse_call(const mt_model *m, const mt_pass *p, const mt_layer *w,
                                          const mt_activations *a) {
    mt_attention call = mt_attention_call(m, p, w, a, mt_latent_view(m, p, a->q, a->kv));
    return (mt_sparse_attention){.attention = call, .selected = a->selected, .topk = mt_selected_keys(m)};
}

/* out = attention(x[R, C]). */
static void mt_sparse_forward(mt_model *m, const mt_pass *p, const mt_layer *w, mt_activations *a, const void *x,
                              void *out) {
    mt_latent_down_forward(m, p, w, a, x);
    mt_latent_up_forward(m, p, w, a, x);
    mt_sparse_select(m, p, w, a, x);
    mt_sparse_attention call = mt_sparse_call(m, p, w, a);
    if (p->decode) mt_cache_update(m, p, w, &call.attention, true);
    if (p->context) call = mt_context_sparse(p->context, &call, p->stream);
    m->ops->sparse_attention_forward(&call, m->dtype, p->stream);
    mt_layer_linear_forward(p, a, &w->o, a->attended, out);
}

/* scratch: gradients of the indexer's q, weights and keys, from its loss, which is counted. */
static void mt_indexer_loss(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a) {
    const mt_options *o = m->options;
    mt_layer_scratch *s = &m->scratch;
    int64_t D = o->dsa_indexer_head_dim;
    bool counts = p->tp.sequence_parallel || m->grid->tensor.rank == 0; // else all ranks compute the same
    mt_sparse_attention target = mt_sparse_call(m, p, w, a);
    mt_indexer_args loss = mt_indexer_call(m, p, a);
    int64_t keys = p->context ? p->context->N : p->T;
    if (p->context) target = mt_context_sparse(p->context, &target, p->stream);
    loss.k = mt_indexer_all_keys(m, p, a), loss.coeff = (float)o->dsa_indexer_loss_coeff * m->loss_scale;
    loss.token_index = p->batch->token_index, loss.sums = m->indexer_sums + (counts ? 0 : 2);
    loss.dq = s->dindexer_q, loss.dweights = s->dindexer_weights, loss.dk = s->dindexer_keys;
    loss.shares = target.shares = s->shares, loss.slopes = s->slopes;
    loss.all_keys = target.all_keys = !o->dsa_indexer_use_sparse_loss;
    loss.width = target.width = loss.all_keys ? mt_min(keys, m->plan.max_position) : loss.topk;
    m->ops->memory_zero(s->dindexer_keys, keys * D * 4, p->stream);
    for (int64_t row = 0; row < p->T; row += MT_INDEXER_ROWS) {
        loss.block = target.block = row;
        loss.block_rows = target.block_rows = mt_min(MT_INDEXER_ROWS, p->T - row);
        m->ops->sparse_attention_shares(&target, m->dtype, p->stream);
        m->ops->all_reduce(s->shares, loss.block_rows * loss.width, MT_SUM, MT_F32, &m->grid->tensor, p->stream);
        m->ops->indexer_backward(&loss, m->dtype, p->stream);
    }
    float *dk = s->dindexer_keys;
    if (p->context) {
        mt_context_sum_rows(p->context, s->dindexer_local, s->indexer_by_rank, dk, D, p->stream);
        dk = s->dindexer_local;
    }
    if (p->tp.sequence_parallel) {
        m->ops->reduce_scatter(s->dindexer_own, dk, p->rows * D, MT_F32, p->tp.group, p->stream);
        dk = s->dindexer_own;
    }
    m->ops->convert(s->dindexer_k, m->dtype, dk, MT_F32, p->rows * D, p->stream);
}

/* Gradients of the indexer's parameters. */
static void mt_indexer_backward(mt_model *m, const mt_pass *p, const mt_layer *w, const mt_activations *a,
                                const void *x) {
    mt_layer_scratch *s = &m->scratch;
    mt_norm_args norm = mt_indexer_norm(m, p, w, a);
    mt_rope_args q_rope = mt_indexer_rope(m, p, w, s->dindexer_q, m->options->dsa_indexer_n_heads);
    mt_rope_args k_rope = mt_indexer_rope(m, p, w, s->dindexer_k, 1);
    mt_indexer_loss(m, p, w, a);
    m->ops->rope_backward(&q_rope, m->dtype, p->stream);
    m->ops->rope_backward(&k_rope, m->dtype, p->stream);
    norm.dy = s->dindexer_k, norm.dx = s->dindexer_k_in;
    m->ops->layernorm_backward(&norm, m->dtype, p->stream);
    mt_linear_backward_weight(mt_linears(p), &w->indexer_q, &(mt_linear_io){.x = a->q_latent, .dy = s->dindexer_q});
    mt_linear_backward_weight(mt_linears(p), &w->indexer_k, &(mt_linear_io){.x = x, .dy = s->dindexer_k_in});
    mt_linear_backward_weight(mt_linears(p), &w->indexer_weights, &(mt_linear_io){.x = x, .dy = s->dindexer_weights});
}

/* Without its loss the indexer has gradients of 0, which no product writes. */
static void mt_indexer_zero_gradients(const mt_model *m, const mt_pass *p, const mt_layer *w) {
    const mt_linear *linears[] = {&w->indexer_q, &w->indexer_k, &w->indexer_weights};
    for (int i = 0; i < 3; i++) {
        const mt_weight *weight = &linears[i]->weight;
        if (!weight->dw || (weight->has_gradient && *weight->has_gradient)) continue;
        m->ops->memory_zero(weight->dw, linears[i]->N * linears[i]->K * 4, p->stream);
        if (weight->has_gradient) *weight->has_gradient = true;
    }
}

static mt_deferred mt_sparse_backward(mt_model *m, const mt_pass *p, mt_layer *w, mt_activations *a,
                                      const mt_block_gradients *block) {
    void *dattended = m->scratch.dattended, *dq = m->scratch.dqkv;
    mt_qkv_view d = mt_latent_view(m, p, dq, mt_at(dq, p->T * m->H * m->D, m->dtype));
    mt_sparse_attention call = mt_sparse_call(m, p, w, a);
    MT_CHECK(!block->left);
    mt_deferred out = mt_attention_out_backward(p, w, a, offsetof(mt_activations, attended), block->dout, dattended);
    call.attention.dq = d.q, call.attention.dk = d.k, call.attention.dv = d.v, call.attention.dout = dattended;
    call.attention.row_dot = m->scratch.row_dot;
    if (p->context)
        mt_context_sparse_backward(p->context, &call, p->stream);
    else
        m->ops->sparse_attention_backward(&call, m->dtype, p->stream);
    if (!w->kind.shares_indices) {
        if (mt_has_indexer_loss(m))
            mt_indexer_backward(m, p, w, a, block->x);
        else
            mt_indexer_zero_gradients(m, p, w);
    }
    mt_latent_qkv_backward(m, p, w, a, d, block);
    return out;
}
