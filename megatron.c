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
 *   §10  the model
 *   §11  schedules
 *   §12  gradient buckets
 *   §13  optimizer
 *   §14  checkpoints and Hugging Face
 *   §15  generation
 *   §16  the training step
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

/* ==== §10 the model ============================================================================================== */

/* ==== §11 schedules ============================================================================================== */

/* ==== §12 gradient buckets ======================================================================================= */

/* ==== §13 optimizer ============================================================================================== */

/* ==== §14 checkpoints and Hugging Face =========================================================================== */

/* ==== §15 generation ============================================================================================= */

/* ==== §16 the training step ====================================================================================== */
