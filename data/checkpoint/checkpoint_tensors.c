/* checkpoint_tensors.c: the tensors that a model takes from a folder, and how their elements become fp32. */
#include "checkpoint_tensors.h"

#include "../base/file.h"
#include "../options/option_rules.h"
#include "checkpoint_experts.h"
#include "mxfp4.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void mt_state_tensor_name(char *name, size_t size, mt_optimizer optimizer, mt_param_state state, const char *hf_name) {
    const char *prefix = mt_state_name(optimizer, state);
    snprintf(name, size, "%s%s%s", prefix, *prefix ? "." : "", hf_name);
}

mt_placement mt_param_placement(const mt_param *param, mt_param_state state) {
    int64_t slices = mt_max(param->hf_stack, 1), rows = param->hf_rows_total / slices, row = param->hf_row % rows;
    mt_placement place = {.row = row, .stride = 1, .width = param->whole_cols, .slices = slices};
    place.slice = param->hf_row / rows, place.groups = param->hf_groups;
    place.group_rows = param->whole_rows / param->hf_groups, place.group_pitch = rows / param->hf_groups;
    if (param->hf_transposed && (state == MT_STATE_WEIGHTS || param->hf_stack == 0))
        place.transposed = true, place.width = rows, place.stride = param->hf_stride;
    else if (param->hf_transposed && param->hf_stride > 1)
        place.row = row * param->whole_rows; // part `row` of hf_stride ones
    return place;
}

mt_placement mt_tensor_placement(const mt_param *param, mt_param_state state, const mt_tensor_info *tensor) {
    mt_placement place = mt_param_placement(param, state);
    int64_t rows = param->hf_rows_total / place.slices;
    bool upright = param->hf_either && tensor->num_dims == 3 && tensor->shape[1] == rows;
    if (place.transposed && upright) place.transposed = false, place.width = param->whole_cols;
    return place;
}

int64_t mt_placement_row(const mt_placement *place, int64_t r) {
    int64_t rows = place->group_rows;
    return place->row + r / rows * place->group_pitch + r % rows * place->stride;
}

int64_t mt_param_shape(const mt_param *param, mt_param_state state, int64_t shape[MT_PARAM_DIMS]) {
    mt_placement place = mt_param_placement(param, state);
    int64_t rows = param->hf_rows_total / place.slices, dims = 0;
    if (param->hf_stack > 0) shape[dims++] = place.slices;
    if (param->hf_is_column) shape[dims++] = 1, shape[dims++] = 1;
    if (place.transposed && !param->is_vector) shape[dims++] = param->whole_cols;
    shape[dims++] = rows;
    if (param->hf_has_channel || param->hf_is_column) shape[dims++] = 1;
    for (int i = 0; i < 4 && param->hf_cols[0] > 0; i++) shape[dims++] = param->hf_cols[i];
    if (!place.transposed && !param->is_vector && param->hf_cols[0] == 0) shape[dims++] = param->whole_cols;
    return dims;
}

static const char *mt_shape_print(char out[256], const int64_t *shape, int64_t num_dims) {
    int used = snprintf(out, 256, "[");
    for (int64_t i = 0; i < num_dims; i++)
        used += snprintf(out + used, 256 - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(out + used, 256 - (size_t)used, "]");
    return out;
}

const mt_tensor_info *mt_scales_find(const mt_safetensors *set, const mt_tensor_info *tensor) {
    char name[256];
    snprintf(name, sizeof name, "%.200s_scale_inv", tensor->name);
    return mt_safetensors_find(set, name);
}

const mt_tensor_info *mt_tensor_beside(const mt_safetensors *set, const mt_tensor_info *tensor, const char *from,
                                       const char *to) {
    char name[256];
    size_t length = strlen(tensor->name), end = strlen(from);
    if (!mt_text_ends_with(tensor->name, from) || length + strlen(to) >= sizeof name) return NULL;
    int written = snprintf(name, sizeof name, "%.*s%s", (int)(length - end), tensor->name, to);
    return written < (int)sizeof name ? mt_safetensors_find(set, name) : NULL;
}

/* True for the scales of a tensor in fp8 or MXFP4. */
static bool mt_tensor_is_scales(const mt_safetensors *set, const mt_tensor_info *tensor) {
    const mt_tensor_info *scaled = mt_tensor_beside(set, tensor, ".weight_scale_inv", ".weight");
    if (scaled) return scaled->dtype == MT_F8_E4M3;
    scaled = mt_tensor_beside(set, tensor, MT_SCALES, MT_BLOCKS);
    return scaled && scaled->dtype == MT_U8;
}

void mt_stored_gather(char *to, const char *from, int64_t stride, int64_t size, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < size; k++) to[i * size + k] = from[i * stride * size + k];
}

void mt_stored_to_f32(float *out, int64_t out_stride, const void *in, mt_dtype dtype, int64_t n) {
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
            *to = mt_half_to_f32(bits, dtype);
        }
    }
}

/* A matrix in fp8 must have a positive finite scale for each block; the last blocks may be partial. */
static int mt_scales_check(const mt_run_options *options, const mt_safetensors *set, const mt_tensor_info *tensor,
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
                          const mt_run_options *options, const mt_safetensors *set, mt_error *error) {
    int64_t shape[MT_PARAM_DIMS], num_dims = mt_param_shape(param, state, shape);
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
    if (param->hf_either && !mt_tensor_placement(param, state, tensor).transposed)
        shape[1] = param->hf_rows_total / param->hf_stack, shape[2] = param->whole_cols;
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

const mt_tensor_info *mt_state_find(const mt_safetensors *set, const mt_param *param, mt_param_state state) {
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
                            "--mtp-num-layers to the modules that it holds, perhaps 0, or repeat one by "
                            "--mtp-use-repeated-layer",
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
    if (module < 0 || module >= mt_num_mtp_modules(options)) return NULL;
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

/* Families whose modules of multi-token prediction, or vision tower, transformers leaves out too where it reads the
 * text model, and how their tensors' names begin. */
static const struct {
    mt_hf_family family;
    const char *begins;
} mt_other_modules[] = {
    {MT_HF_EXAONE_MOE, "mtp."},     {MT_HF_ERNIE4_5_MOE, "model.mtp_"}, {MT_HF_QWEN3_NEXT, "mtp."},
    {MT_HF_QWEN3_5, "mtp."},        {MT_HF_QWEN3_5_MOE, "mtp."},        {MT_HF_MIMO_V2_FLASH, "model.mtp."},
    {MT_HF_NEMOTRON_H, "mtp."},     {MT_HF_QWEN3_5, "model.visual."},   {MT_HF_QWEN3_5_MOE, "model.visual."},
    {MT_HF_QWEN3, "model.visual."}, {MT_HF_QWEN3_MOE, "model.visual."}, {MT_HF_QWEN2, "visual."}};

/* True for tensors of modules that the model does not have: of multi-token prediction, or a vision tower. */
static bool mt_tensor_is_of_other_module(const mt_run_options *options, const char *name) {
    const char *rest;
    int64_t layer = mt_tensor_layer(&options->stack, name, &rest),
            end = options->stack.num_layers + options->mtp_layers_stored;
    if (layer >= options->stack.num_layers + mt_num_mtp_modules(&options->stack) && layer < end) return true;
    for (size_t i = 0; i < sizeof mt_other_modules / sizeof *mt_other_modules; i++)
        if (mt_other_modules[i].family == options->stack.hf_family &&
            (options->stack.vision.tower == MT_VISION_NONE || !strstr(mt_other_modules[i].begins, "visual")) &&
            (options->stack.mtp_num_layers == 0 || !strstr(mt_other_modules[i].begins, "mtp")) &&
            strncmp(name, mt_other_modules[i].begins, strlen(mt_other_modules[i].begins)) == 0)
            return true;
    return false;
}

const mt_tensor_info *mt_tensors_left_out(const mt_safetensors *set, const mt_run_options *options, int64_t *count) {
    const mt_tensor_info *first = NULL;
    *count = 0;
    for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(set, i);
        if (!mt_tensor_is_of_other_module(options, tensor->name)) continue;
        if ((*count)++ == 0) first = tensor;
    }
    return first;
}

/* True for tensors without weights of this model: of other modules, computed tables, masks and the tied head of old
 * checkpoints, and the output layer of a language model that got a value head. */
static bool mt_tensor_is_harmless(const mt_run_options *options, const char *name) {
    if (mt_tensor_is_of_other_module(options, name) || mt_tensor_repeats(&options->stack, name)) return true;
    for (size_t i = 0; i < sizeof mt_computed / sizeof *mt_computed; i++)
        if (mt_text_ends_with(name, mt_computed[i])) return true;
    const char *holder = mt_shared_tensor(&options->stack, name, false);
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
static int mt_weights_check_unused(const mt_param *rows, int64_t count, const mt_run_options *options, const char *stem,
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

/* Other names of a family's tensors: of the text model of a Qwen-VL, which stands beside a vision tower; of dense
 * layers in released files of Kimi Linear, which transformers 5 writes as those of experts; of Hy3's shared experts in
 * transformers' model, whose modules adapters of peft name. */
static const struct {
    uint64_t families;
    const char *part, *instead;
} mt_other_names[] = {
    {1ull << MT_HF_QWEN3 | 1ull << MT_HF_QWEN3_MOE | 1ull << MT_HF_QWEN3_5 | 1ull << MT_HF_QWEN3_5_MOE,
     "model.language_model.", "model."},
    {1ull << MT_HF_QWEN2, "model.language_model.", "model."},
    {1ull << MT_HF_QWEN2, "model.visual.", "visual."},
    {1ull << MT_HF_KIMI_LINEAR, ".mlp.", ".block_sparse_moe."},
    {1ull << MT_HF_HY_V3, ".mlp.shared_experts.", ".mlp.shared_mlp."}};

/* The same in adapters of Qwen2.5-VL, whose modules have new names since transformers 4.52: peft's file has those of
 * its day. */
static const struct {
    const char *part, *instead;
} mt_old_modules[] = {{"base_model.model.model.layers.", "base_model.model.model.language_model.layers."},
                      {"base_model.model.visual.", "base_model.model.model.visual."}};

static void mt_tensors_rename(mt_safetensors *set, const char *part, const char *instead) {
    bool any = false;
    for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
        mt_tensor_info tensor = *mt_safetensors_get(set, i);
        const char *found = strstr(tensor.name, part);
        if (!found) continue;
        int64_t room = (int64_t)(strlen(tensor.name) + strlen(instead)) + 1;
        char *name = mt_malloc(room);
        snprintf(name, (size_t)room, "%.*s%s%s", (int)(found - tensor.name), tensor.name, instead,
                 found + strlen(part));
        tensor.name = name, any = true;
        mt_safetensors_replace(set, i, &tensor, 1);
    }
    if (any) mt_safetensors_sort(set);
}

int mt_stem_open(mt_safetensors **set, const char *folder, const char *stem, const mt_run_options *options,
                 mt_error *error) {
    if (mt_safetensors_open_folder(set, folder, stem, error) != 0) return -1;
    bool moved = options->stack.vision.tower == MT_VISION_QWEN2_5 && strcmp(stem, "model") != 0;
    for (size_t i = 0; i < sizeof mt_old_modules / sizeof *mt_old_modules && moved; i++)
        mt_tensors_rename(*set, mt_old_modules[i].part, mt_old_modules[i].instead);
    if (moved) return 0;
    for (size_t i = 0; i < sizeof mt_other_names / sizeof *mt_other_names && strcmp(stem, "optimizer") != 0; i++)
        if (mt_other_names[i].families >> options->stack.hf_family & 1 &&
            (i > 0 || options->stack.vision.tower == MT_VISION_NONE))
            mt_tensors_rename(*set, mt_other_names[i].part, mt_other_names[i].instead);
    if (strcmp(stem, "model") != 0 || mt_experts_unstack(*set, options, error) == 0) return 0;
    mt_safetensors_close(*set);
    *set = NULL;
    return -1;
}

int mt_stem_first(const mt_safetensors *set, bool weights, const mt_param *row) {
    bool masters = !weights && mt_state_find(set, row, MT_STATE_MASTER);
    return weights ? MT_STATE_WEIGHTS : masters ? MT_STATE_MASTER : MT_STATE_EXP_AVG;
}

int mt_stem_end(bool weights, const mt_param *row) {
    return weights ? MT_STATE_MASTER : mt_num_states(row->optimizer);
}

/* True for the value head that --value-head adds to a language model. */
static bool mt_param_grows(const mt_param *param, const mt_run_options *options) {
    return options->value_head && param->is_head;
}

/* The half of an adapter as its file has it: of its own rank, which may be smaller than the model's. */
static mt_param mt_adapter_half(const mt_param *row, const mt_adapter_shape *shape) {
    mt_param half = *row;
    if (row->role == MT_LORA_A) half.whole_rows = half.hf_rows_total = shape->rank;
    if (row->role == MT_LORA_B) half.whole_cols = shape->rank;
    return half;
}

int mt_adapter_of(const mt_adapter_file *file, const mt_param *row, const mt_run_options *options,
                  mt_adapter_shape *shape, mt_error *error) {
    *shape = (mt_adapter_shape){true, options->stack.lora_rank, 0};
    if (!file || !mt_param_is_adapter(row)) return 0;
    if (mt_adapter_file_find(file, row, shape, error) != 0) return -1;
    if (mt_options_gave(options, offsetof(mt_run_options, lora_target))) shape->exists = true; // all that it names
    return 0;
}

int mt_stem_check(const mt_safetensors *set, const char *stem, const mt_adapter_file *adapter,
                  const mt_run_options *options, const char *folder, mt_error *error) {
    mt_param *rows;
    int64_t count = 0, all = mt_params_build(&rows, &options->stack, NULL);
    bool weights = strcmp(stem, "optimizer") != 0;
    for (int64_t i = 0; i < all; i++)
        if (mt_stem_holds(stem, &rows[i])) rows[count++] = rows[i];
    int first = mt_stem_first(set, weights, &rows[0]), status = 0;
    for (int64_t i = 0; i < count; i++)
        for (int state = first; state < mt_stem_end(weights, &rows[i]) && status == 0; state++) {
            const mt_tensor_info *tensor = mt_state_find(set, &rows[i], (mt_param_state)state);
            if (tensor && !mt_tensor_serves(tensor, &rows[i], &options->stack)) tensor = NULL;
            if (!tensor && weights && mt_param_grows(&rows[i], options)) continue;
            mt_adapter_shape shape;
            status = mt_adapter_of(adapter, &rows[i], options, &shape, error);
            if (status != 0 || (!tensor && !shape.exists)) continue;
            mt_param row = adapter ? mt_adapter_half(&rows[i], &shape) : rows[i];
            if (tensor && !shape.exists)
                status = mt_tensor_refuse(tensor, stem, error);
            else
                status = tensor ? mt_param_check(&row, (mt_param_state)state, tensor, options, set, error)
                                : mt_state_missing(&row, (mt_param_state)state, &options->stack, folder, set, error);
        }
    if (status == 0 && weights) status = mt_weights_check_unused(rows, count, options, stem, set, error);
    for (int64_t i = 0; i < mt_safetensors_count(set) && status == 0 && weights; i++)
        status = mt_tensor_check_repeated(&options->stack, set, mt_safetensors_get(set, i), error);
    free(rows);
    return status;
}
