/* checkpoint_load.c: loads checkpoints and Hugging Face folders. Each row of the parameter table says which rows of
 * which tensor it is. Invariants: every rank checks the whole folder before anything is set; a tensor that no row takes
 * is refused unless it is known to hold no weights. */
#include "../base/file.h"
#include "../base/watchdog.h"
#include "../tokens/special_tokens.h"
#include "../options/option_agree.h"
#include "../options/option_reader.h"
#include "../options/option_rules.h"
#include "../models/generate.h"
#include "../models/transfer.h"
#include "adapter.h"
#include "checkpoint.h"
#include "checkpoint_internal.h"
#include "resume.h"
#include "run_options.h"
#include "mxfp4.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef MT_HAVE_MPI
#include <mpi.h>
#endif

/* ---- which tensors a model takes */

void mt_state_tensor_name(char *name, size_t size, mt_optimizer optimizer, mt_param_state state, const char *hf_name) {
    const char *prefix = mt_state_name(optimizer, state);
    snprintf(name, size, "%s%s%s", prefix, *prefix ? "." : "", hf_name);
}

mt_placement mt_param_placement(const mt_param *param, mt_param_state state) {
    int64_t slices = mt_max(param->hf_stack, 1), rows = param->hf_rows_total / slices, row = param->hf_row % rows;
    mt_placement place = {.row = row, .stride = 1, .width = param->whole_cols, .slices = slices};
    place.slice = param->hf_row / rows;
    place.group_rows = param->whole_rows / param->hf_groups, place.group_pitch = rows / param->hf_groups;
    if (param->hf_transposed && (state == MT_STATE_WEIGHTS || param->hf_stack == 0))
        place.transposed = true, place.width = rows, place.stride = param->hf_stride;
    else if (param->hf_stack > 0)
        place.row = row * param->whole_rows; // part `row` of hf_stride ones
    return place;
}

int64_t mt_placement_row(const mt_placement *place, int64_t r) {
    int64_t rows = place->group_rows;
    return place->row + r / rows * place->group_pitch + r % rows * place->stride;
}

int64_t mt_param_shape(const mt_param *param, mt_param_state state, int64_t shape[3]) {
    mt_placement place = mt_param_placement(param, state);
    int64_t rows = param->hf_rows_total / place.slices, dims = 0;
    if (param->hf_stack > 0) shape[dims++] = place.slices;
    if (place.transposed && !param->is_vector) shape[dims++] = param->whole_cols;
    shape[dims++] = rows;
    if (param->hf_has_channel) shape[dims++] = 1;
    if (!place.transposed && !param->is_vector) shape[dims++] = param->whole_cols;
    return dims;
}

static const char *mt_shape_print(char out[256], const int64_t *shape, int64_t num_dims) {
    int used = snprintf(out, 256, "[");
    for (int64_t i = 0; i < num_dims; i++)
        used += snprintf(out + used, 256 - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(out + used, 256 - (size_t)used, "]");
    return out;
}

/* The tensor with the scales of a tensor in fp8. */
static const mt_tensor_info *mt_scales_find(const mt_safetensors *set, const mt_tensor_info *tensor) {
    char name[256];
    snprintf(name, sizeof name, "%.200s_scale_inv", tensor->name);
    return mt_safetensors_find(set, name);
}

/* The tensor of another name, which has `to` in the place of its end `from`; NULL: none, or no such end. */
static const mt_tensor_info *mt_tensor_beside(const mt_safetensors *set, const mt_tensor_info *tensor, const char *from,
                                              const char *to) {
    char name[256];
    size_t length = strlen(tensor->name), end = strlen(from);
    if (!mt_text_ends_with(tensor->name, from) || length + strlen(to) >= sizeof name) return NULL;
    snprintf(name, sizeof name, "%.*s%s", (int)(length - end), tensor->name, to);
    return mt_safetensors_find(set, name);
}

/* Ends of names in MXFP4. */
#define MT_BLOCKS "_blocks"
#define MT_SCALES "_scales"

/* True for the scales of a tensor in fp8 or MXFP4. */
static bool mt_tensor_is_scales(const mt_safetensors *set, const mt_tensor_info *tensor) {
    const mt_tensor_info *scaled = mt_tensor_beside(set, tensor, ".weight_scale_inv", ".weight");
    if (scaled) return scaled->dtype == MT_F8_E4M3;
    scaled = mt_tensor_beside(set, tensor, MT_SCALES, MT_BLOCKS);
    return scaled && scaled->dtype == MT_U8;
}

/* to[n] = elements 0, stride, 2 stride ... of stored values, by their bytes. */
static void mt_stored_gather(char *to, const char *from, int64_t stride, int64_t size, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < size; k++) to[i * size + k] = from[i * stride * size + k];
}

/* out[i * out_stride] = element i of stored values, i < n; `in` need not be aligned. */
static void mt_stored_to_f32(float *out, int64_t out_stride, const void *in, mt_dtype dtype, int64_t n) {
    const char *from = in;
    if (dtype == MT_F32 && out_stride == 1) {
        memcpy(out, in, (size_t)n * sizeof *out);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        double wide;
        float *to = &out[i * out_stride];
        if (dtype == MT_F32) {
            memcpy(to, from + i * 4, sizeof *to);
        } else if (dtype == MT_F64) {
            memcpy(&wide, from + i * 8, sizeof wide);
            *to = (float)wide;
        } else {
            memcpy(&bits, from + i * 2, sizeof bits);
            *to = dtype == MT_BF16 ? mt_bf16_to_f32(bits) : mt_f16_to_f32(bits);
        }
    }
}

/* A matrix in fp8 must have a positive finite scale for each block; the last blocks may be partial. */
static int mt_scales_check(const mt_options *options, const mt_safetensors *set, const mt_tensor_info *tensor,
                           mt_error *error) {
    const mt_tensor_info *scales = mt_scales_find(set, tensor);
    const int64_t *block = options->weight_block_size;
    char found[256], expected[256];
    if (block[0] == 0 || tensor->num_dims != 2)
        return mt_error_set(
            error,
            "%s: tensor \"%s\" is F8_E4M3, which only a matrix may be, with scales of the blocks that "
            "\"weight_block_size\" of \"quantization_config\" in config.json gives; take a checkpoint that "
            "is not quantized",
            tensor->file, tensor->name);
    if (!scales)
        return mt_error_set(error,
                            "%s: tensor \"%s\" is F8_E4M3 and its scales \"%s_scale_inv\" are missing; get the "
                            "folder again",
                            tensor->file, tensor->name, tensor->name);
    int64_t shape[2] = {mt_divide_up(tensor->shape[0], block[0]), mt_divide_up(tensor->shape[1], block[1])};
    if (scales->dtype != MT_F32 && scales->dtype != MT_BF16 && scales->dtype != MT_F16)
        return mt_error_set(error, "%s: tensor \"%s\" is %s; scales may be F32, BF16 or F16; get the folder again",
                            scales->file, scales->name, mt_dtype_name(scales->dtype));
    if (scales->num_dims != 2 || memcmp(scales->shape, shape, sizeof shape) != 0)
        return mt_error_set(error,
                            "%s: tensor \"%s\" is %s, and \"%s\" in blocks of %lld x %lld needs %s; check "
                            "\"weight_block_size\" in config.json",
                            scales->file, scales->name, mt_shape_print(found, scales->shape, scales->num_dims),
                            tensor->name, (long long)block[0], (long long)block[1], mt_shape_print(expected, shape, 2));
    for (int64_t i = 0; i < shape[0] * shape[1]; i++) {
        float scale;
        mt_stored_to_f32(&scale, 1, (const char *)scales->data + i * mt_dtype_size(scales->dtype), scales->dtype, 1);
        if (!(scale > 0) || isinf(scale))
            return mt_error_set(error,
                                "%s: tensor \"%s\"[%lld, %lld] is %g; a scale must be positive and finite; get "
                                "the folder again",
                                scales->file, scales->name, (long long)(i / shape[1]), (long long)(i % shape[1]),
                                (double)scale);
    }
    return 0;
}

/* Stacked matrices in MXFP4: [experts, rows, columns / 32, 16], not transposed. */
static int mt_param_check_mxfp4(const mt_param *param, const mt_tensor_info *tensor, const mt_safetensors *set,
                                mt_error *error) {
    int64_t rows = param->hf_rows_total / param->hf_stack, cols = param->whole_cols;
    char name[256], found[256];
    mt_mxfp4 matrix;
    snprintf(name, sizeof name, "%.*s", (int)(strlen(tensor->name) - strlen(MT_BLOCKS)), tensor->name);
    if (mt_mxfp4_find(&matrix, set, name, error) != 0) return -1;
    if (tensor->num_dims == 4 && matrix.matrices == param->hf_stack && matrix.row_count == rows && matrix.cols == cols)
        return 0;
    return mt_error_set(error,
                        "%s: tensor \"%s\" is %s, and the model's %lld matrices of %lld x %lld need [%lld, %lld, %lld, "
                        "16]; check %s or config.json",
                        tensor->file, tensor->name, mt_shape_print(found, tensor->shape, tensor->num_dims),
                        (long long)param->hf_stack, (long long)rows, (long long)cols, (long long)param->hf_stack,
                        (long long)rows, (long long)mt_divide_up(cols, MT_MXFP4_BLOCK), param->rows_option);
}

/* A tensor with one state of a parameter must have its shape and a floating-point type; `set` has its scales. */
static int mt_param_check(const mt_param *param, mt_param_state state, const mt_tensor_info *tensor,
                          const mt_options *options, const mt_safetensors *set, mt_error *error) {
    int64_t shape[3], num_dims = mt_param_shape(param, state, shape);
    char found[256], expected[256];
    const char *rows_option = param->rows_option ? param->rows_option : param->exists_option;
    bool has_blocks = tensor->dtype == MT_U8 && mt_text_ends_with(tensor->name, MT_BLOCKS);
    if (has_blocks && param->hf_stack > 0 && !param->is_vector) return mt_param_check_mxfp4(param, tensor, set, error);
    if (tensor->dtype == MT_F8_E4M3 && mt_scales_check(options, set, tensor, error) != 0) return -1;
    if (tensor->dtype != MT_F32 && tensor->dtype != MT_BF16 && tensor->dtype != MT_F16 && tensor->dtype != MT_F64 &&
        tensor->dtype != MT_F8_E4M3)
        return mt_error_set(error,
                            "%s: tensor \"%s\" is %s; weights may be F32, BF16, F16, F64, or F8_E4M3 with scales of "
                            "blocks, so take a checkpoint that is not quantized",
                            tensor->file, tensor->name, mt_dtype_name(tensor->dtype));
    if (tensor->num_dims == num_dims && memcmp(shape, tensor->shape, (size_t)num_dims * sizeof *shape) == 0) return 0;
    bool is_matrix = !param->is_vector && tensor->num_dims == num_dims;
    int64_t cols_at = num_dims - 1 - mt_param_placement(param, state).transposed;
    bool cols_differ = is_matrix && tensor->shape[cols_at] != param->whole_cols;
    return mt_error_set(error, "%s: tensor \"%s\" is %s and the model's %s; check %s or config.json", tensor->file,
                        tensor->name, mt_shape_print(found, tensor->shape, tensor->num_dims),
                        mt_shape_print(expected, shape, num_dims), cols_differ ? param->cols_option : rows_option);
}

/* A tensor, or its blocks in MXFP4. */
static const mt_tensor_info *mt_weight_find_named(const mt_safetensors *set, const char *name) {
    char blocks[256];
    const mt_tensor_info *tensor = mt_safetensors_find(set, name);
    snprintf(blocks, sizeof blocks, "%.200s" MT_BLOCKS, name);
    return tensor ? tensor : mt_safetensors_find(set, blocks);
}

/* The tensor of a weight's name. In a model saved without its head, names lack their first word. A critic may begin as
 * a reward model, whose head GPT-2 names otherwise. */
static const mt_tensor_info *mt_weight_find(const mt_safetensors *set, const char *name) {
    static const char *const prefixes[] = {"model.", "transformer."};
    const mt_tensor_info *tensor = mt_weight_find_named(set, name);
    if (!tensor && strcmp(name, "classifier.weight") == 0) tensor = mt_safetensors_find(set, "score.weight");
    bool embeds = mt_text_ends_with(name, ".embed_tokens.weight") || mt_text_ends_with(name, ".wte.weight");
    for (int i = 0; !tensor && i < 2; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            tensor = mt_weight_find_named(set, name + strlen(prefixes[i]));
    return tensor || !embeds ? tensor : mt_safetensors_find(set, "lm_head.weight"); // mt_tensor_serves
}

/* False for the head in place of an embedding that is not in the folder, unless the model is tied. */
static bool mt_tensor_serves(const mt_tensor_info *tensor, const mt_param *param, const mt_options *options) {
    return param->is_head || mt_options_tied(options) || strcmp(tensor->name, "lm_head.weight") != 0;
}

/* The tensor that holds one state of a parameter. */
static const mt_tensor_info *mt_state_find(const mt_safetensors *set, const mt_param *param, mt_param_state state) {
    char name[192];
    if (state == MT_STATE_WEIGHTS) return mt_weight_find(set, param->hf_name);
    mt_state_tensor_name(name, sizeof name, param->optimizer, state, param->hf_name);
    return mt_safetensors_find(set, name);
}

static int mt_state_missing(const mt_param *param, mt_param_state state, const mt_options *options, const char *folder,
                            const mt_safetensors *set, mt_error *error) {
    const char *option = param->exists_option;
    int64_t count = mt_safetensors_count(set);
    if (state != MT_STATE_WEIGHTS)
        return mt_error_set(error,
                            "%s: the optimizer's state has no tensor \"%s.%s\"; go on without it by --no-load-optim, "
                            "or get the folder again",
                            folder, mt_state_name(param->optimizer, state), param->hf_name);
    if (param->is_head && options->head_type == MT_HEAD_LM)
        return mt_error_set(error,
                            "%s: has no tensor \"%s\"; if the model is tied, set tie_word_embeddings in config.json to "
                            "true, or leave out %s",
                            folder, param->hf_name, option);
    if (param->layer >= options->num_layers)
        return mt_error_set(error,
                            "%s: has no tensor \"%s\" of a module of multi-token prediction among its %lld; lower "
                            "--mtp-num-layers to the modules that it holds, perhaps 0",
                            folder, param->hf_name, (long long)count);
    return mt_error_set(error, "%s: has no tensor \"%s\" among its %lld; check config.json, --num-layers%s%s", folder,
                        param->hf_name, (long long)count, option ? " and " : "", option ? option : "");
}

/* The number of a tensor's layer, or -1; *rest is the name behind it. */
static int64_t mt_tensor_layer(const mt_options *options, const char *name, const char **rest) {
    char *end;
    if (strncmp(name, "model.", 6) == 0) name += 6;
    bool is_module = options->hf_family == MT_HF_MIMO && strncmp(name, "mtp_", 4) == 0; // after the layers
    if (is_module) name += 4;
    if (strncmp(name, "layers.", 7) != 0 || !isdigit((unsigned char)name[7])) return -1;
    errno = 0;
    int64_t layer = strtoll(name + 7, &end, 10);
    *rest = end + (*end == '.');
    return *end == '.' && errno == 0 ? layer + (is_module ? options->num_layers : 0) : -1;
}

/* The embedding, for the head of a tied language model; NULL for any other tensor. */
static const char *mt_tensor_tied_to(const mt_options *options, const char *name) {
    const char *holder =
        options->head_type == MT_HEAD_LM && mt_options_tied(options) ? mt_shared_tensor(options, name, false) : NULL;
    return holder && strcmp(holder, name) != 0 ? holder : NULL;
}

/* The name of the tensor that this one repeats, or NULL. DeepSeek's folders hold the embedding and the output layer
 * again in every module of multi-token prediction, which shares them with the model. */
static const char *mt_tensor_repeats(const mt_options *options, const char *name) {
    const char *rest;
    if (mt_tensor_tied_to(options, name)) return mt_tensor_tied_to(options, name);
    int64_t module = mt_tensor_layer(options, name, &rest) - options->num_layers;
    if (module < 0 || module >= options->mtp_num_layers) return NULL;
    return mt_shared_tensor(options, rest, true);
}

/* True if two tensors have the same shape and values, perhaps in two types. */
static bool mt_tensors_equal(const mt_tensor_info *a, const mt_tensor_info *b) {
    enum { PART = 1024 };
    float x[PART], y[PART];
    int64_t count = 1, size[2] = {mt_dtype_size(a->dtype), mt_dtype_size(b->dtype)};
    if (a->num_dims != b->num_dims) return false;
    for (int64_t i = 0; i < a->num_dims; i++) {
        if (a->shape[i] != b->shape[i]) return false;
        count *= a->shape[i];
    }
    if (a->dtype == b->dtype) return memcmp(a->data, b->data, (size_t)a->bytes) == 0;
    if (size[0] < 2 || size[1] < 2) return false;
    for (int64_t i = 0, n; i < count; i += n) {
        n = mt_min(PART, count - i);
        mt_stored_to_f32(x, 1, (const char *)a->data + i * size[0], a->dtype, n);
        mt_stored_to_f32(y, 1, (const char *)b->data + i * size[1], b->dtype, n);
        if (memcmp(x, y, (size_t)n * sizeof *x) != 0) return false;
    }
    return true;
}

/* A repeated tensor must have the same values, or training would lose them. */
static int mt_tensor_check_repeated(const mt_options *options, const mt_safetensors *set, const mt_tensor_info *tensor,
                                    mt_error *error) {
    const char *name = mt_tensor_repeats(options, tensor->name);
    const mt_tensor_info *shared = name ? mt_weight_find(set, name) : NULL;
    if (!shared || mt_tensors_equal(shared, tensor)) return 0;
    if (mt_tensor_tied_to(options, tensor->name))
        return mt_error_set(error,
                            "%s: tensor \"%s\" is not the same as \"%s\", but config.json ties them; set "
                            "\"tie_word_embeddings\" to false there, so that each has its own weights",
                            tensor->file, tensor->name, shared->name);
    return mt_error_set(error,
                        "%s: tensor \"%s\" is not the same as \"%s\", which modules of multi-token prediction share; "
                        "load with --mtp-num-layers 0",
                        tensor->file, tensor->name, shared->name);
}

/* Ends of the names of computed tensors: tables of RoPE, and the masks of GPT-2. */
static const char *const mt_computed[] = {"rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"};

/* Beginnings of the names of modules of multi-token prediction in K-EXAONE's and ERNIE's folders, which transformers
 * leaves out, too. */
static const char *const mt_other_modules[] = {"mtp.", "model.mtp_"};

/* True for tensors without weights of this model: computed tables, masks and the tied head of old checkpoints, the
 * output layer of a language model that got a value head, and modules of multi-token prediction that the model does not
 * have. */
static bool mt_tensor_is_harmless(const mt_options *options, const char *name) {
    const char *rest;
    int64_t layer = mt_tensor_layer(options, name, &rest), end = options->num_layers + options->mtp_layers_stored;
    if (layer >= options->num_layers + options->mtp_num_layers && layer < end) return true;
    if (mt_tensor_repeats(options, name)) return true;
    bool leaves_out = options->hf_family == MT_HF_EXAONE_MOE || options->hf_family == MT_HF_ERNIE4_5_MOE;
    for (int i = 0; i < 2 && leaves_out; i++)
        if (strncmp(name, mt_other_modules[i], strlen(mt_other_modules[i])) == 0) return true;
    for (size_t i = 0; i < sizeof mt_computed / sizeof *mt_computed; i++)
        if (mt_text_ends_with(name, mt_computed[i])) return true;
    const char *holder = mt_shared_tensor(options, name, false);
    return holder && strcmp(name, holder) != 0;
}

static int mt_tensor_pointer_compare(const void *a, const void *b) {
    const mt_tensor_info *x = *(const mt_tensor_info *const *)a, *y = *(const mt_tensor_info *const *)b;
    return (x > y) - (x < y);
}

/* A tensor that no row takes. */
static int mt_tensor_refuse(const mt_tensor_info *tensor, const char *stem, mt_error *error) {
    if (strcmp(stem, "adapter_model") == 0)
        return mt_error_set(error,
                            "%s: tensor \"%.120s\" has no place: its matrix is not among the targets, or not in the "
                            "model; check \"target_modules\" of adapter_config.json, --lora-target and --load",
                            tensor->file, tensor->name);
    return mt_error_set(error,
                        "%s: tensor \"%.120s\" has no place in the model that the options describe; check "
                        "config.json, --num-layers and the options for biases and norms",
                        tensor->file, tensor->name);
}

/* A row must take every tensor of weights: to leave one out silently would load another model. */
static int mt_weights_check_unused(const mt_param *rows, int64_t count, const mt_options *options, const char *stem,
                                   const mt_safetensors *set, mt_error *error) {
    const mt_tensor_info **used = mt_malloc(count * (int64_t)sizeof *used), *unused = NULL;
    for (int64_t i = 0; i < count; i++) used[i] = mt_weight_find(set, rows[i].hf_name);
    qsort(used, (size_t)count, sizeof *used, mt_tensor_pointer_compare);
    for (int64_t i = 0; i < mt_safetensors_count(set) && !unused; i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(set, i);
        if (mt_tensor_is_harmless(options, tensor->name) || mt_tensor_is_scales(set, tensor)) continue;
        if (!bsearch(&tensor, used, (size_t)count, sizeof *used, mt_tensor_pointer_compare)) unused = tensor;
    }
    free(used);
    return unused ? mt_tensor_refuse(unused, stem, error) : 0;
}

bool mt_stem_holds(const char *stem, const mt_param *param) {
    if (strcmp(stem, "optimizer") == 0) return param->trained;
    return mt_param_is_adapter(param) == (strcmp(stem, "adapter_model") == 0);
}

/* Opens a stem's files; the experts of a model are apart in the set, whatever the form of its folder. */
static int mt_stem_open(mt_safetensors **set, const char *folder, const char *stem, const mt_options *options,
                        mt_error *error) {
    if (mt_safetensors_open_folder(set, folder, stem, error) != 0) return -1;
    if (strcmp(stem, "model") != 0 || mt_experts_unstack(*set, options, error) == 0) return 0;
    mt_safetensors_close(*set);
    *set = NULL;
    return -1;
}

/* The states in a stem's files: [the result, mt_stem_end). The optimizer of an fp32 run has no master weights. */
static int mt_stem_first(const mt_safetensors *set, bool weights, const mt_param *row) {
    bool masters = !weights && mt_state_find(set, row, MT_STATE_MASTER);
    return weights ? MT_STATE_WEIGHTS : masters ? MT_STATE_MASTER : MT_STATE_EXP_AVG;
}

static int mt_stem_end(bool weights, const mt_param *row) {
    return weights ? MT_STATE_MASTER : mt_num_states(row->optimizer);
}

/* True for the value head that --value-head adds to a language model. */
static bool mt_param_grows(const mt_param *param, const mt_options *options) {
    return options->value_head && param->is_head;
}

/* The half of an adapter as its file has it: of its own rank, which may be smaller than the model's. */
static mt_param mt_adapter_half(const mt_param *row, const mt_adapter_shape *shape) {
    mt_param half = *row;
    if (row->role == MT_LORA_A) half.whole_rows = half.hf_rows_total = shape->rank;
    if (row->role == MT_LORA_B) half.whole_cols = shape->rank;
    return half;
}

/* The adapter of a row; without a file, that of the options. */
static int mt_adapter_of(const mt_adapter_file *file, const mt_param *row, const mt_options *options,
                         mt_adapter_shape *shape, mt_error *error) {
    *shape = (mt_adapter_shape){true, options->lora_rank, 0};
    if (!file || !mt_param_is_adapter(row)) return 0;
    if (mt_adapter_file_find(file, row, shape, error) != 0) return -1;
    if (mt_options_gave(options, offsetof(mt_options, lora_target))) shape->exists = true; // all that it names
    return 0;
}

/* Checks a stem's tensors against the whole model's table, so that every rank finds the same. `adapter`: of the stem
 * adapter_model, else NULL. */
static int mt_stem_check(const mt_safetensors *set, const char *stem, const mt_adapter_file *adapter,
                         const mt_options *options, const char *folder, mt_error *error) {
    mt_param *rows;
    int64_t count = 0, all = mt_params_build(&rows, options, NULL);
    bool weights = strcmp(stem, "optimizer") != 0;
    for (int64_t i = 0; i < all; i++)
        if (mt_stem_holds(stem, &rows[i])) rows[count++] = rows[i];
    int first = mt_stem_first(set, weights, &rows[0]), status = 0;
    for (int64_t i = 0; i < count; i++)
        for (int state = first; state < mt_stem_end(weights, &rows[i]) && status == 0; state++) {
            const mt_tensor_info *tensor = mt_state_find(set, &rows[i], (mt_param_state)state);
            if (tensor && !mt_tensor_serves(tensor, &rows[i], options)) tensor = NULL;
            if (!tensor && weights && mt_param_grows(&rows[i], options)) continue;
            mt_adapter_shape shape;
            status = mt_adapter_of(adapter, &rows[i], options, &shape, error);
            if (status != 0 || (!tensor && !shape.exists)) continue;
            mt_param row = adapter ? mt_adapter_half(&rows[i], &shape) : rows[i];
            if (tensor && !shape.exists)
                status = mt_tensor_refuse(tensor, stem, error);
            else
                status = tensor ? mt_param_check(&row, (mt_param_state)state, tensor, options, set, error)
                                : mt_state_missing(&row, (mt_param_state)state, options, folder, set, error);
        }
    if (status == 0 && weights) status = mt_weights_check_unused(rows, count, options, stem, set, error);
    for (int64_t i = 0; i < mt_safetensors_count(set) && status == 0 && weights; i++)
        status = mt_tensor_check_repeated(options, set, mt_safetensors_get(set, i), error);
    free(rows);
    return status;
}

/* ---- reading files: each byte once for all ranks of a host, and checked against its sum */

char *mt_align_direct(char *memory) {
    return memory + (-(uintptr_t)memory & (MT_DIRECT - 1));
}

int mt_open_direct(const char *path, int flags) {
#ifdef O_DIRECT
    return open(path, flags | O_DIRECT | O_NONBLOCK | O_CLOEXEC); // a pipe in the file's place must not block
#else
    (void)path, (void)flags;
    return -1;
#endif
}

/* Files are read in segments, through slots of memory that all ranks of a host share. Any free thread of any rank reads
 * the next segment; its slot is free again when every rank has copied its part. Waiting threads sleep: cores may be
 * fewer than ranks and threads. MT_STAGED: elements of a conversion buffer. MT_SPARES: kept buffers. */
enum { MT_SEGMENT = 2 << 20, MT_SLOTS = 12, MT_READERS = 4, MT_STAGED = 1 << 18, MT_SPARES = 8 };

/* At the start of the shared memory. */
typedef struct mt_segment_slots {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t claimed;         // segments of the file that threads have taken on
    int64_t ready[MT_SLOTS]; // 1 + the segment in the slot
    int64_t taken[MT_SLOTS]; // ranks that are done with it
    int64_t uses[MT_SLOTS];  // segments that all ranks are done with
} mt_segment_slots;

/* Memory that all ranks of one host share, on the CPU; `host` is their group. Every rank of `world` calls these; writes
 * before a barrier are seen by all ranks after it. */
typedef struct host_memory {
    mt_group host;
    char *memory; // [bytes]
    void *window; // of MPI; NULL for one rank
} host_memory;

static void host_memory_open(host_memory *shared, const mt_group *world, int64_t bytes) {
    *shared = (host_memory){.host = {.name = "host", .size = 1}};
#ifdef MT_HAVE_MPI
    if (world->size > 1) {
        MPI_Comm *comm = mt_malloc(sizeof *comm);
        MPI_Comm_split_type(*(MPI_Comm *)world->comm, MPI_COMM_TYPE_SHARED, world->rank, MPI_INFO_NULL, comm);
        MPI_Comm_size(*comm, &shared->host.size);
        MPI_Comm_rank(*comm, &shared->host.rank);
        shared->host.comm = comm;
    }
    if (shared->host.size > 1) {
        MPI_Aint size;
        int unit;
        MPI_Win *window = mt_malloc(sizeof *window);
        MT_CHECK(MPI_Win_allocate_shared(shared->host.rank == 0 ? (MPI_Aint)bytes : 0, 1, MPI_INFO_NULL,
                                         *(MPI_Comm *)shared->host.comm, &shared->memory, window) == MPI_SUCCESS);
        MPI_Win_shared_query(*window, 0, &size, &unit, &shared->memory);
        MPI_Win_lock_all(MPI_MODE_NOCHECK, *window);
        shared->window = window;
    }
#else
    (void)world;
#endif
    if (shared->host.size == 1) shared->memory = mt_malloc(bytes);
}

static void host_memory_barrier(host_memory *shared) {
#ifdef MT_HAVE_MPI
    if (shared->window) MPI_Win_sync(*(MPI_Win *)shared->window);
    mt_barrier(&shared->host);
    if (shared->window) MPI_Win_sync(*(MPI_Win *)shared->window);
#else
    (void)shared;
#endif
}

static void host_memory_close(host_memory *shared) {
    if (shared->host.size == 1) free(shared->memory);
#ifdef MT_HAVE_MPI
    if (shared->window) {
        MPI_Win_unlock_all(*(MPI_Win *)shared->window);
        MPI_Win_free(shared->window);
    }
    if (shared->host.comm) MPI_Comm_free(shared->host.comm);
    free(shared->window);
    free(shared->host.comm);
#endif
}

typedef struct mt_reader {
    mt_model *model;
    const mt_checksums *sums; // NULL: nothing is checked
    host_memory shared;       // slots, then window
    mt_segment_slots *slots;
    char *window;            // [MT_SLOTS, MT_SEGMENT]
    float *spare[MT_SPARES]; // buffers for transposed tensors
    int64_t spare_bytes[MT_SPARES];
    unsigned next_spare;
    float *staged; // [MT_STAGED] converted elements, and in bf16
    uint16_t *staged_bf16;
    float *decoded;       // [MT_STAGED] elements of a tensor in fp8
    float f8_values[256]; // of the codes of e4m3
    const mt_safetensors_file *file;
    const mt_file_checksums *file_sums;
    int descriptor, direct; // direct: past the page cache, or -1
    int status;             // under the slots' lock, like the next two
    bool damaged;           // a sum differs
    mt_error error;
} mt_reader;

static void mt_segment_slots_init(mt_segment_slots *slots) {
    pthread_mutexattr_t lock;
    pthread_condattr_t changed;
    memset(slots, 0, sizeof *slots);
    pthread_mutexattr_init(&lock);
    pthread_condattr_init(&changed);
    pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&slots->lock, &lock);
    pthread_cond_init(&slots->changed, &changed);
    pthread_mutexattr_destroy(&lock);
    pthread_condattr_destroy(&changed);
}

static void mt_reader_open(mt_reader *r, mt_model *m, const mt_checksums *sums) {
    const int64_t bytes = 2 * MT_DIRECT + (int64_t)MT_SLOTS * MT_SEGMENT;
    _Static_assert(sizeof(mt_segment_slots) <= MT_DIRECT && MT_SEGMENT % MT_SUM_BLOCK == 0,
                   "layout of the shared memory");
    *r = (mt_reader){.model = m, .sums = sums, .descriptor = -1, .direct = -1};
    r->staged = mt_malloc(MT_STAGED * 4), r->staged_bf16 = mt_malloc(MT_STAGED * 2);
    r->decoded = mt_malloc(MT_STAGED * 4);
    for (int code = 0; code < 256; code++) r->f8_values[code] = mt_f8_to_f32((uint8_t)code, MT_F8_E4M3);
    host_memory_open(&r->shared, &mt_model_grid(m)->world, bytes);
    r->slots = (mt_segment_slots *)mt_align_direct(r->shared.memory); // mapped by pages: the same offset on every rank
    r->window = (char *)r->slots + MT_DIRECT;
    if (r->shared.host.rank == 0) mt_segment_slots_init(r->slots);
    host_memory_barrier(&r->shared);
}

static void mt_reader_close(mt_reader *r) {
    for (int i = 0; i < MT_SPARES; i++) free(r->spare[i]);
    free(r->staged);
    free(r->staged_bf16);
    free(r->decoded);
    host_memory_barrier(&r->shared);
    if (r->shared.host.rank == 0) {
        pthread_mutex_destroy(&r->slots->lock);
        pthread_cond_destroy(&r->slots->changed);
    }
    host_memory_close(&r->shared);
}

static void mt_reader_fail(mt_reader *r, const mt_error *error, bool damaged) {
    pthread_mutex_lock(&r->slots->lock);
    if (r->status == 0) r->status = -1, r->error = *error;
    r->damaged = r->damaged || damaged;
    pthread_mutex_unlock(&r->slots->lock);
}

/* Takes on the next segment of the file once its slot is free; -1 at the end. */
static int64_t mt_reader_claim(mt_reader *r) {
    mt_segment_slots *slots = r->slots;
    int64_t count = mt_divide_up(r->file->bytes, MT_SEGMENT);
    pthread_mutex_lock(&slots->lock);
    while (slots->claimed < count && slots->uses[slots->claimed % MT_SLOTS] != slots->claimed / MT_SLOTS)
        pthread_cond_wait(&slots->changed, &slots->lock);
    int64_t i = slots->claimed < count ? slots->claimed++ : -1;
    pthread_mutex_unlock(&slots->lock);
    return i;
}

/* Reads bytes [offset, offset + bytes) of the file to aligned memory, in whole pages if possible. */
static int mt_reader_read(const mt_reader *r, char *to, int64_t offset, int64_t bytes) {
    ssize_t got = -1;
    if (r->direct >= 0) got = pread(r->direct, to, (size_t)(mt_divide_up(bytes, MT_DIRECT) * MT_DIRECT), offset);
    int64_t done = mt_max(got, 0);
    return done >= bytes ? 0 : mt_file_read_at(r->descriptor, to + done, bytes - done, offset + done);
}

/* Reads segment i into its slot, through the memory `own` unless that is NULL, and checks its blocks. */
static void mt_reader_fill(mt_reader *r, int64_t i, char *own) {
    int64_t offset = i * MT_SEGMENT, bytes = mt_min(MT_SEGMENT, r->file->bytes - offset);
    char *slot = r->window + i % MT_SLOTS * MT_SEGMENT;
    const char *from = own ? own : slot;
    mt_error error;
    int watched = mt_watch_file_begin(r->file->path, MT_FILE_READ);
    int status = mt_reader_read(r, own ? own : slot, offset, bytes);
    mt_watch_file_end(watched);
    if (status != 0) {
        mt_file_read_error(&error, r->file->path);
        mt_reader_fail(r, &error, false);
        return;
    }
    for (int64_t first = 0; first < bytes; first += MT_SUM_BLOCK) {
        int64_t block = (offset + first) / MT_SUM_BLOCK, n = mt_min(MT_SUM_BLOCK, bytes - first);
        if (own) memcpy(slot + first, own + first, (size_t)n);
        if (!r->file_sums) continue;
        if (block < r->file_sums->count && mt_crc32c(from + first, n) == r->file_sums->sums[block]) continue;
        char *folder = mt_strdup(r->file->path), *slash = strrchr(folder, '/');
        if (slash) *slash = 0;
        mt_checksums_damaged(&error, folder, r->file_sums->name, block, r->file->bytes);
        mt_reader_fail(r, &error, true);
        free(folder);
        return;
    }
}

/* A thread: reads segments to the end of the file. A segment that cannot be read is announced too, so that no rank
 * waits for it. Memory that processes share has small pages, which a direct read fills one by one: slower than to read
 * into own memory and copy. */
static void *mt_reader_run(void *context) {
    mt_reader *r = context;
    char *own = r->shared.host.size > 1 ? mt_cpu_ops.memory_alloc(MT_SEGMENT) : NULL;
    for (int64_t i; (i = mt_reader_claim(r)) >= 0;) {
        if (r->descriptor >= 0) mt_reader_fill(r, i, own);
        pthread_mutex_lock(&r->slots->lock);
        r->slots->ready[i % MT_SLOTS] = i + 1;
        pthread_cond_broadcast(&r->slots->changed);
        pthread_mutex_unlock(&r->slots->lock);
    }
    if (own) mt_cpu_ops.memory_free(own);
    return NULL;
}

/* Waits for segment i, which any rank may read; the watchdog reports a wait that does not end. */
static const char *mt_reader_get(mt_reader *r, int64_t i) {
    mt_watch_begin("reading a checkpoint", r->shared.host.name);
    pthread_mutex_lock(&r->slots->lock);
    while (r->slots->ready[i % MT_SLOTS] != i + 1) pthread_cond_wait(&r->slots->changed, &r->slots->lock);
    pthread_mutex_unlock(&r->slots->lock);
    mt_watch_end();
    return r->window + i % MT_SLOTS * MT_SEGMENT;
}

/* This rank is done with segment i. */
static void mt_reader_give_back(mt_reader *r, int64_t i) {
    mt_segment_slots *slots = r->slots;
    int64_t slot = i % MT_SLOTS;
    pthread_mutex_lock(&slots->lock);
    if (++slots->taken[slot] == r->shared.host.size) {
        slots->taken[slot] = 0, slots->uses[slot]++;
        pthread_cond_broadcast(&slots->changed);
    }
    pthread_mutex_unlock(&slots->lock);
}

/* Begins a file: empties the slots and starts threads; returns their number. */
static int mt_reader_begin(mt_reader *r, const mt_safetensors_file *file, pthread_t threads[MT_READERS]) {
    const char *slash = strrchr(file->path, '/');
    int count = (int)mt_max(MT_READERS / r->shared.host.size, 1);
    int64_t bytes;
    mt_error error;
    r->file = file;
    r->file_sums = r->sums ? mt_checksums_find(r->sums, slash ? slash + 1 : file->path) : NULL;
    r->descriptor = mt_file_open(file->path, &bytes, &error);
    r->direct = r->descriptor >= 0 ? mt_open_direct(file->path, O_RDONLY) : -1;
    if (r->descriptor < 0) mt_reader_fail(r, &error, false);
    host_memory_barrier(&r->shared); // all ranks are done with the file before
    if (r->shared.host.rank == 0) {
        mt_segment_slots *slots = r->slots;
        slots->claimed = 0;
        memset(slots->ready, 0, sizeof slots->ready);
        memset(slots->taken, 0, sizeof slots->taken);
        memset(slots->uses, 0, sizeof slots->uses);
    }
    host_memory_barrier(&r->shared);
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, mt_reader_run, r) != 0) mt_die("cannot start a thread; raise ulimit -u");
    return count;
}

/* A buffer for a transposed tensor: a kept one of this size, as touching new pages costs more than filling it. */
static float *mt_reader_borrow(mt_reader *r, int64_t bytes) {
    for (int i = 0; i < MT_SPARES; i++)
        if (r->spare[i] && r->spare_bytes[i] == bytes) {
            float *memory = r->spare[i];
            r->spare[i] = NULL;
            return memory;
        }
    return mt_malloc(bytes);
}

/* Keeps a buffer, instead of the oldest if there are MT_SPARES. */
static void mt_reader_return(mt_reader *r, float *memory, int64_t bytes) {
    int at = r->next_spare++ % MT_SPARES;
    for (int i = 0; i < MT_SPARES; i++)
        if (!r->spare[i]) at = i;
    free(r->spare[at]);
    r->spare[at] = memory, r->spare_bytes[at] = bytes;
}

/* ---- from tensors into buckets */

/* One state of a parameter, and the tensor that it is loaded from. Weights of a bf16 model go into two parts: in bf16,
 * and as master weights, which keep the stored precision. */
typedef struct mt_target {
    const mt_param *param;
    const mt_tensor_info *tensor, *scales; // of stacked experts: the expert's slice; scales: of fp8 or MXFP4, else NULL
    mt_placement place;                    // in the tensor
    mt_param_state state;                  // of shards[0]
    mt_shard shards[2];                    // either may have no data
    bool weights;
    float factor;       // of the values of an adapter's B
    float *transposed;  // this rank's part of a transposed tensor, until its last segment is read
    float *scaled;      // this rank's part of a state with scales, likewise
    int64_t not_finite; // values of weights
} mt_target;

/* The non-finite ones of values[n], whose bucket elements begin at `at`, that lie in a part. */
static int64_t mt_count_not_finite(const mt_shard *shard, int64_t at, const float *values, int64_t n) {
    int64_t count = 0, end = mt_min(n, shard->first + shard->count - at);
    for (int64_t i = mt_max(shard->first - at, 0); i < end; i++) count += !isfinite(values[i]);
    return count;
}

/* The state with scales that a target sets, whose scale its last value may change, as the shard in host memory; no
 * data: none. */
static mt_shard mt_target_scaled(mt_target *t, int k) {
    mt_shard part = t->shards[k];
    int64_t begin, end;
    mt_param_part(t->param, &part, &begin, &end);
    if (!part.data || !mt_state_has_scale(part.dtype) || begin >= end) return (mt_shard){.data = NULL};
    if (!t->scaled) t->scaled = mt_calloc((end - begin) * (int64_t)sizeof *t->scaled);
    return (mt_shard){t->scaled, t->param->offset + begin, end - begin, MT_F32};
}

/* Writes n values to elements [at, at + n) of this rank's part of the parameter. */
static void mt_target_write(mt_reader *r, mt_target *t, int64_t at, const float *values, int64_t n) {
    mt_model *m = r->model;
    at += t->param->offset;
    for (int64_t done = 0, count; done < n; done += count) {
        count = mt_min(n - done, MT_STAGED);
        if (t->weights) t->not_finite += mt_count_not_finite(&t->shards[0], at + done, values + done, count);
        for (int k = 0; k < 2; k++) {
            const mt_shard *shard = &t->shards[k];
            if (!shard->data) continue;
            if (mt_state_has_scale(shard->dtype)) {
                mt_shard part = mt_target_scaled(t, k);
                int64_t begin = mt_max(at + done, part.first), end = mt_min(at + done + count, part.first + part.count);
                if (part.data && begin < end)
                    memcpy((float *)part.data + begin - part.first, values + begin - at,
                           (size_t)(end - begin) * sizeof *values);
                continue;
            }
            for (int64_t i = 0; shard->dtype == MT_BF16 && i < count; i++)
                r->staged_bf16[i] = mt_f32_to_bf16(values[done + i]);
            mt_shard_write(m, shard, at + done, shard->dtype == MT_BF16 ? (const void *)r->staged_bf16 : values + done,
                           count);
        }
        mt_model_ops(m)->stream_synchronize(mt_model_stream(m)); // before the buffers are filled again
    }
}

/* mt_target_write for stored elements. */
static void mt_target_write_stored(mt_reader *r, mt_target *t, int64_t at, const char *from, mt_dtype dtype,
                                   int64_t n) {
    if (dtype == MT_F32 && (uintptr_t)from % sizeof(float) == 0 && t->factor == 1) {
        mt_target_write(r, t, at, (const float *)(const void *)from, n);
        return;
    }
    for (int64_t done = 0, count; done < n; done += count) {
        count = mt_min(n - done, MT_STAGED);
        mt_stored_to_f32(r->staged, 1, from + done * mt_dtype_size(dtype), dtype, count);
        for (int64_t i = 0; t->factor != 1 && i < count; i++) r->staged[i] *= t->factor;
        mt_target_write(r, t, at + done, r->staged, count);
    }
}

/* Rows [*first, *end) of this rank's part of a parameter that a part of the bucket touches: fewer than all where a data
 * group shards the state. */
static void mt_target_rows(const mt_target *t, int64_t *first, int64_t *end) {
    int64_t cols = t->param->cols, count = mt_param_rows_stored(t->param) * cols;
    *first = count, *end = 0;
    for (int k = 0; k < 2; k++) {
        const mt_shard *shard = &t->shards[k];
        int64_t begin = mt_max(shard->first - t->param->offset, 0);
        int64_t last = mt_min(shard->first + shard->count - t->param->offset, count);
        if (!shard->data || begin >= last) continue;
        *first = mt_min(*first, begin / cols), *end = mt_max(*end, mt_divide_up(last, cols));
    }
    if (*end == 0) *first = 0;
}

/* True for a tensor in MXFP4, whose elements are bytes of two values. */
static bool mt_target_is_mxfp4(const mt_target *t) {
    return t->tensor->dtype == MT_U8;
}

/* The first row of the parameter in the tensor's view. */
static int64_t mt_target_row(const mt_target *t) {
    return t->place.stride > 1 ? 0 : t->place.row;
}

/* The view of a tensor has one column for each value, and of rows that take turns (place.stride) the parameter's own
 * alone. This is the view's part of a rectangle of elements. */
static mt_rectangle mt_target_view(const mt_target *t, mt_rectangle given) {
    int64_t *first = t->place.transposed ? &given.col : &given.row;
    int64_t *count = t->place.transposed ? &given.cols : &given.rows, stride = t->place.stride;
    if (mt_target_is_mxfp4(t)) given.col *= 2, given.cols *= 2;
    if (stride == 1) return given;
    int64_t end = mt_divide_up(mt_max(*first + *count - t->place.row, 0), stride);
    *first = mt_divide_up(mt_max(*first - t->place.row, 0), stride), *count = end - *first;
    return given;
}

/* Groups of rows of this rank's part that are apart in the tensor. */
static int64_t mt_target_groups(const mt_target *t) {
    const mt_param *param = t->param;
    return param->hf_groups > 1 ? mt_max(param->rows / t->place.group_rows, 1) : 1;
}

/* The rows and columns of the tensor's view that this rank loads, in its group of rows `group`. */
static mt_rectangle mt_target_rectangle(const mt_target *t, int64_t group) {
    const mt_param *param = t->param;
    mt_rectangle own = mt_param_rectangle(param);
    own.rows /= mt_target_groups(t);
    if (param->hf_groups > 1)
        own.row = mt_placement_row(&t->place, own.row + group * own.rows);
    else
        own.row += mt_target_row(t);
    if (!t->place.transposed) return own;
    int64_t first, end;
    mt_target_rows(t, &first, &end);
    return (mt_rectangle){own.col, own.cols, own.row + first, end - first};
}

/* to[n, m], rows `pitch` apart = the transpose of stored from[m, n], rows `width` apart; blocks of 16 rows of `to` stay
 * in the cache. */
static void mt_stored_transpose(float *to, int64_t pitch, const char *from, int64_t width, mt_dtype dtype, int64_t m,
                                int64_t n) {
    int64_t size = mt_dtype_size(dtype);
    for (int64_t first = 0, lines; first < n; first += lines) {
        lines = mt_min(n - first, 16);
        for (int64_t row = 0; row < m; row++)
            mt_stored_to_f32(to + first * pitch + row, pitch, from + (row * width + first) * size, dtype, lines);
    }
}

/* Loads this rank's part of a rectangle of the tensor's view, whose elements are at `data`, row after row; of its group
 * of rows `group`. */
static void mt_target_load_group(mt_reader *r, mt_target *t, int64_t group, mt_rectangle given, const char *data,
                                 mt_dtype dtype) {
    const mt_param *param = t->param;
    mt_rectangle own = mt_target_rectangle(t, group), part = mt_rectangle_intersect(given, own);
    int64_t size = mt_dtype_size(dtype), cols = param->cols;
    if (part.rows == 0 || part.cols == 0) return;
    if (t->place.transposed) {
        if (!t->transposed) t->transposed = mt_reader_borrow(r, own.rows * own.cols * 4);
        mt_stored_transpose(t->transposed + (part.col - own.col) * cols + part.row - own.row, cols,
                            data + ((part.row - given.row) * given.cols + part.col - given.col) * size, given.cols,
                            dtype, part.rows, part.cols);
        return;
    }
    bool contiguous = part.cols == given.cols && part.cols == cols; // whole rows in the tensor and in the bucket
    for (int64_t row = 0, rows = contiguous ? part.rows : 1; row < part.rows; row += rows) {
        const char *from = data + ((part.row + row - given.row) * given.cols + part.col - given.col) * size;
        int64_t to_row = group * own.rows + part.row + row - own.row, to_col = part.col - own.col;
        mt_target_write_stored(r, t, to_row * cols + to_col, from, dtype, rows * part.cols);
    }
}

static void mt_target_load_rectangle(mt_reader *r, mt_target *t, mt_rectangle given, const char *data, mt_dtype dtype) {
    for (int64_t group = 0; group < mt_target_groups(t); group++) mt_target_load_group(r, t, group, given, data, dtype);
}

/* values[cols] = a row of the tensor's view from column `col` on, for a tensor in fp8; the elements are at `bits`. */
static void mt_target_decode_fp8(const mt_reader *r, const mt_target *t, int64_t row, int64_t col, int64_t cols,
                                 const unsigned char *bits, float *values) {
    const int64_t *block = mt_model_options(r->model)->weight_block_size;
    const mt_tensor_info *scales = t->scales;
    const char *of_row = (const char *)scales->data + row / block[0] * scales->shape[1] * mt_dtype_size(scales->dtype);
    for (int64_t first = col, end; col < first + cols; col = end) {
        float scale;
        mt_stored_to_f32(&scale, 1, of_row + col / block[1] * mt_dtype_size(scales->dtype), scales->dtype, 1);
        end = mt_min((col / block[1] + 1) * block[1], first + cols);
        for (int64_t i = col; i < end; i++) *values++ = r->f8_values[bits[i - first]] * scale;
    }
}

/* values = a part of the tensor's view. The rectangle `given` of the tensor is at `data`, row after row. */
static void mt_target_decode(const mt_reader *r, const mt_target *t, mt_rectangle part, mt_rectangle given,
                             const char *data, float *values) {
    enum { GATHERED = 512 };
    const mt_placement *place = &t->place;
    int64_t size = mt_dtype_size(t->tensor->dtype), stride = place->stride;
    bool mxfp4 = mt_target_is_mxfp4(t);
    for (int64_t i = 0; i < part.rows; i++, values += part.cols) {
        int64_t row = part.row + i, col = part.col;
        if (stride > 1 && !place->transposed) row = place->row + row * stride;
        if (stride > 1 && place->transposed) col = place->row + col * stride;
        if (mxfp4) col /= 2;
        const char *from = data + ((row - given.row) * given.cols + col - given.col) * size;
        if (mxfp4) {
            const unsigned char *scales = t->scales->data;
            mt_mxfp4_row_to_f32(values, (const unsigned char *)from,
                                scales + row * t->param->whole_cols / MT_MXFP4_BLOCK, part.col, part.cols);
        } else if (t->scales) {
            mt_target_decode_fp8(r, t, row, col, part.cols, (const unsigned char *)from, values);
        } else {
            double gathered[GATHERED]; // of any type
            for (int64_t k = 0, n; k < part.cols; k += n) {
                n = mt_min(part.cols - k, GATHERED);
                mt_stored_gather((char *)gathered, from + k * stride * size, stride, size, n);
                mt_stored_to_f32(values + k, 1, gathered, t->tensor->dtype, n);
            }
        }
    }
}

/* mt_target_load_rectangle for a rectangle of a tensor whose view is not the tensor itself: decodes this rank's part,
 * then loads it as fp32. */
static void mt_target_load_view(mt_reader *r, mt_target *t, mt_rectangle given, const char *data) {
    mt_rectangle part = mt_target_view(t, given);
    if (mt_target_groups(t) == 1) part = mt_rectangle_intersect(part, mt_target_rectangle(t, 0));
    int64_t cols = mt_min(part.cols, MT_STAGED), rows = mt_max(MT_STAGED / mt_max(cols, 1), 1);
    for (int64_t row = 0; row < part.rows; row += rows)
        for (int64_t col = 0; col < part.cols; col += cols) {
            mt_rectangle piece = {part.row + row, mt_min(rows, part.rows - row), part.col + col,
                                  mt_min(cols, part.cols - col)};
            mt_target_decode(r, t, piece, given, data, r->decoded);
            mt_target_load_rectangle(r, t, piece, (const char *)r->decoded, MT_F32);
        }
}

/* Loads this rank's part of elements [begin, end) of the tensor. */
static void mt_target_load_elements(mt_reader *r, mt_target *t, int64_t begin, int64_t end, const char *data) {
    int64_t width = mt_target_is_mxfp4(t) ? t->place.width / 2 : t->place.width;
    if (mt_param_is_adapter(t->param)) width = t->tensor->shape[1]; // perhaps of a smaller rank
    int64_t size = mt_dtype_size(t->tensor->dtype);
    mt_rectangle given[3];
    int count = mt_rectangles_of_run(given, begin, end, width);
    for (int i = 0; i < count; data += given[i].rows * given[i].cols * size, i++)
        if (t->scales || t->place.stride > 1)
            mt_target_load_view(r, t, given[i], data);
        else
            mt_target_load_rectangle(r, t, given[i], data, t->tensor->dtype);
}

/* After the tensor's last segment: writes a transposed tensor, and sets padding rows to 0. */
static void mt_target_finish(mt_reader *r, mt_target *t) {
    const mt_param *param = t->param;
    int64_t stored = mt_param_rows_stored(param) * param->cols, padding = param->rows * param->cols - stored;
    if (t->transposed) {
        mt_rectangle own = mt_target_rectangle(t, 0);
        int64_t first_row = own.col - mt_target_row(t) - param->first_row;
        mt_target_write(r, t, first_row * param->cols, t->transposed, own.rows * own.cols);
        mt_reader_return(r, t->transposed, own.rows * own.cols * 4);
        t->transposed = NULL;
    }
    if (t->scaled) mt_state_write(r->model, param, t->weights ? MT_STATE_MASTER : t->state, t->scaled);
    free(t->scaled);
    t->scaled = NULL;
    for (int k = 0; k < 2; k++)
        if (t->shards[k].data) mt_shard_write(r->model, &t->shards[k], param->offset + stored, NULL, padding);
}

/* Offset of the target's tensor in its file. */
static int64_t mt_target_start(const mt_target *t, const mt_safetensors_file *file) {
    return (const unsigned char *)t->tensor->data - file->base;
}

/* Loads this rank's part of bytes [begin, end) of the file, which are at `data`. An element that `begin` cuts is read
 * from the mapped file, together with its second half. */
static void mt_target_load_segment(mt_reader *r, mt_target *t, int64_t begin, int64_t end, const char *data) {
    const mt_tensor_info *tensor = t->tensor;
    int64_t start = mt_target_start(t, r->file), size = mt_dtype_size(tensor->dtype), count = tensor->bytes / size;
    if (start >= end || start + tensor->bytes <= begin) return;
    int64_t first = begin <= start ? 0 : mt_divide_up(begin - start, size), last = mt_min((end - start) / size, count);
    if (begin > start && (begin - start) % size != 0)
        mt_target_load_elements(r, t, first - 1, first, (const char *)tensor->data + (first - 1) * size);
    if (first < last) mt_target_load_elements(r, t, first, last, data + start + first * size - begin);
    if (start + tensor->bytes <= end) mt_target_finish(r, t);
}

/* Reads one file and loads targets[count], whose tensors are in it, in their order. Every rank of the host calls it. */
static void mt_reader_load_file(mt_reader *r, const mt_safetensors_file *file, mt_target *targets, int64_t count) {
    pthread_t threads[MT_READERS];
    int num_threads = mt_reader_begin(r, file, threads);
    int64_t first = 0;
    for (int64_t begin = 0; begin < file->bytes; begin += MT_SEGMENT) {
        int64_t end = mt_min(begin + MT_SEGMENT, file->bytes);
        const char *data = mt_reader_get(r, begin / MT_SEGMENT);
        for (int64_t i = first; i < count && mt_target_start(&targets[i], file) < end; i++) {
            mt_target_load_segment(r, &targets[i], begin, end, data);
            if (i == first && mt_target_start(&targets[i], file) + targets[i].tensor->bytes <= end) first++;
        }
        mt_reader_give_back(r, begin / MT_SEGMENT);
    }
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    if (r->descriptor >= 0) close(r->descriptor);
    if (r->direct >= 0) close(r->direct);
}

static int mt_target_compare(const void *a, const void *b) {
    const mt_target *x = a, *y = b;
    int order = strcmp(x->tensor->file, y->tensor->file);
    if (order != 0) return order;
    return (x->tensor->data > y->tensor->data) - (x->tensor->data < y->tensor->data);
}

/* Reads all files of a set and loads targets[count]. Every rank calls it and returns the same. Sets *damaged if a sum
 * differs. */
static int mt_targets_load(mt_target *targets, int64_t count, const mt_safetensors *set, mt_model *m,
                           const mt_checksums *sums, bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_reader r;
    mt_reader_open(&r, m, sums);
    if (count > 0) qsort(targets, (size_t)count, sizeof *targets, mt_target_compare);
    for (int64_t i = 0; i < mt_safetensors_num_files(set); i++) {
        const mt_safetensors_file *file = mt_safetensors_get_file(set, i);
        int64_t first = 0, end;
        while (first < count && targets[first].tensor->file != file->path) first++;
        for (end = first; end < count && targets[end].tensor->file == file->path;) end++;
        mt_reader_load_file(&r, file, targets + first, end - first);
    }
    double bad = r.damaged;
    mt_all_reduce_max(world, &bad, 1, MT_F64);
    if (bad > 0) *damaged = true;
    if (r.status != 0) *error = r.error;
    int status = mt_agree(world, r.status != 0, error);
    mt_reader_close(&r);
    return status;
}

/* Weights that are not finite: an error if they are an adapter's, else a warning on one of the ranks that hold them. */
static int mt_target_check_finite(const mt_model *m, const mt_target *t, mt_error *error) {
    const mt_bucket *b = mt_bucket_get(m, t->param->bucket);
    bool reports = t->param->counted && (b->group->rank == 0 || b->strategy == MT_SHARD_PARAMS);
    if (t->not_finite > 0 && mt_param_is_adapter(t->param) && t->weights)
        return mt_error_set(error, "%s: %lld values of tensor \"%s\" are not finite; take another adapter",
                            t->tensor->file, (long long)t->not_finite, t->tensor->name);
    if (t->not_finite > 0 && reports)
        fprintf(stderr, "warning: %s: %lld values of tensor \"%s\" are not finite\n", t->tensor->file,
                (long long)t->not_finite, t->tensor->name);
    return 0;
}

int mt_checkpoint_check(const mt_options *options, const char *folder, mt_error *error) {
    mt_safetensors *set = NULL;
    mt_error damage;
    char *path = mt_checkpoint_resolve(folder, error);
    int status = path ? mt_checkpoint_verify(path, false, error) : -1;
    if (status == 0) {
        status = mt_stem_open(&set, path, "model", options, error);
        if (status == 0) status = mt_stem_check(set, "model", NULL, options, path, error);
        mt_safetensors_close(set);
        if (status != 0 && mt_checkpoint_verify(path, true, &damage) != 0) *error = damage;
    }
    free(path);
    return status;
}

/* Sets a half of an adapter to 0, which its file may fill in part or not at all, and finds the factor of its values:
 * the model has one scale for all adapters. Training would differ from peft's then. */
static int mt_target_begin_adapter(mt_model *m, mt_target *t, const mt_adapter_file *file, mt_error *error) {
    const mt_options *o = mt_model_options(m);
    const mt_param *param = t->param;
    mt_adapter_shape shape;
    if (mt_adapter_of(file, param, o, &shape, error) != 0) return -1;
    for (int k = 0; k < 2; k++)
        if (t->shards[k].data)
            mt_shard_write(m, &t->shards[k], param->offset, NULL, mt_param_rows_stored(param) * param->cols);
    double scale = o->lora_alpha / (double)o->lora_rank, factor = shape.scale / scale;
    if (param->role != MT_LORA_B || !shape.exists || fabs(factor - 1) < 1e-12) return 0;
    if (mt_model_get_plan(m)->train)
        return mt_error_set(
            error,
            "%s: the scale of this adapter, alpha / rank, is %g and that of others %g, by \"rank_pattern\" "
            "or \"alpha_pattern\" of adapter_config.json; a run trains adapters of one scale: merge "
            "these by infer --merge-adapter and train new ones",
            param->hf_name, shape.scale, scale);
    t->factor = (float)factor;
    return 0;
}

/* Slices of tensors that hold all experts of a layer. */
typedef struct mt_slices {
    mt_tensor_info *items;
    int64_t count;
} mt_slices;

/* Room for every state of some parameters, and their scales. */
static mt_slices mt_slices_new(int64_t num_params) {
    mt_tensor_info *items = mt_calloc(mt_max(2 * num_params * MT_NUM_STATES, 1) * (int64_t)sizeof *items);
    return (mt_slices){items, 0};
}

/* Appends one of the equal slices of a tensor. */
static const mt_tensor_info *mt_slices_add(mt_slices *slices, const mt_tensor_info *tensor, int64_t number) {
    mt_tensor_info *slice = &slices->items[slices->count++];
    *slice = *tensor;
    slice->bytes /= tensor->shape[0], slice->num_dims--;
    memmove(slice->shape, slice->shape + 1, (size_t)slice->num_dims * sizeof *slice->shape);
    slice->data = (const char *)tensor->data + number * slice->bytes;
    return slice;
}

/* Finds the scales of the target's tensor, and the parameter's place. */
static void mt_target_place(mt_target *t, const mt_safetensors *set, mt_slices *slices) {
    const mt_param *param = t->param;
    t->place = mt_param_placement(param, t->weights ? MT_STATE_WEIGHTS : t->state);
    if (t->tensor->dtype == MT_F8_E4M3) t->scales = mt_scales_find(set, t->tensor);
    if (mt_target_is_mxfp4(t)) { // rows of the matrix, not transposed
        t->scales = mt_tensor_beside(set, t->tensor, MT_BLOCKS, MT_SCALES);
        t->place.transposed = false, t->place.width = param->whole_cols;
    }
    if (param->hf_stack == 0) return;
    t->tensor = mt_slices_add(slices, t->tensor, t->place.slice);
    if (t->scales) t->scales = mt_slices_add(slices, t->scales, t->place.slice);
}

/* Loads the weights (stem "model", or "adapter_model"), or the moments and any master weights (stem "optimizer"). A
 * bf16 run may continue in fp32, from its master weights, and an fp32 run in bf16, with its weights as master weights.
 */
static int mt_stem_load(mt_model *m, const char *folder, const char *stem, const mt_checksums *sums, bool *damaged,
                        mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    bool weights = strcmp(stem, "optimizer") != 0;
    mt_safetensors *set = NULL;
    mt_adapter_file *adapter = NULL;
    int status = mt_stem_open(&set, folder, stem, mt_model_options(m), error);
    if (status == 0 && strcmp(stem, "adapter_model") == 0) {
        adapter = mt_adapter_file_open(folder, error);
        status = adapter ? 0 : -1;
    }
    if (status == 0) status = mt_stem_check(set, stem, adapter, mt_model_options(m), folder, error);
    status = mt_agree(world, status != 0, error);
    if (status != 0) {
        mt_safetensors_close(set);
        mt_adapter_file_close(adapter);
        return status;
    }
    int64_t num_params, count = 0;
    const mt_param *params = mt_model_params(m, &num_params);
    mt_target *targets = mt_calloc(mt_max(num_params * MT_NUM_STATES, 1) * (int64_t)sizeof *targets);
    mt_slices slices = mt_slices_new(num_params);
    int first = num_params > 0 ? mt_stem_first(set, weights, &params[0]) : 0;
    for (int64_t i = 0; i < num_params; i++)
        for (int state = first; state < mt_stem_end(weights, &params[i]) && mt_stem_holds(stem, &params[i]); state++) {
            mt_target *t = &targets[count];
            *t = (mt_target){.param = &params[i], .state = (mt_param_state)state, .weights = weights, .factor = 1};
            t->tensor = mt_state_find(set, &params[i], (mt_param_state)state);
            t->shards[0] = mt_bucket_shard(m, params[i].bucket, (mt_param_state)state);
            if (weights && mt_model_dtype(m) != MT_F32 && params[i].trained)
                t->shards[1] = mt_bucket_shard(m, params[i].bucket, MT_STATE_MASTER);
            if (adapter && status == 0) status = mt_target_begin_adapter(m, t, adapter, error);
            if (!t->tensor && !adapter) mt_param_init(m, &params[i]); // mt_param_grows
            if (!t->tensor) continue;
            count++;
            mt_target_place(t, set, &slices);
        }
    mt_adapter_file_close(adapter);
    status = mt_agree(world, status != 0, error);
    if (status == 0) status = mt_targets_load(targets, count, set, m, sums, damaged, error);
    if (status == 0) {
        for (int64_t i = 0; i < count && status == 0; i++) status = mt_target_check_finite(m, &targets[i], error);
        status = mt_agree(world, status != 0, error);
    }
    free(targets), free(slices.items);
    mt_safetensors_close(set);
    return status;
}

/* ---- resuming: a run continues bit for bit */

/* The most iterations and samples of a run, like --train-iters and --train-samples: sums of these do not overflow. */
static const int64_t MT_MOST_COUNTED = 1000000000000;

/* Reads a whole number of trainer.json in [0, high]. */
static int mt_trainer_int(const json_t *json, const char *key, int64_t high, const char *path, int64_t *value,
                          mt_error *error) {
    const json_t *item = json_object_get(json, key);
    if (mt_json_int(item, 0, high, value)) return 0;
    return mt_error_set(error, "%s: has no whole number \"%s\"%s; begin anew from these weights by --finetune", path,
                        key, json_is_integer(item) ? " in its range" : "");
}

/* The number and the order of samples depend on these options, so a run keeps them. */
static int mt_trainer_agrees(const char *path, const char *option, int64_t then, int64_t now, mt_error *error) {
    if (then == now) return 0;
    return mt_error_set(error, "%s: the run was begun with %s %lld, not %lld; give that, or begin anew by --finetune",
                        path, option, (long long)then, (long long)now);
}

/* Reads the sizes that the data were ordered for; older files lack them. */
static int mt_trainer_read_plans(const json_t *json, mt_run_state *state, const char *path, mt_error *error) {
    const json_t *plans = json_object_get(json, "data_plans"), *plan;
    size_t i;
    state->data.num_plans = 0;
    if (!plans) return 0;
    bool good = json_is_array(plans) && json_array_size(plans) <= MT_MAX_DATA_PLANS;
    json_array_foreach(plans, i, plan) {
        for (size_t k = 0; k < 2 && good; k++) {
            int64_t low = i > 0 ? state->data.plans[i - 1][k] : 0;
            good = mt_json_int(json_array_get(plan, k), low, MT_MOST_COUNTED, &state->data.plans[i][k]);
        }
        if (!good) break;
        state->data.num_plans++;
    }
    if (good) return 0;
    return mt_error_set(error,
                        "%s: \"data_plans\" is not a list of up to %d pairs of ascending sizes; begin anew from "
                        "these weights by --finetune",
                        path, MT_MAX_DATA_PLANS);
}

/* Reads what identifies the training data; older files lack it, and then all is 0. */
static int mt_trainer_read_data(const json_t *json, mt_run_state *state, const char *path, mt_error *error) {
    state->data.documents = state->data.tokens = state->data.fingerprint = state->data.group = 0;
    if (mt_trainer_read_plans(json, state, path, error) != 0) return -1;
    if (!json_object_get(json, "data_fingerprint")) return 0;
    if (mt_trainer_int(json, "data_documents", INT64_MAX, path, &state->data.documents, error) != 0) return -1;
    if (mt_trainer_int(json, "data_tokens", INT64_MAX, path, &state->data.tokens, error) != 0) return -1;
    if (mt_trainer_int(json, "data_group", INT64_MAX, path, &state->data.group, error) != 0) return -1;
    return mt_trainer_int(json, "data_fingerprint", INT64_MAX, path, &state->data.fingerprint, error);
}

/* Reads the run's state into `state`, and the loss's running average into `average`, which older files lack. */
static int mt_trainer_read(const mt_model *m, mt_run_state *state, mt_loss_average *average, const char *path,
                           mt_error *error) {
    const mt_options *o = mt_model_options(m);
    int64_t version, seed, seq_length, sft = o->sft, packed = o->sequence_packing, stage = o->stage;
    int64_t prompts = o->rollout_batch_size, group = o->num_return_sequences;
    int64_t loader = o->dataloader_type;
    json_t *json = mt_json_read(path, error);
    int status = json ? mt_trainer_int(json, "version", INT64_MAX, path, &version, error) : -1;
#define MT_READ_STATE(field)                                                                                           \
    if (status == 0) status = mt_trainer_int(json, #field, MT_MOST_COUNTED, path, &state->field, error);
    MT_RUN_STATE_FIELDS(MT_READ_STATE)
#undef MT_READ_STATE
    if (status == 0 && json_object_get(json, "loss_average")) {
        average->mean = json_number_value(json_object_get(json, "loss_average"));
        if (!json_is_number(json_object_get(json, "loss_average")))
            status = mt_error_set(
                error, "%s: has no number \"loss_average\"; begin anew from these weights by --finetune", path);
        if (status == 0)
            status = mt_trainer_int(json, "loss_average_steps", MT_MOST_COUNTED, path, &average->steps, error);
    }
    if (status == 0 && json_object_get(json, "stage"))
        status = mt_trainer_int(json, "stage", MT_STAGE_KD, path, &stage, error);
    if (status == 0 && json_object_get(json, "rollout_batch_size")) {
        status = mt_trainer_int(json, "rollout_batch_size", INT64_MAX, path, &prompts, error);
        if (status == 0) status = mt_trainer_int(json, "num_return_sequences", INT64_MAX, path, &group, error);
    }
    int64_t each = mt_max(o->rollout_batch_size, 1); // per iteration; older files lack the next two keys
    if (status == 0 && o->stage == MT_STAGE_RL)
        state->consumed_prompts = mt_min(state->iteration, MT_MOST_COUNTED / each) * each;
    if (status == 0 && json_object_get(json, "consumed_prompts")) {
        status = mt_trainer_int(json, "consumed_prompts", MT_MOST_COUNTED, path, &state->consumed_prompts, error);
        if (status == 0)
            status = mt_trainer_int(json, "prompts_fingerprint", INT64_MAX, path, &state->prompts_fingerprint, error);
    }
    if (status == 0) status = mt_trainer_int(json, "seed", INT64_MAX, path, &seed, error);
    if (status == 0) status = mt_trainer_int(json, "seq_length", INT64_MAX, path, &seq_length, error);
    if (status == 0 && json_object_get(json, "sft")) { // older files lack these
        status = mt_trainer_int(json, "sft", 1, path, &sft, error);
        if (status == 0) status = mt_trainer_int(json, "sequence_packing", 1, path, &packed, error);
    }
    const json_t *named = json_object_get(json, "optimizer"); // older files lack it
    const char *optimizer = named ? json_string_value(named) : mt_optimizer_name(MT_OPTIMIZER_ADAMW);
    const char *own = mt_optimizer_name(o->optimizer);
    if (status == 0 && !optimizer)
        status =
            mt_error_set(error, "%s: \"optimizer\" is not a name; begin anew from these weights by --finetune", path);
    if (status == 0 && state->iteration > 0 && !o->no_load_optim && strcmp(optimizer, own) != 0)
        status = mt_error_set(error,
                              "%s: the run was begun with --optimizer %s, not %s; give that, or begin with new states "
                              "by --no-load-optim",
                              path, optimizer, own);
    if (status == 0) status = mt_trainer_read_data(json, state, path, error);
    if (status == 0 && json_object_get(json, "dataloader_type"))
        status = mt_trainer_int(json, "dataloader_type", MT_DATALOADER_CYCLIC, path, &loader, error);
    json_decref(json);
    if (status != 0) return -1;
    if (version > MT_TRAINER_VERSION)
        return mt_error_set(error, "%s: version %lld was written by a later version of this program; update it", path,
                            (long long)version);
    if (state->iteration == 0) return 0; // converted weights: the order of samples begins here
    if (!o->no_load_rng && mt_trainer_agrees(path, "--seed", seed, o->seed, error) != 0) return -1;
    if (stage != (int64_t)o->stage && (stage > MT_STAGE_SFT || o->stage > MT_STAGE_SFT))
        return mt_error_set(error, "%s: the run was begun with another --stage; give that, or begin anew by --finetune",
                            path);
    bool writes = o->stage == MT_STAGE_RL; // prompts and responses are numbered by these sizes
    if (writes && mt_trainer_agrees(path, "--rollout-batch-size", prompts, o->rollout_batch_size, error) != 0)
        return -1;
    if (writes && mt_trainer_agrees(path, "--num-return-sequences", group, o->num_return_sequences, error) != 0)
        return -1;
    if (mt_trainer_agrees(path, "--sft", sft, o->sft, error) != 0) return -1;
    bool reorders = !o->no_load_rng && loader != (int64_t)o->dataloader_type;
    if (reorders)
        return mt_error_set(error,
                            "%s: the run was begun with --dataloader-type %s; give that, or begin anew by "
                            "--finetune",
                            path, loader == MT_DATALOADER_CYCLIC ? "cyclic" : "single");
    if (!writes && mt_trainer_agrees(path, "--sequence-packing", packed, o->sequence_packing, error) != 0) return -1;
    return mt_trainer_agrees(path, "--seq-length", seq_length, o->seq_length, error);
}

void mt_checkpoint_peek(const mt_options *options, mt_run_state *state) {
    mt_error ignored;
    const char *from = mt_options_adapts(options) ? options->load_adapter : options->load;
    if (!from || options->finetune) return;
    char *folder =
        mt_options_adapts(options) ? mt_checkpoint_resolve(from, &ignored) : mt_options_load_folder(options, &ignored);
    char *path = folder ? mt_path_join(folder, "trainer.json") : NULL;
    json_t *json = path ? mt_json_read(path, &ignored) : NULL;
    int64_t iteration, samples;
    if (json && mt_trainer_int(json, "iteration", MT_MOST_COUNTED, path, &iteration, &ignored) == 0 &&
        mt_trainer_int(json, "consumed_train_samples", MT_MOST_COUNTED, path, &samples, &ignored) == 0)
        state->iteration = iteration, state->consumed_train_samples = samples;
    json_decref(json);
    free(path), free(folder);
}

/* A checkpoint of --save, unlike a Hugging Face folder, must have the run's state and the optimizer's: without them
 * training would begin anew in silence. */
static int mt_run_check(const char *folder, bool has_state, bool has_optimizer, bool *damaged, mt_error *error) {
    const char *name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    *damaged = !has_state && mt_iteration_of(name) >= 0;
    if (*damaged)
        return mt_error_set(error,
                            "%s: damaged: its trainer.json is not there; take another checkpoint, or begin anew from "
                            "these weights by --finetune",
                            folder);
    if (!has_state || has_optimizer) return 0;
    return mt_error_set(
        error,
        "%s: was saved without the optimizer's state; continue with a new optimizer by --no-load-optim, "
        "or begin anew from these weights by --finetune",
        folder);
}

/* Clears the moments: a damaged checkpoint, or the steps before a rewind, may have set some. */
static void mt_optimizer_zero(mt_model *m) {
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    for (int64_t i = 0; i < num_params && mt_model_get_plan(m)->train; i++)
        for (int state = MT_STATE_EXP_AVG; state < mt_num_states(params[i].optimizer) && params[i].trained; state++) {
            mt_shard shard = mt_bucket_shard(m, params[i].bucket, (mt_param_state)state);
            mt_shard_write(m, &shard, params[i].offset, NULL, params[i].rows * params[i].cols);
        }
}

/* Loads the run's state and the optimizer from one iteration's folder, if the run continues from it. `own`: it is this
 * run's checkpoint, and --finetune and --no-load-optim do not apply. */
static int mt_run_load(mt_model *m, mt_run_state *state, const char *folder, bool own, const mt_checksums *sums,
                       bool *damaged, mt_error *error) {
    const mt_options *o = mt_model_options(m);
    const mt_group *world = &mt_model_grid(m)->world;
    mt_loss_average average = {0};
    if (!mt_model_get_plan(m)->train) return 0;
    bool no_optimizer = o->no_load_optim && !own, has_state = mt_folder_has(folder, "trainer.json");
    bool has_optimizer =
        mt_folder_has(folder, "optimizer.safetensors") || mt_folder_has(folder, "optimizer.safetensors.index.json");
    bool continues = has_state && (own || !o->finetune), begins = o->finetune && !own;
    int status = world->rank == 0 && !begins
                     ? mt_run_check(folder, has_state, has_optimizer || no_optimizer, damaged, error)
                     : 0;
    if (mt_agree(world, status != 0, error) != 0) return -1;
    mt_broadcast(world, &continues, sizeof continues, 0); // rank 0's folder decides
    if (continues) {
        char *path = mt_path_join(folder, "trainer.json");
        status = mt_agree(world, mt_trainer_read(m, state, &average, path, error) != 0, error);
        free(path);
    }
    mt_train_set_loss_average(m, &average);
    if (status == 0) status = mt_fp8_load(m, folder, continues, error);
    if (status == 0 && continues && !no_optimizer) return mt_stem_load(m, folder, "optimizer", sums, damaged, error);
    mt_optimizer_zero(m);
    state->optimizer_step = 0; // like the moments
    return status;
}

/* Loads one folder: weights of a stem, and the run's state unless they are the base of adapters. *damaged: its files
 * differ from the saved ones. If loading fails for another reason, such as the name of a tensor, rank 0 first looks for
 * damage in all files. */
static int mt_folder_load(mt_model *m, mt_run_state *state, const char *folder, const char *stem, bool own,
                          bool *damaged, mt_error *error) {
    bool is_base = mt_model_options(m)->lora_rank > 0 && strcmp(stem, "model") == 0;
    const mt_group *world = &mt_model_grid(m)->world;
    mt_checksums sums = {0};
    *damaged = world->rank == 0 && mt_checkpoint_verify(folder, false, error) != 0;
    int status = mt_agree(world, *damaged, error);
    if (status == 0) status = mt_agree(world, mt_checksums_read(&sums, folder, error) != 0, error);
    const mt_checksums *checked = sums.count > 0 ? &sums : NULL;
    if (status == 0) status = mt_stem_load(m, folder, stem, checked, damaged, error);
    if (status == 0 && !is_base) status = mt_run_load(m, state, folder, own, checked, damaged, error);
    if (status != 0 && checked) {
        mt_error found;
        if (world->rank == 0 && !*damaged && mt_checkpoint_verify(folder, true, &found) != 0)
            *damaged = true, *error = found;
        mt_broadcast(world, error, sizeof *error, 0);
    }
    mt_broadcast(world, damaged, sizeof *damaged, 0);
    mt_checksums_free(&sums);
    return status;
}

/* Reports the damage of a checkpoint; returns the iteration of the one before, the same on every rank, or -1. */
static int64_t mt_checkpoint_fall_back(const mt_group *world, const char *folder, int64_t from,
                                       const mt_error *damage) {
    int64_t number = -1;
    mt_error ignored;
    if (world->rank == 0) {
        number = mt_checkpoint_whole_before(folder, from, &ignored);
        if (number >= 0)
            fprintf(stderr, "warning: %s; going on from iteration %lld\n", damage->text, (long long)number);
    }
    mt_broadcast(world, &number, sizeof number, 0);
    return number;
}

/* mt_checkpoint_resolve on rank 0, for all ranks: between the calls of two ranks a save could publish another latest.
 * *number: the iteration, or -1 for a folder that is no checkpoint's. */
static int mt_checkpoint_choose(const mt_group *world, const char *folder, char **path, int64_t *number,
                                mt_error *error) {
    char *found = world->rank == 0 ? mt_checkpoint_resolve(folder, error) : NULL;
    bool is_latest = found && strcmp(found, folder) != 0; // not the folder itself
    *number = found && strrchr(found, '/') ? mt_iteration_of(strrchr(found, '/') + 1) : -1;
    *path = NULL;
    free(found);
    if (mt_agree(world, world->rank == 0 && !found, error) != 0) return -1;
    mt_broadcast(world, &is_latest, sizeof is_latest, 0);
    mt_broadcast(world, number, sizeof *number, 0);
    if (world->rank == 0 && is_latest && !mt_folder_has(folder, "latest_checkpointed_iteration.txt"))
        fprintf(stderr,
                "warning: %s: has no latest_checkpointed_iteration.txt; going on from iteration %lld, the newest whole "
                "checkpoint there\n",
                folder, (long long)*number);
    *path = is_latest ? mt_iteration_path(folder, *number) : mt_strdup(folder);
    bool sees = mt_folder_has_weights(*path);
    if (!sees)
        mt_error_set(error, "%s: rank 0 sees it, rank %d does not; on several hosts it must be a folder of all", *path,
                     world->rank);
    return mt_agree(world, !sees, error);
}

/* Loads the latest checkpoint of a folder; if it is damaged and the run's own, the one before. */
static int mt_latest_load(mt_model *m, mt_run_state *state, const char *folder, const char *stem, bool own,
                          char **found, mt_error *error) {
    const mt_options *o = mt_model_options(m);
    const mt_group *world = &mt_model_grid(m)->world;
    bool falls_back = own || (mt_options_falls_back(o) && mt_path_same(folder, o->save));
    bool damaged = false;
    char *path;
    int64_t number;
    int status = mt_checkpoint_choose(world, folder, &path, &number, error);
    *state = (mt_run_state){0};
    if (status != 0 && falls_back) number = INT64_MAX, damaged = true;
    if (status == 0) status = mt_folder_load(m, state, path, stem, own, &damaged, error);
    while (status != 0 && damaged && falls_back && number >= 0) {
        number = mt_checkpoint_fall_back(world, folder, number, error);
        if (number < 0) break;
        free(path);
        path = mt_iteration_path(folder, number);
        *state = (mt_run_state){0};
        mt_optimizer_zero(m);
        status = mt_folder_load(m, state, path, stem, own, &damaged, error);
    }
    if (status == 0 && found)
        *found = path;
    else
        free(path);
    return status;
}

/* The adapters of a new run; also in place of trained ones, whose B are not zero. */
static void mt_adapters_init(mt_model *m) {
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    for (const mt_param *param = params; param < params + num_params; param++) {
        if (!mt_param_is_adapter(param)) continue;
        for (int state = MT_STATE_WEIGHTS; state <= MT_STATE_MASTER; state++) {
            mt_shard shard = mt_bucket_shard(m, param->bucket, (mt_param_state)state);
            if (shard.data) mt_shard_write(m, &shard, param->offset, NULL, param->rows * param->cols);
        }
        mt_param_init(m, param);
    }
}

int mt_checkpoint_load_adapter(mt_model *m, mt_run_state *state, const char *folder, bool own, mt_error *error) {
    if (folder) return mt_latest_load(m, state, folder, "adapter_model", own, NULL, error);
    mt_adapters_init(m);
    *state = (mt_run_state){0};
    if (!mt_model_get_plan(m)->train) return 0;
    mt_optimizer_zero(m);
    mt_train_set_loss_average(m, &(mt_loss_average){0});
    return mt_fp8_load(m, "", false, error);
}

int mt_checkpoint_load_found(mt_model *m, mt_run_state *state, const char *folder, bool own, char **found,
                             mt_error *error) {
    const mt_options *o = mt_model_options(m);
    bool adapts = o->lora_rank > 0;
    if (adapts && own) return mt_checkpoint_load_adapter(m, state, folder, own, error);
    int status = mt_latest_load(m, state, folder, "model", own, found, error);
    return status == 0 && adapts ? mt_checkpoint_load_adapter(m, state, o->load_adapter, false, error) : status;
}

int mt_checkpoint_load(mt_model *m, mt_run_state *state, const char *folder, mt_error *error) {
    return mt_checkpoint_load_found(m, state, folder, false, NULL, error);
}

/* ---- a folder in one call */

/* The options of a folder: its shape, then the caller's settings. */
static int mt_hf_read_options(mt_hf *hf, const char *folder, const char *const *settings, mt_error *error) {
    mt_options *o = &hf->options;
    const mt_group *world = &hf->grid->world;
    mt_options_default(o);
    for (; settings && settings[0]; settings += 2)
        if (mt_options_set(o, settings[0], settings[1], error) != 0) return -1;
    if (mt_options_set(o, "load", folder, error) != 0 || mt_options_read_shape(o, error) != 0) return -1;
    if (mt_options_finish(o, MT_PROGRAM_INFER, world->size, error) != 0) return -1;
    return mt_stops_of_options(&hf->stops, o, error);
}

static int mt_hf_create(mt_hf *hf, int64_t count, int64_t max_tokens, mt_error *error) {
    enum { CONTEXT = 4096 };
    const mt_options *o = &hf->options;
    int64_t context = o->max_position_embeddings;
    if (max_tokens > context)
        return mt_error_set(error, "%s: the model's context is %lld tokens; ask for at most so many, not %lld", o->load,
                            (long long)context, (long long)max_tokens);
    if (max_tokens == 0) max_tokens = mt_min(context, CONTEXT);
    mt_model_plan plan = mt_generator_plan(count, max_tokens, count * max_tokens);
    mt_run_state ignored;
    const mt_ops *ops = mt_backend_open(o->device, hf->grid, error);
    const mt_group *world = &hf->grid->world;
    if (mt_agree(world, world->rank == 0 && mt_checkpoint_check(o, o->load, error) != 0, error) != 0) return -1;
    if (!ops || mt_model_create(&hf->model, o, hf->grid, ops, &plan, error) != 0) return -1;
    return mt_checkpoint_load(hf->model, &ignored, o->load, error);
}

int mt_hf_open(mt_hf **out, const char *folder, const char *const *settings, int64_t count, int64_t max_tokens,
               mt_grid *grid, mt_error *error) {
    mt_hf *hf = mt_calloc(sizeof *hf);
    hf->grid = grid;
    int status = mt_agree(&grid->world, mt_hf_read_options(hf, folder, settings, error) != 0, error);
    if (status == 0) status = mt_options_agree(&hf->options, &grid->world, error);
    if (status == 0) mt_watch_start(&hf->options);
    if (status == 0) status = mt_grid_build(grid, &hf->options, error);
    if (status == 0) status = mt_hf_create(hf, count, max_tokens, error);
    mt_watch_enter(MT_WATCH_STEP);
    if (status != 0) mt_hf_close(hf);
    *out = status == 0 ? hf : NULL;
    return status;
}

void mt_hf_close(mt_hf *hf) {
    if (!hf) return;
    mt_model_destroy(hf->model);
    mt_grid_clear(hf->grid);
    mt_options_free(&hf->options);
    free(hf);
}
