/* upcycle.c: a model with experts that begins as a dense one. */
#include "upcycle.h"

#include <math.h>

mt_options mt_upcycle_dense(const mt_run_options *options) {
    mt_options dense = options->stack;
    dense.num_experts = dense.moe_ffn_hidden_size = 0;
    dense.moe_layers = NULL;
    dense.moe_router_linear_bias = dense.moe_router_enable_expert_bias = dense.moe_router_quantile_bias = false;
    dense.moe_use_upcycling = false;
    dense.hf_family = options->upcycled_family;
    return dense;
}

/* The dense MLP's role that an expert's matrix begins as; any other role is its own. */
static mt_role mt_upcycle_role(mt_role role) {
    return role == MT_EXPERT_GATE ? MT_GATE : role == MT_EXPERT_UP ? MT_UP : role == MT_EXPERT_DOWN ? MT_DOWN : role;
}

const mt_param *mt_upcycle_source(const mt_param *rows, int64_t count, const mt_param *param) {
    mt_role role = mt_upcycle_role(param->role);
    for (int64_t i = 0; i < count; i++)
        if (rows[i].role == role && rows[i].layer == param->layer) return &rows[i];
    return NULL;
}

int64_t mt_upcycle_part(const mt_options *options, const mt_param *param) {
    return mt_upcycle_role(param->role) == param->role ? 0 : param->expert % options->moe_upcycling_granularity;
}

/* With the softmax over all E experts, each has the weight 1 / E of equal logits, and k of them are summed; over the k
 * chosen ones it is 1 / k. A copy has G parts, each of 1 / G of the channels. */
float mt_upcycle_factor(const mt_options *o, const mt_param *param) {
    if (mt_upcycle_role(param->role) == param->role) return 1;
    double G = (double)o->moe_upcycling_granularity, k = (double)o->moe_router_topk, E = (double)o->num_experts;
    double scale = o->moe_router_pre_softmax ? E * G / k : G;
    return (float)pow(scale, mt_activation_rows[mt_options_activation(o)].gated || o->squared_relu ? 1.0 / 3 : 1.0 / 2);
}
