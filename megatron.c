/* megatron.c: trains and runs GPT-family transformers.
 *
 * Contents
 *   §1   checks, arenas, random numbers
 *   §2   options and their only validator
 *   §3   kernels in plain C
 *   §4   the rank grid and its groups
 *   §5   collectives
 *   §8   the parameter table
 *   §9   attention, MLP, layer
 *   §9a  rotary tables
 *   §9b  attention
 *   §9c  MLP
 *   §9d  layer
 *   §10  the model
 *   §10a memory
 *   §10b creation
 *   §10c forward and backward
 *   §11  schedules
 *   §12  gradient buckets
 *   §13  optimizer
 *   §14  checkpoints and Hugging Face
 *   §15  generation
 *   §16  the training step
 *   §16b reports
 */
#include "megatron.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>
#ifdef MT_HAVE_BLAS
#include <cblas.h>
#endif
#ifdef MT_HAVE_MPI
#include <mpi.h>
#endif
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#endif
#ifdef MT_HAVE_YAML
#include <yaml.h>
#endif

/* ==== §1 checks, arenas, random numbers ========================================================================== */
/* What everything else stands on. Invariants: library code never exits on the user's input, memory is asked for here
 * and nowhere else, and a random number is a pure function of what it is for. */

int mt_error_set(mt_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return -1;
}

void mt_die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fprintf(stderr, "error: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
#ifdef MT_HAVE_MPI
    int started = 0;
    MPI_Initialized(&started);
    if (started) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
    exit(1);
}

void *mt_malloc(int64_t bytes) {
    void *memory = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: %lld bytes were asked for", (long long)bytes);
    return memory;
}

void *mt_calloc(int64_t bytes) {
    void *memory = calloc(1, bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: %lld bytes were asked for", (long long)bytes);
    return memory;
}

void *mt_realloc(void *memory, int64_t bytes) {
    memory = realloc(memory, bytes > 0 ? (size_t)bytes : 1);
    if (!memory) mt_die("out of memory: %lld bytes were asked for", (long long)bytes);
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
    [MT_BOOL] = {"BOOL", 1}, [MT_F8_E4M3] = {"F8_E4M3", 1}, [MT_F8_E5M2] = {"F8_E5M2", 1},
};

int64_t mt_dtype_size(mt_dtype dtype) {
    return mt_dtypes[dtype].size;
}

const char *mt_dtype_name(mt_dtype dtype) {
    return mt_dtypes[dtype].name;
}

int mt_dtype_parse(const char *name) {
    for (int dtype = 0; dtype < MT_NUM_DTYPES; dtype++)
        if (strcmp(name, mt_dtypes[dtype].name) == 0) return dtype;
    return -1;
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
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                      : exponent == 0 ? ldexpf((float)mantissa, -24)
                                      : ldexpf((float)(mantissa + 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

uint16_t mt_f32_to_f16(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float magnitude = fabsf(value);
    if (isnan(value)) return sign | 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00; // rounds to more than the largest half, 65504
    int exponent;
    frexpf(magnitude, &exponent);                         // magnitude in [2^(exponent-1), 2^exponent)
    if (magnitude == 0 || exponent < -13) exponent = -13; // subnormals share the smallest step, 2^-24
    int32_t mantissa = (int32_t)nearbyintf(ldexpf(magnitude, 11 - exponent)); // ties to even
    return sign | (uint16_t)(mantissa + ((exponent + 13) << 10)); // a carry moves into the exponent by itself
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

/* ==== §2 options and their only validator ======================================================================== */

/* ==== §3 kernels in plain C ====================================================================================== */

/* ==== §4 the rank grid and its groups ============================================================================ */
/* Who works with whom. Invariants: a group of one rank needs no library and no call; every rank of a group sees its
 * members in the same order. One process is one rank. */

/* True when mpirun, srun or another launcher started this process: MPI_Init alone would start a helper daemon. */
static bool mt_launched_by_mpi(void) {
    static const char *const signs[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK", "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (getenv(signs[i])) return true;
    return false;
}

#ifdef MT_HAVE_MPI
/* Ranks on one host share its cores; without this each would start a thread for every core. */
static void mt_share_threads(void) {
#ifdef MT_HAVE_OPENMP
    if (getenv("OMP_NUM_THREADS")) return;
    MPI_Comm host;
    int local_ranks;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &local_ranks);
    MPI_Comm_free(&host);
    int cores = omp_get_num_procs(), all_cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (cores == all_cores) cores /= local_ranks; // else mpirun has bound this rank to its own cores
    omp_set_num_threads(cores > 1 ? cores : 1);
#endif
}
#endif

void mt_grid_start(mt_grid *grid, int *argc, char ***argv) {
    grid->world = (mt_group){.name = "world", .size = 1, .rank = 0};
    grid->data = (mt_group){.name = "data", .size = 1, .rank = 0};
    if (!mt_launched_by_mpi()) return;
#ifdef MT_HAVE_MPI
    static MPI_Comm world;
    MPI_Init(argc, argv);
    world = MPI_COMM_WORLD;
    grid->world.comm = &world;
    MPI_Comm_size(world, &grid->world.size);
    MPI_Comm_rank(world, &grid->world.rank);
    grid->data = grid->world;
    grid->data.name = "data";
    mt_share_threads();
#else
    (void)argc, (void)argv;
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    if (!size) size = getenv("PMI_SIZE");
    if (size && atoi(size) > 1)
        mt_die("this build has no MPI, so mpirun cannot give it %s ranks; install MPI (make deps), then make", size);
#endif
}

void mt_grid_stop(mt_grid *grid) {
#ifdef MT_HAVE_MPI
    if (grid->world.comm) MPI_Finalize();
#endif
    grid->world.comm = grid->data.comm = NULL;
}

/* ==== §5 collectives ============================================================================================= */
/* What groups do together. Invariants: every rank of the group calls in the same order; a sum has the same bits on
 * every rank; a group of one returns at once. */

#ifdef MT_HAVE_MPI
/* MPI's counts are int, so a long buffer goes in pieces. */
static void mt_all_reduce(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype, MPI_Op operation) {
    MT_CHECK(dtype == MT_F32 || dtype == MT_F64);
    const int64_t piece = 1 << 28;
    for (int64_t start = 0; start < count; start += piece) {
        int64_t length = count - start < piece ? count - start : piece;
        char *from = (char *)buffer + start * mt_dtype_size(dtype);
        int status = MPI_Allreduce(MPI_IN_PLACE, from, (int)length, dtype == MT_F32 ? MPI_FLOAT : MPI_DOUBLE, operation,
                                   *(MPI_Comm *)group->comm);
        if (status != MPI_SUCCESS) mt_die("all-reduce failed in group %s on rank %d", group->name, group->rank);
    }
}
#endif

void mt_all_reduce_sum(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype) {
    if (group->size == 1) return;
#ifdef MT_HAVE_MPI
    mt_all_reduce(group, buffer, count, dtype, MPI_SUM);
#else
    (void)buffer, (void)count, (void)dtype;
#endif
}

void mt_all_reduce_max(const mt_group *group, void *buffer, int64_t count, mt_dtype dtype) {
    if (group->size == 1) return;
#ifdef MT_HAVE_MPI
    mt_all_reduce(group, buffer, count, dtype, MPI_MAX);
#else
    (void)buffer, (void)count, (void)dtype;
#endif
}

void mt_broadcast(const mt_group *group, void *buffer, int64_t bytes, int root) {
    if (group->size == 1) return;
#ifdef MT_HAVE_MPI
    MT_CHECK(bytes <= INT32_MAX);
    MPI_Bcast(buffer, (int)bytes, MPI_BYTE, root, *(MPI_Comm *)group->comm);
#else
    (void)buffer, (void)bytes, (void)root;
#endif
}

void mt_barrier(const mt_group *group) {
    if (group->size == 1) return;
#ifdef MT_HAVE_MPI
    MPI_Barrier(*(MPI_Comm *)group->comm);
#endif
}

/* ==== §8 the parameter table ===================================================================================== */
/* A row per parameter, and nothing about a parameter anywhere else. Invariants: rows of one layer lie in one bucket,
 * matrices (which decay) before vectors (which do not); q, k, v and gate, up are neighbours without a gap, so that one
 * matrix product computes them; every name is the one that Hugging Face uses. */

/* The table as it grows, with what each new row needs to know. */
typedef struct mt_param_table {
    mt_param *rows;
    int64_t count;
    const mt_options *options;
    bool is_gpt2;
} mt_param_table;

/* Names of a role within its layer (or of the whole tensor, outside the layers). */
typedef struct mt_param_name {
    const char *llama, *gpt2;
} mt_param_name;

static const mt_param_name mt_param_names[MT_NUM_ROLES] = {
    [MT_WORD_EMBEDDING] = {"model.embed_tokens.weight", "transformer.wte.weight"},
    [MT_POSITION_EMBEDDING] = {"model.embed_positions.weight", "transformer.wpe.weight"},
    [MT_INPUT_NORM] = {"input_layernorm.weight", "ln_1.weight"},
    [MT_INPUT_NORM_BIAS] = {"input_layernorm.bias", "ln_1.bias"},
    [MT_Q] = {"self_attn.q_proj.weight", "attn.c_attn.weight"},
    [MT_K] = {"self_attn.k_proj.weight", "attn.c_attn.weight"},
    [MT_V] = {"self_attn.v_proj.weight", "attn.c_attn.weight"},
    [MT_Q_BIAS] = {"self_attn.q_proj.bias", "attn.c_attn.bias"},
    [MT_K_BIAS] = {"self_attn.k_proj.bias", "attn.c_attn.bias"},
    [MT_V_BIAS] = {"self_attn.v_proj.bias", "attn.c_attn.bias"},
    [MT_Q_NORM] = {"self_attn.q_norm.weight", NULL},
    [MT_K_NORM] = {"self_attn.k_norm.weight", NULL},
    [MT_O] = {"self_attn.o_proj.weight", "attn.c_proj.weight"},
    [MT_O_BIAS] = {"self_attn.o_proj.bias", "attn.c_proj.bias"},
    [MT_MLP_NORM] = {"post_attention_layernorm.weight", "ln_2.weight"},
    [MT_MLP_NORM_BIAS] = {"post_attention_layernorm.bias", "ln_2.bias"},
    [MT_GATE] = {"mlp.gate_proj.weight", NULL},
    [MT_GATE_BIAS] = {"mlp.gate_proj.bias", NULL},
    [MT_UP] = {"mlp.up_proj.weight", "mlp.c_fc.weight"},
    [MT_UP_BIAS] = {"mlp.up_proj.bias", "mlp.c_fc.bias"},
    [MT_DOWN] = {"mlp.down_proj.weight", "mlp.c_proj.weight"},
    [MT_DOWN_BIAS] = {"mlp.down_proj.bias", "mlp.c_proj.bias"},
    [MT_FINAL_NORM] = {"model.norm.weight", "transformer.ln_f.weight"},
    [MT_FINAL_NORM_BIAS] = {"model.norm.bias", "transformer.ln_f.bias"},
    [MT_LM_HEAD] = {"lm_head.weight", "lm_head.weight"},
};

/* Appends a row; `layer` -1 is outside the layers. Returns it so that the caller can say what is special. */
static mt_param *mt_param_add(mt_param_table *table, mt_role role, int64_t layer, int64_t rows, int64_t cols) {
    mt_param *param = &table->rows[table->count++];
    const char *name = table->is_gpt2 ? mt_param_names[role].gpt2 : mt_param_names[role].llama;
    *param = (mt_param){.role = role, .layer = layer, .rows = rows, .cols = cols, .shard_dim = -1};
    param->rows_stored = param->hf_rows_total = rows;
    param->is_vector = cols == 1;
    param->weight_decay = !param->is_vector;
    param->init = param->is_vector ? MT_INIT_ZEROS : MT_INIT_NORMAL;
    param->init_std = table->options->init_method_std;
    param->bucket = layer + 1; // the embeddings' rows and the last bucket's say so themselves
    if (layer < 0)
        snprintf(param->hf_name, sizeof param->hf_name, "%s", name);
    else
        snprintf(param->hf_name, sizeof param->hf_name,
                 table->is_gpt2 ? "transformer.h.%lld.%s" : "model.layers.%lld.%s", (long long)layer, name);
    return param;
}

/* A norm's weight, and its bias for LayerNorm. */
static void mt_param_add_norm(mt_param_table *table, mt_role role, int64_t layer, int64_t width) {
    mt_param_add(table, role, layer, width, 1)->init = MT_INIT_ONES;
    if (strcmp(table->options->normalization, "LayerNorm") == 0)
        mt_param_add(table, (mt_role)(role + 1), layer, width, 1);
}

/* q, k and v: three rows here; GPT-2 stores one tensor that holds them one after another. */
static void mt_param_add_qkv(mt_param_table *table, mt_role first_role, int64_t layer, int64_t cols) {
    const mt_options *o = table->options;
    int64_t q_rows = o->num_attention_heads * o->kv_channels, kv_rows = o->num_query_groups * o->kv_channels;
    int64_t rows[3] = {q_rows, kv_rows, kv_rows}, before = 0;
    for (int i = 0; i < 3; i++) {
        mt_param *param = mt_param_add(table, (mt_role)(first_role + i), layer, rows[i], cols);
        param->shard_dim = 0;
        if (!table->is_gpt2) continue;
        param->hf_row = before;
        param->hf_rows_total = q_rows + 2 * kv_rows;
        before += rows[i];
    }
}

static void mt_params_add_layer(mt_param_table *table, int64_t layer) {
    const mt_options *o = table->options;
    int64_t C = o->hidden_size, F = o->ffn_hidden_size, attention_width = o->num_attention_heads * o->kv_channels;
    double output_std = o->init_method_std / sqrt(2.0 * (double)o->num_layers);
    mt_param *param;
    mt_param_add_qkv(table, MT_Q, layer, C);
    param = mt_param_add(table, MT_O, layer, C, attention_width);
    param->shard_dim = 1, param->init_std = output_std;
    if (o->swiglu) mt_param_add(table, MT_GATE, layer, F, C)->shard_dim = 0;
    mt_param_add(table, MT_UP, layer, F, C)->shard_dim = 0;
    param = mt_param_add(table, MT_DOWN, layer, C, F);
    param->shard_dim = 1, param->init_std = output_std;

    mt_param_add_norm(table, MT_INPUT_NORM, layer, C);
    if (o->add_qkv_bias) mt_param_add_qkv(table, MT_Q_BIAS, layer, 1);
    if (o->qk_layernorm) {
        mt_param_add(table, MT_Q_NORM, layer, o->kv_channels, 1)->init = MT_INIT_ONES;
        mt_param_add(table, MT_K_NORM, layer, o->kv_channels, 1)->init = MT_INIT_ONES;
    }
    if (o->attention_output_bias) mt_param_add(table, MT_O_BIAS, layer, C, 1);
    mt_param_add_norm(table, MT_MLP_NORM, layer, C);
    if (o->mlp_bias) {
        if (o->swiglu) mt_param_add(table, MT_GATE_BIAS, layer, F, 1)->shard_dim = 0;
        mt_param_add(table, MT_UP_BIAS, layer, F, 1)->shard_dim = 0;
        mt_param_add(table, MT_DOWN_BIAS, layer, C, 1);
    }
}

/* GPT-2's linear layers are stored [in, out]. */
static bool mt_role_is_linear(mt_role role) {
    return role == MT_Q || role == MT_K || role == MT_V || role == MT_O || role == MT_UP || role == MT_DOWN;
}

/* Rows that continue the one before without a gap, so that a fused product sees one matrix. */
static bool mt_param_continues(const mt_param *param, const mt_param *before) {
    return param->role == MT_K || param->role == MT_V || param->role == MT_K_BIAS || param->role == MT_V_BIAS ||
           ((param->role == MT_UP || param->role == MT_UP_BIAS) && (int)before->role == (int)param->role - 2);
}

/* Elements between the starts of parameters: 16-byte loads of bf16 and whole cache lines. */
enum { MT_PARAM_ALIGNMENT = 64 };

static int64_t mt_align(int64_t value) {
    return (value + MT_PARAM_ALIGNMENT - 1) / MT_PARAM_ALIGNMENT * MT_PARAM_ALIGNMENT;
}

/* Gives every row its offset: the table's order within each bucket. */
static void mt_params_place(mt_param_table *table) {
    int64_t end = 0;
    for (int64_t i = 0; i < table->count; i++) {
        mt_param *param = &table->rows[i], *before = i ? param - 1 : param;
        bool new_bucket = i == 0 || before->bucket != param->bucket;
        MT_CHECK(new_bucket ? i == 0 || param->bucket == before->bucket + 1
                            : before->weight_decay >= param->weight_decay);
        if (new_bucket) end = 0;
        param->offset = !new_bucket && mt_param_continues(param, before) ? end : mt_align(end);
        end = param->offset + param->rows * param->cols;
        if (table->is_gpt2 && mt_role_is_linear(param->role)) param->hf_transposed = true;
    }
}

int64_t mt_params_build(mt_param **params, const mt_options *options) {
    mt_param_table table = {.options = options, .is_gpt2 = strcmp(options->hf_family, "gpt2") == 0};
    int64_t L = options->num_layers, C = options->hidden_size, V = options->padded_vocab_size;
    table.rows = mt_calloc((L + 1) * MT_NUM_ROLES * (int64_t)sizeof(mt_param));
    mt_param *param = mt_param_add(&table, MT_WORD_EMBEDDING, -1, V, C);
    param->shard_dim = 0, param->rows_stored = param->hf_rows_total = options->vocab_size;
    if (strcmp(options->position_embedding_type, "learned_absolute") == 0)
        mt_param_add(&table, MT_POSITION_EMBEDDING, -1, options->max_position_embeddings, C);
    for (int64_t layer = 0; layer < L; layer++) mt_params_add_layer(&table, layer);
    int64_t first_of_last_bucket = table.count;
    if (options->untie_embeddings_and_output_weights) {
        param = mt_param_add(&table, MT_LM_HEAD, -1, V, C);
        param->shard_dim = 0, param->rows_stored = param->hf_rows_total = options->vocab_size;
    }
    mt_param_add_norm(&table, MT_FINAL_NORM, -1, C);
    for (int64_t i = first_of_last_bucket; i < table.count; i++) table.rows[i].bucket = L + 1;
    mt_params_place(&table);
    *params = table.rows;
    return table.count;
}

int64_t mt_num_parameters(const mt_options *options) {
    mt_param *params;
    int64_t count = mt_params_build(&params, options), total = 0;
    for (int64_t i = 0; i < count; i++) total += params[i].rows_stored * params[i].cols;
    free(params);
    return total;
}

/* ==== §9 attention, MLP, layer =================================================================================== */
/* A transformer layer, forward and backward. Invariants: hidden states are [T, C] and never change layout; a backward
 * reads as its forward reversed; gradients of activations are written, those of parameters accumulate in fp32. */

/* A layer's parameters; q, k, v and gate, up are each one matrix because their rows are neighbours in the bucket. */
typedef struct mt_layer {
    mt_weight input_norm, input_norm_bias;
    mt_weight qkv, qkv_bias; // [(H + 2G) D, C], [(H + 2G) D]
    mt_weight q_norm, k_norm;
    mt_weight o, o_bias; // [C, H D], [C]
    mt_weight mlp_norm, mlp_norm_bias;
    mt_weight fc1, fc1_bias; // [2F, C] gate then up, or [F, C]
    mt_weight down, down_bias;
} mt_layer;

/* What a layer's forward leaves for its backward. */
typedef struct mt_activations {
    void *input;                    // [T, C] the residual stream as it enters
    void *input_normed;             // [T, C]
    float *input_mean, *input_rstd; // [T]
    void *qkv;                      // [T, (H + 2G) D]; rotated in place unless q and k are normalised first
    void *qk;                       // [T, (H + G) D] normalised and rotated q and k, with q/k norm
    float *q_rstd, *k_rstd;         // [T, H], [T, G]
    void *attended;                 // [T, H D]
    float *lse;                     // [T, H]
    void *middle;                   // [T, C] the residual stream between attention and MLP
    void *mlp_normed;               // [T, C]
    float *mlp_mean, *mlp_rstd;     // [T]
    void *mlp_hidden;               // [T, 2F] or [T, F] before the activation
    void *mlp_active;               // [T, F] after it
} mt_activations;

/* Buffers that every layer uses in turn. */
typedef struct mt_scratch {
    void *residual; // [T, C] the gradient of the residual stream
    void *hidden;   // [T, C]
    void *normed;   // [T, C] the gradient of a norm's output
    void *wide;     // [T, max(2F, (H + 2G) D)]
    void *active;   // [T, max(F, H D)]
    void *dqk;      // [T, (H + G) D], with q/k norm
    float *row_dot; // [T, H]
} mt_scratch;

struct mt_model {
    const mt_options *options;
    const mt_grid *grid;
    const mt_ops *ops;
    mt_stream *stream;
    mt_dtype dtype;
    mt_model_plan plan;
    int64_t C, H, G, D, F, V, L; // as in megatron.h
    /* parameters */
    mt_param *params;
    int64_t num_params, num_buckets;
    mt_bucket *buckets;
    mt_layer *layers;
    mt_weight word_embedding, position_embedding, final_norm, final_norm_bias, lm_head;
    float *rope_cos, *rope_sin; // [max_position, R / 2]
    int64_t rotary_dim;         // R
    /* memory */
    mt_arena arena;
    void *workspace; // of the stream
    int64_t workspace_bytes;
    int64_t bytes[5];            // of each row of the printed plan
    mt_activations *activations; // one a layer to train, one in all otherwise
    mt_scratch scratch;
    void *final_input, *final_normed, *logits;
    float *final_mean, *final_rstd;
    float *row_max, *row_sum, *row_target, *row_weighted, *lse, *loss, *entropy; // [max_logits]
    float *logits_host;                                                          // [max_logits, vocab_size]
    void **k_cache, **v_cache;                                                   // a layer: [cache_rows, G D]
    double *sums;                                                                // loss, unmasked tokens, squared norm
    float *grad_scale, *grad_norm;
    /* the micro-batch of the last forward, on the device */
    int64_t T, num_logits;
    bool training;
    int32_t *tokens, *labels, *positions, *cache_rows, *logit_rows;
    float *loss_mask;
    int64_t *token_index;
    mt_span *device_spans;
    mt_spans spans;
};

/* ==== §9a rotary tables ========================================================================================== */

/* YaRN's boundary: the channel pair that turns `rotations` times over the original context (Peng et al., "YaRN"). */
static double mt_yarn_pair(const mt_options *o, double rotations, int64_t R) {
    double context = (double)o->original_max_position_embeddings;
    return (double)R * log(context / (rotations * 2 * M_PI)) / (2 * log(o->rotary_base));
}

/* Frequency of channel pair i of R rotary channels, after the model's scaling; as Hugging Face computes it. */
static double mt_rope_frequency(const mt_options *o, int64_t i, int64_t R) {
    double frequency = pow(o->rotary_base, -2.0 * (double)i / (double)R), factor = o->rope_scaling_factor;
    if (strcmp(o->rope_scaling_type, "linear") == 0) return frequency / factor;
    if (strcmp(o->rope_scaling_type, "llama3") == 0) {
        double turns = (double)o->original_max_position_embeddings * frequency / (2 * M_PI);
        double low = o->rope_low_freq_factor, high = o->rope_high_freq_factor;
        double smooth = fmin(fmax((turns - low) / (high - low), 0), 1); // 0: long waves, stretched; 1: short, kept
        return (1 - smooth) * frequency / factor + smooth * frequency;
    }
    if (strcmp(o->rope_scaling_type, "yarn") == 0) {
        double low = fmax(floor(mt_yarn_pair(o, o->yarn_beta_fast, R)), 0);
        double high = fmin(ceil(mt_yarn_pair(o, o->yarn_beta_slow, R)), (double)R - 1);
        if (low == high) high += 0.001;
        double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1); // 0: extrapolate, 1: interpolate
        return frequency * (1 - ramp) + frequency / factor * ramp;
    }
    return frequency;
}

static double mt_yarn_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* YaRN also makes attention a little sharper, by scaling cos and sin. */
static double mt_rope_amplitude(const mt_options *o) {
    if (strcmp(o->rope_scaling_type, "yarn") != 0) return 1;
    if (o->yarn_attention_factor > 0) return o->yarn_attention_factor;
    double factor = o->rope_scaling_factor;
    if (o->yarn_mscale > 0 && o->yarn_mscale_all_dim > 0)
        return mt_yarn_mscale(factor, o->yarn_mscale) / mt_yarn_mscale(factor, o->yarn_mscale_all_dim);
    return mt_yarn_mscale(factor, 1);
}

/* Computes the tables in double on the host, then copies them to the device. */
static void mt_rope_tables(mt_model *model) {
    int64_t R = model->rotary_dim, half = R / 2, count = model->plan.max_position * half;
    float *cosines = mt_malloc(count * 4), *sines = mt_malloc(count * 4);
    double amplitude = mt_rope_amplitude(model->options);
    for (int64_t i = 0; i < half; i++) {
        double frequency = mt_rope_frequency(model->options, i, R);
        for (int64_t position = 0; position < model->plan.max_position; position++) {
            cosines[position * half + i] = (float)(amplitude * cos((double)position * frequency));
            sines[position * half + i] = (float)(amplitude * sin((double)position * frequency));
        }
    }
    model->ops->memory_copy(model->rope_cos, cosines, count * 4, model->stream);
    model->ops->memory_copy(model->rope_sin, sines, count * 4, model->stream);
    model->ops->stream_wait(model->stream);
    free(cosines);
    free(sines);
}

/* ==== §9b attention ============================================================================================== */

/* Dropout of one place of one layer; the key makes masks of different places independent. */
enum { MT_DROP_EMBEDDING, MT_DROP_ATTENTION, MT_DROP_ATTENTION_OUT, MT_DROP_MLP_OUT, MT_NUM_DROPS };
enum { MT_RANDOM_PARAMETER = 1, MT_RANDOM_DROPOUT = 2, MT_RANDOM_SAMPLE = 3 };

static mt_dropout mt_model_dropout(const mt_model *model, int64_t layer, int place) {
    double p = place == MT_DROP_ATTENTION ? model->options->attention_dropout : model->options->hidden_dropout;
    uint64_t index = (uint64_t)((layer + 1) * MT_NUM_DROPS + place);
    return (mt_dropout){.p = model->training ? p : 0,
                        .key = mt_random_key((uint64_t)model->options->seed, MT_RANDOM_DROPOUT, index)};
}

/* A pointer `elements` into an activation of the model's type. */
static void *mt_at(const mt_model *model, void *base, int64_t elements) {
    return (char *)base + elements * mt_dtype_size(model->dtype);
}

static void mt_norm_forward(const mt_model *m, void *y, float *mean, float *rstd, const void *x, mt_weight w,
                            mt_weight b, int64_t T) {
    float eps = (float)m->options->norm_epsilon;
    if (mean)
        m->ops->layernorm_forward(y, mean, rstd, x, w.w, b.w, T, m->C, eps, m->dtype, m->stream);
    else
        m->ops->rmsnorm_forward(y, rstd, x, w.w, T, 1, m->C, m->C, m->C, eps, m->dtype, m->stream);
}

/* dx = dresidual + the gradient through the norm. */
static void mt_norm_backward(const mt_model *m, void *dx, const void *dy, const void *dresidual, const void *x,
                             const float *mean, const float *rstd, mt_weight w, mt_weight b, int64_t T) {
    if (mean)
        m->ops->layernorm_backward(dx, w.dw, b.dw, dy, dresidual, x, w.w, mean, rstd, T, m->C, m->dtype, m->stream);
    else
        m->ops->rmsnorm_backward(dx, w.dw, dy, dresidual, x, w.w, rstd, T, 1, m->C, m->C, m->C, m->C, m->dtype,
                                 m->stream);
}

/* Where attention finds q and k of this layer, and how far apart their tokens lie. */
typedef struct mt_qkv_view {
    void *q, *k, *v;
    int64_t qk_stride, v_stride;
} mt_qkv_view;

/* Without q/k norm, q and k stay in the fused product; with it, they move to `qk` and only v stays. */
static mt_qkv_view mt_view_qkv(const mt_model *m, void *qkv, void *qk) {
    int64_t q_width = m->H * m->D, kv_width = m->G * m->D, stride = q_width + 2 * kv_width;
    mt_qkv_view view = {.q = qkv, .k = mt_at(m, qkv, q_width), .v = mt_at(m, qkv, q_width + kv_width)};
    view.qk_stride = view.v_stride = stride;
    if (m->options->qk_layernorm) {
        view.q = qk, view.k = mt_at(m, qk, q_width);
        view.qk_stride = q_width + kv_width;
    }
    return view;
}

static mt_attention mt_attention_shape(const mt_model *m, int64_t layer, int64_t qk_stride, int64_t v_stride) {
    return (mt_attention){.num_heads = m->H,
                          .num_groups = m->G,
                          .head_size = m->D,
                          .value_size = m->D,
                          .q_stride = qk_stride,
                          .k_stride = qk_stride,
                          .v_stride = v_stride,
                          .out_stride = m->H * m->D,
                          .window = m->options->window_size,
                          .scale = 1.0f / sqrtf((float)m->D),
                          .dropout = mt_model_dropout(m, layer, MT_DROP_ATTENTION),
                          .q_index = m->token_index,
                          .k_index = m->token_index};
}

/* q/k norm, then rotation: raw fused q and k in, ready q and k out (in place where there is no norm). */
static void mt_qk_forward(const mt_model *m, const mt_layer *w, mt_activations *a) {
    int64_t T = m->T, D = m->D, R = m->rotary_dim, raw_stride = (m->H + 2 * m->G) * D;
    float eps = (float)m->options->norm_epsilon;
    mt_qkv_view view = mt_view_qkv(m, a->qkv, a->qk);
    if (m->options->qk_layernorm) {
        m->ops->rmsnorm_forward(view.q, a->q_rstd, a->qkv, w->q_norm.w, T, m->H, D, view.qk_stride, raw_stride, eps,
                                m->dtype, m->stream);
        m->ops->rmsnorm_forward(view.k, a->k_rstd, mt_at(m, a->qkv, m->H * D), w->k_norm.w, T, m->G, D, view.qk_stride,
                                raw_stride, eps, m->dtype, m->stream);
    }
    if (R == 0) return;
    bool interleaved = m->options->rotary_interleaved;
    m->ops->rope_forward(view.q, view.q, m->rope_cos, m->rope_sin, m->positions, T, m->H, D, R, view.qk_stride,
                         view.qk_stride, interleaved, m->dtype, m->stream);
    m->ops->rope_forward(view.k, view.k, m->rope_cos, m->rope_sin, m->positions, T, m->G, D, R, view.qk_stride,
                         view.qk_stride, interleaved, m->dtype, m->stream);
}

/* Gradients of ready q and k (in `dqkv`, or in dqk with q/k norm) to gradients of the fused product, `dqkv`. */
static void mt_qk_backward(const mt_model *m, const mt_layer *w, const mt_activations *a, void *dqkv, void *dqk) {
    int64_t T = m->T, D = m->D, R = m->rotary_dim, raw_stride = (m->H + 2 * m->G) * D;
    mt_qkv_view d = mt_view_qkv(m, dqkv, dqk);
    if (R > 0) {
        bool interleaved = m->options->rotary_interleaved;
        m->ops->rope_backward(d.q, d.q, m->rope_cos, m->rope_sin, m->positions, T, m->H, D, R, d.qk_stride, d.qk_stride,
                              interleaved, m->dtype, m->stream);
        m->ops->rope_backward(d.k, d.k, m->rope_cos, m->rope_sin, m->positions, T, m->G, D, R, d.qk_stride, d.qk_stride,
                              interleaved, m->dtype, m->stream);
    }
    if (!m->options->qk_layernorm) return;
    m->ops->rmsnorm_backward(dqkv, w->q_norm.dw, d.q, NULL, a->qkv, w->q_norm.w, a->q_rstd, T, m->H, D, raw_stride,
                             d.qk_stride, raw_stride, m->dtype, m->stream);
    m->ops->rmsnorm_backward(mt_at(m, dqkv, m->H * D), w->k_norm.dw, d.k, NULL, mt_at(m, a->qkv, m->H * D), w->k_norm.w,
                             a->k_rstd, T, m->G, D, raw_stride, d.qk_stride, raw_stride, m->dtype, m->stream);
}

/* Generation: new keys and values go to their cache rows, and attention reads the cache instead. */
static void mt_cache_update(const mt_model *m, int64_t layer, mt_qkv_view *view, mt_attention *shape) {
    int64_t width = m->G * m->D;
    m->ops->scatter_rows(m->k_cache[layer], view->k, m->cache_rows, m->T, width, width, view->qk_stride, m->dtype,
                         m->stream);
    m->ops->scatter_rows(m->v_cache[layer], view->v, m->cache_rows, m->T, width, width, view->v_stride, m->dtype,
                         m->stream);
    view->k = m->k_cache[layer];
    view->v = m->v_cache[layer];
    shape->k_stride = shape->v_stride = width;
}

/* middle = input + dropout(attention(norm(input))). `decode` attends over the cache. */
static void mt_attention_block_forward(mt_model *m, int64_t layer, mt_activations *a, bool decode) {
    const mt_layer *w = &m->layers[layer];
    int64_t T = m->T, qkv_width = (m->H + 2 * m->G) * m->D;
    mt_norm_forward(m, a->input_normed, a->input_mean, a->input_rstd, a->input, w->input_norm, w->input_norm_bias, T);
    m->ops->linear_forward(a->qkv, a->input_normed, w->qkv.w, w->qkv_bias.w, T, qkv_width, m->C, m->dtype, m->stream);
    mt_qk_forward(m, w, a);
    mt_qkv_view view = mt_view_qkv(m, a->qkv, a->qk);
    mt_attention shape = mt_attention_shape(m, layer, view.qk_stride, view.v_stride);
    if (decode) mt_cache_update(m, layer, &view, &shape);
    m->ops->attention_forward(a->attended, a->lse, view.q, view.k, view.v, &m->spans, &shape, m->dtype, m->stream);
    m->ops->linear_forward(m->scratch.hidden, a->attended, w->o.w, w->o_bias.w, T, m->C, m->H * m->D, m->dtype,
                           m->stream);
    mt_dropout dropout = mt_model_dropout(m, layer, MT_DROP_ATTENTION_OUT);
    m->ops->dropout_add_forward(a->middle, m->scratch.hidden, a->input, m->token_index, T, m->C, 0, &dropout, m->dtype,
                                m->stream);
}

/* The gradient of the residual stream, scratch.residual, goes from `middle` to `input`. */
static void mt_attention_block_backward(mt_model *m, int64_t layer, mt_activations *a) {
    const mt_layer *w = &m->layers[layer];
    mt_scratch *s = &m->scratch;
    int64_t T = m->T, qkv_width = (m->H + 2 * m->G) * m->D, attended_width = m->H * m->D;
    mt_dropout dropout = mt_model_dropout(m, layer, MT_DROP_ATTENTION_OUT);
    const void *dout = s->residual;
    if (dropout.p > 0) {
        m->ops->dropout_add_backward(s->hidden, dout, m->token_index, T, m->C, 0, &dropout, m->dtype, m->stream);
        dout = s->hidden;
    }
    m->ops->linear_backward_weight(w->o.dw, w->o_bias.dw, dout, a->attended, T, m->C, attended_width, m->dtype,
                                   m->stream);
    m->ops->linear_backward_input(s->active, dout, w->o.w, T, m->C, attended_width, m->dtype, m->stream);

    mt_qkv_view view = mt_view_qkv(m, a->qkv, a->qk), d = mt_view_qkv(m, s->wide, s->dqk);
    mt_attention shape = mt_attention_shape(m, layer, view.qk_stride, view.v_stride);
    m->ops->attention_backward(d.q, d.k, d.v, s->row_dot, s->active, view.q, view.k, view.v, a->attended, a->lse,
                               &m->spans, &shape, m->dtype, m->stream);
    mt_qk_backward(m, w, a, s->wide, s->dqk);
    m->ops->linear_backward_weight(w->qkv.dw, w->qkv_bias.dw, s->wide, a->input_normed, T, qkv_width, m->C, m->dtype,
                                   m->stream);
    m->ops->linear_backward_input(s->normed, s->wide, w->qkv.w, T, qkv_width, m->C, m->dtype, m->stream);
    mt_norm_backward(m, s->residual, s->normed, s->residual, a->input, a->input_mean, a->input_rstd, w->input_norm,
                     w->input_norm_bias, T);
}

/* ==== §9c MLP ==================================================================================================== */

/* output = middle + dropout(mlp(norm(middle))). */
static void mt_mlp_block_forward(mt_model *m, int64_t layer, mt_activations *a, void *output) {
    const mt_layer *w = &m->layers[layer];
    int64_t T = m->T, F = m->F, fc1_width = m->options->swiglu ? 2 * F : F;
    mt_norm_forward(m, a->mlp_normed, a->mlp_mean, a->mlp_rstd, a->middle, w->mlp_norm, w->mlp_norm_bias, T);
    m->ops->linear_forward(a->mlp_hidden, a->mlp_normed, w->fc1.w, w->fc1_bias.w, T, fc1_width, m->C, m->dtype,
                           m->stream);
    if (m->options->swiglu)
        m->ops->swiglu_forward(a->mlp_active, a->mlp_hidden, T, F, m->dtype, m->stream);
    else
        m->ops->gelu_forward(a->mlp_active, a->mlp_hidden, T * F, m->options->openai_gelu, m->dtype, m->stream);
    m->ops->linear_forward(m->scratch.hidden, a->mlp_active, w->down.w, w->down_bias.w, T, m->C, F, m->dtype,
                           m->stream);
    mt_dropout dropout = mt_model_dropout(m, layer, MT_DROP_MLP_OUT);
    m->ops->dropout_add_forward(output, m->scratch.hidden, a->middle, m->token_index, T, m->C, 0, &dropout, m->dtype,
                                m->stream);
}

/* The gradient of the residual stream, scratch.residual, goes from `output` to `middle`. */
static void mt_mlp_block_backward(mt_model *m, int64_t layer, mt_activations *a) {
    const mt_layer *w = &m->layers[layer];
    mt_scratch *s = &m->scratch;
    int64_t T = m->T, F = m->F, fc1_width = m->options->swiglu ? 2 * F : F;
    mt_dropout dropout = mt_model_dropout(m, layer, MT_DROP_MLP_OUT);
    const void *dout = s->residual;
    if (dropout.p > 0) {
        m->ops->dropout_add_backward(s->hidden, dout, m->token_index, T, m->C, 0, &dropout, m->dtype, m->stream);
        dout = s->hidden;
    }
    m->ops->linear_backward_weight(w->down.dw, w->down_bias.dw, dout, a->mlp_active, T, m->C, F, m->dtype, m->stream);
    m->ops->linear_backward_input(s->active, dout, w->down.w, T, m->C, F, m->dtype, m->stream);
    if (m->options->swiglu)
        m->ops->swiglu_backward(s->wide, s->active, a->mlp_hidden, T, F, m->dtype, m->stream);
    else
        m->ops->gelu_backward(s->wide, s->active, a->mlp_hidden, T * F, m->options->openai_gelu, m->dtype, m->stream);
    m->ops->linear_backward_weight(w->fc1.dw, w->fc1_bias.dw, s->wide, a->mlp_normed, T, fc1_width, m->C, m->dtype,
                                   m->stream);
    m->ops->linear_backward_input(s->normed, s->wide, w->fc1.w, T, fc1_width, m->C, m->dtype, m->stream);
    mt_norm_backward(m, s->residual, s->normed, s->residual, a->middle, a->mlp_mean, a->mlp_rstd, w->mlp_norm,
                     w->mlp_norm_bias, T);
}

/* ==== §9d layer ================================================================================================== */

static void mt_layer_forward(mt_model *m, int64_t layer, mt_activations *a, void *output, bool decode) {
    mt_attention_block_forward(m, layer, a, decode);
    mt_mlp_block_forward(m, layer, a, output);
}

static void mt_layer_backward(mt_model *m, int64_t layer, mt_activations *a) {
    mt_mlp_block_backward(m, layer, a);
    mt_attention_block_backward(m, layer, a);
}

/* ==== §10 the model ============================================================================================== */
/* Embedding, layers, output: memory laid out once, then forward, backward and decoding over it. Invariants: nothing is
 * allocated after mt_model_create; the code that lays memory out also plans it, by running once over a counting arena.
 */

/* ==== §10a memory ================================================================================================ */

enum { MT_PLAN_WEIGHTS, MT_PLAN_GRADIENTS, MT_PLAN_OPTIMIZER, MT_PLAN_ACTIVATIONS, MT_PLAN_CACHE, MT_NUM_PLANS };

static int64_t mt_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Parameters, gradients and optimizer state of every bucket. */
static void mt_layout_buckets(mt_model *m, mt_arena *arena) {
    int64_t start = arena->used;
    for (int64_t i = 0; i < m->num_buckets; i++)
        m->buckets[i].params = mt_arena_alloc(arena, m->buckets[i].count * mt_dtype_size(m->dtype));
    m->bytes[MT_PLAN_WEIGHTS] = arena->used - start;
    if (!m->plan.train) return;
    start = arena->used;
    for (int64_t i = 0; i < m->num_buckets; i++) m->buckets[i].grads = mt_arena_alloc(arena, m->buckets[i].count * 4);
    m->bytes[MT_PLAN_GRADIENTS] = arena->used - start;
    start = arena->used;
    for (int64_t i = 0; i < m->num_buckets; i++) {
        mt_bucket *bucket = &m->buckets[i];
        if (m->dtype != MT_F32) bucket->master = mt_arena_alloc(arena, bucket->count * 4);
        bucket->m = mt_arena_alloc(arena, bucket->count * 4);
        bucket->v = mt_arena_alloc(arena, bucket->count * 4);
    }
    m->bytes[MT_PLAN_OPTIMIZER] = arena->used - start;
}

/* One layer's activations for T tokens. */
static void mt_layout_layer(const mt_model *m, mt_activations *a, mt_arena *arena) {
    int64_t T = m->plan.max_tokens, size = mt_dtype_size(m->dtype), fc1_width = m->options->swiglu ? 2 * m->F : m->F;
    bool layernorm = strcmp(m->options->normalization, "LayerNorm") == 0;
    a->input = mt_arena_alloc(arena, T * m->C * size);
    a->input_normed = mt_arena_alloc(arena, T * m->C * size);
    if (layernorm) a->input_mean = mt_arena_alloc(arena, T * 4);
    a->input_rstd = mt_arena_alloc(arena, T * 4);
    a->qkv = mt_arena_alloc(arena, T * (m->H + 2 * m->G) * m->D * size);
    if (m->options->qk_layernorm) {
        a->qk = mt_arena_alloc(arena, T * (m->H + m->G) * m->D * size);
        a->q_rstd = mt_arena_alloc(arena, T * m->H * 4);
        a->k_rstd = mt_arena_alloc(arena, T * m->G * 4);
    }
    a->attended = mt_arena_alloc(arena, T * m->H * m->D * size);
    a->lse = mt_arena_alloc(arena, T * m->H * 4);
    a->middle = mt_arena_alloc(arena, T * m->C * size);
    a->mlp_normed = mt_arena_alloc(arena, T * m->C * size);
    if (layernorm) a->mlp_mean = mt_arena_alloc(arena, T * 4);
    a->mlp_rstd = mt_arena_alloc(arena, T * 4);
    a->mlp_hidden = mt_arena_alloc(arena, T * fc1_width * size);
    a->mlp_active = mt_arena_alloc(arena, T * m->F * size);
}

/* The micro-batch on the device, the output layer, and what the backward of a layer needs. */
static void mt_layout_workspace(mt_model *m, mt_arena *arena) {
    int64_t T = m->plan.max_tokens, rows = m->plan.max_logits, size = mt_dtype_size(m->dtype);
    bool layernorm = strcmp(m->options->normalization, "LayerNorm") == 0;
    mt_scratch *s = &m->scratch;
    m->workspace_bytes = m->ops->workspace_bytes(T, m->C, m->H, m->D);
    m->workspace = mt_arena_alloc(arena, m->workspace_bytes);
    m->tokens = mt_arena_alloc(arena, T * 4);
    m->labels = mt_arena_alloc(arena, T * 4);
    m->positions = mt_arena_alloc(arena, T * 4);
    m->cache_rows = mt_arena_alloc(arena, T * 4);
    m->logit_rows = mt_arena_alloc(arena, T * 4);
    m->loss_mask = mt_arena_alloc(arena, T * 4);
    m->token_index = mt_arena_alloc(arena, T * 8);
    m->device_spans = mt_arena_alloc(arena, T * (int64_t)sizeof(mt_span));
    m->rope_cos = mt_arena_alloc(arena, m->plan.max_position * m->rotary_dim / 2 * 4);
    m->rope_sin = mt_arena_alloc(arena, m->plan.max_position * m->rotary_dim / 2 * 4);
    m->sums = mt_arena_alloc(arena, 3 * 8);
    m->grad_scale = mt_arena_alloc(arena, 4);
    m->grad_norm = mt_arena_alloc(arena, 4);
    m->final_input = mt_arena_alloc(arena, T * m->C * size);
    m->final_normed = mt_arena_alloc(arena, T * m->C * size);
    if (layernorm) m->final_mean = mt_arena_alloc(arena, T * 4);
    m->final_rstd = mt_arena_alloc(arena, T * 4);
    m->logits = mt_arena_alloc(arena, rows * m->V * size);
    float **per_row[] = {&m->row_max, &m->row_sum, &m->row_target, &m->row_weighted, &m->lse, &m->loss, &m->entropy};
    for (size_t i = 0; i < sizeof per_row / sizeof *per_row; i++) *per_row[i] = mt_arena_alloc(arena, rows * 4);
    s->hidden = mt_arena_alloc(arena, T * m->C * size);
    if (!m->plan.train) return;
    s->residual = mt_arena_alloc(arena, T * m->C * size);
    s->normed = mt_arena_alloc(arena, T * m->C * size);
    s->wide = mt_arena_alloc(arena, T * mt_max((m->options->swiglu ? 2 : 1) * m->F, (m->H + 2 * m->G) * m->D) * size);
    s->active = mt_arena_alloc(arena, T * mt_max(m->F, m->H * m->D) * size);
    if (m->options->qk_layernorm) s->dqk = mt_arena_alloc(arena, T * (m->H + m->G) * m->D * size);
    s->row_dot = mt_arena_alloc(arena, T * m->H * 4);
}

/* Lays out everything in the arena; with a counting arena, plans it. */
static void mt_layout(mt_model *m, mt_arena *arena) {
    mt_layout_buckets(m, arena);
    int64_t start = arena->used;
    for (int64_t layer = 0; layer < (m->plan.train ? m->L : 1); layer++)
        mt_layout_layer(m, &m->activations[layer], arena);
    mt_layout_workspace(m, arena);
    m->bytes[MT_PLAN_ACTIVATIONS] = arena->used - start;
    start = arena->used;
    for (int64_t layer = 0; layer < m->L && m->plan.cache_rows > 0; layer++) {
        int64_t bytes = m->plan.cache_rows * m->G * m->D * mt_dtype_size(m->dtype);
        m->k_cache[layer] = mt_arena_alloc(arena, bytes);
        m->v_cache[layer] = mt_arena_alloc(arena, bytes);
    }
    m->bytes[MT_PLAN_CACHE] = arena->used - start;
}

void mt_model_print_plan(const mt_model *m, FILE *file) {
    static const char *const names[MT_NUM_PLANS] = {"weights", "gradients", "optimizer state", "activations",
                                                    "KV cache"};
    double parameters = (double)mt_num_parameters(m->options);
    fprintf(file, "memory plan          MiB   bytes a parameter\n");
    for (int i = 0; i < MT_NUM_PLANS; i++)
        if (m->bytes[i] > 0)
            fprintf(file, "  %-15s %9.1f   %6.2f\n", names[i], (double)m->bytes[i] / 1048576,
                    (double)m->bytes[i] / parameters);
    fprintf(file, "  %-15s %9.1f   %6.2f\n", "total", (double)m->arena.capacity / 1048576,
            (double)m->arena.capacity / parameters);
}

/* ==== §10b creation ============================================================================================== */

/* Buckets take their sizes from the table; the padding is what alignment leaves. */
static void mt_buckets_size(mt_model *m) {
    m->num_buckets = m->L + 2;
    m->buckets = mt_calloc(m->num_buckets * (int64_t)sizeof(mt_bucket));
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        mt_bucket *bucket = &m->buckets[param->bucket];
        bucket->count = mt_align(param->offset + param->rows * param->cols);
        if (param->weight_decay) bucket->decay_count = bucket->count;
    }
}

/* Where the model's code finds the parameter of a role: a fused matrix is found by its first row. */
static mt_weight *mt_model_weight(mt_model *m, const mt_param *param) {
    mt_layer *layer = param->layer >= 0 ? &m->layers[param->layer] : NULL;
    switch (param->role) {
    case MT_WORD_EMBEDDING:
        return &m->word_embedding;
    case MT_POSITION_EMBEDDING:
        return &m->position_embedding;
    case MT_FINAL_NORM:
        return &m->final_norm;
    case MT_FINAL_NORM_BIAS:
        return &m->final_norm_bias;
    case MT_LM_HEAD:
        return &m->lm_head;
    case MT_INPUT_NORM:
        return &layer->input_norm;
    case MT_INPUT_NORM_BIAS:
        return &layer->input_norm_bias;
    case MT_Q:
        return &layer->qkv;
    case MT_Q_BIAS:
        return &layer->qkv_bias;
    case MT_Q_NORM:
        return &layer->q_norm;
    case MT_K_NORM:
        return &layer->k_norm;
    case MT_O:
        return &layer->o;
    case MT_O_BIAS:
        return &layer->o_bias;
    case MT_MLP_NORM:
        return &layer->mlp_norm;
    case MT_MLP_NORM_BIAS:
        return &layer->mlp_norm_bias;
    case MT_GATE:
        return &layer->fc1;
    case MT_GATE_BIAS:
        return &layer->fc1_bias;
    case MT_UP:
        return m->options->swiglu ? NULL : &layer->fc1;
    case MT_UP_BIAS:
        return m->options->swiglu ? NULL : &layer->fc1_bias;
    case MT_DOWN:
        return &layer->down;
    case MT_DOWN_BIAS:
        return &layer->down_bias;
    default:
        return NULL; // k and v follow q
    }
}

static void mt_bind_weights(mt_model *m) {
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        mt_bucket *bucket = &m->buckets[param->bucket];
        mt_weight *weight = mt_model_weight(m, param);
        if (!weight) continue;
        weight->w = mt_at(m, bucket->params, param->offset);
        weight->dw = m->plan.train ? bucket->grads + param->offset : NULL;
    }
    if (!m->options->untie_embeddings_and_output_weights) m->lm_head = m->word_embedding;
}

static void mt_model_shape(mt_model *m, const mt_options *o) {
    m->C = o->hidden_size, m->H = o->num_attention_heads, m->G = o->num_query_groups, m->D = o->kv_channels;
    m->F = o->ffn_hidden_size, m->V = o->padded_vocab_size, m->L = o->num_layers;
    m->rotary_dim = 0;
    if (strcmp(o->position_embedding_type, "rope") == 0)
        m->rotary_dim = (int64_t)((double)m->D * o->rotary_percent) / 2 * 2;
}

int mt_model_create(mt_model **out, const mt_options *options, const mt_grid *grid, const mt_ops *ops,
                    const mt_model_plan *plan, mt_error *error) {
    mt_model *m = mt_calloc(sizeof *m);
    m->options = options, m->grid = grid, m->ops = ops, m->plan = *plan;
    m->dtype = options->bf16 ? MT_BF16 : MT_F32;
    mt_model_shape(m, options);
    m->num_params = mt_params_build(&m->params, options);
    mt_buckets_size(m);
    m->layers = mt_calloc(m->L * (int64_t)sizeof(mt_layer));
    m->activations = mt_calloc(m->L * (int64_t)sizeof(mt_activations));
    m->k_cache = mt_calloc(m->L * (int64_t)sizeof(void *));
    m->v_cache = mt_calloc(m->L * (int64_t)sizeof(void *));

    mt_arena counting = {0};
    mt_layout(m, &counting);
    int64_t physical = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (counting.used > physical) {
        mt_error_set(error,
                     "the model needs %.1f GiB of memory and this machine has %.1f GiB; lower --micro-batch-size "
                     "or --seq-length, or take a smaller model",
                     (double)counting.used / (1 << 30), (double)physical / (1 << 30));
        mt_model_destroy(m);
        return -1;
    }
    m->arena.capacity = counting.used;
    m->arena.base = ops->memory_alloc(counting.used);
    mt_layout(m, &m->arena);
    m->stream = ops->stream_create(m->workspace, m->workspace_bytes);
    mt_bind_weights(m);
    for (int64_t i = 0; i < m->num_buckets; i++) {
        mt_bucket *b = &m->buckets[i];
        ops->memory_zero(b->params, b->count * mt_dtype_size(m->dtype), m->stream);
        float *states[] = {b->grads, b->master, b->m, b->v};
        for (int k = 0; k < 4; k++)
            if (states[k]) ops->memory_zero(states[k], b->count * 4, m->stream);
    }
    if (m->rotary_dim > 0) mt_rope_tables(m);
    *out = m;
    return 0;
}

void mt_model_destroy(mt_model *m) {
    if (!m) return;
    if (m->arena.base) {
        m->ops->memory_free(m->arena.base);
        m->ops->stream_destroy(m->stream);
    }
    free(m->params);
    free(m->buckets);
    free(m->layers);
    free(m->activations);
    free(m->k_cache);
    free(m->v_cache);
    free(m);
}

void mt_model_init(mt_model *m) {
    for (int64_t i = 0; i < m->num_params; i++) {
        const mt_param *param = &m->params[i];
        mt_bucket *bucket = &m->buckets[param->bucket];
        int64_t count = param->rows_stored * param->cols; // padding rows stay 0, whatever their number
        if (param->init == MT_INIT_ZEROS) continue;
        float mean = param->init == MT_INIT_ONES ? 1 : 0,
              std = param->init == MT_INIT_ONES ? 0 : (float)param->init_std;
        uint64_t index = (uint64_t)((param->layer + 1) * MT_NUM_ROLES + param->role);
        uint64_t key = mt_random_key((uint64_t)m->options->seed, MT_RANDOM_PARAMETER, index);
        void *weights = mt_at(m, bucket->params, param->offset);
        m->ops->random_normal(weights, count, key, 0, mean, std, m->dtype, m->stream);
        if (bucket->master) // drawn again rather than widened, so that the master weights are not rounded
            m->ops->random_normal(bucket->master + param->offset, count, key, 0, mean, std, MT_F32, m->stream);
    }
}

const mt_param *mt_model_params(const mt_model *m, int64_t *count) {
    *count = m->num_params;
    return m->params;
}

mt_bucket *mt_model_buckets(mt_model *m, int64_t *count) {
    *count = m->num_buckets;
    return m->buckets;
}

const mt_options *mt_model_options(const mt_model *m) {
    return m->options;
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

/* ==== §10c forward and backward ================================================================================== */

void mt_batch_alloc(mt_batch *batch, int64_t max_tokens) {
    mt_arena arena = {0};
    for (int pass = 0; pass < 2; pass++) { // the first pass counts
        batch->tokens = mt_arena_alloc(&arena, max_tokens * 4);
        batch->labels = mt_arena_alloc(&arena, max_tokens * 4);
        batch->loss_mask = mt_arena_alloc(&arena, max_tokens * 4);
        batch->positions = mt_arena_alloc(&arena, max_tokens * 4);
        batch->token_index = mt_arena_alloc(&arena, max_tokens * 8);
        batch->spans = mt_arena_alloc(&arena, max_tokens * (int64_t)sizeof(mt_span));
        if (pass == 0) arena = (mt_arena){.base = mt_calloc(arena.used), .capacity = arena.used};
    }
    batch->num_tokens = batch->num_spans = 0;
}

void mt_batch_free(mt_batch *batch) {
    free(batch->tokens); // the block's start
    *batch = (mt_batch){0};
}

/* Copies a micro-batch to where the model's operations read it. */
static void mt_load_batch(mt_model *m, const mt_batch *batch) {
    const mt_ops *ops = m->ops;
    int64_t T = batch->num_tokens;
    MT_CHECK(T <= m->plan.max_tokens && batch->num_spans <= T);
    m->T = T;
    ops->memory_copy(m->tokens, batch->tokens, T * 4, m->stream);
    ops->memory_copy(m->labels, batch->labels, T * 4, m->stream);
    ops->memory_copy(m->positions, batch->positions, T * 4, m->stream);
    ops->memory_copy(m->loss_mask, batch->loss_mask, T * 4, m->stream);
    ops->memory_copy(m->token_index, batch->token_index, T * 8, m->stream);
    ops->memory_copy(m->device_spans, batch->spans, batch->num_spans * (int64_t)sizeof(mt_span), m->stream);
    m->spans = (mt_spans){.host = batch->spans, .device = m->device_spans, .count = batch->num_spans};
}

/* x[T, C] = dropout(word + position). */
static void mt_embed_forward(mt_model *m, void *x) {
    m->ops->embedding_forward(x, m->tokens, m->word_embedding.w, m->T, m->C, 0, m->V, false, m->dtype, m->stream);
    if (m->position_embedding.w)
        m->ops->embedding_forward(x, m->positions, m->position_embedding.w, m->T, m->C, 0,
                                  m->options->max_position_embeddings, true, m->dtype, m->stream);
    mt_dropout dropout = mt_model_dropout(m, -1, MT_DROP_EMBEDDING);
    if (dropout.p > 0)
        m->ops->dropout_add_forward(x, x, NULL, m->token_index, m->T, m->C, 0, &dropout, m->dtype, m->stream);
}

static void mt_embed_backward(mt_model *m, void *dx) {
    mt_dropout dropout = mt_model_dropout(m, -1, MT_DROP_EMBEDDING);
    if (dropout.p > 0)
        m->ops->dropout_add_backward(dx, dx, m->token_index, m->T, m->C, 0, &dropout, m->dtype, m->stream);
    if (m->position_embedding.w)
        m->ops->embedding_backward(m->position_embedding.dw, dx, m->positions, m->T, m->C, 0,
                                   m->options->max_position_embeddings, m->dtype, m->stream);
    m->ops->embedding_backward(m->word_embedding.dw, dx, m->tokens, m->T, m->C, 0, m->V, m->dtype, m->stream);
}

/* Embedding and layers; the result is in final_input. */
static void mt_forward_layers(mt_model *m, bool decode) {
    mt_embed_forward(m, m->activations[0].input);
    for (int64_t layer = 0; layer < m->L; layer++) {
        mt_activations *a = &m->activations[m->plan.train ? layer : 0];
        bool last = layer == m->L - 1;
        void *output = last ? m->final_input : m->plan.train ? m->activations[layer + 1].input : a->input;
        mt_layer_forward(m, layer, a, output, decode);
    }
}

/* Final norm, logits and the loss of every token. */
static void mt_loss_forward(mt_model *m) {
    int64_t T = m->T, vocabulary = m->options->vocab_size;
    float *weighted = m->training ? NULL : m->row_weighted;
    MT_CHECK(T <= m->plan.max_logits);
    mt_norm_forward(m, m->final_normed, m->final_mean, m->final_rstd, m->final_input, m->final_norm, m->final_norm_bias,
                    T);
    m->ops->linear_forward(m->logits, m->final_normed, m->lm_head.w, NULL, T, m->V, m->C, m->dtype, m->stream);
    m->ops->cross_entropy_forward(m->row_max, m->row_sum, m->row_target, weighted, m->logits, m->labels, T, m->V, 0,
                                  vocabulary, m->dtype, m->stream);
    m->ops->cross_entropy_loss(m->loss, m->training ? NULL : m->entropy, m->lse, m->row_max, m->row_sum, m->row_target,
                               weighted, T, m->stream);
    m->ops->loss_accumulate(m->sums, m->loss, m->loss_mask, T, m->stream);
    m->num_logits = T;
}

/* The loss is a sum over unmasked tokens, so its gradient by a token's loss is the mask itself. */
static void mt_loss_backward(mt_model *m) {
    int64_t T = m->T;
    m->ops->cross_entropy_backward(m->logits, m->logits, m->labels, m->lse, m->loss_mask, T, m->V, 0,
                                   m->options->vocab_size, m->dtype, m->stream);
    m->ops->linear_backward_weight(m->lm_head.dw, NULL, m->logits, m->final_normed, T, m->V, m->C, m->dtype, m->stream);
    m->ops->linear_backward_input(m->scratch.normed, m->logits, m->lm_head.w, T, m->V, m->C, m->dtype, m->stream);
    mt_norm_backward(m, m->scratch.residual, m->scratch.normed, NULL, m->final_input, m->final_mean, m->final_rstd,
                     m->final_norm, m->final_norm_bias, T);
}

void mt_model_forward(mt_model *m, const mt_batch *batch, bool training) {
    m->training = training;
    mt_load_batch(m, batch);
    mt_forward_layers(m, false);
    mt_loss_forward(m);
}

void mt_model_backward(mt_model *m) {
    MT_CHECK(m->plan.train && m->training);
    mt_loss_backward(m);
    for (int64_t layer = m->L - 1; layer >= 0; layer--) mt_layer_backward(m, layer, &m->activations[layer]);
    mt_embed_backward(m, m->scratch.residual);
}

/* Copies logits to the host as fp32, without the padding columns. */
static void mt_read_logits(mt_model *m, float *logits, int64_t rows) {
    int64_t V = m->V, vocabulary = m->options->vocab_size, size = mt_dtype_size(m->dtype);
    char *row = mt_malloc(V * size);
    for (int64_t t = 0; t < rows; t++) {
        m->ops->memory_copy(row, (char *)m->logits + t * V * size, V * size, m->stream);
        m->ops->stream_wait(m->stream);
        if (m->dtype == MT_F32)
            memcpy(logits + t * vocabulary, row, (size_t)(vocabulary * 4));
        else
            for (int64_t i = 0; i < vocabulary; i++) logits[t * vocabulary + i] = mt_bf16_to_f32(((uint16_t *)row)[i]);
    }
    free(row);
}

void mt_model_read(mt_model *m, float *loss, float *entropy, float *logits) {
    if (loss) m->ops->memory_copy(loss, m->loss, m->num_logits * 4, m->stream);
    if (entropy) {
        MT_CHECK(!m->training);
        m->ops->memory_copy(entropy, m->entropy, m->num_logits * 4, m->stream);
    }
    m->ops->stream_wait(m->stream);
    if (logits) mt_read_logits(m, logits, m->num_logits);
}

void mt_model_decode(mt_model *m, const mt_batch *batch, const int32_t *cache_rows, const int32_t *rows,
                     int64_t num_rows, float *logits) {
    MT_CHECK(m->plan.cache_rows > 0 && num_rows <= m->plan.max_logits);
    m->training = false;
    mt_load_batch(m, batch);
    m->ops->memory_copy(m->cache_rows, cache_rows, m->T * 4, m->stream);
    m->ops->memory_copy(m->logit_rows, rows, num_rows * 4, m->stream);
    mt_forward_layers(m, true);
    m->ops->gather_rows(m->scratch.hidden, m->final_input, m->logit_rows, num_rows, m->C, m->C, m->C, m->dtype,
                        m->stream);
    mt_norm_forward(m, m->final_normed, m->final_mean, m->final_rstd, m->scratch.hidden, m->final_norm,
                    m->final_norm_bias, num_rows);
    m->ops->linear_forward(m->logits, m->final_normed, m->lm_head.w, NULL, num_rows, m->V, m->C, m->dtype, m->stream);
    m->num_logits = num_rows;
    mt_read_logits(m, logits, num_rows);
}

/* ==== §11 schedules ============================================================================================== */

/* ==== §12 gradient buckets ======================================================================================= */
/* Gradients of a bucket are one flat stretch, so the data group sums them in one call. Invariant: after
 * mt_gradients_finish every rank holds the same gradients. */

static void mt_gradients_zero(mt_model *m) {
    for (int64_t i = 0; i < m->num_buckets; i++)
        m->ops->memory_zero(m->buckets[i].grads, m->buckets[i].count * 4, m->stream);
}

static void mt_gradients_finish(mt_model *m) {
    for (int64_t i = 0; i < m->num_buckets; i++)
        mt_all_reduce_sum(&m->grid->data, m->buckets[i].grads, m->buckets[i].count, MT_F32);
}

/* ==== §13 optimizer ============================================================================================== */

/* ==== §14 checkpoints and Hugging Face =========================================================================== */

/* ==== §15 generation ============================================================================================= */
/* From logits to new tokens, and from tokens to their log-probabilities. Invariants: what a sequence draws depends on
 * the seed, its id and the position, never on its neighbours in the batch; reading a prompt and adding a token are one
 * and the same: a pass over the tokens that the cache does not hold yet. */

/* ---- choosing a token */

/* Softmax weight of a token, relative to the likeliest. */
static double mt_token_weight(const float *logits, int32_t token, int32_t best, double temperature) {
    return exp(((double)logits[token] - (double)logits[best]) / temperature);
}

/* Of two tokens, whether `a` comes first: the likelier, or the lower id. */
static bool mt_token_before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

/* Restores a heap of tokens (a parent comes before its children) whose element i may be too low. */
static void mt_token_heap_sift(int32_t *heap, int64_t count, int64_t i, const float *logits) {
    int32_t token = heap[i];
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && mt_token_before(logits, heap[child + 1], heap[child])) child++;
        if (!mt_token_before(logits, heap[child], token)) break;
        heap[i] = heap[child];
    }
    heap[i] = token;
}

/* Takes the first token out of the heap order[0, count) and puts it at order[count - 1]. */
static int32_t mt_token_heap_pop(int32_t *order, int64_t count, const float *logits) {
    int32_t first = order[0];
    order[0] = order[count - 1];
    order[count - 1] = first;
    mt_token_heap_sift(order, count - 1, 0, logits);
    return first;
}

/* Sorts the tokens that may be chosen to the end of order[V], likeliest last, and no others: a heap is built in O(V),
 * and few tokens leave it. Returns their number, and in `total` their weight. */
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
        sum += mt_token_weight(logits, order[V - 1 - kept], best, t);
    }
    *total = sum;
    return kept;
}

/* The likeliest token, the lowest id among equals; -1 if a logit is not a number. */
static int32_t mt_token_likeliest(const float *logits, int64_t V) {
    int32_t best = 0;
    bool numbers = true;
    for (int32_t i = 0; i < V; i++) {
        numbers &= !isnan(logits[i]);
        if (logits[i] > logits[best]) best = i;
    }
    return numbers && isfinite(logits[best]) ? best : -1;
}

int32_t mt_sample(const float *logits, int64_t vocab_size, const mt_sampling *sampling, int64_t sequence,
                  int64_t position, int32_t *order) {
    int64_t V = vocab_size, kept = V;
    int32_t best = mt_token_likeliest(logits, V);
    if (best < 0 || sampling->temperature == 0) return best;
    for (int32_t i = 0; i < V; i++) order[i] = i;
    double total = 0, sum = 0, t = sampling->temperature;
    if (sampling->top_k > 0 || sampling->top_p < 1)
        kept = mt_tokens_keep(order, V, logits, best, sampling, &total);
    else
        for (int64_t i = V - 1; i >= 0; i--) total += mt_token_weight(logits, order[i], best, t);

    uint32_t words[4];
    mt_philox(words, mt_random_key(sampling->seed, MT_RANDOM_SAMPLE, 0), (uint64_t)position, (uint64_t)sequence);
    double uniform = (double)((uint64_t)words[0] << 21 | words[1] >> 11) * 0x1p-53; // [0, 1)
    for (int64_t i = V - 1; i > V - kept; i--) {
        sum += mt_token_weight(logits, order[i], best, t);
        if (sum > uniform * total) return order[i];
    }
    return order[V - kept];
}

/* ---- prompts */

int mt_sequence_begin(mt_sequence *sequence, int64_t id, const int32_t *prompt, int64_t num_prompt, int64_t context,
                      const mt_options *o, mt_error *error) {
    long long number = id + 1;
    if (num_prompt == 0) return mt_error_set(error, "prompt %lld is empty; give it at least one token", number);
    if (num_prompt >= context)
        return mt_error_set(error,
                            "prompt %lld has %lld tokens, which leaves no room for a new one in a context of %lld; "
                            "shorten it",
                            number, (long long)num_prompt, (long long)context);
    for (int64_t i = 0; i < num_prompt; i++)
        if (prompt[i] < 0 || prompt[i] >= o->vocab_size)
            return mt_error_set(error,
                                "prompt %lld: token %d is outside the model's vocabulary of %lld; take the model's own "
                                "tokenizer",
                                number, prompt[i], (long long)o->vocab_size);
    int64_t room = context - num_prompt, new_tokens = o->max_new_tokens < room ? o->max_new_tokens : room;
    *sequence = (mt_sequence){.id = id, .num_prompt = num_prompt, .num_tokens = num_prompt};
    sequence->max_tokens = num_prompt + new_tokens;
    sequence->finished = new_tokens == 0;
    sequence->tokens = mt_malloc(sequence->max_tokens * 4);
    memcpy(sequence->tokens, prompt, (size_t)(num_prompt * 4));
    return 0;
}

int64_t mt_sequences_unfinished(const mt_sequence *sequences, int64_t count) {
    int64_t unfinished = 0;
    for (int64_t s = 0; s < count; s++) unfinished += !sequences[s].finished;
    return unfinished;
}

/* ---- sequences in a batch */

enum { MT_PREFILL_TOKENS = 512 }; // a piece of a prompt: long enough for fast matrix products, short enough for memory

struct mt_generator {
    mt_model *model;
    mt_sampling sampling;
    mt_stops stops;
    int64_t max_sequences, rows_per_sequence; // sequence s owns cache rows [s, s + 1) * rows_per_sequence
    mt_batch batch;
    int32_t *cache_rows;  // [max_tokens] of the batch's tokens
    int32_t *logit_rows;  // [max_sequences] batch rows whose logits are wanted
    int64_t *logit_owner; // [max_sequences] and the sequences that they belong to
    int64_t num_logits;
    float *logits;  // [max_sequences, vocab_size]
    int32_t *order; // [vocab_size], for mt_sample
};

mt_model_plan mt_generator_plan(int64_t count, int64_t max_tokens, int64_t prompt_tokens) {
    int64_t piece = prompt_tokens < MT_PREFILL_TOKENS ? prompt_tokens : MT_PREFILL_TOKENS;
    return (mt_model_plan){.max_tokens = mt_max(piece, count),
                           .max_logits = count,
                           .cache_rows = count * max_tokens,
                           .max_position = max_tokens};
}

mt_generator *mt_generator_create(mt_model *model, int64_t max_sequences, const mt_sampling *sampling,
                                  const mt_stops *stops) {
    mt_generator *g = mt_calloc(sizeof *g);
    int64_t tokens = model->plan.max_tokens, vocabulary = model->options->vocab_size;
    MT_CHECK(model->plan.cache_rows <= INT32_MAX && max_sequences <= model->plan.max_logits);
    *g = (mt_generator){.model = model, .sampling = *sampling, .stops = *stops, .max_sequences = max_sequences};
    g->rows_per_sequence = model->plan.cache_rows / max_sequences;
    mt_batch_alloc(&g->batch, tokens);
    g->cache_rows = mt_malloc(tokens * 4);
    g->logit_rows = mt_malloc(max_sequences * 4);
    g->logit_owner = mt_malloc(max_sequences * 8);
    g->logits = mt_malloc(max_sequences * vocabulary * 4);
    g->order = mt_malloc(vocabulary * 4);
    return g;
}

void mt_generator_destroy(mt_generator *g) {
    if (!g) return;
    mt_batch_free(&g->batch);
    free(g->cache_rows);
    free(g->logit_rows);
    free(g->logit_owner);
    free(g->logits);
    free(g->order);
    free(g);
}

/* Adds the next tokens of sequence s that are not cached, as many as fit, as one span. Returns whether they all did. */
static bool mt_generator_add(mt_generator *g, mt_sequence *sequence, int64_t s) {
    mt_batch *batch = &g->batch;
    int64_t start = batch->num_tokens, first_row = s * g->rows_per_sequence, cached = sequence->num_cached;
    int64_t wanted = sequence->num_tokens - cached, room = g->model->plan.max_tokens - start;
    int64_t count = wanted < room ? wanted : room;
    if (count == 0) return false;
    for (int64_t i = 0; i < count; i++) {
        batch->tokens[start + i] = sequence->tokens[cached + i];
        batch->positions[start + i] = (int32_t)(cached + i);
        g->cache_rows[start + i] = (int32_t)(first_row + cached + i);
    }
    batch->spans[batch->num_spans++] = (mt_span){start, count, first_row, cached + count, true};
    batch->num_tokens += count;
    sequence->num_cached += count;
    if (count < wanted) return false;
    g->logit_rows[g->num_logits] = (int32_t)(start + count - 1);
    g->logit_owner[g->num_logits++] = s;
    return true;
}

/* Appends the token that the logits of row `row` of the last pass give. */
static int mt_generator_append(mt_generator *g, mt_sequence *sequence, int64_t row, mt_error *error) {
    int64_t vocabulary = g->model->options->vocab_size;
    int32_t token =
        mt_sample(g->logits + row * vocabulary, vocabulary, &g->sampling, sequence->id, sequence->num_tokens, g->order);
    if (token < 0)
        return mt_error_set(error,
                            "the model's logits after token %lld are not all numbers; its weights are damaged, or too "
                            "large for their precision",
                            (long long)sequence->num_tokens);
    sequence->tokens[sequence->num_tokens++] = token;
    sequence->finished = sequence->num_tokens >= sequence->max_tokens;
    for (int64_t i = 0; i < g->stops.count; i++) sequence->finished |= token == g->stops.ids[i];
    return 0;
}

int64_t mt_generator_step(mt_generator *g, mt_sequence *sequences, int64_t count, mt_error *error) {
    int64_t next = 0;
    MT_CHECK(count <= g->max_sequences);
    while (next < count) { // passes over the model; one, unless prompts are longer than a batch
        g->batch.num_tokens = g->batch.num_spans = g->num_logits = 0;
        for (; next < count; next++) {
            mt_sequence *sequence = &sequences[next];
            MT_CHECK(sequence->num_tokens > 0 && sequence->max_tokens <= g->rows_per_sequence);
            if (!sequence->finished && !mt_generator_add(g, sequence, next)) break;
        }
        if (g->batch.num_tokens == 0) break;
        mt_model_decode(g->model, &g->batch, g->cache_rows, g->logit_rows, g->num_logits, g->logits);
        for (int64_t row = 0; row < g->num_logits; row++)
            if (mt_generator_append(g, &sequences[g->logit_owner[row]], row, error) != 0) return -1;
    }
    return mt_sequences_unfinished(sequences, count);
}

/* ---- where texts begin and end */

/* Reads a JSON object that may be absent (then *json is NULL). */
static int mt_json_read_optional(json_t **json, const char *folder, const char *name, mt_error *error) {
    char path[4096];
    json_error_t problem;
    *json = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (access(path, F_OK) != 0) return 0;
    *json = json_load_file(path, 0, &problem);
    if (json_is_object(*json)) return 0;
    json_decref(*json);
    *json = NULL;
    return mt_error_set(error, "%s:%d: %s; mend the file or remove it", path, problem.line,
                        problem.text[0] ? problem.text : "is not a JSON object");
}

static void mt_stops_add(mt_stops *stops, int64_t id) {
    if (id >= 0 && id <= INT32_MAX && stops->count < MT_MAX_STOPS) stops->ids[stops->count++] = (int32_t)id;
}

int mt_stops_read(mt_stops *stops, const char *folder, const mt_options *options, mt_error *error) {
    json_t *config, *item;
    size_t i;
    stops->count = 0;
    if (mt_json_read_optional(&config, folder, "generation_config.json", error) != 0) return -1;
    json_t *eos = json_object_get(config, "eos_token_id");
    if (json_is_integer(eos)) mt_stops_add(stops, json_integer_value(eos));
    json_array_foreach(eos, i, item) if (json_is_integer(item)) mt_stops_add(stops, json_integer_value(item));
    if (stops->count == 0) mt_stops_add(stops, options->eos_token_id);
    json_decref(config);
    return 0;
}

/* Whether tokenizer.json's post-processor puts a special token before a text (Llama 3's does, GPT-2's does not). */
static bool mt_processor_adds_bos(const json_t *processor) {
    json_t *item, *single = json_object_get(processor, "single");
    size_t i;
    if (json_object_get(json_array_get(single, 0), "SpecialToken")) return true;
    bool found = false;
    json_array_foreach(json_object_get(processor, "processors"), i, item) found |= mt_processor_adds_bos(item);
    return found;
}

int mt_prompt_begins_with_bos(const char *path, bool *begins, mt_error *error) {
    json_t *config, *tokenizer = NULL;
    char folder[4096], sentencepiece[4200];
    struct stat status;
    snprintf(folder, sizeof folder, "%s", path);
    bool is_file = stat(path, &status) == 0 && S_ISREG(status.st_mode);
    char *slash = strrchr(folder, '/');
    if (is_file) snprintf(slash ? slash : folder, sizeof ".", slash ? "" : ".");
    snprintf(sentencepiece, sizeof sentencepiece, is_file ? "%s" : "%s/tokenizer.model", path);
    size_t length = strlen(sentencepiece);
    bool is_sentencepiece = length > 6 && strcmp(sentencepiece + length - 6, ".model") == 0;

    if (mt_json_read_optional(&config, folder, "tokenizer_config.json", error) != 0) return -1;
    if (!is_file || !is_sentencepiece)
        if (mt_json_read_optional(&tokenizer, folder, "tokenizer.json", error) != 0) {
            json_decref(config);
            return -1;
        }
    json_t *add_bos = json_object_get(config, "add_bos_token");
    if (json_is_boolean(add_bos))
        *begins = json_is_true(add_bos);
    else if (tokenizer)
        *begins = mt_processor_adds_bos(json_object_get(tokenizer, "post_processor"));
    else
        *begins = is_sentencepiece && access(sentencepiece, F_OK) == 0; // Llama's, as Hugging Face opens them
    json_decref(config);
    json_decref(tokenizer);
    return 0;
}

/* ---- log-probabilities of given tokens */

/* A file of floats that takes its place only when it is whole. */
typedef struct mt_float_file {
    const char *path; // NULL: not wanted
    char *temporary;
    FILE *file;
} mt_float_file;

static int mt_float_file_open(mt_float_file *out, const char *path, mt_error *error) {
    *out = (mt_float_file){.path = path};
    if (!path) return 0;
    int64_t length = (int64_t)strlen(path) + 32;
    out->temporary = mt_malloc(length);
    snprintf(out->temporary, (size_t)length, "%s.tmp.%ld", path, (long)getpid());
    out->file = fopen(out->temporary, "wb");
    if (out->file) return 0;
    int status = mt_error_set(error, "%s: cannot be written: %s", path, strerror(errno));
    free(out->temporary);
    *out = (mt_float_file){0};
    return status;
}

static int mt_float_file_write(mt_float_file *out, const float *values, int64_t count, mt_error *error) {
    if (!out->path || (int64_t)fwrite(values, 4, (size_t)count, out->file) == count) return 0;
    return mt_error_set(error, "%s: cannot be written: %s", out->path, strerror(errno));
}

/* Puts the file in its place if all went well so far, and otherwise removes it. Returns the status, or -1. */
static int mt_float_file_close(mt_float_file *out, int status, mt_error *error) {
    if (!out->path) return status;
    bool whole = status == 0 && fflush(out->file) == 0 && fsync(fileno(out->file)) == 0;
    int problem = errno;
    if (fclose(out->file) != 0 && whole) whole = false, problem = errno;
    if (whole && rename(out->temporary, out->path) != 0) whole = false, problem = errno;
    if (!whole) unlink(out->temporary);
    if (!whole && status == 0) status = mt_error_set(error, "%s: cannot be written: %s", out->path, strerror(problem));
    free(out->temporary);
    *out = (mt_float_file){0};
    return status;
}

/* Opens the sequences to score and counts them. */
static FILE *mt_score_open(const mt_options *o, int64_t *num_sequences, mt_error *error) {
    FILE *file = fopen(o->score, "rb");
    int64_t bytes_each = (o->seq_length + 1) * 4;
    if (!file || fseeko(file, 0, SEEK_END) != 0) {
        mt_error_set(error, "%s: cannot be read: %s", o->score, strerror(errno));
        if (file) fclose(file);
        return NULL;
    }
    int64_t bytes = ftello(file);
    rewind(file);
    *num_sequences = bytes / bytes_each;
    if (bytes <= 0 || bytes % bytes_each != 0) {
        mt_error_set(error,
                     "%s: %lld bytes are not whole sequences of --seq-length %lld + 1 int32 tokens (%lld bytes each); "
                     "give the length that the file was made for",
                     o->score, (long long)bytes, (long long)o->seq_length, (long long)bytes_each);
        fclose(file);
        return NULL;
    }
    if (o->max_sequences > 0 && o->max_sequences < *num_sequences) *num_sequences = o->max_sequences;
    return file;
}

/* Reads `count` sequences, of which `first` is the first, into a batch. `row` is room for one. */
static int mt_score_read(mt_batch *batch, FILE *file, int64_t first, int64_t count, int32_t *row, const mt_options *o,
                         mt_error *error) {
    int64_t T = o->seq_length;
    for (int64_t s = 0; s < count; s++) {
        if ((int64_t)fread(row, 4, (size_t)(T + 1), file) != T + 1)
            return mt_error_set(error, "%s: cannot be read: %s", o->score,
                                ferror(file) ? strerror(errno) : "it became shorter while it was read");
        for (int64_t i = 0; i <= T; i++)
            if (row[i] < 0 || row[i] >= o->vocab_size)
                return mt_error_set(error,
                                    "%s: token %d at position %lld of sequence %lld is outside the model's vocabulary "
                                    "of %lld",
                                    o->score, row[i], (long long)i, (long long)(first + s), (long long)o->vocab_size);
        for (int64_t i = 0, t = s * T; i < T; i++, t++) {
            batch->tokens[t] = row[i];
            batch->labels[t] = row[i + 1];
            batch->loss_mask[t] = 1;
            batch->positions[t] = (int32_t)i;
            batch->token_index[t] = (first + s) * T + i;
        }
        batch->spans[s] = (mt_span){s * T, T, s * T, T, true};
    }
    batch->num_tokens = count * T;
    batch->num_spans = count;
    return 0;
}

mt_model_plan mt_score_plan(const mt_options *options) {
    int64_t tokens = options->micro_batch_size * options->seq_length;
    return (mt_model_plan){.max_tokens = tokens, .max_logits = tokens, .max_position = options->seq_length};
}

/* Scores the open file, a micro-batch at a time, into the open outputs. */
static int mt_score_batches(mt_model *m, FILE *file, int64_t num_sequences, mt_float_file out[3], mt_error *error) {
    const mt_options *o = m->options;
    int64_t T = o->seq_length, tokens = o->micro_batch_size * T;
    mt_batch batch;
    mt_batch_alloc(&batch, tokens);
    int32_t *row = mt_malloc((T + 1) * 4);
    float *loss = mt_malloc(tokens * 4), *entropy = mt_malloc(tokens * 4);
    float *logits = out[2].path ? mt_malloc(tokens * o->vocab_size * 4) : NULL;
    int status = 0;
    for (int64_t first = 0; first < num_sequences && status == 0; first += o->micro_batch_size) {
        int64_t left = num_sequences - first, count = left < o->micro_batch_size ? left : o->micro_batch_size;
        status = mt_score_read(&batch, file, first, count, row, o, error);
        if (status != 0) break;
        mt_model_forward(m, &batch, false);
        mt_model_read(m, loss, entropy, logits);
        for (int64_t t = 0; t < count * T; t++) loss[t] = -loss[t]; // the label's log-probability
        status = mt_float_file_write(&out[0], loss, count * T, error);
        if (status == 0) status = mt_float_file_write(&out[1], entropy, count * T, error);
        if (status == 0) status = mt_float_file_write(&out[2], logits, count * T * o->vocab_size, error);
    }
    free(row);
    free(loss);
    free(entropy);
    free(logits);
    mt_batch_free(&batch);
    return status;
}

int64_t mt_score(mt_model *model, mt_error *error) {
    const mt_options *o = model->options;
    const char *paths[3] = {o->out, o->entropy_out, o->logits_out};
    mt_float_file out[3] = {{0}};
    int64_t num_sequences = 0;
    FILE *file = mt_score_open(o, &num_sequences, error);
    if (!file) return -1;
    int status = 0;
    for (int i = 0; i < 3 && status == 0; i++) status = mt_float_file_open(&out[i], paths[i], error);
    if (status == 0) status = mt_score_batches(model, file, num_sequences, out, error);
    for (int i = 0; i < 3; i++) status = mt_float_file_close(&out[i], status, error);
    fclose(file);
    return status == 0 ? num_sequences : -1;
}

/* ==== §16 the training step ====================================================================================== */
/* A step, start to end: zero, forward and backward by the schedule, sum over ranks, clip, update. Invariants: the loss
 * is a sum over tokens, divided once by the whole batch's count of unmasked tokens, so micro-batches and ranks do not
 * change it; the host waits for the device only where it reads the metrics. */

/* Loss and tokens of all ranks; sums[2], the squared norm, starts at 0. */
static void mt_sums_finish(mt_model *m, double sums[2]) {
    mt_all_reduce_sum(&m->grid->data, m->sums, 2, MT_F64);
    m->ops->memory_copy(sums, m->sums, 2 * 8, m->stream);
    m->ops->stream_wait(m->stream);
}

/* The weights' update, from finished gradients. */
static void mt_optimizer_step(mt_model *m, const mt_run_state *state) {
    const mt_options *o = m->options;
    for (int64_t i = 0; i < m->num_buckets; i++)
        m->ops->squared_norm(m->sums + 2, m->buckets[i].grads, m->buckets[i].count, m->stream);
    m->ops->gradient_scale(m->grad_scale, m->grad_norm, m->sums + 2, m->sums + 1, (float)o->clip_grad, m->stream);
    double step = (double)(state->optimizer_step + 1);
    mt_adamw adamw = {.lr = (float)mt_learning_rate(o, state->consumed_train_samples),
                      .beta1 = (float)o->adam_beta1,
                      .beta2 = (float)o->adam_beta2,
                      .eps = (float)o->adam_eps,
                      .bias_correction1 = (float)(1 - pow(o->adam_beta1, step)),
                      .bias_correction2 = (float)(1 - pow(o->adam_beta2, step))};
    for (int64_t i = 0; i < m->num_buckets; i++) {
        mt_bucket *b = &m->buckets[i];
        int64_t start[3] = {0, b->decay_count, b->count}; // decayed matrices, then the rest
        for (int k = 0; k < 2; k++) {
            int64_t first = start[k], count = start[k + 1] - first;
            adamw.weight_decay = k == 0 ? (float)mt_weight_decay(o, state->consumed_train_samples) : 0;
            m->ops->adamw_step(mt_at(m, b->params, first), b->master ? b->master + first : NULL, b->m + first,
                               b->v + first, b->grads + first, m->grad_scale, count, &adamw, m->dtype, m->stream);
        }
    }
}

int mt_train_step(mt_model *m, mt_run_state *state, int64_t micro_batches, mt_batch_source *source, void *context,
                  mt_batch *batch, mt_metrics *metrics, mt_error *error) {
    double begin = mt_time(), sums[2];
    float grad_norm;
    mt_gradients_zero(m);
    m->ops->memory_zero(m->sums, 3 * 8, m->stream);
    mt_step *steps = mt_malloc(2 * micro_batches * (int64_t)sizeof(mt_step));
    int64_t count = mt_schedule_1f1b(steps, 1, 0, micro_batches), tokens = 0;
    int status = 0;
    for (int64_t i = 0; i < count && status == 0; i++) {
        if (steps[i].kind == MT_STEP_BACKWARD) {
            mt_model_backward(m);
            continue;
        }
        status = source(context, steps[i].micro_batch, batch, error);
        if (status == 0) mt_model_forward(m, batch, true);
        tokens += batch->num_tokens;
    }
    free(steps);
    if (status != 0) return status;

    mt_sums_finish(m, sums);
    if (!isfinite(sums[0]))
        return mt_error_set(error,
                            "iteration %lld: the loss is %g; lower --lr or look at the data (nothing was saved since)",
                            (long long)state->iteration + 1, sums[0]);
    mt_gradients_finish(m);
    mt_optimizer_step(m, state);
    m->ops->memory_copy(&grad_norm, m->grad_norm, 4, m->stream);
    m->ops->stream_wait(m->stream);
    *metrics = (mt_metrics){.loss = sums[1] > 0 ? sums[0] / sums[1] : 0,
                            .grad_norm = grad_norm,
                            .learning_rate = mt_learning_rate(m->options, state->consumed_train_samples),
                            .weight_decay = mt_weight_decay(m->options, state->consumed_train_samples),
                            .tokens = (double)(tokens * m->grid->data.size)};
    if (!isfinite(metrics->grad_norm))
        return mt_error_set(error, "iteration %lld: the gradient norm is %g; lower --lr or look at the data",
                            (long long)state->iteration + 1, metrics->grad_norm);
    state->iteration++;
    state->optimizer_step++;
    state->consumed_train_samples += micro_batches * m->options->micro_batch_size * m->grid->data.size;
    metrics->seconds = mt_time() - begin;
    return 0;
}

int mt_evaluate(mt_model *m, int64_t micro_batches, mt_batch_source *source, void *context, mt_batch *batch,
                double *loss, mt_error *error) {
    double sums[2];
    m->ops->memory_zero(m->sums, 3 * 8, m->stream);
    for (int64_t i = 0; i < micro_batches; i++) {
        if (source(context, i, batch, error) != 0) return -1;
        mt_model_forward(m, batch, false);
    }
    mt_sums_finish(m, sums);
    *loss = sums[1] > 0 ? sums[0] / sums[1] : 0;
    return 0;
}

/* ==== §16b reports =============================================================================================== */

/* Bytes of memory that this process has held at most. */
static int64_t mt_peak_memory(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (int64_t)usage.ru_maxrss * 1024;
}

int mt_report_open(mt_report *report, const mt_options *options, const mt_grid *grid, const mt_run_state *state,
                   mt_error *error) {
    *report = (mt_report){.options = options, .world_size = grid->world.size, .first_iteration = state->iteration};
    report->prints = grid->world.rank == 0;
    report->start = mt_time();
    if (!report->prints || !options->metrics) return 0;
    report->metrics = fopen(options->metrics, state->iteration > 0 ? "a" : "w"); // a resumed run goes on in its file
    if (!report->metrics)
        return mt_error_set(error, "--metrics %s: cannot be written: %s", options->metrics, strerror(errno));
    return 0;
}

void mt_report_close(mt_report *report) {
    if (report->metrics) fclose(report->metrics);
    report->metrics = NULL;
}

void mt_report_line(const mt_report *report, const char *format, ...) {
    if (!report->prints) return;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
}

/* Ends a line of the metrics file; each line is whole on the disk before the next step begins. */
static int mt_report_flush(const mt_report *report, mt_error *error) {
    if (fflush(report->metrics) == 0 && !ferror(report->metrics)) return 0;
    return mt_error_set(error, "--metrics %s: cannot be written: %s", report->options->metrics, strerror(errno));
}

int mt_report_iteration(const mt_report *report, const mt_run_state *state, const mt_metrics *metrics,
                        mt_error *error) {
    const mt_options *o = report->options;
    int64_t iteration = state->iteration, total = o->train_iters;
    if (!report->prints || (iteration % o->log_interval != 0 && iteration != total)) return 0;
    double rate = metrics->tokens / metrics->seconds;
    double flops = mt_flops(o, (int64_t)metrics->tokens / o->seq_length) / metrics->seconds / report->world_size;
    double pace = (mt_time() - report->start) / (double)(iteration - report->first_iteration);
    int64_t left = (int64_t)(pace * (double)(total - iteration) + 0.5);
    mt_report_line(
        report, "%6lld/%lld %3d%%  loss %.4f  grad norm %.3f  lr %.2e  %.0f tokens/s  %.1f GFLOP/s  %lld:%02lld left",
        (long long)iteration, (long long)total, (int)(100 * iteration / total), metrics->loss, metrics->grad_norm,
        metrics->learning_rate, rate, flops * 1e-9, (long long)(left / 60), (long long)(left % 60));
    if (!report->metrics) return 0;
    fprintf(report->metrics,
            "{\"iteration\": %lld, \"lm_loss\": %.17g, \"grad_norm\": %.17g, \"learning_rate\": %.17g, "
            "\"weight_decay\": %.17g, \"consumed_samples\": %lld, \"tokens_per_second\": %.6g, "
            "\"tflops_per_device\": %.6g, \"iteration_ms\": %.6g, \"peak_memory_bytes\": %lld}\n",
            (long long)iteration, metrics->loss, metrics->grad_norm, metrics->learning_rate, metrics->weight_decay,
            (long long)state->consumed_train_samples, rate, flops * 1e-12, 1e3 * metrics->seconds,
            (long long)mt_peak_memory());
    return mt_report_flush(report, error);
}

int mt_report_evaluation(const mt_report *report, const mt_run_state *state, const char *split, double loss,
                         mt_error *error) {
    mt_report_line(report, "%6lld  %s loss %.4f  perplexity %.2f", (long long)state->iteration, split, loss, exp(loss));
    if (!report->metrics) return 0;
    fprintf(report->metrics, "{\"iteration\": %lld, \"%s_loss\": %.17g, \"%s_perplexity\": %.17g}\n",
            (long long)state->iteration, split, loss, split, exp(loss));
    return mt_report_flush(report, error);
}
