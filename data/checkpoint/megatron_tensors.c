/* megatron_tensors.c: the place of each parameter in the matrices of a checkpoint of Megatron-LM. Megatron-Core holds
 * q, k and v as one matrix, group by group: the query heads of a group, the gates of their outputs if it has those, its
 * key head, its value head; and a gate before the other half of an MLP's first matrix. */
#include "megatron_tensors.h"

#include "../options/option_table.h"
#include "megatron_written.h"

#include <stdlib.h>
#include <string.h>

/* The part of a matrix that a parameter is. */
typedef enum mt_core_part {
    MT_CORE_WHOLE,
    MT_CORE_Q,
    MT_CORE_OUTPUT_GATE,
    MT_CORE_K,
    MT_CORE_V,
    MT_CORE_FIRST,  // of two halves
    MT_CORE_SECOND, // of two halves, or without a gate the whole
    MT_CORE_WORDS,  // the first rows: the vocabulary without its padding
} mt_core_part;

/* Names of Megatron-Core, in a layer unless they begin otherwise. Several rows of a role are names of several
 * specifications of layers, the first that is there counts. */
static const struct {
    mt_role role;
    mt_core_part part;
    const char *name;
} mt_core_names[] = {
    {MT_WORD_EMBEDDING, MT_CORE_WORDS, "embedding.word_embeddings.weight"},
    {MT_POSITION_EMBEDDING, MT_CORE_WHOLE, "embedding.position_embeddings.weight"},
    {MT_FINAL_NORM, MT_CORE_WHOLE, "decoder.final_layernorm.weight"},
    {MT_FINAL_NORM, MT_CORE_WHOLE, "decoder.final_norm.weight"}, // of hybrid models
    {MT_FINAL_NORM_BIAS, MT_CORE_WHOLE, "decoder.final_layernorm.bias"},
    {MT_FINAL_NORM_BIAS, MT_CORE_WHOLE, "decoder.final_norm.bias"},
    {MT_LM_HEAD, MT_CORE_WORDS, "output_layer.weight"},
    {MT_INPUT_NORM, MT_CORE_WHOLE, ".self_attention.linear_qkv.layer_norm_weight"},
    {MT_INPUT_NORM, MT_CORE_WHOLE, ".self_attention.in_proj.layer_norm_weight"},
    {MT_INPUT_NORM, MT_CORE_WHOLE, ".mixer.in_proj.layer_norm_weight"},
    {MT_INPUT_NORM, MT_CORE_WHOLE, ".input_layernorm.weight"},
    {MT_INPUT_NORM_BIAS, MT_CORE_WHOLE, ".self_attention.linear_qkv.layer_norm_bias"},
    {MT_INPUT_NORM_BIAS, MT_CORE_WHOLE, ".self_attention.in_proj.layer_norm_bias"},
    {MT_INPUT_NORM_BIAS, MT_CORE_WHOLE, ".mixer.in_proj.layer_norm_bias"},
    {MT_INPUT_NORM_BIAS, MT_CORE_WHOLE, ".input_layernorm.bias"},
    {MT_Q, MT_CORE_Q, ".self_attention.linear_qkv.weight"},
    {MT_Q, MT_CORE_WHOLE, ".self_attention.linear_q_proj.weight"},
    {MT_ATTENTION_GATE, MT_CORE_OUTPUT_GATE, ".self_attention.linear_qkv.weight"},
    {MT_K, MT_CORE_K, ".self_attention.linear_qkv.weight"},
    {MT_V, MT_CORE_V, ".self_attention.linear_qkv.weight"},
    {MT_Q_BIAS, MT_CORE_Q, ".self_attention.linear_qkv.bias"},
    {MT_K_BIAS, MT_CORE_K, ".self_attention.linear_qkv.bias"},
    {MT_V_BIAS, MT_CORE_V, ".self_attention.linear_qkv.bias"},
    {MT_Q_NORM, MT_CORE_WHOLE, ".self_attention.q_layernorm.weight"},
    {MT_K_NORM, MT_CORE_WHOLE, ".self_attention.k_layernorm.weight"},
    {MT_Q_A, MT_CORE_WHOLE, ".self_attention.linear_q_down_proj.weight"},
    {MT_KV_A, MT_CORE_WHOLE, ".self_attention.linear_kv_down_proj.weight"},
    {MT_Q_B, MT_CORE_WHOLE, ".self_attention.linear_q_up_proj.weight"},
    {MT_KV_B, MT_CORE_WHOLE, ".self_attention.linear_kv_up_proj.weight"},
    {MT_Q_A_NORM, MT_CORE_WHOLE, ".self_attention.linear_q_up_proj.layer_norm_weight"},
    {MT_Q_A_NORM, MT_CORE_WHOLE, ".self_attention.q_layernorm.weight"},
    {MT_KV_A_NORM, MT_CORE_WHOLE, ".self_attention.linear_kv_up_proj.layer_norm_weight"},
    {MT_KV_A_NORM, MT_CORE_WHOLE, ".self_attention.kv_layernorm.weight"},
    {MT_SINKS, MT_CORE_WHOLE, ".self_attention.core_attention.softmax_offset"},
    {MT_DELTA_Q, MT_CORE_WHOLE, ".self_attention.in_proj.weight.query"},
    {MT_DELTA_K, MT_CORE_WHOLE, ".self_attention.in_proj.weight.key"},
    {MT_DELTA_V, MT_CORE_WHOLE, ".self_attention.in_proj.weight.value"},
    {MT_DELTA_Z, MT_CORE_WHOLE, ".self_attention.in_proj.weight.z"},
    {MT_DELTA_B, MT_CORE_WHOLE, ".self_attention.in_proj.weight.beta"},
    {MT_DELTA_A, MT_CORE_WHOLE, ".self_attention.in_proj.weight.alpha"},
    {MT_CONV_Q, MT_CORE_WHOLE, ".self_attention.conv1d.weight.query"},
    {MT_CONV_K, MT_CORE_WHOLE, ".self_attention.conv1d.weight.key"},
    {MT_CONV_V, MT_CORE_WHOLE, ".self_attention.conv1d.weight.value"},
    {MT_DELTA_NORM, MT_CORE_WHOLE, ".self_attention.out_norm.weight"},
    {MT_A_LOG, MT_CORE_WHOLE, ".self_attention.A_log"},
    {MT_A_LOG, MT_CORE_WHOLE, ".mixer.A_log"},
    {MT_DT_BIAS, MT_CORE_WHOLE, ".self_attention.dt_bias"},
    {MT_DT_BIAS, MT_CORE_WHOLE, ".mixer.dt_bias"},
    {MT_MAMBA_Z, MT_CORE_WHOLE, ".mixer.in_proj.weight.z"},
    {MT_MAMBA_X, MT_CORE_WHOLE, ".mixer.in_proj.weight.x"},
    {MT_MAMBA_B, MT_CORE_WHOLE, ".mixer.in_proj.weight.B"},
    {MT_MAMBA_C, MT_CORE_WHOLE, ".mixer.in_proj.weight.C"},
    {MT_MAMBA_DT, MT_CORE_WHOLE, ".mixer.in_proj.weight.dt"},
    {MT_CONV_X, MT_CORE_WHOLE, ".mixer.conv1d.weight.x"},
    {MT_CONV_B, MT_CORE_WHOLE, ".mixer.conv1d.weight.B"},
    {MT_CONV_C, MT_CORE_WHOLE, ".mixer.conv1d.weight.C"},
    {MT_CONV_X_BIAS, MT_CORE_WHOLE, ".mixer.conv1d.bias.x"},
    {MT_CONV_B_BIAS, MT_CORE_WHOLE, ".mixer.conv1d.bias.B"},
    {MT_CONV_C_BIAS, MT_CORE_WHOLE, ".mixer.conv1d.bias.C"},
    {MT_MAMBA_NORM, MT_CORE_WHOLE, ".mixer.norm.weight"},
    {MT_MAMBA_D, MT_CORE_WHOLE, ".mixer.D"},
    {MT_O, MT_CORE_WHOLE, ".self_attention.linear_proj.weight"},
    {MT_O, MT_CORE_WHOLE, ".self_attention.out_proj.weight"},
    {MT_O, MT_CORE_WHOLE, ".mixer.out_proj.weight"},
    {MT_O_BIAS, MT_CORE_WHOLE, ".self_attention.linear_proj.bias"},
    {MT_MLP_NORM, MT_CORE_WHOLE, ".mlp.linear_fc1.layer_norm_weight"},
    {MT_MLP_NORM, MT_CORE_WHOLE, ".pre_mlp_layernorm.weight"},
    {MT_MLP_NORM_BIAS, MT_CORE_WHOLE, ".mlp.linear_fc1.layer_norm_bias"},
    {MT_MLP_NORM_BIAS, MT_CORE_WHOLE, ".pre_mlp_layernorm.bias"},
    {MT_GATE, MT_CORE_FIRST, ".mlp.linear_fc1.weight"},
    {MT_GATE, MT_CORE_WHOLE, ".mlp.linear_fc1.weight_w"},
    {MT_GATE_BIAS, MT_CORE_FIRST, ".mlp.linear_fc1.bias"},
    {MT_GATE_BIAS, MT_CORE_WHOLE, ".mlp.linear_fc1.bias_w"},
    {MT_UP, MT_CORE_SECOND, ".mlp.linear_fc1.weight"},
    {MT_UP, MT_CORE_WHOLE, ".mlp.linear_fc1.weight_v"},
    {MT_UP_BIAS, MT_CORE_SECOND, ".mlp.linear_fc1.bias"},
    {MT_UP_BIAS, MT_CORE_WHOLE, ".mlp.linear_fc1.bias_v"},
    {MT_DOWN, MT_CORE_WHOLE, ".mlp.linear_fc2.weight"},
    {MT_DOWN_BIAS, MT_CORE_WHOLE, ".mlp.linear_fc2.bias"},
    {MT_ROUTER, MT_CORE_WHOLE, ".mlp.router.weight"},
    {MT_ROUTER_BIAS, MT_CORE_WHOLE, ".mlp.router.expert_bias"},
    {MT_ROUTER_LINEAR_BIAS, MT_CORE_WHOLE, ".mlp.router.bias"},
    {MT_EXPERT_GATE, MT_CORE_FIRST, ".mlp.experts.experts.linear_fc1.weight"},
    {MT_EXPERT_GATE, MT_CORE_WHOLE, ".mlp.experts.experts.linear_fc1.weight_w"},
    {MT_EXPERT_UP, MT_CORE_SECOND, ".mlp.experts.experts.linear_fc1.weight"},
    {MT_EXPERT_UP, MT_CORE_WHOLE, ".mlp.experts.experts.linear_fc1.weight_v"},
    {MT_EXPERT_DOWN, MT_CORE_WHOLE, ".mlp.experts.experts.linear_fc2.weight"},
    {MT_SHARED_GATE, MT_CORE_FIRST, ".mlp.shared_experts.linear_fc1.weight"},
    {MT_SHARED_GATE, MT_CORE_WHOLE, ".mlp.shared_experts.linear_fc1.weight_w"},
    {MT_SHARED_UP, MT_CORE_SECOND, ".mlp.shared_experts.linear_fc1.weight"},
    {MT_SHARED_UP, MT_CORE_WHOLE, ".mlp.shared_experts.linear_fc1.weight_v"},
    {MT_SHARED_DOWN, MT_CORE_WHOLE, ".mlp.shared_experts.linear_fc2.weight"},
    {MT_SHARED_EXPERT_GATE, MT_CORE_WHOLE, ".mlp.shared_experts.gate_weight"},
    {MT_EXPERTS_IN, MT_CORE_WHOLE, ".mlp.fc1_latent_proj.weight"},
    {MT_EXPERTS_IN_BIAS, MT_CORE_WHOLE, ".mlp.fc1_latent_proj.bias"},
    {MT_EXPERTS_OUT, MT_CORE_WHOLE, ".mlp.fc2_latent_proj.weight"},
    {MT_EXPERTS_OUT_BIAS, MT_CORE_WHOLE, ".mlp.fc2_latent_proj.bias"},
    {MT_MTP_EMBEDDING_NORM, MT_CORE_WHOLE, "mtp.layers.enorm.weight"},
    {MT_MTP_HIDDEN_NORM, MT_CORE_WHOLE, "mtp.layers.hnorm.weight"},
    {MT_MTP_EMBEDDING_NORM_BIAS, MT_CORE_WHOLE, "mtp.layers.enorm.bias"},
    {MT_MTP_HIDDEN_NORM_BIAS, MT_CORE_WHOLE, "mtp.layers.hnorm.bias"},
    {MT_MTP_FINAL_NORM_BIAS, MT_CORE_WHOLE, "mtp.layers.final_layernorm.bias"},
    {MT_MTP_PROJECTION, MT_CORE_WHOLE, "mtp.layers.eh_proj.weight"},
    {MT_MTP_FINAL_NORM, MT_CORE_WHOLE, "mtp.layers.final_layernorm.weight"},
};
enum { MT_NUM_CORE_NAMES = sizeof mt_core_names / sizeof *mt_core_names };

/* The name of the layer of modules of multi-token prediction, between "mtp.layers" with its number and the row's name;
 * of hybrid models that of the layer with this half. */
static void mt_core_module_layer(char text[48], const mt_options *o, const char *name) {
    bool of_feed_forward = strncmp(name, ".mlp.", 5) == 0 || strncmp(name, ".pre_mlp_layernorm.", 19) == 0;
    if (o->hybrid_layers)
        snprintf(text, 48, ".mtp_model_layer.layers.%d", of_feed_forward && o->mtp_hybrid_layers[1]);
    else
        snprintf(text, 48, ".transformer_layer");
}

/* The matrix of a row of the names; NULL: none. */
static const mt_megatron_matrix *mt_core_find(const mt_megatron *checkpoint, const mt_param *param,
                                              mt_param_state state, const mt_options *o, const char *name) {
    char whole[192], of_layer[48] = "";
    int64_t module = param->layer - o->num_layers;
    bool in_layer = *name == '.', of_module = param->layer >= 0 && module >= 0;
    if (in_layer && of_module) mt_core_module_layer(of_layer, o, name);
    const char *begin = !in_layer ? "" : of_module ? "mtp.layers" : "decoder.layers";
    snprintf(whole, sizeof whole, "%s%s%s", begin, of_layer, name);
    int64_t layer = !in_layer && !of_module ? -1 : of_module ? module : param->layer;
    return mt_megatron_find(checkpoint, state, whole, layer, param->expert);
}

/* Sets the place of a part; returns the rows that the matrix must have. With --apply-layernorm-1p every norm of
 * Megatron-Core holds its weights minus 1, the norm of a gated delta net's output too, which is stored whole in Hugging
 * Face folders and here. */
static int64_t mt_core_place(const mt_param *param, mt_core_part part, mt_param_state state, bool halves,
                             const mt_options *o, mt_placement *place) {
    int64_t rows = param->whole_rows, d = o->kv_channels, heads = o->num_attention_heads / o->num_query_groups;
    int64_t gates = o->attention_output_gate ? heads : 0;
    *place = (mt_placement){.stride = 1, .slices = 1, .width = param->whole_cols, .groups = 1};
    place->group_rows = place->group_pitch = rows;
    if (part == MT_CORE_Q || part == MT_CORE_OUTPUT_GATE || part == MT_CORE_K || part == MT_CORE_V) {
        bool is_query = part == MT_CORE_Q || part == MT_CORE_OUTPUT_GATE;
        int64_t head = part == MT_CORE_Q             ? 0
                       : part == MT_CORE_OUTPUT_GATE ? heads
                       : part == MT_CORE_K           ? heads + gates
                                                     : heads + gates + 1;
        place->groups = o->num_query_groups, place->group_pitch = (heads + gates + 2) * d;
        place->group_rows = is_query ? heads * d : d;
        place->row = head * d;
        return place->groups * place->group_pitch;
    }
    bool is_moment = state == MT_STATE_EXP_AVG || state == MT_STATE_EXP_AVG_SQ;
    if (param->role == MT_DELTA_NORM && o->layernorm_zero_centered_gamma && !is_moment) place->shift = -1;
    if (part == MT_CORE_SECOND && halves) place->row = rows;
    if (part == MT_CORE_FIRST || (part == MT_CORE_SECOND && halves)) return 2 * rows;
    return part == MT_CORE_WORDS ? param->rows_stored : rows;
}

const mt_megatron_matrix *mt_megatron_place(const mt_megatron *checkpoint, const mt_param *param, mt_param_state state,
                                            const mt_options *o, const char *folder, mt_placement *place,
                                            mt_error *error) {
    const char *first = NULL;
    const char *option = param->rows_option ? param->rows_option : param->exists_option;
    for (int i = 0; i < MT_NUM_CORE_NAMES; i++) {
        if (mt_core_names[i].role != param->role) continue;
        if (!first) first = mt_core_names[i].name;
        const mt_megatron_matrix *matrix = mt_core_find(checkpoint, param, state, o, mt_core_names[i].name);
        if (!matrix) continue;
        mt_core_part part = mt_core_names[i].part;
        int64_t rows = mt_core_place(param, part, state, o->swiglu || o->geglu || o->quick_geglu, o, place);
        bool fits =
            matrix->cols == param->whole_cols && (part == MT_CORE_WORDS ? matrix->rows >= rows : matrix->rows == rows);
        if (fits) return matrix;
        mt_error_set(error,
                     "%s: tensor \"%s\" is [%lld, %lld] and the model's [%lld, %lld]; check %s, or take the model of "
                     "the checkpoint by --use-checkpoint-args",
                     folder, matrix->name, (long long)matrix->rows, (long long)matrix->cols, (long long)rows,
                     (long long)param->whole_cols,
                     matrix->cols != param->whole_cols && param->cols_option ? param->cols_option
                     : option                                                ? option
                                                                             : "the options of the model");
        return NULL;
    }
    if (!first)
        mt_error_set(
            error,
            "%s: the model has a parameter \"%s\", which has no place in checkpoints of Megatron-LM here; take "
            "a Hugging Face folder",
            folder, param->hf_name);
    else
        mt_error_set(error, "%s: has no tensor \"%s%s\"%s (layer %lld); check --num-layers%s%s%s", folder,
                     *first == '.' ? "decoder.layers" : "", first,
                     state == MT_STATE_WEIGHTS ? "" : " of the optimizer's state", (long long)param->layer,
                     option ? " and " : "", option ? option : "",
                     state == MT_STATE_WEIGHTS ? "" : ", or go on without it by --no-load-optim");
    return NULL;
}

/* Megatron's modules of mixers, with the names of their first and last linears. Mixers without a row are named as
 * attention. */
static const struct mt_core_mixer {
    mt_mixer_kind mixer;
    const char *module, *first, *last;
    bool of_hybrid; // in layers of --hybrid-override-pattern alone
} mt_core_mixers[] = {
    {MT_MIXER_ATTENTION, ".self_attention.", ".linear_qkv.", ".linear_proj.", false},
    {MT_MIXER_GATED_DELTA_NET, ".self_attention.", ".in_proj.", ".out_proj.", false},
    {MT_MIXER_MAMBA2, ".mixer.", ".in_proj.", ".out_proj.", true},
};

static const struct mt_core_mixer *mt_core_mixer_of(const mt_options *o, int64_t layer) {
    int row = sizeof mt_core_mixers / sizeof *mt_core_mixers - 1;
    while (row > 0 && (layer < 0 || mt_core_mixers[row].mixer != mt_layer_kind_of(o, layer).mixer)) row--;
    return &mt_core_mixers[row];
}

/* The name that Transformer Engine's layers give a role, among the role's names: norms before a linear are the
 * linear's own, unless that is latent attention or the feed-forward is experts. -1: none. */
static int mt_core_name_index(const mt_param *param, const mt_options *o) {
    const struct mt_core_mixer *mixer = mt_core_mixer_of(o, param->layer);
    if (mixer->of_hybrid && !o->hybrid_layers) return -1;
    for (int i = 0; i < MT_NUM_CORE_NAMES; i++) {
        const char *name = mt_core_names[i].name;
        bool fits = mt_core_names[i].role == param->role, of_mixer = strstr(name, mixer->module) != NULL;
        if (param->role == MT_INPUT_NORM || param->role == MT_INPUT_NORM_BIAS || param->role == MT_Q)
            fits = fits && (mt_is_latent(o) ? !strstr(name, ".linear_qkv.") && !strstr(name, ".in_proj.")
                                            : of_mixer && strstr(name, mixer->first));
        if (param->role == MT_O) fits = fits && of_mixer && strstr(name, mixer->last);
        if (param->role == MT_A_LOG || param->role == MT_DT_BIAS) fits = fits && of_mixer;
        if (param->role == MT_FINAL_NORM || param->role == MT_FINAL_NORM_BIAS)
            fits = fits && (strstr(name, ".final_norm.") != NULL) == (o->hybrid_layers != NULL);
        if (param->role == MT_MLP_NORM || param->role == MT_MLP_NORM_BIAS)
            fits = fits && (strstr(name, ".linear_fc1.") != NULL) == !mt_layer_has_experts(o, param->layer);
        if (fits) return i;
    }
    return -1;
}

/* The names of the states in Megatron-Core. A master weight has two: see mt_dist_name. */
static const char *const mt_core_states[MT_NUM_STATES] = {"", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.",
                                                          "optimizer.state.exp_avg_sq."};

/* Appends a dimension. */
static void mt_core_add_dim(mt_core_chunk *chunk, int64_t shape, int64_t first, int64_t size) {
    int64_t i = chunk->num_dims++;
    chunk->shape[i] = shape, chunk->first[i] = first, chunk->sizes[i] = size;
}

/* The rows of the tensor, and those of the part that torch_dist writes, *size from *first on, in which the parameter
 * has the place. */
static int64_t mt_core_rows(const mt_param *param, int index, mt_param_state state, const mt_options *o,
                            mt_placement *place, int64_t *first, int64_t *size) {
    mt_core_part part = mt_core_names[index].part;
    bool gated = o->swiglu || o->geglu || o->quick_geglu;
    int64_t rows = mt_core_place(param, part, state, gated, o, place);
    bool halves = part == MT_CORE_FIRST || (part == MT_CORE_SECOND && gated);
    *first = place->row, *size = rows / 2;
    if (halves)
        place->row = 0;
    else
        *first = 0, *size = rows;
    return rows;
}

mt_placement mt_core_placement(const mt_param *param, mt_param_state state, const mt_options *o) {
    mt_placement place;
    int64_t first, size;
    int index = mt_core_name_index(param, o);
    MT_CHECK(index >= 0);
    mt_core_rows(param, index, state, o, &place, &first, &size);
    return place;
}

bool mt_core_chunk_of(const mt_param *param, mt_param_state state, const mt_run_options *run, mt_core_chunk *chunk) {
    const mt_options *o = &run->stack;
    int index = mt_core_name_index(param, o);
    if (index < 0) return false;
    const char *name = mt_core_names[index].name, *freq = run->moe_layer_freq;
    bool in_layer = *name == '.', of_module = param->layer >= o->num_layers;
    bool alike = (!freq || strcmp(freq, "1") == 0) && !o->linear_layers && !o->hybrid_layers;
    char of_layer[48] = "";
    mt_placement place;
    int64_t first, size, rows = mt_core_rows(param, index, state, o, &place, &first, &size);
    *chunk = (mt_core_chunk){.num_dims = 0};
    if (in_layer && !of_module && alike) {
        snprintf(chunk->name, sizeof chunk->name, "%sdecoder.layers%s", mt_core_states[state], name);
        mt_core_add_dim(chunk, o->num_layers, param->layer, 1);
    } else if (in_layer) {
        if (of_module) mt_core_module_layer(of_layer, o, name);
        snprintf(chunk->name, sizeof chunk->name, "%s%s.%lld%s%s", mt_core_states[state],
                 of_module ? "mtp.layers" : "decoder.layers",
                 (long long)(of_module ? param->layer - o->num_layers : param->layer), of_layer, name);
    } else if (of_module) { // "mtp.layers.enorm.weight"
        snprintf(chunk->name, sizeof chunk->name, "%smtp.layers.%lld%s", mt_core_states[state],
                 (long long)(param->layer - o->num_layers), name + strlen("mtp.layers"));
    } else {
        snprintf(chunk->name, sizeof chunk->name, "%s%s", mt_core_states[state], name);
    }
    if (param->expert >= 0) mt_core_add_dim(chunk, o->num_experts, param->expert, 1);
    chunk->num_lead = chunk->num_dims;
    mt_core_add_dim(chunk, rows, first, size);
    if (param->hf_has_channel) mt_core_add_dim(chunk, 1, 0, 1);
    if (!param->is_vector) mt_core_add_dim(chunk, param->whole_cols, 0, param->whole_cols);
    return true;
}

/* Options of the model that an argument of another form holds, or mt_core_check_arguments compares, and options
 * of training alone. Any other option without an argument must have its default: Megatron-LM would build another
 * model from the arguments. */
static const size_t mt_core_other_arguments[] = {
    MT_AT(group_query_attention),
    MT_AT(linear_attention_freq),
    MT_AT(hybrid_override_pattern),
    MT_AT(mtp_hybrid_override_pattern),
    MT_AT(moe_layer_freq),
    MT_AT(stack.moe_router_group_best),
    MT_AT(stack.softmax_scale),
    MT_AT(stack.rotary_interleaved),
    MT_AT(stack.rope_scaling_type),
    MT_AT(stack.rope_scaling_factor),
    MT_AT(stack.rope_low_freq_factor),
    MT_AT(stack.rope_high_freq_factor),
    MT_AT(stack.original_max_position_embeddings),
    MT_AT(stack.yarn_beta_fast),
    MT_AT(stack.yarn_beta_slow),
    MT_AT(stack.yarn_correction_range_round_to_int),
    MT_AT(yarn_mscale),
    MT_AT(stack.yarn_mscale_all_dim),
    MT_AT(stack.yarn_attention_factor),
    MT_AT(stack.init_method_std),
    MT_AT(stack.moe_aux_loss_coeff),
    MT_AT(stack.latent_norm_epsilon),
};

/* True if the arguments describe the model whatever value this option has. */
static bool mt_core_has_argument(const mt_option *row) {
    if (row->origin == MT_OF_RUN || mt_dist_holds(row->offset)) return true;
    for (size_t i = 0; i < sizeof mt_core_other_arguments / sizeof *mt_core_other_arguments; i++)
        if (mt_core_other_arguments[i] == row->offset) return true;
    return false;
}

/* An error if the arguments would not describe the model. */
static int mt_core_check_arguments(const mt_run_options *run, mt_error *error) {
    const mt_options *o = &run->stack;
    bool is_llama3 = o->rope_scaling_type == MT_ROPE_SCALING_LLAMA3, is_latent = mt_is_latent(o);
    bool differs =
        o->rope_low_freq_factor != 1 || o->rope_high_freq_factor != 4 || o->original_max_position_embeddings != 8192;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        bool first = row->name && mt_option_of(row->offset) == row;
        if (!first || mt_core_has_argument(row) || mt_option_is_default(run, row)) continue;
        return mt_error_set(error,
                            "--ckpt-format torch_dist: arguments of Megatron-LM do not hold --%s, and its model would "
                            "be another one; leave --ckpt-format out",
                            row->name);
    }
    if (o->rope_scaling_type == MT_ROPE_SCALING_YARN && (!is_latent || !o->yarn_correction_range_round_to_int))
        return mt_error_set(error,
                            "--ckpt-format torch_dist: arguments of Megatron-LM hold --rope-scaling-type yarn of "
                            "latent attention alone, with a range of whole channels; leave --ckpt-format out");
    if (is_latent && (is_llama3 || o->rope_scaling_type == MT_ROPE_SCALING_LINEAR || o->softmax_scale > 0))
        return mt_error_set(error, "--ckpt-format torch_dist: latent attention of Megatron-Core has neither "
                                   "--softmax-scale nor RoPE scaled other than by yarn; leave --ckpt-format out");
    if (is_latent && o->position_embedding_type == MT_POSITION_NONE)
        return mt_error_set(error,
                            "--ckpt-format torch_dist: latent attention of Megatron-Core has RoPE in any case, and "
                            "this model has none; leave --ckpt-format out");
    if (is_latent && o->qk_layernorm && o->latent_norm_epsilon > 0 && o->latent_norm_epsilon != o->norm_epsilon)
        return mt_error_set(error,
                            "--ckpt-format torch_dist: norms of Megatron-Core add one epsilon, and this model's norms "
                            "of latents add %g, the others %g; leave --ckpt-format out",
                            o->latent_norm_epsilon, o->norm_epsilon);
    if (o->attention_output_bias != run->add_bias_linear || o->mlp_bias != run->add_bias_linear)
        return mt_error_set(error,
                            "--ckpt-format torch_dist: arguments of Megatron-LM hold biases of all linear layers, "
                            "or of q, k and v alone; leave --ckpt-format out");
    int64_t best = o->moe_router_num_groups > 1 ? o->moe_router_topk / o->moe_router_group_topk : 0;
    if (best > 0 && o->moe_router_group_best > 0 && o->moe_router_group_best != best)
        return mt_error_set(error,
                            "--ckpt-format torch_dist: Megatron-LM scores a group by its best %lld experts, and this "
                            "model by %lld; leave --ckpt-format out",
                            (long long)best, (long long)o->moe_router_group_best);
    if (is_llama3 && differs)
        return mt_error_set(error,
                            "--ckpt-format torch_dist: Megatron-LM's RoPE scaling of Llama 3.1 has the factors 1 and 4 "
                            "and 8192 positions, not %g, %g and %lld; leave --ckpt-format out",
                            o->rope_low_freq_factor, o->rope_high_freq_factor,
                            (long long)o->original_max_position_embeddings);
    return 0;
}

/* True if a state of the optimizer is stored with a scale. */
static bool mt_core_has_scales(const mt_options *o) {
    return o->exp_avg_dtype >= MT_OPTIMIZER_FP16 || o->exp_avg_sq_dtype >= MT_OPTIMIZER_FP16 ||
           o->main_params_dtype == MT_MAIN_PARAMS_FP16;
}

int mt_core_check(const mt_run_options *run, bool states, mt_error *error) {
    mt_param *rows;
    int64_t count = mt_params_build(&rows, &run->stack, NULL);
    int status = mt_core_check_arguments(run, error);
    if (status == 0 && mt_is_latent(&run->stack) && !run->stack.rotary_interleaved)
        status = mt_error_set(error, "--ckpt-format torch_dist: latent attention of Megatron-Core rotates neighbouring "
                                     "channels; give --rotary-interleaved, or leave --ckpt-format out");
    if (status == 0 && run->stack.hf_family == MT_HF_MIMO && run->stack.mtp_num_layers > 0)
        status =
            mt_error_set(error, "--ckpt-format torch_dist: MiMo's multi-token prediction joins its inputs in another "
                                "order than Megatron-Core's; leave --ckpt-format out");
    if (status == 0 && states && mt_core_has_scales(&run->stack))
        status =
            mt_error_set(error, "--ckpt-format torch_dist: states of the optimizer with scales are not written; take "
                                "fp32 or bf16 as --exp-avg-dtype, --exp-avg-sq-dtype and --main-params-dtype, give "
                                "--no-save-optim, or leave --ckpt-format out");
    if (status == 0 && states && run->stack.decoupled_lr > 0)
        status =
            mt_error_set(error, "--ckpt-format torch_dist: the optimizer's groups of --decoupled-lr are not written; "
                                "give --no-save-optim, or leave --ckpt-format out");
    for (int64_t i = 0; i < count && status == 0; i++)
        if (mt_core_name_index(&rows[i], &run->stack) < 0)
            status = mt_error_set(error,
                                  "--ckpt-format torch_dist: the model has a parameter \"%s\", which has no place in "
                                  "checkpoints of Megatron-LM here; leave the option out",
                                  rows[i].hf_name);
        else if (states && rows[i].trained && rows[i].optimizer != MT_OPTIMIZER_ADAMW)
            status =
                mt_error_set(error,
                             "--ckpt-format torch_dist: the optimizer's state is written for --optimizer adam, not "
                             "%s; give --no-save-optim, or leave the option out",
                             mt_optimizer_name(rows[i].optimizer));
    free(rows);
    return status;
}

int mt_megatron_first_state(const mt_megatron *checkpoint, bool weights) {
    if (weights) return MT_STATE_WEIGHTS;
    for (int64_t i = 0; i < mt_megatron_count(checkpoint); i++)
        if (mt_megatron_get(checkpoint, i)->state == MT_STATE_MASTER) return MT_STATE_MASTER;
    return MT_STATE_EXP_AVG;
}

/* True for tensors that hold no weights: counts of tokens, tables of RoPE. */
static bool mt_matrix_is_harmless(const mt_megatron_matrix *matrix) {
    static const char *const parts[] = {"_extra_state", "inv_freq", "tokens_per_expert", "global_tokens",
                                        "max_attn_logit"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(matrix->name, parts[i])) return true;
    return false;
}

/* Each matrix must have a parameter: to leave one out silently would load another model. */
static int mt_megatron_check_unused(const mt_megatron *checkpoint, const bool *used, const mt_options *o,
                                    const char *folder, mt_error *error) {
    for (int64_t i = 0; i < mt_megatron_count(checkpoint); i++) {
        const mt_megatron_matrix *matrix = mt_megatron_get(checkpoint, i);
        if (used[i] || mt_matrix_is_harmless(matrix)) continue;
        if (strncmp(matrix->name, "mtp.", 4) == 0 && o->mtp_num_layers == 0) continue; // as in Hugging Face folders
        return mt_error_set(error,
                            "%s: tensor \"%.120s\" (layer %lld) has no place in the model that the options describe; "
                            "check --num-layers and the options for biases, norms and experts, or take the model of "
                            "the checkpoint by --use-checkpoint-args",
                            folder, matrix->name, (long long)matrix->layer);
    }
    return 0;
}

int mt_megatron_check(const mt_megatron *checkpoint, bool weights, const mt_options *o, const char *folder,
                      mt_error *error) {
    mt_param *rows;
    int64_t count = mt_params_build(&rows, o, NULL);
    bool *used = mt_calloc(mt_max(mt_megatron_count(checkpoint), 1));
    int status = 0, first = mt_megatron_first_state(checkpoint, weights);
    for (int64_t i = 0; i < count; i++) {
        if (mt_param_is_adapter(&rows[i]) || (!weights && !rows[i].trained)) continue;
        for (int state = first; state < mt_stem_end(weights, &rows[i]) && status == 0; state++) {
            mt_placement place;
            const mt_megatron_matrix *matrix =
                mt_megatron_place(checkpoint, &rows[i], (mt_param_state)state, o, folder, &place, error);
            if (matrix)
                used[matrix - mt_megatron_get(checkpoint, 0)] = true;
            else
                status = -1;
        }
    }
    if (status == 0 && weights) status = mt_megatron_check_unused(checkpoint, used, o, folder, error);
    free(used);
    free(rows);
    return status;
}
