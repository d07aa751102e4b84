/* role_sizes.c: layouts of models beside the one that trains. */
#include "role_sizes.h"

#include "../base/file.h"

mt_model_role_sizes mt_model_role_sizes_of_generator(const mt_run_options *o) {
    int64_t tensor = o->rollout_tensor_model_parallel_size, expert = o->rollout_expert_model_parallel_size;
    return tensor > 0 ? (mt_model_role_sizes){tensor, 1, expert, 1, .whole = true} : (mt_model_role_sizes){0};
}

mt_model_role_sizes mt_model_role_sizes_of_teacher(const mt_run_options *o) {
    return (mt_model_role_sizes){.tensor = o->teacher_tensor_model_parallel_size,
                                 .pipeline = o->teacher_pipeline_model_parallel_size,
                                 .expert = o->teacher_expert_model_parallel_size};
}

mt_model_role_sizes mt_model_role_sizes_of_reference(const mt_run_options *o) {
    return (mt_model_role_sizes){.tensor = o->ref_tensor_model_parallel_size,
                                 .pipeline = o->ref_pipeline_model_parallel_size,
                                 .expert = o->ref_expert_model_parallel_size};
}

mt_model_role_sizes mt_model_role_sizes_of_critic(const mt_run_options *o) {
    return (mt_model_role_sizes){.tensor = o->critic_tensor_model_parallel_size,
                                 .pipeline = o->critic_pipeline_model_parallel_size,
                                 .expert = o->critic_expert_model_parallel_size,
                                 .trains = true};
}

mt_model_role_sizes mt_model_role_sizes_of_reward(const mt_run_options *o) {
    return (mt_model_role_sizes){.tensor = o->reward_tensor_model_parallel_size,
                                 .pipeline = o->reward_pipeline_model_parallel_size,
                                 .expert = o->reward_expert_model_parallel_size};
}

/* True if a size is not given, or is the present one. */
static bool is_kept(int64_t size, int64_t present) {
    return size == 0 || size == present;
}

bool mt_model_role_sizes_apply(mt_run_options *o, mt_model_role_sizes sizes) {
    bool experts_kept = o->stack.num_experts == 0 || is_kept(sizes.expert, o->stack.expert_model_parallel_size);
    bool sharded = sizes.whole && o->stack.data_parallel_sharding_strategy == MT_SHARD_PARAMS;
    if (is_kept(sizes.tensor, o->stack.tensor_model_parallel_size) &&
        is_kept(sizes.pipeline, o->stack.pipeline_model_parallel_size) && experts_kept &&
        is_kept(sizes.context, o->stack.context_parallel_size) && !sharded)
        return false;
    if (sizes.tensor > 0) o->stack.tensor_model_parallel_size = sizes.tensor;
    if (sizes.pipeline > 0) o->stack.pipeline_model_parallel_size = sizes.pipeline;
    o->stack.context_parallel_size = mt_max(sizes.context, 1);
    o->stack.expert_model_parallel_size = o->stack.num_experts > 0 ? mt_max(sizes.expert, 1) : 1;
    o->stack.expert_tensor_parallel_size = 0;               // derived
    bool routes = sizes.trains && o->stack.num_experts > 0; // each tensor-parallel rank routes its own tokens
    o->stack.sequence_parallel = (o->stack.sequence_parallel || routes) && o->stack.tensor_model_parallel_size > 1;
    o->stack.tp_comm_overlap = o->stack.distribute_saved_activations = o->stack.dynamic_context_parallel = false;
    o->stack.cp_comm_type = MT_CP_P2P, o->hierarchical_context_parallel_sizes.count = 0;
    if (!sizes.trains) {
        o->stack.data_parallel_sharding_strategy = MT_NO_SHARD;
        o->use_distributed_optimizer = o->stack.overlap_grad_reduce = o->stack.overlap_param_gather =
            o->stack.fp8_param_gather = false;
    }
    o->pipeline_model_parallel_layout = o->stack.pipeline_letters = NULL;
    o->stack.num_virtual_stages_per_pipeline_rank = 1, o->num_layers_per_virtual_pipeline_stage = 0;
    o->stack.microbatch_group_size_per_virtual_pipeline_stage = 0, o->stack.pipeline_schedule = MT_SCHEDULE_1F1B;
    o->stack.decoder_first_pipeline_num_layers = o->stack.decoder_last_pipeline_num_layers = 0;
    o->stack.account_for_embedding_in_pipeline_split = o->stack.account_for_loss_in_pipeline_split = false;
    o->stack.global_batch_size = o->gradient_accumulation_steps = o->rampup_batch_size.count = 0; // the run's batches
    return true;
}

bool mt_options_refer_to_base(const mt_run_options *o) {
    mt_run_options apart = *o;
    bool is_base = !o->ref_load || (o->load && mt_path_same(o->ref_load, o->load));
    return o->stack.lora_rank > 0 && is_base && !mt_model_role_sizes_apply(&apart, mt_model_role_sizes_of_reference(o));
}
