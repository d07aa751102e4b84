/* checkpoint_experts.c: tensors that hold all experts of a layer, cut into the matrices of each expert. The cut is one
 * of names and addresses: the bytes of an expert's matrix lie together in the stacked tensor. */
#include "checkpoint_experts.h"

#include "../base/file.h"
#include "../base/safetensors.h"

#include <stdlib.h>
#include <string.h>

/* A stacked tensor: the end of its name, and the matrices of one expert in it, in their order. */
typedef struct mt_stack {
    const char *end;
    mt_role roles[2]; // the second one, if any, has the same shape
    int parts;
    bool scales; // of a tensor in fp8
} mt_stack;

static const mt_stack mt_stacks[] = {
    {".mlp.experts.gate_up_proj", {MT_EXPERT_GATE, MT_EXPERT_UP}, 2, false},
    {".mlp.experts.down_proj", {MT_EXPERT_DOWN}, 1, false},
    {".mlp.experts.gate_up_proj_scale_inv", {MT_EXPERT_GATE, MT_EXPERT_UP}, 2, true},
    {".mlp.experts.down_proj_scale_inv", {MT_EXPERT_DOWN}, 1, true},
};

static const mt_stack *mt_stack_find(const char *name) {
    for (size_t i = 0; i < sizeof mt_stacks / sizeof *mt_stacks; i++)
        if (mt_text_ends_with(name, mt_stacks[i].end)) return &mt_stacks[i];
    return NULL;
}

/* A row of the parameter table with a role, in any layer of the family; an expert's is that of expert 0. */
static const mt_param *mt_row_find(const mt_param *rows, int64_t count, mt_role role) {
    for (const mt_param *row = rows; row < rows + count; row++)
        if (row->role == role && row->expert <= 0) return row;
    return NULL;
}

/* The name of a row in its layer, such as "mlp.experts.0.up_proj.weight". */
static const char *mt_row_name_in_layer(const mt_param *row) {
    const char layers[] = "layers.", *name = strstr(row->hf_name, layers) + strlen(layers);
    return strchr(name, '.') + 1;
}

/* "PREFIX" of a stacked tensor and an expert's name in its layer, to free. */
static char *mt_expert_name(const char *prefix, int64_t length, const char *in_layer, int64_t expert, bool scales) {
    const char *number = strstr(in_layer, ".0.") + 1; // of expert 0
    int64_t room = length + (int64_t)strlen(in_layer) + 40;
    char *name = mt_malloc(room);
    snprintf(name, (size_t)room, "%.*s%.*s%lld%s%s", (int)length, prefix, (int)(number - in_layer), in_layer,
             (long long)expert, number + 1, scales ? "_scale_inv" : "");
    return name;
}

/* The tensor must be [experts, rows of the matrices of one expert, columns], or with scales one for each block. */
static int mt_stack_check(const mt_tensor_info *tensor, const mt_stack *stack, const mt_param *matrix,
                          const mt_run_options *o, mt_error *error) {
    const int64_t *block = o->weight_block_size, *shape = tensor->shape;
    int64_t rows = matrix->whole_rows, cols = matrix->whole_cols;
    if (stack->scales && block[0] > 0 && block[1] > 0) {
        if (stack->parts > 1 && rows % block[0] != 0)
            return mt_error_set(error,
                                "%s: tensor \"%s\": a block of %lld rows has rows of gate and up, %lld each; take a "
                                "checkpoint with each expert apart",
                                tensor->file, tensor->name, (long long)block[0], (long long)rows);
        rows = mt_divide_up(rows, block[0]), cols = mt_divide_up(cols, block[1]);
    }
    rows *= stack->parts;
    if (tensor->num_dims == 3 && shape[0] == o->stack.num_experts && shape[1] == rows && shape[2] == cols) return 0;
    bool transposed = tensor->num_dims == 3 && shape[1] == cols && shape[2] == rows;
    if (transposed && o->language_model_only)
        return mt_error_set(error,
                            "%s: tensor \"%s\" has all experts of a layer as [in, out], which are read with the vision "
                            "tower alone; leave out --language-model-only",
                            tensor->file, tensor->name);
    return mt_error_set(
        error,
        "%s: tensor \"%s\" has all experts of a layer and must be [%lld, %lld, %lld]%s; save the model by "
        "save_pretrained of transformers, which writes each expert apart, or check config.json",
        tensor->file, tensor->name, (long long)o->stack.num_experts, (long long)rows, (long long)cols,
        transposed ? ", but is transposed" : "");
}

/* Puts the matrices of the experts in the place of one stacked tensor. */
static int mt_stack_cut(mt_safetensors *set, int64_t index, const mt_stack *stack, const mt_param *rows, int64_t count,
                        const mt_run_options *o, mt_error *error) {
    const mt_tensor_info tensor = *mt_safetensors_get(set, index);
    const char *names[2] = {NULL};
    for (int k = 0; k < stack->parts; k++) {
        const mt_param *row = mt_row_find(rows, count, stack->roles[k]);
        if (!row) return 0; // no gate, or no expert: the tensor has no place
        names[k] = mt_row_name_in_layer(row);
    }
    if (mt_stack_check(&tensor, stack, mt_row_find(rows, count, stack->roles[0]), o, error) != 0) return -1;
    int64_t num_parts = o->stack.num_experts * stack->parts, bytes = tensor.bytes / num_parts;
    int64_t prefix = (int64_t)(strlen(tensor.name) - strlen(stack->end)) + 1; // with the dot
    mt_tensor_info *parts = mt_calloc(num_parts * (int64_t)sizeof *parts);
    for (int64_t i = 0; i < num_parts; i++) {
        parts[i] = tensor;
        parts[i].num_dims = 2, parts[i].shape[0] = tensor.shape[1] / stack->parts, parts[i].shape[1] = tensor.shape[2];
        parts[i].data = (const char *)tensor.data + i * bytes, parts[i].bytes = bytes;
        parts[i].name = mt_expert_name(tensor.name, prefix, names[i % stack->parts], i / stack->parts, stack->scales);
    }
    mt_safetensors_replace(set, index, parts, num_parts);
    free(parts);
    return 0;
}

/* Other tensors whose names beside stacked experts are not those of the file's original form, by the ends of these
 * names: Mixtral's and MiniMax's router, Hy3's shared expert, and the biases that balance loads. */
static const struct {
    const char *end;
    mt_role role;
} mt_renamed[] = {{"gate.weight", MT_ROUTER},
                  {"shared_experts.gate_proj.weight", MT_SHARED_GATE},
                  {"shared_experts.up_proj.weight", MT_SHARED_UP},
                  {"shared_experts.down_proj.weight", MT_SHARED_DOWN},
                  {"e_score_correction_bias", MT_ROUTER_BIAS},
                  {"gate.e_score_correction_bias", MT_ROUTER_BIAS},
                  {"gate.moe_statics.e_score_correction_bias", MT_ROUTER_BIAS}};

/* Gives a tensor beside stacked experts the name of the parameter table. */
static void mt_tensor_rename(mt_safetensors *set, int64_t index, const mt_param *rows, int64_t count) {
    mt_tensor_info tensor = *mt_safetensors_get(set, index);
    const char *in_mlp = strstr(tensor.name, ".mlp.");
    for (size_t i = 0; in_mlp && i < sizeof mt_renamed / sizeof *mt_renamed; i++) {
        if (strcmp(in_mlp + strlen(".mlp."), mt_renamed[i].end) != 0) continue;
        const mt_param *row = mt_row_find(rows, count, mt_renamed[i].role);
        if (!row) return;
        const char *in_layer = mt_row_name_in_layer(row);
        int64_t prefix = in_mlp + 1 - tensor.name, room = prefix + (int64_t)strlen(in_layer) + 1;
        char *name = mt_malloc(room);
        snprintf(name, (size_t)room, "%.*s%s", (int)prefix, tensor.name, in_layer);
        tensor.name = name;
        mt_safetensors_replace(set, index, &tensor, 1);
        return;
    }
}

int mt_experts_unstack(mt_safetensors *set, const mt_run_options *o, mt_error *error) {
    int64_t all = mt_safetensors_count(set);
    bool stacked = false;
    for (int64_t i = 0; i < all && !stacked; i++) stacked = mt_stack_find(mt_safetensors_get(set, i)->name);
    if (!stacked || !mt_has_experts(&o->stack)) return 0;
    mt_param *rows;
    int status = 0;
    int64_t count = mt_params_build(&rows, &o->stack, NULL);
    const mt_param *down = mt_row_find(rows, count, MT_EXPERT_DOWN);
    bool keeps = down && down->hf_stack > 0;
    for (int64_t i = 0; i < all && status == 0 && !keeps; i++) {
        const char *name = mt_safetensors_get(set, i)->name;
        const mt_stack *stack = mt_stack_find(name);
        if (stack)
            status = mt_stack_cut(set, i, stack, rows, count, o, error);
        else
            mt_tensor_rename(set, i, rows, count);
    }
    free(rows);
    mt_safetensors_sort(set);
    return status;
}
