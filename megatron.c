/* megatron.c: trains and runs GPT-family transformers.
 *
 * Contents
 *   §1   checks, arenas, random numbers
 *   §2   options and their only validator
 *   §2a  the table
 *   §2b  the command line and YAML
 *   §2c  config.json of Hugging Face
 *   §2d  derivation and checks
 *   §2e  printing
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
/* A run is described by one flat struct and by nothing else. Invariants: the table below is the only place that knows
 * an option's name, type, default and range; command line, YAML file, --help and the printed configuration are loops
 * over it. A value that the user gave is marked in `given`, so that config.json never overrides it. Every rule between
 * options is in mt_options_finish, which allocates nothing that a run needs and can be called again. */

/* What earlier parts need from later ones. */
enum { MT_CONFIG_BYTES = 1 << 22 };
static int mt_options_take_shape(mt_options *options, const char *json, int64_t bytes, const char *path,
                                 bool has_weights, mt_error *error);
static int mt_options_check_ranges(const mt_options *options, mt_program program, mt_error *error);
static void mt_options_derive_sizes(mt_options *options);
static void mt_options_help(mt_program program, FILE *file);

/* ==== §2a the table ============================================================================================== */
/* A row per option, and the few functions that read and write the field that a row points at. */

typedef enum mt_option_type {
    MT_FLAG,   // --swiglu
    MT_NO,     // --disable-bias-linear: clears its field, whose default is true
    MT_INT,    // plain decimals
    MT_REAL,   // decimals, or with an exponent
    MT_STRING, // one word
    MT_CHOICE, // one of a|b|c
    MT_LIST,   // one word or more
} mt_option_type;

/* Where a value may come from besides the user. */
typedef enum mt_option_origin {
    MT_OF_RUN,     // from nowhere
    MT_OF_MODEL,   // the model's config.json, unless the user gave it
    MT_OF_WEIGHTS, // the same, and weights that are loaded cannot do with another value
} mt_option_origin;

enum { MT_TRAIN = MT_PROGRAM_TRAIN, MT_INFER = MT_PROGRAM_INFER, MT_BOTH = MT_PROGRAM_TRAIN | MT_PROGRAM_INFER };

/* A row per option. A row without a name opens a group, which `help` names. */
typedef struct mt_option {
    const char *name; // as on the command line; with underscores in YAML
    mt_option_type type;
    size_t offset; // of the field in mt_options; an alias is a later row with the same one
    int programs;
    mt_option_origin origin;
    const char *fallback; // the default as the user would write it; NULL: none, or derived
    const char *values;   // numbers: their range; choices: all of them; words: what they are
    const char *help;
} mt_option;

#define MT_AT(field) offsetof(mt_options, field)

static const mt_option mt_option_table[] = {
    {.help = "model"},
    {"num-layers", MT_INT, MT_AT(num_layers), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,10000]", "transformer layers"},
    {"hidden-size", MT_INT, MT_AT(hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,1048576]", "width of hidden states"},
    {"ffn-hidden-size", MT_INT, MT_AT(ffn_hidden_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,16777216]",
     "width of the MLP; 4 hidden sizes, with --swiglu 8/3 rounded down to 64s, when not given"},
    {"num-attention-heads", MT_INT, MT_AT(num_attention_heads), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "query heads"},
    {"group-query-attention", MT_FLAG, MT_AT(group_query_attention), MT_TRAIN, MT_OF_MODEL, NULL, NULL,
     "several query heads share a key and value head"},
    {"num-query-groups", MT_INT, MT_AT(num_query_groups), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "key and value heads with --group-query-attention; 1 when not given"},
    {"kv-channels", MT_INT, MT_AT(kv_channels), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,65536]",
     "channels of a head; hidden size / heads when not given"},
    {"max-position-embeddings", MT_INT, MT_AT(max_position_embeddings), MT_TRAIN, MT_OF_MODEL, NULL, "[1,1073741824]",
     "positions that a token may have; the sequence length when not given"},
    {"vocab-size", MT_INT, MT_AT(vocab_size), MT_TRAIN, MT_OF_WEIGHTS, NULL, "[1,16777216]",
     "tokens of the vocabulary; the tokenizer's when not given"},
    {"make-vocab-size-divisible-by", MT_INT, MT_AT(make_vocab_size_divisible_by), MT_TRAIN, MT_OF_RUN, "128",
     "[1,1048576]", "the embedding has rows to a multiple of this"},
    {"normalization", MT_CHOICE, MT_AT(normalization), MT_TRAIN, MT_OF_WEIGHTS, "LayerNorm", "LayerNorm|RMSNorm",
     "kind of norm"},
    {"norm-epsilon", MT_REAL, MT_AT(norm_epsilon), MT_TRAIN, MT_OF_WEIGHTS, "1e-5", "(0,1)", "epsilon of the norms"},
    {"layernorm-epsilon", MT_REAL, MT_AT(norm_epsilon), MT_TRAIN, MT_OF_WEIGHTS, "1e-5", "(0,1)",
     "the same by its older name"},
    {"swiglu", MT_FLAG, MT_AT(swiglu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL, "gated MLP with SiLU instead of GELU"},
    {"openai-gelu", MT_FLAG, MT_AT(openai_gelu), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "GELU by its tanh approximation, as GPT-2 has it"},
    {"qk-layernorm", MT_FLAG, MT_AT(qk_layernorm), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "norm of every query and key head"},
    {"untie-embeddings-and-output-weights", MT_FLAG, MT_AT(untie_embeddings_and_output_weights), MT_TRAIN,
     MT_OF_WEIGHTS, NULL, NULL, "an output layer of its own"},
    {"disable-bias-linear", MT_NO, MT_AT(add_bias_linear), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "linear layers without biases"},
    {"add-qkv-bias", MT_FLAG, MT_AT(add_qkv_bias), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "biases on queries, keys and values all the same"},
    {"init-method-std", MT_REAL, MT_AT(init_method_std), MT_TRAIN, MT_OF_MODEL, "0.02", "[0,100]",
     "standard deviation of initial weights"},
    {"hidden-dropout", MT_REAL, MT_AT(hidden_dropout), MT_TRAIN, MT_OF_MODEL, "0.1", "[0,1)",
     "dropout of embeddings and of what a block adds"},
    {"attention-dropout", MT_REAL, MT_AT(attention_dropout), MT_TRAIN, MT_OF_MODEL, "0.1", "[0,1)",
     "dropout of attention probabilities"},
    {"window-size", MT_INT, MT_AT(window_size), MT_TRAIN, MT_OF_MODEL, NULL, "[1,1073741824]",
     "sliding window: keys that a query sees, itself included; all when not given"},

    {.help = "positions"},
    {"position-embedding-type", MT_CHOICE, MT_AT(position_embedding_type), MT_TRAIN, MT_OF_WEIGHTS, "learned_absolute",
     "learned_absolute|rope|none", "how positions enter"},
    {"rotary-base", MT_REAL, MT_AT(rotary_base), MT_TRAIN, MT_OF_MODEL, "10000", "(0,1e15]",
     "base of rotary positions"},
    {"rotary-percent", MT_REAL, MT_AT(rotary_percent), MT_TRAIN, MT_OF_WEIGHTS, "1", "(0,1]",
     "share of a head's channels that turn"},
    {"rotary-interleaved", MT_FLAG, MT_AT(rotary_interleaved), MT_TRAIN, MT_OF_WEIGHTS, NULL, NULL,
     "turn channels (2i, 2i + 1) together, not (i, i + half)"},
    {"rotary-seq-len-interpolation-factor", MT_INT, MT_AT(rotary_seq_len_interpolation_factor), MT_TRAIN, MT_OF_RUN,
     NULL, "[1,1048576]", "linear scaling of positions by this"},
    {"use-rope-scaling", MT_FLAG, MT_AT(use_rope_scaling), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "the scaling of Llama 3.1: --rope-scaling-type llama3"},
    {"rope-scaling-type", MT_CHOICE, MT_AT(rope_scaling_type), MT_TRAIN, MT_OF_MODEL, "none", "none|linear|llama3|yarn",
     "how rotary positions are stretched"},
    {"rope-scaling-factor", MT_REAL, MT_AT(rope_scaling_factor), MT_TRAIN, MT_OF_MODEL, NULL, "[1,1048576]",
     "by how much; 8 for llama3 when not given"},
    {"rope-low-freq-factor", MT_REAL, MT_AT(rope_low_freq_factor), MT_TRAIN, MT_OF_MODEL, "1", "(0,1048576]",
     "llama3: wavelengths above original / this are stretched"},
    {"rope-high-freq-factor", MT_REAL, MT_AT(rope_high_freq_factor), MT_TRAIN, MT_OF_MODEL, "4", "(0,1048576]",
     "llama3: wavelengths below original / this stay"},
    {"original-max-position-embeddings", MT_INT, MT_AT(original_max_position_embeddings), MT_TRAIN, MT_OF_MODEL, NULL,
     "[1,1073741824]", "llama3, yarn: positions before the stretch; 8192 for llama3 when not given"},
    {"yarn-beta-fast", MT_REAL, MT_AT(yarn_beta_fast), MT_TRAIN, MT_OF_MODEL, "32", "(0,1048576]",
     "yarn: turns above which channels stay"},
    {"yarn-beta-slow", MT_REAL, MT_AT(yarn_beta_slow), MT_TRAIN, MT_OF_MODEL, "1", "(0,1048576]",
     "yarn: turns below which channels are stretched"},
    {"yarn-mscale", MT_REAL, MT_AT(yarn_mscale), MT_TRAIN, MT_OF_MODEL, NULL, "[0,1048576]",
     "yarn: scale of attention is g(mscale) / g(mscale-all-dim), g(m) = 0.1 m ln(factor) + 1"},
    {"yarn-mscale-all-dim", MT_REAL, MT_AT(yarn_mscale_all_dim), MT_TRAIN, MT_OF_MODEL, NULL, "[0,1048576]",
     "yarn: see --yarn-mscale"},
    {"yarn-attention-factor", MT_REAL, MT_AT(yarn_attention_factor), MT_TRAIN, MT_OF_MODEL, NULL, "(0,1048576]",
     "yarn: that scale itself; g(1) when none is given"},

    {.help = "batches and length of training"},
    {"micro-batch-size", MT_INT, MT_AT(micro_batch_size), MT_BOTH, MT_OF_RUN, "1", "[1,1048576]",
     "sequences a rank computes at once; infer: with --score"},
    {"global-batch-size", MT_INT, MT_AT(global_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "[1,1073741824]",
     "sequences of a step; micro batch size x ranks when not given"},
    {"rampup-batch-size", MT_LIST, MT_AT(rampup_batch_size), MT_TRAIN, MT_OF_RUN, NULL, "START INCREMENT SAMPLES",
     "grow the global batch from START by INCREMENT over the first SAMPLES"},
    {"seq-length", MT_INT, MT_AT(seq_length), MT_BOTH, MT_OF_RUN, NULL, "[1,1073741824]",
     "tokens of a sequence; infer: with --score"},
    {"train-iters", MT_INT, MT_AT(train_iters), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]", "steps to train"},
    {"train-samples", MT_INT, MT_AT(train_samples), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences to train on, instead"},
    {"exit-duration-in-mins", MT_REAL, MT_AT(exit_duration_in_mins), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e9]",
     "save and stop after so many minutes"},
    {"bf16", MT_FLAG, MT_AT(bf16), MT_BOTH, MT_OF_RUN, NULL, NULL, "parameters and activations in bf16, else fp32"},
    {"device", MT_CHOICE, MT_AT(device), MT_BOTH, MT_OF_RUN, "cpu", "cpu",
     "where to compute; this version has the cpu only"},
    {"seed", MT_INT, MT_AT(seed), MT_BOTH, MT_OF_RUN, "1234", "[0,9223372036854775807]", "seed of everything drawn"},

    {.help = "learning rate and optimizer"},
    {"lr", MT_REAL, MT_AT(lr), MT_TRAIN, MT_OF_RUN, NULL, "(0,1e6]", "highest learning rate"},
    {"min-lr", MT_REAL, MT_AT(min_lr), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]", "lowest learning rate after warm-up"},
    {"lr-decay-style", MT_CHOICE, MT_AT(lr_decay_style), MT_TRAIN, MT_OF_RUN, "linear",
     "constant|linear|cosine|inverse-square-root|WSD", "how it falls"},
    {"lr-decay-iters", MT_INT, MT_AT(lr_decay_iters), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "steps until the lowest; --train-iters when not given"},
    {"lr-decay-samples", MT_INT, MT_AT(lr_decay_samples), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences until the lowest; --train-samples when not given"},
    {"lr-wsd-decay-style", MT_CHOICE, MT_AT(lr_wsd_decay_style), MT_TRAIN, MT_OF_RUN, "exponential",
     "exponential|linear|cosine|minus_sqrt", "how WSD falls at its end"},
    {"lr-wsd-decay-iters", MT_INT, MT_AT(lr_wsd_decay_iters), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "steps of that fall"},
    {"lr-wsd-decay-samples", MT_INT, MT_AT(lr_wsd_decay_samples), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences of that fall"},
    {"lr-warmup-iters", MT_INT, MT_AT(lr_warmup_iters), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "steps of linear warm-up"},
    {"lr-warmup-samples", MT_INT, MT_AT(lr_warmup_samples), MT_TRAIN, MT_OF_RUN, "0", "[0,1000000000000]",
     "sequences of linear warm-up"},
    {"lr-warmup-fraction", MT_REAL, MT_AT(lr_warmup_fraction), MT_TRAIN, MT_OF_RUN, NULL, "[0,1)",
     "warm-up as a share of the decay"},
    {"lr-warmup-init", MT_REAL, MT_AT(lr_warmup_init), MT_TRAIN, MT_OF_RUN, "0", "[0,1e6]",
     "learning rate that warm-up begins with"},
    {"weight-decay", MT_REAL, MT_AT(weight_decay), MT_TRAIN, MT_OF_RUN, "0.01", "[0,1e6]",
     "decay of matrices; vectors have none"},
    {"start-weight-decay", MT_REAL, MT_AT(start_weight_decay), MT_TRAIN, MT_OF_RUN, NULL, "[0,1e6]",
     "weight decay at the start of its ramp"},
    {"end-weight-decay", MT_REAL, MT_AT(end_weight_decay), MT_TRAIN, MT_OF_RUN, NULL, "[0,1e6]",
     "weight decay at the end of its ramp"},
    {"weight-decay-incr-style", MT_CHOICE, MT_AT(weight_decay_incr_style), MT_TRAIN, MT_OF_RUN, "constant",
     "constant|linear|cosine", "how weight decay ramps"},
    {"adam-beta1", MT_REAL, MT_AT(adam_beta1), MT_TRAIN, MT_OF_RUN, "0.9", "[0,1)", "decay of the first moment"},
    {"adam-beta2", MT_REAL, MT_AT(adam_beta2), MT_TRAIN, MT_OF_RUN, "0.999", "[0,1)", "decay of the second moment"},
    {"adam-eps", MT_REAL, MT_AT(adam_eps), MT_TRAIN, MT_OF_RUN, "1e-8", "(0,1]", "added to its square root"},
    {"clip-grad", MT_REAL, MT_AT(clip_grad), MT_TRAIN, MT_OF_RUN, "1", "[0,1e30]",
     "largest norm of the gradient; 0 does not clip"},

    {.help = "data"},
    {"data-path", MT_LIST, MT_AT(data_path), MT_TRAIN, MT_OF_RUN, NULL, "PREFIX",
     "indexed datasets, cut by --split: one prefix, several, or weight prefix weight prefix ..."},
    {"split", MT_STRING, MT_AT(split), MT_TRAIN, MT_OF_RUN, "969,30,1", "A,B,C",
     "parts of --data-path to train, validate and test on"},
    {"train-data-path", MT_LIST, MT_AT(train_data_path), MT_TRAIN, MT_OF_RUN, NULL, "PREFIX",
     "datasets to train on, instead of --data-path"},
    {"valid-data-path", MT_LIST, MT_AT(valid_data_path), MT_TRAIN, MT_OF_RUN, NULL, "PREFIX",
     "datasets to validate on"},
    {"test-data-path", MT_LIST, MT_AT(test_data_path), MT_TRAIN, MT_OF_RUN, NULL, "PREFIX", "datasets to test on"},
    {"mock-data", MT_FLAG, MT_AT(mock_data), MT_TRAIN, MT_OF_RUN, NULL, NULL, "make tokens up"},
    {"tokens-file", MT_STRING, MT_AT(tokens_file), MT_TRAIN, MT_OF_RUN, NULL, "FILE",
     "int32 [iterations, global batch, seq + 1], fed in order"},
    {"tokenizer-type", MT_CHOICE, MT_AT(tokenizer_type), MT_BOTH, MT_OF_RUN, NULL,
     "HuggingFaceTokenizer|SentencePieceTokenizer|GPT2BPETokenizer|ByteLevel",
     "kind of tokenizer; found in the --load folder when not given"},
    {"tokenizer-model", MT_STRING, MT_AT(tokenizer_model), MT_BOTH, MT_OF_RUN, NULL, "PATH", "its file or folder"},
    {"dataloader-type", MT_CHOICE, MT_AT(dataloader_type), MT_TRAIN, MT_OF_RUN, "single", "single|cyclic",
     "samples in order, once; or shuffled anew in every epoch"},
    {"reset-position-ids", MT_FLAG, MT_AT(reset_position_ids), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "positions begin anew after an end of document"},
    {"reset-attention-mask", MT_FLAG, MT_AT(reset_attention_mask), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "documents of a sample do not see one another"},
    {"eod-mask-loss", MT_FLAG, MT_AT(eod_mask_loss), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "no loss where the input is an end of document"},

    {.help = "evaluation, checkpoints, reports"},
    {"eval-interval", MT_INT, MT_AT(eval_interval), MT_TRAIN, MT_OF_RUN, "1000", "[1,1000000000000]",
     "steps between evaluations"},
    {"eval-iters", MT_INT, MT_AT(eval_iters), MT_TRAIN, MT_OF_RUN, "100", "[0,1000000000]",
     "global batches of an evaluation; 0: none"},
    {"log-interval", MT_INT, MT_AT(log_interval), MT_TRAIN, MT_OF_RUN, "1", "[1,1000000000000]",
     "steps between printed lines; Megatron prints every 100th"},
    {"metrics", MT_STRING, MT_AT(metrics), MT_TRAIN, MT_OF_RUN, NULL, "FILE.jsonl", "write an object a step"},
    {"load", MT_STRING, MT_AT(load), MT_BOTH, MT_OF_RUN, NULL, "DIR",
     "a Hugging Face folder, or one that --save wrote: shape and weights"},
    {"hf-config", MT_STRING, MT_AT(hf_config), MT_TRAIN, MT_OF_RUN, NULL, "FILE",
     "take the shape from a config.json, weights at random"},
    {"save", MT_STRING, MT_AT(save), MT_TRAIN, MT_OF_RUN, NULL, "DIR", "write checkpoints here"},
    {"save-interval", MT_INT, MT_AT(save_interval), MT_TRAIN, MT_OF_RUN, NULL, "[1,1000000000000]",
     "steps between checkpoints; only at the end when not given"},
    {"finetune", MT_FLAG, MT_AT(finetune), MT_TRAIN, MT_OF_RUN, NULL, NULL,
     "load weights only and begin at iteration 0"},
    {"no-load-optim", MT_FLAG, MT_AT(no_load_optim), MT_TRAIN, MT_OF_RUN, NULL, NULL, "do not load optimizer state"},
    {"no-save-optim", MT_FLAG, MT_AT(no_save_optim), MT_TRAIN, MT_OF_RUN, NULL, NULL, "do not save optimizer state"},
    {"config", MT_STRING, MT_AT(config), MT_BOTH, MT_OF_RUN, NULL, "FILE.yaml",
     "read options from a file; the command line wins"},

    {.help = "generation (interactive without --prompt)"},
    {"prompt", MT_LIST, MT_AT(prompt), MT_INFER, MT_OF_RUN, NULL, "TEXT", "texts to continue"},
    {"prompt-tokens", MT_STRING, MT_AT(prompt_tokens), MT_INFER, MT_OF_RUN, NULL, "1,2,3",
     "tokens to continue; needs no tokenizer"},
    {"print-tokens", MT_FLAG, MT_AT(print_tokens), MT_INFER, MT_OF_RUN, NULL, NULL, "print tokens, not text"},
    {"max-new-tokens", MT_INT, MT_AT(max_new_tokens), MT_INFER, MT_OF_RUN, "256", "[0,1073741824]",
     "tokens to add to a prompt"},
    {"temperature", MT_REAL, MT_AT(temperature), MT_INFER, MT_OF_RUN, "1", "[0,1e6]", "0: always the likeliest token"},
    {"top-k", MT_INT, MT_AT(top_k), MT_INFER, MT_OF_RUN, "0", "[0,16777216]", "draw from the k likeliest; 0: from all"},
    {"top-p", MT_REAL, MT_AT(top_p), MT_INFER, MT_OF_RUN, "1", "(0,1]",
     "draw from the likeliest that together have probability p"},

    {.help = "scoring"},
    {"score", MT_STRING, MT_AT(score), MT_INFER, MT_OF_RUN, NULL, "FILE.i32",
     "int32 [sequences, seq length + 1] to score, forward only"},
    {"out", MT_STRING, MT_AT(out), MT_INFER, MT_OF_RUN, NULL, "FILE.f32", "log-probability of every label"},
    {"entropy-out", MT_STRING, MT_AT(entropy_out), MT_INFER, MT_OF_RUN, NULL, "FILE.f32",
     "entropy of every distribution"},
    {"logits-out", MT_STRING, MT_AT(logits_out), MT_INFER, MT_OF_RUN, NULL, "FILE.f32", "all logits"},
    {"max-sequences", MT_INT, MT_AT(max_sequences), MT_INFER, MT_OF_RUN, NULL, "[1,1000000000000]",
     "sequences to score; all when not given"},
};

enum { MT_NUM_OPTIONS = sizeof mt_option_table / sizeof mt_option_table[0] };

_Static_assert(MT_NUM_OPTIONS <= 64 * sizeof((mt_options *)0)->given / sizeof(uint64_t),
               "a bit of mt_options.given for every row");

/* The first row of a field: aliases share its bit in `given`. */
static const mt_option *mt_option_of(size_t offset) {
    const mt_option *row = mt_option_table;
    while (!row->name || row->offset != offset) row++;
    return row;
}

static bool mt_option_given(const mt_options *options, size_t offset) {
    int64_t index = mt_option_of(offset) - mt_option_table;
    return options->given[index / 64] >> index % 64 & 1;
}

static void mt_option_mark(mt_options *options, const mt_option *row) {
    int64_t index = mt_option_of(row->offset) - mt_option_table;
    options->given[index / 64] |= (uint64_t)1 << index % 64;
}

static bool *mt_option_bool(const mt_options *options, const mt_option *row) {
    return (bool *)((char *)options + row->offset);
}

static int64_t *mt_option_int(const mt_options *options, const mt_option *row) {
    return (int64_t *)((char *)options + row->offset);
}

static double *mt_option_real(const mt_options *options, const mt_option *row) {
    return (double *)((char *)options + row->offset);
}

static char **mt_option_string(const mt_options *options, const mt_option *row) {
    return (char **)((char *)options + row->offset);
}

static mt_strings *mt_option_list(const mt_options *options, const mt_option *row) {
    return (mt_strings *)((char *)options + row->offset);
}

static void mt_strings_free(mt_strings *strings) {
    for (int64_t i = 0; i < strings->count; i++) free(strings->items[i]);
    free(strings->items);
    *strings = (mt_strings){0};
}

static void mt_strings_add(mt_strings *strings, const char *text) {
    strings->items = mt_realloc(strings->items, (strings->count + 1) * (int64_t)sizeof(char *));
    strings->items[strings->count++] = mt_strdup(text);
}

static void mt_string_set(char **string, const char *text) {
    char *copy = text ? mt_strdup(text) : NULL; // before the free: text may be *string
    free(*string);
    *string = copy;
}

/* The fewest digits that read back as the same double. */
static void mt_real_print(char text[32], double value) {
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) return;
    }
}

/* The value as the user would write it, to free; "" for a value that is not there. */
static char *mt_option_text(const mt_options *options, const mt_option *row) {
    char text[32] = "";
    switch (row->type) {
    case MT_FLAG:
    case MT_NO:
        return mt_strdup(*mt_option_bool(options, row) == (row->type == MT_FLAG) ? "true" : "false");
    case MT_INT:
        snprintf(text, sizeof text, "%lld", (long long)*mt_option_int(options, row));
        return mt_strdup(text);
    case MT_REAL:
        mt_real_print(text, *mt_option_real(options, row));
        return mt_strdup(text);
    case MT_STRING:
    case MT_CHOICE:
        return mt_strdup(*mt_option_string(options, row) ? *mt_option_string(options, row) : "");
    case MT_LIST:
        break;
    }
    const mt_strings *list = mt_option_list(options, row);
    int64_t bytes = 1;
    for (int64_t i = 0; i < list->count; i++) bytes += (int64_t)strlen(list->items[i]) + 1;
    char *all = mt_calloc(bytes), *end = all;
    for (int64_t i = 0; i < list->count; i++) end += sprintf(end, i ? " %s" : "%s", list->items[i]);
    return all;
}

/* The option's name in files: with underscores. */
static void mt_option_key(char key[80], const mt_option *row) {
    snprintf(key, 80, "%s", row->name);
    for (char *at = key; *at; at++)
        if (*at == '-') *at = '_';
}

/* Copies one option's value between structs. */
static void mt_option_copy(mt_options *to, const mt_options *from, const mt_option *row) {
    switch (row->type) {
    case MT_FLAG:
    case MT_NO:
        *mt_option_bool(to, row) = *mt_option_bool(from, row);
        break;
    case MT_INT:
        *mt_option_int(to, row) = *mt_option_int(from, row);
        break;
    case MT_REAL:
        *mt_option_real(to, row) = *mt_option_real(from, row);
        break;
    case MT_STRING:
    case MT_CHOICE:
        mt_string_set(mt_option_string(to, row), *mt_option_string(from, row));
        break;
    case MT_LIST:
        mt_strings_free(mt_option_list(to, row));
        for (int64_t i = 0; i < mt_option_list(from, row)->count; i++)
            mt_strings_add(mt_option_list(to, row), mt_option_list(from, row)->items[i]);
        break;
    }
}

static bool mt_option_is_default(const mt_options *options, const mt_option *row) {
    mt_options defaults;
    mt_options_default(&defaults);
    char *value = mt_option_text(options, row), *fallback = mt_option_text(&defaults, row);
    bool same = strcmp(value, fallback) == 0;
    free(value), free(fallback), mt_options_free(&defaults);
    return same;
}

/* Whether a number is in the range of the table, "[low,high]" with ( and ) for ends that are not in it. */
static bool mt_option_in_range(const mt_option *row, double value) {
    char left, right;
    double low, high;
    MT_CHECK(sscanf(row->values, "%c%lf,%lf%c", &left, &low, &high, &right) == 4);
    return (left == '(' ? value > low : value >= low) && (right == ')' ? value < high : value <= high);
}

/* Given, and not only to say what is so anyway. */
static bool mt_option_used(const mt_options *options, size_t offset) {
    return mt_option_given(options, offset) && !mt_option_is_default(options, mt_option_of(offset));
}

void mt_options_free(mt_options *options) {
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name) continue;
        if (row->type == MT_STRING || row->type == MT_CHOICE) mt_string_set(mt_option_string(options, row), NULL);
        if (row->type == MT_LIST) mt_strings_free(mt_option_list(options, row));
    }
    mt_string_set(&options->hf_family, NULL);
}

/* ==== §2b the command line and YAML ============================================================================== */
/* Both end in mt_option_set with a row, a text and a place for messages; the rest is finding those three. */

/* A plain decimal: strtoll would also take blanks, and octal or hexadecimal if asked. */
static bool mt_parse_int(const char *text, int64_t *value) {
    const char *digits = text + (*text == '-');
    if (!*digits || strspn(digits, "0123456789") != strlen(digits)) return false;
    errno = 0;
    *value = strtoll(text, NULL, 10);
    return errno == 0;
}

static bool mt_parse_real(const char *text, double *value) {
    char *end;
    if (!*text || strspn(text, "0123456789+-.eE") != strlen(text)) return false; // no inf, nan or hexadecimal
    *value = strtod(text, &end);
    return *end == 0 && isfinite(*value);
}

/* Whether `text` is one of "a|b|c". */
static bool mt_choice_has(const char *choices, const char *text) {
    size_t length = strlen(text);
    for (const char *at = choices; *at; at += strcspn(at, "|"), at += *at == '|')
        if (strcspn(at, "|") == length && strncmp(at, text, length) == 0) return true;
    return false;
}

/* Sets a value from its text and marks it as given; `where` names the option for messages. A list gets one more word.
 */
static int mt_option_set(mt_options *options, const mt_option *row, const char *text, const char *where,
                         mt_error *error) {
    bool is_true = strcmp(text, "true") == 0;
    switch (row->type) {
    case MT_FLAG:
    case MT_NO:
        if (!is_true && strcmp(text, "false") != 0)
            return mt_error_set(error, "%s expects true or false, got '%.100s'", where, text);
        *mt_option_bool(options, row) = is_true == (row->type == MT_FLAG);
        break;
    case MT_INT:
        if (!mt_parse_int(text, mt_option_int(options, row)))
            return mt_error_set(error, "%s expects a whole number, got '%.100s'", where, text);
        break;
    case MT_REAL:
        if (!mt_parse_real(text, mt_option_real(options, row)))
            return mt_error_set(error, "%s expects a number, got '%.100s'", where, text);
        break;
    case MT_CHOICE:
        if (!mt_choice_has(row->values, text))
            return mt_error_set(error, "%s expects %s, got '%.100s' (%s)", where, row->values, text, row->help);
        mt_string_set(mt_option_string(options, row), text);
        break;
    case MT_STRING:
        if (!*text) return mt_error_set(error, "%s expects %s, got nothing", where, row->values);
        mt_string_set(mt_option_string(options, row), text);
        break;
    case MT_LIST:
        mt_strings_add(mt_option_list(options, row), text);
        break;
    }
    mt_option_mark(options, row);
    return 0;
}

void mt_options_default(mt_options *options) {
    mt_error unused;
    memset(options, 0, sizeof *options);
    options->bos_token_id = options->eos_token_id = -1;
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name) continue;
        if (row->type == MT_NO) *mt_option_bool(options, row) = true;
        if (row->fallback) MT_CHECK(mt_option_set(options, row, row->fallback, row->name, &unused) == 0);
    }
    memset(options->given, 0, sizeof options->given);
}

/* Names are compared with dashes; YAML writes underscores. */
static bool mt_option_named(const mt_option *row, const char *name, size_t length) {
    if (!row->name || strlen(row->name) != length) return false;
    for (size_t i = 0; i < length; i++)
        if (row->name[i] != (name[i] == '_' ? '-' : name[i])) return false;
    return true;
}

static const mt_option *mt_option_find(const char *name, size_t length) {
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++)
        if (mt_option_named(row, name, length)) return row;
    return NULL;
}

/* Letters to insert, delete or exchange to get from one name to the other (Levenshtein); long names are cut. */
static int mt_edit_distance(const char *a, size_t a_length, const char *b) {
    enum { LONGEST = 64 };
    int row[LONGEST + 1], b_length = (int)strlen(b) < LONGEST ? (int)strlen(b) : LONGEST;
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (int i = 1; i <= (int)a_length && i <= LONGEST; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int replaced = diagonal + ((a[i - 1] == '_' ? '-' : a[i - 1]) != b[j - 1]);
            int shorter = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replaced < shorter ? replaced : shorter;
        }
    }
    return row[b_length];
}

/* The program's option with the nearest name; NULL when none is near. */
static const mt_option *mt_option_nearest(const char *name, size_t length, int program) {
    const mt_option *nearest = NULL;
    int least = length < 6 ? 2 : 2 + (int)length / 4;
    if (length > 64) return NULL;
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name || !(row->programs & program)) continue;
        int distance = mt_edit_distance(name, length, row->name);
        if (distance < least) least = distance, nearest = row;
    }
    return nearest;
}

/* Finds an option of the program, or says why there is none. `place` is where a file names it ("run.yaml:3: "), or ""
 * for the command line. */
static const mt_option *mt_option_lookup(const char *name, size_t length, mt_program program, const char *place,
                                         mt_error *error) {
    const mt_option *row = mt_option_find(name, length);
    if (row && row->programs & (int)program) return row;
    const mt_option *nearest = row ? NULL : mt_option_nearest(name, length, (int)program);
    const char *dashes = *place ? "" : "--";
    char key[80] = "";
    int shown = length < 100 ? (int)length : 100;
    if (nearest) mt_option_key(key, nearest);
    if (row)
        mt_error_set(error, "%s%s%.*s is an option of %s, not of %s", place, dashes, shown, name,
                     program == MT_PROGRAM_TRAIN ? "infer" : "train", program == MT_PROGRAM_TRAIN ? "train" : "infer");
    else if (nearest)
        mt_error_set(error, "%sunknown option %s%.*s; did you mean %s%s?", place, dashes, shown, name, dashes,
                     *place ? key : nearest->name);
    else
        mt_error_set(error, "%sunknown option %s%.*s; --help lists them all", place, dashes, shown, name);
    return NULL;
}

/* What the option expects, for --help and messages. */
static const char *mt_option_metavar(const mt_option *row) {
    return row->type == MT_INT ? "a whole number" : row->type == MT_REAL ? "a number" : row->values;
}

/* Takes the option at arguments[index]; returns the index after its values, or -1. */
static int mt_options_read_argument(mt_options *options, mt_program program, int index, int count, char **arguments,
                                    mt_error *error) {
    const char *argument = arguments[index++];
    if (strncmp(argument, "--", 2) != 0 || !argument[2])
        return mt_error_set(error, "unexpected argument '%.100s'; options begin with -- (--help lists them)", argument);
    const char *equals = strchr(argument, '=');
    size_t length = equals ? (size_t)(equals - argument - 2) : strlen(argument) - 2;
    const mt_option *row = mt_option_lookup(argument + 2, length, program, "", error);
    if (!row) return -1;
    char where[80];
    snprintf(where, sizeof where, "--%s", row->name);
    if (row->type == MT_LIST) mt_strings_free(mt_option_list(options, row)); // the last one wins
    if (equals) return mt_option_set(options, row, equals + 1, where, error) ? -1 : index;
    if (row->type == MT_FLAG || row->type == MT_NO)
        return mt_option_set(options, row, "true", where, error) ? -1 : index;
    int first = index;
    while (index < count && strncmp(arguments[index], "--", 2) != 0 && (row->type == MT_LIST || index == first))
        if (mt_option_set(options, row, arguments[index++], where, error)) return -1;
    if (index == first) return mt_error_set(error, "%s expects %s, got nothing", where, mt_option_metavar(row));
    return index;
}

static int mt_options_read_arguments(mt_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    for (int index = 1; index < argc;) {
        index = mt_options_read_argument(options, program, index, argc, argv, error);
        if (index < 0) return -1;
    }
    return 0;
}

/* Reads a whole text file of at most `limit` bytes; NULL with error when that fails. Returns text to free. */
static char *mt_options_read_text(const char *path, int64_t limit, int64_t *bytes, mt_error *error) {
    struct stat status;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &status) != 0 || S_ISDIR(status.st_mode)) {
        mt_error_set(error, "%s: cannot be read: %s", path, file ? "it is a folder" : strerror(errno));
        if (file) fclose(file);
        return NULL;
    }
    char *text = mt_malloc(limit + 1);
    *bytes = (int64_t)fread(text, 1, (size_t)limit + 1, file);
    bool failed = ferror(file) != 0;
    fclose(file);
    if (failed || *bytes > limit) {
        mt_error_set(error, "%s: %s", path, failed ? strerror(errno) : "is far too large for a configuration");
        free(text);
        return NULL;
    }
    text[*bytes] = 0;
    return text;
}

#ifdef MT_HAVE_YAML
enum { MT_YAML_DEPTH = 8, MT_YAML_EVENTS = 100000 };

/* A YAML text being read as a stream of events. */
typedef struct mt_yaml {
    yaml_parser_t parser;
    yaml_event_t event;
    bool has_event;
    int64_t events;
    uint64_t seen[sizeof((mt_options *)0)->given / sizeof(uint64_t)]; // options that this text has named
    mt_options *options;
    mt_program program;
    const char *path;
    mt_error *error;
} mt_yaml;

/* Moves to the next event. Anchors are refused, and with them aliases that unfold without end. */
static int mt_yaml_next(mt_yaml *yaml) {
    if (yaml->has_event) yaml_event_delete(&yaml->event);
    yaml->has_event = yaml_parser_parse(&yaml->parser, &yaml->event) != 0;
    if (!yaml->has_event)
        return mt_error_set(yaml->error, "%s:%lld: is not YAML: %s", yaml->path,
                            (long long)yaml->parser.problem_mark.line + 1,
                            yaml->parser.problem ? yaml->parser.problem : "it cannot be read");
    const yaml_event_t *event = &yaml->event;
    long long line = (long long)event->start_mark.line + 1;
    if (++yaml->events > MT_YAML_EVENTS)
        return mt_error_set(yaml->error, "%s:%lld: holds more than options could need", yaml->path, line);
    if (event->type == YAML_ALIAS_EVENT || (event->type == YAML_SCALAR_EVENT && event->data.scalar.anchor) ||
        (event->type == YAML_SEQUENCE_START_EVENT && event->data.sequence_start.anchor) ||
        (event->type == YAML_MAPPING_START_EVENT && event->data.mapping_start.anchor))
        return mt_error_set(yaml->error, "%s:%lld: anchors and aliases are not supported; write the value out",
                            yaml->path, line);
    return 0;
}

/* The event's text. A zero byte inside would cut it short. */
static int mt_yaml_scalar(mt_yaml *yaml, const char **text) {
    *text = (const char *)yaml->event.data.scalar.value;
    if (strlen(*text) == yaml->event.data.scalar.length) return 0;
    return mt_error_set(yaml->error, "%s:%lld: holds a zero byte", yaml->path,
                        (long long)yaml->event.start_mark.line + 1);
}

static bool mt_yaml_is_null(const yaml_event_t *event) {
    const char *text = (const char *)event->data.scalar.value;
    return event->type == YAML_SCALAR_EVENT && event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (!*text || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

/* The value of `row`: the event at hand is a scalar or begins a sequence. */
static int mt_yaml_read_value(mt_yaml *yaml, const mt_option *row, const char *where) {
    const char *text;
    bool is_sequence = yaml->event.type == YAML_SEQUENCE_START_EVENT;
    if (mt_yaml_is_null(&yaml->event)) return 0;
    if (is_sequence && row->type != MT_LIST)
        return mt_error_set(yaml->error, "%s expects %s, not a list", where, mt_option_metavar(row));
    if (row->type == MT_LIST) mt_strings_free(mt_option_list(yaml->options, row));
    if (is_sequence && mt_yaml_next(yaml)) return -1;
    while (yaml->event.type != YAML_SEQUENCE_END_EVENT) {
        if (yaml->event.type != YAML_SCALAR_EVENT)
            return mt_error_set(yaml->error, "%s expects plain values in its list", where);
        if (mt_yaml_scalar(yaml, &text) || mt_option_set(yaml->options, row, text, where, yaml->error)) return -1;
        if (!is_sequence) return 0;
        if (mt_yaml_next(yaml)) return -1;
    }
    return 0;
}

/* The option `name`, whose value is at hand; `place` is where the file names it. */
static int mt_yaml_read_option(mt_yaml *yaml, const char *name, const char *place) {
    char where[400];
    const mt_option *row = mt_option_lookup(name, strlen(name), yaml->program, place, yaml->error);
    if (!row) return -1;
    snprintf(where, sizeof where, "%s%.80s", place, name);
    if (yaml->event.type == YAML_MAPPING_START_EVENT)
        return mt_error_set(yaml->error, "%s expects %s, not a section", where, mt_option_metavar(row));
    int64_t index = mt_option_of(row->offset) - mt_option_table;
    if (yaml->seen[index / 64] >> index % 64 & 1)
        return mt_error_set(yaml->error, "%s is given twice in this file", where);
    yaml->seen[index / 64] |= (uint64_t)1 << index % 64;
    return mt_yaml_read_value(yaml, row, where);
}

/* The event at hand is a key: reads it and its value, whose last event is then at hand. Where the value is a section,
 * `depth` grows instead; its name is not kept, because sections only group options. */
static int mt_yaml_read_entry(mt_yaml *yaml, int *depth) {
    char place[300];
    const char *key;
    long long line = (long long)yaml->event.start_mark.line + 1;
    if (yaml->event.type != YAML_SCALAR_EVENT)
        return mt_error_set(yaml->error, "%s:%lld: expects the name of an option", yaml->path, line);
    if (mt_yaml_scalar(yaml, &key)) return -1;
    char *name = mt_strdup(key); // the event goes when its value comes
    snprintf(place, sizeof place, "%.250s:%lld: ", yaml->path, line);
    int result = mt_yaml_next(yaml);
    bool is_section = yaml->event.type == YAML_MAPPING_START_EVENT && !mt_option_find(name, strlen(name));
    if (!result && !is_section) result = mt_yaml_read_option(yaml, name, place);
    if (!result && is_section && ++*depth > MT_YAML_DEPTH)
        result = mt_error_set(yaml->error, "%s%.80s: sections are nested deeper than %d", place, name, MT_YAML_DEPTH);
    free(name);
    return result;
}

/* One document, a mapping; or nothing at all. */
static int mt_yaml_read(mt_yaml *yaml) {
    int depth = 1;
    do
        if (mt_yaml_next(yaml)) return -1;
    while (yaml->event.type == YAML_STREAM_START_EVENT || yaml->event.type == YAML_DOCUMENT_START_EVENT);
    if (yaml->event.type == YAML_STREAM_END_EVENT || mt_yaml_is_null(&yaml->event)) return 0;
    if (yaml->event.type != YAML_MAPPING_START_EVENT)
        return mt_error_set(yaml->error, "%s:%lld: expects lines such as `num_layers: 12`", yaml->path,
                            (long long)yaml->event.start_mark.line + 1);
    while (depth > 0) {
        if (mt_yaml_next(yaml)) return -1;
        if (yaml->event.type == YAML_MAPPING_END_EVENT)
            depth--;
        else if (mt_yaml_read_entry(yaml, &depth))
            return -1;
    }
    if (mt_yaml_next(yaml) || mt_yaml_next(yaml)) return -1;
    if (yaml->event.type == YAML_STREAM_END_EVENT) return 0;
    return mt_error_set(yaml->error, "%s:%lld: a second document; options are one", yaml->path,
                        (long long)yaml->event.start_mark.line + 1);
}

int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    mt_yaml yaml = {.options = options, .program = program, .path = path, .error = error};
    if (!yaml_parser_initialize(&yaml.parser)) return mt_error_set(error, "%s: no memory to read YAML", path);
    yaml_parser_set_input_string(&yaml.parser, (const unsigned char *)text, (size_t)bytes);
    int result = mt_yaml_read(&yaml);
    if (yaml.has_event) yaml_event_delete(&yaml.event);
    yaml_parser_delete(&yaml.parser);
    return result;
}
#else
int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error) {
    (void)options, (void)program, (void)text, (void)bytes;
    return mt_error_set(error, "--config %s: built without libyaml; `make deps` installs it", path);
}
#endif

/* The folder whose config.json describes what --load names: its latest iter_NNNNNNN if it is one of ours. */
static char *mt_options_load_folder(const char *folder) {
    int64_t bytes = (int64_t)strlen(folder) + 64;
    char *path = mt_malloc(bytes), digits[16] = "";
    snprintf(path, (size_t)bytes, "%s/latest_checkpointed_iteration.txt", folder);
    FILE *file = fopen(path, "r");
    if (file && !fgets(digits, sizeof digits, file)) digits[0] = 0;
    if (file) fclose(file);
    snprintf(path, (size_t)bytes, "%s/iter_%07ld", folder, strtol(digits, NULL, 10));
    if (!isdigit((unsigned char)digits[0]) || access(path, F_OK) != 0) snprintf(path, (size_t)bytes, "%s", folder);
    return path;
}

/* Takes the model's shape from config.json, where --load or --hf-config says that there is one. */
static int mt_options_read_shape(mt_options *options, mt_error *error) {
    if (!options->load && !options->hf_config) return 0;
    if (options->load && options->hf_config)
        return mt_error_set(error, "--load and --hf-config exclude each other: the folder %s has a config.json",
                            options->load);
    int64_t bytes;
    char *path = options->load ? mt_options_load_folder(options->load) : mt_strdup(options->hf_config);
    if (options->load) path = strcat(mt_realloc(path, (int64_t)strlen(path) + 16), "/config.json");
    char *json = mt_options_read_text(path, MT_CONFIG_BYTES, &bytes, error);
    int result = json ? mt_options_take_shape(options, json, bytes, path, options->load != NULL, error) : -1;
    free(json), free(path);
    return result;
}

static int mt_options_read_config(mt_options *options, mt_program program, const char *path, mt_error *error) {
    int64_t bytes;
    char *text = mt_options_read_text(path, MT_CONFIG_BYTES, &bytes, error);
    int result = text ? mt_options_read_yaml(options, program, text, bytes, path, error) : -1;
    free(text);
    if (!result && options->config)
        return mt_error_set(error, "%s: names another --config; one file is read, from the command line", path);
    return result;
}

int mt_options_parse(mt_options *options, mt_program program, int argc, char **argv, mt_error *error) {
    mt_options_default(options);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0) continue;
        mt_options_help(program, stdout);
        exit(0);
    }
    if (mt_options_read_arguments(options, program, argc, argv, error)) return -1;
    if (options->config) { // once more, the file first: what comes later wins
        char *path = mt_strdup(options->config);
        mt_options_free(options);
        mt_options_default(options);
        int result = mt_options_read_config(options, program, path, error);
        free(path);
        if (result || mt_options_read_arguments(options, program, argc, argv, error)) return -1;
    }
    return mt_options_read_shape(options, error);
}

/* ==== §2c config.json of Hugging Face ============================================================================ */
/* Five families of transformers, and one of our own for what none of them can say. Values are checked against the
 * table, so what is written here can be read here. */

/* A config.json being read. Only the first error is kept, so that a reader can go on to its end. */
typedef struct mt_config {
    json_t *root;
    const char *path;
    mt_error *error;
    bool failed;
} mt_config;

__attribute__((format(printf, 2, 3))) static void mt_config_fail(mt_config *config, const char *format, ...) {
    char text[800];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!config->failed) mt_error_set(config->error, "%.200s: %s", config->path, text);
    config->failed = true;
}

/* The value of a key; NULL when it is absent or null. */
static json_t *mt_config_get(const json_t *object, const char *key) {
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

/* Sets an option from a key, where the object has it; the table says its type and range. */
static void mt_config_read_option(mt_config *config, const json_t *object, const char *key, mt_options *options,
                                  size_t offset) {
    const json_t *value = mt_config_get(object, key);
    const mt_option *row = mt_option_of(offset);
    if (!value) return;
    if (row->type == MT_INT ? !json_is_integer(value) : !json_is_number(value)) {
        mt_config_fail(config, "\"%s\" must be a %snumber", key, row->type == MT_INT ? "whole " : "");
        return;
    }
    if (row->type == MT_INT)
        *mt_option_int(options, row) = json_integer_value(value);
    else
        *mt_option_real(options, row) = json_number_value(value);
    if (!mt_option_in_range(row, json_number_value(value)))
        mt_config_fail(config, "\"%s\" is %g, must be in %s", key, json_number_value(value), row->values);
}

/* The same for a key that every file of the kind has. */
static void mt_config_read_size(mt_config *config, const char *key, mt_options *options, size_t offset) {
    if (!mt_config_get(config->root, key)) mt_config_fail(config, "\"%s\" is missing", key);
    mt_config_read_option(config, config->root, key, options, offset);
}

static bool mt_config_bool(mt_config *config, const char *key, bool fallback) {
    const json_t *value = mt_config_get(config->root, key);
    if (value && !json_is_boolean(value)) mt_config_fail(config, "\"%s\" must be true or false", key);
    return json_is_boolean(value) ? json_is_true(value) : fallback;
}

static const char *mt_config_string(mt_config *config, const json_t *object, const char *key, const char *fallback) {
    const json_t *value = mt_config_get(object, key);
    if (value && !json_is_string(value)) mt_config_fail(config, "\"%s\" must be a string", key);
    return json_is_string(value) ? json_string_value(value) : fallback;
}

/* A token id, or the first of a list of them; -1 when there is none or the vocabulary does not hold it. */
static int64_t mt_config_token(mt_config *config, const char *key, int64_t vocab_size) {
    const json_t *value = mt_config_get(config->root, key);
    if (json_is_array(value)) value = json_array_get(value, 0);
    if (!value) return -1;
    if (!json_is_integer(value)) mt_config_fail(config, "\"%s\" must be a token or a list of tokens", key);
    int64_t token = json_integer_value(value);
    return token >= 0 && token < vocab_size ? token : -1;
}

/* Keys that would change what the model computes, and are not supported when true. */
static void mt_config_refuse(mt_config *config) {
    static const char *const keys[] = {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
                                       "add_cross_attention", "is_encoder_decoder", "use_mrope"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (mt_config_bool(config, keys[i], false)) mt_config_fail(config, "\"%s\": true is not supported", keys[i]);
    if (!mt_config_bool(config, "scale_attn_weights", true))
        mt_config_fail(config, "\"scale_attn_weights\": false is not supported");
    if (mt_config_get(config->root, "quantization_config"))
        mt_config_fail(config, "quantized weights (\"quantization_config\") are not supported; load the fp32, bf16 or "
                               "fp16 model");
}

/* The stretch of rotary positions, under either of its keys: newer files have rope_parameters with the base inside,
 * older ones rope_scaling beside rope_theta. */
static void mt_config_read_rope(mt_config *config, mt_options *options) {
    static const struct {
        const char *key;
        size_t offset;
    } numbers[] = {
        {"factor", MT_AT(rope_scaling_factor)},
        {"original_max_position_embeddings", MT_AT(original_max_position_embeddings)},
        {"low_freq_factor", MT_AT(rope_low_freq_factor)},
        {"high_freq_factor", MT_AT(rope_high_freq_factor)},
        {"beta_fast", MT_AT(yarn_beta_fast)},
        {"beta_slow", MT_AT(yarn_beta_slow)},
        {"mscale", MT_AT(yarn_mscale)},
        {"mscale_all_dim", MT_AT(yarn_mscale_all_dim)},
        {"attention_factor", MT_AT(yarn_attention_factor)},
    };
    const json_t *rope = mt_config_get(config->root, "rope_parameters");
    if (!rope) rope = mt_config_get(config->root, "rope_scaling");
    if (rope && !json_is_object(rope)) mt_config_fail(config, "the parameters of RoPE must be an object");
    const json_t *base = mt_config_get(rope, "rope_theta") ? rope : config->root;
    mt_config_read_option(config, base, "rope_theta", options, MT_AT(rotary_base));
    const char *older = mt_config_string(config, rope, "type", "default");
    const char *type = mt_config_string(config, rope, "rope_type", older);
    if (strcmp(type, "default") == 0) type = "none";
    if (!mt_choice_has("none|linear|llama3|yarn", type))
        mt_config_fail(config, "RoPE of type \"%.40s\" is not supported; default, linear, llama3 and yarn are", type);
    const json_t *partial = mt_config_get(rope, "partial_rotary_factor");
    if (!partial) partial = mt_config_get(config->root, "partial_rotary_factor");
    if (partial && json_number_value(partial) != 1)
        mt_config_fail(config, "\"partial_rotary_factor\" other than 1 is not supported");
    if (json_is_false(json_object_get(rope, "truncate")))
        mt_config_fail(config, "RoPE with \"truncate\": false is not supported");
    mt_string_set(&options->rope_scaling_type, type);
    if (strcmp(type, "none") == 0) return;
    if (!mt_config_get(rope, "factor")) mt_config_fail(config, "RoPE of type \"%s\" needs a \"factor\"", type);
    if (strcmp(type, "linear") != 0) options->original_max_position_embeddings = options->max_position_embeddings;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (i == 0 || strcmp(type, "linear") != 0)
            mt_config_read_option(config, rope, numbers[i].key, options, numbers[i].offset);
}

/* How many of the layers of a Qwen model look through the sliding window: layer_types says, or else those from
 * max_window_layers on. */
static int64_t mt_config_sliding_layers(mt_config *config, int64_t num_layers) {
    const json_t *types = mt_config_get(config->root, "layer_types");
    int64_t sliding = 0;
    if (!types) {
        const json_t *value = mt_config_get(config->root, "max_window_layers");
        if (value && !json_is_integer(value)) mt_config_fail(config, "\"max_window_layers\" must be a whole number");
        int64_t first = value ? json_integer_value(value) : 28; // Qwen2Config's default
        return first >= num_layers ? 0 : first <= 0 ? num_layers : num_layers - first;
    }
    if (!json_is_array(types) || (int64_t)json_array_size(types) != num_layers)
        mt_config_fail(config, "\"layer_types\" must list %lld layers", (long long)num_layers);
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || !mt_choice_has("full_attention|sliding_attention", type))
            mt_config_fail(config, "\"layer_types\" holds %.40s; full_attention and sliding_attention are supported",
                           type ? type : "something else than strings");
        else
            sliding += *type == 's';
    }
    return sliding;
}

static void mt_config_read_window(mt_config *config, mt_options *options) {
    bool is_mistral = strcmp(options->hf_family, "mistral") == 0;
    if (strcmp(options->hf_family, "llama") == 0) return; // transformers reads no window there
    if (!is_mistral && !mt_config_bool(config, "use_sliding_window", false)) return;
    if (!json_is_null(json_object_get(config->root, "sliding_window"))) options->window_size = 4096; // when not given
    mt_config_read_option(config, config->root, "sliding_window", options, MT_AT(window_size));
    if (is_mistral || options->window_size == 0) return;
    int64_t sliding = mt_config_sliding_layers(config, options->num_layers);
    if (sliding > 0 && sliding < options->num_layers)
        mt_config_fail(config, "%lld of %lld layers have a sliding window; a mixture is not supported",
                       (long long)sliding, (long long)options->num_layers);
    if (sliding == 0) options->window_size = 0;
}

static void mt_config_read_gpt2(mt_config *config, mt_options *options) {
    const char *activation = mt_config_string(config, config->root, "activation_function", "gelu_new");
    mt_config_read_size(config, "n_layer", options, MT_AT(num_layers));
    mt_config_read_size(config, "n_embd", options, MT_AT(hidden_size));
    mt_config_read_size(config, "n_head", options, MT_AT(num_attention_heads));
    mt_config_read_size(config, "n_positions", options, MT_AT(max_position_embeddings));
    mt_config_read_option(config, config->root, "n_inner", options, MT_AT(ffn_hidden_size));
    mt_config_read_option(config, config->root, "layer_norm_epsilon", options, MT_AT(norm_epsilon));
    mt_config_read_option(config, config->root, "embd_pdrop", options, MT_AT(hidden_dropout));
    double embedding_dropout = options->hidden_dropout;
    options->hidden_dropout = 0.1; // GPT2Config's default, for all three
    mt_config_read_option(config, config->root, "resid_pdrop", options, MT_AT(hidden_dropout));
    mt_config_read_option(config, config->root, "attn_pdrop", options, MT_AT(attention_dropout));
    if (embedding_dropout != options->hidden_dropout)
        mt_config_fail(config, "\"embd_pdrop\" and \"resid_pdrop\" differ; one hidden dropout is supported: make them "
                               "equal");
    if (!mt_choice_has("gelu_new|gelu|gelu_pytorch_tanh", activation))
        mt_config_fail(config,
                       "\"activation_function\" \"%.40s\" is not supported; gelu_new, gelu_pytorch_tanh and gelu are",
                       activation);
    options->openai_gelu = strcmp(activation, "gelu") != 0;
    options->untie_embeddings_and_output_weights = !mt_config_bool(config, "tie_word_embeddings", true);
}

/* The sizes of Llama, Mistral, Qwen2 and Qwen3. */
static void mt_config_read_llama_sizes(mt_config *config, mt_options *options) {
    mt_config_read_size(config, "num_hidden_layers", options, MT_AT(num_layers));
    mt_config_read_size(config, "hidden_size", options, MT_AT(hidden_size));
    mt_config_read_size(config, "intermediate_size", options, MT_AT(ffn_hidden_size));
    mt_config_read_size(config, "num_attention_heads", options, MT_AT(num_attention_heads));
    mt_config_read_size(config, "max_position_embeddings", options, MT_AT(max_position_embeddings));
    mt_config_read_option(config, config->root, "num_key_value_heads", options, MT_AT(num_query_groups));
    if (strcmp(options->hf_family, "llama") != 0 && !json_object_get(config->root, "num_key_value_heads"))
        mt_config_fail(config, "\"num_key_value_heads\" is missing");
    if (options->num_query_groups == options->num_attention_heads) options->num_query_groups = 0; // one group a head
    options->group_query_attention = options->num_query_groups != 0;
    bool is_qwen3 = strcmp(options->hf_family, "qwen3") == 0;
    if (is_qwen3 && !json_object_get(config->root, "head_dim")) options->kv_channels = 128; // Qwen3Config's default
    mt_config_read_option(config, config->root, "head_dim", options, MT_AT(kv_channels));
}

/* Llama, Mistral, Qwen2 and Qwen3: the same block but for biases, norms of heads and windows. */
static void mt_config_read_llama(mt_config *config, mt_options *options) {
    const char *activation = mt_config_string(config, config->root, "hidden_act", "silu");
    bool is_qwen2 = strcmp(options->hf_family, "qwen2") == 0, is_qwen3 = strcmp(options->hf_family, "qwen3") == 0;
    bool is_llama = strcmp(options->hf_family, "llama") == 0;
    mt_config_read_llama_sizes(config, options);
    options->norm_epsilon = 1e-6; // what their classes in transformers have by default
    options->hidden_dropout = options->attention_dropout = 0;
    mt_config_read_option(config, config->root, "rms_norm_eps", options, MT_AT(norm_epsilon));
    mt_config_read_option(config, config->root, "hidden_dropout", options, MT_AT(hidden_dropout));
    mt_config_read_option(config, config->root, "attention_dropout", options, MT_AT(attention_dropout));
    if (!mt_choice_has("silu|swish", activation))
        mt_config_fail(config, "\"hidden_act\" \"%.40s\" is not supported; silu is", activation);
    options->swiglu = true;
    options->qk_layernorm = is_qwen3;
    mt_string_set(&options->normalization, "RMSNorm");
    mt_string_set(&options->position_embedding_type, "rope");
    options->attention_output_bias = (is_llama || is_qwen3) && mt_config_bool(config, "attention_bias", false);
    options->add_qkv_bias = is_qwen2 || options->attention_output_bias;
    options->mlp_bias = is_llama && mt_config_bool(config, "mlp_bias", false);
    options->add_bias_linear = options->attention_output_bias && options->mlp_bias;
    options->untie_embeddings_and_output_weights = !mt_config_bool(config, "tie_word_embeddings", false);
    mt_config_read_rope(config, options);
    mt_config_read_window(config, options);
}

/* A model that no family of transformers describes: this program's own options, under their names. */
static void mt_config_read_megatron(mt_config *config, mt_options *options) {
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        char key[80], where[100], number[32];
        if (!row->name || row->origin == MT_OF_RUN || mt_option_of(row->offset) != row) continue;
        mt_option_key(key, row);
        const json_t *value = mt_config_get(config->root, key);
        if (!value) continue;
        snprintf(where, sizeof where, "\"%s\"", key);
        const char *text = json_is_boolean(value) ? (json_is_true(value) ? "true" : "false") : number;
        if (json_is_integer(value))
            snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
        else if (json_is_real(value))
            mt_real_print(number, json_real_value(value));
        else if (json_is_string(value))
            text = json_string_value(value);
        else if (!json_is_boolean(value))
            text = "an array or object";
        mt_error problem;
        if (mt_option_set(options, row, text, where, &problem)) mt_config_fail(config, "%s", problem.text);
    }
    memset(options->given, 0, sizeof options->given);
    options->attention_output_bias = mt_config_bool(config, "attention_output_bias", false);
    options->mlp_bias = mt_config_bool(config, "mlp_bias", false);
}

/* Sets `shape`, which holds defaults, to what a file of a supported family says. */
static void mt_config_read_family(mt_config *config, mt_options *shape, const char *family) {
    mt_error problem;
    mt_string_set(&shape->hf_family, family);
    mt_config_read_size(config, "vocab_size", shape, MT_AT(vocab_size));
    mt_config_read_option(config, config->root, "initializer_range", shape, MT_AT(init_method_std));
    shape->bos_token_id = mt_config_token(config, "bos_token_id", shape->vocab_size);
    shape->eos_token_id = mt_config_token(config, "eos_token_id", shape->vocab_size);
    mt_config_refuse(config);
    if (strcmp(family, "megatron") == 0)
        mt_config_read_megatron(config, shape);
    else if (strcmp(family, "gpt2") == 0)
        mt_config_read_gpt2(config, shape);
    else
        mt_config_read_llama(config, shape);
    if (mt_options_check_ranges(shape, MT_PROGRAM_TRAIN, &problem)) mt_config_fail(config, "%s", problem.text);
    int64_t heads = shape->num_attention_heads, groups = shape->num_query_groups;
    if (!config->failed && groups > 0 && heads % groups != 0)
        mt_config_fail(config, "the %lld heads do not divide into %lld groups", (long long)heads, (long long)groups);
}

static int mt_config_read(mt_options *shape, const char *json, int64_t bytes, const char *path, mt_error *error) {
    json_error_t problem;
    mt_config config = {.path = path, .error = error};
    config.root = json_loadb(json, (size_t)bytes, JSON_REJECT_DUPLICATES, &problem);
    if (!config.root) return mt_error_set(error, "%s:%d: is not JSON: %s", path, problem.line, problem.text);
    const char *family = mt_config_string(&config, config.root, "model_type", NULL);
    if (!json_is_object(config.root))
        mt_config_fail(&config, "must hold a JSON object");
    else if (!family || !mt_choice_has("gpt2|llama|mistral|qwen2|qwen3|megatron", family))
        mt_config_fail(&config, "\"model_type\" is %.60s; gpt2, llama, mistral, qwen2 and qwen3 are supported",
                       family ? family : "missing");
    else
        mt_config_read_family(&config, shape, family);
    json_decref(config.root);
    return config.failed ? -1 : 0;
}

/* Weights were trained for one value of these: another one that was given is an error. */
static int mt_options_check_weights(const mt_options *options, const mt_options *shape, const char *path,
                                    mt_error *error) {
    bool learned = strcmp(shape->position_embedding_type, "learned_absolute") == 0;
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name || !mt_option_given(options, row->offset)) continue;
        if (row->origin != MT_OF_WEIGHTS && !(learned && row->offset == MT_AT(max_position_embeddings))) continue;
        char *given = mt_option_text(options, row), *theirs = mt_option_text(shape, row);
        int result = 0;
        if (strcmp(given, theirs) != 0)
            result = mt_error_set(error, "--%s is %.60s, but the weights have %.60s (%.200s); leave the option out",
                                  row->name, given, theirs, path);
        free(given), free(theirs);
        if (result) return result;
    }
    return 0;
}

/* Copies the model that config.json describes into the options that were not given. */
static int mt_options_take_shape(mt_options *options, const char *json, int64_t bytes, const char *path,
                                 bool has_weights, mt_error *error) {
    mt_options shape;
    mt_options_default(&shape);
    int result = mt_config_read(&shape, json, bytes, path, error);
    if (!result && has_weights) {
        mt_options_derive_sizes(&shape);
        result = mt_options_check_weights(options, &shape, path, error);
    }
    if (!result) {
        // Biases that config.json tells apart from --disable-bias-linear stay unless the user said otherwise.
        bool same_biases =
            !mt_option_given(options, MT_AT(add_bias_linear)) || options->add_bias_linear == shape.add_bias_linear;
        options->attention_output_bias = same_biases && shape.attention_output_bias;
        options->mlp_bias = same_biases && shape.mlp_bias;
        options->bos_token_id = shape.bos_token_id;
        options->eos_token_id = shape.eos_token_id;
        mt_string_set(&options->hf_family, shape.hf_family);
        for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++)
            if (row->name && row->origin != MT_OF_RUN && !mt_option_given(options, row->offset))
                mt_option_copy(options, &shape, row);
    }
    mt_options_free(&shape);
    return result;
}

int mt_options_read_hf_config(mt_options *options, const char *json, int64_t bytes, const char *path, mt_error *error) {
    return mt_options_take_shape(options, json, bytes, path, false, error);
}

/* Whether transformers' implementation of a family computes what the options describe. */
static bool mt_family_fits(const mt_options *o, const char *family) {
    bool qkv = o->add_qkv_bias, output = o->attention_output_bias, mlp = o->mlp_bias;
    bool layernorm = strcmp(o->normalization, "LayerNorm") == 0;
    if (strcmp(family, "gpt2") == 0)
        return layernorm && strcmp(o->position_embedding_type, "learned_absolute") == 0 && !o->swiglu && qkv &&
               output && mlp && !o->qk_layernorm && o->window_size == 0 &&
               o->num_query_groups == o->num_attention_heads &&
               o->kv_channels * o->num_attention_heads == o->hidden_size;
    if (layernorm || strcmp(o->position_embedding_type, "rope") != 0 || !o->swiglu || o->rotary_percent != 1 ||
        o->rotary_interleaved)
        return false;
    if (strcmp(family, "llama") == 0) return !o->qk_layernorm && qkv == output && o->window_size == 0;
    if (strcmp(family, "mistral") == 0) return !o->qk_layernorm && !qkv && !output && !mlp;
    if (strcmp(family, "qwen2") == 0) return !o->qk_layernorm && qkv && !output && !mlp;
    if (strcmp(family, "qwen3") == 0) return o->qk_layernorm && qkv == output && !mlp;
    return strcmp(family, "megatron") == 0;
}

/* Keeps the family that the shape came from while it fits, else finds one that does. */
static void mt_options_derive_family(mt_options *options) {
    static const char *const families[] = {"gpt2", "llama", "mistral", "qwen2", "qwen3"};
    if (options->hf_family && mt_family_fits(options, options->hf_family)) return;
    mt_string_set(&options->hf_family, "megatron");
    for (size_t i = sizeof families / sizeof families[0]; i-- > 0;)
        if (mt_family_fits(options, families[i])) mt_string_set(&options->hf_family, families[i]);
}

static void mt_json_set_int(json_t *object, const char *key, int64_t value) {
    json_object_set_new(object, key, json_integer(value));
}

static void mt_json_set_real(json_t *object, const char *key, double value) {
    json_object_set_new(object, key, json_real(value));
}

static void mt_json_set_bool(json_t *object, const char *key, bool value) {
    json_object_set_new(object, key, json_boolean(value));
}

static void mt_json_set_string(json_t *object, const char *key, const char *value) {
    json_object_set_new(object, key, json_string(value));
}

static void mt_config_write_gpt2(json_t *root, const mt_options *o) {
    mt_json_set_int(root, "n_layer", o->num_layers);
    mt_json_set_int(root, "n_embd", o->hidden_size);
    mt_json_set_int(root, "n_head", o->num_attention_heads);
    mt_json_set_int(root, "n_positions", o->max_position_embeddings);
    mt_json_set_int(root, "n_inner", o->ffn_hidden_size);
    mt_json_set_string(root, "activation_function", o->openai_gelu ? "gelu_new" : "gelu");
    mt_json_set_real(root, "layer_norm_epsilon", o->norm_epsilon);
    mt_json_set_real(root, "embd_pdrop", o->hidden_dropout);
    mt_json_set_real(root, "resid_pdrop", o->hidden_dropout);
    mt_json_set_real(root, "attn_pdrop", o->attention_dropout);
}

/* RoPE's parameters as an object; the newer form holds the base too. */
static json_t *mt_config_rope(const mt_options *o, bool newer) {
    json_t *rope = json_object();
    bool is_llama3 = strcmp(o->rope_scaling_type, "llama3") == 0, is_yarn = strcmp(o->rope_scaling_type, "yarn") == 0;
    bool is_none = strcmp(o->rope_scaling_type, "none") == 0;
    mt_json_set_string(rope, "rope_type", is_none ? "default" : o->rope_scaling_type);
    if (newer) mt_json_set_real(rope, "rope_theta", o->rotary_base);
    if (!is_none) mt_json_set_real(rope, "factor", o->rope_scaling_factor);
    if (is_llama3 || is_yarn)
        mt_json_set_int(rope, "original_max_position_embeddings", o->original_max_position_embeddings);
    if (is_llama3) {
        mt_json_set_real(rope, "low_freq_factor", o->rope_low_freq_factor);
        mt_json_set_real(rope, "high_freq_factor", o->rope_high_freq_factor);
    }
    if (is_yarn) {
        mt_json_set_real(rope, "beta_fast", o->yarn_beta_fast);
        mt_json_set_real(rope, "beta_slow", o->yarn_beta_slow);
        mt_json_set_real(rope, "attention_factor", o->yarn_attention_factor);
    }
    return rope;
}

static void mt_config_write_llama(json_t *root, const mt_options *o) {
    bool is_qwen = strncmp(o->hf_family, "qwen", 4) == 0;
    mt_json_set_int(root, "num_hidden_layers", o->num_layers);
    mt_json_set_int(root, "hidden_size", o->hidden_size);
    mt_json_set_int(root, "intermediate_size", o->ffn_hidden_size);
    mt_json_set_int(root, "num_attention_heads", o->num_attention_heads);
    mt_json_set_int(root, "num_key_value_heads", o->num_query_groups);
    mt_json_set_int(root, "head_dim", o->kv_channels);
    mt_json_set_int(root, "max_position_embeddings", o->max_position_embeddings);
    mt_json_set_string(root, "hidden_act", "silu");
    mt_json_set_real(root, "rms_norm_eps", o->norm_epsilon);
    mt_json_set_real(root, "attention_dropout", o->attention_dropout);
    if (o->hidden_dropout > 0) mt_json_set_real(root, "hidden_dropout", o->hidden_dropout); // ours; theirs has none
    if (strcmp(o->hf_family, "llama") == 0 || strcmp(o->hf_family, "qwen3") == 0)
        mt_json_set_bool(root, "attention_bias", o->attention_output_bias);
    if (strcmp(o->hf_family, "llama") == 0) mt_json_set_bool(root, "mlp_bias", o->mlp_bias);
    json_object_set_new(root, "rope_parameters", mt_config_rope(o, true));
    mt_json_set_real(root, "rope_theta", o->rotary_base); // this and the next: transformers before 5
    json_object_set_new(root, "rope_scaling",
                        strcmp(o->rope_scaling_type, "none") == 0 ? json_null() : mt_config_rope(o, false));
    if (strcmp(o->hf_family, "llama") == 0) return;
    json_object_set_new(root, "sliding_window", o->window_size ? json_integer(o->window_size) : json_null());
    if (!is_qwen) return;
    json_t *types = json_array();
    for (int64_t layer = 0; layer < o->num_layers; layer++)
        json_array_append_new(types, json_string(o->window_size ? "sliding_attention" : "full_attention"));
    json_object_set_new(root, "layer_types", types);
    mt_json_set_bool(root, "use_sliding_window", o->window_size > 0);
    mt_json_set_int(root, "max_window_layers", o->window_size > 0 ? 0 : o->num_layers);
}

static void mt_config_write_megatron(json_t *root, const mt_options *options) {
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        char key[80];
        if (!row->name || row->origin == MT_OF_RUN || mt_option_of(row->offset) != row) continue;
        mt_option_key(key, row);
        if (row->type == MT_FLAG) mt_json_set_bool(root, key, *mt_option_bool(options, row));
        if (row->type == MT_NO) mt_json_set_bool(root, key, !*mt_option_bool(options, row));
        if (row->type == MT_INT) mt_json_set_int(root, key, *mt_option_int(options, row));
        if (row->type == MT_REAL) mt_json_set_real(root, key, *mt_option_real(options, row));
        if (row->type == MT_CHOICE) mt_json_set_string(root, key, *mt_option_string(options, row));
    }
    mt_json_set_bool(root, "attention_output_bias", options->attention_output_bias);
    mt_json_set_bool(root, "mlp_bias", options->mlp_bias);
}

/* The text with the fewest digits that reads back as the same numbers: 0.1, not 0.10000000000000001. */
static char *mt_json_print(const json_t *root) {
    for (size_t digits = 15;; digits++) {
        char *text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(digits));
        json_t *again = json_loads(text, 0, NULL);
        bool same = json_equal(root, again);
        json_decref(again);
        if (same || digits == 17) return text;
        free(text);
    }
}

char *mt_options_write_hf_config(const mt_options *options) {
    static const char *const classes[][2] = {{"gpt2", "GPT2LMHeadModel"},       {"llama", "LlamaForCausalLM"},
                                             {"mistral", "MistralForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"},
                                             {"qwen3", "Qwen3ForCausalLM"},     {"megatron", "MegatronForCausalLM"}};
    const char *family = options->hf_family, *dtype = options->bf16 ? "bfloat16" : "float32";
    json_t *root = json_object();
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        if (strcmp(family, classes[i][0]) == 0)
            json_object_set_new(root, "architectures", json_pack("[s]", classes[i][1]));
    mt_json_set_string(root, "model_type", family);
    mt_json_set_int(root, "vocab_size", options->vocab_size);
    mt_json_set_real(root, "initializer_range", options->init_method_std);
    mt_json_set_bool(root, "tie_word_embeddings", !options->untie_embeddings_and_output_weights);
    json_object_set_new(root, "bos_token_id",
                        options->bos_token_id < 0 ? json_null() : json_integer(options->bos_token_id));
    json_object_set_new(root, "eos_token_id",
                        options->eos_token_id < 0 ? json_null() : json_integer(options->eos_token_id));
    mt_json_set_string(root, "dtype", dtype);
    mt_json_set_string(root, "torch_dtype", dtype); // transformers before 5
    mt_json_set_bool(root, "use_cache", true);
    if (strcmp(family, "gpt2") == 0)
        mt_config_write_gpt2(root, options);
    else if (strcmp(family, "megatron") == 0)
        mt_config_write_megatron(root, options);
    else
        mt_config_write_llama(root, options);
    char *text = mt_json_print(root);
    json_decref(root);
    return text;
}

/* ==== §2d derivation and checks ================================================================================== */
/* What follows from what was given, and every rule between options, each error naming both sides. */

/* Pairs of options: the first says nothing without the second. */
static const size_t mt_option_needs[][2] = {
    {MT_AT(save_interval), MT_AT(save)},
    {MT_AT(no_save_optim), MT_AT(save)},
    {MT_AT(finetune), MT_AT(load)},
    {MT_AT(no_load_optim), MT_AT(load)},
    {MT_AT(tokenizer_model), MT_AT(tokenizer_type)},
    {MT_AT(split), MT_AT(data_path)},
    {MT_AT(valid_data_path), MT_AT(train_data_path)},
    {MT_AT(test_data_path), MT_AT(train_data_path)},
    {MT_AT(rampup_batch_size), MT_AT(train_samples)},
    {MT_AT(lr_decay_iters), MT_AT(train_iters)},
    {MT_AT(lr_decay_samples), MT_AT(train_samples)},
    {MT_AT(lr_warmup_iters), MT_AT(train_iters)},
    {MT_AT(lr_warmup_samples), MT_AT(train_samples)},
    {MT_AT(lr_wsd_decay_iters), MT_AT(train_iters)},
    {MT_AT(lr_wsd_decay_samples), MT_AT(train_samples)},
    {MT_AT(out), MT_AT(score)},
    {MT_AT(entropy_out), MT_AT(score)},
    {MT_AT(logits_out), MT_AT(score)},
    {MT_AT(max_sequences), MT_AT(score)},
};

/* Pairs of options that contradict each other. */
static const size_t mt_option_excludes[][2] = {
    {MT_AT(train_iters), MT_AT(train_samples)},
    {MT_AT(lr_warmup_fraction), MT_AT(lr_warmup_iters)},
    {MT_AT(lr_warmup_fraction), MT_AT(lr_warmup_samples)},
    {MT_AT(use_rope_scaling), MT_AT(rotary_seq_len_interpolation_factor)},
    {MT_AT(rope_scaling_factor), MT_AT(rotary_seq_len_interpolation_factor)},
    {MT_AT(data_path), MT_AT(train_data_path)},
    {MT_AT(data_path), MT_AT(mock_data)},
    {MT_AT(data_path), MT_AT(tokens_file)},
    {MT_AT(train_data_path), MT_AT(mock_data)},
    {MT_AT(train_data_path), MT_AT(tokens_file)},
    {MT_AT(mock_data), MT_AT(tokens_file)},
    {MT_AT(tokens_file), MT_AT(reset_position_ids)},
    {MT_AT(tokens_file), MT_AT(reset_attention_mask)},
    {MT_AT(tokens_file), MT_AT(eod_mask_loss)},
    {MT_AT(tokens_file), MT_AT(dataloader_type)},
    {MT_AT(prompt), MT_AT(prompt_tokens)},
    {MT_AT(score), MT_AT(prompt)},
    {MT_AT(score), MT_AT(prompt_tokens)},
    {MT_AT(score), MT_AT(print_tokens)},
    {MT_AT(score), MT_AT(max_new_tokens)},
    {MT_AT(score), MT_AT(temperature)},
    {MT_AT(score), MT_AT(top_k)},
    {MT_AT(score), MT_AT(top_p)},
};

static int mt_options_check_pairs(const mt_options *options, mt_error *error) {
    for (size_t i = 0; i < sizeof mt_option_needs / sizeof mt_option_needs[0]; i++) {
        const mt_option *row = mt_option_of(mt_option_needs[i][0]), *other = mt_option_of(mt_option_needs[i][1]);
        if (mt_option_used(options, row->offset) && mt_option_is_default(options, other))
            return mt_error_set(error, "--%s needs --%s", row->name, other->name);
    }
    for (size_t i = 0; i < sizeof mt_option_excludes / sizeof mt_option_excludes[0]; i++) {
        const mt_option *row = mt_option_of(mt_option_excludes[i][0]), *other = mt_option_of(mt_option_excludes[i][1]);
        if (mt_option_used(options, row->offset) && mt_option_used(options, other->offset))
            return mt_error_set(error, "--%s and --%s exclude each other; leave one out", row->name, other->name);
    }
    return 0;
}

/* Numbers against the ranges of the table, choices against their lists. What was neither given nor set is skipped. */
static int mt_options_check_ranges(const mt_options *options, mt_program program, mt_error *error) {
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name || (row->origin == MT_OF_RUN && !(row->programs & (int)program))) continue;
        if (!mt_option_given(options, row->offset) && mt_option_is_default(options, row)) continue;
        char *text = mt_option_text(options, row);
        bool good = row->type != MT_CHOICE || mt_choice_has(row->values, text);
        if (row->type == MT_INT) good = mt_option_in_range(row, (double)*mt_option_int(options, row));
        if (row->type == MT_REAL) good = mt_option_in_range(row, *mt_option_real(options, row));
        if (!good)
            mt_error_set(error, "--%s must be %s%s, got %.100s", row->name, row->type == MT_CHOICE ? "" : "in ",
                         row->values, text);
        free(text);
        if (!good) return -1;
    }
    return 0;
}

/* Sizes that follow from others, as Megatron has them. */
static void mt_options_derive_sizes(mt_options *o) {
    if (o->ffn_hidden_size == 0)
        o->ffn_hidden_size = o->swiglu ? 4 * o->hidden_size * 2 / 3 / 64 * 64 : 4 * o->hidden_size;
    if (o->num_query_groups == 0) o->num_query_groups = o->group_query_attention ? 1 : o->num_attention_heads;
    if (o->kv_channels == 0 && o->num_attention_heads > 0) o->kv_channels = o->hidden_size / o->num_attention_heads;
}

static int mt_options_finish_sizes(mt_options *o, mt_error *error) {
    const struct {
        int64_t value;
        const char *name;
    } needed[] = {{o->num_layers, "num-layers"},
                  {o->hidden_size, "hidden-size"},
                  {o->num_attention_heads, "num-attention-heads"}};
    for (int i = 0; i < 3; i++)
        if (needed[i].value == 0)
            return mt_error_set(error, "--%s is missing: give the model's shape by its options, --hf-config or --load",
                                needed[i].name);
    if (!o->group_query_attention && o->num_query_groups > 0 && o->num_query_groups != o->num_attention_heads)
        return mt_error_set(error, "--num-query-groups %lld needs --group-query-attention",
                            (long long)o->num_query_groups);
    if (o->kv_channels == 0 && o->hidden_size % o->num_attention_heads != 0)
        return mt_error_set(
            error, "--hidden-size %lld must be a multiple of --num-attention-heads %lld, or --kv-channels given",
            (long long)o->hidden_size, (long long)o->num_attention_heads);
    mt_options_derive_sizes(o);
    if (o->ffn_hidden_size == 0)
        return mt_error_set(error, "--ffn-hidden-size is missing: --hidden-size %lld is too small to derive it",
                            (long long)o->hidden_size);
    if (o->num_attention_heads % o->num_query_groups != 0)
        return mt_error_set(error, "--num-attention-heads %lld must be a multiple of --num-query-groups %lld",
                            (long long)o->num_attention_heads, (long long)o->num_query_groups);
    if (o->swiglu && o->openai_gelu)
        return mt_error_set(error, "--swiglu and --openai-gelu exclude each other; leave one out");
    if (o->add_bias_linear) o->add_qkv_bias = o->attention_output_bias = o->mlp_bias = true;
    double attention = (double)o->num_attention_heads * (double)o->kv_channels;
    double parameters =
        (double)o->num_layers * (double)o->hidden_size * (4 * attention + 3 * (double)o->ffn_hidden_size);
    if (parameters > 1e15)
        return mt_error_set(error,
                            "--num-layers, --hidden-size, --ffn-hidden-size, --num-attention-heads and --kv-channels "
                            "make %.3g parameters; at most 1e15 are supported",
                            parameters);
    return 0;
}

/* Options of rotary positions that were given where nothing would read them. */
static int mt_options_check_rope(const mt_options *o, mt_error *error) {
    static const size_t rotary[] = {MT_AT(rotary_base), MT_AT(rotary_percent), MT_AT(rotary_interleaved),
                                    MT_AT(rotary_seq_len_interpolation_factor), MT_AT(use_rope_scaling)};
    static const struct {
        size_t offset;
        const char *types;
    } scaled[] = {
        {MT_AT(rope_scaling_factor), "linear|llama3|yarn"},
        {MT_AT(original_max_position_embeddings), "llama3|yarn"},
        {MT_AT(rope_low_freq_factor), "llama3"},
        {MT_AT(rope_high_freq_factor), "llama3"},
        {MT_AT(yarn_beta_fast), "yarn"},
        {MT_AT(yarn_beta_slow), "yarn"},
        {MT_AT(yarn_mscale), "yarn"},
        {MT_AT(yarn_mscale_all_dim), "yarn"},
        {MT_AT(yarn_attention_factor), "yarn"},
    };
    bool is_rope = strcmp(o->position_embedding_type, "rope") == 0;
    for (size_t i = 0; i < sizeof rotary / sizeof rotary[0]; i++)
        if (!is_rope && mt_option_used(o, rotary[i]))
            return mt_error_set(error, "--%s needs --position-embedding-type rope, which is %s",
                                mt_option_of(rotary[i])->name, o->position_embedding_type);
    if (!is_rope && strcmp(o->rope_scaling_type, "none") != 0)
        return mt_error_set(error, "--rope-scaling-type needs --position-embedding-type rope, which is %s",
                            o->position_embedding_type);
    for (size_t i = 0; i < sizeof scaled / sizeof scaled[0]; i++)
        if (mt_option_used(o, scaled[i].offset) && !mt_choice_has(scaled[i].types, o->rope_scaling_type))
            return mt_error_set(error, "--%s needs --rope-scaling-type %s, which is %s",
                                mt_option_of(scaled[i].offset)->name, scaled[i].types, o->rope_scaling_type);
    return 0;
}

/* One kind of scaling from the three ways to ask for it, and what that kind needs. */
static int mt_options_finish_rope(mt_options *o, mt_error *error) {
    const char *asked = o->use_rope_scaling ? "llama3" : o->rotary_seq_len_interpolation_factor > 0 ? "linear" : NULL;
    if (asked && mt_option_given(o, MT_AT(rope_scaling_type)) && strcmp(asked, o->rope_scaling_type) != 0)
        return mt_error_set(error, "--rope-scaling-type %s and --%s exclude each other; leave one out",
                            o->rope_scaling_type,
                            o->use_rope_scaling ? "use-rope-scaling" : "rotary-seq-len-interpolation-factor");
    if (asked) mt_string_set(&o->rope_scaling_type, asked);
    if (mt_options_check_rope(o, error)) return -1;
    if (strcmp(o->position_embedding_type, "rope") != 0) return 0;
    int64_t turning = (int64_t)((double)o->kv_channels * o->rotary_percent);
    if (turning < 2 || turning % 2 != 0)
        return mt_error_set(error, "--kv-channels %lld times --rotary-percent %g must be even for rotary positions",
                            (long long)o->kv_channels, o->rotary_percent);
    bool is_llama3 = strcmp(o->rope_scaling_type, "llama3") == 0, is_yarn = strcmp(o->rope_scaling_type, "yarn") == 0;
    if (o->rotary_seq_len_interpolation_factor > 0)
        o->rope_scaling_factor = (double)o->rotary_seq_len_interpolation_factor;
    if (is_llama3 && o->rope_scaling_factor == 0) o->rope_scaling_factor = 8;
    if (is_llama3 && o->original_max_position_embeddings == 0) o->original_max_position_embeddings = 8192;
    if (strcmp(o->rope_scaling_type, "none") != 0 && o->rope_scaling_factor == 0)
        return mt_error_set(error, "--rope-scaling-type %s needs --rope-scaling-factor", o->rope_scaling_type);
    if (is_yarn && o->original_max_position_embeddings == 0)
        return mt_error_set(error, "--rope-scaling-type yarn needs --original-max-position-embeddings");
    if (is_llama3 && o->rope_low_freq_factor >= o->rope_high_freq_factor)
        return mt_error_set(error, "--rope-low-freq-factor %g must be less than --rope-high-freq-factor %g",
                            o->rope_low_freq_factor, o->rope_high_freq_factor);
    if (is_yarn && o->yarn_attention_factor == 0) { // Peng et al., "YaRN"; DeepSeek's two factors
        double stretch = 0.1 * log(o->rope_scaling_factor);
        bool both = o->yarn_mscale > 0 && o->yarn_mscale_all_dim > 0;
        o->yarn_attention_factor =
            both ? (stretch * o->yarn_mscale + 1) / (stretch * o->yarn_mscale_all_dim + 1) : stretch + 1;
    }
    return 0;
}

/* Vocabulary, positions and the length of a sequence. */
static int mt_options_finish_lengths(mt_options *o, mt_program program, mt_error *error) {
    bool learned = strcmp(o->position_embedding_type, "learned_absolute") == 0;
    if (o->vocab_size == 0)
        return mt_error_set(error, "the vocabulary is unknown: give --vocab-size, or --tokenizer-type and "
                                   "--tokenizer-model");
    o->padded_vocab_size = (o->vocab_size + o->make_vocab_size_divisible_by - 1) / o->make_vocab_size_divisible_by *
                           o->make_vocab_size_divisible_by;
    bool needs_length = program == MT_PROGRAM_TRAIN || o->score;
    if (o->seq_length == 0 && needs_length)
        return mt_error_set(error, "--seq-length is missing%s", o->score ? ": --score needs it" : "");
    if (o->max_position_embeddings == 0) o->max_position_embeddings = o->seq_length;
    if (o->seq_length == 0) o->seq_length = o->max_position_embeddings;
    if (o->seq_length > o->max_position_embeddings && (learned || program == MT_PROGRAM_TRAIN))
        return mt_error_set(error, "--seq-length %lld is more than --max-position-embeddings %lld; %s",
                            (long long)o->seq_length, (long long)o->max_position_embeddings,
                            learned && o->load ? "the weights have no more" : "lower the one or raise the other");
    return 0;
}

/* `name` = `value` sequences must cut into micro-batches for every rank. */
static int mt_options_check_batch(const mt_options *o, const char *name, int64_t value, int64_t world_size,
                                  mt_error *error) {
    int64_t together = o->micro_batch_size * world_size, less = value / together * together;
    char other[64] = "";
    if (value > 0 && value % together == 0) return 0;
    if (less > 0) snprintf(other, sizeof other, "%lld or ", (long long)less);
    return mt_error_set(error,
                        "%s %lld must be a multiple of --micro-batch-size %lld times the data-parallel size %lld; "
                        "try %s%lld",
                        name, (long long)value, (long long)o->micro_batch_size, (long long)world_size, other,
                        (long long)(less + together));
}

static int mt_options_finish_batches(mt_options *o, int64_t world_size, mt_error *error) {
    int64_t ramp[3] = {0};
    if (o->global_batch_size == 0) o->global_batch_size = o->micro_batch_size * world_size;
    if (mt_options_check_batch(o, "--global-batch-size", o->global_batch_size, world_size, error)) return -1;
    if (o->rampup_batch_size.count == 0) return 0;
    bool good = o->rampup_batch_size.count == 3;
    for (int i = 0; i < 3 && good; i++)
        good = mt_parse_int(o->rampup_batch_size.items[i], &ramp[i]) && ramp[i] > 0 && ramp[i] <= 1000000000000;
    if (!good) return mt_error_set(error, "--rampup-batch-size expects three numbers: START INCREMENT SAMPLES");
    if (ramp[0] > o->global_batch_size || (o->global_batch_size - ramp[0]) % ramp[1] != 0)
        return mt_error_set(error,
                            "--rampup-batch-size: from %lld by %lld does not reach --global-batch-size %lld; the way "
                            "must be a multiple of the increment",
                            (long long)ramp[0], (long long)ramp[1], (long long)o->global_batch_size);
    if (mt_options_check_batch(o, "--rampup-batch-size's start", ramp[0], world_size, error)) return -1;
    return mt_options_check_batch(o, "--rampup-batch-size's increment", ramp[1], world_size, error);
}

/* Lengths of the schedules, in samples. */
typedef struct mt_durations {
    double total, warmup, decay, wsd_decay;
} mt_durations;

static mt_durations mt_options_durations(const mt_options *o) {
    double batch = (double)o->global_batch_size;
    bool by_samples = o->train_samples > 0;
    mt_durations d;
    d.total = by_samples ? (double)o->train_samples : (double)o->train_iters * batch;
    d.decay = by_samples ? (double)o->lr_decay_samples : (double)o->lr_decay_iters * batch;
    if (d.decay == 0) d.decay = d.total;
    d.warmup = by_samples ? (double)o->lr_warmup_samples : (double)o->lr_warmup_iters * batch;
    if (o->lr_warmup_fraction > 0) d.warmup = o->lr_warmup_fraction * d.decay;
    d.wsd_decay = by_samples ? (double)o->lr_wsd_decay_samples : (double)o->lr_wsd_decay_iters * batch;
    return d;
}

/* Steps that train_samples make: whole batches of the size at that point, as Megatron counts them. */
static int64_t mt_options_count_iterations(const mt_options *o) {
    if (o->train_samples == 0) return o->train_iters;
    if (o->rampup_batch_size.count == 0) return o->train_samples / o->global_batch_size;
    int64_t ramp = strtoll(o->rampup_batch_size.items[2], NULL, 10), iterations = 0, consumed = 0;
    int64_t end = ramp < o->train_samples ? ramp : o->train_samples;
    while (consumed <= end) {
        int64_t batch = mt_global_batch_size(o, consumed), low = 1, high = (end - consumed) / batch + 1;
        while (low < high) { // the steps until the batch grows: sizes never shrink, so halve the interval
            int64_t middle = low + (high - low + 1) / 2;
            if (mt_global_batch_size(o, consumed + (middle - 1) * batch) == batch)
                low = middle;
            else
                high = middle - 1;
        }
        iterations += low, consumed += low * batch;
    }
    if (o->train_samples > consumed) iterations += (o->train_samples - consumed) / o->global_batch_size;
    return iterations;
}

static int mt_options_finish_schedules(mt_options *o, mt_error *error) {
    bool is_wsd = strcmp(o->lr_decay_style, "WSD") == 0;
    if ((o->train_iters > 0) == (o->train_samples > 0))
        return mt_error_set(error, "give one of --train-iters and --train-samples: how long to train");
    o->num_iterations = mt_options_count_iterations(o);
    if (o->num_iterations == 0)
        return mt_error_set(error, "--train-samples %lld is less than one --global-batch-size %lld",
                            (long long)o->train_samples, (long long)o->global_batch_size);
    if (o->lr == 0) return mt_error_set(error, "--lr is missing");
    if (o->min_lr > o->lr) return mt_error_set(error, "--min-lr %g must be at most --lr %g", o->min_lr, o->lr);
    if (o->lr_warmup_init > o->lr)
        return mt_error_set(error, "--lr-warmup-init %g must be at most --lr %g", o->lr_warmup_init, o->lr);
    mt_durations d = mt_options_durations(o);
    const char *unit = o->train_samples > 0 ? "samples" : "iters";
    if (d.warmup >= d.decay)
        return mt_error_set(error, "--lr-warmup-%s must be less than --lr-decay-%s (when not given: --train-%s)", unit,
                            unit, unit);
    if (is_wsd && (d.wsd_decay == 0 || d.wsd_decay > d.decay))
        return mt_error_set(error, "--lr-decay-style WSD needs --lr-wsd-decay-%s, at most --lr-decay-%s", unit, unit);
    if (!is_wsd && (d.wsd_decay > 0 || mt_option_used(o, MT_AT(lr_wsd_decay_style))))
        return mt_error_set(error, "--lr-wsd-decay-* need --lr-decay-style WSD, which is %s", o->lr_decay_style);
    bool ramps = strcmp(o->weight_decay_incr_style, "constant") != 0;
    bool has_start = mt_option_given(o, MT_AT(start_weight_decay)),
         has_end = mt_option_given(o, MT_AT(end_weight_decay));
    if (!ramps && (has_start || has_end))
        return mt_error_set(error, "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear "
                                   "or cosine");
    if (!ramps) o->start_weight_decay = o->end_weight_decay = o->weight_decay;
    if (ramps && (!has_start || !has_end || o->start_weight_decay > o->end_weight_decay))
        return mt_error_set(error,
                            "--weight-decay-incr-style %s needs --start-weight-decay and --end-weight-decay, the "
                            "first at most the second",
                            o->weight_decay_incr_style);
    return 0;
}

static int mt_options_check_tokenizer(const mt_options *o, mt_error *error) {
    if (!o->tokenizer_type) return 0;
    bool has_file = strcmp(o->tokenizer_type, "ByteLevel") != 0;
    if (has_file && !o->tokenizer_model)
        return mt_error_set(error, "--tokenizer-type %s needs --tokenizer-model", o->tokenizer_type);
    if (!has_file && o->tokenizer_model)
        return mt_error_set(error, "--tokenizer-type ByteLevel reads no --tokenizer-model; leave one out");
    return 0;
}

static int mt_options_check_data(const mt_options *o, mt_error *error) {
    int sources = (o->data_path.count > 0) + (o->train_data_path.count > 0) + o->mock_data + (o->tokens_file != NULL);
    if (sources != 1)
        return mt_error_set(error, "give one source of data: --data-path, --train-data-path, --tokens-file or "
                                   "--mock-data");
    if ((o->reset_position_ids || o->reset_attention_mask || o->eod_mask_loss) && !o->tokenizer_type && !o->load)
        return mt_error_set(error, "--%s needs --tokenizer-type, which knows the end of a document",
                            o->reset_position_ids     ? "reset-position-ids"
                            : o->reset_attention_mask ? "reset-attention-mask"
                                                      : "eod-mask-loss");
    return 0;
}

/* "1,2,3": tokens of the vocabulary. */
static int mt_options_check_prompt_tokens(const mt_options *o, mt_error *error) {
    for (const char *at = o->prompt_tokens; at;) {
        char *end;
        errno = 0;
        long long token = strtoll(at, &end, 10);
        if (!isdigit((unsigned char)*at) || (*end && *end != ','))
            return mt_error_set(error, "--prompt-tokens expects numbers with commas between them, got '%.100s'", at);
        if (errno != 0 || token >= o->vocab_size)
            return mt_error_set(error, "--prompt-tokens: %lld is outside the vocabulary of %lld", token,
                                (long long)o->vocab_size);
        at = *end ? end + 1 : NULL;
    }
    return 0;
}

static int mt_options_check_infer(const mt_options *o, mt_error *error) {
    if (!o->load) return mt_error_set(error, "--load is missing: the folder of the model to run");
    if (o->score && !o->out && !o->entropy_out && !o->logits_out)
        return mt_error_set(error, "--score needs --out, --entropy-out or --logits-out");
    if (!o->score && mt_option_used(o, MT_AT(micro_batch_size)))
        return mt_error_set(error, "--micro-batch-size needs --score");
    if (!o->score && mt_option_used(o, MT_AT(seq_length))) return mt_error_set(error, "--seq-length needs --score");
    return mt_options_check_prompt_tokens(o, error);
}

int mt_options_finish(mt_options *options, mt_program program, int64_t world_size, mt_error *error) {
    MT_CHECK(world_size >= 1);
    if (mt_options_check_ranges(options, program, error) || mt_options_check_pairs(options, error)) return -1;
    if (mt_options_check_tokenizer(options, error)) return -1;
    if (program == MT_PROGRAM_INFER && mt_options_check_infer(options, error)) return -1;
    if (mt_options_finish_sizes(options, error) || mt_options_finish_rope(options, error)) return -1;
    mt_options_derive_family(options);
    if (mt_options_finish_lengths(options, program, error)) return -1;
    if (program == MT_PROGRAM_INFER) return 0;
    if (mt_options_check_data(options, error)) return -1;
    if (mt_options_finish_batches(options, world_size, error)) return -1;
    return mt_options_finish_schedules(options, error);
}

double mt_flops(const mt_options *o, int64_t num_sequences) {
    double heads = (double)o->num_attention_heads, groups = (double)o->num_query_groups, D = (double)o->kv_channels;
    double C = (double)o->hidden_size, F = (double)o->ffn_hidden_size, T = (double)o->seq_length;
    double projections = C * (heads + 2 * groups) * D + heads * D * C; // q, k, v and output, multiplications a token
    double attention = heads * D * T;                                  // q k and p v, each over T / 2 keys
    double mlp = (o->swiglu ? 3 : 2) * C * F;
    double per_token = (double)o->num_layers * (projections + attention + mlp) + C * (double)o->padded_vocab_size;
    return 6 * (double)num_sequences * T * per_token; // forward once, backward twice; a multiply and an add each
}

/* ==== §2e printing =============================================================================================== */

/* Prints words from `column` on, indented to `indent`, within 100 columns. */
static void mt_print_wrapped(FILE *file, const char *text, int column, int indent) {
    enum { WIDTH = 100 };
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > indent && column + 1 + length > WIDTH) {
            fprintf(file, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', file);
            column++;
        }
        fprintf(file, "%.*s", length, text);
        column += length, text += length;
        text += *text == ' ';
    }
    fputc('\n', file);
}

/* One option: its name and what it takes on the left, then help, choices and default. */
static void mt_option_help(const mt_option *row, FILE *file) {
    enum { INDENT = 34 };
    char left[120], text[600];
    const char *value = row->type == MT_INT || row->type == MT_REAL ? " N"
                        : row->type == MT_CHOICE                    ? " NAME"
                        : row->type == MT_LIST                      ? " ..."
                                                                    : "";
    if (row->type == MT_STRING || row->type == MT_LIST)
        snprintf(left, sizeof left, "  --%s %s%s", row->name, row->values, value);
    else
        snprintf(left, sizeof left, "  --%s%s", row->name, value);
    snprintf(text, sizeof text, "%s", row->help);
    size_t end = strlen(text);
    if (row->type == MT_CHOICE) {
        int length = snprintf(text + end, sizeof text - end, ": %s", row->values);
        for (size_t i = end; i < end + (size_t)length; i++)
            if (text[i] == '|') text[i] = ' ';
        end += (size_t)length;
    }
    if (row->fallback) snprintf(text + end, sizeof text - end, " (default %s)", row->fallback);
    if (fprintf(file, "%-*s", INDENT, left) > INDENT - 2) fprintf(file, "\n%*s", INDENT, "");
    mt_print_wrapped(file, text, INDENT, INDENT);
}

static void mt_options_help(mt_program program, FILE *file) {
    fprintf(file, program == MT_PROGRAM_TRAIN ? "usage: train [options]; trains a GPT-family model\n"
                                              : "usage: infer --load DIR [options]; runs a GPT-family model\n");
    const char *group = NULL;
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program)) continue;
        if (group) fprintf(file, "\n%s\n", group);
        group = NULL;
        mt_option_help(row, file);
    }
}

void mt_options_print(const mt_options *options, mt_program program, FILE *file) {
    const char *group = NULL;
    for (const mt_option *row = mt_option_table; row < mt_option_table + MT_NUM_OPTIONS; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program) || mt_option_of(row->offset) != row) continue;
        if (mt_option_is_default(options, row)) continue;
        if (group) fprintf(file, "%s\n", group);
        group = NULL;
        char *text = mt_option_text(options, row);
        fprintf(file, "  %-36s %s\n", row->name, text);
        free(text);
    }
}

/* ==== §3 kernels in plain C ====================================================================================== */

/* ==== §4 the rank grid and its groups ============================================================================ */

/* ==== §5 collectives ============================================================================================= */

/* ==== §8 the parameter table ===================================================================================== */

/* ==== §9 attention, MLP, layer =================================================================================== */

/* ==== §10 the model ============================================================================================== */

/* ==== §11 schedules ============================================================================================== */

int64_t mt_schedule_1f1b(mt_step *steps, int64_t pp, int64_t rank, int64_t micro_batches) {
    int64_t warmup = pp - rank - 1 < micro_batches ? pp - rank - 1 : micro_batches;
    int64_t count = 0, forward = 0, backward = 0;
    while (forward < warmup) steps[count++] = (mt_step){MT_STEP_FORWARD, forward++};
    while (forward < micro_batches) {
        steps[count++] = (mt_step){MT_STEP_FORWARD, forward++};
        steps[count++] = (mt_step){MT_STEP_BACKWARD, backward++};
    }
    while (backward < micro_batches) steps[count++] = (mt_step){MT_STEP_BACKWARD, backward++};
    return count;
}

/* ==== §12 gradient buckets ======================================================================================= */

/* ==== §13 optimizer ============================================================================================== */

/* The share of the way from the lowest learning rate to the highest that is left at the end of a WSD schedule. */
static double mt_wsd_coefficient(const char *style, double ratio) {
    if (strcmp(style, "linear") == 0) return 1 - ratio;
    if (strcmp(style, "cosine") == 0) return 0.5 * (cos(M_PI * ratio) + 1);
    if (strcmp(style, "minus_sqrt") == 0) return 1 - sqrt(ratio);
    return 2 * pow(0.5, ratio) - 1; // exponential
}

double mt_learning_rate(const mt_options *options, int64_t consumed_samples) {
    const char *style = options->lr_decay_style;
    double lr = options->lr, min_lr = options->min_lr, init = options->lr_warmup_init, at = (double)consumed_samples;
    mt_durations d = mt_options_durations(options);
    if (d.warmup > 0 && at <= d.warmup) return init + (lr - init) * at / d.warmup;
    if (strcmp(style, "constant") == 0) return lr;
    if (at > d.decay) return min_lr;
    if (strcmp(style, "inverse-square-root") == 0)
        return fmax(min_lr, lr * sqrt(fmax(d.warmup, 1)) / sqrt(fmax(at, 1)));
    double ratio = (at - d.warmup) / (d.decay - d.warmup), stable = d.decay - d.wsd_decay, coefficient;
    if (strcmp(style, "linear") == 0)
        coefficient = 1 - ratio;
    else if (strcmp(style, "cosine") == 0)
        coefficient = 0.5 * (cos(M_PI * ratio) + 1);
    else // WSD: warm-up, stable, decay (Hu et al., "MiniCPM")
        coefficient = at <= stable ? 1 : mt_wsd_coefficient(options->lr_wsd_decay_style, (at - stable) / d.wsd_decay);
    return min_lr + coefficient * (lr - min_lr);
}

double mt_weight_decay(const mt_options *options, int64_t consumed_samples) {
    double start = options->start_weight_decay, end = options->end_weight_decay;
    double ratio = (double)consumed_samples / mt_options_durations(options).total;
    if (ratio > 1 || strcmp(options->weight_decay_incr_style, "constant") == 0) return end;
    if (strcmp(options->weight_decay_incr_style, "cosine") == 0) ratio = 0.5 * (cos(M_PI * (1 - ratio)) + 1);
    return start + ratio * (end - start);
}

int64_t mt_global_batch_size(const mt_options *options, int64_t consumed_samples) {
    if (options->rampup_batch_size.count == 0) return options->global_batch_size;
    char **ramp = options->rampup_batch_size.items;
    int64_t start = strtoll(ramp[0], NULL, 10), increment = strtoll(ramp[1], NULL, 10);
    int64_t samples = strtoll(ramp[2], NULL, 10), increments = (options->global_batch_size - start) / increment;
    if (consumed_samples > samples || increments == 0) return options->global_batch_size;
    double samples_per_increment = (double)samples / (double)increments;
    return start + (int64_t)((double)consumed_samples / samples_per_increment) * increment;
}

/* ==== §14 checkpoints and Hugging Face =========================================================================== */

/* ==== §15 generation ============================================================================================= */

/* ==== §16 the training step ====================================================================================== */
